#ifndef RINGATTN_TESTS_PROBLEM_H
#define RINGATTN_TESTS_PROBLEM_H

/* The fixture of all tests that compute attention. A problem is what to compute, by position:
 * sizes, mask, score changes, inputs rounded to their dtypes. A setup is how: ranks, layout,
 * strides, transport, calls. A rank_part is the descriptor and the tensors of one rank. The
 * expected results come from the oracles (oracle.h, small.h), which share nothing else. Every gap
 * of every input holds NaN; every gap of every output holds the guard. */
#include "tensors.h"

enum { MAX_RANKS = 64, MAX_B = 3, MOST_RUNS = 512 };
enum { WIRE_SHARED, WIRE_POST, WIRE_SENDRECV, WIRE_NULL }; /* the last: one rank */
enum { CALL_ATTEND, CALL_FORWARD, CALL_STEP, CALL_JOIN, CALL_ATTENTION };

typedef struct problem {
    int32_t B, Hq, Hkv, Dk, Dv, v_in_k, v_column;
    int32_t q_dtype, k_dtype, v_dtype, o_dtype, scores;
    int32_t arith;                     /* RA_ARITH_*; the oracle knows nothing of it */
    int64_t tq[MAX_B], tk[MAX_B];      /* tokens of each sequence */
    int64_t q_max, k_max, q_offset;    /* longest; position of the first query */
    ra_mask mask;
    int64_t docs[16];                  /* room for mask.doc_first */
    int32_t *lo, *hi;                  /* room for mask.lo, mask.hi */
    float scale, softcap;
    float alibi[64], sinks[64], factors[64];
    int32_t bias_b, bias_h, bias_r, bias_k; /* 1: bias differs by sequence, head, row, key */
    int64_t bias_keys;
    uint32_t bias_seed;
    float *bias_of;                    /* [q_max][k_max] the bias; null: see bias_value */
    float *q, *k, *v;                  /* [B][q_max][Hq][Dk], [B][k_max][Hkv][Dk], [..][Dv] */
    uint8_t *absent;                   /* [B][k_max] 1: a key that nobody holds */
    int32_t loose;                     /* 1: scores are large, and so is the tolerance */
    int64_t row_step;                  /* the oracle computes every row_step-th row; 0: 1 */
    float dropout;                     /* weights that are dropped; 0: off */
    uint64_t seed;
    float *d_o;                        /* [B][q_max][Hq][Dv] gradient of O; null: no gradients */
} problem;

typedef struct setup {
    int32_t ranks, layout, chunk_tokens, buffers, isa;
    int32_t weighted, weights[MAX_RANKS];
    int32_t strides, wire, call;
    int32_t threads;                   /* per rank, of CALL_STEP, CALL_JOIN, CALL_ATTENTION */
    int32_t passes;                    /* over one ring; 0: 1 */
    int32_t exact;                     /* 1: hand over the workspace, to the byte */
    int32_t no_lse;                    /* 1: LSE is not requested, 2: not by odd ranks */
    int32_t any_isa;                   /* 1: each rank has another instruction set */
    int32_t train;                     /* 1: a backward pass follows, problem.d_o is there */
    int32_t grad_return;               /* RA_RETURN_* */
    int32_t order;                     /* 0, RA_ORDER_ROUNDS */
    int64_t shift;                     /* RUNS, ARRAY: all positions are this much higher than the
                                        * oracle's; for masks that depend only on differences */
    int64_t spare;                     /* tokens and kv_tokens exceed the lengths of the longest
                                        * sequence by this much, where layout and mask allow it */
    uint32_t seed;                     /* of strides, delays, orders of threads */
    ra_run *q_runs, *k_runs;           /* RUNS; k_runs null: as q_runs */
    int32_t q_run_count[MAX_RANKS], k_run_count[MAX_RANKS];
    int32_t *q_cells[MAX_RANKS], *k_cells[MAX_RANKS];    /* ARRAY: [B][rows] positions */
    int64_t q_rows[MAX_RANKS], k_rows[MAX_RANKS];        /* ARRAY */
    int32_t one_array;                 /* ARRAY: 1: all sequences share the first one's cells */
} setup;

static H_FAST double bias_factor(const problem *p, int head) {
    return p->scores & RA_SCORE_FACTORS ? (double)p->factors[head] : 1;
}

/* Bias is a hash of its coordinates, quarters from -4 to 4: nothing has to be stored. */
static H_FAST float bias_value(const problem *p, int b, int head, int64_t row, int64_t key) {
    uint32_t x = p->bias_seed;
    if (key >= p->bias_keys) return 0;
    if (p->bias_of) return row < 0 ? 0.0f : p->bias_of[row * p->k_max + key]; /* no such row */
    x = (x ^ (p->bias_b ? (uint32_t)b + 1 : 0)) * 0x85EBCA6Bu;
    x = (x ^ (x >> 13) ^ (p->bias_h ? (uint32_t)head + 1 : 0)) * 0xC2B2AE35u;
    x = (x ^ (x >> 15) ^ (p->bias_r ? (uint32_t)row + 1 : 0)) * 0x27D4EB2Fu;
    x = (x ^ (x >> 14) ^ (p->bias_k ? (uint32_t)key + 1 : 0)) * 0x165667B1u;
    return (float)((x >> 16) % 33) * 0.25f - 4;
}

static H_FAST void problem_free(problem *p) {
    free(p->d_o); free(p->bias_of);
    free(p->lo); free(p->hi); free(p->q); free(p->k); free(p->v); free(p->absent);
}

/* -------------------------------------------------------------------------- making problems */
enum { OPTION_SOFTCAP = 8, OPTION_SCALE = 16, OPTIONS = 5 };         /* beside RA_SCORE_* */

enum { M_NONE, M_CAUSAL, M_WINDOW, M_WINDOW_KEEP, M_LEFT, M_RIGHT, M_BOTH, M_BOTH_KEEP, M_PREFIX,
       M_PREFIX_WINDOW, M_PREFIX_KEEP, M_BLOCK, M_BLOCK_KEEP, M_DOCS, M_DOCS_CAUSAL, M_DOCS_KEEP,
       M_DOCS_PREFIX, M_DOCS_ALL, M_DOCS_BOTH, M_INTERVALS, M_BANDS, MASKS };
static const char *const mask_names[MASKS] = {
    "none", "causal", "causal-window", "causal-window-keep", "left", "right", "left-right",
    "left-right-keep", "prefix", "prefix-window", "prefix-window-keep", "block",
    "block-window-keep", "docs", "docs-causal", "docs-causal-window-keep", "docs-causal-prefix",
    "docs-block-prefix-window-keep", "docs-left-right-keep", "intervals", "bands" };

enum { L_CONTIGUOUS, L_ZIGZAG, L_STRIPED, L_RUNS, L_ARRAY, L_CONTIGUOUS_W, L_ZIGZAG_W, LAYOUTS };
static const char *const layout_names[LAYOUTS] = { "contiguous", "zigzag", "striped", "runs",
    "array", "contiguous-weighted", "zigzag-weighted" };
