"""An adapter's tensors, each assigned to the weights that it changes.

In: the folder or Hub id of an adapter, and the `BeamConfig` of the model that it is for. Out: an
`Adapter`: one `Update` for each changed weight, under the name that the weight has in a checkpoint
with one tensor an expert.

The one idea: names and shapes decide. Every tensor is used exactly once; a name of no known form, a
partner that is missing, a shape that does not fit or a weight that is changed twice is refused, so
that a surprise is an error message and never a wrong model.

Notation: W [N, K] is a weight; A [r, K] and B [N, r] are its update `s B A`; E experts. Packed
experts hold all pairs of a layer in two matrices: A [rE, .], in which expert e has rows er to
er + r - 1, and B [., rE], in which it has every E-th column from e on ("fastest") or columns er to
er + r - 1 ("slowest"). In the "new" layout (PEFT 0.19.1 and later) A has the input width and B the
output width; in the "old" one it is the other way round, and the update is s A^T B^T.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from beamq.adapter.config import AdapterConfig
from beamq.beam.config import BeamConfig
from beamq.beam.tensors import Role, TensorRole, classify, expected_tensors, packed_shape
from beamq.errors import AdapterError, counted
from beamq.io.safetensors_header import TensorSpec

FLOATS = ("F32", "BF16", "F16")
PREFIX = "base_model.model."
WEIGHTS_NAME = "adapter_model.safetensors"
Layout = Literal["new", "old"]
Order = Literal["fastest", "slowest"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """A or B of one update: `rows` and `columns` of an adapter's tensor, seen as a matrix."""

    spec: TensorSpec
    rows: slice = field(default_factory=lambda: slice(None))
    columns: slice = field(default_factory=lambda: slice(None))
    transposed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRank:
    """W becomes W + scaling B A; with a `magnitude` (DoRA) its rows, or of the embedding its
    columns, are then brought to these lengths."""

    a: Factor
    b: Factor
    rank: int
    scaling: float
    magnitude: TensorSpec | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Replaced:
    """W becomes a tensor of the adapter, from row `first` on."""

    spec: TensorSpec
    first: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Rows of W, those of `tokens`, become the rows of a tensor of the adapter."""

    spec: TensorSpec
    tokens: tuple[int, ...]


Update = LowRank | Replaced | Tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertForm:
    """How packed experts are read, and what decided it."""

    layout: Layout
    order: Order
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """What an adapter does to a model: weight -> update. `base_copies` are copies of unchanged base
    weights (weight -> tensor), which must equal the source's."""

    updates: Mapping[str, Update]
    base_copies: Mapping[str, TensorSpec]
    form: ExpertForm | None
    notes: tuple[str, ...]


_PAIR = re.compile(r"(.+)\.lora_(?:(embedding)_)?([AB])(?:\.weight)?")
_VECTOR = re.compile(r"(.+)\.lora_magnitude_vector(?:\.weight)?")
_TOKENS = re.compile(r"(.+)\.token_adapter\.trainable_tokens_delta")
_COPY = re.compile(r"(model\.embed_tokens|lm_head)\.base_layer\.weight")
_PACKED = re.compile(r"model\.layers\.(0|[1-9][0-9]{0,4})\.mlp\.experts(\.base_layer)?")
_SHARED = re.compile(r"(model\.layers\.[0-9]{1,5}\.mlp\.experts)\.(gate_proj|up_proj|down_proj)")
_LIVE = re.compile(r".+\.lora_(?:embedding_)?[AB]\.([^.]+)(?:\.weight)?")


Pair = dict[str, TensorSpec]
"""The tensors of one update by their side, "A" and "B"."""


@dataclass(slots=True)
class _Tensors:
    """An adapter's tensors by what their names say; keys are modules, or names of weights."""

    pairs: dict[str, Pair] = field(default_factory=dict)
    magnitudes: dict[str, TensorSpec] = field(default_factory=dict)
    tokens: dict[str, TensorSpec] = field(default_factory=dict)
    copies: dict[str, TensorSpec] = field(default_factory=dict)
    plain: dict[str, TensorSpec] = field(default_factory=dict)


