/* Programs that users write, as tests: a world in one process, a small engine on one rank, engines
 * with their own threads, a user-supplied network at levels 0 and 1, a user-supplied kernel, a
 * trace. Proves that they work, and that they end well if one part fails. Results are compared with
 * small.h's double-precision reference, or bit for bit with another way to compute them. */
#define _POSIX_C_SOURCE 200112L
#include "hooks.h"
#include "mail.h"
#include <sched.h>
#include "small.h"

/* -------------------------------------------------------------------------- teams
 * A problem, and what each rank needs for it; made and checked on the test's own thread. */
typedef struct team {
    small s;
    ra_plan *plan[MAX_RANKS];
    rank_part part[MAX_RANKS];
    ra_status status[MAX_RANKS];
    ra_failure failure[MAX_RANKS];
    ra_ring_counters counters[MAX_RANKS];
    const ra_transport *net[MAX_RANKS]; /* null: the world's */
    ra_ring_desc rd[MAX_RANKS];
    int64_t deadline_ms;
    int stepping;                      /* threads per rank that step */
    int broken, how;                   /* rank that misbehaves, and how */
} team;

static void team_plans(team *t) {
    for (int r = 0; r < t->s.d.ranks; r++) {
        ra_desc d = t->s.d;
        ra_error e = { 0 };
        d.rank = r;
        d.error = &e;
        if (!CHECK_EQ(ra_plan_create(&t->plan[r], &d, NULL), RA_OK))
            printf("    %s: %s\n", e.field, e.text);
        else part_make(&t->part[r], &t->s.p, &t->s.s, t->plan[r], r);
    }
}

static team *team_new(int ranks, int most, int threads) {
    team *t = (team *)calloc(1, sizeof *t);
    if (!t) abort();
    t->broken = -1;
    t->stepping = threads;
    small_make(&t->s, ranks, most, threads);
    return t;
}

/* Every rank needs keys of every other: nothing is pruned. */
static team *team_full(int ranks, int tokens, int threads) {
    static const int shape[4] = { 2, 1, 8, 8 };
    team *t = team_new(ranks, 4, threads);
    small_free(&t->s);
    small_plain(&t->s, ranks, tokens, shape);
    t->s.s.threads = threads;
    t->s.s.chunk_tokens = 64;
    t->s.s.strides = STRIDES_MIXED;
    t->s.s.seed = small_rand(UINT32_MAX);
    small_data(&t->s);
    small_desc(&t->s);
    return t;
}

static void team_check(team *t) {
    for (int r = 0; r < t->s.d.ranks; r++) {
        const char *why = small_part_check(&t->part[r], 60);
        CHECK_EQ(t->status[r], RA_OK);
        if (!CHECK(why == NULL)) printf("    %s\n", why);
    }
}

static void team_free(team *t) {
    for (int r = 0; r < t->s.d.ranks; r++) {
        ra_plan_destroy(t->plan[r]);
        part_free(&t->part[r]);
    }
    small_free(&t->s);
    free(t);
}

static void seed_case(int64_t i) {
    h_rng rng = h_case_rng(i);
    small_seed(rng.state);
}

typedef struct stepper { team *t; ra_ring *ring; int rank, ith; ra_status status; } stepper;

static void *step_to_the_end(void *arg) {
    stepper *s = (stepper *)arg;
    while ((s->status = ra_step(s->ring, s->ith)) > 0)
        if (s->status == RA_WAIT) (void)ra_step_wait(s->ring, ra_deadline_ms(20));
    return NULL;
}

/* One pass: begin here, step here and on other threads. */
static ra_status pass_with_threads(team *t, ra_ring *ring, int rank) {
    stepper s[8];
    pthread_t id[8];
    ra_job job = { 0 };
    ra_status status;
    job.plan = t->plan[rank];
    job.tensors = &t->part[rank].t;
    if (t->deadline_ms) job.deadline_ns = ra_deadline_ms(t->deadline_ms);
    status = ra_begin(ring, &job);
    if (status) return status;
    for (int i = 0; i < t->stepping; i++) {
        s[i].t = t; s[i].ring = ring; s[i].rank = rank; s[i].ith = i; s[i].status = 0;
        if (i && pthread_create(&id[i], NULL, step_to_the_end, &s[i])) abort();
    }
    (void)step_to_the_end(&s[0]);
    for (int i = 1; i < t->stepping; i++) {
        pthread_join(id[i], NULL);
        if (s[i].status != s[0].status) s[0].status = -99;     /* all threads get the same */
    }
    return s[0].status;
}

/* A rank's whole life: ring, one pass, end. */
static ra_status live(team *t, const ra_transport *net, int rank) {
    ra_ring *ring = NULL;
    ra_status s, end;
    s = ra_ring_create(&ring, t->plan[rank], net, &t->rd[rank]);
    if (s) return t->status[rank] = s;
    if (t->stepping > 1) s = pass_with_threads(t, ring, rank);
    else s = ra_forward(t->plan[rank], ring, &t->part[rank].t,
                        t->deadline_ms ? ra_deadline_ms(t->deadline_ms) : RA_NO_DEADLINE);
    ra_ring_query(ring, &t->counters[rank]);
    (void)ra_ring_failure(ring, &t->failure[rank]);
    end = ra_ring_destroy(ring);
    return t->status[rank] = s ? s : end;
}

static ra_status live_in_world(ra_world *world, int rank, void *user) {
    team *t = (team *)user;
    const ra_transport *net = t->net[rank] ? t->net[rank] : ra_world_transport(world, rank);
    return live(t, net, rank);
}

