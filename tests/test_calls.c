/* What the API section says about calls on one rank and their memory. Proves it sentence by
 * sentence: packing, shared memory, limits of numbers. */
#define _DEFAULT_SOURCE 1
#include "harness.h"

#include <sys/mman.h>
#include <unistd.h>
#define RINGATTN_IMPLEMENTATION
#include "ringattn.h"
#include "oracle.h"
#include "world.h"

/* Memory aligned to 64, full of `fill`. */
typedef struct block { void *raw; uint8_t *at; size_t bytes; } block;
static block block_new(size_t bytes, int fill) {
    block x;
    x.bytes = bytes;
    x.raw = malloc(bytes + 64);
    x.at = (uint8_t *)x.raw + (64 - (uintptr_t)x.raw % 64) % 64;
    memset(x.raw, fill, bytes + 64);
    return x;
}

static float *floats(int64_t n, float value) {
    float *x = (float *)malloc((size_t)(n + 1) * sizeof *x);
    for (int64_t i = 0; i <= n; i++) x[i] = value;
    return x;
}

/* The descriptor of a problem on one rank in f32, for gradients if there is a d_o. */
static ra_desc desc_of(const problem *p) {
    ra_desc d = { 0 };
    d.sequences = p->B;
    d.q_heads = p->Hq; d.kv_heads = p->Hkv; d.k_dim = p->Dk; d.v_dim = p->Dv;
    d.q_dtype = p->q_dtype; d.k_dtype = p->k_dtype; d.v_dtype = p->v_dtype;
    d.o_dtype = p->o_dtype;
    d.tokens = p->q_max; d.kv_tokens = p->k_max; d.q_offset = p->q_offset;
    d.scores = p->scores;
    d.mask = p->mask;
    if (p->d_o) d.train = 1;
    return d;
}

/* -------------------------------------------------------------------------- packing
 * A call with all tensors packed by the longest sequence, f32, exactly as long as that. */
typedef struct packed {
    problem p;
    ra_desc d;
    ra_tensors t;
    ra_error e;
    float *o, *lse, *d_q, *d_k, *d_v, *bias, *d_bias;
    int64_t nq, nk, nb;                /* rows of d_q and d_k times heads; elements of the bias */
} packed;

static void packed_clear(packed *x) {
    memset(x->o, 0xCC, (size_t)(x->nq * x->p.Dv) * 4);
    memset(x->lse, 0xCC, (size_t)x->nq * 4);
    memset(x->d_q, 0, (size_t)(x->nq * x->p.Dk) * 4);
    memset(x->d_k, 0, (size_t)(x->nk * x->p.Dk) * 4);
    memset(x->d_v, 0, (size_t)(x->nk * x->p.Dv) * 4);
    memset(x->d_bias, 0, (size_t)x->nb * 4);
}

static void packed_bias(packed *x) {
    problem *p = &x->p;
    ra_bias *b = &x->t.bias;
    ra_bias_out *g = &x->t.d_bias;
    p->scores = RA_SCORE_BIAS;
    p->bias_b = p->bias_h = p->bias_r = p->bias_k = 1;
    p->bias_keys = p->k_max;
    p->loose = 1;
    x->nb = p->B * p->Hq * p->q_max * p->k_max;
    x->bias = floats(x->nb, 0);
    x->d_bias = floats(x->nb, 0);
    b->data = x->bias;
    g->data = x->d_bias;
    b->key_step = g->key_step = 4;
    b->row_step = g->row_step = p->k_max * 4;
    b->head_step = g->head_step = p->q_max * b->row_step;
    b->batch_step = g->batch_step = p->Hq * b->head_step;
    b->keys = g->keys = p->k_max;
}

/* tokens_of {64, 40} and keys {90, 70}, of 128 and 200: only 64 and 90 count. */
static void packed_open(packed *x, int32_t layout, int self, h_rng *r) {
    problem *p = &x->p;
    memset(x, 0, sizeof *x);
    problem_shape(p, 64, 4, 2, 16, 24);
    p->B = 2;
    p->tq[1] = 40;
    p->q_max = 64;
    p->k_max = self ? 64 : 90;
    p->tk[0] = p->k_max;
    p->tk[1] = self ? 40 : 70;
    x->nq = p->B * p->q_max * p->Hq;
    x->nk = p->B * p->k_max * p->Hkv;
    p->mask.kind = self ? RA_MASK_CAUSAL : RA_MASK_NONE;
    problem_data(p, r);
    problem_cotangent(p, r);
    x->o = floats(x->nq * p->Dv, 0); x->lse = floats(x->nq, 0);
    x->d_q = floats(x->nq * p->Dk, 0);
    x->d_k = floats(x->nk * p->Dk, 0); x->d_v = floats(x->nk * p->Dv, 0);
    packed_bias(x);
    p->bias_seed = h_next(r);
    for (int64_t i = 0; i < x->nb; i++) {
        int64_t row = i / p->k_max % p->q_max, pair = i / p->k_max / p->q_max;
        x->bias[i] = bias_value(p, (int)(pair / p->Hq), (int)(pair % p->Hq), row, i % p->k_max);
    }
    x->t.q.data = p->q; x->t.k.data = p->k; x->t.v.data = p->v; x->t.d_o.data = p->d_o;
    x->t.o.data = x->o; x->t.lse.data = x->lse;
    x->t.d_q.data = x->d_q; x->t.d_k.data = x->d_k; x->t.d_v.data = x->d_v;
    x->d = desc_of(p);
    x->d.tokens = 128;
    x->d.tokens_of = p->tq;
    x->d.kv_tokens = self ? 0 : 200;
    x->d.kv_tokens_of = self ? NULL : p->tk;
    x->d.layout.kind = layout;
    x->d.error = &x->e;
}

static void packed_close(packed *x) {
    free(x->o); free(x->lse); free(x->d_q); free(x->d_k); free(x->d_v);
    free(x->bias); free(x->d_bias);
    problem_free(&x->p);
}

/* Elements [B][most][width] of got, [B][stride][width], against right in rows that exist. */
static void check_rows(const float *got, int64_t stride, const double *right, const double *bar,
                       const int64_t *len, int64_t most, int64_t width) {
    double worst = 0;
    for (int b = 0; b < 2; b++)
        for (int64_t i = 0; i < len[b] * width; i++) {
            int64_t at = b * most * width + i;
            double far = fabs((double)got[b * stride * width + i] - right[at]);
            far /= bar ? bar[at] + 4e-6 : 1e-5;
            if (!(far <= worst)) worst = far;
        }
    CHECK(worst <= 1);
}

static void packed_forward(packed *x, const truth *right) {
    const problem *p = &x->p;
    check_rows(x->o, p->q_max, right->o, NULL, p->tq, p->q_max, p->Hq * p->Dv);
    check_rows(x->lse, p->q_max, right->lse, NULL, p->tq, p->q_max, p->Hq);
}