static const int32_t layout_kinds[LAYOUTS] = { RA_LAYOUT_CONTIGUOUS, RA_LAYOUT_ZIGZAG,
    RA_LAYOUT_STRIPED, RA_LAYOUT_RUNS, RA_LAYOUT_ARRAY, RA_LAYOUT_CONTIGUOUS, RA_LAYOUT_ZIGZAG };

/* One sequence, plain f32 multi-head attention, no mask. Lengths, mask and the rest are then set by
 * hand, and the data last. */
static inline void problem_shape(problem *p, int64_t tokens, int32_t q_heads, int32_t kv_heads,
                                 int32_t k_dim, int32_t v_dim) {
    memset(p, 0, sizeof *p);
    p->B = 1;
    p->Hq = q_heads; p->Hkv = kv_heads; p->Dk = k_dim; p->Dv = v_dim;
    p->q_dtype = p->k_dtype = p->v_dtype = p->o_dtype = RA_F32;
    p->tq[0] = p->tk[0] = p->q_max = p->k_max = tokens;
    p->mask.kind = RA_MASK_NONE;
    p->bias_keys = 1;
}

static H_FAST float *normal_rows(int64_t rows, int64_t n, int32_t dtype, h_rng *r) {
    float *x = (float *)malloc((size_t)(rows * n + 1) * sizeof *x);
    for (int64_t i = 0; i < rows * n; i++) x[i] = dtype_round(h_normal(r), dtype);
    return x;
}

/* Unit-normal Q, K, V, and the parameters of score changes. */
static inline void problem_data(problem *p, h_rng *r) {
    p->q = normal_rows(p->B * p->q_max, p->Hq * p->Dk, p->q_dtype, r);
    p->k = normal_rows(p->B * p->k_max, p->Hkv * p->Dk, p->k_dtype, r);
    if (!p->v_in_k) p->v = normal_rows(p->B * p->k_max, p->Hkv * p->Dv, p->v_dtype, r);
    if (!p->absent) p->absent = (uint8_t *)calloc((size_t)(p->B * p->k_max) + 1, 1);
    for (int i = 0; i < p->Hq; i++) {
        p->sinks[i] = h_normal(r);
        p->alibi[i] = (float)pow(2.0, -8.0 * (i + 1) / p->Hq);
        p->factors[i] = (float)pow(2.0, 1 - i % 5) * 0.75f;
    }
    p->bias_seed = h_next(r);
    if (p->bias_seed % 3 == 0) p->alibi[0] = 0;    /* a head without a slope among others */
}

/* A bias with huge values, whose kind depends on the row. Scores must have RA_SCORE_BIAS; lengths
 * and mask must be set. */
static inline void problem_huge_bias(problem *p, h_rng *r) {
    static const float most[8] = { -1e9f, -1e8f, -1e8f, 0, 0, -1e4f, 0, -1e6f };
    static const float other[8] = { -1e9f, -1e8f, -1e9f, -1e9f, 1e9f, -1e4f, -3.4e38f, -1e9f };
    p->bias_r = p->bias_k = p->loose = 1;
    p->bias_b = p->B > 1;              /* a rank's row is another position in each sequence */
    p->bias_keys = p->k_max;
    p->bias_of = (float *)malloc((size_t)(p->q_max * p->k_max) * sizeof *p->bias_of);
    for (int64_t i = 0; i < p->q_max * p->k_max; i++) {
        const int kind = (int)(i / p->k_max % 8);
        p->bias_of[i] = h_one_in(r, kind == 4 ? 50 : 3) ? other[kind] : most[kind];
    }
}

static inline void mask_docs(problem *p, h_rng *r, int64_t span) {
    int64_t at = 0;
    while (p->mask.doc_count < 8 && at < span) {
        p->docs[p->mask.doc_count++] = at;
        at += h_range(r, 1, span / 2 + 1);
    }
    p->mask.doc_first = p->docs;
}

/* Any intervals at all, or bands whose two bounds both rise. */
static inline void mask_intervals(problem *p, h_rng *r, int64_t span, int rising) {
    int64_t a, b, lo = 0, hi = 0;
    p->lo = (int32_t *)malloc((size_t)span * sizeof *p->lo);
    p->hi = (int32_t *)malloc((size_t)span * sizeof *p->hi);
    for (int64_t i = 0; i < span; i++) {
        if (rising) {
            if (hi < p->k_max) hi += h_range(r, 0, 2);
            if (lo < hi && h_one_in(r, 2)) lo++;
            if (hi > p->k_max) hi = p->k_max;
        } else {
            a = h_range(r, 0, p->k_max);
            b = h_range(r, 0, p->k_max);
            lo = a < b ? a : b;
            hi = h_one_in(r, 10) ? lo : a < b ? b : a;
        }
        p->lo[i] = (int32_t)(lo == 0 && h_one_in(r, 4) ? -h_range(r, 0, 99) : lo);
        p->hi[i] = (int32_t)(hi == p->k_max && h_one_in(r, 4) ? hi + h_range(r, 0, 99) : hi);
        if (!rising && h_one_in(r, 30)) p->hi[i] = p->lo[i] - (int32_t)h_range(r, 0, 9);
    }
    p->mask.lo = p->lo;
    p->mask.hi = p->hi;
    p->mask.interval_count = span;
}

/* One of M_*, sizes at random. Lengths must be set. */
static inline void problem_mask(problem *p, h_rng *r, int m) {
    ra_mask *k = &p->mask;
    int64_t span = p->q_offset + p->q_max > p->k_max ? p->q_offset + p->q_max : p->k_max;
    int64_t most = h_one_in(r, 3) ? 8 : h_one_in(r, 12) ? 2000000000 : span;
    memset(k, 0, sizeof *k);
    k->kind = m == M_NONE || (m >= M_LEFT && m <= M_BOTH_KEEP) || m == M_DOCS || m == M_DOCS_BOTH
                  ? RA_MASK_NONE : RA_MASK_CAUSAL;
    if (m == M_WINDOW || m == M_WINDOW_KEEP || m == M_LEFT || m == M_BOTH || m == M_BOTH_KEEP ||
        m == M_PREFIX_WINDOW || m == M_PREFIX_KEEP || m == M_BLOCK_KEEP || m == M_DOCS_KEEP ||
        m == M_DOCS_ALL || m == M_DOCS_BOTH) k->window = h_range(r, 1, most);
    if (m == M_RIGHT || m == M_BOTH || m == M_BOTH_KEEP || m == M_DOCS_BOTH) {
        k->right_limit = h_range(r, 1, most);
    }
    if (m == M_WINDOW_KEEP || m == M_BOTH_KEEP || m == M_PREFIX_KEEP || m == M_BLOCK_KEEP ||
        m == M_DOCS_KEEP || m == M_DOCS_ALL || m == M_DOCS_BOTH) k->keep = h_range(r, 1, most);
    if (m == M_PREFIX || m == M_PREFIX_WINDOW || m == M_PREFIX_KEEP || m == M_DOCS_PREFIX ||
        m == M_DOCS_ALL) k->prefix = h_range(r, 1, most);
    if (m == M_BLOCK || m == M_BLOCK_KEEP || m == M_DOCS_ALL) {
        most = most < 3 ? 3 : most > 1000000000 ? 1000000000 : most;
        k->causal_block = (int32_t)h_range(r, 2, most);
    }
    if (m >= M_DOCS && m <= M_DOCS_BOTH) mask_docs(p, r, span);
    if (m >= M_INTERVALS) {
        k->kind = RA_MASK_INTERVALS;
        mask_intervals(p, r, span, m == M_BANDS);
    }
}

