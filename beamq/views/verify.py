"""What `beamq verify` says: every check with its outcome, and the error of each part."""

from __future__ import annotations

from typing import Any

from beamq.console import Block, Grid
from beamq.eval.checks import CheckResult, VerifyReport
from beamq.sizes import show_bytes, show_count, show_seconds


def verify_data(report: VerifyReport) -> dict[str, Any]:
    """The JSON of `beamq verify`: command, and the fields of `VerifyReport`: ok, checkpoint,
    level, format, source, checks [{name, status, detail, where, count}], errors (relative RMS by
    role), tensors, bytes_read, seconds."""
    return {"command": "verify", **report.to_dict()}


def verify_blocks(report: VerifyReport, *, verbose: bool) -> list[Block]:
    """Checks as a table (those skipped only if `verbose`), errors by part, one line of verdict."""
    shown = [check for check in report.checks if verbose or check.status != "skip"]
    blocks: list[Block] = [
        Grid(
            columns=("check", "", "found"),
            rows=tuple((check.name, _status(check), _found(check)) for check in shown),
        ),
        "",
    ]
    if report.errors:
        blocks += [
            Grid(
                title="Error of the quantized weights against the source",
                columns=("part", "linears>", "elements>", "relative RMS>", "worst linear>"),
                rows=tuple(
                    (
                        error.role,
                        f"{error.linears:,}",
                        show_count(error.elements),
                        f"{error.relative_rms:.4f}",
                        f"{error.worst_relative_rms:.4f}",
                    )
                    for error in report.errors
                ),
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
