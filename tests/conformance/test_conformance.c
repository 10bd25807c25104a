/* The conformance suite on the bundled world, on a transport that is as difficult as the contract
 * allows, inline at level 0, and on broken transports: one per rule, and others that break a rule
 * in another way. For each the suite must find exactly that rule. The chaos transport holds no
 * message: one lock, queues of ops, and bytes that are copied when a send meets its receive, in
 * whatever call that happens. It accepts only some of what is posted, matches late, reports late
 * and in another order that ops are done, and lends memory. */
#define _POSIX_C_SOURCE 200809L
#include "ringattn.h"
#include "tests/below.h"
#include "tests/harness.h"
#include "tests/conformance/conformance.h"

enum { CH_MOST_RINGS = 2, CH_MOST_RANKS = 8, CH_OPS = 64, CH_LOANS = 512,
       CH_PATIENCE_MS = 700 };
/* The patience with which this process judges; what blocks too long does so by this measure. */
static int ch_patience_ms = CH_PATIENCE_MS;

/* What is wrong with a transport, named after the rule that it breaks; RIGHT: nothing; and other
 * ways to break a rule. */
#define CH_ENUM(name, text) CH_##name,
#define CH_DEFECTS(X)                                                                             \
    X(DROP, ORDER, "loses a message and tells the sender that it came")                           \
    X(DUPLICATE, ORDER, "delivers a message twice")                                               \
    X(STALE, ORDER, "delivers the message before the one that is due")                            \
    X(POSTED_AGAIN, ORDER, "takes ops of a batch again that it has accepted before")              \
    X(CUT, BYTES, "leaves off the last byte of a message")                                        \
    X(CUT_SAYS_SO, DONE_BYTES, "leaves off the last byte and says so in done")                    \
    X(TAGS_DIFFER, FIELDS, "changes the tag of an op while it is PENDING")                        \
    X(FORGETS, PROGRESS, "accepts a send and forgets it")                                         \
    X(ONE_AT_A_TIME, PROGRESS, "goes on with the first send only, for all peers")                 \
    X(POLL_LIES, PROGRESS, "never says that an op is done")                                       \
    X(AGAIN_FOR_NOTHING, AGAIN, "post returns RA_AGAIN though it accepted all")                   \
    X(WAIT_FOR_ALL, WAIT_WAKES, "wait returns when all of its ops are done")                      \
    X(SENDS_AFTER_ABORT, ABORT_LATER, "takes sends after an abort")                               \
    X(ABORT_KEEPS_SENDS, ABORT_PENDING, "an abort fails receives only")                           \
    X(QUIESCE_FORGETS, QUIET, "quiesce leaves receives where peers can still fill them")          \
    X(QUIESCE_ONCE, QUIET, "quiesce returns RA_OK once and then RA_E_UNSAFE")                     \
    X(TRUNC_CAPACITY, TRUNC_DONE, "says of a message of another length that the buffer is full")  \
    X(OTHER_THREAD, ANY_THREAD, "post fails on a thread that did not post first")                 \
    X(ABORT_TELLS_ONLY, ABORT_LATER, "an abort tells the peers and ends nothing of its own")    \
    X(PASS_TIMES_OUT_LATE, PASS_ENDS, "poll blocks for seconds where a rank is absent")
#define CH_DEFECT(name, rule, text) CH_##name,
enum { CF_RULES(CH_ENUM) CH_RIGHT, CH_DEFECTS(CH_DEFECT) CH_COUNT,
       CH_UNSAFE };                    /* breaks no rule: quiesce of rank 0 is RA_E_UNSAFE */
#undef CH_ENUM
#undef CH_DEFECT
#define CH_RULE(name, rule, text) CF_##rule,
#define CH_TEXT(name, rule, text) text,
static const int ch_defect_rule[] = { CH_DEFECTS(CH_RULE) -1 };
static const char *const ch_defect_text[] = { CH_DEFECTS(CH_TEXT) NULL };
#undef CH_RULE
#undef CH_TEXT

struct ch_world;
typedef struct ch_seat {
    struct ch_world *world;
    int ring, rank;
    int32_t why, joined, purged;       /* why, joined: atomic */
    int polls, pending, slow, quiesces;
    uint8_t *after;                    /* buffer of a receive that was done in the last poll */
    uint8_t *last;                     /* buffer of the last large receive, or of a loan */
    pthread_t thread;                  /* that posted first; posted: there is one */
    int posted;
    ra_transport_op *late;             /* UNSAFE: the last op, used again as the rank leaves */
    uint8_t first;                     /* byte of its buffer */
    ra_transport t;
} ch_seat;

typedef struct ch_queue { ra_transport_op *first, *last; } ch_queue;
typedef struct ch_world {
    pthread_mutex_t lock;
    int ranks, wrong, level, refuses;
    int played;                        /* how often something happened that should happen once */
    int32_t aborted[CH_MOST_RINGS];         /* atomic */
    int64_t begin_ns;
    uint64_t random;
    ch_seat seat[CH_MOST_RINGS][CH_MOST_RANKS];
    void *loan[CH_LOANS];              /* under the lock; null: returned */
    ch_queue sends[CH_MOST_RINGS][CH_MOST_RANKS][CH_MOST_RANKS][2];
    ch_queue recvs[CH_MOST_RINGS][CH_MOST_RANKS][CH_MOST_RANKS][2];
} ch_world;

/* Words of ra_transport_op.scratch: the next op of its queue; 1 + status once it has met its
 * partner, negated errors unchanged; polls until its owner learns of it; what a broken transport
 * took of a send; lent memory; the length of the message that it met. */
enum { CH_NEXT, CH_MET, CH_DELAY, CH_COPY, CH_LENT, CH_CAME };

static uint32_t ch_random(ch_world *w, uint32_t below) {
    w->random = cf_mix(w->random + 0x9E3779B97F4A7C15u);
    return (uint32_t)(w->random >> 33) % below;
}

