"""The `beamq` command and `python -m beamq`: `cli.main`, and Ctrl-C from the first import on."""

import gc
import logging
import os
import signal
import sys
import threading
from contextlib import suppress


def main() -> None:
    """Run the command line."""
    # A plan holds half a million small records. With the default thresholds the garbage collector
    # scans them repeatedly and takes longer than planning does.
    gc.set_threshold(200_000, 50, 100)
    _open_streams()
    _keep_interrupts()
    _have_home()
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # no lines about where it keeps fonts
    if "LOCAL_RANK" in os.environ:  # torch logs every connection between ranks
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        from beamq.cli import main as command  # typer, which takes a moment

        command()
    except (Exception, KeyboardInterrupt) as raised:
        from beamq.signals import interrupted

        if not interrupted(raised):
            raise
        if os.environ.get("RANK", "0") == "0":  # with torchrun, rank 0 reports it
            sys.stderr.write("error: interrupted\n")
        sys.exit(130)


def _open_streams() -> None:
    """Make a stream that was closed (`>&-`) a silent one, and keep files from getting its number,
    under which something else may write."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            silent = os.open(os.devnull, os.O_WRONLY)
            setattr(sys, name, os.fdopen(silent, "w", encoding="utf-8"))


def _keep_interrupts() -> None:
    """Deliver Ctrl-C again where Python loses it: in callbacks of the garbage collector and of weak
    references, which imports make many of, it only prints a traceback and goes on."""
    usual = sys.unraisablehook

    def hook(lost: "sys.UnraisableHookArgs") -> None:
        if lost.exc_type is not KeyboardInterrupt:
            usual(lost)
            return
        with suppress(RuntimeError):  # no thread can start: Python is ending
            # A little later, when the callback and this function have returned.
            threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGINT)).start()

    sys.unraisablehook = hook


def _have_home() -> None:
    """Give a user without a home, as in a container that does not know the user's number, one for
    the time of this process: the Hub's client, Triton and others keep caches there."""
    if os.path.expanduser("~") == "~":
        import atexit
        import shutil
        import tempfile

        os.environ["HOME"] = tempfile.mkdtemp(prefix="beamq-home-")
        atexit.register(shutil.rmtree, os.environ["HOME"], ignore_errors=True)


if __name__ == "__main__":
    main()
