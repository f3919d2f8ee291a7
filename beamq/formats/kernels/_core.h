/* The arithmetic of the CPU kernels: plain C11, no Python, no allocation, no global state.
 *
 * In:  raw little-endian bytes of BF16, F16 or F32 values at any alignment.
 * Out: NVFP4 / FP8 bytes, decoded values, counts. The rules are those of formats/nvfp4.py and
 *      formats/fp8.py, which stay the readable statement of what is computed here.
 *
 * The one idea: no intrinsics. Work is cut into tiles that stay in the L1 cache, and each stage
 * of a tile is a loop that a compiler vectorises for any instruction set: a pairwise-maximum tree
 * for block amax, one loop over block scales, one over elements, one that packs nibbles. Rounding
 * is branch-free (below), so a loop has no data-dependent jumps. Division is IEEE division: a
 * multiplication by the reciprocal moves ties. `_cpu.c` compiles this file's bodies several
 * times for different x86 levels; results don't depend on the level, since the compiler may not
 * contract or reassociate (-ffp-contract=off, never -ffast-math).
 *
 * Rounding by magic numbers: adding 1.5*2^k to a small float leaves its nearest-even multiple of
 * 2^(k-23) in the low mantissa bits of the sum. This needs the default rounding mode.
 *
 * Limits: little-endian hosts; denormals must not be flushed (no FTZ/DAZ), which is how CPython
 * and its threads run.
 */
#ifndef BEAMQ_CORE_H
#define BEAMQ_CORE_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__GNUC__)
#define INLINE static inline __attribute__((always_inline))
#define UNALIGNED __attribute__((aligned(1), may_alias))
#else
#define INLINE static inline
#define UNALIGNED
#endif
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "beamq's CPU kernels are written for little-endian hosts"
#endif

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef u16 UNALIGNED u16_any;
typedef u32 UNALIGNED u32_any;
typedef u64 UNALIGNED u64_any;

enum { BF16 = 0, F16 = 1, F32 = 2 };
enum { BLOCK = 16, TILE_BLOCKS = 64, TILE = BLOCK * TILE_BLOCKS };

#define INF_BITS 0x7F800000u
#define ABS_MASK 0x7FFFFFFFu
#define MIN_BLOCK_SCALE 0x1p-9f /* smallest positive E4M3 */
#define E4M3_MAX 448.0f
#define SCALE_FLOOR 0x1p-126f /* smallest normal float: reciprocals stay finite */

