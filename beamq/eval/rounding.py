"""By which rule a checkpoint's NVFP4 codes were made: what `source.bound` then demands of them.

In: beamq.json, if there is one. Out: a rule's name.

    max      every code is the nearest for its stored scale, and nothing is clipped: a scale is what
             the block's largest value calls for. Also demanded where no recipe is known
    sweep    every code is the nearest for its stored scale, values beyond the grid have its end,
             and the scale is one of the 16 that the sweep tries

Either way an exchanged expert, a moved row or a wrong scale puts most codes of a linear out of
bound. What stays in bound (another candidate's scale with the codes that go with it) is caught by
checksums alone, as is any flipped bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

RULES = ("max", "sweep")


def rounding_rule(manifest: Mapping[str, Any] | None) -> str:
    """The rule that beamq.json's recipe names; `max`, the strictest, where it names none."""
    recipe = (manifest or {}).get("recipe")
    rule = recipe.get("scales") if isinstance(recipe, Mapping) else None
    return rule if isinstance(rule, str) and rule in RULES else "max"
