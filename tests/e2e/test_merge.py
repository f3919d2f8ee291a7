"""An adapter on the way to a served model: merge, quantize with it, verify, compare, resume."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import beamq
from beamq.adapter.inspect import is_adapter
from beamq.adapter.merged import merge_adapter
from beamq.adapter.open import open_adapter
from beamq.errors import AdapterError, CheckpointError, Interrupted, ResumeError, UsageError
from beamq.eval.compare.adapter_effect import _Reader
from beamq.io.checkpoint import open_checkpoint
from beamq.io.manifest import Manifest
from beamq.plan.recipe import BUILT_IN
from beamq.report.files import write_cards
from tests.helpers.adapters import changed
from tests.helpers.harness import Zygote, digests

ADAPTED = "usual-seven-0.21.2"
CALIBRATED = {"samples": 4, "sequence_length": 64, "seed": 1}


def weights(folder: Path) -> dict[str, str]:
    """Digests of what engines read; not of cards and beamq.json, which name the source."""
    names = ("README.md", "README.source.md", "beamq.json")
    return {name: digest for name, digest in digests(folder).items() if name not in names}


@pytest.fixture(scope="module")
def merged(beam_nano: Path, adapters: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """beam-nano with attention and experts adapted."""
    output = tmp_path_factory.mktemp("merged") / "out"
    beamq.merge(beam_nano, adapters / ADAPTED, output, max_shard_bytes=1_500_000)
    return output


@pytest.mark.parametrize("recipe", BUILT_IN)
def test_quantize_with_an_adapter_is_merge_then_quantize(
    recipe: str, beam_nano: Path, adapters: Path, merged: Path, tmp_path: Path
) -> None:
    how: dict[str, Any] = {"recipe": recipe, **(CALIBRATED if "nvfp4" in recipe else {})}
    beamq.quantize(merged, tmp_path / "two", **how)
    beamq.quantize(beam_nano, tmp_path / "one", adapter=adapters / ADAPTED, **how)
    assert weights(tmp_path / "one") == weights(tmp_path / "two")
    record = json.loads((tmp_path / "one" / "beamq.json").read_text())["adapter"]
    assert (record["name"], record["parts"]["experts"]) == (ADAPTED, 240)
    assert f"the adapter {ADAPTED} is merged" in (tmp_path / "one" / "README.md").read_text()
    # A folder made from the merged model says so as well.
    assert json.loads((tmp_path / "two" / "beamq.json").read_text())["adapter"] == record
    card = (tmp_path / "two" / "README.md").read_text()
    assert f"the source has the adapter '{ADAPTED}' merged in" in card


def test_a_merged_folder_verifies_against_source_and_adapter(
    beam_nano: Path, adapters: Path, merged: Path
) -> None:
    report = beamq.verify(merged, source=beam_nano, adapter=adapters / ADAPTED)
    assert report.ok
    assert report.check("source.copied").status == "pass"
    other = beamq.verify(merged, source=beam_nano, adapter=adapters / "attention")
    assert [check.name for check in other.failures] == ["source.copied"]
    with pytest.raises(UsageError, match="is without it; give --adapter"):
        beamq.verify(merged, source=beam_nano)
    with pytest.raises(UsageError, match="merged into the source"):
        beamq.verify(merged, adapter=adapters / ADAPTED)


def test_a_merged_f16_model_verifies(nano_copy: Path, adapters: Path, tmp_path: Path) -> None:
    """`merge` keeps the source's dtype, alone among the commands that write a model."""
    config = json.loads((nano_copy / "config.json").read_text())
    (nano_copy / "config.json").write_text(json.dumps({**config, "dtype": "float16"}))
    tensors = {
        name: tensor.half() if tensor.dtype == torch.bfloat16 else tensor
        for name, tensor in load_file(nano_copy / "model.safetensors").items()
    }
    save_file(tensors, nano_copy / "model.safetensors", metadata={"format": "pt"})
    adapter, output = adapters / "attention", tmp_path / "out"
    beamq.merge(nano_copy, adapter, output)
    report = beamq.verify(output, source=nano_copy, adapter=adapter)
    assert report.ok, report.failures
    config = json.loads((output / "config.json").read_text())
    (output / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    failed = [check.name for check in beamq.verify(output, level="structure").failures]
    assert "tensors.dtype" in failed


@pytest.mark.parametrize("name", [ADAPTED, "attention-gate-dense", "dora-attention"])
def test_merged_logits_are_peft_s_with_the_adapter(
    name: str, beam_nano: Path, adapters: Path, tmp_path: Path
) -> None:
    """PEFT's own forward pass, in FP32 with the adapter beside the weights; ours is of merged
    weights, which were rounded to BF16."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    beamq.merge(beam_nano, adapters / name, tmp_path / "out")
    ids = torch.arange(3, 131).view(2, 64)
    base = AutoModelForCausalLM.from_pretrained(beam_nano, dtype=torch.float32)
    with torch.no_grad():
        plain = base(ids).logits
        adapted = PeftModel.from_pretrained(base, adapters / name)(ids).logits
        ours = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)(ids)
    noise, effect = (float((each - adapted).norm()) for each in (ours.logits, plain))
    assert noise < 0.2 * effect


def test_calibrate_with_an_adapter_is_used_by_quantize(
    beam_nano: Path, adapters: Path, tmp_path: Path
) -> None:
    adapter = adapters / ADAPTED
    beamq.calibrate(beam_nano, tmp_path / "stats", adapter=adapter, **CALIBRATED)
    beamq.quantize(beam_nano, tmp_path / "given", adapter=adapter, calibration=tmp_path / "stats")
    beamq.quantize(beam_nano, tmp_path / "found", adapter=adapter, **CALIBRATED)
    assert weights(tmp_path / "given") == weights(tmp_path / "found")
    with pytest.raises(beamq.CalibrationError, match="calibrate this checkpoint"):
        beamq.quantize(beam_nano, tmp_path / "base", calibration=tmp_path / "stats")


def test_plan_compare_and_sensitivity_take_it(
    beam_nano: Path, adapters: Path, tmp_path: Path
) -> None:
    adapter = adapters / ADAPTED
    plain, planned = beamq.make_plan(beam_nano), beamq.make_plan(beam_nano, adapter=adapter)
    assert plain.digest() != planned.digest()
    assert plain.shards == planned.shards
    assert planned.notes[0].startswith(f"the adapter {ADAPTED} is merged")
    # 32 attention linears at rank 2; of 80 experts gate and up at rank 4 and down at rank 2
    attention = 8 * 2 * 2 * 128 * (128 + 64 + 64 + 128)
    experts = 80 * 2 * 64 * 128 * (4 + 4 + 2)
    said = f"adds {(attention + experts) / 1e12:,.3g} TFLOP of FP32 arithmetic"
    assert said in planned.hints[0]
    beamq.quantize(beam_nano, tmp_path / "fp8", recipe="fp8", adapter=adapter)
    size: dict[str, Any] = {"samples": 2, "sequence_length": 64}
    against = beamq.compare(beam_nano, tmp_path / "fp8", adapter=adapter, **size)
    base = beamq.compare(beam_nano, tmp_path / "fp8", **size)
    kld = [found.candidates[0].divergence.mean_kld.value for found in (against, base)]
    assert kld[0] < kld[1] / 3
    assert against.source.name == f"beam-nano+{ADAPTED}"
    assert [each.model.name for each in against.candidates] == ["fp8", "beam-nano"]
    parts = beamq.sensitivity(beam_nano, tmp_path / "fp8", adapter=adapter, **size)
    assert parts.mean_kld.value < kld[1] / 3


def test_compare_says_what_rounding_leaves_of_the_update(
    beam_nano: Path, adapters: Path, tmp_path: Path
) -> None:
    """FP8 keeps most of a large update; NVFP4 leaves mostly noise of one that is far below its
    grid's step, and says so."""

    def small(config: dict[str, Any], tensors: Any) -> None:
        config.update(lora_alpha=0.1, alpha_pattern={r".*\.gate_up_proj": 0.2})

    faint = changed(adapters / ADAPTED, tmp_path / "faint", small)
    size: dict[str, Any] = {"samples": 2, "sequence_length": 64}
    found = {}
    for recipe, adapter in (("fp8", adapters / ADAPTED), ("nvfp4-max", faint)):
        output = tmp_path / recipe
        beamq.quantize(
            beam_nano, output, recipe=recipe, adapter=adapter, no_calibration=recipe != "fp8"
        )
        found[recipe] = beamq.compare(beam_nano, output, adapter=adapter, **size).candidates[0]
    kept = {each.part: each for each in found["fp8"].adapter}
    assert set(kept) == {f"attention {p}_proj" for p in "qkvo"} | {"experts"}
    assert all(each.cosine > 0.9 and 0.9 < each.kept < 1.2 for each in kept.values())
    assert (kept["experts"].weights, kept["experts"].sampled) == (240, 12)
    assert not any("WARNING" in note for note in found["fp8"].notes)
    (experts,) = found["nvfp4-max"].adapter
    assert experts.cosine < 0.3
    assert experts.kept > 2
    assert any("WARNING: rounding eats" in note for note in found["nvfp4-max"].notes)


def test_rounding_of_the_base_is_the_converter_s(
    beam_nano: Path, adapters: Path, tmp_path: Path
) -> None:
    """Q(W) as `compare` computes it is what `quantize` writes for the base: their difference from
    the merged model's codes is then the update's effect alone."""
    view = merge_adapter(open_checkpoint(beam_nano), open_adapter(adapters / ADAPTED))
    for recipe in ("nvfp4", "nvfp4-max", "fp8"):
        output = tmp_path / recipe
        beamq.quantize(beam_nano, output, recipe=recipe, no_calibration=recipe != "fp8")
        with open_checkpoint(output) as base:
            reader = _Reader(view, base, Manifest.of(base.source))
            for proj in ("gate_proj", "down_proj"):
                name = f"model.layers.4.mlp.experts.3.{proj}.weight"
                data, dtype, k = reader._bytes(name, 0)
                rounded = reader._rounded(name, data, dtype, k)
                assert rounded.equal(reader._stored(name, k)), (recipe, name)


def test_a_resumed_run_refuses_another_adapter(
    beam_nano: Path, adapters: Path, tmp_path: Path
) -> None:
    def stop(progress: Any) -> None:
        raise KeyboardInterrupt

    how: dict[str, Any] = {"recipe": "fp8", "max_shard_bytes": 600_000, "workers": 1}
    output = tmp_path / "out"
    with pytest.raises((KeyboardInterrupt, Interrupted)):
        beamq.quantize(beam_nano, output, adapter=adapters / ADAPTED, on_progress=stop, **how)
    for other in (adapters / "attention", None):
        with pytest.raises(ResumeError, match="another --adapter"):
            beamq.quantize(beam_nano, output, adapter=other, resume=True, **how)
    beamq.quantize(beam_nano, output, adapter=adapters / ADAPTED, resume=True, **how)
    beamq.quantize(beam_nano, tmp_path / "whole", adapter=adapters / ADAPTED, **how)
    assert weights(output) == weights(tmp_path / "whole")


def test_a_resumed_run_refuses_another_reading_of_packed_experts(
    beam_nano: Path, adapters: Path, tmp_path: Path
) -> None:
    def stop(progress: Any) -> None:
        raise KeyboardInterrupt

    output, how = tmp_path / "out", {"max_shard_bytes": 600_000, "workers": 1}
    with pytest.raises((KeyboardInterrupt, Interrupted)):
        beamq.merge(beam_nano, adapters / ADAPTED, output, on_progress=stop, **how)
    with pytest.raises(CheckpointError, match=r"beamq merge SOURCE ADAPTER .*/out --resume"):
        beamq.verify(output)
    other: dict[str, Any] = {"resume": True, "expert_lora_order": "slowest", **how}
    with pytest.raises(ResumeError, match="--expert-lora options"):
        beamq.merge(beam_nano, adapters / ADAPTED, output, **other)
    beamq.merge(beam_nano, adapters / ADAPTED, output, resume=True, **how)


def test_what_comes_next_after_an_adapter(
    zygote: Zygote, nano_copy: Path, adapters: Path, tmp_path: Path
) -> None:
    """The command that `quantize` prints passes; without the adapter, `verify` asks for it; the
    merged model, whose card is its own, does as a source."""
    (nano_copy / "README.md").write_text("# A model\n")
    adapter, output, merged = adapters / "attention", tmp_path / "out", tmp_path / "merged"
    ran = zygote.run("quantize", nano_copy, output, "--adapter", adapter, "--recipe", "fp8")
    follow = shlex.split(ran.out.split("next: beamq ")[1])
    assert follow[-2:] == ["--adapter", str(adapter)]
    assert zygote.run(*follow).code == 0
    with pytest.raises(UsageError, match=r"adapter 'attention' is merged in.* give --adapter"):
        beamq.verify(output, source=nano_copy)
    beamq.merge(nano_copy, adapter, merged)
    report = beamq.verify(output, source=merged)
    assert report.ok, report.failures
    for source, said in ((nano_copy, True), (merged, False)):
        found = beamq.compare(source, output, samples=1, sequence_length=32).candidates[0]
        assert any("--adapter merges it" in note for note in found.notes) is said


def test_an_output_that_holds_the_adapter_is_refused(
    beam_nano: Path, adapters: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    beamq.merge(beam_nano, adapters / "attention", output)
    inside = output / "adapter"
    shutil.copytree(adapters / "attention", inside)
    before = digests(output)
    for run in (
        lambda: beamq.merge(beam_nano, inside, output, overwrite=True),
        lambda: beamq.merge(beam_nano, inside, inside),
        lambda: beamq.quantize(beam_nano, output, adapter=inside, recipe="fp8", overwrite=True),
    ):
        with pytest.raises(UsageError, match="holds the adapter"):
            run()
    assert digests(output) == before


@pytest.fixture(scope="module")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    made = Zygote(tmp_path_factory.mktemp("zygote"), "torch")
    yield made
    made.close()


@pytest.mark.parametrize("verb", ["merge", "quantize"])
def test_kills_and_two_ranks_leave_the_same_bytes(
    verb: str, zygote: Zygote, beam_nano: Path, adapters: Path, tmp_path: Path
) -> None:
    adapter = adapters / ADAPTED
    places: dict[str, tuple[Any, ...]] = {
        "merge": ("merge", beam_nano, adapter),
        "quantize": ("quantize", beam_nano, "--adapter", adapter, "-r", "fp8"),
    }

    def args(output: Path, *more: str) -> list[Any]:
        small = ["--quiet", "--workers", "1", "--max-shard-size", "1200000"]
        return [*places[verb], output, *small, *more]

    assert zygote.run(*args(tmp_path / "whole")).code == 0
    expected = weights(tmp_path / "whole")
    steps = zygote.count(*args(tmp_path / "count"))
    assert steps > 20
    for number, step in enumerate(range(1, steps, max(1, steps // 12))):
        output = tmp_path / f"killed-{number}"
        ended = zygote.run(*args(output), at=step, action="kill before")
        assert ended.killed
        ended = zygote.run(*args(output, "--resume"))
        assert (ended.code, ended.err) == (0, "")
        assert weights(output) == expected
    for ended in zygote.two_ranks(args(tmp_path / "ranks")):
        assert ended.code == 0, ended.err
    assert weights(tmp_path / "ranks") == expected


def test_nothing_is_written_for_an_adapter_that_is_refused(
    beam_nano: Path, adapters: Path, tmp_path: Path
) -> None:
    broken = changed(
        adapters / "attention", tmp_path / "a", lambda config, tensors: tensors.popitem() is None
    )
    output = tmp_path / "out"
    with pytest.raises(AdapterError):
        beamq.merge(beam_nano, broken, output)
    with pytest.raises(AdapterError):
        beamq.quantize(beam_nano, output, adapter=broken, no_calibration=True)
    with pytest.raises(UsageError, match="go with --adapter"):
        beamq.quantize(beam_nano, output, expert_lora_layout="new", no_calibration=True)
    assert not output.exists()


def test_inspect_counts_parts_and_says_what_would_be_refused(
    beam_nano: Path, adapters: Path, tmp_path: Path
) -> None:
    seen = beamq.inspect_adapter(adapters / ADAPTED, source=beam_nano)
    parts = {part.part: (part.adapted, part.weights) for part in seen.parts}
    assert parts["attention gate_proj"] == (0, 8)
    assert parts["experts"] == (240, 240)
    assert seen.packed_experts is not None
    assert (seen.packed_experts["layout"], seen.refused) == ("new", None)
    assert any("not the attention gates" in note for note in seen.notes)
    both = tmp_path / "both"
    shutil.copytree(adapters / "attention", both)
    shutil.copy(beam_nano / "config.json", both)
    assert is_adapter(both)
    assert not is_adapter(beam_nano)
    alone = beamq.inspect_adapter(adapters / ADAPTED)
    assert {part.part: part.weights for part in alone.parts}["packed experts"] is None
    pissa = changed(
        adapters / "attention", tmp_path / "a", lambda c, t: c.update(init_lora_weights="pissa")
    )
    refused = beamq.inspect_adapter(pissa, source=beam_nano).refused
    assert refused is not None
    assert "changes the base in training" in refused


def test_a_trained_adapter_goes_all_the_way(
    beam_nano: Path, repo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The example: train with PEFT, merge, quantize, verify, compare, write the card."""
    script = run_path(str(repo / "examples" / "train_adapter.py"))
    script["main"]([str(tmp_path / "trained"), "3"])
    assert "3 steps: loss from" in capsys.readouterr().out
    adapter = tmp_path / "trained"
    seen = beamq.inspect_adapter(adapter, source=beam_nano)
    parts = {part.part: (part.adapted, part.weights) for part in seen.parts}
    assert parts["attention gate_proj"] == (8, 8)
    assert parts["dense MLPs"] == (9, 9)
    assert parts["experts"] == (240, 240)
    assert seen.refused is None
    beamq.merge(beam_nano, adapter, tmp_path / "merged")
    beamq.quantize(tmp_path / "merged", tmp_path / "two", recipe="fp8")
    beamq.quantize(beam_nano, tmp_path / "one", recipe="fp8", adapter=adapter)
    assert weights(tmp_path / "one") == weights(tmp_path / "two")
    assert beamq.verify(tmp_path / "one", source=beam_nano, adapter=adapter).ok
    found = beamq.compare(
        beam_nano, tmp_path / "one", adapter=adapter, samples=2, sequence_length=64
    )
    write_cards(found, [tmp_path / "one"])
    card = (tmp_path / "one" / "README.md").read_text()
    assert "| part | linears |" in card
    assert "the adapter moves the model by" in card
