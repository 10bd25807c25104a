/* Plans. Proves their figures by formulas derived by hand, by brute force over all (query, key)
 * pairs, and by the counters of runs. Proves their memory: workspaces are exact to the byte, and a
 * pass allocates nothing. */
#define _POSIX_C_SOURCE 200112L
#include "hooks.h"
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <time.h>
#include "oracle.h"
#include "world.h"

/* Lookups so far: the library asserts one invariant per step of a walk or bisection. */
static int64_t lookups(void) {
    return hook_asserts;
}

/* -------------------------------------------------------------------------- sums over ranks */
typedef struct totals { int64_t bytes, chunks, hops, skipped, tokens; ra_plan_report last; } totals;

/* Figures of a plan over all ranks. tokens: what travels, in tokens times hops, from the bytes. */
static totals plan_totals(const problem *p, const setup *s) {
    totals t = { 0 };
    ra_plan *plan = NULL;
    ra_plan_report r;
    ra_error e = { 0 };
    ra_desc d = rank_desc(p, s, 0);
    int64_t out = 0, row = p->Hkv * (p->Dk + p->Dv) * 4;
    d.error = &e;
    describe_case(p, s);
    if (!CHECK_EQ(ra_plan_create(&plan, &d, NULL), RA_OK)) {
        printf("    %s: %s\n", e.field, e.text);
        return t;
    }
    for (int rank = 0; rank < s->ranks; rank++) {
        CHECK_EQ(ra_plan_query(plan, rank, &r), RA_OK);
        t.bytes += r.forward.bytes_in;
        t.chunks += r.forward.chunks_in;
        t.hops += r.hops;
        t.skipped += r.hops_skipped;
        out += r.forward.bytes_out;
        t.last = r;
    }
    CHECK_EQ(out, t.bytes);
    CHECK_EQ(t.hops + t.skipped, (int64_t)p->B * s->ranks * (s->ranks - 1));
    CHECK_EQ((t.bytes - 64 * t.chunks) % row, 0);
    t.tokens = (t.bytes - 64 * t.chunks) / row;
    ra_plan_destroy(plan);
    return t;
}

static void shape_for_hops(problem *p, setup *s, int64_t tokens, int ranks, int32_t layout) {
    problem_shape(p, tokens, 2, 1, 16, 12);    /* rows of 64 and 48 bytes: 64 tokens need no pad */
    p->mask.kind = RA_MASK_CAUSAL;
    memset(s, 0, sizeof *s);
    s->ranks = ranks;
    s->layout = layout;
    s->chunk_tokens = 64;
}

/* Totals, twice, in shards, on P ranks with shards of n blocks: not pruned P(P-1); causal
 * contiguous up P(P-1)/2; zigzag down 3P(P-1)/4, up (2P-1)(P-1)/2; striped P(P-1). */
TEST(travel_of_causal_masks) {
    int up;
    for (int P = 2; P <= 8; P++) for (int n = 2; n <= 4; n += 2) {
        problem p;
        setup s;
        totals t;
        int64_t shard = 64 * n;
        if (!h_case(10 * P + n)) continue;
        shape_for_hops(&p, &s, P * shard, P, RA_LAYOUT_CONTIGUOUS);
        t = plan_totals(&p, &s);
        CHECK_EQ(2 * t.tokens, P * (P - 1) * shard);
        CHECK_EQ(t.hops, P * (P - 1) / 2);
        CHECK_EQ(t.last.forward.direction, 1);
        CHECK_EQ(t.last.order, RA_ORDER_DESCENDING);
        CHECK_EQ(t.bytes, t.chunks * (64 + 64 * 64 + 64 * 48));
        CHECK_EQ(2 * t.chunks, P * (P - 1) * n);
        s.layout = RA_LAYOUT_ZIGZAG;
        t = plan_totals(&p, &s);
        up = P == 2 || P > 6;                          /* few chunks per shard: down is longer */
        CHECK_EQ(t.last.forward.direction, up ? 1 : -1);
        CHECK_EQ(4 * t.tokens, (up ? 2 * (2 * P - 1) : 3 * P) * (P - 1) * shard);
        CHECK_EQ(t.last.order, RA_ORDER_ASCENDING);
        s.layout = RA_LAYOUT_STRIPED;
        t = plan_totals(&p, &s);
        CHECK_EQ(t.tokens, P * (P - 1) * shard);
    }
}

TEST(travel_without_a_mask) {
    for (int i = 0; i < 24; i++) {
        int P = 1 + i / 3;
        problem p;
        setup s;
        totals t;
        if (!h_case(i)) continue;
        shape_for_hops(&p, &s, P * 128, P, RA_LAYOUT_CONTIGUOUS + i % 3);
        p.mask.kind = RA_MASK_NONE;
        t = plan_totals(&p, &s);
        CHECK_EQ(t.tokens, P * (P - 1) * 128);
        CHECK_EQ(t.hops, P * (P - 1));
    }
}

/* A window of T/16 at P = 8: 3.5 shards contiguous, 28 zigzag in either direction, 56 striped. And
 * a window of a block, or a token: what is within a shard does not travel. */
TEST(travel_of_windows) {
    static const int64_t windows[4] = { 64, 1, 65, 129 };
    static const int64_t contiguous[4] = { 7 * 64, 0, 7 * 64, 7 * 128 };
    problem p;
    setup s;
    for (int i = 0; i < 4; i++) {
        if (!h_case(i)) continue;
        shape_for_hops(&p, &s, 8 * 128, 8, RA_LAYOUT_CONTIGUOUS);
        p.mask.window = windows[i];
        CHECK_EQ(plan_totals(&p, &s).tokens, contiguous[i]);
        if (i) continue;
        s.layout = RA_LAYOUT_ZIGZAG;
        CHECK_EQ(plan_totals(&p, &s).tokens, 28 * 128);
        s.layout = RA_LAYOUT_STRIPED;
        CHECK_EQ(plan_totals(&p, &s).tokens, 56 * 128);
    }
}

/* Hop by hop, by hand: 3 ranks, 200 tokens, several kinds of rounding. There are too few blocks for
 * the grid (4 < 6), so shards have 67, 67, 66 tokens; causal, upwards: rank 0's keys go to 1 and
 * 2. */
TEST(bytes_to_the_byte) {
    problem p;
    setup s = { 0 };
    ra_desc d;
    ra_plan *plan = NULL;
    ra_plan_report r[3];
    int f32 = 4, f16 = 2;
    int64_t a, b, row_k = 2 * 5 * f32, row_v = 2 * 3 * f16;
    problem_shape(&p, 200, 4, 2, 5, 3);
    problem_dtypes(&p, RA_F32, RA_F32, RA_F16, RA_F32);
    p.mask.kind = RA_MASK_CAUSAL;
    s.ranks = 3;
    s.layout = RA_LAYOUT_CONTIGUOUS;
    s.chunk_tokens = 128;                              /* one message per shard */
    d = rank_desc(&p, &s, 0);
    if (!CHECK_EQ(ra_plan_create(&plan, &d, NULL), RA_OK)) return;
    for (int i = 0; i < 3; i++) CHECK_EQ(ra_plan_query(plan, i, &r[i]), RA_OK);
    a = 64 + (67 * row_k + 63) / 64 * 64 + (67 * row_v + 63) / 64 * 64;
    b = a;
    CHECK_EQ(r[0].q_rows, 67); CHECK_EQ(r[1].k_rows, 67); CHECK_EQ(r[2].q_rows, 66);
    CHECK_EQ(r[0].forward.bytes_in, 0);
    CHECK_EQ(r[0].forward.bytes_out, a);
    CHECK_EQ(r[1].forward.bytes_in, a);
    CHECK_EQ(r[1].forward.bytes_out, a + b);
    CHECK_EQ(r[2].forward.bytes_in, a + b);
    CHECK_EQ(r[2].forward.bytes_out, 0);
    CHECK_EQ(r[2].forward.chunks_in, 2);
    CHECK_EQ(r[2].hops, 2);
    CHECK_EQ(r[0].hops_skipped, 2);
    CHECK_EQ(r[1].forward.chunk_bytes, a);
    CHECK_EQ(r[0].pairs, 67 * 68 / 2);
    CHECK_EQ(r[2].forward.flops, 2 * (5 + 3) * 4 * r[2].pairs);
    CHECK_EQ(r[1].resident_bytes, 67 * (4 * (5 * f32 + 3 * f32 + 4) + row_k + row_v));
    ra_plan_destroy(plan);
}

