"""What a full pass over a checkpoint has to look at, and what looking at one thing showed.

In: an `Inventory` and where each tensor lies in the source. Out: `Item` records in file order (one
quantized linear with its scales, or one tensor stored as it is), and the `Outcome` of each, small
enough to be handed from rank to rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from beamq.eval.checks import RoleError
from beamq.eval.structure import Inventory, Linear
from beamq.formats.kernels import cpu
from beamq.formats.layout import quantized_tensors
from beamq.header import TensorSpec
from beamq.roles import Role, TensorRole
from beamq.sources import SourceRange


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A quantized linear (`linear`), or one tensor stored as it is (`spec`)."""

    role: TensorRole
    spec: TensorSpec
    linear: Linear | None = None
    source: SourceRange | None = None

    @property
    def nbytes(self) -> int:
        """Bytes to read, source included."""
        parts = self.linear.parts.values() if self.linear else (self.spec,)
        return sum(p.nbytes for p in parts) + (self.source.nbytes if self.source else 0)

    @property
    def place(self) -> tuple[str, int, int]:
        """File, offset there, and `nbytes`."""
        return self.spec.file, self.spec.offset, self.nbytes


@dataclass(slots=True, kw_only=True)
class Sums:
    """Squared error and source, to be added up."""

    error: float = 0.0
    source: float = 0.0
    worst: float = 0.0
    elements: int = 0

    @property
    def relative_rms(self) -> float:
        """RMS of the error over RMS of the source; 0 for an all-zero source decoded to zeros."""
        return math.sqrt(self.error / self.source) if self.source else math.sqrt(self.error)

    def add(self, found: cpu.Comparison, elements: int) -> None:
        """Add one piece."""
        self.error += found.sum_sq_error
        self.source += found.sum_sq_source
        self.worst = max(self.worst, found.max_abs_error)
        self.elements += elements


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What one item showed. `faults` are (check, where, detail); `examined` counts per check."""

    faults: list[tuple[str, str, str]] = field(default_factory=list)
    examined: dict[str, int] = field(default_factory=dict)
    sums: Sums = field(default_factory=Sums)
    nbytes: int = 0
    out_of_bound: int = 0
    first_place: tuple[int, int] = (-1, -1)

    def fault(self, check: str, where: str, detail: str) -> None:
        """File one fault."""
        self.faults.append((check, where, detail))

    def compared(self, found: cpu.Comparison, row: int, rows: int, k: int) -> None:
        """Add one piece of rows that was compared with the source."""
        if found.out_of_bound and not self.out_of_bound:
            down, column = divmod(found.first_out_of_bound, k)
            self.first_place = (row + down, column)
        self.out_of_bound += found.out_of_bound
        self.sums.add(found, rows * k)


@dataclass(slots=True)
class RoleTotal:
    """Sums over the linears of a role, and the worst of them."""

    sums: Sums = field(default_factory=Sums)
    linears: int = 0
    worst: str = ""
    worst_relative: float = -1.0

    def add(self, module: str, found: Sums) -> None:
        """Add one linear. The order of calls shows in the last bits."""
        self.linears += 1
        self.sums.error += found.error
        self.sums.source += found.source
        self.sums.worst = max(self.sums.worst, found.worst)
        self.sums.elements += found.elements
        key = (found.relative_rms, module)  # ties are broken by name
        if key > (self.worst_relative, self.worst):
            self.worst_relative, self.worst = key

    def result(self, role: str) -> RoleError:
        """The error of the role."""
        return RoleError(
            role=role,
            linears=self.linears,
            elements=self.sums.elements,
            relative_rms=self.sums.relative_rms,
            worst_linear=self.worst,
            worst_relative_rms=self.worst_relative,
            max_abs_error=self.sums.worst,
        )


def plan_items(inventory: Inventory, sources: Mapping[str, SourceRange]) -> list[Item]:
    """Work items in file order. `sources` maps the output's weight names to source ranges."""
    items: list[Item] = []
    for linear in inventory.linears:
        if linear.quantized and is_sound(linear):
            items.append(_item(linear.role, linear.parts["weight"], sources, linear))
        else:
            # A linear whose parts do not fit each other is still read, part by part.
            for spec in linear.parts.values():
                own = sources if not linear.quantized else {}
                items.append(_item(linear.role, spec, own))
    items += [_item(role, spec, sources) for role, spec in inventory.precise]
    extra = Role.EXTRA
    for spec in inventory.unknown:
        role = TensorRole(name=spec.name, role=extra, module=spec.name, proj="")
        items.append(_item(role, spec, sources))
    return sorted(items, key=lambda item: (item.spec.file, item.spec.offset))


def _item(
    role: TensorRole,
    spec: TensorSpec,
    sources: Mapping[str, SourceRange],
    linear: Linear | None = None,
) -> Item:
    source = sources.get(spec.name)
    shape = linear.shape if linear else spec.shape
    if source is not None and source.shape != shape:
        source = None  # already a finding of the structure checks
    return Item(role=role, spec=spec, linear=linear, source=source)


def is_sound(linear: Linear) -> bool:
    """Whether all parts of a quantized linear are there and fit each other."""
    wanted = quantized_tensors(linear.module, linear.format, *linear.shape)
    if len(wanted) != len(linear.parts):
        return False
    for name, dtype, shape in wanted:
        part = linear.parts.get(name.rpartition(".")[2])
        if part is None or part.dtype != dtype or part.shape != shape:
            return False
    return True
