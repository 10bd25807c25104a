/* A model of the Llama family as a GGUF file has it: its shape, and where its matrices are. What
 * the engine cannot compute exactly is refused with a sentence, and so is every tensor that it does
 * not know. */
#if !defined(INFER_MODEL_H)
#define INFER_MODEL_H

#include "matmul.h"

#include <math.h>

typedef struct model_layer {
    const float *attention_norm, *feed_norm;           /* [hidden] */
    const float *q_norm, *k_norm;                      /* [dim] or null */
    const float *q_bias, *k_bias, *v_bias, *o_bias;    /* or null */
    matrix q, k, v, o, gate, up, down;
} model_layer;

typedef struct model {
    int32_t layers, heads, kv_heads, dim;              /* dim: of a head, of keys and values */
    int64_t hidden, feed, vocabulary, context, window; /* window: latest positions seen; 0: all */
    int32_t rope_dims;                 /* the first dims of a head, which are rotated in pairs */
    int32_t rope_halves;               /* 1: pairs of i and i + rope_dims / 2; 0: of i and i + 1 */
    double rope_base, rope_scale;      /* positions are divided by rope_scale */
    const float *rope_factors;         /* [rope_dims / 2] or null: frequencies are divided by it */
    float epsilon;                     /* of RMSNorm */
    matrix embedding, output;          /* [vocabulary][hidden]; the same where tied */
    const float *output_norm;
    model_layer *layer;
    float *vectors;                    /* what the pointers to vectors point to */
    char name[32];                     /* the architecture */
} model;

enum { MODEL_REQUIRED = -1 };         /* a value without a default */

typedef struct model_reader {
    const gguf *g;
    model *m;
    int64_t used;                      /* tensors */
    int64_t taken;                     /* floats of m->vectors */
    char *why;
} model_reader;

static inline const gguf_value *model_value(const model_reader *r, const char *key) {
    char full[128];
    snprintf(full, sizeof full, "%s.%s", r->m->name, key);
    return gguf_find(r->g, full);
}

/* A number of the file, or `otherwise` if there is none. */
static inline int model_number(const model_reader *r, const char *key, double least, double most,
                               double otherwise, double *out) {
    const gguf_value *v = model_value(r, key);
    *out = otherwise;
    if (v && (v->is_array || v->type == GGUF_STRING))
        return gguf_refuse(r->why, "%s.%s is no single number", r->m->name, key);
    if (v) *out = gguf_element(v, 0);
    if (*out >= least && *out <= most) return 1;
    if (v) snprintf(r->why, INFER_WHY, "%s.%s is %g; %g to %g is possible", r->m->name, key, *out,
                    least, most);
    else snprintf(r->why, INFER_WHY, "%s.%s is missing", r->m->name, key);
    return 0;
}

static inline int model_integer(const model_reader *r, const char *key, int64_t most,
                                double otherwise, int64_t *out) {
    double x;
    if (!model_number(r, key, 0, (double)most, otherwise, &x)) return 0;
    *out = (int64_t)x;
    if ((double)*out == x) return 1;
    return gguf_refuse(r->why, "%s.%s is %g, not a whole number", r->m->name, key, x);
}

/* -------------------------------------------------------------------------- tensors */
/* A tensor of a layer, or with layer -1 of none; null: it is missing or not readable. */
static inline const gguf_tensor *model_tensor(model_reader *r, int32_t layer, const char *what,
                                              int required) {
    char name[128];
    const gguf_tensor *t;
    if (layer < 0) snprintf(name, sizeof name, "%s", what);
    else snprintf(name, sizeof name, "blk.%ld.%s", (long)layer, what);
    t = gguf_find_tensor(r->g, name);
    if (t) r->used++;
    else if (required) snprintf(r->why, INFER_WHY, "the tensor '%s' is missing", name);
    return t;
}

/* A tensor that does not have these sizes is refused; sizes of 1 may follow. */
static inline int model_is(const model_reader *r, const gguf_tensor *t, int64_t columns,
                           int64_t rows) {
    char name[64];
    gguf_show(t->name, name, sizeof name);
    if (t->dtype == RA_DTYPE_UNSET)
        return gguf_refuse(r->why, "the tensor '%s' is in %s (%lu), which this engine does not "
                           "read", name, gguf_type_name(t->type), (unsigned long)t->type);
    if (t->size[0] == columns && gguf_elements(t) == (uint64_t)columns * (uint64_t)rows &&
        (t->dims < 2 || t->size[1] == rows))
        return 1;
    return gguf_refuse(r->why, "the tensor '%s' has %ld dims and begins with %lld x %lld; the "
                       "model needs %lld x %lld", name, (long)t->dims, (long long)t->size[0],
                       (long long)(t->dims > 1 ? t->size[1] : 1), (long long)columns,
                       (long long)rows);
}

