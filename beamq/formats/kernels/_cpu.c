/* beamq.formats.kernels._cpu: the bodies of the headers here as Python functions over raw buffers.
 *
 * In:  bytes-like objects (C-contiguous, any alignment) and dtype names as safetensors has them.
 * Out: tuples of numbers; kernels/cpu.py gives them names. Every size is checked here, before the
 *      GIL is released, since a wrong one would be a memory error: ValueError, nothing written.
 *
 * Each body is compiled for baseline, AVX2 and AVX-512 on x86 and once elsewhere (NEON is aarch64's
 * baseline); the best one is chosen when the module is imported. Buffers stay exported during a
 * call, so their owner cannot resize or free them meanwhile. One binary serves Python 3.11 and
 * later (the stable ABI).
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "_compare.h"
#include "_lowrank.h"

/* ---- one body, several instruction sets ---------------------------------------------------- */

#if defined(__GNUC__) && defined(__x86_64__)
#ifdef __clang__
#define WIDE
#else
#define WIDE ",prefer-vector-width=512"
#endif
#define AVX2_FLAGS "avx2,fma,bmi,bmi2,f16c"
#define AVX2 __attribute__((target(AVX2_FLAGS)))
#define AVX512 __attribute__((target(AVX2_FLAGS ",avx512f,avx512bw,avx512vl,avx512dq" WIDE)))
static int level = 0; /* 0 baseline, 1 AVX2, 2 AVX-512; set at import */

static int best_level(void) {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return 0;
    if (!__builtin_cpu_supports("bmi") || !__builtin_cpu_supports("bmi2")) return 0;
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")
               ? 2
               : 1;
}

/* A body may ask for its own LEVEL; the variable `level` is what the machine has. */
#define LEVELS(type, name, params, args, ...)        \
    static type name##_baseline params { enum { LEVEL = 0 }; __VA_ARGS__ }  \
    AVX2 static type name##_avx2 params { enum { LEVEL = 1 }; __VA_ARGS__ } \
    AVX512 static type name##_avx512 params { enum { LEVEL = 2 }; __VA_ARGS__ } \
    static type name params {                        \
        if (level == 2) return name##_avx512 args;   \
        if (level == 1) return name##_avx2 args;     \
        return name##_baseline args;                 \
    }
#else
static int level = 0;
static int best_level(void) { return 0; }
#ifdef __FP_FAST_FMAF
#define FMA_ONLY 1
#else
#define FMA_ONLY 0
#endif
#define LEVELS(type, name, params, args, ...) \
    static type name params { enum { LEVEL = FMA_ONLY }; __VA_ARGS__ }
#endif

LEVELS(amax_result, run_amax, (const void *src, size_t n, int dtype), (src, n, dtype), {
    if (dtype == BF16) return amax_body(src, n, BF16);
    if (dtype == F16) return amax_body(src, n, F16);
    return amax_body(src, n, F32);
})

LEVELS(nvfp4_counts, run_nvfp4_quantize,
       (const void *src, size_t blocks, int dtype, float global, u8 *codes, u8 *scales),
       (src, blocks, dtype, global, codes, scales), {
           if (dtype == BF16) return nvfp4_quantize_body(src, blocks, BF16, global, codes, scales);
           if (dtype == F16) return nvfp4_quantize_body(src, blocks, F16, global, codes, scales);
           return nvfp4_quantize_body(src, blocks, F32, global, codes, scales);
       })

LEVELS(nvfp4_counts, run_nvfp4_sweep,
       (const void *src, size_t blocks, int dtype, float global, const float *weights,
        size_t row_blocks, u8 *codes, u8 *scales),
       (src, blocks, dtype, global, weights, row_blocks, codes, scales), {
           return nvfp4_sweep_body(src, blocks, dtype, global, weights, row_blocks, codes, scales);
       })

