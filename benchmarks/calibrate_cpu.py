"""Calibration on a CPU: its time against the bare forward pass, and that its memory stays flat.

    time      a whole `CalibrationPass` (collecting, looking for bad tokens, saving its state) and
              the same layers over the same tokens without any of it, in turns; medians
    memory    peak of a calibration above what was there before it, in processes of their own: a
              synthetic Beam of 8 and of 32 layers; then of 16, 64 and 256 experts, with and
              without --max-device-memory

    python -m benchmarks.calibrate_cpu [CHECKPOINT] [--threads 2] [--rounds 5] [--cpu-time]

CHECKPOINT is a small Beam with a tokenizer for the times (default: examples/beam-nano).
`--cpu-time` counts processor seconds, for machines that others use too.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.make_slice import Slice, add_tokenizer, make_slice
from benchmarks.measuring import ROOT, in_turns, median_s, run

NANO = ROOT / "examples" / "beam-nano"
TOKENS = (16, 512)
MEMORY_TOKENS = (16, 256)
BUDGET = 640_000_000
WIDTHS = Slice(hidden=512, dense_width=1024, expert_width=512, heads=8, kv_heads=2, head_dim=64)
CASES: list[tuple[int, int, int | None]] = [
    *[(8, 16, None), (32, 16, None)],
    *[(3, experts, None) for experts in (64, 256)],
    *[(3, experts, BUDGET) for experts in (16, 64, 256)],
]
"""Layers, experts, and --max-device-memory."""


def time_pass(path: Path, dtype: str, rounds: int, *, cpu_time: bool) -> None:
    """Print the medians and their ratio."""
    import torch

    from beamq.beam.config import BeamConfig
    from beamq.calib.options import CalibrationOptions
    from beamq.calib.run import CalibrationPass, CalibrationSetup, batch_rows
    from beamq.calib.state import RunState
    from beamq.io.checkpoint import open_checkpoint
    from beamq.model.context import SequenceLayout
    from beamq.model.forward import Batch, LayerPass
    from beamq.model.gemm.select import select_gemm
    from beamq.model.layer_stream import LayerStream
    from beamq.model.loader import LayerLoader
    from beamq.ranks import Ranks

    samples, length = TOKENS
    options = CalibrationOptions(samples=samples, sequence_length=length, dtype=dtype, device="cpu")
    with open_checkpoint(path) as checkpoint, tempfile.TemporaryDirectory() as folder:
        config = BeamConfig.from_dict(checkpoint.config)
        setup = CalibrationSetup(checkpoint, options, Ranks())
        ids = torch.from_numpy(setup.data.input_ids)

        def forward() -> None:
            loader = LayerLoader(
                checkpoint, config, dtype=getattr(torch, dtype), device=setup.device
            )
            table = loader.embedding()
            batches = [
                Batch(
                    h_TK=table[ids[rows].flatten()],
                    layout=SequenceLayout.rectangle(rows.stop - rows.start, length),
                )
                for rows in batch_rows(setup.device, samples, length)
            ]
            LayerPass(LayerStream(loader), batches, gemm=select_gemm("reference")).run()
            loader.close()

        def calibration() -> None:
            state = RunState(Path(folder) / "state", {"run": "benchmark"})
            state.begin(resume=False)
            CalibrationPass(setup, state).run()
            state.remove()

        found = in_turns({"forward": forward, "calibration": calibration}, rounds)
        bare, whole = (median_s(turns, cpu_time=cpu_time) for turns in found.values())
    print(f"{dtype:<9} forward {bare:6.2f} s, calibration {whole:6.2f} s: {whole / bare:.3f}x")


def memory_of(path: Path, budget: int | None) -> None:
    """Print the peak of a calibration above what was there before it, in bytes; and the plan's."""
    from beamq.calib.options import CalibrationOptions
    from beamq.calib.run import CalibrationPass, CalibrationSetup
    from beamq.calib.state import RunState
    from beamq.io.checkpoint import open_checkpoint
    from beamq.ranks import Ranks

    samples, length = MEMORY_TOKENS
    options = CalibrationOptions(
        samples=samples, sequence_length=length, device="cpu", max_device_memory=budget
    )
    with open_checkpoint(path) as checkpoint, tempfile.TemporaryDirectory() as folder:
        setup = CalibrationSetup(checkpoint, options, Ranks())
        before = _status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
        state = RunState(Path(folder), {})
        state.begin(resume=False)
        CalibrationPass(setup, state).run()
        print(_status("VmHWM") - before, setup.plan.host_nbytes, setup.plan.slice_experts)


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}")


def memory_table(threads: int) -> None:
    """One line for each synthetic model."""
    print("\nmemory of a calibration: 4,096 tokens, hidden 512, experts of 512")
    print(f"{'layers':>6} {'experts':>7} {'limit':>8} {'slice':>6} {'peak':>9} {'predicted':>10}")
    for layers, experts, budget in CASES:
        with tempfile.TemporaryDirectory(prefix="beamq-benchmark-") as folder:
            path = Path(folder) / "slice"
            make_slice(path, replace(WIDTHS, experts=experts, sparse_layers=layers - 1))
            add_tokenizer(path)
            command = [sys.executable, "-m", "benchmarks.calibrate_cpu", str(path), "--memory"]
            command += ["--threads", str(threads)]
            if budget is not None:
                command += ["--limit", str(budget)]
            peak, predicted, slices = run(command).output.split()[-3:]
        limit = "none" if budget is None else f"{budget / 1e6:.0f} MB"
        print(
            f"{layers:>6} {experts:>7} {limit:>8} {slices:>6} {int(peak) / 1e6:>6.0f} MB"
            f" {int(predicted) / 1e6:>7.0f} MB"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Both tables, or one measurement where a parent asks for it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkpoint", type=Path, nargs="?", default=NANO)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--memory", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.memory:
        import torch

        torch.set_num_threads(options.threads)
        memory_of(options.checkpoint, options.limit)
        return
    print(f"{options.checkpoint.name}, {TOKENS[0]} x {TOKENS[1]} tokens, {options.threads} threads")
    import torch

    torch.set_num_threads(options.threads)
    for dtype in ("bfloat16", "float32"):
        time_pass(options.checkpoint, dtype, options.rounds, cpu_time=options.cpu_time)
    memory_table(options.threads)


if __name__ == "__main__":
    main()
