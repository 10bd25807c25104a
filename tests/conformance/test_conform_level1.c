/* The conformance suite on examples/transports/ra_level1.h, over a sendrecv between threads that
 * holds no message: both sides meet, or the deadline comes. */
#include "examples/transports/ra_level1.h"
#include "tests/conformance/conformance.h"
#include "tests/harness.h"

typedef struct up_box {                /* of one pair of ranks and tag */
    const void *bytes;                 /* null: no send */
    size_t len;
    int taken;                         /* 1: the bytes were taken, with status */
    int status;
} up_box;

enum { UP_TAGS = 8 };
struct up_world;
typedef struct up_seat { struct up_world *world; int ring, rank; ra_level1 *up; } up_seat;
typedef struct up_world {
    pthread_mutex_t lock;
    pthread_cond_t moved;
    int ranks;
    int one_way;                       /* calls that moved a message one way only */
    up_box box[CF_MOST_RINGS][CF_MOST_RANKS][CF_MOST_RANKS][UP_TAGS];
    up_seat seat[CF_MOST_RINGS][CF_MOST_RANKS];
} up_world;

/* One look at both sides, under the lock. Returns 1 when both are done. */
static int up_move(up_box *out, up_box *in, void *r, size_t r_len, int *status) {
    if (in && r && in->bytes && !in->taken) {
        in->status = in->len == r_len ? RA_OK : RA_E_TRUNC;
        if (!in->status) memcpy(r, in->bytes, r_len);
        in->taken = 1;
        *status = in->status;
        return 2;
    }
    if (out && out->taken) {
        *status = out->status;
        memset(out, 0, sizeof *out);
        return 1;
    }
    return 0;
}

static int up_sendrecv(void *ctx, int to, const void *s, size_t s_len, int from, void *r,
                       size_t r_len, uint64_t tag, int64_t deadline_ns) {
    up_seat *me = (up_seat *)ctx;
    up_world *w = me->world;
    up_box *out = NULL, *in = NULL;
    int status = RA_OK, code = RA_OK;
    pthread_mutex_lock(&w->lock);
    w->one_way += (to == RA_NO_PEER) != (from == RA_NO_PEER);
    if (to != RA_NO_PEER) {
        out = &w->box[me->ring][me->rank][to][tag % UP_TAGS];
        out->bytes = s;
        out->len = s_len;
        pthread_cond_broadcast(&w->moved);
    }
    if (from != RA_NO_PEER) in = &w->box[me->ring][from][me->rank][tag % UP_TAGS];
    while ((out || in) && !code) {
        int what = up_move(out, in, r, r_len, &status);
        if (what == 1) out = NULL;
        if (what == 2) in = NULL;
        if (what == 2) pthread_cond_broadcast(&w->moved);
        if (status) code = status;
        if (what) continue;
        if (ra_now_ns() > deadline_ns) code = RA_E_TIMEOUT;
        else {
            struct timespec t;
            clock_gettime(CLOCK_REALTIME, &t);
            t.tv_nsec += 5000000;
            if (t.tv_nsec >= 1000000000) { t.tv_sec++; t.tv_nsec -= 1000000000; }
            pthread_cond_timedwait(&w->moved, &w->lock, &t);
        }
    }
    if (code && out) memset(out, 0, sizeof *out);
    pthread_mutex_unlock(&w->lock);
    return code;
}

static void *up_make(void *user, int ranks, int rings) {
    up_world *w = (up_world *)calloc(1, sizeof *w);
    (void)user, (void)rings;
    if (!w || pthread_mutex_init(&w->lock, NULL) || pthread_cond_init(&w->moved, NULL)) abort();
    w->ranks = ranks;
    return w;
}

static const ra_transport *up_join(void *world, int ring, int rank) {
    up_world *w = (up_world *)world;
    up_seat *s = &w->seat[ring][rank];
    ra_transport below = { 0 };
    below.size = sizeof below;
    below.abi = RA_TRANSPORT_ABI;
    below.caps = RA_CAP_DEADLINE;
    below.name = "sendrecv between threads";
    below.ctx = s;
    below.sendrecv = up_sendrecv;
    s->world = w;
    s->ring = ring;
    s->rank = rank;
    if (ra_level1_open(&s->up, &below, rank, w->ranks)) return NULL;
    return ra_level1_transport(s->up);
}

