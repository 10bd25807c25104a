/* examples/ring_train: the loss and every gradient compared with a plain pass in double precision,
 * and with passes that have the mistakes of such trainers planted; equal bits on 1 to 16 ranks;
 * checkpoints that are damaged, foreign, or whose writing was killed; the exported model. */
#define _DEFAULT_SOURCE 1
#define _POSIX_C_SOURCE 200809L
#define RINGATTN_IMPLEMENTATION
#define RING_TRAIN_NO_MAIN
#include "examples/infer/engine.h"
#include "examples/ring_train.c"
#include "harness.h"
#include "examples/infer/tokenizer.h"
#include "examples/train/documents.h"

#include <sys/file.h>
#include <sys/resource.h>
#include <sys/wait.h>

enum { TOKENS = 1024 };

/* -------------------------------------------------------------------------- reference
 * Plain loops in double precision. A plant is a mistake. */
enum { SOUND_REFERENCE, LABEL_OF_FRONT_EDGE, LABEL_OF_BACK_EDGE, DIVIDED_BY_RANKS,
       POSITIONS_OF_ROWS, CUT_BETWEEN_SHARDS, PLANTS };

typedef struct ref_layer {
    double *x, *norm, *q, *k, *v, *weights, *o, *mid, *feed_norm, *gate, *up, *out;
} ref_layer;

typedef struct ref {
    const net *n;
    const uint8_t *text;
    int plant;
    double *grad, loss;                /* [n->size] */
} ref;

static double *zeros(int64_t n) {
    double *x = (double *)calloc((size_t)n, sizeof *x);
    if (!x) abort();
    return x;
}

static void ref_product(const ref *r, double *out, const double *x, const net_tensor *t) {
    for (int64_t i = 0; i < TOKENS; i++)
        for (int64_t j = 0; j < t->rows; j++) {
            double sum = 0;
            for (int64_t c = 0; c < t->columns; c++)
                sum += x[i * t->columns + c] * (double)r->n->w[t->at + j * t->columns + c];
            out[i * t->rows + j] += sum;
        }
}

static void ref_product_back(const ref *r, double *d_x, const double *d, const double *x,
                             const net_tensor *t) {
    for (int64_t i = 0; i < TOKENS; i++)
        for (int64_t j = 0; j < t->rows; j++)
            for (int64_t c = 0; c < t->columns; c++) {
                const int64_t at = t->at + j * t->columns + c;
                d_x[i * t->columns + c] += d[i * t->rows + j] * (double)r->n->w[at];
                r->grad[at] += d[i * t->rows + j] * x[i * t->columns + c];
            }
}

static void ref_norm(const ref *r, double *y, const double *x, const net_tensor *t) {
    for (int64_t i = 0; i < TOKENS; i++, x += t->columns, y += t->columns) {
        double sum = 0;
        for (int64_t c = 0; c < t->columns; c++) sum += x[c] * x[c];
        for (int64_t c = 0; c < t->columns; c++)
            y[c] = x[c] / sqrt(sum / (double)t->columns + (double)train_epsilon) *
                   (double)r->n->w[t->at + c];
    }
}

static void ref_norm_back(const ref *r, double *d_x, const double *d, const double *x,
                          const net_tensor *t) {
    const double n = (double)t->columns;
    for (int64_t i = 0; i < TOKENS; i++, x += t->columns, d += t->columns, d_x += t->columns) {
        double sum = 0, along = 0;
        for (int64_t c = 0; c < t->columns; c++) sum += x[c] * x[c];
        const double rms = sqrt(sum / n + (double)train_epsilon);
        for (int64_t c = 0; c < t->columns; c++) {
            along += d[c] * (double)r->n->w[t->at + c] * x[c];
            r->grad[t->at + c] += d[c] * x[c] / rms;
        }
        for (int64_t c = 0; c < t->columns; c++)
            d_x[c] += d[c] * (double)r->n->w[t->at + c] / rms -
                      x[c] * along / (n * rms * rms * rms);
    }
}

static void ref_rope(const ref *r, double *x, int64_t heads, double sign) {
    const int64_t dim = r->n->s.dim;
    for (int64_t i = 0; i < TOKENS * heads; i++, x += dim)
        for (int64_t c = 0; c < dim; c += 2) {
            int64_t p = i / heads;
            if (r->plant == POSITIONS_OF_ROWS && p >= TOKENS * 3 / 4) p -= TOKENS / 2;
            const double a = sign * (double)p * pow(1e6, -(double)c / (double)dim);
            const double y = x[c] * sin(a) + x[c + 1] * cos(a);
            x[c] = x[c] * cos(a) - x[c + 1] * sin(a);
            x[c + 1] = y;
        }
}

static int ref_sees(const ref *r, int64_t i, int64_t j) {
    return j <= i && (r->plant != CUT_BETWEEN_SHARDS || i / (TOKENS / 4) == j / (TOKENS / 4));
}

static void ref_attention(const ref *r, ref_layer *l) {
    const net_shape *s = &r->n->s;
    for (int64_t h = 0; h < s->heads; h++)
        for (int64_t i = 0; i < TOKENS; i++) {
            const int64_t g = h / (s->heads / s->kv_heads), dim = s->dim;
            double *w = l->weights + (h * TOKENS + i) * TOKENS, sum = 0;
            const double *q = l->q + (i * s->heads + h) * dim;
            for (int64_t j = 0; j <= i; j++) {
                const double *k = l->k + (j * s->kv_heads + g) * dim;
                double score = 0;
                if (!ref_sees(r, i, j)) continue;
                for (int64_t c = 0; c < dim; c++) score += q[c] * k[c];
                sum += w[j] = exp(score / sqrt((double)dim));
            }
            for (int64_t j = 0; j <= i; j++) {
                w[j] /= sum;
                for (int64_t c = 0; c < dim; c++)
                    l->o[(i * s->heads + h) * dim + c] +=
                        w[j] * l->v[(j * s->kv_heads + g) * dim + c];
            }
        }
}

static void ref_attention_back(const ref *r, const ref_layer *l, const double *d_o, double *d_q,
                               double *d_k, double *d_v) {
    const net_shape *s = &r->n->s;
    const int64_t dim = s->dim;
    for (int64_t h = 0; h < s->heads; h++)
        for (int64_t i = 0; i < TOKENS; i++) {
            const int64_t at = (i * s->heads + h) * dim, g = h / (s->heads / s->kv_heads);
            const double *w = l->weights + (h * TOKENS + i) * TOKENS;
            double delta = 0;
            for (int64_t c = 0; c < dim; c++) delta += d_o[at + c] * l->o[at + c];
            for (int64_t j = 0; j <= i; j++) {
                const int64_t key = (j * s->kv_heads + g) * dim;
                double d = 0;
                for (int64_t c = 0; c < dim; c++) {
                    d += d_o[at + c] * l->v[key + c];
                    d_v[key + c] += w[j] * d_o[at + c];
                }
                d = w[j] * (d - delta) / sqrt((double)dim);
                for (int64_t c = 0; c < dim; c++) {
                    d_q[at + c] += d * l->k[key + c];
                    d_k[key + c] += d * l->q[at + c];
                }
            }
        }
}

