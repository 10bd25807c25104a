/* The attention of four engines, each in 30 lines or fewer that their own code would call:
 * llama2.c, ggml, llm.c (forward and backward) and an engine with a paged cache. You will see how
 * far each is from a plain loop in double precision. Exits with 1 if one is too far.
 *
 *   cc -O2 -std=c99 -pthread -I. -o dropins examples/dropins.c -lm && ./dropins */
#define RINGATTN_IMPLEMENTATION
#include "ringattn.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* -------------------------------------------------------------------------- llama2.c
 * forward() in run.c: in place of "multihead attention. iterate over all heads", the loop over h
 * with its softmax and s->att. pos is the new token, loff where the layer begins in the caches. */
typedef struct { int dim, n_heads, n_kv_heads, seq_len; } Config;
typedef struct { float *xb, *q, *key_cache, *value_cache; } RunState;

static ra_status llama2_attention(const Config *p, RunState *s, int64_t loff, int pos) {
    return ra_attention_simple(s->xb, s->q, s->key_cache + loff, s->value_cache + loff, 1, pos + 1,
                               p->n_heads, p->n_kv_heads, p->dim / p->n_heads, 0, 0, pos);
}

/* -------------------------------------------------------------------------- ggml
 * A custom op, ggml_custom_4d(ctx, GGML_TYPE_F32, D, H, T, 1, args, 4, ring_op, GGML_N_TASKS_MAX,
 * &op) with args = { q, k, v, mask }, in place of ggml_flash_attn_ext: q [D, T, H], k and v
 * [D, KV, Hkv] in any strides, mask [KV, T] in f16 as llama.cpp makes it, the result [D, H, T].
 * With three args the last T of the KV keys are those of the T queries. bytes is ra_attention_bytes
 * for the largest call on all threads. */
struct ggml_tensor { int64_t ne[4]; size_t nb[4]; struct ggml_tensor *src[4]; void *data; };
struct ring_op { void *workspace; size_t bytes; int32_t kv_dtype; ra_status status[64]; };

static ra_in view(const struct ggml_tensor *x) {
    const ra_in v = { x->data, (int64_t)x->nb[3], (int64_t)x->nb[1], (int64_t)x->nb[2],
                      x->ne[1] };
    return v;
}

static void ring_op(struct ggml_tensor *dst, int ith, int nth, void *userdata) {
    struct ring_op *op = (struct ring_op *)userdata;
    const struct ggml_tensor *q = dst->src[0], *k = dst->src[1], *m = dst->src[3];
    ra_desc d = ra_desc_make((int32_t)q->ne[2], (int32_t)k->ne[2], (int32_t)q->ne[0], RA_F32,
                             m ? RA_MASK_NONE : RA_MASK_CAUSAL);
    ra_tensors t;
    memset(&t, 0, sizeof t);
    d.k_dtype = d.v_dtype = op->kv_dtype;
    d.tokens = q->ne[1];
    d.kv_tokens = k->ne[1];
    d.q_offset = m ? 0 : k->ne[1] - q->ne[1];
    if (m) {
        const ra_bias b = { m->data, 0, 0, (int64_t)m->nb[1], (int64_t)m->nb[0], m->ne[0], RA_F16 };
        d.scores = RA_SCORE_BIAS;
        t.bias = b;
    }
    t.q = view(q);
    t.k = view(k);
    t.v = view(dst->src[2]);
    t.o.data = dst->data;
    op->status[ith] = ra_attention(&d, &t, op->workspace, op->bytes, ith, nth);
}

/* -------------------------------------------------------------------------- llm.c
 * attention_forward and attention_backward of train_gpt2.c, with inp and dinp (B, T, 3C) and out
 * (B, T, C). att, which held all weights, keeps the LSE (B, T, NH); preatt is not needed. Backward
 * takes out as well: acts.atty. */
typedef struct { int B, T, C, NH; } Shape;

static ra_tensors llmc_views(float *out, float *att, const float *inp, int C) {
    ra_tensors t;
    memset(&t, 0, sizeof t);
    t.q.data = inp; t.k.data = inp + C; t.v.data = inp + 2 * C;
    t.q.token_stride = t.k.token_stride = t.v.token_stride = 3 * C * (int64_t)sizeof(float);
    t.o.data = out;
    t.lse.data = att;
    return t;
}

