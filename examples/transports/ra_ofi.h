/* ra_ofi.h - a transport of ringattn.h over libfabric: RDMA networks, TCP, shared memory
 *
 * Copy this file beside ringattn.h. It needs Linux, gcc or clang, and libfabric 1.15 or later
 * (Debian: libfabric-dev).
 *
 *   #define RINGATTN_IMPLEMENTATION
 *   #include "ra_ofi.h"               // includes ringattn.h
 *
 *   ra_ofi_desc od; ra_ofi *ofi; ra_error why;
 *   memset(&od, 0, sizeof od);
 *   od.provider = "tcp;ofi_rxm"; od.rank = rank; od.ranks = 4;
 *   od.directory = "/shared/job-4711"; od.error = &why;
 *   if (ra_ofi_open(&ofi, &od)) { fprintf(stderr, "%s: %s\n", why.field, why.text); exit(1); }
 *   ra_ring_create(&ring, plan, ra_ofi_transport(ofi), NULL);
 *   ... ra_forward, ra_backward ...
 *   ra_ring_destroy(ring);
 *   ra_ofi_close(ofi);                // all ranks, but bounded
 *
 *   cc -O2 program.c -lfabric -pthread -lm && ./a.out
 *
 * examples/ring_ofi.c is a complete program. `fi_info -l` lists the providers of an installation.
 *
 * Providers. Any with reliable datagrams (FI_EP_RDM) and tagged messages, by libfabric's name:
 *   "tcp;ofi_rxm", "net", "shm"       in Debian 12, tested
 *   "verbs;ofi_rxm", "efa", "cxi"     InfiniBand and RoCE, AWS, Slingshot: written for their
 *                                     requirements (registered local memory, keys from the
 *                                     provider, memory bound to the endpoint), but not run
 *
 * Two forms. Plain: each op is one fi_tsend or fi_trecv. one_sided = 1: a receive sends the peer a
 * credit with the address of its registered buffer. The peer writes the message there
 * (fi_writedata), and 32 bits of immediate data report which message is complete. cxi has no
 * fi_writedata: use the plain form there. net and shm always use the one-sided form: in net a
 * message whose receive is not posted yet delays all messages behind it, and fi_trecv of shm (1.17)
 * never returns if a long message meets a shorter receive. Messages carry their number per (peer,
 * channel) in tag or immediate data, so nothing depends on the provider's order. Tags of ops are
 * not sent: ranks with different plans receive each other's frames, which show the library which
 * field differs. If the provider requires it, and in the one-sided form, ra_ring_create registers
 * the ring's memory once. Other memory is registered for the duration of an op.
 *
 * Addresses. Ranks find one another by the first of these that is given:
 *   exchange      a function of yours that gathers a record from all ranks, like MPI_Allgather
 *   directory     one that all ranks see: each leaves a file there until all have met. Use another
 *                 directory or `world` for each run: files remain if ranks never met
 *   addresses     a list, "host:port" each, by rank
 *   RA_OFI_ADDRESSES in the environment, the same list with commas
 * The lists need a provider that lets you choose an address: not efa, cxi or shm (which crashes if
 * it gets an address before its owner has started). With the others, `address` chooses the
 * interface; without it the provider chooses. libfabric knows no passwords: this is for trusted
 * networks only.
 *
 * Waiting. Calls poll, yield, then nap up to 100 us. All calls of one ring come one at a time, from
 * any thread; two rings are two contexts and share nothing.
 *
 * Failure. A rank that gives up (mismatch, deadline, ra_ring_cancel) sends a goodbye to all others,
 * in its next call of poll, wait or quiesce, because abort only sets a word. Their passes end with
 * RA_E_ABORTED. A dead process of the same machine is noticed within milliseconds, by its pidfd. On
 * another machine, a peer that has been silent for half a second is sent small messages: it is dead
 * if the provider reports that one cannot be sent, or accepts none for 3 s. Operations with a dead
 * peer fail with RA_E_PEER. A stopped process looks like a slow one: deadlines end the wait.
 * quiesce cancels the receives and tells the peers that this rank has stopped. It ends when they
 * have sent the same and all messages have ended, for which messages without a receive are received
 * and discarded. If nothing has moved for `patience_ns` and a message is still pending, it closes
 * the endpoint; then nothing can touch this rank's memory, and it returns RA_OK. Exceptions are
 * shm, where other processes read and write this one's memory, and ofi_rxm, which crashes (1.17) if
 * it is closed while a peer reads a long message: there it returns RA_E_UNSAFE, and the library
 * leaks the buffers. A context that has failed stays failed: open a new one.
 *
 * shm has a file in /dev/shm per context while ranks meet. Each removes its own when all have met,
 * so nothing is left whichever ranks are killed later. That of a process that is killed before is
 * removed by the ranks that notice the death, and stays if all of them are killed: 16 MiB each.
 *
 * SPDX-License-Identifier: MIT OR Unlicense */
#if !defined(RA_OFI_H)
#define RA_OFI_H

#ifndef _DEFAULT_SOURCE
#define _DEFAULT_SOURCE 1
#endif
#include "ringattn.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <rdma/fi_tagged.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#if defined(__GLIBC__) && !defined(__USE_MISC)
#error "include ra_ofi.h before system headers, or compile with -D_DEFAULT_SOURCE"
#endif

/* ========================================================================== what you call */
typedef struct ra_ofi ra_ofi;

typedef struct ra_ofi_desc {           /* zero it first; equal on all ranks, except rank, address
                                        * and error */
    const char *provider;              /* required: "tcp;ofi_rxm", "shm", ... */
    int32_t rank, ranks;               /* ranks: 1 to RA_OFI_MAX_RANKS */
    uint64_t world;                    /* number of the run: ranks of other runs are refused */
    uint32_t ring;                     /* number of the ring in the run */
    int32_t one_sided;                 /* 1: fi_writedata into registered memory. net, shm:
                                        * always */
    uint64_t shape;                    /* a digest of anything else that must be equal, or 0 */
    int (*exchange)(void *ctx, const void *mine, void *all, size_t bytes); /* 0: all[] has the
                                        * `bytes` of every rank, by rank */
    void *exchange_ctx;
    const char *directory;
    const char *const *addresses;      /* [ranks] */
    const char *address;               /* of this rank, "host" or "host:port"; not with a list */
    int64_t deadline_ns;               /* for all ranks to meet; 0: 60 s from now */
    int64_t patience_ns;               /* of quiesce, see Failure above; 0: 80 ms */
    int32_t registers;                 /* 1: registers memory even if the provider need not */
    int32_t no_pidfd;                  /* 1: watches peers of this machine like those of others */
    ra_error *error;                   /* null, or gets the reason of a refusal */
} ra_ofi_desc;

enum { RA_OFI_MAX_RANKS = 16384 };

#define RA_OFI_API static __attribute__((unused))

/* ========================================================================== what travels
 * Tags: kind in bits 46 and 47, channel in 44 and 45, sender from 30 to 43, number from 0 to 29. 48
 * bits are what every provider has. Immediate data: sender, RA_OFI__CUT, channel, 16 bits of the
 * number. */
enum { RA_OFI__CHANNELS = 2, RA_OFI__OPS = 64, RA_OFI__INBOX = 64, RA_OFI__ADDRESS = 192 };
enum { RA_OFI__MAGIC = 0x69664f52, RA_OFI__VERSION = 2, RA_OFI__NUMBERS = (1 << 30) - 1,
       RA_OFI__CUT = 1 << 17 };
enum { RA_OFI__PATIENCE_MS = 80, RA_OFI__CLOSE_MS = 10000, RA_OFI__SILENCE_MS = 500,
       RA_OFI__GRACE_MS = 20, RA_OFI__RETRY_MS = 20, RA_OFI__DEAF_MS = 3000 };
#define RA_OFI__MS ((int64_t)1000000)

typedef struct ra_ofi__record {        /* a rank: identity, settings, address */
    uint32_t magic, version, abi, ring;
    uint64_t world, shape, machine;    /* machine: this boot and process name space; 0: unknown */
    int64_t  pid;
    int32_t  rank, ranks, one_sided;
    uint32_t address_bytes;
    char     provider[48];
    uint8_t  address[RA_OFI__ADDRESS];
} ra_ofi__record;

enum { RA_OFI__HELLO = 1,              /* with the record. why: 1: the peer's hello has come */
       RA_OFI__CREDIT,                 /* at, key, len: where message `number` is to be written */
       RA_OFI__TRUNC,                  /* len: of message `number`, which does not fit its credit;
                                        * what does is written, with RA_OFI__CUT */
       RA_OFI__GOODBYE,                /* why: the failure */
       RA_OFI__DRAIN,                  /* message `number` may have no receive: discard it, so that
                                        * its send ends */
       RA_OFI__PARTED,                 /* this rank sends and writes nothing any more */
       RA_OFI__PING };
typedef struct ra_ofi__letter {
    uint32_t kind, from, channel, number;
    int64_t  why;
    uint64_t at, key, len;
    ra_ofi__record record;             /* sent with a hello only */
} ra_ofi__letter;

/* ========================================================================== state
 * Every context that is given to libfabric is the start of a token. */
