"""Names on disk: which tensors a quantized linear becomes, and what both config files say.

In: a linear's name and format, the quantized units. Out: tensor names, dtypes and shapes, and the
quantization blocks of the configs, as vLLM 0.33.0, SGLang 0.5.23 and transformers 5.24.0 accept
them. `WEIGHT_FORMATS` says what a linear becomes, `SCHEMES` how a folder declares it and which
engines load it:

    nvfp4        M.weight U8 [N,K/2]   M.weight_scale F8_E4M3 [N,K/16]
                 M.weight_scale_2 F32 []   M.input_scale F32 []
    fp8          M.weight F8_E4M3 [N,K]   M.weight_scale F32 [N,1]
    fp8-modelopt M.weight F8_E4M3 [N,K]   M.weight_scale F32 [N]
    fp8-block    M.weight F8_E4M3 [N,K]   M.weight_scale_inv F32 [N/128,K/128], rounded up
    mxfp8        M.weight F8_E4M3 [N,K]   M.weight_scale U8 [N,K/32]

Exclusions name a whole part of a layer (its experts, its dense MLP, its attention): the two
engines match finer lists in different ways, or refuse them. Both engines were tested with the forms
written here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from beamq.beam.config import BeamConfig
from beamq.beam.tensors import QUANTIZABLE, Role
from beamq.io.safetensors_header import ITEMSIZE, TensorSpec

NVFP4_BLOCK, MX_BLOCK, FP8_BLOCK = 16, 32, 128
MX_NAN = 255  # MXFP8's scale byte that is no number
MODELOPT_VERSION = "0.47.0"  # the producer whose layout is written; engines read only the name

Unit = tuple[int, Role]
"""A part of a layer that is quantized or not as a whole: (layer, expert|dense-mlp|attention)."""

Outputs = tuple[tuple[str, str, tuple[int, ...]], ...]
"""(name, dtype, shape) of the tensors that one linear becomes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormat:
    """What a linear [n, k] becomes on disk.

    `rounding` is the rule by which it is converted, as recipes name it. Blocks of `block` rows and
    columns share a scale; 0 stands for all columns. `flat` scales have one dimension, a row each.
    Linears that engines fuse share a `weight_scale_2` where there are `scalars`.
    """

    rounding: str
    codes: str
    scale_dtype: str
    block: tuple[int, int]
    scale: str = "weight_scale"
    flat: bool = False
    scalars: tuple[str, ...] = ()

    def scale_shape(self, n: int, k: int) -> tuple[int, ...]:
        """The shape of the tensor of scales of a linear [n, k]."""
        rows, columns = self.block
        if self.flat:
            return (n,)
        return (-(-n // rows), -(-k // columns) if columns else 1)

    def scale_nbytes(self, n: int, k: int) -> int:
        """Bytes of the scales of so many rows: of whole blocks, or the last rows of a linear."""
        return ITEMSIZE[self.scale_dtype] * math.prod(self.scale_shape(n, k))

    def tensors(self, module: str, n: int, k: int) -> Outputs:
        """(name, dtype, shape) of each tensor that the linear `module` [n, k] becomes."""
        return (
            (f"{module}.weight", self.codes, (n, k // 2 if self.codes == "U8" else k)),
            (f"{module}.{self.scale}", self.scale_dtype, self.scale_shape(n, k)),
            *((f"{module}.{each}", "F32", ()) for each in self.scalars),
        )


_FP8 = WeightFormat(rounding="fp8", codes="F8_E4M3", scale_dtype="F32", block=(1, 0))
WEIGHT_FORMATS = {
    "nvfp4": WeightFormat(
        rounding="nvfp4", codes="U8", scale_dtype="F8_E4M3", block=(1, NVFP4_BLOCK),
        scalars=("weight_scale_2", "input_scale"),
    ),
    "fp8": _FP8,
    "fp8-modelopt": replace(_FP8, flat=True),
    "fp8-block": replace(
        _FP8, rounding="fp8-block", block=(FP8_BLOCK, FP8_BLOCK), scale="weight_scale_inv"
    ),
    "mxfp8": replace(_FP8, rounding="mxfp8", scale_dtype="U8", block=(1, MX_BLOCK)),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """How a folder declares its formats: `method` is its `quant_method`, `what` its `quant_algo`,
    `format` or `weight_block_size`. `refusals` says for each engine that does not load such a Beam
    why not."""

    method: str
    what: str
    formats: tuple[str, ...]
    refusals: Mapping[str, str]

    @property
    def roundings(self) -> dict[str, str]:
        """Its formats by their rounding."""
        return {WEIGHT_FORMATS[fmt].rounding: fmt for fmt in self.formats}

    @property
    def loaders(self) -> tuple[str, ...]:
        """The engines that load it."""
        return tuple(engine for engine in ENGINES if engine not in self.refusals)

    @property
    def ignore_key(self) -> str:
        """The key of config.json's block that lists what is not quantized."""
        return "ignored_layers" if self.method == "fp8" else "ignore"

    @property
    def modelopt(self) -> bool:
        """Whether it is ModelOpt's, which has a second config file."""
        return self.method == "modelopt"


ENGINES = ("vLLM", "SGLang", "transformers")
ENGINE_NAMES = tuple(map(str.lower, ENGINES))
"""As options have them."""
_NO_MODELOPT = "no loader for ModelOpt"
SCHEMES = {
    "nvfp4": Scheme(
        method="modelopt", what="NVFP4", formats=("nvfp4",),
        refusals={"transformers": f"{_NO_MODELOPT} NVFP4"},
    ),
    "fp8": Scheme(
        method="compressed-tensors", what="float-quantized", formats=("fp8",), refusals={}
    ),
    "nvfp4-fp8": Scheme(
        method="modelopt", what="MIXED_PRECISION", formats=("nvfp4", "fp8-modelopt"),
        refusals={
            "SGLang": "refuses Beam in ModelOpt MIXED_PRECISION",
            "transformers": f"{_NO_MODELOPT} MIXED_PRECISION",
        },
    ),
    "mxfp8": Scheme(
        method="compressed-tensors", what="mxfp8-quantized", formats=("mxfp8",),
        refusals={
            "SGLang": "refuses Beam in MXFP8",
            "transformers": "stops at the scales of compressed-tensors MXFP8",
        },
    ),
    "fp8-block": Scheme(
        method="fp8", what="[128, 128]", formats=("fp8-block",),
        refusals={"SGLang": "refuses Beam in block FP8"},
    ),
}  # fmt: skip


def said_format(block: Mapping[str, Any]) -> Any:
    """What a `quantization_config` says beside its method, as `Scheme.what` has it."""
    said = block.get("quant_algo") or block.get("format")
    return said if said or "weight_block_size" not in block else str(block["weight_block_size"])


def declared_scheme(block: Mapping[str, Any]) -> str | None:
    """The scheme of a `quantization_config`; None if it is none of ours."""
    method = str(block.get("quant_method", "")).lower().replace("modelopt_fp4", "modelopt")
    said = said_format(block)
    if method == "compressed-tensors" and said == "float-quantized":
        groups = block.get("config_groups")
        groups = list(groups.values()) if isinstance(groups, Mapping) else []
        weights = [each.get("weights") for each in groups if isinstance(each, Mapping)]
        sizes = [each.get("group_size") for each in weights if isinstance(each, Mapping)]
        if MX_BLOCK in sizes:  # SkyRL writes MXFP8 under the older name
            return "mxfp8"
    found = (name for name, each in SCHEMES.items() if (each.method, each.what) == (method, said))
    return next(found, None)


def quantized_tensors(module: str, fmt: str, n: int, k: int) -> Outputs:
    """(name, dtype, shape) of each tensor that the linear `module` [n, k] becomes in a format."""
    return WEIGHT_FORMATS[fmt].tensors(module, n, k)


def stored_as(parts: Mapping[str, tuple[str, tuple[int, ...]]]) -> str | None:
    """The format of a linear by its stored tensors, (dtype, shape) by suffix (`weight`, ...).

    None where nothing says that it is quantized. A linear that lacks tensors, or has others too,
    goes by those that it has.
    """
    codes, _ = parts.get("weight", ("", ()))
    dtype, shape = parts.get("weight_scale", ("", ()))
    if codes == "U8" or "weight_scale_2" in parts:
        return "nvfp4"
    if "weight_scale_inv" in parts:
        return "fp8-block"
    if dtype == "U8":
        return "mxfp8"
    if codes == "F8_E4M3" or dtype:
        return "fp8-modelopt" if len(shape) == 1 else "fp8"
    return "nvfp4" if "input_scale" in parts else None


def format_in(tensors: Mapping[str, TensorSpec], module: str) -> str | None:
    """The format of a linear among stored tensors; see `stored_as`."""
    names = {suffix: f"{module}.{suffix}" for suffix in SUFFIXES}
    specs = {suffix: tensors[name] for suffix, name in names.items() if name in tensors}
    return stored_as({suffix: (spec.dtype, spec.shape) for suffix, spec in specs.items()})


SUFFIXES = ("weight", "weight_scale", "weight_scale_inv", "weight_scale_2", "input_scale")
"""Those of the tensors of a quantized linear, in any format."""


def scheme_of(formats: Collection[str]) -> str | None:
    """The scheme that declares linears in these formats; None if there is none."""
    fitting = (name for name, each in SCHEMES.items() if set(each.formats) == set(formats))
    return next(fitting, None)


def layer_units(config: BeamConfig) -> tuple[Unit, ...]:
    """Every unit of a model, in layer order."""
    units: list[Unit] = []
    for layer, kind in enumerate(config.mlp_layer_types):
        units.append((layer, Role.ATTENTION))
        units.append((layer, Role.EXPERT if kind == "sparse" else Role.DENSE_MLP))
    return tuple(units)


_ENGINE_SUFFIXES = (
    *(f"self_attn.{part}_proj" for part in ("q", "k", "v", "qkv", "qkv_gate", "output_gate")),
    *(f"self_attn.{part}_proj" for part in ("gate", "o")),
    *(f"mlp.{part}_proj" for part in ("gate", "up", "gate_up", "down")),
    *(f"mlp.experts.0.{part}_proj" for part in ("gate", "up", "down")),
    "mlp.gate",
)
"""Below `model.layers.N.`: the names under which engines ask whether a linear is ignored."""
_EXPERTS = ".experts"  # how an entry for all experts of a layer ends, before its pattern


def harmless_entries(config: BeamConfig, modules: Iterable[str]) -> list[str]:
    """Modules of tensors that are not Beam's, sorted, without those whose name in an ignore list
    would match other modules too. Experts that are stored one by one become one `x.experts`.

    Engines match entries by substring, by dotted part or as patterns: an entry `mlp` would leave
    every MLP unquantized when the model is served.
    """
    asked = "\n".join(
        f"model.layers.{layer}.{suffix}"
        for layer in range(config.num_layers)
        for suffix in _ENGINE_SUFFIXES
    )
    experts = [f"model.layers.{layer}.mlp.experts" for layer in config.sparse_layers]
    return sorted(
        module
        for module in {re.sub(r"(\bexperts)\.\d+\..*", r"\1", module) for module in modules}
        if module not in ("lm_head", "model.embed_tokens")
        and module not in asked
        and not module.startswith("re:")
        and not any(prefix in module for prefix in experts)
        and not any(character in module for character in "*?[\n")
    )


def ignore_list(
    config: BeamConfig, scheme: str, quantized: Collection[Unit], extra_modules: Iterable[str]
) -> list[str]:
    """What engines must not quantize, in the form of the scheme's config."""
    forms = {"modelopt": modelopt_ignore, "compressed-tensors": compressed_tensors_ignore}
    return forms.get(SCHEMES[scheme].method, plain_ignore)(config, quantized, extra_modules)


def modelopt_ignore(
    config: BeamConfig, quantized: Collection[Unit], extra_modules: Iterable[str]
) -> list[str]:
    """Ignore list in ModelOpt's form: names and `x*` globs, which both engines match equally."""
    entries = ["lm_head", "model.embed_tokens"]
    suffix = {Role.ATTENTION: "self_attn*", Role.DENSE_MLP: "mlp*", Role.EXPERT: "mlp.experts*"}
    for layer, role in layer_units(config):
        if role is Role.EXPERT:
            entries.append(f"model.layers.{layer}.mlp.gate")
        if (layer, role) not in quantized:
            entries.append(f"model.layers.{layer}.{suffix[role]}")
    return entries + [f"{each}*" if each.endswith(_EXPERTS) else each for each in extra_modules]


def plain_ignore(
    config: BeamConfig, quantized: Collection[Unit], extra_modules: Iterable[str]
) -> list[str]:
    """Ignore list of whole names, one for each linear: vLLM compares them exactly, and wants all
    that it fuses; transformers takes what begins with them."""
    entries = ["lm_head", "model.embed_tokens"]
    for layer, role in layer_units(config):
        if role is Role.EXPERT:
            entries.append(f"model.layers.{layer}.mlp.gate")
        if (layer, role) not in quantized:
            entries += _modules(layer, role)
    return [*entries, *extra_modules]


def compressed_tensors_ignore(
    config: BeamConfig, quantized: Collection[Unit], extra_modules: Iterable[str]
) -> list[str]:
    """Ignore list in compressed-tensors' form: names, and `re:` patterns for `re.match`.

    vLLM renames plain entries but not patterns, so attention is named by a pattern that covers
    `output_gate_proj` too; the router pattern ends in `$` or it would swallow `gate_up_proj`.
    """
    leaf = {
        Role.ATTENTION: r"\.self_attn\..*",
        Role.DENSE_MLP: r"\.mlp\.(gate_proj|up_proj|gate_up_proj|down_proj)$",
        Role.EXPERT: r"\.mlp\.experts\..*",
    }
    entries = ["lm_head", r"re:.*\.mlp\.gate$"]
    for role, pattern in leaf.items():
        layers = [layer for layer, kind in layer_units(config) if kind is role]
        left = [layer for layer in layers if (layer, role) not in quantized]
        if not left:
            continue
        if len(left) == len(layers):
            entries.append(f"re:.*{pattern}")
        else:
            numbers = "|".join(str(layer) for layer in left)
            entries.append(rf"re:model\.layers\.({numbers}){pattern}")
    return entries + [
        rf"re:{re.escape(each)}\..*" if each.endswith(_EXPERTS) else each for each in extra_modules
    ]


def quantization_config(
    scheme: str, ignore: list[str], kv_cache: str, formats: Mapping[Unit, str] | None = None
) -> dict[str, Any]:
    """The `quantization_config` block of config.json.

    `formats` has each quantized unit's format; a scheme of several names its linears by them.
    """
    if scheme == "fp8-block":
        return _block_fp8_block(ignore, kv_cache)
    if not SCHEMES[scheme].modelopt:
        return _compressed_tensors_block(scheme, ignore, kv_cache)
    block: dict[str, Any] = {
        "quant_method": "modelopt",
        "quant_algo": SCHEMES[scheme].what,
        "producer": {"name": "modelopt", "version": MODELOPT_VERSION},
        "config_groups": {"group_0": {"targets": ["Linear"], **_GROUPS["nvfp4"]}},
        "ignore": ignore,
    }
    if scheme == "nvfp4-fp8":
        layers = dict(_quantized_layers(formats or {}))
        block["quantized_layers"] = {name: ALGOS[fmt] for name, fmt in layers.items()}
        block["config_groups"] = {
            f"group_{place}": {
                "targets": sorted(name for name, each in layers.items() if each == fmt),
                **_GROUPS[fmt],
            }
            for place, fmt in enumerate(dict.fromkeys(layers.values()))
        }
    if kv_cache == "fp8":
        block["kv_cache_scheme"] = {"dynamic": False, "num_bits": 8, "type": "float"}
    return block


_FOUR_BITS = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": NVFP4_BLOCK}
_EIGHT_BITS = {"dynamic": False, "num_bits": 8, "type": "float"}
# As ModelOpt writes them. Without input_activations vLLM would serve W4A16 without a message; that
# FP8 activations are scaled per token when served shows in the algorithm's name alone.
_GROUPS = {
    "nvfp4": {"weights": _FOUR_BITS, "input_activations": _FOUR_BITS},
    "fp8-modelopt": {
        "weights": {**_EIGHT_BITS, "strategy": "channel"}, "input_activations": _EIGHT_BITS,
    },
}  # fmt: skip
ALGOS = {
    "nvfp4": {"quant_algo": "NVFP4", "group_size": NVFP4_BLOCK},
    "fp8-modelopt": {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
}
ATTENTION_LINEARS = ("q_proj", "k_proj", "v_proj", "gate_proj", "o_proj")
MLP_LINEARS = ("gate_proj", "up_proj", "down_proj")


def _quantized_layers(formats: Mapping[Unit, str]) -> Iterator[tuple[str, str]]:
    """(module, format) of every quantized linear, in layer order; all experts of a layer are one.

    vLLM looks a layer's experts up by that name before it looks for names that begin with it.
    """
    for layer, role in sorted(formats, key=lambda unit: (unit[0], QUANTIZABLE.index(unit[1]))):
        yield from ((module, formats[layer, role]) for module in _modules(layer, role))


def _modules(layer: int, role: Role) -> list[str]:
    """The linears of a unit; all experts of a layer go by one name."""
    prefix = f"model.layers.{layer}"
    return {
        Role.ATTENTION: [f"{prefix}.self_attn.{name}" for name in ATTENTION_LINEARS],
        Role.DENSE_MLP: [f"{prefix}.mlp.{name}" for name in MLP_LINEARS],
        Role.EXPERT: [f"{prefix}.mlp.experts"],
    }[role]


def _block_fp8_block(ignore: list[str], kv_cache: str) -> dict[str, Any]:
    """The block of DeepSeek-V3's form. vLLM reads `ignored_layers`, transformers takes it too."""
    if kv_cache == "fp8":
        raise ValueError("block FP8 has no place for a KV-cache scheme")
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
        "ignored_layers": ignore,
    }


_CT_EIGHT_BITS = {"num_bits": 8, "type": "float", "symmetric": True}
_CT_MX = {
    **_CT_EIGHT_BITS, "strategy": "group", "group_size": MX_BLOCK, "scale_dtype": "torch.uint8",
}  # fmt: skip
CT_ARGUMENTS = {
    "fp8": (
        {**_CT_EIGHT_BITS, "strategy": "channel", "dynamic": False},
        {**_CT_EIGHT_BITS, "strategy": "token", "dynamic": True},
    ),
    "mxfp8": ({**_CT_MX, "dynamic": False}, {**_CT_MX, "dynamic": True}),
}
"""compressed-tensors' arguments of weights and of activations."""


def _compressed_tensors_block(scheme: str, ignore: list[str], kv_cache: str) -> dict[str, Any]:
    """compressed-tensors' block, keys that its release 0.17 parses."""
    weights, activations = CT_ARGUMENTS[scheme]
    cache = None
    if kv_cache == "fp8":
        cache = {**_CT_EIGHT_BITS, "strategy": "tensor", "dynamic": False}
    return {
        "quant_method": "compressed-tensors",
        "format": SCHEMES[scheme].what,
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": dict(weights),
                "input_activations": dict(activations),
            }
        },
        "ignore": ignore,
        "kv_cache_scheme": cache,
    }


def hf_quant_config(config_block: Mapping[str, Any]) -> dict[str, Any]:
    """`hf_quant_config.json`, derived from config.json's block so that the two cannot differ."""
    layers = config_block.get("quantized_layers")
    return {
        "producer": dict(config_block["producer"]),
        "quantization": {
            "quant_algo": config_block["quant_algo"],
            "kv_cache_quant_algo": "FP8" if config_block.get("kv_cache_scheme") else None,
            "group_size": NVFP4_BLOCK,
            "exclude_modules": list(config_block["ignore"]),
            **({"quantized_layers": dict(layers)} if layers else {}),
        },
    }
