"""The output folder before and after a run: may we write here, is there room, what is stale.

In: the folder and the user's options. Out: a `Claim` (the folder made and locked), or an error.

Refused are: an output that is, contains or is inside the source; a folder that another process
writes to; one that is not empty without `--overwrite` or `--resume`; with them, one that beamq did
not make, that holds weight files which beamq did not write, or that holds the model which the
source was made from; a disk too small for what the plan will write. A run that is refused leaves no
trace.
"""

from __future__ import annotations

import re
import shutil
from contextlib import suppress
from pathlib import Path

from beamq.errors import DiskError, InputError, ResumeError, UsageError, counted
from beamq.io.checkpoint import ADAPTER_STAMP, Checkpoint, open_checkpoint
from beamq.io.companions import WEIGHT_SUFFIXES
from beamq.io.files import user_path
from beamq.io.hub import hub_source
from beamq.io.journal import CALIBRATION, STATE_DIR
from beamq.io.lock import LOCK_NAME, OutputLock, refuse_busy
from beamq.io.manifest import MANIFEST_NAME, Manifest
from beamq.io.safetensors_header import few
from beamq.io.shard_writer import PARTIAL, disk_errors, make_folder, sync_folder
from beamq.io.source import INDEX_NAME
from beamq.plan.plan import Work
from beamq.units import show_bytes

OTHER_FILES_NBYTES = 65_536  # configs, card
OTHER_FILES_NBYTES_PER_TENSOR = 550  # a tensor's lines in index, manifest and journal
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


def check_places(source: str | Path, output: Path, adapter: str | Path | None = None) -> None:
    """Raise `UsageError` when source and output overlap, or the adapter is in the output."""
    if adapter is not None and hub_source(adapter) is None:
        place = user_path(adapter).resolve()
        if output.resolve() in (place, *place.parents):
            raise UsageError(
                f"output {output} holds the adapter {adapter}; choose a separate folder"
            )
    if hub_source(source) is not None:
        return
    source = user_path(source)
    inner, outer = output.resolve(), source.resolve()
    same = output.exists() and source.exists() and output.samefile(source)
    if same or inner == outer or outer in inner.parents or inner in outer.parents:
        raise UsageError(f"output {output} overlaps the source {source}; choose a separate folder")


def check(output: Path, *, resume: bool, overwrite: bool) -> None:
    """Check whether a run may begin or go on in the folder, if it exists.

    Creates and changes nothing, so this can come before anything else. Raises
    `UsageError` (both options), `OutputBusyError`, `ResumeError` (in use, nothing to resume).
    """
    if resume and overwrite:
        raise UsageError("--resume and --overwrite contradict each other; give one")
    if output.exists() and not output.is_dir():
        raise ResumeError(f"{output}: exists and is not a folder; choose another output")
    if output.exists():
        refuse_busy(output)
        _check_content(output, resume=resume, overwrite=overwrite)


def _check_content(output: Path, *, resume: bool, overwrite: bool) -> None:
    with disk_errors(output, "looking into the folder", resumable=False):
        names = (path.name for path in output.iterdir())
        content = {name for name in names if not name.startswith(LOCK_NAME)}
    if not content:
        return
    if not (resume or overwrite):
        hint = "give --overwrite to replace a checkpoint, or choose another output"
        if STATE_DIR in content:
            hint = "--resume continues it, --overwrite starts again"
        found = counted(len(content), "entry", "entries")
        raise ResumeError(f"{output}: not empty ({found}); {hint}")
    if not content & {STATE_DIR, MANIFEST_NAME}:
        raise ResumeError(
            f"{output}: not empty, and beamq did not make it, so"
            f" {'--resume' if resume else '--overwrite'} will not delete anything in it; choose"
            " another output, or delete the folder yourself"
        )
    if strange := _strange_weights(output):
        raise ResumeError(
            f"{output}: holds weight files that beamq did not write ({few(strange)}) and would have"
            " to delete; move them away, or choose another output"
        )


