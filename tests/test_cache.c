/* A KV cache sharded over ranks: ra_cache and ra_infer against a plain double-precision loop over
 * all keys, and the bits of a row for any number of ranks and threads, any travel, transport and
 * cut into calls. Sequences grow by random steps, with rollbacks. A rank has only its own keys. */
#define RINGATTN_IMPLEMENTATION
#include "ringattn.h"
#include "below.h"
#include "harness.h"
#include <pthread.h>
#include <sched.h>

enum { MAX_B = 4, MAX_P = 8, ROLLBACK = 8 };

static int32_t h_below(h_rng *r, int64_t n) { return (int32_t)h_range(r, 0, n - 1); }

/* A model of attention, and steps that grow its sequences. */
typedef struct script {
    ra_desc d;
    ra_cache_desc cd;
    float alibi[64], sinks[64];
    int32_t steps;
    int64_t cached[64][MAX_B], fresh[64][MAX_B];
    float *q, *k, *v;                  /* [B][kv_tokens][heads][dim], by position */
    int level_0;                       /* 1: sendrecv alone */
    int32_t page;                      /* ranks have pages of unlike sizes; 0: no pages */
    int ring;                          /* a ring buffer of pages of 16; lanes are ranks */
    int64_t prefix;                    /* tokens that all sequences have in the same pages */
    int threads;                       /* engine threads of a rank that step */
} script;

/* The results by position, of the last step that computed a row. */
typedef struct outcome {
    float *o, *lse;
    int64_t travel[4], most, spare;    /* most: messages of a call; spare: pages of rank 0 that were
                                        * never used */
    int cut;
} outcome;

typedef struct run { const script *s; outcome *out; int32_t ranks; ra_status end[MAX_P]; } run;

static int64_t q_size(const script *s) { return s->d.sequences * s->d.kv_tokens * s->d.q_heads; }

static int64_t row_bytes(int32_t dtype, int64_t dim) {
    if (dtype >= RA_Q8_0) return dim / 32 * (dtype == RA_Q8_0 ? 34 : 18);
    return dim * (dtype == RA_F32 ? 4 : 2);
}

static void *need(size_t bytes) {
    void *p = calloc(bytes ? bytes : 1, 1);
    if (!p) abort();
    return p;
}

/* x as a cache of this dtype stores it. */
static void round_to(float *x, int64_t n, int32_t dtype) {
    uint8_t *y = (uint8_t *)need((size_t)n * 4);
    CHECK_EQ(ra_convert(y, dtype, x, RA_F32, n), RA_OK);
    CHECK_EQ(ra_convert(x, RA_F32, y, dtype, n), RA_OK);
    free(y);
}

static void script_fill(script *s, h_rng *r) {
    int64_t n = s->d.sequences * s->d.kv_tokens;
    s->q = (float *)need((size_t)(n * s->d.q_heads * s->d.k_dim) * 4);
    s->k = (float *)need((size_t)(n * s->d.kv_heads * s->d.k_dim) * 4);
    s->v = (float *)need((size_t)(n * s->d.kv_heads * s->d.v_dim) * 4);
    for (int64_t i = 0; i < n * s->d.q_heads * s->d.k_dim; i++) s->q[i] = (float)h_normal(r);
    for (int64_t i = 0; i < n * s->d.kv_heads * s->d.k_dim; i++) s->k[i] = (float)h_normal(r);
    for (int64_t i = 0; i < n * s->d.kv_heads * s->d.v_dim; i++) s->v[i] = (float)h_normal(r);
    round_to(s->q, n * s->d.q_heads * s->d.k_dim, s->d.q_dtype);
    round_to(s->k, n * s->d.kv_heads * s->d.k_dim, s->d.k_dtype);
    round_to(s->v, n * s->d.kv_heads * s->d.v_dim, s->d.v_dtype);
    for (int h = 0; h < 64; h++) {
        s->alibi[h] = 0.01f * (float)h;        /* the first head has no slope */
        s->sinks[h] = (float)h_normal(r);
    }
}

static void script_free(script *s) {
    free(s->q);
    free(s->k);
    free(s->v);
}

static outcome outcome_new(const script *s) {
    outcome x = { 0 };
    x.o = (float *)need((size_t)(q_size(s) * s->d.v_dim) * 4);
    x.lse = (float *)need((size_t)q_size(s) * 4);
    return x;
}

static void outcome_free(outcome *x) {
    free(x->o);
    free(x->lse);
}

static void same_bits(const script *s, const outcome *got, const outcome *want) {
    CHECK_BITS(got->o, want->o, q_size(s) * s->d.v_dim * 4);
    CHECK_BITS(got->lse, want->lse, q_size(s) * 4);
}

/* -------------------------------------------------------------------------- one rank */
typedef struct engine { ra_cache *c; int ith; ra_status end; } engine;

static void *engine_main(void *arg) {
    engine *x = (engine *)arg;
    while ((x->end = ra_infer_step(x->c, x->ith)) > 0) sched_yield();
    return NULL;
}

static ra_status infer(const script *s, ra_cache *c, const ra_tensors *t, int32_t step) {
    pthread_t id[8];
    engine x[8];
    ra_status end;
    if (s->threads < 2)
        return ra_infer(c, t, s->cached[step], s->fresh[step], ra_deadline_ms(60000));
    end = ra_infer_begin(c, t, s->cached[step], s->fresh[step], ra_deadline_ms(60000));
    if (end) return end;
    for (int i = 0; i < s->threads; i++) {
        x[i].c = c;
        x[i].ith = i;
        if (pthread_create(&id[i], NULL, engine_main, &x[i])) abort();
    }
    for (int i = 0; i < s->threads; i++) pthread_join(id[i], NULL);
    for (int i = 0; i < s->threads; i++)
        if (x[i].end) return x[i].end;
    return RA_OK;
}

/* Level 0 alone, over a transport of the world. */
static ra_transport zero_transport(ra_transport *net) {
    ra_transport zero;
    memset(&zero, 0, sizeof zero);
    zero.size = sizeof zero;
    zero.abi = RA_TRANSPORT_ABI;
    zero.ctx = net;
    zero.sendrecv = below_sendrecv;
    zero.caps = RA_CAP_ANY_PEER;
    return zero;
}

/* Rows of this rank's queries in a step: positions and how many of each sequence. */
static int64_t rows_here(const script *s, const ra_cache *c, int32_t step, int32_t b, int32_t rank,
                         int64_t *pos) {
    int64_t n = 0;
    for (int64_t i = 0; i < s->fresh[step][b]; i++) {
        int64_t p = s->cached[step][b] + i;
        if (s->cd.queries == RA_QUERIES_ALL || ra_cache_owner(c, p) == rank) pos[n++] = p;
    }
    return n;
}

/* Queries of a step on this rank, `most` rows for each sequence. */
static void step_queries(const script *s, const ra_cache *c, int32_t step, int32_t rank,
                         int64_t most, float *q) {
    const int64_t row = s->d.q_heads * (int64_t)s->d.k_dim;
    int64_t *pos = (int64_t *)need((size_t)s->d.tokens * 8);
    for (int32_t b = 0; b < s->d.sequences; b++) {
        int64_t n = rows_here(s, c, step, b, rank, pos);
        for (int64_t j = 0; j < n; j++)
            memcpy(q + (b * most + j) * row, s->q + (b * s->d.kv_tokens + pos[j]) * row,
                   (size_t)row * 4);
    }
    free(pos);
}

/* Stores the outputs of a step on this rank by position. If every rank gets them all, each stores
 * some. */
static void step_outputs(const run *x, const ra_cache *c, int32_t step, int32_t rank, int64_t most,
                         const float *o, const float *lse) {
    const ra_desc *d = &x->s->d;
    int64_t *pos = (int64_t *)need((size_t)d->tokens * 8);
    for (int32_t b = 0; b < d->sequences; b++) {
        int64_t n = rows_here(x->s, c, step, b, rank, pos);
        for (int64_t j = 0; j < n; j++) {
            if (x->s->cd.queries == RA_QUERIES_ALL && pos[j] % x->ranks != rank) continue;
            int64_t to = (b * d->kv_tokens + pos[j]) * d->q_heads;
            int64_t from = (b * most + j) * d->q_heads;
            memcpy(x->out->o + to * d->v_dim, o + from * d->v_dim,
                   (size_t)(d->q_heads * d->v_dim) * 4);
            memcpy(x->out->lse + to, lse + from, (size_t)d->q_heads * 4);
        }
    }
    free(pos);
}

/* -------------------------------------------------------------------------- pages of a rank */
/* A page is taken when a token is stored in it, and freed, as -1, once no row will see any of its
 * tokens. Free pages hold NaN. */
typedef struct pool {
    int32_t *table, *unused;           /* [B][entries]; stack */
    int64_t *ends;                     /* [entries][2] first and last position */
    int64_t entries, count, free, least; /* least: fewest that were free */
    int64_t prefix, kept, ring;        /* pages of a sequence that stay; that are reused, 0: none */
    int64_t bytes[2];                  /* of a page of K, of V */
} pool;

static int32_t page_of(const script *s, int32_t rank) {
    if (s->ring) return 16;
    return s->page ? 16 * (1 + (s->page + 3 * rank) % 5) : 0;
}

static pool pool_new(const script *s, const ra_cache *c, int32_t rank, int32_t page) {
    const ra_desc *d = &s->d;
    pool x = { 0 };
    h_rng r = h_case_rng(77 + rank);
    x.entries = (ra_cache_rows(c) + page - 1) / page;
    x.count = x.least = x.free = d->sequences * x.entries + 2;
    if (s->ring) {                     /* as many as the oldest new token may see, and a rollback */
        const int64_t lanes = x.entries ? (d->kv_tokens + 15) / 16 / x.entries : 1;
        const int64_t seen = d->mask.window + d->tokens - 1 + ROLLBACK;
        x.kept = ((d->mask.keep + 15) / 16 + lanes - 1) / lanes;
        x.ring = ((seen + 30) / 16 + lanes - 1) / lanes;
        x.count = d->sequences * (x.kept + x.ring);
    }
    x.table = (int32_t *)need((size_t)(d->sequences * x.entries) * 4);
    x.unused = (int32_t *)need((size_t)x.free * 4);
    x.ends = (int64_t *)need((size_t)x.entries * 16);
    x.bytes[0] = row_bytes(d->k_dtype, d->k_dim) * d->kv_heads * page;
    x.bytes[1] = row_bytes(d->v_dtype, d->v_dim) * d->kv_heads * page;
    x.prefix = s->prefix;
    for (int64_t i = 0; i < d->sequences * x.entries; i++) x.table[i] = INT32_MIN;
    for (int64_t i = 0; i < x.free; i++) x.unused[i] = (int32_t)i;
    for (int64_t i = x.free - 1; i > 0; i--) {
        const int64_t j = h_below(&r, i + 1);
        const int32_t was = x.unused[i];
        x.unused[i] = x.unused[j];
        x.unused[j] = was;
    }
    for (int64_t i = 0; i < x.entries; i++) x.ends[2 * i] = d->kv_tokens;
    for (int64_t p = d->kv_tokens - 1; p >= 0; p--)
        if (ra_cache_owner(c, p) == rank) {
            int64_t *ends = x.ends + ra_cache_row(c, p) / page * 2;
            ends[1] = ends[1] < p ? p : ends[1];
            ends[0] = ends[0] < p ? ends[0] : p;
        }
    return x;
}

static void pool_free(pool *x) {
    free(x->table);
    free(x->unused);
    free(x->ends);
}

/* The page of a row that will be written. */
static void pool_take(pool *x, int32_t b, int64_t entry) {
    int32_t *page = &x->table[b * x->entries + entry];
    if (*page >= 0) return;
    if (b && x->ends[2 * entry + 1] < x->prefix) {
        *page = x->table[entry];
        return;
    }
    if (x->ring) {
        *page = (int32_t)(entry < x->kept ? entry : x->kept + (entry - x->kept) % x->ring);
        *page += (int32_t)(b * (x->kept + x->ring));
        return;
    }
    *page = x->unused[--x->free];
    x->least = x->least < x->free ? x->least : x->free;
}

/* Frees what the windows of a row at `at` and of later rows do not reach. */
static void pool_give(pool *x, const ra_mask *m, int32_t b, int64_t at, uint8_t *const kv[2]) {
    for (int64_t i = 0; i < x->entries && m->window && !x->ring && !x->prefix; i++) {
        int32_t *page = &x->table[b * x->entries + i];
        const int64_t *ends = x->ends + 2 * i;
        if (*page < 0 || ends[0] < m->keep || ends[1] > at - m->window - ROLLBACK) continue;
        for (int j = 0; j < 2; j++)
            memset(kv[j] + *page * x->bytes[j], 0xff, (size_t)x->bytes[j]);
        x->unused[x->free++] = *page;
        *page = -1;
    }
}

static ra_status steps_of(const run *x, ra_cache *c, int32_t rank) {
    const script *s = x->s;
    const ra_desc *d = &s->d;
    const int64_t rows = ra_cache_rows(c), qrow = d->q_heads * (int64_t)d->k_dim;
    const int64_t kb = row_bytes(d->k_dtype, d->k_dim) * d->kv_heads;
    const int64_t vb = row_bytes(d->v_dtype, d->v_dim) * d->kv_heads;
    const int32_t page = page_of(s, rank);
    pool pages = pool_new(s, c, rank, page ? page : 16);
    const int64_t cells = page ? pages.count * page : rows * d->sequences;
    uint8_t *k = (uint8_t *)need((size_t)(cells * kb));
    uint8_t *v = (uint8_t *)need((size_t)(cells * vb));
    uint8_t *const kv[2] = { k, v };
    float *q = (float *)need((size_t)(d->sequences * d->tokens * qrow) * 4);
    uint8_t *qx = (uint8_t *)need((size_t)(d->sequences * d->tokens * qrow) * 4);
    float *o = (float *)need((size_t)(d->sequences * d->tokens * d->q_heads * d->v_dim) * 4);
    float *lse = (float *)need((size_t)(d->sequences * d->tokens * d->q_heads) * 4);
    int64_t *pos = (int64_t *)need((size_t)d->tokens * 8);
    ra_status end = RA_OK;
    memset(k, 0xff, (size_t)(cells * kb));             /* NaN where nothing was stored */
    memset(v, 0xff, (size_t)(cells * vb));
    for (int32_t i = 0; i < s->steps && !end; i++) {
        ra_tensors t = { 0 };
        int64_t most = 0;
        ra_infer_report report;
        t.k.data = k;
        t.v.data = d->v_in_k ? NULL : v;
        if (page) {
            t.pages.table = pages.table;
            t.pages.batch_step = pages.entries;
            t.pages.count = pages.count;
        }
        for (int32_t b = 0; b < d->sequences; b++) {
            int64_t n = rows_here(s, c, i, b, rank, pos);
            most = most < n ? n : most;
            if (page) pool_give(&pages, &d->mask, b, s->cached[i][b], kv);
            for (int64_t j = s->prefix && i == 1 ? -s->cached[i][b] : 0; j < s->fresh[i][b]; j++) {
                int64_t p = s->cached[i][b] + j, at = (b * d->kv_tokens + p) * d->kv_heads;
                if (page && ra_cache_owner(c, p) == rank)
                    pool_take(&pages, b, ra_cache_row(c, p) / page);
                end = ra_cache_store(c, &t, b, p, s->k + at * d->k_dim,
                                     d->v_in_k ? NULL : s->v + at * d->v_dim);
                if (end) break;
            }
        }
        step_queries(s, c, i, rank, most, q);
        if (!end) end = ra_convert(qx, d->q_dtype, q, RA_F32, d->sequences * most * qrow);
        t.q.data = qx;
        t.o.data = o;
        t.lse.data = lse;
        if (d->scores & RA_SCORE_ALIBI) t.alibi = s->alibi;
        if (d->scores & RA_SCORE_SINKS) t.sinks = s->sinks;
        if (!end) end = ra_infer_query(c, s->cached[i], s->fresh[i], &report);
        if (rank == 0) x->out->travel[report.travel]++;
        if (rank == 0 && report.messages_in > x->out->most) x->out->most = report.messages_in;
        if (!end) end = infer(s, c, &t, i);
        if (end) fprintf(stderr, "rank %d step %d: %s: %s\n", rank, i, ra_status_text(end),
                         ra_cache_error(c)->text);
        if (!end) step_outputs(x, c, i, rank, most, o, lse);
    }
    if (rank == 0) x->out->spare = pages.least;
    pool_free(&pages);
    free(k); free(v); free(q); free(qx); free(o); free(lse); free(pos);
    return end;
}

