/* examples/transports/ra_shm.h: rings of processes over shared memory. Proves the bits of one rank,
 * the number of loans, the end of passes whose ranks are killed or stopped at random moments,
 * refusals while ranks meet, that other users are not believed, that a user's limits suffice or are
 * named, and that nothing is left behind. As root it becomes another user where that matters, and
 * otherwise skips what needs two users. --long: many more random moments, and
 * the times of the contract (a few may be late on busy machines). */
#include "examples/transports/ra_shm.h"
#include "examples/transports/ring_check.h"
#include "tests/harness.h"

#include <dirent.h>
#include <grp.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>

enum { MOST = 128, NOBODY = 65534 };

typedef struct shared {                /* by all processes of a test */
    int32_t arrived, go, cancelled;
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
    void (*prepare)(const struct world *w, int rank);  /* null, or called before a rank opens */
    int number;                        /* for prepare */
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

/* A receive that meets another length has what fits, and says which length. */
TEST(other_lengths) {
    static const size_t sent[3] = { 100, 64, 16 };
    ra_shm *shm = NULL;
    ra_shm_desc d = { 0 };
    d.name = "lengths";
    d.ranks = 1;
    d.slot_bytes = 128;
    CHECK_EQ(ra_shm_open(&shm, &d), RA_OK);
    if (!shm) return;
    const ra_transport *t = ra_shm_transport(shm);
    for (int i = 0; i < 6; i++) {
        const size_t n = sent[i % 3], fits = n < 80 ? n : 80;
        char from[128], to[128], was[128];
        ra_transport_op op[2], *ops[2] = { &op[0], &op[1] };
        memset(op, 0, sizeof op);
        memset(from, 'a' + i, sizeof from);
        memset(to, '-', sizeof to);
        memset(was, '-', sizeof was);
        op[0].kind = RA_MSG_RECV;
        op[0].flags = i < 3 ? RA_MSG_LOAN_OK : 0;
        op[0].buf = to;
        op[0].len = 80;
        op[1].kind = RA_MSG_SEND;
        op[1].buf = from;
        op[1].len = n;
        CHECK_EQ(t->post(t->ctx, ops, 2), RA_OK);
        for (int k = 0; k < 3; k++) CHECK_EQ(t->poll(t->ctx, ops, 2), RA_OK);
        CHECK_EQ(op[0].state, RA_E_TRUNC);
        CHECK_EQ(op[1].state, RA_MSG_DONE);
        CHECK_EQ(op[0].done, n);
        CHECK_BITS(to, from, fits);
        CHECK_BITS(to + fits, was, sizeof to - fits);
    }
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
    if (rank == 1 && w->slots == 5) ra_shm__nap(700000000);          /* comes late */
    if (rank == 1 && w->slots == 6) raise(SIGKILL);
    if (w->slots == 7 && rank == 0) raise(SIGKILL);
    if (w->prepare) w->prepare(w, rank);
    w->s->began_ns[rank] = ra_now_ns();
    w->s->status[rank] = ra_shm_open(&shm, &sd);
    w->s->ended_ns[rank] = ra_now_ns();
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
        w.deadline_ms = m[i].what ? 300 : 20000;
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
    w.deadline_ms = 300;
    start(&w, open_with);
    for (int r = 0; r < 3; r++) CHECK_EQ(reap(w.pid[r], 10000), 0);
    refused = w.s->status[1] == RA_E_SHAPE ? 1 : 2;
    CHECK_EQ(w.s->status[refused], RA_E_SHAPE);
    CHECK(strstr(w.s->text[refused], "rank 2 has come already") != NULL);
    CHECK_EQ(w.s->status[3 - refused], RA_E_TIMEOUT);
    world_free(&w);
}

/* A rank is killed at a random moment while ranks meet: the others hear of it, or wait until the
 * deadline if it had not come. A rank that had heard that all is well sees it afterwards. */
TEST(killed_while_they_meet) {
    int heard = 0;
    for (int i = 0; i < (h_run.large ? 200 : 16); i++) {
        h_rng rng = h_case_rng(i);
        world w = world_of((int)h_range(&rng, 2, 6));
        const int victim = (int)h_range(&rng, 0, w.ranks - 1);
        const int64_t wait_us = h_range(&rng, 0, 4000);
        if (!h_case(i)) {
            world_free(&w);
            continue;
        }
        w.deadline_ms = 300;
        h_context("rank %d of %d is killed after %lld us", victim, w.ranks, (long long)wait_us);
        start(&w, open_with);
        ra_shm__nap(wait_us * 1000);
        kill(w.pid[victim], SIGKILL);
        for (int r = 0; r < w.ranks; r++) {
            const int status = reap(w.pid[r], 10000), told = w.s->status[r];
            CHECK(status == 0 || (r == victim && status == SIGKILL));
            if (status) continue;
            CHECK(told == RA_OK || told == RA_E_PEER || told == RA_E_TIMEOUT);
            CHECK(told == RA_OK || w.s->text[r][0]);
            heard += told == RA_E_PEER;
            CHECK(w.s->ended_ns[r] - w.s->began_ns[r] < 3000000000);
            CHECK(told != RA_E_TIMEOUT || w.s->ended_ns[r] - w.s->began_ns[r] > 150000000 ||
                  w.s->ended_ns[r] - w.s->began_ns[0] > 150000000);
        }
        world_free(&w);
    }
    nobody_left();
    if (h_run.large) CHECK(heard > 0);
}

/* 1: the text has the word and then the number. */
static int says(const char *text, const char *word, long number) {
    char want[40];
    const int n = snprintf(want, sizeof want, "%s %ld", word, number);
    const char *at = strstr(text, want);
    if (at && (at[n] < '0' || at[n] > '9')) return 1;
    printf("not \"%s\" in: %s\n", want, text);
    return 0;
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
    CHECK(says(why.text, "process", a.pid[0]));
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

/* -------------------------------------------------------------------------- strangers */
/* The user of this process becomes nobody, if it is root. */
static void become_nobody(void) {
    static const gid_t none = NOBODY;
    if (geteuid()) return;
    if (setgroups(0, &none) || setgid(NOBODY) || setuid(NOBODY)) _exit(8);
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);      /* changing the user cleared it */
}

/* A process that has a name in place of rank 0. how: 0: it takes no connection, 1: it sends
 * a file of no bytes, 2: a file of the right size that can be shortened. */
typedef struct impostor { const world *w; int how, nobody; uid_t user; size_t bytes; } impostor;

static int has_name(const impostor *x) {
    struct sockaddr_un a;
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0), n;
    memset(&a, 0, sizeof a);
    a.sun_family = AF_UNIX;
    n = snprintf(a.sun_path + 1, sizeof a.sun_path - 1, "ra_shm.%u.%s", (unsigned)x->user,
                 x->w->name);
    if (bind(fd, (struct sockaddr *)(void *)&a,
             (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n)) ||
        listen(fd, x->how ? 16 : 0)) _exit(9);
    return fd;
}

