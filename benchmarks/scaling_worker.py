"""One process of a conversion that `scaling_gpu.py` starts: the moments at which bytes moved.

    [torchrun ...] -m benchmarks.scaling_worker SOURCE OUTPUT RECIPE DEVICE ROUNDS FILE

Writes FILE.RANK, in JSON: for each round the [first, last] moments (monotonic clock, which all
processes of a machine share) between which source bytes were read; and the floor in seconds, for
which every process reads, writes and sums as many bytes as all of them do in a round, at the same
time. The output of the last round stays.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from beamq.convert.gpu_worker import MAX_WORKERS
from beamq.convert.quantize import quantize
from beamq.convert.resources import default_workers
from beamq.io.checkpoint import open_checkpoint
from beamq.plan.plan import make_plan
from beamq.ranks import Ranks, current_ranks
from benchmarks.conversion_stages import Clock, Stages

SHARD_BYTES = 500_000_000  # each process gets as many as in a conversion of the whole model


def floor(source: str, folder: Path, recipe: str, ranks: Ranks) -> float:
    """The better of two tries; in the first, memory may have to be fetched for the files."""
    folder.mkdir()
    threads = min(default_workers(), MAX_WORKERS)
    with open_checkpoint(source) as checkpoint:
        plan = make_plan(checkpoint, recipe, max_shard_bytes=SHARD_BYTES)
        stages = Stages(checkpoint, plan, folder, threads=threads, cuda=False)
        found = []
        for _ in range(2):
            ranks.meet()
            found.append(stages.floor())
    folder.rmdir()
    return min(found)


def main(arguments: Sequence[str] | None = None) -> None:
    source, output, recipe, device, rounds, file = sys.argv[1:] if arguments is None else arguments
    leave = Ranks.leave
    Ranks.leave = lambda self: None  # type: ignore[method-assign]  # one group for all rounds
    calibrated = {"no_calibration": True} if recipe.startswith("nvfp4") else {}
    ranks = current_ranks()
    floor_s = floor(source, Path(f"{file}-files.{ranks.rank}"), recipe, ranks)
    moments = []
    for _ in range(int(rounds)):
        clock = Clock()
        quantize(
            source,
            output,
            recipe=recipe,
            device=device,
            max_shard_bytes=SHARD_BYTES,
            overwrite=True,
            on_progress=clock.look,
            **calibrated,  # type: ignore[arg-type]
        )
        moments.append((clock.first, clock.last))
    found = {"moments": moments, "floor_s": floor_s}
    Path(f"{file}.{ranks.rank}").write_text(json.dumps(found))
    leave(ranks)


if __name__ == "__main__":
    main()