static ra_status attention_forward(float *out, float *att, const float *inp, Shape n) {
    ra_desc d = ra_desc_make(n.NH, n.NH, n.C / n.NH, RA_F32, RA_MASK_CAUSAL);
    const ra_tensors t = llmc_views(out, att, inp, n.C);
    d.sequences = n.B; d.tokens = n.T; d.train = 1;
    return ra_attention(&d, &t, NULL, 0, 0, 1);
}

static ra_status attention_backward(float *dinp, const float *dout, float *out, float *att,
                                    const float *inp, Shape n) {
    ra_desc d = ra_desc_make(n.NH, n.NH, n.C / n.NH, RA_F32, RA_MASK_CAUSAL);
    ra_tensors t = llmc_views(out, att, inp, n.C);
    d.sequences = n.B; d.tokens = n.T; d.train = 1;
    t.d_o.data = dout;
    t.d_q.data = dinp; t.d_k.data = dinp + n.C; t.d_v.data = dinp + 2 * n.C;
    t.d_q.token_stride = t.d_k.token_stride = t.d_v.token_stride = t.q.token_stride;
    const size_t bytes = ra_attention_backward_bytes(&d, 1);
    void *memory = malloc(bytes);
    const ra_status s = memory ? ra_attention_backward(&d, &t, memory, bytes, 0, 1) : RA_E_NOMEM;
    free(memory);
    return s;
}

/* -------------------------------------------------------------------------- a paged engine
 * The body of a paged_attention(): pages of PAGE tokens anywhere in a pool, a table per sequence
 * that says which. Pages are read where they are. count includes the new token. */
enum { PAGE = 16 };

static ra_status paged_attention(ra_desc d, ra_tensors pool, const int32_t *table, int64_t pages,
                                 int64_t count) {
    d.tokens = 1;
    d.q_offset = count - 1;
    d.page_tokens = PAGE;
    pool.pages.table = table;
    pool.pages.count = pages;
    return ra_attention(&d, &pool, NULL, 0, 0, 1);
}

/* -------------------------------------------------------------------------- plain loops */
enum { HEADS = 8, KV_HEADS = 2, DIM = 32, TEXT = 70, ROOM = 96, MINUS_INFINITY = 0xfc00 };

static float q[TEXT][HEADS][DIM], k[TEXT][KV_HEADS][DIM], v[TEXT][KV_HEADS][DIM];

static void fill(float *x, size_t n, uint32_t seed) {
    for (size_t i = 0; i < n; i++) {
        seed = seed * 1664525u + 1013904223u;
        x[i] = (float)(seed >> 8) / 8388608 - 1;
    }
}

/* Weights of row `at` of head h, and its output. */
static void plain_row(int at, int h, double weight[TEXT], double out[DIM]) {
    const int g = h / (HEADS / KV_HEADS);
    double sum = 0;
    memset(out, 0, DIM * sizeof *out);
    for (int j = 0; j <= at; j++) {
        double score = 0;
        for (int i = 0; i < DIM; i++) score += (double)q[at][h][i] * (double)k[j][g][i];
        sum += weight[j] = exp(score / sqrt(DIM));
    }
    for (int j = 0; j <= at; j++) {
        weight[j] /= sum;
        for (int i = 0; i < DIM; i++) out[i] += weight[j] * (double)v[j][g][i];
    }
}

/* The largest difference of `got` [rows][HEADS][DIM] from the rows `first` on. */
static double far_from_plain(const float *got, int first, int rows) {
    double weight[TEXT], out[DIM], most = 0;
    for (int r = 0; r < rows; r++) {
        for (int h = 0; h < HEADS; h++) {
            plain_row(first + r, h, weight, out);
            for (int i = 0; i < DIM; i++)
                most = fmax(most, fabs((double)got[(r * HEADS + h) * DIM + i] - out[i]));
        }
    }
    return most;
}

static int judged(const char *what, ra_status s, double far, double limit) {
    printf("%-26s %s, largest difference %.1e\n", what, ra_status_text(s), far);
    return s != RA_OK || !(far <= limit);
}