LEVELS(fp8_counts, run_fp8_quantize,
       (const void *src, size_t rows, size_t k, int dtype, u8 *codes, void *scales),
       (src, rows, k, dtype, codes, scales), {
           if (dtype == BF16) return fp8_quantize_body(src, rows, k, BF16, codes, scales);
           if (dtype == F16) return fp8_quantize_body(src, rows, k, F16, codes, scales);
           return fp8_quantize_body(src, rows, k, F32, codes, scales);
       })

LEVELS(int, run_nvfp4_dequantize,
       (const u8 *codes, const u8 *scales, size_t blocks, float global, void *out, int dtype),
       (codes, scales, blocks, global, out, dtype), {
           if (dtype == BF16)
               nvfp4_dequantize_body(codes, scales, blocks, global, out, BF16);
           else
               nvfp4_dequantize_body(codes, scales, blocks, global, out, F32);
           return 0;
       })

LEVELS(int, run_fp8_dequantize,
       (const u8 *codes, const void *scales, size_t rows, size_t k, void *out, int dtype),
       (codes, scales, rows, k, out, dtype), {
           if (dtype == BF16)
               fp8_dequantize_body(codes, scales, rows, k, out, BF16);
           else
               fp8_dequantize_body(codes, scales, rows, k, out, F32);
           return 0;
       })

LEVELS(fp8_counts, run_fp8_quantize_groups,
       (const void *src, size_t rows, size_t k, int dtype, int mx, u8 *codes, void *scales),
       (src, rows, k, dtype, mx, codes, scales), {
           if (dtype == BF16 && mx)
               return fp8_quantize_groups_body(src, rows, k, BF16, 1, codes, scales);
           if (dtype == BF16)
               return fp8_quantize_groups_body(src, rows, k, BF16, 0, codes, scales);
           if (dtype == F16) return fp8_quantize_groups_body(src, rows, k, F16, mx, codes, scales);
           return fp8_quantize_groups_body(src, rows, k, F32, mx, codes, scales);
       })

LEVELS(int, run_fp8_dequantize_groups,
       (const u8 *codes, const void *scales, size_t rows, size_t k, int mx, void *out, int dtype),
       (codes, scales, rows, k, mx, out, dtype), {
           if (dtype == BF16)
               fp8_dequantize_groups_body(codes, scales, rows, k, mx, out, BF16);
           else
               fp8_dequantize_groups_body(codes, scales, rows, k, mx, out, F32);
           return 0;
       })

LEVELS(comparison, run_fp8_compare_groups,
       (const void *src, size_t rows, size_t k, int dtype, int mx, const u8 *codes,
        const void *scales, int exact),
       (src, rows, k, dtype, mx, codes, scales, exact), {
           return fp8_compare_groups_body(src, rows, k, dtype, mx, codes, scales, exact);
       })

LEVELS(int64_t, run_convert, (const void *src, size_t n, int from, void *out, int to),
       (src, n, from, out, to), {
           if (from == F32) return convert_body(src, n, F32, out, BF16);
           if (from == BF16) return convert_body(src, n, BF16, out, F32);
           if (to == BF16) return convert_body(src, n, F16, out, BF16);
           return convert_body(src, n, F16, out, F32);
       })

/* At level 1 three rows of sums fit 16 registers of 8 numbers (or 32 of 4), at level 2 eight. */
LEVELS(int, run_add_low_rank, (const low_rank *t), (t), {
    low_rank_body(t, LEVEL == 2 ? 8 : LEVEL == 1 ? 3 : 1, LEVEL > 0);
    return 0;
})

LEVELS(comparison, run_nvfp4_compare,
       (const void *src, size_t blocks, int dtype, const u8 *codes, const u8 *scales, float global,
        int swept),
       (src, blocks, dtype, codes, scales, global, swept), {
           if (dtype == BF16)
               return nvfp4_compare_body(src, blocks, BF16, codes, scales, global, swept);
           if (dtype == F16)
               return nvfp4_compare_body(src, blocks, F16, codes, scales, global, swept);
           return nvfp4_compare_body(src, blocks, F32, codes, scales, global, swept);
       })