/* Score changes: RA_SCORE_* and OPTION_*. */
static inline void problem_options(problem *p, h_rng *r, int options) {
    int64_t span = p->q_offset + p->q_max > p->k_max ? p->q_offset + p->q_max : p->k_max;
    p->scores = options & 7;
    p->loose = options & (RA_SCORE_ALIBI | RA_SCORE_BIAS | OPTION_SCALE);
    if (options & OPTION_SOFTCAP) p->softcap = h_one_in(r, 2) ? 10 : 1.5f;
    if (options & OPTION_SCALE) p->scale = (float)h_range(r, 1, 64) / 64;
    if (options & RA_SCORE_BIAS) {
        p->bias_h = h_one_in(r, 2);
        p->bias_r = h_one_in(r, 2);
        p->bias_b = (p->B > 1 && p->bias_r) || h_one_in(r, 2);
        p->bias_k = !h_one_in(r, 4);
        p->bias_keys = h_range(r, 1, span + 10);
        if (p->bias_keys % 3 == 0) p->scores |= RA_SCORE_FACTORS;
    }
}

/* What a random problem must have: M_*, L_*, number of ranks, score changes, at most this work. */
enum { ANY = -1 };                     /* at random */
typedef struct wish { int mask, layout, ranks, options; double work; } wish;

static inline int64_t random_tokens(h_rng *r) {
    static const int64_t from[10] = { 1, 5, 62, 32, 64, 126, 130, 130, 250, 380 };
    static const int64_t to[10] = { 4, 31, 66, 130, 128, 130, 260, 200, 420, 700 };
    int i = (int)h_range(r, 0, 9);
    return h_range(r, from[i], to[i]);
}

static inline void random_lengths(problem *p, h_rng *r) {
    int b, cross = h_one_in(r, 4);
    p->B = h_one_in(r, 2) ? 1 : (int32_t)h_range(r, 1, MAX_B);
    p->q_offset = h_one_in(r, 3) ? h_range(r, 1, 200) : 0;
    p->q_max = p->k_max = 0;
    for (b = 0; b < p->B; b++) {
        p->tq[b] = b ? h_range(r, 0, p->tq[0]) : random_tokens(r);
        p->tk[b] = cross ? random_tokens(r) : p->tq[b] + p->q_offset;
        if (p->tq[b] > p->q_max) p->q_max = p->tq[b];
        if (p->tk[b] > p->k_max) p->k_max = p->tk[b];
    }
}

static inline int32_t random_dim(h_rng *r) {
    static const int32_t usual[12] = { 1, 2, 8, 16, 31, 32, 40, 64, 80, 96, 128, 192 };
    return h_one_in(r, 2) ? usual[h_range(r, 0, 11)] : (int32_t)h_range(r, 1, 192);
}

/* Lengths, heads and dims such that the oracle's work stays in bounds. */
static inline void random_shape(problem *p, h_rng *r, double work) {
    static const int32_t heads[10][2] = { { 1, 1 }, { 2, 1 }, { 2, 2 }, { 3, 3 }, { 4, 2 },
                                          { 4, 1 }, { 6, 2 }, { 5, 5 }, { 8, 1 }, { 8, 4 } };
    double pairs;
    int b, i;
    do {
        random_lengths(p, r);
        i = (int)h_range(r, 0, 9);
        p->Hq = heads[i][0];
        p->Hkv = heads[i][1];
        p->Dk = random_dim(r);
        p->Dv = h_one_in(r, 2) ? p->Dk : random_dim(r);
        for (pairs = b = 0; b < p->B; b++) pairs += (double)p->tq[b] * (double)p->tk[b];
    } while (pairs * p->Hq * (p->Dk + p->Dv) > work);
}

static inline void random_problem(problem *p, h_rng *r, const wish *w) {
    int options = w->options >= 0 ? w->options : h_one_in(r, 2) ? 0 : (int)h_range(r, 0, 31);
    problem_shape(p, 1, 1, 1, 1, 1);
    random_shape(p, r, w->work);
    if (h_one_in(r, 10)) {
        p->v_in_k = 1;
        p->Dv = (int32_t)h_range(r, 1, p->Dk);
        p->v_column = (int32_t)h_range(r, 0, p->Dk - p->Dv);
    }
    problem_mask(p, r, w->mask >= 0 ? w->mask : (int)h_range(r, 0, MASKS - 1));
    problem_options(p, r, options);
    p->absent = (uint8_t *)calloc((size_t)(p->B * p->k_max) + 1, 1);
}

static inline void problem_dtypes(problem *p, int32_t q, int32_t k, int32_t v, int32_t o) {
    p->q_dtype = q; p->k_dtype = k; p->v_dtype = p->v_in_k ? k : v; p->o_dtype = o;
}

/* -------------------------------------------------------------------------- making setups */
/* The table of a rank's runs after another's: those of a rank ascending or descending. owner[i]:
 * the rank of made[i], or -1. */
static inline ra_run *runs_by_rank(h_rng *r, int ranks, const ra_run *made, const int *owner,
                                   int64_t n, int32_t *count) {
    ra_run *out = (ra_run *)malloc((size_t)(n + 1) * sizeof *out), *at = out;
    for (int rank = 0; rank < ranks; rank++) {
        const int back = h_one_in(r, 4);
        const ra_run *first = at;
        for (int64_t i = 0; i < n; i++) {
            const int64_t j = back ? n - 1 - i : i;
            if (owner[j] == rank) *at++ = made[j];
        }
        count[rank] = (int32_t)(at - first);
    }
    return out;
}

/* A table of runs over [from, from + tokens) with segments of all kinds in any order; marks what
 * it leaves out in absent if that is not null. */
static inline ra_run *random_runs(h_rng *r, int ranks, const int64_t *span, int32_t *count,
                                  uint8_t *absent) {
    enum { MOST = 48 };
    ra_run made[MOST];
    int owner[MOST], n = 0, i;
    int64_t at = span[0], end = span[0] + span[1], len, s;
    while (at < end) {
        len = n > MOST - 8 ? end - at : h_range(r, 1, span[1] / 3 + 1);
        if (len > end - at) len = end - at;
        s = n <= MOST - 8 && h_one_in(r, 3) ? h_range(r, 1, 4) : 1;
        for (int64_t k = 0; k < s && k < len; k++) {
            made[n].first = at + k;
            made[n].count = (len - k + s - 1) / s;
            made[n].stride = s == 1 && h_one_in(r, 2) ? 0 : s;
            owner[n] = (int)h_range(r, 0, ranks - 1);
            if (absent && h_one_in(r, 6)) owner[n] = -1;
            for (i = 0; owner[n] < 0 && i < made[n].count; i++) absent[made[n].first + i * s] = 1;
            n++;
        }
        at += len;
    }
    return runs_by_rank(r, ranks, made, owner, n, count);
}