/* Plans, one pass on the threads of a world, and what every rank got. */
static void team_attend(team *t, ra_rank_fn fn) {
    team_plans(t);
    CHECK_EQ(ra_world_run(t->s.d.ranks, fn, t, NULL), RA_OK);
    team_check(t);
}

/* -------------------------------------------------------------------------- one process */

static ra_status attend_in_world(ra_world *world, int rank, void *user) {
    team *t = (team *)user;
    ra_desc d = t->s.d;
    d.rank = rank;
    return t->status[rank] = ra_ring_once(&d, ra_world_transport(world, rank), &t->part[rank].t,
                                       RA_NO_DEADLINE);
}

TEST(world_in_one_process) {
    for (int64_t i = 0; i < 60; i++) {
        team *t;
        if (!h_case(i)) continue;
        seed_case(i);
        t = team_new(small_range(1, 8), small_range(1, 300), small_range(1, 3));
        team_attend(t, i % 2 ? attend_in_world : live_in_world);
        team_free(t);
    }
}

/* -------------------------------------------------------------------------- one rank */

/* Causal, B sequences. Call small_data and small_desc when the rest is set. */
static void one_rank(small *s, int B, int T, int keys, int offset, const int *shape) {
    small_plain(s, 1, keys, shape);
    s->p.B = B;
    s->p.q_max = T;
    s->p.q_offset = offset;
    s->p.mask.kind = RA_MASK_CAUSAL;
    for (int b = 0; b < B; b++) { s->p.tq[b] = T; s->p.tk[b] = keys; }
}

static int close_to(const small *s, int b, int head, int64_t p, const float *o) {
    double real[1024], lse;
    small_exact(&s->p, b, head, p, real, &lse);
    for (int i = 0; i < s->p.Dv; i++)
        if (!(fabs((double)o[i] - real[i]) <= 1e-5)) return 0;
    return 1;
}

TEST(simple_engine) {
    for (int64_t i = 0; i < 200; i++) {
        int shape[4], T, keys, offset, window;
        small s;
        float *out;
        if (!h_case(i)) continue;
        seed_case(i);
        shape[1] = small_range(1, 3);
        shape[0] = shape[1] * small_range(1, 3);
        shape[2] = shape[3] = small_range(1, small_chance(20) ? 256 : 20);
        T = small_chance(40) ? 1 : small_range(1, 150);
        offset = small_range(0, 70);
        keys = small_chance(70) ? T + offset : small_range(1, 200);
        window = small_chance(50) ? small_range(-1, 0) : small_range(1, 100);
        one_rank(&s, 1, T, keys, offset, shape);
        s.p.mask.window = window > 0 ? window : 0;
        s.p.scale = small_chance(50) ? 0.0f : 0.25f;
        small_data(&s);
        out = (float *)small_memory((size_t)(T * shape[0] * shape[2]) * 4);
        CHECK_EQ(ra_attention_simple(out, s.p.q, s.p.k, s.p.v, T, keys, shape[0], shape[1],
                                     shape[2], s.p.scale, window, offset), RA_OK);
        for (int t = 0; t < T; t += 1 + T / 7)
            for (int n = 0; n < shape[0]; n++)
                CHECK(close_to(&s, 0, n, offset + t, out + (t * shape[0] + n) * shape[2]));
        free(out);
        small_free(&s);
    }
}

/* All threads of a call, one after the other in random order: none may wait for another. */
static void attend_alone(const ra_desc *d, const ra_tensors *t, int nth) {
    size_t n = ra_attention_bytes(d, nth);
    uint8_t *ws = (uint8_t *)small_memory(n);
    int first = small_range(0, nth - 1);
    CHECK(n > 0);
    memset(ws, 0xCD, n);
    for (int i = 0; i < nth; i++)
        CHECK_EQ(ra_attention(d, t, ws, n, (first + i) % nth, nth), RA_OK);
    free(ws);
}

/* llm.c: one buffer [B][T][3 C], rows of q, k and v adjacent. */
TEST(llm_c) {
    static const int shape[4] = { 4, 4, 12, 12 };
    enum { B = 2, T = 150, C = 48 };
    small s;
    float *inp, *out, *lse;
    ra_desc d;
    ra_tensors t = { 0 };
    seed_case(0);
    one_rank(&s, B, T, T, 0, shape);
    small_data(&s);
    small_desc(&s);
    inp = (float *)small_memory(B * T * 3 * C * 4);
    out = (float *)small_memory(B * T * C * 4);
    lse = (float *)small_memory(B * T * 4 * 4);
    for (int i = 0; i < B * T; i++) {
        memcpy(inp + i * 3 * C, s.p.q + i * C, C * 4);
        memcpy(inp + i * 3 * C + C, s.p.k + i * C, C * 4);
        memcpy(inp + i * 3 * C + 2 * C, s.p.v + i * C, C * 4);
    }
    d = s.d;
    d.ranks = 0;
    d.kv_tokens = 0;
    d.threads = 3;
    t.q.data = inp;
    t.q.token_stride = 3 * C * 4;
    t.k = t.v = t.q;
    t.k.data = inp + C;
    t.v.data = inp + 2 * C;
    t.o.data = out;
    t.lse.data = lse;
    attend_alone(&d, &t, 3);
    for (int i = 0; i < B * T * 4; i += 5) {
        double o[12], l;
        small_exact(&s.p, i / (T * 4), i % 4, i / 4 % T, o, &l);
        CHECK(close_to(&s, i / (T * 4), i % 4, i / 4 % T, out + i * 12));
        CHECK(fabs((double)lse[i] - l) < 2e-5);
    }
    free(inp);
    free(out);
    free(lse);
    small_free(&s);
}

