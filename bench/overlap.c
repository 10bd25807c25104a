/* How much of the time that messages take is hidden behind computing, over a network whose rate can
 * be set. One process per rank; bench/netns.sh starts them, one in each network namespace.
 *
 *   overlap --rank R [--transport tcp|helper|inline|ofi|mpi] [--full | --rounds] [--model]
 *           [--tokens N] [--passes N] [--seconds N] host:port host:port...
 *
 * --tokens: 2048 per rank if it is not given.
 * --full: no mask. --rounds: no mask, and chunks in rounds (RA_ORDER_ROUNDS). --model: an engine
 * that sleeps for as long as a processor of MODEL_FLOPS would compute. So schedule and transport
 * are measured with more ranks than processors; what the transport itself computes is then hidden.
 *
 * tcp: transports/ra_tcp.h. helper: a sendrecv over it, with RA_CAP_HELPER. inline: the same
 * sendrecv without it. ofi (built with OVERLAP_OFI): ra_ofi.h over tcp;ofi_rxm, one-sided. mpi
 * (OVERLAP_MPI): ra_mpi.h; addresses and rank then come from mpirun.
 *
 * Three times are measured in turn; each is the median of the passes, from when all ranks have met
 * until all are done. T: a pass. C: the same pass with all ranks in one process, where nothing is
 * copied, while the others sleep. X: the same pass with an engine that computes nothing, so that
 * only messages are left. Hidden is the overlap of C and X over the shorter: (C + X - T) / min(C,
 * X). Before each pass the links rest, because a limited link sends its first bytes faster.
 *
 * A rank computes on its share of the processors, as if it had a host to itself. Otherwise Linux
 * puts a rank that a segment wakes on the sender's processor, and they alternate there for up to 24
 * ms.
 *
 * Also printed is the processor time of rank 0 in T and in X: what a transport computes is not
 * hidden if ranks compute on all processors. The plan's prediction gets a link on which messages
 * alone take X, and the rate at which computing alone takes C, or the processor time of T if no
 * processor is spare. */
#define _GNU_SOURCE
#define RINGATTN_IMPLEMENTATION
#ifdef OVERLAP_OFI
#include "examples/transports/ra_ofi.h"
#endif
#ifdef OVERLAP_MPI
#include "examples/transports/ra_mpi.h"
#include "tests/conformance/mpi_leave.h"
#endif
#include "ringattn.h"
#include "examples/transports/ra_tcp.h"
#include "tests/below.h"

#include <math.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

enum { RANKS = 16, PASSES = 99, HEADS = 8, KV_HEADS = 2, DIM = 64 };
#define MODEL_FLOPS 100e9

typedef struct options {
    int rank, ranks, full, rounds, model, passes;
    int64_t tokens, seconds;
    const char *transport, *at[RANKS];
} options;

static int below_abort(void *ctx, int why) {
    const ra_transport *tcp = (const ra_transport *)ctx;
    return tcp->abort(tcp->ctx, why);
}

/* -------------------------------------------------------------------------- transports */
typedef struct network {
    ra_tcp *tcp;
    ra_transport below;
    const ra_transport *use;
#ifdef OVERLAP_OFI
    ra_ofi *ofi;
#endif
#ifdef OVERLAP_MPI
    ra_mpi *mpi;
#endif
} network;

static int network_tcp(network *w, const options *o) {
    ra_tcp_desc d = { 0 };
    ra_error why = { 0 };
    d.rank = o->rank;
    d.ranks = o->ranks;
    d.addresses = o->at;
    d.error = &why;
    if (ra_tcp_open(&w->tcp, &d)) {
        fprintf(stderr, "rank %d: %s: %s\n", o->rank, why.field, why.text);
        return -1;
    }
    w->use = ra_tcp_transport(w->tcp);
    if (!strcmp(o->transport, "tcp")) return 0;
    w->below.size = sizeof w->below;
    w->below.abi = RA_TRANSPORT_ABI;
    w->below.caps = RA_CAP_DEADLINE;
    w->below.name = o->transport;
    w->below.ctx = (void *)(uintptr_t)w->use;
    w->below.sendrecv = below_sendrecv;
    w->below.abort = below_abort;
    w->use = &w->below;
    if (!strcmp(o->transport, "helper")) w->below.caps |= RA_CAP_HELPER;
    return w->below.caps & RA_CAP_HELPER || !strcmp(o->transport, "inline") ? 0 : -1;
}

