"""The `quack` back end: NVFP4 on sm_120 and sm_121, for whose experts torch has no kernel.

In:  BF16 activations and NVFP4 weights as loaded. Out: BF16 products.

The package is quack-kernels (Apache-2.0), which brings NVIDIA's CuTe DSL (nvidia-cutlass-dsl, under
a licence of NVIDIA's own) and compiles its kernels with it at the first product. It is an optional
extra, imported where a product is asked of it and nowhere else.

The one idea: its operands are ours. Codes are packed alike, and block scales as tiles
[R / 128, C / 4, 32, 4, 4] are `swizzle`'s bytes with more axes: nothing is moved, only viewed.

Experts are multiplied one by one, those that have rows: a call takes one global scale a side, and
every expert has its own. (Its call for many groups would also want the scales of group g to start
at tile offsets[g] // 128 + g, which is not where `padded_rows` puts them.)

Limits: not run on the hardware it is for. That the arguments are what the call takes was tried with
quack-kernels 0.6.5, which took them and compiled its kernels for both architectures, without a GPU
to run them on; tests undo the layout and multiply in FP32, which is what `calls` is for.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from beamq.formats.nvfp4 import COLUMNS, ROWS, round_up
from beamq.model.gemm.device import DeviceFacts, cache_folder, needs, sm
from beamq.model.gemm.operands import Fp4Operand, Gated, Tokens, fp4_tokens, fp4_weight
from beamq.model.gemm.reference import LinearWeight, Nvfp4Weight

LEAST = "0.6.5"
"""The release whose call was read; earlier ones took scales in another form."""
INSTALL = 'pip install "beamq[quack]"'


class Quack:
    """quack's block-scaled GEMM: dense linears, and experts one by one."""

    name: ClassVar[str] = "quack"
    ops: ClassVar[tuple[str, ...]] = ("nvfp4-dense", "nvfp4-grouped")

    def __init__(self, calls: Any = None) -> None:
        self.calls = calls

    def refusal(self, op: str, facts: DeviceFacts) -> str | None:
        """See gemm_device.py."""
        if facts.kind != "cuda":
            return needs(facts, (12, 0))
        if facts.capability not in ((12, 0), (12, 1)):
            return f"quack is for FP4 on sm_120 and sm_121; this is {sm(facts)}"
        if facts.quack is None:
            return f"quack-kernels is not installed: {INSTALL}"
        if _release(facts.quack) < _release(LEAST):
            return f"quack-kernels is {facts.quack}, needs {LEAST} or later: {INSTALL}"
        return None

    def fuses(self, weight: LinearWeight, *, fast: bool) -> bool:
        """Never."""
        return False

    def tokens(self, x_TK: torch.Tensor, weight: LinearWeight) -> Tokens:
        """As they are: operands depend on the groups and are made by `grouped`."""
        return x_TK

    def gated(self, gate_up_SN: torch.Tensor, weight: LinearWeight) -> Tokens:
        """Rows for the second product, from [gate | up]."""
        return Gated(gate_up_SN=gate_up_SN)

    def dense(self, x_TK: torch.Tensor, weight: LinearWeight, *, fast: bool) -> torch.Tensor:
        """One linear."""
        if not isinstance(weight, Nvfp4Weight):
            raise TypeError("only NVFP4 linears are served")
        y_TN = x_TK.new_empty(x_TK.shape[0], weight.codes.shape[0])
        self._multiply(fp4_tokens(x_TK, weight.input_scale), fp4_weight(weight), y_TN)
        return y_TN

    def grouped(
        self,
        tokens: Tokens,
        rows: torch.Tensor | None,
        weight: LinearWeight,
        offsets: Sequence[int],
        *,
        fast: bool,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Products of `tokens[rows]`, expert by expert."""
        if not isinstance(weight, Nvfp4Weight):
            raise TypeError("only NVFP4 experts are served")
        x = fp4_tokens(tokens, weight.input_scale, rows=rows, offsets=offsets)
        w = fp4_weight(weight)
        if out is None:
            shape = (offsets[-1], weight.codes.shape[1])
            out = torch.empty(shape, dtype=torch.bfloat16, device=x.codes.device)
        start = 0
        for expert in range(len(offsets) - 1):
            low, high = offsets[expert], offsets[expert + 1]
            if low == high:
                continue
            end = start + round_up(high - low, ROWS)
            some = Fp4Operand(
                codes=x.codes[low:high],
                block_scale=x.block_scale[start:end],
                global_scale=x.global_scale,
            )
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
            self.calls = _quack()
        a, b = (
            self.calls.BlockScaledOperand.from_parts(
                operand.codes.view(torch.float4_e2m1fn_x2),
                tiles(operand),
                "nvfp4",
                per_tensor_scale=operand.global_scale,
            )
            for operand in (x, w)
        )
        # Tuned, every number of rows would be a problem of its own, timed under many tilings.
        self.calls.gemm(a, b.mT, out=out_SN, tuned=False)


def tiles(operand: Fp4Operand) -> torch.Tensor:
    """Block scales as [R / 128, C / 4, 32, 4, 4]: row r, column c (of K/16) lies at
    [r // 128, c // 4, r % 32, r % 128 // 32, c % 4]. A view."""
    columns = round_up(operand.codes.shape[-1] // 8, COLUMNS)
    return operand.block_scale.view(-1, columns // COLUMNS, 32, ROWS // 32, COLUMNS)


def _quack() -> Any:
    """The two names of quack that are used."""
    # It loads what it compiled earlier, by default from a folder in /tmp that others can make.
    os.environ.setdefault("QUACK_CACHE_DIR", str(cache_folder() / "quack"))
    from quack.blockscaled import BlockScaledOperand
    from quack.gemm_interface import gemm

    return SimpleNamespace(BlockScaledOperand=BlockScaledOperand, gemm=gemm)


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])