/* -------------------------------------------------------------------------- brute force */
/* Where interval bounds over the rows of a tile say exactly what its (query, key) pairs say. */
static int bounds_are_exact(int m) {
    return m == M_NONE || m == M_CAUSAL || m == M_WINDOW || m == M_LEFT || m == M_RIGHT ||
           m == M_BOTH || m == M_PREFIX || m == M_PREFIX_WINDOW || m == M_BLOCK || m == M_DOCS ||
           m == M_DOCS_CAUSAL || m == M_DOCS_PREFIX;
}

typedef struct tiles { int64_t empty, partial, full, pairs; } tiles;

/* Tiles of the rows from `row` on (at most 64, of one run) with those of a key block. */
static void count_tile(const problem *p, const int32_t *q, int64_t nq, const int32_t *k, int64_t nk,
                       tiles *t) {
    int64_t j, seen = 0;
    for (int64_t i = 0; i < nq; i++) for (j = 0; j < nk; j++) seen += visible(&p->mask, q[i], k[j]);
    t->pairs += seen;
    if (seen == 0) t->empty += p->Hq;
    else if (seen == nq * nk) t->full += p->Hq;
    else t->partial += p->Hq;
}

/* Rows of a block from row i on: up to 64, as long as positions step evenly. */
static int64_t block_rows(const int32_t *pos, int64_t i, int64_t n) {
    int64_t j = i + 1;
    while (j < n && j - i < 64 && pos[j] - pos[j - 1] == pos[i + 1] - pos[i]) j++;
    return j - i;
}

static tiles rank_tiles(const world *w, int rank) {
    const problem *p = w->p;
    const seat *q = &w->seats[rank], *k;
    tiles t = { 0, 0, 0, 0 };
    int64_t nq, nk;
    for (int b = 0; b < p->B; b++) for (int64_t i = 0; i < q->q_len[b]; i += nq) {
        const int32_t *qp = q->q_pos + b * q->q_rows;
        nq = block_rows(qp, i, q->q_len[b]);
        for (int other = 0; other < w->s->ranks; other++) {
            k = &w->seats[other];
            for (int64_t j = 0; j < k->k_len[b]; j += nk) {
                const int32_t *kp = k->k_pos + b * k->k_rows;
                nk = block_rows(kp, j, k->k_len[b]);
                count_tile(p, qp + i, nq, kp + j, nk, &t);
            }
        }
    }
    return t;
}

static void world_close(world *w) {
    for (int rank = 0; rank < w->s->ranks; rank++) part_free(&w->seats[rank]);
}

/* Every mask on the grid, contiguous, zigzag and striped: tiles by class, (query, key) pairs,
 * flops. */
TEST(tiles_by_brute_force) {
    static world w;
    for (int64_t index = 0; index < 3 * MASKS; index++) {
        int m = (int)(index % MASKS), rank;
        h_rng r = h_case_rng(index);
        problem p;
        setup s = { 0 };
        ra_plan *plan = NULL;
        if (!h_case(index)) continue;
        problem_shape(&p, h_range(&r, 380, 450), 2, 1, 4, 4);
        p.B = (int32_t)h_range(&r, 1, 2);
        p.tq[1] = p.tk[1] = p.q_max;
        problem_mask(&p, &r, m);
        problem_data(&p, &r);
        s.ranks = (int32_t)h_range(&r, 1, 3);          /* at least 2 blocks per rank: on the grid */
        s.layout = RA_LAYOUT_CONTIGUOUS + (int32_t)(index / MASKS);
        s.chunk_tokens = (int32_t)h_range(&r, 1, 200);
        describe_case(&p, &s);
        if (CHECK_EQ(world_open(&w, &p, &s), RA_OK) &&
            CHECK_EQ(ra_plan_create(&plan, &w.seats[0].d, NULL), RA_OK)) {
            for (rank = 0; rank < s.ranks; rank++) {
                tiles t = rank_tiles(&w, rank);
                ra_plan_report g;
                CHECK_EQ(ra_plan_query(plan, rank, &g), RA_OK);
                CHECK_EQ(g.pairs, t.pairs);
                CHECK_EQ(g.forward.flops, 2 * (p.Dk + p.Dv) * p.Hq * t.pairs);
                CHECK_EQ(g.forward.tiles_empty + g.forward.tiles_partial + g.forward.tiles_full,
                         t.empty + t.partial + t.full);
                CHECK(g.forward.tiles_empty <= t.empty);
                CHECK(g.forward.tiles_full <= t.full);
                if (bounds_are_exact(m) && s.layout != RA_LAYOUT_STRIPED) {
                    CHECK_EQ(g.forward.tiles_empty, t.empty);
                    CHECK_EQ(g.forward.tiles_full, t.full);
                }
            }
        }
        ra_plan_destroy(plan);
        world_close(&w);
        problem_free(&p);
    }
}

/* (query, key) pairs of RUNS with absent keys, and of sequences of different lengths. */
TEST(pairs_by_brute_force) {
    static world w;
    wish wanted = { ANY, L_CONTIGUOUS, ANY, 0, 2e5 };
    for (int64_t index = 0; index < 60; index++) {
        static const int layouts[4] = { L_RUNS, L_CONTIGUOUS_W, L_ZIGZAG_W, L_STRIPED };
        h_rng r = h_case_rng(index);
        problem p;
        setup s;
        ra_plan *plan = NULL;
        if (!h_case(index)) continue;
        wanted.layout = layouts[index % 4];
        random_problem(&p, &r, &wanted);
        random_setup(&s, &p, &r, &wanted);
        problem_data(&p, &r);
        describe_case(&p, &s);
        if (CHECK_EQ(world_open(&w, &p, &s), RA_OK) &&
            CHECK_EQ(ra_plan_create(&plan, &w.seats[0].d, NULL), RA_OK)) {
            for (int rank = 0; rank < s.ranks; rank++) {
                ra_plan_report g;
                CHECK_EQ(ra_plan_query(plan, rank, &g), RA_OK);
                CHECK_EQ(g.pairs, rank_tiles(&w, rank).pairs);
            }
        }
        ra_plan_destroy(plan);
        world_close(&w);
        setup_free(&s);
        problem_free(&p);
    }
}

