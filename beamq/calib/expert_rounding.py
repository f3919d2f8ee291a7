"""Round a layer's experts by the inputs that calibration has just recorded.

In: a layer after its forward pass (`LayerExperts`): its experts' weights, and every batch's input
of them. Out: codes, block scales and a global scale for each scale group, handed to `write`.

    method "gptq"            full second moments of the inputs, GPTQ (formats/gptq.py)
    method "second-moment"   their diagonal, as weights of the scale sweep (formats/nvfp4.py)

The one idea: this runs when the layer's `input_scale`s are known, so inputs are quantized exactly
as they will be served, and the moments are those of what the rounded weights will multiply. A few
experts at a time: their inputs are computed again (for `down` with the exact gate and up), summed
up, used and dropped. Moments of K inputs take 4 K^2 bytes for each expert, 27 GB for a layer of the
real model. gate and up share moments as they share a global scale. An expert with fewer rows than
inputs is drawn towards the moments of the whole layer (`gptq.shrunk`).

Rows of an expert are gathered over batches, so that each step is one large call. Its size depends
on the expert's own rows alone, so neither the other experts nor the number of processes changes a
bit. Sums are of `code * block_scale`, exact in BF16. Rows that are not finite count as zeros.

Limits: the activation dtype must hold the source's weights exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from beamq import devices
from beamq.beam.config import BeamConfig
from beamq.calib.input_scales import scale_for
from beamq.errors import Interrupted, TensorError
from beamq.formats import nvfp4
from beamq.formats.gptq import damping_of, factorize, round_experts, shrunk
from beamq.formats.numerics import E4M3_MIN, NVFP4_BLOCK
from beamq.model.forward import LayerExperts
from beamq.model.gemm.backend import DenseWeight, Gemm, LinearWeight, swiglu
from beamq.model.gemm.reference import nvfp4_operand
from beamq.model.moe import ExpertSlice

CHUNK_NBYTES = {"cuda": 24 << 30, "cpu": 1 << 30}
"""Limit for experts that are rounded together; it changes no bit of the result."""
FLUSH_WIDTHS = 2  # rows are summed up once there are so many times the input's width


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shared:
    """What experts share: `pool` sums `pool_rows` rows; None if every expert has enough rows."""

    scale: torch.Tensor
    pool: torch.Tensor | None
    pool_rows: float


class ExpertMoments:
    """Mean second moments for experts of one layer: [E, K, K], or their diagonals [E, K].

    Call `prepare` for each group in every process, then `of` for any experts.
    """

    def __init__(
        self, seen: LayerExperts, *, full: bool, gemm: Gemm, check: Callable[[], None]
    ) -> None:
        """`full`: matrices, not diagonals. `check` may end the work between two inputs."""
        self._seen = seen
        self._full = full
        self._gemm = gemm
        self._check = check
        self._groups: dict[str, _Shared] = {}

    def prepare(self, group: str, input_scale: float, width: int, experts: Set[int]) -> None:
        """Compute what `experts` (all that any process is to round) share."""
        scale = torch.tensor(input_scale, dtype=torch.float32, device=self._seen.device)
        self._groups[group] = _Shared(scale=scale, pool=None, pool_rows=0.0)
        if all(self._seen.rows_E[expert] >= width for expert in experts):
            return
        if not any(self._seen.rows_E):
            raise RuntimeError("the experts of this layer read no token")
        pool, rows = self._token_pool() if group == "gate_up" else self._down_pool(width)
        self._groups[group] = _Shared(scale=scale, pool=pool, pool_rows=rows)

    def of(self, group: str, part: ExpertSlice, experts: Sequence[int]) -> torch.Tensor:
        """Means for `experts` of `part`, shrunk (`gptq.shrunk`)."""
        shared, rows_E = self._groups[group], self.rows(experts)
        return shrunk(self._sums(group, part, experts), rows_E, shared.pool, shared.pool_rows)

    def rows(self, experts: Sequence[int]) -> torch.Tensor:
        """Number of rows of each expert, FP32 [E]."""
        counts = [float(self._seen.rows_E[expert]) for expert in experts]
        return torch.tensor(counts, dtype=torch.float32, device=self._seen.device)

    def _sums(self, group: str, part: ExpertSlice, experts: Sequence[int]) -> torch.Tensor:
        width = weight_of(part, group).shape[2]
        shape = (width, width) if self._full else (width,)
        total = torch.zeros(len(experts), *shape, dtype=torch.float32, device=self._seen.device)
        waiting: list[list[torch.Tensor]] = [[] for _ in experts]

        def add(at: int) -> None:
            x_SK = torch.cat(waiting[at])
            waiting[at].clear()
            if group != "gate_up":
                weight = part.gate_up.expert(experts[at] - part.first)
                x_SK = swiglu(self._gemm.linear(x_SK, weight))
            total[at] += self._gram(self._served(x_SK, group))

        for x_TK, plan in self._seen.inputs():
            self._check()
            for at, expert in enumerate(experts):
                rows = plan.token_S[plan.offsets[expert] : plan.offsets[expert + 1]]
                waiting[at].append(x_TK.index_select(0, rows))
                if sum(len(some) for some in waiting[at]) >= FLUSH_WIDTHS * x_TK.shape[1]:
                    add(at)
        for at in range(len(experts)):
            if any(len(some) for some in waiting[at]):
                add(at)
        return total

    def _token_pool(self) -> tuple[torch.Tensor, float]:
        """Sum over all tokens. The same number of experts reads each, so each counts once."""
        pool: torch.Tensor | None = None
        rows = 0
        for x_TK, _ in self._seen.inputs():
            self._check()
            gram = self._gram(self._served(x_TK, "gate_up"))
            pool = gram if pool is None else pool.add_(gram)
            rows += x_TK.shape[0]
        if pool is None:
            raise RuntimeError("a pass without a batch")
        return pool, float(rows)

    def _down_pool(self, width: int) -> tuple[torch.Tensor, float]:
        """Sum over all rows of all experts, in the order of experts over all processes."""
        shape = (width, width) if self._full else (width,)
        pool = torch.zeros(shape, dtype=torch.float32, device=self._seen.device)
        self._seen.exchange.receive(pool)
        for part in self._seen.parts():
            every = [e for e in numbers(part) if self._seen.rows_E[e]]
            for experts in chunks(every, weight_of(part, "down_proj"), full=self._full):
                for own in self._sums("down_proj", part, experts):
                    pool += own
        self._seen.exchange.send(pool)
        self._seen.exchange.settle(pool)
        return pool, float(sum(self._seen.rows_E))

    def _served(self, x_TK: torch.Tensor, group: str) -> torch.Tensor:
        """`code * block_scale`; rows that are not finite as zeros."""
        scale = self._groups[group].scale
        if devices.serves(x_TK):
            from beamq.formats.kernels import triton_nvfp4  # Triton

            return triton_nvfp4.nvfp4_operand(x_TK, scale)
        finite_T1 = x_TK.isfinite().all(dim=1, keepdim=True)
        return nvfp4_operand(torch.where(finite_T1, x_TK, 0), scale)

    def _gram(self, x_SK: torch.Tensor) -> torch.Tensor:
        if not self._full:
            return x_SK.float().square().sum(dim=0)
        if x_SK.device.type == "cuda":
            half = x_SK.to(torch.bfloat16)
            return torch.mm(half.t(), half, out_dtype=torch.float32)
        return x_SK.float().t() @ x_SK.float()


def expert_nbytes(shape: tuple[int, ...], *, full: bool) -> int:
    """Bytes for rounding one expert: sums and three copies until the factor; the weights twice in
    FP32 and once as loaded; moved and tried values."""
    n, k = shape[-2:]
    return 4 * (4 * k * k * full + 4 * n * k)


def chunks(experts: Sequence[int], weight_ENK: torch.Tensor, *, full: bool) -> Iterator[list[int]]:
    """Experts in groups that fit the device."""
    one = expert_nbytes(tuple(weight_ENK.shape), full=full)
    most = max(1, CHUNK_NBYTES[weight_ENK.device.type] // one)
    for start in range(0, len(experts), most):
        yield list(experts[start : start + most])


def numbers(part: ExpertSlice) -> range:
    """The experts of a slice."""
    return range(part.first, part.first + part.count)


def weight_of(part: ExpertSlice, group: str) -> torch.Tensor:
    """[E, N, K] in the activation dtype."""
    weight: LinearWeight = part.gate_up if group == "gate_up" else part.down
    if not isinstance(weight, DenseWeight):
        raise TypeError("experts that are quantized already cannot be rounded")
    return weight.w_NK


GROUPS = ("gate_up", "down_proj")
FLOOR = 1e-3  # of the mean second moment, added to each, so that no column has weight 0
WRITERS = 4  # threads that call `write`

Group = tuple[int, str]
"""An expert and one of `GROUPS`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundedGroup:
    """One scale group on the host: `codes` U8 [N, K/2], `block_scale` U8 (E4M3 bits) [N, K/16].

    `zero_blocks` and `underflow_blocks` are the counts of plain rounding (`cpu.Nvfp4Counts`).
    """

    codes: torch.Tensor
    block_scale: torch.Tensor
    global_scale: float
    amax: float
    zero_blocks: int
    underflow_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundingRequest:
    """`wanted` has the groups to round, by layer; all processes of a pass have the same, and each
    rounds those of its own experts. `method` and `headroom` are the recipe's. `write` is called
    from several threads."""

    wanted: Mapping[int, Set[Group]]
    method: str
    headroom: int
    write: Callable[[int, Group, RoundedGroup], None]
    stopped: Callable[[], bool]


