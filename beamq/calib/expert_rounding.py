"""Round a layer's experts by what calibration has just learned of their inputs.

In: a visited layer (`model.visit`): its experts' weights, and every batch's input of them. Out:
codes, block scales and a global scale for each scale group, handed to `write` as they are made.

    method "gptq"            full second moments of the inputs, GPTQ (`gptq`)
    method "second-moment"   their diagonal alone, as weights of the scale sweep (`formats.sweep`)

The one idea: the visit comes when the layer's `input_scale`s are known, so inputs are quantized
exactly as they will be served, and the moments are those of what the rounded weights will meet.
Experts are taken a few at a time: their inputs are computed anew (gate and up once more for
`down`, by the exact weights), summed up, used and dropped. Moments of K inputs take 4 K^2 bytes for
each expert, 27 GB for a whole layer of the real model; a few at a time take what is allowed.

gate and up read the same inputs, so they share moments as they share a global scale. An expert with
fewer rows than inputs is drawn towards the moments of all of the layer's (`gptq.shrunk`); those
are summed only where such an expert is. Tokens that are not finite count as zeros.

Limits: weights must be on hand exactly, so the activation dtype must hold the source's; one
process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass

import numpy as np
import torch

from beamq.calib.gptq import factorize, round_experts, shrunk
from beamq.calib.scales import AMAX_PER_SCALE, MIN_SCALE
from beamq.config import BeamConfig
from beamq.errors import Interrupted, TensorError
from beamq.formats import nvfp4
from beamq.formats.numerics import E4M3_MIN, NVFP4_BLOCK
from beamq.model.activation import swiglu
from beamq.model.linear import DenseWeight, Gemm, LinearWeight, nvfp4_operand
from beamq.model.moe import ExpertSlice
from beamq.model.visit import Inputs, Parts

GROUPS = ("gate_up", "down_proj")
CHUNK_NBYTES = {"cuda": 24 << 30, "cpu": 1 << 30}
"""What experts that are rounded together may take; fixed, so that it decides no bit."""
FLOOR = 1e-3  # of the mean second moment, added to each: no column counts for nothing

Group = tuple[int, str]
"""An expert and one of `GROUPS`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundedGroup:
    """One scale group on the host: `codes` U8 [N, K/2], `block_scale` U8 (E4M3 bits) [N, K/16].

    `zero_blocks` and `underflow_blocks` are counted as plain rounding counts them.
    """

    codes: torch.Tensor
    block_scale: torch.Tensor
    global_scale: float
    amax: float
    zero_blocks: int
    underflow_blocks: int