static void ch_append(ch_queue *q, ra_transport_op *op) {
    op->scratch[CH_NEXT] = NULL;
    if (q->last) q->last->scratch[CH_NEXT] = op;
    else q->first = op;
    q->last = op;
}

static void ch_remove(ch_queue *q, ra_transport_op *op) {
    ra_transport_op *before = NULL, *at = q->first;
    while (at && at != op) {
        before = at;
        at = (ra_transport_op *)at->scratch[CH_NEXT];
    }
    if (!at) return;
    if (before) before->scratch[CH_NEXT] = op->scratch[CH_NEXT];
    else q->first = (ra_transport_op *)op->scratch[CH_NEXT];
    if (q->last == op) q->last = before;
}

static ch_queue *ch_queue_of(ch_seat *s, const ra_transport_op *op) {
    ch_world *w = s->world;
    int ring = w->wrong == CH_RINGS ? 0 : s->ring;
    int channel = w->wrong == CH_CHANNELS ? 0 : op->channel, to = op->peer;
    if (w->wrong == CH_PEERS && op->len == 1021)
        to = (to + ((to + 1) % w->ranks == s->rank ? 2 : 1)) % w->ranks;
    if (op->kind == RA_MSG_SEND) return &w->sends[ring][s->rank][to][channel];
    return &w->recvs[ring][op->peer][s->rank][channel];
}

static int ch_tells_late(const ch_world *w) {
    return w->wrong == CH_RIGHT || w->wrong == CH_POSTED_AGAIN;
}

static void ch_met(ch_world *w, ra_transport_op *op, int status) {
    op->scratch[CH_MET] = (void *)(intptr_t)(status < 0 ? status : 1);
    op->scratch[CH_DELAY] = (void *)(uintptr_t)(ch_tells_late(w) ? ch_random(w, 4) : 0);
}

/* Memory on loan: a separate copy. */
static void ch_lend(ch_world *w, ra_transport_op *in) {
    void *p = NULL;
    int i = 0;
    while (i < CH_LOANS && w->loan[i]) i++;
    if (i == CH_LOANS) return;
    if (posix_memalign(&p, 64, in->len + 64)) abort();
    w->loan[i] = p;
    in->buf = (uint8_t *)p + (w->wrong == CH_LOAN_ALIGN ? 8 : 0);
    in->scratch[CH_LENT] = p;
}

static void ch_copy(ch_world *w, const ra_transport_op *out, ra_transport_op *in) {
    const uint8_t *from = (const uint8_t *)(out->scratch[CH_COPY] ? out->scratch[CH_COPY]
                                                                   : out->buf);
    size_t n = in->len < out->len ? in->len : out->len;
    int asked = (in->flags & RA_MSG_LOAN_OK || w->wrong == CH_LOAN_ASKED) && n == in->len;
    uint8_t *to;
    if (w->level == 1 && asked && ch_random(w, 3)) ch_lend(w, in);
    to = (uint8_t *)in->buf;
    if ((w->wrong == CH_CUT || w->wrong == CH_CUT_SAYS_SO) && n > 1000) n--;
    memcpy(to, from, n);
    if (w->wrong == CH_BYTES && n > 1000) to[n / 2] ^= 4;
    if (w->wrong == CH_PASS && n > 4096 && n % 64 == 0 && n < 1000000) to[n - 2] ^= 1;
    if (w->wrong == CH_BOUNDS) to[n] = 1;
}

static void ch_insert(ch_queue *q, ra_transport_op *op) {
    op->scratch[CH_NEXT] = q->first;
    q->first = op;
    if (!q->last) q->last = op;
}

/* DROP: one message of a long flow never arrives. */
static int ch_lose(ch_world *w, ch_queue *sends, ra_transport_op *out) {
    if (w->wrong != CH_DROP || out->len != 1021 || !out->scratch[CH_NEXT] || w->played++) return 0;
    ch_remove(sends, out);
    ch_met(w, out, RA_OK);
    return 1;
}

/* STALE: keeps what a flow delivered last, and delivers that again. */
static void ch_stale(ch_world *w, ra_transport_op *in) {
    static uint8_t before[1021];
    static int flow;
    int now = 1 + in->peer;
    if (w->wrong != CH_STALE || in->len != sizeof before) return;
    if (flow == now) {
        uint8_t keep[sizeof before];
        memcpy(keep, in->buf, sizeof keep);
        memcpy(in->buf, before, sizeof before);
        memcpy(before, keep, sizeof keep);
        return;
    }
    memcpy(before, in->buf, sizeof before);
    if (!flow) flow = now;
}

/* ARRIVES: a send is done as soon as the transport has a copy, which later calls of its rank bring
 * to the receive. */
static void ch_hold(ch_world *w, ch_queue *sends, ch_queue *recvs, int sender) {
    ra_transport_op *out = sends->first, *in = recvs->first;
    if (in && in->scratch[CH_COPY] && sender) {
        in->scratch[CH_DELAY] = (void *)((uintptr_t)in->scratch[CH_DELAY] - 1);
        if (in->scratch[CH_DELAY]) return;
        memcpy(in->buf, in->scratch[CH_COPY], in->len);
        free(in->scratch[CH_COPY]);
        in->scratch[CH_COPY] = NULL;
        ch_remove(recvs, in);
        ch_met(w, in, RA_OK);
    } else if (in && out && !in->scratch[CH_COPY]) {
        in->scratch[CH_COPY] = calloc(1, in->len);
        if (!in->scratch[CH_COPY]) abort();
        memcpy(in->scratch[CH_COPY], out->buf, in->len < out->len ? in->len : out->len);
        in->scratch[CH_DELAY] = (void *)(uintptr_t)2;
        ch_remove(sends, out);
        ch_met(w, out, RA_OK);
    }
}

