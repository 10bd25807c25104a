/* A rank dies in the middle of a pass, and the others complete theirs. Processes of this machine
 * attend over TCP; one kills itself with SIGKILL after a random number of tiles, at the latest when
 * its pass has ended. The others get RA_E_PEER, connect anew without it and call ra_resume: what
 * they have folded is kept, and the keys of the dead rank are made again from the seed. Then each
 * compares its rows with those of one rank, bit for bit. Exits with 1 if any differ.
 *
 *   cc -O2 -std=c99 -pthread -I. -o ring_survives examples/ring_survives.c -lm
 *   ./ring_survives [--ranks 4] [--tokens 2048] [--times 1] [--seed 1]
 *
 * You see, for each survivor, how many chunks it kept, how many came from whom (its own number: its
 * refetch), and the milliseconds from the failure until its rows were complete. Of one run you also
 * see the last events of the first survivor's ring when its pass ended, ten of up to 64. */
#define _POSIX_C_SOURCE 200809L
#define RINGATTN_IMPLEMENTATION
#include "ringattn.h"
#include "transports/ra_tcp.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { HEADS = 4, KV_HEADS = 2, DIM = 64, ROW = HEADS * DIM, KV_ROW = KV_HEADS * DIM, MOST = 16 };

typedef struct shard { ra_run runs[2]; int count; int64_t rows; } shard;

typedef struct result {                /* of a rank, for the parent */
    ra_status first, then;             /* of the pass, of ra_resume */
    ra_resumed resumed;
    int64_t ns, other_bits, from[MOST];
} result;

typedef struct process {               /* a rank; the parent's ends of its pipes */
    pid_t pid;
    int fd[2], tell, hear;             /* listening sockets of the first and of the second ring;
                                        * pipes to the rank and from it */
    char at[2][32];
} process;

static int ranks = 4, victim, times = 1;
static int64_t tokens = 2048, fatal_tile;
static uint32_t seed = 1;
static process all[MOST];
static float *alone;                   /* O of the whole sequence, from one rank */

/* The number in column c of the row at a position; which: 0 q, 1 k, 2 v. */
static float input(int which, int64_t position, int c) {
    uint32_t x = ((uint32_t)(position * ROW + c) * 3 + (uint32_t)which) ^ seed * 0x9e3779b9u;
    x = (x ^ (x >> 16)) * 0x45d9f3bu;
    x = (x ^ (x >> 16)) * 0x45d9f3bu;
    return (float)((x ^ (x >> 16)) & 0xffff) / 32768 - 1;
}

static float *rows_of(const shard *s, int width, int which) {
    float *rows = (float *)calloc((size_t)(s->rows * width) + 1, sizeof *rows), *row = rows;
    if (!rows) abort();
    for (int i = 0; i < s->count && which >= 0; i++)
        for (int64_t j = 0; j < s->runs[i].count; j++)
            for (int c = 0; c < width; c++) *row++ = input(which, s->runs[i].first + j, c);
    return rows;
}

static shard shard_of(const ra_plan *plan, int rank) {
    shard s;
    memset(&s, 0, sizeof s);
    s.count = ra_plan_k_runs(plan, rank, 0, s.runs, 2);
    for (int i = 0; i < s.count; i++) s.rows += s.runs[i].count;
    return s;
}

static ra_plan *plan_of(int rank, int of) {
    ra_desc d = ra_desc_make(HEADS, KV_HEADS, DIM, RA_F32, RA_MASK_CAUSAL);
    ra_plan *plan = NULL;
    d.rank = rank;
    d.ranks = of;
    d.tokens = tokens;
    d.chunk_tokens = 128;
    d.layout.kind = RA_LAYOUT_ZIGZAG;
    if (ra_plan_create(&plan, &d, NULL)) abort();
    return plan;
}

