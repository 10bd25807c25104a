/* Every order in which the ranks of a small ring can take their steps. Two or three ranks have a
 * chunk or two each. A step is one ra_step of a rank, in which its network takes all ops, or only
 * receives, or reports nothing, or in which the rank cancels. Every reachable state is visited
 * once. A state is all memory of rings, network and outputs, so orders with the same effect meet
 * again. In each state some rank can continue, and where all ranks have finished, their rows have
 * the bits of one rank. */
#include "ringattn.h"
#include "tests/harness.h"

enum { RANKS = 3, HEADS = 1, DIM = 8, TOKENS = 256, ROW = HEADS * DIM, OPS = 8, CHANNELS = 2,
       WORKSPACE = 1 << 16, DEPTH = 4096, SLOTS = 1 << 22, BLOCK = 1024 };

/* What a rank does next; CALM leaves the network alone. */
enum { CALM, RECEIVES_ONLY, TELLS_NOTHING, CANCELS, WAYS };

typedef struct flow { ra_transport_op *op[OPS]; int64_t n; } flow;

/* All that changes. It never moves, because rings have pointers into it. In blocks, most of which a
 * step leaves as they are. The workspaces of ranks that there are not stand at the end. */
typedef struct world {
    flow queue[2][RANKS][RANKS][CHANNELS]; /* sends, receives: [from][to] */
    int64_t aborted, over[RANKS], end[RANKS];
    float o[RANKS][TOKENS * ROW];
    uint8_t workspace[RANKS][WORKSPACE] __attribute__((aligned(BLOCK)));
} world;

typedef struct seat { int rank; ra_transport t; ra_ring *ring; ra_plan *plan; } seat;

static world now;
static seat seats[RANKS];
static int way;
static float q[TOKENS * ROW], k[TOKENS * ROW], v[TOKENS * ROW], one[TOKENS * ROW];

/* -------------------------------------------------------------------------- network */
static flow *flow_of(const seat *s, const ra_transport_op *op) {
    if (op->kind == RA_MSG_SEND) return &now.queue[0][s->rank][op->peer][op->channel];
    return &now.queue[1][op->peer][s->rank][op->channel];
}

/* Moves the first send of a flow to its first receive; both owners learn it in their next poll. */
static void meet(flow *sends, flow *receives) {
    while (sends->n && receives->n) {
        ra_transport_op *out = sends->op[0], *in = receives->op[0];
        CHECK_EQ(out->len, in->len);
        memcpy(in->buf, out->buf, in->len);
        out->scratch[0] = in->scratch[0] = &now;
        memmove(sends->op, sends->op + 1, (size_t)--sends->n * sizeof sends->op[0]);
        memmove(receives->op, receives->op + 1, (size_t)--receives->n * sizeof sends->op[0]);
        sends->op[sends->n] = receives->op[receives->n] = NULL;
    }
}

static int post(void *ctx, ra_transport_op *const *ops, int n) {
    seat *s = (seat *)ctx;
    int left = 0;
    for (int kind = RA_MSG_RECV; kind >= RA_MSG_SEND; kind--)
        for (int i = 0; i < n; i++) {
            flow *f = flow_of(s, ops[i]);
            if (ops[i]->state != RA_MSG_IDLE || ops[i]->kind != kind) continue;
            if (way == RECEIVES_ONLY && kind == RA_MSG_SEND) {
                left++;
                continue;
            }
            CHECK(f->n < OPS);
            f->op[f->n++] = ops[i];
            ops[i]->state = RA_MSG_PENDING;
        }
    for (int r = 0; r < RANKS; r++)
        for (int c = 0; c < CHANNELS; c++) {
            meet(&now.queue[0][s->rank][r][c], &now.queue[1][s->rank][r][c]);
            meet(&now.queue[0][r][s->rank][c], &now.queue[1][r][s->rank][c]);
        }
    return left ? RA_AGAIN : RA_OK;
}

static int poll(void *ctx, ra_transport_op *const *ops, int n) {
    (void)ctx;
    if (now.aborted) return RA_E_ABORTED;
    for (int i = 0; i < n && way != TELLS_NOTHING; i++)
        if (ops[i]->state == RA_MSG_PENDING && ops[i]->scratch[0]) ops[i]->state = RA_MSG_DONE;
    return RA_OK;
}

static int abort_all(void *ctx, int why) {
    (void)ctx, (void)why;
    now.aborted = 1;
    return RA_OK;
}

static int quiesce(void *ctx, int64_t deadline_ns) {
    (void)ctx, (void)deadline_ns;
    return RA_OK;
}

/* -------------------------------------------------------------------------- rings */
/* ways: how many choices of a rank are used, from CALM on. */
typedef struct shape { int ranks, mask, layout, tokens, trusts, ways; } shape;

static int64_t still(void *ctx) {      /* states do not differ in time */
    (void)ctx;
    return 1;
}

static ra_desc desc_of(const shape *x, int ranks, int rank) {
    ra_desc d = ra_desc_make(HEADS, HEADS, DIM, RA_F32, x->mask);
    d.tokens = x->tokens;
    d.ranks = ranks;
    d.rank = rank;
    d.layout.kind = x->layout;
    d.chunk_tokens = 64;
    d.buffers = 1;
    d.isa = RA_ISA_SCALAR;
    return d;
}

