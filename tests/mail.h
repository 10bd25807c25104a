/* A network in memory between ranks that run on their own threads, at level 0 and level 1. Messages
 * pair up in order per sender, receiver and channel. (net.h is for ranks that one thread steps in
 * virtual time, and watches more closely.) Include it after harness.h. */
#ifndef RINGATTN_TESTS_MAIL_H
#define RINGATTN_TESTS_MAIL_H

#include <pthread.h>
#include <time.h>

enum { MAIL_RANKS = 64, MAIL_ARENA = 1 << 20, MAIL_BYTES = 1 << 21 };

typedef struct mail_desc {
    int ranks;
    int level;                         /* 0: sendrecv; 1: post and poll */
    int waits;                         /* 1: and wait */
    int holds;                         /* 1: sends end when posted; 0: when they are received */
    int tells;                         /* 1: the other ranks learn of an abort */
    uint32_t moods;                    /* not 0: the seed by which posts accept only a part and
                                        * polls do not look */
    uint32_t caps, channels, max_ops;  /* of the transports */
} mail_desc;

struct mail_net;
struct mail;
typedef struct mail_end {              /* of one rank */
    struct mail_net *net;
    struct mail *posted;               /* its ops whose end it has not seen */
    int rank, inside, owned, gone;
    int32_t turn;                      /* of the transport */
    pthread_t owner;                   /* the first thread that called */
} mail_end;

typedef struct mail {                  /* a send or a receive */
    struct mail *next, *next_posted;
    mail_end *end;                     /* null: what was sent is held in the bytes that follow */
    void *buf;
    size_t len, came;                  /* came: length of the message that a receive met */
    uint64_t tag;
    int status;                        /* RA_AGAIN until both ends have met */
} mail;

typedef struct mail_link { mail *sends, *receives; } mail_link;

typedef struct mail_net {
    mail_desc d;
    pthread_mutex_t lock;
    pthread_cond_t news;
    h_rng rng;
    int dead;                          /* 1: a rank aborted, and d.tells is 1 */
    int64_t calls, bytes;              /* bytes: received */
    int64_t wrong;                     /* calls and messages that broke a rule */
    mail_link links[MAIL_RANKS][MAIL_RANKS][2];  /* [from][to][channel] */
    mail_end ends[MAIL_RANKS];
    int64_t note[MAIL_RANKS];          /* of the test, seen by all processes */
    size_t arena_used;
    unsigned char *arena;              /* null: messages come from the heap. MAIL_ARENA bytes for
                                        * those of all processes; the receiver's moves them */
} mail_net;

/* Enters a call: calls of one rank never overlap and, without RA_CAP_ANY_THREAD or _HELPER, all
 * come from one thread. */
static inline void mail_enter(mail_end *e) {
    mail_net *w = e->net;
    pthread_mutex_lock(&w->lock);
    if (!e->owned) e->owner = pthread_self();
    e->owned = 1;
    w->wrong += e->inside ||
                (!(w->d.caps & (RA_CAP_ANY_THREAD | RA_CAP_HELPER)) &&
                 !pthread_equal(e->owner, pthread_self()));
    e->inside = 1;
    pthread_mutex_unlock(&w->lock);
    pthread_mutex_lock(&w->lock);
    w->calls++;
}

static inline void mail_leave(mail_end *e) {
    e->inside = 0;
    pthread_mutex_unlock(&e->net->lock);
}

static inline mail *mail_alloc(mail_net *w, size_t bytes) {
    mail *m;
    if (w->arena) {
        bytes = (bytes + 63) / 64 * 64;
        if (w->arena_used + bytes > MAIL_ARENA) abort();
        m = (mail *)(void *)(w->arena + w->arena_used);
        w->arena_used += bytes;
    } else {
        m = (mail *)malloc(bytes);
    }
    if (!m) abort();
    return m;
}

static inline void mail_free(mail_net *w, mail *m) {
    if (!w->arena) free(m);
}

