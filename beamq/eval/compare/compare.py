"""COMPARE: what did quantization cost, and what did it save? Source and candidates side by side.

In: a source, candidates made from it, and text. Out: a `Comparison`.

The default text is the half of the standard library's sources that default calibration does not
use. Digests in a candidate's beamq.json show whether it was calibrated on the same text. Its
tensors are checked against the checksums there as they are read, because figures of a damaged copy
say nothing about the checkpoint.

A GPU runs its own FP8 and FP4 GEMMs in BF16, as served; a CPU emulates them exactly in FP32, so no
difference comes from the rounding of activations to BF16.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from numpy import int64
from numpy.typing import NDArray

from beamq.adapter.merged import open_merged
from beamq.adapter.options import AdapterKeywords, AdapterOptions
from beamq.beam.config import BeamConfig
from beamq.calib.data import ids_digest, load_text
from beamq.calib.options import TextKeywords
from beamq.calib.presets import default_text
from beamq.devices import choose_device
from beamq.errors import BeamqError, UsageError, shown_value
from beamq.eval.compare.adapter_effect import adapter_effects, effect_notes
from beamq.eval.compare.findings import Findings, limits_for
from beamq.eval.compare.footprint import (
    footprint,
    layer_sizes,
    newly_fitting,
    stored_format,
    stored_formats,
)
from beamq.eval.compare.options import CompareOptions
from beamq.eval.compare.records import Candidate, ComparedModel, Comparison, judge, listed
from beamq.eval.compare.side_by_side import ReadChecksums, run_side_by_side, stream_options
from beamq.io.checkpoint import Checkpoint, open_checkpoint
from beamq.io.files import user_path
from beamq.io.journal import refuse_unfinished
from beamq.io.manifest import Manifest, file_checksum
from beamq.io.shard_cache import DEFAULT_CACHE_BYTES
from beamq.io.source import INDEX_NAME
from beamq.model.logits import token_rows
from beamq.options import from_keywords, ignore, takes
from beamq.plan.content import refuse_zeros
from beamq.ranks import Ranks, current_ranks

DEFAULT_SIZE = {"cuda": (64, 2048), "cpu": (16, 512)}
DEFAULT_GEMM = {"cuda": "auto", "cpu": "reference"}
DEFAULT_KIND = "standard library"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Opened:
    """A checkpoint, and what is known of it without reading weights."""

    checkpoint: Checkpoint
    manifest: Manifest | None
    model: ComparedModel


@dataclass(frozen=True, kw_only=True)
class CompareEvents:
    """Called by `compare`: `on_start` when everything is checked, `progress` with bytes of weights
    done and in all, `on_result` with the result before it is returned."""

    on_start: Callable[[], None] = ignore
    progress: Callable[[int, int], None] | None = None
    on_result: Callable[[Comparison], None] = ignore


class CompareKeywords(TextKeywords, AdapterKeywords, total=False):
    """Keywords of `compare`."""

    seed: int
    dtype: str | torch.dtype | None
    gemm: str | None
    input_ids: NDArray[int64] | torch.Tensor | Sequence[Sequence[int]] | None
    on_start: Callable[[], None]
    progress: Callable[[int, int], None] | None
    on_result: Callable[[Comparison], None]


@takes(CompareOptions, CompareEvents, AdapterOptions)
def compare(
    source: str | Path,
    checkpoints: str | Path | Sequence[str | Path],
    **keywords: Unpack[CompareKeywords],
) -> Comparison:
    """Run `source` and all `checkpoints` on the same tokens and say how they differ.

    With an `adapter`, the source is the merged model, the base without it is the last candidate,
    and each quantized candidate says what is left of the adapter's update (`Candidate.adapter`).
    See `CompareOptions` and `CompareEvents` for the keywords. A candidate whose bytes are not those
    in its beamq.json is called damaged. Under torchrun, experts are split over ranks; all return
    or raise the same, and only the first one calls `on_start` and `on_result`. Raises `UsageError`
    for options, `ConfigError` for a candidate that is another model, `CalibrationError` for data,
    what reading checkpoints and `on_result` raise, and `EnvironmentFault` for a lost rank.
    """
    asked, events = from_keywords(CompareOptions, keywords), from_keywords(CompareEvents, keywords)
    begun = time.monotonic()
    paths = [checkpoints] if isinstance(checkpoints, (str, Path)) else checkpoints
    if not paths:
        raise UsageError("checkpoints is empty; name at least one to compare with the source")
    ranks = current_ranks()
    try:
        with ExitStack() as stack:
            with ranks.agreeing():
                where = choose_device(asked.device, ranks)
                gemm = asked.gemm or DEFAULT_GEMM.get(where.type, "reference")
                options, settings = stream_options(where, asked.dtype, gemm)
                adapter = from_keywords(AdapterOptions, keywords)
                base, *others = _open_all([source, *paths], adapter, ranks, stack)
                ids_BT, record = _text_of(asked, base.checkpoint, where)
                sums = [ReadChecksums(other.manifest) for other in others]
            found = run_side_by_side(
                base.checkpoint,
                [other.checkpoint for other in others],
                ids_BT,
                options,
                ranks=ranks,
                sums=sums,
                on_start=events.on_start,
                progress=events.progress,
            )
            moved = None if adapter.adapter is None else found[-1].divergence.mean_kld.value
            with ranks.agreeing():
                result = Comparison(
                    source=base.model,
                    candidates=tuple(
                        _candidate(
                            base, other, findings, moved, _notes(base, other, record, each.fault)
                        )
                        for other, findings, each in zip(others, found, sums, strict=True)
                    ),
                    data=record,
                    settings=settings,
                    seconds=time.monotonic() - begun,
                )
                if ranks.first:
                    events.on_result(result)
        return result
    finally:
        ranks.leave()


def _text_of(
    asked: CompareOptions, checkpoint: Checkpoint, device: torch.device
) -> tuple[NDArray[int64], dict[str, Any]]:
    """The token ids [S, T] to compare on, and their record."""
    if asked.input_ids is not None:
        return given_text(asked.input_ids)
    length = asked.sequence_length
    longest = BeamConfig.from_dict(checkpoint.config).max_position_embeddings
    rows, tokens = DEFAULT_SIZE.get(device.type, DEFAULT_SIZE["cpu"])
    if length is not None and length > longest:
        raise UsageError(
            f"sequence length {length:,} is beyond the model's max_position_embeddings"
            f" ({longest:,})"
        )
    size = asked.samples or rows, length or min(tokens, longest)
    return read_text(checkpoint, asked.data, size, asked.seed)


# --- the text -------------------------------------------------------------------------------


def read_text(
    checkpoint: Checkpoint, data: Sequence[str], size: tuple[int, int], seed: int
) -> tuple[NDArray[int64], dict[str, Any]]:
    """Token ids [S, T], with `size` (S, T), of `data` or of the default text; and their record,
    with notes on how they were read. Of presets these are the documents that calibration does not
    use. Raises `UsageError` for rows of one token, `CalibrationError` for data."""
    samples, length = size
    if length < 2:
        raise UsageError(f"sequence length is {length}, expected at least 2 to predict a token")
    read = load_text(
        data, checkpoint, samples=samples, sequence_length=length, seed=seed, split="evaluation"
    )
    description = ", ".join(source.name for source in read.sources)
    record = {"description": description, **read.to_dict(), "notes": list(read.notes)}
    return read.input_ids, record


def given_text(
    input_ids: NDArray[int64] | torch.Tensor | Sequence[Sequence[int]],
) -> tuple[NDArray[int64], dict[str, Any]]:
    """Token ids [S, T] as they are, and their record. Raises `UsageError` for another shape."""
    ids_BT = np.ascontiguousarray(token_rows(input_ids).numpy())
    if ids_BT.shape[1] < 2:
        raise UsageError(f"input_ids has shape {list(ids_BT.shape)}, expected [S, T] with T > 1")
    record = {
        "description": "token ids given by the caller",
        "digest": ids_digest(list(ids_BT)),
        "samples": ids_BT.shape[0],
        "sequence_length": ids_BT.shape[1],
        "tokens": ids_BT.size,
        "sources": [],
        "notes": [],
    }
    return ids_BT, record


def overlap_notes(manifest: Manifest | None, record: Mapping[str, Any]) -> list[str]:
    """Whether digests show that a candidate was calibrated on the text it is judged by."""
    entries = _objects(None if manifest is None else manifest.input_scales.get("data"))
    if not entries:
        return []
    theirs = [source for entry in entries for source in _objects(entry.get("sources"))]
    ours = record["sources"]
    if _digests([record, *ours]) & _digests([*entries, *theirs]):
        return ["it was calibrated on this text, which makes it look better; use other data"]
    default = all(source.get("kind") == DEFAULT_KIND for source in [*ours, *theirs])
    if default and ours and theirs:
        halves = [default_text(split).digests() for split in ("calibration", "evaluation")]
        if not halves[0] & halves[1]:
            return ["calibrated on the other half of the default text; no file is in both halves"]
    if ours and theirs and all(each.get("kind") == "preset" for each in [*ours, *theirs]):
        return ["calibrated on public datasets; none of the documents it may see is in this text"]
    return ["calibrated on other data, which may share documents with this text"]


def _objects(value: Any) -> list[Mapping[str, Any]]:
    """The objects of a list; none for anything else, as a stranger's beamq.json may hold."""
    if not isinstance(value, list):
        return []
    return [entry for entry in value if isinstance(entry, Mapping)]


