/* How far results are from double precision: for scores of every size, and for inputs that are
 * constructed so that all roundings go in one direction. Every instruction set of this machine, in
 * the prefill form and the decoding form; AMX runs in software (hooks.h). */
#include "hooks.h"
#include "tensors.h"

static const int32_t isas[6] = { RA_ISA_SCALAR, RA_ISA_AVX2, RA_ISA_AVX512, RA_ISA_AVX512_BF16,
                                 RA_ISA_AMX, RA_ISA_NEON };

/* One head. Values are those that the library gets: tensors are rounded to their dtype. */
enum { MOST_ROWS = 64, MOST_DIM = 576 };
typedef struct call {
    ra_desc d;
    ra_tensors t;
    ra_error error;
    float *q, *k, *v, *o, *lse;        /* [tokens][Dk], [keys][Dk], [keys][Dv], [tokens][Dv] */
    float *g, *dq, *dk, *dv;           /* dO and gradients; g null: none are computed */
    uint8_t *rows[3];                  /* q, k and v in their dtypes */
} call;

static float *numbers(int64_t n) { return (float *)calloc((size_t)n + 16, sizeof(float)); }

static void call_begin(call *c, int32_t tokens, int32_t keys, int32_t k_dim, int32_t v_dim) {
    memset(c, 0, sizeof *c);
    c->d = ra_desc_make(1, 1, k_dim, RA_F32, RA_MASK_NONE);
    c->d.v_dim = v_dim;
    c->d.tokens = tokens;
    c->d.kv_tokens = keys;
    c->d.scale = 1;
    c->q = numbers(tokens * k_dim);
    c->k = numbers(keys * k_dim);
    c->v = numbers(keys * v_dim);
    c->o = numbers(tokens * v_dim);
    c->lse = numbers(tokens);
}

static void call_end(call *c) {
    for (int i = 0; i < 3; i++) free(c->rows[i]);
    free(c->q); free(c->k); free(c->v); free(c->o); free(c->lse);
    free(c->g); free(c->dq); free(c->dk); free(c->dv);
}

/* Stores n rows in a dtype; q8_0 and q4_0 by the library's own conversion. The numbers become those
 * that are stored. */
static void call_store(uint8_t **to, float *x, int64_t n, int32_t dim, int32_t dtype) {
    free(*to);
    *to = (uint8_t *)calloc((size_t)(n * row_bytes(dtype, dim)) + 64, 1);
    CHECK_EQ(ra_convert(*to, dtype, x, RA_F32, n * dim), RA_OK);
    CHECK_EQ(ra_convert(x, RA_F32, *to, dtype, n * dim), RA_OK);
}

static ra_status call_run(call *c) {
    ra_tensors *t = &c->t;
    ra_desc *d = &c->d;
    ra_status s;
    size_t bytes;
    void *room;
    d->error = &c->error;
    call_store(&c->rows[0], c->q, d->tokens, d->k_dim, d->q_dtype);
    call_store(&c->rows[1], c->k, d->kv_tokens, d->k_dim, d->k_dtype);
    call_store(&c->rows[2], c->v, d->kv_tokens, d->v_dim, d->v_dtype);
    d->o_dtype = RA_F32;
    t->q.data = c->rows[0]; t->k.data = c->rows[1]; t->v.data = c->rows[2];
    t->o.data = c->o; t->lse.data = c->lse;
    d->train = c->g != NULL;
    bytes = ra_attention_bytes(d, 1);
    if (d->train && bytes) bytes += ra_attention_backward_bytes(d, 1);
    room = malloc(bytes + 1);
    s = bytes ? ra_attention(d, t, room, bytes, 0, 1) : c->error.status;
    if (!s && d->train) {
        t->d_o.data = c->g;
        t->d_q.data = c->dq; t->d_k.data = c->dk; t->d_v.data = c->dv;
        s = ra_attention_backward(d, t, room, bytes, 0, 1);
    }
    free(room);
    return s;
}

/* -------------------------------------------------------------------------- double precision */
typedef struct row_truth {
    double s[4096], p[4096], lse;      /* scores, weights */
    double size;                       /* the largest sum of |q k| of a key, times the scale */
    double spread;                     /* max |q| times the largest sum of |k|, times the scale */
} row_truth;

static H_FAST void call_row(const call *c, int32_t i, row_truth *x) {
    const float *q = c->q + i * c->d.k_dim;
    const double scale = c->d.scale > 0 ? (double)c->d.scale : 1 / sqrt((double)c->d.k_dim);
    double top = -HUGE_VAL, sum = 0, most = 0;
    x->size = x->spread = 0;
    for (int32_t e = 0; e < c->d.k_dim; e++) most = fmax(most, fabs((double)q[e]));
    for (int32_t j = 0; j < c->d.kv_tokens; j++) {
        const float *k = c->k + j * c->d.k_dim;
        double size = 0, s = 0, all = 0;
        for (int32_t e = 0; e < c->d.k_dim; e++) {
            all += fabs((double)k[e]);
            s += (double)q[e] * (double)k[e];
            size += fabs((double)q[e] * (double)k[e]);
        }
        s *= scale;
        if (c->d.softcap > 0) s = (double)c->d.softcap * tanh(s / (double)c->d.softcap);
        x->s[j] = s;
        x->size = fmax(x->size, size * scale);
        x->spread = fmax(x->spread, most * all * scale);
        top = fmax(top, s);
    }
    for (int32_t j = 0; j < c->d.kv_tokens; j++) sum += x->p[j] = exp(x->s[j] - top);
    for (int32_t j = 0; j < c->d.kv_tokens; j++) x->p[j] /= sum;
    x->lse = top + log(sum);
}

