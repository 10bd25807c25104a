/* ra_step and ra_infer_step. Proves that one step is a bounded amount of work for any length of
 * sequence, counted in tiles and in loaded panels, or by what the kernels of a cache do; that the
 * next step of any thread continues an unfinished one, and no bit of the outputs depends on that;
 * and that the merges of those steps are right. */
#include "hooks.h"
#include <math.h>

enum { STEP_WORK = 1 << 26, PANELS = 16 };     /* as ra_step says; most panels of a task */

/* A ring of one, its tensors and what its callbacks saw. */
typedef struct rig {
    ra_desc d;
    ra_tensors t;
    ra_plan *plan;
    ra_ring *ring;
    int64_t most;                      /* tiles of one step */
    int64_t events, event_most, tiles, calls, cancel_at, clock;
    float *memory;
} rig;

static void watch(void *ctx, const ra_event *e) {
    rig *g = (rig *)ctx;
    if (e->kind != RA_EV_TILE) return;
    g->events++;
    g->tiles += e->tiles;
    if (e->tiles > g->event_most) g->event_most = e->tiles;
}

static void count_calls(void *ctx, int64_t done, int64_t all) {
    rig *g = (rig *)ctx;
    (void)done;
    (void)all;
    if (++g->calls == g->cancel_at) ra_ring_cancel(g->ring);
}

/* A clock that advances by 1 with every step that computes. */
static int64_t calls_clock(void *ctx) { return ((rig *)ctx)->calls + 1; }

/* Fills in random tensors, the plan and the ring of a rig that has its descriptor. */
static void rig_open(rig *g, int own_clock) {
    const ra_desc *d = &g->d;
    int64_t q = d->tokens * d->q_heads, k = d->tokens * d->kv_heads, n = 0;
    int64_t dims = d->train ? 3 * d->k_dim + 2 * d->v_dim : d->k_dim + d->v_dim;
    h_rng r = h_case_rng(d->tokens);
    ra_ring_desc rd = { 0 };
    float *at;
    int64_t size[9];
    size[0] = size[5] = q * d->k_dim;
    size[1] = size[6] = k * d->k_dim;
    size[2] = size[7] = k * d->v_dim;
    size[3] = size[4] = q * d->v_dim;
    size[8] = q;
    for (int64_t i = 0; i < 9; i++) n += size[i];
    at = g->memory = (float *)malloc((size_t)n * sizeof *at);
    for (int64_t i = 0; i < n; i++) at[i] = (float)h_range(&r, -1000, 1000) * 1e-3f;
    g->t.q.data = at; at += size[0];
    g->t.k.data = at; at += size[1];
    g->t.v.data = at; at += size[2];
    g->t.o.data = at; at += size[3];
    g->t.d_o.data = at; at += size[4];
    g->t.d_q.data = at; at += size[5];
    g->t.d_k.data = at; at += size[6];
    g->t.d_v.data = at; at += size[7];
    g->t.lse.data = at;
    for (int64_t i = 0; i < q; i++) at[i] = 5.0f + (float)(i % 7);
    g->most = STEP_WORK / (64 * 64 * dims) + PANELS;
    rd.trace = watch;
    rd.progress = count_calls;
    rd.trace_ctx = rd.progress_ctx = rd.clock_ctx = g;
    if (own_clock) rd.clock_ns = calls_clock;
    CHECK_EQ(ra_plan_create(&g->plan, d, NULL), RA_OK);
    CHECK_EQ(ra_ring_create(&g->ring, g->plan, NULL, &rd), RA_OK);
}

static void rig_close(rig *g) {
    ra_ring_destroy(g->ring);
    ra_plan_destroy(g->plan);
    free(g->memory);
}

static void rig_desc(rig *g, int64_t tokens, int heads, int dim, int train) {
    memset(g, 0, sizeof *g);
    g->d = ra_desc_make(heads, (heads + 1) / 2, dim, RA_F32, RA_MASK_CAUSAL);
    g->d.tokens = tokens;
    g->d.train = train;
}

