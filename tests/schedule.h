#ifndef RINGATTN_TESTS_SCHEDULE_H
#define RINGATTN_TESTS_SCHEDULE_H

/* The tests of test_schedule.c. They reach into all private structs of the schedule, so hooks.c
 * compiles them with the implementation. The schedule of plans, against slow models. Which rank
 * needs which chunk: by looking at every (query, key) pair. How many steps a pass takes: by the
 * bound that SCHEDULE states. The lists of all ranks: by simulating them with zero-capacity
 * messages under the rules of a ring until all is done. How long ranks wait in sendrecv: by clocks
 * that count tiles. That links exchange any messages. Also which lines of the cache decoding
 * prefetches, and how structs are copied. */
#include "hooks.h"
#include "mail.h"
#include <math.h>
#include <pthread.h>

enum { MOST = 16 };

/* A descriptor with its arrays. */
typedef struct shape {
    ra_desc d;
    ra_error e;
    int64_t docs[256], of[4];
    int32_t lo[2600], hi[2600], weights[MOST], count[MOST];
    int64_t rows[MOST];
    ra_run runs[256];
} shape;

static void shape_plain(shape *s, int64_t tokens, int ranks, int32_t layout, int32_t mask) {
    memset(s, 0, sizeof *s);
    s->d = ra_desc_make(4, 2, 8, RA_F32, mask);
    s->d.tokens = tokens;
    s->d.ranks = ranks;
    s->d.layout.kind = layout;
    s->d.train = 1;
    s->d.chunk_tokens = 64;
    s->d.error = &s->e;
}

static void shape_documents(shape *s, int64_t tokens) {
    int64_t p = 0, n = 0;
    while (p < s->d.tokens + s->d.q_offset && n < 256) { s->docs[n++] = p; p += tokens; }
    s->d.mask.doc_first = s->docs;
    s->d.mask.doc_count = n;
}

static void random_mask(shape *s, h_rng *r) {
    ra_mask *m = &s->d.mask;
    int i, w = (int)h_range(r, 1, 600);
    if (m->kind == RA_MASK_INTERVALS) {
        for (i = 0; i < 2600; i++) {
            s->lo[i] = (int32_t)(h_one_in(r, 3) ? h_range(r, 0, 2000) : i - w);
            s->hi[i] = (int32_t)(h_one_in(r, 5) ? h_range(r, 0, 2000) : i + h_range(r, 0, w));
        }
        m->lo = s->lo;
        m->hi = s->hi;
        m->interval_count = 2600;
        return;
    }
    if (h_one_in(r, 3)) shape_documents(s, h_range(r, 10, 700));
    if (h_one_in(r, 2)) m->window = h_range(r, 1, h_one_in(r, 2) ? 50 : 900);
    if (h_one_in(r, 3)) m->prefix = h_range(r, 1, 300);
    if (h_one_in(r, 3)) m->keep = h_range(r, 1, h_one_in(r, 2) ? 5 : 300);
    if (m->kind == RA_MASK_NONE && h_one_in(r, 2)) m->right_limit = h_range(r, 1, 600);
    if (m->kind == RA_MASK_CAUSAL && h_one_in(r, 3)) m->causal_block = (int32_t)h_range(r, 2, 300);
}

/* Positions divided into pieces, some of them interleaved. */
static void random_runs(shape *s, h_rng *r) {
    int64_t p = 0, step = h_one_in(r, 3) ? h_range(r, 2, 5) : 1;
    int n = 0, rank, left;
    while (p < s->d.tokens && n < 200) {
        int64_t length = n >= 190 ? s->d.tokens - p : h_range(r, 1, 200), by = step;
        if (n >= 190 || p + length * by > s->d.tokens) by = 1;
        if (p + length * by > s->d.tokens) length = s->d.tokens - p;
        for (int i = 0; i < by; i++) {
            s->runs[n].first = p + i;
            s->runs[n].count = length;
            s->runs[n++].stride = by;
        }
        p += length * by;
    }
    for (int i = n - 1; i > 0; i--) {
        int j = (int)h_range(r, 0, i);
        ra_run t = s->runs[i];
        s->runs[i] = s->runs[j];
        s->runs[j] = t;
    }
    for (rank = 0, left = n; rank < s->d.ranks; rank++) {
        s->count[rank] = rank == s->d.ranks - 1 ? left : (int32_t)h_range(r, 0, left);
        left -= s->count[rank];
    }
    s->d.layout.q_runs = s->runs;
    s->d.layout.q_run_count = s->count;
}

static void random_shape(shape *s, h_rng *r, int32_t layout) {
    int free = layout <= RA_LAYOUT_STRIPED;
    shape_plain(s, h_range(r, 1, h_one_in(r, 2) ? 2000 : 300), (int)h_range(r, 1, 9), layout,
                (int32_t)h_range(r, RA_MASK_NONE, RA_MASK_INTERVALS));
    s->d.sequences = h_one_in(r, 4) ? (int32_t)h_range(r, 2, 4) : 1;
    s->d.kv_heads = h_one_in(r, 2) ? 4 : 2;
    s->d.train = !h_one_in(r, 4);
    s->d.chunk_tokens = (int32_t)h_range(r, 1, 300);
    s->d.buffers = (int32_t)h_range(r, 1, 4);
    if (s->d.buffers > 1 && h_one_in(r, 2)) s->d.order = RA_ORDER_ROUNDS;
    if (s->d.train) s->d.grad_return = (int32_t)h_range(r, 0, RA_RETURN_RING);
    if (free && h_one_in(r, 3)) s->d.q_offset = h_range(r, 0, 400);
    if (free && h_one_in(r, 4)) s->d.kv_tokens = h_range(r, 1, s->d.tokens + s->d.q_offset);
    if (free && s->d.sequences > 1 && !s->d.kv_tokens && h_one_in(r, 2)) {
        for (int i = 0; i < s->d.sequences; i++) s->of[i] = h_range(r, 0, s->d.tokens);
        s->d.tokens_of = s->of;
    }
    random_mask(s, r);
    if (layout <= RA_LAYOUT_ZIGZAG && h_one_in(r, 3)) {
        for (int i = 0; i < s->d.ranks; i++) s->weights[i] = (int32_t)h_range(r, 0, 5);
        s->weights[h_range(r, 0, s->d.ranks - 1)] = 1;
        s->d.layout.weights = s->weights;
    }
    if (layout == RA_LAYOUT_RUNS) random_runs(s, r);
    for (int i = 0; i < s->d.ranks; i++) s->rows[i] = h_range(r, 0, 300);
    if (layout == RA_LAYOUT_ARRAY) s->d.layout.q_rows = s->rows;
}

static ra_plan *plan_of(shape *s, int rank) {
    ra_plan *plan = NULL;
    s->d.rank = rank;
    if (!CHECK_EQ(ra_plan_create(&plan, &s->d, NULL), RA_OK))
        printf("    %s: %s\n", s->e.field, s->e.text);
    return plan;
}

/* -------------------------------------------------------------------------- geometry */
/* Bounds and numbers of (query, key) pairs by formula, against every row, for even and odd
 * positions. */
TEST(bounds_and_pairs_of_rows) {
    static shape s;
    for (int64_t i = 0; i < (h_run.large ? 200000 : 8000); i++) {
        h_rng r = h_case_rng(i);
        int64_t end = h_range(&r, 0, 2400), pairs = 0, k;
        ra__bounds a, b;
        ra__seg seg;
        if (!h_case(i)) continue;
        shape_plain(&s, 2500, 1, RA_LAYOUT_CONTIGUOUS, (int32_t)h_range(&r, 1, i % 16 ? 2 : 3));
        random_mask(&s, &r);
        seg.row = 0;
        seg.rows = h_range(&r, 1, h_one_in(&r, 2) ? 64 : 700);
        seg.stride = h_one_in(&r, 2) ? 1 : h_range(&r, 2, 2500 / seg.rows + 2);
        seg.pos = h_range(&r, 0, 2500);
        while (seg.pos + (seg.rows - 1) * seg.stride >= 2500) {
            seg.pos /= 2;
            if (!seg.pos) seg.rows = (seg.rows + 1) / 2;
        }
        for (k = 0; k < seg.rows; k++) {
            ra__sees v;
            ra__mask_row(&s.d.mask, seg.pos + k * seg.stride, end, &v);
            pairs += ra__pairs_row(&v);
        }
        CHECK_EQ(ra__pairs_seg(&s.d.mask, end, &seg), pairs);
        if (seg.rows > 64) seg.rows = 64;
        a = ra__seg_bounds(&s.d.mask, end, &seg);
        b = ra__rows_fill(&s.d.mask, end, &seg, NULL, NULL);
        CHECK_BITS(&a, &b, sizeof a);
    }
}