/* -------------------------------------------------------------------------- against runs */
static void check_counters(const setup *s, const outcome *o) {
    int shared = s->wire == WIRE_SHARED;
    int64_t in = 0, out = 0;
    for (int rank = 0; rank < s->ranks; rank++) {
        const ra_plan_report *r = &o->report[rank];
        const ra_ring_counters *c = &o->counters[rank];
        CHECK_EQ(c->tiles_empty, r->forward.tiles_empty);
        CHECK_EQ(c->tiles_partial, r->forward.tiles_partial);
        CHECK_EQ(c->tiles_full, r->forward.tiles_full);
        CHECK_EQ(c->tiles_all, r->forward.tiles_partial + r->forward.tiles_full);
        if (s->ranks > 1) {
            CHECK_EQ(c->bytes_in, shared ? r->forward.shared_bytes_in : r->forward.bytes_in);
            CHECK_EQ(c->bytes_out, shared ? r->forward.shared_bytes_out : r->forward.bytes_out);
        }
        CHECK_EQ(c->chunks_in, r->forward.chunks_in);
        CHECK_EQ(c->chunks_out, r->forward.chunks_out);
        CHECK_EQ(c->state, RA_RING_IDLE);
        CHECK(c->peak_bytes > 0);
        CHECK(c->peak_bytes <= (shared ? r->shared_workspace_bytes : r->workspace_bytes));
        in += c->bytes_in;
        out += c->bytes_out;
    }
    CHECK_EQ(in, out);
}

/* A run counts what the plan reports, in a workspace exactly as small as it reports. The plans of
 * all ranks report the same about every rank. */
TEST(counters_of_random_runs) {
    wish w = { ANY, ANY, ANY, ANY, 3e5 };
    int64_t n = h_run.large ? 5000 : 150;
    for (int64_t i = 0; i < n; i++) {
        h_rng r = h_case_rng(i);
        problem p;
        setup s;
        outcome o;
        ra_plan *plan = NULL;
        ra_desc d;
        if (!h_case(i)) continue;
        random_problem(&p, &r, &w);
        random_setup(&s, &p, &r, &w);
        problem_data(&p, &r);
        s.call = (int32_t)h_range(&r, CALL_FORWARD, CALL_JOIN);
        s.threads = s.call >= CALL_STEP ? (int32_t)h_range(&r, 1, 3) : 0;
        s.exact = 1;
        describe_case(&p, &s);
        o = world_run(&p, &s);
        if (outcome_whole(&o)) {
            check_counters(&s, &o);
            d = rank_desc(&p, &s, (int)h_range(&r, 0, s.ranks - 1));
            CHECK_EQ(ra_plan_create(&plan, &d, NULL), RA_OK);
            for (int rank = 0; plan && rank < s.ranks; rank++) {
                ra_plan_report g;
                CHECK_EQ(ra_plan_query(plan, rank, &g), RA_OK);
                CHECK_BITS(&g, &o.report[rank], sizeof g);
            }
            ra_plan_destroy(plan);
        }
        outcome_free(&o);
        setup_free(&s);
        problem_free(&p);
    }
}

/* -------------------------------------------------------------------------- lists of runs */
/* Packed documents of `length` tokens, each cut over 8 ranks like ZIGZAG. sorted: a rank lists the
 * front pieces of all documents first, then the back pieces. */
typedef struct packed {
    int64_t *first;
    ra_run *runs;
    int32_t count[8];
    ra_desc d;
} packed;

static void packed_make(packed *x, int docs, int64_t length, int sorted, int train) {
    int64_t piece = length / 16, n = 0;
    memset(x, 0, sizeof *x);
    x->d = ra_desc_make(1, 1, 16, RA_F32, RA_MASK_CAUSAL);
    x->first = (int64_t *)malloc((size_t)docs * sizeof *x->first);
    x->runs = (ra_run *)malloc((size_t)docs * 16 * sizeof *x->runs);
    for (int i = 0; i < docs; i++) x->first[i] = i * length;
    for (int rank = 0; rank < 8; rank++) {
        x->count[rank] = 2 * docs;
        for (int i = 0; i < 2 * docs; i++, n++) {
            int back = sorted ? i >= docs : i % 2, doc = sorted ? i % docs : i / 2;
            x->runs[n].first = x->first[doc] + piece * (back ? 15 - rank : rank);
            x->runs[n].count = piece;
            x->runs[n].stride = 1;
        }
    }
    x->d.ranks = 8;
    x->d.tokens = docs * length;
    x->d.mask.doc_first = x->first;
    x->d.mask.doc_count = docs;
    x->d.layout.kind = RA_LAYOUT_RUNS;
    x->d.layout.q_runs = x->runs;
    x->d.layout.q_run_count = x->count;
    x->d.train = train;
}

static void packed_free(packed *x) {
    free(x->first);
    free(x->runs);
}

/* As few messages as if the shards were CONTIGUOUS. If pieces that the same ranks need are
 * adjacent, each travels as far as those of ZIGZAG: 3P(P-1)/4 shards in all. Lookups grow no faster
 * than n log n with the number of documents. */
TEST(packed_documents) {
    enum { LENGTH = 1024 };
    int rank;
    for (int train = 0; train < 2; train++) for (int sorted = 0; sorted < 2; sorted++) {
        int64_t tokens = 0, seen[2] = { 0, 0 };
        for (int half = 1; half >= 0; half--) {
            const int docs = half ? 128 : 256;
            const int64_t most = docs * LENGTH / 8 / 4096;
            ra_plan *plan = NULL;
            packed x;
            packed_make(&x, docs, LENGTH, sorted, train);
            x.d.chunk_tokens = 4096;
            seen[half] = lookups();
            if (!CHECK_EQ(ra_plan_create(&plan, &x.d, NULL), RA_OK)) return;
            seen[half] = lookups() - seen[half];
            for (tokens = rank = 0; rank < 8; rank++) {
                ra_plan_report g;
                CHECK_EQ(ra_plan_query(plan, rank, &g), RA_OK);
                CHECK(g.forward.chunks_in <= 7 * most && g.forward.chunks_out <= 7 * most);
                CHECK(g.backward.chunks_in <= 8 * most && g.backward.chunks_out <= 8 * most);
                CHECK_EQ(g.forward.bits_any_ranks, 0);
                tokens += (g.forward.bytes_in - 64 * g.forward.chunks_in) / (2 * 16 * 4);
            }
            if (sorted) CHECK_EQ(4 * tokens, 3 * 8 * 7 * (docs * LENGTH / 8));
            ra_plan_destroy(plan);
            packed_free(&x);
        }
        CHECK(seen[1] > 0 && seen[0] <= 3 * seen[1]);
    }
}

/* A call on one rank walks its runs in order: for one token lookups are linear in runs, for many
 * they are linear in tiles. */
TEST(walks_are_linear) {
    enum { MOST = 8192, DIM = 4 };
    static ra_run runs[MOST];
    static float q[MOST * DIM], o[MOST * DIM];
    int64_t before, k;
    for (int nth = 1; nth <= 3; nth++) for (int64_t n = 64; n <= MOST; n *= 2) {
        ra_desc d = ra_desc_make(2, 2, DIM / 2, RA_F32, RA_MASK_NONE);
        ra_tensors t = { 0 };
        void *memory;
        size_t bytes;
        int many = n <= 512;           /* queries too */
        for (int64_t i = 0; i < n; i++) {
            runs[i].first = i * 3 * RA_BLOCK_TOKENS;
            runs[i].count = 1;
            runs[i].stride = 7;
        }
        d.tokens = many ? n : 1;
        d.kv_tokens = n;
        t.q.data = t.k.data = t.v.data = q;
        t.o.data = o;
        t.k_pos.runs = runs;
        t.k_pos.count = n;
        if (many) t.q_pos = t.k_pos;
        bytes = ra_attention_bytes(&d, nth);
        if (!CHECK_EQ(posix_memalign(&memory, 64, bytes + 1), 0)) return;
        before = lookups();
        for (int ith = 0; ith < nth; ith++)
            CHECK_EQ(ra_attention(&d, &t, memory, bytes, ith, nth), RA_OK);
        k = many ? n * n : n;
        CHECK(2 * (lookups() - before) >= n && lookups() - before <= 12 * nth * k);
        free(memory);
    }
    CHECK_EQ(hook_broken, 0);
}

