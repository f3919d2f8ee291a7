"""Reading through the merge: PEFT's own results, every form of an adapter, and one rounding."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from beamq.adapter.merged import MergedFiles
from beamq.adapter.open import open_adapter
from beamq.adapter.record import merged_notes
from beamq.beam.config import BeamConfig
from beamq.errors import AdapterError, TensorError
from beamq.io.checkpoint import Checkpoint, open_checkpoint
from beamq.plan.sources import map_sources
from tests.helpers.adapters import (
    PREFIX,
    Tensors,
    changed,
    made,
    merged,
    pair,
    with_packed_experts,
)

NAMES = (
    "attention",
    "attention-gate-dense",
    "dora-attention",
    "experts-old-layout",
    "head-embedding",
    "router-saved",
    "rslora-patterns",
    "trained-tokens",
    "usual-seven-0.18.1",
    "usual-seven-0.21.2",
)
EXPERTS = "model.layers.3.mlp.experts"
Q = "model.layers.2.self_attn.q_proj"


def weights(checkpoint: Checkpoint) -> dict[str, bytes]:
    """Every weight by its name in a checkpoint with one tensor an expert."""
    found = {}
    mapping = map_sources(checkpoint, BeamConfig.from_dict(checkpoint.config))
    for role, place in mapping.found:
        data = bytearray(place.nbytes)
        checkpoint.read_into(place.spec, memoryview(data), place.start)
        found[role.name] = bytes(data)
    return found


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def tensor(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    return checkpoint.tensor(name).float()


@pytest.mark.parametrize("name", NAMES)
def test_fixtures_have_the_digests_of_the_fp32_sum_rounded_once(
    name: str, beam_nano: Path, adapters: Path
) -> None:
    expected = json.loads((adapters / name / "expected.json").read_text())["tensors"]
    base = weights(open_checkpoint(beam_nano))
    found = weights(merged(beam_nano, adapters / name))
    assert found.keys() == base.keys()
    assert {each for each in found if found[each] != base[each]} == expected.keys()
    assert {each: sha(found[each]) for each in expected} == {
        each: entry["sha256"] for each, entry in expected.items()
    }


@pytest.mark.parametrize("name", NAMES)
def test_two_roundings_give_peft_s_bytes(name: str, beam_nano: Path, adapters: Path) -> None:
    """What PEFT does to packed experts, the embedding and parameters: the delta is rounded to BF16
    before the sum is. The product is beamq's, read from a base of zeros."""
    expected = json.loads((adapters / name / "expected.json").read_text())["tensors"]
    twice = {each: entry for each, entry in expected.items() if entry["kind"] == "two-step"}
    view = merged(beam_nano, adapters / name)
    files = view.source
    assert isinstance(files, MergedFiles)
    for each, entry in twice.items():
        base = open_checkpoint(beam_nano).tensor(each)
        update = files.assignment.updates[each]
        a, b, _ = files._factors(each, update)  # type: ignore[arg-type]  # all are LowRank here
        delta = product(torch.from_numpy(a), torch.from_numpy(b)) * torch.tensor(update.scaling)  # type: ignore[union-attr]
        both = base + delta.to(torch.bfloat16)
        assert sha(both.view(torch.uint8).numpy().tobytes()) == entry["sha256_peft"], each
        once = (base.float() + delta).to(torch.bfloat16)
        differs = int((once.view(torch.int16) != both.view(torch.int16)).sum())
        assert differs == entry["elements_peft_differs"]


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """B A by one fused multiply-add a rank; FP64 holds each product exactly."""
    total = torch.zeros(b.shape[0], a.shape[1])
    for j in range(a.shape[0]):
        total = (total.double() + b[:, j : j + 1].double() * a[j].double()).float()
    return total


def test_packed_sources_give_the_same_weights(
    beam_nano: Path, adapters: Path, tmp_path: Path
) -> None:
    packed = with_packed_experts(beam_nano, tmp_path / "packed")
    for name in ("usual-seven-0.21.2", "experts-old-layout"):
        assert weights(merged(packed, adapters / name)) == weights(
            merged(beam_nano, adapters / name)
        )


