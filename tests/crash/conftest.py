"""Processes to be killed, and what undisturbed ones make of the same input."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.harness import Reference, Zygote, dequantize_args, digests, quantize_args


@pytest.fixture(scope="package")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """Forks commands that need no torch."""
    started = Zygote(tmp_path_factory.mktemp("zygote"))
    yield started
    started.close()


@pytest.fixture(scope="package")
def torch_zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """Forks commands with torch imported."""
    started = Zygote(tmp_path_factory.mktemp("torch-zygote"), "torch")
    yield started
    started.close()


@pytest.fixture(scope="package")
def small(beam_nano: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nano with few companions, one of them in a sub-folder."""
    folder = tmp_path_factory.mktemp("small") / "source"
    (folder / "code" / "deep").mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "tokenizer_config.json"):
        shutil.copy(beam_nano / name, folder / name)
    (folder / "code" / "deep" / "tool.py").write_text("print()\n")
    return folder


@pytest.fixture(scope="package")
def quantized(zygote: Zygote, small: Path, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """An undisturbed quantization: folder and digests."""
    output = tmp_path_factory.mktemp("quantized") / "out"
    ended = zygote.run(*quantize_args(small, output))
    assert ended.code == 0, ended.err
    return output, digests(output)


@pytest.fixture(scope="package")
def decoded(
    zygote: Zygote, quantized: Reference, tmp_path_factory: pytest.TempPathFactory
) -> Reference:
    """An undisturbed decoding of it."""
    output = tmp_path_factory.mktemp("decoded") / "out"
    ended = zygote.run(*dequantize_args(quantized[0], output))
    assert ended.code == 0, ended.err
    return output, digests(output)