static ra_status on_rank(ra_world *world, int rank, void *user) {
    run *x = (run *)user;
    ra_desc d = x->s->d;
    ra_cache *c = NULL;
    ra_error why = { 0 };
    ra_transport net = *ra_world_transport(world, rank), zero = zero_transport(&net);
    int32_t weights[MAX_P];
    ra_status end;
    if (d.layout.weights) {
        memcpy(weights, d.layout.weights, sizeof weights);
        d.layout.weights = weights;
    }
    d.ranks = x->ranks;
    d.rank = rank;
    d.error = &why;
    d.threads = x->s->threads;
    d.page_tokens = page_of(x->s, rank);
    end = ra_cache_create(&c, &d, x->s->level_0 ? &zero : &net, &x->s->cd);
    if (end) fprintf(stderr, "%s %s\n", why.field, why.text);
    memset(weights, 0, sizeof weights);                /* the cache has a copy */
    if (!end) end = steps_of(x, c, rank);
    x->end[rank] = end;
    ra_status gone = ra_cache_destroy(c);
    return end ? end : gone;
}

static outcome script_run(const script *s, int32_t ranks) {
    outcome out = outcome_new(s);
    run x = { 0 };
    x.s = s;
    x.out = &out;
    x.ranks = ranks;
    CHECK_EQ(ra_world_run(ranks, on_rank, &x, NULL), RA_OK);
    return out;
}

/* -------------------------------------------------------------------------- the reference */
static int sees(const ra_mask *m, int64_t p, int64_t key, int64_t end) {
    int64_t hi = m->kind == RA_MASK_CAUSAL ? p + 1 : end;
    if (key >= hi || key >= end) return 0;
    return !m->window || key > p - m->window || key < m->keep;
}

/* Row (b, p, h), with `end` keys in the cache. */
static void plain_row(const script *s, int32_t b, int64_t p, int32_t h, int64_t end, double *o,
                      double *lse) {
    const ra_desc *d = &s->d;
    const int32_t kh = h / (d->q_heads / d->kv_heads);
    const float *q = s->q + ((b * d->kv_tokens + p) * d->q_heads + h) * d->k_dim;
    const double scale = d->scale > 0 ? (double)d->scale : 1 / sqrt((double)d->k_dim);
    double top = -(double)INFINITY, sum = 0, *score = (double *)need((size_t)end * 8);
    for (int64_t j = 0; j < end; j++) {
        const float *k = s->k + ((b * d->kv_tokens + j) * d->kv_heads + kh) * d->k_dim;
        double x = 0;
        for (int32_t i = 0; i < d->k_dim; i++) x += (double)q[i] * (double)k[i];
        x *= scale;
        if (d->softcap > 0) x = (double)d->softcap * tanh(x / (double)d->softcap);
        if (d->scores & RA_SCORE_ALIBI) x -= (double)s->alibi[h] * fabs((double)(p - j));
        score[j] = sees(&d->mask, p, j, end) ? x : -(double)INFINITY;
        if (score[j] > top) top = score[j];
    }
    if (d->scores & RA_SCORE_SINKS && (double)s->sinks[h] > top) top = (double)s->sinks[h];
    for (int32_t i = 0; i < d->v_dim; i++) o[i] = 0;
    for (int64_t j = 0; j < end; j++) {
        const float *v = s->v + ((b * d->kv_tokens + j) * d->kv_heads + kh) * d->v_dim;
        const double w = score[j] > -(double)INFINITY ? exp(score[j] - top) : 0;
        sum += w;
        for (int32_t i = 0; i < d->v_dim; i++) o[i] += w * (double)v[i];
    }
    if (d->scores & RA_SCORE_SINKS) sum += exp((double)s->sinks[h] - top);
    for (int32_t i = 0; i < d->v_dim; i++) o[i] = sum > 0 ? o[i] / sum : 0;
    *lse = sum > 0 ? top + log(sum) : -(double)INFINITY;
    free(score);
}

/* 1 if rows may be computed by products of integers: q and weights have 16 bits, and errors were at
 * most 5e-5 in thousands of rows. */
static int integers(const script *s) {
    const int32_t isa = s->d.isa ? s->d.isa : ra_isa_best();
    return s->d.k_dtype >= RA_Q8_0 && (s->d.v_in_k || s->d.v_dtype >= RA_Q8_0) &&
           (isa == RA_ISA_AVX512_BF16 || isa == RA_ISA_AMX);
}

/* Compares some rows with the reference. */
static void compare(const script *s, const outcome *x, h_rng *r, double most) {
    const ra_desc *d = &s->d;
    double *o = (double *)need((size_t)d->v_dim * 8), lse;
    for (int n = 0; n < 60; n++) {
        int32_t i = h_below(r, s->steps), b = h_below(r, d->sequences), h = h_below(r, d->q_heads);
        int64_t p, at, end;
        double tol;
        if (!s->fresh[i][b]) continue;
        p = s->cached[i][b] + h_below(r, (int32_t)s->fresh[i][b]);
        for (int32_t j = i; j < s->steps; j++)         /* the last step that computed it */
            if (p >= s->cached[j][b] && p < s->cached[j][b] + s->fresh[j][b]) i = j;
        end = s->cached[i][b] + s->fresh[i][b];
        at = (b * d->kv_tokens + p) * d->q_heads + h;
        plain_row(s, b, p, h, end, o, &lse);
        tol = integers(s) ? 1e-4 : most;
        CHECK_CLOSE(x->o + at * d->v_dim, o, d->v_dim, tol, tol);
        CHECK_CLOSE(x->lse + at, &lse, 1, tol, tol);
    }
    free(o);
}

/* -------------------------------------------------------------------------- scripts */
/* Sequences that grow at different speeds: prompts in pieces, then decoding, drafts and
 * rollbacks. */
static void grow(script *s, h_rng *r, int64_t prompt) {
    int64_t at[MAX_B] = { 0 };
    s->steps = 0;
    while (s->steps < 24) {
        int any = 0;
        for (int32_t b = 0; b < s->d.sequences; b++) {
            int64_t n = at[b] < prompt + 37 * b ? 1 + h_below(r, (int32_t)s->d.tokens)
                                                : 1 + h_below(r, 6);
            if (h_below(r, 8) == 0) n = 0;
            if (at[b] > 20 && h_below(r, 6) == 0) at[b] -= h_below(r, 5);
            if (n > s->d.kv_tokens - at[b]) n = s->d.kv_tokens - at[b];
            s->cached[s->steps][b] = at[b];
            s->fresh[s->steps][b] = n;
            at[b] += n;
            any |= n > 0;
        }
        s->steps += any;
    }
}

static script script_new(int32_t hq, int32_t hkv, int32_t dim, int32_t dtype, int64_t kv_tokens) {
    script s = { 0 };
    s.d = ra_desc_make(hq, hkv, dim, RA_F32, RA_MASK_CAUSAL);
    s.d.k_dtype = s.d.v_dtype = dtype;
    s.d.sequences = 1;
    s.d.tokens = 150;
    s.d.kv_tokens = kv_tokens;
    s.threads = 1;
    s.cd.lanes = 8;
    return s;
}

/* Case i: GQA or MHA, two dims, every dtype of the cache, 1 to 3 sequences. */
static script script_case(int64_t i) {
    static const int32_t dtype[] = { RA_F32, RA_F16, RA_BF16, RA_Q8_0, RA_Q4_0 };
    script s = script_new(i % 3 ? 4 : 6, i % 3 ? 2 : 6, i % 2 ? 64 : 32, dtype[i % 5], 700);
    s.d.sequences = 1 + (int32_t)(i % 3);
    return s;
}

/* What a case adds to script_case: fields that are not 0. Its name is printed if it fails. */
typedef struct variation {
    const char *name;
    int64_t window, keep;
    int32_t q_dtype, scores, mask, queries, form;
} variation;

static void vary(script *s, const variation *v) {
    h_context("%s", v->name);
    if (v->q_dtype) s->d.q_dtype = v->q_dtype;
    if (v->mask) s->d.mask.kind = v->mask;
    s->d.mask.window = v->window;
    s->d.mask.keep = v->keep;
    s->d.scores = v->scores;
    s->d.form = v->form;
    s->cd.queries = v->queries;
}

static double tolerance(const script *s) {
    return s->d.q_dtype == RA_BF16 ? 4e-3 : 4e-6;
}

/* Keys travel only with RA_QUERIES_OWN. */
static int32_t any_travel(const script *s, h_rng *r) {
    const int32_t travel = h_below(r, 4);
    return s->cd.queries == RA_QUERIES_ALL && travel == RA_INFER_PASS_KV ? RA_INFER_AUTO : travel;
}

/* Any number of ranks and any travel give the results of one rank, bit for bit. */
static void everywhere(script *s, h_rng *r) {
    static const int32_t ranks[] = { 2, 3, 4, 5, 8 };
    outcome one = script_run(s, 1);
    compare(s, &one, r, tolerance(s));
    for (int i = 0; i < (int)(sizeof ranks / sizeof *ranks); i++) {
        outcome many;
        s->cd.travel = any_travel(s, r);
        s->threads = 1 + h_below(r, 3);
        s->level_0 = h_below(r, 2);
        if (!h_variant(h_run.case_now, i % 2)) continue;
        many = script_run(s, ranks[i]);
        same_bits(s, &many, &one);
        outcome_free(&many);
    }
    s->cd.travel = RA_INFER_AUTO;
    s->level_0 = 0;
    outcome_free(&one);
}

TEST(ranks_and_travel) {
    enum { SOFTCAP = 7, MHA = 10, CASES };
    static const variation cases[CASES] = {
        { .name = "MHA, D 32, f32" },
        { .name = "GQA, D 64, f16" },
        { .name = "bf16 queries, bf16 cache", .q_dtype = RA_BF16 },
        { .name = "window, q8_0", .window = 100 },
        { .name = "window of four blocks, kept tokens", .window = 64, .keep = 4 },
        { .name = "sinks, ALiBi", .scores = RA_SCORE_SINKS | RA_SCORE_ALIBI },
        { .name = "no mask, bf16 queries", .mask = RA_MASK_NONE, .q_dtype = RA_BF16 },
        { .name = "softcap" },
        { .name = "all queries on all ranks", .queries = RA_QUERIES_ALL },
        { .name = "one form", .form = RA_FORM_SAME },
        { .name = "8 heads with ALiBi, bf16 queries", .scores = RA_SCORE_ALIBI,
          .q_dtype = RA_BF16 },
    };
    for (int64_t i = 0; i < CASES; i++) {
        h_rng r = h_case_rng(i);
        script s;
        if (!h_case(i)) continue;
        s = script_case(i);
        vary(&s, &cases[i]);
        if (i == SOFTCAP) s.d.softcap = 20.0f;
        if (i == MHA) s.d.q_heads = s.d.kv_heads = 8;
        script_fill(&s, &r);
        grow(&s, &r, 300);
        everywhere(&s, &r);
        script_free(&s);
    }
}

/* V in every dtype that K does not have. */
TEST(unlike_dtypes) {
    for (int64_t i = 0; i < 12; i++) {
        h_rng r = h_case_rng(i);
        script s;
        outcome one, many;
        if (!h_case(i)) continue;
        s = script_new(i % 2 ? 8 : 3, i % 2 ? 2 : 3, i % 4 ? 32 : 64, RA_F32 + (int32_t)i / 3, 400);
        s.d.v_dtype = RA_F32 + (int32_t)(i / 3 + 1 + i % 3) % 4;
        if (i % 5 == 1) s.d.q_dtype = RA_BF16;
        if (i % 3 == 2) s.d.form = RA_FORM_SAME;
        script_fill(&s, &r);
        grow(&s, &r, 200);
        one = script_run(&s, 1);
        compare(&s, &one, &r, tolerance(&s));
        s.page = i % 2 ? 0 : 1 + h_below(&r, 5);
        s.threads = 1 + h_below(&r, 2);
        s.cd.travel = h_below(&r, 4);
        s.level_0 = h_below(&r, 2);
        many = script_run(&s, 2 + h_below(&r, 3));
        CHECK_BITS(many.o, one.o, q_size(&s) * s.d.v_dim * 4);
        CHECK_BITS(many.lse, one.lse, q_size(&s) * 4);
        outcome_free(&many);
        outcome_free(&one);
        script_free(&s);
    }
}

/* With RA_QUERIES_ALL every rank gets all rows, sinks included, in the bits of one rank. */
TEST(all_queries) {
    static const int32_t ranks[] = { 2, 3, 4, 8 };
    for (int64_t i = 0; i < 8; i++) {
        static const int32_t dtype[] = { RA_F32, RA_F16, RA_BF16, RA_Q8_0, RA_Q4_0 };
        h_rng r = h_case_rng(i);
        script s;
        outcome one, many;
        if (!h_case(i)) continue;
        s = script_new(8, i % 2 ? 8 : 2, 32, dtype[i % 5], 300);
        s.d.sequences = 2 + (int32_t)(i % 3);
        s.d.tokens = i % 4 == 1 ? 60 : 3;
        s.cd.queries = RA_QUERIES_ALL;
        if (i % 2) s.d.scores = RA_SCORE_SINKS | RA_SCORE_ALIBI;
        if (i == 4) s.d.form = RA_FORM_SAME;
        script_fill(&s, &r);
        grow(&s, &r, 100);
        one = script_run(&s, 1);
        compare(&s, &one, &r, tolerance(&s));
        for (int merges = 0; merges < 2; merges++) {
            s.cd.travel = merges ? RA_INFER_MERGE : RA_INFER_PASS_Q;
            s.threads = 1 + h_below(&r, 2);
            s.page = h_below(&r, 4);
            many = script_run(&s, ranks[i / 2]);
            same_bits(&s, &many, &one);
            CHECK(merges == (many.travel[RA_INFER_MERGE] > 0));
            outcome_free(&many);
        }
        outcome_free(&one);
        script_free(&s);
    }
}

/* Caches in pages, of another size on every rank and in any order, have the bits of those without
 * pages: for every travel and form, and when pages that no row sees any more are reused. */
TEST(pages) {
    enum { REUSED = 10, LANES_OF_RANKS, CASES };       /* from REUSED on pages are reused */
    static const int32_t ranks[] = { 1, 2, 3, 5 };
    static const variation cases[CASES] = {
        { .name = "few tokens per call" },
        { .name = "many tokens per call" },
        { .name = "bf16 queries", .q_dtype = RA_BF16 },
        { .name = "window, q8_0", .window = 60 },
        { .name = "ALiBi", .scores = RA_SCORE_ALIBI },
        { .name = "all queries on all ranks", .queries = RA_QUERIES_ALL },
        { .name = "one form, bf16 queries", .form = RA_FORM_SAME, .q_dtype = RA_BF16 },
        { .name = "GQA, q8_0" },
        { .name = "one form, window, kept tokens", .form = RA_FORM_SAME, .window = 60, .keep = 20 },
        { .name = "no mask", .mask = RA_MASK_NONE },
        { .name = "pages reused, bf16 queries", .q_dtype = RA_BF16, .window = 50, .keep = 4 },
        { .name = "pages reused, a lane per rank", .window = 50, .keep = 4 },
    };
    for (int64_t i = 0; i < CASES; i++) {
        h_rng r = h_case_rng(i);
        script s;
        outcome plain;
        if (!h_case(i)) continue;
        s = script_case(i);
        s.d.tokens = i % 2 ? 150 : 40;
        vary(&s, &cases[i]);
        script_fill(&s, &r);
        grow(&s, &r, 300);
        for (int j = 0; j < 2; j++) {
            const int32_t n = ranks[(i + 2 * j) % 4];
            if (!h_variant(i / 2, j)) continue;
            r = h_case_rng(-1 - 2 * i - j);
            if (i == LANES_OF_RANKS) s.cd.lanes = n;
            s.page = 0;
            plain = script_run(&s, i == LANES_OF_RANKS ? n : 1);
            compare(&s, &plain, &r, tolerance(&s));
            s.page = i >= REUSED ? 5 : 1 + h_below(&r, 5);
            s.threads = 1 + h_below(&r, 3);
            for (int32_t travel = RA_INFER_PASS_Q; travel <= RA_INFER_MERGE; travel++) {
                outcome many;
                if (s.cd.queries == RA_QUERIES_ALL && travel == RA_INFER_PASS_KV) continue;
                s.cd.travel = travel;
                many = script_run(&s, n);
                same_bits(&s, &many, &plain);
                if (i >= REUSED && n == 1) CHECK(many.spare > 2 + s.d.sequences);
                outcome_free(&many);
            }
            s.cd.travel = RA_INFER_AUTO;
            outcome_free(&plain);
        }
        script_free(&s);
    }
}