static inline int lengths_differ(const problem *p) {
    int differ = 0;
    for (int b = 0; b < p->B; b++) differ |= p->tq[b] != p->q_max || p->tk[b] != p->k_max;
    return differ;
}

/* Cells of all ranks for ARRAY: each position at one rank, some keys nowhere, some cells empty. */
static inline void random_cells(h_rng *r, const problem *p, int ranks, int keys, setup *s) {
    int64_t *rows = keys ? s->k_rows : s->q_rows, most = keys ? p->k_max : p->q_max, i, j;
    int32_t **cells = keys ? s->k_cells : s->q_cells;
    int64_t counts[MAX_B][MAX_RANKS];
    int16_t *owner = (int16_t *)malloc((size_t)(p->B * most + 1) * sizeof *owner);
    int b, rank, spread = h_one_in(r, 2), B = s->one_array ? 1 : p->B;
    memset(counts, 0, sizeof counts);
    for (b = 0; b < B; b++) for (rank = 0, i = 0; i < most; i++) {
        if (spread || h_one_in(r, 20)) rank = (int)h_range(r, 0, ranks - 1);
        if (i >= (keys ? p->tk[b] : p->tq[b])) { owner[b * most + i] = -1; continue; }
        owner[b * most + i] = (int16_t)rank;
        if (keys && h_one_in(r, 15)) { owner[b * most + i] = -1; p->absent[b * most + i] = 1; }
        else counts[b][rank]++;
    }
    for (rank = 0; rank < ranks; rank++) {
        for (rows[rank] = b = 0; b < B; b++) {
            if (counts[b][rank] > rows[rank]) rows[rank] = counts[b][rank];
        }
        if (h_one_in(r, 2)) rows[rank] += h_range(r, 0, 70);
        cells[rank] = (int32_t *)malloc((size_t)(p->B * rows[rank] + 1) * sizeof **cells);
        memset(cells[rank], 0xFF, (size_t)(p->B * rows[rank]) * sizeof **cells);
        for (b = 0; b < B; b++) {
            int32_t *c = cells[rank] + b * rows[rank];
            for (j = i = 0; i < most; i++) if (owner[b * most + i] == rank) {
                c[j++] = (int32_t)(i + (keys ? 0 : p->q_offset));
            }
            for (i = rows[rank] - 1; i > 0 && !spread; i--) {           /* any order at all */
                int32_t t = c[i];
                j = h_range(r, 0, i);
                c[i] = c[j];
                c[j] = t;
            }
        }
        for (b = B; b < p->B; b++) {
            memcpy(cells[rank] + b * rows[rank], cells[rank], (size_t)rows[rank] * sizeof **cells);
        }
    }
    for (b = B; b < p->B && keys; b++) memcpy(p->absent + b * most, p->absent, (size_t)most);
    free(owner);
}

/* RUNS and ARRAY need the same rows in all sequences; lengths that differ are refused there. */
static inline void random_layout(setup *s, problem *p, h_rng *r, int layout) {
    int64_t span[2];
    int b;
    for (b = 0; b < p->B && layout == L_RUNS; b++) { p->tq[b] = p->q_max; p->tk[b] = p->k_max; }
    s->layout = layout_kinds[layout];
    s->weighted = layout >= L_CONTIGUOUS_W;
    for (int i = 0; i < s->ranks && s->weighted; i++) s->weights[i] = (int32_t)h_range(r, 0, 5);
    if (s->weighted) s->weights[h_range(r, 0, s->ranks - 1)] = 3;
    if (s->layout == RA_LAYOUT_RUNS) {
        int holes = h_one_in(r, 3), same = !p->q_offset && p->q_max == p->k_max;
        span[0] = p->q_offset;
        span[1] = p->q_max;
        s->q_runs = random_runs(r, s->ranks, span, s->q_run_count, NULL);
        span[0] = 0;
        span[1] = p->k_max;
        if (!same || h_one_in(r, 2)) {
            s->k_runs = random_runs(r, s->ranks, span, s->k_run_count, holes ? p->absent : NULL);
        }
        for (b = 1; b < p->B; b++) memcpy(p->absent + b * p->k_max, p->absent, (size_t)p->k_max);
    } else if (s->layout == RA_LAYOUT_ARRAY) {
        s->one_array = (s->seed >> 17) % 2 && !lengths_differ(p);
        random_cells(r, p, s->ranks, 0, s);
        random_cells(r, p, s->ranks, 1, s);
    }
}

/* A table of hundreds of runs over [from, from + tokens): of 1, 63, 64, 65 and other lengths, one
 * after another or interleaved by position, ascending or descending. The last of several ranks has
 * none. */
static inline ra_run *short_runs(h_rng *r, int ranks, const int64_t *span, int32_t *count,
                                 uint8_t *absent) {
    static const int64_t lengths[9] = { 1, 2, 16, 31, 63, 64, 64, 65, 130 };
    const int64_t end = span[0] + span[1];
    ra_run *made = (ra_run *)malloc((size_t)(span[1] + 4) * sizeof *made);
    int *owner = (int *)malloc((size_t)(span[1] + 4) * sizeof *owner);
    int64_t at = span[0], n = 0, i, s, len;
    ra_run *out;
    while (at < end) {
        len = lengths[h_range(r, 0, 8)];
        s = h_one_in(r, 3) ? h_range(r, 2, 4) : 1;
        len = len * s < end - at ? len * s : end - at;
        for (int64_t k = 0; k < s && k < len; k++, n++) {
            made[n].first = at + k;
            made[n].count = (len - k + s - 1) / s;
            made[n].stride = s;
            owner[n] = (int)h_range(r, 0, ranks > 2 ? ranks - 2 : ranks - 1);
            if (absent && n && h_one_in(r, 9)) owner[n] = -1;
            for (i = 0; owner[n] < 0 && i < made[n].count; i++) absent[made[n].first + i * s] = 1;
        }
        at += len;
    }
    out = runs_by_rank(r, ranks, made, owner, n, count);
    free(made);
    free(owner);
    return out;
}

/* Replaces the tables of a setup with RUNS by such tables. */
static inline void short_layout(setup *s, const problem *p, h_rng *r) {
    int64_t q[2], k[2];
    int b, own = p->q_offset || p->q_max != p->k_max || h_one_in(r, 2), holes = h_one_in(r, 3);
    q[0] = p->q_offset;
    q[1] = p->q_max;
    k[0] = 0;
    k[1] = p->k_max;
    free(s->q_runs);
    free(s->k_runs);
    memset(p->absent, 0, (size_t)(p->B * p->k_max));
    s->q_runs = short_runs(r, s->ranks, q, s->q_run_count, NULL);
    s->k_runs = own ? short_runs(r, s->ranks, k, s->k_run_count, holes ? p->absent : NULL) : NULL;
    for (b = 1; b < p->B; b++) memcpy(p->absent + b * p->k_max, p->absent, (size_t)p->k_max);
}

