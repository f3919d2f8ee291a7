"""adapter_config.json: what is refused, and the scaling of each update."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest

from beamq.adapter.config import AdapterConfig, read_adapter_config
from beamq.errors import AdapterError

PLAIN = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}


def read(folder: Path, **config: Any) -> AdapterConfig:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**PLAIN, **config}))
    return read_adapter_config(path)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"peft_type": "LOHA"}, "only LoRA"),
        ({"peft_type": None}, "only LoRA"),
        ({"init_lora_weights": "pissa"}, "changes the base in training"),
        ({"init_lora_weights": "pissa_niter_4"}, "changes the base in training"),
        ({"init_lora_weights": "olora"}, "changes the base in training"),
        ({"init_lora_weights": "corda"}, "changes the base in training"),
        ({"init_lora_weights": "loftq"}, "changes the base in training"),
        ({"init_lora_weights": "lora_ga"}, "changes the base in training"),
        ({"init_lora_weights": "made up"}, "changes the base in training"),
        ({"alora_invocation_tokens": [1, 2]}, "activated LoRA"),
        ({"arrow_config": {"top_k": 3}}, "Arrow"),
        ({"kasa_config": {"beta": 1.0}}, "KaSA"),
        ({"use_qalora": True}, "QA-LoRA"),
        ({"use_bdlora": {"nblocks": 2}}, "block-diagonal"),
        ({"monteclora_config": {"num_samples": 2}}, "MonteCLoRA"),
        ({"lora_bias": True}, "bias"),
        ({"layer_replication": [[0, 4], [2, 5]]}, "layers that the model does not have"),
        ({"a_key_of_tomorrow": 1}, "a_key_of_tomorrow is 1"),
        ({"r": 0}, "r is 0"),
        ({"r": True}, "r is True"),
        ({"lora_alpha": "8"}, "lora_alpha is '8'"),
        ({"use_dora": "yes"}, "use_dora is 'yes'"),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern"),
        ({"r": 2.5}, "r is 2.5, expected a whole number"),
        ({"r": 10**400}, "expected a whole number"),
        ({"lora_alpha": 0}, "lora_alpha is 0"),
        ({"lora_alpha": -4}, "lora_alpha is -4"),
        ({"lora_alpha": 1e308}, "lora_alpha is 1e.308"),
        ({"lora_alpha": 10**400}, "expected a number from"),
        ({"lora_alpha": float("nan")}, "lora_alpha is nan"),
        ({"alpha_pattern": {"q_proj": 10**400}}, "expected a number from"),
        ({"rank_pattern": {"q_proj": 0}}, "whole number"),
        ({"rank_pattern": {"q_proj": 0.5}}, "whole number"),
        ({"rank_pattern": {"(": 2}}, "not a regular expression"),
        ({"alpha_pattern": {r"((\w+\.?)+)+!": 2}}, "exponential time"),
        ({"target_parameters": "mlp"}, "list of names"),
        ({"trainable_token_indices": [1.5]}, "list of token ids"),
        ({"trainable_token_indices": {"embed_tokens": [-1]}}, "list of token ids"),
    ],
)
def test_what_cannot_be_merged_is_refused(
    config: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(AdapterError, match=words) as caught:
        read(tmp_path, **config)
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("init", [True, False, "gaussian", "eva", "orthogonal", "mica", "velora"])
def test_plain_initialisations_are_taken(init: object, tmp_path: Path) -> None:
    assert read(tmp_path, init_lora_weights=init).rank == 4


def test_a_pattern_matches_whole_parts_from_any_dot_on(tmp_path: Path) -> None:
    config = read(
        tmp_path, rank_pattern={"q_proj": 2, r"layers\.[02]\..*": 3}, alpha_pattern={"o_proj": 6}
    )
    expected = {
        "model.layers.1.self_attn.q_proj": 2,
        "model.layers.0.self_attn.q_proj": 2,  # the first key in the file counts
        "model.layers.2.self_attn.v_proj": 3,
        "model.layers.12.self_attn.v_proj": 4,
        "model.layers.1.self_attn.xq_proj": 4,
    }
    assert {name: config.expected_rank(name) for name in expected} == expected
    assert config.scaling("model.layers.1.self_attn.o_proj") == 6 / 4
    assert config.ambiguous("model.layers.0.self_attn.q_proj") == ("q_proj", r"layers\.[02]\..*")
    assert config.ambiguous("model.layers.1.self_attn.q_proj") is None


def test_scaling_by_the_root_of_the_rank(tmp_path: Path) -> None:
    assert read(tmp_path, use_rslora=True, r=3).scaling("lm_head") == 8 / math.sqrt(3)


def test_a_parameter_is_matched_by_its_own_name(tmp_path: Path) -> None:
    """PEFT: a pattern for `gate_proj` acts on a module, not on `gate_proj.weight`."""
    config = read(
        tmp_path,
        alpha_pattern={"gate_proj": 3},
        target_parameters=["mlp.gate_proj.weight", "experts.gate_up_proj"],
    )
    dense, gate = "model.layers.0.mlp.gate_proj", "model.layers.0.self_attn.gate_proj"
    assert config.scaled_name(dense) == f"{dense}.weight"
    assert config.scaling(config.scaled_name(dense)) == 8 / 4
    assert config.scaled_name(gate) == gate
    assert config.scaling(config.scaled_name(gate)) == 3 / 4


def test_a_slow_pattern_is_refused_at_once(tmp_path: Path) -> None:
    begun = time.process_time()
    with pytest.raises(AdapterError):
        read(tmp_path, rank_pattern={"(a+)+$": 2})
    assert time.process_time() - begun < 1
