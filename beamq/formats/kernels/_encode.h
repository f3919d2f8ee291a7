/* Codes of values whose scale is known. For BF16, by comparing with thresholds instead of dividing.
 *
 * The rule is code = round(FP32(x / scale)), and `*_encode_any` computes exactly that. A BF16
 * magnitude is a 15-bit number that orders like its value, and rounding is monotone, so the last
 * magnitude that gets each code describes the rule as well. It is found exactly, by dividing the one
 * BF16 number next to tie * scale. A code is then the number of thresholds below the magnitude,
 * counted in 16- and 8-bit lanes: half to a quarter of the FP32 work.
 *
 * Doubling a value adds 128 to its BF16 bits (1 to the exponent), so few thresholds are needed:
 * E2M1's ties 1.25, 2.5, 5 and 1.75, 3.5 are two families, and E4M3's eight ties repeat in each of
 * its binades. Subnormal BF16 numbers do not double like that: `SAFE_LOW` keeps every threshold above
 * them.
 */
#ifndef BEAMQ_ENCODE_H
#define BEAMQ_ENCODE_H

#include "_core.h"

enum { BLOCK = 16, TILE_BLOCKS = 64, TILE = BLOCK * TILE_BLOCKS, TILE_BYTES = TILE / 2 };
enum { BINADE = 128, CHUNK = 256, INF_MAGNITUDE = 0x7F80 };
#define SAFE_LOW 0x1p-110f
#define NVFP4_SAFE_HIGH 0x1p16f /* no BF16 magnitude but 0 divides to 0 */
#define FP8_SAFE_HIGH 0x1p100f  /* times 464: finite */

/* The last BF16 magnitude whose quotient by `scale` is below `tie`, or at it where the tie's even
 * neighbour is the lower one. `near` is the BF16 number nearest to tie * scale: all numbers below it
 * are on the lower side, all above it are not. Without branches: a right shift by 31 makes -1 of a
 * negative number and 0 of others. */
INLINE int16_t last_below(float scale, float tie, int tie_goes_up) {
    int32_t near = (int32_t)((as_bits(tie * scale) + 0x8000u) >> 16); /* round to BF16 */
    float margin = as_float((u32)near << 16) / scale - tie; /* exact: they are close */
    int32_t below = (int32_t)as_bits(margin) >> 31, above = (int32_t)as_bits(0.0f - margin) >> 31;
    return (int16_t)(tie_goes_up ? near - 1 - below : near + above);
}

INLINE int16_t max16(int16_t a, int16_t b) { return a > b ? a : b; }
INLINE int16_t min16(int16_t a, int16_t b) { return a < b ? a : b; }

/* ---- NVFP4: a tile of blocks, each with its step (block scale * global scale) --------------- */

INLINE void spread(const float *per_block, float *per_element) {
    for (int b = 0; b < TILE_BLOCKS; b++)
        for (int j = 0; j < BLOCK; j++) per_element[b * BLOCK + j] = per_block[b];
}

INLINE void nvfp4_encode_any(const void *src, int dtype, const float *step, u8 *codes) {
    float steps[TILE];
    u8 nibbles[TILE];
    spread(step, steps);
    for (int i = 0; i < TILE; i++) {
        u32 bits = load_bits(src, (size_t)i, dtype);
        float q = as_float(bits & ABS_MASK) / steps[i];
        u32 sign = q > 0.0f ? bits >> 28 & 8u : 0u; /* what divides to zero becomes +0 */
        nibbles[i] = (u8)(e2m1_code(q) | sign);
    }
    for (int i = 0; i < TILE_BYTES; i++) codes[i] = (u8)(nibbles[2 * i] | nibbles[2 * i + 1] << 4);
}

/* The thresholds of a step: the last magnitudes below 0.25 and 0.75, and where counting begins for
 * 1.25, 2.5, 5 and for 1.75, 3.5. */
typedef struct {
    int16_t half, one, odd, even;
} e2m1_ties;

/* Those of `n` steps, all within the safe range. */
INLINE void ties_of_steps(const float *step, e2m1_ties *ties, int n) {
    for (int b = 0; b < n; b++) ties[b].half = last_below(step[b], 0.25f, 0);
    for (int b = 0; b < n; b++) ties[b].one = last_below(step[b], 0.75f, 1);
    for (int b = 0; b < n; b++) ties[b].odd = last_below(step[b], 1.25f, 0) - BINADE + 1;
    for (int b = 0; b < n; b++) ties[b].even = last_below(step[b], 1.75f, 1) - BINADE + 1;
}

