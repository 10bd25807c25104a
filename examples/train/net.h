/* A model of the Llama kind over bytes, and its passes forward and backward over a ring.
 *
 * Each weight is [outputs][inputs], as in GGUF. Rows of tokens are computed 64 at a time: a rank
 * keeps for its whole shard only the inputs of the layers, and o and LSE of the layers (or of one
 * layer, if they are computed again). Everything else is made again by the pass backward.
 *
 * Lanes. A sequence is cut into TRAIN_LANES equal parts, each of whole blocks of 64 tokens. A lane
 * has gradients and a loss of its own, which add up its tokens in order, sequence after sequence.
 * Lanes are added up in a fixed tree. A rank holds whole lanes, so these sums have the same bits
 * for every number of ranks (see mesh.h). */
#if !defined(TRAIN_NET_H)
#define TRAIN_NET_H

#include "../ranks.h"
#include "kernels.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TRAIN_LANES = 16, TRAIN_BLOCK = 64, TRAIN_VOCABULARY = 256, TRAIN_CHUNK = 4096 };
enum { NET_ATTENTION_NORM, NET_Q, NET_K, NET_V, NET_O, NET_FEED_NORM, NET_GATE, NET_UP, NET_DOWN,
       NET_LAYER };                    /* the tensors of a layer, which follow the embedding */

static const float train_epsilon = 1e-5f;              /* of RMSNorm */
static const double train_rope_base = 1e6;

typedef struct net_shape {
    int64_t layers, heads, kv_heads, dim, hidden, feed, tied;
} net_shape;

typedef struct net_tensor { char name[56]; int64_t rows, columns, at; } net_tensor; /* vector: 1 */

typedef struct net {
    net_shape s;
    net_tensor *tensor;
    int64_t tensors, size;             /* size: weights in all */
    float *w, *turned;                 /* the weights; each matrix transposed */
    int64_t own, owned;                /* this rank steps `owned` weights from `own` on */
    float *m, *v;                      /* [owned] AdamW's averages */
    float *lane;                       /* [lanes of this rank][size] gradients */
} net;

static inline void net_add(net *n, const char *name, int64_t layer, int64_t rows,
                           int64_t columns) {
    net_tensor *t = &n->tensor[n->tensors++];
    if (layer < 0) snprintf(t->name, sizeof t->name, "%s.weight", name);
    else snprintf(t->name, sizeof t->name, "blk.%lld.%s.weight", (long long)layer, name);
    t->rows = rows;
    t->columns = columns;
    t->at = n->size;
    n->size += rows * columns;
}

static inline int64_t net_chunks(const net *n) {
    return (n->size + TRAIN_CHUNK - 1) / TRAIN_CHUNK;
}

static inline void net_close(net *n) {
    free(n->tensor); free(n->w); free(n->turned); free(n->m); free(n->v); free(n->lane);
    memset(n, 0, sizeof *n);
}

/* Lists the tensors and allocates, for one of `ranks` ranks, which has `lanes` lanes. 0: no
 * memory. */
