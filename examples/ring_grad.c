/* Training over the ring: forward and backward of two attention layers, on 1 rank and on 4.
 *
 *   cc -O2 -I. examples/ring_grad.c -o ring_grad -lpthread -lm && ./ring_grad
 *
 * Each layer is x + Attention(x Wq, x Wk, x Wv) Wo, causal, 8 query heads over 2 kv heads; the loss
 * is half the mean square of the result. You will see both losses; how many numbers of the output
 * and of the gradient of the input have other bits on 4 ranks than on 1 (none: shards are cut on
 * the grid of 64 tokens); how far apart the gradients of the weights are (they differ in the last
 * digits, because each rank sums over its own tokens before the ranks are added up); and the
 * gradient of one weight compared with the difference of two losses. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define RINGATTN_IMPLEMENTATION
#include "ringattn.h"

enum { LAYERS = 2, T = 1024, H = 8, HKV = 2, D = 16, C = H * D, CKV = HKV * D, RANKS = 4 };
enum { WQ = C * C, WK = C * CKV, WV = C * CKV, WO = C * C, WEIGHTS = WQ + WK + WV + WO };

typedef struct run {                   /* of one number of ranks; by position, or sums over ranks */
    int ranks;
    const float *w;                    /* [LAYERS][WEIGHTS] */
    float x[T][C], d_x[T][C];
    double loss[RANKS];                /* each rank's share */
    float d_w[RANKS][LAYERS][WEIGHTS];
} run;

typedef struct layer { float *x, *q, *k, *v, *o, *lse; } layer;      /* [rows][...], kept */
typedef struct seat { ra_plan *plan; ra_ring *ring; int64_t rows; } seat; /* of one rank */

/* out[n][p] += a[n][m] b[m][p], with a or b transposed in memory. */
static void multiply(float *out, const float *a, const float *b, const int64_t size[3], int a_t,
                     int b_t) {
    const int64_t n = size[0], m = size[1], p = size[2];
    for (int64_t i = 0; i < n; i++)
        for (int64_t k = 0; k < m; k++) {
            const float x = a_t ? a[k * n + i] : a[i * m + k];
            for (int64_t j = 0; j < p; j++)
                out[i * p + j] += x * (b_t ? b[j * m + k] : b[k * p + j]);
        }
}

static void project(float *out, const float *x, const float *w, int64_t rows, int64_t from,
                    int64_t to) {
    const int64_t size[3] = { rows, from, to };
    multiply(out, x, w, size, 0, 0);
}

/* Back through out = x w: d_x += d_out w^T, d_w += x^T d_out. */
static void project_back(float *d_x, float *d_w, const float *d_out, const float *x,
                         const float *w, const int64_t shape[3]) {
    const int64_t to_x[3] = { shape[0], shape[2], shape[1] };
    const int64_t to_w[3] = { shape[1], shape[0], shape[2] };
    multiply(d_x, d_out, w, to_x, 0, 1);
    multiply(d_w, x, d_out, to_w, 1, 0);
}

static float *floats(int64_t n) {
    float *x = (float *)calloc((size_t)n, sizeof *x);
    if (x) return x;
    fprintf(stderr, "no memory\n");
    exit(1);
}

static ra_tensors tensors_of(const layer *l) {
    ra_tensors t;
    memset(&t, 0, sizeof t);
    t.q.data = l->q; t.k.data = l->k; t.v.data = l->v; t.o.data = l->o; t.lse.data = l->lse;
    return t;
}

static ra_status forward(const seat *e, const float *w, layer *l, float *next) {
    const int64_t rows = e->rows;
    ra_tensors t;
    ra_status s;
    l->q = floats(rows * C); l->k = floats(rows * CKV); l->v = floats(rows * CKV);
    l->o = floats(rows * C); l->lse = floats(rows * H);
    project(l->q, l->x, w, rows, C, C);
    project(l->k, l->x, w + WQ, rows, C, CKV);
    project(l->v, l->x, w + WQ + WK, rows, C, CKV);
    t = tensors_of(l);
    s = ra_forward(e->plan, e->ring, &t, RA_NO_DEADLINE);
    memcpy(next, l->x, (size_t)(rows * C) * sizeof *next);
    project(next, l->o, w + WQ + WK + WV, rows, C, C);
    return s;
}

