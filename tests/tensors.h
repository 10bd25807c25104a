#ifndef RINGATTN_TESTS_TENSORS_H
#define RINGATTN_TESTS_TENSORS_H

/* The tensors of one rank, for all tests: numbers of every dtype, rows with any strides, filled by
 * position. Gaps of inputs hold NaN; gaps of outputs hold the guard, which view_guard looks for.
 * What the numbers should be comes from the two oracles (oracle.h, small.h), which share nothing
 * else. */
#include "harness.h"
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { GAP = 0xFF, GUARD = 0xCB };     /* bytes; a number of gaps alone is NaN in every dtype */
enum { STRIDES_PACKED, STRIDES_PADDED, STRIDES_INTERLEAVED, STRIDES_PERMUTED, STRIDES_BATCH_INNER,
       STRIDES_MIXED };

/* -------------------------------------------------------------------------- number formats */
static H_FAST int element_bytes(int32_t dtype) { return dtype == RA_F32 ? 4 : 2; }

/* In problems q8_0 has one scale, 1/32, and q4_0 has 1/2 and -1/2, so that the rounding of a number
 * depends only on itself. */
enum { Q8_SCALE = 32, Q8_SCALE_BITS = 0x2800, Q4_SCALE = 2, Q4_SCALE_BITS = 0x3800,
       NAN_SCALE_BITS = 0x7e00 };
static H_FAST int has_scales(int32_t dtype) { return dtype == RA_Q8_0 || dtype == RA_Q4_0; }
static H_FAST int64_t row_bytes(int32_t dtype, int64_t dim) {
    return dtype == RA_Q8_0 ? dim / 32 * 34 : dtype == RA_Q4_0 ? dim / 32 * 18
                                                              : dim * element_bytes(dtype);
}

/* The distance of neighbouring numbers of a 16-bit dtype around x. */
static H_FAST double dtype_ulp(double x, int32_t dtype) {
    int e, digits = dtype == RA_F16 ? 11 : 8, least = dtype == RA_F16 ? -24 : -133;
    frexp(x, &e);
    return ldexp(1.0, e - digits > least ? e - digits : least);
}

/* Round to nearest, ties to even, with overflow to infinity. */
static H_FAST float dtype_round(float x, int32_t dtype) {
    double ulp, r;
    if (dtype == RA_F32 || x != x || x - x != 0 || x == 0) return x;
    if (dtype == RA_Q8_0) {
        r = nearbyint((double)x * Q8_SCALE);
        return (float)((r > 127 ? 127 : r < -127 ? -127 : r) / Q8_SCALE);
    }
    if (dtype == RA_Q4_0) {
        r = nearbyint((double)x * Q4_SCALE);
        return (float)((r > 7 ? 7 : r < -7 ? -7 : r) / Q4_SCALE);
    }
    ulp = dtype_ulp((double)x, dtype);
    r = nearbyint((double)x / ulp) * ulp;
    if (dtype == RA_F16 && fabs(r) > 65504) r = x > 0 ? HUGE_VAL : -HUGE_VAL;
    return (float)r;
}

/* x must be a number of the dtype (see dtype_round). */
static H_FAST void dtype_store(void *dst, float x, int32_t dtype) {
    uint32_t bits;
    uint16_t w;
    int e;
    memcpy(&bits, &x, 4);
    if (dtype == RA_F32) { memcpy(dst, &x, 4); return; }
    w = (uint16_t)(bits >> 16);
    if (dtype == RA_F16) {
        double m = frexp(fabs((double)x), &e);
        w = (uint16_t)(w & 0x8000u);
        if (x != x) w = (uint16_t)(w | 0x7e00u);
        else if (x - x != 0) w = (uint16_t)(w | 0x7c00u);
        else if (x != 0 && e < -13) w = (uint16_t)(w | (uint16_t)ldexp(m, e + 24));
        else if (x != 0) w = (uint16_t)(w | (uint16_t)((e + 14) * 1024 + (int)ldexp(m, 11) - 1024));
    }
    memcpy(dst, &w, 2);
}

/* Element d of a row, in order; a NaN makes the scale of a block one. In q4_0 the scale is negative
 * if the first element is positive. */
static H_FAST void row_store(uint8_t *row, int d, float x, int32_t dtype) {
    uint8_t *block = row + d / 32 * row_bytes(dtype, 32);
    uint16_t scale = dtype == RA_Q8_0 ? Q8_SCALE_BITS : Q4_SCALE_BITS, bad = NAN_SCALE_BITS;
    int n, i = d % 32;
    if (!has_scales(dtype)) { dtype_store(row + d * element_bytes(dtype), x, dtype); return; }
    if (dtype == RA_Q4_0 && x > 0) scale |= 0x8000u;
    if (i == 0) memcpy(block, &scale, 2);
    if (x != x) memcpy(block, &bad, 2);
    n = x != x ? 0 : (int)(x * (dtype == RA_Q8_0 ? Q8_SCALE : Q4_SCALE));
    if (dtype == RA_Q8_0) { block[2 + i] = (uint8_t)(int8_t)n; return; }
    n = 8 + (block[1] & 0x80 ? -n : n);
    block[2 + i % 16] = (uint8_t)(i < 16 ? n : (block[2 + i % 16] & 15) | n << 4);
}