static ra_job rig_job(const rig *g) {
    ra_job job = { 0 };
    job.plan = g->plan;
    job.tensors = &g->t;
    job.pass = g->d.train ? RA_PASS_BACKWARD : RA_PASS_FORWARD;
    return job;
}

static int64_t tiles_done(const rig *g) {
    ra_ring_counters c;
    ra_ring_query(g->ring, &c);
    return c.tiles_partial + c.tiles_full;
}

/* Steps of one thread to the end of a pass. No step computes more tiles than `most`. */
static int64_t walk(rig *g) {
    int64_t steps = 0, before = 0;
    ra_job job = rig_job(g);
    ra_status s = ra_begin(g->ring, &job);
    CHECK_EQ(s, RA_OK);
    if (s) return 0;
    do {
        int64_t now;
        s = ra_step(g->ring, 0);
        now = tiles_done(g);
        if (now - before > g->most) CHECK_EQ(now - before, g->most);
        before = now;
        steps++;
    } while (s > 0);
    CHECK_EQ(s, RA_OK);
    return steps;
}

enum { PATHS = 4 };
static const struct path { const char *name; int32_t back, layout; } paths[PATHS] = {
    { "forward, contiguous", 0, RA_LAYOUT_CONTIGUOUS },
    { "forward, zigzag", 0, RA_LAYOUT_ZIGZAG },
    { "backward, contiguous", 1, RA_LAYOUT_CONTIGUOUS },
    { "backward, zigzag", 1, RA_LAYOUT_ZIGZAG },
};

static int path_case(int64_t i, const struct path *p) {
    if (!h_case(i)) return 0;
    h_context("%s", p->name);
    return 1;
}

/* Long chunks, both passes: the work of one task and chunk is spread over several steps, each with
 * its trace and progress. */
TEST(steps_are_bounded) {
    for (int64_t i = 0; i < 2 * PATHS; i++) {
        const int back = paths[i / 2].back, threads = i % 2 ? 3 : 1;
        rig g;
        ra_ring_counters c;
        if (!path_case(i, &paths[i / 2])) continue;
        rig_desc(&g, H_SLOW ? 1500 : 3000, 2, 64, back);
        g.d.layout.kind = paths[i / 2].layout;
        g.d.threads = threads;
        g.d.chunk_tokens = 4096;
        rig_open(&g, 0);
        CHECK(walk(&g) >= tiles_done(&g) / g.most);
        ra_ring_query(g.ring, &c);
        CHECK_EQ(tiles_done(&g), c.tiles_all);
        CHECK_EQ(g.tiles, c.tiles_all);
        CHECK(g.event_most <= g.most);
        CHECK(g.calls >= c.tiles_all / g.most);
        rig_close(&g);
    }
}

/* Work without tiles is bounded too: clearing sums, returning them, the sums of sinks. */
TEST(rows_are_bounded) {
    rig g;
    float d_sinks[2] = { 0, 0 }, sinks[2] = { 0, 0 };
    int32_t *none = (int32_t *)calloc(1 << 15, sizeof *none);
    rig_desc(&g, 1 << 15, 2, 64, 1);
    g.d.mask.kind = RA_MASK_INTERVALS;
    g.d.mask.lo = g.d.mask.hi = none;
    g.d.mask.interval_count = 1 << 15;
    g.d.chunk_tokens = 1 << 15;
    g.d.scores = RA_SCORE_SINKS;
    g.t.sinks = sinks;
    g.t.d_sinks = d_sinks;
    rig_open(&g, 0);
    CHECK(walk(&g) >= (1 << 15) / 64 * 2 / g.most);
    CHECK_EQ(tiles_done(&g), 0);
    rig_close(&g);
    free(none);
}

