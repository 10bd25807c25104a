/* y = x W^T for rows of x, with W as the file stores it, on a pool of threads that all ranks of the
 * process share. Sums are f32.
 *
 *   matmul_run      any number of rows
 *   matmul_decode   for calls of a few rows: where W is q8_0, x is rounded to 16 bits per block of
 *                   32 elements and products are integers
 *   matmul_norm, matmul_gate, matmul_add   what lies between products, on all threads
 *
 * An element of y has the same bits whatever other rows are in the call, and for any number of
 * threads. Lane l of a vector of sums adds the products at columns l, l + lanes, ... in turn; then
 * the upper half of the lanes is added to the lower half until one is left. A few rows of x are
 * multiplied with W from where it is, widened in registers. For more rows, a block of W is widened
 * to a buffer, MATMUL_DEEP columns at a time, and the sums wait in memory.
 *
 * The kernel is one body in vectors of the compiler, included once for each instruction set, which
 * is chosen when the program runs. Columns that are no multiple of 16 are filled up with zeros. */
#if !defined(INFER_MATMUL_BODY)
#if !defined(INFER_MATMUL_H)
#define INFER_MATMUL_H

#include "gguf.h"

#include <math.h>
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
    int isa;                           /* of products: 0, 1, 2 as matmul_isa counts them */
} pool;

/* The best kernels that this processor can run: 2 AVX-512, 1 AVX2 with FMA and F16C, 0 others. No
 * processor has AVX2 and FMA without F16C, which not every compiler can ask for. */
static inline int matmul_isa(void) {
#if defined(__x86_64__)
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return 0;
    return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") ? 2 : 1;
#else
    return 0;
#endif
}

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

/* threads: beside those that call pool_run. If the system starts fewer, the pool has fewer. Their
 * stacks are large enough for a block of a product, whatever the system's default is. */
static inline void pool_start(pool *p, int threads) {
    pthread_attr_t how;
    memset(p, 0, sizeof *p);
    p->isa = matmul_isa();
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->changed, NULL);
    pthread_attr_init(&how);
    (void)pthread_attr_setstacksize(&how, 1 << 20);
    p->thread = (pthread_t *)calloc((size_t)threads + 1, sizeof *p->thread);
    while (p->thread && p->threads < threads &&
           !pthread_create(&p->thread[p->threads], &how, pool_main, p))
        p->threads++;
    pthread_attr_destroy(&how);
}

/* -------------------------------------------------------------------------- the product */
typedef struct matrix {                /* [rows][columns] in a file */
    const uint8_t *data;
    int64_t rows, columns;
    int32_t dtype;
} matrix;

enum {
    MATMUL_FEW = 8,                    /* rows of x at most that are multiplied with W in place */
    MATMUL_DEEP = 512,                 /* columns widened at a time; whole blocks of every type */
    MATMUL_APART = MATMUL_DEEP + 16,   /* between rows of a buffer: not a multiple of 4 KiB, which
                                        * would put all rows into the same few lines of a cache */
    MATMUL_BLOCK_ROWS = 36,            /* of W */
    MATMUL_BLOCK_TOKENS = 128,         /* rows of x */
    MATMUL_LANES = 16                  /* at most */
};

/* What a thread needs for a block, 362 KiB: columns of W, and sums. The same columns of x are
 * another 256 KiB of the second cache. Threads of a pool have it on the stack, and callers, whose
 * stacks may be small, in their scratch. */
typedef struct matmul_block {
    float wide[MATMUL_BLOCK_ROWS][MATMUL_APART];
    float sum[MATMUL_BLOCK_ROWS][MATMUL_BLOCK_TOKENS][MATMUL_LANES];
} __attribute__((aligned(64))) matmul_block;

