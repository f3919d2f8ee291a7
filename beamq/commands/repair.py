"""`beamq repair`: one call into the library, its findings, its result, and exit code 0 or 1."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from beamq.commands.convert import progress_meter
from beamq.commands.options import Checkpoint, Output, command
from beamq.commands.verify import verdict
from beamq.convert.options import RepairOptions
from beamq.errors import counted
from beamq.units import show_bytes, show_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from beamq.convert.repair import RepairResult
    from beamq.plan.repairs import RepairFinding
    from beamq.report.console import Block, Screen


@command()
def repair(
    screen: Screen, checkpoint: Checkpoint, output: Output, options: RepairOptions, verbose: bool
) -> int:
    """Write a sound copy of a published NVFP4 or FP8 Beam.

    Every finding has a class. E: the repair is exact. B: it changes weights within the bound that
    is printed, and needs --accept-bounded. S: it needs --source. C: it needs a new calibration. The
    checkpoint itself is never changed, and the copy is verified at the end.
    """
    from beamq.convert.repair import repair as mend

    with screen.progress("repairing") as advance:
        result = mend(
            checkpoint,
            output,
            **vars(options),
            on_findings=lambda found: screen.say(*findings_blocks(found, verbose=verbose)),
            on_progress=progress_meter(advance),
        )
    screen.show(lambda: repair_data(result, checkpoint), lambda: repair_blocks(result))
    return 0 if result.report is None or result.report.ok else 1


def findings_blocks(findings: Sequence[RepairFinding], *, verbose: bool) -> list[Block]:
    """The findings as a table; all their places only if `verbose`."""
    from beamq.report.tables import Table

    rows = [(str(each.kind), each.repair, f"{len(each.where):,}", each.text) for each in findings]
    blocks: list[Block] = [
        Table(head=("class", "repair", "places", "what"), align="llrl", rows=rows)
    ]
    if verbose:
        blocks += [f"{each.repair}: {', '.join(each.where)}" for each in findings]
    return blocks if rows else []


def repair_data(result: RepairResult, checkpoint: str) -> dict[str, Any]:
    """The JSON of `beamq repair`; `output` and `verify` are null where there was nothing to do."""
    return {
        "command": "repair",
        "checkpoint": checkpoint,
        "output": None if result.output is None else str(result.output),
        "changes": [found.to_dict() for found in result.findings],
        "tensor_bytes": result.nbytes,
        "verify": None if result.report is None else result.report.to_dict(),
        "seconds": round(result.seconds, 3),
    }


def repair_blocks(result: RepairResult) -> list[Block]:
    """The result, with the verdict of verify."""
    from beamq.report.tables import Table

    if result.report is None:
        return ["nothing to do: headers, configs and scales are as engines need them"]
    places = sum(len(found.where) for found in result.findings)
    rows = (
        ("output", str(result.output)),
        ("repaired", f"{counted(places, 'place')}; beamq.json lists them under `changes`"),
        ("size", show_bytes(result.nbytes)),
        ("time", show_seconds(result.seconds)),
    )
    return [Table(rows=rows), "", verdict(result.report)]
