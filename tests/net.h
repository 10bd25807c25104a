/* A network in memory for worlds whose ranks are all stepped by one thread: a level-1 transport
 * that is as difficult as the contract in ringattn.h allows. It delays messages, takes only a
 * prefix of what is posted, holds no message or a few, lends memory, and fails on request. It also
 * watches: it counts each breach of the contract by the library and describes the first.
 *
 * Time is a counter that the test moves (now). Nothing here blocks, sleeps or reads a clock. */
#if !defined(RINGATTN_TEST_NET_H)
#define RINGATTN_TEST_NET_H

#include "harness.h"
#include "small.h"
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { NET_RANKS = 64, NET_CHANNELS = 2, NET_SLOTS = 80, NET_REGIONS = 64 };
enum { NET_POISON = 0xFF };            /* NaN as f32, f16 and bf16, and no length or address */

/* What can go wrong with the message numbered `at`, counted from 0 over all sends of `rank`, or,
 * for POST and POLL, with that call of `rank`. */
enum {
    NET_FINE,
    NET_DAMAGE,                        /* byte `byte` is changed by xor with `value` */
    NET_SHORT,                         /* done says `value` bytes less */
    NET_LONG,                          /* done says `value` bytes more */
    NET_TRUNC,                         /* the receive ends with RA_E_TRUNC */
    NET_DOUBLE,                        /* the message comes twice */
    NET_DROP,                          /* it never comes, but its send succeeds */
    NET_SWAP,                          /* it comes after the next one on its link */
    NET_STALE,                         /* an earlier one of the link and its length comes instead */
    NET_STALL,                         /* it comes `value` units of time later */
    NET_RECV_FAILS,                    /* the receive ends with `value` */
    NET_SEND_FAILS,                    /* the send ends with `value` */
    NET_POST_FAILS, NET_POLL_FAILS     /* the call returns `value` */
};

typedef struct net_fault {
    int kind, rank, value, byte;
    int64_t at;
    int fired;                         /* how often it happened */
    int peer;                          /* the receiver it happened to */
} net_fault;

typedef struct net_config {            /* what the transport is like; chances in percent */
    int ranks;
    uint64_t seed;
    int64_t delay;                     /* most units of time that a message takes */
    int capacity;                      /* messages a link holds without a receive; 0: rendezvous */
    int refuse;                        /* chance that post leaves an op idle */
    int at_once;                       /* chance that post completes what it can at once */
    int quiet_done;                    /* chance that `done` stays 0, which counts as len */
    int lend;                          /* chance that a receive lends a private copy, */
    int lend_sender;                   /* or the sender's memory, which then stays pending */
    int any_peer, any_thread, shared;  /* RA_CAP_* */
    int train;                         /* 1: two channels and an op more, for gradients */
    int reg;                           /* 0: no callback, 1: works, 2: fails */
    int bare;                          /* 1: neither abort nor quiesce */
    int told;                          /* 1: the others learn of an abort as RA_E_ABORTED, 2: as
                                        * RA_E_PEER of the ops, 0: not at all */
    int unsafe;                        /* 1: quiesce fails */
    int keep;                          /* chance that poll does not report a done op */
    uint32_t max_ops, tag_bits;
    size_t align, max_msg;
    net_fault fault;
} net_config;

struct net;

typedef struct net_message {
    struct net_message *next;
    uint8_t *bytes;                    /* as they were when posted */
    size_t len;
    uint64_t tag;
    int64_t due;
    int slot;                          /* of the sender while it waits for this, or -1 */
    int fault;                         /* NET_* that the receiver will meet */
} net_message;

enum { NET_FREE, NET_WAITS, NET_READY, NET_LENT };
typedef struct net_slot {              /* an op that was accepted */
    ra_transport_op *op;
    ra_transport_op copy;                        /* as it was then: the library must not change
                                        * it */
    int use;                           /* NET_FREE ... */
    int status;                        /* what the op becomes, when READY */
    net_message *message;              /* receive: what arrived */
    uint8_t *bytes;                    /* send: what the buffer must still hold */
    int from_slot;                     /* receive of the sender's memory: its slot */
    int link;                          /* link it belongs to */
    int next;                          /* receive: the one behind it on its link */
} net_slot;

typedef struct net_loan {
    void *ptr;
    size_t len;
    uint64_t sum;
    int rank, from_rank, from_slot;    /* lender's slot, or -1: a private copy */
    int back;                          /* 1: given back */
} net_loan;