static void up_leave(void *world, int ring, int rank, int why) {
    up_seat *s = &((up_world *)world)->seat[ring][rank];
    if (why) (void)ra_level1_transport(s->up)->abort(s->up, why);
    ra_level1_close(s->up);
}

static void up_end(void *world) { free(world); }

TEST(level_0_with_a_helper) {
    cf_maker m = { "level 1 from a sendrecv", NULL, up_make, up_join, up_leave, up_end, 0, 1, 0,
                   0, NULL };
    cf_report rep;
    if (!h_run.large) m.most_ranks = 3;
    rep = cf_judge(&m, NULL, 0, stdout);
    CHECK_EQ(rep.failed, 0);
    CHECK_EQ(rep.unclaimed, 7);        /* any peer, loans, registration, those of sendrecv */
}

/* Two messages one way and four of half their length the other way: each call moves as much each
 * way, so neither link waits for the other. */
TEST(unequal_messages_move_together) {
    enum { OPS = 6, SHORT = 128 };    /* the rest of a message stays aligned to 64 */
    up_world *w = (up_world *)up_make(NULL, 2, 1);
    static uint8_t bytes[2][OPS][2 * SHORT];
    ra_transport_op op[2][OPS], *ops[2][OPS];
    const ra_transport *t[2];
    memset(op, 0, sizeof op);
    for (int r = 0; r < 2; r++) {
        t[r] = up_join(w, 0, r);
        for (int i = 0; i < OPS; i++) {
            const int brief = i < 4;   /* rank 0 sends these, and receives the others */
            ra_transport_op *x = ops[r][i] = &op[r][i];
            x->kind = brief == !r ? RA_MSG_SEND : RA_MSG_RECV;
            x->peer = 1 - r;
            x->buf = bytes[r][i];
            x->len = brief ? SHORT : 2 * SHORT;
            memset(bytes[r][i], x->kind == RA_MSG_SEND ? i + 1 : 0, sizeof bytes[r][i]);
        }
    }
    for (int r = 0; r < 2; r++) CHECK_EQ(t[r]->post(t[r]->ctx, ops[r], OPS), RA_OK);
    for (int r = 0; r < 2; r++)
        for (int i = 0; i < OPS; i++) {
            const int64_t end = ra_deadline_ms(10000);
            while (op[r][i].state == RA_MSG_PENDING && ra_now_ns() < end)
                CHECK_EQ(t[r]->wait(t[r]->ctx, &ops[r][i], 1, end), RA_OK);
            CHECK_EQ(op[r][i].state, RA_MSG_DONE);
            CHECK_EQ(bytes[r][i][op[r][i].len - 1], i + 1);
        }
    CHECK_EQ(w->one_way, 0);
    for (int r = 0; r < 2; r++) up_leave(w, 0, r, RA_E_ABORTED);
    up_end(w);
}

TEST(refusals) {
    ra_transport none = { 0 };
    ra_level1 *up = NULL;
    CHECK_EQ(ra_level1_open(NULL, &none, 0, 1), RA_E_NULL);
    CHECK_EQ(ra_level1_open(&up, NULL, 0, 1), RA_E_NULL);
    CHECK_EQ(ra_level1_open(&up, &none, 0, 1), RA_E_TRANSPORT);
    none.sendrecv = up_sendrecv;
    CHECK_EQ(ra_level1_open(&up, &none, 1, 1), RA_E_RANGE);
    CHECK_EQ(ra_level1_open(&up, &none, -1, 1), RA_E_RANGE);
    ra_level1_close(NULL);
}

int main(int argc, char **argv) {
    static const h_test tests[] = { ENTRY(level_0_with_a_helper),
                                    ENTRY(unequal_messages_move_together), ENTRY(refusals) };
    return h_main(argc, argv, tests, sizeof tests / sizeof tests[0]);
}
