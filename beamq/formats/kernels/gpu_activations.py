"""NVFP4 activations on NVIDIA GPUs: codes, and block scales where tensor cores look for them.

In:  BF16 tokens [T, K] (or gate and up side by side, [T, 2K]), the static global scale, and, for
     experts, which token each row reads and where its scales go.
Out: codes [S, K/2] row by row, and E4M3 block scales in the swizzled layout: tiles of 128 rows by
     4 blocks, 512 bytes each; row r of a tile lies at (r % 32) * 16 + (r // 32) * 4. Tiles of a
     group of rows (an expert's tokens) start at a tile boundary, so each group is padded to 128
     rows on its own; padding is whatever the buffer held (zeros).

The one idea: it is the weights' kernel, with another way in (gather, SwiGLU) and another way out
(swizzle), so it gives the same bytes as formats/nvfp4.py. SwiGLU's product is rounded to BF16
first, which is what the forward pass shows to calibration.
"""

from __future__ import annotations

import triton
import triton.language as tl

from beamq.formats.kernels.gpu_fp8 import swiglu
from beamq.formats.kernels.gpu_nvfp4 import BF16, as_float, block_amax, encode_block, load_words

_WORDS = tl.constexpr(8)


@triton.jit
def _bits(value: tl.tensor) -> tl.tensor:
    """BF16 bits in the low half of an int32."""
    return value.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@triton.jit
def _swiglu_words(gate: tl.tuple, up: tl.tuple) -> tl.tuple:
    """SwiGLU of packed BF16 pairs, packed again."""
    out = ()
    for i in tl.static_range(_WORDS):
        low_gate = as_float(gate[i] << 16).to(tl.bfloat16)
        low = swiglu(low_gate, as_float(up[i] << 16))
        high_gate = as_float(gate[i] & -65536).to(tl.bfloat16)
        high = swiglu(high_gate, as_float(up[i] & -65536))
        pair = _bits(low) | (_bits(high) << 16)
        out = out + (pair,)  # type: ignore[assignment]  # noqa: RUF005 - Triton's have none
    return out


@triton.jit(do_not_specialize=["blocks"])
def quantize_tokens_kernel(
    src: tl.tensor,
    rows: tl.tensor,
    scale_rows: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    global_scale: tl.tensor,
    blocks: tl.tensor,
    PER_ROW: tl.constexpr,
    GATHER: tl.constexpr,
    PLACED: tl.constexpr,
    SWIGLU: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """`blocks` = rows * PER_ROW. GATHER: row s reads token rows[s]. PLACED: its scales go to row
    scale_rows[s] of the swizzled buffer, else to row s."""
    block = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = block < blocks
    row = block // PER_ROW
    column = (block % PER_ROW).to(tl.int32)
    token = row
    if GATHER:
        token = tl.load(rows + row, mask=inside, other=0).to(tl.int64)
    if SWIGLU:
        first = (token * (2 * PER_ROW) + column) * _WORDS
        gate = load_words(src, first, inside, _WORDS, TILE, False)
        up = load_words(src, first + PER_ROW * _WORDS, inside, _WORDS, TILE, False)
        words = _swiglu_words(gate, up)
    else:
        words = load_words(src, (token * PER_ROW + column) * _WORDS, inside, _WORDS, TILE, False)
    peak = block_amax(words, _WORDS, BF16)
    low, high, scale, _ = encode_block(words, peak, tl.load(global_scale), _WORDS, BF16)
    place = codes + (block[:, None] * 2 + tl.arange(0, 2)[None, :])
    tl.store(place, tl.join(low, high), mask=inside[:, None])
    if PLACED:
        row = tl.load(scale_rows + row, mask=inside, other=0).to(tl.int64)
    tiles: tl.constexpr = (PER_ROW + 3) // 4
    tile = (row // 128) * tiles + column // 4
    lane = (row % 32) * 16 + ((row % 128) // 32) * 4 + column % 4
    tl.store(scales + tile * 512 + lane, scale.to(tl.int8, bitcast=True), mask=inside)


@triton.jit
def swiglu_kernel(src: tl.tensor, out: tl.tensor, WIDTH: tl.constexpr, CHUNK: tl.constexpr) -> None:
    """out[s, i] = silu(src[s, i]) * src[s, WIDTH + i], FP32 inside; one row a program."""
    CHUNKS: tl.constexpr = (WIDTH + CHUNK - 1) // CHUNK
    row = tl.program_id(0).to(tl.int64)
    src += row * (2 * WIDTH)
    out += row * WIDTH
    for i in tl.static_range(CHUNKS):
        at = i * CHUNK + tl.arange(0, CHUNK)
        if (i + 1) * CHUNK <= WIDTH:
            tl.store(out + at, swiglu(tl.load(src + at), tl.load(src + WIDTH + at)))
        else:
            inside = at < WIDTH
            gate = tl.load(src + at, mask=inside, other=0.0)
            up = tl.load(src + WIDTH + at, mask=inside, other=0.0)
            tl.store(out + at, swiglu(gate, up), mask=inside)
