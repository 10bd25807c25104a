#ifndef RINGATTN_CONFORMANCE_H
#define RINGATTN_CONFORMANCE_H

/* Does a transport keep the contract of ra_transport? One header for authors of transports.
 *
 *   #define _POSIX_C_SOURCE 200809L
 *   #define RINGATTN_IMPLEMENTATION
 *   #include "ringattn.h"
 *   #include "tests/conformance/conformance.h"
 *
 *   static void *make(void *user, int ranks, int rings);                   see cf_maker
 *   static const ra_transport *join(void *world, int ring, int rank);
 *   static void leave(void *world, int ring, int rank, int why);
 *   static void end(void *world);
 *
 *   int main(void) {
 *       cf_maker m = { "mine", NULL, make, join, leave, end, 0, 0, 0, 0, NULL };
 *       return cf_suite(&m, stdout) != 0;
 *   }
 *
 * Every test runs in a separate child process under a time limit, with its ranks as threads of that
 * process or as processes. So a transport that hangs or crashes costs one test. Each line of the
 * report is a capability: passed with these numbers of ranks, not claimed, or broken; then which
 * sentence of the contract is broken, on which rank, and how that shows. Of a test that does not
 * end it says in which call each rank is.
 *
 * The suite requires no more than the contract does: no test needs a send to be done before its
 * receive is posted, because a transport may hold no message at all. Times are checked only where
 * contract names them, and then with a second or more to spare. */
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#ifdef __linux__
#include <sys/prctl.h>
#endif

enum { CF_MOST_RANKS = 8, CF_MOST_RINGS = 2, CF_FLAGS = 8 };
enum { CF_TOKENS = 1024, CF_HEADS = 2, CF_DIM = 16, CF_ROW = CF_HEADS * CF_DIM };

/* For processes that already run, as under mpirun. Each calls cf_suite and makes every world; the
 * processes beyond a world's number of ranks take no part in it. They share a file that is new for
 * the run. After a breach nothing more is judged. If a test does not end in time, rank 0 reports it
 * and all processes exit with status 1. */
typedef struct cf_outside { int rank, ranks; const char *file; } cf_outside;

/* What the author of a transport provides. Calls of one rank come from that rank's thread. */
typedef struct cf_maker {
    const char *name;
    void *user;
    void *(*make)(void *user, int ranks, int rings);   /* before the ranks start; null: failed */
    const ra_transport *(*join)(void *world, int ring, int rank); /* the rank's transport in that
                                        * ring; may meet the other ranks. null: failed */
    void (*leave)(void *world, int ring, int rank, int why); /* no more calls; why as in
                                        * ra_world_leave */
    void (*end)(void *world);           /* after all ranks have left */
    int processes;                      /* 1: ranks are processes forked after make, 0: threads */
    int tells_peers;                    /* 1: abort also fails what other ranks have pending */
    int most_ranks;                     /* 0: 8 */
    int64_t patience_ms;                /* how long the suite waits for what must come; 0: 30000.
                                        * Only a test that fails waits that long */
    const cf_outside *outside;          /* null: the suite starts the ranks */
} cf_maker;

/* Every rule: name, and the sentence of the contract. */
#define CF_RULES(X)                                                                               \
    X(STRUCT, "size, abi, caps, channels, max_ops, align, rank and ranks are what their comments" \
              " say, and each callback that another one needs is there")                          \
    X(ORDER, "the n-th send matches the n-th receive per (peer, channel)")                        \
    X(CHANNELS, "messages match per (peer, channel): channels do not mix")                        \
    X(PEERS, "messages match per (peer, channel): what is sent to one rank reaches no other")      \
    X(RINGS, "rings do not mix, though the same ranks are in both")                               \
    X(BYTES, "the bytes of a message arrive as they were sent")                                   \
    X(VISIBLE, "a receive is DONE when its bytes are in the buffer, not before")                  \
    X(REUSE, "a send is DONE when its buffer may be used again, not before")                      \
    X(ARRIVES, "a send that is DONE arrives even if its rank never calls the transport again")    \
    X(RECV_AFTER, "a receive's buffer is the transport's until DONE, and no longer")              \
    X(READ_ONLY, "a send's buffer is read-only for all while PENDING")                            \
    X(BOUNDS, "a receive writes its len bytes and no others")                                     \
    X(FIELDS, "of an op the transport writes state, done and scratch, and buf of a loan")         \
    X(DONE_BYTES, "done is the bytes moved, written before DONE; 0 counts as len")                \
    X(TRUNC, "keep message boundaries: another length is RA_E_TRUNC")                             \
    X(TRUNC_DONE, "RA_E_TRUNC of a receive: buf has the bytes that fit, and done is the length of" \
                  " the message, or 0")                                                           \
    X(LARGEST, "messages up to max_msg are carried")                                              \
    X(PREFIX, "post accepts a prefix of the idle ops per (peer, channel, direction)")             \
    X(AGAIN, "post: RA_OK means that none is left IDLE, RA_AGAIN that some are")                  \
    X(STATES, "a state is IDLE, PENDING, DONE or RA_E_*; poll and wait move PENDING ops alone")   \
    X(CODES, "post returns RA_OK, RA_AGAIN or an error, poll and wait RA_OK or an error, and an"  \
             " error only if something went wrong")                                               \
    X(PROGRESS, "all accepted ops make progress at the same time, whatever the order at the"      \
                " peers")                                                                         \
    X(POST_BLOCKS, "post never blocks")                                                           \
    X(POLL_BLOCKS, "poll never blocks")                                                           \
    X(POLL_NONE, "poll drives progress, also with n = 0")                                         \
    X(ANY_PEER, "RA_CAP_ANY_PEER: not only rank +- 1")                                            \
    X(ANY_THREAD, "RA_CAP_ANY_THREAD: calls may come from any thread, one at a time")             \
    X(LATE, "what is sent to or awaited from a rank that has yet to come is kept until it comes") \
    X(WAIT_IDLE, "wait returns at once if no op is PENDING")                                      \
    X(WAIT_WAKES, "wait returns when one of its ops leaves PENDING")                              \
    X(WAIT_DEADLINE, "wait returns by deadline_ns, at once if that has passed")                   \
    X(WAIT_TIMEOUT, "wait at its deadline is RA_OK: nothing is wrong with the transport")         \
    X(ABORT_PENDING, "abort makes pending ops fail, whatever peers do")                           \
    X(ABORT_LATER, "abort makes later ops fail, whatever peers do")                               \
    X(ABORT_WAKES, "abort, from any thread, wakes wait")                                          \
    X(ABORT_TWICE, "abort is idempotent: the second changes nothing")                             \
    X(ABORT_BLOCKS, "abort is wait-free")                                                         \
    X(ABORT_PEERS, "this transport's abort reaches the peers")                                    \
    X(QUIET, "after quiesce has returned RA_OK no buffer of the ring is touched")                 \
    X(QUIESCE_DEADLINE, "quiesce returns by deadline_ns, at once if that has passed")             \
    X(LOAN_ASKED, "only a receive with RA_MSG_LOAN_OK gets lent memory")                          \
    X(LOAN_KEEPS, "lent memory keeps its bytes until release")                                    \
    X(LOAN_ALIGN, "lent memory is aligned as buffers are")                                        \
    X(REG, "reg and dereg work in pairs, and ops with and without mr are carried")                \
    X(BOTH_WAYS, "sendrecv sends and receives at the same time")                                  \
    X(ONE_SIDE, "sendrecv: a side with nothing to move has RA_NO_PEER and length 0")              \
    X(SENDRECV_DEADLINE, "RA_CAP_DEADLINE: sendrecv returns by deadline_ns even if the peer is"   \
                         " dead, and then with RA_E_TIMEOUT or RA_E_PEER")                        \
    X(LONE, "a ring of one makes no call")                                                        \
    X(PASS, "a pass ends with RA_OK and the bits of one rank")                                    \
    X(PASS_ENDS, "no call outlasts its deadline, whatever a cancelled rank leaves behind")        \
    X(CRASH, "a test ends by itself")
#define CF_ENUM(name, text) CF_##name,
#define CF_NAME(name, text) #name,
#define CF_TEXT(name, text) text,
enum { CF_RULES(CF_ENUM) CF_RULE_COUNT };
static const char *const cf_rule_name[] = { CF_RULES(CF_NAME) NULL };
static const char *const cf_rule_text[] = { CF_RULES(CF_TEXT) NULL };
#undef CF_ENUM
#undef CF_NAME
#undef CF_TEXT

/* Where a rank is, for the report on a test that does not end. */
#define CF_PLACES(X)                                                                              \
    X(OUTSIDE, "has not begun")   X(MAKE, "is in make")            X(JOIN, "is in join")          \
    X(TEST, "is in the test")     X(POST, "is in post")            X(POLL, "is in poll")          \
    X(WAIT, "is in wait")         X(SENDRECV, "is in sendrecv")    X(ABORT, "is in abort")        \
    X(QUIESCE, "is in quiesce")   X(MEET, "waits for the others")  X(LEAVE, "is in leave")        \
    X(END, "is in end")           X(DONE, "has ended the test")
#define CF_PLACE(name, text) CF_AT_##name,
#define CF_TEXT(name, text) text,
enum { CF_PLACES(CF_PLACE) CF_PLACE_COUNT };
static const char *const cf_place_text[] = { CF_PLACES(CF_TEXT) NULL };
#undef CF_PLACE
#undef CF_TEXT

/* What the ranks of a test share, in a mapped file: they may be processes. */
typedef struct cf_shared {
    int32_t arrived, round;            /* of the barrier */
    int32_t over;                      /* 1: a rank has found a breach */
    int32_t rule;                      /* -1: none */
    int32_t unclaimed;                 /* 1: the transport does not claim what the test is about */
    int32_t noted;                     /* 1: a rank has written the note of a quiesce */
    int32_t place[CF_MOST_RANKS];      /* CF_AT_* */
    int32_t flag[CF_MOST_RANKS][CF_FLAGS];
    char text[400], note[160];
    float o[CF_TOKENS * CF_ROW], d_q[CF_TOKENS * CF_ROW], d_k[CF_TOKENS * CF_DIM],
        d_v[CF_TOKENS * CF_DIM], lse[CF_TOKENS * CF_HEADS];
} cf_shared;

static inline int64_t cf_patience_ms(const cf_maker *m) {
    return m->patience_ms ? m->patience_ms : 30000;
}

typedef struct cf_id { int from, to, ring, channel, seq; } cf_id;
typedef struct cf_op {
    ra_transport_op op, was;                     /* was: as it was posted */
    uint8_t *mem, *own;                /* own: the buffer between two guards */
    cf_id id;
    int checked, failed;               /* DONE and looked at; ended with an error */
    const uint8_t *lent;
} cf_op;

struct cf_test;
typedef struct cf_rank {
    cf_shared *shared;
    const cf_maker *maker;
    const struct cf_test *test;
    void *world;
    int rank, ranks, next, prev, variant;
    int64_t patience;                  /* ns */
    const ra_transport *t[CF_MOST_RINGS];
    int breaks;                        /* 1: this test breaks off what it has posted */
    cf_op broken[12];                  /* those ops: unless quiesce returns RA_OK, the transport
                                        * may use them and their buffers until the world's end */
    void *leaked[2];                   /* seen by tools that look for leaks */
    uint64_t random;
} cf_rank;

enum { CF_LEVEL_0 = 1, CF_LEVEL_1 = 2, CF_ALONE = 4, CF_TWO_RINGS = 8, CF_ONE_WORLD = 16,
       CF_PASSES = 32, CF_LATE_RANK = 64 };
typedef struct cf_test {
    const char *name;
    void (*run)(cf_rank *r);
    int flags, variants;
    int hangs;                         /* the rule that is broken if it does not end */
} cf_test;