/* -------------------------------------------------------------------------- scores of any size */
static const double sizes[] = { 1e-40, 1e-30, 1e-20, 1e-10, 1e-3, 1, 30, 1e3, 1e5, 1e6, 4e6, 1e7,
                                1.7e7, 5e7, 3e8, 1e9, 1e10, 1e12, 1e15, 1e20, 1e27, 1e33, 1e37,
                                1e38, 2.3e38 };

/* How q and k make a score of this size: k is about 1, or both are equally large, or k is about 1
 * and only the last key has the sign of the row. */
enum { SIZE_IN_Q, SIZE_IN_BOTH, SIZE_TURNS, SIZE_KINDS };

/* Scores of about `size`: positive in even rows, and rising slightly from key to key. */
static void sized(call *c, double size, int kind) {
    const double root = kind == SIZE_IN_BOTH ? sqrt(size / c->d.k_dim) : 1;
    for (int32_t i = 0; i < c->d.tokens * c->d.k_dim; i++) {
        const int32_t row = i / c->d.k_dim;
        const double x = size / c->d.k_dim / root * (1 - row / 2 / 50.0);
        c->q[i] = (float)(row % 2 ? -x : x);
    }
    for (int32_t i = 0; i < c->d.kv_tokens * c->d.k_dim; i++)
        c->k[i] = (float)(root * (1 - (double)(c->d.kv_tokens - 1 - i / c->d.k_dim) / 500)) *
                  (kind == SIZE_TURNS && i / c->d.k_dim < c->d.kv_tokens - 1 ? -1 : 1);
    for (int32_t i = 0; i < c->d.kv_tokens * c->d.v_dim; i++)
        c->v[i] = 1 + (float)(i / c->d.v_dim % 7) / 8;
}

/* Rows are within `off` times the size of scores, but always between the least and the largest V;
 * gradients are finite. */
static void sized_check(const call *c, double off) {
    static row_truth x;
    for (int32_t i = 0; i < c->d.tokens; i++) {
        double o = 0, far = 0, tol, least = HUGE_VAL, most = 0;
        call_row(c, i, &x);
        for (int32_t j = 0; j < c->d.kv_tokens; j++) {
            const double v = (double)c->v[j * c->d.v_dim];
            o += x.p[j] * v;
            least = fmin(least, v);
            most = fmax(most, v);
        }
        tol = off * (1 + x.size);
        for (int32_t e = 0; e < c->d.v_dim; e++) {
            const double y = (double)c->o[i * c->d.v_dim + e];
            far = fmax(far, y == y ? fabs(y - o) : HUGE_VAL);
            if (!(y >= least - 3e-5 && y <= most + 3e-5)) far = HUGE_VAL;
        }
        if (!(far <= 2 * tol) || !(fabs((double)c->lse[i] - x.lse) <= tol)) {
            h_context("%s row %d of %d keys %d dtype %d size %g: o %g, expected %g; lse %g, %g",
                      ra_isa_name(c->d.isa), (int)i, (int)c->d.tokens, (int)c->d.kv_tokens,
                      (int)c->d.k_dtype, x.size, (double)c->o[i * c->d.v_dim], o,
                      (double)c->lse[i], x.lse);
            CHECK(far <= 2 * tol);
            CHECK(fabs((double)c->lse[i] - x.lse) <= tol);
            break;
        }
    }
    for (int64_t i = 0; c->g && i < (int64_t)c->d.tokens * c->d.k_dim; i++)
        CHECK(c->dq[i] - c->dq[i] == 0);
    for (int64_t i = 0; c->g && i < (int64_t)c->d.kv_tokens * c->d.k_dim; i++)
        CHECK(c->dk[i] - c->dk[i] == 0 && c->dv[i] - c->dv[i] == 0);
}

static void sized_case(int32_t isa, int32_t dtype, int32_t tokens, int32_t keys, double size) {
    static const double off[6] = { 0, 4e-6, 4e-6, 6e-3, 6e-3, 6e-3 };
    for (int kind = 0; kind < SIZE_KINDS; kind++) {
        call c;
        if (dtype == RA_F16 && size > 1e5) break;
        if (has_scales(dtype) && kind == SIZE_IN_BOTH) continue;
        call_begin(&c, tokens, keys, 32, 32);
        c.d.isa = isa;
        c.d.q_dtype = has_scales(dtype) ? RA_F32 : dtype;
        c.d.k_dtype = c.d.v_dtype = dtype;
        if (has_scales(dtype) && size > 1e37) size = 1e37;
        if (!has_scales(dtype) && keys % 2) {
            c.g = numbers(tokens * 32);
            c.dq = numbers(tokens * 32);
            c.dk = numbers(keys * 32);
            c.dv = numbers(keys * 32);
            for (int32_t i = 0; i < tokens * 32; i++) c.g[i] = 1 - (float)(i % 5) / 2;
        }
        sized(&c, size, kind);
        CHECK_EQ(call_run(&c), RA_OK);
        sized_check(&c, off[dtype]);
        call_end(&c);
    }
}

