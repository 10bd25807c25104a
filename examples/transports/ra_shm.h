/* ra_shm.h - a transport of ringattn.h for processes of one machine, through shared memory
 *
 * Copy this file beside ringattn.h. It needs 64-bit Linux 5.3 or later and no library. Include it
 * before any system header, or compile with -D_DEFAULT_SOURCE (gnu99 and C++ have that anyway).
 *
 *   #define RINGATTN_IMPLEMENTATION
 *   #include "ra_shm.h"               // includes ringattn.h
 *
 *   ra_shm_desc sd; ra_shm *shm; ra_error why;
 *   memset(&sd, 0, sizeof sd);
 *   sd.name = "job-4711"; sd.rank = rank; sd.ranks = 4;
 *   sd.slot_bytes = ra_shm_slot_bytes(plan, 4);
 *   sd.error = &why;
 *   if (ra_shm_open(&shm, &sd)) { fprintf(stderr, "%s: %s\n", why.field, why.text); exit(1); }
 *   ra_ring_create(&ring, plan, ra_shm_transport(shm), NULL);
 *   ... ra_forward, ra_backward ...
 *   ra_ring_destroy(ring);
 *   ra_shm_close(shm);
 *
 * and cc -O2 program.c -lpthread -lm. examples/ring_shm.c is a complete program.
 *
 * Memory. Rank 0 creates a memfd, a file without a name whose size is sealed, and sends it to the
 * other ranks over a socket in Linux's abstract name space. Nothing is ever in /dev/shm or in any
 * other directory: the kernel frees the memory with the last process, whichever ranks crash. The
 * name exists only while ranks meet in ra_shm_open, and ends with rank 0. The kernel says on both
 * sides which user the other one is: only processes of one user meet. Another user who takes the
 * name first can keep a ring from forming, but learns nothing; the refusal says who it is.
 *
 * Open files. Each rank keeps one per rank of the ring. While ranks meet rank 0 has two per rank.
 * 120 ranks fit into `ulimit -n 256`.
 *
 * Messages. Each ordered pair of ranks has two lanes, one per channel: a queue of descriptors and
 * `slots` slots of slot_bytes each. A send copies the message into a slot of its lane; that is the
 * only copy of a forward chunk. Its receiver is lent the slot (RA_CAP_LOAN). When the library sends
 * lent memory on, a descriptor of the same slot goes to the next rank. A slot is free when its last
 * reader has released it. One slot of each lane is never lent: while all others are, a receive
 * copies from it instead. So loans can delay a lane, but never block it. Backward messages are
 * changed by each rank, so they are copied out.
 * The file is sparse: a lane takes memory for the slots that were used, at most `slots` *
 * slot_bytes.
 *
 * Waiting. ra_step_wait spins briefly, yields, then sleeps in a futex until a peer rings this
 * rank's bell. The bell is one word with a counter and the bit "asleep". A rank that publishes
 * something adds to the counter, and the old value shows whether the other rank sleeps. So no
 * wake-up is lost and no fence is needed.
 *
 * Failure. Each rank has a pidfd of every other one. When a process has ended, its peers'
 * operations with it fail with RA_E_PEER within about 2 ms. If it had called ra_shm_close, they
 * fail only when no message of it is left. A process that is stopped, or called exec, looks like a
 * slow one: deadlines end the wait. abort sets one word in shared memory and rings all bells: the
 * calls of other ranks fail with RA_E_ABORTED, or RA_E_PEER if a process has ended. No rank writes
 * into the memory of another process, so quiesce always returns RA_OK. A context that has failed
 * stays failed: open a new one. A child that a rank forks may call ra_shm_close, and nothing else
 * here. While a ring is open, `ulimit -n` must not be lowered.
 *
 * Two rings at once need two contexts of different names. Tags are ignored: the n-th send of a lane
 * matches the n-th receive. Ranks may also be threads of one process.
 *
 * SPDX-License-Identifier: MIT OR Unlicense */
#if !defined(RA_SHM_H)
#define RA_SHM_H

#ifndef _DEFAULT_SOURCE
#define _DEFAULT_SOURCE 1
#endif
#include "ringattn.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#if !defined(__linux__) || !defined(__LP64__)
#error "ra_shm.h needs 64-bit Linux"
#endif
#if defined(__GLIBC__) && !defined(__USE_MISC)
#error "include ra_shm.h before system headers, or compile with -D_DEFAULT_SOURCE"
#endif

/* ========================================================================== what you call */
typedef struct ra_shm ra_shm;

typedef struct ra_shm_desc {           /* zero it first; equal on all ranks, except rank, deadline
                                        * and error */
    const char *name;                  /* required: 1 to 64 characters. No other ring that this user
                                        * opens at the same time may have it */
    int32_t rank, ranks;               /* ranks: 1 to RA_SHM_MAX_RANKS */
    size_t  slot_bytes;                /* required: the largest message, see ra_shm_slot_bytes */
    int32_t slots;                     /* per lane, 2 to 16; 0: 8 */
    int64_t deadline_ns;               /* for all ranks to meet; 0: 60 s from now */
    ra_error *error;                   /* null, or gets the reason of a refusal */
} ra_shm_desc;

typedef struct ra_shm_counters {       /* of this rank, since ra_shm_open */
    int64_t copies_in, copies_out;     /* messages copied into a slot, and out of one */
    int64_t loans, forwards;           /* receives that lent a slot; sends of lent memory */
    int64_t sleeps, wakes;             /* futex calls */
} ra_shm_counters;

enum { RA_SHM_MAX_RANKS = 128 };

#define RA_SHM_API static __attribute__((unused))

/* ========================================================================== layout
 * The file is zero at first, and every word of it starts at zero. Words that several processes
 * write are 128 bytes apart. */
enum { RA_SHM__CHANNELS = 2, RA_SHM__QUEUE = 16, RA_SHM__SLOTS = 16, RA_SHM__VERSION = 2 };
enum { RA_SHM__MAGIC = 0x68735261, RA_SHM__HERE = 1, RA_SHM__LEFT = 2 };
enum { RA_SHM__ADD_SEALS = 1033, RA_SHM__GET_SEALS = 1034,           /* F_ADD_SEALS, F_GET_SEALS */
       RA_SHM__SEALS = 7 };                      /* F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW */

typedef struct ra_shm__word { uint32_t v, spare[31]; } ra_shm__word;

typedef struct ra_shm__entry {         /* one message */
    uint64_t at, len, tag, spare;      /* at: bytes from the first slot of all lanes */
} ra_shm__entry;

typedef struct ra_shm__slot {
    uint32_t refs;                     /* readers, the queue included; 0: free */
    uint32_t lent;                     /* 1: it was lent to its first receiver; cleared before refs
                                        * is set */
    uint32_t spare[30];
} ra_shm__slot;

typedef struct ra_shm__lane {
    ra_shm__word head, tail;           /* messages sent, by the sender; received, by the receiver */
    ra_shm__entry entry[RA_SHM__QUEUE];
    ra_shm__slot slot[RA_SHM__SLOTS];  /* taken by the sender alone, released by any rank */
} ra_shm__lane;