/* The first send of a flow meets its first receive. */
static void ch_meet(ch_world *w, ch_queue *sends, ch_queue *recvs) {
    while (sends->first && recvs->first) {
        ra_transport_op *out = sends->first, *in = recvs->first, *second;
        int fits;
        if (w->wrong == CH_RIGHT && ch_random(w, 3) == 0) return;
        if (w->wrong == CH_UNSAFE && out->len == 500009) return;   /* of "quiesce" */
        second = (ra_transport_op *)out->scratch[CH_NEXT];
        if (w->wrong == CH_ORDER && second && second->len == out->len) out = second;
        if (ch_lose(w, sends, out)) continue;
        fits = out->len == in->len || w->wrong == CH_TRUNC;
        ch_remove(sends, out);
        ch_remove(recvs, in);
        if (w->wrong == CH_VISIBLE) in->scratch[CH_COPY] = NULL;
        else if (fits || w->wrong != CH_TRUNC_DONE) ch_copy(w, out, in);
        in->scratch[CH_CAME] = (void *)(uintptr_t)out->len;
        ch_stale(w, in);
        ch_met(w, in, fits ? RA_OK : RA_E_TRUNC);
        if (w->wrong == CH_DUPLICATE && out->len == 1021 && !w->played++) {
            ch_insert(sends, out);
            continue;
        }
        if (w->wrong != CH_REUSE) ch_met(w, out, fits ? RA_OK : RA_E_TRUNC);
        free(out->scratch[CH_COPY]);
        out->scratch[CH_COPY] = NULL;
    }
}

/* ONE_AT_A_TIME: a send of this rank to a lower rank waits for its receive, or of a lower rank. */
static int ch_other_first(const ch_seat *s) {
    ch_world *w = s->world;
    for (int from = 0; from < w->ranks; from++)
        for (int to = 0; to < w->ranks; to++)
            if (w->sends[s->ring][from][to][0].first)
                return !w->recvs[s->ring][from][to][0].first;
    return 0;
}

/* polls: the call brought ops. */
static void ch_meet_all(ch_seat *s, int polls) {
    ch_world *w = s->world;
    if (w->wrong == CH_ONE_AT_A_TIME && ch_other_first(s)) return;
    for (int other = 0; other < w->ranks; other++)
        for (int i = 0; i < 2; i++)
            for (int way = 0; way < 2; way++) {
                int from = way ? other : s->rank, to = way ? s->rank : other;
                int ring = w->wrong == CH_RINGS ? 0 : s->ring;
                if (w->wrong == CH_POLL_NONE && !polls && !way) continue;
                if (w->wrong == CH_POLL_NONE && way) continue;
                if (w->wrong == CH_PROGRESS && i && w->sends[ring][from][to][0].first) continue;
                if (w->wrong == CH_ARRIVES)
                    ch_hold(w, &w->sends[ring][from][to][i], &w->recvs[ring][from][to][i], !way);
                else ch_meet(w, &w->sends[ring][from][to][i], &w->recvs[ring][from][to][i]);
            }
}

static int ch_failure(const ch_seat *s) {
    int why = cf_load(&s->why);
    if (s->world->wrong == CH_ABORT_TELLS_ONLY)
        return cf_load(&s->world->aborted[s->ring]) > (why != 0) ? RA_E_ABORTED : RA_OK;
    if (why) return why;
    return cf_load(&s->world->aborted[s->ring]) ? RA_E_ABORTED : RA_OK;
}

/* Takes a copy of a send when posted, or (REUSE) when it is too late. */
static void ch_capture(ra_transport_op *op) {
    if (op->scratch[CH_COPY]) return;
    op->scratch[CH_COPY] = malloc(op->len);
    if (!op->scratch[CH_COPY]) abort();
    memcpy(op->scratch[CH_COPY], op->buf, op->len);
}

static void ch_accept(ch_seat *s, ra_transport_op *op) {
    ch_world *w = s->world;
    int far = (op->peer - s->rank + w->ranks) % w->ranks;
    if (w->wrong == CH_CRASH && op->len == 127) raise(SIGSEGV);
    if ((w->wrong == CH_ANY_PEER && far > 1 && far < w->ranks - 1) ||
        (w->wrong == CH_LARGEST && op->len > 2000000)) {
        op->state = RA_E_IO;
        return;
    }
    if (w->wrong == CH_FORGETS && op->kind == RA_MSG_SEND && op->len == 65537) {
        op->state = RA_MSG_PENDING;
        return;
    }
    if (w->wrong == CH_READ_ONLY && op->kind == RA_MSG_SEND) {
        ch_capture(op);
        ((uint8_t *)op->buf)[op->len - 1] ^= 8;
    }
    if (op->kind == RA_MSG_RECV && op->len == 500009) s->last = (uint8_t *)op->buf;
    ch_append(ch_queue_of(s, op), op);
    s->late = op;
    s->first = *(uint8_t *)op->buf;
    s->pending++;
    op->state = RA_MSG_PENDING;
    if (w->wrong == CH_REUSE && op->kind == RA_MSG_SEND) {
        op->done = op->len;
        op->state = RA_MSG_DONE;
        s->pending--;
    }
}

/* POSTED_AGAIN: a send that is PENDING and has met becomes one more message. */
static void ch_again(ch_seat *s, ra_transport_op *op) {
    if (op->kind != RA_MSG_SEND || op->state != RA_MSG_PENDING || !op->scratch[CH_MET]) return;
    op->scratch[CH_MET] = NULL;
    ch_append(ch_queue_of(s, op), op);
}

