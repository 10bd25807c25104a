/* Nodes of FLASH_ATTN_EXT in graphs of an engine's backend, beside the definition in double. A
 * shared object: a process that has an engine loads it and calls nodes_run (see check.py). */
#include "ggml.h"
#include "ggml-alloc.h"
#include "ggml-backend.h"

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* How the two nodes of a graph are masked. HOLES: keys of two sequences alternate. CAST: the graph
 * makes the mask. WRITTEN: it is another one for the second node. */
enum { NONE, CAUSAL, WINDOW, HOLES, STREAMS, PER_HEAD, SLOPES, CAST, WRITTEN, MASKS };

typedef struct node {
    enum ggml_type type;
    int k_dim, v_dim, heads, kv_heads, rows, keys, streams, mask, sinks, mla;
    float softcap;
} node;

typedef struct world {                 /* what a graph reads, in f32, and what it wrote */
    node n;
    float *q, *k, *v, *mask[2], *sinks, *out[2];
} world;

static _Thread_local uint64_t seed;

static float uniform(void) {
    seed ^= seed << 13;
    seed ^= seed >> 7;
    seed ^= seed << 17;
    return (float)(seed >> 40) / 8388608.0f - 1.0f;
}

static float *floats(size_t n, float size) {
    float *x = malloc((n + 1) * sizeof *x);
    for (size_t i = 0; i < n; i++) x[i] = size * uniform();
    return x;
}

static int sees(const node *n, int which, int stream, int row, int key) {
    const int own = n->keys - n->rows + row - 3 * stream;
    if (n->mask == WINDOW && key <= own - 9) return 0;
    if (n->mask == HOLES && (key + row) % 2 && key != own) return 0;
    if (n->mask == WRITTEN && which && key < 5) return 0;
    return key <= own;
}

static float masked(const node *n, int which, int stream, int head, int row, int key) {
    if (!sees(n, which, stream, row, key)) return -INFINITY;
    if (n->mask == SLOPES) return -(float)abs(n->keys - n->rows + row - key);
    return n->mask == PER_HEAD ? (float)((head * 7 + row * 3 + key) % 9) / 4 - 1 : 0;
}

static float slope_of(const node *n, int head) {
    const int two = 1 << (int)floor(log2(n->heads));
    if (n->mask != SLOPES) return 1;
    return head < two ? powf(2, -8.0f / (float)two * (float)(head + 1))
                      : powf(2, -4.0f / (float)two * (float)(2 * (head - two) + 1));
}

static int mask_heads(const node *n) { return n->mask == PER_HEAD ? n->heads : 1; }
static int padded(const node *n) { return (n->rows + 63) / 64 * 64; }

static float *mask_of(const node *n, int which) {
    const int heads = mask_heads(n), rows = padded(n);
    float *m = floats((size_t)(n->streams * heads * rows * n->keys), 0);
    for (int s = 0; s < n->streams; s++) for (int h = 0; h < heads; h++)
        for (int r = 0; r < rows; r++) for (int k = 0; k < n->keys; k++)
            m[((s * heads + h) * rows + r) * n->keys + k] =
                r < n->rows ? masked(n, which, s, h, r, k) : -INFINITY;
    return m;
}

/* One row by definition. Adds the squares of errors and of values. */
static void judge(const world *w, int which, int64_t row, double *error, double *norm) {
    const node *n = &w->n;
    const int h = (int)(row % n->heads), r = (int)(row / n->heads % n->rows);
    const int s = (int)(row / n->heads / n->rows), kv = h / (n->heads / n->kv_heads);
    const float *q = w->q + ((s * n->rows + r) * n->heads + h) * n->k_dim;
    const float *out = w->out[which] + row * n->v_dim;
    const double scale = 1 / sqrt(n->k_dim) * (which ? 0.5 : 1), cap = (double)n->softcap;
    double sum = 0, top = -INFINITY, *p = malloc((size_t)n->keys * sizeof *p);
    for (int j = 0; j < n->keys; j++) {
        const float *k = w->k + ((s * n->keys + j) * n->kv_heads + kv) * n->k_dim;
        double x = 0;
        for (int e = 0; e < n->k_dim; e++) x += (double)q[e] * (double)k[e];
        x *= scale;
        if (cap > 0) x = cap * tanh(x / cap);
        if (n->mask) x += (double)(slope_of(n, h) * masked(n, which, s, h, r, j));
        p[j] = x;
        if (x > top) top = x;
    }
    if (n->sinks && (double)w->sinks[h] > top) top = (double)w->sinks[h];
    for (int j = 0; j < n->keys; j++) sum += p[j] = exp(p[j] - top);
    if (n->sinks) sum += exp((double)w->sinks[h] - top);
    for (int e = 0; e < n->v_dim; e++) {
        double x = 0;
        for (int j = 0; j < n->keys; j++) {
            const int64_t at = (int64_t)(s * n->keys + j) * n->kv_heads + kv;
            x += p[j] * (double)(n->mla ? w->k[at * n->k_dim + e] : w->v[at * n->v_dim + e]);
        }
        x /= sum;
        *norm += x * x;
        *error += ((double)out[e] - x) * ((double)out[e] - x);
    }
    free(p);
}

