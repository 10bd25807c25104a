/* Gradients on one rank against double precision: the oracle's formulas, those against finite
 * differences, every mask, layout, dtype and score change, threads, dropout, hostile numbers. */
#include "harness.h"
#define RINGATTN_IMPLEMENTATION
#include "ringattn.h"
#include "oracle.h"
#include "world.h"

/* One call's gradients, with something in them before. */
typedef struct grads {
    int32_t dtype, bias_row, bias_key; /* 1: the gradient of the bias is kept by row, by key */
    view d_o, q, k, v;
    float sinks[64], *bias;
    int64_t bias_keys, bias_n;
} grads;

static double largest_plain;           /* error on unit-normal f32 problems, of any gradient */

static float before(int64_t i) { return (float)(i % 7 - 3) * 0.25f; }

static void problem_cotangent(problem *p, h_rng *r)
{
    p->d_o = normal_rows(p->B * p->q_max, p->Hq * p->Dv, p->o_dtype, r);
    p->seed = (uint64_t)h_next(r) << 32 | h_next(r);
}

/* Every row of a gradient holds `before` of its element. */
static void grad_view(view *v, const seat *e, int kind)
{
    float row[64 * 192 + 1];
    int64_t t, i, n = v->heads * v->dim;
    int b;
    view_make(v, kind, e->world->p->B, 1, GUARD);
    for (b = 0; b < e->world->p->B; b++) for (t = 0; t < v->rows; t++) {
        for (i = 0; i < n; i++) row[i] = before(i);
        view_put(v, b, t, row);
    }
}

static void grads_open(grads *g, seat *e)
{
    const problem *p = e->world->p;
    const setup *s = e->world->s;
    ra_bias_out *bias = &e->t.d_bias;
    int64_t i;
    g->d_o = view_of(p->o_dtype, e->q_rows, p->Hq, p->Dv);
    g->q = view_of(g->dtype ? g->dtype : RA_F32, e->q_rows, p->Hq, p->Dk);
    g->k = view_of(g->dtype ? g->dtype : RA_F32, e->k_rows, p->Hkv, p->Dk);
    g->v = view_of(g->dtype ? g->dtype : RA_F32, e->k_rows, p->Hkv, p->Dv);
    view_make(&g->d_o, stride_kind(s, 5), p->B, 0, 0xFF);
    view_fill(&g->d_o, e, p->d_o, 0);
    grad_view(&g->q, e, stride_kind(s, 6));
    grad_view(&g->k, e, stride_kind(s, 7));
    grad_view(&g->v, e, stride_kind(s, 8));
    e->t.d_o = view_in(&g->d_o);
    e->t.d_q = view_out(&g->q);
    e->t.d_k = view_out(&g->k);
    if (!p->v_in_k) e->t.d_v = view_out(&g->v);
    for (i = 0; i < 64; i++) g->sinks[i] = before(i);
    if (p->scores & RA_SCORE_SINKS) e->t.d_sinks = g->sinks;
    g->bias = NULL;
    if (!(p->scores & RA_SCORE_BIAS)) return;
    g->bias_keys = bias->keys = p->bias_keys;
    bias->key_stride = g->bias_key ? 4 : 0;
    bias->row_stride = !g->bias_row ? 0 : g->bias_key ? 4 * p->bias_keys : 4;
    bias->head_stride = 4 * (g->bias_key ? p->bias_keys : 1) * (g->bias_row ? e->q_rows : 1);
    bias->batch_stride = p->Hq * bias->head_stride;
    g->bias_n = p->B * bias->batch_stride / 4;
    g->bias = bias->data = (float *)malloc((size_t)g->bias_n * 4 + 4);
    for (i = 0; i < g->bias_n; i++) g->bias[i] = before(i);
}

static void grads_close(grads *g)
{
    view_free(&g->d_o); view_free(&g->q); view_free(&g->k); view_free(&g->v);
    free(g->bias);
}