typedef struct net_rank {
    struct net *net;
    ra_transport transport;
    net_slot slots[NET_SLOTS];
    int pending;
    int aborts, quiesces, regs, deregs, posts, polls;
    int why;                           /* of abort */
    int64_t sends;                     /* messages sent so far */
    int64_t messages[2], bytes[2];     /* [0] received, [1] sent, on channel 0 */
    int64_t words[2], word_bytes[2];   /* the same on channel 1 */
    int64_t hellos[2];                 /* messages of 64 bytes on channel 0, in none of the above */
    void *region[NET_REGIONS];
    size_t region_bytes[NET_REGIONS];
} net_rank;

typedef struct net_link {
    net_message *first, *last;
    net_message *past;                 /* copies of what was sent, newest first; for NET_STALE */
    int held, recv_first, recv_last;
} net_link;

typedef struct net {
    net_config c;
    net_rank *rank;                    /* [ranks] */
    net_link *link;                    /* [ranks][ranks][NET_CHANNELS] */
    int links;
    net_loan *loans;
    int loan_count, loan_room;
    int64_t now;
    h_rng rng;
    int thread;                        /* ith of the step under way */
    int dead;                          /* rank whose death the others learn of, -1: none */
    FILE *log;                         /* the schedule is written to it; null: nowhere */
    int expect_faults;                 /* 1: tags and lengths may differ, ops may be left */
    int breaches;
    char why[200];
} net;

static inline uint32_t net_rand(net *w, uint32_t below) {
    return h_next(&w->rng) % below;
}

static inline int net_chance(net *w, int percent) {
    return percent > 0 && (int)net_rand(w, 100) < percent;
}

static inline void net_breach(net *w, const char *format, ...) {
    va_list args;
    if (w->breaches++) return;
    va_start(args, format);
    vsnprintf(w->why, sizeof w->why, format, args);
    va_end(args);
}

static inline uint64_t net_sum(const void *ptr, size_t n) {
    const uint8_t *p = (const uint8_t *)ptr;
    uint64_t sum = 1469598103934665603u;
    for (size_t i = 0; i < n; i++) sum = (sum ^ p[i]) * 1099511628211u;
    return sum;
}

static inline int net_is(const void *ptr, size_t n, uint8_t value) {
    const uint8_t *p = (const uint8_t *)ptr;
    for (size_t i = 0; i < n; i++) if (p[i] != value) return 0;
    return 1;
}

static inline void *net_memory(size_t n, size_t align) {
    void *p = NULL;
    if (posix_memalign(&p, align < 64 ? 64 : align, n ? n : 1)) abort();
    return p;
}

/* -------------------------------------------------------------------------- checks */

static inline int net_rank_of(const net_rank *r) { return (int)(r - r->net->rank); }

static inline void net_check_thread(net_rank *r, const char *call) {
    net *w = r->net;
    if (!w->c.any_thread && w->thread != 0)
        net_breach(w, "%s from thread %d without RA_CAP_ANY_THREAD", call, w->thread);
}

static inline int net_is_neighbour(const net *w, int a, int b) {
    int n = w->c.ranks;
    return (a + 1) % n == b || (b + 1) % n == a;
}

static inline int net_has_loan(const net *w, int rank, const void *ptr, size_t len) {
    for (int i = w->loan_count - 1; i >= 0; i--) {
        const net_loan *l = &w->loans[i];
        if (l->rank == rank && !l->back && l->ptr == ptr && len <= l->len) return 1;
    }
    return 0;
}

/* Every op must be in registered memory and say so, except lent memory and shared words. */
static inline void net_check_mr(net_rank *r, const ra_transport_op *op) {
    net *w = r->net;
    if (w->c.reg != 1) {
        if (op->mr) net_breach(w, "mr without a registration");
        return;
    }
    if (w->c.shared) return;
    if (net_has_loan(w, net_rank_of(r), op->buf, op->len)) {
        if (op->mr) net_breach(w, "mr with memory that is lent");
        return;
    }
    for (int i = 0; i < NET_REGIONS; i++) {
        const uint8_t *a = (const uint8_t *)r->region[i], *b = (const uint8_t *)op->buf;
        if (a && b >= a && b + op->len <= a + r->region_bytes[i]) {
            if (op->mr != (void *)&r->region[i]) net_breach(w, "mr of another region");
            return;
        }
    }
    net_breach(w, "rank %d: a buffer that was not registered", net_rank_of(r));
}

