"""SENSITIVITY: what does each quantized part of the model cost, and which parts are worth sparing?

In: a source, a candidate made from it, a little text. Out: a `Sensitivity`: for each part (a
layer's experts, dense MLP or attention) the KL from the source when only that part is quantized,
and the bytes it saves; and from that a `Choice` of parts to keep in BF16, with its recipe.

    layer 0: source | part A of it quantized
    layer 1: source | A, as the source goes on | part B quantized | ...

A model with one quantized part equals the source up to that part, so it branches off the source's
hidden states there and then runs with the source's weights. All branches advance together, in one
pass that reads each layer of both models once; the candidate itself runs along.

Parts are spared in the order of nats per byte. The prediction is the candidate's own KL times the
share of the parts' summed KL that is not spared. Losses do not quite add up, so the report shows
how far their sum is from the measured whole; `beamq compare` measures the result.

Cost: with P parts, rows pass each layer P / 2 times on average, and each token has a hidden state
for each part. Limits: whole parts (ADR 7); one process; losses are those of this text.
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

from beamq.adapter.merged import open_merged
from beamq.adapter.options import AdapterKeywords, AdapterOptions
from beamq.beam.tensors import QUANTIZABLE, Role, role_of
from beamq.calib.options import TextKeywords
from beamq.devices import choose_device
from beamq.errors import RecipeError, TensorError, UsageError, counted
from beamq.eval.compare.compare import read_text
from beamq.eval.compare.footprint import stored_formats
from beamq.eval.compare.metrics import CHUNK_ELEMENTS, Estimate, TokenScores, score_base
from beamq.eval.compare.options import SensitivityOptions
from beamq.eval.compare.side_by_side import StreamOptions, open_loaders, stream_options
from beamq.io.checkpoint import Checkpoint, open_checkpoint
from beamq.io.manifest import Manifest
from beamq.model.context import PassContext, SequenceLayout, position_table
from beamq.model.layer import Head, LayerWeights, SparseMlp, decoder_layer, head_logits
from beamq.model.layer_stream import LayerStream, in_turns
from beamq.model.loader import LayerLoader
from beamq.model.logits import BATCH_TOKENS, embed
from beamq.options import from_keywords, ignore, takes
from beamq.plan.layout import Unit, scheme_of
from beamq.plan.recipe import Recipe, parse_recipe
from beamq.ranks import current_ranks
from beamq.units import plain, short_repr

PATTERNS = {
    Role.EXPERT: "model.layers.{}.mlp.experts*",
    Role.DENSE_MLP: "model.layers.{}.mlp*",
    Role.ATTENTION: "model.layers.{}.self_attn*",
}
NAMES = {Role.EXPERT: "experts", Role.DENSE_MLP: "dense MLP", Role.ATTENTION: "attention"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PartLoss:
    """One part alone quantized: mean KL in nats a token, the share of tokens with the same top
    token, and the part's bytes in high precision and as stored."""

    layer: int
    part: Role
    mean_kld: Estimate
    same_top: Estimate
    precise_bytes: int
    stored_bytes: int

    @property
    def extra_bytes(self) -> int:
        """What sparing it would add to the files."""
        return self.precise_bytes - self.stored_bytes

    @property
    def nats_per_gb(self) -> float:
        """Nats that each decimal GB spent on this part saves."""
        return max(self.mean_kld.value, 0.0) / (max(self.extra_bytes, 1) / 1e9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Parts to spare, and what is expected of the result."""

    spared: tuple[PartLoss, ...]
    predicted_kld: float
    tensor_bytes: int
    bits_per_weight: float

    def to_dict(self) -> dict[str, Any]:
        """Plain data, with layer and part of what is spared."""
        spared = [{"layer": part.layer, "part": part.part.value} for part in self.spared]
        return {**plain(replace(self, spared=())), "spared": spared}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """What was measured. `recipe` is beamq.json's, or None; `mean_kld` is the candidate's own."""

    __repr__ = short_repr

    source: str
    checkpoint: str
    format: str
    recipe: dict[str, Any] | None
    parts: tuple[PartLoss, ...]
    mean_kld: Estimate
    parameters: int
    tensor_bytes: int
    data: Mapping[str, Any]
    settings: Mapping[str, Any]
    seconds: float

    @property
    def sum_of_parts(self) -> float:
        """The parts' losses added up."""
        return sum(max(part.mean_kld.value, 0.0) for part in self.parts)

    def by_worth(self) -> list[PartLoss]:
        """Parts by falling nats per byte."""
        return sorted(self.parts, key=lambda each: (-each.nats_per_gb, each.layer, each.part.value))

    def sparing(self, parts: Sequence[PartLoss]) -> Choice:
        """The choice to spare `parts`."""
        nbytes = self.tensor_bytes + sum(part.extra_bytes for part in parts)
        spared = sum(max(part.mean_kld.value, 0.0) for part in parts)
        left = 1 - spared / self.sum_of_parts if self.sum_of_parts else 0.0
        return Choice(
            spared=tuple(parts),
            predicted_kld=max(self.mean_kld.value * left, 0.0),
            tensor_bytes=nbytes,
            bits_per_weight=8 * nbytes / self.parameters,
        )

    def curve(self) -> list[Choice]:
        """Nothing spared, then one part more at a time, by worth."""
        order = self.by_worth()
        return [self.sparing(order[:count]) for count in range(len(order) + 1)]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        data: dict[str, Any] = plain(self)
        del data["recipe"], data["seconds"]
        parts = [{**plain(part), "nats_per_gb": part.nats_per_gb} for part in self.parts]
        curve = [choice.to_dict() for choice in self.curve()]
        return {**data, "sum_of_parts": self.sum_of_parts, "parts": parts, "curve": curve}


def choose(
    found: Sensitivity,
    *,
    exclude_worst: int | None = None,
    max_kl: float | None = None,
    target_bits: float | None = None,
) -> Choice | None:
    """The choice that an option asks for; None without one.

    `exclude_worst` spares that many parts with the largest KL; `max_kl` spares the fewest parts, by
    worth, that bring the predicted KL down to it; `target_bits` spares all that these bits a weight
    have room for. Raises `UsageError` for more than one option, and for what needs every part to be
    spared.
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
        worst = sorted(found.parts, key=lambda p: (-p.mean_kld.value, p.layer, p.part.value))
        return found.sparing(worst[:exclude_worst])
    if max_kl is not None:
        for choice in found.curve()[:-1]:
            if choice.predicted_kld <= max_kl:
                return choice
        raise UsageError(
            f"--max-kl {max_kl:g}: only a model with nothing quantized is that close to the source"
        )
    if target_bits is None:
        return None
    choice = found.sparing(())
    if choice.bits_per_weight > target_bits:
        raise UsageError(
            f"--target-bits {target_bits:g}: {found.checkpoint} has"
            f" {choice.bits_per_weight:.2f} bits a weight already"
        )
    for part in found.by_worth():
        larger = found.sparing([*choice.spared, part])
        if len(larger.spared) < len(found.parts) and larger.bits_per_weight <= target_bits:
            choice = larger
    return choice


def sparing_recipe(found: Sensitivity, choice: Choice) -> Recipe:
    """The candidate's recipe, or one like it, with the chosen parts excluded."""
    data: dict[str, Any]
    try:
        data = parse_recipe(found.recipe or {}, origin="beamq.json").to_dict()
    except (RecipeError, AttributeError, TypeError):
        roles = dict.fromkeys(part.part.value for part in found.parts)
        data = {"name": found.format, "rules": dict.fromkeys(roles, found.format)}
    patterns = [PATTERNS[part.part].format(part.layer) for part in choice.spared]
    data["exclude"] = [*data.get("exclude", ()), *patterns]
    data["name"] = f"{str(data['name'])[:80]}-spared"
    data["summary"] = (
        f"{counted(len(patterns), 'part')} kept in high precision by sensitivity; predicted mean"
        f" KLD {choice.predicted_kld:.4f} nats, {choice.bits_per_weight:.2f} bits a weight."
    )
    return parse_recipe(data, origin="sensitivity")


def recipe_yaml(recipe: Recipe) -> str:
    """The recipe as a file for `--recipe`."""
    import yaml  # only where a recipe is written

    data = recipe.to_dict()
    data["bounds"] = {key: value for key, value in data["bounds"].items() if value is not None}
    data = {key: value for key, value in data.items() if value not in ([], {}, None)}
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=100)


