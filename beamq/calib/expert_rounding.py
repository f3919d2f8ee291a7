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
fewer rows than inputs is drawn towards the moments of all of the layer's (`gptq.shrunk`).

Several processes round their own experts each; what they must share goes by `amax` and by the
layer's exchange. Limits: weights must be on hand exactly, so the activation dtype must hold the
source's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from beamq.calib.expert_moments import (
    CHUNK_NBYTES,
    ExpertMoments,
    chunks,
    expert_nbytes,
    numbers,
    weight_of,
)
from beamq.calib.gptq import damping_of, factorize, round_experts
from beamq.calib.scales import AMAX_PER_SCALE, MIN_SCALE
from beamq.config import BeamConfig
from beamq.errors import Interrupted, TensorError
from beamq.formats import nvfp4
from beamq.formats.numerics import E4M3_MIN, NVFP4_BLOCK
from beamq.model.linear import Gemm
from beamq.model.moe import ExpertSlice
from beamq.model.visit import VisitedLayer

GROUPS = ("gate_up", "down_proj")
FLOOR = 1e-3  # of the mean second moment, added to each: no column counts for nothing
WRITERS = 4  # threads that hand over what a chunk of experts gave

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

    `amax(layer, group)` is the largest input magnitude over all experts of the layer; it is asked
    for once a layer and group. `write` is called from several threads. Processes that share a pass
    have the same `wanted`, and round those of their own experts.
    """

    def __init__(
        self,
        wanted: Mapping[int, Set[Group]],
        *,
        method: str,
        config: BeamConfig,
        gemm: Gemm,
        amax: Callable[[int, str], float],
        write: Callable[[int, Group, RoundedGroup], None],
        stopped: Callable[[], bool],
    ) -> None:
        self._wanted = wanted
        self._full = method == "gptq"
        self._widths = {
            "gate_up": config.hidden_size,
            "down_proj": config.moe_intermediate_size,
        }
        self._gemm = gemm
        self._amax = amax
        self._write = write
        self._stopped = stopped

    def wants(self, layer: int) -> bool:
        """See `ExpertVisitor`."""
        return bool(self._wanted.get(layer))

    def visit(self, seen: VisitedLayer) -> None:
        """Round and write all that is wanted of the layer. Raises `TensorError` for weights that
        are not finite, `Interrupted`, and what `write` raises."""
        moments = ExpertMoments(seen, full=self._full, gemm=self._gemm, check=self._check)
        wanted = self._wanted[seen.layer]
        for group, width in self._widths.items():
            scale = input_scale(self._amax(seen.layer, group))
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
        if self._stopped():
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
            self._write(layer, (experts[at], group), rounded[at])

        with ThreadPoolExecutor(WRITERS) as pool:
            for _ in pool.map(write, range(len(experts))):
                pass


def _swept(
    w_ENK: torch.Tensor, scale_E: torch.Tensor, moments_EK: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and block scales by the sweep, columns weighted by the moments."""
    weight_EK = moments_EK + FLOOR * moments_EK.mean(dim=1, keepdim=True)
    found = [
        nvfp4.quantize(w_NK, scale, scales="sweep", weight_K=weight_K)
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
    """What was found, by expert, in few transfers."""
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
    # Pinned, since pageable memory is several times slower to reach.
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)


def input_scale(amax: float) -> float:
    """The `input_scale` that will be written for this amax (see `calib.scales`)."""
    return float(max(np.float32(amax) / AMAX_PER_SCALE, MIN_SCALE))


def rounding_nbytes(device: str, config: BeamConfig) -> int:
    """What rounding takes of the device at once, beside weights and activations."""
    shape = (2 * config.moe_intermediate_size, config.hidden_size)
    one = expert_nbytes(shape, full=True)
    return max(min(CHUNK_NBYTES[device], config.num_experts * one), one)


def _counts(w_ENK: torch.Tensor, scale_E: torch.Tensor) -> torch.Tensor:
    """[E, 2]: blocks of zeros, and blocks whose ideal scale would round to 0."""
    peak_EB = w_ENK.abs().view(w_ENK.shape[0], -1, NVFP4_BLOCK).amax(dim=2).float()
    ideal_EB = peak_EB / (6.0 * scale_E.view(-1, 1))
    underflow_EB = (ideal_EB <= E4M3_MIN / 2) & (ideal_EB > 0)
    return torch.stack(((ideal_EB == 0).sum(dim=1), underflow_EB.sum(dim=1)), dim=1)
