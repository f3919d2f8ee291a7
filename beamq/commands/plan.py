"""`beamq plan`: options in, a plan from headers, tables of sizes and machines out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from beamq.commands import outcome
from beamq.commands.options import (
    AsJson,
    CacheBudget,
    Debug,
    Exclude,
    HostMemory,
    KvCacheOption,
    Quiet,
    Recipe,
    ShardSize,
    Source,
    Verbose,
    Workers,
)

if TYPE_CHECKING:
    from beamq.console import Screen


def plan(
    source: Source,
    recipe: Recipe = "nvfp4",
    exclude: Exclude = None,
    kv_cache: KvCacheOption = None,
    gpu: Annotated[
        str | None,
        typer.Option("--gpu", metavar="NAME[:N]", help="One machine in full, as h200:8."),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            "--context", min=1, help="Tokens of a sequence.", show_default="131072 or the model's"
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", help="Where it would be written.", show_default="this folder"),
    ] = None,
    max_shard_size: ShardSize = "5GB",
    max_host_memory: HostMemory = "1.5GB",
    cache_budget: CacheBudget = "100GB",
    workers: Workers = None,
    as_json: AsJson = False,
    verbose: Verbose = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Sizes, memory, disk and what fits where, from headers."""

    def body(screen: Screen) -> None:
        from beamq.conversion.limits import check_cache, default_workers
        from beamq.machines import parse_gpu
        from beamq.plan import make_plan
        from beamq.sizes import parse_size
        from beamq.views.plan import needs_data, needs_text, plan_blocks, plan_data
        from beamq.views.serving import ServingView

        machine, count = parse_gpu(gpu) if gpu is not None else (None, None)
        memory = parse_size(max_host_memory, "--max-host-memory")
        cache = parse_size(cache_budget, "--cache-budget")
        made = make_plan(
            source,
            recipe,
            exclude=exclude or (),
            kv_cache=kv_cache,
            max_shard_bytes=parse_size(max_shard_size, "--max-shard-size"),
        )
        check_cache(made, cache)
        needs = needs_data(
            made,
            output or Path(),
            workers=workers or default_workers(),
            memory=memory,
            cache=cache,
        )
        serving = ServingView(made, context=context, gpu=machine, count=count)
        screen.show(
            lambda: {
                "command": "plan",
                **plan_data(made, source),
                "needs": needs,
                "serving": serving.data(),
            },
            lambda: [*plan_blocks(made, verbose=verbose), needs_text(needs), *serving.blocks()],
        )

    raise typer.Exit(outcome.run(body, as_json=as_json, quiet=quiet, debug=debug))
