"""The options of `compare` and `sensitivity`. Imports no torch and no NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from beamq.calib.options import DATA, DEVICE, DTYPE, SAMPLES, SEED, SEQUENCE_LENGTH, check_gemm
from beamq.errors import UsageError
from beamq.options import option

if TYPE_CHECKING:
    import torch
    from numpy import int64
    from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """How to compare.

    `data` are `--data` specs (none: the default evaluation text); `input_ids` [S, T] takes their
    place, for tokens made elsewhere. `dtype` ("float32" or "bfloat16") is that of activations,
    `gemm` the back end ("weights-only" leaves activations unquantized). None is the default of the
    device.
    """

    data: Sequence[str] = option((), DATA)
    samples: int | None = option(None, replace(SAMPLES, shown="64; 16 on a CPU"))
    sequence_length: int | None = option(None, replace(SEQUENCE_LENGTH, at_least=2))
    seed: int = option(0, SEED)
    input_ids: NDArray[int64] | torch.Tensor | Sequence[Sequence[int]] | None = option(
        None, "Token ids [S, T], in the place of data.", keyword_only=True
    )
    dtype: str | None = option(None, replace(DTYPE, shown="bfloat16; float32 on a CPU"))
    device: str = option("auto", DEVICE)
    gemm: str | None = option(
        None,
        "GEMM back end, as auto or reference; weights-only leaves activations unquantized.",
        shown="auto; reference on a CPU",
        check=check_gemm,
    )

    def __post_init__(self) -> None:
        if self.input_ids is not None and (self.data or self.samples or self.sequence_length):
            raise UsageError(
                "input_ids takes the place of data, samples and sequence_length; leave them out"
            )


@dataclass(frozen=True, kw_only=True)
class SensitivityOptions:
    """How to measure; see `CompareOptions`."""

    data: Sequence[str] = option((), DATA)
    samples: int | None = option(None, replace(SAMPLES, shown="8"))
    sequence_length: int | None = option(
        None, replace(SEQUENCE_LENGTH, at_least=2, shown="1024; 256 on a CPU")
    )
    seed: int = option(0, SEED)
    dtype: str | None = option(None, replace(DTYPE, shown="bfloat16; float32 on a CPU"))
    device: str = option("auto", DEVICE)
    gemm: str = option(
        "reference",
        "GEMM back end; weights-only leaves activations unquantized.",
        check=check_gemm,
    )