static inline int net_open(net *n, const net_shape *s, int64_t rank, int64_t ranks,
                           int64_t lanes) {
    const int64_t q = s->heads * s->dim, kv = s->kv_heads * s->dim;
    memset(n, 0, sizeof *n);
    n->s = *s;
    n->tensor = (net_tensor *)calloc((size_t)(s->layers * NET_LAYER + 3), sizeof *n->tensor);
    if (!n->tensor) return 0;
    net_add(n, "token_embd", -1, TRAIN_VOCABULARY, s->hidden);
    for (int64_t l = 0; l < s->layers; l++) {
        net_add(n, "attn_norm", l, 1, s->hidden);
        net_add(n, "attn_q", l, q, s->hidden);
        net_add(n, "attn_k", l, kv, s->hidden);
        net_add(n, "attn_v", l, kv, s->hidden);
        net_add(n, "attn_output", l, s->hidden, q);
        net_add(n, "ffn_norm", l, 1, s->hidden);
        net_add(n, "ffn_gate", l, s->feed, s->hidden);
        net_add(n, "ffn_up", l, s->feed, s->hidden);
        net_add(n, "ffn_down", l, s->hidden, s->feed);
    }
    net_add(n, "output_norm", -1, 1, s->hidden);
    if (!s->tied) net_add(n, "output", -1, TRAIN_VOCABULARY, s->hidden);
    n->w = (float *)calloc((size_t)n->size, sizeof(float));
    n->turned = (float *)calloc((size_t)n->size, sizeof(float));
    n->own = net_chunks(n) * rank / ranks * TRAIN_CHUNK;
    n->owned = net_chunks(n) * (rank + 1) / ranks * TRAIN_CHUNK;
    if (n->owned > n->size) n->owned = n->size;
    n->owned -= n->own;
    n->m = (float *)calloc((size_t)n->owned + 1, sizeof(float));
    n->v = (float *)calloc((size_t)n->owned + 1, sizeof(float));
    n->lane = (float *)calloc((size_t)(n->size * lanes) + 1, sizeof(float));
    if (n->w && n->turned && n->m && n->v && n->lane) return 1;
    net_close(n);
    return 0;
}

static inline const net_tensor *net_of(const net *n, int64_t layer, int which) {
    return &n->tensor[1 + layer * NET_LAYER + which];
}
static inline const net_tensor *net_output_norm(const net *n) {
    return &n->tensor[1 + n->s.layers * NET_LAYER];
}
static inline const net_tensor *net_output(const net *n) {
    return n->s.tied ? &n->tensor[0] : net_output_norm(n) + 1;
}

static inline uint64_t train_random(uint64_t x) {      /* splitmix64 */
    x += 0x9E3779B97F4A7C15u;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
}

/* Normal weights of deviation 0.02, less for what is added to the residual stream; norms are 1. */
static inline void net_initialise(net *n, uint64_t seed) {
    for (int64_t i = 0; i < n->tensors; i++) {
        const net_tensor *t = &n->tensor[i];
        const int added = strstr(t->name, "attn_output") || strstr(t->name, "ffn_down");
        const double size = 0.02 / (added ? sqrt(2.0 * (double)n->s.layers) : 1);
        for (int64_t j = t->at; j < t->at + t->rows * t->columns; j++) {
            const uint64_t a = train_random(seed ^ train_random((uint64_t)j));
            const double u = ((double)(a >> 32) + 1) / 4294967297.0;
            const double angle = (double)(a & 0xffffffffu) * (6.283185307179586 / 4294967296.0);
            n->w[j] = t->rows > 1 ? (float)(size * sqrt(-2 * log(u)) * cos(angle)) : 1;
        }
    }
}

/* Makes n->turned again. */
static inline void net_turn(net *n) {
    for (int64_t k = 0; k < n->tensors; k++) {
        const net_tensor *t = &n->tensor[k];
        for (int64_t i = 0; i < t->rows; i++)
            for (int64_t j = 0; j < t->columns; j++)
                n->turned[t->at + j * t->rows + i] = n->w[t->at + i * t->columns + j];
    }
}

/* -------------------------------------------------------------------------- a rank's seat */
typedef struct seat {
    net *n;
    const train_math *math;
    ra_plan *plan;
    ra_ring *ring;
    ra_desc desc;                      /* of plan */
    int64_t *doc_first;                /* [context], or null: documents of a sequence see another */
    int64_t rows, context, kept;       /* kept: of how many layers o and lse are kept */
    ra_run part[2];                    /* positions of the rows */
    int32_t parts;
    size_t bytes;
    float *memory, *turn;              /* turn: [context][dim / 2] cosine and sine */
    float *x;                          /* [layers + 1][rows][hidden] */
    float *o, *lse;                    /* [kept][rows][heads * dim], [kept][rows][heads] */
    float *q, *k, *v, *d_q, *d_k, *d_v, *d_o;          /* [rows][...] */
    float *norm, *mid, *d_norm;        /* [TRAIN_BLOCK][hidden] from here on */
    float *gate, *up, *out;            /* [TRAIN_BLOCK][feed] */
    float *logits;                     /* [TRAIN_BLOCK][TRAIN_VOCABULARY] */
} seat;