def as_experts(tensors: Tensors, layer: int, layout: str) -> Tensors:
    """Packed pairs of a layer as one pair an expert and projection."""
    prefix = f"{PREFIX}model.layers.{layer}.mlp.experts"
    found: Tensors = {}
    for part, key in (("gate_up", ".base_layer"), ("down", "")):
        a, b = (tensors[f"{prefix}{key}.lora_{side}.weight"].float() for side in "AB")
        own = a.shape[0] // 16
        for expert in range(16):
            a_e = a.view(16, own, -1)[expert]
            b_e = b.view(b.shape[0], own, 16)[:, :, expert]
            if layout == "old":
                a_e, b_e = b_e.t(), a_e.t()
            halves = {"down_proj": b_e}
            if part == "gate_up":
                halves = {"gate_proj": b_e[:64], "up_proj": b_e[64:]}
            for proj, half in halves.items():
                name = f"model.layers.{layer}.mlp.experts.{expert}.{proj}"
                found |= {f"{name}.lora_A.weight": a_e, f"{name}.lora_B.weight": half}
    return found


@pytest.mark.parametrize("name", ["usual-seven-0.21.2", "experts-old-layout"])
def test_experts_one_by_one_give_the_same_weights(
    name: str, beam_nano: Path, adapters: Path, tmp_path: Path
) -> None:
    stored = load_file(adapters / name / "adapter_model.safetensors")
    old = name == "experts-old-layout"
    single = as_experts(stored, 3, "old" if old else "new")
    adapter = made(
        tmp_path / "single",
        single,
        lora_alpha=8 if old else 4,
        rank_pattern={} if old else {"gate_proj": 4, "up_proj": 4},
        alpha_pattern={} if old else {"gate_proj": 8, "up_proj": 8},
    )
    whole, found = (weights(merged(beam_nano, each)) for each in (adapters / name, adapter))
    mine = [each for each in whole if each.startswith(f"{EXPERTS}.")]
    assert len(mine) == 48
    assert {each: found[each] for each in mine} == {each: whole[each] for each in mine}


def test_columns_with_the_expert_slowest(beam_nano: Path, adapters: Path, tmp_path: Path) -> None:
    """Megatron-Bridge's order: all columns of an expert lie together."""

    def slowest(config: dict[str, Any], tensors: Tensors) -> None:
        del config["peft_version"]
        for name, stored in tensors.items():
            if ".mlp.experts." in name and ".lora_B." in name:
                tensors[name] = stored.view(len(stored), -1, 16).transpose(1, 2).flatten(1)

    other = changed(adapters / "usual-seven-0.21.2", tmp_path / "bridge", slowest)
    expected = weights(merged(beam_nano, adapters / "usual-seven-0.21.2"))
    assert weights(merged(beam_nano, other, order="slowest")) == expected
    assert weights(merged(beam_nano, other, order="fastest")) != expected


def test_a_side_that_all_experts_share(beam_nano: Path, tmp_path: Path) -> None:
    """Megatron-Bridge's "shared outer": A of gate and up, and B of down, once for all experts."""
    random = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random) / 16

    shared = {
        f"{EXPERTS}.gate_proj.lora_A.weight": draw(1, 2, 128),
        f"{EXPERTS}.up_proj.lora_A.weight": draw(1, 2, 128),
        f"{EXPERTS}.down_proj.lora_B.weight": draw(1, 128, 2),
    }
    own: Tensors = {}
    for e in range(16):
        own[f"{EXPERTS}.{e}.gate_proj.lora_B.weight"] = draw(64, 2)
        own[f"{EXPERTS}.{e}.up_proj.lora_B.weight"] = draw(64, 2)
        own[f"{EXPERTS}.{e}.down_proj.lora_A.weight"] = draw(2, 64)
    full = dict(own)
    for name, stored in shared.items():
        head, proj, side, _ = name.rsplit(".", 3)
        for e in range(16):
            full[f"{head}.{e}.{proj}.{side}.weight"] = stored[0]
    found = weights(merged(beam_nano, made(tmp_path / "shared", {**shared, **own})))
    assert found == weights(merged(beam_nano, made(tmp_path / "full", full)))
    assert found != weights(open_checkpoint(beam_nano))