static void ref_forward(const ref *r, ref_layer *l, int64_t i, double *next) {
    const net *n = r->n;
    const net_shape *s = &n->s;
    const int64_t q = s->heads * s->dim, kv = s->kv_heads * s->dim;
    l->norm = zeros(TOKENS * s->hidden); l->feed_norm = zeros(TOKENS * s->hidden);
    l->q = zeros(TOKENS * q); l->o = zeros(TOKENS * q);
    l->k = zeros(TOKENS * kv); l->v = zeros(TOKENS * kv);
    l->weights = zeros(s->heads * TOKENS * TOKENS);
    l->mid = zeros(TOKENS * s->hidden);
    l->gate = zeros(TOKENS * s->feed); l->up = zeros(TOKENS * s->feed);
    l->out = zeros(TOKENS * s->feed);
    ref_norm(r, l->norm, l->x, net_of(n, i, NET_ATTENTION_NORM));
    ref_product(r, l->q, l->norm, net_of(n, i, NET_Q));
    ref_product(r, l->k, l->norm, net_of(n, i, NET_K));
    ref_product(r, l->v, l->norm, net_of(n, i, NET_V));
    ref_rope(r, l->q, s->heads, 1);
    ref_rope(r, l->k, s->kv_heads, 1);
    ref_attention(r, l);
    memcpy(l->mid, l->x, (size_t)(TOKENS * s->hidden) * sizeof(double));
    ref_product(r, l->mid, l->o, net_of(n, i, NET_O));
    ref_norm(r, l->feed_norm, l->mid, net_of(n, i, NET_FEED_NORM));
    ref_product(r, l->gate, l->feed_norm, net_of(n, i, NET_GATE));
    ref_product(r, l->up, l->feed_norm, net_of(n, i, NET_UP));
    for (int64_t j = 0; j < TOKENS * s->feed; j++)
        l->out[j] = l->gate[j] / (1 + exp(-l->gate[j])) * l->up[j];
    memcpy(next, l->mid, (size_t)(TOKENS * s->hidden) * sizeof(double));
    ref_product(r, next, l->out, net_of(n, i, NET_DOWN));
}

static void ref_backward(const ref *r, const ref_layer *l, int64_t i, double *d) {
    const net *n = r->n;
    const net_shape *s = &n->s;
    double *d_norm = zeros(TOKENS * s->hidden), *d_out = zeros(TOKENS * s->feed);
    double *d_o = zeros(TOKENS * s->heads * s->dim), *d_q = zeros(TOKENS * s->heads * s->dim);
    double *d_k = zeros(TOKENS * s->kv_heads * s->dim), *d_v = zeros(TOKENS * s->kv_heads * s->dim);
    double *d_up = zeros(TOKENS * s->feed);
    ref_product_back(r, d_out, d, l->out, net_of(n, i, NET_DOWN));
    for (int64_t j = 0; j < TOKENS * s->feed; j++) {
        const double g = l->gate[j], sigmoid = 1 / (1 + exp(-g));
        d_up[j] = d_out[j] * g * sigmoid;
        d_out[j] *= l->up[j] * sigmoid * (1 + g * (1 - sigmoid));
    }
    ref_product_back(r, d_norm, d_out, l->feed_norm, net_of(n, i, NET_GATE));
    ref_product_back(r, d_norm, d_up, l->feed_norm, net_of(n, i, NET_UP));
    ref_norm_back(r, d, d_norm, l->mid, net_of(n, i, NET_FEED_NORM));
    ref_product_back(r, d_o, d, l->o, net_of(n, i, NET_O));
    ref_attention_back(r, l, d_o, d_q, d_k, d_v);
    ref_rope(r, d_q, s->heads, -1);
    ref_rope(r, d_k, s->kv_heads, -1);
    memset(d_norm, 0, (size_t)(TOKENS * s->hidden) * sizeof(double));
    ref_product_back(r, d_norm, d_q, l->norm, net_of(n, i, NET_Q));
    ref_product_back(r, d_norm, d_k, l->norm, net_of(n, i, NET_K));
    ref_product_back(r, d_norm, d_v, l->norm, net_of(n, i, NET_V));
    ref_norm_back(r, d, d_norm, l->x, net_of(n, i, NET_ATTENTION_NORM));
    free(d_norm); free(d_out); free(d_o); free(d_q); free(d_k); free(d_v); free(d_up);
}

/* The byte after a position; with a plant that of the token that begins the same piece of a zigzag
 * of two ranks. */
static int ref_label(const ref *r, int64_t i) {
    const int64_t front = TOKENS / 4 - 1, back = TOKENS - TOKENS / 4 - 1;
    if (r->plant == LABEL_OF_FRONT_EDGE && i == front) return r->text[0];
    if (r->plant == LABEL_OF_BACK_EDGE && i == back) return r->text[TOKENS / 2];
    return r->text[i + 1];
}

static void ref_head(ref *r, const double *x, double *d) {
    const net *n = r->n;
    const int64_t hidden = n->s.hidden;
    double *norm = zeros(TOKENS * hidden), *logits = zeros(TOKENS * TRAIN_VOCABULARY);
    double *d_norm = zeros(TOKENS * hidden);
    const double scale = (r->plant == DIVIDED_BY_RANKS ? 0.5 : 1.0) / TOKENS;
    ref_norm(r, norm, x, net_output_norm(n));
    ref_product(r, logits, norm, net_output(n));
    for (int64_t i = 0; i < TOKENS; i++) {
        double *row = logits + i * TRAIN_VOCABULARY, sum = 0;
        const int label = ref_label(r, i);
        for (int c = 0; c < TRAIN_VOCABULARY; c++) sum += exp(row[c]);
        r->loss += (log(sum) - row[label]) * scale;
        for (int c = 0; c < TRAIN_VOCABULARY; c++) row[c] = exp(row[c]) / sum * scale;
        row[label] -= scale;
    }
    ref_product_back(r, d_norm, logits, norm, net_output(n));
    ref_norm_back(r, d, d_norm, x, net_output_norm(n));
    free(norm); free(logits); free(d_norm);
}

static void ref_run(ref *r) {
    const int64_t hidden = r->n->s.hidden, layers = r->n->s.layers;
    ref_layer *l = (ref_layer *)calloc((size_t)layers + 1, sizeof *l);
    double *d = zeros(TOKENS * hidden);
    if (!l) abort();
    r->loss = 0;
    memset(r->grad, 0, (size_t)r->n->size * sizeof(double));
    for (int64_t i = 0; i <= layers; i++) l[i].x = zeros(TOKENS * hidden);
    for (int64_t i = 0; i < TOKENS; i++)
        for (int64_t c = 0; c < hidden; c++)
            l[0].x[i * hidden + c] = (double)r->n->w[r->text[i] * hidden + c];
    for (int64_t i = 0; i < layers; i++) ref_forward(r, &l[i], i, l[i + 1].x);
    ref_head(r, l[layers].x, d);
    for (int64_t i = layers; i-- > 0;) ref_backward(r, &l[i], i, d);
    for (int64_t i = 0; i < TOKENS; i++)
        for (int64_t c = 0; c < hidden; c++)
            r->grad[r->text[i] * hidden + c] += d[i * hidden + c];
    for (int64_t i = 0; i <= layers; i++) {
        double *const all[] = { l[i].x, l[i].norm, l[i].q, l[i].k, l[i].v, l[i].weights, l[i].o,
                                l[i].mid, l[i].feed_norm, l[i].gate, l[i].up, l[i].out };
        for (size_t k = 0; k < sizeof all / sizeof *all; k++) free(all[k]);
    }
    free(l);
    free(d);
}

/* -------------------------------------------------------------------------- a trainer */
static char folder[256];

static const char *in_folder(const char *name) {
    static char path[8][512];
    static int at;
    at = (at + 1) % 8;
    snprintf(path[at], sizeof path[at], "%s/%s", folder, name);
    return path[at];
}

/* Lines that repeat words, so that there is something to learn. */
static void write_text(const char *name, int64_t bytes, uint64_t seed) {
    static const char *const words[] = { "ring ", "rank ", "token ", "a ", "the ", "of\n" };
    FILE *f = fopen(in_folder(name), "wb");
    if (!f) abort();
    for (int64_t n = 0; n < bytes; seed++) {
        const char *w = words[train_random(seed) % 6];
        for (; *w && n < bytes; w++, n++) fputc(*w, f);
    }
    if (fclose(f)) abort();
}

