"""A DFlash2 drafter's folder: what it is, and whether the engines will load it.

In: a drafter's folder and, for `verify_drafter`, the Beam that it drafts for. Out: a
`DrafterInspection` or a `DrafterReport`. `beam.drafter` knows the rules of the config.

Where the engines differ a finding names the one that stops: vLLM asserts sliding attention and
stops at names that it does not know; SGLang ignores those, takes a prefix, and demands ascending
layer ids.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from beamq.beam.config import BeamConfig, is_drafter
from beamq.beam.drafter import (
    ENGINES,
    ConfigFault,
    DrafterConfig,
    attention_faults,
    config_faults,
    layer_id_faults,
)
from beamq.beam.tensors import Role, is_scale, role_of
from beamq.errors import BeamqError, CheckpointError, ConfigError, UsageError
from beamq.eval.verify.checks import DRAFTER_CHECKS, Ledger, VerifyReport
from beamq.eval.verify.folder import named_files, optional_json, read_shards
from beamq.formats.kernels import cpu
from beamq.io.checkpoint import FLOAT_SOURCES, Checkpoint, open_checkpoint, open_files
from beamq.io.files import MAX_CONFIG_BYTES, read_json_object, user_path
from beamq.io.hub import hub_source
from beamq.io.safetensors_header import CODE_DTYPES, TensorSpec
from beamq.io.source import INDEX_NAME, MAX_INDEX_BYTES, LocalFiles
from beamq.units import short_repr

PIECE_BYTES = 1 << 26
NO_TARGET = "needs --target"
MAY_BE_ZERO = ("base_kernel", "kernel_projection.weight")
"""A convolution that adds nothing is zero at the start of a training, and may stay there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterInspection:
    """A drafter at a glance. What config.json does not say, or says wrongly, is None or a note."""

    __repr__ = short_repr

    drafter: str
    layers: int | None
    hidden_size: int | None
    vocab_size: int | None
    block_size: int | None
    target_layer_ids: tuple[int, ...] | None
    sliding_window: int | None
    tensors: int
    tensor_bytes: int
    dtypes: tuple[str, ...]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for `--json`."""
        return {"kind": "drafter", **asdict(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterReport(VerifyReport):
    """All checks in the order of `DRAFTER_CHECKS`. `stopped` names the engines that would stop."""

    target: str | None = None

    @property
    def loads(self) -> dict[str, bool | None]:
        """Whether each engine loads the drafter, by its rules for names, shapes and keys."""
        return {engine: engine not in self.stopped for engine in ENGINES}


def is_drafter_place(place: str | Path) -> bool:
    """Whether a folder, or a repository on the Hub, has a drafter's config.json. False where it
    cannot be read: whoever reads it as a Beam says why."""
    try:
        with closing(open_files(place)) as files:
            path = files.path("config.json")
            return is_drafter(read_json_object(path, ConfigError, MAX_CONFIG_BYTES))
    except BeamqError:
        return False


def inspect_drafter(drafter: str | Path) -> DrafterInspection:
    """Headers and config of a drafter. Raises as `open_checkpoint` does."""
    with open_checkpoint(drafter) as opened:
        raw = opened.config
        specs = opened.tensors.values()
        notes = [f"config.json: {each.key} {each.detail}" for each in _all_faults(raw)]
        try:
            config: DrafterConfig | None = DrafterConfig.from_dict(raw)
        except ConfigError:
            config = None
        return DrafterInspection(
            drafter=str(drafter),
            layers=config.num_layers if config else None,
            hidden_size=config.hidden_size if config else None,
            vocab_size=config.vocab_size if config else None,
            block_size=config.block_size if config else None,
            target_layer_ids=config.target_layer_ids if config else None,
            sliding_window=config.sliding_window if config else None,
            tensors=len(specs),
            tensor_bytes=sum(spec.nbytes for spec in specs),
            dtypes=tuple(sorted({spec.dtype for spec in specs})),
            notes=tuple(notes),
        )


def read_drafter(place: str | Path) -> DrafterConfig:
    """The config of a drafter. Raises `ConfigError` for another model and for what is wrong."""
    with closing(open_files(place)) as files:
        raw = read_json_object(files.path("config.json"), ConfigError)
    if not is_drafter(raw):
        raise ConfigError(f"{place}: config.json describes no DFlash2 drafter; `beamq inspect`")
    return DrafterConfig.from_dict(raw)


def _all_faults(raw: dict[str, Any]) -> Iterator[ConfigFault]:
    yield from config_faults(raw)
    yield from attention_faults(raw)
    draft = raw.get("dflash_config")
    yield from layer_id_faults(draft.get("target_layer_ids") if isinstance(draft, dict) else None)


def verify_drafter(
    drafter: str | Path,
    *,
    target: str | Path | None = None,
    level: str = "tensors",
    progress: Callable[[int, int], None] | None = None,
) -> DrafterReport:
    """Check a drafter's folder, at level `structure` or `tensors`, and whether it fits `target`.

    Raises `UsageError` for other levels, `CheckpointError` for a repository on the Hub, and what
    `open_checkpoint` and `BeamConfig.from_dict` raise for `target`.
    """
    if level not in ("structure", "tensors"):
        raise UsageError(f"level {level} is for Beams, and {drafter} is a DFlash2 drafter")
    if (asked := hub_source(drafter)) is not None:
        raise CheckpointError(
            f"{drafter}: verify reads no repository on the Hub; download it first: hf download"
            f" {asked.repo} --local-dir FOLDER"
        )
    begun = time.monotonic()
    with ExitStack() as stack:
        beam = None if target is None else stack.enter_context(open_checkpoint(target))
        built = None if beam is None else BeamConfig.from_dict(beam.config)
        files = stack.enter_context(closing(LocalFiles(user_path(drafter))))
        run = _DrafterPass(files)
        run.read_files()
        run.check_config()
        run.check_tensors()
        if beam is not None and built is not None:
            run.check_target(beam, built)
        else:
            run.ledger.skip(NO_TARGET, "target.sizes", "target.layer-ids", "target.head")
        if level == "tensors":
            run.check_values(progress)
    return DrafterReport(
        checkpoint=str(drafter),
        level=level,
        format="drafter",
        source=None,
        target=None if target is None else str(target),
        checks=run.ledger.results(level, with_source=False),
        errors=(),
        tensors=len(run.tensors),
        bytes_read=run.nbytes,
        seconds=time.monotonic() - begun,
        stopped=tuple(engine for engine in ENGINES if engine in run.ledger.stopped),
    )


@dataclass(slots=True)
class _DrafterPass:
    """One call of `verify_drafter`."""

    files: LocalFiles
    ledger: Ledger = field(default_factory=lambda: Ledger(DRAFTER_CHECKS))
    raw: dict[str, Any] = field(default_factory=dict)
    config: DrafterConfig | None = None
    tensors: dict[str, TensorSpec] = field(default_factory=dict)
    nbytes: int = 0

    def read_files(self) -> None:
        """config.json, the index, and all headers."""
        ledger, root = self.ledger, self.files.folder()
        ledger.strangers = True
        self.raw = read_json_object(root / "config.json", ConfigError, MAX_CONFIG_BYTES)
        index = optional_json(root / INDEX_NAME, "files.index", ledger, MAX_INDEX_BYTES)
        shards, _ = read_shards(self.files, named_files(self.files, index, ledger), ledger)
        ledger.examined("files.readable", len(shards))
        for spec in (spec for specs in shards.values() for spec in specs):
            if spec.name in self.tensors:
                ledger.fault("files.index", spec.name, "is stored twice; remove one")
            self.tensors[spec.name] = spec
        entries = (index or {}).get("weight_map")
        if isinstance(entries, dict):
            ledger.examined("files.index", len(entries))
            for name in sorted(set(entries).symmetric_difference(self.tensors)):
                ledger.fault("files.index", name, "is in the index or in a shard, not in both")
            for name in entries.keys() & self.tensors.keys():
                ledger.expect("files.index", name, self.tensors[name].file, entries[name])
        else:
            ledger.skip("a single file without an index", "files.index")
        if ledger.failed("files.readable", "files.index"):
            ledger.stopped.update(ENGINES)

    def check_config(self) -> None:
        """Keys and values of config.json; `config` is None where they give no shapes."""
        draft = self.raw.get("dflash_config")
        ids = draft.get("target_layer_ids") if isinstance(draft, dict) else None
        self._keys("drafter.config", len(self.raw), config_faults(self.raw))
        self._keys("drafter.attention", 2, attention_faults(self.raw))
        self._keys("drafter.layer-ids", len(ids) if isinstance(ids, list) else 0,
                   layer_id_faults(ids))  # fmt: skip
        if self.raw.get("quantization_config") is not None:
            reason = "is there; remove it, or take the drafter that was published"
            self._fault("drafter.plain", "config.json: quantization_config", reason)
        try:
            self.config = DrafterConfig.from_dict(self.raw)
        except ConfigError:
            reason = "not checked, because it needs the config; see drafter.config"
            left = "drafter.known", "drafter.present", "drafter.shape", "target.layer-ids"
            self.ledger.skip(reason, *left, "target.sizes", "target.head")

    def check_tensors(self) -> None:
        """Names, shapes and dtypes, by the headers."""
        ledger = self.ledger
        ledger.examined("drafter.plain", len(self.tensors))
        ledger.examined("drafter.dtype", len(self.tensors))
        for name, spec in self.tensors.items():
            if spec.dtype in CODE_DTYPES or is_scale(name) or "_scale" in name:
                self._fault("drafter.plain", name, f"is {spec.dtype}: a drafter is served in BF16")
            elif spec.dtype not in FLOAT_SOURCES:
                self._fault("drafter.dtype", name, f"is {spec.dtype}, expected BF16")
            elif spec.dtype != "BF16":
                said = f"is {spec.dtype}; engines round it to BF16"
                ledger.fault("drafter.dtype", name, said, soft=True)
        if self.config is None:
            return
        expected = dict(self.config.tensors())
        ledger.examined("drafter.known", len(self.tensors))
        ledger.examined("drafter.present", len(expected))
        for name in self.tensors:
            own = name.removeprefix("model.")
            if name in expected:
                continue
            if own in expected:
                said = f"has a prefix; vLLM stops, SGLang loads it; name it {own}"
            else:
                said = "is not the drafter's; vLLM stops, SGLang ignores it; remove it"
            if name == "embed_tokens.weight":
                said = "is not used: engines take the target's; remove it"
                ledger.fault("drafter.known", name, said, soft=True)
            else:
                self._fault("drafter.known", name, said, ("vLLM",))
        for name, shape in expected.items():
            found = self.tensors.get(name) or self.tensors.get(f"model.{name}")
            if found is None:
                self._fault("drafter.present", name, "is missing")
                continue
            ledger.examined("drafter.shape")
            if found.shape != shape:
                said = f"has shape {list(found.shape)}, expected {list(shape)}"
                self._fault("drafter.shape", name, said)

    def check_target(self, beam: Checkpoint, built: BeamConfig) -> None:
        """Whether it drafts for this Beam: sizes, layers, and the parts that both share."""
        if self.config is None:
            return
        self.ledger.examined("target.sizes", 2)
        for key in ("hidden_size", "vocab_size"):
            own, wanted = getattr(self.config, key), getattr(built, key)
            if own != wanted:
                said = f"is {own}, and the target's is {wanted}: the drafter is another Beam's"
                self._fault("target.sizes", key, said)
        ids = self.config.target_layer_ids
        self.ledger.examined("target.layer-ids", len(ids))
        for each in (each for each in ids if each >= built.num_layers):
            said = f"the target has {built.num_layers} layers, from 0 to {built.num_layers - 1}"
            self._fault("target.layer-ids", f"layer {each}", said)
        for name, spec in beam.tensors.items():
            if role_of(name).role in (Role.HEAD, Role.EMBEDDING):
                self.ledger.examined("target.head")
                if is_scale(name) or spec.dtype not in FLOAT_SOURCES:
                    said = f"is {spec.dtype}: the drafter shares it, so it must be BF16"
                    self._fault("target.head", name, said)

    def check_values(self, progress: Callable[[int, int], None] | None) -> None:
        """NaN, infinity and zeros: every byte, in pieces."""
        total = sum(spec.nbytes for spec in self.tensors.values())
        for name, spec in self.tensors.items():
            if spec.dtype not in FLOAT_SOURCES:
                continue
            zero, wild = True, 0
            for start in range(0, spec.nbytes, PIECE_BYTES):
                piece = bytearray(min(PIECE_BYTES, spec.nbytes - start))
                self.files.read(spec.file, spec.offset + start, memoryview(piece), name)
                found = cpu.amax(piece, spec.dtype)
                wild += found.nonfinite
                zero = zero and not found.nonfinite and not found.amax
                self.nbytes += len(piece)
                if progress is not None:
                    progress(self.nbytes, total)
            self.ledger.examined("values.finite")
            if wild:
                self.ledger.fault("values.finite", name, f"{wild:,} values are NaN or infinite")
            if not name.endswith(MAY_BE_ZERO):
                self.ledger.examined("values.zeros")
                if zero and spec.nbytes:
                    self.ledger.fault("values.zeros", name, "is all zero; is the download whole?")

    def _keys(self, check: str, count: int, faults: Iterable[ConfigFault]) -> None:
        self.ledger.examined(check, count)
        for each in faults:
            only = f" ({each.engines[0]} stops)" if len(each.engines) == 1 else ""
            self._fault(check, each.key, each.detail + only, each.engines)

    def _fault(
        self, check: str, where: str, detail: str, engines: tuple[str, ...] = ENGINES
    ) -> None:
        self.ledger.fault(check, where, detail)
        self.ledger.stopped.update(engines)
