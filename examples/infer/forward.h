/* One call of the model on a rank: the layers, and the tokens that follow.
 *
 *   infer_forward      for new tokens of the sequence */
#if !defined(INFER_FORWARD_H)
#define INFER_FORWARD_H

#include "experts.h"
#include "rank.h"

/* -------------------------------------------------------------------------- one layer */
typedef struct infer_turned {
    const infer_rank *r;
    float *rows;
    int32_t heads;
    int windowed;
    int64_t from, piece;               /* rows */
} infer_turned;

static inline void infer_rope_piece(void *ctx, int64_t piece) {
    const infer_turned *t = (const infer_turned *)ctx;
    const model *m = t->r->e->m;
    const int32_t half = m->rope_dims / 2, apart = m->rope_halves ? half : 1;
    const int64_t from = t->from + piece * t->piece;
    const int64_t end = from + t->piece < t->r->owned ? from + t->piece : t->r->owned;
    for (int64_t i = from * t->heads; i < end * t->heads; i++) {
        const float *turn = t->r->turn[t->windowed] + i / t->heads * m->rope_dims;
        float *x = t->rows + i * m->dim;
        for (int32_t p = 0; p < half; p++) {
            float *a = x + (m->rope_halves ? p : 2 * p), *b = a + apart;
            const float c = turn[2 * p], s = turn[2 * p + 1], u = *a, w = *b;
            *a = u * c - w * s;
            *b = u * s + w * c;
        }
    }
}

/* Turns the heads of this rank's rows from `from` on by their positions. */
static inline void infer_rope(const infer_rank *r, int windowed, float *rows, int32_t heads,
                              int64_t from) {
    pool *p = &r->e->workers;
    const int64_t n = r->owned - from, pieces = n * heads * r->e->m->dim > 20000 ? p->threads + 1
                                                                                  : 1;
    infer_turned t;
    t.r = r;
    t.windowed = windowed;
    t.rows = rows;
    t.heads = heads;
    t.from = from;
    t.piece = (n + pieces - 1) / pieces;
    if (n > 0) pool_run(p, infer_rope_piece, &t, (n + t.piece - 1) / t.piece);
}

/* Angles are rounded to f32, as in the libraries that models come from. */
static inline void infer_turns(const infer_rank *r, int windowed, int64_t first) {
    const model *m = r->e->m;
    for (int32_t p = 0; p < m->rope_dims / 2; p++) {
        for (int64_t i = 0; i < r->owned; i++) {
            float *turn = r->turn[windowed] + i * m->rope_dims + 2 * p;
            const float angle = (float)(first + r->own[i]) * m->rope[windowed][p];
            turn[0] = (float)(cos((double)angle) * m->rope_magnitude);
            turn[1] = (float)(sin((double)angle) * m->rope_magnitude);
        }
    }
}

static inline int infer_integers(const infer_rank *r) {
    return r->e->o.integers && r->decoding == INFER_DECODE;
}

/* A product: y = w x + bias, for n rows of x. bias: may be null. */
typedef struct infer_times {
    const matrix *w;
    const float *bias, *x;
    float *y;
    int64_t n;
} infer_times;

static inline infer_times infer_product(const matrix *w, const float *bias, const float *x,
                                        float *y, int64_t n) {
    infer_times p;
    p.w = w;
    p.bias = bias;
    p.x = x;
    p.y = y;
    p.n = n;
    return p;
}

/* 1: this call splits products, and every rank has all of its tokens. */
static inline int infer_splits(const infer_rank *r) {
    return r->e->split && r->decoding == INFER_DECODE;
}

/* How many of `rows` a rank multiplies at most, and which those of `rank` are. */
static inline int64_t infer_part_room(int64_t rows, int32_t ranks) {
    return ((rows + ranks - 1) / ranks + 5) / 6 * 6;
}

