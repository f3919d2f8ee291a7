"""One layer of real width on a GPU: time, tokens/s, TFLOP/s and peak memory, by format and GEMM.

    python -m benchmarks.forward_gpu [--json FILE] [--tokens 16 2048 16384] [--transformers]

Prefill of one sequence. Weights are random, and so are the routes of tokens, evenly spread. With
--transformers its own layer (BF16, sdpa, grouped_mm experts) runs on the same input, if a
transformers with Beam (5.20.1 or later) is installed. Differences from our exact emulation
(`reference`) are relative to the layer's change to the stream.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from beamq.model.context import PassContext, SequenceLayout, position_table
from beamq.model.gemm.select import select_gemm
from beamq.model.layer import LayerWeights, decoder_layer
from benchmarks.gpu_timing import bf16_tflops, copy_tb_per_s, machine, median_ms
from benchmarks.random_layer import REAL, random_layer, tensor_bytes

GEMMS = {
    "bf16": ("auto", "cutlass"),
    "fp8": ("auto", "auto+fast", "cutlass", "cutlass+fast"),
    "nvfp4": ("auto",),
}
LAYERS = (("sliding", "sparse"), ("full", "sparse"), ("sliding", "dense"))


def flop(kind: str, mlp: str, tokens: int) -> float:
    """Multiply-adds, counted as two, of the layer's GEMMs and attention."""
    c = REAL
    linear = c.hidden_size * (3 * c.q_dim + 2 * c.kv_dim)
    width = c.intermediate_size if mlp == "dense" else c.top_k * c.moe_intermediate_size
    window = c.sliding_window if kind == "sliding" else None
    keys = min(window or tokens, tokens / 2)
    return 2.0 * tokens * (linear + 3 * width * c.hidden_size + 2 * keys * c.q_dim)


class Bench:
    """One layer's weights, run with several GEMMs and lengths."""

    def __init__(self, kind: str, mlp: str, fmt: str) -> None:
        self.names = {"attention": kind, "mlp": mlp, "format": fmt}
        self.weights: LayerWeights = random_layer(REAL, kind, mlp, fmt, torch.device("cuda"))
        self.nbytes = tensor_bytes(self.weights)
        self.table = position_table(REAL, 16384, torch.device("cuda"))

    def run(self, h_TK: torch.Tensor, gemm: str) -> torch.Tensor:
        """The layer's output."""
        layout = SequenceLayout(lengths=(h_TK.shape[0],))
        with torch.inference_mode():
            context = PassContext(config=REAL, table=self.table, gemm=select_gemm(gemm))
            return decoder_layer(h_TK, self.weights, layout, context)

    def measure(self, tokens: int, gemm: str) -> dict[str, Any]:
        """A row of the table."""
        torch.manual_seed(1)
        h_TK = torch.randn(tokens, REAL.hidden_size, device="cuda").bfloat16()
        self.run(h_TK, gemm)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self.run(h_TK, gemm)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated()
        ms = median_ms(lambda: self.run(h_TK, gemm), 150)
        work = flop(self.names["attention"], self.names["mlp"], tokens)
        row = {
            **self.names,
            "gemm": gemm,
            "tokens": tokens,
            "ms": ms,
            "tokens_per_s": tokens / ms * 1e3,
            "tflops": work / ms / 1e9,
            "peak_gb": peak / 1e9,
            "layer_gb": self.nbytes / 1e9,
        }
        print(
            f"{self.names['attention']:8} {self.names['mlp']:6} {self.names['format']:6} {gemm:12}"
            f" T={tokens:6} {ms:8.2f} ms {tokens / ms * 1e3:11,.0f} tok/s"
            f" {work / ms / 1e9:6.0f} TFLOP/s  peak {peak / 1e9:5.2f} GB of layer"
            f" {self.nbytes / 1e9:5.2f} GB",
            flush=True,
        )
        return row

    def difference(self, gemm: str, tokens: int = 1024) -> dict[str, float]:
        """From the emulation, relative to what the layer adds to the stream, token by token.

        A token whose router is near a tie may be sent elsewhere by a difference in the last bit;
        the median is not about those, `moved` is their share.
        """
        torch.manual_seed(2)
        h_TK = torch.randn(tokens, REAL.hidden_size, device="cuda").bfloat16()
        ours, exact = self.run(h_TK, gemm).float(), self.run(h_TK, "reference").float()
        h = h_TK.float()
        change = exact - h * float((h * exact).sum() / h.pow(2).sum())
        each = (ours - exact).norm(dim=1) / change.norm(dim=1)
        median = float(each.median())
        return {"median": median, "moved": float((each > max(10 * median, 1e-2)).float().mean())}


