"""Measure how easy the package is to enter: sizes, imports and names, before and after a change.

    python scripts/house_counts.py [--long] [ROOT]

prints a line for each count of the package `beamq` below ROOT (the current folder by default);
`--long` also lists what a count consists of. Reads the source as text and imports nothing.
Triton kernels (functions decorated with `triton.jit`) may be of any length.
"""

from __future__ import annotations

import argparse
import ast
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

MAX_LINES, MAX_PARAMETERS = 60, 8
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Count:
    """One measured number and what it consists of."""

    value: int
    items: tuple[str, ...] = ()


def listed(items: Sequence[str]) -> Count:
    """The number of `items`, which it consists of."""
    return Count(len(items), tuple(items))


def read_modules(root: Path) -> dict[str, tuple[ast.Module, int]]:
    """Every module of the package by dotted name, with its number of lines."""
    found = {}
    for path in sorted(root.glob("beamq/**/*.py")):
        name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        text = path.read_text("utf-8")
        found[name] = (ast.parse(text), text.count("\n"))
    return found


def imports_of(tree: ast.Module, names: set[str]) -> set[str]:
    """The package's modules that a module imports anywhere, inside functions too."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.add(whole if whole in names else node.module)
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return found & names


def functions(tree: ast.AST) -> Iterator[Function]:
    """Every function and method, nested ones included, but for Triton kernels."""
    for node in ast.walk(tree):
        if isinstance(node, Function):
            decorators = [ast.unparse(one) for one in node.decorator_list]
            if not any(one.startswith("triton.") for one in decorators):
                yield node


def parameters(function: Function) -> int:
    """How many parameters a function has; `self` and `cls` are none."""
    given = function.args
    every = [*given.posonlyargs, *given.args, *given.kwonlyargs]
    stars = [one for one in (given.vararg, given.kwarg) if one]
    return len([one for one in [*every, *stars] if one.arg not in ("self", "cls")])


def cycles(edges: dict[str, set[str]]) -> list[str]:
    """Groups of modules that import each other in a circle."""
    reached = {name: _reached_from(name, edges) for name in edges}
    groups = {
        tuple(sorted(other for other in reached[name] if name in reached[other]))
        for name in edges
        if name in reached[name]
    }
    return sorted(map(", ".join, groups))


def _reached_from(name: str, edges: dict[str, set[str]]) -> set[str]:
    """All modules that `name` imports, directly or through others."""
    found: set[str] = set()
    waiting = [name]
    while waiting:
        new = edges[waiting.pop()] - found
        found |= new
        waiting += new
    return found


def measure(root: Path) -> dict[str, Count]:
    """All counts of the package below `root`, by name."""
    modules = read_modules(root)
    edges = {name: imports_of(tree, set(modules)) - {name} for name, (tree, _) in modules.items()}
    lines = sum(count for _, count in modules.values())
    importers = Counter(other for found in edges.values() for other in found)
    packages = {name.rpartition(".")[0] for name in modules}
    single = [name for name in sorted(modules) if importers[name] == 1 and name not in packages]
    long, wide = [], []
    private: list[str] = []
    used: Counter[str] = Counter()
    classes = defaultdict(list)
    header = 0
    for name, (tree, _) in modules.items():
        for function in functions(tree):
            size = (function.end_lineno or 0) - function.lineno + 1
            header += function.body[0].lineno - function.lineno
            if size > MAX_LINES:
                long.append(f"{name}.{function.name}: {size} lines")
            if parameters(function) > MAX_PARAMETERS:
                wide.append(f"{name}.{function.name}: {parameters(function)} parameters")
            if function.name.startswith("_") and not function.name.startswith("__"):
                private.append(f"{name}.{function.name}")
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                classes[node.name].append(name)
            elif isinstance(node, ast.Name):
                used[f"{name}.{node.id}"] += 1
            elif isinstance(node, ast.Attribute):
                used[f"{name}.{node.attr}"] += 1
            elif isinstance(node, ast.Import | ast.ImportFrom):
                header += (node.end_lineno or node.lineno) - node.lineno + 1
    once = [name for name in private if used[name] == 1]
    double = [f"{name}: {', '.join(homes)}" for name, homes in classes.items() if len(homes) > 1]
    return {
        "modules": Count(len(modules)),
        "lines": Count(lines),
        "imported by exactly one other": listed(single),
        "imports between modules": Count(sum(map(len, edges.values()))),
        "import cycles, local imports included": listed(cycles(edges)),
        "percent of all lines are imports and signatures": Count(round(100 * header / lines)),
        "private functions": Count(len(private)),
        "private functions called once": listed(once),
        f"functions over {MAX_LINES} lines": listed(long),
        f"functions with over {MAX_PARAMETERS} parameters": listed(wide),
        "class names used twice": listed(double),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("root", nargs="?", default=".", type=Path)
    parser.add_argument("--long", action="store_true", help="list what each count consists of")
    options = parser.parse_args(arguments)
    lines = []
    for name, count in measure(options.root).items():
        lines.append(f"{count.value:>8}  {name}")
        lines += [f"            {item}" for item in count.items if options.long]
    print("\n".join(lines))


if __name__ == "__main__":
    main()
