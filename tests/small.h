/* Small random problems for tests that run whole worlds at random: problem and setup of the fixture
 * (problem.h) in few numbers, one generator for all that is random, an allocator that checks, and a
 * second oracle, written from the text of the API section alone, for the result of any one row. */
#if !defined(RINGATTN_TEST_SMALL_H)
#define RINGATTN_TEST_SMALL_H

#include "problem.h"

static h_rng small_rng;

static inline uint32_t small_rand(uint32_t below) { return h_next(&small_rng) % below; }

static inline int small_chance(int percent) { return (int)small_rand(100) < percent; }
static inline int small_range(int lo, int hi) {
    return lo + (int)small_rand((uint32_t)(hi - lo + 1));
}
static inline float small_float(void) { return (float)small_rand(1u << 20) / 524288.0f - 1.0f; }

static inline void small_seed(uint64_t seed) {
    small_rng.state = seed;
    (void)h_next(&small_rng);          /* the first number of a small seed is small */
}

static inline void *small_memory(size_t bytes) {
    void *p = NULL;
    if (posix_memalign(&p, 64, bytes + 64)) abort();
    return p;
}

/* -------------------------------------------------------------------------- allocator
 * Counts, fails on request, returns memory full of garbage, and knows what was not freed. */
typedef struct small_heap {
    int64_t live, calls, fail_at;      /* blocks; calls so far; this call fails, counted from 1 */
    int64_t bytes;                     /* of live blocks */
    int wrong;                         /* frees with another size, or of unknown memory */
    void *first;
} small_heap;

typedef struct small_block {
    struct small_block *next, *before;
    void *base;
    size_t bytes;
} small_block;

static inline void *small_heap_alloc(void *ctx, size_t bytes, size_t align) {
    small_heap *heap = (small_heap *)ctx;
    size_t lead = align < sizeof(small_block) ? sizeof(small_block) : align;
    void *base = NULL;
    small_block *block;
    heap->calls++;
    if (heap->calls == heap->fail_at || !align || (align & (align - 1))) return NULL;
    if (bytes > (size_t)1 << 26) return NULL;          /* the limit for fuzzers */
    lead = (lead + align - 1) / align * align;
    if (posix_memalign(&base, align < 16 ? 16 : align, lead + bytes)) return NULL;
    memset(base, 0xCD, lead + bytes);
    block = (small_block *)(void *)((uint8_t *)base + lead) - 1;
    block->base = base;
    block->bytes = bytes;
    block->before = NULL;
    block->next = (small_block *)heap->first;
    if (block->next) block->next->before = block;
    heap->first = block;
    heap->live++;
    heap->bytes += (int64_t)bytes;
    return block + 1;
}

static inline void small_heap_free(void *ctx, void *ptr, size_t bytes) {
    small_heap *heap = (small_heap *)ctx;
    small_block *block = (small_block *)ptr - 1;
    if (!ptr || block->bytes != bytes) { heap->wrong++; return; }
    if (block->before) block->before->next = block->next;
    else heap->first = block->next;
    if (block->next) block->next->before = block->before;
    heap->live--;
    heap->bytes -= (int64_t)bytes;
    memset(ptr, 0xDD, bytes);
    free(block->base);
}

static inline ra_allocator small_heap_allocator(small_heap *heap) {
    ra_allocator a;
    a.alloc = small_heap_alloc;
    a.free = small_heap_free;
    a.ctx = heap;
    return a;
}

/* What the library leaked on purpose. */
static inline void small_heap_clear(small_heap *heap) {
    while (heap->first) {
        small_block *block = (small_block *)heap->first;
        heap->first = block->next;
        free(block->base);
    }
}

/* -------------------------------------------------------------------------- problem */

typedef struct small {
    problem p;
    setup s;
    ra_desc d;                         /* of rank 0; its pointers go into p and s */
} small;

/* After a change of p or s. */
static inline void small_desc(small *s) { s->d = rank_desc(&s->p, &s->s, 0); }

static inline float *small_fill(int64_t n, float amplitude, int dtype) {
    float *x = (float *)small_memory((size_t)n * 4);
    for (int64_t i = 0; i < n; i++) x[i] = dtype_round(small_float() * amplitude, dtype);
    return x;
}

