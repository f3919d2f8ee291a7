"""Second moments of what a layer's experts will be fed, from the inputs of a calibration pass.

In: a visited layer (`model.visit`) and its `input_scale`s. Out: for a few experts at a time their
mean second moments [E, K, K], or the diagonals [E, K] alone, shrunk (`gptq.shrunk`).

The one idea: an expert's rows are gathered from batch after batch until they are many, so that
quantizing them as served, the product for `down` by the exact weights, and the sum of products are
each one large call. When that is done depends on the expert's own rows alone, not on which experts
are summed together nor on which process has them: so neither changes a bit.

Sums are of `code * block_scale`, exact in BF16; a common factor changes nothing. On GPUs products
are BF16 GEMMs with FP32 sums. Rows that are not finite count as zeros.

The sum over all of a layer's experts (the pool) is made only where one of those to be rounded has
fewer rows than inputs. Processes hand it on in the order of experts, as they do with outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass

import torch

from beamq.calib.gptq import shrunk
from beamq.model import gpu_support
from beamq.model.activation import swiglu
from beamq.model.linear import DenseWeight, Gemm, LinearWeight, nvfp4_operand
from beamq.model.moe import ExpertSlice
from beamq.model.visit import VisitedLayer

CHUNK_NBYTES = {"cuda": 24 << 30, "cpu": 1 << 30}
"""What experts that are rounded together may take; it decides no bit."""
FLUSH_WIDTHS = 2  # rows are summed up once there are so many times the input's width


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """`pool` is a sum over `pool_rows` rows; None where every expert has rows enough."""

    scale: torch.Tensor
    pool: torch.Tensor | None
    pool_rows: float


class ExpertMoments:
    """Of one layer. `prepare` each group at every process, then ask `of` any experts."""

    def __init__(
        self, seen: VisitedLayer, *, full: bool, gemm: Gemm, check: Callable[[], None]
    ) -> None:
        """`full`: matrices, not diagonals. `check` may end the work, between two inputs."""
        self._seen = seen
        self._full = full
        self._gemm = gemm
        self._check = check
        self._groups: dict[str, _Group] = {}

    def prepare(self, group: str, input_scale: float, width: int, experts: Set[int]) -> None:
        """What `experts` (all that are to be rounded, at whatever process) share."""
        scale = torch.tensor(input_scale, dtype=torch.float32, device=self._seen.device)
        self._groups[group] = _Group(scale=scale, pool=None, pool_rows=0.0)
        if all(self._seen.rows_E[expert] >= width for expert in experts):
            return
        if not any(self._seen.rows_E):
            raise RuntimeError("a layer whose experts read no token was visited")
        pool, rows = self._token_pool() if group == "gate_up" else self._down_pool(width)
        self._groups[group] = _Group(scale=scale, pool=pool, pool_rows=rows)

    def of(self, group: str, part: ExpertSlice, experts: Sequence[int]) -> torch.Tensor:
        """Shrunk means for `experts` of `part`."""
        shared, rows_E = self._groups[group], self.rows(experts)
        return shrunk(self._sums(group, part, experts), rows_E, shared.pool, shared.pool_rows)

    def rows(self, experts: Sequence[int]) -> torch.Tensor:
        """How many rows each expert was given, FP32 [E]."""
        counts = [float(self._seen.rows_E[expert]) for expert in experts]
        return torch.tensor(counts, device=self._seen.device)

    def _sums(self, group: str, part: ExpertSlice, experts: Sequence[int]) -> torch.Tensor:
        width = weight_of(part, group).shape[2]
        shape = (width, width) if self._full else (width,)
        total = torch.zeros(len(experts), *shape, device=self._seen.device)
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
        """Every token is read by as many experts as any other, so each may count once."""
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
        """Sum over all rows of all experts, from expert to expert and process to process."""
        pool = torch.zeros((width, width) if self._full else (width,), device=self._seen.device)
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
        if gpu_support.serves(x_TK):
            from beamq.formats.kernels import gpu_operand  # Triton

            return gpu_operand.nvfp4_operand(x_TK, scale)
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
    """What rounding one expert takes: sums and three copies on the way to the factor; the weights
    twice in FP32 and once as loaded, and what is moved or tried."""
    n, k = shape[-2:]
    return 4 * (4 * k * k * full + 4 * n * k)


def chunks(experts: Sequence[int], weight_ENK: torch.Tensor, *, full: bool) -> Iterator[list[int]]:
    """Experts in runs that fit the device."""
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