/* Moves the messages that have both ends. */
static inline void mail_move(mail_net *w, mail_link *link) {
    while (link->sends && link->receives) {
        mail *s = link->sends, *r = link->receives;
        link->sends = s->next;
        link->receives = r->next;
        r->status = s->len != r->len ? RA_E_TRUNC : s->tag != r->tag ? RA_E_PROTO : RA_OK;
        s->status = RA_OK;
        r->came = s->len;
        if (r->status) w->wrong++;
        if (r->status != RA_E_PROTO && r->len && s->len)
            memcpy(r->buf, s->buf, r->len < s->len ? r->len : s->len);
        w->bytes += (int64_t)r->len;
        if (!s->end) mail_free(w, s);
        pthread_cond_broadcast(&w->news);
    }
}

static inline void mail_append(mail **list, mail *m) {
    while (*list) list = &(*list)->next;
    *list = m;
}

static inline mail mail_make(mail_end *e, void *buf, size_t len, uint64_t tag) {
    mail m = { 0 };
    m.end = e;
    m.buf = buf;
    m.len = len;
    m.tag = tag;
    m.status = RA_AGAIN;
    return m;
}

/* Holds the bytes of sends, which end when they are posted. */
static inline void mail_hold(mail_end *e, int to, int channel, const void *s, size_t len,
                             uint64_t tag) {
    mail_net *w = e->net;
    mail_link *link = &w->links[e->rank][to][channel];
    mail *m = mail_alloc(w, sizeof *m + len);
    *m = mail_make(NULL, m + 1, len, tag);
    if (len) memcpy(m + 1, s, len);
    mail_append(&link->sends, m);
    if (!w->arena) mail_move(w, link);
}

/* Takes back one message of this rank, or all: nothing uses its buffers any more. */
static inline void mail_forget(mail_end *e, const mail *one) {
    mail_net *w = e->net;
    for (int i = 0; i < w->d.ranks * w->d.ranks * 4; i++) {
        mail_link *link = &w->links[i / 4 / w->d.ranks][i / 4 % w->d.ranks][i / 2 % 2];
        mail **at = i % 2 ? &link->receives : &link->sends;
        while (*at) {
            if (one ? *at == one : (*at)->end == e) *at = (*at)->next;
            else at = &(*at)->next;
        }
    }
    while (!one && e->posted) {
        mail *m = e->posted;
        e->posted = m->next_posted;
        mail_free(w, m);
    }
}

/* Sleeps until something has moved, at most 2 ms. */
static inline void mail_sleep(mail_net *w) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    t.tv_nsec += 2000000;
    if (t.tv_nsec >= 1000000000) {
        t.tv_nsec -= 1000000000;
        t.tv_sec++;
    }
    pthread_cond_timedwait(&w->news, &w->lock, &t);
}

static int mail_sendrecv(void *ctx, int to, const void *s, size_t s_len, int from, void *r,
                         size_t r_len, uint64_t tag, int64_t deadline_ns) {
    mail_end *e = (mail_end *)ctx;
    mail_net *w = e->net;
    mail out = mail_make(e, (void *)(uintptr_t)s, s_len, tag), in = mail_make(e, r, r_len, tag);
    int status = RA_OK;
    mail_enter(e);
    w->wrong += (to == RA_NO_PEER) != (s_len == 0) || (from == RA_NO_PEER) != (r_len == 0) ||
                (to == RA_NO_PEER && from == RA_NO_PEER) || tag >> 15;
    if (to == RA_NO_PEER) out.status = RA_OK;
    if (from == RA_NO_PEER) in.status = RA_OK;
    if (from != RA_NO_PEER) {
        mail_link *link = &w->links[from][e->rank][0];
        memset(r, 0xFF, r_len);
        mail_append(&link->receives, &in);
        mail_move(w, link);
    }
    if (to != RA_NO_PEER && w->d.holds) {
        mail_hold(e, to, 0, s, s_len, tag);
        out.status = RA_OK;
    } else if (to != RA_NO_PEER) {
        mail_link *link = &w->links[e->rank][to][0];
        mail_append(&link->sends, &out);
        mail_move(w, link);
    }
    while (!status && (out.status == RA_AGAIN || in.status == RA_AGAIN)) {
        if (w->dead) status = RA_E_ABORTED;
        else if (ra_now_ns() > deadline_ns) status = RA_E_TIMEOUT;
        else mail_sleep(w);
    }
    mail_forget(e, &in);
    mail_forget(e, &out);
    mail_leave(e);
    return status ? status : in.status;
}