/* Receives first, of each flow a prefix. Returns how many are left idle. Under the lock. */
static int ch_accept_some(ch_seat *s, ra_transport_op *const *ops, int n) {
    ch_world *w = s->world;
    int left = 0, refuses = w->refuses;
    uint8_t closed[2][CH_MOST_RANKS][2];
    memset(closed, 0, sizeof closed);
    for (int kind = RA_MSG_RECV; kind >= RA_MSG_SEND; kind--)
        for (int i = 0; i < n; i++) {
            ra_transport_op *op = ops[i];
            uint8_t *shut = &closed[kind - 1][op->peer][op->channel];
            if (w->wrong == CH_POSTED_AGAIN && op->kind == kind && op->len == 1021 && n > 1)
                ch_again(s, op);
            if (op->kind != kind || op->state != RA_MSG_IDLE) continue;
            if (w->wrong == CH_PREFIX) *shut = 0;
            if (s->pending >= CH_OPS || (refuses && ch_random(w, 4) == 0)) *shut = 1;
            if (*shut) left++;
            else ch_accept(s, op);
        }
    return left;
}

/* 1: this is not the thread on which the rank first posted. */
static int ch_elsewhere(ch_seat *s) {
    if (!s->posted) s->thread = pthread_self();
    s->posted = 1;
    return !pthread_equal(s->thread, pthread_self());
}

static int ch_post(void *ctx, ra_transport_op *const *ops, int n) {
    ch_seat *s = (ch_seat *)ctx;
    ch_world *w = s->world;
    int failure = ch_failure(s), left = 0;
    if (ch_elsewhere(s) && w->wrong == CH_OTHER_THREAD) return RA_E_IO;
    if (w->wrong == CH_ABORT_LATER && s->purged) failure = RA_OK;
    if (w->wrong == CH_SENDS_AFTER_ABORT && n == 1 && ops[0]->kind == RA_MSG_SEND) failure = RA_OK;
    pthread_mutex_lock(&w->lock);
    for (int i = 0; i < n && failure; i++)
        if (ops[i]->state == RA_MSG_IDLE) ops[i]->state = failure;
    if (!failure) left = ch_accept_some(s, ops, n);
    if (!failure) ch_meet_all(s, 0);
    pthread_mutex_unlock(&w->lock);
    for (int i = 0; i < n && w->wrong == CH_POST_BLOCKS; i++)
        while (ops[i]->kind == RA_MSG_SEND && ops[i]->state == RA_MSG_PENDING &&
               !__atomic_load_n(&ops[i]->scratch[CH_MET], __ATOMIC_ACQUIRE) && !ch_failure(s))
            cf_sleep_us(100);
    if (failure) return w->wrong == CH_ABORT_PENDING ? RA_OK : failure;
    if (w->wrong == CH_AGAIN_FOR_NOTHING) return RA_AGAIN;
    return left && w->wrong != CH_AGAIN ? RA_AGAIN : RA_OK;
}

static void ch_tell(ch_seat *s, ra_transport_op *op, int status) {
    int wrong = s->world->wrong;
    op->done = status == RA_MSG_DONE && ch_random(s->world, 2) ? op->len : 0;
    if (status == RA_E_TRUNC) op->done = (size_t)(uintptr_t)op->scratch[CH_CAME];
    if (status == RA_E_TRUNC && wrong == CH_TRUNC_CAPACITY) op->done = op->len;
    if (wrong == CH_DONE_BYTES) op->done = op->len - 1;
    if (wrong == CH_CUT_SAYS_SO && op->len > 1000) op->done = op->len - 1;
    if (wrong == CH_FIELDS) op->tag++;
    op->state = status;
    s->pending--;
    if (op->kind == RA_MSG_RECV) s->after = (uint8_t *)op->buf;
    if (wrong == CH_LOAN_KEEPS && op->scratch[CH_LENT]) s->last = (uint8_t *)op->buf;
}

/* Moves what has met, and what has failed. Returns how many ops are still PENDING. */
static int ch_settle(ch_seat *s, ra_transport_op *const *ops, int n, int failure) {
    int left = 0, wrong = s->world->wrong;
    for (int i = 0; i < n; i++) {
        ra_transport_op *op = ops[i];
        int met = (int)(intptr_t)op->scratch[CH_MET];
        if (op->state != RA_MSG_PENDING) continue;
        if (wrong == CH_TAGS_DIFFER) op->tag ^= 1;
        if (wrong == CH_POLL_LIES && !failure) {
            left++;
            continue;
        }
        if (failure && wrong == CH_ABORT_KEEPS_SENDS && op->kind == RA_MSG_SEND) {
            left++;
            continue;
        }
        if (failure) {
            if (!met) ch_remove(ch_queue_of(s, op), op);
            free(op->scratch[CH_COPY]);
            op->scratch[CH_COPY] = NULL;
            ch_tell(s, op, failure);
        } else if (met && op->scratch[CH_DELAY]) {
            op->scratch[CH_DELAY] = (void *)((uintptr_t)op->scratch[CH_DELAY] - 1);
            left++;
        } else if (met) ch_tell(s, op, met < 0 ? met : (int)RA_MSG_DONE);
        else left++;
    }
    return left;
}

/* What some broken transports do in addition. Under the lock. */
static void ch_mischief(ch_seat *s, ra_transport_op *const *ops, int n) {
    int wrong = s->world->wrong;
    for (int i = 0; i < n; i++) {
        ra_transport_op *op = ops[i];
        if (wrong == CH_REUSE && op->kind == RA_MSG_SEND && op->state == RA_MSG_DONE &&
            !op->scratch[CH_MET]) {
            ch_capture(op);
            op->scratch[CH_MET] = op;
        }
        if (wrong == CH_STATES && op->state == RA_MSG_IDLE) ch_accept(s, op);
    }
    if (wrong == CH_RECV_AFTER && s->after) s->after[0] ^= 2;
    if (wrong == CH_LOAN_KEEPS && s->last) s->last[0] ^= 2;
    if (wrong == CH_LOAN_KEEPS) s->last = NULL;
    s->after = NULL;
}