static ra_tensors tensors_of(const shard *s) {
    ra_tensors t;
    memset(&t, 0, sizeof t);
    t.q.data = rows_of(s, ROW, 0);
    t.k.data = rows_of(s, KV_ROW, 1);
    t.v.data = rows_of(s, KV_ROW, 2);
    t.o.data = rows_of(s, ROW, -1);
    return t;
}

/* -------------------------------------------------------------------------- a rank */
typedef struct rank_state { int rank; int64_t tiles, from[MOST]; const ra_plan *plan; } rank_state;

static void on_event(void *ctx, const ra_event *e) {
    rank_state *me = (rank_state *)ctx;
    if (e->kind == RA_EV_RECV) me->from[e->peer]++;
    if (e->kind == RA_EV_TILE) me->tiles += e->tiles;
    if (me->rank == victim && me->tiles > fatal_tile) raise(SIGKILL);
}

/* The keys of any rank, made again. They stay until the process ends. */
static ra_status refetch(void *ctx, int64_t pass, int32_t rank, ra_tensors *t) {
    const rank_state *me = (const rank_state *)ctx;
    const shard s = shard_of(me->plan, rank);
    (void)pass;
    if (!t) return RA_OK;
    t->k.data = rows_of(&s, KV_ROW, 1);
    t->v.data = rows_of(&s, KV_ROW, 2);
    return RA_OK;
}

/* Ring number `ring` of these ranks, of which this process is number me. */
static ra_tcp *connect_all(const int32_t *rank, int n, int me, int ring) {
    const char *at[MOST];
    ra_tcp_desc d;
    ra_tcp *tcp = NULL;
    ra_error why;
    memset(&d, 0, sizeof d);
    for (int i = 0; i < n; i++) at[i] = all[rank[i]].at[ring];
    d.rank = me;
    d.ranks = n;
    d.addresses = at;
    d.listen_fd = all[rank[me]].fd[ring];
    d.ring = (uint32_t)ring;
    d.error = &why;
    if (ra_tcp_open(&tcp, &d)) fprintf(stderr, "rank %d: %s\n", rank[me], why.text), exit(1);
    return tcp;
}

static int64_t other_bits(const shard *s, const float *mine) {
    int64_t n = 0;
    for (int i = 0; i < s->count; i++)
        for (int64_t j = 0; j < s->runs[i].count * ROW; j++)
            n += memcmp(mine++, alone + s->runs[i].first * ROW + j, sizeof *mine) != 0;
    return n;
}

/* Why the ring failed, if it did, and what it did last. */
static void print_failure(ra_ring *ring) {
    ra_event e[10];
    char line[RA_TEXT_BYTES];
    const int n = ra_ring_events(ring, e, 10);
    const char *why = ra_ring_explain(ring);
    printf("%s\n", *why ? why : "this rank had all its keys before it noticed");
    for (int i = 0; i < n; i++)
        printf("    %s\n", ra_event_text(&e[i], e[n - 1].end_ns, line));
    fflush(stdout);
}

/* As ra_resume, with time for other work between two steps, or on several threads. */
static ra_status resume_in_steps(ra_ring *ring, const ra_resume_desc *rd, int64_t deadline_ns) {
    ra_status s = ra_resume_begin(ring, rd, deadline_ns);
    if (s != RA_OK) return s;
    while ((s = ra_step(ring, 0)) > 0)
        if (s == RA_WAIT) (void)ra_step_wait(ring, deadline_ns);
    if (s != RA_OK) (void)ra_finish(ring, deadline_ns);
    return s;
}

