"""The moments by which experts are rounded: those of what transformers' experts will be served."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from beamq.beam.config import BeamConfig
from beamq.calib import expert_rounding
from beamq.calib.expert_rounding import (
    GROUPS,
    ExpertRounding,
    Group,
    RoundedGroup,
    RoundingRequest,
)
from beamq.formats.nvfp4 import dequantize, quantize
from beamq.io.checkpoint import Checkpoint, open_checkpoint
from beamq.model.context import SequenceLayout
from beamq.model.forward import Batch, LayerPass
from beamq.model.gemm.select import select_gemm
from beamq.model.layer_stream import LayerStream
from beamq.model.loader import LayerLoader
from beamq.model.logits import embed
from tests.helpers.independent_decoder import E2M1, E4M3
from tests.helpers.model_fixtures import hf_model, random_beam, token_ids

LAYER, ROWS, LENGTH = 1, 3, 33
FP32 = torch.float32


def nearest(x: NDArray[np.float32], grid: NDArray[np.float32]) -> NDArray[np.int64]:
    """Index of the nearest value of an ascending grid."""
    found: NDArray[np.int64] = np.abs(x[..., None] - grid).argmin(-1)
    return found


def served(x_TK: NDArray[np.float32], scale: np.float32) -> NDArray[np.float32]:
    """Activations as FP4 engines see them, in units of `scale`, by the definition of NVFP4."""
    blocks = (x_TK / scale).reshape(len(x_TK), x_TK.shape[1] // 16, 16)
    block_scale = E4M3[nearest(np.abs(blocks).max(-1) / 6, E4M3[:127])][..., None]
    divisor = np.where(block_scale > 0, block_scale, 1)
    values = E2M1[nearest(np.abs(blocks / divisor), E2M1)] * np.sign(blocks)
    return (values * block_scale).reshape(x_TK.shape).astype(np.float32)


class Inputs:
    """What a layer's experts read in transformers: `gate_up` all tokens; both by expert."""

    def __init__(self, path: Path, ids_BT: torch.Tensor, experts: int, headroom: int) -> None:
        self.headroom = np.float32(headroom)
        model = hf_model(path, FP32, experts_implementation="eager")
        module = model.model.layers[LAYER].mlp.experts
        seen: list[torch.Tensor] = []
        module.register_forward_pre_hook(lambda _, args: seen.extend(args[:2]))
        with torch.no_grad():
            model(ids_BT, use_cache=False)
            x_TK, chosen_Tk = seen
            self.tokens = x_TK.numpy()
            mine = [x_TK[(chosen_Tk == expert).any(1)] for expert in range(experts)]
            both = zip(mine, module.gate_up_proj, strict=True)
            down = [module._apply_gate(rows @ weight.t()).numpy() for rows, weight in both]
        self.by_expert = {"gate_up": [rows.numpy() for rows in mine], "down_proj": down}

    def amax(self, group: str) -> np.float32:
        return np.float32(max(np.abs(rows).max() for rows in self.by_expert[group] if rows.size))

    def moments(self, group: str) -> NDArray[np.float64]:
        """[E, K, K] means, those of an expert with few rows drawn to those of the layer."""
        scale = self.headroom * self.amax(group) / np.float32(2688)
        experts = [served(rows, scale).astype(np.float64) for rows in self.by_expert[group]]
        pool = np.concatenate(experts)
        if group == "gate_up":
            pool = served(self.tokens, scale).astype(np.float64)
        layer, found = pool.T @ pool / len(pool), []
        for rows in experts:
            share = min(1.0, len(rows) / rows.shape[1])
            own = rows.T @ rows / max(len(rows), 1)
            found.append(share * own + (1 - share) * layer)
        return np.stack(found)


def round_layer(
    checkpoint: Checkpoint,
    theirs: Inputs,
    texts: Sequence[tuple[torch.Tensor, int | None]],
    *,
    method: str = "gptq",
) -> dict[Group, RoundedGroup]:
    """Round `LAYER` by the rows of `texts`, each with the number of a held-out text or None."""
    config, written = BeamConfig.from_dict(checkpoint.config), dict[Group, RoundedGroup]()
    request = RoundingRequest(
        wanted={LAYER: {(e, g) for e in range(config.num_experts) for g in GROUPS}},
        method=method,
        headroom=theirs.headroom,
        write=lambda _, group, rounded: written.update({group: rounded}),
        stopped=lambda: False,
    )
    gemm = select_gemm("reference")
    hook = ExpertRounding(request, config, gemm, lambda _, group: float(theirs.amax(group)))
    loader = LayerLoader(checkpoint, config, dtype=FP32, device=torch.device("cpu"))
    batches = [
        Batch(h_TK=state, layout=SequenceLayout.rectangle(*ids.shape), held_out=number)
        for ids, number in texts
        for state in embed(loader, [ids.flatten()])
    ]
    LayerPass(LayerStream(loader), batches, gemm=gemm, hook=hook).run()
    return written