enum { RA_OFI__IDLE, RA_OFI__DUE, RA_OFI__FLYING, RA_OFI__DONE, RA_OFI__FAILED };
enum { RA_OFI__SLOT = 1, RA_OFI__NOTE, RA_OFI__BOX, RA_OFI__BIN };
typedef struct ra_ofi__token {
    struct fi_context2 context;        /* the provider's while FLYING */
    int32_t what, state, peer, error;  /* error: FI_E* if FAILED */
} ra_ofi__token;

typedef struct ra_ofi__note { ra_ofi__token token; ra_ofi__letter letter; } ra_ofi__note;
typedef struct ra_ofi__credit { uint64_t at, key, len; uint32_t number, there; } ra_ofi__credit;
typedef struct ra_ofi__mr {            /* what reg gives */
    struct fid_mr *mr;
    uint8_t *base;
    struct ra_ofi__mr *next;
} ra_ofi__mr;

typedef struct ra_ofi__slot {          /* an accepted op, until the provider has finished it */
    ra_ofi__token token;
    ra_ofi__note note;                 /* its credit, or the sender's refusal of one */
    ra_transport_op *op;               /* null: for the library it has ended */
    int32_t used, receives, channel;
    int32_t cuts;                      /* what has come of a message that is cut: 1 what fits or the
                                        * length, 2 both */
    uint32_t number;
    uint8_t *buf;
    size_t len;
    const ra_ofi__mr *mr;
    ra_ofi__mr own;                    /* a registration for this op alone */
} ra_ofi__slot;

typedef struct ra_ofi__bin {           /* for a message that is discarded */
    ra_ofi__token token;
    uint32_t channel, number;
    uint8_t bytes[64];
} ra_ofi__bin;

typedef struct ra_ofi__peer {
    fi_addr_t at;
    uint32_t number[2][RA_OFI__CHANNELS];        /* of the next send, the next receive */
    ra_ofi__note hello, goodbye, parted, ping;
    uint64_t cancelled[RA_OFI__CHANNELS][RA_OFI__OPS]; /* 1 + number of a receive, by number */
    ra_ofi__credit *credit;            /* [channels][RA_OFI__OPS] by number */
    int32_t heard, hears;              /* 1: its hello has come here; ours has come there */
    int32_t left, dead;                /* 1: it has parted; its process or network has failed */
    int32_t pidfd;                     /* -1: none */
    int64_t gone_ns, moved_ns;         /* when its process ended, or 0; its last activity */
    int64_t pinged_ns;                 /* when the last ping was due */
    char file[64];                     /* in /dev/shm, "": none */
} ra_ofi__peer;

struct ra_ofi {
    ra_transport tp;
    int32_t turn;                      /* of tp */
    ra_ofi_desc d;
    struct fi_info *info;
    struct fid_fabric *fabric;
    struct fid_domain *domain;
    struct fid_av *av;
    struct fid_cq *cq;
    struct fid_ep *ep;
    struct fid_mr *letters;            /* `memory`, if local memory is registered */
    int32_t rank, ranks, one_sided, registers;
    int32_t reaches;                   /* 1: peers read and write this process's memory */
    int32_t frail;                     /* 1: the endpoint must not be closed while it sends */
    int32_t why;                       /* abort was called: RA_E_*; any thread */
    int32_t heard_why, broken;         /* a goodbye came; the context itself failed */
    int32_t closed;                    /* 1: there is no endpoint any more */
    uint64_t key;
    int64_t looked_ns, pinged_ns;
    int64_t ended;                     /* completions so far */
    void *memory;                      /* peers, slots, inbox and bins; `bytes` */
    size_t bytes;
    ra_ofi__peer *peer;                /* [ranks] */
    ra_ofi__slot *slot;                /* [RA_OFI__OPS] */
    ra_ofi__note *inbox;               /* [RA_OFI__INBOX] */
    ra_ofi__bin *bin;                  /* [RA_OFI__OPS] */
    ra_ofi__credit *credits;
    struct pollfd *watched;            /* [ranks] */
    ra_ofi__mr *mrs;
    ra_ofi__record record;             /* of this rank */
    char path[512];                    /* of its file, "": none */
    int text_code;
    char text[200];
};

/* ========================================================================== small things */
static uint64_t ra_ofi__tag(uint64_t kind, int channel, int from, uint32_t number) {
    return kind << 46 | (uint64_t)channel << 44 | (uint64_t)from << 30 | number;
}

static int ra_ofi__say(ra_ofi *o, int code, const char *format, ...) {
    va_list args;
    o->text_code = code;
    va_start(args, format);
    vsnprintf(o->text, sizeof o->text, format, args);
    va_end(args);
    return code;
}

static void ra_ofi__nap(long ns) {
    struct timespec t;
    t.tv_sec = 0;
    t.tv_nsec = ns;
    (void)nanosleep(&t, NULL);
}

/* 1: the error means that the other side is not there. */
static int ra_ofi__is_absence(int error) {
    return error == FI_ECONNREFUSED || error == FI_ECONNRESET || error == FI_ECONNABORTED ||
           error == FI_ENOTCONN || error == FI_EHOSTUNREACH || error == FI_ENETUNREACH ||
           error == FI_ESHUTDOWN || error == FI_ETIMEDOUT || error == FI_EHOSTDOWN ||
           error == EPIPE || error == ESRCH;
}

/* ========================================================================== memory */
static int ra_ofi__register(ra_ofi *o, void *p, size_t n, struct fid_mr **out) {
    uint64_t access = FI_SEND | FI_RECV | (o->one_sided ? FI_WRITE | FI_REMOTE_WRITE : 0);
    int code = fi_mr_reg(o->domain, p, n, access, 0, ++o->key, 0, out, NULL);
    if (code || !(o->info->domain_attr->mr_mode & FI_MR_ENDPOINT)) return code;
    code = fi_mr_bind(*out, &o->ep->fid, 0);
    if (!code) code = fi_mr_enable(*out);
    if (code) (void)fi_close(&(*out)->fid);
    if (code) *out = NULL;
    return code;
}

static int ra_ofi__reg(void *ctx, void *p, size_t n, void **mr) {
    ra_ofi *o = (ra_ofi *)ctx;
    ra_ofi__mr *m = (ra_ofi__mr *)calloc(1, sizeof *m);
    int code = m ? ra_ofi__register(o, p, n, &m->mr) : -FI_ENOMEM;
    if (code) {
        free(m);
        return ra_ofi__say(o, RA_E_IO, "fi_mr_reg: %s", fi_strerror(-code));
    }
    m->base = (uint8_t *)p;
    m->next = o->mrs;
    o->mrs = m;
    *mr = m;
    return RA_OK;
}

static int ra_ofi__dereg(void *ctx, void *mr) {
    ra_ofi *o = (ra_ofi *)ctx;
    for (ra_ofi__mr **at = &o->mrs; *at; at = &(*at)->next) {
        ra_ofi__mr *m = *at;
        int code = 0;
        if (m != mr) continue;
        *at = m->next;
        if (m->mr) code = fi_close(&m->mr->fid);
        free(m);
        return code ? ra_ofi__say(o, RA_E_IO, "closing a registration: %s", fi_strerror(-code))
                    : RA_OK;
    }
    return RA_E_STATE;
}

/* Registers the memory of an op, if it has to be and the ring has not done so. */
static int ra_ofi__describe(ra_ofi *o, ra_ofi__slot *s) {
    s->mr = (const ra_ofi__mr *)s->op->mr;
    if (!o->registers || s->mr) return 0;
    s->own.base = s->buf;
    s->mr = &s->own;
    return ra_ofi__register(o, s->buf, s->len, &s->own.mr);
}

/* ========================================================================== notes */
static void *ra_ofi__letter_desc(const ra_ofi *o) {
    return o->letters ? fi_mr_desc(o->letters) : NULL;
}

static void ra_ofi__push_note(ra_ofi *o, ra_ofi__note *n) {
    size_t bytes = n->letter.kind == RA_OFI__HELLO ? sizeof n->letter
                                                   : offsetof(ra_ofi__letter, record);
    ssize_t code;
    if (n->token.state != RA_OFI__DUE) return;
    code = fi_tsend(o->ep, &n->letter, bytes, ra_ofi__letter_desc(o), o->peer[n->token.peer].at,
                    ra_ofi__tag(1, 0, o->rank, 0), &n->token.context);
    if (code == -FI_EAGAIN) return;
    n->token.state = code ? RA_OFI__FAILED : RA_OFI__FLYING;
    n->token.error = (int)-code;
}

static void ra_ofi__write(ra_ofi *o, ra_ofi__note *n, uint32_t kind, int to) {
    n->token.what = RA_OFI__NOTE;
    n->token.state = RA_OFI__DUE;
    n->token.peer = to;
    n->letter.kind = kind;
    n->letter.from = (uint32_t)o->rank;
    ra_ofi__push_note(o, n);
}

static void ra_ofi__open_box(ra_ofi *o, ra_ofi__note *n) {
    n->token.what = RA_OFI__BOX;
    n->token.state = fi_trecv(o->ep, &n->letter, sizeof n->letter, ra_ofi__letter_desc(o),
                              FI_ADDR_UNSPEC, ra_ofi__tag(1, 0, 0, 0),
                              ra_ofi__tag(0, 0, RA_OFI_MAX_RANKS - 1, 0), &n->token.context)
                         ? RA_OFI__DUE : RA_OFI__FLYING;
}

