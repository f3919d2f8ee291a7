/* Low-rank sums: out = src + (b a) * scaling, which is how a LoRA adapter is merged into a weight.
 *
 * In:  src [rows, k] in BF16, F16 or F32; a [rank, k] and b [rows, rank] in FP32; any alignment.
 * Out: [rows, k] in F32 or in src's dtype; it may be src itself then.
 *
 * Each element takes the same FP32 operations in the same order on every machine: sum = 0, then
 * sum = fma(b[j], a[j], sum) for j = 0, 1, ...; sum * scaling; src + that; one rounding to the
 * output's dtype. A NaN becomes the positive quiet one.
 *
 * The one idea: as in a matrix product, a few rows by a few columns of sums stay in registers while
 * j runs, so that a loaded number is used several times. Columns of `a` are first copied to a panel
 * that fits the L1 cache: rows of `a` are often a multiple of 4 KiB apart in memory and would drive
 * each other out. Tiles at the edges take the same path. Missing columns count as zero, missing rows
 * repeat one that is there, and neither is stored.
 */
#ifndef BEAMQ_LOWRANK_H
#define BEAMQ_LOWRANK_H

#include "_core.h"

enum { LR_COLUMNS = 32, LR_DEPTH = 128, LR_ROWS = 8 };

typedef struct {
    const void *src;
    const u32_any *a, *b; /* bits of floats: compilers vectorise unaligned integers only */
    void *out;
    size_t rows, k, rank;
    float scaling;
    int dtype, out_dtype;
} low_rank;

/* x * y + z rounded once. Without an instruction for it: the FP64 product is exact; the FP64 sum is
 * rounded to odd, which leaves the rounding to FP32 as if the sum had been exact. `rest` is what the
 * sum lost (2Sum); it is NaN where the sum is infinite. Right also where the result is subnormal. */
INLINE float fused(float x, float y, float z, int has_fma) {
#if defined(__GNUC__)
    if (has_fma) return __builtin_fmaf(x, y, z);
#endif
    (void)has_fma;
    double product = (double)x * (double)y, addend = (double)z;
    double sum = product + addend;
    double back = sum - product;
    double rest = (product - (sum - back)) + (addend - back);
    u64 bits, rest_bits;
    memcpy(&bits, &sum, 8);
    memcpy(&rest_bits, &rest, 8);
    u64 move = (u64)((rest > 0.0) | (rest < 0.0)) & ~bits & 1u; /* inexact and even */
    u64 inward = (bits ^ rest_bits) >> 63; /* the exact sum is smaller in magnitude */
    bits += move - ((move & inward) << 1);
    memcpy(&sum, &bits, 8);
    return (float)sum;
}

INLINE void lr_panel(const low_rank *t, size_t first, size_t depth, size_t column, size_t width,
                     float (*panel)[LR_COLUMNS]) {
    for (size_t j = 0; j < depth; j++) {
        const u32_any *from = t->a + (first + j) * t->k + column;
        if (width == LR_COLUMNS) {
            memcpy(panel[j], from, sizeof panel[j]);
        } else {
            memset(panel[j], 0, sizeof panel[j]);
            memcpy(panel[j], from, width * sizeof(float));
        }
    }
}

/* Adds `depth` products to `count` rows of sums; `b` has a pointer for each row. The loop over columns
 * is long enough that no compiler unrolls it before it vectorises it. */
INLINE void lr_accumulate(float (*sums)[LR_COLUMNS], const u32_any *const *b,
                          const float (*panel)[LR_COLUMNS], size_t depth, int count, int has_fma) {
    for (size_t j = 0; j < depth; j++)
        for (int i = 0; i < count; i++) {
            float factor = as_float(b[i][j]);
            for (int c = 0; c < LR_COLUMNS; c++)
                sums[i][c] = fused(factor, panel[j][c], sums[i][c], has_fma);
        }
}