def decoded(rounded: RoundedGroup) -> NDArray[np.float64]:
    """[N, K], by the definition of NVFP4."""
    codes = rounded.codes.numpy()
    nibbles = np.stack([codes & 15, codes >> 4], axis=-1).reshape(len(codes), -1)
    values = E2M1[nibbles & 7] * np.where(nibbles & 8, -1, 1)
    scales = E4M3[rounded.block_scale.numpy()].repeat(16, axis=1)
    return np.asarray(values * scales * rounded.global_scale, dtype=np.float64)


def test_the_sweep_stays_where_gptq_is_worse_on_held_out_texts(tmp_path: Path) -> None:
    """Of each expert's weights, by the second moments of transformers' own inputs."""
    path = random_beam(tmp_path, sliding_window=64)
    checkpoint = open_checkpoint(path)
    experts = BeamConfig.from_dict(checkpoint.config).num_experts
    ids, others = token_ids(ROWS, LENGTH, 96), [token_ids(1, LENGTH, 96, seed=s) for s in (5, 6)]
    theirs = Inputs(path, ids, experts, 1)
    held_out = [Inputs(path, each, experts, 1) for each in others]
    alone = round_layer(checkpoint, theirs, [(ids, None)])
    assert not any(rounded.swept for rounded in alone.values())
    guarded = round_layer(checkpoint, theirs, [(others[0], 0), (ids, None), (others[1], 1)])

    names = {"gate_up": "gate_up_proj", "down_proj": "down_proj"}
    module = hf_model(path, FP32, experts_implementation="eager").model.layers[LAYER].mlp.experts
    swept = 0
    for (expert, group), rounded in guarded.items():
        gptq = alone[expert, group]
        w_NK = getattr(module, names[group])[expert].detach()
        sweep = quantize(w_NK, gptq.global_scale, scale_rule="sweep")
        candidates = decoded(gptq), dequantize(sweep, FP32).double().numpy()
        scale, losses = theirs.amax(group) / np.float32(2688), []
        for text in held_out:
            x = served(text.by_expert[group][expert], scale).astype(np.float64)
            errors = (each - w_NK.double().numpy() for each in candidates)
            losses.append([np.trace(error @ (x.T @ x) @ error.T) for error in errors])
        ratios = [ours / its for ours, its in losses if its]
        if ratios and abs(np.mean(ratios) - 1) < 1e-3:
            continue  # an activation on the edge between two codes may decide
        worse = bool(ratios) and np.mean(ratios) > 1
        assert rounded.swept == worse, (expert, group, losses)
        assert torch.equal(rounded.codes, sweep.codes if worse else gptq.codes)
        swept += worse
    assert 0 < swept < len(guarded)


@pytest.mark.parametrize(
    ("full", "headroom"), [(True, 1), (True, 64), (False, 2)], ids=["gptq", "wide", "second-moment"]
)
def test_moments_are_those_of_the_inputs_as_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: bool, headroom: int
) -> None:
    """Some experts have more rows than `down` has inputs, the others are drawn to the layer."""
    path = random_beam(tmp_path, sliding_window=64)
    ids = token_ids(ROWS, LENGTH, 96)
    checkpoint = open_checkpoint(path)
    config = BeamConfig.from_dict(checkpoint.config)
    theirs = Inputs(path, ids, config.num_experts, headroom)
    few = [len(rows) < config.moe_intermediate_size for rows in theirs.by_expert["down_proj"]]
    assert any(few)
    assert not all(few)

    found: list[torch.Tensor] = []
    genuine = expert_rounding.ExpertMoments.of

    def of(self: expert_rounding.ExpertMoments, *arguments: object) -> torch.Tensor:
        found.append(genuine(self, *arguments))  # type: ignore[arg-type]
        return found[-1].clone()

    monkeypatch.setattr(expert_rounding.ExpertMoments, "of", of)
    round_layer(checkpoint, theirs, [(ids, None)], method="gptq" if full else "second-moment")

    assert len(found) == 2
    for group, ours in zip(expert_rounding.GROUPS, found, strict=True):
        wanted = theirs.moments(group)
        if not full:
            wanted = np.einsum("ekk->ek", wanted)
        # An activation on the edge between two codes may fall on either side; rounding itself
        # is worth ten times as much.
        error = np.linalg.norm(ours.numpy() - wanted) / np.linalg.norm(wanted)
        assert error < 5e-4, f"{group}: {error:.1e}"
