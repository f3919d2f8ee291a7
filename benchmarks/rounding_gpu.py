"""What better weights cost on one GPU: the sweep kernel against `max`, GPTQ by stage.

    python -m benchmarks.rounding_gpu [--json FILE] [--experts 24] [--rows-per-input 16]

Sweep: one expert projection of Beam, BF16 [16, 2560, 5120], time of `gpu.nvfp4_quantize` with the
sweep over that with `max` (goal: at most 8).

GPTQ: some experts of real width in a layer of 256, rounded as in a calibration. Batches of 16,384
synthetic tokens, each read by 8 experts, follow until every expert has `--rows-per-input` times as
many rows as inputs (16 x 5,120); a few batches serve again and again. A layer's time is that of all
that `ExpertRounding` does, codes on the host included. Its stages are measured one by one before:
second moments (rows gathered, `down`'s inputs computed anew, quantized as served, products summed),
the factor, and the rounding, which is a GEMM between blocks (`feedback`) and the blocks themselves.
Times are scaled to 256 experts and 49 layers. They leave out reading, the forward pass itself and
writing (goal: at most 30 minutes on top of those).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from beamq.beam.config import BeamConfig
from beamq.calib.expert_rounding import (
    GROUPS,
    ExpertMoments,
    ExpertRounding,
    RoundingRequest,
    chunks,
    weight_of,
)
from beamq.formats import gptq
from beamq.formats.kernels import gpu
from beamq.formats.nvfp4 import global_scale_from_amax
from beamq.model.expert_parallel import ExpertExchange
from beamq.model.forward import LayerExperts
from beamq.model.gemm.backend import DenseWeight
from beamq.model.gemm.reference import ReferenceGemm
from beamq.model.moe import Dispatch, ExpertSlice
from benchmarks.gpu_timing import machine, median_ms, seconds
from benchmarks.random_layer import REAL

LAYERS = 49
SWEPT_SHAPE = (16, 2560, 5120)
BATCH_TOKENS = 16_384
BATCHES_HELD = 4
AMAX = 6.0  # of the inputs; their input_scale follows


def sweep() -> dict[str, float]:
    """Milliseconds of both kernels on the same weights."""
    w = torch.randn(SWEPT_SHAPE, device="cuda", dtype=torch.bfloat16) * 0.02
    scale = global_scale_from_amax(w.abs().amax())
    by_max = median_ms(lambda: gpu.nvfp4_quantize(w, scale))
    swept = median_ms(lambda: gpu.nvfp4_quantize(w, scale, scale_rule="sweep"))
    return {"max_ms": by_max, "sweep_ms": swept, "ratio": swept / by_max}


def synthetic_layer(config: BeamConfig, experts: int, per_input: int) -> LayerExperts:
    """`experts` of the layer's, and as many batches as give each of them its rows."""
    device, hidden, wide = torch.device("cuda"), config.hidden_size, config.moe_intermediate_size
    each = BATCH_TOKENS * config.top_k // config.num_experts
    batches = max(1, per_input * hidden // each)
    h = torch.randn(BATCHES_HELD, BATCH_TOKENS, hidden, device=device, dtype=torch.bfloat16)
    norm = torch.ones(hidden, device=device, dtype=torch.bfloat16)
    rows = [torch.randint(BATCH_TOKENS, (each,), device=device) for _ in range(experts)]
    plan = Dispatch(
        token_S=torch.cat([some.sort()[0] for some in rows]),
        weight_S=torch.empty(0),
        row_Tk=torch.empty(0),
        offsets=tuple(each * place for place in range(experts + 1)),
    )

    def inputs() -> Iterator[tuple[torch.Tensor, Dispatch]]:
        for number in range(batches):
            yield F.rms_norm(h[number % BATCHES_HELD], norm.shape, norm, 1e-6), plan

    def weight(n: int, k: int) -> DenseWeight:
        w_ENK = torch.randn(experts, n, k, device=device, dtype=torch.bfloat16)
        return DenseWeight(w_NK=w_ENK.mul_(k**-0.5))

    part = ExpertSlice(
        first=0, count=experts, gate_up=weight(2 * wide, hidden), down=weight(hidden, wide)
    )
    return LayerExperts(
        layer=0,
        parts=lambda: [part],
        inputs=inputs,
        held_out=lambda: iter(()),
        rows_E=(each * batches,) * experts,
        held_out_texts=0,
        exchange=ExpertExchange(config),
        device=device,
    )


def stages(seen: LayerExperts, config: BeamConfig) -> dict[str, dict[str, float]]:
    """Seconds by group and stage, for the experts at hand."""
    (part,) = seen.parts()
    moments = ExpertMoments(seen, full=True, gemm=ReferenceGemm(), check=lambda: None)
    widths = {"gate_up": config.hidden_size, "down_proj": config.moe_intermediate_size}
    found: dict[str, dict[str, float]] = {}
    for group in GROUPS:
        every = list(range(part.count))
        moments.prepare(group, AMAX / 2688, widths[group], set(every))
        times = found[group] = dict.fromkeys(("moments", "factor", "rounding", "feedback"), 0.0)
        for experts in chunks(every, weight_of(part, group), full=True):
            spent, own = seconds(partial(moments.of, group, part, experts))
            times["moments"] += spent
            spent, factor = seconds(partial(gptq.factorize, own))
            times["factor"] += spent
            del own
            w = weight_of(part, group)[experts]
            scale = global_scale_from_amax(w.abs().amax((1, 2)).float())
            rounder = gptq.block_rounder
            for stage, kernel in (("rounding", rounder), ("feedback", lambda _: lambda *_: None)):
                gptq.block_rounder = kernel
                spent, _ = seconds(partial(gptq.round_experts, w, factor, scale))
                times[stage] += spent
            gptq.block_rounder = rounder
            del factor, w
    return found


def rounding_s(seen: LayerExperts, config: BeamConfig) -> float:
    """Seconds of all that `ExpertRounding` does with a layer, without writing."""
    every = {(expert, group) for expert in range(len(seen.rows_E)) for group in GROUPS}
    request = RoundingRequest(
        wanted={0: every},
        method="gptq",
        headroom=2,
        write=lambda layer, group, rounded: None,
        stopped=lambda: False,
    )
    rounding = ExpertRounding(request, config, ReferenceGemm(), lambda layer, group: AMAX)
    return seconds(lambda: rounding.run(seen))[0]


def measured(experts: int, per_input: int) -> dict[str, Any]:
    """All of GPTQ, and what a whole model would take."""
    rounding_s(synthetic_layer(REAL, 1, 1), REAL)  # libraries are loaded and kernels compiled now
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    seen = synthetic_layer(REAL, experts, per_input)
    held = torch.cuda.memory_allocated()
    by_stage = stages(seen, REAL)
    whole = rounding_s(seen, REAL) * REAL.num_experts / experts
    scale = REAL.num_experts / experts
    names = next(iter(by_stage.values()))
    return {
        "experts": experts,
        "rows_per_input": per_input,
        "stages": by_stage,
        "layer_stages_s": {
            name: scale * sum(group[name] for group in by_stage.values()) for name in names
        },
        "layer_s": whole,
        "model_minutes": whole * LAYERS / 60,
        "peak_beside_weights_and_states_gb": (torch.cuda.max_memory_allocated() - held) / 1e9,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--experts", type=int, default=24)
    parser.add_argument("--rows-per-input", type=int, default=16)
    parser.add_argument("--no-sweep", action="store_true", help="GPTQ alone")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    found: dict[str, Any] = machine()
    if not options.no_sweep:
        found["sweep"] = sweep()
        print(found["sweep"], flush=True)
    with torch.inference_mode():
        found["gptq"] = measured(options.experts, options.rows_per_input)
    print(json.dumps(found["gptq"], indent=1), flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