/* A trainer with the options of a line, and its model; 0: refused, see why. */
static int start(train *t, const char *line, char *why) {
    static char text[1024];
    char *argv[64];
    int argc = 1;
    snprintf(text, sizeof text, "%s --quiet --layers 2 --hidden 32 --heads 2 --kv-heads 1 "
             "--feed 48 %s", in_folder("text"), line);
    argv[0] = text;
    for (char *s = strtok(text, " "); s && argc < 64; s = strtok(NULL, " ")) argv[argc++] = s;
    why[0] = 0;
    return train_arguments(t, argc, argv, 0, -1, why);
}

static double run_held;                /* bits per byte of the held-out text; processes: 0 */

static int run(const char *line, char *why) {
    static train t;
    train_stop = 0;
    const int ok = start(&t, line, why) && train_run(&t, why);
    run_held = t.held_bits;
    train_close(&t);
    return ok;
}

/* Loss and gradients of one sequence, and the weights. */
typedef struct passed { train t; net n; float *grad; double loss; } passed;

/* Weights of a size that makes attention and gates matter; norms that are not all 1. */
static void weights_that_matter(net *n) {
    net_initialise(n, 7);
    for (int64_t k = 0; k < n->tensors; k++)
        for (int64_t i = 0; i < n->tensor[k].rows * n->tensor[k].columns; i++) {
            float *w = &n->w[n->tensor[k].at + i];
            *w = n->tensor[k].rows > 1 ? *w * 8 : 1 + 0.2f * sinf((float)(3 * i + k));
        }
    net_turn(n);
}

static ra_status one_pass(ra_world *world, int rank, void *user) {
    passed *p = (passed *)user;
    train *t = &p->t;
    char why[TRAIN_WHY] = "";
    ranks_desc d;
    double loss = 0;
    worker *w = (worker *)calloc(1, sizeof *w);
    if (!w) abort();
    memset(&d, 0, sizeof d);
    d.kind = RANKS_THREADS;
    d.rank = rank;
    d.ranks = (int32_t)t->ranks;
    d.world = world;
    w->t = t;
    ra_status s = mesh_open(&w->m, &d, 1, NULL, why);
    if (!s) s = train_join(w, why);
    if (!s) weights_that_matter(&w->n);
    if (!s) s = train_passes(w, 0, TOKENS);
    if (!s) s = mesh_reduce(&w->m, &w->n, w->leaf, w->grad);
    if (!s) s = train_losses(w, &loss);
    if (!s) memcpy(p->grad + w->n.own, w->grad, (size_t)w->n.owned * sizeof *w->grad);
    if (rank == 0) p->loss = loss / TOKENS;
    seat_close(&w->s);
    (void)mesh_close(&w->m);
    net_close(&w->n);
    free(w->squares); free(w->leaf); free(w->grad);
    free(w);
    return s;
}

static int pass(passed *p, const char *line) {
    char why[TRAIN_WHY];
    memset(p, 0, sizeof *p);
    if (!CHECK(start(&p->t, line, why) && train_read_texts(&p->t, why) &&
               net_open(&p->n, &p->t.shape, 0, 1, 0)))
        return 0;
    weights_that_matter(&p->n);
    p->grad = (float *)calloc((size_t)p->n.size, sizeof *p->grad);
    if (!p->grad) abort();
    return CHECK_EQ(ra_world_run((int)p->t.ranks, one_pass, p, NULL), RA_OK);
}

static void pass_close(passed *p) {
    free(p->grad);
    net_close(&p->n);
    train_close(&p->t);
}

/* The text of the first sequence of a run. */
static const uint8_t *first_text(train *t) {
    static worker w;
    w.t = t;
    return train_sequence(&w, 0, 0, TOKENS).text;
}

/* How far gradients and loss are from a reference, in units of the bar: 4e-6 of the largest element
 * of each tensor. */
static double distance(const passed *p, const ref *r, const char **where) {
    double worst = fabs(p->loss - r->loss) / (1e-6 * r->loss);
    *where = "loss";
    for (int64_t k = 0; k < p->n.tensors; k++) {
        const net_tensor *x = &p->n.tensor[k];
        double most = 0, off = 0;
        for (int64_t i = x->at; i < x->at + x->rows * x->columns; i++) {
            most = fmax(most, fabs(r->grad[i]));
            off = fmax(off, fabs((double)p->grad[i] - r->grad[i]));
        }
        if (off / (most * 4e-6) <= worst) continue;
        worst = off / (most * 4e-6);
        *where = x->name;
    }
    return worst;
}

TEST(gradients) {
    static const char *const lines[] = {
        "--tokens 1024 --ranks 1", "--tokens 1024 --ranks 2 --untied --recompute",
        "--tokens 1024 --ranks 4 --layout contiguous" };
    for (int i = 0; i < 3; i++) {
        static passed p;
        const char *where = "";
        if (!h_case(i)) continue;
        if (!pass(&p, lines[i])) continue;
        ref r = { &p.n, first_text(&p.t), 0, zeros(p.n.size), 0 };
        for (r.plant = 0; r.plant < (i == 0 && !H_SLOW ? PLANTS : 1); r.plant++) {
            ref_run(&r);
            const double far = distance(&p, &r, &where);
            h_context("%s: plant %d: %.3g of the bar, %s", lines[i], r.plant, far, where);
            if (r.plant) CHECK(far > 5);               /* such a mistake would be seen */
            else CHECK(far < 1);
        }
        free(r.grad);
        pass_close(&p);
    }
}

/* -------------------------------------------------------------------------- kernels */
static void kernels_of(const train_math *m, h_rng *g) {
    enum { ROWS = 16, COLUMNS = 112, DEPTH = 80 };
    static float a[ROWS * DEPTH], b[DEPTH * COLUMNS], out[ROWS * COLUMNS];
    static float gate[COLUMNS], up[COLUMNS], to[COLUMNS], d[COLUMNS];
    for (int i = 0; i < ROWS * DEPTH; i++) a[i] = h_normal(g);
    for (int i = 0; i < DEPTH * COLUMNS; i++) b[i] = h_normal(g);
    for (int turned = 0; turned < 2; turned++) {
        const product p = { a, turned ? 1 : DEPTH, turned ? ROWS : 1, b, out, ROWS, COLUMNS, DEPTH,
                            turned };
        memset(out, 0, sizeof out);
        m->product(&p);
        for (int i = 0; i < ROWS * COLUMNS; i++) {
            double sum = 0;
            for (int k = 0; k < DEPTH; k++)
                sum += (double)a[i / COLUMNS * p.a_row + k * p.a_step] *
                       (double)b[k * COLUMNS + i % COLUMNS];
            if (!CHECK(fabs((double)out[i] - sum) < 1e-4)) return;
        }
    }
    for (int i = 0; i < COLUMNS; i++) {
        gate[i] = (float)(i - 56) * (i % 2 ? 1.5f : 0.1f);
        up[i] = h_normal(g);
        to[i] = gate[i];
        d[i] = h_normal(g);
    }
    m->exp(to, COLUMNS, 3);
    for (int i = 0; i < COLUMNS; i++)
        CHECK(fabs((double)to[i] / exp(fmax((double)(gate[i] - 3.0f), -87)) - 1) < 3e-7);
    m->gate(to, gate, up, COLUMNS);
    for (int i = 0; i < COLUMNS; i++) {
        const double x = (double)gate[i], s = 1 / (1 + exp(-x)), u = (double)up[i];
        CHECK(fabs((double)to[i] - x * s * u) <= 1e-6 * fabs(x * u) + 1e-30);
        to[i] = (float)((double)d[i] * u * s * (1 + x * (1 - s)));
    }
    m->gate_back(d, gate, up, COLUMNS);
    for (int i = 0; i < COLUMNS; i++)
        CHECK(fabs((double)gate[i] - (double)to[i]) <= 1e-5 * fabs((double)d[i]) + 1e-30);
    CHECK(fabs((double)m->dot(a, b, DEPTH) - (double)train_math_any.dot(a, b, DEPTH)) < 1e-4);
}

