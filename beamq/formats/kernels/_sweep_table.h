/* The scale sweep of BF16 values without weights, by a table: a quarter of the arithmetic of
 * _sweep.h, for the same bytes.
 *
 * The one idea: a BF16 value has 128 mantissas, a scale has eight, and everything that the rule does
 * is the same one binade higher. So for all scales of one mantissa the squared distances of a value
 * under its 16 candidates are a row of a table that the value's bits index, counted from the scale's
 * binade. A block's 16 errors are the sum of 16 rows, each lane a candidate: one addition for a value
 * where a candidate took eight operations.
 *
 * Blocks are sorted by the mantissa of the `max` rule's scale, and the table is made anew for each of
 * the eight, so that the rows that most values have stay in the L1 cache. Values below the table, which
 * are rare, get a row of their own. Left to _sweep.h are scales with a subnormal candidate, the largest
 * scale (it also stands for blocks that saturate or are not finite), and extreme global scales, where
 * one binade higher is not the same.
 */
#ifndef BEAMQ_SWEEP_TABLE_H
#define BEAMQ_SWEEP_TABLE_H

#include "_sweep.h"

enum { CANDIDATES = 16, MANTISSAS = 8, E4M3_CODES = 128, ONE_CODE = 56, LEAST_MIDDLE = 15 };
enum { ROWS = 10 * BINADE, SPAN = 1 << 15, WORTH_A_TABLE = 1 << 11 }; /* the last two in blocks */
#define TABLE_LOW 0x1p-80f
#define TABLE_HIGH 0x1p7f

/* Offsets of the candidates' codes, in the order in which ties are decided. */
static const int8_t OFFSETS[CANDIDATES] = {0, -7, -6, -5, -4, -3, -2, -1, 1, 2, 3, 4, 5, 6, 7, 8};
static const float OFFSETS_FP32[CANDIDATES] = {0, -7, -6, -5, -4, -3, -2, -1,
                                               1, 2,  3,  4,  5,  6,  7,  8};

/* For scales of one mantissa, from 1 to 2; `origin` has the BF16 bits of the value of row 0. */
typedef struct {
    float square[ROWS][CANDIDATES];
    float reciprocal[CANDIDATES], weight[CANDIDATES];
    int32_t origin;
} sweep_table;

INLINE void table_row(float x, const float *reciprocal, float *row) {
    for (int c = 0; c < CANDIDATES; c++) row[c] = sweep_square(x, reciprocal[c], 1);
}

INLINE void table_make(sweep_table *t, int mantissa, float global) {
    const int32_t middle = ONE_CODE + mantissa;
    float reciprocal[CANDIDATES];
    for (int c = 0; c < CANDIDATES; c++) {
        const float scale = e4m3_value((u32)(middle + OFFSETS[c]));
        t->reciprocal[c] = reciprocal[c] = 1.0f / (scale * global);
        t->weight[c] = scale * scale;
    }
    /* The `max` rule's scales leave at most 6.4 of their steps. */
    const float most = 6.5f * e4m3_value((u32)middle) * global;
    t->origin = (int32_t)(as_bits(most) >> 16) + 2 - ROWS;
    for (int r = 0; r < ROWS; r++) {
        const float x = as_float((u32)(t->origin + r) << 16);
        float row[CANDIDATES];
        for (int c = 0; c < CANDIDATES; c++) row[c] = sweep_square(x, reciprocal[c], 1);
        memcpy(t->square[r], row, sizeof row);
    }
}

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* The errors of a block, whose values have the rows `r`, each with its candidate's number below it,
 * which decides ties: of candidates c and c + 8 the better one. Scales more than `limit` codes above
 * the middle do not exist. */