static inline int64_t infer_part(const infer_rank *r, int64_t rows, int32_t rank, int64_t *first) {
    const int64_t room = infer_part_room(rows, r->e->o.ranks);
    *first = rank * room < rows ? rank * room : rows;
    return rows - *first < room ? rows - *first : room;
}

/* Every rank has `count` floats at the beginning of r->wire. All get those of all, in blocks: block
 * i is of the rank i before this one. The number of blocks doubles with each message. */
static inline ra_status infer_gather(infer_rank *r, int64_t count) {
    const int32_t ranks = r->e->o.ranks;
    ra_status s = RA_OK;
    for (int32_t far = 1; far < ranks && s == RA_OK; far *= 2) {
        const int to = (r->rank + far) % ranks, from = (r->rank + ranks - far) % ranks;
        const int64_t n = (far < ranks - far ? far : ranks - far) * count;
        s = infer_hop(r->net, r->hop, to, (const int32_t *)(const void *)r->wire, from,
                      (int32_t *)(void *)(r->wire + far * count), (size_t)n);
    }
    return s == RA_OK ? s : infer_hop_failed(r, s);
}

static inline void infer_multiply(const infer_rank *r, const matrix *w, const float *x, float *y,
                                  int64_t n) {
    pool *p = &r->e->workers;
    if (infer_integers(r)) matmul_decode(p, w, x, y, n, r->scratch);
    else matmul_run(p, w, x, y, n, r->scratch);
}

/* Computes this rank's parts of products, and gets those of the others. */
static inline ra_status infer_multiply_parts(infer_rank *r, const infer_times *p, int count) {
    const int32_t ranks = r->e->o.ranks;
    int64_t block = 0, first;
    ra_status s;
    for (int i = 0; i < count; i++) {
        matrix part = *p[i].w;
        part.rows = infer_part(r, p[i].w->rows, r->rank, &first);
        part.data += (size_t)first * (size_t)gguf_row_bytes(part.dtype, part.columns);
        if (part.rows) infer_multiply(r, &part, p[i].x, r->wire + block, p[i].n);
        block += p[i].n * infer_part_room(p[i].w->rows, ranks);
    }
    s = infer_gather(r, block);
    for (int32_t far = 0; far < ranks && s == RA_OK; far++) {
        const float *from = r->wire + far * block;
        for (int i = 0; i < count; i++) {
            const int64_t all = p[i].w->rows;
            const int64_t rows = infer_part(r, all, (r->rank + ranks - far) % ranks, &first);
            for (int64_t t = 0; t < p[i].n && rows; t++)
                memcpy(p[i].y + t * all + first, from + t * rows, (size_t)rows * sizeof *from);
            from += p[i].n * infer_part_room(all, ranks);
        }
    }
    return s;
}

static inline ra_status infer_products(infer_rank *r, const infer_times *p, int count) {
    const ra_status s = infer_splits(r) ? infer_multiply_parts(r, p, count) : RA_OK;
    for (int i = 0; i < count; i++) {
        const int64_t rows = p[i].w->rows;
        if (!infer_splits(r)) infer_multiply(r, p[i].w, p[i].x, p[i].y, p[i].n);
        for (int64_t t = 0; t < p[i].n && p[i].bias; t++)
            for (int64_t j = 0; j < rows; j++) p[i].y[t * rows + j] += p[i].bias[j];
    }
    return s;
}

typedef struct infer_call { ra_cache *cache; ra_status status; } infer_call;

/* A thread of a call. Thread 0 stays until the call is done; the others leave when they have found
 * nothing to do for a while. */
static inline void infer_step(void *ctx, int64_t ith) {
    infer_call *c = (infer_call *)ctx;
    ra_status s;
    for (int idle = 0; (s = ra_infer_step(c->cache, (int)ith)) > 0;) {
        idle = s == RA_AGAIN ? 0 : idle + 1;
        if (idle > 100 && ith) return;
        if (idle > 20) sched_yield();
    }
    if (ith == 0) c->status = s;
}