TEST(kernels) {
    h_rng g = h_case_rng(0);
    kernels_of(&train_math_any, &g);
#if defined(__x86_64__)
    if (train_math_here() != &train_math_any) kernels_of(&train_math_avx2, &g);
    if (train_math_here() == &train_math_avx512) kernels_of(&train_math_avx512, &g);
#endif
}

/* -------------------------------------------------------------------------- runs */
static void state_of(const char *prefix, uint8_t **data, size_t *bytes, int64_t *step) {
    char why[TRAIN_WHY] = "", path[TRAIN_PATH];
    manifest m;
    memset(&m, 0, sizeof m);
    *data = NULL;
    *bytes = 0;
    *step = -1;
    if (!CHECK(manifest_read(in_folder(prefix), &m, why) == 1)) return;
    *step = m.c.step;
    snprintf(path, sizeof path, "%s.%c.state", in_folder(prefix), 'a' + m.slot);
    *data = train_read(path, bytes);
    CHECK(*data != NULL);
}

static void same_states(const char *a, const char *b) {
    uint8_t *x, *y;
    size_t n, m;
    int64_t s, u;
    state_of(a, &x, &n, &s);
    state_of(b, &y, &m, &u);
    CHECK_EQ(s, u);
    if (CHECK_EQ(n, m) && x && y) CHECK(!memcmp(x, y, n));
    free(x);
    free(y);
}

/* The rows of two CSVs, except for the seconds: losses and norms of gradients. */
static void same_rows(const char *a, const char *b) {
    char path[600], row[2][300], *end, *read[2] = { row[0], row[1] };
    FILE *f[2];
    int rows = 0;
    for (int i = 0; i < 2; i++) {
        snprintf(path, sizeof path, "%s.csv", in_folder(i ? b : a));
        f[i] = fopen(path, "r");
    }
    while (f[0] && f[1]) {
        for (int i = 0; i < 2; i++) read[i] = fgets(row[i], 300, f[i]);
        CHECK(!read[0] == !read[1]);
        if (!read[0] || !read[1]) break;
        for (int i = 0; i < 2 && rows; i++)
            if ((end = strrchr(row[i], ',')) != NULL) *end = 0;
        rows++;
        CHECK(!strcmp(row[0], row[1]));
    }
    CHECK(rows > 1);
    for (int i = 0; i < 2; i++)
        if (f[i]) fclose(f[i]);
}

static void forget(const char *prefix) {
    static const char *const ends[] = { "manifest", "a.state", "b.state", "csv", "svg",
                                        "manifest.new" };
    char path[600];
    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++) {
        snprintf(path, sizeof path, "%s.%s", in_folder(prefix), ends[i]);
        (void)remove(path);
    }
}

static int run_to(const char *prefix, const char *line, char *why) {
    char all[900];
    snprintf(all, sizeof all, "--out %s --tokens 2048 --warm-up 2 --rate 0.01 %s",
             in_folder(prefix), line);
    const int ok = run(all, why);
    if (!ok && h_run.verbose) printf("%s\n", why);
    return ok;
}

TEST(bits) {
    static const char *const lines[] = { "", "--ranks 2", "--ranks 4 --recompute", "--ranks 8" };
    char line[200], name[16], why[TRAIN_WHY];
    for (int i = 0; i < 4; i++) {
        if (!h_case(i)) continue;
        snprintf(line, sizeof line, "--ranks 1 --steps 3 %s", lines[i]);
        snprintf(name, sizeof name, "bits%d", i);
        CHECK(run_to(name, line, why));
        if (i) same_states("bits0", name);
        if (i) same_rows("bits0", name);
    }
    for (int i = 0; i < 4; i++) { snprintf(name, sizeof name, "bits%d", i); forget(name); }
    CHECK(run_to("bits0", "--ranks 2 --steps 1 --layout contiguous", why));
    CHECK(run_to("bits1", "--ranks 16 --steps 1", why));
    same_states("bits0", "bits1");
    forget("bits0");
    forget("bits1");
}

/* Ports of this machine that were free a moment ago, as --at takes them. */
static void addresses(char *list, size_t room, int n) {
    int fd[8], port = 0;
    list[0] = 0;
    for (int i = 0; i < n; i++) {
        fd[i] = ra_tcp_listen("127.0.0.1:0", &port);
        const size_t at = strlen(list);
        snprintf(list + at, room - at, "%s127.0.0.1:%d", i ? "," : "", port);
    }
    for (int i = 0; i < n; i++)
        if (fd[i] >= 0) close(fd[i]);
}

/* Runs a line in n processes that meet over TCP. 1: all have ended well. */
static int run_over_tcp(const char *prefix, const char *line, int n) {
    char list[300], all[2000], why[TRAIN_WHY];
    pid_t id[8];
    int ok = 1, status;
    addresses(list, sizeof list, n);
    for (int i = 0; i < n; i++) {
        id[i] = fork();
        if (id[i]) continue;
        snprintf(all, sizeof all, "%s --at %s --rank %d", line, list, i);
        const int good = run_to(prefix, all, why);
        if (!good) fprintf(stderr, "%s\n", why);
        _exit(!good);
    }
    for (int i = 0; i < n; i++)
        ok = waitpid(id[i], &status, 0) == id[i] && status == 0 && ok;
    return ok;
}

/* The same bits on every mesh, by every means that ranks meet here. */
TEST(meshes) {
    static const struct { const char *line; int tcp; } runs[] = {
        { "--ranks 1", 0 }, { "--ranks 2 --shm", 0 }, { "--ranks 8 --recompute", 0 },
        { "--mesh 2x2", 0 }, { "--mesh 4x1 --shm", 0 }, { "--mesh 2x2 --shm", 0 },
        { "--mesh 2x4", 0 }, { "--mesh 4x4 --shm", 0 }, { "--mesh 2x2", 4 }, { "--mesh 2x1", 2 },
        { "--mesh 1x2", 2 } };
    char line[600], name[16], why[TRAIN_WHY];
    double held = 0;
    write_text("held", 5000, 4);
    for (int i = 0; i < (int)(sizeof runs / sizeof *runs); i++) {
        if (!h_case(i)) continue;
        snprintf(line, sizeof line, "--groups 4 --tokens 6144 --steps 2 --held %s %s",
                 in_folder("held"), runs[i].line);
        snprintf(name, sizeof name, "mesh%d", i);
        h_context("%s, %d over TCP", runs[i].line, runs[i].tcp);
        CHECK(runs[i].tcp ? run_over_tcp(name, line, runs[i].tcp) : run_to(name, line, why));
        if (i == 0) held = run_held;
        else if (!runs[i].tcp && run_held > 0) CHECK(run_held == held);
        if (i) same_states("mesh0", name);
        if (i) same_rows("mesh0", name);
        if (i) forget(name);
    }
    CHECK(held > 0);
    CHECK(run_to("mesh9", "--groups 2 --tokens 6144 --steps 2", why));
    (void)remove(in_folder("held"));   /* other sums */
    uint8_t *x, *y;
    size_t n, m;
    int64_t step;
    state_of("mesh0", &x, &n, &step);
    state_of("mesh9", &y, &m, &step);
    if (CHECK(x && y && n == m)) CHECK(memcmp(x, y, n) != 0);
    free(x);
    free(y);
    forget("mesh9");
    forget("mesh0");
}