INLINE void table_errors(const float *const *r, const float *weight, float limit, int64_t *key) {
    for (int c = 0; c < CANDIDATES / 2; c++) {
        int64_t two[2];
        for (int h = 0; h < 2; h++) {
            const int i = c + h * CANDIDATES / 2;
            const float sum = (((r[0][i] + r[1][i]) + (r[2][i] + r[3][i])) +
                               ((r[4][i] + r[5][i]) + (r[6][i] + r[7][i]))) +
                              (((r[8][i] + r[9][i]) + (r[10][i] + r[11][i])) +
                               ((r[12][i] + r[13][i]) + (r[14][i] + r[15][i])));
            const float error = OFFSETS_FP32[i] <= limit ? sum * weight[i] : as_float(INF_BITS);
            two[h] = (int64_t)as_bits(error) << 32 | i;
        }
        key[c] = least(two[0], two[1]);
    }
}

INLINE void pair_least(const int64_t *in, int64_t *out, int n) {
    for (int i = 0; i < n; i++) out[i] = least(in[2 * i], in[2 * i + 1]);
}

INLINE void pair_most(const u16 *in, u16 *out, int n) {
    for (int i = 0; i < n; i++) out[i] = in[2 * i] > in[2 * i + 1] ? in[2 * i] : in[2 * i + 1];
}

/* The largest of each block's rows: from ROWS on where one is not in the table. */
INLINE void tile_most(const u16 *a, u16 *out) {
    u16 b[TILE / 2], c[TILE / 4], d[TILE / 8];
    pair_most(a, b, TILE / 2);
    pair_most(b, c, TILE / 4);
    pair_most(c, d, TILE / 8);
    pair_most(d, out, TILE_BLOCKS);
}

/* Replace the scales of the `n` blocks in `list`, at most a tile of them, by the best ones. */
INLINE void table_tile(const sweep_table *t, const u16_any *src, const u16 *list, int n,
                       u8 *scales) {
    float weight[CANDIDATES];
    memcpy(weight, t->weight, sizeof weight);
    int64_t key[TILE / 2], half[TILE / 4], pair[TILE / 8], best[TILE_BLOCKS];
    u16 rows[TILE], most[TILE_BLOCKS];
    if (n < TILE_BLOCKS) memset(key, 0, sizeof key);
    for (int b = 0; b < n; b++) {
        const u16_any *p = src + (size_t)list[b] * BLOCK;
        const int32_t middle = scales[list[b]];
        const u16 origin = (u16)(t->origin + ((middle >> 3) - (ONE_CODE >> 3)) * BINADE);
        for (int j = 0; j < BLOCK; j++) rows[b * BLOCK + j] = (u16)((p[j] & 0x7FFF) - origin);
    }
    for (int i = n * BLOCK; i < TILE; i++) rows[i] = 0;
    tile_most(rows, most);
    for (int b = 0; b < n; b++) {
        const int32_t middle = scales[list[b]];
        const float limit = (float)(E4M3_TOP - middle);
        const u16 *at = rows + b * BLOCK;
        const float *row[BLOCK];
        if (most[b] < ROWS) {
            for (int j = 0; j < BLOCK; j++) row[j] = t->square[at[j]];
            table_errors(row, weight, limit, key + b * CANDIDATES / 2);
        } else {
            const u16_any *p = src + (size_t)list[b] * BLOCK;
            float reciprocal[CANDIDATES], own[BLOCK][CANDIDATES];
            const float binade = as_float((u32)(127 - (middle >> 3) + (ONE_CODE >> 3)) << 23);
            for (int c = 0; c < CANDIDATES; c++) reciprocal[c] = t->reciprocal[c] * binade;
            for (int j = 0; j < BLOCK; j++) {
                row[j] = at[j] < ROWS ? t->square[at[j]] : own[j];
                if (at[j] >= ROWS) table_row(as_float((p[j] & 0x7FFFu) << 16), reciprocal, own[j]);
            }
            table_errors(row, weight, limit, key + b * CANDIDATES / 2);
        }
    }
    for (int b = 0; b < TILE_BLOCKS; b++)
        for (int c = 0; c < 4; c++) half[b * 4 + c] = least(key[b * 8 + c], key[b * 8 + 4 + c]);
    pair_least(half, pair, TILE / 8);
    pair_least(pair, best, TILE_BLOCKS);
    for (int b = 0; b < n; b++) scales[list[b]] += (u8)OFFSETS[best[b] & (CANDIDATES - 1)];
}