typedef struct matmul {
    const matrix *w;
    const float *x;                    /* [tokens][w->columns], rows `apart` apart */
    float *y;                          /* [tokens][w->rows] */
    int64_t tokens, apart;
    int64_t piece;                     /* rows of W of one piece of the work */
    int isa, few;                      /* few: W is read in place */
    matmul_block *own;                 /* of the thread that calls */
    pthread_t caller;
    const int16_t *whole;              /* x of integer products; null: none */
    const float *step;                 /* [tokens][w->columns / 32]: x is about step * whole */
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

static inline uint32_t matmul_16_bits(const uint8_t *p) {
    return (uint32_t)p[0] | (uint32_t)p[1] << 8;
}

/* Element i of a row of W, except of types that matmul_other widens. */
static inline float matmul_element(const uint8_t *row, int32_t dtype, int64_t i) {
    if (dtype == RA_F32) return ((const float *)(const void *)row)[i];
    if (dtype == RA_BF16) return matmul_of_bits(matmul_16_bits(row + 2 * i) << 16);
    if (dtype == RA_F16) return matmul_of_half(matmul_16_bits(row + 2 * i));
    row += i / 32 * 34;
    return matmul_of_half(matmul_16_bits(row)) * (float)(int8_t)row[2 + i % 32];
}

/* Types that have no kernel here: n elements, whole blocks, are widened. */
static inline void matmul_other(int32_t dtype, const uint8_t *from, int64_t n, float *to) {
    gguf_widen(dtype, from, n, to);
}

static inline int matmul_has_kernel(int32_t dtype) {
    return dtype == RA_F32 || dtype == RA_F16 || dtype == RA_BF16 || dtype == RA_Q8_0;
}

/* What is computed row by row or element by element. */
typedef struct matmul_each {
    float *y;
    const float *x, *weight;           /* weight: [n], y = x / rms(x) * weight; null: see gate */
    int64_t rows, n;
    float epsilon;
    int gate;                          /* 1: y = y / (1 + e^-y) * x; 0: y += x */
    int64_t piece;                     /* rows of a piece */
    int isa;
} matmul_each;

#if defined(__clang__)
#define MATMUL_FAST
#define MATMUL_UNROLL _Pragma("clang loop unroll(full)")
#else
#define MATMUL_UNROLL _Pragma("GCC unroll 16")
#define MATMUL_FAST __attribute__((optimize("O3", "fp-contract=fast")))
#endif
#define INFER_MATMUL_BODY
#define MATMUL_NAME(x) x##_any
#define MATMUL_TARGET MATMUL_FAST
#define MATMUL_WIDTH 4
#define MATMUL_ROWS 3
#include "matmul.h"
#if defined(__x86_64__)
#include <immintrin.h>
#define MATMUL_NAME(x) x##_avx2
#define MATMUL_TARGET __attribute__((target("avx2,fma,f16c"))) MATMUL_FAST
#define MATMUL_WIDTH 8
#define MATMUL_ROWS 3
#include "matmul.h"
#define MATMUL_NAME(x) x##_avx512
#define MATMUL_TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx2,fma,f16c"))) MATMUL_FAST
#define MATMUL_WIDTH 16
#define MATMUL_ROWS 6
#include "matmul.h"
#endif
#undef INFER_MATMUL_BODY

static inline void matmul_piece(void *ctx, int64_t piece) {
    const matmul *m = (const matmul *)ctx;
#if defined(__x86_64__)
    if (m->isa == 2) matmul_work_avx512(m, piece);
    else if (m->isa == 1) matmul_work_avx2(m, piece);
    else
#endif
        matmul_work_any(m, piece);
}

/* Floats of scratch that one rank needs for products with matrices of these columns. */
static inline size_t matmul_scratch(int64_t columns) {
    return (size_t)(columns + 32) * MATMUL_BLOCK_TOKENS + 16 + sizeof(matmul_block) / sizeof(float);
}

/* Scratch begins with the caller's block, at the first line of a cache. */
static inline matmul_block *matmul_own(float *scratch) {
    return (matmul_block *)(void *)(scratch + (64 - ((uintptr_t)scratch & 63)) / 4 % 16);
}

static inline float *matmul_line(float *scratch) { return (float *)(matmul_own(scratch) + 1); }

/* Divides the work into pieces. Their number changes no bits. */
static inline void matmul_start(pool *p, matmul *m) {
    const int64_t rows = m->w->rows, threads = p->threads + 1;
    const double work = (double)rows * (double)m->w->columns * (double)(m->tokens + 1);
    const int64_t unit = m->few ? 6 : MATMUL_BLOCK_ROWS, all = (rows + unit - 1) / unit;
    const int64_t pieces = p->threads && work > 2e5 ? threads * 4 : 1;
    m->isa = p->isa;
    m->piece = (all + pieces - 1) / pieces * unit;
    pool_run(p, matmul_piece, m, (rows + m->piece - 1) / m->piece);
}

/* y [tokens][w->rows] = x [tokens][w->columns] times W transposed. Many rows of x are copied, a
 * block at a time, so that they are not a multiple of 4 KiB apart. */
static inline void matmul_run(pool *p, const matrix *w, const float *x, float *y, int64_t tokens,
                              float *scratch) {
    const int64_t n = w->columns;
    const int64_t most = w->dtype == RA_F32 ? 4 * MATMUL_FEW : MATMUL_FEW;
    const int copied = tokens > most || !matmul_has_kernel(w->dtype) || n % MATMUL_LANES;
    float *line = matmul_line(scratch);
    matmul m;
    memset(&m, 0, sizeof m);
    m.w = w;
    m.few = !copied;
    m.own = matmul_own(scratch);
    m.caller = pthread_self();
    m.apart = copied ? (n + 15) / 16 * 16 + (n % 512 > 496 || n % 512 == 0 ? 16 : 0) : n;
    for (int64_t t = 0; t < tokens; t += m.tokens) {
        m.tokens = tokens - t < MATMUL_BLOCK_TOKENS ? tokens - t : (int64_t)MATMUL_BLOCK_TOKENS;
        m.x = copied ? line : x + t * n;
        m.y = y + t * w->rows;
        for (int64_t i = 0; i < m.tokens && copied; i++) {
            float *to = line + i * m.apart;
            memcpy(to, x + (t + i) * n, (size_t)n * sizeof *x);
            for (int64_t j = n; j % MATMUL_LANES; j++) to[j] = 0;
        }
        matmul_start(p, &m);
    }
}

/* x as integers of 16 bits: the largest of every 32 elements becomes 32767. What is not finite, or
 * so small that its step is not normal, gives no integers: 0. */
static inline int matmul_round(const float *x, int64_t n, int16_t *whole, float *step) {
    for (int64_t i = 0; i < n; i += 32) {
        float most = 0, by;
        int odd = 0;
        for (int j = 0; j < 32; j++) {
            const float a = fabsf(x[i + j]);
            odd |= !(a < 1e30f);
            most = a > most ? a : most;
        }
        if (odd || (most > 0 && most < 1e-30f)) return 0;
        by = most > 0 ? 32767 / most : 0;
        step[i / 32] = most / 32767;
        for (int j = 0; j < 32; j++)
            whole[i + j] = (int16_t)(int32_t)(x[i + j] * by + (x[i + j] < 0 ? -0.5f : 0.5f));
    }
    return 1;
}

/* As matmul_run, but where W is q8_0, x is rounded to 16 bits. Rows of x that cannot be rounded are
 * multiplied as floats, each in a call of its own. */
static inline void matmul_decode(pool *p, const matrix *w, const float *x, float *y,
                                 int64_t tokens, float *scratch) {
    const int64_t n = w->columns;
    float *line = matmul_line(scratch), *step = line + MATMUL_FEW * n / 2;
    int16_t *whole = (int16_t *)(void *)line;
    matmul m;
    if (w->dtype != RA_Q8_0) {
        matmul_run(p, w, x, y, tokens, scratch);
        return;
    }
    memset(&m, 0, sizeof m);
    m.w = w;
    m.step = step;
    m.few = 1;
    m.apart = n;
    for (int64_t t = 0; t < tokens; t += m.tokens) {
        int64_t i = 0;
        while (i < MATMUL_FEW && t + i < tokens &&
               matmul_round(x + (t + i) * n, n, whole + i * n, step + i * (n / 32))) i++;
        m.x = x + t * n;
        m.y = y + t * w->rows;
        m.tokens = i ? i : 1;
        m.whole = i ? whole : NULL;
        matmul_start(p, &m);
    }
}

/* -------------------------------------------------------------------------- rows and elements */
static inline void matmul_each_piece(void *ctx, int64_t piece) {
    const matmul_each *e = (const matmul_each *)ctx;
#if defined(__x86_64__)
    if (e->isa == 2) matmul_all_avx512(e, piece);
    else if (e->isa == 1) matmul_all_avx2(e, piece);
    else
#endif
        matmul_all_any(e, piece);
}

/* Pieces are rows, or multiples of 16 elements. */
static inline void matmul_each_run(pool *p, matmul_each *e) {
    const int64_t pieces = p->threads && (double)e->rows * (double)e->n > 2e4 ? p->threads + 1 : 1;
    e->isa = p->isa;
    e->piece = (e->rows + pieces - 1) / pieces;
    if (!e->weight) e->piece = (e->piece + 15) / 16 * 16;
    if (e->rows > 0) pool_run(p, matmul_each_piece, e, (e->rows + e->piece - 1) / e->piece);
}

/* y = x / rms(x) * weight, for rows of n floats. y may be x. */
static inline void matmul_norm(pool *p, float *y, const float *x, const float *weight,
                               int64_t rows, int64_t n, float epsilon) {
    matmul_each e;
    memset(&e, 0, sizeof e);
    e.y = y;
    e.x = x;
    e.weight = weight;
    e.rows = rows;
    e.n = n;
    e.epsilon = epsilon;
    matmul_each_run(p, &e);
}

/* gate = gate / (1 + e^-gate) * up, n elements. */
static inline void matmul_gate(pool *p, float *gate, const float *up, int64_t n) {
    matmul_each e;
    memset(&e, 0, sizeof e);
    e.y = gate;
    e.x = up;
    e.rows = n;
    e.n = 1;
    e.gate = 1;
    matmul_each_run(p, &e);
}

/* y += x, n elements. */
static inline void matmul_add(pool *p, float *y, const float *x, int64_t n) {
    matmul_each e;
    memset(&e, 0, sizeof e);
    e.y = y;
    e.x = x;
    e.rows = n;
    e.n = 1;
    matmul_each_run(p, &e);
}

#endif
#else                                  /* the body, once per instruction set */

typedef float MATMUL_NAME(matmul_v)
    __attribute__((vector_size(MATMUL_WIDTH * 4), aligned(4), may_alias));

/* The sum of the lanes: the upper half onto the lower half until one is left. */
static inline __attribute__((always_inline)) MATMUL_TARGET float
MATMUL_NAME(matmul_fold)(MATMUL_NAME(matmul_v) v) {
#if MATMUL_WIDTH == 4
    return (v[0] + v[2]) + (v[1] + v[3]);
#else
#if MATMUL_WIDTH == 16
    const __m256 a = _mm256_add_ps(_mm512_castps512_ps256((__m512)v), _mm256_castpd_ps(
                         _mm512_extractf64x4_pd(_mm512_castps_pd((__m512)v), 1)));
#else
    const __m256 a = (__m256)v;
#endif
    __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(b, _mm_shuffle_ps(b, b, 1)));
#endif
}