/* Sums of a few rows, scaled, added to src and rounded; `at` is their first element in src and out.
 * Results pass through `bits`, because a compiler that saw out next to src would have to assume that
 * each store changes the next load. */
INLINE void lr_finish(const float (*sums)[LR_COLUMNS], const low_rank *t, size_t at, size_t height,
                      size_t width, int from, int to) {
    const u8 *src = (const u8 *)t->src + at * item_size(from);
    u8 *out = (u8 *)t->out + at * item_size(to);
    size_t k = t->k;
    float scaling = t->scaling;
    for (size_t n = 0; n < height; n++) {
        u32 bits[LR_COLUMNS];
        for (size_t c = 0; c < width; c++) {
            float value = as_float(load_bits(src, c, from)) + sums[n][c] * scaling;
            bits[c] = value == value ? as_bits(value) : QUIET_NAN;
        }
        for (size_t c = 0; c < width; c++) {
            if (to == BF16) ((u16_any *)out)[c] = (u16)round_to_bf16(bits[c]);
            if (to == F16) ((u16_any *)out)[c] = (u16)to_f16(bits[c]);
            if (to == F32) ((u32_any *)out)[c] = bits[c];
        }
        src += k * item_size(from);
        out += k * item_size(to);
    }
}

INLINE void lr_finish_any(const float (*sums)[LR_COLUMNS], const low_rank *t, size_t at,
                          size_t height, size_t width) {
    int from = t->dtype, to = t->out_dtype;
    if (from == BF16 && to == BF16) lr_finish(sums, t, at, height, width, BF16, BF16);
    if (from == BF16 && to == F32) lr_finish(sums, t, at, height, width, BF16, F32);
    if (from == F16 && to == F16) lr_finish(sums, t, at, height, width, F16, F16);
    if (from == F16 && to == F32) lr_finish(sums, t, at, height, width, F16, F32);
    if (from == F32) lr_finish(sums, t, at, height, width, F32, F32);
}

/* `width` columns from `column` on, `count` rows at a time. */
INLINE void lr_columns(const low_rank *t, size_t column, size_t width, int count, int has_fma) {
    float panel[LR_DEPTH][LR_COLUMNS];
    for (size_t row = 0; row < t->rows; row += (size_t)count) {
        size_t height = t->rows - row < (size_t)count ? t->rows - row : (size_t)count;
        float sums[LR_ROWS][LR_COLUMNS];
        for (int i = 0; i < count; i++)
            for (int c = 0; c < LR_COLUMNS; c++) sums[i][c] = 0.0f;
        for (size_t first = 0; first < t->rank; first += LR_DEPTH) {
            size_t depth = t->rank - first < LR_DEPTH ? t->rank - first : LR_DEPTH;
            const u32_any *b[LR_ROWS];
            for (size_t i = 0; i < (size_t)count; i++)
                b[i] = t->b + (row + (i < height ? i : 0)) * t->rank + first;
            if (row == 0 || t->rank > LR_DEPTH) lr_panel(t, first, depth, column, width, panel);
            lr_accumulate(sums, b, (const float(*)[LR_COLUMNS])panel, depth, count, has_fma);
        }
        const float(*done)[LR_COLUMNS] = (const float(*)[LR_COLUMNS])sums;
        size_t at = row * t->k + column;
        if (width == LR_COLUMNS && height == (size_t)count)
            lr_finish_any(done, t, at, (size_t)count, LR_COLUMNS);
        else
            lr_finish_any(done, t, at, height, width);
    }
}

/* `count`: rows whose sums fit the registers, at most LR_ROWS. */
INLINE void low_rank_body(const low_rank *t, int count, int has_fma) {
    for (size_t column = 0; column < t->k; column += LR_COLUMNS) {
        size_t width = t->k - column < LR_COLUMNS ? t->k - column : LR_COLUMNS;
        lr_columns(t, column, width, count, has_fma);
    }
}

#endif