typedef struct tile { int64_t row, position; float *grad; double *loss; } tile;

/* What a pass works on: tokens + 1 bytes, the last one a label only. */
typedef struct sequence {
    const uint8_t *text;
    double *loss;                      /* [TRAIN_LANES], added to */
    float scale;                       /* of the gradients: 1 / tokens of the step; 0: none */
} sequence;

static inline void seat_close(seat *s) {
    ra_ring_destroy(s->ring);
    ra_plan_destroy(s->plan);
    free(s->memory);
    free(s->doc_first);
    s->doc_first = NULL;
    s->ring = NULL;
    s->plan = NULL;
    s->memory = NULL;
}

static inline int seat_allocate(seat *s) {
    const net_shape *m = &s->n->s;
    const int64_t rows = s->rows, q = m->heads * m->dim, kv = m->kv_heads * m->dim;
    const struct { float **to; int64_t n; } list[] = {
        { &s->turn, s->context * m->dim }, { &s->x, (m->layers + 1) * rows * m->hidden },
        { &s->o, s->kept * rows * q }, { &s->lse, s->kept * rows * m->heads },
        { &s->q, rows * q }, { &s->k, rows * kv }, { &s->v, rows * kv }, { &s->d_q, rows * q },
        { &s->d_k, rows * kv }, { &s->d_v, rows * kv }, { &s->d_o, rows * q },
        { &s->norm, TRAIN_BLOCK * m->hidden }, { &s->mid, TRAIN_BLOCK * m->hidden },
        { &s->d_norm, TRAIN_BLOCK * m->hidden }, { &s->gate, TRAIN_BLOCK * m->feed },
        { &s->up, TRAIN_BLOCK * m->feed }, { &s->out, TRAIN_BLOCK * m->feed },
        { &s->logits, TRAIN_BLOCK * TRAIN_VOCABULARY } };
    int64_t floats = 0;
    for (size_t i = 0; i < sizeof list / sizeof *list; i++) floats += list[i].n;
    s->bytes = (size_t)floats * sizeof(float);
    s->memory = (float *)malloc(s->bytes);
    if (!s->memory) return 0;
    floats = 0;
    for (size_t i = 0; i < sizeof list / sizeof *list; i++) {
        *list[i].to = s->memory + floats;
        floats += list[i].n;
    }
    for (int64_t p = 0; p < s->context; p++)
        for (int64_t i = 0; i < m->dim / 2; i++) {
            const float f = (float)(1 / pow(train_rope_base, 2.0 * (double)i / (double)m->dim));
            const double angle = (double)((float)p * f);
            s->turn[p * m->dim + 2 * i] = (float)cos(angle);
            s->turn[p * m->dim + 2 * i + 1] = (float)sin(angle);
        }
    return 1;
}

static inline ra_desc seat_desc(const net_shape *m, int64_t context) {
    ra_desc d = ra_desc_make((int32_t)m->heads, (int32_t)m->kv_heads, (int32_t)m->dim, RA_F32,
                             RA_MASK_CAUSAL);
    d.tokens = context;
    d.train = 1;
    return d;
}

/* The longest message of a ring over sequences of `context` tokens. */
static inline size_t seat_message_bytes(const net_shape *m, int64_t ranks, int64_t layout,
                                        int64_t context) {
    ra_desc d = seat_desc(m, context);
    ra_plan *plan = NULL;
    d.ranks = (int32_t)ranks;
    d.layout.kind = (int32_t)layout;
    const size_t bytes = ra_plan_create(&plan, &d, NULL) ? 0 : ra_shm_slot_bytes(plan, d.ranks);
    ra_plan_destroy(plan);
    return bytes;
}

