/* ra_nccl.h - a transport of ringattn.h over NCCL: ranks with a GPU each
 *
 * Copy this file beside ringattn.h. It needs NCCL 2.22 or later, the CUDA runtime, gcc or clang.
 *
 *   #define RINGATTN_IMPLEMENTATION
 *   #include "ra_nccl.h"              // includes ringattn.h
 *
 *   ra_nccl_desc nd; ra_nccl *nccl; ra_error why;
 *   memset(&nd, 0, sizeof nd);
 *   nd.rank = rank; nd.ranks = 4; nd.device = rank;
 *   nd.message_bytes = ra_nccl_message_bytes(plan, 4);
 *   nd.directory = "/shared/job-4711"; nd.error = &why;
 *   if (ra_nccl_open(&nccl, &nd)) { fprintf(stderr, "%s: %s\n", why.field, why.text); exit(1); }
 *   ra_ring_create(&ring, plan, ra_nccl_transport(nccl), NULL);
 *   ... ra_forward, ra_backward ...
 *   ra_ring_destroy(ring);
 *   ra_nccl_close(nccl);
 *
 *   cc -O2 -I/usr/local/cuda/include program.c -L/usr/local/cuda/lib64 -lnccl -lcudart -pthread -lm
 *
 * examples/ring_nccl.c is a complete program. This file has been compiled and linked with NCCL
 * 2.28; it has not been run, for want of machines with two GPUs.
 *
 * Which memory. The CPU computes attention, so messages begin and end in host memory. A send copies
 * to a staging buffer on the GPU, a receive copies from one, and ra_ring_create pins the ring's
 * memory for these copies. Set direct = 1 if the ring's workspace (ra_ring_desc.workspace) is
 * memory that the GPU can read and write, from cudaMallocManaged or cudaHostAlloc: then nothing is
 * staged. Use this with an engine of yours that computes on the GPU (ra_engine).
 *
 * Communicators. NCCL runs the operations of a communicator one after another, but all messages of
 * a ring have to move at the same time. So each flow (one neighbour, channel and direction) has its
 * own communicator of two ranks and its own stream: eight per rank, or four with two ranks. Within
 * a flow messages follow one another, as the contract requires. Operations of different flows are
 * not grouped, because a group launches nothing until all of it can be launched. When ranks meet, a
 * byte goes through each flow, because NCCL connects at the first operation and waits there for the
 * peer's. Only neighbours are reached: to train set ra_desc.grad_return = RA_RETURN_RING. The
 * communicators are non-blocking. NCCL refuses two ranks on one GPU.
 *
 * Ranks meet by `exchange`, a function of yours that gathers a record from all ranks, like
 * MPI_Allgather; or by `directory`, which all ranks see and which is new for each run.
 *
 * Failure. Errors of NCCL (ncclCommGetAsyncError) fail the context with RA_E_PEER or RA_E_IO. abort
 * only sets a word. The next call starts a thread that ends all communicators by ncclCommAbort,
 * which stops their kernels and may wait for peers. quiesce ends when that thread has ended and the
 * streams are empty; at its deadline it returns RA_E_UNSAFE. NCCL has no goodbye: peers notice a
 * failure if NCCL reports it (ncclRemoteError), otherwise at their deadline. NCCL does not send
 * lengths either: ranks that disagree are refused by `shape` when they meet, or by the frames that
 * the library sends before the first chunk. A context that has failed stays failed: open a new one.
 *
 * SPDX-License-Identifier: MIT OR Unlicense */
#if !defined(RA_NCCL_H)
#define RA_NCCL_H

#ifndef _DEFAULT_SOURCE
#define _DEFAULT_SOURCE 1
#endif
#include "ringattn.h"

#include <cuda_runtime_api.h>
#include <errno.h>
#include <fcntl.h>
#include <nccl.h>
#include <pthread.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* ========================================================================== what you call */
typedef struct ra_nccl ra_nccl;