/* Gradients from sums with this many rows per sequence. */
static void packed_backward(packed *x, const slopes *right, const float *const *g, int64_t tokens,
                            int64_t keys) {
    const problem *p = &x->p;
    const int64_t all[2] = { p->Hq * p->q_max, p->Hq * p->q_max };
    check_rows(g[0], tokens, right->q, right->q_bar, p->tq, p->q_max, p->Hq * p->Dk);
    check_rows(g[1], keys, right->k, right->k_bar, p->tk, p->k_max, p->Hkv * p->Dk);
    check_rows(g[2], keys, right->v, right->v_bar, p->tk, p->k_max, p->Hkv * p->Dv);
    check_rows(x->d_bias, p->Hq * p->q_max, right->bias, right->bias_bar, all, p->Hq * p->q_max,
               p->k_max);
}

/* Block mathematics: states and sums are cut by tokens and kv_tokens, tensors are not. */
static void packed_fold(packed *x, const truth *right, const slopes *slope) {
    const problem *p = &x->p;
    const int64_t tokens = 128, keys = x->d.kv_tokens ? 200 : 128, n = p->B * tokens * p->Hq;
    block w = block_new(ra_attention_backward_bytes(&x->d, 1) + ra_attention_bytes(&x->d, 1), 0xA5);
    float *delta = floats(n, 0), *g[3];
    ra_state s;
    ra_grads sums;
    s.m = floats(n, 0); s.l = floats(n, 0); s.acc = floats(n * p->Dv, 0);
    sums.d_q = g[0] = floats(n * p->Dk, 0);
    sums.d_k = g[1] = floats(p->B * keys * p->Hkv * p->Dk, 0);
    sums.d_v = g[2] = floats(p->B * keys * p->Hkv * p->Dv, 0);
    packed_clear(x);
    CHECK_EQ(ra_state_clear(&x->d, &s), RA_OK);
    CHECK_EQ(ra_fold(&x->d, &s, &x->t, w.at, w.bytes), RA_OK);
    CHECK_EQ(ra_state_finish(&x->d, &s, &x->t), RA_OK);
    packed_forward(x, right);
    CHECK_EQ(ra_delta(&x->d, &x->t, delta), RA_OK);
    CHECK_EQ(ra_fold_backward(&x->d, &x->t, delta, &sums, w.at, w.bytes), RA_OK);
    packed_backward(x, slope, (const float *const *)g, tokens, keys);
    free(s.m); free(s.l); free(s.acc); free(delta); free(w.raw);
    for (int i = 0; i < 3; i++) free(g[i]);
}

static void packed_ring(packed *x, const truth *right, const slopes *slope) {
    const problem *p = &x->p;
    const float *g[3];
    ra_plan *plan = NULL;
    ra_ring *ring = NULL;
    g[0] = x->d_q; g[1] = x->d_k; g[2] = x->d_v;
    packed_clear(x);
    CHECK_EQ(ra_plan_create(&plan, &x->d, NULL), RA_OK);
    CHECK_EQ(ra_ring_create(&ring, plan, NULL, NULL), RA_OK);
    CHECK_EQ(ra_forward(plan, ring, &x->t, RA_NO_DEADLINE), RA_OK);
    packed_forward(x, right);
    CHECK_EQ(ra_backward(plan, ring, &x->t, RA_NO_DEADLINE), RA_OK);
    packed_backward(x, slope, g, p->q_max, p->k_max);
    CHECK_EQ(ra_ring_destroy(ring), RA_OK);
    ra_plan_destroy(plan);
}

static void packed_attention(packed *x, const truth *right, const slopes *slope) {
    const problem *p = &x->p;
    const float *g[3];
    block w = block_new(ra_attention_backward_bytes(&x->d, 1) + ra_attention_bytes(&x->d, 1), 0xA5);
    g[0] = x->d_q; g[1] = x->d_k; g[2] = x->d_v;
    packed_clear(x);
    CHECK_EQ(ra_attention(&x->d, &x->t, w.at, w.bytes, 0, 1), RA_OK);
    packed_forward(x, right);
    CHECK_EQ(ra_attention_backward(&x->d, &x->t, w.at, w.bytes, 0, 1), RA_OK);
    packed_backward(x, slope, g, p->q_max, p->k_max);
    free(w.raw);
}

/* A stride of 0 means rows of the longest sequence in every call, not d.tokens or d.kv_tokens. */
TEST(packed_by_the_longest) {
    for (int64_t i = 0; i < 6; i++) {
        h_rng r = h_case_rng(i);
        packed x;
        truth right;
        slopes slope;
        if (!h_case(i)) continue;
        packed_open(&x, RA_LAYOUT_CONTIGUOUS + (int32_t)(i % 3), i > 2, &r);
        right = oracle(&x.p);
        slope = oracle_slopes(&x.p, 1);
        packed_attention(&x, &right, &slope);
        packed_fold(&x, &right, &slope);
        packed_ring(&x, &right, &slope);
        slopes_free(&slope);
        truth_free(&right);
        packed_close(&x);
    }
}

/* Strides with room for the longest sequence are valid, smaller ones are not. */
TEST(strides_of_the_longest) {
    h_rng r = h_case_rng(0);
    packed x;
    ra_ring *ring = NULL;
    ra_plan *plan = NULL;
    block w;
    packed_open(&x, RA_LAYOUT_CONTIGUOUS, 0, &r);
    CHECK_EQ(ra_plan_create(&plan, &x.d, NULL), RA_OK);
    CHECK_EQ(ra_ring_create(&ring, plan, NULL, NULL), RA_OK);
    w = block_new(ra_attention_backward_bytes(&x.d, 1) + ra_attention_bytes(&x.d, 1), 0xA5);
    for (int less = 0; less < 2; less++) {
        const ra_status status = less ? RA_E_STRIDE : RA_OK;
        packed_clear(&x);
        x.t.o.batch_stride = (64 * 4 - less) * 24 * 4;
        CHECK_EQ(ra_attention(&x.d, &x.t, w.at, w.bytes, 0, 1), status);
        CHECK_EQ(ra_forward(plan, ring, &x.t, RA_NO_DEADLINE), status);
        x.t.o.batch_stride = 0;
        x.t.d_k.batch_stride = (90 * 2 - less) * 16 * 4;
        CHECK_EQ(ra_attention_backward(&x.d, &x.t, w.at, w.bytes, 0, 1), status);
        CHECK_EQ(ra_backward(plan, ring, &x.t, RA_NO_DEADLINE), status);
        x.t.d_k.batch_stride = 0;
    }
    CHECK_EQ(ra_ring_destroy(ring), RA_OK);
    ra_plan_destroy(plan);
    free(w.raw);
    packed_close(&x);
}

/* -------------------------------------------------------------------------- scores
 * Dims of 1 and scores that are the bias. */
typedef struct tiny {
    float q[4], k[64], v[64], o[4], lse[4], bias[64], sinks[1];
    ra_desc d;
    ra_tensors t;
    ra_error e;
} tiny;

static void tiny_make(tiny *x, int64_t tokens, int64_t keys) {
    memset(x, 0, sizeof *x);
    x->d = ra_desc_make(1, 1, 1, RA_F32, RA_MASK_NONE);
    x->d.tokens = tokens;
    x->d.kv_tokens = keys;
    x->d.scores = RA_SCORE_BIAS;
    x->d.error = &x->e;
    x->t.q.data = x->q; x->t.k.data = x->k; x->t.v.data = x->v;
    x->t.o.data = x->o; x->t.lse.data = x->lse;
    x->t.bias.data = x->bias;
    x->t.bias.key_step = 4;
    x->t.bias.keys = keys;
    for (int i = 0; i < 64; i++) x->v[i] = 1 + (float)i;
}

