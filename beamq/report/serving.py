"""What `beamq plan` says about serving: weights on each GPU, KV cache, which machines have room.

In: a `Plan`, a context length, one machine or none. Out: JSON and tables. All arithmetic is that of
`plan.serving`.
"""

from __future__ import annotations

from typing import Any

from beamq.beam.config import BeamConfig
from beamq.plan.plan import Plan
from beamq.plan.serving import (
    BATCHED_TOKENS,
    COUNTS,
    GPUS,
    KV_ITEMSIZE,
    LAYOUTS,
    NVFP4_EXPERT_STEP,
    RUNTIME_NBYTES,
    USABLE_SHARE,
    Fit,
    Gpu,
    Weights,
    activation_nbytes,
    best_fit,
    fit,
    kv_cache_nbytes,
    model_weights,
    smallest_count,
)
from beamq.report.console import Block
from beamq.report.tables import LAYOUT_NAMES, LEGEND, Table, weights_per_gpu
from beamq.units import show_bytes, show_gib

DEFAULT_CONTEXT = 131_072
LEAST_PADDING = 0.005  # a smaller share is not mentioned


class ServingView:
    """One plan's needs at one context length, and on one kind of GPU if `gpu` is given."""

    def __init__(
        self, plan: Plan, *, context: int | None, gpu: Gpu | None = None, count: int | None = None
    ) -> None:
        config = plan.config
        self._plan = plan
        self._config = config
        self._context = context or default_context(config)
        self._gpu = gpu
        self._count = count
        self._kv_dtype = "fp8" if plan.recipe.kv_cache == "fp8" else "bf16"
        self._itemsize = KV_ITEMSIZE[self._kv_dtype]
        self._source = model_weights(config)
        self._output = model_weights(config, plan.recipe.format, plan.units)

    def data(self) -> dict[str, Any]:
        """The key `serving` of `beamq plan --json`. All bytes; null where a split is impossible.

        context; kv_cache {dtype, bytes (one sequence), bytes_bf16, bytes_fp8, bytes_all_full};
        weights_per_gpu {source, output} -> {tensor, expert} -> {"1", "2", ...};
        gpus [{gpu, gpu_bytes, smallest_count, fits: [{count, layout, fits, weight_bytes,
        kv_bytes, room_bytes, sequences, max_context}]}]: bytes of one GPU, full contexts on all.
        """
        gpus = [self._gpu] if self._gpu else GPUS
        return {
            "context": self._context,
            "kv_cache": {
                "dtype": self._kv_dtype,
                "bytes": self._kv(self._itemsize),
                "bytes_bf16": self._kv(2),
                "bytes_fp8": self._kv(1),
                "bytes_all_full": kv_cache_nbytes(self._config, self._context, windowed=False),
            },
            "weights_per_gpu": {
                name: {
                    layout: {str(count): weights.per_gpu(layout, count) for count in COUNTS}
                    for layout in LAYOUTS
                }
                for name, weights in (("source", self._source), ("output", self._output))
            },
            "allowances": {
                "usable_share": USABLE_SHARE,
                "runtime_bytes": RUNTIME_NBYTES,
                "activation_bytes": activation_nbytes(self._config),
            },
            "gpus": [self._gpu_data(gpu) for gpu in gpus],
        }

    def _gpu_data(self, gpu: Gpu) -> dict[str, Any]:
        counts = [self._count] if self._count else COUNTS
        found = [result for count in counts for result in self._fits(gpu, count)]
        return {
            "gpu": gpu.name,
            "gpu_bytes": gpu.nbytes,
            "smallest_count": self._smallest(gpu, self._output),
            "smallest_count_source": self._smallest(gpu, self._source),
            "fits": [
                {
                    "count": result.count,
                    "layout": result.layout,
                    "fits": result.fits,
                    "weight_bytes": result.weight_nbytes,
                    "kv_bytes": result.kv_nbytes,
                    "room_bytes": result.room_nbytes,
                    "sequences": result.sequences,
                    "max_context": result.max_context,
                }
                for result in found
            ],
        }

    def blocks(self) -> list[Block]:
        """The same as text."""
        blocks: list[Block] = ["", self._weights_table(), *self._padding(), "", self._kv_line(), ""]
        if self._gpu is None:
            blocks.append(self._fits_table())
        else:
            blocks += self._machine(self._gpu)
        blocks.append(
            f"Room is {USABLE_SHARE:.0%} of a GPU, less weights,"
            f" {show_bytes(RUNTIME_NBYTES)} for the runtime and"
            f" {show_bytes(activation_nbytes(self._config))} for a step of {BATCHED_TOKENS:,}"
            " tokens."
        )
        if self._plan.recipe.format == "nvfp4":
            blocks.append(
                "H100 and H200 have no FP4 units: SGLang refuses NVFP4 there. Serve FP8 on them."
            )
        if self._context > self._config.max_position_embeddings:
            blocks.append(
                f"Note: --context {self._context:,} is more than the model's"
                f" {self._config.max_position_embeddings:,}."
            )
        return blocks

    def _kv(self, itemsize: int) -> int:
        return kv_cache_nbytes(self._config, self._context, itemsize=itemsize)

    def _kv_line(self) -> str:
        full = len(self._config.full_layers)
        return (
            f"KV cache of one sequence of {self._context:,} tokens: {_both(self._kv(2))} in BF16,"
            f" {_both(self._kv(1))} in FP8 ({full} full layers; the other"
            f" {self._config.num_layers - full} keep {self._config.sliding_window:,} tokens each)."
        )

    def _padding(self) -> list[Block]:
        """A line on the padding of NVFP4 experts, where it makes them larger than an even share."""
        padded = {count: self._output.expert_padding(count) for count in COUNTS}
        worst = max(
            (count for count in COUNTS if self._output.per_gpu("tensor", count) is not None),
            key=lambda count: padded[count],
            default=1,
        )
        if padded[worst] < LEAST_PADDING:
            return []
        return [
            f"With TP, engines pad the width of NVFP4 experts to a multiple of {NVFP4_EXPERT_STEP}"
            f" on each GPU: {padded[worst]:.0%} more than an even share on {worst} GPUs."
        ]

    def _weights_table(self) -> Table:
        models = {
            name: {layout: {n: weights.per_gpu(layout, n) for n in COUNTS} for layout in LAYOUTS}
            for name, weights in (("source", self._source), (self._plan.recipe.name, self._output))
        }
        return weights_per_gpu(models)

    def _fits_table(self) -> Table:
        rows = []
        for gpu in GPUS:
            best = (
                best_fit(
                    self._output, gpu, count, context=self._context, kv_itemsize=self._itemsize
                )
                for count in COUNTS
            )
            cells = map(_sequences, best)
            least, before = self._smallest(gpu, self._output), self._smallest(gpu, self._source)
            rows.append((gpu.label, *cells, _or_dash(least), _or_dash(before)))
        return Table(
            title=f"Sequences of {self._context:,} tokens that fit with the weights (e: with EP)",
            head=("", *(f"x{count}" for count in COUNTS), "fewest", "source"),
            align="lr",
            rows=rows,
        )

    def _machine(self, gpu: Gpu) -> list[Block]:
        """The table for `--gpu`: each count and layout, in full."""
        rows = []
        for count in [self._count] if self._count else COUNTS:
            for result in self._fits(gpu, count):
                rows.append(
                    (
                        f"{count}",
                        LAYOUT_NAMES[result.layout],
                        show_bytes(result.weight_nbytes),
                        show_bytes(result.room_nbytes),
                        show_bytes(result.kv_nbytes),
                        f"{result.sequences:,}" if result.fits else "does not fit",
                        f"{result.max_context:,}",
                    )
                )
        least = self._smallest(gpu, self._output)
        verdict = f"Fewest {gpu.label} with room for one full context: {least or 'more than 16'}."
        if not rows:
            return [f"This model cannot be divided over {self._count} GPUs.", verdict]
        table = Table(
            title=f"Each {gpu.label} ({LEGEND})",
            head=("GPUs", "", "weights", "room", "KV", "sequences", "longest"),
            align="rlr",
            rows=rows,
        )
        return [table, verdict]

    def _fits(self, gpu: Gpu, count: int) -> list[Fit]:
        found = (
            fit(self._output, gpu, count, layout, context=self._context, kv_itemsize=self._itemsize)
            for layout in (LAYOUTS if count > 1 else LAYOUTS[:1])
        )
        return [result for result in found if result is not None]

    def _smallest(self, gpu: Gpu, weights: Weights) -> int | None:
        return smallest_count(weights, gpu, context=self._context, kv_itemsize=self._itemsize)


def default_context(config: BeamConfig) -> int:
    """128 Ki tokens, or what the model allows if that is less."""
    return min(DEFAULT_CONTEXT, config.max_position_embeddings)


def _sequences(result: Fit | None) -> str:
    if result is None or not result.fits:
        return "-"
    return f"{result.sequences:,}{' e' if result.layout == 'expert' else ''}"


def _both(nbytes: int) -> str:
    """Decimal as everywhere here, and binary, as KV caches are usually given."""
    return f"{show_bytes(nbytes)} ({show_gib(nbytes)})"


def _or_dash(count: int | None) -> str:
    return "-" if count is None else str(count)
