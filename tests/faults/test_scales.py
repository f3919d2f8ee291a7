"""Faults of scales and numbers: what is written is finite, shared where it must be, and exact."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from beamq.convert.dequantize import dequantize
from beamq.convert.quantize import quantize
from beamq.errors import TensorError
from beamq.model.gemm.reference import nvfp4_operand
from beamq.plan import recipe as recipes
from tests.helpers import safetensors_edit as st
from tests.helpers.checkpoint_damage import resign
from tests.helpers.craft import (
    convert,
    light_verify,
    put,
    read_json,
    recipe,
    scatter,
    source,
    to_bf16,
    values_of,
)
from tests.helpers.independent_decoder import E4M3, decode, tensors_of

E = "model.layers.3.mlp.experts.{}.{}_proj"
GRID = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


def gauss(n: int, k: int, size: float = 0.02, seed: int = 6) -> np.ndarray:
    chance = np.random.default_rng(seed)
    return (chance.standard_normal((n, k)) * size).astype(np.float32)


@dataclass(frozen=True, kw_only=True)
class Crafted:
    """Source and output tensors of one conversion of everything that is crafted below."""

    before: st.Tensors
    after: st.Tensors
    manifest: dict[str, object]
    output: Path

    def scale(self, module: str, kind: str = "weight_scale_2") -> np.float32:
        return np.float32(np.frombuffer(self.after[f"{module}.{kind}"][2], "<f4")[0])

    def blocks(self, module: str) -> np.ndarray:
        dtype, shape, data = self.after[f"{module}.weight_scale"]
        assert dtype == "F8_E4M3"
        return np.frombuffer(data, np.uint8).reshape(shape)

    def codes(self, module: str) -> np.ndarray:
        dtype, shape, data = self.after[f"{module}.weight"]
        packed = np.frombuffer(data, np.uint8).reshape(shape)
        if dtype != "U8":
            return packed
        return np.stack([packed & 15, packed >> 4], -1).reshape(shape[0], -1)


def craft(tensors: st.Tensors) -> None:
    """One expert of layer 3 for each fault; expert 15 is plain noise."""
    zero_block = gauss(64, 128, 0.003).clip(-0.0099, 0.0099)
    zero_block[0, 0] = 0.01
    zero_block[5, 16:32] = 0.0
    for proj in ("gate", "up"):
        put(tensors, f"{E.format(0, proj)}.weight", zero_block)
        put(tensors, f"{E.format(1, proj)}.weight", np.zeros((64, 128)))
    put(tensors, f"{E.format(1, 'down')}.weight", np.zeros((128, 64)))
    tiny = gauss(128, 64)
    tiny[0, 0] = 1.0
    tiny[7, 32:48] = np.where(np.arange(16) % 2, -1e-6, 1e-6)
    put(tensors, f"{E.format(2, 'down')}.weight", tiny)
    for proj, top in (("gate", 1.0), ("up", 4.0)):
        values = gauss(64, 128).clip(-0.9, 0.9)
        values[3, 40] = top
        put(tensors, f"{E.format(4, proj)}.weight", values)
    ladder = np.tile(np.array(GRID, np.float32), (128, 4))
    put(tensors, f"{E.format(5, 'down')}.weight", ladder)
    rows = gauss(128, 64)
    rows[9] = 0.0
    rows[10] = rows[10].clip(-1, 1)
    rows[10, 3] = 1.7568
    rows[11, 5] = -1.7568
    put(tensors, f"{E.format(6, 'down')}.weight", rows)
    put(tensors, f"{E.format(7, 'down')}.weight", np.full((128, 64), 1e-38))
    for proj, shape in (("gate", (64, 128)), ("up", (64, 128)), ("down", (128, 64))):
        put(tensors, f"{E.format(15, proj)}.weight", gauss(*shape))
    for number, part in enumerate(("q", "k", "v", "gate")):
        name = f"model.layers.1.self_attn.{part}_proj.weight"
        values = values_of(tensors, name).clip(-0.9, 0.9)
        values[0, 0] = 2.0**number
        put(tensors, name, values)
    for part, top in (("gate", 3.0), ("up", -7.0)):
        name = f"model.layers.0.mlp.{part}_proj.weight"
        values = values_of(tensors, name).clip(-0.9, 0.9)
        values[1, 1] = top
        put(tensors, name, values)
    bias = np.linspace(6.817, 7.063, 16).astype(np.float32)
    put(tensors, "model.layers.3.mlp.gate.e_score_correction_bias", bias, "F32")
    router = values_of(tensors, "model.layers.3.mlp.gate.weight").copy()
    router.view("<u4")[:] |= 0x00001357  # bits that BF16 does not have
    put(tensors, "model.layers.3.mlp.gate.weight", router, "F32")


@pytest.fixture(scope="module")
def made(beam_nano: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Crafted]:
    root = tmp_path_factory.mktemp("scales")
    folder = source(beam_nano, root / "source", craft)
    before = tensors_of(folder)
    found: dict[str, Crafted] = {}

    def make(kind: str) -> Crafted:
        if kind not in found:
            fmt, _, scales = kind.partition("-")
            chosen = recipe(fmt, scales=scales) if scales else recipe(fmt)
            convert(folder, root / kind, recipe=chosen)
            output = root / kind
            found[kind] = Crafted(
                before=before,
                after=tensors_of(output),
                manifest=read_json(output / "beamq.json"),
                output=output,
            )
        return found[kind]

    return make


NVFP4 = tuple(f"nvfp4-{scales}" for scales in getattr(recipes, "SCALES", ("max",)))


@pytest.mark.parametrize("kind", NVFP4)
def test_zero_block_MO1382(made: Callable[[str], Crafted], kind: str) -> None:
    module = E.format(0, "up")
    found = made(kind)
    blocks = found.blocks(module)
    assert not np.isin(blocks, (0x00, 0x7F, 0x80, 0xFF)).any()
    assert (decode(found.after, module)[5, 16:32] == 0).all()
    assert (found.codes(module)[5, 16:32] == 0).all()  # not even a negative zero


@pytest.mark.parametrize("kind", NVFP4)
def test_zero_tensor_and_expert_MO1382(made: Callable[[str], Crafted], kind: str) -> None:
    found = made(kind)
    for proj in ("gate", "up", "down"):
        module = E.format(1, proj)
        assert np.isfinite(found.scale(module))
        assert found.scale(module) > 0
        assert not found.codes(module).any()
        assert not np.isin(found.blocks(module), (0x00, 0x7F, 0x80, 0xFF)).any()
    counts = found.manifest["counts"]
    assert isinstance(counts, dict)
    names = [f"model.layers.3.mlp.experts.1.{group}" for group in ("down", "gate_up")]
    assert counts["zero_groups"] == names


def test_zero_row_of_fp8_MO1382(made: Callable[[str], Crafted]) -> None:
    found, module = made("fp8"), E.format(6, "down")
    scales = np.frombuffer(found.after[f"{module}.weight_scale"][2], "<f4")
    assert scales[9] == np.float32(1 / 448)
    assert not (found.codes(module)[9] & 0x7F).any()
    assert found.manifest["counts"]["zero_rows"] == 1 + 64 + 64 + 128  # type: ignore[index]


def test_tiny_block_VL34577(made: Callable[[str], Crafted]) -> None:
    found, module = made("nvfp4-max"), E.format(2, "down")
    assert found.blocks(module)[7, 2] == 0x01  # 2**-9, the smallest there is
    error = np.abs(decode(found.after, module)[7, 32:48]).max()
    assert error <= 2.0**-9 * found.scale(module) * 0.5 + 1e-6
    assert found.manifest["counts"]["underflow_blocks"] >= 1  # type: ignore[index]


@pytest.mark.parametrize("kind", NVFP4)
def test_fused_pair_shares_its_scale_VL54974_VL41045(
    made: Callable[[str], Crafted], kind: str
) -> None:
    found = made(kind)
    gate, up = E.format(4, "gate"), E.format(4, "up")
    assert found.scale(gate) == found.scale(up) == np.float32(4) / np.float32(2688)
    if kind == "nvfp4-max":
        assert found.blocks(gate)[3].max() == 0x6E  # 112
        assert found.blocks(up)[3].max() == 0x7E  # 448
    for kind_of_scale in ("weight_scale_2", "input_scale"):
        for layer, parts, top in ((1, ("q", "k", "v", "gate"), 8.0), (0, ("gate", "up"), 7.0)):
            block = "self_attn" if layer else "mlp"
            modules = [f"model.layers.{layer}.{block}.{part}_proj" for part in parts]
            shared = {found.scale(module, kind_of_scale).tobytes() for module in modules}
            assert len(shared) == 1
            if kind_of_scale == "weight_scale_2":
                assert shared == {(np.float32(top) / np.float32(2688)).tobytes()}


def test_nibble_order_SG23625(made: Callable[[str], Crafted]) -> None:
    found, module = made("nvfp4-max"), E.format(5, "down")
    packed = found.after[f"{module}.weight"][2]
    codes = [0, 1, 2, 3, 4, 5, 6, 7, 0, 9, 10, 11, 12, 13, 14, 15]  # -0.0 comes in as +0
    assert packed[:8] == bytes(a + 16 * b for a, b in zip(codes[::2], codes[1::2], strict=True))
    assert (found.codes(module) == np.tile(codes, (128, 4))).all()


def test_codes_come_from_the_stored_scale_MO2243(made: Callable[[str], Crafted]) -> None:
    found, module = made("nvfp4-max"), E.format(15, "down")
    weight = values_of(found.before, f"{module}.weight")
    stored = E4M3[found.blocks(module)].repeat(16, axis=1)
    step = stored * found.scale(module)
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    distance = np.abs(np.abs(weight)[..., None] / step[..., None] - grid)
    magnitude = (found.codes(module) & 7)[..., None]
    best = distance.min(-1, keepdims=True)
    assert (np.take_along_axis(distance, magnitude, -1) == best).all()
    assert (magnitude % 2 == 0)[(distance == best).sum(-1) > 1].all()  # ties go to even
    ideal = np.abs(weight).reshape(128, 4, 16).max(-1) / (6 * found.scale(module))
    assert (E4M3[found.blocks(module)] != ideal).any()  # else this would test nothing


def test_fp8_row_uses_its_stored_scale_vllm_fork2141(made: Callable[[str], Crafted]) -> None:
    found, module = made("fp8"), E.format(6, "down")
    dtype, shape, data = found.after[f"{module}.weight_scale"]
    assert (dtype, shape) == ("F32", [128, 1])
    amax = np.float32(bf16_of(1.7568))
    scales = np.frombuffer(data, "<f4")
    assert scales[10] == scales[11] == amax / np.float32(448)
    assert found.codes(module)[10, 3] == 0x7E  # 448
    assert found.codes(module)[11, 5] == 0xFE  # -448
    assert not np.isin(found.codes(module), (0x7F, 0xFF)).any()


def bf16_of(value: float) -> float:
    return float(np.frombuffer(b"\0\0" + to_bf16(np.array([value], np.float32)), "<f4")[0])


def test_rows_below_the_normal_range_keep_a_usable_scale(made: Callable[[str], Crafted]) -> None:
    fp8, module = made("fp8"), E.format(7, "down")
    scales = np.frombuffer(fp8.after[f"{module}.weight_scale"][2], "<f4")
    assert (scales == np.float32(2.0**-126)).all()
    assert np.isfinite(1 / scales).all()
    assert made("nvfp4-max").scale(module) == np.float32(2.0**-126)


@pytest.mark.parametrize("kind", [*NVFP4, "fp8"])
def test_router_bits_SG31213_VL14027(made: Callable[[str], Crafted], kind: str) -> None:
    found = made(kind)
    for name in ("weight", "e_score_correction_bias"):
        name = f"model.layers.3.mlp.gate.{name}"
        assert found.after[name] == found.before[name]
        assert found.after[name][0] == "F32"


@pytest.mark.parametrize(
    ("kind", "low", "high"),
    [*((kind, 0.08, 0.105) for kind in NVFP4), ("nvfp4-max", 0.09, 0.105), ("fp8", 0.023, 0.029)],
)
def test_independent_reader_on_gaussian_tensors_imp1433_HF48371(
    made: Callable[[str], Crafted], kind: str, low: float, high: float
) -> None:
    found = made(kind)
    for proj in ("gate", "up", "down"):
        module = E.format(15, proj)
        weight = values_of(found.before, f"{module}.weight")
        error = np.linalg.norm(decode(found.after, module) - weight) / np.linalg.norm(weight)
        assert low < error < high
        if kind != "fp8":
            assert 0 < found.scale(module) < 1


@pytest.mark.parametrize("kind", [*NVFP4, "fp8"])
def test_nothing_crafted_is_a_fault_to_verify(made: Callable[[str], Crafted], kind: str) -> None:
    report = light_verify(made(kind).output, source=made(kind).output.parent / "source")
    assert report.ok, report.failures


def test_fused_partners_in_other_shards_LLMC2566(
    made: Callable[[str], Crafted], beam_nano: Path, tmp_path: Path
) -> None:
    folder = source(beam_nano, tmp_path / "apart", craft)
    names = list(st.load(folder / "model.safetensors"))
    apart = [[n for n in names if f"{part}_proj" in n] for part in ("q", "k", "v", "gate", "up")]
    rest = [n for n in names if not any(n in part for part in apart)]
    scatter(folder, [rest, *apart])
    convert(folder, tmp_path / "out")
    assert tensors_of(tmp_path / "out") == made("nvfp4-max").after


NONFINITE = [
    ("model.layers.7.mlp.experts.15.gate_proj.weight", (63, 127), "NVFP4 partner"),
    ("model.layers.0.self_attn.o_proj.weight", (127, 0), "attention"),
    ("model.layers.2.mlp.down_proj.weight", (0, 511), "dense"),
    ("model.layers.7.self_attn.q_norm.weight", (31,), "head norm"),
    ("model.layers.3.self_attn.gate_bias", (3,), "gate bias"),
    ("model.layers.5.mlp.gate.weight", (15, 127), "router"),
    ("model.layers.5.mlp.gate.e_score_correction_bias", (0,), "router bias"),
    ("model.embed_tokens.weight", (2047, 127), "embedding"),
]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf], ids=["nan", "inf", "-inf"])
@pytest.mark.parametrize(
    ("name", "place"), [case[:2] for case in NONFINITE], ids=[case[2] for case in NONFINITE]
)
def test_not_finite_LC11764(
    beam_nano: Path, tmp_path: Path, name: str, place: tuple[int, ...], value: float
) -> None:
    def poison(tensors: st.Tensors) -> None:
        values = values_of(tensors, name).copy()
        values[place] = value
        put(tensors, name, values)

    folder = source(beam_nano, tmp_path / "source", poison)
    fmt = "fp8" if value == np.inf else "nvfp4"
    with pytest.raises(TensorError) as caught:
        convert(folder, tmp_path / "out", fmt)
    text = str(caught.value)
    assert name in text
    flat = int(np.ravel_multi_index(place, values_of(st.load(folder / "model.safetensors"),
                                                     name).shape))  # fmt: skip
    assert f"first at {list(place)}" in text or f"first at element {flat}" in text
    assert not list((tmp_path / "out").glob("*.json"))


@pytest.mark.parametrize(
    ("dtype", "bits"), [("F32", b"\x00\x00\xc0\x7f"), ("F16", b"\x00\x7c")], ids=["F32", "F16"]
)
def test_not_finite_in_other_dtypes_LC11764(
    beam_nano: Path, tmp_path: Path, dtype: str, bits: bytes
) -> None:
    name = "model.layers.6.mlp.experts.0.up_proj.weight"

    def poison(tensors: st.Tensors) -> None:
        put(tensors, name, values_of(tensors, name), dtype)
        kind, shape, data = tensors[name]
        tensors[name] = (kind, shape, data[:-4] + bits * (4 // len(bits)))

    folder = source(beam_nano, tmp_path / "source", poison)
    with pytest.raises(TensorError, match=rf"{name}.*first at \[63, 12[67]\]"):
        convert(folder, tmp_path / "out")


@pytest.mark.parametrize("dtype", ["F32", "F16"])
def test_other_sources_are_quantized_from_their_own_values_mlx_lm444(
    beam_nano: Path, tmp_path: Path, dtype: str
) -> None:
    """Values that BF16 cannot hold: codes and scales must be those of the values themselves."""
    name, precise = f"{E.format(2, 'down')}.weight", "model.norm.weight"
    fine = (gauss(128, 64) + 1e-5).astype(np.float16).astype(np.float32)
    fine_norm = np.linspace(0.5, 1.5, 128).astype(np.float16).astype(np.float32)

    def refine(tensors: st.Tensors) -> None:
        for other in list(tensors):
            if tensors[other][0] == "BF16":
                put(tensors, other, values_of(tensors, other), dtype)
        put(tensors, name, fine, dtype)
        put(tensors, precise, fine_norm, dtype)

    folder = source(beam_nano, tmp_path / "source", refine)
    result = convert(folder, tmp_path / "out")
    after = tensors_of(tmp_path / "out")
    scale = np.frombuffer(after[f"{E.format(2, 'down')}.weight_scale_2"][2], "<f4")[0]
    assert scale == np.abs(fine).max() / np.float32(2688)
    assert after[precise] == ("BF16", [128], to_bf16(fine_norm))
    assert after["model.layers.3.mlp.gate.weight"][0] == "F32"
    assert read_json(tmp_path / "out" / "config.json")["dtype"] == "bfloat16"
    sizes = {p.name: p.stat().st_size for p in (tmp_path / "out").glob("*.safetensors")}
    assert {shard.name: shard.nbytes for shard in result.plan.shards} == sizes


def test_values_beyond_bf16_are_refused_not_made_infinite(beam_nano: Path, tmp_path: Path) -> None:
    def stretch(tensors: st.Tensors) -> None:
        values = values_of(tensors, "model.norm.weight").copy()
        values[5] = 3.4e38
        put(tensors, "model.norm.weight", values, "F32")

    folder = source(beam_nano, tmp_path / "source", stretch)
    with pytest.raises(TensorError, match=r"model\.norm\.weight.*BF16"):
        convert(folder, tmp_path / "out")


@pytest.mark.parametrize(
    ("fmt", "part", "raw"),
    [
        ("nvfp4", "weight_scale", b"\x7f"),
        ("nvfp4", "weight_scale_2", b"\x00\x00\x80\x7f"),
        ("fp8", "weight", b"\x7f"),
        ("fp8", "weight_scale", b"\x00\x00\xc0\x7f"),
    ],
)
def test_decoding_refuses_what_is_not_finite(
    beam_nano: Path, tmp_path: Path, fmt: str, part: str, raw: bytes
) -> None:
    """The sibling of a NaN in a source: one among the codes or scales of a quantized folder."""
    module = E.format(2, "down")
    convert(beam_nano, tmp_path / "quantized", fmt)

    def poison(tensors: st.Tensors) -> None:
        dtype, shape, data = tensors[f"{module}.{part}"]
        tensors[f"{module}.{part}"] = (dtype, shape, raw + data[len(raw) :])

    st.edit(next((tmp_path / "quantized").glob("*.safetensors")), poison)
    resign(tmp_path / "quantized")
    with pytest.raises(TensorError, match=rf"{module}.*beamq verify"):
        dequantize(tmp_path / "quantized", tmp_path / "out")


# What calibration meets ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def calibrated(
    beam_nano: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[st.Tensors, dict[str, object]]:
    """Layer 4: an expert never routed; 5 and 6: one whose down input is 0, or 1e-36."""
    root = tmp_path_factory.mktemp("calibrated")

    def change(tensors: st.Tensors) -> None:
        name = "model.layers.4.mlp.gate.e_score_correction_bias"
        bias = values_of(tensors, name).copy()
        bias[3] = -100
        put(tensors, name, bias)
        for layer, size in ((5, 0.0), (6, 1e-36)):
            name = f"model.layers.{layer}.mlp.experts.8.up_proj.weight"
            put(tensors, name, np.full((64, 128), size))

    folder = source(beam_nano, root / "source", change)
    quantize(folder, root / "out", recipe=recipe(), samples=4, sequence_length=64)
    return tensors_of(root / "out"), read_json(root / "out" / "beamq.json")


@pytest.mark.parametrize(
    "layer", [4, 5, 6], ids=["never routed VL45212 VL54444", "zero CT595 MO1265", "1e-36 CT595"]
)
def test_every_expert_gets_the_input_scale_of_its_peers(
    calibrated: tuple[st.Tensors, dict[str, object]], layer: int
) -> None:
    tensors, _ = calibrated
    for proj in ("gate", "up", "down"):
        raw = [
            tensors[f"model.layers.{layer}.mlp.experts.{expert}.{proj}_proj.input_scale"][2]
            for expert in range(16)
        ]
        scales = np.frombuffer(b"".join(raw), "<f4")
        assert np.isfinite(scales).all()
        assert (scales >= 2.0**-126).all()
        assert np.isfinite(1 / scales).all()
        assert len(set(raw)) == 1
    gate_up = f"model.layers.{layer}.mlp.experts.0.gate_proj.input_scale"
    down = f"model.layers.{layer}.mlp.experts.0.down_proj.input_scale"
    assert tensors[gate_up][2] != tensors[down][2]


def test_larger_inputs_than_calibration_saw_have_room(beam_nano: Path, tmp_path: Path) -> None:
    """Headroom moves input scales alone, by its factor to the bit; card and `verify` say it."""
    small: dict[str, Any] = {"samples": 4, "sequence_length": 64, "statistics": tmp_path / "stats"}
    made: dict[int | None, st.Tensors] = {}
    for room in (1, 8, None):
        output = tmp_path / str(room)
        quantize(beam_nano, output, recipe="nvfp4", activation_headroom=room, **small)
        made[room] = tensors_of(output)
        small = {"calibration": tmp_path / "stats"}
        said = 2 if room is None else room
        record = read_json(output / "beamq.json")
        assert record["input_scales"]["headroom"] == record["recipe"]["headroom"] == said
        room_said = f"room for {said} times" if said > 1 else "no room above"
        assert f"{room_said} the largest input" in (output / "README.md").read_text()
        found = light_verify(output).check("scales.input")
        assert (found.status, found.detail) == (
            "pass", f"scalars: 240, for {said} x the largest calibrated input"
        )  # fmt: skip
    for room, factor in ((8, 8), (None, 2)):
        for name, (dtype, shape, data) in made[1].items():
            wanted = data
            if name.endswith(".input_scale"):
                wanted = (np.frombuffer(data, "<f4") * np.float32(factor)).tobytes()
            assert made[room][name] == (dtype, shape, wanted), name

    # What room is for: an input of twice the calibrated largest, as served.
    scale = torch.tensor(2.0**-10)  # of a calibrated largest input of 2.625
    x_TK = torch.full((1, 16), 2 * 2.625)
    assert (nvfp4_operand(x_TK, scale) * scale == 2.625).all()
    assert torch.equal(nvfp4_operand(x_TK, 2 * scale) * 2 * scale, x_TK)


@pytest.mark.parametrize("value", [np.nan, np.inf, -1.0, 0.0, 1e-39, 1e37])
def test_verify_survives_any_global_scale(beam_nano: Path, tmp_path: Path, value: float) -> None:
    """Found here: with `--source`, an unusable scale ended in an internal error."""
    convert(beam_nano, tmp_path / "out")
    modules = [E.format(2, "gate"), E.format(2, "up")]

    def change(tensors: st.Tensors) -> None:
        for module in modules:
            put(tensors, f"{module}.weight_scale_2", np.array(value, np.float32), "F32")

    st.edit(next((tmp_path / "out").glob("*.safetensors")), change)
    report = light_verify(tmp_path / "out", source=beam_nano)
    named = {check.name: check.where for check in report.failures}
    assert {*modules} <= set(named["source.bound"])
