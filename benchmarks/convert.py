"""What a conversion costs, against llm-compressor and against plainly copying the same bytes.

    python -m benchmarks.convert --all --json out.json       everything; runs already in out.json
                                                             are kept, so it can be continued
    python -m benchmarks.convert --part fp8-2.4 --json out.json

Contenders run in turn, on the same files in memory (--work-dir, /dev/shm by default) and the same
cores, several rounds each; figures are medians. Ours is the whole process. The peer is given as the
whole process and as its conversion alone, without its imports. Both quantize the same linears:
attention, dense MLP and experts (`fp8` against FP8_DYNAMIC; against NVFP4A16 a recipe that takes
block scales from largest values as it does, and `nvfp4-all`, which searches for better ones).

Parts: nvfp4-2.4, fp8-2.4, nvfp4-8, fp8-8 (GB of source; ours and the peer), floor (ours and plain
copies of the same bytes), disk (the same with a cold cache and fsync, in --disk-dir), memory (peak
above imports, by number of experts). For the kernels alone see kernels_cpu.py.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.conversion_table import print_tables
from benchmarks.measuring import (
    HERE,
    WARM_NBYTES,
    Cost,
    Workplace,
    available_nbytes,
    forget_cached,
    machine,
    run,
    weights_nbytes,
)

RECIPES = {
    "nvfp4": str(HERE / "nvfp4-all-max.yaml"),
    "nvfp4-sweep": "nvfp4-all",  # our default: searches each block's scale
    "fp8": "fp8",
}
SCHEMES = {"nvfp4": "NVFP4A16", "fp8": "FP8_DYNAMIC"}
PEER_NBYTES = 6_000_000_000  # memory that the peer's process takes, for a warning in time


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One measurement to make."""

    part: str
    who: str  # ours, peer, floor, imports
    form: str  # a key of RECIPES
    experts: int
    round: int

    @property
    def key(self) -> str:
        """Its name in the JSON file."""
        return f"{self.part}/{self.form}/{self.experts}/{self.who}/{self.round}"


def plan(part: str, rounds: int) -> Iterator[Run]:
    """The runs of a part, in turn."""
    if part == "memory":
        yield Run(part=part, who="imports", form="fp8", experts=0, round=0)
        for experts in (4, 16, 64):
            for form in RECIPES:
                yield Run(part=part, who="ours", form=form, experts=experts, round=0)
        return
    if part in ("floor", "disk"):
        for experts in (16, 88) if part == "floor" else (88,):
            for index in range(rounds):
                for form in RECIPES:
                    for who in ("ours", "floor"):
                        yield Run(part=part, who=who, form=form, experts=experts, round=index)
        return
    form, size = part.split("-")
    contenders = [("ours", form), ("peer", form)]
    if form == "nvfp4":
        contenders.append(("ours", "nvfp4-sweep"))
    for index in range(rounds):
        for who, kind in contenders:
            experts = {"2.4": 16, "8": 88}[size]
            yield Run(part=part, who=who, form=kind, experts=experts, round=index)


PARTS = ("nvfp4-2.4", "fp8-2.4", "nvfp4-8", "fp8-8", "floor", "disk", "memory")


def ours(source: Path, output: Path, form: str) -> list[str]:
    """Our command line."""
    command = [sys.executable, "-m", "beamq", "quantize", str(source), str(output)]
    command += ["--recipe", RECIPES[form], "--quiet"]
    return command if form == "fp8" else [*command, "--no-calibration"]