typedef struct ra_shm__seat {
    ra_shm__word bell;                 /* 2 per ring of the bell, 1: asleep */
    ra_shm__word state;                /* RA_SHM__HERE, RA_SHM__LEFT */
} ra_shm__seat;

typedef struct ra_shm__head {
    ra_shm__word abort;                /* 0, or (rank + 1) << 8 | -why of the first that failed */
    ra_shm__seat seat[RA_SHM_MAX_RANKS];
} ra_shm__head;

typedef struct ra_shm__fifo { ra_transport_op *first, *last; } ra_shm__fifo;   /* linked by
                                        * scratch[0] */

struct ra_shm {
    ra_transport tp;
    int32_t turn;                      /* of tp */
    int32_t rank, ranks, slots, gone;  /* gone: 1: a process has ended without ra_shm_close */
    pid_t pid;                         /* of this rank; another one has forked from it */
    uint32_t aborted;                  /* abort was called here; any thread */
    int32_t pending;                   /* ops in all FIFOs */
    size_t slot_bytes, stride, total, data_bytes;
    ra_shm__head *head;                /* the file: head, lanes, slots */
    ra_shm__lane *lane;                /* [sender][receiver][channel] */
    uint8_t *data;                     /* [lane][slots][stride] */
    int64_t looked_ns;                 /* at the other processes */
    struct pollfd pidfd[RA_SHM_MAX_RANKS]; /* fd -1: has ended, or this rank */
    uint8_t dead[RA_SHM_MAX_RANKS];
    ra_shm__fifo in[RA_SHM_MAX_RANKS][RA_SHM__CHANNELS], out[RA_SHM_MAX_RANKS][RA_SHM__CHANNELS];
    ra_shm_counters count;
    int text_code;
    char text[160];
};

/* ========================================================================== words and bells */
static uint32_t ra_shm__load(const uint32_t *p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }

static void ra_shm__store(uint32_t *p, uint32_t v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }

static uint32_t ra_shm__add(uint32_t *p, uint32_t v) {               /* returns the old value */
    return __atomic_fetch_add(p, v, __ATOMIC_ACQ_REL);
}

