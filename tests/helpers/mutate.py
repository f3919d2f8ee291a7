"""Ways to spoil a file: bytes, words and JSON trees, each by a seeded random generator."""

from __future__ import annotations

import copy
import json
import random
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

from beamq.errors import BeamqError

SECONDS = 5.0  # of this thread's, for one case; the usual is a millisecond
FACTOR, ALLOWANCE = 64, 8_000_000  # memory: so many times the bytes given, and a constant

WORDS: list[bytes] = [
    b"0", b"-1", b"1e999", b"NaN", b"-Infinity", b"null", b"true", b"{}", b"[]", b'""',
    b'"\\ud800"',
    b"9" * 30, b"1" * 5000, b"[" * 500, b'{"a":' * 300, b"\x00", b"\xff\xfe", b"\xef\xbb\xbf",
    b"../../etc/passwd", b"%s%n", b"\x1b[31m", b'"F8_E4M3"', b'"U8"', b"18446744073709551616", b",",
    b":", b"*a", b"&a", b"!!python/object:os.system", b"<<: *a", b"re:(", b"re:(.*)*", b"\r\n",
    b"\n",
]  # fmt: skip
VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, 10**40, -(2**63), 0.5, -0.0, 1e308,
    float("inf"), float("nan"), "", "x", "\ud800", "\x00", "\x1b[2J", "a" * 3000, "../x", "/etc/x",
    "re:(", "*", [], [[]], [None], [1, 2, 3], {}, {"": {}}, {"a": [{}]}, [0] * 300, ["x"] * 50,
]  # fmt: skip


def spoil_bytes(chance: random.Random, data: bytes) -> bytes:
    """One to four changes of bits, bytes, runs or words."""
    out = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(out) + 1)
        length = chance.choice((1, 1, 2, 4, 16, 200))
        kind = chance.randrange(8)
        if kind == 0 and out:
            out[at % len(out)] ^= 1 << chance.randrange(8)
        elif kind == 1 and out:
            out[at % len(out)] = chance.randrange(256)
        elif kind == 2:
            del out[at : at + length]
        elif kind == 3:
            out[at:at] = chance.randbytes(length)
        elif kind == 4:
            out[at:at] = out[at : at + length]
        elif kind == 5:
            del out[at:]
        else:
            word = chance.choice(WORDS)
            out[at : at + (len(word) if kind == 6 else 0)] = word
    return bytes(out)


def spoil_tree(chance: random.Random, tree: Any) -> Any:
    """A copy of a JSON tree with one to three nodes replaced, renamed, dropped or doubled."""
    tree = json.loads(json.dumps(tree))
    for _ in range(chance.randint(1, 3)):
        node, path = tree, chance.randint(1, 5)
        while path and isinstance(node, (dict, list)) and node:
            keys = list(node) if isinstance(node, dict) else list(range(len(node)))
            key = chance.choice(keys)
            child = node[key]
            path -= 1
            if path == 0 or not isinstance(child, (dict, list)) or not child:
                _change(chance, node, key)
                break
            node = child
    return copy.deepcopy(chance.choice(VALUES)) if chance.random() < 0.01 else tree


def _change(chance: random.Random, node: Any, key: Any) -> None:
    kind = chance.randrange(6)
    if kind == 0:
        del node[key]
    elif kind == 1 and isinstance(node, dict):
        node[chance.choice(("", "x", "\ud800", "__metadata__", "a.b", str(key) + "x"))] = (
            copy.deepcopy(node[key])
        )
    elif kind == 2 and isinstance(node, list):
        node.append(copy.deepcopy(node[key]))
    elif kind == 3:
        node[key] = [node[key]]
    else:
        node[key] = copy.deepcopy(chance.choice(VALUES))


def encode(chance: random.Random, tree: Any) -> bytes:
    """JSON, now and then spoiled as text on top."""
    raw = json.dumps(tree).encode()
    return spoil_bytes(chance, raw) if chance.random() < 0.3 else raw


class Watch:
    """Runs cases: only errors of ours may come out, in bounded time and memory."""

    def __init__(self) -> None:
        self.cases = 0
        self.refused = 0
        self.slowest = 0.0

    def run(self, case: Callable[[], object], size: int) -> None:
        """One case, given `size` bytes; every 16th is weighed."""
        self.cases += 1
        weighed = self.cases % 16 == 0
        if weighed:
            tracemalloc.start()
        begun = time.thread_time()
        try:
            case()
        except BeamqError as fault:
            self.refused += 1
            text = str(fault)
            if not text.isprintable() or not 10 < len(text) < 2100:
                raise AssertionError(f"a poor message: {text!r}") from fault
        finally:
            seconds = time.thread_time() - begun
            if weighed:
                _, peak = tracemalloc.get_traced_memory()
                tracemalloc.stop()
        self.slowest = max(self.slowest, seconds)
        if seconds > SECONDS:
            raise AssertionError(f"{seconds:.1f} s for {size} bytes")
        if weighed and peak > FACTOR * size + ALLOWANCE:
            raise AssertionError(f"{peak} bytes of memory for {size} bytes of input")
