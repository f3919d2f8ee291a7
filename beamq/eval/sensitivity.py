"""SENSITIVITY: what does each quantized part of the model cost on its own?

In: a source, a candidate made from it, a little text. Out: for each part (a layer's experts, dense
MLP or attention) the KL from the source when only that part is quantized, and the bytes it saves.

    layer 0: source | part A of it quantized
    layer 1: source | A, as the source goes on | part B quantized | ...

The one idea: a model with one quantized part is the source up to that part, so it branches off the
source's own hidden states there and then goes the source's way. All branches advance together: one
pass, each layer of both models read once. Beside the branches the candidate itself runs whole, to
see how far the parts' losses add up to its own.

Cost: with P parts, rows pass each layer P / 2 times on average, so a few rows are meant. Memory:
one hidden state for each token and part.
Limits: whole layers, one process. Losses are those of this text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from numpy import int64
from numpy.typing import NDArray

from beamq.calib.options import DTYPES
from beamq.checkpoint import Checkpoint, open_checkpoint
from beamq.config import BeamConfig, read_json_object
from beamq.errors import CheckpointError, TensorError, UsageError
from beamq.eval.alike import expect_alike
from beamq.eval.divergence import CHUNK_ELEMENTS, TokenScores, score_base
from beamq.eval.evaluation_text import read_text
from beamq.eval.folder import MANIFEST_NAME
from beamq.eval.footprint import stored_units
from beamq.eval.oddities import role_of
from beamq.eval.parts import PartLoss, Sensitivity
from beamq.eval.streams import StreamOptions
from beamq.formats.layout import Unit
from beamq.model.attention import SequenceLayout, position_table
from beamq.model.beam import Head, LayerWeights, SparseMlp, decoder_layer, head_logits
from beamq.model.layer_stream import LayerStream, in_turns
from beamq.model.linear import gemm_backend
from beamq.model.load import LayerLoader
from beamq.model.logits import BATCH_TOKENS, embed, usable_device
from beamq.ranks import current_ranks
from beamq.roles import QUANTIZABLE, Role
from beamq.version import __version__
from beamq.weight_files import MAX_INDEX_BYTES

DEFAULT_SIZE = {"cuda": (8, 1024), "cpu": (8, 256)}
DEFAULT_DTYPE = {"cuda": "bfloat16", "cpu": "float32"}
HEAD_TOKENS = 256
States = list[torch.Tensor]


def sensitivity(
    source: str | Path,
    checkpoint: str | Path,
    *,
    data: Sequence[str] = (),
    samples: int | None = None,
    sequence_length: int | None = None,
    seed: int = 0,
    dtype: str | None = None,
    device: str = "auto",
    gemm: str = "reference",
    on_start: Callable[[], None] = lambda: None,
    progress: Callable[[int, int], None] | None = None,
) -> Sensitivity:
    """Run the parts of `checkpoint` one at a time in place of `source`'s.

    `data` are `--data` specs (none: the default evaluation text); `gemm` is how quantized parts are
    multiplied ("weights-only" leaves activations exact). `on_start` is called when all is checked
    and before work, `progress` with layers done and in all. Raises `UsageError` for options and for
    several processes, `TensorError` for a checkpoint with nothing quantized, `ConfigError` for
    another model, and what reading raises.
    """
    begun = time.monotonic()
    started = current_ranks().world
    if started > 1:
        raise UsageError(
            f"sensitivity runs in one process, and torchrun started {started}; leave torchrun out"
        )
    where = usable_device("cuda" if torch.cuda.is_available() else "cpu")
    if device != "auto":
        where = usable_device(device)
    name = dtype or DEFAULT_DTYPE.get(where.type, "float32")
    if name not in DTYPES:
        raise UsageError(f"dtype is {name!r}, expected {' or '.join(DTYPES)}")
    options = StreamOptions(dtype=getattr(torch, name), device=where, gemm=gemm_backend(gemm))
    with ExitStack() as stack:
        base, other = (stack.enter_context(open_checkpoint(p)) for p in (source, checkpoint))
        fmt, units = stored_units(other)
        if not units:
            raise TensorError(
                f"{other.label}: nothing in it is quantized; expected an NVFP4 or FP8 Beam made"
                f" from {base.label}"
            )
        config = BeamConfig.from_dict(base.config)
        expect_alike(config, BeamConfig.from_dict(other.config), other.name)
        size = DEFAULT_SIZE.get(where.type, DEFAULT_SIZE["cpu"])
        length = sequence_length or min(size[1], config.max_position_embeddings)
        text = read_text(base, data, (samples or size[0], length), seed)
        on_start()
        scores = _Branches(base, other, config, units, text.ids_BT, options).run(progress)
        sizes = _unit_nbytes(base, units), _unit_nbytes(other, units)
        manifest = _manifest(other)
    return Sensitivity(
        source=base.label,
        checkpoint=other.label,
        format=str(fmt),
        recipe=manifest.get("recipe") if manifest else None,
        parts=tuple(
            PartLoss(
                layer=layer,
                role=role,
                kld=scores[layer, role].result().mean_kld,
                same_top=scores[layer, role].result().same_top,
                precise_nbytes=sizes[0][layer, role],
                stored_nbytes=sizes[1][layer, role],
            )
            for layer, role in sorted(units)
        ),
        whole=scores[None].result().mean_kld,
        parameters=sum(spec.numel for spec in base.tensors.values()),
        tensor_nbytes=sum(spec.nbytes for spec in other.tensors.values()),
        data={**text.record, "notes": list(text.notes)},
        settings={
            "beamq": __version__,
            "torch": torch.__version__,
            "dtype": name,
            "device": str(where),
            "gemm": gemm,
        },
        seconds=time.monotonic() - begun,
    )


class _Branches:
    """The source's states, those of each branch (by unit), and the candidate's own (None)."""

    def __init__(
        self,
        base: Checkpoint,
        other: Checkpoint,
        config: BeamConfig,
        units: frozenset[Unit],
        ids_BT: NDArray[int64],
        options: StreamOptions,
    ) -> None:
        self._checkpoints = (base, other)
        self._config = config
        self._units = units
        self._options = options
        rows = max(1, BATCH_TOKENS // ids_BT.shape[1])
        starts = range(0, ids_BT.shape[0], rows)
        self._rows = [torch.from_numpy(ids_BT[start : start + rows]) for start in starts]
        self._layouts = [SequenceLayout.rectangle(*rows.shape) for rows in self._rows]
        self._table = position_table(config, ids_BT.shape[1], options.device)

    def run(self, progress: Callable[[int, int], None] | None) -> dict[Unit | None, TokenScores]:
        """Scores of every branch against the source."""
        loaders: list[LayerLoader] = []
        with ExitStack() as stack:
            for checkpoint in self._checkpoints:
                loader = LayerLoader(
                    checkpoint, self._config, dtype=self._options.dtype, device=self._options.device
                )
                stack.callback(loader.close)
                loaders.append(loader)
            source, branches = self._layers(loaders, progress)
            head = loaders[0].head()
            with torch.inference_mode():
                return self._scores(head, source, branches)

    def _layers(
        self, loaders: Sequence[LayerLoader], progress: Callable[[int, int], None] | None
    ) -> tuple[States, dict[Unit | None, States]]:
        source, whole = (embed(loader, [r.flatten() for r in self._rows]) for loader in loaders)
        branches: dict[Unit | None, States] = {None: whole}
        base: LayerWeights | None = None
        for place, index, weights in in_turns([LayerStream(loader) for loader in loaders]):
            if place == 0:
                base = weights
                continue
            if base is None:
                raise RuntimeError("a candidate's layer before the source's")
            mine = [unit for unit in sorted(self._units) if unit[0] == index]
            fresh: dict[Unit | None, States] = {
                unit: self._apply(source, _mixed(base, weights, unit[1])) for unit in mine
            }
            for unit in branches:
                branches[unit] = self._apply(branches[unit], weights if unit is None else base)
            source = self._apply(source, base)
            branches.update(fresh)
            base = None
            del weights
            if progress is not None:
                progress(index + 1, self._config.num_layers)
        return source, branches

    def _apply(self, states: States, weights: LayerWeights) -> States:
        gemm = self._options.gemm
        with torch.inference_mode():
            return [
                decoder_layer(h_TK, weights, self._config, layout, self._table, gemm=gemm)
                for h_TK, layout in zip(states, self._layouts, strict=True)
            ]

    def _scores(
        self, head: Head, source: States, branches: Mapping[Unit | None, States]
    ) -> dict[Unit | None, TokenScores]:
        """KL of each branch's logits, a few tokens at a time. All have the source's head."""
        scores: dict[Unit | None, TokenScores] = {unit: TokenScores() for unit in branches}
        step = max(1, min(HEAD_TOKENS, CHUNK_ELEMENTS // self._config.vocab_size))
        for number, h_TK in enumerate(source):
            for start in range(0, h_TK.shape[0], step):
                some = slice(start, start + step)
                logits_TV = head_logits(h_TK[some], head, self._config)
                nothing_T = torch.full((logits_TV.shape[0],), -1, device=logits_TV.device)
                base = score_base(logits_TV, nothing_T)
                for unit, states in branches.items():
                    own_TV = head_logits(states[number][some], head, self._config)
                    scores[unit].add(base, own_TV)
        return scores


def _mixed(base: LayerWeights, other: LayerWeights, role: Role) -> LayerWeights:
    """`base` with one part of `other`; norms and router stay the source's."""
    if role is Role.ATTENTION:
        theirs = other.attention
        return replace(
            base, attention=replace(base.attention, qkv_gate=theirs.qkv_gate, o=theirs.o)
        )
    if isinstance(base.mlp, SparseMlp) and isinstance(other.mlp, SparseMlp):
        return replace(base, mlp=replace(base.mlp, experts=other.mlp.experts))
    return replace(base, mlp=other.mlp)


def _unit_nbytes(checkpoint: Checkpoint, units: frozenset[Unit]) -> dict[Unit, int]:
    """Bytes of each unit's linears, scales included."""
    sizes = dict.fromkeys(units, 0)
    for spec in checkpoint.tensors.values():
        role = role_of(spec.name)
        if role.layer is not None and role.role in QUANTIZABLE and (role.layer, role.role) in sizes:
            sizes[role.layer, role.role] += spec.nbytes
    return sizes


def _manifest(checkpoint: Checkpoint) -> dict[str, Any] | None:
    if not checkpoint.source.has(MANIFEST_NAME):
        return None
    return read_json_object(checkpoint.source.path(MANIFEST_NAME), CheckpointError, MAX_INDEX_BYTES)