LEVELS(comparison, run_fp8_compare,
       (const void *src, size_t rows, size_t k, int dtype, const u8 *codes, const void *scales),
       (src, rows, k, dtype, codes, scales), {
           if (dtype == BF16) return fp8_compare_body(src, rows, k, BF16, codes, scales);
           if (dtype == F16) return fp8_compare_body(src, rows, k, F16, codes, scales);
           return fp8_compare_body(src, rows, k, F32, codes, scales);
       })

LEVELS(scale_scan, run_scan, (const u8 *scales, size_t n), (scales, n),
       { return scan_body(scales, n); })

/* ---- arguments ----------------------------------------------------------------------------- */

static int dtype_code(const char *name) {
    if (strcmp(name, "BF16") == 0) return BF16;
    if (strcmp(name, "F16") == 0) return F16;
    if (strcmp(name, "F32") == 0) return F32;
    PyErr_Format(PyExc_ValueError, "dtype '%s' is not one of BF16, F16, F32", name);
    return -1;
}

static int out_dtype_code(const char *name) {
    int dtype = dtype_code(name);
    if (dtype != F16) return dtype;
    PyErr_SetString(PyExc_ValueError, "out_dtype 'F16' is not one of BF16, F32");
    return -1;
}

/* Whole rows of k values in `buffer`, or -1 with an exception set. */
static Py_ssize_t row_count(const Py_buffer *buffer, size_t itemsize, Py_ssize_t k) {
    if (k <= 0) {
        PyErr_Format(PyExc_ValueError, "k is %zd; a row has at least one value", k);
        return -1;
    }
    if (k > PY_SSIZE_T_MAX / 8 || buffer->len % ((Py_ssize_t)itemsize * k) != 0) {
        PyErr_Format(PyExc_ValueError, "%zd bytes are not whole rows of %zd values of %zu bytes",
                     buffer->len, k, itemsize);
        return -1;
    }
    return buffer->len / ((Py_ssize_t)itemsize * k);
}

static int has_size(const char *name, const Py_buffer *buffer, Py_ssize_t nbytes) {
    if (buffer->len == nbytes) return 1;
    PyErr_Format(PyExc_ValueError, "%s holds %zd bytes, needs %zd", name, buffer->len, nbytes);
    return 0;
}

static int is_blocked(Py_ssize_t k) {
    if (k > 0 && k % BLOCK == 0) return 1;
    PyErr_Format(PyExc_ValueError, "k is %zd; NVFP4 needs a positive multiple of 16", k);
    return 0;
}

static int is_global_scale(double scale) {
    if (scale >= (double)SCALE_FLOOR && scale <= 0x1p117) return 1; /* NaN fails both */
    PyErr_SetString(PyExc_ValueError, "global_scale must be finite, from 2**-126 to 2**117");
    return 0;
}

static int is_scaling(double scaling) {
    if (scaling > -0x1.ffffffp127 && scaling < 0x1.ffffffp127) return 1; /* what rounds to FP32 */
    PyErr_SetString(PyExc_ValueError, "scaling must be finite in FP32");
    return 0;
}

/* The rank r of FP32 factors a [r, k] and b [rows, r], or -1 with an exception set. */
static Py_ssize_t rank_of(const Py_buffer *a, const Py_buffer *b, Py_ssize_t k, Py_ssize_t rows) {
    Py_ssize_t rank = row_count(a, 4, k);
    if (rank == 0) PyErr_SetString(PyExc_ValueError, "a is empty; the rank is at least 1");
    if (rank <= 0) return -1;
    if (b->len / 4 / rank == rows && b->len % (4 * rank) == 0) return rank; /* cannot overflow */
    PyErr_Format(PyExc_ValueError, "b holds %zd bytes, needs %zd rows of %zd FP32 values", b->len,
                 rows, rank);
    return -1;
}

