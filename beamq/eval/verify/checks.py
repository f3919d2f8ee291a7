"""The named checks of `verify`, their results, and the ledger that collects findings.

`CHECKS` is the complete list. A check ends as `pass`, `warn`, `fail` or `skip`. A pass says how
many things were examined, because a check that examined nothing has not passed; a skip gives the
reason. How a check is carried out is not known here.

A folder that another tool made is held to what the engines need. What beamq would only do better
(`HABITS`, and faults recorded as `soft`) is a warning there, and a fault in beamq's own output.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

from beamq.errors import printable
from beamq.units import short_repr

Status = Literal["pass", "warn", "fail", "skip"]
Level = Literal["structure", "tensors", "source", "forward"]

NVFP4 = "nvfp4"
FP8 = "fp8"
PLAIN_FORMATS = ("bf16", "fp16", "fp32")
LONGEST = 160  # characters of a place
SHOWN = 5  # places named for each failed check; the count is always complete


class Check(NamedTuple):
    """What a check needs, what it counts (a plural), and what it demands."""

    level: Level
    unit: str
    demand: str


_STRUCTURE = {
    "files.readable": ("shards", "every shard has a valid safetensors header and its full length"),
    "files.index": ("entries", "the index and the shards name the same tensors"),
    "files.total-size": ("sums", "the index's total_size is the sum of all tensor bytes"),
    "files.shard-names": ("names", "shards are numbered 00001 to N of N without a gap"),
    "files.unlisted": ("weight files", "the index names every weight file; none is partial"),
    "files.metadata": ("headers", 'the header of every shard says {"format": "pt"}'),
    "files.companions": (
        "files",
        "no file is only a Git LFS pointer, and no adapter_config.json",
    ),
    "manifest.present": ("tensors", "beamq.json lists these shards and tensors with checksums"),
    "config.model": ("configs", "config.json describes a Beam, and no key asks for anything else"),
    "config.declared": ("formats", "the config declares a format that an engine loads"),
    "config.fields": ("files", "every field of the config has the value that the engines require"),
    "config.ignore": ("modules", "the ignore list names every linear kept in high precision"),
    "config.agreement": ("files", "config.json and hf_quant_config.json say the same"),
    "config.schema": ("blocks", "compressed-tensors reads its config block back unchanged"),
    "config.dtype": ("keys", "the dtype in config.json is bfloat16"),
    "tensors.known": ("tensors", "every tensor name is one that the engines know"),
    "tensors.present": ("expected tensors", "every tensor that config.json calls for is stored"),
    "tensors.shape": ("tensors", "every tensor has the shape that config.json implies"),
    "tensors.dtype": ("tensors", "every tensor has the dtype that its role requires"),
    "tensors.experts": ("layers", "a layer's experts are complete, and all or none are quantized"),
    "tensors.router": ("tensors", "router weights and correction biases are FP32"),
    "tensors.head": ("tensors", "lm_head and the embeddings are not quantized"),
    "scales.global": ("scalars", "every weight_scale_2 is finite and positive"),
    "scales.shared": ("groups", "linears that the engines fuse share one weight_scale_2"),
    "scales.input": ("scalars", "every input_scale and its reciprocal are finite and positive"),
    "scales.input-shared": ("groups", "linears that the engines fuse share one input_scale"),
    "engine.vllm": ("modules", "vLLM builds as quantized exactly what is stored quantized"),
    "engine.vllm-wide": ("modules", "vLLM builds the same with more parallel ranks than KV heads"),
    "engine.sglang": ("modules", "SGLang builds as quantized exactly what is stored quantized"),
    "engine.transformers": ("modules", "transformers builds the same, if it can load the format"),
}
_TENSORS = {
    "checksums.tensors": ("tensors", "the bytes of every tensor match its checksum in beamq.json"),
    "checksums.shards": ("shards", "every shard's header and tensors match its checksum"),
    "checksums.files": ("files", "every other file matches its checksum in beamq.json"),
    "values.block-scales": ("scales", "no NVFP4 block scale is NaN, zero or negative"),
    "values.row-scales": ("scales", "every scale of FP8 or MXFP8 is a positive number"),
    "values.codes": ("codes", "no FP8 code is NaN"),
    "values.finite": ("tensors", "no high-precision tensor holds NaN or infinity"),
    "values.zeros": ("tensors", "no tensor that must hold values is all zero"),
    "values.second-opinion": ("linears", "another library decodes a sample to the same values"),
}
_SOURCE = {
    "source.config": ("keys", "config.json equals the source's but for dtype and quantization"),
    "source.files": ("files", "tokenizer, templates and other files equal the source's"),
    "source.accounted": ("source tensors", "every source tensor is present or left out by a rule"),
    "source.router": ("tensors", "router weights and biases equal the source's bit for bit"),
    "source.copied": ("tensors", "the rest equals the source, or what it decodes to, bit for bit"),
    "source.bound": ("elements", "every quantized element is within the bound of its recipe"),
    "source.error": ("linears", "every linear's relative error is within its recipe's bound"),
}
_FORWARD = {
    "forward.runs": ("models", "the model runs next to its source, and all logits are finite"),
    "forward.kld": ("figures", "the mean KL divergence from the source is within its bound"),
    "forward.top": ("figures", "the most likely next token agrees with the source often enough"),
    "forward.router": ("figures", "each layer's router chooses the source's experts often enough"),
    "forward.weights": ("figures", "the error of every decoded linear is within its bound"),
    "forward.unquantized": ("figures", "norms, routers, embeddings and head equal the source's"),
}
_TABLES: dict[Level, dict[str, tuple[str, str]]]
_TABLES = {"structure": _STRUCTURE, "tensors": _TENSORS, "source": _SOURCE, "forward": _FORWARD}
CHECKS = {
    name: Check(level, *rest) for level, table in _TABLES.items() for name, rest in table.items()
}
DRAFTER_CHECKS = {
    "files.readable": CHECKS["files.readable"],
    "files.index": CHECKS["files.index"],
    "drafter.config": Check(
        "structure", "keys", "config.json has every key that an engine reads, with a fit value"
    ),
    "drafter.attention": Check(
        "structure", "keys", "every layer has sliding attention and is not causal (vLLM asserts it)"
    ),
    "drafter.layer-ids": Check(
        "structure", "ids", "target_layer_ids ascend from 0 on, each once (SGLang demands it)"
    ),
    "drafter.plain": Check(
        "structure", "tensors", "nothing is quantized: neither engine loads a quantized drafter"
    ),
    "drafter.known": Check(
        "structure", "tensors", "every name is the drafter's, without prefix (vLLM stops at others)"
    ),
    "drafter.present": Check(
        "structure", "expected tensors", "every tensor that config.json calls for is stored"
    ),
    "drafter.shape": Check(
        "structure", "tensors", "every tensor has the shape that config.json implies"
    ),
    "drafter.dtype": Check("structure", "tensors", "every tensor is BF16 (FP16 and FP32 load too)"),
    "target.sizes": Check("structure", "sizes", "hidden_size and vocab_size are the target's"),
    "target.layer-ids": Check("structure", "ids", "every layer of target_layer_ids exists"),
    "target.head": Check(
        "structure", "tensors", "the target's embeddings and head, which both share, are precise"
    ),
    "values.finite": CHECKS["values.finite"],
    "values.zeros": CHECKS["values.zeros"],
}
"""The checks of a DFlash2 drafter; those of `target.*` need one."""
HABITS = (
    "files.total-size", "files.shard-names", "files.unlisted", "files.metadata", "manifest.present",
    "config.agreement", "config.ignore", "config.dtype", "tensors.router", "scales.input-shared",
)  # fmt: skip
"""Checks on which no engine's loading depends."""
# What must hold for any engine to load a folder; `engine.*` says the rest for each of them.
_LOADING = (
    "files.readable", "files.index", "config.model", "tensors.present", "tensors.shape",
    "tensors.dtype", "tensors.experts", "tensors.head",
)  # fmt: skip
ENGINES = {"vLLM": "engine.vllm", "SGLang": "engine.sglang", "transformers": "engine.transformers"}
# What has no meaning where nothing is quantized.
NEEDS_QUANTIZED = tuple(
    name
    for name in CHECKS
    if name.startswith(("config.", "scales.", "engine.", "values.", "source.bound", "source.error"))
    and name not in ("config.model", "config.dtype", "values.finite", "values.zeros")
)


