"""Options as data: one dataclass field holds an option's type, default, flag and help text.

In: frozen dataclasses whose fields are made by `option`. Out: the keywords of a public call (here)
and the flags of a command (`commands.options`), both read from the fields.

The one idea: an option is written once. A `TypedDict` next to each dataclass repeats names and
types for editors; a test keeps them equal.

Every argument of a public call is checked before the call begins, by its annotation (`read`): what
does not fit is a `UsageError` that names it. One text or path stands for a list of one. What an
annotation names and `_KINDS` does not know is checked by the call itself.
"""

from __future__ import annotations

import ast
import functools
import inspect
import math
import numbers
import operator
import os
import reprlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import KW_ONLY, Field, dataclass, field, fields
from typing import Any, ParamSpec, TypeVar, cast

from beamq.errors import UsageError, printable
from beamq.notebook import in_notebook, notebook_bar
from beamq.units import parse_size, parse_tokens

P = ParamSpec("P")
T = TypeVar("T")
FLAG = "flag"


@dataclass(frozen=True, slots=True)
class Flag:
    """How an option is given, and what it may be.

    `name` is the flag (None: from the field's name), `type` what its text is read as (None: the
    type of the default, else text). `shown` is the default as help states it, for options whose
    default depends on the device or model. `many` lets the flag be repeated. `after` names the
    field of another class that the flag follows in help. `keyword_only` means no flag.

    `size` reads `5GB` as bytes, `tokens` reads `128k` as 131,072. `at_least`, `at_most`, `among`,
    `choices` and `check`, which raises `UsageError`, bound the value. A shell's completion offers
    `choices`, or `suggested` where other values are taken as well. A keyword takes what the field
    holds, and `also` other kinds, which are turned into text.
    """

    help: str
    _: KW_ONLY
    name: str | None = None
    short: str | None = None
    metavar: str | None = None
    shown: str | None = None
    type: type | None = None
    choices: tuple[str, ...] = ()
    suggested: tuple[str, ...] = ()
    at_least: int | None = None
    at_most: int = 2**63 - 1
    among: tuple[int, ...] = ()
    check: Callable[[str], object] | None = None
    also: str = ""
    size: bool = False
    tokens: bool = False
    many: bool = False
    after: str | None = None
    keyword_only: bool = False


def option(default: Any, flag: Flag | str, **how: Any) -> Any:
    """A dataclass field with a default and a flag, or the help text and other fields of one."""
    flag = Flag(flag, **how) if isinstance(flag, str) else flag
    return field(default=default, metadata={FLAG: flag})


class _Ignore:
    """What an event does where nobody listens: nothing."""

    def __call__(self, *_: object) -> None:
        """Take anything."""

    def __repr__(self) -> str:
        return "ignore"


ignore = _Ignore()


def takes(*classes: type, **flags: Flag) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a public call: check its arguments, and describe the fields of `classes`, which it
    takes as its `**keywords` (`from_keywords` checks those). `flags` bound its own parameters.

    `inspect.signature` shows every field with its default, and `help` describes it as well. In a
    notebook, progress that is reported to nobody is a bar. Raises `TypeError` for a keyword that is
    neither a field nor a parameter.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        plain = inspect.signature(function)
        own = {p.name: p for p in plain.parameters.values() if p.kind is not p.VAR_KEYWORD}
        only = inspect.Parameter.KEYWORD_ONLY
        added = [
            inspect.Parameter(each.name, only, default=each.default, annotation=taken(each))
            for cls in classes
            for each in fields(cls)
        ]
        signature = plain.replace(parameters=[*own.values(), *added])
        names = ("on_progress", "progress", "on_layer")
        progress = next((name for name in names if name in signature.parameters), None)

        @functools.wraps(function)
        def call(*args: P.args, **keywords: P.kwargs) -> T:
            for name in keywords:
                if name not in signature.parameters:
                    raise TypeError(
                        f"{function.__name__}() got an unexpected keyword argument {name!r}"
                    )
            try:
                given = plain.bind(*args, **keywords)
            except TypeError:
                return function(*args, **keywords)  # Python says it better
            for name, value in given.arguments.items():
                if name in own:
                    hint = str(own[name].annotation)
                    given.arguments[name] = read(value, name, hint, flags.get(name))
            with torch_as_it_comes(), ExitStack() as stack:
                if progress and progress not in keywords and in_notebook():
                    bar = stack.enter_context(notebook_bar(function.__name__))
                    return function(*given.args, **given.kwargs | {progress: bar})
                return function(*given.args, **given.kwargs)

        call.__signature__ = signature  # type: ignore[attr-defined]  # what `inspect` looks for
        call.__doc__ = "\n\n".join(map(_described, (function, *classes)))
        return call

    return decorate