static void release(Py_buffer *buffers, int count) {
    for (int i = 0; i < count; i++)
        if (buffers[i].obj) PyBuffer_Release(&buffers[i]);
}

/* ---- functions ----------------------------------------------------------------------------- */

static PyObject *py_amax(PyObject *self, PyObject *args) {
    Py_buffer src;
    const char *name;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*s:amax", &src, &name)) return NULL;
    PyObject *result = NULL;
    int dtype = dtype_code(name);
    if (dtype >= 0 && row_count(&src, item_size(dtype), 1) >= 0) {
        amax_result r;
        Py_BEGIN_ALLOW_THREADS
        r = run_amax(src.buf, (size_t)src.len / item_size(dtype), dtype);
        Py_END_ALLOW_THREADS
        result = Py_BuildValue("dLL", (double)r.amax, (long long)r.nonfinite,
                               (long long)r.first_nonfinite);
    }
    PyBuffer_Release(&src);
    return result;
}

static PyObject *py_nvfp4_quantize(PyObject *self, PyObject *args) {
    Py_buffer b[3] = {{0}, {0}, {0}}; /* src, codes, scales */
    const char *name;
    Py_ssize_t k, rows;
    double global;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*sndw*w*:nvfp4_quantize", &b[0], &name, &k, &global, &b[1], &b[2]))
        return NULL;
    PyObject *result = NULL;
    int dtype = dtype_code(name);
    if (dtype >= 0 && is_blocked(k) && is_global_scale(global) &&
        (rows = row_count(&b[0], item_size(dtype), k)) >= 0 &&
        has_size("out_codes", &b[1], rows * (k / 2)) &&
        has_size("out_scales", &b[2], rows * (k / BLOCK))) {
        nvfp4_counts r;
        Py_BEGIN_ALLOW_THREADS
        r = run_nvfp4_quantize(b[0].buf, (size_t)(rows * (k / BLOCK)), dtype, (float)global,
                               b[1].buf, b[2].buf);
        Py_END_ALLOW_THREADS
        result = Py_BuildValue("LLLL", (long long)r.saturated, (long long)r.underflow,
                               (long long)r.zero, (long long)r.nonfinite);
    }
    release(b, 3);
    return result;
}

/* `weights`: None, or k FP32 numbers, one for each column. */
static PyObject *py_nvfp4_sweep(PyObject *self, PyObject *args) {
    Py_buffer b[4] = {{0}, {0}, {0}, {0}}; /* src, codes, scales, weights */
    const char *name;
    PyObject *given;
    Py_ssize_t k, rows;
    double global;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*sndOw*w*:nvfp4_sweep", &b[0], &name, &k, &global, &given, &b[1],
                          &b[2]))
        return NULL;
    PyObject *result = NULL;
    int dtype = dtype_code(name), weighted = given != Py_None;
    if (weighted && PyObject_GetBuffer(given, &b[3], PyBUF_SIMPLE) != 0) dtype = -1;
    if (dtype >= 0 && is_blocked(k) && is_global_scale(global) &&
        (rows = row_count(&b[0], item_size(dtype), k)) >= 0 &&
        has_size("out_codes", &b[1], rows * (k / 2)) &&
        has_size("out_scales", &b[2], rows * (k / BLOCK)) &&
        (!weighted || has_size("weights", &b[3], k * 4))) {
        nvfp4_counts r;
        Py_BEGIN_ALLOW_THREADS
        r = run_nvfp4_sweep(b[0].buf, (size_t)(rows * (k / BLOCK)), dtype, (float)global,
                            weighted ? b[3].buf : NULL, (size_t)(k / BLOCK), b[1].buf, b[2].buf);
        Py_END_ALLOW_THREADS
        result = Py_BuildValue("LLLL", (long long)r.saturated, (long long)r.underflow,
                               (long long)r.zero, (long long)r.nonfinite);
    }
    release(b, 4);
    return result;
}

