/* How passes end. Proves on which thread and by which clock a ring makes each call of a transport,
 * what a failure leaves behind, and what each thread then returns. Callbacks of the test run
 * between the library's steps. They decide the order of events, so that no test waits for one. */
#define _DEFAULT_SOURCE 1
#include "hooks.h"
#include "mail.h"
#include <sched.h>
#include <sys/mman.h>
#ifdef __linux__
#include <sys/syscall.h>
#endif
#include <sys/wait.h>
#include <unistd.h>

/* -------------------------------------------------------------------------- a problem
 * Every rank needs keys of every other rank. `want` is what one rank computes. */
enum { RANKS = 5, HEADS = 2, DIM = 8 };
typedef struct rig {
    ra_desc d;
    int64_t rows;                      /* per rank */
    float *q, *k, *v, *o, *want;       /* [tokens][HEADS][DIM], one rank after another */
    float sinks[RANKS][HEADS];
    ra_plan *plan[RANKS];
    ra_tensors t[RANKS];
} rig;

static void rig_desc(ra_desc *d, int ranks, int64_t tokens, int threads) {
    *d = ra_desc_make(HEADS, HEADS, DIM, RA_F32, RA_MASK_NONE);
    d->ranks = ranks;
    d->threads = threads;
    d->tokens = tokens;
    d->chunk_tokens = 64;
    d->layout.kind = RA_LAYOUT_CONTIGUOUS;
}

/* Plans of g->d as it is now. */
static void rig_plans(rig *g) {
    for (int r = 0; r < g->d.ranks; r++) {
        ra_desc d = g->d;
        d.rank = r;
        ra_plan_destroy(g->plan[r]);
        CHECK_EQ(ra_plan_create(&g->plan[r], &d, NULL), RA_OK);
    }
}

/* tokens: a multiple of 64 times ranks. */
static rig *rig_new(int ranks, int64_t tokens, int threads) {
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
    CHECK_EQ(ra_ring_once(&one, NULL, &t, RA_NO_DEADLINE), RA_OK);
    memset(g->o, 0xFF, (size_t)n * sizeof(float));
    rig_plans(g);
    return g;
}

static void rig_free(rig *g) {
    for (int r = 0; r < g->d.ranks; r++) ra_plan_destroy(g->plan[r]);
    free(g->q);
    free(g);
}

static void rig_check(const rig *g) {
    CHECK_BITS(g->o, g->want, g->d.tokens * HEADS * DIM * 4);
}

static ra_job rig_job(const rig *g, int rank) {
    ra_job job = { 0 };
    job.plan = g->plan[rank];
    job.tensors = &g->t[rank];
    return job;
}

/* -------------------------------------------------------------------------- a memory network */

static mail_net *network_open(const rig *g, uint32_t caps, void *shared) {
    mail_desc d = { 0 };
    d.ranks = g->d.ranks;
    d.level = 1;
    d.holds = 1;
    d.caps = caps | RA_CAP_ANY_PEER | RA_CAP_ANY_THREAD;
    d.channels = 2;
    d.max_ops = 64;
    return mail_open(&d, shared);
}

/* Steps `ranks` rings on this thread until all have ended; status[r] is how. */
static void step_all(ra_ring *const *ring, int ranks, ra_status *status) {
    int left = ranks;
    for (int r = 0; r < ranks; r++) status[r] = RA_AGAIN;
    while (left > 0) {
        left = 0;
        for (int r = 0; r < ranks; r++) {
            if (status[r] > 0) status[r] = ra_step(ring[r], 0);
            left += status[r] > 0;
        }
    }
}

static int64_t still_clock(void *ctx) { return *(const int64_t *)ctx; }

/* The rings of 2 or 3 ranks on such a network, stepped on this thread. Their clock stays at `clock`
 * until the test moves it. */
typedef struct rings {
    rig *g;
    mail_net *all;
    ra_transport net[3];
    ra_ring *ring[3];
    int64_t clock;
} rings;

/* more: may be null. */
static void rings_create(rings *x, int rank, const ra_ring_desc *more) {
    ra_ring_desc rd = { 0 };
    if (more) rd = *more;
    if (!rd.clock_ns) {
        rd.clock_ns = still_clock;
        rd.clock_ctx = &x->clock;
    }
    CHECK_EQ(ra_ring_create(&x->ring[rank], x->g->plan[rank], &x->net[rank], &rd), RA_OK);
}

/* x->g is set; rings_close frees it. */
static void rings_open(rings *x, uint32_t caps, const ra_ring_desc *more) {
    x->all = network_open(x->g, caps, NULL);
    x->clock = 1;
    for (int r = 0; r < x->g->d.ranks; r++) {
        x->net[r] = mail_transport(x->all, r);
        rings_create(x, r, more);
    }
}

static void rings_close(rings *x) {
    for (int r = 0; r < x->g->d.ranks; r++) CHECK_EQ(ra_ring_destroy(x->ring[r]), RA_OK);
    mail_close(x->all);
    rig_free(x->g);
}

/* Rank 0 again, with another poll. */
static void rings_poll_by(rings *x, int (*poll)(void *, ra_transport_op *const *, int),
                          const ra_ring_desc *more) {
    CHECK_EQ(ra_ring_destroy(x->ring[0]), RA_OK);
    x->net[0].poll = poll;
    rings_create(x, 0, more);
}

static void rings_begin(rings *x, int pass) {
    for (int r = 0; r < x->g->d.ranks; r++) {
        ra_job job = rig_job(x->g, r);
        job.pass = pass;
        CHECK_EQ(ra_begin(x->ring[r], &job), RA_OK);
    }
}

/* The pass that was begun ends well. */
static void rings_end(rings *x) {
    ra_status s[3];
    step_all(x->ring, x->g->d.ranks, s);
    for (int r = 0; r < x->g->d.ranks; r++) CHECK_EQ(s[r], RA_OK);
}

static void rings_pass(rings *x, int pass) {
    rings_begin(x, pass);
    rings_end(x);
}

/* -------------------------------------------------------------------------- address spaces */

static ra_status one_rank(rig *g, mail_net *all, int rank, ra_failure *why) {
    ra_ring *ring = NULL;
    ra_ring_desc rd = { 0 };
    ra_transport net = mail_transport(all, rank);
    ra_status s;
    s = ra_ring_create(&ring, g->plan[rank], &net, &rd);
    if (s) return s;
    s = ra_forward(g->plan[rank], ring, &g->t[rank], RA_NO_DEADLINE);
    (void)ra_ring_failure(ring, why);
    (void)ra_ring_destroy(ring);
    return s;
}

static int names_the_space(const ra_failure *f) {
    return f->status == RA_E_MISMATCH && strstr(f->text, "address space") != NULL;
}

/* A forked child has memory at the parent's addresses. What they point to can be read there, but it
 * is not what the parent has. */
TEST(shared_between_processes) {
    rig *g = rig_new(2, 256, 1);
    void *shared = mmap(NULL, MAIL_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1,
                        0);
    mail_net *all = shared == MAP_FAILED ? NULL : network_open(g, RA_CAP_SHARED, shared);
    ra_failure why = { 0 };
    ra_status s;
    pid_t child;
    int ended = 0;
    if (!all) abort();
    fflush(stdout);
    child = fork();
    if (child < 0) abort();
    if (child == 0) {
        s = one_rank(g, all, 1, &why);
        all->note[1] = names_the_space(&why) ? s : -999;
        _exit(0);
    }
    s = one_rank(g, all, 0, &why);
    CHECK(waitpid(child, &ended, 0) == child);
    CHECK_EQ(s, RA_E_MISMATCH);
    if (!CHECK(names_the_space(&why))) printf("    %s\n", why.text);
    CHECK_EQ(all->note[1], RA_E_MISMATCH);
    mail_close(all);
    munmap(shared, MAIL_BYTES);
    rig_free(g);
}

/* The same network between ranks of one process, which is what RA_CAP_SHARED is for. */
TEST(shared_in_one_process) {
    rings x;
    x.g = rig_new(3, 384, 1);
    rings_open(&x, RA_CAP_SHARED, NULL);
    rings_pass(&x, RA_PASS_FORWARD);
    rig_check(x.g);
    rings_close(&x);
}

/* A process with the number 1, as in a container: this program again, which writes the number of
 * its address space to a pipe. 0: the system does not allow it. */
static uint32_t space_of_a_container(void) {
    uint32_t space = 0;
#ifdef __linux__
    enum { NEWPID = 0x20000000, NEWUSER = 0x10000000 };
    char self[4096] = { 0 }, fd[16];
    int pipes[2], status;
    pid_t child;
    if (readlink("/proc/self/exe", self, sizeof self - 1) < 0 || pipe(pipes)) return 0;
    snprintf(fd, sizeof fd, "%d", pipes[1]);
    fflush(NULL);
    child = fork();
    if (child == 0) {
        if (syscall(SYS_unshare, NEWPID) && syscall(SYS_unshare, NEWUSER | NEWPID)) _exit(1);
        if (fork() == 0) execl(self, self, "--space", fd, (char *)NULL);
        wait(&status);
        _exit(0);
    }
    close(pipes[1]);
    if (child < 0 || read(pipes[0], &space, sizeof space) != sizeof space) space = 0;
    close(pipes[0]);
    if (child > 0) waitpid(child, &status, 0);
#endif
    return space;
}

/* Two containers number their processes alike, and the same program is at the same addresses. */
TEST(containers_share_no_memory) {
    const uint32_t one = space_of_a_container(), two = space_of_a_container();
    if (!one || !two) {
        h_skip("this system starts no process with a chosen number");
        return;
    }
    CHECK(one != two);
    CHECK_EQ(hook_space(), hook_space());
}

/* -------------------------------------------------------------------------- what begin reads */

/* ra_begin copies pointers: sinks may be written until the first step. */
TEST(begin_reads_no_sinks) {
    rings x;
    rig *g = x.g = rig_new(2, 256, 1);
    for (int r = 0; r < 2; r++) {
        for (int h = 0; h < HEADS; h++) g->sinks[r][h] = (float)r;
        g->t[r].sinks = g->sinks[r];
    }
    g->d.scores = RA_SCORE_SINKS;
    rig_plans(g);
    rings_open(&x, 0, NULL);
    rings_begin(&x, RA_PASS_FORWARD);
    memcpy(g->sinks[1], g->sinks[0], sizeof g->sinks[0]);
    rings_end(&x);
    rings_close(&x);
}

/* -------------------------------------------------------------------------- clocks
 * The ring's clock stays at the time that the test sets. What a callback of the transport gets is
 * compared with ra_now_ns() before and after the call. */
static const int64_t YEARS = (int64_t)10 * 365 * 86400 * 1000000000, SECOND = 1000000000;

static int nothing_abort(void *ctx, int why) { (void)ctx, (void)why; return RA_OK; }

static void short_sleep(void) {
    const struct timespec t = { 0, 100000 };
    (void)nanosleep(&t, NULL);
}

typedef struct alarm_call { int64_t until; int calls; } alarm_call;

