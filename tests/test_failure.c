/* How passes end: every call that a ring makes of a transport, on which thread and by which clock,
 * what a failure leaves behind, and what each thread then gets. Callbacks of the test stand between
 * the library's steps, so that an order of events is made and never waited for. */
#define _DEFAULT_SOURCE 1
#include "harness.h"
#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

static int assert_failures;
static int assert_failed(const char *what, int line)
{
    if (assert_failures++ == 0) printf("ringattn.h:%d: assertion: %s\n", line, what);
    return 0;
}
#define RINGATTN_ASSERT(x) ((x) ? (void)0 : (void)assert_failed(#x, __LINE__))
#define RINGATTN_IMPLEMENTATION
#include "ringattn.h"

/* -------------------------------------------------------------------------- a problem
 * Every rank needs keys of every other; the values are any. `want` is what one rank computes. */
enum { RANKS = 4, HEADS = 2, DIM = 8 };
typedef struct rig {
    ra_desc d;
    int64_t rows;                      /* of a rank */
    float *q, *k, *v, *o, *want;       /* [tokens][HEADS][DIM], a rank's rows together */
    float sinks[RANKS][HEADS];
    ra_plan *plan[RANKS];
    ra_tensors t[RANKS];
} rig;

static void rig_desc(ra_desc *d, int ranks, int64_t tokens, int threads)
{
    memset(d, 0, sizeof *d);
    d->ranks = ranks;
    d->threads = threads;
    d->tokens = tokens;
    d->q_heads = d->kv_heads = HEADS;
    d->k_dim = d->v_dim = DIM;
    d->q_dtype = d->k_dtype = d->v_dtype = d->o_dtype = RA_F32;
    d->chunk_tokens = 64;
    d->mask.kind = RA_MASK_NONE;
    d->layout.kind = RA_LAYOUT_CONTIGUOUS;
}

static void rig_plans(rig *g)
{
    for (int r = 0; r < g->d.ranks; r++) {
        ra_desc d = g->d;
        d.rank = r;
        CHECK_EQ(ra_plan_create(&g->plan[r], &d, NULL), RA_OK);
    }
}

/* tokens: a multiple of 64 times ranks. */
static rig *rig_new(int ranks, int64_t tokens, int threads)
{
    rig *g = (rig *)calloc(1, sizeof *g);
    int64_t row = HEADS * DIM, n = tokens * row;
    h_rng rng = h_case_rng(0);
    ra_desc one;
    ra_tensors t;
    if (!g) abort();
    rig_desc(&g->d, ranks, tokens, threads);
    g->rows = tokens / ranks;
    g->q = (float *)malloc((size_t)n * 5 * sizeof(float));
    if (!g->q) abort();
    g->k = g->q + n;
    g->v = g->k + n;
    g->o = g->v + n;
    g->want = g->o + n;
    for (int64_t i = 0; i < 3 * n; i++) g->q[i] = h_normal(&rng);
    for (int r = 0; r < ranks; r++) {
        g->t[r].q.data = g->q + r * g->rows * row;
        g->t[r].k.data = g->k + r * g->rows * row;
        g->t[r].v.data = g->v + r * g->rows * row;
        g->t[r].o.data = g->o + r * g->rows * row;
    }
    memset(&t, 0, sizeof t);
    t.q.data = g->q; t.k.data = g->k; t.v.data = g->v; t.o.data = g->want;
    one = g->d;
    one.ranks = 1;
    CHECK_EQ(ra_attend(&one, NULL, &t, RA_NO_DEADLINE), RA_OK);
    memset(g->o, 0xFF, (size_t)n * sizeof(float));
    rig_plans(g);
    return g;
}

static void rig_free(rig *g)
{
    for (int r = 0; r < g->d.ranks; r++) ra_plan_destroy(g->plan[r]);
    free(g->q);
    free(g);
}

static void rig_check(const rig *g)
{
    CHECK_BITS(g->o, g->want, g->d.tokens * HEADS * DIM * 4);
}

static ra_job rig_job(const rig *g, int rank)
{
    ra_job job;
    memset(&job, 0, sizeof job);
    job.plan = g->plan[rank];
    job.tensors = &g->t[rank];
    return job;
}