/* 64K rows in one chunk: a call that is cancelled or late after some steps computes no more. */
TEST(cancel_and_deadline) {
    for (int64_t i = 0; i < PATHS; i++) {
        const int back = paths[i].back, late = (int)(i % 2);
        rig g;
        ra_status s;
        if (!path_case(i, &paths[i])) continue;
        rig_desc(&g, 65536, 1, 16, back);
        g.d.chunk_tokens = 65536;
        rig_open(&g, late);
        if (!late) g.cancel_at = 3;
        s = back ? ra_backward(g.plan, g.ring, &g.t, late ? 4 : RA_NO_DEADLINE)
                : ra_forward(g.plan, g.ring, &g.t, late ? 4 : RA_NO_DEADLINE);
        CHECK_EQ(s, late ? RA_E_TIMEOUT : RA_E_CANCELLED);
        CHECK_EQ(g.calls, late ? 4 : 3);
        CHECK(g.tiles <= 4 * g.most);
        rig_close(&g);
    }
}

/* A thread leaves in the middle of a task and never comes back: another one finishes it, with the
 * same bits. */
TEST(another_thread_continues) {
    for (int64_t i = 0; i < PATHS; i++) {
        const int back = paths[i].back;
        rig a, b;
        ra_job job;
        ra_status s;
        int64_t n;
        if (!path_case(i, &paths[i])) continue;
        rig_desc(&a, 1500, 3, 64, back);
        a.d.q_heads = a.d.kv_heads = 2;
        a.d.threads = 3;
        a.d.layout.kind = paths[i].layout;
        b = a;
        rig_open(&a, 0);
        rig_open(&b, 0);
        (void)walk(&a);
        job = rig_job(&b);
        CHECK_EQ(ra_begin(b.ring, &job), RA_OK);
        for (n = 0; n < 4; n++) CHECK_EQ(ra_step(b.ring, (int)(n % 2)), RA_AGAIN);
        for (n = 0; (s = ra_step(b.ring, 2)) > 0 && n < 10000;) n++;
        CHECK_EQ(s, RA_OK);
        n = b.d.tokens * b.d.q_heads * b.d.k_dim * 4;
        CHECK_BITS(b.t.o.data, a.t.o.data, n);
        CHECK_BITS(b.t.d_q.data, a.t.d_q.data, n);
        CHECK_BITS(b.t.d_k.data, a.t.d_k.data, n);
        CHECK_BITS(b.t.d_v.data, a.t.d_v.data, n);
        rig_close(&a);
        rig_close(&b);
    }
}

/* -------------------------------------------------------------------------- rows that are read */
/* A window over many chunks: every row of queries and of O is loaded for the chunks that it sees
 * and for no other. */
TEST(unseen_chunks_cost_no_rows) {
    for (int64_t i = 0; i < 6; i++) {
        const int zigzag = i >= 3;
        rig g;
        ra_job job;
        ra_status s;
        int64_t panels, loads = 0;
        if (!h_case(i)) continue;
        rig_desc(&g, 8192, 1 + (int)i % 3, 16, 0);
        g.d.mask.window = 200;
        g.d.chunk_tokens = 256;
        g.d.layout.kind = zigzag ? RA_LAYOUT_ZIGZAG : RA_LAYOUT_CONTIGUOUS;
        g.d.kv_heads = 1;
        rig_open(&g, 0);
        job = rig_job(&g);
        CHECK_EQ(ra_begin(g.ring, &job), RA_OK);
        hook_loads(g.ring, &loads);
        while ((s = ra_step(g.ring, 0)) > 0) continue;
        CHECK_EQ(s, RA_OK);
        panels = g.d.tokens / 64 * g.d.q_heads;
        CHECK_EQ(loads, panels);
        rig_close(&g);
    }
}

/* -------------------------------------------------------------------------- a sharded cache */
/* A cache of one rank, and its tensors. */
typedef struct shelf {
    ra_desc d;
    ra_cache_desc cd;
    ra_cache *c;
    ra_tensors t;
    int64_t cached, fresh, outputs, work;
    float *memory;
} shelf;