typedef struct ra_nccl_desc {          /* zero it first; equal on all ranks, except rank, device
                                        * and error */
    int32_t rank, ranks;
    int32_t device;                    /* GPU of this process */
    int32_t direct;                    /* 1: the GPU can use the ring's workspace, see above */
    size_t  message_bytes;             /* required: the largest message */
    uint64_t shape;                    /* a digest of anything else that must be equal, or 0 */
    int (*exchange)(void *ctx, const void *mine, void *all, size_t bytes); /* 0: all[] has the
                                        * `bytes` of every rank, by rank */
    void *exchange_ctx;
    const char *directory;
    int64_t deadline_ns;               /* for all ranks to meet; 0: 60 s from now */
    ra_error *error;                   /* null, or gets the reason of a refusal */
} ra_nccl_desc;

#define RA_NCCL_API static __attribute__((unused))

enum { RA_NCCL__CHANNELS = 2, RA_NCCL__FLOWS = 8, RA_NCCL__OPS = 64, RA_NCCL__MAGIC = 0x6c63634e };

/* IDLE; LAUNCHED: NCCL launches the first op of the flow; RUNS: it is on the stream, before the
 * event. */
enum { RA_NCCL__IDLE, RA_NCCL__LAUNCHED, RA_NCCL__RUNS };
typedef struct ra_nccl__flow {         /* by number: 4 * receives + 2 * side + channel */
    ncclComm_t comm;                   /* sender is rank 0, receiver rank 1; null: no such flow */
    cudaStream_t stream;
    cudaEvent_t event;
    void *staging;                     /* message_bytes on the GPU; null if direct */
    int32_t peer, receives, state;
    ra_transport_op *first, *last;     /* linked by scratch[0] */
} ra_nccl__flow;

typedef struct ra_nccl__record {
    uint32_t magic, abi;
    int32_t rank, ranks;
    uint64_t shape, message_bytes;
    ncclUniqueId id[4];                /* of its flows out, by 2 * side + channel */
} ra_nccl__record;

struct ra_nccl {
    ra_transport tp;
    int32_t turn;                      /* of tp */
    ra_nccl_desc d;
    int32_t rank, ranks, pending;
    int32_t why;                       /* abort was called: RA_E_*; any thread */
    int32_t broken;                    /* an error */
    int32_t ending, over;              /* 1: a thread ends the communicators; 1: it has done so */
    ra_nccl__flow flow[RA_NCCL__FLOWS];
    char path[512];                    /* of its file, "": none */
    int text_code;
    char text[200];
};

/* ========================================================================== small things */
static int ra_nccl__say(ra_nccl *n, int code, const char *format, ...) {
    va_list args;
    n->text_code = code;
    va_start(args, format);
    vsnprintf(n->text, sizeof n->text, format, args);
    va_end(args);
    return code;
}

static int ra_nccl__broke(ra_nccl *n, int code, const char *call, const char *text) {
    if (!n->broken) n->broken = ra_nccl__say(n, code, "%s: %s", call, text);
    return n->broken;
}

static int ra_nccl__nccl(ra_nccl *n, ncclResult_t r, const char *call) {
    if (r == ncclSuccess || r == ncclInProgress) return RA_OK;
    return ra_nccl__broke(n, r == ncclRemoteError ? RA_E_PEER : RA_E_IO, call,
                          ncclGetErrorString(r));
}

static int ra_nccl__cuda(ra_nccl *n, cudaError_t e, const char *call) {
    return e == cudaSuccess ? RA_OK : ra_nccl__broke(n, RA_E_IO, call, cudaGetErrorString(e));
}

static void ra_nccl__nap(long ns) {
    struct timespec t;
    t.tv_sec = 0;
    t.tv_nsec = ns;
    (void)nanosleep(&t, NULL);
}

/* 1: NCCL has finished all calls on this communicator; 0: not yet; -1: one failed. */
static int ra_nccl__ready(ra_nccl *n, const ra_nccl__flow *f) {
    ncclResult_t state = ncclSuccess;
    if (ra_nccl__nccl(n, ncclCommGetAsyncError(f->comm, &state), "ncclCommGetAsyncError") ||
        ra_nccl__nccl(n, state, "the communicator"))
        return -1;
    return state == ncclSuccess;
}

