"""The options that several commands share, with their help: part of the command line's face.

Only cli.py and commands import typer. Defaults are given where a command uses an option.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from beamq.plan.recipe import BUILT_IN


class KvCache(StrEnum):
    """What `--kv-cache` takes."""

    none = "none"
    fp8 = "fp8"


class Experts(StrEnum):
    """What `--experts` takes."""

    routed = "routed"
    all = "all"


class Dtype(StrEnum):
    """What `--dtype` takes."""

    bfloat16 = "bfloat16"
    float32 = "float32"


class Level(StrEnum):
    """What `--level` takes."""

    structure = "structure"
    tensors = "tensors"
    forward = "forward"


Source = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE", help="A BF16 Beam: a folder, or org/name[@revision].", show_default=False
    ),
]
Output = Annotated[
    Path, typer.Argument(metavar="OUTPUT", help="Folder to write.", show_default=False)
]
Checkpoint = Annotated[
    str, typer.Argument(metavar="CHECKPOINT", help="Folder of a Beam.", show_default=False)
]
Recipe = Annotated[
    str,
    typer.Option(
        "--recipe",
        "-r",
        help=f"{', '.join(BUILT_IN)}, or a .yaml file.",
    ),
]
Exclude = Annotated[
    list[str] | None,
    typer.Option(
        "--exclude",
        metavar="PATTERN",
        help="Modules to leave precise: a dotted part, a glob, or re:REGEX. May be repeated.",
        show_default=False,
    ),
]
KvCacheOption = Annotated[
    KvCache | None,
    typer.Option("--kv-cache", help="KV cache scheme to declare.", show_default="the recipe's"),
]
ShardSize = Annotated[
    str, typer.Option("--max-shard-size", metavar="SIZE", help="Largest output file, as 5GB.")
]
HostMemory = Annotated[
    str, typer.Option("--max-host-memory", metavar="SIZE", help="Bound on buffers, as 1.5GB.")
]
CacheBudget = Annotated[
    str,
    typer.Option(
        "--cache-budget",
        metavar="SIZE",
        help="Bound on shards on disk at a time, where the source is on the Hub.",
    ),
]
Workers = Annotated[
    int | None, typer.Option("--workers", min=1, help="Threads.", show_default="usable cores")
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on where an earlier run stopped.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is there already.")]
Data = Annotated[
    list[str] | None,
    typer.Option(
        "--data",
        metavar="D",
        help="Text: a file, a folder, .jsonl, .parquet or a dataset's id; D:0.3 weighs it."
        " May be repeated.",
        show_default="Python's standard library",
    ),
]
Samples = Annotated[
    int | None,
    typer.Option("--samples", min=1, help="Rows of tokens.", show_default="256; 128 on a CPU"),
]
SequenceLength = Annotated[
    int | None,
    typer.Option(
        "--sequence-length", min=1, help="Tokens of a row.", show_default="2048; 512 on a CPU"
    ),
]
Seed = Annotated[int | None, typer.Option("--seed", help="Order of the data.", show_default="0")]
ExpertsOption = Annotated[
    Experts | None,
    typer.Option(
        "--experts",
        help="Tokens an expert is calibrated on: those routed to it, or all.",
        show_default="routed",
    ),
]
DtypeOption = Annotated[
    Dtype | None,
    typer.Option("--dtype", help="Of activations.", show_default="bfloat16"),
]
Device = Annotated[
    str, typer.Option("--device", help="auto (a GPU where it helps), cpu, cuda or cuda:N.")
]
DeviceMemory = Annotated[
    str | None,
    typer.Option(
        "--max-device-memory",
        metavar="SIZE",
        help="Bound on the forward pass, as 20GB.",
        show_default="what a GPU has free",
    ),
]
EvaluationSamples = Annotated[
    int | None,
    typer.Option("--samples", min=1, help="Rows of tokens.", show_default="64; 16 on a CPU"),
]
EvaluationLength = Annotated[
    int | None,
    typer.Option(
        "--sequence-length", min=2, help="Tokens of a row.", show_default="2048; 512 on a CPU"
    ),
]
PartsSamples = Annotated[
    int | None, typer.Option("--samples", min=1, help="Rows of tokens.", show_default="8")
]
PartsLength = Annotated[
    int | None,
    typer.Option(
        "--sequence-length", min=2, help="Tokens of a row.", show_default="1024; 256 on a CPU"
    ),
]
EvaluationDtype = Annotated[
    Dtype | None,
    typer.Option("--dtype", help="Of activations.", show_default="bfloat16; float32 on a CPU"),
]
Report = Annotated[
    Path | None,
    typer.Option("--report", metavar="DIR", help="Write it as HTML, Markdown and JSON there."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Plan and check, write nothing.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Leave nothing out of lists.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Only results and errors.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show a traceback when something fails.")]
