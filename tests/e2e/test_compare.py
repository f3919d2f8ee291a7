"""`compare` against figures that others measured, against transformers, and against itself."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import CompressedTensorsConfig

from beamq.beam.tensors import QUANTIZABLE, Role
from beamq.cli import app
from beamq.convert.quantize import quantize
from beamq.errors import CheckpointError, ConfigError, UsageError
from beamq.eval.compare.compare import compare, overlap_notes
from beamq.eval.compare.sensitivity import sensitivity
from beamq.formats import fp8
from beamq.io.manifest import Manifest
from beamq.io.shard_writer import write_json
from beamq.model.context import Observer
from beamq.model.logits import logits
from beamq.report.model_card import card_gaps
from beamq.report.tables import summary
from tests.helpers.checkpoint_damage import edit_json, flip
from tests.helpers.model_fixtures import hf_logits, hf_model, quantized_copy, random_beam, text_ids

FP32 = torch.float32
ROWS, LENGTH = 16, 512
# The fixtures' figures were taken on this Python's library; others' sources are other text.
TOLERANCE = 0.05 if sys.version_info[:2] == (3, 11) else 0.2


def library_ids(folder: Path, first: int) -> np.ndarray[Any, Any]:
    """The standard library's top modules, sorted: even positions (0) or odd ones (1)."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids: list[int] = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[first::2]:
        ids += tokenizer.encode(path.read_text("utf-8"), add_special_tokens=False).ids
        if len(ids) >= ROWS * LENGTH:
            break
    return np.array(ids[: ROWS * LENGTH]).reshape(ROWS, LENGTH)


class ExpertAmax(Observer):
    """Largest magnitude at the experts of each layer, by fused group."""

    def __init__(self) -> None:
        self.found: dict[tuple[int, str], float] = {}

    def expert_input(self, layer: int, group: str, x_SK: torch.Tensor, *_: object) -> None:
        key = (layer, group.removesuffix("_proj"))
        if x_SK.numel():
            self.found[key] = max(self.found.get(key, 0.0), x_SK.abs().max().item())

    def of(self, group: str) -> float:
        parts = group.split(".")
        return self.found[int(parts[2]), parts[-1]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, beam_nano: Path) -> dict[str, Path]:
    """Experts in NVFP4 (largest-value scales, calibrated on odd modules) and in FP8; all in FP8."""
    root = tmp_path_factory.mktemp("compared")
    amax = ExpertAmax()
    logits(beam_nano, library_ids(beam_nano, 1)[:8], dtype=FP32, observers=[amax])
    experts = (Role.EXPERT,)
    return {
        "nvfp4": quantized_copy(
            beam_nano, root / "nvfp4", "nvfp4", roles=experts, input_amax=amax.of
        ),
        "fp8-experts": quantized_copy(beam_nano, root / "fp8-experts", "fp8", roles=experts),
        "fp8": quantized_copy(beam_nano, root / "fp8", "fp8"),
    }


def test_figures_of_the_fixtures(beam_nano: Path, made: dict[str, Path]) -> None:
    ids = library_ids(beam_nano, 0)
    steps: list[tuple[int, int]] = []
    found = compare(
        beam_nano,
        [made["nvfp4"], made["fp8-experts"]],
        input_ids=ids,
        progress=lambda done, total: steps.append((done, total)),
    )
    weights_only = compare(beam_nano, [made["nvfp4"]], input_ids=ids, gemm="weights-only")
    exact = "Mean KLD, weights exact"
    assert exact in {row[0] for row in summary(found.source, found.candidates).rows}
    only = summary(weights_only.source, weights_only.candidates).rows
    assert exact not in {row[0] for row in only}, "activations are exact there too"
    w4a4, w8a8 = found.candidates
    w4 = weights_only.candidates[0]
    for candidate, kld, top in ((w4a4, 0.0205, 0.931), (w8a8, 0.0020, 0.983), (w4, 0.0106, 0.947)):
        seen = candidate.divergence
        assert seen.mean_kld.value == pytest.approx(kld, rel=TOLERANCE), candidate.model.name
        assert seen.same_top.value == pytest.approx(top, abs=TOLERANCE / 10)
        assert (seen.tokens, seen.predicted) == (ROWS * LENGTH, ROWS * (LENGTH - 1))
        assert candidate.verdict.safe
        assert not candidate.not_the_sources
    assert steps[-1][0] == steps[-1][1]
    assert all(0.09 < weight.relative_rms < 0.105 for weight in w4a4.linears)
    assert all(0.023 < weight.relative_rms < 0.029 for weight in w8a8.linears)
    assert len(w4a4.linears) == len(w8a8.linears) == 5 * 16 * 3
    assert [layer.relative_error.value for layer in w4a4.layers[:3]] == [0.0, 0.0, 0.0]
    assert sum(layer.share for layer in w4a4.layers) == pytest.approx(1.0)
    sizes = w4a4.layers[4]
    assert sizes.extra_bytes_in_bf16 == 3 * 16 * 64 * 128 * 2 - sizes.quantized_bytes


