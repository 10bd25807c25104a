/* The caller's floating-point state: traps, rounding, denormals, status flags. Every entry that
 * computes gives the bits of the default state in any other, raises no signal, leaves the state as
 * it was, and calls back in it. Between fp_set and fp_default the tests themselves compute nothing:
 * with all traps on even a rounded result is a signal. */
#include "harness.h"
#define RINGATTN_IMPLEMENTATION
#include "ringattn.h"
#include "below.h"
#include <pthread.h>
#include <signal.h>

/* -------------------------------------------------------------------------- states
 * State i: rounding i & 3, all traps on if i & 4, denormals flushed if i & 8, some flags set. */
enum { STATES = 16 };
#if defined(__x86_64__)
enum { HAS_STATE = 1, UPWARD = 2 };
static uint64_t fp_get(void) { return __builtin_ia32_stmxcsr(); }
static void fp_put(uint64_t x) { __builtin_ia32_ldmxcsr((uint32_t)x); }
static uint64_t fp_word(int i) {
    return (uint64_t)(i & 3) << 13 | (i & 4 ? 0 : 0x1f80u) | (i & 8 ? 0x8040u : 0) |
           (unsigned)(i * 5 + 1) % 64;
}
#elif defined(__aarch64__)
enum { HAS_STATE = 1, UPWARD = 1 };
static uint64_t fp_get(void) {
    uint64_t control, status;
    __asm__ volatile("mrs %0, fpcr\n\tmrs %1, fpsr" : "=r"(control), "=r"(status));
    return control | status << 32;
}
static void fp_put(uint64_t x) {
    __asm__ volatile("msr fpcr, %0\n\tmsr fpsr, %1" : : "r"(x & 0xffffffffu), "r"(x >> 32));
}
static uint64_t fp_word(int i) {
    return (uint64_t)(i & 3) << 22 | (i & 4 ? 0x9f00u : 0) | (i & 8 ? 1u << 24 : 0) |
           (uint64_t)((unsigned)(i * 5 + 1) % 32) << 32;
}
#else
enum { HAS_STATE = 0, UPWARD = 0 };
static uint64_t fp_get(void) { return 0; }
static void fp_put(uint64_t x) { (void)x; }
static uint64_t fp_word(int i) { (void)i; return 0; }
#endif
static uint64_t fp_start;              /* the state in which the program began */

/* Enters state i; returns it as the machine reports it. */
static uint64_t fp_set(int i) {
    fp_put(fp_word(i));
    return fp_get();
}
static void fp_default(void) { fp_put(fp_start); }

static void on_signal(int number) {
    (void)number;
    fp_default();
    printf("tests/test_fp.c:1: %s: SIGFPE\n    case: %s\n0 passed, 1 failed\n", h_run.test,
           h_run.context);
    fflush(stdout);
    _Exit(1);
}

/* Runs job(x), which fills `out`, in the default state and in `count` others from state `first` on,
 * each `step` further. The bits must be the same, and the state must be there afterwards. */
typedef struct job { void (*run)(void *x); void *x; uint8_t *out; size_t bytes; } job;

static void in_states(const job *j, int first, int step, int count) {
    uint8_t *want = (uint8_t *)malloc(j->bytes + 1);
    char name[sizeof h_run.context];
    memset(j->out, 0, j->bytes);
    j->run(j->x);
    memcpy(want, j->out, j->bytes);
    memcpy(name, h_run.context, sizeof name);
    for (int i = 0; i < count; i++) {
        const int which = (first + i * step) % STATES;
        uint64_t state, after;
        h_context("%.600s, state %d", name, which);
        memset(j->out, 0, j->bytes);
        state = fp_set(which);
        j->run(j->x);
        after = fp_get();
        fp_default();
        CHECK_EQ(after, state);
        CHECK_BITS(j->out, want, j->bytes);
    }
    free(want);
}

/* -------------------------------------------------------------------------- one rank */
enum { HQ = 4, HKV = 2, D = 64, KEYS = 150, THREADS = 2 };
enum { PLAIN, FULL, BIAS, SINKS, LOW_SINKS, WINDOW, SOFTCAP, ALIBI, LARGE, EMPTY_CELLS, NO_KEYS,
       HIDDEN_V, DROPOUT, KINDS };
static const int32_t isas[] = { RA_ISA_SCALAR, RA_ISA_AVX2, RA_ISA_AVX512, RA_ISA_AVX512_BF16,
                                RA_ISA_AMX, RA_ISA_NEON };

typedef struct call {
    ra_desc d;
    ra_tensors t;
    float q[KEYS * HQ * D], d_o[KEYS * HQ * D], raw[2][KEYS * HKV * D];
    uint8_t k[KEYS * HKV * D * 4], v[KEYS * HKV * D * 4], q_low[KEYS * HQ * D * 2];
    float bias[KEYS * KEYS], alibi[HQ], sinks[HQ];
    int32_t q_pos[KEYS], k_pos[KEYS];
    struct { float o[KEYS * HQ * D], lse[KEYS * HQ], d_q[KEYS * HQ * D], d_k[KEYS * HKV * D],
             d_v[KEYS * HKV * D], d_sinks[HQ]; ra_status s; } out;
    uint8_t *memory;
    size_t bytes;
} call;