static void shelf_open(shelf *x) {
    int64_t q = x->fresh * x->d.q_heads * x->d.k_dim, rows, k, n;
    h_rng r = h_case_rng(x->fresh);
    float *at;
    CHECK_EQ(ra_cache_create(&x->c, &x->d, NULL, &x->cd), RA_OK);
    rows = ra_cache_rows(x->c);
    k = rows * x->d.kv_heads * x->d.k_dim;
    x->outputs = x->fresh * x->d.q_heads * (x->d.v_dim + 1);
    n = q + 2 * k + x->outputs;
    at = x->memory = (float *)malloc((size_t)n * sizeof *at);
    for (int64_t i = 0; i < n; i++) at[i] = (float)h_range(&r, -1000, 1000) * 1e-3f;
    x->t.q.data = at;
    x->t.k.data = at + q;
    x->t.v.data = at + q + k;
    x->t.o.data = at + q + 2 * k;
    x->t.lse.data = at + q + 2 * k + x->fresh * x->d.q_heads * x->d.v_dim;
}

static void shelf_close(shelf *x) {
    ra_cache_destroy(x->c);
    free(x->memory);
}

/* Shape i of a cache and a call: prefill by tiles, few tokens whose heads share panels, decoding
 * with more heads than a step can take, and prefill in the form of decoding; with lanes. */
static shelf shelf_of(int64_t i) {
    static const int64_t fresh[4] = { 300, 20, 16, 60 }, cached[4] = { 5700, 9000, 1484, 4000 };
    static const int32_t q_heads[4] = { 4, 8, 64, 8 }, kv_heads[4] = { 2, 1, 64, 2 };
    static const int32_t lanes[4] = { 1, 3, 1, 5 };
    shelf x = { 0 };
    x.d = ra_desc_make(q_heads[i % 4], kv_heads[i % 4], 64, RA_F32, RA_MASK_CAUSAL);
    x.fresh = x.d.tokens = fresh[i % 4];
    x.cached = cached[i % 4];
    x.d.kv_tokens = x.cached + x.fresh;
    x.d.threads = i % 8 < 4 ? 1 : 3;
    x.cd.lanes = i < 8 ? lanes[i % 4] : 8;
    if (i % 4 == 3) x.d.form = RA_FORM_SAME;
    if (i == 11) x.d.mask.window = 500;
    if (i == 11) x.d.mask.keep = 4;
    return x;
}

/* No step of a call on a cache does more than ra_step would. Threads that leave what they have
 * begun change no bit. */
TEST(cache_steps_are_bounded) {
    for (int64_t i = 0; i < 12; i++) {
        shelf a, b;
        int64_t steps = 0, before = 0, block;
        ra_status s;
        if (!h_case(i)) continue;
        a = shelf_of(i);
        b = a;
        a.d.threads = 1;
        shelf_open(&a);
        shelf_open(&b);
        block = PANELS * 64 * 64 * ((int64_t)a.d.k_dim + a.d.v_dim);
        hook_cache_work(a.c, &a.work);
        CHECK_EQ(ra_infer_begin(a.c, &a.t, &a.cached, &a.fresh, 0), RA_OK);
        while ((s = ra_infer_step(a.c, 0)) > 0) {
            if (a.work - before > STEP_WORK + block) CHECK_EQ(a.work - before, STEP_WORK + block);
            before = a.work;
            steps++;
        }
        CHECK_EQ(s, RA_OK);
        CHECK(a.work > 2 * STEP_WORK || i == 11);
        CHECK(steps > a.work / (STEP_WORK + block));
        CHECK_EQ(ra_infer_begin(b.c, &b.t, &b.cached, &b.fresh, 0), RA_OK);
        for (int k = 0; k < 3; k++) CHECK(ra_infer_step(b.c, k % b.d.threads) > 0);
        while ((s = ra_infer_step(b.c, b.d.threads - 1)) > 0) continue;
        CHECK_EQ(s, RA_OK);
        CHECK_BITS(b.t.o.data, a.t.o.data, a.outputs * 4);
        shelf_close(&a);
        shelf_close(&b);
    }
}

