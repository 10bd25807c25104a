/* Attention on the threads that an engine already has: a custom op of ggml, an OpenMP region, and a
 * pool of pthreads, each for one rank, for a rank of a ring and for one of a sharded cache. The
 * library starts no thread here. You will see that each gives the bits of one thread, and what
 * happens with more threads than were planned. Exits with 1 if something differs.
 *
 *   cc -O2 -pthread -I. -o engine_threads examples/engine_threads.c -lm && ./engine_threads
 *
 * with -fopenmp for the OpenMP part. */
#define _POSIX_C_SOURCE 200809L
#define RINGATTN_IMPLEMENTATION
#include "ringattn.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif

enum { THREADS = 4, TOKENS = 300, HEADS = 8, KV_HEADS = 2, DIM = 64 };

static float q[TOKENS][HEADS][DIM], k[TOKENS][KV_HEADS][DIM], v[TOKENS][KV_HEADS][DIM];
static float o[TOKENS][HEADS][DIM], one_thread[TOKENS][HEADS][DIM];

/* What all threads of a call share. Each thread reports in its own entry. */
typedef struct call {
    ra_desc d;
    ra_tensors t;
    void *workspace;                   /* of ra_attention */
    size_t bytes;
    const ra_plan *plan;               /* of a ring */
    ra_ring *ring;
    ra_cache *cache;                   /* of inference, split over ranks: here one */
    uint64_t ticket;                   /* a number for each pass, from 1: a layer of a step */
    ra_status status[THREADS];
} call;

/* One rank: nth must be the number of threads that make the call. Otherwise part of the output is
 * missing, which only the next call with this workspace can detect. */
static void attend(call *c, int ith, int nth) {
    c->status[ith] = ra_attention(&c->d, &c->t, c->workspace, c->bytes, ith, nth);
}

/* A rank of a ring: every thread passes the same job, and calls again until the pass is done. */
static void attend_in_ring(call *c, int ith, int nth) {
    ra_job job;
    ra_status s;
    (void)nth;                         /* a ring needs no count: every thread that calls computes */
    memset(&job, 0, sizeof job);
    job.ticket = c->ticket;
    job.plan = c->plan;
    job.tensors = &c->t;
    while ((s = ra_join(c->ring, &job, ith)) > 0)
        if (s == RA_WAIT) (void)ra_step_wait(c->ring, RA_NO_DEADLINE);
    c->status[ith] = s;
}

/* A rank of a cache, the same way: TOKENS new tokens, and none cached before. */
static const int64_t cached[1] = { 0 }, fresh[1] = { TOKENS };
static void attend_in_cache(call *c, int ith, int nth) {
    ra_infer_job job;
    ra_status s;
    (void)nth;
    memset(&job, 0, sizeof job);
    job.ticket = c->ticket;
    job.tensors = &c->t;
    job.cached = cached;
    job.fresh = fresh;
    while ((s = ra_infer_join(c->cache, &job, ith)) > 0) {}    /* RA_WAIT: or do other work */
    c->status[ith] = s;
}

static void attend_any(call *c, int ith, int nth) {
    if (c->cache) attend_in_cache(c, ith, nth);
    else if (c->ring) attend_in_ring(c, ith, nth);
    else attend(c, ith, nth);
}

/* -------------------------------------------------------------------------- ggml
 * ggml_map_custom1(ctx, a, fn, n_tasks, userdata) calls fn on every thread of the graph, with a
 * barrier after it. What follows mimics ggml: its tensor, the type of fn, and n_tasks threads. */
typedef struct tensor { void *data; int64_t ne[4]; size_t nb[4]; } tensor;
typedef void (*custom1)(tensor *dst, const tensor *a, int ith, int nth, void *userdata);

/* The op. With ne {D, T, H, B} nb[1] is the bytes from token to token and nb[2] those from head to
 * head, in any order of memory. All threads run this, so what they share is set up before the graph
 * runs. */
static void attention_op(tensor *dst, const tensor *a, int ith, int nth, void *userdata) {
    (void)dst, (void)a;
    attend_any((call *)userdata, ith, nth);
}

static void set_views(call *c, const tensor *a, tensor *dst) {
    c->t.q.data = a->data;
    c->t.q.token_stride = (int64_t)a->nb[1];
    c->t.q.head_stride = (int64_t)a->nb[2];
    c->t.q.batch_stride = (int64_t)a->nb[3];
    c->t.o.data = dst->data;
    c->t.o.token_stride = (int64_t)dst->nb[1];
    c->t.o.head_stride = (int64_t)dst->nb[2];
    c->t.o.batch_stride = (int64_t)dst->nb[3];
}

typedef struct task {
    custom1 fn;
    tensor *dst;
    const tensor *a;
    int ith, nth;
    void *userdata;
} task;

static void *task_main(void *arg) {
    task *x = (task *)arg;
    x->fn(x->dst, x->a, x->ith, x->nth, x->userdata);
    return NULL;
}