TEST(scores_of_any_size) {
    static const int32_t keys[5] = { 1, 2, 3, 64, 65 }, tokens[4] = { 64, 17, 4, 1 };
    const int count = (int)(sizeof sizes / sizeof sizes[0]);
    for (int64_t i = 0; i < 6 * 5 * 4 * count; i++) {
        int64_t left = i;
        const int32_t isa = isas[h_pick(&left, 6)], dtype = RA_F32 + h_pick(&left, 5);
        const int32_t rows = tokens[h_pick(&left, 4)];
        if (!ra_isa_available(isa) || !h_case(i)) continue;
        if (!h_variant(i % 6 + dtype, (int)(i / 30 % 2))) continue;
        for (int n = 0; n < 5; n++) sized_case(isa, dtype, rows, keys[n], sizes[left]);
    }
}

/* -------------------------------------------------------------------------- scales and softcaps */
/* o and gradients with this softcap or scale. Magnitudes of q and k make scores up to `top`. */
static void factored(call *c, int32_t isa, int32_t dtype, int32_t tokens, double scale,
                     double softcap, double top) {
    h_rng r = h_case_rng(0);
    call_begin(c, tokens, 70, 32, 32);
    c->d.isa = isa;
    c->d.q_dtype = has_scales(dtype) ? RA_F32 : dtype;
    c->d.k_dtype = c->d.v_dtype = dtype;
    c->d.scale = (float)scale;
    c->d.softcap = (float)softcap;
    for (int32_t i = 0; i < tokens * 32; i++)
        c->q[i] = (float)(top / scale / 32 * (double)h_normal(&r));
    for (int32_t i = 0; i < 70 * 32; i++) { c->k[i] = h_normal(&r); c->v[i] = h_normal(&r); }
    if (!has_scales(dtype)) {
        c->g = numbers(tokens * 32);
        c->dq = numbers(tokens * 32);
        c->dk = numbers(70 * 32);
        c->dv = numbers(70 * 32);
        for (int32_t i = 0; i < tokens * 32; i++) c->g[i] = h_normal(&r);
    }
    CHECK_EQ(call_run(c), RA_OK);
}

/* Gradients of dQ scale^-1, dK / q and dV against double precision. */
static void factored_check(const call *c, double off) {
    static row_truth x;
    static double dq[64 * 32], dk[70 * 32], dv[70 * 32];
    const double scale = (double)c->d.scale, cap = (double)c->d.softcap;
    double most_q = 1e-300;
    memset(dk, 0, sizeof dk);
    memset(dv, 0, sizeof dv);
    for (int32_t i = 0; i < c->d.tokens * 32; i++) most_q = fmax(most_q, fabs((double)c->q[i]));
    for (int32_t i = 0; i < c->d.tokens; i++) {
        double o[32] = { 0 }, delta = 0;
        call_row(c, i, &x);
        for (int32_t n = 0; n < 70 * 32; n++) o[n % 32] += x.p[n / 32] * (double)c->v[n];
        CHECK_CLOSE(c->o + i * 32, o, 32, off, off);
        CHECK_CLOSE(c->lse + i, &x.lse, 1, off, off);
        if (!c->g) continue;
        for (int32_t e = 0; e < 32; e++) delta += o[e] * (double)c->g[i * 32 + e];
        memset(dq + i * 32, 0, 32 * sizeof *dq);
        for (int32_t j = 0; j < 70; j++) {
            double ds = -delta;
            for (int32_t e = 0; e < 32; e++)
                ds += (double)c->g[i * 32 + e] * (double)c->v[j * 32 + e];
            ds *= x.p[j] * (cap > 0 ? 1 - pow(x.s[j] / cap, 2) : 1);
            for (int32_t e = 0; e < 32; e++) {
                dq[i * 32 + e] += ds * scale * (double)c->k[j * 32 + e];
                dk[j * 32 + e] += ds * scale * (double)c->q[i * 32 + e];
                dv[j * 32 + e] += x.p[j] * (double)c->g[i * 32 + e];
            }
        }
    }
    if (!c->g) return;
    CHECK_CLOSE(c->dq, dq, c->d.tokens * 32, 8 * off * scale, off);
    CHECK_CLOSE(c->dk, dk, 70 * 32, 64 * off * scale * most_q, off);
    CHECK_CLOSE(c->dv, dv, 70 * 32, 64 * off, off);
}

/* Every scale and softcap that is accepted is computed. */
TEST(scales_and_softcaps) {
    static const double at[7] = { 1.0001e-20, 1e-12, 0.03, 1, 50, 1e12, 0.9999e20 };
    static const double off[6] = { 0, 1e-5, 1e-5, 2e-2, 2e-2, 2e-2 };
    static const int32_t tokens[3] = { 64, 4, 1 };
    for (int64_t i = 0; i < 6 * 5 * 3 * 14; i++) {
        int64_t left = i;
        const int32_t isa = isas[h_pick(&left, 6)], dtype = RA_F32 + h_pick(&left, 5);
        const int32_t rows = tokens[h_pick(&left, 3)], scaled = h_pick(&left, 2);
        const double x = at[left];
        call c;
        if (!ra_isa_available(isa) || !h_case(i)) continue;
        if (dtype == RA_F16 && scaled && fabs(log(x)) > 5) continue;   /* q would leave f16 */
        h_context("%s dtype %d rows %d %s %g", ra_isa_name(isa), (int)dtype, (int)rows,
                  scaled ? "scale" : "softcap", x);
        factored(&c, isa, dtype, rows, scaled ? x : 0.25, scaled ? 0 : x, 3);
        factored_check(&c, off[dtype]);
        call_end(&c);
    }
}