def test_a_checkpoint_beside_itself(beam_nano: Path, made: dict[str, Path]) -> None:
    for folder in (beam_nano, made["nvfp4"]):
        ids = text_ids(beam_nano, 2, 130).numpy()
        found = compare(folder, [folder], input_ids=ids).candidates[0]
        seen = found.divergence
        assert seen.exact
        assert seen.mean_kld.value == seen.max_kld.value == seen.ln_ppl_ratio.value == 0.0
        assert seen.same_top.value == seen.top5_overlap.value == 1.0
        assert all(layer.relative_error.value == 0.0 for layer in found.layers)
        assert all(
            layer.expert_overlap.value == 1.0 for layer in found.layers if layer.expert_overlap
        )
        assert all(weight.relative_rms == 0.0 for weight in found.linears)
        assert found.verdict.safe
        assert "exactly" in found.verdict.headline


# --- against transformers -------------------------------------------------------------------


def fake_fp8(x: torch.Tensor) -> torch.Tensor:
    codes, scale = fp8.quantize_rows(x.flatten(0, -2))
    return fp8.dequantize_rows(codes, scale, x.dtype).view_as(x)


def quantize_activations(model: Any, roles: tuple[Role, ...]) -> None:
    """transformers' loader leaves activations as they are; engines do not."""
    for layer in model.model.layers:
        linears: list[Any] = []
        if Role.ATTENTION in roles:
            linears += [getattr(layer.self_attn, f"{n}_proj") for n in ("q", "k", "v", "gate", "o")]
        if hasattr(layer.mlp, "experts"):
            linears.append(layer.mlp.experts)
            inner = layer.mlp.experts._apply_gate
            layer.mlp.experts._apply_gate = lambda x, inner=inner: fake_fp8(inner(x))
        elif Role.DENSE_MLP in roles:
            linears += [layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj]
        for linear in linears:
            linear.register_forward_pre_hook(lambda _, args: (fake_fp8(args[0]), *args[1:]))


@pytest.mark.parametrize("name", ["fp8-experts", "fp8"])
def test_kld_and_perplexity_agree_with_transformers(
    name: str, beam_nano: Path, made: dict[str, Path]
) -> None:
    """To 1e-4, on rows in which no activation of either run fell on the other side of one of
    FP8's rounding boundaries: one that does moves everything behind it by as much as FP8 itself
    costs. Rows are short, so that most have none; over all rows the means agree within 5%.
    """
    ids = text_ids(beam_nano, 192, 8)
    base = hf_logits(hf_model(beam_nano, FP32), ids)
    model = hf_model(made[name], FP32, quantization_config=CompressedTensorsConfig(dequantize=True))
    quantize_activations(model, QUANTIZABLE if name == "fp8" else (Role.EXPERT,))
    theirs = hf_logits(model, ids)
    gap_B = (logits(made[name], ids, dtype=FP32) - theirs).abs().amax((1, 2))
    calm_B = gap_B < 1e-4
    assert calm_B.float().mean() > 0.3  # how many depends on the processor
    for rows_B, tolerance in ((calm_B, 1e-4), (torch.ones_like(calm_B), 0.05)):
        some = ids[rows_B]
        kld, ppl_base, ppl = by_hand(base[rows_B], theirs[rows_B], some)
        found = compare(beam_nano, [made[name]], input_ids=some.numpy()).candidates[0].divergence
        assert found.mean_kld.value == pytest.approx(kld, rel=tolerance)
        assert found.ppl_base.value == pytest.approx(ppl_base, rel=1e-4)
        assert found.ppl.value == pytest.approx(ppl, rel=tolerance)


