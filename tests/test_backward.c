/* Gradients on one rank. Proves the oracle's formulas by finite differences and the library by the
 * oracle, in double precision: every mask, layout, dtype and score change, threads, dropout, and
 * inputs with NaN, infinities and huge values. */
#include "harness.h"
#define RINGATTN_IMPLEMENTATION
#include "ringattn.h"
#include "oracle.h"
#include "world.h"

/* Gradients of one call, which hold some value before it. */
typedef struct grads {
    int32_t dtype, bias_row, bias_key; /* 1: the gradient of the bias is kept by row, by key */
    view d_o, q, k, v;
    float sinks[64], *bias;
    int64_t bias_keys, bias_n;
} grads;

static double largest_plain;           /* error on unit-normal f32 problems, of any gradient */

static float before(int64_t i) { return (float)(i % 7 - 3) * 0.25f; }

/* Every row of a gradient holds `before` of its element. */
static void grad_view(view *v, const seat *e, int kind) {
    float row[64 * 192 + 1];
    int64_t n = v->heads * v->dim;
    view_make(v, kind, e->p->B, 1, GUARD);
    for (int b = 0; b < e->p->B; b++) for (int64_t t = 0; t < v->rows; t++) {
        for (int64_t i = 0; i < n; i++) row[i] = before(i);
        view_put(v, b, t, row);
    }
}

static void grads_open(grads *g, seat *e) {
    const problem *p = e->p;
    ra_bias_out *bias = &e->t.d_bias;
    g->d_o = view_of(p->o_dtype, e->q_rows, p->Hq, p->Dv);
    g->q = view_of(g->dtype ? g->dtype : RA_F32, e->q_rows, p->Hq, p->Dk);
    g->k = view_of(g->dtype ? g->dtype : RA_F32, e->k_rows, p->Hkv, p->Dk);
    g->v = view_of(g->dtype ? g->dtype : RA_F32, e->k_rows, p->Hkv, p->Dv);
    view_make(&g->d_o, stride_kind(e, 5), p->B, 0, 0xFF);
    view_fill(&g->d_o, p->B, e->q_pos, p->d_o, p->q_max, p->q_offset);
    grad_view(&g->q, e, stride_kind(e, 6));
    grad_view(&g->k, e, stride_kind(e, 7));
    grad_view(&g->v, e, stride_kind(e, 8));
    e->t.d_o = view_in(&g->d_o);
    e->t.d_q = view_out(&g->q);
    e->t.d_k = view_out(&g->k);
    if (!p->v_in_k) e->t.d_v = view_out(&g->v);
    for (int64_t i = 0; i < 64; i++) g->sinks[i] = before(i);
    if (p->scores & RA_SCORE_SINKS) e->t.d_sinks = g->sinks;
    g->bias = NULL;
    if (!(p->scores & RA_SCORE_BIAS)) return;
    g->bias_keys = bias->keys = p->bias_keys;
    bias->key_step = g->bias_key ? 4 : 0;
    bias->row_step = !g->bias_row ? 0 : g->bias_key ? 4 * p->bias_keys : 4;
    bias->head_step = 4 * (g->bias_key ? p->bias_keys : 1) * (g->bias_row ? e->q_rows : 1);
    bias->batch_step = p->Hq * bias->head_step;
    g->bias_n = p->B * bias->batch_step / 4;
    g->bias = bias->data = (float *)malloc((size_t)g->bias_n * 4 + 4);
    for (int64_t i = 0; i < g->bias_n; i++) g->bias[i] = before(i);
}

static void grads_close(grads *g) {
    view_free(&g->d_o); view_free(&g->q); view_free(&g->k); view_free(&g->v);
    free(g->bias);
}

/* Forward, then backward, one thread after another, in memory full of garbage. */
static ra_status seat_gradients(seat *e, grads *g, int nth) {
    ra_status status = seat_attention(e);
    size_t bytes = ra_attention_backward_bytes(&e->d, nth);
    uint8_t *mem = (uint8_t *)malloc(bytes + 64), *work = mem + (64 - (uintptr_t)mem % 64) % 64;
    if (!bytes) status = e->error.status;
    if (status == RA_OK) grads_open(g, e);
    memset(mem, 0xA5, bytes + 64);
    for (int i = nth - 1; i >= 0 && status == RA_OK; i--) {
        status = ra_attention_backward(&e->d, &e->t, work, bytes, i, nth);
    }
    free(mem);
    return status;
}

/* -------------------------------------------------------------------------- comparing */
/* Factor of the tolerances, which are for f32. If forward rounded its weights to bf16, the LSE and
 * O from which gradients start are off by the average of those roundings, not by one of f32. */
static double rough = 1;

/* Worst |got - want| over the bar, over all elements of a gradient by position. */
static double judge_view(const view *v, const seat *e, const double *real, const double *bar,
                         int keys) {
    const problem *p = e->p;
    const int32_t *pos = keys ? e->k_pos : e->q_pos;
    int64_t n = v->heads * v->dim, most = keys ? p->k_max : p->q_max, t;
    int plain = !p->loose && p->q_dtype == RA_F32 && p->k_dtype == RA_F32 && p->v_dtype == RA_F32 &&
                p->o_dtype == RA_F32;
    float *row = (float *)malloc((size_t)n * sizeof *row);
    double worst = 0;
    int written = v->dtype != RA_F32;
    for (int b = 0; b < p->B; b++) for (t = 0; t < (keys ? e->k_len : e->q_len)[b]; t++) {
        int64_t at = pos[b * v->rows + t];
        view_take(v, b, t, row);
        for (int64_t i = 0; i < n; i++) {
            double add = written ? 0 : (double)before(i), x = 0, tol = 3e-7 + 1.2e-7 * fabs(add);
            if (at >= 0) {
                int64_t from = (b * most + at - (keys ? 0 : p->q_offset)) * n + i;
                x = real[from];
                tol += rough * bar[from] + 1.2e-7 * fabs(x);
            }
            if (written) tol += 0.51 * dtype_ulp(x, v->dtype);
            x = fabs((double)row[i] - add - x);
            if (!(x / tol <= worst)) worst = x / tol;
            if (plain && !written && x > largest_plain) largest_plain = x;
        }
    }
    for (int b = 0; b < p->B; b++) for (t = (keys ? e->k_len : e->q_len)[b]; t < v->rows; t++) {
        view_take(v, b, t, row);       /* rows of no sequence do not change */
        for (int64_t i = 0; i < n; i++) if (row[i] != before(i)) worst = HUGE_VAL;
    }
    free(row);
    if (worst > 1) printf("    %.3g times the bar\n", worst);
    return v->rows && view_guard(v) ? HUGE_VAL : worst; /* bytes beside a gradient were written */
}

static double judge_bias(const grads *g, const seat *e, const slopes *real) {
    const problem *p = e->p;
    const ra_bias_out *bias = &e->t.d_bias;
    double *x = (double *)calloc(2 * (size_t)g->bias_n + 2, sizeof *x), worst = 0;
    double *bar = x + g->bias_n;
    int64_t t, k, i;
    for (int b = 0; b < p->B; b++) for (int head = 0; head < p->Hq; head++) {
        for (t = 0; t < e->q_len[b]; t++) for (k = 0; k < p->k_max && k < p->bias_keys; k++) {
            int64_t pos = e->q_pos[b * e->q_rows + t], pair;
            if (pos < 0) continue;
            pair = ((b * p->Hq + head) * p->q_max + pos - p->q_offset) * p->k_max + k;
            i = (b * bias->batch_step + head * bias->head_step + t * bias->row_step +
                 k * bias->key_step) / 4;
            x[i] += real->bias[pair];
            bar[i] += real->bias_bar[pair];
        }
    }
    for (i = 0; i < g->bias_n; i++) {
        double far = fabs((double)g->bias[i] - (double)before(i) - x[i]);
        far /= rough * bar[i] + 3e-7 * (1 + fabs(x[i]));
        if (!(far <= worst)) worst = far;
    }
    free(x);
    return worst;
}