/* A rank's plan, ring and memory for sequences of `context` tokens. layout: RA_LAYOUT_CONTIGUOUS or
 * RA_LAYOUT_ZIGZAG. s->n and s->kept are set. */
static inline ra_status seat_open(seat *s, const ra_transport *wire, const ra_desc *ranks,
                                  int64_t context) {
    ra_desc d = seat_desc(&s->n->s, context);
    ra_ring_desc rd;
    ra_plan_report report;
    ra_status status;
    memset(&rd, 0, sizeof rd);
    memset(&report, 0, sizeof report);
    d.ranks = ranks->ranks;
    d.rank = ranks->rank;
    d.layout.kind = ranks->layout.kind;
    d.error = rd.error = ranks->error;
    s->context = context;
    s->math = train_math_here();
    status = ra_plan_create(&s->plan, &d, NULL);
    if (!status) status = ra_plan_query(s->plan, d.rank, &report);
    rd.workspace_bytes = (size_t)report.workspace_bytes + 64 * (size_t)context;
    if (!status) status = ra_ring_create(&s->ring, s->plan, wire, &rd);
    s->rows = report.q_rows;
    s->desc = d;
    s->desc.error = NULL;
    if (!status) s->parts = ra_plan_q_runs(s->plan, d.rank, 0, s->part, 2);
    if (!status && !seat_allocate(s)) status = RA_E_NOMEM;
    if (status) seat_close(s);
    else s->bytes += (size_t)report.workspace_bytes;
    return status;
}

/* The block of 64 rows from `row` on: where it is in the sequence, and the sums of its lane. */
static inline tile seat_block(const seat *s, const sequence *q, int64_t row) {
    tile b = { row, 0, NULL, NULL };
    const int64_t behind = row - s->part[0].count;
    b.position = behind < 0 ? s->part[0].first + row : s->part[1].first + behind;
    const int64_t lane = s->context / TRAIN_LANES;
    b.grad = s->n->lane + row / lane * s->n->size;
    b.loss = q->loss + b.position / lane;
    return b;
}

/* -------------------------------------------------------------------------- products of a block */
static inline void seat_product(const seat *s, float *out, const float *x, const net_tensor *t) {
    const product p = { x, t->columns, 1, s->n->turned + t->at, out, TRAIN_BLOCK, t->rows,
                        t->columns, 0 };
    s->math->product(&p);
}

/* Back through out = x W: the gradient of x is written, or added with `add`; that of W is added. */
static inline void seat_product_back(const seat *s, const tile *b, float *d_x, const float *d_out,
                                     const float *x, const net_tensor *t, int add) {
    const product to_x = { d_out, t->rows, 1, s->n->w + t->at, d_x, TRAIN_BLOCK, t->columns,
                           t->rows, add };
    const product to_w = { d_out, 1, t->rows, x, b->grad + t->at, t->rows, t->columns,
                           TRAIN_BLOCK, 1 };
    s->math->product(&to_x);
    s->math->product(&to_w);
}

static inline float seat_inverse_rms(const seat *s, const float *x) {
    const int64_t n = s->n->s.hidden;
    return 1 / sqrtf(s->math->dot(x, x, n) / (float)n + train_epsilon);
}

static inline void seat_norm(const seat *s, float *y, const float *x, const net_tensor *t) {
    const int64_t n = s->n->s.hidden;
    const float *w = s->n->w + t->at;
    for (int64_t r = 0; r < TRAIN_BLOCK; r++, x += n, y += n) {
        const float inverse = seat_inverse_rms(s, x);
        for (int64_t i = 0; i < n; i++) y[i] = x[i] * inverse * w[i];
    }
}

