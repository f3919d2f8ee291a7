"""What is odd about a checkpoint: one sentence for each thing worth knowing, none if all is usual.

In: headers, small JSON files and the format that the tensors have. Out: notes for `inspect`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from beamq.config import BeamConfig
from beamq.errors import counted
from beamq.eval.checks import Ledger, few
from beamq.eval.folder import MANIFEST_NAME
from beamq.eval.structure import CODE_DTYPES
from beamq.header import TensorSpec
from beamq.roles import PRECISE_FP32, Role, TensorRole, classify, expected_tensors
from beamq.sources import missing_tensors

# Tensors that describe a weight beside them and are no parameters themselves.
SCALES = (
    "weight_scale", "weight_scale_2", "weight_scale_inv", "weight_global_scale", "input_scale",
    "input_global_scale", "weight_zero_point", "weight_shape", "k_scale", "v_scale",
)  # fmt: skip


def role_of(name: str) -> TensorRole:
    """The role of any stored tensor; a scale has that of the weight it belongs to."""
    module, _, suffix = name.rpartition(".")
    if suffix in (*SCALES, "weight_packed"):
        return classify(f"{module}.weight")
    return classify(name)


def is_scale(name: str) -> bool:
    """Whether a tensor describes the weight beside it and holds no parameters."""
    return name.rpartition(".")[2] in SCALES


def file_notes(
    names: Sequence[str],
    ledger: Ledger,
    index: Mapping[str, Any] | None,
    tensors: Mapping[str, TensorSpec],
) -> Iterable[str]:
    """What the files themselves, of these names, have that they should not, or lack."""
    for check in ledger.results("structure", with_source=False):
        if check.status == "fail":
            yield check.detail
    entries = (index or {}).get("weight_map")
    if isinstance(entries, dict):
        stray = set(entries).symmetric_difference(tensors)
        if stray:
            some = counted(len(stray), "tensor")
            yield f"index and shards disagree about {some}: {few(sorted(stray))}"
        named = set(map(str, entries.values()))
        beside = [n for n in names if n.endswith(".safetensors") and n not in named]
        if beside:
            yield f"shards that the index does not name: {few(beside)}"
    pickles = [name for name in names if name.endswith(".bin")]
    if pickles:
        yield f"pickle files, which beamq never opens: {few(pickles)}"


def claim_notes(
    form: str, declared: str | None, manifest: Mapping[str, Any] | None
) -> Iterable[str]:
    """Where config or manifest and the tensors contradict each other."""
    quantized = form in ("nvfp4", "fp8", "mixed", "other")
    if declared and not quantized:
        yield f"config claims {declared}, but no tensor is quantized"
    if quantized and not declared:
        yield f"tensors are {form}, but no config says so: loaders will misread them"
    words = {"nvfp4": "NVFP4", "fp8": "float-quantized"}
    if declared and form in words and words[form].lower() not in declared.lower():
        yield f"tensors are {form}, config claims {declared}"
    if quantized and manifest is None:
        yield f"no {MANIFEST_NAME}: not made by beamq, or unfinished"


def tensor_notes(
    tensors: Mapping[str, TensorSpec], config: BeamConfig | None, form: str
) -> Iterable[str]:
    """Tensors that are unusual for a Beam, missing, or of an unusual dtype."""
    roles = {name: role_of(name) for name in tensors}
    routers = [
        name
        for name, role in roles.items()
        if role.role in PRECISE_FP32 and tensors[name].dtype != "F32"
    ]
    if routers:
        dtypes = ", ".join(sorted({tensors[name].dtype for name in routers}))
        some = counted(len(routers), "router tensor is", "router tensors are")
        yield f"{some} {dtypes}, not F32: {few(routers)}"
    heads = [
        name
        for name, role in roles.items()
        if role.role in (Role.HEAD, Role.EMBEDDING)
        and (tensors[name].dtype in CODE_DTYPES or is_scale(name))
    ]
    if heads:
        yield f"head or embeddings are quantized: {few(heads)}"
    if any(role.packed for role in roles.values()):
        yield "experts are packed in 3-D tensors"
    caches = [name for name in tensors if name.endswith((".k_scale", ".v_scale"))]
    if caches:
        some = counted(len(caches), "KV-cache scale")
        yield f"{some}, which SGLang's Beam refuses: {few(caches)}"
    extra = [n for n, role in roles.items() if role.role is Role.EXTRA and n not in caches]
    if extra:
        some = counted(len(extra), "tensor that is", "tensors that are")
        yield f"{some} not Beam's: {few(extra)}"
    half = _half_quantized(tensors, roles)
    if half:
        yield f"layers whose experts are quantized in part: {few(half)}"
    if config is not None:
        modules = {role.module for role in roles.values()}
        packed = {(role.layer, role.packed) for role in roles.values() if role.packed}
        gone = [
            role.name
            for role, _ in expected_tensors(config)
            if role.module not in modules and not (role.role is Role.EXPERT and _in(packed, role))
        ]
        if gone:
            yield f"{missing_tensors(len(gone))}: {few(gone)}"


def _in(packed: set[tuple[int | None, str]], role: TensorRole) -> bool:
    return (role.layer, "down_proj" if role.proj == "down_proj" else "gate_up_proj") in packed


def _half_quantized(
    tensors: Mapping[str, TensorSpec], roles: Mapping[str, TensorRole]
) -> list[str]:
    kinds: dict[int, set[bool]] = {}
    for name, role in roles.items():
        if role.role is Role.EXPERT and role.layer is not None and not is_scale(name):
            kinds.setdefault(role.layer, set()).add(tensors[name].dtype in CODE_DTYPES)
    return [f"model.layers.{layer}" for layer, seen in sorted(kinds.items()) if len(seen) > 1]