static double judge_sinks(const grads *g, const problem *p, const slopes *real) {
    double worst = 0;
    for (int h = 0; h < 64; h++) {
        double x = h < p->Hq && (p->scores & RA_SCORE_SINKS) ? real->sinks[h] : 0, far;
        far = fabs((double)g->sinks[h] - (double)before(h) - x);
        far /= (h < p->Hq ? rough * real->sinks_bar[h] : 0) + 3e-7 * (1 + fabs(x));
        if (!(far <= worst)) worst = far;
    }
    return worst;
}

/* Dropout forward drops the same weights as the oracle. */
static void check_forward(const seat *e) {
    const problem *p = e->p;
    truth t = oracle(p);
    float row[64 * 192];
    double worst = 0, far, tol, ulp = p->o_dtype == RA_F32 ? 0 : p->o_dtype == RA_F16 ? 6e-4 : 5e-3;
    int64_t n = p->Hq * p->Dv, at;
    for (int b = 0; b < p->B; b++) for (int64_t i = 0; i < e->q_len[b]; i++) {
        if (e->q_pos[b * e->q_rows + i] < 0) continue;
        at = b * p->q_max + e->q_pos[b * e->q_rows + i] - p->q_offset;
        view_take(&e->o, b, i, row);
        for (int64_t d = 0; d < n; d++) {
            tol = 1e-5 + 4 * t.slack[at * p->Hq + d / p->Dv] + ulp * fabs(t.o[at * n + d]);
            far = fabs((double)row[d] - t.o[at * n + d]) / tol;
            if (!(far <= worst)) worst = far;
        }
    }
    CHECK(worst <= 1);
    truth_free(&t);
}

static int opened(world *w, const problem *p, const setup *s, int32_t dtype) {
    seat *e = &w->seats[0];
    describe_case(p, s);
    if (!CHECK_EQ(world_open(w, p, s), RA_OK)) return 0;
    if (positions_with_call(s) && e->d.kv_tokens == 0) { /* 0: as many keys as queries */
        part_free(e);
        return 0;
    }
    e->d.train = 1;
    e->d.grad_dtype = dtype;
    e->d.dropout = p->dropout;
    e->t.seed = p->seed;
    return 1;
}

static int ran(seat *e, ra_status status) {
    if (CHECK_EQ(status, RA_OK)) return 1;
    printf("    %s: %s\n", e->error.field, e->error.text);
    return 0;
}

/* One problem through the library and the oracle. bias: 0 gradients of all of it, 1 by key, 2 by
 * row. */
static void compare(const problem *p, const setup *s, int32_t dtype, int bias) {
    static world w;
    seat *e = &w.seats[0];
    grads g = { 0 };
    slopes real;
    g.dtype = dtype;
    g.bias_row = bias != 1;
    g.bias_key = bias != 2;
    if (!opened(&w, p, s, dtype) || !ran(e, seat_gradients(e, &g, s->threads))) return;
    real = oracle_slopes(p, g.bias != NULL);
    rough = rounds_weights(&e->d) ? 4096 : 1;
    CHECK(judge_view(&g.q, e, real.q, real.q_bar, 0) <= 1);
    CHECK(judge_view(&g.k, e, real.k, real.k_bar, 1) <= 1);
    if (!p->v_in_k) CHECK(judge_view(&g.v, e, real.v, real.v_bar, 1) <= 1);
    if (g.bias) CHECK(judge_bias(&g, e, &real) <= 1);
    CHECK(judge_sinks(&g, p, &real) <= 1);
    CHECK_EQ(part_hash(e), e->hash);
    if (p->dropout > 0) check_forward(e);
    slopes_free(&real);
    grads_close(&g);
    part_free(e);
}

/* -------------------------------------------------------------------------- at random */
static void random_case(int64_t i, const wish *w, int32_t dtypes) {
    static const float rates[4] = { 0, 0, 0.1f, 0.5f };
    h_rng r = h_case_rng(i);
    problem p;
    setup s;
    if (!h_case(i)) return;
    random_problem(&p, &r, w);
    random_setup(&s, &p, &r, w);
    if (w->layout == L_RUNS && i % 2) short_layout(&s, &p, &r);
    s.call = CALL_ATTENTION;
    s.wire = 0;
    s.no_lse = 0;
    s.any_isa = 0;
    s.shift = 0;
    s.threads = (int32_t)h_range(&r, 1, 5);
    if (dtypes < 0) dtypes = h_one_in(&r, 2) ? 0 : (int32_t)h_range(&r, 0, 80);
    problem_dtypes(&p, dtypes % 3 + 1, dtypes / 3 % 3 + 1, dtypes / 9 % 3 + 1, dtypes / 27 + 1);
    problem_data(&p, &r);
    problem_cotangent(&p, &r);
    p.dropout = w->options == 0 ? 0 : rates[h_range(&r, 0, 3)];
    compare(&p, &s, h_one_in(&r, 3) ? (int32_t)h_range(&r, RA_F16, RA_BF16) : 0,
            (int)h_range(&r, 0, 2));
    setup_free(&s);
    problem_free(&p);
}

TEST(masks_and_layouts) {
    static const int layouts[4] = { L_CONTIGUOUS, L_ZIGZAG, L_RUNS, L_ARRAY };
    wish w = { M_NONE, L_CONTIGUOUS, 1, ANY, 2e6 };
    int64_t n = h_run.large ? 40 : 2;
    for (int64_t i = 0; i < n * MASKS * 4; i++) {
        int64_t left = i;
        w.mask = h_pick(&left, MASKS);
        w.layout = layouts[h_pick(&left, 4)];
        w.options = i < MASKS * 4 ? 0 : -1;
        random_case(i, &w, i < MASKS * 4 ? 0 : -1);
    }
    printf("largest error on unit-normal f32 data: %.3g\n", largest_plain);
}

TEST(everything_at_random) {
    wish w = { ANY, ANY, 1, ANY, 3e6 };
    int64_t n = h_run.large ? 10000 : 200;
    for (int64_t i = 0; i < n; i++) {
        w.layout = (int)(i % 5);
        random_case(i, &w, -1);
    }
    printf("largest error on unit-normal f32 data: %.3g\n", largest_plain);
}

/* -------------------------------------------------------------------------- by hand */
static void hand_setup(setup *s, int32_t layout, int32_t isa, int32_t threads) {
    memset(s, 0, sizeof *s);
    s->ranks = 1;
    s->layout = layout;
    s->isa = isa;
    s->call = CALL_ATTENTION;
    s->threads = threads;
    s->seed = 4;
}

/* Incomplete blocks of rows, keys and columns, and rows longer than a chain of products. */
TEST(shapes_on_every_instruction_set) {
    static const int32_t dims[8][2] = { { 64, 64 }, { 128, 128 }, { 40, 96 }, { 7, 5 },
                                        { 192, 128 }, { 1, 1 }, { 300, 20 }, { 18, 260 } };
    static const int64_t tokens[8] = { 128, 192, 131, 65, 97, 70, 66, 63 };
    int64_t i = 0, turn;
    for (int32_t isa = RA_ISA_SCALAR; isa <= RA_ISA_NEON; isa++) for (turn = 0; turn < 16; turn++) {
        h_rng r = h_case_rng(i);
        problem p;
        setup s;
        if (!ra_isa_available(isa) || !h_case(i++)) continue;
        problem_shape(&p, tokens[turn % 8], 2, 1, dims[turn % 8][0], dims[turn % 8][1]);
        p.mask.kind = turn < 8 ? RA_MASK_CAUSAL : RA_MASK_NONE;
        if (dims[turn % 8][0] == 192) {
            p.v_in_k = 1;
            p.v_column = 32;
        }
        hand_setup(&s, turn % 3 ? RA_LAYOUT_CONTIGUOUS : RA_LAYOUT_ZIGZAG, isa, 1);
        problem_data(&p, &r);
        problem_cotangent(&p, &r);
        compare(&p, &s, 0, 0);
        problem_free(&p);
    }
}