static inline void net_check_op(net_rank *r, const ra_transport_op *op) {
    net *w = r->net;
    int me = net_rank_of(r);
    uint32_t bits = w->c.tag_bits ? w->c.tag_bits : 15;
    size_t align = w->c.align ? w->c.align : 64;
    if (op->kind != RA_MSG_SEND && op->kind != RA_MSG_RECV) net_breach(w, "op kind %d", op->kind);
    if (op->channel >= (w->c.shared || w->c.train ? 2 : 1))
        net_breach(w, "channel %d", op->channel);
    if (op->flags & ~RA_MSG_LOAN_OK) net_breach(w, "op flags %d", op->flags);
    if (op->flags && !(w->c.lend || w->c.lend_sender)) net_breach(w, "a loan that is not offered");
    if (op->flags && op->kind == RA_MSG_SEND) net_breach(w, "a send with RA_MSG_LOAN_OK");
    if (op->peer < 0 || op->peer >= w->c.ranks || op->peer == me)
        net_breach(w, "rank %d: peer %d of %d", me, op->peer, w->c.ranks);
    else if (!w->c.any_peer && !net_is_neighbour(w, me, op->peer))
        net_breach(w, "rank %d: peer %d without RA_CAP_ANY_PEER", me, op->peer);
    if (bits < 64 && op->tag >> bits) net_breach(w, "tag %llu", (unsigned long long)op->tag);
    if (!op->buf || !op->len) net_breach(w, "an op without bytes");
    if (op->channel == 0 && op->len < 64) net_breach(w, "a chunk of %zu bytes", op->len);
    if (w->c.max_msg && op->len > w->c.max_msg) net_breach(w, "%zu bytes in a message", op->len);
    if (op->kind == RA_MSG_RECV && op->channel == 0 && (uintptr_t)op->buf % align)
        net_breach(w, "a receive buffer off by %d", (int)((uintptr_t)op->buf % align));
    if (op->kind == RA_MSG_SEND && op->channel == 0 && (uintptr_t)op->buf % align &&
        !net_has_loan(w, me, op->buf, op->len))
        net_breach(w, "a send buffer off by %d", (int)((uintptr_t)op->buf % align));
    if (op->done) net_breach(w, "done not zero when posted");
    for (int i = 0; i < 8; i++) if (op->scratch[i]) net_breach(w, "scratch not zero when posted");
    net_check_mr(r, op);
}

/* -------------------------------------------------------------------------- messages */

static inline net_link *net_link_of(net *w, int from, int to, int channel) {
    return &w->link[(from * w->c.ranks + to) * NET_CHANNELS + channel];
}

static inline void net_enqueue(net_link *l, net_message *m) {
    m->next = NULL;
    if (l->last) l->last->next = m;
    else l->first = m;
    l->last = m;
}

static inline net_message *net_dequeue(net_link *l) {
    net_message *m = l->first;
    l->first = m->next;
    if (!l->first) l->last = NULL;
    return m;
}

/* A line of the schedule. */
static inline void net_log(const net *w, const char *format, ...) {
    va_list args;
    if (!w->log) return;
    va_start(args, format);
    vfprintf(w->log, format, args);
    va_end(args);
}

static inline void net_message_free(net_message *m) {
    if (!m) return;
    free(m->bytes);
    free(m);
}

static inline net_message *net_message_new(net *w, const ra_transport_op *op, int slot) {
    net_message *m = (net_message *)calloc(1, sizeof *m);
    if (!m) abort();
    m->bytes = (uint8_t *)net_memory(op->len, 64);
    memcpy(m->bytes, op->buf, op->len);
    m->len = op->len;
    m->tag = op->tag;
    m->slot = slot;
    m->due = w->now + (w->c.delay ? (int64_t)net_rand(w, (uint32_t)w->c.delay + 1) : 0);
    return m;
}

/* Puts the bytes of an earlier message of this length in place of its own; 0: there is none. */
static inline int net_stale(net_link *l, net_message *m) {
    const net_message *p = l->past;
    while (p && (p->len != m->len || !memcmp(p->bytes, m->bytes, m->len))) p = p->next;
    if (!p) return 0;
    memcpy(m->bytes, p->bytes, m->len);
    return 1;
}

static inline int net_fault_here(net_rank *r, int64_t count, int first, int last) {
    net_fault *f = &r->net->c.fault;
    return f->kind >= first && f->kind <= last && f->rank == net_rank_of(r) && f->at == count;
}

