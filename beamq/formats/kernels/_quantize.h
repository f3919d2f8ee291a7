/* Quantizing and decoding: NVFP4 in tiles of blocks, FP8 row by row. See _core.h for the idea.
 *
 * A tile is 64 blocks of 16 values, so that loops over blocks and over elements fill whole vectors.
 * The last, partial tile runs on a zero-padded copy.
 */
#ifndef BEAMQ_QUANTIZE_H
#define BEAMQ_QUANTIZE_H

#include "_encode.h"

/* ---- NVFP4 --------------------------------------------------------------------------------- */

typedef struct {
    int64_t saturated; /* blocks whose ideal scale rounds above 448 */
    int64_t underflow; /* blocks whose ideal scale would round to 0 */
    int64_t zero;      /* blocks of zeros */
    int64_t nonfinite; /* blocks with a NaN or an infinity */
} nvfp4_counts;

/* One level of the tree: n maxima of neighbours. */
INLINE void pair_max16(const int16_t *in, int16_t *out, int n) {
    for (int i = 0; i < n; i++) out[i] = in[2 * i] > in[2 * i + 1] ? in[2 * i] : in[2 * i + 1];
}

INLINE void pair_max32(const int32_t *in, int32_t *out, int n) {
    for (int i = 0; i < n; i++) out[i] = in[2 * i] > in[2 * i + 1] ? in[2 * i] : in[2 * i + 1];
}

/* amax of each block of a tile, as a tree of pairwise maxima of magnitude bits. */
INLINE void tile_amax(const void *src, float *amax, int dtype) {
    const u32_any *p = src;
    if (dtype == F32) {
        int32_t a[TILE], b[TILE / 2], c[TILE / 4], d[TILE / 8], e[TILE_BLOCKS];
        for (int i = 0; i < TILE; i++) a[i] = (int32_t)(p[i] & ABS_MASK);
        pair_max32(a, b, TILE / 2);
        pair_max32(b, c, TILE / 4);
        pair_max32(c, d, TILE / 8);
        pair_max32(d, e, TILE_BLOCKS);
        for (int i = 0; i < TILE_BLOCKS; i++) amax[i] = as_float((u32)e[i]);
        return;
    }
    int16_t b[TILE / 2], c[TILE / 4], d[TILE / 8], e[TILE_BLOCKS];
    for (int i = 0; i < TILE / 2; i++) { /* two values at a time */
        int16_t low = (int16_t)(p[i] & 0x7FFFu), high = (int16_t)((p[i] >> 16) & 0x7FFFu);
        b[i] = low > high ? low : high;
    }
    pair_max16(b, c, TILE / 4);
    pair_max16(c, d, TILE / 8);
    pair_max16(d, e, TILE_BLOCKS);
    for (int i = 0; i < TILE_BLOCKS; i++) amax[i] = native_to_float((u32)(u16)e[i], dtype);
}

/* Block scales of a tile by the `max` rule. */
INLINE void nvfp4_scales_tile(const void *src, int dtype, float global, u8 *scales,
                              nvfp4_counts *counts) {
    float amax[TILE_BLOCKS];
    int32_t saturated = 0, underflow = 0, zero = 0, nonfinite = 0;
    const float six_global = 6.0f * global;

    tile_amax(src, amax, dtype);
    for (int b = 0; b < TILE_BLOCKS; b++) {
        float ideal = amax[b] / six_global;
        int32_t is_nonfinite = as_bits(amax[b]) >= INF_BITS;
        nonfinite += is_nonfinite;
        zero += as_bits(amax[b]) == 0u;
        saturated += (ideal > 464.0f) & !is_nonfinite; /* above this, nearest is beyond 448 */
        underflow += (ideal <= 0x1p-10f) & (ideal > 0.0f);
        ideal = ideal == 0.0f ? 1.0f : ideal;
        ideal = ideal < E4M3_MIN ? E4M3_MIN : ideal;
        scales[b] = (u8)e4m3_code(ideal);
    }
    counts->saturated += saturated;
    counts->underflow += underflow;
    counts->zero += zero;
    counts->nonfinite += nonfinite;
}

INLINE void nvfp4_quantize_tile(const void *src, int dtype, float global, u8 *codes, u8 *scales,
                                nvfp4_counts *counts) {
    float step[TILE_BLOCKS];
    nvfp4_scales_tile(src, dtype, global, scales, counts);
    for (int b = 0; b < TILE_BLOCKS; b++) step[b] = e4m3_value(scales[b]) * global;
    nvfp4_encode_tile(src, dtype, step, codes);
}