/* Block b's ties are ties[code[b]], or ties[b] where there is no `code`. */
INLINE void nvfp4_encode_bf16(const void *src, const e2m1_ties *ties, const u8 *code_of,
                              u8 *codes) {
    const u16_any *p = src;
    u32 pairs[TILE_BYTES];
    u16_any *nibbles = (u16_any *)pairs;
    for (int b = 0; b < TILE_BLOCKS; b++) {
        const e2m1_ties *t = ties + (code_of ? code_of[b] : b);
        const int16_t a = t->half, c = t->one, d = t->odd, e = t->even;
        for (int j = 0; j < BLOCK; j++) {
            u16 raw = p[b * BLOCK + j];
            int16_t magnitude = (int16_t)(raw & 0x7FFFu);
            /* The sign bit of threshold - magnitude: 1 above the threshold. */
            u16 code = (u16)((u16)(a - magnitude) >> 15);
            code += (u16)(c - magnitude) >> 15;
            /* Counted from 128 before the family's first tie, each whole 128 is one tie passed. */
            code += (u16)min16(max16((int16_t)(magnitude - d), 0) >> 7, 3); /* 1.25, 2.5, 5 */
            code += (u16)min16(max16((int16_t)(magnitude - e), 0) >> 7, 2); /* 1.75, 3.5 */
            /* The sign, but not of zero or NaN: magnitude - 1 wraps around for zero. */
            code |= (u16)(magnitude - 1) < INF_MAGNITUDE ? raw >> 12 & 8u : 0u;
            nibbles[b * BLOCK + j] = code;
        }
    }
    /* A pair holds two codes in 16 bits each; the upper one moves to the high nibble. */
    for (int i = 0; i < TILE_BYTES; i++) codes[i] = (u8)(pairs[i] | pairs[i] >> 12);
}

INLINE void nvfp4_encode_tile(const void *src, int dtype, const float *step, u8 *codes) {
    int32_t unsafe = 0;
    for (int b = 0; b < TILE_BLOCKS; b++)
        unsafe |= !((step[b] >= SAFE_LOW) & (step[b] <= NVFP4_SAFE_HIGH));
    if (dtype == BF16 && !unsafe) {
        e2m1_ties ties[TILE_BLOCKS];
        ties_of_steps(step, ties, TILE_BLOCKS);
        nvfp4_encode_bf16(src, ties, 0, codes);
    } else {
        nvfp4_encode_any(src, dtype, step, codes);
    }
}

/* ---- FP8: values that share one scale ------------------------------------------------------- */

INLINE void fp8_encode_any(const void *src, size_t n, int dtype, float scale, u8 *codes) {
    for (size_t i = 0; i < n; i++) {
        u32 bits = load_bits(src, i, dtype);
        codes[i] = (u8)(e4m3_code(as_float(bits & ABS_MASK) / scale) | (bits >> 24 & 0x80u));
    }
}

INLINE int all_within(const u16_any *p, int16_t least, int16_t most) {
    int16_t smallest = 0x7FFF, largest = 0;
    for (int i = 0; i < CHUNK; i++) {
        int16_t magnitude = (int16_t)(p[i] & 0x7FFFu);
        smallest = min16(smallest, magnitude);
        largest = max16(largest, magnitude);
    }
    return smallest >= least && largest <= most;
}

/* Let `origin` be seven binades before the first magnitude with 1.0's code. In magnitude - origin,
 * the bits above the low seven are then the E4M3 exponent (eight codes each), and the low seven are
 * the place in the binade, to be compared with the other seven ties. Chunks with a value in E4M3's
 * subnormal range, where ties are spaced otherwise, or beyond 448 are left to the plain rule. */
INLINE void fp8_encode_bf16(const void *src, size_t n, float scale, u8 *codes) {
    const u16_any *p = src;
    int16_t last[8];
    u8 edge[7];
    for (int t = 0; t < 8; t++) last[t] = last_below(scale, 1.0625f + 0.125f * (float)t, t & 1);
    for (int t = 0; t < 7; t++) edge[t] = (u8)(last[t] - last[7] + BINADE - 1);
    const int16_t one = (int16_t)(last[7] - BINADE + 1); /* the first magnitude with 1.0's code */
    const int16_t origin = (int16_t)(one - 7 * BINADE), least = (int16_t)(one - 6 * BINADE);
    const int16_t most = (int16_t)(last[6] + 8 * BINADE);
    size_t start = 0;
    for (; start + CHUNK <= n; start += CHUNK, p += CHUNK, codes += CHUNK) {
        u8 base[CHUNK], place[CHUNK];
        if (!all_within(p, least, most)) {
            fp8_encode_any(p, CHUNK, BF16, scale, codes);
            continue;
        }
        for (int i = 0; i < CHUNK; i++) {
            u16 raw = p[i], d = (u16)((raw & 0x7FFFu) - (u32)origin);
            base[i] = (u8)((d >> 4 & 0x78u) | (raw >> 8 & 0x80u)); /* 8 * exponent, and the sign */
            place[i] = (u8)(d & 127u);
        }
        for (int i = 0; i < CHUNK; i++) {
            u8 code = base[i];
            for (int t = 0; t < 7; t++) code += place[i] > edge[t];
            codes[i] = code;
        }
    }
    fp8_encode_any(p, n - start, BF16, scale, codes);
}

INLINE void fp8_encode(const void *src, size_t n, int dtype, float scale, u8 *codes) {
    if (dtype == BF16 && scale >= SAFE_LOW && scale <= FP8_SAFE_HIGH)
        fp8_encode_bf16(src, n, scale, codes);
    else
        fp8_encode_any(src, n, dtype, scale, codes);
}

#endif