static int network_open(network *w, const options *o) {
    memset(w, 0, sizeof *w);
#ifdef OVERLAP_OFI
    if (!strcmp(o->transport, "ofi")) {
        static char list[RANKS * 64];
        ra_ofi_desc d = { 0 };
        ra_error why = { 0 };
        for (int i = 0; i < o->ranks; i++) {
            if (i) strcat(list, ",");
            strncat(list, o->at[i], 60);
        }
        (void)setenv("RA_OFI_ADDRESSES", list, 1);
        d.rank = o->rank;
        d.ranks = o->ranks;
        d.provider = "tcp;ofi_rxm";
        d.one_sided = 1;
        d.deadline_ns = ra_deadline_ms(1000 * o->seconds);
        d.error = &why;
        if (ra_ofi_open(&w->ofi, &d)) {
            fprintf(stderr, "rank %d: %s: %s\n", o->rank, why.field, why.text);
            return -1;
        }
        w->use = ra_ofi_transport(w->ofi);
        return 0;
    }
#endif
#ifdef OVERLAP_MPI
    if (!strcmp(o->transport, "mpi")) {
        ra_error why = { 0 };
        if (ra_mpi_open(&w->mpi, MPI_COMM_WORLD, 0, &why)) {
            fprintf(stderr, "rank %d: %s: %s\n", o->rank, why.field, why.text);
            return -1;
        }
        w->use = ra_mpi_transport(w->mpi);
        return 0;
    }
#endif
    return network_tcp(w, o);
}

static void network_close(network *w) {
    if (w->tcp) ra_tcp_close(w->tcp);
#ifdef OVERLAP_OFI
    if (w->ofi) (void)ra_ofi_close(w->ofi);
#endif
#ifdef OVERLAP_MPI
    if (w->mpi) (void)ra_mpi_close(w->mpi);
#endif
}

/* -------------------------------------------------------------------------- passes */
static int compute_nothing(void *ctx, const ra_block *b) {
    size_t heads = (size_t)b->desc->q_heads * (size_t)b->q_rows;
    (void)ctx;
    memset(b->o, 0, heads * (size_t)b->desc->v_dim * sizeof *b->o);
    for (size_t i = 0; i < heads; i++) b->lse[i] = -INFINITY;
    return RA_OK;
}

/* Tiles of 64 rows and 64 keys of one head that any row sees. Keys ascend, and no row has a lower
 * bound: masks are causal or none. */
static int64_t tiles_seen(const ra_block *b) {
    int64_t n = 0;
    int32_t end = 0;
    for (int64_t i = 0; i < b->q_rows; i++) if (b->hi[i] > end) end = b->hi[i];
    for (int64_t i = 0; i < b->k_rows; i += RA_BLOCK_TOKENS) n += !b->partial || b->k_pos[i] < end;
    return n;
}

/* ctx: by how many nanoseconds this rank has slept too little so far; negative: too much. */
static int compute_asleep(void *ctx, const ra_block *b) {
    const double tile = 4.0 * DIM * RA_BLOCK_TOKENS * RA_BLOCK_TOKENS;
    double *owed = (double *)ctx;
    const int64_t begin = ra_now_ns();
    struct timespec t;
    *owed += (double)(tiles_seen(b) * HEADS) * tile / MODEL_FLOPS * 1e9;
    t.tv_sec = 0;
    t.tv_nsec = *owed < 999999999 ? (long)*owed : 999999999;
    if (t.tv_nsec > 0) (void)nanosleep(&t, NULL);
    *owed -= (double)(ra_now_ns() - begin);
    return compute_nothing(NULL, b);
}