/* This rank's part of a call, on its share of the threads if the call is large. */
static inline ra_status infer_call_run(infer_rank *r, ra_cache *cache, int64_t first,
                                       int64_t count) {
    const model *m = r->e->m;
    const double work = (double)(r->owned * m->heads) * (double)(first + count) * m->dim;
    infer_call c;
    if (r->e->attend_threads < 2 || work < 2e5)
        return ra_infer(cache, &r->t, &first, &count, RA_NO_DEADLINE);
    c.cache = cache;
    c.status = ra_infer_begin(cache, &r->t, &first, &count, RA_NO_DEADLINE);
    if (c.status == RA_OK) pool_run(&r->e->workers, infer_step, &c, r->e->attend_threads);
    return c.status;
}

/* Each rank has rows of r->o for its own tokens of a call, one after another. All get all. */
static inline ra_status infer_gather_rows(infer_rank *r, const ra_cache *cache, int64_t first,
                                          int64_t count) {
    const int32_t ranks = r->e->o.ranks;
    const int64_t q = (int64_t)r->e->m->heads * r->e->m->dim;
    ra_status s;
    memcpy(r->wire, r->o, (size_t)(count * q) * sizeof *r->o);
    s = infer_gather(r, count * q);
    for (int32_t far = 0; far < ranks && s == RA_OK; far++) {
        const float *from = r->wire + far * count * q;
        for (int64_t i = 0; i < count; i++) {
            if (ra_cache_owner(cache, first + i) != (r->rank + ranks - far) % ranks) continue;
            memcpy(r->o + i * q, from, (size_t)q * sizeof *from);
            from += q;
        }
    }
    return s;
}

/* Stores keys and values of this rank's tokens, then attends its queries to those of all ranks. In
 * the last layer only tokens whose logits are needed have queries. */
static inline ra_status infer_attend(infer_rank *r, int32_t layer, int64_t first, int64_t count) {
    const model *m = r->e->m;
    ra_cache *cache = r->cache[model_windowed(m, layer)][r->decoding];
    const int64_t row = (int64_t)m->kv_heads * m->dim, q = (int64_t)m->heads * m->dim;
    int64_t mine = 0;
    const int64_t skip = layer + 1 < m->layers ? 0 : r->want;
    const int64_t skipped = layer + 1 < m->layers ? 0 : r->skipped;
    ra_status s = RA_OK;
    r->t.k.data = r->memory + (size_t)layer * 2 * r->k_bytes;
    r->t.v.data = r->memory + (size_t)layer * 2 * r->k_bytes + r->k_bytes;
    r->t.q.data = r->q + skipped * m->heads * m->dim;
    r->t.o.data = r->o + skipped * m->heads * m->dim;
    r->t.sinks = m->layer[layer].sinks;
    for (int64_t i = 0; i < r->owned && s == RA_OK; i++) {
        if (ra_cache_owner(cache, first + r->own[i]) != r->rank) continue;
        s = ra_cache_store(cache, &r->t, 0, first + r->own[i], r->k + i * row, r->v + i * row);
        if (infer_splits(r))
            memmove(r->q + mine++ * q, r->q + i * q, (size_t)q * sizeof *r->q);
    }
    if (s == RA_OK && skip < count) s = infer_call_run(r, cache, first + skip, count - skip);
    if (s != RA_OK) return infer_fail(r->e, s, ra_cache_error(cache)->text);
    return infer_splits(r) ? infer_gather_rows(r, cache, first, count) : s;
}

static inline float infer_gelu(float x) {
    return 0.5f * x * (1 + tanhf(0.7978845608028654f * (x + 0.044715f * x * x * x)));
}

