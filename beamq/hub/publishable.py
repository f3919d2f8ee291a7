"""Whether a folder is fit to publish: its structure, then every byte against its `beamq.json`.

In: a folder. Out: nothing, or `CheckFailed` with what verify found. Reading takes a minute or two
where sending takes hours, and a flipped bit that was sent is everybody's.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from beamq.conversion.output_folder import MANIFEST_NAME
from beamq.errors import CheckFailed
from beamq.eval.checks import CheckResult
from beamq.eval.verify import verify


def require_structure(folder: Path) -> None:
    """Raise `CheckFailed` for a folder that beamq has not made, or whose structure verify refuses.

    Reads headers, scalars and small files.
    """
    report = verify(folder, level="structure")
    if report.check("manifest.present").status == "skip":
        raise CheckFailed(
            f"{folder}: not fit to publish: no {MANIFEST_NAME}, so beamq has not made it;"
            " `hf upload` publishes any folder"
        )
    if not report.ok:
        raise _unfit(folder, report.failures, "--level structure")


def require_bytes(folder: Path, progress: Callable[[int, int], None] | None = None) -> None:
    """Raise `CheckFailed`, naming tensors and files, where a byte is not the one that was written.

    `progress` is called with bytes done and bytes in all.
    """
    report = verify(folder, level="quick", progress=progress)
    if not report.ok:
        raise _unfit(folder, report.failures, "--quick")
    sums = report.check("checksums.tensors")
    if sums.status != "pass":
        raise CheckFailed(f"{folder}: not fit to publish: no tensor was checked: {sums.detail}")


def _unfit(folder: Path, failures: tuple[CheckResult, ...], level: str) -> CheckFailed:
    failed = "; ".join(map(_said, failures[:2]))
    more = f" and {len(failures) - 2} more" if len(failures) > 2 else ""
    return CheckFailed(
        f"{folder}: not fit to publish ({failed}{more}); see `beamq verify {folder} {level}`"
    )


def _said(check: CheckResult) -> str:
    """The first place and its fault, then the other places that verify names."""
    others = f": {', '.join(check.where[1:])}" if check.where[1:] else ""
    return f"{check.name}: {check.detail}{others}"