/* Other scales and softcaps are refused by every call. */
TEST(scales_and_softcaps_out_of_range) {
    const float bad[8] = { 0.9e-20f, 1.1e20f, 1e38f, 1e-38f, 1e-45f, -1, (float)NAN, HUGE_VALF };
    static float x[64];
    for (int64_t i = 0; i < 16; i++) {
        const int scaled = (int)(i / 8);
        ra_plan *plan = NULL;
        call c;
        if (!h_case(i)) continue;
        call_begin(&c, 2, 2, 8, 8);
        if (scaled) c.d.scale = bad[i % 8];
        else c.d.softcap = bad[i % 8];
        CHECK_EQ(call_run(&c), RA_E_RANGE);
        CHECK(strcmp(c.error.field, scaled ? "scale" : "softcap") == 0);
        CHECK(strstr(c.error.text, "must be 0 or from 1e-20 to 1e20; it was ") != NULL);
        CHECK_EQ(ra_plan_create(&plan, &c.d, NULL), RA_E_RANGE);
        CHECK(plan == NULL);
        if (scaled)
            CHECK_EQ(ra_attention_simple(x, x, x, x, 2, 2, 1, 1, 8, bad[i % 8], 0, 0), RA_E_RANGE);
        call_end(&c);
    }
}

/* Slopes up to the largest that is accepted hide far keys, and no row is NaN; larger ones are
 * refused. */
TEST(slopes) {
    for (int64_t i = 0; i < 6 * 3; i++) {
        int64_t left = i;
        const int32_t isa = isas[h_pick(&left, 6)], rows = left == 0 ? 64 : left == 1 ? 4 : 1;
        float slope = 1e28f;
        call c;
        if (!ra_isa_available(isa) || !h_case(i)) continue;
        call_begin(&c, rows, 130, 8, 8);
        c.d.isa = isa;
        c.d.scores = RA_SCORE_ALIBI;
        c.d.q_offset = 130 - rows;
        c.t.alibi = &slope;
        for (int32_t j = 0; j < 130 * 8; j++) c.v[j] = (float)(j / 8);
        for (int k = 0; k < 4; k++, slope /= 1e7f) {
            CHECK_EQ(call_run(&c), RA_OK);
            for (int32_t j = 0; j < rows * 8; j++)
                CHECK(c.o[j] == (float)(130 - rows + j / 8) || slope < 1e9f);
        }
        for (slope = 1.1e28f; slope - slope == 0; slope *= -1e4f) {
            CHECK_EQ(call_run(&c), RA_E_RANGE);
            CHECK(strstr(c.error.text, "must be from -1e28 to 1e28; it was ") != NULL);
            CHECK(strcmp(c.error.field, "t.alibi") == 0);
        }
        slope = (float)NAN;
        CHECK_EQ(call_run(&c), RA_E_RANGE);
        CHECK(strstr(c.error.text, "it was NaN") != NULL);
        call_end(&c);
    }
}

/* -------------------------------------------------------------------------- worst cases
 * What the header promises for every input, with max |V| 1 (Promises, Numbers). */
static double promise(const call *c, const row_truth *x) {
    const double n = (double)c->d.kv_tokens, dims = c->d.k_dim;
    const int bf16 = (c->d.k_dtype == RA_BF16 || c->d.arith) &&
                     c->d.isa >= RA_ISA_AVX512_BF16 && c->d.isa <= RA_ISA_AMX;
    const int int8 = has_scales(c->d.k_dtype) && has_scales(c->d.v_dtype) &&
                     (c->d.tokens <= 16 || !c->d.arith) && c->d.isa >= RA_ISA_AVX512_BF16 &&
                     c->d.isa <= RA_ISA_AMX;
    const double inputs = bf16 && c->d.arith ? 0.008 * x->size + 0.004
                        : int8 ? ldexp(x->spread + fmin(n, 64), -16) : 0;
    const double d = 24 + (bf16 ? dims : fmin(dims, fmax(136, dims / 4)));
    const double sums = 2 * (bf16 ? n : fmin(n, 64)) + 3 * ceil(n / 64) + 48;
    return ldexp(d * x->size + sums, -24) + (bf16 ? 0.004 : 0) + inputs;
}

/* The largest error of o and of the LSE, in units of the promise. */
static double call_part(const call *c) {
    static row_truth x;
    double worst = 0;
    for (int32_t i = 0; i < c->d.tokens; i++) {
        double most = 0, far;
        call_row(c, i, &x);
        for (int32_t n = 0; n < c->d.kv_tokens * c->d.v_dim; n++)
            most = fmax(most, fabs((double)c->v[n]));
        for (int32_t e = 0; e < c->d.v_dim; e++) {
            double o = 0;
            for (int32_t j = 0; j < c->d.kv_tokens; j++)
                o += x.p[j] * (double)c->v[j * c->d.v_dim + e];
            far = h_distance((double)c->o[i * c->d.v_dim + e], o, promise(c, &x) * most);
            worst = fmax(worst, far);
        }
        far = h_distance((double)c->lse[i], x.lse, promise(c, &x) + ldexp(fabs(x.lse), -24));
        worst = fmax(worst, far);
    }
    return worst;
}