/* Puts a copy of the message on its link and applies the fault if this is its message. */
static inline void net_send(net_rank *r, ra_transport_op *op, int slot) {
    net *w = r->net;
    net_fault *f = &w->c.fault;
    net_link *l = net_link_of(w, net_rank_of(r), op->peer, op->channel);
    net_message *m = net_message_new(w, op, slot);
    int hit = net_fault_here(r, r->sends, NET_DAMAGE, NET_SEND_FAILS);
    r->sends++;
    if (f->kind == NET_STALE && f->rank == net_rank_of(r)) {
        net_message *past = net_message_new(w, op, -1);
        past->next = l->past;
        l->past = past;
    }
    if (hit && f->kind == NET_STALE) hit = net_stale(l, m);
    if (hit && f->kind == NET_STALL) m->due += f->value;
    net_log(w, "    %d -> %d channel %d: %zu bytes%s\n", net_rank_of(r), op->peer, op->channel,
            op->len, hit ? ", the fault" : "");
    if (hit) {
        f->fired++;
        f->peer = op->peer;
        m->fault = f->kind;
        if (f->kind == NET_DAMAGE) m->bytes[(size_t)f->byte % m->len] ^= (uint8_t)f->value;
    }
    if (hit && (f->kind == NET_DROP || f->kind == NET_SEND_FAILS)) {
        r->slots[slot].use = NET_READY;
        r->slots[slot].status = f->kind == NET_DROP ? RA_MSG_DONE : f->value;
        net_message_free(m);
        return;
    }
    if (l->first && l->last->fault == NET_SWAP) {      /* it waited for its successor: overtake */
        net_message *late = l->last, *p = l->first;
        if (p == late) l->first = m;
        else {
            while (p->next != late) p = p->next;
            p->next = m;
        }
        m->next = late;
        late->fault = NET_FINE;
    } else net_enqueue(l, m);
    if (hit && f->kind == NET_DOUBLE) net_enqueue(l, net_message_new(w, op, -1));
    if (l->held < w->c.capacity) {                     /* the link holds it: the send is done */
        l->held++;
        m->slot = -1;
        r->slots[slot].use = NET_READY;
        r->slots[slot].status = RA_MSG_DONE;
    }
}

/* Gives the first message of a link to the first receive. */
static inline void net_match(net *w, int from, int to, int channel) {
    net_link *l = net_link_of(w, from, to, channel);
    net_rank *s = &w->rank[from], *r = &w->rank[to];
    while (l->first && l->recv_first >= 0 && l->first->due <= w->now) {
        net_slot *in = &r->slots[l->recv_first];
        net_message *m;
        if (l->first->fault == NET_SWAP && !l->first->next) return;
        m = net_dequeue(l);
        l->recv_first = in->next;
        if (l->recv_first < 0) l->recv_last = -1;
        if ((m->len != in->op->len || m->tag != in->op->tag) && !w->expect_faults)
            net_breach(w, "%d to %d: sent %zu bytes, tag %llu; received %zu, tag %llu", from, to,
                       m->len, (unsigned long long)m->tag, in->op->len,
                       (unsigned long long)in->op->tag);
        in->use = NET_READY;
        in->message = m;
        in->from_slot = m->slot;
        in->status = RA_MSG_DONE;
        if (m->fault == NET_TRUNC) in->status = RA_E_TRUNC;
        if (m->fault == NET_RECV_FAILS) in->status = w->c.fault.value;
        if (m->slot < 0) {
            if (l->held > 0) l->held--;
        } else if (in->status == RA_MSG_DONE && m->len == in->op->len && m->fault == NET_FINE &&
                   (in->op->flags & RA_MSG_LOAN_OK) && net_chance(w, w->c.lend_sender)) {
            s->slots[m->slot].use = NET_LENT;
        } else {
            in->from_slot = -1;
            s->slots[m->slot].use = NET_READY;
            s->slots[m->slot].status = RA_MSG_DONE;
        }
        m->slot = -1;
    }
}

/* -------------------------------------------------------------------------- completion */

static inline void net_lend(net *w, int rank, net_slot *slot, void *ptr, int from_rank) {
    net_loan *loan;
    if (w->loan_count == w->loan_room) {
        w->loan_room = w->loan_room ? 2 * w->loan_room : 64;
        w->loans = (net_loan *)realloc(w->loans, (size_t)w->loan_room * sizeof *w->loans);
        if (!w->loans) abort();
    }
    loan = &w->loans[w->loan_count++];
    loan->ptr = ptr;
    loan->back = 0;
    loan->len = slot->op->len;
    loan->sum = net_sum(ptr, loan->len);
    loan->rank = rank;
    loan->from_rank = from_rank;
    loan->from_slot = slot->from_slot;
    slot->op->buf = ptr;
}