/* Where a finite bias has the effect of -inf, and where it does not yet. */
TEST(bias_at_the_end_of_f32) {
    static const float masks[3] = { -3.4028234e38f, -2.4e38f, -2.3e38f };
    for (int i = 0; i < 3; i++) for (int32_t isa = RA_ISA_SCALAR; isa <= RA_ISA_NEON; isa++) {
        for (int64_t tokens = 1; tokens <= 4; tokens += 3) {
            tiny x;
            if (!ra_isa_available(isa)) continue;
            tiny_make(&x, tokens, 60);
            x.d.isa = isa;
            for (int j = 0; j < 60; j++) x.bias[j] = masks[i];
            CHECK_EQ(ra_attention(&x.d, &x.t, NULL, 0, 0, 1), RA_OK);
            if (i < 2) CHECK(x.o[0] == 0 && x.lse[0] == -HUGE_VALF);
            else CHECK(fabsf(x.o[0] - 30.5f) < 1e-4f && fabsf(x.lse[0] + 2.3e38f) < 1e32f);
            x.bias[7] = 0;
            CHECK_EQ(ra_attention(&x.d, &x.t, NULL, 0, 0, 1), RA_OK);
            CHECK(x.o[0] == 8 && x.lse[0] == 0);
        }
    }
}

/* The error of O of one row against the formula of the promise. */
static double promised(const problem *p, const truth *t, const float *o, int64_t row) {
    double top = 0, k = 0, worst = 0, q = sqrt(dot_product(q_row(p, 0, row, 0), q_row(p, 0, row, 0),
                                                           p->Dk));
    for (int64_t j = 0; j < p->k_max; j++) {
        k = fmax(k, sqrt(dot_product(k_row(p, 0, j, 0), k_row(p, 0, j, 0), p->Dk)));
        for (int d = 0; d < p->Dv; d++) top = fmax(top, fabs((double)v_row(p, 0, j, 0)[d]));
    }
    for (int d = 0; d < p->Dv; d++)
        worst = fmax(worst, fabs((double)o[row * p->Dv + d] - t->o[row * p->Dv + d]));
    return worst / (ldexp(top, -23) * (1 + problem_scale(p) * q * k + sqrt((double)p->k_max) / 8));
}

/* Scores from chains of 128 products, large and small norms, many keys of about the same value. */
TEST(error_of_f32) {
    static const int64_t shapes[7][3] = { { 256, 24, 128 }, { 256, 24, 112 }, { 64, 300, 300 },
                                          { 64, 24, 1 }, { 64, 3, 16 }, { 64, 64, 64 },
                                          { 4, 60000, 8 } };
    int64_t i = 0;
    for (int32_t at = 0; at < 14 * RA_ISA_NEON; at++) {
        const int32_t isa = RA_ISA_SCALAR + at / 14, turn = at % 14;
        h_rng r = h_case_rng(i);
        const int64_t *shape = shapes[turn % 7];
        problem p;
        ra_desc d;
        ra_tensors t = { 0 };
        truth right;
        block w;
        float *o;
        if (!ra_isa_available(isa) || !h_case(i++)) continue;
        problem_shape(&p, shape[0], 1, 1, (int32_t)shape[2], (int32_t)shape[2]);
        p.k_max = p.tk[0] = shape[1];
        problem_data(&p, &r);
        for (int64_t j = 0; turn > 6 && j < p.q_max * p.Dk; j++) p.q[j] *= 8;
        for (int64_t j = 0; turn % 7 == 6 && j < p.k_max * p.Dv; j++) p.v[j] = 0.7f + p.v[j] / 99;
        d = desc_of(&p);
        d.isa = isa;
        o = floats(p.q_max * p.Dv, 0);
        t.q.data = p.q; t.k.data = p.k; t.v.data = p.v; t.o.data = o;
        w = block_new(ra_attention_bytes(&d, 1), 0xA5);
        CHECK_EQ(ra_attention(&d, &t, w.at, w.bytes, 0, 1), RA_OK);
        right = oracle(&p);
        for (int64_t j = 0; j < p.q_max; j++) CHECK(promised(&p, &right, o, j) <= 1);
        if (turn < 6) CHECK_CLOSE(o, right.o, p.q_max * p.Dv, 3e-6, 0);
        truth_free(&right);
        problem_free(&p);
        free(o);
        free(w.raw);
    }
}

/* A row without keys: its LSE is the sink, or -inf without sinks; in every form. */
TEST(lse_without_keys) {
    for (int i = 0; i < 8; i++) {
        static const int32_t lo[4] = { 9, 9, 9, 9 }, hi[4] = { 9, 9, 9, 9 };
        tiny x;
        block w;
        ra_state s;
        float m[4], l[4], acc[4];
        const int sinks = i & 1;
        tiny_make(&x, i & 2 ? 4 : 1, 4);
        x.d.mask.kind = RA_MASK_INTERVALS;
        x.d.mask.lo = lo;
        x.d.mask.hi = hi;
        x.d.mask.interval_count = 4;
        x.d.scores = sinks ? RA_SCORE_SINKS : 0;
        x.t.bias.data = NULL;
        x.sinks[0] = 0.75f;
        x.t.sinks = sinks ? x.sinks : NULL;
        s.m = m; s.l = l; s.acc = acc;
        w = block_new(ra_attention_bytes(&x.d, 1), 0xA5);
        if (i & 4) {
            CHECK_EQ(ra_state_clear(&x.d, &s), RA_OK);
            CHECK_EQ(ra_fold(&x.d, &s, &x.t, w.at, w.bytes), RA_OK);
            CHECK_EQ(ra_state_finish(&x.d, &s, &x.t), RA_OK);
        } else {
            CHECK_EQ(ra_attention(&x.d, &x.t, w.at, w.bytes, 0, 1), RA_OK);
        }
        CHECK(x.o[0] == 0 && x.lse[0] == (sinks ? 0.75f : -HUGE_VALF));
        x.lse[0] = 5;
        CHECK_EQ(ra_ring_once(&x.d, NULL, &x.t, RA_NO_DEADLINE), RA_OK);
        CHECK(x.o[0] == 0 && x.lse[0] == (sinks ? 0.75f : -HUGE_VALF));
        free(w.raw);
    }
}

/* -------------------------------------------------------------------------- memory of a call */
/* No workspace: 512 elements of K and V in f32, 256 if either has to be widened, also if blocks of
 * keys have to be gathered out of pages. The bits are those of a call with a workspace. */
enum { FIT_ROWS = 32, FIT_DIMS = 512 };
typedef struct fit { ra_desc d; ra_tensors t; float *o; void *workspace; size_t bytes; } fit;