static double part_of(call *c) {
    double part = 1e300;
    if (CHECK_EQ(call_run(c), RA_OK)) CHECK((part = call_part(c)) <= 1);
    return part;
}

static const int32_t forms[3] = { 20, 4, 1 };          /* rows: prefill, decoding */

/* Inputs of `dtype` that RA_ARITH_BF16 rounds. shape 0: unit-normal; 1: with dims 30 times as large
 * in q and k; 2: all elements just above the middle of two bf16 numbers, in the one key whose
 * values are positive, and just below it in the others; 3: rising scores. */
static void rounded(call *c, int32_t dtype, int shape, h_rng *r) {
    const int32_t dim = c->d.k_dim;
    for (int32_t i = 0; i < c->d.tokens * dim; i++)
        c->q[i] = shape == 2 ? 1.00391f : h_normal(r) * (shape == 1 && i % dim == 3 ? 30 : 1);
    for (int32_t i = 0; i < c->d.kv_tokens * dim; i++) {
        const int32_t key = i / dim;
        c->k[i] = shape == 2 ? key ? 1.00389f : 1.00391f
                             : h_normal(r) * (shape == 1 && i % dim == 3 ? 30 : 1);
        if (shape == 3) c->k[i] += (float)key / 64 * c->q[i % dim];
    }
    for (int32_t i = 0; i < c->d.kv_tokens * c->d.v_dim; i++) {
        c->v[i] = shape == 2 ? i / c->d.v_dim ? -1.00391f : 1.00391f : h_normal(r);
        if (dtype == RA_F16 && shape == 3 && i % 50 == 0) c->v[i] = i % 100 ? 65504 : -65504;
    }
}

/* RA_ARITH_BF16 over every dtype: each row is within the promise, which some come near. */
TEST(rounded_inputs) {
    static const int32_t keys[5] = { 1, 2, 63, 200, 1000 };
    double all = 0;
    for (int64_t i = 0; i < 6 * 3 * 4 * 5 * 4; i++) {
        int64_t left = i;
        const int32_t isa = isas[h_pick(&left, 6)], rows = forms[h_pick(&left, 3)];
        const int32_t dtype = RA_F32 + h_pick(&left, 4), n = keys[h_pick(&left, 5)];
        const int shape = (int)left;
        h_rng r = h_case_rng(i);
        double part;
        call c;
        if (!ra_isa_available(isa) || !h_case(i) || !h_variant(i % 6, shape % 2)) continue;
        call_begin(&c, rows, n, 64, 32);
        c.d.isa = isa;
        c.d.arith = RA_ARITH_BF16;
        c.d.q_dtype = i % 4 == 1 ? RA_F16 : RA_F32;
        c.d.k_dtype = c.d.v_dtype = dtype;
        if (i % 5 == 2) c.d.v_dtype = RA_F16;
        c.d.scale = shape == 2 ? 0.02f : 0.125f;
        rounded(&c, c.d.v_dtype, shape, &r);
        h_context("%s dtype %d rows %d keys %d shape %d", ra_isa_name(isa), (int)dtype, (int)rows,
                  (int)n, shape);
        part = part_of(&c);
        all = fmax(all, part);
        if (isa == RA_ISA_AVX512_BF16 && rows > 16 && shape == 2 && dtype == RA_F32)
            CHECK(part > 0.1 || n == 1);
        if (h_run.verbose) printf("%s: %.2f of the promise\n", h_run.context, part);
        call_end(&c);
    }
    if (h_run.verbose) printf("at most %.2f of the promise\n", all);
}

/* Keys and values in q8_0. shape 0: unit-normal, with a dim of q that is 30 times as large; 1: q
 * half a unit of 2^-15 of its largest beside such units, all roundings in one direction, and keys
 * of two signs; 2: weights half such a unit above others, and one that is the largest of its block;
 * 3: rising scores. */
static void integers(call *c, int shape, h_rng *r) {
    const int32_t dim = c->d.k_dim, n = (int32_t)c->d.kv_tokens;
    for (int32_t i = 0; i < c->d.tokens * dim; i++) {
        c->q[i] = h_normal(r) * (i % dim == 3 ? 30 : 1);
        if (shape == 1) c->q[i] = i % dim ? (float)(i % dim + 0.49) / 32767 : 1;
        if (shape == 2) c->q[i] = i % dim ? 0 : 1;
    }
    for (int32_t i = 0; i < n * dim; i++) {
        const int32_t key = i / dim;
        c->k[i] = h_normal(r) + (shape == 3 ? (float)key / 128 * c->q[i % dim] / 30 : 0);
        if (shape == 1) c->k[i] = i % dim == 0 ? 0 : key % 2 ? -1 : 1;
        if (shape == 2) c->k[i] = i % dim || key % 64 == 0 ? 0 : -9.5f;
    }
    for (int32_t i = 0; i < n * c->d.v_dim; i++) {
        const int32_t key = i / c->d.v_dim;
        c->v[i] = shape == 1 ? key % 2 ? -1 : 1 : shape == 2 ? key % 64 ? 1 : -1 : h_normal(r);
    }
}

