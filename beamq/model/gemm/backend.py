"""Weights of linears, and the two interfaces that products of them go through.

`Gemm` is what the forward pass calls. `ReferenceGemm` (reference.py) implements it anywhere;
`SelectedGemm` (select.py) sends each operation to the best back end of a device.

`GemmBackend` is one set of GPU kernels:

    triton     triton_gemm.py: beamq's own grouped kernel; NVFP4 by exact emulation in BF16
    cutlass    library_gemm.py: torch's CUTLASS kernels: FP8 on sm_90, NVFP4 on sm_100 and sm_103
    cublaslt   library_gemm.py: torch's cuBLASLt: dense linears; FP8 experts one by one
    quack      library_gemm.py: an optional package: NVFP4 on sm_120 and sm_121

`swiglu` stands between two linears, fused into them by back ends that can.

Dimensions are those of `beamq.model`: T tokens, S rows sorted by expert, N outputs, K inputs,
E experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

import torch
import torch.nn.functional as F

from beamq import devices
from beamq.errors import TensorError

OPS = ("bf16-grouped", "fp8-dense", "fp8-grouped", "nvfp4-dense", "nvfp4-grouped")


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseWeight:
    """`w_NK` [N, K] (experts: [E, N, K]) in the activation dtype."""

    w_NK: torch.Tensor

    def expert(self, index: int | slice | None) -> DenseWeight:
        """View of one expert, or of a range of experts; None adds an axis E = 1."""
        return DenseWeight(w_NK=self.w_NK[index])


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Weight:
    """`codes` F8_E4M3 [N, K] and `scale` F32 [N, 1], or both with a leading E axis.

    value = code * scale.
    """

    codes: torch.Tensor
    scale: torch.Tensor

    def expert(self, index: int | slice | None) -> Fp8Weight:
        """View of one expert, or of a range of experts; None adds an axis E = 1."""
        return Fp8Weight(codes=self.codes[index], scale=self.scale[index])


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFp8Weight:
    """`codes` F8_E4M3 [N, K] and a `scale` for each `group` columns of a row, [N, K / group]
    rounded up; or both with a leading E axis.

    value = code * scale. MXFP8: U8 bytes for 32 columns, 2^(byte - 127). Blocks of 128 x 128: F32
    for 128 columns, the same in all rows of a block.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    group: int

    def expert(self, index: int | slice | None) -> GroupFp8Weight:
        """View of one expert, or of a range of experts; None adds an axis E = 1."""
        return replace(self, codes=self.codes[index], scale=self.scale[index])


@dataclass(frozen=True, slots=True, kw_only=True)
class Nvfp4Weight:
    """`codes` U8 [N, K/2] (low nibble = even k), `block_scale` F8_E4M3 [N, K/16] and `global_scale`
    F32 [N, 1], or all three with a leading E axis. value = code * block_scale * global_scale.

    `global_scale` repeats, for each row, the `weight_scale_2` of the linear that the row came from.
    `input_scale` F32 [] is the activations' global scale, the largest of all fused linears and
    experts. It is None if the checkpoint has none; then only `weights-only` can multiply.
    """

    codes: torch.Tensor
    block_scale: torch.Tensor
    global_scale: torch.Tensor
    input_scale: torch.Tensor | None

    def expert(self, index: int | slice | None) -> Nvfp4Weight:
        """View of one expert, or of a range of experts; None adds an axis E = 1."""
        return replace(
            self,
            codes=self.codes[index],
            block_scale=self.block_scale[index],
            global_scale=self.global_scale[index],
        )


LinearWeight = DenseWeight | Fp8Weight | GroupFp8Weight | Nvfp4Weight


def stored(weight: LinearWeight) -> torch.Tensor:
    """The weight's values or codes: [N, K] or [N, K/2], experts with a leading E."""
    return weight.w_NK if isinstance(weight, DenseWeight) else weight.codes


def static_scale(input_scale: torch.Tensor | None) -> torch.Tensor:
    """The scale itself. Raises `TensorError` if it is None."""
    if input_scale is None:
        raise TensorError(
            "NVFP4 weights have no input_scale, so activations cannot be quantized;"
            " calibrate the checkpoint, or use gemm='weights-only'"
        )
    return input_scale


@dataclass(frozen=True, slots=True)
class Groups:
    """Which rows each expert multiplies: rows offsets[e]:offsets[e+1] of `x[rows]`.

    `offsets` has E + 1 entries and starts with 0; S = offsets[-1]. `rows` int64 [S] picks rows of
    the activations; None takes them as they are. It is not applied in advance, so that each token
    can be quantized once rather than once for each expert that reads it.
    """

    offsets: Sequence[int]
    rows: torch.Tensor | None = None

    def busy(self) -> Iterator[tuple[int, int, int]]:
        """(expert, first row, end row) of the experts that have rows."""
        for expert in range(len(self.offsets) - 1):
            low, high = self.offsets[expert], self.offsets[expert + 1]
            if low < high:
                yield expert, low, high