static int ch_look(ch_seat *s, ra_transport_op *const *ops, int n, int *left) {
    ch_world *w = s->world;
    int failure = ch_failure(s), shown;
    if (w->wrong == CH_ABORT_LATER && s->purged) failure = RA_OK;
    if (w->wrong == CH_SENDS_AFTER_ABORT && n == 1 && ops[0]->kind == RA_MSG_SEND) failure = RA_OK;
    shown = w->wrong == CH_ABORT_PENDING ? RA_OK : failure;
    *left = 1;
    if (w->wrong == CH_ANY_THREAD && !failure && s->posted && ch_elsewhere(s)) return RA_OK;
    if (failure && w->wrong == CH_PASS_ENDS && n && ops[0]->len > 4096 && ops[0]->len % 64 == 0 &&
        !s->slow++)
        cf_sleep_us(2300 * ch_patience_ms);
    /* 64 bytes: a rank waits for the frame before the first chunk */
    if (w->wrong == CH_PASS_TIMES_OUT_LATE && n && ops[0]->len == 64 && !failure &&
        s->polls++ == 300)
        cf_sleep_us(2300 * ch_patience_ms);
    pthread_mutex_lock(&w->lock);
    ch_mischief(s, ops, n);
    if (!failure && (w->wrong != CH_VISIBLE || s->polls++ % 50 == 49)) ch_meet_all(s, n > 0);
    *left = ch_settle(s, ops, n, shown);
    pthread_mutex_unlock(&w->lock);
    if (failure) s->purged = 1;
    if (w->wrong == CH_ABORT_KEEPS_SENDS) return RA_OK;
    return shown;
}

static int ch_poll(void *ctx, ra_transport_op *const *ops, int n) {
    ch_seat *s = (ch_seat *)ctx;
    int left, code = ch_look(s, ops, n, &left), wrong = s->world->wrong, before = left;
    while (wrong == CH_POLL_BLOCKS && !code && left && left == before) {
        code = ch_look(s, ops, n, &left);
        cf_sleep_us(100);
    }
    if (wrong == CH_CODES && !code) return RA_AGAIN;
    return wrong == CH_ABORT_LATER ? RA_OK : code;
}

static int ch_wait(void *ctx, ra_transport_op *const *ops, int n, int64_t deadline_ns) {
    ch_seat *s = (ch_seat *)ctx;
    int wrong = s->world->wrong, before = 0, left = 0, code = RA_OK;
    for (int i = 0; i < n; i++) before += ops[i]->state == RA_MSG_PENDING;
    for (;;) {
        if (wrong != CH_ABORT_WAKES || !ch_failure(s)) code = ch_look(s, ops, n, &left);
        if (wrong == CH_WAIT_DEADLINE) deadline_ns = RA_NO_DEADLINE;
        if (deadline_ns && ra_now_ns() >= deadline_ns) break;
        cf_sleep_us(100);
        if (wrong == CH_WAIT_WAKES && before) continue;
        if (wrong == CH_ABORT_WAKES && ch_failure(s)) continue;
        if (wrong == CH_WAIT_FOR_ALL && !code && left) continue;
        if (code || (left == 0 && wrong != CH_WAIT_IDLE) || left < before) return code;
    }
    if (wrong == CH_WAIT_TIMEOUT && left && left == before) return RA_E_TIMEOUT;
    return wrong == CH_ABORT_LATER ? RA_OK : code;
}

static int ch_abort(void *ctx, int why) {
    ch_seat *s = (ch_seat *)ctx;
    int twice = cf_load(&s->why) != 0;
    if (s->world->wrong == CH_ABORT_BLOCKS) cf_sleep_us(700 * ch_patience_ms);
    if (s->world->wrong != CH_ABORT_PEERS && s->world->wrong != CH_QUIESCE_FORGETS)
        __atomic_add_fetch(&s->world->aborted[s->ring], !twice, __ATOMIC_ACQ_REL);
    cf_store(&s->why, why);
    if (twice && s->world->wrong == CH_ABORT_TWICE) {
        cf_store(&s->why, 0);
        cf_store(&s->world->aborted[s->ring], 0);
    }
    return RA_OK;
}

/* Takes back what this rank has queued. */
static void ch_purge(ch_seat *s) {
    ch_world *w = s->world;
    pthread_mutex_lock(&w->lock);
    for (int other = 0; other < w->ranks; other++)
        for (int i = 0; i < 2; i++) {
            ch_queue *out = &w->sends[s->ring][s->rank][other][i];
            ch_queue *in = &w->recvs[s->ring][other][s->rank][i];
            memset(out, 0, sizeof *out);
            memset(in, 0, sizeof *in);
        }
    pthread_mutex_unlock(&w->lock);
}

static void *ch_late_write(void *buf) {
    cf_sleep_us(30000);
    *(volatile uint8_t *)buf = 0x77;
    return NULL;
}

static int ch_quiesce(void *ctx, int64_t deadline_ns) {
    ch_seat *s = (ch_seat *)ctx;
    pthread_t id;
    (void)deadline_ns;
    if (s->world->wrong == CH_UNSAFE && s->rank == 0) {
        s->quiesces++;
        return RA_E_UNSAFE;
    }
    if (s->world->wrong == CH_QUIESCE_ONCE && s->quiesces++ > 1) return RA_E_UNSAFE;
    if (s->world->wrong != CH_QUIESCE_FORGETS) ch_purge(s);
    cf_store(&s->why, cf_load(&s->why) ? cf_load(&s->why) : RA_E_ABORTED);
    if (s->world->wrong == CH_QUIESCE_DEADLINE) cf_sleep_us(700 * ch_patience_ms);
    if (s->world->wrong == CH_QUIET && s->last &&
        !pthread_create(&id, NULL, ch_late_write, s->last))
        pthread_detach(id);
    return RA_OK;
}

static int ch_release(void *ctx, ra_transport_op *op) {
    ch_seat *s = (ch_seat *)ctx;
    if (s->last == (uint8_t *)op->buf) s->last = NULL;
    pthread_mutex_lock(&s->world->lock);
    for (int i = 0; i < CH_LOANS; i++) {
        uint8_t *p = (uint8_t *)s->world->loan[i];
        if (!p || p + (s->world->wrong == CH_LOAN_ALIGN ? 8 : 0) != (uint8_t *)op->buf) continue;
        free(p);
        s->world->loan[i] = NULL;
        break;
    }
    pthread_mutex_unlock(&s->world->lock);
    return RA_OK;
}