static inline void net_finish_recv(net_rank *r, net_slot *slot) {
    net *w = r->net;
    net_message *m = slot->message;
    ra_transport_op *op = slot->op;
    size_t n = m->len < op->len ? m->len : op->len, done = m->len;
    int from = op->peer;
    if (!net_is(op->buf, op->len, NET_POISON))
        net_breach(w, "rank %d: wrote into a receive buffer while PENDING", net_rank_of(r));
    if (slot->status == RA_MSG_DONE && slot->from_slot >= 0) {
        net_lend(w, net_rank_of(r), slot, (void *)w->rank[from].slots[slot->from_slot].copy.buf,
                 from);
    } else if (slot->status == RA_MSG_DONE && (op->flags & RA_MSG_LOAN_OK) && m->len == op->len &&
               net_chance(w, w->c.lend)) {
        net_lend(w, net_rank_of(r), slot, m->bytes, -1);
        m->bytes = NULL;
    } else {
        if (n) memcpy(op->buf, m->bytes, n);
    }
    if (m->fault == NET_SHORT) done -= (size_t)w->c.fault.value;
    if (m->fault == NET_LONG) done += (size_t)w->c.fault.value;
    if (done == op->len && net_chance(w, w->c.quiet_done)) done = 0;
    op->done = done;
    if (slot->status == RA_MSG_DONE && op->channel == 0 && op->len == 64) {
        r->hellos[0]++;
    } else if (slot->status == RA_MSG_DONE && op->channel == 0) {
        r->messages[0]++;
        r->bytes[0] += (int64_t)op->len;
    } else if (slot->status == RA_MSG_DONE) {
        r->words[0]++;
        r->word_bytes[0] += (int64_t)op->len;
    }
    net_message_free(m);
    slot->message = NULL;
}

static inline void net_finish_send(net_rank *r, net_slot *slot) {
    net *w = r->net;
    ra_transport_op *op = slot->op;
    if (memcmp(op->buf, slot->bytes, op->len))
        net_breach(w, "rank %d: changed a send buffer while PENDING", net_rank_of(r));
    op->done = net_chance(w, w->c.quiet_done) ? 0 : op->len;
    if (slot->status == RA_MSG_DONE && op->channel == 0 && op->len == 64) {
        r->hellos[1]++;
    } else if (slot->status == RA_MSG_DONE && op->channel == 0) {
        r->messages[1]++;
        r->bytes[1] += (int64_t)op->len;
    } else if (slot->status == RA_MSG_DONE) {
        r->words[1]++;
        r->word_bytes[1] += (int64_t)op->len;
    }
    free(slot->bytes);
    slot->bytes = NULL;
}

static inline void net_complete(net_rank *r, net_slot *slot) {
    ra_transport_op *op = slot->op;
    const ra_transport_op *was = &slot->copy;
    if (op->kind != was->kind || op->channel != was->channel || op->peer != was->peer ||
        op->flags != was->flags || op->tag != was->tag || op->buf != was->buf ||
        op->len != was->len || op->mr != was->mr || op->state != RA_MSG_PENDING)
        net_breach(r->net, "rank %d: changed an op while PENDING", net_rank_of(r));
    for (int i = 0; i < 8; i++)
        if (op->scratch[i] != (void *)slot)
            net_breach(r->net, "rank %d: changed the scratch of an op", net_rank_of(r));
    if (op->kind == RA_MSG_RECV) net_finish_recv(r, slot);
    else net_finish_send(r, slot);
    net_log(r->net, "    %d: a %s, peer %d, channel %d, is %d\n", net_rank_of(r),
            op->kind == RA_MSG_RECV ? "receive" : "send", op->peer, op->channel, slot->status);
    op->state = slot->status;
    slot->use = NET_FREE;
    r->pending--;
}

/* -------------------------------------------------------------------------- callbacks */

static inline void net_accept(net_rank *r, ra_transport_op *op) {
    net *w = r->net;
    int me = net_rank_of(r), at = 0;
    uint32_t most = w->c.max_ops ? w->c.max_ops : 2;
    net_slot *slot;
    net_link *l;
    while (at < NET_SLOTS && r->slots[at].use != NET_FREE) at++;
    if (at == NET_SLOTS) abort();
    if (++r->pending > (int)most)
        net_breach(w, "rank %d: %d ops pending, at most %u", me, r->pending, most);
    slot = &r->slots[at];
    memset(slot, 0, sizeof *slot);
    for (int i = 0; i < 8; i++) op->scratch[i] = slot;
    op->state = RA_MSG_PENDING;
    slot->op = op;
    slot->copy = *op;
    slot->use = NET_WAITS;
    slot->from_slot = slot->next = -1;
    if (op->kind == RA_MSG_SEND) {
        slot->bytes = (uint8_t *)net_memory(op->len, 64);
        memcpy(slot->bytes, op->buf, op->len);
        net_send(r, op, at);
        net_match(w, me, op->peer, op->channel);
    } else {
        memset(op->buf, NET_POISON, op->len);
        l = net_link_of(w, op->peer, me, op->channel);
        if (l->recv_last >= 0) r->slots[l->recv_last].next = at;
        else l->recv_first = at;
        l->recv_last = at;
        net_match(w, op->peer, me, op->channel);
    }
    if (slot->use == NET_READY && net_chance(w, w->c.at_once)) net_complete(r, slot);
}

