"""`beamq verify` and `beamq inspect`: one call into the library, tables, and exit code 0 or 1."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from beamq.adapter.options import AdapterOptions, PackedOptions
from beamq.commands.options import Checkpoint, command
from beamq.convert.options import ENGINE, WORKERS
from beamq.errors import BeamqError, UsageError, counted
from beamq.options import option
from beamq.units import show_bytes, show_count, show_seconds

if TYPE_CHECKING:
    from beamq.adapter.inspect import AdapterInspection
    from beamq.eval.verify.checks import CheckResult, VerifyReport
    from beamq.eval.verify.drafter import DrafterInspection
    from beamq.eval.verify.inspect import Inspection
    from beamq.report.console import Block, Screen


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """How far to check."""

    source: str | None = option(None, "The checkpoint's source; every value is compared with it.")
    target: str | None = option(None, "For a DFlash2 drafter: the Beam that it must fit.")
    level: Literal["structure", "tensors", "forward"] = option(
        "tensors",
        "structure: headers; tensors: every byte; forward: also run both models.",
        choices=("structure", "tensors", "forward"),
    )
    engine: str | None = option(None, ENGINE)
    quick: bool = option(False, "Read every byte, and compare the checksums only.")
    workers: int | None = option(None, WORKERS)


@command()
def verify(
    screen: Screen,
    checkpoint: Checkpoint,
    options: VerifyOptions,
    adapter: AdapterOptions,
    verbose: bool,
) -> int:
    """Check that a folder is sound and matches its source."""
    from beamq.eval.verify.drafter import is_drafter_place
    from beamq.eval.verify.verify import verify as check
    from beamq.io.hub import hub_source

    if options.quick and options.level != "tensors":
        raise UsageError("--quick and --level contradict each other; give one")
    here = hub_source(checkpoint) is None
    drafter = options.target is not None or (here and is_drafter_place(checkpoint))
    if drafter:
        _refuse_for_drafter(checkpoint, options, adapter)
    with screen.progress("verifying") as advance:
        report = check(
            checkpoint,
            source=options.target if drafter else options.source,
            level="quick" if options.quick else options.level,
            engine=options.engine,
            workers=options.workers,
            progress=advance,
            **vars(adapter),
        )
    nothing = report.ok or options.quick or report.format == "drafter"
    hint = [] if nothing else _next_repair(report, options.source)
    screen.show(
        lambda: {"command": "verify", **report.to_dict()},
        lambda: [*verify_blocks(report, verbose=verbose), *hint],
    )
    return 0 if report.ok else 1


def _refuse_for_drafter(checkpoint: str, options: VerifyOptions, adapter: AdapterOptions) -> None:
    """Raise `UsageError` for a target of what is no drafter, and a source or adapter of one."""
    from beamq.eval.verify.drafter import is_drafter_place

    if not is_drafter_place(checkpoint):
        raise UsageError(f"--target is for DFlash2 drafters, and {checkpoint} is none")
    if options.source is not None or adapter.adapter is not None or options.engine is not None:
        raise UsageError(
            f"{checkpoint} is a DFlash2 drafter, for which --source, --adapter and --engine mean"
            " nothing; give --target, the Beam that it drafts for"
        )


def _next_repair(report: VerifyReport, source: str | None) -> list[Block]:
    """A line with the repair of a folder that verify has found wanting, if there is one."""
    from beamq.convert.repair import repairs_of
    from beamq.report.console import Command

    values = any(check.name.startswith("values.") for check in report.failures)
    try:
        kinds = {str(found.kind) for found in repairs_of(report.checkpoint, values=values)}
    except BeamqError:
        return []
    if not kinds or kinds & {"C", "-"}:
        return []
    words = ["beamq", "repair", report.checkpoint, f"{report.checkpoint.rstrip('/')}-repaired"]
    words += ["--source", source or "SOURCE"] if "S" in kinds else []
    words += ["--accept-bounded"] if "B" in kinds else []
    return [Command(f"next: {shlex.join(words)}")]


@dataclass(frozen=True, kw_only=True)
class InspectOptions:
    """For adapters."""

    source: str | None = option(None, "For an adapter: the BF16 Beam that it is for.")


@command()
def inspect(
    screen: Screen, checkpoint: Checkpoint, options: InspectOptions, packed: PackedOptions
) -> None:
    """Describe a checkpoint or an adapter: format, quantized or adapted parts, oddities."""
    from beamq.adapter.inspect import inspect_adapter, is_adapter
    from beamq.eval.verify.drafter import inspect_drafter, is_drafter_place
    from beamq.eval.verify.inspect import inspect_checkpoint

    if is_adapter(checkpoint):
        seen = inspect_adapter(checkpoint, source=options.source, **vars(packed))
        screen.show(lambda: {"command": "inspect", **seen.to_dict()}, lambda: adapter_blocks(seen))
        return
    if options.source is not None or packed != PackedOptions():
        raise UsageError(
            f"--source and --expert-lora options are for adapters, and {checkpoint} has no"
            " adapter_config.json"
        )
    if is_drafter_place(checkpoint):
        drafter = inspect_drafter(checkpoint)
        screen.show(
            lambda: {"command": "inspect", **drafter.to_dict()}, lambda: drafter_blocks(drafter)
        )
        return
    found = inspect_checkpoint(checkpoint)
    screen.show(lambda: {"command": "inspect", **found.to_dict()}, lambda: inspect_blocks(found))


CODES = {"U8": "NVFP4 (U8)", "F8_E4M3": "FP8 (F8_E4M3)"}


def adapter_blocks(found: AdapterInspection) -> list[Block]:
    """The adapter at a glance, the parts that it changes, and why it would be refused."""
    from beamq.report.tables import Table

    rows = [
        ("adapter", found.adapter),
        ("kind", "DoRA" if found.dora else "LoRA"),
        ("made by", found.peft_version and f"PEFT {found.peft_version}"),
        ("for the base", found.base_model),
        ("size", f"{show_bytes(found.tensor_bytes)}, {counted(found.tensors, 'tensor')}"),
    ]
    rows += [
        ("rank", f"{each['rank']}, scaling {each['scaling']:g}, of {each['weights']:,} weights")
        for each in found.scalings
    ]
    if (form := found.packed_experts) is not None:
        rows.append(("packed experts", f"{form['layout']} layout, expert {form['order']} in B"))
        rows.append(("", f"decided by {form['decided_by']}"))
    parts = [
        (each.part, f"{each.adapted:,}", "?" if each.weights is None else f"{each.weights:,}")
        for each in found.parts
    ]
    blocks: list[Block] = [Table(rows=[(label, value) for label, value in rows if value]), ""]
    blocks.append(Table(head=("part", "adapted", "of"), align="lrr", rows=parts))
    notes = [f"Note: {note}." for note in found.notes]
    if found.source is None:
        notes.append("Give --source SOURCE for totals, scalings, and a check against the model.")
    if found.refused is not None:
        notes.append(f"Would be refused: {found.refused}")
    return [*blocks, "", *notes] if notes else blocks


def drafter_blocks(found: DrafterInspection) -> list[Block]:
    """The drafter at a glance, what is odd about its config, and the next command."""
    from beamq.report.console import Command
    from beamq.report.tables import Table

    ids = found.target_layer_ids and ", ".join(map(str, found.target_layer_ids))
    rows = [
        ("drafter", found.drafter),
        ("kind", "DFlash2, for a Beam target"),
        ("layers", found.layers),
        ("hidden size", found.hidden_size),
        ("vocabulary", found.vocab_size),
        ("block size", found.block_size),
        ("window", found.sliding_window),
        ("target layers", ids),
        ("size", f"{show_bytes(found.tensor_bytes)}, {counted(found.tensors, 'tensor')}"),
        ("stored as", ", ".join(found.dtypes)),
    ]
    blocks: list[Block] = [Table(rows=[(label, str(value)) for label, value in rows if value]), ""]
    blocks += [f"Note: {note}." for note in found.notes]
    words = shlex.join(["beamq", "verify", found.drafter, "--target", "BEAM"])
    return [*blocks, Command(f"next: {words}")]


def inspect_blocks(found: Inspection) -> list[Block]:
    """The checkpoint at a glance, its parts, and what is odd about it."""
    from beamq.report.tables import FORMAT_NAMES, Table

    model = [found.model_type or "unknown"]
    model += [f"{found.layers} layers"] if found.layers else []
    model += [f"{found.experts} experts"] if found.experts else []
    size = f"{show_bytes(found.tensor_bytes)} in {counted(found.files, 'file')}"
    share = f"{found.share_quantized:.1%} of {show_count(found.parameters)} parameters"
    rows = [
        ("checkpoint", found.checkpoint),
        ("format", FORMAT_NAMES.get(found.format, found.format)),
        ("config says", found.declared or "not quantized"),
        ("model", ", ".join(model)),
        ("size", f"{size}, {counted(found.tensors, 'tensor')}"),
        ("quantized", f"{share}; {found.bits_per_weight:.2f} bits a weight"),
        ("recipe", found.recipe),
        ("made by", found.made_by),
        ("input scales", found.input_scales),
    ]
    parts = []
    for part in found.roles:
        share = f"{part.quantized_parameters / part.parameters:.1%}" if part.parameters else ""
        sizes = f"{part.tensors:,}", show_count(part.parameters), share, show_bytes(part.nbytes)
        parts.append((part.role, *sizes, ", ".join(CODES.get(d, d) for d in part.dtypes)))
    head = ("part", "tensors", "parameters", "quantized", "bytes", "stored as")
    blocks: list[Block] = [Table(rows=[(label, value) for label, value in rows if value]), ""]
    blocks.append(Table(head=head, align="lrrrrl", rows=parts))
    if found.notes:
        blocks += ["", *(f"Note: {note}." for note in found.notes)]
    return blocks


def verify_blocks(report: VerifyReport, *, verbose: bool) -> list[Block]:
    """Checks as a table (those skipped only if `verbose`), errors by part, lines of verdict."""
    from beamq.eval.verify.checks import ENGINES
    from beamq.report.tables import Table

    checks = [
        (check.name, "FAIL" if check.status == "fail" else check.status, _found(check))
        for check in report.checks
        if verbose or check.status != "skip"
    ]
    blocks: list[Block] = [Table(head=("check", "", "found"), rows=checks), ""]
    if report.errors:
        errors = [
            (
                error.role,
                f"{error.linears:,}",
                show_count(error.elements),
                f"{error.relative_rms:.4f}",
                f"{error.worst_relative_rms:.4f}",
            )
            for error in report.errors
        ]
        title = "Error of the quantized weights against the source"
        head = ("part", "linears", "elements", "relative RMS", "worst linear")
        blocks += [Table(title=title, head=head, align="lr", rows=errors), ""]
    if report.plain:
        blocks.append(_plain(report))
    if report.level != "quick":
        loads = {True: " yes", False: " no"}
        answers = ", ".join(
            f"{engine}: {report.check(ENGINES[engine]).detail}"
            if answer is None
            else f"{engine} no ({report.check(ENGINES[engine]).detail})"
            if engine in report.refused
            else engine + loads[answer]
            for engine, answer in report.loads.items()
        )
        blocks.append(f"Loads, by each engine's rules: {answers}.")
    if report.format == "drafter" and report.check("target.sizes").detail == "needs --target":
        blocks.append("Its structure alone was checked; whether it fits a Beam needs --target.")
    blocks.append(verdict(report))
    return blocks


def _found(check: CheckResult) -> str:
    others = check.where[1:]
    if check.status not in ("fail", "warn") or not others:
        return check.detail
    more = ", ..." if check.count > len(check.where) else ""
    return f"{check.detail}; also {', '.join(others)}{more}"


def _plain(report: VerifyReport) -> str:
    sums = report.check("checksums.tensors").status != "skip"
    rest = "structure and checksums" if sums else "structure"
    if report.source is not None:
        rest += ", and compared with its source"
    return f"Not quantized: a plain {report.format.upper()} Beam. What was checked: {rest}."


def verdict(report: VerifyReport) -> str:
    """The last line: what was checked, and what failed."""
    by_status = [check.status for check in report.checks]
    passed, skipped = by_status.count("pass"), by_status.count("skip")
    warnings = by_status.count("warn")
    said = f", {counted(warnings, 'warning')}" if warnings else ""
    read = f"{show_bytes(report.bytes_read)} read in {show_seconds(report.seconds)}"
    if report.ok:
        return f"ok: {passed} checks passed{said}, {skipped} skipped; {read}"
    names = ", ".join(check.name for check in report.failures)
    count = len(report.failures)
    total = passed + warnings + count
    return f"FAILED: {count} of {total} checks{said}, {skipped} not checked: {names}"