/* Quantises x into the tensor, and x becomes what is stored. */
static void store(struct ggml_tensor *t, float *x) {
    const size_t n = (size_t)ggml_nelements(t);
    void *data = malloc(ggml_nbytes(t) + 64);
    if (t->type == GGML_TYPE_F32) memcpy(data, x, n * 4);
    else ggml_quantize_chunk(t->type, x, data, 0, (int64_t)n / t->ne[0], t->ne[0], NULL);
    if (t->type != GGML_TYPE_F32) ggml_get_type_traits(t->type)->to_float(data, x, (int64_t)n);
    ggml_backend_tensor_set(t, data, 0, ggml_nbytes(t));
    free(data);
}

typedef struct tensors { struct ggml_tensor *q, *k, *v, *m[2], *m32, *sinks, *out[2]; } tensors;

/* Heads of a token side by side, as llama.cpp stores them; queries, keys and values are views. */
static struct ggml_cgraph *build(struct ggml_context *c, const node *n, tensors *t) {
    struct ggml_cgraph *g = ggml_new_graph(c);
    struct ggml_tensor *k, *v, *m = NULL;
    t->q = ggml_new_tensor_4d(c, GGML_TYPE_F32, n->k_dim, n->heads, n->rows, n->streams);
    t->k = ggml_new_tensor_4d(c, n->type, n->k_dim, n->kv_heads, n->keys, n->streams);
    t->v = n->mla ? NULL
                  : ggml_new_tensor_4d(c, n->type, n->v_dim, n->kv_heads, n->keys, n->streams);
    t->sinks = ggml_new_tensor_1d(c, GGML_TYPE_F32, n->heads);
    for (int i = 0; i < 2; i++)
        t->m[i] = ggml_new_tensor_4d(c, GGML_TYPE_F16, n->keys, padded(n), mask_heads(n),
                                     n->streams);
    t->m32 = ggml_new_tensor_4d(c, GGML_TYPE_F32, n->keys, padded(n), mask_heads(n), n->streams);
    k = ggml_permute(c, t->k, 0, 2, 1, 3);
    v = n->mla ? ggml_view_4d(c, k, n->v_dim, k->ne[1], k->ne[2], k->ne[3], k->nb[1], k->nb[2],
                              k->nb[3], 0)
               : ggml_permute(c, t->v, 0, 2, 1, 3);
    if (n->mask == CAST) m = ggml_cast(c, t->m32, GGML_TYPE_F16);
    else if (n->mask) m = t->m[0];
    for (int i = 0; i < 2; i++) {
        const float scale = (i ? 0.5f : 1.0f) / sqrtf((float)n->k_dim);
        if (i && n->mask == WRITTEN) ggml_build_forward_expand(g, ggml_cpy(c, t->m[1], m));
        t->out[i] = ggml_flash_attn_ext(c, ggml_permute(c, t->q, 0, 2, 1, 3), k, v, m, scale,
                                        n->mask == SLOPES ? 8 : 0, n->softcap);
        if (n->sinks) ggml_flash_attn_ext_add_sinks(t->out[i], t->sinks);
        ggml_build_forward_expand(g, t->out[i]);
    }
    return g;
}

static void fill(world *w, const tensors *t) {
    const node *n = &w->n;
    const size_t rows = (size_t)(n->rows * n->streams), keys = (size_t)(n->keys * n->streams);
    w->q = floats(rows * (size_t)(n->heads * n->k_dim), 2);
    w->k = floats(keys * (size_t)(n->kv_heads * n->k_dim), 2);
    w->v = floats(keys * (size_t)(n->kv_heads * n->v_dim), 1);
    w->sinks = floats((size_t)n->heads, 3);
    store(t->q, w->q);
    store(t->k, w->k);
    if (t->v) store(t->v, w->v);
    store(t->sinks, w->sinks);
    for (int i = 0; i < 2; i++) {
        w->mask[i] = mask_of(n, i);
        w->out[i] = floats(rows * (size_t)(n->heads * n->v_dim), 0);
        if (i == 0) store(t->m32, w->mask[i]);
        store(t->m[i], w->mask[i]);
    }
}

