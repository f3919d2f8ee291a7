/* The scale sweep: for each block the best of 16 stored scales around the `max` rule's own.
 *
 * The rule is formats/sweep.py's; both do the same FP32 operations in the same order, so bytes are
 * equal. A tile's magnitudes are laid out by column (value j of 64 blocks side by side), so that a
 * candidate's error is one flat loop over blocks in which nothing is exchanged between lanes: each
 * block has its own scale in its own lane, and the 16 squares are added in registers.
 *
 * Rounding onto E2M1 needs no code here, only the distance to the nearest value: adding and taking
 * away 1.5*2^(22+e) rounds to the grid's spacing at 2^e, with e held between 0 and 2.
 */
#ifndef BEAMQ_SWEEP_H
#define BEAMQ_SWEEP_H

#include "_quantize.h"

enum { CANDIDATES = 16, SWEEP_BELOW = 7, SWEEP_ABOVE = 8, E4M3_TOP = 126 };
static const int SWEEP_OFFSETS[CANDIDATES] = {0, -7, -6, -5, -4, -3, -2, -1, 1, 2, 3, 4, 5, 6, 7, 8};
enum { ONE_BITS = 0x3F800000, SIX_BITS = 0x40C00000 };

/* Magnitudes by column: value j of block b at j * TILE_BLOCKS + b. */
INLINE void tile_columns(const void *src, int dtype, float *columns) {
    for (int j = 0; j < BLOCK; j++)
        for (int b = 0; b < TILE_BLOCKS; b++)
            columns[j * TILE_BLOCKS + b] =
                as_float(load_bits(src, (size_t)(b * BLOCK + j), dtype) & ABS_MASK);
}

/* Squared distance of x * reciprocal from the nearest E2M1 value. Magnitudes compare like their
 * bits, and integer minima stay minima (of floats, compilers make three branches). */
INLINE float sweep_square(float x, float reciprocal) {
    const float q = x * reciprocal;
    const int32_t bits = (int32_t)as_bits(q);
    const int32_t inside = bits < SIX_BITS ? bits : SIX_BITS;
    const int32_t floor = inside > ONE_BITS ? inside : ONE_BITS;
    const float magic = as_float(((u32)floor & INF_BITS) + ((22u << 23) + 0x400000u));
    const float distance = q - ((as_float((u32)inside) + magic) - magic);
    return distance * distance;
}

INLINE float sweep_term(const float *x, const float *weight, int j, float reciprocal) {
    const float square = sweep_square(x[j * TILE_BLOCKS], reciprocal);
    return weight ? square * weight[j * TILE_BLOCKS] : square;
}

/* Neighbours are added first, then pairs of neighbours: the twin's order. */
INLINE float sweep_four(const float *x, const float *weight, int j, float r) {
    return (sweep_term(x, weight, j, r) + sweep_term(x, weight, j + 1, r)) +
           (sweep_term(x, weight, j + 2, r) + sweep_term(x, weight, j + 3, r));
}

INLINE float sweep_sum(const float *x, const float *weight, float r) {
    return (sweep_four(x, weight, 0, r) + sweep_four(x, weight, 4, r)) +
           (sweep_four(x, weight, 8, r) + sweep_four(x, weight, 12, r));
}

/* Try the scale `offset` codes from the `max` rule's, which is offset 0 and has to be the first. */
INLINE void sweep_try(const float *columns, const float *weights, const int32_t *middle, int offset,
                      float global, float *best, int32_t *chosen) {
    for (int b = 0; b < TILE_BLOCKS; b++) {
        int32_t code = middle[b] + offset;
        code = code > 1 ? code : 1;
        code = code < E4M3_TOP ? code : E4M3_TOP;
        const float scale = e4m3_value((u32)code);
        const float sum =
            sweep_sum(columns + b, weights ? weights + b : weights, 1.0f / (scale * global));
        const float error = sum * (scale * scale);
        const int better = (error < best[b]) | (chosen[b] == 0); /* a NaN is never better */
        best[b] = better ? error : best[b];
        chosen[b] = better ? code : chosen[b];
    }
}

