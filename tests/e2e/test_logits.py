"""`logits` against transformers' BeamForCausalLM: lengths, padding, odd schedules, all formats."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from transformers import CompressedTensorsConfig

import beamq
from beamq.beam.config import BeamConfig
from beamq.beam.tensors import QUANTIZABLE, Role
from beamq.errors import DeviceError, UsageError
from beamq.formats import fp8
from beamq.io.checkpoint import open_checkpoint
from beamq.model.context import Observer, PassContext, SequenceLayout, position_table
from beamq.model.gemm.select import select_gemm
from beamq.model.layer import decoder_layer
from beamq.model.layer_stream import LayerStream
from beamq.model.loader import LayerLoader
from beamq.model.logits import embed, logits
from tests.helpers.model_fixtures import (
    DENSE,
    FULL,
    SLIDING,
    SPARSE,
    hf_logits,
    hf_model,
    quantized_copy,
    random_beam,
    text_ids,
    token_ids,
)

FP32, BF16 = torch.float32, torch.bfloat16
TOLERANCE = 1e-5


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Largest difference over the largest logit."""
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


@pytest.fixture(scope="module")
def models(beam_nano: Path) -> dict[torch.dtype, Any]:
    return {dtype: hf_model(beam_nano, dtype) for dtype in (FP32, BF16)}


@pytest.mark.parametrize("length", [1, 63, 64, 65, 512, 3000])
def test_nano_fp32(beam_nano: Path, models: dict[torch.dtype, Any], length: int) -> None:
    ids = token_ids(1 if length > 1000 else 2, length, 2048, seed=length)
    theirs = hf_logits(models[FP32], ids)
    assert relative(logits(beam_nano, ids, dtype=FP32), theirs) <= TOLERANCE


@pytest.mark.parametrize("length", [1, 64, 512])
def test_nano_bf16(beam_nano: Path, models: dict[torch.dtype, Any], length: int) -> None:
    ids = token_ids(2, length, 2048, seed=length)
    exact, theirs = hf_logits(models[FP32], ids), hf_logits(models[BF16], ids)
    gap = (theirs - exact).abs().mean()
    ours = logits(beam_nano, ids, dtype=BF16)
    assert (ours - theirs).abs().mean() <= gap
    assert (ours - exact).abs().mean() <= 1.1 * gap


def test_mini(beam_mini: Path) -> None:
    ids = token_ids(2, 200, 4096)
    exact = hf_logits(hf_model(beam_mini, FP32), ids)
    theirs = hf_logits(hf_model(beam_mini, BF16), ids)
    assert relative(logits(beam_mini, ids, dtype=FP32), exact) <= TOLERANCE
    ours = logits(beam_mini, ids, dtype=BF16)
    assert (ours - theirs).abs().mean() <= (theirs - exact).abs().mean()


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batches(beam_nano: Path, models: dict[torch.dtype, Any], side: str) -> None:
    lengths = (90, 1, 130, 64)
    ids, mask = token_ids(4, 130, 2048), torch.zeros(4, 130, dtype=torch.long)
    for row, length in enumerate(lengths):
        mask[row, 130 - length :] = 1
        if side == "right":
            mask[row] = mask[row].flip(0)
    theirs = hf_logits(models[FP32], ids, mask)
    ours = logits(beam_nano, ids, dtype=FP32, attention_mask=mask)
    kept = mask.bool()
    assert relative(ours[kept], theirs[kept]) <= TOLERANCE
    alone = logits(beam_nano, ids[:1][:, kept[0]], dtype=FP32)
    assert relative(ours[0][kept[0]], alone[0]) <= TOLERANCE
    assert ours[~kept].eq(0).all()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Sums of a product depend on how it is divided among threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