def test_whole_experts_saved_are_split(beam_nano: Path, tmp_path: Path) -> None:
    base = load_file(with_packed_experts(beam_nano, tmp_path / "p") / "model.safetensors")
    saved = {name: base[name].float() * 1.5 for name in base if f"{EXPERTS}." in name}
    found = merged(beam_nano, made(tmp_path / "a", saved))
    for proj, rows in (("gate_proj", slice(0, 64)), ("up_proj", slice(64, 128))):
        expected = saved[f"{EXPERTS}.gate_up_proj"][7][rows].to(torch.bfloat16).float()
        assert tensor(found, f"{EXPERTS}.7.{proj}.weight").equal(expected)
    expected = saved[f"{EXPERTS}.down_proj"][15].to(torch.bfloat16).float()
    assert tensor(found, f"{EXPERTS}.15.down_proj.weight").equal(expected)


def test_saved_norms_and_biases_replace(beam_nano: Path, tmp_path: Path) -> None:
    names = ("model.norm.weight", "model.layers.1.self_attn.gate_bias")
    base = open_checkpoint(beam_nano)
    saved = {name: base.tensor(name).float() + 0.3 for name in names}
    found = merged(beam_nano, made(tmp_path / "a", saved))
    for name in names:
        assert tensor(found, name).equal(saved[name].to(torch.bfloat16).float())
        part = found.spec(name)
        piece = bytearray(4)  # not whole rows
        found.read_into(part, memoryview(piece), 3)
        assert piece == bytes(found.read(name))[3:7]


def test_dora_on_the_embedding_scales_columns(beam_nano: Path, tmp_path: Path) -> None:
    random = torch.Generator().manual_seed(3)
    a, b = torch.randn(2, 2048, generator=random) / 8, torch.randn(128, 2, generator=random) / 8
    m = torch.rand(128, generator=random) + 1
    adapter = made(
        tmp_path / "a",
        {
            "model.embed_tokens.lora_embedding_A": a,
            "model.embed_tokens.lora_embedding_B": b,
            "model.embed_tokens.lora_magnitude_vector": m,
        },
        use_dora=True,
    )
    base = open_checkpoint(beam_nano).tensor("model.embed_tokens.weight").float()
    summed = base + product(b.t(), a.t()) * 2
    norm = summed.double().square().sum(0).sqrt().float()
    found = tensor(merged(beam_nano, adapter), "model.embed_tokens.weight")
    assert found.equal((m / norm * summed).to(torch.bfloat16).float())


def test_an_adapted_router_is_f32_even_where_the_source_is_not(
    nano_copy: Path, tmp_path: Path
) -> None:
    gate = "model.layers.4.mlp.gate"
    stored = load_file(nano_copy / "model.safetensors")
    stored[f"{gate}.weight"] = stored[f"{gate}.weight"].to(torch.bfloat16)
    save_file(stored, nano_copy / "model.safetensors", metadata={"format": "pt"})
    tensors = pair(gate, 16, 128)
    found = merged(nano_copy, made(tmp_path / "a", tensors))
    delta = product(tensors[f"{gate}.lora_A.weight"], tensors[f"{gate}.lora_B.weight"]) * 2
    assert found.spec(f"{gate}.weight").dtype == "F32"
    assert found.tensor(f"{gate}.weight").equal(stored[f"{gate}.weight"].float() + delta)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_result_has_the_source_s_dtype(
    dtype: torch.dtype, nano_copy: Path, tmp_path: Path
) -> None:
    stored = load_file(nano_copy / "model.safetensors")
    stored[f"{Q}.weight"] = stored[f"{Q}.weight"].to(dtype)
    save_file(stored, nano_copy / "model.safetensors", metadata={"format": "pt"})
    tensors = pair(Q, 128, 128)
    delta = product(tensors[f"{Q}.lora_A.weight"], tensors[f"{Q}.lora_B.weight"]) * 2
    found = merged(nano_copy, made(tmp_path / "a", tensors)).tensor(f"{Q}.weight")
    assert found.equal((stored[f"{Q}.weight"].float() + delta).to(dtype))