/* Positions of a run. */
static int run_has(const ra_run *run, int64_t p) {
    int64_t at = p - run->first;
    return at >= 0 && at % run->stride == 0 && at / run->stride < run->count;
}

/* The first position that two runs share, as the refusal of a layout names it; -1: none. */
static int64_t runs_meet(const ra_run *a, const ra_run *b) {
    static const int32_t count[2] = { 1, 1 };
    ra_run run[2];
    ra_error e = { 0 };
    ra_desc d = ra_desc_make(1, 1, 1, RA_F32, RA_MASK_CAUSAL);
    run[0] = *a;
    run[1] = *b;
    d.ranks = 2;
    d.tokens = RA_MAX_POSITION;
    d.layout.kind = RA_LAYOUT_RUNS;
    d.layout.q_runs = run;
    d.layout.q_run_count = count;
    d.error = &e;
    const ra_status s = ra_desc_resolve(&d, &d);
    if (s == RA_OK || !CHECK_EQ(s, RA_E_POSITIONS)) return -1;
    return strtoll(e.text + strcspn(e.text, "0123456789"), NULL, 10);
}

TEST(runs_with_common_positions) {
    ra_run far[2] = { { 5, 2, 1 << 30 }, { 6, 2, (1 << 30) - 1 } };
    int64_t p;
    for (int64_t i = 0; i < 20000; i++) {
        h_rng r = h_case_rng(i);
        ra_run run[2];
        if (!h_case(i)) continue;
        for (int k = 0; k < 2; k++) {
            const int wide = i % 8 == 0;   /* beyond a window of bits */
            run[k].first = h_range(&r, 0, wide ? 300 : 60);
            run[k].stride = h_range(&r, 1, i % 2 ? 40 : wide ? 3 : 6);
            run[k].count = h_range(&r, 1, wide ? 200000 : 20);
        }
        for (p = run[0].first; run_has(&run[0], p) && !run_has(&run[1], p);) p += run[0].stride;
        CHECK_EQ(runs_meet(&run[0], &run[1]), run_has(&run[0], p) ? p : -1);
        CHECK_EQ(runs_meet(&run[1], &run[0]), run_has(&run[0], p) ? p : -1);
    }
    CHECK_EQ(runs_meet(&far[0], &far[1]), 5 + (1 << 30));
    far[1].stride--;
    CHECK_EQ(runs_meet(&far[0], &far[1]), -1);
}

/* A table of runs is refused if and only if it has a position twice, and the sentence names one. */
TEST(positions_held_twice) {
    int refused = 0;
    for (int64_t i = 0; i < 400; i++) {
        h_rng r = h_case_rng(i);
        ra_run run[40];
        uint8_t held[400];
        int32_t count[4] = { 0, 0, 0, 0 };
        ra_error e;
        ra_desc d = ra_desc_make(1, 1, 1, RA_F32, RA_MASK_CAUSAL);
        int n = (int)h_range(&r, 1, i % 4 ? 6 : 40), twice = 0, k;
        int64_t j, p;
        if (!h_case(i)) continue;
        memset(held, 0, sizeof held);
        for (k = 0; k < n; k++) {
            run[k].first = h_range(&r, 0, 299);
            run[k].count = h_range(&r, 1, 8);
            run[k].stride = h_range(&r, 1, 12);
            count[h_range(&r, 0, 3)]++;
            for (j = 0; j < run[k].count; j++) twice |= held[run[k].first + j * run[k].stride]++;
        }
        d.ranks = 4;
        d.tokens = 400;
        d.layout.kind = RA_LAYOUT_RUNS;
        d.layout.q_runs = run;
        d.layout.q_run_count = count;
        d.error = &e;
        CHECK_EQ(ra_desc_resolve(&d, &d), twice ? RA_E_POSITIONS : RA_OK);
        refused += twice;
        if (!twice) continue;
        for (p = 0; e.text[p] && (e.text[p] < '0' || e.text[p] > '9'); p++) {}
        p = strtoll(e.text + p, NULL, 10);
        CHECK(p >= 0 && p < 400 && held[p] > 1);
    }
    if (h_run.only_case < 0) CHECK(refused > 100 && refused < 390);
}

/* The same in a table with more runs than are sorted at once, in any order. One more run, at any
 * place, holds a position of one of the others or of none. */
TEST(positions_held_twice_among_many) {
    enum { MANY = 5000 };
    static ra_run run[MANY + 1];
    for (int64_t i = 0; i < 40; i++) {
        h_rng r = h_case_rng(i);
        int32_t count = MANY + 1;
        int64_t k, j, far = h_range(&r, 1, MANY - 1);
        ra_error e;
        ra_desc d = ra_desc_make(1, 1, 1, RA_F32, RA_MASK_CAUSAL), full;
        if (!h_case(i)) continue;
        for (k = 0; k < MANY; k++) {               /* the even positions of a hundred each */
            run[k].first = 100 * k;
            run[k].stride = 2;
            run[k].count = 50;
        }
        for (k = MANY - 1; k > 0; k--) {
            ra_run x = run[k];
            j = h_range(&r, 0, k);
            run[k] = run[j];
            run[j] = x;
        }
        run[MANY].first = 2 * h_range(&r, 0, 10) + 1;  /* odd, and a position of a late run */
        run[MANY].count = 2;
        run[MANY].stride = 100 * far + (i % 2 ? 50 : 51) - run[MANY].first;
        j = h_range(&r, 0, MANY);
        {
            ra_run x = run[j];
            run[j] = run[MANY];
            run[MANY] = x;
        }
        d.tokens = 100 * MANY + 1000;
        d.layout.kind = RA_LAYOUT_RUNS;
        d.layout.q_runs = run;
        d.layout.q_run_count = &count;
        d.error = &e;
        CHECK_EQ(ra_desc_resolve(&d, &full), i % 2 ? RA_E_POSITIONS : RA_OK);
    }
}