static void call_data(call *c, int kind, h_rng *r) {
    for (int i = 0; i < KEYS * HQ * D; i++) {
        c->q[i] = kind == LARGE ? 112 : h_normal(r);
        c->d_o[i] = h_normal(r);
        if (kind == PLAIN && i % 9 == 0) c->d_o[i] = 1e-39f;           /* denormal */
    }
    for (int j = 0; j < 2; j++)
        for (int i = 0; i < KEYS * HKV * D; i++) {
            c->raw[j][i] = h_normal(r);
            if (kind == LARGE && !j) c->raw[j][i] = c->raw[j][i] * 0.01f - 112;
            if (kind == PLAIN && i % 7 == 0) c->raw[j][i] = 1e-39f;
            if (kind == HIDDEN_V && j && i / (HKV * D) == KEYS - 1) c->raw[j][i] = 3e38f;
        }
    for (int i = 0; i < KEYS * KEYS; i++) {
        c->bias[i] = i / KEYS < 5 || i % 7 == 0 ? -INFINITY : h_normal(r);
    }
    for (int h = 0; h < HQ; h++) {
        c->sinks[h] = kind == SINKS ? -INFINITY : kind == LOW_SINKS ? -1e30f : 0.5f;
        c->alibi[h] = h == 1 ? 100 : 1;
    }
    for (int i = 0; i < KEYS; i++) c->k_pos[i] = i % 3 == 1 ? -1 : i;
}

static void call_fields(call *c, int kind, int rows) {
    ra_desc *d = &c->d;
    ra_tensors *t = &c->t;
    const int cells = kind == EMPTY_CELLS || kind == NO_KEYS;
    d->tokens = rows;
    d->kv_tokens = KEYS;
    d->q_offset = cells ? 0 : KEYS - rows;
    t->q.data = c->q; t->k.data = c->k; t->v.data = c->v; t->d_o.data = c->d_o;
    t->o.data = c->out.o; t->lse.data = c->out.lse; t->d_q.data = c->out.d_q;
    t->d_k.data = c->out.d_k; t->d_v.data = c->out.d_v;
    if (kind == BIAS) {
        d->scores = RA_SCORE_BIAS;
        t->bias.data = c->bias; t->bias.keys = KEYS;
        t->bias.row_step = KEYS * 4; t->bias.key_step = 4;
    }
    if (kind == SINKS || kind == LOW_SINKS) {
        d->scores = RA_SCORE_SINKS;
        t->sinks = c->sinks; t->d_sinks = c->out.d_sinks;
    }
    if (kind == ALIBI) { d->scores = RA_SCORE_ALIBI; t->alibi = c->alibi; }
    if (kind == WINDOW) d->mask.window = 20;
    if (kind == SOFTCAP) d->softcap = 5;
    for (int i = 0; i < rows; i++)
        c->q_pos[i] = kind == NO_KEYS && i % 2 ? -1 : KEYS - rows + i;
    if (cells) { t->q_pos.array = c->q_pos; t->q_pos.count = rows; }
    if (kind == EMPTY_CELLS) { t->k_pos.array = c->k_pos; t->k_pos.count = KEYS; }
}

/* A call with some peculiarity; dtype: of K and V (bf16: of q too). */
static call *call_new(int kind, int32_t dtype, int32_t isa, int rows, int train, h_rng *r) {
    call *c = (call *)calloc(1, sizeof *c);
    c->d = ra_desc_make(HQ, HKV, D, RA_F32,
                        kind == FULL || kind == BIAS ? RA_MASK_NONE : RA_MASK_CAUSAL);
    c->d.k_dtype = c->d.v_dtype = dtype;
    c->d.isa = isa;
    c->d.train = train;
    call_data(c, kind, r);
    call_fields(c, kind, rows);
    ra_convert(c->k, dtype, c->raw[0], RA_F32, KEYS * HKV * D);
    ra_convert(c->v, dtype, c->raw[1], RA_F32, KEYS * HKV * D);
    if (dtype == RA_BF16) {
        ra_convert(c->q_low, dtype, c->q, RA_F32, KEYS * HQ * D);
        c->d.q_dtype = dtype;
        c->t.q.data = c->q_low;
    }
    if (train && kind == DROPOUT) c->d.dropout = 0.25f;
    c->bytes = ra_attention_bytes(&c->d, THREADS) +
               (train ? ra_attention_backward_bytes(&c->d, THREADS) : 0);
    c->memory = (uint8_t *)malloc(c->bytes);
    return c;
}

static void call_run(void *x) {
    call *c = (call *)x;
    ra_status s = ra_attention_bytes(&c->d, THREADS) ? RA_OK : RA_E_STATE;
    for (int i = 0; i < THREADS && !s; i++)
        s = ra_attention(&c->d, &c->t, c->memory, c->bytes, i, THREADS);
    if (!s && c->d.train && !ra_attention_backward_bytes(&c->d, THREADS)) s = RA_E_STATE;
    for (int i = 0; i < THREADS && !s && c->d.train; i++)
        s = ra_attention_backward(&c->d, &c->t, c->memory, c->bytes, i, THREADS);
    c->out.s = s;
}

