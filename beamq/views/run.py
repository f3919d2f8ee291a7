"""What `beamq quantize` and `beamq dequantize` say at the end, as JSON and as a short table."""

from __future__ import annotations

import shlex
from typing import Any

from beamq.console import Block, Command, Grid
from beamq.conversion.dequantize import DequantizeResult
from beamq.conversion.quantize import QuantizeResult
from beamq.errors import counted
from beamq.sizes import show_bytes, show_seconds
from beamq.views.plan import FORMAT_NAMES, plan_data


def quantize_data(result: QuantizeResult, source: str, *, dry_run: bool) -> dict[str, Any]:
    """The JSON of `beamq quantize`: that of the plan, and

    command, output, dry_run, seconds, resumed_shards, engine ("" for a dry run); input_scales and
    counts (underflow_blocks,
    zero_blocks, zero_rows, zero_groups) as in beamq.json, null for a dry run.
    """
    manifest = result.manifest or {}
    return {
        "command": "quantize",
        "output": str(result.output),
        "dry_run": dry_run,
        "seconds": round(result.seconds, 3),
        "resumed_shards": result.resumed_shards,
        "engine": result.engine,
        "input_scales": manifest.get("input_scales"),
        "counts": manifest.get("counts"),
        **plan_data(result.plan, source),
    }


def quantize_blocks(result: QuantizeResult, source: str, *, dry_run: bool) -> list[Block]:
    """The result table and what to do next."""
    if dry_run:
        return ["Dry run: nothing was written."]
    plan = result.plan
    manifest = result.manifest or {}
    share = plan.quantized_parameters / plan.total_parameters
    rate = show_bytes(round(plan.source_nbytes / max(result.seconds, 1e-9)))
    shards = f"{len(plan.shards)}"
    if result.resumed_shards:
        shards += f", {result.resumed_shards} of them from the earlier run"
    rows = [
        ("output", str(result.output)),
        ("format", f"{FORMAT_NAMES[plan.recipe.format]} (recipe {plan.recipe.name})"),
        ("quantized", f"{share:.1%} of the weights, {plan.bits_per_weight:.2f} bits a weight"),
        ("size", f"{show_bytes(plan.tensor_nbytes)}, from {show_bytes(plan.source_nbytes)}"),
        ("shards", shards),
        ("time", f"{show_seconds(result.seconds)}, {rate}/s of source"),
        ("converted by", result.engine),
    ]
    if plan.recipe.format == "nvfp4":
        scales = (manifest.get("input_scales") or {}).get("description", "unknown")
        rows.insert(4, ("input scales", str(scales)))
    rows += _counts(manifest.get("counts") or {})
    output = shlex.quote(str(result.output))
    return [
        Grid(columns=("", ""), rows=tuple(rows)),
        "",
        Command(f"next: beamq verify {output} --source {shlex.quote(source)}"),
    ]


def _counts(counts: dict[str, Any]) -> list[tuple[str, str]]:
    """Things worth a look; none of them is a fault."""
    rows = []
    groups = list(counts.get("zero_groups") or ())
    if groups:
        more = f" and {len(groups) - 2} more" if len(groups) > 2 else ""
        rows.append(("all zero", f"{', '.join(groups[:2])}{more}"))
    for key, label, text in (
        ("underflow_blocks", "underflow", "blocks far below their tensor's largest value"),
        ("zero_rows", "zero rows", "rows of zeros"),
    ):
        if counts.get(key):
            rows.append((label, f"{counts[key]:,} {text}"))
    return rows


def dequantize_data(result: DequantizeResult, checkpoint: str) -> dict[str, Any]:
    """The JSON of `beamq dequantize`: command, checkpoint, output, decoded and copied (numbers of
    tensors), tensor_bytes, seconds."""
    return {
        "command": "dequantize",
        "checkpoint": checkpoint,
        "output": str(result.output),
        "decoded": result.decoded,
        "copied": result.copied,
        "tensor_bytes": result.tensor_nbytes,
        "seconds": round(result.seconds, 3),
    }


def dequantize_blocks(result: DequantizeResult) -> list[Block]:
    """The result table."""
    rows = (
        ("output", str(result.output)),
        (
            "decoded",
            f"{counted(result.decoded, 'linear')} to BF16;"
            f" {counted(result.copied, 'tensor')} copied",
        ),
        ("size", show_bytes(result.tensor_nbytes)),
        ("time", show_seconds(result.seconds)),
    )
    return [Grid(columns=("", ""), rows=rows)]