static inline void small_data(small *s) {
    problem *p = &s->p;
    const int64_t queries = p->B * p->q_max * p->Hq, keys = p->B * p->k_max * p->Hkv;
    p->q = small_fill(queries * p->Dk, small_chance(20) ? 6.0f : 1.5f, p->q_dtype);
    p->k = small_fill(keys * p->Dk, 1.5f, p->k_dtype);
    if (!p->v_in_k) p->v = small_fill(keys * p->Dv, 1.0f, p->v_dtype);
    if (!p->absent) p->absent = (uint8_t *)calloc((size_t)(p->B * p->k_max), 1);
    for (int i = 0; i < p->Hq; i++) {
        p->alibi[i] = 0.1f * small_float();
        p->sinks[i] = 3.0f * small_float();
        p->factors[i] = 0.75f * (float)(1 + i % 3);
    }
    p->bias_seed = small_rand(1u << 30);
}

/* A problem of one shape on `ranks` ranks, contiguous. Call small_desc and small_data when the rest
 * is set. shape: q_heads, kv_heads, k_dim, v_dim. */
static inline void small_plain(small *s, int ranks, int64_t tokens, const int *shape) {
    memset(s, 0, sizeof *s);
    problem_shape(&s->p, tokens, shape[0], shape[1], shape[2], shape[3]);
    setup_plain(&s->s, ranks, RA_LAYOUT_CONTIGUOUS);
    s->s.seed = 0;                     /* the descriptor names kv_tokens */
    s->s.threads = 1;
}

static inline void small_lengths(problem *p, int most) {
    const int cross = small_chance(20), tokens = small_chance(10) ? 3 : most;
    p->B = small_chance(70) ? 1 : small_range(1, MAX_B);
    p->q_offset = small_chance(25) ? small_range(1, most / 2 + 1) : 0;
    p->q_max = p->k_max = 0;
    for (int b = 0; b < p->B; b++) {
        const int64_t before = b && small_chance(50) ? p->tq[0] : 0;
        p->tq[b] = before ? before : small_range(1, tokens);
        p->tk[b] = !cross ? p->tq[b] + p->q_offset
                          : before ? p->tk[0] : small_range(1, most + (int)p->q_offset);
        if (p->tq[b] > p->q_max) p->q_max = p->tq[b];
        if (p->tk[b] > p->k_max) p->k_max = p->tk[b];
    }
}

/* most: the largest number of tokens. */
static inline void small_make(small *s, int ranks, int most, int threads) {
    static const int chance[OPTIONS] = { 15, 20, 15, 15, 40 };
    problem *p = &s->p;
    setup *how = &s->s;
    int options = 0, dtypes[4];
    memset(s, 0, sizeof *s);
    problem_shape(p, 1, 1, 1, small_range(1, 9), small_range(1, 9));
    p->Hkv = small_range(1, 2);
    p->Hq = p->Hkv * small_range(1, 3);
    if (small_chance(10)) {
        p->v_in_k = 1;
        p->Dv = small_range(1, p->Dk);
        p->v_column = small_range(0, p->Dk - p->Dv);
    }
    small_lengths(p, most);
    for (int i = 0; i < 4; i++)
        dtypes[i] = small_chance(60) ? RA_F32 : small_range(RA_F32, RA_BF16);
    problem_dtypes(p, dtypes[0], dtypes[1], dtypes[2], dtypes[3]);
    p->absent = (uint8_t *)calloc((size_t)(p->B * p->k_max), 1);
    how->ranks = ranks;
    how->threads = threads;
    how->call = CALL_FORWARD;
    how->strides = STRIDES_MIXED;
    how->seed = small_rand(UINT32_MAX);
    if (small_chance(20)) how->no_lse = small_range(1, 2);
    if (small_chance(80)) how->chunk_tokens = small_chance(80) ? 64 : small_range(1, 200);
    if (small_chance(50)) how->buffers = small_range(1, 6);
    if (small_chance(30) && how->buffers != 1) how->order = RA_ORDER_ROUNDS;
    random_layout(how, p, &small_rng, small_range(0, LAYOUTS - 1));
    problem_mask(p, &small_rng, small_chance(30) ? M_CAUSAL : small_range(0, MASKS - 1));
    for (int i = 0; i < OPTIONS; i++) options |= small_chance(chance[i]) << i;
    problem_options(p, &small_rng, options);
    small_data(s);
    small_desc(s);
}