/* -------------------------------------------------------------------------- a memory network
 * Post and poll over mailboxes, which may lie in memory that two processes share. Nothing blocks;
 * a mailbox has one sender and one receiver. */
enum { BOX_SLOTS = 16, BOX_BYTES = 16384, BOX_OPS = 64 };
typedef struct box {
    int64_t in, out;                   /* atomics: messages put in and taken out */
    struct { size_t len; unsigned char bytes[BOX_BYTES]; } slot[BOX_SLOTS];
} box;
typedef struct boxes { box to[RANKS][RANKS][2]; int64_t end[RANKS]; } boxes;  /* [from][to] */

typedef struct box_end {
    boxes *all;
    int rank, waiting;
    ra_op *ops[BOX_OPS];               /* accepted receives, oldest first */
} box_end;

static int box_put(box *b, const ra_op *op)
{
    int64_t in = __atomic_load_n(&b->in, __ATOMIC_ACQUIRE);
    if (in - __atomic_load_n(&b->out, __ATOMIC_ACQUIRE) == BOX_SLOTS) return 0;
    if (op->len > BOX_BYTES) abort();
    b->slot[in % BOX_SLOTS].len = op->len;
    memcpy(b->slot[in % BOX_SLOTS].bytes, op->buf, op->len);
    __atomic_store_n(&b->in, in + 1, __ATOMIC_RELEASE);
    return 1;
}

static int box_take(box *b, ra_op *op)
{
    int64_t out = __atomic_load_n(&b->out, __ATOMIC_ACQUIRE);
    if (out == __atomic_load_n(&b->in, __ATOMIC_ACQUIRE)) return 0;
    op->state = b->slot[out % BOX_SLOTS].len == op->len ? RA_OP_DONE : RA_E_TRUNC;
    if (op->state == RA_OP_DONE) memcpy(op->buf, b->slot[out % BOX_SLOTS].bytes, op->len);
    __atomic_store_n(&b->out, out + 1, __ATOMIC_RELEASE);
    return 1;
}

static int box_post(void *ctx, ra_op *const *ops, int n)
{
    box_end *e = (box_end *)ctx;
    int left = 0, full[RANKS][2] = { { 0 } };
    for (int i = 0; i < n; i++) {
        ra_op *op = ops[i];
        if (op->state != RA_OP_IDLE) continue;
        if (op->kind == RA_OP_RECV) {
            if (e->waiting == BOX_OPS) abort();
            op->state = RA_OP_PENDING;
            e->ops[e->waiting++] = op;
        } else if (!full[op->peer][op->channel] &&
                   box_put(&e->all->to[e->rank][op->peer][op->channel], op)) {
            op->state = RA_OP_DONE;
        } else {
            left = full[op->peer][op->channel] = 1;
        }
    }
    return left ? RA_AGAIN : RA_OK;
}

static int box_poll(void *ctx, ra_op *const *ops, int n)
{
    box_end *e = (box_end *)ctx;
    int keep = 0, behind[RANKS][2] = { { 0 } };
    (void)ops, (void)n;
    for (int i = 0; i < e->waiting; i++) {
        ra_op *op = e->ops[i];
        if (!behind[op->peer][op->channel] &&
            box_take(&e->all->to[op->peer][e->rank][op->channel], op)) continue;
        behind[op->peer][op->channel] = 1;
        e->ops[keep++] = op;
    }
    e->waiting = keep;
    return RA_OK;
}

static int nothing_abort(void *ctx, int why) { (void)ctx, (void)why; return RA_OK; }
static int nothing_quiesce(void *ctx, int64_t until) { (void)ctx, (void)until; return RA_OK; }

static ra_transport box_transport(box_end *e, boxes *all, int rank, uint32_t caps)
{
    ra_transport t;
    memset(e, 0, sizeof *e);
    e->all = all;
    e->rank = rank;
    memset(&t, 0, sizeof t);
    t.size = (uint32_t)sizeof t;
    t.abi = RA_TRANSPORT_ABI;
    t.caps = caps | RA_CAP_ANY_PEER | RA_CAP_ANY_THREAD;
    t.channels = 2;
    t.max_ops = BOX_OPS;
    t.ctx = e;
    t.post = box_post;
    t.poll = box_poll;
    t.abort = nothing_abort;
    t.quiesce = nothing_quiesce;
    return t;
}