static job call_job(call *c, void (*run)(void *x)) {
    job j;
    j.run = run; j.x = c; j.out = (uint8_t *)&c->out; j.bytes = sizeof c->out;
    return j;
}

static void call_free(call *c) {
    free(c->memory);
    free(c);
}

static void calls_on(int32_t isa, int train) {
    static const int rows[3] = { 1, 3, 70 };
    static const int32_t dtypes[5] = { RA_F32, RA_F16, RA_BF16, RA_Q8_0, RA_Q4_0 };
    for (int i = 0; i < KINDS * 5 * 3; i++) {
        const int kind = i % KINDS, dtype = i / KINDS % 5, n = i / KINDS / 5;
        h_rng r = h_case_rng(i);
        if (!h_case(i) || (train && (dtype >= 3 || n != 2))) continue;
        call *c = call_new(kind, dtypes[dtype], isa, rows[n], train, &r);
        const job j = call_job(c, call_run);
        h_context("%s kind %d dtype %d rows %d train %d", ra_isa_name(isa), kind, dtypes[dtype],
                  rows[n], train);
        /* The state with traps and upward rounding, and one other; with --long all. */
        if (h_run.large) in_states(&j, 0, 1, STATES);
        else in_states(&j, 6, 1 + i % 15, 2);
        CHECK_EQ(c->out.s, RA_OK);
        call_free(c);
    }
}

TEST(calls) {
    for (int i = 0; i < 6; i++) if (ra_isa_available(isas[i])) calls_on(isas[i], 0);
}
TEST(gradients) {
    for (int i = 0; i < 6; i++) if (ra_isa_available(isas[i])) calls_on(isas[i], 1);
}

/* The block mathematics and the call with plain arguments. */
static void blocks_run(void *x) {
    call *c = (call *)x;
    static float m[3][KEYS * HQ], l[3][KEYS * HQ], acc[3][KEYS * HQ * D], delta[KEYS * HQ];
    ra_state state[3];
    ra_grads g;
    ra_status s = RA_OK;
    memset(c->out.d_q, 0, sizeof c->out.d_q);
    memset(c->out.d_k, 0, sizeof c->out.d_k);
    memset(c->out.d_v, 0, sizeof c->out.d_v);
    g.d_q = c->out.d_q; g.d_k = c->out.d_k; g.d_v = c->out.d_v;
    for (int i = 0; i < 3 && !s; i++) {
        state[i].m = m[i]; state[i].l = l[i]; state[i].acc = acc[i];
        s = ra_state_clear(&c->d, &state[i]);
        if (!s && i < 2) s = ra_fold(&c->d, &state[i], &c->t, c->memory, c->bytes);
    }
    if (!s) s = ra_state_merge(&c->d, &state[2], &state[0]);
    if (!s) s = ra_state_merge(&c->d, &state[2], &state[1]);
    if (!s) s = ra_state_finish(&c->d, &state[2], &c->t);
    if (!s) s = ra_delta(&c->d, &c->t, delta);
    if (!s) s = ra_fold_backward(&c->d, &c->t, delta, &g, c->memory, c->bytes);
    c->out.s = s;
}

static void simple_run(void *x) {
    call *c = (call *)x;
    c->out.s = ra_attention_simple(c->out.o, c->q, c->raw[0], c->raw[1], 70, KEYS, HQ, HKV, D, 0,
                                   0, KEYS - 70);
    ra_merge(c->out.o, c->out.lse, c->raw[0], c->d_o, 100, D);
}

TEST(blocks) {
    for (int i = 0; i < 6; i++) {
        h_rng r = h_case_rng(i);
        if (!ra_isa_available(isas[i])) continue;
        call *c = call_new(SINKS, RA_F32, isas[i], 70, 1, &r);
        const job fold = call_job(c, blocks_run), simple = call_job(c, simple_run);
        h_context("%s blocks", ra_isa_name(isas[i]));
        in_states(&fold, 0, 1, STATES);
        CHECK_EQ(c->out.s, RA_OK);
        h_context("%s simple", ra_isa_name(isas[i]));
        in_states(&simple, 0, 1, STATES);
        CHECK_EQ(c->out.s, RA_OK);
        call_free(c);
    }
}

/* -------------------------------------------------------------------------- conversions */
enum { NUMBERS = 4096 };
static struct { uint8_t in[NUMBERS * 4], out[20][NUMBERS * 4]; } numbers;

static void convert_run(void *x) {
    int n = 0;
    (void)x;
    for (int32_t to = RA_F32; to <= RA_Q4_0; to++)
        for (int32_t from = RA_F32; from <= RA_Q4_0; from++)
            if (to != from) ra_convert(numbers.out[n++], to, numbers.in, from, NUMBERS);
}