/* ggml: ne = [D, tokens, heads, sequences], nb in bytes with rows padded; output permuted to
 * [D, heads, tokens, sequences]. */
TEST(ggml_strides) {
    static const int shape[4] = { 6, 2, 8, 8 };
    enum { B = 2, T = 70, D = 8, H = 6, K = 2, NB1 = (D + 4) * 4 };
    small s;
    uint8_t *q, *k, *v;
    float *out;
    ra_desc d;
    ra_tensors t = { 0 };
    seed_case(0);
    one_rank(&s, B, T, T, 0, shape);
    small_data(&s);
    small_desc(&s);
    q = (uint8_t *)small_memory(B * H * T * NB1);
    k = (uint8_t *)small_memory(B * K * T * NB1);
    v = (uint8_t *)small_memory(B * K * T * NB1);
    out = (float *)small_memory(B * T * H * D * 4);
    memset(q, 0xFF, B * H * T * NB1);
    memset(k, 0xFF, B * K * T * NB1);
    memset(v, 0xFF, B * K * T * NB1);
    for (int b = 0; b < B; b++)
        for (int i = 0; i < T; i++) {
            for (int n = 0; n < H; n++)
                memcpy(q + ((b * H + n) * T + i) * NB1, s.p.q + ((b * T + i) * H + n) * D, D * 4);
            for (int n = 0; n < K; n++) {
                memcpy(k + ((b * K + n) * T + i) * NB1, s.p.k + ((b * T + i) * K + n) * D, D * 4);
                memcpy(v + ((b * K + n) * T + i) * NB1, s.p.v + ((b * T + i) * K + n) * D, D * 4);
            }
        }
    d = s.d;
    t.q.data = q; t.q.token_stride = NB1; t.q.head_stride = T * NB1; t.q.batch_stride = H * T * NB1;
    t.k.data = k; t.k.token_stride = NB1; t.k.head_stride = T * NB1; t.k.batch_stride = K * T * NB1;
    t.v = t.k;
    t.v.data = v;
    t.o.data = out; t.o.head_stride = D * 4; t.o.token_stride = H * D * 4;
    t.o.batch_stride = T * H * D * 4;
    attend_alone(&d, &t, 1);
    for (int i = 0; i < B * T * H; i += 7)
        CHECK(close_to(&s, i / (T * H), i % H, i / H % T, out + i * D));
    free(q);
    free(k);
    free(v);
    free(out);
    small_free(&s);
}

/* MLA, 576/512: V is the first 512 columns of K; a cache of f16 rows that 16 heads share; one token
 * to decode, and a few. */
TEST(mla_cache) {
    static const int shape[4] = { 16, 1, 576, 512 };
    for (int T = 1; T <= 6; T += 5) {
        enum { CACHED = 130 };
        small s;
        uint16_t *cache;
        float *out;
        ra_desc d;
        ra_tensors t = { 0 };
        seed_case(T);
        one_rank(&s, 1, T, CACHED, CACHED - T, shape);
        s.p.v_in_k = 1;
        problem_dtypes(&s.p, RA_F32, RA_F16, RA_F16, RA_F32);
        small_data(&s);
        small_desc(&s);
        cache = (uint16_t *)small_memory(CACHED * 576 * 2);
        out = (float *)small_memory((size_t)T * 16 * 512 * 4);
        for (int i = 0; i < CACHED * 576; i++) dtype_store(cache + i, s.p.k[i], RA_F16);
        d = s.d;
        t.q.data = s.p.q;
        t.k.data = cache;
        t.o.data = out;
        attend_alone(&d, &t, 2);
        for (int i = 0; i < T * 16; i++)
            CHECK(close_to(&s, 0, i % 16, CACHED - T + i / 16, out + i * 512));
        free(cache);
        free(out);
        small_free(&s);
    }
}

/* -------------------------------------------------------------------------- own threads */

TEST(main_thread_begins) {
    for (int64_t i = 0; i < 60; i++) {
        team *t;
        if (!h_case(i)) continue;
        seed_case(i);
        t = team_new(small_range(1, 4), small_range(1, 400), small_range(2, 4));
        team_attend(t, live_in_world);
        team_free(t);
    }
}

enum { CREW = 8, LAYERS = 20000, VARIANTS = 4 };

/* Passes of one rank. Each has separate memory for its output, so that a late thread may still look
 * at the result of an early pass. */
typedef struct crew {
    team *team[VARIANTS];
    const float *want[VARIANTS];
    int64_t floats;                    /* of an output */
    float *out[2];                     /* [layers][floats] of each rank */
    int ranks, threads, layers;
    int away;                          /* threads from this ith on never join */
    ra_ring *ring[2];
    int64_t bad, through[2];           /* atomics: wrong results; layers that thread 0 has ended */
    ra_status worst;                   /* the first error of any thread */
} crew;

typedef struct hand { crew *c; int rank, ith; h_rng rng; } hand;

/* Waits until thread 0 has finished: a ticket must not come before the next lower one. */
static void hand_rests(const hand *x, int layer) {
    const crew *c = x->c;
    while (__atomic_load_n(&c->through[x->rank], __ATOMIC_SEQ_CST) <= layer &&
           !__atomic_load_n(&c->worst, __ATOMIC_SEQ_CST)) sched_yield();
}