/* ========================================================================== ops */
static void ra_nccl__pop(ra_nccl *n, ra_nccl__flow *f, int32_t state) {
    ra_transport_op *op = f->first;
    f->first = (ra_transport_op *)op->scratch[0];
    if (!f->first) f->last = NULL;
    n->pending--;
    op->done = state == RA_MSG_DONE ? op->len : 0;
    op->state = state;
}

/* Starts the first op of an idle flow. */
static void ra_nccl__start(ra_nccl *n, ra_nccl__flow *f) {
    ra_transport_op *op = f->first;
    void *at = f->staging ? f->staging : op->buf;
    f->state = RA_NCCL__LAUNCHED;
    if (f->receives) {
        (void)ra_nccl__nccl(n, ncclRecv(at, op->len, ncclUint8, 0, f->comm, f->stream), "ncclRecv");
        return;
    }
    if (f->staging && ra_nccl__cuda(n, cudaMemcpyAsync(at, op->buf, op->len, cudaMemcpyHostToDevice,
                                                       f->stream), "cudaMemcpyAsync"))
        return;
    (void)ra_nccl__nccl(n, ncclSend(at, op->len, ncclUint8, 1, f->comm, f->stream), "ncclSend");
}

/* Continues the first op of a flow. Work after NCCL's kernel may go to the stream only when NCCL
 * has launched that. A copy to memory that is not pinned would block until the kernel ends, so it
 * is made afterwards. */
static void ra_nccl__advance(ra_nccl *n, ra_nccl__flow *f) {
    ra_transport_op *op = f->first;
    cudaError_t e;
    if (f->state == RA_NCCL__LAUNCHED) {
        if (ra_nccl__ready(n, f) != 1) return;
        if (f->receives && f->staging && op->mr &&
            ra_nccl__cuda(n, cudaMemcpyAsync(op->buf, f->staging, op->len, cudaMemcpyDeviceToHost,
                                             f->stream), "cudaMemcpyAsync"))
            return;
        if (ra_nccl__cuda(n, cudaEventRecord(f->event, f->stream), "cudaEventRecord")) return;
        f->state = RA_NCCL__RUNS;
    }
    if (f->state != RA_NCCL__RUNS) return;
    e = cudaEventQuery(f->event);
    if (e == cudaErrorNotReady) {
        (void)ra_nccl__ready(n, f);    /* a peer that has gone */
        return;
    }
    if (ra_nccl__cuda(n, e, "cudaEventQuery")) return;
    if (f->receives && f->staging && !op->mr &&
        (ra_nccl__cuda(n, cudaMemcpyAsync(op->buf, f->staging, op->len, cudaMemcpyDeviceToHost,
                                          f->stream), "cudaMemcpyAsync") ||
         ra_nccl__cuda(n, cudaStreamSynchronize(f->stream), "cudaStreamSynchronize")))
        return;
    f->state = RA_NCCL__IDLE;
    ra_nccl__pop(n, f, RA_MSG_DONE);
}

/* Pins the ring's memory, so that copies need no processor time. */
static int ra_nccl__reg(void *ctx, void *p, size_t bytes, void **mr) {
    ra_nccl *n = (ra_nccl *)ctx;
    cudaError_t e = cudaSetDevice(n->d.device);
    if (e == cudaSuccess) e = cudaHostRegister(p, bytes, cudaHostRegisterDefault);
    if (e != cudaSuccess)
        return ra_nccl__say(n, RA_E_IO, "cudaHostRegister: %s", cudaGetErrorString(e));
    *mr = p;
    return RA_OK;
}

static int ra_nccl__dereg(void *ctx, void *mr) {
    (void)ctx;
    return cudaHostUnregister(mr) == cudaSuccess ? RA_OK : RA_E_IO;
}

