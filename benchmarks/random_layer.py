"""One Beam layer with random weights in any format, made on the device it will run on."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace

import torch

from beamq import devices
from beamq.beam.config import BeamConfig
from beamq.formats import fp8, nvfp4
from beamq.formats.numerics import NVFP4_BLOCK
from beamq.model.attention import AttentionWeights
from beamq.model.gemm.backend import DenseWeight, Fp8Weight, LinearWeight, Nvfp4Weight
from beamq.model.layer import DenseMlp, LayerWeights, SparseMlp
from beamq.model.moe import ExpertSlice, RouterWeights

REAL = BeamConfig(
    hidden_size=5120,
    intermediate_size=20480,
    moe_intermediate_size=2560,
    num_layers=1,
    vocab_size=151936,
    num_heads=48,
    num_kv_heads=8,
    head_dim=128,
    num_experts=256,
    top_k=8,
    n_group=8,
    topk_group=4,
    routed_scaling_factor=2.5,
    norm_topk_prob=True,
    sliding_window=512,
    rms_norm_eps=1e-6,
    final_logit_softcapping=30.0,
    rope_theta=10000.0,
    tie_word_embeddings=False,
    max_position_embeddings=1 << 20,
    layer_types=("sliding_attention",),
    mlp_layer_types=("sparse",),
    dtype="bfloat16",
)
"""The real model's widths, one layer."""

SMALL = replace(
    REAL,
    hidden_size=256,
    intermediate_size=512,
    moe_intermediate_size=128,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    num_experts=16,
    top_k=4,
    n_group=4,
    topk_group=2,
    sliding_window=96,
)
"""A layer for tests."""

INPUT_AMAX = 6.0


def tensor_bytes(tree: object) -> int:
    """Bytes of all tensors in a dataclass and those within."""
    if isinstance(tree, torch.Tensor):
        return tree.nbytes
    if isinstance(tree, tuple):
        return sum(map(tensor_bytes, tree))
    if is_dataclass(tree):
        return sum(tensor_bytes(getattr(tree, field.name)) for field in fields(tree))
    return 0


def random_layer(
    config: BeamConfig,
    kind: str,
    mlp: str,
    fmt: str,
    device: torch.device,
    *,
    seed: int = 0,
) -> LayerWeights:
    """`kind` is "sliding" or "full", `mlp` "dense" or "sparse", `fmt` "bf16", "fp8" or "nvfp4"."""
    torch.manual_seed(seed)
    hidden, q, kv = config.hidden_size, config.q_dim, config.kv_dim

    def norm(width: int) -> torch.Tensor:
        return (1 + 0.2 * torch.randn(width, device=device)).bfloat16()

    def linear(*shape: int) -> LinearWeight:
        return random_weight(shape, fmt, device)

    attention = AttentionWeights(
        window=config.sliding_window if kind == "sliding" else None,
        qkv_gate=linear(2 * q + 2 * kv, hidden),
        o=linear(hidden, q),
        q_norm=norm(config.head_dim),
        k_norm=norm(config.head_dim),
        gate_bias=torch.randn(config.num_heads, device=device).bfloat16(),
    )
    block: DenseMlp | SparseMlp
    if mlp == "dense":
        width = config.intermediate_size
        block = DenseMlp(gate_up=linear(2 * width, hidden), down=linear(hidden, width))
    else:
        experts, width = config.num_experts, config.moe_intermediate_size
        router = RouterWeights(
            weight_EK=torch.randn(experts, hidden, device=device) * hidden**-0.5,
            bias_E=torch.randn(experts, device=device) * 0.01,
        )
        part = ExpertSlice(
            first=0,
            count=experts,
            gate_up=linear(experts, 2 * width, hidden),
            down=linear(experts, hidden, width),
        )
        block = SparseMlp(router=router, experts=(part,))
    return LayerWeights(
        index=3,
        attention=attention,
        mlp=block,
        input_norm=norm(hidden),
        post_attention_norm=norm(hidden),
        pre_mlp_norm=norm(hidden),
        post_mlp_norm=norm(hidden),
    )


def random_weight(shape: tuple[int, ...], fmt: str, device: torch.device) -> LinearWeight:
    """[N, K] or, of all experts, [E, N, K] in one of the formats."""
    if fmt == "bf16":
        return bf16_weight(shape, device)
    return fp8_weight(shape, device) if fmt == "fp8" else nvfp4_weight(shape, device)


def bf16_weight(shape: tuple[int, ...], device: torch.device) -> DenseWeight:
    """Values of standard deviation K ** -0.5."""
    w = torch.empty(shape, device=device, dtype=torch.bfloat16)
    for place, matrix in zip(w.view(-1, *shape[-2:]), _matrices(shape, device), strict=True):
        place.copy_(matrix)
    return DenseWeight(w_NK=w)


def fp8_weight(shape: tuple[int, ...], device: torch.device) -> Fp8Weight:
    """The same values with a scale for each row."""
    pairs = [_fp8(matrix) for matrix in _matrices(shape, device)]
    codes, scale = (torch.stack(parts) for parts in zip(*pairs, strict=True))
    return Fp8Weight(codes=codes.view(shape), scale=scale.view(*shape[:-1], 1))


def nvfp4_weight(shape: tuple[int, ...], device: torch.device) -> Nvfp4Weight:
    """The same values with a global scale for each matrix, and an input scale."""
    *lead, n, k = shape
    found = [_nvfp4(matrix) for matrix in _matrices(shape, device)]
    blocks = torch.stack([q.block_scale.view(torch.uint8) for q in found])
    return Nvfp4Weight(
        codes=torch.stack([q.codes for q in found]).view(*lead, n, k // 2),
        block_scale=blocks.view(*lead, n, k // NVFP4_BLOCK).view(torch.float8_e4m3fn),
        global_scale=torch.stack([q.global_scale.expand(n, 1) for q in found]).view(*lead, n, 1),
        input_scale=nvfp4.global_scale_from_amax(INPUT_AMAX).to(device),
    )


def _matrices(shape: tuple[int, ...], device: torch.device) -> Iterator[torch.Tensor]:
    """One after the other, so that no more than one exists in two formats."""
    *lead, n, k = shape
    for _ in range(math.prod(lead)):
        yield torch.randn(n, k, device=device, dtype=torch.bfloat16).mul_(k**-0.5)


def _fp8(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if devices.serves(w):
        from beamq.formats.kernels import gpu

        return gpu.fp8_quantize_rows(w)
    return fp8.quantize_rows(w)


def _nvfp4(w: torch.Tensor) -> nvfp4.QuantizedTensor:
    if devices.serves(w):
        from beamq.formats.kernels import gpu

        return gpu.nvfp4_quantize(w, nvfp4.global_scale_from_amax(gpu.amax(w)))
    return nvfp4.quantize(w, nvfp4.global_scale_from_amax(w.float().abs().max()))
