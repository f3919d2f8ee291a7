"""COMPARE: what did quantization cost, and what did it save? Source and candidates side by side.

In: a source, candidates made from it, and text. Out: a `Comparison`.

The default text is the half of the standard library's sources that default calibration does not
use. Digests in a candidate's beamq.json tell whether it was calibrated on the text that it is
judged by. Its tensors are checked against the checksums there as they are read, because figures of
a damaged copy say nothing about the checkpoint.

Defaults by device: on a GPU 64 rows of 2,048 tokens in BF16, with the GPU's own FP8 and FP4 GEMMs,
as served; on a CPU 16 rows of 512 in FP32 by exact emulation, where no difference comes from the
rounding of activations to BF16.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Unpack

import torch
from numpy import int64
from numpy.typing import NDArray

from beamq.beam.config import BeamConfig
from beamq.calib.options import TextKeywords
from beamq.devices import choose_device
from beamq.errors import BeamqError, UsageError
from beamq.eval.compare.findings import Findings, limits_for
from beamq.eval.compare.footprint import (
    footprint,
    layer_sizes,
    newly_fitting,
    stored_format,
    stored_units,
)
from beamq.eval.compare.options import CompareOptions
from beamq.eval.compare.records import (
    Candidate,
    ComparedModel,
    Comparison,
    completed,
    judge,
    listed,
)
from beamq.eval.compare.side_by_side import ReadChecksums, run_side_by_side, stream_options
from beamq.eval.compare.text import Text, given_text, overlap_notes, read_text
from beamq.io.checkpoint import Checkpoint, open_checkpoint
from beamq.io.files import user_path
from beamq.io.journal import refuse_unfinished
from beamq.io.manifest import Manifest, file_checksum
from beamq.io.shard_cache import DEFAULT_CACHE_BYTES
from beamq.io.source import INDEX_NAME
from beamq.options import from_keywords, ignore, takes
from beamq.ranks import Ranks, current_ranks

DEFAULT_SIZE = {"cuda": (64, 2048), "cpu": (16, 512)}
DEFAULT_GEMM = {"cuda": "auto", "cpu": "reference"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Opened:
    """A checkpoint, and what is known of it without reading weights."""

    checkpoint: Checkpoint
    manifest: Manifest | None
    model: ComparedModel


@dataclass(frozen=True, kw_only=True)
class CompareEvents:
    """Called by `compare`: when everything is checked, with bytes of weights done and in all, and
    with the result before it is returned."""

    on_start: Callable[[], None] = ignore
    progress: Callable[[int, int], None] | None = None
    on_result: Callable[[Comparison], None] = ignore


class CompareKeywords(TextKeywords, total=False):
    """Keywords of `compare`."""

    seed: int
    dtype: str | None
    gemm: str | None
    input_ids: NDArray[int64] | None
    on_start: Callable[[], None]
    progress: Callable[[int, int], None] | None
    on_result: Callable[[Comparison], None]


@takes(CompareOptions, CompareEvents)
def compare(
    source: str | Path, checkpoints: Sequence[str | Path], **keywords: Unpack[CompareKeywords]
) -> Comparison:
    """Run `source` and all `checkpoints` on the same tokens and say how they differ.

    See `CompareOptions` and `CompareEvents` for the keywords. A candidate whose bytes are not those
    in its beamq.json is judged not safe.

    Under torchrun, experts are split over ranks; all return the same, and only the first one calls
    `on_start` and `on_result`. Raises (there at every rank) `UsageError` for options,
    `ConfigError` for a candidate that is another model, `CalibrationError` for data, what reading
    checkpoints and `on_result` raise, and `EnvironmentFault` where another rank is lost.
    """
    asked, events = from_keywords(CompareOptions, keywords), from_keywords(CompareEvents, keywords)
    begun = time.monotonic()
    if not checkpoints:
        raise UsageError("no checkpoint to compare with the source; name at least one")
    ranks = current_ranks()
    try:
        with ExitStack() as stack:
            with ranks.agreeing():
                where = choose_device(asked.device, ranks)
                gemm = asked.gemm or DEFAULT_GEMM.get(where.type, "reference")
                options, settings = stream_options(where, asked.dtype, gemm)
                base, *others = _open_all([source, *checkpoints], ranks, stack)
                if asked.input_ids is not None:
                    text = given_text(asked.input_ids)
                else:
                    size = _size(base.checkpoint, where, asked.samples, asked.sequence_length)
                    text = read_text(base.checkpoint, asked.data, size, asked.seed)
                sums = [ReadChecksums(other.manifest) for other in others]
            found = run_side_by_side(
                base.checkpoint,
                [other.checkpoint for other in others],
                text.ids_BT,
                options,
                ranks=ranks,
                sums=sums,
                on_start=events.on_start,
                progress=events.progress,
            )
            with ranks.agreeing():
                result = Comparison(
                    source=base.model,
                    candidates=tuple(
                        _candidate(base, other, findings, text, each.fault)
                        for other, findings, each in zip(others, found, sums, strict=True)
                    ),
                    data={**text.record, "notes": list(text.notes)},
                    settings=settings,
                    seconds=time.monotonic() - begun,
                )
                if ranks.first:
                    events.on_result(result)
        return result
    finally:
        ranks.leave()


def _size(
    checkpoint: Checkpoint, device: torch.device, samples: int | None, length: int | None
) -> tuple[int, int]:
    longest = BeamConfig.from_dict(checkpoint.config).max_position_embeddings
    rows, tokens = DEFAULT_SIZE.get(device.type, DEFAULT_SIZE["cpu"])
    if length is not None and length > longest:
        raise UsageError(
            f"sequence length {length:,} is beyond the model's max_position_embeddings"
            f" ({longest:,})"
        )
    return samples or rows, length or min(tokens, longest)


# --- the models -----------------------------------------------------------------------------


def _open_all(paths: Sequence[str | Path], ranks: Ranks, stack: ExitStack) -> list[_Opened]:
    """Open all of them; those of the same name get a number."""
    for path in paths:
        refuse_unfinished(user_path(path))
    budget = DEFAULT_CACHE_BYTES // ranks.world
    opened = [stack.enter_context(open_checkpoint(path, cache_bytes=budget)) for path in paths]
    total = Counter(checkpoint.label for checkpoint in opened)
    seen: Counter[str] = Counter()
    models = []
    for checkpoint in opened:
        seen[checkpoint.label] += 1
        number = f" ({seen[checkpoint.label]})" if total[checkpoint.label] > 1 else ""
        manifest = Manifest.of(checkpoint.source)
        recorded = manifest or Manifest.parse({})
        model = ComparedModel(
            name=checkpoint.label + number,
            format=stored_format(checkpoint.tensors.values()),
            recipe=_text(recorded.recipe, "name"),
            input_scales=_text(recorded.input_scales, "description"),
            memory=footprint(checkpoint, BeamConfig.from_dict(checkpoint.config)),
        )
        models.append(_Opened(checkpoint=checkpoint, manifest=manifest, model=model))
    return models


def _text(record: Mapping[str, Any] | None, key: str) -> str | None:
    value = (record or {}).get(key)
    return value if isinstance(value, str) else None


def _candidate(
    base: _Opened, other: _Opened, findings: Findings, text: Text, unchecked: str | None
) -> Candidate:
    config = BeamConfig.from_dict(base.checkpoint.config)
    kinds = [
        f"{layer.removesuffix('_attention')}, {mlp}"
        for layer, mlp in zip(config.layer_types, config.mlp_layer_types, strict=True)
    ]
    layers = completed(findings.layers, layer_sizes(other.checkpoint), kinds)
    findings = replace(findings, layers=layers)
    limits = limits_for(other.manifest, *stored_units(other.checkpoint))
    fits = newly_fitting(base.model.memory, other.model.memory)
    return Candidate(
        **{each.name: getattr(findings, each.name) for each in fields(findings)},
        model=other.model,
        verdict=judge(findings, limits, base.model.memory, other.model.memory, fits),
        newly_fits=fits,
        notes=tuple(_notes(base, other, text, unchecked)),
    )


# --- what to know besides the figures -----------------------------------------------------------


def _notes(base: _Opened, other: _Opened, text: Text, unchecked: str | None) -> list[str]:
    notes = [*overlap_notes(other.manifest, text.record)]
    if unchecked is not None:
        notes.append(f"its tensors were not checked against beamq.json: {unchecked}")
    changed = _changed_files(other.checkpoint, other.manifest)
    if changed:
        notes.append(f"{listed(changed)} changed since beamq.json was written")
    scales = other.model.input_scales
    if scales and scales.startswith("not calibrated"):
        notes.append(scales)
    if _tokenizer(other.checkpoint) not in (None, _tokenizer(base.checkpoint)):
        notes.append("its tokenizer.json differs from the source's, which was used for all models")
    if base.model.format not in ("bf16", "fp16", "fp32"):
        notes.append(
            f"the source itself is {base.model.format}: differences are from that, not from BF16"
        )
    return notes


def _changed_files(checkpoint: Checkpoint, manifest: Manifest | None) -> list[str]:
    """Configs and index that do not have the checksum that beamq.json records."""
    if manifest is None or manifest.files is None:
        return []
    found = []
    for name in ("config.json", "hf_quant_config.json", INDEX_NAME):
        if name in manifest.files and checkpoint.source.has(name):
            with suppress(BeamqError):  # an unknown algorithm: `ReadChecksums.fault` reports it
                checksum = file_checksum(checkpoint.source.path(name), manifest.algorithm)
                if checksum != manifest.files[name]:
                    found.append(name)
    return found


def _tokenizer(checkpoint: Checkpoint) -> bytes | None:
    """The tokenizer's bytes; None for a checkpoint without one."""
    if not checkpoint.source.has("tokenizer.json"):
        return None
    return checkpoint.source.path("tokenizer.json").read_bytes()