/* -------------------------------------------------------------------------- layouts */
/* The rules of ra_layout that say exactly which positions a rank holds. */
TEST(positions_of_layouts) {
    static world w;
    problem p;
    setup s = { 0 };
    h_rng r = h_case_rng(0);
    int64_t i;
    static const int32_t weights[4] = { 1, 0, 4, 3 };  /* of 8 blocks */
    static const int64_t firsts[4] = { 0, 64, 64, 320 }, counts[4] = { 64, 0, 256, 180 };
    problem_shape(&p, 500, 1, 1, 4, 4);
    p.q_offset = 7;
    p.tk[0] = p.k_max = 507;
    problem_data(&p, &r);
    s.ranks = 4;
    s.layout = RA_LAYOUT_STRIPED;
    CHECK_EQ(world_open(&w, &p, &s), RA_OK);
    for (int64_t rank = 0; rank < 4; rank++) {
        CHECK_EQ(w.seats[rank].q_rows, 125);
        CHECK_EQ(w.seats[rank].k_rows, rank < 3 ? 127 : 126);
        for (i = 0; i < 125; i++) CHECK_EQ(w.seats[rank].q_pos[i], 7 + rank + 4 * i);
        for (i = 0; i < 126; i++) CHECK_EQ(w.seats[rank].k_pos[i], rank + 4 * i);
    }
    world_close(&w);
    s.layout = RA_LAYOUT_CONTIGUOUS;
    s.weighted = 1;
    memcpy(s.weights, weights, sizeof weights);
    CHECK_EQ(world_open(&w, &p, &s), RA_OK);
    for (int64_t rank = 0; rank < 4; rank++) {
        CHECK_EQ(w.seats[rank].q_rows, counts[rank]);
        for (i = 0; i < counts[rank]; i++) CHECK_EQ(w.seats[rank].q_pos[i], 7 + firsts[rank] + i);
        CHECK_EQ(w.seats[rank].k_rows, counts[rank] + (rank == 3 ? 7 : 0));
    }
    world_close(&w);
    s.layout = RA_LAYOUT_ZIGZAG;
    s.weighted = 0;                                    /* 8 blocks: pairs {0,7} {1,6} {2,5} {3,4} */
    CHECK_EQ(world_open(&w, &p, &s), RA_OK);
    for (int64_t rank = 0; rank < 4; rank++) {
        int64_t back = 7 + 64 * (7 - rank), n = rank ? 128 : 64 + 500 - 448;
        CHECK_EQ(w.seats[rank].q_rows, n);
        for (i = 0; i < 64; i++) CHECK_EQ(w.seats[rank].q_pos[i], 7 + 64 * rank + i);
        for (i = 64; i < n; i++) CHECK_EQ(w.seats[rank].q_pos[i], back + i - 64);
    }
    world_close(&w);
    problem_free(&p);
}

/* -------------------------------------------------------------------------- prediction */

static ra_prediction predicted(const ra_plan *plan, int rank, double flops, double bytes,
                               double latency) {
    ra_rates rates;
    ra_prediction out = { 0 };
    rates.flops_per_s = flops;
    rates.link_bytes_per_s = bytes;
    rates.link_latency_s = latency;
    CHECK_EQ(ra_plan_predict(plan, rank, &rates, &out), RA_OK);
    return out;
}

static int near(double a, double b) { return fabs(a - b) <= 1e-9 * (fabs(a) + fabs(b)) + 1e-15; }

/* No mask, 4 ranks of one chunk each: every rank computes 4 equal pieces of W seconds, and a chunk
 * takes X seconds per hop. In ascending order rank r folds 0, 1, 2, 3, and the chunk of rank 0
 * reaches rank 3 after 3 X. */
TEST(prediction_by_hand) {
    problem p;
    setup s;
    ra_plan *plan = NULL;
    ra_desc d;
    shape_for_hops(&p, &s, 4096, 4, RA_LAYOUT_CONTIGUOUS);
    p.mask.kind = RA_MASK_NONE;
    d = rank_desc(&p, &s, 0);
    d.chunk_tokens = 1024;
    d.buffers = 3;
    if (!CHECK_EQ(ra_plan_create(&plan, &d, NULL), RA_OK)) return;
    for (int rank = 0; rank < 4; rank++) {
        ra_plan_report r;
        ra_prediction slow, fast, late;
        double w, x;
        CHECK_EQ(ra_plan_query(plan, rank, &r), RA_OK);
        w = (double)r.forward.flops / 4 / 1e12;
        x = (double)r.forward.chunk_bytes / 1e9;
        fast = predicted(plan, rank, 1e12, 1e30, 0);       /* the network costs nothing */
        CHECK(near(fast.compute_s, 4 * w) && near(fast.done_s, 4 * w) && fast.wait_s < 1e-12);
        CHECK(near(fast.all_done_s, 4 * w));
        slow = predicted(plan, rank, 1e30, 1e9, 0);        /* computing costs nothing */
        CHECK(near(slow.transfer_s, 3 * x));
        CHECK(near(slow.done_s, slow.wait_s) && slow.hidden_s < 1e-9 * x);
        CHECK(slow.all_done_s >= 3 * x * (1 - 1e-9));
        late = predicted(plan, rank, 1e12, 1e30, 1e-3);    /* only latency */
        CHECK(near(late.transfer_s, 3e-3));
        if (rank == 3) CHECK(near(late.wait_s + late.compute_s, late.done_s));
        CHECK(near(late.hidden_s + fmin(late.wait_s, late.transfer_s), late.transfer_s));
    }
    ra_plan_destroy(plan);
}

/* Chunks that come to a rank after its last tile, only to be sent on, are not hidden. */
TEST(predicted_hiding_is_computing) {
    problem p;
    setup s;
    ra_plan *plan = NULL;
    ra_desc d;
    shape_for_hops(&p, &s, 16384, 64, RA_LAYOUT_ZIGZAG);
    d = rank_desc(&p, &s, 0);
    d.mask.window = 300;
    d.chunk_tokens = 128;
    if (!CHECK_EQ(ra_plan_create(&plan, &d, NULL), RA_OK)) return;
    for (int rank = 0; rank < 64; rank++) {
        ra_prediction r = predicted(plan, rank, 1e13, 1e8, 0);
        CHECK(r.compute_s > 0 && r.transfer_s > 10 * r.compute_s);
        CHECK(r.hidden_s <= r.compute_s);
    }
    ra_plan_destroy(plan);
}

/* How much of the shorter of computing and transfer is hidden, over all ranks, when the busiest
 * link takes as long as the busiest rank; and the same with any number of buffers. */
typedef struct overlap { double hidden, bound, pass, compute; } overlap;
static overlap overlap_of(const ra_plan *plan, int ranks, double latency) {
    ra_prediction with, without;
    overlap x = { 0, 0, 0, 0 };
    double rate = 0, less;
    for (int rank = 0; rank < ranks; rank++) {
        ra_prediction r = predicted(plan, rank, 1e12, 1e9, 0);
        x.compute = fmax(x.compute, r.compute_s);
        rate = fmax(rate, r.transfer_s * 1e9);
    }
    rate /= x.compute;
    with = predicted(plan, 0, 1e12, rate, latency);
    without = predicted(plan, 0, 1e300, rate, latency);
    less = fmin(x.compute, without.all_done_s);
    x.hidden = (x.compute + without.all_done_s - with.all_done_s) / less;
    x.bound = (x.compute + without.bound_s - with.bound_s) / less;
    x.pass = with.all_done_s;
    CHECK(with.bound_s <= with.all_done_s && with.bound_s >= x.compute * (1 - 1e-9));
    return x;
}

static double predicted_at(const ra_plan *plan, const ra_rates *r) {
    return predicted(plan, 0, r->flops_per_s, r->link_bytes_per_s, r->link_latency_s).all_done_s;
}

static ra_plan *overlap_plan(int ranks, int64_t shard, int causal, int layout, int order, int chunk,
                             const ra_rates *rates) {
    ra_plan *plan = NULL;
    ra_desc d = ra_desc_make(32, 8, 128, RA_BF16, causal ? RA_MASK_CAUSAL : RA_MASK_NONE);
    d.ranks = ranks;
    d.tokens = shard * ranks;
    d.layout.kind = layout;
    d.order = order;
    d.chunk_tokens = chunk;
    if (rates) d.rates = *rates;
    CHECK_EQ(ra_plan_create(&plan, &d, NULL), RA_OK);
    return plan;
}

/* Default chunks and buffers, when the transfer takes as long as computing: causal rings hide 85 %
 * of it, for shards of any length. Two ranks buffer at most half of a shard. Without a mask the
 * order of keys leaves the last rank its own keys, 1 / ranks of all, to compute after all messages
 * have come: a pass takes at most 6 % longer than that. */