static boxes *boxes_new(void)
{
    void *p = mmap(NULL, sizeof(boxes), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) abort();
    return (boxes *)p;
}

/* Steps `ranks` rings on this thread until all have ended; status[r] is how. */
static void step_all(ra_ring *const *ring, int ranks, ra_status *status)
{
    int left = ranks;
    for (int r = 0; r < ranks; r++) status[r] = RA_AGAIN;
    while (left > 0) {
        left = 0;
        for (int r = 0; r < ranks; r++) {
            if (status[r] > 0) status[r] = ra_step(ring[r], 0, 1);
            left += status[r] > 0;
        }
    }
}

/* -------------------------------------------------------------------------- address spaces */

static ra_status one_rank(rig *g, boxes *all, int rank, ra_failure *why)
{
    ra_ring *ring = NULL;
    ra_ring_desc rd;
    ra_transport net;
    box_end end;
    ra_status s;
    memset(&rd, 0, sizeof rd);
    net = box_transport(&end, all, rank, RA_CAP_SHARED);
    s = ra_ring_create(&ring, g->plan[rank], &net, &rd);
    if (s) return s;
    s = ra_forward(g->plan[rank], ring, &g->t[rank], RA_NO_DEADLINE);
    (void)ra_ring_failure(ring, why);
    (void)ra_ring_destroy(ring);
    return s;
}

static int names_the_space(const ra_failure *f)
{
    return f->status == RA_E_MISMATCH && strstr(f->text, "address space") != NULL;
}

/* A forked child has the parent's memory at the parent's addresses: what they lead to there can be
 * read, and is not what the parent has. */
TEST(shared_between_processes)
{
    rig *g = rig_new(2, 256, 1);
    boxes *all = boxes_new();
    ra_failure why;
    ra_status s;
    pid_t child;
    int ended = 0;
    memset(&why, 0, sizeof why);
    fflush(stdout);
    child = fork();
    if (child < 0) abort();
    if (child == 0) {
        s = one_rank(g, all, 1, &why);
        all->end[1] = names_the_space(&why) ? s : -999;
        _exit(0);
    }
    s = one_rank(g, all, 0, &why);
    CHECK(waitpid(child, &ended, 0) == child);
    CHECK_EQ(s, RA_E_MISMATCH);
    if (!CHECK(names_the_space(&why))) printf("    %s\n", why.text);
    CHECK_EQ(all->end[1], RA_E_MISMATCH);
    munmap(all, sizeof *all);
    rig_free(g);
}

/* The same network between ranks of one process is what RA_CAP_SHARED is for. */
TEST(shared_in_one_process)
{
    rig *g = rig_new(3, 384, 1);
    boxes *all = boxes_new();
    ra_ring *ring[3];
    ra_transport net[3];
    box_end end[3];
    ra_status s[3];
    for (int r = 0; r < 3; r++) {
        ra_job job = rig_job(g, r);
        net[r] = box_transport(&end[r], all, r, RA_CAP_SHARED);
        CHECK_EQ(ra_ring_create(&ring[r], g->plan[r], &net[r], NULL), RA_OK);
        CHECK_EQ(ra_begin(ring[r], &job), RA_OK);
    }
    step_all(ring, 3, s);
    for (int r = 0; r < 3; r++) {
        CHECK_EQ(s[r], RA_OK);
        CHECK_EQ(ra_ring_destroy(ring[r]), RA_OK);
    }
    rig_check(g);
    munmap(all, sizeof *all);
    rig_free(g);
}

/* -------------------------------------------------------------------------- what begin reads */

/* ra_begin copies pointers: sinks that are there before the first step are in time. */
TEST(begin_reads_no_sinks)
{
    rig *g = rig_new(2, 256, 1);
    boxes *all = boxes_new();
    ra_ring *ring[2];
    ra_transport net[2];
    box_end end[2];
    ra_status s[2];
    for (int r = 0; r < 2; r++) {
        ra_plan_destroy(g->plan[r]);
        for (int h = 0; h < HEADS; h++) g->sinks[r][h] = (float)r;
        g->t[r].sinks = g->sinks[r];
    }
    g->d.scores = RA_SCORE_SINKS;
    rig_plans(g);
    for (int r = 0; r < 2; r++) {
        ra_job job = rig_job(g, r);
        net[r] = box_transport(&end[r], all, r, 0);
        CHECK_EQ(ra_ring_create(&ring[r], g->plan[r], &net[r], NULL), RA_OK);
        CHECK_EQ(ra_begin(ring[r], &job), RA_OK);
    }
    memcpy(g->sinks[1], g->sinks[0], sizeof g->sinks[0]);
    step_all(ring, 2, s);
    for (int r = 0; r < 2; r++) {
        CHECK_EQ(s[r], RA_OK);
        CHECK_EQ(ra_ring_destroy(ring[r]), RA_OK);
    }
    munmap(all, sizeof *all);
    rig_free(g);
}

