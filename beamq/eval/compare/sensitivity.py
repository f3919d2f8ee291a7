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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

import torch
from numpy import int64
from numpy.typing import NDArray

from beamq.beam.config import BeamConfig
from beamq.beam.tensors import QUANTIZABLE, Role, role_of
from beamq.calib.options import DTYPES
from beamq.devices import choose_device
from beamq.errors import RecipeError, TensorError, UsageError
from beamq.eval.compare.footprint import stored_units
from beamq.eval.compare.metrics import CHUNK_ELEMENTS, Estimate, TokenScores, score_base
from beamq.eval.compare.options import (
    SensitivityEvents,
    SensitivityKeywords,
    SensitivityOptions,
)
from beamq.eval.compare.side_by_side import StreamOptions, expect_alike
from beamq.eval.compare.text import read_text
from beamq.io.checkpoint import Checkpoint, open_checkpoint
from beamq.io.manifest import Manifest
from beamq.model.context import PassContext, SequenceLayout, position_table
from beamq.model.gemm.select import select_gemm
from beamq.model.layer import Head, LayerWeights, SparseMlp, decoder_layer, head_logits
from beamq.model.layer_stream import LayerStream, in_turns
from beamq.model.loader import LayerLoader
from beamq.model.logits import BATCH_TOKENS, embed
from beamq.options import from_keywords, takes
from beamq.plan.layout import Unit
from beamq.plan.recipe import Recipe, parse_recipe
from beamq.ranks import current_ranks
from beamq.version import __version__

# Which parts to leave precise, from what each costs on its own: a choice and its recipe.
#
# In: a `Sensitivity`. Out: `Choice`s along a curve, and the YAML of a recipe that makes one of
# them.
#
# The one idea: a part is worth its bytes if it costs many nats for them, so parts are spared in
# the order of nats per byte. What is left is predicted by adding up: the candidate's own KL times
# the share of the parts' summed KL that is not spared. Losses do not quite add, which is why the
# whole is measured too; how far the sum is from it is shown.
#
# Parts are whole (a layer's experts, dense MLP or attention), the only lists that both engines take
# (ADR 7). Nothing here runs a model; a predicted figure is to be measured by `beamq compare`.

PATTERNS = {
    Role.EXPERT: "model.layers.{}.mlp.experts*",
    Role.DENSE_MLP: "model.layers.{}.mlp*",
    Role.ATTENTION: "model.layers.{}.self_attn*",
}
NAMES = {Role.EXPERT: "experts", Role.DENSE_MLP: "dense MLP", Role.ATTENTION: "attention"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PartLoss:
    """One part alone quantized: mean KL in nats a token, share of the same top token, bytes."""

    layer: int
    role: Role
    kld: Estimate
    same_top: Estimate
    precise_nbytes: int
    stored_nbytes: int

    @property
    def extra_nbytes(self) -> int:
        """What sparing it would add to the files."""
        return self.precise_nbytes - self.stored_nbytes

    @property
    def nats_per_gb(self) -> float:
        """Nats that a decimal GB spent on this part buys."""
        return max(self.kld.value, 0.0) / (max(self.extra_nbytes, 1) / 1e9)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "layer": self.layer,
            "part": self.role.value,
            "mean_kld": self.kld.to_dict(),
            "same_top": self.same_top.to_dict(),
            "precise_bytes": self.precise_nbytes,
            "stored_bytes": self.stored_nbytes,
            "nats_per_gb": self.nats_per_gb,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Parts to spare, and what is expected of the result."""

    spared: tuple[PartLoss, ...]
    predicted_kld: float
    tensor_nbytes: int
    bits_per_weight: float

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "spared": [{"layer": part.layer, "part": part.role.value} for part in self.spared],
            "predicted_kld": self.predicted_kld,
            "tensor_bytes": self.tensor_nbytes,
            "bits_per_weight": self.bits_per_weight,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """What was measured. `recipe` is beamq.json's, or None; `whole` the candidate's own KL."""

    source: str
    checkpoint: str
    format: str
    recipe: Any
    parts: tuple[PartLoss, ...]
    whole: Estimate
    parameters: int
    tensor_nbytes: int
    data: Mapping[str, Any]
    settings: Mapping[str, Any]
    seconds: float

    @property
    def sum_kld(self) -> float:
        """The parts' losses added up."""
        return sum(max(part.kld.value, 0.0) for part in self.parts)

    def by_worth(self) -> list[PartLoss]:
        """Parts by nats for each byte, most first."""
        return sorted(self.parts, key=lambda p: (-p.nats_per_gb, p.layer, p.role.value))

    def sparing(self, parts: Sequence[PartLoss]) -> Choice:
        """The choice to spare `parts`."""
        nbytes = self.tensor_nbytes + sum(part.extra_nbytes for part in parts)
        spared = sum(max(part.kld.value, 0.0) for part in parts)
        left = 1 - spared / self.sum_kld if self.sum_kld else 0.0
        return Choice(
            spared=tuple(parts),
            predicted_kld=max(self.whole.value * left, 0.0),
            tensor_nbytes=nbytes,
            bits_per_weight=8 * nbytes / self.parameters,
        )

    def curve(self) -> list[Choice]:
        """Nothing spared, then one part more at a time, by worth."""
        order = self.by_worth()
        return [self.sparing(order[:count]) for count in range(len(order) + 1)]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "source": self.source,
            "checkpoint": self.checkpoint,
            "format": self.format,
            "mean_kld": self.whole.to_dict(),
            "sum_of_parts": self.sum_kld,
            "tensor_bytes": self.tensor_nbytes,
            "parameters": self.parameters,
            "parts": [part.to_dict() for part in self.parts],
            "curve": [choice.to_dict() for choice in self.curve()],
            "data": dict(self.data),
            "settings": dict(self.settings),
        }