/* One thread of a ggml-like pool: no barrier anywhere. */
static void *hand_main(void *arg) {
    hand *x = (hand *)arg;
    crew *c = x->c;
    for (int layer = 0; layer < c->layers; layer++) {
        team *t = c->team[layer % VARIANTS];
        ra_tensors tensors = t->part[x->rank].t;
        float *out = c->out[x->rank] + layer * c->floats;
        ra_status s = RA_AGAIN;
        ra_job job = { 0 };
        tensors.o.data = out;
        job.ticket = 1u + (uint64_t)layer * 3u + (uint64_t)(layer / 100);
        job.plan = t->plan[x->rank];
        job.tensors = &tensors;
        if (h_one_in(&x->rng, 6)) sched_yield();
        while (s > 0 && !(x->ith && h_one_in(&x->rng, 50))) {      /* or leaves */
            s = ra_join(c->ring[x->rank], &job, x->ith);
            if (s == RA_WAIT && !h_one_in(&x->rng, 4)) sched_yield();
            else if (s == RA_WAIT) (void)ra_step_wait(c->ring[x->rank], ra_deadline_ms(2));
        }
        if (s > 0) hand_rests(x, layer);
        if (s < 0) {
            int none = RA_OK;
            __atomic_compare_exchange_n(&c->worst, &none, s, 0, __ATOMIC_SEQ_CST,
                                        __ATOMIC_SEQ_CST);
            return NULL;
        }
        if (s == RA_OK && memcmp(out, c->want[layer % VARIANTS] + x->rank * c->floats,
                                 (size_t)c->floats * 4))
            __atomic_fetch_add(&c->bad, 1, __ATOMIC_SEQ_CST);
        if (x->ith == 0) __atomic_fetch_add(&c->through[x->rank], 1, __ATOMIC_SEQ_CST);
    }
    return NULL;
}

/* What every variant must give, by ra_forward on a world. */
static void crew_wants(crew *c, int tokens) {
    for (int v = 0; v < VARIANTS; v++) {
        team *t = c->team[v] = team_full(c->ranks, tokens, CREW);
        float *want;
        t->stepping = 1;
        if (v % 2) t->s.s.layout = RA_LAYOUT_ZIGZAG;
        if (v > 1) t->s.p.mask.kind = RA_MASK_CAUSAL;
        small_desc(&t->s);
        team_plans(t);
        c->floats = t->part[0].q_rows * 2 * 8;
        for (int r = 0; r < c->ranks; r++) {
            ra_out packed = { NULL, 0, 0, 0, 0 };
            CHECK_EQ(t->part[r].q_rows, tokens / c->ranks);
            view_free(&t->part[r].o);
            view_free(&t->part[r].lse);
            t->part[r].t.o = t->part[r].t.lse = packed;
        }
        want = (float *)small_memory((size_t)(c->ranks * c->floats) * 4);
        for (int r = 0; r < c->ranks; r++) t->part[r].t.o.data = want + r * c->floats;
        CHECK_EQ(ra_world_run(c->ranks, live_in_world, t, NULL), RA_OK);
        c->want[v] = want;
    }
}

static void crew_run(crew *c) {
    pthread_t id[2 * CREW];
    hand hands[2 * CREW];
    ra_world *world;
    int n = 0;
    world = hook_world(c->ranks);
    for (int r = 0; r < c->ranks; r++) {
        ra_ring_desc rd = { 0 };
        rd.workspace_bytes = 1 << 20;
        rd.watchdog_ns = 10000000000;
        CHECK_EQ(ra_ring_create(&c->ring[r], c->team[0]->plan[r], ra_world_transport(world, r),
                                &rd), RA_OK);
        c->out[r] = (float *)small_memory((size_t)(c->layers * c->floats) * 4);
        memset(c->out[r], 0xFF, (size_t)(c->layers * c->floats) * 4);
    }
    for (int r = 0; r < c->ranks; r++)
        for (int i = 0; i < c->threads && i < c->away; i++, n++) {
            hands[n].c = c; hands[n].rank = r; hands[n].ith = i;
            hands[n].rng = h_case_rng(n);
            if (pthread_create(&id[n], NULL, hand_main, &hands[n])) abort();
        }
    while (n > 0) pthread_join(id[--n], NULL);
    CHECK_EQ(c->worst, RA_OK);
    CHECK_EQ(c->bad, 0);
    for (int r = 0; r < c->ranks; r++) {
        ra_failure f;
        if (ra_ring_failure(c->ring[r], &f) == RA_OK) printf("    %s\n", f.text);
        for (int i = 0; i < c->layers; i++)
            if (memcmp(c->out[r] + i * c->floats, c->want[i % VARIANTS] + r * c->floats,
                       (size_t)c->floats * 4)) c->bad++;
        CHECK_EQ(ra_ring_destroy(c->ring[r]), RA_OK);
        free(c->out[r]);
    }
    CHECK_EQ(c->bad, 0);
    ra_world_destroy(world);
    for (int v = 0; v < VARIANTS; v++) {
        free((void *)(uintptr_t)c->want[v]);
        team_free(c->team[v]);
    }
}

/* Rising tickets, no barrier, eight threads: some come late, some never, some leave early. */
TEST(join_by_ticket) {
    for (int k = 0; k < 4; k++) {
        crew c = { 0 };
        seed_case(k);
        c.ranks = k < 2 ? 1 : 2;
        c.threads = k < 2 ? CREW : 4;
        c.layers = k < 2 ? LAYERS : LAYERS / 8;
        c.away = k % 2 ? 3 : CREW;
        crew_wants(&c, 8 * c.ranks);
        crew_run(&c);
    }
}