/* gate = what the model makes of gate and up, n elements. */
static inline void infer_gate(const infer_rank *r, float *gate, const float *up, int64_t n) {
    const model *m = r->e->m;
    pool *p = &r->e->workers;
    if (!m->gelu && !m->oss) matmul_gate(p, gate, up, n);
    for (int64_t i = 0; i < n && m->gelu; i++) gate[i] = infer_gelu(gate[i]) * up[i];
    for (int64_t i = 0; i < n && m->oss; i++) {
        const float g = gate[i] < 7 ? gate[i] : 7, u = up[i] < -7 ? -7 : up[i] < 7 ? up[i] : 7;
        gate[i] = g / (1 + expf(-1.702f * g)) * (u + 1);
    }
}

/* Adds y to x, for this rank's rows from `from` on, after a norm if the model has one there. */
static inline void infer_add(const infer_rank *r, const float *norm, int64_t from) {
    const model *m = r->e->m;
    pool *p = &r->e->workers;
    float *x = r->x + from * m->hidden, *y = r->y + from * m->hidden;
    if (norm) matmul_norm(p, y, y, norm, r->owned - from, m->hidden, m->epsilon);
    matmul_add(p, x, y, (r->owned - from) * m->hidden);
}

/* Ends the run of all ranks if a row of n numbers of the token at a position, which a layer or,
 * after the last, the output has computed, has one that is none. */
static inline ra_status infer_finite(infer_rank *r, const float *row, int64_t n, int32_t layer,
                                     int64_t position) {
    char text[INFER_WHY], where[32] = "in the logits";
    float sum = 0;
    for (int64_t k = 0; k < n; k++) sum += row[k] * 0;
    if (sum == 0) return RA_OK;
    if (layer < r->e->m->layers) snprintf(where, sizeof where, "after layer %ld", (long)layer);
    snprintf(text, sizeof text, "infinite or NaN %s at token %lld: the weights are damaged, or too "
             "large for f32", where, (long long)position);
    if (r->net && r->net->abort) (void)r->net->abort(r->net->ctx, RA_E_ENGINE);
    return infer_fail(r->e, RA_E_ENGINE, text);
}

/* Rows of one expert: y = w x + bias for the pairs that go to it, of [experts][rows] w and bias. */
static inline ra_status infer_expert(infer_rank *r, const matrix *w, const float *bias,
                                     const float *x, float *y, int32_t expert) {
    const int64_t first = r->start[expert], n = r->start[expert + 1] - first;
    matrix one = *w;
    one.rows = w->rows / r->e->m->experts;
    one.data += (size_t)(expert * one.rows) * (size_t)gguf_row_bytes(w->dtype, w->columns);
    const infer_times p = infer_product(&one, bias ? bias + expert * one.rows : NULL,
                                        x + first * w->columns, y + first * one.rows, n);
    return infer_products(r, &p, 1);
}

/* y of this rank's rows from `from` on becomes what their experts make of it. */
static inline ra_status infer_experts(infer_rank *r, const model_layer *l, int64_t from) {
    const model *m = r->e->m;
    const int64_t n = r->owned - from, pairs = n * m->used, hidden = m->hidden;
    const size_t bytes = (size_t)hidden * sizeof(float);
    float *y = r->y + from * hidden;
    const infer_times route = infer_product(&l->router, l->router_bias, y, r->scores, n);
    ra_status s = infer_products(r, &route, 1);
    if (s != RA_OK) return s;
    for (int64_t i = 0; i < n; i++)
        experts_choose(r->scores + i * m->experts, m->experts, m->used, r->chosen + i * m->used,
                       r->shares + i * m->used);
    experts_sort(r->chosen, pairs, m->experts, r->place, r->start);
    for (int64_t i = 0; i < pairs; i++)
        memcpy(r->pairs + r->place[i] * hidden, y + i / m->used * hidden, bytes);
    for (int32_t e = 0; e < m->experts && s == RA_OK; e++) {
        if (r->start[e] == r->start[e + 1]) continue;
        s = infer_expert(r, &l->gate, l->gate_bias, r->pairs, r->gate, e);
        if (s == RA_OK) s = infer_expert(r, &l->up, l->up_bias, r->pairs, r->up, e);
    }
    infer_gate(r, r->gate, r->up, pairs * m->feed);
    for (int32_t e = 0; e < m->experts && s == RA_OK; e++)
        if (r->start[e] < r->start[e + 1])
            s = infer_expert(r, &l->down, l->down_bias, r->gate, r->pairs, e);
    memset(y, 0, (size_t)n * bytes);
    for (int64_t i = 0; i < pairs; i++) {
        const float *x = r->pairs + r->place[i] * hidden;
        float *to = y + i / m->used * hidden;
        for (int64_t j = 0; j < hidden; j++) to[j] += r->shares[i] * x[j];
    }
    return s;
}