/* Elements of a row of W from i on, one vector. */
static inline __attribute__((always_inline)) MATMUL_TARGET MATMUL_NAME(matmul_v)
MATMUL_NAME(matmul_load)(const uint8_t *row, int32_t dtype, int64_t i) {
    typedef MATMUL_NAME(matmul_v) vec;
    if (dtype == RA_F32) return *(const vec *)(const void *)(row + 4 * i);
#if MATMUL_WIDTH == 16
    if (dtype == RA_F16)
        return (vec)_mm512_cvtph_ps(
            _mm256_loadu_si256((const __m256i *)(const void *)(row + 2 * i)));
    if (dtype == RA_BF16)
        return (vec)_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(
                   _mm256_loadu_si256((const __m256i *)(const void *)(row + 2 * i))), 16));
    row += i / 32 * 34;
    return (vec)_mm512_mul_ps(_mm512_set1_ps(_cvtsh_ss((uint16_t)matmul_16_bits(row))),
                              _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(
                                  (const __m128i *)(const void *)(row + 2 + i % 32)))));
#elif MATMUL_WIDTH == 8
    if (dtype == RA_F16)
        return (vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)(row + 2 * i)));
    if (dtype == RA_BF16)
        return (vec)_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(
                   _mm_loadu_si128((const __m128i *)(const void *)(row + 2 * i))), 16));
    row += i / 32 * 34;
    return (vec)_mm256_mul_ps(_mm256_set1_ps(_cvtsh_ss((uint16_t)matmul_16_bits(row))),
                              _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(
                                  (const __m128i *)(const void *)(row + 2 + i % 32)))));
