"""Calibration data: specs, sources, mixing, packing, digests, and what each refuses."""

from __future__ import annotations

import gzip
import json
import random
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from beamq.calib import documents as sources
from beamq.calib import rows
from beamq.calib.data import (
    CalibrationData,
    CheckpointTokenizer,
    ids_digest,
    load_calibration_data,
    shares,
)
from beamq.calib.documents import (
    DataSpec,
    SourceLog,
    documents,
    in_pieces,
    parse_spec,
)
from beamq.calib.presets import MODULES, default_text, split_modules
from beamq.calib.rows import Document
from beamq.errors import (
    CalibrationError,
    HubError,
    HubUnreachableError,
    MissingDependencyError,
    UsageError,
)
from tests.helpers.hub_server import client_of, hub_server

WORDS = ["def", "return", "import", "class", "self", "value", "range", "print", "while", "other"]


def prose(lines: int, seed: int = 0) -> str:
    rng = random.Random(seed)
    return "".join(" ".join(rng.choices(WORDS, k=8)) + "\n" for _ in range(lines))


def load(specs: Sequence[Path | str], nano: Path, **options: Any) -> CalibrationData:
    chosen = {"samples": 4, "sequence_length": 64, "seed": 0, **options}
    return load_calibration_data([str(spec) for spec in specs], nano, **chosen)


def render(messages: Sequence[Any], tools: Sequence[Any] | None) -> str:
    return repr(messages) if tools is None else repr((tools, messages))


def texts(spec: Path | str, *, seed: str = "0", piece: int = 4096) -> list[Document]:
    log = SourceLog()
    return list(documents(parse_spec(str(spec)), seed=seed, piece=piece, render=render, log=log))