static H_FAST float dtype_load(const void *src, int32_t dtype) {
    uint32_t bits;
    uint16_t w;
    float x;
    if (dtype == RA_F32) { memcpy(&x, src, 4); return x; }
    memcpy(&w, src, 2);
    if (dtype == RA_BF16) { bits = (uint32_t)w << 16; memcpy(&x, &bits, 4); return x; }
    {
        int e = (w >> 10) & 31, m = w & 1023;
        double a = e == 31 ? (m ? (double)NAN : HUGE_VAL)
                           : e ? ldexp(1024.0 + m, e - 25) : ldexp((double)m, -24);
        return (float)(w & 0x8000u ? -a : a);
    }
}

/* -------------------------------------------------------------------------- views */
typedef struct view {
    uint8_t *mem;
    size_t bytes;
    int64_t base, batch, token, head;  /* bytes */
    int32_t dtype, heads, dim, packed, borrowed;
    int64_t rows;
} view;

static H_FAST uint8_t *view_at(const view *v, int64_t b, int64_t t, int64_t head) {
    return v->mem + v->base + b * v->batch + t * v->token + head * v->head;
}

/* Strides for [B][rows][heads][dim]; slot: which third of an interleaved token is this tensor's. */
static H_FAST void view_shape(view *v, int kind, int B, int slot) {
    int64_t e = element_bytes(v->dtype), row = row_bytes(v->dtype, v->dim);
    v->packed = kind == STRIDES_PACKED;
    v->base = 0;
    v->head = row;
    v->token = v->heads * row;
    v->batch = v->rows * v->token;
    if (kind == STRIDES_PADDED) {
        v->base = e;
        v->head = row + 3 * e;
        v->token = v->heads * v->head + 5 * e;
        v->batch = v->rows * v->token + 7 * e;
    } else if (kind == STRIDES_INTERLEAVED) {
        v->base = slot * v->token;
        v->token *= 3;
        v->batch = v->rows * v->token;
    } else if (kind == STRIDES_PERMUTED) {
        v->token = row;
        v->head = v->rows * row;
        v->batch = v->heads * v->head;
    } else if (kind == STRIDES_BATCH_INNER) {
        v->batch = v->heads * row;
        v->token = B * v->batch;
    }
    v->bytes = v->rows ? (size_t)(v->base + (B - 1) * v->batch + (v->rows - 1) * v->token +
                                  (v->heads - 1) * v->head + row) : 1;
}

static H_FAST void view_make(view *v, int kind, int B, int slot, int fill) {
    view_shape(v, kind, B, slot);
    v->mem = (uint8_t *)malloc(v->bytes);
    memset(v->mem, fill, v->bytes);
}

static H_FAST void view_free(view *v) {
    if (!v->borrowed) free(v->mem);
    v->mem = NULL;
}

static H_FAST uint64_t view_hash(const view *v) {
    uint64_t x = 14695981039346656037u;
    for (size_t i = 0; i < v->bytes; i++) x = (x ^ v->mem[i]) * 1099511628211u;
    return x;
}

static H_FAST ra_in view_in(const view *v) {
    ra_in in = { v->mem + v->base, v->batch, v->token, v->head, 0 };
    if (v->packed) in.batch_stride = in.token_stride = in.head_stride = 0;
    return in;
}

static H_FAST ra_out view_out(const view *v) {
    ra_out out = { v->mem + v->base, v->batch, v->token, v->head, 0 };
    if (v->packed) out.batch_stride = out.token_stride = out.head_stride = 0;
    return out;
}

static H_FAST void view_put(const view *v, int b, int64_t t, const float *rows) {
    for (int head = 0; head < v->heads; head++) {
        uint8_t *at = view_at(v, b, t, head);
        for (int d = 0; d < v->dim; d++) row_store(at, d, *rows++, v->dtype);
    }
}

/* Reads a token's rows and leaves the guard there, so that view_guard can then check every byte. */
static H_FAST void view_take(const view *v, int b, int64_t t, float *rows) {
    int64_t e = element_bytes(v->dtype);
    for (int head = 0; head < v->heads; head++) {
        uint8_t *at = view_at(v, b, t, head);
        for (int d = 0; d < v->dim; d++) *rows++ = dtype_load(at + d * e, v->dtype);
        memset(at, GUARD, (size_t)(v->dim * e));
    }
}

static H_FAST int64_t view_guard(const view *v) {
    int64_t broken = 0;
    for (size_t i = 0; i < v->bytes; i++) broken += v->mem[i] != GUARD;
    return broken;
}

static H_FAST view view_of(int32_t dtype, int64_t rows, int32_t heads, int32_t dim) {
    view v = { 0 };
    v.dtype = dtype; v.rows = rows; v.heads = heads; v.dim = dim;
    return v;
}

/* The rows of the positions that pos [B][rows] names, from all [B][most][heads][dim], whose first
 * position is `from`. */
static H_FAST void view_fill(const view *v, int B, const int32_t *pos, const float *all,
                             int64_t most, int64_t from) {
    for (int b = 0; b < B; b++) for (int64_t t = 0; t < v->rows; t++) {
        int64_t at = pos[b * v->rows + t];
        if (at >= 0) view_put(v, b, t, all + (b * most + at - from) * v->heads * v->dim);
    }
}

/* The positions of runs, each less `shift`. Returns the end of what it wrote. */
static H_FAST int32_t *runs_expand(int32_t *to, const ra_run *runs, int32_t n, int64_t shift) {
    int64_t j;
    for (int32_t i = 0; i < n; i++) {
        int64_t step = runs[i].stride ? runs[i].stride : 1;
        for (j = 0; j < runs[i].count; j++) *to++ = (int32_t)(runs[i].first - shift + j * step);
    }
    return to;
}

#endif