CHUNK_ELEMENTS = 1 << 25  # FP32 temporaries of elementwise work stay near 128 MiB


def swiglu(gate_up_SN: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up in FP32, rounded once; columns [gate | up]."""
    if devices.serves(gate_up_SN):
        from beamq.formats.kernels import gpu  # Triton

        return gpu.swiglu(gate_up_SN)
    rows, width = gate_up_SN.shape
    out = gate_up_SN.new_empty(rows, width // 2)
    step = max(1, CHUNK_ELEMENTS // width)
    for start in range(0, rows, step):
        gate, up = gate_up_SN[start : start + step].chunk(2, dim=-1)
        out[start : start + step] = F.silu(gate.float()).mul_(up)
    return out


class Gemm(Protocol):
    """Multiplies activations by weights of every format. Products have the activations' dtype."""

    def linear(self, x_TK: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
        """y = x w^T, [T, N]."""

    def grouped(self, x_TK: torch.Tensor, weight: LinearWeight, groups: Groups) -> torch.Tensor:
        """y [S, N]: each expert's rows times its matrix of the stack [E, N, K]."""

    def experts(
        self, x_TK: torch.Tensor, gate_up: LinearWeight, down: LinearWeight, groups: Groups
    ) -> torch.Tensor:
        """The whole MLP of each expert: `grouped` with `gate_up`, SwiGLU, `grouped` with `down`."""
        active_SI = swiglu(self.grouped(x_TK, gate_up, groups))
        return self.grouped(active_SI, down, Groups(groups.offsets))


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Rows:
    """Tokens in E4M3: value = codes [T, K] * scale FP32 [T, 1]."""

    codes: torch.Tensor
    scale: torch.Tensor

    def take(self, rows: torch.Tensor) -> Fp8Rows:
        """The given rows, in their order. Moves eight codes at a time where K allows."""
        wide = self.codes.shape[1] % 8 == 0
        codes = self.codes.view(torch.int64 if wide else torch.uint8).index_select(0, rows)
        return Fp8Rows(codes=codes.view(self.codes.dtype), scale=self.scale.index_select(0, rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class Gated:
    """[gate | up] rows [S, 2I] to which SwiGLU is applied while they are quantized."""

    gate_up_SN: torch.Tensor


Tokens = torch.Tensor | Fp8Rows | Gated
"""Activations in the form in which a back end multiplies them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """What `GemmBackend.refusal` decides from. Versions are None for packages not installed."""

    kind: str
    name: str
    capability: tuple[int, int]
    torch: str
    triton: str | None
    quack: str | None
    cutlass_dsl: str | None

    @property
    def sm(self) -> str:
        """The architecture's name, such as sm_90."""
        return f"sm_{self.capability[0]}{self.capability[1]}"

    def below(self, least: tuple[int, int]) -> str | None:
        """Why the device is no NVIDIA GPU of capability `least` or later; None if it is one."""
        if self.kind != "cuda":
            return f"needs an NVIDIA GPU; this is {self.kind}"
        if self.capability < least:
            return f"needs sm_{least[0]}{least[1]} or later; this is {self.sm}"
        return None


class GemmBackend(Protocol):
    """One set of GPU kernels. Activations come as BF16 [T, K]; products are BF16.

    Every method but `refusal` may assume that `refusal` returned None for the operation, that N and
    K are multiples of 16, and that there is at least one row. `check.ORDER` says which operations a
    back end implements; weights of other formats raise `TypeError`.
    """

    name: ClassVar[str]
    """What users select it by."""
    swizzles: ClassVar[bool]
    """Whether NVFP4 weights are multiplied as `operands.fp4_weight` reorders them."""

    def refusal(self, op: str, facts: DeviceFacts) -> str | None:
        """Why `op` cannot be served on a device; None if it can.

        Decided from the facts alone. A kernel for another architecture can trap and take the
        process's CUDA context with it, so nothing is executed to find out.
        """

    def dense(self, x_TK: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
        """One linear, y [T, N]."""

    def tokens(self, x_TK: torch.Tensor, weight: LinearWeight) -> Tokens:
        """What can be done once for each token before `grouped` with `weight`."""

    def grouped(
        self, tokens: Tokens, weight: LinearWeight, groups: Groups, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """y [S, N] as in `Gemm.grouped`, written to `out` if it is given."""

    def gated(
        self, tokens: Tokens, gate_up: LinearWeight, down: LinearWeight, groups: Groups
    ) -> Tokens:
        """SwiGLU of `grouped` with `gate_up`, [S, I], in the form that `grouped` with `down` takes.

        The rows come out sorted by expert.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendCheck:
    """The outcome for one back end and one operation.

    `reason` says why it is not usable. `error` is relative to the emulation, `ms` the time of the
    check's timing problem.
    """

    op: str
    backend: str
    usable: bool
    reason: str | None = None
    error: float | None = None
    ms: float | None = None
