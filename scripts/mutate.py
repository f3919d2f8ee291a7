"""Put one small fault at a time into a copy of the code, and see whether the nearest tests fail.

    python scripts/mutate.py                 every mutant of scripts/mutants.toml
    python scripts/mutate.py --only NAME     one of them; may be repeated
    python scripts/mutate.py --list          their names and files

A mutant is a text that stands once in its file, another text in its place, and the tests that ought
to fail with it. All work is done in a temporary copy of the tree, where these tests first have to
pass without a mutant. After a change to a C file the kernels are built again (a minute).

Exit code 1: a mutant survived that has no explanation in the table, its text is no longer found
(the code changed: bring the table up to date), or the tests fail without it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLE = Path(__file__).with_name("mutants.toml")
TIMEOUT = 900  # seconds for one mutant's tests; one that hangs them counts as killed
LEFT_OUT = (".*", "__pycache__", "build", "*.egg-info", "demo-output")
PASSED, FAILED = 0, 1  # pytest's exit codes; others mean that it did not run the tests


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """`file` is relative to the root. `explained` says why no test on this machine can fail."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    explained: str = ""


def read_mutants(table: Path = TABLE) -> list[Mutant]:
    """The mutants of a table. Raises `TypeError` for unknown or missing keys."""
    entries = tomllib.loads(table.read_text("utf-8"))["mutant"]
    return [Mutant(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries]


def stale(root: Path, mutant: Mutant) -> str | None:
    """Why a mutant cannot be made in the tree at `root`, if so."""
    path = root / mutant.file
    count = path.read_text("utf-8").count(mutant.old) if path.is_file() else 0
    if count != 1:
        return f"{mutant.file}: the old text is found {count} times, expected once"
    for test in mutant.tests:
        file, _, name = test.partition("::")
        if not (root / file).is_file():
            return f"{file}: there is no such test file"
        if name and f"def {name.partition('[')[0]}(" not in (root / file).read_text("utf-8"):
            return f"{file}: there is no test {name}"
    return None


class Copy:
    """A temporary copy of a tree, in which mutants are made and tests run."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.tree = folder / "tree"
        shutil.copytree(root, self.tree, ignore=shutil.ignore_patterns(*LEFT_OUT))
        fixtures = root.parent / "shared" / "fixtures"  # as in tests/conftest.py
        self._environment = {
            "BEAMQ_FIXTURES": str(fixtures),
            **os.environ,
            "PYTHONPATH": str(self.tree),
            "PYTHONDONTWRITEBYTECODE": "1",  # or the bytes of a mutant outlive it
            "OMP_NUM_THREADS": "1",
        }

    def run(self, *arguments: str, timeout: float | None = None) -> tuple[int | None, str]:
        """Python's exit code (None: it hung and was killed) and the end of its output."""
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=self.tree,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            return None, ""
        finally:  # on Ctrl-C too; with whatever the tests have started
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return process.returncode, output[-3000:]

    def test(self, tests: Iterable[str], timeout: float | None = None) -> tuple[int | None, str]:
        """Run tests until the first failure."""
        command = ("-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests)
        return self.run(*command, timeout=timeout)

    def survives(self, mutant: Mutant) -> bool:
        """Whether the tests pass with a mutant. Raises `RuntimeError` where they cannot be run."""
        path = self.tree / mutant.file
        kernels = {each: each.read_bytes() for each in self.tree.glob("beamq/formats/kernels/*.so")}
        original = path.read_bytes()
        path.write_text(original.decode().replace(mutant.old, mutant.new), "utf-8")
        try:
            if path.suffix in (".c", ".h"):
                code, output = self.run("setup.py", "--quiet", "build_ext", "--inplace", "--force")
                if code:
                    raise RuntimeError(f"{mutant.name}: the kernels cannot be built:\n{output}")
            code, output = self.test(mutant.tests, TIMEOUT)
        finally:
            path.write_bytes(original)
            for each, content in kernels.items():
                each.write_bytes(content)
        if code not in (PASSED, FAILED, None):
            raise RuntimeError(f"{mutant.name}: pytest ended with {code}:\n{output}")
        return code == PASSED


def judge(root: Path, mutants: Sequence[Mutant]) -> int:
    """Make every mutant, print what became of it, and return the exit code."""
    rotten = {each.name: why for each in mutants if (why := stale(root, each))}
    for name, why in rotten.items():
        print(f"stale      {name}: {why}")
    fresh = [each for each in mutants if each.name not in rotten]
    survivors = 0
    with tempfile.TemporaryDirectory(prefix="beamq-mutants-") as folder:
        copy = Copy(root, Path(folder))
        code, output = copy.run("-c", "import beamq; print(beamq.__file__)")
        if code or not Path(output.strip()).is_relative_to(copy.tree):
            print(f"tests would not run the copy, but {output.strip()}")
            return 1
        if fresh:
            code, output = copy.test(sorted({test for each in fresh for test in each.tests}))
            if code != PASSED:
                print(f"the tests do not pass without a mutant:\n{output}")
                return 1
        for mutant in fresh:
            begun = time.monotonic()
            outcome = "killed"
            if copy.survives(mutant):
                outcome = "explained" if mutant.explained else "SURVIVED"
                survivors += not mutant.explained
            seconds = time.monotonic() - begun
            print(f"{outcome:<10} {mutant.name} ({seconds:.0f} s)", flush=True)
    print(f"{len(mutants)} mutants: {survivors} survived unexplained, {len(rotten)} are stale")
    return 1 if survivors or rotten else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", action="append", metavar="NAME", help="this mutant alone")
    parser.add_argument("--list", action="store_true", help="names and files")
    given = parser.parse_args(arguments)
    mutants = read_mutants()
    if unknown := set(given.only or ()) - {each.name for each in mutants}:
        parser.error(f"no such mutant: {', '.join(sorted(unknown))}; --list names them")
    chosen = [each for each in mutants if not given.only or each.name in given.only]
    if given.list:
        for each in chosen:
            print(f"{each.name:<50} {each.file}")
        return 0
    return judge(ROOT, chosen)


if __name__ == "__main__":
    sys.exit(main())
