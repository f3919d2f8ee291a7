"""What `beamq inspect` says: the checkpoint at a glance, its parts, and what is odd about it."""

from __future__ import annotations

from typing import Any

from beamq.console import Block, Grid
from beamq.errors import counted
from beamq.eval.inspect import Inspection
from beamq.sizes import show_bytes, show_count

_FORMAT_NAMES = {"nvfp4": "NVFP4", "fp8": "FP8", "bf16": "BF16", "fp16": "FP16", "fp32": "FP32"}


def inspect_data(found: Inspection) -> dict[str, Any]:
    """The JSON of `beamq inspect`: command, and the fields of `Inspection` with share_quantized
    and bits_per_weight."""
    return {"command": "inspect", **found.to_dict()}


def inspect_blocks(found: Inspection) -> list[Block]:
    """The same as two tables and notes."""
    rows = [
        ("checkpoint", found.checkpoint),
        ("format", _FORMAT_NAMES.get(found.format, found.format)),
        ("config says", found.declared or "not quantized"),
        ("model", _model(found)),
        (
            "size",
            f"{show_bytes(found.tensor_bytes)} in {counted(found.files, 'file')},"
            f" {counted(found.tensors, 'tensor')}",
        ),
        (
            "quantized",
            f"{found.share_quantized:.1%} of {show_count(found.parameters)} parameters;"
            f" {found.bits_per_weight:.2f} bits a weight",
        ),
    ]
    for label, value in (
        ("recipe", found.recipe),
        ("made by", found.made_by),
        ("input scales", found.input_scales),
    ):
        if value:
            rows.append((label, value))
    parts = tuple(
        (
            share.role,
            f"{share.tensors:,}",
            show_count(share.parameters),
            f"{share.quantized_parameters / share.parameters:.1%}" if share.parameters else "",
            show_bytes(share.nbytes),
            ", ".join(share.dtypes),
        )
        for share in found.roles
    )
    blocks: list[Block] = [
        Grid(columns=("", ""), rows=tuple(rows)),
        "",
        Grid(
            columns=("part", "tensors>", "parameters>", "quantized>", "bytes>", "stored as"),
            rows=parts,
        ),
        "",
    ]
    blocks += [f"Note: {note}." for note in found.notes]
    return blocks if found.notes else blocks[:-1]


def _model(found: Inspection) -> str:
    text = found.model_type or "unknown"
    if found.layers:
        text += f", {found.layers} layers"
    if found.experts:
        text += f", {found.experts} experts"
    return text
