"""Presets of `--data`, read from a Hub on the loopback interface."""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer

from beamq.calib import data, documents, presets
from beamq.calib.data import CalibrationData, load_calibration_data, load_text
from beamq.calib.presets import PRESETS, PublicFile, side
from beamq.errors import CalibrationError, HubError, HubUnreachableError
from beamq.io.checkpoint import open_checkpoint
from beamq.ranks import Ranks, current_ranks
from tests.helpers.hub_server import Blob, Fault, HubServer, Repo, client_of, hub_server

ROWS, GROUP_ROWS = 400, 20
SIZE: dict[str, Any] = {"samples": 40, "sequence_length": 64, "seed": 0}


def words(part: PublicFile, number: int) -> str:
    """A document that names its part and its number."""
    name = "".join(filter(str.isalpha, part.path))[-12:]
    return " ".join(f"{name}x{number}y" for _ in range(12))


def rows_of(part: PublicFile) -> list[dict[str, Any]]:
    """The rows of a file, with the columns of the real one that matter."""
    found: list[dict[str, Any]] = []
    for number in range(ROWS):
        text = words(part, number)
        if part.domain == "tool calls":
            talk = [{"from": "human", "value": "call it"}, {"from": "gpt", "value": text}]
            tools = json.dumps([{"type": "function", "function": {"name": "look_up"}}])
            found.append({"id": str(number), "conversations": talk, "tools": tools})
        elif part.chat:
            talk = [{"role": "user", "content": "say it"}, {"role": "assistant", "content": text}]
            found.append({"messages": talk, "category": "x"})
        else:
            found.append({part.column: text, "unused": f"{number}" * 1500})
    return found


def file_of(part: PublicFile) -> bytes:
    rows = rows_of(part)
    if part.path.endswith(".jsonl"):
        return "".join(json.dumps(row) + "\n" for row in rows).encode()
    buffer = io.BytesIO()
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(
        table, buffer, row_group_size=GROUP_ROWS, compression="none", use_dictionary=False
    )
    return buffer.getvalue()


@pytest.fixture(scope="module")
def files() -> dict[PublicFile, bytes]:
    parts = {part for preset in PRESETS.values() for part in preset}
    return {part: file_of(part) for part in parts}