static void fit_check(fit *x, int32_t k_dim, int32_t v_dim) {
    const size_t size = (size_t)x->d.tokens * (size_t)x->d.q_heads * (size_t)v_dim * sizeof *x->o;
    float *with = x->o + 2 * FIT_ROWS * FIT_DIMS;
    x->d.k_dim = k_dim;
    x->d.v_dim = v_dim;
    x->t.o.data = x->o;
    CHECK_EQ(ra_attention(&x->d, &x->t, NULL, 0, 0, 1), RA_OK);
    x->t.o.data = with;
    CHECK(ra_attention_bytes(&x->d, 1) <= x->bytes);
    CHECK_EQ(ra_attention(&x->d, &x->t, x->workspace, x->bytes, 0, 1), RA_OK);
    CHECK_BITS(x->o, with, size);
    x->d.k_dim = x->d.v_dim = 2 * FIT_DIMS;
    if (x->d.tokens > 1) CHECK_EQ(ra_attention(&x->d, &x->t, NULL, 0, 0, 1), RA_E_WORKSPACE);
}

static void fit_shapes(fit *x, int32_t dims) {
    for (int i = 0; i < 3 * 2 * 2 * 3; i++) {
        const int shape = i / 12;
        x->d.q_heads = 1 + i % 2;      /* of one KV head: with 2 the call may be a short one */
        x->d.scores = i / 2 % 2 ? RA_SCORE_BIAS : 0;
        x->d.tokens = i / 4 % 3 == 0 ? 1 : i / 4 % 3 == 1 ? 17 : FIT_ROWS;
        x->t.bias.data = x->d.scores ? x->t.k.data : NULL;
        h_context("isa %d, dtypes %d %d, pages of %d, shape %d, %d tokens, heads %d, bias %d",
                  x->d.isa, x->d.k_dtype, x->d.v_dtype, x->d.page_tokens, shape,
                  (int)x->d.tokens, x->d.q_heads, x->d.scores);
        fit_check(x, shape == 0 ? dims / 2 : shape == 1 ? dims - 32 : 32,
                  shape == 0 ? dims / 2 : shape == 1 ? 32 : dims - 32);
    }
}

TEST(rows_that_fit_the_stack) {
    static const int32_t dtypes[7][2] = { { RA_F32, RA_F32 }, { RA_F16, RA_F16 },
                                          { RA_Q8_0, RA_Q8_0 }, { RA_F32, RA_Q8_0 },
                                          { RA_BF16, RA_F32 }, { RA_Q4_0, RA_Q4_0 },
                                          { RA_F16, RA_Q4_0 } };
    static const int32_t table[2] = { 1, 0 };
    static uint8_t room[2 * FIT_ROWS * 2 * FIT_DIMS * 4];
    static float q[2 * FIT_ROWS * 2 * FIT_DIMS], o[2 * 2 * FIT_ROWS * 2 * FIT_DIMS];
    block w = block_new(4 << 20, 0);
    h_rng r = h_case_rng(0);
    for (size_t i = 0; i < sizeof room; i++) room[i] = (uint8_t)h_range(&r, 0x38, 0x3c);
    for (size_t i = 0; i < sizeof q / sizeof *q; i++) q[i] = h_normal(&r) / 16;
    for (int i = 0; i < 7 * 3; i++) for (int32_t isa = RA_ISA_SCALAR; isa <= RA_ISA_NEON; isa++) {
        fit x;
        if (!ra_isa_available(isa)) continue;
        memset(&x, 0, sizeof x);
        x.o = o;
        x.workspace = w.at;
        x.bytes = w.bytes;
        x.d = ra_desc_make(1, 1, 32, RA_F32, RA_MASK_CAUSAL);
        x.d.k_dtype = dtypes[i / 3][0];
        x.d.v_dtype = dtypes[i / 3][1];
        x.d.isa = isa;
        x.d.page_tokens = i % 3 == 0 ? 0 : i % 3 == 1 ? 16 : 64;
        x.d.kv_tokens = FIT_ROWS;
        x.t.q.data = q;
        x.t.k.data = x.t.v.data = room;
        x.t.bias.keys = FIT_ROWS;
        x.t.bias.key_step = 4;
        if (x.d.page_tokens) {
            x.t.pages.table = x.d.page_tokens == 16 ? table : table + 1;
            x.t.pages.count = x.d.page_tokens == 16 ? 2 : 1;
        }
        fit_shapes(&x, i < 3 ? FIT_DIMS : FIT_DIMS / 2);
    }
    free(w.raw);
}

/* A bias that hides all keys from one of two heads, whose q has a NaN. The bits of its row do not
 * depend on which heads a thread decodes together. */
TEST(hidden_heads_on_any_threads) {
    static float q[2][64], k[64][2][64], o[2][2][64], bias[2][64];
    ra_desc d = ra_desc_make(2, 2, 64, RA_F32, RA_MASK_CAUSAL);
    ra_tensors t = { 0 };
    for (int i = 0; i < 64; i++) {
        q[0][i] = q[1][i] = 1;
        bias[0][i] = -HUGE_VALF;
        for (int j = 0; j < 64; j++) k[j][0][i] = k[j][1][i] = 1;
    }
    q[0][3] = HUGE_VALF - HUGE_VALF;
    d.tokens = 1;
    d.q_offset = 63;
    d.scores = RA_SCORE_BIAS;
    t.q.data = q; t.k.data = t.v.data = k; t.bias.data = bias;
    t.bias.head_step = sizeof bias[0];
    t.bias.key_step = sizeof(float);
    t.bias.keys = 64;
    for (int nth = 1; nth <= 2; nth++) {
        const size_t bytes = ra_attention_bytes(&d, nth);
        void *workspace = malloc(bytes);
        t.o.data = o[nth - 1];
        for (int i = 0; i < nth; i++)
            CHECK_EQ(ra_attention(&d, &t, workspace, bytes, i, nth), RA_OK);
        free(workspace);
    }
    CHECK(!isnan(o[0][0][0]) == !isnan(o[1][0][0]));
    CHECK(o[0][1][0] == 1 && o[1][1][0] == 1);
}

/* ARRAY: the tables give the rows; neither tokens, kv_tokens nor chunks change anything. */
TEST(array_ignores_tokens) {
    static const int64_t rows[2] = { 200000, 60000 };
    static const int64_t tokens[3] = { 1, 260000, 2000000000 };
    ra_plan_report first[2], report;
    memset(first, 0, sizeof first);
    for (int i = 0; i < 6; i++) {
        ra_desc d = ra_desc_make(1, 1, 1, RA_F32, RA_MASK_CAUSAL);
        ra_plan *plan = NULL;
        d.ranks = 2;
        d.rank = i & 1;
        d.tokens = tokens[i / 2];
        d.layout.kind = RA_LAYOUT_ARRAY;
        d.layout.q_rows = rows;
        CHECK_EQ(ra_plan_create(&plan, &d, NULL), RA_OK);
        CHECK_EQ(ra_plan_query(plan, d.rank, &report), RA_OK);
        if (i < 2) first[i] = report;
        CHECK_BITS(&report, &first[i & 1], sizeof report);
        CHECK_EQ(report.chunk_tokens, 4096);
        ra_plan_destroy(plan);
    }
}

/* One problem of two sequences, its O and gradients by packed tensors. */
typedef struct shared {
    problem p;
    ra_desc d;
    ra_tensors t;
    block w;
    float *o, *lse, *g[3];
    int64_t n[3];                      /* floats of the gradients */
} shared;

