"""examples/serve_and_compare.py against a double of the engines' servers."""

from __future__ import annotations

import json
import math
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.helpers.completions_server import completions_server
from tests.helpers.model_fixtures import hf_logits, hf_model

import torch  # isort: skip

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "serve_and_compare.py"))
ROWS = [[1, 52, 7, 300, 9], [1, 8, 99], [5, 6, 7, 8, 9, 10, 11]]
Ask = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def truth(beam_nano: Path) -> Callable[[Sequence[int]], list[float]]:
    """transformers' log-probabilities, in BF16."""
    model = hf_model(beam_nano, torch.bfloat16)

    def score(row: Sequence[int]) -> list[float]:
        scores_TV = hf_logits(model, torch.tensor([row]))[0].log_softmax(-1)
        return [float(scores_TV[t, token]) for t, token in enumerate(row[1:])]

    return score


@pytest.fixture
def ask(beam_nano: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Ask:
    (tmp_path / "rows.json").write_text(json.dumps(ROWS))

    def run(*more: str, rows: Path | None = tmp_path / "rows.json") -> tuple[int, str, str]:
        given = [] if rows is None else ["--rows", str(rows)]
        code = SCRIPT["main"]([str(beam_nano), *given, "--device", "cpu", *more])
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.mark.parametrize("api", ["vllm", "sglang"])
def test_a_server_that_is_right(ask: Ask, truth: Any, api: str) -> None:
    with completions_server(truth, []) as url:
        code, out, _ = ask("--endpoint", url, "--api", api, "--json")
    found = json.loads(out)
    assert code == 0
    assert (found["rows"], found["tokens"]) == (3, 4 + 2 + 6)
    mean = -sum(sum(truth(row)) for row in ROWS) / 12
    assert found["nll_served"] == pytest.approx(mean, rel=1e-9)
    assert found["nll_beamq"] == pytest.approx(mean, abs=0.03)
    assert found["mean_absolute_difference"] < 0.1


def test_one_token_that_is_wrong_is_named(ask: Ask, truth: Any) -> None:
    def wrong(row: Sequence[int]) -> list[float]:
        scores = truth(row)
        if row == ROWS[1]:
            scores[1] -= 3.0
        return scores

    with completions_server(wrong, []) as url:
        found = json.loads(ask("--endpoint", f"{url}/v1/", "--json")[1])
        text = ask("--endpoint", url)[1]
    assert found["largest_at"] == {"row": 1, "token": 2, "id": 99}
    assert found["largest_difference"] == pytest.approx(-3.0, abs=0.1)
    assert found["mean_difference"] == pytest.approx(-0.5, abs=0.05)  # of rows: 0, -1.5, 0
    assert found["standard_error"] == pytest.approx(0.5, abs=0.05)
    assert "(row 1, token 2, id 99)" in text
    assert max(map(len, text.splitlines())) <= 80


def test_the_figures() -> None:
    found = SCRIPT["compare"]([[1, 2, 3]], [[-1.0, -2.0]], [[-1.5, -1.0]])
    assert found["mean_difference"] == -0.25
    assert found["mean_absolute_difference"] == 0.75
    assert (found["nll_served"], found["nll_beamq"]) == (1.5, 1.25)
    assert found["standard_error"] is None


def test_rows_of_the_default_text(ask: Ask) -> None:
    lengths = []

    def score(row: Sequence[int]) -> list[float]:
        lengths.append(len(row))
        return [-1.0] * (len(row) - 1)

    size = ("--samples", "2", "--sequence-length", "24")
    with completions_server(score, []) as url:
        code, out, _ = ask("--endpoint", url, *size, "--json", rows=None)
    assert (code, lengths) == (0, [24, 24])
    assert json.loads(out)["nll_served"] == 1.0


@pytest.mark.parametrize("faults", [[503, "cut"], [429]])
def test_a_server_that_is_busy_or_cuts_an_answer_is_asked_again(
    ask: Ask, truth: Any, faults: list[int | str]
) -> None:
    with completions_server(truth, faults) as url:
        assert ask("--endpoint", url)[0] == 0


@pytest.mark.parametrize(
    ("faults", "score", "said"),
    [
        ([400], [-1.0], "answers 400: "),
        ([500, 500, 500], [-1.0], "answers 500: "),
        (["cut", "cut", "cut"], [-1.0], "IncompleteRead"),
        ([], [math.nan], "is nan, not a number"),
        ([], [-9999.0], "is minus infinity"),
        ([], [None], "is None, not a number"),
    ],
)
@pytest.mark.parametrize("api", ["vllm", "sglang"])
def test_a_server_that_fails(ask: Ask, faults: Any, score: Any, said: str, api: str) -> None:
    with completions_server(lambda row: score * (len(row) - 1), faults) as url:
        code, out, err = ask("--endpoint", url, "--api", api)
    assert (code, out) == (1, "")
    assert said in err
    assert err.startswith("error: ")


def test_a_server_of_another_kind(ask: Ask) -> None:
    with completions_server(lambda row: [-1.0] * (len(row) - 1), []) as url:
        code, _, err = ask("--endpoint", url, "--model", "other")
    assert code == 1
    assert "no prompt_logprobs" in err
    code, _, err = ask("--endpoint", "http://127.0.0.1:9")
    assert code == 1
    assert "refused" in err


@pytest.mark.parametrize("content", ["", "{}", "[]", "[1]", "[[1]]", '[["a", "b"]]', "[[true, 1]]"])
def test_rows_that_cannot_be(ask: Ask, tmp_path: Path, content: str) -> None:
    rows = tmp_path / "odd.json"
    rows.write_text(content)
    code, _, err = ask("--endpoint", "http://127.0.0.1:9", rows=rows)
    assert code == 1
    assert str(rows) in err


def test_vllm_in_this_process(ask: Ask, truth: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A double of the module: which arguments it is given, and the form of its answers."""
    double: Any = ModuleType("vllm")
    made: dict[str, Any] = {}

    class LLM:
        def __init__(self, **options: Any) -> None:
            made.update(options)

        def generate(self, prompts: list[dict[str, list[int]]], how: Any) -> list[Any]:
            assert how.prompt_logprobs == 0
            rows = [prompt["prompt_token_ids"] for prompt in prompts]
            return [
                SimpleNamespace(
                    prompt_logprobs=[
                        None,
                        *({t: SimpleNamespace(logprob=p)} for t, p in zip(r[1:], truth(r))),  # noqa: B905
                    ]
                )
                for r in rows
            ]

    double.LLM, double.SamplingParams = LLM, lambda **options: SimpleNamespace(**options)
    monkeypatch.setitem(sys.modules, "vllm", double)
    code, out, _ = ask("--in-process", "--json", "--tensor-parallel-size", "2")
    assert code == 0
    assert json.loads(out)["mean_absolute_difference"] < 0.1
    assert (made["tensor_parallel_size"], made["max_model_len"]) == (2, 8)
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert "needs vLLM" in ask("--in-process")[2]
