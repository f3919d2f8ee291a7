/* Comparing a quantized tensor with its source, element by element, in FP64.
 *
 * The definition of "in bound" is nvfp4_within and fp8_within: between the midpoints to the
 * neighbouring codes, times the scale. Applying it to every element would be slow, so a tile is
 * first quantized again with the stored scales: the codes that this gives are in bound (they are
 * the nearest, and the slack below covers FP32's rounding of the boundaries), so a tile that
 * matches them, and whose amax is not beyond the grid, is done. Only the rest is judged singly.
 *
 * Swept scales may clip: then any value beyond the grid may have its end, but a block scale has to
 * be one of the sweep's candidates, or the whole block is out of bound.
 *
 * Sums are kept in 16 lanes, by position, and added in one order: the same on every machine.
 */
#ifndef BEAMQ_COMPARE_H
#define BEAMQ_COMPARE_H

#include "_quantize.h"
#include "_sweep_table.h"

typedef struct {
    double sum_sq_error, sum_sq_source, max_abs_error;
    int64_t out_of_bound, first_out_of_bound;
} comparison;

enum { LANES = 16 };
typedef struct {
    double error[LANES], source[LANES], worst[LANES];
} lane_sums;

/* x - value * scale; the product is exact in FP64. */
INLINE void add_errors(const float *x, const float *value, double scale, size_t n, lane_sums *sums) {
    for (size_t i = 0; i < n; i += LANES)
        for (size_t j = 0; j < LANES; j++) {
            double source = (double)x[i + j];
            double error = source - (double)value[i + j] * scale;
            double size = error < 0.0 ? -error : error;
            sums->error[j] += error * error;
            sums->source[j] += source * source;
            sums->worst[j] = size > sums->worst[j] ? size : sums->worst[j];
        }
}

INLINE void finish(comparison *r, const lane_sums *sums) {
    for (int j = 0; j < LANES; j++) {
        r->sum_sq_error += sums->error[j];
        r->sum_sq_source += sums->source[j];
        r->max_abs_error = sums->worst[j] > r->max_abs_error ? sums->worst[j] : r->max_abs_error;
    }
}

INLINE void note(comparison *r, size_t i) {
    if (r->out_of_bound++ == 0) r->first_out_of_bound = (int64_t)i;
}

INLINE void load_values(const void *src, size_t n, int dtype, float *x) {
    for (size_t i = 0; i < n; i++) x[i] = as_float(load_bits(src, i, dtype));
}

/* Half the gap between an E4M3 magnitude and the next one above it; 16 at the top (448). */
INLINE float e4m3_half_gap(u32 m) {
    u32 exponent = m >> 3;
    return as_float(((exponent ? exponent : 1u) + 116u) << 23);
}

/* low <= x <= high, seen along the code's sign. FP32 may have moved a boundary by two roundings of
 * 2^-24, or by a fraction of a denormal step. Nothing stands for an infinity. */
static int between(double low, double x, double high, u32 negative) {
    const double size = x < 0.0 ? -x : x, along = negative ? -x : x;
    const double slack = size * 0x1p-22 + 0x1p-146;
    return size < 0x1p128 && low - slack <= along && along <= high + slack;
}

static int nvfp4_within(float x, u32 code, u32 scale_code, float global, int swept) {
    static const double middle[8] = {-0.25, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0};
    const u32 m = code & 7u;
    const double block_scale = (double)e4m3_value(scale_code), step = block_scale * (double)global;
    if (!(step > 0.0)) return 0; /* a zero, negative or NaN scale */
    const double reach = block_scale + (double)e4m3_half_gap(scale_code);
    const double end = swept ? 0x1p128 : 6.0 * reach * (double)global;
    const double high = m < 7u ? middle[m + 1u] * step : end;
    return between(middle[m] * step, (double)x, high, code & 8u);
}

static int fp8_within(float x, u32 code, float scale) {
    const u32 m = code & 0x7Fu;
    if (m == 0x7Fu || !(scale > 0.0f)) return 0;
    const double value = (double)e4m3_value(m), above = (double)e4m3_half_gap(m);
    const double below = m ? (double)e4m3_half_gap(m - 1u) : above;
    return between((value - below) * (double)scale, (double)x, (value + above) * (double)scale,
                   code & 0x80u);
}

/* Largest magnitude that surely is within reach of the end of the grid; never infinite. */
INLINE float surely(float limit) { return limit < 0x1p127f ? limit * 0x1.ffffep-1f : 0x1p126f; }

/* Whether a block's scale is none that the sweep may choose; all-zero blocks have no choice. */
INLINE void foreign_scales(const void *src, int dtype, const u8 *scales, float global,
                           int32_t *foreign) {
    float amax[TILE_BLOCKS];
    u8 middle[TILE_BLOCKS];
    nvfp4_counts counts = {0, 0, 0, 0};
    tile_amax(src, amax, dtype);
    nvfp4_scales_tile(src, dtype, global, middle, &counts);
    for (int b = 0; b < TILE_BLOCKS; b++) {
        const int32_t offset = (int32_t)scales[b] - (int32_t)middle[b];
        const int32_t outside = (offset < -SWEEP_BELOW) | (offset > SWEEP_ABOVE);
        foreign[b] = outside | ((amax[b] == 0.0f) & (offset != 0));
    }
}

