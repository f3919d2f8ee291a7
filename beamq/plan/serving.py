"""What a Beam needs when it is served, and which machines can hold it.

In: a `BeamConfig`, and the format of each quantized unit (none: the BF16 source).
Out: bytes of weights, KV cache and activations for each GPU, and how they fit on `GPUS`. Every
figure follows from config.json.

Weights are kept as `WeightPart`s: sums over tensors that a server divides in the same way.

    tensor parallel (TP)   heads, MLP widths and the vocabulary are divided; norms, biases and
                           routers are on every GPU; K and V are divided no further than there are
                           KV heads. Widths of NVFP4 experts are padded to 64 on each GPU.
    expert parallel (EP)   experts are divided; all else is on every GPU, and each GPU serves
                           sequences of its own, so a sequence's KV cache is not divided.

A GPU's budget is `USABLE_SHARE` of its memory (vLLM's default gpu_memory_utilization), less
`RUNTIME_NBYTES` and `activation_nbytes`; what the weights leave of it is for KV cache. GB are 1e9
bytes and nominal: drivers report that or slightly more. These are estimates; a server measures its
own memory when it starts.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from beamq.beam.config import BeamConfig
from beamq.beam.drafter import DrafterConfig
from beamq.beam.tensors import Role
from beamq.errors import UsageError
from beamq.io.safetensors_header import ITEMSIZE
from beamq.options import did_you_mean
from beamq.plan.layout import WEIGHT_FORMATS, Unit, quantized_tensors
from beamq.units import parse_size

BATCHED_TOKENS = 8192  # tokens of one step that activations are allowed for
BATCHED_SEQUENCES = 1024  # sequences whose FP32 logits are allowed for
VOCAB_STEP = 64  # servers pad their share of the vocabulary to this
NVFP4_EXPERT_STEP = 64  # and the width of NVFP4 experts to this
KV_ITEMSIZE = {"bf16": 2, "fp8": 1}
LAYOUTS = ("tensor", "expert")
DEFAULT_CONTEXT = 131_072


@dataclass(frozen=True, slots=True)
class WeightPart:
    """Tensors of one role that are divided in the same way: into `pieces`, in steps of `step`.

    `nbytes` includes `scale_nbytes`. One piece means a copy on every GPU.
    """

    role: Role
    pieces: int
    step: int
    parameters: int
    nbytes: int
    scale_nbytes: int

    def share(self, count: int) -> int:
        """Bytes on each of `count` tensor-parallel GPUs."""
        pieces = -(-self.pieces // count)
        pieces = -(-pieces // self.step) * self.step
        return self.nbytes * pieces // self.pieces


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """All weights of a model. `blocked` has the columns that blocks of a role's linears have."""

    config: BeamConfig
    parts: tuple[WeightPart, ...]
    blocked: Mapping[Role, int]
    drafter: DrafterConfig | None = None  # served beside the model, whole on every GPU

    @property
    def nbytes(self) -> int:
        """Bytes of every tensor once."""
        return sum(part.nbytes for part in self.parts)

    @property
    def scale_nbytes(self) -> int:
        """How many of them are scales."""
        return sum(part.scale_nbytes for part in self.parts)

    @property
    def parameters(self) -> int:
        """Elements, whatever their format; scales do not count."""
        return sum(part.parameters for part in self.parts)

    def of(self, *roles: Role) -> tuple[int, int]:
        """(parameters, bytes) of some roles together."""
        chosen = [part for part in self.parts if part.role in roles]
        return sum(part.parameters for part in chosen), sum(part.nbytes for part in chosen)

    def expert_padding(self, count: int) -> float:
        """The share (0.2 is 20%) that padding adds to NVFP4 experts with TP on `count` GPUs."""
        parts = [part for part in self.parts if part.role is Role.EXPERT and part.step > 1]
        whole = sum(part.nbytes for part in parts)
        held = sum(part.share(count) for part in parts) * count
        return held / whole - 1 if whole else 0.0

    def per_gpu(self, layout: str, count: int) -> int | None:
        """Bytes on each of `count` GPUs; None where the model cannot be divided like that."""
        drafter = self.drafter.nbytes if self.drafter else 0
        if layout == "tensor":
            if not tensor_parallel_fits(self.config, self.blocked, count):
                return None
            return sum(part.share(count) for part in self.parts) + drafter
        if self.config.num_experts % count:
            return None
        _, experts = self.of(Role.EXPERT)
        return self.nbytes - experts + -(-experts // count) + drafter

    def split(self) -> dict[str, dict[int, int | None]]:
        """`per_gpu` of every layout and number of GPUs."""
        return {layout: {n: self.per_gpu(layout, n) for n in COUNTS} for layout in LAYOUTS}


def tensor_parallel_fits(config: BeamConfig, blocked: Mapping[Role, int], count: int) -> bool:
    """Whether heads and widths divide by `count`, with whole blocks of the roles in `blocked`."""
    kv = config.num_kv_heads
    if config.num_heads % count or (kv % count and count % kv):
        return False
    for kind, role, width in (
        (config.dense_layers, Role.DENSE_MLP, config.intermediate_size),
        (config.sparse_layers, Role.EXPERT, config.moe_intermediate_size),
        (range(config.num_layers), Role.ATTENTION, config.q_dim),
    ):
        if kind and width % (count * blocked.get(role, 1)):
            return False
    return True


def model_weights(config: BeamConfig, formats: Mapping[Unit, str] | None = None) -> Weights:
    """Weights with units in their `formats` (`layout.WEIGHT_FORMATS`) and the rest BF16, routers
    FP32.

    Counts Beam's own tensors; extra ones that a plan copies along are not served.
    """
    sums: dict[tuple[Role, int, int], list[int]] = {}

    def add(role: Role, pieces: int, step: int, parameters: int, nbytes: int, scales: int) -> None:
        entry = sums.setdefault((role, pieces, step), [0, 0, 0])
        entry[0] += parameters
        entry[1] += nbytes
        entry[2] += scales

    for role, pieces, numel, itemsize in _high_precision_tensors(config):
        step = VOCAB_STEP if role in (Role.EMBEDDING, Role.HEAD) else 1
        add(role, pieces, step, numel, numel * itemsize, 0)
    blocked: dict[Role, int] = {}
    for layer, role, pieces, count, n, k in _linears(config):
        chosen = (formats or {}).get((layer, role))
        step = 1
        if chosen is not None:
            columns = WEIGHT_FORMATS[chosen].block[1]
            blocked[role] = math.lcm(blocked.get(role, 1), columns or 1)
            step = NVFP4_EXPERT_STEP if chosen == "nvfp4" and role is Role.EXPERT else 1
        nbytes, scales = linear_nbytes(chosen, n, k)
        add(role, pieces, step, count * n * k, count * nbytes, count * scales)
    return Weights(
        config=config,
        parts=tuple(
            WeightPart(role, pieces, step, *entry) for (role, pieces, step), entry in sums.items()
        ),
        blocked=blocked,
    )


def linear_nbytes(fmt: str | None, n: int, k: int) -> tuple[int, int]:
    """(bytes, of which scales) of one linear [n, k]; `fmt` None is BF16."""
    if fmt is None:
        return n * k * ITEMSIZE["BF16"], 0
    tensors = quantized_tensors("", fmt, n, k)
    sizes = [ITEMSIZE[dtype] * math.prod(shape) for _, dtype, shape in tensors]
    return sum(sizes), sum(sizes[1:])


def _high_precision_tensors(config: BeamConfig) -> Iterator[tuple[Role, int, int, int]]:
    """(role, pieces, elements, bytes of one) of everything that no recipe quantizes."""
    h, layers, sparse = config.hidden_size, config.num_layers, len(config.sparse_layers)
    bf16, fp32 = ITEMSIZE["BF16"], ITEMSIZE["F32"]
    yield Role.EMBEDDING, config.vocab_size, config.vocab_size * h, bf16
    if not config.tie_word_embeddings:
        yield Role.HEAD, config.vocab_size, config.vocab_size * h, bf16
    yield Role.NORM, 1, (4 * layers + 1) * h, bf16
    yield Role.ATTENTION_EXTRA, 1, layers * (2 * config.head_dim + config.num_heads), bf16
    yield Role.ROUTER, 1, sparse * config.num_experts * h, fp32
    yield Role.ROUTER_BIAS, 1, sparse * config.num_experts, fp32


def _linears(config: BeamConfig) -> Iterator[tuple[int, Role, int, int, int, int]]:
    """(layer, role, pieces, how many, n, k) of every linear that a recipe may quantize."""
    h, q, kv = config.hidden_size, config.q_dim, config.kv_dim
    for layer, kind in enumerate(config.mlp_layer_types):
        yield layer, Role.ATTENTION, config.num_heads, 2, q, h
        yield layer, Role.ATTENTION, config.num_heads, 1, h, q
        yield layer, Role.ATTENTION, config.num_kv_heads, 2, kv, h
        sparse = kind == "sparse"
        role = Role.EXPERT if sparse else Role.DENSE_MLP
        width = config.moe_intermediate_size if sparse else config.intermediate_size
        count = config.num_experts if sparse else 1
        yield layer, role, width, 2 * count, width, h
        yield layer, role, width, count, h, width


def kv_cache_nbytes(
    config: BeamConfig,
    context: int,
    *,
    itemsize: int = 2,
    heads: int | None = None,
    windowed: bool = True,
) -> int:
    """KV cache of one sequence of `context` tokens, with `heads` of the KV heads (all of them).

    Full layers keep every token, sliding layers the last `sliding_window`; with `windowed` false
    all layers keep every token, as a server without hybrid caches would.
    """
    held = config.num_kv_heads if heads is None else heads
    token = 2 * held * config.head_dim * itemsize
    full = len(config.full_layers) if windowed else config.num_layers
    sliding = config.num_layers - full
    return token * (full * context + sliding * min(config.sliding_window or 0, context))


def default_context(config: BeamConfig) -> int:
    """128 Ki tokens, or what the model allows if that is less."""
    return min(DEFAULT_CONTEXT, config.max_position_embeddings)


def kv_heads_per_gpu(config: BeamConfig, layout: str, count: int) -> int:
    """KV heads that each GPU holds of one sequence."""
    return config.num_kv_heads if layout == "expert" else -(-config.num_kv_heads // count)


def activation_nbytes(config: BeamConfig) -> int:
    """Memory allowed for a step's activations and logits, undivided: an estimate from above."""
    routed = config.top_k * (3 * config.moe_intermediate_size + config.hidden_size)
    widest = max(routed if config.sparse_layers else 0, 3 * config.intermediate_size)
    residual = 4 * config.hidden_size
    logits = BATCHED_SEQUENCES * config.vocab_size * ITEMSIZE["F32"]
    return BATCHED_TOKENS * (widest + residual) * ITEMSIZE["BF16"] + logits


COUNTS = (1, 2, 4, 8, 16)
USABLE_SHARE = 0.9
RUNTIME_NBYTES = 1_500_000_000  # CUDA context, communication buffers, captured graphs


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU: its name for `--gpu`, its label in tables, its nominal bytes."""

    name: str
    label: str
    nbytes: int


# Memory as in NVIDIA's support matrix (docs.nvidia.com/nim/large-language-models); that of the RTX
# PRO 6000 (Blackwell) as in its datasheet.
GPUS = (
    Gpu(name="h100", label="H100 80 GB", nbytes=80_000_000_000),
    Gpu(name="h200", label="H200 141 GB", nbytes=141_000_000_000),
    Gpu(name="b200", label="B200 180 GB", nbytes=180_000_000_000),
    Gpu(name="b300", label="B300, GB300 288 GB", nbytes=288_000_000_000),
    Gpu(name="rtx-pro-6000", label="RTX PRO 6000 96 GB", nbytes=96_000_000_000),
)
_OTHER_NAMES = {"gb300": "b300", "rtxpro6000": "rtx-pro-6000", "rtx6000": "rtx-pro-6000"}


_MACHINE = re.compile(r"(?:([0-9]+) ?[x*] ?)?(.*?)(?: ?(?::|(?<=[0-9b])[x*]| [x*]) ?(-?[0-9]*))?")


def parse_gpu(text: str) -> tuple[Gpu, int | None]:
    """`h200:8` or `8xh200` -> (H200, 8); `h200` -> (H200, None). `mine=96GB:8` or `96GB:8` is a GPU
    of that memory. Raises `UsageError`."""
    found = _MACHINE.fullmatch(text.strip().lower().replace("_", "-"))
    first, name, last = found.groups() if found else (None, "", None)
    gpu = _gpu(name, text)
    number = last if first is None else first
    if number is None:
        return gpu, None
    if (first and last is not None) or not number.isdecimal() or not 1 <= int(number[:6]) <= 1024:
        raise UsageError(f"--gpu {text!r}: the count must be from 1 to 1024, as in h200:8")
    return gpu, int(number)


def _gpu(name: str, text: str) -> Gpu:
    """A GPU by its name, or by its memory. Raises `UsageError`."""
    known = {gpu.name: gpu for gpu in GPUS}
    known |= {other: known[usual] for other, usual in _OTHER_NAMES.items()}
    own, equals, size = name.partition("=")
    if equals or own[:1].isdigit():
        nbytes = parse_size(size or own, f"--gpu {text!r}:")
        if nbytes < 1e9:
            raise UsageError(f"--gpu {text!r}: below 1 GB; write a GPU's memory as in 96GB")
        label = f"{own if equals else ''} {nbytes / 1e9:g} GB".lstrip()
        return Gpu(name=own or size, label=label, nbytes=nbytes)
    if name not in known:
        raise UsageError(
            f"--gpu {text!r}: unknown GPU; known are {', '.join(sorted(known))} (for example"
            f" h200:8); for another give its memory, as in {name[:20] or 'mine'}=96GB:8"
            f"{did_you_mean(name, known)}"
        )
    return known[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """How a model fits on `count` GPUs. Bytes are for each GPU, `sequences` for all together."""

    gpu: Gpu
    count: int
    layout: str
    weight_nbytes: int
    kv_nbytes: int
    room_nbytes: int
    sequences: int
    max_context: int

    @property
    def fits(self) -> bool:
        """Whether weights and at least one full context have room."""
        return self.sequences > 0


def fit(
    weights: Weights, gpu: Gpu, count: int, layout: str, *, context: int, kv_itemsize: int = 2
) -> Fit | None:
    """The sums for one machine; None where the model cannot be divided like that."""
    config = weights.config
    held = weights.per_gpu(layout, count)
    if held is None:
        return None
    heads = kv_heads_per_gpu(config, layout, count)
    drafted = weights.drafter.kv_cache_nbytes if weights.drafter else _no_drafter
    nbytes = partial(kv_cache_nbytes, config, itemsize=kv_itemsize, heads=heads)
    kv = nbytes(context) + drafted(context)
    budget = round(gpu.nbytes * USABLE_SHARE) - RUNTIME_NBYTES - activation_nbytes(config)
    room = budget - held
    sequences = max(0, room // kv) * (count if layout == "expert" else 1)
    return Fit(
        gpu=gpu,
        count=count,
        layout=layout,
        weight_nbytes=held,
        kv_nbytes=kv,
        room_nbytes=room,
        sequences=sequences,
        max_context=bisect_right(  # at most what the config allows
            range(1, config.max_position_embeddings + 1), room, key=lambda n: nbytes(n) + drafted(n)
        ),
    )


def best_fit(
    weights: Weights, gpu: Gpu, count: int, *, context: int, kv_itemsize: int = 2
) -> Fit | None:
    """The layout that holds more sequences; tensor parallel where both hold as many."""
    found = [
        result
        for layout in LAYOUTS
        if (result := fit(weights, gpu, count, layout, context=context, kv_itemsize=kv_itemsize))
    ]
    return max(found, key=lambda result: result.sequences, default=None)


def smallest_count(weights: Weights, gpu: Gpu, *, context: int, kv_itemsize: int = 2) -> int | None:
    """The fewest of these GPUs, of `COUNTS`, that hold the model and one full context."""
    for count in COUNTS:
        result = best_fit(weights, gpu, count, context=context, kv_itemsize=kv_itemsize)
        if result is not None and result.fits:
            return count
    return None


def _no_drafter(_context: int) -> int:
    return 0