/* d_x += gradient of x; d: of the norm's output, is overwritten. */
static inline void seat_norm_back(const seat *s, const tile *b, float *d_x, float *d,
                                  const float *x, const net_tensor *t) {
    const int64_t n = s->n->s.hidden;
    const float *w = s->n->w + t->at;
    float *d_w = b->grad + t->at;
    for (int64_t r = 0; r < TRAIN_BLOCK; r++, x += n, d += n, d_x += n) {
        const float inverse = seat_inverse_rms(s, x);
        for (int64_t i = 0; i < n; i++) {
            d_w[i] += d[i] * x[i] * inverse;
            d[i] *= w[i];
        }
        const float along = s->math->dot(d, x, n) * inverse * inverse * inverse / (float)n;
        for (int64_t i = 0; i < n; i++) d_x[i] += d[i] * inverse - x[i] * along;
    }
}

/* Rotates pairs of neighbours by the position; sign -1 rotates back. */
static inline void seat_rope(const seat *s, const tile *b, float *rows, int64_t heads,
                             float sign) {
    const int64_t dim = s->n->s.dim;
    for (int64_t r = 0; r < TRAIN_BLOCK * heads; r++, rows += dim) {
        const float *turn = s->turn + (b->position + r / heads) * dim;
        for (int64_t i = 0; i < dim; i += 2) {
            const float x = rows[i], y = rows[i + 1], sine = sign * turn[i + 1];
            rows[i] = x * turn[i] - y * sine;
            rows[i + 1] = x * sine + y * turn[i];
        }
    }
}

/* -------------------------------------------------------------------------- a layer */
static inline ra_tensors seat_tensors(const seat *s, int64_t l) {
    const net_shape *m = &s->n->s;
    const int64_t at = l < s->kept ? l : 0;
    ra_tensors t;
    memset(&t, 0, sizeof t);
    t.q.data = s->q; t.k.data = s->k; t.v.data = s->v;
    t.o.data = s->o + at * s->rows * m->heads * m->dim;
    t.lse.data = s->lse + at * s->rows * m->heads;
    return t;
}

/* q, k and v of the whole shard from the layer's input. */
static inline void seat_queries(seat *s, const sequence *q, int64_t l) {
    const net *n = s->n;
    const net_shape *m = &n->s;
    const float *x = s->x + l * s->rows * m->hidden;
    for (int64_t row = 0; row < s->rows; row += TRAIN_BLOCK) {
        const tile b = seat_block(s, q, row);
        float *to_q = s->q + row * m->heads * m->dim, *to_k = s->k + row * m->kv_heads * m->dim;
        seat_norm(s, s->norm, x + row * m->hidden, net_of(n, l, NET_ATTENTION_NORM));
        seat_product(s, to_q, s->norm, net_of(n, l, NET_Q));
        seat_product(s, to_k, s->norm, net_of(n, l, NET_K));
        seat_product(s, s->v + row * m->kv_heads * m->dim, s->norm, net_of(n, l, NET_V));
        seat_rope(s, &b, to_q, m->heads, 1);
        seat_rope(s, &b, to_k, m->kv_heads, 1);
    }
}

/* From x and o of a block: mid = x + o Wo, norm, gate, up and out. */
static inline void seat_feed(seat *s, int64_t l, const float *x, const float *o) {
    const net *n = s->n;
    const net_shape *m = &n->s;
    seat_product(s, s->mid, o, net_of(n, l, NET_O));
    for (int64_t i = 0; i < TRAIN_BLOCK * m->hidden; i++) s->mid[i] += x[i];
    seat_norm(s, s->norm, s->mid, net_of(n, l, NET_FEED_NORM));
    seat_product(s, s->gate, s->norm, net_of(n, l, NET_GATE));
    seat_product(s, s->up, s->norm, net_of(n, l, NET_UP));
    s->math->gate(s->out, s->gate, s->up, TRAIN_BLOCK * m->feed);
}