def test_a_pair_with_a_side_of_zeros_copies_the_bytes(nano_copy: Path, tmp_path: Path) -> None:
    """-0.0 + 0.0 would be +0.0, so a weight that does not change is not added to."""
    stored = load_file(nano_copy / "model.safetensors")
    stored[f"{Q}.weight"][0, :8] = -0.0
    save_file(stored, nano_copy / "model.safetensors", metadata={"format": "pt"})
    tensors = pair(Q, 128, 128)
    tensors[f"{Q}.lora_B.weight"].zero_()
    found = merged(nano_copy, made(tmp_path / "zero", tensors))
    assert weights(found) == weights(open_checkpoint(nano_copy))
    assert "1 of 1 low-rank updates have an A or B of zeros" in merged_notes(found)[-1]
    tensors[f"{Q}.lora_B.weight"][5, 0] = 1
    one = merged(nano_copy, made(tmp_path / "one", tensors))
    assert "of zeros" not in " ".join(merged_notes(one))
    touched = one.tensor(f"{Q}.weight")
    assert not torch.signbit(touched[0, :8]).any()


def test_zero_halves_of_packed_experts_count_each_for_itself(
    beam_nano: Path, adapters: Path, tmp_path: Path
) -> None:
    """Expert 5's up_proj of layer 3 does not change where its rows of B are zero."""

    def zero(config: dict[str, Any], tensors: Tensors) -> None:
        stored = tensors[f"{PREFIX}{EXPERTS}.base_layer.lora_B.weight"]
        stored[64:, 5::16] = 0

    adapter = changed(adapters / "usual-seven-0.21.2", tmp_path / "a", zero)
    base, found = weights(open_checkpoint(beam_nano)), weights(merged(beam_nano, adapter))
    same = {each for each in found if EXPERTS in each and found[each] == base[each]}
    assert same == {f"{EXPERTS}.5.up_proj.weight"}


def test_any_range_is_cut_from_the_whole(beam_nano: Path, adapters: Path) -> None:
    view = merged(beam_nano, adapters / "dora-attention")
    name = f"{Q}.weight"
    whole, spec = bytes(view.read(name)), view.spec(name)
    for start, size in ((0, 1), (1, 3), (255, 2), (511, 4096), (spec.nbytes - 5, 5)):
        piece = bytearray(size)
        view.read_into(spec, memoryview(piece), start)
        assert piece == whole[start : start + size]
        assert list(view.peek_many([(spec, start, size)])) == [bytes(piece)]


def test_reads_by_many_threads_are_the_same(beam_nano: Path, adapters: Path) -> None:
    expected = weights(merged(beam_nano, adapters / "usual-seven-0.21.2"))
    view = merged(beam_nano, adapters / "usual-seven-0.21.2")
    names = [name for name in expected for _ in range(2)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda name: bytes(view.read(name)), reversed(names)))
    assert found == [expected[name] for name in reversed(names)]


def test_a_merged_weight_that_overflows_is_refused_by_name(beam_nano: Path, tmp_path: Path) -> None:
    tensors = pair(Q, 128, 128)
    tensors[f"{Q}.lora_A.weight"] *= 1e30
    tensors[f"{Q}.lora_B.weight"] *= 1e30
    view = merged(beam_nano, made(tmp_path / "a", tensors))
    with pytest.raises(TensorError, match=rf"{Q}\.weight: the merged weight holds NaN or inf"):
        view.read(f"{Q}.weight")