/* -------------------------------------------------------------------------- other networks
 * Like MPI, between threads: nothing is held, so a send ends when its receive has the bytes. */
static mail_desc office_desc(int ranks, int level, uint32_t caps) {
    mail_desc d = { 0 };
    d.ranks = ranks;
    d.level = level;
    d.caps = caps;
    return d;
}

static void office_run(team *t, const mail_desc *d) {
    ra_transport net[MAX_RANKS];
    mail_net *w = mail_open(d, NULL);
    int64_t bytes = d->ranks > 1 ? 64 * d->ranks : 0;  /* of hellos in the first pass */
    for (int r = 0; r < d->ranks; r++) {
        net[r] = mail_transport(w, r);
        t->net[r] = &net[r];
    }
    team_attend(t, live_in_world);
    for (int r = 0; r < d->ranks; r++) {
        ra_plan_report rep;
        CHECK_EQ(ra_plan_query(t->plan[r], r, &rep), RA_OK);
        CHECK_EQ(t->counters[r].bytes_in, rep.forward.bytes_in);
        CHECK_EQ(t->counters[r].chunks_out, rep.forward.chunks_out);
        bytes += rep.forward.bytes_out;
    }
    if (d->level) CHECK_EQ(w->bytes, bytes);
    else CHECK(w->bytes >= bytes);     /* and words */
    if (d->ranks == 1) CHECK_EQ(w->calls, 0);
    CHECK_EQ(mail_close(w), 0);
}

static const int world_sizes[5] = { 1, 2, 3, 5, 8 };

static void networks(int level, uint32_t caps) {
    for (int64_t i = 0; i < 40; i++) {
        team *t;
        mail_desc d;
        if (!h_case(i)) continue;
        seed_case(i);
        t = team_new(world_sizes[i % 5], small_range(1, 400), small_range(1, 3));
        d = office_desc(t->s.d.ranks, level, (i & 1 ? RA_CAP_ANY_THREAD : 0) |
                        (i & 2 ? RA_CAP_ANY_PEER : 0));
        if (level == 0 && i & 4) d.caps |= RA_CAP_DEADLINE;
        d.caps |= caps;
        d.waits = level && i & 4;
        d.max_ops = level && !(i & 8) ? 64 : 0;
        office_run(t, &d);
        team_free(t);
    }
}

/* A transport of ten lines works: sendrecv alone, which blocks and buffers nothing. */
TEST(network_level0) { networks(0, 0); }

TEST(network_helper) { networks(0, RA_CAP_HELPER); }

TEST(network_level1) { networks(1, 0); }

/* A transport in front of the bundled one that does not have RA_CAP_SHARED: chunks are packed and
 * copied, and every bit is the same. */
TEST(wrapped_world) {
    for (int64_t i = 0; i < 40; i++) {
        team *t;
        ra_transport net[MAX_RANKS];
        ra_world *world;
        uint8_t *o[MAX_RANKS];
        int ranks = world_sizes[i % 5];
        if (!h_case(i)) continue;
        seed_case(i);
        t = team_new(ranks, small_range(1, 300), small_range(1, 2));
        team_plans(t);
        CHECK_EQ(ra_world_run(ranks, live_in_world, t, NULL), RA_OK);
        for (int r = 0; r < ranks; r++) {
            o[r] = (uint8_t *)small_memory(t->part[r].o.bytes);
            memcpy(o[r], t->part[r].o.mem, t->part[r].o.bytes);
            memset(t->part[r].o.mem, GUARD, t->part[r].o.bytes);
        }
        world = hook_world(ranks);
        for (int r = 0; r < ranks; r++) {
            net[r] = *ra_world_transport(world, r);
            net[r].caps &= ~(uint32_t)RA_CAP_SHARED;
            t->net[r] = &net[r];
        }
        CHECK_EQ(ra_world_run(ranks, live_in_world, t, NULL), RA_OK);
        team_check(t);
        for (int r = 0; r < ranks; r++) {
            CHECK_BITS(t->part[r].o.mem, o[r], t->part[r].o.bytes);
            free(o[r]);
        }
        ra_world_destroy(world);
        team_free(t);
    }
}

/* -------------------------------------------------------------------------- another kernel */

typedef struct kernel { int64_t calls, rows, lies; int fail_after; } kernel;

/* Score of row r, head n against key j of the block, from memory alone. */
static double kernel_score(const ra_block *b, int64_t r, int n, int64_t j) {
    const ra_desc *d = b->desc;
    int64_t hk = n / (d->q_heads / d->kv_heads);
    const uint8_t *q = b->q + r * b->q_token_stride + n * b->q_head_stride;
    const uint8_t *k = b->k + j * b->k_token_stride + hk * b->k_head_stride;
    double s = 0, cap = (double)d->softcap;
    for (int i = 0; i < d->k_dim; i++)
        s += (double)dtype_load(q + i * element_bytes(d->q_dtype), d->q_dtype) *
             (double)dtype_load(k + i * element_bytes(d->k_dtype), d->k_dtype);
    s *= (double)d->scale;
    if (cap > 0) s = cap * tanh(s / cap);
    if (d->scores & RA_SCORE_ALIBI)
        s -= (double)b->tensors->alibi[n] * fabs((double)(b->q_pos[r] - b->k_pos[j]));
    if ((d->scores & RA_SCORE_BIAS) && b->k_pos[j] < b->tensors->bias.keys) {
        const ra_bias *x = &b->tensors->bias;
        const uint8_t *at = (const uint8_t *)x->data + b->sequence * x->batch_step +
                            n * x->head_step + (b->q_row + r) * x->row_step +
                            b->k_pos[j] * x->key_step;
        s += (double)dtype_load(at, RA_F32) *
             (b->tensors->bias_factors ? (double)b->tensors->bias_factors[n] : 1);
    }
    return s;
}

