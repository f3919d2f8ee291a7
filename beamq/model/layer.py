"""One Beam decoder layer, and the head after the last one.

In: hidden states `h_TK` of packed tokens, a `SequenceLayout`, one layer's weights. Out: the next
hidden states, in the same dtype.

Beam's residual stream is an average: counting the embedding as the first, the n-th addition is
`h * sqrt((n-1)/n) + x * sqrt(1/n)`, both products rounded to the activation dtype before they are
added. Layer l makes additions 2l+2 (attention) and 2l+3 (MLP). Each sublayer has a norm before it
and one after it.

Rounding points are those of transformers' BeamForCausalLM, in FP32 and in BF16: norms, SwiGLU,
RoPE, query scale, router and softcap are computed in FP32 whatever the dtype. Where transformers
leaves an order of sums open (attention kernels, the sum over experts), results agree to FP32
rounding.

Many batches can share a slice of experts: `attention_half`, then `dense_mlp` or `moe.choose /
dispatch / add_slice / finish`, and `close_mlp`. `decoder_layer` does all of it for one batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from beamq import devices
from beamq.beam.config import BeamConfig
from beamq.model.attention import AttentionWeights, attention
from beamq.model.context import PassContext, SequenceLayout
from beamq.model.gemm.backend import CHUNK_ELEMENTS, LinearWeight, swiglu
from beamq.model.gemm.reference import product
from beamq.model.moe import ExpertSlice, RouterWeights, moe


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseMlp:
    """gate_up [2I, K] (gate rows first) and down [K, I]."""

    gate_up: LinearWeight
    down: LinearWeight


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseMlp:
    """Router and experts. `experts` is a tuple, or an iterator that delivers slices once."""

    router: RouterWeights
    experts: Iterable[ExpertSlice]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """All of one layer. Norm weights are in the activation dtype."""

    index: int
    attention: AttentionWeights
    mlp: DenseMlp | SparseMlp
    input_norm: torch.Tensor
    post_attention_norm: torch.Tensor
    pre_mlp_norm: torch.Tensor
    post_mlp_norm: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """Final norm and output matrix [V, K], in the activation dtype."""

    norm: torch.Tensor
    output_VK: torch.Tensor


def decoder_layer(
    h_TK: torch.Tensor, weights: LayerWeights, layout: SequenceLayout, context: PassContext
) -> torch.Tensor:
    """One whole layer for one batch of packed tokens."""
    h_TK = attention_half(h_TK, weights, layout, context)
    x_TK = mlp_input(h_TK, weights, context.config)
    if isinstance(weights.mlp, DenseMlp):
        out_TK = dense_mlp(x_TK, weights.mlp, context, weights.index)
    else:
        out_TK = moe(x_TK, weights.mlp.router, weights.mlp.experts, context, weights.index)
    return close_mlp(h_TK, out_TK, weights, context.config)


def attention_half(
    h_TK: torch.Tensor, weights: LayerWeights, layout: SequenceLayout, context: PassContext
) -> torch.Tensor:
    """Norm, attention, norm, residual."""
    config, index = context.config, weights.index
    out_TK = attention(
        norm(h_TK, weights.input_norm, config), weights.attention, layout, context, index
    )
    return _close(h_TK, out_TK, weights.post_attention_norm, 2 * index + 2, config)


def mlp_input(h_TK: torch.Tensor, weights: LayerWeights, config: BeamConfig) -> torch.Tensor:
    """The normed input of the MLP or MoE sublayer."""
    return norm(h_TK, weights.pre_mlp_norm, config)


def dense_mlp(x_TK: torch.Tensor, mlp: DenseMlp, context: PassContext, layer: int) -> torch.Tensor:
    """Dense SwiGLU, product in FP32."""
    for observer in context.observers:
        observer.linear_input(layer, "gate_up", x_TK)
    active_TI = swiglu(context.gemm.linear(x_TK, mlp.gate_up))
    for observer in context.observers:
        observer.linear_input(layer, "down_proj", active_TI)
    return context.gemm.linear(active_TI, mlp.down)


def close_mlp(
    h_TK: torch.Tensor, out_TK: torch.Tensor, weights: LayerWeights, config: BeamConfig
) -> torch.Tensor:
    """Norm after the MLP sublayer, residual."""
    return _close(h_TK, out_TK, weights.post_mlp_norm, 2 * weights.index + 3, config)


def norm(x: torch.Tensor, weight: torch.Tensor, config: BeamConfig) -> torch.Tensor:
    """RMSNorm over the last axis: FP32 inside, one rounding to x's dtype."""
    return F.rms_norm(x, weight.shape, weight, config.rms_norm_eps)


def _close(
    h: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, n: int, config: BeamConfig
) -> torch.Tensor:
    """Norm of a sublayer's output, then the n-th addition; `x` may be used up."""
    if devices.serves(h) and devices.serves(x):
        from beamq.model import triton_layer  # Triton

        return triton_layer.close_sublayer(h, x, weight, n, config.rms_norm_eps)
    return residual_add(h, norm(x, weight, config), n)


def residual_add(h: torch.Tensor, x: torch.Tensor, n: int) -> torch.Tensor:
    """The n-th addition to the stream; `x` is used up, `h` is not."""
    return x.mul_(1.0 / math.sqrt(n)).add_(h * math.sqrt((n - 1) / n))


def head_logits(h_TK: torch.Tensor, head: Head, config: BeamConfig) -> torch.Tensor:
    """FP32 logits [T, V]: final norm, output matrix, softcap `c * tanh(logits / c)` if any."""
    cap = config.final_logit_softcapping
    x_TK = norm(h_TK, head.norm, config)
    vocab = head.output_VK.shape[0]
    out = torch.empty(x_TK.shape[0], vocab, dtype=torch.float32, device=x_TK.device)
    step = max(1, CHUNK_ELEMENTS // vocab)
    for start in range(0, x_TK.shape[0], step):
        raw = product(x_TK[start : start + step], head.output_VK)
        logits = raw.float()
        out[start : start + step] = logits if cap is None else logits.div_(cap).tanh_().mul_(cap)
    return out
