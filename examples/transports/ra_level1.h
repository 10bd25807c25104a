/* ra_level1.h - a transport of level 1 from one that has sendrecv alone, by a helper thread
 *
 * Copy this file beside ringattn.h. You have a transport of level 0, ten lines around a sendrecv
 * such as MPI_Sendrecv. Used directly, it is called between pieces of work, and nothing moves while
 * the library computes. This wrapper calls it on a separate thread, so that messages travel during
 * the computation:
 *
 *   #define RINGATTN_IMPLEMENTATION
 *   #include "ra_level1.h"                // includes ringattn.h; needs pthreads
 *
 *   ra_level1 *up;
 *   if (ra_level1_open(&up, &mine, rank, ranks)) ...
 *   ra_ring_create(&ring, plan, ra_level1_transport(up), NULL);
 *   ... ra_forward, ra_backward ...
 *   ra_ring_destroy(ring);
 *   ra_level1_close(up);
 *
 * What your transport must do beyond level 0. This helper thread makes all calls, one at a time, so
 * calls from a thread other than the ring's must be allowed (MPI: at least MPI_THREAD_SERIALIZED,
 * and MULTIPLE if the program calls MPI meanwhile). With RA_CAP_DEADLINE it must return by its
 * deadline. The message of a call that ended early may be lost, so the context fails then.
 *
 * How messages pair up. A ring of level 0 knows which ranks exchange what in which step, and orders
 * the calls so that they never block one another. A transport of level 1 does not know this, so the
 * helper works in rounds. A round begins with the exchange of one word with each neighbour, which
 * lists the messages that are ready to be sent and to be received on each channel. Then follows one
 * sendrecv for each message that is ready on both sides. With two ranks that sendrecv moves the
 * same number of bytes each way and leaves the rest of the longer message to the next round:
 * otherwise one direction would be idle until the longer message ends. Only neighbours exchange
 * messages (no RA_CAP_ANY_PEER), so gradients return around the ring.
 *
 * Failure. abort, a deadline, or an error of your transport ends the helper's rounds. The next
 * word, if it can still be sent, reports this to the neighbours. Their ops end with RA_E_ABORTED,
 * and they report it to theirs. quiesce waits until the helper has left your sendrecv. Among live
 * ranks that takes milliseconds, because every helper answers quickly. With a dead peer quiesce
 * calls your abort after a second. If you have none, the wait takes up to 10 s with
 * RA_CAP_DEADLINE, or a minute in the middle of a message, and without RA_CAP_DEADLINE it may never
 * end. If the deadline of quiesce comes first, it returns RA_E_UNSAFE.
 *
 * SPDX-License-Identifier: MIT OR Unlicense */
#if !defined(RA_LEVEL1_H)
#define RA_LEVEL1_H

#ifndef _POSIX_C_SOURCE
#define _POSIX_C_SOURCE 200809L
#endif
#include "ringattn.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define RA_LEVEL1_API static __attribute__((unused))

enum { RA_LEVEL1__OPS = 64, RA_LEVEL1__CHANNELS = 2, RA_LEVEL1__NEXT = 0, RA_LEVEL1__PREV = 1 };
enum { RA_LEVEL1__IN_USE = 0, RA_LEVEL1__LEAVES = 1, RA_LEVEL1__FAILED = 2 };
enum { RA_LEVEL1__PATIENCE_MS = 10000, RA_LEVEL1__COMING_MS = 60000, RA_LEVEL1__ANSWER_MS = 1000 };

/* What a rank sends to a neighbour in each round: lengths of the messages that it is ready to send
 * there and to receive from there; 0: none. Messages are never empty. */
typedef struct ra_level1__word {
    int32_t state, why;                /* RA_LEVEL1__IN_USE ... */
    uint64_t ready[RA_LEVEL1__CHANNELS], wanted[RA_LEVEL1__CHANNELS];
} ra_level1__word;

typedef struct ra_level1__queue {
    ra_transport_op *first, *last;
    size_t moved;                      /* bytes of the first */
} ra_level1__queue;