/* Lanes without keys are cleared and merged, which is work too. */
TEST(cache_empty_lanes_are_work) {
    enum { LANES = 1024, TOKENS = 64, HEADS = 32, DIM = 64 };
    const int64_t work = (2 * LANES - 1) * (int64_t)TOKENS * HEADS * (DIM + 1);
    int64_t steps = 0;
    ra_status s;
    shelf x = { 0 };
    x.d = ra_desc_make(HEADS, 1, DIM, RA_F32, RA_MASK_CAUSAL);
    x.fresh = x.d.tokens = x.d.kv_tokens = TOKENS;
    x.cd.lanes = LANES;
    shelf_open(&x);
    CHECK_EQ(ra_infer_begin(x.c, &x.t, &x.cached, &x.fresh, 0), RA_OK);
    while ((s = ra_infer_step(x.c, 0)) > 0) steps++;
    CHECK_EQ(s, RA_OK);
    CHECK(steps >= work / STEP_WORK);
    shelf_close(&x);
}

/* Cancellation and a deadline end a call after the step in progress, in the middle of an item. */
TEST(cache_cancel_and_deadline) {
    for (int64_t i = 0; i < 8; i++) {
        shelf x;
        int64_t until, work;
        if (!h_case(i)) continue;
        x = shelf_of(i % 4);
        shelf_open(&x);
        hook_cache_work(x.c, &x.work);
        until = ra_now_ns() + 100000000;
        CHECK_EQ(ra_infer_begin(x.c, &x.t, &x.cached, &x.fresh, until), RA_OK);
        while (x.work == 0) CHECK(ra_infer_step(x.c, 0) > 0);
        work = x.work;
        if (i < 4) ra_infer_cancel(x.c);
        else while (ra_now_ns() <= until) continue;
        CHECK_EQ(ra_infer_step(x.c, 0), i < 4 ? RA_E_CANCELLED : RA_E_TIMEOUT);
        CHECK_EQ(x.work, work);
        shelf_close(&x);
    }
}

/* -------------------------------------------------------------------------- merges */
enum { MERGED = 45, WIDEST = 130 };    /* most rows and dims of a case */
typedef struct side { float o[MERGED * WIDEST], lse[MERGED]; } side;

/* LSE of both sides: far apart, equal, next to one another, or -inf on one side or both. */
static void merged_lse(h_rng *r, float *a, float *b) {
    const int64_t reach = h_one_in(r, 4) ? 2000000 : 20000;    /* exp underflows beyond 745 */
    *a = (float)h_range(r, -reach, reach) * 1e-3f;
    *b = h_one_in(r, 4) ? *a : *a + (float)h_range(r, -reach, reach) * 1e-3f;
    if (h_one_in(r, 6)) *a = -INFINITY;
    if (h_one_in(r, 6)) *b = -INFINITY;
}

/* Random sides. What a side of LSE -inf holds is never read. */
static void merged_fill(h_rng *r, side *x, side *y, int64_t rows, int32_t dim) {
    for (int64_t i = 0; i < rows; i++) {
        merged_lse(r, &x->lse[i], &y->lse[i]);
        for (int32_t j = 0; j < dim; j++) {
            const int64_t at = i * dim + j;
            x->o[at] = isinf(x->lse[i]) ? NAN : h_normal(r);
            y->o[at] = isinf(y->lse[i]) ? NAN : h_normal(r);
        }
    }
}

/* Element `at` of row i, or its LSE if at is -1, in double precision. */
static double merged_exactly(const side *x, const side *y, int64_t i, int64_t at) {
    const double a = (double)x->lse[i], b = (double)y->lse[i], hi = a > b ? a : b;
    const double p = isinf(a) ? 0 : exp(a - hi), q = isinf(b) ? 0 : exp(b - hi);
    double sum = 0;
    if (p + q == 0) return at < 0 ? -(double)INFINITY : 0;
    if (at < 0) return hi + log(p + q);
    if (p > 0) sum += p / (p + q) * (double)x->o[at];
    if (q > 0) sum += q / (p + q) * (double)y->o[at];
    return sum;
}

