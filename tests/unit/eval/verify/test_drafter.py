"""A DFlash2 drafter: each rule fails on a drafter that breaks it, and a sound one passes all."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from beamq.beam.drafter import DrafterConfig
from beamq.cli import app
from beamq.convert.quantize import quantize
from beamq.errors import CheckFailed, ConfigError
from beamq.eval.verify.checks import DRAFTER_CHECKS
from beamq.eval.verify.drafter import inspect_drafter
from beamq.eval.verify.verify import verify
from beamq.plan.plan import make_plan
from beamq.publish import push
from beamq.report.serving import ServingView
from tests.helpers import safetensors_edit as st
from tests.helpers.craft import SINGLE
from tests.helpers.drafters import drafter_config, make_drafter, shapes

Q = "layers.0.self_attn.q_proj.weight"


def _draft(**changes: Any) -> dict[str, Any]:
    return {"dflash_config": drafter_config()["dflash_config"] | changes}


def _set(name: str, dtype: str | None = None, data: bytes | None = None) -> Callable[..., None]:
    def change(tensors: st.Tensors) -> None:
        old, shape, values = tensors.get(name, ("BF16", [1], b"\x80\x3f"))
        tensors[name] = (dtype or old, shape, values if data is None else data)

    return change


def _move(name: str, to: str | None) -> Callable[..., None]:
    def change(tensors: st.Tensors) -> None:
        found = tensors.pop(name)
        if to is not None:
            tensors[to] = found

    return change


def _reshape(tensors: st.Tensors) -> None:
    dtype, shape, data = tensors["fc.weight"]
    tensors["fc.weight"] = (dtype, shape[::-1], data)


def _codes(tensors: st.Tensors) -> None:
    _, shape, data = tensors[Q]
    tensors[Q] = ("F8_E4M3", shape, data[: len(data) // 2])


BOTH, VLLM, SGLANG, NONE = {"vLLM", "SGLang"}, {"vLLM"}, {"SGLang"}, set()
WRONG_KEYS = [
    *((key, {key: 0}, "drafter.config", BOTH) for key in (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "vocab_size", "sliding_window",
        "max_position_embeddings", "rms_norm_eps", "rope_parameters", "dflash_config",
    )),
    *((key, _draft(**{key: None}), "drafter.config", BOTH) for key in (
        "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k",
        "target_layer_ids",
    )),
    ("block_size", {"block_size": None}, "drafter.config", NONE),
    ("mask", _draft(mask_token_id=2048), "drafter.config", VLLM),
    ("softcap", _draft(final_logit_softcapping=None), "drafter.config", VLLM),
    ("group", _draft(conv_group_size=48), "drafter.config", BOTH),
    ("heads", {"num_key_value_heads": 3}, "drafter.config", BOTH),
    ("full", {"layer_types": ["sliding_attention", "full_attention"]}, "drafter.attention", VLLM),
    ("short", {"layer_types": ["sliding_attention"]}, "drafter.attention", VLLM),
    ("causal", {"is_causal": True}, "drafter.attention", VLLM),
    ("unsaid", {"is_causal": None}, "drafter.attention", VLLM),
    ("unsorted", _draft(target_layer_ids=[4, 1, 6]), "drafter.layer-ids", SGLANG),
    ("twice", _draft(target_layer_ids=[1, 1, 6]), "drafter.layer-ids", SGLANG),
    ("negative", _draft(target_layer_ids=[-1, 1, 6]), "drafter.layer-ids", BOTH),
    ("quantized", {"quantization_config": {"quant_method": "fp8"}}, "drafter.plain", BOTH),
    ("beyond", _draft(target_layer_ids=[1, 4, 8]), "target.layer-ids", BOTH),
]  # fmt: skip
WRONG_TENSORS = [
    ("prefix", _move(Q, f"model.{Q}"), "drafter.known", VLLM),
    ("head", _set("lm_head.weight"), "drafter.known", VLLM),
    ("gate", _set("layers.0.self_attn.gate_proj.weight"), "drafter.known", VLLM),
    ("scale", _set(f"{Q}_scale"), "drafter.plain", BOTH),
    ("codes", _codes, "drafter.plain", BOTH),
    ("missing", _move(Q, None), "drafter.present", BOTH),
    ("shape", _reshape, "drafter.shape", BOTH),
    ("dtype", _set("norm.weight", "I16"), "drafter.dtype", BOTH),
    ("nan", _set("norm.weight", data=b"\xc0\x7f" + bytes([0, 63]) * 127), "values.finite", NONE),
    ("zero", _set("norm.weight", data=b"\x00\x80" * 128), "values.zeros", NONE),
]


def test_a_sound_drafter_passes(beam_nano: Path, tmp_path: Path) -> None:
    folder = make_drafter(tmp_path / "drafter")
    report = verify(folder, source=beam_nano)
    assert [check.name for check in report.checks] == list(DRAFTER_CHECKS)
    skipped = {check.name for check in report.checks if check.status != "pass"}
    assert (skipped, report.ok, report.loads) == (
        {"files.index"}, True, {"vLLM": True, "SGLang": True}
    )  # fmt: skip
    assert report.bytes_read == DrafterConfig.from_dict(drafter_config()).nbytes
    alone = verify(folder, level="structure")
    unasked = [check.name for check in alone.checks if check.detail == "needs --target"]
    assert alone.ok
    assert unasked == ["target.sizes", "target.layer-ids", "target.head"]


@pytest.mark.parametrize(("changes", "check", "stops"), [p[1:] for p in WRONG_KEYS],
                         ids=[p[0] for p in WRONG_KEYS])  # fmt: skip
def test_a_wrong_key_is_found(
    beam_nano: Path, tmp_path: Path, changes: dict[str, Any], check: str, stops: set[str]
) -> None:
    report = verify(make_drafter(tmp_path / "d", **changes), source=beam_nano, level="structure")
    assert report.check(check).status == "fail"
    assert {name for name, loads in report.loads.items() if not loads} == stops


@pytest.mark.parametrize(("change", "check", "stops"), [p[1:] for p in WRONG_TENSORS],
                         ids=[p[0] for p in WRONG_TENSORS])  # fmt: skip
def test_a_wrong_tensor_is_found(
    beam_nano: Path, tmp_path: Path, change: Callable[..., None], check: str, stops: set[str]
) -> None:
    folder = make_drafter(tmp_path / "d")
    st.edit(folder / SINGLE, change)
    report = verify(folder, source=beam_nano)
    assert report.check(check).status == "fail"
    assert {name for name, loads in report.loads.items() if not loads} >= stops
    assert report.loads["SGLang"] is ("SGLang" not in stops)


def test_files_that_cannot_be_read_are_found(tmp_path: Path) -> None:
    folder = make_drafter(tmp_path / "d")
    (folder / SINGLE).write_bytes((folder / SINGLE).read_bytes()[:-1])
    assert verify(folder).check("files.readable").status == "fail"
    other = make_drafter(tmp_path / "e")
    index = {"weight_map": dict.fromkeys([*shapes(), "gone"], SINGLE)}
    (other / f"{SINGLE}.index.json").write_text(json.dumps(index))
    assert verify(other).check("files.index").where == ("gone",)


def test_another_target_is_found(beam_nano: Path, tmp_path: Path) -> None:
    changed = {"hidden_size": 256, "vocab_size": 2049}
    report = verify(make_drafter(tmp_path / "d", **changed), source=beam_nano, level="structure")
    assert report.check("target.sizes").count == 2


def test_a_target_whose_head_is_quantized_is_found(beam_nano: Path, tmp_path: Path) -> None:
    target = tmp_path / "beam"
    target.mkdir()
    (target / "config.json").write_bytes((beam_nano / "config.json").read_bytes())
    tensors = st.load(beam_nano / SINGLE)
    _, shape, data = tensors["lm_head.weight"]
    tensors["lm_head.weight"] = ("F8_E4M3", shape, data[: len(data) // 2])
    st.save(target / SINGLE, tensors)
    report = verify(make_drafter(tmp_path / "d"), source=target, level="structure")
    assert report.check("target.head").where == ("lm_head.weight",)


def test_shapes_are_the_tables(tmp_path: Path) -> None:
    built = DrafterConfig.from_dict(drafter_config())
    assert {name: list(shape) for name, shape in built.tensors()} == shapes()
    five = drafter_config(num_hidden_layers=5)
    assert len(list(DrafterConfig.from_dict(five).tensors())) == 5 * 15 + 6


def test_inspect_quantize_plan_and_push(beam_nano: Path, tmp_path: Path) -> None:
    folder = make_drafter(tmp_path / "d")
    seen = inspect_drafter(folder)
    assert (seen.layers, seen.block_size, seen.target_layer_ids) == (2, 8, (1, 4, 6))
    assert (seen.tensors, seen.notes) == (len(shapes()), ())
    with pytest.raises(ConfigError, match=r"drafter .* no engine loads a quantized one"):
        quantize(folder, tmp_path / "out", recipe="fp8")
    for flags in ([folder, "--source", beam_nano], [beam_nano, "--target", beam_nano]):
        with pytest.raises(SystemExit) as left:
            app(["verify", *map(str, flags)])
        assert left.value.code == 2
    made, drafter = make_plan(beam_nano, "fp8"), DrafterConfig.from_dict(drafter_config())
    plain, beside = (ServingView(made, context=100, drafter=d).data() for d in (None, drafter))
    for layout in ("tensor", "expert"):
        own = plain["weights_per_gpu"]["output"][layout][2]
        assert beside["weights_per_gpu"]["output"][layout][2] == own + seen.tensor_bytes
    assert beside["drafter"] == {"bytes": seen.tensor_bytes, "kv_bytes": 2 * 2 * 2 * 32 * 2 * 64}
    sent = push(folder, "org/drafter", dry_run=True)
    assert [file.path for file in sent.files] == [SINGLE, "config.json"]
    st.edit(folder / SINGLE, _move(Q, None))
    with pytest.raises(CheckFailed, match=r"drafter\.present"):
        push(folder, "org/drafter", dry_run=True)
