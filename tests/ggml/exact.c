/* Attention in double precision inside an engine's own graphs: a callback for llama.cpp's cb_eval,
 * which it calls after each node of FLASH_ATTN_EXT. It compares the node's result with the
 * definition, or puts the exact result in its place. And weights for random models. A shared object
 * for check.py. */
#include "ggml.h"
#include "ggml-backend.h"

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct exact {
    int replace;                       /* 1: results become exact ones */
    int64_t nodes, holes;              /* computed; of those, with a row that is no interval */
    double worst;                      /* error of a node, as a share of its results' squares */
} exact;

#if defined __x86_64__ && defined __linux__ && defined __GNUC__
#define WIDE __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define WIDE
#endif

/* The sum of n products, in eight parts. n is a multiple of eight: rows are padded with zeros. */
WIDE double exact_dot(const double *a, const double *b, int64_t n);
WIDE double exact_dot(const double *a, const double *b, int64_t n) {
    double part[8] = { 0 };
    for (int64_t i = 0; i < n; i += 8)
        for (int j = 0; j < 8; j++) part[j] += a[i + j] * b[i + j];
    return part[0] + part[1] + part[2] + part[3] + part[4] + part[5] + part[6] + part[7];
}

WIDE void exact_add(double *x, const double *v, double p, int64_t n);
WIDE void exact_add(double *x, const double *v, double p, int64_t n) {
    for (int64_t i = 0; i < n; i++) x[i] += p * v[i];
}

static int64_t up(int64_t n) { return (n + 7) / 8 * 8; }

/* Row r of a head of a sequence, in double, padded. */
static void row_of(const struct ggml_tensor *x, int64_t r, int64_t head, int64_t sequence,
                   float *space, double *row) {
    const char *at = (const char *)x->data + r * (int64_t)x->nb[1] + head * (int64_t)x->nb[2] +
        sequence * (int64_t)x->nb[3];
    const float *from = space;
    if (x->type == GGML_TYPE_F32) from = (const float *)(const void *)at;
    else ggml_get_type_traits(x->type)->to_float(at, space, x->ne[0]);
    for (int64_t i = 0; i < up(x->ne[0]); i++) row[i] = i < x->ne[0] ? (double)from[i] : 0;
}

static double *rows_of(const struct ggml_tensor *x, int64_t head, int64_t sequence) {
    const int64_t wide = up(x->ne[0]);
    float *space = malloc((size_t)wide * sizeof *space);
    double *rows = malloc((size_t)(x->ne[1] * wide) * sizeof *rows);
    for (int64_t r = 0; space && rows && r < x->ne[1]; r++)
        row_of(x, r, head, sequence, space, rows + r * wide);
    free(space);
    return rows;
}

static float slope_of(float max_bias, int64_t heads, int64_t h) {
    const int64_t two = (int64_t)1 << (int)floor(log2((double)heads));
    if (!(max_bias > 0)) return 1;
    return h < two ? powf(powf(2, -max_bias / (float)two), (float)(h + 1))
                   : powf(powf(2, -max_bias / 2 / (float)two), (float)(2 * (h - two) + 1));
}

struct keys { const double *k, *v; int64_t n, k_wide, v_wide; };

