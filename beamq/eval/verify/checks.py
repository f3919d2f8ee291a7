"""The named checks of `verify`, their results, and the ledger they are written into.

`CHECKS` is the whole list: name -> (level, what it demands). A check ends as `pass`, `fail` or
`skip`; a pass says how many things were examined, since a check that looked at nothing has not
passed, and a skip says why. Nothing here knows how a check is done.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from beamq.errors import printable

Status = Literal["pass", "fail", "skip"]
Level = Literal["structure", "tensors", "source", "forward"]

NVFP4 = "nvfp4"
FP8 = "fp8"
PLAIN_FORMATS = ("bf16", "fp16", "fp32")
SHOWN = 5  # places named for each failed check; the count is always complete

CHECKS: dict[str, tuple[Level, str]] = {
    "files.readable": ("structure", "every shard has a sound safetensors header and its length"),
    "files.index": ("structure", "the index and the shards' keys are one to one"),
    "files.total-size": ("structure", "the index's total_size is the sum of all tensor bytes"),
    "files.shard-names": ("structure", "shards are numbered without a gap, 00001 to N of N"),
    "files.unlisted": ("structure", "no weight file, whole or partial, that the index lacks"),
    "files.metadata": ("structure", 'every shard\'s header says {"format": "pt"}'),
    "manifest.present": ("structure", "beamq.json lists these shards and tensors, with checksums"),
    "config.declared": ("structure", "one format is declared, and it is one all engines load"),
    "config.fields": ("structure", "every field is exactly what the engines require"),
    "config.ignore": ("structure", "every linear left precise is in the ignore list"),
    "config.agreement": ("structure", "config.json and hf_quant_config.json say the same"),
    "config.schema": ("structure", "compressed-tensors' own class accepts the block unchanged"),
    "config.dtype": ("structure", "config.json's dtype is bfloat16"),
    "tensors.known": ("structure", "no tensor name that the engines do not know"),
    "tensors.present": ("structure", "no tensor that config.json calls for is missing"),
    "tensors.shape": ("structure", "every tensor has the shape that config.json implies"),
    "tensors.dtype": ("structure", "every tensor has the dtype its place demands"),
    "tensors.experts": ("structure", "the experts of a layer are complete and stored alike"),
    "tensors.router": ("structure", "router weight and correction bias are FP32"),
    "tensors.head": ("structure", "lm_head and embeddings are not quantized"),
    "scales.global": ("structure", "weight_scale_2 is finite and positive"),
    "scales.shared": ("structure", "weight_scale_2 is one value over linears the engines fuse"),
    "scales.input": ("structure", "input_scale is finite, positive, and so is its reciprocal"),
    "scales.input-shared": ("structure", "input_scale is one value over linears that are fused"),
    "engine.vllm": ("structure", "vLLM builds quantized exactly what is stored quantized"),
    "engine.vllm-wide": ("structure", "the same with more tensor-parallel ranks than KV heads"),
    "engine.sglang": ("structure", "SGLang builds quantized exactly what is stored quantized"),
    "engine.transformers": ("structure", "transformers does, where it has a loader (FP8)"),
    "checksums.tensors": ("tensors", "every tensor's bytes have the checksum in beamq.json"),
    "checksums.shards": ("tensors", "every shard's header and tensors add up to its checksum"),
    "checksums.files": ("tensors", "every other file has the checksum in beamq.json"),
    "values.block-scales": ("tensors", "no NVFP4 block scale is NaN, zero or negative"),
    "values.row-scales": ("tensors", "every FP8 row scale is finite and positive"),
    "values.codes": ("tensors", "no FP8 code is NaN"),
    "values.finite": ("tensors", "no NaN or infinity among the tensors left precise"),
    "values.second-opinion": ("tensors", "another library decodes a sample to the same values"),
    "source.config": ("source", "config.json is the source's but for dtype and quantization"),
    "source.files": ("source", "tokenizer, templates and other files are the source's"),
    "source.accounted": ("source", "every source tensor is stored here or was dropped on purpose"),
    "source.router": ("source", "router and correction bias are bit-identical to the source"),
    "source.copied": ("source", "all else equals the source (or what it decodes to), to the bit"),
    "source.bound": ("source", "every quantized element is the nearest that its recipe allows"),
    "forward.runs": ("forward", "the model runs beside its source, and all logits are finite"),
    "forward.kld": ("forward", "mean KL divergence from the source is within the recipe's bound"),
    "forward.top": ("forward", "the likeliest next token is the source's as often as it must be"),
    "forward.router": ("forward", "every layer's router chooses the source's experts, as it must"),
    "forward.weights": ("forward", "every linear decodes to the source's within the bound"),
    "forward.unquantized": ("forward", "norms, routers, embeddings and head act as the source's"),
}
# What has no meaning where nothing is quantized.
NEEDS_QUANTIZED = (
    "config.declared",
    "config.fields",
    "config.ignore",
    "config.agreement",
    "config.schema",
    "scales.global",
    "scales.shared",
    "scales.input",
    "scales.input-shared",
    "engine.vllm",
    "engine.vllm-wide",
    "engine.sglang",
    "engine.transformers",
    "values.block-scales",
    "values.row-scales",
    "values.codes",
    "values.second-opinion",
    "source.bound",
)


@dataclass(frozen=True, slots=True, kw_only=True)
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
    """All checks in a fixed order, and what was measured on the way."""

    checkpoint: str
    level: str
    format: str
    source: str | None
    checks: tuple[CheckResult, ...]
    errors: tuple[RoleError, ...]
    tensors: int
    bytes_read: int
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether no check failed."""
        return not self.failures

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
        return {"ok": self.ok, **asdict(self)}


