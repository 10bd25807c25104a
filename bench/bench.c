/* How fast the library is on this machine, compared with what this machine can do.
 *
 *   make bench                    everything, in about six minutes
 *   make bench ONLY="decode f32"  the rows that match all of these words: a name (`make bench
 *                                 ONLY=help` lists them), an instruction set, a dtype, a mask,
 *                                 D128, Tq4096, Tk4096, Hq32, threads2, ranks4
 *   make bench ONLY=plan          how many seconds plans take, from 1M to 64M tokens
 *   make bench ONLY=travel        what the choice between passing queries and keys costs
 *   make bench ONLY=forms         what it costs in a cache that bits depend on the row alone
 *   make bench ONLY=checksum      how fast CRC-32C is, and what it costs a pass that copies
 *   make bench ONLY=batch         one token of each of 16 short sequences, on 1, 2, 4 and 8 ranks
 *   make bench ONLY=first         time to first token and tokens per second, prompts up to 128K;
 *                                 ONLY="first 8192": of one length, 2048 times a power of 4
 *   bench --only WORDS --json FILE --tables FILE --chunk N --long --processor-time
 *                                 --tables writes the tables of bench/README.md in Markdown.
 *                                 --long adds 8192 tokens and 16-bit storage on every instruction
 *                                 set. --processor-time counts the time for which a thread had a
 *                                 processor, for machines that are busy with other work (except for
 *                                 rings, where waiting counts). --chunk sets the keys per message
 *                                 of rings. The default of --json is build/bench.json.
 *
 * Output is one line per kernel and shape: the median time of a call, its spread, (p90 - p10) over
 * the median, the rate, the peak measured before and after every call, and the fraction of the peak
 * that the rate reaches. The peak is multiply-adds from registers with the same instruction set on
 * as many threads (for bf16: dot products or tiles, on random data); for decoding it is a loop that
 * reads the same keys and values. Clocks change and machines are shared, so the fraction is the
 * figure to trust. "0.97 x plain" in the last column is the speed relative to another kernel that
 * was timed in turn. Data are random. K and V are in huge pages if the system grants them.
 *
 * Rings of 1, 2 and 4 ranks do the same work with the same number of threads, 4. "0.99 x one rank"
 * compares them with one rank that computes the same. The difference is the whole cost of a ring.
 * The part of it that the fixed order of chunks costs is at most the idle time of the processors.
 *
 * Rows of a cache split over ranks (cache, prefill) are compared with one rank that has all keys,
 * on as many threads; "+9 us" is the difference. Of a decoded token that is the exchange, and the
 * row with few keys is almost nothing else.
 *
 * The FLOPs of a call are 2 (Dk + Dv) per visible pair of query and key and per query head;
 * backward 2 (3 Dk + 2 Dv). */
#define _GNU_SOURCE
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#include <sys/mman.h>
#include <sys/utsname.h>

#define RINGATTN_IMPLEMENTATION
#include "ringattn.h"
#include "peak.h"

#ifndef BENCH_FLAGS                   /* the command line of the compiler, if the build passes it */
#if defined(__AVX2__) || defined(__FAST_MATH__) || !defined(__OPTIMIZE__)
#define BENCH_FLAGS "unusual: -m flags, fast math or no optimisation"
#else
#define BENCH_FLAGS "optimised, no -m flags, no fast math"
#endif
#endif

enum { MAX_THREADS = 4, MAX_RANKS = 8, MAX_ROWS = 340, MIN_REPS = 5, MAX_REPS = 41 };

/* What is timed in turn with the kernel, besides the peak. */
enum { VERSUS_NONE, VERSUS_PLAIN, VERSUS_ONE_RANK, VERSUS_LOOP, VERSUS_ONE_QUERY };
static const char *const versus_text[] = { "", "plain", "one rank", "a loop",
                                           "the time of Tq 1" };

/* Masks beyond none and causal. */
enum { MASK_PLAIN, MASK_WINDOW, MASK_DOCUMENTS, MASK_PREFIX, MASK_BLOCK, MASK_INTERVALS };
static const char *const mask_names[] = { "", "window", "documents", "prefix", "block",
                                          "intervals" };

/* Kinds of rows: see `kinds`. */
enum { FORWARD, BACKWARD, ARITH, MASK, ALIBI, BIAS_KEY, BIAS_FULL, SINKS, SOFTCAP, TAILS, STRIDES,
       DIMS, DECODE, DECODE_MASK, DECODE_BIAS, DECODE_ALIBI, DECODE_SOFTCAP, SHORT, SMALL, OFF,
       SIMPLE, LOOP, RING, CACHE, PREFILL, KINDS };

typedef struct row {
    int32_t kind, isa, dtype, mask, mask_more, versus, layout;
    int32_t dim, v_dim, q_heads, kv_heads;
    int64_t tokens, kv_tokens;         /* of all ranks together */
    int32_t threads, ranks;            /* threads of all ranks together */
    int32_t sequences;                 /* of a cache; each has the tokens above */
    int32_t apart;                     /* 1: the keys of a head are adjacent, [head][token][dim] */
    int32_t form;                      /* RA_FORM_* */
    int32_t f32_queries;               /* 1: whatever the dtype of keys */
} row;

typedef struct result {
    int32_t done, reps;
    double median_s, spread, rate, peak, fraction, relative, low, high, extra_s, idle;
    const char *unit;                  /* rate and peak are per second, not yet in units of it */
} result;

static row rows[MAX_ROWS];
static result results[MAX_ROWS];
static int row_count, failed_rows;
static int runs_in_all, runs_disturbed; /* see op_seconds */
static int processor_time, chunk_tokens;
static double patience;                /* until when a row may run disturbed calls again */
static double hurry;                   /* from when on rows take as little time as they can */

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* 1 if products of bf16 have a separate instruction there. */
static int bf16_isa(int32_t isa) { return isa == RA_ISA_AVX512_BF16 || isa == RA_ISA_AMX; }

static const char *dtype_text(int32_t dtype) {
    static const char *const text[] = { "", "f32", "f16", "bf16", "q8_0", "q4_0" };
    return text[dtype];
}

/* ---------------------------------------------------------------------------- threads
 * A pool that sleeps between jobs. A job is one function that nth threads call at once. Its time
 * runs from the moment when all of them are ready to the moment when the last one has returned.
 * Each thread also reports which share of that time it had a processor: less than all of it means
 * that another program was running or that the thread waited. */
typedef void (*part_fn)(void *ctx, int ith, int nth);

static struct {
    pthread_mutex_t lock;
    pthread_cond_t wake;
    int turn, nth, ready, go, done;
    part_fn fn;
    void *ctx;
    double end[MAX_RANKS], used[MAX_RANKS], share[MAX_RANKS];
    double idle;                       /* of the processors that the last job could have had */
} pool = { PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, 0, 0, 0, 0, 0, NULL, NULL, { 0 },
           { 0 }, { 0 }, 0 };

static int processors(void) { return (int)sysconf(_SC_NPROCESSORS_ONLN); }

static double processor_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void pool_part(int ith) {
    const double begin = now_s(), processor = processor_s();
    pool.fn(pool.ctx, ith, pool.nth);
    pool.used[ith] = processor_s() - processor;
    pool.end[ith] = now_s();
    pool.share[ith] = pool.used[ith] / (pool.end[ith] - begin);
}

static void spin_until(const int *word, int value) {
    for (int n = 0; __atomic_load_n(word, __ATOMIC_ACQUIRE) != value; n++) {
        if (n > 1000) sched_yield();
    }
}

static void *pool_worker(void *arg) {
    const int ith = (int)(intptr_t)arg;
    int turn = 0;
    for (;;) {
        int mine;
        pthread_mutex_lock(&pool.lock);
        while (pool.turn == turn) pthread_cond_wait(&pool.wake, &pool.lock);
        turn = pool.turn;
        mine = ith < pool.nth;
        pthread_mutex_unlock(&pool.lock);
        if (!mine) continue;
        __atomic_add_fetch(&pool.ready, 1, __ATOMIC_ACQ_REL);
        spin_until(&pool.go, 1);
        pool_part(ith);
        __atomic_add_fetch(&pool.done, 1, __ATOMIC_ACQ_REL);
    }
    return NULL;
}

/* Starts the threads. They run until the program ends. */
static int pool_start(void) {
    for (int i = 1; i < MAX_RANKS; i++) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, pool_worker, (void *)(intptr_t)i) != 0) return -1;
        pthread_detach(thread);
    }
    return 0;
}

/* Seconds of fn(ctx, ith, nth) on threads ith = 0..nth-1; the caller is thread 0. */
static double pool_run(part_fn fn, void *ctx, int nth) {
    const int width = nth < processors() ? nth : processors();
    double begin, end = 0, used = 0;
    pthread_mutex_lock(&pool.lock);
    pool.fn = fn;
    pool.ctx = ctx;
    pool.nth = nth;
    pthread_mutex_unlock(&pool.lock);
    if (nth > 1) {
        pthread_mutex_lock(&pool.lock);
        pool.ready = pool.go = pool.done = 0;
        pool.turn++;
        pthread_cond_broadcast(&pool.wake);
        pthread_mutex_unlock(&pool.lock);
        spin_until(&pool.ready, nth - 1);
    }
    begin = now_s();
    __atomic_store_n(&pool.go, 1, __ATOMIC_RELEASE);
    pool_part(0);
    if (nth > 1) spin_until(&pool.done, nth - 1);
    for (int i = 0; i < nth; i++) {
        end = pool.end[i] > end ? pool.end[i] : end;
        used += pool.used[i];
    }
    pool.idle = 1 - used / ((end - begin) * width);
    return end - begin;
}

/* ---------------------------------------------------------------------------- memory
 * The memory of one row is released together. */
static struct { void *p; size_t bytes; } maps[128];
static int map_count;

static void *map(size_t bytes) {
    const size_t huge = (size_t)2 << 20;
    const size_t size = (bytes + 2 * huge - 1) / huge * huge;
    char *p = (char *)mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == (char *)MAP_FAILED || map_count == (int)(sizeof maps / sizeof *maps)) {
        fprintf(stderr, "out of memory: %zu bytes\n", bytes);
        exit(1);
    }
    maps[map_count].p = p;
    maps[map_count++].bytes = size;
    p += (huge - (uintptr_t)p % huge) % huge;
#ifdef MADV_HUGEPAGE
    madvise(p, size - huge, MADV_HUGEPAGE);
#endif
    return p;
}

static void unmap_all(void) {
    while (map_count > 0) {
        map_count--;
        munmap(maps[map_count].p, maps[map_count].bytes);
    }
}

/* Uniform in +-sqrt(3): mean 0, variance 1. */
static float random_unit(uint32_t *state) {
    return (float)((int32_t)peak_random(state) >> 8) * (1.7320508f / 8388608.0f);
}

/* Bytes of n elements. */
static int64_t row_bytes(int32_t dtype, int64_t n) {
    if (dtype >= RA_Q8_0) return n / 32 * (dtype == RA_Q8_0 ? 34 : 18);
    return n * (dtype == RA_F32 ? 4 : 2);
}

/* n random elements; 16-bit ones are truncated. */
static void *map_random(int64_t n, int32_t dtype, uint32_t seed) {
    uint32_t state = seed * 2654435761u + 1;       /* odd, hence not 0 */
    uint16_t *narrow;
    if (dtype >= RA_Q8_0) {
        void *x = map((size_t)row_bytes(dtype, n));
        ra_convert(x, dtype, map_random(n, RA_F32, seed), RA_F32, n);
        return x;
    }
    if (dtype == RA_F32) {
        float *x = (float *)map((size_t)n * sizeof *x);
        for (int64_t i = 0; i < n; i++) x[i] = random_unit(&state);
        return x;
    }
    narrow = (uint16_t *)map((size_t)n * sizeof *narrow);
    for (int64_t i = 0; i < n; i++) {
        const float x = random_unit(&state);
        uint32_t u;
        memcpy(&u, &x, sizeof u);
        if (dtype == RA_BF16) narrow[i] = (uint16_t)(u >> 16);
        else if (((u >> 23) & 255) < 113) narrow[i] = 0;
        else narrow[i] = (uint16_t)(((u >> 16) & 0x8000) | (((u >> 13) & 0x3ffff) - (112 << 10)));
    }
    return narrow;
}

/* ---------------------------------------------------------------------------- kernels
 * One call of the library with the tensors of a row. */
