"""By which rule a checkpoint's NVFP4 codes were made: what `source.bound` then demands of them.

In: beamq.json, if there is one; for `gptq` also source rows and what was made of them. Out: a
rule's name, and rows that are further from the source than the rule takes them.

    max      every code is the nearest for its stored scale, and nothing is clipped: a scale is what
             the block's largest value calls for. Also demanded where no recipe is known
    sweep    every code is the nearest for its stored scale, values beyond the grid have its end,
             and the scale is one of the 16 that the sweep tries
    gptq     each row's error is at most half its own size, and a linear's at most a quarter. GPTQ
             moves each value by what others' rounding costs, so no element alone can be judged;
             errors of 0.10 (linears) and 0.17 (rows) are the largest seen on trained models, and
             another row in its place gives 1.4. Values too small for the smallest scale are free.
             Also held where no recipe is known: another tool may have chosen its scales anyhow

By any of them an exchanged expert, a moved row or a wrong scale is out of bound. What stays in
bound (another candidate's scale with the codes that go with it) is caught by checksums alone, as
is any flipped bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from beamq.formats.kernels import cpu
from beamq.roles import Role

ROW_BOUND = 0.5
LINEAR_BOUND = 0.25
SMALLEST_SCALE = 2.0**-9  # a block scale is never less; what is far below it becomes 0


def rounding_rule(manifest: Mapping[str, Any] | None, role: Role) -> str:
    """The rule that beamq.json's recipe names for linears of a role.

    `gptq`, the loosest, where it names none. GPTQ rounds experts only.
    """
    recipe = (manifest or {}).get("recipe")
    if not isinstance(recipe, Mapping):
        return "gptq"
    if recipe.get("rounding") == "gptq" and role is Role.EXPERT:
        return "gptq"
    return "sweep" if recipe.get("scales") == "sweep" else "max"


class Nvfp4Bound:
    """Holds one linear against the source by a rule, some rows after others; `k` values a row."""

    def __init__(self, rule: str, k: int, global_scale: float) -> None:
        self._rule = rule
        self._k = k
        self._scale = global_scale
        self._error = self._source = self._free = 0.0
        self._far = 0
        self._rows = 0
        self._first = -1

    def compare(
        self, source: memoryview, dtype: str, codes: memoryview, scales: memoryview
    ) -> cpu.Comparison:
        """The next rows. Under `gptq` no element is out of bound; `fault` speaks of rows."""
        swept = self._rule != "max"
        found = cpu.nvfp4_compare(source, dtype, codes, scales, self._k, self._scale, swept=swept)
        if self._rule != "gptq":
            return found
        self._add_rows(source, dtype, codes, scales)
        return replace(found, out_of_bound=0, first_out_of_bound=-1)

    def _add_rows(
        self, source: memoryview, dtype: str, codes: memoryview, scales: memoryview
    ) -> None:
        shape = (codes.nbytes * 2 // self._k, self._k)
        raw = memoryview(bytearray(4 * shape[0] * shape[1]))
        cpu.nvfp4_dequantize(codes, scales, self._k, self._scale, raw, "F32")
        decoded = np.frombuffer(raw, "<f4").reshape(shape)
        if dtype != "F32":
            exact = memoryview(bytearray(raw.nbytes))
            cpu.convert(source, dtype, exact, "F32")
            source = exact
        exact_NK = np.frombuffer(source, "<f4").reshape(shape)
        error_N, source_N = _squares(decoded - exact_NK), _squares(exact_NK)
        free = self._k * (SMALLEST_SCALE * self._scale) ** 2
        # Not "beyond the bound": a NaN is beyond none.
        far_N = ~(error_N <= ROW_BOUND**2 * source_N + free)
        if far_N.any() and self._first < 0:
            self._first = self._rows + int(far_N.argmax())
        self._far += int(far_N.sum())
        self._rows += shape[0]
        self._error += float(error_N.sum())
        self._source += float(source_N.sum())
        self._free += shape[0] * free

    def fault(self) -> str | None:
        """What is wrong with the linear as a whole, if anything; only under `gptq`."""
        if self._far:
            return (
                f"{self._far} of {self._rows} rows are further from the source than GPTQ takes"
                f" them, first row {self._first}"
            )
        if not self._error <= LINEAR_BOUND**2 * self._source + self._free:
            relative = (self._error / self._source) ** 0.5 if self._source else float("inf")
            return f"its relative error is {relative:.3f}; GPTQ stays below {LINEAR_BOUND}"
        return None


def _squares(x_NK: NDArray[np.float32]) -> NDArray[np.float64]:
    """Sum over each row."""
    sums_N: NDArray[np.float64] = np.einsum("nk,nk->n", x_NK, x_NK).astype(np.float64)
    return sums_N