/* Adds gradients to a problem. by_ring: they return to their owners around the ring. */
static inline void small_train(small *s, int by_ring) {
    problem *p = &s->p;
    setup *how = &s->s;
    how->train = 1;
    how->no_lse = 0;
    how->grad_return = by_ring ? RA_RETURN_RING : RA_RETURN_DIRECT;
    if (small_chance(20)) p->dropout = 0.25f;
    p->d_o = small_fill(p->B * p->q_max * p->Hq * p->Dv, 1.0f, p->o_dtype);
    p->seed = 1234567890123u;
    small_desc(s);
}

static inline void small_free(small *s) {
    problem_free(&s->p);
    setup_free(&s->s);
}

/* -------------------------------------------------------------------------- exact result */

static inline int small_sees(const problem *x, int b, int64_t p, int64_t k) {
    const ra_mask *m = &x->mask;
    int64_t d = 0, e = x->tk[b], lo, hi;
    if (k >= e || x->absent[b * x->k_max + k]) return 0;
    if (m->kind == RA_MASK_INTERVALS) return k >= m->lo[p] && k < m->hi[p];
    for (int64_t i = 0; i < m->doc_count; i++) {
        if (m->doc_first[i] <= p) d = m->doc_first[i];
        else if (m->doc_first[i] < e) e = m->doc_first[i];
    }
    lo = d;
    hi = m->kind == RA_MASK_NONE ? e : p + 1;
    if (m->causal_block > 1) hi = d + (p - d) / m->causal_block * m->causal_block + m->causal_block;
    if (hi < d + m->prefix) hi = d + m->prefix;
    if (hi > e) hi = e;
    if (m->window && lo < p - m->window + 1) lo = p - m->window + 1;
    if (m->right_limit && hi > p + m->right_limit + 1) hi = p + m->right_limit + 1;
    return (k >= lo || (k >= d && k < d + m->keep)) && k < hi;
}

static inline double small_score(const problem *x, int b, int head, int64_t p, int64_t k) {
    const int hk = head / (x->Hq / x->Hkv);
    const float *q = x->q + ((b * x->q_max + p - x->q_offset) * x->Hq + head) * x->Dk;
    const float *kk = x->k + ((b * x->k_max + k) * x->Hkv + hk) * x->Dk;
    double s = 0, cap = (double)x->softcap;
    for (int i = 0; i < x->Dk; i++) s += (double)q[i] * (double)kk[i];
    s *= x->scale != 0.0f ? (double)x->scale : 1.0 / sqrt((double)x->Dk);
    if (cap > 0) s = cap * tanh(s / cap);
    if (x->scores & RA_SCORE_ALIBI) s -= (double)x->alibi[head] * fabs((double)(p - k));
    if (x->scores & RA_SCORE_BIAS)
        s += bias_factor(x, head) * (double)bias_value(x, b, head, p - x->q_offset, k);
    return s;
}

/* o [Dv] and lse of the query at position p, head head, of sequence b. */
static inline void small_exact(const problem *x, int b, int head, int64_t p, double *o,
                               double *lse) {
    const int64_t n = x->k_max, hk = head / (x->Hq / x->Hkv);
    const int64_t row = x->Hkv * (int64_t)(x->v_in_k ? x->Dk : x->Dv);
    const float *v = x->v_in_k ? x->k + hk * x->Dk + x->v_column : x->v + hk * x->Dv;
    const double sink = x->scores & RA_SCORE_SINKS ? (double)x->sinks[head] : -HUGE_VAL;
    double *s = (double *)small_memory((size_t)n * sizeof(double));
    double max = sink, sum = 0;
    for (int64_t k = 0; k < n; k++) {
        s[k] = small_sees(x, b, p, k) ? small_score(x, b, head, p, k) : -HUGE_VAL;
        if (s[k] > max) max = s[k];
    }
    memset(o, 0, (size_t)x->Dv * sizeof *o);
    for (int64_t k = 0; k < n; k++) {
        double w = s[k] == -HUGE_VAL ? 0.0 : exp(s[k] - max);
        sum += w;
        for (int i = 0; i < x->Dv && w != 0.0; i++) o[i] += w * (double)v[(b * n + k) * row + i];
    }
    if (sink > -HUGE_VAL) sum += exp(sink - max);
    for (int i = 0; i < x->Dv && sum > 0; i++) o[i] /= sum;
    *lse = sum > 0 ? max + log(sum) : -HUGE_VAL;
    free(s);
}