/* 1: this machine has the instruction set; otherwise the test is skipped. */
static inline int isa_is_here(int32_t isa) {
    if (!ra_isa_available(isa)) h_skip("this machine does not have the instruction set");
    return ra_isa_available(isa);
}

static inline int32_t random_isa(h_rng *r) {
    int32_t isa = (int32_t)h_range(r, RA_ISA_AUTO, RA_ISA_NEON);
    return isa == RA_ISA_AUTO || ra_isa_available(isa) ? isa : RA_ISA_SCALAR;
}

static inline void random_setup(setup *s, problem *p, h_rng *r, const wish *w) {
    static const int32_t worlds[7] = { 1, 2, 3, 4, 5, 7, 8 };
    static const int32_t chunks[6] = { 0, 64, 64, 100, 128, 192 };
    int layout = w->layout >= 0 ? w->layout : (int)h_range(r, 0, LAYOUTS - 1);
    memset(s, 0, sizeof *s);
    s->seed = h_next(r);
    if ((s->seed >> 20) % 4 == 0) s->spare = 1 + (s->seed >> 22) % 90;
    s->ranks = w->ranks > 0 ? w->ranks : worlds[h_range(r, 0, 6)];
    random_layout(s, p, r, layout);
    s->chunk_tokens = chunks[h_range(r, 0, 5)];
    s->buffers = (int32_t)h_range(r, 0, 4);
    if ((s->seed >> 14) % 3 == 0 && s->buffers != 1) s->order = RA_ORDER_ROUNDS;
    s->isa = random_isa(r);
    s->strides = (int32_t)h_range(r, STRIDES_PACKED, STRIDES_MIXED);
    s->wire = h_one_in(r, 2) ? WIRE_SHARED : (int32_t)h_range(r, WIRE_POST, WIRE_SENDRECV);
    s->call = (int32_t)h_range(r, CALL_ATTEND, CALL_JOIN);
    s->passes = h_one_in(r, 4) ? 2 : 1;
    s->exact = h_one_in(r, 2);
    s->no_lse = h_one_in(r, 8);
    s->any_isa = h_one_in(r, 6);
    if (s->ranks == 1 && h_one_in(r, 2)) s->wire = WIRE_NULL;
    s->threads = s->call >= CALL_STEP ? (int32_t)h_range(r, 1, 3) : 0;
    if (s->ranks == 1 && layout <= L_ARRAY && h_one_in(r, 2)) {
        s->call = CALL_ATTENTION;
        s->threads = (int32_t)h_range(r, 1, 5);
    }
}

static inline void setup_free(setup *s) {
    free(s->q_runs);
    free(s->k_runs);
    for (int i = 0; i < s->ranks; i++) { free(s->q_cells[i]); free(s->k_cells[i]); }
}

/* Random shares of the units of cuts (blocks, or two mirrored blocks); some ranks get none. */
static inline void uneven(setup *s, const problem *p, h_rng *r) {
    int64_t units = (p->k_max + 63) / 64;
    if (s->layout == RA_LAYOUT_ZIGZAG) units = (units + 1) / 2;
    s->weighted = 1;
    memset(s->weights, 0, sizeof s->weights);
    for (int i = 0; i < units; i++) s->weights[h_range(r, 0, s->ranks - 1)]++;
}

/* The gradient of O, and the seed of dropout. */
static inline void problem_cotangent(problem *p, h_rng *r) {
    p->d_o = normal_rows(p->B * p->q_max, p->Hq * p->Dv, p->o_dtype, r);
    p->seed = (uint64_t)h_next(r) << 32 | h_next(r);
}

/* A problem of `blocks` blocks (the last one short) and random everything else. train: it is square
 * and has gradients. */
static inline void problem_of_blocks(problem *p, h_rng *r, int mask, int64_t blocks, int32_t isa,
                                     int train) {
    static const int32_t heads[4][2] = { { 2, 1 }, { 1, 1 }, { 3, 3 }, { 4, 2 } };
    int i = (int)h_range(r, 0, 3);
    problem_shape(p, blocks * 64 - h_range(r, 0, 63), heads[i][0], heads[i][1],
                  (int32_t)h_range(r, 1, 24), (int32_t)h_range(r, 1, 24));
    if (!train && h_one_in(r, 4)) {    /* queries after a past, or unlike the keys */
        p->q_offset = h_range(r, 0, 200);
        p->tq[0] = p->q_max = h_range(r, 5, p->k_max);
    }
    if (h_one_in(r, 5)) {
        p->B = 2;
        p->tq[1] = p->q_max - p->q_max / 70;
        p->tk[1] = train ? p->tq[1] : p->k_max;
    }
    if (h_one_in(r, 4)) {
        p->v_in_k = 1;
        p->Dv = (p->Dk + 1) / 2;
    }
    problem_mask(p, r, mask);
    problem_options(p, r, h_one_in(r, 2) ? (int)h_range(r, 0, 31) : 0);
    if (h_one_in(r, 3)) {
        problem_dtypes(p, (int32_t)h_range(r, 1, 3), (int32_t)h_range(r, 1, 3),
                       (int32_t)h_range(r, 1, 3), (int32_t)h_range(r, 1, 3));
    }
    if (isa == RA_ISA_AVX512_BF16 || isa == RA_ISA_AMX) {
        problem_dtypes(p, RA_BF16, RA_BF16, RA_BF16, (int32_t)h_range(r, 1, 3));
        if (h_one_in(r, 3)) {          /* by request */
            p->arith = RA_ARITH_BF16;
            problem_dtypes(p, (int32_t)h_range(r, 1, 3), (int32_t)h_range(r, 1, 3),
                           (int32_t)h_range(r, 1, 3), p->o_dtype);
        } else if (!train && h_one_in(r, 3)) {         /* integers */
            p->Dk = p->v_in_k ? 64 : 32;
            p->Dv = 32;
            problem_dtypes(p, (int32_t)h_range(r, 1, 3), RA_Q8_0, RA_Q8_0, p->o_dtype);
        }
    }
    problem_data(p, r);
    if (!train) return;
    problem_cotangent(p, r);
    if (h_one_in(r, 4) && !p->arith) p->dropout = 0.25f;
}

/* The same problem on that many ranks in another setup. */
static inline void variant(setup *s, h_rng *r, int ranks) {
    static const int32_t chunks[5] = { 64, 128, 192, 320, 0 };
    s->ranks = ranks;
    s->weighted = 0;
    s->seed = h_next(r);
    s->chunk_tokens = chunks[h_range(r, 0, 4)];
    s->buffers = (int32_t)h_range(r, 0, 4);
    if (s->order && s->buffers == 1) s->buffers = 2;
    s->wire = h_one_in(r, 2) ? WIRE_SHARED : (int32_t)h_range(r, WIRE_POST, WIRE_SENDRECV);
    s->call = (int32_t)h_range(r, CALL_FORWARD, CALL_JOIN);
    s->threads = s->call >= CALL_STEP ? (int32_t)h_range(r, 1, 3) : 0;
    s->strides = (int32_t)h_range(r, STRIDES_PACKED, STRIDES_MIXED);
}