/* The size of the file of the ranks of open_with. */
static size_t file_bytes(int ranks) {
    const size_t lanes = 2 * (size_t)(ranks * ranks);
    return (sizeof(ra_shm__head) + lanes * sizeof(ra_shm__lane) + 4095) / 4096 * 4096 +
           lanes * 8 * 4096;
}

static void pretend(const impostor *x) {
    int fd, file = -1;
    ra_shm__note note;
    memset(&note, 0, sizeof note);
    if (x->nobody) become_nobody();
    fd = has_name(x);
    if (x->how) file = (int)syscall(SYS_memfd_create, "false", 1u);
    if (x->how == 2 && ftruncate(file, (off_t)file_bytes(x->w->ranks))) _exit(10);
    put(&x->w->s->go, 1);
    for (;;) {
        ra_shm__hello h;
        int c = x->how ? accept(fd, NULL, NULL) : -1;
        if (c < 0) ra_shm__nap(10000000);
        else if (recv(c, &h, sizeof h, 0) > 0)
            (void)ra_shm__give(c, &note, sizeof note, &file, 1, 0);
    }
}

static pid_t pretend_to_be_rank_0(const world *w, int how, int nobody) {
    int64_t until = ra_deadline_ms(10000);
    impostor x = { 0 };
    pid_t pid;
    x.w = w;
    x.how = how;
    x.nobody = nobody;
    x.user = geteuid();
    fflush(stdout);
    pid = fork();
    if (pid == 0) {
        (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
        pretend(&x);
    }
    while (!get(&w->s->go) && ra_now_ns() < until) ra_shm__nap(1000000);
    CHECK(get(&w->s->go));
    return pid;
}

static void end_process(pid_t pid) {
    kill(pid, SIGKILL);
    CHECK_EQ(reap(pid, 10000), SIGKILL);
}

static void rank_0_stays_away(const world *w, int rank) {
    (void)w;
    if (rank == 0) _exit(0);
}

/* Connections of this user that say nothing, too little, or what another version would, and a hello
 * that comes late. */
TEST(strays_do_not_matter) {
    world w = world_of(3);
    ra_shm_desc d = { 0 };
    ra_error why;
    ra_shm__hello h;
    ra_shm__note note;
    int silent[6], c = -1, other;
    d.name = w.name;
    d.error = &why;
    w.slots = 5;                       /* rank 1 comes 0.7 s later */
    w.deadline_ms = 20000;
    start(&w, open_with);
    while (c < 0) c = ra_shm__call(&d);
    CHECK_EQ(send(c, "?", 1, MSG_NOSIGNAL), 1);
    for (int i = 0; i < 6; i++) silent[i] = ra_shm__call(&d);
    CHECK_EQ(ra_shm__take(c, &note, NULL, 0, ra_deadline_ms(10000)), 0);
    CHECK_EQ(note.status, RA_E_SHAPE);
    close(c);
    other = ra_shm__call(&d);
    memset(&h, 0, sizeof h);
    h.magic = RA_SHM__MAGIC;
    h.version = RA_SHM__VERSION + 1;
    ra_shm__nap(250000000);
    CHECK_EQ(send(other, &h, sizeof h, MSG_NOSIGNAL), (int64_t)sizeof h);
    CHECK_EQ(ra_shm__take(other, &note, NULL, 0, ra_deadline_ms(10000)), 0);
    CHECK(strstr(note.text, "another version") != NULL);
    close(other);
    for (int r = 0; r < 3; r++) CHECK_EQ(reap(w.pid[r], 30000), 0);
    for (int r = 0; r < 3; r++) CHECK_EQ(w.s->status[r], RA_OK);
    for (int i = 0; i < 6; i++) close(silent[i]);
    world_free(&w);
}

/* A packet that is no note leaves no descriptor open; a note of another version can be read. */
TEST(other_notes) {
    ra_shm__note note;
    int pair[2], file = dup(0), fds[2] = { -1, -1 }, before;
    CHECK_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair), 0);
    before = open_files();
    CHECK_EQ(ra_shm__give(pair[0], "?", 1, &file, 1, 0), 0);
    CHECK_EQ(ra_shm__take(pair[1], &note, fds, 2, ra_deadline_ms(1000)), -1);
    CHECK_EQ(open_files(), before);
    CHECK_EQ(fds[0], -1);
    memset(&note, 0, sizeof note);
    note.status = RA_E_SHAPE;
    memset(note.text, 'x', sizeof note.text);
    CHECK_EQ(ra_shm__give(pair[0], &note, 20, NULL, 0, 0), 0);
    CHECK_EQ(ra_shm__take(pair[1], &note, NULL, 0, ra_deadline_ms(1000)), 0);
    CHECK_EQ(note.status, RA_E_SHAPE);
    CHECK_EQ(strlen(note.text), 15);
    close(pair[0]);
    close(pair[1]);
    close(file);
}

