"""Options as data: one dataclass field holds an option's type, default, flag and help text.

In: frozen dataclasses whose fields are made by `option`. Out: the keywords of a public call (here)
and the flags of a command (`commands.options`), both read from the fields.

The one idea: an option is written once. A field without a flag is a keyword of the library only.
A `TypedDict` next to each dataclass repeats names and types for editors; a test keeps them equal.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Any, ParamSpec, TypeVar, cast

P = ParamSpec("P")
T = TypeVar("T")
FLAG = "flag"


@dataclass(frozen=True, slots=True)
class Flag:
    """How the command line takes an option.

    `name` is its spelling (None: from the field's name), `type` what its text is read as (None: the
    type of the default, else text). `shown` is the default as help states it, for options whose
    default depends on the device or model. `size` reads `5GB` as bytes; `many` lets the flag be
    repeated. `after` names the field of another class that the flag follows in help.
    """

    help: str
    _: KW_ONLY
    name: str | None = None
    short: str | None = None
    metavar: str | None = None
    shown: str | None = None
    type: type | None = None
    choices: tuple[str, ...] = ()
    at_least: int | None = None
    size: bool = False
    many: bool = False
    after: str | None = None


def option(default: Any, flag: Flag | str, **how: Any) -> Any:
    """A dataclass field with a default and a flag, or the help text and other fields of one."""
    flag = Flag(flag, **how) if isinstance(flag, str) else flag
    return field(default=default, metadata={FLAG: flag})


def ignore(*_: object) -> None:
    """What an event does where nobody listens."""


def takes(*classes: type) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a call that takes the fields of `classes` as its `**keywords`.

    `inspect.signature` shows every field with its default, and `help` describes it as well. Raises
    `TypeError` for a keyword that is neither a field nor a parameter.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        plain = inspect.signature(function)
        own = [p for p in plain.parameters.values() if p.kind is not p.VAR_KEYWORD]
        only = inspect.Parameter.KEYWORD_ONLY
        added = [
            inspect.Parameter(each.name, only, default=each.default, annotation=each.type)
            for cls in classes
            for each in fields(cls)
        ]
        signature = plain.replace(parameters=[*own, *added])

        @functools.wraps(function)
        def call(*args: P.args, **keywords: P.kwargs) -> T:
            for name in keywords:
                if name not in signature.parameters:
                    raise TypeError(
                        f"{function.__name__}() got an unexpected keyword argument {name!r}"
                    )
            return function(*args, **keywords)

        call.__signature__ = signature  # type: ignore[attr-defined]  # what `inspect` looks for
        call.__doc__ = "\n\n".join(map(_described, (function, *classes)))
        return call

    return decorate


def _described(thing: object) -> str:
    """The docstring of a call or of a class of options, and the help text of each flag."""
    lines = [inspect.cleandoc(thing.__doc__ or ""), ""]
    for each in fields(cast(Any, thing)) if isinstance(thing, type) else ():
        if (flag := each.metadata.get(FLAG)) is not None:
            lines.append(f"    {each.name}: {flag.help}{' In bytes.' if flag.size else ''}")
    return "\n".join(lines).rstrip()


def from_keywords(cls: type[T], keywords: Mapping[str, object]) -> T:
    """The `cls` among `keywords`, which may hold fields of other classes as well."""
    names = {each.name for each in fields(cast(Any, cls))}
    return cls(**{name: value for name, value in keywords.items() if name in names})