/* -------------------------------------------------------------------------- one line per case */
static inline void describe_mask(const ra_mask *m) {
    static const char *const kinds[4] = { "unset", "none", "causal", "intervals" };
    h_more("mask %s", kinds[m->kind & 3]);
    if (m->causal_block) h_more(" block %d", m->causal_block);
    if (m->window) h_more(" window %lld", (long long)m->window);
    if (m->right_limit) h_more(" right %lld", (long long)m->right_limit);
    if (m->prefix) h_more(" prefix %lld", (long long)m->prefix);
    if (m->keep) h_more(" keep %lld", (long long)m->keep);
    for (int64_t i = 0; i < m->doc_count; i++)
        h_more("%s%lld", i ? "," : " docs ", (long long)m->doc_first[i]);
}

static inline void describe_case(const problem *p, const setup *s) {
    static const char *const wires[4] = { "shared", "post", "sendrecv", "null" };
    static const char dtypes[] = "?fhbq4";
    static const char *const calls[5] = { "attend", "forward", "step", "join", "attention" };
    static const char *const kinds[6] = { "unset", "contiguous", "zigzag", "striped", "runs",
                                          "array" };
    static const char *const strides[6] = { "packed", "padded", "3C", "permuted", "inner",
                                            "mixed" };
    h_context("B %d Tq", p->B);
    for (int b = 0; b < p->B; b++) h_more("%s%lld", b ? "," : " ", (long long)p->tq[b]);
    for (int b = 0; b < p->B; b++) h_more("%s%lld", b ? "," : " Tk ", (long long)p->tk[b]);
    h_more(" offset %lld heads %d/%d dims %d/%d ", (long long)p->q_offset, p->Hq, p->Hkv, p->Dk,
           p->Dv);
    if (p->v_in_k) h_more("v in k at %d ", p->v_column);
    h_more("qkvo %c%c%c%c ", dtypes[p->q_dtype], dtypes[p->k_dtype], dtypes[p->v_dtype],
           dtypes[p->o_dtype]);
    describe_mask(&p->mask);
    if (p->arith) h_more(" arith %d", (int)p->arith);
    if (p->scale != 0) h_more(" scale %g", (double)p->scale);
    if (p->softcap != 0) h_more(" cap %g", (double)p->softcap);
    if (p->scores & RA_SCORE_ALIBI) h_more(" alibi");
    if (p->scores & RA_SCORE_SINKS) h_more(" sinks");
    if (p->scores & RA_SCORE_BIAS)
        h_more(" bias %d%d%d%d keys %lld", p->bias_b, p->bias_h, p->bias_r, p->bias_k,
               (long long)p->bias_keys);
    if (p->scores & RA_SCORE_FACTORS) h_more(" factors");
    h_more(" | %s%s P %d chunk %d buffers %d%s %s strides %s", kinds[s->layout],
           s->weighted ? " weighted" : "", s->ranks, s->chunk_tokens, s->buffers,
           s->order ? " rounds" : "", s->any_isa ? "mixed" : ra_isa_name(s->isa),
           strides[s->strides]);
    h_more(" %s %s threads %d passes %d%s%s", wires[s->wire], calls[s->call], s->threads,
           s->passes, s->exact ? " exact" : "", s->no_lse ? " no lse" : "");
    if (s->shift) h_more(" shift %lld", (long long)s->shift);
    if (h_run.verbose && h_run.case_now >= 0)
        printf("%s %lld: %s\n", h_run.test, (long long)h_run.case_now, h_run.context);
}

static inline void setup_plain(setup *s, int ranks, int32_t layout) {
    memset(s, 0, sizeof *s);
    s->ranks = ranks;
    s->layout = layout;
    s->call = CALL_FORWARD;
    s->seed = 4;
}

/* -------------------------------------------------------------------------- one rank
 * Its part of a problem, and how its calls end (world.h). */
typedef struct rank_part {
    const problem *p;
    const setup *s;
    int rank;
    ra_status status;
    ra_desc d;
    ra_tensors t;
    ra_error error;
    int64_t q_rows, k_rows, q_len[MAX_B], k_len[MAX_B];
    int32_t *q_pos, *k_pos;            /* [B][rows] the oracle's; -1: empty cell or no row */
    int32_t *q_given, *k_given;        /* ARRAY: the same as the library gets them */
    view q, k, v, o, lse, bias, d_o, d_q, d_k, d_v;
    float d_sinks[64], *d_bias;        /* d_bias: [B][Hq][q_rows + 1][k_max] */
    uint64_t hash;                     /* of the inputs */
    uint8_t *workspace, *workspace_end; /* what was allocated, and where the guard begins */
    ra_ring *ring;
    ra_plan *plan;
    ra_plan_report report;
    ra_ring_counters counters;
} rank_part;

static inline void describe_layout(const setup *s, ra_layout *l) {
    l->kind = s->layout;
    if (s->weighted) l->weights = s->weights;
    if (s->layout == RA_LAYOUT_RUNS) {
        l->q_runs = s->q_runs;
        l->q_run_count = s->q_run_count;
        l->k_runs = s->k_runs;
        l->k_run_count = s->k_runs ? s->k_run_count : NULL;
    }
    if (s->layout == RA_LAYOUT_ARRAY) {
        l->q_rows = s->q_rows;
        l->k_rows = s->k_rows;
    }
}

static inline int64_t tokens_to_spare(const problem *p, const setup *s) {
    if (s->shift || s->layout > RA_LAYOUT_STRIPED) return 0;
    return p->mask.kind == RA_MASK_INTERVALS ? 0 : s->spare;
}

