/* Digests of every CPU kernel's output over fixed inputs, without Python: to compare processors.
 *
 *   cc -std=c11 -O3 -ffp-contract=off -fno-math-errno -fno-trapping-math \
 *      -I beamq/formats/kernels benchmarks/kernels_digest.c -o kernels_digest && ./kernels_digest
 *
 * Inputs are all 65,536 patterns of BF16 and F16 and as many FP32 patterns, scattered by a fixed
 * permutation (finite ones only, where sums are taken). Two machines, compilers or instruction
 * sets agree if the printed lines do. For aarch64 on another machine: aarch64-linux-gnu-gcc with
 * -static, run by qemu-aarch64.
 */
#include <stdio.h>

#include "_compare.h"

enum { N = 65536, K = 64 };

static u8 source[N * 4], codes[N], scales[N * 4], decoded[N * 4];

static u64 digest(u64 h, const void *data, size_t n) {
    const u8 *p = data;
    for (size_t i = 0; i < n; i++) h = (h ^ p[i]) * 0x100000001B3ull;
    return h;
}

static void fill(int dtype, int finite) {
    for (u32 i = 0; i < N; i++) {
        u32 x = (i * 40503u + 12345u) & 0xFFFFu; /* odd factor: a permutation */
        if (dtype == F32) x = x << 16 | ((x * 2654435761u) >> 16);
        u32 infinity = native_inf(dtype), magnitude = x & (infinity | (infinity - 1u));
        if (dtype == F32) magnitude = x & ABS_MASK;
        if (finite && magnitude >= infinity) x = 0;
        memcpy(source + i * item_size(dtype), &x, item_size(dtype));
    }
}

static u64 comparison_digest(u64 h, comparison r) {
    h = digest(h, &r.sum_sq_error, 8);
    h = digest(h, &r.sum_sq_source, 8);
    h = digest(h, &r.max_abs_error, 8);
    h = digest(h, &r.out_of_bound, 8);
    return digest(h, &r.first_out_of_bound, 8);
}

static u64 nvfp4(int dtype) {
    static const float globals[] = {1.0f, 7.4e-6f, 0x1p-126f, 1.7e-36f, 0x1p117f};
    u64 h = 0xCBF29CE484222325ull;
    for (size_t g = 0; g < sizeof globals / sizeof *globals; g++) {
        fill(dtype, 0);
        nvfp4_counts c = nvfp4_quantize_body(source, N / 16 - 1, dtype, globals[g], codes, scales);
        h = digest(digest(h, codes, N / 2 - 8), scales, N / 16 - 1);
        h = digest(h, &c, sizeof c);
        nvfp4_dequantize_body(codes, scales, N / 16 - 1, globals[g], decoded, F32);
        h = digest(h, decoded, (N - 16) * 4);
        nvfp4_dequantize_body(codes, scales, N / 16 - 1, globals[g], decoded, BF16);
        h = digest(h, decoded, (N - 16) * 2);
        fill(dtype, 1);
        h = comparison_digest(
            h, nvfp4_compare_body(source, N / 16 - 1, dtype, codes, scales, globals[g], 0));
        codes[77] ^= 3;
        h = comparison_digest(
            h, nvfp4_compare_body(source, N / 16 - 1, dtype, codes, scales, globals[g], 0));
    }
    return h;
}

static u64 sweep(int dtype) {
    static const float globals[] = {1.0f, 7.4e-6f, 0x1p-126f, 1.7e-36f, 0x1p117f};
    static float weights[K];
    u64 h = 0xCBF29CE484222325ull;
    for (int i = 0; i < K; i++) weights[i] = (float)(1 + i * 37 % 11) * 0.125f;
    for (size_t g = 0; g < sizeof globals / sizeof *globals; g++)
        for (int weighted = 0; weighted < 2; weighted++) {
            const size_t blocks = N / 16 - 1;
            fill(dtype, 0);
            nvfp4_counts c = nvfp4_sweep_body(source, blocks, dtype, globals[g],
                                              weighted ? weights : 0, K / 16, codes, scales);
            h = digest(digest(h, codes, blocks * 8), scales, blocks);
            h = digest(h, &c, sizeof c);
            fill(dtype, 1);
            h = comparison_digest(
                h, nvfp4_compare_body(source, blocks, dtype, codes, scales, globals[g], 1));
        }
    return h;
}

static u64 fp8(int dtype) {
    static const size_t widths[] = {K, 1, 33, 4096};
    u64 h = 0xCBF29CE484222325ull;
    for (size_t w = 0; w < 4; w++) {
        const size_t k = widths[w], rows = N / k;
        fill(dtype, 0);
        fp8_counts c = fp8_quantize_body(source, rows, k, dtype, codes, (u32_any *)scales);
        h = digest(digest(h, codes, rows * k), scales, rows * 4);
        h = digest(h, &c, sizeof c);
        fp8_dequantize_body(codes, (u32_any *)scales, rows, k, decoded, F32);
        h = digest(h, decoded, rows * k * 4);
        fill(dtype, 1);
        h = comparison_digest(
            h, fp8_compare_body(source, rows, k, dtype, codes, (u32_any *)scales));
    }
    return h;
}

static u64 conversions(int dtype) {
    u64 h = 0xCBF29CE484222325ull;
    fill(dtype, 0);
    if (dtype != BF16) {
        int64_t overflowed = convert_body(source, N, dtype, decoded, BF16);
        h = digest(digest(h, decoded, N * 2), &overflowed, 8);
    }
    if (dtype != F32) {
        convert_body(source, N, dtype, decoded, F32);
        h = digest(h, decoded, N * 4);
    }
    amax_result m = amax_body(source, N, dtype);
    h = digest(digest(h, &m.amax, 4), &m.nonfinite, 8);
    scale_scan s = scan_body(source, N);
    return digest(digest(h, &m.first_nonfinite, 8), &s, sizeof s);
}

int main(void) {
    static const char *const names[] = {"BF16", "F16", "F32"};
    for (int dtype = 0; dtype < 3; dtype++)
        printf("%-4s nvfp4 %016llx  fp8 %016llx  convert %016llx  sweep %016llx\n", names[dtype],
               (unsigned long long)nvfp4(dtype), (unsigned long long)fp8(dtype),
               (unsigned long long)conversions(dtype), (unsigned long long)sweep(dtype));
    return 0;
}