#else
    {
        vec v;
        for (int l = 0; l < MATMUL_WIDTH; l++) v[l] = matmul_element(row, dtype, i + l);
        return v;
    }
#endif
}

/* The last n < MATMUL_WIDTH elements, and zeros. */
static inline MATMUL_TARGET MATMUL_NAME(matmul_v)
MATMUL_NAME(matmul_last)(const uint8_t *row, int32_t dtype, int64_t i, int64_t n) {
    MATMUL_NAME(matmul_v) v = { 0 };
    for (int64_t l = 0; l < n; l++) v[l] = matmul_element(row, dtype, i + l);
    return v;
}

/* Rows of W, `bytes` apart, and of x, `apart` apart, both of n columns. */
typedef struct MATMUL_NAME(matmul_strip) {
    const uint8_t *row;
    size_t bytes;
    const float *x;
    int64_t apart, n;
} MATMUL_NAME(matmul_strip);

/* Adds the products of a tile to sum. Rows, tokens and dtype are constants where this is called, so
 * the loops over them unroll. */
static inline __attribute__((always_inline)) MATMUL_TARGET void
MATMUL_NAME(matmul_tile)(int rows, int tokens, int32_t dtype, const MATMUL_NAME(matmul_strip) *s,
                         MATMUL_NAME(matmul_v) sum[MATMUL_ROWS][4]) {
    typedef MATMUL_NAME(matmul_v) vec;
    const int64_t n = s->n, apart = s->apart;
    const uint8_t *row = s->row;
    const float *x = s->x;
    const size_t bytes = s->bytes;
    for (int64_t i = 0; i < n; i += MATMUL_WIDTH) {
        vec w[MATMUL_ROWS];
        MATMUL_UNROLL for (int r = 0; r < rows; r++)
            w[r] = MATMUL_NAME(matmul_load)(row + (size_t)r * bytes, dtype, i);
        MATMUL_UNROLL for (int t = 0; t < tokens; t++) {
            const vec v = *(const vec *)(x + t * apart + i);
            MATMUL_UNROLL for (int r = 0; r < rows; r++) sum[r][t] += w[r] * v;
        }
    }
}

/* A tile of rows x tokens of y. */
static inline __attribute__((always_inline)) MATMUL_TARGET void
MATMUL_NAME(matmul_direct)(int rows, int tokens, int32_t dtype, const matmul *m, int64_t row,
                           int64_t token) {
    const MATMUL_NAME(matmul_v) zero = { 0 };
    MATMUL_NAME(matmul_v) sum[MATMUL_ROWS][4];
    MATMUL_NAME(matmul_strip) s;
    s.bytes = (size_t)gguf_row_bytes(dtype, m->w->columns);
    s.row = m->w->data + (size_t)row * s.bytes;
    s.n = s.apart = m->w->columns;
    s.x = m->x + token * s.n;
    MATMUL_UNROLL for (int r = 0; r < rows; r++)
        MATMUL_UNROLL for (int t = 0; t < tokens; t++) sum[r][t] = zero;
    MATMUL_NAME(matmul_tile)(rows, tokens, dtype, &s, sum);
    MATMUL_UNROLL for (int r = 0; r < rows; r++)
        MATMUL_UNROLL for (int t = 0; t < tokens; t++)
            m->y[(token + t) * m->w->rows + row + r] = MATMUL_NAME(matmul_fold)(sum[r][t]);
}

/* The sums of 32 products of integers, by lanes. */
static inline __attribute__((always_inline)) MATMUL_TARGET MATMUL_NAME(matmul_v)
MATMUL_NAME(matmul_pairs)(const uint8_t *w, const int16_t *x) {
    typedef MATMUL_NAME(matmul_v) vec;
#if MATMUL_WIDTH == 16
    return (vec)_mm512_cvtepi32_ps(_mm512_madd_epi16(
        _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)(const void *)w)),
        _mm512_loadu_si512((const void *)x)));