typedef struct load {
    ra_desc d;
    ra_tensors t;
    ra_plan_report report;             /* of the same call as a plan: FLOPs and tiles */
    void *workspace;
    size_t workspace_bytes;
    ra_error error;
    ra_status status;                  /* the first bad one of all calls */
    int32_t calls;                     /* per run, for kernels too short to be timed alone */
} load;

typedef struct data { void *q, *k, *v, *o; int64_t kv_bytes; } data;

static int32_t q_dtype(const row *r) {
    return r->dtype >= RA_Q8_0 || r->f32_queries ? RA_F32 : r->dtype;
}

static int v_in_k(const row *r) { return r->kv_heads == 1 && r->v_dim < r->dim; }

/* Tokens are rounded up to whole blocks: a row of TAILS and the row without a tail that it is
 * compared with use the same data. A V with one head that is narrower than K is columns of K
 * (MLA). */
static data data_make(const row *r) {
    const int64_t tokens = (r->tokens + 63) / 64 * 64, keys = (r->kv_tokens + 64) / 64 * 64;
    data x;
    x.q = map_random(tokens * r->q_heads * r->dim, q_dtype(r), 1);
    x.k = map_random(keys * r->kv_heads * r->dim, r->dtype, 2);
    x.v = v_in_k(r) ? x.k : map_random(keys * r->kv_heads * r->v_dim, r->dtype, 3);
    x.o = map((size_t)(tokens * r->q_heads * r->v_dim * 4));
    x.kv_bytes = row_bytes(r->dtype, r->kv_tokens * r->kv_heads * r->dim);
    return x;
}

static ra_desc desc_make(const row *r) {
    ra_desc d = { 0 };
    d.tokens = r->tokens;
    d.kv_tokens = r->kv_tokens;
    d.q_offset = r->mask == RA_MASK_CAUSAL ? r->kv_tokens - r->tokens : 0;
    d.q_heads = r->q_heads;
    d.kv_heads = r->kv_heads;
    d.k_dim = r->dim;
    d.v_dim = r->v_dim;
    d.q_dtype = q_dtype(r);
    d.k_dtype = d.v_dtype = r->dtype;
    d.o_dtype = RA_F32;
    d.mask.kind = r->mask;
    d.layout.kind = r->layout;
    d.isa = r->isa;
    d.threads = r->threads;
    d.form = r->form;
    if (r->kind == ARITH) d.arith = RA_ARITH_BF16;
    return d;
}

/* Documents of 512 tokens, a window of 256, a prefix of 512, blocks of 128. */
static void more_mask(const row *r, ra_mask *m) {
    const int64_t n = r->kv_tokens;
    if (r->mask_more == MASK_WINDOW) m->window = 256;
    if (r->mask_more == MASK_PREFIX) m->prefix = 512;
    if (r->mask_more == MASK_BLOCK) m->causal_block = 128;
    if (r->mask_more == MASK_DOCUMENTS) {
        int64_t *first = (int64_t *)map((size_t)n * sizeof *first);
        m->doc_count = (n + 511) / 512;
        for (int64_t i = 0; i < m->doc_count; i++) first[i] = i * 512;
        m->doc_first = first;
    }
    if (r->mask_more == MASK_INTERVALS) {
        int32_t *lo = (int32_t *)map((size_t)n * sizeof *lo);
        int32_t *hi = (int32_t *)map((size_t)n * sizeof *hi);
        for (int32_t i = 0; i < n; i++) hi[i] = i + 1;
        m->kind = RA_MASK_INTERVALS;
        m->lo = lo;
        m->hi = hi;
        m->interval_count = n;
    }
}

static void scores_make(const row *r, ra_desc *d, ra_tensors *t) {
    float *heads = (float *)map((size_t)r->q_heads * sizeof *heads);
    for (int32_t i = 0; i < r->q_heads; i++) heads[i] = 0.5f / (float)(i + 1);
    if (r->kind == ALIBI || r->kind == DECODE_ALIBI) {
        d->scores = RA_SCORE_ALIBI;
        t->alibi = heads;
    }
    if (r->kind == SINKS) { d->scores = RA_SCORE_SINKS; t->sinks = heads; }
    if (r->kind == SOFTCAP || r->kind == DECODE_SOFTCAP) d->softcap = 30.0f;
    if (r->kind == BIAS_KEY || r->kind == BIAS_FULL || r->kind == DECODE_MASK ||
        r->kind == DECODE_BIAS) {
        const int full = r->kind == BIAS_FULL;
        const int64_t n = r->kv_tokens * (full ? r->tokens * r->q_heads : 1);
        d->scores = RA_SCORE_BIAS;
        t->bias.data = r->kind == DECODE_MASK ? map((size_t)n * 4) : map_random(n, RA_F32, 4);
        t->bias.key_step = 4;
        t->bias.row_step = full ? 4 * r->kv_tokens : 0;
        t->bias.head_step = full ? 4 * r->kv_tokens * r->tokens : 0;
        t->bias.keys = r->kv_tokens;
    }
}

/* Head after head, as in many caches. */
static void head_major(const row *r, ra_tensors *t) {
    const int64_t k = row_bytes(r->dtype, r->dim), v = row_bytes(r->dtype, r->v_dim);
    t->q.token_stride = row_bytes(q_dtype(r), r->dim);
    t->k.token_stride = k;
    t->v.token_stride = v;
    t->q.head_stride = t->q.token_stride * r->tokens;
    t->k.head_stride = k * r->kv_tokens;
    t->v.head_stride = v * r->kv_tokens;
}

static void load_make(const row *r, const data *x, load *l) {
    ra_plan *plan = NULL;
    memset(l, 0, sizeof *l);
    l->calls = 1;
    l->d = desc_make(r);
    l->d.error = &l->error;
    l->t.q.data = x->q;
    l->t.k.data = x->k;
    l->t.v.data = x->v;
    l->t.o.data = x->o;
    if (v_in_k(r)) l->t.v.token_stride = row_bytes(r->dtype, r->dim);
    if (r->apart) head_major(r, &l->t);
    more_mask(r, &l->d.mask);
    scores_make(r, &l->d, &l->t);
    l->status = ra_plan_create(&plan, &l->d, NULL);
    if (l->status == RA_OK) l->status = ra_plan_query(plan, 0, &l->report);
    ra_plan_destroy(plan);
    l->workspace_bytes = ra_attention_bytes(&l->d, r->threads);
    l->workspace = map(l->workspace_bytes + 64);
}

static void attention_part(void *ctx, int ith, int nth) {
    load *l = (load *)ctx;
    for (int32_t i = 0; i < l->calls; i++) {
        const ra_status s = ra_attention(&l->d, &l->t, l->workspace, l->workspace_bytes, ith, nth);
        if (s != RA_OK) __atomic_store_n(&l->status, s, __ATOMIC_RELAXED);
    }
}

static void backward_part(void *ctx, int ith, int nth) {
    load *l = (load *)ctx;
    const ra_status s = ra_attention_backward(&l->d, &l->t, l->workspace, l->workspace_bytes, ith,
                                              nth);
    if (s != RA_OK) __atomic_store_n(&l->status, s, __ATOMIC_RELAXED);
}

static void simple_part(void *ctx, int ith, int nth) {
    load *l = (load *)ctx;
    const int q = (int)l->d.tokens, k = (int)l->d.kv_tokens;
    (void)ith;
    (void)nth;
    for (int32_t i = 0; i < l->calls; i++) {
        const ra_status s = ra_attention_simple((float *)l->t.o.data, (const float *)l->t.q.data,
            (const float *)l->t.k.data, (const float *)l->t.v.data, q, k, l->d.q_heads,
            l->d.kv_heads, l->d.k_dim, 0.0f, 0, k - q);
        if (s != RA_OK) l->status = s;
    }
}

/* ---------------------------------------------------------------------------- a loop */
void loop_row(const float *q, const float *k, const float *v, float *o, int64_t keys,
              int64_t stride, int dim);                /* in loop.c */

/* All rows and heads of a load in f32, packed, on one thread. */
static void loop_once(const load *l) {
    const ra_desc *d = &l->d;
    const int64_t stride = (int64_t)d->kv_heads * d->k_dim;
    for (int64_t i = 0; i < d->tokens; i++) {
        for (int32_t head = 0; head < d->q_heads; head++) {
            const int64_t q = (i * d->q_heads + head) * d->k_dim;
            const int64_t kv = (int64_t)(head / (d->q_heads / d->kv_heads)) * d->k_dim;
            loop_row((const float *)l->t.q.data + q, (const float *)l->t.k.data + kv,
                     (const float *)l->t.v.data + kv, (float *)l->t.o.data + q,
                     d->kv_tokens - d->tokens + i + 1, stride, d->k_dim);
        }
    }
}

static void loop_part(void *ctx, int ith, int nth) {
    const load *l = (const load *)ctx;
    (void)ith;
    (void)nth;
    for (int32_t i = 0; i < l->calls; i++) loop_once(l);
}

/* ---------------------------------------------------------------------------- rings
 * Ranks are threads of the pool, over the bundled world. Each has a plan and a ring. Thread i works
 * for rank i % ranks. */
typedef struct ring_load {
    ra_world *world;
    ra_plan *plan[MAX_THREADS];
    ra_ring *ring[MAX_THREADS];
    ra_tensors t[MAX_THREADS];
    int32_t ranks;
    uint64_t pass[MAX_THREADS];        /* of each thread */
    ra_error error;
    ra_status status;
} ring_load;

static int64_t rows_of(const ra_plan *plan, int rank) {
    ra_run runs[64];
    int64_t n = 0;
    const int32_t count = ra_plan_q_runs(plan, rank, 0, runs, 64);
    for (int32_t i = 0; i < count && i < 64; i++) n += runs[i].count;
    return n;
}

static void ring_make(const row *r, const data *x, ring_load *l) {
    const int64_t bytes = row_bytes(r->dtype, r->dim);
    ra_world_desc wd = { 0 };
    int64_t first = 0;
    memset(l, 0, sizeof *l);
    wd.ranks = l->ranks = r->ranks;
    wd.error = &l->error;
    l->status = ra_world_create(&l->world, &wd);
    for (int i = 0; i < r->ranks && l->status == RA_OK; i++) {
        ra_desc d = desc_make(r);
        d.ranks = r->ranks;
        d.rank = i;
        d.threads = r->threads / r->ranks;
        d.chunk_tokens = chunk_tokens;
        d.error = &l->error;
        l->t[i].q.data = (char *)x->q + first * r->q_heads * bytes;
        l->t[i].k.data = (char *)x->k + first * r->kv_heads * bytes;
        l->t[i].v.data = (char *)x->v + first * r->kv_heads * bytes;
        l->t[i].o.data = (char *)x->o + first * r->q_heads * r->v_dim * 4;
        l->status = ra_plan_create(&l->plan[i], &d, NULL);
        if (l->status != RA_OK) return;
        first += rows_of(l->plan[i], i);
        l->status = ra_ring_create(&l->ring[i], l->plan[i], ra_world_transport(l->world, i), NULL);
    }
}

static void ring_free(ring_load *l) {
    for (int i = 0; i < l->ranks; i++) ra_ring_destroy(l->ring[i]);
    ra_world_destroy(l->world);
    for (int i = 0; i < l->ranks; i++) ra_plan_destroy(l->plan[i]);
}

static void ring_part(void *ctx, int ith, int nth) {
    ring_load *l = (ring_load *)ctx;
    (void)nth;
    const int rank = ith % l->ranks;
    ra_status s = RA_AGAIN;
    ra_job job = { 0 };
    job.ticket = ++l->pass[ith];
    job.plan = l->plan[rank];
    job.tensors = &l->t[rank];
    job.deadline_ns = ra_deadline_ms(60000);
    while (s == RA_AGAIN || s == RA_WAIT) {
        s = ra_join(l->ring[rank], &job, ith / l->ranks);
        if (s == RA_WAIT) ra_step_wait(l->ring[rank], job.deadline_ns);
    }
    if (s != RA_OK) __atomic_store_n(&l->status, s, __ATOMIC_RELAXED);
}

/* ---------------------------------------------------------------------------- sharded caches
 * The same with ra_infer: decoding with the queries on all ranks, prefill with those of its own
 * positions on each. */
enum { BATCH = 16 };                   /* most sequences */
typedef struct cache_load {
    ra_world *world;
    ra_cache *cache[MAX_RANKS];
    ra_tensors t[MAX_RANKS];
    int32_t ranks, calls;              /* calls: per run */
    int64_t cached[BATCH], fresh[BATCH];
    uint64_t call[MAX_RANKS];          /* of each thread */
    ra_error error;
    ra_status status;
} cache_load;