static void shared_open(shared *x, int32_t heads, int64_t tokens, h_rng *r) {
    problem *p = &x->p;
    memset(x, 0, sizeof *x);
    problem_shape(p, tokens, heads, heads, 8, 8);
    p->B = 2;
    p->tq[1] = p->tk[1] = tokens;
    p->mask.kind = RA_MASK_CAUSAL;
    problem_data(p, r);
    problem_cotangent(p, r);
    x->d = desc_of(p);
    x->w = block_new(ra_attention_bytes(&x->d, 3) + ra_attention_backward_bytes(&x->d, 3), 0xA5);
    x->n[0] = x->n[1] = x->n[2] = 2 * tokens * heads * 8;
    x->o = floats(x->n[0], 0);
    x->lse = floats(x->n[0], 0);
    for (int i = 0; i < 3; i++) x->g[i] = floats(x->n[i], 0);
    x->t.q.data = p->q; x->t.k.data = p->k; x->t.v.data = p->v; x->t.d_o.data = p->d_o;
    x->t.o.data = x->o; x->t.lse.data = x->lse;
    x->t.d_q.data = x->g[0]; x->t.d_k.data = x->g[1]; x->t.d_v.data = x->g[2];
    CHECK_EQ(ra_attention(&x->d, &x->t, x->w.at, x->w.bytes, 0, 1), RA_OK);
    CHECK_EQ(ra_attention_backward(&x->d, &x->t, x->w.at, x->w.bytes, 0, 1), RA_OK);
}

static void shared_close(shared *x) {
    free(x->o); free(x->lse); free(x->w.raw);
    for (int i = 0; i < 3; i++) free(x->g[i]);
    problem_free(&x->p);
}

/* [B][T][H][8] as [B][H][T][8] and back. The strides of heads and tokens determine the distance of
 * sequences, so batch_stride may stay 0. */
TEST(batch_stride_beside_others) {
    enum { T = 50, H = 3, N = 2 * T * H * 8 };
    h_rng r = h_case_rng(0);
    shared x;
    static float turned[3][N], o[N], back[N];
    ra_tensors t;
    ra_in *in[3];
    shared_open(&x, H, T, &r);
    t = x.t;
    in[0] = &t.q; in[1] = &t.k; in[2] = &t.v;
    for (int k = 0; k < 3; k++) {
        const float *from = k == 0 ? x.p.q : k == 1 ? x.p.k : x.p.v;
        for (int i = 0; i < N; i++) {
            const int b = i / (T * H * 8), row = i / (H * 8) % T, head = i / 8 % H;
            turned[k][((b * H + head) * T + row) * 8 + i % 8] = from[i];
        }
        in[k]->data = turned[k];
        in[k]->token_stride = 8 * 4;
        in[k]->head_stride = T * 8 * 4;
    }
    t.o.data = o;
    t.o.token_stride = 8 * 4;
    t.o.head_stride = T * 8 * 4;
    CHECK_EQ(ra_attention(&x.d, &t, x.w.at, x.w.bytes, 0, 1), RA_OK);
    for (int i = 0; i < N; i++) {
        const int b = i / (T * H * 8), row = i / (H * 8) % T, head = i / 8 % H;
        back[i] = o[((b * H + head) * T + row) * 8 + i % 8];
    }
    CHECK_BITS(back, x.o, sizeof back);
    shared_close(&x);
}

/* Q, K and V in one buffer, and their gradients in another, (B, T, 3C). The strides of sequences
 * follow from those of tokens. */
TEST(gradients_in_one_buffer) {
    enum { T = 50, H = 3, C = H * 8, N = 2 * T * C };
    h_rng r = h_case_rng(0);
    shared x;
    static float all[3 * N], grads[3 * N], part[N];
    ra_tensors t;
    ra_in *in[3];
    ra_out *out[3];
    shared_open(&x, H, T, &r);
    t = x.t;
    in[0] = &t.q; in[1] = &t.k; in[2] = &t.v;
    out[0] = &t.d_q; out[1] = &t.d_k; out[2] = &t.d_v;
    for (int k = 0; k < 3; k++) {
        const float *from = k == 0 ? x.p.q : k == 1 ? x.p.k : x.p.v;
        for (int i = 0; i < N; i++) all[i / C * 3 * C + k * C + i % C] = from[i];
        in[k]->data = all + k * C;
        out[k]->data = grads + k * C;
        in[k]->token_stride = out[k]->token_stride = 3 * C * 4;
    }
    for (int ring = 0; ring < 2; ring++) {
        memset(grads, 0, sizeof grads);
        if (ring) {
            ra_plan *plan = NULL;
            ra_ring *one = NULL;
            CHECK_EQ(ra_plan_create(&plan, &x.d, NULL), RA_OK);
            CHECK_EQ(ra_ring_create(&one, plan, NULL, NULL), RA_OK);
            CHECK_EQ(ra_backward(plan, one, &t, RA_NO_DEADLINE), RA_OK);
            CHECK_EQ(ra_ring_destroy(one), RA_OK);
            ra_plan_destroy(plan);
        } else {
            CHECK_EQ(ra_attention_backward(&x.d, &t, x.w.at, x.w.bytes, 0, 1), RA_OK);
        }
        for (int k = 0; k < 3; k++) {
            for (int i = 0; i < N; i++) part[i] = grads[i / C * 3 * C + k * C + i % C];
            CHECK_BITS(part, x.g[k], sizeof part);
        }
    }
    shared_close(&x);
}

/* One workspace serves forward, in both forms and with several threads, and backward in turn. */
TEST(one_workspace_for_both) {
    for (int i = 0; i < 2; i++) {
        h_rng r = h_case_rng(i);
        shared x;
        float *o, *g[3];
        ra_tensors t;
        shared_open(&x, 2, i ? 2300 : 70, &r);
        if (i) {                       /* one query after 2299 keys: threads divide the keys */
            x.d.tokens = 1;
            x.d.q_offset = 2299;
            CHECK_EQ(ra_attention(&x.d, &x.t, x.w.at, x.w.bytes, 0, 1), RA_OK);
            for (int k = 0; k < 3; k++) memset(x.g[k], 0, (size_t)x.n[k] * 4);
            CHECK_EQ(ra_attention_backward(&x.d, &x.t, x.w.at, x.w.bytes, 0, 1), RA_OK);
        }
        t = x.t;
        o = floats(x.n[0], 0);
        t.o.data = o;
        for (int k = 0; k < 3; k++) g[k] = floats(x.n[k], 0);
        t.d_q.data = g[0]; t.d_k.data = g[1]; t.d_v.data = g[2];
        for (int turn = 0; turn < 3; turn++) {
            memset(o, 0, (size_t)x.n[0] * 4);
            for (int k = 0; k < 3; k++) memset(g[k], 0, (size_t)x.n[k] * 4);
            for (int ith = 0; ith < 3; ith++)
                CHECK_EQ(ra_attention(&x.d, &t, x.w.at, x.w.bytes, ith, 3), RA_OK);
            for (int ith = 0; ith < 3; ith++)
                CHECK_EQ(ra_attention_backward(&x.d, &t, x.w.at, x.w.bytes, ith, 3), RA_OK);
            CHECK_BITS(o, x.o, x.p.B * x.d.tokens * x.p.Hq * x.p.Dv * 4);
            for (int k = 0; k < 3; k++) CHECK_BITS(g[k], x.g[k], x.n[k] * 4);
        }
        free(o);
        for (int k = 0; k < 3; k++) free(g[k]);
        shared_close(&x);
    }
}