/* -------------------------------------------------------------------------- clocks
 * The ring's clock stands still at a time of the test's choice. What a callback of the transport
 * gets is held against ra_now_ns() before and after the call. */
static const int64_t YEARS = (int64_t)10 * 365 * 86400 * 1000000000, SECOND = 1000000000;

static int64_t still_clock(void *ctx) { return *(const int64_t *)ctx; }

typedef struct alarm_call { int64_t until; int calls; } alarm_call;

static int expire_sendrecv(void *ctx, int to, const void *s, size_t s_len, int from, void *r,
                           size_t r_len, uint64_t tag, int64_t deadline_ns)
{
    alarm_call *a = (alarm_call *)ctx;
    (void)to, (void)s, (void)s_len, (void)from, (void)r, (void)r_len, (void)tag;
    a->until = deadline_ns;
    a->calls++;
    return RA_E_TIMEOUT;
}

static int late_quiesce(void *ctx, int64_t deadline_ns)
{
    alarm_call *a = (alarm_call *)ctx;
    a->until = deadline_ns;
    a->calls++;
    return RA_OK;
}

/* until is `left` after a time between `before` and now; saturated. */
static int is_left(int64_t until, int64_t before, int64_t left)
{
    int64_t now = ra_now_ns();
    int64_t least = left > INT64_MAX - before ? INT64_MAX : before + left;
    int64_t most = left > INT64_MAX - now ? INT64_MAX : now + left;
    if (left < 0 && until <= now) return 1;        /* how long ago does not matter */
    return until >= (least > 0 ? least : 1) && until <= (most > 0 ? most : 1);
}

/* One pass at level 0 that times out in its first exchange: RA_E_PEER if that is the watchdog's
 * time, RA_E_TIMEOUT if it is the call's; then ra_finish. left: of the two, in ns. */
static void one_clock(const rig *g, int64_t *clock, const ra_ring_desc *times, int64_t deadline)
{
    alarm_call a = { 0, 0 };
    ra_ring_desc rd = *times;
    ra_ring *ring = NULL;
    ra_transport net;
    ra_job job = rig_job(g, 0);
    int64_t before, left = rd.watchdog_ns, now = clock ? *clock : ra_now_ns();
    ra_status s;
    rd.clock_ns = clock ? still_clock : NULL;
    rd.clock_ctx = clock;
    memset(&net, 0, sizeof net);
    net.size = (uint32_t)sizeof net;
    net.abi = RA_TRANSPORT_ABI;
    net.caps = RA_CAP_DEADLINE;
    net.ctx = &a;
    net.sendrecv = expire_sendrecv;
    net.abort = nothing_abort;
    net.quiesce = late_quiesce;
    job.deadline_ns = deadline;
    if (deadline && deadline - now < left) left = deadline - now;
    CHECK_EQ(ra_ring_create(&ring, g->plan[0], &net, &rd), RA_OK);
    CHECK_EQ(ra_begin(ring, &job), RA_OK);
    before = clock ? ra_now_ns() : now;
    while ((s = ra_step(ring, 0, 1)) > 0) { }
    CHECK_EQ(s, left == rd.watchdog_ns ? RA_E_PEER : RA_E_TIMEOUT);
    CHECK_EQ(a.calls, 1);
    CHECK(is_left(a.until, before, left));
    before = ra_now_ns();
    CHECK_EQ(ra_finish(ring, RA_NO_DEADLINE), s);
    CHECK_EQ(a.calls, 2);
    CHECK(is_left(a.until, before, rd.quiesce_ns));
    CHECK_EQ(ra_ring_destroy(ring), RA_OK);
}