static inline int model_matrix(model_reader *r, int32_t layer, const char *what, int64_t columns,
                               int64_t rows, matrix *out) {
    const gguf_tensor *t = model_tensor(r, layer, what, 1);
    if (!t || !model_is(r, t, columns, rows)) return 0;
    out->data = t->data;
    out->columns = columns;
    out->rows = rows;
    out->dtype = t->dtype;
    return 1;
}

/* A vector in f32. *out is null if a tensor that is not required is missing. */
static inline int model_vector(model_reader *r, int32_t layer, const char *what, int64_t n,
                               int required, const float **out) {
    const gguf_tensor *t = model_tensor(r, layer, what, required);
    *out = NULL;
    if (!t) return !required;
    if (!model_is(r, t, n, 1)) return 0;
    gguf_widen(t->dtype, t->data, n, r->m->vectors + r->taken);
    *out = r->m->vectors + r->taken;
    r->taken += n;
    return 1;
}

/* Memory for all vectors of the file. */
static inline int model_vector_room(model_reader *r) {
    uint64_t n = 1;
    for (int64_t i = 0; i < r->g->tensor_count; i++) {
        const gguf_tensor *t = &r->g->tensors[i];
        if (gguf_elements(t) == (uint64_t)t->size[0]) n += (uint64_t)t->size[0];
    }
    r->m->vectors = (float *)malloc((size_t)n * sizeof *r->m->vectors);
    return r->m->vectors ? 1 : gguf_refuse(r->why, "no memory for %llu floats of vectors",
                                           (unsigned long long)n);
}

static inline int model_read_layer(model_reader *r, int32_t i) {
    const model *m = r->m;
    model_layer *l = &r->m->layer[i];
    const int64_t q = (int64_t)m->heads * m->dim, kv = (int64_t)m->kv_heads * m->dim;
    return model_vector(r, i, "attn_norm.weight", m->hidden, 1, &l->attention_norm) &&
           model_vector(r, i, "ffn_norm.weight", m->hidden, 1, &l->feed_norm) &&
           model_vector(r, i, "attn_q_norm.weight", m->dim, 0, &l->q_norm) &&
           model_vector(r, i, "attn_k_norm.weight", m->dim, 0, &l->k_norm) &&
           model_vector(r, i, "attn_q.bias", q, 0, &l->q_bias) &&
           model_vector(r, i, "attn_k.bias", kv, 0, &l->k_bias) &&
           model_vector(r, i, "attn_v.bias", kv, 0, &l->v_bias) &&
           model_vector(r, i, "attn_output.bias", m->hidden, 0, &l->o_bias) &&
           model_matrix(r, i, "attn_q.weight", m->hidden, q, &l->q) &&
           model_matrix(r, i, "attn_k.weight", m->hidden, kv, &l->k) &&
           model_matrix(r, i, "attn_v.weight", m->hidden, kv, &l->v) &&
           model_matrix(r, i, "attn_output.weight", q, m->hidden, &l->o) &&
           model_matrix(r, i, "ffn_gate.weight", m->hidden, m->feed, &l->gate) &&
           model_matrix(r, i, "ffn_up.weight", m->hidden, m->feed, &l->up) &&
           model_matrix(r, i, "ffn_down.weight", m->feed, m->hidden, &l->down);
}

static inline int model_read_tensors(model_reader *r) {
    model *m = r->m;
    const gguf_tensor *e = gguf_find_tensor(r->g, "token_embd.weight");
    if (!r->g->tensor_count)
        return gguf_refuse(r->why, "the file has a vocabulary and no tensors; only --count-tokens "
                           "is possible");
    m->vocabulary = e && e->dims >= 2 ? e->size[1] : 0;
    if (!model_vector_room(r)) return 0;
    if (!model_matrix(r, -1, "token_embd.weight", m->hidden, m->vocabulary, &m->embedding) ||
        !model_vector(r, -1, "output_norm.weight", m->hidden, 1, &m->output_norm) ||
        !model_vector(r, -1, "rope_freqs.weight", m->rope_dims / 2, 0, &m->rope_factors))
        return 0;
    m->output = m->embedding;
    if (gguf_find_tensor(r->g, "output.weight") &&
        !model_matrix(r, -1, "output.weight", m->hidden, m->vocabulary, &m->output))
        return 0;
    m->layer = (model_layer *)calloc((size_t)m->layers, sizeof *m->layer);
    if (!m->layer) return gguf_refuse(r->why, "no memory for %ld layers", (long)m->layers);
    for (int32_t i = 0; i < m->layers; i++)
        if (!model_read_layer(r, i)) return 0;
    if (r->used == r->g->tensor_count) return 1;
    return gguf_refuse(r->why, "the file has %lld tensors and the model uses %lld: it is of a kind "
                       "that this engine does not know", (long long)r->g->tensor_count,
                       (long long)r->used);
}