class ExpertRounding:
    """A `PostLayerHook`. `amax(layer, group)` is the largest input magnitude over all experts of
    the layer, called once for each layer and group."""

    def __init__(
        self,
        request: RoundingRequest,
        config: BeamConfig,
        gemm: Gemm,
        amax: Callable[[int, str], float],
    ) -> None:
        self._request = request
        self._full = request.method == "gptq"
        self._widths = {"gate_up": config.hidden_size, "down_proj": config.moe_intermediate_size}
        self._gemm = gemm
        self._amax = amax

    def wants(self, layer: int) -> bool:
        """See `PostLayerHook`."""
        return bool(self._request.wanted.get(layer))

    def run(self, seen: LayerExperts) -> None:
        """Round and write the wanted groups of the layer. Raises `TensorError` for weights that are
        not finite, `Interrupted`, and what `write` raises."""
        moments = ExpertMoments(seen, full=self._full, gemm=self._gemm, check=self._check)
        wanted = self._request.wanted[seen.layer]
        for group, width in self._widths.items():
            scale = float(scale_for(self._amax(seen.layer, group), self._request.headroom))
            experts = {expert for expert, name in wanted if name == group}
            moments.prepare(group, scale, width, experts)
        for part in seen.parts():
            for group in GROUPS:
                own = [expert for expert in numbers(part) if (expert, group) in wanted]
                for experts_here in chunks(own, weight_of(part, group), full=self._full):
                    found = moments.of(group, part, experts_here)
                    rows_E = moments.rows(experts_here)
                    self._round(seen.layer, part, group, experts_here, found, rows_E)

    def _check(self) -> None:
        if self._request.stopped():
            raise Interrupted("stopped")

    def _round(
        self,
        layer: int,
        part: ExpertSlice,
        group: str,
        experts: list[int],
        moments: torch.Tensor,
        rows_E: torch.Tensor,
    ) -> None:
        w_ENK = weight_of(part, group)[[e - part.first for e in experts]]
        amax_E = w_ENK.abs().amax(dim=(1, 2)).float()
        if not bool(amax_E.isfinite().all()):
            bad = experts[int((~amax_E.isfinite()).int().argmax())]
            raise TensorError(
                f"model.layers.{layer}.mlp.experts.{bad}: {group.removesuffix('_proj')} holds NaN"
                " or infinity; repair the source, such a model cannot be served"
            )
        scale_E = nvfp4.global_scale_from_amax(amax_E)
        if self._full:
            feedback = factorize(moments, damping_of(rows_E, moments.shape[-1]))
            found = round_experts(w_ENK, feedback, scale_E)
            codes_ENH, block_scale_ENB = found.codes, found.block_scale
        else:
            codes_ENH, block_scale_ENB = _swept(w_ENK, scale_E, moments)
        rounded = _on_host(codes_ENH, block_scale_ENB, scale_E, amax_E, _counts(w_ENK, scale_E))

        def write(at: int) -> None:
            self._check()
            self._request.write(layer, (experts[at], group), rounded[at])

        with ThreadPoolExecutor(WRITERS) as pool:
            for _ in pool.map(write, range(len(experts))):
                pass