static inline ra_status seat_forward(seat *s, const sequence *q, int64_t l) {
    const net_shape *m = &s->n->s;
    const float *x = s->x + l * s->rows * m->hidden;
    float *next = s->x + (l + 1) * s->rows * m->hidden;
    const ra_tensors t = seat_tensors(s, l);
    seat_queries(s, q, l);
    const ra_status status = ra_forward(s->plan, s->ring, &t, RA_NO_DEADLINE);
    for (int64_t row = 0; row < s->rows && !status; row += TRAIN_BLOCK) {
        float *to = next + row * m->hidden;
        seat_feed(s, l, x + row * m->hidden, (float *)t.o.data + row * m->heads * m->dim);
        seat_product(s, to, s->out, net_of(s->n, l, NET_DOWN));
        for (int64_t i = 0; i < TRAIN_BLOCK * m->hidden; i++) to[i] += s->mid[i];
    }
    return status;
}

/* d: [rows][hidden] of the layer's output, becomes that of its input. */
static inline ra_status seat_backward(seat *s, const sequence *q, int64_t l, float *d) {
    const net *n = s->n;
    const net_shape *m = &n->s;
    const int64_t heads = m->heads * m->dim, kv = m->kv_heads * m->dim;
    const float *x = s->x + l * s->rows * m->hidden;
    ra_tensors t = seat_tensors(s, l);
    ra_status status = RA_OK;
    seat_queries(s, q, l);
    if (s->kept < m->layers) status = ra_forward(s->plan, s->ring, &t, RA_NO_DEADLINE);
    for (int64_t row = 0; row < s->rows && !status; row += TRAIN_BLOCK) {
        const tile b = seat_block(s, q, row);
        const float *o = (float *)t.o.data + row * heads;
        float *to = d + row * m->hidden;
        seat_feed(s, l, x + row * m->hidden, o);
        const product to_w = { to, 1, m->hidden, s->out, b.grad + net_of(n, l, NET_DOWN)->at,
                               m->hidden, m->feed, TRAIN_BLOCK, 1 };
        const product to_out = { to, m->hidden, 1, n->w + net_of(n, l, NET_DOWN)->at, s->out,
                                 TRAIN_BLOCK, m->feed, m->hidden, 0 };
        s->math->product(&to_w);
        s->math->product(&to_out);
        s->math->gate_back(s->out, s->gate, s->up, TRAIN_BLOCK * m->feed);
        seat_product_back(s, &b, s->d_norm, s->gate, s->norm, net_of(n, l, NET_GATE), 0);
        seat_product_back(s, &b, s->d_norm, s->up, s->norm, net_of(n, l, NET_UP), 1);
        seat_norm_back(s, &b, to, s->d_norm, s->mid, net_of(n, l, NET_FEED_NORM));
        seat_product_back(s, &b, s->d_o + row * heads, to, o, net_of(n, l, NET_O), 0);
    }
    t.d_o.data = s->d_o; t.d_q.data = s->d_q; t.d_k.data = s->d_k; t.d_v.data = s->d_v;
    memset(s->d_q, 0, (size_t)(s->rows * heads) * sizeof(float));    /* gradients are added to */
    memset(s->d_k, 0, (size_t)(s->rows * kv) * sizeof(float));
    memset(s->d_v, 0, (size_t)(s->rows * kv) * sizeof(float));
    if (!status) status = ra_backward(s->plan, s->ring, &t, RA_NO_DEADLINE);
    for (int64_t row = 0; row < s->rows && !status; row += TRAIN_BLOCK) {
        const tile b = seat_block(s, q, row);
        float *d_q = s->d_q + row * heads, *d_k = s->d_k + row * kv;
        seat_rope(s, &b, d_q, m->heads, -1);
        seat_rope(s, &b, d_k, m->kv_heads, -1);
        seat_norm(s, s->norm, x + row * m->hidden, net_of(n, l, NET_ATTENTION_NORM));
        seat_product_back(s, &b, s->d_norm, d_q, s->norm, net_of(n, l, NET_Q), 0);
        seat_product_back(s, &b, s->d_norm, d_k, s->norm, net_of(n, l, NET_K), 1);
        seat_product_back(s, &b, s->d_norm, s->d_v + row * kv, s->norm, net_of(n, l, NET_V), 1);
        seat_norm_back(s, &b, d + row * m->hidden, s->d_norm, x + row * m->hidden,
                       net_of(n, l, NET_ATTENTION_NORM));
    }
    return status;
}