/* Side 0 sends to the next rank and receives from the one before; side 1 the other way. */
static ra_nccl__flow *ra_nccl__flow_of(ra_nccl *n, const ra_transport_op *op) {
    int receives = op->kind == RA_MSG_RECV, near = receives ? n->ranks - 1 : 1;
    int side = op->peer != (n->rank + near) % n->ranks;
    ra_nccl__flow *f = &n->flow[4 * receives + 2 * side + (op->channel & 1)];
    return op->channel < RA_NCCL__CHANNELS && f->comm && f->peer == op->peer ? f : NULL;
}

/* Ends all communicators, in one group: all kernels are stopped before memory of one is freed, for
 * which CUDA waits until all kernels have ended. */
static void *ra_nccl__ender(void *arg) {
    ra_nccl *n = (ra_nccl *)arg;
    (void)cudaSetDevice(n->d.device);
    (void)ncclGroupStart();
    for (int i = 0; i < RA_NCCL__FLOWS; i++)
        if (n->flow[i].comm) (void)ncclCommAbort(n->flow[i].comm);
    (void)ncclGroupEnd();
    __atomic_store_n(&n->over, 1, __ATOMIC_RELEASE);
    return NULL;
}

/* Ends all communicators on another thread. They are not used after this. */
static void ra_nccl__end(ra_nccl *n) {
    pthread_t id;
    if (n->ending) return;
    n->ending = 1;
    if (n->ranks == 1) n->over = 1;
    else if (pthread_create(&id, NULL, ra_nccl__ender, n)) (void)ra_nccl__ender(n);
    else (void)pthread_detach(id);
}

/* 1: they have ended, and the streams are empty. */
static int ra_nccl__over(const ra_nccl *n) {
    int busy = !__atomic_load_n(&n->over, __ATOMIC_ACQUIRE);
    for (int i = 0; i < RA_NCCL__FLOWS && !busy; i++)
        busy = n->flow[i].stream && cudaStreamQuery(n->flow[i].stream) == cudaErrorNotReady;
    return !busy;
}

/* RA_OK, or the failure of the context. */
static int ra_nccl__verdict(ra_nccl *n) {
    int code = n->broken;
    if (__atomic_load_n(&n->why, __ATOMIC_ACQUIRE)) {
        (void)cudaSetDevice(n->d.device);
        ra_nccl__end(n);
        code = RA_E_ABORTED;
    }
    for (int i = 0; code && i < RA_NCCL__FLOWS; i++)
        while (n->flow[i].first) ra_nccl__pop(n, &n->flow[i], code);
    return code;
}

/* ========================================================================== the callbacks */
/* Moves all accepted ops, not only these. */
static int ra_nccl__poll(void *ctx, ra_transport_op *const *ops, int count) {
    ra_nccl *n = (ra_nccl *)ctx;
    int code = ra_nccl__verdict(n);
    (void)ops, (void)count;
    if (code || !n->pending) return code;
    if (!ra_nccl__cuda(n, cudaSetDevice(n->d.device), "cudaSetDevice")) {
        for (int i = 0; i < RA_NCCL__FLOWS && !n->broken; i++) {
            ra_nccl__flow *f = &n->flow[i];
            if (f->first) ra_nccl__advance(n, f);
            if (f->first && f->state == RA_NCCL__IDLE && !n->broken) ra_nccl__start(n, f);
        }
    }
    return ra_nccl__verdict(n);
}

static int ra_nccl__post(void *ctx, ra_transport_op *const *ops, int count) {
    ra_nccl *n = (ra_nccl *)ctx;
    int code = ra_nccl__verdict(n), left = 0;
    for (int kind = RA_MSG_RECV; kind >= RA_MSG_SEND; kind--)
        for (int i = 0; i < count; i++) {
            ra_transport_op *op = ops[i];
            ra_nccl__flow *f;
            if (op->kind != kind || op->state != RA_MSG_IDLE) continue;
            if (code || left || n->pending == RA_NCCL__OPS) {
                if (code) op->state = code;
                else left++;
                continue;
            }
            f = ra_nccl__flow_of(n, op);
            if (!f || op->len > n->d.message_bytes) {
                op->state = f ? RA_E_TRUNC : RA_E_IO;
                continue;
            }
            op->scratch[0] = NULL;
            op->state = RA_MSG_PENDING;
            if (f->last) f->last->scratch[0] = op;
            else f->first = op;
            f->last = op;
            n->pending++;
        }
    if (!code) code = ra_nccl__poll(ctx, NULL, 0);
    return code ? code : left ? RA_AGAIN : RA_OK;
}

