"""`beamq plan`: a plan from headers alone, as tables of sizes and machines or as JSON.

`plan_data`, `plan_blocks` and `needs_data` also serve `beamq quantize`.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from beamq.adapter.options import AdapterOptions
from beamq.commands.options import Source, command
from beamq.convert.options import ConvertOptions, PlanOptions
from beamq.errors import counted
from beamq.io.files import user_path
from beamq.units import show_bytes, show_count
from beamq.version import __version__

if TYPE_CHECKING:
    from beamq.beam.drafter import DrafterConfig
    from beamq.beam.tensors import Role
    from beamq.plan.layout import Unit
    from beamq.plan.plan import Exclusion, Plan
    from beamq.report.console import Block, Screen
    from beamq.report.tables import Table


@command()
def plan(
    screen: Screen, source: Source, options: PlanOptions, adapter: AdapterOptions, verbose: bool
) -> None:
    """Show sizes, memory, disk and what fits where, from headers."""
    from beamq.convert.resources import check_cache
    from beamq.eval.verify.drafter import read_drafter
    from beamq.plan.plan import make_plan
    from beamq.plan.serving import parse_gpu
    from beamq.report.serving import ServingView

    machine, count = parse_gpu(options.gpu) if options.gpu is not None else (None, None)
    made = make_plan(
        source,
        options.recipe,
        exclude=options.exclude,
        kv_cache=options.kv_cache,
        engine=options.engine,
        max_shard_bytes=options.max_shard_bytes,
        **vars(adapter),
    )
    check_cache(made, options.cache_bytes)
    needs = needs_data(made, options.output or Path(), options)
    drafter = read_drafter(options.drafter) if options.drafter is not None else None
    serving = ServingView(made, context=options.context, gpu=machine, count=count, drafter=drafter)
    screen.show(
        lambda: {
            "command": "plan",
            **plan_data(made, source),
            "needs": needs,
            "serving": serving.data(),
        },
        lambda: [
            *plan_blocks(made, verbose=verbose),
            needs_text(needs),
            *serving.blocks(),
            *(serving_flags(str(options.drafter), drafter) if drafter else []),
        ],
    )


def serving_flags(place: str, drafter: DrafterConfig) -> list[Block]:
    """How each engine is told of a drafter. A block is one token that is known, then the drafts."""
    from beamq.report.console import Command

    count = drafter.block_size - 1 if drafter.block_size and drafter.block_size > 1 else "N"
    config = json.dumps({"method": "dflash", "model": place, "num_speculative_tokens": count})
    sglang = ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", place]
    return [
        "",
        "To serve with the drafter (SGLang needs pipeline size 1):",
        Command(f"vLLM: {shlex.join(['--speculative-config', config])}"),
        Command(f"SGLang: {shlex.join(sglang)}"),
    ]


SHOWN_MODULES = 2


def plan_data(plan: Plan, source: str) -> dict[str, Any]:
    """The part of the JSON of `plan` and `quantize` that is about the plan."""
    from beamq.report.tables import role_sums

    return {
        "beamq": __version__,
        "source": source,
        "digest": plan.digest(),
        "recipe": plan.recipe.to_dict(),
        "parameters": {
            "total": plan.total_parameters,
            "quantized": plan.quantized_parameters,
            "share_quantized": round(plan.quantized_parameters / plan.total_parameters, 6),
        },
        "bits_per_weight": round(plan.bits_per_weight, 4),
        "bytes": {
            "source": plan.source_nbytes,
            "tensors": plan.tensor_nbytes,
            "files": plan.output_nbytes,  # headers and companions included
        },
        "tensors": {
            "source": len({m.source.spec.name for job in plan.jobs for m in job.members})
            + len(plan.dropped),
            "output": sum(len(shard.tensors) for shard in plan.shards),
        },
        "shards": len(plan.shards),
        "roles": [
            {**asdict(entry), "becomes": sorted(entry.becomes)}
            for entry in role_sums(plan).values()
        ],
        "exclusions": [
            {
                "pattern": each.pattern,
                "matched": list(each.matched),
                "would_quantize": each.would_quantize,
                "left_precise": [f"layer {layer} {role.value}" for layer, role in each.units],
                "widened": each.widened,
            }
            for each in plan.exclusions
        ],
        "dropped": [{"tensor": name, "reason": reason} for name, reason in plan.dropped],
        "notes": [*plan.notes, *plan.hints],
    }


def plan_blocks(plan: Plan, *, verbose: bool = False) -> list[Block]:
    """The plan as text: what becomes what, exclusions, totals, notes."""
    recipe, ratio = plan.recipe, plan.source_nbytes / plan.tensor_nbytes
    share = plan.quantized_parameters / plan.total_parameters
    blocks: list[Block] = [f"Recipe {recipe.name}: {recipe.summary}"]
    if recipe.kv_cache == "fp8":
        blocks.append("KV cache: the FP8 scheme is declared in the configs, without scale tensors.")
    blocks += ["", _role_table(plan), ""]
    blocks.append(
        f"{share:.1%} of the weights are quantized; {plan.bits_per_weight:.2f} bits a weight;"
        f" {ratio:.2f} times smaller; {counted(len(plan.shards), 'shard')}."
    )
    if plan.exclusions:
        blocks += ["", *_exclusion_blocks(plan.exclusions, verbose=verbose), ""]
    blocks += [f"Note: {note}." for note in (*plan.notes, *plan.hints)]
    if plan.dropped:
        names = [name for name, _ in plan.dropped]
        blocks.append(f"Left out: {_few(names, verbose=verbose)} ({plan.dropped[0][1]}).")
    return blocks


def needs_data(plan: Plan, folder: Path, options: PlanOptions | ConvertOptions) -> dict[str, Any]:
    """What a run will take: disk_bytes, disk_free_bytes where `folder` is or will be,
    host_memory_bytes (buffers, without the interpreter) and workers.

    hub: null for a folder; else fetch_bytes (shards fetched twice counted twice), cache_bytes
    (shards on disk at a time, part of disk_bytes) and least_cache_bytes (what --cache-budget must
    be at least).
    """
    from beamq.convert.output import disk_nbytes, fetched_nbytes, free_nbytes
    from beamq.convert.resources import default_workers, predicted_host_nbytes
    from beamq.io.shard_cache import largest_job, traffic_nbytes

    workers, cache = options.workers or default_workers(), options.cache_bytes
    remote, hub = plan.remote_shards, None
    if remote:
        jobs = [job.files.intersection(remote) for job in plan.jobs]
        hub = {
            "fetch_bytes": traffic_nbytes(jobs, remote, cache),
            "cache_bytes": fetched_nbytes(plan, cache),
            "least_cache_bytes": largest_job(jobs, remote)[0],
        }
    return {
        "disk_bytes": disk_nbytes(plan, cache),
        "disk_free_bytes": free_nbytes(user_path(folder)),
        "host_memory_bytes": predicted_host_nbytes(plan, workers, options.max_host_memory),
        "workers": workers,
        "hub": hub,
    }


def needs_text(needs: dict[str, Any]) -> str:
    """The same as a sentence."""
    short = "" if needs["disk_bytes"] <= needs["disk_free_bytes"] else ": too little"
    text = (
        f"Converting needs {show_bytes(needs['disk_bytes'])} of disk"
        f" ({show_bytes(needs['disk_free_bytes'])} free here{short}) and at most"
        f" {show_bytes(needs['host_memory_bytes'])} of buffers for"
        f" {counted(needs['workers'], 'worker')}."
    )
    hub = needs["hub"]
    if hub is not None:
        text += (
            f" Of the disk, {show_bytes(hub['cache_bytes'])} are for source shards"
            f" (at least {show_bytes(hub['least_cache_bytes'])}); {show_bytes(hub['fetch_bytes'])}"
            " are fetched in total."
        )
    return text


def _role_table(plan: Plan) -> Table:
    from beamq.report.tables import Table, role_sums

    def row(part: str, parameters: int, source: int, becomes: str, output: int) -> tuple[str, ...]:
        share = f"{parameters / plan.total_parameters:.1%}"
        bits = f"{8 * output / parameters:.2f}" if parameters else ""
        sizes = show_bytes(source), becomes, show_bytes(output)
        return (part, show_count(parameters), share, *sizes, bits)

    rows = [
        row(r.role, r.parameters, r.source_bytes, r.stored_as(" + "), r.output_bytes)
        for r in role_sums(plan).values()
    ]
    rows.append(row("total", plan.total_parameters, plan.source_nbytes, "", plan.tensor_nbytes))
    head = ("part", "parameters", "share", "source", "becomes", "output", "bits")
    return Table(head=head, align="lrrrlrr", rows=rows)


def _exclusion_blocks(exclusions: Iterable[Exclusion], *, verbose: bool) -> list[Block]:
    """What each pattern matched and did, then the modules by name."""
    from beamq.report.tables import Table

    rows = []
    names: list[Block] = []
    for exclusion in exclusions:
        left, note = describe_units(exclusion.units), ""
        if not left:
            left, note = "no change", "the recipe keeps these in high precision anyway"
        elif exclusion.widened:
            note = f"widened from {exclusion.would_quantize} linears: engines need all or none"
        rows.append((exclusion.pattern, f"{len(exclusion.matched):,}", left, note))
        names.append(f"{exclusion.pattern} matches {_few(exclusion.matched, verbose=verbose)}")
    head = ("exclude", "modules", "high precision", "note")
    return [Table(head=head, align="lrll", rows=rows), *names]


def describe_units(units: Iterable[Unit]) -> str:
    """`expert of layers 3-5, 7; attention of layer 0`."""
    by_role: dict[Role, list[int]] = {}
    for layer, role in sorted(units):
        by_role.setdefault(role, []).append(layer)
    return "; ".join(
        f"{role.value} of layer{'s' if len(layers) > 1 else ''} {_ranges(layers)}"
        for role, layers in by_role.items()
    )


def _ranges(layers: list[int]) -> str:
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _few(names: Sequence[str], *, verbose: bool) -> str:
    if verbose or len(names) <= SHOWN_MODULES + 1:
        return ", ".join(names)
    return f"{', '.join(names[:SHOWN_MODULES])}, ... {names[-1]}"
