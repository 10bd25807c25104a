/* The arithmetic of training: products of matrices, the gate of SwiGLU, exp. All is f32. Every
 * element of a product is one chain of additions, in the order of the inner index, so its bits do
 * not depend on other rows. One body in vectors of the compiler is included once for each
 * instruction set. Sizes are multiples of 16, which the shape of a model promises. */
#if !defined(TRAIN_MATH_BODY)
#if !defined(TRAIN_KERNELS_H)
#define TRAIN_KERNELS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

typedef struct product {               /* out [rows][columns] = a b, or += with add */
    const float *a;                    /* element (i, k) is at a[i * a_row + k * a_step] */
    int64_t a_row, a_step;
    const float *b;                    /* [depth][columns] */
    float *out;
    int64_t rows, columns, depth;
    int add;
} product;

typedef struct train_math {
    void (*product)(const product *p);
    float (*dot)(const float *a, const float *b, int64_t n);
    void (*exp)(float *x, int64_t n, float less);      /* x = exp(x - less) */
    /* out = silu(gate) * up; gate and up keep their values. */
    void (*gate)(float *out, const float *gate, const float *up, int64_t n);
    /* d: of out. Afterwards gate and up hold their own gradients. */
    void (*gate_back)(const float *d, float *gate, float *up, int64_t n);
} train_math;

#if defined(__clang__)
#define TRAIN_FAST
#else
#define TRAIN_FAST __attribute__((optimize("O3", "fp-contract=fast")))
#endif
#define TRAIN_MATH_BODY
#define TRAIN_NAME(x) x##_any
#define TRAIN_TARGET TRAIN_FAST
#define TRAIN_WIDTH 4
#define TRAIN_ROWS 4
#define TRAIN_VECTORS 2
#include "kernels.h"
#if defined(__x86_64__)
#define TRAIN_NAME(x) x##_avx2
#define TRAIN_TARGET __attribute__((target("avx2,fma"))) TRAIN_FAST
#define TRAIN_WIDTH 8
#define TRAIN_ROWS 4
#define TRAIN_VECTORS 3
#include "kernels.h"
#define TRAIN_NAME(x) x##_avx512
#define TRAIN_TARGET __attribute__((target("avx512f,avx512bw,avx512vl,fma"))) TRAIN_FAST
#define TRAIN_WIDTH 16
#define TRAIN_ROWS 8
#define TRAIN_VECTORS 3
#include "kernels.h"
#endif
#undef TRAIN_MATH_BODY

static inline const train_math *train_math_here(void) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"))
        return &train_math_avx512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return &train_math_avx2;
#endif
    return &train_math_any;
}

#endif
#else                                  /* the body, once per instruction set */

typedef float TRAIN_NAME(train_v)
    __attribute__((vector_size(TRAIN_WIDTH * 4), aligned(4), may_alias));
typedef int32_t TRAIN_NAME(train_i)
    __attribute__((vector_size(TRAIN_WIDTH * 4), aligned(4), may_alias));

static inline __attribute__((always_inline)) TRAIN_TARGET void
TRAIN_NAME(product_tile)(const product *p, int64_t i, int64_t j, int vectors) {
    typedef TRAIN_NAME(train_v) vec;
    const vec zero = { 0 };
    const float *a = p->a + i * p->a_row, *b = p->b + j;
    float *out = p->out + i * p->columns + j;
    vec sum[TRAIN_ROWS][TRAIN_VECTORS], line[TRAIN_VECTORS];
    int r, v;
    for (r = 0; r < TRAIN_ROWS; r++)
        for (v = 0; v < vectors; v++)
            sum[r][v] = p->add ? *(const vec *)(out + r * p->columns + v * TRAIN_WIDTH) : zero;
    for (int64_t k = 0; k < p->depth; k++, a += p->a_step, b += p->columns) {
        for (v = 0; v < vectors; v++) line[v] = *(const vec *)(b + v * TRAIN_WIDTH);
        for (r = 0; r < TRAIN_ROWS; r++)
            for (v = 0; v < vectors; v++) sum[r][v] += a[r * p->a_row] * line[v];
    }
    for (r = 0; r < TRAIN_ROWS; r++)
        for (v = 0; v < vectors; v++)
            *(vec *)(out + r * p->columns + v * TRAIN_WIDTH) = sum[r][v];
}

