"""Cards: metadata the Hub accepts, licence inherited, nothing of this machine, no false claim."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from beamq.beam.config import BeamConfig
from beamq.beam.tensors import Role
from beamq.convert.quantize import quantize
from beamq.errors import CheckpointError, UsageError
from beamq.io.checkpoint import open_checkpoint
from beamq.io.companions import companion_files, front_matter, restored_name
from beamq.io.hub import cached_repo, could_be_path
from beamq.plan.layout import SCHEMES
from beamq.plan.plan import Plan, make_plan
from beamq.report.model_card import (
    COMPARISON_BEGIN,
    COMPARISON_END,
    ENGINES,
    Origin,
    card_with_comparison,
    check_base_model,
    hub_metadata,
    model_card,
    smallest_tensor_parallel,
    trace_origin,
)
from tests.helpers import safetensors_edit as st

SOURCE_CARD = """---
license: other
license_name: reflection-licence
license_link: LICENSE
language: [en, de]
pipeline_tag: text-generation
base_model: reflection/Beam
datasets: [a/b]
---
# Mine
"""
RECORD: dict[str, Any] = {
    "description": "calibrated on 1,024 tokens of notes.md, a/chats; 78 of 80 experts reached",
    "data": [
        {
            "samples": 8,
            "sequence_length": 128,
            "seed": 3,
            "activations": "bfloat16",
            "sources": [
                {"name": "notes|<b>.md", "kind": "file", "documents": 2, "tokens": 512,
                 "digest": "0123456789abcdef0123"},
                {"name": "a/chats", "kind": "hub", "documents": 9, "tokens": 512, "digest": "ff"},
            ],
        }
    ],
    "coverage": {
        "calibrated": 78, "experts": 80, "percent": 97.5,
        "layers": [{"layer": 4, "tokens_min": 0, "tokens_median": 250.0}],
    },
    "dropped_tokens": 0,
}  # fmt: skip


@pytest.fixture
def plan(beam_nano: Path) -> Plan:
    return make_plan(beam_nano)


def parsed(card: str) -> dict[str, Any]:
    """The front matter as huggingface_hub reads it, with its own round trip."""
    from huggingface_hub import ModelCard

    read = ModelCard(card)
    again = yaml.safe_load(read.data.to_yaml())
    assert again == yaml.safe_load(card.split("---")[1])
    return dict(again)


def test_the_hub_library_reads_what_was_written(nano_copy: Path) -> None:
    card = SOURCE_CARD.replace("k: LICENSE", "k: ./LICENSE").replace("text-generation", "other")
    (nano_copy / "README.md").write_text(card)
    (nano_copy / "LICENSE").write_text("Be kind.")
    with open_checkpoint(nano_copy) as source:
        plan = make_plan(source)
        origin = trace_origin(source, plan.source_fingerprint, "someone/beam-tuned")
    assert parsed(model_card(plan, origin, RECORD)) == {
        "base_model": "someone/beam-tuned",
        "base_model_relation": "quantized",
        "license": "other",
        "license_name": "reflection-licence",
        "license_link": "LICENSE",
        "language": ["en", "de"],
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["transformers", "beam", "nvfp4", "modelopt", "beamq", "vllm", "sglang"],
        "datasets": ["a/chats"],
    }


def test_what_a_card_says_of_calibration(plan: Plan, beam_nano: Path) -> None:
    card = model_card(plan, Origin(), RECORD)
    assert "8 rows of 128 tokens, seed 3, activations in bfloat16." in card
    assert r"| notes\|&lt;b>.md | file | 2 | 512 | 0123456789abcdef |" in card
    assert "78 of 80 experts received tokens (97.5%)" in card
    assert "expert is in layer 4: 0 tokens, where the layer's median is 250" in card
    every = {**RECORD["coverage"], "calibrated": 80, "percent": 100.0}
    card = model_card(plan, Origin(), {**RECORD, "coverage": every})
    assert "All 80 experts received tokens." in card
    assert "the others" not in card
    constant = model_card(plan, Origin(), {"description": "not calibrated: all 1.0"})
    assert "Input scales: not calibrated: all 1.0." in constant
    assert "experts saw" not in constant
    fp8 = make_plan(beam_nano, "fp8")
    assert "## Calibration" not in model_card(fp8, Origin(), {})


def test_parts_and_sizes_are_the_plans(plan: Plan, beam_nano: Path) -> None:
    card = model_card(plan, Origin(), {})
    assert "| routed experts | 1.97 M | 54.3% | NVFP4 |" in card
    assert "| routers | 10,240 | 0.3% | FP32 |" in card
    assert f"{plan.quantized_parameters / plan.total_parameters:.1%} of the weights" in card
    assert f"| {plan.bits_per_weight:.2f} |" in card
    assert f"(`{plan.recipe.scales}`)." in card
    assert "(`max`)." in model_card(make_plan(beam_nano, "nvfp4-max"), Origin(), {})
    spared = make_plan(beam_nano, exclude=["model.layers.4.mlp.experts"])
    text = model_card(spared, Origin(), {})
    assert "| NVFP4 and BF16 |" in text
    assert "Kept in high precision on request: routed experts of layer 4." in text


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ("reflection/Beam", "reflection/Beam"),
        ("/home/me/secret", None),
        ("../secret/run", None),
        ("outputs/secret", None),
        ("secret/checkpoint-500", None),
        ("C:\\secret\\run", None),
        ("secret", None),
        (None, None),
        (7, None),
    ],
)
def test_a_base_model_is_an_id_on_the_hub_or_nothing(
    nano_copy: Path, named: object, said: str | None
) -> None:
    st.edit_config(nano_copy, _name_or_path=named)
    with open_checkpoint(nano_copy) as source:
        plan = make_plan(source)
        origin = trace_origin(source, plan.source_fingerprint)
    assert origin.base_model == said
    metadata = hub_metadata(plan, origin)
    assert metadata.get("base_model") == said
    assert ("base_model_relation" in metadata) == (said is not None)
    assert "secret" not in model_card(plan, origin, {})


def test_a_snapshot_in_the_hubs_cache_is_its_repository(nano_copy: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "models--org--my--beam" / "snapshots" / ("0" * 40)
    snapshot.parent.mkdir(parents=True)
    nano_copy.rename(snapshot)
    (tmp_path / "link").symlink_to(snapshot)
    st.edit_config(snapshot, _name_or_path="other/beam")
    for folder in (snapshot, tmp_path / "link"):
        with open_checkpoint(folder) as source:
            assert trace_origin(source, "").base_model == "org/my--beam"
    assert cached_repo(tmp_path / "models--beam" / "snapshots" / "a") is None


def test_a_folder_here_that_is_spelled_like_an_id_is_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "someone" / "beam").mkdir(parents=True)
    assert not could_be_path("someone/beam")
    monkeypatch.chdir(tmp_path)
    assert could_be_path("someone/beam")


@pytest.mark.parametrize("text", ["beam", "/a/b", "a/b@main", "a b/c"])
def test_base_model_option_must_be_an_id(text: str) -> None:
    with pytest.raises(UsageError, match="expected an id on the Hub, org/name"):
        check_base_model(text)


def strings(data: Any) -> Iterator[str]:
    if isinstance(data, dict):
        for key, value in data.items():
            yield from strings(key)
            yield from strings(value)
    elif isinstance(data, list):
        for item in data:
            yield from strings(item)
    elif isinstance(data, str):
        yield data


@pytest.mark.parametrize("recipe", ["nvfp4", "fp8"])
def test_no_path_of_this_machine_is_in_an_output(
    nano_copy: Path, tmp_path: Path, recipe: str
) -> None:
    (nano_copy / "README.md").write_text(SOURCE_CARD.replace("LICENSE", str(nano_copy / "L")))
    output = tmp_path / "out"
    options = {"no_calibration": True} if recipe == "nvfp4" else {}
    quantize(nano_copy, output, recipe=recipe, **options)  # type: ignore[arg-type]
    card = (output / "README.md").read_text()
    manifest = json.loads((output / "beamq.json").read_text())
    for text in (card, *strings(manifest)):
        assert str(tmp_path) not in text
        assert nano_copy.name + "/" not in text
    assert "license_link" not in parsed(card)
    assert (output / "README.source.md").read_text().startswith("---\nlicense: other")
    assert "kept as `README.source.md`" in card


def test_cards_of_cards_do_not_clash(nano_copy: Path, tmp_path: Path) -> None:
    (nano_copy / "README.md").write_text("# second")
    (nano_copy / "README.source.md").write_text("# first")
    with open_checkpoint(nano_copy) as source:
        found = companion_files(source.source.listing())
    targets = [companion.target for companion in found]
    assert len(set(targets)) == len(targets)
    output = tmp_path / "out"
    quantize(nano_copy, output, recipe="fp8")
    assert (output / "README.source.md").read_text() == "# second"
    assert (output / "README.source.source.md").read_text() == "# first"
    with open_checkpoint(output) as written:
        back = {c.source: restored_name(c) for c in companion_files(written.source.listing())}
    assert back["README.md"] is None
    assert back["README.source.md"] == "README.md"
    assert back["README.source.source.md"] == "README.source.md"
    both = companion_files({"README.md": 1, "readme.md": 1})
    assert [(each.target, restored_name(each)) for each in both] == [
        ("README.source.md", None), ("readme.md", "readme.md"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "text", ["", "# no front", "---\n[", "---\n- a\n---", "---\n" + "[" * 5000, "\ud800"]
)
def test_a_source_card_that_is_odd_is_no_obstacle(tmp_path: Path, text: str) -> None:
    path = tmp_path / "README.md"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    assert front_matter(path)[0] == {}
    assert front_matter(tmp_path / "none")[0] == {}


def test_hostile_metadata_is_left_out(plan: Plan) -> None:
    front = {
        "license": {"a": 1}, "license_name": "x\ny", "license_link": "file:///etc/passwd",
        "language": ["en", 3], "pipeline_tag": ["a"],
    }  # fmt: skip
    data = hub_metadata(plan, Origin(front=front))
    assert not {"license", "license_name", "license_link", "language"}.intersection(data)
    assert data["pipeline_tag"] == "text-generation"


def test_a_licence_of_its_own_links_to_its_file(nano_copy: Path) -> None:
    (nano_copy / "LICENSE").write_text("Be kind.")
    plan = make_plan(nano_copy)
    for licence, link in (("other", "LICENSE"), ("mit", None)):
        origin = Origin(front={"license": licence}, licence_file="LICENSE")
        assert hub_metadata(plan, origin).get("license_link") == link


def test_a_comparison_takes_its_place_and_is_replaced(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    path.write_text(model_card(plan, Origin(), {}))
    before = path.read_text()
    assert "Not measured yet." in before
    card_with_comparison(tmp_path, "| a | b\\1 |\n|---|---|\n")
    card_with_comparison(tmp_path, "| KL | 0.0205 \\g<0> |\n")
    text = path.read_text()
    assert text.count(COMPARISON_BEGIN) == text.count(COMPARISON_END) == 1
    assert f"{COMPARISON_BEGIN}\n| KL | 0.0205 \\g<0> |\n{COMPARISON_END}\n" in text
    assert "Not measured" not in text
    assert text.split(COMPARISON_BEGIN)[0] == before.split(COMPARISON_BEGIN)[0]
    assert text.split(COMPARISON_END)[1] == before.split(COMPARISON_END)[1]
    path.write_text("# Somebody's own\n")
    card_with_comparison(tmp_path, "| KL |")
    assert path.read_text().startswith("# Somebody's own\n\n## Comparison with the source\n")
    path.unlink()
    with pytest.raises(CheckpointError, match="no card to write the comparison into"):
        card_with_comparison(tmp_path, "")


def test_serving_of_the_real_model_is_what_the_engines_take(beam_nano: Path) -> None:
    """501B: NVFP4 in vLLM also on Hopper, in SGLang not; FP8 in both on both."""
    nvfp4, fp8 = (real_plan(beam_nano, recipe) for recipe in ("nvfp4", "fp8"))
    assert smallest_tensor_parallel(nvfp4, "b200") == 2
    assert smallest_tensor_parallel(nvfp4, "b300") == 2
    assert smallest_tensor_parallel(fp8, "h200") == 8
    text, other = (
        model_card(plan, Origin(), {}).partition("## Serving")[2] for plan in (nvfp4, fp8)
    )
    assert "# 2 x B200 180 GB or B300" in text
    assert "--tp 2 --moe-runner-backend flashinfer_trtllm" in text
    vllm, _, sglang = text.partition("**SGLang**")
    assert "# 4 x H200 141 GB" in vllm
    assert "the activations BF16" in vllm
    assert "H200 141 GB" not in sglang
    assert "ran small NVFP4 Beams by beamq on H200s" in sglang
    assert "SGLang 0.5.23 ran small FP8 Beams" in other
    assert "this checkpoint itself were not run" in text
    assert "this checkpoint itself" in other
    assert "# 8 x H100 80 GB or H200 141 GB" in other
    assert "moe-runner" not in other
    for fmt, engines in ENGINES.items():
        loaders = [engine for engine in SCHEMES[fmt].loaders if engine != "transformers"]
        assert [engine.name for engine in engines] == loaders


def test_a_card_says_which_engine_does_not_load_it(beam_nano: Path) -> None:
    card = model_card(make_plan(beam_nano, "nvfp4-fp8"), Origin(), {})
    front, _, text = card.partition("# Beam in NVFP4 and FP8")
    assert "- nvfp4\n- fp8\n- modelopt\n- beamq\n- vllm\n---" in front
    serving = text.partition("## Serving")[2]
    assert "**vLLM**" in serving
    assert "**SGLang**" not in serving
    assert "SGLang refuses a Beam with parts in different formats" in serving
    assert "Note: vLLM alone can load this format (SGLang: refuses Beam" in text


def real_plan(beam_nano: Path, recipe: str) -> Plan:
    """nano's plan with the real dimensions, as far as serving looks at them."""
    real: dict[str, Any] = json.loads((beam_nano / "config.json").read_text())
    kinds = ["full_attention" if i % 6 == 5 or i == 51 else "sliding_attention" for i in range(52)]
    real.update(
        hidden_size=5120, intermediate_size=20480, moe_intermediate_size=2560, vocab_size=151936,
        num_hidden_layers=52, num_attention_heads=48, num_key_value_heads=8, head_dim=128,
        num_experts=256, num_experts_per_tok=8, sliding_window=512, layer_types=kinds,
        mlp_layer_types=["dense"] * 3 + ["sparse"] * 49, max_position_embeddings=1 << 20,
    )  # fmt: skip
    plan = make_plan(beam_nano, recipe)
    config = BeamConfig.from_dict(real)
    roles = {role for _, role in plan.units}
    units = frozenset(
        (layer, role)
        for role in roles
        for layer in {
            Role.EXPERT: config.sparse_layers,
            Role.DENSE_MLP: config.dense_layers,
            Role.ATTENTION: range(52),
        }[role]
    )
    return replace(plan, config=config, units=units)


def test_tensors_that_are_not_beams_are_not_advertised(nano_copy: Path) -> None:
    st.edit(
        nano_copy / "model.safetensors",
        lambda tensors: tensors.update({"mtp.head.weight": ("BF16", [2], bytes(4))}),
    )
    plan = make_plan(nano_copy)
    assert "cannot serve it as it is" in model_card(plan, Origin(), {})
    assert not {"vllm", "sglang"}.intersection(hub_metadata(plan, Origin())["tags"])