#elif MATMUL_WIDTH == 8
    const __m128i *from = (const __m128i *)(const void *)w;
    const __m256i *by = (const __m256i *)(const void *)x;
    const __m256i a = _mm256_madd_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128(from)),
                                        _mm256_loadu_si256(by));
    const __m256i b = _mm256_madd_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128(from + 1)),
                                        _mm256_loadu_si256(by + 1));
    return (vec)_mm256_cvtepi32_ps(_mm256_add_epi32(a, b));
#else
    vec v;
    for (int l = 0; l < MATMUL_WIDTH; l++) {
        int32_t sum = 0;
        for (int j = 0; j < 8; j++) sum += (int8_t)w[8 * l + j] * x[8 * l + j];
        v[l] = (float)sum;
    }
    return v;
#endif
}

/* The scales of n <= 16 blocks of a row, then zeros. */
static inline __attribute__((always_inline)) MATMUL_TARGET void
MATMUL_NAME(matmul_scales)(const uint8_t *row, int64_t n, float scale[16]) {
#if MATMUL_WIDTH > 4
    uint16_t half[16];
    if (n == 16) {
        MATMUL_UNROLL for (int b = 0; b < 16; b++) memcpy(half + b, row + 34 * b, 2);
        for (int b = 0; b < 16; b += 8)
            _mm256_storeu_ps(scale + b, _mm256_cvtph_ps(_mm_loadu_si128(
                                            (const __m128i *)(const void *)(half + b))));
        return;
    }
#endif
    for (int64_t b = 0; b < 16; b++)
        scale[b] = b < n ? matmul_of_half(matmul_16_bits(row + 34 * b)) : 0;
}

/* A tile of rows x tokens of y by integers: W is q8_0. */
static inline __attribute__((always_inline)) MATMUL_TARGET void
MATMUL_NAME(matmul_whole)(int rows, int tokens, const matmul *m, int64_t row, int64_t token) {
    typedef MATMUL_NAME(matmul_v) vec;
    const int64_t blocks = m->w->columns / 32;
    const size_t bytes = (size_t)blocks * 34;
    const uint8_t *w = m->w->data + (size_t)row * bytes;
    const int16_t *x = m->whole + token * blocks * 32;
    const float *step = m->step + token * blocks;
    const vec zero = { 0 };
    vec sum[MATMUL_ROWS][4];
    MATMUL_UNROLL for (int r = 0; r < rows; r++)
        MATMUL_UNROLL for (int t = 0; t < tokens; t++) sum[r][t] = zero;
    for (int64_t at = 0; at < blocks; at += 16) {
        const int64_t n = blocks - at < 16 ? blocks - at : 16;
        float scale[16], by[MATMUL_ROWS][4][16];
        for (int r = 0; r < rows; r++) {
            const uint8_t *from = w + (size_t)r * bytes + at * 34;
            MATMUL_UNROLL for (int l = 0; l < 9; l++)  /* of the next tile */
                __builtin_prefetch(from + (size_t)rows * bytes + 64 * l, 0, 2);
            MATMUL_NAME(matmul_scales)(from, n, scale);
            for (int t = 0; t < tokens; t++)
                MATMUL_UNROLL for (int b = 0; b < 16; b += MATMUL_WIDTH)
                    *(vec *)(by[r][t] + b) = *(const vec *)(scale + b) *
                                             *(const vec *)(step + t * blocks + at + b);
        }
        for (int64_t b = 0; b < n; b++) {
            const uint8_t *from = w + (at + b) * 34 + 2;
            MATMUL_UNROLL for (int r = 0; r < rows; r++)
                MATMUL_UNROLL for (int t = 0; t < tokens; t++)
                    sum[r][t] += by[r][t][b] *
                                 MATMUL_NAME(matmul_pairs)(from + (size_t)r * bytes,
                                                           x + (t * blocks + at + b) * 32);
        }
    }
    MATMUL_UNROLL for (int r = 0; r < rows; r++)
        MATMUL_UNROLL for (int t = 0; t < tokens; t++)
            m->y[(token + t) * m->w->rows + row + r] = MATMUL_NAME(matmul_fold)(sum[r][t]);
}

/* One function per size of a tile. */
static inline __attribute__((always_inline)) MATMUL_TARGET void
MATMUL_NAME(matmul_direct_many_4)(int32_t dtype, const matmul *m, int64_t row,
                                  int64_t token) {
    MATMUL_NAME(matmul_direct)(MATMUL_ROWS, 4, dtype, m, row, token);
}

static inline __attribute__((always_inline)) MATMUL_TARGET void
MATMUL_NAME(matmul_direct_many_1)(int32_t dtype, const matmul *m, int64_t row,
                                  int64_t token) {
    MATMUL_NAME(matmul_direct)(MATMUL_ROWS, 1, dtype, m, row, token);
}

static inline __attribute__((always_inline)) MATMUL_TARGET void
MATMUL_NAME(matmul_direct_one_1)(int32_t dtype, const matmul *m, int64_t row,
                                  int64_t token) {
    MATMUL_NAME(matmul_direct)(1, 1, dtype, m, row, token);
}

static inline __attribute__((always_inline)) MATMUL_TARGET void
MATMUL_NAME(matmul_whole_many_4)(const matmul *m, int64_t row, int64_t token) {
    MATMUL_NAME(matmul_whole)(MATMUL_ROWS, 4, m, row, token);
}