/* With moods a random prefix of each direction is accepted, and nothing after the first refused. */
static int mail_post(void *ctx, ra_transport_op *const *ops, int n) {
    mail_end *e = (mail_end *)ctx;
    mail_net *w = e->net;
    int left = 0, gone;
    mail_enter(e);
    gone = e->gone || w->dead;
    for (int kind = RA_MSG_RECV; kind >= RA_MSG_SEND && !gone; kind--) {
        int closed = 0;
        for (int i = 0; i < n; i++) {
            ra_transport_op *op = ops[i];
            mail_link *link;
            mail *m;
            if (op->state != RA_MSG_IDLE || op->kind != kind) continue;
            closed |= w->d.moods && h_one_in(&w->rng, 8);
            if (closed) {
                left = 1;
                continue;
            }
            if (kind == RA_MSG_SEND && w->d.holds) {
                mail_hold(e, op->peer, op->channel, op->buf, op->len, op->tag);
                op->done = op->len;
                op->state = RA_MSG_DONE;
                continue;
            }
            m = mail_alloc(w, sizeof *m);
            *m = mail_make(e, op->buf, op->len, op->tag);
            m->next_posted = e->posted;
            e->posted = m;
            op->scratch[0] = m;
            op->state = RA_MSG_PENDING;
            link = kind == RA_MSG_RECV ? &w->links[op->peer][e->rank][op->channel]
                                       : &w->links[e->rank][op->peer][op->channel];
            mail_append(kind == RA_MSG_RECV ? &link->receives : &link->sends, m);
            mail_move(w, link);
        }
    }
    mail_leave(e);
    return gone ? RA_E_ABORTED : left ? RA_AGAIN : RA_OK;
}

/* Returns how many ops have ended since the last look. */
static inline int mail_look(mail_end *e, ra_transport_op *const *ops, int n) {
    mail_net *w = e->net;
    int moved = 0;
    for (int i = 0; i < w->d.ranks * 2; i++) mail_move(w, &w->links[i / 2][e->rank][i % 2]);
    for (int i = 0; i < n; i++) {
        mail *m = (mail *)ops[i]->scratch[0], **at = &e->posted;
        if (ops[i]->state != RA_MSG_PENDING || m->status == RA_AGAIN) continue;
        while (*at != m) at = &(*at)->next_posted;
        *at = m->next_posted;
        ops[i]->done = m->status == RA_E_TRUNC ? m->came : m->status ? 0 : m->len;
        ops[i]->state = m->status ? m->status : RA_MSG_DONE;
        mail_free(w, m);
        moved++;
    }
    return moved;
}

static int mail_poll(void *ctx, ra_transport_op *const *ops, int n) {
    mail_end *e = (mail_end *)ctx;
    int gone;
    mail_enter(e);
    gone = e->gone || e->net->dead;
    if (!gone && !(e->net->d.moods && h_one_in(&e->net->rng, 4))) (void)mail_look(e, ops, n);
    mail_leave(e);
    return gone ? RA_E_ABORTED : RA_OK;
}