/* Rounded once, after a few roundings in double precision. */
static int merged_right(float got, double want) {
    if (isinf(want)) return isinf(got) && got < 0;
    return fabs((double)got - want) <= 6.1e-8 * fabs(want) + 1e-14;
}

/* x and y merged by `isa`: right, with the bits of ra_merge, and with those of y and x merged. */
static void merge_once(int32_t isa, const side *x, const side *y, int64_t rows, int32_t dim) {
    const size_t bytes = (size_t)(rows * dim) * sizeof(float);
    side a = *x, b = *y, plain = *x;
    int wrong = 0;
    hook_merge(isa, a.o, a.lse, y->o, y->lse, rows, dim);
    hook_merge(isa, b.o, b.lse, x->o, x->lse, rows, dim);
    ra_merge(plain.o, plain.lse, y->o, y->lse, rows, dim);
    for (int64_t i = 0; i < rows; i++) {
        int right = merged_right(a.lse[i], merged_exactly(x, y, i, -1));
        h_sound(&wrong, right, "LSE is right", __FILE__, __LINE__);
        for (int64_t at = i * dim; at < (i + 1) * dim; at++) {
            right = merged_right(a.o[at], merged_exactly(x, y, i, at));
            h_sound(&wrong, right, "O is right", __FILE__, __LINE__);
        }
    }
    CHECK_BITS(a.o, plain.o, bytes);
    CHECK_BITS(a.o, b.o, bytes);
    CHECK_BITS(a.lse, plain.lse, (size_t)rows * sizeof(float));
    CHECK_BITS(a.lse, b.lse, (size_t)rows * sizeof(float));
}

TEST(merges_of_every_isa) {
    static const int32_t dims[] = { 1, 3, 8, 15, 16, 17, 31, 33, 64, 80, 127, 128, WIDEST };
    static side x, y;
    for (int64_t i = 0; i < 400; i++) {
        if (!h_case(i)) continue;
        h_rng r = h_case_rng(i);
        const int32_t dim = dims[h_range(&r, 0, 12)];
        const int64_t rows = h_range(&r, 1, MERGED);
        merged_fill(&r, &x, &y, rows, dim);
        for (int32_t isa = RA_ISA_SCALAR; isa <= RA_ISA_NEON; isa++)
            if (ra_isa_available(isa)) merge_once(isa, &x, &y, rows, dim);
    }
}

/* Sums of which some rows have no key, and some are not finite. */
TEST(ends_of_every_isa) {
    float m[64], l[64];
    for (int64_t i = 0; i < 400; i++) {
        if (!h_case(i)) continue;
        h_rng r = h_case_rng(i);
        const int32_t rows = (int32_t)h_range(&r, 1, 64);
        for (int32_t j = 0; j < rows; j++) {
            m[j] = (float)h_normal(&r) * 100.0f;
            l[j] = expf((float)h_normal(&r) * 10.0f);
            if (h_one_in(&r, 20)) l[j] = 0.0f;
            if (h_one_in(&r, 40)) l[j] = h_one_in(&r, 2) ? INFINITY : NAN;
        }
        for (int32_t isa = RA_ISA_SCALAR; isa <= RA_ISA_NEON; isa++)
            if (ra_isa_available(isa)) CHECK(hook_finish(isa, m, l, rows) == 0);
    }
}

static const h_test tests[] = {
    ENTRY(merges_of_every_isa), ENTRY(ends_of_every_isa), ENTRY(steps_are_bounded),
    ENTRY(rows_are_bounded),
    ENTRY(cancel_and_deadline), ENTRY(another_thread_continues), ENTRY(unseen_chunks_cost_no_rows),
    ENTRY(cache_steps_are_bounded), ENTRY(cache_empty_lanes_are_work),
    ENTRY(cache_cancel_and_deadline)
};

int main(int argc, char **argv) {
    return hook_main(argc, argv, tests, sizeof tests / sizeof tests[0]);
}
