"""Several models side by side: the same tokens through each, one layer of each at a time.

In: opened checkpoints, the source first, and rows of token ids. Out: for each candidate what the
watchers of this package say of its logits, hidden states, routers and weights.

    layer 0 of source, of candidate 1, of candidate 2;  layer 1 of source, of candidate 1, ...

Beside each quantized candidate runs the source with that candidate's activations (`floor`): what it
loses no better weights could win back. It costs another forward pass, and no reading.

The one idea: all models advance together, so every comparison happens while both sides are there
and nothing is stored for later: no logits, no hidden states of layers gone by, no second read of
weights. In memory are the source's layer, one candidate's and the one that is being read ahead,
however many layers or candidates there are; of each token, one hidden state for each model.

Under torchrun each process reads and holds a range of every sparse layer's experts and all of the
rest. Sums over experts are handed on in the order of experts (ADR 9), in the floor's pass too, and
all else is computed alike at every rank, so findings are to the bit those of one process.

Limits: experts are not sliced further; what is not experts is neither divided nor read only once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass

import torch
from numpy import int64
from numpy.typing import NDArray

from beamq.checkpoint import Checkpoint
from beamq.config import BeamConfig
from beamq.eval.activations_only import ActivationsOnlyGemm, with_served_inputs
from beamq.eval.alike import expect_alike, expect_same_files
from beamq.eval.divergence import CHUNK_ELEMENTS, TokenScores, score_base
from beamq.eval.estimates import ratio_of_means
from beamq.eval.findings import Findings, Gathered, of_all_ranks
from beamq.eval.footprint import stored_units
from beamq.eval.layer_error import Powers, RouteRecorder, layer_error, router_agreement
from beamq.eval.read_sums import ReadSums
from beamq.eval.weight_error import changed_tensors, weight_errors
from beamq.model.attention import SequenceLayout
from beamq.model.beam import Head, LayerWeights, head_logits
from beamq.model.exchange import exchange_for
from beamq.model.layer_stream import LayerStream, in_turns
from beamq.model.linear import Gemm, ReferenceGemm
from beamq.model.load import LayerLoader
from beamq.model.logits import BATCH_TOKENS, embed
from beamq.model.observe import Observer
from beamq.model.run import LayerPass
from beamq.model.states import Batch
from beamq.ranks import Ranks, current_ranks

HEAD_ELEMENTS = 1 << 25  # FP32 logits of one model at a time: 128 MiB


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    """How to run: activation dtype, device, and the GEMM of the candidates.

    `floor` says whether exact weights under served activations are to be run as well.
    """

    dtype: torch.dtype
    device: torch.device
    gemm: Gemm
    floor: bool = True


def run_side_by_side(
    source: Checkpoint,
    candidates: Sequence[Checkpoint],
    ids_BT: NDArray[int64],
    options: StreamOptions,
    *,
    ranks: Ranks | None = None,
    sums: Sequence[ReadSums] = (),
    on_start: Callable[[], None] = lambda: None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Findings]:
    """Findings for each candidate, the same at every rank. Rows of `ids_BT` are whole sequences.

    `ranks` are those of torchrun unless given; all must call this, and the first one's rows are
    used. `sums`, one for each candidate, look at every tensor that is read. `on_start` is called
    at the first rank when the models are known to fit each other and before work, `progress` with
    bytes of weights that were run and that will be in all. Raises `ConfigError` for a candidate
    that is another model, what loading raises (at all ranks what it raised at one), and
    `EnvironmentFault` where another rank sees other files or fails in other ways.
    """
    ranks = current_ranks() if ranks is None else ranks
    ids_BT = ranks.gather(ids_BT)[0]
    checkpoints = [source, *candidates]
    expect_same_files(checkpoints, ranks)
    with ExitStack() as stack:
        with ranks.agreeing():
            loaders = stack.enter_context(_loaders(checkpoints, options, sums))
            if ranks.first:
                on_start()
            run = _SideBySide(loaders, ids_BT, options, ranks)
        run.layers(progress)
        with ranks.agreeing():
            run.heads()
    found = [candidate.findings() for candidate in run.candidates]
    for candidate, findings in zip(run.candidates[1:], found[1:], strict=True):
        first = run.candidates[0].scores
        findings.kld_ratio = ratio_of_means(candidate.scores.kld_T, first.kld_T)
    for findings, each in zip(found, sums, strict=False):  # there may be none
        findings.damaged = each.damaged
    return found if ranks.world == 1 else of_all_ranks(ranks.gather(found))


@contextmanager
def _loaders(
    checkpoints: Sequence[Checkpoint], options: StreamOptions, sums: Sequence[ReadSums]
) -> Iterator[list[LayerLoader]]:
    """One for each model, the source's first. Raises `ConfigError` for one that is another."""
    configs = [BeamConfig.from_dict(checkpoint.config) for checkpoint in checkpoints]
    for checkpoint, config in zip(checkpoints[1:], configs[1:], strict=True):
        expect_alike(configs[0], config, checkpoint.name)
    taps = [None, *(each.tap for each in sums)] if sums else [None] * len(checkpoints)
    loaders: list[LayerLoader] = []
    try:
        for checkpoint, config, tap in zip(checkpoints, configs, taps, strict=True):
            loaders.append(
                LayerLoader(checkpoint, config, dtype=options.dtype, device=options.device, tap=tap)
            )
        yield loaders
    finally:
        for loader in loaders:
            loader.close()


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
        # Undivided: each rank has all states and choices, and says of them what one process would.
        self._exchange = exchange_for(ranks, self._config, divided=False)
        rows = max(1, BATCH_TOKENS // ids_BT.shape[1])
        self._rows = torch.from_numpy(ids_BT).split_with_sizes(_equal_parts(len(ids_BT), rows))
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
        """The source once more, with the activations of a candidate that has any quantized."""
        exact = isinstance(options.gemm, ReferenceGemm) and not options.gemm.quantize_activations
        source, candidate = (stored_units(each.checkpoint) for each in (self._loaders[0], loader))
        if exact or not options.floor or source[1] or not candidate[1]:
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
        for candidate, run in zip(self.candidates, self._passes[1:], strict=True):
            for number in range(len(self._rows)):
                if not torch.equal(self._passes[0].states.get(number), run.states.get(number)):
                    candidate.changed.append("model.embed_tokens.weight")
                    break

    def layers(self, progress: Callable[[int, int], None] | None) -> None:
        """All models through all layers, comparing behind each."""
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
                    self._compare(place, index, base, weights, base_chosen)
                    floor = self._floors[place - 1]
                    if floor is not None:
                        floor.apply(with_served_inputs(base, weights))
            if place == models - 1:
                base = None  # or it would live on while the next layer is waited for
            del weights
            if progress is not None:
                done = index * models + place + 1
                progress(total * done // (self._config.num_layers * models), total)

    def _turns(self) -> Iterator[tuple[int, int, LayerWeights]]:
        """`in_turns`. What cannot be read at one rank ends the run at all of them, by its error."""
        with closing(in_turns(self._streams)) as turns:
            while True:
                with self._ranks.agreeing():
                    turn = next(turns, None)
                if turn is None:
                    return
                yield turn
                del turn  # before the next one is asked for, or two would live

    def _compare(
        self,
        place: int,
        index: int,
        base: LayerWeights,
        weights: LayerWeights,
        base_chosen: Sequence[torch.Tensor],
    ) -> None:
        candidate = self.candidates[place - 1]
        powers = Powers()
        for number in range(len(self._rows)):
            powers.add(self._passes[0].states.get(number), self._passes[place].states.get(number))
        router = router_agreement(base_chosen, candidate.routes.take())
        candidate.layers.append(layer_error(index, powers, candidate.square, router))
        candidate.weights += weight_errors(base, weights, self._config)
        candidate.changed += changed_tensors(base, weights)

    def heads(self) -> None:
        """Logits of all models, some tokens at a time, reduced to scores at once."""
        heads = [loader.head() for loader in self._loaders]
        self._compare_heads(heads)
        step = max(1, HEAD_ELEMENTS // self._config.vocab_size)
        with torch.inference_mode():
            for number, rows in enumerate(self._rows):
                next_T = _following(rows).to(heads[0].norm.device)
                states = [run.states.get(number) for run in self._passes]
                for start in range(0, next_T.numel(), step):
                    some = slice(start, start + step)
                    logits = (
                        head_logits(h_TK[some], head, loader.config)
                        for h_TK, head, loader in zip(states, heads, self._loaders, strict=True)
                    )
                    base = list(logits)
                    floors = [
                        None
                        if floor is None
                        else head_logits(floor.states.get(number)[some], heads[0], self._config)
                        for floor in self._floors
                    ]
                    self._score(next_T[some], base, floors)

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
            for candidate, logits_TV, floor_TV in zip(
                self.candidates, logits[1:], floors, strict=True
            ):
                candidate.scores.add(base, logits_TV[some])
                if candidate.floor is not None and floor_TV is not None:
                    candidate.floor.add(base, floor_TV[some])

    def _compare_heads(self, heads: Sequence[Head]) -> None:
        for candidate, head in zip(self.candidates, heads[1:], strict=True):
            if not torch.equal(heads[0].norm, head.norm):
                candidate.changed.append("model.norm.weight")
            if not torch.equal(heads[0].output_VK, head.output_VK):
                candidate.changed.append("lm_head.weight")


def _equal_parts(count: int, most: int) -> list[int]:
    """`count` rows in parts of at most `most`."""
    whole, rest = divmod(count, most)
    return [most] * whole + [rest] * bool(rest)


def _following(rows_BT: torch.Tensor) -> torch.Tensor:
    """The token after each of the packed tokens, -1 at the end of a row."""
    ends_B1 = torch.full((rows_BT.shape[0], 1), -1, dtype=rows_BT.dtype)
    return torch.cat((rows_BT[:, 1:], ends_B1), dim=1).flatten()