/* A key gets a gradient from many rows: sums by block keep the error small. */
TEST(long_sequence) {
    h_rng r = h_case_rng(0);
    problem p;
    setup s;
    problem_shape(&p, 2048, 1, 1, 16, 16);
    p.mask.kind = RA_MASK_CAUSAL;
    hand_setup(&s, RA_LAYOUT_ZIGZAG, RA_ISA_AUTO, 2);
    problem_data(&p, &r);
    problem_cotangent(&p, &r);
    largest_plain = 0;
    compare(&p, &s, 0, 0);
    CHECK(largest_plain < 4e-6);
    printf("largest error of 2048 tokens: %.3g\n", largest_plain);
    problem_free(&p);
}

/* Loss in double precision. */
static double loss(const problem *p) {
    truth t = oracle(p);
    int64_t n = p->B * p->q_max * p->Hq * p->Dv;
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += t.o[i] * (double)p->d_o[i];
    truth_free(&t);
    return sum;
}

/* (loss(x + h u) - loss(x - h u)) / 2h for signs u. x are multiples of 2^-12, so both arguments are
 * exact. *real gets the sum of the gradient times u. */
static double difference(const problem *p, float *x, const double *slope, int64_t n, double *real) {
    const float h = 1.0f / 1024;
    double a, b;
    int64_t i;
    for (*real = 0, i = 0; i < n; i++) {
        float u = i % 3 ? 1.0f : -1.0f;
        x[i] += h * u;
        *real += slope[i] * (double)u;
    }
    a = loss(p);
    for (i = 0; i < n; i++) x[i] -= 2 * h * (i % 3 ? 1.0f : -1.0f);
    b = loss(p);
    for (i = 0; i < n; i++) x[i] += h * (i % 3 ? 1.0f : -1.0f);
    return (a - b) * 512;
}

static void quantize(float *x, int64_t n) {
    for (int64_t i = 0; i < n; i++) x[i] = rintf(x[i] * 4096) / 4096;
}

TEST(oracle_against_finite_differences) {
    for (int64_t i = 0; i < 8; i++) {
        h_rng r = h_case_rng(i);
        problem p;
        slopes s;
        double got, real, slope = 0;
        int64_t nq, nk, nv;
        if (!h_case(i)) continue;
        problem_shape(&p, 24, 4, 2, 6, i % 4 == 3 ? 4 : 5);
        p.v_in_k = i % 4 == 3;
        p.mask.kind = i % 2 ? RA_MASK_CAUSAL : RA_MASK_NONE;
        p.softcap = i & 4 ? 1.5f : 0;
        p.scores = RA_SCORE_ALIBI | RA_SCORE_SINKS;
        p.dropout = i % 3 == 1 ? 0.25f : 0;
        problem_data(&p, &r);
        problem_cotangent(&p, &r);
        nq = p.q_max * p.Hq * p.Dk;
        nk = p.k_max * p.Hkv * p.Dk;
        nv = p.v_in_k ? 0 : p.k_max * p.Hkv * p.Dv;
        quantize(p.q, nq); quantize(p.k, nk); quantize(p.v, nv);
        quantize(p.sinks, p.Hq); quantize(p.alibi, p.Hq);
        s = oracle_slopes(&p, 1);
        got = difference(&p, p.q, s.q, nq, &real);
        CHECK(fabs(got - real) <= 1e-4 * (1 + fabs(real)));
        got = difference(&p, p.k, s.k, nk, &real);
        CHECK(fabs(got - real) <= 1e-4 * (1 + fabs(real)));
        got = difference(&p, p.v, s.v, nv, &real);
        CHECK(fabs(got - real) <= 1e-4 * (1 + fabs(real)));
        got = difference(&p, p.sinks, s.sinks, p.Hq, &real);
        CHECK(fabs(got - real) <= 1e-4 * (1 + fabs(real)));
        for (int64_t j = 0; j < p.q_max; j++) for (int64_t k = 0; k < p.k_max; k++) {
            slope -= s.bias[j * p.k_max + k] * fabs((double)(j - k)); /* of head 0's ALiBi */
        }
        got = difference(&p, p.alibi, &slope, 1, &real);
        CHECK(fabs(got - real) <= 1e-4 * (1 + fabs(real)));
        slopes_free(&s);
        problem_free(&p);
    }
}

/* -------------------------------------------------------------------------- bits */
/* All gradients of a problem in one array: d_q, d_k, d_v, sinks, bias. */
static float *all_gradients(const problem *p, const setup *s, int nth, int bias, size_t *n) {
    static world w;
    seat *e = &w.seats[0];
    grads g = { 0 };
    size_t q, k, v;
    float *out;
    *n = 0;
    g.bias_row = bias != 1;
    g.bias_key = bias != 2;
    if (!opened(&w, p, s, 0) || !ran(e, seat_gradients(e, &g, nth))) return NULL;
    q = g.q.bytes / 4; k = g.k.bytes / 4; v = g.v.bytes / 4;
    *n = q + k + v + 64 + (size_t)g.bias_n;
    out = (float *)malloc(*n * 4);
    memcpy(out, g.q.mem, q * 4);
    memcpy(out + q, g.k.mem, k * 4);
    memcpy(out + q + k, g.v.mem, v * 4);
    memcpy(out + q + k + v, g.sinks, sizeof g.sinks);
    if (g.bias) memcpy(out + q + k + v + 64, g.bias, (size_t)g.bias_n * 4);
    grads_close(&g);
    part_free(e);
    return out;
}

TEST(threads_do_not_change_bits) {
    static const int32_t heads[3][2] = { { 2, 1 }, { 3, 3 }, { 4, 2 } };
    for (int64_t i = 0; i < 24; i++) {
        h_rng r = h_case_rng(i);
        problem p;
        setup s;
        float *one, *many;
        size_t n, m;
        int64_t left = i;
        const int32_t *const head = heads[h_pick(&left, 3)];
        if (!h_case(i)) continue;
        problem_shape(&p, 300, head[0], head[1], 24, 17);
        p.mask.kind = h_pick(&left, 2) ? RA_MASK_CAUSAL : RA_MASK_NONE;
        if (h_pick(&left, 2)) p.mask.window = 100;
        problem_options(&p, &r, i % 2 ? RA_SCORE_SINKS | RA_SCORE_BIAS : 0);
        p.dropout = i % 5 == 4 ? 0.2f : 0;
        hand_setup(&s, i < 12 ? RA_LAYOUT_CONTIGUOUS : RA_LAYOUT_ZIGZAG, RA_ISA_AUTO, 1);
        problem_data(&p, &r);
        problem_cotangent(&p, &r);
        one = all_gradients(&p, &s, 1, (int)(i % 3), &n);
        for (int nth = 2; nth <= 5; nth++) {
            many = all_gradients(&p, &s, nth, (int)(i % 3), &m);
            if (CHECK(one && many && m == n)) CHECK_BITS(many, one, n * 4);
            free(many);
        }
        free(one);
        problem_free(&p);
    }
}