/* 1: the other end has closed this connection. */
static int is_closed(int c) {
    char byte;
    return recv(c, &byte, 1, MSG_DONTWAIT) == 0;
}

/* Of those that say nothing the oldest makes room, and does not count as a rank that has come. A
 * rank that has to leave calls again. What prevents all calls ends the meeting. */
TEST(places_of_silent_callers) {
    world w = world_of(2);
    ra_shm_desc d = { 0 };
    ra_error why;
    ra_shm__meeting m = { 0 };
    int silent[4], c;
    d.name = w.name;
    d.ranks = 2;
    d.error = &why;
    d.deadline_ns = ra_deadline_ms(5000);
    for (int i = 0; i < 4; i++) m.fd[i].fd = -1;
    m.fd[0].fd = dup(0);
    CHECK(ra_shm__accept(&d, &m) != 0);          /* is no socket */
    close(m.fd[0].fd);
    CHECK_EQ(ra_shm__listen(&d, &m), RA_OK);
    for (int i = 0; i < 4; i++) silent[i] = ra_shm__call(&d);
    CHECK_EQ(send(silent[1], "?", 1, MSG_NOSIGNAL), 1);      /* it stays, to be heard */
    CHECK_EQ(ra_shm__accept(&d, &m), 0);
    for (int i = 0; i < 4; i++) CHECK_EQ(is_closed(silent[i]), i == 0 || i == 2);
    for (int i = 2; i < 4; i++) (void)is_closed(m.fd[i].fd);     /* hears it */
    w.prepare = rank_0_stays_away;
    start(&w, open_with);
    c = accept(m.fd[0].fd, NULL, NULL);
    while (c < 0) c = accept(m.fd[0].fd, NULL, NULL);
    close(c);                                    /* rank 1 calls again */
    m.fd[0].events = POLLIN;
    CHECK_EQ(poll(&m.fd[0], 1, 5000), 1);
    snprintf(why.text, sizeof why.text, "it is over");
    ra_shm__dismiss(&d, &m, RA_E_IO);
    CHECK_EQ(reap(w.pid[0], 5000), 0);
    CHECK_EQ(reap(w.pid[1], 5000), 0);
    CHECK_EQ(w.s->status[1], RA_E_IO);
    CHECK(strstr(w.s->text[1], "it is over") != NULL);
    for (int i = 0; i < 4; i++) close(silent[i]);
    world_free(&w);
}

