"""One layer's weights, read from a checkpoint straight into the buffers the forward pass uses.

In: a `Checkpoint` in any form a Beam comes in: BF16, FP16 or FP32; experts one tensor each or
packed in 3-D; any of the formats of `plan.layout`. Out: `LayerWeights`,
`ExpertSlice` or `Head` on the device.

The one idea: rows that are multiplied together lie together. q, k, v and gate, gate and up, and all
experts of a slice are one buffer each, so that every group of linears is one GEMM. A pool of
threads reads every tensor's bytes straight into its place (`Fill`); only a tensor that must be cast
passes through a copy. For CUDA, buffers are pinned and copied on a separate stream, so that a
transfer overlaps with computing.

A linear's format follows from its tensors (`layout.stored_as`); without scales it is dense. The
config must announce a quantized format, as engines
demand. Unquantized weights are cast to the activation dtype, the router's to FP32. Limits: values
are not searched for NaN here; conversion and `verify` do that.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from beamq.beam.config import BeamConfig
from beamq.beam.tensors import packed_shape
from beamq.errors import CheckpointError, TensorError
from beamq.formats.numerics import NVFP4_BLOCK, TORCH_DTYPES
from beamq.io.checkpoint import FLOAT_SOURCES, Checkpoint
from beamq.io.files import read_json_object
from beamq.io.safetensors_header import TensorSpec
from beamq.model.attention import AttentionWeights
from beamq.model.gemm.backend import (
    DenseWeight,
    Fp8Weight,
    GroupFp8Weight,
    LinearWeight,
    Nvfp4Weight,
)
from beamq.model.layer import DenseMlp, Head, LayerWeights, SparseMlp
from beamq.model.moe import ExpertSlice, RouterWeights
from beamq.plan.layout import FP8_BLOCK, SCHEMES, WEIGHT_FORMATS, declared_scheme, format_in
from beamq.ranks import cores_here

Tree = TypeVar("Tree")
MAX_READERS = 16
TAP_PLACES = 8
"""Places that a tapped layer is read from at once, so that a converter's threads do not all write
to one file and wait for its lock."""

Tap = Callable[[TensorSpec, int, torch.Tensor], None]
"""Called as (spec, first, tensor) with rows first .. first + len(tensor) - 1 of a stored tensor, as
stored, on the CPU. Whole tensors come at once with first = 0, packed experts one at a time. Reader
threads call it. The tensor must not be changed, nor kept after its unit (a layer, a slice of its
experts, the embedding, the head) is loaded."""


class Fill:
    """Buffers under construction. Their contents are undefined until `run` has been called."""

    def __init__(
        self, checkpoint: Checkpoint, pool: Executor, *, pin: bool = False, tap: Tap | None = None
    ) -> None:
        self.checkpoint = checkpoint
        self._pool = pool
        self._pin = pin
        self._tap = tap
        self._reads: list[tuple[TensorSpec, int, torch.Tensor]] = []  # spec, first row, place

    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised CPU buffer; its contents come from `read`.

        A normal tensor even where the caller is in inference mode: reader threads are not, and may
        not write to an inference tensor.
        """
        with torch.inference_mode(False):
            return torch.empty(shape, dtype=dtype, pin_memory=self._pin)

    def read(self, name: str, out: torch.Tensor) -> None:
        """Note that the whole tensor `name` goes to `out`, a contiguous part of a buffer.

        The element counts must match; the caller checks the shape. Scales of blocks are repeated
        for each row of `out`.
        """
        self._reads.append((self.checkpoint.spec(name), 0, out))

    def read_rows(self, name: str, first: int, out: torch.Tensor) -> None:
        """Note that rows first .. first + len(out) - 1 of `name` go to `out`, one row a read."""
        spec = self.checkpoint.spec(name)
        self._reads += [(spec, first + row, out[row : row + 1]) for row in range(out.shape[0])]

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A buffer for one unquantized tensor of a known shape, cast to `dtype`."""
        spec = self.checkpoint.spec(name)
        _expect_shape(spec, shape)
        if spec.dtype not in FLOAT_SOURCES:
            raise TensorError(f"{name}: dtype {spec.dtype}, expected BF16, F16 or F32")
        out = self.buffer(shape, dtype)
        self.read(name, out)
        return out

    def run(self) -> None:
        """Read everything noted. Raises the first error."""
        reads = self._reads
        if self._tap is not None:  # from equal stretches in turn; neighbours stay apart
            step = -(-len(reads) // TAP_PLACES)
            reads = [read for first in range(step) for read in reads[first::step]]
        list(self._pool.map(self._fetch, *zip(*reads, strict=True)))  # raises the first error
        self._reads.clear()

    def _fetch(self, spec: TensorSpec, first: int, out: torch.Tensor) -> None:
        stored = TORCH_DTYPES[spec.dtype]
        blocks = first == 0 and spec.numel < out.numel()  # one row of scales for each 128 of `out`
        shape = spec.shape if blocks else out.shape
        raw = out if out.dtype == stored and not blocks else torch.empty(shape, dtype=stored)
        flat = raw.view(-1).view(torch.uint8)
        view = memoryview(flat.numpy())  # type: ignore[arg-type]  # numpy arrays are buffers
        rows = spec.shape[0] if spec.shape else 1
        self.checkpoint.read_into(spec, view, first * (spec.nbytes // rows))
        if self._tap is not None:
            whole = flat.numel() == spec.nbytes
            self._tap(spec, first, raw.view(spec.shape if whole else (-1, *spec.shape[1:])))
        if blocks:
            raw = raw.repeat_interleave(FP8_BLOCK, dim=0)[: out.shape[0]]
        if raw is not out:
            out.copy_(raw)


def copied(tree: Any, device: torch.device) -> Any:
    """A copy of a dataclass (and those within) with every tensor on a CUDA device.

    Memory of the copies is tied to the device's default stream, which will use them.
    """
    if isinstance(tree, torch.Tensor):
        moved = tree.to(device, non_blocking=True)
        moved.record_stream(torch.cuda.default_stream(device))
        return moved
    if isinstance(tree, tuple):
        return tuple(copied(item, device) for item in tree)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        names = [field.name for field in dataclasses.fields(tree)]
        return dataclasses.replace(
            tree, **{name: copied(getattr(tree, name), device) for name in names}
        )
    return tree


def reader_count() -> int:
    """Threads that a loader reads with: this process's cores, less some to launch kernels."""
    cores = cores_here()
    return min(MAX_READERS, cores - cores // 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredLinear:
    """A linear `module` of [n, k], stored in `format`."""

    module: str
    n: int
    k: int
    format: str


def _declared_formats(checkpoint: Checkpoint) -> frozenset[str]:
    """Quantized formats that the checkpoint's config files announce; empty for a plain one."""
    block = checkpoint.config.get("quantization_config")
    if not isinstance(block, dict) or not block:
        if not checkpoint.source.has("hf_quant_config.json"):
            return frozenset()
        path = checkpoint.source.path("hf_quant_config.json")
        nested = read_json_object(path, CheckpointError).get("quantization")
        block = {"quant_method": "modelopt", **(nested if isinstance(nested, dict) else {})}
    scheme, method = declared_scheme(block), str(block.get("quant_method", "")).lower()
    methods = {"modelopt": "nvfp4", "compressed-tensors": "fp8"}
    if scheme is None:
        scheme = next((each for name, each in methods.items() if method.startswith(name)), None)
    if scheme is None:
        raise CheckpointError(
            f"{checkpoint.name}: quantization_config has quant_method {method[:40]!r}, expected"
            " 'modelopt', 'compressed-tensors' or, with blocks of 128 x 128, 'fp8'"
        )
    return frozenset(SCHEMES[scheme].roundings)


def _scalar(checkpoint: Checkpoint, name: str) -> float:
    """A positive, finite one-element scale. Raises `TensorError`."""
    spec = checkpoint.spec(name)
    if spec.numel != 1:
        raise TensorError(f"{name}: shape {list(spec.shape)}, expected one number")
    value = float(checkpoint.tensor(name).to(torch.float64))
    if not (math.isfinite(value) and value > 0):
        raise TensorError(f"{name} is {value}, expected a positive finite scale")
    return value


def _expect_shape(spec: TensorSpec, shape: tuple[int, ...]) -> None:
    """Raise `TensorError` unless the tensor has the shape that the config implies."""
    if spec.shape != shape:
        raise TensorError(
            f"{spec.name}: shape {list(spec.shape)}, expected {list(shape)} by config.json"
        )


class LayerLoader:
    """Loads layers, slices of experts, embedding and head of one checkpoint. Thread safe."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: BeamConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        tap: Tap | None = None,
    ) -> None:
        self.checkpoint = checkpoint
        self.config = config
        self.dtype = dtype
        self.device = device
        self._tap = tap
        self._declared = _declared_formats(checkpoint)
        self._pool = ThreadPoolExecutor(reader_count(), thread_name_prefix="beamq-read")
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """End the reader threads."""
        self._pool.shutdown()

    def layer(self, index: int, *, experts: range | None = None) -> LayerWeights:
        """A layer, whole or with only those `experts` of a sparse one (empty: no slice)."""
        fill = self._fill()
        prefix, hidden = f"model.layers.{index}", self.config.hidden_size

        def norm(name: str) -> torch.Tensor:
            return fill.tensor(f"{prefix}.{name}_layernorm.weight", (hidden,), self.dtype)

        mlp: DenseMlp | SparseMlp
        if self.config.mlp_layer_types[index] == "sparse":
            own = range(self.config.num_experts) if experts is None else experts
            held = (self._experts(fill, index, own.start, len(own)),) if own else ()
            gate, shape = f"{prefix}.mlp.gate", (self.config.num_experts, hidden)
            bias = f"{gate}.e_score_correction_bias"
            router = RouterWeights(
                weight_EK=fill.tensor(f"{gate}.weight", shape, torch.float32),
                bias_E=fill.tensor(bias, shape[:1], torch.float32),
            )
            mlp = SparseMlp(router=router, experts=held)
        else:
            modules = [f"{prefix}.mlp"]
            gate_up, down = self._mlp(fill, modules, self.config.intermediate_size, modules)
            mlp = DenseMlp(gate_up=gate_up, down=down)
        built = LayerWeights(
            index=index,
            attention=self._attention(fill, index),
            mlp=mlp,
            input_norm=norm("input"),
            post_attention_norm=norm("post_attention"),
            pre_mlp_norm=norm("pre_feedforward"),
            post_mlp_norm=norm("post_feedforward"),
        )
        return self._finish(fill, built)

    def experts(self, index: int, first: int, count: int) -> ExpertSlice:
        """Experts first .. first + count - 1 of a sparse layer."""
        fill = self._fill()
        return self._finish(fill, self._experts(fill, index, first, count))

    def embedding(self) -> torch.Tensor:
        """The embedding matrix [V, K] in the activation dtype; on the CPU, whatever the device."""
        fill = Fill(self.checkpoint, self._pool, tap=self._tap)
        shape = (self.config.vocab_size, self.config.hidden_size)
        table = fill.tensor("model.embed_tokens.weight", shape, self.dtype)
        fill.run()
        return table

    def head(self) -> Head:
        """Final norm and output matrix, which is the embedding matrix where they are tied."""
        fill = self._fill()
        name = "lm_head.weight"
        if self.config.tie_word_embeddings and name not in self.checkpoint.tensors:
            name = "model.embed_tokens.weight"
        shape = (self.config.vocab_size, self.config.hidden_size)
        built = Head(
            norm=fill.tensor("model.norm.weight", shape[1:], self.dtype),
            output_VK=fill.tensor(name, shape, self.dtype),
        )
        return self._finish(fill, built)

    def _fill(self) -> Fill:
        return Fill(self.checkpoint, self._pool, pin=self._stream is not None, tap=self._tap)

    def _finish(self, fill: Fill, built: Tree) -> Tree:
        """Read the buffers of `built`. For CUDA, return a copy there, made on a separate stream."""
        fill.run()
        if self._stream is None:
            return built
        with torch.cuda.stream(self._stream):
            uploaded: Tree = copied(built, self.device)
        self._stream.synchronize()
        return uploaded

    def _attention(self, fill: Fill, index: int) -> AttentionWeights:
        config, prefix = self.config, f"model.layers.{index}.self_attn"
        hidden, q, kv = config.hidden_size, config.q_dim, config.kv_dim
        rows = {"q_proj": q, "k_proj": kv, "v_proj": kv, "gate_proj": q}
        fused = [self._stored(f"{prefix}.{name}", n, hidden) for name, n in rows.items()]
        sliding = config.layer_types[index] == "sliding_attention"
        head = (config.head_dim,)
        return AttentionWeights(
            window=config.sliding_window if sliding else None,
            qkv_gate=self._linear(fill, fused),
            o=self._linear(fill, [self._stored(f"{prefix}.o_proj", hidden, q)]),
            q_norm=fill.tensor(f"{prefix}.q_norm.weight", head, self.dtype),
            k_norm=fill.tensor(f"{prefix}.k_norm.weight", head, self.dtype),
            gate_bias=fill.tensor(f"{prefix}.gate_bias", (config.num_heads,), self.dtype),
        )

    def _experts(self, fill: Fill, index: int, first: int, count: int) -> ExpertSlice:
        prefix = f"model.layers.{index}.mlp.experts"
        packed = self._packed_name(f"{prefix}.gate_up_proj")
        if packed is not None:
            down = self._packed_name(f"{prefix}.down_proj") or f"{prefix}.down_proj"
            return ExpertSlice(
                first=first,
                count=count,
                gate_up=self._packed(fill, packed, "gate_up_proj", first, count),
                down=self._packed(fill, down, "down_proj", first, count),
            )
        # Engines reduce input scales over all experts of a layer, whatever the slice.
        every = [f"{prefix}.{expert}" for expert in range(self.config.num_experts)]
        own, width = every[first : first + count], self.config.moe_intermediate_size
        gate_up, down_proj = self._mlp(fill, own, width, every, experts=count)
        return ExpertSlice(first=first, count=count, gate_up=gate_up, down=down_proj)

    def _packed_name(self, module: str) -> str | None:
        """The stored name of a packed tensor, which may or may not end in `.weight`."""
        names = (module, f"{module}.weight")
        return next((name for name in names if name in self.checkpoint.tensors), None)

    def _packed(self, fill: Fill, name: str, kind: str, first: int, count: int) -> DenseWeight:
        shape = packed_shape(self.config, kind)
        _expect_shape(self.checkpoint.spec(name), shape)
        out = fill.buffer((count, *shape[1:]), self.dtype)
        fill.read_rows(name, first, out)
        return DenseWeight(w_NK=out)

    def _stored(self, module: str, n: int, k: int) -> StoredLinear:
        """The linear `module`, its format found and its tensors' shapes checked.

        Raises `TensorError` for a tensor that is missing, has another shape, or contradicts the
        config.
        """
        weight = self.checkpoint.spec(f"{module}.weight")
        if weight.dtype in FLOAT_SOURCES:
            _expect_shape(weight, (n, k))
            return StoredLinear(module=module, n=n, k=k, format="dense")
        fmt = format_in(self.checkpoint.tensors, module)
        if weight.dtype not in ("F8_E4M3", "U8") or fmt is None:
            raise TensorError(
                f"{weight.name}: dtype {weight.dtype}, expected BF16, F16, F32, F8_E4M3 (FP8) or"
                " U8 (NVFP4)"
            )
        for name, _, shape in WEIGHT_FORMATS[fmt].tensors(module, n, k):
            if not name.endswith(("input_scale", "weight_scale_2")):
                _expect_shape(self.checkpoint.spec(name), shape)
        if fmt == "nvfp4":
            self.checkpoint.spec(f"{module}.weight_scale_2")
        found = WEIGHT_FORMATS[fmt].rounding
        if found not in self._declared:
            says = " or ".join(sorted(self._declared)) or "that nothing is quantized"
            raise TensorError(
                f"{weight.name}: stored as {found}, but the config says {says}; restore the config"
                " files that belong to these weights"
            )
        return StoredLinear(module=module, n=n, k=k, format=found)

    def _mlp(
        self,
        fill: Fill,
        modules: Sequence[str],
        width: int,
        sharing: Sequence[str],
        experts: int | None = None,
    ) -> tuple[LinearWeight, LinearWeight]:
        """gate_up and down of one MLP, or stacks of several; `sharing` one input scale each."""
        hidden = self.config.hidden_size

        def linear(names: tuple[str, ...], n: int, k: int) -> LinearWeight:
            parts = [self._stored(f"{module}.{name}", n, k) for module in modules for name in names]
            scaled = [f"{module}.{name}" for module in sharing for name in names]
            return self._linear(fill, parts, scaled, experts)

        gate_up = linear(("gate_proj", "up_proj"), width, hidden)
        return gate_up, linear(("down_proj",), hidden, width)

    def _linear(
        self,
        fill: Fill,
        parts: Sequence[StoredLinear],
        sharing: Sequence[str] = (),
        experts: int | None = None,
    ) -> LinearWeight:
        """One weight [N, K] from parts whose rows follow each other; with `experts`, [E, N, K].

        `sharing` names the modules that share an input scale, if they are not just the parts.
        """
        kind, k, rows = parts[0].format, parts[0].k, [part.n for part in parts]
        for part in parts:
            if part.format != kind:
                raise TensorError(
                    f"{part.module} is {part.format} but {parts[0].module} is {kind};"
                    " engines fuse them, so they must share a format"
                )
        lead = (sum(rows),) if experts is None else (experts, sum(rows) // experts)

        def gather(suffix: str, width: int, dtype: torch.dtype) -> torch.Tensor:
            out = fill.buffer((*lead, width), dtype)
            for part, place in zip(parts, out.view(-1, width).split_with_sizes(rows), strict=True):
                fill.read(f"{part.module}.{suffix}", place)
            return out

        if kind == "dense":
            return DenseWeight(w_NK=gather("weight", k, self.dtype))
        if kind == "fp8":
            return Fp8Weight(
                codes=gather("weight", k, torch.float8_e4m3fn),
                scale=gather("weight_scale", 1, torch.float32),
            )
        if kind != "nvfp4":
            fmt = WEIGHT_FORMATS[kind]
            groups = fmt.scale_shape(1, k)[1]
            return GroupFp8Weight(
                codes=gather("weight", k, torch.float8_e4m3fn),
                scale=gather(fmt.scale, groups, TORCH_DTYPES[fmt.scale_dtype]),
                group=fmt.block[1],
            )
        scales = [
            torch.full(
                (part.n,),
                _scalar(self.checkpoint, f"{part.module}.weight_scale_2"),
                dtype=torch.float32,
            )
            for part in parts
        ]
        names = [f"{module}.input_scale" for module in sharing or [part.module for part in parts]]
        input_scale = None
        if any(name in self.checkpoint.tensors for name in names):
            largest = max(_scalar(self.checkpoint, name) for name in names)
            input_scale = torch.tensor(largest, dtype=torch.float32)
        return Nvfp4Weight(
            codes=gather("weight", k // 2, torch.uint8),
            block_scale=gather("weight_scale", k // NVFP4_BLOCK, torch.float8_e4m3fn),
            global_scale=torch.cat(scales).reshape(*lead, 1),
            input_scale=input_scale,
        )