/* Products of integers, in decoding and in prefill: each row is within the promise, which some come
 * near. */
TEST(integer_products) {
    static const int32_t keys[6] = { 1, 2, 63, 64, 200, 1000 };
    double all = 0;
    for (int64_t i = 0; i < 6 * 3 * 6 * 4; i++) {
        int64_t left = i;
        const int32_t isa = isas[h_pick(&left, 6)], rows = forms[h_pick(&left, 3)];
        const int32_t n = keys[h_pick(&left, 6)];
        const int shape = (int)left;
        h_rng r = h_case_rng(i);
        double part;
        call c;
        if (!ra_isa_available(isa) || !h_case(i) || !h_variant(i % 6, shape % 2)) continue;
        call_begin(&c, rows, n, 64, 32);
        c.d.isa = isa;
        c.d.q_dtype = i % 4 == 1 ? RA_BF16 : RA_F32;
        c.d.k_dtype = c.d.v_dtype = RA_Q8_0;
        c.d.scale = shape == 1 || shape == 2 ? 1 : 0.125f;
        integers(&c, shape, &r);
        h_context("%s rows %d keys %d shape %d", ra_isa_name(isa), (int)rows, (int)n, shape);
        part = part_of(&c);
        all = fmax(all, part);
        if (isa == RA_ISA_AVX512_BF16 && rows > 16 && shape == 1 && n == 2 && i % 4 != 1)
            CHECK(part > 0.5);
        if (h_run.verbose) printf("%s: %.2f of the promise\n", h_run.context, part);
        call_end(&c);
    }
    if (h_run.verbose) printf("at most %.2f of the promise\n", all);
}

/* A multiply-add as kernels have it: SCALAR rounds the product too. */
static float multiply_add(int32_t isa, float a, float b, float c) {
    volatile float product = a * b;
    return isa == RA_ISA_SCALAR ? product + c : fmaf(a, b, c);
}

/* The lanes in which the decoding form sums over dims. */
static int lanes_of(int32_t isa) {
    return isa == RA_ISA_AVX512 ? 16 : isa == RA_ISA_AVX2 ? 8 : 4;
}

/* The key whose dot product with row 0 is rounded most in the direction of `sign`: each element
 * is the one of 64 numbers just above 1 whose product is. lanes 0: prefill. */
static void worst_key(const call *c, float *k, int lanes, double sign) {
    const float factor = (float)((double)c->d.scale * 1.4426950408889634074);
    const float q = c->q[0] * factor;
    float sum[16] = { 0 };
    for (int32_t e = 0; e < c->d.k_dim; e++) {
        float *to = &sum[lanes ? e % lanes : 0], best = 0;
        double most = -HUGE_VAL;
        if (!lanes && e % 128 == 0) *to = 0;
        for (int t = 0; t < 64; t++) {
            const float x = 1 + (float)ldexp(t, -23), y = multiply_add(c->d.isa, x, q, *to);
            const double off = sign * ((double)y - ((double)*to + (double)x * (double)q));
            if (off <= most) continue;
            most = off;
            k[e] = x;
            best = y;
        }
        *to = best;
    }
}

/* Parallel q and k: partial sums grow from dim to dim. All roundings of a dot product go up for one
 * key and down for the other, whose values are opposite. */
TEST(parallel_vectors) {
    static const int32_t dims[6] = { 1, 64, 127, 128, 129, 576 };
    for (int64_t i = 0; i < 6 * 3 * 6; i++) {
        int64_t left = i;
        const int32_t isa = isas[h_pick(&left, 6)], rows = forms[h_pick(&left, 3)];
        const int32_t dim = dims[left];
        double part = 0;
        if (!ra_isa_available(isa) || !h_case(i)) continue;
        for (int turn = 0; turn < 4; turn++) {
            call c;
            call_begin(&c, rows, 2, dim, 1);
            c.d.isa = isa;
            if (turn == 3) c.d.q_dtype = c.d.k_dtype = c.d.v_dtype = RA_BF16;
            c.d.scale = 1 / sqrtf((float)dim);
            for (int32_t e = 0; e < rows * dim; e++)
                c.q[e] = turn == 1 ? 63.99f : turn == 2 ? 50.1f : 64;
            for (int j = 0; j < 2; j++)
                worst_key(&c, c.k + j * dim, rows > 16 ? 0 : lanes_of(isa), j ? -1 : 1);
            c.v[0] = 1;
            c.v[1] = -1;
            h_context("%s dims %d rows %d turn %d", ra_isa_name(isa), (int)dim, (int)rows, turn);
            part = fmax(part, part_of(&c));
            call_end(&c);
        }
        /* The construction comes near the promise. */
        if (rows > 16 && dim > 100) CHECK(part > 0.25);
        if (h_run.verbose) printf("%s: %.2f of the promise\n", h_run.context, part);
    }
}

/* n values, `step` apart, for keys with equal weights in each block. Each is the one of 64 numbers
 * just below 2 with which the sum of the block is rounded up most. shape 0: all positive; 1: the
 * second half of the keys is negative, and the sums cancel; 2: every other block is. */
