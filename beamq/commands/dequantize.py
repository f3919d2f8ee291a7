"""`beamq dequantize`: options in, one call into the library, a BF16 folder out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from beamq.commands import outcome
from beamq.commands.options import (
    AsJson,
    CacheBudget,
    Checkpoint,
    Debug,
    Output,
    Overwrite,
    Quiet,
    Resume,
    ShardSize,
    Workers,
)

if TYPE_CHECKING:
    from beamq.console import Screen


def dequantize(
    checkpoint: Checkpoint,
    output: Output,
    max_shard_size: ShardSize = "5GB",
    cache_budget: CacheBudget = "100GB",
    workers: Workers = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Decode an NVFP4 or FP8 Beam back to BF16, exactly."""

    def body(screen: Screen) -> None:
        from beamq.conversion.dequantize import dequantize as decode
        from beamq.conversion.runner import Progress
        from beamq.sizes import parse_size
        from beamq.views.run import dequantize_blocks, dequantize_data

        with screen.progress("decoding") as advance:

            def on_progress(progress: Progress) -> None:
                if advance is not None:
                    advance(progress.done_nbytes, progress.total_nbytes)

            result = decode(
                checkpoint,
                output,
                max_shard_bytes=parse_size(max_shard_size, "--max-shard-size"),
                cache_bytes=parse_size(cache_budget, "--cache-budget"),
                workers=workers,
                resume=resume,
                overwrite=overwrite,
                on_plan=lambda work: screen.say(f"Decoding {checkpoint} to {output} ..."),
                on_unchecked=lambda: screen.say(
                    f"Note: {checkpoint} has no beamq.json with checksums, so nothing tells whether"
                    " its bytes are those that were written."
                ),
                on_progress=on_progress,
            )
        screen.show(lambda: dequantize_data(result, checkpoint), lambda: dequantize_blocks(result))

    raise typer.Exit(outcome.run(body, as_json=as_json, quiet=quiet, debug=debug))