/* Prompts in pieces of more than a block have the bits of one rank: for every number of ranks and
 * threads, with pages, and if every rank passes all queries. */
TEST(prompts) {
    enum { V_IN_K = 6, CASES = 8 };
    static const int32_t ranks[] = { 2, 3, 4, 8 };
    static const variation cases[CASES] = {
        { .name = "MHA, f32" },
        { .name = "GQA, f16" },
        { .name = "bf16 queries", .q_dtype = RA_BF16 },
        { .name = "window, kept tokens, all queries, q8_0", .window = 100, .keep = 4,
          .queries = RA_QUERIES_ALL },
        { .name = "sinks, ALiBi", .scores = RA_SCORE_SINKS | RA_SCORE_ALIBI },
        { .name = "no mask", .mask = RA_MASK_NONE },
        { .name = "V in K" },
        { .name = "q8_0, all queries", .queries = RA_QUERIES_ALL },
    };
    for (int64_t i = 0; i < CASES; i++) {
        h_rng r = h_case_rng(i);
        script s;
        outcome one, many;
        if (!h_case(i)) continue;
        s = script_case(i);
        vary(&s, &cases[i]);
        script_fill(&s, &r);
        if (i == V_IN_K) { s.d.v_in_k = 1; s.d.v_dtype = 0; }
        grow(&s, &r, 300);
        for (int32_t step = 0; step < s.steps; step++)
            for (int32_t b = 0; b < s.d.sequences; b++) {
                s.cached[step][b] = step ? s.cached[step - 1][b] + s.fresh[step - 1][b] : 0;
                s.fresh[step][b] = (step + b) % 4 ? RA_BLOCK_TOKENS + h_below(&r, 80) : 0;
                if (s.cached[step][b] + s.fresh[step][b] > s.d.kv_tokens) s.fresh[step][b] = 0;
            }
        one = script_run(&s, 1);
        if (!s.d.v_in_k) compare(&s, &one, &r, tolerance(&s));
        for (int j = 0; j < 4; j++) {
            s.page = j % 2 ? 1 + h_below(&r, 5) : 0;
            s.threads = 1 + h_below(&r, 3);
            s.cd.travel = any_travel(&s, &r);
            many = script_run(&s, ranks[j]);
            same_bits(&s, &many, &one);
            outcome_free(&many);
        }
        outcome_free(&one);
        script_free(&s);
    }
}

/* Ring buffers, with a window and kept tokens, are page tables whose entries are reused. */
TEST(ring_buffers) {
    static const int32_t ranks[] = { 1, 2, 3, 5 };
    for (int64_t i = 0; i < 8; i++) {
        h_rng r = h_case_rng(i);
        script s;
        outcome plain, ring;
        if (!h_case(i)) continue;
        s = script_new(4, 2, 32, i % 2 ? RA_F16 : RA_F32, 900);
        s.d.sequences = 1 + (int32_t)(i % 2);
        s.d.tokens = i % 3 ? 30 : 90;
        s.d.mask.window = 1 + h_below(&r, 90);
        s.d.mask.keep = h_below(&r, 3) * 9;
        s.cd.lanes = ranks[i % 4];
        s.cd.travel = RA_INFER_PASS_Q + (int32_t)(i / 4);
        script_fill(&s, &r);
        grow(&s, &r, 600);
        plain = script_run(&s, ranks[i % 4]);
        compare(&s, &plain, &r, tolerance(&s));
        s.ring = 1;
        s.threads = 1 + h_below(&r, 2);
        ring = script_run(&s, ranks[i % 4]);
        same_bits(&s, &ring, &plain);
        s.ring = 0;
        outcome_free(&plain);
        plain = script_run(&s, 1);     /* and the bits of one rank */
        CHECK_BITS(ring.o, plain.o, q_size(&s) * s.d.v_dim * 4);
        outcome_free(&plain);
        outcome_free(&ring);
        script_free(&s);
    }
}

/* Sequences that begin with the same pages: decoded together they have the same bits as alone. */
TEST(shared_prefixes) {
    enum { CASES = 8 };
    static const variation cases[CASES] = {
        { .name = "a long prefix" },
        { .name = "f16, two lanes" },
        { .name = "bf16 queries", .q_dtype = RA_BF16 },
        { .name = "window, q8_0", .window = 1300 },
        { .name = "window, kept tokens, q4_0", .window = 900, .keep = 5 },
        { .name = "ALiBi, f32", .scores = RA_SCORE_ALIBI },
        { .name = "all queries, f16", .queries = RA_QUERIES_ALL, .q_dtype = RA_BF16 },
        { .name = "no mask, bf16", .mask = RA_MASK_NONE },
    };
    for (int64_t i = 0; i < CASES; i++) {
        static const int32_t dtype[] = { RA_F32, RA_F16, RA_BF16, RA_Q8_0, RA_Q4_0 };
        h_rng r = h_case_rng(i);
        script s;
        outcome plain, shared;
        int64_t at[MAX_B], row;
        if (!h_case(i) || !h_variant(i % 4, (int)(i / 4))) continue;
        s = script_new(i % 2 ? 4 : 2, i % 2 ? 1 : 2, 32, dtype[i % 5], i ? 3000 : 5600);
        s.d.sequences = 4;
        s.d.tokens = s.d.kv_tokens - 50;
        s.cd.lanes = 1 + (int32_t)(i % 2);
        s.cd.travel = RA_INFER_PASS_Q;
        vary(&s, &cases[i]);
        script_fill(&s, &r);
        row = s.d.kv_tokens * s.d.kv_heads * s.d.k_dim;
        s.prefix = i == 0 ? 4700 : i % 2 ? 2300 : 1300;
        for (int32_t b = 1; b < MAX_B; b++) {
            memcpy(s.k + b * row, s.k, (size_t)(s.prefix * s.d.kv_heads * s.d.k_dim) * 4);
            memcpy(s.v + b * row, s.v, (size_t)(s.prefix * s.d.kv_heads * s.d.k_dim) * 4);
        }
        for (int32_t b = 0; b < MAX_B; b++) {          /* the first one, then the others' ends */
            at[b] = s.prefix + h_below(&r, i % 4 ? 60 : 600);
            s.fresh[0][b] = b ? 0 : at[b];
            s.cached[1][b] = b ? s.prefix : at[b];
            s.fresh[1][b] = b ? at[b] - s.prefix : 0;
        }
        for (s.steps = 2; s.steps < 6; s.steps++)
            for (int32_t b = 0; b < MAX_B; b++) {
                s.cached[s.steps][b] = at[b];
                s.fresh[s.steps][b] = s.steps == 4 && b == 2 ? i % 3 : 1;
                at[b] += s.fresh[s.steps][b];
            }
        s.threads = 1 + (int)(i / 2 % 2);
        plain = script_run(&s, 1);
        s.page = 1 + h_below(&r, 5);
        shared = script_run(&s, s.cd.lanes);
        same_bits(&s, &shared, &plain);
        compare(&s, &plain, &r, 2 * tolerance(&s));
        outcome_free(&plain);
        outcome_free(&shared);
        script_free(&s);
    }
}

/* A prefix of whole leaves is one portion for all sequences, and so one step. */
TEST(shared_prefixes_are_one_portion) {
    enum { B = 6, KEYS = 1024, PAGES = B * (KEYS / 16 + 1) };
    int64_t cached[B], fresh[B];
    int32_t table[B][KEYS / 16 + 1];
    int steps[2] = { 0, 0 };
    ra_desc d = ra_desc_make(4, 4, 32, RA_F32, RA_MASK_CAUSAL);
    float *k = (float *)need(PAGES * 16 * 4 * 32 * 4), *q = (float *)need(2 * B * 4 * 32 * 4);
    ra_cache *c = NULL;
    ra_tensors t = { 0 };
    d.sequences = B;
    d.tokens = 1;
    d.kv_tokens = KEYS + 16;
    d.page_tokens = 16;
    CHECK_EQ(ra_cache_create(&c, &d, NULL, NULL), RA_OK);
    t.q.data = q;
    t.o.data = q + B * 4 * 32;
    t.k.data = t.v.data = k;
    t.pages.table = table[0];
    t.pages.batch_step = KEYS / 16 + 1;
    t.pages.count = PAGES;
    for (int shared = 0; shared < 2; shared++) {
        ra_status s;
        for (int i = 0; i < PAGES; i++) {
            const int b = i / (KEYS / 16 + 1), entry = i % (KEYS / 16 + 1);
            table[b][entry] = shared && entry < KEYS / 16 ? entry : i;
            cached[b] = KEYS + b;
            fresh[b] = 1;
        }
        CHECK_EQ(ra_infer_begin(c, &t, cached, fresh, 0), RA_OK);
        while ((s = ra_infer_step(c, 0)) > 0) steps[shared]++;
        CHECK_EQ(s, RA_OK);
    }
    CHECK_EQ(steps[0] - steps[1], B - 1);
    CHECK_EQ(ra_cache_destroy(c), RA_OK);
    free(k);
    free(q);
}

/* Threads divide the heads of a sequence that has few spans: two portions, so two steps, where one
 * thread has one. Each token has the bits that it has on one thread. */
TEST(threads_share_heads) {
    enum { KEYS = 3000, HEADS = 4, DIM = 32 };
    const int64_t cached = KEYS - 1, fresh = 1;
    float *k = (float *)need(KEYS * HEADS * DIM * 4), q[HEADS * DIM], o[2][HEADS * DIM];
    h_rng r = h_case_rng(0);
    ra_desc d = ra_desc_make(HEADS, HEADS, DIM, RA_F32, RA_MASK_CAUSAL);
    int steps[2] = { 0, 0 };
    ra_tensors t = { 0 };
    for (int i = 0; i < KEYS * HEADS * DIM; i++) k[i] = h_normal(&r);
    for (int i = 0; i < HEADS * DIM; i++) q[i] = h_normal(&r);
    d.tokens = 1;
    d.kv_tokens = KEYS;
    t.q.data = q;
    t.k.data = t.v.data = k;
    for (int i = 0; i < 2; i++) {
        ra_cache *c = NULL;
        ra_status s;
        d.threads = 1 + i;
        t.o.data = o[i];
        CHECK_EQ(ra_cache_create(&c, &d, NULL, NULL), RA_OK);
        CHECK_EQ(ra_infer_begin(c, &t, &cached, &fresh, 0), RA_OK);
        while ((s = ra_infer_step(c, 0)) > 0) steps[i]++;
        CHECK_EQ(s, RA_OK);
        CHECK_EQ(ra_cache_destroy(c), RA_OK);
    }
    CHECK_EQ(steps[1] - steps[0], 1);
    CHECK_BITS(o[1], o[0], sizeof o[0]);
    free(k);
}

/* -------------------------------------------------------------------------- ra_attention, pages */
/* The same keys in rows and in pages. */
typedef struct twice {
    ra_desc d;
    ra_tensors t[2];
    ra_run cut[2];
    int32_t page, threads, table[240];
    uint8_t *kv[2][2];                 /* K and V in rows, in pages */
} twice;

static void twice_data(twice *x, h_rng *r) {
    const ra_desc *d = &x->d;
    const int64_t rows = d->sequences * d->kv_tokens, first = x->t[1].pages.first;
    const int64_t per = x->t[1].pages.batch_step, cells = x->t[1].pages.count * x->page;
    for (int i = 0; i < 2; i++) {
        const int64_t dim = i ? d->v_dim : d->k_dim, row = row_bytes(d->k_dtype, dim) * d->kv_heads;
        float f[256];
        x->kv[0][i] = (uint8_t *)need((size_t)(rows * row));
        x->kv[1][i] = (uint8_t *)need((size_t)(cells * row));
        memset(x->kv[1][i], 0xff, (size_t)(cells * row));
        for (int64_t j = 0; j < rows * d->kv_heads; j++) {
            for (int64_t n = 0; n < dim; n++) f[n] = (float)h_normal(r);
            ra_convert(x->kv[0][i] + j * (row / d->kv_heads), d->k_dtype, f, RA_F32, dim);
        }
        for (int64_t j = 0; j < rows; j++) {
            const int64_t at = j % d->kv_tokens + first;
            const int64_t page = x->table[j / d->kv_tokens * per + at / x->page];
            memcpy(x->kv[1][i] + (page * x->page + at % x->page) * row, x->kv[0][i] + j * row,
                   (size_t)row);
        }
    }
}

static void twice_make(twice *x, h_rng *r) {
    static const int32_t dtype[] = { RA_F32, RA_F16, RA_BF16, RA_Q8_0, RA_Q4_0 };
    int32_t used[240] = { 0 };
    const int64_t keys = 1 + h_below(r, 900), fresh = h_below(r, 2) ? 1 : 1 + h_below(r, 80);
    ra_pages *p = &x->t[1].pages;
    memset(x, 0, sizeof *x);
    x->d = ra_desc_make(8, 1 << h_below(r, 4), 32 << h_below(r, 3), RA_F32, RA_MASK_CAUSAL);
    x->page = 16 * (1 + h_below(r, 5));
    x->threads = 1 + h_below(r, 2);
    x->d.sequences = 1 + h_below(r, 2);
    x->d.k_dtype = x->d.v_dtype = dtype[h_below(r, 5)];
    if (x->d.k_dtype == RA_BF16) x->d.q_dtype = RA_BF16;
    x->d.v_in_k = h_one_in(r, 6);
    if (x->d.v_in_k) { x->d.v_dim = 32; x->d.v_dtype = 0; }
    if (h_one_in(r, 4)) x->d.mask.window = 1 + h_below(r, 200);
    x->d.tokens = fresh < keys ? fresh : keys;
    x->d.kv_tokens = keys;
    x->d.q_offset = keys - x->d.tokens;
    p->table = x->table;
    p->first = h_below(r, x->page);
    p->batch_step = (keys + x->page) / x->page + 1;
    p->count = 240;
    for (int64_t j = 0; j < x->d.sequences * p->batch_step; j++) {
        do x->table[j] = h_below(r, p->count); while (used[x->table[j]]);
        used[x->table[j]] = 1;
    }
    twice_data(x, r);
    if (h_one_in(r, 3) && keys > 2) {                  /* blocks that begin anywhere */
        x->cut[0].count = x->cut[1].first = 1 + h_below(r, keys - 1);
        x->cut[1].count = keys - x->cut[0].count;
        x->t[0].k_pos.runs = x->t[1].k_pos.runs = x->cut;
        x->t[0].k_pos.count = x->t[1].k_pos.count = 2;
    }
}

/* ra_attention over pages has the bits of the same call without. */
TEST(attention_pages) {
    for (int64_t i = 0; i < 40; i++) {
        h_rng r = h_case_rng(i);
        twice x;
        float *q, *o[2];
        int64_t queries, outs;
        if (!h_case(i)) continue;
        twice_make(&x, &r);
        queries = x.d.sequences * x.d.tokens * x.d.q_heads * x.d.k_dim;
        outs = x.d.sequences * x.d.tokens * x.d.q_heads * x.d.v_dim;
        q = (float *)need((size_t)queries * 4);
        for (int64_t j = 0; j < queries; j++) {
            const float f = (float)h_normal(&r);
            ra_convert((uint8_t *)q + j * row_bytes(x.d.q_dtype, 1), x.d.q_dtype, &f, RA_F32, 1);
        }
        for (int paged = 0; paged < 2; paged++) {
            uint8_t *memory;
            size_t bytes;
            ra_tensors *t = &x.t[paged];
            o[paged] = (float *)need((size_t)outs * 4);
            x.d.page_tokens = paged ? x.page : 0;
            bytes = ra_attention_bytes(&x.d, x.threads);
            memory = (uint8_t *)need(bytes);
            t->q.data = q;
            t->k.data = x.kv[paged][0];
            t->v.data = x.d.v_in_k ? NULL : x.kv[paged][1];
            t->o.data = o[paged];
            for (int ith = x.threads - 1; ith >= 0; ith--)
                CHECK_EQ(ra_attention(&x.d, t, memory, bytes, ith, x.threads), RA_OK);
            free(memory);
        }
        CHECK_BITS(o[1], o[0], outs * 4);
        free(q); free(o[0]); free(o[1]);
        for (int j = 0; j < 4; j++) free(x.kv[j / 2][j % 2]);
    }
}