def assign(
    specs: Iterable[TensorSpec],
    adapter: AdapterConfig,
    model: BeamConfig,
    *,
    layout: Layout | None = None,
    order: Order | None = None,
) -> Assignment:
    """Assign every tensor of an adapter to the weights of a Beam.

    `layout` and `order` are what the user says of packed experts, where the file does not tell.
    Raises `AdapterError`.
    """
    return _Assigner(_sorted_out(specs), adapter, model, layout, order).run()


def _sorted_out(specs: Iterable[TensorSpec]) -> _Tensors:
    found = _Tensors()

    def put(group: dict[str, TensorSpec], key: str, spec: TensorSpec) -> None:
        if key in group:
            raise AdapterError(
                f"{spec.name} and {group[key].name} are the same tensor under two names; remove one"
            )
        group[key] = spec

    for spec in specs:
        if spec.dtype not in FLOATS:
            raise AdapterError(f"{spec.name}: dtype is {spec.dtype}, expected F32, BF16 or F16")
        name = spec.name.removeprefix(PREFIX)
        if pair := _PAIR.fullmatch(name):
            put(found.pairs.setdefault(pair[1], {}), (pair[2] or "") + pair[3], spec)
        elif vector := _VECTOR.fullmatch(name):
            put(found.magnitudes, vector[1], spec)
        elif token := _TOKENS.fullmatch(name):
            put(found.tokens, token[1], spec)
        elif copy := _COPY.fullmatch(name):
            put(found.copies, f"{copy[1]}.weight", spec)
        elif live := _LIVE.fullmatch(name):
            raise AdapterError(
                f"{spec.name}: the name holds that of an adapter ({live[1]}), as in a model's own"
                " state dict; save the adapter with PEFT's save_pretrained, which removes it"
            )
        else:
            put(found.plain, name, spec)
    return found