/* -------------------------------------------------------------------------- needs and tiles */
static ra__bounds bounds_of(const ra_plan *p, int32_t b, const ra__seg *rows) {
    ra__bounds none = { 0 };
    if (p->d.layout.kind == RA_LAYOUT_ARRAY) return none;
    return ra__rows_fill(&p->d.mask, ra__key_end(&p->d, b, 0), rows, NULL, NULL);
}

static int class_of(const ra_plan *p, const ra__seg *keys, const ra__bounds *b) {
    int64_t first, last;
    if (p->d.layout.kind == RA_LAYOUT_ARRAY) return RA__PARTIAL;
    ra__seg_span(keys, NULL, &first, &last);
    return ra__classify(b, first, last);
}

/* Whether rows see keys. */
static int meets(const ra_plan *p, int32_t b, const ra__seg *rows, const ra__seg *keys) {
    int64_t i, n = (rows->rows + 63) / 64;
    for (i = 0; i < n; i++) {
        ra__seg block = ra__seg_block(rows, i);
        ra__bounds bounds = bounds_of(p, b, &block);
        if (class_of(p, keys, &bounds) != RA__EMPTY) return 1;
    }
    return 0;
}

static void check_needs(const ra_plan *p) {
    const ra__travel *t = &p->keys;
    for (int64_t c = 0; c < t->chunks; c++) for (int rank = 0; rank < p->d.ranks; rank++) {
        const ra__chunk *chunk = &t->chunk[c];
        int32_t b = chunk->sequence;
        ra__side side = ra__plan_side(p, 0, rank);
        ra__seg s;
        for (int32_t part = 0; part < chunk->segs; part++) {
            int need = 0;
            for (int64_t i = 0; ra__side_seg(&side, b, i, &s); i++)
                for (int32_t k = 0; s.rows && k < ra__chunk_pieces(chunk); k++) {
                    ra__seg piece = ra__chunk_piece(chunk, k);
                    if (!chunk->list.run && k != part) continue;
                    need |= meets(p, b, &s, &piece);
                }
            CHECK_EQ(ra__need_seg(t, c, part, rank), need);
        }
    }
}

/* Tiles of a rank's rows, and its seconds per chunk: tiles that are not empty, times rows. */
static void slow_tiles(const ra_plan *p, int rank, int64_t tally[3], double *weight) {
    ra__side side = ra__plan_side(p, 0, rank);
    ra__seg s;
    for (int32_t b = 0; b < p->d.sequences; b++)
        for (int64_t i = 0; ra__side_seg(&side, b, i, &s); i++)
            for (int64_t j = 0; j < (s.rows + 63) / 64; j++) {
                ra__seg rows = ra__seg_block(&s, j);
                ra__bounds bounds = bounds_of(p, b, &rows);
                for (int64_t c = 0; c < p->keys.chunks; c++)
                    for (int32_t part = 0; part < p->keys.chunk[c].segs; part++)
                        for (int64_t k = 0; p->keys.chunk[c].sequence == b &&
                                    k < ra__seg_blocks(&p->keys.chunk[c], part); k++) {
                            ra__seg keys = ra__seg_block_at(&p->keys.chunk[c], part, k);
                            int kind = class_of(p, &keys, &bounds);
                            tally[kind]++;
                            if (kind != RA__EMPTY) *weight += (double)rows.rows;
                        }
            }
}

/* Who needs what, the tiles of every rank, and what predictions count, block by block. */
TEST(needs_and_tiles_by_blocks) {
    static shape s;
    for (int64_t i = 0; i < (h_run.large ? 3000 : 250); i++) {
        h_rng r = h_case_rng(i);
        ra_plan *p;
        if (!h_case(i)) continue;
        random_shape(&s, &r, RA_LAYOUT_CONTIGUOUS + (int32_t)(i % 5));
        if (!(p = plan_of(&s, 0))) continue;
        check_needs(p);
        for (int rank = 0; rank < s.d.ranks; rank++) {
            int64_t tally[3] = { 0, 0, 0 };
            double weight = 0, seconds;
            ra_plan_report g;
            ra_rates rates = { 1e9, 1e9, 0 };
            ra_prediction x;
            slow_tiles(p, rank, tally, &weight);
            CHECK_EQ(ra_plan_query(p, rank, &g), RA_OK);
            CHECK_EQ(g.forward.tiles_empty, tally[RA__EMPTY] * p->d.q_heads);
            CHECK_EQ(g.forward.tiles_partial, tally[RA__PARTIAL] * p->d.q_heads);
            CHECK_EQ(g.forward.tiles_full, tally[RA__FULL] * p->d.q_heads);
            CHECK_EQ(ra_plan_predict(p, rank, &rates, &x), RA_OK);
            seconds = weight * 64 * 2 * 16 * p->d.q_heads / 1e9;
            CHECK(fabs(x.compute_s - seconds) <= 1e-9 * seconds);
        }
        ra_plan_destroy(p);
    }
}

/* -------------------------------------------------------------------------- steps */
static int64_t steps_of(const ra_plan *p, int back) {
    ra__route w = ra__route_of(p, back);
    int64_t *line = (int64_t *)malloc((size_t)p->d.ranks * 24);
    int64_t *start = (int64_t *)malloc((size_t)(w.t->chunks + 1) * 8), steps;
    steps = ra__route_steps(&w, line, start);
    free(line);
    free(start);
    return steps;
}

/* Masks of the test below: the last two hide what is far away on both sides. */
static void some_mask(shape *s, int m, int64_t shard) {
    s->d.mask.kind = m == 0 || m == 7 ? RA_MASK_NONE : RA_MASK_CAUSAL;
    if (m == 2) s->d.mask.window = shard / 2 + 1;
    if (m == 3) s->d.mask.window = 3 * shard;
    if (m == 4) s->d.mask.prefix = shard;
    if (m == 5) shape_documents(s, s->d.tokens / 3 + 1);
    if (m == 6) s->d.mask.causal_block = 32;
    if (m == 7) s->d.mask.window = s->d.mask.right_limit = shard / 2 + 1;
}

/* Every layout, mask and number of ranks: less than chunks + (sequences + 1) P steps forward. The
 * same backward if the chunks of an owner travel equally far; otherwise the gradients of an owner
 * return in order, which costs up to a round per owner. One chunk per shard is the hardest. */
TEST(steps_are_chunks_and_two_rounds) {
    static const int worlds[12] = { 1, 2, 3, 4, 5, 7, 8, 16, 33, 64, 128, 256 };
    static shape s;
    for (int64_t i = 0; i < 12 * 3 * 8 * 3; i++) {
        int64_t left = i;
        const int P = worlds[h_pick(&left, 12)];
        const int32_t layout = RA_LAYOUT_CONTIGUOUS + h_pick(&left, 3);
        const int m = h_pick(&left, 8), n = 1 << 2 * left;
        int q;
        int uneven = (m >= 2 && layout == RA_LAYOUT_ZIGZAG) || m == 5 || m == 7;
        if (!h_case(i)) continue;
        for (q = 0; q < 2; q++) {
            if (P > 64 && !h_variant(i / 12, q)) continue;
            int64_t shard = 64 * n * (layout == RA_LAYOUT_ZIGZAG ? 2 : 1), bound;
            ra_plan *p;
            shape_plain(&s, shard * P, P, layout, RA_MASK_CAUSAL);
            if (layout == RA_LAYOUT_ZIGZAG) s.d.chunk_tokens = 128;
            s.d.kv_heads = q ? 4 : 2;
            s.d.sequences = i % 5 == 0 && P < 64 ? 3 : 1;
            some_mask(&s, m, shard);
            if (!(p = plan_of(&s, P / 2))) continue;
            bound = p->keys.chunks + ((int64_t)s.d.sequences + 1) * P;
            CHECK(steps_of(p, 0) < bound + (P == 1));
            if (!uneven) CHECK(steps_of(p, 1) < bound + (P == 1));
            CHECK(steps_of(p, 1) <= bound * 3 + P * (int64_t)P * s.d.sequences);
            ra_plan_destroy(p);
        }
    }
}

/* -------------------------------------------------------------------------- playing through */
/* A rank of a world whose messages have no capacity: a send ends when its receive is posted. */
typedef struct player {
    const ra_plan *plan;
    const ra__pass_lists *way;
    int64_t posted, received, released, folded, ready, sent, own_sent, own_posted;
    int64_t home_posted, home_received, home_done;
    int64_t slots, packs, homes, grads;
    int shared;
} player;