/* Lanes of several leaves and spans, which threads divide: by spans, in the last case by heads. */
TEST(long_caches) {
    static const int64_t fresh[] = { 4000, 4000, 1000, 1, 3, 8, 1 };
    static const int32_t kv_heads[] = { 1, 1, 3 }, lanes[] = { 2, 1, 1 };
    static const int32_t dtypes[] = { RA_F32, RA_BF16, RA_F16 };
    for (int64_t i = 0; i < 3; i++) {
        h_rng r = h_case_rng(i);
        script s;
        outcome one, many;
        int64_t at = 0;
        if (!h_case(i)) continue;
        s = script_new(2 * kv_heads[i], kv_heads[i], 16, dtypes[i], 9100);
        s.d.tokens = 4000;
        s.d.v_dim = 24;
        s.cd.lanes = lanes[i];
        s.cd.travel = RA_INFER_PASS_Q;
        for (s.steps = 0; s.steps < 7; s.steps++) {
            s.cached[s.steps][0] = at;
            s.fresh[s.steps][0] = fresh[s.steps];
            at += fresh[s.steps];
        }
        script_fill(&s, &r);
        one = script_run(&s, 1);
        s.threads = 2;
        s.page = 1;                    /* pages of 32 tokens on rank 0 */
        many = script_run(&s, s.cd.lanes);
        compare(&s, &one, &r, 8e-6);
        same_bits(&s, &many, &one);
        outcome_free(&many);
        outcome_free(&one);
        script_free(&s);
    }
}

/* Any number of lanes from the number of ranks on, shards of unequal size, and a separate lane
 * count per number of ranks. Compared only with the reference. */
TEST(lanes_and_weights) {
    for (int64_t i = 0; i < 12; i++) {
        h_rng r = h_case_rng(i);
        int32_t weights[MAX_P], ranks = 1 + h_below(&r, 6);
        script s;
        outcome one, many;
        if (!h_case(i)) continue;
        s = script_new(4, 1, 32, RA_F32, 400);
        s.d.sequences = 1 + h_below(&r, 3);
        s.cd.lanes = ranks + h_below(&r, 20);
        s.threads = 1 + h_below(&r, 2);
        s.cd.queries = h_one_in(&r, 3) ? RA_QUERIES_ALL : RA_QUERIES_OWN;
        s.cd.travel = i % 3 ? RA_INFER_MERGE : RA_INFER_AUTO;
        for (int p = 0; p < MAX_P; p++) weights[p] = h_below(&r, 5);
        weights[0] = 3;
        script_fill(&s, &r);
        grow(&s, &r, 200);
        one = script_run(&s, 1);
        if (i % 2) s.d.layout.weights = weights;
        many = script_run(&s, ranks);
        compare(&s, &one, &r, tolerance(&s));
        same_bits(&s, &many, &one);
        outcome_free(&many);
        s.cd.lanes = 0;
        many = script_run(&s, ranks);
        compare(&s, &many, &r, tolerance(&s));
        outcome_free(&many);
        outcome_free(&one);
        script_free(&s);
    }
}

/* Rows of K that each rank has room for, of `tokens` positions; their sum. */
static int64_t room_of(const int32_t *weights, int32_t ranks, int32_t lanes, int64_t *rows) {
    ra_desc d = ra_desc_make(2, 1, 32, RA_F32, RA_MASK_CAUSAL);
    ra_cache_desc cd = { 0 };
    ra_world_desc wd = { 0 };
    ra_world *world = NULL;
    int64_t sum = 0;
    wd.ranks = d.ranks = ranks;
    d.tokens = 1;
    d.kv_tokens = 1 << 16;
    d.layout.weights = weights;
    cd.lanes = lanes;
    CHECK_EQ(ra_world_create(&world, &wd), RA_OK);
    for (d.rank = 0; world && d.rank < ranks; d.rank++) {
        ra_cache *c = NULL;
        CHECK_EQ(ra_cache_create(&c, &d, ra_world_transport(world, d.rank), &cd), RA_OK);
        rows[d.rank] = 0;
        for (int64_t p = 0; p < d.kv_tokens; p += 16)
            if (ra_cache_owner(c, p) == d.rank) rows[d.rank] += 16;
        sum += rows[d.rank];
        CHECK_EQ(ra_cache_destroy(c), RA_OK);
    }
    ra_world_destroy(world);
    return sum;
}

/* If no number of lanes is given, shards have the sizes that the weights request. */
TEST(chosen_lanes) {
    static const int32_t nine[] = { 9, 1 }, equal[] = { 7, 7, 7 }, none[] = { 1, 0 };
    int64_t rows[8];
    CHECK_EQ(room_of(nine, 2, 0, rows), 1 << 16);
    CHECK(rows[1] > 6226 && rows[1] < 6881);
    CHECK_EQ(room_of(nine, 2, 2, rows), 1 << 16);          /* as many as requested */
    CHECK_EQ(rows[1], 1 << 15);
    CHECK_EQ(room_of(equal, 3, 0, rows), 1 << 16);         /* as many lanes as ranks */
    CHECK_EQ(rows[0], 21856);
    CHECK_EQ(room_of(none, 2, 0, rows), 1 << 16);
    CHECK(rows[1] >= 16 && rows[1] * 20 <= 1 << 16);
    for (int64_t i = 0; i < 40; i++) {
        h_rng r = h_case_rng(i);
        const int32_t ranks = 2 + h_below(&r, 3);
        int32_t weights[8], sum = 0;
        if (!h_case(i)) continue;
        for (int p = 0; p < ranks; p++) sum += weights[p] = 4 + h_below(&r, 12);
        CHECK_EQ(room_of(weights, ranks, 0, rows), 1 << 16);
        for (int p = 0; p < ranks; p++) {
            const double due = 65536.0 * weights[p] / sum;
            CHECK((double)rows[p] > 0.93 * due && (double)rows[p] < 1.07 * due);
        }
    }
}

/* RA_FORM_SAME: the bits of a row are those of the row alone, however the tokens were cut into
 * calls, and in any batch. */
TEST(drafts_are_exact) {
    for (int64_t i = 0; i < 6; i++) {
        static const int32_t dtype[] = { RA_F32, RA_F16, RA_BF16 };
        h_rng r = h_case_rng(i);
        script s;
        outcome alone, drafts;
        if (!h_case(i)) continue;
        s = script_new(i % 2 ? 8 : 3, i % 2 ? 2 : 3, 32, dtype[i % 3], 160);
        if (dtype[i % 3] == RA_BF16) s.d.q_dtype = RA_BF16;
        s.d.form = RA_FORM_SAME;
        script_fill(&s, &r);
        for (s.steps = 0; s.steps < 60; s.steps++) {   /* one token per call */
            s.cached[s.steps][0] = s.steps;
            s.fresh[s.steps][0] = 1;
        }
        alone = script_run(&s, 1);
        s.steps = 0;
        for (int64_t at = 0, n; at < 60; at += n, s.steps++) {
            n = 1 + h_below(&r, 60 - at < 20 ? 60 - at : 20);
            s.cached[s.steps][0] = at;
            s.fresh[s.steps][0] = n;
        }
        drafts = script_run(&s, 1 + h_below(&r, 4));
        CHECK_BITS(drafts.o, alone.o, 60 * s.d.q_heads * s.d.v_dim * 4);
        CHECK_BITS(drafts.lse, alone.lse, 60 * s.d.q_heads * 4);
        outcome_free(&drafts);
        outcome_free(&alone);
        script_free(&s);
    }
}

/* -------------------------------------------------------------------------- ra_infer_join */
/* Threads of an engine without a main thread: no barrier, and a buffer of outputs for each step. */
typedef struct crew {
    const run *x;
    ra_cache *c;
    int32_t rank, through;             /* atomic: steps that thread 0 has finished */
    ra_tensors t[64];
    int64_t most[64];
    ra_status worst;                   /* atomic */
} crew;

typedef struct hand { crew *w; int ith; h_rng rng; } hand;

/* A thread may leave in the middle of a step, and then joins the next. */
static void *hand_main(void *arg) {
    hand *h = (hand *)arg;
    crew *w = h->w;
    const script *s = w->x->s;
    for (int32_t i = 0; i < s->steps; i++) {
        ra_status end = RA_AGAIN;
        ra_infer_job job = { 0 };
        job.ticket = 1 + 3 * (uint64_t)i;
        job.tensors = &w->t[i];
        job.cached = s->cached[i];
        job.fresh = s->fresh[i];
        job.deadline_ns = ra_deadline_ms(60000);
        while (h->ith && h_one_in(&h->rng, 3)) sched_yield();
        while (end > 0 && !(h->ith && h_one_in(&h->rng, 60))) {
            end = ra_infer_join(w->c, &job, h->ith);
            if (end == RA_WAIT) sched_yield();
        }
        if (end < 0) {
            fprintf(stderr, "step %d: %s\n", i, ra_status_text(end));
            __atomic_store_n(&w->worst, end, __ATOMIC_SEQ_CST);
            return NULL;
        }
        while (end > 0 && __atomic_load_n(&w->through, __ATOMIC_SEQ_CST) <= i &&
               !__atomic_load_n(&w->worst, __ATOMIC_SEQ_CST)) sched_yield();
        if (h->ith == 0) __atomic_fetch_add(&w->through, 1, __ATOMIC_SEQ_CST);
    }
    return NULL;
}

static void crew_outputs(crew *w) {
    for (int32_t i = 0; i < w->x->s->steps; i++) {
        step_outputs(w->x, w->c, i, w->rank, w->most[i], (const float *)w->t[i].o.data,
                     (const float *)w->t[i].lse.data);
        free((void *)(uintptr_t)w->t[i].q.data);
        free(w->t[i].o.data);
        free(w->t[i].lse.data);
    }
}

/* All keys are stored in advance; earlier steps do not see those of later ones. */
static ra_status crew_steps(crew *w, float *k, float *v) {
    const script *s = w->x->s;
    const ra_desc *d = &s->d;
    int64_t *pos = (int64_t *)need((size_t)d->tokens * 8);
    ra_tensors kv = { 0 };
    kv.k.data = k;
    kv.v.data = v;
    for (int32_t b = 0; b < d->sequences; b++)
        for (int64_t p = 0; p < d->kv_tokens; p++) {
            int64_t at = (b * d->kv_tokens + p) * d->kv_heads;
            ra_status end = ra_cache_store(w->c, &kv, b, p, s->k + at * d->k_dim,
                                           s->v + at * d->v_dim);
            if (end) return end;
        }
    for (int32_t i = 0; i < s->steps; i++) {
        int64_t rows;
        for (int32_t b = 0; b < d->sequences; b++) {
            int64_t n = rows_here(s, w->c, i, b, w->rank, pos);
            w->most[i] = w->most[i] < n ? n : w->most[i];
        }
        rows = d->sequences * w->most[i] * d->q_heads;
        w->t[i] = kv;
        w->t[i].q.data = need((size_t)(rows * d->k_dim) * 4);
        w->t[i].o.data = need((size_t)(rows * d->v_dim) * 4);
        w->t[i].lse.data = need((size_t)rows * 4);
        step_queries(s, w->c, i, w->rank, w->most[i], (float *)(uintptr_t)w->t[i].q.data);
    }
    free(pos);
    return RA_OK;
}

/* Of threads 0 to threads - 1, number 1 never joins if there are three. */
static ra_status crew_rank(ra_world *world, int rank, void *user) {
    crew w = { 0 };
    hand h[4];
    pthread_t id[4];
    int come[4], n = 0;
    ra_desc d;
    ra_status end;
    w.x = (const run *)user;
    w.rank = rank;
    d = w.x->s->d;
    d.ranks = w.x->ranks;
    d.rank = rank;
    d.threads = w.x->s->threads;
    end = ra_cache_create(&w.c, &d, ra_world_transport(world, rank), &w.x->s->cd);
    if (end) return end;
    float *k = (float *)need((size_t)(d.sequences * ra_cache_rows(w.c) * d.kv_heads * d.k_dim) * 4);
    float *v = (float *)need((size_t)(d.sequences * ra_cache_rows(w.c) * d.kv_heads * d.v_dim) * 4);
    end = crew_steps(&w, k, v);
    for (int i = 0; i < d.threads && !end; i++)
        if (i != 1 || d.threads != 3) come[n++] = i;
    for (int i = 0; i < n; i++) {
        h[i].w = &w;
        h[i].ith = come[i];
        h[i].rng = h_case_rng(100 * rank + i);
        if (pthread_create(&id[i], NULL, hand_main, &h[i])) abort();
    }
    for (int i = 0; i < n; i++) pthread_join(id[i], NULL);
    crew_outputs(&w);
    if (!end) end = w.worst;
    ra_status gone = ra_cache_destroy(w.c);
    free(k);
    free(v);
    return end ? end : gone;
}

/* Threads that join late, leave early or never join delay no other thread and change no bit. */
TEST(joined_threads) {
    for (int64_t i = 0; i < 6; i++) {
        h_rng r = h_case_rng(i);
        script s;
        outcome one, many;
        run x = { 0 };
        if (!h_case(i)) continue;
        s = script_new(4, 2, 32, RA_F32, 500);
        s.d.sequences = 1 + (int32_t)(i % 2);
        script_fill(&s, &r);
        grow(&s, &r, 200);
        one = script_run(&s, 1);
        many = outcome_new(&s);
        x.s = &s;
        x.out = &many;
        x.ranks = 1 + (int32_t)(i % 3);
        s.threads = 2 + (int)(i / 2 % 3);
        CHECK_EQ(ra_world_run(x.ranks, crew_rank, &x, NULL), RA_OK);
        same_bits(&s, &many, &one);
        outcome_free(&many);
        outcome_free(&one);
        script_free(&s);
    }
}

/* Every thread that brings the ticket gets the refusal, however late. The next ticket works. */
TEST(joined_refusals) {
    script s = script_new(4, 2, 32, RA_F32, 100);
    static float room[128 * 2 * 32], q[4 * 32], o[4 * 32];
    int64_t cached = 100, fresh = 1;
    ra_infer_job job = { 0 };
    ra_cache *c = NULL;
    ra_tensors t = { 0 };
    ra_status end;
    t.q.data = q; t.o.data = o; t.k.data = room; t.v.data = room;
    job.tensors = &t;
    job.cached = &cached;
    job.fresh = &fresh;
    CHECK_EQ(ra_cache_create(&c, &s.d, NULL, NULL), RA_OK);
    CHECK_EQ(ra_infer_join(NULL, &job, 0), RA_E_NULL);
    CHECK_EQ(ra_infer_join(c, NULL, 0), RA_E_NULL);
    CHECK_EQ(ra_infer_join(c, &job, 0), RA_E_RANGE);
    CHECK(!strcmp(ra_cache_error(c)->field, "job.ticket"));
    job.ticket = 5;
    CHECK_EQ(ra_infer_join(c, &job, -1), RA_E_RANGE);
    CHECK(!strcmp(ra_cache_error(c)->field, "ith"));
    CHECK_EQ(ra_infer_join(c, &job, 0), RA_E_RANGE);
    CHECK(strstr(ra_cache_error(c)->text, "101"));
    cached = 0;
    CHECK_EQ(ra_infer_join(c, &job, 1), RA_E_RANGE);   /* the same ticket was refused */
    job.ticket = 6;
    while ((end = ra_infer_join(c, &job, 0)) > 0) continue;
    CHECK_EQ(end, RA_OK);
    CHECK_EQ(ra_infer_join(c, &job, 1), RA_OK);
    job.ticket = 5;
    CHECK_EQ(ra_infer_join(c, &job, 1), RA_E_RANGE);
    job.ticket = 4;
    CHECK_EQ(ra_infer_join(c, &job, 1), RA_OK);
    ra_infer_cancel(c);
    job.ticket = 7;
    CHECK_EQ(ra_infer_join(c, &job, 0), RA_E_CANCELLED);
    job.ticket = 6;
    CHECK_EQ(ra_infer_join(c, &job, 0), RA_E_CANCELLED);
    (void)ra_cache_destroy(c);
}

/* -------------------------------------------------------------------------- refusals, failures */
static ra_status create(const ra_desc *d, const ra_cache_desc *cd, ra_error *why) {
    ra_desc mine = *d;
    ra_cache *c = NULL;
    ra_status s;
    memset(why, 0, sizeof *why);
    mine.error = why;
    s = ra_cache_create(&c, &mine, NULL, cd);
    CHECK((s == RA_OK) == (c != NULL));
    CHECK_EQ(ra_cache_destroy(c), RA_OK);
    return s;
}

/* What travels on 4 ranks: keys if that moves fewer bytes to a rank than queries and partial
 * results, counting 9 us for each rank that they come from. 64 new tokens after 256 bring 246 KB of
 * keys to a rank or 198 KB, 256 after 256 bring 393 or 793. */