/* What an abort elsewhere does to the calls of this rank; RA_OK: nothing. */
static inline int net_told(net_rank *r) {
    net *w = r->net;
    if (r->aborts) return RA_E_ABORTED;
    if (w->c.told != 1) return RA_OK;
    for (int i = 0; i < w->c.ranks; i++) if (w->rank[i].aborts) return RA_E_ABORTED;
    return RA_OK;
}

static inline int net_post(void *ctx, ra_transport_op *const *ops, int n) {
    net_rank *r = (net_rank *)ctx;
    net *w = r->net;
    uint8_t shut[NET_RANKS * NET_CHANNELS * 2] = { 0 };
    int idle = 0, told = net_told(r);
    net_check_thread(r, "post");
    if (r->aborts) net_breach(w, "rank %d: post after abort", net_rank_of(r));
    if (n < 0 || (n && !ops)) net_breach(w, "post of %d ops", n);
    if (told) return told;
    if (net_fault_here(r, r->posts++, NET_POST_FAILS, NET_POST_FAILS)) {
        w->c.fault.fired++;
        return w->c.fault.value;
    }
    for (int kind = RA_MSG_RECV; kind >= RA_MSG_SEND; kind--) {
        for (int i = 0; i < n; i++) {
            ra_transport_op *op = ops[i];
            uint8_t *closed;
            if (op->state != RA_MSG_IDLE || op->kind != kind) continue;
            net_check_op(r, op);
            if (w->breaches) return RA_E_IO;           /* do not follow what is broken */
            closed = &shut[(op->peer * NET_CHANNELS + op->channel) * 2 + (kind == RA_MSG_RECV)];
            if (!*closed && net_chance(w, w->c.refuse)) *closed = 1;
            if (*closed) idle++;
            else net_accept(r, op);
        }
    }
    return idle ? RA_AGAIN : RA_OK;
}

/* A receive from a rank that is dead or has aborted, or a send to it, ends with RA_E_PEER. So does
 * a send whose memory that rank has on loan: no release will come, and the sender, which may have
 * neither a deadline nor a watchdog, would never learn of it otherwise. */
static inline void net_fail_ops(net_rank *r) {
    net *w = r->net;
    for (int i = 0; i < NET_SLOTS && (w->c.told == 2 || w->dead >= 0); i++) {
        net_slot *slot = &r->slots[i];
        net_link *l;
        if (slot->use != NET_WAITS && slot->use != NET_LENT) continue;
        if (slot->op->peer != w->dead && (w->c.told != 2 || !w->rank[slot->op->peer].aborts))
            continue;
        if (slot->op->kind == RA_MSG_SEND) {
            l = net_link_of(w, net_rank_of(r), slot->op->peer, slot->op->channel);
            for (net_message *m = l->first; m; m = m->next) if (m->slot == i) m->slot = -1;
        } else {
            l = net_link_of(w, slot->op->peer, net_rank_of(r), slot->op->channel);
            if (l->first || l->recv_first != i) continue;
            l->recv_first = slot->next;
            if (slot->next < 0) l->recv_last = -1;
            slot->message = (net_message *)calloc(1, sizeof(net_message));
            if (!slot->message) abort();
        }
        slot->use = NET_READY;
        slot->status = RA_E_PEER;
    }
}

static inline int net_poll(void *ctx, ra_transport_op *const *ops, int n) {
    net_rank *r = (net_rank *)ctx;
    net *w = r->net;
    int me = net_rank_of(r), told = net_told(r);
    net_check_thread(r, "poll");
    if (r->quiesces) net_breach(w, "rank %d: poll after quiesce", me);
    if (told) return told;
    if (net_fault_here(r, r->polls++, NET_POLL_FAILS, NET_POLL_FAILS)) {
        w->c.fault.fired++;
        return w->c.fault.value;
    }
    for (int i = 0; i < NET_SLOTS; i++) {
        net_slot *slot = &r->slots[i];
        if (slot->use != NET_WAITS) continue;
        if (slot->op->kind == RA_MSG_RECV) net_match(w, slot->op->peer, me, slot->op->channel);
        else net_match(w, me, slot->op->peer, slot->op->channel);
    }
    net_fail_ops(r);
    for (int i = 0; i < n; i++) {
        int at = 0;
        if (ops[i]->state != RA_MSG_PENDING) continue;
        while (at < NET_SLOTS && (r->slots[at].use == NET_FREE || r->slots[at].op != ops[i])) at++;
        if (at == NET_SLOTS) net_breach(w, "rank %d: polls an op that was never accepted", me);
        else if (r->slots[at].use == NET_READY && !net_chance(w, w->c.keep))
            net_complete(r, &r->slots[at]);
    }
    return RA_OK;
}