/* -------------------------------------------------------------------------- values */
static inline int model_read_rope(model_reader *r) {
    model *m = r->m;
    const gguf_value *kind = model_value(r, "rope.scaling.type");
    int64_t dims;
    const gguf_text text = gguf_text_of(kind);
    char name[64];
    gguf_show(text, name, sizeof name);
    m->rope_scale = 1;
    if (!model_integer(r, "rope.dimension_count", m->dim, m->dim, &dims) ||
        !model_number(r, "rope.freq_base", 1, 1e12, 10000, &m->rope_base))
        return 0;
    m->rope_dims = (int32_t)dims;
    if (m->rope_dims < 2 || m->rope_dims % 2)
        return gguf_refuse(r->why, "%s.rope.dimension_count is %ld, which is not even and above 0",
                           m->name, (long)m->rope_dims);
    if (gguf_is(text, "linear"))
        return model_number(r, "rope.scaling.factor", 1e-3, 1e6, MODEL_REQUIRED, &m->rope_scale);
    if (!kind || gguf_is(text, "none")) return 1;
    return gguf_refuse(r->why, "%s.rope.scaling.type is '%s'; this engine computes none and "
                       "linear, and the factors of rope_freqs.weight", m->name, name);
}

static inline int model_read_values(model_reader *r) {
    model *m = r->m;
    int64_t layers, heads, kv_heads, dim, values;
    double epsilon;
    if (!model_integer(r, "block_count", 4096, MODEL_REQUIRED, &layers) ||
        !model_integer(r, "embedding_length", 1 << 20, MODEL_REQUIRED, &m->hidden) ||
        !model_integer(r, "feed_forward_length", 1 << 22, MODEL_REQUIRED, &m->feed) ||
        !model_integer(r, "attention.head_count", 4096, MODEL_REQUIRED, &heads) ||
        !model_integer(r, "attention.head_count_kv", 4096, (double)heads, &kv_heads) ||
        !model_integer(r, "context_length", RA_MAX_POSITION - 1, MODEL_REQUIRED, &m->context) ||
        !model_integer(r, "attention.sliding_window", RA_MAX_POSITION - 1, 0, &m->window) ||
        !model_number(r, "attention.layer_norm_rms_epsilon", 0, 1, MODEL_REQUIRED, &epsilon))
        return 0;
    if (layers < 1 || heads < 1 || kv_heads < 1 || heads % kv_heads || m->hidden < 1 ||
        m->feed < 1 || m->context < 1)
        return gguf_refuse(r->why, "%s with %lld layers, %lld heads, %lld KV heads, %lld hidden "
                           "and %lld feed-forward dims, context %lld is no model", m->name,
                           (long long)layers, (long long)heads, (long long)kv_heads,
                           (long long)m->hidden, (long long)m->feed, (long long)m->context);
    if (!model_integer(r, "attention.key_length", 1024, (double)(m->hidden / heads), &dim) ||
        !model_integer(r, "attention.value_length", 1024, (double)(m->hidden / heads), &values))
        return 0;
    if (dim < 2 || dim != values)
        return gguf_refuse(r->why, "%s has heads of %lld dims for keys and %lld for values; this "
                           "engine needs the same number, at least 2", m->name, (long long)dim,
                           (long long)values);
    m->layers = (int32_t)layers;
    m->heads = (int32_t)heads;
    m->kv_heads = (int32_t)kv_heads;
    m->dim = (int32_t)dim;
    m->epsilon = (float)epsilon;
    return model_read_rope(r);
}

static inline void model_close(model *m) {
    free(m->layer);
    free(m->vectors);
    memset(m, 0, sizeof *m);
}

/* The model of a file, which must stay open. 0: see `why`; then there is nothing to close. */
static inline int model_open(model *m, const gguf *g, char why[INFER_WHY]) {
    static const struct { const char *name; int halves; } known[] = {
        { "llama", 0 }, { "mistral", 0 }, { "qwen2", 1 }, { "qwen3", 1 } };
    const gguf_text text = gguf_text_of(gguf_find(g, "general.architecture"));
    model_reader r;
    int ok = 0;
    memset(m, 0, sizeof *m);
    r.g = g;
    r.m = m;
    r.used = r.taken = 0;
    r.why = why;
    gguf_show(text, m->name, sizeof m->name);
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        if (!gguf_is(text, known[i].name)) continue;
        m->rope_halves = known[i].halves;
        ok = 1;
    }
    if (!ok) snprintf(why, INFER_WHY, "general.architecture is '%s'; this engine knows llama, "
                      "mistral, qwen2 and qwen3", m->name);
    ok = ok && model_read_values(&r) && model_read_tensors(&r);
    if (!ok) model_close(m);
    return ok;
}

#endif
