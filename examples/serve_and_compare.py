"""Hold the log-probabilities of a served Beam against those that beamq computes.

    vllm serve FOLDER &
    python examples/serve_and_compare.py FOLDER --endpoint http://localhost:8000
    python examples/serve_and_compare.py FOLDER --endpoint http://localhost:30000 --api sglang
    python examples/serve_and_compare.py FOLDER --in-process

In: the folder that is served, and rows of token ids: a JSON file such as [[1, 52, 7], [1, 8, 99]],
or rows of the text that `beamq compare` judges by. Out: for each side the mean negative
log-likelihood of the tokens, and how far the two are apart. Exit code 0 if all was measured, 1 if
not: whether a difference matters is for the reader, see docs/serving.md.

The server is asked for the log-probability of each token of a prompt: vLLM by `prompt_logprobs` of
its completions, SGLang by `return_logprob` of /generate. A server with several replicas, prefix
caching or quantized activations may answer the same question in slightly different ways.
"""

from __future__ import annotations

import argparse
import http.client
import json
import math
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

ATTEMPTS = 3
MINUS_INFINITY = -9999.0  # written in its place by vLLM, by public notes; JSON cannot hold it
LOGITS_BYTES = 2 << 30
NOISE = "weights-only: 4-bit or 8-bit weights with BF16 activations, as vLLM's Marlin kernels"


class Fault(Exception):
    """What ends the comparison, as a line for the user."""


def main(arguments: Sequence[str] | None = None) -> int:
    asked = _options(arguments)
    try:
        rows = _read_rows(asked)
        served = _in_process(asked, rows) if asked.in_process else _from_endpoint(asked, rows)
        result = compare(rows, served, list(_by_beamq(asked, rows)))
    except Fault as fault:
        print(f"error: {fault}", file=sys.stderr)
        return 1
    print(json.dumps(result, indent=2) if asked.json else _text(result))
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="the checkpoint that is served")
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument("--endpoint", help="the server's address, such as http://localhost:8000")
    how.add_argument("--in-process", action="store_true", help="load vLLM in this process")
    parser.add_argument("--api", choices=("vllm", "sglang"), default="vllm")
    parser.add_argument("--model", help="the served name (default: the server's first)")
    parser.add_argument("--rows", type=Path, help="JSON file of rows of token ids")
    parser.add_argument("--samples", type=int, default=4, help="without --rows: rows of text")
    parser.add_argument("--sequence-length", type=int, default=256, help="tokens in each of them")
    parser.add_argument("--gemm", default="reference", help=f"beamq's back end; {NOISE}")
    parser.add_argument("--device", default="auto", help="where beamq computes")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="with --in-process")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one answer")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser.parse_args(arguments)