/* A ring on a clock that is years off, either way, negative or at the end of its numbers. */
TEST(deadlines_on_another_clock)
{
    rig *g = rig_new(2, 256, 1);
    static const int64_t longest[3] = { 5000000000, 1, INT64_MAX };
    for (int i = 0; i < 3; i++) {
        int64_t clock[6] = { 0, 1, 0, INT64_MAX - 5, -5, INT64_MIN };
        ra_ring_desc rd;
        memset(&rd, 0, sizeof rd);
        rd.watchdog_ns = rd.quiesce_ns = longest[i];
        clock[0] = ra_now_ns() + YEARS;
        clock[2] = ra_now_ns() - YEARS;
        if (longest[i] > 1) one_clock(g, NULL, &rd, RA_NO_DEADLINE);
        for (int k = 0; k < 6; k++) {
            one_clock(g, &clock[k], &rd, RA_NO_DEADLINE);
            if (clock[k] > 0 && clock[k] < INT64_MAX - 5)
                one_clock(g, &clock[k], &rd, clock[k] + 3 * SECOND);
        }
    }
    rig_free(g);
}

static void *leave_later(void *arg)
{
    sched_yield();
    ra_world_leave((ra_world *)arg, 1, RA_OK);
    return NULL;
}

/* The bundled world waits in quiesce on its own clock: not for ever with one that is ahead, and
 * long enough with one that is behind. */
TEST(quiesce_of_the_world_on_another_clock)
{
    rig *g = rig_new(2, 256, 1);
    for (int i = 0; i < 4; i++) {
        int64_t clock = ra_now_ns() + (i % 2 ? YEARS : -YEARS);
        ra_world *world = NULL;
        ra_world_desc wd;
        ra_ring_desc rd;
        ra_ring *ring = NULL;
        ra_job job = rig_job(g, 0);
        pthread_t id;
        memset(&wd, 0, sizeof wd);
        memset(&rd, 0, sizeof rd);
        wd.ranks = 2;
        rd.clock_ns = still_clock;
        rd.clock_ctx = &clock;
        rd.quiesce_ns = i < 2 ? 1 : INT64_MAX;
        CHECK_EQ(ra_world_create(&world, &wd), RA_OK);
        CHECK_EQ(ra_ring_create(&ring, g->plan[0], ra_world_transport(world, 0), &rd), RA_OK);
        CHECK_EQ(ra_begin(ring, &job), RA_OK);
        CHECK_EQ(ra_step(ring, 0, 1), RA_AGAIN);
        ra_ring_cancel(ring);
        CHECK_EQ(ra_step(ring, 0, 1), RA_E_CANCELLED);
        if (i < 2) {
            CHECK_EQ(ra_finish(ring, RA_NO_DEADLINE), RA_E_UNSAFE);
            continue;                  /* ring and world are leaked on purpose */
        }
        if (pthread_create(&id, NULL, leave_later, world)) abort();
        CHECK_EQ(ra_finish(ring, RA_NO_DEADLINE), RA_E_CANCELLED);
        pthread_join(id, NULL);
        CHECK_EQ(ra_ring_destroy(ring), RA_OK);
        ra_world_destroy(world);
    }
    rig_free(g);
}

/* -------------------------------------------------------------------------- patience */

/* A plan of rank 0, and the most tiles that are not empty which any rank's report has. */
static int64_t most_tiles(const ra_plan *plan, int backward)
{
    ra_plan_report rep;
    int64_t most = 0;
    for (int r = 0; ra_plan_query(plan, r, &rep) == RA_OK; r++) {
        int64_t n = backward ? rep.back_tiles_partial + rep.back_tiles_full
                             : rep.tiles_partial + rep.tiles_full;
        if (n > most) most = n;
    }
    return most;
}

/* What the default watchdog waits if `tiles` tiles here have taken `ns` each, beyond 60 s. */
static int64_t patience_of(const ra_plan *plan, int pass, int64_t tiles, int64_t ns)
{
    ra_ring ring;
    memset(&ring, 0, sizeof ring);
    ring.plan = plan;
    ring.route = pass == RA_PASS_BACKWARD ? &plan->back : &plan->forward;
    ring.counters.tiles_full = tiles;
    ring.counters.compute_ns = tiles * ns;
    return ra__ring_patience(&ring) - 60 * SECOND;
}