def choose(
    found: Sensitivity,
    *,
    exclude_worst: int | None = None,
    max_kl: float | None = None,
    target_bits: float | None = None,
) -> Choice | None:
    """The choice that an option asks for; None without one.

    `exclude_worst` spares so many parts with the largest KL; `max_kl` as few as bring the predicted
    KL down to it; `target_bits` as many, by worth, as bits a weight allow. Raises `UsageError` for
    more than one option, or what cannot be reached with anything left quantized.
    """
    given = [name for name in (exclude_worst, max_kl, target_bits) if name is not None]
    if len(given) > 1:
        raise UsageError("give one of --exclude-worst, --max-kl and --target-bits")
    if exclude_worst is not None:
        if not 0 < exclude_worst < len(found.parts):
            raise UsageError(
                f"--exclude-worst {exclude_worst}: expected from 1 to {len(found.parts) - 1}; the"
                f" checkpoint has {len(found.parts)} quantized parts"
            )
        worst = sorted(found.parts, key=lambda p: (-p.kld.value, p.layer, p.role.value))
        return found.sparing(worst[:exclude_worst])
    if max_kl is not None:
        for choice in found.curve()[:-1]:
            if choice.predicted_kld <= max_kl:
                return choice
        raise UsageError(f"--max-kl {max_kl:g}: only a model with nothing quantized is that close")
    if target_bits is not None:
        return _within(found, target_bits)
    return None


def _within(found: Sensitivity, bits: float) -> Choice:
    taken: list[PartLoss] = []
    if found.sparing(taken).bits_per_weight > bits:
        raise UsageError(
            f"--target-bits {bits:g}: {found.checkpoint} has"
            f" {found.sparing(taken).bits_per_weight:.2f} bits a weight already"
        )
    for part in found.by_worth():
        if len(taken) + 1 < len(found.parts):
            choice = found.sparing([*taken, part])
            taken = list(choice.spared) if choice.bits_per_weight <= bits else taken
    return found.sparing(taken)


def sparing_recipe(found: Sensitivity, choice: Choice) -> Recipe:
    """The candidate's recipe, or one like it, with the chosen parts excluded."""
    data: dict[str, Any]
    try:
        data = parse_recipe(found.recipe or {}, origin="beamq.json").to_dict()
    except (RecipeError, AttributeError, TypeError):
        roles = dict.fromkeys(part.role.value for part in found.parts)
        data = {"name": found.format, "rules": dict.fromkeys(roles, found.format)}
    patterns = [PATTERNS[part.role].format(part.layer) for part in choice.spared]
    data["exclude"] = [*data.get("exclude", ()), *patterns]
    data["name"] = f"{str(data['name'])[:80]}-spared"
    data["summary"] = (
        f"{len(patterns)} parts left precise by sensitivity; predicted mean KLD"
        f" {choice.predicted_kld:.4f} nats, {choice.bits_per_weight:.2f} bits a weight."
    )
    return parse_recipe(data, origin="sensitivity")


def recipe_yaml(recipe: Recipe) -> str:
    """The recipe as a file to give to `--recipe`."""
    import yaml  # only where a recipe is written

    data = {key: value for key, value in recipe.to_dict().items() if value not in ([], None)}
    data["bounds"] = {k: v for k, v in recipe.to_dict()["bounds"].items() if v is not None}
    if not data["bounds"]:
        del data["bounds"]
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=100)


DEFAULT_SIZE = {"cuda": (8, 1024), "cpu": (8, 256)}
DEFAULT_DTYPE = {"cuda": "bfloat16", "cpu": "float32"}
HEAD_TOKENS = 256
States = list[torch.Tensor]


@takes(SensitivityOptions, SensitivityEvents)
def sensitivity(
    source: str | Path, checkpoint: str | Path, **keywords: Unpack[SensitivityKeywords]
) -> Sensitivity:
    """Run the parts of `checkpoint` one at a time in place of `source`'s.

    See `SensitivityOptions` and `SensitivityEvents` for the keywords. Raises `UsageError` for
    options and for several processes, `TensorError` for a checkpoint with nothing quantized,
    `ConfigError` for another model, and what reading raises.
    """
    asked = from_keywords(SensitivityOptions, keywords)
    events = from_keywords(SensitivityEvents, keywords)
    begun = time.monotonic()
    ranks = current_ranks()
    if ranks.world > 1:
        raise UsageError(
            f"sensitivity runs in one process, and torchrun started {ranks.world}; leave torchrun"
            " out"
        )
    where = choose_device(asked.device, ranks)
    name = asked.dtype or DEFAULT_DTYPE.get(where.type, "float32")
    if name not in DTYPES:
        raise UsageError(f"dtype is {name!r}, expected {' or '.join(DTYPES)}")
    options = StreamOptions(dtype=getattr(torch, name), device=where, gemm=select_gemm(asked.gemm))
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
        length = asked.sequence_length or min(size[1], config.max_position_embeddings)
        text = read_text(base, asked.data, (asked.samples or size[0], length), asked.seed)
        events.on_start()
        scores = _Branches(base, other, config, units, text.ids_BT, options).run(events.progress)
        sizes = _unit_nbytes(base, units), _unit_nbytes(other, units)
        manifest = Manifest.of(other.source)
    return Sensitivity(
        source=base.label,
        checkpoint=other.label,
        format=str(fmt),
        recipe=None if manifest is None else manifest.recipe,
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
            "gemm": asked.gemm,
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
        table = position_table(config, ids_BT.shape[1], options.device)
        self._context = PassContext(config=config, table=table, gemm=options.gemm)

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
        with torch.inference_mode():
            return [
                decoder_layer(h_TK, weights, layout, self._context)
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