static int ra_ofi__flies(const ra_ofi__note *n) {
    return n->token.state == RA_OFI__FLYING || n->token.state == RA_OFI__DUE;
}

/* Sends a goodbye or PARTED to all live peers, once. */
static void ra_ofi__tell_all(ra_ofi *o, uint32_t kind, int why) {
    for (int r = 0; r < o->ranks && !o->closed; r++) {
        ra_ofi__note *n = kind == RA_OFI__GOODBYE ? &o->peer[r].goodbye : &o->peer[r].parted;
        if (r == o->rank || o->peer[r].dead || n->token.state != RA_OFI__IDLE) continue;
        n->letter.why = why;
        ra_ofi__write(o, n, kind, r);
    }
}

/* ========================================================================== slots */
static void ra_ofi__end(ra_ofi__slot *s, int32_t state, size_t done) {
    ra_transport_op *op = s->op;
    s->op = NULL;
    if (!op) return;
    op->done = done;
    op->state = state;
}

/* A slot is free when neither library nor provider needs it. */
static void ra_ofi__settle(ra_ofi__slot *s) {
    if (s->op || s->token.state == RA_OFI__FLYING || ra_ofi__flies(&s->note)) return;
    if (s->own.mr) (void)fi_close(&s->own.mr->fid);
    s->own.mr = NULL;
    s->token.state = s->note.token.state = RA_OFI__IDLE;
    s->used = 0;
}

/* This file cancels receives only after they have ended for the library. A cancellation before that
 * means that the connection was lost. */
static void ra_ofi__fail(ra_ofi *o, ra_ofi__slot *s, int error, const char *call) {
    int code = error == FI_ETRUNC ? RA_E_TRUNC : ra_ofi__is_absence(error) ? RA_E_PEER : RA_E_IO;
    if (error == FI_ECANCELED) code = s->op ? RA_E_PEER : RA_E_ABORTED;
    if (error == FI_ECANCELED && s->receives)
        o->peer[s->token.peer].cancelled[s->channel][s->number % RA_OFI__OPS] =
            (uint64_t)s->number + 1;
    if (code == RA_E_PEER) o->peer[s->token.peer].dead = 1;
    if (s->op)
        (void)ra_ofi__say(o, code, "%s, rank %d: %s", call, s->token.peer, fi_strerror(error));
    s->token.state = RA_OFI__DONE;
    ra_ofi__end(s, code, 0);
}

static void ra_ofi__start_plain(ra_ofi *o, ra_ofi__slot *s) {
    void *desc = s->mr ? fi_mr_desc(s->mr->mr) : NULL;
    int from = s->receives ? s->token.peer : o->rank;
    uint64_t tag = ra_ofi__tag(0, s->channel, from, s->number);
    ssize_t code = s->receives ? fi_trecv(o->ep, s->buf, s->len, desc, FI_ADDR_UNSPEC, tag, 0,
                                          &s->token.context)
                               : fi_tsend(o->ep, s->buf, s->len, desc, o->peer[s->token.peer].at,
                                          tag, &s->token.context);
    if (code == -FI_EAGAIN) return;
    s->token.state = RA_OFI__FLYING;
    if (code) ra_ofi__fail(o, s, (int)-code, s->receives ? "fi_trecv" : "fi_tsend");
}

/* A receive sends its credit; a send waits for the credit and writes. */
static void ra_ofi__start_one_sided(ra_ofi *o, ra_ofi__slot *s) {
    ra_ofi__peer *p = &o->peer[s->token.peer];
    ra_ofi__letter *l = &s->note.letter;
    ra_ofi__credit *c;
    uint64_t data = (uint64_t)o->rank << 18 | (uint64_t)s->channel << 16 | (s->number & 0xffff);
    ssize_t code;
    l->channel = (uint32_t)s->channel;
    l->number = s->number;
    l->len = s->len;
    if (s->receives) {
        uint64_t from = o->info->domain_attr->mr_mode & FI_MR_VIRT_ADDR
                            ? 0 : (uint64_t)(uintptr_t)s->mr->base;
        l->at = (uint64_t)(uintptr_t)s->buf - from;
        l->key = fi_mr_key(s->mr->mr);
        s->token.state = RA_OFI__FLYING;
        ra_ofi__write(o, &s->note, RA_OFI__CREDIT, s->token.peer);
        return;
    }
    c = &p->credit[s->channel * RA_OFI__OPS + (int)(s->number % RA_OFI__OPS)];
    if (!c->there || c->number != s->number) return;
    if (c->len != s->len) {
        data |= RA_OFI__CUT;
        if (s->note.token.state == RA_OFI__IDLE)
            ra_ofi__write(o, &s->note, RA_OFI__TRUNC, s->token.peer);
    }
    code = fi_writedata(o->ep, s->buf, c->len < s->len ? (size_t)c->len : s->len,
                        fi_mr_desc(s->mr->mr), data, p->at, c->at, c->key, &s->token.context);
    if (code == -FI_EAGAIN) return;
    c->there = 0;
    s->token.state = RA_OFI__FLYING;
    if (code) ra_ofi__fail(o, s, (int)-code, "fi_writedata");
}

static void ra_ofi__start(ra_ofi *o, ra_ofi__slot *s) {
    if (s->used && s->token.state == RA_OFI__DUE) {
        if (o->one_sided) ra_ofi__start_one_sided(o, s);
        else ra_ofi__start_plain(o, s);
    }
    if (s->used) ra_ofi__push_note(o, &s->note);
}

static ra_ofi__slot *ra_ofi__free_slot(ra_ofi *o) {
    for (int i = 0; i < RA_OFI__OPS; i++)
        if (!o->slot[i].used) return &o->slot[i];
    return NULL;
}

static void ra_ofi__accept(ra_ofi *o, ra_ofi__slot *s, ra_transport_op *op) {
    int receives = op->kind == RA_MSG_RECV, code;
    uint32_t *number;
    if (op->peer < 0 || op->peer >= o->ranks || op->peer == o->rank ||
        op->channel >= RA_OFI__CHANNELS) {
        op->state = RA_E_IO;
        return;
    }
    if (op->len > o->tp.max_msg) {
        op->state = RA_E_TRUNC;
        return;
    }
    number = &o->peer[op->peer].number[receives][op->channel];
    s->used = 1;
    s->op = op;
    s->receives = receives;
    s->channel = op->channel;
    s->number = *number;
    s->buf = (uint8_t *)op->buf;
    s->len = op->len;
    s->cuts = 0;
    s->token.what = RA_OFI__SLOT;
    s->token.peer = op->peer;
    s->token.state = RA_OFI__DUE;
    *number = (*number + 1) & RA_OFI__NUMBERS;
    o->peer[op->peer].moved_ns = ra_now_ns();
    op->state = RA_MSG_PENDING;
    code = ra_ofi__describe(o, s);
    if (code) ra_ofi__fail(o, s, -code, "fi_mr_reg");
    ra_ofi__start(o, s);
    ra_ofi__settle(s);
}

static void ra_ofi__drop_ops(ra_ofi *o, int peer, int32_t state) {
    for (int i = 0; i < RA_OFI__OPS; i++) {
        ra_ofi__slot *s = &o->slot[i];
        if (!s->used || (peer >= 0 && s->token.peer != peer)) continue;
        if (s->note.token.state == RA_OFI__DUE) s->note.token.state = RA_OFI__IDLE;
        ra_ofi__end(s, state, 0);
        ra_ofi__settle(s);
    }
}

/* ========================================================================== letters */
static ra_ofi__slot *ra_ofi__awaiting(ra_ofi *o, uint32_t from, uint32_t channel, uint32_t number,
                                      uint32_t mask) {
    for (int i = 0; i < RA_OFI__OPS; i++) {
        ra_ofi__slot *s = &o->slot[i];
        if (s->used && s->receives && s->token.state == RA_OFI__FLYING &&
            s->token.peer == (int)from && s->channel == (int)channel &&
            ((s->number ^ number) & mask) == 0)
            return s;
    }
    return NULL;
}

static uint64_t ra_ofi__hash(uint64_t h, const char *text) {
    while (*text) h = (h ^ (uint8_t)*text++) * 0x100000001b3u;
    return h;
}

/* Why this rank refuses a record; an empty text: it does not. */
static void ra_ofi__judge(const ra_ofi *o, const ra_ofi__record *r, char *text, size_t room) {
    const ra_ofi__record *m = &o->record;
    text[0] = 0;
    if (r->magic != m->magic || r->version != m->version || r->abi != m->abi)
        snprintf(text, room, "a rank has another version of ra_ofi.h or ringattn.h, or another "
                             "byte order");
    else if (r->world != m->world || r->ring != m->ring)
        snprintf(text, room, "rank %d is of world %llu, ring %u, this one of world %llu, ring %u",
                 r->rank, (unsigned long long)r->world, r->ring, (unsigned long long)m->world,
                 m->ring);
    else if (r->ranks != m->ranks)
        snprintf(text, room, "ranks is %d here, but %d at rank %d", m->ranks, r->ranks, r->rank);
    else if (r->one_sided != m->one_sided)
        snprintf(text, room, "one_sided is %d here, but %d at rank %d", m->one_sided, r->one_sided,
                 r->rank);
    else if (strncmp(r->provider, m->provider, sizeof m->provider))
        snprintf(text, room, "the provider is %.40s here, but %.40s at rank %d", m->provider,
                 r->provider, r->rank);
    else if (r->shape != m->shape)
        snprintf(text, room, "shape differs at rank %d", r->rank);
    else if (r->rank < 0 || r->rank >= m->ranks || r->rank == m->rank)
        snprintf(text, room, "another rank says that it is rank %d", r->rank);
}