/* A run of 4 steps; then the same in three sittings on 1, 2 and 4 ranks. */
TEST(resume) {
    char why[TRAIN_WHY];
    train *t = (train *)calloc(1, sizeof *t);
    CHECK(run_to("whole", "--ranks 2 --steps 4 --context 1024,2048@3", why));
    for (int i = 0; i < 2; i++) {
        char line[900];
        snprintf(line, sizeof line, "--out %s --tokens 2048 --warm-up 2 --rate 0.01 --ranks %d "
                 "--steps 4 --save 1 --context 1024,2048@3 %s", in_folder("parts"), 1 << i,
                 i ? "--resume" : "");
        CHECK(t && start(t, line, why));
        t->steps = 1 + i;                              /* ends early, with the schedule of 4 */
        CHECK(train_run(t, why));
        train_close(t);
    }
    free(t);
    /* A killed run has written rows after its checkpoint, the last of them in part. */
    FILE *f = fopen(in_folder("parts.csv"), "a");
    if (!CHECK(f != NULL)) return;
    fprintf(f, "3,1024,5.5,8.0,1,0.01,2.00\n4,20");
    fclose(f);
    f = fopen(in_folder("parts.csv"), "r");
    CHECK(f && flock(fileno(f), LOCK_EX | LOCK_NB) == 0);
    CHECK(!run_to("parts", "--ranks 4 --steps 4 --context 1024,2048@3 --resume", why));
    CHECK(strstr(why, "another process") != NULL);
    if (f) fclose(f);
    CHECK(run_to("parts", "--ranks 4 --steps 4 --context 1024,2048@3 --resume", why));
    same_states("whole", "parts");
    same_rows("whole", "parts");
    CHECK(!run_to("parts", "--ranks 4 --steps 4 --context 1024,2048@3", why));
    CHECK(strstr(why, "--resume") != NULL);
    CHECK(!run_to("parts", "--steps 4 --resume", why) && strstr(why, "other options"));
    write_text("text", 9001, 3);
    CHECK(!run_to("parts", "--steps 4 --context 1024,2048@3 --resume", why));
    CHECK(strstr(why, "another text") != NULL);
    write_text("text", 9000, 3);
    CHECK(!run_to("nothing", "--resume", why) && strstr(why, "no checkpoint"));
    forget("whole");
    forget("parts");
}

/* -------------------------------------------------------------------------- checkpoints */
static void small_net(net *n, float value) {
    const net_shape s = { 1, 2, 1, 16, 32, 48, 1 };
    if (!net_open(n, &s, 0, 1, 0)) abort();
    for (int64_t i = 0; i < n->size; i++) n->w[i] = n->m[i] = n->v[i] = value + (float)(i % 100);
}

/* What the checkpoint of a prefix holds: its step, if its weights are those of that step; -1. */
static int64_t held_step(const char *prefix, char *why) {
    checkpoint c;
    net n;
    small_net(&n, -5);
    memset(&c, 0, sizeof c);
    c.configuration = 1;
    c.text = 2;
    int64_t step = checkpoint_load(prefix, &n, &c, why) == 1 ? c.step : -1;
    const float value = step < 0 ? -5 : (float)step;
    for (int64_t i = 0; i < n.size; i++)
        if (n.w[i] != value + (float)(i % 100) || n.v[i] != n.w[i] || n.m[i] != n.w[i]) step = -2;
    net_close(&n);
    return step;
}

static int save_step(const char *prefix, int64_t step, char *why) {
    net n;
    checkpoint c;
    memset(&c, 0, sizeof c);
    small_net(&n, (float)step);
    c.configuration = 1;
    c.text = 2;
    c.shape = n.s;
    c.step = step;
    const int ok = checkpoint_save(prefix, &n, &c, why);
    net_close(&n);
    return ok;
}

static void write_bytes(const char *path, const uint8_t *data, size_t n) {
    FILE *f = fopen(path, "wb");
    if (!f || fwrite(data, 1, n, f) != n || fclose(f)) abort();
}

/* Every byte of the manifest, and bytes all over the state, are changed; both are cut. */
TEST(damaged) {
    static const char *const ends[] = { "manifest", "a.state" };
    char why[TRAIN_WHY], path[600];
    h_rng g = h_case_rng(0);
    CHECK(save_step(in_folder("harm"), 3, why));
    CHECK_EQ(held_step(in_folder("harm"), why), 3);
    for (int k = 0; k < 2; k++) {
        size_t bytes = 0;
        snprintf(path, sizeof path, "%s.%s", in_folder("harm"), ends[k]);
        uint8_t *good = train_read(path, &bytes);
        if (!CHECK(good != NULL)) return;
        for (int i = 0; i < (k ? 60 : (int)bytes); i++) {
            const size_t at = k ? h_next(&g) % bytes : (size_t)i;
            good[at] ^= 4;
            write_bytes(path, good, bytes);
            why[0] = 0;
            h_context("%s, byte %d", ends[k], (int)at);
            CHECK_EQ(held_step(in_folder("harm"), why), -1);
            CHECK(strstr(why, "harm") && !strchr(why, '\n'));
            good[at] ^= 4;
            write_bytes(path, good, bytes * (size_t)i / (k ? 60 : bytes));
            CHECK_EQ(held_step(in_folder("harm"), why), -1);
        }
        write_bytes(path, good, bytes);
        free(good);
    }
    CHECK_EQ(held_step(in_folder("harm"), why), 3);
    forget("harm");
}

/* Numbers that no option can give, under a right checksum. */
TEST(impossible_manifests) {
    static const net_shape shapes[] = {
        { 1, 2, 0, 16, 32, 48, 1 }, { 1, -1, 1, 0, INT64_MIN, 48, 1 },
        { INT64_MAX / 4, 2, 1, 16, 32, 48, 1 }, { 1, 2, 1, 16, 32, 48, 1 } };
    char why[TRAIN_WHY], line[700], text[512];
    manifest m;
    for (int i = 0; i < 4; i++) {
        memset(&m, 0, sizeof m);
        m.c.shape = shapes[i];
        m.c.step = i == 3 ? INT64_MAX : 3;
        const int n = manifest_text(&m, text, sizeof text);
        write_bytes(in_folder("odd.manifest"), (const uint8_t *)text, (size_t)n);
        snprintf(line, sizeof line, "--out %s --eval %s", in_folder("odd"), in_folder("text"));
        CHECK(!run(line, why));
        h_context("%d: %s", i, why);
        CHECK(strstr(why, "odd.manifest: its checksum does not match, or a number") != NULL);
    }
    forget("odd");
}

/* Writing fails at every size a file may have, as on a full disk. */
TEST(full_disk) {
    char why[TRAIN_WHY];
    CHECK(save_step(in_folder("full"), 1, why));
    for (int i = 0; i < 40; i++) {
        const pid_t id = fork();
        int status = -1;
        if (id == 0) {
            const struct rlimit most = { i < 20 ? (rlim_t)i * 16 : (rlim_t)(i - 19) * 7000,
                                         RLIM_INFINITY };
            signal(SIGXFSZ, SIG_IGN);
            if (setrlimit(RLIMIT_FSIZE, &most)) _exit(2);
            _exit(save_step(in_folder("full"), 2, why));
        }
        CHECK(id > 0 && waitpid(id, &status, 0) == id && WIFEXITED(status));
        CHECK_EQ(WEXITSTATUS(status), 0);
        CHECK_EQ(held_step(in_folder("full"), why), 1);
    }
    CHECK(save_step(in_folder("full"), 2, why));
    CHECK_EQ(held_step(in_folder("full"), why), 2);
    forget("full");
}

/* A process that saves all the time is killed at some moment. */
TEST(killed) {
    char why[TRAIN_WHY];
    h_rng g = h_case_rng(0);
    CHECK(save_step(in_folder("kill"), 1, why));
    for (int i = 0; i < 12; i++) {
        int64_t step = 1;
        int status = -1;
        const pid_t id = fork();
        if (id == 0)
            for (;; step++)
                if (!save_step(in_folder("kill"), step, why)) _exit(1);
        usleep(2000 + h_next(&g) % 20000);
        CHECK(id > 0 && kill(id, SIGKILL) == 0 && waitpid(id, &status, 0) == id);
        CHECK(WIFSIGNALED(status));
        CHECK(held_step(in_folder("kill"), why) >= 1);
    }
    forget("kill");
}