/* If fewer gradients are requested, those have the same bits. */
TEST(gradients_one_by_one) {
    enum { T = 150, HQ = 4, HK = 2, D = 16, Q = T * HQ * D, K = T * HK * D };
    static float q[Q], k[K], v[K], o[Q], lse[T * HQ], d_o[Q], all[3][Q], part[3][Q];
    h_rng r = h_case_rng(0);
    ra_desc d = ra_desc_make(HQ, HK, D, RA_F32, RA_MASK_CAUSAL);
    ra_tensors t = { 0 }, less;
    size_t bytes;
    uint8_t *mem, *work;
    d.tokens = T;
    d.train = 1;
    for (int i = 0; i < Q; i++) { q[i] = h_normal(&r); d_o[i] = h_normal(&r); }
    for (int i = 0; i < K; i++) { k[i] = h_normal(&r); v[i] = h_normal(&r); }
    t.q.data = q; t.k.data = k; t.v.data = v; t.o.data = o; t.lse.data = lse; t.d_o.data = d_o;
    bytes = ra_attention_backward_bytes(&d, 1);
    mem = (uint8_t *)malloc(bytes + 64);
    work = mem + (64 - (uintptr_t)mem % 64) % 64;
    CHECK_EQ(ra_attention(&d, &t, NULL, 0, 0, 1), RA_OK);
    t.d_q.data = all[0]; t.d_k.data = all[1]; t.d_v.data = all[2];
    CHECK_EQ(ra_attention_backward(&d, &t, work, bytes, 0, 1), RA_OK);
    for (int i = 1; i < 7; i++) {
        memset(part, 0, sizeof part);
        less = t;
        less.d_q.data = i & 1 ? part[0] : NULL;
        less.d_k.data = i & 2 ? part[1] : NULL;
        less.d_v.data = i & 4 ? part[2] : NULL;
        CHECK_EQ(ra_attention_backward(&d, &less, work, bytes, 0, 1), RA_OK);
        for (int j = 0; j < 3; j++) {
            if (i >> j & 1) CHECK_BITS(part[j], all[j], (size_t)(j ? K : Q) * 4);
            else CHECK(part[j][0] == 0 && part[j][K - 1] == 0);
        }
    }
    free(mem);
}

/* -------------------------------------------------------------------------- hostile numbers */
/* Biases of huge finite values as masks: weights are those of forward as far as an f32 LSE can hold
 * them, and 0 in rows where it cannot. They never exceed 1 by much and are never NaN. */
TEST(huge_bias) {
    int64_t i = 0;
    int32_t turn;
    for (int32_t isa = RA_ISA_SCALAR; isa <= RA_ISA_NEON; isa++) for (turn = 0; turn < 12; turn++) {
        h_rng r = h_case_rng(i);
        problem p;
        setup s;
        if (!ra_isa_available(isa) || !h_case(i++)) continue;
        problem_shape(&p, 100 + 7 * turn, 2, 1 + turn % 2, 32, 48);
        if (turn % 3) p.mask.kind = RA_MASK_CAUSAL;
        if (turn % 4 == 3) problem_dtypes(&p, RA_BF16, RA_BF16, RA_BF16, RA_F32);
        p.scores = RA_SCORE_BIAS;
        if (turn >= 8) p.scores |= RA_SCORE_SINKS;
        hand_setup(&s, turn % 2 ? RA_LAYOUT_CONTIGUOUS : RA_LAYOUT_ZIGZAG, isa, 1 + turn % 2);
        problem_data(&p, &r);
        problem_huge_bias(&p, &r);
        problem_cotangent(&p, &r);
        describe_case(&p, &s);
        compare(&p, &s, 0, 0);
        problem_free(&p);
    }
}

/* A call with factors per head, forward and then backward: their outputs in `out`. hide: the bias
 * of hidden keys. i selects the case; of a row without keys O is 0, its LSE -inf. */
enum { HIDE_D = 64, HIDE_KEYS = 150, HIDE_HEADS = 4, HIDE_ROWS = 70, HIDE_CASES = 3 * 3 * 5,
       HIDE_ALL = HIDE_HEADS * HIDE_ROWS * HIDE_KEYS };
typedef struct hide_out {
    float o[HIDE_ROWS][HIDE_HEADS][HIDE_D], lse[HIDE_ROWS][HIDE_HEADS];
    float d_q[HIDE_ROWS * HIDE_HEADS * HIDE_D], d_k[HIDE_KEYS * 2 * HIDE_D];
    float d_v[HIDE_KEYS * 2 * HIDE_D], d_bias[HIDE_ALL];
} hide_out;

static void hide_run(int64_t i, int32_t isa, float hide, hide_out *out) {
    static const float factors[HIDE_HEADS] = { 0.5f, 1e-3f, 4, 0.68f };
    static const int32_t tokens[3] = { 1, 17, HIDE_ROWS };
    static float x[HIDE_KEYS * 2 * HIDE_D], wide[HIDE_ALL];
    static uint8_t q[sizeof x], k[sizeof x], bias[2 * sizeof wide], work[1 << 21];
    h_rng r = h_case_rng(i);
    const int32_t rows = tokens[h_pick(&i, 3)], which = h_pick(&i, 3);
    const int32_t dtype = RA_F32 + h_pick(&i, 5), per_row = which < 2;
    const int32_t asks = has_scales(dtype) ? RA_F32 : dtype, step = h_one_in(&r, 2) ? 2 : 1;
    const int32_t size = dtype == RA_BF16 ? 2 : 4;
    ra_desc d = ra_desc_make(HIDE_HEADS, 2, HIDE_D, dtype, per_row ? RA_MASK_NONE : RA_MASK_CAUSAL);
    ra_tensors t = { 0 };
    d.q_dtype = asks;
    d.o_dtype = RA_F32;
    d.tokens = rows;
    d.kv_tokens = HIDE_KEYS;
    d.scores = RA_SCORE_BIAS | RA_SCORE_FACTORS;
    d.train = !has_scales(dtype) && (rows > 1 || h_one_in(&r, 2));
    d.isa = isa;
    for (size_t j = 0; j < sizeof x / sizeof *x; j++) x[j] = h_normal(&r);
    CHECK_EQ(ra_convert(q, asks, x, RA_F32, rows * HIDE_HEADS * HIDE_D), RA_OK);
    CHECK_EQ(ra_convert(k, dtype, x, RA_F32, HIDE_KEYS * 2 * HIDE_D), RA_OK);
    for (int64_t j = 0; j < HIDE_ALL; j++) {
        const int64_t row = j / HIDE_KEYS % HIDE_ROWS, head = j / HIDE_KEYS / HIDE_ROWS;
        const int empty = per_row ? row % 16 == 0 && head < HIDE_HEADS - which : j % HIDE_KEYS == 0;
        wide[j] = empty || h_one_in(&r, 3) ? hide : h_normal(&r);
    }
    for (int64_t j = 0; j < HIDE_ALL; j++)
        CHECK_EQ(ra_convert(bias + j * step * size, size == 4 ? RA_F32 : RA_BF16, wide + j, RA_F32,
                            1), RA_OK);
    memset(out, 0, sizeof *out);
    t.q.data = q; t.k.data = t.v.data = k; t.o.data = out->o; t.lse.data = out->lse;
    t.d_o.data = x; t.d_q.data = out->d_q; t.d_k.data = out->d_k; t.d_v.data = out->d_v;
    t.bias_factors = factors;
    t.bias.data = bias;
    t.bias.dtype = size == 4 ? RA_F32 : RA_BF16;
    t.bias.keys = HIDE_KEYS;
    t.bias.key_step = size * step;
    t.bias.row_step = per_row * HIDE_KEYS * size * step;
    t.bias.head_step = which ? HIDE_ROWS * HIDE_KEYS * size * step : 0;
    CHECK_EQ(ra_attention(&d, &t, work, sizeof work, 0, 1), RA_OK);
    for (int32_t row = 0; row < (per_row ? rows : 1); row += 16)
        for (int h = 0; h < HIDE_HEADS - which % 2; h++) {
            CHECK(isinf(out->lse[row][h]) && out->lse[row][h] < 0);
            for (int c = 0; c < HIDE_D; c++) CHECK(out->o[row][h][c] == 0);
        }
    if (!d.train) return;
    t.d_bias.data = out->d_bias;
    t.d_bias.keys = HIDE_KEYS;
    t.d_bias.key_step = 4;
    t.d_bias.row_step = HIDE_KEYS * 4;
    t.d_bias.head_step = HIDE_ROWS * HIDE_KEYS * 4;
    CHECK_EQ(ra_attention_backward(&d, &t, work, sizeof work, 0, 1), RA_OK);
}