/* Blocks don't cross rows (k % 16 == 0), so a tensor is one long run of blocks. */
INLINE nvfp4_counts nvfp4_quantize_body(const void *src, size_t blocks, int dtype, float global,
                                        u8 *codes, u8 *scales) {
    nvfp4_counts counts = {0, 0, 0, 0};
    const size_t stride = item_size(dtype) * BLOCK;
    const char *p = src;
    size_t b = 0;
    for (; b + TILE_BLOCKS <= blocks; b += TILE_BLOCKS)
        nvfp4_quantize_tile(p + b * stride, dtype, global, codes + b * BLOCK / 2, scales + b,
                            &counts);
    const size_t rest = blocks - b;
    if (rest) {
        u32 padded[TILE] = {0};
        u8 tail_codes[TILE_BYTES], tail_scales[TILE_BLOCKS];
        memcpy(padded, p + b * stride, rest * stride);
        nvfp4_quantize_tile(padded, dtype, global, tail_codes, tail_scales, &counts);
        memcpy(codes + b * BLOCK / 2, tail_codes, rest * BLOCK / 2);
        memcpy(scales + b, tail_scales, rest);
        counts.zero -= (int64_t)(TILE_BLOCKS - rest);
    }
    return counts;
}

/* code * block scale: exact in FP32. */
INLINE void nvfp4_decode_tile(const u8 *codes, const u8 *scales, float *values) {
    float scale[TILE_BLOCKS], spread_scale[TILE];
    u8 nibbles[TILE];
    for (int b = 0; b < TILE_BLOCKS; b++) scale[b] = e4m3_value(scales[b]);
    spread(scale, spread_scale);
    for (int i = 0; i < TILE_BYTES; i++) {
        nibbles[2 * i] = codes[i] & 15u;
        nibbles[2 * i + 1] = codes[i] >> 4;
    }
    for (int i = 0; i < TILE; i++) values[i] = e2m1_value(nibbles[i]) * spread_scale[i];
}

INLINE void store(void *out, size_t i, float value, int dtype) {
    if (dtype == BF16)
        ((u16_any *)out)[i] = (u16)to_bf16(as_bits(value));
    else
        ((u32_any *)out)[i] = as_bits(value);
}

INLINE void nvfp4_dequantize_body(const u8 *codes, const u8 *scales, size_t blocks, float global,
                                  void *out, int dtype) {
    for (size_t b = 0; b < blocks; b += TILE_BLOCKS) {
        const size_t width = blocks - b < TILE_BLOCKS ? blocks - b : TILE_BLOCKS;
        float values[TILE];
        u32 decoded[TILE];
        u8 tile_codes[TILE_BYTES] = {0}, tile_scales[TILE_BLOCKS] = {0};
        memcpy(tile_codes, codes + b * BLOCK / 2, width * BLOCK / 2);
        memcpy(tile_scales, scales + b, width);
        nvfp4_decode_tile(tile_codes, tile_scales, values);
        for (int i = 0; i < TILE; i++) store(decoded, (size_t)i, values[i] * global, dtype);
        memcpy((char *)out + b * BLOCK * item_size(dtype), decoded, width * BLOCK * item_size(dtype));
    }
}

/* ---- FP8 rows ------------------------------------------------------------------------------ */

typedef struct {
    int64_t nonfinite;
    int64_t first_nonfinite;
    int64_t zero_rows;
} fp8_counts;

INLINE fp8_counts fp8_quantize_body(const void *src, size_t rows, size_t k, int dtype, u8 *codes,
                                    u32_any *scales) {
    fp8_counts counts = {0, -1, 0};
    for (size_t r = 0; r < rows; r++) {
        const char *row = (const char *)src + r * k * item_size(dtype);
        amax_result m = amax_body(row, k, dtype);
        if (m.nonfinite) {
            if (!counts.nonfinite) counts.first_nonfinite = (int64_t)(r * k) + m.first_nonfinite;
            counts.nonfinite += m.nonfinite;
        }
        counts.zero_rows += m.amax == 0.0f;
        float scale = (m.amax == 0.0f ? 1.0f : m.amax) / E4M3_MAX;
        scale = scale < SCALE_FLOOR ? SCALE_FLOOR : scale;
        scales[r] = as_bits(scale);
        fp8_encode(row, k, dtype, scale, codes + r * k);
    }
    return counts;
}

INLINE void fp8_dequantize_body(const u8 *codes, const u32_any *scales, size_t rows, size_t k,
                                void *out, int dtype) {
    for (size_t r = 0; r < rows; r++) {
        const float scale = as_float(scales[r]);
        char *row = (char *)out + r * k * item_size(dtype);
        for (size_t i = 0; i < k; i++) store(row, i, e4m3_value(codes[r * k + i]) * scale, dtype);
    }
}

#endif