/* -------------------------------------------------------------------------- the engines */
static int try_llama2(void) {
    static float cache[2][2][TEXT][KV_HEADS][DIM], out[HEADS][DIM];
    const Config p = { HEADS * DIM, HEADS, KV_HEADS, TEXT };
    const int64_t layer = 1, loff = layer * TEXT * KV_HEADS * DIM;
    double far = 0;
    ra_status s = RA_OK;
    memcpy(cache[0][layer], k, sizeof k);
    memcpy(cache[1][layer], v, sizeof v);
    for (int pos = 0; pos < TEXT && s == RA_OK; pos++) {
        RunState state = { &out[0][0], &q[pos][0][0], &cache[0][0][0][0][0],
                           &cache[1][0][0][0][0] };
        s = llama2_attention(&p, &state, loff, pos);
        far = fmax(far, far_from_plain(&out[0][0], pos, 1));
    }
    return judged("llama2.c", s, far, 2e-6);
}

/* Heads apart from tokens, as llama.cpp permutes them, and a cache in f16. With a mask the cache is
 * longer than what is in it, as there. */
static int try_ggml(int tokens, int masked) {
    static float heads_first[HEADS][TEXT][DIM], out[TEXT][HEADS][DIM];
    static uint16_t half[2][ROOM][KV_HEADS][DIM], hidden[TEXT][ROOM];
    const int first = TEXT - tokens, nth = 3;
    struct ring_op op;
    ra_desc d = ra_desc_make(HEADS, KV_HEADS, DIM, RA_F32, RA_MASK_CAUSAL);
    struct ggml_tensor a = { { DIM, tokens, HEADS, 1 },
                             { 4, DIM * 4, TEXT * DIM * 4, sizeof heads_first },
                             { NULL, NULL, NULL, NULL }, heads_first };
    struct ggml_tensor b = { { DIM, masked ? ROOM : TEXT, KV_HEADS, 1 },
                             { 2, KV_HEADS * DIM * 2, DIM * 2, sizeof half[0] },
                             { NULL, NULL, NULL, NULL }, half[0] };
    struct ggml_tensor c = b;
    struct ggml_tensor m = { { ROOM, tokens, 1, 1 }, { 2, ROOM * 2, sizeof hidden, sizeof hidden },
                             { NULL, NULL, NULL, NULL }, hidden };
    struct ggml_tensor dst = { { DIM, HEADS, tokens, 1 },
                               { 4, DIM * 4, HEADS * DIM * 4, sizeof out },
                               { &a, &b, &c, masked ? &m : NULL }, out };
    char what[40];
    int bad = 0;
    c.data = half[1];
    for (int i = 0; i < tokens; i++)
        for (int h = 0; h < HEADS; h++) memcpy(heads_first[h][i], q[first + i][h], DIM * 4);
    (void)ra_convert(half[0], RA_F16, k, RA_F32, TEXT * KV_HEADS * DIM);
    (void)ra_convert(half[1], RA_F16, v, RA_F32, TEXT * KV_HEADS * DIM);
    for (int i = 0; i < tokens; i++)
        for (int j = 0; j < ROOM; j++) hidden[i][j] = j <= first + i ? 0 : MINUS_INFINITY;
    d.k_dtype = d.v_dtype = op.kv_dtype = RA_F16;
    d.tokens = tokens;
    d.kv_tokens = ROOM;
    d.scores = masked ? RA_SCORE_BIAS : 0;
    d.mask.kind = masked ? RA_MASK_NONE : RA_MASK_CAUSAL;
    op.bytes = ra_attention_bytes(&d, nth);
    op.workspace = malloc(op.bytes);
    if (!op.workspace) return 1;
    for (int ith = 0; ith < nth; ith++) ring_op(&dst, ith, nth, &op);
    free(op.workspace);
    for (int ith = 0; ith < nth; ith++) bad |= op.status[ith] != RA_OK;
    snprintf(what, sizeof what, "ggml, f16, %d token%s%s", tokens, tokens > 1 ? "s" : "",
             masked ? ", mask" : "");
    return judged(what, op.status[0], far_from_plain(&out[0][0][0], first, tokens), 1e-3) | bad;
}