static int by_value(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *x, int n) {
    qsort(x, (size_t)n, sizeof *x, by_value);
    return x[n / 2];
}

/* One rank on one transport. pass: what is measured. idle: the same with an engine that computes
 * nothing. meet: a few rows of which every rank needs all; it ends when all ranks have begun. */
typedef struct seat {
    const options *o;
    int rank;
    ra_engine model;
    double owed;                       /* of compute_asleep */
    ra_plan *pass, *idle, *meet;
    ra_ring *ring;
    ra_tensors t;
    float *memory;
} seat;

static ra_plan *make_plan(const options *o, int rank, int64_t tokens, int full,
                          const ra_engine *engine) {
    ra_plan *plan = NULL;
    ra_error why = { 0 };
    ra_desc d = ra_desc_make(HEADS, KV_HEADS, DIM, RA_F32, full ? RA_MASK_NONE : RA_MASK_CAUSAL);
    d.error = &why;
    d.rank = rank;
    d.ranks = o->ranks;
    d.tokens = tokens;
    d.layout.kind = full ? RA_LAYOUT_CONTIGUOUS : RA_LAYOUT_ZIGZAG;
    d.order = o->rounds ? RA_ORDER_ROUNDS : 0;
    d.engine = engine;
    if (ra_plan_create(&plan, &d, NULL)) fprintf(stderr, "%s %s\n", why.field, why.text);
    return plan;
}

static void seat_close(seat *s) {
    (void)ra_ring_destroy(s->ring);
    ra_plan_destroy(s->pass);
    ra_plan_destroy(s->idle);
    ra_plan_destroy(s->meet);
    free(s->memory);
}

static int seat_open(seat *s, const options *o, int rank, const ra_transport *transport) {
    static const ra_engine nothing = { sizeof nothing, RA_ENGINE_ABI, 0, NULL, compute_nothing };
    ra_plan_report r, more;
    ra_ring_desc rd = { 0 };
    ra_error why = { 0 };
    float *m;
    memset(s, 0, sizeof *s);
    rd.error = &why;
    s->o = o;
    s->rank = rank;
    s->model.size = sizeof s->model;
    s->model.abi = RA_ENGINE_ABI;
    s->model.block_queries = RA_BLOCK_TOKENS;
    s->model.ctx = &s->owed;
    s->model.fold = compute_asleep;
    (void)prctl(PR_SET_TIMERSLACK, 1UL, 0UL, 0UL, 0UL);
    s->pass = make_plan(o, rank, o->tokens, o->full, o->model ? &s->model : NULL);
    s->idle = make_plan(o, rank, o->tokens, o->full, &nothing);
    s->meet = make_plan(o, rank, o->ranks * RA_BLOCK_TOKENS, 1, NULL);
    if (!s->pass || !s->idle || !s->meet) return -1;
    (void)ra_plan_query(s->pass, rank, &r);
    (void)ra_plan_query(s->idle, rank, &more);         /* the larger workspace serves both */
    if (ra_ring_create(&s->ring, more.workspace_bytes > r.workspace_bytes ? s->idle : s->pass,
                       transport, &rd)) {
        fprintf(stderr, "rank %d: %s %s\n", rank, why.field, why.text);
        return -1;
    }
    m = s->memory = (float *)calloc((size_t)r.q_rows * DIM * (2 * HEADS + 2 * KV_HEADS), sizeof *m);
    if (!m) return -1;
    for (int64_t i = 0; i < r.q_rows * DIM * HEADS; i++) m[i] = (float)(i * 37 % 101) * 0.01f;
    s->t.q.data = m;
    s->t.o.data = m += r.q_rows * DIM * HEADS;
    s->t.k.data = m += r.q_rows * DIM * HEADS;
    s->t.v.data = m + r.q_rows * DIM * KV_HEADS;
    return 0;
}