/* The workspace of the largest call serves every smaller one, at any address, without clearing. */
TEST(one_workspace_for_smaller_calls) {
    static const int32_t heads[6][2] = {{1, 1}, {4, 4}, {8, 2}, {16, 1}, {24, 1}, {32, 8}};
    for (int i = 0; i < 600 && h_case(i); i++) {
        h_rng r = h_case_rng(i);
        const int32_t *h = heads[h_range(&r, 0, 5)];
        const int32_t nth = (int32_t)h_range(&r, 1, 9);
        ra_desc most = ra_desc_make(h[0], h[1], (int32_t)h_range(&r, 1, 160), RA_F32,
                                    RA_MASK_CAUSAL);
        most.sequences = (int32_t)h_range(&r, 1, h_one_in(&r, 2) ? 3 : 40);
        most.tokens = h_range(&r, 1, h_one_in(&r, 2) ? 20 : 300);
        most.kv_tokens = most.tokens + h_range(&r, 0, h_one_in(&r, 2) ? 200 : 40000);
        most.train = h_one_in(&r, 2);
        if (most.train && h_one_in(&r, 4)) most.dropout = 0.5f;
        if (h_one_in(&r, 4)) most.scores = RA_SCORE_ALIBI;
        for (int k = 0; k < 12; k++) {
            ra_desc d = most;
            const int32_t n = (int32_t)h_range(&r, 1, nth);
            d.sequences = (int32_t)h_range(&r, 1, most.sequences);
            d.tokens = h_one_in(&r, 2) ? h_range(&r, 1, most.tokens < 16 ? most.tokens : 16)
                                       : h_range(&r, 1, most.tokens);
            d.kv_tokens = h_range(&r, d.tokens, most.kv_tokens);
            CHECK(ra_attention_bytes(&d, n) > 0 &&
                  ra_attention_bytes(&d, n) <= ra_attention_bytes(&most, nth));
            if (!d.train) continue;
            CHECK(ra_attention_backward_bytes(&d, n) > 0 &&
                  ra_attention_backward_bytes(&d, n) <= ra_attention_backward_bytes(&most, nth));
        }
    }
    for (int i = 0; i < 3; i++) {
        h_rng r = h_case_rng(i);
        shared x;
        uint8_t *odd;
        size_t bytes;
        ra_desc most;
        shared_open(&x, 2, 40 + 30 * i, &r);
        most = x.d;
        most.tokens += 500;
        most.kv_tokens = most.tokens + 3000;
        bytes = ra_attention_bytes(&most, 3);
        odd = (uint8_t *)malloc(bytes + 1);
        memset(odd, 0xA5, bytes + 1);
        memset(x.o, 0, (size_t)x.n[0] * 4);
        CHECK_EQ(ra_attention(&x.d, &x.t, x.w.at, x.w.bytes, 0, 1), RA_OK);
        {
            float *o = floats(x.n[0], 0);
            ra_tensors t = x.t;
            t.o.data = o;
            for (int ith = 0; ith < 3; ith++)
                CHECK_EQ(ra_attention(&x.d, &t, odd + 1, bytes, 2 - ith, 3), RA_OK);
            CHECK_BITS(o, x.o, x.p.B * x.d.tokens * x.p.Hq * x.p.Dv * 4);
            free(o);
        }
        free(odd);
        shared_close(&x);
    }
}

/* Calls with a workspace, forward or backward, of the threads `from` to `to` of nth. */
static ra_status some_threads(shared *x, int back, int from, int to, int nth) {
    ra_status s = RA_OK;
    for (int ith = from; ith < to && !s; ith++)
        s = back ? ra_attention_backward(&x->d, &x->t, x->w.at, x->w.bytes, ith, nth)
                 : ra_attention(&x->d, &x->t, x->w.at, x->w.bytes, ith, nth);
    return s;
}

/* A call that lacks threads is noticed by the next one with its workspace, forward or backward.
 * Complete calls of any number of threads follow one another, whatever was there before. */
TEST(threads_that_did_not_call) {
    static const struct { int from, to, nth; const char *words; } lacks[4] = {
        { 0, 1, 2, "the last call had nth 2, but 1 of them did not call: ith 1; all" },
        { 0, 2, 4, "the last call had nth 4, but 2 of them did not call: ith 2, 3; all" },
        { 1, 3, 3, "the last call had nth 3, but 1 of them did not call: ith 0; all" },
        { 0, 26, 40, "the last call had nth 40, but 14 of them did not call; all" } };
    h_rng r = h_case_rng(0);
    shared x;
    ra_error e = { 0 };
    ra_desc most;
    shared_open(&x, 2, 40, &r);
    free(x.w.raw);
    most = x.d;
    x.w = block_new(ra_attention_backward_bytes(&most, 40) + ra_attention_bytes(&most, 40), 0xA5);
    x.d.error = &e;
    for (int i = 0; i < 4; i++)
        for (int first = 0; first < 2; first++) for (int second = 0; second < 2; second++) {
            const int nth = lacks[i].nth;
            memset(x.w.at, first ? 0xff : 0, x.w.bytes);
            for (int k = 0; k < 6; k++)
                CHECK_EQ(some_threads(&x, k & 1, 0, 1 + k % nth, 1 + k % nth), RA_OK);
            CHECK_EQ(some_threads(&x, first, 0, nth, nth), RA_OK);
            CHECK_EQ(some_threads(&x, first, lacks[i].from, lacks[i].to, nth), RA_OK);
            e.text[0] = 0;
            if (lacks[i].from)
                CHECK_EQ(some_threads(&x, second, 0, 2, nth + 1), RA_E_STATE);
            else
                CHECK_EQ(some_threads(&x, second, 0, 1, nth), RA_E_STATE);
            CHECK(!strcmp(e.field, "workspace"));
            if (!CHECK(!strncmp(e.text, lacks[i].words, strlen(lacks[i].words))))
                printf("    %s\n", e.text);
            memset(x.w.at, 0, x.w.bytes);
            CHECK_EQ(some_threads(&x, second, 0, nth, nth), RA_OK);
        }
    shared_close(&x);
}

