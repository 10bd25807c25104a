/* y = W x for rows of x, with W as the file stores it, on a pool of
 * threads that all ranks of the process share. Sums are f32, and an element of y has the same bits
 * whatever other rows are in the call: every tile below sums in one order. The kernel is one body
 * in vectors of the compiler, included once for each instruction set. */
#if !defined(INFER_MATMUL_BODY)
#if !defined(INFER_MATMUL_H)
#define INFER_MATMUL_H

#include "gguf.h"

#include <pthread.h>

/* -------------------------------------------------------------------------- pool
 * A rank puts its work into a list, and also computes pieces of it; the pool's threads take pieces
 * of any work in the list. So ranks that compute at the same time share the threads, and a rank
 * that computes alone has all of them. */
typedef struct pool_job {
    void (*run)(void *ctx, int64_t piece);
    void *ctx;
    int64_t next, pieces, busy;        /* the first free piece; pieces that are being computed */
    struct pool_job *after;
} pool_job;

typedef struct pool {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    pool_job *first;
    pthread_t *thread;
    int threads, over;                 /* how many threads beside the callers; 1: they must end */
} pool;

/* Computes pieces of this job while there are any. The lock is held before and after. */
static inline void pool_take(pool *p, pool_job *job) {
    while (job->next < job->pieces) {
        const int64_t piece = job->next++;
        job->busy++;
        pthread_mutex_unlock(&p->lock);
        job->run(job->ctx, piece);
        pthread_mutex_lock(&p->lock);
        job->busy--;
    }
}

static inline void *pool_main(void *arg) {
    pool *p = (pool *)arg;
    pool_job *job;
    pthread_mutex_lock(&p->lock);
    while (!p->over) {
        for (job = p->first; job && job->next == job->pieces; job = job->after) {}
        if (!job) {
            pthread_cond_wait(&p->changed, &p->lock);
            continue;
        }
        pool_take(p, job);
        pthread_cond_broadcast(&p->changed);
    }
    pthread_mutex_unlock(&p->lock);
    return NULL;
}

static inline void pool_run(pool *p, void (*run)(void *ctx, int64_t piece), void *ctx,
                            int64_t pieces) {
    pool_job job, **at;
    if (p->threads == 0 || pieces < 2) {
        for (int64_t i = 0; i < pieces; i++) run(ctx, i);
        return;
    }
    memset(&job, 0, sizeof job);
    job.run = run;
    job.ctx = ctx;
    job.pieces = pieces;
    pthread_mutex_lock(&p->lock);
    job.after = p->first;
    p->first = &job;
    pthread_cond_broadcast(&p->changed);
    pool_take(p, &job);
    while (job.busy) pthread_cond_wait(&p->changed, &p->lock);
    for (at = &p->first; *at != &job; at = &(*at)->after) {}
    *at = job.after;
    pthread_mutex_unlock(&p->lock);
}

static inline void pool_stop(pool *p) {
    pthread_mutex_lock(&p->lock);
    p->over = 1;
    pthread_cond_broadcast(&p->changed);
    pthread_mutex_unlock(&p->lock);
    for (int i = 0; i < p->threads; i++) pthread_join(p->thread[i], NULL);
    pthread_cond_destroy(&p->changed);
    pthread_mutex_destroy(&p->lock);
    free(p->thread);
}

/* threads: beside those that call pool_run. If the system starts fewer, the pool has fewer. */
static inline void pool_start(pool *p, int threads) {
    memset(p, 0, sizeof *p);
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->changed, NULL);
    p->thread = (pthread_t *)calloc((size_t)threads + 1, sizeof *p->thread);
    while (p->thread && p->threads < threads &&
           !pthread_create(&p->thread[p->threads], NULL, pool_main, p))
        p->threads++;
}

/* -------------------------------------------------------------------------- the product */
typedef struct matrix {                /* [rows][columns] in a file */
    const uint8_t *data;
    int64_t rows, columns;
    int32_t dtype;
} matrix;

enum { MATMUL_ROWS = 4, MATMUL_TOKENS = 4 };   /* of a tile */