def _swept(
    w_ENK: torch.Tensor, scale_E: torch.Tensor, moments_EK: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and block scales by the sweep, columns weighted by the moments."""
    weight_EK = moments_EK + FLOOR * moments_EK.mean(dim=1, keepdim=True)
    found = [
        nvfp4.quantize(w_NK, scale, scale_rule="sweep", weight_K=weight_K)
        for w_NK, scale, weight_K in zip(w_ENK, scale_E, weight_EK, strict=True)
    ]
    return torch.stack([q.codes for q in found]), torch.stack([q.block_scale for q in found])


def _on_host(
    codes_ENH: torch.Tensor,
    block_scale_ENB: torch.Tensor,
    scale_E: torch.Tensor,
    amax_E: torch.Tensor,
    counts_E2: torch.Tensor,
) -> list[RoundedGroup]:
    codes, block_scales = _to_host(codes_ENH), _to_host(block_scale_ENB.view(torch.uint8))
    found = zip(scale_E.tolist(), amax_E.tolist(), counts_E2.tolist(), strict=True)
    return [
        RoundedGroup(
            codes=codes[at],
            block_scale=block_scales[at],
            global_scale=scale,
            amax=amax,
            zero_blocks=zero,
            underflow_blocks=underflow,
        )
        for at, (scale, amax, (zero, underflow)) in enumerate(found)
    ]


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type != "cuda":
        return tensor.cpu()
    # To pinned memory: a copy to pageable memory is several times slower.
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)


def rounding_nbytes(device: str, config: BeamConfig) -> int:
    """Bytes of the device that rounding takes, besides weights and activations."""
    shape = (2 * config.moe_intermediate_size, config.hidden_size)
    one = expert_nbytes(shape, full=True)
    return max(min(CHUNK_NBYTES[device], config.num_experts * one), one)


def _counts(w_ENK: torch.Tensor, scale_E: torch.Tensor) -> torch.Tensor:
    """[E, 2]: blocks of zeros, and blocks whose ideal scale would round to 0."""
    peak_EB = w_ENK.abs().view(w_ENK.shape[0], -1, NVFP4_BLOCK).amax(dim=2).float()
    ideal_EB = peak_EB / (6.0 * scale_E.view(-1, 1))
    underflow_EB = (ideal_EB <= E4M3_MIN / 2) & (ideal_EB > 0)
    return torch.stack(((ideal_EB == 0).sum(dim=1), underflow_EB.sum(dim=1)), dim=1)