/* -------------------------------------------------------------------------- ends of the model */
static inline void seat_embed(seat *s, const sequence *q) {
    const size_t n = (size_t)s->n->s.hidden;
    for (int64_t row = 0; row < s->rows; row++) {
        const tile b = seat_block(s, q, row);
        memcpy(s->x + row * (int64_t)n, s->n->w + q->text[b.position] * n, n * sizeof(float));
    }
}

static inline void seat_embed_back(seat *s, const sequence *q, const float *d) {
    const int64_t n = s->n->s.hidden;
    for (int64_t row = 0; row < s->rows; row++) {
        const tile b = seat_block(s, q, row);
        float *to = b.grad + q->text[b.position] * n;
        for (int64_t i = 0; i < n; i++) to[i] += d[row * n + i];
    }
}

/* The loss of every token, -ln of the probability of the byte after it, and the gradient of the
 * last layer's output, which takes its place. */
static inline void seat_loss(seat *s, const sequence *q) {
    const net *n = s->n;
    const int64_t hidden = n->s.hidden;
    const size_t bytes = (size_t)(TRAIN_BLOCK * hidden) * sizeof(float);
    float *x = s->x + n->s.layers * s->rows * hidden;
    for (int64_t row = 0; row < s->rows; row += TRAIN_BLOCK, x += TRAIN_BLOCK * hidden) {
        const tile b = seat_block(s, q, row);
        seat_norm(s, s->norm, x, net_output_norm(n));
        seat_product(s, s->logits, s->norm, net_output(n));
        for (int64_t r = 0; r < TRAIN_BLOCK; r++) {
            float *logits = s->logits + r * TRAIN_VOCABULARY, most = logits[0], sum = 0;
            const int label = q->text[b.position + r + 1];
            const float right = logits[label];
            for (int i = 1; i < TRAIN_VOCABULARY; i++) most = logits[i] > most ? logits[i] : most;
            s->math->exp(logits, TRAIN_VOCABULARY, most);
            for (int i = 0; i < TRAIN_VOCABULARY; i++) sum += logits[i];
            *b.loss += log((double)sum) + (double)most - (double)right;
            for (int i = 0; i < TRAIN_VOCABULARY; i++) logits[i] *= q->scale / sum;
            logits[label] -= q->scale;
        }
        if (q->scale == 0) continue;
        memcpy(s->mid, x, bytes);
        memset(x, 0, bytes);
        seat_product_back(s, &b, s->d_norm, s->logits, s->norm, net_output(n), 0);
        seat_norm_back(s, &b, x, s->d_norm, s->mid, net_output_norm(n));
    }
}

/* The plan of a sequence whose documents see only themselves. Each begins with a byte 0. */
static inline ra_status seat_plan(seat *s, const sequence *q) {
    ra_desc d = s->desc;
    ra_plan *plan = NULL;
    d.mask.doc_first = s->doc_first;
    for (int64_t i = 0; i < s->context; i++)
        if (i == 0 || !q->text[i]) s->doc_first[d.mask.doc_count++] = i;
    const ra_status status = ra_plan_create(&plan, &d, NULL);
    if (status) return status;
    ra_plan_destroy(s->plan);
    s->plan = plan;
    return RA_OK;
}