/* -------------------------------------------------------------------------- what ranks share */
static inline int32_t cf_load(const int32_t *p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
static inline void cf_store(int32_t *p, int32_t x) { __atomic_store_n(p, x, __ATOMIC_RELEASE); }
static inline void cf_place(cf_shared *s, int rank, int place) {
    if (rank < CF_MOST_RANKS) cf_store(&s->place[rank], place);
}

static inline void cf_at(const cf_rank *r, int place) { cf_place(r->shared, r->rank, place); }
static inline int cf_over(const cf_rank *r) { return cf_load(&r->shared->over); }

static inline void cf_sleep_us(long us) {
    struct timespec t;
    t.tv_sec = us / 1000000;
    t.tv_nsec = us % 1000000 * 1000;
    nanosleep(&t, NULL);
}

static inline uint32_t cf_random(cf_rank *r, uint32_t below) {
    r->random ^= r->random << 13;
    r->random ^= r->random >> 7;
    r->random ^= r->random << 17;
    return (uint32_t)((r->random >> 20) % below);
}

/* The first breach of a test counts. Returns 0, for `return cf_break(...)`. */
static inline int cf_break(cf_rank *r, int rule, const char *format, ...) {
    cf_shared *s = r->shared;
    int32_t none = -1;
    va_list args;
    if (!__atomic_compare_exchange_n(&s->rule, &none, rule, 0, __ATOMIC_ACQ_REL,
                                     __ATOMIC_ACQUIRE))
        return 0;
    int n = snprintf(s->text, sizeof s->text, "rank %d: ", r->rank);
    va_start(args, format);
    vsnprintf(s->text + n, sizeof s->text - (size_t)n, format, args);
    va_end(args);
    cf_store(&s->over, 1);
    return 0;
}

/* Waits until a flag has the value, at most `ns`; 1: it has. */
static inline int cf_await(const cf_rank *r, const int32_t *flag, int32_t value, int64_t ns) {
    int64_t until = ra_now_ns() + ns;
    while (cf_load(flag) != value) {
        if (cf_over(r) || ra_now_ns() > until) return cf_load(flag) == value;
        cf_sleep_us(100);
    }
    return 1;
}

/* All ranks of the test meet; 0: the test is over. */
static inline int cf_meet(cf_rank *r) {
    cf_shared *s = r->shared;
    int32_t round = cf_load(&s->round);
    if (__atomic_add_fetch(&s->arrived, 1, __ATOMIC_ACQ_REL) == r->ranks) {
        cf_store(&s->arrived, 0);
        cf_store(&s->round, round + 1);
    }
    cf_at(r, CF_AT_MEET);
    while (cf_load(&s->round) == round && !cf_over(r)) cf_sleep_us(50);
    cf_at(r, CF_AT_TEST);
    return !cf_over(r);
}

/* -------------------------------------------------------------------------- ops and messages */
enum { CF_POISON_SENT = 0xA5, CF_POISON_RECV = 0x5A, CF_POISON_GUARD = 0x3C };

static inline uint64_t cf_mix(uint64_t x) {
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
}

static inline uint64_t cf_key(cf_id m) {
    uint64_t k = (uint64_t)m.from * 64 + (uint64_t)m.to;
    k = (k * 64 + (uint64_t)m.ring) * 64 + (uint64_t)m.channel;
    return cf_mix(k << 32 ^ (uint64_t)(m.seq + 1)) | 1;
}

/* Writes the message, or (check) compares: bytes that differ. */
static inline size_t cf_pattern(uint8_t *p, size_t n, cf_id m, int check) {
    uint64_t key = cf_key(m);
    size_t differ = 0;
    for (size_t i = 0; i < n; i += 8, key += 0x9E3779B97F4A7C15u) {
        uint64_t word = key ^ key >> 29;
        uint8_t bytes[8];
        size_t part = n - i < 8 ? n - i : 8;
        if (check && part == 8) {
            uint64_t got;
            memcpy(&got, p + i, 8);
            if (got == word) continue;
        }
        memcpy(bytes, &word, 8);
        if (!check) memcpy(p + i, bytes, part);
        else if (memcmp(p + i, bytes, part))
            for (size_t j = 0; j < part; j++) differ += p[i + j] != bytes[j];
    }
    return differ;
}

static inline int cf_all(const uint8_t *p, size_t n, int value) {
    return !n || (p[0] == value && !memcmp(p, p + 1, n - 1));
}

static inline size_t cf_align(const cf_rank *r, int ring) {
    return r->t[ring]->align ? r->t[ring]->align : 64;
}

/* Prepares op to send or receive message m of n bytes; memory is the op's until cf_op_free. */
static inline void cf_op_make(cf_rank *r, cf_op *o, int kind, cf_id m, size_t n) {
    size_t align = cf_align(r, m.ring), guard = align < 64 ? 64 : align;
    uint32_t bits = r->t[m.ring]->tag_bits ? r->t[m.ring]->tag_bits : 15;
    void *p = NULL;
    memset(o, 0, sizeof *o);
    if (posix_memalign(&p, guard, n + 2 * guard)) abort();
    o->mem = (uint8_t *)p;
    o->own = o->mem + guard;
    memset(o->mem, CF_POISON_GUARD, n + 2 * guard);
    if (kind == RA_MSG_SEND) (void)cf_pattern(o->own, n, m, 0);
    else memset(o->own, CF_POISON_RECV, n);
    o->id = m;
    o->op.kind = (uint8_t)kind;
    o->op.channel = (uint8_t)m.channel;
    o->op.peer = kind == RA_MSG_SEND ? m.to : m.from;
    o->op.tag = cf_key(m) & (bits >= 64 ? ~(uint64_t)0 : ((uint64_t)1 << bits) - 1);
    o->op.buf = o->own;
    o->op.len = n;
    o->was = o->op;
}

static inline void cf_op_free(cf_op *o) {
    free(o->mem);
    o->mem = o->own = NULL;
}

/* Time for a quiesce, which waits for the others. */
static inline int64_t cf_brief(const cf_rank *r) {
    return r->patience < 5000000000 ? r->patience / 2 : 2500000000;
}

static inline cf_id cf_message(int from, int to, int ring, int channel, int seq) {
    cf_id m;
    m.from = from; m.to = to; m.ring = ring; m.channel = channel; m.seq = seq;
    return m;
}

/* Which rule a message breaks that is not what it should be. */
static inline int cf_wrong_bytes(cf_rank *r, const cf_op *o, uint8_t *p) {
    size_t n = o->op.len, differ = cf_pattern(p, n, o->id, 1);
    cf_id m = o->id;
    if (cf_all(p, n, CF_POISON_RECV))
        return cf_break(r, CF_VISIBLE, "a receive of %zu bytes from rank %d, channel %d is DONE"
                        " but nothing is in its buffer", n, m.from, m.channel);
    if (cf_all(p, n, CF_POISON_SENT))
        return cf_break(r, CF_REUSE, "what came from rank %d, channel %d is what its buffer held"
                        " after the send was DONE", m.from, m.channel);
    for (m.seq = o->id.seq - 40; n >= 8 && m.seq < o->id.seq + 40; m.seq++)
        if (!cf_pattern(p, n, m, 1))
            return cf_break(r, CF_ORDER, "receive %d from rank %d, channel %d got message %d",
                            o->id.seq, m.from, m.channel, m.seq);
    m = o->id;
    for (m.channel = 0; n >= 8 && m.channel < 2; m.channel++)
        if (!cf_pattern(p, n, m, 1))
            return cf_break(r, CF_CHANNELS, "a receive from rank %d on channel %d got a message of"
                            " channel %d", m.from, o->id.channel, m.channel);
    for (int i = 0; n >= 8 && i < r->ranks * r->ranks; i++) {
        m = o->id;
        m.from = i / r->ranks;
        m.to = i % r->ranks;
        if (!cf_pattern(p, n, m, 1))
            return cf_break(r, CF_PEERS, "a receive from rank %d got a message from rank %d to"
                            " rank %d", o->id.from, m.from, m.to);
    }
    m = o->id;
    for (m.ring = 0; n >= 8 && m.ring < CF_MOST_RINGS; m.ring++)
        if (!cf_pattern(p, n, m, 1))
            return cf_break(r, CF_RINGS, "a receive of ring %d got a message of ring %d",
                            o->id.ring, m.ring);
    return cf_break(r, CF_BYTES, "%zu of %zu bytes from rank %d, channel %d are others", differ, n,
                    m.from, m.channel);
}

/* A receive that is DONE for the first time. */
static inline int cf_check_received(cf_rank *r, cf_op *o) {
    uint8_t *at = (uint8_t *)o->op.buf;
    if (at != o->own) {
        if (!(o->was.flags & RA_MSG_LOAN_OK))
            return cf_break(r, CF_LOAN_ASKED, "buf of a receive without RA_MSG_LOAN_OK changed");
        if ((uintptr_t)at % cf_align(r, o->id.ring))
            return cf_break(r, CF_LOAN_ALIGN, "lent memory at %p, align is %zu", (void *)at,
                            cf_align(r, o->id.ring));
        o->lent = at;
    }
    if (cf_pattern(at, o->op.len, o->id, 1)) return cf_wrong_bytes(r, o, at);
    return 1;
}

/* An op that is DONE: checks what the contract says about that moment. Then a send's buffer is used
 * for something else. */
static inline int cf_check_done(cf_rank *r, cf_op *o) {
    size_t guard = (size_t)(o->own - o->mem);
    o->checked = 1;
    if (o->op.done && o->op.done != o->op.len)
        return cf_break(r, CF_DONE_BYTES, "an op of %zu bytes is DONE with done %zu", o->op.len,
                        o->op.done);
    if (!cf_all(o->mem, guard, CF_POISON_GUARD) ||
        !cf_all(o->own + o->op.len, guard, CF_POISON_GUARD))
        return cf_break(r, CF_BOUNDS, "bytes beside the buffer of an op of %zu bytes were written",
                        o->op.len);
    if (o->op.kind == RA_MSG_RECV) return cf_check_received(r, o);
    if (cf_pattern(o->own, o->op.len, o->id, 1))
        return cf_break(r, CF_READ_ONLY, "the buffer of a send of %zu bytes has changed",
                        o->op.len);
    memset(o->own, CF_POISON_SENT, o->op.len);
    return 1;
}

/* Receives that are DONE must stay unchanged. */
static inline int cf_check_kept(cf_rank *r, cf_op *const *ops, int n) {
    for (int i = 0; i < n; i++) {
        cf_op *o = ops[i];
        if (o->op.kind != RA_MSG_RECV || !o->checked || o->failed) continue;
        if (!cf_pattern((uint8_t *)o->op.buf, o->op.len, o->id, 1)) continue;
        return cf_break(r, o->lent ? CF_LOAN_KEEPS : CF_RECV_AFTER,
                        "%zu bytes from rank %d changed after the receive was DONE", o->op.len,
                        o->id.from);
    }
    return 1;
}

static inline int cf_check_fields(cf_rank *r, const cf_op *o) {
    const ra_transport_op *a = &o->op, *b = &o->was;
    if (a->kind == b->kind && a->channel == b->channel && a->flags == b->flags &&
        a->peer == b->peer && a->tag == b->tag && a->len == b->len && a->mr == b->mr &&
        (b->kind == RA_MSG_RECV || a->buf == b->buf))
        return 1;
    return cf_break(r, CF_FIELDS, "an op to rank %d, channel %d, is not as it was posted: len %zu,"
                    " was %zu; tag %llu, was %llu", b->peer, b->channel, a->len, b->len,
                    (unsigned long long)a->tag, (unsigned long long)b->tag);
}

/* The rule that an error breaks, where the test is about something that may be refused. */
static inline int cf_error_rule(const cf_rank *r) {
    const int rule = r->test->hangs;
    return rule == CF_LARGEST || rule == CF_ANY_PEER || rule == CF_ANY_THREAD ? rule : CF_CODES;
}

/* Checks what a call did to each op. before: the states before it. */
static inline int cf_check_states(cf_rank *r, cf_op *const *ops, int n, const int32_t *before,
                                  int posting) {
    for (int i = 0; i < n; i++) {
        cf_op *o = ops[i];
        int32_t s = o->op.state;
        if (!cf_check_fields(r, o)) return 0;
        if (s > RA_MSG_DONE || (s < 0 && (s > RA_E_MISMATCH || s < RA_E_UNSAFE)))
            return cf_break(r, CF_STATES, "an op has state %d, which is none", s);
        if (s != before[i] && before[i] != RA_MSG_PENDING && !posting)
            return cf_break(r, CF_STATES, "poll moved an op from state %d to %d", before[i], s);
        if (s != before[i] && (before[i] == RA_MSG_DONE || before[i] < 0 || s == RA_MSG_IDLE))
            return cf_break(r, CF_STATES, "an op went from state %d to %d", before[i], s);
        if (s < 0 && !r->breaks && s == RA_E_TRUNC)
            return cf_break(r, CF_TRUNC,
                            "%s of %zu bytes, rank %d, ended with RA_E_TRUNC though"
                            " lengths are equal",
                            o->op.kind == RA_MSG_SEND ? "a send" : "a receive", o->op.len,
                            o->op.peer);
        if (s < 0 && !r->breaks)
            return cf_break(r, cf_error_rule(r),
                            "an op of %zu bytes, rank %d, channel %d ended with %s", o->op.len,
                            o->op.peer, o->op.channel, ra_status_text(s));
        if (s < 0) o->failed = o->checked = 1;
        if (s == RA_MSG_DONE && !o->checked && !cf_check_done(r, o)) return 0;
    }
    return 1;
}

/* If one op of a (peer, channel, direction) stays idle, all after it do. */
static inline int cf_check_prefix(cf_rank *r, cf_op *const *ops, int n, const int32_t *before) {
    for (int i = 0; i < n; i++)
        for (int j = i + 1; j < n && ops[i]->op.state == RA_MSG_IDLE; j++) {
            const ra_transport_op *a = &ops[i]->op, *b = &ops[j]->op;
            if (a->kind != b->kind || a->peer != b->peer || a->channel != b->channel ||
                before[j] != RA_MSG_IDLE || b->state == RA_MSG_IDLE)
                continue;
            return cf_break(r, CF_PREFIX, "of the %ss of channel %d, rank %d, one was accepted and"
                            " an earlier one was not", a->kind == RA_MSG_SEND ? "send" : "receive",
                            a->channel, a->peer);
        }
    return 1;
}

enum { CF_MOST = 64 };
static inline void cf_list(cf_op *const *ops, int n, ra_transport_op **list, int32_t *before) {
    for (int i = 0; i < n; i++) {
        list[i] = &ops[i]->op;
        before[i] = ops[i]->op.state;
    }
}

/* 1: fine; 0: the test is over; negative: an error, which the test expects (r->breaks). */
static inline int cf_post(cf_rank *r, int ring, cf_op *const *ops, int n) {
    ra_transport_op *list[CF_MOST];
    int32_t before[CF_MOST] = { 0 };
    int code, idle = 0;
    cf_list(ops, n, list, before);
    cf_at(r, CF_AT_POST);
    code = r->t[ring]->post(r->t[ring]->ctx, list, n);
    cf_at(r, CF_AT_TEST);
    if (!cf_check_states(r, ops, n, before, 1)) return 0;
    if (code < 0 && r->breaks) return code;
    if (code != RA_OK && code != RA_AGAIN)
        return cf_break(r, cf_error_rule(r), "post returned %d (%s)", code, ra_status_text(code));
    for (int i = 0; i < n; i++) idle += ops[i]->op.state == RA_MSG_IDLE;
    if (code == RA_OK && idle)
        return cf_break(r, CF_AGAIN, "post returned RA_OK and left %d ops idle", idle);
    if (code == RA_AGAIN && !idle)
        return cf_break(r, CF_AGAIN, "post returned RA_AGAIN and left no op idle");
    return cf_check_prefix(r, ops, n, before);
}

/* deadline -1: poll, otherwise wait with that deadline. */
static inline int cf_poll(cf_rank *r, int ring, cf_op *const *ops, int n, int64_t deadline) {
    const ra_transport *t = r->t[ring];
    ra_transport_op *list[CF_MOST];
    int32_t before[CF_MOST] = { 0 };
    int code;
    cf_list(ops, n, list, before);
    cf_at(r, deadline < 0 ? CF_AT_POLL : CF_AT_WAIT);
    code = deadline < 0 ? t->poll(t->ctx, list, n) : t->wait(t->ctx, list, n, deadline);
    cf_at(r, CF_AT_TEST);
    if (!cf_check_states(r, ops, n, before, 0)) return 0;
    if (code < 0 && r->breaks) return code;
    if (code == RA_E_TIMEOUT && deadline >= 0)
        return cf_break(r, CF_WAIT_TIMEOUT, "wait returned RA_E_TIMEOUT, which fails the ring");
    if (code != RA_OK)
        return cf_break(r, cf_error_rule(r), "%s returned %d (%s)",
                        deadline < 0 ? "poll" : "wait", code,
                        ra_status_text(code));
    return 1;
}

static inline int cf_unfinished(cf_op *const *ops, int n) {
    int left = 0;
    for (int i = 0; i < n; i++)
        left += ops[i]->op.state == RA_MSG_IDLE || ops[i]->op.state == RA_MSG_PENDING;
    return left;
}

/* Posts and polls as a ring does, until all ops are done (1), the test is over (0) or ns have
 * passed (2). */
static inline int cf_drive(cf_rank *r, int ring, cf_op *const *ops, int n, int64_t ns) {
    int64_t until = ra_now_ns() + ns;
    while (cf_unfinished(ops, n)) {
        int idle = 0, code = 1, left = cf_unfinished(ops, n);
        for (int i = 0; i < n; i++) idle |= ops[i]->op.state == RA_MSG_IDLE;
        if (idle) code = cf_post(r, ring, ops, n);
        if (code == 1) code = cf_poll(r, ring, ops, n, -1);
        if (code != 1) return code;
        if (cf_over(r)) return 0;
        if (left != cf_unfinished(ops, n)) continue;
        if (ra_now_ns() > until) return 2;
        if (!r->t[ring]->wait || cf_random(r, 2)) cf_sleep_us(20 + (long)cf_random(r, 100));
        else if ((code = cf_poll(r, ring, ops, n, ra_deadline_ms(2))) != 1) return code;
    }
    return cf_check_kept(r, ops, n);
}

/* Posts until no op is idle, for transports that accept only some: 1, or 0 (over, or never). */
static inline int cf_accept(cf_rank *r, cf_op *const *ops, int n) {
    int64_t until = ra_now_ns() + r->patience;
    for (;;) {
        int idle = 0;
        for (int i = 0; i < n; i++) idle |= ops[i]->op.state == RA_MSG_IDLE;
        if (!idle) return 1;
        if (ra_now_ns() > until)
            return cf_break(r, CF_PROGRESS, "an op is not accepted after %lld ms",
                            (long long)(r->patience / 1000000));
        if (cf_drive(r, 0, ops, n, 0) <= 0) return 0;
    }
}

/* All ops must be done in time. rule: what is broken if they are not. */
static inline int cf_finish(cf_rank *r, int ring, cf_op *const *ops, int n, int rule) {
    int code = cf_drive(r, ring, ops, n, r->patience);
    if (code != 2) return code == 1;
    for (int i = 0; i < n; i++)
        if (ops[i]->op.state == RA_MSG_IDLE || ops[i]->op.state == RA_MSG_PENDING)
            return cf_break(r, rule, "%s of %zu bytes, rank %d, channel %d is %s after %lld ms, and"
                            " the other side is there",
                            ops[i]->op.kind == RA_MSG_SEND ? "a send" : "a receive",
                            ops[i]->op.len, ops[i]->op.peer, ops[i]->op.channel,
                            ops[i]->op.state == RA_MSG_IDLE ? "not accepted" : "PENDING",
                            (long long)(r->patience / 1000000));
    return 0;
}

static inline size_t cf_largest(const cf_rank *r) {
    const size_t most = (size_t)4 << 20, given = r->t[0]->max_msg;
    return given && given < most ? given : most;
}

static inline int cf_channels(const cf_rank *r) { return r->t[0]->channels > 1 ? 2 : 1; }

/* How many ops may be pending at once, of the `cap` that a test would use. */
static inline int cf_depth(const cf_rank *r, int cap) {
    int most = r->t[0]->max_ops ? (int)(r->t[0]->max_ops < 64 ? r->t[0]->max_ops : 64) : 2;
    return most < cap ? most : cap;
}

static inline void cf_unclaimed(cf_rank *r) { cf_store(&r->shared->unclaimed, 1); }

static inline int cf_sendrecv(cf_rank *r, cf_op *out, cf_op *in, int64_t deadline) {
    const ra_transport *t = r->t[0];
    int code;
    cf_at(r, CF_AT_SENDRECV);
    code = t->sendrecv(t->ctx, out ? out->op.peer : RA_NO_PEER, out ? out->own : NULL,
                       out ? out->op.len : 0, in ? in->op.peer : RA_NO_PEER, in ? in->own : NULL,
                       in ? in->op.len : 0, out ? out->op.tag : in->op.tag, deadline);
    cf_at(r, CF_AT_TEST);
    if (code != RA_OK) return code;
    if (in && !cf_check_done(r, in)) return RA_E_IO;
    if (out && !cf_check_done(r, out)) return RA_E_IO;
    return RA_OK;
}

/* -------------------------------------------------------------------------- tests of level 1 */
static inline void cf_free_all(cf_op *ops, int n) { while (n-- > 0) cf_op_free(&ops[n]); }

/* One message to each neighbour and one from each, on every channel; returns 1 or 0 (over). */
static inline int cf_swap(cf_rank *r, int ring, int seq, size_t n, int rule) {
    for (int way = 0; way < 2 * cf_channels(r); way++) {
        int to = way & 1 ? r->prev : r->next, from = way & 1 ? r->next : r->prev;
        cf_op ops[2], *list[2] = { &ops[0], &ops[1] };
        cf_op_make(r, &ops[0], RA_MSG_SEND,
                   cf_message(r->rank, to, ring, way >> 1, seq + (way & 1)), n);
        cf_op_make(r, &ops[1], RA_MSG_RECV,
                   cf_message(from, r->rank, ring, way >> 1, seq + (way & 1)), n);
        if (!cf_finish(r, ring, list, 2, rule)) return 0;
        cf_free_all(ops, 2);
    }
    return 1;
}

static inline void cf_t_struct(cf_rank *r) {
    const ra_transport *t = r->t[0];
    const uint32_t known = RA_CAP_ANY_THREAD | RA_CAP_ANY_PEER | RA_CAP_LOAN | RA_CAP_DEADLINE |
                           RA_CAP_SHARED | RA_CAP_HELPER;
    const char *wrong = NULL;
    if (t->size < offsetof(ra_transport, error_text) + sizeof(void *)) wrong = "size";
    else if (t->abi != RA_TRANSPORT_ABI) wrong = "abi";
    else if (t->caps & ~known) wrong = "caps";
    else if (t->channels > 64) wrong = "channels";
    else if (t->tag_bits > 64) wrong = "tag_bits";
    else if (t->max_ops == 1) wrong = "max_ops";
    else if (t->align > 4096 || (t->align & (t->align - 1))) wrong = "align";
    else if (t->ranks && t->ranks != r->ranks) wrong = "ranks";
    else if (t->ranks ? t->rank != r->rank : t->rank != 0) wrong = "rank";
    else if (!t->post && !t->sendrecv) wrong = "post and sendrecv";
    else if (t->post && !t->poll) wrong = "poll";
    else if (t->reg && !t->dereg) wrong = "dereg";
    else if ((t->caps & RA_CAP_LOAN) && !t->release) wrong = "release";
    if (wrong) cf_break(r, CF_STRUCT, "%s is not what it must be", wrong);
}

static inline void cf_t_sizes(cf_rank *r) {
    static const int size[] = { 1, 2, 3, 7, 8, 63, 64, 65, 127, 4096, 4097, 65535, 65537, 300001 };
    for (int i = 0; i < (int)(sizeof size / sizeof *size); i++)
        if (!cf_swap(r, 0, 2 * i, (size_t)size[i], CF_PROGRESS)) return;
}

/* Rank 0 sends. When the send is DONE it makes no more calls until rank 1 has the message. If the
 * send is never DONE, what is missing is PROGRESS. */
static inline void cf_t_arrives(cf_rank *r) {
    static const int size[] = { 64, 60013, 900001 };
    for (int i = 0; i < (int)(sizeof size / sizeof *size) && r->rank < 2; i++) {
        int32_t *flag = &r->shared->flag[0][i], *sent = &r->shared->flag[1][i];
        cf_op op, *list[1] = { &op };
        cf_op_make(r, &op, r->rank ? RA_MSG_RECV : RA_MSG_SEND, cf_message(0, 1, 0, 0, i),
                   (size_t)size[i]);
        if (r->rank && cf_drive(r, 0, list, 1, r->patience) != 2) cf_store(flag, 1);
        if (!cf_finish(r, 0, list, 1, r->rank && cf_load(sent) ? CF_ARRIVES : CF_PROGRESS)) return;
        if (!r->rank) cf_store(sent, 1);
        if (!r->rank && !cf_await(r, flag, 1, 2 * r->patience)) return;
        cf_op_free(&op);
    }
    cf_meet(r);
}

static inline void cf_t_largest(cf_rank *r) {
    if (cf_swap(r, 0, 0, cf_largest(r), CF_LARGEST)) cf_meet(r);
}

/* Batches of many messages of one length to each neighbour, in a separate order per flow. */
static inline void cf_t_order(cf_rank *r) {
    int depth = cf_depth(r, 48), each = depth / 4 ? depth / 4 : 1, seq[2] = { 0, 0 };
    int ways = depth >= 4 ? 2 : 1;
    for (int round = 0; round < 6; round++) {
        cf_op ops[CF_MOST], *list[CF_MOST];
        int n = 0, channel = round % cf_channels(r);
        size_t len = round % 3 ? 1021 : 40009;
        for (int i = 0; i < each; i++)
            for (int way = 0; way < ways; way++) {
                int to = way ? r->prev : r->next, from = way ? r->next : r->prev;
                int s = r->ranks == 2 ? seq[channel] + 2 * i + way : seq[channel] + i;
                if (ways == 1) s = seq[channel] + i;
                cf_op_make(r, &ops[n++], RA_MSG_SEND, cf_message(r->rank, to, 0, channel, s), len);
                cf_op_make(r, &ops[n++], RA_MSG_RECV, cf_message(from, r->rank, 0, channel, s),
                           len);
            }
        for (int i = 0; i < n; i++) list[i] = &ops[i];
        if (!cf_finish(r, 0, list, n, CF_PROGRESS)) return;
        cf_free_all(ops, n);
        seq[channel] += 2 * each;
    }
}

/* A message whose receive is not posted yet delays no other flow: not another channel, ... */
static inline int cf_other_channel(cf_rank *r) {
    for (int first = 0; first < 2 && cf_channels(r) == 2; first++) {
        cf_op ops[2], *list[2] = { &ops[0], &ops[1] };
        int kind = r->rank == 0 ? RA_MSG_SEND : RA_MSG_RECV;
        if (r->rank < 2)
            for (int i = 0; i < 2; i++)
                cf_op_make(r, &ops[i], kind, cf_message(0, 1, 0, i ^ first, first), 900001);
        if (r->rank == 0 && !cf_finish(r, 0, list, 2, CF_PROGRESS)) return 0;
        if (r->rank == 1 && (!cf_finish(r, 0, list + 1, 1, CF_PROGRESS) ||
                             !cf_finish(r, 0, list, 1, CF_PROGRESS)))
            return 0;
        if (!cf_meet(r)) return 0;
        if (r->rank < 2) cf_free_all(ops, 2);
    }
    return 1;
}

/* ... and not another peer. */
static inline int cf_other_peer(cf_rank *r) {
    int last = r->ranks - 1, n = r->rank == 0 ? 2 : r->rank == 1 || r->rank == last ? 1 : 0;
    cf_op ops[2], *list[2] = { &ops[0], &ops[1] };
    if (r->ranks < 3) return 1;
    if (r->rank == 0) {
        cf_op_make(r, &ops[0], RA_MSG_SEND, cf_message(0, 1, 0, 0, 9), 900001);
        cf_op_make(r, &ops[1], RA_MSG_SEND, cf_message(0, last, 0, 0, 9), 3001);
        if (!cf_finish(r, 0, list, 2, CF_PROGRESS)) return 0;
    } else if (n) {
        if (r->rank == 1 && !cf_await(r, &r->shared->flag[0][0], 1, 2 * r->patience)) return 0;
        cf_op_make(r, &ops[0], RA_MSG_RECV, cf_message(0, r->rank, 0, 0, 9),
                   r->rank == 1 ? 900001 : 3001);
        if (!cf_finish(r, 0, list, 1, CF_PROGRESS)) return 0;
        if (r->rank == last) cf_store(&r->shared->flag[0][0], 1);
    }
    if (!cf_meet(r)) return 0;
    cf_free_all(ops, n);
    return 1;
}

static inline void cf_t_progress(cf_rank *r) {
    int ways = cf_depth(r, 4) >= 4 ? 2 : 1, n = 0;
    cf_op ops[4], *list[4] = { &ops[0], &ops[1], &ops[2], &ops[3] };
    if (!cf_other_channel(r) || !cf_other_peer(r)) return;
    for (int way = 0; way < ways; way++)           /* all ranks send before any rank receives */
        cf_op_make(r, &ops[n++], RA_MSG_SEND,
                   cf_message(r->rank, way ? r->prev : r->next, 0, 0, 20 + way), 700001);
    for (int way = 0; way < ways; way++)
        cf_op_make(r, &ops[n++], RA_MSG_RECV,
                   cf_message(way ? r->next : r->prev, r->rank, 0, 0, 20 + way), 700001);
    if (cf_post(r, 0, list, ways) != 1 || !cf_meet(r)) return;
    if (cf_finish(r, 0, list, n, CF_PROGRESS) && cf_meet(r)) cf_free_all(ops, n);
}

/* A rank that posts and polls says so by flags; its peer moves only then. */
static inline void cf_t_blocks(cf_rank *r) {
    cf_op op, *list[1] = { &op };
    for (int way = 0; way < 2; way++) {            /* way 0: rank 0 first; 1: the receiver first */
        int32_t *flag = &r->shared->flag[way][0];
        int kind = r->rank == 0 ? RA_MSG_SEND : RA_MSG_RECV;
        if (r->rank < 2) cf_op_make(r, &op, kind, cf_message(0, 1, 0, 0, way), 600001);
        if (r->rank == way) {
            if (cf_post(r, 0, list, 1) != 1) return;
            cf_store(&flag[0], 1);
            if (cf_poll(r, 0, list, 1, -1) != 1 || cf_poll(r, 0, list, 0, -1) != 1) return;
            cf_store(&flag[1], 1);
        } else if (r->rank == 1 - way) {
            if (!cf_await(r, &flag[0], 1, r->patience / 2)) {
                cf_break(r, CF_POST_BLOCKS, "rank %d posted and has not returned", way);
                return;
            }
            if (!cf_await(r, &flag[1], 1, r->patience / 2)) {
                cf_break(r, CF_POLL_BLOCKS, "rank %d polled and has not returned", way);
                return;
            }
        }
        if (r->rank < 2 && !cf_finish(r, 0, list, 1, CF_PROGRESS)) return;
        if (r->rank < 2) cf_op_free(&op);
    }
    cf_meet(r);
}

/* Rank 0 sends, and then polls without ops until the other side has received all. */
static inline void cf_t_poll_none(cf_rank *r) {
    int32_t *flag = &r->shared->flag[0][0];
    cf_op ops[2], *list[2] = { &ops[0], &ops[1] };
    for (int i = 0; r->rank < 2 && i < 2; i++)
        cf_op_make(r, &ops[i], r->rank ? RA_MSG_RECV : RA_MSG_SEND, cf_message(0, 1, 0, 0, i),
                   300007);
    if (r->rank == 0) {
        int64_t until = ra_now_ns() + r->patience;
        if (!cf_accept(r, list, 1)) return;
        cf_store(&flag[1], 1);
        while (!cf_load(flag) && !cf_over(r) && ra_now_ns() < until) {
            if (cf_poll(r, 0, NULL, 0, -1) != 1) return;
            cf_sleep_us(100);
        }
        if (!cf_load(flag)) {
            cf_break(r, CF_POLL_NONE, "a message of %zu bytes has not come after %lld ms of poll"
                     " without ops", ops[0].op.len, (long long)(r->patience / 1000000));
            return;
        }
    } else if (r->rank == 1) {
        if (!cf_await(r, &flag[1], 1, 2 * r->patience)) return;
        if (!cf_finish(r, 0, list, 1, CF_POLL_NONE)) return;
        cf_store(flag, 1);
    }
    if (r->rank < 2 && (!cf_finish(r, 0, list, 2, CF_PROGRESS))) return;
    if (cf_meet(r) && r->rank < 2) cf_free_all(ops, 2);
}

static inline void cf_t_any_peer(cf_rank *r) {
    int depth = cf_depth(r, CF_MOST), seq = 0;
    if (!(r->t[0]->caps & RA_CAP_ANY_PEER)) {
        cf_unclaimed(r);
        return;
    }
    for (int round = 0; round < 3; round++) {
        cf_op ops[CF_MOST], *list[CF_MOST];
        for (int d = 1, n = 0; d < r->ranks; d++) {
            int to = (r->rank + d) % r->ranks, from = (r->rank + r->ranks - d) % r->ranks;
            int channel = (round + d) % cf_channels(r);
            cf_op_make(r, &ops[n++], RA_MSG_SEND, cf_message(r->rank, to, 0, channel, seq), 5003);
            cf_op_make(r, &ops[n++], RA_MSG_RECV, cf_message(from, r->rank, 0, channel, seq), 5003);
            if (n + 2 <= depth && d < r->ranks - 1) continue;
            for (int i = 0; i < n; i++) list[i] = &ops[i];
            if (!cf_finish(r, 0, list, n, CF_ANY_PEER)) return;
            cf_free_all(ops, n);
            n = 0;
        }
        seq++;
    }
}

/* Two ops that are posted on one thread and end on another; or a sendrecv. */
typedef struct cf_errand {
    cf_rank *r;
    cf_op *ops[2];
    int posts, good;
} cf_errand;

static inline void *cf_errand_main(void *arg) {
    cf_errand *e = (cf_errand *)arg;
    cf_rank *r = e->r;
    if (!r->t[0]->post) {
        const int code = cf_sendrecv(r, e->ops[0], e->ops[1], ra_now_ns() + r->patience);
        e->good = code == RA_OK;
        if (code && !cf_over(r))
            cf_break(r, CF_ANY_THREAD, "sendrecv on another thread returned %s",
                     ra_status_text(code));
    } else if (e->posts) e->good = cf_post(r, 0, e->ops, 2) == 1;
    else e->good = cf_finish(r, 0, e->ops, 2, CF_ANY_THREAD);
    return NULL;
}

/* Every other round the second thread of this rank posts and the first one waits. */
static inline void cf_t_threads(cf_rank *r) {
    if (!(r->t[0]->caps & RA_CAP_ANY_THREAD)) {
        cf_unclaimed(r);
        return;
    }
    for (int round = 0; round < 6; round++) {
        cf_op ops[2];
        cf_errand e = { r, { &ops[0], &ops[1] }, 0, 1 };
        cf_op_make(r, &ops[0], RA_MSG_SEND, cf_message(r->rank, r->next, 0, 0, round), 70001);
        cf_op_make(r, &ops[1], RA_MSG_RECV, cf_message(r->prev, r->rank, 0, 0, round), 70001);
        ops[1].op.tag = ops[1].was.tag = ops[0].op.tag = ops[0].was.tag = (uint64_t)round;
        for (int way = 0; way < 2 && e.good; way++) {
            const int other = way ^ (round & 1);
            pthread_t id;
            e.posts = !way;
            if (!r->t[0]->post && way) continue;       /* one call is all */
            if (!other) (void)cf_errand_main(&e);
            else if (pthread_create(&id, NULL, cf_errand_main, &e)) abort();
            else pthread_join(id, NULL);
        }
        if (!e.good) return;
        cf_free_all(ops, 2);
    }
    cf_meet(r);
}

/* At level 0 a late rank delays its neighbours, and no other rank. */
static inline void cf_t_late(cf_rank *r) {
    cf_op ops[2], *list[2] = { &ops[0], &ops[1] };
    cf_op_make(r, &ops[0], RA_MSG_SEND, cf_message(r->rank, r->next, 0, 0, 0), 20011);
    cf_op_make(r, &ops[1], RA_MSG_RECV, cf_message(r->prev, r->rank, 0, 0, 0), 20011);
    if (!r->t[0]->post) {
        int code;
        ops[1].op.tag = ops[0].op.tag = 1;
        code = cf_sendrecv(r, &ops[0], &ops[1], ra_now_ns() + r->patience);
        if (code && !cf_over(r)) cf_break(r, CF_LATE, "sendrecv returned %s", ra_status_text(code));
        if (!code) cf_free_all(ops, 2);
    } else if (cf_finish(r, 0, list, 2, CF_LATE)) cf_free_all(ops, 2);
}

/* Two rings over the same ranks, used in turns and at the same time. */
static inline void cf_t_rings(cf_rank *r) {
    for (int round = 0; round < 8; round++) {
        cf_op ops[4];
        for (int ring = 0; ring < 2; ring++) {
            cf_op *list[2] = { &ops[2 * ring], &ops[2 * ring + 1] };
            cf_op_make(r, list[0], RA_MSG_SEND, cf_message(r->rank, r->next, ring, 0, round), 2003);
            cf_op_make(r, list[1], RA_MSG_RECV, cf_message(r->prev, r->rank, ring, 0, round), 2003);
        }
        for (int i = 0; i < 2; i++) {              /* odd ranks and rounds: ring 1 first */
            int ring = i ^ ((r->rank + round) & 1);
            cf_op *list[2] = { &ops[2 * ring], &ops[2 * ring + 1] };
            if (cf_post(r, ring, list, 2) != 1) return;
        }
        for (int i = 0; i < 2; i++) {
            int64_t until = ra_now_ns() + r->patience;
            int other = 1;
            do {                                   /* both rings need calls */
                cf_op *a[2] = { &ops[0], &ops[1] }, *b[2] = { &ops[2], &ops[3] };
                other = cf_drive(r, 0, a, 2, 0);
                if (other) other = cf_drive(r, 1, b, 2, 0) == 1 && other == 1 ? 1 : 2;
                if (cf_over(r)) return;
            } while (other == 2 && ra_now_ns() < until);
            if (other == 2) {
                cf_break(r, CF_PROGRESS, "with two rings in use one of them stands still");
                return;
            }
        }
        cf_free_all(ops, 4);
    }
    cf_meet(r);
}

static inline int cf_wait_idle(cf_rank *r) {
    int64_t begin = ra_now_ns();
    if (cf_poll(r, 0, NULL, 0, begin + r->patience) != 1) return 0;
    if (ra_now_ns() - begin < r->patience * 3 / 4) return 1;
    return cf_break(r, CF_WAIT_IDLE, "wait slept %lld ms although nothing was PENDING",
                    (long long)((ra_now_ns() - begin) / 1000000));
}

/* Rank 0 waits for rank 1, which does not send. */
static inline int cf_wait_deadline(cf_rank *r, cf_op *const *list) {
    int32_t *flag = &r->shared->flag[0][1];
    if (r->rank == 0) {
        if (!cf_accept(r, list, 1)) return 0;
        if (cf_poll(r, 0, list, 1, ra_now_ns() - 1000) != 1) return 0;
        if (cf_poll(r, 0, list, 1, ra_deadline_ms(50)) != 1) return 0;
        cf_store(flag, 1);
    } else if (r->rank == 1 && !cf_await(r, flag, 1, r->patience / 2 + 60000000)) {
        return cf_break(r, CF_WAIT_DEADLINE, "rank 0 waits long after its deadline of 50 ms");
    }
    return 1;
}

/* Rank 0 waits with two receives, one of which arrives: wait reports that one. */
static inline void cf_wait_for_one(cf_rank *r) {
    int32_t *flag = &r->shared->flag[0][2];
    cf_op ops[2], *list[2] = { &ops[0], &ops[1] };
    int64_t begin = ra_now_ns();
    for (int i = 0; r->rank < 2 && i < 2; i++)
        cf_op_make(r, &ops[i], r->rank ? RA_MSG_SEND : RA_MSG_RECV, cf_message(1, 0, 0, 0, 5 + i),
                   7001);
    if (r->rank == 0 && !cf_accept(r, list, 2)) return;
    if (r->rank == 1 && !cf_finish(r, 0, list, 1, CF_PROGRESS)) return;
    while (r->rank == 0 && cf_unfinished(list, 2) == 2) {
        if (cf_poll(r, 0, list, 2, begin + r->patience) != 1) return;
        if (ra_now_ns() - begin < r->patience * 3 / 4) continue;
        cf_break(r, CF_WAIT_WAKES, "of two receives one came, and wait slept %lld ms",
                 (long long)((ra_now_ns() - begin) / 1000000));
        return;
    }
    if (r->rank == 0) cf_store(flag, 1);
    if (r->rank == 1) {
        (void)cf_await(r, flag, 1, r->patience);
        if (!cf_finish(r, 0, list + 1, 1, CF_PROGRESS)) return;
    }
    if (r->rank == 0 && !cf_finish(r, 0, list, 2, CF_PROGRESS)) return;
    if (cf_meet(r) && r->rank < 2) cf_free_all(ops, 2);
}

static inline void cf_t_wait(cf_rank *r) {
    cf_op op, *list[1] = { &op };
    int64_t begin;
    if (!r->t[0]->wait) {
        cf_unclaimed(r);
        return;
    }
    if (!cf_wait_idle(r)) return;
    if (r->rank == 0) cf_op_make(r, &op, RA_MSG_RECV, cf_message(1, 0, 0, 0, 0), 7001);
    if (!cf_wait_deadline(r, list) || !cf_meet(r)) return;
    begin = ra_now_ns();
    if (r->rank == 1) {
        cf_sleep_us(30000);
        cf_op_make(r, &op, RA_MSG_SEND, cf_message(1, 0, 0, 0, 0), 7001);
        if (!cf_finish(r, 0, list, 1, CF_PROGRESS)) return;
    }
    while (r->rank == 0 && op.op.state == RA_MSG_PENDING) {
        if (cf_poll(r, 0, list, 1, begin + r->patience) != 1) return;
        if (ra_now_ns() - begin < r->patience * 3 / 4) continue;
        cf_break(r, CF_WAIT_WAKES, "what was awaited came after 30 ms, and wait slept %lld ms",
                 (long long)((ra_now_ns() - begin) / 1000000));
        return;
    }
    if (!cf_meet(r)) return;
    if (r->rank < 2) cf_op_free(&op);
    cf_wait_for_one(r);
}

/* -------------------------------------------------------------------------- abort and quiesce */
static inline int cf_abort(cf_rank *r) {
    int64_t begin = ra_now_ns();
    int place = cf_load(&r->shared->place[r->rank]);   /* wait, if another thread aborts */
    cf_at(r, CF_AT_ABORT);
    (void)r->t[0]->abort(r->t[0]->ctx, r->rank ? RA_E_ABORTED : RA_E_CANCELLED);
    cf_at(r, place);
    if (ra_now_ns() - begin < r->patience / 2) return 1;
    return cf_break(r, CF_ABORT_BLOCKS, "abort took %lld ms",
                    (long long)((ra_now_ns() - begin) / 1000000));
}

/* All ops must fail, or the context: a negative return of post or poll. */
static inline int cf_fails(cf_rank *r, cf_op *const *ops, int n, int rule, const char *what) {
    int64_t until = ra_now_ns() + r->patience / 2;
    for (;;) {
        int code = cf_drive(r, 0, ops, n, 0), good = 0;
        if (code < 0) return 1;
        if (code == 0) return 0;
        for (int i = 0; i < n; i++) good += ops[i]->op.state >= 0;
        if (!good) return 1;
        if (ra_now_ns() > until)
            return cf_break(r, rule, "%d of %d %s have not failed", good, n, what);
        if (!cf_unfinished(ops, n)) return 1;      /* DONE before they could fail */
        cf_sleep_us(200);
    }
}

/* A receive and a send, one after another: there are two failures. */
static inline int cf_later_fails(cf_rank *r, cf_op *ops, int rule) {
    cf_op *in[1] = { &ops[0] }, *out[1] = { &ops[1] };
    cf_op_make(r, &ops[0], RA_MSG_RECV, cf_message(r->prev, r->rank, 0, 0, 50), 1009);
    cf_op_make(r, &ops[1], RA_MSG_SEND, cf_message(r->rank, r->next, 0, 0, 50), 1009);
    return cf_fails(r, in, 1, rule, "receives posted after it") &&
           cf_fails(r, out, 1, rule, "sends posted after it");
}

/* Continues the ops until `calls` calls are done: the moment of an abort. */
static inline int cf_go_on(cf_rank *r, cf_op *const *ops, int n, int calls) {
    for (int i = 0; i < calls; i++) {
        int code = i & 1 ? cf_poll(r, 0, ops, n, -1) : cf_post(r, 0, ops, n);
        if (code != 1) return code;
    }
    return 1;
}

static inline void *cf_abort_soon(void *arg) {
    cf_rank *r = (cf_rank *)arg;
    cf_sleep_us(40000);
    (void)cf_abort(r);
    return NULL;
}

/* Rank 0 sleeps in wait while another thread of it aborts. */
static inline int cf_abort_wakes(cf_rank *r, cf_op *const *list, int n) {
    int64_t begin = ra_now_ns();
    pthread_t id;
    int code = 1;
    if (pthread_create(&id, NULL, cf_abort_soon, r)) return 1;
    while (code == 1 && ra_now_ns() - begin < r->patience * 3 / 4) {
        code = cf_poll(r, 0, list, n, begin + r->patience);
        if (code == 1 && !cf_unfinished(list, n)) code = 2;
    }
    pthread_join(id, NULL);
    if (code != 0 && ra_now_ns() - begin > r->patience * 3 / 4)
        return cf_break(r, CF_ABORT_WAKES, "wait slept %lld ms beside an abort",
                        (long long)((ra_now_ns() - begin) / 1000000));
    return code != 0;
}

/* Calls quiesce as the library does, first with a deadline that has passed. A transport may return
 * RA_OK on some ranks and RA_E_UNSAFE on others: after either the rank meets the others. */
static inline int cf_quiesce(cf_rank *r, int64_t wait_ns) {
    const ra_transport *t = r->t[0];
    int64_t begin = ra_now_ns();
    int32_t none = 0;
    int code;
    cf_at(r, CF_AT_QUIESCE);
    code = t->quiesce ? t->quiesce(t->ctx, begin - 1) : RA_OK;
    if (ra_now_ns() - begin > r->patience / 2)
        return cf_break(r, CF_QUIESCE_DEADLINE, "with a deadline that had passed it took %lld ms",
                        (long long)((ra_now_ns() - begin) / 1000000)), RA_E_UNSAFE;
    begin = ra_now_ns();
    if (t->quiesce) code = t->quiesce(t->ctx, begin + wait_ns);
    if (ra_now_ns() - begin > wait_ns + r->patience / 2)
        cf_break(r, CF_QUIESCE_DEADLINE, "%lld ms after its deadline",
                 (long long)((ra_now_ns() - begin - wait_ns) / 1000000));
    cf_at(r, CF_AT_TEST);
    if (code != RA_OK && __atomic_compare_exchange_n(&r->shared->noted, &none, 1, 0,
                                                     __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
        snprintf(r->shared->note, sizeof r->shared->note,
                 "quiesce of rank %d says %s: after a failure buffers are leaked", r->rank,
                 ra_status_text(code));
    return code;
}

/* variant 0: nothing is pending; 1: receives; 2: sends; 3: much of both; 4: in wait; from 5 on:
 * much of both after that many calls less 5. */
static inline void cf_t_abort(cf_rank *r) {
    cf_op *ops = r->broken, *later = r->broken + 8, *list[8] = { NULL };
    int n = 0, depth = cf_depth(r, 8), aborts = r->rank == 0, amid = r->variant == 3, code;
    if (!r->t[0]->abort || (r->variant == 4 && !r->t[0]->wait)) {
        cf_unclaimed(r);
        return;
    }
    if (r->variant == 1 || r->variant == 4)
        cf_op_make(r, &ops[n++], RA_MSG_RECV, cf_message(r->prev, r->rank, 0, 0, 0), 5009);
    if (r->variant == 2)
        cf_op_make(r, &ops[n++], RA_MSG_SEND, cf_message(r->rank, r->next, 0, 0, 0), 5009);
    amid |= r->variant >= 5;
    for (int i = 0; amid && n + 2 <= depth; i++) {
        cf_op_make(r, &ops[n++], RA_MSG_RECV, cf_message(r->prev, r->rank, 0, 0, i), 400009);
        cf_op_make(r, &ops[n++], RA_MSG_SEND, cf_message(r->rank, r->next, 0, 0, i), 400009);
    }
    for (int i = 0; i < n; i++) list[i] = &ops[i];
    r->breaks = amid;
    if (r->variant == 3 && cf_drive(r, 0, list, n, 0) == 0) return;
    if (r->variant >= 5 && cf_go_on(r, list, n, aborts ? r->variant - 5 : 4) == 0) return;
    if (!amid && (!cf_accept(r, list, n) || !cf_meet(r))) return;
    r->breaks = 1;
    if (aborts && r->variant == 4 && !cf_abort_wakes(r, list, n)) return;
    if (aborts && r->variant != 4 && !cf_abort(r)) return;
    if (!aborts && r->maker->tells_peers && n && !amid &&
        !cf_fails(r, list, n, CF_ABORT_PEERS, "pending ops of a rank whose peer aborted"))
        return;
    /* Rank 0 is alone with its abort until it has seen what that does to itself. */
    if (!aborts && !cf_await(r, &r->shared->flag[0][0], 1, 2 * r->patience)) return;
    if (!aborts && !cf_abort(r)) return;
    if (n && !cf_fails(r, list, n, CF_ABORT_PENDING, "pending ops")) return;
    if (!cf_later_fails(r, &later[0], CF_ABORT_LATER)) return;
    if (aborts) cf_store(&r->shared->flag[0][0], 1);
    if (!cf_abort(r)) return;
    if (!cf_later_fails(r, &later[2], CF_ABORT_TWICE)) return;
    code = cf_quiesce(r, cf_brief(r));
    if (!cf_meet(r) || code != RA_OK) return;
    cf_free_all(ops, n);
    cf_free_all(later, 4);
}

/* After quiesce has returned RA_OK the buffers are used for something else, and must stay so. */
static inline void cf_t_quiesce(cf_rank *r) {
    cf_op *ops = r->broken, *list[8] = { NULL };
    int n = 0, depth = cf_depth(r, 8), touched = 0, code;
    if (!r->t[0]->abort || !r->t[0]->quiesce) {
        cf_unclaimed(r);
        return;
    }
    r->breaks = 1;
    for (int i = 0; n + 2 <= depth; i++) {
        cf_op_make(r, &ops[n++], RA_MSG_RECV, cf_message(r->prev, r->rank, 0, 0, i), 500009);
        cf_op_make(r, &ops[n++], RA_MSG_SEND, cf_message(r->rank, r->next, 0, 0, i), 500009);
    }
    for (int i = 0; i < n; i++) list[i] = &ops[i];
    if (cf_post(r, 0, list, n) == 0 || cf_poll(r, 0, list, n, -1) == 0) return;
    if (r->rank && cf_drive(r, 0, list, n, 10000000) == 0) return;   /* others continue a while */
    if (!cf_abort(r)) return;
    code = cf_quiesce(r, cf_brief(r));
    if (cf_over(r)) return;
    for (int i = 0; i < n && code == RA_OK; i++) memset(ops[i].own, i, ops[i].op.len);
    cf_sleep_us(60000);
    for (int i = 0; i < n && code == RA_OK; i++)
        touched += !cf_all(ops[i].own, ops[i].op.len, i);
    if (touched)
        cf_break(r, CF_QUIET, "%d of %d buffers were written after it", touched, n);
    if (code == RA_OK && r->t[0]->quiesce(r->t[0]->ctx, ra_deadline_ms(100)) != RA_OK)
        cf_break(r, CF_QUIET, "called again it no longer returns RA_OK");
    if (cf_meet(r) && code == RA_OK) cf_free_all(ops, n);
}

/* The receive o, which met a message of 1000 bytes, says so and has what fits. */
static inline int cf_check_cut(cf_rank *r, cf_op *o) {
    const size_t fits = o->op.len < 1000 ? o->op.len : 1000;
    if (!o->op.done) return 1;
    if (o->op.done != 1000)
        return cf_break(r, CF_TRUNC_DONE, "a receive of %zu bytes met a message of 1000, and done"
                        " is %zu", o->op.len, o->op.done);
    if (!cf_pattern((uint8_t *)o->op.buf, fits, o->id, 1)) return 1;
    return cf_break(r, CF_TRUNC_DONE, "of %zu bytes that fit and that done counts, not all are in"
                    " buf", fits);
}

/* Rank 0 sends 1000 bytes, rank 1 wants fewer (variant 0) or more. */
static inline void cf_t_trunc(cf_rank *r) {
    size_t want = r->variant ? 1008 : 992;
    int64_t until = ra_now_ns() + r->patience;
    const ra_transport *t = r->t[0];
    int code = RA_OK;
    cf_op *o = r->broken;
    ra_transport_op *list[1] = { &o->op };
    r->breaks = 1;
    if (r->rank < 2)
        cf_op_make(r, o, r->rank ? RA_MSG_RECV : RA_MSG_SEND, cf_message(0, 1, 0, 0, 0),
                   r->rank ? want : 1000);
    while (r->rank < 2 && code >= 0 && ra_now_ns() < until && !cf_over(r)) {
        cf_at(r, CF_AT_POST);
        if (o->op.state == RA_MSG_IDLE) code = t->post(t->ctx, list, 1);
        cf_at(r, CF_AT_POLL);
        if (code >= 0) code = t->poll(t->ctx, list, 1);
        cf_at(r, CF_AT_TEST);
        if (o->op.state != RA_MSG_IDLE && o->op.state != RA_MSG_PENDING) break;
        if (r->rank == 0 && cf_load(&r->shared->flag[1][0])) break;  /* the receiver has seen it */
        cf_sleep_us(100);
    }
    if (r->rank == 1) {
        int ends = o->op.state == RA_E_TRUNC || code == RA_E_TRUNC ||
                   (o->op.state == RA_MSG_DONE && o->op.done == 1000);
        if (!ends)
            cf_break(r, CF_TRUNC, "a receive of %zu bytes met a message of 1000, has state %d, done"
                     " %zu, and poll returned %d", want, o->op.state, o->op.done, code);
        else if (!cf_all(o->own + want, 64, CF_POISON_GUARD))
            cf_break(r, CF_BOUNDS, "a message that is too long was written beyond the buffer");
        else if (o->op.state == RA_E_TRUNC) cf_check_cut(r, o);
        cf_store(&r->shared->flag[1][0], 1);
    }
    if (cf_meet(r) && t->abort) (void)t->abort(t->ctx, RA_E_TRUNC);
    code = RA_E_UNSAFE;
    if (!cf_over(r) && t->quiesce) code = cf_quiesce(r, cf_brief(r));
    if (cf_meet(r) && r->rank < 2 && code == RA_OK) cf_op_free(o);
}

/* Chunks go around on loan: each is received, kept, sent on from where it is, and released. */
static inline void cf_t_loans(cf_rank *r) {
    enum { HELD = 3 };
    cf_op in[HELD], out;
    int lent = 0, hold = cf_depth(r, HELD + 1) - 1;
    if (!(r->t[0]->caps & RA_CAP_LOAN) || hold < 2) {
        cf_unclaimed(r);
        return;
    }
    for (int round = 0; round < 12; round++) {
        cf_op *i = &in[round % hold], *list[2] = { &out, i };
        int origin = (r->rank + r->ranks * 12 - round) % r->ranks;
        if (round >= hold) {
            if (i->lent && r->t[0]->release(r->t[0]->ctx, &i->op) < 0) {
                cf_break(r, CF_CODES, "release returned an error");
                return;
            }
            cf_op_free(i);
        }
        cf_op_make(r, i, RA_MSG_RECV, cf_message((origin + r->ranks - 1) % r->ranks, 60, 0, 0,
                                                round / r->ranks), 30011);
        cf_op_make(r, &out, RA_MSG_SEND, cf_message(origin, 60, 0, 0, round / r->ranks), 30011);
        i->op.peer = i->was.peer = r->prev;
        out.op.peer = out.was.peer = r->next;
        i->op.flags = i->was.flags = round % 4 == 3 ? 0 : RA_MSG_LOAN_OK;
        if (round % r->ranks) out.op.buf = out.was.buf = in[(round + hold - 1) % hold].op.buf;
        if (!cf_finish(r, 0, list, 2, CF_PROGRESS)) return;
        lent += i->lent != NULL;
        for (int j = 0; j < hold && j <= round; j++) {
            cf_op *one[1] = { &in[j] };
            if (!cf_check_kept(r, one, 1)) return;
        }
        cf_op_free(&out);
    }
    if (!cf_meet(r)) return;
    for (int j = 0; j < hold; j++) {
        if (in[j].lent) (void)r->t[0]->release(r->t[0]->ctx, &in[j].op);
        cf_op_free(&in[j]);
    }
    if (!lent && r->rank == 0)
        snprintf(r->shared->note, sizeof r->shared->note, "nothing was ever lent");
}

static inline void cf_t_reg(cf_rank *r) {
    const ra_transport *t = r->t[0];
    cf_op ops[2], *list[2] = { &ops[0], &ops[1] };
    void *mr[2] = { NULL, NULL };
    if (!t->reg) {
        cf_unclaimed(r);
        return;
    }
    for (int round = 0; round < 3; round++) {
        cf_op_make(r, &ops[0], RA_MSG_SEND, cf_message(r->rank, r->next, 0, 0, round), 50021);
        cf_op_make(r, &ops[1], RA_MSG_RECV, cf_message(r->prev, r->rank, 0, 0, round), 50021);
        for (int i = 0; i < 2 && round; i++) {
            if (t->reg(t->ctx, ops[i].own, ops[i].op.len, &mr[i])) mr[i] = NULL;
            ops[i].op.mr = ops[i].was.mr = mr[i];
        }
        if (!cf_finish(r, 0, list, 2, CF_REG) || !cf_meet(r)) return;
        for (int i = 0; i < 2 && round; i++)
            if (mr[i] && t->dereg(t->ctx, mr[i]) != RA_OK)
                cf_break(r, CF_REG, "dereg of what reg gave returned an error");
        cf_free_all(ops, 2);
    }
}

/* -------------------------------------------------------------------------- tests of level 0 */
/* All ranks send to the next rank, then to the one before; also an odd number of ranks. */
static inline void cf_t_both_ways(cf_rank *r) {
    static const int size[] = { 1, 3, 64, 65, 4097, 300001, 2000003 };
    for (int i = 0; i < 14; i++) {
        int to = i & 1 ? r->prev : r->next, from = i & 1 ? r->next : r->prev, code;
        size_t n = (size_t)size[i / 2];
        cf_op out, in;
        cf_op_make(r, &out, RA_MSG_SEND, cf_message(r->rank, to, 0, 0, i), n);
        cf_op_make(r, &in, RA_MSG_RECV, cf_message(from, r->rank, 0, 0, i), n);
        in.op.tag = out.op.tag = (uint64_t)i;
        code = cf_sendrecv(r, &out, &in, ra_now_ns() + r->patience);
        if (cf_over(r)) return;
        if (code != RA_OK) {
            cf_break(r, CF_BOTH_WAYS, "sendrecv of %zu bytes both ways returned %s", n,
                     ra_status_text(code));
            return;
        }
        cf_op_free(&out);
        cf_op_free(&in);
    }
    cf_meet(r);
}

/* A chain: the first rank only sends, the last only receives. */
static inline void cf_t_one_side(cf_rank *r) {
    for (int i = 0; i < 4; i++) {
        int sends = r->rank < r->ranks - 1, receives = r->rank > 0, code;
        cf_op out, in;
        cf_op_make(r, &out, RA_MSG_SEND, cf_message(r->rank, r->next, 0, 0, i), 60013);
        cf_op_make(r, &in, RA_MSG_RECV, cf_message(r->prev, r->rank, 0, 0, i), 60013);
        in.op.tag = out.op.tag = (uint64_t)i;
        code = cf_sendrecv(r, sends ? &out : NULL, receives ? &in : NULL,
                           ra_now_ns() + r->patience);
        if (cf_over(r)) return;
        if (code != RA_OK) {
            cf_break(r, CF_ONE_SIDE, "it returned %s", ra_status_text(code));
            return;
        }
        cf_op_free(&out);
        cf_op_free(&in);
    }
    cf_meet(r);
}

/* Rank 0 needs a message of rank 1, which does nothing. */
static inline void cf_t_sendrecv_deadline(cf_rank *r) {
    int32_t *flag = &r->shared->flag[0][0];
    if (!(r->t[0]->caps & RA_CAP_DEADLINE)) {
        cf_unclaimed(r);
        return;
    }
    if (r->rank == 0) {
        cf_op in;
        int code;
        cf_op_make(r, &in, RA_MSG_RECV, cf_message(1, 0, 0, 0, 0), 60013);
        code = cf_sendrecv(r, NULL, &in, ra_deadline_ms(60));
        if (code != RA_E_TIMEOUT && code != RA_E_PEER)
            cf_break(r, CF_SENDRECV_DEADLINE, "it returned %d (%s)", code, ra_status_text(code));
        cf_op_free(&in);
        cf_store(flag, 1);
    } else if (r->rank == 1 && !cf_await(r, flag, 1, r->patience / 2 + 70000000)) {
        cf_break(r, CF_SENDRECV_DEADLINE, "rank 0 is still inside, long after 60 ms");
    }
    cf_meet(r);
}

/* -------------------------------------------------------------------------- real passes */
typedef struct cf_pass {               /* rows of one rank */
    ra_plan *plan;
    ra_ring *ring;
    ra_tensors t;
    ra_run runs[2];
    int run_count, train;
    int64_t rows;
    float *memory;
} cf_pass;

static inline float cf_input(int which, int64_t pos, int c) {
    uint64_t x = cf_mix((uint64_t)pos * 4096 + (uint64_t)c * 8 + (uint64_t)which + 1);
    return (float)(x & 0xffff) / 32768 - 1;
}

/* Copies rows to or from an array by position; or (all null) fills them with input. */
static inline void cf_rows(const cf_pass *p, float *rows, float *all, int width, int which) {
    for (int i = 0; i < p->run_count; i++)
        for (int64_t j = 0; j < p->runs[i].count; j++, rows += width) {
            int64_t pos = p->runs[i].first + j;
            if (all) memcpy(all + pos * width, rows, (size_t)width * sizeof *rows);
            for (int c = 0; c < width && !all; c++) rows[c] = cf_input(which, pos, c);
        }
}

static inline ra_status cf_pass_open(cf_rank *r, cf_pass *p, int rank, int ranks,
                                     const ra_transport *t, ra_error *e) {
    ra_ring_desc rd = { 0 };
    ra_status s;
    ra_desc d = ra_desc_make(CF_HEADS, 1, CF_DIM, RA_F32, RA_MASK_CAUSAL);
    float *m;
    memset(p, 0, sizeof *p);
    rd.error = d.error = e;
    rd.watchdog_ns = 4 * r->patience;
    rd.quiesce_ns = cf_brief(r);
    p->train = !r->t[0]->post || (r->t[0]->channels > 1 && r->t[0]->max_ops > 2);
    d.ranks = ranks; d.rank = rank; d.tokens = CF_TOKENS;
    d.layout.kind = RA_LAYOUT_ZIGZAG;
    d.chunk_tokens = 128;
    d.train = p->train;
    d.grad_return = r->t[0]->caps & RA_CAP_ANY_PEER ? RA_RETURN_DIRECT : RA_RETURN_RING;
    s = ra_plan_create(&p->plan, &d, NULL);
    if (!s) s = ra_ring_create(&p->ring, p->plan, t, &rd);
    if (s) return s;
    p->run_count = ra_plan_q_runs(p->plan, rank, 0, p->runs, 2);
    for (int i = 0; i < p->run_count; i++) p->rows += p->runs[i].count;
    m = p->memory = (float *)calloc((size_t)p->rows * (4 * CF_ROW + 4 * CF_DIM + CF_HEADS) + 16,
                                    sizeof *m);
    if (!m) abort();
    p->t.q.data = m;   cf_rows(p, m, NULL, CF_ROW, 0); m += p->rows * CF_ROW;
    p->t.d_o.data = m; cf_rows(p, m, NULL, CF_ROW, 3); m += p->rows * CF_ROW;
    p->t.k.data = m;   cf_rows(p, m, NULL, CF_DIM, 1); m += p->rows * CF_DIM;
    p->t.v.data = m;   cf_rows(p, m, NULL, CF_DIM, 2); m += p->rows * CF_DIM;
    p->t.o.data = m;   m += p->rows * CF_ROW;
    p->t.d_q.data = m; m += p->rows * CF_ROW;
    p->t.d_k.data = m; m += p->rows * CF_DIM;
    p->t.d_v.data = m; m += p->rows * CF_DIM;
    p->t.lse.data = m;
    return RA_OK;
}

/* A ring that ends with RA_E_UNSAFE is leaked with the tensors that others may still read. */
static inline void cf_pass_close(cf_rank *r, cf_pass *p) {
    if (ra_ring_destroy(p->ring) == RA_OK) {
        free(p->memory);
    } else {
        r->leaked[0] = p->ring;
        r->leaked[1] = p->memory;
    }
    ra_plan_destroy(p->plan);
}

/* Gradients are added to: they begin at 0. */
static inline ra_status cf_pass_run(cf_pass *p, int64_t deadline) {
    ra_tensors t = p->t;
    ra_status s;
    memset(t.d_q.data, 0, (size_t)p->rows * (CF_ROW + 2 * CF_DIM) * sizeof(float));
    t.d_o.data = NULL;
    t.d_q.data = t.d_k.data = t.d_v.data = NULL;
    s = ra_forward(p->plan, p->ring, &t, deadline);
    if (!s && p->train) s = ra_backward(p->plan, p->ring, &p->t, deadline);
    return s;
}

static inline void cf_pass_results(const cf_pass *p, cf_shared *s) {
    cf_rows(p, (float *)p->t.o.data, s->o, CF_ROW, 0);
    cf_rows(p, (float *)p->t.lse.data, s->lse, CF_HEADS, 0);
    cf_rows(p, (float *)p->t.d_q.data, s->d_q, CF_ROW, 0);
    cf_rows(p, (float *)p->t.d_k.data, s->d_k, CF_DIM, 0);
    cf_rows(p, (float *)p->t.d_v.data, s->d_v, CF_DIM, 0);
}

static inline int cf_same(cf_rank *r, const char *what, const float *got, const float *want,
                          int64_t n) {
    int64_t differ = 0;
    for (int64_t i = 0; i < n; i++) differ += memcmp(got + i, want + i, sizeof *got) != 0;
    if (!differ) return 1;
    return cf_break(r, CF_PASS, "%lld of %lld numbers of %s have other bits than on one rank",
                    (long long)differ, (long long)n, what);
}

/* The same on one rank, compared with the results of all ranks. */
static inline void cf_pass_compare(cf_rank *r) {
    static cf_shared one;
    cf_shared *s = r->shared;
    ra_error e = { 0 };
    cf_pass p;
    if (cf_pass_open(r, &p, 0, 1, NULL, &e) || cf_pass_run(&p, RA_NO_DEADLINE)) {
        cf_break(r, CF_PASS, "one rank alone failed: %s", e.text);
        return;
    }
    cf_pass_results(&p, &one);
    cf_pass_close(r, &p);
    (void)(cf_same(r, "o", s->o, one.o, CF_TOKENS * CF_ROW) &&
           cf_same(r, "lse", s->lse, one.lse, CF_TOKENS * CF_HEADS) &&
           cf_same(r, "dQ", s->d_q, one.d_q, CF_TOKENS * CF_ROW) &&
           cf_same(r, "dK", s->d_k, one.d_k, CF_TOKENS * CF_DIM) &&
           cf_same(r, "dV", s->d_v, one.d_v, CF_TOKENS * CF_DIM));
}

static inline void cf_pass_failed(cf_rank *r, const cf_pass *p, ra_status s, const ra_error *e) {
    ra_failure f = { 0 };
    if (p->ring && ra_ring_failure(p->ring, &f) == RA_OK)
        cf_break(r, CF_PASS, "%s: %s", ra_status_text(s), f.text);
    else
        cf_break(r, CF_PASS, "%s: %s %s", ra_status_text(s),
                 p->ring ? ra_ring_error(p->ring)->field : e->field,
                 p->ring ? ra_ring_error(p->ring)->text : e->text);
}

/* Two passes forward and two backward. */
static inline void cf_t_passes(cf_rank *r) {
    ra_status s;
    ra_error e = { 0 };
    cf_pass p;
    s = cf_pass_open(r, &p, r->rank, r->ranks, r->t[0], &e);
    for (int i = 0; i < 2 && !s; i++) s = cf_pass_run(&p, ra_now_ns() + 4 * r->patience);
    if (s) {
        cf_pass_failed(r, &p, s, &e);
        return;
    }
    cf_pass_results(&p, r->shared);
    if (!p.train && r->rank == 0)
        snprintf(r->shared->note, sizeof r->shared->note,
                 "forward only: backward needs 2 channels and max_ops of 3");
    if (!cf_meet(r)) return;
    cf_pass_close(r, &p);
    if (r->rank == 0) cf_pass_compare(r);
    cf_meet(r);
}

/* Rank 0 cancels after some steps of a forward pass. All ranks return: by their deadline at the
 * latest, and if its abort reaches the peers, long before. */
static inline void cf_t_cancel(cf_rank *r) {
    static const int steps[] = { 0, 1, 2, 5, 9, 17 };
    int64_t begin = ra_now_ns(), deadline;
    ra_status s;
    ra_error e = { 0 };
    cf_pass p;
    r->breaks = 1;
    if (cf_pass_open(r, &p, r->rank, r->ranks, r->t[0], &e)) {
        cf_break(r, CF_PASS, "%s %s", e.field, e.text);
        return;
    }
    deadline = begin + (r->maker->tells_peers ? r->patience : 300000000);
    if (r->rank == 0) {
        ra_job job = { 0 };
        job.plan = p.plan;
        job.tensors = &p.t;
        job.deadline_ns = deadline;
        s = ra_begin(p.ring, &job);
        for (int i = 0; i < steps[r->variant] && s >= 0; i++) {
            s = ra_step(p.ring, 0);
            if (s == RA_OK) break;
            if (s == RA_WAIT) (void)ra_step_wait(p.ring, ra_deadline_ms(1));
        }
        ra_ring_cancel(p.ring);
        if (s > 0) s = ra_step(p.ring, 0);
        if (s < 0) (void)ra_finish(p.ring, ra_now_ns() + cf_brief(r));
    } else {
        ra_tensors t = p.t;
        t.d_o.data = NULL;
        t.d_q.data = t.d_k.data = t.d_v.data = NULL;
        s = ra_forward(p.plan, p.ring, &t, deadline);
        /* A rank that had all it needed has not noticed, and others would wait for it. */
        if (s == RA_OK) ra_ring_cancel(p.ring);
    }
    if (r->rank && r->maker->tells_peers && s && s != RA_E_ABORTED && s != RA_E_PEER)
        cf_break(r, CF_ABORT_PEERS, "the pass ended with %s", ra_status_text(s));
    if (ra_now_ns() > deadline + r->patience)
        cf_break(r, CF_PASS_ENDS, "it came back %lld ms after its deadline",
                 (long long)((ra_now_ns() - deadline) / 1000000));
    if (cf_over(r)) return;
    cf_pass_close(r, &p);
    cf_meet(r);
}

/* The last rank never begins its pass. All others return by their deadline. */
static inline void cf_t_absent(cf_rank *r) {
    int64_t deadline = ra_deadline_ms(300);
    cf_rank brief = *r;                /* of patience in quiesce, which needs the last rank */
    ra_status s;
    ra_error e = { 0 };
    cf_pass p;
    r->breaks = 1;
    if (brief.patience > 600000000) brief.patience = 600000000;
    if (cf_pass_open(&brief, &p, r->rank, r->ranks, r->t[0], &e)) {
        cf_break(r, CF_PASS, "%s %s", e.field, e.text);
        return;
    }
    if (r->rank < r->ranks - 1) {
        ra_tensors t = p.t;
        t.d_o.data = NULL;
        t.d_q.data = t.d_k.data = t.d_v.data = NULL;
        s = ra_forward(p.plan, p.ring, &t, deadline);
        if (s == RA_OK && r->rank == r->ranks - 2)
            cf_break(r, CF_PASS, "the pass ended well without rank %d", r->ranks - 1);
        if (ra_now_ns() > deadline + r->patience)
            cf_break(r, CF_PASS_ENDS, "it came back %lld ms after its deadline",
                     (long long)((ra_now_ns() - deadline) / 1000000));
    } else if (cf_await(r, &r->shared->flag[0][0], r->ranks - 1, 4 * r->patience)) {
        ra_ring_cancel(p.ring);
    } else {
        cf_break(r, CF_PASS_ENDS, "another rank is still inside long after its deadline of 300 ms");
    }
    if (r->rank < r->ranks - 1) __atomic_add_fetch(&r->shared->flag[0][0], 1, __ATOMIC_ACQ_REL);
    if (cf_over(r)) return;
    cf_pass_close(r, &p);
    cf_meet(r);
}

/* A ring of one over a world of one. */
static inline void cf_t_lone(cf_rank *r) {
    ra_error e = { 0 };
    cf_pass p;
    ra_status s;
    s = cf_pass_open(r, &p, 0, 1, r->t[0], &e);
    if (!s) s = cf_pass_run(&p, ra_now_ns() + r->patience);
    if (s) {
        cf_break(r, CF_LONE, "%s: %s %s", ra_status_text(s), e.field, e.text);
        return;
    }
    cf_pass_results(&p, r->shared);
    cf_pass_close(r, &p);
    cf_pass_compare(r);
}

/* -------------------------------------------------------------------------- the suite */
static const cf_test cf_tests[] = {
    { "properties",       cf_t_struct,    CF_LEVEL_0 | CF_LEVEL_1,  1, CF_CRASH },
    { "a ring of one",    cf_t_lone,      CF_ALONE,                 1, CF_LONE },
    { "silent when done", cf_t_arrives,   CF_LEVEL_1 | CF_ONE_WORLD, 1, CF_ARRIVES },
    { "sizes",            cf_t_sizes,     CF_LEVEL_1,               1, CF_PROGRESS },
    { "order, in flight", cf_t_order,     CF_LEVEL_1,               1, CF_PROGRESS },
    { "blocks nowhere",   cf_t_blocks,    CF_LEVEL_1,               1, CF_POST_BLOCKS },
    { "progress",         cf_t_progress,  CF_LEVEL_1,               1, CF_PROGRESS },
    { "poll without ops", cf_t_poll_none, CF_LEVEL_1 | CF_ONE_WORLD, 1, CF_POLL_NONE },
    { "largest message",  cf_t_largest,   CF_LEVEL_1,               1, CF_LARGEST },
    { "any peer",         cf_t_any_peer,  CF_LEVEL_1,               1, CF_ANY_PEER },
    { "two rings",        cf_t_rings,     CF_LEVEL_1 | CF_TWO_RINGS, 1, CF_PROGRESS },
    { "loans",            cf_t_loans,     CF_LEVEL_1,               1, CF_PROGRESS },
    { "registration",     cf_t_reg,       CF_LEVEL_1,               1, CF_REG },
    { "other lengths",    cf_t_trunc,     CF_LEVEL_1 | CF_ONE_WORLD, 2, CF_TRUNC },
    { "wait",             cf_t_wait,      CF_LEVEL_1 | CF_ONE_WORLD, 1, CF_WAIT_DEADLINE },
    { "abort",            cf_t_abort,     CF_LEVEL_1,              13, CF_ABORT_PENDING },
    { "quiesce",          cf_t_quiesce,   CF_LEVEL_1,               1, CF_QUIESCE_DEADLINE },
    { "both ways",        cf_t_both_ways, CF_LEVEL_0,               1, CF_BOTH_WAYS },
    { "one side",         cf_t_one_side,  CF_LEVEL_0,               1, CF_ONE_SIDE },
    { "any thread",       cf_t_threads,   CF_LEVEL_0 | CF_LEVEL_1,  1, CF_ANY_THREAD },
    { "a late rank",      cf_t_late,      CF_LEVEL_0 | CF_LEVEL_1 | CF_LATE_RANK, 1, CF_LATE },
    { "its deadline",     cf_t_sendrecv_deadline, CF_LEVEL_0,       1, CF_SENDRECV_DEADLINE },
    { "passes",           cf_t_passes,    CF_PASSES,                1, CF_PASS },
    { "a cancelled pass", cf_t_cancel,    CF_PASSES,                6, CF_PASS_ENDS },
    { "an absent rank",   cf_t_absent,    CF_PASSES | CF_ONE_WORLD, 1, CF_PASS_ENDS },
};
enum { CF_TEST_COUNT = (int)(sizeof cf_tests / sizeof *cf_tests) };

/* What a test needs of the transport that it lacks; null: the test can run. */
static inline const char *cf_unfit(const cf_test *test, const ra_transport *t) {
    if ((test->flags & CF_LEVEL_1) && !(test->flags & CF_LEVEL_0) && !t->post) return "no post";
    if ((test->flags & CF_LEVEL_0) && !(test->flags & CF_LEVEL_1) && !t->sendrecv)
        return "no sendrecv";
    /* Without deadlines a cancelled peer may block a call for ever, and says so. */
    if ((test->run == cf_t_cancel || test->run == cf_t_absent) && !t->post &&
        !(t->caps & RA_CAP_DEADLINE))
        return "no RA_CAP_DEADLINE";
    return NULL;
}

/* One rank of one test, on its own thread or in its own process. */
static inline void *cf_rank_main(void *arg) {
    cf_rank *r = (cf_rank *)arg;
    int rings = r->test->flags & CF_TWO_RINGS ? 2 : 1, joined = 0;
    if ((r->test->flags & CF_LATE_RANK) && r->rank == r->ranks - 1) cf_sleep_us(120000);
    cf_at(r, CF_AT_JOIN);
    for (; joined < rings; joined++) {
        r->t[joined] = r->maker->join(r->world, joined, r->rank);
        if (r->t[joined]) continue;
        cf_break(r, CF_STRUCT, "join gave no transport");
        break;
    }
    cf_at(r, CF_AT_TEST);
    if (joined == rings) {
        const char *unfit = cf_unfit(r->test, r->t[0]);
        if (unfit) {
            cf_unclaimed(r);
            if (r->rank == 0) snprintf(r->shared->note, sizeof r->shared->note, "%s", unfit);
        } else r->test->run(r);
    }
    cf_at(r, CF_AT_LEAVE);
    while (joined-- > 0)
        r->maker->leave(r->world, joined, r->rank, cf_over(r) || r->breaks ? RA_E_ABORTED : RA_OK);
    cf_at(r, CF_AT_DONE);
    return NULL;
}

/* A process whose test is killed, for instance by timeout, ends too. */
static inline void cf_end_with_parent(void) {
#ifdef __linux__
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
#endif
}

/* All ranks of one test, in the child process that was made for it. */
static inline void cf_world(cf_rank *ranks, int n) {
    pthread_t id[CF_MOST_RANKS];
    pid_t pid[CF_MOST_RANKS];
    int status = 0;
    for (int i = 0; i < n && !ranks[0].maker->processes; i++)
        if (pthread_create(&id[i], NULL, cf_rank_main, &ranks[i])) abort();
    for (int i = 0; i < n && !ranks[0].maker->processes; i++) pthread_join(id[i], NULL);
    if (!ranks[0].maker->processes) return;
    for (int i = 0; i < n; i++) {
        pid[i] = fork();
        if (pid[i] == 0) {
            cf_end_with_parent();
            (void)cf_rank_main(&ranks[i]);
            exit(0);
        }
    }
    for (int i = 0; i < n; i++) {
        if (pid[i] < 0 || waitpid(pid[i], &status, 0) < 0 || status)
            cf_break(&ranks[i], CF_CRASH, "its process ended with status %d", status);
    }
}

/* One test: which, for how many ranks, and where they meet. */
typedef struct cf_job {
    const cf_maker *maker;
    const cf_test *test;
    cf_shared *shared;
    int ranks, variant;
} cf_job;

static inline void cf_rank_make(cf_rank *r, const cf_job *job, void *world, int rank) {
    const cf_maker *m = job->maker;
    memset(r, 0, sizeof *r);
    r->shared = job->shared;
    r->maker = m;
    r->test = job->test;
    r->world = world;
    r->rank = rank;
    r->ranks = job->ranks;
    r->next = (rank + 1) % job->ranks;
    r->prev = (rank + job->ranks - 1) % job->ranks;
    r->variant = job->variant;
    r->patience = cf_patience_ms(m) * 1000000;
    r->random = cf_mix((uint64_t)(rank * 64 + job->variant) + 77) | 1;
}

static inline void *cf_make(const cf_job *job) {
    int rings = job->test->flags & CF_TWO_RINGS ? 2 : 1;
    void *world = job->maker->make(job->maker->user, job->ranks, rings);
    if (!world) cf_store(&job->shared->unclaimed, 2);
    return world;
}

static inline void cf_child(const cf_job *job) {
    static cf_rank ranks[CF_MOST_RANKS];
    const cf_maker *m = job->maker;
    cf_shared *shared = job->shared;
    void *world;
    for (int i = 0; i < job->ranks; i++) cf_place(shared, i, CF_AT_MAKE);
    world = cf_make(job);
    if (!world) exit(0);
    for (int i = 0; i < job->ranks; i++) cf_rank_make(&ranks[i], job, world, i);
    cf_world(ranks, job->ranks);
    for (int i = 0; i < job->ranks; i++) cf_place(shared, i, CF_AT_END);
    m->end(world);
    if (cf_load(&shared->over)) _exit(0);          /* what a broken test left is not judged */
    exit(0);
}

/* Where the ranks of a test are that does not end, and the processes that have no part in it. */
static inline void cf_stuck(const cf_job *job, int64_t limit_ms, char *text, size_t size) {
    const cf_outside *o = job->maker->outside;
    int n = snprintf(text, size, "the test does not end in %lld ms", (long long)limit_ms);
    int all = o ? o->ranks : job->ranks;
    for (int i = 0; i < all && i < CF_MOST_RANKS && (size_t)n < size; i++)
        n += snprintf(text + n, size - (size_t)n, "%s rank %d %s", i ? "," : ":", i,
                      cf_place_text[cf_load(&job->shared->place[i])]);
}

/* How long one test may take. */
static inline int64_t cf_limit_ms(const cf_maker *m) {
    return 6 * cf_patience_ms(m) + 3000;
}

/* Waits for the child, no longer than a test may take; after a breach, only a moment. */
static inline int cf_reap(pid_t pid, const cf_shared *s, int64_t limit_ms) {
    int64_t until = ra_deadline_ms(limit_ms), soon = 0;
    int status = 0;
    for (;;) {
        pid_t got = waitpid(pid, &status, WNOHANG);
        if (got == pid) return status;
        if (got < 0 && errno != EINTR) return -1;
        if (cf_load(&s->over) && !soon) soon = ra_deadline_ms(300);
        if (ra_now_ns() > until || (soon && ra_now_ns() > soon)) break;
        cf_sleep_us(500);
    }
    kill(-pid, SIGKILL);
    waitpid(pid, &status, 0);
    return -1;
}

typedef struct cf_result {
    int rule, unclaimed;               /* -1: none broken */
    char text[400], note[160];
} cf_result;

static inline void *cf_map(FILE *file, size_t bytes) {
    void *p = MAP_FAILED;
    if (file && !ftruncate(fileno(file), (off_t)bytes))
        p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fileno(file), 0);
    if (p != MAP_FAILED) return p;
    fprintf(stderr, "conformance: no shared memory for a test\n");
    exit(2);
}

static inline cf_result cf_result_of(const cf_shared *s) {
    cf_result out = { 0 };
    out.rule = s->rule;
    out.unclaimed = s->unclaimed;
    memcpy(out.text, s->text, sizeof out.text);
    memcpy(out.note, s->note, sizeof out.note);
    return out;
}

/* All processes of a run from outside meet. */
typedef struct cf_gate { int32_t arrived, round; cf_shared shared; } cf_gate;
static inline void cf_pass_gate(cf_gate *g, int ranks) {
    int32_t round = cf_load(&g->round);
    if (__atomic_add_fetch(&g->arrived, 1, __ATOMIC_ACQ_REL) == ranks) {
        cf_store(&g->arrived, 0);
        cf_store(&g->round, round + 1);
    }
    while (cf_load(&g->round) == round) cf_sleep_us(200);
}

/* Reports a breach. to: null: no report. */
static inline void cf_fail(FILE *to, const cf_test *test, int n, int variant,
                           const cf_result *res) {
    if (!to) return;
    fprintf(to, "FAIL  %-18s P %d, variant %d: %s\n", test->name, n, variant, res->text);
    fprintf(to, "      the contract: %s (%s)\n", cf_rule_text[res->rule], cf_rule_name[res->rule]);
    fflush(to);
}

/* Ends a process of a run from outside if its test does not end. Rank 0, which reports it, is the
 * first to exit: the launcher may kill the others then. */
typedef struct cf_watch {
    const cf_job *job;
    FILE *to;
    int32_t ended;                     /* 1: the test has ended */
    pthread_t thread;
} cf_watch;

static inline void *cf_watch_main(void *arg) {
    const cf_watch *w = (const cf_watch *)arg;
    const cf_job *job = w->job;
    int64_t limit = cf_limit_ms(job->maker);
    int64_t until = ra_deadline_ms(limit + (job->maker->outside->rank ? 2000 : 0));
    cf_result res;
    while (!cf_load(&w->ended) && ra_now_ns() < until) cf_sleep_us(1000);
    if (cf_load(&w->ended)) return NULL;
    if (cf_load(&job->shared->over)) {
        res = cf_result_of(job->shared);
        cf_fail(w->to, job->test, job->ranks, job->variant, &res);
    }
    res.rule = job->test->hangs;
    cf_stuck(job, limit, res.text, sizeof res.text);
    cf_fail(w->to, job->test, job->ranks, job->variant, &res);
    _exit(1);
}

/* This process's part of the test, between the gates. */
static inline void cf_part(const cf_job *job) {
    const cf_outside *o = job->maker->outside;
    cf_rank r;
    void *world;
    cf_place(job->shared, o->rank, CF_AT_MAKE);
    world = cf_make(job);
    if (world && o->rank < job->ranks) {
        cf_rank_make(&r, job, world, o->rank);
        (void)cf_rank_main(&r);
    }
    cf_place(job->shared, o->rank, CF_AT_END);
    if (world) job->maker->end(world);
    cf_place(job->shared, o->rank, CF_AT_DONE);
}

static inline cf_result cf_run_outside(const cf_maker *m, const cf_test *test, int n, int variant,
                                       FILE *to) {
    static cf_gate *gate;
    const cf_outside *o = m->outside;
    cf_result out;
    cf_watch watch = { 0 };
    cf_job job;
    if (!gate) {
        FILE *file = fopen(o->file, "ab+");        /* the first process makes it, of zeros */
        gate = (cf_gate *)cf_map(file, sizeof *gate);
        fclose(file);
    }
    job.maker = m;
    job.test = test;
    job.shared = &gate->shared;
    job.ranks = n;
    job.variant = variant;
    watch.job = &job;
    watch.to = to;
    if (pthread_create(&watch.thread, NULL, cf_watch_main, &watch)) abort();
    cf_pass_gate(gate, o->ranks);
    if (o->rank == 0) {
        memset(&gate->shared, 0, sizeof gate->shared);
        gate->shared.rule = -1;
    }
    cf_pass_gate(gate, o->ranks);
    cf_part(&job);
    cf_pass_gate(gate, o->ranks);
    out = cf_result_of(&gate->shared);
    cf_pass_gate(gate, o->ranks);
    cf_store(&watch.ended, 1);
    pthread_join(watch.thread, NULL);
    return out;
}

/* One test with n ranks in a separate process. */
static inline cf_result cf_run_test(const cf_maker *m, const cf_test *test, int n, int variant,
                                    FILE *to) {
    FILE *file;
    cf_shared *s;
    cf_result out;
    cf_job job;
    int64_t limit = cf_limit_ms(m);
    int status = -1;
    pid_t pid;
    if (m->outside) return cf_run_outside(m, test, n, variant, to);
    file = tmpfile();
    s = (cf_shared *)cf_map(file, sizeof *s);
    s->rule = -1;
    job.maker = m;
    job.test = test;
    job.shared = s;
    job.ranks = n;
    job.variant = variant;
    fflush(NULL);
    pid = fork();
    if (pid == 0) {
        setpgid(0, 0);                 /* so a signal to our group does not reach it, */
        cf_end_with_parent();          /* but our death does */
        cf_child(&job);
    }
    if (pid > 0) {
        setpgid(pid, pid);
        status = cf_reap(pid, s, limit);
        kill(-pid, SIGKILL);           /* processes of ranks that outlived it */
    }
    out = cf_result_of(s);
    if (out.rule < 0 && status == -1) {
        out.rule = test->hangs;
        cf_stuck(&job, limit, out.text, sizeof out.text);
    } else if (out.rule < 0 && status) {
        out.rule = CF_CRASH;
        snprintf(out.text, sizeof out.text, "the test's process ended with %s %d",
                 WIFSIGNALED(status) ? "signal" : "exit status",
                 WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
    }
    munmap(s, sizeof *s);
    fclose(file);
    return out;
}

typedef struct cf_report {
    int broken[CF_RULE_COUNT];         /* how many tests found it */
    int passed, failed, unclaimed, first; /* first: rule, -1 */
} cf_report;

/* One line of the report: a test with all numbers of ranks and all variants. */
static inline void cf_line(const cf_maker *m, const cf_test *test, cf_report *rep, FILE *to) {
    static const int ranks[] = { 2, 3, 5, 8, 1 };
    int ran = 0, most = m->most_ranks ? m->most_ranks : CF_MOST_RANKS;
    char done[64] = "", note[160] = "";
    cf_result res = { 0 };
    if (m->outside && m->outside->ranks < most) most = m->outside->ranks;
    res.rule = -1;
    for (int i = 0; i < 5 && res.rule < 0; i++) {
        int n = ranks[i], alone = (test->flags & CF_ALONE) != 0;
        if ((n == 1) != alone || n > most) continue;
        if ((test->flags & CF_ONE_WORLD) && n > 3) continue;
        for (int v = 0; v < test->variants && res.rule < 0; v++) {
            res = cf_run_test(m, test, n, v, to);
            if (res.note[0]) memcpy(note, res.note, sizeof note);
            if (!res.unclaimed && v == 0)
                snprintf(done + strlen(done), sizeof done - strlen(done), " %d", n);
            if (!res.unclaimed) ran = 1;
            if (res.rule < 0) continue;
            rep->broken[res.rule]++;
            if (rep->first < 0) rep->first = res.rule;
            rep->failed++;
            cf_fail(to, test, n, v, &res);
        }
    }
    if (res.rule >= 0) return;
    if (ran) rep->passed++;
    else rep->unclaimed++;
    if (!to) return;
    if (ran) fprintf(to, "ok    %-18s P%s%s%s%s\n", test->name, done, note[0] ? "  (" : "", note,
                     note[0] ? ")" : "");
    else fprintf(to, "-     %-18s %s\n", test->name, note[0] ? note : res.unclaimed >= 2 ?
                 "the maker makes no such world" : "not claimed");
    fflush(to);
}

/* All tests; passes only if the messages under them are right. only: a part of a test's name, or
 * null. first: stop at the first breach. to: the report; null: none. */
static inline cf_report cf_judge(const cf_maker *m, const char *only, int first, FILE *to) {
    cf_report rep = { 0 };
    rep.first = -1;
    if (to) fprintf(to, "conformance of %s\n", m->name);
    for (int i = 0; i < CF_TEST_COUNT; i++) {
        const cf_test *test = &cf_tests[i];
        if (only && !strstr(test->name, only)) continue;
        if ((first || m->outside) && rep.failed) break;
        if ((test->flags & CF_PASSES) && rep.failed) {
            if (to) fprintf(to, "-     %-18s not judged: what it builds on is broken\n",
                            test->name);
            continue;
        }
        cf_line(m, test, &rep, to);
    }
    if (to)
        fprintf(to, "%s: %d capabilities passed, %d broken, %d not claimed\n", m->name, rep.passed,
                rep.failed, rep.unclaimed);
    return rep;
}

/* For a main: 0 if no rule is broken. */
static inline int cf_suite(const cf_maker *m, FILE *to) { return cf_judge(m, NULL, 0, to).failed; }

#endif