static void ra_shm__pause(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Rings a bell after something was published. A rank sets its bit in the same word before it checks
 * once more and sleeps: either this addition sees the bit, or that check sees what was
 * published. */
static void ra_shm__ring(ra_shm *s, int rank) {
    uint32_t *bell = &s->head->seat[rank].bell.v;
    if ((ra_shm__add(bell, 2) & 1) == 0) return;
    (void)__atomic_fetch_and(bell, ~1u, __ATOMIC_ACQ_REL);
    (void)syscall(SYS_futex, bell, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

/* Sleeps until the bell differs from `seen`, at most ns (below a second). */
static void ra_shm__sleep(ra_shm *s, uint32_t seen, int64_t ns) {
    struct timespec t;
    t.tv_sec = 0;
    t.tv_nsec = (long)ns;
    s->count.sleeps++;
    (void)syscall(SYS_futex, &s->head->seat[s->rank].bell.v, FUTEX_WAIT, seen, &t, NULL, 0);
}

static void ra_shm__nap(int64_t ns) {
    struct timespec t;
    t.tv_sec = (time_t)(ns / 1000000000);
    t.tv_nsec = (long)(ns % 1000000000);
    (void)nanosleep(&t, NULL);
}

/* ========================================================================== lanes and slots */
static size_t ra_shm__lane_index(const ra_shm *s, int from, int to, int channel) {
    return ((size_t)from * (size_t)s->ranks + (size_t)to) * RA_SHM__CHANNELS + (size_t)channel;
}

static ra_shm__lane *ra_shm__lane_of(const ra_shm *s, int from, int to, int channel) {
    return &s->lane[ra_shm__lane_index(s, from, to, channel)];
}

/* The slot at an offset of the data, and the rank that owns it. */
static ra_shm__slot *ra_shm__slot_at(const ra_shm *s, uint64_t at, int *owner) {
    size_t number = (size_t)at / s->stride, lane = number / (size_t)s->slots;
    *owner = (int)(lane / RA_SHM__CHANNELS / (size_t)s->ranks);
    return &s->lane[lane].slot[number % (size_t)s->slots];
}

/* Ends one reader of a slot, and wakes the owner if that was the last one. */
static void ra_shm__drop(ra_shm *s, uint64_t at) {
    int owner;
    ra_shm__slot *slot = ra_shm__slot_at(s, at, &owner);
    if (ra_shm__add(&slot->refs, (uint32_t)-1) == 1 && owner != s->rank) ra_shm__ring(s, owner);
}

/* 1: the message at `at`, which came by `lane`, may be lent. If its slot is one of the lane,
 * another slot of the lane must not be lent. If it was sent on from another lane, it is lent
 * already. */
static int ra_shm__lend(ra_shm *s, ra_shm__lane *lane, uint64_t at) {
    int owner, lent = 0;
    ra_shm__slot *slot = ra_shm__slot_at(s, at, &owner);
    if (slot < lane->slot || slot >= lane->slot + s->slots) return 1;
    for (int i = 0; i < s->slots; i++)
        lent += ra_shm__load(&lane->slot[i].refs) > 0 && ra_shm__load(&lane->slot[i].lent);
    if (lent >= s->slots - 1) return 0;
    ra_shm__store(&slot->lent, 1);
    return 1;
}

/* A free slot of a lane of this rank, or -1. The lowest: its memory is likely to exist already. */
static int ra_shm__free_slot(const ra_shm *s, const ra_shm__lane *lane) {
    for (int i = 0; i < s->slots; i++)
        if (ra_shm__load(&lane->slot[i].refs) == 0) return i;
    return -1;
}

/* ========================================================================== ops */
static void ra_shm__push(ra_shm *s, ra_shm__fifo *f, ra_transport_op *op) {
    op->scratch[0] = NULL;
    op->state = RA_MSG_PENDING;
    if (f->last) f->last->scratch[0] = op;
    else f->first = op;
    f->last = op;
    s->pending++;
}

static void ra_shm__pop(ra_shm *s, ra_shm__fifo *f, int32_t state, size_t done) {
    ra_transport_op *op = f->first;
    f->first = (ra_transport_op *)op->scratch[0];
    if (!f->first) f->last = NULL;
    s->pending--;
    op->done = done;
    op->state = state;
}

/* Sends the first op of a FIFO; 0: the queue or the slots are full. */
static int ra_shm__send(ra_shm *s, ra_shm__fifo *f, int channel) {
    ra_transport_op *op = f->first;
    int to = op->peer, owner, i;
    ra_shm__lane *lane = ra_shm__lane_of(s, s->rank, to, channel);
    uint32_t head = ra_shm__load(&lane->head.v);
    const uint8_t *from = (const uint8_t *)op->buf;
    ra_shm__entry *e = &lane->entry[head % RA_SHM__QUEUE];
    if (head - ra_shm__load(&lane->tail.v) >= RA_SHM__QUEUE) return 0;
    if (op->len > 0 && from >= s->data && from < s->data + s->data_bytes) {
        e->at = (uint64_t)(from - s->data);
        (void)ra_shm__add(&ra_shm__slot_at(s, e->at, &owner)->refs, 1);
        s->count.forwards++;
    } else {
        i = ra_shm__free_slot(s, lane);
        if (i < 0) return 0;
        e->at = ((uint64_t)(lane - s->lane) * (uint64_t)s->slots + (uint64_t)i) * s->stride;
        if (op->len) memcpy(s->data + e->at, from, op->len);
        ra_shm__store(&lane->slot[i].lent, 0);
        ra_shm__store(&lane->slot[i].refs, 1);
        s->count.copies_in++;
    }
    e->len = op->len;
    e->tag = op->tag;
    ra_shm__store(&lane->head.v, head + 1);
    ra_shm__pop(s, f, RA_MSG_DONE, op->len);
    ra_shm__ring(s, to);
    return 1;
}

/* Ends the first receive of a FIFO; 0: no message has come. */
static int ra_shm__receive(ra_shm *s, ra_shm__fifo *f, int channel) {
    ra_transport_op *op = f->first;
    int from = op->peer;
    ra_shm__lane *lane = ra_shm__lane_of(s, from, s->rank, channel);
    uint32_t tail = ra_shm__load(&lane->tail.v);
    int32_t state = RA_MSG_DONE;
    int lent = 0;
    ra_shm__entry e;
    if (ra_shm__load(&lane->head.v) == tail) return 0;
    e = lane->entry[tail % RA_SHM__QUEUE];
    if (e.at >= s->data_bytes || e.len > s->stride - e.at % s->stride) {
        state = RA_E_PROTO;
    } else if (e.len != op->len) {     /* what fits shows the library why */
        state = RA_E_TRUNC;
        memcpy(op->buf, s->data + e.at, e.len < op->len ? (size_t)e.len : op->len);
    } else if ((op->flags & RA_MSG_LOAN_OK) && e.len && ra_shm__lend(s, lane, e.at)) {
        op->buf = s->data + e.at;
        s->count.loans++;
        lent = 1;
    } else {
        if (e.len) memcpy(op->buf, s->data + e.at, (size_t)e.len);
        s->count.copies_out++;
    }
    if (state != RA_E_PROTO && !lent) ra_shm__drop(s, e.at);
    ra_shm__store(&lane->tail.v, tail + 1);
    ra_shm__pop(s, f, state, (size_t)e.len);
    ra_shm__ring(s, from);
    return 1;
}

/* ========================================================================== other processes */
/* Checks which processes have ended, at most once per millisecond unless `now`. */
static void ra_shm__look(ra_shm *s, int now) {
    int64_t t = ra_now_ns();
    if (!now && t - s->looked_ns < 1000000) return;
    s->looked_ns = t;
    if (poll(s->pidfd, (nfds_t)s->ranks, 0) <= 0) return;
    for (int r = 0; r < s->ranks; r++) {
        if (s->pidfd[r].fd < 0 || !s->pidfd[r].revents) continue;
        close(s->pidfd[r].fd);
        s->pidfd[r].fd = -1;
        s->dead[r] = 1;
        if (ra_shm__load(&s->head->seat[r].state.v) == RA_SHM__LEFT || s->gone) continue;
        s->gone = 1;
        s->text_code = RA_E_PEER;
        snprintf(s->text, sizeof s->text, "the process of rank %d has ended", r);
    }
}

static int ra_shm__is_gone(const ra_shm *s, int rank) {
    return s->dead[rank] || ra_shm__load(&s->head->seat[rank].state.v) == RA_SHM__LEFT;
}

static void ra_shm__drop_ops(ra_shm *s, int32_t state) {
    for (int r = 0; s->pending && r < s->ranks; r++)
        for (int c = 0; c < RA_SHM__CHANNELS; c++) {
            while (s->in[r][c].first) ra_shm__pop(s, &s->in[r][c], state, 0);
            while (s->out[r][c].first) ra_shm__pop(s, &s->out[r][c], state, 0);
        }
}

/* RA_OK, or the failure of the context after an abort, here or elsewhere. */
static int ra_shm__verdict(ra_shm *s) {
    uint32_t abort = ra_shm__load(&s->head->abort.v);
    int code = RA_E_ABORTED, why = -(int)(abort & 255), rank = (int)(abort >> 8) - 1;
    if (!abort) return RA_OK;
    ra_shm__look(s, 1);
    if (s->gone && !ra_shm__load(&s->aborted)) {
        code = RA_E_PEER;
    } else if (!s->gone) {
        s->text_code = code;
        snprintf(s->text, sizeof s->text, "rank %d failed first: %s", rank, ra_status_text(why));
    }
    ra_shm__drop_ops(s, code);
    return code;
}

/* Moves all messages that can move. It checks a peer before its lanes, so what the peer had sent
 * before it ended still arrives. */
static int ra_shm__move(ra_shm *s) {
    int code = ra_shm__verdict(s);
    if (code || !s->pending) return code;
    ra_shm__look(s, 0);
    for (int r = 0; r < s->ranks; r++) {
        int gone = ra_shm__is_gone(s, r);
        for (int c = 0; c < RA_SHM__CHANNELS; c++) {
            ra_shm__fifo *in = &s->in[r][c], *out = &s->out[r][c];
            while (in->first && ra_shm__receive(s, in, c)) {}
            while (in->first && gone) ra_shm__pop(s, in, RA_E_PEER, 0);
            while (out->first && !gone && ra_shm__send(s, out, c)) {}
            while (out->first && gone) ra_shm__pop(s, out, RA_E_PEER, 0);
        }
    }
    return RA_OK;
}

/* ========================================================================== the callbacks */
static int ra_shm__post(void *ctx, ra_transport_op *const *ops, int n) {
    ra_shm *s = (ra_shm *)ctx;
    int code = ra_shm__verdict(s);
    for (int i = 0; i < n; i++) {
        ra_transport_op *op = ops[i];
        int receives = op->kind == RA_MSG_RECV;
        if (op->state != RA_MSG_IDLE) continue;
        if (code) op->state = code;
        else if (op->peer < 0 || op->peer >= s->ranks || op->channel >= RA_SHM__CHANNELS)
            op->state = RA_E_IO;
        else if (op->len > s->slot_bytes) op->done = 0, op->state = RA_E_TRUNC;
        else ra_shm__push(s, receives ? &s->in[op->peer][op->channel]
                                      : &s->out[op->peer][op->channel], op);
    }
    return code ? code : ra_shm__move(s);
}

static int ra_shm__poll(void *ctx, ra_transport_op *const *ops, int n) {
    (void)ops, (void)n;                /* moves all accepted ops, not only these */
    return ra_shm__move((ra_shm *)ctx);
}

/* 1: none of ops is PENDING, or fewer than `before` are. */
static int ra_shm__fewer(ra_transport_op *const *ops, int n, int *before) {
    int pending = 0;
    for (int i = 0; i < n; i++) pending += ops[i]->state == RA_MSG_PENDING;
    if (*before < 0) *before = pending;
    return pending == 0 || pending < *before;
}

static int ra_shm__wait(void *ctx, ra_transport_op *const *ops, int n, int64_t deadline_ns) {
    ra_shm *s = (ra_shm *)ctx;
    uint32_t *bell = &s->head->seat[s->rank].bell.v;
    int code, before = -1;
    if (ra_shm__fewer(ops, n, &before)) return RA_OK;
    for (int round = 0;; round++) {
        uint32_t seen = round < 204 ? 0 : __atomic_fetch_or(bell, 1, __ATOMIC_ACQ_REL) | 1;
        int64_t left;
        code = ra_shm__move(s);
        if (code || ra_shm__fewer(ops, n, &before)) break;
        if (round < 200) {
            ra_shm__pause();
            continue;
        }
        left = deadline_ns ? deadline_ns - ra_now_ns() : INT64_MAX;
        if (left <= 0) break;
        if (round < 204) (void)sched_yield();
        else ra_shm__sleep(s, seen, left < 2000000 ? left : 2000000);
    }
    (void)__atomic_fetch_and(bell, ~1u, __ATOMIC_ACQ_REL);
    return code;
}

static int ra_shm__release(void *ctx, ra_transport_op *op) {
    ra_shm *s = (ra_shm *)ctx;
    const uint8_t *at = (const uint8_t *)op->buf;
    if (at < s->data || at >= s->data + s->data_bytes) return RA_E_STATE;
    ra_shm__drop(s, (uint64_t)(at - s->data));
    return RA_OK;
}

static int ra_shm__abort(void *ctx, int why) {
    ra_shm *s = (ra_shm *)ctx;
    uint32_t zero = 0, word = (uint32_t)(s->rank + 1) << 8 | (uint32_t)(why < 0 ? -why & 255 : 0);
    ra_shm__store(&s->aborted, 1);
    (void)__atomic_compare_exchange_n(&s->head->abort.v, &zero, word, 0, __ATOMIC_ACQ_REL,
                                      __ATOMIC_ACQUIRE);
    for (int r = 0; r < s->ranks; r++) ra_shm__ring(s, r);
    return RA_OK;
}

/* Only calls of this rank use its buffers: once the ops are dropped, none does. */
static int ra_shm__quiesce(void *ctx, int64_t deadline_ns) {
    (void)deadline_ns;
    ra_shm__drop_ops((ra_shm *)ctx, RA_E_ABORTED);
    return RA_OK;
}

static const char *ra_shm__error_text(void *ctx, int code) {
    ra_shm *s = (ra_shm *)ctx;
    return s->text_code == code ? s->text : NULL;
}

/* ========================================================================== meeting
 * Over a socket of packets at an abstract address. Each side asks the kernel which user the other
 * is, before it believes anything. A rank sends a hello. Rank 0 answers with the file, or with a
 * refusal. The rank checks the file, maps it and reports. When all have, rank 0 sends to one rank
 * after another a pidfd of every process, which it opened while the process was connected. When all
 * have reported these too, it tells them to go on. What went wrong, at rank 0 or in a report, it
 * tells to all, and for two seconds to those who come later. */
typedef struct ra_shm__hello {
    uint32_t magic, version, abi, head_bytes;
    int32_t rank, ranks, slots, reserved;
    uint64_t slot_bytes;
} ra_shm__hello;

typedef struct ra_shm__note { int32_t status; char text[RA_TEXT_BYTES]; } ra_shm__note;

typedef struct ra_shm__who { int32_t pid; uint32_t uid, gid; } ra_shm__who;    /* struct ucred */

typedef struct ra_shm__meeting {       /* rank 0's */
    struct pollfd fd[2 * RA_SHM_MAX_RANKS];      /* the listener; by rank, who has said hello; from
                                        * `ranks` on who has not. -1: none */
    int32_t pid[2 * RA_SHM_MAX_RANKS];
    int64_t came_ns[2 * RA_SHM_MAX_RANKS];       /* of who has said nothing */
    uint8_t mapped[RA_SHM_MAX_RANKS];  /* 1: the rank has reported that */
    char last[RA_TEXT_BYTES];          /* why the last one was refused */
} ra_shm__meeting;

__attribute__((format(printf, 4, 5)))
static ra_status ra_shm__refuse(const ra_shm_desc *d, ra_status status, const char *field,
                                const char *format, ...) {
    va_list args;
    d->error->status = status;
    snprintf(d->error->field, sizeof d->error->field, "%s", field);
    va_start(args, format);
    vsnprintf(d->error->text, sizeof d->error->text, format, args);
    va_end(args);
    return status;
}

/* The limit of this process, which also holds for all descriptors that its user has in flight. */
static unsigned long long ra_shm__most_files(void) {
    struct rlimit most;
    return getrlimit(RLIMIT_NOFILE, &most) ? 0 : (unsigned long long)most.rlim_cur;
}

/* How many files are open on this rank while ranks meet, besides those of the program. */
static int ra_shm__files(const ra_shm_desc *d) { return (d->rank ? 1 : 2) * d->ranks + 2; }

static ra_status ra_shm__refuse_errno(const ra_shm_desc *d, const char *what, int number) {
    if (number != EMFILE && number != ETOOMANYREFS)
        return ra_shm__refuse(d, RA_E_IO, "system", "%s failed: %s", what, strerror(number));
    return ra_shm__refuse(d, RA_E_IO, "system", "%s failed: %s. The limit of this process is %llu "
                          "(ulimit -n), and rank %d of %d needs %d", what, strerror(number),
                          ra_shm__most_files(), d->rank, d->ranks, ra_shm__files(d));
}

static ra_status ra_shm__went(const ra_shm_desc *d, int rank, int pid) {
    return ra_shm__refuse(d, RA_E_PEER, "ranks", "rank %d (process %d) went away while the ring "
                          "was set up", rank, pid);
}

static socklen_t ra_shm__address(const ra_shm_desc *d, struct sockaddr_un *a) {
    int n;
    memset(a, 0, sizeof *a);
    a->sun_family = AF_UNIX;           /* sun_path[0] is 0: abstract, no file */
    n = snprintf(a->sun_path + 1, sizeof a->sun_path - 1, "ra_shm.%u.%s", (unsigned)geteuid(),
                 d->name);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n);
}

/* 1: whoever is at the other end runs as this user. */
static int ra_shm__is_mine(int c, ra_shm__who *who) {
    socklen_t size = sizeof *who;
    return !getsockopt(c, SOL_SOCKET, SO_PEERCRED, who, &size) && who->uid == geteuid();
}

/* Connects to whoever has the name. -1 and errno: nobody has it, or EAGAIN: within 20 ms there was
 * no place in the queue of who has it. */
static int ra_shm__call(const ra_shm_desc *d) {
    struct timeval most;
    struct sockaddr_un a;
    socklen_t length = ra_shm__address(d, &a);
    int c = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0), number;
    if (c < 0) return -1;
    most.tv_sec = 0;
    most.tv_usec = 20000;
    if (!setsockopt(c, SOL_SOCKET, SO_SNDTIMEO, &most, sizeof most) &&
        !connect(c, (struct sockaddr *)(void *)&a, length)) return c;
    number = errno;
    close(c);
    errno = number;
    return -1;
}

/* Sends a packet with file descriptors. While too many of this user are in flight, it waits for
 * others to receive theirs. */
static int ra_shm__give(int to, const void *packet, size_t bytes, const int *fds, int count,
                        int64_t deadline_ns) {
    union { struct cmsghdr align; char room[CMSG_SPACE(sizeof(int) * RA_SHM_MAX_RANKS)]; } c;
    struct msghdr m;
    struct iovec v;
    memset(&m, 0, sizeof m);
    memset(&c, 0, sizeof c);
    memcpy(&v.iov_base, &packet, sizeof packet);
    v.iov_len = bytes;
    m.msg_iov = &v;
    m.msg_iovlen = 1;
    if (count) {
        size_t length = sizeof(int) * (size_t)count;
        m.msg_control = &c;
        m.msg_controllen = CMSG_SPACE(length);
        c.align.cmsg_level = SOL_SOCKET;
        c.align.cmsg_type = SCM_RIGHTS;
        c.align.cmsg_len = CMSG_LEN(length);
        memcpy(CMSG_DATA(&c.align), fds, length);
    }
    while (sendmsg(to, &m, MSG_NOSIGNAL | MSG_DONTWAIT) != (ssize_t)bytes) {
        if (errno != ETOOMANYREFS || ra_now_ns() > deadline_ns) return -1;
        ra_shm__nap(1000000);
    }
    return 0;
}

/* Receives a note, which another version may make shorter or longer, and up to `most` descriptors.
 * Returns how many came; -1: the other side has ended, -2: the deadline has passed. */
static int ra_shm__take(int from, ra_shm__note *note, int *fds, int most, int64_t deadline_ns) {
    union { struct cmsghdr align; char room[CMSG_SPACE(sizeof(int) * RA_SHM_MAX_RANKS)]; } c;
    struct pollfd p;
    struct msghdr m;
    struct iovec v;
    ssize_t got;
    int count = 0;
    p.fd = from;
    p.events = POLLIN;
    for (;;) {
        int64_t left = (deadline_ns - ra_now_ns()) / 1000000 + 1;
        if (left <= 0) return -2;
        if (poll(&p, 1, left > 1000 ? 1000 : (int)left) > 0) break;
    }
    memset(&m, 0, sizeof m);
    v.iov_base = note;
    v.iov_len = sizeof *note;
    m.msg_iov = &v;
    m.msg_iovlen = 1;
    m.msg_control = most ? &c : NULL;
    m.msg_controllen = most ? CMSG_LEN(sizeof(int) * (size_t)most) : 0;
    got = recvmsg(from, &m, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    if (got < 0 && errno == ECONNRESET)          /* the other side has ended; its last words: */
        got = recvmsg(from, &m, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    if (got >= 0 && m.msg_controllen >= CMSG_LEN(0) && c.align.cmsg_type == SCM_RIGHTS) {
        count = (int)((c.align.cmsg_len - CMSG_LEN(0)) / sizeof(int));
        memcpy(fds, CMSG_DATA(&c.align), sizeof(int) * (size_t)count);
    }
    if (got > (ssize_t)sizeof note->status) {
        note->text[got - (ssize_t)sizeof note->status - 1] = 0;
        return count;
    }
    for (; count > 0; fds[count] = -1) close(fds[--count]);
    return -1;
}

/* Maps the file, which nobody can shorten: an access ends with SIGBUS only if the system has no
 * memory for its page. */
static ra_status ra_shm__map(ra_shm *s, const ra_shm_desc *d, int file) {
    const int seals = fcntl(file, RA_SHM__GET_SEALS);
    struct stat f;
    void *at;
    if (fstat(file, &f) || (size_t)f.st_size != s->total || seals < 0 ||
        (seals & RA_SHM__SEALS) != RA_SHM__SEALS)
        return ra_shm__refuse(d, RA_E_PROTO, "file", "what rank 0 sent is not a sealed file of "
                              "%llu bytes", (unsigned long long)s->total);
    at = mmap(NULL, s->total, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (at == MAP_FAILED) return ra_shm__refuse_errno(d, "mmap of the shared file", errno);
    s->head = (ra_shm__head *)at;
    s->lane = (ra_shm__lane *)(void *)((uint8_t *)at + sizeof(ra_shm__head));
    s->data = (uint8_t *)at + (s->total - s->data_bytes);
    ra_shm__store(&s->head->seat[s->rank].state.v, RA_SHM__HERE);
    return RA_OK;
}

/* -------------------------------------------------------------------------- rank 0 */
/* Why a hello is refused; an empty text: it is not. */
static void ra_shm__judge(const ra_shm *s, const ra_shm__hello *h, const ra_shm__meeting *m,
                          char *text, size_t room) {
    text[0] = 0;
    if (h->magic != RA_SHM__MAGIC || h->version != RA_SHM__VERSION ||
        h->abi != RA_TRANSPORT_ABI || h->head_bytes != sizeof(ra_shm__head))
        snprintf(text, room, "another version of ra_shm.h or ringattn.h than rank 0 has");
    else if (h->ranks != s->ranks)
        snprintf(text, room, "ranks is %d here, but %d at rank 0", h->ranks, s->ranks);
    else if (h->slot_bytes != s->slot_bytes)
        snprintf(text, room, "slot_bytes is %llu here, but %llu at rank 0",
                 (unsigned long long)h->slot_bytes, (unsigned long long)s->slot_bytes);
    else if (h->slots != s->slots)
        snprintf(text, room, "slots is %d here, but %d at rank 0", h->slots, s->slots);
    else if (h->rank < 1 || h->rank >= s->ranks)
        snprintf(text, room, "rank is %d, but ranks is %d", h->rank, s->ranks);
    else if (m->fd[h->rank].fd >= 0)
        snprintf(text, room, "rank %d has come already, as process %d", h->rank, m->pid[h->rank]);
}

static int ra_shm__pidfd(int pid) { return (int)syscall(434 /* pidfd_open */, pid, 0); }

/* A free place for a caller, or that of the oldest which has said nothing. A rank calls again. */
static int ra_shm__place(const ra_shm_desc *d, ra_shm__meeting *m) {
    int best = d->ranks;
    char byte;
    for (int i = d->ranks; i < 2 * d->ranks; i++) {
        if (m->fd[i].fd < 0) return i;
        if (recv(m->fd[i].fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT) > 0) m->came_ns[i] = INT64_MAX;
        if (m->came_ns[i] < m->came_ns[best]) best = i;
    }
    return best;
}

/* Accepts connections of this user. 0, or an errno: none can be accepted at the moment. */
static int ra_shm__accept(const ra_shm_desc *d, ra_shm__meeting *m) {
    for (int n = 0; n < 64; n++) {
        ra_shm__who who;
        int c = (int)syscall(SYS_accept4, m->fd[0].fd, NULL, NULL, SOCK_CLOEXEC), i;
        if (c < 0) return errno == EAGAIN || errno == EINTR || errno == ECONNABORTED ? 0 : errno;
        if (!ra_shm__is_mine(c, &who)) {
            if (!m->last[0])
                snprintf(m->last, sizeof m->last, "process %d of user %u", who.pid, who.uid);
            close(c);
            continue;
        }
        i = ra_shm__place(d, m);
        if (m->fd[i].fd >= 0) close(m->fd[i].fd);
        m->fd[i].fd = c;
        m->came_ns[i] = ra_now_ns();
        m->pid[i] = who.pid;
    }
    return 0;
}

/* Connection i says which rank it is: it is sent the file, or refused. */
static ra_status ra_shm__admit(ra_shm *s, const ra_shm_desc *d, ra_shm__meeting *m, int i,
                               int file) {
    const int c = m->fd[i].fd, pid = m->pid[i];
    ra_shm__note note;
    ra_shm__hello h;
    memset(&note, 0, sizeof note);
    memset(&h, 0, sizeof h);
    m->fd[i].fd = -1;
    if (recv(c, &h, sizeof h, MSG_DONTWAIT) <= 0) {
        close(c);
        return RA_OK;
    }
    ra_shm__judge(s, &h, m, note.text, sizeof note.text);
    if (note.text[0]) {
        note.status = RA_E_SHAPE;
        memcpy(m->last, note.text, sizeof m->last);
        (void)ra_shm__give(c, &note, sizeof note, NULL, 0, 0);
        close(c);
        return RA_OK;
    }
    m->fd[h.rank].fd = c;
    m->pid[h.rank] = pid;
    if (pid <= 0)
        return ra_shm__refuse(d, RA_E_PEER, "ranks", "rank %d is in a pid name space that rank 0 "
                              "cannot see", h.rank);
    s->pidfd[h.rank].fd = ra_shm__pidfd(pid);
    if (s->pidfd[h.rank].fd < 0) return ra_shm__refuse_errno(d, "pidfd_open", errno);
    if (!ra_shm__give(c, &note, sizeof note, &file, 1, d->deadline_ns)) return RA_OK;
    return errno == ETOOMANYREFS ? ra_shm__refuse_errno(d, "sendmsg", errno)
                                 : ra_shm__went(d, h.rank, pid);
}

/* Hears the report of a rank. */
static ra_status ra_shm__hear(const ra_shm_desc *d, ra_shm__meeting *m, int rank) {
    ra_shm__note note;
    int got = ra_shm__take(m->fd[rank].fd, &note, NULL, 0, d->deadline_ns);
    if (got == -2)
        return ra_shm__refuse(d, RA_E_TIMEOUT, "deadline_ns", "rank %d (process %d) has come, but "
                              "does not answer", rank, m->pid[rank]);
    if (got < 0) return ra_shm__went(d, rank, m->pid[rank]);
    if (note.status)
        return ra_shm__refuse(d, note.status, "ranks", "rank %d: %.600s", rank, note.text);
    m->mapped[rank] = 1;
    return RA_OK;
}

/* Waits until all other ranks have mapped the file. */
static ra_status ra_shm__gather(ra_shm *s, const ra_shm_desc *d, ra_shm__meeting *m, int file) {
    ra_status status = RA_OK;
    int missing = 1, number;
    while (!status && missing < s->ranks) {
        int64_t left = (d->deadline_ns - ra_now_ns()) / 1000000 + 1;
        if (m->mapped[missing]) {
            missing++;
            continue;
        }
        if (left <= 0 && m->fd[missing].fd >= 0) return ra_shm__hear(d, m, missing);
        if (left <= 0)
            return ra_shm__refuse(d, RA_E_TIMEOUT, "deadline_ns", "rank %d has not come by the "
                                  "deadline%s%.500s", missing,
                                  m->last[0] ? "; refused was: " : "", m->last);
        if (poll(m->fd, 2 * (nfds_t)s->ranks, left > 1000 ? 1000 : (int)left) <= 0) continue;
        for (int i = 1; i < 2 * s->ranks && !status; i++) {
            if (m->fd[i].fd < 0 || !m->fd[i].revents) continue;
            status = i < s->ranks ? ra_shm__hear(d, m, i) : ra_shm__admit(s, d, m, i, file);
        }
        number = !status && m->fd[0].revents ? ra_shm__accept(d, m) : 0;
        if (number) status = ra_shm__refuse_errno(d, "accept", number);
    }
    return status;
}

/* Sends all pidfds to each rank, one after another: else ranks * ranks would be in flight. */
static ra_status ra_shm__share(ra_shm *s, const ra_shm_desc *d, ra_shm__meeting *m) {
    int fds[RA_SHM_MAX_RANKS];
    ra_status status = RA_OK;
    ra_shm__note note;
    memset(&note, 0, sizeof note);
    for (int r = 0; r < s->ranks; r++) fds[r] = s->pidfd[r].fd;
    for (int r = 1; r < s->ranks && !status; r++) {
        if (ra_shm__give(m->fd[r].fd, &note, sizeof note, fds, s->ranks, d->deadline_ns))
            return errno == ETOOMANYREFS ? ra_shm__refuse_errno(d, "sendmsg", errno)
                                         : ra_shm__went(d, r, m->pid[r]);
        status = ra_shm__hear(d, m, r);
    }
    return status;
}

static ra_status ra_shm__listen(const ra_shm_desc *d, ra_shm__meeting *m) {
    struct sockaddr_un a;
    socklen_t length = ra_shm__address(d, &a);
    ra_shm__who who;
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0), number, c;
    if (fd < 0) return ra_shm__refuse_errno(d, "socket", errno);
    if (!bind(fd, (struct sockaddr *)(void *)&a, length) && !listen(fd, SOMAXCONN)) {
        m->fd[0].fd = fd;
        return RA_OK;
    }
    number = errno;
    close(fd);
    if (number != EADDRINUSE) return ra_shm__refuse_errno(d, "bind", number);
    memset(&who, 0, sizeof who);
    c = ra_shm__call(d);
    if (c >= 0) (void)ra_shm__is_mine(c, &who);
    if (c >= 0) close(c);
    else return ra_shm__refuse(d, RA_E_BUSY, "name", "another process has this name");
    return ra_shm__refuse(d, RA_E_BUSY, "name", "process %d of user %u has this name: another ring "
                          "of this name is being set up at this moment", who.pid, who.uid);
}

/* Creates the file. A limit is refused before it is met, which would raise SIGXFSZ. */
static ra_status ra_shm__create(ra_shm *s, const ra_shm_desc *d, int *file) {
    struct rlimit most;
    if (s->ranks > 1 && ra_shm__most_files() < (unsigned long long)ra_shm__files(d))
        return ra_shm__refuse_errno(d, "meeting", EMFILE);
    if (!getrlimit(RLIMIT_FSIZE, &most) && most.rlim_cur < s->total)
        return ra_shm__refuse(d, RA_E_IO, "system", "the shared file has %llu bytes, but the limit "
                              "of this process is %llu (ulimit -f)", (unsigned long long)s->total,
                              (unsigned long long)most.rlim_cur);
    *file = (int)syscall(SYS_memfd_create, "ra_shm", 11u /* CLOEXEC, ALLOW_SEALING, NOEXEC_SEAL */);
    if (*file < 0 && errno == EINVAL)  /* before Linux 6.3 */
        *file = (int)syscall(SYS_memfd_create, "ra_shm", 3u);
    if (*file < 0) return ra_shm__refuse_errno(d, "memfd_create", errno);
    if (ftruncate(*file, (off_t)s->total))
        return ra_shm__refuse_errno(d, "ftruncate of the shared file", errno);
    if (fcntl(*file, RA_SHM__ADD_SEALS, RA_SHM__SEALS))
        return ra_shm__refuse_errno(d, "sealing the shared file", errno);
    return ra_shm__map(s, d, *file);
}

/* Tells those who have come how the meeting has ended, and after a failure those who come within
 * two seconds. */
static void ra_shm__dismiss(const ra_shm_desc *d, ra_shm__meeting *m, ra_status status) {
    int64_t until = ra_deadline_ms(2000);
    ra_shm__note note;
    int told = 1;
    char hello;
    memset(&note, 0, sizeof note);
    note.status = status;
    if (status) snprintf(note.text, sizeof note.text, "rank 0: %.600s", d->error->text);
    else close(m->fd[0].fd);           /* the name is free before anybody goes on */
    for (;;) {
        for (int i = 1; i < 2 * d->ranks; i++) {
            if (m->fd[i].fd < 0) continue;
            if (i >= d->ranks && !status) {
                note.status = RA_E_SHAPE;
                snprintf(note.text, sizeof note.text, "all ranks have come already");
            }
            (void)ra_shm__give(m->fd[i].fd, &note, sizeof note, NULL, 0, 0);
            told += i < d->ranks || recv(m->fd[i].fd, &hello, 1, MSG_DONTWAIT) > 0;
            close(m->fd[i].fd);
            m->fd[i].fd = -1;
        }
        if (!status) return;
        if (told >= d->ranks || ra_now_ns() >= (until < d->deadline_ns ? until : d->deadline_ns))
            break;
        if (poll(m->fd, 1, 10) > 0 && ra_shm__accept(d, m) && m->fd[d->ranks].fd < 0) break;
    }
    close(m->fd[0].fd);
}

/* Rank 0: creates the file and waits for the others. */
static ra_status ra_shm__host(ra_shm *s, const ra_shm_desc *d) {
    int file = -1;
    ra_shm__meeting m;
    ra_status status = RA_OK;
    memset(&m, 0, sizeof m);
    for (int i = 0; i < 2 * s->ranks; i++) {
        m.fd[i].fd = -1;
        m.fd[i].events = POLLIN;
    }
    if (s->ranks > 1) status = ra_shm__listen(d, &m);
    if (!status) status = ra_shm__create(s, d, &file);
    if (!status && s->ranks > 1) {
        s->pidfd[0].fd = ra_shm__pidfd((int)getpid());
        if (s->pidfd[0].fd < 0) status = ra_shm__refuse_errno(d, "pidfd_open", errno);
        if (!status) status = ra_shm__gather(s, d, &m, file);
        if (!status) status = ra_shm__share(s, d, &m);
    }
    if (file >= 0) close(file);
    if (m.fd[0].fd >= 0) ra_shm__dismiss(d, &m, status);
    return status;
}

/* -------------------------------------------------------------------------- the other ranks */
/* What a note of rank 0 means, with which `got` of `want` descriptors came; RA_OK: go on. */
static ra_status ra_shm__heard(const ra_shm_desc *d, const ra_shm__who *who, int got, int want,
                               const ra_shm__note *note) {
    if (got == -2)
        return ra_shm__refuse(d, RA_E_TIMEOUT, "deadline_ns", "not all ranks have come by the "
                              "deadline, or rank 0 (process %d) is stopped", who->pid);
    if (got == -1) return ra_shm__went(d, 0, who->pid);
    if (note->status)
        return ra_shm__refuse(d, note->status, note->status == RA_E_SHAPE ? "hello" : "ranks",
                              "%s", note->text);
    return got == want ? RA_OK : ra_shm__refuse_errno(d, "receiving descriptors", EMFILE);
}

/* Connects to rank 0, and waits for it until the deadline. */
static ra_status ra_shm__connect(const ra_shm_desc *d, int *c, ra_shm__who *who) {
    while ((*c = ra_shm__call(d)) < 0) {
        int number = errno;
        if (number != ECONNREFUSED && number != EINTR && number != EAGAIN)
            return ra_shm__refuse_errno(d, "connect", number);
        if (ra_now_ns() > d->deadline_ns && number == EAGAIN)
            return ra_shm__refuse(d, RA_E_TIMEOUT, "deadline_ns", "a process that takes no "
                                  "connection has this name (ss -xlp shows it): is it stopped?");
        if (ra_now_ns() > d->deadline_ns)
            return ra_shm__refuse(d, RA_E_TIMEOUT, "deadline_ns", "rank 0 has not opened a ring of "
                                  "this name by the deadline: %s", d->name);
        if (number == ECONNREFUSED) ra_shm__nap(2000000);
    }
    if (ra_shm__is_mine(*c, who)) return RA_OK;
    close(*c);
    return ra_shm__refuse(d, RA_E_BUSY, "name", "process %d of user %u has this name, and this is "
                          "user %u", who->pid, who->uid, (unsigned)geteuid());
}

static void ra_shm__report(const ra_shm_desc *d, int c, ra_status status) {
    ra_shm__note note;
    memset(&note, 0, sizeof note);
    note.status = status;
    if (status) snprintf(note.text, sizeof note.text, "%s", d->error->text);
    (void)ra_shm__give(c, &note, sizeof note, NULL, 0, 0);
}

static ra_status ra_shm__join(ra_shm *s, const ra_shm_desc *d) {
    const int64_t some = 80000000;     /* later than rank 0, so that it can say who is missing */
    const int64_t late = d->deadline_ns > INT64_MAX - some ? INT64_MAX : d->deadline_ns + some;
    int fds[RA_SHM_MAX_RANKS], c = -1, file = -1, got, pid;
    ra_shm_desc once = *d;             /* a deadline of 0: tries once */
    ra_shm__note note;
    ra_shm__hello h;
    ra_shm__who who;
    ra_status status = ra_shm__connect(d, &c, &who);
    if (status) return status;
    once.deadline_ns = 0;
    memset(&h, 0, sizeof h);
    h.magic = RA_SHM__MAGIC;
    h.version = RA_SHM__VERSION;
    h.abi = RA_TRANSPORT_ABI;
    h.head_bytes = (uint32_t)sizeof(ra_shm__head);
    h.rank = s->rank;
    h.ranks = s->ranks;
    h.slots = s->slots;
    h.slot_bytes = s->slot_bytes;
    for (;;) {
        (void)ra_shm__give(c, &h, sizeof h, NULL, 0, 0);
        got = ra_shm__take(c, &note, &file, 1, late);
        if (got != -1) break;
        close(c);                      /* rank 0 has ended, or it needed the place */
        pid = who.pid;
        ra_shm__nap(1000000);
        if (ra_shm__connect(&once, &c, &who)) return ra_shm__went(d, 0, pid);
    }
    status = ra_shm__heard(d, &who, got, 1, &note);
    if (!status) status = ra_shm__map(s, d, file);
    if (file >= 0) close(file);
    if (got >= 0) ra_shm__report(d, c, status);
    if (!status) {
        got = ra_shm__take(c, &note, fds, s->ranks, late);
        for (int r = 0; r < got; r++) s->pidfd[r].fd = fds[r];
        status = ra_shm__heard(d, &who, got, s->ranks, &note);
        if (got >= 0) ra_shm__report(d, c, status);
    }
    if (!status)
        status = ra_shm__heard(d, &who, ra_shm__take(c, &note, NULL, 0, late), 0, &note);
    close(c);
    return status;
}

static ra_status ra_shm__check(const ra_shm_desc *d) {
    size_t length = d->name ? strlen(d->name) : 0;
    if (length < 1 || length > 64)
        return ra_shm__refuse(d, RA_E_RANGE, "name", "must have 1 to 64 characters");
    if (d->ranks < 1 || d->ranks > RA_SHM_MAX_RANKS)
        return ra_shm__refuse(d, RA_E_RANGE, "ranks", "must be 1 to 128");
    if (d->rank < 0 || d->rank >= d->ranks)
        return ra_shm__refuse(d, RA_E_RANGE, "rank", "must be 0 to ranks - 1");
    if (d->slots && (d->slots < 2 || d->slots > RA_SHM__SLOTS))
        return ra_shm__refuse(d, RA_E_RANGE, "slots", "must be 0 (8) or 2 to 16");
    if (d->slot_bytes < 1 || d->slot_bytes > (size_t)1 << 36)
        return ra_shm__refuse(d, d->slot_bytes ? RA_E_RANGE : RA_E_UNSET, "slot_bytes",
                              "must be the bytes of the largest message, up to 64 GiB");
    return RA_OK;
}

static void ra_shm__fill(ra_shm *s) {
    ra_transport *t = &s->tp;
    t->size = (uint32_t)sizeof *t;
    t->abi = RA_TRANSPORT_ABI;
    t->caps = RA_CAP_ANY_THREAD | RA_CAP_ANY_PEER | RA_CAP_LOAN | RA_CAP_DEADLINE;
    t->channels = RA_SHM__CHANNELS;
    t->tag_bits = 64;
    t->max_ops = 64;
    t->rank = s->rank;
    t->ranks = s->ranks;
    t->max_msg = s->slot_bytes;
    t->align = 64;
    t->name = "shared memory";
    t->ctx = s;
    t->turn = &s->turn;
    t->post = ra_shm__post;
    t->poll = ra_shm__poll;
    t->wait = ra_shm__wait;
    t->release = ra_shm__release;
    t->abort = ra_shm__abort;
    t->quiesce = ra_shm__quiesce;
    t->error_text = ra_shm__error_text;
}

/* ========================================================================== what you call */
/* Call it after the rings on it; null is fine. Peers that wait for this rank get RA_E_PEER. */
RA_SHM_API void ra_shm_close(ra_shm *shm) {
    if (!shm) return;
    for (int r = 0; r < shm->ranks; r++)
        if (shm->pidfd[r].fd >= 0) close(shm->pidfd[r].fd);
    if (shm->head && shm->pid == getpid()) {
        ra_shm__store(&shm->head->seat[shm->rank].state.v, RA_SHM__LEFT);
        for (int r = 0; r < shm->ranks; r++)
            if (r != shm->rank) ra_shm__ring(shm, r);
    }
    if (shm->head) (void)munmap(shm->head, shm->total);
    free(shm);
}

/* Collective: returns when all ranks have come, or refuses at the deadline and fills d->error. A
 * rank whose values differ from those of rank 0 is refused; rank 0 goes on waiting. */
RA_SHM_API ra_status ra_shm_open(ra_shm **out, const ra_shm_desc *d) {
    ra_shm_desc full;
    ra_status status;
    ra_shm *s;
    size_t lanes, head;
    ra_error unheard;
    if (!out || !d) return RA_E_NULL;
    *out = NULL;
    full = *d;
    if (!full.error) full.error = &unheard;
    if (!full.slots) full.slots = 8;
    if (!full.deadline_ns) full.deadline_ns = ra_deadline_ms(60000);
    status = ra_shm__check(&full);
    if (status) return status;
    s = (ra_shm *)calloc(1, sizeof *s);
    if (!s) return ra_shm__refuse(&full, RA_E_NOMEM, "memory", "malloc returned null");
    s->pid = getpid();
    s->rank = full.rank;
    s->ranks = full.ranks;
    s->slots = full.slots;
    s->slot_bytes = full.slot_bytes;
    s->stride = (full.slot_bytes + 4095) / 4096 * 4096;
    lanes = (size_t)s->ranks * (size_t)s->ranks * RA_SHM__CHANNELS;
    head = (sizeof(ra_shm__head) + lanes * sizeof(ra_shm__lane) + 4095) / 4096 * 4096;
    s->data_bytes = lanes * (size_t)s->slots * s->stride;
    s->total = head + s->data_bytes;
    for (int r = 0; r < s->ranks; r++) {
        s->pidfd[r].fd = -1;
        s->pidfd[r].events = POLLIN;
    }
    ra_shm__fill(s);
    status = s->rank ? ra_shm__join(s, &full) : ra_shm__host(s, &full);
    if (status) {
        ra_shm_close(s);
        return status;
    }
    if (s->pidfd[s->rank].fd >= 0) {   /* of this rank itself */
        close(s->pidfd[s->rank].fd);
        s->pidfd[s->rank].fd = -1;
    }
    *out = s;
    return RA_OK;
}

/* Valid as long as shm. */
RA_SHM_API const ra_transport *ra_shm_transport(const ra_shm *shm) { return &shm->tp; }

RA_SHM_API ra_shm_counters ra_shm_query(const ra_shm *shm) { return shm->count; }

/* The largest message of all ranks of a plan; 0: an argument is wrong. */
RA_SHM_API size_t ra_shm_slot_bytes(const ra_plan *plan, int32_t ranks) {
    int64_t most = 0;
    for (int32_t r = 0; r < ranks; r++) {
        ra_plan_report report;
        if (ra_plan_query(plan, r, &report)) return 0;
        if (report.forward.chunk_bytes > most) most = report.forward.chunk_bytes;
        if (report.backward.chunk_bytes > most) most = report.backward.chunk_bytes;
    }
    return most > 0 ? (size_t)most : 64;
}

#endif