def by_hand(
    base: torch.Tensor, other: torch.Tensor, ids: torch.Tensor
) -> tuple[float, float, float]:
    """(mean KLD, perplexity of both), straight from the definitions."""
    p, q = base.double().log_softmax(-1), other.double().log_softmax(-1)
    following = ids[:, 1:, None]
    losses = [-x[:, :-1].gather(-1, following).mean().item() for x in (p, q)]
    return (p.exp() * (p - q)).sum(-1).mean().item(), math.exp(losses[0]), math.exp(losses[1])


def test_perplexity_of_long_rows_agrees_with_transformers(beam_nano: Path) -> None:
    ids = text_ids(beam_nano, 4, 400)
    model = hf_model(beam_nano, FP32)
    _, expected, _ = by_hand(hf_logits(model, ids), hf_logits(model, ids), ids)
    found = compare(beam_nano, [beam_nano], input_ids=ids.numpy()).candidates[0].divergence
    assert found.ppl_base.value == pytest.approx(expected, rel=1e-4)


# --- inputs and notes -----------------------------------------------------------------------


def test_names_are_told_apart_and_tokenizers_looked_at(beam_nano: Path, tmp_path: Path) -> None:
    twin = Path(shutil.copytree(beam_nano, tmp_path / beam_nano.name))
    (twin / "tokenizer.json").write_text("{}")
    found = compare(beam_nano, [twin], samples=1, sequence_length=16)
    assert (found.source.name, found.candidates[0].model.name) == (
        f"{beam_nano.name} (1)",
        f"{beam_nano.name} (2)",
    )
    assert any("tokenizer" in note for note in found.candidates[0].notes)


def test_another_model_is_refused(beam_nano: Path, tmp_path: Path) -> None:
    other = random_beam(tmp_path / "other")
    with pytest.raises(ConfigError, match="only checkpoints of one model"):
        compare(beam_nano, [other], samples=1, sequence_length=16)


@pytest.mark.parametrize(
    "options",
    [
        {"sequence_length": 1 << 24},
        {"sequence_length": 1},
        {"dtype": "float16"},
        {"gemm": "magic"},
        {"input_ids": np.zeros(4, dtype=np.int64)},
        {"input_ids": np.full((1, 4), 1 << 20)},
    ],
)
def test_options_that_cannot_be(beam_nano: Path, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        compare(beam_nano, [beam_nano], **options)
    with pytest.raises(UsageError):
        compare(beam_nano, [])


def test_text_that_was_calibrated_on_is_told() -> None:
    evaluated = {"digest": "e", "sources": [{"digest": "x", "kind": "standard library"}]}

    def calibrated_on(digest: str, source: str, kind: str) -> dict[str, Any]:
        entry = {"digest": digest, "sources": [{"digest": source, "kind": kind}]}
        return {"input_scales": {"data": [entry]}}

    def note(data: dict[str, Any] | None) -> str:
        manifest = None if data is None else Manifest.parse(data)
        return " ".join(overlap_notes(manifest, evaluated))

    assert note(None) == note({"input_scales": {"description": "constant"}}) == ""
    assert note({"input_scales": {"data": 5}}) == note({"input_scales": {"data": [7]}}) == ""
    assert "calibrated on this text" in note(calibrated_on("e", "y", "text"))
    assert "calibrated on this text" in note(calibrated_on("c", "x", "text"))
    assert "no file is in both" in note(calibrated_on("c", "y", "standard library"))
    assert "may share" in note(calibrated_on("c", "y", "text"))


# --- the command ----------------------------------------------------------------------------


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    def command(*arguments: str | Path) -> tuple[int, str]:
        with pytest.raises(SystemExit) as left:
            app([str(argument) for argument in arguments], prog_name="beamq")
        return int(left.value.code or 0), capsys.readouterr().out

    return command


def test_the_command(
    run: Callable[..., tuple[int, str]], beam_nano: Path, made: dict[str, Path], tmp_path: Path
) -> None:
    size = ("--samples", "2", "--sequence-length", "64", "--quiet")
    code, text = run(
        "compare", beam_nano, made["nvfp4"], made["fp8"], "--report", tmp_path / "out", *size
    )
    assert code == 0
    assert max(map(len, text.splitlines())) <= 80
    for name in ("Mean KLD", "Same top p", "ln(PPL(Q)/PPL(base))", "in BF16", "Within bounds"):
        assert name in text, name
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "report.html",
        "report.json",
        "report.md",
    ]
    code, text = run("compare", beam_nano, made["fp8"], "--json", "--dtype", "bfloat16", *size)
    data = json.loads(text)
    assert (code, data["command"], data["settings"]["dtype"]) == (0, "compare", "bfloat16")
    assert data["candidates"][0]["divergence"]["mean_kld"]["value"] > 0