/* The same by _sweep.h, for blocks that the table is not for. */
INLINE void plain_tile(const u16_any *src, const u16 *list, int n, float global, u8 *scales) {
    u16 tile[TILE] = {0};
    u8 own[TILE_BLOCKS];
    for (int b = 0; b < TILE_BLOCKS; b++) own[b] = ONE_CODE;
    for (int b = 0; b < n; b++) {
        memcpy(tile + b * BLOCK, src + (size_t)list[b] * BLOCK, sizeof(u16) * BLOCK);
        own[b] = scales[list[b]];
    }
    sweep_scales(tile, BF16, 0, 1, global, own);
    for (int b = 0; b < n; b++) scales[list[b]] = own[b];
}

/* Replace the scales of at most a SPAN of blocks by the best ones. */
INLINE void table_span(const u16_any *src, size_t blocks, float global, u8 *scales) {
    sweep_table t;
    u16 list[SPAN];
    size_t end[MANTISSAS + 1] = {0}, at[MANTISSAS + 1];
    u8 group[E4M3_CODES]; /* by code: the mantissa, or the last group, which is left to _sweep.h */
    for (int c = 0; c < E4M3_CODES; c++)
        group[c] = (u8)(c < LEAST_MIDDLE || c == E4M3_TOP ? MANTISSAS : c % MANTISSAS);
    for (size_t b = 0; b < blocks; b++) end[group[scales[b]]]++;
    size_t sum = 0;
    for (int m = 0; m <= MANTISSAS; m++) at[m] = sum, sum += end[m], end[m] = sum;
    for (size_t b = 0; b < blocks; b++) list[at[group[scales[b]]]++] = (u16)b;
    size_t first = 0;
    for (int m = 0; m < MANTISSAS; m++) {
        if (first < end[m]) table_make(&t, m, global);
        for (; first < end[m]; first += TILE_BLOCKS) {
            const size_t left = end[m] - first;
            const int n = (int)(left < TILE_BLOCKS ? left : TILE_BLOCKS);
            table_tile(&t, src, list + first, n, scales);
        }
        first = end[m];
    }
    for (; first < blocks; first += TILE_BLOCKS) {
        const size_t left = blocks - first;
        const int n = (int)(left < TILE_BLOCKS ? left : TILE_BLOCKS);
        plain_tile(src, list + first, n, global, scales);
    }
}

/* Whether more than one value in 256 is zero: a block with one needs rows of its own. */
INLINE int many_zeros(const u16_any *src, size_t blocks) {
    size_t zeros = 0;
    for (size_t b = 0; b < blocks; b += TILE_BLOCKS) {
        u16 found = 0;
        for (int i = 0; i < TILE; i++) found += (u16)((src[b * BLOCK + i] & 0x7FFF) == 0);
        zeros += found;
    }
    return zeros > blocks * BLOCK / 256;
}

/* Codes and scales of the first blocks; returns of how many, a multiple of a tile. */
INLINE size_t sweep_by_table(const void *src, size_t blocks, float global, u8 *codes, u8 *scales,
                             nvfp4_counts *counts) {
    size_t done = 0;
    float step[E4M3_CODES];
    e2m1_ties ties[E4M3_CODES];
    if (blocks < WORTH_A_TABLE || !(global >= TABLE_LOW && global <= TABLE_HIGH)) return 0;
    for (int c = 0; c < E4M3_CODES; c++) step[c] = e4m3_value((u32)c) * global; /* 0, 127: unused */
    ties_of_steps(step, ties, E4M3_CODES);
    while (blocks - done >= WORTH_A_TABLE) {
        const size_t whole = (blocks - done) / TILE_BLOCKS * TILE_BLOCKS;
        const size_t width = whole < SPAN ? whole : SPAN;
        const u16_any *from = (const u16_any *)src + done * BLOCK;
        if (many_zeros(from, width)) break;
        for (size_t b = 0; b < width; b += TILE_BLOCKS)
            nvfp4_scales_tile(from + b * BLOCK, BF16, global, scales + done + b, counts);
        table_span(from, width, global, scales + done);
        for (size_t b = 0; b < width; b += TILE_BLOCKS)
            nvfp4_encode_bf16(from + b * BLOCK, ties, scales + done + b,
                              codes + (done + b) * BLOCK / 2);
        done += width;
    }
    return done;
}