static int run_rank(int rank, int listen_in, int report_out) {
    int32_t alive[MOST];
    rank_state state = { 0, 0, { 0 }, NULL };
    ra_ring_desc rd;
    ra_resume_desc again;
    ra_tensors t;
    ra_ring *ring = NULL;
    ra_tcp *first, *second;
    shard s;
    result out;
    int n = 0, me = 0;
    int64_t begin;
    char go = 0;
    memset(&rd, 0, sizeof rd);
    memset(&again, 0, sizeof again);
    memset(&out, 0, sizeof out);
    for (int i = 0; i < ranks; i++) alive[i] = i;
    first = connect_all(alive, ranks, rank, 0);
    state.rank = rank;
    state.plan = plan_of(rank, ranks);
    rd.resumable = 1;
    rd.trace = on_event;
    rd.trace_ctx = &state;
    s = shard_of(state.plan, rank);
    t = tensors_of(&s);
    if (ra_ring_create(&ring, state.plan, ra_tcp_transport(first), &rd)) return 1;
    /* A rank that dies before the others are connected to it would be waited for. */
    if (write(report_out, &go, 1) != 1 || read(listen_in, &go, 1) != 1) return 1;
    out.first = ra_forward(state.plan, ring, &t, ra_deadline_ms(20000));
    if (rank == victim) raise(SIGKILL);            /* it had fewer tiles than others */
    begin = ra_now_ns();
    if (times == 1 && rank == (victim == 0)) print_failure(ring);
    memset(state.from, 0, sizeof state.from);

    /* The parent knows which ranks are left: here by waitpid, elsewhere your launcher does. */
    if (read(listen_in, alive, sizeof alive) != sizeof alive) return 1;
    for (n = 0; n < MOST && alive[n] >= 0; n++) if (alive[n] == rank) me = n;
    second = connect_all(alive, n, me, 1);
    again.transport = ra_tcp_transport(second);
    again.survivors = alive;
    again.ranks = n;
    again.epoch = 1;
    again.tensors_kept = 1;
    again.refetch = refetch;
    again.ctx = &state;
    out.then = me ? ra_resume(ring, &again, ra_deadline_ms(20000))
                  : resume_in_steps(ring, &again, ra_deadline_ms(20000));
    out.ns = ra_now_ns() - begin;
    (void)ra_ring_resumed(ring, &out.resumed);
    if (out.then) print_failure(ring);
    memcpy(out.from, state.from, sizeof out.from);
    out.other_bits = other_bits(&s, (const float *)t.o.data);
    (void)ra_ring_destroy(ring);
    ra_tcp_close(second);
    ra_tcp_close(first);
    return write(report_out, &out, sizeof out) != sizeof out;
}

/* -------------------------------------------------------------------------- the parent */
static void begin_rank(int r) {
    int down[2], up[2];
    if (pipe(down) || pipe(up)) perror("pipe"), exit(1);
    all[r].pid = fork();
    if (all[r].pid == 0) {
        alarm(60);                     /* ends in any case */
        for (int i = 0; i < ranks; i++)
            if (i != r) close(all[i].fd[0]), close(all[i].fd[1]);
        _exit(run_rank(r, down[0], up[1]));
    }
    close(down[0]);
    close(up[1]);
    all[r].tell = down[1];
    all[r].hear = up[0];
}

static void print_rank(int r, const result *out) {
    const ra_resumed *n = &out->resumed;
    printf("%4d  %-36s %4lld %7lld  %8.1f  %s ", r, ra_status_text(out->first),
           (long long)n->chunks_kept,
           (long long)(n->chunks_from_owner + n->chunks_from_holder + n->chunks_refetched),
           (double)out->ns / 1e6, out->other_bits ? "OTHER BITS" : "same bits ");
    for (int i = 0; i < ranks; i++)
        if (out->from[i]) printf(" %lld of %d", (long long)out->from[i], i);
    printf("\n");
}