static int ch_reg(void *ctx, void *p, size_t n, void **mr) {
    (void)ctx, (void)n;
    *mr = p;
    return RA_OK;
}

static int ch_dereg(void *ctx, void *mr) {
    ch_seat *s = (ch_seat *)ctx;
    (void)mr;
    return s->world->wrong == CH_REG ? RA_E_IO : RA_OK;
}

/* One op until it is done, in turn with another. */
static int ch_level_0(ch_seat *s, ra_transport_op *const *ops, int n, int64_t deadline_ns) {
    int code = RA_OK, left = n;
    while (left && code >= 0) {
        code = ch_post(s, ops, n);
        if (code >= 0) code = ch_look(s, ops, n, &left);
        left = 0;
        for (int i = 0; i < n; i++) {
            if (ops[i]->state < 0) code = ops[i]->state;
            left += ops[i]->state == RA_MSG_IDLE || ops[i]->state == RA_MSG_PENDING;
        }
        if (!left || code < 0) break;
        if (deadline_ns && ra_now_ns() > deadline_ns &&
            s->world->wrong != CH_SENDRECV_DEADLINE) {
            ch_purge(s);
            return RA_E_TIMEOUT;
        }
        cf_sleep_us(30);
    }
    return code < 0 ? code : RA_OK;
}

static int ch_sendrecv(void *ctx, int to, const void *sbuf, size_t slen, int from, void *rbuf,
                       size_t rlen, uint64_t tag, int64_t deadline_ns) {
    ch_seat *s = (ch_seat *)ctx;
    ra_transport_op op[2], *list[2];
    const int n = below_ops(op, list, to, sbuf, slen, from, rbuf, rlen, tag);
    if (s->world->wrong == CH_ONE_SIDE && (to == RA_NO_PEER || from == RA_NO_PEER)) return RA_E_IO;
    if (s->world->wrong == CH_BOTH_WAYS && n == 2) {   /* the send first */
        const int code = ch_level_0(s, &list[1], 1, deadline_ns);
        return code ? code : ch_level_0(s, &list[0], 1, deadline_ns);
    }
    return ch_level_0(s, list, n, deadline_ns);
}

/* -------------------------------------------------------------------------- makers */
typedef struct ch_kind { int wrong, level; } ch_kind;

static void ch_fill(ch_seat *s, int level) {
    ra_transport *t = &s->t;
    t->size = sizeof *t;
    t->abi = RA_TRANSPORT_ABI;
    t->caps = RA_CAP_ANY_THREAD | RA_CAP_ANY_PEER | RA_CAP_DEADLINE;
    t->rank = s->rank;
    t->ranks = s->world->ranks;
    if (s->world->wrong == CH_STRUCT) t->rank = (s->rank + 1) % s->world->ranks;
    if (s->world->wrong == CH_LONE && s->world->ranks == 1) t->ranks = 2;
    t->name = "chaos";
    t->ctx = s;
    t->abort = ch_abort;
    t->quiesce = ch_quiesce;
    if (level == 0) {
        t->sendrecv = ch_sendrecv;
        return;
    }
    t->caps |= RA_CAP_LOAN;
    t->channels = 2;
    t->max_ops = CH_OPS;
    t->post = ch_post;
    t->poll = ch_poll;
    t->wait = ch_wait;
    t->release = ch_release;
    t->reg = ch_reg;
    t->dereg = ch_dereg;
}

static void *ch_make(void *user, int ranks, int rings) {
    const ch_kind *kind = (const ch_kind *)user;
    ch_world *w = (ch_world *)calloc(1, sizeof *w);
    if (!w || pthread_mutex_init(&w->lock, NULL)) abort();
    w->ranks = ranks;
    w->wrong = kind->wrong;
    w->level = kind->level;
    w->refuses = kind->level == 1 && (ch_tells_late(w) || kind->wrong == CH_PREFIX ||
                                      kind->wrong == CH_AGAIN || kind->wrong == CH_STATES);
    w->begin_ns = ra_now_ns();
    w->random = (uint64_t)(ranks * 8 + rings) + 4711;
    for (int i = 0; i < rings; i++)
        for (int r = 0; r < ranks; r++) {
            ch_seat *s = &w->seat[i][r];
            s->world = w;
            s->ring = i;
            s->rank = r;
            ch_fill(s, kind->level);
        }
    return w;
}

/* LATE: what was sent to a rank before it came is lost. */
static const ra_transport *ch_join(void *world, int ring, int rank) {
    ch_world *w = (ch_world *)world;
    if (w->wrong == CH_LATE && ra_now_ns() - w->begin_ns > 90000000) {
        pthread_mutex_lock(&w->lock);
        for (int other = 0; other < w->ranks; other++)
            for (int i = 0; i < 2; i++) {
                ch_queue *q = &w->sends[ring][other][rank][i];
                for (; q->first; ch_remove(q, q->first)) ch_met(w, q->first, RA_OK);
            }
        pthread_mutex_unlock(&w->lock);
    }
    return &w->seat[ring][rank].t;
}

static void ch_leave(void *world, int ring, int rank, int why) {
    ch_world *w = (ch_world *)world;
    ch_seat *s = &w->seat[ring][rank];
    if (w->wrong == CH_UNSAFE && s->quiesces && s->late) {
        uint8_t *byte = (uint8_t *)s->late->buf;
        if (s->late->kind == RA_MSG_RECV) *byte ^= 1;
        else if (*byte != s->first && s->late->state != RA_MSG_DONE) abort();
        s->late->done = 0;
    }
    if (why) cf_store(&w->aborted[ring], 1);
    ch_purge(s);
}

