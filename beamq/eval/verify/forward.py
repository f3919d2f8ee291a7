"""VERIFY, level forward: do the checkpoint and its source predict the same for a text?

In: both, opened, and the checkpoint's beamq.json. Out: findings under `forward.*`.

The one idea: checks of bytes cannot detect a file that is complete and wrong (experts in each
other's place, scales transposed, a shard of another conversion). Two models that run side by side
can. The linears, hidden states and router choices of each layer are compared, so a fault is named
by the first layer where the models part. The limits are the recipe's `bounds`.

The text is 2,048 tokens of the default evaluation text. That gives a mean KLD within about 5%, and
the limits are 2.5 times the expected value. All weights of both models are read once more.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from numpy import int64
from numpy.typing import NDArray

from beamq.beam.config import BeamConfig
from beamq.calib.data import load_text
from beamq.devices import choose_device
from beamq.errors import BeamqError
from beamq.eval.compare.findings import Findings, Limits, breaches, limits_for, parting_layer
from beamq.eval.compare.footprint import stored_formats
from beamq.eval.compare.side_by_side import StreamOptions, run_side_by_side
from beamq.eval.verify.checks import CHECKS, Ledger
from beamq.io.checkpoint import Checkpoint
from beamq.io.manifest import Manifest
from beamq.model.gemm.select import select_gemm
from beamq.ranks import Ranks, current_ranks

SAMPLES, SEQUENCE_LENGTH = 8, 256
_CHECK_OF = {
    "finite": "forward.runs",
    "mean_kld": "forward.kld",
    "same_top": "forward.top",
    "router_overlap": "forward.router",
    "weight_error": "forward.weights",
    "unquantized": "forward.unquantized",
}


def check_forward(
    opened: Checkpoint,
    source: Checkpoint,
    manifest: Manifest | None,
    ledger: Ledger,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Run both models and record what is out of bounds, under torchrun the same on every rank.

    Experts are split over the ranks, which must all call this; the process group stays up. Raises
    `CalibrationError` where the source has no tokenizer to read the text with, and
    `EnvironmentFault` where another rank is lost, which is no finding about the checkpoint.
    """
    ranks = current_ranks()
    with ranks.agreeing():
        ids_BT, options = _set_up(source, ranks)
    try:
        (findings,) = run_side_by_side(
            source, [opened], ids_BT, options, ranks=ranks, progress=progress
        )
    except BeamqError as fault:
        if ranks.broken:
            raise
        ledger.fault("forward.runs", opened.label, str(fault))
        names = [name for name, check in CHECKS.items() if check.level == "forward"]
        ledger.skip("the model does not run; see forward.runs", *names)
        return
    _record(findings, limits_for(manifest, stored_formats(opened)), ledger)


def _set_up(source: Checkpoint, ranks: Ranks) -> tuple[NDArray[int64], StreamOptions]:
    """The text's token ids, and how to run on this machine."""
    config = BeamConfig.from_dict(source.config)
    length = min(SEQUENCE_LENGTH, config.max_position_embeddings)
    data = load_text(
        (), source, samples=SAMPLES, sequence_length=length, seed=0, split="evaluation"
    )
    device = choose_device("auto", ranks)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    options = StreamOptions(dtype=dtype, device=device, gemm=select_gemm("reference"))
    return data.input_ids, options


def _record(findings: Findings, limits: Limits, ledger: Ledger) -> None:
    for name, text in _passes(findings, limits).items():
        ledger.measured(name, text)
    if limits.recipe is None:
        unbounded = ("forward.kld", "forward.top", "forward.router", "forward.weights")
        ledger.skip("nothing is quantized, so no recipe's bounds apply", *unbounded)
    broken = breaches(findings, limits.bounds)
    first = parting_layer(findings, broken)
    for breach in broken:
        layer = breach.layer if first is None else first
        where = "the model" if layer is None else f"layer {layer}"
        ledger.fault(_CHECK_OF[breach.measure], where, breach.text)


def _passes(findings: Findings, limits: Limits) -> dict[str, str]:
    """What each check says where nothing is out of bounds."""
    seen, bounds, floor = findings.divergence, limits.bounds, findings.activations_only_kld
    overlaps = [each.expert_overlap.value for each in findings.layers if each.expert_overlap]
    worst = max((each.relative_rms for each in findings.linears), default=0.0)
    router = f"{min(overlaps):.1%} at the worst" if overlaps else "no routers"
    alone = "" if floor is None else f", {floor.value:.4f} by activations alone"
    return {
        "forward.runs": f"finite logits for {seen.tokens:,} tokens",
        "forward.kld": f"{seen.mean_kld.value:.4f} nats{alone}; at most {_limit(bounds.mean_kld)}",
        "forward.top": f"{seen.same_top.value:.1%}; at least {_limit(bounds.same_top)}",
        "forward.router": f"{router}; at least {_limit(bounds.router_overlap)}",
        "forward.weights": f"{worst:.4f} at the worst; at most {_limit(bounds.weight_error)}",
        "forward.unquantized": "all as in the source",
    }


def _limit(limit: float | None) -> str:
    return "anything" if limit is None else f"{limit:g}"