/* The file of a rank in /dev/shm, or "". */
static const char *ra_ofi__file(const ra_ofi *o, const ra_ofi__record *r) {
    const char *name = o->reaches ? strstr((const char *)r->address, "://") : NULL;
    return name ? name + 3 : "";
}

/* Peers of this machine are watched by their process. -1: it has ended. */
static int ra_ofi__watch(ra_ofi *o, const ra_ofi__record *r) {
    ra_ofi__peer *p = &o->peer[r->rank];
    const char *name = ra_ofi__file(o, r);
    if (p->pidfd >= 0 || !r->machine || r->machine != o->record.machine ||
        r->pid == o->record.pid)
        return 0;
    snprintf(p->file, sizeof p->file, "%.60s", name);
    if (o->d.no_pidfd) return 0;
    p->pidfd = (int)syscall(434 /* pidfd_open */, (int)r->pid, 0);
    return p->pidfd < 0 && errno == ESRCH ? -1 : 0;
}

static void ra_ofi__hear_hello(ra_ofi *o, const ra_ofi__letter *l) {
    const ra_ofi__record *r = &l->record;
    ra_ofi__peer *p;
    char text[160];
    ra_ofi__judge(o, r, text, sizeof text);
    if (text[0]) {
        if (!o->broken) o->broken = ra_ofi__say(o, RA_E_SHAPE, "%s", text);
        return;
    }
    p = &o->peer[r->rank];
    p->hears |= l->why != 0;
    if (p->heard) return;
    p->heard = 1;
    (void)ra_ofi__watch(o, r);
}

/* What fits a receive has come, or (length) how long its message is. */
static void ra_ofi__hear_cut(ra_ofi__slot *s, size_t length) {
    if (length) s->len = length;
    if (++s->cuts < 2) return;
    s->token.state = RA_OFI__DONE;
    ra_ofi__end(s, RA_E_TRUNC, s->len);
    ra_ofi__settle(s);
}

static void ra_ofi__hear(ra_ofi *o, const ra_ofi__letter *l, size_t bytes) {
    ra_ofi__credit *c;
    ra_ofi__slot *s;
    if (bytes < offsetof(ra_ofi__letter, record) || l->from >= (uint32_t)o->ranks ||
        l->channel >= RA_OFI__CHANNELS || (l->kind == RA_OFI__HELLO && bytes < sizeof *l)) {
        if (!o->broken) o->broken = ra_ofi__say(o, RA_E_PROTO, "a letter of another kind came");
        return;
    }
    o->peer[l->from].moved_ns = ra_now_ns();
    if (l->kind == RA_OFI__HELLO) ra_ofi__hear_hello(o, l);
    if (l->kind == RA_OFI__PARTED) o->peer[l->from].left = 1;
    if (l->kind == RA_OFI__GOODBYE && !o->heard_why) {
        o->heard_why = l->why < 0 && l->why > -256 ? (int32_t)l->why : RA_E_ABORTED;
        if (!__atomic_load_n(&o->why, __ATOMIC_ACQUIRE))
            (void)ra_ofi__say(o, RA_E_ABORTED, "rank %u failed first: %s", l->from,
                              ra_status_text(o->heard_why));
    }
    if (l->kind == RA_OFI__CREDIT && o->one_sided) {
        c = &o->peer[l->from].credit[l->channel * RA_OFI__OPS + l->number % RA_OFI__OPS];
        c->at = l->at;
        c->key = l->key;
        c->len = l->len;
        c->number = l->number;
        c->there = 1;
    }
    for (int i = 0; l->kind == RA_OFI__DRAIN && i < RA_OFI__OPS; i++) {
        ra_ofi__bin *b = &o->bin[i];
        if (b->token.state == RA_OFI__DUE || b->token.state == RA_OFI__FLYING) continue;
        b->token.state = RA_OFI__DUE;
        b->token.peer = (int)l->from;
        b->channel = l->channel;
        b->number = l->number;
        break;
    }
    if (l->kind == RA_OFI__TRUNC) {
        s = ra_ofi__awaiting(o, l->from, l->channel, l->number, RA_OFI__NUMBERS);
        if (s) ra_ofi__hear_cut(s, (size_t)l->len);
    }
}

/* ========================================================================== completions */
static ra_ofi__slot *ra_ofi__slot_of(ra_ofi *o, const ra_ofi__token *t) {
    const uint8_t *at = (const uint8_t *)t, *first = (const uint8_t *)o->slot;
    if (at < first || at >= first + RA_OFI__OPS * sizeof *o->slot) return NULL;
    return &o->slot[(size_t)(at - first) / sizeof *o->slot];
}

static void ra_ofi__complete(ra_ofi *o, const struct fi_cq_tagged_entry *e) {
    ra_ofi__token *t = (ra_ofi__token *)e->op_context;
    ra_ofi__slot *s;
    o->ended++;
    if (e->flags & FI_REMOTE_CQ_DATA) {
        uint32_t data = (uint32_t)e->data;
        s = ra_ofi__awaiting(o, data >> 18, data >> 16 & 1, data & 0xffff, 0xffff);
        if (!s) return;
        o->peer[s->token.peer].moved_ns = ra_now_ns();
        if (data & RA_OFI__CUT) {
            ra_ofi__hear_cut(s, 0);
            return;
        }
        s->token.state = RA_OFI__DONE;
        ra_ofi__end(s, RA_MSG_DONE, s->len);
        ra_ofi__settle(s);
        return;
    }
    if (!t) return;
    t->state = RA_OFI__DONE;
    if (t->what == RA_OFI__BOX) {
        ra_ofi__hear(o, &((ra_ofi__note *)t)->letter, e->len);
        ra_ofi__open_box(o, (ra_ofi__note *)t);
        return;
    }
    s = ra_ofi__slot_of(o, t);
    if (!s) return;
    if (t->what == RA_OFI__SLOT) {
        o->peer[t->peer].moved_ns = ra_now_ns();
        if (s->receives && e->len != s->len) ra_ofi__end(s, RA_E_TRUNC, e->len);
        else ra_ofi__end(s, RA_MSG_DONE, s->len);
    }
    ra_ofi__settle(s);
}

static void ra_ofi__complete_error(ra_ofi *o) {
    struct fi_cq_err_entry e;
    ra_ofi__token *t;
    ra_ofi__slot *s;
    memset(&e, 0, sizeof e);
    if (fi_cq_readerr(o->cq, &e, 0) < 1) return;
    if (e.err < 0) e.err = -e.err;     /* shm of libfabric 1.17 */
    t = (ra_ofi__token *)e.op_context;
    if (!t) return;
    o->ended++;
    t->state = RA_OFI__FAILED;
    t->error = e.err;
    if (t->what == RA_OFI__BOX) {
        if (e.err != FI_ECANCELED && !o->closed) ra_ofi__open_box(o, (ra_ofi__note *)t);
        return;
    }
    s = ra_ofi__slot_of(o, t);
    if (t->what == RA_OFI__NOTE && ra_ofi__is_absence(e.err) && o->peer[t->peer].heard &&
        !o->peer[t->peer].dead) {
        o->peer[t->peer].dead = 1;
        if (!o->peer[t->peer].left)
            (void)ra_ofi__say(o, RA_E_PEER, "rank %d: %s", t->peer, fi_strerror(e.err));
    }
    if (!s) return;
    if (e.err == FI_ETRUNC && s->receives && e.olen)       /* what fits has come */
        ra_ofi__end(s, RA_E_TRUNC, s->len + e.olen);
    if (t->what == RA_OFI__SLOT) ra_ofi__fail(o, s, e.err, s->receives ? "receiving" : "sending");
    ra_ofi__settle(s);
}

/* Takes completions, and starts what can start. */
static void ra_ofi__move(ra_ofi *o) {
    struct fi_cq_tagged_entry e[16];
    if (o->closed) return;
    for (int round = 0; round < 8; round++) {
        ssize_t n = fi_cq_read(o->cq, e, 16);
        if (n == -FI_EAVAIL) {
            ra_ofi__complete_error(o);
            continue;
        }
        if (n < 0 && n != -FI_EAGAIN && n != -FI_EINTR && !o->broken)
            o->broken = ra_ofi__say(o, RA_E_IO, "fi_cq_read: %s", fi_strerror((int)-n));
        for (ssize_t i = 0; i < n; i++) ra_ofi__complete(o, &e[i]);
        if (n < 16) break;
    }
    for (int i = 0; i < RA_OFI__INBOX; i++)
        if (o->inbox[i].token.state == RA_OFI__DUE) ra_ofi__open_box(o, &o->inbox[i]);
    for (int i = 0; i < RA_OFI__OPS; i++) {
        if (!o->slot[i].used) continue;
        ra_ofi__start(o, &o->slot[i]);
        ra_ofi__settle(&o->slot[i]);
    }
    for (int r = 0; r < o->ranks; r++) {
        ra_ofi__peer *p = &o->peer[r];
        if (p->dead) continue;
        ra_ofi__push_note(o, &p->hello);
        ra_ofi__push_note(o, &p->goodbye);
        ra_ofi__push_note(o, &p->parted);
        ra_ofi__push_note(o, &p->ping);
    }
}

