/* ra_mpi.h - transports of ringattn.h over MPI: Open MPI, MPICH, or any MPI-3
 *
 * Copy this file beside ringattn.h and compile with your MPI's compiler:
 *
 *   #define RINGATTN_IMPLEMENTATION
 *   #include "ra_mpi.h"               // includes ringattn.h and mpi.h
 *
 *   MPI_Init_thread(&argc, &argv, MPI_THREAD_SERIALIZED, &level);
 *   ra_mpi *mpi; ra_error why;
 *   if (ra_mpi_open(&mpi, MPI_COMM_WORLD, 0, &why)) ...        // collective
 *   ra_ring_create(&ring, plan, ra_mpi_transport(mpi), NULL);
 *   ... ra_forward, ra_backward ...
 *   ra_ring_destroy(ring);
 *   ra_mpi_close(mpi);                                         // collective, but bounded
 *
 *   mpicc -O2 program.c -lpthread -lm && mpirun -n 4 ./a.out
 *
 * examples/ring_mpi.c is a complete program, with rings inside data-parallel groups as well: any
 * communicator will do, and ranks of the ring are ranks of that communicator.
 *
 * Messages. Each op is one MPI_Isend or MPI_Irecv on a duplicate of the communicator, with the
 * channel as MPI's tag (0 or 1). MPI keeps the order of messages per sender and tag, as the
 * contract requires, so the tags of ops are not sent. Ranks with different plans receive each
 * other's frames, which show the library which field differs. Chunks above 2 GiB need the large
 * counts of MPI-4 (MPICH 4); with an older MPI ra_ring_create refuses them.
 *
 * Threads. With MPI_THREAD_SERIALIZED or MULTIPLE any thread may step the ring. Otherwise only the
 * thread that called MPI_Init may, with ith = 0; calls from others are refused. Two rings stepped
 * by two threads at once need MULTIPLE.
 *
 * Failure. The duplicates have MPI_ERRORS_RETURN: an error of MPI fails the ring, not the job. A
 * rank that gives up (mismatch, deadline, ra_ring_cancel) sends all others a goodbye on a second
 * duplicate. They look for it whenever they poll, and their passes end with RA_E_ABORTED. (Without
 * MULTIPLE the next call of poll, quiesce or ra_mpi_close sends it, not abort.) quiesce cancels the
 * receives, and receives and discards what others still send, so that their sends end too. It ends
 * within milliseconds, when all ranks have exchanged the numbers of messages that they sent and
 * each has received them. If a peer does not take part, quiesce gives up after `patience_ns`. If a
 * send of this rank is still pending then, which MPI cannot cancel, it returns RA_E_UNSAFE, and the
 * library leaks the buffers. On a busy machine this happens to some of the ranks while others get
 * RA_OK. So no rank may skip a collective call of MPI because of its own result: the others would
 * wait for it there for ever. And soon after a failure call ra_mpi_close: if a peer was busy, the
 * goodbye may still be in this process, and most MPIs send only during calls. MPI does not report
 * dead peers: mpirun ends the job, or deadlines end the wait. After a failure among live ranks open
 * a new context and go on.
 *
 * Level 0 is at the end: some lines without all of this, which block if a peer fails.
 *
 * SPDX-License-Identifier: MIT OR Unlicense */
#if !defined(RA_MPI_H)
#define RA_MPI_H

#ifndef _POSIX_C_SOURCE
#define _POSIX_C_SOURCE 200809L
#endif
#include "ringattn.h"

#include <limits.h>
#include <mpi.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef struct ra_mpi ra_mpi;
#define RA_MPI_API static __attribute__((unused))

enum { RA_MPI__OPS = 64, RA_MPI__CHANNELS = 2, RA_MPI__COUNTS = 3, RA_MPI__CLOSE_MS = 10000 };
enum { RA_MPI__PATIENCE_MS = 80 };

typedef struct ra_mpi__counts { int n[RA_MPI__COUNTS]; } ra_mpi__counts; /* messages per channel,
                                        * then goodbyes; of one pair of ranks */