static inline __attribute__((always_inline)) MATMUL_TARGET void
MATMUL_NAME(matmul_whole_many_1)(const matmul *m, int64_t row, int64_t token) {
    MATMUL_NAME(matmul_whole)(MATMUL_ROWS, 1, m, row, token);
}

static inline __attribute__((always_inline)) MATMUL_TARGET void
MATMUL_NAME(matmul_whole_one_1)(const matmul *m, int64_t row, int64_t token) {
    MATMUL_NAME(matmul_whole)(1, 1, m, row, token);
}

/* Rows of W in place, for all tokens; dtype and integers are constants where this is called. */
static inline __attribute__((always_inline)) MATMUL_TARGET void
MATMUL_NAME(matmul_few)(const matmul *m, int64_t row, int64_t end, int32_t dtype, int integers) {
    for (; row < end; row++) {
        int64_t t = 0;
        const int many = row + MATMUL_ROWS <= end;
        for (; many && t + 4 <= m->tokens; t += 4) {
            if (integers) MATMUL_NAME(matmul_whole_many_4)(m, row, t);
            else MATMUL_NAME(matmul_direct_many_4)(dtype, m, row, t);
        }
        for (; t < m->tokens; t++) {
            if (integers && many) MATMUL_NAME(matmul_whole_many_1)(m, row, t);
            else if (integers) MATMUL_NAME(matmul_whole_one_1)(m, row, t);
            else if (many) MATMUL_NAME(matmul_direct_many_1)(dtype, m, row, t);
            else MATMUL_NAME(matmul_direct_one_1)(dtype, m, row, t);
        }
        if (many) row += MATMUL_ROWS - 1;
    }
}

/* Columns [at, at + n) of rows of W as floats, then zeros up to a multiple of 16. */
static inline MATMUL_TARGET void MATMUL_NAME(matmul_widen)(const matrix *w, int64_t row, int rows,
                                                           int64_t at, int64_t n, float *to) {
    typedef MATMUL_NAME(matmul_v) vec;
    const size_t bytes = (size_t)gguf_row_bytes(w->dtype, w->columns);
    const int64_t whole = n - n % MATMUL_WIDTH;
    for (int r = 0; r < rows; r++, to += MATMUL_APART) {
        const uint8_t *from = w->data + (size_t)(row + r) * bytes +
                              (size_t)gguf_row_bytes(w->dtype, at);
        int64_t i = 0;
        if (!matmul_has_kernel(w->dtype)) matmul_other(w->dtype, from, n, to);
        for (; w->dtype == RA_F32 && i < whole; i += MATMUL_WIDTH)
            *(vec *)(to + i) = MATMUL_NAME(matmul_load)(from, RA_F32, i);
        for (; w->dtype == RA_F16 && i < whole; i += MATMUL_WIDTH)
            *(vec *)(to + i) = MATMUL_NAME(matmul_load)(from, RA_F16, i);
        for (; w->dtype == RA_BF16 && i < whole; i += MATMUL_WIDTH)
            *(vec *)(to + i) = MATMUL_NAME(matmul_load)(from, RA_BF16, i);
        for (; w->dtype == RA_Q8_0 && i < whole; i += MATMUL_WIDTH)
            *(vec *)(to + i) = MATMUL_NAME(matmul_load)(from, RA_Q8_0, i);
        for (; matmul_has_kernel(w->dtype) && i < n; i++)
            to[i] = matmul_element(from, w->dtype, i);
        for (i = n; i % MATMUL_LANES; i++) to[i] = 0;
    }
}

/* A tile of a block: adds the columns of `s` to the sums that wait from row and token on. */
static inline __attribute__((always_inline)) MATMUL_TARGET void
MATMUL_NAME(matmul_part)(int rows, int tokens, const MATMUL_NAME(matmul_strip) *s, float *sums) {
    typedef MATMUL_NAME(matmul_v) vec;
    enum { APART = MATMUL_BLOCK_TOKENS * MATMUL_LANES };
    vec sum[MATMUL_ROWS][4];
    MATMUL_UNROLL for (int r = 0; r < rows; r++)
        MATMUL_UNROLL for (int t = 0; t < tokens; t++)
            sum[r][t] = *(const vec *)(sums + r * APART + t * MATMUL_LANES);
    MATMUL_NAME(matmul_tile)(rows, tokens, RA_F32, s, sum);
    MATMUL_UNROLL for (int r = 0; r < rows; r++)
        MATMUL_UNROLL for (int t = 0; t < tokens; t++)
            *(vec *)(sums + r * APART + t * MATMUL_LANES) = sum[r][t];
}

static inline __attribute__((always_inline)) MATMUL_TARGET void
MATMUL_NAME(matmul_part_many_4)(const MATMUL_NAME(matmul_strip) *s, float *sums) {
    MATMUL_NAME(matmul_part)(MATMUL_ROWS, 4, s, sums);
}

static inline __attribute__((always_inline)) MATMUL_TARGET void
MATMUL_NAME(matmul_part_many_1)(const MATMUL_NAME(matmul_strip) *s, float *sums) {
    MATMUL_NAME(matmul_part)(MATMUL_ROWS, 1, s, sums);
}