TEST(conversions) {
    h_rng r = h_case_rng(0);
    job j;
    for (int i = 0; i < NUMBERS * 4; i += 4) {         /* any bits, and ties of f16 and bf16 */
        const uint32_t kind = h_next(&r) % 3, bits = h_next(&r);
        const uint32_t word = kind == 0 ? bits : kind == 1 ? (bits & 0x47ffffffu) | 0x38000000u
                                                           : (bits & 0xffff0000u) | 0x8000u;
        memcpy(numbers.in + i, &word, 4);
    }
    j.run = convert_run; j.x = NULL; j.out = numbers.out[0]; j.bytes = sizeof numbers.out;
    in_states(&j, 0, 1, STATES);
}

/* -------------------------------------------------------------------------- figures of plans */
typedef struct figures {
    ra_desc d;
    struct { ra_plan_report all[3]; ra_prediction p; float scale;
             int32_t chunk, buffers; ra_status s; } out;
} figures;

static void figures_run(void *x) {
    figures *f = (figures *)x;
    ra_plan *plan = NULL;
    ra_desc full;
    ra_status s = ra_plan_create(&plan, &f->d, NULL);
    const ra_rates *rates = &f->d.rates;
    for (int i = 0; i < 3 && !s; i++) s = ra_plan_query(plan, i, &f->out.all[i]);
    if (!s) s = ra_plan_predict(plan, 1, rates, &f->out.p);
    ra_plan_destroy(plan);
    if (!s) s = ra_desc_resolve(&f->d, &full);
    f->out.s = s;
    if (s) return;
    memcpy(&f->out.scale, &full.scale, sizeof f->out.scale);
    f->out.chunk = full.chunk_tokens;
    f->out.buffers = full.buffers;
}

TEST(figures_of_plans) {
    for (int i = 0; i < 3; i++) {
        static figures f;
        job j;
        f.d = ra_desc_make(6, 3, 40 + 11 * i, RA_F32, RA_MASK_CAUSAL);
        f.d.tokens = i == 2 ? 9000001 : 3000 + i;
        f.d.ranks = 3;
        f.d.train = i == 1;
        f.d.layout.kind = RA_LAYOUT_ZIGZAG;
        f.d.rates.flops_per_s = 3e10 / 7;
        f.d.rates.link_bytes_per_s = 1e9 / 3;
        f.d.rates.link_latency_s = 1e-5 / 3;
        j.run = figures_run; j.x = &f; j.out = (uint8_t *)&f.out; j.bytes = sizeof f.out;
        h_context("figures %d", i);
        in_states(&j, 0, 1, STATES);
        CHECK_EQ(f.out.s, RA_OK);
    }
}

/* A field that is no number is refused in any state, and so is one that is denormal. */
TEST(refused_numbers) {
    const float wrong[] = { NAN, INFINITY, -1, -1e-40f, 1e-40f };
    for (int i = 0; i < 5 * 3 * STATES; i++) {
        ra_error why = { 0 };
        ra_desc d = ra_desc_make(2, 1, 8, RA_F32, RA_MASK_CAUSAL), full;
        ra_status s;
        d.tokens = 5;
        d.train = 1;
        d.error = &why;
        float *field = i / 5 % 3 == 0 ? &d.scale : i / 5 % 3 == 1 ? &d.softcap : &d.dropout;
        memcpy(field, &wrong[i % 5], sizeof *field);
        (void)fp_set(i / 15);
        s = ra_desc_resolve(&d, &full);
        fp_default();
        h_context("field %d value %d state %d: %s", i / 5 % 3, i % 5, i / 15, why.text);
        CHECK_EQ(s, RA_E_RANGE);
    }
}

TEST(refused_rates) {
    const double nan = (double)NAN;
    ra_desc d = ra_desc_make(2, 1, 8, RA_F32, RA_MASK_CAUSAL);
    ra_plan *plan = NULL;
    d.tokens = 5;
    CHECK_EQ(ra_plan_create(&plan, &d, NULL), RA_OK);
    for (int i = 0; plan && i < STATES; i++) {
        ra_rates rates = { 1e10, 1e9, 0 };
        ra_prediction out;
        ra_status s;
        memcpy(&rates.flops_per_s, &nan, sizeof nan);
        (void)fp_set(i);
        s = ra_plan_predict(plan, 0, &rates, &out);
        fp_default();
        h_context("state %d", i);
        CHECK_EQ(s, RA_E_RANGE);
    }
    ra_plan_destroy(plan);
}

/* -------------------------------------------------------------------------- rings and caches
 * Ranks in unlike states. Every callback checks that it runs in the state of its rank. */
enum { RANKS = 3, TOKENS = 380, SHARD = 128 };
enum { RING_COPIES = 1, RING_ENGINE = 2, RING_STEPS = 4, RING_SENDRECV = 8 };

