"""Checks on data that are cheap enough to make before work: norms, biases, routers, tied heads.

The large weights are checked for NaN and infinity as they stream by (reading a terabyte twice
would double the run); everything small is read here, so that a broken norm in the last layer is
found in the first second.
"""

from __future__ import annotations

from beamq.checkpoint import Checkpoint
from beamq.errors import TensorError
from beamq.formats.kernels import cpu
from beamq.plan import Work
from beamq.roles import Role

SMALL_BYTES = 1 << 20
ROUTER_BYTES = 64 << 20
COMPARE_BYTES = 1 << 22


def check_small_tensors(checkpoint: Checkpoint, plan: Work) -> None:
    """Raise `TensorError` for a non-finite value in any small tensor, or untied tied heads."""
    small = []
    for job in plan.jobs:
        member = job.members[0]
        role, spec = member.role, member.source.spec
        limit = ROUTER_BYTES if role.role is Role.ROUTER else SMALL_BYTES
        if job.kind == "copy" and role.role is not Role.EXTRA and spec.nbytes <= limit:
            small.append((spec, 0, spec.nbytes))
    for (spec, _, _), data in zip(small, checkpoint.peek_many(small), strict=True):
        found = cpu.amax(memoryview(data), spec.dtype)
        if found.nonfinite:
            raise TensorError(
                f"{spec.file}: {spec.name} holds {found.nonfinite} NaN or infinite values (first"
                f" at element {found.first_nonfinite}); repair the source, such a model cannot be"
                " served"
            )
    if plan.config.tie_word_embeddings and "lm_head.weight" in checkpoint.tensors:
        _check_tied(checkpoint)


def _check_tied(checkpoint: Checkpoint) -> None:
    head = checkpoint.spec("lm_head.weight")
    embedding = checkpoint.spec("model.embed_tokens.weight")
    same = head.dtype == embedding.dtype and head.shape == embedding.shape
    for start in range(0, head.nbytes if same else 0, COMPARE_BYTES):
        size = min(COMPARE_BYTES, head.nbytes - start)
        a, b = checkpoint.peek_many([(head, start, size), (embedding, start, size)])
        if a != b:
            same = False
            break
    if not same:
        raise TensorError(
            "config.json ties the embeddings, but lm_head.weight differs from"
            " model.embed_tokens.weight; set tie_word_embeddings to false or remove the head"
        )
