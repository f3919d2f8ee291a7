"""Statistics: names, checks, merging, the file and what a hostile one is refused for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file, save, save_file

from beamq.calib.statistics import (
    MAX_DROPPED_NAMES,
    METADATA_KEY,
    CalibrationStats,
    InputStats,
    entry_of,
    load_stats,
    merge,
    save_stats,
)
from beamq.errors import CalibrationError, DiskError

EXPERTS, HIDDEN = 4, 8


def f32(values: Any) -> Any:
    return np.asarray(values, dtype=np.float32)


def i64(values: Any) -> Any:
    return np.asarray(values, dtype=np.int64)


def entry(rng: np.random.Generator, shape: tuple[int, ...]) -> InputStats:
    amax = f32(rng.uniform(0.1, 9.0, shape))
    return InputStats(amax=amax, rows=i64(rng.integers(1, 100, shape)))


def make(seed: int = 0, **fields: Any) -> CalibrationStats:
    rng = np.random.default_rng(seed)
    inputs = {
        "layers.0.self_attn.qkv_gate": entry(rng, ()),
        "layers.0.mlp.down": entry(rng, ()),
        "layers.1.experts.gate_up": entry(rng, (EXPERTS,)),
        "layers.1.experts.down": entry(rng, (EXPERTS,)),
    }
    chosen: dict[str, Any] = {
        "model_name": "beam-test",
        "model_fingerprint": "ab" * 32,
        "experts": "routed",
        "total_tokens": 100,
        "inputs": inputs,
        "routed_tokens": {1: i64(rng.integers(0, 100, EXPERTS))},
        "data": ({"digest": f"data-{seed}", "sources": [{"name": "x", "tokens": 100}]},),
        "versions": {"beamq": "0.1.0"},
        "dropped_rows": 1,
        "dropped_names": ("sample 3, layer 1",),
    }
    return CalibrationStats(**{**chosen, **fields})


def as_plain(stats: CalibrationStats) -> dict[str, Any]:
    """Everything in a form that `==` compares bit for bit."""
    plain = {
        f"{name}.{key}": (array.dtype.str, array.shape, array.tobytes())
        for name, found in stats.inputs.items()
        for key, array in found.arrays().items()
    }
    routed = {layer: counts.tobytes() for layer, counts in stats.routed_tokens.items()}
    names = ("model_name", "model_fingerprint", "experts", "total_tokens", "data", "versions")
    more = ("dropped_rows", "dropped_names")
    domains = {layer: counts.tolist() for layer, counts in stats.domain_tokens.items()}
    fields = {name: getattr(stats, name) for name in (*names, *more)}
    return {"inputs": plain, "routed": routed, "domains": domains} | fields


def two_domains(seed: int) -> CalibrationStats:
    """`make` with its tokens divided into two domains."""
    stats = make(seed)
    record = {**stats.data[0], "domains": ["code", f"prose {seed}"]}
    first = stats.routed_tokens[1] // 3
    return replace(
        stats,
        data=(record,),
        domain_tokens={1: np.stack([first, stats.routed_tokens[1] - first])},
    )


class TestNames:
    @pytest.mark.parametrize(
        ("module", "expected"),
        [
            ("model.layers.3.mlp.experts.7.down_proj", ("layers.3.experts.down", 7)),
            ("model.layers.3.mlp.experts.7.gate_proj", ("layers.3.experts.gate_up", 7)),
            ("model.layers.3.mlp.experts.7.up_proj", ("layers.3.experts.gate_up", 7)),
            ("model.layers.0.mlp.gate_proj", ("layers.0.mlp.gate_up", None)),
            ("model.layers.0.mlp.down_proj", ("layers.0.mlp.down", None)),
            ("model.layers.12.self_attn.o_proj", ("layers.12.self_attn.o", None)),
            *(
                (f"model.layers.12.self_attn.{x}_proj", ("layers.12.self_attn.qkv_gate", None))
                for x in ("q", "k", "v", "gate")
            ),
        ],
    )
    def test_entry_of(self, module: str, expected: tuple[str, int | None]) -> None:
        assert entry_of(module) == expected

    @pytest.mark.parametrize(
        "module",
        [
            "lm_head",
            "model.embed_tokens",
            "model.layers.3.mlp.gate",
            "model.layers.3.mlp.experts.gate_up_proj",
            "model.layers.3.self_attn.q_norm",
            "vision.layers.3.mlp.down_proj",
        ],
    )
    def test_what_is_no_linear_is_refused(self, module: str) -> None:
        with pytest.raises(CalibrationError, match="not a linear"):
            entry_of(module)


class TestChecks:
    @pytest.mark.parametrize(
        ("name", "broken", "message"),
        [
            ("layers.0.mlp.down", {"amax": f32(np.nan)}, "negative or not finite"),
            ("layers.0.mlp.down", {"amax": f32(np.inf)}, "negative or not finite"),
            ("layers.0.mlp.down", {"amax": f32(-1)}, "negative or not finite"),
            ("layers.0.mlp.down", {"amax": np.float64(1)}, "is float64, expected float32"),
            ("layers.0.mlp.down", {"rows": i64(-1)}, "negative or not finite"),
            ("layers.0.mlp.down", {"rows": f32(1)}, "is float32, expected int64"),
            ("layers.0.mlp.down", {"amax": f32([1]), "rows": i64([1])}, "expected \\[\\]"),
            ("layers.1.experts.down", {"rows": i64([1] * 5)}, "has shapes"),
            ("layers.1.experts.down", {"amax": f32(1), "rows": i64(1)}, "expected \\[E\\]"),
        ],
    )
    def test_bad_arrays(self, name: str, broken: dict[str, Any], message: str) -> None:
        stats = make()
        inputs = {**stats.inputs, name: replace(stats.inputs[name], **broken)}
        with pytest.raises(CalibrationError, match=message):
            replace(stats, inputs=inputs)

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"experts": "some"}, "not routed or all"),
            ({"total_tokens": -1}, "total_tokens is -1"),
            ({"dropped_rows": -1}, "dropped_rows is -1"),
            ({"routed_tokens": {}}, "not that of"),
            ({"routed_tokens": {1: i64([1, 2])}}, "not that of"),
            ({"routed_tokens": {1: i64([[1, 2, 3, 4]])}}, "expected \\[E\\]"),
            ({"routed_tokens": {1: i64([-1, 2, 3, 4])}}, "negative"),
            ({"routed_tokens": {1: f32([1, 2, 3, 4])}}, "expected int64"),
            ({"domain_tokens": {1: i64([1, 2, 3, 4])}}, "expected \\(1, 4\\)"),
            ({"domain_tokens": {1: i64([[1, 2, 3, 4]] * 2)}}, "expected \\(1, 4\\)"),
            ({"domain_tokens": {1: f32([[1, 2, 3, 4]])}}, "expected int64"),
            ({"domain_tokens": {2: i64([[1, 2, 3, 4]])}}, "expected \\(1, 0\\)"),
            ({"inputs": {"layers.0.mlp.gate": InputStats(amax=f32(1), rows=i64(1))}}, "unknown"),
            ({"inputs": {"layers.00.mlp.down": InputStats(amax=f32(1), rows=i64(1))}}, "unknown"),
        ],
    )
    def test_bad_fields(self, fields: dict[str, Any], message: str) -> None:
        with pytest.raises(CalibrationError, match=message):
            make(**fields)

    def test_other_model_is_refused_by_name(self) -> None:
        make().check_model("ab" * 32, "beam-test")
        with pytest.raises(CalibrationError, match=r"'beam-test' \(abab.*'beam-other' \(cdcd"):
            make().check_model("cd" * 32, "beam-other")

    def test_with_layer_adds(self) -> None:
        whole = make()
        names = [name for name in whole.inputs if name.startswith("layers.0.")]
        part = replace(whole, inputs={name: whole.inputs[name] for name in names}, routed_tokens={})
        rest = {name: found for name, found in whole.inputs.items() if name not in names}
        assert as_plain(part.with_layer(rest, whole.routed_tokens)) == as_plain(whole)


class TestMerge:
    def test_values(self) -> None:
        first, second = make(1), make(2)
        merged = merge(first, second)
        for name, found in merged.inputs.items():
            a, b = first.inputs[name].arrays(), second.inputs[name].arrays()
            assert (found.amax == np.maximum(a["amax"], b["amax"])).all()
            assert (found.rows == a["rows"] + b["rows"]).all()
        both = first.routed_tokens[1] + second.routed_tokens[1]
        assert (merged.routed_tokens[1] == both).all()
        assert merged.total_tokens == 200
        assert merged.data_digests == ("data-1", "data-2")
        assert merged.dropped_rows == 2

    @given(seeds=st.tuples(st.integers(0, 50), st.integers(51, 99)))
    def test_commutative_bit_for_bit(self, seeds: tuple[int, int]) -> None:
        first, second = (make(seed, dropped_names=()) for seed in seeds)
        one, other = as_plain(merge(first, second)), as_plain(merge(second, first))
        assert sorted(one.pop("data"), key=str) == sorted(other.pop("data"), key=str)
        assert one == other

    def test_domains_stand_one_below_the_other(self) -> None:
        first, second = two_domains(1), make(2)
        merged = merge(first, second)
        assert merged.domains == ("code", "prose 1", "x")
        wanted = [*first.domain_tokens[1].tolist(), second.routed_tokens[1].tolist()]
        assert merged.domain_tokens[1].tolist() == wanted
        assert merge(make(1), second).domain_tokens == {}

    def test_unseen_experts_merge_to_zero(self) -> None:
        def unseen(seed: int) -> CalibrationStats:
            stats = make(seed)
            name = "layers.1.experts.down"
            zero = replace(
                stats.inputs[name],
                amax=f32([0] * EXPERTS),
                rows=i64([0] * EXPERTS),
            )
            return replace(stats, inputs={**stats.inputs, name: zero})

        found = merge(unseen(1), unseen(2)).inputs["layers.1.experts.down"]
        assert not found.amax.any()
        assert not found.rows.any()

    def test_versions_and_names(self) -> None:
        many = tuple(str(i) for i in range(MAX_DROPPED_NAMES))
        first = make(1, versions={"beamq": "1", "torch": "2"}, dropped_names=many)
        second = make(2, versions={"beamq": "3"})
        merged = merge(first, second)
        assert merged.versions == {"beamq": "1 + 3", "torch": "2"}
        assert merged.dropped_names == many

    @pytest.mark.parametrize(
        ("second", "message"),
        [
            (lambda: make(2, model_fingerprint="cd" * 32), "the statistics are of"),
            (lambda: make(2, experts="all"), "experts = routed, the other all"),
            (lambda: make(1), "count twice"),
            (lambda: make(2, inputs={}), "only one run has statistics of layers.0.mlp.down"),
            (
                lambda: make(2, routed_tokens={1: i64([1] * 4), 2: i64([1])}),
                "only one run has statistics of layer 2",
            ),
        ],
    )
    def test_refused(self, second: Callable[[], CalibrationStats], message: str) -> None:
        with pytest.raises(CalibrationError, match=message):
            merge(make(1), second())

    def test_different_arrays_are_refused(self) -> None:
        second = make(2)
        name = "layers.1.experts.down"
        more = InputStats(amax=f32([1] * 5), rows=i64([1] * 5))
        inputs = {**second.inputs, name: more, "layers.1.experts.gate_up": more}
        other = replace(second, inputs=inputs, routed_tokens={1: i64([1] * 5)})
        with pytest.raises(CalibrationError, match=r"experts\.gate_up has amax, rows in one"):
            merge(make(1), other)


class TestFile:
    def test_what_earlier_versions_recorded_besides_is_ignored(self, tmp_path: Path) -> None:
        stats, path = make(), tmp_path / "old.safetensors"
        save_stats(stats, path)
        with safe_open(str(path), framework="np") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            record = json.loads(file.metadata()[METADATA_KEY])
        tensors["layers.0.mlp.down.percentile"] = f32(1)
        tensors["layers.0.mlp.down.second_moment"] = f32([1] * HIDDEN)
        text = json.dumps({**record, "percentile": 99.9}, sort_keys=True)
        path.write_bytes(save(tensors, {METADATA_KEY: text}))
        assert as_plain(load_stats(path)) == as_plain(stats)

    def test_domains_are_kept(self, tmp_path: Path) -> None:
        save_stats(two_domains(1), tmp_path / "a.safetensors")
        again = load_stats(tmp_path / "a.safetensors")
        assert as_plain(again) == as_plain(two_domains(1))
        assert again.domains == ("code", "prose 1")

    def test_round_trip(self, tmp_path: Path) -> None:
        stats = make()
        save_stats(stats, tmp_path / "a.safetensors")
        again = load_stats(tmp_path / "a.safetensors")
        assert as_plain(again) == as_plain(stats)
        assert list(tmp_path.iterdir()) == [tmp_path / "a.safetensors"]

    def test_same_statistics_same_bytes(self, tmp_path: Path) -> None:
        stats = make(versions={"beamq": "1", "torch": "2"})
        back = replace(
            stats,
            inputs=dict(reversed(list(stats.inputs.items()))),
            versions={"torch": "2", "beamq": "1"},
        )
        save_stats(stats, tmp_path / "a")
        save_stats(back, tmp_path / "b")
        assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()

    def test_strided_arrays_are_written_right(self, tmp_path: Path) -> None:
        stats = make()
        wide = f32(np.arange(2 * EXPERTS))
        name = "layers.1.experts.down"
        stats = replace(
            stats, inputs={**stats.inputs, name: replace(stats.inputs[name], amax=wide[::2])}
        )
        save_stats(stats, tmp_path / "a")
        assert load_stats(tmp_path / "a").inputs[name].amax.tolist() == [0, 2, 4, 6]

    def test_names_in_the_file(self, tmp_path: Path) -> None:
        save_stats(make(), tmp_path / "a")
        assert set(load_file(tmp_path / "a")) == {
            "layers.0.self_attn.qkv_gate.amax",
            "layers.0.self_attn.qkv_gate.rows",
            "layers.0.mlp.down.amax",
            "layers.0.mlp.down.rows",
            "layers.1.experts.gate_up.amax",
            "layers.1.experts.gate_up.rows",
            "layers.1.experts.down.amax",
            "layers.1.experts.down.rows",
            "layers.1.experts.routed_tokens",
        }

    def test_failed_write_changes_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        save_stats(make(1), tmp_path / "a")
        before = (tmp_path / "a").read_bytes()

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(DiskError, match="disk full"):
            save_stats(make(2), tmp_path / "a")
        assert (tmp_path / "a").read_bytes() == before

    def test_missing_folder_is_a_disk_error(self, tmp_path: Path) -> None:
        with pytest.raises(DiskError, match="No such file"):
            save_stats(make(), tmp_path / "missing" / "a")

    def test_no_torch(self) -> None:
        code = "import beamq.calib.input_scales, beamq.calib.statistics, beamq.calib.data, sys;"
        code += "print(sorted({'torch', 'transformers', 'datasets'} & set(sys.modules)))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
        assert done.stdout.strip() == b"[]"

    def test_size_of_a_real_beam(self, tmp_path: Path) -> None:
        """49 sparse layers of 256 experts: names, not values, must not make the file large."""
        one = InputStats(amax=f32(np.ones(256)), rows=i64(np.ones(256)))
        groups = ("experts.gate_up", "experts.down")
        inputs = {f"layers.{i}.{group}": one for i in range(3, 52) for group in groups}
        stats = make(inputs=inputs, routed_tokens={i: one.rows for i in range(3, 52)})
        save_stats(stats, tmp_path / "a")
        assert (tmp_path / "a").stat().st_size < 1_000_000


class TestHostileFiles:
    """Each writes a sound file, spoils one thing, and expects one line about it."""

    @staticmethod
    def spoil(
        path: Path,
        tensors: Callable[[dict[str, Any]], object] = lambda _: None,
        record: Callable[[dict[str, Any]], object] = lambda _: None,
    ) -> None:
        save_stats(make(), path)
        found = load_file(path)
        header_size = int.from_bytes(path.read_bytes()[:8], "little")
        header = json.loads(path.read_bytes()[8 : 8 + header_size])
        metadata = json.loads(header["__metadata__"][METADATA_KEY])
        tensors(found)
        record(metadata)
        save_file(found, path, {METADATA_KEY: json.dumps(metadata)})

    @pytest.mark.parametrize(
        ("name", "value", "message"),
        [
            ("evil", f32(1), "unknown tensor 'evil'"),
            ("layers.0.mlp.down.scale", f32(1), "unknown tensor"),
            ("layers.0.mlp.gate.amax", f32(1), "rows is missing"),
            ("layers.0.mlp.down.amax", np.float16(1), "is F16, expected F32"),
            ("layers.0.mlp.down.amax", np.float64(1), "is F64, expected F32"),
            ("layers.0.mlp.down.rows", f32(1), "is F32, expected I64"),
            ("layers.0.mlp.down.amax", f32(np.nan), "negative or not finite"),
            ("layers.0.mlp.down.amax", f32(-0.5), "negative or not finite"),
            ("layers.1.experts.routed_tokens", i64([1]), "not that of"),
            ("layers.1.experts.routed_tokens", f32([1] * 4), "is F32, expected I64"),
            ("layers.7.experts.down.amax", f32([1] * 4), "rows is missing"),
        ],
    )
    def test_tensors(self, tmp_path: Path, name: str, value: Any, message: str) -> None:
        self.spoil(tmp_path / "a", tensors=lambda found: found.update({name: np.asarray(value)}))
        with pytest.raises(CalibrationError, match=message):
            load_stats(tmp_path / "a")

    def test_missing_tensor(self, tmp_path: Path) -> None:
        self.spoil(tmp_path / "a", tensors=lambda found: found.pop("layers.0.mlp.down.rows"))
        with pytest.raises(CalibrationError, match=r"layers\.0\.mlp\.down\.rows is missing"):
            load_stats(tmp_path / "a")

    def test_unknown_entry(self, tmp_path: Path) -> None:
        more = {"x.amax": f32(1), "x.rows": i64(1)}
        self.spoil(tmp_path / "a", tensors=lambda found: found.update(more))
        with pytest.raises(CalibrationError, match="unknown entry 'x'"):
            load_stats(tmp_path / "a")

    @pytest.mark.parametrize(
        ("key", "value", "message"),
        [
            ("version", 2, "statistics of version 2, this beamq reads 1"),
            ("version", None, "statistics of version None"),
            ("extra", 1, "unknown or missing: extra"),
            ("model_name", 3, "model_name has the wrong type, int"),
            ("total_tokens", True, "total_tokens has the wrong type, bool"),
            ("total_tokens", 1.5, "total_tokens has the wrong type, float"),
            ("total_tokens", -3, "total_tokens is -3"),
            ("experts", "some", "experts is 'some'"),
            ("data", [{}], "data holds a value of the wrong kind"),
            ("data", ["x"], "data holds a value of the wrong kind"),
            ("data", "x", "data has the wrong type, str"),
            ("versions", {"beamq": 1}, "versions holds"),
            ("dropped_names", [1], "dropped_names holds"),
            ("percentile", float("nan"), "percentile holds"),
            ("percentile", 101, "percentile holds"),
            ("percentile", False, "percentile has the wrong type, bool"),
        ],
    )
    def test_metadata(self, tmp_path: Path, key: str, value: Any, message: str) -> None:
        self.spoil(tmp_path / "a", record=lambda found: found.update({key: value}))
        with pytest.raises(CalibrationError, match=message):
            load_stats(tmp_path / "a")

    @pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
    def test_other_safetensors(self, tmp_path: Path, metadata: dict[str, str] | None) -> None:
        save_file({"a": f32([1])}, tmp_path / "a", metadata)
        with pytest.raises(CalibrationError, match="not a statistics file of beamq"):
            load_stats(tmp_path / "a")

    @pytest.mark.parametrize("text", ["{", "[]", "[" * 100_000])
    def test_metadata_that_is_no_object(self, tmp_path: Path, text: str) -> None:
        save_file({"a": f32([1])}, tmp_path / "a", {METADATA_KEY: text})
        with pytest.raises(CalibrationError, match="is not a JSON object"):
            load_stats(tmp_path / "a")

    @pytest.mark.parametrize("keep", [0, 7, 100, -1])
    def test_cut_file(self, tmp_path: Path, keep: int) -> None:
        save_stats(make(), tmp_path / "a")
        (tmp_path / "a").write_bytes((tmp_path / "a").read_bytes()[:keep])
        with pytest.raises(CalibrationError, match="not a whole safetensors file"):
            load_stats(tmp_path / "a")

    def test_pickle_is_not_loaded(self, tmp_path: Path) -> None:
        (tmp_path / "a").write_bytes(b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00.")
        with pytest.raises(CalibrationError, match="not a whole safetensors file"):
            load_stats(tmp_path / "a")

    def test_missing_file(self, tmp_path: Path) -> None:
        for path in (tmp_path / "missing", tmp_path):
            with pytest.raises(CalibrationError, match="no such statistics file"):
                load_stats(path)