static int ra_nccl__wait(void *ctx, ra_transport_op *const *ops, int count, int64_t deadline_ns) {
    int before = -1;
    for (int round = 0;; round++) {
        int pending = 0, code;
        for (int i = 0; i < count; i++) pending += ops[i]->state == RA_MSG_PENDING;
        if (before < 0) before = pending;
        if (pending == 0 || pending < before) return RA_OK;
        code = ra_nccl__poll(ctx, ops, count);
        if (code) return code;
        if (round < 100) continue;
        if (deadline_ns && ra_now_ns() >= deadline_ns) return RA_OK;
        if (round < 104) (void)sched_yield();
        else ra_nccl__nap(round < 150 ? 20000 : 100000);
    }
}

static int ra_nccl__abort(void *ctx, int why) {
    ra_nccl *n = (ra_nccl *)ctx;
    int32_t zero = 0, value = why < 0 ? why : RA_E_ABORTED;
    (void)__atomic_compare_exchange_n(&n->why, &zero, value, 0, __ATOMIC_ACQ_REL,
                                      __ATOMIC_ACQUIRE);
    return RA_OK;
}

/* RA_OK: the communicators have ended, and the streams are empty. */
static int ra_nccl__quiesce(void *ctx, int64_t deadline_ns) {
    ra_nccl *n = (ra_nccl *)ctx;
    (void)ra_nccl__abort(ctx, RA_E_ABORTED);
    (void)ra_nccl__verdict(n);
    while (!ra_nccl__over(n)) {
        if (deadline_ns && ra_now_ns() >= deadline_ns) return RA_E_UNSAFE;
        ra_nccl__nap(100000);
    }
    return RA_OK;
}

static const char *ra_nccl__error_text(void *ctx, int code) {
    ra_nccl *n = (ra_nccl *)ctx;
    return n->text_code == code ? n->text : NULL;
}

/* ========================================================================== opening */
static ra_status ra_nccl__refuse(const ra_nccl_desc *d, ra_status status, const char *field,
                                 const char *format, ...) {
    va_list args;
    if (!d->error) return status;
    d->error->status = status;
    snprintf(d->error->field, sizeof d->error->field, "%s", field);
    va_start(args, format);
    vsnprintf(d->error->text, sizeof d->error->text, format, args);
    va_end(args);
    return status;
}

static void ra_nccl__path(const ra_nccl *n, int rank, const char *more, char *path) {
    snprintf(path, sizeof n->path, "%.440s/ra_nccl.%d%s", n->d.directory, rank, more);
}

/* Leaves a record in the directory and reads the others'. */
static ra_status ra_nccl__by_directory(ra_nccl *n, const ra_nccl__record *mine,
                                       ra_nccl__record *all) {
    char path[sizeof n->path];
    ssize_t put = -1;
    int f;
    ra_nccl__path(n, n->rank, ".new", path);
    ra_nccl__path(n, n->rank, "", n->path);
    f = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (f >= 0) put = write(f, mine, sizeof *mine);
    if (f < 0 || close(f) || put != (ssize_t)sizeof *mine || rename(path, n->path)) {
        n->path[0] = 0;
        return ra_nccl__refuse(&n->d, RA_E_IO, "directory", "cannot write a file in %.120s: %s",
                               n->d.directory, strerror(errno));
    }
    for (int r = 0; r < n->ranks; r++) {
        ra_nccl__path(n, r, "", path);
        for (;;) {
            ssize_t got = -1;
            f = open(path, O_RDONLY | O_CLOEXEC);
            if (f >= 0) got = read(f, &all[r], sizeof *all);
            if (f >= 0) close(f);
            if (got == (ssize_t)sizeof *all) break;
            if (ra_now_ns() > n->d.deadline_ns)
                return ra_nccl__refuse(&n->d, RA_E_TIMEOUT, "deadline_ns",
                                       "rank %d has not left a file in %.120s by the deadline", r,
                                       n->d.directory);
            ra_nccl__nap(2000000);
        }
    }
    return RA_OK;
}