TEST(chosen_by_cost) {
    static const struct { int64_t fresh, cached; int32_t travel; } list[] = {
        { 1, 256, RA_INFER_PASS_Q }, { 4, 256, RA_INFER_PASS_Q }, { 16, 32768, RA_INFER_PASS_Q },
        { 8, 0, RA_INFER_PASS_KV },    /* all on one rank */
        { 16, 0, RA_INFER_PASS_KV }, { 8, 256, RA_INFER_PASS_Q }, { 16, 1024, RA_INFER_PASS_Q },
        { 64, 0, RA_INFER_PASS_Q }, { 64, 256, RA_INFER_PASS_Q }, { 256, 256, RA_INFER_PASS_KV },
        { 256, 2048, RA_INFER_PASS_Q }, { 1024, 2048, RA_INFER_PASS_KV },
        { 1024, 32768, RA_INFER_PASS_Q },
    };
    ra_desc d = ra_desc_make(8, 2, 64, RA_F32, RA_MASK_CAUSAL);
    ra_infer_report report;
    ra_cache *c = NULL;
    ra_world *world = NULL;
    ra_world_desc wd = { 0 };
    wd.ranks = d.ranks = 4;
    d.tokens = 1024;
    d.kv_tokens = 1024 + 32768;
    CHECK_EQ(ra_world_create(&world, &wd), RA_OK);
    if (!world) return;
    CHECK_EQ(ra_cache_create(&c, &d, ra_world_transport(world, 0), NULL), RA_OK);
    for (size_t i = 0; c && i < sizeof list / sizeof *list; i++) {
        h_context("fresh %d, cached %d", (int)list[i].fresh, (int)list[i].cached);
        CHECK_EQ(ra_infer_query(c, &list[i].cached, &list[i].fresh, &report), RA_OK);
        CHECK_EQ(report.travel, list[i].travel);
        CHECK((report.travel == RA_INFER_PASS_KV) ==   /* 0: they do not fit into a message */
              (report.keys_s > 0 && report.keys_s < report.queries_s));
        CHECK_EQ(report.bits_any_call, 0);
    }
    CHECK_EQ(ra_cache_destroy(c), RA_OK);
    d.form = RA_FORM_SAME;
    CHECK_EQ(ra_cache_create(&c, &d, ra_world_transport(world, 0), NULL), RA_OK);
    CHECK_EQ(ra_infer_query(c, &list[0].cached, &list[0].fresh, &report), RA_OK);
    CHECK_EQ(report.bits_any_call, 1);
    CHECK_EQ(ra_cache_destroy(c), RA_OK);
    ra_world_destroy(world);
}

/* The bits_any_call of a cache of 2 ranks with this many heads per KV head. */
static int32_t any_call(int32_t group, int32_t lanes, int32_t form) {
    const int64_t cached = 10, fresh = 3;
    ra_desc d = ra_desc_make(group, 1, 32, RA_F32, RA_MASK_CAUSAL);
    ra_infer_report report = { 0 };
    ra_cache_desc cd = { 0 };
    ra_world_desc wd = { 0 };
    ra_world *world = NULL;
    ra_cache *c = NULL;
    d.form = form;
    d.tokens = d.kv_tokens = 160;
    cd.lanes = lanes;
    wd.ranks = d.ranks = 2;
    CHECK_EQ(ra_world_create(&world, &wd), RA_OK);
    if (!world) return -1;
    CHECK_EQ(ra_cache_create(&c, &d, ra_world_transport(world, 0), &cd), RA_OK);
    CHECK_EQ(ra_infer_query(c, &cached, &fresh, &report), RA_OK);
    CHECK_EQ(ra_cache_destroy(c), RA_OK);
    ra_world_destroy(world);
    return report.bits_any_call;
}

/* More than 16 heads per KV head always take the form of prefill, so that the bits of a row depend
 * on no call. */
TEST(chosen_bits) {
    h_rng r = h_case_rng(0);
    script s = script_new(17, 1, 32, RA_F32, 160);
    outcome whole, parts;
    for (int32_t lanes = 0; lanes <= 8; lanes += 8) {
        CHECK_EQ(any_call(16, lanes, RA_FORM_AUTO), 0);
        CHECK_EQ(any_call(16, lanes, RA_FORM_SAME), 1);
        CHECK_EQ(any_call(17, lanes, RA_FORM_AUTO), 1);
        CHECK_EQ(any_call(17, lanes, RA_FORM_SAME), 1);
    }
    s.cd.lanes = 0;
    s.d.form = RA_FORM_SAME;
    script_fill(&s, &r);
    s.steps = 1;
    s.fresh[0][0] = 150;
    whole = script_run(&s, 2);
    compare(&s, &whole, &r, tolerance(&s));
    for (s.steps = 0; s.steps < 5; s.steps++) {
        s.cached[s.steps][0] = 30 * s.steps;
        s.fresh[s.steps][0] = 30;
    }
    parts = script_run(&s, 2);
    CHECK_BITS(parts.o, whole.o, 150 * s.d.q_heads * s.d.v_dim * 4);
    CHECK_BITS(parts.lse, whole.lse, 150 * s.d.q_heads * 4);
    outcome_free(&parts);
    outcome_free(&whole);
    script_free(&s);
}

/* What AUTO chooses on a rank for one sequence, with these rates. */
static int32_t travel_by_rates(const ra_rates *rates, int32_t rank, int32_t q_heads, int64_t fresh,
                            int64_t cached) {
    ra_desc d = ra_desc_make(q_heads, 2, 64, RA_F32, RA_MASK_CAUSAL);
    ra_infer_report report = { 0 };
    ra_world_desc wd = { 0 };
    ra_world *world = NULL;
    ra_cache *c = NULL;
    wd.ranks = d.ranks = 4;
    d.rank = rank;
    d.tokens = 1024;
    d.kv_tokens = 1024 + 32768;
    if (rates) d.rates = *rates;
    CHECK_EQ(ra_world_create(&world, &wd), RA_OK);
    if (!world) return -1;
    CHECK_EQ(ra_cache_create(&c, &d, ra_world_transport(world, rank), NULL), RA_OK);
    CHECK_EQ(ra_infer_query(c, &cached, &fresh, &report), RA_OK);
    CHECK_EQ(ra_cache_destroy(c), RA_OK);
    ra_world_destroy(world);
    return report.travel;
}

/* Known rates decide. On a slow link beside fast processors the fewest bytes are best. On a fast
 * link, rows are best computed by all ranks at once. A slow processor hides keys but not queries.
 * All ranks choose the same. */
TEST(chosen_by_rates) {
    const ra_rates slow_link = { 1e12, 1e9, 1e-6 }, slow_rank = { 1e9, 1e9, 1e-6 };
    const ra_rates far = { 1e12, 1e11, 1e-3 }, fast_link = { 1e10, 1e12, 0 };
    for (int32_t rank = 0; rank < 4; rank++) {
        CHECK_EQ(travel_by_rates(NULL, rank, 8, 256, 1536), RA_INFER_PASS_Q);
        CHECK_EQ(travel_by_rates(&slow_link, rank, 8, 256, 1536), RA_INFER_PASS_Q);
        CHECK_EQ(travel_by_rates(&slow_link, rank, 8, 256, 256), RA_INFER_PASS_KV);
        CHECK_EQ(travel_by_rates(&slow_rank, rank, 8, 256, 1536), RA_INFER_PASS_KV);
        CHECK_EQ(travel_by_rates(&far, rank, 8, 4, 0), RA_INFER_PASS_KV);
        CHECK_EQ(travel_by_rates(&fast_link, rank, 8, 16, 1024), RA_INFER_PASS_Q);
        /* Many heads over few keys: fewer bytes of keys, but one rank has all rows. */
        CHECK_EQ(travel_by_rates(NULL, rank, 64, 16, 240), RA_INFER_PASS_Q);
        CHECK_EQ(travel_by_rates(NULL, rank, 64, 64, 240), RA_INFER_PASS_KV);
    }
}

/* What a call would do on rank 0 if `live` of the 8 sequences have a new token, after 1000. */
static ra_infer_report one_token_each(int32_t ranks, int32_t queries, int live) {
    ra_desc d = ra_desc_make(32, 8, 128, RA_F32, RA_MASK_CAUSAL);
    int64_t cached[8] = { 0 }, fresh[8] = { 0 };
    ra_infer_report report = { 0 };
    ra_cache_desc cd = { 0 };
    ra_world_desc wd = { 0 };
    ra_world *world = NULL;
    ra_cache *c = NULL;
    for (int b = 0; b < live; b++) {
        cached[b] = 1000;
        fresh[b] = 1;
    }
    wd.ranks = d.ranks = ranks;
    d.sequences = 8;
    d.tokens = 1;
    d.kv_tokens = 8192;
    cd.queries = queries;
    CHECK_EQ(ra_world_create(&world, &wd), RA_OK);
    if (!world) return report;
    CHECK_EQ(ra_cache_create(&c, &d, ra_world_transport(world, 0), &cd), RA_OK);
    CHECK_EQ(ra_infer_query(c, cached, fresh, &report), RA_OK);
    CHECK_EQ(ra_cache_destroy(c), RA_OK);
    ra_world_destroy(world);
    return report;
}

/* Partial results of a row have 16512 bytes. Two exchanges receive a quarter of them from each of 3
 * peers, and of their sums, instead of all of them; they save 24768 bytes per row. */
TEST(chosen_merges) {
    for (int live = 1; live <= 8; live++) {
        const int64_t row = 32 * 129 * 4, two = live >= 4;
        const ra_infer_report all = one_token_each(4, RA_QUERIES_ALL, live);
        CHECK_EQ(all.travel, two ? RA_INFER_MERGE : RA_INFER_PASS_Q);
        CHECK_EQ(all.messages_in, two ? 6 : 3);
        CHECK_EQ(all.bytes_in, two ? 6 * (64 + live * row / 4) : 3 * (64 + live * row));
        CHECK_EQ(all.bytes_out, all.bytes_in);
    }
    CHECK_EQ(one_token_each(2, RA_QUERIES_ALL, 8).travel, RA_INFER_PASS_Q);
    CHECK_EQ(one_token_each(8, RA_QUERIES_OWN, 1).travel, RA_INFER_PASS_Q);
    CHECK_EQ(one_token_each(8, RA_QUERIES_OWN, 2).travel, RA_INFER_MERGE);
    CHECK_EQ(one_token_each(32, RA_QUERIES_ALL, 1).messages_in, 62);
    CHECK_EQ(one_token_each(64, RA_QUERIES_OWN, 8).messages_in, 64);
}

TEST(refusals) {
    script s = script_new(4, 2, 32, RA_F32, 100);
    ra_desc d = s.d;
    ra_cache_desc cd = { 0 };
    ra_error why;
    ra_cache *c = NULL;
    ra_tensors t = { 0 };
    int64_t cached = 0, fresh = 1;
    static float room[128 * 2 * 32], q[4 * 32], o[4 * 32];
    CHECK_EQ(create(&d, NULL, &why), RA_OK);
    d.kv_tokens = 0;
    CHECK_EQ(create(&d, NULL, &why), RA_E_UNSET);
    CHECK(!strcmp(why.field, "kv_tokens"));
    d = s.d; d.q_offset = 3;
    CHECK_EQ(create(&d, NULL, &why), RA_E_SHAPE);
    d = s.d; d.layout.kind = RA_LAYOUT_ZIGZAG;
    CHECK_EQ(create(&d, NULL, &why), RA_E_SHAPE);
    d = s.d; d.train = 1;
    CHECK_EQ(create(&d, NULL, &why), RA_E_UNSUPPORTED);
    d = s.d; d.order = RA_ORDER_ROUNDS;
    CHECK_EQ(create(&d, NULL, &why), RA_E_UNSUPPORTED);
    CHECK(!strcmp(why.field, "order"));
    d = s.d; d.scores = RA_SCORE_BIAS;
    CHECK_EQ(create(&d, NULL, &why), RA_E_UNSUPPORTED);
    d = s.d; d.ranks = 4;
    CHECK_EQ(create(&d, NULL, &why), RA_E_NULL);
    cd.lanes = 2000;
    CHECK_EQ(create(&s.d, &cd, &why), RA_E_RANGE);
    CHECK(!strcmp(why.field, "cache.lanes"));
    cd.lanes = 0; d = s.d; d.form = 7;
    CHECK_EQ(create(&d, &cd, &why), RA_E_ENUM);
    CHECK(!strcmp(why.field, "form"));
    cd.workspace_bytes = ra_cache_workspace(&s.d, &cd) - 1;
    CHECK(cd.workspace_bytes > 1000);
    cd.workspace = need(cd.workspace_bytes + 64);
    void *raw = cd.workspace;
    cd.workspace = (void *)(((uintptr_t)raw + 63) & ~(uintptr_t)63);
    CHECK_EQ(create(&s.d, &cd, &why), RA_E_WORKSPACE);
    free(raw);
    CHECK_EQ(ra_cache_create(&c, &s.d, NULL, NULL), RA_OK);
    t.q.data = q; t.o.data = o; t.k.data = room; t.v.data = room;
    CHECK_EQ(ra_cache_rows(c), 112);
    CHECK_EQ(ra_cache_owner(c, 100), -1);
    CHECK_EQ(ra_cache_owner(c, 99), 0);
    CHECK_EQ(ra_cache_row(c, 99), 99);
    CHECK_EQ(ra_infer_step(c, 0), RA_E_STATE);
    CHECK_EQ(ra_infer(c, &t, &cached, &fresh, 0), RA_OK);
    cached = 100;
    CHECK_EQ(ra_infer(c, &t, &cached, &fresh, 0), RA_E_RANGE);
    CHECK(strstr(ra_cache_error(c)->text, "101"));
    cached = -1;
    CHECK_EQ(ra_infer(c, &t, &cached, &fresh, 0), RA_E_RANGE);
    cached = 0; fresh = 151;
    CHECK_EQ(ra_infer(c, &t, &cached, &fresh, 0), RA_E_RANGE);
    fresh = 0; t.q.data = NULL;        /* nothing new: nothing is needed */
    CHECK_EQ(ra_infer(c, &t, &cached, &fresh, 0), RA_OK);
    fresh = 1;
    CHECK_EQ(ra_infer(c, &t, &cached, &fresh, 0), RA_E_NULL);
    t.k_pos.count = 1;
    CHECK_EQ(ra_infer(c, &t, &cached, &fresh, 0), RA_E_SHAPE);
    CHECK(strstr(ra_cache_error(c)->text, "ring buffer"));
    CHECK_EQ(ra_cache_destroy(c), RA_OK);
}

/* The first and the last of each range, and what is next to them. */
TEST(refused_ranges) {
    static float room[2][112 * 32], row[32];
    script s = script_new(1, 1, 32, RA_F32, 100);
    ra_cache_desc cd = { 0 };
    ra_error why;
    ra_cache *c = NULL;
    ra_tensors t = { 0 };
    for (cd.checksums = -1; cd.checksums < 4; cd.checksums += 3) {
        CHECK_EQ(create(&s.d, &cd, &why), RA_E_RANGE);
        CHECK(!strcmp(why.field, "cache.checksums"));
    }
    s.d.sequences = 2;
    CHECK_EQ(ra_cache_create(&c, &s.d, NULL, NULL), RA_OK);
    t.k.data = t.v.data = room;
    for (int32_t b = -1; b <= 2; b++)
        for (int64_t p = -1; p <= 100; p += p == 0 ? 99 : 1) {
            const int inside = b >= 0 && b < 2 && p >= 0 && p < 100;
            CHECK_EQ(ra_cache_store(c, &t, b, p, row, row), inside ? RA_OK : RA_E_RANGE);
            CHECK_EQ(ra_cache_owner(c, p), p >= 0 && p < 100 ? 0 : -1);
            CHECK_EQ(ra_cache_row(c, p), p >= 0 && p < 100 ? p : -1);
        }
    CHECK_EQ(ra_cache_destroy(c), RA_OK);
}

/* A network that takes messages of up to its max_msg. */
typedef struct narrow { const ra_transport *below; size_t most, longest; } narrow;
typedef struct narrow_run { size_t most, longest[2]; int32_t heads; ra_status end[2]; } narrow_run;