static inline __attribute__((always_inline)) MATMUL_TARGET void
MATMUL_NAME(matmul_part_one_4)(const MATMUL_NAME(matmul_strip) *s, float *sums) {
    MATMUL_NAME(matmul_part)(1, 4, s, sums);
}

static inline __attribute__((always_inline)) MATMUL_TARGET void
MATMUL_NAME(matmul_part_one_1)(const MATMUL_NAME(matmul_strip) *s, float *sums) {
    MATMUL_NAME(matmul_part)(1, 1, s, sums);
}

/* Adds s.n columns to the sums of a block of rows x tokens. */
static inline MATMUL_TARGET void MATMUL_NAME(matmul_deep)(MATMUL_NAME(matmul_strip) s, int rows,
                                                          int tokens, matmul_block *b) {
    const float *x = s.x;
    for (int r = 0; r < rows;) {
        const int many = r + MATMUL_ROWS <= rows;
        int t = 0;
        for (; t + 4 <= tokens; t += 4) {
            s.x = x + t * s.apart;
            if (many) MATMUL_NAME(matmul_part_many_4)(&s, b->sum[r][t]);
            else MATMUL_NAME(matmul_part_one_4)(&s, b->sum[r][t]);
        }
        for (; t < tokens; t++) {
            s.x = x + t * s.apart;
            if (many) MATMUL_NAME(matmul_part_many_1)(&s, b->sum[r][t]);
            else MATMUL_NAME(matmul_part_one_1)(&s, b->sum[r][t]);
        }
        s.row += s.bytes * (many ? MATMUL_ROWS : 1);
        r += many ? MATMUL_ROWS : 1;
    }
}

/* Rows of W from `row` on, a block at most, for all tokens, a block at most. */
static inline MATMUL_TARGET void MATMUL_NAME(matmul_block)(const matmul *m, int64_t row,
                                                           int64_t end, matmul_block *b) {
    typedef MATMUL_NAME(matmul_v) vec;
    const matrix *w = m->w;
    const int64_t n = w->columns;
    const int rows = (int)(end - row < MATMUL_BLOCK_ROWS ? end - row : (int64_t)MATMUL_BLOCK_ROWS);
    const int tokens = (int)m->tokens;
    MATMUL_NAME(matmul_strip) s;
    s.row = (const uint8_t *)b->wide[0];
    s.bytes = sizeof b->wide[0];
    s.apart = m->apart;
    for (int r = 0; r < rows; r++) memset(b->sum[r], 0, (size_t)tokens * sizeof b->sum[r][0]);
    for (int64_t at = 0; at < n; at += MATMUL_DEEP) {
        s.n = n - at < MATMUL_DEEP ? n - at : (int64_t)MATMUL_DEEP;
        s.x = m->x + at;
        MATMUL_NAME(matmul_widen)(w, row, rows, at, s.n, b->wide[0]);
        s.n = (s.n + MATMUL_LANES - 1) / MATMUL_LANES * MATMUL_LANES;
        MATMUL_NAME(matmul_deep)(s, rows, tokens, b);
    }
    for (int t = 0; t < tokens; t++)
        for (int r = 0; r < rows; r++)
            m->y[t * w->rows + row + r] =
                MATMUL_NAME(matmul_fold)(*(const vec *)b->sum[r][t]);
}

static __attribute__((noinline, unused)) MATMUL_TARGET void
MATMUL_NAME(matmul_blocks)(const matmul *m, int64_t row, int64_t end, matmul_block *b) {
    for (; row < end; row += MATMUL_BLOCK_ROWS) MATMUL_NAME(matmul_block)(m, row, end, b);
}

static __attribute__((noinline, unused)) MATMUL_TARGET void
MATMUL_NAME(matmul_blocks_apart)(const matmul *m, int64_t row, int64_t end) {
    matmul_block block;
    MATMUL_NAME(matmul_blocks)(m, row, end, &block);
}

/* A function per type: compiled without optimisation, the frame of each holds every tile of it. */
static __attribute__((noinline, unused)) MATMUL_TARGET void
MATMUL_NAME(matmul_few_integers)(const matmul *m, int64_t row, int64_t end) {
    MATMUL_NAME(matmul_few)(m, row, end, RA_Q8_0, 1);
}

static __attribute__((noinline, unused)) MATMUL_TARGET void
MATMUL_NAME(matmul_few_f32)(const matmul *m, int64_t row, int64_t end) {
    MATMUL_NAME(matmul_few)(m, row, end, RA_F32, 0);
}

static __attribute__((noinline, unused)) MATMUL_TARGET void
MATMUL_NAME(matmul_few_f16)(const matmul *m, int64_t row, int64_t end) {
    MATMUL_NAME(matmul_few)(m, row, end, RA_F16, 0);
}

static __attribute__((noinline, unused)) MATMUL_TARGET void
MATMUL_NAME(matmul_few_bf16)(const matmul *m, int64_t row, int64_t end) {
    MATMUL_NAME(matmul_few)(m, row, end, RA_BF16, 0);
}

static __attribute__((noinline, unused)) MATMUL_TARGET void
MATMUL_NAME(matmul_few_q8_0)(const matmul *m, int64_t row, int64_t end) {
    MATMUL_NAME(matmul_few)(m, row, end, RA_Q8_0, 0);
}

