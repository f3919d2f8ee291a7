"""Several models side by side: the same tokens through each, one layer of each at a time.

In: opened checkpoints, the source first, and rows of token ids. Out: `Findings` on each candidate's
logits, hidden states, routers and weights.

    layer 0 of source, of candidate 1, of candidate 2;  layer 1 of source, of candidate 1, ...

The one idea: all models advance together, so both sides of every comparison are in memory at once
and nothing is kept for later. Memory holds the source's layer, one candidate's and the one that is
being read, and for each token one hidden state of each model.

For each quantized candidate the source runs once more with exact weights and that candidate's
quantized activations (`floor`). Its KL is the part of the loss that no better weights can win back.
A weight defines how its input is quantized (FP8 by token, NVFP4 by `input_scale`), so the pass
needs no more than `ServedWeight`, an exact weight with a quantized one attached.

Under torchrun each process holds a range of every layer's experts and all other weights; findings
equal those of one process to the bit (ADR 9).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from numpy import int64
from numpy.typing import NDArray

from beamq.beam.config import BeamConfig
from beamq.calib.options import DTYPES
from beamq.errors import BeamqError, ConfigError, EnvironmentFault, UsageError
from beamq.eval.compare.findings import Findings, Gathered, of_all_ranks
from beamq.eval.compare.footprint import stored_formats
from beamq.eval.compare.metrics import (
    CHUNK_ELEMENTS,
    RouteRecorder,
    TokenScores,
    layer_error,
    ratio_of_means,
    score_base,
)
from beamq.eval.compare.weight_error import changed_tensors, weight_errors
from beamq.io.checkpoint import Checkpoint
from beamq.io.manifest import Manifest, new_checksum
from beamq.io.safetensors_header import TensorSpec
from beamq.model.context import Observer, SequenceLayout
from beamq.model.expert_parallel import exchange_for
from beamq.model.forward import Batch, LayerPass
from beamq.model.gemm.backend import DenseWeight, Gemm, Groups, LinearWeight
from beamq.model.gemm.reference import ReferenceGemm, product, quantize_input
from beamq.model.gemm.select import select_gemm
from beamq.model.layer import DenseMlp, LayerWeights, SparseMlp, head_logits
from beamq.model.layer_stream import LayerStream, in_turns
from beamq.model.loader import LayerLoader
from beamq.model.logits import BATCH_TOKENS, embed
from beamq.ranks import Ranks, current_ranks
from beamq.version import __version__

# --- exact weights with quantized activations ----------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedWeight(DenseWeight):
    """An exact weight whose inputs are quantized as those of the quantized weight `like`."""

    like: LinearWeight


_EXACT = ReferenceGemm()


class ActivationsOnlyGemm(Gemm):
    """A `Gemm` that quantizes the inputs of `ServedWeight`s and nothing else."""

    def linear(self, x_TK: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
        """See `Gemm.linear`."""
        if isinstance(weight, ServedWeight):
            return product(_served(x_TK, weight), weight.w_NK)
        return _EXACT.linear(x_TK, weight)

    def grouped(self, x_TK: torch.Tensor, weight: LinearWeight, groups: Groups) -> torch.Tensor:
        """See `Gemm.grouped`."""
        if isinstance(weight, ServedWeight):
            x_TK = _served(x_TK, weight)
        return _EXACT.grouped(x_TK, weight, groups)


def with_served_inputs(base: LayerWeights, candidate: LayerWeights) -> LayerWeights:
    """The layer `base`, where each linear quantizes its inputs as `candidate`'s does.

    Both must hold the same experts, and `base` must be unquantized.
    """
    mine, own = base.attention, candidate.attention
    attention = replace(mine, qkv_gate=_pair(mine.qkv_gate, own.qkv_gate), o=_pair(mine.o, own.o))
    mlp: DenseMlp | SparseMlp
    if isinstance(base.mlp, DenseMlp) and isinstance(candidate.mlp, DenseMlp):
        gate_up, down = candidate.mlp.gate_up, candidate.mlp.down
        mlp = DenseMlp(gate_up=_pair(base.mlp.gate_up, gate_up), down=_pair(base.mlp.down, down))
    elif isinstance(base.mlp, SparseMlp) and isinstance(candidate.mlp, SparseMlp):
        experts = tuple(
            replace(e, gate_up=_pair(e.gate_up, like.gate_up), down=_pair(e.down, like.down))
            for e, like in zip(base.mlp.experts, candidate.mlp.experts, strict=True)
        )
        mlp = replace(base.mlp, experts=experts)
    else:
        raise TypeError("a dense and a sparse layer cannot be paired")
    return replace(base, attention=attention, mlp=mlp)


def _pair(exact: LinearWeight, like: LinearWeight) -> LinearWeight:
    if isinstance(like, DenseWeight):
        return exact
    if not isinstance(exact, DenseWeight):
        raise TypeError("the source's weights are quantized")
    return ServedWeight(w_NK=exact.w_NK, like=like)


def _served(x_TK: torch.Tensor, weight: ServedWeight) -> torch.Tensor:
    if isinstance(weight.like, DenseWeight):
        return x_TK
    return quantize_input(x_TK, weight.like).values().to(x_TK.dtype)


# --- can these checkpoints run side by side? -----------------------------------------------------

SHAPES = (
    "hidden_size", "intermediate_size", "moe_intermediate_size", "num_layers", "vocab_size",
    "num_heads", "num_kv_heads", "head_dim", "num_experts", "top_k", "mlp_layer_types",
)  # fmt: skip


def expect_same_shapes(base: BeamConfig, other: BeamConfig, name: str) -> None:
    """Raise `ConfigError` unless both configs describe the same shapes."""
    for key in SHAPES:
        if getattr(base, key) != getattr(other, key):
            raise ConfigError(
                f"{name}: {key} is {str(getattr(other, key))[:60]}, in the source"
                f" {str(getattr(base, key))[:60]}; only checkpoints of one model can be compared"
            )


def expect_same_files(checkpoints: Sequence[Checkpoint], ranks: Ranks) -> None:
    """Raise `EnvironmentFault` at every rank unless the headers show the same files at each."""
    if ranks.world == 1:
        return
    seen = ranks.gather([checkpoint.layout_digest() for checkpoint in checkpoints])
    for checkpoint, digests in zip(checkpoints, zip(*seen, strict=True), strict=True):
        if len(set(digests)) > 1:
            raise EnvironmentFault(
                f"{checkpoint.name}: the ranks do not see the same files; give every rank the same"
                " folders"
            )


class ReadChecksums:
    """Compares the tensors that a loader reads with the checksums in a checkpoint's beamq.json.

    `tap` is given to the loader, so nothing is read twice. Scalars that the loader looks up by
    themselves are not seen. `fault` is set where beamq.json names an unknown algorithm.
    """

    def __init__(self, manifest: Manifest | None) -> None:
        self._manifest = manifest
        self._damaged: set[str] = set()
        self._lock = threading.Lock()
        self.fault: str | None = None
        self._recorded = {} if manifest is None else manifest.tensors
        try:
            if manifest is not None and self._recorded:
                new_checksum(manifest.algorithm)
        except BeamqError as fault:
            self.fault, self._recorded = str(fault), {}

    def tap(self, spec: TensorSpec, first: int, tensor: torch.Tensor) -> None:
        """Check a tensor that was read whole; rows of a packed one have no checksum."""
        recorded = self._recorded.get(spec.name)
        if self._manifest is None or not recorded or first or tensor.nbytes != spec.nbytes:
            return
        checksum = new_checksum(self._manifest.algorithm)
        checksum.update(tensor.reshape(-1).view(torch.uint8).numpy())
        if checksum.hexdigest() != recorded:
            with self._lock:
                self._damaged.add(spec.name)

    @property
    def damaged(self) -> tuple[str, ...]:
        """Names of tensors that are not what was written, sorted."""
        return tuple(sorted(self._damaged))


DEFAULT_DTYPE = {"cuda": "bfloat16", "cpu": "float32"}
HEAD_ELEMENTS = 1 << 25  # FP32 logits of one model at a time: 128 MiB


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    """How to run: dtype of activations, device, and the GEMM of the candidates."""

    dtype: torch.dtype
    device: torch.device
    gemm: Gemm


def stream_options(
    device: torch.device, dtype: str | None, gemm: str
) -> tuple[StreamOptions, dict[str, Any]]:
    """How to run on a device, and the record of it for reports. Raises `UsageError`."""
    name = dtype or DEFAULT_DTYPE.get(device.type, "float32")
    if name not in DTYPES:
        raise UsageError(f"dtype is {name!r}, expected {' or '.join(DTYPES)}")
    settings = {
        "beamq": __version__,
        "torch": torch.__version__,
        "dtype": name,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "gemm": gemm,
    }
    options = StreamOptions(dtype=getattr(torch, name), device=device, gemm=select_gemm(gemm))
    return options, settings


def run_side_by_side(
    source: Checkpoint,
    candidates: Sequence[Checkpoint],
    ids_BT: NDArray[int64],
    options: StreamOptions,
    *,
    ranks: Ranks | None = None,
    sums: Sequence[ReadChecksums] = (),
    on_start: Callable[[], None] = lambda: None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Findings]:
    """Findings for each candidate, the same at every rank. Rows of `ids_BT` are whole sequences.

    `ranks` are torchrun's unless given; all must call this, and the first one's rows are used.
    `sums`, one for each candidate, check every tensor that is read. `on_start` is called at the
    first rank once the models are known to match; `progress` gets the bytes of weights that have
    run, and the total. Raises `ConfigError` for a candidate that is another model, what loading
    raises (at every rank what it raised at one), and `EnvironmentFault` where a rank sees other
    files or is lost.
    """
    ranks = current_ranks() if ranks is None else ranks
    ids_BT = ranks.gather(ids_BT)[0]
    checkpoints = [source, *candidates]
    expect_same_files(checkpoints, ranks)
    with ExitStack() as stack:
        with ranks.agreeing():
            loaders = stack.enter_context(open_loaders(checkpoints, options, sums))
            if ranks.first:
                on_start()
            run = _SideBySide(loaders, ids_BT, options, ranks)
        run.layers(progress)
        with ranks.agreeing():
            run.heads()
            for checkpoint in checkpoints:
                checkpoint.check_unchanged()
    found = [candidate.findings() for candidate in run.candidates]
    for place in range(1, len(found)):
        first, own = (run.candidates[n].scores.kld_RT for n in (0, place))
        found[place] = replace(found[place], kld_ratio_to_first=ratio_of_means(own, first))
    if sums:
        pairs = zip(found, sums, strict=True)
        found = [replace(findings, damaged=each.damaged) for findings, each in pairs]
    return found if ranks.world == 1 else of_all_ranks(ranks.gather(found))


@contextmanager
def open_loaders(
    checkpoints: Sequence[Checkpoint], options: StreamOptions, sums: Sequence[ReadChecksums] = ()
) -> Iterator[list[LayerLoader]]:
    """One for each checkpoint. Raises `ConfigError` for a candidate that is another model."""
    configs = [BeamConfig.from_dict(checkpoint.config) for checkpoint in checkpoints]
    for checkpoint, config in zip(checkpoints[1:], configs[1:], strict=True):
        expect_same_shapes(configs[0], config, checkpoint.name)
    taps = [None, *(each.tap for each in sums)] if sums else [None] * len(checkpoints)
    build = partial(LayerLoader, dtype=options.dtype, device=options.device)
    with ExitStack() as stack:
        yield [
            stack.enter_context(closing(build(checkpoint, config, tap=tap)))
            for checkpoint, config, tap in zip(checkpoints, configs, taps, strict=True)
        ]


class _SideBySide:
    """One run: passes of all models over the same batches; the source is at place 0."""

    def __init__(
        self,
        loaders: Sequence[LayerLoader],
        ids_BT: NDArray[int64],
        options: StreamOptions,
        ranks: Ranks,
    ) -> None:
        self._loaders = loaders
        self._config = loaders[0].config
        self._ranks = ranks
        # Undivided: every rank has all states and choices, and finds what one process would.
        self._exchange = exchange_for(ranks, self._config, divided=False)
        rows = max(1, BATCH_TOKENS // ids_BT.shape[1])
        starts = range(0, len(ids_BT), rows)
        self._rows = [torch.from_numpy(ids_BT[start : start + rows]) for start in starts]
        self._base_routes = RouteRecorder()
        self.candidates = [Gathered() for _ in loaders[1:]]
        recorders = [self._base_routes, *(each.routes for each in self.candidates)]
        self._streams = [LayerStream(each, experts=self._exchange.experts) for each in loaders]
        self._passes = [
            self._pass(stream, options.gemm, [routes])
            for stream, routes in zip(self._streams, recorders, strict=True)
        ]
        self._floors = [self._floor(loader, options) for loader in loaders[1:]]
        for candidate, floor in zip(self.candidates, self._floors, strict=True):
            candidate.floor = None if floor is None else TokenScores()
        self._compare_embeddings()

    def _floor(self, loader: LayerLoader, options: StreamOptions) -> LayerPass | None:
        """A pass of the source with the candidate's activations, if it quantizes any."""
        exact = isinstance(options.gemm, ReferenceGemm) and not options.gemm.quantize_activations
        source, candidate = (stored_formats(each.checkpoint) for each in (self._loaders[0], loader))
        if exact or source or not candidate:
            return None
        return self._pass(self._streams[0], ActivationsOnlyGemm())

    def _pass(
        self, stream: LayerStream, gemm: Gemm, observers: Sequence[Observer] = ()
    ) -> LayerPass:
        states = embed(stream.loader, [rows.flatten() for rows in self._rows])
        layouts = [SequenceLayout.rectangle(*rows.shape) for rows in self._rows]
        batches = [Batch(h_TK=h, layout=each) for h, each in zip(states, layouts, strict=True)]
        return LayerPass(stream, batches, gemm=gemm, observers=observers, exchange=self._exchange)

    def _compare_embeddings(self) -> None:
        source, *passes = self._passes
        for candidate, run in zip(self.candidates, passes, strict=True):
            pairs = ((source.states.get(n), run.states.get(n)) for n in range(len(self._rows)))
            if not all(torch.equal(base, other) for base, other in pairs):
                candidate.not_the_sources.append("model.embed_tokens.weight")

    def layers(self, progress: Callable[[int, int], None] | None) -> None:
        """Run all models through all layers and compare them after each."""
        total = sum(
            spec.nbytes for loader in self._loaders for spec in loader.checkpoint.tensors.values()
        )
        models = len(self._loaders)
        base: LayerWeights | None = None
        base_chosen: list[torch.Tensor] = []
        for place, index, weights in self._turns():
            with self._ranks.talking():
                self._passes[place].apply(weights)
                if place == 0:
                    base, base_chosen = weights, self._base_routes.take()
                elif base is not None:
                    self._compare(place, base, weights, base_chosen)
                    floor = self._floors[place - 1]
                    if floor is not None:
                        floor.apply(with_served_inputs(base, weights))
            if place == models - 1:
                base = None  # free it before waiting for the next layer
            del weights
            if progress is not None:
                done = index * models + place + 1
                progress(total * done // (self._config.num_layers * models), total)

    def _turns(self) -> Iterator[tuple[int, int, LayerWeights]]:
        """`in_turns`; an error in reading at one rank is raised at all of them."""
        with closing(in_turns(self._streams)) as turns:
            while True:
                with self._ranks.agreeing():
                    turn = next(turns, None)
                if turn is None:
                    return
                yield turn
                del turn  # before the next one is read, or two would be in memory

    def _compare(
        self, place: int, base: LayerWeights, weights: LayerWeights, chosen: list[torch.Tensor]
    ) -> None:
        candidate = self.candidates[place - 1]
        ours, theirs = self._passes[0].states, self._passes[place].states
        states = ((ours.get(n), theirs.get(n)) for n in range(len(self._rows)))
        own = candidate.routes.take()
        length = self._rows[0].shape[1]
        error = layer_error(base.index, states, candidate.square, length, chosen, own)
        candidate.layers.append(error)
        candidate.linears += weight_errors(base, weights, self._config)
        candidate.not_the_sources += changed_tensors(base, weights)

    def heads(self) -> None:
        """Compute logits of all models, a few tokens at a time, and reduce them to scores."""
        heads = [loader.head() for loader in self._loaders]
        for candidate, head in zip(self.candidates, heads[1:], strict=True):
            if not torch.equal(heads[0].norm, head.norm):
                candidate.not_the_sources.append("model.norm.weight")
            if not torch.equal(heads[0].output_VK, head.output_VK):
                candidate.not_the_sources.append("lm_head.weight")
        step = max(1, HEAD_ELEMENTS // self._config.vocab_size)
        with torch.inference_mode():
            for number, rows in enumerate(self._rows):
                next_T = _following(rows).to(heads[0].norm.device)
                states = [run.states.get(number) for run in self._passes]
                for start in range(0, next_T.numel(), step):
                    some = slice(start, start + step)
                    logits = [
                        head_logits(h_TK[some], head, loader.config)
                        for h_TK, head, loader in zip(states, heads, self._loaders, strict=True)
                    ]
                    floors = [
                        None
                        if floor is None
                        else head_logits(floor.states.get(number)[some], heads[0], self._config)
                        for floor in self._floors
                    ]
                    self._score(next_T[some], logits, floors)

    def _score(
        self,
        next_T: torch.Tensor,
        logits: Sequence[torch.Tensor],
        floors: Sequence[torch.Tensor | None],
    ) -> None:
        """FP64 work on a few tokens at a time, so that its temporaries stay in the cache."""
        step = max(1, CHUNK_ELEMENTS // self._config.vocab_size)
        for start in range(0, next_T.numel(), step):
            some = slice(start, start + step)
            base = score_base(logits[0][some], next_T[some])
            pairs = zip(self.candidates, logits[1:], floors, strict=True)
            for candidate, logits_TV, floor_TV in pairs:
                candidate.scores.add(base, logits_TV[some])
                if candidate.floor is not None and floor_TV is not None:
                    candidate.floor.add(base, floor_TV[some])


def _following(rows_BT: torch.Tensor) -> torch.Tensor:
    """The token after each of the packed tokens, -1 at the end of a row."""
    ends_B1 = torch.full((rows_BT.shape[0], 1), -1, dtype=rows_BT.dtype)
    return torch.cat((rows_BT[:, 1:], ends_B1), dim=1).flatten()