static void player_open(player *y, const ra_plan *p, int back, int shared) {
    const ra__counts *n = back ? &p->sizes.back : &p->sizes.forward;
    int64_t own = n->own + n->stays;
    memset(y, 0, sizeof *y);
    y->plan = p;
    y->way = back ? &p->back : &p->forward;
    y->shared = shared;
    y->slots = shared ? RA__SHARED_BUFFERS : p->d.buffers;
    y->packs = ra__min(n->own, shared ? RA__SEND_SLOTS : RA__PACK_SLOTS);
    y->homes = ra__min(n->own, shared ? RA__SHARED_BUFFERS : RA__RETURN_SLOTS);
    y->grads = n->stays ? ra__min(own, RA__PACK_SLOTS) : 0;
    if (shared) y->grads = ra__min(own, ra__back_lag(p) + 2);
}

/* There is a place for the gradient of an own chunk. */
static int player_room(const player *y, int64_t own) {
    const ra__pass_lists *w = y->way;
    int64_t home = w->own[own].returned, before = own - y->grads;
    if (home >= 0 && !y->shared && home - y->own_sent >= y->packs) return 0;
    if (before < 0 || (home >= 0 && !y->shared)) return 1;
    home = w->own[before].returned;
    if (y->shared && home >= 0) return home < y->home_done;
    return w->own[before].fold < y->folded;
}

static int player_folds(const player *y) {
    const ra__pass_lists *w = y->way;
    int64_t f = y->folded;
    if (f == w->folds) return 0;
    if (w->fold[f].recv >= 0) return w->fold[f].recv < y->received;
    if (!w->backward || w->fold[f].own < 0) return 1;
    if (w->fold[f].phase != RA__BEFORE) return player_room(y, w->fold[f].own);
    return w->own[w->fold[f].own].returned < y->home_received;
}

static int player_sends(const player *y) {
    const ra__pass_lists *w = y->way;
    int64_t i = y->ready;
    if (i == w->sends) return 0;
    if (w->backward && w->send[i].fold >= 0 && w->send[i].fold >= y->folded) return 0;
    if (w->send[i].recv >= 0) return w->send[i].recv < y->received;
    return y->own_posted - y->own_sent < y->packs;
}

/* All that a rank does by itself. Returns how much that was. */
static int player_moves(player *y) {
    const ra__pass_lists *w = y->way;
    int any = 0;
    for (;;) {
        int64_t i = y->released;
        int did = 0;
        while (player_folds(y)) { y->folded++; did = 1; }
        while (player_sends(y)) { y->own_posted += w->send[y->ready++].recv < 0; did = 1; }
        for (; i < y->received && (w->recv[i].fold < 0 || w->recv[i].fold < y->folded) &&
               (w->recv[i].send < 0 || w->recv[i].send < y->sent); i = ++y->released) did = 1;
        for (; y->posted < w->recvs && y->posted - y->released < y->slots; y->posted++) did = 1;
        for (; w->backward && y->home_done < y->home_received &&
               w->returned[y->home_done].fold < y->folded; y->home_done++) did = 1;
        for (; w->backward && y->home_posted < w->returns &&
               y->home_posted - y->home_done < y->homes; y->home_posted++) did = 1;
        any += did;
        if (!did) return any;
    }
}

/* To whom the next send of a rank goes, and whether that is the owner. */
static int player_to(const player *y, int *home) {
    const ra_plan *p = y->plan;
    int32_t hop = 0;
    *home = 0;
    if (!y->way->backward) return ra__rank_up(p, p->d.rank, y->way->direction);
    int to = ra__back_to(p, &y->way->chunk[y->way->send[y->sent].chunk], p->d.rank, &hop);
    *home = hop == p->d.ranks;
    return to;
}

/* Moves the next send of rank `from`, if its receive is posted. */
static int pass_message(player *all, int from) {
    player *a = &all[from], *b;
    int64_t i;
    int home, to;
    if (a->sent == a->ready) return 0;
    to = player_to(a, &home);
    b = &all[to];
    i = home ? b->home_received : b->received;
    if (i == (home ? b->home_posted : b->posted)) return 0;
    if (home && a->way->send[a->sent].chunk != b->way->returned[i].chunk) return 0;
    if (!home) CHECK_EQ(a->way->send[a->sent].chunk, b->way->recv[i].chunk);
    a->own_sent += a->way->send[a->sent++].recv < 0;
    if (home) b->home_received++;
    else b->received++;
    return 1;
}

/* Simulates a pass of all ranks in some order. Every list must come to its end. */
static void play(ra_plan **plans, int ranks, int back, int shared, h_rng *r) {
    static player all[256];
    int any = 1;
    for (int i = 0; i < ranks; i++) player_open(&all[i], plans[i], back, shared);
    while (any) {
        int from = (int)h_range(r, 0, ranks - 1);
        any = 0;
        for (int i = 0; i < ranks; i++) any |= player_moves(&all[(from + i) % ranks]);
        for (int i = 0; i < ranks; i++) {
            if (h_one_in(r, 3)) { any = 1; continue; }         /* late */
            any |= pass_message(all, (from + i) % ranks);
        }
    }
    for (int i = 0; i < ranks; i++) {
        const player *y = &all[i];
        CHECK_EQ(y->folded, y->way->folds);
        CHECK_EQ(y->received, y->way->recvs);
        CHECK_EQ(y->sent, y->way->sends);
        if (back) CHECK_EQ(y->home_done, y->way->returns);
    }
}

/* The lists of a backward pass are those of the usual order, without rounds. */
static void same_back(const ra_plan *p, shape *s) {
    const ra__pass_lists *a = &p->back, *b;
    ra_plan *usual;
    if (!p->round || !s->d.train) return;
    s->d.order = 0;
    usual = plan_of(s, p->d.rank);
    s->d.order = RA_ORDER_ROUNDS;
    if (!CHECK(usual != NULL)) return;
    b = &usual->back;
    CHECK(a->folds == b->folds && a->recvs == b->recvs && a->sends == b->sends &&
          a->owns == b->owns && a->returns == b->returns && a->direction == b->direction);
    CHECK_BITS(a->fold, b->fold, a->folds * (int64_t)sizeof *a->fold);
    CHECK_BITS(a->recv, b->recv, a->recvs * (int64_t)sizeof *a->recv);
    CHECK_BITS(a->send, b->send, a->sends * (int64_t)sizeof *a->send);
    CHECK_BITS(a->own, b->own, a->owns * (int64_t)sizeof *a->own);
    CHECK_BITS(a->returned, b->returned, a->returns * (int64_t)sizeof *a->returned);
    ra_plan_destroy(usual);
}

static void play_all(shape *s, h_rng *r) {
    static ra_plan *plans[256];
    int ok = 1;
    for (int i = 0; i < s->d.ranks; i++) ok &= (plans[i] = plan_of(s, i)) != NULL;
    if (ok) same_back(plans[s->d.ranks / 2], s);
    for (int i = 0; ok && i < 4; i++)
        if (!(i & 1) || s->d.train) play(plans, s->d.ranks, i & 1, i >> 1, r);
    for (int i = 0; i < s->d.ranks; i++) ra_plan_destroy(plans[i]);
}

/* Random plans: no interleaving stops, copied or shared. */
TEST(lists_run_to_the_end) {
    static shape s;
    for (int64_t i = 0; i < (h_run.large ? 5000 : 400); i++) {
        h_rng r = h_case_rng(i);
        if (!h_case(i)) continue;
        random_shape(&s, &r, RA_LAYOUT_CONTIGUOUS + (int32_t)(i % 5));
        play_all(&s, &r);
    }
}

/* Masks that hide much, on many ranks: chunks of one owner that travel near and far, and some that
 * do not travel. */
TEST(sparse_masks_run_to_the_end) {
    static shape s;
    for (int64_t i = 0; i < 8 * 3 * 8; i++) {
        h_rng r = h_case_rng(i);
        int64_t left = i;
        const int P = 6 + 2 * h_pick(&left, 8), n = 2 << h_pick(&left, 3), m = (int)left;
        int32_t layout = m & 1 ? RA_LAYOUT_CONTIGUOUS : RA_LAYOUT_ZIGZAG;
        if (!h_case(i)) continue;
        shape_plain(&s, (int64_t)P * 128 * n, P, layout, m & 2 ? RA_MASK_NONE : RA_MASK_CAUSAL);
        s.d.chunk_tokens = 128;
        s.d.buffers = (int32_t)h_range(&r, 1, 4);
        if (s.d.buffers > 1 && h_one_in(&r, 2)) s.d.order = RA_ORDER_ROUNDS;
        s.d.kv_heads = h_one_in(&r, 2) ? 4 : 2;
        if (m & 4) s.d.mask.window = 64 * n;
        if (m & 4 && m & 2) s.d.mask.right_limit = 64 * n;
        if (!(m & 4)) shape_documents(&s, 1024);
        play_all(&s, &r);
    }
}

