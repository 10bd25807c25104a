/* examples/transports/ra_shm.h: rings of processes over shared memory. Proves the bits of one rank,
 * the number of loans, the end of passes whose ranks are killed or stopped at random moments,
 * refusals while ranks meet, and that nothing is left behind. --long: many more random moments, and
 * the times of the contract (a few may be late on busy machines). */
#include "examples/transports/ra_shm.h"
#include "examples/transports/ring_check.h"
#include "tests/harness.h"

#include <dirent.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>

enum { MOST = 8 };

typedef struct shared {                /* by all processes of a test */
    int32_t arrived, go;
    int32_t named;                     /* mappings of all ranks with a name in /dev/shm */
    int32_t status[MOST], passes[MOST];
    int64_t began_ns[MOST], ended_ns[MOST]; /* of the pass that failed */
    int64_t fault_ns, cancel_ns;
    ra_shm_counters count[MOST];
    ring_figures figures[MOST];
    char field[MOST][40], text[MOST][RA_TEXT_BYTES];
    float all[1 << 20];
} shared;

typedef struct world {
    int ranks;
    ring_task task;
    int32_t slots;                     /* of the descriptor; in open_with what differs */
    int64_t deadline_ms;               /* of each pass */
    char name[64];
    shared *s;
    pid_t pid[MOST];
    void (*fn)(const struct world *w, int rank);
} world;

