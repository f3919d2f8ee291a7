"""Where a run's input scales come from, and what may convert jobs on its way to them.

Two protocols between the runner and what it is given: `ScaleSource` (a file, a constant, or a
calibration that is still to be made) and `Feed`, the part of the last that does work.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from beamq.conversion.open_shards import OpenShards
from beamq.plan import Job

if TYPE_CHECKING:
    from beamq.calib.stats import CalibrationStats


class Feed(Protocol):
    """Something that converts jobs on its own way, before the crew takes what is left."""

    def run(
        self,
        jobs: Sequence[Job],
        shards: OpenShards,
        *,
        advance: Callable[[int], None],
        stop: threading.Event,
    ) -> Set[int]:
        """The `id` of each of `jobs` whose result was added to `shards`."""


class ScaleSource(Protocol):
    """Input scales of a run. With a `feed`, all but `digest` and `key` wait for it to have run.

    `digest` tells these scales from others before the run; a finished run's manifest has it under
    `key` of its `input_scales`, which are `record`. `files` are texts to keep beside the weights.
    `state_nbytes` is what finding them takes of the output's disk meanwhile; `calibrated` is how
    far that has come, as (layers, of how many), None before the first.
    """

    @property
    def state_nbytes(self) -> int: ...

    @property
    def calibrated(self) -> tuple[int, int] | None: ...

    @property
    def digest(self) -> str: ...

    @property
    def key(self) -> str: ...

    @property
    def record(self) -> Mapping[str, Any]: ...

    @property
    def files(self) -> Mapping[str, str]: ...

    @property
    def stats(self) -> CalibrationStats | None:
        """What a calibration of this run saw."""

    @property
    def feed(self) -> Feed | None: ...

    def of(self, module: str) -> float:
        """The scale of one linear."""

    def check_resumed(self) -> None:
        """Raise `ResumeError`, naming them, where an unfinished run was given other options."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownScales:
    """A `ScaleSource` that is there before the run."""

    scale: Callable[[str], float]
    digest: str
    record: Mapping[str, Any]
    files: Mapping[str, str] = field(default_factory=dict)
    key: str = "digest"
    feed: Feed | None = None
    stats: CalibrationStats | None = None
    state_nbytes: int = 0
    calibrated: tuple[int, int] | None = None

    def of(self, module: str) -> float:
        """The scale of one linear."""
        return self.scale(module)

    def check_resumed(self) -> None:
        """Nothing: `digest` is all there is to compare."""


def no_scales(why: str) -> KnownScales:
    """For runs that write none; asking for one is a defect."""

    def refuse(module: str) -> float:
        raise RuntimeError(f"{module}: {why}")

    return KnownScales(scale=refuse, digest="none", record={"digest": "none"})