/* MHA: the queries of every fourth head. Gradients by the plain formulas, in double precision. */
static int try_llmc(void) {
    enum { C = KV_HEADS * DIM };
    static float inp[TEXT][3][KV_HEADS][DIM], dinp[TEXT][3][KV_HEADS][DIM], out[TEXT][C];
    static float dout[TEXT][KV_HEADS][DIM], att[TEXT][KV_HEADS];
    static double want[TEXT][3][KV_HEADS][DIM];
    const Shape shape = { 1, TEXT, C, KV_HEADS };
    const int group = HEADS / KV_HEADS;
    double far = 0, weight[TEXT], o[DIM];
    ra_status s;
    fill(&dout[0][0][0], TEXT * C, 9);
    for (int t = 0; t < TEXT; t++) {
        for (int h = 0; h < KV_HEADS; h++) {
            memcpy(inp[t][0][h], q[t][h * group], DIM * 4);
            memcpy(inp[t][1][h], k[t][h], DIM * 4);
            memcpy(inp[t][2][h], v[t][h], DIM * 4);
        }
    }
    s = attention_forward(&out[0][0], &att[0][0], &inp[0][0][0][0], shape);
    if (s == RA_OK)
        s = attention_backward(&dinp[0][0][0][0], &dout[0][0][0], &out[0][0], &att[0][0],
                               &inp[0][0][0][0], shape);
    for (int t = 0; t < TEXT; t++) {
        for (int h = 0; h < KV_HEADS; h++) {
            double delta = 0;
            plain_row(t, h * group, weight, o);
            for (int i = 0; i < DIM; i++) {
                delta += o[i] * (double)dout[t][h][i];
                far = fmax(far, fabs(o[i] - (double)out[t][h * DIM + i]));
            }
            for (int j = 0; j <= t; j++) {
                double g = -delta;
                for (int i = 0; i < DIM; i++) {
                    g += (double)dout[t][h][i] * (double)v[j][h][i];
                    want[j][2][h][i] += weight[j] * (double)dout[t][h][i];
                }
                for (int i = 0; i < DIM; i++) {
                    want[t][0][h][i] += weight[j] * g / sqrt(DIM) * (double)k[j][h][i];
                    want[j][1][h][i] += weight[j] * g / sqrt(DIM) * (double)inp[t][0][h][i];
                }
            }
        }
    }
    for (size_t i = 0; i < sizeof dinp / sizeof(float); i++)
        far = fmax(far, fabs((double)(&dinp[0][0][0][0])[i] - (&want[0][0][0][0])[i]));
    return judged("llm.c, with gradients", s, far, 1e-5);
}

static int try_paged(void) {
    enum { PAGES = (TEXT + PAGE - 1) / PAGE };
    static float pool[2][2 * PAGES][PAGE][KV_HEADS][DIM], out[HEADS][DIM];
    int32_t table[PAGES];
    ra_tensors t;
    double far = 0;
    ra_status s = RA_OK;
    memset(&t, 0, sizeof t);
    memset(pool, 0xFF, sizeof pool);                   /* other sequences' pages: NaN */
    for (int i = 0; i < PAGES; i++) table[i] = (i * 7 + 3) % (2 * PAGES);
    for (int i = 0; i < TEXT; i++) {
        memcpy(pool[0][table[i / PAGE]][i % PAGE], k[i], sizeof k[i]);
        memcpy(pool[1][table[i / PAGE]][i % PAGE], v[i], sizeof v[i]);
    }
    t.k.data = pool[0];
    t.v.data = pool[1];
    t.o.data = out;
    for (int at = 0; at < TEXT && s == RA_OK; at++) {
        t.q.data = q[at];
        s = paged_attention(ra_desc_make(HEADS, KV_HEADS, DIM, RA_F32, RA_MASK_CAUSAL), t, table,
                            2 * PAGES, at + 1);
        far = fmax(far, far_from_plain(&out[0][0], at, 1));
    }
    return judged("pages of 16 tokens", s, far, 2e-6);
}

int main(void) {
    int bad;
    fill(&q[0][0][0], sizeof q / sizeof(float), 1);
    fill(&k[0][0][0], sizeof k / sizeof(float), 2);
    fill(&v[0][0][0], sizeof v / sizeof(float), 3);
    bad = try_llama2();
    for (int i = 0; i < 4; i++) bad |= try_ggml(i % 2 ? 20 : 1, i / 2);
    bad |= try_llmc();
    bad |= try_paged();
    return bad;
}