/* The rows of a rank, from or to arrays in the order of positions. */
static void rows(const ra_plan *plan, int rank, const float *all, float *out) {
    ra_run run[4];
    const int32_t n = ra_plan_q_runs(plan, rank, 0, run, 4);
    for (int i = 0; i < n; i++)
        for (int64_t j = 0; j < run[i].count; j++, out += ROW)
            memcpy(out, all + (run[i].first + j) * ROW, ROW * sizeof *out);
}

static void open_seat(const shape *x, int rank) {
    static float mine[RANKS][3][TOKENS * ROW];
    seat *s = &seats[rank];
    const ra_desc d = desc_of(x, x->ranks, rank);
    ra_ring_desc rd = { 0 };
    ra_tensors t = { 0 };
    ra_job job = { 0 };
    memset(s, 0, sizeof *s);
    s->rank = rank;
    s->t.size = sizeof s->t;
    s->t.abi = RA_TRANSPORT_ABI;
    s->t.caps = RA_CAP_ANY_PEER | RA_CAP_ANY_THREAD;
    s->t.channels = CHANNELS;
    s->t.max_ops = OPS;
    s->t.ctx = s;
    s->t.post = post;
    s->t.poll = poll;
    s->t.abort = abort_all;
    s->t.quiesce = quiesce;
    rd.workspace = now.workspace[rank];
    rd.workspace_bytes = WORKSPACE;
    rd.clock_ns = still;
    rd.trust_plans = x->trusts;
    CHECK_EQ(ra_plan_create(&s->plan, &d, NULL), RA_OK);
    rows(s->plan, rank, q, mine[rank][0]);
    rows(s->plan, rank, k, mine[rank][1]);
    rows(s->plan, rank, v, mine[rank][2]);
    t.q.data = mine[rank][0];
    t.k.data = mine[rank][1];
    t.v.data = mine[rank][2];
    t.o.data = now.o[rank];
    job.plan = s->plan;
    job.tensors = &t;
    CHECK_EQ(ra_ring_create(&s->ring, s->plan, &s->t, &rd), RA_OK);
    CHECK_EQ(ra_begin(s->ring, &job), RA_OK);
}

/* -------------------------------------------------------------------------- all states */
enum { BLOCKS = sizeof(world) / BLOCK };

/* A state on the way to the state at hand. */
typedef struct frame {
    int next, calm;                    /* the next choice; a calm step has changed something */
    uint64_t hash;
    world *at;
} frame;

static uint64_t seen[SLOTS];
static int64_t states, ends, cancelled;
static int changed[BLOCKS], changes;   /* blocks of the state at hand that the last step changed */

/* 1: a state with this hash is new. */
static int is_new(uint64_t h) {
    uint64_t at;
    h |= !h;
    for (at = h % SLOTS; seen[at]; at = (at + 1) % SLOTS) if (seen[at] == h) return 0;
    if (!CHECK(++states < SLOTS * 3 / 4)) return 0;
    seen[at] = h;
    return 1;
}

static uint64_t hash_of(const world *x, int block) {
    const uint8_t *p = (const uint8_t *)x + block * BLOCK;
    uint64_t h = (uint64_t)block + 1, word;
    for (size_t i = 0; i < BLOCK; i += sizeof word) {
        memcpy(&word, p + i, sizeof word);
        h = (h ^ word) * 0x9E3779B97F4A7C15u;
        h ^= h >> 29;
    }
    return h;
}

static int blocks_of(const shape *x) {
    return (int)((offsetof(world, workspace) + (size_t)x->ranks * WORKSPACE) / BLOCK);
}

/* The hash of the state at hand, the sum of those of its blocks. One step leads to it from f. */
static uint64_t hash_after(const frame *f, int blocks) {
    const uint8_t *a = (const uint8_t *)&now, *b = (const uint8_t *)f->at;
    uint64_t h = f->hash;
    changes = 0;
    for (int i = 0; i < blocks; i++) {
        if (!memcmp(a + i * BLOCK, b + i * BLOCK, BLOCK)) continue;
        h += hash_of(&now, i) - hash_of(f->at, i);
        changed[changes++] = i;
    }
    return h;
}

/* Undoes that step. */
static void go_back(const frame *f) {
    while (changes) {
        const int at = changed[--changes] * BLOCK;
        memcpy((uint8_t *)&now + at, (const uint8_t *)f->at + at, BLOCK);
    }
}

static void step(int rank) {
    ra_status s;
    if (way == CANCELS) {
        ra_ring_cancel(seats[rank].ring);
        return;
    }
    s = ra_step(seats[rank].ring, 0);
    if (s > 0) return;
    now.over[rank] = 1;
    now.end[rank] = s;
}

