"""From the body of a command to its command line: flags are read from dataclasses of options.

In: a function `body(screen, ...)`. Out: what typer runs. Parameters of the body say what the
command takes: an `Annotated` one is a positional argument, a dataclass holds options (see
`beamq.options`), and one named as in `COMMON` gets that flag's value.

Only cli.py and commands import typer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import Field, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_origin, get_type_hints

import typer
from typer.models import ArgumentInfo

from beamq.commands import outcome
from beamq.options import FLAG, Flag, from_keywords

if TYPE_CHECKING:
    from beamq.report.console import Screen

T = TypeVar("T")


def place(metavar: str, text: str) -> ArgumentInfo:
    """A positional argument and its help, for `Annotated`."""
    found: ArgumentInfo = typer.Argument(metavar=metavar, help=text, show_default=False)
    return found


Source = Annotated[str, place("SOURCE", "A BF16 Beam: a folder, or org/name[@revision].")]
Output = Annotated[Path, place("OUTPUT", "Folder to write.")]
Checkpoint = Annotated[str, place("CHECKPOINT", "Folder of a Beam.")]
COMMON = {
    "as_json": Flag("Print the result as JSON.", name="--json"),
    "verbose": Flag("Show complete lists.", short="-v"),
    "quiet": Flag("Print only results and errors.", short="-q"),
    "debug": Flag("Show a traceback when something fails."),
}


def command(*, quiet: bool = True) -> Callable[[Callable[..., int | None]], Callable[..., None]]:
    """Make a command of its body. `--verbose` is offered where the body takes it, and `--quiet`
    where `quiet` says so."""

    def decorate(body: Callable[..., int | None]) -> Callable[..., None]:
        # `Screen` is not imported at run time: it brings rich.
        hints = get_type_hints(body, localns={"Screen": object}, include_extras=True)
        types = {name: hint for name, hint in hints.items() if isinstance(hint, type)}
        groups = {name: hint for name, hint in types.items() if is_dataclass(hint)}
        places = [name for name, hint in hints.items() if get_origin(hint) is Annotated]
        common = [
            name
            for name in COMMON
            if (name != "verbose" or "verbose" in hints) and (name != "quiet" or quiet)
        ]

        def callback(**given: Any) -> None:
            def run(screen: Screen) -> int | None:
                taken = {name: given[name] for name in (*places, *common) if name in hints}
                taken |= {name: _read(cls, given) for name, cls in groups.items()}
                return body(screen, **taken)

            how = {name: given[name] for name in common if name != "verbose"}
            raise typer.Exit(outcome.run(run, **how))

        parameters = [_parameter(name, hints[name], inspect.Parameter.empty) for name in places]
        parameters += [_option(each.name, each.default, each.metadata[FLAG])
                       for each in _ordered(groups.values())]  # fmt: skip
        parameters += [_option(name, False, COMMON[name]) for name in common]
        callback.__name__, callback.__doc__ = body.__name__, body.__doc__
        callback.__annotations__ = {each.name: each.annotation for each in parameters}
        callback.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return callback

    return decorate


def _ordered(classes: Iterable[type]) -> Iterator[Field[Any]]:
    """The fields with a flag in the order of help."""
    found: list[Field[Any]] = [
        each
        for cls in classes
        for each in fields(cls)
        if FLAG in each.metadata and not each.metadata[FLAG].keyword_only
    ]
    for each in found:
        if each.metadata[FLAG].after is None:
            yield each
            yield from (other for other in found if other.metadata[FLAG].after == each.name)


def _option(name: str, default: Any, flag: Flag) -> inspect.Parameter:
    """An option as typer takes it: None stands for a default that the library fills in."""
    kind: Any = flag.type or (str if default is None else type(default))
    if flag.choices:
        functional: Any = Enum  # mypy knows only members that are literals
        kind = functional("Choice", {choice: choice for choice in flag.choices})
    if flag.size:
        kind, default = str, default and f"{default / 1e9:g}GB"
    if flag.tokens:
        kind = str
    if flag.many:
        kind = list[str]
    if flag.shown is not None or flag.many:
        default = None
    found = typer.Option(
        *filter(None, (_spelling(name, flag), flag.short)),
        help=flag.help,
        metavar=flag.metavar,
        min=None if flag.tokens else flag.at_least,
        show_default=True if flag.shown is None else flag.shown,
        autocompletion=_completer(flag.suggested) if flag.suggested else None,
    )
    return _parameter(name, Annotated[kind if default is not None else kind | None, found], default)


def _completer(suggested: Iterable[str]) -> Callable[[str], list[str]]:
    def complete(incomplete: str) -> list[str]:  # a shell offers files where this offers nothing
        return [value for value in suggested if value.startswith(incomplete)]

    return complete


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Parameter(name, kind, default=default, annotation=annotation)


def _spelling(name: str, flag: Flag) -> str:
    return flag.name or f"--{name.replace('_', '-')}"


def _read(cls: type[T], given: Mapping[str, Any]) -> T:
    """The options among what typer read. Raises `UsageError` for what a field cannot hold."""
    found = {name: value for name, value in given.items() if value is not None}
    for name, value in found.items():
        found[name] = value.value if isinstance(value, Enum) else value
    return from_keywords(cls, found, _spelling)
