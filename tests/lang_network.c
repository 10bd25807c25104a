/* The network that program 4 of the head comment needs: three processes with a pair of sockets per
 * pair of processes. Proves that each rank attends two layers with the bits of a ring of one. */
#define _POSIX_C_SOURCE 200809L
#include "ringattn.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

enum { RANKS = 3, LAYERS = 2, TOKENS = 4096, Q_ROW = 8 * 64, K_ROW = 2 * 64 };

int attend_layers(int rank, int ranks, int layers, const ra_tensors *layer);
int exchange(void *ctx, int to, const void *s, size_t s_len, int from, void *r, size_t r_len,
             uint64_t tag, int64_t deadline_ns);

static int peer[RANKS];                /* this process's socket to each other one */
static long messages;

int exchange(void *ctx, int to, const void *s, size_t s_len, int from, void *r, size_t r_len,
             uint64_t tag, int64_t deadline_ns) {
    size_t sent = 0, got = 0;
    (void)ctx; (void)tag; (void)deadline_ns;
    messages++;
    while (sent < s_len || got < r_len) {
        struct pollfd f[2];
        ssize_t n;
        f[0].fd = sent < s_len ? peer[to] : -1;
        f[0].events = POLLOUT;
        f[1].fd = got < r_len ? peer[from] : -1;
        f[1].events = POLLIN;
        if (poll(f, 2, 20000) <= 0) return RA_E_IO;
        if (f[0].fd >= 0 && f[0].revents) {
            n = send(peer[to], (const char *)s + sent, s_len - sent, MSG_DONTWAIT | MSG_NOSIGNAL);
            if (n < 0 && errno != EAGAIN) return RA_E_IO;
            if (n > 0) sent += (size_t)n;
        }
        if (f[1].fd >= 0 && f[1].revents) {
            n = recv(peer[from], (char *)r + got, r_len - got, MSG_DONTWAIT);
            if (n == 0 || (n < 0 && errno != EAGAIN)) return RA_E_IO;
            if (n > 0) got += (size_t)n;
        }
    }
    return RA_OK;
}

static float value(int which, int layer, int64_t position, int column) {
    uint32_t x = (uint32_t)(((position * 512 + column) * LAYERS + layer) * 3 + which);
    x = (x ^ (x >> 16)) * 0x45d9f3bu;
    x = (x ^ (x >> 16)) * 0x45d9f3bu;
    return (float)((x ^ (x >> 16)) & 0xffff) / 32768 - 1;
}

/* Positions of a rank's rows under the descriptor of the program; returns how many. */
static int64_t rows_of(int rank, int ranks, int64_t *position) {
    ra_desc d = ra_desc_make(8, 2, 64, RA_F32, RA_MASK_CAUSAL);
    ra_plan *plan = NULL;
    ra_run run[2];
    int64_t n = 0;
    d.tokens = TOKENS;
    d.ranks = ranks;
    d.rank = rank;
    d.layout.kind = RA_LAYOUT_ZIGZAG;
    if (ra_plan_create(&plan, &d, NULL)) exit(1);
    for (int i = 0, runs = ra_plan_q_runs(plan, rank, 0, run, 2); i < runs; i++)
        for (int64_t j = 0; j < run[i].count; j++) position[n++] = run[i].first + j;
    ra_plan_destroy(plan);
    return n;
}

/* Outputs of all layers by position, of the rows of one rank. */
static float *attend(int rank, int ranks, int64_t *position, int64_t *rows) {
    ra_tensors layer[LAYERS];
    float *o, *in;
    *rows = rows_of(rank, ranks, position);
    o = (float *)calloc((size_t)(LAYERS * *rows * Q_ROW), sizeof *o);
    in = (float *)calloc((size_t)(LAYERS * *rows * (Q_ROW + 2 * K_ROW)), sizeof *in);
    if (!o || !in) exit(1);
    memset(layer, 0, sizeof layer);
    for (int i = 0; i < LAYERS; i++) {
        float *q = in + i * *rows * (Q_ROW + 2 * K_ROW), *k = q + *rows * Q_ROW;
        float *v = k + *rows * K_ROW;
        for (int64_t r = 0; r < *rows; r++) {
            for (int c = 0; c < Q_ROW; c++) q[r * Q_ROW + c] = value(0, i, position[r], c);
            for (int c = 0; c < K_ROW; c++) k[r * K_ROW + c] = value(1, i, position[r], c);
            for (int c = 0; c < K_ROW; c++) v[r * K_ROW + c] = value(2, i, position[r], c);
        }
        layer[i].q.data = q;
        layer[i].k.data = k;
        layer[i].v.data = v;
        layer[i].o.data = o + i * *rows * Q_ROW;
    }
    if (attend_layers(rank, ranks, LAYERS, layer)) exit(1);
    free(in);
    return o;
}

static int on_rank(int rank, const float *whole, const int64_t *whole_row) {
    static int64_t position[TOKENS];
    int64_t rows;
    int differ = 0;
    float *o = attend(rank, RANKS, position, &rows);
    for (int i = 0; i < LAYERS; i++)
        for (int64_t r = 0; r < rows; r++)
            differ += memcmp(o + (i * rows + r) * Q_ROW,
                             whole + (i * TOKENS + whole_row[position[r]]) * Q_ROW,
                             Q_ROW * sizeof *o) != 0;
    printf("rank %d: %ld exchanges, %d rows differ\n", rank, messages, differ);
    return differ || !messages;
}

int main(void) {
    static int64_t position[TOKENS], whole_row[TOKENS];
    int pair[RANKS][RANKS][2], failed = 0, status;
    int64_t rows;
    float *whole = attend(0, 1, position, &rows);
    for (int64_t r = 0; r < rows; r++) whole_row[position[r]] = r;
    for (int a = 0; a < RANKS; a++)
        for (int b = 0; b < a; b++)
            if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair[a][b])) return 1;
    messages = 0;
    for (int rank = 0; rank < RANKS; rank++) {
        pid_t child = fork();
        if (child < 0) return 1;
        if (child) continue;
        for (int other = 0; other < RANKS; other++)
            if (other != rank)
                peer[other] = rank > other ? pair[rank][other][0] : pair[other][rank][1];
        status = on_rank(rank, whole, whole_row);
        fflush(stdout);
        _exit(status);
    }
    for (int rank = 0; rank < RANKS; rank++)
        if (wait(&status) < 0 || !WIFEXITED(status) || WEXITSTATUS(status)) failed = 1;
    free(whole);
    return failed;
}