/* ========================================================================== dead peers */
static void ra_ofi__unlink(const char *file) {
    char path[96];
    snprintf(path, sizeof path, "/dev/shm/%.64s", file);
    if (file[0] && !strchr(file, '/')) (void)unlink(path);
}

/* Checks which processes of this machine have ended. What such a process had sent may still arrive
 * for a while. */
static void ra_ofi__look(ra_ofi *o, int64_t now) {
    int n = 0;
    if (now - o->looked_ns < 2 * RA_OFI__MS) return;
    o->looked_ns = now;
    for (int r = 0; r < o->ranks; r++) {
        ra_ofi__peer *p = &o->peer[r];
        if (p->gone_ns && now - p->gone_ns > RA_OFI__GRACE_MS * RA_OFI__MS) p->dead = 1;
        if (p->pidfd < 0) continue;
        o->watched[n].fd = p->pidfd;
        o->watched[n++].events = POLLIN;
    }
    if (!n || poll(o->watched, (nfds_t)n, 0) <= 0) return;
    for (int r = 0, i = 0; r < o->ranks; r++) {
        ra_ofi__peer *p = &o->peer[r];
        if (p->pidfd < 0 || !o->watched[i++].revents) continue;
        close(p->pidfd);
        p->pidfd = -1;
        p->gone_ns = now;
        ra_ofi__unlink(p->file);
        if (!p->left)
            (void)ra_ofi__say(o, RA_E_PEER, "the process of rank %d has ended", r);
    }
}

/* Sends a small message to peers without a pidfd that have ops here and have long been silent. Some
 * providers report no failure: they try to connect again, and never accept the message. */
static void ra_ofi__ping(ra_ofi *o, int64_t now) {
    if (now - o->pinged_ns < RA_OFI__SILENCE_MS * RA_OFI__MS / 5) return;
    o->pinged_ns = now;
    for (int i = 0; i < RA_OFI__OPS; i++) {
        int peer = o->slot[i].token.peer;
        ra_ofi__peer *p = &o->peer[peer];
        if (!o->slot[i].used || p->dead || p->pidfd >= 0) continue;
        if (p->ping.token.state == RA_OFI__DUE &&
            now - p->pinged_ns > RA_OFI__DEAF_MS * RA_OFI__MS) {
            p->dead = 1;
            (void)ra_ofi__say(o, RA_E_PEER, "rank %d has taken no message for %d s", peer,
                              RA_OFI__DEAF_MS / 1000);
        }
        if (ra_ofi__flies(&p->ping) || now - p->moved_ns < RA_OFI__SILENCE_MS * RA_OFI__MS)
            continue;
        p->pinged_ns = p->moved_ns = now;        /* the next one in as long */
        ra_ofi__write(o, &p->ping, RA_OFI__PING, peer);
    }
}

static void ra_ofi__bury(ra_ofi *o) {
    int64_t now = ra_now_ns();
    ra_ofi__look(o, now);
    ra_ofi__ping(o, now);
    for (int i = 0; i < RA_OFI__OPS; i++)
        if (o->slot[i].used && o->peer[o->slot[i].token.peer].dead)
            ra_ofi__drop_ops(o, o->slot[i].token.peer, RA_E_PEER);
}

/* RA_OK, or the failure of the context. */
static int ra_ofi__verdict(ra_ofi *o) {
    int why = __atomic_load_n(&o->why, __ATOMIC_ACQUIRE), code = RA_OK;
    if (why) ra_ofi__tell_all(o, RA_OFI__GOODBYE, why);
    if (o->broken) code = o->broken;
    else if (why || o->heard_why || o->closed) code = RA_E_ABORTED;
    if (code) ra_ofi__drop_ops(o, -1, code);
    return code;
}

/* ========================================================================== the callbacks */
/* Receives first, so that messages that come at once have a buffer. */
static int ra_ofi__post(void *ctx, ra_transport_op *const *ops, int n) {
    ra_ofi *o = (ra_ofi *)ctx;
    int code = ra_ofi__verdict(o), left = 0;
    for (int kind = RA_MSG_RECV; kind >= RA_MSG_SEND; kind--)
        for (int i = 0; i < n; i++) {
            ra_ofi__slot *s;
            if (ops[i]->kind != kind || ops[i]->state != RA_MSG_IDLE) continue;
            s = code || left ? NULL : ra_ofi__free_slot(o);
            if (code) ops[i]->state = code;
            else if (!s) left++;
            else ra_ofi__accept(o, s, ops[i]);
        }
    return code ? code : left ? RA_AGAIN : RA_OK;
}

/* Moves all accepted ops, not only these. */
static int ra_ofi__poll(void *ctx, ra_transport_op *const *ops, int n) {
    ra_ofi *o = (ra_ofi *)ctx;
    int code = ra_ofi__verdict(o);
    (void)ops, (void)n;
    ra_ofi__move(o);                   /* after a failure too, to send the goodbye */
    if (!code) ra_ofi__bury(o);
    return ra_ofi__verdict(o);
}

/* Not all providers have an event to wait for: polls, yields, naps. */
static int ra_ofi__wait(void *ctx, ra_transport_op *const *ops, int n, int64_t deadline_ns) {
    int before = -1;
    for (int round = 0;; round++) {
        int pending = 0, code;
        for (int i = 0; i < n; i++) pending += ops[i]->state == RA_MSG_PENDING;
        if (before < 0) before = pending;
        if (pending == 0 || pending < before) return RA_OK;
        code = ra_ofi__poll(ctx, ops, n);
        if (code) return code;
        if (round < 100) continue;
        if (deadline_ns && ra_now_ns() >= deadline_ns) return RA_OK;
        if (round < 104) (void)sched_yield();
        else ra_ofi__nap(round < 150 ? 20000 : 100000);
    }
}

static int ra_ofi__abort(void *ctx, int why) {
    ra_ofi *o = (ra_ofi *)ctx;
    int32_t zero = 0, value = why < 0 ? why : RA_E_ABORTED;
    (void)__atomic_compare_exchange_n(&o->why, &zero, value, 0, __ATOMIC_ACQ_REL,
                                      __ATOMIC_ACQUIRE);
    return RA_OK;
}

/* ========================================================================== parting */
static void ra_ofi__close_mrs(ra_ofi *o) {
    for (ra_ofi__mr *m = o->mrs; m; m = m->next) {
        if (m->mr) (void)fi_close(&m->mr->fid);
        m->mr = NULL;
    }
    for (int i = 0; i < RA_OFI__OPS; i++) {
        ra_ofi__slot *s = &o->slot[i];
        s->token.state = s->note.token.state = RA_OFI__DONE;
        ra_ofi__end(s, RA_E_ABORTED, 0);
        ra_ofi__settle(s);
    }
    if (o->letters) (void)fi_close(&o->letters->fid);
    o->letters = NULL;
}

/* Closes what could still use memory of the ring. Registrations are closed after the endpoint that
 * uses them, unless they are bound to it. */
static void ra_ofi__shut(ra_ofi *o) {
    int bound = (o->info->domain_attr->mr_mode & FI_MR_ENDPOINT) != 0;
    if (o->closed) return;
    o->closed = 1;
    if (bound) ra_ofi__close_mrs(o);
    if (o->ep) (void)fi_close(&o->ep->fid);
    o->ep = NULL;
    if (!bound) ra_ofi__close_mrs(o);
}

/* The number of pending operations on the ring's memory. A peer that has parted uses no credit. */
static int ra_ofi__in_flight(const ra_ofi *o) {
    int n = 0;
    for (int i = 0; i < RA_OFI__OPS; i++) {
        const ra_ofi__slot *s = &o->slot[i];
        const ra_ofi__peer *p = &o->peer[s->token.peer];
        if (!s->used || s->token.state != RA_OFI__FLYING || p->dead) continue;
        n += !o->one_sided || !s->receives || !p->left;
    }
    return n;
}

/* 1: every live peer has parted, and this rank's letters have gone to all of them. */
static int ra_ofi__all_parted(const ra_ofi *o) {
    for (int r = 0; r < o->ranks; r++) {
        const ra_ofi__peer *p = &o->peer[r];
        if (r == o->rank || p->dead) continue;
        if (!p->left || ra_ofi__flies(&p->goodbye) || ra_ofi__flies(&p->parted)) return 0;
    }
    return 1;
}

/* The number of operations on others' memory, which must end before this rank may send PARTED. */
static int ra_ofi__writes(const ra_ofi *o) {
    int n = 0;
    for (int i = 0; i < RA_OFI__OPS; i++)
        n += o->slot[i].used && o->slot[i].token.state == RA_OFI__FLYING &&
             o->one_sided != o->slot[i].receives;
    return n;
}