def test_folders_that_differ_at_the_end_of_a_long_name(
    run: Callable[..., tuple[int, str]], beam_nano: Path, made: dict[str, Path], tmp_path: Path
) -> None:
    folders = []
    for number in (1, 2):
        folders.append(tmp_path / f"a folder with a name of thirty and some letters, {number}")
        shutil.copytree(made["fp8"], folders[-1])
    size = ("--samples", "1", "--sequence-length", "16", "--quiet")
    code, text = run("compare", beam_nano, *folders, "--report", tmp_path / "out", *size)
    assert code == 0
    assert "...ome letters, 1" in text
    assert "...ome letters, 2" in text
    assert "One row has no standard error" in " ".join(text.split())
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("...y and some letters, 1<") == page.count("...y and some letters, 2<") == 4


def test_what_cannot_be_compared_is_refused_before_anything_is_said(
    beam_nano: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    other = random_beam(tmp_path / "other")
    capsys.readouterr()
    for candidate, device, code in (
        (beam_nano, "abacus", 2),
        (beam_nano, "cuda:99", 4),
        (tmp_path / "empty", "cpu", 3),
        (other, "cpu", 3),
    ):
        size = ["--samples", "1", "--sequence-length", "16", "--device", device]
        with pytest.raises(SystemExit) as left:
            app(["compare", str(beam_nano), str(candidate), *size], prog_name="beamq")
        assert left.value.code == code
        said = capsys.readouterr().err
        assert said.startswith("error: "), said


def test_out_of_bounds_is_exit_code_1(
    run: Callable[..., tuple[int, str]], beam_nano: Path, tmp_path: Path
) -> None:
    folder = quantized_copy(
        beam_nano, tmp_path / "bad", "nvfp4", roles=(Role.EXPERT,), input_amax=lambda _: 1e-3
    )
    code, text = run(
        "compare", beam_nano, folder, "--samples", "2", "--sequence-length", "64", "--quiet"
    )
    assert code == 1
    assert "Out of bounds: mean KLD" in text


def test_write_card(
    run: Callable[..., tuple[int, str]], beam_nano: Path, made: dict[str, Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(made["fp8"], tmp_path / "fp8"))
    options = ("--samples", "1", "--sequence-length", "32", "--quiet", "--write-card")
    assert run("compare", beam_nano, folder, *options)[0] == 3  # there is no card
    (folder / "README.md").write_text("# Mine\n")
    write_json(folder / "beamq.json", {"recipe": {"name": "fp8"}})
    for _ in range(2):  # the second time, in place of the first
        assert run("compare", beam_nano, folder, *options)[0] == 0
    text = (folder / "README.md").read_text()
    assert text.startswith("# Mine\n")
    assert text.count("| Mean KLD |") == 1
    assert str(tmp_path) not in text


def test_figures_are_in_the_cards_metadata(
    run: Callable[..., tuple[int, str]], beam_nano: Path, made: dict[str, Path], tmp_path: Path
) -> None:
    from huggingface_hub import EvalResult, ModelCard

    folder = Path(shutil.copytree(made["fp8"], tmp_path / "fp8"))
    write_json(folder / "beamq.json", {"recipe": {"name": "fp8"}})
    mine = (
        "model-index:\n- name: mine\n  results:\n  - task: {type: text-generation}\n"
        "    dataset: {name: MMLU, type: cais/mmlu}\n    metrics: [{type: accuracy, value: 0.5}]\n"
    )
    options = ("--samples", "1", "--sequence-length", "32", "--quiet", "--write-card")
    for front, theirs in ((f"license: mit\n{mine}", ["accuracy"]), ("license: mit\n", [])):
        (folder / "README.md").write_text(f"---\n{front}---\n# Beam in FP8\n")
        for _ in range(2):  # the second time, in place of the first
            assert run("compare", beam_nano, folder, *options)[0] == 0
        text = (folder / "README.md").read_text()
        data = ModelCard(text).data
        assert data.license == "mit"
        assert data.model_name == ("mine" if theirs else "Beam in FP8")
        results: list[EvalResult] = data.eval_results or []
        kinds = [each.metric_type for each in results]
        assert kinds == [*theirs, "perplexity", "kl_divergence", "same_top_token"]
        assert f"{results[-2].metric_value:.5f}" in text.partition("| Mean KLD |")[2]
        assert str(tmp_path) not in text
        assert not any(gap.startswith("model-index") for gap in card_gaps(folder))
    for line in (
        "license: [",
        "model-index: [x]",
        "tags: 5",
        "model-index: [{name: a, results: [b]}]",
    ):
        broken = f"---\n{line}\n---\n# A\n"
        (folder / "README.md").write_text(broken)
        assert run("compare", beam_nano, folder, *options)[0] == 0
        assert (folder / "README.md").read_text().startswith(broken)


def converted(nano: Path, output: Path) -> Path:
    quantize(nano, output, recipe="nvfp4", no_calibration=True)
    return output


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.4.mlp.experts.7.up_proj.weight",
        "model.layers.4.mlp.experts.7.up_proj.weight_scale",
        "model.norm.weight",
        "lm_head.weight",
        "model.embed_tokens.weight",
        "model.layers.2.self_attn.gate_bias",
        "model.layers.5.mlp.gate.weight",
    ],
)
def test_a_damaged_candidate_is_not_safe_to_serve(
    beam_nano: Path, tmp_path: Path, name: str
) -> None:
    """Its figures may look well: one bit of one weight hides below every bound."""
    good, bad = converted(beam_nano, tmp_path / "good"), tmp_path / "bad"
    shutil.copytree(good, bad)
    flip(bad, name)
    found = compare(beam_nano, [good, bad], input_ids=text_ids(beam_nano, 1, 64).numpy())
    whole, damaged = found.candidates
    assert (whole.damaged, damaged.damaged) == ((), (name,))
    assert whole.verdict.safe
    assert damaged.verdict.safe is False
    assert not found.safe
    assert "1 tensor does not match the checksums in beamq.json" in damaged.verdict.headline
    assert name in damaged.verdict.headline
    assert found.to_dict()["candidates"][1]["damaged"] == [name]