static void worst_values(float *v, int32_t n, int32_t step, int shape) {
    float sum = 0, next = 0;
    for (int32_t j = 0; j < n; j++, v += step, sum = next) {
        const int down = shape == 0 ? 0 : shape == 1 ? j >= n / 2 : j / 64 % 2;
        double most = -HUGE_VAL;
        if (j % 64 == 0) sum = 0;
        for (int t = 1; t <= 64; t++) {
            const float x = (down ? -1 : 1) * (2 - (float)ldexp(t, -23)), y = sum + x;
            const double off = (double)y - ((double)sum + (double)x);
            if (off <= most) continue;
            most = off;
            *v = x;
            next = y;
        }
    }
}

TEST(equal_keys) {
    static const int32_t keys[7] = { 1, 2, 63, 64, 65, 1000, 4096 };
    for (int64_t i = 0; i < 6 * 3 * 7 * 3; i++) {
        int64_t left = i;
        const int32_t isa = isas[h_pick(&left, 6)], rows = forms[h_pick(&left, 3)];
        const int32_t shape = h_pick(&left, 3), n = keys[left];
        double part;
        call c;
        if (!ra_isa_available(isa) || !h_case(i)) continue;
        call_begin(&c, rows, n, 1, 1);
        c.d.isa = isa;
        worst_values(c.v, n, 1, shape);
        h_context("%s keys %d rows %d shape %d", ra_isa_name(isa), (int)n, (int)rows, (int)shape);
        part = part_of(&c);
        if (n == 64 && shape == 0) CHECK(part > 0.1);
        if (h_run.verbose) printf("%s: %.2f of the promise\n", h_run.context, part);
        call_end(&c);
    }
}

/* Scores that rise from block to block, or a unit of 16 keys to the next, so that maxima rise as
 * often as they can and sums are rescaled each time; also falling ones, and scores around a base.
 * Whole rises without noise give weights that are powers of two. */
TEST(rising_scores) {
    static const double rise[10] = { 0.1, 1, 2, 7.3, 16, 16.1, 17, 24.3, 31.9, 60.7 };
    double all = 0;
    for (int64_t i = 0; i < 6 * 3 * 10 * 4; i++) {
        int64_t left = i;
        const int32_t isa = isas[h_pick(&left, 6)], rows = forms[h_pick(&left, 3)];
        const int32_t shape = h_pick(&left, 4);
        if (!ra_isa_available(isa) || !h_case(i) || !h_variant(i % 6, shape % 2)) continue;
        for (int turn = 0; turn < 8; turn++) {
            const int32_t n = turn & 1 ? 128 : 1000, unit = turn & 2 ? 64 : shape == 3 ? 8 : 16;
            h_rng r = h_case_rng(i * 8 + turn);
            double part;
            call c;
            call_begin(&c, rows, n, 1, 3);
            c.d.isa = isa;
            c.d.scale = 0.693147182f;
            for (int32_t e = 0; e < rows; e++) c.q[e] = 1;
            worst_values(c.v, n, 3, 0);
            for (int32_t j = 0; j < n; j++) {
                const int32_t at = shape == 1 ? n - 1 - j : j;
                const double x = rise[left] * (at / unit) * (turn & 2 ? 1 : unit / 64.0);
                c.k[j] = (float)(shape == 2 ? x - rise[left] * (n / unit - 1) / 2 : x);
                if (turn & 4) c.k[j] += h_normal(&r) / 8;
                c.v[3 * j + 1] = j / unit % 2 ? 1 : -1;
                c.v[3 * j + 2] = h_normal(&r);
            }
            h_context("%s rise %g rows %d shape %d turn %d", ra_isa_name(isa), rise[left],
                      (int)rows, (int)shape, turn);
            part = part_of(&c);
            all = fmax(all, part);
            call_end(&c);
        }
    }
    if (h_run.verbose) printf("at most %.2f of the promise\n", all);
}

/* The keys in parts, which are merged one after the other: as normalised results or as states. A
 * merge adds to the promise. */
static void merge_parts(call *c, int parts, int states) {
    const int32_t n = (int32_t)c->d.kv_tokens, dim = c->d.v_dim, rows = (int32_t)c->d.tokens;
    const int32_t each = n / parts;
    float *m = numbers(4 * rows), *acc = numbers(2 * rows * dim), *o = numbers(rows * dim);
    const ra_state into = { m, m + rows, acc }, from = { m + 2 * rows, m + 3 * rows,
                                                         acc + rows * dim };
    for (int i = 0; i < parts; i++) {
        call part = *c;
        part.d.kv_tokens = i == parts - 1 ? n - each * i : each;
        part.t.k.data = c->k + each * i * c->d.k_dim;
        part.t.v.data = c->v + each * i * dim;
        part.t.q.data = c->q;
        part.t.o.data = i ? o : c->o;
        part.t.lse.data = i ? m : c->lse;
        if (states) {
            const size_t bytes = ra_attention_bytes(&part.d, 1);
            void *room = malloc(bytes + 1);
            CHECK_EQ(ra_state_clear(&part.d, i ? &from : &into), RA_OK);
            CHECK_EQ(ra_fold(&part.d, i ? &from : &into, &part.t, room, bytes), RA_OK);
            if (i) CHECK_EQ(ra_state_merge(&part.d, &into, &from), RA_OK);
            if (i == parts - 1) {
                part.t.o.data = c->o;
                part.t.lse.data = c->lse;
                CHECK_EQ(ra_state_finish(&part.d, &into, &part.t), RA_OK);
            }
            free(room);
            continue;
        }
        CHECK_EQ(ra_attention(&part.d, &part.t, NULL, 0, 0, 1), RA_OK);
        if (i) ra_merge(c->o, c->lse, o, m, rows, dim);
    }
    free(m);
    free(acc);
    free(o);
}