static int narrow_post(void *ctx, ra_transport_op *const *ops, int n) {
    narrow *x = (narrow *)ctx;
    for (int i = 0; i < n; i++) x->longest = ops[i]->len > x->longest ? ops[i]->len : x->longest;
    return x->longest > x->most ? RA_E_IO : x->below->post(x->below->ctx, ops, n);
}
static int narrow_poll(void *ctx, ra_transport_op *const *ops, int n) {
    narrow *x = (narrow *)ctx;
    return x->below->poll(x->below->ctx, ops, n);
}
static int narrow_abort(void *ctx, int why) {
    narrow *x = (narrow *)ctx;
    return x->below->abort(x->below->ctx, why);
}
static int narrow_quiesce(void *ctx, int64_t deadline_ns) {
    narrow *x = (narrow *)ctx;
    return x->below->quiesce(x->below->ctx, deadline_ns);
}

static ra_status narrow_rank(ra_world *world, int rank, void *user) {
    narrow_run *its = (narrow_run *)user;
    const int64_t cached = 0, fresh = 2;
    float room[4][256];
    narrow x = { ra_world_transport(world, rank), its->most, 0 };
    ra_transport net = *x.below;
    script s = script_new(its->heads, 1, 4, RA_F32, 2);
    ra_cache *c = NULL;
    ra_tensors t = { 0 };
    memset(room, 0, sizeof room);
    t.k.data = room[0]; t.v.data = room[1]; t.q.data = room[2]; t.o.data = room[3];
    s.d.tokens = 2;
    s.d.ranks = 2;
    s.d.rank = rank;
    s.cd.travel = RA_INFER_PASS_Q;
    s.cd.lanes = 0;
    net.ctx = &x;
    net.post = narrow_post;
    net.poll = narrow_poll;
    net.wait = NULL;
    net.abort = narrow_abort;
    net.quiesce = narrow_quiesce;
    net.max_msg = its->most;
    its->end[rank] = ra_cache_create(&c, &s.d, &net, &s.cd);
    if (!its->end[rank]) its->end[rank] = ra_infer(c, &t, &cached, &fresh, ra_deadline_ms(20000));
    (void)ra_cache_destroy(c);
    its->longest[rank] = x.longest;
    return RA_OK;
}

/* A cache is refused exactly if one of its messages is longer than the network takes. */
TEST(longest_messages) {
    for (int32_t heads = 1; heads <= 8; heads += 7) {
        narrow_run wide = { 0 }, x;
        wide.most = 4096;
        wide.heads = heads;
        CHECK_EQ(ra_world_run(2, narrow_rank, &wide, NULL), RA_OK);
        CHECK(wide.end[0] == RA_OK && wide.end[1] == RA_OK && wide.longest[0] == wide.longest[1]);
        for (size_t most = 64; most <= 448; most += 8) {
            const ra_status due = most < wide.longest[0] ? RA_E_TRANSPORT : RA_OK;
            memset(&x, 0, sizeof x);
            x.most = most;
            x.heads = heads;
            CHECK_EQ(ra_world_run(2, narrow_rank, &x, NULL), RA_OK);
            CHECK_EQ(x.end[0], due);
            CHECK_EQ(x.end[1], due);
        }
    }
}

/* A network that changes a byte of the data of message number `at` that comes to this rank. */
typedef struct spoiler { ra_transport below; int at, come; } spoiler;
typedef struct spoilt {
    int32_t travel, queries, checksums, level_0;
    int at, come;                      /* of rank 0; -1: nothing is changed; messages with data */
    ra_status end[3], left[3];         /* of ra_infer, of ra_cache_destroy */
    ra_error why;                      /* of rank 0 */
    ra_failure failure;
    float o[3][64][4][32];
} spoilt;

static void spoil(spoiler *x, void *buf, size_t len) {
    if (len > 64 && x->come++ == x->at) ((uint8_t *)buf)[64 + (len - 64) / 2] ^= 4;
}
static int spoil_post(void *ctx, ra_transport_op *const *ops, int n) {
    spoiler *x = (spoiler *)ctx;
    return x->below.post(x->below.ctx, ops, n);
}
static int spoil_poll(void *ctx, ra_transport_op *const *ops, int n) {
    spoiler *x = (spoiler *)ctx;
    const int code = x->below.poll(x->below.ctx, ops, n);
    for (int i = 0; i < n; i++)
        if (ops[i]->kind == RA_MSG_RECV && ops[i]->state == RA_MSG_DONE)
            spoil(x, ops[i]->buf, ops[i]->len);
    return code;
}
static int spoil_abort(void *ctx, int why) {
    spoiler *x = (spoiler *)ctx;
    return x->below.abort(x->below.ctx, why);
}
static int spoil_quiesce(void *ctx, int64_t deadline_ns) {
    spoiler *x = (spoiler *)ctx;
    return x->below.quiesce(x->below.ctx, deadline_ns);
}
static int spoil_sendrecv(void *ctx, int to, const void *s, size_t s_len, int from, void *r,
                          size_t r_len, uint64_t tag, int64_t deadline_ns) {
    spoiler *x = (spoiler *)ctx;
    const int code = below_sendrecv(&x->below, to, s, s_len, from, r, r_len, tag, deadline_ns);
    spoil(x, r, r_len);
    return code;
}

static ra_status spoilt_rank(ra_world *world, int rank, void *user) {
    spoilt *its = (spoilt *)user;
    spoiler x = { *ra_world_transport(world, rank), rank ? -1 : its->at, 0 };
    ra_transport net = x.below, zero = zero_transport(&net);
    const int64_t cached = 40, fresh = 64;
    script s = script_new(4, 2, 32, RA_F32, 104);
    float *room = (float *)need(104 * 2 * 32 * 4), *q = (float *)need(64 * 4 * 32 * 4);
    h_rng r = h_case_rng(0);
    ra_cache *c = NULL;
    ra_tensors t = { 0 };
    for (int i = 0; i < 104 * 2 * 32; i++) room[i] = h_normal(&r);
    for (int i = 0; i < 64 * 4 * 32; i++) q[i] = h_normal(&r);
    t.q.data = q; t.o.data = its->o[rank]; t.k.data = t.v.data = room;
    s.d.tokens = 64;
    s.d.ranks = 3;
    s.d.rank = rank;
    s.cd.travel = its->travel;
    s.cd.queries = its->queries;
    s.cd.checksums = its->checksums;
    net.ctx = zero.ctx = &x;
    net.post = spoil_post;
    net.poll = spoil_poll;
    net.wait = NULL;
    net.caps &= ~(uint32_t)RA_CAP_SHARED;
    net.quiesce = spoil_quiesce;
    net.abort = spoil_abort;
    zero.sendrecv = spoil_sendrecv;
    its->end[rank] = ra_cache_create(&c, &s.d, its->level_0 ? &zero : &net, &s.cd);
    if (!its->end[rank]) its->end[rank] = ra_infer(c, &t, &cached, &fresh, ra_deadline_ms(20000));
    if (!rank) its->why = *ra_cache_error(c);
    if (!rank) (void)ra_cache_failure(c, &its->failure);
    if (!rank) its->come = x.come;
    ra_world_leave(world, rank, its->end[rank]);
    its->left[rank] = ra_cache_destroy(c);
    free(room);
    free(q);
    return RA_OK;
}

/* Changed data of any message is found before it is used, and without checksums never. */
TEST(checksums) {
    static spoilt plain, x;
    for (int i = 0; i < 16; i++) {
        const int32_t travel = i % 4 ? RA_INFER_PASS_Q + i % 4 - 1 : RA_INFER_PASS_Q;
        memset(&plain, 0, sizeof plain);
        plain.travel = travel;
        plain.queries = i % 4 ? RA_QUERIES_OWN : RA_QUERIES_ALL;
        plain.level_0 = i / 4 % 2;
        plain.at = -1;
        CHECK_EQ(ra_world_run(3, spoilt_rank, &plain, NULL), RA_OK);
        CHECK(plain.end[0] == RA_OK && plain.come >= 2);
        for (int at = -1; at < plain.come; at++) {
            memset(&x, 0, sizeof x);
            x.travel = travel;
            x.queries = plain.queries;
            x.level_0 = plain.level_0;
            x.checksums = i / 8;
            x.at = at;
            h_context("travel %d, queries %d, level_0 %d, checksums %d, message %d of %d",
                      x.travel, x.queries, x.level_0, x.checksums, at, plain.come);
            (void)ra_world_run(3, spoilt_rank, &x, NULL);
            for (int r = 0; r < 3; r++) CHECK_EQ(x.left[r], RA_OK);
            CHECK_EQ(x.end[0], at >= 0 && x.checksums ? RA_E_PROTO : RA_OK);
            if (x.end[0])
                CHECK(!strcmp(x.why.field, "pass") && strstr(x.why.text, "checksum") &&
                      !strcmp(x.why.text, x.failure.text) && x.failure.status == RA_E_PROTO &&
                      (x.failure.peer == 1 || x.failure.peer == 2) && !x.failure.sending);
            if (at >= 0) continue;
            CHECK_EQ(x.end[1], RA_OK);
            CHECK_EQ(x.end[2], RA_OK);
            CHECK_EQ(x.come, plain.come);
            CHECK_BITS(x.o, plain.o, sizeof x.o);
        }
    }
}

/* A network on which nothing ever comes. */
static int silent_post(void *ctx, ra_transport_op *const *ops, int n) {
    (void)ctx;
    for (int i = 0; i < n; i++) if (ops[i]->state == RA_MSG_IDLE) ops[i]->state = RA_MSG_PENDING;
    return RA_OK;
}
static int silent_poll(void *ctx, ra_transport_op *const *ops, int n) {
    (void)ctx; (void)ops;
    return n < 0;
}
static int silent_abort(void *ctx, int why) {
    (void)ctx;
    return why > 0;
}
static int silent_quiesce(void *ctx, int64_t deadline_ns) {
    (void)ctx;
    return deadline_ns < 0;
}
static int silent_sendrecv(void *ctx, int to, const void *s, size_t s_len, int from, void *r,
                           size_t r_len, uint64_t tag, int64_t deadline_ns) {
    (void)ctx; (void)to; (void)s; (void)s_len; (void)from; (void)r; (void)r_len; (void)tag;
    while (ra_now_ns() < deadline_ns) sched_yield();
    return RA_E_TIMEOUT;
}

static ra_cache *silent_cache(int ranks, int level_0, int64_t watchdog_ns, ra_tensors *t) {
    static float room[2000 * 2 * 32], q[4 * 32], o[4 * 32];
    script s = script_new(4, 2, 32, RA_F32, 2000);
    ra_transport net = { 0 };
    ra_cache *c = NULL;
    net.size = sizeof net;
    net.abi = RA_TRANSPORT_ABI;
    if (level_0) net.sendrecv = silent_sendrecv;
    else net.post = silent_post;
    net.poll = silent_poll;
    net.abort = silent_abort;
    net.quiesce = silent_quiesce;
    net.caps = RA_CAP_ANY_PEER;
    s.d.tokens = 1;
    s.d.ranks = ranks;
    s.cd.queries = RA_QUERIES_ALL;
    s.cd.travel = RA_INFER_PASS_Q;
    s.cd.watchdog_ns = watchdog_ns;
    t->q.data = q; t->o.data = o; t->k.data = t->v.data = room;
    CHECK_EQ(ra_cache_create(&c, &s.d, &net, &s.cd), RA_OK);
    return c;
}

/* A peer that is silent for as long as watchdog_ns says is RA_E_PEER; a deadline before that,
 * RA_E_TIMEOUT. Time in which no thread called does not count. */
TEST(watchdogs) {
    const int64_t cached = 0, fresh = 1, watchdog = 30000000;
    for (int i = 0; i < 6; i++) {
        const int level_0 = i % 2, ends = i / 2 == 1, leaves = i / 2 == 2;
        ra_tensors t = { 0 };
        ra_cache *c = silent_cache(2, level_0, ends ? 100 * watchdog : watchdog, &t);
        const int64_t begin = ra_now_ns();
        int64_t since = begin;
        ra_failure why;
        ra_status s;
        h_context("level_0 %d, deadline %d, no calls for a while %d", level_0, ends, leaves);
        CHECK_EQ(ra_infer_begin(c, &t, &cached, &fresh, ends ? begin + watchdog : 0), RA_OK);
        if (leaves && !level_0) {
            while ((s = ra_infer_step(c, 0)) == RA_AGAIN) { }
            CHECK_EQ(s, RA_WAIT);
        }
        if (leaves) {
            while (ra_now_ns() < begin + 3 * watchdog) sched_yield();
            since = ra_now_ns();
        }
        while ((s = ra_infer_step(c, 0)) > 0 && ra_now_ns() < begin + 400 * watchdog) { }
        CHECK_EQ(s, ends ? RA_E_TIMEOUT : RA_E_PEER);
        CHECK(ra_now_ns() - since >= watchdog);
        CHECK_EQ(ra_cache_failure(c, &why), RA_OK);
        CHECK(why.status == s && why.rank == 0 && why.peer == 1 && why.pass == 1);
        CHECK(!strcmp(ra_cache_error(c)->field, "pass") && ra_cache_error(c)->status == s &&
              !strcmp(ra_cache_error(c)->text, why.text) && strstr(why.text, "rank 1"));
        CHECK_EQ(ra_cache_destroy(c), RA_OK);
    }
}

/* A failed sendrecv names the rank from which it was to receive, whichever message comes first. */
TEST(failed_sendrecv_names_its_rank) {
    const int64_t cached = 0, fresh = 1;
    ra_tensors t = { 0 };
    ra_cache *c = silent_cache(3, 1, 1000000, &t);
    ra_failure why;
    ra_status s;
    CHECK_EQ(ra_infer_begin(c, &t, &cached, &fresh, 0), RA_OK);
    while ((s = ra_infer_step(c, 0)) > 0) { }
    CHECK_EQ(s, RA_E_PEER);
    CHECK_EQ(ra_cache_failure(c, &why), RA_OK);
    CHECK(why.status == RA_E_PEER && why.peer == 2 && !why.sending);
    CHECK(strstr(why.text, "receiving from rank 2 or sending to rank 1"));
    CHECK_EQ(ra_cache_destroy(c), RA_OK);
}

/* A step of a long portion polls the transport while it computes, in either form. */
static int polls;
static int counted_poll(void *ctx, ra_transport_op *const *ops, int n) {
    polls++;
    return silent_poll(ctx, ops, n);
}

TEST(steps_poll) {
    enum { ROWS = 4096, TOKENS = 512 };
    for (int decodes = 0; decodes < 2; decodes++) {
        script s = script_new(16, 8, 128, RA_F32, ROWS * 2);
        const int64_t fresh = decodes ? 1 : TOKENS, cached = ROWS * 2 - fresh;
        float *room = (float *)need(ROWS * 8 * 128 * sizeof *room);
        float *q = (float *)need(2 * TOKENS * 16 * 128 * sizeof *q);
        ra_transport net = { 0 };
        ra_cache *c = NULL;
        ra_tensors t = { 0 };
        int most = 0, steps = 0;
        ra_status end;
        h_context("decodes %d", decodes);
        memset(room, 0, ROWS * 8 * 128 * sizeof *room);
        memset(q, 0, TOKENS * 16 * 128 * sizeof *q);
        net.size = sizeof net;
        net.abi = RA_TRANSPORT_ABI;
        net.post = silent_post;
        net.poll = counted_poll;
        net.abort = silent_abort;
        net.quiesce = silent_quiesce;
        net.caps = RA_CAP_ANY_PEER;
        s.d.tokens = TOKENS;
        s.d.ranks = 2;
        s.cd.queries = RA_QUERIES_ALL;
        s.cd.travel = RA_INFER_PASS_Q;
        t.q.data = q; t.o.data = q + TOKENS * 16 * 128; t.k.data = t.v.data = room;
        CHECK_EQ(ra_cache_create(&c, &s.d, &net, &s.cd), RA_OK);
        CHECK_EQ(ra_infer_begin(c, &t, &cached, &fresh, 0), RA_OK);
        do {
            polls = 0;
            end = ra_infer_step(c, 0);
            if (polls > most) most = polls;
        } while (end == RA_AGAIN && ++steps < 100000);
        CHECK_EQ(end, RA_WAIT);        /* for the other rank */
        CHECK(most > 1);
        CHECK_EQ(ra_cache_destroy(c), RA_OK);
        free(room);
        free(q);
    }
}

/* The events of a call tell its beginning, its end and every message, and no failure is told. */
typedef struct eventful {
    int32_t queries, travel;
    int count[3];
    ra_status end[3], failure[3];
    ra_infer_report report[3];
    ra_event event[3][RA_EVENTS];
} eventful;

