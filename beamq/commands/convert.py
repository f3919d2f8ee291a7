"""`beamq quantize` and `beamq dequantize`: one call into the library, and its result."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated, Any

from beamq.adapter.options import AdapterOptions
from beamq.commands.options import Checkpoint, Output, Source, command, place
from beamq.commands.plan import plan_data
from beamq.convert.options import ConvertOptions, DequantizeOptions, MergeOptions
from beamq.errors import counted
from beamq.units import show_bytes, show_seconds

if TYPE_CHECKING:
    from collections.abc import Callable

    from beamq.convert.quantize import QuantizeResult
    from beamq.convert.run import Progress
    from beamq.plan.plan import Plan
    from beamq.report.console import Advance, Block, Screen


@command()
def quantize(
    screen: Screen,
    source: Source,
    output: Output,
    options: ConvertOptions,
    adapter: AdapterOptions,
    verbose: bool,
) -> None:
    """Convert a BF16 Beam into an NVFP4 or FP8 one.

    NVFP4 needs input scales. By default the run calibrates, on --data or a default text. Use
    --calibration STATS to take the scales from a file, or --no-calibration to set them to 1.0.
    --resume continues a run that was stopped, and the result has the same bytes.
    """
    from beamq.commands.calibrate import coverage_blocks, start_blocks
    from beamq.commands.plan import needs_data, needs_text, plan_blocks
    from beamq.convert.input_scales import CONSTANT_NOTE
    from beamq.convert.quantize import quantize as convert

    def announce(plan: Plan) -> None:
        needs = needs_data(plan, output, options)
        screen.say(*plan_blocks(plan, verbose=verbose), needs_text(needs))
        if plan.recipe.calibrated and options.no_calibration:
            screen.say(f"Note: {CONSTANT_NOTE}.")
        if not options.dry_run:
            screen.say(f"Converting {show_bytes(plan.source_nbytes)} to {output}.")

    with screen.progress("converting") as advance:
        result = convert(
            source,
            output,
            **vars(options),
            **vars(adapter),
            on_plan=announce,
            on_engine=screen.say,
            on_start=lambda setup: screen.say(*start_blocks(setup)),
            on_progress=progress_meter(advance),
        )
    if result.stats is not None:
        screen.say(*coverage_blocks(result.stats))
    screen.show(
        lambda: quantize_data(result, source, dry_run=options.dry_run),
        lambda: quantize_blocks(result, source, adapter, dry_run=options.dry_run),
    )


def progress_meter(advance: Advance | None) -> Callable[[Progress], None] | None:
    """What a conversion calls with its progress."""
    if advance is None:
        return None
    return lambda progress: advance(progress.done_nbytes, progress.total_nbytes)


@command()
def merge(
    screen: Screen,
    source: Source,
    adapter: Annotated[str, place("ADAPTER", "A LoRA adapter: a folder, or org/name[@revision].")],
    output: Output,
    options: MergeOptions,
) -> None:
    """Merge a LoRA adapter into a BF16 Beam.

    To serve the result quantized, `beamq quantize --adapter ADAPTER` writes no second BF16 model
    and gives the same bytes.
    """
    from beamq.convert.merge import merge as run
    from beamq.report.console import Command
    from beamq.report.tables import Table

    with screen.progress("merging") as advance:
        result = run(
            source,
            adapter,
            output,
            **vars(options),
            on_plan=lambda notes: screen.say(*(f"Note: {note}." for note in notes)),
            on_progress=progress_meter(advance),
        )
    rows = (
        ("output", str(result.output)),
        ("merged", ", ".join(f"{n:,} {part}" for part, n in result.adapter["parts"].items())),
        ("size", show_bytes(result.tensor_nbytes)),
        ("time", show_seconds(result.seconds)),
    )
    follow = f"next: beamq quantize {shlex.quote(str(result.output))} QUANTIZED"
    screen.show(
        lambda: {
            "command": "merge",
            "source": source,
            "output": str(result.output),
            "adapter": dict(result.adapter),
            "tensor_bytes": result.tensor_nbytes,
            "seconds": round(result.seconds, 3),
        },
        lambda: [Table(rows=rows), "", Command(follow)],
    )


@command()
def dequantize(
    screen: Screen, checkpoint: Checkpoint, output: Output, options: DequantizeOptions
) -> None:
    """Decode an NVFP4 or FP8 Beam back to BF16, exactly."""
    from beamq.convert.dequantize import dequantize as decode
    from beamq.report.tables import Table

    with screen.progress("decoding") as advance:
        result = decode(
            checkpoint,
            output,
            **vars(options),
            on_plan=lambda work: screen.say(
                *(f"Note: {hint}." for hint in work.hints), f"Decoding {checkpoint} to {output}."
            ),
            on_unchecked=lambda: screen.say(
                f"Note: {checkpoint} has no beamq.json with checksums, so its bytes were not"
                " checked."
            ),
            on_progress=progress_meter(advance),
        )
    copied = counted(result.copied, "tensor")
    rows = (
        ("output", str(result.output)),
        ("decoded", f"{counted(result.decoded, 'linear')} to BF16; {copied} copied"),
        ("size", show_bytes(result.tensor_nbytes)),
        ("time", show_seconds(result.seconds)),
    )
    screen.show(
        lambda: {
            "command": "dequantize",
            "checkpoint": checkpoint,
            "output": str(result.output),
            "decoded": result.decoded,
            "copied": result.copied,
            "tensor_bytes": result.tensor_nbytes,
            "seconds": round(result.seconds, 3),
        },
        lambda: [Table(rows=rows)],
    )


def quantize_data(result: QuantizeResult, source: str, *, dry_run: bool) -> dict[str, Any]:
    """The JSON of `beamq quantize`.

    For a dry run `engine` is "", and `input_scales` and `counts`, else as in beamq.json, are null.
    """
    manifest = result.manifest or {}
    return {
        "command": "quantize",
        "output": str(result.output),
        "dry_run": dry_run,
        "seconds": round(result.seconds, 3),
        "resumed_shards": result.resumed_shards,
        "unchanged": result.unchanged,
        "engine": result.engine,
        "input_scales": manifest.get("input_scales"),
        "counts": manifest.get("counts"),
        **plan_data(result.plan, source),
    }


def quantize_blocks(
    result: QuantizeResult, source: str, adapter: AdapterOptions, *, dry_run: bool
) -> list[Block]:
    """The result table and what to do next."""
    from beamq.report.console import Command
    from beamq.report.tables import Table, format_name

    if dry_run:
        return ["Dry run: nothing was written."]
    plan, manifest = result.plan, result.manifest or {}
    share = plan.quantized_parameters / plan.total_parameters
    rate = show_bytes(round(plan.source_nbytes / max(result.seconds, 1e-9)))
    shards = f"{len(plan.shards)}"
    if result.resumed_shards:
        shards += f", {result.resumed_shards} of them from the earlier run"
    rows = [
        ("output", str(result.output)),
        ("format", f"{format_name(plan.recipe.format)} (recipe {plan.recipe.name})"),
        ("quantized", f"{share:.1%} of the weights, {plan.bits_per_weight:.2f} bits a weight"),
        ("size", f"{show_bytes(plan.tensor_nbytes)}, from {show_bytes(plan.source_nbytes)}"),
        ("shards", shards),
        ("time", f"{show_seconds(result.seconds)}, {rate}/s of source"),
        ("converted by", result.engine),
    ]
    if plan.recipe.calibrated:
        scales = (manifest.get("input_scales") or {}).get("description", "unknown")
        rows.insert(4, ("input scales", str(scales)))
    if result.unchanged:
        rows.insert(-2, ("unchanged", result.unchanged))
    rows += _counts(manifest.get("counts") or {})
    missing: list[Block] = []
    if str((manifest.get("input_scales") or {}).get("description")).startswith("not calibrated"):
        missing.append(
            "Calibration is missing: the same command with --overwrite instead of --no-calibration"
            " adds it."
        )
    if "base_model" not in (manifest.get("source") or {}):
        missing.append(
            "The card names no base model: before you publish, write base_model: org/name into"
            " README.md's metadata, or give --base-model."
        )
    verify = ["beamq", "verify", str(result.output), "--source", source]
    for key, value in vars(adapter).items():
        if value is not None:
            verify += [f"--{key.replace('_', '-')}", str(value)]
    return [Table(rows=rows), "", *missing, Command(f"next: {shlex.join(verify)}")]


def _counts(counts: dict[str, Any]) -> list[tuple[str, str]]:
    """What the user may want to look at; none of it is a fault."""
    rows = []
    groups = list(counts.get("zero_groups") or ())
    if groups:
        more = f" and {len(groups) - 2} more" if len(groups) > 2 else ""
        rows.append(("all zero", f"{', '.join(groups[:2])}{more}"))
    for key, label, text in (
        ("underflow_blocks", "underflow", "blocks far below their tensor's largest value"),
        ("zero_rows", "zero rows", "rows of zeros"),
        ("swept_groups", "not by GPTQ", "weights of experts, better swept on held-out text"),
    ):
        if counts.get(key):
            rows.append((label, f"{counts[key]:,} {text}"))
    return rows