/* Cancels receives, and asks peers to discard sends that may have no receive: with some providers
 * they would never end. */
static void ra_ofi__part_begin(ra_ofi *o) {
    for (int i = 0; i < RA_OFI__OPS; i++) {
        ra_ofi__slot *s = &o->slot[i];
        if (!s->used || s->token.state != RA_OFI__FLYING || o->one_sided) continue;
        if (s->receives) (void)fi_cancel(&o->ep->fid, &s->token.context);
        if (s->receives || s->note.token.state != RA_OFI__IDLE) continue;
        s->note.letter.channel = (uint32_t)s->channel;
        s->note.letter.number = s->number;
        ra_ofi__write(o, &s->note, RA_OFI__DRAIN, s->token.peer);
    }
}

/* Discards the messages that peers asked to discard, unless an op has received them or will.
 * Returns how many are left. */
static int ra_ofi__drain(ra_ofi *o) {
    int n = 0;
    for (int i = 0; i < RA_OFI__OPS; i++) {
        ra_ofi__bin *b = &o->bin[i];
        ra_ofi__peer *p = &o->peer[b->token.peer];
        uint32_t ahead = (b->number - p->number[1][b->channel]) & RA_OFI__NUMBERS;
        n += (b->token.state == RA_OFI__DUE || b->token.state == RA_OFI__FLYING) && !p->dead;
        if (b->token.state != RA_OFI__DUE ||
            ra_ofi__awaiting(o, (uint32_t)b->token.peer, b->channel, b->number, RA_OFI__NUMBERS))
            continue;
        b->token.what = RA_OFI__BIN;
        b->token.state = RA_OFI__DONE;
        if (ahead > RA_OFI__NUMBERS / 2 &&
            p->cancelled[b->channel][b->number % RA_OFI__OPS] != (uint64_t)b->number + 1)
            continue;
        b->token.state = fi_trecv(o->ep, b->bytes, sizeof b->bytes, ra_ofi__letter_desc(o),
                                  FI_ADDR_UNSPEC, ra_ofi__tag(0, (int)b->channel, b->token.peer,
                                                              b->number), 0, &b->token.context)
                             ? RA_OFI__DUE : RA_OFI__FLYING;
    }
    return n;
}

/* Cancels receives, lets other operations end, and parts. 1: all others have parted too. 0: the
 * time is over, or nothing has moved for `patience_ns`. */
static int ra_ofi__part(ra_ofi *o, int64_t patience_ns, int64_t until_ns) {
    int64_t ended = o->ended, now = ra_now_ns(), moved = now;
    ra_ofi__part_begin(o);
    for (int round = 0;; round++) {
        ra_ofi__move(o);
        ra_ofi__bury(o);
        if (!ra_ofi__writes(o)) ra_ofi__tell_all(o, RA_OFI__PARTED, 0);
        if (!ra_ofi__drain(o) && ra_ofi__all_parted(o) && !ra_ofi__in_flight(o)) return 1;
        now = ra_now_ns();
        if (ended != o->ended) moved = now;
        ended = o->ended;
        if (now >= until_ns || now - moved > patience_ns) return 0;
        if (round >= 100) ra_ofi__nap(50000);
    }
}

static int ra_ofi__quiesce(void *ctx, int64_t deadline_ns) {
    ra_ofi *o = (ra_ofi *)ctx;
    int why = __atomic_load_n(&o->why, __ATOMIC_ACQUIRE), late;
    if (o->closed) return RA_OK;
    if (!deadline_ns) deadline_ns = INT64_MAX;
    late = deadline_ns <= ra_now_ns();
    if (!why) (void)ra_ofi__abort(o, RA_E_ABORTED);
    ra_ofi__tell_all(o, RA_OFI__GOODBYE, why ? why : RA_E_ABORTED);
    ra_ofi__drop_ops(o, -1, RA_E_ABORTED);
    if (ra_ofi__part(o, o->d.patience_ns, deadline_ns) || !ra_ofi__in_flight(o)) return RA_OK;
    if (late || o->reaches || o->frail) return RA_E_UNSAFE;
    ra_ofi__shut(o);
    return RA_OK;
}

static const char *ra_ofi__error_text(void *ctx, int code) {
    ra_ofi *o = (ra_ofi *)ctx;
    return o->text_code == code ? o->text : NULL;
}

