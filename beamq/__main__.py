"""The `beamq` command and `python -m beamq`: `cli.main`, and Ctrl-C from the first import on."""

import gc
import os
import sys


def main() -> None:
    """Run the command line."""
    # A plan holds half a million small records. With the default thresholds the garbage collector
    # scans them repeatedly and takes longer than planning does.
    gc.set_threshold(200_000, 50, 100)
    if "LOCAL_RANK" in os.environ:  # torch logs every connection between ranks
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        from beamq.cli import main as command  # typer, which takes a moment

        command()
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":  # with torchrun, rank 0 reports it
            sys.stderr.write("error: interrupted\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
