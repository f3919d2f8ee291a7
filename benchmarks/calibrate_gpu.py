"""One layer of real width on a GPU, BF16: time with calibration's collector against without.

    python -m benchmarks.calibrate_gpu [--tokens 16384]

Prefill in sequences of 2,048 tokens, random weights, medians. Peak memory includes the layer's
weights.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from beamq.calib.collector import Collector
from beamq.model.context import PassContext, SequenceLayout, position_table
from beamq.model.gemm.select import select_gemm
from beamq.model.layer import decoder_layer
from benchmarks.gpu_timing import median_ms
from benchmarks.random_layer import REAL, random_layer, tensor_bytes

LENGTH = 2048


def measure(kind: str, mlp: str, tokens: int) -> str:
    """One line of the table."""
    cuda, gemm = torch.device("cuda"), select_gemm("auto")
    layout = SequenceLayout.rectangle(tokens // LENGTH, LENGTH)
    context = PassContext(config=REAL, table=position_table(REAL, LENGTH, cuda), gemm=gemm)
    weights = random_layer(REAL, kind, mlp, "bf16", cuda)
    h_TK = torch.randn(tokens, REAL.hidden_size, device=cuda).bfloat16()

    def layer(collector: Collector | None) -> None:
        watching = () if collector is None else (collector,)
        with torch.inference_mode():
            decoder_layer(h_TK, weights, layout, replace(context, observers=watching))
        if collector is not None:
            collector.take(0)

    cells, times = [], []
    for name, collector in (("forward", None), ("calibrating", Collector(REAL, cuda))):
        torch.cuda.reset_peak_memory_stats()
        times.append(median_ms(partial(layer, collector)))
        peak = torch.cuda.max_memory_allocated() / 1e9
        cells.append(f"{name} {times[-1]:.2f} ms ({peak:.1f} GB)")
    return (
        f"{kind} {mlp}: {', '.join(cells)}: {times[1] / times[0]:.3f}x;"
        f" weights {tensor_bytes(weights) / 1e9:.1f} GB"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Print one line for each kind of layer."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=16_384)
    tokens = parser.parse_args(arguments).tokens
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, {tokens} tokens")
    for kind, mlp in (("sliding", "sparse"), ("full", "sparse"), ("sliding", "dense")):
        print(measure(kind, mlp, tokens), flush=True)


if __name__ == "__main__":
    main()