@dataclass(slots=True)
class CheckState:
    examined: int = 0
    unit: str = ""
    skipped: str | None = None
    faults: int = 0
    where: list[str] = field(default_factory=list)
    detail: str = ""
    said: str = ""


class Ledger:
    """Collects findings by check name. Not thread safe: one thread writes."""

    def __init__(self) -> None:
        self._entries: dict[str, CheckState] = {}

    def _entry(self, name: str) -> CheckState:
        if name not in CHECKS:
            raise KeyError(f"no check named {name}")
        return self._entries.setdefault(name, CheckState())

    def examined(self, name: str, count: int, unit: str) -> None:
        """`count` more things (`unit`, a plural) were looked at, and pass unless faults follow."""
        entry = self._entry(name)
        entry.examined += count
        entry.unit = unit

    def found(self, name: str, said: str) -> None:
        """A figure was measured; it is what the check says unless faults follow."""
        entry = self._entry(name)
        entry.examined += 1
        entry.said = said

    def fault(self, name: str, where: str, detail: str) -> None:
        """One more fault. The first one's `detail` is shown, the first few places are named."""
        entry = self._entry(name)
        entry.faults += 1
        if len(entry.where) < SHOWN:
            entry.where.append(printable(where))
        entry.detail = entry.detail or printable(f"{where}: {detail}")

    def skip(self, name: str, reason: str) -> None:
        """The check does not apply or cannot be done. A fault found elsewhere outweighs it."""
        entry = self._entry(name)
        entry.skipped = entry.skipped or reason

    def entry(self, name: str) -> CheckState:
        """What is written under a check's name, for `replace` in another rank's ledger."""
        return self._entry(name)

    def replace(self, name: str, entry: CheckState) -> None:
        """Take over what another ledger says of a check."""
        self._entries[name] = entry

    def failed(self, *names: str) -> bool:
        """Whether any of these checks has a fault."""
        return any(name in self._entries and self._entries[name].faults for name in names)

    def results(self, level: str, *, with_source: bool) -> tuple[CheckResult, ...]:
        """Every check, in the order of `CHECKS`."""
        return tuple(_result(name, self._entries.get(name), level, with_source) for name in CHECKS)


def _result(name: str, entry: CheckState | None, level: str, with_source: bool) -> CheckResult:
    needs = CHECKS[name][0]
    if entry is not None and entry.faults:
        more = f" (and {entry.faults - 1} more)" if entry.faults > 1 else ""
        return CheckResult(
            name=name,
            status="fail",
            detail=entry.detail + more,
            where=tuple(entry.where),
            count=entry.faults,
        )
    if entry is not None and entry.examined and entry.skipped is None:
        said = entry.said or f"{entry.unit}: {entry.examined:,}"
        return CheckResult(name=name, status="pass", detail=said)
    reason = entry.skipped if entry is not None else None
    if reason is None and level == "quick":
        reason = "left out by --quick"
    if reason is None and needs == "forward" and level != "forward":
        reason = "needs --level forward"
    if reason is None and needs == "source" and not with_source:
        reason = "needs --source"
    if reason is None and needs != "structure" and level == "structure":
        reason = "needs --level tensors"
    return CheckResult(name=name, status="skip", detail=reason or "nothing to examine")