@pytest.fixture
def nano_tokenizer(beam_nano: Path, tmp_path: Path) -> Path:
    """A checkpoint folder without weights that a test may damage."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json", "chat_template.jinja"):
        shutil.copy(beam_nano / name, folder / name)
    return folder


class TestSpecs:
    def test_weight_is_taken_off(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_text("x")
        spec = parse_spec(f"{tmp_path / 'a.txt'}:0.3")
        assert (spec.kind, spec.name, spec.weight) == ("file", "a.txt", 0.3)

    def test_existing_name_with_colon_is_a_path(self, tmp_path: Path) -> None:
        (tmp_path / "odd:0.5").mkdir()
        spec = parse_spec(str(tmp_path / "odd:0.5"))
        assert (spec.kind, spec.name, spec.weight) == ("folder", "odd:0.5", 1.0)
        assert parse_spec(str(tmp_path / "odd:0.5") + ":2").weight == 2.0

    def test_colon_before_no_number_belongs_to_the_name(self, tmp_path: Path) -> None:
        (tmp_path / "C:data.txt").write_text("x")
        assert parse_spec(f"{tmp_path / 'C:data.txt'}:2").name == "C:data.txt"

    def test_hub_name_with_options(self) -> None:
        spec = parse_spec("owner/name,config=3.0.0,split=train_sft:0.25")
        assert (spec.kind, spec.name, spec.weight) == ("hub", "owner/name", 0.25)
        assert dict(spec.options) == {"config": "3.0.0", "split": "train_sft"}

    def test_record_never_holds_a_path(self, tmp_path: Path, beam_nano: Path) -> None:
        (tmp_path / "a.txt").write_text(prose(100))
        record = load([tmp_path / "a.txt"], beam_nano).to_dict()
        assert str(tmp_path) not in json.dumps(record)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", "is empty"),
            ("missing.txt", "no such file"),
            ("./missing", "no such file"),
            ("/missing/folder", "no such file"),
            ("C:\\missing", "no such file"),
            ("owner/name:0", "not above 0"),
            ("owner/name:-1", "not above 0"),
            ("owner/name:nan", "not above 0"),
            ("owner/name:inf", "not above 0"),
            ("owner/name,rows=3", "'rows' is unknown"),
            ("owner/name,split=a,split=b", "given twice"),
        ],
    )
    def test_refused(self, text: str, message: str) -> None:
        with pytest.raises(CalibrationError, match=message):
            parse_spec(text)

    def test_a_name_beside_what_is_here_is_a_path(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "data").mkdir()
        assert parse_spec("other/corpus").kind == "hub"
        for name in ("data/corpus", "other/corpus.json", "other/corpus.CSV", "corpus.zip:2"):
            with pytest.raises(CalibrationError, match="no such file or folder"):
                parse_spec(name)

    def test_unknown_suffix_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "a.docx").write_text("x")
        with pytest.raises(CalibrationError, match="unknown kind of file"):
            parse_spec(str(tmp_path / "a.docx"))


class TestTextFiles:
    def test_folder_recursive_sorted_hidden_left_out(self, tmp_path: Path) -> None:
        for name in ("b.py", "a.md", "inner/c.txt", ".git/d.py", ".e.txt", "f.bin"):
            path = tmp_path / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(f"text of {path.name}")
        (tmp_path / "rows.jsonl").write_text(json.dumps({"text": "text of a row"}))
        found = texts(tmp_path)
        assert sorted(found) == sorted(
            [f"text of {name}" for name in ("b.py", "a.md", "c.txt", "a row")]
        )

    def test_folder_without_data_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "a.bin").write_bytes(b"x")
        with pytest.raises(CalibrationError, match="no file of a known kind"):
            texts(tmp_path)

    @pytest.mark.parametrize("newline", ["\n", "\r\n"])
    def test_pieces_of_a_file_are_the_file(self, tmp_path: Path, newline: str) -> None:
        text = prose(500)
        (tmp_path / "a.txt").write_bytes(text.replace("\n", newline).encode())
        found = texts(tmp_path / "a.txt", piece=1000)
        assert len(found) > 10
        assert all(piece.endswith("\n") for piece in found)
        assert sorted("".join(found).splitlines()) == sorted(text.splitlines())

    def test_order_follows_the_seed(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_text(prose(500))
        first, again, other = (texts(tmp_path, seed=seed, piece=500) for seed in "aab")
        assert first == again != other
        assert sorted(first) == sorted(other)

    def test_one_long_line_is_cut_between_characters(self, tmp_path: Path) -> None:
        text = "".join(chr(0x3042 + i % 60) for i in range(5000)) + "é"
        (tmp_path / "a.txt").write_text(text, encoding="utf-8")
        found = texts(tmp_path / "a.txt", piece=1000)
        assert len(found) > 10
        assert Counter("".join(found)) == Counter(text)

    @given(lines=st.lists(st.text(alphabet="aé漢😀 \n", max_size=30), max_size=30))
    def test_any_text_is_taken_apart_whole(
        self, tmp_path_factory: pytest.TempPathFactory, lines: list[str]
    ) -> None:
        path = tmp_path_factory.mktemp("text") / "a.txt"
        text = "x" + "\n".join(lines)
        path.write_bytes(text.encode())
        found = texts(path, piece=16)
        assert Counter("".join(found).replace(" ", "").replace("\n", "")) == Counter(
            text.replace(" ", "").replace("\n", "")
        )

    def test_large_file_is_sampled_evenly(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sources, "MAX_UNITS_PER_FILE", 4)
        numbered = "".join(f"{i:07d}\n" for i in range(10_000))
        (tmp_path / "a.txt").write_text(numbered)
        found = sorted(texts(tmp_path / "a.txt", piece=800))
        assert [int(piece.split("\n")[0]) for piece in found] == [0, 2500, 5000, 7500]
        assert all(len(piece) == 800 for piece in found)

    def test_named_file_that_is_not_utf8_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_bytes(b"caf\xe9")
        with pytest.raises(CalibrationError, match=r"a\.txt: not UTF-8 at byte 3"):
            texts(tmp_path / "a.txt")

    @pytest.mark.parametrize("seed", range(3))
    def test_whatever_the_seed(self, tmp_path: Path, beam_nano: Path, seed: int) -> None:
        """Also where the piece with the bad byte would not be drawn, and across reads."""
        text = ("\u20ac" * 349_526).encode() + prose(200).encode()  # 2**20 is within a character
        (tmp_path / "a.txt").write_bytes(text)
        load([tmp_path / "a.txt"], beam_nano, samples=1, seed=seed)
        (tmp_path / "a.txt").write_bytes(text + b"\xe9")
        with pytest.raises(CalibrationError, match=rf"not UTF-8 at byte {len(text)};"):
            load([tmp_path / "a.txt"], beam_nano, samples=1, seed=seed)

    def test_in_a_folder_it_is_passed_over_and_said(self, tmp_path: Path, beam_nano: Path) -> None:
        (tmp_path / "a.txt").write_bytes(b"caf\xe9")
        (tmp_path / "b.txt").write_text(prose(20))
        data = load([tmp_path], beam_nano, samples=100)
        assert data.sources[0].skipped == {"pieces that are not UTF-8": 1}
        assert "a.txt" in data.notes[0]

    def test_nothing_but_space_is_refused(self, tmp_path: Path, beam_nano: Path) -> None:
        (tmp_path / "a.txt").write_text(" \n\n")
        with pytest.raises(CalibrationError, match="no text found"):
            load([tmp_path / "a.txt"], beam_nano)

    def test_byte_order_mark_is_dropped(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfhello")
        assert texts(tmp_path / "a.txt") == ["hello"]

    def test_unreadable_file_names_itself(self, tmp_path: Path) -> None:
        spec = DataSpec(text="x", kind="file", name="x", weight=1.0, path=tmp_path / "gone.txt")
        with pytest.raises(CalibrationError, match=r"gone\.txt: cannot be read"):
            list(documents(spec, seed="0", piece=10, render=render, log=SourceLog()))


class TestRows:
    def test_jsonl_blocks_meet_exactly(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sources, "JSONL_BLOCK_BYTES", 64)
        rng = random.Random(0)
        rows_in = [f"row {i} " + "x" * rng.randrange(150) for i in range(200)]
        lines = [json.dumps({"text": text}) for text in rows_in]
        (tmp_path / "a.jsonl").write_text("\n".join(lines) + rng.choice(["", "\n", "\n\n"]))
        assert sorted(texts(tmp_path / "a.jsonl")) == sorted(rows_in)

    def test_messages_go_through_the_chat_template(self, tmp_path: Path, beam_nano: Path) -> None:
        chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes " * 50}]
        (tmp_path / "a.jsonl").write_text(json.dumps({"messages": chat}))
        data = load([tmp_path / "a.jsonl"], beam_nano, samples=1, sequence_length=32)
        tokenizer = CheckpointTokenizer(beam_nano)
        expected = tokenizer.encode("<|user|>\nhi\n<|assistant|>\n" + "yes " * 50)
        assert data.input_ids[0, :30].tolist() == expected[:30].tolist()

    def test_refused_conversation_and_empty_rows_are_counted(
        self, tmp_path: Path, nano_tokenizer: Path
    ) -> None:
        (nano_tokenizer / "chat_template.jinja").write_text(
            "{% if messages[0]['role'] != 'user' %}{{ raise_exception('no') }}{% endif %}"
            "{{ messages[0]['content'] }}"
        )
        rows_in: list[dict[str, Any]] = [
            {"messages": [{"role": "system", "content": "x"}]},
            {"messages": [{"role": "user", "content": prose(20)}]},
            {"text": ""},
            {"text": None},
        ]
        (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows_in)))
        data = load([tmp_path / "a.jsonl"], nano_tokenizer)
        assert data.sources[0].skipped == {
            "conversations that the chat template refuses": 1,
            "empty rows": 2,
        }
        assert any("line 1" in note for note in data.notes)

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ("{", "line 2: not JSON"),
            ("[" * 100_000, "line 2: not JSON"),
            ("[1]", "line 2: a list, expected a JSON object"),
            (
                '{"content": "x", "lang": "py"}',
                r"none of the columns text.* \(columns: content, lang\)",
            ),
            ('{"text": 3}', "`text` is a int"),
            ('{"messages": "x"}', "`messages` is not a list"),
            ('{"conversations": [{"from": 3, "value": "x"}]}', "`messages` is not a list"),
            ('{"input_ids": [1, "x"]}', "`input_ids` is not a list of whole numbers"),
            ('{"prompt": 3}', "`text` is a int"),
            ('{"messages": [{"role": "user"}], "tools": "{"}', "`tools` is not a list"),
            ('{"messages": [{"content": "x"}]}', "`messages` is not a list"),
        ],
    )
    def test_bad_line_is_named(self, tmp_path: Path, line: str, message: str) -> None:
        (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n' + line + "\n")
        with pytest.raises(CalibrationError, match=message):
            texts(tmp_path / "a.jsonl")

    @pytest.mark.parametrize(
        ("row", "expected"),
        [
            ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
             repr([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])),
            ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"},
                                                        {"type": "text", "text": "b"}]}]},
             repr([{"role": "user", "content": "ab"}])),
            ({"messages": [{"role": "user", "content": "a"}], "tools": [{"name": "t"}]},
             repr(([{"name": "t"}], [{"role": "user", "content": "a"}]))),
            ({"messages": [{"role": "user", "content": "a"}], "tools": '[{"name": "t"}]'},
             repr(([{"name": "t"}], [{"role": "user", "content": "a"}]))),
            ({"prompt": "a ", "completion": "b"}, "a b"),
            ({"prompt": "a"}, "a"),
            ({"prompt": [{"role": "user", "content": "a"}],
              "completion": [{"role": "assistant", "content": "b"}]},
             repr([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])),
            ({"input_ids": [5, 6, 7]}, [5, 6, 7]),
        ],
    )  # fmt: skip
    def test_shapes_of_rows(self, tmp_path: Path, row: dict[str, Any], expected: Document) -> None:
        (tmp_path / "a.jsonl").write_text(json.dumps(row))
        assert texts(tmp_path / "a.jsonl") == [expected]
        pq.write_table(pa.Table.from_pylist([row]), tmp_path / "b.parquet")
        assert texts(tmp_path / "b.parquet") == [expected]

    def test_shapes_of_files(self, tmp_path: Path) -> None:
        rows_in = [f"row {i}, é" for i in range(30)]
        objects = [{"text": text} for text in rows_in]
        lines = "".join(json.dumps(each) + "\n" for each in objects)
        table = "text\tid\n" + "".join(f"{text}\t{i}\n" for i, text in enumerate(rows_in))
        kinds = {
            "a.json": json.dumps(objects),
            "b.json": json.dumps({"data": objects}),
            "c.tsv": table,
            "d.csv": "\ufeff" + table.replace(",", ";").replace("\t", ","),
            "e.JSONL": lines,
            "f.jsonl": lines,
        }
        for name, text in kinds.items():
            (tmp_path / name).write_text(text)
            with gzip.open(tmp_path / f"{name}.gz", "wt", encoding="utf-8") as file:
                file.write(text)
            with pa.output_stream(str(tmp_path / f"{name}.zst"), compression="zstd") as stream:
                stream.write(text.encode())
            expected = sorted(
                text.replace(",", ";") if name == "d.csv" else text for text in rows_in
            )
            for path in (name, f"{name}.gz", f"{name}.zst"):
                found = texts(tmp_path / path)
                assert sorted(map(str, found)) == expected, path
                assert found != expected, "shuffled"
                assert found == texts(tmp_path / path)
        assert len(texts(tmp_path)) == 30 * 3 * len(kinds)
        with gzip.open(tmp_path / "a.txt.gz", "wt") as file:
            file.write("a whole text\nin two lines")
        assert texts(tmp_path / "a.txt.gz") == ["a whole text\nin two lines"]
        (tmp_path / "B.TXT").write_text("loud")
        assert texts(tmp_path / "B.TXT") == ["loud"]

    @pytest.mark.parametrize(
        ("name", "content"),
        [
            ("a.json", b"{"),
            ("a.json", b"[3]"),
            ("a.json.gz", b"not gzip"),
            ("a.jsonl.gz", gzip.compress(b'{"text": "x"}' * 50, mtime=0)[:-9]),
            ("a.jsonl.zst", b"not zstd"),
            ("a.csv", b"text\n\xff\n"),
        ],
    )
    def test_broken_files_are_named(self, tmp_path: Path, name: str, content: bytes) -> None:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(CalibrationError, match=re.escape(name)):
            texts(tmp_path / name)

    def test_ids_of_another_tokenizer_are_refused(self, tmp_path: Path, beam_nano: Path) -> None:
        (tmp_path / "a.jsonl").write_text(json.dumps({"input_ids": [*range(5, 90)]}))
        data = load([tmp_path / "a.jsonl"], beam_nano, samples=1)
        assert data.input_ids[0, :63].tolist() == [*range(5, 68)]
        (tmp_path / "a.jsonl").write_text(json.dumps({"input_ids": [1, 1 << 40]}))
        with pytest.raises(CalibrationError, match="`input_ids` from 1 to"):
            load([tmp_path / "a.jsonl"], beam_nano)

    def test_tools_reach_the_chat_template(self, tmp_path: Path, nano_tokenizer: Path) -> None:
        (nano_tokenizer / "chat_template.jinja").write_text(
            "{% for tool in tools %}{{ tool.name }} {% endfor %}{{ messages[0].content }}"
        )
        row = {"messages": [{"role": "user", "content": prose(9)}], "tools": [{"name": "while"}]}
        (tmp_path / "a.jsonl").write_text(json.dumps(row))
        data = load([tmp_path / "a.jsonl"], nano_tokenizer, samples=1, sequence_length=16)
        expected = CheckpointTokenizer(nano_tokenizer).encode("while " + prose(9))
        assert data.input_ids[0, :15].tolist() == expected[:15].tolist()

    def test_images_are_passed_over_and_long_rows_are_said(
        self, tmp_path: Path, nano_tokenizer: Path
    ) -> None:
        image = [{"type": "image", "image": "x"}, {"type": "text", "text": "what is it?"}]
        rows_in: list[dict[str, Any]] = [
            {"messages": [{"role": "user", "content": image}]},
            {"messages": [{"role": "user", "content": prose(400)}]},
        ]
        (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows_in)))
        data = load([tmp_path / "a.jsonl"], nano_tokenizer, samples=1000)
        assert data.sources[0].skipped == {"conversations with parts that are not text": 1}
        assert "a.jsonl: 1 document of more than 8,192 characters" in data.notes[1]

    def test_half_a_surrogate_pair_is_replaced(self, tmp_path: Path, beam_nano: Path) -> None:
        (tmp_path / "a.jsonl").write_text(r'{"text": "a\ud800b é"}')
        assert texts(tmp_path / "a.jsonl") == ["a?b é"]
        assert CheckpointTokenizer(beam_nano).encode("a?b é").size > 0

    def test_parquet_text_and_messages(self, tmp_path: Path, beam_nano: Path) -> None:
        table = pa.table({"text": [f"row {i}" for i in range(30)], "other": list(range(30))})
        pq.write_table(table, tmp_path / "a.parquet", row_group_size=7)
        assert sorted(texts(tmp_path / "a.parquet")) == sorted(f"row {i}" for i in range(30))
        chat = [{"role": "user", "content": "hi", "name": None}]
        pq.write_table(pa.table({"messages": [chat]}), tmp_path / "b.parquet")
        assert texts(tmp_path / "b.parquet") == [repr([{"role": "user", "content": "hi"}])]

    def test_parquet_without_known_column_or_broken(self, tmp_path: Path) -> None:
        pq.write_table(pa.table({"content": ["x"]}), tmp_path / "a.parquet")
        with pytest.raises(CalibrationError, match="columns: content"):
            texts(tmp_path / "a.parquet")
        (tmp_path / "b.parquet").write_bytes(b"PAR1nonsense")
        with pytest.raises(CalibrationError, match="not a parquet file"):
            texts(tmp_path / "b.parquet")
        pq.write_table(pa.table({"text": ["x" * 100] * 50}), tmp_path / "c.parquet")
        whole = bytearray((tmp_path / "c.parquet").read_bytes())
        whole[4:40] = b"\xff" * 36
        (tmp_path / "c.parquet").write_bytes(whole)
        with pytest.raises(CalibrationError, match="row group 0"):
            texts(tmp_path / "c.parquet")

    def test_missing_packages_are_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "a.parquet").write_bytes(b"")
        monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
        monkeypatch.setitem(sys.modules, "datasets", None)
        with pytest.raises(MissingDependencyError, match="pyarrow"):
            texts(tmp_path / "a.parquet")
        with pytest.raises(MissingDependencyError, match="datasets"):
            texts("owner/name")

    def test_long_row_gives_one_piece_before_the_rest(self) -> None:
        book, note = prose(200), "a note\n"
        found = list(in_pieces([book, note], piece=500, rng=random.Random(0)))
        assert found[1] == note
        assert Counter("".join(found)) == Counter(book + note)
        assert max(map(len, found)) <= 1000

    def test_what_waits_is_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sources, "MAX_WAITING_CHARACTERS", 10)
        books = [prose(100, seed) for seed in range(3)]
        found = list(in_pieces([*books, "end\n"], piece=500, rng=random.Random(0)))
        assert Counter("".join(found)) == Counter("".join(books) + "end\n")
        assert found.index("end\n") < len(found) - 1  # the first book's rest waited
        assert found.index("end\n") > 10  # the others' did not


class FakeStream:
    """What `datasets.load_dataset(streaming=True)` gives for one split."""

    def __init__(self, rows_in: list[dict[str, Any]]) -> None:
        self.rows = rows_in

    def shuffle(self, *, seed: int, buffer_size: int) -> FakeStream:
        assert buffer_size > 0
        return FakeStream(random.Random(seed).sample(self.rows, len(self.rows)))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)


class TestHub:
    @pytest.fixture
    def hub(self, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
        """A fake `datasets` module; `splits` may be changed, `asked` holds the last call."""
        state: dict[str, Any] = {"splits": {"train": FakeStream([{"text": prose(9)}] * 30)}}

        def load_dataset(name: str, config: str | None, **options: Any) -> Any:
            state["asked"] = (name, config, options)
            if isinstance(state["splits"], Exception):
                raise state["splits"]
            split = options["split"]
            return state["splits"] if split is None else state["splits"][split]

        monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
        monkeypatch.setattr(rows, "_look_up", lambda name, revision: None)
        return state

    def test_what_is_nowhere_is_said_at_once(
        self, tmp_path: Path, beam_nano: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Without asking `datasets`, which goes on asking for minutes."""

        def load_dataset(*_: Any, **__: Any) -> Any:
            raise AssertionError("asked")

        fake = SimpleNamespace(load_dataset=load_dataset)
        monkeypatch.setitem(sys.modules, "datasets", fake)
        with (
            hub_server() as running,
            client_of(running, tmp_path, monkeypatch),
            pytest.raises(HubError, match="no such folder here and no such repository"),
        ):
            load(["owner/none"], beam_nano)
        with pytest.raises(HubUnreachableError, match="looking for a dataset of that name"):
            load(["owner/none"], beam_nano)

    def test_rows_are_streamed(self, hub: dict[str, Any], beam_nano: Path) -> None:
        data = load(["owner/name"], beam_nano)
        assert data.samples == 4
        assert (data.sources[0].kind, data.sources[0].name) == ("hub", "owner/name")
        assert hub["asked"] == (
            "owner/name",
            None,
            {"split": None, "revision": None, "streaming": True},
        )

    def test_options_reach_the_library(self, hub: dict[str, Any], beam_nano: Path) -> None:
        hub["splits"] = {"a": FakeStream([{"text": prose(90)}]), "b": FakeStream([])}
        load(["owner/name,config=c,split=a,revision=r"], beam_nano)
        assert hub["asked"][1:] == ("c", {"split": "a", "revision": "r", "streaming": True})

    def test_split_must_be_clear(self, hub: dict[str, Any], beam_nano: Path) -> None:
        hub["splits"] = {"a": FakeStream([]), "b": FakeStream([])}
        with pytest.raises(CalibrationError, match="no split `train`; choose one of a, b"):
            load(["owner/name"], beam_nano)
        hub["splits"] = {"only": FakeStream([{"text": prose(90)}])}
        assert load(["owner/name"], beam_nano).samples == 4

    def test_failure_is_one_line(self, hub: dict[str, Any], beam_nano: Path) -> None:
        hub["splits"] = ConnectionError("offline")
        with pytest.raises(CalibrationError, match="ConnectionError: offline"):
            load(["owner/name"], beam_nano)

    def test_wrong_columns_are_listed(self, hub: dict[str, Any], beam_nano: Path) -> None:
        hub["splits"] = {"train": FakeStream([{"question": "x"}])}
        with pytest.raises(CalibrationError, match="columns: question"):
            load(["owner/name"], beam_nano)

    def test_the_library_itself(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The calls above exist in `datasets`: its own in-memory streams, without the network."""
        import datasets  # a second; only here

        table = datasets.Dataset.from_dict({"text": [f"row {i}" for i in range(20)]})
        stream = datasets.IterableDatasetDict({"train": table.to_iterable_dataset()})
        monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: stream)
        monkeypatch.setattr(rows, "_look_up", lambda name, revision: None)
        found = [row.values["text"] for row in rows.hub_rows("owner/name", {}, seed=1)]
        assert sorted(found) == sorted(f"row {i}" for i in range(20))
        assert found != sorted(found)


class TestTokenizer:
    def test_separator_is_eos(self, beam_nano: Path) -> None:
        assert CheckpointTokenizer(beam_nano).separator == 0

    @pytest.mark.parametrize("token", [{"content": "<|pad|>"}, "<|pad|>"])
    def test_separator_forms(self, nano_tokenizer: Path, token: object) -> None:
        (nano_tokenizer / "tokenizer_config.json").write_text(json.dumps({"eos_token": token}))
        assert CheckpointTokenizer(nano_tokenizer).separator == 1

    def test_separator_from_config(self, nano_tokenizer: Path) -> None:
        (nano_tokenizer / "tokenizer_config.json").unlink()
        (nano_tokenizer / "config.json").write_text('{"eos_token_id": [5, 6]}')
        assert CheckpointTokenizer(nano_tokenizer).separator == 5

    def test_no_separator_is_refused(self, nano_tokenizer: Path) -> None:
        (nano_tokenizer / "tokenizer_config.json").write_text('{"eos_token": "<|unknown|>"}')
        (nano_tokenizer / "config.json").write_text("{}")
        with pytest.raises(CalibrationError, match="no end-of-text token"):
            CheckpointTokenizer(nano_tokenizer)

    def test_missing_or_broken_file_is_refused(self, nano_tokenizer: Path) -> None:
        (nano_tokenizer / "tokenizer.json").write_text("version https://git-lfs.github.com")
        with pytest.raises(CalibrationError, match="not a tokenizer"):
            CheckpointTokenizer(nano_tokenizer)
        (nano_tokenizer / "tokenizer.json").unlink()
        with pytest.raises(CalibrationError, match=r"tokenizer\.json: not found"):
            CheckpointTokenizer(nano_tokenizer)

    def test_another_models_tokenizer_is_refused(self, nano_tokenizer: Path) -> None:
        (nano_tokenizer / "config.json").write_text('{"vocab_size": 100}')
        with pytest.raises(CalibrationError, match="belongs to another model"):
            CheckpointTokenizer(nano_tokenizer).encode(prose(3))

    def test_saved_truncation_does_not_apply(self, nano_tokenizer: Path) -> None:
        path = nano_tokenizer / "tokenizer.json"
        saved = json.loads(path.read_text())
        saved["truncation"] = {
            "direction": "Right",
            "max_length": 5,
            "strategy": "LongestFirst",
            "stride": 0,
        }
        path.write_text(json.dumps(saved))
        assert CheckpointTokenizer(nano_tokenizer).encode(prose(30)).size > 100

    def test_no_chat_template_is_refused(self, nano_tokenizer: Path) -> None:
        (nano_tokenizer / "chat_template.jinja").unlink()
        with pytest.raises(CalibrationError, match="no chat template"):
            CheckpointTokenizer(nano_tokenizer).render([{"role": "user", "content": "x"}])

    def test_remote_code_is_never_run(self, nano_tokenizer: Path, tmp_path: Path) -> None:
        marker = tmp_path / "ran"
        (nano_tokenizer / "evil.py").write_text(f"open({str(marker)!r}, 'w').close()\nE = 1\n")
        (nano_tokenizer / "tokenizer_config.json").write_text(
            json.dumps(
                {
                    "eos_token": "<|endoftext|>",
                    "tokenizer_class": "E",
                    "auto_map": {"AutoTokenizer": ["evil.E", "evil.E"]},
                }
            )
        )
        with suppress(CalibrationError):
            CheckpointTokenizer(nano_tokenizer).render([{"role": "user", "content": "x"}])
        assert not marker.exists()

    def test_missing_packages_are_named(
        self, beam_nano: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tokenizer = CheckpointTokenizer(beam_nano)
        monkeypatch.setitem(sys.modules, "transformers", None)
        with pytest.raises(MissingDependencyError, match="transformers"):
            tokenizer.render([{"role": "user", "content": "x"}])
        monkeypatch.setitem(sys.modules, "tokenizers", None)
        with pytest.raises(MissingDependencyError, match="tokenizers"):
            CheckpointTokenizer(beam_nano)


class TestPacking:
    def test_rows_are_the_documents_and_separators(self, tmp_path: Path, beam_nano: Path) -> None:
        for i in range(6):
            (tmp_path / f"{i}.txt").write_text(prose(3, i))
        data = load([tmp_path], beam_nano, samples=1000, sequence_length=7)
        tokenizer = CheckpointTokenizer(beam_nano)
        expected = {tuple(tokenizer.encode(prose(3, i)).tolist()) for i in range(6)}
        stream = data.input_ids.reshape(-1).tolist()
        found: set[tuple[int, ...]] = set()
        current: list[int] = []
        for token in stream:
            if token == tokenizer.separator:
                found.add(tuple(current))
                current = []
            else:
                current.append(token)
        assert len(found) >= 5
        assert found <= expected
        assert any(document[: len(current)] == tuple(current) for document in expected)

    def test_another_separator_and_no_special_tokens(
        self, tmp_path: Path, nano_tokenizer: Path
    ) -> None:
        """A tokenizer whose end-of-text token is not id 0, and which by itself puts special tokens
        around each text."""
        path = nano_tokenizer / "tokenizer.json"
        raw = json.loads(path.read_text())
        ends = {"<|endoftext|>": 0, "<|pad|>": 1}
        raw["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
                {"SpecialToken": {"id": "<|pad|>", "type_id": 0}},
            ],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
            "special_tokens": {
                name: {"id": name, "ids": [number], "tokens": [name]}
                for name, number in ends.items()
            },
        }
        path.write_text(json.dumps(raw))
        settings = {"eos_token": "<|pad|>", "bos_token": "<|endoftext|>"}
        (nano_tokenizer / "tokenizer_config.json").write_text(json.dumps(settings))
        plain = Tokenizer.from_file(str(path))
        assert plain.encode("a").ids[0] == 0, "the template has an effect"
        folder = tmp_path / "texts"
        folder.mkdir()
        for i in range(3):
            (folder / f"{i}.txt").write_text(prose(3, i))
        wanted = [[*plain.encode(prose(3, i), add_special_tokens=False).ids, 1] for i in range(3)]
        data = load([folder], nano_tokenizer, samples=sum(map(len, wanted)), sequence_length=1)
        stream = data.input_ids.reshape(-1).tolist()
        ends_at = [place + 1 for place, token in enumerate(stream) if token == 1]
        found = [stream[a:b] for a, b in zip([0, *ends_at], ends_at, strict=False)]
        assert sorted(found) == sorted(wanted)

    def test_same_seed_same_rows(self, tmp_path: Path, beam_nano: Path) -> None:
        for i in range(20):
            (tmp_path / f"{i}.txt").write_text(prose(10, i))
        first, again, other = (load([tmp_path], beam_nano, seed=seed) for seed in (1, 1, 2))
        assert first.digest == again.digest
        assert (first.input_ids == again.input_ids).all()
        assert first.to_dict() == again.to_dict()
        assert first.digest != other.digest
        assert first.input_ids.dtype == np.int64
        assert first.input_ids.shape == (4, 64)
        assert first.input_ids.flags.c_contiguous
        assert first.notes == ()

    def test_digest_tells_shapes_apart(self, tmp_path: Path, beam_nano: Path) -> None:
        (tmp_path / "a.txt").write_text(prose(50))
        wide = load([tmp_path], beam_nano, samples=2, sequence_length=64)
        tall = load([tmp_path], beam_nano, samples=4, sequence_length=32)
        assert (wide.input_ids.reshape(-1) == tall.input_ids.reshape(-1)).all()
        assert wide.digest != tall.digest

    def test_digest_tells_cuts_apart(self) -> None:
        ids = np.arange(6, dtype=np.int64)
        digests = {ids_digest([ids[:cut], ids[cut:]]) for cut in range(7)}
        assert len(digests | {ids_digest([ids])}) == 8
        assert ids_digest([ids[::2]]) == ids_digest([ids[::2].copy()])

    def test_weights_hold_in_tokens(self, tmp_path: Path, beam_nano: Path) -> None:
        for name in ("a", "b"):
            (tmp_path / f"{name}.txt").write_text(prose(600, ord(name)))
        specs = [f"{tmp_path / 'a.txt'}:0.3", f"{tmp_path / 'b.txt'}:0.9"]
        data = load(specs, beam_nano, samples=10, sequence_length=100)
        assert [source.tokens for source in data.sources] == [250, 750]
        assert data.samples == 10
        assert data.sources[0].digest != data.sources[1].digest

    def test_short_source_leaves_the_mix_as_it_is(self, tmp_path: Path, beam_nano: Path) -> None:
        (tmp_path / "a.txt").write_text(prose(1))
        (tmp_path / "b.txt").write_text(prose(600))
        data = load(
            [tmp_path / "a.txt", tmp_path / "b.txt"], beam_nano, samples=10, sequence_length=100
        )
        assert data.sources[1].tokens == 500
        assert data.samples == 5
        assert data.samples_asked == 10
        assert "5 of 10 samples" in data.notes[0]
        assert "a.txt: has 11 tokens, fewer than its share" in data.notes[1]

    def test_less_than_one_row_is_refused(self, tmp_path: Path, beam_nano: Path) -> None:
        (tmp_path / "a.txt").write_text("hello")
        with pytest.raises(CalibrationError, match=r"tokens found, at least 2,048 needed"):
            load([tmp_path / "a.txt"], beam_nano, sequence_length=2048)

    @pytest.mark.parametrize("options", [{"samples": 0}, {"sequence_length": 0}])
    def test_counts_below_one_are_usage_errors(
        self, beam_nano: Path, options: dict[str, int]
    ) -> None:
        with pytest.raises(UsageError, match="at least 1"):
            load([], beam_nano, **options)

    @given(
        weights=st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=6),
        total=st.integers(0, 10**9),
    )
    def test_shares_add_up(self, weights: list[float], total: int) -> None:
        parts = shares(weights, total)
        assert sum(parts) == total
        for part, weight in zip(parts, weights, strict=True):
            assert abs(part - total * weight / sum(weights)) <= 1 + 1e-6 * total


def documents_of(data: CalibrationData, model: Path) -> set[bytes]:
    """The ids of each whole document."""
    ids = data.input_ids.ravel()
    ends = np.flatnonzero(ids == CheckpointTokenizer(model).separator) + 1
    return {document.tobytes() for document in np.split(ids, ends)[:-1]}


class TestDefault:
    def test_list_is_sorted_and_of_this_python(self) -> None:
        assert list(MODULES) == sorted(set(MODULES))
        for split in ("calibration", "evaluation"):
            assert len(default_text(split).texts) == len(split_modules(split))

    def test_halves_share_nothing(self, beam_nano: Path) -> None:
        first, second = default_text("calibration"), default_text("evaluation")
        assert not set(first.texts) & set(second.texts)
        assert not first.digests() & second.digests()
        data = load([], beam_nano, samples=40, sequence_length=512)
        other = load([], beam_nano, samples=40, sequence_length=512, split="evaluation")
        assert documents_of(data, beam_nano)
        assert not documents_of(data, beam_nano) & documents_of(other, beam_nano)

    def test_description_names_the_python(self, beam_nano: Path) -> None:
        record = load([], beam_nano).sources[0]
        version = ".".join(map(str, sys.version_info[:3]))
        assert record.name.startswith(f"Python {version} standard library, 118 files")
        assert record.kind == "standard library"

    def test_module_or_package(self, tmp_path: Path) -> None:
        wanted = split_modules("calibration")
        for position, name in enumerate(wanted):
            path = tmp_path.joinpath(*name.split("."))
            path = path.with_name(path.name + ".py") if position % 2 else path / "__init__.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"# {name}")
        assert default_text(root=tmp_path).texts == {name: f"# {name}" for name in wanted}

    def test_python_without_sources_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(CalibrationError, match="0 of 118 standard-library sources"):
            default_text(root=tmp_path)