def test_states_equal_transformers_bit_for_bit(beam_nano: Path) -> None:
    """Up to a window's length, and with experts summed in the same order (eager), all operations
    are the same ones in FP32: so is every hidden state, and with it whatever calibration records.
    """
    ids = token_ids(2, 64, 2048)
    model = hf_model(beam_nano, FP32, experts_implementation="eager")
    with torch.no_grad():
        theirs = model(ids, use_cache=False, output_hidden_states=True).hidden_states
    checkpoint = open_checkpoint(beam_nano)
    config = BeamConfig.from_dict(checkpoint.config)
    loader = LayerLoader(checkpoint, config, dtype=FP32, device=torch.device("cpu"))
    layout, gemm = SequenceLayout.rectangle(2, 64), select_gemm("reference")
    table = position_table(config, 64, loader.device)
    context = PassContext(config=config, table=table, gemm=gemm)
    (h_TK,) = embed(loader, [ids.flatten()])
    for index, weights in LayerStream(loader, layers=range(config.num_layers - 1)):
        h_TK = decoder_layer(h_TK, weights, layout, context)
        assert torch.equal(h_TK, theirs[index + 1].flatten(0, 1)), f"after layer {index}"


class Routers(Observer):
    """Keeps each router's choice."""

    def __init__(self) -> None:
        self.chosen: dict[int, torch.Tensor] = {}

    def routing(
        self,
        layer: int,
        logits_TE: torch.Tensor,
        experts_Tk: torch.Tensor,
        weights_Tk: torch.Tensor,
    ) -> None:
        self.chosen[layer] = experts_Tk


def test_router_choices_are_identical(beam_nano: Path, models: dict[torch.dtype, Any]) -> None:
    ids, theirs = token_ids(2, 300, 2048), {}
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda m, i, out, n=n: theirs.update({n: out[2]}))
        for n, layer in enumerate(models[FP32].model.layers)
        if hasattr(layer.mlp, "experts")
    ]
    hf_logits(models[FP32], ids)
    for hook in hooks:
        hook.remove()
    routers = Routers()
    logits(beam_nano, ids, dtype=FP32, observers=[routers])
    assert routers.chosen.keys() == theirs.keys() == {3, 4, 5, 6, 7}
    for layer, chosen in routers.chosen.items():
        assert torch.equal(chosen, theirs[layer]), f"layer {layer}"


ODD = {
    "dense in the middle": {"mlp_layer_types": [SPARSE, DENSE, SPARSE]},
    "all full": {"layer_types": [FULL] * 3},
    "all sliding": {"layer_types": [SLIDING] * 3},
    "one group": {"n_group": 1, "topk_group": 1},
    "top 1": {"num_experts_per_tok": 1},
    "all dense": {"mlp_layer_types": [DENSE] * 3},
    "odd widths": {"intermediate_size": 90, "moe_intermediate_size": 20, "sliding_window": 5},
    "no normalisation": {"norm_topk_prob": False, "routed_scaling_factor": 1.5},
    "tied": {"tie_word_embeddings": True},
    "one kv head": {"num_key_value_heads": 1},
    "epsilon": {"rms_norm_eps": 0.3},
    "theta": {
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            "full_attention": None,
        }
    },
}


