"""Companion files: what of a checkpoint, besides its weights, goes along into a new one.

In: the paths of its files. Out: for each the reason why it stays behind, or the `Companion` that is
copied bit for bit. `LEFT` is the one table of this; a file that it does not name is copied, unless
it is a Git LFS pointer or a link out of the folder, which `SourceFiles.listing` refuses.

The model card is one of them: `front_matter` reads its metadata.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from beamq.errors import CheckpointError, counted
from beamq.io.files import parse_yaml, read_start
from beamq.io.safetensors_header import few
from beamq.units import show_bytes

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".ckpt", ".h5", ".msgpack")
LARGE_BYTES = 50_000_000
MAX_CARD_BYTES = 1 << 18  # of which the front matter is at most `files.MAX_YAML`

WRITTEN_ANEW = "written anew"
LEFT: dict[str, tuple[str, ...]] = {
    WRITTEN_ANEW: ("/config.json", "/hf_quant_config.json", "/beamq.json", "/beamq-*"),
    "weights": (
        *(f"*{suffix}" for suffix in WEIGHT_SUFFIXES), "*.index.json", "*.onnx", "*.onnx_data",
        "*.onnx.data", "*.tflite", "*.mlmodel", "*.npz", "*.keras", "*.engine", "*.distcp",
        "*.ggml", "*.nemo", "*.ot", "*.pdparams", "*.pt2",
    ),
    "pickles": ("*.pkl", "*.pickle", "*.joblib", "*.dill", "*.cloudpickle"),
    "bytecode": ("*.pyc", "*.pyo", "__pycache__/*"),
    "of an adapter": ("adapter_config.json",),
    "of another quantization": (
        "quantize_config.json", "quant_config.json", "quantization_config.json",
    ),
    "a log or state of training": (
        "*.log", "*tfevents*", "nohup.out", "slurm-*.out", "trainer_state.json",
        "zero_to_fp32.py", "wandb/*",
    ),
    "temporary": (
        "*.partial", "*.incomplete", "*.part", "*.crdownload", "*.aria2", "*.tmp", "*.temp",
        "*.bak", "*.backup", "*.orig", "*.old", "*.swp", "*~",
    ),
    "may be a secret": (
        "id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", "*.pem", "*.key", "*.ppk", "*.p12",
        "*.pfx", "*.kdbx", "*.env", "credentials*", "secrets.*", "*api_key*",
        "service_account*.json", "kaggle.json", "hf_token*", "token", "token.txt",
    ),
}  # fmt: skip
"""Why a file stays behind -> its names in lower case. A pattern is for the name alone, with "/" at
its end for a folder above it, with "/" in front for the whole path. The first match counts."""


def reason_left(file: str) -> str | None:
    """Why a file stays behind; None if it goes along. Hidden files are not asked about."""
    path = file.lower()
    *folders, name = path.split("/")
    for why, patterns in LEFT.items():
        for pattern in patterns:
            if pattern.endswith("/*"):
                found = pattern[:-2] in folders
            else:
                found = fnmatchcase(f"/{path}" if pattern.startswith("/") else name, pattern)
            if found:
                return why
    return None


def travels(file: str) -> bool:
    """Whether a reader may need the file besides the weights: it is copied or written anew."""
    return not hidden(file) and reason_left(file) in (None, WRITTEN_ANEW)


def hidden(file: str) -> bool:
    """Whether a file or a folder above it has a name that begins with a dot."""
    return any(part.startswith(".") for part in file.split("/"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Companion:
    """A file that is copied along: `source` and `target` are relative to the folders."""

    source: str
    target: str
    nbytes: int


_CARD = re.compile(r"readme((?:\.source)*)\.md", re.IGNORECASE)
_LICENCE = re.compile(r"(model[-_ ]?)?(licen[cs]e|copying)([-_. ][^/]*)?", re.IGNORECASE)


def card_name(files: Iterable[str]) -> str | None:
    """The model card among the files at the top of a checkpoint, in capitals or not."""
    found = [file for file in files if file.lower() == "readme.md"]
    return max(found, key="README.md".__eq__, default=None)


def licence_file(files: Iterable[str]) -> str | None:
    """The file at the top of a checkpoint that holds the licence's text."""
    found = [file for file in files if _LICENCE.fullmatch(file) and travels(file)]
    return min(found, key=len, default=None)


def companion_files(listing: Mapping[str, int]) -> tuple[Companion, ...]:
    """The files to copy: tokenizer, templates, licence, code and sub-folders.

    README.md becomes README.source.md, and a README.source.md that the source has from its own
    source README.source.source.md.
    """
    card = card_name(listing)
    return tuple(
        Companion(source=file, target=_target(file, card), nbytes=nbytes)
        for file, nbytes in listing.items()
        if not hidden(file) and reason_left(file) is None
    )


def _target(file: str, card: str | None) -> str:
    found = _CARD.fullmatch(file)
    if found is None or (not found[1] and file != card):
        return file
    return f"README{found[1]}.source.md"


def restored_name(companion: Companion) -> str | None:
    """The name that a file of a quantized folder had in its source; None if it had none there."""
    card = _CARD.fullmatch(companion.source)
    if card is None or companion.target == companion.source:
        return companion.target
    return f"README{card[1].removesuffix('.source')}.md" if card[1] else None


def file_notes(listing: Mapping[str, int], own: Iterable[str]) -> tuple[str, ...]:
    """What is left behind and why, and what is large; `own` are the checkpoint's shards."""
    left: dict[str, list[str]] = {}
    for file in listing:
        why = None if hidden(file) or file in own else reason_left(file)
        if why not in (None, WRITTEN_ANEW) and not file.lower().endswith(".index.json"):
            left.setdefault(str(why), []).append(file)
    notes = []
    if left:
        count = counted(sum(map(len, left.values())), "file is", "files are")
        shown = "; ".join(f"{few(files)} ({why})" for why, files in left.items())
        notes.append(f"{count} not copied: {shown}")
    if large := [each for each in companion_files(listing) if each.nbytes >= LARGE_BYTES]:
        shown = few([f"{each.source} ({show_bytes(each.nbytes)})" for each in large])
        notes.append(f"{counted(len(large), 'large file is', 'large files are')} copied: {shown}")
    return tuple(notes)


def front_matter(card: Path) -> tuple[dict[str, Any], str | None]:
    """The YAML that a card begins with, {} where it has none, and why it could not be read."""
    from huggingface_hub.repocard import REGEX_YAML_BLOCK  # the Hub's own rule

    try:
        raw = read_start(card, MAX_CARD_BYTES)
        wide = raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        text = raw.decode("utf-16" if wide else "utf-8-sig", "replace")
        found = REGEX_YAML_BLOCK.search(text)
        if found is None:
            begun = re.match(r"\s*---\s*[\r\n]", text)
            return {}, "it begins with --- but no other such line follows" if begun else None
        parsed = parse_yaml(found[2])
    except CheckpointError as fault:
        return {}, str(fault)
    except ValueError as fault:
        return {}, f"its front matter is not valid YAML: {fault}"
    return (parsed, None) if isinstance(parsed, dict) else ({}, None)
