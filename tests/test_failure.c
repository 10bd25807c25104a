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

int main(int argc, char **argv)
{
    static const h_test tests[] = {
        ENTRY(shared_between_processes), ENTRY(shared_in_one_process), ENTRY(begin_reads_no_sinks),
    };
    int failed = h_main(argc, argv, tests, sizeof tests / sizeof tests[0]);
    if (assert_failures) printf("%d assertions failed\n", assert_failures);
    return failed || assert_failures;
}