static void ch_end(void *world) {
    ch_world *w = (ch_world *)world;
    for (int i = 0; i < CH_LOANS; i++) free(w->loan[i]);       /* after an abort they are ours */
    pthread_mutex_destroy(&w->lock);
    free(w);
}

/* The bundled world: one per ring. */
typedef struct bundled { ra_world *ring[CF_MOST_RINGS]; int rings; } bundled;

static void *bundled_make(void *user, int ranks, int rings) {
    bundled *b = (bundled *)calloc(1, sizeof *b);
    ra_world_desc wd = { 0 };
    (void)user;
    wd.ranks = ranks;
    b->rings = rings;
    for (int i = 0; i < rings; i++) if (ra_world_create(&b->ring[i], &wd)) abort();
    return b;
}

static const ra_transport *bundled_join(void *world, int ring, int rank) {
    return ra_world_transport(((bundled *)world)->ring[ring], rank);
}

static void bundled_leave(void *world, int ring, int rank, int why) {
    ra_world_leave(((bundled *)world)->ring[ring], rank, why);
}

static void bundled_end(void *world) {
    bundled *b = (bundled *)world;
    for (int i = 0; i < b->rings; i++) ra_world_destroy(b->ring[i]);
    free(b);
}

/* -------------------------------------------------------------------------- tests */
static cf_maker chaos(ch_kind *kind, int wrong, int level) {
    cf_maker m = { "chaos", NULL, ch_make, ch_join, ch_leave, ch_end, 0, 1, 0, 0, NULL };
    kind->wrong = wrong;
    kind->level = level;
    m.user = kind;
    m.name = level ? "chaos, level 1" : "chaos, level 0 inline";
    return m;
}

TEST(bundled_world) {
    cf_maker m = { "the bundled world", NULL, bundled_make, bundled_join, bundled_leave,
                   bundled_end, 0, 1, 0, 0, NULL };
    CHECK_EQ(cf_suite(&m, stdout), 0);
}

/* A rank that posts after another rank's abort, of which it has not learned yet, gets its op
 * back. */
TEST(bundled_post_after_abort) {
    for (int kind = RA_MSG_SEND; kind <= RA_MSG_RECV; kind++) {
        bundled *b = (bundled *)bundled_make(NULL, 2, 1);
        const ra_transport *t[2];
        uint8_t bytes[64] = { 0 };
        ra_transport_op op = { 0 }, *ops[1];
        for (int r = 0; r < 2; r++) t[r] = ra_world_transport(b->ring[0], r);
        op.kind = (uint8_t)kind;
        op.peer = 0;
        op.buf = bytes;
        op.len = sizeof bytes;
        op.state = RA_MSG_IDLE;
        ops[0] = &op;
        CHECK_EQ(t[0]->abort(t[0]->ctx, RA_E_IO), RA_OK);
        CHECK_EQ(t[1]->post(t[1]->ctx, ops, 1), RA_E_ABORTED);
        CHECK_EQ(op.state, RA_E_ABORTED);
        for (int r = 0; r < 2; r++) ra_world_leave(b->ring[0], r, RA_E_ABORTED);
        bundled_end(b);
    }
}

TEST(chaos_level_1) {
    ch_kind kind;
    cf_maker m = chaos(&kind, CH_RIGHT, 1);
    if (!h_run.large) m.most_ranks = 3;
    cf_report rep = cf_judge(&m, NULL, 0, stdout);
    CHECK_EQ(rep.failed, 0);
    CHECK_EQ(rep.unclaimed, 3);            /* those of sendrecv */
}

/* After a quiesce that is RA_E_UNSAFE on one rank and RA_OK on the others, no rank waits for
 * another for ever, and what the transport may still use is kept. */
TEST(unsafe_on_one_rank) {
    ch_kind kind;
    cf_maker m = chaos(&kind, CH_UNSAFE, 1);
    FILE *report = tmpfile();
    char line[600];
    int noted = 0;
    m.most_ranks = 3;
    CHECK_EQ(cf_judge(&m, NULL, 0, report).failed, 0);
    rewind(report);
    while (fgets(line, sizeof line, report)) {
        noted += strstr(line, "quiesce of rank 0 says") != NULL;
        fputs(line, stdout);
    }
    fclose(report);
    CHECK_EQ(noted, 3);                    /* other lengths, abort, quiesce */
}

/* Two processes from outside; rank 1 never returns from poll. */
static int stuck_post(void *ctx, ra_transport_op *const *ops, int n) {
    (void)ctx;
    for (int i = 0; i < n; i++) ops[i]->state = RA_MSG_PENDING;
    return RA_OK;
}

static int stuck_poll(void *ctx, ra_transport_op *const *ops, int n) {
    const ra_transport *t = (const ra_transport *)ctx;
    (void)ops, (void)n;
    while (t->rank) cf_sleep_us(100000);
    return RA_OK;
}

static void *stuck_make(void *user, int ranks, int rings) {
    (void)ranks, (void)rings;
    return user;
}

static const ra_transport *stuck_join(void *world, int ring, int rank) {
    ra_transport *t = (ra_transport *)world;
    (void)ring;
    t->size = sizeof *t;
    t->abi = RA_TRANSPORT_ABI;
    t->rank = rank;
    t->ranks = 2;
    t->ctx = t;
    t->post = stuck_post;
    t->poll = stuck_poll;
    return t;
}

static void stuck_leave(void *world, int ring, int rank, int why) {
    (void)world, (void)ring, (void)rank, (void)why;
}

static void stuck_end(void *world) { (void)world; }

