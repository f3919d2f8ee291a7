"""Forward pass on a CPU: tokens/s of beamq and of transformers' BeamForCausalLM, same weights.

Both get the same token ids, dtype and thread count; transformers runs with `sdpa` attention and
`grouped_mm` experts. Timed are whole prefills up to FP32 logits, in alternating order, and the
median is shown. "resident" has all layers loaded, as transformers has; "streamed" is
`beamq.logits` as it is called, which opens and reads the checkpoint each time.

Seconds are of the wall clock; on a machine that others use too, `--cpu-time` counts the process's
own processor seconds instead (all its threads' together), which they disturb much less.

    python -m benchmarks.forward_cpu CHECKPOINT [--threads 2] [--rounds 7] [--cpu-time]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from transformers import BeamForCausalLM

from beamq.beam.config import BeamConfig
from beamq.io.checkpoint import open_checkpoint
from beamq.model.context import PassContext, SequenceLayout, position_table
from beamq.model.gemm.select import select_gemm
from beamq.model.layer import decoder_layer, head_logits
from beamq.model.layer_stream import LayerStream
from beamq.model.loader import LayerLoader
from beamq.model.logits import logits
from benchmarks.measuring import in_turns, median_s

SHAPES = ((8, 128), (4, 512), (1, 4096))
CPU = torch.device("cpu")


def resident(path: Path, dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    """beamq's forward pass over layers that stay in memory."""
    checkpoint = open_checkpoint(path)
    config = BeamConfig.from_dict(checkpoint.config)
    loader = LayerLoader(checkpoint, config, dtype=dtype, device=CPU)
    layers = [weights for _, weights in LayerStream(loader)]
    head, table_VK, gemm = loader.head(), loader.embedding(), select_gemm("reference")

    @torch.inference_mode()
    def run(ids_BT: torch.Tensor) -> torch.Tensor:
        layout = SequenceLayout.rectangle(*ids_BT.shape)
        table = position_table(config, layout.longest, CPU)
        context = PassContext(config=config, table=table, gemm=gemm)
        h_TK = table_VK[ids_BT.flatten()]
        for weights in layers:
            h_TK = decoder_layer(h_TK, weights, layout, context)
        return head_logits(h_TK, head, config).view(*ids_BT.shape, -1)

    return run


def theirs(path: Path, dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    """transformers' forward pass."""
    model = BeamForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation="sdpa", experts_implementation="grouped_mm"
    ).eval()

    @torch.inference_mode()
    def run(ids_BT: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = model(ids_BT, use_cache=False).logits
        return out

    return run


def main(arguments: Sequence[str] | None = None) -> None:
    """Print one line for each dtype and shape."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cpu-time", action="store_true")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    path: Path = options.checkpoint
    vocab = BeamConfig.from_dict(open_checkpoint(path).config).vocab_size
    what = "processor" if options.cpu_time else "wall-clock"
    print(
        f"torch {torch.__version__}, {options.threads} threads, tokens per {what} second,"
        f" median of {options.rounds}"
    )
    print(f"{'dtype':<9} {'B x T':>9} {'transformers':>13} {'resident':>16} {'streamed':>16}")
    for dtype in (torch.bfloat16, torch.float32):
        ways: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
            "transformers": theirs(path, dtype),
            "resident": resident(path, dtype),
            "streamed": partial(logits, path, dtype=dtype),
        }
        for batch, length in SHAPES:
            ids_BT = torch.randint(0, vocab, (batch, length))
            calls = {name: partial(way, ids_BT) for name, way in ways.items()}
            rate = {
                name: ids_BT.numel() / median_s(turns, cpu_time=options.cpu_time)
                for name, turns in in_turns(calls, options.rounds).items()
            }
            cells = [
                f"{rate[name]:>8.0f} ({rate[name] / rate['transformers']:.2f}x)"
                for name in ("resident", "streamed")
            ]
            shape = f"{batch} x {length}"
            print(
                f"{str(dtype)[6:]:<9} {shape:>9} {rate['transformers']:>13.0f} "
                + " ".join(f"{cell:>16}" for cell in cells)
            )


if __name__ == "__main__":
    main()