static void cache_make(const row *r, const data *x, const ra_cache_desc *cd, cache_load *l) {
    ra_world_desc wd = { 0 };
    memset(l, 0, sizeof *l);
    wd.ranks = l->ranks = r->ranks;
    wd.error = &l->error;
    l->calls = 1;
    for (int b = 0; b < r->sequences; b++) {
        l->fresh[b] = r->tokens;
        l->cached[b] = r->kv_tokens - r->tokens;
    }
    l->status = ra_world_create(&l->world, &wd);
    for (int i = 0; i < r->ranks && l->status == RA_OK; i++) {
        ra_desc d = desc_make(r);
        int64_t held;
        d.q_offset = 0;
        d.layout.kind = 0;
        d.ranks = r->ranks;
        d.rank = i;
        d.threads = r->threads / r->ranks;
        d.sequences = r->sequences;
        d.error = &l->error;
        l->status = ra_cache_create(&l->cache[i], &d, ra_world_transport(l->world, i), cd);
        if (l->status != RA_OK) return;
        held = ra_cache_rows(l->cache[i]) * r->kv_heads * r->sequences;
        l->t[i].q.data = x->q;
        l->t[i].k.data = map_random(held * r->dim, r->dtype, 10 + (uint32_t)i);
        l->t[i].v.data = map_random(held * r->v_dim, r->dtype, 20 + (uint32_t)i);
        l->t[i].o.data = map((size_t)(r->sequences * r->tokens * r->q_heads * r->v_dim * 4));
    }
}

static void cache_free(cache_load *l) {
    for (int i = 0; i < l->ranks; i++) ra_cache_destroy(l->cache[i]);
    ra_world_destroy(l->world);
    memset(l, 0, sizeof *l);
}

static void cache_part(void *ctx, int ith, int nth) {
    cache_load *l = (cache_load *)ctx;
    const int rank = ith % l->ranks;
    ra_infer_job job = { 0 };
    job.tensors = &l->t[rank];
    job.cached = l->cached;
    job.fresh = l->fresh;
    for (int32_t i = 0; i < l->calls; i++) {
        ra_status s = RA_AGAIN;
        job.ticket = ++l->call[ith];
        job.deadline_ns = ra_deadline_ms(60000);
        if (nth == l->ranks)           /* a thread per rank: the blocking call */
            s = ra_infer(l->cache[rank], job.tensors, job.cached, job.fresh, job.deadline_ns);
        for (int idle = 0; s == RA_AGAIN || s == RA_WAIT; idle++) {
            s = ra_infer_join(l->cache[rank], &job, ith / l->ranks);
            if (s == RA_AGAIN) idle = 0;
            if (idle > 10) sched_yield();  /* ranks share processors: see ra_infer */
        }
        if (s != RA_OK) __atomic_store_n(&l->status, s, __ATOMIC_RELAXED);
    }
}

/* The time of a call of these counts on nth threads. */
static double cache_seconds(cache_load *l, int nth, int64_t fresh, int64_t cached) {
    l->fresh[0] = fresh;
    l->cached[0] = cached;
    return pool_run(cache_part, l, nth);
}

/* ---------------------------------------------------------------------------- measuring */
typedef struct op {
    part_fn fn;
    void *ctx;
    int nth;
    double calls;                      /* how often one fn calls the kernel; times are per call */
    double work;                       /* FLOPs or bytes of a call */
    int once;                          /* never repeated: waiting is part of the time */
} op;

typedef struct peak_load {
    int32_t isa;
    long turns;
    const char *k, *v;
    size_t bytes;                      /* of k, and of v */
    volatile uint64_t sink;
} peak_load;

static void fma_part(void *ctx, int ith, int nth) {
    const peak_load *p = (const peak_load *)ctx;
    (void)ith;
    (void)nth;
    peak_fma(p->isa, p->turns);
}

static void read_part(void *ctx, int ith, int nth) {
    peak_load *p = (peak_load *)ctx;
    const size_t share = p->bytes / 256 / (size_t)nth * 256;
    p->sink = peak_read(p->k + share * (size_t)ith, p->v + share * (size_t)ith, share);
}

/* The longest time for which one of nth threads had a processor in the last job. */
static double pool_processor_s(int nth) {
    double most = 0;
    for (int i = 0; i < nth; i++) most = pool.used[i] > most ? pool.used[i] : most;
    return most;
}

/* Seconds of a call. If other programs take more than a fiftieth of a processor from it, it is
 * repeated up to 4 times while the row has time for that, and the least disturbed run counts. If
 * there are more threads than processors it is not repeated. */
static double op_seconds(const op *o) {
    double best = 0, best_share = -1;
    for (int i = 0; i < 5 && best_share < 0.98 && (i == 0 || now_s() < patience); i++) {
        const double t = pool_run(o->fn, o->ctx, o->nth);
        double share = 1;
        if (processor_time && !o->once) return pool_processor_s(o->nth) / o->calls;
        for (int k = 0; k < o->nth; k++) share = pool.share[k] < share ? pool.share[k] : share;
        if (o->once || o->nth > processors()) share = 1;
        if (share > best_share) { best_share = share; best = t; }
    }
    runs_in_all++;
    if (best_share < 0.98) runs_disturbed++;
    return best / o->calls;
}

/* Multiply-adds for about 10 ms on nth threads, the same as in the kernel of isa and dtype. */
static op fma_op(peak_load *p, int32_t isa, int32_t dtype, int nth) {
    op o = { fma_part, p, nth, 1, 0, 0 };
    double flops_turn;
    p->isa = dtype != RA_BF16 && bf16_isa(isa) ? RA_ISA_AVX512 : isa;
    flops_turn = peak_fma(p->isa, 1);
    p->turns = 20000;
    for (int i = 0; i < 3; i++) {
        p->turns = (long)((double)p->turns * 0.01 / op_seconds(&o)) + 1000;
    }
    o.work = flops_turn * (double)p->turns * nth;
    return o;
}

static op read_op(peak_load *p, const data *x, int nth) {
    op o = { read_part, p, nth, 1, 0, 0 };
    p->k = (const char *)x->k;
    p->v = (const char *)x->v;
    p->bytes = (size_t)x->kv_bytes;
    o.work = 2.0 * (double)(p->bytes / 256 / (size_t)nth * 256) * nth;
    return o;
}

/* The best rate of 7 runs. */
static double best_rate(const op *o) {
    double best = 0;
    for (int i = 0; i < 7; i++) best = fmax(best, o->work / op_seconds(o));
    return best;
}