/* Who has the name takes no connection, as a rank 0 that is stopped: ranks return by their
 * deadline. */
TEST(a_full_queue) {
    world w = world_of(4);
    pid_t pid = pretend_to_be_rank_0(&w, 0, 0);
    w.prepare = rank_0_stays_away;
    w.deadline_ms = 200;
    start(&w, open_with);
    for (int r = 0; r < 4; r++) CHECK_EQ(reap(w.pid[r], 10000), 0);
    for (int r = 1; r < 4; r++) {
        const char *text = w.s->text[r];
        CHECK_EQ(w.s->status[r], RA_E_TIMEOUT);
        CHECK(strstr(text, "is it stopped") != NULL || says(text, "process", pid));
    }
    end_process(pid);
    world_free(&w);
}

TEST(a_file_that_is_not_sealed) {
    for (int how = 1; how <= 2; how++) {
        world w = world_of(2);
        pid_t pid = pretend_to_be_rank_0(&w, how, 0);
        w.prepare = rank_0_stays_away;
        w.deadline_ms = 5000;
        start(&w, open_with);
        for (int r = 0; r < 2; r++) CHECK_EQ(reap(w.pid[r], 10000), 0);
        CHECK_EQ(w.s->status[1], RA_E_PROTO);
        CHECK(strstr(w.s->text[1], "not a sealed file") != NULL);
        end_process(pid);
        world_free(&w);
    }
}