typedef struct matmul {
    const matrix *w;
    const float *x;                    /* [tokens][w->columns] */
    float *y;                          /* [tokens][w->rows] */
    int64_t tokens;
    int64_t piece;                     /* rows of one piece of the work, whole tiles */
    float *wide;                       /* [pieces][MATMUL_ROWS][w->columns] where W is not f32 */
} matmul;

static inline float matmul_of_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

/* Half to float without a branch: the exponent moves by a product with 2^112, which also makes
 * halves below 2^-14 normal; what was infinite or NaN is put back. */
static inline float matmul_of_half(uint32_t h) {
    const float x = matmul_of_bits((h & 0x7fffu) << 13) * 5192296858534827628530496329220096.0f;
    uint32_t bits;
    memcpy(&bits, &x, 4);
    bits |= (h & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0;
    return matmul_of_bits(bits | (h & 0x8000u) << 16);
}

#if defined(__clang__)
#define MATMUL_FAST
#else
#define MATMUL_FAST __attribute__((optimize("O3", "fp-contract=fast")))
#endif
#define INFER_MATMUL_BODY
#define MATMUL_NAME(x) x##_any
#define MATMUL_TARGET MATMUL_FAST
#define MATMUL_WIDTH 4
#include "matmul.h"
#if defined(__x86_64__)
#define MATMUL_NAME(x) x##_avx2
#define MATMUL_TARGET __attribute__((target("avx2,fma"))) MATMUL_FAST
#define MATMUL_WIDTH 8
#include "matmul.h"
#define MATMUL_NAME(x) x##_avx512
#define MATMUL_TARGET __attribute__((target("avx512f,avx512bw,avx512vl,fma"))) MATMUL_FAST
#define MATMUL_WIDTH 16
#include "matmul.h"
#endif
#undef INFER_MATMUL_BODY

static inline void matmul_piece(void *ctx, int64_t piece) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"))
        matmul_rows_avx512((const matmul *)ctx, piece);
    else if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        matmul_rows_avx2((const matmul *)ctx, piece);
    else
#endif
        matmul_rows_any((const matmul *)ctx, piece);
}

/* Floats of scratch that one rank needs for products with matrices of these columns. */
enum { MATMUL_PIECES = 16 };
static inline size_t matmul_scratch(int64_t columns) {
    return (size_t)columns * MATMUL_ROWS * MATMUL_PIECES;
}

/* y [tokens][w->rows] = x [tokens][w->columns] times W transposed. */
static inline void matmul_run(pool *p, const matrix *w, const float *x, float *y, int64_t tokens,
                              float *scratch) {
    const int64_t tiles = (w->rows + MATMUL_ROWS - 1) / MATMUL_ROWS;
    const double work = (double)w->rows * (double)w->columns * (double)(tokens + 1);
    int64_t pieces = p->threads && work > 2e5 ? (p->threads + 1) * 2 : 1;
    matmul m;
    if (tokens < 1) return;
    if (pieces > MATMUL_PIECES) pieces = MATMUL_PIECES;
    m.w = w;
    m.x = x;
    m.y = y;
    m.tokens = tokens;
    m.piece = (tiles + pieces - 1) / pieces * MATMUL_ROWS;
    m.wide = scratch;
    pool_run(p, matmul_piece, &m, (w->rows + m.piece - 1) / m.piece);
}

#endif
#else                                  /* the body, once per instruction set */

typedef float MATMUL_NAME(matmul_v)
    __attribute__((vector_size(MATMUL_WIDTH * 4), aligned(4), may_alias));