/* One row of a head: scores, then x, the exact result. 1: visible keys are not an interval. */
static int row_exactly(const struct ggml_tensor *n, const struct keys *all, const double *q,
                       int64_t row, int64_t head, int64_t sequence, double *p, double *x) {
    const struct ggml_tensor *m = n->src[3], *s = n->src[4];
    float params[3];
    memcpy(params, n->op_params, sizeof params);
    const float slope = slope_of(params[1], n->src[0]->ne[2], head);
    const double sink = s ? (double)((const float *)s->data)[head] : -HUGE_VAL;
    double top = sink, sum;
    int runs = 0, before = 0;
    const ggml_fp16_t *mask = !m ? NULL : (const ggml_fp16_t *)(const void *)
        ((const char *)m->data + row * (int64_t)m->nb[1] + head % m->ne[2] * (int64_t)m->nb[2] +
         sequence % m->ne[3] * (int64_t)m->nb[3]);
    for (int64_t j = 0; j < all->n; j++) {
        const float bias = mask ? ggml_fp16_to_fp32(mask[j]) : 0;
        const int seen = bias > -INFINITY;
        runs += seen && !before;
        before = seen;
        p[j] = -HUGE_VAL;
        if (!seen) continue;
        p[j] = exact_dot(q, all->k + j * all->k_wide, all->k_wide) * (double)params[0];
        if (params[2] > 0) p[j] = (double)params[2] * tanh(p[j] / (double)params[2]);
        p[j] += (double)(slope * bias);
        if (p[j] > top) top = p[j];
    }
    sum = s ? exp(sink - top) : 0;
    memset(x, 0, (size_t)all->v_wide * sizeof *x);
    for (int64_t j = 0; j < all->n; j++) {
        const double e = p[j] > -HUGE_VAL ? exp(p[j] - top) : 0;
        sum += e;
        if (e > 0) exact_add(x, all->v + j * all->v_wide, e, all->v_wide);
    }
    for (int64_t e = 0; e < all->v_wide; e++) x[e] = sum > 0 ? x[e] / sum : 0;
    return runs > 1;
}

static int head_exactly(struct ggml_tensor *n, int64_t head, int64_t sequence, int replace,
                        double *error, double *norm) {
    const struct ggml_tensor *q = n->src[0], *k = n->src[1], *v = n->src[2];
    const int64_t kv = head / (q->ne[2] / k->ne[2]);
    double *rows = rows_of(q, head, sequence);
    double *ks = rows_of(k, kv, sequence), *vs = rows_of(v, kv, sequence);
    double *p = malloc((size_t)k->ne[1] * sizeof *p), x[1024];
    const struct keys all = { ks, vs, k->ne[1], up(k->ne[0]), up(v->ne[0]) };
    int holes = 0;
    for (int64_t r = 0; r < q->ne[1]; r++) {
        float *out = (float *)(void *)((char *)n->data + head * (int64_t)n->nb[1] +
                                       r * (int64_t)n->nb[2] + sequence * (int64_t)n->nb[3]);
        holes |= row_exactly(n, &all, rows + r * all.k_wide, r, head, sequence, p, x);
        for (int64_t e = 0; e < v->ne[0]; e++) {
            *error += ((double)out[e] - x[e]) * ((double)out[e] - x[e]);
            *norm += x[e] * x[e];
            if (replace) out[e] = (float)x[e];
        }
    }
    free(rows);
    free(ks);
    free(vs);
    free(p);
    return holes;
}

bool exact_node(struct ggml_tensor *n, bool ask, void *user);
bool exact_node(struct ggml_tensor *n, bool ask, void *user) {
    exact *x = user;
    double error = 0, norm = 0;
    int holes = 0;
    if (n->op != GGML_OP_FLASH_ATTN_EXT) return !ask;
    if (ask) return true;
    for (int64_t s = 0; s < n->src[0]->ne[3]; s++)
        for (int64_t h = 0; h < n->src[0]->ne[2]; h++)
            holes |= head_exactly(n, h, s, x->replace, &error, &norm);
    x->nodes++;
    x->holes += holes;
    if (!(error <= x->worst * norm)) x->worst = error / norm;
    return true;
}

/* Random weights that make attention matter: matrices that keep the size of vectors, norms of about
 * 1. They follow from the tensor's name. */
void exact_weights(struct ggml_tensor *t, void *user);
void exact_weights(struct ggml_tensor *t, void *user) {
    const int64_t n = ggml_nelements(t);
    const float size = t->ne[1] > 1 ? 2.4f / sqrtf((float)t->ne[0]) : 0.3f;
    const float middle = strstr(t->name, "norm") ? 1 : 0;
    float *x = malloc((size_t)n * sizeof *x);
    uint64_t seed = 88172645463325252u;
    (void)user;
    for (const char *c = t->name; *c; c++) seed = (seed ^ (uint8_t)*c) * UINT64_C(0x100000001B3);
    for (int64_t i = 0; i < n; i++) {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        x[i] = middle + size * ((float)(seed >> 40) / 8388608.0f - 1.0f);
    }
    if (t->type == GGML_TYPE_F32) ggml_backend_tensor_set(t, x, 0, ggml_nbytes(t));
    free(x);
}
