/* Ring attention over a network of your own: three processes, a socket between each pair, and a
 * transport of one function of about 40 lines and another of 4. You will see what every process
 * sent and received, and that the numbers are those of one process, bit for bit. Exits with 1 if
 * not. With `disagree` rank 1 has another mask: you will see how soon every rank knows.
 *
 *   cc -O2 -std=c99 -pthread -I. -o own_network examples/own_network.c -lm && ./own_network
 *   ./own_network disagree */
#define _POSIX_C_SOURCE 200809L
#define RINGATTN_IMPLEMENTATION
#include "ringattn.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

enum { RANKS = 3, TOKENS = 1000, HEADS = 2, DIM = 32, ROW = HEADS * DIM };

/* -------------------------------------------------------------------------- the network
 * What ctx points to: the sockets of this process, one to each peer, and two counters. */
typedef struct net {
    int peer[RANKS];
    long long messages, bytes;
} net;

/* Waits until one of the sockets can move bytes, or until the deadline (0: none). */
static int net_wait(int out, int in, int64_t deadline_ns) {
    struct pollfd f[2];
    int64_t left = deadline_ns ? (deadline_ns - ra_now_ns()) / 1000000 + 1 : 1000;
    if (deadline_ns && left <= 0) return RA_E_TIMEOUT;
    f[0].fd = out;                     /* poll ignores -1 */
    f[0].events = POLLOUT;
    f[1].fd = in;
    f[1].events = POLLIN;
    if (poll(f, 2, left > 1000 ? 1000 : (int)left) < 0 && errno != EINTR) return RA_E_IO;
    return RA_OK;
}

/* Level 0 of ra_transport, called by a thread of the library while this one computes. It sends and
 * receives at the same time, because two processes that both only send would wait forever. A socket
 * is a stream of bytes. That suffices, because both sides know every length and messages between
 * two ranks arrive in order. */
static int net_sendrecv(void *ctx, int to, const void *s, size_t s_len, int from, void *r,
                        size_t r_len, uint64_t tag, int64_t deadline_ns) {
    net *n = (net *)ctx;
    size_t sent = 0, got = 0;
    (void)tag;
    if (to == RA_NO_PEER) s_len = 0;
    if (from == RA_NO_PEER) r_len = 0;
    while (sent < s_len || got < r_len) {
        int out = sent < s_len ? n->peer[to] : -1, in = got < r_len ? n->peer[from] : -1;
        int status = net_wait(out, in, deadline_ns);
        if (status != RA_OK) return status;
        ssize_t done = out < 0 ? 0 : send(out, (const char *)s + sent, s_len - sent,
                                          MSG_DONTWAIT | MSG_NOSIGNAL);
        if (done < 0 && errno != EAGAIN && errno != EINTR) return RA_E_PEER;
        if (done > 0) sent += (size_t)done;
        done = in < 0 ? 1 : recv(in, (char *)r + got, r_len - got, MSG_DONTWAIT);
        if (done == 0 || (done < 0 && errno != EAGAIN && errno != EINTR)) return RA_E_PEER;
        if (in >= 0 && done > 0) got += (size_t)done;
    }
    n->messages += (s_len > 0) + (r_len > 0);
    n->bytes += (long long)(s_len + r_len);
    return RA_OK;
}

/* Called from any thread when this rank gives up. net_sendrecv then returns, here and at the peers.
 * Without it a call that waits for a peer that is stuck would wait until its deadline. */
static int net_abort(void *ctx, int why) {
    (void)why;
    for (int r = 0; r < RANKS; r++) shutdown(((net *)ctx)->peer[r], SHUT_RDWR);
    return RA_OK;
}

/* -------------------------------------------------------------------------- the attention */
static int disagree;                   /* rank 1 gets it wrong */

static void describe(ra_desc *d, int rank, int ranks, ra_error *error) {
    *d = ra_desc_make(HEADS, HEADS, DIM, RA_F32, RA_MASK_CAUSAL);
    d->tokens = TOKENS;
    d->layout.kind = RA_LAYOUT_ZIGZAG;
    if (disagree && rank == 1) d->mask.window = 100;
    d->rank = rank;
    d->ranks = ranks;
    d->error = error;
}

/* The number in column c of the row at a position; which: 0 q, 1 k, 2 v. */
static float input(int which, int64_t position, int c) {
    uint32_t x = (uint32_t)(position * ROW + c) * 3 + (uint32_t)which;
    x = (x ^ (x >> 16)) * 0x45d9f3bu;
    x = (x ^ (x >> 16)) * 0x45d9f3bu;
    return (float)((x ^ (x >> 16)) & 0xffff) / 32768 - 1;
}

static void fill(float *q, float *k, float *v, const ra_run *runs, int run_count) {
    int64_t row = 0;
    for (int i = 0; i < run_count; i++)
        for (int64_t j = 0; j < runs[i].count; j++, row++)
            for (int c = 0; c < ROW; c++) {
                q[row * ROW + c] = input(0, runs[i].first + j, c);
                k[row * ROW + c] = input(1, runs[i].first + j, c);
                v[row * ROW + c] = input(2, runs[i].first + j, c);
            }
}

/* One rank, from its plan to its rows of the output, which it writes by position into
 * o[TOKENS][ROW]. transport null: a ring of one rank. */
