"""The output folder before and after a run: may we write here, is there room, what is stale.

Refused: an output inside (or equal to, or around) the source, a non-empty folder without
`--overwrite` or `--resume`, one that `--overwrite` would empty though it is no checkpoint, or that
`--resume` would tidy up though no run of ours began there, a disk too small for what the plan will
write.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from beamq.checkpoint import INDEX_NAME
from beamq.conversion.journal import LOCK_NAME, STATE_DIR
from beamq.errors import DiskError, ResumeError, UsageError
from beamq.hub.repo import hub_source
from beamq.plan import Work
from beamq.shards import PARTIAL, disk_errors, make_folder, sync_folder
from beamq.small_files import user_path
from beamq.source_files import WEIGHT_SUFFIXES

MANIFEST_NAME = "beamq.json"
DISK_MARGIN = 64_000_000  # configs, index and file-system overhead, in bytes


def check_places(source: str | Path, output: Path) -> None:
    """Raise `UsageError` when source and output overlap."""
    if hub_source(source) is not None:
        return
    source = user_path(source)
    inner, outer = output.resolve(), source.resolve()
    same = output.exists() and source.exists() and output.samefile(source)
    if same or inner == outer or outer in inner.parents or inner in outer.parents:
        raise UsageError(
            f"output {output} lies in, around or on the source {source}; choose a folder apart"
        )


def prepare(output: Path, *, resume: bool, overwrite: bool) -> None:
    """Create the folder, or check that an existing one may be written to.

    Raises `UsageError` (both options), `ResumeError` (in use, nothing to resume), `DiskError`.
    """
    if resume and overwrite:
        raise UsageError("--resume and --overwrite contradict each other; give one")
    if output.exists() and not output.is_dir():
        raise ResumeError(f"{output}: exists and is not a folder; choose another output")
    with disk_errors(output, "creating the folder"):
        make_folder(output)
        content = {path.name for path in output.iterdir()} - {LOCK_NAME}
    if not content:
        return
    if resume:
        if not content & {STATE_DIR, MANIFEST_NAME}:
            raise ResumeError(
                f"{output}: not empty, and no run of beamq began here; choose another output"
            )
        return
    if not overwrite:
        begun = STATE_DIR in content
        hint = (
            "--resume continues it, --overwrite starts again"
            if begun
            else ("give --overwrite to replace a checkpoint, or choose another output")
        )
        raise ResumeError(f"{output}: not empty ({len(content)} entries); {hint}")
    if not content & {STATE_DIR, MANIFEST_NAME, "config.json", INDEX_NAME}:
        raise ResumeError(
            f"{output}: not empty and not a checkpoint; --overwrite will not delete it"
        )


def clear(output: Path) -> None:
    """Remove what an earlier checkpoint left: first what makes it loadable, then its weights.

    An empty state folder comes first: whenever this is cut short, `--resume` and `--overwrite`
    both know the folder for ours.
    """
    with disk_errors(output, "removing the old checkpoint"):
        state = output / STATE_DIR
        if state.is_symlink():
            state.unlink()
        shutil.rmtree(state, ignore_errors=True)
        make_folder(state)
        (output / MANIFEST_NAME).unlink(missing_ok=True)
        unload(output)
        for path in output.iterdir():
            if path.name.endswith((*WEIGHT_SUFFIXES, PARTIAL, ".index.json")):
                path.unlink()


def unload(output: Path) -> None:
    """Remove what would let an engine load a folder whose weights are still to come."""
    with disk_errors(output, "removing old configs"):
        for name in ("config.json", INDEX_NAME, "hf_quant_config.json"):
            (output / name).unlink(missing_ok=True)
        sync_folder(output)


def remove_stale(output: Path, plan: Work) -> None:
    """Remove weight files and temporary files that the plan does not name."""
    names = {shard.name for shard in plan.shards}
    with disk_errors(output, "removing stale files"):
        for path in output.iterdir():
            stale = path.name.endswith(WEIGHT_SUFFIXES) and path.name not in names
            if stale or path.name.endswith(PARTIAL):
                path.unlink()


def fetched_nbytes(plan: Work, cache_bytes: int) -> int:
    """Disk that shards of a remote source take at most, beside the output."""
    return min(cache_bytes, sum(plan.remote_shards.values()))


def check_space(output: Path, plan: Work, finished_nbytes: int, cache_bytes: int) -> None:
    """Raise `DiskError` if the rest of the plan and the fetched shards do not fit the disk."""
    reusable = sum(
        path.stat().st_blocks * 512
        for pattern in (f"*{PARTIAL}", f"{STATE_DIR}/source-*/**/*")
        for path in output.glob(pattern)
        if path.is_file()
    )
    needed = plan.output_nbytes - finished_nbytes + DISK_MARGIN
    needed += fetched_nbytes(plan, cache_bytes)
    free = shutil.disk_usage(output).free + reusable
    if needed - DISK_MARGIN > free:
        raise DiskError(
            f"{output}: needs {needed / 1e9:.2f} GB, the disk has {free / 1e9:.2f} GB free; free"
            " space or choose another disk"
        )