/* The descriptor of one rank. Fields that may be left 0 are left 0 where the seed says so. */
static inline ra_desc rank_desc(const problem *p, const setup *s, int rank) {
    ra_desc d = { 0 };
    int r, self = 1;
    int64_t spare = tokens_to_spare(p, s);
    d.sequences = p->B == 1 && (s->seed & 1) ? 0 : p->B;
    d.ranks = s->ranks;
    d.rank = rank;
    d.q_heads = p->Hq; d.kv_heads = p->Hkv; d.k_dim = p->Dk; d.v_dim = p->Dv;
    d.q_dtype = p->q_dtype; d.k_dtype = p->k_dtype; d.o_dtype = p->o_dtype;
    d.v_dtype = p->v_in_k && (s->seed & 2) ? 0 : p->v_dtype;
    d.v_in_k = p->v_in_k; d.v_column = p->v_column;
    d.scores = p->scores;
    d.tokens = p->q_max;
    d.q_offset = p->q_offset + (s->layout == RA_LAYOUT_ARRAY ? 0 : s->shift);
    for (int b = 0; b < p->B; b++) self &= p->tk[b] == p->tq[b] + p->q_offset;
    d.kv_tokens = self && (s->seed & 4) ? 0 : p->k_max + s->shift;
    if (s->layout == RA_LAYOUT_ARRAY) {
        for (d.tokens = d.kv_tokens = r = 0; r < s->ranks; r++) {
            d.tokens += s->q_rows[r];
            d.kv_tokens += s->k_rows[r];
        }
    } else if (s->layout == RA_LAYOUT_RUNS && s->call == CALL_ATTENTION) {
        int32_t n = s->k_runs ? s->k_run_count[0] : s->q_run_count[0];
        const ra_run *k = s->k_runs ? s->k_runs : s->q_runs;
        for (d.kv_tokens = r = 0; r < n; r++) d.kv_tokens += k[r].count;
    } else if (lengths_differ(p) || spare) {
        d.tokens += spare;
        d.kv_tokens += d.kv_tokens ? spare : 0;
        d.tokens_of = p->tq;
        d.kv_tokens_of = d.kv_tokens ? p->tk : NULL;
    }
    d.mask = p->mask;
    if (s->call != CALL_ATTENTION || s->layout < RA_LAYOUT_RUNS) describe_layout(s, &d.layout);
    d.scale = p->scale;
    d.softcap = p->softcap;
    d.arith = p->arith;
    d.chunk_tokens = s->chunk_tokens;
    d.buffers = s->buffers;
    d.order = s->order;
    d.threads = s->threads;
    d.train = s->train;
    if (s->train) d.dropout = p->dropout;
    d.grad_return = s->grad_return;
    d.isa = s->isa;
    if (s->any_isa) d.isa = RA_ISA_SCALAR + rank % RA_ISA_NEON;
    if (s->any_isa && !ra_isa_available(d.isa)) d.isa = RA_ISA_SCALAR;
    return d;
}

/* L1 has no plan: there positions come with the call, as runs or as an array. */
static inline int positions_with_call(const setup *s) {
    return s->layout == RA_LAYOUT_ARRAY ||
           (s->layout == RA_LAYOUT_RUNS && s->call == CALL_ATTENTION);
}

/* Runs of one tensor of a rank, from the plan or from the table. */
static inline int32_t part_runs(const rank_part *e, const ra_plan *plan, int keys, int b,
                                ra_run *runs) {
    const setup *s = e->s;
    int own = keys && s->k_runs;
    int32_t n = own ? s->k_run_count[0] : s->q_run_count[0];
    if (!positions_with_call(s)) {
        return keys ? ra_plan_k_runs(plan, e->rank, b, runs, MOST_RUNS)
                    : ra_plan_q_runs(plan, e->rank, b, runs, MOST_RUNS);
    }
    memcpy(runs, own ? s->k_runs : s->q_runs, (size_t)n * sizeof *runs);
    return n;
}

/* Positions [B][*rows] of one tensor of a rank, from runs or from the cells. */
static inline int32_t *part_positions(const rank_part *e, const ra_plan *plan, int keys,
                                      int64_t *rows, int64_t *len) {
    const problem *p = e->p;
    const setup *s = e->s;
    ra_run runs[MOST_RUNS];
    int32_t *out, n = 0, i;
    int64_t most = 0;
    if (s->layout == RA_LAYOUT_ARRAY) {
        most = keys ? s->k_rows[e->rank] : s->q_rows[e->rank];
        out = (int32_t *)malloc(((size_t)(most * p->B) + 1) * sizeof *out);
        memcpy(out, keys ? s->k_cells[e->rank] : s->q_cells[e->rank],
               (size_t)(most * p->B) * sizeof *out);
        for (int32_t b = 0; b < p->B; b++) len[b] = most;
        *rows = most;
        return out;
    }
    for (int32_t b = 0; b < p->B; b++) {
        n = part_runs(e, plan, keys, b, runs);
        for (len[b] = i = 0; i < n && i < MOST_RUNS; i++) len[b] += runs[i].count;
        if (len[b] > most) most = len[b];
    }
    *rows = most;
    out = (int32_t *)malloc(((size_t)(most * p->B) + 1) * sizeof *out);
    memset(out, 0xFF, (size_t)(most * p->B) * sizeof *out);
    for (int32_t b = 0; b < p->B; b++) {
        int32_t *at = out + b * most;
        n = part_runs(e, plan, keys, b, runs);
        (void)runs_expand(at, runs, n < MOST_RUNS ? n : MOST_RUNS, s->shift);
    }
    return out;
}

/* Bias of this rank's rows, [B or 1][Hq or 1][rows or 1][keys or 1], key or row innermost. If it
 * differs by row, sequences have separate biases, because their rows may have other positions. */
static inline void part_bias(rank_part *e) {
    const problem *p = e->p;
    int64_t nb = p->bias_b ? p->B : 1, nh = p->bias_h ? p->Hq : 1;
    int64_t nr = p->bias_r ? e->q_rows : 1, nk = p->bias_k ? p->bias_keys : 1;
    int64_t n = nb * nh * nr * nk;
    int swap = (e->s->seed >> 5) & 1, b, head;
    float *data = (float *)malloc((size_t)(n + 1) * sizeof *data);
    ra_bias *bias = &e->t.bias;
    memset(data, 0xFF, (size_t)(n + 1) * sizeof *data);
    bias->data = data;
    bias->keys = p->bias_keys;
    bias->batch_step = p->bias_b ? nh * nr * nk * 4 : 0;
    bias->head_step = p->bias_h ? nr * nk * 4 : 0;
    bias->row_step = p->bias_r ? (swap ? 4 : nk * 4) : 0;
    bias->key_step = p->bias_k ? (swap ? nr * 4 : 4) : 0;
    for (b = 0; b < nb; b++) for (head = 0; head < nh; head++) for (int64_t i = 0; i < nr; i++) {
        int64_t row = p->bias_r ? (int64_t)e->q_pos[b * e->q_rows + i] - p->q_offset : 0;
        for (int64_t k = 0; k < nk; k++) {
            data[(b * bias->batch_step + head * bias->head_step + i * bias->row_step +
                  k * bias->key_step) / 4] = bias_value(p, b, head, row, k);
        }
    }
    e->bias.mem = (uint8_t *)data;
    e->bias.bytes = (size_t)n * 4;
}

/* One buffer with Q, K and V adjacent in each token, as in llm.c, if shapes allow it. */
static inline int part_interleaves(const rank_part *e) {
    const view *q = &e->q, *k = &e->k, *v = &e->v;
    return e->s->strides == STRIDES_INTERLEAVED && !e->p->v_in_k &&
           q->dtype == k->dtype && q->dtype == v->dtype && q->rows == k->rows &&
           q->heads == k->heads && q->dim == k->dim && q->dim == v->dim;
}

static inline int stride_kind(const rank_part *e, int tensor) {
    const uint32_t seed = e->s->seed + 2654435769u * (uint32_t)e->rank;
    return e->s->strides == STRIDES_MIXED ? (int)((seed >> (3 * tensor)) % 5u) : e->s->strides;
}