@dataclass(frozen=True, slots=True)
class CheckResult:
    """How one check ended. `where` names the first few places, `count` counts all faults."""

    name: str
    status: Status
    detail: str
    where: tuple[str, ...] = ()
    count: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleError:
    """Quantization error over all linears of a role: RMS of the error over RMS of the source."""

    role: str
    linears: int
    elements: int
    relative_rms: float
    worst_linear: str
    worst_relative_rms: float
    max_abs_error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """All checks in the order of `CHECKS`, and what was measured meanwhile."""

    __repr__ = short_repr

    checkpoint: str
    level: str
    format: str
    source: str | None
    checks: tuple[CheckResult, ...]
    errors: tuple[RoleError, ...]
    tensors: int
    bytes_read: int
    seconds: float
    stopped: tuple[str, ...] = ()  # engines that stop at the name of a tensor
    refused: tuple[str, ...] = ()  # engines that load no folder of this format

    @property
    def ok(self) -> bool:
        """Whether no check failed. Warnings are not failures."""
        return not self.failures

    @property
    def loads(self) -> dict[str, bool | None]:
        """Whether each engine loads the folder, by its rules for names, shapes and dtypes.

        None: that is not known; the check `engine.*` says why.
        """
        if self.level == "quick":
            return dict.fromkeys(ENGINES)
        sound = all(self.check(name).status != "fail" for name in _LOADING)
        states = {engine: self.check(name).status for engine, name in ENGINES.items()}
        known = {engine for engine, status in states.items() if status != "skip"}
        return {
            engine: sound and status != "fail" and not {engine} & {*self.stopped, *self.refused}
            if engine in {*known, *self.refused} or self.plain or not sound
            else None
            for engine, status in states.items()
        }

    @property
    def plain(self) -> bool:
        """Whether nothing is quantized, so that only structure and bytes could be checked."""
        return self.format in PLAIN_FORMATS

    @property
    def failures(self) -> tuple[CheckResult, ...]:
        """The failed checks."""
        return tuple(check for check in self.checks if check.status == "fail")

    def check(self, name: str) -> CheckResult:
        """One check by name."""
        return next(check for check in self.checks if check.name == name)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for `--json`."""
        return {"ok": self.ok, "loads": self.loads, **asdict(self)}


@dataclass(slots=True)
class CheckState:
    """What was recorded about one check so far."""

    level: Level
    unit: str
    examined: int = 0
    measured: str = ""
    skipped: str | None = None
    faults: int = 0
    warnings: int = 0  # forgotten at the first fault
    where: list[str] = field(default_factory=list)
    detail: str = ""

    def add(self, where: str, detail: str, *, soft: bool) -> None:
        """One more fault or, if `soft`, warning. The first one's `detail` is shown."""
        if soft and self.faults:
            return
        if not soft and self.warnings:
            self.warnings, self.where, self.detail = 0, [], ""
        self.warnings += soft
        self.faults += not soft
        where = where if len(where) <= LONGEST else f"{where[:LONGEST]}..."
        if len(self.where) < SHOWN:
            self.where.append(printable(where))
        self.detail = self.detail or printable(f"{where}: {detail}")

    def result(self, name: str, level: str, *, with_source: bool) -> CheckResult:
        """How the check ends. A fault outweighs a skip, and a skip outweighs a pass."""
        if count := self.faults or self.warnings:
            more = f" (and {count - 1} more)" if count > 1 else ""
            status: Status = "fail" if self.faults else "warn"
            return CheckResult(name, status, self.detail + more, tuple(self.where), count)
        if self.examined and self.skipped is None:
            return CheckResult(name, "pass", self.measured or f"{self.unit}: {self.examined:,}")
        reason = self.skipped or _left_out(self.level, level, with_source)
        return CheckResult(name, "skip", reason)


