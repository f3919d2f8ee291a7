"""Conversion with a GPU: each stage alone, the whole, and a one-pass calibration; projections.

    python -m benchmarks.convert_gpu /dev/shm/work                     43 GB of source: two sparse
                                                                       layers of 256, one dense
    python -m benchmarks.convert_gpu /dev/shm/work --part one-pass
    python -m benchmarks.convert_gpu /tmp/work --device cpu --tiny --experts 4      on a laptop

FOLDER should be memory-backed and gets the source (kept there with --keep) and one output at a
time. For each recipe: seconds of each stage alone (`conversion_stages.py`), then the conversion in
this process (rounds; the first, which compiles kernels, is shown on its own) and as a process of
its own. "whole/slowest" is the slowest stage's time over the whole's (goal 0.8); "whole/floor" is
the time that the cores need to read, write and sum the bytes, over the whole's.

Projections are to the full model's 1,003 GB: at the rate between first and last byte, and with
storage that gives 7 or 28 GB/s; the time before the first and after the last byte is added once.

One pass: `quantize --data` with 256 rows of 2,048 tokens of made-up words, after loading and
running a layer of each kind twice (the first time, "cold", includes page-locked memory and
compiling). The last layer is measured, from the end of the layer before it to its own end: it was
read during a pass like its own. Three sparse layers are enough for that. Projected to 3 dense and
49 sparse layers, cold start included (goal: 10 minutes at 7 GB/s).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from beamq.beam.config import BeamConfig
from beamq.convert.quantize import QuantizeResult, quantize
from beamq.convert.resources import default_workers
from beamq.io.checkpoint import open_checkpoint
from beamq.plan.plan import make_plan
from benchmarks.conversion_stages import Clock, Stages
from benchmarks.make_slice import TINY, Slice, add_tokenizer, make_slice
from benchmarks.measuring import run

FULL_NBYTES = 1_002.7e9
DENSE, SPARSE = 3, 49
STORAGE = (7e9, 28e9)
RECIPES = {"fp8": "fp8", "nvfp4-max": "nvfp4-max", "nvfp4": "nvfp4"}
PARTS = ("convert", "one-pass")
WORDS = 20_000


class Bench:
    """One source and what is measured on it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._threads = options.threads or default_workers()
        self._cuda = options.device != "cpu"
        options.folder.mkdir(parents=True, exist_ok=True)
        self._source = options.folder / "source"
        self._output = options.folder / "output"
        what = replace(
            TINY if options.tiny else Slice(),
            experts=options.experts,
            dense_layers=options.dense_layers,
            sparse_layers=options.sparse_layers,
        )
        begun = time.monotonic()
        self._nbytes = make_slice(self._source, what, reuse=True)
        print(f"source: {self._nbytes / 1e9:.2f} GB in {time.monotonic() - begun:.1f} s, "
              f"{self._threads} threads, device {options.device}", flush=True)  # fmt: skip

    def convert(self, recipe: str) -> dict[str, Any]:
        """Stages and wholes of one recipe."""
        row: dict[str, Any] = {"recipe": recipe, "threads": self._threads}
        self._warm(recipe)
        with open_checkpoint(self._source) as checkpoint:
            plan = make_plan(checkpoint, RECIPES[recipe], max_shard_bytes=self._options.shard_bytes)
            stages = Stages(
                checkpoint, plan, self._options.folder, threads=self._threads, cuda=self._cuda
            )
            row["source_gb"] = stages.read_nbytes / 1e9
            row["output_gb"] = stages.written_nbytes / 1e9
            row["stages_s"] = stages.measure()
        calibrated = {} if recipe == "fp8" else {"no_calibration": True}
        seconds: list[tuple[float, float]] = []
        for _ in range(self._options.rounds + 1):
            clock = Clock()
            result = self._quantize(recipe=RECIPES[recipe], on_progress=clock.look, **calibrated)
            seconds.append((result.seconds, clock.moving))
        row["engine"] = result.engine
        row["first_s"] = seconds[0][0]
        row["whole_s"], row["moving_s"] = sorted(seconds[1:])[(len(seconds) - 1) // 2]
        if not self._options.tiny and not self._options.no_process:
            row["process_s"] = self._process(recipe)
        self._judge(row)
        _print_conversion(row, self._cuda)
        return row

    def one_pass(self) -> dict[str, Any]:
        """`quantize --data`, layer by layer."""
        data, dense = self._data(), self._options.dense_layers
        stages = self._layer_stages(dense)
        moments: list[float] = []

        def after(done: Any) -> None:
            moments.append(time.monotonic() - begun)
            print(f"  layer {done.layer} ends at {moments[-1]:.2f} s", flush=True)

        begun = time.monotonic()
        result = self._quantize(
            recipe="nvfp4",
            data=[str(data)],
            samples=self._options.samples,
            sequence_length=self._options.sequence_length,
            on_layer=after,
        )
        steps = [after - before for before, after in pairwise(moments)]
        sparse_s = steps[-1]
        row: dict[str, Any] = {
            "engine": result.engine,
            "tokens": self._options.samples * self._options.sequence_length,
            "whole_s": result.seconds,
            "layer_ends_s": moments,
            "sparse_layer_s": sparse_s,
            "stages_s": stages,
        }
        row["start_s"] = moments[0]
        row["end_s"] = result.seconds - moments[-1]
        row["cold_s"] = sum(
            stages[name] - stages[name.removeprefix("first_")]
            for name in stages
            if name.startswith("first_")
        )
        own = max(stages["forward_dense"], stages["load_dense"])
        fixed = row["cold_s"] + row["start_s"] + row["end_s"]
        for storage in (None, *STORAGE):
            layer = [sparse_s, own]
            if storage is not None:
                sizes = self._layer_nbytes(dense)
                layer = [max(s, n / storage) for s, n in zip(layer, sizes, strict=True)]
            row[_key("model_s", storage)] = fixed + SPARSE * layer[0] + DENSE * layer[1]
        _print_pass(row)
        return row

    def remove(self) -> None:
        """What was made, and the folder if there is nothing else in it."""
        for path in (self._source, self._output):
            shutil.rmtree(path, ignore_errors=True)
        (self._options.folder / "words.txt").unlink(missing_ok=True)
        with suppress(OSError):
            self._options.folder.rmdir()

    def _quantize(self, **options: Any) -> QuantizeResult:
        shutil.rmtree(self._output, ignore_errors=True)
        try:
            return quantize(
                self._source,
                self._output,
                device=self._options.device,
                workers=self._options.workers,
                max_shard_bytes=self._options.shard_bytes,
                **options,
            )
        finally:
            if not self._options.keep:
                shutil.rmtree(self._output, ignore_errors=True)

    def _process(self, recipe: str) -> float:
        """Seconds of a conversion in a process of its own, from its start to its end."""
        shutil.rmtree(self._output, ignore_errors=True)
        command = [sys.executable, "-m", "beamq", "quantize", str(self._source), str(self._output)]
        command += ["--recipe", RECIPES[recipe], "--quiet", "--device", self._options.device]
        command += ["--max-shard-size", str(self._options.shard_bytes)]
        command += [] if recipe == "fp8" else ["--no-calibration"]
        if self._options.workers:
            command += ["--workers", str(self._options.workers)]
        try:
            return run(command).wall_s
        finally:
            shutil.rmtree(self._output, ignore_errors=True)

    def _warm(self, recipe: str) -> None:
        """Touch as much memory as an output takes: a virtual machine's may have to be fetched."""
        share = int(self._nbytes * (0.6 if recipe == "fp8" else 0.35)) // self._threads
        chunk = bytes(1 << 22)

        def touch(number: int) -> None:
            with (self._options.folder / f"warm-{number}.bin").open("wb") as stream:
                for _ in range(0, share, len(chunk)):
                    stream.write(chunk)

        with ThreadPoolExecutor(self._threads) as pool:
            list(pool.map(touch, range(self._threads)))
        for path in self._options.folder.glob("warm-*.bin"):
            path.unlink()

    def _judge(self, row: dict[str, Any]) -> None:
        stages = {name: s for name, s in row["stages_s"].items() if name != "by hand"}
        row["slowest"] = max(stages, key=lambda name: stages[name])
        row["whole_over_slowest"] = stages[row["slowest"]] / row["whole_s"]
        row["whole_over_floor"] = row["stages_s"]["by hand"] / row["whole_s"]
        rate = row["source_gb"] * 1e9 / row["moving_s"]
        fixed = row.get("process_s", row["first_s"]) - row["moving_s"]
        for storage in (None, *STORAGE):
            row[_key("model_s", storage)] = fixed + FULL_NBYTES / min(rate, storage or rate)

    def _data(self) -> Path:
        """Words enough for all tokens, and the tokenizer of the small Beam."""
        add_tokenizer(self._source)
        chance = random.Random(0)
        words = ["".join(chance.choices("etaoinshrdlucmfw", k=chance.randint(2, 9)))
                 for _ in range(WORDS)]  # fmt: skip
        count = self._options.samples * self._options.sequence_length
        lines = [" ".join(chance.choices(words, k=16)) for _ in range(count // 16 + 64)]
        path: Path = self._options.folder / "words.txt"
        path.write_text("\n".join(lines))
        return path

    def _layer_nbytes(self, dense: int) -> tuple[int, int]:
        """Source bytes of a sparse and of a dense layer."""
        with open_checkpoint(self._source) as checkpoint:

            def of(layer: int) -> int:
                prefix = f"model.layers.{layer}."
                return sum(s.nbytes for n, s in checkpoint.tensors.items() if n.startswith(prefix))

            return of(dense), of(0)

    def _layer_stages(self, dense: int) -> dict[str, float]:
        """Seconds of a dense and of a sparse layer: loading (read and upload) alone, forward alone.

        Each twice: page-locked memory is had and kernels are compiled in the first.
        """
        from beamq.calib.collector import Collector
        from beamq.calib.run import BATCH_TOKENS
        from beamq.devices import choose_device
        from beamq.model.context import PassContext, SequenceLayout, position_table
        from beamq.model.gemm.select import select_gemm
        from beamq.model.layer import decoder_layer
        from beamq.model.loader import LayerLoader
        from beamq.ranks import Ranks

        device = choose_device(self._options.device, Ranks())
        length = self._options.sequence_length
        rows = max(1, min(BATCH_TOKENS[device.type] // length, self._options.samples))
        batches = -(-self._options.samples // rows)
        found: dict[str, float] = {}
        with open_checkpoint(self._source) as checkpoint:
            config = BeamConfig.from_dict(checkpoint.config)
            loader = LayerLoader(checkpoint, config, dtype=torch.bfloat16, device=device)
            layout = SequenceLayout.rectangle(rows, length)
            table = position_table(config, length, device)
            gemm = select_gemm("auto" if device.type == "cuda" else "reference")
            h_TK = torch.randn(rows * length, config.hidden_size, device=device).bfloat16()
            collector = Collector(config, device)
            context = PassContext(config=config, table=table, gemm=gemm, observers=(collector,))

            def forward(weights: Any) -> None:
                with torch.inference_mode():
                    for _ in range(batches):
                        decoder_layer(h_TK, weights, layout, context)
                collector.take(weights.index)

            for name, index in (("dense", 0), ("sparse", dense)):
                for prefix in ("first_", ""):
                    seconds, weights = _timed(partial(loader.layer, index), device)
                    found[f"{prefix}load_{name}"] = seconds
                    seconds, _ = _timed(partial(forward, weights), device)
                    found[f"{prefix}forward_{name}"] = seconds
                    del weights
            loader.close()
        return found


def _timed(call: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    begun = time.monotonic()
    found = call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.monotonic() - begun, found


def _key(name: str, storage: float | None) -> str:
    return name if storage is None else f"{name}_at_{storage / 1e9:.0f}_gb_per_s"


def _print_conversion(row: dict[str, Any], cuda: bool) -> None:
    gb = row["source_gb"]
    stages = ", ".join(f"{n} {s:.2f} ({gb / s:.1f})" for n, s in row["stages_s"].items())
    if not cuda:
        stages += "; upload, kernels, download: not run"
    print(f"\n{row['recipe']}: {gb:.2f} GB to {row['output_gb']:.2f} GB by {row['engine']}")
    print(f"  stages alone, s (GB/s of source): {stages}")
    process = f", process {row['process_s']:.2f} s" if "process_s" in row else ""
    print(
        f"  whole {row['whole_s']:.2f} s ({gb / row['whole_s']:.1f} GB/s), of it moving data"
        f" {row['moving_s']:.2f} s, first {row['first_s']:.2f} s{process};"
        f" whole/slowest ({row['slowest']})"
        f" {row['whole_over_slowest']:.2f} (goal 0.8), whole/floor {row['whole_over_floor']:.2f}"
    )
    print(
        f"  1,003 GB: {row['model_s']:.0f} s as measured,"
        f" {row[_key('model_s', 7e9)]:.0f} s at 7 GB/s,"
        f" {row[_key('model_s', 28e9)]:.0f} s at 28 GB/s",
        flush=True,
    )


def _print_pass(row: dict[str, Any]) -> None:
    stages = ", ".join(f"{name} {s:.2f}" for name, s in row["stages_s"].items())
    print(f"\none pass, {row['tokens']:,} tokens, {row['engine']}: {row['whole_s']:.1f} s")
    print(f"  stages alone, s: {stages}")
    print(
        f"  cold {row['cold_s']:.1f} s, start {row['start_s']:.2f} s, a sparse layer"
        f" {row['sparse_layer_s']:.2f} s, end {row['end_s']:.2f} s"
    )
    print(
        f"  52 layers: {row['model_s'] / 60:.1f} min as measured,"
        f" {row[_key('model_s', 7e9)] / 60:.1f} min at 7 GB/s (goal 10),"
        f" {row[_key('model_s', 28e9)] / 60:.1f} min at 28 GB/s",
        flush=True,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--part", choices=PARTS, action="append", dest="parts")
    parser.add_argument("--recipe", choices=tuple(RECIPES), action="append", dest="recipes")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--sparse-layers", type=int, default=2)
    parser.add_argument("--dense-layers", type=int, default=1)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--sequence-length", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--shard-bytes",
        type=int,
        default=500_000_000,
        help="of the output; small, so that there are as many for each queue as of a whole model",
    )
    parser.add_argument("--threads", type=int, help="of stages; default: usable cores")
    parser.add_argument("--workers", type=int, help="of the conversion; default: usable cores")
    parser.add_argument("--no-process", action="store_true", help="only in this process")
    parser.add_argument("--tiny", action="store_true", help="widths of a toy, for a try")
    parser.add_argument("--keep", action="store_true", help="leave source and last output there")
    options = parser.parse_args(arguments)
    result: dict[str, Any] = {"cores": len(os.sched_getaffinity(0)), "torch": torch.__version__}
    if options.device != "cpu":
        from benchmarks.gpu_timing import machine

        result |= machine()
    print(json.dumps(result), flush=True)
    bench = Bench(options)
    parts = options.parts or PARTS

    def save() -> None:
        if options.json:
            options.json.write_text(json.dumps(result, indent=1))

    if "convert" in parts:
        result["conversion"] = []
        for recipe in options.recipes or RECIPES:
            result["conversion"].append(bench.convert(recipe))
            save()
    if "one-pass" in parts:
        result["one_pass"] = bench.one_pass()
        save()
    if not options.keep:
        bench.remove()


if __name__ == "__main__":
    main()