@pytest.mark.parametrize("name", list(ODD))
def test_odd_configs(tmp_path: Path, name: str) -> None:
    path = random_beam(tmp_path, **ODD[name])
    ids = token_ids(2, 41, 96)
    theirs = hf_logits(hf_model(path, FP32), ids)
    assert relative(logits(path, ids, dtype=FP32), theirs) <= TOLERANCE


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    """Small Beams of any shape that transformers can build."""
    layers, kv = draw(st.integers(1, 4)), draw(st.integers(1, 2))
    groups = draw(st.sampled_from([1, 2, 4]))
    experts = groups * draw(st.sampled_from([2, 4]))
    kept = draw(st.integers(1, groups))
    kinds = st.lists(st.sampled_from([SLIDING, FULL]), min_size=layers, max_size=layers)
    mlps = st.lists(st.sampled_from([DENSE, SPARSE]), min_size=layers, max_size=layers)
    return {
        "num_hidden_layers": layers,
        "num_key_value_heads": kv,
        "num_attention_heads": kv * draw(st.integers(1, 3)),
        "head_dim": draw(st.sampled_from([8, 16, 18])),
        "hidden_size": draw(st.sampled_from([24, 40, 64])),
        "num_experts": experts,
        "n_group": groups,
        "topk_group": kept,
        "num_experts_per_tok": draw(st.integers(1, kept * experts // groups)),
        "sliding_window": draw(st.integers(1, 40)),
        "layer_types": draw(kinds),
        "mlp_layer_types": draw(mlps),
        "final_logit_softcapping": draw(st.sampled_from([None, 5.0, 30.0])),
    }


@settings(deadline=None, max_examples=12, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(config=configs(), length=st.integers(1, 60), seed=st.integers(0, 9))
def test_random_configs(
    tmp_path_factory: pytest.TempPathFactory, config: dict[str, Any], length: int, seed: int
) -> None:
    path = random_beam(tmp_path_factory.mktemp("random"), seed=seed, **config)
    ids = token_ids(2, length, 96, seed)
    theirs = hf_logits(hf_model(path, FP32), ids)
    assert relative(logits(path, ids, dtype=FP32), theirs) <= TOLERANCE


@pytest.mark.parametrize(
    "config",
    [
        {"final_logit_softcapping": None},
        {"sliding_window": None, "layer_types": [FULL] * 2, "mlp_layer_types": [DENSE, SPARSE],
         "num_hidden_layers": 2},
    ],
    ids=["no softcap", "no window"],
)  # fmt: skip
def test_nulls_are_legal(tmp_path: Path, config: dict[str, Any]) -> None:
    path = random_beam(tmp_path, **config)
    (raw := json.loads((path / "config.json").read_text())).update(config)
    (path / "config.json").write_text(json.dumps(raw))
    ids = token_ids(2, 50, 96)
    theirs = hf_logits(hf_model(path, FP32), ids)
    assert relative(logits(path, ids, dtype=FP32), theirs) <= TOLERANCE


def fake_fp8(x: torch.Tensor) -> torch.Tensor:
    """Activations as an engine quantizes them: E4M3 codes, one scale a token."""
    codes, scale = fp8.quantize_rows(x.flatten(0, -2))
    return fp8.dequantize_rows(codes, scale, x.dtype).view_as(x)


def quantize_activations(model: Any, roles: tuple[Role, ...]) -> None:
    """Make transformers quantize the inputs of its linears, which its loader does not do."""

    def before(module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (fake_fp8(args[0]), *args[1:])

    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        linears = []
        if Role.ATTENTION in roles:
            linears += [getattr(attention, f"{n}_proj") for n in ("q", "k", "v", "gate", "o")]
        if hasattr(mlp, "experts"):
            linears.append(mlp.experts)
            inner = mlp.experts._apply_gate
            mlp.experts._apply_gate = lambda gate_up, inner=inner: fake_fp8(inner(gate_up))
        elif Role.DENSE_MLP in roles:
            linears += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
        for linear in linears:
            linear.register_forward_pre_hook(before)


@pytest.mark.parametrize(("roles", "share"), [(QUANTIZABLE, 0.1), ((Role.EXPERT,), 0.2)])
def test_fp8_equals_transformers(
    beam_nano: Path, tmp_path: Path, roles: tuple[Role, ...], share: float
) -> None:
    """In FP32 the arithmetic is the same, and a token's logits agree to FP32 rounding unless that
    moved one of its activations (or of a token before it) over a rounding boundary of FP8. How many
    escape that depends on the order of sums, so on the processor; `share` of them have to.
    In BF16 the two differ by no more than BF16 itself costs.
    """
    path = quantized_copy(beam_nano, tmp_path / "fp8", "fp8", roles=roles)
    ids = text_ids(beam_nano, 2, 150)
    found = {}
    for dtype in (FP32, BF16):
        model = hf_model(path, dtype, quantization_config=CompressedTensorsConfig(dequantize=True))
        quantize_activations(model, roles)
        found[dtype] = hf_logits(model, ids), logits(path, ids, dtype=dtype)
    theirs, ours = found[FP32]
    difference_T = (ours - theirs).abs().amax(-1).flatten()
    assert difference_T.quantile(share) <= 5e-5, difference_T.sort()[0]
    assert difference_T.mean() <= 0.5
    rounding = (found[BF16][0] - found[FP32][0]).abs().mean()
    assert (found[BF16][1] - found[BF16][0]).abs().mean() <= 1.1 * rounding


@pytest.mark.parametrize(
    ("fmt", "gemm", "low", "high"),
    [
        ("fp8", "reference", 0.0008, 0.005),
        ("nvfp4", "weights-only", 0.004, 0.02),
        ("nvfp4", "reference", 0.008, 0.04),
    ],
)
def test_quality_is_that_of_the_format(
    beam_nano: Path, tmp_path: Path, fmt: str, gemm: str, low: float, high: float
) -> None:
    """Mean KL to the source, experts quantized, is what the formats are known to cost here:
    FP8 0.0020, NVFP4 weights 0.0106, with activations 0.0205 nats on much more text.
    """
    ids = text_ids(beam_nano, 2, 256)
    roles = (Role.EXPERT,)
    path = quantized_copy(beam_nano, tmp_path / fmt, fmt, roles=roles, input_amax=lambda _: 20.0)
    base = logits(beam_nano, ids, dtype=FP32).log_softmax(-1)
    quantized = logits(path, ids, dtype=FP32, gemm=gemm).log_softmax(-1)
    kl = (base.exp() * (base - quantized)).sum(-1).mean().item()
    assert low < kl < high, f"{fmt}: mean KL {kl:.5f} nats"


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        (
            [[1, 2], [3]],
            r"^input_ids: \[\[1, 2\], \[3\]\], expected token ids \[B, T\]: a tensor, or"
            r" rows of integers, all of one length$",
        ),
        ([["a", "b"]], r"^input_ids: \[\['a', 'b'\]\], expected token ids .* all of one length$"),
        (None, "^input_ids: None, expected token ids .* all of one length$"),
        ("hello", "^input_ids: 'hello', expected token ids .* all of one length$"),
        ([[1], ["a" * 99]], r"^input_ids: \[\[1\], \['a{12}\.\.\.a{13}'\]\], expected token ids"),
        ({1: 2}, "^input_ids: dict, expected token ids .* all of one length$"),
        (
            torch.tensor([1, 2, 3]),
            r"shape \[3\], expected \[B, T\]; one .*input_ids\[N",
        ),
        (torch.ones(1, 2, 3, dtype=torch.long), r"shape \[1, 2, 3\], expected \[B, T\]"),
        (torch.tensor(3), r"shape \[\], expected \[B, T\]"),
        ([[]], r"shape \[1, 0\], there is no token"),
        (torch.empty(0, 4, dtype=torch.long), "there is no token"),
        (torch.tensor([[1.0, 2.0]]), "float32, expected integers"),
        (torch.tensor([[True, False]]), "bool, expected integers"),
        ([[5, 2048]], r"token id 2048 is outside the vocabulary \(0 to 2047\)"),
        ([[-1, 5]], "token id -1 is outside"),
    ],
)
def test_ids_of_another_form_are_refused_by_name(beam_nano: Path, ids: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        logits(beam_nano, ids)


@pytest.mark.parametrize(
    ("mask", "says"),
    [
        (torch.ones(3), r"attention_mask: shape \[3\], expected that of input_ids, \[1, 3\]"),
        ([[1, 1]], r"shape \[1, 2\], expected that of input_ids, \[1, 3\]"),
        ([[0.0, -1e9, 0.0]], "expected 1 for a token and 0 for padding"),
        ([[1, 0, 1]], "has a hole"),
        (
            "ones",
            r"^attention_mask: 'ones', expected zeros and ones \[B, T\] in rows of one length$",
        ),
    ],
)
def test_masks_of_another_form_are_refused_by_name(beam_nano: Path, mask: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        logits(beam_nano, [[1, 2, 3]], attention_mask=mask)


def test_lists_and_narrow_integers_are_ids_too(beam_nano: Path) -> None:
    ids = token_ids(2, 9, 2048)
    wanted = logits(beam_nano, ids)
    assert torch.equal(logits(beam_nano, ids.tolist()), wanted)
    assert torch.equal(logits(beam_nano, ids.to(torch.int32).numpy()), wanted)
    mask = [[1] * 9, [0] * 4 + [1] * 5]
    masked = logits(beam_nano, ids, attention_mask=mask)
    assert torch.equal(masked, logits(beam_nano, ids, attention_mask=torch.tensor(mask).bool()))


def test_it_runs_inside_inference_mode(beam_nano: Path, tmp_path: Path) -> None:
    """Found by a newcomer: reader threads may not write to buffers made in inference mode."""
    ids = token_ids(1, 9, 2048)
    path = quantized_copy(beam_nano, tmp_path / "fp8", "fp8")
    for folder in (beam_nano, path):
        wanted = logits(folder, ids, dtype=FP32)
        with torch.inference_mode():
            assert torch.equal(logits(folder, ids + 0, dtype=FP32), wanted)
        with torch.no_grad():
            assert torch.equal(logits(folder, ids, dtype=FP32), wanted)
        assert torch.equal(logits(folder, ids.numpy(), dtype="float32"), wanted)
        if not torch.cuda.is_available():
            assert torch.equal(logits(folder, ids, dtype="fp32", device="auto"), wanted)


def test_a_mask_without_a_token(beam_nano: Path) -> None:
    with pytest.raises(UsageError, match="attention_mask: all of it is padding"):
        logits(beam_nano, [[1, 2]], attention_mask=[[0, 0]])


@pytest.mark.parametrize("device", ["tpu", "mps", "cuda:x"])
def test_devices_that_beam_does_not_run_on(beam_nano: Path, device: str) -> None:
    with pytest.raises(UsageError, match="expected auto, cpu, cuda or cuda:N"):
        logits(beam_nano, [[1, 2]], device=device)


def test_a_gpu_that_is_not_here(beam_nano: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="no usable NVIDIA GPU"):
        logits(beam_nano, [[1, 2]], device="cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(DeviceError, match="only 2 GPUs are here"):
        logits(beam_nano, [[1, 2]], device="cuda:2")


def _everything(source: Path, folder: Path) -> dict[str, object]:
    """What calls that run the model give, small."""
    folder.mkdir()
    size: Any = {"samples": 2, "sequence_length": 48}
    beamq.calibrate(source, folder / "stats", **size)
    beamq.quantize(source, folder / "gptq", recipe="nvfp4-gptq", **size)
    report = beamq.compare(source, folder / "gptq", **size).to_dict()
    parts = beamq.sensitivity(source, folder / "gptq", **size).to_dict()
    return {
        "files": {path.name: path.read_bytes() for path in folder.rglob("*.safetensors")},
        "stats": (folder / "stats").read_bytes(),
        "logits": logits(folder / "gptq", [[1, 2, 3]], dtype="float32").tolist(),
        "compare": str({**report, "seconds": 0}),
        "sensitivity": str(parts),
    }


def test_a_callers_settings_of_torch_change_nothing(beam_nano: Path, tmp_path: Path) -> None:
    expected = _everything(beam_nano, tmp_path / "plain")
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device("meta")
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = _everything(beam_nano, tmp_path / "odd")
            assert torch.is_autocast_enabled("cpu")
        assert torch.get_default_device().type == "meta"
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    assert {name for name in expected if found[name] != expected[name]} == set()


def test_a_back_end_may_be_an_object(beam_nano: Path) -> None:
    """As in tests that watch products: an object of a caller is used as it is."""
    ids = [[1, 2, 3]]
    expected = logits(beam_nano, ids, dtype=FP32, gemm="reference")
    assert logits(beam_nano, ids, dtype=FP32, gemm=select_gemm("reference")).equal(expected)