static ra_status ra_nccl__gather(ra_nccl *n, ra_nccl__record *all) {
    ra_nccl__record mine;
    ra_status s = RA_OK;
    memset(&mine, 0, sizeof mine);
    mine.magic = RA_NCCL__MAGIC;
    mine.abi = RA_TRANSPORT_ABI;
    mine.rank = n->rank;
    mine.ranks = n->ranks;
    mine.shape = n->d.shape;
    mine.message_bytes = n->d.message_bytes;
    for (int i = 0; i < 4; i++)
        if (ra_nccl__nccl(n, ncclGetUniqueId(&mine.id[i]), "ncclGetUniqueId"))
            return ra_nccl__refuse(&n->d, RA_E_IO, "nccl", "%s", n->text);
    if (!n->d.exchange) s = ra_nccl__by_directory(n, &mine, all);
    else if (n->d.exchange(n->d.exchange_ctx, &mine, all, sizeof mine))
        s = ra_nccl__refuse(&n->d, RA_E_IO, "exchange", "returned an error");
    for (int r = 0; r < n->ranks && !s; r++)
        if (all[r].magic != mine.magic || all[r].abi != mine.abi || all[r].rank != r ||
            all[r].ranks != n->ranks || all[r].shape != mine.shape ||
            all[r].message_bytes != mine.message_bytes)
            s = ra_nccl__refuse(&n->d, RA_E_SHAPE, "record",
                                "rank %d differs in version, ranks, shape or message_bytes", r);
    return s;
}

/* Stream, event and staging of each flow. */
static void ra_nccl__flows(ra_nccl *n) {
    int next = (n->rank + 1) % n->ranks, prev = (n->rank + n->ranks - 1) % n->ranks;
    for (int i = 0; i < RA_NCCL__FLOWS && !n->broken; i++) {
        ra_nccl__flow *f = &n->flow[i];
        int side = i >> 1 & 1;
        if (side && n->ranks == 2) continue;
        f->receives = i >> 2;
        f->peer = f->receives == side ? next : prev;
        (void)ra_nccl__cuda(n, cudaStreamCreateWithFlags(&f->stream, cudaStreamNonBlocking),
                            "cudaStreamCreateWithFlags");
        (void)ra_nccl__cuda(n, cudaEventCreateWithFlags(&f->event, cudaEventDisableTiming),
                            "cudaEventCreateWithFlags");
        if (!n->d.direct)
            (void)ra_nccl__cuda(n, cudaMalloc(&f->staging, n->d.message_bytes), "cudaMalloc");
    }
}

/* Waits until NCCL has finished all calls on all communicators. */
static ra_status ra_nccl__await(ra_nccl *n) {
    for (int waits = 1; waits && !n->broken;) {
        waits = 0;
        for (int i = 0; i < RA_NCCL__FLOWS; i++) {
            ra_nccl__flow *f = &n->flow[i];
            waits += f->comm && (ra_nccl__ready(n, f) == 0 ||
                                 cudaStreamQuery(f->stream) == cudaErrorNotReady);
        }
        if (waits && ra_now_ns() > n->d.deadline_ns)
            return ra_nccl__refuse(&n->d, RA_E_TIMEOUT, "deadline_ns",
                                   "NCCL has not connected to both neighbours by the deadline");
        if (waits) ra_nccl__nap(200000);
    }
    return n->broken ? ra_nccl__refuse(&n->d, n->broken, "nccl", "%s", n->text) : RA_OK;
}