/* A bias of nearly the lowest float hides its key whatever the factor of the head: the same bits as
 * with -inf. One token, which decodes, and more; a bias by row and key, shared by heads or not, or
 * by key under a causal mask, where row 0 sees only a hidden key; contiguous or not. */
TEST(factors_show_no_hidden_key) {
    static hide_out got, want;
    int64_t n = 0;
    for (int32_t isa = RA_ISA_SCALAR; isa <= RA_ISA_NEON; isa++)
        for (int64_t i = 0; i < HIDE_CASES && ra_isa_available(isa); i++) {
            if (!h_case(n++)) continue;
            h_context("isa %d case %d", isa, (int)i);
            hide_run(i, isa, -HUGE_VALF, &want);
            hide_run(i, isa, -3.38e38f, &got);
            CHECK_BITS(&got, &want, sizeof got);
        }
}

/* A window of 20 over 200 tokens: NaN in one row of one tensor reaches what saw it and no more. */
TEST(nan_stays_where_it_is_seen) {
    enum { T = 200, W = 20, BAD = 100, D = 8 };
    for (int64_t i = 0; i < 16; i++) {
        h_rng r = h_case_rng(0);
        problem p;
        setup s;
        float *good, *bad, *x;
        int which = (int)(i % 4), wrong = 0, reached = 0, query = which == 0 || which == 3;
        size_t n, m;
        if (!h_case(i)) continue;
        problem_shape(&p, T, 1, 1, D, D);
        p.mask.kind = RA_MASK_CAUSAL;
        p.mask.window = W;
        if (i & 8) p.softcap = 5;
        hand_setup(&s, RA_LAYOUT_CONTIGUOUS, RA_ISA_AUTO, 1);
        if (i & 4) s.isa = RA_ISA_SCALAR;
        problem_data(&p, &r);
        problem_cotangent(&p, &r);
        good = all_gradients(&p, &s, 1, 0, &n);
        x = which == 0 ? p.q : which == 1 ? p.k : which == 2 ? p.v : p.d_o;
        for (int64_t d = 0; d < D; d++) x[BAD * D + d] = d % 2 ? (float)NAN : HUGE_VALF;
        bad = all_gradients(&p, &s, 1, 0, &m);
        if (!CHECK(good && bad && m == n)) return;
        for (int64_t j = 0; j < 3 * T; j++) {  /* rows of d_q, then of d_k and d_v */
            int64_t row = j % T;
            int clean = j < T ? (query ? row != BAD : row < BAD || row >= BAD + W)
                              : query ? row > BAD || row <= BAD - W
                                      : row <= BAD - W || row >= BAD + W;
            int same = memcmp(bad + j * D, good + j * D, D * 4) == 0;
            wrong += clean && !same;
            reached += !clean && !same;
        }
        CHECK_EQ(wrong, 0);
        CHECK(reached >= (which == 2 || which == 1 ? W : 1));
        free(good);
        free(bad);
        problem_free(&p);
    }
}

/* Rows that see nothing, and keys that no row sees, have gradients of exactly 0. */
TEST(unseen_is_zero) {
    enum { T = 140, D = 8 };
    static int32_t lo[T], hi[T];
    int32_t i;
    for (int32_t dtype = 0; dtype <= RA_BF16; dtype++) {
        h_rng r = h_case_rng(dtype);
        problem p;
        setup s;
        static world w;
        seat *e = &w.seats[0];
        grads g = { 0 };
        float row[D];
        problem_shape(&p, T, 1, 1, D, D);
        p.mask.kind = RA_MASK_INTERVALS;
        for (i = 0; i < T; i++) {      /* no row sees keys 0..9 and 100.. or is in 50..79 */
            lo[i] = 10;
            hi[i] = i >= 50 && i < 80 ? 10 : 100;
        }
        p.mask.lo = lo;
        p.mask.hi = hi;
        p.mask.interval_count = T;
        hand_setup(&s, RA_LAYOUT_CONTIGUOUS, RA_ISA_AUTO, 1);
        problem_data(&p, &r);
        problem_cotangent(&p, &r);
        for (i = 50 * D; i < 80 * D; i++) p.q[i] = p.d_o[i] = (float)NAN;
        for (i = 0; i < 10 * D; i++) p.k[i] = p.v[i] = (float)NAN;
        g.dtype = dtype;
        if (!opened(&w, &p, &s, dtype) || !ran(e, seat_gradients(e, &g, 1))) return;
        for (int64_t t = 0; t < T; t++) {
            int empty = t >= 50 && t < 80, unseen = t < 10 || t >= 100;
            const view *of[3];
            int zero;
            of[0] = &g.q; of[1] = &g.k; of[2] = &g.v;
            for (int j = 0; j < 3; j++) {
                view_take(of[j], 0, t, row);
                for (zero = 1, i = 0; i < D; i++)
                    zero &= row[i] == (dtype > RA_F32 ? 0 : before(i));
                CHECK_EQ(zero, j ? unseen : empty);
            }
        }
        grads_close(&g);
        part_free(e);
        problem_free(&p);
    }
}

/* If V is the identity, O is the matrix of weights, and a run without dropout shows which ones were
 * dropped: their rate, the factor of the others, and that another call drops the same. */
TEST(dropout_keeps_what_it_promises) {
    enum { N = 128 };
    static float q[N][8], k[N][8], v[N][N], o[3][N][N];
    h_rng r = h_case_rng(0);
    ra_desc d = ra_desc_make(1, 1, 8, RA_F32, RA_MASK_NONE);
    ra_tensors t = { 0 };
    size_t bytes;
    uint8_t *work;
    int64_t i, j, kept = 0;
    double sum = 0;
    for (i = 0; i < N; i++) for (j = 0; j < 8; j++) q[i][j] = h_normal(&r), k[i][j] = h_normal(&r);
    for (i = 0; i < N; i++) v[i][i] = 1;
    d.tokens = N;
    d.v_dim = N;
    d.train = 1;
    t.q.data = q; t.k.data = k; t.v.data = v;
    t.seed = h_next(&r);
    bytes = ra_attention_bytes(&d, 1);
    work = (uint8_t *)malloc(bytes + 64);
    for (i = 0; i < 3; i++) {
        uint8_t *at = work + (64 - (uintptr_t)work % 64) % 64;
        d.dropout = i ? 0.3f : 0;
        t.o.data = o[i];
        CHECK_EQ(ra_attention(&d, &t, at, bytes, 0, 1), RA_OK);
    }
    free(work);
    CHECK_BITS(o[2], o[1], sizeof o[1]);
    for (i = 0; i < N; i++) for (j = 0; j < N; j++) {
        double f = (double)o[1][i][j] / (double)o[0][i][j];
        CHECK(f == 0 || fabs(f - 1 / 0.7) < 1e-5);
        kept += f > 0;
        sum += f;
    }
    CHECK(fabs((double)kept - 0.7 * N * N) < 5 * sqrt(0.21 * N * N));
    CHECK(fabs(sum / (N * N) - 1) < 0.03);
}