/* -------------------------------------------------------------------------- waiting in sendrecv
 * The ranks of a pass, each with a clock that counts its tiles and its waits. The network takes no
 * time; with post and poll it may have links that take time per byte. With sendrecv a rank is a
 * thread, and both sides of a message leave it at the later of their clocks. With post and poll the
 * rank whose clock is behind is next. */
enum { FLAT_RANKS = 4, FLAT_OPS = 256 };
typedef struct flat_end { const void *from; void *to; ra_transport_op *op; size_t len; int64_t at; }
        flat_end;
typedef struct flat_net {
    pthread_mutex_t lock;
    pthread_cond_t moved;
    flat_end half[2][FLAT_RANKS][FLAT_RANKS][2][FLAT_OPS];     /* receive or send, from, to,
                                                                * channel */
    int count[2][FLAT_RANKS][FLAT_RANKS][2];
    int open[FLAT_RANKS];              /* halves of its sendrecv that are not done */
    double rate;                       /* bytes per tile of each link; 0: no limit */
    uint32_t caps;                     /* more caps of the transports with post */
    int64_t busy[FLAT_RANKS][FLAT_RANKS];      /* each link, until then */
} flat_net;
typedef struct flat_seat {
    flat_net *net;
    int rank;
    int64_t waited, tiles, leaves;
    int64_t opened, row, head;         /* how often it turned to a task; which that was */
    ra_plan *plan;
    ra_ring *ring;
    ra_job job;
    ra_tensors t;
    float *memory;
    ra_status end;
} flat_seat;
static flat_net flat;
static flat_seat flat_seats[FLAT_RANKS];

static void flat_progress(void *ctx, int64_t done, int64_t all) {
    (void)all;
    ((flat_seat *)ctx)->tiles = done;
}

static void flat_trace(void *ctx, const ra_event *e) {
    flat_seat *s = (flat_seat *)ctx;
    if (e->kind != RA_EV_TILE) return;
    s->opened += e->q_row != s->row || e->head != s->head;
    s->row = e->q_row;
    s->head = e->head;
}

/* Adds a half. The later of two moves the bytes. Returns the other half, or null. */
static flat_end *flat_add(int send, int from, int to, int channel, flat_end half) {
    int *n = &flat.count[send][from][to][channel], i = *n % FLAT_OPS;
    flat_end *all = flat.half[send][from][to][channel];
    flat_end *other = &flat.half[!send][from][to][channel][i];
    all[i] = half;
    if (flat.count[!send][from][to][channel] <= (*n)++) return NULL;
    CHECK_EQ(half.len, other->len);
    memcpy(send ? other->to : half.to, send ? half.from : other->from, half.len);
    return other;
}

static void flat_half(flat_seat *s, int send, int peer, flat_end half) {
    flat_end *other = flat_add(send, send ? s->rank : peer, send ? peer : s->rank, 0, half);
    flat_seat *o = &flat_seats[peer];
    if (!other) return;
    s->leaves = ra__max(s->leaves, other->at);
    o->leaves = ra__max(o->leaves, half.at);
    flat.open[s->rank]--;
    flat.open[peer]--;
    pthread_cond_broadcast(&flat.moved);
}

static int flat_sendrecv(void *ctx, int to, const void *out, size_t out_len, int from, void *in,
                         size_t in_len, uint64_t tag, int64_t deadline_ns) {
    flat_seat *s = (flat_seat *)ctx;
    flat_end half = { 0 };
    (void)tag; (void)deadline_ns;
    pthread_mutex_lock(&flat.lock);
    half.at = s->leaves = s->tiles + s->waited;
    flat.open[s->rank] = (to >= 0) + (from >= 0);
    half.from = out; half.len = out_len;
    if (to >= 0) flat_half(s, 1, to, half);
    half.to = in; half.len = in_len;
    if (from >= 0) flat_half(s, 0, from, half);
    while (flat.open[s->rank]) pthread_cond_wait(&flat.moved, &flat.lock);
    s->waited += s->leaves - half.at;
    pthread_mutex_unlock(&flat.lock);
    return RA_OK;
}

/* When a message of which both halves are posted arrives. */
static int64_t flat_comes(int from, int to, const flat_end *a, const flat_end *b) {
    int64_t *busy = &flat.busy[from][to], at = ra__max(a->at, b->at);
    if (flat.rate > 0) *busy = at = ra__max(at, *busy) + (int64_t)((double)a->len / flat.rate);
    return at;
}

static int flat_post(void *ctx, ra_transport_op *const *ops, int n) {
    flat_seat *s = (flat_seat *)ctx;
    for (int i = 0; i < n; i++) {
        ra_transport_op *op = ops[i];
        int send = op->kind == RA_MSG_SEND;
        flat_end half, *other;
        if (op->state != RA_MSG_IDLE) continue;
        op->state = RA_MSG_PENDING;
        half.from = half.to = op->buf;
        half.op = op;
        half.len = op->len;
        half.at = s->tiles + s->waited;
        other = flat_add(send, send ? s->rank : op->peer, send ? op->peer : s->rank, op->channel,
                         half);
        if (!other) continue;
        op->scratch[0] = op;           /* done, at the time in `done` */
        other->op->scratch[0] = op;
        op->done = other->op->done = (size_t)flat_comes(send ? s->rank : op->peer,
                                                        send ? op->peer : s->rank, &half, other);
    }
    return RA_OK;
}

static int flat_poll(void *ctx, ra_transport_op *const *ops, int n) {
    const flat_seat *s = (const flat_seat *)ctx;
    for (int i = 0; i < n; i++) {
        if (ops[i]->state != RA_MSG_PENDING || !ops[i]->scratch[0]) continue;
        if ((int64_t)ops[i]->done > s->tiles + s->waited) continue;
        ops[i]->done = ops[i]->len;
        ops[i]->state = RA_MSG_DONE;
    }
    return RA_OK;
}

/* Nothing is lent. */
static int flat_release(void *ctx, ra_transport_op *op) {
    (void)ctx; (void)op;
    return RA_E_STATE;
}

/* Begins a pass whose steps are as short as they can be. */
static void flat_begin(flat_seat *s, int level) {
    ra_transport net = { 0 };
    ra_ring_desc rd = { 0 };
    net.size = (uint32_t)sizeof net;
    net.abi = RA_TRANSPORT_ABI;
    net.ctx = s;
    net.caps = RA_CAP_ANY_PEER;
    if (!level) net.sendrecv = flat_sendrecv;
    else {
        net.post = flat_post;
        net.poll = flat_poll;
        net.caps |= flat.caps;
        net.release = flat_release;
        net.channels = 2;
        net.max_ops = 64;
    }
    rd.progress = flat_progress;
    rd.progress_ctx = s;
    rd.trace = flat_trace;
    rd.trace_ctx = s;
    s->waited = s->tiles = s->opened = 0;
    s->row = -1;
    CHECK_EQ(ra_ring_create(&s->ring, s->plan, &net, &rd), RA_OK);
    CHECK_EQ(ra_begin(s->ring, &s->job), RA_OK);
    s->ring->step_work = RA__TILE_WORK;
}

static void *flat_live(void *ctx) {
    flat_seat *s = (flat_seat *)ctx;
    do s->end = ra_step(s->ring, 0); while (s->end > 0);
    return NULL;
}

static void flat_take_turns(int ranks) {
    for (;;) {
        flat_seat *s = NULL, *next = NULL;
        for (int i = 0; i < ranks; i++) {
            flat_seat *x = &flat_seats[i];
            if (x->end <= 0) continue;
            if (!s || x->tiles + x->waited < s->tiles + s->waited) { next = s; s = x; }
            else if (!next || x->tiles + x->waited < next->tiles + next->waited) next = x;
        }
        if (!s) return;
        s->end = ra_step(s->ring, 0);
        if (s->end == RA_WAIT)
            s->waited += 1 + (next ? next->tiles + next->waited - s->tiles - s->waited : 0);
    }
}

/* How long the pass takes, in tiles. */
static int64_t flat_pass(int ranks, int level) {
    pthread_t thread[FLAT_RANKS];
    int64_t worst = 0;
    memset(flat.count, 0, sizeof flat.count);
    memset(flat.busy, 0, sizeof flat.busy);
    for (int i = 0; i < ranks; i++) {
        flat_begin(&flat_seats[i], level);
        flat_seats[i].end = RA_AGAIN;
    }
    if (level) flat_take_turns(ranks);
    for (int i = 0; !level && i < ranks; i++)
        pthread_create(&thread[i], NULL, flat_live, &flat_seats[i]);
    for (int i = 0; !level && i < ranks; i++) pthread_join(thread[i], NULL);
    for (int i = 0; i < ranks; i++) {
        CHECK_EQ(flat_seats[i].end, RA_OK);
        worst = ra__max(worst, flat_seats[i].tiles + flat_seats[i].waited);
        ra_ring_destroy(flat_seats[i].ring);
    }
    return worst;
}

