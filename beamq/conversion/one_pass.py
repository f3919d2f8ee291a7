"""Calibrate and convert in one pass over the source: the feed behind `quantize --data`.

In: a plan's jobs and `CalibrationOptions`. Out: shards, and the statistics from which their input
scales came.

One process reads each source byte once: the forward pass reads a layer, `TapEngine` converts it
from the same buffers, and its input scales are written when its last sample has left it. What
the forward pass never reads (the head, the last norm, tensors that are not Beam's) is left to
the crew, and so are earlier layers of a resumed run whose shards were not finished. The output
has the same bytes as `calibrate` followed by `quantize --calibration`.

Where the recipe rounds experts by their inputs (GPTQ), these are converted by a visitor of the same
pass, layer by layer, from the weights that the forward pass holds. A run that is resumed then
starts the pass again if the saved state lies behind experts that are not durable yet.

The pass saves its state in the output's state folder, so a killed run goes on from the last
layer saved there.

Under torchrun the pass runs with experts split over ranks. Where they are rounded by it, each rank
writes its own into whoever's shard (`visited_experts`), and taps all else of its own shards.
Otherwise the conversion comes after the pass, split by shards: a shard's experts have passed other
ranks by then, so the source is read twice.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

from beamq.calib.options import CalibrationOptions
from beamq.calib.prepared import Prepared
from beamq.calib.scales import input_scales
from beamq.calib.stats import CalibrationStats, run_digest
from beamq.calib.stats_file import save_stats
from beamq.checkpoint import Checkpoint
from beamq.conversion.engines import Engines
from beamq.conversion.input_scales import from_statistics
from beamq.conversion.journal import CALIBRATION, STATE_DIR
from beamq.conversion.open_shards import OpenShards
from beamq.conversion.scale_source import Feed, KnownScales
from beamq.errors import UsageError
from beamq.plan import Job, Plan
from beamq.ranks import Ranks
from beamq.roles import Role

if TYPE_CHECKING:
    from beamq.calib.forward import LayerDone, Visit
    from beamq.conversion.tap_engine import TapEngine
    from beamq.conversion.visited_experts import VisitedExperts


class OnePass:
    """A `ScaleSource` and its own `Feed`.

    Made once options are checked: it loads the data and looks for the device. `statistics` is a
    file to save them in as well.
    """

    key = "calibration"

    def __init__(
        self,
        checkpoint: Checkpoint,
        plan: Plan,
        output: Path,
        options: CalibrationOptions,
        ranks: Ranks,
        engines: Engines,
        *,
        device_nbytes: int = 0,
        statistics: Path | None = None,
        on_start: Callable[[Prepared], None] = lambda prepared: None,
        on_layer: Callable[[LayerDone], None] = lambda done: None,
    ) -> None:
        self._method = plan.recipe.expert_method
        if self._method is not None:
            _check_exact(plan, options)
        self._prepared = Prepared(
            checkpoint,
            options,
            ranks,
            visited=self._method is not None,
            waiting_nbytes=_waiting_nbytes(plan, options.dtype),
            taken_nbytes=device_nbytes,
        )
        self._plan = plan
        self._engines = engines
        self._output = output
        self._state_folder = output / STATE_DIR / CALIBRATION
        self._statistics = statistics
        self._on_layer = on_layer
        self._known: KnownScales | None = None
        self.state_nbytes = self._prepared.state_nbytes
        self.calibrated: tuple[int, int] | None = None
        self.stats: CalibrationStats | None = None
        self.digest = run_digest(
            self._prepared.fingerprint, options.experts, [self._prepared.data_record()]
        )
        if ranks.first:
            on_start(self._prepared)

    @property
    def feed(self) -> Feed:
        """This."""
        return self

    @property
    def record(self) -> Mapping[str, Any]:
        """What the manifest says of the scales."""
        return self._after_the_pass().record

    @property
    def files(self) -> Mapping[str, str]:
        """Texts to keep beside the weights."""
        return self._after_the_pass().files

    def of(self, module: str) -> float:
        """The scale of one linear. Raises `CalibrationError` for one that was not looked at."""
        return self._after_the_pass().of(module)

    def check_resumed(self) -> None:
        """See `ScaleSource`."""
        from beamq.calib.state import RunState  # torch, only where a model runs

        RunState(self._state_folder, self._prepared.identity()).check_options()

    def _after_the_pass(self) -> KnownScales:
        if self._known is None:
            raise RuntimeError("input scales were asked for before the calibration was run")
        return self._known

    def run(
        self,
        jobs: Sequence[Job],
        shards: OpenShards,
        *,
        advance: Callable[[int], None],
        stop: threading.Event,
    ) -> Set[int]:
        """See `Feed`."""
        from beamq.conversion.tap_engine import TapEngine  # torch, only where a model runs
        from beamq.conversion.visited_experts import VisitedExperts, is_visited

        ranks = self._prepared.ranks
        experts: VisitedExperts | None = None
        engine: TapEngine | None = None
        with ranks.talking():
            if self._method is not None:
                experts = VisitedExperts(
                    self._plan, jobs, shards, output=self._output, ranks=ranks, advance=advance
                )
            if ranks.world == 1 or experts is not None:
                engine = TapEngine(
                    [job for job in jobs if experts is None or not is_visited(job)],
                    shards,
                    self._engines,
                    scales=self._plan.scales,
                    advance=advance,
                    stopped=stop.is_set,
                )
            stats = self._pass(engine, experts, stop)
        self._known, self.stats = from_statistics(self._plan, stats), stats
        self.calibrated = self._plan.config.num_layers, self._plan.config.num_layers
        done = frozenset() if engine is None else frozenset(engine.done)
        return done if experts is None else done | experts.done

    def _visit(self, experts: VisitedExperts | None, stop: threading.Event) -> Visit | None:
        """Experts to round by their inputs, if there are any left."""
        if experts is None or not experts.wanted:
            return None
        from beamq.calib.forward import Visit

        return Visit(
            wanted=experts.wanted,
            method=str(self._method),
            write=experts.put,
            stopped=stop.is_set,
        )

    def _pass(
        self, engine: TapEngine | None, experts: VisitedExperts | None, stop: threading.Event
    ) -> CalibrationStats:
        from beamq.calib.forward import CalibrationPass
        from beamq.calib.state import RunState

        prepared, ranks = self._prepared, self._prepared.ranks
        state = RunState(self._state_folder, prepared.identity())
        converters = [each for each in (engine, experts) if each is not None]

        def after(done: LayerDone) -> None:
            self.calibrated = done.layer + 1, done.layers
            if converters:
                scales = input_scales(done.stats, self._plan.config)
                for converter in converters:
                    converter.finish_layer(done.layer, lambda module: float(scales.scale(module)))
            if ranks.first:
                self._on_layer(done)

        if ranks.first:
            state.begin(resume=True)
        ranks.gather(None)  # nobody looks for a state before it is there
        stats = CalibrationPass(
            prepared,
            state,
            tap=None if engine is None else engine.tap,
            after=after,
            visit=self._visit(experts, stop),
            passed=None if engine is None else engine.passed,
            stopped=stop.is_set,
        ).run()
        if ranks.first:
            state.save_final(stats)
            if self._statistics is not None:
                save_stats(stats, self._statistics)
        return stats


def _waiting_nbytes(plan: Plan, dtype: str) -> int:
    """Upper bound of what `TapEngine` adds in buffers that wait for a partner's.

    Those are of members that are cast on loading; all others lie in the loader's own. Partners are
    neighbours in the loader's list, of which it deals out `TAP_PLACES` stretches: of experts one
    group waits for each stretch and each reader, of all else one of each kind in a layer.
    """
    from beamq.model.fill import TAP_PLACES  # torch, only where a model runs
    from beamq.model.load import reader_count

    as_stored = {"bfloat16": "BF16", "float32": "F32"}[dtype]
    experts = 0
    others: dict[int | None, int] = {}
    for job in plan.jobs:
        role, largest = job.members[0].role, max(m.source.nbytes for m in job.members)
        waits = job.source_nbytes - largest
        if all(member.source.spec.dtype == as_stored for member in job.members):
            continue
        if role.role is Role.EXPERT:
            experts = max(experts, waits)
        else:
            others[role.layer] = others.get(role.layer, 0) + waits
    return experts * (reader_count() + TAP_PLACES) + max(others.values(), default=0)


def _check_exact(plan: Plan, options: CalibrationOptions) -> None:
    """Raise `UsageError` where experts cannot be rounded from what the forward pass holds."""
    for job in plan.jobs:
        for member in job.members:
            dtype = member.source.spec.dtype
            if member.role.role is Role.EXPERT and dtype != "BF16" and options.dtype != "float32":
                raise UsageError(
                    f"{member.role.name} is {dtype}, which activations in {options.dtype} would"
                    f" round; recipe {plan.recipe.name} then needs --dtype float32"
                )
    if plan.remote_shards and options.max_device_memory is not None:
        raise UsageError(
            f"recipe {plan.recipe.name} may read experts twice where --max-device-memory is small;"
            " download the source first"
        )
