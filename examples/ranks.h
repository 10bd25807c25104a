/* How the ranks of a program meet and talk: as threads of one process, as processes that share
 * memory, over TCP, or under mpirun (with RANKS_MPI defined).
 *
 *   ranks_open    joins this rank to the others, by the means that the desc says
 *   ranks_hop     sends bytes to one rank and receives bytes from another
 *   ranks_fork    starts processes, one per rank */
#if !defined(EXAMPLES_RANKS_H)
#define EXAMPLES_RANKS_H

#include "ringattn.h"
#include "transports/ra_shm.h"
#include "transports/ra_tcp.h"
#if defined(RANKS_MPI)
#include "transports/ra_mpi.h"
#endif

#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>

enum { RANKS_MOST = 64, RANKS_LIST = 4096, RANKS_WHY = 512 };
enum { RANKS_THREADS, RANKS_SHM, RANKS_TCP, RANKS_MPIRUN };

typedef struct ranks_desc {
    int kind;                          /* RANKS_*, equal on all ranks as all else but rank */
    int32_t rank, ranks;
    const char *name;                  /* RANKS_SHM: by which they meet */
    size_t message;                    /* RANKS_SHM: the longest */
    const char *at;                    /* RANKS_TCP: host:port of each rank, commas between them */
    uint32_t ring;                     /* RANKS_TCP: number of the ring among those of the run */
    int32_t first;                     /* the ring has `ranks` ranks, from this one of a larger
                                        * world on; RANKS_TCP: of the list */
    ra_world *world;                   /* RANKS_THREADS */
} ranks_desc;

typedef struct ranks_net {
    const ra_transport *wire;
    ra_shm *shm;
    ra_tcp *tcp;
    void *mpi;
} ranks_net;

static inline ra_status ranks_refuse(char *why, ra_status s, const char *a, const char *b) {
    snprintf(why, RANKS_WHY, "%.60s%s%.300s", a, *a && *b ? ": " : "", b);
    return s;
}

static inline ra_status ranks_open_tcp(ranks_net *n, const ranks_desc *d, ra_error *error) {
    const char *at[RANKS_MOST];
    char list[RANKS_LIST], *next = list;
    ra_tcp_desc t;
    int32_t count = 0;
    memset(&t, 0, sizeof t);
    snprintf(list, sizeof list, "%s", d->at);
    while (next && count < RANKS_MOST) {
        at[count++] = next;
        next = strchr(next, ',');
        if (next) *next++ = 0;
    }
    t.rank = d->rank;
    t.ranks = d->ranks;
    t.addresses = at + d->first;
    t.ring = d->ring;
    t.error = error;
    return ra_tcp_open(&n->tcp, &t);
}

#if defined(RANKS_MPI)
static inline ra_status ranks_open_mpi(ranks_net *n, const ranks_desc *d, ra_error *error) {
    MPI_Comm part = MPI_COMM_NULL;
    ra_mpi *mpi = NULL;
    if (MPI_Comm_split(MPI_COMM_WORLD, d->first, d->rank, &part)) return RA_E_IO;
    const ra_status s = ra_mpi_open(&mpi, part, 0, error);
    MPI_Comm_free(&part);              /* ra_mpi_open has a copy */
    n->mpi = mpi;
    if (!s) n->wire = ra_mpi_transport(mpi);
    return s;
}
static inline ra_status ranks_close_mpi(ranks_net *n) { return ra_mpi_close((ra_mpi *)n->mpi); }
#else
static inline ra_status ranks_open_mpi(ranks_net *n, const ranks_desc *d, ra_error *error) {
    (void)n; (void)d; (void)error;
    return RA_E_UNSUPPORTED;
}
static inline ra_status ranks_close_mpi(ranks_net *n) { (void)n; return RA_OK; }
#endif

/* Collective. Refusals: why, RANKS_WHY bytes. */
static inline ra_status ranks_open(ranks_net *n, const ranks_desc *d, char *why) {
    ra_status s = RA_OK;
    ra_error error;
    ra_shm_desc shm;
    memset(n, 0, sizeof *n);
    memset(&error, 0, sizeof error);
    memset(&shm, 0, sizeof shm);
    shm.name = d->name;
    shm.rank = d->rank;
    shm.ranks = d->ranks;
    shm.slot_bytes = d->message;
    shm.error = &error;
    if (d->kind == RANKS_THREADS) n->wire = ra_world_transport(d->world, d->rank);
    else if (d->kind == RANKS_SHM) s = ra_shm_open(&n->shm, &shm);
    else if (d->kind == RANKS_TCP) s = ranks_open_tcp(n, d, &error);
    else s = ranks_open_mpi(n, d, &error);
    if (!s && n->shm) n->wire = ra_shm_transport(n->shm);
    if (!s && n->tcp) n->wire = ra_tcp_transport(n->tcp);
    return s ? ranks_refuse(why, s, error.text[0] ? error.field : "",
                            error.text[0] ? error.text : ra_status_text(s)) : s;
}

