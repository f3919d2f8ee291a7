/* The scale sweep: for each block the best of 16 stored scales around the `max` rule's own.
 *
 * The rule is that of formats/nvfp4.py; both do the same FP32 operations in the same order, so the
 * bytes are equal. A tile's magnitudes are laid out by column (value j of 64 blocks side by side), so
 * that a candidate's error is one flat loop over blocks: each vector lane has a block and its scale,
 * no lane needs another's data, and the 16 squares are added in registers.
 *
 * Rounding onto E2M1 needs no code here, only the distance to the nearest value: 2^22 times a number
 * of q's own binade has units of the grid's spacing there, and subtracting q from it rounds q.
 *
 * With a scale below the `max` rule's, a block's largest value is clipped, and rounding is monotone:
 * the error is at least that one value's squared distance from 6, as computed. So scales above are
 * tried first, then those below, and a candidate is skipped where this bound exceeds the least error
 * so far in all blocks of a group. Ties are decided as if the order were that of the plain torch twin.
 *
 * _sweep_table.h has a faster way to the same bytes for much BF16 without weights.
 */
#ifndef BEAMQ_SWEEP_H
#define BEAMQ_SWEEP_H

#include "_quantize.h"

enum { SWEEP_BELOW = 7, SWEEP_ABOVE = 8, E4M3_TOP = 126, GROUP = 16 };
enum { ONE_AND_A_HALF_BITS = 0x3FC00000, SIX_BITS = 0x40C00000 };

/* Magnitudes by column: value j of block b at j * TILE_BLOCKS + b. */
INLINE void tile_columns(const void *src, int dtype, float *columns) {
    for (int j = 0; j < BLOCK; j++)
        for (int b = 0; b < TILE_BLOCKS; b++)
            columns[j * TILE_BLOCKS + b] =
                as_float(load_bits(src, (size_t)(b * BLOCK + j), dtype) & ABS_MASK);
}

/* Squared distance of x * reciprocal from the nearest E2M1 value; needs `clip` if that is above 7
 * (up to 7, the nearest multiple of 2 is as far away as 6 is). Minima and maxima are taken of the
 * bits, which compare like magnitudes: compilers vectorise integer minima, but make branches of
 * float ones. A tie may go to the other neighbour, which is as far away. */
INLINE float sweep_square(float x, float reciprocal, int clip) {
    const float q = x * reciprocal;
    int32_t inside = (int32_t)as_bits(q);
    if (clip) inside = inside < SIX_BITS ? inside : SIX_BITS;
    /* The binade's base; 1.5 for smaller values, because 1.5 * 2^22 has the unit 1/2. */
    const int32_t base = inside > ONE_AND_A_HALF_BITS ? inside : ONE_AND_A_HALF_BITS;
    const float up = as_float((u32)base) * 0x1p22f;
    /* up - inside is rounded to a multiple of the grid's spacing; up minus that is exact. */
    const float distance = q - (up - (up - as_float((u32)inside)));
    return distance * distance;
}

INLINE float sweep_term(const float *x, const float *weight, int j, float reciprocal, int clip) {
    const float square = sweep_square(x[j * TILE_BLOCKS], reciprocal, clip);
    return weight ? square * weight[j * TILE_BLOCKS] : square;
}

/* Neighbours are added first, then pairs: the order of the plain torch twin. */
INLINE float sweep_four(const float *x, const float *weight, int j, float r, int clip) {
    return (sweep_term(x, weight, j, r, clip) + sweep_term(x, weight, j + 1, r, clip)) +
           (sweep_term(x, weight, j + 2, r, clip) + sweep_term(x, weight, j + 3, r, clip));
}

INLINE float sweep_sum(const float *x, const float *weight, float r, int clip) {
    return (sweep_four(x, weight, 0, r, clip) + sweep_four(x, weight, 4, r, clip)) +
           (sweep_four(x, weight, 8, r, clip) + sweep_four(x, weight, 12, r, clip));
}

INLINE int32_t sweep_code(int32_t middle, int offset) {
    const int32_t code = middle + offset > 1 ? middle + offset : 1;
    return code < E4M3_TOP ? code : E4M3_TOP;
}