/* -------------------------------------------------------------------------- ranks that die */
typedef struct killer { const char *csv; int rows, victim; volatile int done; } killer;

static int rows_of_file(const char *path) {
    int rows = 0, c;
    FILE *f = fopen(path, "r");
    if (!f) return 0;
    while ((c = fgetc(f)) != EOF) rows += c == '\n';
    fclose(f);
    return rows;
}

/* Kills a rank, once, when the checkpoint of some step has been written. */
static void *kill_one(void *user) {
    killer *k = (killer *)user;
    while (!k->done) {
        const pid_t id = train_process[k->victim];
        if (rows_of_file(k->csv) > k->rows && id > 0) {
            if (kill(id, SIGKILL) == 0) k->done = 1;
        } else usleep(500);
    }
    return NULL;
}

static int run_and_kill(const char *prefix, const char *line, int rows, int victim, char *why) {
    char csv[600];
    pthread_t thread;
    killer k = { csv, rows, victim, 0 };
    snprintf(csv, sizeof csv, "%s.csv", in_folder(prefix));
    if (pthread_create(&thread, NULL, kill_one, &k)) abort();
    const int ok = run_to(prefix, line, why);
    CHECK(k.done);
    k.done = 1;
    pthread_join(thread, NULL);
    return ok;
}

/* Processes that share memory: one is killed, and the others go on, by themselves or by another
 * command. Both end with the bits of a run in which nobody died. */
TEST(survives) {
    char why[TRAIN_WHY] = "";
    h_rng g = h_case_rng(0);
    CHECK(run_to("calm", "--ranks 2 --groups 2 --tokens 2048 --steps 8", why));
    for (int i = 0; i < (H_SLOW ? 1 : 3); i++) {
        const int rows = 2 + (int)(h_next(&g) % 4), victim = (int)(h_next(&g) % 4);
        h_context("rank %d after %d steps", victim, rows);
        CHECK(run_and_kill("hurt", "--mesh 2x2 --groups 2 --tokens 2048 --steps 8 --save 1 --shm "
                           "--survive", rows, victim, why));
        same_states("calm", "hurt");
        same_rows("calm", "hurt");
        forget("hurt");
    }
    CHECK(!run_and_kill("hurt", "--ranks 4 --groups 2 --tokens 2048 --steps 8 --save 1 --shm", 3, 1,
                        why));
    h_context("%s", why);
    CHECK(strstr(why, "1 of 4 ranks died") != NULL);
    CHECK(run_to("hurt", "--ranks 2 --groups 2 --tokens 2048 --steps 8 --resume", why));
    same_states("calm", "hurt");
    same_rows("calm", "hurt");
    forget("hurt");
    forget("calm");
}

/* Ranks that meet over TCP: the others say which of them has ended. */
TEST(says_who_died) {
    char list[300], line[900], why[TRAIN_WHY] = "";
    pid_t id[2];
    int status, told = 0;
    addresses(list, sizeof list, 2);
    for (int i = 0; i < 2; i++) {
        id[i] = fork();
        if (id[i]) continue;
        snprintf(line, sizeof line, "--steps 100000 --save 1 --at %s --rank %d", list, i);
        const int ok = run_to("gone", line, why);
        if (i == 0) fprintf(stderr, "%s\n", why);
        _exit(!ok && strstr(why, "rank 0: ") && strstr(why, "rank 1") ? 7 : 8);
    }
    snprintf(line, sizeof line, "%s.csv", in_folder("gone"));
    for (int i = 0; i < 20000 && rows_of_file(line) < 3; i++) usleep(1000);
    CHECK(kill(id[1], SIGKILL) == 0);
    CHECK(waitpid(id[0], &told, 0) == id[0]);
    CHECK(waitpid(id[1], &status, 0) == id[1]);
    h_context("status %x", (unsigned)told);
    CHECK(WIFEXITED(told) && WEXITSTATUS(told) == 7);
    forget("gone");
}

/* -------------------------------------------------------------------------- packed documents */
/* Lengths of the files of Python's library, 64 quantiles. */
static const int64_t file_lengths[64] = {
    47, 139, 231, 354, 541, 689, 879, 1003, 1023, 1051, 1061, 1226, 1305, 1608, 2004, 2204, 2404,
    2547, 2887, 3174, 3389, 3640, 4240, 4951, 5218, 5500, 5767, 6089, 6690, 7220, 7781, 8364, 8869,
    9512, 10606, 11396, 11765, 12255, 12575, 13089, 13193, 13454, 13519, 13721, 14118, 15198, 16380,
    18480, 21025, 22110, 23728, 26681, 28667, 31162, 33264, 34211, 34681, 37282, 45115, 51929,
    58503, 75383, 92003, 117090 };

typedef struct packed { int64_t length[1024], first[1024], tokens; documents d; } packed;

static void pack(packed *p, h_rng *g, int64_t count, int32_t ranks, const double *speed) {
    memset(p, 0, sizeof *p);
    for (int64_t i = 0; i < count; i++) {
        p->length[i] = file_lengths[count == 1 ? 63 : h_next(g) % 64];
        p->first[i] = p->tokens;
        p->tokens += p->length[i];
    }
    p->d.length = p->length;
    p->d.count = count;
    p->d.ranks = ranks;
    p->d.speed = speed;
    p->d.per_token = 2000;
}

static ra_plan *packed_plan(const packed *p, const documents_table *t, ra_error *e) {
    ra_desc d = ra_desc_make(4, 2, 64, RA_F32, RA_MASK_CAUSAL);
    ra_plan *plan = NULL;
    d.ranks = p->d.ranks;
    d.tokens = p->tokens;
    d.error = e;
    d.mask.doc_first = p->first;
    d.mask.doc_count = p->d.count;
    d.layout.kind = t ? RA_LAYOUT_RUNS : RA_LAYOUT_ZIGZAG;
    d.layout.q_runs = t ? t->runs : NULL;
    d.layout.q_run_count = t ? t->run_count : NULL;
    CHECK_EQ(ra_plan_create(&plan, &d, NULL), RA_OK);
    return plan;
}

/* The largest work of a rank over the average, less 1, counted document by document from a plan's
 * runs. */
static double counted_imbalance(const packed *p, const ra_plan *plan) {
    double most = 0, all = 0, speed = 0;
    for (int32_t r = 0; r < p->d.ranks; r++) {
        ra_run *run;
        const int32_t n = ra_plan_q_runs(plan, r, 0, NULL, 0);
        double work = 0;
        run = (ra_run *)calloc((size_t)n + 1, sizeof *run);
        if (!run) abort();
        ra_plan_q_runs(plan, r, 0, run, n);
        for (int32_t i = 0; i < n; i++)
            for (int64_t doc = 0; doc < p->d.count; doc++) {
                const int64_t first = p->first[doc], last = first + p->length[doc];
                const int64_t from = run[i].first > first ? run[i].first : first;
                const int64_t end = run[i].first + run[i].count;
                const double rows = (double)((end < last ? end : last) - from);
                const double seen = (double)(from - first);    /* before the first of these rows */
                if (rows > 0) work += rows * (seen + (rows + 1) / 2 + p->d.per_token);
            }
        free(run);
        all += work;
        speed += documents_speed(&p->d, r);
        most = fmax(most, work / documents_speed(&p->d, r));
    }
    return most / (all / speed) - 1;
}

