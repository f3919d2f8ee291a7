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

/* ---- FP8 in groups: blocks of 128 x 128 with an F32 scale, or (MX) 32 values with a power of two */

enum { FP8_BLOCK = 128, MX_BLOCK = 32 };
#define BLOCK_AMAX_FLOOR 1e-10f

INLINE size_t group_rows(int mx) { return mx ? 1 : FP8_BLOCK; }
INLINE size_t group_columns(int mx) { return mx ? MX_BLOCK : FP8_BLOCK; }
INLINE size_t groups_of(size_t n, size_t size) { return (n + size - 1) / size; }
INLINE size_t smaller_of(size_t a, size_t b) { return a < b ? a : b; }

/* The byte e + 127 of the least 2^e with 448 * 2^e >= amax, which is finite. 448 is 1.75 * 2^8. */
INLINE u8 mx_byte(float amax) {
    const u32 bits = as_bits(amax);
    const int32_t e = (int32_t)(bits >> 23) - 8 + ((bits & 0x7FFFFFu) > 0x600000u);
    return (u8)(e < 0 ? 0 : e);
}

/* 2^(byte - 127); 255 is NaN. */
INLINE float mx_value(u8 byte) {
    return as_float(byte == 255 ? QUIET_NAN : byte ? (u32)byte << 23 : 0x400000u);
}

INLINE float group_scale(const void *scales, size_t i, int mx) {
    return mx ? mx_value(((const u8 *)scales)[i]) : as_float(((const u32_any *)scales)[i]);
}

/* The scale is a power of two, so the product is the quotient. */
INLINE void mx_encode(const void *src, int dtype, float reciprocal, u8 *codes) {
    for (size_t i = 0; i < MX_BLOCK; i++) {
        u32 bits = load_bits(src, i, dtype);
        codes[i] = (u8)(e4m3_code(as_float(bits & ABS_MASK) * reciprocal) | (bits >> 24 & 0x80u));
    }
}

/* amax of the finite values of `height` rows of `width` values; what is not finite is counted. */
INLINE float group_amax(const char *src, size_t first, size_t height, size_t width, size_t k,
                        int dtype, fp8_counts *counts) {
    float amax = 0.0f;
    for (size_t r = 0; r < height; r++) {
        const size_t at = first + r * k;
        amax_result m = amax_body(src + at * item_size(dtype), width, dtype);
        if (m.nonfinite) {
            const int64_t place = (int64_t)at + m.first_nonfinite;
            if (!counts->nonfinite || place < counts->first_nonfinite)
                counts->first_nonfinite = place;
            counts->nonfinite += m.nonfinite;
        }
        amax = m.amax > amax ? m.amax : amax;
    }
    return amax;
}

/* zero_rows counts groups of zeros. */
INLINE fp8_counts fp8_quantize_groups_body(const void *src, size_t rows, size_t k, int dtype,
                                           int mx, u8 *codes, void *scales) {
    fp8_counts counts = {0, -1, 0};
    size_t place = 0;
    for (size_t row = 0; row < rows; row += group_rows(mx))
        for (size_t column = 0; column < k; column += group_columns(mx), place++) {
            const size_t height = mx ? 1 : smaller_of(rows - row, FP8_BLOCK);
            const size_t width = mx ? MX_BLOCK : smaller_of(k - column, FP8_BLOCK);
            const size_t first = row * k + column;
            const float amax = group_amax(src, first, height, width, k, dtype, &counts);
            counts.zero_rows += amax == 0.0f;
            if (mx) {
                const u8 byte = mx_byte(amax);
                ((u8 *)scales)[place] = byte;
                mx_encode((const char *)src + first * item_size(dtype), dtype,
                          mx_value((u8)(254 - byte)), codes + first);
                continue;
            }
            const float scale = (amax < BLOCK_AMAX_FLOOR ? BLOCK_AMAX_FLOOR : amax) / E4M3_MAX;
            ((u32_any *)scales)[place] = as_bits(scale);
            for (size_t r = 0; r < height; r++) {
                const size_t at = first + r * k;
                fp8_encode((const char *)src + at * item_size(dtype), width, dtype, scale,
                           codes + at);
            }
        }
    return counts;
}

INLINE void fp8_dequantize_groups_body(const u8 *codes, const void *scales, size_t rows, size_t k,
                                       int mx, void *out, int dtype) {
    const size_t across = groups_of(k, group_columns(mx));
    for (size_t row = 0; row < rows; row++)
        for (size_t c = 0; c < across; c++) {
            const float scale = group_scale(scales, row / group_rows(mx) * across + c, mx);
            const size_t first = c * group_columns(mx);
            const size_t width = mx ? MX_BLOCK : smaller_of(k - first, FP8_BLOCK);
            for (size_t i = 0; i < width; i++) {
                const size_t at = row * k + first + i;
                store(out, at, e4m3_value(codes[at]) * scale, dtype);
            }
        }
}

#endif