static inline int net_reg(void *ctx, void *p, size_t n, void **mr) {
    net_rank *r = (net_rank *)ctx;
    r->regs++;
    if (r->net->c.reg == 2) return RA_E_IO;
    for (int i = 0; i < NET_REGIONS; i++) {
        if (r->region[i]) continue;
        r->region[i] = p;
        r->region_bytes[i] = n;
        *mr = (void *)&r->region[i];
        return RA_OK;
    }
    return RA_E_NOMEM;
}

static inline int net_dereg(void *ctx, void *mr) {
    net_rank *r = (net_rank *)ctx;
    void **region = (void **)mr;
    r->deregs++;
    if (region < r->region || region >= r->region + NET_REGIONS || !*region)
        net_breach(r->net, "dereg of what is not registered");
    else *region = NULL;
    if (r->pending && (!r->quiesces || r->net->c.unsafe))
        net_breach(r->net, "rank %d: dereg while ops are pending", net_rank_of(r));
    return RA_OK;
}

static inline int net_release(void *ctx, ra_transport_op *op) {
    net_rank *r = (net_rank *)ctx;
    net *w = r->net;
    int me = net_rank_of(r), at = w->loan_count - 1;
    net_loan *loan;
    net_check_thread(r, "release");
    while (at >= 0 && (w->loans[at].rank != me || w->loans[at].back ||
                       w->loans[at].ptr != op->buf)) at--;
    if (at < 0) {
        net_breach(w, "rank %d: releases what is not lent, or twice", me);
        return RA_E_IO;
    }
    loan = &w->loans[at];
    loan->back = 1;
    if (net_sum(loan->ptr, loan->len) != loan->sum) net_breach(w, "wrote into lent memory");
    for (int i = 0; i < NET_SLOTS; i++)
        if (r->slots[i].use != NET_FREE && r->slots[i].op->kind == RA_MSG_SEND &&
            r->slots[i].copy.buf == loan->ptr)
            net_breach(w, "rank %d: releases lent memory before its onward send is done", me);
    if (loan->from_rank < 0) {
        memset(loan->ptr, NET_POISON, loan->len);
        loan->sum = net_sum(loan->ptr, loan->len);
    } else {
        net_slot *slot = &w->rank[loan->from_rank].slots[loan->from_slot];
        if (slot->use == NET_LENT) {   /* otherwise that rank has failed or been told */
            slot->use = NET_READY;
            slot->status = RA_MSG_DONE;
        }
    }
    return RA_OK;
}

static inline int net_abort(void *ctx, int why) {
    net_rank *r = (net_rank *)ctx;
    if (r->aborts++) net_breach(r->net, "rank %d: abort called twice", net_rank_of(r));
    if (why > RA_E_MISMATCH || why < RA_E_UNSAFE) net_breach(r->net, "abort because of %d", why);
    r->why = why;
    net_log(r->net, "    %d: aborts because of %d\n", net_rank_of(r), why);
    return RA_OK;
}

/* Forgets all ops of the rank. What its peers still send to it, or receive from it, stays. */
static inline int net_quiesce(void *ctx, int64_t deadline_ns) {
    net_rank *r = (net_rank *)ctx;
    net *w = r->net;
    int me = net_rank_of(r);
    (void)deadline_ns;
    if (!r->aborts) net_breach(w, "rank %d: quiesce without abort", me);
    r->quiesces++;
    if (w->c.unsafe) return RA_E_IO;
    for (int i = 0; i < NET_SLOTS; i++) {
        net_slot *slot = &r->slots[i];
        if (slot->use == NET_FREE) continue;
        if (slot->op->kind == RA_MSG_SEND) {
            net_link *l = net_link_of(w, me, slot->op->peer, slot->op->channel);
            for (net_message *m = l->first; m; m = m->next) if (m->slot == i) m->slot = -1;
        } else if (slot->use == NET_WAITS) {
            net_link *l = net_link_of(w, slot->op->peer, me, slot->op->channel);
            l->recv_first = l->recv_last = -1;
        }
        free(slot->bytes);
        net_message_free(slot->message);
        memset(slot, 0, sizeof *slot);
    }
    r->pending = 0;
    return RA_OK;
}

static inline const char *net_error_text(void *ctx, int code) {
    (void)ctx;
    return code == -1234 ? "the cable is cut" : NULL;
}

/* -------------------------------------------------------------------------- world */

