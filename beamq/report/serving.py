"""What `beamq plan` says about serving: weights on each GPU, KV cache, which machines have room.

In: a `Plan`, a context length, one machine or none. Out: JSON and tables. `plan.serving` does the
arithmetic.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from beamq.beam.drafter import DrafterConfig
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
    default_context,
    fit,
    kv_cache_nbytes,
    model_weights,
    smallest_count,
)
from beamq.report.console import Block
from beamq.report.tables import LAYOUT_NAMES, LEGEND, Table, weights_per_gpu
from beamq.units import show_bytes, show_gib

LEAST_PADDING = 0.005  # a smaller share is not mentioned


class ServingView:
    """One plan's needs at one context length, and on one kind of GPU if `gpu` is given."""

    def __init__(
        self,
        plan: Plan,
        *,
        context: int | None,
        gpu: Gpu | None = None,
        count: int | None = None,
        drafter: DrafterConfig | None = None,
    ) -> None:
        config = plan.config
        self._plan = plan
        self._config = config
        self._context = context or default_context(config)
        self._gpu = gpu
        self._counts = (count,) if count else COUNTS
        self._kv_dtype = "fp8" if plan.recipe.kv_cache == "fp8" else "bf16"
        self._need = {"context": self._context, "kv_itemsize": KV_ITEMSIZE[self._kv_dtype]}
        self._source = replace(model_weights(config), drafter=drafter)
        self._output = replace(model_weights(config, plan.formats), drafter=drafter)

    def data(self) -> dict[str, Any]:
        """The key `serving` of `beamq plan --json`. All bytes; null where a split is impossible.

        context; drafter {bytes, kv_bytes (one sequence)} or null;
        kv_cache {dtype, bytes (one sequence), bytes_bf16, bytes_fp8, bytes_all_full};
        weights_per_gpu {source, output} -> {tensor, expert} -> {"1", "2", ...};
        gpus [{gpu, gpu_bytes, smallest_count, fits: [{count, layout, fits, weight_bytes,
        kv_bytes, room_bytes, sequences, max_context}]}]: bytes of one GPU, full contexts on all.
        """
        drafter = self._output.drafter
        return {
            "context": self._context,
            "drafter": drafter
            and {"bytes": drafter.nbytes, "kv_bytes": drafter.kv_cache_nbytes(self._context)},
            "kv_cache": {
                "dtype": self._kv_dtype,
                "bytes": self._kv(KV_ITEMSIZE[self._kv_dtype]),
                "bytes_bf16": self._kv(2),
                "bytes_fp8": self._kv(1),
                "bytes_all_full": kv_cache_nbytes(self._config, self._context, windowed=False),
            },
            "weights_per_gpu": {"source": self._source.split(), "output": self._output.split()},
            "allowances": {
                "usable_share": USABLE_SHARE,
                "runtime_bytes": RUNTIME_NBYTES,
                "activation_bytes": activation_nbytes(self._config),
            },
            "gpus": [
                {
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
                        for result in self._fits(gpu)
                    ],
                }
                for gpu in ([self._gpu] if self._gpu else GPUS)
            ],
        }

    def blocks(self) -> list[Block]:
        """The same as text."""
        models = {"source": self._source.split(), self._plan.recipe.name: self._output.split()}
        blocks: list[Block] = ["", weights_per_gpu(models), *self._padding(), ""]
        blocks += [self._kv_line(), *self._drafter_line(), ""]
        if self._gpu is None:
            blocks.append(self._fits_table())
        else:
            blocks += self._machine(self._gpu)
        blocks.append(
            f"Room for the KV cache: {USABLE_SHARE:.0%} of a GPU, less the weights,"
            f" {show_bytes(RUNTIME_NBYTES)} for the runtime and"
            f" {show_bytes(activation_nbytes(self._config))} for a step of {BATCHED_TOKENS:,}"
            " tokens."
        )
        if self._plan.recipe.calibrated:
            blocks.append(
                "H100 and H200 have no FP4 units. vLLM serves NVFP4 on them with 4-bit weights and"
                " BF16 activations; SGLang refuses it there and serves FP8."
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
        full, window = len(self._config.full_layers), self._config.sliding_window
        sliding = self._config.num_layers - full
        rest = f"; the other {sliding} keep {window:,} tokens each" if sliding and window else ""
        return (
            f"KV cache of one sequence of {self._context:,} tokens: {_both(self._kv(2))} in BF16,"
            f" {_both(self._kv(1))} in FP8 ({full} full layers{rest})."
        )

    def _drafter_line(self) -> list[Block]:
        drafter = self._output.drafter
        if drafter is None:
            return []
        return [
            f"Drafter: {show_bytes(drafter.nbytes)} of disk and, whole, of every GPU;"
            f" {show_bytes(drafter.kv_cache_nbytes(self._context))} of BF16 KV cache for a"
            " sequence. All figures of GPUs here include it."
        ]

    def _padding(self) -> list[Block]:
        """A line on the padding of NVFP4 experts, where it makes them larger than an even share."""
        possible = [n for n, held in self._output.split()["tensor"].items() if held is not None]
        worst = max(possible, key=self._output.expert_padding, default=1)
        if (padding := self._output.expert_padding(worst)) < LEAST_PADDING:
            return []
        return [
            f"With TP, engines pad the width of NVFP4 experts to a multiple of {NVFP4_EXPERT_STEP}"
            f" on each GPU: {padding:.0%} more than an even share on {worst} GPUs."
        ]

    def _fits_table(self) -> Table:
        rows = []
        for gpu in GPUS:
            best = (best_fit(self._output, gpu, count, **self._need) for count in COUNTS)
            fewest = (self._smallest(gpu, weights) for weights in (self._output, self._source))
            rows.append((gpu.label, *map(_sequences, best), *(str(n or "-") for n in fewest)))
        return Table(
            title=f"Sequences of {self._context:,} tokens that fit with the weights (e: with EP)",
            head=("", *(f"x{count}" for count in COUNTS), "fewest", "source"),
            align="lr",
            rows=rows,
        )

    def _machine(self, gpu: Gpu) -> list[Block]:
        """The table for `--gpu`: each count and layout, in full."""
        rows = [
            (
                f"{result.count}",
                LAYOUT_NAMES[result.layout],
                show_bytes(result.weight_nbytes),
                show_bytes(result.room_nbytes),
                show_bytes(result.kv_nbytes),
                f"{result.sequences:,}" if result.fits else "does not fit",
                f"{result.max_context:,}",
            )
            for result in self._fits(gpu)
        ]
        least = self._smallest(gpu, self._output)
        verdict = f"Fewest {gpu.label} with room for one full context: {least or 'more than 16'}."
        if not rows:
            return [f"This model cannot be divided over {self._counts[0]} GPUs.", verdict]
        table = Table(
            title=f"Each {gpu.label} ({LEGEND})",
            head=("GPUs", "", "weights", "room", "KV", "sequences", "longest"),
            align="rlr",
            rows=rows,
        )
        return [table, verdict]

    def _fits(self, gpu: Gpu) -> list[Fit]:
        return [
            result
            for count in self._counts
            for layout in (LAYOUTS if count > 1 else LAYOUTS[:1])
            if (result := fit(self._output, gpu, count, layout, **self._need))
        ]

    def _smallest(self, gpu: Gpu, weights: Weights) -> int | None:
        return smallest_count(weights, gpu, **self._need)


def _sequences(result: Fit | None) -> str:
    if result is None or not result.fits:
        return "-"
    return f"{result.sequences:,}{' e' if result.layout == 'expert' else ''}"


def _both(nbytes: int) -> str:
    """Decimal as everywhere here, and binary, as KV caches are usually given."""
    return f"{show_bytes(nbytes)} ({show_gib(nbytes)})"