/* What follows the attention of a layer, for this rank's rows from `from` on. */
static inline ra_status infer_feed(infer_rank *r, const model_layer *l, int64_t from) {
    const model *m = r->e->m;
    pool *p = &r->e->workers;
    const int64_t n = r->owned - from;
    float *x = r->x + from * m->hidden, *y = r->y + from * m->hidden;
    float *gate = r->gate + from * m->feed, *up = r->up + from * m->feed;
    const infer_times after = infer_product(&l->o, l->o_bias, r->o + from * l->o.columns, y, n);
    const infer_times feed[] = { infer_product(&l->gate, NULL, y, gate, n),
                                 infer_product(&l->up, NULL, y, up, n),
                                 infer_product(&l->down, NULL, gate, y, n) };
    ra_status s = infer_products(r, &after, 1);
    if (s != RA_OK) return s;
    infer_add(r, l->attention_after, from);
    matmul_norm(p, y, x, l->feed_norm, n, m->hidden, m->epsilon);
    if (m->experts) {
        s = infer_experts(r, l, from);
    } else {
        s = infer_products(r, feed, 2);
        infer_gate(r, gate, up, n * m->feed);
        if (s == RA_OK) s = infer_products(r, feed + 2, 1);
    }
    infer_add(r, l->feed_after, from);
    return s;
}

/* The last layer computes queries, and what follows the attention, for wanted tokens alone. */
static inline ra_status infer_layer(infer_rank *r, int32_t layer, int64_t first, int64_t count) {
    const model *m = r->e->m;
    const model_layer *l = &m->layer[layer];
    const int64_t n = r->owned, from = layer + 1 < m->layers ? 0 : r->skipped;
    const int64_t q = (int64_t)m->heads * m->dim;
    const int windowed = model_windowed(m, layer);
    pool *p = &r->e->workers;
    const infer_times qkv[] = {
        infer_product(&l->q, l->q_bias, r->y + from * m->hidden, r->q + from * q, n - from),
        infer_product(&l->k, l->k_bias, r->y, r->k, n),
        infer_product(&l->v, l->v_bias, r->y, r->v, n) };
    ra_status s;
    matmul_norm(p, r->y, r->x, l->attention_norm, n, m->hidden, m->epsilon);
    s = infer_products(r, qkv, 3);
    if (s != RA_OK) return s;
    if (l->q_norm)
        matmul_norm(p, r->q + from * q, r->q + from * q, l->q_norm,
                    (n - from) * m->heads, m->dim, m->epsilon);
    if (l->k_norm) matmul_norm(p, r->k, r->k, l->k_norm, n * m->kv_heads, m->dim, m->epsilon);
    infer_rope(r, windowed, r->q, m->heads, from);
    infer_rope(r, windowed, r->k, m->kv_heads, 0);
    s = infer_attend(r, layer, first, count);
    if (s != RA_OK) return s;
    s = infer_feed(r, l, from);
    for (int64_t i = 0; i < n && s == RA_OK; i++)
        s = infer_finite(r, r->x + i * m->hidden, m->hidden, layer, first + r->own[i]);
    return s;
}