class Bench:
    """Makes runs and keeps them in the JSON file."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._record: dict[str, Any] = {"machine": machine(), "runs": {}}
        if options.json is not None and options.json.exists():
            self._record = json.loads(options.json.read_text())
        self._written: dict[tuple[str, int], int] = {}  # our output's bytes: the floor's task

    @property
    def record(self) -> dict[str, Any]:
        """All measurements so far."""
        return self._record

    def part(self, part: str, deadline: float) -> bool:
        """Make what is missing of a part; whether it is whole."""
        missing = [
            item
            for item in plan(part, self._options.rounds)
            if item.key not in self._record["runs"]
        ]
        parent = self._options.disk_dir if part == "disk" else self._options.work_dir
        workplace = Workplace(parent, *(["--tiny"] if self._options.tiny else []))
        longest: dict[str, float] = {}
        try:
            for item in missing:
                if time.monotonic() + longest.get(item.who, 0.0) > deadline:
                    return False
                begun = time.monotonic()
                self._keep(item, self._measure(item, workplace))
                workplace.clear_output()
                longest[item.who] = max(longest.get(item.who, 0.0), time.monotonic() - begun)
        finally:
            workplace.remove()
        return True

    def _keep(self, item: Run, result: dict[str, Any]) -> None:
        self._record["runs"][item.key] = {**asdict(item), **result}
        figures = ", ".join(
            f"{name} {value:.2f}" if isinstance(value, float) else f"{name} {value}"
            for name, value in result.items()
        )
        print(f"{item.key}: {figures}", flush=True)
        if self._options.json is not None:
            self._options.json.write_text(json.dumps(self._record, indent=1))

    def _measure(self, item: Run, workplace: Workplace) -> dict[str, Any]:
        if item.who == "imports":
            return _figures(run([sys.executable, "-c", "import beamq.cli, beamq.convert.quantize"]))
        source = workplace.slice(item.experts)
        read = weights_nbytes(source)
        if item.part == "disk":
            forget_cached(source)
        else:
            workplace.warm_memory(0 if self._options.tiny else WARM_NBYTES)
        if item.who == "peer":
            needed = PEER_NBYTES + read // 2
            if not self._options.tiny and available_nbytes() < needed:
                raise SystemExit(f"the peer needs {needed / 1e9:.0f} GB of free memory")
            peer = [sys.executable, "-m", "benchmarks.peer_llmcompressor"]
            cost = run([*peer, str(source), str(workplace.output), SCHEMES[item.form]])
            timed = next(line for line in cost.output.splitlines() if '{"import_s"' in line)
            extra = json.loads(timed[timed.index('{"import_s"') :])
        elif item.who == "floor":
            cost, extra = run(self._floor(item, source, workplace.output)), {}
        else:
            cost, extra = run(ours(source, workplace.output, item.form)), {}
            self._written[item.form, item.experts] = weights_nbytes(workplace.output)
        written = sum(path.stat().st_size for path in workplace.output.iterdir() if path.is_file())
        return {**_figures(cost), **extra, "read_nbytes": read, "written_nbytes": written}

    def _floor(self, item: Run, source: Path, output: Path) -> list[str]:
        written = self._written.get((item.form, item.experts))
        if written is None:  # our run was made by an earlier call
            known = self._record["runs"][f"{item.part}/{item.form}/{item.experts}/ours/0"]
            written = known["written_nbytes"]
        command = [sys.executable, "-m", "benchmarks.plain_copy", str(source), str(output)]
        command += ["--write-bytes", str(written)]
        command += ["--threads", str(len(os.sched_getaffinity(0)))]
        return [*command, "--fsync"] if item.part == "disk" else command


def _figures(cost: Cost) -> dict[str, Any]:
    figures = asdict(cost)
    del figures["output"]
    return figures


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measure conversion against peer and floor.")
    parser.add_argument("--all", action="store_true", help="every part")
    parser.add_argument("--part", action="append", choices=PARTS, default=[], dest="parts")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="measurements; continued if the file exists")
    parser.add_argument("--markdown", action="store_true", help="print the tables for a document")
    memory = Path("/dev/shm")
    parser.add_argument("--work-dir", type=Path, default=memory if memory.is_dir() else None)
    parser.add_argument("--disk-dir", type=Path, help="for the part `disk`; default: here")
    parser.add_argument("--tiny", action="store_true", help="widths of a toy, for a try")
    parser.add_argument("--budget", type=float, default=1e9, help="stop after so many seconds")
    options = parser.parse_args(arguments)
    options.disk_dir = options.disk_dir or HERE.parent
    bench = Bench(options)
    deadline = time.monotonic() + options.budget
    whole = all([bench.part(part, deadline) for part in (PARTS if options.all else options.parts)])
    print_tables(bench.record, markdown=options.markdown)
    if not whole:
        print("stopped by --budget; the same command continues")
    return 0 if whole else 3


if __name__ == "__main__":
    sys.exit(main())