class ExpertRounding:
    """An `ExpertVisitor`. `wanted` has, by layer, the groups that are to be rounded.

    `amax(layer, group)` is the largest input magnitude over all experts of the layer.
    """

    def __init__(
        self,
        wanted: Mapping[int, Set[Group]],
        *,
        method: str,
        gemm: Gemm,
        amax: Callable[[int, str], float],
        write: Callable[[int, Group, RoundedGroup], None],
        stopped: Callable[[], bool],
    ) -> None:
        self._wanted = wanted
        self._full = method == "gptq"
        self._gemm = gemm
        self._amax = amax
        self._write = write
        self._stopped = stopped

    def wants(self, layer: int) -> bool:
        """See `ExpertVisitor`."""
        return bool(self._wanted.get(layer))

    def visit(self, layer: int, parts: Parts, inputs: Inputs) -> None:
        """Round and write all that is wanted of the layer. Raises `TensorError` for weights that
        are not finite, `Interrupted`, and what `write` raises."""
        moments = _Moments(self._full, self._gemm, parts, inputs, self._check)
        for part in parts():
            for group in GROUPS:
                moments.scale = input_scale(self._amax(layer, group))
                wanted = [e for e in _numbers(part) if (e, group) in self._wanted[layer]]
                for experts in _chunks(wanted, _weight(part, group), self._full):
                    own = moments.of(part, group, experts)
                    self._round(layer, part, group, experts, own)

    def _check(self) -> None:
        if self._stopped():
            raise Interrupted("stopped")

    def _round(
        self, layer: int, part: ExpertSlice, group: str, experts: list[int], moments: torch.Tensor
    ) -> None:
        stored_ENK = _weight(part, group)
        w_ENK = stored_ENK[[e - part.first for e in experts]].float()
        amax_E = w_ENK.abs().amax(dim=(1, 2))
        if not bool(amax_E.isfinite().all()):
            bad = experts[int((~amax_E.isfinite()).int().argmax())]
            raise TensorError(
                f"model.layers.{layer}.mlp.experts.{bad}: {group.removesuffix('_proj')} holds NaN"
                " or infinity; repair the source, such a model cannot be served"
            )
        scale_E = nvfp4.global_scale_from_amax(amax_E)
        if self._full:
            found = round_experts(w_ENK, factorize(moments), scale_E)
            pairs = list(zip(found.codes, found.block_scale, strict=True))
        else:
            weight_EK = moments + FLOOR * moments.mean(dim=1, keepdim=True)
            pairs = [
                (q.codes, q.block_scale)
                for w_NK, scale, weight_K in zip(w_ENK, scale_E, weight_EK, strict=True)
                for q in [nvfp4.quantize(w_NK, scale, scales="sweep", weight_K=weight_K)]
            ]
        for at, (expert, (codes, block_scale)) in enumerate(zip(experts, pairs, strict=True)):
            self._check()
            zero, underflow = _counts(w_ENK[at], scale_E[at])
            rounded = RoundedGroup(
                codes=codes.cpu(),
                block_scale=block_scale.view(torch.uint8).cpu(),
                global_scale=float(scale_E[at]),
                amax=float(amax_E[at]),
                zero_blocks=zero,
                underflow_blocks=underflow,
            )
            self._write(layer, (expert, group), rounded)


class _Moments:
    """Second moments of the experts' inputs, quantized under `scale`: [E, K, K] or, if not `full`,
    [E, K]; of sums of `code * block_scale`, since a common factor changes nothing."""

    def __init__(
        self, full: bool, gemm: Gemm, parts: Parts, inputs: Inputs, check: Callable[[], None]
    ) -> None:
        self.scale = 1.0
        self._full = full
        self._gemm = gemm
        self._parts = parts
        self._inputs = inputs
        self._check = check
        self._pools: dict[str, tuple[torch.Tensor, float]] = {}

    def of(self, part: ExpertSlice, group: str, experts: list[int]) -> torch.Tensor:
        """Shrunk means for `experts` of `part`."""
        first = _weight(part, group)
        width = first.shape[2]
        shape = (len(experts), width, width) if self._full else (len(experts), width)
        total = torch.zeros(shape, device=first.device)
        rows_E = torch.zeros(len(experts), device=first.device)
        for x_TK, plan in self._inputs():
            self._check()
            served = self._served(x_TK) if group == "gate_up" else None
            for at, expert in enumerate(experts):
                low, high = plan.offsets[expert], plan.offsets[expert + 1]
                if low == high:
                    continue
                rows = plan.token_S[low:high]
                own = self._down(x_TK, rows, part, expert) if served is None else served[rows]
                total[at] += self._gram(own)
                rows_E[at] += high - low
        pool, pool_rows = None, 0.0
        if bool((rows_E < width).any()):
            pool, pool_rows = self._pool(group)
        return shrunk(total, rows_E, pool, pool_rows)

    def _pool(self, group: str) -> tuple[torch.Tensor, float]:
        """Sum over all rows of all experts of the layer, and their number."""
        if group not in self._pools:
            self._pools[group] = self._token_pool() if group == "gate_up" else self._down_pool()
        return self._pools[group]

    def _token_pool(self) -> tuple[torch.Tensor, float]:
        """Every token is read by as many experts as any other, so each may count once."""
        grams: list[torch.Tensor] = []
        rows = 0
        for x_TK, _ in self._inputs():
            self._check()
            gram = self._gram(self._served(x_TK))
            grams = [grams[0] + gram] if grams else [gram]
            rows += x_TK.shape[0]
        return grams[0], float(rows)

    def _down_pool(self) -> tuple[torch.Tensor, float]:
        total: torch.Tensor | None = None
        rows = 0
        for part in self._parts():
            for expert in _numbers(part):
                own: torch.Tensor | None = None
                for x_TK, plan in self._inputs():
                    self._check()
                    low, high = plan.offsets[expert], plan.offsets[expert + 1]
                    if low == high:
                        continue
                    gram = self._gram(self._down(x_TK, plan.token_S[low:high], part, expert))
                    own = gram if own is None else own + gram
                    rows += high - low
                if own is not None:  # by expert, so that slices do not matter
                    total = own if total is None else total + own
        if total is None:
            raise RuntimeError("a layer whose experts read no token was visited")
        return total, float(rows)

    def _down(
        self, x_TK: torch.Tensor, rows: torch.Tensor, part: ExpertSlice, expert: int
    ) -> torch.Tensor:
        """Served inputs of an expert's `down`."""
        weight = part.gate_up.expert(expert - part.first)
        return self._served(swiglu(self._gemm.linear(x_TK[rows], weight)))

    def _served(self, x_TK: torch.Tensor) -> torch.Tensor:
        """`code * block_scale`, exact in BF16; rows that are not finite as zeros."""
        finite_T1 = x_TK.isfinite().all(dim=1, keepdim=True)
        scale = torch.tensor(self.scale, dtype=torch.float32, device=x_TK.device)
        return nvfp4_operand(torch.where(finite_T1, x_TK, 0), scale)

    def _gram(self, x_SK: torch.Tensor) -> torch.Tensor:
        if not self._full:
            return x_SK.float().square().sum(dim=0)
        if x_SK.device.type == "cuda":
            half = x_SK.to(torch.bfloat16)
            return torch.mm(half.t(), half, out_dtype=torch.float32)
        return x_SK.float().t() @ x_SK.float()