/* GROUP neighbouring blocks: magnitudes, and the best error and code of each (code 0: none yet). */
typedef struct {
    const float *columns, *weights; /* weights may be null */
    float global;
    float peak[GROUP], best[GROUP];
    int32_t middle[GROUP], chosen[GROUP];
} sweep_group;

/* Try the scales `offset` codes from the `max` rule's; offset 0 has to be the first. */
INLINE void sweep_try(sweep_group *g, int offset, int clip) {
    for (int b = 0; b < GROUP; b++) {
        const int32_t code = sweep_code(g->middle[b], offset);
        const float scale = e4m3_value((u32)code);
        const float sum = sweep_sum(g->columns + b, g->weights ? g->weights + b : g->weights,
                                    1.0f / (scale * g->global), clip);
        const float error = sum * (scale * scale);
        /* A NaN is never better. On ties the `max` rule's code wins, then the smaller one: so a code
         * below, which is tried late, must win against codes above. Bitwise, to avoid branches. */
        const int wins_ties = (offset < 0) & (g->chosen[b] != g->middle[b]);
        const int better = (error < g->best[b]) | ((error == g->best[b]) & wins_ties) |
                           (g->chosen[b] == 0);
        g->best[b] = better ? error : g->best[b];
        g->chosen[b] = better ? code : g->chosen[b];
    }
}

/* Whether no block can gain from the scales `offset` codes below, if all weights are 1. */
INLINE int sweep_hopeless(const sweep_group *g, int offset) {
    int32_t hopeful = 0;
    for (int b = 0; b < GROUP; b++) {
        const float scale = e4m3_value((u32)sweep_code(g->middle[b], offset));
        const float clipped = g->peak[b] * (1.0f / (scale * g->global)) - 6.0f;
        const float distance = clipped > 0.0f ? clipped : 0.0f;
        /* The largest value's share of the error, computed as sweep_try computes the sum. */
        const float least = (distance * distance) * (scale * scale);
        const int lost = (least > g->best[b]) |
                         ((least == g->best[b]) & (g->chosen[b] == g->middle[b]));
        hopeful |= !lost;
    }
    return !hopeful;
}

/* Whether all quotients stay below 7 with the `max` rule's scales, and so with larger ones. */
INLINE int sweep_fits(const sweep_group *g) {
    int32_t above = 0;
    for (int b = 0; b < GROUP; b++) {
        const float step = e4m3_value((u32)g->middle[b]) * g->global;
        above |= !(g->peak[b] * (1.0f / step) < 7.0f);
    }
    return !above;
}

INLINE void sweep_blocks(sweep_group *g, int prune) {
    for (int b = 0; b < GROUP; b++) {
        int32_t peak = 0;
        for (int j = 0; j < BLOCK; j++) {
            const int32_t bits = (int32_t)as_bits(g->columns[j * TILE_BLOCKS + b]);
            peak = bits > peak ? bits : peak;
        }
        g->peak[b] = as_float((u32)peak);
    }
    for (int b = 0; b < GROUP; b++) g->best[b] = 0.0f, g->chosen[b] = 0;
    if (sweep_fits(g))
        for (int offset = 0; offset <= SWEEP_ABOVE; offset++) sweep_try(g, offset, 0);
    else
        for (int offset = 0; offset <= SWEEP_ABOVE; offset++) sweep_try(g, offset, 1);
    for (int offset = -1; offset >= -SWEEP_BELOW; offset--)
        if (!prune || !sweep_hopeless(g, offset)) sweep_try(g, offset, 1);
}

/* The best scales of a tile whose `scales` are those of the `max` rule. `prune` allows candidates to
 * be skipped; it requires weights of 1 or none. */
INLINE void sweep_scales(const void *src, int dtype, const float *weights, int prune, float global,
                         u8 *scales) {
    float columns[TILE];
    tile_columns(src, dtype, columns);
    for (int first = 0; first < TILE_BLOCKS; first += GROUP) {
        sweep_group g = {.columns = columns + first,
                         .weights = weights ? weights + first : weights,
                         .global = global};
        for (int b = 0; b < GROUP; b++) g.middle[b] = scales[first + b];
        sweep_blocks(&g, prune);
        for (int b = 0; b < GROUP; b++) scales[first + b] = (u8)g.chosen[b];
    }
}

#endif