INLINE void nvfp4_compare_tile(const void *src, int dtype, const u8 *codes, const u8 *scales,
                               float global, int swept, size_t index, comparison *r,
                               lane_sums *sums) {
    float amax[TILE_BLOCKS], step[TILE_BLOCKS], x[TILE], value[TILE];
    int32_t foreign[TILE_BLOCKS] = {0}, doubtful = 0;
    u8 expected[TILE_BYTES];
    tile_amax(src, amax, dtype);
    if (swept) foreign_scales(src, dtype, scales, global, foreign);
    for (int b = 0; b < TILE_BLOCKS; b++) {
        const float scale = e4m3_value(scales[b]);
        const float end = surely(6.0f * (scale + e4m3_half_gap(scales[b])) * global);
        const float limit = swept ? 0x1.fffffep127f : end;
        step[b] = scale * global;
        doubtful += (!((amax[b] <= limit) & (step[b] > 0.0f))) | foreign[b];
    }
    nvfp4_encode_tile(src, dtype, step, expected);
    nvfp4_decode_tile(codes, scales, value);
    load_values(src, TILE, dtype, x);
    add_errors(x, value, (double)global, TILE, sums);
    if (!doubtful && memcmp(expected, codes, TILE_BYTES) == 0) return;
    for (size_t i = 0; i < TILE; i++) {
        u32 code = (u32)codes[i / 2] >> (4u * (i & 1u)) & 15u;
        if (foreign[i / BLOCK] || !nvfp4_within(x[i], code, scales[i / BLOCK], global, swept))
            note(r, index + i);
    }
}

INLINE comparison nvfp4_compare_body(const void *src, size_t blocks, int dtype, const u8 *codes,
                                     const u8 *scales, float global, int swept) {
    comparison r = {0.0, 0.0, 0.0, 0, -1};
    lane_sums sums = {{0}, {0}, {0}};
    const size_t stride = item_size(dtype) * BLOCK;
    const char *p = src;
    size_t b = 0;
    for (; b + TILE_BLOCKS <= blocks; b += TILE_BLOCKS)
        nvfp4_compare_tile(p + b * stride, dtype, codes + b * BLOCK / 2, scales + b, global,
                           swept, b * BLOCK, &r, &sums);
    const size_t rest = blocks - b;
    if (rest) { /* padding compares zeros with zeros at scale 1 */
        u32 padded[TILE] = {0};
        u8 tail_codes[TILE_BYTES] = {0}, tail_scales[TILE_BLOCKS];
        memset(tail_scales, 0x38, sizeof tail_scales);
        memcpy(padded, p + b * stride, rest * stride);
        memcpy(tail_codes, codes + b * BLOCK / 2, rest * BLOCK / 2);
        memcpy(tail_scales, scales + b, rest);
        nvfp4_compare_tile(padded, dtype, tail_codes, tail_scales, global, swept, b * BLOCK, &r,
                           &sums);
    }
    finish(&r, &sums);
    return r;
}

/* At most TILE values of one row; the arrays are padded with zeros to whole lanes. */
INLINE void fp8_compare_piece(const void *src, size_t n, int dtype, const u8 *codes, float scale,
                              size_t index, comparison *r, lane_sums *sums) {
    float x[TILE], value[TILE];
    u8 expected[TILE];
    load_values(src, n, dtype, x);
    for (size_t i = 0; i < n; i++) value[i] = e4m3_value(codes[i]);
    const size_t padded = (n + LANES - 1) / LANES * LANES;
    for (size_t i = n; i < padded; i++) x[i] = value[i] = 0.0f;
    add_errors(x, value, (double)scale, padded, sums);
    fp8_encode(src, n, dtype, scale, expected);
    const float amax = native_to_float(native_max(src, n, dtype), dtype);
    if (scale > 0.0f && amax <= surely(464.0f * scale) && memcmp(expected, codes, n) == 0) return;
    for (size_t i = 0; i < n; i++)
        if (!fp8_within(x[i], codes[i], scale)) note(r, index + i);
}

INLINE comparison fp8_compare_body(const void *src, size_t rows, size_t k, int dtype,
                                   const u8 *codes, const u32_any *scales) {
    comparison r = {0.0, 0.0, 0.0, 0, -1};
    lane_sums sums = {{0}, {0}, {0}};
    for (size_t row = 0; row < rows; row++)
        for (size_t start = 0; start < k; start += TILE) {
            const size_t n = k - start < TILE ? k - start : TILE, i = row * k + start;
            fp8_compare_piece((const char *)src + i * item_size(dtype), n, dtype, codes + i,
                              as_float(scales[row]), i, &r, &sums);
        }
    finish(&r, &sums);
    return r;
}

/* With `exact`, MX: a byte that is not the rule's puts its whole block out of bound. */
INLINE comparison fp8_compare_groups_body(const void *src, size_t rows, size_t k, int dtype, int mx,
                                          const u8 *codes, const void *scales, int exact) {
    comparison r = {0.0, 0.0, 0.0, 0, -1};
    lane_sums sums = {{0}, {0}, {0}};
    fp8_counts ignored = {0, -1, 0};
    const size_t across = groups_of(k, group_columns(mx));
    for (size_t row = 0; row < rows; row++)
        for (size_t c = 0; c < across; c++) {
            const size_t place = row / group_rows(mx) * across + c;
            const size_t i = row * k + c * group_columns(mx);
            const size_t n = mx ? MX_BLOCK : smaller_of(k - c * group_columns(mx), FP8_BLOCK);
            const void *values = (const char *)src + i * item_size(dtype);
            if (mx && exact &&
                mx_byte(group_amax(src, i, 1, n, k, dtype, &ignored)) != ((const u8 *)scales)[place]) {
                comparison all = {0.0, 0.0, 0.0, 0, -1};
                fp8_compare_piece(values, n, dtype, codes + i, group_scale(scales, place, mx), i,
                                  &all, &sums);
                for (size_t j = 0; j < n; j++) note(&r, i + j);
                continue;
            }
            fp8_compare_piece(values, n, dtype, codes + i, group_scale(scales, place, mx), i, &r,
                              &sums);
        }
    finish(&r, &sums);
    return r;
}

#endif