static int32_t get(const int32_t *p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
static void put(int32_t *p, int32_t v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }

/* How late returns were. None may be late by a second and, with --long, at most one in three by
 * more than its bound. */
typedef struct lateness { int64_t worst; int many, late; } lateness;

static void was_late(lateness *l, int64_t ns, int64_t bound_ns) {
    CHECK(ns < bound_ns + 1000000000);
    l->many++;
    l->late += ns >= bound_ns;
    if (ns > l->worst) l->worst = ns;
}

static void judge_lateness(const lateness *l, const char *what) {
    printf("%s: at most %.2f ms, %d of %d late\n", what, (double)l->worst / 1e6, l->late, l->many);
    if (h_run.large) CHECK(l->late * 3 <= l->many);
}

/* -------------------------------------------------------------------------- processes */
static world world_of(int ranks) {
    static int number;
    world w = { 0 };
    w.ranks = ranks;
    w.task = ring_task_default();
    w.task.tokens = 512;
    w.task.heads = 2;
    w.task.kv_heads = 1;
    w.task.dim = 32;
    w.task.chunk_tokens = 64;
    w.deadline_ms = 20000;
    snprintf(w.name, sizeof w.name, "test_shm.%ld.%d", (long)getpid(), number++);
    w.s = (shared *)mmap(NULL, sizeof *w.s, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1,
                         0);
    if (w.s == MAP_FAILED) {
        perror("mmap");
        exit(2);
    }
    return w;
}

static void world_free(world *w) {
    CHECK_EQ(get(&w->s->named), 0);
    (void)munmap(w->s, sizeof *w->s);
}

static void start(world *w, void (*fn)(const world *w, int rank)) {
    pid_t parent = getpid();
    w->fn = fn;
    fflush(stdout);
    for (int r = 0; r < w->ranks; r++) {
        w->pid[r] = fork();
        if (w->pid[r]) continue;
        (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != parent) _exit(3);
        fn(w, r);
        _exit(0);
    }
}

/* Waits for a process for at most ms, then kills it. Returns the wait status; -1: it was killed. */
static int reap(pid_t pid, int64_t ms) {
    int64_t until = ra_deadline_ms(ms);
    int status = 0;
    while (waitpid(pid, &status, WNOHANG) == 0) {
        if (ra_now_ns() > until) {
            kill(pid, SIGKILL);
            (void)waitpid(pid, &status, 0);
            return -1;
        }
        ra_shm__nap(200000);
    }
    return status;
}

static void await_all(const world *w) {
    int64_t until = ra_deadline_ms(20000);
    while (get(&w->s->arrived) < w->ranks && ra_now_ns() < until) ra_shm__nap(50000);
    CHECK_EQ(get(&w->s->arrived), w->ranks);
}

static void barrier(const world *w, int32_t all) {
    (void)__atomic_fetch_add(&w->s->arrived, 1, __ATOMIC_ACQ_REL);
    while (get(&w->s->arrived) < all) ra_shm__nap(50000);
}

static int open_files(void) {
    DIR *d = opendir("/proc/self/fd");
    int n = 0;
    if (!d) return 0;
    while (readdir(d)) n++;
    closedir(d);
    return n;
}

static void nobody_left(void) { CHECK(waitpid(-1, NULL, WNOHANG) < 0); }

/* How many mappings of this process have a name in /dev/shm, where a killed rank would leave it.
 * (The entries of the directory tell nothing: other programs have some.) */
static int named_mappings(void) {
    FILE *f = fopen("/proc/self/maps", "r");
    char line[512];
    int n = 0;
    if (!f) return 0;
    while (fgets(line, sizeof line, f)) n += strstr(line, "/dev/shm/") != NULL;
    fclose(f);
    return n;
}

/* -------------------------------------------------------------------------- what ranks do */
static ra_plan *plan_of(const world *w, int rank) {
    ra_plan *plan = NULL;
    ra_error error;
    ra_desc d;
    ring_describe(&d, &w->task, rank, w->ranks, &error);
    if (ra_plan_create(&plan, &d, NULL)) {
        fprintf(stderr, "plan: %s %s\n", error.field, error.text);
        _exit(4);
    }
    return plan;
}

static ra_shm *open_shm(const world *w, const ra_plan *plan, int rank, const char *suffix) {
    char name[64];
    ra_shm *shm = NULL;
    ra_shm_desc sd = { 0 };
    ra_error why = { 0 };
    snprintf(name, sizeof name, "%.50s%s", w->name, suffix);
    sd.name = name;
    sd.rank = rank;
    sd.ranks = w->ranks;
    sd.slots = w->slots;
    sd.slot_bytes = ra_shm_slot_bytes(plan, w->ranks);
    sd.deadline_ns = ra_deadline_ms(20000);
    sd.error = &why;
    w->s->status[rank] = ra_shm_open(&shm, &sd);
    (void)__atomic_fetch_add(&w->s->named, named_mappings(), __ATOMIC_ACQ_REL);
    memcpy(w->s->field[rank], why.field, sizeof why.field);
    memcpy(w->s->text[rank], why.text, sizeof why.text);
    return shm;
}

/* One forward and one backward pass; their results and counters go into the shared block. */
static void attend_once(const world *w, int rank) {
    ra_plan *plan = plan_of(w, rank);
    ra_shm *shm = open_shm(w, plan, rank, "");
    if (shm) {
        w->s->status[rank] = ring_attend(&w->task, plan, ra_shm_transport(shm), rank, w->s->all,
                                         &w->s->figures[rank]);
        w->s->count[rank] = ra_shm_query(shm);
    }
    ra_shm_close(shm);
    ra_plan_destroy(plan);
}

/* All that a rank needs for its passes. */
typedef struct seat {
    ra_plan *plan;
    ra_shm *shm;
    ra_ring *ring;
    ring_rows rows;
    ra_tensors t;
} seat;

static seat seat_open(const world *w, const ring_task *task, int rank, const char *suffix) {
    seat x = { 0 };
    const ring_rows *r = &x.rows;
    x.plan = plan_of(w, rank);
    x.shm = open_shm(w, x.plan, rank, suffix);
    if (!x.shm || ring_rows_make(&x.rows, task, x.plan, rank) ||
        ra_ring_create(&x.ring, x.plan, ra_shm_transport(x.shm), NULL)) _exit(5);
    x.t.q.data = r->q; x.t.k.data = r->k; x.t.v.data = r->v; x.t.o.data = r->o;
    x.t.lse.data = r->lse; x.t.d_o.data = r->d_o;
    x.t.d_q.data = r->d_q; x.t.d_k.data = r->d_k; x.t.d_v.data = r->d_v;
    return x;
}

/* Returns how the ring ended. */
static ra_status seat_close(seat *x) {
    ra_status s = ra_ring_destroy(x->ring);
    ra_shm_close(x->shm);
    free(x->rows.all);
    ra_plan_destroy(x->plan);
    return s;
}

/* Passes, forward and backward in turn, until one fails. */
static void attend_for_ever(const world *w, int rank) {
    seat x = seat_open(w, &w->task, rank, "");
    ra_failure f;
    ra_status s = RA_OK;
    barrier(w, w->ranks);
    for (int pass = 0; !s; pass++) {
        int64_t deadline = ra_deadline_ms(w->deadline_ms);
        w->s->began_ns[rank] = ra_now_ns();
        w->s->passes[rank] = pass;
        s = pass & 1 ? ra_backward(x.plan, x.ring, &x.t, deadline)
                     : ra_forward(x.plan, x.ring, &x.t, deadline);
    }
    w->s->ended_ns[rank] = ra_now_ns();
    if (ra_ring_failure(x.ring, &f) == RA_OK) memcpy(w->s->text[rank], f.text, sizeof f.text);
    put(&w->s->status[rank], s);
    if (seat_close(&x) != RA_OK) put(&w->s->status[rank], RA_E_UNSAFE);
}

/* Runs attend_once on all ranks; 1 if all ended well. */
static int run_once(world *w) {
    int ok = 1;
    start(w, attend_once);
    for (int r = 0; r < w->ranks; r++) {
        ok &= CHECK_EQ(reap(w->pid[r], 60000), 0);
        ok &= CHECK_EQ(w->s->status[r], RA_OK);
        if (w->s->text[r][0]) printf("rank %d: %s\n", r, w->s->text[r]);
    }
    return ok;
}

/* -------------------------------------------------------------------------- right numbers */
TEST(numbers_are_those_of_one_rank) {
    static const int ranks[] = { 1, 2, 3, 5, 8 };
    static const int64_t tokens[] = { 1024, 1100 };
    int fds = open_files();
    for (int i = 0; i < 5 * 2 * 2; i++) {
        int64_t left = i;
        world w = world_of(ranks[h_pick(&left, 5)]);
        if (!h_case(i)) {
            world_free(&w);
            continue;
        }
        w.task.tokens = tokens[h_pick(&left, 2)];
        w.task.full = (int32_t)left;
        w.task.chunk_tokens = i % 3 ? 64 : 0;
        w.slots = i % 4 == 3 ? 2 : 0;
        h_context("%d ranks, %lld tokens, full %d, slots %d", w.ranks, (long long)w.task.tokens,
                  w.task.full, w.slots);
        CHECK(ring_floats(&w.task) <= sizeof w.s->all / sizeof w.s->all[0]);
        if (run_once(&w)) {
            int64_t differ = ring_compare(&w.task, w.s->all);
            CHECK(differ >= 0);
            if (w.s->figures[0].bits_promised) CHECK_EQ(differ, 0);
            else CHECK(w.ranks == 8 || w.task.tokens == 1100);
        }
        world_free(&w);
    }
    CHECK_EQ(open_files(), fds);
    nobody_left();
}

/* Forward: own chunks are copied once; what arrives or is sent on is lent. Backward lends nothing.
 * The frame that begins the first pass of either kind is not lent. */
TEST(loans_are_counted) {
    for (int i = 0; i < 6; i++) {
        world w = world_of(2 + i % 3);
        if (!h_case(i)) {
            world_free(&w);
            continue;
        }
        w.task.full = i / 3;
        w.slots = 16;
        if (run_once(&w))
            for (int r = 0; r < w.ranks; r++) {
                const ring_part *f = &w.s->figures[r].pass[0], *b = &w.s->figures[r].pass[1];
                const ra_shm_counters *c = &w.s->count[r];
                CHECK(f->messages_in > 0 && f->messages_out > 0);
                CHECK_EQ(c->loans, f->messages_in);
                CHECK_EQ(c->copies_out, b->messages_in + 2);
                CHECK_EQ(c->copies_in + c->forwards, f->messages_out + b->messages_out + 2);
                CHECK(w.ranks == 2 ? c->forwards == 0 : c->forwards > 0);
            }
        world_free(&w);
    }
}

/* Many forward passes on one ring: every slot comes back, so nothing is ever copied out. */
static void attend_often(const world *w, int rank) {
    seat x = seat_open(w, &w->task, rank, "");
    ra_status s = RA_OK;
    for (int pass = 0; pass < 20 && !s; pass++) {
        s = ra_forward(x.plan, x.ring, &x.t, ra_deadline_ms(20000));
        ring_counted(x.ring, &w->s->figures[rank].pass[0]);
    }
    w->s->status[rank] = s;
    w->s->count[rank] = ra_shm_query(x.shm);
    (void)seat_close(&x);
}

TEST(loans_come_back) {
    world w = world_of(3);
    w.slots = 16;
    start(&w, attend_often);
    for (int r = 0; r < w.ranks; r++) {
        CHECK_EQ(reap(w.pid[r], 60000), 0);
        CHECK_EQ(w.s->status[r], RA_OK);
        CHECK_EQ(w.s->count[r].loans, 20 * w.s->figures[r].pass[0].messages_in);
        CHECK_EQ(w.s->count[r].copies_out, 1);     /* in the first pass, before its chunks */
    }
    world_free(&w);
}

/* The contract with single ops, one rank that sends to itself: one of two slots is never lent, so
 * messages arrive for any number of loans. */
TEST(one_slot_is_never_lent) {
    char from[3][64], to[3][64];
    ra_transport_op op[6], *ops[6];
    ra_shm *shm = NULL;
    ra_shm_desc d = { 0 };
    memset(op, 0, sizeof op);
    d.name = "one";
    d.ranks = 1;
    d.slots = 2;
    d.slot_bytes = 64;
    CHECK_EQ(ra_shm_open(&shm, &d), RA_OK);
    if (!shm) return;
    const ra_transport *t = ra_shm_transport(shm);
    for (int i = 0; i < 6; i++) {
        int sends = i >= 3;
        ops[i] = &op[i];
        op[i].kind = (uint8_t)(sends ? RA_MSG_SEND : RA_MSG_RECV);
        op[i].flags = sends ? 0 : RA_MSG_LOAN_OK;
        op[i].buf = sends ? from[i - 3] : to[i];
        op[i].len = 64;
        if (sends) memset(from[i - 3], 'a' + i - 3, 64);
    }
    CHECK_EQ(t->post(t->ctx, ops, 6), RA_OK);
    for (int i = 0; i < 10; i++) CHECK_EQ(t->poll(t->ctx, ops, 6), RA_OK);
    for (int i = 0; i < 6; i++) CHECK_EQ(op[i].state, RA_MSG_DONE);
    for (int i = 0; i < 3; i++) CHECK_BITS(op[i].buf, from[i], 64);
    CHECK_EQ(ra_shm_query(shm).loans, 1);
    CHECK_EQ(ra_shm_query(shm).copies_out, 2);
    CHECK(op[0].buf != to[0] && op[1].buf == to[1] && op[2].buf == to[2]);
    CHECK_EQ(t->release(t->ctx, &op[0]), RA_OK);
    CHECK_EQ(t->release(t->ctx, &op[1]), RA_E_STATE);
    ra_shm_close(shm);
}

/* With two slots per lane, of which one is never lent, most receives have to copy. All are counted,
 * and results stay the same. */
TEST(copies_when_loans_run_out) {
    world w = world_of(4);
    w.task.tokens = 2048;
    w.task.heads = w.task.kv_heads = 1;
    w.task.full = 1;
    w.slots = 2;
    if (run_once(&w)) {
        int64_t loans = 0;
        for (int r = 0; r < w.ranks; r++) {
            loans += w.s->count[r].loans;
            CHECK_EQ(w.s->count[r].loans + w.s->count[r].copies_out,
                     w.s->figures[r].pass[0].messages_in + w.s->figures[r].pass[1].messages_in + 2);
        }
        CHECK(loans > 0);
        CHECK_EQ(ring_compare(&w.task, w.s->all), 0);
    }
    world_free(&w);
}

/* Two contexts per process, a pass on each stepped in turn by one thread. */
static void two_rings(const world *w, int rank) {
    seat x[2];
    ra_status s[2] = { RA_AGAIN, RA_AGAIN };
    for (int i = 0; i < 2; i++) {
        ra_job job = { 0 };
        ring_task t = w->task;
        t.seed = (uint32_t)(1 + i);
        x[i] = seat_open(w, &t, rank, i ? "b" : "a");
        job.plan = x[i].plan;
        job.tensors = &x[i].t;
        job.deadline_ns = ra_deadline_ms(20000);
        if (ra_begin(x[i].ring, &job)) _exit(6);
    }
    while (s[0] > 0 || s[1] > 0)
        for (int i = 0; i < 2; i++)
            if (s[i] > 0 && (s[i] = ra_step(x[i].ring, 0)) == RA_WAIT)
                (void)ra_step_wait(x[i].ring, ra_now_ns() + 100000);
    w->s->status[rank] = s[0] ? s[0] : s[1];
    for (int i = 0; i < 2; i++) {
        size_t at = (size_t)i * (size_t)(w->task.tokens * w->task.heads * w->task.dim);
        ring_rows_place(&x[i].rows, x[i].rows.o, w->s->all + at, w->task.heads * w->task.dim);
        if (seat_close(&x[i])) _exit(7);
    }
}

TEST(two_rings_at_once) {
    world w = world_of(3);
    size_t n = (size_t)(w.task.tokens * w.task.heads * w.task.dim);
    float *one = (float *)calloc(ring_floats(&w.task), sizeof *one);
    start(&w, two_rings);
    for (int r = 0; r < w.ranks; r++) {
        CHECK_EQ(reap(w.pid[r], 60000), 0);
        CHECK_EQ(w.s->status[r], RA_OK);
    }
    for (int i = 0; one && i < 2; i++) {
        ring_task t = w.task;
        t.seed = (uint32_t)(1 + i);
        CHECK_EQ(ring_alone(&t, one), RA_OK);
        CHECK_BITS(w.s->all + (size_t)i * n, one, n * sizeof *one);
    }
    free(one);
    world_free(&w);
}

/* -------------------------------------------------------------------------- faults */
/* A world of case i, 2 to `most` ranks, in which a rank gets a signal at a random moment. */
static world world_hit(int i, int most, int64_t most_us, int signal, int64_t deadline_ms,
                       int *victim) {
    h_rng rng = h_case_rng(i);
    world w = world_of((int)h_range(&rng, 2, most));
    int64_t wait_us;
    *victim = (int)h_range(&rng, 0, w.ranks - 1);
    wait_us = h_range(&rng, 0, most_us);
    w.task.full = h_one_in(&rng, 2);
    if (deadline_ms) w.deadline_ms = deadline_ms;
    h_context("rank %d of %d gets signal %d after %lld us", *victim, w.ranks, signal,
              (long long)wait_us);
    start(&w, attend_for_ever);
    await_all(&w);
    ra_shm__nap(wait_us * 1000);
    kill(w.pid[*victim], signal);
    w.s->fault_ns = ra_now_ns();
    return w;
}

/* A rank is killed at a random moment. All other passes end with RA_E_PEER, long before their
 * deadline. */
TEST(killed) {
    int cases = h_run.large ? 500 : 48;
    lateness late = { 0, 0, 0 };
    for (int i = 0; i < cases; i++) {
        world w;
        int victim;
        if (!h_case(i)) continue;
        w = world_hit(i, 5, 12000, SIGKILL, 0, &victim);
        for (int r = 0; r < w.ranks; r++) {
            CHECK_EQ(reap(w.pid[r], 30000), r == victim ? SIGKILL : 0);
            if (r == victim) continue;
            CHECK_EQ(w.s->status[r], RA_E_PEER);
            was_late(&late, w.s->ended_ns[r] - w.s->fault_ns, 100000000);
        }
        world_free(&w);
    }
    nobody_left();
    judge_lateness(&late, "survivors of a killed rank are out after");
}

/* A rank is stopped at a random moment. All others return within 100 ms of their deadline, and so
 * does this rank when it continues. */
TEST(stopped) {
    int cases = h_run.large ? 100 : 8;
    lateness late = { 0, 0, 0 };
    for (int i = 0; i < cases; i++) {
        world w;
        int victim;
        if (!h_case(i)) continue;
        w = world_hit(i, 4, 8000, SIGSTOP, 120, &victim);
        for (int k = 0; k < 2; k++)    /* the others first */
            for (int r = 0; r < w.ranks; r++) {
                int64_t ns;
                if ((r == victim) != k) continue;
                if (k) kill(w.pid[r], SIGCONT);
                CHECK_EQ(reap(w.pid[r], 30000), 0);
                ns = w.s->ended_ns[r] - w.s->began_ns[r] - w.deadline_ms * 1000000;
                CHECK(w.s->status[r] == RA_E_TIMEOUT || w.s->status[r] == RA_E_ABORTED);
                if (!k) was_late(&late, ns, 100000000);
            }
        world_free(&w);
    }
    nobody_left();
    judge_lateness(&late, "peers of a stopped rank are out after their deadline +");
}

/* All ranks at once: no rank is left to clean up, and none needs to. All are stopped before the
 * first is killed, so that none sees the death of another and ends by itself. */
TEST(all_killed) {
    for (int i = 0; i < 6; i++) {
        h_rng rng = h_case_rng(i);
        world w = world_of(4);
        int64_t wait_us = h_range(&rng, 0, 6000);
        if (!h_case(i)) {
            world_free(&w);
            continue;
        }
        start(&w, attend_for_ever);
        if (i % 2) await_all(&w);      /* otherwise while they meet */
        ra_shm__nap(wait_us * 1000);
        for (int r = 0; r < w.ranks; r++) {
            int status;
            kill(w.pid[r], SIGSTOP);
            CHECK_EQ(waitpid(w.pid[r], &status, WUNTRACED), w.pid[r]);
            CHECK(WIFSTOPPED(status));
        }
        for (int r = 0; r < w.ranks; r++) kill(w.pid[r], SIGKILL);
        for (int r = 0; r < w.ranks; r++) CHECK_EQ(reap(w.pid[r], 10000), SIGKILL);
        world_free(&w);
    }
    nobody_left();
}

/* Processor time of this thread, whatever else runs here. */
static int64_t processor_ns(void) {
    struct timespec t;
    (void)clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* Rank 0 never joins the pass and cancels while the others sleep in theirs. */
static void cancel_or_wait(const world *w, int rank) {
    seat x = seat_open(w, &w->task, rank, "");
    barrier(w, w->ranks);
    if (rank == 0) {
        ra_shm__nap(30000000);
        w->s->fault_ns = ra_now_ns();
        w->s->cancel_ns = -processor_ns();
        ra_ring_cancel(x.ring);
        w->s->cancel_ns += processor_ns();
    } else {
        w->s->status[rank] = ra_forward(x.plan, x.ring, &x.t, ra_deadline_ms(20000));
        w->s->ended_ns[rank] = ra_now_ns();
    }
    w->s->count[rank] = ra_shm_query(x.shm);
    (void)seat_close(&x);
}

TEST(abort_wakes_all_ranks) {
    lateness late = { 0, 0, 0 };
    int64_t longest = 0;
    int asleep = 0;                    /* on a busy machine a rank may be too late to sleep */
    for (int i = 0; i < (h_run.large ? 40 : 4); i++) {
        world w = world_of(2 + i % 4);
        w.task.full = 1;
        start(&w, cancel_or_wait);
        for (int r = 0; r < w.ranks; r++) CHECK_EQ(reap(w.pid[r], 30000), 0);
        for (int r = 1; r < w.ranks; r++) {
            int64_t ns = w.s->ended_ns[r] - w.s->fault_ns;
            CHECK_EQ(w.s->status[r], RA_E_ABORTED);
            asleep += w.s->count[r].sleeps > 0;
            was_late(&late, ns, 10000000);
        }
        if (w.s->cancel_ns > longest) longest = w.s->cancel_ns;
        CHECK(w.s->cancel_ns < 1000000);
        world_free(&w);
    }
    printf("abort: takes at most %.3f ms\n", (double)longest / 1e6);
    if (h_run.large) CHECK(asleep > 0);
    judge_lateness(&late, "sleepers are out after");
}

/* -------------------------------------------------------------------------- meeting */
/* Opens once with a descriptor in which one value of one rank differs. */
static void open_with(const world *w, int rank) {
    ra_shm *shm = NULL;
    ra_shm_desc sd = { 0 };
    ra_error why = { 0 };
    sd.name = w->name;
    sd.rank = rank;
    sd.ranks = w->ranks;
    sd.slot_bytes = 4096;
    sd.deadline_ns = w->slots == 8 ? INT64_MAX : ra_deadline_ms(w->deadline_ms);
    sd.error = &why;
    if (rank == 1 && w->slots == 1) sd.slot_bytes = 8192;
    if (rank == 1 && w->slots == 2) sd.ranks = 4;
    if (rank == 1 && w->slots == 3) sd.slots = 4;
    if (rank == 1 && w->slots == 4) sd.rank = 2;
    if (rank == 1 && w->slots == 5) ra_shm__nap(400000000);          /* comes late */
    if (rank == 1 && w->slots == 6) raise(SIGKILL);
    if (w->slots == 7 && rank == 0) raise(SIGKILL);
    w->s->status[rank] = ra_shm_open(&shm, &sd);
    (void)__atomic_fetch_add(&w->s->named, named_mappings(), __ATOMIC_ACQ_REL);
    memcpy(w->s->field[rank], why.field, sizeof why.field);
    memcpy(w->s->text[rank], why.text, sizeof why.text);
    ra_shm_close(shm);
}

typedef struct meeting { int what, sign, status0, status1; const char *text0, *text1; } meeting;

TEST(mismatched_ranks_are_refused) {
    static const meeting m[] = {
        { 0, 0, RA_OK, RA_OK, "", "" },
        { 8, 0, RA_OK, RA_OK, "", "" },                 /* no deadline */
        { 1, 0, RA_E_TIMEOUT, RA_E_SHAPE, "refused was: slot_bytes is 8192 here, but 4096",
          "slot_bytes is 8192 here, but 4096 at rank 0" },
        { 2, 0, RA_E_TIMEOUT, RA_E_SHAPE, "has not come", "ranks is 4 here, but 3 at rank 0" },
        { 3, 0, RA_E_TIMEOUT, RA_E_SHAPE, "has not come", "slots is 4 here, but 8 at rank 0" },
        { 5, 0, RA_E_TIMEOUT, RA_E_TIMEOUT, "rank 1 has not come by the deadline",
          "rank 0 has not opened a ring of this name" },
        { 6, SIGKILL, RA_E_TIMEOUT, 0, "rank 1 has not come by the deadline", "" },
    };
    for (size_t i = 0; i < sizeof m / sizeof m[0]; i++) {
        world w = world_of(3);
        w.slots = m[i].what;
        w.deadline_ms = m[i].what ? 150 : 20000;
        h_context("meeting %d", m[i].what);
        start(&w, open_with);
        CHECK_EQ(reap(w.pid[0], 10000), 0);
        CHECK_EQ(reap(w.pid[1], 10000), m[i].sign);
        CHECK_EQ(reap(w.pid[2], 10000), 0);
        for (int r = 0; r < 3; r++) {
            int due = r == 1 ? m[i].status1 : m[i].status0, got = w.s->status[r];
            const char *text = r == 1 ? m[i].text1 : m[i].text0;
            if (r != 1 && due && got == RA_E_PEER) continue;         /* one gave up earlier */
            CHECK_EQ(got, due);
            CHECK(strstr(w.s->text[r], text) != NULL);
            if (!strstr(w.s->text[r], text)) printf("rank %d: %s\n", r, w.s->text[r]);
        }
        world_free(&w);
    }
    nobody_left();
}

/* The same rank twice: one of the two is refused. Rank 0 twice: the second is refused. */
TEST(same_rank_twice) {
    world w = world_of(3);
    int refused;
    w.slots = 4;
    w.deadline_ms = 150;
    start(&w, open_with);
    for (int r = 0; r < 3; r++) CHECK_EQ(reap(w.pid[r], 10000), 0);
    refused = w.s->status[1] == RA_E_SHAPE ? 1 : 2;
    CHECK_EQ(w.s->status[refused], RA_E_SHAPE);
    CHECK(strstr(w.s->text[refused], "rank 2 has come already") != NULL);
    CHECK_EQ(w.s->status[3 - refused], RA_E_TIMEOUT);
    world_free(&w);
}

/* Rank 0 of two rings with one name. The second is refused while the first waits. Once the first
 * was killed the name is free, and nothing old is in the way. */
TEST(names_collide_and_are_free_again) {
    world a = world_of(2), b = world_of(2);
    int64_t until = ra_deadline_ms(10000);
    ra_shm *shm = NULL;
    ra_shm_desc sd = { 0 };
    ra_error why;
    a.slots = 5;                       /* rank 1 comes late */
    a.deadline_ms = 20000;
    start(&a, open_with);
    sd.name = a.name;
    sd.ranks = 2;
    sd.slot_bytes = 64;
    sd.error = &why;
    ra_shm__nap(100000000);            /* the other must be the first to listen */
    do {
        sd.deadline_ns = ra_deadline_ms(1);
        ra_shm__nap(1000000);
    } while (ra_shm_open(&shm, &sd) != RA_E_BUSY && ra_now_ns() < until);
    CHECK_EQ(why.status, RA_E_BUSY);
    CHECK(strstr(why.text, "another ring of this name") != NULL);
    for (int r = 0; r < 2; r++) kill(a.pid[r], SIGKILL);
    for (int r = 0; r < 2; r++) CHECK_EQ(reap(a.pid[r], 10000), SIGKILL);
    memcpy(b.name, a.name, sizeof b.name);
    start(&b, open_with);
    for (int r = 0; r < 2; r++) CHECK_EQ(reap(b.pid[r], 30000), 0);
    CHECK_EQ(b.s->status[0], RA_OK);
    CHECK_EQ(b.s->status[1], RA_OK);
    world_free(&a);
    world_free(&b);
}

/* Each field of the descriptor is checked. */
TEST(bad_descriptors) {
    ra_shm *shm = NULL;
    ra_error why;
    for (int i = 0; i < 8; i++) {
        static const int status[8] = { RA_E_RANGE, RA_E_RANGE, RA_E_RANGE, RA_E_RANGE, RA_E_UNSET,
                                       RA_E_RANGE, RA_E_RANGE, RA_OK };
        ra_shm_desc d = { 0 };
        d.name = i == 0 ? "" : "x";
        d.ranks = i == 1 ? 0 : i == 6 ? 129 : 1;
        d.rank = i == 2 ? 1 : 0;
        d.slots = i == 3 ? 17 : 0;
        d.slot_bytes = i == 4 ? 0 : i == 5 ? (size_t)-1 : 64;
        d.error = &why;
        CHECK_EQ(ra_shm_open(&shm, &d), status[i]);
        if (status[i]) CHECK(why.status == status[i] && why.field[0] && why.text[0]);
        ra_shm_close(shm);
    }
}

int main(int argc, char **argv) {
    static const h_test tests[] = {
        ENTRY(numbers_are_those_of_one_rank),
        ENTRY(loans_are_counted),
        ENTRY(loans_come_back),
        ENTRY(one_slot_is_never_lent),
        ENTRY(copies_when_loans_run_out),
        ENTRY(two_rings_at_once),
        ENTRY(killed),
        ENTRY(stopped),
        ENTRY(all_killed),
        ENTRY(abort_wakes_all_ranks),
        ENTRY(mismatched_ranks_are_refused),
        ENTRY(same_rank_twice),
        ENTRY(names_collide_and_are_free_again),
        ENTRY(bad_descriptors),
    };
    return h_main(argc, argv, tests, sizeof tests / sizeof tests[0]);
}