static TRAIN_TARGET void TRAIN_NAME(product_run)(const product *p) {
    const int64_t wide = TRAIN_WIDTH * TRAIN_VECTORS;
    int64_t i, j = 0;
    for (; j + wide <= p->columns; j += wide)
        for (i = 0; i < p->rows; i += TRAIN_ROWS)
            TRAIN_NAME(product_tile)(p, i, j, TRAIN_VECTORS);
    for (; j < p->columns; j += TRAIN_WIDTH)
        for (i = 0; i < p->rows; i += TRAIN_ROWS) TRAIN_NAME(product_tile)(p, i, j, 1);
}

static TRAIN_TARGET float TRAIN_NAME(train_dot)(const float *a, const float *b, int64_t n) {
    typedef TRAIN_NAME(train_v) vec;
    vec sum = { 0 };
    float s = 0;
    for (int64_t i = 0; i < n; i += TRAIN_WIDTH)
        sum += *(const vec *)(a + i) * *(const vec *)(b + i);
    for (int l = 0; l < TRAIN_WIDTH; l++) s += sum[l];
    return s;
}

/* exp to 2 units in the last place: 2^n times a polynomial on half of ln 2 on both sides of 0.
 * Arguments are limited to -87 and 88. */
static inline __attribute__((always_inline)) TRAIN_TARGET TRAIN_NAME(train_v)
TRAIN_NAME(train_exp_v)(TRAIN_NAME(train_v) x) {
    typedef TRAIN_NAME(train_v) vec;
    typedef TRAIN_NAME(train_i) whole;
    const vec zero = { 0 }, least = zero - 87.0f, most = zero + 88.0f;
    const whole low = x < least, high = x > most;
    x = (vec)(((whole)x & ~(low | high)) | ((whole)least & low) | ((whole)most & high));
    const vec shifted = x * 1.44269504f + 12582912.0f, n = shifted - 12582912.0f;
    const vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return (vec)((whole)p + ((whole)shifted << 23));
}

static TRAIN_TARGET void TRAIN_NAME(train_exp)(float *x, int64_t n, float less) {
    typedef TRAIN_NAME(train_v) vec;
    for (int64_t i = 0; i < n; i += TRAIN_WIDTH)
        *(vec *)(x + i) = TRAIN_NAME(train_exp_v)(*(const vec *)(x + i) - less);
}

static TRAIN_TARGET void TRAIN_NAME(train_gate)(float *out, const float *gate, const float *up,
                                                int64_t n) {
    typedef TRAIN_NAME(train_v) vec;
    for (int64_t i = 0; i < n; i += TRAIN_WIDTH) {
        const vec g = *(const vec *)(gate + i);
        *(vec *)(out + i) = g / (TRAIN_NAME(train_exp_v)(-g) + 1.0f) * *(const vec *)(up + i);
    }
}

static TRAIN_TARGET void TRAIN_NAME(train_gate_back)(const float *d, float *gate, float *up,
                                                     int64_t n) {
    typedef TRAIN_NAME(train_v) vec;
    const vec one = (vec){ 0 } + 1.0f;
    for (int64_t i = 0; i < n; i += TRAIN_WIDTH) {
        const vec g = *(const vec *)(gate + i), u = *(const vec *)(up + i);
        const vec s = one / (TRAIN_NAME(train_exp_v)(-g) + 1.0f), out = *(const vec *)(d + i);
        *(vec *)(up + i) = out * g * s;
        *(vec *)(gate + i) = out * u * s * (g * (one - s) + 1.0f);
    }
}

static const train_math TRAIN_NAME(train_math) = {
    TRAIN_NAME(product_run), TRAIN_NAME(train_dot), TRAIN_NAME(train_exp), TRAIN_NAME(train_gate),
    TRAIN_NAME(train_gate_back) };

#undef TRAIN_NAME
#undef TRAIN_TARGET
#undef TRAIN_WIDTH
#undef TRAIN_ROWS
#undef TRAIN_VECTORS
#endif
