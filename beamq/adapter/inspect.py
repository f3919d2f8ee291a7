"""What an adapter is, before anything is merged: `beamq inspect ADAPTER`.

In: an adapter, and the model that it is for where it is at hand. Out: an `AdapterInspection`: how
many weights of each part it changes, of how many; ranks and scalings; how packed experts are read;
and why a merge would be refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Unpack

from beamq.adapter.config import CONFIG_NAME
from beamq.adapter.merged import merge_adapter
from beamq.adapter.open import open_adapter
from beamq.adapter.options import PackedKeywords, PackedOptions
from beamq.adapter.read import WEIGHTS_NAME, named_parts
from beamq.adapter.record import part_counts
from beamq.beam.config import BeamConfig
from beamq.beam.tensors import expected_tensors
from beamq.errors import AdapterError
from beamq.io.checkpoint import open_checkpoint, open_files
from beamq.io.companions import WEIGHT_SUFFIXES
from beamq.options import from_keywords, takes
from beamq.units import short_repr


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterPart:
    """A part of the model: how many of its `weights` are `adapted`; None where no source says."""

    part: str
    adapted: int
    weights: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterInspection:
    """What `inspect_adapter` found. `refused` is why a merge would be refused, or None."""

    __repr__ = short_repr

    adapter: str
    source: str | None
    tensors: int
    tensor_bytes: int
    parts: tuple[AdapterPart, ...]
    peft_version: str | None = None
    base_model: str | None = None
    dora: bool = False
    scalings: tuple[Mapping[str, Any], ...] = ()
    packed_experts: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()
    refused: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for `--json`."""
        return asdict(self)


def is_adapter(place: str | Path) -> bool:
    """Whether a folder, or a repository on the Hub, holds an adapter and no whole model. Trainers
    may leave the base's config.json beside an adapter."""
    with closing(open_files(place)) as files:
        weights = [name for name in files.names() if name.endswith(WEIGHT_SUFFIXES)]
        alone = all(name.startswith("adapter_model.") for name in weights)
        return files.has(CONFIG_NAME) and (
            not files.has("config.json") or (alone and bool(weights))
        )


@takes(PackedOptions)
def inspect_adapter(
    adapter: str | Path, *, source: str | Path | None = None, **keywords: Unpack[PackedKeywords]
) -> AdapterInspection:
    """Look at an adapter; with `source`, the Beam that it is for, at what a merge would do.

    What `merge` would refuse is in `refused`. Raises `AdapterError` only where there is no adapter
    to look at, and what `open_checkpoint` raises for `source`.
    """
    how = from_keywords(PackedOptions, keywords)
    with ExitStack() as stack:
        files = stack.enter_context(closing(open_files(adapter, cache_bytes=1 << 62)))
        if not files.has(CONFIG_NAME):
            raise AdapterError(f"{files.name}: no {CONFIG_NAME}; expected the folder of an adapter")
        specs = files.header(WEIGHTS_NAME)[0] if files.has(WEIGHTS_NAME) else []
        base = None if source is None else stack.enter_context(open_checkpoint(source))
        totals: dict[str, int] = {}
        if base is not None:
            model = BeamConfig.from_dict(base.config)
            totals = part_counts(role.name for role, _ in expected_tensors(model))
        adapted, opened, refused = named_parts(specs), None, None
        record: Mapping[str, Any] = {}
        try:
            opened = open_adapter(adapter)
            stack.callback(opened.files.close)
            if base is not None:
                merged = merge_adapter(
                    base, opened, layout=how.expert_lora_layout, order=how.expert_lora_order
                )
                record = merged.source.merged or {}
                adapted = record["parts"]
        except AdapterError as fault:
            refused = str(fault)
        parts = tuple(
            AdapterPart(part=part, adapted=adapted.get(part, 0), weights=totals.get(part))
            for part in {**totals, **adapted}
        )
        return AdapterInspection(
            adapter=str(adapter),
            source=None if source is None else str(source),
            tensors=len(specs),
            tensor_bytes=sum(spec.nbytes for spec in specs),
            parts=parts,
            peft_version=None if opened is None else opened.config.peft_version,
            base_model=None if opened is None else opened.config.base_model,
            dora=opened is not None and opened.config.use_dora,
            scalings=tuple(record.get("scalings", ())),
            packed_experts=record.get("packed_experts"),
            notes=tuple(record.get("notes", ())),
            refused=refused,
        )
