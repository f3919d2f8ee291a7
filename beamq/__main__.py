"""The `beamq` command and `python -m beamq`: `cli.main`, interruptible from the first import."""

import os
import sys


def main() -> None:
    """Run the command line."""
    if "LOCAL_RANK" in os.environ:  # torch tells of each channel between ranks, at each rank
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        from beamq.cli import main as command  # typer, which takes a moment

        command()
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":  # of torchrun's processes the first one speaks
            sys.stderr.write("error: interrupted\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