INLINE float as_float(u32 bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

INLINE u32 as_bits(float value) {
    u32 bits;
    memcpy(&bits, &value, 4);
    return bits;
}

INLINE size_t item_size(int dtype) { return dtype == F32 ? 4 : 2; }

/* ---- source values ------------------------------------------------------------------- */

/* F16 bits to F32 bits: exact; a NaN becomes quiet. The product rescales the exponent and makes
 * F16 subnormals normal. */
INLINE u32 half_to_bits(u32 half) {
    u32 magnitude = (half & 0x7FFFu) << 13;
    u32 finite = as_bits(as_float(magnitude) * 0x1p112f);
    u32 special = magnitude | INF_BITS | (magnitude > 0x0F800000u ? 0x400000u : 0u);
    return (magnitude >= 0x0F800000u ? special : finite) | (half & 0x8000u) << 16;
}

/* Element i as the bits of a float; `dtype` is a constant wherever this is inlined. */
INLINE u32 load_bits(const void *src, size_t i, int dtype) {
    if (dtype == BF16) return (u32)((const u16_any *)src)[i] << 16;
    if (dtype == F16) return half_to_bits(((const u16_any *)src)[i]);
    return ((const u32_any *)src)[i];
}

/* Magnitudes compare like their bits, so a maximum needs no conversion: "native" bits are the
 * source's own without the sign, and NaN > infinity > finite. */
INLINE u32 native_inf(int dtype) {
    return dtype == BF16 ? 0x7F80u : dtype == F16 ? 0x7C00u : INF_BITS;
}

INLINE float native_to_float(u32 native, int dtype) {
    return as_float(dtype == BF16 ? native << 16 : dtype == F16 ? half_to_bits(native) : native);
}

INLINE u32 native_max(const void *src, size_t n, int dtype) {
    if (dtype == F32) {
        const u32_any *p = src;
        int32_t best = 0;
        for (size_t i = 0; i < n; i++) {
            int32_t a = (int32_t)(p[i] & ABS_MASK);
            best = a > best ? a : best;
        }
        return (u32)best;
    }
    const u16_any *p = src;
    int16_t best = 0;
    for (size_t i = 0; i < n; i++) {
        int16_t a = (int16_t)(p[i] & 0x7FFF);
        best = a > best ? a : best;
    }
    return (u32)best;
}

typedef struct {
    float amax; /* of the finite values */
    int64_t nonfinite;
    int64_t first_nonfinite; /* -1: none */
} amax_result;

INLINE amax_result amax_body(const void *src, size_t n, int dtype) {
    amax_result r = {0.0f, 0, -1};
    u32 best = native_max(src, n, dtype);
    if (best >= native_inf(dtype)) { /* rare: look again, one by one */
        best = 0;
        for (size_t i = 0; i < n; i++) {
            u32 a = dtype == F32 ? ((const u32_any *)src)[i] & ABS_MASK
                                 : ((const u16_any *)src)[i] & 0x7FFFu;
            if (a >= native_inf(dtype)) {
                if (r.nonfinite++ == 0) r.first_nonfinite = (int64_t)i;
            } else if (a > best) {
                best = a;
            }
        }
    }
    r.amax = native_to_float(best, dtype);
    return r;
}

/* ---- rounding ------------------------------------------------------------------------ */

/* E2M1 magnitude code (0..7) of q >= 0, nearest even, saturating; NaN gives 7. The grid's step is
 * 0.5 below 2, 1 below 4, 2 above: the code is the least of the three roundings, each counted
 * from where its step begins. */
INLINE u32 e2m1_code(float q) {
    q = q < 8.0f ? q : 8.0f;
    u32 halves = as_bits(q + 0x1.8p22f) & 0xFFu;           /* 2q          */
    u32 ones = as_bits(q + (0x1.8p23f + 2.0f)) & 0xFFu;    /* q + 2       */
    u32 twos = as_bits(q + (0x1.8p24f + 8.0f)) & 0xFFu;    /* q / 2 + 4   */
    u32 code = halves < ones ? halves : ones;
    code = code < twos ? code : twos;
    return code < 7u ? code : 7u;
}

INLINE float e2m1_value(u32 code) {
    u32 m = code & 7u;
    float small = (float)(int32_t)m * 0.5f;
    float large = as_float((m << 22) + (126u << 23));
    return as_float(as_bits(m < 2u ? small : large) | (code & 8u) << 28);
}

/* E4M3 magnitude byte of q >= 0, nearest even, saturating at 448; NaN gives 448. */
INLINE u32 e4m3_code(float q) {
    q = q < E4M3_MAX ? q : E4M3_MAX;
    u32 bits = as_bits(q);
    u32 normal = ((bits + 0x7FFFFu + ((bits >> 20) & 1u)) >> 20) - (120u << 3);
    u32 subnormal = as_bits(q + 0x1p14f) & 0xFFu; /* multiples of 2^-9 */
    return q < 0x1p-6f ? subnormal : normal;
}

INLINE float e4m3_value(u32 code) {
    u32 m = code & 0x7Fu;
    float small = (float)(int32_t)m * 0x1p-9f;
    u32 bits = m < 8u ? as_bits(small) : (m << 20) + (120u << 23);
    bits = m == 0x7Fu ? 0x7FC00000u : bits;
    return as_float(bits | (code & 0x80u) << 24);
}

/* BF16 bits, nearest even; a NaN becomes the quiet one of its sign. */
INLINE u32 to_bf16(u32 bits) {
    u32 rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    return (bits & ABS_MASK) > INF_BITS ? 0x7FC0u | (bits >> 16 & 0x8000u) : rounded;
}

/* ---- NVFP4 --------------------------------------------------------------------------- */

typedef struct {
    int64_t saturated;      /* blocks whose ideal scale rounds above 448 */
    int64_t underflow;      /* blocks whose ideal scale would round to 0 */
    int64_t zero;           /* blocks of zeros */
    int64_t nonfinite;      /* blocks with a NaN or an infinity */
} nvfp4_counts;

/* Native amax of each block of a tile, as a tree of pairwise maxima. */
INLINE void tile_amax(const void *src, float *amax, int dtype) {
    if (dtype == F32) {
        const u32_any *p = src;
        int32_t a[TILE / 2], b[TILE / 4], c[TILE / 8];
        for (int i = 0; i < TILE / 2; i++) {
            int32_t x = (int32_t)(p[2 * i] & ABS_MASK), y = (int32_t)(p[2 * i + 1] & ABS_MASK);
            a[i] = x > y ? x : y;
        }
        for (int i = 0; i < TILE / 4; i++) b[i] = a[2 * i] > a[2 * i + 1] ? a[2 * i] : a[2 * i + 1];
        for (int i = 0; i < TILE / 8; i++) c[i] = b[2 * i] > b[2 * i + 1] ? b[2 * i] : b[2 * i + 1];
        for (int i = 0; i < TILE_BLOCKS; i++)
            amax[i] = as_float((u32)(c[2 * i] > c[2 * i + 1] ? c[2 * i] : c[2 * i + 1]));
        return;
    }
    const u32_any *p = src; /* two values at a time */
    int16_t a[TILE / 2], b[TILE / 4], c[TILE / 8];
    for (int i = 0; i < TILE / 2; i++) {
        int16_t x = (int16_t)(p[i] & 0x7FFFu), y = (int16_t)((p[i] >> 16) & 0x7FFFu);
        a[i] = x > y ? x : y;
    }
    for (int i = 0; i < TILE / 4; i++) b[i] = a[2 * i] > a[2 * i + 1] ? a[2 * i] : a[2 * i + 1];
    for (int i = 0; i < TILE / 8; i++) c[i] = b[2 * i] > b[2 * i + 1] ? b[2 * i] : b[2 * i + 1];
    for (int i = 0; i < TILE_BLOCKS; i++)
        amax[i] = native_to_float((u32)(c[2 * i] > c[2 * i + 1] ? c[2 * i] : c[2 * i + 1]), dtype);
}

INLINE void nvfp4_tile(const void *src, int dtype, float global, u8 *codes, u8 *scales,
                       nvfp4_counts *counts) {
    float amax[TILE_BLOCKS], step[TILE_BLOCKS];
    u8 nibbles[TILE];
    int32_t saturated = 0, underflow = 0, zero = 0, nonfinite = 0;
    const float six_global = 6.0f * global;

    tile_amax(src, amax, dtype);
    for (int b = 0; b < TILE_BLOCKS; b++) {
        float ideal = amax[b] / six_global;
        int32_t is_nonfinite = (as_bits(amax[b]) & ABS_MASK) >= INF_BITS;
        nonfinite += is_nonfinite;
        zero += as_bits(amax[b]) == 0u;
        saturated += (ideal > 464.0f) & !is_nonfinite;
        underflow += (ideal <= 0x1p-10f) & (ideal > 0.0f);
        ideal = ideal == 0.0f ? 1.0f : ideal;
        ideal = ideal < MIN_BLOCK_SCALE ? MIN_BLOCK_SCALE : ideal;
        u32 code = e4m3_code(ideal);
        scales[b] = (u8)code;
        step[b] = e4m3_value(code) * global;
    }
    for (int b = 0; b < TILE_BLOCKS; b++) {
        const float s = step[b];
        for (int j = 0; j < BLOCK; j++) {
            u32 bits = load_bits(src, (size_t)(b * BLOCK + j), dtype);
            float q = as_float(bits & ABS_MASK) / s;
            u32 sign = q > 0.0f ? bits >> 28 & 8u : 0u;
            nibbles[b * BLOCK + j] = (u8)(e2m1_code(q) | sign);
        }
    }
    for (int i = 0; i < TILE / 2; i++) codes[i] = (u8)(nibbles[2 * i] | nibbles[2 * i + 1] << 4);
    counts->saturated += saturated;
    counts->underflow += underflow;
    counts->zero += zero;
    counts->nonfinite += nonfinite;
}

/* Blocks don't cross rows (k % 16 == 0), so a tensor is one long run of blocks. */
INLINE nvfp4_counts nvfp4_quantize_body(const void *src, size_t blocks, int dtype, float global,
                                        u8 *codes, u8 *scales) {
    nvfp4_counts counts = {0, 0, 0, 0};
    const size_t stride = item_size(dtype) * BLOCK;
    const char *p = src;
    size_t b = 0;
    for (; b + TILE_BLOCKS <= blocks; b += TILE_BLOCKS)
        nvfp4_tile(p + b * stride, dtype, global, codes + b * BLOCK / 2, scales + b, &counts);
    const size_t rest = blocks - b;
    if (rest) { /* the last, partial tile is padded with zero blocks, which are not counted */
        u32 padded[TILE];
        u8 tail_codes[TILE / 2], tail_scales[TILE_BLOCKS];
        memset(padded, 0, sizeof padded);
        memcpy(padded, p + b * stride, rest * stride);
        nvfp4_tile(padded, dtype, global, tail_codes, tail_scales, &counts);
        memcpy(codes + b * BLOCK / 2, tail_codes, rest * BLOCK / 2);
        memcpy(scales + b, tail_scales, rest);
        counts.zero -= (int64_t)(TILE_BLOCKS - rest);
    }
    return counts;
}

INLINE void store(void *out, size_t i, float value, int dtype) {
    if (dtype == BF16)
        ((u16_any *)out)[i] = (u16)to_bf16(as_bits(value));
    else
        ((u32_any *)out)[i] = as_bits(value);
}

/* (e2m1 * block scale) is exact in FP32, so only the product with the global scale rounds. */
INLINE void nvfp4_dequantize_body(const u8 *codes, const u8 *scales, size_t blocks, float global,
                                  void *out, int dtype) {
    for (size_t b = 0; b < blocks; b++) {
        const float scale = e4m3_value(scales[b]);
        for (size_t j = 0; j < BLOCK; j++) {
            size_t i = b * BLOCK + j;
            u32 code = (u32)codes[i / 2] >> (4 * (j & 1u));
            store(out, i, e2m1_value(code) * scale * global, dtype);
        }
    }
}

/* ---- FP8 rows ------------------------------------------------------------------------ */

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
        u8 *out = codes + r * k;
        amax_result m = amax_body(row, k, dtype);
        if (m.nonfinite) {
            if (counts.nonfinite == 0) counts.first_nonfinite = (int64_t)(r * k) + m.first_nonfinite;
            counts.nonfinite += m.nonfinite;
        }
        counts.zero_rows += m.amax == 0.0f;
        float scale = (m.amax == 0.0f ? 1.0f : m.amax) / E4M3_MAX;
        scale = scale < SCALE_FLOOR ? SCALE_FLOOR : scale;
        scales[r] = as_bits(scale);
        for (size_t i = 0; i < k; i++) {
            u32 bits = load_bits(row, i, dtype);
            out[i] = (u8)(e4m3_code(as_float(bits & ABS_MASK) / scale) | (bits >> 24 & 0x80u));
        }
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

/* ---- conversions and scans ----------------------------------------------------------- */

/* Returns how many finite values became infinite (F32 above BF16's range). */
INLINE int64_t convert_body(const void *src, size_t n, int from, void *out, int to) {
    int64_t overflowed = 0;
    for (size_t i = 0; i < n; i++) {
        u32 bits = load_bits(src, i, from);
        if (to == BF16) {
            u32 a = bits & ABS_MASK;
            if (from == F32) overflowed += (a >= 0x7F7F8000u) & (a < INF_BITS);
            ((u16_any *)out)[i] = (u16)to_bf16(bits);
        } else {
            ((u32_any *)out)[i] = bits;
        }
    }
    return overflowed;
}

/* First position at which two buffers differ, or -1. */
static int64_t first_difference(const u8 *a, const u8 *b, size_t n) {
    const size_t chunk = 4096;
    for (size_t start = 0; start < n; start += chunk) {
        size_t length = n - start < chunk ? n - start : chunk;
        if (memcmp(a + start, b + start, length) == 0) continue;
        for (size_t i = 0; i < length; i++)
            if (a[start + i] != b[start + i]) return (int64_t)(start + i);
    }
    return -1;
}

typedef struct {
    int64_t nan, zero, negative, first; /* first: index of the first faulty byte, or -1 */
} scale_scan;

/* A stored scale has to be a positive number: NaN (0x7F, 0xFF), zero and negative are faults. */
INLINE scale_scan scan_body(const u8 *scales, size_t n) {
    scale_scan r = {0, 0, 0, -1};
    for (size_t start = 0; start < n; start += 4096) {
        size_t end = n - start < 4096 ? n : start + 4096;
        u32 faults = 0;
        for (size_t i = start; i < end; i++) faults += (u8)(scales[i] - 1u) >= 0x7Eu;
        if (faults == 0) continue;
        for (size_t i = start; i < end; i++) {
            u32 m = scales[i] & 0x7Fu, negative = scales[i] >> 7;
            r.nan += m == 0x7Fu;
            r.zero += m == 0u;
            r.negative += negative && m != 0x7Fu && m != 0u;
            if (r.first < 0 && (negative || m == 0x7Fu || m == 0u)) r.first = (int64_t)i;
        }
    }
    return r;
}

/* ---- comparison with the source ------------------------------------------------------ */

typedef struct {
    double sum_sq_error, sum_sq_source, max_abs_error;
    int64_t out_of_bound, first_out_of_bound;
} comparison;

/* |x| where a code of the sign of `code` may stand for it; negative if the signs disagree. */
INLINE double along(double x, u32 negative) { return negative ? -x : x; }

/* What rounding in FP32 may move a boundary: two roundings of 2^-24 each, and subnormal scales. */
INLINE double slack(double x) { return (x < 0 ? -x : x) * 0x1p-22 + 0x1p-146; }

/* Half the gap between an E4M3 magnitude and the next one above it; 16 at the top (448). */
INLINE float e4m3_half_gap(u32 m) {
    u32 exponent = m >> 3;
    return as_float(((exponent ? exponent : 1u) + 116u) << 23);
}

INLINE int nvfp4_within(double x, u32 code, double block_scale, double global, u32 scale_code) {
    static const double low[8] = {-0.25, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0};
    static const double high[7] = {0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0};
    const u32 m = code & 7u;
    const double t = along(x, code & 8u), s = block_scale * global;
    if (!(s > 0.0)) return 0; /* zero, negative or NaN scale */
    const double top = m < 7u ? high[m] * s
                              : 6.0 * (block_scale + (double)e4m3_half_gap(scale_code)) * global;
    return low[m] * s - slack(x) <= t && t <= top + slack(x);
}

INLINE int fp8_within(double x, u32 code, double scale) {
    const u32 m = code & 0x7Fu;
    if (m == 0x7Fu || !(scale > 0.0)) return 0;
    const double value = (double)e4m3_value(m), t = along(x, code & 0x80u);
    const double above = (double)e4m3_half_gap(m);
    const double below = m ? (double)e4m3_half_gap(m - 1u) : above;
    return (value - below) * scale - slack(x) <= t && t <= (value + above) * scale + slack(x);
}

INLINE comparison nvfp4_compare_body(const void *src, size_t blocks, int dtype, const u8 *codes,
                                     const u8 *scales, float global) {
    comparison r = {0.0, 0.0, 0.0, 0, -1};
    double sum_error[BLOCK] = {0}, sum_source[BLOCK] = {0}, worst[BLOCK] = {0};
    for (size_t b = 0; b < blocks; b++) {
        const float block_scale = e4m3_value(scales[b]);
        const double s = (double)block_scale * (double)global; /* exact */
        const float step = block_scale * global;
        const float limit = 6.0f * (block_scale + e4m3_half_gap(scales[b])) * global * 0.99999f;
        u32 unsure = !(step > 0.0f);
        for (int j = 0; j < BLOCK; j++) {
            size_t i = b * BLOCK + (size_t)j;
            u32 code = ((u32)codes[i / 2] >> (4 * (j & 1))) & 15u;
            u32 bits = load_bits(src, i, dtype);
            double x = (double)as_float(bits);
            double error = x - (double)e2m1_value(code) * s;
            double size = error < 0.0 ? -error : error;
            sum_error[j] += error * error;
            sum_source[j] += x * x;
            worst[j] = size > worst[j] ? size : worst[j];
            float q = as_float(bits & ABS_MASK) / step;
            u32 expected = e2m1_code(q) | (q > 0.0f ? bits >> 28 & 8u : 0u);
            unsure |= (u32)(expected != code) | (u32)!(as_float(bits & ABS_MASK) <= limit);
        }
        /* The code that quantizing again would give is within bounds; anything else (a tie broken
         * otherwise, clipping, a fault) is judged by the definition. */
        if (unsure) {
            for (int j = 0; j < BLOCK; j++) {
                size_t i = b * BLOCK + (size_t)j;
                u32 code = ((u32)codes[i / 2] >> (4 * (j & 1))) & 15u;
                double x = (double)as_float(load_bits(src, i, dtype));
                if (nvfp4_within(x, code, (double)block_scale, (double)global, scales[b])) continue;
                if (r.out_of_bound++ == 0) r.first_out_of_bound = (int64_t)i;
            }
        }
    }
    for (int j = 0; j < BLOCK; j++) {
        r.sum_sq_error += sum_error[j];
        r.sum_sq_source += sum_source[j];
        r.max_abs_error = worst[j] > r.max_abs_error ? worst[j] : r.max_abs_error;
    }
    return r;
}

INLINE comparison fp8_compare_body(const void *src, size_t rows, size_t k, int dtype,
                                   const u8 *codes, const u32_any *scales) {
    enum { LANES = 16 };
    comparison r = {0.0, 0.0, 0.0, 0, -1};
    double sum_error[LANES] = {0}, sum_source[LANES] = {0}, worst[LANES] = {0};
    for (size_t row = 0; row < rows; row++) {
        const float scale = as_float(scales[row]);
        for (size_t start = 0; start < k; start += LANES) {
            const size_t width = k - start < LANES ? k - start : LANES;
            const size_t base = row * k + start;
            u32 unsure = !(scale > 0.0f);
            for (size_t j = 0; j < width; j++) {
                u32 code = codes[base + j], bits = load_bits(src, base + j, dtype);
                double x = (double)as_float(bits);
                double error = x - (double)e4m3_value(code) * (double)scale;
                double size = error < 0.0 ? -error : error;
                sum_error[j] += error * error;
                sum_source[j] += x * x;
                worst[j] = size > worst[j] ? size : worst[j];
                float q = as_float(bits & ABS_MASK) / scale;
                unsure |= (u32)((e4m3_code(q) | (bits >> 24 & 0x80u)) != code) | (u32)!(q <= 448.0f);
            }
            if (!unsure) continue;
            for (size_t j = 0; j < width; j++) {
                double x = (double)as_float(load_bits(src, base + j, dtype));
                if (fp8_within(x, codes[base + j], (double)scale)) continue;
                if (r.out_of_bound++ == 0) r.first_out_of_bound = (int64_t)(base + j);
            }
        }
    }
    for (int j = 0; j < LANES; j++) {
        r.sum_sq_error += sum_error[j];
        r.sum_sq_source += sum_source[j];
        r.max_abs_error = worst[j] > r.max_abs_error ? worst[j] : r.max_abs_error;
    }
    return r;
}

#endif
