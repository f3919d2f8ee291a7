"""Faults of outputs: everything a loader or the Hub looks for is there, true, and nothing else."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from beamq import dequantize, verify
from beamq.errors import DiskError, ResumeError
from beamq.io.safetensors_header import few, read_header
from beamq.io.shard_writer import disk_errors
from beamq.io.source import INDEX_NAME
from tests.helpers.checkpoint_damage import edit_json, find, flip, rewrite
from tests.helpers.craft import Run, convert, light_verify, read_json, recipe


def digests(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


COMPANIONS = [
    "LICENSE", "NOTICE.txt", "modeling_beam.py", "code/a/b/deep.py", "code/empty.txt", "a b.json",
    "chat_template.jinja", "special_tokens_map.json", "vocab.txt", "x.safetensors.md", "ä/ö.txt",
    "added_tokens.json", "tokenizer.model", "images/plot.png", "code/config.json", "USE_POLICY",
]  # fmt: skip
NAMED = {
    "weights": [
        "Old.BIN", "adapter_model.safetensors", "model.onnx_data", "old.bin", "onnx/model.onnx",
        "sub/model.safetensors", "x.gguf",
    ],
    "pickles": ["a.pickle", "state.pkl"],
    "bytecode": ["__pycache__/m.cpython-312.pyc", "code/x.pyc"],
    "of an adapter": ["adapter_config.json", "lora/adapter_config.json"],
    "of another quantization": ["quantize_config.json"],
    "a log or state of training": [
        "runs/events.out.tfevents.1.host.2", "train.log", "trainer_state.json",
    ],
    "temporary": [
        "config.json.bak", "model.safetensors.partial", "notes.txt~", "tokenizer.json.tmp",
        "x.part", "y.incomplete",
    ],
    "may be a secret": ["deploy/server.PEM", "id_rsa", "prod.env"],
}  # fmt: skip
LEFT = [
    "pytorch_model.bin.index.json", ".git/config", ".cache/x", "hf_quant_config.json",
    "code/.hidden", *(name for names in NAMED.values() for name in names),
]  # fmt: skip


def test_companions_are_copied_bit_for_bit_MO2060(nano_copy: Path, tmp_path: Path) -> None:
    for number, name in enumerate([*COMPANIONS, *LEFT]):
        (nano_copy / name).parent.mkdir(parents=True, exist_ok=True)
        content = bytes(range(number)) * 5000 if "empty" not in name else b""
        (nano_copy / name).write_bytes(b"{}" if name.endswith("config.json") else content)
    (hint,) = convert(nano_copy, tmp_path / "out", "fp8").plan.hints
    groups = [f"{few(sorted(names))} ({why})" for why, names in NAMED.items()]
    assert hint.partition(": ")[0] == f"{sum(map(len, NAMED.values()))} files are not copied"
    assert sorted(hint.partition(": ")[2].split("; ")) == sorted(groups)
    before, after = digests(nano_copy), digests(tmp_path / "out")
    for name in (*COMPANIONS, "tokenizer.json", "generation_config.json", "training.json"):
        assert after[name] == before[name]
    assert not set(LEFT) & set(after)
    own = {"README.md", "beamq.json", "config.json", INDEX_NAME, "model-00001-of-00001.safetensors"}
    copied = {*COMPANIONS, "tokenizer.json", "tokenizer_config.json", "generation_config.json",
              "training.json"}  # fmt: skip
    assert set(after) == own | copied


def test_dequantize_names_what_it_leaves(beam_nano: Path, tmp_path: Path, run: Run) -> None:
    convert(beam_nano, tmp_path / "out", "fp8")
    (tmp_path / "out" / "id_rsa").touch()
    code, _, err = run("dequantize", tmp_path / "out", tmp_path / "plain")
    assert code == 0
    assert "Note: 1 file is not copied: id_rsa (may be a secret)." in err
    assert not (tmp_path / "plain" / "id_rsa").exists()


POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 900\n"


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "LICENSE", "code/tool.py", "config.json", INDEX_NAME]
)
def test_a_git_lfs_pointer_is_refused_by_name_LFS4240(
    run: Run, nano_copy: Path, tmp_path: Path, name: str
) -> None:
    (nano_copy / name).parent.mkdir(exist_ok=True)
    (nano_copy / name).write_text(POINTER)
    for command in (["plan", nano_copy], ["quantize", nano_copy, tmp_path / "out"]):
        code, _, err = run(*command)
        assert code == 3
        assert name in err
        assert "run `git lfs pull`" in " ".join(err.split())
    assert not (tmp_path / "out").exists()


def test_large_companions_are_named_with_their_sizes(nano_copy: Path, run: Run) -> None:
    with (nano_copy / "photos.tar").open("wb") as stream:
        stream.truncate(200_000_000)
    code, out, _ = run("plan", nano_copy)
    assert code == 0
    assert "1 large file is copied: photos.tar (200.00 MB)" in " ".join(out.split())


@pytest.mark.parametrize(
    ("named", "kept"),
    [("/home/me/runs/7", False), ("C:\\models\\beam", False), ("~/beam", False), ("./out", False),
     ("org/beam", True), ("beam", True), ("", True)],
)  # fmt: skip
def test_a_path_in_the_config_is_not_published(
    nano_copy: Path, tmp_path: Path, named: str, kept: bool
) -> None:
    edit_json(nano_copy / "config.json", lambda data: data.update(_name_or_path=named))
    result = convert(nano_copy, tmp_path / "out", "fp8")
    assert (read_json(tmp_path / "out" / "config.json").get("_name_or_path") == named) is kept
    assert any("_name_or_path" in hint for hint in result.plan.hints) is not kept
    assert verify(tmp_path / "out", source=nano_copy).ok
    if not kept:
        edit_json(tmp_path / "out" / "config.json", lambda data: data.update(_name_or_path=named))
        dequantize(tmp_path / "out", tmp_path / "plain")
        assert "_name_or_path" not in read_json(tmp_path / "plain" / "config.json")


def test_paths_in_other_configs_are_named(nano_copy: Path, run: Run) -> None:
    edit_json(
        nano_copy / "tokenizer_config.json",
        lambda data: data.update(name_or_path="/home/me/x", vocab_file="C:\\v.txt", eos="</s>"),
    )
    code, out, _ = run("plan", nano_copy)
    assert code == 0
    said = "tokenizer_config.json names a folder of some machine (name_or_path, vocab_file)"
    assert said in " ".join(out.split())


def test_shards_over_the_hubs_size_are_noted(run: Run, beam_nano: Path) -> None:
    code, out, _ = run("plan", beam_nano, "--max-shard-size", "60GB")
    assert code == 0
    assert "files of 60.00 GB; the Hub asks for files under 50.00 GB" in " ".join(out.split())


CARD = "---\nlicense: mit\n---\n# Beam\n"
STATES_NONE = "No licence is stated"
# Name of the card, content, the licence that is found; None if the card cannot be read.
CARDS: dict[str, tuple[str, bytes, str | None]] = {
    "a BOM": ("README.md", b"\xef\xbb\xbf" + CARD.encode(), "mit"),
    "blank lines": ("README.md", b"\n \r\n" + CARD.encode(), "mit"),
    "CRLF": ("README.md", CARD.replace("\n", "\r\n").encode(), "mit"),
    "CR": ("README.md", CARD.replace("\n", "\r").encode(), None),
    "UTF-16": ("README.md", CARD.encode("utf-16"), "mit"),
    "nothing but metadata": ("README.md", b"---\nlicense: mit\n---", "mit"),
    "no end": ("README.md", b"---\nlicense: mit\n\n# Beam\n", None),
    "a Latin-1 byte": ("README.md", CARD.encode() + b"caf\xe9", "mit"),
    "a Latin-1 byte in front": ("README.md", b"---\nauthor: caf\xe9\nlicense: mit\n---\n", "mit"),
    "over a megabyte": ("README.md", CARD.encode() + b"x" * 2_000_000, "mit"),
    "small letters": ("readme.md", CARD.encode(), "mit"),
    "a tab": ("README.md", b"---\nlicense: mit\ndata:\n\t- a\n---\n", None),
}


@pytest.mark.parametrize(("name", "content", "licence"), CARDS.values(), ids=CARDS.keys())
def test_the_licence_of_an_odd_card_is_not_lost_HUBDOCS995(
    nano_copy: Path, tmp_path: Path, name: str, content: bytes, licence: str | None
) -> None:
    (nano_copy / name).write_bytes(content)
    (nano_copy / "LICENSE.txt").write_text("Be kind.")
    result = convert(nano_copy, tmp_path / "out", "fp8")
    card = (tmp_path / "out" / "README.md").read_text()
    assert yaml.safe_load(card[4:].split("\n---")[0]).get("license") == licence
    assert STATES_NONE not in card
    assert "`LICENSE.txt`" in card
    assert (tmp_path / "out" / "README.source.md").read_bytes() == content
    assert any("could not be read" in hint for hint in result.plan.hints) is (licence is None)
    assert ("could not be read" in card) is (licence is None)


@pytest.mark.parametrize("card", [None, "# Beam\n", "---\nlanguage: en\n---\n"])
def test_a_licence_file_is_named_where_no_card_states_a_licence(
    nano_copy: Path, tmp_path: Path, card: str | None
) -> None:
    if card is not None:
        (nano_copy / "README.md").write_text(card)
    for name in ("LICENSE", "license.pkl", "licensed.md"):
        (nano_copy / name).write_text("Be kind.")
    convert(nano_copy, tmp_path / "out", "fp8")
    text = (tmp_path / "out" / "README.md").read_text()
    assert STATES_NONE in text
    assert "The file `LICENSE` is the source's own." in text
    assert (tmp_path / "out" / "LICENSE").read_text() == "Be kind."


@pytest.mark.parametrize("fmt", ["nvfp4", "fp8"])
@pytest.mark.parametrize("limit", [150_000, 1_000_000, 5_000_000_000])
def test_index_headers_and_names_are_one(
    beam_nano: Path, tmp_path: Path, fmt: str, limit: int
) -> None:
    output = tmp_path / "out"
    convert(beam_nano, output, fmt, max_shard_bytes=limit)
    index = json.loads((output / INDEX_NAME).read_text())
    shards = sorted(output.glob("*.safetensors"))
    count = len(shards)
    expected = [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    assert [path.name for path in shards] == expected
    found: dict[str, str] = {}
    total = 0
    for path in shards:
        specs, metadata = read_header(path, path.name)
        assert metadata == {"format": "pt"}
        found.update({spec.name: path.name for spec in specs})
        total += sum(spec.nbytes for spec in specs)
    assert index["weight_map"] == found
    assert index["metadata"]["total_size"] == total
    homes: dict[str, set[str]] = {}
    for name, file in found.items():
        homes.setdefault(name.rpartition(".")[0], set()).add(file)
    apart = {m for m, files in homes.items() if len(files) > 1}
    # Copied tensors may part company (a router and its bias); a linear and its scales never.
    assert not {m for m in apart if f"{m}.weight_scale" in found}


def test_the_card_is_yaml_and_has_no_path(nano_copy: Path, tmp_path: Path) -> None:
    edit_json(nano_copy / "config.json", lambda c: c.update(_name_or_path=str(nano_copy)))
    (nano_copy / "README.md").write_text(
        "---\nlicense: apache-2.0\nlanguage: [en]\nx: {{ no }}\n---\n# hello\n"
        .replace("{{ no }}", "1")
    )  # fmt: skip
    convert(nano_copy, tmp_path / "out", "fp8")
    card = (tmp_path / "out" / "README.md").read_text()
    front = yaml.safe_load(card.split("---\n")[1])
    assert front["license"] == "apache-2.0"
    assert front["library_name"] == "transformers"
    assert "beamq" in front["tags"]
    assert str(tmp_path) not in card
    assert "/" not in front.get("base_model", "")
    for name in ("beamq.json", "config.json", INDEX_NAME):
        text = (tmp_path / "out" / name).read_text()
        assert str(tmp_path) not in text.replace(f'"_name_or_path": "{nano_copy}"', "")


@pytest.mark.parametrize(
    "front",
    ["---\nlicense: [*a]\n---", "---\na: &a [x, x]\nb: &b [*a, *a]\nlicense: *b\n---", "---\n\0",
     "---\nlicense: !!python/object/apply:os.system ['true']\n---", "---\n" + "[" * 5000 + "\n---",
     "--- \n: : :\n---", "---\nlicense: 5\nlanguage: {a: b}\n---"],
)  # fmt: skip
def test_a_strangers_card_breaks_nothing(nano_copy: Path, tmp_path: Path, front: str) -> None:
    (nano_copy / "README.md").write_text(front)
    convert(nano_copy, tmp_path / "out", "fp8")
    card = (tmp_path / "out" / "README.md").read_text()
    assert isinstance(yaml.safe_load(card.split("---\n")[1]), dict)
    assert (tmp_path / "out" / "README.source.md").read_text() == front


def test_half_a_surrogate_pair_in_a_config_is_written_again(
    nano_copy: Path, tmp_path: Path
) -> None:
    """Found here: it stopped a run at its very end, when config.json was to be written."""
    text = (nano_copy / "config.json").read_text().rstrip().removesuffix("}")
    (nano_copy / "config.json").write_text(text + ', "motto": "\\ud83d", "name": "Bäm"}')
    convert(nano_copy, tmp_path / "out", "fp8")
    assert read_json(tmp_path / "out" / "config.json")["motto"] == "\ud83d"


# What may be written over ----------------------------------------------------------------------


def test_overwrite_leaves_no_weights_of_before(beam_nano: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    convert(beam_nano, output, "fp8", max_shard_bytes=300_000)
    (output / "README.md.partial").write_text("old")
    convert(beam_nano, output, "nvfp4", overwrite=True)
    convert(beam_nano, tmp_path / "fresh", "nvfp4")
    assert digests(output) == digests(tmp_path / "fresh")


@pytest.mark.parametrize(
    "name",
    ["pytorch_model.bin", "x.gguf", "consolidated.pth", "b.index.json", "y.safetensors.partial",
     "model-00001-of-00099.safetensors"],
)  # fmt: skip
@pytest.mark.parametrize("option", ["overwrite", "resume"])
def test_weights_that_beamq_did_not_write_are_not_deleted(
    beam_nano: Path, tmp_path: Path, name: str, option: str
) -> None:
    output = convert(beam_nano, tmp_path / "out", "fp8", max_shard_bytes=300_000).output
    (output / name).write_text("weeks of work")
    before = digests(output)
    with pytest.raises(ResumeError, match=f"beamq did not write.*{name}"):
        convert(beam_nano, output, "nvfp4", **{option: True})
    assert digests(output) == before


def test_the_original_is_never_overwritten(run: Run, beam_nano: Path, tmp_path: Path) -> None:
    """By a run that reads what was made from it: without beamq.json, and where beamq made it."""
    original = Path(shutil.copytree(beam_nano, tmp_path / "original"))
    made = convert(original, tmp_path / "made", "fp8").output
    plain = tmp_path / "plain"
    dequantize(made, plain)
    again = convert(plain, tmp_path / "again", "fp8").output
    for source, folder, words in (
        (made, original, "beamq did not make it"),
        (again, plain, "is the source that"),
    ):
        before = digests(folder)
        code, _, err = run("dequantize", source, folder, "--overwrite", "-q")
        assert (code, words in " ".join(err.split())) in ((2, True), (3, True)), err
        assert digests(folder) == before


WRITERS: dict[str, tuple[str, list[str]]] = {
    "calibrate": ("stats.safetensors", ["calibrate", "S", "FILE", "--overwrite"]),
    "quantize --statistics": ("s.safetensors", ["quantize", "S", "OUT", "--statistics", "FILE"]),
    "sensitivity --write-recipe": (
        "r.yaml", ["sensitivity", "S", "Q", "--exclude-worst", "1", "--write-recipe", "FILE"]
    ),
    "sensitivity --report": ("sensitivity.md", ["sensitivity", "S", "Q", "--report", "FOLDER"]),
    "compare --report": ("report.html", ["compare", "S", "Q", "--report", "FOLDER"]),
    "calibrate --merge": ("m.safetensors", ["calibrate", "--merge", "T", "T", "--output", "FILE"]),
}  # fmt: skip


@pytest.mark.parametrize(("name", "command"), WRITERS.values(), ids=WRITERS.keys())
def test_no_command_replaces_a_file_of_the_users(
    run: Run, beam_nano: Path, tmp_path: Path, name: str, command: list[str]
) -> None:
    """Each file that a command can be told to write: refused before long work, and unchanged."""
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / name).write_text("weeks of work")
    places = {"S": beam_nano, "OUT": tmp_path / "out", "FOLDER": folder, "FILE": folder / name}
    if "Q" in command:
        places["Q"] = convert(beam_nano, tmp_path / "q", "fp8").output
    code, _, err = run(*(places.get(word, word) for word in command))
    assert code in (2, 3, 4), err
    assert "exists" in err
    assert (folder / name).read_text() == "weeks of work"
    assert [path.name for path in folder.iterdir()] == [name]


STRANGERS: dict[str, Callable[[Path], object]] = {
    "letters": lambda f: (f / "letter.txt").write_text("dear"),
    "an adapter": lambda f: (f / "adapter_model.safetensors").write_bytes(b"weeks of work"),
    "someone's checkpoint": lambda f: [
        (f / name).write_text("{}")
        for name in ("config.json", INDEX_NAME, "model-00001-of-00001.safetensors")
    ],
    "a download": lambda f: (f / "model.safetensors.partial").write_text("x"),
}


@pytest.mark.parametrize("make", STRANGERS.values(), ids=STRANGERS.keys())
def test_resume_touches_nothing_that_is_not_ours(
    beam_nano: Path, tmp_path: Path, make: Callable[[Path], object]
) -> None:
    """Found here: `--resume` in a wrong folder removed every weight file that it did not know."""
    output = tmp_path / "precious"
    output.mkdir()
    make(output)
    before = digests(output)
    for options in ({"resume": True}, {}):
        with pytest.raises(ResumeError):
            convert(beam_nano, output, **options)
    assert digests(output) == before


def test_what_was_begun_with_another_recipe_stays(beam_nano: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    convert(beam_nano, output, "fp8")
    before = digests(output)
    for chosen in (recipe("nvfp4"), recipe("fp8", "expert")):
        with pytest.raises(ResumeError, match="another recipe"):
            convert(beam_nano, output, recipe=chosen, resume=True)
    assert digests(output) == before


@pytest.mark.parametrize(
    "counts", [[], {"zero_groups": 5}, {"zero_rows": "many"}, {"zero_groups": [1]}, 7]
)
def test_a_manifest_that_was_tampered_with_is_refused(
    run: Run, beam_nano: Path, tmp_path: Path, counts: object
) -> None:
    output = tmp_path / "out"
    arguments = ["quantize", beam_nano, output, "--recipe", "fp8", "-q"]
    assert run(*arguments)[0] == 0
    edit_json(output / "beamq.json", lambda manifest: manifest.update(counts=counts))
    code, _, err = run(*arguments, "--resume")
    assert code == 3
    assert "damaged" in err


@pytest.mark.parametrize("name", ["README.md.partial", "code"])
def test_links_in_the_output_are_not_followed(nano_copy: Path, tmp_path: Path, name: str) -> None:
    (nano_copy / "code").mkdir()
    (nano_copy / "code" / "x.py").write_text("new")
    output, outside = tmp_path / "out", tmp_path / "outside"
    outside.mkdir()
    (outside / "x.py").write_text("mine")
    (outside / "target").write_text("mine")
    convert(nano_copy, output, "fp8")
    if name == "code":
        shutil.rmtree(output / "code")
        (output / "code").symlink_to(outside)
    else:
        (output / name).symlink_to(outside / "target")
    before = digests(outside)
    with suppress(DiskError):  # refused, or the link was replaced
        convert(nano_copy, output, "fp8", overwrite=True)
    assert digests(outside) == before


# What verify must find -------------------------------------------------------------------------


MODULE = "model.layers.4.mlp.experts.7.up_proj"


@pytest.fixture(scope="module")
def finished(beam_nano: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("finished") / "out"
    convert(beam_nano, output, max_shard_bytes=1_000_000)
    return output


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "weight_scale deleted": (
        lambda f: rewrite(f, f"{MODULE}.weight", lambda t: t.pop(f"{MODULE}.weight_scale")),
        f"{MODULE}.weight_scale",
    ),
    "bit of a code": (lambda f: flip(f, f"{MODULE}.weight", 5, 0x40), f"{MODULE}.weight"),
    "bit of a block scale": (lambda f: flip(f, f"{MODULE}.weight_scale", 3), "weight_scale"),
    "bit of a global scale": (lambda f: flip(f, f"{MODULE}.weight_scale_2", 1), "weight_scale_2"),
    "bit of a norm": (lambda f: flip(f, "model.norm.weight", 0), "model.norm.weight"),
    "bit of a router bias": (
        lambda f: flip(f, "model.layers.4.mlp.gate.e_score_correction_bias", 1), "e_score"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("damage", "where"), DAMAGE.values(), ids=DAMAGE.keys())
def test_verify_names_it_and_exits_1(
    run: Run, finished: Path, tmp_path: Path, damage: Callable[[Path], object], where: str
) -> None:
    folder = shutil.copytree(finished, tmp_path / "damaged")
    damage(folder)
    code, out, _ = run("verify", folder, "--json", "-q")
    assert code == 1
    failures = [check for check in json.loads(out)["checks"] if check["status"] == "fail"]
    assert any(where in place for check in failures for place in check["where"])


def test_a_shard_from_another_run_exits_1(
    run: Run, finished: Path, nano_copy: Path, tmp_path: Path
) -> None:
    flip(nano_copy, f"{MODULE}.weight", 1, 0x02)
    convert(nano_copy, tmp_path / "b", max_shard_bytes=1_000_000)
    folder = shutil.copytree(finished, tmp_path / "a")
    shard = find(folder, f"{MODULE}.weight").file
    other = tmp_path / "b" / find(tmp_path / "b", f"{MODULE}.weight").file
    shutil.copy(other, folder / shard)
    code, out, _ = run("verify", folder, "--json", "-q")
    assert code == 1
    checks = {check["name"]: check for check in json.loads(out)["checks"]}
    assert all(".4.mlp.experts.7." in place for place in checks["checksums.tensors"]["where"])


def test_what_was_finished_passes(finished: Path, beam_nano: Path) -> None:
    assert light_verify(finished, source=beam_nano).ok


# What to do about a failing disk -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "resumed", "anew"),
    [
        (errno.ENOSPC, "disk full; free space, then run again with --resume", "then run it again"),
        (errno.EIO, "check the disk, then run again with --resume", "check the disk, then run it"),
        (errno.EMFILE, "ulimit -n, then run again with --resume", "ulimit -n, then run it again"),
        (errno.EFBIG, "or use a smaller --max-shard-size", "system's); raise it"),
        (errno.ENOENT, "check the path, then run again with --resume", "path, then run it again"),
        (errno.EACCES, "a writable folder", "a writable folder"),
    ],
)
def test_only_what_can_be_resumed_is_told_to_resume(
    tmp_path: Path, number: int, resumed: str, anew: str
) -> None:
    for resumable, said in ((True, resumed), (False, anew)):
        with pytest.raises(DiskError) as raised, disk_errors(tmp_path, "x", resumable=resumable):
            raise OSError(number, "no")
        assert said in str(raised.value)
        assert resumable or "--resume" not in str(raised.value)
        assert resumable or "--max-shard-size" not in str(raised.value)


def test_a_report_that_cannot_be_written_is_refused_before_the_work(
    run: Run, beam_nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("mine")
    for command in ("compare", "sensitivity"):
        arguments = [command, beam_nano, beam_nano, "--report", tmp_path / "file" / "deep"]
        code, _, err = run(*arguments)
        assert code == 4
        assert "is not a folder; choose another --report" in err
        assert err.startswith("error: "), "nothing was begun"
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
    code, _, err = run("compare", beam_nano, beam_nano, "--report", tmp_path / "new")
    assert code == 4
    assert "may not be written to" in err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_folder_that_cannot_be_made_is_not_told_to_resume(
    beam_nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    genuine = Path.mkdir

    def mkdir(self: Path, *arguments: object, **options: object) -> None:
        if self.name == "inner":
            raise OSError(errno.EIO, "Input/output error")
        genuine(self, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "mkdir", mkdir)
    with pytest.raises(DiskError, match="creating the folder failed") as raised:
        convert(beam_nano, tmp_path / "outer" / "inner", "fp8")
    assert "--resume" not in str(raised.value)
    assert not list(tmp_path.iterdir()), "what was made for it went again"