/* Codes and scales of a tile that was just quantized by the `max` rule (`scales` holds those). */
INLINE void sweep_tile(const void *src, int dtype, const float *weights, float global, u8 *codes,
                       u8 *scales) {
    float columns[TILE], best[TILE_BLOCKS], step[TILE_BLOCKS];
    int32_t middle[TILE_BLOCKS], chosen[TILE_BLOCKS];
    tile_columns(src, dtype, columns);
    for (int b = 0; b < TILE_BLOCKS; b++) middle[b] = scales[b], best[b] = 0.0f;
    for (int b = 0; b < TILE_BLOCKS; b++) chosen[b] = 0; /* so that the first is taken */
    for (int i = 0; i < CANDIDATES; i++)
        sweep_try(columns, weights, middle, SWEEP_OFFSETS[i], global, best, chosen);
    for (int b = 0; b < TILE_BLOCKS; b++) {
        scales[b] = (u8)chosen[b];
        step[b] = e4m3_value((u32)chosen[b]) * global;
    }
    nvfp4_encode_tile(src, dtype, step, codes);
}

/* Weights of the 64 blocks from block `first` on, by column; row_blocks blocks make a row. */
INLINE void tile_weights(const float *weights, size_t first, size_t row_blocks, float *columns) {
    size_t place = first % row_blocks;
    for (int b = 0; b < TILE_BLOCKS; b++) {
        for (int j = 0; j < BLOCK; j++) columns[j * TILE_BLOCKS + b] = weights[place * BLOCK + j];
        place = place + 1 == row_blocks ? 0 : place + 1;
    }
}

/* `width` blocks as FP32 words, and zeros behind them. */
INLINE void tile_words(const void *src, size_t width, int dtype, u32 *words) {
    const size_t n = width * BLOCK;
    for (size_t i = 0; i < n; i++) words[i] = load_bits(src, i, dtype);
    for (size_t i = n; i < TILE; i++) words[i] = 0;
}

INLINE void sweep_whole_tile(const void *tile, int dtype, const float *weights, float global,
                             u8 *codes, u8 *scales, nvfp4_counts *counts) {
    nvfp4_scales_tile(tile, dtype, global, scales, counts);
    sweep_tile(tile, dtype, weights, global, codes, scales);
}

/* One compiled path for BF16 without weights, one for all else: this is the largest code here. */
INLINE nvfp4_counts nvfp4_sweep_body(const void *src, size_t blocks, int dtype, float global,
                                     const float *weights, size_t row_blocks, u8 *codes,
                                     u8 *scales) {
    nvfp4_counts counts = {0, 0, 0, 0};
    float own[TILE];
    u32 words[TILE];
    for (int i = 0; i < TILE; i++) own[i] = 1.0f;
    for (size_t b = 0; b < blocks; b += TILE_BLOCKS) {
        const size_t width = blocks - b < TILE_BLOCKS ? blocks - b : TILE_BLOCKS;
        const char *tile = (const char *)src + b * BLOCK * item_size(dtype);
        u8 tile_codes[TILE_BYTES], tile_scales[TILE_BLOCKS];
        if (dtype == BF16 && !weights && width == TILE_BLOCKS) {
            sweep_whole_tile(tile, BF16, 0, global, tile_codes, tile_scales, &counts);
        } else {
            if (dtype == BF16)
                tile_words(tile, width, BF16, words);
            else if (dtype == F16)
                tile_words(tile, width, F16, words);
            else
                tile_words(tile, width, F32, words);
            if (weights) tile_weights(weights, b, row_blocks, own);
            sweep_whole_tile(words, F32, own, global, tile_codes, tile_scales, &counts);
            counts.zero -= (int64_t)(TILE_BLOCKS - width);
        }
        memcpy(codes + b * BLOCK / 2, tile_codes, width * BLOCK / 2);
        memcpy(scales + b, tile_scales, width);
    }
    return counts;
}

#endif