/* d_x: of the layer's output, becomes that of its input. */
static ra_status backward(const seat *e, const float *w, const layer *l, float *d_x, float *d_w) {
    const int64_t rows = e->rows, q[3] = { rows, C, C };
    const int64_t kv[3] = { rows, C, CKV };
    float *d_o = floats(rows * C), *d_q = floats(rows * C);
    float *d_k = floats(rows * CKV), *d_v = floats(rows * CKV);
    ra_tensors t = tensors_of(l);
    ra_status s;
    project_back(d_o, d_w + WQ + WK + WV, d_x, l->o, w + WQ + WK + WV, q);
    t.d_o.data = d_o; t.d_q.data = d_q; t.d_k.data = d_k; t.d_v.data = d_v;    /* added to */
    s = ra_backward(e->plan, e->ring, &t, RA_NO_DEADLINE);
    project_back(d_x, d_w, d_q, l->x, w, q);
    project_back(d_x, d_w + WQ, d_k, l->x, w + WQ, kv);
    project_back(d_x, d_w + WQ + WK, d_v, l->x, w + WQ + WK, kv);
    free(d_o); free(d_q); free(d_k); free(d_v);
    return s;
}

/* Input of the first layer: any function of the position will do. */
static float input(int64_t pos, int c) { return sinf(0.37f * (float)(pos % 97) * (float)(c + 1)); }

/* Rows of this rank to or from an array by position. */
static void rows_copy(const ra_plan *plan, int rank, float *rows, float (*all)[C], int out) {
    ra_run part[2];
    int32_t n = ra_plan_q_runs(plan, rank, 0, part, 2);
    for (int32_t i = 0; i < n; i++)
        for (int64_t j = 0; j < part[i].count; j++, rows += C) {
            float *at = all[part[i].first + j];
            if (out) memcpy(at, rows, C * sizeof *rows);
            for (int c = 0; c < C && !out; c++) rows[c] = input(part[i].first + j, c);
        }
}

static ra_status on_rank(ra_world *world, int rank, void *user) {
    run *r = (run *)user;
    seat e = { NULL, NULL, 0 };
    ra_plan_report report;
    ra_error error = {0};
    ra_ring_desc rd = {0};
    ra_failure failure;
    ra_desc d;
    layer l[LAYERS + 1];
    ra_status s;
    memset(l, 0, sizeof l);
    d = ra_desc_make(H, HKV, D, RA_F32, RA_MASK_CAUSAL);
    d.train = 1;
    d.ranks = r->ranks; d.rank = rank; d.tokens = T;
    d.layout.kind = RA_LAYOUT_ZIGZAG;
    d.error = rd.error = &error;
    s = ra_plan_create(&e.plan, &d, NULL);
    if (!s) s = ra_ring_create(&e.ring, e.plan, ra_world_transport(world, rank), &rd);
    if (s) {
        fprintf(stderr, "rank %d: %s: %s %s\n", rank, ra_status_text(s), error.field, error.text);
        ra_plan_destroy(e.plan);
        return s;
    }
    (void)ra_plan_query(e.plan, rank, &report);
    e.rows = report.q_rows;
    for (int i = 0; i <= LAYERS; i++) l[i].x = floats(e.rows * C);
    rows_copy(e.plan, rank, l[0].x, NULL, 0);
    for (int i = 0; i < LAYERS && !s; i++)
        s = forward(&e, r->w + i * WEIGHTS, &l[i], l[i + 1].x);
    rows_copy(e.plan, rank, l[LAYERS].x, r->x, 1);
    for (int64_t i = 0; i < e.rows * C; i++) {      /* the loss, and d_x from x */
        r->loss[rank] += 0.5 * (double)l[LAYERS].x[i] * (double)l[LAYERS].x[i] / (T * C);
        l[LAYERS].x[i] /= T * C;
    }
    for (int i = LAYERS - 1; i >= 0 && !s; i--)
        s = backward(&e, r->w + i * WEIGHTS, &l[i], l[LAYERS].x, r->d_w[rank][i]);
    rows_copy(e.plan, rank, l[LAYERS].x, r->d_x, 1);
    for (int i = 0; i <= LAYERS; i++) {
        free(l[i].x); free(l[i].q); free(l[i].k); free(l[i].v); free(l[i].o); free(l[i].lse);
    }
    if (s && ra_ring_failure(e.ring, &failure) == RA_OK) fprintf(stderr, "%s\n", failure.text);
    else if (s) fprintf(stderr, "rank %d: %s\n", rank, ra_ring_error(e.ring)->text);
    ra_ring_destroy(e.ring);
    ra_plan_destroy(e.plan);
    return s;
}