/* One sequence forward and, unless its scale is 0, backward. Collective. */
static inline ra_status seat_pass(seat *s, const sequence *q) {
    const int64_t layers = s->n->s.layers;
    float *d = s->x + layers * s->rows * s->n->s.hidden;
    ra_status status = s->doc_first ? seat_plan(s, q) : RA_OK;
    seat_embed(s, q);
    for (int64_t l = 0; l < layers && !status; l++) status = seat_forward(s, q, l);
    if (!status) seat_loss(s, q);
    if (q->scale == 0) return status;
    for (int64_t l = layers; l-- > 0 && !status;) status = seat_backward(s, q, l, d);
    if (!status) seat_embed_back(s, q, d);
    return status;
}

/* -------------------------------------------------------------------------- a step */
typedef struct optimiser {
    double rate, warm_up, cool, steps, decay, clip;    /* warm_up, cool and steps: in steps */
} optimiser;

static inline double train_tree(double *x, int n) {    /* n: a power of two */
    for (int apart = 1; apart < n; apart *= 2)
        for (int i = 0; i < n; i += 2 * apart) x[i] += x[i + apart];
    return x[0];
}

/* Adds up `leaves` rows of n floats, a power of two, in the same tree, into the first. */
static inline void train_tree_of(float *x, int64_t leaves, int64_t n) {
    for (int64_t apart = 1; apart < leaves; apart *= 2)
        for (int64_t i = 0; i < leaves; i += 2 * apart) {
            float *a = x + i * n;
            const float *b = a + apart * n;
            for (int64_t j = 0; j < n; j++) a[j] += b[j];
        }
}

/* The sums of squares of the chunks that this rank owns. */
static inline void train_squares(const net *n, const float *grad, double *squares) {
    for (int64_t i = 0; i < n->owned; i++) {
        double *sum = &squares[(n->own + i) / TRAIN_CHUNK];
        if (i % TRAIN_CHUNK == 0) *sum = 0;
        *sum += (double)grad[i] * (double)grad[i];
    }
}

static inline double train_rate(const optimiser *o, int64_t step) {
    const double at = (double)step;
    if (at < o->warm_up) return o->rate * (at + 1) / o->warm_up;
    if (o->cool > 0)
        return o->rate * fmin(1, 0.05 + 0.95 * (o->steps - at) / o->cool);
    const double part = (at - o->warm_up) / fmax(o->steps - o->warm_up, 1);
    return o->rate * (0.1 + 0.45 * (1 + cos(3.141592653589793 * fmin(part, 1))));
}

/* AdamW on the weights that this rank owns. Only matrices decay. */
static inline void train_update(net *n, const float *grad, const optimiser *o, int64_t step,
                                double norm) {
    const int64_t end = n->own + n->owned;
    const float factor = norm > o->clip ? (float)(o->clip / norm) : 1;
    const float rate = (float)train_rate(o, step), b1 = 0.9f, b2 = 0.95f;
    const float first = (float)(1 / (1 - pow(0.9, (double)step + 1)));
    const float second = (float)(1 / (1 - pow(0.95, (double)step + 1)));
    for (int64_t k = 0, at = n->own; k < n->tensors; k++) {
        const net_tensor *t = &n->tensor[k];
        const int64_t last = t->at + t->rows * t->columns, stop = last < end ? last : end;
        const float decay = t->rows > 1 ? rate * (float)o->decay : 0;
        for (; at < stop; at++) {
            const int64_t i = at - n->own;
            const float g = grad[i] * factor;
            n->m[i] = b1 * n->m[i] + (1 - b1) * g;
            n->v[i] = b2 * n->v[i] + (1 - b2) * g * g;
            const float move = n->m[i] * first / (sqrtf(n->v[i] * second) + 1e-8f);
            n->w[at] -= rate * move + decay * n->w[at];
        }
    }
}

#endif
