"""Whether an adapter's update survives the rounding of a candidate.

In: the source with the adapter merged in, and a candidate made from it. Out: a `PartEffect` for
each part that is adapted and quantized.

With W the base's weight, D the update (what the merge, rounded to the source's dtype, adds) and Q
the candidate's rounding to nearest with the shared scales of its format, Q(W + D) - Q(W) is what
quantization leaves of D. `kept` is its norm over that of D, `cosine` its direction: an update far
below the step of the grid is lost (both fall to 0) or becomes noise (the cosine falls). Q(W) is
computed here; where the candidate was rounded by GPTQ, the difference contains GPTQ's own.

The figures are of a sample of linears, spread evenly over each part, whose weights are read;
nothing is run.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from beamq.adapter.merged import MergedFiles
from beamq.adapter.read import part_of
from beamq.adapter.record import part_counts
from beamq.beam.config import BeamConfig
from beamq.beam.tensors import QUANTIZABLE, classify, fused_group
from beamq.formats.kernels import cpu
from beamq.formats.numerics import NVFP4_BLOCK, tensor_from_bytes
from beamq.io.checkpoint import Checkpoint
from beamq.io.manifest import Manifest
from beamq.io.safetensors_header import ITEMSIZE
from beamq.plan.layout import WEIGHT_FORMATS, WeightFormat, format_in
from beamq.plan.sources import map_sources

SAMPLE = 12  # linears of a part
EATEN = 0.3  # the cosine below which noise is three times what is left of the update


@dataclass(frozen=True, slots=True, kw_only=True)
class PartEffect:
    """What is left of an adapter in one part: `sampled` of `weights` adapted, quantized linears.

    `size` is the norm of the update over that of the base's weights.
    """

    part: str
    weights: int
    sampled: int
    size: float
    kept: float
    cosine: float

    @property
    def eaten(self) -> bool:
        """Whether mostly noise is left."""
        return self.cosine < EATEN


def adapter_effects(
    merged: Checkpoint, candidate: Checkpoint, manifest: Manifest | None
) -> tuple[PartEffect, ...]:
    """Nothing where no adapter is merged into the source."""
    if not isinstance(merged.source, MergedFiles):
        return ()
    reader = _Reader(merged, candidate, manifest)
    adapted = [name for name in merged.source.assignment.updates if reader.is_quantized(name)]
    found = []
    for part, count in part_counts(adapted).items():
        names = [name for name in adapted if part_of(name) == part]
        chosen = names[:: max(1, -(-len(names) // SAMPLE))]
        sums = [reader.sums(name) for name in chosen]
        left, update, both, base = (sum(column) for column in zip(*sums, strict=True))
        found.append(
            PartEffect(
                part=part,
                weights=count,
                sampled=len(chosen),
                size=(update / base) ** 0.5 if base else 0.0,
                kept=(left / update) ** 0.5 if update else 0.0,
                cosine=both / (left * update) ** 0.5 if left and update else 0.0,
            )
        )
    return tuple(found)


def effect_notes(effects: Sequence[PartEffect], lost: float, moved: float | None) -> list[str]:
    """What a candidate loses, in nats a token, next to how far the adapter moves the model; and a
    warning where rounding is the larger. `moved` is None where no adapter is merged."""
    if moved is None or not effects:
        return []
    notes = [
        f"the adapter moves the model by {moved:.4f} nats a token (mean KLD of the base from the"
        f" merged model); quantization moves it by {lost:.4f}"
    ]
    noisy = [f"{each.part} (cosine {each.cosine:.2f})" for each in effects if each.eaten]
    if lost >= moved or noisy:
        what = f" in {', '.join(noisy)}" if noisy else ""
        notes.append(
            f"WARNING: rounding eats the adapter's update{what}: less of it than of rounding errors"
            " is left; keep these parts in high precision (--exclude), use FP8, or train with a"
            " larger scaling"
        )
    return notes


class _Reader:
    """Reads one linear as base, merged, and rounded from each, as FP32 [N, K]."""

    def __init__(
        self, merged: Checkpoint, candidate: Checkpoint, manifest: Manifest | None
    ) -> None:
        assert isinstance(merged.source, MergedFiles)
        self._candidate = candidate
        self._models = merged.source.base, merged
        config = BeamConfig.from_dict(merged.config)
        self._places = [
            {role.name: place for role, place in map_sources(model, config).found}
            for model in self._models
        ]
        self._groups: dict[str, list[str]] = {}
        for name in self._places[0]:
            if (role := classify(name)).role in QUANTIZABLE:
                self._groups.setdefault(fused_group(role), []).append(name)
        recipe = (None if manifest is None else manifest.recipe) or {}
        self._rule = "max" if recipe.get("scales") == "max" else "sweep"

    def is_quantized(self, name: str) -> bool:
        """Whether the candidate stores codes and scales for a weight."""
        module = classify(name).module
        scales = (f"{module}.weight_scale", f"{module}.weight_scale_inv")
        stored = self._candidate.tensors
        return name in stored and any(scale in stored for scale in scales)

    def sums(self, name: str) -> tuple[float, float, float, float]:
        """Of one linear: |left|^2, |D|^2, <left, D> and |W|^2."""
        (base, dtype, k), (after, after_dtype, _) = (self._bytes(name, i) for i in (0, 1))
        before = tensor_from_bytes(base, dtype, (-1, k)).double()
        update = tensor_from_bytes(after, after_dtype, (-1, k)).double() - before
        left = (self._stored(name, k) - self._rounded(name, base, dtype, k)).double()
        pairs = ((left, left), (update, update), (left, update), (before, before))
        one, two, three, four = (float((a * b).sum()) for a, b in pairs)
        return one, two, three, four

    def _bytes(self, name: str, model: int) -> tuple[bytearray, str, int]:
        """(bytes, dtype, K) of a weight of the base (0) or of the merged model (1)."""
        place = self._places[model][name]
        data = bytearray(place.nbytes)
        self._models[model].read_into(place.spec, memoryview(data), place.start)
        return data, place.spec.dtype, place.shape[-1]

    def _stored(self, name: str, k: int) -> torch.Tensor:
        """The candidate's weight."""
        module, read = classify(name).module, self._candidate.read
        fmt = self._format(module)
        codes, scales = read(name), read(f"{module}.{fmt.scale}")
        if fmt.scalars:
            (scale,) = struct.unpack("<f", read(f"{module}.weight_scale_2"))
            return _decoded(fmt, codes, scales, k, scale)
        return _decoded(fmt, codes, scales, k)

    def _format(self, module: str) -> WeightFormat:
        """The candidate's format of a linear."""
        return WEIGHT_FORMATS[format_in(self._candidate.tensors, module) or "fp8"]

    def _rounded(self, name: str, base: bytearray, dtype: str, k: int) -> torch.Tensor:
        """Q(W): the base's weight in the candidate's format, with the scale of its group."""
        numel, fmt = len(base) // ITEMSIZE[dtype], self._format(classify(name).module)
        if not fmt.scalars:
            codes, scales = bytearray(numel), bytearray(fmt.scale_nbytes(numel // k, k))
            cpu.fp8_quantize(fmt.rounding, base, dtype, k, codes, scales)
            return _decoded(fmt, codes, scales, k)
        codes, scales = bytearray(numel // 2), bytearray(numel // NVFP4_BLOCK)
        partners = (self._bytes(each, 0) for each in self._groups[fused_group(classify(name))])
        scale = cpu.nvfp4_global_scale(max(cpu.amax(data, kind).amax for data, kind, _ in partners))
        cpu.nvfp4_quantize(base, dtype, k, scale, codes, scales, scale_rule=self._rule)
        return _decoded(fmt, codes, scales, k, scale)


def _decoded(
    fmt: WeightFormat, codes: bytearray, scales: bytearray, k: int, global_scale: float = 1.0
) -> torch.Tensor:
    """FP32 [N, K]."""
    out = bytearray(len(codes) * (8 if fmt.scalars else 4))
    if not fmt.scalars:
        cpu.fp8_dequantize(fmt.rounding, codes, scales, k, out, "F32")
    else:
        cpu.nvfp4_dequantize(codes, scales, k, global_scale, out, "F32")
    return tensor_from_bytes(out, "F32", (-1, k))
