"""Zeros where no Beam has any: a download that was allocated in advance and never finished.

In: an opened checkpoint in a local folder, quantized or not. Out: what is all zero and must not be.

The one idea: three samples tell a tensor that is not zero, and only one whose samples are all zero
is read whole. Every tensor but the experts' is sampled, and the last tensors of each file, from its
end backwards. That is a few thousand small reads for a model of a terabyte.

What may be zero: biases, tensors that are not Beam's, and whole experts, which some checkpoints
have pruned. Limits: shards on the Hub are not looked at; an expert's linear that is zero in the
middle of a file is left to the conversion, which names it.
"""

from __future__ import annotations

from collections.abc import Iterator

from beamq.beam.tensors import Role, role_of
from beamq.errors import TensorError, counted
from beamq.io.checkpoint import Checkpoint
from beamq.io.safetensors_header import TensorSpec, few

SAMPLE_BYTES = 4096
PIECE_BYTES = 1 << 20
_ZEROS = bytes(PIECE_BYTES)
_MAY_BE_ZERO = (Role.ROUTER_BIAS, Role.EXTRA)
REMEDY = "is the download whole? Fetch the file again, or compare its SHA-256 with the Hub's"


def refuse_zeros(checkpoint: Checkpoint) -> None:
    """Raise `TensorError` for the first kind of `zero_faults`."""
    for where, what in zero_faults(checkpoint):
        raise TensorError(f"{where} {what}; {REMEDY}")


def zero_faults(checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    """(file and tensor, what is wrong) for each file's end, then for each tensor. Raises
    `CheckpointError` where a file cannot be read."""
    if not checkpoint.source.local:
        return
    by_file: dict[str, list[TensorSpec]] = {}
    for spec in checkpoint.tensors.values():
        by_file.setdefault(spec.file, []).append(spec)
    ends: set[str] = set()
    for file, specs in by_file.items():
        specs.sort(key=lambda spec: spec.offset)
        if found := _zero_end(checkpoint, specs):
            ends.update(found)
            yield (
                f"{file}: {few(found[:1])}",
                f"and all after it in the file ({counted(len(found), 'tensor')}) are zero",
            )
    for spec in checkpoint.tensors.values():
        left_out = _may_be_zero(spec) or _is_expert(spec) or spec.name in ends
        if not left_out and _is_zero(checkpoint, spec):
            yield f"{spec.file}: {few([spec.name])}", "is all zero"


def _may_be_zero(spec: TensorSpec) -> bool:
    role = role_of(spec.name)
    return role.role in _MAY_BE_ZERO or spec.name.endswith("bias") or not spec.nbytes


def _is_expert(spec: TensorSpec) -> bool:
    return role_of(spec.name).expert is not None


def _zero_end(checkpoint: Checkpoint, specs: list[TensorSpec]) -> list[str]:
    """The tensors that are zero from some place to the end of a file, if that cannot be meant: the
    last quarter of a tensor and all that follow it, a part of an expert, or what is no expert."""
    run: list[TensorSpec] = []
    for spec in reversed(specs):
        if not _is_zero(checkpoint, spec):
            break
        run.insert(0, spec)
    else:
        return [spec.name for spec in run if not _may_be_zero(spec)]
    names = {each.name for each in run}
    partly = spec.nbytes >= 4 * SAMPLE_BYTES and _is_zero(
        checkpoint, spec, spec.nbytes - spec.nbytes // 4
    )
    padded = role_of(spec.name).role in (Role.EMBEDDING, Role.HEAD)  # rows of unused tokens
    if partly and not padded and not _may_be_zero(spec):
        return [spec.name, *names]
    cut = any(
        not _parts_of_expert(checkpoint, each.name) <= names
        if _is_expert(each)
        else not _may_be_zero(each)
        for each in run
    )
    return [each.name for each in run] if cut and (run[1:] or _is_expert(run[0])) else []


def _parts_of_expert(checkpoint: Checkpoint, name: str) -> set[str]:
    """The weights of the expert that a tensor belongs to."""
    expert = role_of(name).module.rpartition(".")[0]
    names = (f"{expert}.{proj}.weight" for proj in ("gate_proj", "up_proj", "down_proj"))
    return {name for name in names if name in checkpoint.tensors}


def _is_zero(checkpoint: Checkpoint, spec: TensorSpec, begin: int = 0) -> bool:
    """Whether all bytes from `begin` on are zero."""
    size = spec.nbytes - begin
    samples = {max(0, min(at, size - SAMPLE_BYTES)) for at in (0, size // 2, size)}
    for start, step in [*((at, SAMPLE_BYTES) for at in samples), (0, size)]:
        for place in range(start, min(start + step, size), PIECE_BYTES):
            piece = bytearray(min(PIECE_BYTES, start + step - place, size - place))
            checkpoint.read_into(spec, memoryview(piece), begin + place)
            if piece != _ZEROS[: len(piece)]:
                return False
    return size > 0
