"""Back ends that call kernels of other projects: torch's CUTLASS and cuBLASLt, and quack.

FP8 is row-wise: one scale per token and one per output. NVFP4 has block scales in the order of
`formats.nvfp4.swizzle`, and global ones. CUTLASS multiplies all experts in one call; cuBLASLt and
quack multiply them one by one.

quack-kernels (Apache-2.0) is an optional extra, imported at the first product. It brings NVIDIA's
CuTe DSL (nvidia-cutlass-dsl, under NVIDIA's own licence), which compiles its kernels then. Its call
for many groups is not used: it takes one global scale for each side, while every expert has its
own, and wants the scales of group g at tile offsets[g] // 128 + g, unlike `padded_rows`.

Limits: no NVFP4 call of this file has been run on the hardware it is for (Blackwell). quack-kernels
0.6.5 accepted the arguments and compiled for sm_120 and sm_121, with no GPU to run on. In tests
`calls` is a double that undoes the layout and multiplies in FP32.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from beamq.formats.nvfp4 import COLUMNS, ROWS, round_up
from beamq.model.gemm.backend import (
    DenseWeight,
    DeviceFacts,
    Fp8Rows,
    Fp8Weight,
    Gated,
    GemmBackend,
    Groups,
    LinearWeight,
    Nvfp4Weight,
    Tokens,
    stored,
    swiglu,
)
from beamq.model.gemm.operands import (
    ExpertRows,
    Fp4Operand,
    fp4_tokens,
    fp4_weight,
    fp8_rows,
    take,
)

LEAST_QUACK = "0.6.5"  # earlier releases took scales in another form
INSTALL_QUACK = 'pip install "beamq[quack]"'


class _Library(GemmBackend):
    """What the three share: nothing is fused except SwiGLU with the next quantization."""

    swizzles: ClassVar[bool] = True

    def __init__(self, calls: Any = F, *, fast: bool = False) -> None:
        self.calls = calls
        self._fast = fast

    def tokens(self, x_TK: torch.Tensor, weight: LinearWeight) -> Tokens:
        """FP8: quantized. NVFP4 operands depend on the groups and are made by `grouped`."""
        return fp8_rows(x_TK) if isinstance(weight, Fp8Weight) else x_TK

    def gated(
        self, tokens: Tokens, gate_up: LinearWeight, down: LinearWeight, groups: Groups
    ) -> Tokens:
        gate_up_SN = self.grouped(tokens, gate_up, groups)
        if isinstance(down, Fp8Weight):
            return fp8_rows(gate_up_SN, swiglu=True)
        if isinstance(down, Nvfp4Weight):
            return Gated(gate_up_SN=gate_up_SN)
        return swiglu(gate_up_SN)


class Cutlass(_Library):
    """torch's CUTLASS kernels, all through `scaled_grouped_mm`; a dense linear is one group."""

    name: ClassVar[str] = "cutlass"

    def refusal(self, op: str, facts: DeviceFacts) -> str | None:
        if facts.kind == "cuda" and op.startswith("fp8") and facts.capability > (9, 0):
            return "torch's FP8 grouped kernel is for sm_90 alone; elsewhere it traps"
        if facts.kind == "cuda" and op.startswith("nvfp4"):
            if facts.capability not in ((10, 0), (10, 3)):
                return f"torch's FP4 kernels are for sm_100 and sm_103; this is {facts.sm}"
            return None
        return facts.below((9, 0))

    def dense(self, x_TK: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
        """One linear as one group."""
        one_group = Groups([0, x_TK.shape[0]])
        if isinstance(weight, Fp8Weight):
            return self.grouped(fp8_rows(x_TK), weight.expert(None), one_group)
        if not isinstance(weight, Nvfp4Weight):
            raise TypeError("only quantized linears are served")
        own = fp4_weight(weight)
        codes, block_scale = own.codes.unsqueeze(0), own.block_scale.unsqueeze(0)
        stack = replace(own, codes=codes, block_scale=block_scale)
        ends = _ends(one_group.offsets, x_TK.device)
        return self._nvfp4(fp4_tokens(x_TK, weight.input_scale), stack, ends)

    def grouped(
        self, tokens: Tokens, weight: LinearWeight, groups: Groups, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """All experts in one call."""
        ends = _ends(groups.offsets, stored(weight).device)
        if isinstance(weight, Nvfp4Weight):
            x = fp4_tokens(tokens, weight.input_scale, groups)
            y = self._nvfp4(x, fp4_weight(weight), ends)
        elif isinstance(weight, DenseWeight):
            some = take(tokens, groups.rows)
            y = self.calls.grouped_mm(some, weight.w_NK.transpose(1, 2), offs=ends)
        elif isinstance(some := take(tokens, groups.rows), Fp8Rows):
            rowwise = F.ScalingType.RowWise
            y = self.calls.scaled_grouped_mm(
                some.codes,
                weight.codes.transpose(1, 2),
                some.scale.view(-1),
                rowwise,
                weight.scale.squeeze(-1),
                rowwise,
                offs=ends,
                output_dtype=torch.bfloat16,
                use_fast_accum=self._fast,
            )
        else:
            raise TypeError("tokens were made for a weight of another format")
        return y if out is None else out.copy_(y)

    def _nvfp4(self, x: Fp4Operand, w: Fp4Operand, ends: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.calls.scaled_grouped_mm(
            x.codes.view(torch.float4_e2m1fn_x2),
            w.codes.view(torch.float4_e2m1fn_x2).transpose(1, 2),
            **_fp4_scales(x, w),
            offs=ends,
            output_dtype=torch.bfloat16,
        )
        return y


class CublasLt(_Library):
    """torch's cuBLASLt for dense linears; for FP8 experts, one call for each that has rows."""

    name: ClassVar[str] = "cublaslt"

    def refusal(self, op: str, facts: DeviceFacts) -> str | None:
        if op == "nvfp4-dense" and facts.kind == "cuda" and facts.capability < (10, 0):
            return f"FP4 tensor cores came with sm_100; this is {facts.sm}"
        return facts.below((9, 0))

    def dense(self, x_TK: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
        """One linear."""
        if isinstance(weight, Fp8Weight):
            return self._fp8(fp8_rows(x_TK), weight)
        if not isinstance(weight, Nvfp4Weight):
            raise TypeError("only quantized linears are served")
        x, w = fp4_tokens(x_TK, weight.input_scale), fp4_weight(weight)
        y: torch.Tensor = self.calls.scaled_mm(
            x.codes.view(torch.float4_e2m1fn_x2),
            w.codes.view(torch.float4_e2m1fn_x2).t(),
            **_fp4_scales(x, w),
            output_dtype=torch.bfloat16,
        )
        return y

    def grouped(
        self, tokens: Tokens, weight: LinearWeight, groups: Groups, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Expert by expert."""
        x = take(tokens, groups.rows)
        if not (isinstance(x, Fp8Rows) and isinstance(weight, Fp8Weight)):
            raise TypeError("only FP8 experts are served")
        if out is None:
            shape = (groups.offsets[-1], weight.codes.shape[1])
            out = x.scale.new_empty(shape, dtype=torch.bfloat16)
        for expert, low, high in groups.busy():
            # cuBLASLt wants scales to start at a multiple of 16 bytes, so they are copied.
            part = Fp8Rows(codes=x.codes[low:high], scale=x.scale[low:high].clone())
            out[low:high] = self._fp8(part, weight.expert(expert))
        return out

    def _fp8(self, x: Fp8Rows, w: Fp8Weight) -> torch.Tensor:
        rowwise = F.ScalingType.RowWise
        y: torch.Tensor = self.calls.scaled_mm(
            x.codes,
            w.codes.t(),
            x.scale,
            rowwise,
            w.scale.t(),
            rowwise,
            output_dtype=torch.bfloat16,
            use_fast_accum=self._fast,
        )
        return y


class Quack(_Library):
    """quack's block-scaled GEMM, NVFP4 on sm_120 and sm_121: linears, and experts one by one."""

    name: ClassVar[str] = "quack"

    def __init__(self, calls: Any = None) -> None:
        super().__init__(calls)  # None: quack's, imported at the first product

    def refusal(self, op: str, facts: DeviceFacts) -> str | None:
        if facts.kind != "cuda":
            return facts.below((12, 0))
        if facts.capability not in ((12, 0), (12, 1)):
            return f"quack is for FP4 on sm_120 and sm_121; this is {facts.sm}"
        if facts.quack is None:
            return f"quack-kernels is not installed: {INSTALL_QUACK}"
        if _release(facts.quack) < _release(LEAST_QUACK):
            return f"quack-kernels is {facts.quack}, needs {LEAST_QUACK} or later: {INSTALL_QUACK}"
        return None

    def dense(self, x_TK: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
        """One linear."""
        if not isinstance(weight, Nvfp4Weight):
            raise TypeError("only NVFP4 linears are served")
        y_TN = x_TK.new_empty(x_TK.shape[0], weight.codes.shape[0])
        self._multiply(fp4_tokens(x_TK, weight.input_scale), fp4_weight(weight), y_TN)
        return y_TN

    def grouped(
        self, tokens: Tokens, weight: LinearWeight, groups: Groups, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Expert by expert: a call takes one global scale for each side."""
        if not isinstance(weight, Nvfp4Weight):
            raise TypeError("only NVFP4 experts are served")
        x = fp4_tokens(tokens, weight.input_scale, groups)
        w = fp4_weight(weight)
        if out is None:
            shape = (groups.offsets[-1], weight.codes.shape[1])
            out = torch.empty(shape, dtype=torch.bfloat16, device=x.codes.device)
        start = 0  # of the expert's rows of scales, which are padded to whole tiles
        for expert, low, high in groups.busy():
            end = start + round_up(high - low, ROWS)
            some = replace(x, codes=x.codes[low:high], block_scale=x.block_scale[start:end])
            own = Fp4Operand(
                codes=w.codes[expert],
                block_scale=w.block_scale[expert],
                global_scale=w.global_scale[expert],
            )
            self._multiply(some, own, out[low:high])
            start = end
        return out

    def _multiply(self, x: Fp4Operand, w: Fp4Operand, out_SN: torch.Tensor) -> None:
        if self.calls is None:
            self.calls = _import_quack()
        a, b = (
            self.calls.BlockScaledOperand.from_parts(
                operand.codes.view(torch.float4_e2m1fn_x2),
                tiles(operand),
                "nvfp4",
                per_tensor_scale=operand.global_scale,
            )
            for operand in (x, w)
        )
        # With tuning, every number of rows would be a problem of its own, timed with many tilings.
        self.calls.gemm(a, b.mT, out=out_SN, tuned=False)


def tiles(operand: Fp4Operand) -> torch.Tensor:
    """Block scales as [R / 128, C / 4, 32, 4, 4], a view: row r, column c (of K/16) is at
    [r // 128, c // 4, r % 32, r % 128 // 32, c % 4]."""
    columns = round_up(operand.codes.shape[-1] // 8, COLUMNS)
    return operand.block_scale.view(-1, columns // COLUMNS, 32, ROWS // 32, COLUMNS)


def cache_folder() -> Path:
    """The user's folder for check results and compiled kernels. It may not exist yet; where the
    user has no home, nothing can be written to it."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(os.devnull if base.startswith("~") else base) / "beamq"


def _import_quack() -> Any:
    # By default it loads compiled kernels from a folder in /tmp that other users could create.
    os.environ.setdefault("QUACK_CACHE_DIR", str(cache_folder() / "quack"))
    from quack.blockscaled import BlockScaledOperand
    from quack.gemm_interface import gemm

    return SimpleNamespace(BlockScaledOperand=BlockScaledOperand, gemm=gemm)


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


def _fp4_scales(x: Fp4Operand, w: Fp4Operand) -> dict[str, Any]:
    """torch's keywords for two levels of scales, of which only the block scales are swizzled."""
    recipe = [F.ScalingType.BlockWise1x16, F.ScalingType.TensorWise]
    order = [F.SwizzleType.SWIZZLE_32_4_4, F.SwizzleType.NO_SWIZZLE]
    return {
        "scale_a": [x.block_scale, x.global_scale],
        "scale_recipe_a": recipe,
        "scale_b": [w.block_scale, w.global_scale],
        "scale_recipe_b": recipe,
        "swizzle_a": order,
        "swizzle_b": order,
    }


def _ends(offsets: Sequence[int], device: torch.device) -> torch.Tensor:
    """Where each expert's rows end, int32 [E]."""
    if isinstance(offsets, ExpertRows):
        return offsets.ends_E
    return torch.tensor(offsets[1:], dtype=torch.int32).to(device)