/* Another user has the name first: no rank believes it, and all say who it is. */
TEST(another_user_has_the_name) {
    if (geteuid()) {
        h_skip("only root can be two users");
        return;
    }
    for (int how = 0; how <= 2; how++) {
        world w = world_of(2);
        pid_t pid = pretend_to_be_rank_0(&w, how, 1);
        w.deadline_ms = how ? 5000 : 200;
        start(&w, open_with);
        for (int r = 0; r < 2; r++) {
            CHECK_EQ(reap(w.pid[r], 10000), 0);
            if (how == 0 && w.s->status[r] == RA_E_TIMEOUT) continue; /* its queue is full */
            CHECK_EQ(w.s->status[r], RA_E_BUSY);
            if (how == 0 && r == 0 && strstr(w.s->text[r], "another process")) continue;
            CHECK(says(w.s->text[r], "user", NOBODY) && says(w.s->text[r], "process", pid));
            CHECK(!strcmp(w.s->field[r], "name"));
        }
        end_process(pid);
        world_free(&w);
    }
}

/* As another user: says the hello of rank 1, then connects as often as it can. */
static void intrude(const world *w, uid_t user) {
    struct sockaddr_un a;
    ra_shm__hello h;
    ra_shm__note note;
    int length, file = -1, c;
    become_nobody();
    memset(&h, 0, sizeof h);
    h.magic = RA_SHM__MAGIC;
    h.version = RA_SHM__VERSION;
    h.abi = RA_TRANSPORT_ABI;
    h.head_bytes = (uint32_t)sizeof(ra_shm__head);
    h.rank = 1;
    h.ranks = w->ranks;
    h.slots = 8;
    h.slot_bytes = 4096;
    memset(&a, 0, sizeof a);
    a.sun_family = AF_UNIX;
    length = snprintf(a.sun_path + 1, sizeof a.sun_path - 1, "ra_shm.%u.%s", (unsigned)user,
                      w->name) + 1 + (int)offsetof(struct sockaddr_un, sun_path);
    for (int first = 1;; first = 0) {
        c = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
        while (connect(c, (struct sockaddr *)(void *)&a, (socklen_t)length) && first) {}
        if (first) {
            (void)send(c, &h, sizeof h, MSG_NOSIGNAL);
            put(&w->s->cancelled, ra_shm__take(c, &note, &file, 1, ra_deadline_ms(5000)));
            put(&w->s->go, 1);
        }
        close(c);
    }
}

TEST(another_user_connects) {
    if (geteuid()) {
        h_skip("only root can be two users");
        return;
    }
    world w = world_of(3);
    uid_t user = geteuid();
    pid_t pid[2];
    w.slots = 5;                       /* rank 1 comes 0.7 s later */
    w.deadline_ms = 20000;
    start(&w, open_with);
    for (int i = 0; i < 2; i++) {
        pid[i] = fork();
        if (pid[i] == 0) intrude(&w, user);
    }
    for (int r = 0; r < 3; r++) CHECK_EQ(reap(w.pid[r], 30000), 0);
    for (int r = 0; r < 3; r++) CHECK_EQ(w.s->status[r], RA_OK);
    CHECK_EQ(get(&w.s->go), 1);
    CHECK_EQ(get(&w.s->cancelled), -1);          /* no file came */
    for (int i = 0; i < 2; i++) end_process(pid[i]);
    world_free(&w);
}

/* -------------------------------------------------------------------------- limits */
/* Or the limit of this process, if that is lower. */
static void set_limit(int what, rlim_t most) {
    struct rlimit x;
    if (getrlimit(what, &x)) _exit(11);
    if (most < x.rlim_max) x.rlim_max = most;
    x.rlim_cur = x.rlim_max;
    if (setrlimit(what, &x)) _exit(11);
}

