"""Measure how easy the package is to enter: sizes, imports and names, before and after a change.

    python scripts/house_counts.py [--long] [ROOT]

prints one line a count for the package `beamq` below ROOT (the current folder by default);
`--long` also lists what each count consists of. Reads the source as text and imports nothing.
Triton kernels (functions decorated with `triton.jit`) count for no limit on length or parameters.
"""

from __future__ import annotations

import argparse
import ast
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MAX_LINES, MAX_PARAMETERS = 60, 8
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Count:
    """One measured number and what it consists of."""

    name: str
    value: str
    items: tuple[str, ...] = ()


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
    """Groups of modules that import each other in a circle (Tarjan's components)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in sorted(edges[name]):
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            group = [stack.pop()]
            while group[-1] != name:
                group.append(stack.pop())
            if len(group) > 1:
                found.append(", ".join(sorted(group)))

    for name in edges:
        if name not in index:
            visit(name)
    return found


def measure(root: Path) -> list[Count]:
    """All counts of the package below `root`."""
    modules = read_modules(root)
    names = set(modules)
    edges = {name: imports_of(tree, names) - {name} for name, (tree, _) in modules.items()}
    lines = sum(count for _, count in modules.values())
    importers = defaultdict(set)
    for name, found in edges.items():
        for other in found:
            importers[other].add(name)
    packages = {name for name in names if any(other.startswith(f"{name}.") for other in names)}
    single = sorted(name for name in names - packages if len(importers[name]) == 1)
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
    circles = cycles(edges)
    share = f"{header / lines:.1%} of all lines"
    return [
        Count("modules", str(len(modules))),
        Count("lines", str(lines)),
        Count("imported by exactly one other", str(len(single)), tuple(single)),
        Count("imports between modules", str(sum(map(len, edges.values())))),
        Count("import cycles, local imports included", str(len(circles)), tuple(circles)),
        Count("imports and signatures", share),
        Count("private functions", str(len(private))),
        Count("private functions called once", str(len(once)), tuple(once)),
        Count(f"functions over {MAX_LINES} lines", str(len(long)), tuple(long)),
        Count(f"functions with over {MAX_PARAMETERS} parameters", str(len(wide)), tuple(wide)),
        Count("class names used twice", str(len(double)), tuple(double)),
    ]


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("root", nargs="?", default=".", type=Path)
    parser.add_argument("--long", action="store_true", help="list what each count consists of")
    options = parser.parse_args()
    for count in measure(options.root):
        print(f"{count.value:>8}  {count.name}")
        for item in count.items if options.long else ():
            print(f"            {item}")


if __name__ == "__main__":
    main()