TEST(documents_balance) {
    static const struct { int64_t count; int32_t ranks; } cases[] = {
        { 1024, 2 }, { 1024, 8 }, { 1024, 16 }, { 1024, 64 }, { 200, 4 }, { 50, 16 }, { 7, 8 },
        { 1, 4 } };
    static const double speeds[4] = { 1, 2, 1, 4 };
    static packed p;
    h_rng g = h_case_rng(0);
    for (int i = H_SLOW ? 4 : 0; i < 9; i++) {
        const int32_t ranks = i < 8 ? cases[i].ranks : 4;
        documents_table t;
        int64_t rows = 0;
        double best = 1e9;
        if (cases[i & 7].count == 1024 && ranks > 8 && !h_run.large) continue;   /* slow plans */
        pack(&p, &g, i < 8 ? cases[i].count : 300, ranks, i < 8 ? NULL : speeds);
        for (int k = 0; k < 5; k++) {
            if (k) documents_free(&t);
            const int64_t begin = ra_now_ns();
            if (!CHECK(documents_layout(&t, &p.d))) return;
            best = fmin(best, (double)(ra_now_ns() - begin) * 1e-6);
        }
        for (int32_t r = 0; r < ranks; r++) rows += t.rows[r];
        CHECK_EQ(rows, p.tokens);      /* and the plan refuses what is held twice */
        ra_plan *runs = packed_plan(&p, &t, NULL), *zigzag = packed_plan(&p, NULL, NULL);
        if (!runs || !zigzag) return;
        const double ours = counted_imbalance(&p, runs), theirs = counted_imbalance(&p, zigzag);
        const int64_t bytes = documents_bytes(runs, ranks), more = documents_bytes(zigzag, ranks);
        h_context("%d documents, %d ranks: imbalance %.4f (says %.4f), zigzag %.4f; MB %.1f, "
                  "zigzag %.1f; %d cut; %.2f ms", (int)p.d.count, (int)ranks, ours, t.imbalance,
                  theirs, (double)bytes * 1e-6, (double)more * 1e-6, (int)t.cut, best);
        if (h_run.verbose) printf("%s\n", h_run.context);
        CHECK(ours <= 0.02);
        CHECK(fabs(ours - t.imbalance) < 0.002);
        CHECK(p.d.count < 100 || bytes < more / 2);
        if (!H_SLOW) CHECK(best < 5);
        ra_plan_destroy(runs);
        ra_plan_destroy(zigzag);
        documents_free(&t);
    }
}

/* Attention by such a table is that of each document alone. */
enum { PACK_HEADS = 2, PACK_DIM = 16, PACK_RANKS = 4 };
typedef struct packed_run {
    packed p;
    documents_table t;
    const float *qkv;                  /* [tokens][3][heads][dim] */
    float *o;                          /* [tokens][heads][dim] */
} packed_run;

static ra_status packed_rank(ra_world *world, int rank, void *user) {
    const packed_run *x = (const packed_run *)user;
    const int64_t width = PACK_HEADS * PACK_DIM;
    ra_desc d = ra_desc_make(PACK_HEADS, PACK_HEADS, PACK_DIM, RA_F32, RA_MASK_CAUSAL);
    ra_tensors t;
    int32_t first = 0;
    int64_t at = 0;
    float *rows = (float *)malloc((size_t)(x->t.rows[rank] * width * 4) * sizeof *rows);
    if (!rows) return RA_E_NOMEM;
    memset(&t, 0, sizeof t);
    d.ranks = PACK_RANKS;
    d.rank = rank;
    d.tokens = x->p.tokens;
    d.mask.doc_first = x->p.first;
    d.mask.doc_count = x->p.d.count;
    d.layout.kind = RA_LAYOUT_RUNS;
    d.layout.q_runs = x->t.runs;
    d.layout.q_run_count = x->t.run_count;
    for (int r = 0; r < rank; r++) first += x->t.run_count[r];
    float *part[4];
    for (int k = 0; k < 4; k++) part[k] = rows + k * x->t.rows[rank] * width;
    for (int32_t i = 0; i < x->t.run_count[rank]; i++)
        for (int64_t p = 0; p < x->t.runs[first + i].count; p++, at++)
            for (int k = 0; k < 3; k++)
                memcpy(part[k] + at * width,
                       x->qkv + ((x->t.runs[first + i].first + p) * 3 + k) * width,
                       (size_t)width * sizeof *rows);
    t.q.data = part[0];
    t.k.data = part[1];
    t.v.data = part[2];
    t.o.data = part[3];
    const ra_status s = ra_ring_once(&d, ra_world_transport(world, rank), &t, RA_NO_DEADLINE);
    at = 0;
    for (int32_t i = 0; i < x->t.run_count[rank]; i++) {
        const ra_run *run = &x->t.runs[first + i];
        memcpy(x->o + run->first * width, part[3] + at * width,
               (size_t)(run->count * width) * sizeof *rows);
        at += run->count;
    }
    free(rows);
    return s;
}

TEST(documents_attend) {
    static const int64_t lengths[] = { 5, 1500, 64, 1, 900, 130, 77, 300 };
    static packed_run x;
    const int64_t width = PACK_HEADS * PACK_DIM;
    h_rng g = h_case_rng(0);
    double worst = 0;
    x.p.d.length = lengths;
    x.p.d.count = 8;
    x.p.d.ranks = PACK_RANKS;
    x.p.d.per_token = 100;
    x.p.tokens = 0;
    for (int i = 0; i < 8; x.p.tokens += lengths[i++]) x.p.first[i] = x.p.tokens;
    CHECK(documents_layout(&x.t, &x.p.d));
    CHECK(x.t.cut > 0 && x.t.cut < 8);
    float *qkv = (float *)malloc((size_t)(x.p.tokens * width * 5) * sizeof *qkv);
    if (!qkv) abort();
    for (int64_t i = 0; i < x.p.tokens * width * 3; i++) qkv[i] = h_normal(&g);
    x.qkv = qkv;
    x.o = qkv + x.p.tokens * width * 3;
    CHECK_EQ(ra_world_run(PACK_RANKS, packed_rank, &x, NULL), RA_OK);
    float *each = (float *)malloc((size_t)(1500 * width * 4) * sizeof *each);
    if (!each) abort();
    for (int i = 0; i < 8; i++) {
        const int64_t n = lengths[i];
        for (int64_t p = 0; p < n; p++)
            for (int k = 0; k < 3; k++)
                memcpy(each + (k * 1500 + p) * width,
                       qkv + ((x.p.first[i] + p) * 3 + k) * width, (size_t)width * sizeof *qkv);
        CHECK_EQ(ra_attention_simple(each + 4500 * width, each, each + 1500 * width,
                                     each + 3000 * width, (int)n, (int)n, PACK_HEADS, PACK_HEADS,
                                     PACK_DIM, 0, 0, 0), RA_OK);
        for (int64_t j = 0; j < n * width; j++)
            worst = fmax(worst, fabs((double)each[4500 * width + j] -
                                     (double)x.o[x.p.first[i] * width + j]));
    }
    h_context("%g", worst);
    CHECK(worst < 2e-6);
    free(each);
    free(qkv);
    documents_free(&x.t);
}

/* -------------------------------------------------------------------------- export, arguments */
TEST(exported) {
    char why[INFER_WHY], line[900], all[256];
    size_t bytes = 0;
    token_ids ids;
    tokenizer k;
    model m;
    gguf f;
    memset(&ids, 0, sizeof ids);
    snprintf(line, sizeof line, "--ranks 1 --steps 1 --untied --type f32 --export %s",
             in_folder("model.gguf"));
    CHECK(run_to("export", line, why));
    uint8_t *data = train_read(in_folder("model.gguf"), &bytes), *state;
    if (!CHECK(data != NULL)) return;
    void *aligned = NULL;
    if (posix_memalign(&aligned, 64, bytes)) abort();
    memcpy(aligned, data, bytes);
    if (CHECK(gguf_open(&f, aligned, bytes, why)) && CHECK(model_open(&m, &f, why)) &&
        CHECK(tokenizer_open(&k, &f, why))) {
        int64_t step;
        size_t size;
        CHECK_EQ(m.layers, 2); CHECK_EQ(m.heads, 2); CHECK_EQ(m.kv_heads, 1); CHECK_EQ(m.dim, 16);
        CHECK_EQ(m.rope_halves, 0);
        CHECK(m.epsilon == train_epsilon && m.rope_magnitude == 1);
        CHECK(fabs((double)m.rope[0][3] - pow(1e6, -6.0 / 16)) < 1e-9);
        state_of("export", &state, &size, &step);
        if (state) CHECK(!memcmp(m.embedding.data, state + sizeof(part_head), 256 * 32 * 4));
        free(state);
        for (int i = 0; i < 256; i++) all[i] = (char)i;
        CHECK(tokenize(&k, all, 256, &ids));
        CHECK_EQ(ids.count, 256);
        for (int i = 0; i < 256 && i < ids.count; i++) {
            char out[16];
            CHECK_EQ(ids.data[i], i);
            CHECK(token_bytes(&k, i, out, sizeof out) == 1 && out[0] == all[i]);
        }
        tokenizer_close(&k);
        model_close(&m);
        gguf_close(&f);
    } else printf("%s\n", why);
    free(ids.data);
    free(data);
    free(aligned);
    forget("export");
    (void)remove(in_folder("model.gguf"));
}