static PyObject *py_fp8_quantize_rows(PyObject *self, PyObject *args) {
    Py_buffer b[3] = {{0}, {0}, {0}};
    const char *name;
    Py_ssize_t k, rows;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*snw*w*:fp8_quantize_rows", &b[0], &name, &k, &b[1], &b[2]))
        return NULL;
    PyObject *result = NULL;
    int dtype = dtype_code(name);
    if (dtype >= 0 && (rows = row_count(&b[0], item_size(dtype), k)) >= 0 &&
        has_size("out_codes", &b[1], rows * k) && has_size("out_scales", &b[2], rows * 4)) {
        fp8_counts r;
        Py_BEGIN_ALLOW_THREADS
        r = run_fp8_quantize(b[0].buf, (size_t)rows, (size_t)k, dtype, b[1].buf, b[2].buf);
        Py_END_ALLOW_THREADS
        result = Py_BuildValue("LLL", (long long)r.nonfinite, (long long)r.first_nonfinite,
                               (long long)r.zero_rows);
    }
    release(b, 3);
    return result;
}

static PyObject *py_nvfp4_dequantize(PyObject *self, PyObject *args) {
    Py_buffer b[3] = {{0}, {0}, {0}}; /* codes, scales, out */
    const char *name;
    Py_ssize_t k, rows;
    double global;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*y*ndw*s:nvfp4_dequantize", &b[0], &b[1], &k, &global, &b[2],
                          &name))
        return NULL;
    PyObject *result = NULL;
    int dtype = out_dtype_code(name);
    if (dtype >= 0 && is_blocked(k) && is_global_scale(global) &&
        (rows = row_count(&b[0], 1, k / 2)) >= 0 && has_size("scales", &b[1], rows * (k / BLOCK)) &&
        has_size("out", &b[2], rows * k * (Py_ssize_t)item_size(dtype))) {
        Py_BEGIN_ALLOW_THREADS
        run_nvfp4_dequantize(b[0].buf, b[1].buf, (size_t)(rows * (k / BLOCK)), (float)global,
                             b[2].buf, dtype);
        Py_END_ALLOW_THREADS
        result = Py_NewRef(Py_None);
    }
    release(b, 3);
    return result;
}

static PyObject *py_fp8_dequantize_rows(PyObject *self, PyObject *args) {
    Py_buffer b[3] = {{0}, {0}, {0}};
    const char *name;
    Py_ssize_t k, rows;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*y*nw*s:fp8_dequantize_rows", &b[0], &b[1], &k, &b[2], &name))
        return NULL;
    PyObject *result = NULL;
    int dtype = out_dtype_code(name);
    if (dtype >= 0 && (rows = row_count(&b[0], 1, k)) >= 0 && has_size("scales", &b[1], rows * 4) &&
        has_size("out", &b[2], rows * k * (Py_ssize_t)item_size(dtype))) {
        Py_BEGIN_ALLOW_THREADS
        run_fp8_dequantize(b[0].buf, b[1].buf, (size_t)rows, (size_t)k, b[2].buf, dtype);
        Py_END_ALLOW_THREADS
        result = Py_NewRef(Py_None);
    }
    release(b, 3);
    return result;
}