static int kernel_sees(const ra_block *b, int64_t r, int64_t j) {
    int32_t k = b->k_pos[j];
    return k >= 0 && ((k >= b->lo[r] && k < b->hi[r]) || (k >= b->doc[r] && k < b->keep_end[r]));
}

static void kernel_row(const ra_block *b, int64_t r, int n, kernel *x) {
    const ra_desc *d = b->desc;
    int64_t hk = n / (d->q_heads / d->kv_heads);
    double acc[16] = { 0 }, max = -HUGE_VAL, sum = 0;
    float *o = b->o + (r * d->q_heads + n) * d->v_dim;
    for (int64_t j = 0; j < b->k_rows; j++) {
        int sees = kernel_sees(b, r, j);
        if (!b->partial && !sees) __atomic_fetch_add(&x->lies, 1, __ATOMIC_SEQ_CST);
        if (sees && kernel_score(b, r, n, j) > max) max = kernel_score(b, r, n, j);
    }
    for (int64_t j = 0; j < b->k_rows; j++) {
        const uint8_t *v = b->v + j * b->v_token_stride + hk * b->v_head_stride;
        int dtype = d->v_in_k ? d->k_dtype : d->v_dtype;
        double p;
        if (!kernel_sees(b, r, j)) continue;
        p = exp(kernel_score(b, r, n, j) - max);
        sum += p;
        for (int i = 0; i < d->v_dim; i++)
            acc[i] += p * (double)dtype_load(v + i * element_bytes(dtype), dtype);
    }
    for (int i = 0; i < d->v_dim; i++) o[i] = sum > 0 ? (float)(acc[i] / sum) : 0.0f;
    b->lse[r * d->q_heads + n] = sum > 0 ? (float)(max + log(sum)) : -HUGE_VALF;
}

static int kernel_fold(void *ctx, const ra_block *b) {
    kernel *x = (kernel *)ctx;
    int64_t call = __atomic_fetch_add(&x->calls, 1, __ATOMIC_SEQ_CST);
    if (x->fail_after && call >= x->fail_after) return -77;
    __atomic_fetch_add(&x->rows, b->q_rows, __ATOMIC_SEQ_CST);
    if (b->thread < 0 || b->thread >= b->desc->threads || b->q_rows < 1 || b->k_rows < 1)
        __atomic_fetch_add(&x->lies, 1, __ATOMIC_SEQ_CST);
    for (int64_t r = 0; r < b->q_rows; r++)
        for (int n = 0; n < b->desc->q_heads; n++) kernel_row(b, r, n, x);
    return RA_OK;
}

static void kernel_engine(ra_engine *e, kernel *x) {
    memset(e, 0, sizeof *e);
    memset(x, 0, sizeof *x);
    e->size = sizeof *e;
    e->abi = RA_ENGINE_ABI;
    e->block_queries = 64 * small_range(0, 3);
    e->ctx = x;
    e->fold = kernel_fold;
}

TEST(another_kernel) {
    int called = 0;
    for (int64_t i = 0; i < 120; i++) {
        team *t;
        ra_engine e;
        kernel x;
        if (!h_case(i)) continue;
        seed_case(i);
        t = team_new(small_range(1, 5), small_range(1, 200), small_range(1, 3));
        kernel_engine(&e, &x);
        t->s.d.engine = &e;
        team_attend(t, live_in_world);
        CHECK_EQ(x.lies, 0);
        called += x.calls > 0;
        team_free(t);
    }
    if (h_run.only_case < 0) CHECK(called > 60);
}

TEST(kernel_fails) {
    for (int64_t i = 0; i < 20; i++) {
        team *t;
        ra_engine e;
        kernel x;
        int found = 0;
        if (!h_case(i)) continue;
        seed_case(i);
        t = team_full(small_range(1, 4), 300, small_range(1, 3));
        kernel_engine(&e, &x);
        x.fail_after = small_range(1, 3);
        t->s.d.engine = &e;
        team_plans(t);
        CHECK_EQ(ra_world_run(t->s.d.ranks, live_in_world, t, NULL), RA_E_ENGINE);
        for (int r = 0; r < t->s.d.ranks; r++) {
            found += t->status[r] == RA_E_ENGINE;
            if (t->status[r] == RA_E_ENGINE) CHECK_EQ(t->failure[r].code, -77);
            CHECK(t->status[r] == RA_E_ENGINE || t->status[r] == RA_E_ABORTED);
        }
        CHECK(found > 0);
        team_free(t);
    }
}

/* -------------------------------------------------------------------------- watching */

typedef struct watcher {
    int64_t count[RA_EV_ABORT + 1], tiles, bytes[2], last_done, last_all, backwards, odd;
    int busy;
} watcher;

static void watch_event(void *ctx, const ra_event *e) {
    watcher *w = (watcher *)ctx;
    if (e->kind < RA_EV_TILE || e->kind > RA_EV_ABORT || e->end_ns < e->begin_ns || e->pass < 1)
        __atomic_fetch_add(&w->odd, 1, __ATOMIC_SEQ_CST);
    else __atomic_fetch_add(&w->count[e->kind], 1, __ATOMIC_SEQ_CST);
    if (e->kind == RA_EV_TILE) __atomic_fetch_add(&w->tiles, e->tiles, __ATOMIC_SEQ_CST);
    if (e->kind == RA_EV_RECV) __atomic_fetch_add(&w->bytes[0], e->bytes, __ATOMIC_SEQ_CST);
    if (e->kind == RA_EV_SEND) __atomic_fetch_add(&w->bytes[1], e->bytes, __ATOMIC_SEQ_CST);
}