def _strange_weights(output: Path) -> list[str]:
    """Weight files of a folder of ours that no run can have written: after a whole run those that
    beamq.json does not list, after one that was cut short those without the name of a shard."""
    listed = None
    if not (output / STATE_DIR).exists():
        listed = {shard.name for shard in Manifest.read(output / MANIFEST_NAME, ResumeError).listed}
    found = []
    for path in output.iterdir():
        name = path.name.removesuffix(PARTIAL)
        if name.endswith((*WEIGHT_SUFFIXES, ".index.json")) and name != INDEX_NAME:
            ours = _SHARD.fullmatch(name) if listed is None else path.name in listed
            if not ours:
                found.append(path.name)
    return sorted(found)


def refuse_origin(checkpoint: Checkpoint, output: Path) -> None:
    """Raise `UsageError` if `output` holds the model that `checkpoint` was made from, which
    `--overwrite` would delete."""
    manifest = Manifest.of(checkpoint.source)
    if manifest is None or not (output / "config.json").is_file():
        return
    with suppress(InputError), open_checkpoint(output) as old:
        if old.fingerprint() == str(manifest.digests.get("source")).partition(ADAPTER_STAMP)[0]:
            raise UsageError(
                f"{output}: is the source that {checkpoint.label} was made from; --overwrite does"
                " not delete it; choose another output"
            )


class Claim:
    """The output folder, made and locked for one run, until `release`, which removes folders that
    were made for the run and are empty.

    Raises what `check` raises, and `DiskError` where the folder cannot be made.
    """

    def __init__(self, output: Path, *, resume: bool, overwrite: bool) -> None:
        check(output, resume=resume, overwrite=overwrite)
        self._made = [path for path in (output, *output.parents) if not path.exists()]
        self._lock: OutputLock | None = None
        try:
            with disk_errors(output, "creating the folder", resumable=False):
                make_folder(output)
            self._lock = OutputLock(output)
            # Another run may have come and gone between the check and the lock.
            _check_content(output, resume=resume, overwrite=overwrite)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        if self._lock is not None:
            self._lock.release()
        for folder in self._made:
            with suppress(OSError):  # not empty, as it should be, or never made
                folder.rmdir()


def clear(output: Path) -> None:
    """Remove an earlier checkpoint: first what makes it loadable, then its weights.

    It makes an empty state folder first, so that `--resume` and `--overwrite` still recognise the
    folder as an output of beamq if this is interrupted.
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
    """Disk that shards of a remote source take at most, besides the output."""
    return min(cache_bytes, sum(plan.remote_shards.values()))


def disk_nbytes(plan: Work, cache_bytes: int) -> int:
    """Disk that a whole run takes at most: weights, all other files, and fetched shards."""
    tensors = sum(len(shard.tensors) for shard in plan.shards)
    others = OTHER_FILES_NBYTES + OTHER_FILES_NBYTES_PER_TENSOR * tensors
    return plan.output_nbytes + others + fetched_nbytes(plan, cache_bytes)


def finished_nbytes(output: Path, plan: Work) -> int:
    """Bytes of shards that an earlier run finished, going by their names and sizes."""
    paths = [(output / shard.name, shard.nbytes) for shard in plan.shards]
    return sum(size for path, size in paths if path.is_file() and path.stat().st_size == size)


def free_nbytes(output: Path) -> int:
    """What is free where the folder is or will be."""
    place = output.absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def check_space(
    output: Path,
    plan: Work,
    finished: int,
    cache_bytes: int,
    *,
    replaced: bool = False,
    state_nbytes: int = 0,
) -> None:
    """Raise `DiskError` if what is left of the plan and the fetched shards do not fit the disk.

    `finished` are bytes of the output that are there already, `state_nbytes` what a calibration
    keeps during the run. What a run removes or overwrites counts as free: temporary files, fetched
    shards, and with `replaced` all weights that are there. Changes nothing.
    """
    patterns = [f"*{PARTIAL}", f"{STATE_DIR}/source-*/**/*", f"{STATE_DIR}/{CALIBRATION}/*"]
    if replaced:
        patterns += [f"*{suffix}" for suffix in WEIGHT_SUFFIXES]
    reusable = [path for pattern in patterns for path in output.glob(pattern) if path.is_file()]
    needed = disk_nbytes(plan, cache_bytes) + state_nbytes - finished
    free = free_nbytes(output) + sum(path.stat().st_blocks * 512 for path in reusable)
    if needed > free:
        raise DiskError(
            f"{output}: needs {show_bytes(needed)}, the disk has {show_bytes(free)} free; free"
            " space or choose another disk"
        )