/* ---- all dtypes, with and without weights -------------------------------------------------- */

/* Weights of the 64 blocks from block `first` on, by column; a row has row_blocks blocks. */
INLINE void tile_weights(const float *weights, size_t first, size_t row_blocks, float *columns) {
    size_t place = first % row_blocks;
    for (int b = 0; b < TILE_BLOCKS; b++) {
        for (int j = 0; j < BLOCK; j++) columns[j * TILE_BLOCKS + b] = weights[place * BLOCK + j];
        place = place + 1 == row_blocks ? 0 : place + 1;
    }
}

/* `width` blocks as FP32 words, then zeros up to a whole tile. */
INLINE void tile_words(const void *src, size_t width, int dtype, u32 *words) {
    const size_t n = width * BLOCK;
    for (size_t i = 0; i < n; i++) words[i] = load_bits(src, i, dtype);
    for (size_t i = n; i < TILE; i++) words[i] = 0;
}

INLINE void sweep_whole_tile(const void *tile, int dtype, const float *weights, int prune,
                             float global, u8 *codes, u8 *scales, nvfp4_counts *counts) {
    float step[TILE_BLOCKS];
    nvfp4_scales_tile(tile, dtype, global, scales, counts);
    sweep_scales(tile, dtype, weights, prune, global, scales);
    for (int b = 0; b < TILE_BLOCKS; b++) step[b] = e4m3_value(scales[b]) * global;
    nvfp4_encode_tile(tile, dtype, step, codes);
}

/* One compiled path for BF16 without weights, where the table has left any, one for all else. */
INLINE nvfp4_counts nvfp4_sweep_body(const void *src, size_t blocks, int dtype, float global,
                                     const float *weights, size_t row_blocks, u8 *codes,
                                     u8 *scales) {
    nvfp4_counts counts = {0, 0, 0, 0};
    float own[TILE];
    u32 words[TILE];
    for (int i = 0; i < TILE; i++) own[i] = 1.0f;
    size_t b = 0;
    if (dtype == BF16 && !weights) b = sweep_by_table(src, blocks, global, codes, scales, &counts);
    for (; b < blocks; b += TILE_BLOCKS) {
        const size_t width = blocks - b < TILE_BLOCKS ? blocks - b : TILE_BLOCKS;
        const char *tile = (const char *)src + b * BLOCK * item_size(dtype);
        u8 tile_codes[TILE_BYTES], tile_scales[TILE_BLOCKS];
        if (dtype == BF16 && !weights && width == TILE_BLOCKS) {
            sweep_whole_tile(tile, BF16, 0, 1, global, tile_codes, tile_scales, &counts);
        } else {
            if (dtype == BF16)
                tile_words(tile, width, BF16, words);
            else if (dtype == F16)
                tile_words(tile, width, F16, words);
            else
                tile_words(tile, width, F32, words);
            if (weights) tile_weights(weights, b, row_blocks, own);
            sweep_whole_tile(words, F32, own, !weights, global, tile_codes, tile_scales, &counts);
            counts.zero -= (int64_t)(TILE_BLOCKS - width); /* the padding is no block of zeros */
        }
        memcpy(codes + b * BLOCK / 2, tile_codes, width * BLOCK / 2);
        memcpy(scales + b, tile_scales, width);
    }
    return counts;
}

#endif