struct ra_mpi {
    ra_transport tp;
    int32_t turn;                      /* of tp */
    MPI_Comm data, control;            /* duplicates: messages; goodbyes and counts */
    int rank, ranks, level;            /* level: MPI_THREAD_* */
    int64_t patience_ns;
    int32_t why;                       /* abort was called: RA_E_*; any thread */
    int32_t said;                      /* goodbye: 1 is being said, 2 was said; any thread */
    int32_t heard_why;                 /* of the first goodbye that came; read by any thread */
    int pending;                       /* number of `request` and of `op`, in the same order */
    MPI_Request request[RA_MPI__OPS];
    ra_transport_op *op[RA_MPI__OPS];
    MPI_Request goodbye, *goodbyes;    /* the receive of one; [ranks] the sends */
    int32_t coming[2], going[2];       /* their bytes: why, rank */
    ra_mpi__counts *sent, *due, *got;  /* [ranks] sent by this rank; sent to it; received by it */
    int broken;                        /* 1: MPI_Testsome failed as a whole */
    int parting;                       /* 1: counts are being exchanged, 2: known, 3: done */
    MPI_Request counting, draining;
    void *drain;                       /* buffer of a message that no op receives */
    int drain_from, drain_channel;
    int text_code;
    char text[160];
};

/* ========================================================================== errors and counts */
static int ra_mpi__error(ra_mpi *m, int mpi_code, const char *call) {
    char text[MPI_MAX_ERROR_STRING + 1] = "";
    int length = 0, kind = 0;
    if (mpi_code == MPI_SUCCESS) return RA_OK;
    (void)MPI_Error_class(mpi_code, &kind);
    (void)MPI_Error_string(mpi_code, text, &length);
    m->text_code = kind == MPI_ERR_TRUNCATE ? RA_E_TRUNC : RA_E_IO;
    snprintf(m->text, sizeof m->text, "%s: %.120s", call, text);
    return m->text_code;
}

static int ra_mpi__isend(ra_mpi *m, const ra_transport_op *op, MPI_Request *r) {
#if MPI_VERSION >= 4
    return MPI_Isend_c(op->buf, (MPI_Count)op->len, MPI_BYTE, op->peer, op->channel, m->data, r);
#else
    return MPI_Isend(op->buf, (int)op->len, MPI_BYTE, op->peer, op->channel, m->data, r);
#endif
}

static int ra_mpi__irecv(ra_mpi *m, const ra_transport_op *op, MPI_Request *r) {
#if MPI_VERSION >= 4
    return MPI_Irecv_c(op->buf, (MPI_Count)op->len, MPI_BYTE, op->peer, op->channel, m->data, r);
#else
    return MPI_Irecv(op->buf, (int)op->len, MPI_BYTE, op->peer, op->channel, m->data, r);
#endif
}

static size_t ra_mpi__bytes(const MPI_Status *s) {
#if MPI_VERSION >= 4
    MPI_Count n = 0;
    (void)MPI_Get_count_c(s, MPI_BYTE, &n);
#else
    int n = 0;
    (void)MPI_Get_count(s, MPI_BYTE, &n);
#endif
    return n < 0 ? 0 : (size_t)n;
}

/* ========================================================================== errors of requests
 * MPI_Testsome has no communicator. MPICH raises its errors on MPI_COMM_WORLD, MPI-4 on
 * MPI_COMM_SELF, and by default a message that is too long would end the job there. If the errors
 * of these two are fatal, they get a handler that is fatal too, except while this file calls
 * Testsome. */
static __thread int ra_mpi__inside;
static int ra_mpi__guards;
static int ra_mpi__guarded[2];
static MPI_Errhandler ra_mpi__handler;

static void ra_mpi__on_error(MPI_Comm *comm, int *code, ...) {
    char text[MPI_MAX_ERROR_STRING + 1] = "";
    int length = 0;
    if (ra_mpi__inside) return;
    (void)MPI_Error_string(*code, text, &length);
    fprintf(stderr, "fatal error of MPI: %s\n", text);
    (void)MPI_Abort(*comm, *code);
}

static void ra_mpi__guard(void) {
    MPI_Comm comm[2] = { MPI_COMM_WORLD, MPI_COMM_SELF };
    if (ra_mpi__guards++ > 0) return;
    (void)MPI_Comm_create_errhandler(ra_mpi__on_error, &ra_mpi__handler);
    for (int i = 0; i < 2; i++) {
        MPI_Errhandler now;
        ra_mpi__guarded[i] = !MPI_Comm_get_errhandler(comm[i], &now) &&
                             now == MPI_ERRORS_ARE_FATAL &&
                             !MPI_Comm_set_errhandler(comm[i], ra_mpi__handler);
    }
}