static int expire_sendrecv(void *ctx, int to, const void *s, size_t s_len, int from, void *r,
                           size_t r_len, uint64_t tag, int64_t deadline_ns) {
    alarm_call *a = (alarm_call *)ctx;
    (void)to, (void)s, (void)s_len, (void)from, (void)r, (void)r_len, (void)tag;
    a->until = deadline_ns;
    a->calls++;
    return RA_E_TIMEOUT;
}

/* Level 0; every exchange times out. */
static ra_transport expiring(alarm_call *a) {
    ra_transport net = { 0 };
    net.size = (uint32_t)sizeof net;
    net.abi = RA_TRANSPORT_ABI;
    net.ctx = a;
    net.sendrecv = expire_sendrecv;
    return net;
}

static int late_quiesce(void *ctx, int64_t deadline_ns) {
    alarm_call *a = (alarm_call *)ctx;
    a->until = deadline_ns;
    a->calls++;
    return RA_OK;
}

/* until is `left` after a time between `before` and now; saturated. */
static int is_left(int64_t until, int64_t before, int64_t left) {
    int64_t now = ra_now_ns();
    int64_t least = left > INT64_MAX - before ? INT64_MAX : before + left;
    int64_t most = left > INT64_MAX - now ? INT64_MAX : now + left;
    if (left < 0 && until <= now) return 1;        /* in the past: any time will do */
    return until >= (least > 0 ? least : 1) && until <= (most > 0 ? most : 1);
}

/* One pass at level 0 that times out in its first exchange: RA_E_PEER if the watchdog ends it,
 * RA_E_TIMEOUT if the deadline of the call does; then ra_finish. left: of the two, in ns. */
static void one_clock(const rig *g, int64_t *clock, const ra_ring_desc *times, int64_t deadline) {
    alarm_call a = { 0, 0 };
    ra_ring_desc rd = *times;
    ra_ring *ring = NULL;
    ra_transport net = expiring(&a);
    ra_job job = rig_job(g, 0);
    int64_t before, left = rd.watchdog_ns, now = clock ? *clock : ra_now_ns();
    ra_status s;
    rd.clock_ns = clock ? still_clock : NULL;
    rd.clock_ctx = clock;
    net.caps = RA_CAP_DEADLINE;
    net.abort = nothing_abort;
    net.quiesce = late_quiesce;
    job.deadline_ns = deadline;
    if (deadline && deadline - now < left) left = deadline - now;
    CHECK_EQ(ra_ring_create(&ring, g->plan[0], &net, &rd), RA_OK);
    before = clock ? ra_now_ns() : now;
    CHECK_EQ(ra_begin(ring, &job), RA_OK);
    while ((s = ra_step(ring, 0)) > 0) { }
    CHECK_EQ(s, left == rd.watchdog_ns ? RA_E_PEER : RA_E_TIMEOUT);
    CHECK_EQ(a.calls, 1);
    CHECK(is_left(a.until, before, left));
    before = ra_now_ns();
    CHECK_EQ(ra_finish(ring, RA_NO_DEADLINE), s);
    CHECK_EQ(a.calls, 2);
    CHECK(is_left(a.until, before, rd.quiesce_ns));
    CHECK_EQ(ra_ring_destroy(ring), RA_OK);
}

/* A sendrecv that ends only when it is told to, whatever its deadline is. */
typedef struct stuck_call { int32_t inside, told, aborts; } stuck_call;

static int stuck_sendrecv(void *ctx, int to, const void *s, size_t s_len, int from, void *r,
                          size_t r_len, uint64_t tag, int64_t deadline_ns) {
    stuck_call *a = (stuck_call *)ctx;
    (void)to, (void)s, (void)s_len, (void)from, (void)r, (void)r_len, (void)tag, (void)deadline_ns;
    __atomic_fetch_add(&a->inside, 1, __ATOMIC_SEQ_CST);
    while (!__atomic_load_n(&a->told, __ATOMIC_SEQ_CST)) short_sleep();
    __atomic_fetch_add(&a->inside, -1, __ATOMIC_SEQ_CST);
    return RA_E_ABORTED;
}

static int stuck_abort(void *ctx, int why) {
    stuck_call *a = (stuck_call *)ctx;
    (void)why;
    a->aborts++;
    __atomic_store_n(&a->told, 1, __ATOMIC_SEQ_CST);
    return RA_OK;
}

/* The helper of a ring or cache whose peer never comes. Steps go on and end by the deadline. With
 * an abort that wakes sendrecv nothing is lost. Without one the helper, and the memory that it may
 * still touch, is left behind when the time for quiescing is over. */
TEST(helper_that_is_stuck) {
    static char memory[1 << 22] __attribute__((aligned(64)));
    for (int tells = 1; tells >= 0; tells--) {
        rig *g = rig_new(2, 256, 1);
        stuck_call a = { 0, 0, 0 };
        ra_ring_desc rd = { 0 };
        ra_ring *ring = NULL;
        ra_ring_counters c;
        ra_transport net = { 0 };
        int64_t begin = ra_now_ns();
        net.size = (uint32_t)sizeof net;
        net.abi = RA_TRANSPORT_ABI;
        net.ctx = &a;
        net.sendrecv = stuck_sendrecv;
        net.caps = RA_CAP_HELPER;
        if (tells) net.abort = stuck_abort;
        rd.quiesce_ns = SECOND / 10;
        rd.workspace = memory;
        rd.workspace_bytes = sizeof memory;
        CHECK_EQ(ra_ring_create(&ring, g->plan[0], &net, &rd), RA_OK);
        CHECK_EQ(ra_forward(g->plan[0], ring, &g->t[0], ra_deadline_ms(50)), RA_E_TIMEOUT);
        ra_ring_query(ring, &c);
        CHECK_EQ(c.bounded, 1);
        CHECK_EQ(ra_ring_destroy(ring), tells ? RA_OK : RA_E_UNSAFE);
        CHECK_EQ(a.aborts, tells);
        CHECK_EQ(__atomic_load_n(&a.inside, __ATOMIC_SEQ_CST), !tells);
        CHECK(ra_now_ns() - begin < 10 * SECOND);
        (void)stuck_abort(&a, 0);
        while (__atomic_load_n(&a.inside, __ATOMIC_SEQ_CST)) short_sleep();
        rig_free(g);
    }
}

/* A failed exchange that was to bring a chunk names that chunk, not the own chunk that it sent. */
TEST(failed_exchange_names_what_was_due) {
    for (int order = 0; order <= RA_ORDER_ROUNDS; order += RA_ORDER_ROUNDS) {
        rig *g = rig_new(2, 256, 1);
        alarm_call a = { 0, 0 };
        ra_ring_desc rd = { 0 };
        ra_ring *ring = NULL;
        ra_transport net = expiring(&a);
        ra_desc d = g->d;
        ra_plan *plan = NULL;
        ra_failure f;
        d.order = order;
        rd.trust_plans = 1;            /* no hello comes first */
        CHECK_EQ(ra_plan_create(&plan, &d, NULL), RA_OK);
        CHECK_EQ(ra_ring_create(&ring, plan, &net, &rd), RA_OK);
        CHECK_EQ(ra_forward(plan, ring, &g->t[0], RA_NO_DEADLINE), RA_E_PEER);
        CHECK_EQ(ra_ring_failure(ring, &f), RA_OK);
        CHECK_EQ(f.peer, 1);
        CHECK_EQ(f.hop, 1);
        CHECK_EQ(f.sending, 0);
        CHECK_EQ(f.chunk, 2);          /* chunks 0 and 1 are its own */
        (void)ra_ring_destroy(ring);
        ra_plan_destroy(plan);
        rig_free(g);
    }
}

/* If an exchange with two peers fails, the sentence names both. A deadline before the pass began is
 * probably a duration, so the sentence explains what deadlines are. */
TEST(failed_exchange_names_both_peers) {
    for (int64_t deadline = 0; deadline <= 5000; deadline += 5000) {
        rig *g = rig_new(3, 384, 1);
        alarm_call a = { 0, 0 };
        ra_ring_desc rd = { 0 };
        ra_ring *ring = NULL;
        ra_transport net = expiring(&a);
        ra_failure f;
        rd.trust_plans = 1;
        CHECK_EQ(ra_ring_create(&ring, g->plan[0], &net, &rd), RA_OK);
        CHECK_EQ(ra_forward(g->plan[0], ring, &g->t[0], deadline),
                 deadline ? RA_E_TIMEOUT : RA_E_PEER);
        CHECK_EQ(ra_ring_failure(ring, &f), RA_OK);
        if (!deadline && !CHECK(strstr(f.text, "receiving from rank 2 or sending to rank 1")))
            printf("    %s\n", f.text);
        CHECK_EQ(strstr(f.text, "deadlines are absolute") != NULL, deadline != 0);
        (void)ra_ring_destroy(ring);
        rig_free(g);
    }
}