/* -------------------------------------------------------------------------- L0 */
/* Keys in three pieces, folded forward and backward piece by piece, against the oracle. */
TEST(blocks_of_keys) {
    enum { T = 170, D = 20, HQ = 2, N = T * HQ * D, M = T * D };
    static const int64_t cut[4] = { 0, 64, 128, T };
    static float q[N], k[M], v[M], o[N], lse[T * HQ], m[T * HQ], l[T * HQ], acc[N], delta[T * HQ];
    static float d_o[N], d_q[N], d_k[M], d_v[M];
    h_rng r = h_case_rng(0);
    ra_run run = { 0 };
    ra_desc d = ra_desc_make(HQ, 1, D, RA_F32, RA_MASK_CAUSAL);
    ra_tensors t = { 0 };
    ra_state state;
    ra_grads g;
    problem p;
    slopes s;
    size_t bytes;
    uint8_t *mem, *work;
    problem_shape(&p, T, HQ, 1, D, D);
    p.mask.kind = RA_MASK_CAUSAL;
    problem_data(&p, &r);
    problem_cotangent(&p, &r);
    memcpy(q, p.q, sizeof q); memcpy(k, p.k, sizeof k); memcpy(v, p.v, sizeof v);
    memcpy(d_o, p.d_o, sizeof d_o);
    d.tokens = T;
    d.train = 1;
    t.q.data = q; t.o.data = o; t.lse.data = lse; t.d_o.data = d_o;
    state.m = m; state.l = l; state.acc = acc;
    bytes = ra_attention_backward_bytes(&d, 1);
    mem = (uint8_t *)malloc(bytes + 64);
    work = mem + (64 - (uintptr_t)mem % 64) % 64;
    CHECK_EQ(ra_state_clear(&d, &state), RA_OK);
    for (int turn = 0; turn < 2; turn++) {
        for (int i = 0; i < 3; i++) {
            run.first = cut[i];
            d.kv_tokens = run.count = cut[i + 1] - cut[i];
            t.k.data = k + cut[i] * D;
            t.v.data = v + cut[i] * D;
            t.k_pos.runs = &run;
            t.k_pos.count = 1;
            g.d_q = d_q;
            g.d_k = d_k + cut[i] * D;
            g.d_v = d_v + cut[i] * D;
            if (turn == 0) CHECK_EQ(ra_fold(&d, &state, &t, NULL, 0), RA_OK);
            else CHECK_EQ(ra_fold_backward(&d, &t, delta, &g, work, bytes), RA_OK);
        }
        d.kv_tokens = 0;
        if (turn == 0) CHECK_EQ(ra_state_finish(&d, &state, &t), RA_OK);
        CHECK_EQ(ra_delta(&d, &t, delta), RA_OK);
    }
    s = oracle_slopes(&p, 0);
    CHECK_CLOSE(d_q, s.q, N, 4e-6, 2e-6);
    CHECK_CLOSE(d_k, s.k, M, 4e-6, 2e-6);
    CHECK_CLOSE(d_v, s.v, M, 4e-6, 2e-6);
    slopes_free(&s);
    problem_free(&p);
    free(mem);
}

/* -------------------------------------------------------------------------- refusals */
static struct { float x[64], o[64], lse[8], g[4][64]; ra_desc d; ra_tensors t; ra_error e; } sane;
static uint64_t room[1 << 16];

static void sane_make(void) {
    memset(&sane, 0, sizeof sane);
    sane.d = ra_desc_make(2, 1, 4, RA_F32, RA_MASK_NONE);
    sane.d.tokens = 2;
    sane.d.train = 1;
    sane.d.error = &sane.e;
    sane.t.q.data = sane.t.k.data = sane.t.v.data = sane.x;
    sane.t.o.data = sane.o; sane.t.lse.data = sane.lse; sane.t.d_o.data = sane.g[0];
    sane.t.d_q.data = sane.g[1]; sane.t.d_k.data = sane.g[2]; sane.t.d_v.data = sane.g[3];
}

static void refused(ra_status want_status, const char *field, int line) {
    size_t bytes = ra_attention_backward_bytes(&sane.d, 1);
    uint8_t *work = (uint8_t *)room + (64 - (uintptr_t)room % 64) % 64;
    ra_status got = ra_attention_backward(&sane.d, &sane.t, work, sizeof room - 64, 0, 1);
    (void)bytes;
    if (!CHECK_EQ(got, want_status) || (field[0] && !CHECK(!strcmp(sane.e.field, field)))) {
        printf("    line %d: %s: %s\n", line, sane.e.field, sane.e.text);
    }
    sane_make();
}
#define REFUSED(status, field) refused(status, field, __LINE__)

/* The loss of a merge of two rows: sum(d_o * o) + d_lse * lse. */
static double merged_loss(const float *o1, float lse1, const float *o2, float lse2,
                          const float *d_o, float d_lse) {
    float o[12], lse = lse1;
    double sum;
    memcpy(o, o1, sizeof o);
    ra_merge(o, &lse, o2, &lse2, 1, 12);
    sum = (double)d_lse * (double)lse;
    for (int i = 0; i < 12; i++) sum += (double)d_o[i] * (double)o[i];
    return sum;
}

/* The gradient of a merge against differences of ra_merge. With w = exp(lse1 - lse), the gradients
 * of the first side are d_o1 = w d_o and d_lse1 = w (d_o (o1 - o) + d_lse). */
static void merge_by_differences(h_rng *r) {
    float o1[12], o2[12], d_o[12], o[12];
    const float lse1 = h_normal(r), lse2 = h_normal(r), d_lse = h_normal(r);
    const float above = lse1 + 0.01f, below = lse1 - 0.01f;
    float lse = lse1;
    double w, inner = (double)d_lse, slope;
    for (int i = 0; i < 12; i++) o1[i] = h_normal(r), o2[i] = h_normal(r), d_o[i] = h_normal(r);
    memcpy(o, o1, sizeof o);
    ra_merge(o, &lse, o2, &lse2, 1, 12);
    w = exp((double)lse1 - (double)lse);
    for (int i = 0; i < 12; i++) inner += (double)d_o[i] * ((double)o1[i] - (double)o[i]);
    slope = merged_loss(o1, above, o2, lse2, d_o, d_lse);
    slope -= merged_loss(o1, below, o2, lse2, d_o, d_lse);
    CHECK(fabs(slope / (double)(above - below) - w * inner) < 1e-3);
    for (int i = 0; i < 12; i++) {
        const float there = o1[i];
        o1[i] = there + 0.1f;
        slope = merged_loss(o1, lse1, o2, lse2, d_o, d_lse);
        o1[i] = there - 0.1f;
        slope -= merged_loss(o1, lse1, o2, lse2, d_o, d_lse);
        o1[i] = there;
        CHECK(fabs(slope / 0.2 - w * (double)d_o[i]) < 1e-3);
    }
}

/* Why a block of keys needs only the LSE and delta of all keys: by the gradient of the merge,
 * p1 (d_o1 v - d_o1 o1 + d_lse1) is p (d_o v - d_o o), which is what backward computes for each of
 * two blocks whose results were merged. Here both are compared with the oracle. */
TEST(gradient_of_the_merge) {
    enum { T = 150, D = 12, N = T * D };
    static float o[N], o2[N], lse[T], lse2[T], delta[T], d_q[N], d_k[N], d_v[N];
    const int64_t cut[3] = { 0, 64, T };
    h_rng r = h_case_rng(0);
    ra_run run = { 0 };
    ra_desc d = ra_desc_make(1, 1, D, RA_F32, RA_MASK_CAUSAL);
    ra_tensors t = { 0 };
    ra_grads g;
    problem p;
    slopes s;
    size_t bytes;
    uint8_t *mem, *work;
    for (int j = 0; j < 50; j++) merge_by_differences(&r);
    problem_shape(&p, T, 1, 1, D, D);
    p.mask.kind = RA_MASK_CAUSAL;
    problem_data(&p, &r);
    problem_cotangent(&p, &r);
    d.tokens = T;
    d.train = 1;
    bytes = ra_attention_backward_bytes(&d, 1);
    mem = (uint8_t *)malloc(bytes + 64);
    work = mem + (64 - (uintptr_t)mem % 64) % 64;
    t.q.data = p.q; t.d_o.data = p.d_o;
    t.k_pos.runs = &run;
    t.k_pos.count = 1;
    for (int j = 0; j < 4; j++) {                  /* forward of both blocks, then backward */
        run.first = cut[j % 2];
        d.kv_tokens = run.count = cut[j % 2 + 1] - cut[j % 2];
        t.k.data = p.k + run.first * D;
        t.v.data = p.v + run.first * D;
        t.o.data = j == 1 ? o2 : o;
        t.lse.data = j == 1 ? lse2 : lse;
        g.d_q = d_q; g.d_k = d_k + run.first * D; g.d_v = d_v + run.first * D;
        if (j == 2) ra_merge(o, lse, o2, lse2, T, D);
        if (j == 2) CHECK_EQ(ra_delta(&d, &t, delta), RA_OK);
        if (j < 2) CHECK_EQ(ra_attention(&d, &t, NULL, 0, 0, 1), RA_OK);
        else CHECK_EQ(ra_fold_backward(&d, &t, delta, &g, work, bytes), RA_OK);
    }
    s = oracle_slopes(&p, 0);
    CHECK_CLOSE(d_q, s.q, N, 4e-6, 2e-6);
    CHECK_CLOSE(d_k, s.k, N, 4e-6, 2e-6);
    CHECK_CLOSE(d_v, s.v, N, 4e-6, 2e-6);
    slopes_free(&s);
    problem_free(&p);
    free(mem);
}

