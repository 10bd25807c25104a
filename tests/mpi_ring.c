/* examples/transports/ra_mpi.h on a world of 3 ranks or more: bits, sub-communicators, and ranks
 * that fail while the others wait for them. Started by check_full.sh, under both MPIs:
 *
 *   mpirun -n 4 mpi_ring [seeds]      mpirun -n 2 mpi_ring single (without threads of MPI)
 *
 * Every rank checks; rank 0 prints the closing line. */
#define _POSIX_C_SOURCE 200809L
#include <stdlib.h>

/* Memory, which there is none of where a test says so. */
static int no_memory;
static void *some_memory(size_t n, size_t size) { return no_memory ? NULL : calloc(n, size); }
#define calloc(n, size) some_memory(n, size)

#include "examples/transports/ra_mpi.h"
#include "examples/transports/ring_check.h"

#include <pthread.h>

/* The patience of quiesce where it must succeed, also on a busy machine. */
#define BUSY_NS ((int64_t)2000000000)

typedef struct mpi_run { int rank, ranks, checks, bad, passed, failed; const char *test; } mpi_run;
static mpi_run g;

/* Each rank prints its failed checks as they happen. */
static int check(int ok, const char *what, int line) {
    g.checks++;
    if (ok) return 1;
    g.bad++;
    printf("tests/mpi_ring.c:%d: %s: rank %d: %s is false\n", line, g.test, g.rank, what);
    fflush(stdout);
    return 0;
}
#define CHECK(x) check((x) ? 1 : 0, #x, __LINE__)