static void compute_graph(tensor *dst, const tensor *a, custom1 fn, int n_tasks, void *userdata) {
    pthread_t thread[THREADS];
    task x[THREADS];
    for (int i = 0; i < n_tasks; i++) {
        x[i].fn = fn; x[i].dst = dst; x[i].a = a; x[i].userdata = userdata;
        x[i].ith = i; x[i].nth = n_tasks;
        if (i && pthread_create(&thread[i], NULL, task_main, &x[i])) exit(1);
    }
    (void)task_main(&x[0]);
    for (int i = 1; i < n_tasks; i++) pthread_join(thread[i], NULL);
}

static void with_ggml(call *c) {
    tensor a = { q, { DIM, TOKENS, HEADS, 1 }, { 4, HEADS * DIM * 4, DIM * 4, sizeof q } };
    tensor dst = { o, { DIM, TOKENS, HEADS, 1 }, { 4, HEADS * DIM * 4, DIM * 4, sizeof o } };
    set_views(c, &a, &dst);
    compute_graph(&dst, &a, attention_op, THREADS, c);
}

/* -------------------------------------------------------------------------- OpenMP
 * The region may have fewer threads than were requested, so nth is read inside it. */
static void with_openmp(call *c) {
#ifdef _OPENMP
#pragma omp parallel num_threads(THREADS)
    {
        attend_any(c, omp_get_thread_num(), omp_get_num_threads());
    }
#else
    (void)c;
#endif
}

/* -------------------------------------------------------------------------- a pool of pthreads
 * A main thread and workers that wait for a function. With a main thread a ring needs no tickets:
 * ra_begin on it, then ra_step on any thread. */
typedef struct pool {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    void (*fn)(call *c, int ith, int nth);
    call *c;
    int round, busy, over;
} pool;
typedef struct worker { pool *p; int ith; } worker;

static void *worker_main(void *arg) {
    const worker *w = (const worker *)arg;
    pool *p = w->p;
    int round = 0;
    for (;;) {
        pthread_mutex_lock(&p->lock);
        while (p->round == round && !p->over) pthread_cond_wait(&p->changed, &p->lock);
        round = p->round;
        const int over = p->over;
        pthread_mutex_unlock(&p->lock);
        if (over) return NULL;
        p->fn(p->c, w->ith, THREADS);
        pthread_mutex_lock(&p->lock);
        if (--p->busy == 0) pthread_cond_broadcast(&p->changed);
        pthread_mutex_unlock(&p->lock);
    }
}

static void pool_run(pool *p, void (*fn)(call *c, int ith, int nth), call *c) {
    pthread_mutex_lock(&p->lock);
    p->fn = fn;
    p->c = c;
    p->busy = THREADS - 1;
    p->round++;
    pthread_cond_broadcast(&p->changed);
    pthread_mutex_unlock(&p->lock);
    fn(c, 0, THREADS);
    pthread_mutex_lock(&p->lock);
    while (p->busy) pthread_cond_wait(&p->changed, &p->lock);
    pthread_mutex_unlock(&p->lock);
}

static void step_ring(call *c, int ith, int nth) {
    ra_status s;
    (void)nth;
    while ((s = ra_step(c->ring, ith)) > 0)
        if (s == RA_WAIT) (void)ra_step_wait(c->ring, RA_NO_DEADLINE);
    c->status[ith] = s;
}

static void with_pool(call *c) {
    pthread_t thread[THREADS];
    worker w[THREADS];
    pool p;
    ra_job job;
    memset(&p, 0, sizeof p);
    pthread_mutex_init(&p.lock, NULL);
    pthread_cond_init(&p.changed, NULL);
    for (int i = 1; i < THREADS; i++) {
        w[i].p = &p;
        w[i].ith = i;
        if (pthread_create(&thread[i], NULL, worker_main, &w[i])) exit(1);
    }
    memset(&job, 0, sizeof job);
    job.plan = c->plan;
    job.tensors = &c->t;
    if (!c->ring) pool_run(&p, attend_any, c);
    else if (ra_begin(c->ring, &job) == RA_OK) pool_run(&p, step_ring, c);
    pthread_mutex_lock(&p.lock);
    p.over = 1;
    pthread_cond_broadcast(&p.changed);
    pthread_mutex_unlock(&p.lock);
    for (int i = 1; i < THREADS; i++) pthread_join(thread[i], NULL);
    pthread_cond_destroy(&p.changed);
    pthread_mutex_destroy(&p.lock);
}