static PyObject *py_convert(PyObject *self, PyObject *args) {
    Py_buffer b[2] = {{0}, {0}};
    const char *from_name, *to_name;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*sw*s:convert", &b[0], &from_name, &b[1], &to_name)) return NULL;
    PyObject *result = NULL;
    int from = dtype_code(from_name), to = from < 0 ? -1 : out_dtype_code(to_name);
    Py_ssize_t n;
    if (to >= 0 && from == to) {
        PyErr_SetString(PyExc_ValueError, "source and output have the same dtype; copy the bytes");
    } else if (to >= 0 && (n = row_count(&b[0], item_size(from), 1)) >= 0 &&
               has_size("out", &b[1], n * (Py_ssize_t)item_size(to))) {
        int64_t overflowed;
        Py_BEGIN_ALLOW_THREADS
        overflowed = run_convert(b[0].buf, (size_t)n, from, b[1].buf, to);
        Py_END_ALLOW_THREADS
        result = PyLong_FromLongLong(overflowed);
    }
    release(b, 2);
    return result;
}

static PyObject *py_add_low_rank(PyObject *self, PyObject *args) {
    Py_buffer b[4] = {{0}, {0}, {0}, {0}}; /* src, a, b, out */
    const char *name, *out_name;
    Py_ssize_t k, rows, rank;
    double scaling;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*sny*y*dw*s:add_low_rank", &b[0], &name, &k, &b[1], &b[2],
                          &scaling, &b[3], &out_name))
        return NULL;
    PyObject *result = NULL;
    int dtype = dtype_code(name), out_dtype = dtype < 0 ? -1 : dtype_code(out_name);
    if (out_dtype >= 0 && out_dtype != dtype && out_dtype != F32) {
        PyErr_Format(PyExc_ValueError, "out_dtype '%s' is neither F32 nor src's", out_name);
    } else if (out_dtype >= 0 && is_scaling(scaling) &&
               (rows = row_count(&b[0], item_size(dtype), k)) >= 0 &&
               (rank = rank_of(&b[1], &b[2], k, rows)) > 0 &&
               has_size("out", &b[3], rows * k * (Py_ssize_t)item_size(out_dtype))) {
        low_rank t = {b[0].buf, b[1].buf, b[2].buf, b[3].buf, (size_t)rows, (size_t)k, (size_t)rank,
                      (float)scaling, dtype, out_dtype};
        Py_BEGIN_ALLOW_THREADS
        run_add_low_rank(&t);
        Py_END_ALLOW_THREADS
        result = Py_NewRef(Py_None);
    }
    release(b, 4);
    return result;
}

static PyObject *comparison_tuple(comparison r) {
    return Py_BuildValue("dddLL", r.sum_sq_error, r.sum_sq_source, r.max_abs_error,
                         (long long)r.out_of_bound, (long long)r.first_out_of_bound);
}

static PyObject *py_nvfp4_compare(PyObject *self, PyObject *args) {
    Py_buffer b[3] = {{0}, {0}, {0}}; /* src, codes, scales */
    const char *name;
    Py_ssize_t k, rows;
    double global;
    int swept = 0;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*sy*y*nd|p:nvfp4_compare", &b[0], &name, &b[1], &b[2], &k,
                          &global, &swept))
        return NULL;
    PyObject *result = NULL;
    int dtype = dtype_code(name);
    if (dtype >= 0 && is_blocked(k) && is_global_scale(global) &&
        (rows = row_count(&b[0], item_size(dtype), k)) >= 0 &&
        has_size("codes", &b[1], rows * (k / 2)) &&
        has_size("scales", &b[2], rows * (k / BLOCK))) {
        comparison r;
        Py_BEGIN_ALLOW_THREADS
        r = run_nvfp4_compare(b[0].buf, (size_t)(rows * (k / BLOCK)), dtype, b[1].buf, b[2].buf,
                              (float)global, swept);
        Py_END_ALLOW_THREADS
        result = comparison_tuple(r);
    }
    release(b, 3);
    return result;
}

