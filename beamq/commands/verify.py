"""`beamq verify`: options in, one call into the library, a table of checks and exit code 0 or 1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from beamq.commands.options import Checkpoint, command
from beamq.convert.options import WORKERS
from beamq.errors import UsageError, counted
from beamq.options import Flag, option
from beamq.units import show_bytes, show_count, show_seconds

if TYPE_CHECKING:
    from beamq.eval.verify.checks import CheckResult, VerifyReport
    from beamq.eval.verify.inspect import Inspection
    from beamq.report.console import Block, Screen


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """How far to check."""

    source: str | None = option(None, Flag("What it was made from, to compare every value with."))
    level: Literal["structure", "tensors", "forward"] = option(
        "tensors",
        Flag(
            "structure: headers; tensors: every byte; forward: run it beside --source.",
            choices=("structure", "tensors", "forward"),
        ),
    )
    quick: bool = option(False, Flag("Only checksums: every byte against beamq.json."))
    workers: int | None = option(None, WORKERS)


@command()
def verify(screen: Screen, checkpoint: Checkpoint, options: VerifyOptions, verbose: bool) -> int:
    """Check a folder: what engines will load, against the source."""
    from beamq.eval.verify.verify import verify as check

    if options.quick and options.level != "tensors":
        raise UsageError("--quick and --level contradict each other; give one")
    with screen.progress("verifying") as advance:
        report = check(
            checkpoint,
            source=options.source,
            level="quick" if options.quick else options.level,
            workers=options.workers,
            progress=advance,
        )
    screen.show(
        lambda: {"command": "verify", **report.to_dict()},
        lambda: verify_blocks(report, verbose=verbose),
    )
    return 0 if report.ok else 1


@command()
def inspect(screen: Screen, checkpoint: Checkpoint) -> None:
    """What a checkpoint is: format, share quantized, oddities."""
    from beamq.eval.verify.inspect import inspect_checkpoint

    found = inspect_checkpoint(checkpoint)
    screen.show(lambda: {"command": "inspect", **found.to_dict()}, lambda: inspect_blocks(found))


# What `beamq inspect` says: the checkpoint at a glance, its parts, and what is odd about it.

_FORMAT_NAMES = {"nvfp4": "NVFP4", "fp8": "FP8", "bf16": "BF16", "fp16": "FP16", "fp32": "FP32"}


def inspect_blocks(found: Inspection) -> list[Block]:
    """The same as two tables and notes."""

    from beamq.report.tables import Table

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
        Table(rows=rows),
        "",
        Table(
            head=("part", "tensors", "parameters", "quantized", "bytes", "stored as"),
            align="lrrrrl",
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


# What `beamq verify` says: every check with its outcome, and the error of each part.


def verify_blocks(report: VerifyReport, *, verbose: bool) -> list[Block]:
    """Checks as a table (those skipped only if `verbose`), errors by part, one line of verdict."""

    from beamq.report.tables import Table

    shown = [check for check in report.checks if verbose or check.status != "skip"]
    blocks: list[Block] = [
        Table(
            head=("check", "", "found"),
            rows=[(check.name, _status(check), _found(check)) for check in shown],
        ),
        "",
    ]
    if report.errors:
        blocks += [
            Table(
                title="Error of the quantized weights against the source",
                head=("part", "linears", "elements", "relative RMS", "worst linear"),
                align="lr",
                rows=[
                    (
                        error.role,
                        f"{error.linears:,}",
                        show_count(error.elements),
                        f"{error.relative_rms:.4f}",
                        f"{error.worst_relative_rms:.4f}",
                    )
                    for error in report.errors
                ],
            ),
            "",
        ]
    if report.plain:
        blocks.append(_plain(report))
    blocks.append(_verdict(report))
    return blocks


def _status(check: CheckResult) -> str:
    return "FAIL" if check.status == "fail" else check.status


def _found(check: CheckResult) -> str:
    others = check.where[1:]
    if check.status != "fail" or not others:
        return check.detail
    more = ", ..." if check.count > len(check.where) else ""
    return f"{check.detail}; also {', '.join(others)}{more}"


def _plain(report: VerifyReport) -> str:
    """What an `ok` of a Beam that is not quantized rests on."""
    sums = report.check("checksums.tensors").status != "skip"
    rest = "structure and checksums" if sums else "structure"
    if report.source is not None:
        rest += ", and against what its source decodes to"
    return f"Not quantized: a plain {report.format.upper()} Beam. It was checked for its {rest}."


def _verdict(report: VerifyReport) -> str:
    by_status = [check.status for check in report.checks]
    passed, skipped = by_status.count("pass"), by_status.count("skip")
    read = f"{show_bytes(report.bytes_read)} read in {show_seconds(report.seconds)}"
    if report.ok:
        return f"ok: {passed} checks passed, {skipped} skipped; {read}"
    names = ", ".join(check.name for check in report.failures)
    return f"FAILED: {len(report.failures)} of {passed + len(report.failures)} checks: {names}"