/* One thread at a time, and never backwards. */
static void watch_progress(void *ctx, int64_t done, int64_t all) {
    watcher *w = (watcher *)ctx;
    if (__atomic_exchange_n(&w->busy, 1, __ATOMIC_SEQ_CST)) w->odd++;
    if (done < w->last_done || done > all) w->backwards++;
    w->last_done = done;
    w->last_all = all;
    __atomic_store_n(&w->busy, 0, __ATOMIC_SEQ_CST);
}

TEST(trace_and_progress) {
    for (int64_t i = 0; i < 40; i++) {
        watcher all[MAX_RANKS];
        team *t;
        if (!h_case(i)) continue;
        seed_case(i);
        memset(all, 0, sizeof all);
        t = team_new(world_sizes[i % 5], small_range(1, 400), small_range(1, 3));
        for (int r = 0; r < t->s.d.ranks; r++) {
            t->rd[r].trace = watch_event;
            t->rd[r].progress = watch_progress;
            t->rd[r].trace_ctx = t->rd[r].progress_ctx = &all[r];
        }
        team_attend(t, live_in_world);
        for (int r = 0; r < t->s.d.ranks; r++) {
            const watcher *w = &all[r];
            const ra_ring_counters *c = &t->counters[r];
            ra_plan_report rep;
            CHECK_EQ(ra_plan_query(t->plan[r], r, &rep), RA_OK);
            CHECK_EQ(w->tiles, rep.forward.tiles_partial + rep.forward.tiles_full);
            CHECK_EQ(w->tiles, c->tiles_all);
            CHECK_EQ(w->count[RA_EV_PASS], 1);
            CHECK_EQ(w->count[RA_EV_FAIL], 0);
            CHECK_EQ(w->count[RA_EV_RECV], rep.forward.chunks_in);
            CHECK_EQ(w->count[RA_EV_SEND], rep.forward.chunks_out);
            CHECK_EQ(w->count[RA_EV_BEGIN], 1);
            CHECK_EQ(w->count[RA_EV_POST_SEND],
                     w->count[RA_EV_SEND] + w->count[RA_EV_SEND_CONTROL]);
            CHECK_EQ(w->count[RA_EV_POST_RECV],
                     w->count[RA_EV_RECV] + w->count[RA_EV_RECV_CONTROL]);
            CHECK_EQ(w->count[RA_EV_ABORT], 0);
            CHECK_EQ(c->chunks_in, rep.forward.chunks_in);
            CHECK_EQ(c->bytes_in, rep.forward.shared_bytes_in);
            CHECK_EQ(w->odd, 0);
            CHECK_EQ(w->backwards, 0);
            CHECK(w->last_done == w->last_all && w->last_all == c->tiles_all);
        }
        team_free(t);
    }
}

/* -------------------------------------------------------------------------- what goes wrong */

typedef struct brake { ra_ring *ring; ra_world *world; int reached, pulled; } brake;

/* The pass continues only after it has been cancelled. */
static void brake_progress(void *ctx, int64_t done, int64_t all) {
    brake *b = (brake *)ctx;
    if (done == all) return;
    __atomic_store_n(&b->reached, 1, __ATOMIC_SEQ_CST);
    while (!__atomic_load_n(&b->pulled, __ATOMIC_SEQ_CST)) sched_yield();
}

static void *brake_main(void *arg) {
    brake *b = (brake *)arg;
    while (!__atomic_load_n(&b->reached, __ATOMIC_SEQ_CST)) sched_yield();
    ra_ring_cancel(b->ring);
    ra_world_leave(b->world, 1, RA_OK);        /* nobody is there to say that it reads no more */
    __atomic_store_n(&b->pulled, 1, __ATOMIC_SEQ_CST);
    return NULL;
}

/* A large pass in progress, cancelled from another thread; and a pass that waits for a rank that
 * never comes. */
TEST(cancel_from_another_thread) {
    for (int ranks = 1; ranks <= 2; ranks++) {
        team *t = (seed_case(ranks), team_full(ranks, 2000, 1));
        ra_world *world;
        ra_ring_desc rd = { 0 };
        ra_ring *ring = NULL;
        ra_failure f;
        pthread_t id;
        brake b = { 0 };
        team_plans(t);
        world = hook_world(ranks);
        rd.progress = brake_progress;
        rd.progress_ctx = &b;
        CHECK_EQ(ra_ring_create(&ring, t->plan[0], ra_world_transport(world, 0), &rd), RA_OK);
        b.ring = ring;
        b.world = world;
        if (pthread_create(&id, NULL, brake_main, &b)) abort();
        CHECK_EQ(ra_forward(t->plan[0], ring, &t->part[0].t, RA_NO_DEADLINE), RA_E_CANCELLED);
        pthread_join(id, NULL);
        CHECK_EQ(ra_ring_failure(ring, &f), RA_OK);
        CHECK_EQ(f.status, RA_E_CANCELLED);
        CHECK(ra_forward(t->plan[0], ring, &t->part[0].t, RA_NO_DEADLINE) < 0);
        CHECK_EQ(ra_ring_destroy(ring), RA_OK);
        ra_world_destroy(world);
        team_free(t);
    }
}

enum { HOW_BEFORE, HOW_AFTER, HOW_NEVER, HOW_CANCEL, HOW_NEVER_OK, HOW_DEADLINE, HOWS };

