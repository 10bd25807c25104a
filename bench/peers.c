/* The library as a shared object for bench/peers.py, which compares it with other libraries.
 *
 *   cc -O2 -shared -fPIC -I. bench/peers.c -o build/release/bench/peers.so -lpthread
 *
 * A call is made once from a shape and addresses and then run any number of times, on threads that
 * wait for work between calls, as in the other libraries. Tensors are [H][T][D], as in PyTorch and
 * OpenVINO. */
#define _POSIX_C_SOURCE 200112L         /* posix_memalign */
#include <stdlib.h>

#define RINGATTN_IMPLEMENTATION
#include "ringattn.h"

enum { MAX_THREADS = 8 };

/* Fields of `shape` and of `data`, by index: bench/peers.py has the same lists. */
enum { S_DTYPE, S_CAUSAL, S_TQ, S_TK, S_HQ, S_HKV, S_DIM, S_THREADS, S_BACKWARD };
enum { P_Q, P_K, P_V, P_O, P_LSE, P_DO, P_DQ, P_DK, P_DV };

typedef struct peers_call {
    ra_desc d;
    ra_tensors t;
    ra_error error;
    void *workspace;
    size_t bytes;
    int threads, backward;
    ra_status status;
} peers_call;

peers_call *peers_create(const int64_t *shape, void *const *data);
int peers_run(peers_call *c);
const char *peers_error(const peers_call *c);
const char *peers_isa(void);
void peers_destroy(peers_call *c);

/* ---------------------------------------------------------------------------- threads */
static struct {
    pthread_mutex_t lock;
    pthread_cond_t wake;
    int started, turn, nth, done;
    peers_call *call;
} pool = { PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, 0, 0, 0, 0, NULL };

static void part(peers_call *c, int ith) {
    const ra_status s = c->backward
        ? ra_attention_backward(&c->d, &c->t, c->workspace, c->bytes, ith, c->threads)
        : ra_attention(&c->d, &c->t, c->workspace, c->bytes, ith, c->threads);
    if (s != RA_OK) __atomic_store_n(&c->status, s, __ATOMIC_RELAXED);
}

static void *worker(void *arg) {
    const int ith = (int)(intptr_t)arg;
    int turn = 0;
    for (;;) {
        peers_call *c;
        pthread_mutex_lock(&pool.lock);
        while (pool.turn == turn) pthread_cond_wait(&pool.wake, &pool.lock);
        turn = pool.turn;
        c = ith < pool.nth ? pool.call : NULL;
        pthread_mutex_unlock(&pool.lock);
        if (!c) continue;
        part(c, ith);
        __atomic_add_fetch(&pool.done, 1, __ATOMIC_ACQ_REL);
    }
    return NULL;
}

static int start_threads(int nth) {
    for (; pool.started < nth; pool.started++) {
        pthread_t thread;
        if (pool.started > 0) {        /* number 0 is the caller */
            void *arg = (void *)(intptr_t)pool.started;
            if (pthread_create(&thread, NULL, worker, arg) != 0) return -1;
            pthread_detach(thread);
        }
    }
    return 0;
}

/* 0, or the library's status. */
int peers_run(peers_call *c) {
    c->status = RA_OK;
    if (c->threads > 1) {
        pthread_mutex_lock(&pool.lock);
        pool.call = c;
        pool.nth = c->threads;
        pool.done = 0;
        pool.turn++;
        pthread_cond_broadcast(&pool.wake);
        pthread_mutex_unlock(&pool.lock);
    }
    part(c, 0);
    if (c->threads > 1) {
        while (__atomic_load_n(&pool.done, __ATOMIC_ACQUIRE) != c->threads - 1) sched_yield();
    }
    return c->status;
}

/* ---------------------------------------------------------------------------- calls */
static ra_in view(const void *data, int64_t row_bytes, int64_t rows) {
    ra_in x;
    x.data = data;
    x.token_stride = row_bytes;
    x.head_stride = row_bytes * rows;
    x.batch_stride = 0;
    return x;
}

static ra_out view_out(void *data, int64_t row_bytes, int64_t rows) {
    const ra_in in = view(data, row_bytes, rows);
    ra_out x;
    x.data = data;
    x.token_stride = in.token_stride;
    x.head_stride = in.head_stride;
    x.batch_stride = 0;
    return x;
}

/* By S_DTYPE: f32, bf16, and caches with queries in f32. */
static const int32_t cache_dtype[] = { RA_F32, RA_BF16, RA_F16, RA_Q8_0 };

static void set_desc(ra_desc *d, const int64_t *shape) {
    d->tokens = shape[S_TQ];
    d->kv_tokens = shape[S_TK];
    d->q_heads = (int32_t)shape[S_HQ];
    d->kv_heads = (int32_t)shape[S_HKV];
    d->k_dim = d->v_dim = (int32_t)shape[S_DIM];
    d->q_dtype = d->o_dtype = shape[S_DTYPE] == 1 ? RA_BF16 : RA_F32;
    d->k_dtype = d->v_dtype = cache_dtype[shape[S_DTYPE]];
    d->mask.kind = shape[S_CAUSAL] ? RA_MASK_CAUSAL : RA_MASK_NONE;
    d->q_offset = shape[S_CAUSAL] ? shape[S_TK] - shape[S_TQ] : 0;
    d->threads = (int32_t)shape[S_THREADS];
}

/* data[P_LSE]: null, or from a call that keeps it, as backward needs it. P_DO and the following are
 * for backward only. Returns null if out of memory. */
peers_call *peers_create(const int64_t *shape, void *const *data) {
    const int64_t row = shape[S_DIM] * (shape[S_DTYPE] == 1 ? 2 : 4);
    const int64_t key = shape[S_DTYPE] == 3 ? shape[S_DIM] / 32 * 34
                                            : shape[S_DIM] * (shape[S_DTYPE] ? 2 : 4);
    const int64_t tq = shape[S_TQ], tk = shape[S_TK];
    peers_call *c = (peers_call *)calloc(1, sizeof *c);
    if (!c || start_threads((int)shape[S_THREADS]) != 0) return NULL;
    set_desc(&c->d, shape);
    c->d.error = &c->error;
    c->threads = (int)shape[S_THREADS];
    c->t.q = view(data[P_Q], row, tq);
    c->t.k = view(data[P_K], key, tk);
    c->t.v = view(data[P_V], key, tk);
    c->t.o = view_out(data[P_O], row, tq);
    if (data[P_LSE]) {
        c->t.lse = view_out(data[P_LSE], 4, tq);
        c->d.train = 1;
        c->d.grad_dtype = c->d.o_dtype;
    }
    c->backward = shape[S_BACKWARD] != 0;
    if (c->backward) {
        c->t.d_o = view(data[P_DO], row, tq);
        c->t.d_q = view_out(data[P_DQ], row, tq);
        c->t.d_k = view_out(data[P_DK], key, tk);
        c->t.d_v = view_out(data[P_DV], key, tk);
    }
    c->bytes = c->backward ? ra_attention_backward_bytes(&c->d, c->threads)
                           : ra_attention_bytes(&c->d, c->threads);
    if (c->bytes && posix_memalign(&c->workspace, 64, c->bytes) != 0) return NULL;
    return c;
}

void peers_destroy(peers_call *c) {
    if (c) free(c->workspace);
    free(c);
}

const char *peers_error(const peers_call *c) { return c->error.text; }

const char *peers_isa(void) { return ra_isa_name(ra_isa_best()); }