static int forward(seat *s, const ra_plan *plan) {
    ra_status code = ra_forward(plan, s->ring, &s->t, ra_deadline_ms(1000 * s->o->seconds));
    if (!code) return 0;
    fprintf(stderr, "rank %d: %s: %s\n", s->rank, ra_status_text(code), ra_ring_explain(s->ring));
    return -1;
}

static void nap(double s) {
    struct timespec t;
    t.tv_sec = (time_t)s;
    t.tv_nsec = (long)((s - (double)t.tv_sec) * 1e9);
    (void)nanosleep(&t, NULL);
}

static double processor_s(void) {
    struct timespec t;
    (void)clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* Seconds from when all ranks have met until all are done and have met again, and the processor
 * time of this process meanwhile. plan null: only the meeting. */
static int timed(seat *s, const ra_plan *plan, double *time, double *processor) {
    double begin, used;
    nap(0.01);
    if (forward(s, s->meet)) return -1;
    s->owed = 0;
    used = processor_s();
    begin = (double)ra_now_ns() * 1e-9;
    if (plan && forward(s, plan)) return -1;
    if (forward(s, s->meet)) return -1;
    *time = (double)ra_now_ns() * 1e-9 - begin;
    *processor = processor_s() - used;
    return 0;
}

/* Keeps the calling thread, and those that it makes, on the processors of a rank. */
static void settle(const options *o, int rank) {
    const size_t n = (size_t)sysconf(_SC_NPROCESSORS_ONLN), all = (size_t)o->ranks;
    const size_t me = (size_t)rank;
    cpu_set_t mine;
    if (n < all) return;
    CPU_ZERO(&mine);
    for (size_t i = me * n / all; i < (me + 1) * n / all; i++) CPU_SET(i, &mine);
    (void)sched_setaffinity(0, sizeof mine, &mine);
}

/* All ranks in this process, where nothing is copied. */
typedef struct alone { const options *o; double time; } alone;
static ra_status alone_rank(ra_world *world, int rank, void *user) {
    alone *a = (alone *)user;
    seat s;
    double time, processor;
    int bad;
    settle(a->o, rank);
    bad = seat_open(&s, a->o, rank, ra_world_transport(world, rank));
    for (int i = 0; i < 2 && !bad; i++) bad = timed(&s, s.pass, &time, &processor);
    if (!bad && rank == 0) a->time = time;
    seat_close(&s);
    return bad ? RA_E_IO : RA_OK;
}

/* Rates with which computing alone is predicted to take C, and transfer alone X. */
static ra_rates rates_of(const ra_plan *plan, double C, double X) {
    ra_rates rates = { 1e9, 1e300, 0 };
    ra_prediction p;
    double flops;
    (void)ra_plan_predict(plan, 0, &rates, &p);
    flops = 1e9 * p.all_done_s / C;
    rates.flops_per_s = 1e300;
    rates.link_bytes_per_s = 1e9;
    (void)ra_plan_predict(plan, 0, &rates, &p);
    rates.link_bytes_per_s = 1e9 * p.all_done_s / X;
    rates.flops_per_s = flops;
    return rates;
}

typedef struct times {                 /* of all passes, then medians in [0] */
    double T[PASSES], C[PASSES], X[PASSES], meet[PASSES]; /* T and X with a meeting at the end */
    double T_processor[PASSES], X_processor[PASSES], meet_processor[PASSES];
} times;

static void report(const options *o, const ra_plan *plan, const times *t) {
    const double C = t->C[0], X = t->X[0] - t->meet[0], T = t->T[0] - t->meet[0];
    const double processor = t->T_processor[0] - t->meet_processor[0];
    const double idle = t->X_processor[0] - t->meet_processor[0], less = C < X ? C : X;
    const int spare = o->model || sysconf(_SC_NPROCESSORS_ONLN) > o->ranks;
    const ra_rates rates = rates_of(plan, spare || processor < C ? C : processor, X);
    ra_prediction p;
    (void)ra_plan_predict(plan, 0, &rates, &p);
    printf("%-9s %6d %-6s %-5s %9.1f %9.1f %9.1f %8.0f %% %9.1f %6.2f %9.1f %9.1f", o->transport,
           o->ranks, o->rounds ? "rounds" : o->full ? "full" : "causal", o->model ? "model" : "",
           1e3 * C, 1e3 * X, 1e3 * T, 100 * (C + X - T) / less, 1e3 * p.all_done_s,
           T / p.all_done_s, 1e3 * processor, 1e3 * idle);
    printf("   %.6f %.6f %.0f\n", X, C, rates.link_bytes_per_s * X);
}

static int run(const options *o, const ra_transport *transport) {
    static times t;
    double *all[7], none;
    alone a;
    seat s;
    int bad = seat_open(&s, o, o->rank, transport) || timed(&s, s.pass, &none, &none);
    a.o = o;
    a.time = 0;
    for (int i = 0; i < o->passes && !bad; i++) {
        bad = timed(&s, s.pass, &t.T[i], &t.T_processor[i]) ||
              timed(&s, s.idle, &t.X[i], &t.X_processor[i]) ||
              timed(&s, NULL, &t.meet[i], &t.meet_processor[i]);
        if (!bad && o->rank == 0) bad = ra_world_run(o->ranks, alone_rank, &a, NULL) != RA_OK;
        if (!bad && o->rank) nap(3 * t.T[i]);       /* as long as rank 0 may take */
        t.C[i] = a.time;
    }
    all[0] = t.T; all[1] = t.C; all[2] = t.X; all[3] = t.meet;
    all[4] = t.T_processor; all[5] = t.X_processor; all[6] = t.meet_processor;
    for (int i = 0; i < 7; i++) all[i][0] = median(all[i], o->passes);
    if (!bad && o->rank == 0) report(o, s.pass, &t);
    seat_close(&s);
    return bad != 0;
}

int main(int argc, char **argv) {
    options o = { 0 };
    network w;
    int bad;
    o.passes = 7;
    o.seconds = 60;
    o.transport = "tcp";
#ifdef OVERLAP_MPI
    MPI_Init_thread(&argc, &argv, MPI_THREAD_SERIALIZED, &bad);
    MPI_Comm_rank(MPI_COMM_WORLD, &o.rank);
    MPI_Comm_size(MPI_COMM_WORLD, &o.ranks);
    o.transport = "mpi";
#endif
    for (int i = 1; i < argc; i++) {
        int more = i + 1 < argc;
        if (!strcmp(argv[i], "--full")) o.full = 1;
        else if (!strcmp(argv[i], "--rounds")) o.full = o.rounds = 1;
        else if (!strcmp(argv[i], "--model")) o.model = 1;
        else if (!strcmp(argv[i], "--rank") && more) o.rank = atoi(argv[++i]);
        else if (!strcmp(argv[i], "--transport") && more) o.transport = argv[++i];
        else if (!strcmp(argv[i], "--tokens") && more) o.tokens = atoll(argv[++i]);
        else if (!strcmp(argv[i], "--passes") && more) o.passes = atoi(argv[++i]);
        else if (!strcmp(argv[i], "--seconds") && more) o.seconds = atoll(argv[++i]);
        else if (argv[i][0] != '-' && o.ranks < RANKS) o.at[o.ranks++] = argv[i];
        else o.passes = 0;
    }
    if (!o.tokens) o.tokens = 2048 * o.ranks;
    if (o.passes < 1 || o.passes > PASSES || o.ranks < 2 || o.rank < 0 || o.rank >= o.ranks) {
        fprintf(stderr, "see the top of bench/overlap.c\n");
        return 2;
    }
    settle(&o, o.rank);
    bad = network_open(&w, &o) || run(&o, w.use);
    network_close(&w);
#ifdef OVERLAP_MPI
    mpi_leave_all(bad, o.rank);
#endif
    return bad;
}
