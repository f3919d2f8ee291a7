"""A server on loopback that answers for log-probabilities of prompts as vLLM's and SGLang's do.

In: a function from token ids to the log-probabilities of all but the first. `faults` are taken one
a request before it answers properly: an HTTP status, or "cut" (half an answer). The forms of the
answers are written from memory of vLLM's and SGLang's interfaces; parts were compared with public
code of unknown versions, and none of their servers has answered these tests.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Score = Callable[[Sequence[int]], Sequence[float | None]]


@contextmanager
def completions_server(score: Score, faults: list[int | str]) -> Iterator[str]:
    """Yields the address."""
    left = list(faults)

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            return

        def do_GET(self) -> None:
            self._send(200, {"data": [{"id": "served"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            fault = left.pop(0) if left else None
            if isinstance(fault, int):
                self._send(fault, {"error": {"message": f"fault {fault}"}})
                return
            answer = _sglang(body) if self.path == "/generate" else _vllm(body)
            self._send(200, answer, cut=fault == "cut")

        def _send(self, status: int, answer: Any, *, cut: bool = False) -> None:
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data[: len(data) // 2] if cut else data)

    def scored(row: Sequence[int]) -> list[tuple[int, float | None]]:
        return [(row[0], None), *zip(row[1:], score(row), strict=True)]

    def _vllm(body: dict[str, Any]) -> dict[str, Any]:
        if body["model"] != "served" or body["prompt_logprobs"] != 0:
            return {}
        found = [
            None if place == 0 else {str(token): {"logprob": value, "rank": 1}}
            for place, (token, value) in enumerate(scored(body["prompt"]))
        ]
        return {"choices": [{"text": "x", "prompt_logprobs": found}]}

    def _sglang(body: dict[str, Any]) -> dict[str, Any]:
        if not body["return_logprob"] or body["logprob_start_len"] != 0:
            return {}
        found = [[value, token, None] for token, value in scored(body["input_ids"])]
        return {"text": "x", "meta_info": {"input_token_logprobs": found}}

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
