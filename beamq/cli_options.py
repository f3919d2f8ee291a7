"""The options that several commands share, with their help: part of the command line's face.

With cli.py the only importer of typer. Defaults are given where a command uses an option.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class KvCache(StrEnum):
    """What `--kv-cache` takes."""

    none = "none"
    fp8 = "fp8"


class Level(StrEnum):
    """What `--level` takes."""

    structure = "structure"
    tensors = "tensors"


Source = Annotated[
    str, typer.Argument(metavar="SOURCE", help="Folder of a BF16 Beam.", show_default=False)
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
        help="nvfp4, nvfp4-mlp, nvfp4-all, fp8, fp8-experts, or a .yaml file.",
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
Workers = Annotated[
    int | None, typer.Option("--workers", min=1, help="Threads.", show_default="usable cores")
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on where an earlier run stopped.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a checkpoint in OUTPUT.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Leave nothing out of lists.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Only results and errors.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show a traceback when something fails.")]