TEST(default_chunks_hide_transfers) {
    for (int i = 0; i < 4 * 9; i++) {
        const int ranks = i % 4 == 3 ? 8 : 2 + i % 4;
        const int64_t shard = (int64_t)1024 << i / 4;
        ra_plan *causal = overlap_plan(ranks, shard, 1, RA_LAYOUT_ZIGZAG, 0, 0, NULL);
        ra_plan *late = overlap_plan(ranks, shard, 1, RA_LAYOUT_CONTIGUOUS, 0, 0, NULL);
        ra_plan *full = overlap_plan(ranks, shard, 0, RA_LAYOUT_CONTIGUOUS, 0, 0, NULL);
        const overlap zigzag = overlap_of(causal, ranks, 0), whole = overlap_of(full, ranks, 0);
        const overlap straight = overlap_of(late, ranks, 0);
        ra_plan_report r;
        CHECK_EQ(ra_plan_query(causal, 0, &r), RA_OK);
        h_context("%d ranks, %lld rows each: %.3f, %.3f, %.3f; " "%d of %d", ranks,
                  (long long)shard, zigzag.hidden, straight.hidden, whole.hidden, r.buffers,
                  r.chunk_tokens);
        if (h_run.verbose) printf("%s\n", h_run.context);
        CHECK(zigzag.hidden >= 0.85);
        CHECK(straight.hidden >= 0.85 || shard < 2048);
        CHECK(r.buffers * r.chunk_tokens <= (shard / 2 > 8192 ? shard / 2 : 8192));
        CHECK(whole.hidden <= whole.bound * 1.01 || ranks > 2);
        if (shard >= 2048 && shard <= 16384)
            CHECK(whole.pass <= 1.06 * whole.compute * (1 + 1.0 / ranks));
        ra_plan_destroy(causal);
        ra_plan_destroy(late);
        ra_plan_destroy(full);
    }
}

/* The same in rounds, with or without a mask, for any number of ranks. No rank waits for a link
 * that begins late: alone, the transfer takes as long as the bytes of the busiest link, plus one
 * message per rank. */
TEST(rounds_hide_transfers) {
    static const int worlds[5] = { 2, 3, 4, 8, 16 };
    for (int i = 0; i < 5 * 7 * 2; i++) {
        int64_t left = i;
        const int ranks = worlds[h_pick(&left, 5)];
        const int64_t shard = (int64_t)1024 << h_pick(&left, 7);
        const int causal = (int)left;
        ra_plan *plan = overlap_plan(ranks, shard, causal,
                                     causal ? RA_LAYOUT_ZIGZAG : RA_LAYOUT_CONTIGUOUS,
                                     RA_ORDER_ROUNDS, 0, NULL);
        const overlap x = overlap_of(plan, ranks, 0);
        const ra_prediction alone = predicted(plan, 0, 1e300, 1e9, 0);
        ra_plan_report r;
        double link = 0;
        for (int rank = 0; rank < ranks; rank++)
            link = fmax(link, predicted(plan, rank, 1e300, 1e9, 0).transfer_s);
        CHECK_EQ(ra_plan_query(plan, 0, &r), RA_OK);
        h_context("%d ranks, %lld rows each, causal %d: %.3f", ranks, (long long)shard, causal,
                  x.hidden);
        if (h_run.verbose) printf("%s\n", h_run.context);
        CHECK(x.hidden >= 0.85);
        CHECK(alone.all_done_s <= link + ranks * (double)r.forward.chunk_bytes / 1e9);
        CHECK_EQ(r.order, RA_ORDER_ROUNDS);
        CHECK_EQ(r.forward.bits_any_ranks, 0);
        ra_plan_destroy(plan);
    }
}

/* A known network: messages take at least two latencies, short shards have eight, and there are
 * three buffers if the link is twice as fast as computing. Nothing else depends on it. */
TEST(rates_choose_chunks) {
    const ra_rates slow = { 1e12, 5e8, 2e-3 }, fast = { 1e12, 1e10, 1e-6 };
    for (int i = 0; i < 3; i++) {
        ra_plan *plan = overlap_plan(4, 1024, 1, RA_LAYOUT_ZIGZAG, 0, 0,
                                     i == 0 ? NULL : i == 1 ? &slow : &fast);
        ra_plan_report r;
        CHECK_EQ(ra_plan_query(plan, 0, &r), RA_OK);
        CHECK_EQ(r.chunk_tokens, i == 0 ? 256 : i == 1 ? 512 : 128);
        CHECK_EQ(r.buffers, i == 0 ? 6 : i == 1 ? 4 : 3);
        ra_plan_destroy(plan);
    }
    for (int i = 0; i < 2; i++) {      /* ranks without any keys */
        static const int64_t q_rows[4] = { 5, 5, 5, 5 }, k_rows[4] = { 0, 0, 0, 0 };
        ra_desc d = ra_desc_make(1, 1, 8, RA_F32, RA_MASK_NONE), out;
        d.ranks = 4;
        d.tokens = d.kv_tokens = 20;
        d.layout.kind = RA_LAYOUT_ARRAY;
        d.layout.q_rows = q_rows;
        d.layout.k_rows = k_rows;
        d.rates = fast;
        d.rates.link_latency_s = i ? 1e-15 : 0;
        CHECK_EQ(ra_desc_resolve(&d, &out), RA_OK);
        CHECK(out.chunk_tokens >= RA_BLOCK_TOKENS && out.buffers >= 1);
    }
}

/* Short shards on four networks: a message takes 5 us or 2 ms plus its bytes, and the bytes alone
 * take as long as computing or a tenth of it. The worst time relative to the best chunk: with known
 * rates, with the default, and with the one chunk that suits all four networks best. */
typedef struct short_shard { double known, unknown, one; } short_shard;
static short_shard short_shard_of(int ranks, int64_t shard, int causal) {
    const int layout = causal ? RA_LAYOUT_ZIGZAG : RA_LAYOUT_CONTIGUOUS;
    short_shard x = { 1, 1, 1e30 };
    double one[5] = { 1, 1, 1, 1, 1 };
    ra_plan *none = overlap_plan(ranks, shard, causal, layout, 0, 0, NULL);
    const ra_prediction plain = predicted(none, 0, 1e12, 1e9, 0);
    for (int k = 0; k < 4; k++) {
        ra_rates rates = { 1e12, 0, k & 1 ? 2e-3 : 5e-6 };
        double pass[5], best = 1e30;
        rates.link_bytes_per_s = plain.transfer_s * 1e9 / plain.compute_s * (k & 2 ? 10 : 1);
        ra_plan *told = overlap_plan(ranks, shard, causal, layout, 0, 0, &rates);
        for (int c = 0; c < 5; c++) {
            ra_plan *plan = overlap_plan(ranks, shard, causal, layout, 0, 64 << c, NULL);
            pass[c] = predicted_at(plan, &rates);
            best = fmin(best, pass[c]);
            ra_plan_destroy(plan);
        }
        for (int c = 0; c < 5; c++) one[c] = fmax(one[c], pass[c] / best);
        x.known = fmax(x.known, predicted_at(told, &rates) / best);
        x.unknown = fmax(x.unknown, predicted_at(none, &rates) / best);
        ra_plan_destroy(told);
    }
    for (int c = 0; c < 5; c++) x.one = fmin(x.one, one[c]);
    ra_plan_destroy(none);
    return x;
}