/* After the rings on it. */
static inline ra_status ranks_close(ranks_net *n) {
    ra_shm_close(n->shm);
    ra_tcp_close(n->tcp);
    const ra_status s = ranks_close_mpi(n);
    memset(n, 0, sizeof *n);
    return s;
}

/* -------------------------------------------------------------------------- messages
 * A rank's hops take turns with its passes. op: [2], which stay where they are. A hop fails after
 * 10 minutes without a message. After a failure, which `why` describes, abort has been called, and
 * RA_E_UNSAFE says that the transport may still use op and the memory. */
static inline ra_status ranks_hop_failed(const ra_transport *net, const ra_transport_op *op, int n,
                                         int s, char *why) {
    const char *text = net->error_text ? net->error_text(net->ctx, s) : NULL;
    int peer = -1;
    for (int i = 0; i < n; i++)
        if (op[i].state < 0 || (peer < 0 && op[i].state != RA_MSG_DONE)) peer = op[i].peer;
    if (text) snprintf(why, RANKS_WHY, "%.400s", text);
    else if (s == RA_E_PEER) snprintf(why, RANKS_WHY, "rank %d has ended", peer);
    else snprintf(why, RANKS_WHY, "%s, waiting for rank %d", ra_status_text((ra_status)s), peer);
    if (net->abort) (void)net->abort(net->ctx, s);
    return net->quiesce && net->quiesce(net->ctx, ra_deadline_ms(1000)) ? RA_E_UNSAFE
                                                                       : (ra_status)s;
}

typedef struct ranks_parcel {          /* what goes out, and what comes in; no bytes: nothing */
    int to, from;
    const void *out;
    void *in;
    size_t out_bytes, in_bytes;
} ranks_parcel;

static inline ra_status ranks_hop(const ra_transport *net, ra_transport_op op[2],
                                  const ranks_parcel *p, char *why) {
    const int64_t patience = ra_deadline_ms(600000);
    ra_transport_op *ops[2];
    int s = RA_AGAIN, n = 0;
    memset(op, 0, 2 * sizeof *op);
    if (p->in_bytes) {
        op[n].kind = RA_MSG_RECV;
        op[n].peer = p->from;
        op[n].buf = p->in;
        op[n].len = p->in_bytes;
        ops[n] = &op[n];
        n++;
    }
    if (p->out_bytes) {
        op[n].kind = RA_MSG_SEND;
        op[n].peer = p->to;
        op[n].buf = (void *)(uintptr_t)p->out;
        op[n].len = p->out_bytes;
        ops[n] = &op[n];
        n++;
    }
    for (int turn = 0; s >= 0; turn++) {
        int done = 0, idle = 0;
        for (int i = 0; i < n; i++) done += op[i].state == RA_MSG_DONE;
        for (int i = 0; i < n; i++) idle += op[i].state == RA_MSG_IDLE;
        if (done == n) return RA_OK;
        if (idle) s = net->post(net->ctx, ops, n);
        if (s >= 0) s = net->poll(net->ctx, ops, n);
        if (turn > 200 && s >= 0 && net->wait)
            s = net->wait(net->ctx, ops, n, ra_now_ns() + 2000000);
        else if (turn > 100) sched_yield();
        if (s == RA_E_TIMEOUT) s = RA_AGAIN;
        if (turn % 256 == 255 && ra_now_ns() > patience) s = RA_E_TIMEOUT;
        for (int i = 0; i < n; i++)
            if (op[i].state < 0) s = op[i].state;
    }
    return ranks_hop_failed(net, op, n, s, why);
}

/* -------------------------------------------------------------------------- processes */
/* Runs fn in `ranks` processes, and waits for them. status: of waitpid, one for each; -1: it could
 * not be started. pid: [ranks], which a signal handler may read. */
static inline void ranks_fork(int32_t ranks, int (*fn)(void *user, int32_t rank), void *user,
                              volatile pid_t *pid, int *status) {
    for (int32_t i = 0; i < ranks; i++) {
        status[i] = -1;
        fflush(NULL);
        pid[i] = fork();
        if (pid[i] == 0) _exit(fn(user, i));
    }
    for (int32_t i = 0; i < ranks; i++) {
        if (pid[i] < 0) continue;
        while (waitpid(pid[i], &status[i], 0) < 0 && errno == EINTR) { }
        pid[i] = -1;
    }
}

#endif