static ra_status eventful_rank(ra_world *world, int rank, void *user) {
    eventful *x = (eventful *)user;
    script s = script_new(4, 2, 32, RA_F32, 200);
    const int64_t cached = 40, fresh = 60;
    float *room = (float *)need(200 * 2 * 32 * 4), *q = (float *)need(200 * 4 * 32 * 8);
    ra_failure why;
    ra_cache *c = NULL;
    ra_tensors t = { 0 };
    memset(room, 0, 200 * 2 * 32 * 4);
    memset(q, 0, 200 * 4 * 32 * 4);
    t.q.data = q; t.o.data = q + 200 * 4 * 32; t.k.data = t.v.data = room;
    s.d.ranks = 3;
    s.d.rank = rank;
    s.cd.queries = x->queries;
    s.cd.travel = x->travel;
    CHECK_EQ(ra_cache_create(&c, &s.d, ra_world_transport(world, rank), &s.cd), RA_OK);
    CHECK_EQ(ra_cache_events(c, x->event[rank], RA_EVENTS), 0);
    CHECK_EQ(ra_infer_query(c, &cached, &fresh, &x->report[rank]), RA_OK);
    x->end[rank] = ra_infer(c, &t, &cached, &fresh, ra_deadline_ms(20000));
    x->count[rank] = ra_cache_events(c, x->event[rank], RA_EVENTS);
    x->failure[rank] = ra_cache_failure(c, &why);
    ra_world_leave(world, rank, x->end[rank]);
    CHECK_EQ(ra_cache_destroy(c), RA_OK);
    free(room);
    free(q);
    return RA_OK;
}

TEST(events) {
    static eventful x;
    for (int i = 0; i < 4; i++) {
        memset(&x, 0, sizeof x);
        x.queries = i ? RA_QUERIES_OWN : RA_QUERIES_ALL;
        x.travel = i ? RA_INFER_PASS_Q + i - 1 : RA_INFER_PASS_Q;
        h_context("travel %d, queries %d", x.travel, x.queries);
        CHECK_EQ(ra_world_run(3, eventful_rank, &x, NULL), RA_OK);
        for (int r = 0; r < 3; r++) {
            const ra_infer_report *n = &x.report[r];
            int64_t seen[RA_EV_ABORT + 1] = { 0 }, bytes[RA_EV_ABORT + 1] = { 0 };
            for (int k = 0; k < x.count[r]; k++) {
                const ra_event *e = &x.event[r][k];
                seen[e->kind]++;
                bytes[e->kind] += e->bytes;
                CHECK(e->pass == 1 && e->rank == r && e->chunk == -1 && e->peer != r);
                CHECK(e->begin_ns <= e->end_ns && (e->peer >= 0) == (e->bytes > 0));
            }
            CHECK_EQ(x.end[r], RA_OK);
            CHECK_EQ(x.failure[r], RA_E_STATE);
            CHECK(seen[RA_EV_BEGIN] == 1 && seen[RA_EV_PASS] == 1 && !seen[RA_EV_FAIL]);
            CHECK(seen[RA_EV_SEND] == n->messages_out && bytes[RA_EV_SEND] == n->bytes_out);
            CHECK(seen[RA_EV_RECV] == n->messages_in && bytes[RA_EV_RECV] == n->bytes_in);
            CHECK_EQ(seen[RA_EV_POST_SEND], n->messages_out);
            CHECK_EQ(seen[RA_EV_POST_RECV], n->messages_in);
        }
    }
}

TEST(refused_page_tokens) {
    script s = script_new(4, 2, 32, RA_F32, 300);
    ra_desc d = s.d;
    ra_error why = { 0 };
    ra_plan *plan = NULL;
    d.error = &why;
    d.page_tokens = 24;
    CHECK_EQ(create(&d, NULL, &why), RA_E_RANGE);
    CHECK(!strcmp(why.field, "page_tokens"));
    d.page_tokens = 16;
    CHECK_EQ(ra_plan_create(&plan, &d, NULL), RA_E_UNSUPPORTED);
    CHECK(!strcmp(why.field, "page_tokens"));
    d.train = 1;
    CHECK_EQ(ra_attention_backward_bytes(&d, 1), 0);
    CHECK(!strcmp(why.field, "page_tokens"));
}

/* Keys that travel in messages are read from the first row on, also those before a window. */
static void refused_travelling_pages(ra_desc d, ra_tensors t) {
    ra_world_desc wd = { 0 };
    ra_world *world = NULL;
    int64_t cached = 260, fresh = 1;
    int32_t table[10] = { -2, 1, 2, 3, 4, 5, 6, 7, 8, 9 };
    wd.ranks = d.ranks = 2;
    d.mask.keep = 0;
    t.pages.table = table;
    CHECK_EQ(ra_world_create(&world, &wd), RA_OK);
    for (int keys = 0; keys < 2 && world; keys++) {
        ra_cache_desc cd = { 0 };
        ra_cache *c = NULL;
        cd.travel = keys ? RA_INFER_PASS_KV : RA_INFER_PASS_Q;
        CHECK_EQ(ra_cache_create(&c, &d, ra_world_transport(world, 0), &cd), RA_OK);
        CHECK_EQ(ra_infer_begin(c, &t, &cached, &fresh, 0), keys ? RA_E_RANGE : RA_OK);
        ra_infer_cancel(c);
        while (ra_infer_step(c, 0) > 0) { }
        CHECK_EQ(ra_cache_destroy(c), RA_OK);
    }
    ra_world_destroy(world);
}

TEST(refused_pages) {
    script s = script_new(4, 2, 32, RA_F32, 300);
    ra_desc d = s.d;
    ra_error why = { 0 };
    ra_cache *c = NULL;
    ra_tensors t = { 0 };
    int64_t cached = 60, fresh = 1;
    int32_t table[20];
    static float room[20][16][2][32], q[200 * 4 * 32], o[200 * 4 * 32];
    for (int i = 0; i < 20; i++) table[i] = i;
    d.error = &why;
    d.page_tokens = 16;
    d.mask.window = 20;
    d.mask.keep = 3;
    CHECK_EQ(ra_cache_create(&c, &d, NULL, NULL), RA_OK);
    t.q.data = q; t.o.data = o; t.k.data = room; t.v.data = room;
    CHECK_EQ(ra_infer(c, &t, &cached, &fresh, 0), RA_E_NULL);
    CHECK(!strcmp(ra_cache_error(c)->field, "t.pages.table"));
    t.pages.table = table;
    CHECK_EQ(ra_infer(c, &t, &cached, &fresh, 0), RA_E_RANGE);
    CHECK(!strcmp(ra_cache_error(c)->field, "t.pages.count"));
    t.pages.count = 20;
    t.pages.first = 16;
    CHECK_EQ(ra_infer(c, &t, &cached, &fresh, 0), RA_E_RANGE);
    t.pages.first = 0;
    t.pages.batch_step = -1;
    CHECK_EQ(ra_infer(c, &t, &cached, &fresh, 0), RA_E_STRIDE);
    t.pages.batch_step = INT64_MAX;
    CHECK_EQ(ra_infer(c, &t, &cached, &fresh, 0), RA_E_OVERFLOW);
    t.pages.batch_step = 20;
    CHECK_EQ(ra_infer(c, &t, &cached, &fresh, 0), RA_OK);
    CHECK_EQ(ra_cache_store(c, &t, 0, 299, q, q), RA_OK);
    table[18] = 20;                    /* the position is stored there, and not seen */
    CHECK_EQ(ra_cache_store(c, &t, 0, 299, q, q), RA_E_RANGE);
    CHECK_EQ(ra_infer(c, &t, &cached, &fresh, 0), RA_OK);
    table[1] = -1;                     /* behind the window, which begins at 41 */
    CHECK_EQ(ra_infer(c, &t, &cached, &fresh, 0), RA_OK);
    table[1] = -2;
    CHECK_EQ(ra_infer(c, &t, &cached, &fresh, 0), RA_E_RANGE);
    CHECK(strstr(ra_cache_error(c)->text, "-2"));
    table[1] = 3;                      /* reused: by the page of position 60 */
    CHECK_EQ(ra_infer(c, &t, &cached, &fresh, 0), RA_OK);
    table[2] = 3;                      /* which must not be one that the window sees */
    CHECK_EQ(ra_infer(c, &t, &cached, &fresh, 0), RA_E_SHAPE);
    CHECK(!strcmp(ra_cache_error(c)->field, "t.pages.table"));
    table[2] = -1;
    CHECK_EQ(ra_infer(c, &t, &cached, &fresh, 0), RA_E_RANGE);
    table[2] = 2;
    table[0] = -1;                     /* kept */
    CHECK_EQ(ra_infer(c, &t, &cached, &fresh, 0), RA_E_RANGE);
    table[0] = 3;
    CHECK_EQ(ra_infer(c, &t, &cached, &fresh, 0), RA_E_SHAPE);
    cached = 260;                      /* the window begins in another block than 0 */
    table[0] = 0;
    table[18] = 18;
    CHECK_EQ(ra_infer(c, &t, &cached, &fresh, 0), RA_OK);
    table[0] = -1;
    CHECK_EQ(ra_infer(c, &t, &cached, &fresh, 0), RA_E_RANGE);
    table[0] = 0;
    table[18] = 20;
    CHECK_EQ(ra_cache_destroy(c), RA_OK);
    refused_travelling_pages(d, t);
    d.mask.window = d.mask.keep = 0;
    d.tokens = 2;
    CHECK_EQ(ra_attention(&d, &t, NULL, 0, 0, 1), RA_E_RANGE);
    CHECK(!strcmp(why.field, "t.pages.table") && strstr(why.text, "20"));
    d.page_tokens = 0;
    CHECK_EQ(ra_attention(&d, &t, NULL, 0, 0, 1), RA_E_SHAPE);
    CHECK(!strcmp(why.field, "t.pages"));
}

/* What a key of a sequence is to a call: where it is, and whether it is seen and new. */
typedef struct page_key { int64_t b, entry, page, cell; int seen, fresh; } page_key;

/* 1: a new token is where another token is that the call sees: of the same sequence in another
 * entry of the same page, of another sequence in the same cell. */
static int keys_collide(const page_key *key, int n) {
    for (int i = 0; i < n; i++)
        for (int j = 0; j < n && key[i].fresh; j++)
            if (key[j].seen && key[i].page == key[j].page &&
                (key[i].b == key[j].b ? key[i].entry != key[j].entry
                                      : key[i].cell == key[j].cell)) return 1;
    return 0;
}

/* Random tables of few pages, which mostly repeat some. */
TEST(new_tokens_in_pages) {
    enum { B = 3, KEYS = 160, ENTRIES = 16, PAGES = 60 };
    static float room[PAGES * 48][4], q[B * KEYS][4], o[B * KEYS][4];
    static page_key key[B * KEYS];
    int refused = 0, accepted = 0;
    for (int64_t i = 0; i < 4000; i++) {
        h_rng r = h_case_rng(i);
        int64_t cached[B], fresh[B];
        int32_t table[B][ENTRIES];
        ra_desc d = ra_desc_make(1, 1, 4, RA_F32, RA_MASK_CAUSAL);
        ra_cache_desc cd = { 0 };
        ra_cache *c = NULL;
        ra_tensors t = { 0 };
        int n = 0;
        if (!h_case(i)) continue;
        d.sequences = 1 + h_below(&r, B);
        d.tokens = 70;
        d.kv_tokens = KEYS;
        d.page_tokens = 16 * (1 + h_below(&r, 3));
        d.mask.window = h_below(&r, 3) ? 1 + h_below(&r, 90) : 0;
        d.mask.keep = d.mask.window ? h_below(&r, 3) * 9 : 0;
        cd.lanes = 1 + h_below(&r, 3);
        for (int b = 0; b < B; b++) {
            const int forks = b && h_one_in(&r, 3), grows = !h_one_in(&r, 5);
            cached[b] = forks ? cached[0] : h_range(&r, 0, KEYS - 70);
            fresh[b] = grows ? h_range(&r, 1, h_one_in(&r, 2) ? 3 : 70) : 0;
            for (int e = 0; e < ENTRIES; e++)
                table[b][e] = forks && h_below(&r, 12) ? table[0][e]
                              : h_below(&r, 14) ? b * ENTRIES + e : h_below(&r, PAGES);
        }
        t.q.data = q; t.o.data = o; t.k.data = t.v.data = room;
        t.pages.table = table[0];
        t.pages.batch_step = ENTRIES;
        t.pages.count = PAGES;
        t.pages.first = h_below(&r, d.page_tokens);
        CHECK_EQ(ra_cache_create(&c, &d, NULL, &cd), RA_OK);
        for (int b = 0; b < d.sequences; b++)
            for (int64_t k = 0; fresh[b] && k < cached[b] + fresh[b]; k++, n++) {
                const int64_t row = ra_cache_row(c, k) + t.pages.first;
                page_key *x = &key[n];
                x->b = b;
                x->entry = row / d.page_tokens;
                x->page = table[b][x->entry];
                x->cell = row % d.page_tokens;
                x->fresh = k >= cached[b];
                x->seen = 0;
                for (int64_t p = cached[b]; p < cached[b] + fresh[b]; p++)
                    x->seen |= sees(&d.mask, p, k, cached[b] + fresh[b]);
            }
        const int due = keys_collide(key, n);
        CHECK_EQ(ra_infer(c, &t, cached, fresh, 0), due ? RA_E_SHAPE : RA_OK);
        if (due) CHECK(!strcmp(ra_cache_error(c)->field, "t.pages.table") &&
                       strstr(ra_cache_error(c)->text, "new tokens of sequence"));
        CHECK_EQ(ra_cache_destroy(c), RA_OK);
        refused += due;
        accepted += !due;
    }
    CHECK(h_run.only_case >= 0 || (refused > 500 && accepted > 500));
}

/* Position 52 sees 49..52, which rank 1 holds. Rank 0 has half a page of older positions. */
static ra_status unseen_page_rank(ra_world *world, int rank, void *user) {
    script s = script_new(4, 2, 32, RA_F32, 300);
    static float room[2][64][2][32], q[4][32], o[2][4][32];
    const int32_t table[2][3] = { { -1, -1, -1 }, { 0, 0, 0 } };
    int64_t cached = 52, fresh = 1;
    ra_cache *c = NULL;
    ra_tensors t = { 0 };
    ra_desc d = s.d;
    (void)user;
    d.ranks = 2;
    d.rank = rank;
    d.page_tokens = 64;
    d.mask.window = 4;
    t.q.data = q; t.o.data = o[rank]; t.k.data = room[rank]; t.v.data = room[rank];
    t.pages.table = table[rank];
    t.pages.count = 1;
    t.pages.batch_step = 3;
    ra_status end = ra_cache_create(&c, &d, ra_world_transport(world, rank), NULL);
    if (!end) end = ra_infer(c, &t, &cached, &fresh, ra_deadline_ms(20000));
    const ra_status left = ra_cache_destroy(c);
    return end ? end : left;
}

TEST(unseen_pages) {
    CHECK_EQ(ra_world_run(2, unseen_page_rank, NULL, NULL), RA_OK);
}

/* A short sequence, then one that fills the cache and sees its end alone: what a portion prefetches
 * for the next one must be in the tables, which are as long as they must be (asan finds reads
 * beyond). */
static ra_status window_rank(ra_world *world, int rank, void *user) {
    script s = script_new(1, 1, 16, RA_F32, 4096);
    const int64_t cached[2] = { 10, 4095 }, fresh[2] = { 1, 1 };
    enum { PAGES = 1024 / 16 };        /* of a lane */
    int32_t *table = (int32_t *)need(2 * PAGES * sizeof *table);
    float *room = (float *)need(2 * 1024 * 16 * sizeof *room), *o = (float *)user + rank * 32;
    float q[2][16];
    ra_cache *c = NULL;
    ra_cache_desc cd = { 0 };
    ra_tensors t = { 0 };
    ra_desc d = s.d;
    for (int i = 0; i < 2 * PAGES; i++) table[i] = i;
    for (int i = 0; i < 2 * 1024 * 16; i++) room[i] = (float)(i % 16 + 1);
    for (int i = 0; i < 32; i++) q[i / 16][i % 16] = 0.1f;
    d.ranks = 4;
    d.rank = rank;
    d.sequences = 2;
    d.tokens = 1;
    d.kv_tokens = 4096;
    d.page_tokens = 16;
    d.mask.window = 8;
    cd.queries = RA_QUERIES_ALL;
    cd.travel = RA_INFER_PASS_Q;
    t.q.data = q; t.o.data = o; t.k.data = room; t.v.data = room;
    t.pages.table = table;
    t.pages.count = 2 * PAGES;
    t.pages.batch_step = PAGES;
    ra_status end = ra_cache_create(&c, &d, ra_world_transport(world, rank), &cd);
    if (!end) end = ra_infer(c, &t, cached, fresh, ra_deadline_ms(20000));
    (void)ra_cache_destroy(c);
    free(table);
    free(room);
    return end;
}