DEFAULT_SIZE = {"cuda": (8, 1024), "cpu": (8, 256)}
HEAD_TOKENS = 256
States = list[torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class SensitivityEvents:
    """Called: `on_start` when all is checked, `progress` with layers done and in all."""

    on_start: Callable[[], None] = ignore
    progress: Callable[[int, int], None] | None = None


class SensitivityKeywords(TextKeywords, AdapterKeywords, total=False):
    """Keywords of `sensitivity`."""

    seed: int
    dtype: str | torch.dtype | None
    gemm: str
    on_start: Callable[[], None]
    progress: Callable[[int, int], None] | None


@takes(SensitivityOptions, SensitivityEvents, AdapterOptions)
def sensitivity(
    source: str | Path, checkpoint: str | Path, **keywords: Unpack[SensitivityKeywords]
) -> Sensitivity:
    """Measure each quantized part of `checkpoint` alone, in place of `source`'s.

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
    options, settings = stream_options(where, asked.dtype, asked.gemm)
    with ExitStack() as stack:
        base = stack.enter_context(open_merged(source, from_keywords(AdapterOptions, keywords)))
        other = stack.enter_context(open_checkpoint(checkpoint))
        formats = stored_formats(other)
        units = frozenset(formats)
        if not units:
            raise TensorError(
                f"{other.label}: nothing in it is quantized; expected an NVFP4 or FP8 Beam made"
                f" from {base.label}"
            )
        loaders = stack.enter_context(open_loaders([base, other], options))
        size = DEFAULT_SIZE.get(where.type, DEFAULT_SIZE["cpu"])
        length = asked.sequence_length or min(size[1], loaders[0].config.max_position_embeddings)
        ids_BT, record = read_text(base, asked.data, (asked.samples or size[0], length), asked.seed)
        events.on_start()
        scores = _Branches(loaders, units, ids_BT, options).run(events.progress)
        for each in (base, other):
            each.check_unchanged()
        manifest = Manifest.of(other.source)
        nbytes = _unit_nbytes(base, units), _unit_nbytes(other, units)
        return Sensitivity(
            source=base.label,
            checkpoint=other.label,
            format=scheme_of(set(formats.values())) or "mixed",
            recipe=None if manifest is None else manifest.recipe,
            parts=tuple(_part_loss(unit, scores[unit], nbytes) for unit in sorted(nbytes[1])),
            mean_kld=scores[None].result().mean_kld,
            parameters=sum(spec.numel for spec in base.tensors.values()),
            tensor_bytes=sum(spec.nbytes for spec in other.tensors.values()),
            data=record,
            settings=settings,
            seconds=time.monotonic() - begun,
        )


def _part_loss(
    unit: Unit, scores: TokenScores, nbytes: tuple[Mapping[Unit, int], Mapping[Unit, int]]
) -> PartLoss:
    """One part; `nbytes` are those of the source's parts and of the candidate's."""
    found = scores.result()
    return PartLoss(
        layer=unit[0],
        part=unit[1],
        mean_kld=found.mean_kld,
        same_top=found.same_top,
        precise_bytes=nbytes[0][unit],
        stored_bytes=nbytes[1][unit],
    )


class _Branches:
    """One run. Each branch has its unit as a key; None is the key of the candidate itself."""

    def __init__(
        self,
        loaders: Sequence[LayerLoader],
        units: frozenset[Unit],
        ids_BT: NDArray[int64],
        options: StreamOptions,
    ) -> None:
        self._loaders = loaders
        self._config = loaders[0].config
        self._units = units
        rows = max(1, BATCH_TOKENS // ids_BT.shape[1])
        starts = range(0, ids_BT.shape[0], rows)
        self._rows = [torch.from_numpy(ids_BT[start : start + rows]) for start in starts]
        self._layouts = [SequenceLayout.rectangle(*rows.shape) for rows in self._rows]
        table = position_table(self._config, ids_BT.shape[1], options.device)
        self._context = PassContext(config=self._config, table=table, gemm=options.gemm)

    def run(self, progress: Callable[[int, int], None] | None) -> dict[Unit | None, TokenScores]:
        """Scores of every branch against the source."""
        ids = [rows.flatten() for rows in self._rows]
        source, whole = (embed(loader, ids) for loader in self._loaders)
        branches: dict[Unit | None, States] = {None: whole}
        base: LayerWeights | None = None
        for place, index, weights in in_turns([LayerStream(loader) for loader in self._loaders]):
            if place == 0:
                base = weights
                continue
            if base is None:
                raise RuntimeError("a candidate's layer came before the source's")
            fresh: dict[Unit | None, States] = {
                unit: self._apply(source, _mixed(base, weights, unit[1]))
                for unit in sorted(self._units)
                if unit[0] == index
            }
            for unit in branches:
                branches[unit] = self._apply(branches[unit], weights if unit is None else base)
            source = self._apply(source, base)
            branches.update(fresh)
            base = None
            del weights
            if progress is not None:
                progress(index + 1, self._config.num_layers)
        with torch.inference_mode():
            return self._scores(self._loaders[0].head(), source, branches)

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
                    scores[unit].add(base, head_logits(states[number][some], head, self._config))
        return scores


def _mixed(base: LayerWeights, other: LayerWeights, role: Role) -> LayerWeights:
    """The layer `base` with one part of `other`; norms and router stay those of `base`."""
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