static ra_status misbehave(ra_world *world, int rank, void *user) {
    team *t = (team *)user;
    ra_status s;
    if (rank != t->broken) return live_in_world(world, rank, user);
    if (t->how == HOW_BEFORE) return t->status[rank] = RA_E_IO;
    if (t->how == HOW_NEVER) return t->status[rank] = RA_E_SHAPE;
    if (t->how == HOW_NEVER_OK) return t->status[rank] = RA_OK;
    if (t->how == HOW_AFTER) {
        s = live_in_world(world, rank, user);
        return t->status[rank] = s ? s : RA_E_NOMEM;
    }
    if (t->how == HOW_CANCEL) {
        ra_ring *ring = NULL;
        ra_job job = { 0 };
        job.plan = t->plan[rank];
        job.tensors = &t->part[rank].t;
        if (ra_ring_create(&ring, t->plan[rank], ra_world_transport(world, rank), NULL))
            return RA_E_NOMEM;
        s = ra_begin(ring, &job);
        for (int i = 0; i < 3 && s >= 0; i++) s = ra_step(ring, 0);   /* far from done */
        ra_ring_cancel(ring);
        while (s >= 0) s = ra_step(ring, 0);
        (void)ra_ring_destroy(ring);
        return t->status[rank] = s;
    }
    for (int i = 0; i < 3000; i++) {           /* later than every deadline */
        struct timespec nap = { 0, 100000 };
        nanosleep(&nap, NULL);
    }
    return t->status[rank] = live_in_world(world, rank, user);
}

/* The failure of one rank reaches all others as an error, and none hangs. */
TEST(one_rank_fails) {
    for (int64_t i = 0; i < 10 * HOWS; i++) {
        team *t;
        ra_status all;
        if (!h_case(i)) continue;
        seed_case(i);
        t = team_full(small_range(2, 5), 600, small_range(1, 2));
        t->how = (int)(i % HOWS);
        t->broken = small_range(0, t->s.d.ranks - 1);
        if (t->how == HOW_DEADLINE) {
            if (i >= HOWS * 2) { team_free(t); continue; }
            t->deadline_ms = 20;
        }
        h_context("P %d threads %d rank %d how %d", t->s.d.ranks, t->stepping, t->broken, t->how);
        team_plans(t);
        all = ra_world_run(t->s.d.ranks, misbehave, t, NULL);
        if (t->how == HOW_BEFORE) CHECK_EQ(all, RA_E_IO);
        if (t->how == HOW_NEVER) CHECK_EQ(all, RA_E_SHAPE);
        if (t->how == HOW_AFTER) CHECK_EQ(all, RA_E_NOMEM);
        if (t->how == HOW_CANCEL) CHECK_EQ(all, RA_E_CANCELLED);
        if (t->how == HOW_NEVER_OK) CHECK_EQ(all, RA_E_PEER);
        if (t->how == HOW_DEADLINE) CHECK_EQ(all, RA_E_TIMEOUT);
        for (int r = 0; r < t->s.d.ranks; r++) {
            int s = t->status[r], told = s == RA_E_ABORTED || s == RA_E_PEER;
            if (r == t->broken) continue;
            h_context("how %d rank %d: %s (rank %d)", t->how, r, ra_status_text(s), t->broken);
            if (t->how == HOW_AFTER) CHECK(s == RA_OK || s == RA_E_ABORTED);
            else if (t->how == HOW_DEADLINE) CHECK(s == RA_E_TIMEOUT || told);
            else if (t->how == HOW_NEVER_OK) CHECK(s == RA_E_PEER || s == RA_E_ABORTED);
            else CHECK_EQ(s, RA_E_ABORTED);
        }
        team_free(t);
    }
}

/* On a network whose calls end only by deadlines, the deadline finds the missing rank. */
TEST(deadline_at_level0) {
    for (int threads = 1; threads <= 2; threads++) {
        team *t = (seed_case(threads), team_full(3, 600, threads));
        ra_transport net[3];
        mail_desc d = office_desc(3, 0, RA_CAP_DEADLINE | RA_CAP_ANY_THREAD);
        mail_net *w = mail_open(&d, NULL);
        team_plans(t);
        t->broken = 1;
        t->how = HOW_NEVER_OK;
        t->deadline_ms = 100;
        for (int r = 0; r < 3; r++) {
            net[r] = mail_transport(w, r);
            t->net[r] = &net[r];
        }
        CHECK_EQ(ra_world_run(3, misbehave, t, NULL), RA_E_TIMEOUT);
        CHECK_EQ(t->status[0], RA_E_TIMEOUT);
        CHECK_EQ(t->status[2], RA_E_TIMEOUT);
        CHECK_EQ(mail_close(w), 0);
        team_free(t);
    }
}

int main(int argc, char **argv) {
    static const h_test tests[] = {
        ENTRY(world_in_one_process), ENTRY(simple_engine), ENTRY(llm_c), ENTRY(ggml_strides),
        ENTRY(mla_cache), ENTRY(main_thread_begins), ENTRY(join_by_ticket), ENTRY(network_level0),
        ENTRY(network_helper),
        ENTRY(network_level1), ENTRY(wrapped_world), ENTRY(another_kernel), ENTRY(kernel_fails),
        ENTRY(trace_and_progress), ENTRY(cancel_from_another_thread), ENTRY(one_rank_fails),
        ENTRY(deadline_at_level0),
    };
    return hook_main(argc, argv, tests, sizeof tests / sizeof tests[0]);
}
