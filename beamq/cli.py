"""The `beamq` command: its commands in order, and how a wrong option is reported.

A command (`beamq/commands/`) takes options, makes one call into the library and returns an exit
code. Results go to stdout, everything else to stderr; `outcome` turns errors into exit codes. The
module of a command is imported when that command is asked for, and heavy modules inside commands.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any

import typer
import typer.main
from typer.core import TyperGroup

from beamq.commands import outcome
from beamq.errors import Interrupted, UsageError
from beamq.version import __version__

# Each command and its module in `beamq.commands`, in the order of help.
MODULES = {
    "plan": "plan",
    "calibrate": "calibrate",
    "quantize": "convert",
    "verify": "verify",
    "compare": "compare",
    "sensitivity": "compare",
    "inspect": "verify",
    "dequantize": "convert",
    "merge": "convert",
    "repair": "repair",
    "push": "push",
    "doctor": "doctor",
}
STYLE: dict[str, Any] = {
    "rich_markup_mode": None,
    "pretty_exceptions_enable": False,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}


class Commands(TyperGroup):
    """All commands. Errors of the option parser are reported as other errors are."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(MODULES)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        # An unknown name loads them all, because the parser suggests one of `self.commands`.
        for name in [cmd_name] if cmd_name in MODULES else MODULES:
            if name not in self.commands:
                alone = typer.Typer(add_completion=False, **STYLE)
                alone.command(name)(getattr(import_module(f"beamq.commands.{MODULES[name]}"), name))
                self.commands[name] = typer.main.get_command(alone)
        return self.commands.get(cmd_name)

    def main(  # type: ignore[override]  # keyword arguments only, and it never returns
        self, args: Sequence[str] | None = None, prog_name: str | None = None, **extra: Any
    ) -> None:
        """Run one command and exit with its code."""
        given = sys.argv[1:] if args is None else list(args)
        extra["standalone_mode"] = False  # so that errors come here
        try:
            code = super().main(args=given, prog_name=prog_name, **extra)
        except typer.Abort:  # Ctrl-C while options were read
            code = Interrupted.exit_code
        except Exception as fault:
            code = _refused(fault, given)
        sys.exit(code or 0)


def _refused(fault: Exception, given: Sequence[str]) -> int:
    """Report an error of the option parser; its classes are private, a method identifies them."""
    if not hasattr(fault, "format_message"):
        raise fault
    if type(fault).__name__ == "NoArgsIsHelpError":
        sys.stderr.write(f"{fault.format_message()}\n")
        return UsageError.exit_code
    context = getattr(fault, "ctx", None)
    named = (f"beamq {word}" for word in given if word in MODULES)
    command = next(named, "beamq") if context is None else context.command_path
    words = " ".join(str(fault.format_message()).split()).rstrip(".")
    return outcome.report_error(
        UsageError(f"{words}; see `{command} --help`"), as_json="--json" in given
    )


app = typer.Typer(
    name="beamq",
    cls=Commands,
    help="NVFP4 and FP8 checkpoints of Reflection's Beam that vLLM and SGLang serve unchanged.",
    epilog="Exit codes: 0 done, 1 a check failed, 2 usage, 3 bad input, 4 machine, 130 stopped.",
    no_args_is_help=True,
    **STYLE,
)


def main() -> None:
    """Entry of the console script and of `python -m beamq`."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a name that is not UTF-8 must not stop a message
            stream.reconfigure(errors="backslashreplace")
    app(prog_name="beamq")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"beamq {__version__}")
        raise typer.Exit


@app.callback()
def _beamq(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    # No docstring: it would replace the help text above.
    del version  # its callback did the work