static int compare(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Sorts x. Returns the value that a fraction p of the n values is below. */
static double quantile(double *x, int n, double p) {
    const double at = p * (n - 1);
    const int i = (int)at;
    qsort(x, (size_t)n, sizeof *x, compare);
    return i + 1 < n ? x[i] + (at - i) * (x[i + 1] - x[i]) : x[i];
}

/* Runs peak, kernel, versus, peak, kernel, versus, ..., peak for about `budget` seconds. Each run
 * of the kernel is compared with the mean of the peaks before and after it. versus may be null. */
static void measure(const op *kernel, const op *versus, const op *peak, double budget, result *r) {
    double t[MAX_REPS], rate[MAX_REPS], fraction[MAX_REPS], relative[MAX_REPS], extra[MAX_REPS];
    double idle[MAX_REPS], turn, before, after;
    int n, least = MIN_REPS;
    if (now_s() > hurry) budget /= 3;
    patience = now_s() + 2 * budget;
    turn = op_seconds(kernel) * kernel->calls;
    if (versus) turn += op_seconds(versus) * versus->calls;
    turn += op_seconds(peak);
    if (now_s() > hurry || turn > budget / 2) least = 3;
    n = (int)(budget / turn);
    n = n < least ? least : n > MAX_REPS ? MAX_REPS : n;
    before = peak->work / op_seconds(peak);
    for (int i = 0; i < n; i++) {
        double other = 0;
        t[i] = op_seconds(kernel);
        idle[i] = pool.idle;
        if (versus) other = op_seconds(versus);
        after = peak->work / op_seconds(peak);
        rate[i] = (before + after) / 2;
        fraction[i] = kernel->work / t[i] / rate[i];
        relative[i] = versus ? other / t[i] * (kernel->work / versus->work) : 0;
        extra[i] = t[i] - other;
        before = after;
    }
    r->reps = n;
    r->median_s = quantile(t, n, 0.5);
    r->spread = (quantile(t, n, 0.9) - quantile(t, n, 0.1)) / r->median_s;
    r->rate = kernel->work / r->median_s;
    r->peak = quantile(rate, n, 0.5);
    r->fraction = quantile(fraction, n, 0.5);
    r->relative = quantile(relative, n, 0.5);
    r->low = quantile(relative, n, 0.1);
    r->high = quantile(relative, n, 0.9);
    r->extra_s = quantile(extra, n, 0.5);
    r->idle = quantile(idle, n, 0.5);
}

/* ---------------------------------------------------------------------------- kinds of rows
 * What a row times: the kernel, what is timed in turn with it, and all that they use. */
typedef struct trial {
    load l, other;
    ring_load ring;
    cache_load cache;
    op kernel, versus;
} trial;

/* The plain row that a row of VERSUS_PLAIN is compared with. */
static row plain_of(const row *r) {
    row base = *r;
    base.kind = r->kind > DECODE && r->kind <= DECODE_SOFTCAP ? DECODE : FORWARD;
    base.mask_more = MASK_PLAIN;
    base.apart = 0;
    if (r->kind == TAILS) base.tokens = base.kv_tokens = (r->tokens + 63) / 64 * 64;
    return base;
}

/* The speed relative to plain counts work in tiles that are not empty, so that masks which hide
 * more do not look slower. For tails it counts FLOPs, because what tails cost is emptier tiles. */
static void make_attention(const row *r, const data *x, trial *t) {
    double share = 1;
    load_make(r, x, &t->l);
    t->kernel = (op){ attention_part, &t->l, r->threads, 1, (double)t->l.report.forward.flops, 0 };
    t->versus = (op){ loop_part, &t->l, 1, 1, t->kernel.work, 0 };
    if (r->versus == VERSUS_PLAIN) {
        const row base = plain_of(r);
        const ra_pass_figures *a = &t->l.report.forward, *b = &t->other.report.forward;
        load_make(&base, x, &t->other);
        share = r->kind == TAILS ? (double)b->flops / (double)a->flops
                                 : (double)(b->tiles_partial + b->tiles_full) /
                                       (double)(a->tiles_partial + a->tiles_full);
        t->versus = (op){ attention_part, &t->other, r->threads, 1, t->kernel.work * share, 0 };
    }
}

/* Five products instead of the two of forward. dQ, dK, dV are f32 and added to. */
static void make_backward(const row *r, const data *x, trial *t) {
    const int64_t q = r->tokens * r->q_heads * r->dim, kv = r->kv_tokens * r->kv_heads * r->dim;
    load *l = &t->l;
    load_make(r, x, l);
    l->t.lse.data = map((size_t)(r->tokens * r->q_heads * 4));
    if (l->status == RA_OK) pool_run(attention_part, l, r->threads);
    l->d.train = 1;
    l->t.d_o.data = map_random(q, RA_F32, 5);
    l->t.d_q.data = map((size_t)q * 4);
    l->t.d_k.data = map((size_t)kv * 4);
    l->t.d_v.data = map((size_t)kv * 4);
    l->workspace_bytes = ra_attention_backward_bytes(&l->d, r->threads);
    l->workspace = map(l->workspace_bytes + 64);
    t->kernel = (op){ backward_part, l, r->threads, 1, 2.5 * (double)l->report.forward.flops, 0 };
}

static void make_decode(const row *r, const data *x, trial *t) {
    load_make(r, x, &t->l);
    t->kernel = (op){ attention_part, &t->l, r->threads, 1, 2.0 * (double)x->kv_bytes, 0 };
    if (r->versus != VERSUS_PLAIN) return;
    const row base = plain_of(r);
    load_make(&base, x, &t->other);
    t->versus = (op){ attention_part, &t->other, r->threads, 1, t->kernel.work, 0 };
}

static void make_short(const row *r, const data *x, trial *t) {
    row base = *r;
    base.tokens = 1;
    load_make(r, x, &t->l);
    load_make(&base, x, &t->other);
    t->kernel = (op){ attention_part, &t->l, r->threads, 1, (double)t->l.report.forward.flops, 0 };
    t->versus = (op){ attention_part, &t->other, r->threads, 1, t->kernel.work, 0 };
}

static void make_small(const row *r, const data *x, trial *t) {
    load_make(r, x, &t->l);
    if (r->kind == OFF) {
        t->l.t.q.data = (const char *)x->q + 16;
        t->l.t.k.data = (const char *)x->k + 16;
        t->l.t.v.data = (const char *)x->v + 16;
        t->l.t.o.data = (char *)x->o + 16;
    }
    t->l.calls = (int32_t)(2000 / (1 + r->kv_tokens * r->kv_heads / 1024)) + 1;
    t->kernel = (op){ r->kind == SIMPLE ? simple_part : attention_part, &t->l, 1, t->l.calls,
                      (double)t->l.report.forward.flops, 0 };
    t->versus = (op){ loop_part, &t->l, 1, t->l.calls, t->kernel.work, 0 };
}

/* One rank is timed with as many threads as all ranks of the ring together. */
static void make_ring(const row *r, const data *x, trial *t) {
    load_make(r, x, &t->l);
    ring_make(r, x, &t->ring);
    t->kernel = (op){ ring_part, &t->ring, r->threads, 1, (double)t->l.report.forward.flops, 1 };
    t->versus = (op){ attention_part, &t->l, r->threads, 1, t->kernel.work, 1 };
}

/* One rank is timed with as many threads as all ranks of the cache together. */
static void make_cache(const row *r, const data *x, trial *t) {
    const int decode = r->kind == CACHE;
    ra_cache_desc cd = { 0 };
    if (decode) cd.queries = RA_QUERIES_ALL;
    load_make(r, x, &t->l);
    cache_make(r, x, &cd, &t->cache);
    t->l.calls = t->cache.calls = decode && r->kv_tokens < 1024 ? 200 : 1;
    const double work = decode ? 2.0 * (double)x->kv_bytes : (double)t->l.report.forward.flops;
    t->kernel = (op){ cache_part, &t->cache, r->threads, t->cache.calls, work, 1 };
    t->versus = (op){ attention_part, &t->l, r->threads, t->l.calls, work, 1 };
}

/* The kinds, in the order of the enum. seconds: to be spent on a row. reads: the peak is reading
 * the keys and values instead of arithmetic. */
static const struct kind {
    const char *name, *what;
    void (*make)(const row *r, const data *x, trial *t);
    double seconds;
    int reads;
} kinds[KINDS] = {
    { "forward", "full and causal attention of whole sequences", make_attention, 0.8, 0 },
    { "backward", "gradients of the same", make_backward, 1.0, 0 },
    { "arith", "f32 queries by RA_ARITH_BF16, next to without", make_attention, 1.0, 0 },
    { "mask", "other masks, next to a causal mask", make_attention, 1.0, 0 },
    { "alibi", "ALiBi, next to none", make_attention, 1.0, 0 },
    { "bias_key", "a bias per key, next to none", make_attention, 1.0, 0 },
    { "bias_full", "a bias per head, query and key, next to none", make_attention, 1.0, 0 },
    { "sinks", "sinks, next to none", make_attention, 1.0, 0 },
    { "softcap", "a softcap, next to none", make_attention, 1.0, 0 },
    { "tails", "a length that fills no block, next to whole blocks", make_attention, 1.0, 0 },
    { "strides", "one head after another, next to packed tokens", make_attention, 1.0, 0 },
    { "dims", "head dimensions other than 64 and 128", make_attention, 0.8, 0 },
    { "decode", "one query over a long cache; \"apart\": [head][token][dim]", make_decode, 0.6, 1 },
    { "decode_mask", "the same with a mask tensor of zeros, next to none", make_decode, 0.6, 1 },
    { "decode_bias", "with a bias of all heads, next to none", make_decode, 0.6, 1 },
    { "decode_alibi", "with ALiBi, next to none", make_decode, 0.6, 1 },
    { "decode_softcap", "with a softcap, next to none", make_decode, 0.6, 1 },
    { "short", "a few queries over a long cache, next to one", make_short, 0.8, 0 },
    { "small", "a call too short to be timed alone, next to a loop", make_small, 0.5, 0 },
    { "small_off", "the same with rows that begin 16 bytes off a line", make_small, 0.5, 0 },
    { "simple", "the same by ra_attention_simple", make_small, 0.5, 0 },
    { "loop", "a whole sequence, next to a loop", make_attention, 1.0, 0 },
    { "ring", "rings of 1, 2 and 4 ranks, next to one rank without a ring", make_ring, 2.0, 0 },
    { "cache", "a token over a cache of 1, 2 and 4 ranks, next to one rank", make_cache, 1.0, 1 },
    { "prefill", "a chunk of a prompt over such a cache, next to one rank", make_cache, 2.0, 0 },
};

static const char *name_of(const row *r) { return kinds[r->kind].name; }

/* 1 if all calls of a trial have succeeded so far; otherwise prints why not. */
static int trial_good(const row *r, const trial *t) {
    const ra_error *e = &t->ring.error;
    ra_status s = t->ring.status;
    if (s == RA_OK) { s = t->l.status; e = &t->l.error; }
    if (s == RA_OK) { s = t->other.status; e = &t->other.error; }
    if (s == RA_OK) { s = t->cache.status; e = &t->cache.error; }
    if (s == RA_OK) return 1;
    printf("%-10s failed: %s: %s %s\n", name_of(r), ra_status_text(s), e->field, e->text);
    failed_rows++;
    return 0;
}

/* The dtype whose products the kernel consists of. Those of 16-bit integers are as fast as bf16. */
static int32_t products_of(const row *r) {
    const int int16 = r->dtype >= RA_Q8_0 && r->isa == RA_ISA_AVX512_BF16;
    return r->kind == ARITH || int16 ? RA_BF16 : r->dtype;
}

static void run_row(const row *r, result *out) {
    static trial t;
    static peak_load p;
    const struct kind *kind = &kinds[r->kind];
    const data x = data_make(r);
    op peak;
    memset(&t, 0, sizeof t);
    kind->make(r, &x, &t);
    if (!t.l.status && !t.other.status && !t.ring.status && !t.cache.status)
        pool_run(t.kernel.fn, t.kernel.ctx, t.kernel.nth);
    if (trial_good(r, &t)) {
        peak = kind->reads ? read_op(&p, &x, r->threads)
                           : fma_op(&p, r->isa, products_of(r), r->threads);
        peak.once = t.kernel.once;
        out->unit = kind->reads ? "GB/s" : "GFLOP/s";
        measure(&t.kernel, r->versus ? &t.versus : NULL, &peak, kind->seconds, out);
        out->done = trial_good(r, &t);
    }
    ring_free(&t.ring);
    cache_free(&t.cache);
    unmap_all();
}

/* ---------------------------------------------------------------------------- the list */
static row row_make(int32_t kind, int32_t isa, int32_t dtype, int32_t mask, int32_t dim,
                    int64_t tokens) {
    row r = { 0 };
    r.kind = kind;
    r.isa = isa;
    r.dtype = dtype;
    r.mask = mask;
    r.dim = r.v_dim = dim;
    r.q_heads = r.kv_heads = 8;
    r.tokens = r.kv_tokens = tokens;
    r.threads = r.ranks = r.sequences = 1;
    return r;
}

/* Keeps r if this machine has its instruction set. */
static void add(row r) {
    if (row_count < MAX_ROWS && ra_isa_available(r.isa)) rows[row_count++] = r;
}

/* The instruction set that multiplies f32 here. */
static int32_t best_f32(void) {
    const int32_t best = ra_isa_best();
    return bf16_isa(best) ? RA_ISA_AVX512 : best;
}

/* Full and causal, D 64 and 128, of `tokens` tokens. */
static void add_squares(int32_t isa, int32_t dtype, int64_t tokens) {
    for (int32_t dim = 64; dim <= 128; dim *= 2) {
        add(row_make(FORWARD, isa, dtype, RA_MASK_NONE, dim, tokens));
        add(row_make(FORWARD, isa, dtype, RA_MASK_CAUSAL, dim, tokens));
    }
}

/* The best instruction set of each arithmetic up to 8192 tokens, the others up to 4096. */
static void add_forward(int large) {
    static const int32_t isas[] = { RA_ISA_AVX512, RA_ISA_AVX2, RA_ISA_NEON, RA_ISA_SCALAR };
    for (int i = 0; i < 4; i++) {
        add_squares(isas[i], RA_F32, 1024);
        if (isas[i] != RA_ISA_SCALAR) add_squares(isas[i], RA_F32, 4096);
        if (isas[i] != RA_ISA_SCALAR && (large || isas[i] == best_f32())) {
            add_squares(isas[i], RA_F32, 8192);
        }
    }
    for (int32_t isa = RA_ISA_AVX512_BF16; isa <= RA_ISA_AMX; isa++) {
        for (int64_t n = 1024; n <= 8192; n *= n == 1024 ? 4 : 2) add_squares(isa, RA_BF16, n);
    }
}

/* 16-bit and 8-bit storage, f32 arithmetic. */
static void add_storage(int large) {
    static const int32_t isas[] = { RA_ISA_AVX512, RA_ISA_AVX2, RA_ISA_NEON, RA_ISA_SCALAR };
    for (int i = 0; i < 4; i++) {
        if (isas[i] != best_f32() && !large) continue;
        add_squares(isas[i], RA_F16, isas[i] == RA_ISA_SCALAR ? 1024 : 4096);
        add_squares(isas[i], RA_BF16, isas[i] == RA_ISA_SCALAR ? 1024 : 4096);
    }
    add_squares(best_f32(), RA_Q8_0, 4096);
    add_squares(best_f32(), RA_Q4_0, 4096);
    for (int32_t dtype = RA_Q8_0; dtype <= RA_Q4_0 && bf16_isa(ra_isa_best()); dtype++)
        add_squares(ra_isa_best(), dtype, 4096);
}

/* Products in 16 bits by request, of every dtype of keys. */
static void add_arith(int32_t isa) {
    for (int32_t dtype = RA_F32; dtype <= RA_Q4_0; dtype++)
        for (int i = 0; i < 4; i++) {
            row r = row_make(ARITH, isa, dtype, i % 2 ? RA_MASK_CAUSAL : RA_MASK_NONE,
                             i < 2 ? 64 : 128, 4096);
            r.versus = VERSUS_PLAIN;
            r.f32_queries = 1;
            add(r);
        }
}

static void add_backward(int32_t isa, int32_t dtype, int large) {
    const int64_t n = isa == RA_ISA_SCALAR ? 1024 : 4096;
    for (int i = 0; i < 12; i++) {
        row r = row_make(BACKWARD, isa, dtype, i % 2 ? RA_MASK_CAUSAL : RA_MASK_NONE,
                         i / 2 % 2 ? 128 : 64, i < 8 ? n : 8192);
        if (i >= 4 && i < 8) r.threads = 2;
        if (i >= 8) r.q_heads = r.kv_heads = 2;
        if (i < 4 || large) add(r);
        else if (isa != RA_ISA_AVX2 && r.dim == 128 && (i < 8 || r.mask == RA_MASK_NONE)) add(r);
    }
}

static void add_gqa_and_threads(int32_t isa, int32_t dtype) {
    for (int32_t mask = RA_MASK_NONE; mask <= RA_MASK_CAUSAL; mask++) {
        row r = row_make(FORWARD, isa, dtype, mask, 128, 2048);
        r.q_heads = 32;
        add(r);
    }
    for (int32_t mask = RA_MASK_NONE; mask <= RA_MASK_CAUSAL; mask++) {
        for (int32_t dim = 64; dim <= 128; dim *= 2) {
            row r = row_make(FORWARD, isa, dtype, mask, dim, 4096);
            r.threads = 2;
            add(r);
        }
    }
}

/* Masks, score changes, tails and strides, next to plain attention. */
static void add_variants(int32_t isa, int32_t dtype) {
    for (int32_t m = MASK_WINDOW; m <= MASK_INTERVALS; m++) {
        row r = row_make(MASK, isa, dtype, RA_MASK_CAUSAL, 128, 2048);
        r.mask_more = m;
        r.versus = VERSUS_PLAIN;
        add(r);
    }
    for (int32_t kind = ALIBI; kind <= STRIDES; kind++) {
        row r = row_make(kind, isa, dtype, kind == ALIBI ? RA_MASK_CAUSAL : RA_MASK_NONE, 128,
                         kind == TAILS ? 2048 - 23 : 2048);
        r.versus = VERSUS_PLAIN;
        r.apart = kind == STRIDES;
        add(r);
    }
}

/* Head dimensions other than 64 and 128. The last one is MLA. */
static void add_dims(int32_t isa, int32_t dtype) {
    static const int32_t dims[][2] = { { 16, 16 }, { 32, 32 }, { 60, 60 }, { 80, 80 }, { 96, 96 },
                                       { 192, 128 }, { 256, 256 }, { 576, 512 } };
    for (size_t i = 0; i < sizeof dims / sizeof *dims; i++) {
        row r = row_make(DIMS, isa, dtype, RA_MASK_NONE, dims[i][0], 2048);
        r.v_dim = dims[i][1];
        if (r.dim == 576) r.kv_heads = 1;
        add(r);
    }
}

static row cache_row(int32_t kind, int32_t isa, int32_t dtype, int64_t tokens) {
    row r = row_make(kind, isa, dtype, RA_MASK_CAUSAL, 128, tokens);
    r.q_heads = 32;
    r.kv_tokens = 32768;
    return r;
}

static void add_decode(void) {
    for (int32_t dtype = RA_F32; dtype <= RA_Q4_0; dtype++) {
        for (int32_t threads = 1; threads <= 2; threads++) {
            row r = cache_row(DECODE, dtype >= RA_BF16 ? ra_isa_best() : best_f32(), dtype, 1);
            r.threads = threads;
            add(r);
            r.apart = 1;
            add(r);
        }
        for (int32_t kind = DECODE_MASK; kind <= DECODE_SOFTCAP; kind++) {
            row r = cache_row(kind, dtype >= RA_BF16 ? ra_isa_best() : best_f32(), dtype, 1);
            r.versus = VERSUS_PLAIN;
            add(r);
        }
    }
}

static void add_short(int32_t isa, int32_t dtype) {
    for (int64_t n = 2; n <= 32; n *= 2) {
        row r = cache_row(SHORT, isa, dtype, n);
        r.versus = VERSUS_ONE_QUERY;
        add(r);
    }
}

static void add_small_and_loop(int32_t best) {
    row r = row_make(SMALL, best, RA_F32, RA_MASK_CAUSAL, 64, 1);
    r.kv_tokens = 16;
    r.q_heads = r.kv_heads = 1;
    r.versus = VERSUS_LOOP;
    add(r);
    r.kind = SIMPLE;
    add(r);
    for (int i = 0; i < 72; i++) {     /* a query row per KV head over a short cache */
        static const int64_t keys[6] = { 16, 32, 64, 128, 256, 1024 };
        static const int32_t heads[3] = { 8, 12, 32 };
        r = row_make(i < 36 ? SMALL : OFF, best, RA_F32, RA_MASK_CAUSAL, i / 18 % 2 ? 128 : 64, 1);
        r.q_heads = r.kv_heads = heads[i / 6 % 3];
        r.kv_tokens = keys[i % 6];
        r.versus = VERSUS_LOOP;
        add(r);
    }
    r = row_make(LOOP, best, RA_F32, RA_MASK_CAUSAL, 128, 1024);
    r.versus = VERSUS_LOOP;
    add(r);
}

static void add_ring(int32_t isa, int32_t dtype) {
    for (int32_t mask = RA_MASK_NONE; mask <= RA_MASK_CAUSAL; mask++) {
        for (int32_t ranks = 1; ranks <= MAX_THREADS; ranks *= 2) {
            row r = row_make(RING, isa, dtype, mask, 128, 8192);
            r.q_heads = r.kv_heads = 4;
            r.layout = mask == RA_MASK_CAUSAL ? RA_LAYOUT_ZIGZAG : RA_LAYOUT_CONTIGUOUS;
            r.threads = MAX_THREADS;
            r.ranks = ranks;
            r.versus = VERSUS_ONE_RANK;
            add(r);
        }
    }
}

/* Two threads, or one for each rank if there are more. */
static void add_cache(int32_t f32) {
    for (int i = 0; i < 9; i++) {
        row r = cache_row(i < 6 ? CACHE : PREFILL, f32, RA_F16, i < 6 ? 1 : 512);
        r.kv_tokens = i < 3 ? 64 : i < 6 ? 32768 : 4096;
        r.ranks = 1 << i % 3;
        r.threads = r.ranks < 2 ? 2 : r.ranks;
        r.versus = VERSUS_ONE_RANK;
        add(r);
    }
}

static void add_all(int large) {
    const int32_t best = ra_isa_best(), f32 = best_f32();
    add_forward(large);
    add_storage(large);
    if (bf16_isa(best)) add_arith(best);
    add_backward(f32, RA_F32, large);
    if (f32 == RA_ISA_AVX512) add_backward(RA_ISA_AVX2, RA_F32, 0);
    if (bf16_isa(best)) add_backward(best, RA_BF16, large);
    add_gqa_and_threads(f32, RA_F32);
    if (bf16_isa(best)) add_gqa_and_threads(best, RA_BF16);
    add_variants(f32, RA_F32);
    if (bf16_isa(best)) add_variants(best, RA_BF16);
    add_dims(f32, RA_F32);
    if (bf16_isa(best)) add_dims(best, RA_BF16);
    add_decode();
    add_short(f32, RA_F32);
    add_short(best, RA_BF16);
    add_small_and_loop(f32);
    add_ring(f32, RA_F32);
    if (bf16_isa(best)) add_ring(best, RA_BF16);
    add_cache(f32);
}

static const char *mask_text(const row *r) {
    if (r->mask_more) return mask_names[r->mask_more];
    return r->mask == RA_MASK_CAUSAL ? "causal" : "none";
}

/* 1 if the description of r has all words, which spaces or commas separate. */
static int wanted(const row *r, const char *words) {
    char text[256], word[64];
    snprintf(text, sizeof text, " %s %s %s %s D%d Tq%lld Tk%lld Hq%d threads%d ranks%d %s",
             name_of(r), ra_isa_name(r->isa), dtype_text(r->dtype), mask_text(r), (int)r->dim,
             (long long)r->tokens, (long long)r->kv_tokens, (int)r->q_heads, (int)r->threads,
             (int)r->ranks, r->apart ? "apart " : "");
    while (*words) {
        const size_t n = strcspn(words, " ,");
        if (n + 3 > sizeof word) return 0;
        word[0] = word[n + 1] = ' ';
        memcpy(word + 1, words, n);
        word[n + 2] = 0;
        if (!strstr(text, word)) return 0;
        words += n;
        words += strspn(words, " ,");
    }
    return 1;
}

/* ---------------------------------------------------------------------------- printing */
static void print_model(void) {
    char line[256];
    FILE *f = fopen("/proc/cpuinfo", "r");
    while (f && fgets(line, sizeof line, f)) {
        if (strncmp(line, "model name", 10) == 0 && strchr(line, ':')) {
            line[strcspn(line, "\n")] = 0;
            printf("%s", strchr(line, ':') + 2);
            fclose(f);
            return;
        }
    }
    if (f) fclose(f);
    printf("unknown processor");
}

static void print_machine(void) {
    struct utsname u = { 0 };
    const double pages = (double)sysconf(_SC_PHYS_PAGES);
    uname(&u);
    printf("machine   ");
    print_model();
    printf(", %ld processors, %.1f GiB, %s %s %s\n", sysconf(_SC_NPROCESSORS_ONLN),
           pages * (double)sysconf(_SC_PAGESIZE) / 1073741824.0, u.sysname, u.release, u.machine);
#ifdef _SC_LEVEL1_DCACHE_SIZE
    printf("caches    L1d %ld KiB, L2 %ld KiB, L3 %ld KiB\n",
           sysconf(_SC_LEVEL1_DCACHE_SIZE) / 1024, sysconf(_SC_LEVEL2_CACHE_SIZE) / 1024,
           sysconf(_SC_LEVEL3_CACHE_SIZE) / 1024);
#endif
#if defined(__clang__)
    printf("compiler  %s\n", __VERSION__);
#else
    printf("compiler  gcc %s\n", __VERSION__);
#endif
    printf("flags     %s; of the loop also -Ofast -march=native\n", BENCH_FLAGS);
    if (processor_time) printf("time      of the processor, except for rings\n");
    printf("library   %d.%d.%d, default instruction set %s\n", ra_version() >> 16,
           (ra_version() >> 8) & 255, ra_version() & 255, ra_isa_name(ra_isa_best()));
}

#if defined(__x86_64__)
/* Cycles per second. */
static double clock_hz(void) {
    double hz = 0;
    for (int i = 0; i < 5; i++) {
        const double start = processor_s(), cycles = peak_clock(500000);
        const double one = cycles / (processor_s() - start);
        hz = one > hz ? one : hz;
    }
    return hz;
}
#endif

/* Prints each peak beside the clock, which shows that only execution units limit it, and beside
 * what the processor is known to issue. */
static void print_peaks(void) {
    static const int32_t isas[] = { RA_ISA_SCALAR, RA_ISA_AVX2, RA_ISA_AVX512, RA_ISA_AVX512_BF16,
                                    RA_ISA_AMX, RA_ISA_NEON };
    static peak_load p;
#if defined(__x86_64__)
    double hz;
#endif
    for (size_t i = 0; i < sizeof isas / sizeof *isas; i++) {
        const int32_t isa = isas[i];
        if (!ra_isa_available(isa)) continue;
        const op o = fma_op(&p, isa, RA_BF16, 1);
        const double best = best_rate(&o);
        printf("peak      %-11s %7.1f GFLOP/s per thread", ra_isa_name(isa), best / 1e9);
#if defined(__x86_64__)
        hz = clock_hz();
        printf(": %.3f %s per cycle at %.2f GHz", best / hz / peak_flops_instruction(isa),
               peak_text(isa), hz / 1e9);
        if (peak_nominal(isa) > 0) printf(", nominally %.4g", peak_nominal(isa));
#endif
        printf("\n");
    }
}

static void print_read_peak(void) {
    const row r = cache_row(DECODE, best_f32(), RA_F32, 1);
    const data x = data_make(&r);
    static peak_load p;
    for (int threads = 1; threads <= 2 && threads <= processors(); threads++) {
        const op o = read_op(&p, &x, threads);
        printf("peak      reading     %7.1f GB/s on %d thread%s\n", best_rate(&o) / 1e9, threads,
               threads > 1 ? "s" : "");
    }
    unmap_all();
}

static void print_header(void) {
    printf("\n%-42s %7s %5s %6s %6s %3s %12s %7s %14s %8s %6s\n", "kernel", "D", "Tq", "Tk",
           "heads", "thr", "median", "spread", "rate", "peak", "of it");
}

static void print_row(const row *r, const result *x) {
    char label[64], heads[24], time[24], dims[24];
    snprintf(label, sizeof label, "%s %s %s %s%s", name_of(r), ra_isa_name(r->isa),
             dtype_text(r->dtype), mask_text(r), r->apart ? " apart" : "");
    if (r->kind >= RING) {
        snprintf(label, sizeof label, "%s %s %s %s ranks %d", name_of(r), ra_isa_name(r->isa),
                 dtype_text(r->dtype), mask_text(r), (int)r->ranks);
    }
    snprintf(heads, sizeof heads, "%d/%d", (int)r->q_heads, (int)r->kv_heads);
    snprintf(dims, sizeof dims, r->dim == r->v_dim ? "%d" : "%d/%d", (int)r->dim, (int)r->v_dim);
    if (x->median_s < 1e-3) snprintf(time, sizeof time, "%.3f us", x->median_s * 1e6);
    else snprintf(time, sizeof time, "%.2f ms", x->median_s * 1e3);
    printf("%-42s %7s %5lld %6lld %6s %3d %12s %5.1f %% %6.1f %-7s", label, dims,
           (long long)r->tokens, (long long)r->kv_tokens, heads, (int)r->threads, time,
           x->spread * 100, x->rate / 1e9, x->unit);
    printf(" %8.1f %4.1f %%", x->peak / 1e9, x->fraction * 100);
    if (r->versus) {
        printf("  %.2f x %s", r->versus == VERSUS_ONE_QUERY ? 1 / x->relative : x->relative,
               versus_text[r->versus]);
    }
    if (r->versus == VERSUS_LOOP)
        printf(" (%.2f to %.2f, %+.3f us)", x->low, x->high, x->extra_s * 1e6);
    if (r->kind == CACHE) printf(" (%+.1f us)", x->extra_s * 1e6);
    if (r->kind == RING) printf(", idle %.1f %%", x->idle * 100);
    printf("\n");
    fflush(stdout);
}

/* ---------------------------------------------------------------------------- plans */
typedef struct plan_case { int64_t tokens; int32_t ranks, layout, kv_heads, mask; } plan_case;

static void *plan_alloc(void *ctx, size_t bytes, size_t align) {
    void *p = NULL;
    *(size_t *)ctx += bytes;
    return posix_memalign(&p, align, bytes) == 0 ? p : NULL;
}

static void plan_free(void *ctx, void *p, size_t bytes) {
    (void)ctx, (void)bytes;
    free(p);
}

/* The seconds that a plan for training takes (D 128, 32 query heads), the seconds for its figures
 * of another rank, and its size. The masks are causal. Documents have 8192 tokens, a window has a
 * sixteenth of all tokens. */
static void print_plan(const plan_case *c) {
    static const char *const masks[3] = { "causal", "documents", "window" };
    static const char *const layouts[4] = { "", "contiguous", "zigzag", "striped" };
    static int64_t docs[8192];
    ra_plan *plan = NULL;
    ra_plan_report report;
    ra_allocator memory = { plan_alloc, plan_free, NULL };
    ra_desc d = ra_desc_make(32, c->kv_heads, 128, RA_BF16, RA_MASK_CAUSAL);
    size_t bytes = 0;
    double begin, made;
    memory.ctx = &bytes;
    d.tokens = c->tokens;
    d.ranks = c->ranks;
    d.rank = c->ranks / 2;
    d.layout.kind = c->layout;
    d.train = 1;
    for (int i = 0; i < 8192; i++) docs[i] = (int64_t)8192 * i;
    if (c->mask == 1) d.mask.doc_first = docs;
    if (c->mask == 1) d.mask.doc_count = c->tokens / 8192;
    if (c->mask == 2) d.mask.window = c->tokens / 16;
    begin = now_s();
    if (ra_plan_create(&plan, &d, &memory) != RA_OK) { failed_rows++; return; }
    made = now_s() - begin;
    begin = now_s();
    (void)ra_plan_query(plan, 0, &report);
    printf("plan %4lldM tokens %5d ranks %-10s %-9s Hq32/%-2d %8.3f s, another rank %6.3f s, "
           "%5.1f MB\n", (long long)(c->tokens >> 20), (int)c->ranks,
           layouts[c->layout], masks[c->mask], (int)c->kv_heads, made, now_s() - begin,
           (double)bytes / 1e6);
    fflush(stdout);
    ra_plan_destroy(plan);
}

static void print_plans(const char *words) {
    static const plan_case list[] = {
        { 1 << 20, 16, RA_LAYOUT_ZIGZAG, 8, 0 },     { 1 << 20, 1024, RA_LAYOUT_ZIGZAG, 8, 0 },
        { 1 << 20, 1024, RA_LAYOUT_ZIGZAG, 32, 0 },  { 1 << 20, 1024, RA_LAYOUT_STRIPED, 8, 0 },
        { 1 << 24, 1024, RA_LAYOUT_ZIGZAG, 8, 0 },   { 1 << 24, 4096, RA_LAYOUT_ZIGZAG, 8, 0 },
        { 1 << 24, 4096, RA_LAYOUT_ZIGZAG, 32, 0 },  { 1 << 26, 16, RA_LAYOUT_CONTIGUOUS, 8, 0 },
        { 1 << 26, 16, RA_LAYOUT_ZIGZAG, 8, 1 },     { 1 << 26, 16, RA_LAYOUT_ZIGZAG, 32, 0 },
        { 1 << 26, 16, RA_LAYOUT_CONTIGUOUS, 8, 2 }, { 1 << 26, 1024, RA_LAYOUT_ZIGZAG, 8, 0 },
    };
    (void)words;
    for (size_t i = 0; i < sizeof list / sizeof list[0]; i++) print_plan(&list[i]);
}

/* ---------------------------------------------------------------------------- travel
 * What a call over a sharded cache chooses, and what it takes if queries travel, if keys do, and
 * with MERGE, over a grid of new and cached tokens: predicted by the model that the choice follows,
 * for a processor of 100 GFLOP/s per rank, and measured. They are timed in turn, and the median of
 * each counts. Short calls are timed eight at once: the first one finds another cache's memory in
 * the processor's. */
enum { TRAVEL_NEW = 1024, TRAVEL_CACHED = 32768, TRAVEL_TIMES = 400, TRAVEL_WAYS = 3 };

/* all: each way, then the choice. Returns the time of the choice divided by the shortest time. */
static double print_travel(cache_load *all, int64_t fresh, int64_t cached) {
    static const char *const name[] = { "", "queries", "keys", "merge" };
    ra_infer_report report = { 0 };
    double took[TRAVEL_WAYS][TRAVEL_TIMES], median[TRAVEL_WAYS + 1], spent = 0, best = 1e9;
    int rule, n = 0;
    if (ra_infer_query(all[3].cache[0], &cached, &fresh, &report) != RA_OK) failed_rows++;
    rule = report.travel;
    /* AUTO has no room for all keys, and so no prediction where they are more than queries. */
    if (ra_infer_query(all[1].cache[0], &cached, &fresh, &report) != RA_OK) failed_rows++;
    for (int k = 0; k < TRAVEL_WAYS; k++) {
        all[k].calls = 1;
        if (cache_seconds(&all[k], all[k].ranks, fresh, cached) < 1e-3) all[k].calls = 8;
    }
    for (; n < TRAVEL_TIMES && (n < 7 || spent < 0.3); n++)
        for (int k = 0; k < TRAVEL_WAYS; k++) {
            took[k][n] = cache_seconds(&all[k], all[k].ranks, fresh, cached) / all[k].calls;
            spent += took[k][n] * all[k].calls;
        }
    for (int k = 0; k < TRAVEL_WAYS; k++) {
        median[k + 1] = quantile(took[k], n, 0.5);
        best = median[k + 1] < best ? median[k + 1] : best;
    }
    printf("travel ranks %d new %4lld cached %5lld: queries predicted %8.1f us, took %8.1f; "
           "keys %8.1f, %8.1f; merge took %8.1f; takes %-7s, %.2f x the best\n",
           (int)all[0].ranks, (long long)fresh, (long long)cached, report.queries_s * 1e6,
           median[RA_INFER_PASS_Q] * 1e6, report.keys_s * 1e6, median[RA_INFER_PASS_KV] * 1e6,
           median[RA_INFER_MERGE] * 1e6, name[rule], median[rule] / best);
    fflush(stdout);
    return median[rule] / best;
}

static void print_travel_over(int32_t ranks) {
    static const int64_t fresh[] = { 1, 4, 16, 64, 256, TRAVEL_NEW };
    static const int64_t cached[] = { 0, 256, 2048, TRAVEL_CACHED };
    static cache_load all[TRAVEL_WAYS + 1];
    row r = row_make(PREFILL, best_f32(), RA_F32, RA_MASK_CAUSAL, 64, TRAVEL_NEW);
    ra_cache_desc cd = { 0 };
    data x;
    double most = 0;
    r.kv_heads = 2;
    r.kv_tokens = TRAVEL_NEW + TRAVEL_CACHED;
    r.threads = r.ranks = ranks;
    x = data_make(&r);
    for (int k = 0; k <= TRAVEL_WAYS; k++) {
        cd.travel = k < TRAVEL_WAYS ? RA_INFER_PASS_Q + k : RA_INFER_AUTO;
        cache_make(&r, &x, &cd, &all[k]);
        if (all[k].status != RA_OK) failed_rows++;
    }
    for (int i = 0; i < 24 && !failed_rows; i++) {
        const double ratio = print_travel(all, fresh[i / 4], cached[i % 4]);
        most = ratio > most ? ratio : most;
    }
    printf("travel ranks %d: at most %.2f x the best\n", (int)ranks, most);
    for (int k = 0; k <= TRAVEL_WAYS; k++) cache_free(&all[k]);
    unmap_all();
}

/* words: "travel", and the number of ranks if only that is requested. */
static void print_travels(const char *words) {
    const int64_t only = strtoll(words + strcspn(words, "0123456789"), NULL, 10);
    for (int32_t ranks = 2; ranks <= MAX_RANKS; ranks *= 2)
        if (!only || only == ranks) print_travel_over(ranks);
}

/* ---------------------------------------------------------------------------- forms
 * What it costs that the bits of a row depend on the row alone: calls with RA_FORM_SAME and with
 * RA_FORM_AUTO in turn, of ra_infer on one rank and of ra_attention, on one thread. The shortest
 * time of each counts. */
static void form_make(const row *r, const data *x, load *l) {    /* ra_attention */
    memset(l, 0, sizeof *l);
    l->d = desc_make(r);
    l->t.q.data = x->q;
    l->t.k.data = x->k;
    l->t.v.data = x->v;
    l->t.o.data = x->o;
    l->workspace_bytes = ra_attention_bytes(&l->d, 1);
    l->workspace = map(l->workspace_bytes);
}

static double form_seconds(load *l, int64_t fresh, int64_t cached) {
    const double begin = now_s();
    l->d.tokens = fresh;
    l->d.kv_tokens = cached + fresh;
    l->d.q_offset = cached;
    if (ra_attention(&l->d, &l->t, l->workspace, l->workspace_bytes, 0, 1)) failed_rows++;
    return now_s() - begin;
}

/* form: [0] AUTO, [1] SAME; local: the same by ra_attention. */
static void print_form(cache_load form[2], load local[2], int64_t fresh, int64_t cached) {
    double best[4] = { 1e9, 1e9, 1e9, 1e9 }, spent = 0;
    for (int n = 0; n < 200 && (n < 2 || spent < 0.4); n++)
        for (int k = 0; k < 4; k++) {
            const double t = k < 2 ? cache_seconds(&form[k], 1, fresh, cached)
                                   : form_seconds(&local[k - 2], fresh, cached);
            best[k] = t < best[k] ? t : best[k];
            spent += t;
        }
    for (int k = 0; k < 4; k += 2)
        printf("forms %-12s new %4lld cached %6lld: auto %9.1f us, same %9.1f us, "
               "%.2f x as long\n", k ? "ra_attention" : "ra_infer", (long long)fresh,
               (long long)cached, best[k] * 1e6, best[k + 1] * 1e6, best[k + 1] / best[k]);
    fflush(stdout);
}

static void print_forms(const char *words) {
    static const int64_t fresh[] = { 1, 4, 8, 16, 64, 256 }, cached[] = { 2048, 32768 };
    static cache_load form[2];
    static load local[2];
    row r = cache_row(PREFILL, ra_isa_best(), RA_BF16, 256);
    data x;
    (void)words;
    r.kv_tokens = 256 + 32768;
    x = data_make(&r);
    for (int k = 0; k < 2; k++) {
        r.form = k ? RA_FORM_SAME : RA_FORM_AUTO;
        cache_make(&r, &x, NULL, &form[k]);
        if (form[k].status != RA_OK) failed_rows++;
        form_make(&r, &x, &local[k]);
    }
    for (int i = 0; i < 12 && !failed_rows; i++)
        print_form(form, local, fresh[i / 2], cached[i % 2]);
    for (int k = 0; k < 2; k++) cache_free(&form[k]);
    unmap_all();
}

/* ---------------------------------------------------------------------------- checksums
 * Two ranks on this thread, over a network that copies, which the bundled world does without
 * RA_CAP_SHARED. Rings without ([0]) and with ([1]) checksums run in turn. */
enum { CHECKED_TOKENS = 4096, CHECKED_TIMES = 9 };
typedef struct checked {
    ra_plan *plan[2];
    ra_tensors t[2];
    ra_world *world[2];
    ra_transport net[2][2];
    ra_ring *ring[2][2];
    int64_t bytes;                     /* sent in a forward pass by both */
} checked;

static int no_fold(void *ctx, const ra_block *b) {
    (void)ctx;
    for (int64_t i = 0; i < b->q_rows * b->desc->q_heads; i++) b->lse[i] = -INFINITY;
    return RA_OK;
}

static void checked_plan(checked *c, const ra_engine *engine, int rank) {
    row r = row_make(RING, best_f32(), RA_F32, RA_MASK_CAUSAL, 128, CHECKED_TOKENS);
    static data x;
    static float *grads;
    ra_desc d = desc_make(&r);
    const int64_t floats = (int64_t)r.q_heads * 128, at = rank * (CHECKED_TOKENS / 2) * floats;
    const int64_t kv_at = at / r.q_heads * r.kv_heads;
    ra_tensors *t = &c->t[rank];
    ra_plan_report report;
    if (rank == 0) x = data_make(&r);
    if (rank == 0) grads = (float *)map((size_t)(4 * CHECKED_TOKENS * floats * 4));
    d.ranks = 2;
    d.rank = rank;
    d.threads = 1;
    d.train = !engine;
    d.layout.kind = RA_LAYOUT_ZIGZAG;
    d.engine = engine;
    t->q.data = t->d_o.data = (float *)x.q + at;
    t->k.data = (float *)x.k + kv_at;
    t->v.data = (float *)x.v + kv_at;
    t->o.data = (float *)x.o + at;
    t->lse.data = grads + at;
    t->d_q.data = grads + CHECKED_TOKENS * floats + at;
    t->d_k.data = grads + 2 * CHECKED_TOKENS * floats + at;
    t->d_v.data = grads + 3 * CHECKED_TOKENS * floats + at;
    if (ra_plan_create(&c->plan[rank], &d, NULL) != RA_OK ||
        ra_plan_query(c->plan[rank], rank, &report) != RA_OK) failed_rows++;
    else c->bytes += report.forward.bytes_out;
}

static void checked_open(checked *c, const ra_engine *engine) {
    ra_world_desc wd = { 0 };
    memset(c, 0, sizeof *c);
    wd.ranks = 2;
    for (int rank = 0; rank < 2; rank++) checked_plan(c, engine, rank);
    for (int i = 0; i < 4 && !failed_rows; i++) {
        const int on = i / 2, rank = i % 2;
        ra_ring_desc rd = { 0 };
        rd.checksums = on;
        if (rank == 0 && ra_world_create(&c->world[on], &wd) != RA_OK) { failed_rows++; return; }
        c->net[on][rank] = *ra_world_transport(c->world[on], rank);
        c->net[on][rank].caps &= ~(uint32_t)RA_CAP_SHARED;
        if (ra_ring_create(&c->ring[on][rank], c->plan[rank], &c->net[on][rank], &rd) != RA_OK)
            failed_rows++;
    }
}

/* Processor time of one pass. */
static double checked_pass(checked *c, int on, int32_t pass) {
    const double begin = processor_s();
    ra_status s[2] = { RA_AGAIN, RA_AGAIN };
    for (int r = 0; r < 2; r++) {
        ra_job job = { 0 };
        job.plan = c->plan[r];
        job.tensors = &c->t[r];
        job.pass = pass;
        if (ra_begin(c->ring[on][r], &job) != RA_OK) failed_rows++;
    }
    while (!failed_rows && (s[0] > 0 || s[1] > 0))
        for (int r = 0; r < 2; r++) {
            if (s[r] > 0) s[r] = ra_step(c->ring[on][r], 0);
            if (s[r] < 0) failed_rows++;
        }
    return processor_s() - begin;
}

/* Each message is summed twice, by its sender and by its receiver. */
static void print_checked(checked *c, const char *what, int32_t pass, int rate) {
    double took[2][CHECKED_TIMES], off, on;
    for (int i = 0; i < CHECKED_TIMES && !failed_rows; i++)
        for (int k = 0; k < 2; k++) took[k][i] = checked_pass(c, k, pass);
    if (failed_rows) return;
    off = quantile(took[0], CHECKED_TIMES, 0.5);
    on = quantile(took[1], CHECKED_TIMES, 0.5);
    printf("checksum ranks 2 Tq%d Hq8 D128 f32 %-8s %9.3f ms, with checksums %.3f x the time",
           CHECKED_TOKENS, what, off * 1e3, on / off);
    if (rate) printf(": %.1f GB/s", 2e-9 * (double)c->bytes / (on - off));
    printf("\n");
    fflush(stdout);
}

uint32_t table_crc(const void *bulk, int64_t bytes);   /* in table.c */

/* Without an instruction for it a checksum is computed by tables. */
static void print_table(void) {
    const int64_t bytes = 1 << 24;
    uint8_t *bulk = (uint8_t *)malloc((size_t)bytes);
    double took[CHECKED_TIMES], t;
    uint32_t sum = 0;
    if (!bulk) return;
    memset(bulk, 0x5a, (size_t)bytes);
    for (int i = 0; i < CHECKED_TIMES; i++) {
        const double begin = processor_s();
        sum ^= table_crc(bulk, bytes);
        took[i] = processor_s() - begin;
    }
    t = quantile(took, CHECKED_TIMES, 0.5);
    printf("checksum by tables, %lld MiB%s %26.3f ms: %.1f GB/s\n", (long long)(bytes >> 20),
           sum == 1 ? "." : "", t * 1e3, 1e-9 * (double)bytes / t);
    free(bulk);
}

static void print_checksums(const char *words) {
    static const ra_engine nothing = { sizeof nothing, RA_ENGINE_ABI, 0, NULL, no_fold };
    (void)words;
    for (int alone = 0; alone < 2; alone++) {
        checked c;
        checked_open(&c, alone ? &nothing : NULL);
        print_checked(&c, alone ? "no work" : "forward", RA_PASS_FORWARD, alone);
        if (!alone) print_checked(&c, "backward", RA_PASS_BACKWARD, 0);
        for (int i = 0; i < 4; i++) (void)ra_ring_destroy(c.ring[i / 2][i % 2]);
        for (int i = 0; i < 2; i++) ra_world_destroy(c.world[i]);
        for (int i = 0; i < 2; i++) ra_plan_destroy(c.plan[i]);
        unmap_all();
    }
    print_table();
}

/* ---------------------------------------------------------------------------- first tokens
 * The attention of 8 layers of Llama 8B's shape, bf16, on 1, 2 and 4 ranks of two threads together
 * (4 ranks: of four): the time until a prompt is in the cache, in chunks of 256 tokens, and tokens
 * per second after it. The time of a chunk grows linearly with what is cached, so it is measured
 * with none, half and all of the prompt cached. The ranks are timed in turn, tokens eight at once,
 * so that all but the first find the keys where the one before left them. The shortest time of each
 * counts. */
enum { FIRST_LAYERS = 8, FIRST_CHUNK = 256, FIRST_RANKS = 3 };

static void print_first(int64_t prompt) {
    static cache_load all[FIRST_RANKS];
    double t[FIRST_RANKS][4], first[FIRST_RANKS], begin;
    const int64_t cached[4] = { 0, prompt / 2, prompt - FIRST_CHUNK, prompt - 1 };
    for (int p = 0; p < FIRST_RANKS; p++) {
        row r = cache_row(PREFILL, ra_isa_best(), RA_BF16, FIRST_CHUNK);
        r.kv_tokens = prompt;
        r.ranks = 1 << p;
        r.threads = p ? r.ranks : 2;
        const data x = data_make(&r);
        cache_make(&r, &x, NULL, &all[p]);
        if (all[p].status != RA_OK) failed_rows++;
        for (int i = 0; i < 4; i++) t[p][i] = 1e9;
    }
    begin = now_s();
    for (int n = 0; n < 9 && !failed_rows && (n < 2 || now_s() - begin < 20); n++)
        for (int i = 0; i < 4; i++)
            for (int p = 0; p < FIRST_RANKS; p++)
                for (int k = 0; k < (i < 3 ? 1 : 8); k++)
                    t[p][i] = fmin(t[p][i], cache_seconds(&all[p], p ? 1 << p : 2,
                                                          i < 3 ? FIRST_CHUNK : 1, cached[i]));
    for (int p = 0; p < FIRST_RANKS && !failed_rows; p++) {
        first[p] = (t[p][0] + 4 * t[p][1] + t[p][2]) / 6 * FIRST_LAYERS *
                   (double)(prompt / FIRST_CHUNK);
        printf("first prompt %6lld ranks %d: first token after %8.2f s, %.3f x one rank; %7.1f "
               "tokens/s, %.3f x\n", (long long)prompt, 1 << p, first[p], first[0] / first[p],
               1 / (FIRST_LAYERS * t[p][3]), t[0][3] / t[p][3]);
    }
    fflush(stdout);
    for (int p = 0; p < FIRST_RANKS; p++) cache_free(&all[p]);
    unmap_all();
}

static void print_firsts(const char *words) {
    const int64_t only = strtoll(words + strcspn(words, "0123456789"), NULL, 10);
    for (int64_t n = 2048; n <= 131072; n *= 4)
        if (!only || only == n) print_first(n);
}

/* ---------------------------------------------------------------------------- batches
 * A call that decodes one token of each of several sequences, 32/8 heads of 128, bf16, on one rank
 * of two threads and on 2, 4 and 8 ranks of one thread. The ranks are timed in turn, and the
 * shortest time of each counts. */
enum { BATCH_RANKS = 4 };
static void print_batches(const char *words) {
    static const int64_t keys[] = { 64, 256, 1024 };
    (void)words;
    for (int i = 0; i < 3; i++) {
        static cache_load all[BATCH_RANKS];
        double best[BATCH_RANKS] = { 1e9, 1e9, 1e9, 1e9 };
        for (int p = 0; p < BATCH_RANKS; p++) {
            row r = cache_row(CACHE, ra_isa_best(), RA_BF16, BATCH);
            ra_cache_desc cd;
            memset(&cd, 0, sizeof cd);
            cd.queries = RA_QUERIES_ALL;
            r.kv_tokens = keys[i];
            r.ranks = 1 << p;
            r.threads = p ? r.ranks : 2;
            const data x = data_make(&r);
            r.sequences = BATCH;
            r.tokens = 1;
            cache_make(&r, &x, &cd, &all[p]);
            all[p].calls = 20;
            if (all[p].status != RA_OK) failed_rows++;
        }
        for (int n = 0; n < 40 && !failed_rows; n++)
            for (int p = 0; p < BATCH_RANKS; p++) {
                const double t = pool_run(cache_part, &all[p], p ? 1 << p : 2) / all[p].calls;
                best[p] = t < best[p] ? t : best[p];
            }
        for (int p = 0; p < BATCH_RANKS && !failed_rows; p++)
            printf("batch %d sequences of 1 over %5lld keys ranks %d: %8.1f us, %.3f x one rank\n",
                   BATCH, (long long)keys[i], 1 << p, best[p] * 1e6, best[0] / best[p]);
        fflush(stdout);
        for (int p = 0; p < BATCH_RANKS; p++) {
            if (all[p].status != RA_OK) failed_rows++;
            cache_free(&all[p]);
        }
        unmap_all();
    }
}

/* What is printed after the rows. named: only if words begin with its name. */
static const struct section {
    const char *name, *what;
    void (*print)(const char *words);
    int named;
} sections[] = {
    { "plan", "seconds that plans take", print_plans, 0 },
    { "travel", "passing queries or keys over a cache; \"travel shared 2\"", print_travels, 0 },
    { "forms", "what it costs that bits depend on the row alone", print_forms, 0 },
    { "checksum", "CRC-32C, and what it costs a pass", print_checksums, 0 },
    { "batch", "one token of each of 16 short sequences, on ranks", print_batches, 0 },
    { "first", "time to first token and tokens per second, on ranks", print_firsts, 1 },
};
enum { SECTIONS = sizeof sections / sizeof sections[0] };

static int section_wanted(const struct section *x, const char *words) {
    return words[0] ? !strncmp(words, x->name, strlen(x->name)) : !x->named;
}

/* The names for ONLY=. */
static void print_kinds(void) {
    printf("rows:\n");
    for (int i = 0; i < KINDS; i++) printf("  %-10s %s\n", kinds[i].name, kinds[i].what);
    for (int i = 0; i < SECTIONS; i++) printf("  %-10s %s\n", sections[i].name, sections[i].what);
}

static int write_json(const char *path) {
    FILE *f = fopen(path, "w");
    int first = 1;
    if (!f) { fprintf(stderr, "cannot write %s\n", path); return -1; }
    fprintf(f, "[");
    for (int i = 0; i < row_count; i++) {
        const row *r = &rows[i];
        const result *x = &results[i];
        if (!x->done) continue;
        fprintf(f, "%s\n{\"name\": \"%s\", \"isa\": \"%s\", \"dtype\": \"%s\","
                " \"mask\": \"%s\",", first ? "" : ",", name_of(r), ra_isa_name(r->isa),
                dtype_text(r->dtype), mask_text(r));
        fprintf(f, " \"Dk\": %d, \"Dv\": %d, \"Tq\": %lld, \"Tk\": %lld, \"Hq\": %d,"
                " \"Hkv\": %d, \"apart\": %d,", (int)r->dim, (int)r->v_dim, (long long)r->tokens,
                (long long)r->kv_tokens, (int)r->q_heads, (int)r->kv_heads, (int)r->apart);
        fprintf(f, " \"threads\": %d, \"ranks\": %d, \"median_s\": %.9g, \"spread\": %.4f,",
                (int)r->threads, (int)r->ranks, x->median_s, x->spread);
        fprintf(f, " \"rate\": %.6g, \"unit\": \"%s\", \"peak\": %.6g, \"fraction\": %.4f}",
                x->rate / 1e9, x->unit, x->peak / 1e9, x->fraction);
        first = 0;
    }
    fprintf(f, "\n]\n");
    return fclose(f);
}

/* ---------------------------------------------------------------------------- tables
 * The tables of bench/README.md for this machine, in Markdown. A cell is a row of the list, if that
 * row was run. */
static const result *result_of(const row *w) {
    for (int i = 0; i < row_count; i++) {
        const row *r = &rows[i];
        if (results[i].done && r->kind == w->kind && r->isa == w->isa && r->dtype == w->dtype &&
            r->mask == w->mask && r->mask_more == w->mask_more && r->dim == w->dim &&
            r->q_heads == w->q_heads && r->kv_heads == w->kv_heads && r->tokens == w->tokens &&
            r->kv_tokens == w->kv_tokens && r->threads == w->threads && r->ranks == w->ranks &&
            r->apart == w->apart)
            return &results[i];
    }
    return NULL;
}

static void table_head(FILE *f, const char *title, const char *columns) {
    int n = 1;
    for (const char *c = columns; *c; c++) n += *c == '|';
    fprintf(f, "\n%s\n\n| | %s |\n|", title, columns);
    for (int i = 0; i <= n; i++) fprintf(f, "---|");
    fprintf(f, "\n");
}

static void rate_cell(FILE *f, const row *r) {
    const result *x = result_of(r);
    if (x) fprintf(f, " %.0f (%.0f %%) |", x->rate / 1e9, x->fraction * 100);
    else fprintf(f, " |");
}

static void relative_cell(FILE *f, const row *r) {
    const result *x = result_of(r);
    if (!x) fprintf(f, " |");
    else fprintf(f, " %.2f |", r->versus == VERSUS_ONE_QUERY ? 1 / x->relative : x->relative);
}

static void square_line(FILE *f, const char *name, int32_t kind, int32_t isa, int32_t dtype) {
    if (!ra_isa_available(isa)) return;
    fprintf(f, "| %s |", name);
    for (int i = 0; i < 4; i++) {
        const row r = row_make(kind, isa, dtype, i < 2 ? RA_MASK_NONE : RA_MASK_CAUSAL,
                               i % 2 ? 128 : 64, 4096);
        rate_cell(f, &r);
    }
    fprintf(f, "\n");
}

static void square_tables(FILE *f) {
    const int32_t f32 = best_f32(), best = ra_isa_best();
    const char *columns = "full, D 64 | full, D 128 | causal, D 64 | causal, D 128";
    table_head(f, "Prefill, 4096 tokens, 8 heads, one thread, GFLOP/s (of peak)", columns);
    square_line(f, "f32", FORWARD, f32, RA_F32);
    if (f32 == RA_ISA_AVX512) square_line(f, "f32, by AVX2", FORWARD, RA_ISA_AVX2, RA_F32);
    square_line(f, "f16 in memory", FORWARD, f32, RA_F16);
    square_line(f, "bf16 in memory", FORWARD, f32, RA_BF16);
    square_line(f, "q8_0 in memory", FORWARD, f32, RA_Q8_0);
    square_line(f, "q4_0 in memory", FORWARD, f32, RA_Q4_0);
    if (bf16_isa(best)) square_line(f, "q8_0 by integers", FORWARD, best, RA_Q8_0);
    if (bf16_isa(best)) square_line(f, "q4_0 by integers", FORWARD, best, RA_Q4_0);
    if (bf16_isa(best)) square_line(f, "bf16 products", FORWARD, best, RA_BF16);
    for (int32_t dtype = RA_F32; dtype <= RA_Q4_0 && bf16_isa(best); dtype++) {
        char name[48];
        snprintf(name, sizeof name, "RA_ARITH_BF16, f32 over %s", dtype_text(dtype));
        square_line(f, name, ARITH, best, dtype);
    }
    table_head(f, "Gradients, the same", columns);
    square_line(f, "f32", BACKWARD, f32, RA_F32);
    if (f32 == RA_ISA_AVX512) square_line(f, "f32, by AVX2", BACKWARD, RA_ISA_AVX2, RA_F32);
    if (bf16_isa(best)) square_line(f, "bf16 products", BACKWARD, best, RA_BF16);
}

static void decode_tables(FILE *f) {
    table_head(f, "Decoding one token over 32768 keys, 32/8 heads, D 128: GB/s of keys and values "
               "(of a loop that only reads them)",
               "ms, one thread | one thread | heads apart | two threads | heads apart");
    for (int32_t dtype = RA_F32; dtype <= RA_Q4_0; dtype++) {
        row r = cache_row(DECODE, dtype >= RA_BF16 ? ra_isa_best() : best_f32(), dtype, 1);
        const result *x = result_of(&r);
        fprintf(f, "| %s |", dtype_text(dtype));
        if (x) fprintf(f, " %.1f |", x->median_s * 1e3);
        else fprintf(f, " |");
        for (int i = 0; i < 4; i++) {
            r.threads = 1 + i / 2;
            r.apart = i % 2;
            rate_cell(f, &r);
        }
        fprintf(f, "\n");
    }
    table_head(f, "More query rows over the same keys, one thread: time relative to one row",
               "2 | 4 | 8 | 16 | 32");
    for (int i = 0; i < 2; i++) {
        fprintf(f, "| %s |", i ? "bf16" : "f32");
        for (int64_t n = 2; n <= 32; n *= 2) {
            row r = cache_row(SHORT, i ? ra_isa_best() : best_f32(), i ? RA_BF16 : RA_F32, n);
            r.versus = VERSUS_ONE_QUERY;
            relative_cell(f, &r);
        }
        fprintf(f, "\n");
    }
}

static void small_table(FILE *f) {
    table_head(f, "Short calls: one row per KV head, f32, speed relative to a plain loop by "
               "`gcc -Ofast -march=native`",
               "16 keys | 32 | 64 | 128 | 256 | 1024");
    for (int i = 0; i < 6; i++) {
        static const int64_t keys[6] = { 16, 32, 64, 128, 256, 1024 };
        static const int32_t heads[3] = { 8, 12, 32 };
        fprintf(f, "| %d heads, D %d |", (int)heads[i % 3], i < 3 ? 64 : 128);
        for (int k = 0; k < 6; k++) {
            row r = row_make(SMALL, best_f32(), RA_F32, RA_MASK_CAUSAL, i < 3 ? 64 : 128, 1);
            r.q_heads = r.kv_heads = heads[i % 3];
            r.kv_tokens = keys[k];
            relative_cell(f, &r);
        }
        fprintf(f, "\n");
    }
}

static void rank_tables(FILE *f) {
    table_head(f, "Rings of threads, speed relative to one rank with as many threads, 8192 tokens, "
               "4 heads, D 128",
               "full, 2 ranks | 4 ranks | causal, 2 ranks | 4 ranks");
    for (int i = 0; i < 1 + bf16_isa(ra_isa_best()); i++) {
        fprintf(f, "| %s |", i ? "bf16 products" : "f32");
        for (int c = 0; c < 4; c++) {
            row r = row_make(RING, i ? ra_isa_best() : best_f32(), i ? RA_BF16 : RA_F32,
                             c < 2 ? RA_MASK_NONE : RA_MASK_CAUSAL, 128, 8192);
            r.q_heads = r.kv_heads = 4;
            r.threads = MAX_THREADS;
            r.ranks = c % 2 ? 4 : 2;
            relative_cell(f, &r);
        }
        fprintf(f, "\n");
    }
    table_head(f, "A KV cache over threads, 32/8 heads, D 128, f16, time (speed relative to one "
               "rank with as many threads)",
               "1 rank | 2 ranks | 4 ranks");
    for (int i = 0; i < 3; i++) {
        static const char *const what[3] = { "a token over 64", "a token over 32768",
                                             "512 of a prompt, 4096 in all" };
        fprintf(f, "| %s |", what[i]);
        for (int32_t ranks = 1; ranks <= 4; ranks *= 2) {
            row r = cache_row(i < 2 ? CACHE : PREFILL, best_f32(), RA_F16, i < 2 ? 1 : 512);
            r.kv_tokens = i == 0 ? 64 : i == 1 ? 32768 : 4096;
            r.ranks = ranks;
            r.threads = ranks < 2 ? 2 : ranks;
            const result *x = result_of(&r);
            if (x) fprintf(f, " %.3f ms (%.2f) |", x->median_s * 1e3, x->relative);
            else fprintf(f, " |");
        }
        fprintf(f, "\n");
    }
}

static int write_tables(const char *path) {
    FILE *f = fopen(path, "w");
    if (!f) { fprintf(stderr, "cannot write %s\n", path); return -1; }
    square_tables(f);
    decode_tables(f);
    small_table(f);
    rank_tables(f);
    return fclose(f);
}

/* On a terminal: the row that is running and the time that the rest will take. */
static void progress(int done, double begin) {
    if (!isatty(STDERR_FILENO)) return;
    if (done == row_count) fprintf(stderr, "\r%40s\r", "");
    else if (done == 0) fprintf(stderr, "\r[1/%d]", row_count);
    else fprintf(stderr, "\r[%d/%d] about %.0f s left ", done + 1, row_count,
                 (now_s() - begin) / done * (row_count - done));
    fflush(stderr);
}

static void clear_progress(void) {
    if (isatty(STDERR_FILENO)) fprintf(stderr, "\r%40s\r", "");
}

int main(int argc, char **argv) {
    char all[512] = "";
    const char *json = "build/bench.json", *tables = NULL, *words;
    int large = 0, kept = 0, more = 0;
    double begin;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--json") == 0 && i + 1 < argc) json = argv[++i];
        else if (strcmp(argv[i], "--tables") == 0 && i + 1 < argc) tables = argv[++i];
        else if (strcmp(argv[i], "--chunk") == 0 && i + 1 < argc) chunk_tokens = atoi(argv[++i]);
        else if (strcmp(argv[i], "--long") == 0) large = 1;
        else if (strcmp(argv[i], "--processor-time") == 0) processor_time = 1;
        else if (strcmp(argv[i], "--only") != 0) {
            strncat(all, " ", sizeof all - strlen(all) - 1);
            strncat(all, argv[i], sizeof all - strlen(all) - 1);
        }
    }
    words = all + strspn(all, " ");
    if (strcmp(words, "help") == 0) { print_kinds(); return 0; }
    add_all(large);
    for (int i = 0; i < row_count; i++) {
        if (wanted(&rows[i], words)) rows[kept++] = rows[i];
    }
    row_count = kept;
    for (int i = 0; i < SECTIONS; i++) more += section_wanted(&sections[i], words);
    if (pool_start() != 0) { fprintf(stderr, "cannot start threads\n"); return 1; }
    print_machine();
    print_peaks();
    for (int i = 0; i < row_count; i++) {
        if (rows[i].kind == DECODE) { print_read_peak(); break; }
    }
    print_header();
    begin = now_s();
    hurry = begin + (large ? 1e9 : 170);
    for (int i = 0; i < row_count; i++) {
        progress(i, begin);
        run_row(&rows[i], &results[i]);
        clear_progress();
        if (results[i].done) print_row(&rows[i], &results[i]);
    }
    printf("%d rows in %.0f s%s\n", row_count, now_s() - begin,
           row_count || more ? "" : ": nothing matches, try ONLY=help");
    for (int i = 0; i < SECTIONS; i++)
        if (section_wanted(&sections[i], words)) sections[i].print(words);
    if (runs_disturbed * 20 > runs_in_all) {
        printf("Other programs disturbed %d of %d timed runs: do not trust the figures above.\n",
               runs_disturbed, runs_in_all);
    }
    if (write_json(json) != 0) return 1;
    if (tables && write_tables(tables) != 0) return 1;
    return failed_rows != 0 || (row_count == 0 && !more);
}
