"""The options of `calibrate`.

Imports no torch and no NumPy: the command line reads its flags from here.

Defaults by device, where neither samples nor sequence length is given:

    GPU    256 samples of 2,048 tokens (524,288), what public NVFP4 checkpoints are calibrated on
    CPU    128 samples of   512 tokens  (65,536), so that a small Beam takes seconds

and never longer samples than the model's `max_position_embeddings`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from beamq.devices import check_device_name
from beamq.errors import UsageError
from beamq.options import Flag, option

if TYPE_CHECKING:
    import torch

EXPERTS = ("routed", "all")
DTYPES = ("bfloat16", "float32")
DEFAULT_SIZE = {"cuda": (256, 2048), "cpu": (128, 512)}

DATA = Flag(
    "Text: a preset (general, code, stdlib), a file, a folder, .jsonl, .parquet or a dataset"
    " id; D:0.3 gives it weight 0.3. May be repeated.",
    metavar="D",
    shown="general above 20B parameters, else stdlib",
    many=True,
    also="str | Path | Sequence[Path]",
)
SAMPLES = Flag(
    "Number of rows of tokens.", type=int, at_least=1, at_most=10**9, shown="256; 128 on a CPU"
)
SEQUENCE_LENGTH = Flag("Tokens in a row.", type=int, at_least=1, shown="2048; 512 on a CPU")
SEED = Flag("Seed for the order of the data.", type=int, shown="0")
EXPERTS_MODE = Flag(
    "Tokens to calibrate each expert on: those routed to it, or all.",
    choices=EXPERTS,
    shown="routed",
)
DTYPE = Flag("Data type of activations.", choices=DTYPES, shown="bfloat16", also="torch.dtype")
DEVICE = Flag(
    "auto (a GPU where it helps), cpu, cuda or cuda:N.",
    also="torch.device",
    check=check_device_name,
)


def check_gemm(name: str) -> None:
    """Raise `UsageError` for a back end that does not exist."""
    from beamq.model.gemm.select import select_gemm  # torch

    select_gemm(name)


GEMM = Flag("GEMM back end, as auto or reference.", keyword_only=True, check=check_gemm)
WORKERS = Flag("Number of threads.", type=int, at_least=1, at_most=1024, shown="usable cores")
CACHE_SIZE = Flag(
    "Disk limit for source shards, where the source is on the Hub.", size=True, keyword_only=True
)
DEVICE_MEMORY = Flag(
    "Memory limit of the forward pass, such as 20GB.",
    metavar="SIZE",
    size=True,
    shown="what a GPU has free",
)
RESUME = Flag("Continue an earlier run that was stopped.")
OVERWRITE = Flag("Replace existing output.")


@dataclass(frozen=True, kw_only=True)
class CalibrationOptions:
    """How to calibrate.

    `data` are `--data` specs (none: the default text). `experts` "all" shows every expert every
    token, for statistics only. `dtype` is that of activations; `device` "auto" is the GPU where
    there is one, and `gemm` "auto" the fastest that works there. `max_device_memory` is in bytes
    (None: what is free on a GPU, no limit on a CPU), and so is `cache_bytes`, the largest part of a
    source on the Hub that is on disk at a time.
    """

    data: Sequence[str] = option((), DATA)
    samples: int | None = option(None, SAMPLES)
    sequence_length: int | None = option(None, SEQUENCE_LENGTH)
    seed: int = option(0, SEED)
    experts: Literal["routed", "all"] = option("routed", EXPERTS_MODE)
    dtype: str = option("bfloat16", DTYPE)
    device: str = option("auto", DEVICE)
    gemm: str = option("auto", GEMM)
    max_device_memory: int | None = option(None, DEVICE_MEMORY)
    cache_bytes: int = option(100_000_000_000, CACHE_SIZE)
    resume: bool = option(False, RESUME)
    overwrite: bool = option(False, OVERWRITE)

    def size(self, device_type: str, config: Mapping[str, Any]) -> tuple[int, int]:
        """(samples, sequence length) on a device, for a model's config.json."""
        samples, length = DEFAULT_SIZE.get(device_type, DEFAULT_SIZE["cpu"])
        longest = config.get("max_position_embeddings")
        if not isinstance(longest, int) or longest < 1:
            longest = None
        if self.sequence_length is not None:
            length = self.sequence_length
            if longest is not None and length > longest:
                raise UsageError(
                    f"sequence length {length:,} is beyond the model's max_position_embeddings"
                    f" ({longest:,})"
                )
        elif longest is not None:
            length = min(length, longest)
        return self.samples or samples, length

    def recorded(self) -> dict[str, str]:
        """The options, besides the data, that change the statistics."""
        return {"--experts": self.experts, "--dtype": self.dtype}


class TextKeywords(TypedDict, total=False):
    """Keywords of every call that runs text through a model."""

    data: Sequence[str] | str | Path | Sequence[Path]
    samples: int | None
    sequence_length: int | None
    device: str | torch.device