class _Assigner:
    """Builds an `Assignment`; `shapes` are those of the model's weights."""

    def __init__(
        self,
        tensors: _Tensors,
        adapter: AdapterConfig,
        model: BeamConfig,
        layout: Layout | None,
        order: Order | None,
    ) -> None:
        self.tensors = tensors
        self.adapter = adapter
        self.model = model
        self.layout = layout
        self.order = order
        self.shapes = {role.name: shape for role, shape in expected_tensors(model)}
        self.updates: dict[str, Update] = {}
        self.notes: list[str] = []

    def run(self) -> Assignment:
        packed, linears = self._by_form()
        form = self._expert_form(packed)
        for module, pair in linears.items():
            self._add_linear(module, pair)
        self._refuse_partial(linears)
        for (layer, part), pair in packed.items():
            assert form is not None  # there are packed experts
            self._add_packed(layer, part, pair, form)
        for module, spec in self.tensors.tokens.items():
            self._add_tokens(module, spec)
        for name, spec in self.tensors.plain.items():
            self._add_replaced(name, spec)
        for module, spec in self.tensors.magnitudes.items():
            raise AdapterError(
                f"{spec.name}: {module} has no lora_A and lora_B; is the file whole?"
            )
        if not self.updates:
            raise AdapterError(
                f"{WEIGHTS_NAME} changes no weight of the model; was the adapter saved whole?"
            )
        self._note_parts()
        return Assignment(
            updates=self.updates,
            base_copies=self.tensors.copies,
            form=form,
            notes=tuple(self.notes),
        )

    # --- pairs -----------------------------------------------------------------------------------

    def _by_form(
        self,
    ) -> tuple[dict[tuple[int, str], Pair], dict[str, Pair]]:
        """The pairs of packed experts, by layer and part, and those of single linears."""
        packed: dict[tuple[int, str], Pair] = {}
        shared: dict[str, Pair] = {}
        linears: dict[str, Pair] = {}
        both = {m[1] for module in self.tensors.pairs if (m := _PACKED.fullmatch(module)) and m[2]}
        for module, pair in self.tensors.pairs.items():
            if found := _PACKED.fullmatch(module):
                part = "gate_up_proj" if found[2] else "down_proj"
                if not found[2] and found[1] not in both:
                    part = self._lone_part(module, pair)
                packed[int(found[1]), part] = pair
            elif _SHARED.fullmatch(module):
                shared[module] = pair
            else:
                linears[module] = dict(pair)
        for module, pair in shared.items():
            self._deal_out(module, pair, linears)
        return packed, linears

    def _deal_out(self, module: str, pair: Pair, linears: dict[str, Pair]) -> None:
        """Give the side of a pair that all experts of a layer share to each of them."""
        experts, _, proj = module.rpartition(".")
        for side, spec in pair.items():
            for expert in range(self.model.num_experts):
                own = linears.setdefault(f"{experts}.{expert}.{proj}", {})
                if side in own:
                    raise AdapterError(
                        f"{spec.name} is shared by all experts, but {own[side].name} is there too"
                    )
                own[side] = spec

    def _add_linear(self, module: str, pair: Pair) -> None:
        name = f"{module}.weight"
        some = next(iter(pair.values())).name
        role = classify(name)
        if name not in self.shapes or role.role in (Role.NORM, Role.EXTRA, Role.ATTENTION_EXTRA):
            raise AdapterError(f"{some}: the model has no linear {module}")
        embedding = role.role is Role.EMBEDDING
        sides = ("embeddingA", "embeddingB") if embedding else ("A", "B")
        if missing := [side for side in sides if side not in pair]:
            raise AdapterError(
                f"{some}: its partner lora_{missing[0].replace('g', 'g_')} is missing; is the file"
                " whole?"
            )
        if extra := [spec for side, spec in pair.items() if side not in sides]:
            raise AdapterError(f"{extra[0].name}: not a tensor that an update of {module} has")
        a, b = (pair[side] for side in sides)
        n, k = self.shapes[name]
        if embedding:  # A [r, V] and B [H, r] of W [V, H]
            n, k = k, n
        scaled = self.adapter.scaled_name(module)
        rank = self._rank(a, a.shape[-2] if len(a.shape) > 1 else 0, scaled)
        for spec, shape in ((a, (rank, k)), (b, (n, rank))):
            if spec.shape not in (shape, (1, *shape)):
                raise AdapterError(
                    f"{spec.name}: shape {list(spec.shape)}, but {module} calls for {list(shape)}"
                )
        first, second = Factor(spec=a), Factor(spec=b)
        if embedding:
            first, second = Factor(spec=b, transposed=True), Factor(spec=a, transposed=True)
        self._put(
            name,
            LowRank(
                a=first,
                b=second,
                rank=rank,
                scaling=self.adapter.scaling(scaled),
                magnitude=self._magnitude(module, n),
            ),
            a,
        )

    def _magnitude(self, module: str, length: int) -> TensorSpec | None:
        spec = self.tensors.magnitudes.pop(module, None)
        if (spec is not None) != self.adapter.use_dora:
            what = "has no lora_magnitude_vector" if spec is None else "has a lora_magnitude_vector"
            said = "true" if self.adapter.use_dora else "false"
            raise AdapterError(f"{module} {what}, but the config says use_dora {said}")
        if spec is not None and spec.shape not in ((length,), (1, length), (length, 1)):
            raise AdapterError(f"{spec.name}: shape {list(spec.shape)}, expected [{length}]")
        return spec

    def _rank(self, a: TensorSpec, rank: int, scaled: str) -> int:
        """Check the rank of an update. Raises `AdapterError`."""
        expected = self.adapter.expected_rank(scaled)
        if rank != expected:
            packed = _PACKED.fullmatch(scaled.rpartition(".")[0]) is not None
            why = "; are experts missing, as in one rank's part of them?" if packed else ""
            raise AdapterError(
                f"{a.name}: shape {list(a.shape)} is of rank {rank}, but the config gives"
                f" {scaled} rank {expected}{why}"
            )
        if keys := self.adapter.ambiguous(scaled):
            self._note(
                f"two pattern keys match the same tensors with different values ({keys[0]!r} and"
                f" {keys[1]!r}); the first in the file counts, as when PEFT loads the adapter, but"
                " training may have used the other"
            )
        return rank

    def _refuse_partial(self, linears: Iterable[str]) -> None:
        """Refuse layers of which some experts are adapted and others are not."""
        seen: dict[tuple[int | None, str], set[int]] = {}
        for module in linears:
            role = classify(f"{module}.weight")
            if role.expert is not None:
                seen.setdefault((role.layer, role.proj), set()).add(role.expert)
        for (layer, proj), experts in seen.items():
            if len(experts) < self.model.num_experts:
                lacking = sorted(set(range(self.model.num_experts)) - experts)
                raise AdapterError(
                    f"layer {layer}: {proj} is adapted in {len(experts)} of"
                    f" {self.model.num_experts} experts (expert {lacking[0]} is not); is this one"
                    " rank's part of an expert-parallel run? Save the whole adapter"
                )

    # --- packed experts --------------------------------------------------------------------------

    def _fits(self, part: str, pair: Pair) -> set[Layout]:
        """The layouts that the shapes of a packed pair fit."""
        _, n, k = packed_shape(self.model, part)
        found: set[Layout] = set()
        widths = pair["A"].shape[-1], pair["B"].shape[0]
        if widths == (k, n):
            found.add("new")
        if widths == (n, k):
            found.add("old")
        return found

    def _lone_part(self, module: str, pair: Pair) -> str:
        """Which packed tensor is adapted where only one is."""
        _whole(module, pair)
        parts = [part for part in ("gate_up_proj", "down_proj") if self._fits(part, pair)]
        named = {entry.rpartition(".")[2] for entry in self.adapter.target_parameters}
        listed = [part for part in parts if part in named] or parts
        if len(listed) != 1:
            raise AdapterError(
                f"{pair['A'].name}: shapes {list(pair['A'].shape)} and {list(pair['B'].shape)} fit"
                f" {' and '.join(parts) or 'neither gate_up_proj nor down_proj'} of {module}"
            )
        return listed[0]

    def _expert_form(self, packed: Mapping[tuple[int, str], Pair]) -> ExpertForm | None:
        """Decide layout and order: by shapes, else by the user, else by PEFT's version."""
        if not packed:
            return None
        votes: dict[Layout, TensorSpec] = {}
        for (layer, part), pair in packed.items():
            _whole(f"model.layers.{layer}.mlp.experts", pair)
            fits = self._fits(part, pair)
            if not fits or layer not in self.model.sparse_layers:
                a, b = pair["A"], pair["B"]
                raise AdapterError(
                    f"{a.name}: shapes {list(a.shape)} and {list(b.shape)} do not fit {part} of"
                    f" layer {layer}, which is {list(packed_shape(self.model, part))}"
                )
            if len(fits) == 1:
                votes.setdefault(next(iter(fits)), pair["A"])
        version = self.adapter.peft_version
        if len(votes) == 2:
            raise AdapterError(
                f"{votes['new'].name} is of PEFT's new layout, {votes['old'].name} of its old one;"
                " is the file put together from two adapters?"
            )
        if votes:
            layout, reason = next(iter(votes)), f"shapes of {next(iter(votes.values())).name}"
            said = self.layout or _layout_of(version)
            if said not in (None, layout):
                source = "--expert-lora-layout" if self.layout else f"peft_version {version}"
                raise AdapterError(
                    f"{source} says the {said} layout of packed experts, but the {reason} are those"
                    f" of the {layout} one; give --expert-lora-layout {layout} if they are right"
                )
        elif self.layout is not None:
            layout, reason = self.layout, "--expert-lora-layout"
        elif (by_version := _layout_of(version)) is not None:
            layout, reason = by_version, f"peft_version {version}"
        else:
            raise AdapterError(
                "packed experts whose layout neither shapes nor peft_version tell; give"
                " --expert-lora-layout new (PEFT 0.19.1 and later) or old (before)"
            )
        if self.order is None and version is None:
            raise AdapterError(
                "packed experts in a file that PEFT did not write; give --expert-lora-order"
                " fastest (PEFT's) or slowest (Megatron-Bridge's)"
            )
        how = "PEFT's" if self.order is None else "--expert-lora-order"
        return ExpertForm(
            layout=layout, order=self.order or "fastest", reason=f"{reason}; order: {how}"
        )

    def _add_packed(self, layer: int, part: str, pair: Pair, form: ExpertForm) -> None:
        """The updates of all experts' halves from one packed pair."""
        a, b, experts = pair["A"], pair["B"], self.model.num_experts
        prefix = f"model.layers.{layer}.mlp.experts"
        if self.adapter.use_dora or self.tensors.magnitudes.keys() & {
            prefix,
            f"{prefix}.base_layer",
        }:
            raise AdapterError(f"{a.name}: DoRA on packed experts has no definition")
        total = a.shape[0]
        if total % experts or b.shape != (b.shape[0], total):
            raise AdapterError(
                f"{a.name}: {total} rows and {list(b.shape)} in its partner are not a whole rank"
                f" for each of {experts} experts; is this one rank's part of the experts?"
            )
        scaled = f"{prefix}.{part}"
        rank = self._rank(a, total // experts, scaled)
        width = self.model.moe_intermediate_size
        halves = {"down_proj": slice(None)}
        if part == "gate_up_proj":
            halves = {"gate_proj": slice(0, width), "up_proj": slice(width, 2 * width)}
        for expert in range(experts):
            own = slice(expert * rank, (expert + 1) * rank)
            columns = slice(expert, None, experts) if form.order == "fastest" else own
            for proj, half in halves.items():
                if form.layout == "new":
                    first = Factor(spec=a, rows=own)
                    second = Factor(spec=b, rows=half, columns=columns)
                else:
                    first = Factor(spec=b, columns=columns, transposed=True)
                    second = Factor(spec=a, rows=own, columns=half, transposed=True)
                scaling = self.adapter.scaling(scaled)
                update = LowRank(a=first, b=second, rank=rank, scaling=scaling)
                self._put(f"{prefix}.{expert}.{proj}.weight", update, a)

    # --- replaced tensors ------------------------------------------------------------------------

    def _add_tokens(self, module: str, spec: TensorSpec) -> None:
        name = f"{module}.weight"
        tokens = self.adapter.trained_tokens.get(module.rpartition(".")[2], ())
        if classify(name).role not in (Role.EMBEDDING, Role.HEAD) or name not in self.shapes:
            raise AdapterError(f"{spec.name}: {module} is neither the embedding nor the head")
        rows, width = self.shapes[name]
        if not tokens or spec.shape != (len(tokens), width) or len(set(tokens)) != len(tokens):
            raise AdapterError(
                f"{spec.name}: shape {list(spec.shape)}, but trainable_token_indices lists"
                f" {counted(len(set(tokens)), 'token')} and a row has {width} values"
            )
        if max(tokens, default=0) >= rows:
            raise AdapterError(
                f"trainable_token_indices: token {max(tokens)} is beyond the vocabulary of {rows}"
            )
        self._put(name, Tokens(spec=spec, tokens=tokens), spec)

    def _add_replaced(self, name: str, spec: TensorSpec) -> None:
        role = classify(name)
        shape: tuple[int, ...]
        if role.packed is not None and role.layer in self.model.sparse_layers:
            shape, targets = packed_shape(self.model, role.packed), packed_weights(role, self.model)
        else:
            shape, targets = self.shapes.get(name, ()), iter([(name, 0)])
        if not shape:
            raise AdapterError(
                f"{spec.name}: a tensor of no known kind; every tensor of an adapter must have a"
                " place in the model"
            )
        if spec.shape != shape:
            ends = role.role in (Role.EMBEDDING, Role.HEAD)
            why = "; a resized vocabulary needs a resized model" if ends else ""
            raise AdapterError(
                f"{spec.name}: shape {list(spec.shape)}, but the model's is {list(shape)}{why}"
            )
        for target, first in targets:
            self._put(target, Replaced(spec=spec, first=first), spec)

    def _put(self, name: str, update: Update, spec: TensorSpec) -> None:
        if name in self.updates:
            raise AdapterError(f"{spec.name}: {name} is changed twice by this adapter")
        self.updates[name] = update

    # --- notes -----------------------------------------------------------------------------------

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def _note_parts(self) -> None:
        roles = [classify(name) for name in self.updates]
        if any(role.role in (Role.ROUTER, Role.ROUTER_BIAS) for role in roles):
            self._note("the router changes: tokens may go to other experts than in the base")
        experts = any(role.role is Role.EXPERT for role in roles)
        gates = any(role.role is Role.ATTENTION and role.proj == "gate_proj" for role in roles)
        dense = any(role.role is Role.DENSE_MLP for role in roles)
        if experts and not (gates and dense):
            left = [("attention gates", gates), ("dense MLPs", dense)]
            self._note(
                f"experts are adapted, but not the {' and '.join(n for n, yes in left if not yes)}:"
                " PEFT 0.19.1 and later leave them out where gate_proj, up_proj and down_proj are"
                " named as targets"
            )


def named_parts(specs: Iterable[TensorSpec]) -> dict[str, int]:
    """What the names alone say: how many weights of each part, or packed matrices, are changed."""
    counts: Counter[str] = Counter()
    for spec in specs:
        name = spec.name.removeprefix(PREFIX)
        found = _PAIR.fullmatch(name)
        if (found is not None and found[3] == "B") or _COPY.fullmatch(name):
            continue  # counted with A; not changed
        if found is not None and _PACKED.fullmatch(found[1]):
            counts["packed experts"] += 1
            continue
        token = _TOKENS.fullmatch(name)
        target = f"{found[1]}.weight" if found else f"{token[1]}.weight" if token else name
        counts[part_of(target)] += 1
    return dict(counts)


PARTS = {
    Role.ATTENTION: "attention",
    Role.DENSE_MLP: "dense MLPs",
    Role.EXPERT: "experts",
    Role.ROUTER: "routers",
    Role.ROUTER_BIAS: "router biases",
    Role.HEAD: "head",
    Role.EMBEDDING: "embedding",
    Role.NORM: "norms",
    Role.ATTENTION_EXTRA: "attention norms and biases",
    Role.EXTRA: "other",
}


def part_of(name: str) -> str:
    """The part of a weight, for people; of attention by projection (`attention gate_proj`)."""
    role = classify(name)
    part = PARTS[role.role]
    return f"{part} {role.proj}" if role.role is Role.ATTENTION else part


def packed_weights(role: TensorRole, model: BeamConfig) -> Iterator[tuple[str, int]]:
    """(weight, first row) of each expert's linear in a packed tensor, seen as a matrix."""
    assert role.packed is not None
    experts = role.module.rpartition(".")[0]
    _, n, _ = packed_shape(model, role.packed)
    for expert in range(model.num_experts):
        if role.packed == "down_proj":
            yield f"{experts}.{expert}.down_proj.weight", expert * n
        else:
            yield f"{experts}.{expert}.gate_proj.weight", expert * n
            yield f"{experts}.{expert}.up_proj.weight", expert * n + n // 2


def _whole(module: str, pair: Pair) -> None:
    """Raise `AdapterError` unless a packed pair has both sides, each a matrix."""
    some = next(iter(pair.values()))
    if set(pair) != {"A", "B"}:
        raise AdapterError(f"{some.name}: its partner is missing; is the file whole?")
    if bad := [spec for spec in pair.values() if len(spec.shape) != 2]:
        raise AdapterError(
            f"{bad[0].name}: shape {list(bad[0].shape)}, but {module} calls for a matrix"
        )


def _layout_of(version: str | None) -> Layout | None:
    """The layout that a version of PEFT writes; None for what is no plain release."""
    found = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)(?:\.post\d+|\+.*)?", version or "")
    if found is None:
        return None
    return "new" if tuple(map(int, found.groups())) >= (0, 19, 1) else "old"