static PyObject *py_fp8_compare(PyObject *self, PyObject *args) {
    Py_buffer b[3] = {{0}, {0}, {0}};
    const char *name;
    Py_ssize_t k, rows;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*sy*y*n:fp8_compare", &b[0], &name, &b[1], &b[2], &k)) return NULL;
    PyObject *result = NULL;
    int dtype = dtype_code(name);
    if (dtype >= 0 && (rows = row_count(&b[0], item_size(dtype), k)) >= 0 &&
        has_size("codes", &b[1], rows * k) && has_size("scales", &b[2], rows * 4)) {
        comparison r;
        Py_BEGIN_ALLOW_THREADS
        r = run_fp8_compare(b[0].buf, (size_t)rows, (size_t)k, dtype, b[1].buf, b[2].buf);
        Py_END_ALLOW_THREADS
        result = comparison_tuple(r);
    }
    release(b, 3);
    return result;
}

/* Bytes of the scales of [rows, k], or -1 with an exception set. */
static Py_ssize_t group_scale_nbytes(Py_ssize_t rows, Py_ssize_t k, int mx) {
    if (!mx)
        return 4 * (Py_ssize_t)(groups_of((size_t)rows, FP8_BLOCK) *
                                groups_of((size_t)k, FP8_BLOCK));
    if (k % MX_BLOCK == 0) return rows * (k / MX_BLOCK);
    PyErr_Format(PyExc_ValueError, "k is %zd; MXFP8 needs a positive multiple of 32", k);
    return -1;
}

static PyObject *py_fp8_quantize_groups(PyObject *self, PyObject *args) {
    Py_buffer b[3] = {{0}, {0}, {0}};
    const char *name;
    Py_ssize_t k, rows, nbytes;
    int mx;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*snpw*w*:fp8_quantize_groups", &b[0], &name, &k, &mx, &b[1],
                          &b[2]))
        return NULL;
    PyObject *result = NULL;
    int dtype = dtype_code(name);
    if (dtype >= 0 && (rows = row_count(&b[0], item_size(dtype), k)) >= 0 &&
        (nbytes = group_scale_nbytes(rows, k, mx)) >= 0 &&
        has_size("out_codes", &b[1], rows * k) && has_size("out_scales", &b[2], nbytes)) {
        fp8_counts r;
        Py_BEGIN_ALLOW_THREADS
        r = run_fp8_quantize_groups(b[0].buf, (size_t)rows, (size_t)k, dtype, mx, b[1].buf,
                                    b[2].buf);
        Py_END_ALLOW_THREADS
        result = Py_BuildValue("LLL", (long long)r.nonfinite, (long long)r.first_nonfinite,
                               (long long)r.zero_rows);
    }
    release(b, 3);
    return result;
}

static PyObject *py_fp8_dequantize_groups(PyObject *self, PyObject *args) {
    Py_buffer b[3] = {{0}, {0}, {0}};
    const char *name;
    Py_ssize_t k, rows, nbytes;
    int mx;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*y*npw*s:fp8_dequantize_groups", &b[0], &b[1], &k, &mx, &b[2],
                          &name))
        return NULL;
    PyObject *result = NULL;
    int dtype = out_dtype_code(name);
    if (dtype >= 0 && (rows = row_count(&b[0], 1, k)) >= 0 &&
        (nbytes = group_scale_nbytes(rows, k, mx)) >= 0 && has_size("scales", &b[1], nbytes) &&
        has_size("out", &b[2], rows * k * (Py_ssize_t)item_size(dtype))) {
        Py_BEGIN_ALLOW_THREADS
        run_fp8_dequantize_groups(b[0].buf, b[1].buf, (size_t)rows, (size_t)k, mx, b[2].buf, dtype);
        Py_END_ALLOW_THREADS
        result = Py_NewRef(Py_None);
    }
    release(b, 3);
    return result;
}

