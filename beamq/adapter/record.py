"""What is said of an adapter that is merged in: in beamq.json, the plan, the card and the notes.

In: an `Adapter` and what it does to a source, or a checkpoint that has one merged in. Out: the
record that beamq.json holds, and sentences for the user.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from filecmp import cmp
from typing import Any

from beamq.adapter.open import Adapter
from beamq.adapter.read import Assignment, LowRank, part_of
from beamq.errors import shown_value
from beamq.io.checkpoint import Checkpoint
from beamq.io.manifest import Manifest
from beamq.io.safetensors_header import few
from beamq.io.source import SourceFiles

TEXT_FILES = ("chat_template.jinja", "tokenizer.json", "tokenizer_config.json")


def adapter_record(adapter: Adapter, found: Assignment, source: SourceFiles) -> dict[str, Any]:
    """What beamq.json, the card and the plan say of an adapter that is merged into `source`."""
    notes = [*found.notes, *_own_texts(source, adapter.files)]
    pairs = [each for each in found.updates.values() if isinstance(each, LowRank)]
    zeros = sum(
        not adapter.zeros.isdisjoint((each.a.spec.name, each.b.spec.name))
        for each in pairs
        if each.magnitude is None
    )
    if zeros:
        notes.append(
            f"{zeros:,} of {len(pairs):,} low-rank updates have an A or B of zeros and"
            " change nothing; was the adapter trained?"
        )
    scalings = Counter((each.rank, each.scaling) for each in pairs)
    form = found.form
    return {
        "name": adapter.label,
        "digest": adapter.digest,
        "peft_version": adapter.config.peft_version,
        "dora": adapter.config.use_dora,
        "scalings": [
            {"rank": rank, "scaling": scaling, "weights": count}
            for (rank, scaling), count in scalings.items()
        ],
        "packed_experts": None
        if form is None
        else {"layout": form.layout, "order": form.order, "decided_by": form.reason},
        "parts": part_counts(found.updates),
        "notes": notes,
    }


def recorded_adapter(checkpoint: Checkpoint) -> Mapping[str, Any] | None:
    """The record of the adapter in a checkpoint, which is merged as it is read, or was by `beamq
    merge` before. The latter is what beamq.json says."""
    if checkpoint.source.merged is not None:
        return checkpoint.source.merged
    manifest = Manifest.of(checkpoint.source)
    return None if manifest is None else manifest.adapter


def merged_notes(checkpoint: Checkpoint) -> tuple[str, ...]:
    """What a plan and a card say of the adapter in a checkpoint; nothing where there is none."""
    merged = checkpoint.source.merged
    if merged is None:
        before = recorded_adapter(checkpoint)
        if before is None:
            return ()
        return (f"the source has the adapter {shown_value(before.get('name'))} merged in",)
    parts = ", ".join(f"{part} ({count:,})" for part, count in merged["parts"].items())
    scalings = ", ".join(
        f"rank {each['rank']} times {each['scaling']:g}" for each in merged["scalings"]
    )
    kind = "DoRA adapter" if merged["dora"] else "adapter"
    said = [f"the {kind} {merged['name']} is merged into the weights: {parts}"]
    if scalings:
        said[0] += f"; {scalings}"
    if (form := merged["packed_experts"]) is not None:
        said.append(
            f"packed experts of the adapter are read in PEFT's {form['layout']} layout, the expert"
            f" {form['order']} in B (decided by: {form['decided_by']})"
        )
    return (*said, *merged["notes"])


def _own_texts(source: SourceFiles, adapter: SourceFiles) -> list[str]:
    """A note where a trainer saved another tokenizer or chat template beside the adapter."""
    others = []
    for name in sorted(set(TEXT_FILES) & set(adapter.names())):
        with suppress(OSError):  # a link that points nowhere
            if not source.has(name) or not cmp(adapter.path(name), source.path(name), False):
                others.append(name)
    if not others:
        return []
    return [
        f"the adapter's folder has {few(others)}, which the source lacks or has with other content;"
        " the output gets the source's files: copy those that the fine-tuned model needs"
    ]


def part_counts(names: Iterable[str]) -> dict[str, int]:
    """Number of weights by part."""
    return dict(Counter(map(part_of, names)))