def _digests(entries: Sequence[Mapping[str, Any]]) -> set[str]:
    return {str(entry["digest"]) for entry in entries if entry.get("digest")}


# --- the models -----------------------------------------------------------------------------


def _open_all(
    paths: Sequence[str | Path], adapter: AdapterOptions, ranks: Ranks, stack: ExitStack
) -> list[_Opened]:
    """Open all of them, the first with the adapter; then it is the last one too, without it, to say
    how far the adapter moves it. Those of the same name get a number."""
    if adapter.adapter is not None:
        paths = [*paths, paths[0]]
    for path in paths:
        refuse_unfinished(user_path(path))
    budget = DEFAULT_CACHE_BYTES // ranks.world
    base = stack.enter_context(open_merged(paths[0], adapter, cache_bytes=budget))
    opened = [base]
    opened += [stack.enter_context(open_checkpoint(p, cache_bytes=budget)) for p in paths[1:]]
    for checkpoint in opened:
        refuse_zeros(checkpoint)
    labels = [checkpoint.label for checkpoint in opened]
    models = []
    for place, checkpoint in enumerate(opened):
        number = labels[: place + 1].count(checkpoint.label)
        suffix = f" ({number})" if labels.count(checkpoint.label) > 1 else ""
        manifest = Manifest.of(checkpoint.source)
        recorded = manifest or Manifest.parse({})
        model = ComparedModel(
            name=checkpoint.label + suffix,
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
    base: _Opened, other: _Opened, findings: Findings, moved: float | None, notes: Sequence[str]
) -> Candidate:
    config = BeamConfig.from_dict(base.checkpoint.config)
    sizes, total = layer_sizes(other.checkpoint), sum(layer.added for layer in findings.layers)
    layers = []
    kinds = (config.layer_types, config.mlp_layer_types)
    for layer, attention, mlp in zip(findings.layers, *kinds, strict=True):
        quantized, extra = sizes.get(layer.layer, (0, 0))
        layers.append(
            replace(
                layer,
                kind=f"{attention.removesuffix('_attention')}, {mlp}",
                share=layer.added / total if total else 0.0,
                quantized_bytes=quantized,
                extra_bytes_in_bf16=extra,
            )
        )
    findings = replace(findings, layers=tuple(layers))
    limits = limits_for(other.manifest, stored_formats(other.checkpoint))
    effects = adapter_effects(base.checkpoint, other.checkpoint, other.manifest)
    fits = newly_fitting(base.model.memory, other.model.memory)
    return Candidate(
        **{each.name: getattr(findings, each.name) for each in fields(findings)},
        model=other.model,
        verdict=judge(findings, limits, base.model.memory, other.model.memory, fits),
        newly_fits=fits,
        adapter=effects,
        notes=(*notes, *effect_notes(effects, findings.divergence.mean_kld.value, moved)),
    )


def _adapter_digest(model: _Opened) -> Any:
    """That of the adapter which beamq.json says is merged in."""
    found = None if model.manifest is None else model.manifest.data.get("adapter")
    return found.get("digest") if isinstance(found, dict) else None


# --- the notes of a candidate ---------------------------------------------------------------


def _notes(
    base: _Opened, other: _Opened, record: Mapping[str, Any], unchecked: str | None
) -> list[str]:
    notes = overlap_notes(other.manifest, record)
    if unchecked is not None:
        notes.append(f"its tensors were not checked against beamq.json: {unchecked}")
    if changed := _changed_files(other.checkpoint, other.manifest):
        notes.append(f"{listed(changed)} changed since beamq.json was written")
    made_with = None if other.manifest is None else other.manifest.adapter
    plain = base.checkpoint.source.merged is None
    if made_with is not None and plain and _adapter_digest(base) != made_with.get("digest"):
        notes.append(
            f"the adapter {shown_value(made_with.get('name'))} is merged into it and not into the"
            " source, so that all figures contain the update; --adapter merges it into the source"
        )
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
    has = checkpoint.source.has("tokenizer.json")
    return checkpoint.source.path("tokenizer.json").read_bytes() if has else None