/* Gradients are written, so they must not overlap, whatever their strides. Compared with a map of
 * floats: overlaps of gradients with unlike steps may pass, but what does not overlap must. */
typedef struct placed { int64_t at, step[3]; } placed;   /* floats: sequence, token, head */

static placed place(h_rng *r, const int64_t count[3], int64_t dim) {
    placed p;
    int64_t inner = dim, order = h_range(r, 0, 2);
    p.at = h_range(r, 0, 40) * (h_one_in(r, 2) ? dim : 1);
    p.step[2] = order == 1 ? 0 : inner * h_range(r, 1, 3);       /* order 1: [head][token] */
    inner = order == 1 ? dim : p.step[2] * count[2];
    p.step[1] = inner * h_range(r, 1, 3);
    inner = p.step[1] * count[1];
    if (order == 1) {
        p.step[2] = inner * h_range(r, 1, 2);
        inner = p.step[2] * count[2];
    }
    p.step[0] = inner * h_range(r, 1, 2);
    return p;
}

static int mark(uint8_t *map, const placed *p, const int64_t count[3], int64_t dim) {
    int met = 0;
    for (int64_t b = 0; b < count[0]; b++)
        for (int64_t i = 0; i < count[1]; i++)
            for (int64_t h = 0; h < count[2]; h++)
                for (int64_t c = 0; c < dim; c++)
                    met |= map[p->at + b * p->step[0] + i * p->step[1] + h * p->step[2] + c]++;
    return met;
}

TEST(gradients_must_not_overlap) {
    enum { MOST = 1 << 14, SMALL = 64 };
    static float memory[MOST], x[SMALL], d_o[SMALL], o[SMALL], lse[SMALL];
    static uint8_t map[MOST], work[1 << 20] __attribute__((aligned(64)));
    int64_t i, met = 0, noticed = 0;
    for (i = 0; i < 3000; i++) {
        h_rng r = h_case_rng(i);
        const int64_t count[3] = { h_range(&r, 1, 2), h_range(&r, 1, 3), h_range(&r, 1, 2) };
        const int64_t dim = h_range(&r, 1, 3);
        placed p[3];
        ra_out *out[3];
        ra_tensors t = { 0 };
        ra_error e = { 0 };
        ra_desc d;
        ra_status s;
        int overlap = 0, alike = 1;
        if (!h_case(i)) continue;
        memset(map, 0, sizeof map);
        d = ra_desc_make((int32_t)count[2], (int32_t)count[2], (int32_t)dim, RA_F32, RA_MASK_NONE);
        d.sequences = (int32_t)count[0];
        d.tokens = count[1];
        d.train = 1;
        d.error = &e;
        t.q.data = t.k.data = t.v.data = x;
        t.d_o.data = d_o;
        t.o.data = o;
        t.lse.data = lse;
        out[0] = &t.d_q;
        out[1] = &t.d_k;
        out[2] = &t.d_v;
        for (int k = 0; k < 3; k++) {
            p[k] = place(&r, count, dim);
            if (k && !h_one_in(&r, 3)) memcpy(p[k].step, p[0].step, sizeof p[k].step);
            out[k]->data = memory + p[k].at;
            out[k]->batch_stride = p[k].step[0] * 4;
            out[k]->token_stride = p[k].step[1] * 4;
            out[k]->head_stride = p[k].step[2] * 4;
            overlap |= mark(map, &p[k], count, dim);
            for (int j = 0; j < 3; j++) alike &= count[j] == 1 || p[k].step[j] == p[0].step[j];
        }
        s = ra_attention_backward(&d, &t, work, sizeof work, 0, 1);
        h_context("overlap %d alike %d: %s %s", overlap, alike, e.field, e.text);
        CHECK(s == RA_OK || (s == RA_E_SHAPE && strstr(e.text, "overlaps")));
        if (s) CHECK(overlap);
        else if (alike) CHECK(!overlap);
        met += overlap;
        noticed += s != RA_OK;
    }
    CHECK(noticed > 0 && noticed < i);
    printf("%lld of %lld overlaps noticed\n", (long long)noticed, (long long)met);
}

