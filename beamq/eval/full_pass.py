"""The full pass of `verify`: every byte of an opened checkpoint once, filed under its checks.

In: an opened `Checkpoint`, its items, what beamq.json lists. Out: findings under `checksums.*`,
`values.*` and `source.*`, and the quantization error by role. Outcomes are filed in file order,
whichever thread of whichever rank they come from: the order of faults and the last bits of the
errors are always the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from beamq.checkpoint import Checkpoint
from beamq.checksum import shard_digest
from beamq.eval.checks import Ledger, RoleError
from beamq.eval.config_checks import FP8, NVFP4
from beamq.eval.folder import Folder
from beamq.eval.items import Item, RoleTotal
from beamq.eval.readers import Readers
from beamq.eval.sums import Listing, read_head
from beamq.eval.tensors import Examiner, Readable

_UNITS = {
    "checksums.tensors": "tensors",
    "values.block-scales": "scales",
    "values.row-scales": "scales",
    "values.codes": "codes",
    "values.finite": "tensors",
    "source.router": "tensors",
    "source.copied": "tensors",
    "source.bound": "elements",
}
_VALUES_OF = {NVFP4: ("values.block-scales",), FP8: ("values.row-scales", "values.codes")}


def make_examiner(
    opened: Checkpoint, source: Readable | None, folder: Folder, listing: Listing
) -> Examiner:
    """What looks at the items; `source` is what values are compared with."""
    listed, algorithm = listing
    checksums = {
        name: digest
        for shard in (listed or {}).values()
        for name, digest in shard["tensors"].items()
        if name in folder.tensors
    }
    return Examiner(opened, source, checksums, algorithm, folder.manifest)


def check_shards(folder: Folder, listing: Listing, ledger: Ledger) -> None:
    """Header and listed tensor checksums must add up: guards names, shapes and offsets."""
    listed, algorithm = listing
    for shard, specs in folder.shards.items():
        if listed is None or shard not in listed:
            continue
        ledger.examined("checksums.shards", 1, "shards")
        tensors = listed[shard]["tensors"]
        digests = [tensors.get(spec.name, "") for spec in specs]
        head = read_head(folder.root / shard)
        if shard_digest(head, digests, algorithm) != listed[shard]["digest"]:
            ledger.fault("checksums.shards", shard, "header or tensor list is not what was written")


def read_all(
    examiner: Examiner, items: Sequence[Item], readers: Readers, ledger: Ledger
) -> tuple[int, list[RoleError]]:
    """Returns bytes read, by all ranks together, and the quantization error by role."""
    nbytes = 0
    totals: dict[str, RoleTotal] = {}
    outcomes = readers.read(items, [item.nbytes for item in items], examiner.examine)
    for item, outcome in zip(items, outcomes, strict=True):
        nbytes += outcome.nbytes
        for name, count in outcome.examined.items():
            ledger.examined(name, count, _UNITS[name])
        for name, where, detail in outcome.faults:
            ledger.fault(name, where, detail)
        if outcome.sums.elements:
            total = totals.setdefault(item.role.role.value, RoleTotal())
            total.add(item.role.module, outcome.sums)
    formats = {item.linear.format for item in items if item.linear is not None}
    for fmt, names in _VALUES_OF.items():
        for name in names if fmt not in formats else ():
            ledger.skip(name, f"no {fmt.upper()} linears")
    return nbytes, [total.result(role) for role, total in sorted(totals.items())]