/* Three ranks on tensors that they share: shards of CONTIGUOUS and STRIPED are views. */
typedef struct hall { shared x; int32_t layout; float *o; } hall;
static ra_status hall_rank(ra_world *of, int rank, void *user) {
    const hall *h = (const hall *)user;
    const int striped = h->layout == RA_LAYOUT_STRIPED;
    const int64_t row = h->x.p.Hq * 8 * 4, batch = h->x.p.q_max * row;
    ra_desc d = h->x.d;
    ra_tensors t = { 0 };
    ra_plan *plan = NULL;
    ra_run run = { 0, 0, 0 };
    ra_in *in[3];
    ra_status s;
    int64_t first;
    d.ranks = 3;
    d.rank = rank;
    d.layout.kind = h->layout;
    s = ra_plan_create(&plan, &d, NULL);
    if (s) return s;
    s = ra_plan_q_runs(plan, rank, 0, &run, 1) == 1 ? RA_OK : RA_E_SHAPE;
    ra_plan_destroy(plan);
    t.q.data = h->x.p.q; t.k.data = h->x.p.k; t.v.data = h->x.p.v;
    in[0] = &t.q; in[1] = &t.k; in[2] = &t.v;
    first = striped ? rank : run.first;
    for (int i = 0; i < 3; i++) {
        in[i]->data = (const uint8_t *)in[i]->data + first * row;
        in[i]->token_stride = striped ? 3 * row : 0;
        in[i]->batch_stride = batch;
    }
    t.o.data = (uint8_t *)h->o + first * row;
    t.o.token_stride = t.q.token_stride;
    t.o.batch_stride = batch;
    return s ? s : ra_ring_once(&d, ra_world_transport(of, rank), &t, RA_NO_DEADLINE);
}

TEST(shards_of_a_shared_tensor) {
    for (int64_t i = 0; i < 2; i++) {
        h_rng r = h_case_rng(i);
        hall h;
        ra_plan *plan = NULL;
        ra_run runs[2];
        shared_open(&h.x, 2, 700, &r);
        h.o = floats(h.x.n[0], 0);
        h.layout = i ? RA_LAYOUT_STRIPED : RA_LAYOUT_CONTIGUOUS;
        CHECK_EQ(ra_world_run(3, hall_rank, &h, NULL), RA_OK);
        for (int64_t j = 0; j < h.x.n[0]; j++)
            if (!CHECK(fabsf(h.o[j] - h.x.o[j]) < 2e-6f)) break;
        h.x.d.ranks = 3;               /* of ZIGZAG they are in two places */
        h.x.d.layout.kind = RA_LAYOUT_ZIGZAG;
        CHECK_EQ(ra_plan_create(&plan, &h.x.d, NULL), RA_OK);
        CHECK_EQ(ra_plan_q_runs(plan, 0, 0, runs, 2), 2);
        ra_plan_destroy(plan);
        free(h.o);
        shared_close(&h.x);
    }
}

/* Rows 0..333 and so on are no zigzag shards of 1000 tokens, which have 360, 384 and 256 rows. */
static ra_status thirds_rank(ra_world *of, int rank, void *user) {
    static const int held[3] = { 360, 384, 256 };
    static float q[3][384][8], o[3][384][8];
    char words[64];
    ra_error e = { 0 };
    ra_desc d = ra_desc_make(1, 1, 8, RA_F32, RA_MASK_CAUSAL);
    ra_tensors t = { 0 };
    (void)user;
    d.tokens = 1000;
    d.ranks = 3;
    d.rank = rank;
    d.layout.kind = RA_LAYOUT_ZIGZAG;
    d.error = &e;
    t.q.data = t.k.data = t.v.data = q[rank];
    t.o.data = o[rank];
    t.k.rows = 334;
    if (ra_ring_once(&d, ra_world_transport(of, rank), &t, RA_NO_DEADLINE) != RA_E_SHAPE) return 1;
    snprintf(words, sizeof words, "334 is not %d, the rows that this rank holds", held[rank]);
    if (strcmp(e.field, "t.k.rows") || strncmp(e.text, words, strlen(words))) return 1;
    t.q.rows = t.k.rows = t.v.rows = t.o.rows = held[rank];
    return ra_ring_once(&d, ra_world_transport(of, rank), &t, RA_NO_DEADLINE);
}

TEST(rows_of_a_shard) { CHECK_EQ(ra_world_run(3, thirds_rank, NULL, NULL), RA_OK); }

/* A cache with room for 64 tokens per sequence, of which 10 are there. With rows, batch_stride may
 * stay 0; without, that would be 10 rows. */
TEST(rows_of_a_buffer) {
    enum { ROOM = 64, KEYS = 10 };
    static float cache[2][ROOM][2][8], q[2][4][8], o[3][2][4][8], wide[2][4][2][8];
    h_rng r = h_case_rng(0);
    ra_error e = { 0 };
    ra_desc d = ra_desc_make(4, 2, 8, RA_F32, RA_MASK_CAUSAL);
    ra_tensors t = { 0 };
    for (int i = 0; i < 2 * ROOM * 16; i++) (&cache[0][0][0][0])[i] = (float)h_normal(&r);
    for (int i = 0; i < 2 * 32; i++) (&q[0][0][0])[i] = (float)h_normal(&r);
    d.sequences = 2;
    d.tokens = 1;
    d.q_offset = KEYS - 1;
    d.error = &e;
    t.q.data = q;
    t.k.data = t.v.data = cache;
    for (int i = 0; i < 3; i++) {
        t.o.data = o[i];
        t.k.rows = t.v.rows = i == 1 ? ROOM : 0;
        t.k.batch_stride = t.v.batch_stride = i == 0 ? (int64_t)sizeof cache[0] : 0;
        CHECK_EQ(ra_attention(&d, &t, NULL, 0, 0, 1), RA_OK);
    }
    CHECK_BITS(o[1], o[0], sizeof o[0]);
    CHECK(memcmp(o[2], o[0], sizeof o[0]) != 0);    /* what rows is for */
    t.k.rows = KEYS - 1;
    CHECK_EQ(ra_attention(&d, &t, NULL, 0, 0, 1), RA_E_SHAPE);
    CHECK(!strcmp(e.field, "t.k.rows") && !strncmp(e.text, "9 is less than 10, ", 19));
    t.k.rows = 0;
    t.o.data = wide;
    t.o.rows = 2;                      /* rows of a head that are there, but not read, count too */
    t.o.token_stride = 8 * 4;
    t.o.head_stride = 8 * 4;
    CHECK_EQ(ra_attention(&d, &t, NULL, 0, 0, 1), RA_E_STRIDE);
    t.o.head_stride = 2 * 8 * 4;
    CHECK_EQ(ra_attention(&d, &t, NULL, 0, 0, 1), RA_OK);
}

