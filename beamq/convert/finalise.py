"""Turn a folder of finished shards into a checkpoint: configs, index, card, manifest.

In: the plan, the journal's records, the source folder. Out: every file a loader or the Hub looks
for. Order matters: what makes a folder loadable (index, config.json) comes after all it names,
and `beamq.json`, the mark of a whole conversion, comes last.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from beamq.adapter.record import recorded_adapter
from beamq.convert.input_scales import InputScaleProvider
from beamq.io.checkpoint import Checkpoint
from beamq.io.hub import names_a_path
from beamq.io.journal import ShardRecord
from beamq.io.manifest import ListedShard, Manifest
from beamq.io.shard_writer import copy_file, write_file, write_json
from beamq.io.source import INDEX_NAME
from beamq.plan.layout import SCHEMES, hf_quant_config, quantization_config
from beamq.plan.plan import Plan, Work
from beamq.report.model_card import Origin, model_card, trace_origin

RECORDED_PACKAGES = ("torch", "safetensors", "transformers", "nvidia-modelopt", "llmcompressor")


def finalise(
    plan: Plan,
    source: Checkpoint,
    output: Path,
    scales: InputScaleProvider,
    records: Mapping[str, ShardRecord],
    *,
    base_model: str | None,
) -> Manifest:
    """Write everything but the shards. Raises `DiskError`.

    `base_model` is the id on the Hub that the card names, where the source does not tell.
    """
    known = scales.known
    origin = trace_origin(source, plan.source_fingerprint, base_model)
    recipe = plan.recipe
    block = quantization_config(recipe.format, list(plan.ignore), recipe.kv_cache, plan.formats)
    for companion in plan.companions:
        copy_file(source.source.path(companion.source), output, companion.target)
    for name, text in known.files.items():
        write_file(output / name, text.encode())
    counts = _total_counts(plan, records)
    write_file(output / "README.md", model_card(plan, origin, known.record, counts).encode())
    write_json(output / INDEX_NAME, build_index(plan))
    if SCHEMES[recipe.format].modelopt:
        write_json(output / "hf_quant_config.json", hf_quant_config(block))
    write_json(output / "config.json", output_config(source.config, block))
    return Manifest.write(
        output,
        manifest_content(plan, records, known.record, origin, recorded_adapter(source)),
        listed_shards(plan, records),
        [*(companion.target for companion in plan.companions), *known.files],
    )


def output_config(
    source_config: Mapping[str, Any], block: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The source's config.json, verbatim but for `dtype` and `quantization_config`, and without a
    path of the machine on which it was trained."""
    dropped = ["quantization_config", "torch_dtype"]
    if names_a_path(source_config.get("_name_or_path")):
        dropped.append("_name_or_path")
    config = {key: value for key, value in source_config.items() if key not in dropped}
    return config | {"dtype": "bfloat16"} | ({"quantization_config": dict(block)} if block else {})


def build_index(plan: Work) -> dict[str, Any]:
    """`model.safetensors.index.json`: totals, and the shard of every tensor, sorted by name."""
    weight_map = {tensor.name: shard.name for shard in plan.shards for tensor in shard.tensors}
    return {
        "metadata": {"total_parameters": plan.total_parameters, "total_size": plan.tensor_nbytes},
        "weight_map": dict(sorted(weight_map.items())),
    }


def manifest_content(
    plan: Plan,
    records: Mapping[str, ShardRecord],
    input_scales: Mapping[str, Any],
    origin: Origin,
    adapter: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """`beamq.json` without its checksums: what made this folder, and from what."""
    return {
        "recipe": plan.recipe.to_dict(),
        "digests": {
            "plan": plan.digest(),
            "recipe": plan.recipe.digest(),
            "source": plan.source_fingerprint,
        },
        "source": origin.record(),
        **({} if adapter is None else {"adapter": dict(adapter)}),
        "input_scales": dict(input_scales),
        "totals": {
            "parameters": plan.total_parameters,
            "quantized_parameters": plan.quantized_parameters,
            "source_bytes": plan.source_nbytes,
            "tensor_bytes": plan.tensor_nbytes,
            "bits_per_weight": round(plan.bits_per_weight, 4),
        },
        "counts": _total_counts(plan, records),
        "notes": list(plan.notes),
        "dropped": [{"tensor": name, "reason": reason} for name, reason in plan.dropped],
        "versions": {"python": platform.python_version(), **_versions()},
    }


def listed_shards(work: Work, records: Mapping[str, ShardRecord]) -> list[ListedShard]:
    """The shards as `beamq.json` lists them, from the journal's checksums."""
    found = [(shard, records[shard.name]) for shard in work.shards]
    return [ListedShard.of(s, r.tensors, r.sources, r.source_counts) for s, r in found]


def _total_counts(plan: Plan, records: Mapping[str, ShardRecord]) -> dict[str, Any]:
    """Sums over shards; lists (names of all-zero groups) in plan order."""
    totals: dict[str, Any] = {}
    for shard in plan.shards:
        for key, value in records[shard.name].counts.items():
            totals[key] = totals[key] + value if key in totals else value
    return totals


def _versions() -> dict[str, str]:
    """Versions of the packages that matter, read from their metadata without importing them."""
    found: dict[str, str] = {}
    for name in RECORDED_PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found