@pytest.fixture
def hub(
    files: dict[PublicFile, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[HubServer]:
    with hub_server() as running, client_of(running, tmp_path / "hf", monkeypatch):
        for part, content in files.items():
            repo = running.repos.setdefault(f"datasets/{part.repo}", Repo())
            repo.trees.setdefault(part.revision, {})[part.path] = Blob(content)
        yield running


def said(found: CalibrationData, folder: Path) -> set[str]:
    """The names of documents in the rows: part and number."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = tokenizer.decode(found.input_ids.flatten().tolist(), skip_special_tokens=False)
    return set(re.findall(r"[A-Za-z]+x\d+y", text))


def test_the_names_and_weights_agree() -> None:
    assert set(documents.PRESET_NAMES) == set(PRESETS)
    for name, parts in PRESETS.items():
        assert name == "stdlib" or sum(part.weight for part in parts) == pytest.approx(1.0)
        assert len({(part.repo, part.path) for part in parts}) == len(parts)
        for part in parts:
            assert re.fullmatch(r"[0-9a-f]{40}", part.revision), part
            assert part.chat != bool(part.column), part


def test_each_part_gives_its_share_and_little_is_read(
    hub: HubServer, files: dict[PublicFile, bytes], beam_nano: Path
) -> None:
    found = load_calibration_data(["general"], beam_nano, **SIZE)
    assert found.samples == 40
    assert found.notes == ()
    for part, record in zip(PRESETS["general"], found.sources, strict=True):
        assert record.name == part.name
        assert part.revision[:12] in record.name
        assert record.tokens == pytest.approx(part.weight * found.tokens, abs=1)
        size, sent = len(files[part]), hub.sent[part.path]
        if not part.chat and part.path.endswith(".parquet"):
            assert sent < size / 4, (part, sent, size)
    whole = [path for method, path, ranged in hub.requests if method == "GET" and not ranged]
    assert not [path for path in whole if "/resolve/" in path or "/cdn/" in path]


def test_the_seed_decides(hub: HubServer, beam_nano: Path) -> None:
    first, again = (load_calibration_data(["general"], beam_nano, **SIZE) for _ in range(2))
    other = load_calibration_data(["general"], beam_nano, **{**SIZE, "seed": 1})
    assert first.digest == again.digest != other.digest


def test_conversations_and_tools_go_through_the_chat_template(
    hub: HubServer, beam_nano: Path, tmp_path: Path
) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(beam_nano / name, tmp_path / name)
    template = (beam_nano / "chat_template.jinja").read_text()
    (tmp_path / "chat_template.jinja").write_text("{% if tools %}{{ tools }}{% endif %}" + template)
    found = load_calibration_data(["general"], tmp_path, **{**SIZE, "samples": 200})
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = tokenizer.decode(found.input_ids.flatten().tolist(), skip_special_tokens=False)
    assert "'name': 'look_up'" in text
    assert "<|user|>\nsay it\n<|assistant|>\n" in text


def test_what_calibrates_never_judges(hub: HubServer, beam_nano: Path) -> None:
    much = {**SIZE, "samples": 300}
    fit, judge = (
        load_calibration_data(["general"], beam_nano, **much, split=split)
        for split in ("calibration", "evaluation")
    )
    first, second = said(fit, beam_nano), said(judge, beam_nano)
    assert min(len(first), len(second)) > 100
    assert not first & second


def test_sides_are_about_even() -> None:
    sides = [side(f"document {number}") for number in range(1000)]
    assert 400 < sides.count("calibration") < 600
    assert side([1, 2, 3]) in ("calibration", "evaluation")


def test_without_a_chat_template_conversations_are_left_out(
    hub: HubServer, beam_nano: Path, tmp_path: Path
) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(beam_nano / name, tmp_path / name)
    found = load_calibration_data(["general"], tmp_path, **SIZE)
    assert not any("dialogue" in record.name for record in found.sources)
    assert sum(record.weight for record in found.sources) == pytest.approx(1.0)


def test_a_preset_mixes_with_other_data(hub: HubServer, beam_nano: Path, tmp_path: Path) -> None:
    (tmp_path / "own.txt").write_text("mine " * 4000)
    found = load_calibration_data(["code:0.5", f"{tmp_path / 'own.txt'}:1.5"], beam_nano, **SIZE)
    assert found.sources[-1].tokens == pytest.approx(0.75 * found.tokens, abs=1)


def test_each_token_has_the_domain_of_its_text(hub: HubServer, beam_nano: Path) -> None:
    """By what the text itself says."""
    found = load_calibration_data(["general"], beam_nano, **SIZE)
    assert found.domains == tuple(dict.fromkeys(part.domain for part in PRESETS["general"]))
    assert found.to_dict()["domains"] == list(found.domains)
    tokenizer = Tokenizer.from_file(str(beam_nano / "tokenizer.json"))
    for place, domain in enumerate(found.domains):
        ids = found.input_ids[found.domain_ST == place]
        parts = [part for part in PRESETS["general"] if part.domain == domain]
        records = [record for record in found.sources if record.name.startswith(f"{domain}: ")]
        assert len(ids) == sum(record.tokens for record in records)
        names = {words(part, 7).partition("x7y")[0] for part in parts}
        text = tokenizer.decode(ids.tolist(), skip_special_tokens=False)
        assert set(re.findall(r"(?<![A-Za-z])([A-Za-z]+)x\d+y", text)) <= names, domain


def test_one_text_is_one_domain(beam_nano: Path) -> None:
    found = load_calibration_data([], beam_nano, **SIZE)
    assert len(found.domains) == 1
    assert not found.domain_ST.any()
    assert found.domain_ST.shape == found.input_ids.shape
    assert "domains" not in found.to_dict()


def test_stdlib_is_the_default_text(beam_nano: Path) -> None:
    default = load_calibration_data([], beam_nano, **SIZE)
    assert load_calibration_data(["stdlib"], beam_nano, **SIZE).digest == default.digest
    assert default.sources[0].kind == "standard library"


def load_for(folder: Path, specs: tuple[str, ...] = (), **options: Any) -> CalibrationData:
    with open_checkpoint(folder) as checkpoint:
        return load_text(specs, checkpoint, **SIZE, **options)


def test_large_models_get_the_general_text_and_small_ones_ask_nobody(
    hub: HubServer, beam_nano: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load_for(beam_nano).sources[0].kind == "standard library"
    assert not hub.requests
    monkeypatch.setattr(data, "LARGE", 1000)
    assert load_for(beam_nano, split="evaluation").sources[0].name.startswith("prose: ")


@pytest.mark.parametrize("what", ["refused", "gone", "offline", "another rank"])
def test_where_the_hub_does_not_answer_the_default_falls_back_and_says_so(
    hub: HubServer, beam_nano: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(data, "LARGE", 1000)
    options: dict[str, Any] = {"ranks": current_ranks()}
    if what == "refused":
        hub.faults.append(Fault("POST", "paths-info", times=9, status=503))
    elif what == "gone":
        hub.repos["datasets/open-web-math/open-web-math"].trees.clear()
    elif what == "offline":
        from huggingface_hub import constants

        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    else:

        class OtherFails(Ranks):
            def gather(self, value: Any) -> list[Any]:
                return [value, "the other rank's network"]

        options["ranks"] = OtherFails()
    found = load_for(beam_nano, **options)
    assert found.digest == load_calibration_data([], beam_nano, **SIZE).digest
    assert "could not be read" in found.notes[0]
    assert "--data general" in found.notes[0]
    if what == "another rank":
        assert "the other rank's network" in found.notes[0]
    else:
        with pytest.raises((HubError, HubUnreachableError)):
            load_for(beam_nano, ("general",))


def test_a_file_is_read_up_to_a_limit(
    hub: HubServer, beam_nano: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(presets, "MOST_BYTES", 5000)
    with pytest.raises(CalibrationError, match=r"more than 5,000 bytes of .* would be read"):
        load_calibration_data(["general"], beam_nano, **SIZE)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"PAR1 is not it", "cannot be read"), (b"", "cannot be read")],
)
def test_a_broken_parquet_file(
    hub: HubServer, beam_nano: Path, content: bytes, message: str
) -> None:
    part = PRESETS["general"][0]
    hub.repos[f"datasets/{part.repo}"].trees[part.revision][part.path] = Blob(content)
    with pytest.raises(CalibrationError, match=message):
        load_calibration_data(["general"], beam_nano, **SIZE)


@pytest.mark.parametrize(("line", "message"), [(b"{", "not JSON"), (b"[1]", "not a JSON object")])
def test_a_broken_line(hub: HubServer, beam_nano: Path, line: bytes, message: str) -> None:
    part = PRESETS["code"][0]
    hub.repos[f"datasets/{part.repo}"].trees[part.revision][part.path] = Blob(line + b"\n")
    with pytest.raises(CalibrationError, match=message):
        load_calibration_data(["code"], beam_nano, **SIZE)