/* Makes all communicators at once, without blocking. */
static ra_status ra_nccl__connect(ra_nccl *n, const ra_nccl__record *all) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    int grouped = 0;
    config.blocking = 0;
    config.maxCTAs = 4;                /* kernels of all flows must fit the GPU together */
    ra_nccl__flows(n);
    if (!n->broken) grouped = !ra_nccl__nccl(n, ncclGroupStart(), "ncclGroupStart");
    for (int i = 0; i < RA_NCCL__FLOWS && !n->broken; i++) {
        ra_nccl__flow *f = &n->flow[i];
        if (f->stream)
            (void)ra_nccl__nccl(n, ncclCommInitRankConfig(&f->comm, 2,
                                                          all[f->receives ? f->peer : n->rank]
                                                              .id[i & 3], f->receives, &config),
                                "ncclCommInitRankConfig");
    }
    if (grouped) (void)ra_nccl__nccl(n, ncclGroupEnd(), "ncclGroupEnd");
    return ra_nccl__await(n);
}

/* Sends a byte through each flow, all at once. */
static ra_status ra_nccl__greet(ra_nccl *n) {
    char *bytes = NULL;
    ra_status s;
    if (ra_nccl__cuda(n, cudaMalloc((void **)&bytes, RA_NCCL__FLOWS), "cudaMalloc") ||
        ra_nccl__cuda(n, cudaMemset(bytes, 0, RA_NCCL__FLOWS), "cudaMemset") ||
        ra_nccl__nccl(n, ncclGroupStart(), "ncclGroupStart"))
        return ra_nccl__refuse(&n->d, n->broken, "nccl", "%s", n->text);
    for (int i = 0; i < RA_NCCL__FLOWS && !n->broken; i++) {
        ra_nccl__flow *f = &n->flow[i];
        if (f->comm && f->receives)
            (void)ra_nccl__nccl(n, ncclRecv(bytes + i, 1, ncclUint8, 0, f->comm, f->stream),
                                "ncclRecv");
        else if (f->comm)
            (void)ra_nccl__nccl(n, ncclSend(bytes + i, 1, ncclUint8, 1, f->comm, f->stream),
                                "ncclSend");
    }
    (void)ra_nccl__nccl(n, ncclGroupEnd(), "ncclGroupEnd");
    s = ra_nccl__await(n);
    if (s == RA_OK) (void)cudaFree(bytes);     /* otherwise kernels may still use it */
    return s;
}

static void ra_nccl__fill(ra_nccl *n) {
    ra_transport *t = &n->tp;
    t->size = (uint32_t)sizeof *t;
    t->abi = RA_TRANSPORT_ABI;
    t->caps = RA_CAP_ANY_THREAD | RA_CAP_DEADLINE;
    t->channels = RA_NCCL__CHANNELS;
    t->tag_bits = 64;                  /* they do not travel */
    t->max_ops = RA_NCCL__OPS;
    t->rank = n->rank;
    t->ranks = n->ranks;
    t->max_msg = n->d.message_bytes;
    t->align = 64;
    t->name = "NCCL";
    t->ctx = n;
    t->turn = &n->turn;
    t->post = ra_nccl__post;
    t->poll = ra_nccl__poll;
    t->wait = ra_nccl__wait;
    t->reg = n->d.direct ? NULL : ra_nccl__reg;
    t->dereg = n->d.direct ? NULL : ra_nccl__dereg;
    t->abort = ra_nccl__abort;
    t->quiesce = ra_nccl__quiesce;
    t->error_text = ra_nccl__error_text;
}

/* If NCCL has not ended after 10 s, what it may still use is leaked. */
static void ra_nccl__free(ra_nccl *n) {
    int64_t until = ra_deadline_ms(10000);
    if (n->path[0]) (void)unlink(n->path);
    ra_nccl__end(n);
    while (!ra_nccl__over(n)) {
        if (ra_now_ns() > until) return;
        ra_nccl__nap(100000);
    }
    for (int i = 0; i < RA_NCCL__FLOWS; i++) {
        ra_nccl__flow *f = &n->flow[i];
        if (f->event) (void)cudaEventDestroy(f->event);
        if (f->stream) (void)cudaStreamDestroy(f->stream);
        if (f->staging) (void)cudaFree(f->staging);
    }
    free(n);
}