/* -------------------------------------------------------------------------- all of them */
/* Clears the output, runs `with`, and compares. */
static int tried(const char *what, void (*with)(call *c), call *c) {
    int bad = 0;
    memset(o, 0xFF, sizeof o);
    for (int i = 0; i < THREADS; i++) c->status[i] = RA_E_STATE;
    with(c);
    for (int i = 0; i < THREADS; i++) bad |= c->status[i] != RA_OK;
    if (bad) printf("%s: %s\n", what, ra_status_text(c->status[0] ? c->status[0] : c->status[1]));
    bad |= memcmp(o, one_thread, sizeof o) != 0;
    printf("%-44s %s\n", what, bad ? "not the bits of one thread" : "the bits of one thread");
    return bad;
}

static int all_three(call *c, const char *where) {
    char what[80];
    int bad = 0;
    snprintf(what, sizeof what, "%d threads of ggml, %s", THREADS, where);
    bad |= tried(what, with_ggml, c);
    c->ticket++;
#ifdef _OPENMP
    if (omp_get_thread_limit() >= THREADS) {
        snprintf(what, sizeof what, "%d threads of OpenMP, %s", THREADS, where);
        omp_set_dynamic(0);
        bad |= tried(what, with_openmp, c);
        c->ticket++;
    }
#else
    (void)with_openmp;
#endif
    snprintf(what, sizeof what, "%d threads of a pool, %s", THREADS, where);
    return bad | tried(what, with_pool, c);
}

/* `planned` 0 is the default of one thread: the others find no work, and the result is the same. */
static int in_a_ring(call *c, int32_t planned, const char *where) {
    ra_plan *plan = NULL;
    int bad;
    c->d.threads = planned;
    if (ra_plan_create(&plan, &c->d, NULL) || ra_ring_create(&c->ring, plan, NULL, NULL)) return 1;
    c->plan = plan;
    c->ticket = 1;
    bad = all_three(c, where);
    bad |= ra_ring_destroy(c->ring) != RA_OK;
    ra_plan_destroy(plan);
    c->ring = NULL;
    return bad;
}

/* d.tokens new tokens at a time, d.kv_tokens in all. */
static int in_a_cache(call *c) {
    ra_tensors kept = c->t;
    int bad = 0;
    c->d.threads = THREADS;
    c->d.kv_tokens = TOKENS;
    if (ra_cache_create(&c->cache, &c->d, NULL, NULL)) return 1;
    const size_t bytes = (size_t)ra_cache_rows(c->cache) * KV_HEADS * DIM * sizeof(float);
    void *memory[2] = { malloc(bytes), malloc(bytes) };
    c->t.k.data = memory[0];
    c->t.v.data = memory[1];
    for (int i = 0; i < TOKENS; i++)
        bad |= ra_cache_store(c->cache, &c->t, 0, i, k[i][0], v[i][0]) != RA_OK;
    c->ticket = 1;
    c->t.o.data = one_thread;          /* a cache adds up keys in an order of its own */
    if (!bad) bad = ra_infer(c->cache, &c->t, cached, fresh, RA_NO_DEADLINE) != RA_OK;
    c->t.o.data = o;
    if (!bad) bad = all_three(c, "a cache");
    bad |= ra_cache_destroy(c->cache) != RA_OK;
    c->cache = NULL;
    c->t = kept;
    free(memory[0]);
    free(memory[1]);
    return bad;
}

static void fill(float *x, size_t n, uint32_t seed) {
    for (size_t i = 0; i < n; i++) {
        seed = seed * 1664525u + 1013904223u;
        x[i] = (float)(seed >> 8) / 8388608 - 1;
    }
}

int main(void) {
    static call c;
    void *raw;
    int bad;
    fill(&q[0][0][0], TOKENS * HEADS * DIM, 1);
    fill(&k[0][0][0], TOKENS * KV_HEADS * DIM, 2);
    fill(&v[0][0][0], TOKENS * KV_HEADS * DIM, 3);
    c.d.tokens = TOKENS; c.d.q_heads = HEADS; c.d.kv_heads = KV_HEADS; c.d.k_dim = c.d.v_dim = DIM;
    c.d.q_dtype = c.d.k_dtype = c.d.v_dtype = c.d.o_dtype = RA_F32;
    c.d.mask.kind = RA_MASK_CAUSAL;
    c.t.q.data = q; c.t.k.data = k; c.t.v.data = v; c.t.o.data = one_thread;
    if (ra_attention(&c.d, &c.t, NULL, 0, 0, 1)) return 1;
    c.t.o.data = o;
    for (int nth = 1; nth <= THREADS; nth++) {         /* a region may have fewer threads */
        const size_t bytes = ra_attention_bytes(&c.d, nth);
        if (bytes > c.bytes) c.bytes = bytes;
    }
    raw = malloc(c.bytes + 64);
    if (!raw) return 1;
    c.workspace = (void *)(((uintptr_t)raw + 63) & ~(uintptr_t)63);
    bad = all_three(&c, "one rank");
    bad |= in_a_ring(&c, THREADS, "a ring");
    bad |= in_a_ring(&c, 0, "a ring planned for one");
    bad |= in_a_cache(&c);
    free(raw);
    return bad;
}