static void flat_open(flat_seat *s, const ra_desc *d) {
    const size_t n = (size_t)(d->tokens / d->ranks * d->q_heads * d->k_dim);
    float *at;
    memset(s, 0, sizeof *s);
    s->net = &flat;
    s->rank = d->rank;
    CHECK_EQ(ra_plan_create(&s->plan, d, NULL), RA_OK);
    at = s->memory = (float *)calloc(9 * n, sizeof *at);
    s->t.q.data = at;
    s->t.k.data = at + n;
    s->t.v.data = at + 2 * n;
    s->t.o.data = at + 3 * n;
    s->t.d_o.data = at + 4 * n;
    s->t.d_q.data = at + 5 * n;
    s->t.d_k.data = at + 6 * n;
    s->t.d_v.data = at + 7 * n;
    if (d->train) s->t.lse.data = at + 8 * n;
    s->job.plan = s->plan;
    s->job.tensors = &s->t;
    s->job.pass = d->train ? RA_PASS_BACKWARD : RA_PASS_FORWARD;
}

static void flat_world(ra_desc d) {
    for (d.rank = 0; d.rank < d.ranks; d.rank++) flat_open(&flat_seats[d.rank], &d);
}

static void flat_close(int ranks) {
    for (int r = 0; r < ranks; r++) {
        ra_plan_destroy(flat_seats[r].plan);
        free(flat_seats[r].memory);
    }
}

static ra_desc flat_desc(int ranks, int64_t shard, int heads, int layout, int mask, int train) {
    ra_desc d = ra_desc_make(heads, heads, 4, RA_F32, mask);
    d.ranks = ranks;
    d.tokens = shard * ranks;
    d.layout.kind = layout;
    d.train = train;
    if (train) d.grad_return = RA_RETURN_RING;
    return d;
}

static void takes_no_turns(const ra_desc *d, const char *what) {
    int64_t blocking, posted;
    flat_world(*d);
    blocking = flat_pass(d->ranks, 0);
    posted = flat_pass(d->ranks, 1);
    h_context("%s: %lld tiles, %lld with post", what, (long long)blocking, (long long)posted);
    CHECK(blocking * 100 <= posted * (d->train ? 140 : 120));
    if (h_run.verbose) printf("%s\n", h_run.context);
    flat_close(d->ranks);
}

/* Sendrecv alone, without a helper, takes at most 20 % longer than post and poll, backward 40 %.
 * Ranks wait for each other in every round, and a step of a backward pass is several tiles. */
TEST(sendrecv_is_nearly_as_fast_as_post) {
    enum { ZIGZAG_CAUSAL = 4 };
    static const struct { const char *name; int32_t layout, mask, always; } shapes[6] = {
        { "contiguous, full", RA_LAYOUT_CONTIGUOUS, RA_MASK_NONE, 1 },
        { "zigzag, full", RA_LAYOUT_ZIGZAG, RA_MASK_NONE, 0 },
        { "striped, full", RA_LAYOUT_STRIPED, RA_MASK_NONE, 0 },
        { "contiguous, causal", RA_LAYOUT_CONTIGUOUS, RA_MASK_CAUSAL, 0 },
        { "zigzag, causal", RA_LAYOUT_ZIGZAG, RA_MASK_CAUSAL, 1 },
        { "striped, causal", RA_LAYOUT_STRIPED, RA_MASK_CAUSAL, 0 },
    };
    static const struct { const char *name; int32_t train, order, chunk; } passes[3] = {
        { "forward", 0, 0, 128 },
        { "backward", 1, 0, 256 },
        { "forward in rounds", 0, RA_ORDER_ROUNDS, 128 },
    };
    int64_t i = 0;
    char what[128];
    pthread_mutex_init(&flat.lock, NULL);
    pthread_cond_init(&flat.moved, NULL);
    for (int p = 0; p < 3; p++) for (int all = 0; all < 2; all++) for (int k = 0; k < 6; k++, i++) {
        const int ranks = all ? FLAT_RANKS : 2;
        /* 1: also in make check. */
        const int usual = p == 0 ? shapes[k].always
                                 : passes[p].train && ranks == 2 && k == ZIGZAG_CAUSAL;
        ra_desc d = flat_desc(ranks, 1024, 2, shapes[k].layout, shapes[k].mask, passes[p].train);
        d.chunk_tokens = passes[p].chunk;
        d.order = passes[p].order;
        if (!h_run.large && !usual) continue;
        if (!h_case(i) || !h_variant(all, 0)) continue;
        (void)snprintf(what, sizeof what, "%d ranks, %s, %s", ranks, passes[p].name,
                       shapes[k].name);
        takes_no_turns(&d, what);
    }
    pthread_mutex_destroy(&flat.lock);
    pthread_cond_destroy(&flat.moved);
}

/* The same if tasks see unlike numbers of the chunks that they fold together, or if chunks are
 * small. Backward the two visits of an own chunk are unlike. */
TEST(sendrecv_waits_for_no_series) {
    static const struct { int ranks, layout, mask, shard, chunk, order, always, train; }
        shapes[] = {
        { 3, RA_LAYOUT_ZIGZAG, RA_MASK_CAUSAL, 2048, 512, RA_ORDER_ROUNDS, 1, 0 },
        { 3, RA_LAYOUT_ZIGZAG, RA_MASK_CAUSAL, 2048, 512, 0, 1, 0 },
        { 3, RA_LAYOUT_STRIPED, RA_MASK_CAUSAL, 2048, 512, 0, 0, 0 },
        { 4, RA_LAYOUT_CONTIGUOUS, RA_MASK_NONE, 1024, 64, 0, 1, 0 },
        { 4, RA_LAYOUT_CONTIGUOUS, RA_MASK_NONE, 2048, 64, 0, 0, 0 },
        { 4, RA_LAYOUT_CONTIGUOUS, RA_MASK_CAUSAL, 1024, 64, RA_ORDER_ROUNDS, 1, 0 },
        { 4, RA_LAYOUT_CONTIGUOUS, RA_MASK_CAUSAL, 2048, 64, RA_ORDER_ROUNDS, 0, 0 },
        { 4, RA_LAYOUT_CONTIGUOUS, RA_MASK_CAUSAL, 2048, 128, RA_ORDER_ROUNDS, 0, 0 },
        { 4, RA_LAYOUT_ZIGZAG, RA_MASK_CAUSAL, 2048, 64, RA_ORDER_ROUNDS, 0, 0 },
        { 4, RA_LAYOUT_ZIGZAG, RA_MASK_CAUSAL, 2048, 128, RA_ORDER_ROUNDS, 0, 0 },
        { 4, RA_LAYOUT_ZIGZAG, RA_MASK_CAUSAL, 2048, 512, 0, 0, 0 },
        { 4, RA_LAYOUT_STRIPED, RA_MASK_CAUSAL, 1024, 64, 0, 1, 0 },
        { 4, RA_LAYOUT_STRIPED, RA_MASK_CAUSAL, 2048, 64, 0, 0, 0 },
        { 4, RA_LAYOUT_STRIPED, RA_MASK_CAUSAL, 2048, 512, 0, 0, 0 },
        { 2, RA_LAYOUT_STRIPED, RA_MASK_CAUSAL, 2048, 128, 0, 1, 1 },
        { 2, RA_LAYOUT_ZIGZAG, RA_MASK_CAUSAL, 2048, 128, 0, 1, 1 },
        { 4, RA_LAYOUT_STRIPED, RA_MASK_CAUSAL, 2048, 128, 0, 0, 1 },
        { 4, RA_LAYOUT_ZIGZAG, RA_MASK_CAUSAL, 2048, 128, 0, 0, 1 },
    };
    char what[128];
    pthread_mutex_init(&flat.lock, NULL);
    pthread_cond_init(&flat.moved, NULL);
    for (int i = 0; i < (int)(sizeof shapes / sizeof *shapes); i++) {
        ra_desc d = flat_desc(shapes[i].ranks, shapes[i].shard, 2, shapes[i].layout, shapes[i].mask,
                              shapes[i].train);
        d.chunk_tokens = shapes[i].chunk;
        d.order = shapes[i].order;
        if ((!h_run.large && !shapes[i].always) || !h_case(i)) continue;
        (void)snprintf(what, sizeof what, "%d ranks, layout %d, %d of %d, order %d", d.ranks,
                       shapes[i].layout, shapes[i].chunk, shapes[i].shard, shapes[i].order);
        takes_no_turns(&d, what);
    }
    pthread_mutex_destroy(&flat.lock);
    pthread_cond_destroy(&flat.moved);
}