/* Beyond 60 s the default watchdog waits for no more than the longest computation of any rank. */
TEST(default_watchdog)
{
    static const int layouts[3] = { RA_LAYOUT_CONTIGUOUS, RA_LAYOUT_ZIGZAG, RA_LAYOUT_STRIPED };
    static const int64_t sizes[4] = { 1000, 8192, 40000, 131072 };
    for (int64_t i = 0; i < 4 * 3 * 4; i++) {
        static const int64_t documents[3] = { 0, 300, 700 };
        ra_plan *plan = NULL;
        ra_desc d;
        int64_t most, got;
        if (!h_case(i)) continue;
        rig_desc(&d, i % 2 ? 8 : 5, sizes[i % 4], 16);
        d.chunk_tokens = 1024;
        d.op = RA_OP_TRAIN;
        d.layout.kind = layouts[i / 4 % 3];
        d.mask.kind = i / 12 ? RA_MASK_CAUSAL : RA_MASK_NONE;
        if (i / 12 == 2) d.mask.window = 512;
        if (i / 12 == 3) { d.mask.doc_first = documents; d.mask.doc_count = 3; d.mask.keep = 64; }
        if (!CHECK_EQ(ra_plan_create(&plan, &d, NULL), RA_OK)) continue;
        for (int back = 0; back < 2; back++) {
            most = most_tiles(plan, back);
            got = patience_of(plan, back ? RA_PASS_BACKWARD : RA_PASS_FORWARD, 10, 32000) / 2000;
            snprintf(h_run.context, sizeof h_run.context, "%lld tokens, %d ranks, layout %d, mask "
                     "%d: most %lld tiles, patience of %lld", (long long)d.tokens, d.ranks,
                     d.layout.kind, (int)(i / 12), (long long)most, (long long)got);
            CHECK(got >= most);
            if (plan->d.backward_way == RA_WAY_Q && back) continue;
            /* A block of a stripe is as long as `ranks` blocks of positions. */
            CHECK(got <= most + most / 20 + plan->report.q_rows / 64 * HEADS * 4 *
                         (d.layout.kind == RA_LAYOUT_STRIPED ? d.ranks : 1) + 100);
        }
        ra_plan_destroy(plan);
    }
}

/* 1M tokens, 32 heads, 8 ranks, 16 threads at 20 us a tile: 671 s of computing at most, not days;
 * the most is INT64_MAX. */
TEST(default_watchdog_of_a_million_tokens)
{
    ra_plan *plan = NULL;
    ra_desc d;
    int64_t tiles, ns;
    rig_desc(&d, 8, 1 << 20, 16);
    d.q_heads = 32;
    d.kv_heads = 8;
    d.chunk_tokens = 8192;
    d.mask.kind = RA_MASK_CAUSAL;
    d.layout.kind = RA_LAYOUT_ZIGZAG;
    if (!CHECK_EQ(ra_plan_create(&plan, &d, NULL), RA_OK)) return;
    tiles = plan->report.tiles_partial + plan->report.tiles_full;
    ns = patience_of(plan, RA_PASS_FORWARD, 1000, 20000);
    printf("    %lld tiles, 60 s and %.1f s\n", (long long)tiles, (double)ns * 1e-9);
    CHECK(ns >= tiles * 20000 / 16);
    CHECK(ns <= tiles * 20000 / 16 / 100 * 101);
    CHECK_EQ(patience_of(plan, RA_PASS_FORWARD, 1, INT64_MAX / 2), INT64_MAX - 60 * SECOND);
    CHECK(patience_of(plan, RA_PASS_FORWARD, 0, 0) > 0);
    ra_plan_destroy(plan);
}

int main(int argc, char **argv)
{
    static const h_test tests[] = {
        ENTRY(shared_between_processes), ENTRY(shared_in_one_process), ENTRY(begin_reads_no_sinks),
        ENTRY(deadlines_on_another_clock), ENTRY(quiesce_of_the_world_on_another_clock),
        ENTRY(default_watchdog), ENTRY(default_watchdog_of_a_million_tokens),
    };
    int failed = h_main(argc, argv, tests, sizeof tests / sizeof tests[0]);
    if (assert_failures) printf("%d assertions failed\n", assert_failures);
    return failed || assert_failures;
}