def transformers_ms(
    kind: str, tokens: Sequence[int], *, device: str = "cuda", **widths: int
) -> list[dict[str, Any]]:
    """transformers' own sparse layer, BF16. Empty, and said so, where it has no Beam."""
    try:
        from transformers.models.beam.configuration_beam import BeamConfig as HfConfig
        from transformers.models.beam.modeling_beam import BeamModel
    except ImportError as error:
        print(f"transformers' layer left out: {error}")
        return []
    config = HfConfig(
        vocab_size=128,
        num_hidden_layers=1,
        layer_types=[f"{kind}_attention"],
        mlp_layer_types=["sparse"],
        sliding_window=REAL.sliding_window,
        **widths,
    )
    config._attn_implementation = "sdpa"
    config._experts_implementation = "grouped_mm"
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = BeamModel(config).eval()  # one layer, and a final norm that weighs nothing
    torch.set_default_dtype(torch.float32)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "mlp.gate." in name:
            tensor.data = torch.randn(tensor.shape, device=device) * 0.02
    rows = []
    for count in tokens:
        x = torch.randn(1, count, config.hidden_size, device=device, dtype=torch.bfloat16)
        rows.append({"attention": kind, "mlp": "sparse", "tokens": count, **_theirs(model, x)})
        print(f"{kind:8} sparse transformers T={count:6} {rows[-1]}", flush=True)
    return rows


def _theirs(model: Any, x_1TK: torch.Tensor) -> dict[str, float]:
    def call() -> Any:
        with torch.inference_mode():
            return model(inputs_embeds=x_1TK, use_cache=False)

    call()
    if x_1TK.device.type != "cuda":
        return {}
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() / 1e9
    return {"ms": median_ms(call, 150), "peak_gb": peak}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tokens", type=int, nargs="+", default=[16, 2048, 16384])
    parser.add_argument("--transformers", action="store_true")
    options = parser.parse_args(arguments)
    result: dict[str, Any] = {
        **machine(),
        "copy_tb_per_s": copy_tb_per_s(),
        "bf16_tflops": bf16_tflops(),
        "layers": [],
        "differences": [],
        "transformers": [],
    }
    print(f"copy {result['copy_tb_per_s']:.2f} TB/s, BF16 {result['bf16_tflops']:.0f} TFLOP/s")
    for fmt, gemms in GEMMS.items():
        for kind, mlp in LAYERS:
            torch.cuda.empty_cache()
            bench = Bench(kind, mlp, fmt)
            for gemm in gemms:
                rows = [bench.measure(tokens, gemm) for tokens in options.tokens]
                result["layers"] += rows
                if mlp == "sparse" and kind == "sliding":
                    entry = {"format": fmt, "gemm": gemm, **bench.difference(gemm)}
                    result["differences"].append(entry)
                    print(f"   difference from reference: {entry}", flush=True)
            del bench
            if options.json:
                options.json.write_text(json.dumps(result, indent=1))
    if options.transformers:
        for kind in ("sliding", "full"):
            torch.cuda.empty_cache()
            result["transformers"] += transformers_ms(kind, options.tokens[1:])
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