/* Messages chosen by rates are within a quarter of the best on all networks. No single chunk is. */
TEST(rates_serve_short_shards) {
    double one = 1;
    for (int i = 0; i < 3 * 3 * 2; i++) {
        int64_t left = i;
        const int ranks = 2 << h_pick(&left, 3), shard = 256 << h_pick(&left, 3);
        const int causal = (int)left;
        const short_shard x = short_shard_of(ranks, shard, causal);
        h_context("%d ranks, %d rows each, causal %d: known "
                  "rates %.2f, default %.2f, one chunk %.2f",
                  ranks, shard, causal, x.known, x.unknown, x.one);
        if (h_run.verbose) printf("%s\n", h_run.context);
        CHECK(x.known <= 1.2 && x.unknown <= 1.96);
        one = fmax(one, x.one);
    }
    CHECK(one > 1.5);
}

/* A causal contiguous ring: rank 0 has the least to do, and the last rank determines the end. */
TEST(prediction_of_imbalance) {
    problem p;
    setup s;
    ra_plan *plan = NULL;
    ra_desc d;
    double before = 0, last = 0;
    shape_for_hops(&p, &s, 8192, 8, RA_LAYOUT_CONTIGUOUS);
    p.mask.kind = RA_MASK_CAUSAL;
    d = rank_desc(&p, &s, 0);
    if (!CHECK_EQ(ra_plan_create(&plan, &d, NULL), RA_OK)) return;
    for (int rank = 0; rank < 8; rank++) {
        ra_prediction x = predicted(plan, rank, 1e11, 1e30, 0);
        CHECK(x.compute_s > before);
        before = x.compute_s;
        last = x.all_done_s;
    }
    CHECK(near(last, before));         /* nothing keeps the last rank waiting */
    ra_plan_destroy(plan);
}

/* -------------------------------------------------------------------------- memory */
/* Exactly the workspace that the plan reports is enough, and a byte less is not, aligned to 64; for
 * copying and for shared transports. */
TEST(workspace_to_the_byte) {
    wish w = { ANY, ANY, ANY, ANY, 2e5 };
    for (int64_t i = 0; i < 60; i++) {
        h_rng r = h_case_rng(i);
        problem p;
        setup s;
        mail_net *network;
        ra_world *shared = NULL;
        ra_world_desc wd = { 0 };
        ra_transport t;
        ra_plan *plan = NULL;
        ra_plan_report g;
        ra_desc d;
        if (!h_case(i)) continue;
        random_problem(&p, &r, &w);
        random_setup(&s, &p, &r, &w);
        describe_case(&p, &s);
        d = rank_desc(&p, &s, (int)h_range(&r, 0, s.ranks - 1));
        if (s.ranks == 1) d.train = 1;
        wd.ranks = s.ranks;
        s.wire = WIRE_POST;
        network = setup_network(&s);
        t = mail_transport(network, d.rank);
        CHECK_EQ(ra_world_create(&shared, &wd), RA_OK);
        CHECK_EQ(ra_plan_create(&plan, &d, NULL), RA_OK);
        if (!plan || ra_plan_query(plan, d.rank, &g) != RA_OK) continue;
        if (s.ranks == 1) CHECK_EQ(g.shared_workspace_bytes, g.workspace_bytes);
        for (int kind = 0; kind < 2; kind++) {
            const ra_transport *any = kind ? ra_world_transport(shared, d.rank) : &t;
            const ra_transport *by = s.ranks > 1 ? any : NULL;
            size_t bytes = (size_t)(kind ? g.shared_workspace_bytes : g.workspace_bytes);
            uint8_t *raw = (uint8_t *)malloc(bytes + 64);
            ra_ring_desc rd = { 0 };
            ra_ring *ring = NULL;
            rd.workspace = raw + (64 - (uintptr_t)raw % 64) % 64;
            rd.workspace_bytes = bytes;
            CHECK_EQ(ra_ring_create(&ring, plan, by, &rd), RA_OK);
            CHECK_EQ(ra_ring_destroy(ring), RA_OK);
            ring = NULL;
            rd.workspace_bytes = bytes - 1;
            CHECK_EQ(ra_ring_create(&ring, plan, by, &rd), RA_E_WORKSPACE);
            CHECK(ring == NULL);
            rd.workspace_bytes = bytes;
            rd.workspace = (uint8_t *)rd.workspace + 16;
            CHECK_EQ(ra_ring_create(&ring, plan, by, &rd), RA_E_ALIGN);
            free(raw);
        }
        ra_plan_destroy(plan);
        ra_world_destroy(shared);
        mail_close(network);
        setup_free(&s);
        problem_free(&p);
    }
}

/* With fixed chunk_tokens a rank's memory beyond the state of its queries is a few chunks and does
 * not grow with the sequence. An f32 output holds the sums; then the state is only m and l. */
TEST(memory_is_a_few_chunks) {
    static const int64_t lengths[3] = { 32768, 65536, 131072 };
    for (int layout = RA_LAYOUT_CONTIGUOUS; layout <= RA_LAYOUT_STRIPED; layout++) {
        for (int f16 = 0; f16 < 2; f16++) {
            int64_t extra[3] = { 0, 0, 0 }, shared[3] = { 0, 0, 0 };
            for (int i = 0; i < 3; i++) {
                problem p;
                setup s = { 0 };
                ra_desc d;
                ra_plan *plan = NULL;
                ra_plan_report g;
                int64_t rows = lengths[i] / 4, state;
                problem_shape(&p, lengths[i], 4, 2, 64, 64);
                p.mask.kind = RA_MASK_CAUSAL;
                if (f16) p.o_dtype = RA_F16;
                s.ranks = 4;
                s.layout = layout;
                s.chunk_tokens = 256;
                describe_case(&p, &s);
                d = rank_desc(&p, &s, 1);
                if (!CHECK_EQ(ra_plan_create(&plan, &d, NULL), RA_OK)) continue;
                CHECK_EQ(ra_plan_query(plan, 1, &g), RA_OK);
                ra_plan_destroy(plan);
                state = rows * 4 * (f16 ? 2 + 64 : 2) * 4;
                CHECK(g.forward.state_bytes >= state && g.forward.state_bytes <= state + 4096);
                CHECK(g.forward.chunk_bytes <= 64 + 256 * 2 * (64 + 64) * 4);
                extra[i] = g.workspace_bytes - g.forward.state_bytes;
                shared[i] = g.shared_workspace_bytes - g.forward.state_bytes;
                CHECK(extra[i] <= (g.buffers + 4) * g.forward.chunk_bytes + 400000);
                CHECK(shared[i] <= extra[i]);
            }
            CHECK_EQ(extra[1], extra[0]);
            CHECK_EQ(extra[2], extra[0]);
            CHECK_EQ(shared[1], shared[0]);
            CHECK_EQ(shared[2], shared[0]);
        }
    }
}

/* An allocator that counts, checks sizes on free, and fails the n-th call if requested. */
typedef struct purse { int64_t calls, live, bytes, fail_at, wrong; } purse;

static void *purse_alloc(void *ctx, size_t bytes, size_t align) {
    purse *u = (purse *)ctx;
    uint8_t *raw, *at;
    if (++u->calls == u->fail_at) return NULL;
    raw = (uint8_t *)malloc(bytes + align + 64);
    at = raw + 32 + align - (uintptr_t)(raw + 32) % align;
    memcpy(at - 16, &bytes, sizeof bytes);
    memcpy(at - 8, &raw, sizeof raw);
    u->live++;
    u->bytes += (int64_t)bytes;
    return at;
}

