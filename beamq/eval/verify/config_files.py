"""What the config files declare, checked against what the engines need and what is stored.

In: a `Folder`. Out: findings under `config.*` and `engine.*`.

Do the files have the form that vLLM 0.33, SGLang 0.5.23 and transformers read in the same way? And
would each engine, by its own rules (engine_rules.py), build as quantized exactly the modules that
have scales? The second question decides; the first names the cause when the answer is no.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from beamq.errors import shown_value
from beamq.eval.verify.checks import ENGINES, FP8, NEEDS_QUANTIZED, NVFP4, Ledger
from beamq.eval.verify.engine_rules import (
    WEIGHT_ONLY,
    Block,
    EngineRefusal,
    equal_or_regex,
    is_names,
)
from beamq.eval.verify.engine_views import mismatches, simulate
from beamq.eval.verify.folder import HF_QUANT_NAME, Folder
from beamq.plan.layout import (
    ALGOS,
    CT_ARGUMENTS,
    NVFP4_BLOCK,
    SCHEMES,
    declared_scheme,
    said_format,
)

UNDECLARED = "undeclared"
PLAIN = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}  # by config.json's dtype

_FOUR_BITS = {"num_bits": 4, "type": "float", "group_size": NVFP4_BLOCK, "dynamic": False}
_WRITTEN_BY_THEM = ("transform_config", "sparsity_config")  # empty, by llm-compressor
_KV_CACHE = {"num_bits": 8, "type": "float", "dynamic": False}


def declared_format(folder: Folder, ledger: Ledger) -> str:
    """A key of `layout.SCHEMES` as the config files say; `bf16`, `fp16` or `fp32` if nothing is
    quantized.

    `undeclared`, with a fault, otherwise.
    """
    if folder.plain:
        ledger.skip("not quantized", *NEEDS_QUANTIZED)
        return PLAIN.get(str(plain_dtype(folder)), "bf16")
    ledger.examined("config.declared")
    block = folder.block
    if block is None:
        fmt = UNDECLARED
        problem = "has no quantization_config, so engines load it unquantized"
        if isinstance((folder.hf_quant_config or {}).get("quantization"), Mapping):
            fmt, missing = NVFP4, "has no quantization_config"
            problem = (
                f"{missing}, and SGLang's Beam does not read {HF_QUANT_NAME} alone; write both"
            )
    else:
        method = str(block.get("quant_method", "")).lower()
        if (scheme := declared_scheme(block)) is not None:
            return scheme
        known = {"compressed-tensors": FP8, "modelopt": NVFP4, "modelopt_fp4": NVFP4}
        fmt = known.get(method, UNDECLARED)
        problem = (
            f"quant_method is {method!r} with {said_format(block)!r}; all engines load only"
            " ModelOpt NVFP4 and compressed-tensors float-quantized"
        )
    ledger.fault("config.declared", "config.json", problem)
    return fmt


def plain_dtype(folder: Folder) -> Any:
    """The dtype in config.json, under its current key or the older one."""
    return folder.raw_config.get("dtype", folder.raw_config.get("torch_dtype"))


def check_config(folder: Folder, fmt: str, ledger: Ledger) -> None:
    """Everything under `config.*` but the declaration itself and the ignore list."""
    ledger.examined("config.dtype")
    if not folder.plain or not folder.any_float:
        ledger.expect("config.dtype", "dtype", folder.raw_config.get("dtype"), "bfloat16")
    elif (dtype := plain_dtype(folder)) not in PLAIN:
        ledger.fault("config.dtype", "dtype", f"is {dtype!r}, expected one of {', '.join(PLAIN)}")
    if fmt == UNDECLARED:
        ledger.skip("no format is declared", "config.fields", "config.agreement", "config.schema")
    if fmt not in SCHEMES:
        return
    block = folder.block or {}
    files = 2 if SCHEMES[fmt].modelopt else 1
    ledger.examined("config.fields", files)
    ledger.examined("config.agreement", files)
    key = SCHEMES[fmt].ignore_key
    ignore = block.get(key)
    if not is_names(ignore) or "" in ignore:
        ledger.fault("config.fields", f"quantization_config.{key}", "must be a list of names")
    if block.get("kv_cache_scheme") is not None:
        _compare(block["kv_cache_scheme"], _KV_CACHE, "kv_cache_scheme", ledger)
    if SCHEMES[fmt].modelopt:
        _check_modelopt(folder, fmt, block, ledger)
        return
    if (folder.root / HF_QUANT_NAME).exists():
        reason = f"belongs to ModelOpt, but config.json declares {SCHEMES[fmt].method}; delete it"
        ledger.fault("config.agreement", HF_QUANT_NAME, reason)
    if fmt == "fp8-block":
        ledger.skip("this form has no schema class; config.fields covers it", "config.schema")
        scheme = block.get("activation_scheme")
        ledger.expect("config.fields", "activation_scheme", scheme, "dynamic")
    else:
        _check_compressed_tensors(fmt, block, ledger)


def _check_modelopt(folder: Folder, scheme: str, block: Block, ledger: Ledger) -> None:
    ledger.skip("ModelOpt has no schema class; config.fields covers it", "config.schema")
    block_size = block.get("group_size", NVFP4_BLOCK)
    ledger.expect("config.fields", "group_size", block_size, NVFP4_BLOCK)
    if scheme != NVFP4:
        _check_layers(block, ledger)
    elif block.get("config_groups") is not None:
        for name, group in _groups(block, _FOUR_BITS, _FOUR_BITS, ledger):
            ledger.expect("config.fields", f"{name}.targets", group.get("targets"), ["Linear"])
    hf = folder.hf_quant_config
    if hf is None:
        if not ledger.failed("config.agreement"):
            ledger.fault("config.agreement", HF_QUANT_NAME, "is missing; write both files")
        return
    nested, producer = hf.get("quantization"), hf.get("producer")
    if not isinstance(nested, Mapping):
        ledger.fault("config.fields", HF_QUANT_NAME, "has no `quantization` object", soft=True)
        return
    maker = producer.get("name") if isinstance(producer, Mapping) else None
    if not str(maker).startswith("modelopt"):
        reason = f"producer.name is {maker!r}, not modelopt"
        ledger.fault("config.fields", HF_QUANT_NAME, reason, soft=True)  # config.json wins
    for key in ("quant_algo", "kv_cache_quant_algo", "group_size", "exclude_modules"):
        if key not in nested:
            reason = f"quantization.{key} is missing"
            ledger.fault("config.fields", HF_QUANT_NAME, reason, soft=True)
    _check_agreement(block, nested, ledger)


def _check_layers(block: Block, ledger: Ledger) -> None:
    """What a mixed checkpoint says of each layer; `engine.vllm` compares it with what is stored."""
    layers = block.get("quantized_layers")
    if not isinstance(layers, Mapping) or not layers:
        reason = "is missing, and vLLM takes each layer's algorithm from it"
        ledger.fault("config.fields", "quantized_layers", reason)
        return
    for name, each in layers.items():
        if each not in ALGOS.values():
            expected = " or ".join(str(algo) for algo in ALGOS.values())
            reason = f"is {shown_value(each)}, expected {expected}"
            ledger.fault("config.fields", f"quantized_layers.{str(name)[:80]}", reason)


def _groups(
    block: Block, weights: Block, activations: Block, ledger: Ledger
) -> Iterator[tuple[str, Block]]:
    """The config groups by name, with weights and activations checked."""
    check, groups = "config.fields", block.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        ledger.fault(check, "config_groups", "is empty or not an object")
        return
    for name, group in groups.items():
        if not isinstance(group, Mapping):
            ledger.fault(check, f"config_groups.{name}", "is not an object")
            continue
        yield name, group
        _compare(group.get("weights"), weights, f"{name}.weights", ledger)
        where = f"{name}.input_activations"
        if group.get("input_activations") is None:
            ledger.fault(check, where, "is missing, so vLLM would quantize weights only")
        else:
            _compare(group["input_activations"], activations, where, ledger)


def _check_agreement(block: Block, nested: Block, ledger: Ledger) -> None:
    wanted = {
        "quant_algo": block.get("quant_algo"),
        "group_size": NVFP4_BLOCK,
        "kv_cache_quant_algo": "FP8" if block.get("kv_cache_scheme") else None,
        "quantized_layers": block.get("quantized_layers"),
    }
    for key, ours in wanted.items():
        if ours != (theirs := nested.get(key)):
            reason = f"config.json says {shown_value(ours)}, {HF_QUANT_NAME} {shown_value(theirs)}"
            ledger.fault("config.agreement", key, reason)
    ignored, excluded = (
        set(map(str, entries)) if isinstance(entries, list) else set()
        for entries in (block.get("ignore"), nested.get("exclude_modules"))
    )
    for entry in sorted(ignored ^ excluded):
        where = "config.json" if entry in ignored else HF_QUANT_NAME
        ledger.fault("config.agreement", entry, f"is ignored in {where} only")


def _compare(given: Any, wanted: Block, where: str, ledger: Ledger) -> None:
    if not isinstance(given, Mapping):
        ledger.fault("config.fields", where, "is missing or not an object")
        return
    for key, value in wanted.items():
        ledger.expect("config.fields", f"{where}.{key}", given.get(key), value)


def _check_compressed_tensors(scheme: str, block: Block, ledger: Ledger) -> None:
    wanted = SCHEMES[scheme].what
    if scheme == "fp8" or block.get("format") != "float-quantized":  # vLLM takes MXFP8 under both
        ledger.expect("config.fields", "format", block.get("format"), wanted)
    status = block.get("quantization_status")
    ledger.expect("config.fields", "quantization_status", status, "compressed")
    for name, group in _groups(block, *CT_ARGUMENTS[scheme], ledger):
        if not is_names(group.get("targets")):
            ledger.fault("config.fields", f"{name}.targets", "is not a list of names")
        if group.get("format") is not None:
            ledger.expect("config.fields", f"{name}.format", group["format"], block.get("format"))
    _check_schema(block, ledger)


def _check_schema(block: Block, ledger: Ledger) -> None:
    """Read the block with compressed-tensors' own class; nothing may be lost or changed."""
    try:  # takes seconds to import, and is needed here only
        from compressed_tensors.quantization import QuantizationConfig
    except ImportError:
        ledger.skip("compressed-tensors is not installed", "config.schema")
        return
    ledger.examined("config.schema")
    try:
        parsed = QuantizationConfig.model_validate(dict(block)).model_dump(mode="json")
    except Exception as fault:  # whatever their validators raise, it is their refusal
        ledger.fault("config.schema", "quantization_config", " ".join(str(fault).split())[:160])
        return
    given = {key: value for key, value in block.items() if value or key not in _WRITTEN_BY_THEM}
    given.pop("version", None)
    for path, ours, theirs in _changed(given, parsed, ""):
        reason = f"is {ours!r}, but reads back as {theirs!r}"
        ledger.fault("config.schema", path, reason, soft=True)