static int run_once(int print) {
    int32_t alive[MOST];
    int n = 0, status, failed = 0;
    char go = 0;
    for (int r = 0; r < ranks; r++)
        for (int i = 0, port = 0; i < 2; i++) {
            all[r].fd[i] = ra_tcp_listen("127.0.0.1:0", &port);
            if (all[r].fd[i] < 0) perror("127.0.0.1"), exit(1);
            snprintf(all[r].at[i], sizeof all[r].at[i], "127.0.0.1:%d", port);
        }
    fflush(stdout);
    for (int r = 0; r < ranks; r++) begin_rank(r);
    for (int r = 0; r < ranks; r++) close(all[r].fd[0]), close(all[r].fd[1]);
    for (int r = 0; r < ranks; r++) failed |= read(all[r].hear, &go, 1) != 1;
    for (int r = 0; r < ranks; r++) failed |= write(all[r].tell, &go, 1) != 1;
    failed |= waitpid(all[victim].pid, &status, 0) < 0 || !WIFSIGNALED(status);
    for (int r = 0; r < ranks; r++) if (r != victim) alive[n++] = r;
    while (n < MOST) alive[n++] = -1;
    for (int r = 0; r < ranks; r++)
        if (r != victim) failed |= write(all[r].tell, alive, sizeof alive) != sizeof alive;
    for (int r = 0; r < ranks; r++) {
        result out;
        if (r != victim) {
            memset(&out, 0, sizeof out);
            out.then = RA_E_STATE;
            if (read(all[r].hear, &out, sizeof out) != sizeof out) failed = 1;
            if (print && r == (victim == 0))
                printf("rank  its pass ended with                 kept fetched        ms\n");
            failed |= out.then || out.other_bits;
            if (print || failed) print_rank(r, &out);
            failed |= waitpid(all[r].pid, &status, 0) < 0 || status != 0;
        }
        close(all[r].tell);
        close(all[r].hear);
    }
    return failed;
}

/* O of one rank that has the whole sequence; returns what one of several ranks computes. */
static int64_t attend_alone(void) {
    ra_plan_report report;
    ra_plan *plan = plan_of(0, ranks);
    ra_ring *ring = NULL;
    ra_tensors t;
    shard s;
    if (ra_plan_query(plan, 0, &report)) abort();
    ra_plan_destroy(plan);
    plan = plan_of(0, 1);
    s = shard_of(plan, 0);
    t = tensors_of(&s);
    alone = (float *)t.o.data;
    if (ra_ring_create(&ring, plan, NULL, NULL) || ra_forward(plan, ring, &t, 0)) abort();
    (void)ra_ring_destroy(ring);
    ra_plan_destroy(plan);
    free((void *)(uintptr_t)t.q.data);
    free((void *)(uintptr_t)t.k.data);
    free((void *)(uintptr_t)t.v.data);
    return report.forward.tiles_partial + report.forward.tiles_full;
}

int main(int argc, char **argv) {
    int64_t tiles;
    int failed = 0;
    for (int i = 1; i + 1 < argc; i += 2) {
        if (!strcmp(argv[i], "--ranks")) ranks = atoi(argv[i + 1]);
        else if (!strcmp(argv[i], "--tokens")) tokens = atoll(argv[i + 1]);
        else if (!strcmp(argv[i], "--times")) times = atoi(argv[i + 1]);
        else if (!strcmp(argv[i], "--seed")) seed = (uint32_t)strtoul(argv[i + 1], NULL, 0);
    }
    if (ranks < 2 || ranks > MOST || tokens < ranks) return 2;
    signal(SIGPIPE, SIG_IGN);
    tiles = attend_alone();
    srand(seed);
    for (int i = 0; i < times; i++) {
        int bad;
        victim = rand() % ranks;
        fatal_tile = rand() % (tiles + 1) * 9 / 10;
        printf("run %d of %d ranks, %lld tokens: rank %d dies after %lld of about %lld tiles\n", i,
               ranks, (long long)tokens, victim, (long long)fatal_tile, (long long)tiles);
        bad = run_once(times == 1);
        failed += bad;
    }
    printf("%d of %d runs: every surviving row has the bits of one rank alone\n", times - failed,
           times);
    return failed != 0;
}