def test_what_cannot_be_held_against_a_manifest_is_said(beam_nano: Path, tmp_path: Path) -> None:
    folder = converted(beam_nano, tmp_path / "out")
    ids = text_ids(beam_nano, 1, 64).numpy()
    edit_json(folder / "config.json", lambda config: config.update(motto="mine"))
    (changed,) = compare(beam_nano, [folder], input_ids=ids).candidates
    assert "config.json changed since beamq.json was written" in changed.notes
    assert changed.verdict.safe
    edit_json(folder / "beamq.json", lambda manifest: manifest.update(checksum="crc"))
    (unknown,) = compare(beam_nano, [folder], input_ids=ids).candidates
    assert any("were not checked against beamq.json" in note for note in unknown.notes)
    (folder / "beamq.json").unlink()
    (bare,) = compare(beam_nano, [folder], input_ids=ids).candidates
    assert bare.damaged == ()


def write_two_bytes(path: Path) -> None:
    with path.open("r+b") as stream:
        stream.seek(-2, os.SEEK_END)
        stream.write(b"ab")


@pytest.mark.parametrize("place", [0, 1], ids=["source", "candidate"])
@pytest.mark.parametrize("call", [compare, sensitivity])
def test_a_model_that_changes_while_it_is_judged(
    nano_copy: Path, tmp_path: Path, call: Callable[..., object], place: int
) -> None:
    """Two bytes that are written meanwhile leave the shapes and, where no checksum is compared,
    the report as they are."""
    quantize(nano_copy, tmp_path / "out", no_calibration=True)
    shard = sorted((nano_copy, tmp_path / "out")[place].glob("*.safetensors"))[0]

    def change(done: int, total: int) -> None:
        write_two_bytes(shard)

    ids = [[1, 2, 3, 4]]
    kept = {"input_ids": ids} if call is compare else {"samples": 1, "sequence_length": 8}
    call(nano_copy, tmp_path / "out", device="cpu", **kept)
    with pytest.raises(CheckpointError, match=f"{shard.name}: changed while it was read") as raised:
        call(nano_copy, tmp_path / "out", device="cpu", progress=change, **kept)
    assert str(raised.value).endswith("do not change it during a run, and start again")


def test_a_model_that_changes_while_its_logits_are_computed(nano_copy: Path) -> None:

    class Change(Observer):
        def linear_input(self, layer: int, group: str, x_TK: torch.Tensor) -> None:
            write_two_bytes(nano_copy / "model.safetensors")

    logits(nano_copy, [[1, 2, 3]])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: changed while it was read"):
        logits(nano_copy, [[1, 2, 3]], observers=[Change()])