/* n elements of a row of W as floats. */
static inline MATMUL_TARGET void MATMUL_NAME(matmul_widen)(const uint8_t *from, int32_t dtype,
                                                           int64_t n, float *to) {
    const uint16_t *half = (const uint16_t *)(const void *)from;
    int64_t i, j;
    if (dtype >= GGUF_QUANT) quant_widen((uint32_t)(dtype - GGUF_QUANT), from, n, to);
    if (dtype == RA_BF16)
        for (i = 0; i < n; i++) to[i] = matmul_of_bits((uint32_t)half[i] << 16);
    if (dtype == RA_F16)
        for (i = 0; i < n; i++) to[i] = matmul_of_half(half[i]);
    for (i = 0; dtype == RA_Q8_0 && i < n; i += 32, from += 34) {
        const float scale = matmul_of_half((uint32_t)from[0] | (uint32_t)from[1] << 8);
        for (j = 0; j < 32; j++) to[i + j] = scale * (float)(int8_t)from[2 + j];
    }
}

/* rows x tokens elements of y. Both counts are constants where this is called, so the loops over
 * them unroll. Each element is one vector of sums, its lanes in order, then the rest of the row. */
static inline __attribute__((always_inline)) MATMUL_TARGET void
MATMUL_NAME(matmul_tile)(const matmul *m, const float *const *w, int64_t row, int64_t token,
                         int rows, int tokens) {
    typedef MATMUL_NAME(matmul_v) vec;
    const int64_t n = m->w->columns, whole = n - n % MATMUL_WIDTH;
    const float *x = m->x + token * n;
    const vec zero = { 0 };
    vec sum[MATMUL_ROWS][MATMUL_TOKENS];
    int64_t i;
    int r, t, l;
    for (r = 0; r < rows; r++)
        for (t = 0; t < tokens; t++) sum[r][t] = zero;
    for (i = 0; i < whole; i += MATMUL_WIDTH)
        for (r = 0; r < rows; r++)
            for (t = 0; t < tokens; t++)
                sum[r][t] += *(const vec *)(w[r] + i) * *(const vec *)(x + t * n + i);
    for (r = 0; r < rows; r++) {
        for (t = 0; t < tokens; t++) {
            float s = 0;
            for (l = 0; l < MATMUL_WIDTH; l++) s += sum[r][t][l];
            for (i = whole; i < n; i++) s += w[r][i] * x[t * n + i];
            m->y[(token + t) * m->w->rows + row + r] = s;
        }
    }
}

static inline MATMUL_TARGET void MATMUL_NAME(matmul_tokens)(const matmul *m, const float *const *w,
                                                            int64_t row, int rows) {
    int64_t t = 0;
    if (rows == MATMUL_ROWS) {
        for (; t + MATMUL_TOKENS <= m->tokens; t += MATMUL_TOKENS)
            MATMUL_NAME(matmul_tile)(m, w, row, t, MATMUL_ROWS, MATMUL_TOKENS);
        for (; t < m->tokens; t++) MATMUL_NAME(matmul_tile)(m, w, row, t, MATMUL_ROWS, 1);
    }
    for (; t < m->tokens; t++)
        for (int r = 0; r < rows; r++) MATMUL_NAME(matmul_tile)(m, w + r, row + r, t, 1, 1);
}

static inline MATMUL_TARGET void MATMUL_NAME(matmul_rows)(const matmul *m, int64_t piece) {
    const matrix *w = m->w;
    const size_t bytes = (size_t)gguf_row_bytes(w->dtype, w->columns);
    float *wide = m->wide + (size_t)piece * MATMUL_ROWS * (size_t)w->columns;
    int64_t row = piece * m->piece, end = row + m->piece;
    if (end > w->rows) end = w->rows;
    for (; row < end; row += MATMUL_ROWS) {
        const float *line[MATMUL_ROWS];
        const int rows = end - row < MATMUL_ROWS ? (int)(end - row) : MATMUL_ROWS;
        for (int r = 0; r < rows; r++) {
            const uint8_t *from = w->data + (size_t)(row + r) * bytes;
            line[r] = (const float *)(const void *)from;
            if (w->dtype == RA_F32) continue;
            line[r] = wide + r * w->columns;
            MATMUL_NAME(matmul_widen)(from, w->dtype, w->columns, wide + r * w->columns);
        }
        MATMUL_NAME(matmul_tokens)(m, line, row, rows);
    }
}

#undef MATMUL_NAME
#undef MATMUL_TARGET
#undef MATMUL_WIDTH
#endif