TEST(windows_at_the_end_of_tables) {
    float o[4][32] = { { 0 } };        /* values are 1 to 16 in every row, whatever is seen */
    CHECK_EQ(ra_world_run(4, window_rank, o, NULL), RA_OK);
    for (int i = 0; i < 4 * 32; i++) CHECK(fabsf(o[i / 32][i % 32] - (float)(i % 16 + 1)) < 1e-4f);
}

/* Two ranks, one of which cancels, has a deadline or does not take part. */
enum { CLASH_CANCEL, CLASH_DEADLINE, CLASH_LEAVE, CLASHES };
typedef struct clash { int what; ra_status end[2]; char text[2][RA_TEXT_BYTES]; } clash;

static ra_status clash_rank(ra_world *world, int rank, void *user) {
    clash *x = (clash *)user;
    script s = script_new(4, 2, 32, RA_F32, 200);
    ra_cache *c = NULL;
    ra_tensors t = { 0 };
    int64_t cached = 40, fresh = 40, until = ra_deadline_ms(20000);
    float *room = (float *)need(200 * 2 * 32 * 4), *q = (float *)need(200 * 4 * 32 * 8);
    ra_desc d = s.d;
    ra_status end;
    t.q.data = q; t.o.data = q + 200 * 4 * 32; t.k.data = room; t.v.data = room + 1;
    d.ranks = 2;
    d.rank = rank;
    end = ra_cache_create(&c, &d, ra_world_transport(world, rank), NULL);
    if (rank && x->what == CLASH_CANCEL) ra_infer_cancel(c);
    if (!rank && x->what == CLASH_DEADLINE) until = ra_deadline_ms(100);
    if (!(rank && x->what != CLASH_CANCEL) && !end)
        end = ra_infer(c, &t, &cached, &fresh, until);
    if (rank && x->what == CLASH_DEADLINE) end = RA_OK;
    x->end[rank] = end;
    snprintf(x->text[rank], sizeof x->text[rank], "%s", ra_cache_error(c)->text);
    if (rank && x->what == CLASH_DEADLINE)
        while (ra_now_ns() < until - (int64_t)19000 * 1000000) sched_yield();
    ra_world_leave(world, rank, x->what == CLASH_LEAVE ? RA_OK : end);
    (void)ra_cache_destroy(c);
    free(room);
    free(q);
    return RA_OK;
}

TEST(failures) {
    clash x;
    for (x.what = 0; x.what < CLASHES; x.what++) {
        memset(x.end, 0, sizeof x.end);
        h_context("what %d", x.what);
        (void)ra_world_run(2, clash_rank, &x, NULL);
        if (x.what == CLASH_CANCEL) {
            CHECK_EQ(x.end[1], RA_E_CANCELLED);
            CHECK(x.end[0] == RA_E_ABORTED || x.end[0] == RA_E_PEER);
        }
        if (x.what == CLASH_DEADLINE) CHECK_EQ(x.end[0], RA_E_TIMEOUT);
        if (x.what == CLASH_LEAVE) CHECK_EQ(x.end[0], RA_E_PEER);
        CHECK(x.text[0][0] != 0);
    }
}

/* The last of three ranks differs from the others in one agreed value. */
enum { APART_QUERIES, APART_FRESH, APART_CACHED, APART_MASK, APART_LANES,
       APART_TRAVEL, APART_NEW_TOKENS, APART_TOKENS, APART_DTYPE, APART_SCALE, APART_ALIBI,
       APART_SINKS, APART_FORM, APART_RATES, APART_MAX_MSG, APART_CHECKSUMS, APART_ARITH, APARTS };
static const char *const apart_field[APARTS] = {
    "cache.queries", "cached or fresh", "cached or fresh", "mask", "cache.lanes",
    "cache.travel", "cache.new_tokens", "(kv_)tokens", "dtypes", "scale", "alibi", "sinks", "form",
    "rates", "transport", "checksums", "dtypes or arith" };
enum { APART_RANKS = 3 };
typedef struct apart {
    int what, level_0;                 /* level_0: as in script */
    ra_status end[APART_RANKS];
    ra_error why[APART_RANKS];
} apart;

static void apart_change(const apart *x, ra_desc *d, ra_cache_desc *cd, ra_transport *net,
                         int64_t *cached, int64_t *fresh) {
    switch (x->what) {
    case APART_QUERIES: cd->queries = RA_QUERIES_ALL; break;
    case APART_FRESH: --*fresh; break;
    case APART_CACHED: --*cached; break;
    case APART_MASK: d->mask.window = 7; break;
    case APART_LANES: cd->lanes = 4; break;
    case APART_TRAVEL: cd->travel = RA_INFER_MERGE; break;
    case APART_NEW_TOKENS: cd->new_tokens = 90; break;
    case APART_TOKENS: d->tokens--; break;
    case APART_DTYPE: d->o_dtype = RA_F16; break;
    case APART_SCALE: d->scale = 0.25f; break;
    case APART_FORM: d->form = RA_FORM_SAME; break;
    case APART_RATES: d->rates.flops_per_s = 1e12; break;
    case APART_MAX_MSG: net->max_msg = 1 << 17; break;
    case APART_CHECKSUMS: cd->checksums = 1; break;
    case APART_ARITH: d->arith = RA_ARITH_BF16; break;
    }
}

static ra_status apart_rank(ra_world *world, int rank, void *user) {
    static const float heads[2][4] = { { 0.1f, 0.1f, 0.1f, 0.1f }, { 0.1f, 0.1f, 0.1f, 5 } };
    const int last = rank == APART_RANKS - 1;
    apart *x = (apart *)user;
    script s = script_new(4, 2, 32, RA_F32, 2000);
    ra_cache *c = NULL;
    ra_cache_desc cd = { 0 };
    ra_transport net = *ra_world_transport(world, rank), zero = zero_transport(&net);
    ra_tensors t = { 0 };
    int64_t cached = 40, fresh = 70;
    float *room = (float *)need(2000 * 2 * 32 * 4), *q = (float *)need(200 * 4 * 32 * 8);
    ra_desc d = s.d;
    t.q.data = q; t.o.data = q + 200 * 4 * 32; t.k.data = room; t.v.data = room + 1;
    t.alibi = heads[last && x->what == APART_ALIBI];
    t.sinks = heads[last && x->what == APART_SINKS];
    d.scores = RA_SCORE_ALIBI | RA_SCORE_SINKS;
    d.ranks = APART_RANKS;
    d.rank = rank;
    d.rates.flops_per_s = d.rates.link_bytes_per_s = 1e11;
    if (last) apart_change(x, &d, &cd, &net, &cached, &fresh);
    zero.max_msg = net.max_msg;
    x->end[rank] = ra_cache_create(&c, &d, x->level_0 ? &zero : &net, &cd);
    if (!x->end[rank]) x->end[rank] = ra_infer(c, &t, &cached, &fresh, ra_deadline_ms(20000));
    x->why[rank] = *ra_cache_error(c);
    ra_world_leave(world, rank, x->end[rank]);
    (void)ra_cache_destroy(c);
    free(room);
    free(q);
    return RA_OK;
}

/* Ranks that disagree name what they disagree about, also where lengths of messages differ. */
TEST(disagreements) {
    for (int i = 0; i < 2 * APARTS; i++) {
        apart x = { 0 };
        int named = 0;
        x.what = i / 2;
        x.level_0 = i % 2;
        if (x.level_0 && x.what != APART_FRESH) continue;
        h_context("what %d, level_0 %d", x.what, x.level_0);
        (void)ra_world_run(APART_RANKS, apart_rank, &x, NULL);
        for (int r = 0; r < APART_RANKS; r++) {
            CHECK(x.end[r] == RA_E_MISMATCH || x.end[r] == RA_E_ABORTED);
            if (x.end[r] != RA_E_MISMATCH) continue;
            CHECK(strstr(x.why[r].text, apart_field[x.what]) != NULL);
            named++;
        }
        CHECK(named > 0);
    }
}

/* Three ranks, one of which ends in the middle of a call. Once its call has failed (ra_infer), or
 * its cache is destroyed (ra_infer_step), a rank overwrites its tensors: sanitizers see who still
 * uses them. */
typedef struct ending { int what, spins, queries; ra_status end[3]; } ending;
typedef struct canceller { ra_cache *c; int spins; } canceller;
enum { END_CANCEL, END_DEADLINE, END_STEPS, END_LEAVE, ENDS };

static void *canceller_main(void *arg) {
    const canceller *x = (const canceller *)arg;
    for (int i = 0; i < x->spins; i++) sched_yield();
    ra_infer_cancel(x->c);
    return NULL;
}

static ra_status ending_calls(const ending *x, ra_cache *c, const ra_tensors *t, int rank) {
    ra_status end = RA_OK;
    for (int i = 0; i < 1000000 && !end; i++) {
        const int64_t cached = i % 2 * 200, fresh = 200;
        const int late = x->what == END_DEADLINE && rank == 1;
        const int64_t soon = late ? x->spins * 5000 / (i + 1) : 20000000000;
        if (x->what == END_LEAVE && rank == 1 && i == x->spins % 5) return RA_E_STATE;
        if (x->what != END_STEPS) {
            end = ra_infer(c, t, &cached, &fresh, ra_now_ns() + soon);
            continue;
        }
        end = ra_infer_begin(c, t, &cached, &fresh, ra_now_ns() + soon);
        while (!end && (end = ra_infer_step(c, 0)) > 0) {
            end = RA_OK;
            sched_yield();
        }
    }
    return end;
}

static ra_status ending_rank(ra_world *world, int rank, void *user) {
    enum { ROWS = 400 * 2 * 32, BYTES = 4 * (2 * ROWS + 2 * 2 * ROWS) };
    ending *x = (ending *)user;
    script s = script_new(4, 2, 32, RA_F32, 400);
    float *room = (float *)need(BYTES);
    canceller by;
    pthread_t id;
    ra_tensors t = { 0 };
    ra_desc d = s.d;
    memset(room, 0, BYTES);
    t.k.data = room; t.v.data = room + ROWS; t.q.data = room + 2 * ROWS; t.o.data = room + 4 * ROWS;
    d.tokens = 200;
    d.ranks = 3;
    d.rank = rank;
    s.cd.travel = x->queries == RA_QUERIES_ALL ? RA_INFER_MERGE : RA_INFER_PASS_KV;
    s.cd.queries = x->queries;
    s.cd.lanes = 0;
    ra_status end = ra_cache_create(&by.c, &d, ra_world_transport(world, rank), &s.cd);
    if (end) return end;
    by.spins = x->spins;
    const int cancels = rank == 1 && (x->what == END_CANCEL || x->what == END_STEPS);
    if (cancels && pthread_create(&id, NULL, canceller_main, &by)) abort();
    end = ending_calls(x, by.c, &t, rank);
    x->end[rank] = end;
    if (x->what != END_STEPS) memset(room, 0xff, BYTES);
    if (cancels) pthread_join(id, NULL);
    const ra_status gone = ra_cache_destroy(by.c);
    memset(room, 0xff, BYTES);
    free(room);
    if (gone) x->end[rank] = gone;
    return end;
}

TEST(ends_in_the_middle_of_a_call) {
    for (int i = 0; i < 8 * ENDS; i++) {
        h_rng r = h_case_rng(i);
        ending x = { 0 };
        int64_t left = i;
        if (!h_case(i)) continue;
        x.what = h_pick(&left, ENDS);
        x.queries = h_pick(&left, 2) ? RA_QUERIES_ALL : RA_QUERIES_OWN;
        x.spins = h_below(&r, 300);
        (void)ra_world_run(3, ending_rank, &x, NULL);
        for (int rank = 0; rank < 3; rank++)
            CHECK(x.end[rank] < 0 && x.end[rank] != RA_E_UNSAFE);
        if (x.what == END_DEADLINE) CHECK_EQ(x.end[1], RA_E_TIMEOUT);
        if (x.what == END_CANCEL || x.what == END_STEPS) CHECK_EQ(x.end[1], RA_E_CANCELLED);
    }
}

/* A call that ends before another rank takes part does not wait for that rank. With
 * `rests` two ranks begin the second call, and the third one, which took part in the first, does
 * not. The two wait for each other and not for it. */
typedef struct unknown { int cancel, rests, ended, met; ra_status call, gone; } unknown;

static ra_status unknown_rank(ra_world *world, int rank, void *user) {
    enum { ROWS = 64 * 2 * 32, BYTES = 4 * (2 * ROWS + 2 * 2 * ROWS) };
    unknown *x = (unknown *)user;
    const int64_t cached = 0, fresh = 64;
    script s = script_new(4, 2, 32, RA_F32, 64);
    ra_cache *c;
    ra_tensors t = { 0 };
    ra_desc d = s.d;
    float *room = (float *)need(BYTES);
    memset(room, 0, BYTES);
    t.k.data = room; t.v.data = room + ROWS; t.q.data = room + 2 * ROWS; t.o.data = room + 4 * ROWS;
    d.tokens = 64;
    d.ranks = 2 + x->rests;
    d.rank = rank;
    s.cd.travel = RA_INFER_PASS_KV;
    s.cd.lanes = 0;
    s.cd.quiesce_ns = x->rests ? 1000000000 : 10000000;
    ra_status end = ra_cache_create(&c, &d, ra_world_transport(world, rank), &s.cd);
    if (!end && x->rests) {
        end = ra_infer(c, &t, &cached, &fresh, ra_deadline_ms(20000));
        (void)__atomic_fetch_add(&x->met, 1, __ATOMIC_SEQ_CST);
        while (!end && __atomic_load_n(&x->met, __ATOMIC_SEQ_CST) < 3) sched_yield();
    }
    if (!end && x->rests && rank == 1) {
        (void)ra_infer(c, &t, &cached, &fresh, ra_deadline_ms(20000));
        (void)ra_cache_destroy(c);
    } else if (!end && rank > 0) {     /* stays, and takes no part */
        while (!__atomic_load_n(&x->ended, __ATOMIC_ACQUIRE)) sched_yield();
        (void)ra_cache_destroy(c);
    }
    if (!end && rank == 0) {
        if (x->cancel) ra_infer_cancel(c);
        x->call = ra_infer(c, &t, &cached, &fresh, ra_deadline_ms(20));
        x->gone = ra_cache_destroy(c);
        __atomic_store_n(&x->ended, 1, __ATOMIC_RELEASE);
    }
    ra_world_leave(world, rank, RA_OK);
    free(room);
    return end;
}

TEST(ends_before_others_know) {
    for (int i = 0; i < 4; i++) {
        unknown x = { i % 2, i / 2, 0, 0, RA_OK, RA_OK };
        CHECK_EQ(ra_world_run(2 + x.rests, unknown_rank, &x, NULL), RA_OK);
        CHECK_EQ(x.call, x.cancel ? RA_E_CANCELLED : RA_E_TIMEOUT);
        CHECK_EQ(x.gone, RA_OK);
    }
}

static const h_test tests[] = {
    ENTRY(ranks_and_travel), ENTRY(unlike_dtypes), ENTRY(all_queries), ENTRY(pages),
    ENTRY(prompts), ENTRY(ring_buffers), ENTRY(attention_pages),
    ENTRY(shared_prefixes), ENTRY(shared_prefixes_are_one_portion),
    ENTRY(threads_share_heads), ENTRY(long_caches), ENTRY(lanes_and_weights),
    ENTRY(chosen_lanes), ENTRY(drafts_are_exact),
    ENTRY(joined_threads), ENTRY(joined_refusals), ENTRY(chosen_by_cost), ENTRY(chosen_by_rates),
    ENTRY(chosen_bits), ENTRY(chosen_merges),
    ENTRY(refusals), ENTRY(refused_ranges),
    ENTRY(longest_messages), ENTRY(checksums), ENTRY(watchdogs),
    ENTRY(failed_sendrecv_names_its_rank), ENTRY(steps_poll), ENTRY(events),
    ENTRY(refused_page_tokens), ENTRY(refused_pages), ENTRY(new_tokens_in_pages),
    ENTRY(unseen_pages),
    ENTRY(windows_at_the_end_of_tables),
    ENTRY(failures), ENTRY(disagreements), ENTRY(ends_in_the_middle_of_a_call),
    ENTRY(ends_before_others_know),
};

int main(int argc, char **argv) {
    return h_main(argc, argv, tests, sizeof tests / sizeof *tests);
}