/* Forward, then backward with the threads one after the other over rubbish. */
static ra_status seat_gradients(seat *e, grads *g, int nth)
{
    ra_status status = seat_attention(e);
    size_t bytes = ra_attention_backward_bytes(&e->d, nth);
    uint8_t *mem = (uint8_t *)malloc(bytes + 64), *work = mem + (64 - (uintptr_t)mem % 64) % 64;
    int i;
    if (!bytes) status = e->error.status;
    if (status == RA_OK) grads_open(g, e);
    memset(mem, 0xA5, bytes + 64);
    for (i = nth - 1; i >= 0 && status == RA_OK; i--) {
        status = ra_attention_backward(&e->d, &e->t, work, bytes, i, nth);
    }
    free(mem);
    return status;
}

/* -------------------------------------------------------------------------- comparing */
/* Worst |got - want| over the bar, over all elements of a gradient by position. */
static double judge_view(const view *v, const seat *e, const double *real, const double *bar,
                         int keys)
{
    const problem *p = e->world->p;
    const int32_t *pos = keys ? e->k_pos : e->q_pos;
    int64_t n = v->heads * v->dim, most = keys ? p->k_max : p->q_max, t, i, plain = !p->loose;
    float *row = (float *)malloc((size_t)n * sizeof *row);
    double worst = 0;
    int b, written = v->dtype != RA_F32;
    for (b = 0; b < p->B; b++) for (t = 0; t < (keys ? e->k_len : e->q_len)[b]; t++) {
        int64_t at = pos[b * v->rows + t];
        view_take(v, b, t, row);
        for (i = 0; i < n; i++) {
            double add = written ? 0 : (double)before(i), x = 0, tol = 3e-7 + 1.2e-7 * fabs(add);
            if (at >= 0) {
                int64_t from = (b * most + at - (keys ? 0 : p->q_offset)) * n + i;
                x = real[from];
                tol += bar[from] + 1.2e-7 * fabs(x);
            }
            if (written) tol += 0.51 * dtype_ulp(x, v->dtype);
            x = fabs((double)row[i] - add - x);
            if (!(x / tol <= worst)) worst = x / tol;
            if (plain && !written && p->q_dtype == RA_F32 && x > largest_plain) largest_plain = x;
        }
    }
    for (b = 0; b < p->B; b++) for (t = (keys ? e->k_len : e->q_len)[b]; t < v->rows; t++) {
        view_take(v, b, t, row);       /* rows of no sequence stay as they were */
        for (i = 0; i < n; i++) if (row[i] != before(i)) worst = HUGE_VAL;
    }
    free(row);
    if (worst > 1) printf("    %.3g times the bar\n", worst);
    return v->rows && view_guard(v) ? HUGE_VAL : worst; /* bytes beside a gradient were written */
}

static double judge_bias(const grads *g, const seat *e, const slopes *real)
{
    const problem *p = e->world->p;
    const ra_bias_out *bias = &e->t.d_bias;
    double *x = (double *)calloc(2 * (size_t)g->bias_n + 2, sizeof *x), worst = 0;
    double *bar = x + g->bias_n;
    int64_t t, k, i;
    int b, head;
    for (b = 0; b < p->B; b++) for (head = 0; head < p->Hq; head++) {
        for (t = 0; t < e->q_len[b]; t++) for (k = 0; k < p->k_max && k < p->bias_keys; k++) {
            int64_t pos = e->q_pos[b * e->q_rows + t], pair;
            if (pos < 0) continue;
            pair = ((b * p->Hq + head) * p->q_max + pos - p->q_offset) * p->k_max + k;
            i = (b * bias->batch_stride + head * bias->head_stride + t * bias->row_stride +
                 k * bias->key_stride) / 4;
            x[i] += real->bias[pair];
            bar[i] += real->bias_bar[pair];
        }
    }
    for (i = 0; i < g->bias_n; i++) {
        double far = fabs((double)g->bias[i] - (double)before(i) - x[i]);
        far /= bar[i] + 3e-7 * (1 + fabs(x[i]));
        if (!(far <= worst)) worst = far;
    }
    free(x);
    return worst;
}

