"""`calibrate`: a checkpoint and text in, a statistics file out; all of `beamq calibrate`.

Headers, data, device and memory are checked first. `CalibrationPass` then takes all samples
through the model, one layer at a time. Its state is in the folder `STATS.state`, which is deleted
when the file is whole; a stopped run resumes from there and ends with the same bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Unpack

from beamq.adapter.merged import open_merged
from beamq.adapter.options import AdapterKeywords, AdapterOptions
from beamq.beam.config import BeamConfig
from beamq.calib.options import CalibrationOptions, TextKeywords
from beamq.calib.run import CalibrationPass, CalibrationSetup, LayerDone
from beamq.calib.state import RunState
from beamq.calib.statistics import (
    CalibrationStats,
    check_replaceable,
    load_stats,
    merge,
    save_stats,
)
from beamq.errors import CalibrationError, Interrupted, ResumeError
from beamq.io.files import user_path
from beamq.io.lock import OutputLock, check_shared, refuse_busy
from beamq.io.shard_writer import check_place, disk_errors, make_folder
from beamq.options import from_keywords, ignore, takes
from beamq.plan.sources import map_sources
from beamq.ranks import current_ranks
from beamq.signals import stop_on_signals

if TYPE_CHECKING:
    import torch

STATE_SUFFIX = ".state"


@dataclass(frozen=True, kw_only=True)
class CalibrationEvents:
    """Called by a calibration: `on_start` with its data and needs, `on_layer` after each layer."""

    on_start: Callable[[CalibrationSetup], None] = ignore
    on_layer: Callable[[LayerDone], None] = ignore


class CalibrationKeywords(TextKeywords, AdapterKeywords, total=False):
    """Keywords of `calibrate`."""

    seed: int
    experts: Literal["routed", "all"]
    dtype: str | torch.dtype
    gemm: str
    max_device_memory: int | str | None
    cache_bytes: int | str
    resume: bool
    overwrite: bool
    on_start: Callable[[CalibrationSetup], None]
    on_layer: Callable[[LayerDone], None]


@takes(CalibrationOptions, CalibrationEvents, AdapterOptions)
def calibrate(
    source: str | Path, stats: str | Path, **keywords: Unpack[CalibrationKeywords]
) -> CalibrationStats:
    """Run a BF16, F16 or F32 Beam on text and write what its linears saw to the file `stats`.

    `source` is a folder or `org/name[@revision]` on the Hub. See `CalibrationOptions` and
    `CalibrationEvents` for the keywords. Under torchrun, experts are split over ranks; statistics
    are bit for bit those of one process. Raises `CalibrationError` for data, or for activations
    that are not finite; `ResumeError` for a file or state that is in the way; `Interrupted` on
    SIGINT or SIGTERM.
    """
    options = from_keywords(CalibrationOptions, keywords)
    events = from_keywords(CalibrationEvents, keywords)
    adapter = from_keywords(AdapterOptions, keywords)
    ranks = current_ranks()
    target = user_path(stats)
    check_place(target, "STATS", makes_folders=True)
    check_replaceable(target)
    if target.exists() and not (options.resume or options.overwrite):
        raise _in_the_way(target)
    if ranks.world == 1:  # one of several would meet its own first rank there
        refuse_busy(state_folder(target))
    try:
        place = state_folder(target) / f"source-{ranks.rank}"
        budget = options.cache_bytes // ranks.world
        with ExitStack() as stack:
            with ranks.agreeing():
                checkpoint = stack.enter_context(
                    open_merged(source, adapter, cache_bytes=budget, cache_folder=place)
                )
                map_sources(checkpoint, BeamConfig.from_dict(checkpoint.config))
            setup = CalibrationSetup(checkpoint, options, ranks)
            if ranks.first:
                events.on_start(setup)
            with ranks.meeting():
                finished = _finished(target, setup)
            if finished is not None:
                return finished
            return _run(target, setup, events)
    finally:
        ranks.leave()


def state_folder(target: Path) -> Path:
    """The folder in which a run that writes `target` keeps its state."""
    return target.with_name(target.name + STATE_SUFFIX)


def _in_the_way(target: Path) -> ResumeError:
    return ResumeError(f"{target}: exists; give --overwrite to replace it, or another name")


def _finished(target: Path, setup: CalibrationSetup) -> CalibrationStats | None:
    """The statistics of this same run, if `target` already has them and `resume` was given."""
    if not target.exists() or setup.options.overwrite:
        return None
    if not setup.options.resume:
        raise _in_the_way(target)
    found = load_stats(target)
    found.check_model(setup.fingerprint, setup.checkpoint.label)
    odd = _differences(found, setup)
    if odd:
        raise ResumeError(
            f"{target}: made with {', '.join(odd)}; use the same options, or --overwrite"
        )
    return found


def _differences(found: CalibrationStats, setup: CalibrationSetup) -> list[str]:
    """The options that differ from those with which `found` was made."""
    options, wanted = setup.options, setup.data_record()
    if len(found.data) != 1:
        return [f"{len(found.data)} data sets merged"]
    had = found.data[0]
    pairs = {
        "--samples": (had.get("samples_asked"), wanted["samples_asked"]),
        "--sequence-length": (had.get("sequence_length"), wanted["sequence_length"]),
        "--seed": (had.get("seed"), wanted["seed"]),
        "--dtype": (had.get("activations"), wanted["activations"]),
        "--experts": (found.experts, options.experts),
    }
    odd = [f"{name} {was}, not {now}" for name, (was, now) in pairs.items() if was != now]
    if not odd and found.data_digests != (setup.data.digest,):
        odd.append("other text (--data)")
    return odd


def _run(target: Path, setup: CalibrationSetup, events: CalibrationEvents) -> CalibrationStats:
    options, ranks = setup.options, setup.ranks
    state = RunState(state_folder(target), setup.identity())
    lock: OutputLock | None = None
    try:
        with ranks.meeting():
            if ranks.first:
                state.check_space(setup.state_nbytes)  # before anything is made
                with disk_errors(state.folder, "creating the state folder"):
                    make_folder(state.folder)
                lock = OutputLock(state.folder)
        check_shared(state.folder, ranks)
        with ranks.meeting():
            if ranks.first:
                if options.overwrite:
                    state.clear()
                state.begin(resume=options.resume)
        with ranks.talking():
            result = run_pass(setup, state, events.on_layer)
        with ranks.meeting():
            if ranks.first:
                setup.checkpoint.check_unchanged(writes=True)
                save_stats(result, target)
                state.remove()
        return result
    finally:
        if lock is not None:
            lock.release()
            with suppress(OSError):  # it has a state
                state.folder.rmdir()


def run_pass(
    setup: CalibrationSetup, state: RunState, on_layer: Callable[[LayerDone], None]
) -> CalibrationStats:
    """The forward pass, interruptible by signals."""
    stop = threading.Event()
    done = 0

    def after(layer: LayerDone) -> None:
        nonlocal done
        done = layer.layer + 1
        if setup.ranks.first:
            on_layer(layer)

    run = CalibrationPass(setup, state, after=after, stopped=stop.is_set)
    with stop_on_signals(stop):
        try:
            return run.run()
        except Interrupted:
            layers = setup.checkpoint.config["num_hidden_layers"]
            raise Interrupted(
                f"interrupted; {done} of {layers} layers are calibrated."
                " Run the same command with --resume to continue"
            ) from None


@takes()
def merge_statistics(paths: Sequence[str | Path], target: str | Path) -> CalibrationStats:
    """Merge statistics files of one model on different data into `target`.

    Raises `CalibrationError` where they do not belong together, `ResumeError` if `target` exists.
    """
    target = user_path(target)
    if len(paths) < 2:
        raise CalibrationError(f"merging takes at least two statistics files, {len(paths)} given")
    if target.exists():
        raise ResumeError(f"{target}: exists; choose another name")
    merged = load_stats(user_path(paths[0]))
    for path in paths[1:]:
        merged = merge(merged, load_stats(user_path(path)))
    save_stats(merged, target)
    return merged