/* All ranks have finished. */
static void check_end(const shape *x) {
    float want[TOKENS * ROW];
    ends++;
    cancelled += now.aborted;
    for (int r = 0; r < x->ranks; r++) {
        if (now.end[r] == RA_OK) {
            rows(seats[r].plan, r, one, want);
            CHECK(!memcmp(want, now.o[r], (size_t)(x->tokens / x->ranks) * ROW * sizeof *want));
        } else CHECK_EQ(now.end[r], now.aborted ? r ? RA_E_ABORTED : RA_E_CANCELLED : RA_OK);
    }
}

static int64_t over_count(const shape *x) {
    int64_t n = 0;
    for (int r = 0; r < x->ranks; r++) n += now.over[r];
    return n;
}

/* Takes choice i of the state at hand. 0: there is no such choice. */
static int choose(const shape *x, int i) {
    const int rank = i / x->ways;
    way = i % x->ways;
    if (now.over[rank]) return 0;
    if (way == CANCELS && (rank || now.aborted)) return 0;
    step(rank);
    return 1;
}

/* Visits what follows the state at hand, depth first. */
static void visit_all(const shape *x) {
    static frame stack[DEPTH];
    const int blocks = blocks_of(x);
    uint64_t h = 0;
    int depth = 0;
    for (int i = 0; i < blocks; i++) h += hash_of(&now, i);
    (void)is_new(h);
    for (;;) {
        frame *f = &stack[depth];
        if (!f->at) f->at = (world *)malloc(sizeof now);
        memcpy(f->at, &now, (size_t)blocks * BLOCK);
        f->next = f->calm = changes = 0;
        f->hash = h;
        while (depth >= 0) {           /* the next new state, from the deepest that has one */
            f = &stack[depth];
            if (f->next == x->ranks * x->ways || h_run.bad) {
                CHECK(f->calm || h_run.bad);      /* otherwise no rank could continue */
                if (--depth < 0) break;
                memcpy(&now, stack[depth].at, (size_t)blocks * BLOCK);
                continue;
            }
            go_back(f);
            if (!choose(x, f->next++)) continue;
            h = hash_after(f, blocks);
            f->calm |= way == CALM && changes;
            if (!is_new(h)) continue;
            if (over_count(x) < x->ranks) break;
            check_end(x);
        }
        if (depth < 0 || !CHECK(depth + 1 < DEPTH)) break;
        depth++;
    }
    for (int i = 0; i < DEPTH; i++) {
        free(stack[i].at);
        stack[i].at = NULL;
    }
}

static void one_rank(const shape *x) {
    ra_desc d = desc_of(x, 1, 0);
    ra_tensors t = { 0 };
    ra_error why = { 0 };
    t.q.data = q;
    t.k.data = k;
    t.v.data = v;
    t.o.data = one;
    d.error = &why;
    CHECK_EQ(ra_ring_once(&d, NULL, &t, RA_NO_DEADLINE), RA_OK);
}

TEST(all_orders) {
    static const shape shapes[] = {
        { 2, RA_MASK_NONE, RA_LAYOUT_CONTIGUOUS, 128, 0, WAYS },
        { 2, RA_MASK_CAUSAL, RA_LAYOUT_ZIGZAG, 256, 1, WAYS },
        { 2, RA_MASK_NONE, RA_LAYOUT_CONTIGUOUS, 256, 1, 1 },
        { 3, RA_MASK_CAUSAL, RA_LAYOUT_CONTIGUOUS, 192, 1, 1 },
        { 3, RA_MASK_NONE, RA_LAYOUT_CONTIGUOUS, 192, 1, 1 },
        { 2, RA_MASK_NONE, RA_LAYOUT_CONTIGUOUS, 256, 1, 2 },            /* from here on --long */
        { 3, RA_MASK_CAUSAL, RA_LAYOUT_CONTIGUOUS, 192, 1, WAYS },
    };
    h_rng r = h_case_rng(0);
    for (int i = 0; i < TOKENS * ROW; i++) {
        q[i] = (float)h_range(&r, -1000, 1000) * 1e-3f;
        k[i] = (float)h_range(&r, -1000, 1000) * 1e-3f;
        v[i] = (float)h_range(&r, -1000, 1000) * 1e-3f;
    }
    for (int i = 0; i < (int)(sizeof shapes / sizeof *shapes); i++) {
        const shape *x = &shapes[i];
        if (!h_case(i) || (i >= 5 && !h_run.large)) continue;
        h_context("%d ranks, mask %d, %d tokens", x->ranks, x->mask, x->tokens);
        memset(seen, 0, sizeof seen);
        memset(&now, 0, sizeof now);
        states = ends = cancelled = 0;
        one_rank(x);
        for (int rank = 0; rank < x->ranks; rank++) open_seat(x, rank);
        visit_all(x);
        printf("%d ranks, %d tokens: %lld states, %lld ends, %lld of them cancelled\n", x->ranks,
               x->tokens, (long long)states, (long long)ends, (long long)cancelled);
        CHECK(ends > 0);
        for (int rank = 0; rank < x->ranks; rank++) ra_plan_destroy(seats[rank].plan);
    }
}

int main(int argc, char **argv) {
    static const h_test tests[] = { ENTRY(all_orders) };
    return h_main(argc, argv, tests, sizeof tests / sizeof *tests);
}