/* -------------------------------------------------------------------------- a rank's part */

/* After a pass the inputs belong to the caller: what still reads them gets NaN. */
static inline void small_part_poison(rank_part *e) {
    view *const inputs[4] = { &e->q, &e->k, &e->v, &e->d_o };
    for (int i = 0; i < 4; i++) if (inputs[i]->mem) memset(inputs[i]->mem, GAP, inputs[i]->bytes);
}

/* Compares up to `most` values of (b, row, head) with the exact result. Returns null, or what is
 * wrong in a static buffer. */
static inline const char *small_part_check(const rank_part *e, int64_t most) {
    static char why[256];
    const problem *p = e->p;
    int64_t all = p->B * e->q_rows * p->Hq, step = all > most ? all / most : 1;
    /* all bf16: weights may be rounded to bf16, each by 2^-8 of it; V is within +-1.5 */
    double tol = p->q_dtype == RA_BF16 && p->k_dtype == RA_BF16 &&
                 (p->v_in_k || p->v_dtype == RA_BF16) ? 0.012 : 2e-5;
    double part = p->o_dtype == RA_BF16 ? 0.005 : p->o_dtype == RA_F16 ? 6e-4 : 0;
    double o[16], lse;
    for (int64_t at = (int64_t)small_rand((uint32_t)step); at < all; at += step) {
        int head = (int)(at % p->Hq);
        int64_t row = at / p->Hq % e->q_rows, b = at / p->Hq / e->q_rows;
        int32_t pos = e->q_pos[b * e->q_rows + row];
        float got;
        lse = -HUGE_VAL;
        memset(o, 0, sizeof o);
        if (pos >= 0) small_exact(p, (int)b, head, pos, o, &lse);
        else if (e->s->layout != RA_LAYOUT_ARRAY) continue;
        else if (p->scores & RA_SCORE_SINKS) lse = (double)p->sinks[head];
        for (int i = 0; i < p->Dv; i++) {
            const uint8_t *at_o = view_at(&e->o, b, row, head);
            got = dtype_load(at_o + i * element_bytes(p->o_dtype), p->o_dtype);
            if (fabs((double)got - o[i]) <= tol + part * fabs(o[i])) continue;
            snprintf(why, sizeof why, "rank %d: o[%d][%d][%d][%d] (position %d) is %.9g, not %.9g",
                     e->rank, (int)b, (int)row, head, i, pos, (double)got, o[i]);
            return why;
        }
        if (!e->t.lse.data) continue;
        memcpy(&got, view_at(&e->lse, b, row, head), 4);
        if ((double)got == lse || fabs((double)got - lse) <= tol * (1 + fabs(lse))) continue;
        snprintf(why, sizeof why, "rank %d: lse[%d][%d][%d] (position %d) is %.9g, not %.9g",
                 e->rank, (int)b, (int)row, head, pos, (double)got, lse);
        return why;
    }
    return NULL;
}

/* 1 if anything outside the rows was written: gaps of o and lse. Destroys the rows. */
static inline int small_part_spills(rank_part *e) {
    float row[64];
    for (int b = 0; b < e->p->B; b++)
        for (int64_t t = 0; t < e->q_rows; t++) {
            view_take(&e->o, b, t, row);
            if (e->t.lse.data) view_take(&e->lse, b, t, row);
        }
    return e->q_rows && (view_guard(&e->o) || view_guard(&e->lse));
}

#endif