static inline MATMUL_TARGET void MATMUL_NAME(matmul_work)(const matmul *m, int64_t piece) {
    const int64_t from = piece * m->piece;
    const int64_t end = from + m->piece < m->w->rows ? from + m->piece : m->w->rows;
    const int32_t dtype = m->w->dtype;
    if (m->whole) MATMUL_NAME(matmul_few_integers)(m, from, end);
    else if (!m->few && pthread_equal(pthread_self(), m->caller))
        MATMUL_NAME(matmul_blocks)(m, from, end, m->own);
    else if (!m->few) MATMUL_NAME(matmul_blocks_apart)(m, from, end);
    else if (dtype == RA_F32) MATMUL_NAME(matmul_few_f32)(m, from, end);
    else if (dtype == RA_F16) MATMUL_NAME(matmul_few_f16)(m, from, end);
    else if (dtype == RA_BF16) MATMUL_NAME(matmul_few_bf16)(m, from, end);
    else MATMUL_NAME(matmul_few_q8_0)(m, from, end);
}

/* e^x within 2 ulp where |x| < 87; beyond that the power of 87 or -87. x = k ln 2 + f, |f| <=
 * ln 2 / 2, and e^f by its Taylor polynomial. */
static inline __attribute__((always_inline)) MATMUL_TARGET MATMUL_NAME(matmul_v)
MATMUL_NAME(matmul_exp)(MATMUL_NAME(matmul_v) x) {
    typedef MATMUL_NAME(matmul_v) vec;
    typedef int32_t whole __attribute__((vector_size(MATMUL_WIDTH * 4)));
    const float most = 87, magic = 12582912;           /* 1.5 * 2^23: adding it rounds */
    const whole above = (whole)(x > most), below = (whole)(x < -most);
    vec f, y, k;
    x = (vec)(((whole)x & ~(above | below)) | (above & (whole)(x * 0 + most)) |
              (below & (whole)(x * 0 - most)));
    k = x * 1.44269504f + magic;
    f = k - magic;
    f = x - f * 0.693145752f - f * 1.42860677e-6f;
    y = f * (1.0f / 5040) + 1.0f / 720;
    y = y * f + 1.0f / 120;
    y = y * f + 1.0f / 24;
    y = y * f + 1.0f / 6;
    y = y * f + 0.5f;
    y = y * f + 1;
    y = y * f + 1;
    return (vec)((whole)y + ((whole)k << 23));
}

/* Elements [from, end) of gate / (1 + e^-gate) * up; the last ones in a vector with zeros. */
static inline MATMUL_TARGET void MATMUL_NAME(matmul_gates)(const matmul_each *e, int64_t from,
                                                           int64_t end) {
    typedef MATMUL_NAME(matmul_v) vec;
    for (int64_t i = from; i < end; i += MATMUL_WIDTH) {
        const int64_t n = end - i;
        vec g, u;
        if (n >= MATMUL_WIDTH) {
            g = *(const vec *)(e->y + i);
            u = *(const vec *)(e->x + i);
            *(vec *)(e->y + i) = g / (1 + MATMUL_NAME(matmul_exp)(-g)) * u;
            continue;
        }
        g = MATMUL_NAME(matmul_last)((const uint8_t *)e->y, RA_F32, i, n);
        u = MATMUL_NAME(matmul_last)((const uint8_t *)e->x, RA_F32, i, n);
        g = g / (1 + MATMUL_NAME(matmul_exp)(-g)) * u;
        for (int64_t l = 0; l < n; l++) e->y[i + l] = g[l];
    }
}

/* A row of y = x / rms(x) * weight; the sum is double, in 8 parts. */
static inline MATMUL_TARGET void MATMUL_NAME(matmul_norm_row)(const matmul_each *e, int64_t row) {
    const float *x = e->x + row * e->n;
    float *y = e->y + row * e->n, scale;
    double part[8] = { 0 }, sum = 0;
    int64_t i = 0;
    for (; i + 8 <= e->n; i += 8)
        MATMUL_UNROLL for (int l = 0; l < 8; l++) part[l] += (double)x[i + l] * (double)x[i + l];
    for (; i < e->n; i++) sum += (double)x[i] * (double)x[i];
    for (int l = 0; l < 8; l++) sum += part[l];
    scale = (float)(1 / sqrt(sum / (double)e->n + (double)e->epsilon));
    for (i = 0; i < e->n; i++) y[i] = x[i] * scale * e->weight[i];
}

static inline MATMUL_TARGET void MATMUL_NAME(matmul_all)(const matmul_each *e, int64_t piece) {
    const int64_t from = piece * e->piece;
    const int64_t end = from + e->piece < e->rows ? from + e->piece : e->rows;
    if (e->weight)
        for (int64_t i = from; i < end; i++) MATMUL_NAME(matmul_norm_row)(e, i);
    else if (e->gate) MATMUL_NAME(matmul_gates)(e, from, end);
    else
        for (int64_t i = from; i < end; i++) e->y[i] += e->x[i];
}

#undef MATMUL_NAME
#undef MATMUL_TARGET
#undef MATMUL_WIDTH
#undef MATMUL_ROWS
#endif