static void purse_free(void *ctx, void *ptr, size_t bytes) {
    purse *u = (purse *)ctx;
    size_t was;
    void *raw;
    if (!ptr) return;
    memcpy(&was, (uint8_t *)ptr - 16, sizeof was);
    memcpy(&raw, (uint8_t *)ptr - 8, sizeof raw);
    u->wrong += was != bytes;
    u->live--;
    free(raw);
}

static ra_allocator purse_allocator(purse *u) {
    ra_allocator a;
    memset(u, 0, sizeof *u);
    a.alloc = purse_alloc;
    a.free = purse_free;
    a.ctx = u;
    return a;
}

/* A plan's memory grows with rows, even if a table has few rows at the end of a long sequence. */
TEST(few_rows_far_away) {
    static const int layouts[2] = { RA_LAYOUT_RUNS, RA_LAYOUT_ARRAY };
    for (int i = 0; i < 2; i++) {
        static const int32_t counts[2] = { 1, 1 };
        static const int64_t rows[2] = { 64, 64 };
        ra_run runs[2];
        ra_plan *plan = NULL;
        ra_plan_report g;
        purse u;
        ra_allocator a = purse_allocator(&u);
        ra_desc d = ra_desc_make(1, 1, 16, RA_F32, RA_MASK_CAUSAL);
        memset(runs, 0, sizeof runs);
        runs[0].first = RA_MAX_POSITION - 128;
        runs[1].first = RA_MAX_POSITION - 64;
        runs[0].count = runs[1].count = 64;
        d.ranks = 2;
        d.tokens = layouts[i] == RA_LAYOUT_RUNS ? RA_MAX_POSITION : 128;
        d.layout.kind = layouts[i];
        if (layouts[i] == RA_LAYOUT_RUNS) {
            d.layout.q_runs = runs;
            d.layout.q_run_count = counts;
        } else {
            d.layout.q_rows = d.layout.k_rows = rows;
        }
        CHECK_EQ(ra_plan_create(&plan, &d, &a), RA_OK);
        CHECK(u.bytes < 100000);
        CHECK_EQ(ra_plan_query(plan, 0, &g), RA_OK);
        CHECK(g.workspace_bytes < 1000000);
        ra_plan_destroy(plan);
    }
}

typedef struct counted { world w; purse purses[4]; int64_t before[4], after[4]; } counted;

/* A rank that notes what was allocated when its ring was created, and after its passes. */
static ra_status counted_rank(ra_world *library_world, int rank, void *user) {
    counted *c = (counted *)user;
    seat *e = &c->w.seats[rank];
    ra_allocator a = purse_allocator(&c->purses[rank]);
    ra_ring_desc rd = { 0 };
    rd.allocator = a;
    e->status = ra_plan_create(&e->plan, &e->d, &a);
    CHECK_EQ(c->purses[rank].calls, 1);
    if (e->status == RA_OK) {
        e->status = ra_ring_create(&e->ring, e->plan, ra_world_transport(library_world, rank), &rd);
    }
    c->before[rank] = c->purses[rank].calls;
    for (int pass = 0; pass < 3 && e->status == RA_OK; pass++) {
        e->status = ra_forward(e->plan, e->ring, &e->t, ra_deadline_ms(60000));
    }
    c->after[rank] = c->purses[rank].calls;
    ra_ring_destroy(e->ring);
    ra_plan_destroy(e->plan);
    return e->status;
}

/* After ra_ring_create nothing allocates, from the allocator or from malloc. With an allocator,
 * plan and ring never call malloc, and all memory is returned with its size. */
TEST(nothing_allocates_in_a_pass) {
    static counted c;
    problem p;
    setup s = { 0 };
    int64_t live = hook_blocks, calls;
    h_rng r = h_case_rng(0);
    ra_world_desc wd = { 0 };
    purse worlds;
    problem_shape(&p, 700, 4, 2, 16, 16);
    p.mask.kind = RA_MASK_CAUSAL;
    p.o_dtype = RA_BF16;
    problem_data(&p, &r);
    s.ranks = 4;
    s.layout = RA_LAYOUT_ZIGZAG;
    s.chunk_tokens = 64;
    memset(&c, 0, sizeof c);
    CHECK_EQ(world_open(&c.w, &p, &s), RA_OK);
    wd.allocator = purse_allocator(&worlds);
    calls = hook_allocations;
    CHECK(calls > 0);                  /* world_open has made a plan without an allocator */
    CHECK_EQ(ra_world_run(4, counted_rank, &c, &wd), RA_OK);
    CHECK_EQ(hook_allocations, calls);
    CHECK_EQ(worlds.live, 0);
    CHECK_EQ(worlds.wrong, 0);
    CHECK(worlds.calls > 0);
    for (int rank = 0; rank < 4; rank++) {
        CHECK(c.before[rank] >= 2);
        CHECK_EQ(c.after[rank], c.before[rank]);
        CHECK_EQ(c.purses[rank].live, 0);
        CHECK_EQ(c.purses[rank].wrong, 0);
    }
    CHECK_EQ(hook_blocks, live);
    world_close(&c.w);
    problem_free(&p);
}

/* The allocator fails at its n-th call, for every n: RA_E_NOMEM, and nothing stays allocated. */
TEST(every_allocation_may_fail) {
    problem p;
    setup s = { 0 };
    ra_desc d;
    int64_t failures = 0;
    problem_shape(&p, 700, 4, 2, 16, 16);
    p.mask.kind = RA_MASK_CAUSAL;
    s.ranks = 1;
    s.layout = RA_LAYOUT_CONTIGUOUS;
    d = rank_desc(&p, &s, 0);
    for (int64_t n = 1; n < 20; n++) {
        ra_plan *plan = NULL;
        ra_ring *ring = NULL;
        ra_ring_desc rd = { 0 };
        purse u;
        ra_allocator a = purse_allocator(&u);
        ra_status status;
        u.fail_at = n;
        rd.allocator = a;
        status = ra_plan_create(&plan, &d, &a);
        if (status == RA_OK) status = ra_ring_create(&ring, plan, NULL, &rd);
        if (u.calls >= n) {
            failures++;
            CHECK_EQ(status, RA_E_NOMEM);
            CHECK(ring == NULL);
        } else {
            CHECK_EQ(status, RA_OK);
        }
        ra_ring_destroy(ring);
        ra_plan_destroy(plan);
        CHECK_EQ(u.live, 0);
        CHECK_EQ(u.wrong, 0);
    }
    CHECK(failures >= 2 && failures < 19);
}

static const h_test tests[] = {
    ENTRY(travel_of_causal_masks), ENTRY(travel_without_a_mask), ENTRY(travel_of_windows),
    ENTRY(bytes_to_the_byte), ENTRY(tiles_by_brute_force), ENTRY(pairs_by_brute_force),
    ENTRY(packed_documents), ENTRY(walks_are_linear), ENTRY(runs_with_common_positions),
    ENTRY(positions_held_twice), ENTRY(positions_held_twice_among_many),
    ENTRY(counters_of_random_runs), ENTRY(positions_of_layouts), ENTRY(prediction_by_hand),
    ENTRY(predicted_hiding_is_computing),
    ENTRY(prediction_of_imbalance), ENTRY(default_chunks_hide_transfers),
    ENTRY(rates_serve_short_shards), ENTRY(rounds_hide_transfers), ENTRY(rates_choose_chunks),
    ENTRY(workspace_to_the_byte),
    ENTRY(memory_is_a_few_chunks), ENTRY(few_rows_far_away), ENTRY(nothing_allocates_in_a_pass),
    ENTRY(every_allocation_may_fail)
};

int main(int argc, char **argv) {
    return hook_main(argc, argv, tests, sizeof tests / sizeof tests[0]);
}