static int mail_wait(void *ctx, ra_transport_op *const *ops, int n, int64_t deadline_ns) {
    mail_end *e = (mail_end *)ctx;
    int gone, pending = 0;
    mail_enter(e);
    for (int i = 0; i < n; i++) pending |= ops[i]->state == RA_MSG_PENDING;
    for (;;) {
        gone = e->gone || e->net->dead;
        if (gone || !pending || mail_look(e, ops, n) || ra_now_ns() > deadline_ns) break;
        mail_sleep(e->net);
    }
    mail_leave(e);
    return gone ? RA_E_ABORTED : RA_OK;
}

static int mail_abort(void *ctx, int why) {
    mail_end *e = (mail_end *)ctx;
    (void)why;
    pthread_mutex_lock(&e->net->lock);
    if (e->net->d.tells) e->net->dead = 1;
    if (!e->gone && e->net->d.level) mail_forget(e, NULL);
    e->gone = 1;
    pthread_cond_broadcast(&e->net->news);
    pthread_mutex_unlock(&e->net->lock);
    return RA_OK;
}

static int mail_quiesce(void *ctx, int64_t deadline_ns) {
    (void)ctx, (void)deadline_ns;
    return RA_OK;
}

/* shared: null, or MAIL_BYTES of zeros on a multiple of 64 that processes forked later share. */
static inline mail_net *mail_open(const mail_desc *d, void *shared) {
    mail_net *w = (mail_net *)(shared ? shared : calloc(1, sizeof *w));
    pthread_mutexattr_t of_lock;
    pthread_condattr_t of_news;
    if (!w) abort();
    w->d = *d;
    w->rng.state = d->moods;
    if (shared) w->arena = (unsigned char *)shared + MAIL_BYTES - MAIL_ARENA;
    pthread_mutexattr_init(&of_lock);
    pthread_mutexattr_setpshared(&of_lock, PTHREAD_PROCESS_SHARED);
    pthread_condattr_init(&of_news);
    pthread_condattr_setpshared(&of_news, PTHREAD_PROCESS_SHARED);
    if (sizeof *w > MAIL_BYTES - MAIL_ARENA) abort();
    if (pthread_mutex_init(&w->lock, &of_lock) || pthread_cond_init(&w->news, &of_news)) abort();
    pthread_mutexattr_destroy(&of_lock);
    pthread_condattr_destroy(&of_news);
    for (int r = 0; r < d->ranks; r++) {
        w->ends[r].net = w;
        w->ends[r].rank = r;
    }
    return w;
}

static inline ra_transport mail_transport(mail_net *w, int rank) {
    ra_transport t = { 0 };
    t.size = (uint32_t)sizeof t;
    t.abi = RA_TRANSPORT_ABI;
    t.caps = w->d.caps;
    t.channels = w->d.channels;
    t.max_ops = w->d.max_ops;
    t.rank = rank;
    t.ranks = w->d.ranks;
    t.name = "mail";
    t.ctx = &w->ends[rank];
    t.turn = &w->ends[rank].turn;
    if (w->d.level == 0) {
        t.sendrecv = mail_sendrecv;
    } else {
        t.post = mail_post;
        t.poll = mail_poll;
        if (w->d.waits) t.wait = mail_wait;
    }
    if (w->d.level || w->d.tells) {
        t.abort = mail_abort;
        t.quiesce = mail_quiesce;
    }
    return t;
}

/* Returns how many messages were held for nobody and how many rules were broken. */
static inline int64_t mail_close(mail_net *w) {
    int64_t left = w->wrong;
    for (int r = 0; r < w->d.ranks; r++) mail_forget(&w->ends[r], NULL);
    for (int i = 0; i < w->d.ranks * w->d.ranks * 2; i++) {
        mail_link *link = &w->links[i / 2 / w->d.ranks][i / 2 % w->d.ranks][i % 2];
        while (link->sends) {
            mail *m = link->sends;
            link->sends = m->next;
            mail_free(w, m);
            left++;
        }
    }
    pthread_mutex_destroy(&w->lock);
    pthread_cond_destroy(&w->news);
    if (!w->arena) free(w);
    return left;
}

#endif