/* The worst of both nodes' errors, as a share of the results' squares; hash: of their bits. */
static double run(ggml_backend_t b, const node *n, uint64_t *hash) {
    const struct ggml_init_params params = { 1 << 20, NULL, true };
    struct ggml_context *c = ggml_init(params);
    tensors t;
    world w = { *n, NULL, NULL, NULL, { NULL, NULL }, NULL, { NULL, NULL } };
    struct ggml_cgraph *g = build(c, n, &t);
    ggml_backend_buffer_t memory = ggml_backend_alloc_ctx_tensors(c, b);
    double worst = 0;
    fill(&w, &t);
    if (ggml_backend_graph_compute(b, g) != GGML_STATUS_SUCCESS) worst = INFINITY;
    for (int i = 0; i < 2; i++) {
        double error = 0, norm = 0;
        ggml_backend_tensor_get(t.out[i], w.out[i], 0, ggml_nbytes(t.out[i]));
        for (int64_t r = 0; r < n->heads * n->rows * n->streams; r++)
            judge(&w, i, r, &error, &norm);
        if (!(error / norm <= worst)) worst = error / norm;
        for (size_t j = 0; j < ggml_nbytes(t.out[i]) / 4; j++) {
            uint32_t bits;
            memcpy(&bits, w.out[i] + j, 4);
            *hash = (*hash ^ bits) * UINT64_C(0x100000001B3);
        }
        free(w.mask[i]);
        free(w.out[i]);
    }
    free(w.q); free(w.k); free(w.v); free(w.sinks);
    ggml_backend_buffer_free(memory);
    ggml_free(c);
    return worst;
}

/* Runs all cases on a backend of the device, with so many threads. The error of each node must be
 * below `most`. Prints the failures and a line with what passed; returns the number of nodes. */
int nodes_run(const char *device, int threads, double most);
int nodes_run(const char *device, int threads, double most) {
    static const enum ggml_type types[] = { GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16,
                                            GGML_TYPE_Q8_0, GGML_TYPE_Q4_0 };
    static const int shapes[][5] = {   /* k_dim, v_dim, heads, kv_heads, mla */
        { 64, 64, 8, 2, 0 }, { 128, 128, 6, 3, 0 }, { 96, 32, 5, 5, 0 }, { 576, 512, 4, 1, 1 } };
    ggml_backend_t b = ggml_backend_init_by_name(device, NULL);
    enum { TYPES = sizeof types / sizeof *types };
    uint64_t hash = UINT64_C(0xCBF29CE484222325);
    int passed = 0, bad = 0;
    double worst = 0;
    if (!b) return -1;
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(ggml_backend_get_device(b));
    void *p = ggml_backend_reg_get_proc_address(reg, "ggml_backend_set_n_threads");
    ggml_backend_set_n_threads_t set;
    memcpy(&set, &p, sizeof set);
    set(b, threads);
    seed = 88172645463325252u;
    for (int i = 0; i < TYPES * 4 * MASKS * 4; i++) {
        const int *shape = shapes[i / TYPES % 4], mask = i / TYPES / 4 % MASKS;
        const int way = i / TYPES / 4 / MASKS;
        const node n = { types[i % TYPES], shape[0], shape[1], shape[2], shape[3],
                         way == 0 ? 1 : way == 1 ? 3 : way == 2 ? 37 : 70, 96 + 32 * way,
                         mask == STREAMS ? 3 : 1, mask, (i + way) % 3 == 0, shape[4],
                         (i + way) % 7 == 0 && !shape[4] ? 20.0f : 0 };
        if (shape[4] && way == 3) continue;
        const double error = run(b, &n, &hash);
        if (!(error <= worst)) worst = error;
        if (error <= most) {
            passed++;
            continue;
        }
        bad++;
        printf("type %d D %d/%d heads %d/%d rows %d keys %d mask %d sinks %d cap %g: %.2e\n",
               n.type, n.k_dim, n.v_dim, n.heads, n.kv_heads, n.rows, n.keys, n.mask, n.sinks,
               (double)n.softcap, error);
    }
    ggml_backend_free(b);
    printf("%s, %d threads: bits %016llx, worst error %.1e\n", device, threads,
           (unsigned long long)hash, worst);
    printf("%d passed, %d failed\n", passed, bad);
    fflush(stdout);
    return bad ? -bad : 2 * passed;
}

#ifdef NODES_PROGRAM
#include <pthread.h>

static void *one(void *threads) {
    return nodes_run("CPU", (int)(intptr_t)threads, 1e-7) > 0 ? threads : NULL;
}

/* Contexts of two threads at a time, in a program that is linked with the engine. */
int main(void) {
    pthread_t id;
    void *good;
    ggml_backend_load_all();
    if (pthread_create(&id, NULL, one, (void *)(intptr_t)2)) return 1;
    if (!one((void *)(intptr_t)1)) return 1;
    return pthread_join(id, &good) || !good;
}
#endif
