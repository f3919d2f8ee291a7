"""The options of every command that reads a source and may merge an adapter into it.

Imports no torch and no NumPy.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypedDict

from beamq.options import Flag, option

LAYOUT = Flag(
    "Packed experts as written by PEFT from 0.19.1 on (new) or before (old).",
    choices=("new", "old"),
    shown="by the adapter's shapes or PEFT version",
)
ORDER = Flag(
    "The expert in the columns of packed B varies fastest (PEFT) or slowest (Megatron-Bridge).",
    choices=("fastest", "slowest"),
    shown="fastest where PEFT wrote it",
)


@dataclass(frozen=True, kw_only=True)
class PackedOptions:
    """What an adapter's file may not tell of packed experts."""

    expert_lora_layout: Literal["new", "old"] | None = option(None, LAYOUT)
    expert_lora_order: Literal["fastest", "slowest"] | None = option(None, ORDER)


@dataclass(frozen=True, kw_only=True)
class AdapterOptions:
    """A LoRA adapter to merge, and what its file may not tell of packed experts."""

    adapter: str | Path | None = option(
        None,
        Flag(
            "LoRA adapter to merge into the source: a folder, or org/name[@revision].",
            metavar="ADAPTER",
        ),
    )
    expert_lora_layout: Literal["new", "old"] | None = option(None, LAYOUT)
    expert_lora_order: Literal["fastest", "slowest"] | None = option(None, ORDER)


class PackedKeywords(TypedDict, total=False):
    """Keywords of `PackedOptions`."""

    expert_lora_layout: Literal["new", "old"] | None
    expert_lora_order: Literal["fastest", "slowest"] | None


class AdapterKeywords(PackedKeywords, total=False):
    """Keywords of `AdapterOptions`."""

    adapter: str | Path | None