typedef struct ra_level1 {
    ra_transport tp, below;
    int32_t turn;                      /* of tp */
    pthread_t helper;                  /* makes all calls of below */
    int rank, ranks, sides;            /* sides: 1 with two ranks, where next is previous */
    int peer[2];                       /* next, previous; RA_NO_PEER: none any more */
    int32_t why;                       /* atomic: RA_E_*, the failure of this context */
    int32_t leaves, out;               /* atomic. 1: close was called; the helper has ended */
    pthread_mutex_t lock;              /* guards what follows; never held inside a sendrecv */
    int dead;                          /* 1: the helper uses no op any more */
    int pending;
    ra_level1__queue sends[2][RA_LEVEL1__CHANNELS], recvs[2][RA_LEVEL1__CHANNELS];
} ra_level1;

/* Words of ra_transport_op.scratch: the next op of its queue; how the op ended. */
enum { RA_LEVEL1__NEXT_OP, RA_LEVEL1__ENDED };

static int ra_level1__load(const int32_t *p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
static void ra_level1__store(int32_t *p, int32_t x) { __atomic_store_n(p, x, __ATOMIC_RELEASE); }

/* The first failure counts. */
static void ra_level1__fail(ra_level1 *u, int why) {
    int32_t none = 0, x = why < 0 ? why : RA_E_IO;
    (void)__atomic_compare_exchange_n(&u->why, &none, x, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
}

static void ra_level1__sleep(long us) {
    struct timespec t;
    t.tv_sec = 0;
    t.tv_nsec = us * 1000;
    (void)nanosleep(&t, NULL);
}

/* ========================================================================== the helper's rounds */
static ra_level1__queue *ra_level1__queue_of(ra_level1 *u, int side, int channel, int kind) {
    return kind == RA_MSG_SEND ? &u->sends[side][channel] : &u->recvs[side][channel];
}

/* Removes the first op of a queue, which has ended with this status. */
static void ra_level1__end(ra_level1__queue *q, int status) {
    ra_transport_op *op = q->first;
    q->first = (ra_transport_op *)op->scratch[RA_LEVEL1__NEXT_OP];
    if (!q->first) q->last = NULL;
    q->moved = 0;
    op->scratch[RA_LEVEL1__ENDED] = (void *)(intptr_t)status;
}

/* One call of the transport below; 0: this context has failed. */
static int ra_level1__sendrecv(ra_level1 *u, int to, const void *s, size_t s_len, int from,
                               void *r, size_t r_len, uint64_t tag, int64_t ms) {
    int code;
    if (to == RA_NO_PEER && from == RA_NO_PEER) return 1;
    code = u->below.sendrecv(u->below.ctx, to, s, s_len, from, r, r_len, tag, ra_deadline_ms(ms));
    if (code == RA_E_TIMEOUT) code = RA_E_PEER;        /* a live helper answers in time */
    if (code) ra_level1__fail(u, code);
    return code == 0;
}

/* Exchanges words with both neighbours. mine, theirs: by side. */
static int ra_level1__words(ra_level1 *u, ra_level1__word mine[2], ra_level1__word theirs[2],
                            int64_t ms) {
    size_t n = sizeof *mine;
    memset(theirs, 0, 2 * n);
    for (int way = 0; way < u->sides; way++) {
        int to = u->peer[way], from = u->peer[u->sides == 2 ? 1 - way : way];
        if (!ra_level1__sendrecv(u, to, &mine[way], to == RA_NO_PEER ? 0 : n, from,
                                 &theirs[u->sides == 2 ? 1 - way : way],
                                 from == RA_NO_PEER ? 0 : n, (uint64_t)way, ms))
            return 0;
    }
    return 1;
}

/* The word of this rank for the neighbour on a side. */
static ra_level1__word ra_level1__say(ra_level1 *u, int side) {
    ra_level1__word w;
    memset(&w, 0, sizeof w);
    w.why = ra_level1__load(&u->why);
    w.state = w.why ? RA_LEVEL1__FAILED
                    : ra_level1__load(&u->leaves) ? RA_LEVEL1__LEAVES : RA_LEVEL1__IN_USE;
    for (int c = 0; c < RA_LEVEL1__CHANNELS && w.state == RA_LEVEL1__IN_USE && !u->dead; c++) {
        const ra_transport_op *out = u->sends[side][c].first, *in = u->recvs[side][c].first;
        w.ready[c] = out ? out->len : 0;
        w.wanted[c] = in ? in->len : 0;
    }
    return w;
}

/* Ends the ops that wait for a neighbour that has left. Under the lock. */
static void ra_level1__left(ra_level1 *u, int side) {
    u->peer[side] = RA_NO_PEER;
    for (int c = 0; c < RA_LEVEL1__CHANNELS && !u->dead; c++) {
        while (u->sends[side][c].first) ra_level1__end(&u->sends[side][c], RA_E_PEER);
        while (u->recvs[side][c].first) ra_level1__end(&u->recvs[side][c], RA_E_PEER);
    }
}

/* The op of a message that both sides are ready for, or null. Different lengths end the op. */
static ra_transport_op *ra_level1__match(ra_level1 *u, ra_level1__queue *q, uint64_t mine,
                                         uint64_t theirs) {
    if (!mine || !theirs || u->dead) return NULL;
    if (mine == theirs) return q->first;
    ra_level1__end(q, RA_E_TRUNC);
    return NULL;
}

/* Counts the bytes of the first op that have moved. */
static void ra_level1__advance(ra_level1__queue *q, size_t bytes) {
    q->moved += bytes;
    if (q->moved == q->first->len) ra_level1__end(q, RA_MSG_DONE);
}

/* Moves the messages of a channel to one side and from the other. 1: there were some, 0: none, -1:
 * this context has failed. */
static int ra_level1__messages(ra_level1 *u, int channel, int way, const ra_level1__word mine[2],
                               const ra_level1__word theirs[2]) {
    int back = u->sides == 2 ? 1 - way : way, c = channel, good;
    ra_level1__queue *sends = &u->sends[way][c], *recvs = &u->recvs[back][c];
    ra_transport_op *out, *in;
    uint8_t *s = NULL, *r = NULL;
    size_t s_len = 0, r_len = 0;
    pthread_mutex_lock(&u->lock);
    out = ra_level1__match(u, sends, mine[way].ready[c], theirs[way].wanted[c]);
    in = ra_level1__match(u, recvs, mine[back].wanted[c], theirs[back].ready[c]);
    if (out) { s = (uint8_t *)out->buf + sends->moved; s_len = out->len - sends->moved; }
    if (in) { r = (uint8_t *)in->buf + recvs->moved; r_len = in->len - recvs->moved; }
    if (out && in && u->sides == 1 && s_len != r_len) {
        const size_t unit = u->below.align ? u->below.align : 64;      /* the rest stays aligned */
        const size_t both = (s_len < r_len ? s_len : r_len) / unit * unit;
        if (both) s_len = r_len = both;
    }
    pthread_mutex_unlock(&u->lock);
    if (!s_len && !r_len) return 0;
    good = ra_level1__sendrecv(u, s_len ? u->peer[way] : RA_NO_PEER, s, s_len,
                               r_len ? u->peer[back] : RA_NO_PEER, r, r_len,
                               (uint64_t)(2 + 2 * c + way), RA_LEVEL1__COMING_MS);
    pthread_mutex_lock(&u->lock);
    if (good && !u->dead && s_len) ra_level1__advance(sends, s_len);
    if (good && !u->dead && r_len) ra_level1__advance(recvs, r_len);
    pthread_mutex_unlock(&u->lock);
    return good ? 1 : -1;
}

/* One round; 1: something moved, 0: nothing did, -1: it was the last. */
static int ra_level1__round(ra_level1 *u, int64_t ms) {
    ra_level1__word mine[2], theirs[2];
    int moved = 0;
    pthread_mutex_lock(&u->lock);
    for (int side = 0; side < 2; side++) mine[side] = ra_level1__say(u, side);
    mine[1].state = mine[0].state;     /* abort may have come between the two */
    mine[1].why = mine[0].why;
    pthread_mutex_unlock(&u->lock);
    if (!ra_level1__words(u, mine, theirs, ms) || mine[0].state) return -1;
    for (int side = 0; side < u->sides; side++) {
        if (!theirs[side].state) continue;
        memset(theirs[side].ready, 0, sizeof theirs[side].ready);
        memset(theirs[side].wanted, 0, sizeof theirs[side].wanted);
    }
    for (int i = 0; i < RA_LEVEL1__CHANNELS * u->sides && moved >= 0; i++) {
        int one = ra_level1__messages(u, i / u->sides, i % u->sides, mine, theirs);
        moved = one < 0 ? -1 : moved | one;
    }
    pthread_mutex_lock(&u->lock);
    for (int side = 0; side < u->sides; side++) {
        if (theirs[side].state == RA_LEVEL1__FAILED) ra_level1__fail(u, RA_E_ABORTED);
        if (theirs[side].state) ra_level1__left(u, side);
    }
    pthread_mutex_unlock(&u->lock);
    return moved;
}

/* The first words may have to wait for ranks that are late. Between rounds in which nothing moved
 * the helper sleeps, longer if no op is pending. */
static void *ra_level1__main(void *arg) {
    ra_level1 *u = (ra_level1 *)arg;
    int64_t ms = RA_LEVEL1__COMING_MS;
    int quiet = 0;
    while (u->peer[0] != RA_NO_PEER || (u->sides == 2 && u->peer[1] != RA_NO_PEER)) {
        int moved = ra_level1__round(u, ms), pending;
        if (moved < 0) break;
        ms = RA_LEVEL1__PATIENCE_MS;
        pthread_mutex_lock(&u->lock);
        pending = u->pending;
        pthread_mutex_unlock(&u->lock);
        quiet = moved ? 0 : quiet + 1;
        if (quiet) ra_level1__sleep(pending ? 30 : quiet < 20 ? 100 : 500);
    }
    ra_level1__store(&u->out, 1);
    return NULL;
}

/* ========================================================================== callbacks */
static int ra_level1__side(const ra_level1 *u, int peer) {
    return peer == (u->rank + 1) % u->ranks ? RA_LEVEL1__NEXT
         : peer == (u->rank + u->ranks - 1) % u->ranks ? RA_LEVEL1__PREV : -1;
}

/* After a failure the helper uses no op any more. Under the lock. */
static void ra_level1__bury(ra_level1 *u) {
    u->dead = 1;
    memset(u->sends, 0, sizeof u->sends);
    memset(u->recvs, 0, sizeof u->recvs);
}

static int ra_level1__post(void *ctx, ra_transport_op *const *ops, int n) {
    ra_level1 *u = (ra_level1 *)ctx;
    int idle = 0, why;
    pthread_mutex_lock(&u->lock);
    why = ra_level1__load(&u->why);
    if (why) ra_level1__bury(u);
    for (int kind = RA_MSG_RECV; kind >= RA_MSG_SEND; kind--)
        for (int i = 0; i < n; i++) {
            ra_transport_op *op = ops[i];
            int side = ra_level1__side(u, op->peer);
            ra_level1__queue *q;
            if (op->kind != kind || op->state != RA_MSG_IDLE) continue;
            if (why || side < 0 || op->channel >= RA_LEVEL1__CHANNELS || !op->len) {
                op->state = why ? why : (int)RA_E_IO;
                continue;
            }
            if (u->peer[side] == RA_NO_PEER || u->pending == RA_LEVEL1__OPS) {
                if (u->peer[side] == RA_NO_PEER) op->state = RA_E_PEER;
                else idle++;
                continue;
            }
            q = ra_level1__queue_of(u, side, op->channel, kind);
            if (q->last) q->last->scratch[RA_LEVEL1__NEXT_OP] = op;
            else q->first = op;
            q->last = op;
            op->state = RA_MSG_PENDING;
            u->pending++;
        }
    pthread_mutex_unlock(&u->lock);
    return why ? why : idle ? (int)RA_AGAIN : RA_OK;
}

/* Updates ops. left: how many are still PENDING; moved: how many have just ended. */
static int ra_level1__look(ra_level1 *u, ra_transport_op *const *ops, int n, int *left,
                           int *moved) {
    int why;
    *left = *moved = 0;
    pthread_mutex_lock(&u->lock);
    why = ra_level1__load(&u->why);
    if (why) ra_level1__bury(u);
    for (int i = 0; i < n; i++) {
        int ended = (int)(intptr_t)ops[i]->scratch[RA_LEVEL1__ENDED];
        if (ops[i]->state != RA_MSG_PENDING) continue;
        if (!ended && !why) {
            ++*left;
            continue;
        }
        ++*moved;
        ops[i]->done = ended == RA_MSG_DONE ? ops[i]->len : 0;
        ops[i]->state = ended ? ended : why;
        u->pending--;
    }
    pthread_mutex_unlock(&u->lock);
    return why;
}

static int ra_level1__poll(void *ctx, ra_transport_op *const *ops, int n) {
    int left, moved;
    return ra_level1__look((ra_level1 *)ctx, ops, n, &left, &moved);
}

static int ra_level1__wait(void *ctx, ra_transport_op *const *ops, int n, int64_t deadline_ns) {
    for (;;) {
        int left, moved, why = ra_level1__look((ra_level1 *)ctx, ops, n, &left, &moved);
        if (why || moved || !left || deadline_ns - ra_now_ns() <= 0) return why;
        ra_level1__sleep(30);
    }
}

static int ra_level1__abort(void *ctx, int why) {
    ra_level1__fail((ra_level1 *)ctx, why);
    return RA_OK;
}

/* RA_OK: the helper has left its last sendrecv. */
static int ra_level1__quiesce(void *ctx, int64_t deadline_ns) {
    ra_level1 *u = (ra_level1 *)ctx;
    int64_t told = ra_deadline_ms(RA_LEVEL1__ANSWER_MS);
    ra_level1__fail(u, RA_E_ABORTED);
    while (!ra_level1__load(&u->out)) {
        if (u->below.abort && ra_now_ns() > told) {
            (void)u->below.abort(u->below.ctx, ra_level1__load(&u->why));
            told = INT64_MAX;
        }
        if (deadline_ns - ra_now_ns() <= 0) return RA_E_UNSAFE;
        ra_level1__sleep(100);
    }
    return RA_OK;
}

static const char *ra_level1__error_text(void *ctx, int code) {
    ra_level1 *u = (ra_level1 *)ctx;
    return u->below.error_text ? u->below.error_text(u->below.ctx, code) : NULL;
}

/* ========================================================================== what you call */

/* Copies `below`. All ranks must open at about the same time: each waits a minute for others. */
RA_LEVEL1_API ra_status ra_level1_open(ra_level1 **out, const ra_transport *below, int rank,
                                       int ranks) {
    ra_level1 *u;
    ra_transport *t;
    if (!out) return RA_E_NULL;
    *out = NULL;
    if (!below) return RA_E_NULL;
    if (!below->sendrecv) return RA_E_TRANSPORT;
    if (rank < 0 || rank >= ranks) return RA_E_RANGE;
    u = (ra_level1 *)calloc(1, sizeof *u);
    if (!u) return RA_E_NOMEM;
    u->below = *below;
    u->rank = rank;
    u->ranks = ranks;
    u->sides = ranks > 2 ? 2 : 1;
    u->peer[RA_LEVEL1__NEXT] = ranks > 1 ? (rank + 1) % ranks : RA_NO_PEER;
    u->peer[RA_LEVEL1__PREV] = ranks > 1 ? (rank + ranks - 1) % ranks : RA_NO_PEER;
    t = &u->tp;
    t->size = (uint32_t)sizeof *t;
    t->abi = RA_TRANSPORT_ABI;
    t->caps = RA_CAP_ANY_THREAD | RA_CAP_DEADLINE;
    t->channels = RA_LEVEL1__CHANNELS;
    t->tag_bits = 64;
    t->max_ops = RA_LEVEL1__OPS;
    t->rank = rank;
    t->ranks = ranks;
    t->max_msg = below->max_msg;
    t->align = below->align;
    t->name = below->name;
    t->ctx = u;
    t->turn = &u->turn;
    t->post = ra_level1__post;
    t->poll = ra_level1__poll;
    t->wait = ra_level1__wait;
    t->abort = ra_level1__abort;
    t->quiesce = ra_level1__quiesce;
    t->error_text = ra_level1__error_text;
    if (pthread_mutex_init(&u->lock, NULL)) {
        free(u);
        return RA_E_NOMEM;
    }
    if (pthread_create(&u->helper, NULL, ra_level1__main, u)) {
        pthread_mutex_destroy(&u->lock);
        free(u);
        return RA_E_NOMEM;
    }
    *out = u;
    return RA_OK;
}

/* Valid as long as u. */
RA_LEVEL1_API const ra_transport *ra_level1_transport(const ra_level1 *u) { return &u->tp; }

/* Call it after ra_ring_destroy; null is fine. Tells the neighbours, then waits until the helper
 * has left your sendrecv. With a dead peer and without RA_CAP_DEADLINE that may never happen. */
RA_LEVEL1_API void ra_level1_close(ra_level1 *u) {
    if (!u) return;
    ra_level1__store(&u->leaves, 1);
    pthread_join(u->helper, NULL);
    pthread_mutex_destroy(&u->lock);
    free(u);
}

#endif