def input_scale(amax: float) -> float:
    """The `input_scale` that will be written for this amax (see `calib.scales`)."""
    return float(max(np.float32(amax) / AMAX_PER_SCALE, MIN_SCALE))


def rounding_nbytes(device: str, config: BeamConfig) -> int:
    """What rounding takes of the device at once, beside weights and activations."""
    shape = (2 * config.moe_intermediate_size, config.hidden_size)
    one = _expert_nbytes(shape, full=True)
    return max(min(CHUNK_NBYTES[device], config.num_experts * one), one)


def _expert_nbytes(shape: tuple[int, ...], *, full: bool) -> int:
    """Sums and three copies on the way to the factor; weights, what is moved, errors, trials."""
    n, k = shape[-2:]
    return 4 * (4 * k * k * full + 4 * n * k)


def _chunks(experts: list[int], weight_ENK: torch.Tensor, full: bool) -> Iterator[list[int]]:
    """Experts in runs that fit the device."""
    one = _expert_nbytes(tuple(weight_ENK.shape), full=full)
    most = max(1, CHUNK_NBYTES[weight_ENK.device.type] // one)
    for start in range(0, len(experts), most):
        yield experts[start : start + most]


def _numbers(part: ExpertSlice) -> range:
    return range(part.first, part.first + part.count)


def _weight(part: ExpertSlice, group: str) -> torch.Tensor:
    weight: LinearWeight = part.gate_up if group == "gate_up" else part.down
    if not isinstance(weight, DenseWeight):
        raise TypeError("experts that are quantized already cannot be rounded")
    return weight.w_NK


def _counts(w_NK: torch.Tensor, scale: torch.Tensor) -> tuple[int, int]:
    """Blocks of zeros, and blocks whose ideal scale would round to 0."""
    ideal_B = w_NK.view(-1, NVFP4_BLOCK).abs().amax(dim=1) / (6.0 * scale)
    return int((ideal_B == 0).sum()), int(((ideal_B <= E4M3_MIN / 2) & (ideal_B > 0)).sum())