static void limit_files(const world *w, int rank) {
    (void)rank;
    become_nobody();
    set_limit(RLIMIT_NOFILE, (rlim_t)w->number);
}

/* As another user, whose limit of open files is what systems have, or less: all ranks meet, and a
 * message goes around. */
static void pass_around(const world *w, int rank) {
    ra_transport_op op[2], *ops[2] = { &op[0], &op[1] };
    int64_t from = rank, to = -1;
    ra_shm *shm = NULL;
    ra_shm_desc d = { 0 };
    ra_error why = { 0 };
    d.name = w->name;
    d.rank = rank;
    d.ranks = w->ranks;
    d.slot_bytes = 64;
    d.slots = 2;
    d.deadline_ns = ra_deadline_ms(60000);
    d.error = &why;
    w->prepare(w, rank);
    w->s->status[rank] = ra_shm_open(&shm, &d);
    memcpy(w->s->text[rank], why.text, sizeof why.text);
    if (!shm) return;
    const ra_transport *t = ra_shm_transport(shm);
    memset(op, 0, sizeof op);
    op[0].kind = RA_MSG_RECV;
    op[0].peer = (rank + w->ranks - 1) % w->ranks;
    op[0].buf = &to;
    op[1].kind = RA_MSG_SEND;
    op[1].peer = (rank + 1) % w->ranks;
    op[1].buf = &from;
    op[0].len = op[1].len = sizeof from;
    (void)t->post(t->ctx, ops, 2);
    while (op[0].state == RA_MSG_PENDING || op[1].state == RA_MSG_PENDING)
        if (t->wait(t->ctx, ops, 2, ra_deadline_ms(2))) break;
    w->s->passes[rank] = (int32_t)to;
    ra_shm_close(shm);
}

TEST(many_ranks_of_a_user) {
    static const int ranks[] = { 48, 100, 64, 24, 128 }, files[] = { 1024, 256, 1024, 256, 1024 };
    struct rlimit most;
    CHECK_EQ(getrlimit(RLIMIT_NOFILE, &most), 0);
    for (int i = 0; i < (h_run.large ? 5 : 2); i++) {
        world w = world_of(ranks[i]);
        if (most.rlim_max < 2 * (rlim_t)ranks[i] + 16) {
            world_free(&w);
            continue;
        }
        w.prepare = limit_files;
        w.number = files[i];
        h_context("%d ranks with ulimit -n %d", ranks[i], files[i]);
        start(&w, pass_around);
        for (int r = 0; r < w.ranks; r++) {
            CHECK_EQ(reap(w.pid[r], 90000), 0);
            if (!CHECK_EQ(w.s->status[r], RA_OK)) printf("rank %d: %s\n", r, w.s->text[r]);
            CHECK_EQ(w.s->passes[r], (r + w.ranks - 1) % w.ranks);
        }
        world_free(&w);
    }
}

/* Rank number % 3 may open number / 3 files more than are open. */
static void few_files(const world *w, int rank) {
    int lowest = dup(0);
    if (lowest < 0) lowest = open("/dev/null", O_RDONLY);
    close(lowest);
    if (rank == w->number % 3) set_limit(RLIMIT_NOFILE, (rlim_t)(lowest + w->number / 3));
}

