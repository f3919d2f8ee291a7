"""Round a layer's experts by the inputs that calibration has just recorded.

In: a layer after its forward pass (`LayerExperts`): its experts' weights, and every batch's input
of them. Out: codes, block scales and a global scale for each scale group, handed to `write`.

    method "gptq"            full second moments of the inputs, GPTQ (formats/gptq.py), unless the
                             scale sweep does better on a held-out text
    method "second-moment"   their diagonal, as weights of the scale sweep (formats/nvfp4.py)

The one idea: this runs when the layer's `input_scale`s are known, so inputs are quantized exactly
as they will be served, and the moments are those of what the rounded weights will multiply. A few
experts at a time: their inputs are computed again (for `down` with the exact gate and up), summed
up, used and dropped. Moments of K inputs take 4 K^2 bytes for each expert, 27 GB for a layer of the
real model. gate and up share moments as they share a global scale. An expert with fewer rows than
inputs is drawn towards the moments of the whole layer (`gptq.shrunk`).

GPTQ fits the calibration text. So a group is rounded both ways, and each way's products with the
expert's rows of held-out texts (calib/held_out.py) are compared with the exact ones. Where GPTQ's
squared error is the larger one, as the mean over texts of its ratio to the sweep's, the sweep's
codes and scales are written.

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
from beamq.formats.kernels import cpu
from beamq.formats.numerics import E4M3_MIN, NVFP4_BLOCK, tensor_bytes
from beamq.formats.nvfp4 import QuantizedTensor
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
            total[at] += self._gram(self._read(x_SK, group, part, experts[at]))

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

    def losses(
        self, group: str, part: ExpertSlice, experts: Sequence[int], errors: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """What `errors` [E, N, K] of some candidates cost on the held-out texts: FP64 [C, E, X].

        trace(error H error^T), H being the sum of a text's second moments, as the sum of squares
        of the products themselves: a text has fewer rows for an expert than inputs.
        """
        shape = (len(errors), len(experts), self._seen.held_out_texts)
        total = torch.zeros(shape, dtype=torch.float64, device=self._seen.device)
        for text, x_TK, plan in self._seen.held_out():
            self._check()
            for at, expert in enumerate(experts):
                rows = plan.token_S[plan.offsets[expert] : plan.offsets[expert + 1]]
                if not len(rows):
                    continue
                x_SK = self._read(x_TK.index_select(0, rows), group, part, expert).float()
                for number, error_ENK in enumerate(errors):
                    total[number, at, text] += (x_SK @ error_ENK[at].t()).square().sum()
        return total

    def _read(self, x_SK: torch.Tensor, group: str, part: ExpertSlice, expert: int) -> torch.Tensor:
        """What the group's weights of an expert multiply when served, for its rows `x_SK`."""
        if group != "gate_up":
            x_SK = swiglu(self._gemm.linear(x_SK, part.gate_up.expert(expert - part.first)))
        return self._served(x_SK, group)

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

    `zero_blocks` and `underflow_blocks` are the counts of plain rounding (`cpu.Nvfp4Counts`);
    `swept` says that GPTQ was worse than the sweep on held-out text, and these are the sweep's.
    """

    codes: torch.Tensor
    block_scale: torch.Tensor
    global_scale: float
    amax: float
    zero_blocks: int
    underflow_blocks: int
    swept: bool = False


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
                    self._round(seen.layer, part, group, experts_here, moments)

    def _check(self) -> None:
        if self._request.stopped():
            raise Interrupted("stopped")

    def _round(
        self,
        layer: int,
        part: ExpertSlice,
        group: str,
        experts: list[int],
        moments: ExpertMoments,
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
        mean = moments.of(group, part, experts)
        if self._full:
            feedback = factorize(mean, damping_of(moments.rows(experts), mean.shape[-1]))
            del mean
            found = round_experts(w_ENK, feedback, scale_E)
            del feedback
            plain = _swept(w_ENK, scale_E, None)
            errors = [_errors(w_ENK, each) for each in (found, plain)]
            ours_EX, theirs_EX = moments.losses(group, part, experts, errors)
            # 0 / 0 is a text without a row for this expert; without any text it is GPTQ's.
            worse_E = (ours_EX / theirs_EX).nanmean(dim=1) > 1
            found = _either(worse_E, plain, found)
        else:
            worse_E = torch.zeros_like(amax_E, dtype=torch.bool)
            found = _swept(w_ENK, scale_E, mean)
        rounded = _on_host(found, amax_E, _counts(w_ENK, scale_E), worse_E)

        def write(at: int) -> None:
            self._check()
            self._request.write(layer, (experts[at], group), rounded[at])

        with ThreadPoolExecutor(WRITERS) as pool:
            for _ in pool.map(write, range(len(experts))):
                pass


def _swept(
    w_ENK: torch.Tensor, scale_E: torch.Tensor, moments_EK: torch.Tensor | None
) -> QuantizedTensor:
    """By the sweep, columns weighted by the moments if there are any."""
    if moments_EK is None and devices.serves(w_ENK):
        from beamq.formats.kernels import gpu  # Triton

        return gpu.nvfp4_quantize(w_ENK, scale_E, scale_rule="sweep")
    weight_EK: Sequence[torch.Tensor | None] = [None] * len(w_ENK)
    if moments_EK is not None:
        weight_EK = list(moments_EK + FLOOR * moments_EK.mean(dim=1, keepdim=True))
    rule = _sweep_on_cpu if w_ENK.device.type == "cpu" else _sweep
    found = [rule(*each) for each in zip(w_ENK, scale_E, weight_EK, strict=True)]
    return QuantizedTensor(
        codes=torch.stack([q.codes for q in found]),
        block_scale=torch.stack([q.block_scale for q in found]),
        global_scale=scale_E,
    )


def _sweep(
    w_NK: torch.Tensor, scale: torch.Tensor, weight_K: torch.Tensor | None
) -> QuantizedTensor:
    return nvfp4.quantize(w_NK, scale, scale_rule="sweep", weight_K=weight_K)


def _sweep_on_cpu(
    w_NK: torch.Tensor, scale: torch.Tensor, weight_K: torch.Tensor | None
) -> QuantizedTensor:
    """The same bytes, from the compiled kernel."""
    n, k = w_NK.shape
    codes = torch.empty(n, k // 2, dtype=torch.uint8)
    block_scale = torch.empty(n, k // NVFP4_BLOCK, dtype=torch.uint8)
    cpu.nvfp4_quantize(
        tensor_bytes(w_NK.contiguous()),
        {torch.bfloat16: "BF16", torch.float32: "F32"}[w_NK.dtype],
        k,
        float(scale),
        tensor_bytes(codes),
        tensor_bytes(block_scale),
        scale_rule="sweep",
        weights=None if weight_K is None else tensor_bytes(weight_K.contiguous()),
    )
    bits = block_scale.view(torch.float8_e4m3fn)
    return QuantizedTensor(codes=codes, block_scale=bits, global_scale=scale)


def _errors(w_ENK: torch.Tensor, found: QuantizedTensor) -> torch.Tensor:
    """Rounded weights minus `w_ENK`, FP32."""
    both = zip(found.codes, found.block_scale, found.global_scale, strict=True)
    rounded = [
        nvfp4.dequantize(
            QuantizedTensor(codes=codes, block_scale=block_scale, global_scale=scale), torch.float32
        )
        for codes, block_scale, scale in both
    ]
    return torch.stack(rounded).sub_(w_ENK)


def _either(
    first_E: torch.Tensor, first: QuantizedTensor, second: QuantizedTensor
) -> QuantizedTensor:
    """The experts of `first` where `first_E` is true, of `second` elsewhere."""
    choose_E11 = first_E.view(-1, 1, 1)
    bits = torch.where(
        choose_E11, first.block_scale.view(torch.uint8), second.block_scale.view(torch.uint8)
    )
    return QuantizedTensor(
        codes=torch.where(choose_E11, first.codes, second.codes),
        block_scale=bits.view(torch.float8_e4m3fn),
        global_scale=second.global_scale,
    )


def _on_host(
    found: QuantizedTensor, amax_E: torch.Tensor, counts_E2: torch.Tensor, swept_E: torch.Tensor
) -> list[RoundedGroup]:
    codes, block_scales = _to_host(found.codes), _to_host(found.block_scale.view(torch.uint8))
    scales, amaxes = found.global_scale.tolist(), amax_E.tolist()
    each = zip(scales, amaxes, counts_E2.tolist(), swept_E.tolist(), strict=True)
    return [
        RoundedGroup(
            codes=codes[at],
            block_scale=block_scales[at],
            global_scale=scale,
            amax=amax,
            zero_blocks=zero,
            underflow_blocks=underflow,
            swept=swept,
        )
        for at, (scale, amax, (zero, underflow), swept) in enumerate(each)
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