def _read_rows(asked: argparse.Namespace) -> list[list[int]]:
    """Rows of two tokens or more: the first one of a row has no prediction."""
    if asked.rows is None:
        from beamq.calib.data import load_calibration_data
        from beamq.errors import BeamqError

        try:
            data = load_calibration_data(
                (), asked.folder, samples=asked.samples, sequence_length=asked.sequence_length,
                seed=0, split="evaluation",
            )  # fmt: skip
        except BeamqError as fault:
            raise Fault(str(fault)) from None
        return [list(map(int, row)) for row in data.input_ids]
    try:
        rows = json.loads(asked.rows.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as fault:
        raise Fault(f"{asked.rows}: cannot be read as JSON: {fault}") from None
    good = isinstance(rows, list) and rows and all(
        isinstance(row, list) and len(row) > 1 and all(type(token) is int for token in row)
        for row in rows
    )  # fmt: skip
    if not good:
        raise Fault(f"{asked.rows}: expected a list of rows, each with two token ids or more")
    return [list(row) for row in rows]


# --- the server ----------------------------------------------------------------------------------


def _from_endpoint(asked: argparse.Namespace, rows: list[list[int]]) -> list[list[float]]:
    """Log-probabilities of tokens 1, 2, ... of each row, one request a row."""
    base = asked.endpoint.rstrip("/").removesuffix("/v1")
    if asked.api == "sglang":
        return [_sglang(base, row, asked.timeout) for row in rows]
    model = asked.model
    if model is None:
        found = _ask(f"{base}/v1/models", None, asked.timeout)
        try:
            model = str(found["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise Fault(f"{base}/v1/models: names no model; give --model") from None
    return [_vllm(base, model, row, asked.timeout) for row in rows]


def _vllm(base: str, model: str, row: list[int], timeout: float) -> list[float]:
    body = {"model": model, "prompt": row, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
    answer = _ask(f"{base}/v1/completions", body, timeout)
    try:
        found = answer["choices"][0]["prompt_logprobs"]
        pairs = [(token, entry[str(token)]["logprob"]) for token, entry in _tail(row, found)]
    except (KeyError, IndexError, TypeError):
        raise Fault(
            f"{base}: its answer has no prompt_logprobs for every token of the prompt; is it vLLM's"
            " server, and does it serve this folder?"
        ) from None
    return [_finite(value, token, base) for token, value in pairs]


def _sglang(base: str, row: list[int], timeout: float) -> list[float]:
    body = {
        "input_ids": row, "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        "return_logprob": True, "logprob_start_len": 0,
    }  # fmt: skip
    answer = _ask(f"{base}/generate", body, timeout)
    try:
        found = answer["meta_info"]["input_token_logprobs"]
        pairs = [(token, entry[0], entry[1]) for token, entry in _tail(row, found)]
    except (KeyError, IndexError, TypeError):
        raise Fault(
            f"{base}: its answer has no input_token_logprobs for every token of the prompt; is it"
            " SGLang's server?"
        ) from None
    if any(token != other for token, _, other in pairs):
        raise Fault(f"{base}: answers for other tokens than it was asked about")
    return [_finite(value, token, base) for token, value, _ in pairs]


def _tail(row: list[int], found: list[Any]) -> Iterator[tuple[int, Any]]:
    if len(found) != len(row):
        raise TypeError
    return zip(row[1:], found[1:], strict=True)


def _finite(value: object, token: int, base: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise Fault(f"{base}: the log-probability of token {token} is {value!r}, not a number")
    if value <= MINUS_INFINITY:
        raise Fault(f"{base}: the log-probability of token {token} is minus infinity ({value})")
    return float(value)


def _ask(url: str, body: object, timeout: float) -> Any:
    """The JSON of an answer; a server that is busy, or cuts an answer, is asked again."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    for attempt in range(ATTEMPTS):
        try:
            request = urllib.request.Request(url, data, headers)
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as fault:
            said = fault.read(500).decode("utf-8", "replace")
            why = f"answers {fault.code}: {' '.join(said.split())[:300]}"
            if fault.code < 500 and fault.code != 429:
                break
        except (OSError, ValueError, http.client.HTTPException) as fault:
            why = f"{type(fault).__name__}: {fault}"
        if attempt + 1 < ATTEMPTS:
            time.sleep(attempt)
    raise Fault(f"{url}: {why}")


def _in_process(asked: argparse.Namespace, rows: list[list[int]]) -> list[list[float]]:
    try:
        from vllm import LLM, SamplingParams
    except ImportError as fault:
        raise Fault(f"--in-process needs vLLM: {fault}") from None
    model = LLM(
        model=str(asked.folder),
        tensor_parallel_size=asked.tensor_parallel_size,
        max_model_len=max(map(len, rows)) + 1,
        enforce_eager=True,
    )
    how = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    answers = model.generate([{"prompt_token_ids": row} for row in rows], how)
    return [
        [_finite(entry[token].logprob, token, "vLLM")
         for token, entry in _tail(row, answer.prompt_logprobs)]
        for row, answer in zip(rows, answers, strict=True)
    ]  # fmt: skip


# --- beamq, and the difference -------------------------------------------------------------------


def _by_beamq(asked: argparse.Namespace, rows: list[list[int]]) -> Iterator[list[float]]:
    """The same log-probabilities from `beamq.logits`, as many rows at a time as fit `LOGITS_BYTES`;
    the model is read once for each time."""
    import torch

    import beamq

    longest = max(map(len, rows))
    vocabulary = json.loads((asked.folder / "config.json").read_text())["vocab_size"]
    step = max(1, LOGITS_BYTES // (longest * vocabulary * 4))
    for start in range(0, len(rows), step):
        some = rows[start : start + step]
        ids = torch.tensor([[*row, *[0] * (longest - len(row))] for row in some])
        mask = torch.tensor([[i < len(row) for i in range(longest)] for row in some]).long()
        try:
            found = beamq.logits(
                asked.folder, ids, attention_mask=mask, gemm=asked.gemm, device=asked.device
            )
        except beamq.BeamqError as fault:
            raise Fault(str(fault)) from None
        for logits_TV, row in zip(found, some, strict=True):
            scores_TV = logits_TV[: len(row) - 1].log_softmax(-1)
            picked = scores_TV.gather(-1, torch.tensor(row[1:], device=scores_TV.device)[:, None])
            yield picked.flatten().tolist()


def compare(
    rows: Sequence[Sequence[int]], served: list[list[float]], ours: list[list[float]]
) -> dict[str, Any]:
    """Means in nats a token; standard errors over rows, because tokens of a row are not
    independent; null for one row."""
    apart = [[a - b for a, b in zip(x, y, strict=True)] for x, y in zip(served, ours, strict=True)]
    by_row = [fmean(each) for each in apart]
    every = [value for each in apart for value in each]
    row, place = max(
        ((r, t) for r, each in enumerate(apart) for t in range(len(each))),
        key=lambda at: abs(apart[at[0]][at[1]]),
    )
    return {
        "rows": len(rows),
        "tokens": len(every),
        "nll_served": -fmean(value for each in served for value in each),
        "nll_beamq": -fmean(value for each in ours for value in each),
        "mean_difference": fmean(by_row),
        "standard_error": stdev(by_row) / math.sqrt(len(by_row)) if len(by_row) > 1 else None,
        "mean_absolute_difference": fmean(map(abs, every)),
        "largest_difference": apart[row][place],
        "largest_at": {"row": row, "token": place + 1, "id": rows[row][place + 1]},
    }


def _text(result: dict[str, Any]) -> str:
    error = result["standard_error"]
    spread = "" if error is None else f" +- {error:.5f} (standard error over rows)"
    at = result["largest_at"]
    return "\n".join(
        (
            f"tokens                    {result['tokens']:,} in {result['rows']:,} rows",
            f"served, nats a token      {result['nll_served']:.5f}",
            f"beamq, nats a token       {result['nll_beamq']:.5f}",
            f"served less beamq         {result['mean_difference']:+.5f}{spread}",
            f"mean absolute difference  {result['mean_absolute_difference']:.5f}",
            f"largest difference        {result['largest_difference']:+.5f} (row {at['row']}, token"
            f" {at['token']}, id {at['id']})",
        )
    )


if __name__ == "__main__":
    sys.exit(main())