def _changed(ours: Any, theirs: Any, path: str) -> list[tuple[str, Any, Any]]:
    """Every leaf of `ours` whose value differs in `theirs`; defaults it adds don't count."""
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        return [
            change
            for key, value in ours.items()
            for change in _changed(value, theirs.get(key), f"{path}.{key}".lstrip("."))
        ]
    return [] if ours == theirs else [(path, ours, theirs)]


def check_ignore_covers(
    folder: Folder, fmt: str, stored: Mapping[str, str], ledger: Ledger
) -> None:
    """Every unquantized linear, router and head must be listed, for readers that use only the
    list; vLLM and SGLang would leave routers alone without an entry."""
    key = SCHEMES[fmt].ignore_key if fmt in SCHEMES else "ignore"
    entries = (folder.block or {}).get(key)
    if not isinstance(entries, list) or fmt == UNDECLARED:
        ledger.skip("no ignore list; see config.fields", "config.ignore")
        return
    exact = {entry for entry in entries if isinstance(entry, str)}
    patterns = [entry for entry in exact if entry.startswith("re:") or set(entry) & set("*?[")]
    routers = {f"model.layers.{i}.mlp.gate": "" for i in folder.beam.sparse_layers}
    for module, quantized in {**stored, **routers}.items():
        if quantized or (module == "model.embed_tokens" and not SCHEMES[fmt].modelopt):
            continue  # compressed-tensors' targets name Linear, which embeddings are not
        ledger.examined("config.ignore")
        if module not in exact and not any(_matches(pattern, module) for pattern in patterns):
            ledger.fault("config.ignore", module, "is stored unquantized, but is not listed")