typedef struct rank_data {
    float q[SHARD * HQ * D], k[SHARD * HKV * D], v[SHARD * HKV * D], d_o[SHARD * HQ * D];
    struct { float o[SHARD * HQ * D], lse[SHARD * HQ], d_q[SHARD * HQ * D], d_k[SHARD * HKV * D],
             d_v[SHARD * HKV * D], d_sinks[HQ]; } out;
    const ra_transport *below;
    uint64_t state;                    /* of this rank's threads */
    int32_t wrong, calls;              /* callbacks in another state; of all */
    int32_t after;                     /* calls that left another state behind */
    ra_plan *plan;
    ra_ring *ring;
    ra_tensors t;
    ra_error why;
    ra_status s;
} rank_data;

typedef struct ring_test {
    ra_desc d;
    int how, first;                    /* RING_*; state of rank 0, -1: the default on all ranks */
    rank_data rank[RANKS];
} ring_test;

static void watched(rank_data *x) {
    __atomic_add_fetch(&x->calls, 1, __ATOMIC_RELAXED);
    if (fp_get() != x->state) __atomic_add_fetch(&x->wrong, 1, __ATOMIC_RELAXED);
}

static int net_post(void *ctx, ra_transport_op *const *ops, int n) {
    watched((rank_data *)ctx);
    return ((rank_data *)ctx)->below->post(((rank_data *)ctx)->below->ctx, ops, n);
}
static int net_poll(void *ctx, ra_transport_op *const *ops, int n) {
    watched((rank_data *)ctx);
    return ((rank_data *)ctx)->below->poll(((rank_data *)ctx)->below->ctx, ops, n);
}
static int net_wait(void *ctx, ra_transport_op *const *ops, int n, int64_t deadline_ns) {
    watched((rank_data *)ctx);
    return ((rank_data *)ctx)->below->wait(((rank_data *)ctx)->below->ctx, ops, n, deadline_ns);
}
static int net_abort(void *ctx, int why) {
    return ((rank_data *)ctx)->below->abort(((rank_data *)ctx)->below->ctx, why);
}
static int net_quiesce(void *ctx, int64_t deadline_ns) {
    watched((rank_data *)ctx);
    return ((rank_data *)ctx)->below->quiesce(((rank_data *)ctx)->below->ctx, deadline_ns);
}
static const char *net_text(void *ctx, int code) {
    return ((rank_data *)ctx)->below->error_text(((rank_data *)ctx)->below->ctx, code);
}

static int net_sendrecv(void *ctx, int to, const void *s, size_t s_len, int from, void *r,
                        size_t r_len, uint64_t tag, int64_t deadline_ns) {
    const ra_transport *below = ((rank_data *)ctx)->below;
    watched((rank_data *)ctx);
    return below_sendrecv((void *)(uintptr_t)below, to, s, s_len, from, r, r_len, tag, deadline_ns);
}

static ra_transport net_over(rank_data *x, ra_world *world, int rank, int how) {
    ra_transport t = *ra_world_transport(world, rank);
    x->below = ra_world_transport(world, rank);
    t.ctx = x;
    t.post = net_post; t.poll = net_poll; t.wait = net_wait;
    t.abort = net_abort; t.quiesce = net_quiesce; t.error_text = net_text;
    if (how & (RING_COPIES | RING_SENDRECV)) t.caps &= ~(uint32_t)RA_CAP_SHARED;
    if (how & RING_SENDRECV) {
        t.sendrecv = net_sendrecv;
        t.post = NULL; t.poll = NULL; t.wait = NULL;
    }
    return t;
}

static int64_t ring_clock(void *ctx) {
    watched((rank_data *)ctx);
    return ra_now_ns();
}
static void ring_trace(void *ctx, const ra_event *e) {
    (void)e;
    watched((rank_data *)ctx);
}
static void ring_progress(void *ctx, int64_t done, int64_t all) {
    (void)done; (void)all;
    watched((rank_data *)ctx);
}

/* An engine without arithmetic: o is the first V row. */
static int ring_engine(void *ctx, const ra_block *b) {
    static const float lse = 0.3f;
    watched((rank_data *)ctx);
    for (int64_t i = 0; i < b->q_rows; i++)
        for (int h = 0; h < HQ; h++) {
            memcpy(b->o + (i * HQ + h) * D, b->v + h / (HQ / HKV) * b->v_head_stride, D * 4);
            memcpy(b->lse + i * HQ + h, &lse, sizeof lse);
        }
    return RA_OK;
}

typedef struct ring_thread { rank_data *x; int ith, pass; ra_status s; } ring_thread;

static void *ring_join(void *arg) {
    ring_thread *y = (ring_thread *)arg;
    ra_job next;
    memset(&next, 0, sizeof next);
    next.ticket = 1 + (uint64_t)y->pass;
    next.plan = y->x->plan;
    next.tensors = &y->x->t;
    next.pass = y->pass;
    fp_put(y->x->state);
    while ((y->s = ra_join(y->x->ring, &next, y->ith)) > 0) continue;
    if (fp_get() != y->x->state) __atomic_add_fetch(&y->x->after, 1, __ATOMIC_RELAXED);
    fp_default();
    return NULL;
}