static void end_test(void) {
    int bad = 0;
    MPI_Allreduce(&g.bad, &bad, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    g.passed += !bad;
    g.failed += bad > 0;
    if (g.rank == 0) printf("%s %s\n", bad ? "FAIL" : "ok", g.test);
    fflush(stdout);
    g.bad = 0;
}

/* -------------------------------------------------------------------------- one rank */
typedef struct seat {                  /* of this rank; the task may differ from the others' */
    ring_task task;
    int64_t window, patience_ns;
    ra_mpi *mpi;
    ra_plan *plan;
    ra_ring *ring;
    ring_rows rows;
    ra_tensors x;
    int64_t stall_at, stall_ns, events; /* at that event the trace sleeps for stall_ns */
    ra_failure failure;
} seat;

static void stall(void *ctx, const ra_event *e) {
    seat *s = (seat *)ctx;
    (void)e;
    if (s->stall_ns && s->events++ == s->stall_at) {
        struct timespec t;
        t.tv_sec = (time_t)(s->stall_ns / 1000000000);
        t.tv_nsec = (long)(s->stall_ns % 1000000000);
        (void)nanosleep(&t, NULL);
    }
}

static void seat_open(seat *s, MPI_Comm comm) {
    int rank, ranks;
    ra_error why;
    ra_ring_desc rd = { 0 };
    ra_desc d;
    MPI_Comm_rank(comm, &rank);
    MPI_Comm_size(comm, &ranks);
    rd.trace = stall;
    rd.trace_ctx = s;
    ring_describe(&d, &s->task, rank, ranks, &why);
    d.mask.window = s->window;
    if (ra_plan_create(&s->plan, &d, NULL) || ra_mpi_open(&s->mpi, comm, s->patience_ns, &why) ||
        ring_rows_make(&s->rows, &s->task, s->plan, rank) ||
        ra_ring_create(&s->ring, s->plan, ra_mpi_transport(s->mpi), &rd)) {
        printf("%s: rank %d: cannot open: %s %s\n", g.test, rank, why.field, why.text);
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
    s->x.q.data = s->rows.q; s->x.k.data = s->rows.k; s->x.v.data = s->rows.v;
    s->x.o.data = s->rows.o; s->x.lse.data = s->rows.lse; s->x.d_o.data = s->rows.d_o;
    s->x.d_q.data = s->rows.d_q; s->x.d_k.data = s->rows.d_k; s->x.d_v.data = s->rows.d_v;
}

/* Destroys and closes; ring_ok: destroying it must be RA_OK. */
static void seat_close(seat *s, int ring_ok) {
    ra_status end = ra_ring_destroy(s->ring);
    CHECK(end == RA_OK || !ring_ok);
    CHECK(ra_mpi_close(s->mpi) == RA_OK);
    ra_plan_destroy(s->plan);
    if (end == RA_OK) free(s->rows.all);
}

static ring_task small_task(void) {
    ring_task t = ring_task_default();
    t.tokens = 1024;
    t.heads = 2;
    t.kv_heads = 1;
    t.dim = 64;
    t.chunk_tokens = 64;
    t.full = 1;
    return t;
}

static seat seat_of(void) {
    seat s = { 0 };
    s.task = small_task();
    return s;
}

/* Makes passes until one fails; ns: how long after its deadline that one returned. */
static ra_status pass_until_failure(seat *s, int64_t deadline_ms, int64_t *late_ns) {
    ra_status status = RA_OK;
    for (int pass = 0; !status && pass < 100000; pass++) {
        int64_t deadline = ra_deadline_ms(deadline_ms);
        status = pass & 1 ? ra_backward(s->plan, s->ring, &s->x, deadline)
                          : ra_forward(s->plan, s->ring, &s->x, deadline);
        *late_ns = ra_now_ns() - deadline;
    }
    (void)ra_ring_failure(s->ring, &s->failure);
    return status;
}

/* -------------------------------------------------------------------------- right numbers */
/* A ring on a communicator, against one rank on its first. */
static void right_on(MPI_Comm comm) {
    ring_task t = small_task();
    size_t n = ring_floats(&t);
    float *all = (float *)calloc(2 * n, sizeof *all);
    int rank, ranks;
    ra_plan *plan = NULL;
    ra_mpi *mpi = NULL;
    ring_figures f = { 0 };
    ra_desc d;
    MPI_Comm_rank(comm, &rank);
    MPI_Comm_size(comm, &ranks);
    ring_describe(&d, &t, rank, ranks, NULL);
    CHECK(all && !ra_plan_create(&plan, &d, NULL) && !ra_mpi_open(&mpi, comm, 0, NULL));
    CHECK(ring_attend(&t, plan, ra_mpi_transport(mpi), rank, all, &f) == RA_OK);
    CHECK(ra_mpi_close(mpi) == RA_OK);
    MPI_Reduce(all, all + n, (int)n, MPI_UINT32_T, MPI_BOR, 0, comm);
    if (rank == 0) CHECK(ring_compare(&t, all + n) == 0);
    ra_plan_destroy(plan);
    free(all);
}

static void numbers(void) {
    g.test = "numbers_are_those_of_one_rank";
    for (int i = 0; i < 3; i++) right_on(MPI_COMM_WORLD);
    end_test();
}

/* The same without rank 0 and in reverse order. */
static void sub_communicators(void) {
    MPI_Comm part;
    g.test = "sub_communicators";
    MPI_Comm_split(MPI_COMM_WORLD, g.rank ? 1 : MPI_UNDEFINED, -g.rank, &part);
    if (part != MPI_COMM_NULL) {
        right_on(part);
        MPI_Comm_free(&part);
    }
    end_test();
}

/* -------------------------------------------------------------------------- faults */
/* After each of them a new context on the same communicator works. */
static void and_then(void) {
    right_on(MPI_COMM_WORLD);
    end_test();
}

/* One rank has other sizes, or another window. Other sizes fail before the deadline. Another window
 * changes who sends what: one rank fails or waits until its deadline, and the others fail too. */
static void mismatch(int what) {
    seat s = seat_of();
    int64_t late = 0, begin;
    ra_status status;
    int any, told;
    s.patience_ns = BUSY_NS;
    g.test = what ? "another_window" : "another_dim";
    if (g.rank == 1 && !what) s.task.dim = 32;
    s.window = what && g.rank == 1 ? 100 : 0;
    s.task.full = !what;
    seat_open(&s, MPI_COMM_WORLD);
    begin = ra_now_ns();
    status = pass_until_failure(&s, what && g.rank == 1 ? 500 : 10000, &late);
    CHECK(ra_now_ns() - begin < (int64_t)5000000000);
    told = status == RA_E_MISMATCH || status == RA_E_TRUNC || (what && status == RA_E_TIMEOUT);
    CHECK(told || status == RA_E_ABORTED);
    MPI_Allreduce(&told, &any, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
    CHECK(any);
    seat_close(&s, 1);
    and_then();
}

/* Rank 0 cancels while the others sleep in their pass. */
static void cancel(void) {
    seat s = seat_of();
    int64_t late = 0, begin;
    s.patience_ns = BUSY_NS;
    g.test = "cancel_reaches_all";
    seat_open(&s, MPI_COMM_WORLD);
    MPI_Barrier(MPI_COMM_WORLD);
    begin = ra_now_ns();
    if (g.rank == 0) {
        ra_mpi__nap(200000000);
        ra_ring_cancel(s.ring);
        CHECK(ra_now_ns() - begin < (int64_t)1000000000);
    } else {
        ra_status status = pass_until_failure(&s, 20000, &late);
        CHECK(status == RA_E_ABORTED);
        CHECK(strstr(s.failure.text, "rank 0 failed first") != NULL);
        CHECK(ra_now_ns() - begin < (int64_t)5000000000);
    }
    seat_close(&s, 1);
    and_then();
}

/* Each time another rank has a deadline of a few ms; the others have 20 s. */
static void own_deadline(int seeds) {
    int64_t worst = 0, all = 0;
    g.test = "own_deadline_reaches_all";
    for (int i = 0; i < seeds; i++) {
        seat s = seat_of();
        int64_t late = 0, begin = ra_now_ns(), took;
        uint32_t random = (uint32_t)i * 2654435761u;
        int victim = (int)(random >> 8) % g.ranks;
        ra_status status = RA_OK;
        s.patience_ns = BUSY_NS;
        seat_open(&s, MPI_COMM_WORLD);
        if (g.rank == victim) {
            int64_t until = ra_now_ns() + random % 20000000;
            for (int pass = 0; !status; pass++)
                status = pass & 1 ? ra_backward(s.plan, s.ring, &s.x, until)
                                  : ra_forward(s.plan, s.ring, &s.x, until);
            CHECK(status == RA_E_TIMEOUT);
            took = ra_now_ns() - until;
        } else {
            status = pass_until_failure(&s, 20000, &late);
            CHECK(status == RA_E_ABORTED);
            took = 0;
        }
        if (took > worst) worst = took;
        CHECK(ra_now_ns() - begin < (int64_t)10000000000);
        seat_close(&s, 1);
    }
    MPI_Reduce(&worst, &all, 1, MPI_INT64_T, MPI_MAX, 0, MPI_COMM_WORLD);
    if (g.rank == 0) printf("own deadline: at most %.1f ms late\n", (double)all / 1e6);
    and_then();
}

/* A rank stops for 1 s in the middle of a pass, longer than the deadlines and the patience of the
 * others. They return within 100 ms of their deadline (here later, for busy machines), although a
 * send to the stopped rank may stay pending. That rank learns of the failure when it continues. */
static void stopped(int seeds) {
    int64_t worst = 0, all = 0;
    g.test = "stopped";
    for (int i = 0; i < seeds; i++) {
        seat s = seat_of();
        int64_t late = 0;
        int victim = i % g.ranks;
        ra_status status;
        seat_open(&s, MPI_COMM_WORLD);
        if (g.rank == victim) {
            s.stall_at = 20 + 37 * i;
            s.stall_ns = 1000000000;
        }
        status = pass_until_failure(&s, 300, &late);
        CHECK(status == RA_E_TIMEOUT || status == RA_E_ABORTED);
        if (g.rank != victim && late > worst) worst = late;
        CHECK(g.rank == victim || late < 3000000000);  /* ranks spin: more of them than cores */
        seat_close(&s, 0);
    }
    MPI_Reduce(&worst, &all, 1, MPI_INT64_T, MPI_MAX, 0, MPI_COMM_WORLD);
    if (g.rank == 0) printf("stopped: survivors at most %.1f ms late\n", (double)all / 1e6);
    and_then();
}

/* -------------------------------------------------------------------------- single ops */
static ra_transport_op op_of(int kind, int peer, void *buf, size_t len) {
    ra_transport_op op = { 0 };
    op.kind = (uint8_t)kind;
    op.peer = peer;
    op.buf = buf;
    op.len = len;
    return op;
}

/* A rank without memory for its context: no other rank waits for it. */
static void memory(void) {
    ra_mpi *m = NULL;
    ra_error why = { 0 };
    g.test = "no_memory_on_one_rank";
    no_memory = g.rank == 1;
    CHECK(ra_mpi_open(&m, MPI_COMM_WORLD, 0, &why) == (no_memory ? RA_E_NOMEM : RA_E_PEER));
    CHECK(!m && !strcmp(why.field, no_memory ? "memory" : "comm"));
    no_memory = 0;
    CHECK(ra_mpi_open(&m, MPI_COMM_WORLD, 0, NULL) == RA_OK);
    CHECK(ra_mpi_close(m) == RA_OK);
    end_test();
}

/* 1: what fits of the message of `lengths` has come, or the op says that nothing has. */
static int cut_right(const ra_transport_op *op, size_t sent) {
    size_t n = sent < op->len ? sent : op->len;
    if (op->state != RA_E_TRUNC || (op->done && op->done != sent)) return 0;
    if (!op->done) printf("%zu bytes meet a receive of %zu: done is 0\n", sent, op->len);
    for (size_t i = 0; op->done && i < n; i++)
        if (((const char *)op->buf)[i] != (char)(i + 1)) return 0;
    return op->done || sent > op->len;
}

/* Messages longer or shorter than the receive: RA_E_TRUNC, and the job continues. */
static void lengths(void) {
    ra_mpi *m = NULL;
    g.test = "other_lengths";
    for (int sent = 50; sent <= 200; sent += 150) {
        char bytes[200];
        for (int i = 0; i < 200; i++) bytes[i] = (char)(g.rank ? 0 : i + 1);
        CHECK(ra_mpi_open(&m, MPI_COMM_WORLD, 0, NULL) == RA_OK);
        if (g.rank < 2) {
            const ra_transport *t = ra_mpi_transport(m);
            ra_transport_op op = op_of(g.rank ? RA_MSG_RECV : RA_MSG_SEND, !g.rank, bytes,
                             g.rank ? 100 : (size_t)sent);
            ra_transport_op *one = &op;
            int64_t until = ra_deadline_ms(10000);
            int code = t->post(t->ctx, &one, 1);
            while (!code && op.state == RA_MSG_PENDING && ra_now_ns() < until)
                code = t->poll(t->ctx, &one, 1);
            CHECK(code == RA_OK);
            CHECK(g.rank ? cut_right(&op, (size_t)sent) : op.state == RA_MSG_DONE);
        }
        CHECK(ra_mpi_close(m) == RA_OK);
    }
    end_test();
}

/* Chunks above 2 GiB are refused if MPI has no counts for them. */
static void large_chunks(void) {
    ra_mpi *m = NULL;
    g.test = "chunks_above_2_GiB";
    CHECK(ra_mpi_open(&m, MPI_COMM_WORLD, 0, NULL) == RA_OK);
    if (MPI_VERSION < 4) {
        ra_plan *plan = NULL;
        ra_ring *ring = NULL;
        ra_ring_desc rd = { 0 };
        ra_error why = { 0 };
        ra_desc d;
        ring_task t = small_task();
        t.tokens = (int64_t)1 << 24;
        t.dim = 256;
        t.chunk_tokens = 1 << 21;
        rd.error = &why;
        ring_describe(&d, &t, g.rank, g.ranks, NULL);
        CHECK(ra_plan_create(&plan, &d, NULL) == RA_OK);
        CHECK(ra_ring_create(&ring, plan, ra_mpi_transport(m), &rd) == RA_E_TRANSPORT);
        CHECK(!strcmp(why.field, "transport.max_msg"));
        ra_plan_destroy(plan);
    } else {
        CHECK(ra_mpi_transport(m)->max_msg > (size_t)INT_MAX);
    }
    CHECK(ra_mpi_close(m) == RA_OK);
    end_test();
}

static void *call_from_thread(void *ctx) {
    const ra_transport *t = (const ra_transport *)ctx;
    CHECK(t->poll(t->ctx, NULL, 0) == RA_E_IO);
    CHECK(t->error_text(t->ctx, RA_E_IO) && strstr(t->error_text(t->ctx, RA_E_IO), "thread"));
    return NULL;
}

/* Below MPI_THREAD_SERIALIZED only the main thread may call, and the library knows it. */
static void one_thread(void) {
    ra_mpi *m = NULL;
    pthread_t thread;
    g.test = "only_the_main_thread";
    CHECK(ra_mpi_open(&m, MPI_COMM_WORLD, 0, NULL) == RA_OK);
    if (m->level < MPI_THREAD_SERIALIZED) {
        CHECK(!(ra_mpi_transport(m)->caps & RA_CAP_ANY_THREAD));
        CHECK(!pthread_create(&thread, NULL, call_from_thread, (void *)(uintptr_t)&m->tp) &&
              !pthread_join(thread, NULL));
    }
    CHECK(ra_mpi_close(m) == RA_OK);
    right_on(MPI_COMM_WORLD);
    end_test();
}

int main(int argc, char **argv) {
    int single = argc > 1 && !strcmp(argv[1], "single"), level = 0;
    int seeds = argc > 1 && !single ? atoi(argv[1]) : 20;
    MPI_Init_thread(&argc, &argv, single ? MPI_THREAD_SINGLE : MPI_THREAD_MULTIPLE, &level);
    MPI_Comm_rank(MPI_COMM_WORLD, &g.rank);
    MPI_Comm_size(MPI_COMM_WORLD, &g.ranks);
    if (single) {
        one_thread();
    } else {
        numbers();
        sub_communicators();
        memory();
        lengths();
        large_chunks();
        mismatch(0);
        mismatch(1);
        cancel();
        own_deadline(seeds);
        stopped(3);
    }
    if (g.rank == 0) printf("%d passed, %d failed\n", g.passed, g.failed);
    MPI_Finalize();
    return g.failed != 0;
}