TEST(merged_parts) {
    static const double rise[4] = { 0, 0.3, 3, 20 };
    double all = 0;
    for (int64_t i = 0; i < 6 * 2 * 3 * 4; i++) {
        int64_t left = i;
        const int32_t isa = isas[h_pick(&left, 6)], states = h_pick(&left, 2);
        const int32_t rows = forms[h_pick(&left, 3)], parts = 60, n = 960;
        static row_truth x;
        h_rng r = h_case_rng(i);
        double part, more;
        call c;
        if (!ra_isa_available(isa) || !h_case(i)) continue;
        call_begin(&c, rows, n, 64, 2);
        c.d.isa = isa;
        c.d.scale = 0.125f;
        for (int32_t e = 0; e < rows * 64; e++) c.q[e] = 1;
        for (int32_t j = 0; j < n; j++) {
            for (int e = 0; e < 64; e++)
                c.k[64 * j + e] = (float)(rise[left] * (j / 16) / 8) + h_normal(&r) / 64;
            c.v[2 * j] = 1.9856758f;
            c.v[2 * j + 1] = j / 16 % 2 ? 1 : -1;
        }
        h_context("%s rise %g rows %d states %d", ra_isa_name(isa), rise[left], (int)rows,
                  (int)states);
        merge_parts(&c, parts, states);
        part = call_part(&c);
        call_row(&c, 0, &x);
        more = ldexp(parts * (2 * x.size + 2 * log(n) + 8), -24);
        CHECK(part * promise(&c, &x) <= promise(&c, &x) + more);
        all = fmax(all, part * promise(&c, &x) / (promise(&c, &x) + more));
        call_end(&c);
    }
    if (h_run.verbose) printf("at most %.2f of the promise\n", all);
}

/* dO of rows, about 2, whose halves are rounded up most when they are added up: in tiles of 64 rows
 * (tiles 1), or in one chain. */
static void worst_sums(float *g, int32_t rows, int tiles) {
    float sum = 0;
    for (int32_t r = 0; r < rows; r++) {
        double most = -HUGE_VAL;
        float next = 0, step;
        if (tiles && r % 64 == 0) sum = 0;
        step = nextafterf(sum + 1, HUGE_VALF) - (sum + 1);
        for (int t = 0; t < 64; t++) {
            const float x = 1 - step * (float)t / 64, y = sum + x;
            const double off = (double)y - ((double)sum + (double)x);
            if (off <= most) continue;
            most = off;
            g[r] = 2 * x;
            next = y;
        }
        sum = next;
    }
}

/* The gradient of a bias that all rows share: two keys with equal weights, so the gradient of a
 * score is dO / 2. */
TEST(bias_of_all_rows) {
    for (int64_t i = 0; i < 6 * 2 * 4; i++) {
        int64_t left = i;
        const int32_t isa = isas[h_pick(&left, 6)], tiles = h_pick(&left, 2);
        const int32_t rows = left == 0 ? 64 : left == 1 ? 65 : left == 2 ? 1000 : 3000;
        float bias[2] = { 0, 0 }, grad[2] = { 0, 0 };
        double want = 0, tol;
        static row_truth x;
        call c;
        if (!ra_isa_available(isa) || !h_case(i)) continue;
        call_begin(&c, rows, 2, 8, 1);
        c.d.isa = isa;
        c.d.scores = RA_SCORE_BIAS;
        c.t.bias.data = bias;
        c.t.d_bias.data = grad;
        c.t.bias.key_step = c.t.d_bias.key_step = 4;
        c.t.bias.keys = c.t.d_bias.keys = 2;
        c.g = numbers(rows);
        c.dq = numbers(rows * 8);
        c.dk = numbers(16);
        c.dv = numbers(2);
        c.v[0] = 1;
        c.v[1] = -1;
        worst_sums(c.g, rows, tiles);
        for (int32_t r = 0; r < rows; r++) want += (double)c.g[r] / 2;
        h_context("%s rows %d tiles %d", ra_isa_name(isa), (int)rows, (int)tiles);
        CHECK_EQ(call_run(&c), RA_OK);
        call_row(&c, 0, &x);
        tol = want * (6 * promise(&c, &x) + ldexp(25, -23) + ldexp(64 + ceil(rows / 64.0), -24));
        CHECK(fabs((double)grad[0] - want) <= tol);
        CHECK(fabs((double)grad[1] + want) <= tol);
        if (h_run.verbose)
            printf("%s: %.2f of the promise\n", h_run.context, fabs((double)grad[0] - want) / tol);
        call_end(&c);
    }
}

static const h_test tests[] = {
    ENTRY(scores_of_any_size), ENTRY(scales_and_softcaps),
    ENTRY(scales_and_softcaps_out_of_range), ENTRY(slopes), ENTRY(rounded_inputs),
    ENTRY(integer_products), ENTRY(parallel_vectors),
    ENTRY(equal_keys), ENTRY(rising_scores), ENTRY(merged_parts), ENTRY(bias_of_all_rows)
};

int main(int argc, char **argv) {
    return hook_main(argc, argv, tests, sizeof tests / sizeof tests[0]);
}