def test_a_base_copy_that_differs_in_one_bit_is_refused(
    beam_nano: Path, adapters: Path, tmp_path: Path
) -> None:
    def one_bit(config: dict[str, Any], tensors: Tensors) -> None:
        tensors[f"{PREFIX}lm_head.base_layer.weight"].view(torch.int16).view(-1)[1000] ^= 1

    other = changed(adapters / "head-embedding", tmp_path / "a", one_bit)
    with pytest.raises(AdapterError, match=r"differs from lm_head\.weight"):
        merged(beam_nano, other)


def test_tied_embeddings_and_quantized_sources_are_refused(nano_copy: Path, adapters: Path) -> None:
    stored = load_file(nano_copy / "model.safetensors")
    stored[f"{Q}.weight"] = stored[f"{Q}.weight"].to(torch.float8_e4m3fn)
    save_file(stored, nano_copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(AdapterError, match="high-precision original"):
        merged(nano_copy, adapters / "attention")
    config = json.loads((nano_copy / "config.json").read_text())
    (nano_copy / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    with pytest.raises(AdapterError, match=r"which config\.json ties"):
        merged(nano_copy, adapters / "head-embedding")


def test_what_is_no_adapter_says_so(beam_nano: Path, adapters: Path, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=r"no adapter_config\.json.*swapped"):
        open_adapter(beam_nano)
    folder = tmp_path / "pickled"
    folder.mkdir()
    shutil.copy(adapters / "attention" / "adapter_config.json", folder)
    with pytest.raises(AdapterError, match=r"no adapter_model\.safetensors; is the adapter whole"):
        open_adapter(folder)
    (folder / "adapter_model.bin").write_bytes(b"never read")
    with pytest.raises(AdapterError, match=r"only pickle files \(adapter_model\.bin\)"):
        open_adapter(folder)


def test_an_adapter_that_changes_while_it_is_read_is_named(
    beam_nano: Path, adapters: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "adapter"
    shutil.copytree(adapters / "attention", folder)
    checkpoint = merged(beam_nano, folder)
    checkpoint.read(f"{Q}.weight")
    checkpoint.check_unchanged()
    os.utime(folder / "adapter_model.safetensors", (1, 1))
    with pytest.raises(AdapterError, match=rf"{folder}/adapter_model\.safetensors: changed while"):
        checkpoint.check_unchanged()


def test_a_tokenizer_beside_the_adapter_is_pointed_out(
    beam_nano: Path, adapters: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "adapter"
    shutil.copytree(adapters / "attention", folder)
    shutil.copy(beam_nano / "tokenizer.json", folder)
    assert merged_notes(merged(beam_nano, folder))[1:] == ()
    (folder / "chat_template.jinja").write_text("another")
    (folder / "tokenizer_config.json").symlink_to("nowhere")
    notes = merged_notes(merged(beam_nano, folder))
    assert "the adapter's folder has chat_template.jinja, which the source" in notes[1]


def test_the_fingerprint_tells_how_packed_experts_are_read(beam_nano: Path, adapters: Path) -> None:
    """Else `--resume` would mix two readings of one file, and statistics of one serve the other."""
    adapter = adapters / "usual-seven-0.21.2"
    plain, same, other = (
        merged(beam_nano, adapter, **how)
        for how in ({}, {"order": "fastest", "layout": "new"}, {"order": "slowest"})
    )
    assert plain.fingerprint() == same.fingerprint() != other.fingerprint()
    assert plain.content_digest() == same.content_digest() != other.content_digest()


def test_the_digest_is_of_all_content(adapters: Path, tmp_path: Path) -> None:
    def one_bit(config: dict[str, Any], tensors: Tensors) -> None:
        tensors[f"{PREFIX}{Q}.lora_B.weight"].view(torch.int32).view(-1)[-1] ^= 1

    same = changed(adapters / "attention", tmp_path / "same", lambda c, t: None)
    bit = changed(adapters / "attention", tmp_path / "bit", one_bit)
    alpha = changed(adapters / "attention", tmp_path / "alpha", lambda c, t: c.update(lora_alpha=9))
    found = {open_adapter(each).digest for each in (same, bit, alpha)}
    assert len(found) == 3
    assert open_adapter(same).digest in found