@contextmanager
def torch_as_it_comes() -> Iterator[None]:
    """Set a caller's autocast and default device aside; they would change what a model computes."""
    with ExitStack() as stack:
        if (torch := sys.modules.get("torch")) is not None:
            for kind in filter(torch.is_autocast_enabled, ("cpu", "cuda")):
                stack.enter_context(torch.autocast(kind, enabled=False))
            if torch.get_default_device().type != "cpu":
                stack.enter_context(torch.device("cpu"))
        yield


def taken(each: Field[Any]) -> str:
    """The annotation of a keyword: what the field holds and what is turned into that."""
    flag = each.metadata.get(FLAG)
    if flag is None or not (flag.also or flag.size or flag.tokens):
        return str(each.type)
    held = str(each.type).removesuffix(" | None")
    found = f"{held} | {flag.also or 'str'}"
    return found if held == each.type else f"{found} | None"


def _described(thing: object) -> str:
    """The docstring of a call or of a class of options, and the help text of each flag."""
    lines = [inspect.cleandoc(thing.__doc__ or ""), ""]
    for each in fields(cast(Any, thing)) if isinstance(thing, type) else ():
        if (flag := each.metadata.get(FLAG)) is not None:
            lines.append(f"    {each.name}: {flag.help}{' In bytes.' if flag.size else ''}")
    return "\n".join(lines).rstrip()


def from_keywords(
    cls: type[T],
    keywords: Mapping[str, object],
    spelled: Callable[[str, Flag], str] = lambda name, _: name,
) -> T:
    """The `cls` among `keywords`, which may hold fields of other classes as well.

    Raises `UsageError` for what a field cannot hold; `spelled` is how a message names the field.
    """
    held = {}
    for each in fields(cast(Any, cls)):
        if each.name in keywords:
            flag = each.metadata.get(FLAG)
            name = spelled(each.name, flag) if flag else each.name
            value = read(keywords[each.name], name, taken(each), flag)
            held[each.name] = _as_held(value, str(each.type))
    return cls(**held)


# --- reading one value ---------------------------------------------------------------------------


def _only(*kinds: type) -> Callable[[Any], Any]:
    def take(value: Any) -> Any:
        if not isinstance(value, kinds):
            raise TypeError
        return value

    return take


def _whole(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError
    return operator.index(value)  # of NumPy and torch as well


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise TypeError
    return float(value)


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value or "\0" in value:
        raise TypeError
    return value


def _called(value: Any) -> Any:
    if not callable(value):
        raise TypeError
    return value


def _path(value: Any) -> Any:
    _text(os.fspath(_only(os.PathLike)(value)))
    return value


_KINDS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "bool": ("True or False", _only(bool)),
    "int": ("a whole number", _whole),
    "float": ("a finite number", _number),
    "str": ("text", _text),
    "Path": ("a path", _path),
    "Callable": ("a function", _called),
}
_DTYPES = {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16"}


def read(value: Any, name: str, hint: str, flag: Flag | None = None) -> Any:
    """`value` as the annotation `hint` has it, within the bounds of `flag`.

    Raises `UsageError` that begins with `name`. A list is a tuple afterwards.
    """
    flag = flag or Flag("")
    kinds = _alternatives(ast.parse(hint, mode="eval").body)
    if value is None and "None" in map(_source, kinds):
        return None
    if isinstance(value, str) and "dtype" in map(_source, kinds):
        value = value.removeprefix("torch.")
        value = _DTYPES.get(value, value)
    for wanted, parse in ((flag.size, parse_size), (flag.tokens, parse_tokens)):
        if wanted and isinstance(value, str):
            value = parse(value, name)
        elif wanted and isinstance(value, float) and value.is_integer():
            value = int(value)  # 5e9
    lists = [kind for kind in kinds if _is_list(kind)]
    single = [kind for kind in kinds if not _is_list(kind)]
    if not lists:
        found = _one(value, name, single, flag)
        _check_bounds(found, name, flag)
        return found
    single += [each for kind in lists for each in _alternatives(cast(ast.Subscript, kind).slice)]
    alone = isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable)
    return tuple(_one(item, name, single, flag) for item in ([value] if alone else value))