def _left_out(needs: Level, level: str, with_source: bool) -> str:
    """Why a check examined nothing."""
    if level == "quick":
        return "left out by --quick"
    if needs == "forward" and level != "forward":
        return "needs --level forward"
    if needs == "source" and not with_source:
        return "needs --source"
    if needs != "structure" and level == "structure":
        return "needs --level tensors"
    return "nothing to examine"


class Ledger:
    """Collects findings: `states` has one for each check. Not thread safe: one thread writes.

    `strangers`: beamq did not make the folder, so that soft faults are warnings. `stopped` and
    `refused`: see `VerifyReport`.
    """

    def __init__(self, checks: Mapping[str, Check] = CHECKS) -> None:
        self.states = {
            name: CheckState(level=check.level, unit=check.unit) for name, check in checks.items()
        }
        self.strangers = False
        self.stopped: set[str] = set()
        self.refused: set[str] = set()

    def examined(self, name: str, count: int = 1, unit: str | None = None) -> None:
        """`count` more things were examined; they pass unless a fault follows."""
        state = self.states[name]
        state.examined += count
        state.unit = unit or state.unit

    def measured(self, name: str, text: str) -> None:
        """A figure was measured; `text` is what the check says unless a fault follows."""
        state = self.states[name]
        state.examined += 1
        state.measured = text

    def fault(self, name: str, where: str, detail: str, *, soft: bool = False) -> None:
        """One more fault; a `soft` one keeps no engine from loading the folder."""
        soft = self.strangers and (soft or name in HABITS)
        self.states[name].add(where, detail, soft=soft)

    def expect(
        self, name: str, where: str, found: object, wanted: object, *, soft: bool = False
    ) -> None:
        """A fault unless a value that was found is the one that was wanted."""
        if found != wanted:
            self.fault(name, where, f"is {found!r}, expected {wanted!r}", soft=soft)

    def skip(self, reason: str, *names: str) -> None:
        """These checks do not apply, or cannot be done. The first reason stays."""
        for name in names:
            self.states[name].skipped = self.states[name].skipped or reason

    def skip_rest(self, reason: str, *, but: str = "-") -> None:
        """Skip what has not been examined so far, but for checks whose name begins with `but`."""
        left = (name for name, state in self.states.items() if not state.examined)
        self.skip(reason, *(name for name in left if not name.startswith(but)))

    def failed(self, *names: str) -> bool:
        """Whether any of these checks has a fault."""
        return any(self.states[name].faults for name in names)

    def results(self, level: str, *, with_source: bool) -> tuple[CheckResult, ...]:
        """Every check, in the order of `CHECKS`."""
        return tuple(
            state.result(name, level, with_source=with_source)
            for name, state in self.states.items()
        )