static double judge_sinks(const grads *g, const problem *p, const slopes *real)
{
    double worst = 0;
    int h;
    for (h = 0; h < 64; h++) {
        double x = h < p->Hq && (p->scores & RA_SCORE_SINKS) ? real->sinks[h] : 0, far;
        far = fabs((double)g->sinks[h] - (double)before(h) - x);
        far /= (h < p->Hq ? real->sinks_bar[h] : 0) + 3e-7 * (1 + fabs(x));
        if (!(far <= worst)) worst = far;
    }
    return worst;
}

static int quick_isa(int32_t isa) { return ra_isa_available(isa) && isa != RA_ISA_AUTO; }

/* One problem through the library and through the oracle. */
static void compare(const problem *p, const setup *s, int32_t dtype, int bias_kind)
{
    static world w;
    seat *e = &w.seats[0];
    grads g;
    slopes real;
    memset(&g, 0, sizeof g);
    describe_case(p, s);
    g.dtype = dtype;
    g.bias_row = bias_kind != 1;
    g.bias_key = bias_kind != 2;
    if (!CHECK_EQ(world_open(&w, p, s), RA_OK)) return;
    if (positions_with_call(s) && e->d.kv_tokens == 0) { /* 0 would mean as many as queries */
        seat_free(e);
        return;
    }
    e->d.op = RA_OP_TRAIN;
    e->d.grad_dtype = dtype;
    e->d.dropout = p->dropout;
    e->t.seed = p->seed;
    if (!CHECK_EQ(seat_gradients(e, &g, s->threads), RA_OK)) {
        printf("    %s: %s\n", e->error.field, e->error.text);
        return;
    }
    real = oracle_slopes(p, g.bias != NULL);
    CHECK(judge_view(&g.q, e, real.q, real.q_bar, 0) <= 1);
    CHECK(judge_view(&g.k, e, real.k, real.k_bar, 1) <= 1);
    if (!p->v_in_k) CHECK(judge_view(&g.v, e, real.v, real.v_bar, 1) <= 1);
    if (g.bias) CHECK(judge_bias(&g, e, &real) <= 1);
    CHECK(judge_sinks(&g, p, &real) <= 1);
    CHECK_EQ(seat_hash(e), e->hash);
    slopes_free(&real);
    grads_close(&g);
    seat_free(e);
}

/* -------------------------------------------------------------------------- at random */
static void random_case(int64_t i, const want *w, int32_t dtypes)
{
    static const float rates[4] = { 0, 0, 0.1f, 0.5f };
    h_rng r = h_case_rng(i);
    problem p;
    setup s;
    if (!h_case(i)) return;
    random_problem(&p, &r, w);
    random_setup(&s, &p, &r, w);
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

TEST(masks_and_layouts)
{
    static const int layouts[4] = { L_CONTIGUOUS, L_ZIGZAG, L_RUNS, L_ARRAY };
    want w = { 0, 0, 1, -1, 2e6 };
    int64_t i, n = h_run.large ? 40 : 2;
    for (i = 0; i < n * MASKS * 4; i++) {
        w.mask = (int)(i % MASKS);
        w.layout = layouts[i / MASKS % 4];
        w.options = i < MASKS * 4 ? 0 : -1;
        random_case(i, &w, i < MASKS * 4 ? 0 : -1);
    }
    printf("largest error on unit-normal f32 data: %.3g\n", largest_plain);
}

static const h_test tests[] = {
    ENTRY(masks_and_layouts),
};

int main(int argc, char **argv)
{
    (void)quick_isa;
    return h_main(argc, argv, tests, sizeof tests / sizeof tests[0]);
}