/* The statuses of ra_attention_simple, one by one. */
TEST(refusals_of_simple) {
    static float x[64];
    static const struct { int32_t a[6]; float scale; int null; ra_status status; } rows[16] = {
        { { 2, 2, 2, 1, 4, 0 }, 0, 0, RA_OK },
        { { -1, 2, 2, 1, 4, 0 }, 0, 0, RA_E_RANGE }, { { 2, -1, 2, 1, 4, 0 }, 0, 0, RA_E_RANGE },
        { { 2, 2, 0, 1, 4, 0 }, 0, 0, RA_E_RANGE }, { { 2, 2, 2, 0, 4, 0 }, 0, 0, RA_E_RANGE },
        { { 2, 2, 2, 1, 0, 0 }, 0, 0, RA_E_RANGE }, { { 2, 2, 2, 1, 257, 0 }, 0, 0, RA_E_RANGE },
        { { 2, 2, 2, 1, 4, -1 }, 0, 0, RA_E_RANGE },
        { { 2, 2, 2, 1, 4, RA_MAX_POSITION - 1 }, 0, 0, RA_E_RANGE },
        { { 2, RA_MAX_POSITION + 1, 2, 1, 4, 0 }, 0, 0, RA_E_RANGE },
        { { 2, 2, 2, 1, 4, 0 }, -1, 0, RA_E_RANGE },
        { { 2, 2, 2, 1, 4, 0 }, HUGE_VALF, 0, RA_E_RANGE },
        { { 2, 2, 3, 2, 4, 0 }, 0, 0, RA_E_SHAPE },
        { { 2, 2, 2, 1, 4, 0 }, 0, 1, RA_E_NULL }, { { 2, 2, 2, 1, 4, 0 }, 0, 2, RA_E_NULL },
        { { 0, 0, 2, 1, 4, 0 }, 0, 3, RA_OK } };
    for (int i = 0; i < 16; i++) {
        const int32_t *a = rows[i].a;
        float o[64];
        const float *q = rows[i].null & 1 ? NULL : x, *k = rows[i].null & 2 ? NULL : x;
        CHECK_EQ(ra_attention_simple(o, q, k, k, a[0], a[1], a[2], a[3], a[4], rows[i].scale, 0,
                                     a[5]), rows[i].status);
    }
}

/* Memory of `bytes` bytes whose end is that of the pages that may be read. */
static uint8_t *at_an_end(size_t bytes) {
    const size_t page = (size_t)sysconf(_SC_PAGESIZE), whole = (bytes + page - 1) / page * page;
    uint8_t *p = (uint8_t *)mmap(NULL, whole + page, PROT_READ | PROT_WRITE,
                                 MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED || mprotect(p + whole, page, PROT_NONE)) abort();
    return p + whole - bytes;
}

static void end_free(uint8_t *p, size_t bytes) {
    const size_t page = (size_t)sysconf(_SC_PAGESIZE), whole = (bytes + page - 1) / page * page;
    munmap(p + bytes - whole, whole + page);
}

/* K and V are read up to their last byte, and not beyond: prefill and decoding, every dtype. */
TEST(no_read_beyond_the_end) {
    enum { DIM = 96, KEYS = 77 };
    h_rng r = h_case_rng(0);
    static float x[KEYS * DIM], q[KEYS * DIM], o[KEYS * DIM];
    for (int i = 0; i < KEYS * DIM; i++) x[i] = q[i] = (float)h_normal(&r);
    for (int32_t dtype = RA_F32; dtype <= RA_Q4_0; dtype++) {
        const size_t row = dtype == RA_Q4_0 ? 54 : dtype == RA_Q8_0 ? 102
                         : dtype == RA_F32 ? 384 : 192;
        uint8_t *k = at_an_end(KEYS * row), *v = at_an_end(KEYS * row);
        CHECK_EQ(ra_convert(k, dtype, x, RA_F32, KEYS * DIM), RA_OK);
        memcpy(v, k, KEYS * row);
        for (int32_t i = 0; i < 4 * RA_ISA_NEON; i++) {
            ra_desc d = ra_desc_make(1, 1, DIM, RA_F32, RA_MASK_NONE);
            ra_tensors t = { 0 };
            d.isa = 1 + i / 4;
            d.arith = i % 2;
            d.tokens = i / 2 % 2 ? KEYS : 1;
            d.kv_tokens = KEYS;
            d.k_dtype = d.v_dtype = dtype;
            t.q.data = q;
            t.k.data = k;
            t.v.data = v;
            t.o.data = o;
            if (ra_isa_available(d.isa))
                CHECK_EQ(ra_attention(&d, &t, NULL, 0, 0, 1), RA_OK);
        }
        end_free(k, KEYS * row);
        end_free(v, KEYS * row);
    }
}

/* Rows from which a bias of -inf hides a key do not depend on it: neither on its V nor on the scale
 * of a block of V. */
TEST(keys_that_a_bias_hides) {
    enum { DIM = 32, KEYS = 64 };
    static float x[KEYS * DIM], q[KEYS * DIM], bias[KEYS * KEYS], o[2][KEYS * DIM];
    h_rng r = h_case_rng(0);
    for (int i = 0; i < KEYS * DIM; i++) x[i] = q[i] = (float)h_normal(&r);
    for (int i = 0; i < KEYS; i++) bias[i * KEYS + 5] = i == KEYS - 1 ? 0 : -HUGE_VALF;
    for (int32_t i = 0; i < 4 * RA_ISA_NEON; i++) {
        const int32_t dtype = i % 2 ? RA_Q4_0 : RA_Q8_0, bytes = i % 2 ? 18 : 34;
        uint8_t k[KEYS * 34], v[KEYS * 34];
        ra_desc d = ra_desc_make(1, 1, DIM, RA_F32, RA_MASK_NONE);
        ra_tensors t = { 0 };
        const float wild = 60000;
        d.isa = 1 + i / 4;
        d.form = i / 2 % 2;
        d.tokens = d.kv_tokens = KEYS;
        d.scores = RA_SCORE_BIAS;
        d.k_dtype = d.v_dtype = dtype;
        t.q.data = q;
        t.k.data = k;
        t.v.data = v;
        t.bias.data = bias;
        t.bias.row_step = KEYS * sizeof *bias;
        t.bias.key_step = sizeof *bias;
        t.bias.keys = KEYS;
        CHECK_EQ(ra_convert(k, dtype, x, RA_F32, KEYS * DIM), RA_OK);
        memcpy(v, k, sizeof v);
        if (!ra_isa_available(d.isa)) continue;
        for (int n = 0; n < 2; n++) {
            t.o.data = o[n];
            if (n) (void)ra_convert(v + 5 * bytes, RA_F16, &wild, RA_F32, 1);
            CHECK_EQ(ra_attention(&d, &t, NULL, 0, 0, 1), RA_OK);
        }
        h_context("isa %d, dtype %d, form %d", (int)d.isa, (int)dtype, (int)d.form);
        CHECK_BITS(o[1], o[0], (KEYS - 1) * DIM * (int)sizeof(float));
        CHECK(memcmp(o[1] + (KEYS - 1) * DIM, o[0] + (KEYS - 1) * DIM, DIM * sizeof(float)) != 0);
    }
}

static const h_test tests[] = {
    ENTRY(lse_without_keys), ENTRY(rows_that_fit_the_stack), ENTRY(array_ignores_tokens),
    ENTRY(batch_stride_beside_others), ENTRY(gradients_in_one_buffer),
    ENTRY(one_workspace_for_both), ENTRY(one_workspace_for_smaller_calls),
    ENTRY(threads_that_did_not_call), ENTRY(shards_of_a_shared_tensor), ENTRY(rows_of_a_shard),
    ENTRY(rows_of_a_buffer), ENTRY(refusals_of_simple),
    ENTRY(no_read_beyond_the_end), ENTRY(keys_that_a_bias_hides),
    ENTRY(hidden_heads_on_any_threads),
    ENTRY(error_of_f32), ENTRY(bias_at_the_end_of_f32),
    ENTRY(packed_by_the_longest), ENTRY(strides_of_the_longest),
};

int main(int argc, char **argv) {
    return h_main(argc, argv, tests, sizeof tests / sizeof tests[0]);
}
