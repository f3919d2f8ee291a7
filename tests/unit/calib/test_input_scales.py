"""Input scales and coverage: sharing, fallbacks, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from beamq.beam.config import BeamConfig, read_config
from beamq.calib.input_scales import MIN_SCALE, constant_scales, coverage, input_scales
from beamq.calib.statistics import CalibrationStats, InputStats
from beamq.errors import CalibrationError

EXPERTS = 16
SMALLEST_NORMAL = np.finfo(np.float32).tiny


def f32(values: Any) -> Any:
    return np.asarray(values, dtype=np.float32)


def i64(values: Any) -> Any:
    return np.asarray(values, dtype=np.int64)


@pytest.fixture
def config(beam_nano: Path) -> BeamConfig:
    return BeamConfig.from_dict(read_config(beam_nano))


def experts(amax: Any, rows: Any = 10) -> InputStats:
    return InputStats(
        amax=f32(np.broadcast_to(f32(amax), EXPERTS)),
        rows=i64(np.broadcast_to(i64(rows), EXPERTS)),
    )


def make(inputs: dict[str, InputStats], **fields: Any) -> CalibrationStats:
    layers = {int(name.split(".")[1]) for name in inputs if ".experts." in name}
    chosen: dict[str, Any] = {
        "model_name": "beam-nano",
        "model_fingerprint": "ab",
        "experts": "routed",
        "total_tokens": 1000,
        "inputs": inputs,
        "routed_tokens": {
            layer: i64(inputs[f"layers.{layer}.experts.gate_up"].rows) for layer in layers
        },
        "data": ({"digest": "d"},),
        "versions": {},
    }
    return CalibrationStats(**{**chosen, **fields})


def layer4(gate_up: InputStats, down: InputStats) -> dict[str, InputStats]:
    return {"layers.4.experts.gate_up": gate_up, "layers.4.experts.down": down}


def down(expert: int) -> str:
    return f"model.layers.4.mlp.experts.{expert}.down_proj"


def sound(scale: np.float32) -> bool:
    """What every engine needs: finite, positive, normal, with a finite normal reciprocal."""
    inverse = np.float32(1) / scale
    return bool(
        isinstance(scale, np.float32)
        and np.isfinite(scale)
        and scale >= SMALLEST_NORMAL
        and np.isfinite(inverse)
        and inverse >= SMALLEST_NORMAL
    )


class TestScales:
    def test_amax_over_2688_in_fp32(self, config: BeamConfig) -> None:
        amax = f32([1.7568] * EXPERTS)
        scales = input_scales(make(layer4(experts(amax), experts(3.0))), config, 1)
        expected = np.float32(1.7568) / np.float32(2688)
        found = scales.scale("model.layers.4.mlp.experts.0.up_proj")
        assert found.tobytes() == expected.tobytes()
        assert found == scales.scale("model.layers.4.mlp.experts.15.gate_proj")
        assert scales.scale(down(0)) == np.float32(3) / np.float32(2688)

    def test_one_value_for_all_experts_is_the_largest(self, config: BeamConfig) -> None:
        amax = np.linspace(1, 5, EXPERTS)
        scales = input_scales(make(layer4(experts(amax), experts(amax[::-1].copy()))), config, 1)
        assert {scales.scale(down(e)) for e in range(EXPERTS)} == {np.float32(5) / np.float32(2688)}

    def test_fused_attention_and_mlp_share(self, config: BeamConfig) -> None:
        one = {
            "layers.0.self_attn.qkv_gate": InputStats(amax=f32(4), rows=i64(9)),
            "layers.0.self_attn.o": InputStats(amax=f32(2), rows=i64(9)),
            "layers.0.mlp.gate_up": InputStats(amax=f32(8), rows=i64(9)),
            "layers.0.mlp.down": InputStats(amax=f32(16), rows=i64(9)),
        }
        scales = input_scales(make(one), config, 1)
        fused = {
            scales.scale(f"model.layers.0.self_attn.{x}_proj") for x in ["q", "k", "v", "gate"]
        }
        assert fused == {np.float32(4) / np.float32(2688)}
        fused = {scales.scale(f"model.layers.0.mlp.{x}_proj") for x in ("gate", "up")}
        assert fused == {np.float32(8) / np.float32(2688)}
        assert scales.scale("model.layers.0.self_attn.o_proj") == np.float32(2) / np.float32(2688)
        assert scales.scale("model.layers.0.mlp.down_proj") == np.float32(16) / np.float32(2688)
        assert scales.floored == ()

    def test_expert_never_routed_takes_its_peers(self, config: BeamConfig) -> None:
        amax, rows = np.linspace(1, 5, EXPERTS), np.full(EXPERTS, 7)
        amax[3] = rows[3] = 0
        scales = input_scales(make(layer4(experts(amax, rows), experts(amax, rows))), config, 1)
        assert scales.scale(down(3)) == np.float32(5) / np.float32(2688)
        assert scales.floored == ()

    @pytest.mark.parametrize("tiny", [0.0, 1e-36, 1e-45, 1e-20])
    def test_zero_or_denormal_input(self, config: BeamConfig, tiny: float) -> None:
        one = np.linspace(1, 5, EXPERTS)
        one[3] = tiny
        scales = input_scales(make(layer4(experts(2.0), experts(one))), config, 1)
        assert scales.scale(down(3)) == np.float32(5) / np.float32(2688)
        assert scales.scale("model.layers.4.mlp.experts.3.up_proj") == np.float32(2) / np.float32(
            2688
        )
        scales = input_scales(make(layer4(experts(2.0), experts(tiny))), config, 1)
        assert scales.scale(down(3)) == MIN_SCALE
        assert sound(scales.scale(down(3)))
        assert scales.floored == ("layers.4.experts.down",)

    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        amax=st.lists(
            st.floats(0, float(np.finfo(np.float32).max), width=32),
            min_size=EXPERTS,
            max_size=EXPERTS,
        )
    )
    def test_any_amax_gives_a_sound_scale(self, config: BeamConfig, amax: list[float]) -> None:
        scales = input_scales(make(layer4(experts(amax), experts(amax))), config, 1)
        found = scales.scale(down(0))
        assert sound(found)
        assert found >= np.float32(max(amax)) / np.float32(2688)

    def test_floor_keeps_products_normal(self) -> None:
        assert sound(MIN_SCALE)
        assert MIN_SCALE * np.float32(1e-6) >= SMALLEST_NORMAL

    def test_linear_without_statistics_is_refused(self, config: BeamConfig) -> None:
        scales = input_scales(make(layer4(experts(1.0), experts(1.0))), config, 1)
        scales.require([down(e) for e in range(EXPERTS)])
        missing = [f"model.layers.0.self_attn.{x}_proj" for x in "qkvo"]
        with pytest.raises(CalibrationError, match="q_proj and 3 more; calibrate"):
            scales.require([down(0), *missing])
        with pytest.raises(CalibrationError, match=r"self_attn\.q_proj; calibrate"):
            scales.scale(missing[0])

    def test_digest_follows_the_values(self, config: BeamConfig) -> None:
        def digest(value: float) -> str:
            return input_scales(make(layer4(experts(1.0), experts(value))), config, 1).digest

        assert digest(1.0) == digest(1.0) != digest(1.0000001)
        assert digest(1.0) != constant_scales().digest

    def test_constant(self) -> None:
        scales = constant_scales()
        assert scales.scale(down(3)) == np.float32(1)
        scales.require(["model.layers.0.self_attn.q_proj"])
        with pytest.raises(CalibrationError, match="not a linear"):
            scales.scale("lm_head")


def scalar(amax: float = 1.0, rows: int = 1, **more: Any) -> InputStats:
    return InputStats(amax=f32(amax), rows=i64(rows), **more)


class TestRefused:
    @pytest.mark.parametrize(
        ("inputs", "message"),
        [
            (lambda: layer4(experts(1.0), experts(1.0, 0)), "saw no token in 1,000"),
            (lambda: {"layers.0.mlp.down": scalar(rows=0)}, "saw no token"),
            (lambda: {"layers.8.self_attn.o": scalar()}, "the model has 8 layers"),
            (lambda: {"layers.4.mlp.down": scalar()}, "layer 4 is sparse"),
        ],
    )
    def test_entries(
        self,
        config: BeamConfig,
        inputs: Callable[[], dict[str, InputStats]],
        message: str,
    ) -> None:
        with pytest.raises(CalibrationError, match=message):
            input_scales(make(inputs()), config, 1)

    def test_experts_in_a_dense_layer(self, config: BeamConfig) -> None:
        found = {
            name.replace("layers.4", "layers.0"): entry
            for name, entry in layer4(experts(1.0), experts(1.0)).items()
        }
        with pytest.raises(CalibrationError, match="layer 0 is dense"):
            input_scales(make(found), config, 1)

    def test_routing_in_a_dense_layer(self, config: BeamConfig) -> None:
        with pytest.raises(CalibrationError, match=r"layers\.0\.experts\.routed_tokens does not"):
            input_scales(make({}, routed_tokens={0: i64([1] * EXPERTS)}), config, 1)

    def test_another_number_of_experts(self, config: BeamConfig) -> None:
        fewer = replace(config, num_experts=8)
        stats = make(layer4(experts(1.0), experts(1.0)))
        with pytest.raises(CalibrationError, match="it has 16 experts, not 8"):
            input_scales(stats, fewer, 1)
        with pytest.raises(CalibrationError, match="sparse layers have 8 experts each"):
            input_scales(replace(stats, inputs={}), fewer, 1)


class TestCoverage:
    def test_lists(self, config: BeamConfig) -> None:
        rows = np.arange(EXPERTS) * 10
        amax = np.ones(EXPERTS)
        amax[0] = 0
        zero = amax.copy()
        zero[[5, 6]] = 0, 1e-36
        stats = make(layer4(experts(amax, rows), experts(zero, rows)), dropped_rows=2)
        found = coverage(stats, config)
        assert (found.experts, found.calibrated, found.dropped_rows) == (16, 15, 2)
        assert found.percent == 93.75
        (layer,) = found.layers
        assert (layer.layer, layer.experts) == (4, 16)
        assert (layer.tokens_min, layer.tokens_median, layer.tokens_max) == (0, 75.0, 150)
        assert layer.unrouted == layer.uncalibrated == (0,)
        assert layer.zero_amax == {"gate_up": (), "down": (5, 6)}

    def test_all_experts_mode_calibrates_the_unrouted(self, config: BeamConfig) -> None:
        routed = i64([0] + [9] * 15)
        stats = make(
            layer4(experts(1.0, 1000), experts(1.0, 1000)), experts="all", routed_tokens={4: routed}
        )
        (layer,) = coverage(stats, config).layers
        assert layer.unrouted == (0,)
        assert layer.uncalibrated == ()

    def test_routing_without_statistics_is_uncalibrated(self, config: BeamConfig) -> None:
        stats = make({}, routed_tokens={4: i64([9] * EXPERTS)})
        assert coverage(stats, config).calibrated == 0
        assert coverage(make({}), config).percent == 100.0

    def test_json(self, config: BeamConfig) -> None:
        found = coverage(make(layer4(experts(1.0), experts(0.0))), config).to_dict()
        again = json.loads(json.dumps(found))
        assert again["layers"][0]["zero_amax"]["down"] == list(range(EXPERTS))
        assert again["percent"] == 100.0
        assert again["mode"] == "routed"

    def test_domains(self, config: BeamConfig) -> None:
        """Experts with 64 tokens or more of each text; texts of one name are put together."""
        counts = i64([[64] * 3 + [63] * 13, [10**6] * 16, [1] * 16])
        record = {"digest": "d", "domains": ["code", "a long name " * 9, "code"]}
        stats = make(
            layer4(experts(1.0), experts(1.0)),
            data=(record,),
            routed_tokens={4: counts.sum(axis=0)},
            domain_tokens={4: counts},
        )
        found = coverage(stats, config)
        assert [(each.name[:4], each.experts) for each in found.domains] == [
            ("code", 16), ("a lo", 16)
        ]  # fmt: skip
        assert json.loads(json.dumps(found.to_dict()))["domains"][0]["rows"] == 64
        assert "16 of 16 experts read 64 tokens or more of code" in found.lines()
        assert max(map(len, found.lines())) <= 80
        assert "domains" not in coverage(make(layer4(experts(1.0), experts(1.0)))).to_dict()

    def test_table_fits_80_columns(self, config: BeamConfig) -> None:
        nothing = experts(0.0, [0] * 8 + [10**9] * 8)
        stats = make(layer4(nothing, nothing), total_tokens=10**12, dropped_rows=10**9)
        lines = coverage(stats, config).lines()
        assert max(map(len, lines)) <= 80
        assert "uncalibrated 0 1 2 ... (8)" in lines[-1]
        assert "50.0%" in lines[0]
        assert "1,000,000,000" in lines[1]