static inline void part_views(rank_part *e) {
    const problem *p = e->p;
    const setup *s = e->s;
    e->q = view_of(p->q_dtype, e->q_rows, p->Hq, p->Dk);
    e->k = view_of(p->k_dtype, e->k_rows, p->Hkv, p->Dk);
    e->v = view_of(p->v_dtype, e->k_rows, p->Hkv, p->Dv);
    e->o = view_of(p->o_dtype, e->q_rows, p->Hq, p->Dv);
    e->lse = view_of(RA_F32, e->q_rows, p->Hq, 1);
    view_make(&e->q, stride_kind(e, 0), p->B, 0, 0xFF);
    if (part_interleaves(e)) {
        view_free(&e->q);
        e->q.bytes = (size_t)(p->B * e->q.batch) + 1;
        e->q.mem = (uint8_t *)malloc(e->q.bytes);
        memset(e->q.mem, 0xFF, e->q.bytes);
        view_shape(&e->k, STRIDES_INTERLEAVED, p->B, 1);
        view_shape(&e->v, STRIDES_INTERLEAVED, p->B, 2);
        e->k.mem = e->v.mem = e->q.mem;
        e->k.borrowed = e->v.borrowed = 1;
    } else {
        view_make(&e->k, stride_kind(e, 1), p->B, 1, 0xFF);
        if (!p->v_in_k) view_make(&e->v, stride_kind(e, 2), p->B, 2, 0xFF);
    }
    view_make(&e->o, stride_kind(e, 3), p->B, 1, GUARD);
    view_make(&e->lse, stride_kind(e, 4), p->B, 2, GUARD);
    view_fill(&e->q, p->B, e->q_pos, p->q, p->q_max, p->q_offset);
    view_fill(&e->k, p->B, e->k_pos, p->k, p->k_max, 0);
    if (!p->v_in_k) view_fill(&e->v, p->B, e->k_pos, p->v, p->k_max, 0);
    if (!s->train) return;
    e->d_o = view_of(p->o_dtype, e->q_rows, p->Hq, p->Dv);
    e->d_q = view_of(RA_F32, e->q_rows, p->Hq, p->Dk);
    e->d_k = view_of(RA_F32, e->k_rows, p->Hkv, p->Dk);
    e->d_v = view_of(RA_F32, e->k_rows, p->Hkv, p->Dv);
    view_make(&e->d_o, stride_kind(e, 5), p->B, 0, 0xFF);
    view_make(&e->d_q, stride_kind(e, 6), p->B, 0, 0);
    view_make(&e->d_k, stride_kind(e, 7), p->B, 1, 0);
    view_make(&e->d_v, stride_kind(e, 8), p->B, 2, 0);
    view_fill(&e->d_o, p->B, e->q_pos, p->d_o, p->q_max, p->q_offset);
}

static inline uint64_t part_hash(const rank_part *e) {
    return view_hash(&e->q) ^ (view_hash(&e->k) * 3) ^ (e->v.mem ? view_hash(&e->v) * 5 : 0) ^
           (e->bias.mem ? view_hash(&e->bias) * 7 : 0) ^
           (e->d_o.mem ? view_hash(&e->d_o) * 11 : 0);
}

static inline int32_t *positions_given(const int32_t *pos, int64_t n, int64_t shift) {
    int32_t *out = (int32_t *)malloc((size_t)(n + 1) * sizeof *out);
    for (int64_t i = 0; i < n; i++) out[i] = pos[i] < 0 ? -1 : (int32_t)(pos[i] + shift);
    return out;
}

static inline void part_tensors(rank_part *e) {
    const problem *p = e->p;
    const setup *s = e->s;
    part_views(e);
    e->t.q = view_in(&e->q);
    e->t.k = view_in(&e->k);
    if (!p->v_in_k) e->t.v = view_in(&e->v);
    e->t.o = view_out(&e->o);
    if (!s->no_lse || (s->no_lse == 2 && e->rank % 2 == 0)) e->t.lse = view_out(&e->lse);
    if (s->train) {
        e->t.seed = p->seed;
        if (p->scores & RA_SCORE_SINKS) e->t.d_sinks = e->d_sinks;
        if (p->scores & RA_SCORE_BIAS) {
            ra_bias_out *bias = &e->t.d_bias;
            bias->keys = p->k_max + s->shift;
            bias->key_step = 4;
            bias->row_step = 4 * bias->keys;
            bias->head_step = (e->q_rows + 1) * bias->row_step;
            bias->batch_step = p->Hq * bias->head_step;
            e->d_bias = (float *)calloc((size_t)(p->B * bias->batch_step) + 4, 1);
            bias->data = e->d_bias;
        }
        e->t.d_o = view_in(&e->d_o);
        e->t.d_q = view_out(&e->d_q);
        e->t.d_k = view_out(&e->d_k);
        if (!p->v_in_k) e->t.d_v = view_out(&e->d_v);
    }
    if (s->layout == RA_LAYOUT_ARRAY) {
        e->q_given = positions_given(e->q_pos, p->B * e->q_rows, s->shift);
        e->k_given = positions_given(e->k_pos, p->B * e->k_rows, s->shift);
        e->t.q_pos.array = e->q_given;
        e->t.q_pos.count = e->q_rows;
        e->t.q_pos.batch_step = s->one_array ? 0 : e->q_rows;
        e->t.k_pos.array = e->k_given;
        e->t.k_pos.count = e->k_rows;
        e->t.k_pos.batch_step = s->one_array ? 0 : e->k_rows;
    }
    if (s->layout == RA_LAYOUT_RUNS && s->call == CALL_ATTENTION) {
        e->t.q_pos.runs = s->q_runs;
        e->t.q_pos.count = s->q_run_count[0];
        e->t.k_pos.runs = s->k_runs ? s->k_runs : s->q_runs;
        e->t.k_pos.count = s->k_runs ? s->k_run_count[0] : s->q_run_count[0];
    }
    if (p->scores & RA_SCORE_ALIBI) e->t.alibi = p->alibi;
    if (p->scores & RA_SCORE_SINKS) e->t.sinks = p->sinks;
    if (p->scores & RA_SCORE_BIAS) part_bias(e);
    if (p->scores & RA_SCORE_FACTORS) e->t.bias_factors = p->factors;
    e->hash = part_hash(e);
}

/* plan: of any of the ranks; not needed if positions come with the call. */
static inline void part_make(rank_part *e, const problem *p, const setup *s, const ra_plan *plan,
                             int rank) {
    memset(e, 0, sizeof *e);
    e->p = p;
    e->s = s;
    e->rank = rank;
    e->d = rank_desc(p, s, rank);
    e->d.error = &e->error;
    e->q_pos = part_positions(e, plan, 0, &e->q_rows, e->q_len);
    e->k_pos = part_positions(e, plan, 1, &e->k_rows, e->k_len);
    part_tensors(e);
}

static inline void part_free(rank_part *e) {
    view_free(&e->q); view_free(&e->k); view_free(&e->v); view_free(&e->o); view_free(&e->lse);
    free(e->d_bias);
    view_free(&e->d_o); view_free(&e->d_q); view_free(&e->d_k); view_free(&e->d_v);
    free(e->bias.mem);
    free(e->workspace);
    free(e->q_pos); free(e->k_pos);
    free(e->q_given); free(e->k_given);
}

#endif
