"""Quantize only what has changed since an earlier conversion: `--only-changed PREVIOUS`.

In: a folder that `beamq quantize` wrote earlier, with the same recipe and version. Out: workers
that copy a group's bytes from there where its source bytes are the same, and else convert it.

The one idea: beamq.json lists a checksum of what each group was made from (`SourceSum`), so a group
whose source has that checksum has the bytes that are in PREVIOUS. Every source byte is read, and
every byte that is taken from PREVIOUS is compared with its checksum: what is damaged there is
converted again. A shard in which nothing has changed becomes a clone of the earlier one where the
file system shares blocks (btrfs, XFS), else a hard link: beamq never writes into a finished shard.

Limits: input scales are written anew, so a calibration may differ. No adapters: a GPU sees their
source before the merge. No recipe that rounds by activations, which depend on other layers.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from beamq.convert.cpu_worker import JobContext, Worker, WorkerFactory
from beamq.convert.open_shards import JobResult, JobWriter, SourceSum, f32_bytes
from beamq.errors import CheckpointError, UsageError, counted
from beamq.io.checkpoint import Checkpoint, open_checkpoint
from beamq.io.files import user_path
from beamq.io.journal import refuse_unfinished, sound_sources
from beamq.io.manifest import DEFAULT_ALGORITHM, MANIFEST_NAME, Manifest, new_checksum, shard_digest
from beamq.io.safetensors_header import few
from beamq.io.shard_writer import OutputTensor, Shard, ShardWriter
from beamq.plan.plan import Job, JobKind, Nvfp4Outputs, Plan
from beamq.version import __version__

PIECE_BYTES = 1 << 20
_INSTEAD = "leave --only-changed out to convert everything"


@dataclass(slots=True, kw_only=True)
class Reused:
    """What this process took from PREVIOUS: groups, of how many that it looked at; whole shards
    that are clones or links; and groups that were unchanged but damaged there."""

    copied: int = 0
    groups: int = 0
    linked: int = 0
    damaged: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Previous:
    """An earlier conversion: its files, and what its beamq.json says of each group."""

    checkpoint: Checkpoint
    tensors: dict[str, str]
    shards: dict[str, str]
    sources: dict[str, str]
    counts: dict[str, dict[str, int]]
    zero_groups: frozenset[str]


def open_previous(
    stack: ExitStack, folder: str | Path, plan: Plan, source: Checkpoint, output: Path
) -> Previous:
    """Raises `UsageError` where its bytes cannot be those of this run, saying what differs, and
    `CheckpointError` for a folder that cannot be read or whose beamq.json was changed."""
    root = user_path(folder)
    if output.resolve() == root.resolve():
        raise UsageError(f"--only-changed {root} is the output; choose another output")
    if not (root / MANIFEST_NAME).is_file():
        refuse_unfinished(root)
        raise CheckpointError(
            f"{root}: no {MANIFEST_NAME}; --only-changed takes a folder that beamq quantize wrote"
        )
    manifest = Manifest.read(root / MANIFEST_NAME)
    if not manifest.sealed or manifest.shards is None:
        raise CheckpointError(
            f"{root / MANIFEST_NAME}: was changed since it was written; {_INSTEAD}"
        )
    if plan.recipe.expert_method is not None:
        raise UsageError(
            f"recipe {plan.recipe.name} rounds experts by activations, which depend on all earlier"
            f" layers; {_INSTEAD}"
        )
    if source.source.merged is not None or "adapter" in manifest.data:
        raise UsageError(
            "--only-changed takes no adapter, in this run or in PREVIOUS; merge it first with"
            " `beamq merge`"
        )
    if different := list(_differences(manifest, plan)):
        raise UsageError(
            f"--only-changed {root}: was made with {'; '.join(different)}; use the same, or"
            f" {_INSTEAD}"
        )
    sound = all(sound_sources(each.sources, each.source_counts) for each in manifest.listed)
    if not sound or not any(each.sources for each in manifest.listed):
        raise CheckpointError(
            f"{root / MANIFEST_NAME}: lists no checksums of the source; it is of an earlier"
            f" version or no quantization; {_INSTEAD}"
        )
    zero_groups = manifest.data.get("counts", {}).get("zero_groups", ())
    return Previous(
        checkpoint=stack.enter_context(open_checkpoint(root)),
        tensors=manifest.tensors,
        shards={shard.name: shard.digest for shard in manifest.listed},
        sources={group: each for shard in manifest.listed for group, each in shard.sources.items()},
        counts={g: each for shard in manifest.listed for g, each in shard.source_counts.items()},
        zero_groups=frozenset(zero_groups),
    )


def _differences(manifest: Manifest, plan: Plan) -> Iterator[str]:
    """What made the earlier folder and does not make this one."""
    if manifest.version != __version__:
        yield f"version {manifest.version} of beamq, this is {__version__}"
    if manifest.algorithm != DEFAULT_ALGORITHM:
        yield f"checksums {manifest.algorithm}, here they are {DEFAULT_ALGORITHM}"
    if manifest.digests.get("recipe") != plan.recipe.digest():
        mine, earlier = plan.recipe.to_dict(), manifest.recipe or {}
        keys = [key for key in mine | earlier if mine.get(key) != earlier.get(key)]
        yield f"another recipe, --exclude or --kv-cache ({few(keys or ['no recipe'])} differ)"


class ReusingFactory:
    """Makes workers that copy what is unchanged and leave the rest to those of `inner`.

    `link`: whole shards may become clones or links. That needs input scales that are known before
    the run, and shards that one process writes.
    """

    def __init__(
        self,
        inner: WorkerFactory,
        previous: Previous,
        source: Checkpoint,
        plan: Plan,
        *,
        link: bool,
    ) -> None:
        self.reused = Reused()
        self._inner = inner
        self.device_nbytes = inner.device_nbytes
        self._previous = previous
        self._source = source
        self._plan = plan
        self._link = link
        self._lock = threading.Lock()
        self._jobs = Counter(job.shard for job in plan.jobs)
        # Unchanged jobs of shards in which all were, so far, unchanged: they are copied when a
        # changed one comes, and need not be when the shard becomes a link. None: copied at once.
        self._waiting: dict[int, list[Job] | None] = {}

    def count(self, asked: int) -> int:
        return self._inner.count(asked)

    def worker(self, context: JobContext) -> Worker:
        return _ReusingWorker(self, self._inner.worker(context), context)

    def unchanged(self, job: Job, held: Sequence[memoryview] | None, context: JobContext) -> bool:
        """Whether the job's source bytes are those of the earlier conversion. Reads all of them."""
        with self._lock:
            self.reused.groups += 1
        recorded = self._previous.sources.get(job.group)
        if recorded is None:
            return False
        found, buffer = SourceSum(job), memoryview(bytearray(0 if held else PIECE_BYTES))
        for number, member in enumerate(job.members):
            for start in range(0, member.source.nbytes, PIECE_BYTES):
                context.step()
                size = min(PIECE_BYTES, member.source.nbytes - start)
                if held:
                    found.update(held[number][start : start + size])
                    continue
                self._source.read_into(
                    member.source.spec, buffer[:size], member.source.start + start
                )
                found.update(buffer[:size])
        return found.hexdigest() == recorded

    def reuse(self, job: Job, shard: ShardWriter, context: JobContext) -> JobResult | None:
        """Take an unchanged job's outputs. None where they are damaged: it has to be converted."""
        with self._lock:
            if job.shard not in self._waiting:
                self._waiting[job.shard] = [] if self._may_link(shard.shard) else None
            waiting = self._waiting[job.shard]
        out = JobWriter(shard)
        may_wait = waiting is not None and self._same_scales(job, context)
        if may_wait and self._copy(job, None, context):
            with self._lock:
                waiting = self._waiting[job.shard]
                if waiting is not None:
                    waiting.append(job)
            if waiting is not None:
                if len(waiting) == self._jobs[job.shard]:
                    self._finish(job.shard, shard, context)
                names = [tensor.name for each in job.members for tensor in each.outputs]
                out.result.tensors = {name: self._previous.tensors[name] for name in names}
                return self._result(job, out.result)
        self.release(job.shard, shard, context)
        if not self._copy(job, out, context):
            with self._lock:
                self.reused.damaged.append(job.group)
            return None
        if job.kind is JobKind.NVFP4 and context.input_scale is not None:
            out.write_input_scales(job, context.input_scale)
        return self._result(job, out.result)

    def release(self, index: int, shard: ShardWriter, context: JobContext) -> None:
        """The shard will not be a link: copy what waits for that."""
        with self._lock:
            waiting, self._waiting[index] = self._waiting.get(index), None
        for job in waiting or ():
            out = JobWriter(shard)
            if not self._copy(job, out, context):
                raise CheckpointError(
                    f"{self._previous.checkpoint.name}: {job.group} changed while it was read; do"
                    " not change PREVIOUS during a run, and run again with --resume"
                )
            if job.kind is JobKind.NVFP4 and context.input_scale is not None:
                out.write_input_scales(job, context.input_scale)

    def _finish(self, index: int, shard: ShardWriter, context: JobContext) -> None:
        """All jobs of a shard are unchanged and their bytes were checked."""
        earlier = self._previous.checkpoint.source.path(shard.shard.name)
        with earlier.open("rb") as stream:
            same = stream.read(len(shard.shard.header)) == shard.shard.header
        if same and earlier.stat().st_size == shard.shard.nbytes and shard.share(earlier):
            with self._lock:
                self.reused.linked += 1
        else:
            self.release(index, shard, context)

    def _may_link(self, shard: Shard) -> bool:
        names = [tensor.name for tensor in shard.tensors]
        known = self._previous.tensors
        return (
            self._link
            and all(name in known for name in names)
            and shard_digest(shard.header, [known[name] for name in names])
            == self._previous.shards.get(shard.name)
        )

    def _same_scales(self, job: Job, context: JobContext) -> bool:
        if job.kind is not JobKind.NVFP4 or context.input_scale is None:
            return job.kind is not JobKind.NVFP4
        for member in job.members:
            checksum = new_checksum()
            checksum.update(f32_bytes(context.input_scale(member.role.module)))
            name = Nvfp4Outputs(*member.outputs).input_scale.name
            if checksum.hexdigest() != self._previous.tensors.get(name):
                return False
        return True

    def _copy(self, job: Job, out: JobWriter | None, context: JobContext) -> bool:
        """Copy all outputs but input scales, or only read them, where `out` is None. False if one
        differs from its checksum in PREVIOUS, or cannot be read; what was written is then void."""
        try:
            return all(self._copy_tensor(tensor, out, context) for tensor in _outputs(job))
        except CheckpointError:
            return False

    def _copy_tensor(
        self, tensor: OutputTensor, out: JobWriter | None, context: JobContext
    ) -> bool:
        spec = self._previous.checkpoint.tensors.get(tensor.name)
        if spec is None or (spec.dtype, spec.shape) != (tensor.dtype, tensor.shape):
            return False
        checksum, sink = new_checksum(), None if out is None else out.sink(tensor)
        buffer = memoryview(bytearray(min(PIECE_BYTES, tensor.nbytes)))
        for start in range(0, tensor.nbytes, PIECE_BYTES):
            context.step()
            piece = buffer[: min(PIECE_BYTES, tensor.nbytes - start)]
            self._previous.checkpoint.read_into(spec, piece, start)
            if sink is None:
                checksum.update(piece)
            else:
                sink.append(piece)
        if sink is None or out is None:
            return checksum.hexdigest() == self._previous.tensors.get(tensor.name)
        sink.finish()
        return out.result.tensors[tensor.name] == self._previous.tensors.get(tensor.name)

    def _result(self, job: Job, result: JobResult) -> JobResult:
        """The counts are those of the earlier conversion: equal bytes have equal counts."""
        for key, count in self._previous.counts.get(job.group, {}).items():
            setattr(result, key, count)
        if job.group in self._previous.zero_groups:
            result.zero_groups.append(job.group)
        result.source = self._previous.sources[job.group]
        with self._lock:
            self.reused.copied += 1
        return result

    def sentence(self, processes: int = 1) -> str:
        """For the result's table. Of several processes each counts its own."""
        found = self.reused
        groups = counted(found.groups, "group")
        whose = "" if processes == 1 else " of this process"
        text = f"{found.copied:,} of {groups}{whose} copied from the earlier folder"
        if found.linked:
            text += f"; {counted(found.linked, 'shard shares', 'shards share')} its files"
        if found.damaged:
            text += f"; {len(found.damaged):,} damaged there, converted ({few(found.damaged, 1)})"
        return text


class _ReusingWorker:
    """Copies or converts jobs for one thread."""

    def __init__(self, factory: ReusingFactory, inner: Worker, context: JobContext) -> None:
        self._factory = factory
        self._inner = inner
        self._context = context

    def run(
        self, job: Job, shard: ShardWriter, held: Sequence[memoryview] | None = None
    ) -> JobResult:
        """See `Worker.run`."""
        if self._factory.unchanged(job, held, self._context):
            result = self._factory.reuse(job, shard, self._context)
            if result is not None:
                self._context.step(job.source_nbytes)
                return result
        self._factory.release(job.shard, shard, self._context)
        return self._inner.run(job, shard, held)


def _outputs(job: Job) -> Iterator[OutputTensor]:
    """All outputs but input scales, which do not follow from the weights."""
    for member in job.members:
        yield from member.outputs[: 3 if job.kind is JobKind.NVFP4 else None]