static ra_status ring_threads(rank_data *x, int pass) {
    pthread_t id;
    ring_thread y[2] = { { x, 0, pass, RA_OK }, { x, 1, pass, RA_OK } };
    pthread_create(&id, NULL, ring_join, &y[1]);
    ring_join(&y[0]);
    pthread_join(id, NULL);
    return y[0].s ? y[0].s : y[1].s;
}

static ra_status ring_passes(const ring_test *g, rank_data *x) {
    const int train = g->d.train;
    ra_status s;
    if (g->how & RING_STEPS) {
        s = ring_threads(x, RA_PASS_FORWARD);
        return s || !train ? s : ring_threads(x, RA_PASS_BACKWARD);
    }
    fp_put(x->state);
    s = ra_forward(x->plan, x->ring, &x->t, RA_NO_DEADLINE);
    if (!s && train) s = ra_backward(x->plan, x->ring, &x->t, RA_NO_DEADLINE);
    if (fp_get() != x->state) x->after++;
    fp_default();
    return s;
}

static const float ring_sinks[HQ] = { 0.7f, -1.3f, 2.1f, 0.1f };

static void ring_tensors(rank_data *x, int sinks) {
    memset(&x->t, 0, sizeof x->t);
    x->t.q.data = x->q; x->t.k.data = x->k; x->t.v.data = x->v; x->t.o.data = x->out.o;
    x->t.lse.data = x->out.lse; x->t.d_o.data = x->d_o; x->t.d_q.data = x->out.d_q;
    x->t.d_k.data = x->out.d_k; x->t.d_v.data = x->out.d_v;
    if (sinks) { x->t.sinks = ring_sinks; x->t.d_sinks = x->out.d_sinks; }
}

static ra_status ring_rank(ra_world *world, int rank, void *user) {
    ring_test *g = (ring_test *)user;
    rank_data *x = &g->rank[rank];
    const ra_transport net = net_over(x, world, rank, g->how);
    ra_engine engine;
    ra_ring_desc rd;
    ra_desc d = g->d;
    memset(&engine, 0, sizeof engine);
    memset(&rd, 0, sizeof rd);
    engine.size = sizeof engine; engine.abi = RA_ENGINE_ABI;
    engine.ctx = x; engine.fold = ring_engine;
    d.rank = rank;
    d.error = rd.error = &x->why;
    if (g->how & RING_ENGINE) d.engine = &engine;
    rd.clock_ns = ring_clock; rd.trace = ring_trace; rd.progress = ring_progress;
    rd.clock_ctx = rd.trace_ctx = rd.progress_ctx = x;
    ring_tensors(x, g->d.scores & RA_SCORE_SINKS);
    x->state = g->first < 0 ? fp_get() : fp_set((g->first + 5 * rank) % STATES);
    x->s = ra_plan_create(&x->plan, &d, NULL);
    if (!x->s) x->s = ra_ring_create(&x->ring, x->plan, &net, &rd);
    if (fp_get() != x->state) x->after++;
    fp_default();
    if (!x->s) x->s = ring_passes(g, x);
    fp_put(x->state);
    if (x->s && x->ring) x->why = *ra_ring_error(x->ring);
    ra_ring_destroy(x->ring);
    fp_default();
    if (x->s) printf("rank %d: %s: %s\n", rank, x->why.field, x->why.text);
    ra_plan_destroy(x->plan);
    x->plan = NULL;
    x->ring = NULL;
    return x->s;
}

/* A slope, or a factor of biases, that is no number is refused by a ring too, in any state, and so
 * is a factor that is denormal. */
static void refused_slopes(int factors, const float *slopes) {
    static float rows[4][HQ * D];
    ra_desc d = ra_desc_make(HQ, HKV, D, RA_F32, RA_MASK_CAUSAL);
    ra_plan *plan = NULL;
    ra_ring *ring = NULL;
    ra_tensors t;
    memset(&t, 0, sizeof t);
    t.q.data = rows[0]; t.k.data = rows[1]; t.v.data = rows[2]; t.o.data = rows[3];
    if (factors) t.bias_factors = slopes;
    else t.alibi = slopes;
    t.bias.data = factors ? rows[0] : NULL;
    t.bias.keys = factors;
    d.tokens = 1;
    d.scores = factors ? RA_SCORE_BIAS | RA_SCORE_FACTORS : RA_SCORE_ALIBI;
    CHECK_EQ(ra_plan_create(&plan, &d, NULL), RA_OK);
    CHECK_EQ(ra_ring_create(&ring, plan, NULL, NULL), RA_OK);
    for (int i = 0; i < STATES && ring; i++) {
        ra_status s;
        (void)fp_set(i);
        s = ra_forward(plan, ring, &t, RA_NO_DEADLINE);
        fp_default();
        h_context("factors %d state %d", factors, i);
        CHECK_EQ(s, RA_E_RANGE);
    }
    ra_ring_destroy(ring);
    ra_plan_destroy(plan);
}
TEST(refused_slopes) {
    static const float wrong[2][HQ] = { { 1, 1, NAN, 1 }, { 1, 1, 1e-40f, 1 } };
    for (int i = 0; i < 3; i++) refused_slopes(i > 0, wrong[i / 2]);
}