TEST(refused) {
    static const struct { const char *line, *says; } cases[] = {
        { "--ranks 3", "1, 2, 4, 8 and 16" }, { "--ranks 17", "--ranks" }, { "--steps x", "'x'" },
        { "--steps", "--steps" }, { "--hidden 40", "multiples of 16" },
        { "--mesh 2x2", "--groups" },
        { "--context 1000", "1024" }, { "--context 1024,2048", "1024" }, { "--what 1", "no such" },
        { "--context 1024,2048@5,4096@5", "rising" }, { "--layout striped", "zigzag" },
        { "--type q4", "q8_0" }, { "--rate -1", "'-1'" }, { "--heads 3", "multiples" },
        { "--context 65536", "fewer than one sequence" }, { "--held nowhere", "nowhere" },
        { "--context 1024,8192@5 --held TEXT/short", "1100 bytes of text are fewer" },
        { "--held TEXT/noise", "noise: 0 bytes of text are fewer" },
        { "--ranks 16 --layout zigzag", "contiguous" }, { "second", "already" },
        { "--mesh 2", "--mesh" }, { "--mesh 4x1 --groups 2", "--groups" },
        { "--mesh 2x32 --groups 2", "--mesh" }, { "--groups 3", "--groups" },
        { "--mesh 4x2 --groups 4 --tokens 2048", "--tokens" }, { "--survive", "--shm" },
        { "--at 127.0.0.1:9", "go together" }, { "--at a:1,b:2 --rank 2", "0..1" },
        { "--at a:1,b:2 --rank 0 --shm", "one of them" },
        { "--at a:1,b:2,c:3 --rank 0", "--ranks: 3" },
        { "--out /nowhere/at/all", "/nowhere" } };
    char why[TRAIN_WHY], line[700];
    write_text("short", 1099, 3);      /* and a byte 0 before it */
    write_bytes(in_folder("noise"), (const uint8_t *)"a\0b", 3);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        h_context("%s", cases[i].line);
        const char *in = strstr(cases[i].line, "TEXT/");
        snprintf(line, sizeof line, "%.*s%s", in ? (int)(in - cases[i].line) : 99, cases[i].line,
                 in ? in_folder(in + 5) : "");
        CHECK(!run(line, why));
        h_context("%s: '%s'", line, why);
        CHECK(strstr(why, cases[i].says) && !strchr(why, '\n'));
    }
    (void)remove(in_folder("short"));
    (void)remove(in_folder("noise"));
}

/* A run whose weights grow until the gradient is no number keeps its last good checkpoint. */
TEST(diverged) {
    char why[TRAIN_WHY] = "";
    uint8_t *state;
    size_t bytes;
    int64_t step;
    CHECK(!run_to("far", "--ranks 2 --steps 400 --tokens 1024 --save 1 --rate 1 --decay 10 "
                  "--warm-up 0", why));
    h_context("%s", why);
    CHECK(strstr(why, "the gradient is infinite or NaN") != NULL);
    state_of("far", &state, &bytes, &step);
    CHECK(step > 3);
    for (size_t at = sizeof(part_head); state && at < sizeof(part_head) + 256 * 32 * 4; at += 4) {
        float w;
        memcpy(&w, state + at, 4);
        if (!CHECK(isfinite(w))) break;
    }
    free(state);
    forget("far");
}

/* A folder: in the order of names, without links, what is left out, and what is no text. */
TEST(folders) {
    static const struct { const char *name, *text; } files[] = {
        { "tree/b", "two" }, { "tree/a/z", "one" }, { "tree/held/x", "held" },
        { "tree/c/skip/x", "skipped" }, { "tree/.d", "hidden" } };
    static const char *const folders[] = { "tree", "tree/a", "tree/held", "tree/c", "tree/c/skip" };
    static const char want[] = "\0one\0two";
    char why[TRAIN_WHY];
    train_text t;
    memset(&t, 0, sizeof t);
    for (size_t i = 0; i < 5; i++) CHECK(mkdir(in_folder(folders[i]), 0700) == 0);
    for (size_t i = 0; i < 5; i++)
        write_bytes(in_folder(files[i].name), (const uint8_t *)files[i].text,
                    strlen(files[i].text));
    write_bytes(in_folder("tree/noise"), (const uint8_t *)"a\0b", 3);
    CHECK(symlink(in_folder("tree/b"), in_folder("tree/link")) == 0);
    t.without = "ski,skip,c2";
    CHECK(text_leave_out(&t, in_folder("tree/held"), why));
    CHECK(text_open(&t, in_folder("tree"), 0, why));
    CHECK_EQ(t.files, 2);
    CHECK_EQ(t.left_out, 1);
    if (CHECK_EQ(t.size, sizeof want - 1)) CHECK(!memcmp(t.data, want, sizeof want - 1));
    free(t.data);
    (void)remove(in_folder("tree/link"));
    (void)remove(in_folder("tree/noise"));
    for (size_t i = 0; i < 5; i++) (void)remove(in_folder(files[i].name));
    for (size_t i = 5; i-- > 0;) CHECK(rmdir(in_folder(folders[i])) == 0);
}

/* A loop that learns: the loss of the words falls by half. */
TEST(learns) {
    char why[TRAIN_WHY], line[200];
    double first = 0, last = 0;
    snprintf(line, sizeof line, "--ranks 2 --steps 20 --tokens 1024");
    CHECK(run_to("learn", line, why));
    FILE *f = fopen(in_folder("learn.csv"), "r");
    if (CHECK(f != NULL)) {
        double bits;
        char row[300];
        for (int i = 0; fgets(row, sizeof row, f); i++) {
            if (sscanf(row, "%*d,%*d,%*f,%lf", &bits) != 1) continue;
            if (first == 0) first = bits;
            last = bits;
        }
        fclose(f);
    }
    h_context("%g, %g", first, last);
    CHECK(first > 7 && last < first / 2);
    forget("learn");
}

int main(int argc, char **argv) {
    static const h_test tests[] = {
        ENTRY(kernels), ENTRY(gradients), ENTRY(bits), ENTRY(meshes), ENTRY(resume), ENTRY(damaged),
        ENTRY(impossible_manifests), ENTRY(diverged),
        ENTRY(full_disk), ENTRY(killed), ENTRY(survives), ENTRY(says_who_died),
        ENTRY(documents_balance), ENTRY(documents_attend),
        ENTRY(exported), ENTRY(refused), ENTRY(folders),
        ENTRY(learns) };
    const char *under = getenv("TMPDIR");
    snprintf(folder, sizeof folder, "%s/ring_train_XXXXXX", under ? under : "/tmp");
    if (!mkdtemp(folder)) return 1;
    write_text("text", 9000, 3);
    const int failed = h_main(argc, argv, tests, sizeof tests / sizeof *tests);
    (void)remove(in_folder("text"));
    (void)rmdir(folder);
    return failed;
}
