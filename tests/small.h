/* Small random problems for tests that run whole worlds: a descriptor that all ranks share, data by
 * global position, each rank's part of it in separate memory, and the exact result of any row
 * in double precision. Written from the text of the API section alone. */
#if !defined(RINGATTN_TEST_SMALL_H)
#define RINGATTN_TEST_SMALL_H

#include "harness.h"
#include "tensors.h"

#ifndef SMALL_MOST_RANKS
#define SMALL_MOST_RANKS 16
#endif
enum { SMALL_RANKS = SMALL_MOST_RANKS, SMALL_SEQUENCES = 3, SMALL_DOCS = 8, SMALL_RUNS = 512 };

static h_rng small_rng;

static inline uint32_t small_rand(uint32_t below) { return h_next(&small_rng) % below; }

static inline int small_chance(int percent) { return (int)small_rand(100) < percent; }
static inline int small_range(int lo, int hi)
{
    return lo + (int)small_rand((uint32_t)(hi - lo + 1));
}
static inline float small_float(void) { return (float)small_rand(1u << 20) / 524288.0f - 1.0f; }

static inline void small_seed(uint64_t seed)
{
    small_rng.state = seed;
    (void)h_next(&small_rng);          /* the first number of a small seed is small */
}

static inline void *small_memory(size_t bytes)
{
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

static inline void *small_heap_alloc(void *ctx, size_t bytes, size_t align)
{
    small_heap *heap = (small_heap *)ctx;
    size_t lead = align < sizeof(small_block) ? sizeof(small_block) : align;
    void *base = NULL;
    small_block *block;
    heap->calls++;
    if (heap->calls == heap->fail_at || !align || (align & (align - 1))) return NULL;
    if (bytes > (size_t)1 << 26) return NULL;          /* the most for fuzzers */
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

static inline void small_heap_free(void *ctx, void *ptr, size_t bytes)
{
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

static inline ra_allocator small_heap_allocator(small_heap *heap)
{
    ra_allocator a;
    a.alloc = small_heap_alloc;
    a.free = small_heap_free;
    a.ctx = heap;
    return a;
}

/* What the library leaked on purpose. */
static inline void small_heap_clear(small_heap *heap)
{
    while (heap->first) {
        small_block *block = (small_block *)heap->first;
        heap->first = block->next;
        free(block->base);
    }
}

/* -------------------------------------------------------------------------- problem */

typedef struct small {
    ra_desc d;                         /* its pointers go into this struct */
    int64_t tokens[SMALL_SEQUENCES], keys[SMALL_SEQUENCES]; /* of each sequence */
    int64_t tokens_of[SMALL_SEQUENCES], kv_tokens_of[SMALL_SEQUENCES];
    int64_t doc_first[SMALL_DOCS];
    int32_t weights[SMALL_RANKS], q_count[SMALL_RANKS], k_count[SMALL_RANKS];
    int64_t q_rows[SMALL_RANKS], k_rows[SMALL_RANKS];
    ra_run q_runs[SMALL_RUNS], k_runs[SMALL_RUNS];
    int32_t *lo, *hi;
    int32_t *q_cells, *k_cells;        /* ARRAY: [B][all cells], rank after rank */
    int64_t q_cell_count, k_cell_count;
    int shared_cells;                  /* ARRAY: all sequences share the first one's cells */
    float *q, *k, *v;                  /* [B][T][H][D], q from q_offset; as stored */
    float *d_o;                        /* of a problem with op train = 1: like o, from q_offset */
    float *alibi, *sinks;
    uint64_t bias_seed;
    int bias_batch, bias_head, bias_row, bias_key; /* 0: broadcast */
    int64_t bias_keys;
} small;

static inline float small_bias(const small *s, int b, int head, int64_t q, int64_t k)
{
    uint64_t x = s->bias_seed;
    if (k >= s->bias_keys) return 0.0f;
    x += (s->bias_batch ? (uint64_t)b * 31 : 0) + (s->bias_head ? (uint64_t)head * 1009 : 0) +
         (s->bias_row ? (uint64_t)q * 65537 : 0) + (s->bias_key ? (uint64_t)k * 7919 : 0);
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return (float)((x >> 40) & 1023) / 512.0f - 1.0f;
}

static inline void small_mask(small *s)
{
    ra_mask *m = &s->d.mask;
    int64_t all = s->d.q_offset + s->d.tokens;
    uint32_t kind = small_rand(10);
    m->kind = kind < 5 ? RA_MASK_CAUSAL : kind < 8 ? RA_MASK_NONE : RA_MASK_INTERVALS;
    if (m->kind == RA_MASK_INTERVALS) {
        int64_t keys = s->d.kv_tokens ? s->d.kv_tokens : all;
        s->lo = (int32_t *)small_memory((size_t)all * 4);
        s->hi = (int32_t *)small_memory((size_t)all * 4);
        for (int64_t p = 0; p < all; p++) {
            int lo = small_range(0, (int)keys), hi = small_range(lo, (int)keys);
            s->lo[p] = lo;
            s->hi[p] = hi;
        }
        m->lo = s->lo;
        m->hi = s->hi;
        m->interval_count = all;
        return;
    }
    if (m->kind == RA_MASK_CAUSAL && small_chance(20)) m->causal_block = small_range(1, 70);
    if (m->kind == RA_MASK_CAUSAL && small_chance(20)) m->prefix = small_range(1, (int)all + 5);
    if (small_chance(30)) m->window = small_range(1, (int)all + 5);
    if (m->kind == RA_MASK_NONE && small_chance(30)) m->right_limit = small_range(1, (int)all + 5);
    if (m->window && small_chance(40)) m->keep = small_range(1, 40);
    if (small_chance(25)) {
        int64_t at = 0;
        for (m->doc_count = 0; m->doc_count < SMALL_DOCS && at < all; m->doc_count++) {
            s->doc_first[m->doc_count] = at;
            at += small_range(1, (int)(all / 3) + 2);
        }
        m->doc_first = s->doc_first;
    }
}

/* Deals the positions [first, first + count) to the ranks in random pieces. absent: some go to
 * nobody. */
static inline void small_deal(ra_run *runs, int32_t *of, int ranks, int64_t first, int64_t count,
                              int absent)
{
    ra_run piece[64];
    int owner[64], n = 0, at = 0;
    int64_t end = first + count;
    while (first < end && n < 62) {
        int64_t len = n == 61 ? end - first : small_range(1, (int)(count / 4) + 2);
        if (len > end - first) len = end - first;
        piece[n].first = first;
        piece[n].count = len;
        piece[n].stride = small_chance(50) ? 0 : 1;
        owner[n] = small_chance(absent) ? -1 : (int)small_rand((uint32_t)ranks);
        if (len > 3 && small_chance(30)) {             /* even ones here, odd ones elsewhere */
            piece[n + 1] = piece[n];
            piece[n + 1].first = first + 1;
            piece[n + 1].stride = piece[n].stride = 2;
            piece[n + 1].count = len / 2;
            piece[n].count = len - len / 2;
            owner[n + 1] = (int)small_rand((uint32_t)ranks);
            n++;
        }
        first += len;
        n++;
    }
    for (int r = 0; r < ranks; r++) {
        of[r] = 0;
        for (int i = 0; i < n; i++)
            if (owner[i] == r) { runs[at++] = piece[i]; of[r]++; }
    }
}

/* `cells` in random order: positions [first, first + count), and empty ones. */
static inline void small_shuffle(int32_t *cell, int64_t cells, int64_t first, int64_t count)
{
    for (int64_t i = 0; i < cells; i++) cell[i] = i < count ? (int32_t)(first + i) : -1;
    for (int64_t i = cells - 1; i > 0; i--) {
        int64_t k = (int64_t)small_rand((uint32_t)i + 1);
        int32_t x = cell[i];
        cell[i] = cell[k];
        cell[k] = x;
    }
}

static inline int32_t *small_cells(const small *s, int64_t *rows, int64_t *total, int64_t first,
                                   const int64_t *count, int spare)
{
    int B = s->d.sequences ? s->d.sequences : 1, P = s->d.ranks;
    int64_t most = 0;
    int32_t *cell;
    for (int b = 0; b < B; b++) if (count[b] > most) most = count[b];
    *total = most + spare;
    cell = (int32_t *)small_memory((size_t)(B * *total) * 4);
    for (int b = 0; b < B; b++) small_shuffle(cell + b * *total, *total, first, count[b]);
    for (int r = 0; r < P; r++) rows[r] = 0;
    for (int64_t i = 0; i < *total; i++) rows[small_rand((uint32_t)P)]++;
    return cell;
}

static inline void small_layout(small *s)
{
    ra_layout *l = &s->d.layout;
    int64_t keys = s->d.kv_tokens ? s->d.kv_tokens : s->d.tokens + s->d.q_offset;
    int P = s->d.ranks, spare;
    if (l->kind <= RA_LAYOUT_ZIGZAG && small_chance(30)) {
        for (int r = 0; r < P; r++) s->weights[r] = small_range(0, 4);
        s->weights[small_rand((uint32_t)P)] = 1;
        l->weights = s->weights;
    } else if (l->kind == RA_LAYOUT_RUNS) {
        small_deal(s->q_runs, s->q_count, P, s->d.q_offset, s->d.tokens, 0);
        l->q_runs = s->q_runs;
        l->q_run_count = s->q_count;
        if (keys != s->d.tokens || s->d.q_offset || small_chance(50)) {
            small_deal(s->k_runs, s->k_count, P, 0, keys, small_chance(50) ? 20 : 0);
            l->k_runs = s->k_runs;
            l->k_run_count = s->k_count;
        }
    } else if (l->kind == RA_LAYOUT_ARRAY) {
        s->shared_cells = !s->d.tokens_of && !s->d.kv_tokens_of && small_chance(50);
        spare = small_chance(50) ? 0 : small_range(1, 20);
        s->q_cells = small_cells(s, s->q_rows, &s->q_cell_count, s->d.q_offset, s->tokens, spare);
        s->k_cells = small_cells(s, s->k_rows, &s->k_cell_count, 0, s->keys, spare);
        l->q_rows = s->q_rows;
        l->k_rows = s->k_rows;
    }
}

static inline void small_lengths(small *s, int most)
{
    ra_desc *d = &s->d;
    int B = d->sequences ? d->sequences : 1, alike = d->layout.kind >= RA_LAYOUT_RUNS;
    d->tokens = small_chance(10) ? small_range(1, 3) : small_range(1, most);
    if (small_chance(25)) d->q_offset = small_range(1, most / 2 + 1);
    if (small_chance(20)) d->kv_tokens = small_range(1, most + (int)d->q_offset);
    if (B > 1 && !alike && small_chance(50)) {
        d->tokens_of = s->tokens_of;
        for (int b = 0; b < B; b++) s->tokens_of[b] = small_range(1, (int)d->tokens);
        s->tokens_of[small_rand((uint32_t)B)] = d->tokens;
    }
    for (int b = 0; b < B; b++) {
        s->tokens[b] = d->tokens_of ? s->tokens_of[b] : d->tokens;
        s->keys[b] = d->kv_tokens ? d->kv_tokens : s->tokens[b] + d->q_offset;
    }
    if (B > 1 && !alike && d->kv_tokens && small_chance(50)) {
        d->kv_tokens_of = s->kv_tokens_of;
        for (int b = 0; b < B; b++)
            s->keys[b] = s->kv_tokens_of[b] = small_range(1, (int)d->kv_tokens);
    }
}

static inline float *small_fill(int64_t n, float amplitude, int dtype)
{
    float *x = (float *)small_memory((size_t)n * 4);
    for (int64_t i = 0; i < n; i++) x[i] = dtype_round(small_float() * amplitude, dtype);
    return x;
}

static inline void small_data(small *s)
{
    ra_desc *d = &s->d;
    int64_t B = d->sequences ? d->sequences : 1, n = 0;
    for (int b = 0; b < B; b++) if (s->keys[b] > n) n = s->keys[b];
    s->q = small_fill(B * d->tokens * d->q_heads * d->k_dim, small_chance(20) ? 6.0f : 1.5f,
                      d->q_dtype);
    s->k = small_fill(B * n * d->kv_heads * d->k_dim, 1.5f, d->k_dtype);
    if (!d->v_in_k) s->v = small_fill(B * n * d->kv_heads * d->v_dim, 1.0f, d->v_dtype);
    if (small_chance(15)) d->scores |= RA_SCORE_ALIBI;
    if (small_chance(15)) d->scores |= RA_SCORE_SINKS;
    if (small_chance(20)) d->scores |= RA_SCORE_BIAS;
    s->alibi = small_fill(d->q_heads, 0.1f, RA_F32);
    s->sinks = small_fill(d->q_heads, 3.0f, RA_F32);
    s->bias_seed = small_rand(1u << 30);
    s->bias_head = small_chance(50);
    s->bias_row = small_chance(60);
    s->bias_batch = small_chance(50) || (B > 1 && s->bias_row);    /* rows differ by sequence */
    s->bias_key = small_chance(80);
    s->bias_keys = small_chance(70) ? n : small_range(1, (int)n);
}

/* most: the largest number of tokens. */
static inline void small_make(small *s, int ranks, int most, int threads)
{
    ra_desc *d = &s->d;
    memset(s, 0, sizeof *s);
    d->sequences = small_chance(70) ? 0 : small_range(1, SMALL_SEQUENCES);
    d->ranks = ranks;
    d->kv_heads = small_range(1, 2);
    d->q_heads = d->kv_heads * small_range(1, 3);
    d->k_dim = small_range(1, 9);
    d->v_dim = small_range(1, 9);
    d->q_dtype = small_chance(60) ? RA_F32 : small_range(RA_F32, RA_BF16);
    d->k_dtype = small_chance(60) ? RA_F32 : small_range(RA_F32, RA_BF16);
    d->v_dtype = small_chance(60) ? RA_F32 : small_range(RA_F32, RA_BF16);
    d->o_dtype = small_chance(60) ? RA_F32 : small_range(RA_F32, RA_BF16);
    if (small_chance(10)) {
        d->v_in_k = 1;
        d->v_dim = small_range(1, d->k_dim);
        d->v_column = small_range(0, d->k_dim - d->v_dim);
        d->v_dtype = small_chance(50) ? d->k_dtype : 0;
    }
    if (small_chance(40)) d->scale = 0.3f + 0.25f * small_float();
    if (small_chance(15)) d->softcap = 1.0f + 2.0f * (float)small_rand(4);
    if (small_chance(80)) d->chunk_tokens = small_chance(80) ? 64 : small_range(1, 200);
    if (small_chance(50)) d->buffers = small_range(1, 6);
    d->threads = threads;
    d->layout.kind = small_range(RA_LAYOUT_CONTIGUOUS, RA_LAYOUT_ARRAY);
    small_lengths(s, most);
    small_mask(s);
    small_layout(s);
    small_data(s);
    if (small_chance(30) && d->buffers != 1) d->order = RA_ORDER_ROUNDS;
}

/* Adds gradients to a problem. by_ring: they return to their owners around the ring. */
static inline void small_train(small *s, int by_ring)
{
    ra_desc *d = &s->d;
    int64_t B = d->sequences ? d->sequences : 1;
    d->train = 1;
    d->grad_return = by_ring ? RA_RETURN_RING : RA_RETURN_DIRECT;
    if (small_chance(20)) d->dropout = 0.25f;
    if (small_chance(60)) d->backward_travel = RA_TRAVEL_KV;
    if (!(d->scores & RA_SCORE_BIAS) && d->layout.kind != RA_LAYOUT_ARRAY && small_chance(50))
        d->backward_travel = RA_TRAVEL_Q;
    s->d_o = small_fill(B * d->tokens * d->q_heads * d->v_dim, 1.0f, d->o_dtype);
}

static inline void small_free(small *s)
{
    free(s->d_o);
    free(s->lo);
    free(s->hi);
    free(s->q_cells);
    free(s->k_cells);
    free(s->q);
    free(s->k);
    free(s->v);
    free(s->alibi);
    free(s->sinks);
}

/* -------------------------------------------------------------------------- exact result */

static inline int small_sees(const small *s, int b, int64_t p, int64_t k)
{
    const ra_mask *m = &s->d.mask;
    int64_t d = 0, e = s->keys[b], lo, hi;
    if (k >= s->keys[b]) return 0;
    if (m->kind == RA_MASK_INTERVALS) return k >= m->lo[p] && k < m->hi[p];
    for (int64_t i = 0; i < m->doc_count; i++) {
        if (m->doc_first[i] <= p) d = m->doc_first[i];
        else if (m->doc_first[i] < e) e = m->doc_first[i];
    }
    lo = d;
    hi = m->kind == RA_MASK_NONE ? e : p + 1;
    if (m->causal_block > 1) while ((hi - d) % m->causal_block) hi++;
    if (hi < d + m->prefix) hi = d + m->prefix;
    if (hi > e) hi = e;
    if (m->window && lo < p - m->window + 1) lo = p - m->window + 1;
    if (m->right_limit && hi > p + m->right_limit + 1) hi = p + m->right_limit + 1;
    return (k >= lo || (k >= d && k < d + m->keep)) && k < hi;
}

static inline int small_present(const small *s, int64_t k)
{
    const ra_layout *l = &s->d.layout;
    const ra_run *run = l->k_runs;
    if (l->kind != RA_LAYOUT_RUNS || !run) return 1;
    for (int r = 0; r < s->d.ranks; r++)
        for (int i = 0; i < l->k_run_count[r]; i++, run++) {
            int64_t stride = run->stride ? run->stride : 1, at = k - run->first;
            if (at >= 0 && at % stride == 0 && at / stride < run->count) return 1;
        }
    return 0;
}

static inline int64_t small_key_rows(const small *s)
{
    int64_t n = 0;
    int B = s->d.sequences ? s->d.sequences : 1;
    for (int b = 0; b < B; b++) if (s->keys[b] > n) n = s->keys[b];
    return n;
}

static inline double small_score(const small *s, int b, int head, int64_t p, int64_t k)
{
    const ra_desc *d = &s->d;
    int64_t n = small_key_rows(s), hk = head / (d->q_heads / d->kv_heads);
    const float *q = s->q + ((b * d->tokens + p - d->q_offset) * d->q_heads + head) * d->k_dim;
    const float *kk = s->k + ((b * n + k) * d->kv_heads + hk) * d->k_dim;
    double x = 0, cap = (double)d->softcap;
    for (int i = 0; i < d->k_dim; i++) x += (double)q[i] * (double)kk[i];
    x *= d->scale != 0.0f ? (double)d->scale : 1.0 / sqrt((double)d->k_dim);
    if (cap > 0) x = cap * tanh(x / cap);
    if (d->scores & RA_SCORE_ALIBI) x -= (double)s->alibi[head] * fabs((double)(p - k));
    if (d->scores & RA_SCORE_BIAS) x += (double)small_bias(s, b, head, p, k);
    return x;
}

/* o [Dv] and lse of the query at position p, head head, of sequence b. */
static inline void small_exact(const small *s, int b, int head, int64_t p, double *o, double *lse)
{
    const ra_desc *d = &s->d;
    int64_t n = small_key_rows(s), hk = head / (d->q_heads / d->kv_heads);
    double *x = (double *)small_memory((size_t)n * sizeof(double));
    int64_t row = d->kv_heads * (int64_t)(d->v_in_k ? d->k_dim : d->v_dim);
    const float *v = d->v_in_k ? s->k + hk * d->k_dim + d->v_column : s->v + hk * d->v_dim;
    double max = -HUGE_VAL, sum = 0;
    for (int64_t k = 0; k < n; k++) {
        x[k] = -HUGE_VAL;
        if (small_sees(s, b, p, k) && small_present(s, k)) x[k] = small_score(s, b, head, p, k);
        if (x[k] > max) max = x[k];
    }
    if ((d->scores & RA_SCORE_SINKS) && (double)s->sinks[head] > max) max = (double)s->sinks[head];
    memset(o, 0, (size_t)d->v_dim * sizeof *o);
    for (int64_t k = 0; k < n; k++) {
        double w = x[k] == -HUGE_VAL ? 0.0 : exp(x[k] - max);
        sum += w;
        for (int i = 0; i < d->v_dim && w != 0.0; i++)
            o[i] += w * (double)v[(b * n + k) * row + i];
    }
    if (d->scores & RA_SCORE_SINKS) sum += exp((double)s->sinks[head] - max);
    for (int i = 0; i < d->v_dim && sum > 0; i++) o[i] /= sum;
    *lse = sum > 0 ? max + log(sum) : -HUGE_VAL;
    free(x);
}

/* -------------------------------------------------------------------------- a rank's part */

typedef struct small_part {
    const small *s;
    int32_t rank;
    int64_t q_rows, k_rows;            /* of the longest sequence */
    int32_t *q_pos, *k_pos;            /* [B][rows]; -1: empty cell, or no such row */
    view q, k, v, o, lse, d_o, d_q, d_k, d_v; /* the last ones only with gradients */
    float *bias;
    ra_tensors t;
} small_part;

/* Positions of the rows from the plan, or from the cells. */
static inline int32_t *small_positions(const small *s, const ra_plan *plan, int rank, int keys,
                                       int64_t rows)
{
    int64_t B = s->d.sequences ? s->d.sequences : 1;
    int32_t *pos = (int32_t *)small_memory((size_t)(B * rows) * 4);
    ra_run run[SMALL_RUNS];
    for (int64_t i = 0; i < B * rows; i++) pos[i] = -1;
    for (int32_t b = 0; b < B; b++) {
        int64_t at = b * rows, skip = 0;
        int32_t n;
        if (s->d.layout.kind == RA_LAYOUT_ARRAY) {
            const int32_t *cell = keys ? s->k_cells : s->q_cells;
            int64_t total = keys ? s->k_cell_count : s->q_cell_count;
            for (int r = 0; r < rank; r++) skip += keys ? s->k_rows[r] : s->q_rows[r];
            memcpy(pos + at, cell + (s->shared_cells ? 0 : b * total) + skip, (size_t)rows * 4);
            continue;
        }
        n = keys ? ra_plan_k_runs(plan, rank, b, run, SMALL_RUNS)
                 : ra_plan_q_runs(plan, rank, b, run, SMALL_RUNS);
        (void)runs_expand(pos + at, run, n, 0);
    }
    return pos;
}

static inline void small_part_bias(small_part *part)
{
    const small *s = part->s;
    int64_t B = s->d.sequences ? s->d.sequences : 1, H = s->d.q_heads;
    int64_t nb = s->bias_batch ? B : 1, nh = s->bias_head ? H : 1;
    int64_t nr = s->bias_row ? part->q_rows : 1, nk = s->bias_key ? s->bias_keys : 1;
    ra_bias *x = &part->t.bias;
    part->bias = (float *)small_memory((size_t)(nb * nh * (nr ? nr : 1) * nk) * 4);
    for (int64_t b = 0; b < nb; b++)
        for (int64_t head = 0; head < nh; head++)
            for (int64_t r = 0; r < nr; r++) {
                int64_t p = s->bias_row ? part->q_pos[b * part->q_rows + r] : 0;
                for (int64_t k = 0; k < nk; k++)
                    part->bias[((b * nh + head) * nr + r) * nk + k] =
                        small_bias(s, (int)b, (int)head, p, k);
            }
    x->data = part->bias;
    x->keys = s->bias_keys;
    x->key_step = s->bias_key ? 4 : 0;
    x->row_step = s->bias_row ? nk * 4 : 0;
    x->head_step = s->bias_head ? nr * nk * 4 : 0;
    x->batch_step = s->bias_batch ? nh * nr * nk * 4 : 0;
}

/* A view of rows in strides by lot, full of `fill`. */
static inline void small_view(const small_part *p, view *v, int32_t dtype, int keys, int32_t dim,
                              int fill)
{
    static const int kinds[4] = { STRIDES_PADDED, STRIDES_BATCH_INNER, STRIDES_INTERLEAVED,
                                  STRIDES_PERMUTED };
    const ra_desc *d = &p->s->d;
    *v = view_of(dtype, keys ? p->k_rows : p->q_rows, keys ? d->kv_heads : d->q_heads, dim);
    view_make(v, small_chance(35) ? STRIDES_PACKED : kinds[small_rand(4)],
              d->sequences ? d->sequences : 1, small_range(0, 2), fill);
}

/* Gradients that are added to start at 0, in the gaps too. */
static inline void small_part_train(small_part *p)
{
    const ra_desc *d = &p->s->d;
    small_view(p, &p->d_o, d->o_dtype, 0, d->v_dim, GAP);
    small_view(p, &p->d_q, RA_F32, 0, d->k_dim, 0);
    small_view(p, &p->d_k, RA_F32, 1, d->k_dim, 0);
    view_fill(&p->d_o, d->sequences ? d->sequences : 1, p->q_pos, p->s->d_o, d->tokens,
              d->q_offset);
    p->t.d_o = view_in(&p->d_o);
    p->t.d_q = view_out(&p->d_q);
    p->t.d_k = view_out(&p->d_k);
    p->t.seed = 1234567890123u;
    if (d->v_in_k) return;
    small_view(p, &p->d_v, RA_F32, 1, d->v_dim, 0);
    p->t.d_v = view_out(&p->d_v);
}

static inline void small_part_make(small_part *p, const small *s, const ra_plan *plan, int rank)
{
    const ra_desc *d = &s->d;
    int64_t n = small_key_rows(s);
    int B = d->sequences ? d->sequences : 1;
    ra_plan_report rep;
    memset(p, 0, sizeof *p);
    p->s = s;
    p->rank = rank;
    if (ra_plan_query(plan, rank, &rep) != RA_OK) return;
    p->q_rows = rep.q_rows;
    p->k_rows = rep.k_rows;
    p->q_pos = small_positions(s, plan, rank, 0, p->q_rows);
    p->k_pos = small_positions(s, plan, rank, 1, p->k_rows);
    small_view(p, &p->q, d->q_dtype, 0, d->k_dim, GAP);
    small_view(p, &p->k, d->k_dtype, 1, d->k_dim, GAP);
    if (!d->v_in_k) small_view(p, &p->v, d->v_dtype, 1, d->v_dim, GAP);
    small_view(p, &p->o, d->o_dtype, 0, d->v_dim, GUARD);
    view_fill(&p->q, B, p->q_pos, s->q, d->tokens, d->q_offset);
    view_fill(&p->k, B, p->k_pos, s->k, n, 0);
    if (!d->v_in_k) view_fill(&p->v, B, p->k_pos, s->v, n, 0);
    p->t.q = view_in(&p->q);
    p->t.k = view_in(&p->k);
    if (!d->v_in_k) p->t.v = view_in(&p->v);
    p->t.o = view_out(&p->o);
    if (d->train) small_part_train(p);
    if (d->train || small_chance(80)) {
        small_view(p, &p->lse, RA_F32, 0, 1, GUARD);
        p->t.lse = view_out(&p->lse);
    }
    if (d->scores & RA_SCORE_ALIBI) p->t.alibi = s->alibi;
    if (d->scores & RA_SCORE_SINKS) p->t.sinks = s->sinks;
    if (d->scores & RA_SCORE_BIAS) small_part_bias(p);
    if (d->layout.kind != RA_LAYOUT_ARRAY) return;
    p->t.q_pos.array = p->q_pos;
    p->t.q_pos.count = p->q_rows;
    p->t.q_pos.batch_step = s->shared_cells ? 0 : p->q_rows;
    p->t.k_pos.array = p->k_pos;
    p->t.k_pos.count = p->k_rows;
    p->t.k_pos.batch_step = s->shared_cells ? 0 : p->k_rows;
}

static inline void small_part_free(small_part *p)
{
    view_free(&p->q);
    view_free(&p->k);
    view_free(&p->v);
    view_free(&p->o);
    view_free(&p->lse);
    view_free(&p->d_o);
    view_free(&p->d_q);
    view_free(&p->d_k);
    view_free(&p->d_v);
    free(p->bias);
    free(p->q_pos);
    free(p->k_pos);
}

/* After a pass the inputs belong to the caller: whoever still reads them gets NaN. */
static inline void small_part_poison(small_part *p)
{
    memset(p->q.mem, GAP, p->q.bytes);
    memset(p->k.mem, GAP, p->k.bytes);
    if (p->v.mem) memset(p->v.mem, GAP, p->v.bytes);
    if (p->d_o.mem) memset(p->d_o.mem, GAP, p->d_o.bytes);
}

/* Compares up to `most` values of (b, row, head) with the exact result. Returns null, or what is
 * wrong in a static buffer. */
static inline const char *small_part_check(const small_part *p, int64_t most)
{
    static char why[256];
    const ra_desc *d = &p->s->d;
    int64_t B = d->sequences ? d->sequences : 1, all = B * p->q_rows * d->q_heads;
    int64_t step = all > most ? all / most : 1, at = (int64_t)small_rand((uint32_t)step);
    /* all bf16: weights may be rounded to bf16, each by 2^-8 of it; V is within +-1.5 */
    double tol = d->q_dtype == RA_BF16 && d->k_dtype == RA_BF16 &&
                 (d->v_in_k || d->v_dtype == RA_BF16) ? 0.012 : 2e-5;
    double part = d->o_dtype == RA_BF16 ? 0.005 : d->o_dtype == RA_F16 ? 6e-4 : 0;
    double o[16], lse;
    for (; at < all; at += step) {
        int head = (int)(at % d->q_heads);
        int64_t row = at / d->q_heads % p->q_rows, b = at / d->q_heads / p->q_rows;
        int32_t pos = p->q_pos[b * p->q_rows + row];
        float got;
        lse = -HUGE_VAL;
        memset(o, 0, sizeof o);
        if (pos >= 0) small_exact(p->s, (int)b, head, pos, o, &lse);
        else if (d->layout.kind != RA_LAYOUT_ARRAY) continue;
        else if (d->scores & RA_SCORE_SINKS) lse = (double)p->s->sinks[head];
        for (int i = 0; i < d->v_dim; i++) {
            const uint8_t *at_o = view_at(&p->o, b, row, head);
            got = dtype_load(at_o + i * element_bytes(d->o_dtype), d->o_dtype);
            if (fabs((double)got - o[i]) <= tol + part * fabs(o[i])) continue;
            snprintf(why, sizeof why, "rank %d: o[%d][%d][%d][%d] (position %d) is %.9g, not %.9g",
                     p->rank, (int)b, (int)row, head, i, pos, (double)got, o[i]);
            return why;
        }
        if (!p->lse.mem) continue;
        memcpy(&got, view_at(&p->lse, b, row, head), 4);
        if ((double)got == lse || fabs((double)got - lse) <= tol * (1 + fabs(lse))) continue;
        snprintf(why, sizeof why, "rank %d: lse[%d][%d][%d] (position %d) is %.9g, not %.9g",
                 p->rank, (int)b, (int)row, head, pos, (double)got, lse);
        return why;
    }
    return NULL;
}

/* Whether anything outside the rows was written: gaps of o and lse. Destroys the rows. */
static inline int small_part_spills(small_part *p)
{
    const ra_desc *d = &p->s->d;
    int B = d->sequences ? d->sequences : 1;
    float row[64];
    for (int b = 0; b < B; b++)
        for (int64_t t = 0; t < p->q_rows; t++) {
            view_take(&p->o, b, t, row);
            if (p->lse.mem) view_take(&p->lse, b, t, row);
        }
    if (!p->q_rows) return 0;
    return view_guard(&p->o) || (p->lse.mem && view_guard(&p->lse));
}

#endif