/* Fills the ranks; runs the ring in default states, then in `count` others. */
static void ring_compare(ring_test *g, int count, h_rng *r) {
    static rank_data want[RANKS];
    for (int i = 0; i < RANKS; i++) {
        rank_data *x = &g->rank[i];
        memset(x, 0, sizeof *x);
        for (int j = 0; j < SHARD * HQ * D; j++) { x->q[j] = h_normal(r); x->d_o[j] = h_normal(r); }
        for (int j = 0; j < SHARD * HKV * D; j++) { x->k[j] = h_normal(r); x->v[j] = h_normal(r); }
    }
    for (int n = -1; n < count; n++) {
        g->first = n < 0 ? -1 : (6 + 3 * n) % STATES;
        h_context("%s how %d train %d, state of rank 0 is %d", ra_isa_name(g->d.isa), g->how,
                  g->d.train, g->first);
        for (int i = 0; i < RANKS; i++) memset(&g->rank[i].out, 0x3f, sizeof g->rank[i].out);
        CHECK_EQ(ra_world_run(RANKS, ring_rank, g, NULL), RA_OK);
        for (int i = 0; i < RANKS; i++) {
            const rank_data *x = &g->rank[i];
            CHECK_EQ(x->wrong, 0);
            CHECK_EQ(x->after, 0);
            CHECK(x->calls > 10);
            if (n >= 0) CHECK_BITS(&x->out, &want[i].out, sizeof x->out);
            else memcpy(&want[i].out, &x->out, sizeof x->out);
        }
    }
}

TEST(rings) {
    static ring_test g;
    for (int i = 0; i < 6 * 7; i++) {
        static const int how[7] = { 0, RING_COPIES, RING_COPIES | RING_STEPS, RING_ENGINE,
                                    RING_COPIES, RING_STEPS, RING_SENDRECV };
        const int way = i % 7;
        h_rng r = h_case_rng(i);
        if (!h_case(i) || !ra_isa_available(isas[i / 7]) || !h_variant(i / 7, way % 2)) continue;
        g.d = ra_desc_make(HQ, HKV, D, RA_F32, way == 3 ? RA_MASK_NONE : RA_MASK_CAUSAL);
        g.d.tokens = TOKENS;
        g.d.ranks = RANKS;
        g.d.isa = isas[i / 7];
        g.d.layout.kind = RA_LAYOUT_ZIGZAG;
        g.how = how[way];
        g.d.threads = g.how & RING_STEPS ? 2 : 1;
        g.d.train = way == 2 || way == 4 || way == 5;
        if (way == 2) g.d.scores = RA_SCORE_SINKS;
        ring_compare(&g, h_run.large ? STATES : 2, &r);
    }
}

/* A cache: a prompt of 40 tokens, then three. */
typedef struct cache_test {
    ra_desc d;
    ra_cache_desc cd;
    int how, first;
    float q[48 * HQ * D], k[48 * HKV * D], v[48 * HKV * D];
    uint8_t keys[RANKS][2][64 * HKV * D * 4];
    struct { float o[RANKS][48 * HQ * D]; double seconds[RANKS][2]; int64_t rows[RANKS]; } out;
    rank_data rank[RANKS];
} cache_test;

static ra_status cache_calls(cache_test *g, ra_cache *c, int rank) {
    ra_tensors t;
    ra_infer_report report;
    ra_status s = RA_OK;
    int64_t cached = 0, fresh = 40;
    memset(&t, 0, sizeof t);
    t.k.data = g->keys[rank][0];
    t.v.data = g->keys[rank][1];
    for (; cached < 43 && !s; cached += fresh, fresh = 1) {
        if (cached) fresh = 1;
        for (int64_t p = cached; p < cached + fresh && !s; p++)
            s = ra_cache_store(c, &t, 0, p, g->k + p * HKV * D, g->v + p * HKV * D);
        t.q.data = g->q + cached * HQ * D;
        t.o.data = g->out.o[rank] + cached * HQ * D;
        if (!s) s = ra_infer_query(c, &cached, &fresh, &report);
        if (!s) s = ra_infer(c, &t, &cached, &fresh, RA_NO_DEADLINE);
    }
    return s;
}

/* What a cache predicts in which each rank has the queries of its own positions. */
static ra_status cache_predicts(cache_test *g, const ra_desc *d, const ra_transport *net) {
    static const int32_t weights[RANKS] = { 3, 5, 7 };
    const int64_t cached = 1000, fresh = 9;
    ra_cache *c = NULL;
    ra_cache_desc cd;
    ra_desc mine = *d;
    ra_infer_report report;
    memset(&cd, 0, sizeof cd);
    mine.kv_tokens = 5000;
    mine.layout.weights = weights;
    ra_status s = ra_cache_create(&c, &mine, net, &cd);
    if (!s) s = ra_infer_query(c, &cached, &fresh, &report);
    if (!s) {
        memcpy(g->out.seconds[d->rank], &report.queries_s, 8);
        memcpy(g->out.seconds[d->rank] + 1, &report.keys_s, 8);
        g->out.rows[d->rank] = ra_cache_rows(c);
    }
    ra_cache_destroy(c);
    return s;
}