/* ========================================================================== opening */
static ra_status ra_ofi__refuse(const ra_ofi_desc *d, ra_status status, const char *field,
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

static ra_status ra_ofi__refuse_code(const ra_ofi *o, const char *call, int code) {
    return ra_ofi__refuse(&o->d, RA_E_IO, "provider", "%s: %s failed: %s", o->d.provider, call,
                          fi_strerror(code < 0 ? -code : code));
}

/* A hash of this boot of this machine and of its process name space, in which a pid is unique. */
static uint64_t ra_ofi__machine(void) {
    char text[128] = "";
    uint64_t h = 0xcbf29ce484222325u;
    ssize_t n = -1;
    int f = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    if (f >= 0) n = read(f, text, sizeof text - 1);
    if (f >= 0) close(f);
    if (n <= 0) return 0;
    text[n] = 0;
    h = ra_ofi__hash(h, text);
    n = readlink("/proc/self/ns/pid", text, sizeof text - 1);
    if (n <= 0) return 0;
    text[n] = 0;
    return ra_ofi__hash(h, text);
}

/* Splits "host:port" or "[v6]:port"; the port may be missing. */
static int ra_ofi__split(const char *address, char *host, char *port, size_t room) {
    const char *colon = strrchr(address, ':'), *end;
    if (colon && address[0] != '[' && strchr(address, ':') != colon) colon = NULL; /* bare v6 */
    if (colon && address[0] == '[' && colon[-1] != ']') colon = NULL;
    end = colon ? colon : address + strlen(address);
    if (address[0] == '[' && end[-1] == ']') address++, end--;
    if (end == address || (size_t)(end - address) >= room || (colon && strlen(colon) > room))
        return -1;
    memcpy(host, address, (size_t)(end - address));
    host[end - address] = 0;
    snprintf(port, room, "%s", colon ? colon + 1 : "");
    return 0;
}

/* What the provider offers, at `address` if it is not null. source: 1: it is this rank's own. */
static int ra_ofi__info(const ra_ofi_desc *d, const char *address, int source,
                        struct fi_info **out) {
    struct fi_info *hints = fi_allocinfo();
    char host[256], port[256];
    int code;
    if (!hints) return -FI_ENOMEM;
    if (address && ra_ofi__split(address, host, port, sizeof host)) {
        fi_freeinfo(hints);
        return -FI_EINVAL;
    }
    hints->caps = FI_TAGGED | (d->one_sided ? FI_RMA | FI_WRITE | FI_REMOTE_WRITE : 0);
    hints->mode = FI_CONTEXT | FI_CONTEXT2;
    hints->ep_attr->type = FI_EP_RDM;
    hints->domain_attr->resource_mgmt = FI_RM_ENABLED;
    hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED |
                                  FI_MR_PROV_KEY | FI_MR_ENDPOINT;
    hints->fabric_attr->prov_name = strdup(d->provider);
    code = fi_getinfo(FI_VERSION(1, 15), address ? host : NULL, address && port[0] ? port : NULL,
                      address && source ? FI_SOURCE : 0, hints, out);
    fi_freeinfo(hints);
    return code;
}

/* Opens endpoint, queue and address table, and completes this rank's record. */
static ra_status ra_ofi__endpoint(ra_ofi *o) {
    const char *address = o->d.addresses ? o->d.addresses[o->rank] : o->d.address;
    struct fi_av_attr av;
    struct fi_cq_attr cq;
    size_t bytes = sizeof o->record.address;
    int code = ra_ofi__info(&o->d, address, 1, &o->info);
    memset(&av, 0, sizeof av);
    memset(&cq, 0, sizeof cq);
    cq.format = FI_CQ_FORMAT_TAGGED;
    cq.size = 4 * RA_OFI__OPS + RA_OFI__INBOX + 8 * (size_t)o->ranks;
    av.count = (size_t)o->ranks;
    if (code == -FI_ENODATA)
        return ra_ofi__refuse(&o->d, RA_E_TRANSPORT, "provider",
                              "%s: this libfabric has no such provider%s%s", o->d.provider,
                              address ? ", or not at address " : "", address ? address : "");
    if (code) return ra_ofi__refuse_code(o, "fi_getinfo", code);
    code = fi_fabric(o->info->fabric_attr, &o->fabric, NULL);
    if (!code) code = fi_domain(o->fabric, o->info, &o->domain, NULL);
    if (code) return ra_ofi__refuse_code(o, "fi_domain", code);
    code = fi_endpoint(o->domain, o->info, &o->ep, NULL);
    if (!code) code = fi_av_open(o->domain, &av, &o->av, NULL);
    if (!code) code = fi_cq_open(o->domain, &cq, &o->cq, NULL);
    if (!code) code = fi_ep_bind(o->ep, &o->av->fid, 0);
    if (!code) code = fi_ep_bind(o->ep, &o->cq->fid, FI_TRANSMIT | FI_RECV);
    if (!code) code = fi_enable(o->ep);
    if (!code) code = fi_getname(&o->ep->fid, o->record.address, &bytes);
    if (code) return ra_ofi__refuse_code(o, "making an endpoint", code);
    o->record.address_bytes = (uint32_t)bytes;
    o->reaches = !strncmp(o->info->fabric_attr->prov_name, "shm", 3);
    o->frail = strstr(o->info->fabric_attr->prov_name, "rxm") != NULL;
    o->registers = o->d.registers || o->one_sided ||
                   (o->info->domain_attr->mr_mode & FI_MR_LOCAL) != 0;
    return RA_OK;
}

static ra_status ra_ofi__know(ra_ofi *o, int rank, const void *address) {
    if (fi_av_insert(o->av, address, 1, &o->peer[rank].at, 0, NULL) == 1) return RA_OK;
    return ra_ofi__refuse(&o->d, RA_E_IO, "addresses", "the provider does not take the address of "
                                                       "rank %d", rank);
}

static ra_status ra_ofi__know_record(ra_ofi *o, int rank, const ra_ofi__record *r) {
    char text[160];
    ra_ofi__judge(o, r, text, sizeof text);
    if (!text[0] && r->rank != rank)
        snprintf(text, sizeof text, "the record of rank %d says that it is of rank %d", rank,
                 r->rank);
    if (text[0]) return ra_ofi__refuse(&o->d, RA_E_SHAPE, "record", "%s", text);
    return ra_ofi__know(o, rank, r->address);
}

/* -------------------------------------------------------------------------- who is where */
static ra_status ra_ofi__by_exchange(ra_ofi *o) {
    ra_ofi__record *all = (ra_ofi__record *)calloc((size_t)o->ranks, sizeof *all);
    ra_status s = RA_OK;
    if (!all) return ra_ofi__refuse(&o->d, RA_E_NOMEM, "memory", "calloc returned null");
    if (o->d.exchange(o->d.exchange_ctx, &o->record, all, sizeof *all))
        s = ra_ofi__refuse(&o->d, RA_E_IO, "exchange", "returned an error");
    for (int r = 0; r < o->ranks && !s; r++)
        if (r != o->rank) s = ra_ofi__know_record(o, r, &all[r]);
    free(all);
    return s;
}

static void ra_ofi__path(const ra_ofi *o, int rank, const char *more, char *path) {
    snprintf(path, sizeof o->path, "%.440s/ra_ofi.%llu.%u.%d%s", o->d.directory,
             (unsigned long long)o->d.world, o->d.ring, rank, more);
}

/* A rank that was known has died before all have met. */
static ra_status ra_ofi__lost(ra_ofi *o) {
    ra_ofi__look(o, ra_now_ns());
    for (int r = 0; r < o->ranks; r++)
        if (o->peer[r].gone_ns) return ra_ofi__refuse(&o->d, RA_E_PEER, "ranks", "%s", o->text);
    return RA_OK;
}

static ra_status ra_ofi__by_directory(ra_ofi *o) {
    ra_ofi__record mine = o->record;
    char path[sizeof o->path];
    ssize_t put = -1;
    int f;
    ra_ofi__path(o, o->rank, ".new", path);
    ra_ofi__path(o, o->rank, "", o->path);
    (void)unlink(o->path);             /* of a rank that crashed */
    f = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (f >= 0) put = write(f, &mine, sizeof mine);
    if (f < 0 || close(f) || put != (ssize_t)sizeof mine || rename(path, o->path)) {
        (void)unlink(path);
        o->path[0] = 0;
        return ra_ofi__refuse(&o->d, RA_E_IO, "directory", "cannot write a file in %.120s: %s",
                              o->d.directory, strerror(errno));
    }
    for (int r = 0; r < o->ranks; r++) {
        ra_ofi__record record;
        ra_status s;
        if (r == o->rank) continue;
        ra_ofi__path(o, r, "", path);
        for (;;) {
            ssize_t got = -1;
            f = open(path, O_RDONLY | O_CLOEXEC);
            if (f >= 0) got = read(f, &record, sizeof record);
            if (f >= 0) close(f);
            if (got == (ssize_t)sizeof record && (record.rank != r || !ra_ofi__watch(o, &record)))
                break;                 /* not of a process that has crashed */
            if (ra_ofi__lost(o)) return RA_E_PEER;
            if (ra_now_ns() > o->d.deadline_ns)
                return ra_ofi__refuse(&o->d, RA_E_TIMEOUT, "deadline_ns",
                                      "rank %d has not left a file in %.120s by the deadline", r,
                                      o->d.directory);
            ra_ofi__nap(2000000);
        }
        s = ra_ofi__know_record(o, r, &record);
        if (s) return s;
    }
    return RA_OK;
}

static ra_status ra_ofi__by_list(ra_ofi *o) {
    for (int r = 0; r < o->ranks; r++) {
        struct fi_info *info = NULL;
        ra_status s;
        int code;
        if (r == o->rank) continue;
        code = ra_ofi__info(&o->d, o->d.addresses[r], 0, &info);
        if (code || !info->dest_addr) {
            if (info) fi_freeinfo(info);
            return ra_ofi__refuse(&o->d, RA_E_IO, "addresses", "%s is none for %s: %s",
                                  o->d.addresses[r], o->d.provider, fi_strerror(-code));
        }
        s = ra_ofi__know(o, r, info->dest_addr);
        fi_freeinfo(info);
        if (s) return s;
    }
    return RA_OK;
}

/* -------------------------------------------------------------------------- hellos */
/* Sends the hellos that are due; 1: all have met, and each rank has learnt it. */
static int ra_ofi__met(ra_ofi *o, int retry) {
    int missing = 0;
    for (int r = 0; r < o->ranks; r++) {
        ra_ofi__peer *p = &o->peer[r];
        int sent = p->hello.token.state == RA_OFI__DONE && p->hello.letter.why == 1;
        if (r == o->rank) continue;
        missing += !p->heard || !p->hears || !sent;
        if (ra_ofi__flies(&p->hello) || (p->hello.token.state == RA_OFI__FAILED && !retry) ||
            (p->hello.token.state == RA_OFI__DONE && p->hello.letter.why == p->heard))
            continue;
        p->hello.letter.why = p->heard;
        p->hello.letter.record = o->record;
        ra_ofi__write(o, &p->hello, RA_OFI__HELLO, r);
    }
    return missing == 0;
}

/* Waits until every rank has a hello from every other and knows that its own have come. Then all
 * connections are made, and the file with this rank's address is removed. */
static ra_status ra_ofi__meet(ra_ofi *o) {
    int64_t tried = 0;
    for (int i = 0; i < RA_OFI__INBOX; i++) ra_ofi__open_box(o, &o->inbox[i]);
    for (;;) {
        int64_t now = ra_now_ns();
        int retry = now - tried > RA_OFI__RETRY_MS * RA_OFI__MS, r = 0;
        if (retry) tried = now;
        if (ra_ofi__met(o, retry)) break;
        ra_ofi__move(o);
        if (ra_ofi__lost(o)) return RA_E_PEER;
        if (o->broken) return ra_ofi__refuse(&o->d, o->broken, "hello", "%s", o->text);
        if (now > o->d.deadline_ns) {
            while (r == o->rank || (o->peer[r].heard && o->peer[r].hears && r < o->ranks - 1)) r++;
            return ra_ofi__refuse(&o->d, RA_E_TIMEOUT, "deadline_ns",
                                  "rank %d has not been heard of by the deadline%s%s", r,
                                  o->peer[r].hello.token.state == RA_OFI__FAILED ? ": " : "",
                                  o->peer[r].hello.token.state == RA_OFI__FAILED
                                      ? fi_strerror(o->peer[r].hello.token.error) : "");
        }
        ra_ofi__nap(50000);
    }
    for (int r = 0; r < o->ranks; r++) o->peer[r].moved_ns = ra_now_ns();
    if (o->path[0]) (void)unlink(o->path);
    o->path[0] = 0;
    ra_ofi__unlink(ra_ofi__file(o, &o->record)); /* all others have mapped it: they said hello */
    return RA_OK;
}

/* -------------------------------------------------------------------------- the context */
/* One block for all letters, bins and contexts, because it may have to be registered. */
static ra_status ra_ofi__memory(ra_ofi *o) {
    size_t peers = (size_t)o->ranks * sizeof *o->peer, slots = RA_OFI__OPS * sizeof *o->slot;
    void *p = NULL;
    int code = 0;
    peers = (peers + 63) / 64 * 64;
    slots = (slots + 63) / 64 * 64;
    o->bytes = peers + slots + RA_OFI__INBOX * sizeof *o->inbox + RA_OFI__OPS * sizeof *o->bin;
    o->watched = (struct pollfd *)calloc((size_t)o->ranks, sizeof *o->watched);
    o->credits = (ra_ofi__credit *)calloc(o->one_sided ? (size_t)o->ranks * RA_OFI__CHANNELS *
                                                             RA_OFI__OPS : (size_t)1,
                                          sizeof *o->credits);
    if (!o->watched || !o->credits || posix_memalign(&p, 4096, o->bytes))
        return ra_ofi__refuse(&o->d, RA_E_NOMEM, "ranks", "no memory for %d ranks", o->ranks);
    memset(p, 0, o->bytes);
    o->memory = p;
    o->peer = (ra_ofi__peer *)p;
    o->slot = (ra_ofi__slot *)(void *)((uint8_t *)p + peers);
    o->inbox = (ra_ofi__note *)(void *)((uint8_t *)p + peers + slots);
    o->bin = (ra_ofi__bin *)(void *)(o->inbox + RA_OFI__INBOX);
    for (int r = 0; r < o->ranks; r++) {
        o->peer[r].pidfd = -1;
        if (o->one_sided)
            o->peer[r].credit = o->credits + (size_t)r * RA_OFI__CHANNELS * RA_OFI__OPS;
    }
    if (o->info->domain_attr->mr_mode & FI_MR_LOCAL || o->d.registers)
        code = ra_ofi__register(o, p, o->bytes, &o->letters);
    return code ? ra_ofi__refuse_code(o, "fi_mr_reg", code) : RA_OK;
}

static void ra_ofi__fill(ra_ofi *o) {
    const size_t most = (size_t)1 << 46;
    ra_transport *t = &o->tp;
    t->size = (uint32_t)sizeof *t;
    t->abi = RA_TRANSPORT_ABI;
    t->caps = RA_CAP_ANY_PEER | RA_CAP_ANY_THREAD | RA_CAP_DEADLINE;
    t->channels = RA_OFI__CHANNELS;
    t->tag_bits = 64;                  /* they do not travel */
    t->max_ops = RA_OFI__OPS;
    t->rank = o->rank;
    t->ranks = o->ranks;
    t->max_msg = o->info->ep_attr->max_msg_size < most ? o->info->ep_attr->max_msg_size : most;
    t->align = 64;
    t->name = o->info->fabric_attr->prov_name;
    t->ctx = o;
    t->turn = &o->turn;
    t->post = ra_ofi__post;
    t->poll = ra_ofi__poll;
    t->wait = ra_ofi__wait;
    t->reg = o->registers ? ra_ofi__reg : NULL;
    t->dereg = o->registers ? ra_ofi__dereg : NULL;
    t->abort = ra_ofi__abort;
    t->quiesce = ra_ofi__quiesce;
    t->error_text = ra_ofi__error_text;
}

static void ra_ofi__free(ra_ofi *o) {
    if (o->slot) ra_ofi__shut(o);
    else if (o->ep) (void)fi_close(&o->ep->fid);
    if (o->cq) (void)fi_close(&o->cq->fid);
    if (o->av) (void)fi_close(&o->av->fid);
    if (o->domain) (void)fi_close(&o->domain->fid);
    if (o->fabric) (void)fi_close(&o->fabric->fid);
    if (o->info) fi_freeinfo(o->info);
    for (int r = 0; o->peer && r < o->ranks; r++)
        if (o->peer[r].pidfd >= 0) close(o->peer[r].pidfd);
    while (o->mrs) {
        ra_ofi__mr *m = o->mrs;
        o->mrs = m->next;
        free(m);
    }
    free(o->memory);
    free(o->credits);
    free(o->watched);
    free(o);
}

/* RA_OFI_ADDRESSES as a list that is freed as one block; null: not set, or of another length. */
static const char **ra_ofi__environment(int ranks) {
    const char *text = getenv("RA_OFI_ADDRESSES");
    size_t list = (size_t)ranks * sizeof(char *), n = text ? strlen(text) + 1 : 0;
    const char **out = n ? (const char **)malloc(list + n) : NULL;
    int found = 0;
    char *at;
    if (!out) return NULL;
    at = (char *)out + list;
    memcpy(at, text, n);
    while (at && found < ranks) {
        char *comma = strchr(at, ',');
        out[found++] = at;
        at = comma ? comma + 1 : NULL;
        if (comma) *comma = 0;
    }
    if (found == ranks && !at) return out;
    free(out);
    return NULL;
}

static ra_status ra_ofi__check(const ra_ofi_desc *d) {
    if (!d->provider) return ra_ofi__refuse(d, RA_E_NULL, "provider", "is null");
    if (strlen(d->provider) >= sizeof((ra_ofi__record *)0)->provider)
        return ra_ofi__refuse(d, RA_E_RANGE, "provider", "is too long to be one");
    if (d->ranks < 1 || d->ranks > RA_OFI_MAX_RANKS)
        return ra_ofi__refuse(d, RA_E_RANGE, "ranks", "must be 1 to %d, is %d", RA_OFI_MAX_RANKS,
                              d->ranks);
    if (d->rank < 0 || d->rank >= d->ranks)
        return ra_ofi__refuse(d, RA_E_RANGE, "rank", "must be 0 to %d, is %d", d->ranks - 1,
                              d->rank);
    if (!d->exchange && !d->directory && !d->addresses && d->ranks > 1)
        return ra_ofi__refuse(d, RA_E_UNSET, "directory",
                              "neither exchange, directory nor addresses are given, and "
                              "RA_OFI_ADDRESSES is not a list of %d", d->ranks);
    if (d->addresses && !d->exchange && !d->directory && !strcmp(d->provider, "shm"))
        return ra_ofi__refuse(d, RA_E_TRANSPORT, "addresses", "shm takes no list: use directory");
    if (d->patience_ns < 0) return ra_ofi__refuse(d, RA_E_RANGE, "patience_ns", "is negative");
    return RA_OK;
}

static void ra_ofi__introduce(ra_ofi *o) {
    ra_ofi__record *r = &o->record;
    r->magic = RA_OFI__MAGIC;
    r->version = RA_OFI__VERSION;
    r->abi = RA_TRANSPORT_ABI;
    r->world = o->d.world;
    r->ring = o->d.ring;
    r->shape = o->d.shape;
    r->machine = ra_ofi__machine();
    r->pid = (int64_t)getpid();
    r->rank = o->rank;
    r->ranks = o->ranks;
    r->one_sided = o->one_sided;
    snprintf(r->provider, sizeof r->provider, "%s", o->d.provider);
}

static ra_status ra_ofi__begin(ra_ofi *o) {
    ra_status s = ra_ofi__endpoint(o);
    if (!s) s = ra_ofi__memory(o);
    if (s || o->ranks == 1) return s;
    if (o->d.exchange) s = ra_ofi__by_exchange(o);
    else if (o->d.directory) s = ra_ofi__by_directory(o);
    else s = ra_ofi__by_list(o);
    return s ? s : ra_ofi__meet(o);
}

/* Returns when all ranks have met, or refuses at the deadline. */
RA_OFI_API ra_status ra_ofi_open(ra_ofi **out, const ra_ofi_desc *desc) {
    const char **list = NULL;
    ra_ofi_desc d;
    ra_status s;
    ra_ofi *o;
    if (!out || !desc) return RA_E_NULL;
    *out = NULL;
    d = *desc;
    if (!d.exchange && !d.directory && !d.addresses && d.ranks > 0 && d.ranks <= RA_OFI_MAX_RANKS)
        d.addresses = list = ra_ofi__environment(d.ranks);
    if (d.exchange || d.directory) d.addresses = NULL;
    if (d.provider) d.one_sided |= !strcmp(d.provider, "shm") || !strcmp(d.provider, "net") ||
                                   !strcmp(d.provider, "tcp");
    if (!d.deadline_ns) d.deadline_ns = ra_deadline_ms(60000);
    s = ra_ofi__check(&d);
    o = s ? NULL : (ra_ofi *)calloc(1, sizeof *o);
    if (!s && !o) s = ra_ofi__refuse(&d, RA_E_NOMEM, "memory", "calloc returned null");
    if (!s) {
        if (!d.patience_ns) d.patience_ns = RA_OFI__PATIENCE_MS * RA_OFI__MS;
        o->d = d;
        o->rank = d.rank;
        o->ranks = d.ranks;
        o->one_sided = d.one_sided != 0;
        ra_ofi__introduce(o);
        s = ra_ofi__begin(o);
    }
    free(list);
    if (s) {
        if (o) ra_ofi__free(o);
        return s;
    }
    ra_ofi__fill(o);
    *out = o;
    return RA_OK;
}

/* Call it after the rings on it; null is fine. Waits until all ranks have called it, at most 10 s,
 * because a rank that left early would delay messages that its provider still holds. After a
 * failure it waits no longer than quiesce. RA_E_UNSAFE: as there, and the context is leaked. */
RA_OFI_API ra_status ra_ofi_close(ra_ofi *ofi) {
    if (!ofi) return RA_OK;
    if (!ofi->closed && !ra_ofi__verdict(ofi))
        (void)ra_ofi__part(ofi, INT64_MAX, ra_deadline_ms(RA_OFI__CLOSE_MS));
    else if (ra_ofi__quiesce(ofi, ra_deadline_ms(RA_OFI__CLOSE_MS))) return RA_E_UNSAFE;
    ra_ofi__free(ofi);
    return RA_OK;
}

/* Valid as long as ofi. */
RA_OFI_API const ra_transport *ra_ofi_transport(const ra_ofi *ofi) { return &ofi->tp; }

#undef RA_OFI__MS
#endif