static PyObject *py_fp8_compare_groups(PyObject *self, PyObject *args) {
    Py_buffer b[3] = {{0}, {0}, {0}};
    const char *name;
    Py_ssize_t k, rows, nbytes;
    int mx, exact;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*sy*y*npp:fp8_compare_groups", &b[0], &name, &b[1], &b[2], &k,
                          &mx, &exact))
        return NULL;
    PyObject *result = NULL;
    int dtype = dtype_code(name);
    if (dtype >= 0 && (rows = row_count(&b[0], item_size(dtype), k)) >= 0 &&
        (nbytes = group_scale_nbytes(rows, k, mx)) >= 0 && has_size("codes", &b[1], rows * k) &&
        has_size("scales", &b[2], nbytes)) {
        comparison r;
        Py_BEGIN_ALLOW_THREADS
        r = run_fp8_compare_groups(b[0].buf, (size_t)rows, (size_t)k, dtype, mx, b[1].buf,
                                   b[2].buf, exact);
        Py_END_ALLOW_THREADS
        result = comparison_tuple(r);
    }
    release(b, 3);
    return result;
}

static PyObject *py_equal(PyObject *self, PyObject *args) {
    Py_buffer b[2] = {{0}, {0}};
    (void)self;
    if (!PyArg_ParseTuple(args, "y*y*:equal", &b[0], &b[1])) return NULL;
    PyObject *result = NULL;
    if (has_size("the second buffer", &b[1], b[0].len)) {
        int64_t first;
        Py_BEGIN_ALLOW_THREADS
        first = first_difference(b[0].buf, b[1].buf, (size_t)b[0].len);
        Py_END_ALLOW_THREADS
        result = PyLong_FromLongLong(first);
    }
    release(b, 2);
    return result;
}

static PyObject *py_scan_e4m3_scales(PyObject *self, PyObject *args) {
    Py_buffer scales;
    scale_scan r;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*:scan_e4m3_scales", &scales)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    r = run_scan(scales.buf, (size_t)scales.len);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&scales);
    return Py_BuildValue("LLLL", (long long)r.nan, (long long)r.zero, (long long)r.negative,
                         (long long)r.first);
}

/* For tests: run the code of a lower level. Returns the level now in use. */
static PyObject *py_use_level(PyObject *self, PyObject *args) {
    int wanted;
    (void)self;
    if (!PyArg_ParseTuple(args, "i:use_level", &wanted)) return NULL;
    level = wanted < 0 || wanted > best_level() ? best_level() : wanted;
    return PyLong_FromLong(level);
}

static PyMethodDef methods[] = {
    {"amax", py_amax, METH_VARARGS, NULL},
    {"nvfp4_quantize", py_nvfp4_quantize, METH_VARARGS, NULL},
    {"nvfp4_sweep", py_nvfp4_sweep, METH_VARARGS, NULL},
    {"fp8_quantize_rows", py_fp8_quantize_rows, METH_VARARGS, NULL},
    {"nvfp4_dequantize", py_nvfp4_dequantize, METH_VARARGS, NULL},
    {"fp8_dequantize_rows", py_fp8_dequantize_rows, METH_VARARGS, NULL},
    {"convert", py_convert, METH_VARARGS, NULL},
    {"add_low_rank", py_add_low_rank, METH_VARARGS, NULL},
    {"nvfp4_compare", py_nvfp4_compare, METH_VARARGS, NULL},
    {"fp8_compare", py_fp8_compare, METH_VARARGS, NULL},
    {"fp8_quantize_groups", py_fp8_quantize_groups, METH_VARARGS, NULL},
    {"fp8_dequantize_groups", py_fp8_dequantize_groups, METH_VARARGS, NULL},
    {"fp8_compare_groups", py_fp8_compare_groups, METH_VARARGS, NULL},
    {"equal", py_equal, METH_VARARGS, NULL},
    {"scan_e4m3_scales", py_scan_e4m3_scales, METH_VARARGS, NULL},
    {"use_level", py_use_level, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static int on_import(PyObject *module) {
    (void)module;
    level = best_level();
    return 0;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, (void *)on_import}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_cpu", "CPU kernels; see kernels/cpu.py.", 0, methods, slots,
    NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__cpu(void) { return PyModuleDef_Init(&definition); }