/* A run that hangs ends by itself: both processes fail, and rank 0 says which test and where. */
TEST(stuck_from_outside) {
    ra_transport t = { 0 };
    cf_outside o = { 0, 2, NULL };
    cf_maker m = { "stuck", &t, stuck_make, stuck_join, stuck_leave, stuck_end, 1, 1, 0, 1, &o };
    char file[] = "/tmp/ra_stuck_XXXXXX", line[600];
    FILE *report = tmpfile();
    int fd = mkstemp(file), status, breach = 0, stuck = 0;
    pid_t pid[2];
    CHECK(fd >= 0 && report);
    close(fd);
    o.file = file;
    fflush(NULL);
    for (int r = 0; r < 2; r++) {
        pid[r] = fork();
        if (pid[r] == 0) {
            o.rank = r;
            (void)cf_judge(&m, "order", 0, r ? NULL : report);
            _exit(0);
        }
    }
    for (int r = 0; r < 2; r++) {
        CHECK(waitpid(pid[r], &status, 0) > 0);
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 1);
    }
    remove(file);
    rewind(report);
    while (fgets(line, sizeof line, report)) {
        breach |= strstr(line, "P 2, variant 0: rank 0: a send of") != NULL;
        stuck |= strstr(line, "FAIL  order, in flight   P 2, variant 0: the test does not end") &&
                 strstr(line, "rank 0 has ended the test, rank 1 is in poll");
    }
    fclose(report);
    CHECK(breach);
    CHECK(stuck);
}

TEST(chaos_level_0) {
    ch_kind kind;
    cf_maker m = chaos(&kind, CH_RIGHT, 0);
    cf_report rep = cf_judge(&m, NULL, 0, stdout);
    CHECK_EQ(rep.failed, 0);
    CHECK(rep.passed >= 6);
}

/* The report on a broken transport names the rule and gives its sentence. */
static int says_the_rule(FILE *report, int rule) {
    char line[600], name[80];
    int found = 0;
    rewind(report);
    snprintf(name, sizeof name, "(%s)", cf_rule_name[rule]);
    while (fgets(line, sizeof line, report))
        found |= strstr(line, "the contract: ") && strstr(line, cf_rule_text[rule]) &&
                 strstr(line, name);
    return found;
}

static int rule_of(int wrong) {
    return wrong < CF_RULE_COUNT ? wrong : ch_defect_rule[wrong - CH_RIGHT - 1];
}

static int ranks_for(int wrong) {
    if (wrong == CH_ANY_PEER) return 5;
    return wrong == CH_PEERS || h_run.large ? 3 : 2;
}

/* The first rule that the suite finds broken; -1: none, or it reports none. times: how much more
 * patience. */
static int found_in(int wrong, int times) {
    int level = wrong != CF_BOTH_WAYS && wrong != CF_ONE_SIDE && wrong != CF_SENDRECV_DEADLINE;
    FILE *report = h_run.verbose ? stdout : tmpfile();
    ch_kind kind;
    cf_maker m = chaos(&kind, wrong, level);
    int first;
    if (!report) abort();
    m.patience_ms = ch_patience_ms = times * CH_PATIENCE_MS;
    m.most_ranks = ranks_for(wrong);
    m.tells_peers = wrong != CF_ABORT_PENDING && wrong != CH_ABORT_KEEPS_SENDS &&
                    wrong != CH_QUIESCE_FORGETS;
    first = cf_judge(&m, NULL, 1, report).first;
    if (report == stdout) return first;
    if (first >= 0 && !says_the_rule(report, first)) first = -1;
    fclose(report);
    return first;
}

static void check_found(int wrong, int found) {
    int rule = rule_of(wrong);
    h_context("a transport that %s should break %s, found: %s",
              wrong < CF_RULE_COUNT ? "is named after the rule"
                                    : ch_defect_text[wrong - CH_RIGHT - 1],
              cf_rule_name[rule], found < 0 ? "nothing" : cf_rule_name[found]);
    /* a byte changed after DONE may by then be one that is sent on */
    if (rule == CF_RECV_AFTER && found == CF_READ_ONLY) found = rule;
    /* what is filled may by then be memory of something else */
    if (wrong == CH_QUIESCE_FORGETS && found == CF_CRASH) found = rule;
    CHECK_EQ(found, rule);
}

/* Of every broken transport in [first, end) the suite names the rule that it breaks, and names it
 * first. They mostly wait, so several are judged at a time, each in a process whose exit status is
 * what was found. */
static void judge_broken(int first, int last) {
    enum { AT_ONCE = 6 };
    int at_once = h_run.verbose ? 1 : AT_ONCE;
    for (int base = first; base < last; base += at_once) {
        pid_t pid[AT_ONCE];
        int end = base + at_once < last ? base + at_once : last, status;
        fflush(NULL);
        for (int wrong = base; wrong < end; wrong++) {
            pid[wrong - base] = h_case(wrong) ? fork() : -1;
            if (pid[wrong - base] == 0) {
                status = found_in(wrong, 1);
                if (status != rule_of(wrong)) status = found_in(wrong, 8);     /* a busy machine */
                fflush(NULL);
                _exit(status + 1);
            }
        }
        for (int wrong = base; wrong < end; wrong++) {
            if (!h_case(wrong) || !CHECK(waitpid(pid[wrong - base], &status, 0) > 0)) continue;
            check_found(wrong, WIFEXITED(status) ? WEXITSTATUS(status) - 1 : -1);
        }
    }
}

TEST(every_broken_rule_is_found) {
    if (!h_run.large) h_skip("transports that break one rule each: --long, in make check-full");
    else judge_broken(0, CF_RULE_COUNT);
}

TEST(other_defects_are_found) {
    if (!h_run.large) h_skip("transports with one defect each: --long, in make check-full");
    else judge_broken(CH_RIGHT + 1, CH_COUNT);
}

int main(int argc, char **argv) {
    static const h_test tests[] = {
        ENTRY(bundled_world), ENTRY(bundled_post_after_abort), ENTRY(chaos_level_1),
        ENTRY(unsafe_on_one_rank), ENTRY(stuck_from_outside),
        ENTRY(chaos_level_0), ENTRY(every_broken_rule_is_found), ENTRY(other_defects_are_found),
    };
    return h_main(argc, argv, tests, sizeof tests / sizeof *tests);
}