/* -------------------------------------------------------------------------- the model */
static inline void infer_embed(infer_rank *r, const int32_t *tokens) {
    const matrix *w = &r->e->m->embedding;
    const size_t bytes = (size_t)gguf_row_bytes(w->dtype, w->columns);
    for (int64_t i = 0; i < r->owned; i++)
        gguf_widen(w->dtype, w->data + (size_t)tokens[r->own[i]] * bytes, w->columns,
                   r->x + i * w->columns);
    for (int64_t i = 0; i < r->owned * w->columns; i++) r->x[i] *= r->e->m->embedding_scale;
}

/* How improbable logits make the token at a position, if it is of the prompt. */
static inline void infer_lose(const infer_engine *e, const float *logits, int64_t position) {
    double sum = 0, most = (double)logits[0];
    if (!e->result->loss || position >= e->result->prompt) return;
    for (int64_t i = 1; i < e->m->vocabulary; i++)
        if ((double)logits[i] > most) most = (double)logits[i];
    for (int64_t i = 0; i < e->m->vocabulary; i++) sum += exp((double)logits[i] - most);
    e->result->loss[position] = log(sum) + most -
                                (double)logits[e->result->tokens[position]];
}

/* Computes logits and next tokens of the wanted rows of x. New token i is at position first + i. */
static inline ra_status infer_head(infer_rank *r, int64_t first) {
    const infer_engine *e = r->e;
    const model *m = e->m;
    const int64_t from = r->skipped;
    pool *p = &r->e->workers;
    matmul_norm(p, r->y + from * m->hidden, r->x + from * m->hidden, m->output_norm,
                r->owned - from, m->hidden, m->epsilon);
    for (int64_t at = from; at < r->owned; at += INFER_HEAD_ROWS) {
        const int64_t most = INFER_HEAD_ROWS, n = r->owned - at < most ? r->owned - at : most;
        const infer_times head = infer_product(&m->output, NULL, r->y + at * m->hidden, r->logits,
                                               n);
        ra_status s = infer_products(r, &head, 1);
        if (s != RA_OK) return s;
        for (int64_t i = 0; i < n; i++) {
            const int64_t token = r->own[at + i];
            float *row = r->logits + i * m->vocabulary;
            s = infer_finite(r, row, m->vocabulary, m->layers, first + token);
            if (s != RA_OK) return s;
            for (int64_t k = 0; k < m->vocabulary && m->logit_softcap > 0; k++)
                row[k] = m->logit_softcap * tanhf(row[k] / m->logit_softcap);
            infer_lose(e, row, first + token + 1);
            r->next[token] = infer_sample(&e->o, row, m->vocabulary, first + token, r->choice);
            if (e->result->logits)
                memcpy(e->result->logits + (first + token) * m->vocabulary, row,
                       (size_t)m->vocabulary * sizeof *row);
        }
    }
    return RA_OK;
}

/* Runs the model for tokens [first, first + count) of r->tokens; those before them are cached. From
 * new token `want` on, r->next gets the token that follows each. */
static inline ra_status infer_forward(infer_rank *r, int64_t first, int64_t count, int64_t want) {
    infer_engine *e = r->e;
    ra_status s = RA_OK;
    r->owned = r->skipped = 0;
    r->want = want;
    for (int64_t i = 0; i < count; i++) {
        r->next[i] = -1;
        if (!infer_splits(r) &&
            ra_cache_owner(r->cache[r->some][INFER_PROMPT], first + i) != r->rank)
            continue;
        if (i < want) r->skipped++;
        r->own[r->owned++] = i;
    }
    infer_embed(r, r->tokens + first);
    for (int i = 0; i < 2; i++)
        if (r->cache[i][INFER_PROMPT]) infer_turns(r, i, first);
    for (int32_t i = 0; i < e->m->layers && s == RA_OK; i++) s = infer_layer(r, i, first, count);
    if (s != RA_OK) return s;
    if (r->skipped < r->owned) s = infer_head(r, first);
    return s == RA_OK ? infer_share(r, infer_splits(r) ? count : want, count) : s;
}

#endif