static ra_status ra_nccl__check(const ra_nccl_desc *d) {
    if (d->ranks < 1) return ra_nccl__refuse(d, RA_E_RANGE, "ranks", "must be at least 1");
    if (d->rank < 0 || d->rank >= d->ranks)
        return ra_nccl__refuse(d, RA_E_RANGE, "rank", "must be 0 to %d, is %d", d->ranks - 1,
                               d->rank);
    if (!d->message_bytes)
        return ra_nccl__refuse(d, RA_E_UNSET, "message_bytes", "is 0: see ra_nccl_message_bytes");
    if (!d->exchange && !d->directory)
        return ra_nccl__refuse(d, RA_E_UNSET, "directory", "neither exchange nor directory is "
                                                           "given");
    return RA_OK;
}

/* Bytes of the largest message of all ranks of a plan; 0: an argument is wrong. */
RA_NCCL_API size_t ra_nccl_message_bytes(const ra_plan *plan, int ranks) {
    int64_t most = 64;
    for (int r = 0; r < ranks; r++) {
        ra_plan_report report;
        if (ra_plan_query(plan, r, &report)) return 0;
        if (report.forward.chunk_bytes > most) most = report.forward.chunk_bytes;
        if (report.backward.chunk_bytes > most) most = report.backward.chunk_bytes;
    }
    return (size_t)most;
}

/* Returns when all ranks have met, or refuses at the deadline. */
RA_NCCL_API ra_status ra_nccl_open(ra_nccl **out, const ra_nccl_desc *desc) {
    ra_nccl__record *all;
    ra_status s;
    ra_nccl *n;
    if (!out || !desc) return RA_E_NULL;
    *out = NULL;
    s = ra_nccl__check(desc);
    if (s) return s;
    n = (ra_nccl *)calloc(1, sizeof *n);
    all = (ra_nccl__record *)calloc((size_t)desc->ranks, sizeof *all);
    if (!n || !all) {
        free(n);
        free(all);
        return ra_nccl__refuse(desc, RA_E_NOMEM, "memory", "calloc returned null");
    }
    n->d = *desc;
    n->rank = desc->rank;
    n->ranks = desc->ranks;
    if (!n->d.deadline_ns) n->d.deadline_ns = ra_deadline_ms(60000);
    if (n->ranks > 1 && ra_nccl__cuda(n, cudaSetDevice(n->d.device), "cudaSetDevice"))
        s = ra_nccl__refuse(&n->d, RA_E_IO, "device", "%s", n->text);
    if (!s && n->ranks > 1) s = ra_nccl__gather(n, all);
    if (!s && n->ranks > 1) s = ra_nccl__connect(n, all);
    if (!s && n->ranks > 1) s = ra_nccl__greet(n);
    free(all);
    if (s) {
        ra_nccl__free(n);
        return s;
    }
    ra_nccl__fill(n);
    *out = n;
    return RA_OK;
}

/* Call it after the rings on it; null is fine. Gives NCCL 10 s to finish its calls, and 10 s to
 * end. */
RA_NCCL_API void ra_nccl_close(ra_nccl *n) {
    int64_t until = ra_deadline_ms(10000);
    if (!n) return;
    (void)cudaSetDevice(n->d.device);
    for (int i = 0; i < RA_NCCL__FLOWS && !ra_nccl__verdict(n); i++)
        if (n->flow[i].comm)
            (void)ra_nccl__nccl(n, ncclCommFinalize(n->flow[i].comm), "ncclCommFinalize");
    for (int i = 0; i < RA_NCCL__FLOWS && !ra_nccl__verdict(n); i++) {
        ra_nccl__flow *f = &n->flow[i];
        while (f->comm && ra_nccl__ready(n, f) == 0 && ra_now_ns() < until) ra_nccl__nap(200000);
        if (f->comm && !n->broken && ra_now_ns() < until) {
            (void)ncclCommDestroy(f->comm);
            f->comm = NULL;
        }
    }
    ra_nccl__free(n);
}

/* Valid as long as n. */
RA_NCCL_API const ra_transport *ra_nccl_transport(const ra_nccl *n) { return &n->tp; }

#endif