static void ra_mpi__unguard(void) {
    MPI_Comm comm[2] = { MPI_COMM_WORLD, MPI_COMM_SELF };
    if (--ra_mpi__guards > 0) return;
    for (int i = 0; i < 2; i++)
        if (ra_mpi__guarded[i]) (void)MPI_Comm_set_errhandler(comm[i], MPI_ERRORS_ARE_FATAL);
    (void)MPI_Errhandler_free(&ra_mpi__handler);
}

/* ========================================================================== goodbyes */
static void ra_mpi__say_goodbye(ra_mpi *m, int why) {
    int32_t zero = 0;
    if (__atomic_load_n(&m->heard_why, __ATOMIC_ACQUIRE)) return;    /* that one went to all */
    if (!__atomic_compare_exchange_n(&m->said, &zero, 1, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
        return;
    m->going[0] = why;
    m->going[1] = m->rank;
    for (int r = 0; r < m->ranks; r++) {
        if (r == m->rank) continue;
        m->sent[r].n[RA_MPI__CHANNELS] = 1;
        if (MPI_Isend(m->going, 2, MPI_INT32_T, r, 0, m->control, &m->goodbyes[r]))
            m->goodbyes[r] = MPI_REQUEST_NULL;
    }
    __atomic_store_n(&m->said, 2, __ATOMIC_RELEASE);
}

/* After this no goodbye is sent. 0: another thread is sending it. */
static int ra_mpi__said(ra_mpi *m) {
    int32_t zero = 0;
    (void)__atomic_compare_exchange_n(&m->said, &zero, 2, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
    return __atomic_load_n(&m->said, __ATOMIC_ACQUIRE) == 2;
}

/* Receives a goodbye, if one has come; returns its reason, or 0. Drives MPI's progress as well. */
static int ra_mpi__listen(ra_mpi *m) {
    int done = 0, from = m->coming[1];
    if (m->goodbye == MPI_REQUEST_NULL) return m->heard_why;
    if (MPI_Test(&m->goodbye, &done, MPI_STATUS_IGNORE) || !done) return m->heard_why;
    from = m->coming[1];
    m->got[from].n[RA_MPI__CHANNELS]++;
    if (m->heard_why) return m->heard_why;
    __atomic_store_n(&m->heard_why, m->coming[0] < 0 ? m->coming[0] : RA_E_ABORTED,
                     __ATOMIC_RELEASE);
    m->text_code = RA_E_ABORTED;
    snprintf(m->text, sizeof m->text, "rank %d failed first: %s", from,
             ra_status_text(m->heard_why));
    return m->heard_why;
}

/* RA_OK, or the failure of the context. */
static int ra_mpi__verdict(ra_mpi *m) {
    int why = __atomic_load_n(&m->why, __ATOMIC_ACQUIRE), main_thread = 1;
    if (m->level < MPI_THREAD_SERIALIZED) (void)MPI_Is_thread_main(&main_thread);
    if (!main_thread) {
        m->text_code = RA_E_IO;
        snprintf(m->text, sizeof m->text, "called from a thread that MPI was not initialised for: "
                                          "request MPI_THREAD_SERIALIZED");
        return RA_E_IO;
    }
    if (why) {
        ra_mpi__say_goodbye(m, why);
        return RA_E_ABORTED;
    }
    return ra_mpi__listen(m) || m->parting ? RA_E_ABORTED : RA_OK;
}

/* ========================================================================== ops */
static void ra_mpi__done(ra_mpi *m, int i, const MPI_Status *s, int code) {
    ra_transport_op *op = m->op[i];
    int receives = op->kind == RA_MSG_RECV, cancelled = 0;
    size_t bytes = op->len;
    int32_t state = code ? ra_mpi__error(m, code, receives ? "MPI_Irecv" : "MPI_Isend")
                         : RA_MSG_DONE;
    if (receives && !code) (void)MPI_Test_cancelled(s, &cancelled);
    if (cancelled) {
        state = RA_E_ABORTED;
        bytes = 0;
    } else if (receives) {
        m->got[op->peer].n[op->channel]++;
        bytes = code ? 0 : ra_mpi__bytes(s);
        if (!code && bytes != op->len) state = RA_E_TRUNC;
#ifdef OPEN_MPI                        /* it stores what fits, MPICH 4.0 may not */
        if (state == RA_E_TRUNC) bytes = ra_mpi__bytes(s);
#endif
    }
    op->done = bytes;
    op->state = state;
}

/* Ends the ops whose requests have completed. */
static void ra_mpi__test(ra_mpi *m) {
    MPI_Status status[RA_MPI__OPS];
    int index[RA_MPI__OPS], n = 0, left = 0, code, kind = 0;
    if (!m->pending) return;
    ra_mpi__inside = 1;
    code = MPI_Testsome(m->pending, m->request, &n, index, status);
    ra_mpi__inside = 0;
    if (code) (void)MPI_Error_class(code, &kind);
    if (code && kind != MPI_ERR_IN_STATUS) {
        (void)ra_mpi__error(m, code, "MPI_Testsome");
        m->broken = 1;
        return;
    }
    for (int k = 0; n != MPI_UNDEFINED && k < n; k++) {
        ra_mpi__done(m, index[k], &status[k], code ? status[k].MPI_ERROR : MPI_SUCCESS);
        m->op[index[k]] = NULL;
    }
    for (int i = 0; i < m->pending; i++) {
        if (!m->op[i]) continue;
        m->op[left] = m->op[i];
        m->request[left++] = m->request[i];
    }
    m->pending = left;
}

static void ra_mpi__start(ra_mpi *m, ra_transport_op *op) {
    int receives = op->kind == RA_MSG_RECV, i = m->pending, code;
    if (op->peer < 0 || op->peer >= m->ranks || op->channel >= RA_MPI__CHANNELS) {
        op->state = RA_E_IO;
        return;
    }
    if (op->len > m->tp.max_msg) {
        op->state = RA_E_TRUNC;
        return;
    }
    m->op[i] = op;
    op->state = RA_MSG_PENDING;
    code = receives ? ra_mpi__irecv(m, op, &m->request[i]) : ra_mpi__isend(m, op, &m->request[i]);
    if (code) {
        op->state = ra_mpi__error(m, code, receives ? "MPI_Irecv" : "MPI_Isend");
        return;
    }
    if (!receives) m->sent[op->peer].n[op->channel]++;
    m->pending++;
}

/* Receives first, so that messages that come at once have a buffer. */
static int ra_mpi__post(void *ctx, ra_transport_op *const *ops, int n) {
    ra_mpi *m = (ra_mpi *)ctx;
    int code = ra_mpi__verdict(m), left = 0;
    for (int kind = RA_MSG_RECV; kind >= RA_MSG_SEND; kind--)
        for (int i = 0; i < n; i++) {
            if (ops[i]->kind != kind || ops[i]->state != RA_MSG_IDLE) continue;
            if (code) ops[i]->state = code;
            else if (m->pending == RA_MPI__OPS) left++;
            else ra_mpi__start(m, ops[i]);
        }
    return code ? code : left ? RA_AGAIN : RA_OK;
}

/* Tests all accepted ops, not only these. */
static int ra_mpi__poll(void *ctx, ra_transport_op *const *ops, int n) {
    ra_mpi *m = (ra_mpi *)ctx;
    int code = ra_mpi__verdict(m);
    if (!code) ra_mpi__test(m);
    if (m->broken) code = RA_E_IO;
    for (int i = 0; code && i < n; i++) /* quiesce ends their requests */
        if (ops[i]->state == RA_MSG_PENDING) ops[i]->state = code;
    return code;
}

static void ra_mpi__nap(long ns) {
    struct timespec t;
    t.tv_sec = 0;
    t.tv_nsec = ns;
    (void)nanosleep(&t, NULL);
}

/* MPI cannot sleep until a deadline: polls, yields, naps. */
static int ra_mpi__wait(void *ctx, ra_transport_op *const *ops, int n, int64_t deadline_ns) {
    int before = -1;
    for (int round = 0;; round++) {
        int pending = 0, code;
        for (int i = 0; i < n; i++) pending += ops[i]->state == RA_MSG_PENDING;
        if (before < 0) before = pending;
        if (pending == 0 || pending < before) return RA_OK;
        code = ra_mpi__poll(ctx, ops, n);
        if (code) return code;
        if (round < 100) continue;
        if (deadline_ns && ra_now_ns() >= deadline_ns) return RA_OK;
        if (round < 104) (void)sched_yield();
        else ra_mpi__nap(round < 150 ? 20000 : 100000);
    }
}

/* ========================================================================== parting
 * All ranks exchange the numbers of messages that they have sent, and receive those that are still
 * to come. Then no rank has a pending send, and the communicators are empty. */

/* Receives messages that no op waits for, one at a time. */
static void ra_mpi__drain(ra_mpi *m) {
    MPI_Message message;
    MPI_Status s;
    int there = 0;
    size_t bytes;
    if (m->draining != MPI_REQUEST_NULL) {
        if (MPI_Test(&m->draining, &there, MPI_STATUS_IGNORE)) there = 1;
        if (!there) return;
        m->got[m->drain_from].n[m->drain_channel]++;
        free(m->drain);
        m->drain = NULL;
    }
    if (MPI_Improbe(MPI_ANY_SOURCE, MPI_ANY_TAG, m->data, &there, &message, &s) || !there) return;
    bytes = ra_mpi__bytes(&s);
    m->drain_from = s.MPI_SOURCE;
    m->drain_channel = s.MPI_TAG;
    m->drain = malloc(bytes ? bytes : 1);
    if (!m->drain) return;             /* the message is lost: the parting ends by patience_ns */
#if MPI_VERSION >= 4
    (void)MPI_Imrecv_c(m->drain, (MPI_Count)bytes, MPI_BYTE, &message, &m->draining);
#else
    (void)MPI_Imrecv(m->drain, (int)bytes, MPI_BYTE, &message, &m->draining);
#endif
}

/* 1: this rank has received everything that was sent to it. */
static int ra_mpi__all_here(const ra_mpi *m) {
    for (int r = 0; r < m->ranks; r++)
        for (int k = 0; k < RA_MPI__COUNTS; k++)
            if (m->got[r].n[k] < m->due[r].n[k]) return 0;
    return 1;
}

/* Cancels the last receives of a flow first, so that messages keep meeting the earliest one. */
static void ra_mpi__part_begin(ra_mpi *m) {
    for (int i = m->pending; i-- > 0;)
        if (m->op[i]->kind == RA_MSG_RECV) (void)MPI_Cancel(&m->request[i]);
    ra_mpi__test(m);
    m->parting = 1;
    if (MPI_Ialltoall(m->sent, RA_MPI__COUNTS, MPI_INT, m->due, RA_MPI__COUNTS, MPI_INT,
                      m->control, &m->counting))
        m->counting = MPI_REQUEST_NULL;
}

/* A step of the parting; 1: it is done. */
static int ra_mpi__part_step(ra_mpi *m) {
    int done = 0;
    if (!m->parting && !ra_mpi__said(m)) return 0;
    if (!m->parting) ra_mpi__part_begin(m);
    if (m->parting == 3) return 1;
    ra_mpi__test(m);
    ra_mpi__drain(m);
    (void)ra_mpi__listen(m);
    if (m->goodbye == MPI_REQUEST_NULL)  /* several ranks may send one */
        (void)MPI_Irecv(m->coming, 2, MPI_INT32_T, MPI_ANY_SOURCE, 0, m->control, &m->goodbye);
    if (m->parting == 1 && !MPI_Test(&m->counting, &done, MPI_STATUS_IGNORE) && done)
        m->parting = 2;
    if (m->parting < 2 || m->pending || !ra_mpi__all_here(m)) return 0;
    for (int r = 0; r < m->ranks; r++)
        if (MPI_Test(&m->goodbyes[r], &done, MPI_STATUS_IGNORE) || !done) return 0;
    (void)MPI_Cancel(&m->goodbye);
    (void)MPI_Wait(&m->goodbye, MPI_STATUS_IGNORE);
    m->parting = 3;
    return 1;
}

/* Steps until the parting is done (1), or until the time (0). */
static int ra_mpi__part(ra_mpi *m, int64_t until_ns) {
    for (int round = 0; !ra_mpi__part_step(m); round++) {
        if (ra_now_ns() >= until_ns) return 0;
        if (round >= 100) ra_mpi__nap(50000);
    }
    return 1;
}

static int ra_mpi__abort(void *ctx, int why) {
    ra_mpi *m = (ra_mpi *)ctx;
    int32_t zero = 0, value = why < 0 ? why : RA_E_ABORTED;
    (void)__atomic_compare_exchange_n(&m->why, &zero, value, 0, __ATOMIC_ACQ_REL,
                                      __ATOMIC_ACQUIRE);
    if (m->level == MPI_THREAD_MULTIPLE) ra_mpi__say_goodbye(m, value);
    return RA_OK;
}

static int ra_mpi__quiesce(void *ctx, int64_t deadline_ns) {
    ra_mpi *m = (ra_mpi *)ctx;
    int64_t now = ra_now_ns(), until = deadline_ns ? deadline_ns : INT64_MAX;
    int why = __atomic_load_n(&m->why, __ATOMIC_ACQUIRE);
    if (until > now && until - now > m->patience_ns) until = now + m->patience_ns;
    ra_mpi__say_goodbye(m, why ? why : RA_E_ABORTED);
    if (ra_mpi__part(m, until)) return RA_OK;
    return m->pending ? RA_E_UNSAFE : RA_OK;
}

static const char *ra_mpi__error_text(void *ctx, int code) {
    ra_mpi *m = (ra_mpi *)ctx;
    return m->text_code == code ? m->text : NULL;
}

/* ========================================================================== what you call */
static ra_status ra_mpi__refuse(ra_error *e, ra_status status, const char *field,
                                const char *text) {
    if (!e) return status;
    e->status = status;
    snprintf(e->field, sizeof e->field, "%s", field);
    snprintf(e->text, sizeof e->text, "%s", text);
    return status;
}

static void ra_mpi__fill(ra_mpi *m) {
    ra_transport *t = &m->tp;
    t->size = (uint32_t)sizeof *t;
    t->abi = RA_TRANSPORT_ABI;
    t->caps = RA_CAP_ANY_PEER | RA_CAP_DEADLINE;
    if (m->level >= MPI_THREAD_SERIALIZED) t->caps |= RA_CAP_ANY_THREAD;
    t->channels = RA_MPI__CHANNELS;
    t->tag_bits = 64;                  /* they do not travel */
    t->max_ops = RA_MPI__OPS;
    t->rank = m->rank;
    t->ranks = m->ranks;
    t->max_msg = MPI_VERSION >= 4 ? (size_t)1 << 46 : (size_t)INT_MAX;
    t->align = 64;
    t->name = "MPI";
    t->ctx = m;
    t->turn = &m->turn;
    t->post = ra_mpi__post;
    t->poll = ra_mpi__poll;
    t->wait = ra_mpi__wait;
    t->abort = ra_mpi__abort;
    t->quiesce = ra_mpi__quiesce;
    t->error_text = ra_mpi__error_text;
}

static void ra_mpi__free(ra_mpi *m) {
    if (!m) return;
    free(m->sent);
    free(m->due);
    free(m->got);
    free(m->goodbyes);
    free(m);
}

/* Null: there is no memory. */
static ra_mpi *ra_mpi__alloc(int ranks) {
    const size_t n = (size_t)ranks;
    ra_mpi *m = (ra_mpi *)calloc(1, sizeof *m);
    if (!m) return NULL;
    m->ranks = ranks;
    m->sent = (ra_mpi__counts *)calloc(n, sizeof *m->sent);
    m->due = (ra_mpi__counts *)calloc(n, sizeof *m->due);
    m->got = (ra_mpi__counts *)calloc(n, sizeof *m->got);
    m->goodbyes = (MPI_Request *)calloc(n, sizeof *m->goodbyes);
    if (m->sent && m->due && m->got && m->goodbyes) return m;
    ra_mpi__free(m);
    return NULL;
}

/* Collective over comm, which stays yours; no two threads at once here or in ra_mpi_close.
 * patience_ns: see Failure above; 0: 80 ms. error may be null. */
RA_MPI_API ra_status ra_mpi_open(ra_mpi **out, MPI_Comm comm, int64_t patience_ns,
                                 ra_error *error) {
    int there = 0, over = 0, level = 0, ranks = 0, here, all = 0, broken;
    ra_mpi *m;
    if (!out) return RA_E_NULL;
    *out = NULL;
    if (MPI_Initialized(&there) || !there || MPI_Finalized(&over) || over)
        return ra_mpi__refuse(error, RA_E_STATE, "MPI", "MPI is not initialised, or finalised");
    if (comm == MPI_COMM_NULL)
        return ra_mpi__refuse(error, RA_E_NULL, "comm", "is MPI_COMM_NULL");
    (void)MPI_Query_thread(&level);
    (void)MPI_Comm_size(comm, &ranks);
    m = ra_mpi__alloc(ranks);
    here = m != NULL;
    broken = MPI_Allreduce(&here, &all, 1, MPI_INT, MPI_MIN, comm);
    if (broken || !all) {
        ra_mpi__free(m);
        return !here ? ra_mpi__refuse(error, RA_E_NOMEM, "memory", "malloc returned null")
             : broken ? ra_mpi__refuse(error, RA_E_IO, "comm", "MPI_Allreduce failed")
                      : ra_mpi__refuse(error, RA_E_PEER, "comm", "another rank has no memory");
    }
    m->level = level;
    m->patience_ns = patience_ns > 0 ? patience_ns : (int64_t)RA_MPI__PATIENCE_MS * 1000000;
    (void)MPI_Comm_rank(comm, &m->rank);
    for (int r = 0; r < m->ranks; r++) m->goodbyes[r] = MPI_REQUEST_NULL;
    m->counting = m->draining = m->goodbye = MPI_REQUEST_NULL;
    if (MPI_Comm_dup(comm, &m->data) || MPI_Comm_dup(comm, &m->control)) {
        ra_mpi__free(m);
        return ra_mpi__refuse(error, RA_E_IO, "comm", "MPI_Comm_dup failed");
    }
    (void)MPI_Comm_set_errhandler(m->data, MPI_ERRORS_RETURN);
    (void)MPI_Comm_set_errhandler(m->control, MPI_ERRORS_RETURN);
    (void)MPI_Irecv(m->coming, 2, MPI_INT32_T, MPI_ANY_SOURCE, 0, m->control, &m->goodbye);
    ra_mpi__guard();
    ra_mpi__fill(m);
    *out = m;
    return RA_OK;
}

/* Collective; null is fine. Waits up to 10 s for ranks that have called neither this nor quiesce.
 * RA_E_UNSAFE: a rank did not, or is dead. What MPI may still use is leaked, and MPI_Finalize may
 * wait for that rank: call MPI_Abort instead. */
RA_MPI_API ra_status ra_mpi_close(ra_mpi *mpi) {
    int why;
    if (!mpi) return RA_OK;
    why = __atomic_load_n(&mpi->why, __ATOMIC_ACQUIRE);
    if (why) ra_mpi__say_goodbye(mpi, why);
    if (!ra_mpi__part(mpi, ra_deadline_ms(RA_MPI__CLOSE_MS))) return RA_E_UNSAFE;
    (void)MPI_Comm_free(&mpi->data);
    (void)MPI_Comm_free(&mpi->control);
    ra_mpi__free(mpi);
    ra_mpi__unguard();
    return RA_OK;
}

/* Valid as long as mpi. */
RA_MPI_API const ra_transport *ra_mpi_transport(const ra_mpi *mpi) { return &mpi->tp; }

/* ========================================================================== level 0
 * The shortest transport there is, on a communicator of yours (set MPI_ERRORS_RETURN on it). It
 * knows no deadline and no abort: if a peer fails, it blocks. */
static inline int ra_mpi_sendrecv(void *comm, int to, const void *s, size_t s_len, int from,
                                  void *r, size_t r_len, uint64_t tag, int64_t deadline_ns) {
    MPI_Status got;
    int n = 0, kind = 0, code;
    (void)deadline_ns;
    if (s_len > INT_MAX || r_len > INT_MAX) return RA_E_TRUNC;
    code = MPI_Sendrecv(s, (int)s_len, MPI_BYTE, to == RA_NO_PEER ? MPI_PROC_NULL : to, (int)tag,
                        r, (int)r_len, MPI_BYTE, from == RA_NO_PEER ? MPI_PROC_NULL : from,
                        (int)tag, *(MPI_Comm *)comm, &got);
    if (code) (void)MPI_Error_class(code, &kind);
    else (void)MPI_Get_count(&got, MPI_BYTE, &n);
    if (code) return kind == MPI_ERR_TRUNCATE ? RA_E_TRUNC : RA_E_IO;
    return (size_t)n == r_len ? RA_OK : RA_E_TRUNC;
}

RA_MPI_API ra_transport ra_mpi_level0(MPI_Comm *comm) {
    ra_transport t;
    memset(&t, 0, sizeof t);
    t.size = (uint32_t)sizeof t;
    t.abi = RA_TRANSPORT_ABI;
    t.caps = RA_CAP_ANY_PEER;
    t.name = "MPI_Sendrecv";
    t.ctx = comm;
    t.sendrecv = ra_mpi_sendrecv;
    return t;
}

#endif