def _matches(pattern: str, module: str) -> bool:
    """By a list's plain meaning: `re:` patterns, else shell globs."""
    if not pattern.startswith("re:"):
        return fnmatchcase(module, pattern)
    try:
        return equal_or_regex(module, pattern)
    except EngineRefusal:
        return False  # the engine checks report it


def check_engines(
    folder: Folder, scheme: str, stored: Mapping[str, str], asked: str | None, ledger: Ledger
) -> None:
    """Compare what each engine would build as quantized with what has scales.

    That an engine refuses every folder of the scheme is a fault only where it was `asked` for.
    """
    refusals = SCHEMES[scheme].refusals if scheme in SCHEMES else {}
    for engine, why in refusals.items():
        ledger.refused.add(engine)
        if engine.lower() == asked:
            ledger.fault(ENGINES[engine], "config.json", f"{engine}: {why}")
        else:
            ledger.skip(why, ENGINES[engine])
    for view in simulate(folder.block, folder.hf_quant_config, folder.beam):
        name = f"engine.{view.engine}"
        if name in {ENGINES[engine] for engine in refusals}:
            continue
        ledger.examined(name, len(view.sites))
        for fault in view.faults:
            reason = str(fault).removeprefix("unknown: ")
            if fault.kind == "unknown" and ledger.strangers:
                ledger.skip(reason, name)
            else:
                ledger.fault(name, fault.where, reason)
        if view.scheme == f"nvfp4{WEIGHT_ONLY}":
            ledger.fault(name, "config_groups", "would be served weight-only (W4A16), not W4A4")
        for mismatch in mismatches(view, stored):
            reason = f"built {mismatch.built}, stored {mismatch.stored}: {mismatch.effect}"
            ledger.fault(name, mismatch.prefix, reason)
