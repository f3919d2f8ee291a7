"""COMPARE: what did quantization cost, and what did it save? Source and candidates side by side.

In: a source, candidates made from it, and text (or the default one). Out: a `Comparison`.

The default text is the half of the standard library's sources that default calibration does not
use; that a candidate was not calibrated on what it is judged by is checked by digest where
beamq.json tells what it was calibrated on. Its tensors are held against the checksums there as they
are read: figures of a damaged copy would say nothing of the checkpoint.

Defaults by device: 64 rows of 2,048 tokens in BF16 on a GPU with its own FP8 and FP4 GEMMs, as
served; 16 of 512 in FP32 on a CPU by the exact emulation, where no rounding of activations is part
of any difference.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import torch

from beamq.beam.config import BeamConfig
from beamq.calib.options import DTYPES
from beamq.devices import choose_device
from beamq.errors import BeamqError, UsageError
from beamq.eval.compare.findings import Findings, limits_for
from beamq.eval.compare.footprint import (
    Footprint,
    footprint,
    newly_fitting,
    stored_format,
    stored_units,
)
from beamq.eval.compare.options import CompareEvents, CompareKeywords, CompareOptions
from beamq.eval.compare.records import Candidate, ComparedModel, Comparison, damage_of
from beamq.eval.compare.side_by_side import ReadChecksums, StreamOptions, run_side_by_side
from beamq.eval.compare.text import Text, given_text, overlap_notes, read_text
from beamq.eval.compare.verdict import judge, listed
from beamq.io.checkpoint import Checkpoint, open_checkpoint
from beamq.io.files import user_path
from beamq.io.journal import refuse_unfinished
from beamq.io.manifest import Manifest, file_checksum
from beamq.io.shard_cache import DEFAULT_CACHE_BYTES
from beamq.io.source import INDEX_NAME
from beamq.model.gemm.select import select_gemm
from beamq.options import from_keywords, takes
from beamq.ranks import Ranks, current_ranks
from beamq.version import __version__

DEFAULT_SIZE = {"cuda": (64, 2048), "cpu": (16, 512)}
DEFAULT_DTYPE = {"cuda": "bfloat16", "cpu": "float32"}
DEFAULT_GEMM = {"cuda": "auto", "cpu": "reference"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Opened:
    """A checkpoint and what is known of it beside its weights."""

    checkpoint: Checkpoint
    manifest: Manifest | None
    footprint: Footprint
    model: ComparedModel


@takes(CompareOptions, CompareEvents)
def compare(
    source: str | Path,
    checkpoints: Sequence[str | Path],
    **keywords: Unpack[CompareKeywords],
) -> Comparison:
    """Run `source` and all `checkpoints` on the same tokens and say how they differ.

    See `CompareOptions` and `CompareEvents` for the keywords. A candidate whose bytes are not those
    in its beamq.json is judged not safe.

    Under torchrun, experts are split over ranks; all find the same, and the first alone calls
    `on_start` and `on_result`. Raises, there at every rank, `UsageError` for options that do not
    fit, `ConfigError` for a candidate that is another model, `CalibrationError` for data, and what
    reading checkpoints and `on_result` raise; `EnvironmentFault` where another rank is lost.
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
                multiply = asked.gemm or DEFAULT_GEMM.get(where.type, "reference")
                options = StreamOptions(
                    dtype=_dtype(asked.dtype, where), device=where, gemm=select_gemm(multiply)
                )
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
                    settings=_settings(options, multiply),
                    seconds=time.monotonic() - begun,
                )
                if ranks.first:
                    events.on_result(result)
        return result
    finally:
        ranks.leave()


def _settings(options: StreamOptions, gemm: str) -> dict[str, Any]:
    """What was run with, for the record."""
    device = options.device
    return {
        "beamq": __version__,
        "torch": torch.__version__,
        "dtype": str(options.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "gemm": gemm,
    }


def _dtype(name: str | None, device: torch.device) -> torch.dtype:
    chosen = name or DEFAULT_DTYPE.get(device.type, "float32")
    if chosen not in DTYPES:
        raise UsageError(f"dtype is {chosen!r}, expected {' or '.join(DTYPES)}")
    found: torch.dtype = getattr(torch, chosen)
    return found


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
    """Open all; models of one name are told apart by a number."""
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
        models.append(_open(checkpoint, checkpoint.label + number))
    return models


def _open(checkpoint: Checkpoint, name: str) -> _Opened:
    manifest = Manifest.of(checkpoint.source)
    recorded = manifest or Manifest.parse({})
    size = footprint(checkpoint, BeamConfig.from_dict(checkpoint.config))
    return _Opened(
        checkpoint=checkpoint,
        manifest=manifest,
        footprint=size,
        model=ComparedModel(
            name=name,
            format=stored_format(checkpoint.tensors.values()),
            recipe=_text(recorded.recipe, "name"),
            input_scales=_text(recorded.input_scales, "description"),
            footprint=size,
        ),
    )


def _text(record: Mapping[str, Any] | None, key: str) -> str | None:
    value = (record or {}).get(key)
    return value if isinstance(value, str) else None


def _candidate(
    base: _Opened, other: _Opened, findings: Findings, text: Text, unchecked: str | None
) -> Candidate:
    limits = limits_for(other.manifest, *stored_units(other.checkpoint))
    config = BeamConfig.from_dict(base.checkpoint.config)
    kinds = tuple(
        f"{layer.removesuffix('_attention')}, {mlp}"
        for layer, mlp in zip(config.layer_types, config.mlp_layer_types, strict=True)
    )
    damage = damage_of(findings.layers, other.footprint.layers, kinds)
    fits = newly_fitting(base.footprint, other.footprint)
    return Candidate(
        model=other.model,
        divergence=findings.divergence,
        activations_kld=findings.activations_kld,
        kld_ratio=findings.kld_ratio,
        layers=findings.layers,
        damage=damage,
        weights=findings.weights,
        changed=findings.changed,
        damaged=findings.damaged,
        newly_fits=fits,
        limits=limits,
        verdict=judge(findings, limits, damage, base.footprint, other.footprint, fits),
        notes=tuple(_notes(base, other, text, unchecked)),
    )


# --- what to know beside the figures --------------------------------------------------------


def _notes(base: _Opened, other: _Opened, text: Text, unchecked: str | None) -> list[str]:
    notes = [*overlap_notes(other.manifest, text.record)]
    if unchecked is not None:
        notes.append(f"its bytes were not held against beamq.json: {unchecked}")
    changed = _changed_files(other.checkpoint, other.manifest)
    if changed:
        notes.append(f"{listed(changed)} changed since beamq.json was written")
    scales = other.model.input_scales
    if scales and scales.startswith("not calibrated"):
        notes.append(scales)
    if _tokenizer(other.checkpoint) not in (None, _tokenizer(base.checkpoint)):
        notes.append("its tokenizer.json is not the source's; the source's was used for all")
    if base.model.format not in ("bf16", "fp16", "fp32"):
        notes.append(
            f"the source is itself {base.model.format}: differences are from that, not from BF16"
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
    """The tokenizer's bytes; None where a checkpoint brings none (weights alone)."""
    if not checkpoint.source.has("tokenizer.json"):
        return None
    return checkpoint.source.path("tokenizer.json").read_bytes()