/* Links on which the messages of a pass take as long as its tiles: the ring takes as long as
 * predicted. With default chunks causal zigzag hides 85 % of the transfer (on two ranks also with
 * 32 chunks per shard: --long), and so does every mask in rounds. In the usual order without a
 * mask, the last rank's own keys, 1 / ranks of all, are computed after all messages have come. */
TEST(transfers_hide_as_predicted) {
    for (int64_t i = 0; i < 2 * 2 * 2 + 1; i++) {
        const int more = i == 8, ranks = i & 2 ? FLAT_RANKS : 2, causal = (i & 1) || more;
        const int rounds = i >= 4 && !more;
        const ra_rates known = { 1, 1e-3, 0 };         /* no latency */
        ra_desc d = flat_desc(ranks, 2048, 1, causal ? RA_LAYOUT_ZIGZAG : RA_LAYOUT_CONTIGUOUS,
                              causal ? RA_MASK_CAUSAL : RA_MASK_NONE, 0);
        ra_rates rates = { 1e12, 1e9, 0 };
        ra_prediction all, idle;
        double tiles = 0, bytes = 0, pass, hidden;
        if (!h_case(i)) continue;
        if ((more || (rounds && causal) || (ranks > 2 && !causal)) && !h_run.large) continue;
        d.rates = known;
        if (rounds) d.order = RA_ORDER_ROUNDS;
        if (more) {
            d.chunk_tokens = 128;
            d.tokens = 2 * 4096;
        }
        flat_world(d);
        for (int r = 0; r < ranks; r++) {
            ra_plan_report g;
            ra_plan_query(flat_seats[r].plan, r, &g);
            tiles = fmax(tiles, (double)(g.forward.tiles_partial + g.forward.tiles_full));
            bytes = fmax(bytes, (double)g.forward.bytes_in);
        }
        flat.rate = bytes / tiles;
        pass = (double)flat_pass(ranks, 1);
        flat.rate = 0;
        CHECK_EQ(ra_plan_predict(flat_seats[0].plan, 0, &rates, &all), RA_OK);
        rates.flops_per_s *= all.compute_s / tiles;    /* a second is the time of a tile */
        rates.link_bytes_per_s = bytes / tiles;
        CHECK_EQ(ra_plan_predict(flat_seats[0].plan, 0, &rates, &all), RA_OK);
        rates.flops_per_s = 1e300;
        CHECK_EQ(ra_plan_predict(flat_seats[0].plan, 0, &rates, &idle), RA_OK);
        hidden = (tiles + idle.all_done_s - pass) / fmin(tiles, idle.all_done_s);
        h_context("%d ranks%s%s: %.0f tiles, transfer %.0f, " "pass %.0f, predicted %.0f", ranks,
                  causal ? ", causal zigzag" : "", rounds ? ", rounds" : "", tiles, idle.all_done_s,
                  pass, all.all_done_s);
        CHECK(fabs(pass - all.all_done_s) <= 0.15 * all.all_done_s);
        if (causal || rounds) CHECK(hidden >= 0.85);
        else CHECK(pass <= 1.1 * tiles * (1 + 1.0 / ranks));
        if (h_run.verbose) printf("%s, hidden %.3f\n", h_run.context, hidden);
        flat_close(ranks);
    }
}

/* Nothing waits for the buffers of the last messages, here of all: before a task stores its sums it
 * folds every chunk that has come. */
TEST(last_messages_end_no_series) {
    ra_desc d = flat_desc(2, 2048, 1, RA_LAYOUT_ZIGZAG, RA_MASK_CAUSAL, 0);
    d.chunk_tokens = 256;
    flat_world(d);
    CHECK(flat_seats[0].plan->d.buffers >= flat_seats[0].plan->forward.recvs);
    (void)flat_pass(2, 1);
    for (int r = 0; r < 2; r++) {
        const int64_t tasks = flat_seats[r].plan->forward.task_begin[1];
        h_context("rank %d: %d tasks, opened %d times", r, (int)tasks, (int)flat_seats[r].opened);
        CHECK(flat_seats[r].opened <= 2 * tasks);
        if (h_run.verbose) printf("%s\n", h_run.context);
    }
    flat_close(2);
}

/* Messages that may be lent go back as early as others. With more than two ranks the lender waits
 * for them and has others to receive; with two it has none. */
TEST(loans_end_with_their_series) {
    for (int ranks = 2; ranks <= 3; ranks++) {
        ra_desc d = flat_desc(ranks, 2048, 1, RA_LAYOUT_CONTIGUOUS, RA_MASK_NONE, 0);
        int64_t opened[2] = { 0, 0 };
        d.chunk_tokens = 256;
        d.buffers = 8;
        flat_world(d);
        for (int loans = 0; loans < 2; loans++) {
            flat.caps = loans ? RA_CAP_LOAN : 0;
            (void)flat_pass(ranks, 1);
            for (int r = 0; r < ranks; r++) opened[loans] += flat_seats[r].opened;
        }
        flat.caps = 0;
        h_context("%d ranks: opened %d and, with loans, %d times", ranks, (int)opened[0],
                  (int)opened[1]);
        CHECK(ranks == 2 ? opened[1] == opened[0] : opened[1] > opened[0]);
        if (h_run.verbose) printf("%s\n", h_run.context);
        flat_close(ranks);
    }
}

/* -------------------------------------------------------------------------- links
 * Random messages between random pairs of ranks, over a sendrecv that ends when both sides have
 * met. Some ranks have a helper. Each posts its messages bit by bit, in any order that keeps those
 * to one rank and on one channel in theirs. */
enum { LINK_RANKS = 7, LINK_MOST = 3, LINK_BYTES = 9000, LINK_PASSES = 3 };
typedef struct link_world {
    mail_net *net;
    int fails, victim;                 /* 1: the victim is cancelled; the others wait for messages
                                        * before they send any */
    int64_t most_ns;                   /* of a run */
    int ranks, count[LINK_RANKS][LINK_RANKS][2];       /* from, to, channel */
} link_world;
typedef struct link_seat {
    link_world *w;
    h_rng rng;
    int rank, helps;
    ra_transport tp;
    ra__link u;
    int32_t left[LINK_RANKS];
    ra_transport_op op[2][LINK_RANKS][2][LINK_MOST];   /* sent, peer, channel */
    int posted[2][LINK_RANKS][2];
    uint8_t bytes[2][LINK_RANKS][2][LINK_MOST][LINK_BYTES];
    ra_transport_op *list[4 * LINK_RANKS * LINK_MOST];
    int listed, all;
    ra_status end, quiet;
} link_seat;

/* Length and contents of message i: equal on both sides. */
static int link_length(int from, int to, int channel, int i) {
    return 1 + (from * 131 + to * 37 + channel * 61 + i * 89) * 53 % LINK_BYTES;
}
static uint8_t link_byte(int from, int to, int channel, int i) {
    return (uint8_t)(1 + from * 29 + to * 7 + channel * 3 + i);
}

static void link_prepare(link_seat *s) {
    const link_world *w = s->w;
    memset(s->left, 0, sizeof s->left);
    memset(s->op, 0, sizeof s->op);
    memset(s->posted, 0, sizeof s->posted);
    memset(s->bytes, 0, sizeof s->bytes);
    s->listed = s->all = 0;
    for (int send = 0; send < 2; send++)
    for (int peer = 0; peer < w->ranks; peer++)
    for (int c = 0; c < 2; c++) {
        const int from = send ? s->rank : peer, to = send ? peer : s->rank;
        for (int i = 0; i < w->count[from][to][c]; i++, s->all++) {
            ra_transport_op *op = &s->op[send][peer][c][i];
            op->kind = send ? RA_MSG_SEND : RA_MSG_RECV;
            op->channel = (uint8_t)c;
            op->peer = peer;
            op->buf = s->bytes[send][peer][c][i];
            op->len = (size_t)link_length(from, to, c, i);
            if (send) memset(op->buf, link_byte(from, to, c, i), op->len);
            s->left[peer]++;
        }
    }
}