static ra_status attend(int rank, int ranks, const ra_transport *transport, float *o) {
    static float q[TOKENS * ROW], k[TOKENS * ROW], v[TOKENS * ROW], mine[TOKENS * ROW];
    ra_error error = {0};
    ra_plan *plan = NULL;
    ra_ring *ring = NULL;
    ra_tensors t = {0};
    ra_run runs[2];
    ra_desc d;
    describe(&d, rank, ranks, &error);
    ra_status status = ra_plan_create(&plan, &d, NULL);
    if (status != RA_OK) {
        printf("refused: %s %s\n", error.field, error.text);
        return status;
    }
    int run_count = ra_plan_q_runs(plan, rank, 0, runs, 2);
    fill(q, k, v, runs, run_count);
    t.q.data = q;
    t.k.data = k;
    t.v.data = v;
    t.o.data = mine;
    const int64_t begin = ra_now_ns();
    status = ra_ring_create(&ring, plan, transport, NULL);
    if (status == RA_OK) status = ra_forward(plan, ring, &t, ra_deadline_ms(20000));
    if (status != RA_OK) printf("rank %d, after %.3f s: %s\n", rank,
                                (double)(ra_now_ns() - begin) * 1e-9, ra_ring_explain(ring));
    const float *row = mine;
    for (int i = 0; i < run_count; i++) {
        memcpy(o + runs[i].first * ROW, row, (size_t)runs[i].count * ROW * sizeof(float));
        row += runs[i].count * ROW;
    }
    ra_ring_destroy(ring);
    ra_plan_destroy(plan);
    return status;
}

/* -------------------------------------------------------------------------- the processes */
static int write_all(int fd, const void *data, size_t n) {
    const char *p = (const char *)data;
    while (n) {
        ssize_t done = write(fd, p, n);
        if (done <= 0 && errno != EINTR) return -1;
        if (done > 0) p += done, n -= (size_t)done;
    }
    return 0;
}

static int read_all(int fd, void *data, size_t n) {
    char *p = (char *)data;
    while (n) {
        ssize_t done = read(fd, p, n);
        if (done == 0 || (done < 0 && errno != EINTR)) return -1;
        if (done > 0) p += done, n -= (size_t)done;
    }
    return 0;
}

/* A child: its end of every socket, one pass, its output to the parent. Returns the exit code. */
static int child(int rank, int pair[RANKS][RANKS], int result) {
    static float o[TOKENS * ROW];      /* rows of other ranks stay 0 */
    static int32_t turn;
    net n = {{0}, 0, 0};
    ra_transport t;
    memset(&t, 0, sizeof t);
    for (int r = 0; r < RANKS; r++) {
        n.peer[r] = pair[rank][r];
        for (int other = 0; other < RANKS; other++)            /* the others' ends */
            if (r != rank && r != other) close(pair[r][other]);
    }
    t.size = sizeof t;
    t.abi = RA_TRANSPORT_ABI;
    t.rank = rank;
    t.ranks = RANKS;
    t.caps = RA_CAP_ANY_PEER | RA_CAP_DEADLINE | RA_CAP_HELPER;
    t.name = "socketpair";
    t.ctx = &n;
    t.sendrecv = net_sendrecv;
    t.abort = net_abort;
    t.turn = &turn;                    /* two rings on these sockets would be refused */
    if (attend(rank, RANKS, &t, o) != RA_OK) return 1;
    printf("rank %d, process of its own: %lld messages, %lld bytes through its sockets\n", rank,
           n.messages, n.bytes);
    fflush(stdout);
    return write_all(result, o, sizeof o) ? 1 : 0;
}

/* Starts the ranks, before this process has used the library, and adds up what they send: every row
 * comes from one rank, 0 from the others. */
static int run_ranks(float *sum) {
    static float o[TOKENS * ROW];
    int pair[RANKS][RANKS], result[RANKS][2], failed = 0;
    pid_t pid[RANKS];
    memset(pair, -1, sizeof pair);
    for (int a = 0; a < RANKS; a++)
        for (int b = a + 1; b < RANKS; b++) {
            int two[2];
            if (socketpair(AF_UNIX, SOCK_STREAM, 0, two)) return -1;
            pair[a][b] = two[0];
            pair[b][a] = two[1];
        }
    fflush(stdout);
    for (int r = 0; r < RANKS; r++) {
        if (pipe(result[r]) || (pid[r] = fork()) < 0) return -1;
        if (pid[r] == 0) exit(child(r, pair, result[r][1]));
        close(result[r][1]);
    }
    for (int a = 0; a < RANKS; a++)
        for (int b = 0; b < RANKS; b++)
            if (pair[a][b] >= 0) close(pair[a][b]);
    for (int r = 0; r < RANKS; r++) {
        int status = 0;
        failed |= read_all(result[r][0], o, sizeof o);
        for (int i = 0; i < TOKENS * ROW; i++) sum[i] += o[i];
        failed |= waitpid(pid[r], &status, 0) < 0 || status != 0;
    }
    return failed;
}

int main(int argc, char **argv) {
    disagree = argc == 2 && !strcmp(argv[1], "disagree");
    if (argc > 1 && !disagree) {
        fprintf(stderr, "usage: own_network [disagree]\n");
        return 2;
    }
    static float ring[TOKENS * ROW], one[TOKENS * ROW];
    int differing = 0;
    printf("%d tokens, %d heads of %d, causal, zigzag, %d processes\n", TOKENS, HEADS, DIM, RANKS);
    if (run_ranks(ring)) {
        printf("a rank failed\n");
        return 1;
    }
    if (attend(0, 1, NULL, one) != RA_OK) return 1;
    for (int i = 0; i < TOKENS * ROW; i++)
        differing += memcmp(&ring[i], &one[i], sizeof(float)) != 0;
    printf("against one process: %d of %d numbers have other bits\n", differing, TOKENS * ROW);
    return differing != 0;
}