/* A ring whose clock is years ahead or behind, negative, or at the end of its range. */
TEST(deadlines_on_another_clock) {
    rig *g = rig_new(2, 256, 1);
    static const int64_t longest[3] = { 5000000000, 1, INT64_MAX };
    for (int i = 0; i < 3; i++) {
        int64_t clock[6] = { 0, 1, 0, INT64_MAX - 5, -5, INT64_MIN };
        ra_ring_desc rd = { 0 };
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

static void *leave_later(void *arg) {
    sched_yield();
    ra_world_leave((ra_world *)arg, 1, RA_OK);
    return NULL;
}

static void *kept[2][3];               /* so that a leak checker finds it */

/* A ring of the world, in the middle of its first pass. */
static ra_ring *under_way(const rig *g, ra_world *world, int rank, const ra_ring_desc *rd) {
    ra_ring *ring = NULL;
    ra_job job = rig_job(g, rank);
    CHECK_EQ(ra_ring_create(&ring, g->plan[rank], ra_world_transport(world, rank), rd), RA_OK);
    CHECK_EQ(ra_begin(ring, &job), RA_OK);
    CHECK_EQ(ra_step(ring, 0), RA_AGAIN);
    return ring;
}

/* The bundled world waits in quiesce on its own clock: not forever if the ring's clock is ahead,
 * and long enough if it is behind. */
TEST(quiesce_of_the_world_on_another_clock) {
    rig *g = rig_new(2, 256, 1);
    for (int i = 0; i < 4; i++) {
        int64_t clock = ra_now_ns() + (i % 2 ? YEARS : -YEARS);
        ra_world *world = hook_world(2);
        ra_ring_desc rd = { 0 };
        ra_ring *ring, *other;
        pthread_t id;
        rd.clock_ns = still_clock;
        rd.clock_ctx = &clock;
        rd.quiesce_ns = i < 2 ? 1 : INT64_MAX;
        ring = under_way(g, world, 0, &rd);
        other = under_way(g, world, 1, NULL);
        ra_ring_cancel(ring);
        CHECK_EQ(ra_step(ring, 0), RA_E_CANCELLED);
        if (i < 2) {
            CHECK_EQ(ra_finish(ring, RA_NO_DEADLINE), RA_E_UNSAFE);
            kept[i][0] = ring;         /* leaked on purpose */
            kept[i][1] = world;
            kept[i][2] = other;
            continue;
        }
        if (pthread_create(&id, NULL, leave_later, world)) abort();
        CHECK_EQ(ra_finish(ring, RA_NO_DEADLINE), RA_E_CANCELLED);
        pthread_join(id, NULL);
        CHECK_EQ(ra_ring_destroy(ring), RA_OK);
        CHECK_EQ(ra_ring_destroy(other), RA_OK);
        ra_world_destroy(world);
    }
    CHECK(kept[0][0] && kept[1][1]);
    rig_free(g);
}

/* A rank between two passes uses nothing of a rank that fails, so that one does not wait for it:
 * neither before its first pass nor after one, nor while a third rank in the pass learns of it. A
 * pass that it begins later fails immediately. */
TEST(world_waits_for_no_rank_that_rests) {
    enum { AT_FIRST, LATER, THIRD, WAYS };
    rig *g = rig_new(3, 384, 1);
    for (int i = 0; i < WAYS; i++) {
        ra_world *world = hook_world(3);
        ra_ring_desc rd = { 0 };
        ra_ring *ring[3];
        ra_job job[3];
        ra_status s[3];
        rd.quiesce_ns = 50000000;      /* one that waits takes as long, and leaks its ring */
        for (int r = 0; r < 3; r++) {
            job[r] = rig_job(g, r);
            CHECK_EQ(ra_ring_create(&ring[r], g->plan[r], ra_world_transport(world, r), &rd),
                     RA_OK);
        }
        for (int r = 0; r < 3 && i != AT_FIRST; r++) CHECK_EQ(ra_begin(ring[r], &job[r]), RA_OK);
        if (i != AT_FIRST) step_all(ring, 3, s);
        for (int r = 0; r < (i == THIRD ? 2 : 1); r++) {
            CHECK_EQ(ra_begin(ring[r], &job[r]), RA_OK);
            CHECK(ra_step(ring[r], 0) > 0);
        }
        ra_ring_cancel(ring[0]);
        CHECK_EQ(ra_step(ring[0], 0), RA_E_CANCELLED);
        if (i == THIRD) CHECK_EQ(ra_step(ring[1], 0), RA_E_ABORTED);
        CHECK_EQ(ra_finish(ring[0], RA_NO_DEADLINE), RA_E_CANCELLED);
        CHECK_EQ(ra_ring_destroy(ring[0]), RA_OK);
        CHECK_EQ(ra_begin(ring[2], &job[2]), RA_OK);
        CHECK_EQ(ra_step(ring[2], 0), RA_E_ABORTED);
        for (int r = 1; r < 3; r++) CHECK_EQ(ra_ring_destroy(ring[r]), RA_OK);
        ra_world_destroy(world);
    }
    rig_free(g);
}

static ra_status refetched(void *ctx, int64_t pass, int32_t rank, ra_tensors *t) {
    const rig *g = (const rig *)ctx;
    CHECK_EQ(pass, 1);
    if (t) t->k = g->t[rank].k;
    if (t) t->v = g->t[rank].v;
    return RA_OK;
}

/* Two of three ranks resume on `world` what the third one left. It ends well if they can fetch. */
static void resumes(const rig *g, ra_world *world, int fetches) {
    static const int32_t survivors[2] = { 0, 1 };
    ra_world *before = hook_world(3);
    ra_resume_desc xd = { 0 };
    ra_ring *ring[2];
    ra_status s[2];
    for (int r = 0; r < 2; r++) ring[r] = under_way(g, before, r, NULL);
    ra_world_leave(before, 2, RA_E_IO);
    step_all(ring, 2, s);
    xd.survivors = survivors;
    xd.ranks = 2;
    xd.epoch = 1;
    xd.tensors_kept = 1;
    xd.refetch = fetches ? refetched : NULL;
    xd.ctx = (void *)(uintptr_t)g;
    for (int r = 0; r < 2; r++) {
        CHECK_EQ(s[r], RA_E_ABORTED);
        xd.transport = ra_world_transport(world, r);
        CHECK_EQ(ra_resume_begin(ring[r], &xd, ra_deadline_ms(20000)), RA_OK);
    }
    step_all(ring, 2, s);
    for (int r = 0; r < 2; r++) CHECK_EQ(s[r], fetches ? RA_OK : RA_E_PEER);
    for (int r = 0; r < 2; r++) CHECK_EQ(ra_ring_destroy(ring[r]), RA_OK);
    ra_world_destroy(before);
}

/* A rank also rests in the world after a pass that copied, after one that was resumed, and after
 * one that could not be resumed. */
TEST(world_rests_after_any_pass) {
    enum { COPIED, RESUMED, REFUSED, WAYS };
    rig *g = rig_new(2, 256, 1), *three = rig_new(3, 384, 1);
    for (int i = 0; i < WAYS; i++) {
        ra_world *world = hook_world(2);
        ra_ring_desc rd = { 0 };
        ra_ring *ring[2];
        ra_job job[2];
        ra_status s[2];
        rd.quiesce_ns = 50000000;      /* it would wait all of them */
        if (i != COPIED) resumes(three, world, i == RESUMED);
        for (int r = 0; r < 2; r++) {
            ra_transport net = *ra_world_transport(world, r);
            if (i == COPIED) net.caps &= ~(uint32_t)RA_CAP_SHARED;
            job[r] = rig_job(g, r);
            CHECK_EQ(ra_ring_create(&ring[r], g->plan[r], &net, &rd), RA_OK);
            if (i == COPIED) CHECK_EQ(ra_begin(ring[r], &job[r]), RA_OK);
        }
        if (i == COPIED) step_all(ring, 2, s);
        CHECK_EQ(ra_begin(ring[0], &job[0]), RA_OK);
        CHECK(ra_step(ring[0], 0) > 0);
        ra_ring_cancel(ring[0]);
        CHECK_EQ(ra_step(ring[0], 0), RA_E_CANCELLED);
        CHECK_EQ(ra_finish(ring[0], RA_NO_DEADLINE), RA_E_CANCELLED);
        for (int r = 0; r < 2; r++) CHECK_EQ(ra_ring_destroy(ring[r]), RA_OK);
        ra_world_destroy(world);
    }
    rig_free(g);
    rig_free(three);
}

/* A cache of rank 0 on `world`, and its call that decodes a token. */
typedef struct small_cache {
    ra_cache *cache;
    ra_tensors t;
    int64_t cached, fresh;
    float q[HEADS][DIM], o[HEADS][DIM], keys[2][64 * HEADS * DIM];
} small_cache;

static void small_cache_open(small_cache *c, const rig *g, ra_world *world, int rank) {
    ra_desc d = g->d;
    ra_cache_desc cd = { 0 };
    memset(c, 0, sizeof *c);
    d.rank = rank;
    d.tokens = 1;
    d.kv_tokens = 64;
    d.chunk_tokens = 0;
    d.layout.kind = 0;
    cd.queries = RA_QUERIES_ALL;
    CHECK_EQ(ra_cache_create(&c->cache, &d, ra_world_transport(world, rank), &cd), RA_OK);
    c->t.q.data = c->q;
    c->t.o.data = c->o;
    c->t.k.data = c->keys[0];
    c->t.v.data = c->keys[1];
    c->cached = 40;
    c->fresh = 1;
}

/* Messages of two passes on one transport would match each other, and if their plans are equal no
 * frame would show it. So the second pass, of a ring or a cache, is refused until the first has
 * ended. */
TEST(world_passes_take_turns) {
    rig *g = rig_new(2, 256, 1);
    ra_world *world = hook_world(2);
    ra_ring *a[2], *b[2];
    ra_job job[2];
    ra_status s[2] = { RA_AGAIN, RA_AGAIN };
    ra_ring_counters now;
    small_cache c[2];
    for (int r = 0; r < 2; r++) {
        job[r] = rig_job(g, r);
        a[r] = under_way(g, world, r, NULL);
        small_cache_open(&c[r], g, world, r);
        CHECK_EQ(ra_ring_create(&b[r], g->plan[r], ra_world_transport(world, r), NULL), RA_OK);
        CHECK_EQ(ra_begin(b[r], &job[r]), RA_E_BUSY);
        CHECK(strstr(ra_ring_explain(b[r]), "another ring or cache of this rank"));
        ra_ring_query(b[r], &now);
        CHECK_EQ(now.peak_bytes, 0);               /* nothing is laid out for a refused pass */
        CHECK_EQ(ra_infer_begin(c[r].cache, &c[r].t, &c[r].cached, &c[r].fresh, 0), RA_E_BUSY);
    }
    step_all(a, 2, s);
    rig_check(g);
    for (int r = 0; r < 2; r++) {
        CHECK_EQ(ra_infer_begin(c[r].cache, &c[r].t, &c[r].cached, &c[r].fresh, 0), RA_OK);
        CHECK_EQ(ra_begin(b[r], &job[r]), RA_E_BUSY);
        s[r] = RA_AGAIN;
    }
    for (int left = 2; left > 0;)
        for (int r = left = 0; r < 2; r++) {
            if (s[r] > 0) s[r] = ra_infer_step(c[r].cache, 0);
            left += s[r] > 0;
        }
    CHECK(s[0] == RA_OK && s[1] == RA_OK);
    memset(g->o, 0xFF, (size_t)g->d.tokens * HEADS * DIM * sizeof(float));
    for (int r = 0; r < 2; r++) CHECK_EQ(ra_begin(b[r], &job[r]), RA_OK);
    step_all(b, 2, s);
    rig_check(g);
    for (int r = 0; r < 2; r++) {
        CHECK_EQ(ra_ring_destroy(a[r]), RA_OK);
        CHECK_EQ(ra_ring_destroy(b[r]), RA_OK);
        CHECK_EQ(ra_cache_destroy(c[r].cache), RA_OK);
    }
    ra_world_destroy(world);
    rig_free(g);
}

/* A network whose transports have a turn behaves like the world, for all transports of one ctx. A
 * failed pass keeps the turn until ra_finish. Transports of an earlier version have none, and what
 * follows their last field is not read. */
TEST(networks_take_turns_like_the_world) {
    rings x;
    ra_ring *late, *old;
    ra_transport twin;
    ra_job job;
    x.g = rig_new(2, 256, 1);
    job = rig_job(x.g, 0);
    rings_open(&x, 0, NULL);
    rings_begin(&x, RA_PASS_FORWARD);
    twin = x.net[0];
    CHECK_EQ(ra_ring_create(&late, x.g->plan[0], &twin, NULL), RA_OK);
    twin.size = (uint32_t)offsetof(ra_transport, turn);
    CHECK_EQ(ra_ring_create(&old, x.g->plan[0], &twin, NULL), RA_OK);
    CHECK_EQ(ra_begin(late, &job), RA_E_BUSY);
    rings_end(&x);
    rig_check(x.g);
    CHECK_EQ(x.all->ends[0].turn, 0);
    rings_begin(&x, RA_PASS_FORWARD);
    ra_ring_cancel(x.ring[0]);
    CHECK_EQ(ra_step(x.ring[0], 0), RA_E_CANCELLED);
    CHECK_EQ(ra_begin(late, &job), RA_E_BUSY);
    CHECK_EQ(ra_finish(x.ring[0], RA_NO_DEADLINE), RA_E_CANCELLED);
    CHECK_EQ(ra_begin(late, &job), RA_OK);
    CHECK_EQ(ra_finish(x.ring[0], RA_NO_DEADLINE), RA_E_CANCELLED);
    CHECK_EQ(x.all->ends[0].turn, 1);                /* of `late` */
    CHECK_EQ(ra_begin(old, &job), RA_OK);
    CHECK_EQ(ra_ring_destroy(old), RA_OK);
    CHECK_EQ(x.all->ends[0].turn, 1);
    CHECK_EQ(ra_ring_destroy(late), RA_OK);
    CHECK_EQ(x.all->ends[0].turn, 0);
    rings_close(&x);
}

/* A ring that can no longer return the turn does not keep it. Who waits for a turn in a world that
 * has failed gets the failure. */
TEST(world_turns_after_failures) {
    rig *g = rig_new(2, 256, 1);
    mail_net *all = network_open(g, 0, NULL);
    ra_world *world = hook_world(2);
    ra_transport net = mail_transport(all, 0);
    ra_ring *idle, *first, *late;
    ra_job job = rig_job(g, 0);
    ra_error why = { 0 };
    ra_desc d = g->d;
    small_cache c;
    CHECK_EQ(ra_ring_create(&idle, g->plan[0], &net, NULL), RA_OK);
    ra_ring_cancel(idle);
    CHECK_EQ(ra_finish(idle, RA_NO_DEADLINE), RA_E_CANCELLED);
    CHECK_EQ(ra_begin(idle, &job), RA_E_CANCELLED);
    CHECK(strstr(ra_ring_explain(idle), "was cancelled"));
    CHECK_EQ(ra_ring_destroy(idle), RA_OK);
    CHECK_EQ(all->ends[0].turn, 0);
    first = under_way(g, world, 0, NULL);
    small_cache_open(&c, g, world, 0);
    ra_ring_cancel(first);
    CHECK_EQ(ra_step(first, 0), RA_E_CANCELLED);
    CHECK_EQ(ra_ring_create(&late, g->plan[0], ra_world_transport(world, 0), NULL), RA_OK);
    CHECK_EQ(ra_begin(late, &job), RA_E_CANCELLED);
    CHECK(strstr(ra_ring_explain(late), "failed in a pass of another ring"));
    CHECK_EQ(ra_infer_begin(c.cache, &c.t, &c.cached, &c.fresh, 0), RA_E_CANCELLED);
    d.error = &why;
    CHECK_EQ(ra_ring_once(&d, ra_world_transport(world, 0), &g->t[0], 0), RA_E_CANCELLED);
    CHECK(strstr(why.text, "failed in a pass of another ring"));
    CHECK_EQ(ra_ring_destroy(first), RA_OK);
    CHECK_EQ(ra_begin(late, &job), RA_OK);
    CHECK_EQ(ra_step(late, 0), RA_E_CANCELLED);
    CHECK_EQ(ra_ring_destroy(late), RA_OK);
    CHECK_EQ(ra_infer(c.cache, &c.t, &c.cached, &c.fresh, 0), RA_E_CANCELLED);
    CHECK_EQ(ra_cache_destroy(c.cache), RA_OK);
    ra_world_destroy(world);
    mail_close(all);
    rig_free(g);
}

/* -------------------------------------------------------------------------- patience */

/* A plan of rank 0, and the largest number of non-empty tiles in a report of any rank. */
static int64_t most_tiles(const ra_plan *plan, int backward) {
    ra_plan_report rep;
    int64_t most = 0;
    for (int r = 0; ra_plan_query(plan, r, &rep) == RA_OK; r++) {
        int64_t n = backward ? rep.backward.tiles_partial + rep.backward.tiles_full
                             : rep.forward.tiles_partial + rep.forward.tiles_full;
        if (n > most) most = n;
    }
    return most;
}

/* Beyond 60 s the default watchdog waits as long as the longest computation of any rank. */
TEST(default_watchdog) {
    static const int layouts[3] = { RA_LAYOUT_CONTIGUOUS, RA_LAYOUT_ZIGZAG, RA_LAYOUT_STRIPED };
    static const int64_t sizes[4] = { 1000, 8192, 40000, 131072 };
    static const int64_t documents[3] = { 0, 300, 700 };
    enum { NONE, CAUSAL, WINDOW, DOCUMENTS, MASKS };
    int64_t i = 0;
    for (int mask = NONE; mask < MASKS; mask++)
    for (int l = 0; l < 3; l++)
    for (int size = 0; size < 4; size++, i++) {
        const int64_t tokens = sizes[size];
        const int layout = layouts[l];
        ra_plan *plan = NULL;
        ra_desc d;
        int64_t most, got;
        if (!h_case(i)) continue;
        rig_desc(&d, i % 2 ? 8 : 5, tokens, 16);
        d.chunk_tokens = 1024;
        d.train = 1;
        d.layout.kind = layout;
        d.mask.kind = mask != NONE ? RA_MASK_CAUSAL : RA_MASK_NONE;
        if (mask == WINDOW) d.mask.window = 512;
        if (mask == DOCUMENTS) {
            d.mask.doc_first = documents;
            d.mask.doc_count = 3;
            d.mask.keep = 64;
        }
        if (!CHECK_EQ(ra_plan_create(&plan, &d, NULL), RA_OK)) continue;
        for (int back = 0; back < 2; back++) {
            most = most_tiles(plan, back);
            got = hook_patience(plan, back ? RA_PASS_BACKWARD : RA_PASS_FORWARD, 10, 32000) / 2000;
            h_context("%lld tokens, %d ranks, layout %d, mask "
                      "%d: most %lld tiles, patience of %lld",
                      (long long)d.tokens, d.ranks, d.layout.kind, mask, (long long)most,
                      (long long)got);
            CHECK_EQ(got, most);
        }
        ra_plan_destroy(plan);
    }
}

/* The count looks at each chunk at most once, for any number of ranks. Every look at a chunk
 * evaluates an assertion, and those are counted. */
TEST(default_watchdog_of_many_ranks) {
    enum { MANY = 4096 };
    static int64_t rows[MANY];
    for (int r = 0; r < MANY; r++) rows[r] = 64;
    for (int array = 0; array < 2; array++) {
        ra_plan *plan = NULL;
        ra_desc d;
        int64_t looks;
        rig_desc(&d, MANY, (int64_t)MANY * 64, 1);
        if (array) {
            d.layout.kind = RA_LAYOUT_ARRAY;
            d.layout.q_rows = rows;
        }
        if (!CHECK_EQ(ra_plan_create(&plan, &d, NULL), RA_OK)) continue;
        looks = hook_asserts;
        CHECK(hook_patience(plan, RA_PASS_FORWARD, 0, 0) > 0);
        looks = hook_asserts - looks;
        h_context("array %d: %lld looks", array, (long long)looks);
        CHECK(looks <= 2 * MANY);
        ra_plan_destroy(plan);
    }
}

/* 1M tokens, 32 heads, 8 ranks, 16 threads at 20 us per tile: at most 671 s of computing, not days.
 * The largest value is INT64_MAX. */
TEST(default_watchdog_of_a_million_tokens) {
    ra_plan *plan = NULL;
    ra_plan_report rep;
    ra_desc d;
    int64_t tiles, ns;
    rig_desc(&d, 8, 1 << 20, 16);
    d.q_heads = 32;
    d.kv_heads = 8;
    d.chunk_tokens = 8192;
    d.mask.kind = RA_MASK_CAUSAL;
    d.layout.kind = RA_LAYOUT_ZIGZAG;
    if (!CHECK_EQ(ra_plan_create(&plan, &d, NULL), RA_OK)) return;
    CHECK_EQ(ra_plan_query(plan, d.rank, &rep), RA_OK);
    tiles = rep.forward.tiles_partial + rep.forward.tiles_full;
    ns = hook_patience(plan, RA_PASS_FORWARD, 1000, 20000);
    printf("    %lld tiles, 60 s and %.1f s\n", (long long)tiles, (double)ns * 1e-9);
    CHECK(ns >= tiles * 20000 / 16);
    CHECK(ns <= tiles * 20000 / 16 / 100 * 101);
    CHECK_EQ(hook_patience(plan, RA_PASS_FORWARD, 1, INT64_MAX / 2), INT64_MAX - 60 * SECOND);
    CHECK(hook_patience(plan, RA_PASS_FORWARD, 0, 0) > 0);
    ra_plan_destroy(plan);
}

/* -------------------------------------------------------------------------- tickets */

/* Joins a ticket on one thread until its pass has ended. */
static ra_status bring(ra_ring *ring, ra_job *job, int64_t ticket, const ra_tensors *t) {
    ra_status s = RA_AGAIN;
    job->ticket = (uint64_t)ticket;
    job->tensors = t;
    while (s > 0) s = ra_join(ring, job, 0);
    return s;
}

/* A thread may bring a ticket long after the others. A refused ticket never gives RA_OK. */
TEST(refused_tickets_stay_refused) {
    rig *g = rig_new(1, 64, 1);
    ra_ring *ring = NULL;
    ra_tensors none = g->t[0], odd = g->t[0];
    ra_job job = rig_job(g, 0);
    none.q.data = NULL;
    odd.q.token_stride = 1;
    CHECK_EQ(ra_ring_create(&ring, g->plan[0], NULL, NULL), RA_OK);
    CHECK_EQ(bring(ring, &job, 1, &none), RA_E_NULL);
    CHECK_EQ(bring(ring, &job, 2, &odd), RA_E_STRIDE);
    CHECK_EQ(bring(ring, &job, 1, &g->t[0]), RA_E_NULL);
    CHECK_EQ(bring(ring, &job, 3, &g->t[0]), RA_OK);
    CHECK_EQ(bring(ring, &job, 2, &g->t[0]), RA_E_STRIDE);
    CHECK_EQ(bring(ring, &job, 1, &g->t[0]), RA_E_NULL);
    for (int i = 4; i < 50; i++)
        CHECK_EQ(bring(ring, &job, i, i == 30 ? &g->t[0] : i % 2 ? &none : &odd),
                 i == 30 ? RA_OK : i % 2 ? RA_E_NULL : RA_E_STRIDE);
    for (int i = 20; i < 50; i++)
        CHECK_EQ(bring(ring, &job, i, &g->t[0]),
                 i == 30 ? RA_OK : i % 2 ? RA_E_NULL : RA_E_STRIDE);
    CHECK_EQ(bring(ring, &job, 1, &g->t[0]), RA_E_STATE);      /* forgotten, but not RA_OK */
    CHECK_EQ(bring(ring, &job, 50, &g->t[0]), RA_OK);
    CHECK_EQ(ra_ring_destroy(ring), RA_OK);
    rig_check(g);
    rig_free(g);
}

typedef struct grads { float *all, *d_o, *lse, *d_q, *d_k, *d_v; int64_t n; } grads;

static void grads_new(grads *y, rig *g) {
    const int64_t row = HEADS * DIM;
    y->n = g->d.tokens * row;
    y->all = (float *)calloc((size_t)y->n * 5, sizeof(float));
    if (!y->all) abort();
    y->d_o = y->all;
    y->lse = y->d_o + y->n;
    y->d_q = y->lse + y->n;
    y->d_k = y->d_q + y->n;
    y->d_v = y->d_k + y->n;
    for (int r = 0; r < g->d.ranks; r++) {
        ra_tensors *t = &g->t[r];
        const int64_t at = r * g->rows * row;
        t->d_o.data = y->d_o + at;
        t->lse.data = y->lse + at;
        t->d_q.data = y->d_q + at;
        t->d_k.data = y->d_k + at;
        t->d_v.data = y->d_v + at;
    }
}

/* Rank 0 of two, whose clock shows the work that it has done. */
static struct { rings *x; ra_transport net; int64_t polled, most, longest; } worker;

static void worker_works(int64_t multiply_adds) {
    const int64_t ns = multiply_adds / 10;         /* 20 GFLOP/s */
    int64_t gap;
    worker.x->clock += ns;
    gap = worker.x->clock - worker.polled;
    if (gap > worker.most) worker.most = gap;
    if (ns > worker.longest) worker.longest = ns;
}

static int worker_poll(void *ctx, ra_transport_op *const *ops, int n) {
    worker.polled = worker.x->clock;
    return worker.net.poll(ctx, ops, n);
}

static void worker_begin(rings *x, int pass) {
    worker.x = x;
    worker.polled = x->clock;
    worker.most = worker.longest = 0;
    rings_begin(x, pass);
    hook_work(x->ring[0], worker_works);
}

/* The transport is also polled within a step: 0.2 ms after the last time, or one call of a kernel
 * later, for any length of step. */
TEST(steps_poll) {
    rings x;
    grads y;
    x.g = rig_new(2, 2048, 1);
    x.g->d.chunk_tokens = 1024;
    x.g->d.train = 1;
    rig_plans(x.g);
    grads_new(&y, x.g);
    rings_open(&x, 0, NULL);
    worker.net = x.net[0];
    rings_poll_by(&x, worker_poll, NULL);
    for (int pass = RA_PASS_FORWARD; pass <= RA_PASS_BACKWARD; pass++) {
        worker_begin(&x, pass);
        rings_end(&x);
        printf("    at most %.3f ms, a call %.3f ms\n", (double)worker.most * 1e-6,
               (double)worker.longest * 1e-6);
        CHECK(worker.longest > 0 && worker.most <= 200000 + worker.longest);
        if (pass == RA_PASS_BACKWARD)              /* kernels of f32 are called for each tile */
            CHECK_EQ(worker.longest, 64 * 64 * (3 * x.g->d.k_dim + 2 * x.g->d.v_dim) / 10);
    }
    rings_close(&x);
    free(y.all);
}

/* How a network ends receives whose message has another length than agreed. Odd values: with an
 * undefined state. */
enum { SHORT_ERROR, SHORT_DONE, SHORT_ERROR_AND_BYTES, SHORT_LONGER, SHORT_ODD };
static ra_transport short_net;
static int short_way;

static int short_poll(void *ctx, ra_transport_op *const *ops, int n) {
    int code = short_net.poll(ctx, ops, n);
    for (int i = 0; i < n; i++) {
        ra_transport_op *op = ops[i];
        if (op->kind != RA_MSG_RECV || op->state != RA_MSG_DONE) continue;
        op->done = short_way == SHORT_ERROR ? 0 : op->len - 64;
        if (short_way == SHORT_LONGER) op->done += 128;
        op->state = short_way == SHORT_ODD ? 7 : short_way == SHORT_DONE ? RA_MSG_DONE : RA_E_TRUNC;
    }
    return code;
}

/* The rings of two ranks differ in checksums trust_plans or resumable, or one begins a backward
 * pass. Both
 * name that. */
TEST(rings_that_differ) {
    static const char *const text[4] = { "checksums", "trust_plans", "forward or backward",
                                         "resumable" };
    for (int what = 0; what < 4; what++) {
        rings x;
        grads y;
        ra_failure f;
        ra_status s[2] = { RA_AGAIN, RA_AGAIN };
        x.g = rig_new(2, 256, 1);
        x.g->d.train = 1;
        rig_plans(x.g);
        grads_new(&y, x.g);
        x.all = network_open(x.g, 0, NULL);
        x.clock = 1;
        for (int r = 0; r < 2; r++) {
            ra_ring_desc rd = { 0 };
            ra_job job = rig_job(x.g, r);
            rd.checksums = what == 0 && r;
            rd.trust_plans = what == 1 && r;
            rd.resumable = what == 3 && r;
            x.net[r] = mail_transport(x.all, r);
            rings_create(&x, r, &rd);
            job.pass = what == 2 && r ? RA_PASS_BACKWARD : RA_PASS_FORWARD;
            CHECK_EQ(ra_begin(x.ring[r], &job), RA_OK);
        }
        for (int i = 0; i < 10000 && (s[0] > 0 || s[1] > 0); i++)
            for (int r = 0; r < 2; r++) if (s[r] > 0) s[r] = ra_step(x.ring[r], 0);
        for (int r = 0; r < 2; r++) {
            CHECK_EQ(s[r], RA_E_MISMATCH);
            if (!CHECK(ra_ring_failure(x.ring[r], &f) == RA_OK && strstr(f.text, text[what])))
                printf("    %s\n", f.text);
        }
        rings_close(&x);
        free(y.all);
    }
}

/* A rank whose threads were away for longer than the watchdog's time has not waited so long: it
 * fails after that time of calls without progress, and not with RA_E_TIMEOUT. */
TEST(absent_callers_do_not_wait) {
    enum { WATCHDOG = 1000 };
    ra_ring_desc rd = { 0 };
    ra_status s = RA_AGAIN;
    int64_t since;
    rings x;
    x.g = rig_new(2, 256, 1);
    rd.watchdog_ns = WATCHDOG;
    rings_open(&x, 0, &rd);
    rings_begin(&x, RA_PASS_FORWARD);
    for (int i = 0; i < 20; i++) s = ra_step(x.ring[0], 0);    /* rank 1 makes no call */
    CHECK(s > 0);
    x.clock += 10 * WATCHDOG;
    CHECK(ra_step(x.ring[0], 0) > 0);
    for (since = x.clock; s > 0 && x.clock < since + 10 * WATCHDOG; x.clock += WATCHDOG / 10)
        s = ra_step(x.ring[0], 0);
    CHECK_EQ(s, RA_E_PEER);
    CHECK(x.clock > since + WATCHDOG && x.clock < since + 2 * WATCHDOG);
    rings_close(&x);
}

/* Rank 1 has another scale. Rank 0 reports that if it sees the frame, even of a message of another
 * length. It confuses neither a number of bytes with a code of the transport nor the reverse. */
TEST(short_messages_name_what_differs) {
    for (int way = SHORT_ERROR; way <= SHORT_ODD; way++) {
        rings x;
        ra_ring_desc rd = { 0 };
        ra_failure f;
        ra_desc d;
        ra_status s[2] = { RA_AGAIN, RA_AGAIN };
        int named = way == SHORT_DONE || way == SHORT_ERROR_AND_BYTES || way == SHORT_LONGER;
        rd.trust_plans = 1;
        x.g = rig_new(2, 256, 1);
        d = x.g->d;
        d.rank = 1;
        d.scale = 0.5f;
        ra_plan_destroy(x.g->plan[1]);
        CHECK_EQ(ra_plan_create(&x.g->plan[1], &d, NULL), RA_OK);
        rings_open(&x, 0, &rd);
        short_net = x.net[0];
        short_way = way;
        rings_poll_by(&x, short_poll, &rd);
        rings_begin(&x, RA_PASS_FORWARD);
        for (int i = 0; i < 10000 && s[0] > 0; i++) {
            if (s[1] > 0) s[1] = ra_step(x.ring[1], 0);
            s[0] = ra_step(x.ring[0], 0);
        }
        CHECK_EQ(s[0], named ? RA_E_MISMATCH : way == SHORT_ODD ? RA_E_IO : RA_E_TRUNC);
        CHECK_EQ(ra_ring_failure(x.ring[0], &f), RA_OK);
        CHECK_EQ(f.peer, 1);
        CHECK_EQ(f.code, way == SHORT_DONE ? 0 : way == SHORT_ODD ? 7 : RA_E_TRUNC);
        CHECK_EQ(strstr(f.text, "bytes moved") != NULL, way == SHORT_DONE);
        CHECK_EQ(strstr(f.text, "scale") != NULL, named);
        rings_close(&x);
    }
}

typedef struct seat_0 { rig *g; mail_net *all; int rank; ra_status end; ra_failure why; } seat_0;

static void *seat_0_main(void *arg) {
    seat_0 *x = (seat_0 *)arg;
    x->end = one_rank(x->g, x->all, x->rank, &x->why);
    return NULL;
}

/* With sendrecv alone too, with a helper or without, and without a deadline: a rank whose messages
 * do not fit, and the one after it, name what differs. The others are told. */
TEST(sendrecv_names_what_differs) {
    static const char *const text[3] = { ": mask", ": layout", ": chunk_tokens" };
    static const int worlds[3] = { 2, 3, 5 };
    for (int i = 0; i < 3 * 5 * 3 * 2; i++) {
        int64_t left = i;
        const int ranks = worlds[h_pick(&left, 3)], odd = h_pick(&left, 5);
        const int helps = h_pick(&left, 2), what = (int)left;
        pthread_t id[RANKS];
        seat_0 seat[RANKS];
        mail_desc d;
        ra_desc other;
        rig *g;
        if (odd >= ranks) continue;
        g = rig_new(ranks, 128 * ranks, 1);
        other = g->d;
        other.rank = odd;
        if (what == 0) other.mask.kind = RA_MASK_CAUSAL;
        if (what == 1) other.layout.kind = RA_LAYOUT_STRIPED;
        if (what == 2) other.chunk_tokens = 128;
        ra_plan_destroy(g->plan[odd]);
        CHECK_EQ(ra_plan_create(&g->plan[odd], &other, NULL), RA_OK);
        memset(&d, 0, sizeof d);
        memset(seat, 0, sizeof seat);
        d.ranks = ranks;
        d.tells = 1;
        d.caps = helps ? RA_CAP_HELPER : 0;
        seat[0].all = mail_open(&d, NULL);
        for (int r = 0; r < ranks; r++) {
            seat[r].g = g; seat[r].all = seat[0].all; seat[r].rank = r;
            if (pthread_create(&id[r], NULL, seat_0_main, &seat[r])) abort();
        }
        for (int r = 0; r < ranks; r++) pthread_join(id[r], NULL);
        for (int r = 0, named = 0; r < ranks; r++) {
            const int near = r == odd || r == (odd + 1) % ranks;
            const int mismatch = seat[r].end == RA_E_MISMATCH;
            CHECK(seat[r].end == RA_E_ABORTED || (near && mismatch));
            if (mismatch)
                CHECK(strstr(seat[r].why.text, text[what]) &&
                      seat[r].why.peer == (r + ranks - 1) % ranks);
            named += mismatch;
            if (r == ranks - 1) CHECK(named > 0);
        }
        (void)mail_close(seat[0].all);
        rig_free(g);
    }
}

/* The end of a sentence is never cut off, however long the text of a transport is. */
TEST(sentences_are_whole) {
    char long_text[1000];
    size_t most = 0;
    memset(long_text, 'x', sizeof long_text);
    long_text[sizeof long_text - 1] = 0;
    for (int i = 0; i < 200; i++) {
        const int cache = i / 100, s = -(i % 100);
        ra_failure f;
        hook_longest_failure(cache, s, long_text, &f);
        CHECK(strstr(f.text, "ms since progress: 9223372036854") != NULL);
        CHECK_EQ(strstr(f.text, "xx)") != NULL, s != RA_E_ENGINE);     /* its codes are its own */
        if (strlen(f.text) > most) most = strlen(f.text);
        hook_longest_failure(cache, s, "short", &f);
        CHECK_EQ(strstr(f.text, "(short)") != NULL, s != RA_E_ENGINE);
    }
    printf("    the longest has %d bytes\n", (int)most);
    CHECK(most < RA_TEXT_BYTES - 1);
}

/* After a failure every call gives the same status, and its text counts what went well before. */
TEST(first_failure_stays) {
    for (int passes = 0; passes < 3; passes++) {
        rings x;
        ra_failure f;
        ra_job job;
        ra_status s;
        x.g = rig_new(2, 256, 1);
        rings_open(&x, 0, NULL);
        for (int i = 0; i < passes; i++) rings_pass(&x, RA_PASS_FORWARD);
        job = rig_job(x.g, 0);
        job.ticket = 7;
        do {
            x.clock += 50 * SECOND;
            s = ra_join(x.ring[0], &job, 0);
        } while (s > 0);
        CHECK_EQ(s, RA_E_PEER);
        CHECK_EQ(ra_ring_failure(x.ring[0], &f), RA_OK);
        CHECK_EQ(strstr(f.text, "nothing of this plan has come yet") != NULL, passes == 0);
        CHECK_EQ(ra_join(x.ring[0], &job, 0), RA_E_PEER);
        job.ticket = 9;
        CHECK_EQ(ra_join(x.ring[0], &job, 0), RA_E_PEER);
        job.ticket = 3;
        CHECK_EQ(ra_join(x.ring[0], &job, 0), RA_E_PEER);
        job.ticket = 0;
        CHECK_EQ(ra_begin(x.ring[0], &job), RA_E_PEER);
        CHECK_EQ(ra_step(x.ring[0], 0), RA_E_PEER);
        CHECK_EQ(ra_forward(x.g->plan[0], x.ring[0], &x.g->t[0], RA_NO_DEADLINE), RA_E_PEER);
        CHECK_EQ(ra_finish(x.ring[0], RA_NO_DEADLINE), RA_E_PEER);
        rings_close(&x);
    }
}

/* -------------------------------------------------------------------------- calls that overlap
 * In front of a rank's transport of the bundled world: counts calls that begin before another has
 * returned, and makes poll fail at a given call. */
typedef struct guard {
    const ra_transport *world;
    int inside, fail_at, polls;        /* atomics */
    int64_t overlaps, calls;
    void (*in_wait)(struct guard *);   /* once, during a call of wait */
    ra_ring *ring;
} guard;

static void guard_enter(guard *x) {
    __atomic_fetch_add(&x->calls, 1, __ATOMIC_SEQ_CST);
    if (__atomic_exchange_n(&x->inside, 1, __ATOMIC_SEQ_CST))
        __atomic_fetch_add(&x->overlaps, 1, __ATOMIC_SEQ_CST);
}

static void guard_leave(guard *x) { __atomic_store_n(&x->inside, 0, __ATOMIC_SEQ_CST); }

static int guard_post(void *ctx, ra_transport_op *const *ops, int n) {
    guard *x = (guard *)ctx;
    int code;
    guard_enter(x);
    code = x->world->post(x->world->ctx, ops, n);
    guard_leave(x);
    return code;
}

static int guard_poll(void *ctx, ra_transport_op *const *ops, int n) {
    guard *x = (guard *)ctx;
    int code, failing = __atomic_add_fetch(&x->polls, 1, __ATOMIC_SEQ_CST) == x->fail_at;
    guard_enter(x);
    code = x->world->poll(x->world->ctx, ops, n);
    guard_leave(x);
    return failing ? RA_E_IO : code;
}

static int guard_wait(void *ctx, ra_transport_op *const *ops, int n, int64_t deadline_ns) {
    guard *x = (guard *)ctx;
    void (*hook)(guard *) = x->in_wait;
    int code;
    guard_enter(x);
    x->in_wait = NULL;
    if (hook) hook(x);
    code = x->world->wait(x->world->ctx, ops, n, deadline_ns);
    guard_leave(x);
    return code;
}

static int guard_quiesce(void *ctx, int64_t deadline_ns) {
    guard *x = (guard *)ctx;
    int code;
    guard_enter(x);
    code = x->world->quiesce(x->world->ctx, deadline_ns);
    guard_leave(x);
    return code;
}

static int guard_abort(void *ctx, int why) {
    guard *x = (guard *)ctx;
    return x->world->abort(x->world->ctx, why);
}

static ra_transport guard_transport(guard *x, const ra_transport *world) {
    ra_transport t = *world;
    x->world = world;
    t.ctx = x;
    t.post = guard_post;
    t.poll = guard_poll;
    t.wait = guard_wait;
    t.quiesce = guard_quiesce;
    t.abort = guard_abort;
    return t;
}

static void fail_beside(guard *x) {
    ra_ring_cancel(x->ring);
    CHECK_EQ(ra_step(x->ring, 1), RA_E_CANCELLED);
}

/* While one thread sleeps in the transport, another finds the failure and is the last inside. Then
 * the thread that sleeps tells the transport, once it is back. */
TEST(quiesce_waits_for_wait) {
    rig *g = rig_new(2, 256, 2);
    guard x = { 0 };
    ra_world *world = hook_world(2);
    ra_ring *ring = NULL;
    ra_transport net;
    ra_job job = rig_job(g, 0);
    net = guard_transport(&x, ra_world_transport(world, 0));
    CHECK_EQ(ra_ring_create(&ring, g->plan[0], &net, NULL), RA_OK);
    x.ring = ring;
    x.in_wait = fail_beside;
    CHECK_EQ(ra_begin(ring, &job), RA_OK);
    while (ra_step(ring, 0) == RA_AGAIN) { }
    CHECK_EQ(ra_step_wait(ring, RA_NO_DEADLINE), RA_OK);
    CHECK(x.in_wait == NULL);
    CHECK_EQ(x.overlaps, 0);
    CHECK_EQ(hook_parted(ring), 1);    /* rank 1 need not wait for ra_finish here */
    ra_world_leave(world, 1, RA_OK);
    CHECK_EQ(ra_finish(ring, RA_NO_DEADLINE), RA_E_CANCELLED);
    CHECK_EQ(ra_ring_destroy(ring), RA_OK);
    ra_world_destroy(world);
    rig_free(g);
}

enum { CREW = 3 };
typedef struct crew {
    rig *g;
    guard x[2];
    ra_ring *ring[2];
    int passes, how;                   /* how: 0 none fails, 1 poll fails, 2 a cancel */
    int64_t events;
} crew;
typedef struct hand { crew *c; int rank, ith; ra_status end; } hand;

static void crew_event(void *ctx, const ra_event *e) {
    crew *c = (crew *)ctx;
    if (e->backward == 0) __atomic_fetch_add(&c->events, 1, __ATOMIC_RELAXED);
}

static void *hand_main(void *arg) {
    hand *x = (hand *)arg;
    crew *c = x->c;
    ra_ring *ring = c->ring[x->rank];
    ra_job job = rig_job(c->g, x->rank);
    x->end = RA_OK;
    for (int i = 1; i <= c->passes && !x->end; i++) {
        ra_status s = RA_AGAIN;
        job.ticket = (uint64_t)i;
        while (s > 0) {
            s = ra_join(ring, &job, x->ith);
            if (s == RA_WAIT) (void)ra_step_wait(ring, RA_NO_DEADLINE);
        }
        x->end = s;
        if (c->how == 2 && i == 3 && x->rank == 0 && x->ith == 1) ra_ring_cancel(ring);
    }
    return NULL;
}

static void crew_run(crew *c) {
    pthread_t id[2 * CREW];
    hand hands[2 * CREW];
    ra_world *world = hook_world(2);
    ra_transport net[2];
    for (int r = 0; r < 2; r++) {
        ra_ring_desc rd = { 0 };
        rd.trace = crew_event;
        rd.trace_ctx = c;
        net[r] = guard_transport(&c->x[r], ra_world_transport(world, r));
        CHECK_EQ(ra_ring_create(&c->ring[r], c->g->plan[r], &net[r], &rd), RA_OK);
    }
    for (int i = 0; i < 2 * CREW; i++) {
        hands[i].c = c; hands[i].rank = i / CREW; hands[i].ith = i % CREW;
        if (pthread_create(&id[i], NULL, hand_main, &hands[i])) abort();
    }
    for (int i = 0; i < 2 * CREW; i++) pthread_join(id[i], NULL);
    for (int i = 0; i < 2 * CREW; i++) {
        if (!c->how) CHECK_EQ(hands[i].end, RA_OK);
        CHECK_EQ(hands[i].end, hands[i / CREW * CREW].end);    /* all threads get the same */
    }
    /* A rank of a failed pass has left when its last thread leaves: nobody waits for its end. A
     * rank that finished all its passes before the other failed says itself that it has
     * finished. */
    for (int r = 0; r < 2; r++)
        if (!hands[r * CREW].end) ra_world_leave(world, r, RA_OK);
    for (int r = 0; r < 2; r++) CHECK_EQ(ra_ring_destroy(c->ring[r]), RA_OK);
    for (int r = 0; r < 2; r++) CHECK_EQ(c->x[r].overlaps, 0);
    ra_world_destroy(world);
}

/* Several threads per rank, in steps and in waits, with failures at every place. */
TEST(calls_never_overlap) {
    for (int64_t i = 0; i < 120; i++) {
        crew c = { 0 };
        if (!h_case(i)) continue;
        c.g = rig_new(2, 256, CREW);
        c.passes = 6;
        c.how = i % 10 == 0 ? 0 : i % 10 == 9 ? 2 : 1;
        if (c.how == 1) c.x[i % 2].fail_at = (int)(1 + i % 80);      /* the last: after the pass */
        crew_run(&c);
        CHECK(c.events > 0 && c.x[0].calls > 0);
        rig_free(c.g);
    }
}

/* -------------------------------------------------------------------------- the end of a pass */

typedef struct late_clock { ra_ring *ring; int64_t now; int armed; } late_clock;

/* While one thread reads the time, another ends the pass. */
static int64_t late_now(void *ctx) {
    late_clock *x = (late_clock *)ctx;
    ra_status s = RA_AGAIN;
    if (!x->armed) return x->now;
    x->armed = 0;
    while (s > 0) s = ra_step(x->ring, 1);
    CHECK_EQ(s, RA_OK);
    return x->now += 1000;
}

/* A thread that finds the deadline passed after the pass has ended fails nothing. */
TEST(no_failure_after_the_end) {
    rig *g = rig_new(1, 256, 2);
    ra_ring *ring = NULL;
    ra_ring_desc rd = { 0 };
    ra_failure f;
    late_clock x = { 0 };
    ra_job job = rig_job(g, 0);
    ra_status s;
    x.now = 1;
    rd.clock_ns = late_now;
    rd.clock_ctx = &x;
    CHECK_EQ(ra_ring_create(&ring, g->plan[0], NULL, &rd), RA_OK);
    x.ring = ring;
    job.deadline_ns = 500;
    CHECK_EQ(ra_begin(ring, &job), RA_OK);
    x.armed = 1;
    s = ra_step(ring, 0);
    CHECK(s >= 0 && !x.armed && x.now > 500);
    CHECK_EQ(ra_step(ring, 0), RA_OK);
    CHECK_EQ(ra_ring_failure(ring, &f), RA_E_STATE);
    rig_check(g);
    job.deadline_ns = 0;
    CHECK_EQ(ra_begin(ring, &job), RA_OK);
    while ((s = ra_step(ring, 0)) > 0) { }
    CHECK_EQ(s, RA_OK);
    CHECK_EQ(ra_ring_destroy(ring), RA_OK);
    rig_free(g);
}

/* -------------------------------------------------------------------------- leaving a world */

static ra_world *left_world;
static void leave_rank_0(void) { ra_world_leave(left_world, 0, RA_OK); }

/* A rank leaves between the moment when a call of its own looks for failures and the moment when it
 * queues an op. Nothing may be queued after that: the leaving thread waits until the call is
 * out. */
TEST(leaving_during_a_post) {
    for (int kind = RA_MSG_SEND; kind <= RA_MSG_RECV; kind++) {
        const ra_transport *t;
        ra_transport_op op[2], *list[1];
        char bytes[2][64];
        memset(bytes, 0, sizeof bytes);
        left_world = hook_world(2);
        t = ra_world_transport(left_world, 0);
        for (int i = 0; i < 2; i++) {
            memset(&op[i], 0, sizeof op[i]);
            op[i].kind = (uint8_t)kind;
            op[i].peer = 1;
            op[i].buf = bytes[i];
            op[i].len = sizeof bytes[i];
            list[0] = &op[i];
            if (i) hook_before_lock = leave_rank_0;
            (void)t->post(t->ctx, list, 1);
        }
        CHECK(hook_before_lock == NULL);
        CHECK(op[1].state < 0);
        CHECK_EQ(hook_open_ops(t), 0);
        ra_world_leave(left_world, 1, RA_OK);
        ra_world_destroy(left_world);
    }
}

/* -------------------------------------------------------------------------- floating-point mode */

/* O and dO are so small that products of their elements are denormal, weights are nearly 0 or 1,
 * and K is large enough for dQ to show it. */
static void tiny_rings(rings *x, grads *y) {
    x->g = rig_new(2, 256, 1);
    grads_new(y, x->g);
    for (int64_t i = 0; i < y->n; i++) {
        x->g->q[i] *= 1e-28f;
        x->g->k[i] *= 1e30f;
        x->g->v[i] = 1.05e-19f;
        y->d_o[i] = 1.05e-19f;
    }
    x->g->d.train = 1;
    rig_plans(x->g);
    rings_open(x, 0, NULL);
    rings_pass(x, RA_PASS_FORWARD);
}

#if defined(__x86_64__)
/* The caller's FTZ and DAZ change no bit of a gradient. */
TEST(flushing_callers) {
    uint32_t mode = __builtin_ia32_stmxcsr();
    grads y[2];
    for (int i = 0; i < 2; i++) {
        rings x;
        tiny_rings(&x, &y[i]);
        if (i) __builtin_ia32_ldmxcsr(mode | 0x8040u);
        rings_pass(&x, RA_PASS_BACKWARD);
        __builtin_ia32_ldmxcsr(mode);
        rings_close(&x);
    }
    CHECK_BITS(y[0].d_q, y[1].d_q, y[0].n * 4);
    CHECK_BITS(y[0].d_k, y[1].d_k, y[0].n * 4);
    CHECK_BITS(y[0].d_v, y[1].d_v, y[0].n * 4);
    free(y[0].all);
    free(y[1].all);
}
#else
TEST(flushing_callers) { h_run.skipped = 1; }
#endif

/* -------------------------------------------------------------------------- pieces
 * Rank 0 of two. Each look at the clock advances it by more than the time from poll to poll, so the
 * rank polls between any two pieces of work. */
static struct {
    ra_transport net;
    int64_t polls, before;             /* of the transport; at the last event */
    int64_t packed;                    /* fewest polls while an own chunk was packed */
    int64_t row, most;                 /* rows of gradients handed over since a poll, at most */
} pieces;

static int64_t slow_clock(void *ctx) { return *(int64_t *)ctx += 300000; }

static int pieces_count(void *ctx, ra_transport_op *const *ops, int n) {
    pieces.polls++;
    pieces.row = 0;
    return pieces.net.poll(ctx, ops, n);
}

static void pieces_event(void *ctx, const ra_event *e) {
    const int64_t since = pieces.polls - pieces.before;
    const int own = e->chunk >= 0 && e->origin == e->rank;
    (void)ctx;
    if (own && e->kind == RA_EV_POST_SEND && since < pieces.packed) pieces.packed = since;
    pieces.before = pieces.polls;
}

static void pieces_put(void) {
    if (++pieces.row > pieces.most) pieces.most = pieces.row;
}

enum { PIECES_FORWARD, PIECES_SUMS, PIECES_PACKED, PIECES_HANDED };

static void pieces_pass(int how) {
    rings x;
    grads y;
    ra_ring_desc rd = { 0 };
    rd.checksums = how == PIECES_SUMS;
    rd.watchdog_ns = (int64_t)1 << 60;
    x.g = rig_new(2, 2048, 1);
    x.g->d.chunk_tokens = 1024;
    x.g->d.train = 1;
    if (how == PIECES_HANDED) x.g->d.mask.kind = RA_MASK_CAUSAL;
    rig_plans(x.g);
    grads_new(&y, x.g);
    rings_open(&x, 0, &rd);
    memset(&pieces, 0, sizeof pieces);
    pieces.net = x.net[0];
    pieces.packed = INT64_MAX;
    rd.clock_ns = slow_clock;
    rd.clock_ctx = &x.clock;
    rd.trace = pieces_event;
    rings_poll_by(&x, pieces_count, &rd);
    rings_begin(&x, how > PIECES_SUMS ? RA_PASS_BACKWARD : RA_PASS_FORWARD);
    if (how == PIECES_HANDED) hook_puts(x.ring[0], pieces_put);
    rings_end(&x);
    rings_close(&x);
    free(y.all);
}

/* Blocks of 64 rows are packed and returned with a poll after each, never a whole chunk at once. */
TEST(pieces_poll) {
    const int64_t blocks = 1024 / RA_BLOCK_TOKENS;
    pieces_pass(PIECES_FORWARD);
    CHECK(pieces.packed >= 2 * blocks && pieces.packed < INT64_MAX);
    pieces_pass(PIECES_SUMS);
    CHECK(pieces.packed > 2 * blocks && pieces.packed < INT64_MAX);
    pieces_pass(PIECES_PACKED);
    CHECK(pieces.packed >= 2 * blocks && pieces.packed < INT64_MAX);
    pieces_pass(PIECES_HANDED);
    CHECK(pieces.most > 0 && pieces.most <= 8 * RA_BLOCK_TOKENS);
}

/* -------------------------------------------------------------------------- events */
static int64_t counting_clock(void *ctx) { return ++*(int64_t *)ctx; }

typedef struct listener { ra_ring *ring; int64_t heard, late; } listener;

/* A callback sees the events before the one that it is called for. */
static void listen_event(void *ctx, const ra_event *e) {
    listener *x = (listener *)ctx;
    ra_event all[RA_EVENTS];
    const int n = x->ring ? ra_ring_events(x->ring, all, RA_EVENTS) : 0;
    x->heard += n > 0;
    x->late += n > 0 && all[n - 1].end_ns >= e->end_ns;
}

/* Rank 1 stops after `steps` steps, and the deadline of rank 0 passes. Its last events are in order
 * and show which message that was posted did not come. Returns how many events there are. */
static int one_death(const rig *g, int passes, int steps) {
    mail_net *all = network_open(g, 0, NULL);
    ra_ring *ring[2] = { NULL, NULL };
    ra_transport net[2];
    ra_event e[RA_EVENTS + 1], few[5];
    ra_failure why;
    ra_ring_desc rd = { 0 };
    listener ear = { NULL, 0, 0 };
    int64_t clock = 0;
    int n = 0, open = -1;
    rd.clock_ns = counting_clock;
    rd.clock_ctx = &clock;
    rd.trace_ctx = &ear;
    for (int r = 0; r < 2; r++) {
        rd.trace = r ? NULL : listen_event;
        net[r] = mail_transport(all, r);
        CHECK_EQ(ra_ring_create(&ring[r], g->plan[r], &net[r], &rd), RA_OK);
        CHECK_EQ(ra_ring_events(ring[r], e, RA_EVENTS), 0);
    }
    ear.ring = ring[0];
    for (int i = 0; i <= passes; i++) {
        ra_status s[2];
        for (int r = 0; r < 2; r++) {
            ra_job job = rig_job(g, r);
            job.deadline_ns = i == passes ? clock + 100000 : 0;
            CHECK_EQ(ra_begin(ring[r], &job), RA_OK);
        }
        if (i < passes) step_all(ring, 2, s);
    }
    for (int i = 0; i < steps; i++) (void)ra_step(ring[1], 0);
    for (ra_status st = RA_AGAIN; st > 0; st = ra_step(ring[0], 0)) {
        if (st == RA_WAIT) clock += 30000;
        if (st == RA_WAIT) (void)ra_step_wait(ring[0], 0);
    }
    CHECK_EQ(ra_ring_failure(ring[0], &why), RA_OK);
    CHECK_EQ(why.status, RA_E_TIMEOUT);
    n = ra_ring_events(ring[0], e, RA_EVENTS + 1);
    if (CHECK(n > 4 && n <= RA_EVENTS)) {
        for (int i = 1; i < n; i++) CHECK(e[i].end_ns > e[i - 1].end_ns);
        CHECK_EQ(e[n - 1].kind, RA_EV_FAIL);
        CHECK_EQ(e[n - 1].status, RA_E_TIMEOUT);
        CHECK_EQ(e[n - 2].kind, RA_EV_ABORT);
        CHECK_EQ(e[n - 3].kind, RA_EV_WAIT);   /* one for all of them */
        CHECK(e[n - 4].kind != RA_EV_WAIT);
        for (int i = 0; i < n; i++) {
            if (e[i].kind == RA_EV_POST_RECV && open < 0) open = i;
            if ((e[i].kind == RA_EV_RECV || e[i].kind == RA_EV_RECV_CONTROL) && open >= 0 &&
                e[i].chunk == e[open].chunk)
                for (open++; open < n && e[open].kind != RA_EV_POST_RECV; open++) { }
        }
        CHECK(why.peer == 1 && why.sending == 0);
        if (CHECK(open >= 0 && open < n))
            CHECK(e[open].peer == why.peer && e[open].chunk == why.chunk &&
                  e[open].hop == why.hop && e[open].pass == why.pass);
        CHECK_EQ(ra_ring_events(ring[0], few, 5), 5);
        CHECK(memcmp(few, &e[n - 5], sizeof few) == 0);
        CHECK_EQ(ra_ring_events(ring[0], few, 0), 0);
        CHECK_EQ(ra_ring_events(ring[0], NULL, 5), 0);
    }
    CHECK(ear.heard > 0 && ear.late == 0);
    for (int r = 0; r < 2; r++) (void)ra_ring_destroy(ring[r]);
    mail_close(all);
    return n;
}

/* The events of a ring name the message that did not come: the hello, some chunk, and after many
 * messages more than the ring remembers. */
TEST(events_name_what_is_missing) {
    rig *g = rig_new(2, 1024, 1);
    CHECK(one_death(g, 0, 0) < RA_EVENTS);
    for (int steps = 1; steps < 12; steps++) (void)one_death(g, 0, steps);
    CHECK_EQ(one_death(g, 3, 2), RA_EVENTS);
    rig_free(g);
}

TEST(events_as_text) {
    char text[RA_TEXT_BYTES];
    ra_event e = { 0 };
    e.kind = RA_EV_POST_RECV;
    e.rank = 3;
    e.peer = 2;
    e.pass = 7;
    e.chunk = 21;
    e.hop = 4;
    e.bytes = 4160;
    e.begin_ns = e.end_ns = 5000;
    CHECK(strcmp(ra_event_text(&e, 12000, text),
                 "-7 us: rank 3, pass 7: posted a receive, peer 2, chunk 21, hop 4, bytes 4160") ==
          0);
    e.kind = RA_EV_FOLD;
    e.peer = e.hop = -1;
    e.bytes = 0;
    CHECK(strcmp(ra_event_text(&e, 5000, text),
                 "0 us: rank 3, pass 7: folded all up to chunk 21") == 0);
    e.kind = RA_EV_RECV_CONTROL;
    e.chunk = -1;
    CHECK(strcmp(ra_event_text(&e, 5000, text),
                 "0 us: rank 3, pass 7: received a control message") == 0);
    e.kind = RA_EV_FAIL;
    e.status = RA_E_CANCELLED;
    CHECK(strncmp(ra_event_text(&e, 5000, text), "0 us: rank 3, pass 7: pass failed: ", 35) == 0);
    e.kind = 999;
    e.end_ns = INT64_MIN;
    CHECK(ra_event_text(&e, INT64_MAX, text) == text);
    CHECK(ra_event_text(NULL, 0, text) == text && ra_event_text(&e, 0, NULL) == NULL);
}

enum { WRITERS = 3 };
typedef struct writer { ra_ring *ring; int which; int64_t events, torn; } writer;

static ra_event numbered_event(int which, int64_t number) {
    ra_event e = { 0 };
    e.kind = number % 3 ? RA_EV_FOLD : RA_EV_WAIT;
    e.rank = e.thread = e.peer = e.origin = which;
    e.pass = e.chunk = e.q_row = e.q_rows = e.head = e.begin_ns = e.bytes = e.tiles = number;
    e.end_ns = e.kind == RA_EV_WAIT ? 0 : number;      /* the end of a WAIT may be a later one's */
    e.hop = e.status = e.backward = e.sequence = (int32_t)number;
    return e;
}

/* All of an event comes from one writer and number. Numbers of a writer rise. */
static void read_events(writer *w) {
    enum { BYTES = offsetof(ra_event, status) + sizeof(int32_t) };     /* without the padding */
    ra_event e[RA_EVENTS];
    int64_t last[WRITERS] = { -1, -1, -1 };
    const int n = ra_ring_events(w->ring, e, RA_EVENTS);
    for (int i = 0; i < n; i++) {
        ra_event want = numbered_event(e[i].rank, e[i].pass);
        want.end_ns = e[i].end_ns;
        w->torn += memcmp(&want, &e[i], BYTES) != 0 || e[i].rank < 0 ||
                   e[i].rank >= WRITERS || e[i].pass <= last[e[i].rank % WRITERS] ||
                   (e[i].kind == RA_EV_FOLD && e[i].end_ns != e[i].pass);
        last[e[i].rank % WRITERS] = e[i].pass;
    }
    w->events += n;
}

static void *write_events(void *arg) {
    writer *w = (writer *)arg;
    for (int64_t i = 0; i < 30000; i++) {
        const ra_event e = numbered_event(w->which, i);
        hook_remember(w->ring, &e);
        if (i % 64 == w->which) read_events(w);
    }
    return NULL;
}

/* Several threads write and read at the same time. No event is a mixture of two. */
TEST(events_are_whole) {
    rig *g = rig_new(1, 64, 1);
    pthread_t id[WRITERS];
    writer w[WRITERS];
    ra_ring *ring = NULL;
    CHECK_EQ(ra_ring_create(&ring, g->plan[0], NULL, NULL), RA_OK);
    for (int i = 0; i < WRITERS; i++) {
        w[i].ring = ring;
        w[i].which = i;
        w[i].events = w[i].torn = 0;
        if (pthread_create(&id[i], NULL, write_events, &w[i])) abort();
    }
    for (int i = 0; i < WRITERS; i++) pthread_join(id[i], NULL);
    for (int i = 0; i < WRITERS; i++) CHECK(w[i].torn == 0 && w[i].events > 0);
    CHECK_EQ(ra_ring_destroy(ring), RA_OK);
    rig_free(g);
}

/* Rank 0 of a bundled world gives up with receives 0 and 2 of one flow, and 1 of another between
 * them, into which a copy is in progress: taking its ops back, it has to wait for that. */
typedef struct giver_up { const ra_transport *net; ra_transport_op *ops[3]; } giver_up;

static void *give_up(void *arg) {
    giver_up *g = (giver_up *)arg;
    CHECK_EQ(g->net->abort(g->net->ctx, RA_E_CANCELLED), RA_OK);
    CHECK_EQ(g->net->poll(g->net->ctx, g->ops, 3), RA_E_CANCELLED);
    return NULL;
}

static ra_transport_op op_of(int kind, int peer, int channel, uint64_t *buf) {
    ra_transport_op op = { 0 };
    op.kind = (uint8_t)kind;
    op.channel = (uint8_t)channel;
    op.peer = peer;
    op.buf = buf;
    op.len = sizeof *buf;
    return op;
}

/* What a peer that has not heard of it sends meanwhile goes into the next receive of its flow, not
 * into the one after it. */
TEST(ops_are_taken_back_from_the_last) {
    uint64_t got[3] = { 0, 0, 0 }, sent = 7;
    ra_transport_op in[3], out = op_of(RA_MSG_SEND, 0, 0, &sent);
    ra_world *world;
    pthread_t thread;
    giver_up g;
    world = hook_world(2);
    g.net = ra_world_transport(world, 0);
    for (int i = 0; i < 3; i++) {
        in[i] = op_of(RA_MSG_RECV, 1, i == 1, &got[i]);
        g.ops[i] = &in[i];
    }
    CHECK_EQ(g.net->post(g.net->ctx, g.ops, 3), RA_OK);
    hook_copy_begins(g.net, &in[1]);
    if (pthread_create(&thread, NULL, give_up, &g)) abort();
    while (__atomic_load_n(&in[0].state, __ATOMIC_ACQUIRE) == RA_MSG_PENDING &&
           __atomic_load_n(&in[2].state, __ATOMIC_ACQUIRE) == RA_MSG_PENDING) {}
    hook_post_unheard(ra_world_transport(world, 1), &out);
    hook_copy_ends(g.net, &in[1]);
    pthread_join(thread, NULL);
    CHECK_EQ(got[0], 7);
    CHECK_EQ(got[2], 0);
    CHECK_EQ(out.state, RA_MSG_DONE);
    for (int i = 0; i < 3; i++) CHECK_EQ(in[i].state, RA_E_CANCELLED);
    ra_world_leave(world, 0, RA_E_CANCELLED);
    ra_world_leave(world, 1, RA_OK);
    ra_world_destroy(world);
}

int main(int argc, char **argv) {
    if (argc == 3 && !strcmp(argv[1], "--space")) {
        const uint32_t space = hook_space();
        return write(atoi(argv[2]), &space, sizeof space) != sizeof space;
    }
    static const h_test tests[] = {
        ENTRY(ops_are_taken_back_from_the_last),
        ENTRY(shared_between_processes), ENTRY(shared_in_one_process), ENTRY(begin_reads_no_sinks),
        ENTRY(containers_share_no_memory), ENTRY(rings_that_differ),
        ENTRY(absent_callers_do_not_wait), ENTRY(helper_that_is_stuck),
        ENTRY(failed_exchange_names_what_was_due), ENTRY(deadlines_on_another_clock),
        ENTRY(quiesce_of_the_world_on_another_clock), ENTRY(world_waits_for_no_rank_that_rests),
        ENTRY(world_rests_after_any_pass),
        ENTRY(world_passes_take_turns), ENTRY(networks_take_turns_like_the_world),
        ENTRY(world_turns_after_failures),
        ENTRY(default_watchdog), ENTRY(default_watchdog_of_many_ranks),
        ENTRY(default_watchdog_of_a_million_tokens),
        ENTRY(refused_tickets_stay_refused), ENTRY(first_failure_stays),
        ENTRY(short_messages_name_what_differs), ENTRY(sentences_are_whole),
        ENTRY(failed_exchange_names_both_peers),
        ENTRY(sendrecv_names_what_differs), ENTRY(steps_poll),
        ENTRY(quiesce_waits_for_wait), ENTRY(calls_never_overlap), ENTRY(no_failure_after_the_end),
        ENTRY(leaving_during_a_post), ENTRY(flushing_callers),
        ENTRY(pieces_poll),
        ENTRY(events_name_what_is_missing), ENTRY(events_as_text), ENTRY(events_are_whole),
    };
    return hook_main(argc, argv, tests, sizeof tests / sizeof tests[0]);
}