/* Lists one more message, of any direction, peer and channel that has one. */
static void link_list_one(link_seat *s) {
    for (int tries = 0; tries < 200 && s->listed < s->all; tries++) {
        const int send = !s->w->fails && (int)h_range(&s->rng, 0, 1);
        const int c = (int)h_range(&s->rng, 0, 1);
        const int peer = (int)h_range(&s->rng, 0, s->w->ranks - 1);
        int *n = &s->posted[send][peer][c];
        if (*n == s->w->count[send ? s->rank : peer][send ? peer : s->rank][c]) continue;
        s->list[s->listed++] = &s->op[send][peer][c][(*n)++];
        return;
    }
}

static int link_done(const link_seat *s) {
    int done = 0;
    for (int i = 0; i < s->listed; i++) done += s->list[i]->state == RA_MSG_DONE;
    return done == s->all;
}

static int link_right(const link_seat *s) {
    int wrong = 0;
    for (int i = 0; i < s->all; i++) {
        const ra_transport_op *op = s->list[i];
        int n = 0;
        if (op->kind != RA_MSG_RECV) continue;
        while (&s->op[0][op->peer][op->channel][n] != op) n++;
        for (size_t k = 0; k < op->len; k++)
            wrong += ((uint8_t *)op->buf)[k] != link_byte(op->peer, s->rank, op->channel, n);
        wrong += op->done != op->len;
    }
    return !wrong;
}

static void *link_live(void *arg) {
    link_seat *s = (link_seat *)arg;
    const int64_t end = ra_now_ns() + s->w->most_ns;
    s->end = ra__link_open(&s->u, &s->tp, s->rank, s->w->ranks, NULL);
    for (int pass = 0; pass < LINK_PASSES && !s->end; pass++) {
        ra__link_rest(&s->u);
        link_prepare(s);
        ra__link_begin(&s->u, s->left, end, INT64_MAX);
        while (!link_done(s) && !s->end) {
            if (s->w->fails && s->rank == s->w->victim) s->end = RA_E_CANCELLED;
            else if (h_one_in(&s->rng, 2)) link_list_one(s);
            if (!s->end) s->end = s->tp.post(s->tp.ctx, s->list, s->listed);
            if (!s->end) s->end = s->tp.poll(s->tp.ctx, s->list, s->listed);
            if (!s->end && ra_now_ns() > end) s->end = RA_E_TIMEOUT;
        }
        if (!s->end && !link_right(s)) s->end = RA_E_PROTO;
    }
    if (s->end && s->tp.abort) (void)s->tp.abort(s->tp.ctx, s->end);
    if (s->end) s->quiet = s->tp.quiesce(s->tp.ctx, ra_now_ns() + s->w->most_ns / 2);
    if (!s->quiet) ra__link_rest(&s->u);
    ra__link_close(&s->u);
    return NULL;
}

/* helpers: a bit per rank. Without w->fails every rank ends well, otherwise with this failure. */
static void link_run(link_world *w, h_rng *r, int helpers) {
    static link_seat seat[LINK_RANKS];
    pthread_t id[LINK_RANKS];
    mail_desc d = { 0 };
    d.ranks = w->ranks;
    d.tells = !w->fails;
    d.caps = RA_CAP_ANY_PEER | RA_CAP_DEADLINE | RA_CAP_HELPER;
    if (!w->most_ns) w->most_ns = (int64_t)30000000000;
    w->net = mail_open(&d, NULL);
    memset(seat, 0, sizeof seat);
    for (int i = 0; i < w->ranks; i++) {
        seat[i].w = w;
        seat[i].rank = i;
        seat[i].rng.state = h_next(r);
        seat[i].tp = mail_transport(w->net, i);
        if (!(helpers >> i & 1)) seat[i].tp.caps &= ~(uint32_t)RA_CAP_HELPER;
        if (pthread_create(&id[i], NULL, link_live, &seat[i])) abort();
    }
    for (int i = 0; i < w->ranks; i++) pthread_join(id[i], NULL);
    for (int i = 0; i < w->ranks; i++) {
        const int want = w->fails && i == w->victim ? RA_E_CANCELLED : RA_E_ABORTED;
        CHECK_EQ(seat[i].end, w->fails ? want : RA_OK);
        CHECK_EQ(seat[i].quiet, RA_OK);
    }
    CHECK_EQ(mail_close(w->net), 0);
}

static int nothing_sendrecv(void *ctx, int to, const void *s, size_t s_len, int from, void *r,
                            size_t r_len, uint64_t tag, int64_t deadline_ns) {
    (void)ctx, (void)to, (void)s, (void)s_len, (void)from, (void)r, (void)r_len, (void)tag;
    (void)deadline_ns;
    return RA_OK;
}

TEST(links_never_deadlock) {
    for (int64_t i = 0; i < (h_run.large ? 2000 : 60); i++) {
        h_rng r = h_case_rng(i);
        link_world w;
        if (!h_case(i)) continue;
        memset(&w, 0, sizeof w);
        w.ranks = (int)h_range(&r, 2, LINK_RANKS);
        for (int from = 0; from < w.ranks; from++)
            for (int to = 0; to < w.ranks; to++)
                for (int c = 0; c < 2 && from != to; c++)
                    if (h_one_in(&r, 2)) w.count[from][to][c] = (int)h_range(&r, 0, LINK_MOST);
        link_run(&w, &r, (int)h_range(&r, 0, (1 << w.ranks) - 1));
    }
}

/* One rank is cancelled, and the transport tells nobody. The failure goes from rank to rank, also
 * to those that exchange nothing with the first one, and no helper is left in a sendrecv. Every
 * rank waits for a message from the one before. */
TEST(links_tell_every_rank_of_a_failure) {
    for (int64_t i = 0; i < (h_run.large ? 500 : 40); i++) {
        h_rng r = h_case_rng(i);
        link_world w;
        if (!h_case(i)) continue;
        memset(&w, 0, sizeof w);
        w.fails = 1;
        w.most_ns = (int64_t)4000000000;
        w.ranks = i < 16 ? 4 + (int)i % 2 : (int)h_range(&r, 2, LINK_RANKS);
        w.victim = (int)h_range(&r, 0, w.ranks - 1);
        for (int rank = 0; rank < w.ranks; rank++) {
            w.count[rank][(rank + 1) % w.ranks][0] = 1;
            if (i >= 8 && h_one_in(&r, 2)) w.count[rank][(rank + 2) % w.ranks][1] = w.ranks > 2;
        }
        link_run(&w, &r, i % 4 == 0 ? 0 : i % 4 < 3 ? 127 : (int)h_range(&r, 0, 127));
    }
}

/* An idle helper is woken to quiesce; one that is in a sendrecv has the transport's abort. */
TEST(idle_helpers_quiesce_at_once) {
    for (int i = 0; i < 5; i++) {
        mail_desc d = { 0 };
        ra__link u;
        ra_transport tp;
        int64_t begin;
        memset(&u, 0, sizeof u);
        d.ranks = 2;
        d.tells = 1;
        d.caps = RA_CAP_HELPER;
        mail_net *net = mail_open(&d, NULL);
        tp = mail_transport(net, 0);
        CHECK_EQ(ra__link_open(&u, &tp, 0, 2, NULL), RA_OK);
        (void)nanosleep(&(struct timespec){ 0, 2000000 }, NULL);
        begin = ra_now_ns();
        CHECK_EQ(tp.abort(tp.ctx, RA_E_CANCELLED), RA_OK);
        CHECK_EQ(tp.quiesce(tp.ctx, begin + 100000000), RA_OK);
        CHECK(net->dead);
        ra__link_close(&u);
        CHECK_EQ(mail_close(net), 0);
    }
}

/* wait sleeps while what was pending still is, whatever else it is given. */
TEST(link_waits_for_what_is_pending) {
    ra_transport_op op[2] = { { 0 }, { 0 } }, *list[2] = { &op[0], &op[1] };
    ra__link u;
    memset(&u, 0, sizeof u);
    op[0].state = RA_MSG_DONE;
    op[1].state = RA_MSG_PENDING;
    const int64_t until = ra_now_ns() + 3000000;
    CHECK_EQ(ra__link_wait(&u, list, 2, until), RA_OK);
    CHECK(ra_now_ns() >= until);
}

/* With two ranks each call moves as much one way as the other way. */
TEST(unequal_messages_move_together) {
    h_rng r = h_case_rng(0);
    link_seat s;
    ra_transport_op *op = &s.op[0][0][0][0];
    ra__link_half out = { 0 }, in = { 0 };
    link_world w;
    memset(&w, 0, sizeof w);
    memset(&s, 0, sizeof s);
    w.ranks = 2;
    w.count[0][1][0] = w.count[1][0][0] = 3;
    link_run(&w, &r, 3);
    s.u.below.sendrecv = nothing_sendrecv;
    s.u.first = op;
    op[0].scratch[RA__LINK_NEXT] = &op[1];
    out.op = &op[0];
    in.op = &op[1];
    out.peer = in.peer = 1;
    out.bytes = out.least = 10000;
    in.bytes = in.least = 5000;
    CHECK_EQ(ra__link_move(&s.u, &out, &in, 1, 0), 1);
    CHECK_EQ((int64_t)(uintptr_t)op[0].scratch[RA__LINK_MOVED], 4096);
    CHECK_EQ((int64_t)(uintptr_t)op[1].scratch[RA__LINK_MOVED], 4096);
}

