"""Which weights an adapter changes, by the names and shapes of its tensors."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from beamq.adapter.merged import MergedFiles
from beamq.adapter.read import LowRank
from beamq.errors import AdapterError
from tests.helpers.adapters import PREFIX, Change, Tensors, changed, made, merged, pair

# beam-nano: hidden size 128, 16 experts with 64, sparse layers 3 to 7
Q, GATE = "model.layers.2.self_attn.q_proj", "model.layers.4.mlp.gate"
EXPERTS = "model.layers.3.mlp.experts"


def refused(source: Path, adapter: Path, **how: Any) -> str:
    with pytest.raises(AdapterError) as caught:
        merged(source, adapter, **how)
    return str(caught.value)


def drop(name: str) -> Change:
    return lambda config, tensors: tensors.pop(PREFIX + name) is None


def halve_experts(config: dict[str, Any], tensors: Tensors) -> None:
    """Keep the first eight experts of layer 4, and say so in the rank."""
    for name, tensor in tensors.items():
        if ".layers.4.mlp.experts" in name and ".lora_A." in name:
            tensors[name] = tensor[: len(tensor) // 2]
        elif ".layers.4.mlp.experts" in name:
            tensors[name] = tensor.view(len(tensor), -1, 16)[:, :, :8].flatten(1)


def add(name: str, tensor: torch.Tensor) -> Change:
    return lambda config, tensors: tensors.update({PREFIX + name: tensor})


@pytest.mark.parametrize(
    ("of", "change", "words"),
    [
        ("attention", drop(f"{Q}.lora_B.weight"), "its partner lora_B is missing"),
        ("attention", drop(f"{Q}.lora_A.weight"), "its partner lora_A is missing"),
        ("attention", add(f"{Q}.lora_C.weight", torch.ones(4, 4)), "lora_C.weight: a tensor of no"),
        ("attention", add("score.weight", torch.ones(2, 128)), "no known kind"),
        ("attention", add(f"{Q}.lora_magnitude_vector", torch.ones(128)), "use_dora false"),
        ("attention", add(f"{Q}x.lora_A.weight", torch.ones(4, 128)), "no linear"),
        ("attention", lambda c, t: c.update(r=8), "rank 4, but the config gives"),
        ("attention", lambda c, t: c.update(rank_pattern={"o_proj": 2}), "o_proj rank 2"),
        ("attention", lambda c, t: c.update(use_dora=True), "has no lora_magnitude_vector"),
        (
            "attention",
            lambda c, t: t.update({f"{PREFIX}{Q}.lora_B.weight": torch.ones(64, 4)}),
            "calls for",
        ),
        (
            "attention",
            lambda c, t: t.update({f"{PREFIX}{Q}.lora_B.weight": torch.ones(128, 4).int()}),
            "expected F32",
        ),
        (
            "attention",
            lambda c, t: t.update({f"{Q}.lora_B.weight": torch.ones(128, 4)}),
            "under two names",
        ),
        (
            "attention",
            lambda c, t: t[f"{PREFIX}{Q}.lora_B.weight"].view(-1)[5:6].fill_(float("nan")),
            "NaN or infinite",
        ),
        ("dora-attention", drop(f"{Q}.lora_magnitude_vector"), "has no lora_magnitude_vector"),
        ("usual-seven-0.21.2", halve_experts, "are experts missing"),
        ("usual-seven-0.21.2", drop(f"{EXPERTS}.lora_B.weight"), "its partner is missing"),
        ("usual-seven-0.21.2", lambda c, t: c.update(use_dora=True), "DoRA on packed|has no lora"),
        ("usual-seven-0.21.2", lambda c, t: c.update(peft_version="0.18.1"), "says the old layout"),
        ("experts-old-layout", lambda c, t: c.update(peft_version="0.20.0"), "says the new layout"),
        ("usual-seven-0.21.2", lambda c, t: c.pop("peft_version") is None, "--expert-lora-order"),
        (
            "trained-tokens",
            lambda c, t: c.update(trainable_token_indices={"embed_tokens": [3, 5]}),
            "lists 2 tokens",
        ),
        (
            "trained-tokens",
            lambda c, t: c.update(trainable_token_indices={"embed_tokens": [3, 5, 2048]}),
            "beyond the vocabulary",
        ),
        (
            "router-saved",
            lambda c, t: t.update({f"{PREFIX}{GATE}.weight": torch.ones(8, 128)}),
            "the model's is",
        ),
        (
            "router-saved",
            lambda c, t: t.update({f"{PREFIX}lm_head.weight": torch.ones(2056, 128)}),
            "resized vocabulary",
        ),
        (
            "router-saved",
            lambda c, t: t.update({f"{PREFIX}{Q}.weight": torch.ones(128, 128)}),
            "changed twice",
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    of: str, change: Change, words: str, beam_nano: Path, adapters: Path, tmp_path: Path
) -> None:
    message = refused(beam_nano, changed(adapters / of, tmp_path / "adapter", change))
    assert any(word in message for word in words.split("|")), message


def second_spelling_of_layer_4(config: dict[str, Any], tensors: Tensors) -> None:
    """Packed experts of layer 4 once more, as those of layer 04."""
    for name in [name for name in tensors if ".layers.4.mlp.experts" in name]:
        tensors[name.replace(".4.", ".04.")] = tensors[name] * 2


DORA_ON_DOWN = {
    f"{EXPERTS}.lora_A.weight": torch.ones(32, 64),
    f"{EXPERTS}.lora_B.weight": torch.ones(128, 32),
    f"{EXPERTS}.lora_magnitude_vector": torch.ones(128),
}


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({}, "changes no weight of the model"),
        (
            {"model.embed_tokens.token_adapter.trainable_tokens_delta": torch.ones(0, 128)},
            "lists 0 tokens",
        ),
        (DORA_ON_DOWN, "DoRA on packed experts"),
        ({"model.norm.weight": torch.tensor(1.0)}, r"the model's is \[128\]$"),
        (pair(Q, 128, 128, rank=3), f"{Q} rank 2$"),
        (
            {n.replace(".weight", ".default.weight"): t for n, t in pair(Q, 128, 128).items()},
            r"adapter \(default\).*save_pretrained",
        ),
    ],
)
def test_a_small_file_that_does_not_fit(
    tensors: Tensors, words: str, beam_nano: Path, tmp_path: Path
) -> None:
    adapter = made(tmp_path / "adapter", tensors, target_parameters=["down_proj"])
    assert re.search(words, refused(beam_nano, adapter)), refused(beam_nano, adapter)


def test_two_spellings_of_a_layer_do_not_replace_each_other(
    beam_nano: Path, adapters: Path, tmp_path: Path
) -> None:
    of = adapters / "usual-seven-0.21.2"
    adapter = changed(of, tmp_path / "adapter", second_spelling_of_layer_4)
    assert "the model has no linear model.layers.04." in refused(beam_nano, adapter)


def test_some_experts_one_by_one_are_refused(beam_nano: Path, tmp_path: Path) -> None:
    tensors: Tensors = {}
    for expert in range(15):
        tensors |= pair(f"{EXPERTS}.{expert}.up_proj", 64, 128)
    message = refused(beam_nano, made(tmp_path / "adapter", tensors))
    assert "up_proj is adapted in 15 of 16 experts (expert 15 is not)" in message


def test_an_adapter_of_a_larger_model_is_refused(beam_nano: Path, tmp_path: Path) -> None:
    adapter = made(tmp_path / "adapter", pair("model.layers.8.self_attn.q_proj", 128, 128))
    assert "no linear model.layers.8.self_attn.q_proj" in refused(beam_nano, adapter)


def form(source: Path, adapter: Path, **how: Any) -> tuple[str, str]:
    files = merged(source, adapter, **how).source
    assert isinstance(files, MergedFiles)
    assert files.assignment.form is not None
    return files.assignment.form.layout, files.assignment.form.order


def test_shapes_of_down_proj_decide_the_layout(
    beam_nano: Path, adapters: Path, tmp_path: Path
) -> None:
    """With the version removed only the order has to be given."""
    for name, layout in (("usual-seven-0.21.2", "new"), ("experts-old-layout", "old")):
        bare = changed(adapters / name, tmp_path / name, lambda c, t: c.pop("peft_version") is None)
        assert form(beam_nano, bare, order="fastest") == (layout, "fastest")
        assert form(beam_nano, adapters / name) == (layout, "fastest")
        other = "old" if layout == "new" else "new"
        assert "those of the" in refused(beam_nano, bare, order="fastest", layout=other)


def only_gate_up(config: dict[str, Any], tensors: Tensors) -> None:
    """Drop down_proj; gate_up is then saved without `base_layer`."""
    config["target_parameters"] = ["gate_up_proj"]
    for name in [name for name in tensors if ".mlp.experts.lora_" in name]:
        del tensors[name]
    for name in [name for name in tensors if ".mlp.experts.base_layer." in name]:
        tensors[name.replace(".base_layer.", ".")] = tensors.pop(name)


def test_gate_up_alone_follows_the_version_or_the_option(
    beam_nano: Path, adapters: Path, tmp_path: Path
) -> None:
    """On a Beam 2I = H: the shapes of gate_up do not tell the layouts apart."""
    of = adapters / "usual-seven-0.21.2"
    alone = changed(of, tmp_path / "alone", only_gate_up)
    assert form(beam_nano, alone) == ("new", "fastest")
    files = merged(beam_nano, alone).source
    assert isinstance(files, MergedFiles)
    assert not [name for name in files.assignment.updates if name.endswith("down_proj.weight")]

    def older(config: dict[str, Any], tensors: Tensors) -> None:
        only_gate_up(config, tensors)
        config["peft_version"] = "0.18.1"

    assert form(beam_nano, changed(of, tmp_path / "older", older)) == ("old", "fastest")

    def bare(config: dict[str, Any], tensors: Tensors) -> None:
        only_gate_up(config, tensors)
        config["peft_version"] = "0.19.1.dev0"

    unknown = changed(of, tmp_path / "unknown", bare)
    assert "--expert-lora-layout" in refused(beam_nano, unknown)
    assert form(beam_nano, unknown, layout="old") == ("old", "fastest")


def test_parts_left_out_by_peft_are_pointed_out(beam_nano: Path, adapters: Path) -> None:
    def notes(name: str) -> str:
        files = merged(beam_nano, adapters / name).source
        assert isinstance(files, MergedFiles)
        return " ".join(files.assignment.notes)

    assert "not the attention gates and dense MLPs" in notes("usual-seven-0.21.2")
    assert notes("usual-seven-0.18.1") == ""
    assert "the router changes" in notes("router-saved")


def test_one_note_where_two_keys_match(beam_nano: Path, adapters: Path, tmp_path: Path) -> None:
    keys = {"layers.1.self_attn.q_proj": 7, "q_proj": 3}
    adapter = changed(
        adapters / "attention", tmp_path / "a", lambda c, t: c.update(alpha_pattern=keys)
    )
    files = merged(beam_nano, adapter).source
    assert isinstance(files, MergedFiles)
    assert len([note for note in files.assignment.notes if "two pattern keys" in note]) == 1
    update = files.assignment.updates["model.layers.1.self_attn.q_proj.weight"]
    assert isinstance(update, LowRank)
    assert update.scaling == 7 / 4