TEST(few_files_may_be_open) {
    int formed = 0;
    for (int i = 0; i < 3 * 10; i++) {
        const int few = i % 3, alone = i < 4;    /* alone: it cannot tell others */
        world w = world_of(3);
        w.prepare = few_files;
        w.number = i;
        w.deadline_ms = alone ? 100 : 10000;
        h_context("rank %d may open %d files more", few, i / 3);
        start(&w, open_with);
        for (int r = 0; r < 3; r++) CHECK_EQ(reap(w.pid[r], 20000), 0);
        formed += w.s->status[0] == RA_OK;
        for (int r = 0; r < 3; r++) {
            CHECK_EQ(w.s->status[r] == RA_OK, w.s->status[0] == RA_OK);
            if (w.s->status[0] == RA_OK || alone) continue;
            CHECK(strstr(w.s->text[r], "ulimit -n") != NULL);
            if (!strstr(w.s->text[r], "ulimit -n")) printf("rank %d: %s\n", r, w.s->text[r]);
            CHECK(w.s->ended_ns[r] - w.s->began_ns[r] < 5000000000);
        }
        if (w.s->status[0]) CHECK(strstr(w.s->text[few], "ulimit -n") != NULL);
        world_free(&w);
    }
    CHECK(formed > 0 && formed < 3 * 10);
}

static void small_files(const world *w, int rank) {
    if (rank == 0) set_limit(RLIMIT_FSIZE, 65536);
    else if (rank == 2) ra_shm__nap((int64_t)w->number * 1000000);
}

/* A limit of the size of files says so, to all. */
TEST(small_files_only) {
    for (int late = 0; late <= 300; late += 300) {
        world w = world_of(3);
        w.prepare = small_files;
        w.number = late;
        w.deadline_ms = 20000;
        start(&w, open_with);
        for (int r = 0; r < 3; r++) {
            CHECK_EQ(reap(w.pid[r], 30000), 0);
            CHECK_EQ(w.s->status[r], RA_E_IO);
            CHECK(strstr(w.s->text[r], "ulimit -f") != NULL);
            CHECK(w.s->ended_ns[r] - w.s->began_ns[r] < 5000000000);
        }
        world_free(&w);
    }
}

/* A child of a rank, which has all that was open, closes it: the others do not notice. */
static void fork_and_close(const world *w, int rank) {
    ra_shm *shm = NULL;
    ra_shm_desc d = { 0 };
    d.name = w->name;
    d.rank = rank;
    d.ranks = w->ranks;
    d.slot_bytes = 64;
    w->s->status[rank] = ra_shm_open(&shm, &d);
    if (rank == 1) {
        pid_t child = fork();
        if (child == 0) {
            ra_shm_close(shm);
            _exit(0);
        }
        (void)reap(child, 10000);
    }
    barrier(w, 2);
    w->s->passes[rank] = ra_shm__is_gone(shm, 1 - rank);
    barrier(w, 4);
    ra_shm_close(shm);
}

TEST(a_forked_child_closes) {
    world w = world_of(2);
    start(&w, fork_and_close);
    for (int r = 0; r < 2; r++) {
        CHECK_EQ(reap(w.pid[r], 30000), 0);
        CHECK_EQ(w.s->status[r], RA_OK);
        CHECK_EQ(w.s->passes[r], 0);
    }
    world_free(&w);
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
        ENTRY(other_lengths),
        ENTRY(copies_when_loans_run_out),
        ENTRY(two_rings_at_once),
        ENTRY(killed),
        ENTRY(stopped),
        ENTRY(all_killed),
        ENTRY(abort_wakes_all_ranks),
        ENTRY(mismatched_ranks_are_refused),
        ENTRY(same_rank_twice),
        ENTRY(names_collide_and_are_free_again),
        ENTRY(killed_while_they_meet),
        ENTRY(strays_do_not_matter), ENTRY(other_notes),
        ENTRY(places_of_silent_callers),
        ENTRY(a_full_queue),
        ENTRY(a_file_that_is_not_sealed),
        ENTRY(another_user_has_the_name),
        ENTRY(another_user_connects),
        ENTRY(many_ranks_of_a_user),
        ENTRY(few_files_may_be_open),
        ENTRY(small_files_only),
        ENTRY(a_forked_child_closes),
        ENTRY(bad_descriptors),
    };
    return h_main(argc, argv, tests, sizeof tests / sizeof tests[0]);
}
