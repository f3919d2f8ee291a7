"""NVFP4 activations on NVIDIA GPUs, as the values that a tensor core would multiply.

In:  BF16 tokens [T, K] and the static global scale, on the device.
Out: BF16 [T, K], code * block_scale of `formats.nvfp4.quantize`, which is exact; a token with a NaN
     or infinity is all zeros.

The one idea: it is the kernel that quantizes activations with another way out: codes are decoded
at once, so that 32 bytes a block are read and 32 are written, where plain torch passes over FP32
copies a dozen times. A program owns a token, and so knows whether all of it is finite.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from beamq.formats.kernels.gpu_nvfp4 import BF16, as_float, block_amax, encode_block, load_words
from beamq.formats.numerics import NVFP4_BLOCK

_WORDS = tl.constexpr(8)


@triton.jit
def _decoded(word: tl.tensor, AT: tl.constexpr, scale: tl.tensor) -> tl.tensor:
    """Bits of code * scale. A code's bits are an FP32 number 2^-126 times its value."""
    nibble = (word >> (4 * AT)) & 15
    tiny = as_float(((nibble & 7) << 22) | ((nibble & 8) << 28))
    return ((tiny * 8.507059173023462e37) * scale).to(tl.int32, bitcast=True)


@triton.jit
def _four_pairs(word: tl.tensor, scale: tl.tensor, TILE: tl.constexpr) -> tl.tensor:
    """[TILE, 4] words of BF16 pairs from a word of eight codes."""
    p0 = _pair(word, 0, scale)
    p1 = _pair(word, 2, scale)
    p2 = _pair(word, 4, scale)
    p3 = _pair(word, 6, scale)
    return tl.reshape(tl.join(tl.join(p0, p2), tl.join(p1, p3)), (TILE, 4))


@triton.jit
def _pair(word: tl.tensor, AT: tl.constexpr, scale: tl.tensor) -> tl.tensor:
    low = _decoded(word, AT, scale)
    return ((low >> 16) & 0xFFFF) | (_decoded(word, AT + 1, scale) & -65536)


@triton.jit
def operand_kernel(
    src: tl.tensor,
    out: tl.tensor,
    global_scale: tl.tensor,
    BLOCKS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """One token of BLOCKS blocks a program, one block a thread."""
    block = tl.arange(0, TILE)
    inside = block < BLOCKS
    src += tl.program_id(0).to(tl.int64) * (BLOCKS * _WORDS)
    out += tl.program_id(0).to(tl.int64) * (BLOCKS * _WORDS)
    words = load_words(src, block * _WORDS, inside, _WORDS, TILE, False)
    peak = block_amax(words, _WORDS, BF16)
    # Beyond the row blocks are zeros. A NaN is no less than infinity.
    finite = tl.min((peak < float("inf")).to(tl.int32), axis=0)
    low, high, scale, _ = encode_block(words, peak, tl.load(global_scale), _WORDS, BF16)
    factor = scale.to(tl.float32)
    place = out + (block[:, None] * _WORDS + tl.arange(0, 4)[None, :])
    tl.store(place, _four_pairs(low, factor, TILE) * finite, mask=inside[:, None])
    tl.store(place + 4, _four_pairs(high, factor, TILE) * finite, mask=inside[:, None])


def nvfp4_operand(x_TK: torch.Tensor, global_scale: torch.Tensor) -> torch.Tensor:
    """`model.linear.nvfp4_operand` in BF16, and zeros for tokens that are not finite.

    `global_scale` is FP32 [] on the device. Raises `ValueError` for what is not contiguous BF16
    [T, K], K a multiple of 16.
    """
    if x_TK.dtype != torch.bfloat16 or x_TK.dim() != 2 or not x_TK.is_contiguous():
        raise ValueError(f"tokens {list(x_TK.shape)} {x_TK.dtype}; expected contiguous BF16 [T, K]")
    if x_TK.shape[1] % NVFP4_BLOCK:
        raise ValueError(f"K is {x_TK.shape[1]}; NVFP4 needs a multiple of {NVFP4_BLOCK}")
    out_TK = torch.empty_like(x_TK)
    blocks = x_TK.shape[1] // NVFP4_BLOCK
    tile = max(32, triton.next_power_of_2(blocks))
    if out_TK.numel():
        operand_kernel[(x_TK.shape[0],)](
            x_TK.view(torch.int32),
            out_TK.view(torch.int32),
            global_scale.reshape(1),
            BLOCKS=blocks,
            TILE=tile,
            num_warps=min(16, tile // 32),
        )
    return out_TK