static inline net *net_create(const net_config *c) {
    net *w = (net *)calloc(1, sizeof *w);
    if (!w || c->ranks < 1 || c->ranks > NET_RANKS) abort();
    w->c = *c;
    w->rng.state = c->seed;
    (void)h_next(&w->rng);             /* the first number of a small seed is small */
    w->dead = -1;
    w->links = c->ranks * c->ranks * NET_CHANNELS;
    w->rank = (net_rank *)calloc((size_t)c->ranks, sizeof *w->rank);
    w->link = (net_link *)calloc((size_t)w->links, sizeof *w->link);
    if (!w->rank || !w->link) abort();
    w->expect_faults = c->fault.kind != NET_FINE;
    for (int i = 0; i < w->links; i++)
        w->link[i].recv_first = w->link[i].recv_last = -1;
    for (int i = 0; i < c->ranks; i++) {
        ra_transport *t = &w->rank[i].transport;
        w->rank[i].net = w;
        t->size = sizeof *t;
        t->abi = RA_TRANSPORT_ABI;
        t->caps = (uint32_t)((c->any_thread ? RA_CAP_ANY_THREAD : 0) |
                             (c->any_peer ? RA_CAP_ANY_PEER : 0) |
                             (c->lend || c->lend_sender ? RA_CAP_LOAN : 0) |
                             (c->shared ? RA_CAP_SHARED : 0));
        t->channels = c->shared || c->train ? 2 : 0;
        t->tag_bits = c->tag_bits;
        t->max_ops = c->max_ops;
        t->max_msg = c->max_msg;
        t->align = c->align;
        t->name = "net";
        t->ctx = &w->rank[i];
        t->post = net_post;
        t->poll = net_poll;
        t->error_text = net_error_text;
        if (net_rand(w, 2)) { t->rank = i; t->ranks = c->ranks; }
        if (c->reg) { t->reg = net_reg; t->dereg = net_dereg; }
        if (c->lend || c->lend_sender) t->release = net_release;
        if (!c->bare) { t->abort = net_abort; t->quiesce = net_quiesce; }
    }
    return w;
}

/* After a run in which nothing failed, nothing may be left. */
static inline void net_check_empty(net *w) {
    for (int i = 0; i < w->c.ranks; i++) {
        net_rank *r = &w->rank[i];
        if (r->pending) net_breach(w, "rank %d: %d ops left pending", i, r->pending);
        if (r->aborts || r->quiesces) net_breach(w, "rank %d: aborted for nothing", i);
    }
    for (int i = 0; i < w->links; i++)
        if (w->link[i].first) net_breach(w, "a message was never received");
    for (int i = 0; i < w->loan_count; i++)
        if (!w->loans[i].back) net_breach(w, "rank %d: a loan was not returned", w->loans[i].rank);
}

/* After the rings are destroyed, all that was registered or lent must be returned. */
static inline void net_check_end(net *w) {
    for (int i = 0; i < w->c.ranks; i++)
        for (int k = 0; k < NET_REGIONS; k++)
            if (w->rank[i].region[k]) net_breach(w, "rank %d: memory still registered", i);
    for (int i = 0; i < w->loan_count; i++)
        if (w->loans[i].back && w->loans[i].from_rank < 0 &&
            net_sum(w->loans[i].ptr, w->loans[i].len) != w->loans[i].sum)
            net_breach(w, "rank %d: wrote into memory after its release", w->loans[i].rank);
}

static inline void net_destroy(net *w) {
    for (int i = 0; i < w->c.ranks; i++)
        for (int k = 0; k < NET_SLOTS; k++) {
            free(w->rank[i].slots[k].bytes);
            net_message_free(w->rank[i].slots[k].message);
        }
    for (int i = 0; i < w->links; i++) {
        while (w->link[i].first) net_message_free(net_dequeue(&w->link[i]));
        for (net_message *m = w->link[i].past, *next; m; m = next) {
            next = m->next;
            net_message_free(m);
        }
    }
    for (int i = 0; i < w->loan_count; i++)
        if (w->loans[i].from_rank < 0) free(w->loans[i].ptr);
    free(w->loans);
    free(w->rank);
    free(w->link);
    free(w);
}

/* -------------------------------------------------------------------------- random networks
 * By the generator of small.h: how a network behaves, and what its transport says of itself. */
static inline void small_net(net_config *c, int ranks) {
    memset(c, 0, sizeof *c);
    c->ranks = ranks;
    c->seed = small_rand(1u << 30);
    c->delay = small_chance(70) ? (int64_t)small_rand(200) : 0;
    c->capacity = small_chance(50) ? 0 : small_range(1, 4);
    c->refuse = small_chance(50) ? 0 : small_range(5, 60);
    c->at_once = small_chance(50) ? 0 : small_range(1, 100);
    c->quiet_done = small_chance(50) ? 0 : 100;
    c->keep = small_chance(70) ? 0 : small_range(10, 60);
    c->any_thread = small_chance(50);
}

static inline void small_net_limits(net_config *c) {
    c->tag_bits = small_chance(50) ? 0 : (uint32_t)small_range(1, 64);
    c->align = small_chance(50) ? 0 : (size_t)1 << small_rand(10);
    c->told = small_range(0, 2);
}

#endif
