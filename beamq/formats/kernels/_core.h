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
 * Limits: little-endian hosts. A thread that flushes FP32 denormals (no default of CPython's) may
 * give other codes to values below 2^-126; none else change.
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

enum { BF16 = 0, F16 = 1, F32 = 2 };

#define INF_BITS 0x7F800000u
#define ABS_MASK 0x7FFFFFFFu
#define QUIET_NAN 0x7FC00000u
#define E4M3_MIN 0x1p-9f /* smallest positive E4M3 */
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

/* F16 bits to F32 bits: exact; a NaN becomes quiet. Subnormals go through an integer, so that even
 * a process that flushes denormals reads them right (F16 has them up to 6e-5). */
INLINE u32 half_to_bits(u32 half) {
    u32 m = half & 0x7FFFu;
    u32 bits = m < 0x400u ? as_bits((float)(int32_t)m * 0x1p-24f) : (m << 13) + (112u << 23);
    bits = m >= 0x7C00u ? m << 13 | INF_BITS | (m > 0x7C00u ? 0x400000u : 0u) : bits;
    return bits | (half & 0x8000u) << 16;
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

/* BF16 bits, nearest even, of bits that are no NaN or QUIET_NAN. */
INLINE u32 round_to_bf16(u32 bits) { return (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16; }

/* BF16 bits, nearest even; a NaN becomes the quiet one of its sign. */
INLINE u32 to_bf16(u32 bits) {
    u32 rounded = round_to_bf16(bits);
    return (bits & ABS_MASK) > INF_BITS ? 0x7FC0u | (bits >> 16 & 0x8000u) : rounded;
}

/* F16 bits likewise; from 65,520 on it is infinity. Subnormal ones count multiples of 2^-24. */
INLINE u32 to_f16(u32 bits) {
    u32 a = bits & ABS_MASK;
    u32 normal = ((a + 0xFFFu + ((a >> 13) & 1u)) >> 13) - (112u << 10);
    u32 small = as_bits(as_float(a) + 0.5f) & 0x7FFu;
    u32 large = a < 0x477FF000u ? normal : a > INF_BITS ? 0x7E00u : 0x7C00u;
    return (a < 0x38800000u ? small : large) | (bits >> 16 & 0x8000u); /* 2^-14 */
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
INLINE int64_t first_difference(const u8 *a, const u8 *b, size_t n) {
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

#endif