static ra_status cache_rank(ra_world *world, int rank, void *user) {
    cache_test *g = (cache_test *)user;
    rank_data *x = &g->rank[rank];
    const ra_transport net = net_over(x, world, rank, g->how);
    ra_cache *c = NULL;
    ra_desc d = g->d;
    d.rank = rank;
    x->state = g->first < 0 ? fp_get() : fp_set((g->first + 5 * rank) % STATES);
    x->s = ra_cache_workspace(&d, &g->cd) ? RA_OK : RA_E_STATE;
    if (!x->s) x->s = ra_cache_create(&c, &d, &net, &g->cd);
    if (!x->s) x->s = cache_calls(g, c, rank);
    ra_cache_destroy(c);
    if (!x->s) x->s = cache_predicts(g, &d, &net);
    if (fp_get() != x->state) x->after++;
    fp_default();
    return x->s;
}

TEST(caches) {
    static cache_test g;
    static uint8_t want[sizeof g.out];
    static const int32_t travel[3] = { RA_INFER_AUTO, RA_INFER_PASS_Q, RA_INFER_MERGE };
    static const int32_t dtypes[4] = { RA_F32, RA_BF16, RA_Q8_0, RA_Q4_0 };
    for (int i = 0; i < 6 * 12; i++) {
        h_rng r = h_case_rng(i);
        if (!h_case(i) || !ra_isa_available(isas[i / 12])) continue;
        g.d = ra_desc_make(HQ, HKV, D, RA_F32, RA_MASK_CAUSAL);
        g.d.k_dtype = g.d.v_dtype = dtypes[i % 4];
        g.d.tokens = 40;
        g.d.kv_tokens = 48;
        g.d.ranks = RANKS;
        g.d.isa = isas[i / 12];
        memset(&g.cd, 0, sizeof g.cd);
        g.cd.queries = RA_QUERIES_ALL;
        g.cd.travel = travel[i / 4 % 3];
        g.how = i % 2 ? RING_COPIES : 0;
        for (int j = 0; j < 48 * HQ * D; j++) g.q[j] = h_normal(&r);
        for (int j = 0; j < 48 * HKV * D; j++) { g.k[j] = h_normal(&r); g.v[j] = h_normal(&r); }
        for (int n = -1; n < (h_run.large ? STATES : 2); n++) {
            g.first = n < 0 ? -1 : (6 + 3 * n) % STATES;
            h_context("%s case %d, state of rank 0 is %d", ra_isa_name(g.d.isa), i, g.first);
            memset(&g.out, 0, sizeof g.out);
            memset(g.keys, 0, sizeof g.keys);
            CHECK_EQ(ra_world_run(RANKS, cache_rank, &g, NULL), RA_OK);
            for (int k = 0; k < RANKS; k++) {
                CHECK_EQ(g.rank[k].wrong, 0);
                CHECK_EQ(g.rank[k].after, 0);
            }
            if (n >= 0) CHECK_BITS(&g.out, want, sizeof want);
            else memcpy(want, &g.out, sizeof want);
        }
    }
}

/* New threads of a world have the state of the thread that makes them. */
static ra_status thread_rank(ra_world *world, int rank, void *user) {
    (void)world; (void)rank;
    if (fp_get() != *(const uint64_t *)user) return RA_E_STATE;
    return RA_OK;
}

TEST(threads_of_a_world) {
    for (int i = 0; i < STATES; i++) {
        uint64_t state = fp_set(i), after;
        const ra_status s = ra_world_run(2, thread_rank, &state, NULL);
        after = fp_get();
        fp_default();
        h_context("state %d", i);
        CHECK_EQ(s, RA_OK);
        CHECK_EQ(after, state);
    }
}

/* The states are unlike, and the machine keeps what is set. */
TEST(states) {
    for (int i = 0; HAS_STATE && i < STATES; i++) {
        volatile float third = 1.0f;
        const uint64_t state = fp_set(i & ~4);
        third = third / 3.0f;
        fp_default();
        h_context("state %d", i);
#if defined(__x86_64__)
        CHECK_EQ(state, fp_word(i & ~4));
#endif
        CHECK((third > 0.33333332f) == ((i & 3) == 0 || (i & 3) == UPWARD));
    }
}

int main(int argc, char **argv) {
    static const h_test tests[] = {
        ENTRY(states), ENTRY(calls), ENTRY(gradients), ENTRY(blocks), ENTRY(conversions),
        ENTRY(figures_of_plans), ENTRY(refused_numbers), ENTRY(refused_rates), ENTRY(rings),
        ENTRY(refused_slopes), ENTRY(caches),
        ENTRY(threads_of_a_world),
    };
    fp_start = fp_get();
    signal(SIGFPE, on_signal);
    if (!HAS_STATE) {
        printf("skipped: the state of this processor is not known here\n");
        printf("0 passed, 0 failed, 1 skipped\n");
        return 0;
    }
    return h_main(argc, argv, tests, sizeof tests / sizeof tests[0]);
}