def _alternatives(hint: ast.expr) -> list[ast.expr]:
    if isinstance(hint, ast.BinOp):
        return [*_alternatives(hint.left), *_alternatives(hint.right)]
    return [hint]


def _source(hint: ast.expr) -> str:
    """`str`, `None`, `Sequence`, and `dtype` for `torch.dtype`."""
    return ast.unparse(hint.value if isinstance(hint, ast.Subscript) else hint).rpartition(".")[2]


def _is_list(hint: ast.expr) -> bool:
    """Whether it is a `Sequence` of kinds without brackets of their own."""
    return (
        isinstance(hint, ast.Subscript)
        and _source(hint) == "Sequence"
        and not any(isinstance(each, ast.Subscript) for each in _alternatives(hint.slice))
    )


def _one(value: Any, name: str, kinds: Iterable[ast.expr], flag: Flag) -> Any:
    """The value as the first of `kinds` that it fits."""
    expected: dict[str, None] = {}
    for kind in kinds:
        word = _source(kind)
        words, reader = _KINDS.get(word, (f"a {ast.unparse(kind)}", None))
        if word == "Literal" and isinstance(kind, ast.Subscript):
            _check_choice(value, name, ast.literal_eval(kind.slice))
            return value
        if reader is not None:
            with suppress(TypeError, ValueError):
                return reader(value)
        elif isinstance(kind, ast.Subscript) or word in {c.__name__ for c in type(value).__mro__}:
            return value  # the call looks into it
        if word != "None":
            expected[words] = None
    if flag.size:
        expected = {"a number of bytes, or a size such as 5GB": None}
    shown = _shown(value)
    if "a path" in expected:
        expected.pop("text", None)
        shown = "an empty path" if value == "" else shown
    raise UsageError(f"{name} is {shown}, expected {' or '.join(expected)}")


def _shown(value: object) -> str:
    return printable(reprlib.repr(value), 80)


def _check_bounds(value: Any, name: str, flag: Flag) -> None:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        least = 1 if flag.size or flag.tokens else flag.at_least
        if least is not None and value < least:
            raise UsageError(f"{name} is {_shown(value)}, expected at least {least}")
        if value > flag.at_most:
            raise UsageError(f"{name} is {_shown(value)}, expected at most {flag.at_most:,}")
        if flag.among and value not in flag.among:
            listed = ", ".join(map(str, flag.among))
            raise UsageError(f"{name} is {_shown(value)}, expected one of {listed}")
    elif flag.choices:
        _check_choice(_as_held(value, "str"), name, flag.choices)
    held = _as_held(value, "str")
    if flag.check is not None and isinstance(held, str):  # a `Gemm` may be given
        flag.check(held)


def _check_choice(value: object, name: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        close = did_you_mean(value, choices) if isinstance(value, str) else ""
        raise UsageError(f"{name} is {_shown(value)}, expected {' or '.join(choices)}{close}")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'h200'?` where one of `known` is close; else nothing."""
    from difflib import get_close_matches  # only where something is wrong

    close = get_close_matches(word.lower().replace("_", "-"), list(known), 1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _as_held(value: Any, held: str) -> Any:
    """What the field holds: text for paths, devices and dtypes where it holds text."""
    if isinstance(value, tuple):
        return tuple(_as_held(item, held) for item in value)
    if "Path" not in held and isinstance(value, os.PathLike):
        return os.fspath(value)
    if "str" in held and type(value).__module__ == "torch":
        return str(value).removeprefix("torch.")
    return value