/* -------------------------------------------------------------------------- large figures */
/* 64 million tokens on 16 ranks: more than 2^63 operations. */
TEST(figures_of_long_sequences) {
    static shape s;
    ra_plan *p;
    ra_plan_report g;
    double pairs;
    shape_plain(&s, (int64_t)1 << 26, 16, RA_LAYOUT_CONTIGUOUS, RA_MASK_CAUSAL);
    s.d.q_heads = 64;
    s.d.kv_heads = 8;
    s.d.k_dim = s.d.v_dim = 128;
    s.d.chunk_tokens = 0;
    if (!(p = plan_of(&s, 15))) return;
    CHECK_EQ(ra_plan_query(p, 15, &g), RA_OK);
    pairs = 4194304.0 * 15 * 4194304.0 + 4194304.0 * 4194305.0 / 2;
    CHECK((double)g.pairs == pairs);
    CHECK(g.forward.flops == 2.0 * 256 * 64 * pairs);
    CHECK(g.backward.flops == 2.0 * 640 * 64 * pairs && g.backward.flops > 9.3e18);
    CHECK_EQ(g.forward.tiles_full, ((int64_t)65536 * 15 * 65536 + (int64_t)65536 * 65535 / 2) * 64);
    CHECK_EQ(g.forward.tiles_partial, 65536 * 64);
    ra_plan_destroy(p);
}

/* Sums and products of figures stop at INT64_MAX. */
TEST(figures_saturate) {
    CHECK_EQ(ra__mul_sat((int64_t)1 << 40, (int64_t)1 << 40), INT64_MAX);
    CHECK_EQ(ra__mul_sat((int64_t)1 << 40, 4), (int64_t)1 << 42);
    CHECK_EQ(ra__add_sat(INT64_MAX - 3, 4), INT64_MAX);
    CHECK_EQ(ra__add_sat(INT64_MAX - 4, 4), INT64_MAX);
    CHECK_EQ(ra__add_sat(3, 4), 7);
}

/* The lines that decoding prefetches are those of a later stretch of 16 or 32 keys, each once: of
 * adjacent heads, of one head, with and without gaps, of rows that are not whole lines (q8_0,
 * q4_0). */
TEST(prefetched_lines_are_those_of_a_stretch) {
    static const int64_t bytes[5] = { 512, 256, 136, 34, 18 };
    static char seen[1 << 16];
    int64_t far, lines, token, all;
    for (int64_t i = 0; i < 2 * 5 * 4 * 3; i++) {
        int64_t left = i;
        const int32_t most = 16 << h_pick(&left, 2);
        const int64_t row = bytes[h_pick(&left, 5)];
        const int32_t heads = 1 << h_pick(&left, 4);
        const uintptr_t base = (uintptr_t)1 << 20;
        ra__view kv[2];
        ra__decode x = { 0 };
        ra__stream a[2];
        all = heads * row;
        token = left == 0 ? all : left * 4096 + (all + 63) / 64 * 64;
        if (token != all && all % 64) continue;
        memset(kv, 0, sizeof kv);
        x.count = heads;
        x.most = most;
        for (int64_t j = 0; j < 2; j++) {
            kv[j].data = (const uint8_t *)base + j * 64;
            kv[j].token = token;
            kv[j].head = row;
        }
        ra__decode_streams(&x, kv);
        ra__decode_ahead(a, &x, kv, 32);
        far = 32 + x.rows_ahead[1];
        CHECK(x.rows_ahead[1] >= x.most && x.rows_ahead[1] % x.most == 0);
        CHECK_EQ(a[1].at, base + 64 + (uintptr_t)(far * token));
        memset(seen, 0, sizeof seen);
        lines = (x.most * all + 63) / 64;
        for (int64_t j = 0; j < lines; j++) {
            const int64_t at = (int64_t)(a[1].at - base) - 64 - far * token;
            CHECK(at >= 0 && at < x.most * token && !seen[at / 64]);
            seen[at / 64] = 1;
            a[1].at += 64;
            ra__stream_advance(&a[1], 1);
        }
        for (int64_t j = 0; j < x.most * all; j++) CHECK(seen[(j / all * token + j % all) / 64]);
    }
}

/* Two pools of the same cache: items of the second are not mistaken for done, however many calls
 * are between them. Numbers of turns have 22 bits. */
static ra_status far_apart_rank(ra_world *world, int rank, void *user) {
    enum { ROWS = 256 * 2 * 16 };
    const int64_t none = 0, all = 256, turns = 1 << 22;
    float *const room = (float *)user + rank * 4 * ROWS;
    ra_desc d = ra_desc_make(2, 2, 16, RA_F32, RA_MASK_CAUSAL);
    ra_cache_desc cd = { 0 };
    ra_tensors t = { 0 };
    ra_cache *c;
    cd.travel = RA_INFER_PASS_KV;
    d.tokens = d.kv_tokens = 256;
    d.ranks = 2;
    d.rank = rank;
    t.k.data = room;
    t.v.data = room + ROWS;
    t.q.data = room + 2 * ROWS;
    t.o.data = room + 3 * ROWS;
    ra_status s = ra_cache_create(&c, &d, ra_world_transport(world, rank), &cd);
    if (s) return s;
    c->talk.pass = turns - 1;
    for (int i = 0; i < 2 && !s; i++) {
        for (int j = 0; j < ROWS; j++) room[j] = room[ROWS + j] = room[2 * ROWS + j] = 1.0f;
        memset(room + 3 * ROWS, 0, sizeof *room * ROWS);
        s = ra_infer(c, &t, &none, &all, ra_deadline_ms(20000));
        for (int j = 0; j < ROWS / 2 && !s; j++)           /* a rank has half of the rows */
            if (fabsf(room[3 * ROWS + j] - 1.0f) > 1e-5f) s = RA_E_SHAPE;
        c->talk.pass += turns - 1;
    }
    (void)ra_cache_destroy(c);
    return s;
}

TEST(pools_far_apart) {
    float *room = (float *)calloc(2 * 4 * 256 * 2 * 16, sizeof *room);
    CHECK(room != NULL);
    if (room) CHECK_EQ(ra_world_run(2, far_apart_rank, room, NULL), RA_OK);
    free(room);
}

/* Where int64_t is aligned to 4 bytes, as on 32-bit x86, structs may end with a part of 8 bytes. */
TEST(structs_of_any_size_are_cleared_and_copied) {
    uint8_t from[160], to[160];
    for (size_t n = 0; n < sizeof to; n++) {
        size_t wrong = 0;
        memset(from, 7, sizeof from);
        memset(to, 9, sizeof to);
        ra__struct_copy(to, from, n);
        for (size_t i = 0; i < sizeof to; i++) wrong += to[i] != (i < n ? 7 : 9);
        ra__struct_clear(to, n);
        for (size_t i = 0; i < sizeof to; i++) wrong += to[i] != (i < n ? 0 : 9);
        CHECK_EQ(wrong, 0);
    }
}

static const h_test schedule_tests[] = {
    ENTRY(pools_far_apart),
    ENTRY(bounds_and_pairs_of_rows), ENTRY(needs_and_tiles_by_blocks),
    ENTRY(steps_are_chunks_and_two_rounds), ENTRY(lists_run_to_the_end),
    ENTRY(sparse_masks_run_to_the_end), ENTRY(sendrecv_is_nearly_as_fast_as_post),
    ENTRY(sendrecv_waits_for_no_series),
    ENTRY(transfers_hide_as_predicted), ENTRY(last_messages_end_no_series),
    ENTRY(loans_end_with_their_series), ENTRY(links_never_deadlock),
    ENTRY(links_tell_every_rank_of_a_failure), ENTRY(idle_helpers_quiesce_at_once),
    ENTRY(link_waits_for_what_is_pending),
    ENTRY(unequal_messages_move_together),
    ENTRY(figures_of_long_sequences), ENTRY(figures_saturate),
    ENTRY(prefetched_lines_are_those_of_a_stretch),
    ENTRY(structs_of_any_size_are_cleared_and_copied)
};

int hook_schedule(int argc, char **argv) {
    return hook_main(argc, argv, schedule_tests, sizeof schedule_tests / sizeof schedule_tests[0]);
}

#endif