static double loss_of(const run *r) {
    double sum = 0;
    for (int i = 0; i < r->ranks; i++) sum += r->loss[i];
    return sum;
}

static int train(run *r, int ranks, const float *w) {
    memset(r, 0, sizeof *r);
    r->ranks = ranks;
    r->w = w;
    return ra_world_run(ranks, on_rank, r, NULL);
}

static int64_t other_bits(const float *a, const float *b, int64_t n) {
    int64_t other = 0;
    for (int64_t i = 0; i < n; i++) other += memcmp(a + i, b + i, sizeof *a) != 0;
    return other;
}

int main(void) {
    static run one, four, more, less;
    static float w[LAYERS * WEIGHTS];
    double apart = 0, size = 0, slope, sum = 0;
    const int probe = WQ + 17;                             /* a weight of layer 0's Wk */
    uint32_t x = 1;
    int rank;
    for (int i = 0; i < LAYERS * WEIGHTS; i++) {
        x = x * 1664525u + 1013904223u;
        w[i] = ((float)(x >> 8) / 8388608.0f - 1.0f) * 0.15f;
    }
    if (train(&one, 1, w) || train(&four, RANKS, w)) {
        fprintf(stderr, "a pass failed\n");
        return 1;
    }
    for (int i = 0; i < LAYERS * WEIGHTS; i++) {
        const double alone = (double)one.d_w[0][i / WEIGHTS][i % WEIGHTS];
        for (sum = 0, rank = 0; rank < RANKS; rank++)
            sum += (double)four.d_w[rank][i / WEIGHTS][i % WEIGHTS];
        apart = fmax(apart, fabs(sum - alone));
        size = fmax(size, fabs(alone));
    }
    w[probe] += 0.01f;
    if (train(&more, RANKS, w)) return 1;
    w[probe] -= 0.02f;
    if (train(&less, RANKS, w)) return 1;
    slope = (loss_of(&more) - loss_of(&less)) / 0.02;
    for (sum = 0, rank = 0; rank < RANKS; rank++) sum += (double)four.d_w[rank][0][probe];
    printf("%d layers, %d tokens, %d/%d heads of %d, causal, zigzag\n", LAYERS, T, H, HKV, D);
    printf("loss                    1 rank %.9f   %d ranks %.9f\n", loss_of(&one), RANKS,
           loss_of(&four));
    printf("output                  %lld of %d numbers have other bits\n",
           (long long)other_bits(one.x[0], four.x[0], T * C), T * C);
    printf("gradient of the input   %lld of %d numbers have other bits\n",
           (long long)other_bits(one.d_x[0], four.d_x[0], T * C), T * C);
    printf("gradients of weights    at most %.2g apart, the largest is %.2g\n", apart, size);
    printf("one weight of layer 0   gradient %.6g, by difference of losses %.6g\n", sum, slope);
    return other_bits(one.x[0], four.x[0], T * C) || other_bits(one.d_x[0], four.d_x[0], T * C) ||
           apart > 1e-5 * size || fabs(sum - slope) > 0.02 * fabs(slope) + 1e-7;
}