TEST(refusals) {
    float other[4] = { 0, 0, 0, 0 };
    sane_make();
    if (!CHECK(ra_attention_backward_bytes(&sane.d, 1) < sizeof room - 64)) return;
    REFUSED(RA_OK, "");
    sane.d.train = 0;      REFUSED(RA_E_SHAPE, "train");
    sane.d.train = 2;                  REFUSED(RA_E_RANGE, "train");
    sane.d.grad_dtype = 4;          REFUSED(RA_E_ENUM, "grad_dtype");
    sane.d.dropout = 1.0f;          REFUSED(RA_E_RANGE, "dropout");
    sane.d.dropout = -0.1f;         REFUSED(RA_E_RANGE, "dropout");
    sane.d.dropout = (float)NAN;    REFUSED(RA_E_RANGE, "dropout");
    sane.t.lse.data = NULL;         REFUSED(RA_E_NULL, "t.lse");
    sane.t.o.data = NULL;           REFUSED(RA_E_NULL, "t.o");
    sane.t.d_o.data = NULL;         REFUSED(RA_E_NULL, "t.d_o");
    sane.t.o.token_stride = INT64_MAX - 3; REFUSED(RA_E_OVERFLOW, "t.o.token_stride");
    sane.t.lse.batch_stride = INT64_MAX - 3; REFUSED(RA_E_OVERFLOW, "t.lse.batch_stride");
    sane.t.d_o.token_stride = 4;    REFUSED(RA_E_STRIDE, "t.d_o.token_stride");
    sane.t.d_q.token_stride = 4;    REFUSED(RA_E_STRIDE, "t.d_q");
    sane.t.d_k.data = sane.x;       REFUSED(RA_E_SHAPE, "t.d_k");
    sane.t.d_q.data = sane.g[0];    REFUSED(RA_E_SHAPE, "t.d_q");
    sane.t.d_v.data = sane.g[2];    REFUSED(RA_E_SHAPE, "t.d_v");
    sane.t.d_v.data = (char *)sane.g[3] + 2; REFUSED(RA_E_ALIGN, "t.d_v");
    sane.t.d_sinks = other;         REFUSED(RA_E_SHAPE, "t.d_sinks");
    sane.t.d_bias.data = other;     REFUSED(RA_E_SHAPE, "t.d_bias");
    sane.t.d_q.data = sane.t.d_k.data = sane.t.d_v.data = NULL; REFUSED(RA_E_NULL, "t.d_q");
    sane.d.v_in_k = 1; sane.t.v.data = NULL; REFUSED(RA_E_SHAPE, "t.d_v");
    sane.d.scores = RA_SCORE_BIAS; sane.t.bias.data = other; sane.t.bias.keys = 1;
    sane.t.d_bias.data = sane.x + 32; REFUSED(RA_E_RANGE, "t.d_bias.keys");
    sane.d.scores = RA_SCORE_BIAS; sane.t.bias.data = other; sane.t.bias.keys = 1;
    sane.t.d_bias.data = sane.x + 32; sane.t.d_bias.keys = 2; sane.t.d_bias.key_step = 2;
    REFUSED(RA_E_STRIDE, "t.d_bias.key_step");
    sane.d.scores = RA_SCORE_BIAS; sane.t.bias.data = other; sane.t.bias.keys = 1;
    sane.t.d_bias.data = sane.x + 32; sane.t.d_bias.keys = 2; sane.t.d_bias.key_step = 4;
    REFUSED(RA_E_SHAPE, "t.d_bias.head_step");
    sane.d.scores = RA_SCORE_BIAS; sane.t.bias.data = other; sane.t.bias.keys = 1;
    sane.t.d_bias.data = sane.x + 32; sane.t.d_bias.keys = 2; sane.t.d_bias.head_step = 4;
    REFUSED(RA_E_SHAPE, "t.d_bias.key_step");
    sane.d.scores = RA_SCORE_BIAS; sane.t.bias.data = other; sane.t.bias.keys = 1;
    sane.t.d_bias.data = sane.x + 32; sane.t.d_bias.keys = 2; sane.t.d_bias.key_step = 4;
    sane.t.d_bias.head_step = 8; sane.d.sequences = 2;
    REFUSED(RA_E_SHAPE, "t.d_bias.batch_step");
    sane.d.scores = RA_SCORE_BIAS; sane.t.bias.data = other; sane.t.bias.keys = 1;
    sane.t.d_bias.data = sane.x + 32; sane.t.d_bias.keys = 2; sane.t.d_bias.key_step = 4;
    sane.t.d_bias.head_step = 4;  /* the heads' elements overlap */
    REFUSED(RA_E_STRIDE, "t.d_bias");
    sane.d.scores = RA_SCORE_BIAS; sane.t.bias.data = other; sane.t.bias.keys = 1;
    sane.t.d_bias.data = (float *)(void *)((uint8_t *)(sane.x + 32) + 2);
    sane.t.d_bias.keys = 2; sane.t.d_bias.key_step = 4; sane.t.d_bias.head_step = 8;
    REFUSED(RA_E_ALIGN, "t.d_bias");
    sane.d.scores = RA_SCORE_BIAS; sane.t.bias.data = other; sane.t.bias.keys = 1;
    sane.t.d_bias.data = sane.x + 32; sane.t.d_bias.keys = INT64_MAX;
    sane.t.d_bias.key_step = 4; sane.t.d_bias.head_step = 16;
    REFUSED(RA_E_STRIDE, "t.d_bias");
    sane.d.scores = RA_SCORE_BIAS; sane.t.bias.data = other; sane.t.bias.keys = INT64_MAX;
    sane.t.d_bias.data = sane.x + 32; sane.t.d_bias.keys = INT64_MAX;
    sane.t.d_bias.head_step = INT64_MAX - 3; sane.t.d_bias.key_step = INT64_MAX / 8 * 4;
    REFUSED(RA_E_OVERFLOW, "t.d_bias.head_step");
    sane.d.scores = RA_SCORE_BIAS; sane.t.bias.data = other; sane.t.bias.keys = INT64_MAX;
    sane.t.d_bias.data = sane.x + 32; sane.t.d_bias.keys = 1;
    sane.t.d_bias.head_step = INT64_MAX / 4 * 4; sane.t.d_bias.key_step = 4;
    REFUSED(RA_E_OVERFLOW, "t.d_bias.head_step");
    sane.d.scores = RA_SCORE_BIAS; sane.t.bias.data = other; sane.t.bias.keys = INT64_MAX;
    sane.t.d_bias.data = sane.x + 32; sane.t.d_bias.keys = INT64_MAX;
    sane.t.d_bias.head_step = 4; sane.t.d_bias.key_step = 8;
    REFUSED(RA_OK, "");             /* keys inside, heads within a key */
}

TEST(refusals_beside_the_tensors) {
    ra_grads g = { 0 };
    uint8_t *work = (uint8_t *)room + (64 - (uintptr_t)room % 64) % 64;
    size_t bytes;
    sane_make();
    bytes = ra_attention_backward_bytes(&sane.d, 1);
    CHECK_EQ(ra_attention_backward(NULL, &sane.t, work, bytes, 0, 1), RA_E_NULL);
    CHECK_EQ(ra_attention_backward(&sane.d, NULL, work, bytes, 0, 1), RA_E_NULL);
    CHECK_EQ(ra_attention_backward(&sane.d, &sane.t, NULL, bytes, 0, 1), RA_E_NULL);
    CHECK_EQ(ra_attention_backward(&sane.d, &sane.t, work + 1, bytes - 2, 0, 1), RA_E_WORKSPACE);
    CHECK_EQ(ra_attention_backward(&sane.d, &sane.t, work, bytes - 65, 0, 1), RA_E_WORKSPACE);
    CHECK_EQ(ra_attention_backward(&sane.d, &sane.t, work, bytes, 1, 1), RA_E_RANGE);
    CHECK_EQ(ra_attention_backward(&sane.d, &sane.t, work, bytes, 0, 0), RA_E_RANGE);
    CHECK_EQ(ra_fold_backward(NULL, &sane.t, sane.x, &g, work, bytes), RA_E_NULL);
    CHECK_EQ(ra_fold_backward(&sane.d, NULL, sane.x, &g, work, bytes), RA_E_NULL);
    CHECK_EQ(ra_fold_backward(&sane.d, &sane.t, NULL, &g, work, bytes), RA_E_NULL);
    CHECK_EQ(ra_fold_backward(&sane.d, &sane.t, sane.x, NULL, work, bytes), RA_E_NULL);
    CHECK_EQ(ra_fold_backward(&sane.d, &sane.t, sane.x, &g, NULL, bytes), RA_E_NULL);
    CHECK_EQ(ra_fold_backward(&sane.d, &sane.t, sane.x, &g, work, bytes), RA_OK);
    CHECK_EQ(ra_delta(NULL, &sane.t, sane.x), RA_E_NULL);
    CHECK_EQ(ra_delta(&sane.d, NULL, sane.x), RA_E_NULL);
    CHECK_EQ(ra_delta(&sane.d, &sane.t, NULL), RA_E_NULL);
    sane.d.v_in_k = 1;
    sane.t.v.data = NULL;
    sane.t.d_v.data = NULL;
    g.d_v = sane.x + 32;
    CHECK_EQ(ra_fold_backward(&sane.d, &sane.t, sane.x, &g, work, bytes), RA_E_SHAPE);
    sane_make();
    sane.d.train = 0;
    CHECK_EQ(ra_attention_backward_bytes(&sane.d, 1), 0);
    sane.d.dropout = 0.5f;
    CHECK_EQ(ra_attention(&sane.d, &sane.t, NULL, 0, 0, 1), RA_E_SHAPE);
    sane.d.dropout = 0;
    sane.d.grad_dtype = RA_F16;
    CHECK_EQ(ra_attention(&sane.d, &sane.t, NULL, 0, 0, 1), RA_E_SHAPE);
}

static const h_test tests[] = {
    ENTRY(masks_and_layouts), ENTRY(everything_at_random), ENTRY(shapes_on_every_instruction_set),
    ENTRY(long_sequence), ENTRY(huge_bias), ENTRY(factors_show_no_hidden_key),
    ENTRY(oracle_against_finite_differences),
    ENTRY(threads_do_not_change_bits), ENTRY(gradients_one_by_one),
    ENTRY(nan_stays_where_it_is_seen), ENTRY(unseen_is_zero),
    ENTRY(dropout_keeps_what_it_promises), ENTRY(gradient_of_the_merge), ENTRY(blocks_of_keys),
    ENTRY(gradients_must_not_overlap), ENTRY(refusals), ENTRY(refusals_beside_the_tensors),
};

int main(int argc, char **argv) {
    return h_main(argc, argv, tests, sizeof tests / sizeof tests[0]);
}
