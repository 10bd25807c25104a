/* A model of the Llama, Qwen, Gemma or gpt-oss family as a GGUF file has it: its shape, and where
 * its matrices are. What the engine cannot compute exactly is refused with a sentence, and so is
 * every tensor that it does not know. Every key is used, harmless, or refused if it has an effect;
 * those that are not listed are named in model.unknown. */
#if !defined(INFER_MODEL_H)
#define INFER_MODEL_H

#include "matmul.h"

#include <math.h>

typedef struct model_layer {
    const float *attention_norm, *feed_norm;           /* [hidden] */
    const float *q_norm, *k_norm;                      /* [dim] or null */
    const float *attention_after, *feed_after;         /* [hidden] or null, of what is added */
    const float *q_bias, *k_bias, *v_bias, *o_bias;    /* or null */
    const float *sinks;                                /* [heads] or null */
    const float *gate_bias, *up_bias, *down_bias;      /* of all experts, or null */
    const float *router_bias;                          /* [experts] or null */
    matrix q, k, v, o, gate, up, down;                 /* of experts: rows of all, in turn */
    matrix router;                                     /* [experts][hidden] */
} model_layer;

typedef struct model {
    int32_t layers, heads, kv_heads, dim;              /* dim: of a head, of keys and values */
    int32_t experts, used;             /* used: for each token; 0 experts: a dense model */
    int64_t hidden, feed, vocabulary, context, window; /* window: latest positions seen; 0: all */
    int32_t pattern;                   /* every pattern-th layer sees all; 0: all have the window */
    int32_t rope_dims;                 /* the first dims of a head, which are rotated in pairs */
    int32_t rope_halves;               /* 1: pairs of i and i + rope_dims / 2; 0: of i and i + 1 */
    float *rope[2];                    /* [rope_dims / 2] radians per position, of layers that see
                                        * all and of those with a window */
    double rope_magnitude;             /* factor of what is rotated */
    float scale, softcap;              /* of scores; 0: 1/sqrt(dim), none */
    float logit_softcap;               /* 0: none */
    float embedding_scale;
    int32_t gelu;                      /* 1: GELU by tanh instead of SiLU */
    int32_t oss;                       /* 1: as gpt-oss: sinks, biases, gates within 7 */
    float epsilon;                     /* of RMSNorm */
    matrix embedding, output;          /* [vocabulary][hidden]; the same where tied */
    const float *output_norm;
    model_layer *layer;
    float *vectors;                    /* what the pointers to vectors point to */
    const gguf *file;
    char name[32];                     /* the architecture */
    char unknown[200];                 /* keys with commas between them */
} model;

/* FNV-1a, continued from h. */
static inline uint64_t infer_hash(uint64_t h, const void *data, size_t n) {
    const uint8_t *p = (const uint8_t *)data;
    for (size_t i = 0; i < n; i++) h = (h ^ p[i]) * 1099511628211u;
    return h;
}

/* 1: the layer sees only the window. */
static inline int model_windowed(const model *m, int32_t layer) {
    return m->window > 0 && (!m->pattern || (layer + 1) % m->pattern != 0);
}

enum { MODEL_REQUIRED = -1 };         /* a value without a default */

enum { ROPE_NONE, ROPE_LINEAR, ROPE_YARN, ROPE_LONG };

typedef struct model_rope {
    int kind;
    double base, window_base, factor, original, fast, slow;
    int whole;                         /* 1: YaRN mixes from a whole pair to a whole pair */
} model_rope;

typedef struct model_reader {
    const gguf *g;
    model *m;
    model_rope rope;
    int gemma;                         /* 2, 3: of this Gemma; 0: of another family */
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
    if (v) snprintf(r->why, INFER_WHY, "%s.%s is %.10g; %.10g to %.10g is possible", r->m->name,
                    key, *out, least, most);
    else snprintf(r->why, INFER_WHY, "%s.%s is missing", r->m->name, key);
    return 0;
}

static inline int model_integer(const model_reader *r, const char *key, int64_t most,
                                double otherwise, int64_t *out) {
    double x;
    if (!model_number(r, key, 0, (double)most, otherwise, &x)) return 0;
    *out = (int64_t)x;
    if ((double)*out == x) return 1;
    return gguf_refuse(r->why, "%s.%s is %.10g, not a whole number", r->m->name, key, x);
}

/* -------------------------------------------------------------------------- keys
 * '+': used. '-': no effect on numbers or text. '=': refused unless it has the value beside it,
 * which has no effect. A key that begins with a dot follows the architecture's name; one that ends
 * in * is all that begin so. */
static const struct { const char *key; char use; double without; } model_keys[] = {
    { "general.architecture", '+', 0 }, { "general.alignment", '+', 0 },
    { "general.type", '-', 0 }, { "general.name", '-', 0 }, { "general.basename", '-', 0 },
    { "general.author", '-', 0 },
    { "general.version", '-', 0 }, { "general.organization", '-', 0 },
    { "general.finetune", '-', 0 }, { "general.description", '-', 0 },
    { "general.quantized_by", '-', 0 }, { "general.size_label", '-', 0 },
    { "general.license*", '-', 0 }, { "general.url", '-', 0 }, { "general.doi", '-', 0 },
    { "general.uuid", '-', 0 }, { "general.repo_url", '-', 0 }, { "general.source.*", '-', 0 },
    { "general.base_model.*", '-', 0 }, { "general.dataset*", '-', 0 },
    { "general.tags", '-', 0 }, { "general.languages", '-', 0 }, { "general.file_type", '-', 0 },
    { "general.quantization_version", '-', 0 }, { "general.sampling.*", '-', 0 },
    { "split.*", '+', 0 }, { "quantize.imatrix.*", '-', 0 },
    { "tokenizer.ggml.model", '+', 0 }, { "tokenizer.ggml.pre", '+', 0 },
    { "tokenizer.ggml.tokens", '+', 0 }, { "tokenizer.ggml.scores", '+', 0 },
    { "tokenizer.ggml.token_type", '+', 0 }, { "tokenizer.ggml.merges", '+', 0 },
    { "tokenizer.ggml.bos_token_id", '+', 0 }, { "tokenizer.ggml.eos_token_id", '+', 0 },
    { "tokenizer.ggml.eot_token_id", '+', 0 }, { "tokenizer.ggml.eom_token_id", '+', 0 },
    { "tokenizer.ggml.unknown_token_id", '+', 0 }, { "tokenizer.ggml.add_bos_token", '+', 0 },
    { "tokenizer.ggml.add_space_prefix", '+', 0 }, { "tokenizer.ggml.add_eos_token", '=', 0 },
    { "tokenizer.ggml.add_sep_token", '=', 0 }, { "tokenizer.ggml.*_token_id", '-', 0 },
    { "tokenizer.ggml.token_type_count", '-', 0 }, { "tokenizer.chat_template*", '-', 0 },
    { "tokenizer.huggingface.json", '-', 0 },
    { ".vocab_size", '-', 0 }, { ".context_length", '+', 0 }, { ".embedding_length", '+', 0 },
    { ".block_count", '+', 0 }, { ".feed_forward_length", '+', 0 },
    { ".attention.head_count", '+', 0 }, { ".attention.head_count_kv", '+', 0 },
    { ".attention.key_length", '+', 0 }, { ".attention.value_length", '+', 0 },
    { ".attention.layer_norm_rms_epsilon", '+', 0 }, { ".attention.sliding_window", '+', 0 },
    { ".attention.sliding_window_pattern", '+', 0 }, { ".attention.scale", '+', 0 },
    { ".attn_logit_softcapping", '+', 0 }, { ".final_logit_softcapping", '+', 0 },
    { ".rope.dimension_count", '+', 0 }, { ".rope.freq_base", '+', 0 },
    { ".rope.freq_base_swa", '+', 0 }, { ".rope.scale_linear", '+', 0 },
    { ".rope.scaling.type", '+', 0 }, { ".rope.scaling.factor", '+', 0 },
    { ".rope.scaling.attn_factor", '+', 0 }, { ".rope.scaling.original_context_length", '+', 0 },
    { ".rope.scaling.yarn_beta_fast", '+', 0 }, { ".rope.scaling.yarn_beta_slow", '+', 0 },
    { ".rope.scaling.finetuned", '-', 0 }, { ".tensor_data_layout", '-', 0 },
    { ".rope.scaling.alpha", '=', 0 }, { ".rope.scaling.yarn_log_multiplier", '=', 0 },
    { ".rope.scaling.yarn_ext_factor", '=', 1 }, { ".rope.scaling.yarn_attn_factor", '=', 1 },
    { ".rope.dimension_sections", '=', 0 }, { ".rope.dimension_count_swa", '=', 0 },
    { ".attention.causal", '=', 1 }, { ".attention.max_alibi_bias", '=', 0 },
    { ".attention.clamp_kqv", '=', 0 }, { ".attention.layer_norm_epsilon", '=', 0 },
    { ".attention.group_norm*", '=', 0 }, { ".attention.output_scale", '=', 1 },
    { ".attention.value_scale", '=', 1 }, { ".attention.temperature_length", '=', 0 },
    { ".attention.temperature_scale", '=', 0 }, { ".attention.key_length_*", '=', 0 },
    { ".attention.value_length_*", '=', 0 }, { ".attention.indexer.*", '=', 0 },
    { ".attention.shared_kv_layers", '=', 0 }, { ".attention.*lora_rank*", '=', 0 },
    { ".logit_scale", '=', 1 }, { ".residual_scale", '=', 1 }, { ".embedding_scale", '=', 1 },
    { ".expert_count", '+', 0 }, { ".expert_used_count", '+', 0 },
    { ".expert_feed_forward_length", '+', 0 }, { ".expert_shared_count", '=', 0 },
    { ".expert_shared_feed_forward_length", '=', 0 }, { ".expert_weights_scale", '=', 1 },
    { ".expert_weights_norm", '=', 1 }, { ".expert_gating_func", '=', 1 },
    { ".expert_group_count", '=', 0 }, { ".leading_dense_block_count", '=', 0 },
    { ".interleave_moe_layer_step", '=', 1 },
    { ".use_parallel_residual", '=', 0 }, { ".pooling_type", '=', 0 },
    { ".nextn_predict_layers", '=', 0 }, { ".num_loops", '=', 1 } };

/* 1: the key fits the pattern. A * stands for any characters. */
static inline int model_key_fits(const char *pattern, const char *key, size_t n) {
    for (; *pattern && *pattern != '*'; pattern++, key++, n--)
        if (!n || *key != *pattern) return 0;
    if (!*pattern) return n == 0;
    for (size_t i = 0; i <= n; i++)
        if (model_key_fits(pattern + 1, key + i, n - i)) return 1;
    return 0;
}

static inline int model_check_key(const model_reader *r, const gguf_value *v) {
    model *m = r->m;
    const size_t arch = strlen(m->name), n = v->key.size, used = strlen(m->unknown);
    const int own = n > arch && !memcmp(v->key.data, m->name, arch) && v->key.data[arch] == '.';
    const size_t from = own ? arch : 0;
    char name[64];
    gguf_show(v->key, name, sizeof name);
    for (size_t i = 0; i < sizeof model_keys / sizeof *model_keys; i++) {
        const double without = model_keys[i].without;
        if (!model_key_fits(model_keys[i].key, v->key.data + from, n - from)) continue;
        if (model_keys[i].use != '=') return 1;
        if (v->is_array || v->type == GGUF_STRING)
            return gguf_refuse(r->why, "%s is set; this engine does not compute it", name);
        if (gguf_element(v, 0) >= without && gguf_element(v, 0) <= without) return 1;
        return gguf_refuse(r->why, "%s is %.10g; this engine computes only %.10g", name,
                           gguf_element(v, 0), without);
    }
    snprintf(m->unknown + used, sizeof m->unknown - used, "%s%s", used ? ", " : "", name);
    return 1;
}

static inline int model_check_keys(const model_reader *r) {
    for (int64_t i = 0; i < r->g->value_count; i++)
        if (!model_check_key(r, &r->g->values[i])) return 0;
    return 1;
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

/* The matrices of all experts, of `rows` rows each. */
static inline int model_expert_matrix(model_reader *r, int32_t layer, const char *what,
                                      int64_t columns, int64_t rows, matrix *out) {
    const gguf_tensor *t = model_tensor(r, layer, what, 1);
    gguf_tensor one;
    if (!t) return 0;
    one = *t;
    if (t->dims != 3 || t->size[2] != r->m->experts)
        return gguf_refuse(r->why, "the tensor of layer %ld, %s, has %ld dims and %lld experts; "
                           "the model needs 3 and %ld", (long)layer, what, (long)t->dims,
                           (long long)(t->dims > 2 ? t->size[2] : 0), (long)r->m->experts);
    one.dims = 2;
    if (!model_is(r, &one, columns, rows)) return 0;
    out->data = t->data;
    out->columns = columns;
    out->rows = rows * r->m->experts;
    out->dtype = t->dtype;
    return 1;
}

/* Vectors in f32, `rows` of n. *out is null if a tensor that is not required is missing. */
static inline int model_vectors(model_reader *r, int32_t layer, const char *what, int64_t n,
                                int64_t rows, int required, const float **out) {
    const gguf_tensor *t = model_tensor(r, layer, what, required);
    *out = NULL;
    if (!t) return !required;
    if (!model_is(r, t, n, rows)) return 0;
    gguf_widen(t->dtype, t->data, n * rows, r->m->vectors + r->taken);
    *out = r->m->vectors + r->taken;
    r->taken += n * rows;
    return 1;
}

static inline int model_vector(model_reader *r, int32_t layer, const char *what, int64_t n,
                               int required, const float **out) {
    return model_vectors(r, layer, what, n, 1, required, out);
}

/* Memory for all vectors of the file. */
static inline int model_vector_room(model_reader *r) {
    uint64_t n = 1;
    for (int64_t i = 0; i < r->g->tensor_count; i++) {
        const gguf_tensor *t = &r->g->tensors[i];
        const size_t end = t->name.size > 5 ? t->name.size - 5 : 0;
        if (gguf_elements(t) == (uint64_t)t->size[0] ||
            (r->m->experts && !memcmp(t->name.data + end, ".bias", end ? 5 : 0)))
            n += gguf_elements(t);
    }
    r->m->vectors = (float *)malloc((size_t)n * sizeof *r->m->vectors);
    return r->m->vectors ? 1 : gguf_refuse(r->why, "no memory for %llu floats of vectors",
                                           (unsigned long long)n);
}

/* What follows the attention: one gate, up and down, or those of experts. */
static inline int model_read_feed(model_reader *r, int32_t i) {
    const model *m = r->m;
    model_layer *l = &r->m->layer[i];
    const int64_t n = m->experts;
    if (!n)
        return model_matrix(r, i, "ffn_gate.weight", m->hidden, m->feed, &l->gate) &&
               model_matrix(r, i, "ffn_up.weight", m->hidden, m->feed, &l->up) &&
               model_matrix(r, i, "ffn_down.weight", m->feed, m->hidden, &l->down);
    return model_matrix(r, i, "ffn_gate_inp.weight", m->hidden, n, &l->router) &&
           model_vector(r, i, "ffn_gate_inp.bias", n, m->oss, &l->router_bias) &&
           model_vectors(r, i, "ffn_gate_exps.bias", m->feed, n, m->oss, &l->gate_bias) &&
           model_vectors(r, i, "ffn_up_exps.bias", m->feed, n, m->oss, &l->up_bias) &&
           model_vectors(r, i, "ffn_down_exps.bias", m->hidden, n, m->oss, &l->down_bias) &&
           model_expert_matrix(r, i, "ffn_gate_exps.weight", m->hidden, m->feed, &l->gate) &&
           model_expert_matrix(r, i, "ffn_up_exps.weight", m->hidden, m->feed, &l->up) &&
           model_expert_matrix(r, i, "ffn_down_exps.weight", m->feed, m->hidden, &l->down);
}

static inline int model_read_layer(model_reader *r, int32_t i) {
    const model *m = r->m;
    model_layer *l = &r->m->layer[i];
    const int64_t q = (int64_t)m->heads * m->dim, kv = (int64_t)m->kv_heads * m->dim;
    const char *feed_norm = m->oss ? "post_attention_norm.weight" : "ffn_norm.weight";
    return model_vector(r, i, "attn_norm.weight", m->hidden, 1, &l->attention_norm) &&
           model_vector(r, i, feed_norm, m->hidden, 1, &l->feed_norm) &&
           (m->oss || model_vector(r, i, "post_attention_norm.weight", m->hidden, m->gelu,
                                   &l->attention_after)) &&
           (!m->oss || model_vector(r, i, "attn_sinks.weight", m->heads, 1, &l->sinks)) &&
           model_vector(r, i, "post_ffw_norm.weight", m->hidden, m->gelu, &l->feed_after) &&
           model_vector(r, i, "attn_q_norm.weight", m->dim, 0, &l->q_norm) &&
           model_vector(r, i, "attn_k_norm.weight", m->dim, 0, &l->k_norm) &&
           model_vector(r, i, "attn_q.bias", q, 0, &l->q_bias) &&
           model_vector(r, i, "attn_k.bias", kv, 0, &l->k_bias) &&
           model_vector(r, i, "attn_v.bias", kv, 0, &l->v_bias) &&
           model_vector(r, i, "attn_output.bias", m->hidden, 0, &l->o_bias) &&
           model_matrix(r, i, "attn_q.weight", m->hidden, q, &l->q) &&
           model_matrix(r, i, "attn_k.weight", m->hidden, kv, &l->k) &&
           model_matrix(r, i, "attn_v.weight", m->hidden, kv, &l->v) &&
           model_matrix(r, i, "attn_output.weight", q, m->hidden, &l->o) && model_read_feed(r, i);
}

/* YaRN divides slow frequencies by the factor, keeps fast ones, and mixes those between. Their
 * turns in the original context are from beta_fast down to beta_slow. */
static inline double model_yarn_kept(const model_rope *y, int32_t dims, double base, int32_t pair) {
    const double unit = dims / (2 * log(base)), full = 6.283185307179586;
    double low = unit * log(y->original / (y->fast * full));
    double high = unit * log(y->original / (y->slow * full));
    if (y->whole) low = floor(low);
    if (y->whole) high = ceil(high);
    if (low < 0) low = 0;
    if (high > dims - 1) high = dims - 1;
    const double at = (pair - low) / (high - low > 0.001 ? high - low : 0.001);
    return at < 0 ? 1 : at > 1 ? 0 : 1 - at;
}

/* Radians per position of a pair, rounded to f32 as in the libraries that models come from. */
static inline float model_frequency(const model_reader *r, double base, int32_t pair, int scaled) {
    const model_rope *y = &r->rope;
    const float plain = (float)(1 / pow(base, 2.0 * pair / r->m->rope_dims));
    if (!scaled) return plain;
    if (y->kind != ROPE_YARN) return plain / (float)y->factor;
    const float whole = (float)pow(base, 2.0 * pair / r->m->rope_dims);
    const float keep = (float)model_yarn_kept(y, r->m->rope_dims, base, pair);
    return 1 / ((float)y->factor * whole) * (1 - keep) + 1 / whole * keep;
}

static inline int model_read_frequencies(model_reader *r) {
    model *m = r->m;
    const model_rope *y = &r->rope;
    const int32_t pairs = m->rope_dims / 2;
    const float *factors = NULL;
    const int is_long = y->kind == ROPE_LONG;
    if (!model_vector(r, -1, is_long ? "rope_factors_long.weight" : "rope_freqs.weight", pairs,
                      is_long, &factors))
        return 0;
    if (gguf_find_tensor(r->g, "rope_factors_short.weight")) r->used++;
    m->rope[0] = (float *)malloc((size_t)m->rope_dims * sizeof *m->rope[0]);
    if (!m->rope[0]) return gguf_refuse(r->why, "no memory");
    m->rope[1] = m->rope[0] + pairs;
    for (int32_t i = 0; i < pairs; i++) {
        m->rope[0][i] = model_frequency(r, y->base, i, 1);
        m->rope[1][i] = model_frequency(r, y->window_base, i, r->gemma != 3);
        if (factors) m->rope[0][i] /= factors[i];
        if (factors && r->gemma != 3) m->rope[1][i] /= factors[i];
    }
    return 1;
}

static inline int model_read_tensors(model_reader *r) {
    model *m = r->m;
    const gguf_tensor *e = gguf_find_tensor(r->g, "token_embd.weight");
    const gguf_value *tokens = gguf_find(r->g, "tokenizer.ggml.tokens");
    if (!r->g->tensor_count)
        return gguf_refuse(r->why, "the file has a vocabulary and no tensors; only --count-tokens "
                           "is possible");
    m->vocabulary = e && e->dims >= 2 ? e->size[1] : 0;
    if (tokens && tokens->is_array && tokens->count < (uint64_t)m->vocabulary)
        return gguf_refuse(r->why, "tokenizer.ggml.tokens has %llu tokens and token_embd.weight "
                           "%lld rows", (unsigned long long)tokens->count,
                           (long long)m->vocabulary);
    if (!model_vector_room(r)) return 0;
    if (!model_matrix(r, -1, "token_embd.weight", m->hidden, m->vocabulary, &m->embedding) ||
        !model_vector(r, -1, "output_norm.weight", m->hidden, 1, &m->output_norm) ||
        !model_read_frequencies(r))
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
/* How positions beyond the original context are reached. A factor without a type is linear. */
static inline int model_read_scaling(model_reader *r) {
    static const char *const kinds[] = { "none", "linear", "yarn", "longrope" };
    model *m = r->m;
    model_rope *y = &r->rope;
    const gguf_value *kind = model_value(r, "rope.scaling.type");
    const char *key = model_value(r, "rope.scaling.factor") ? "rope.scaling.factor"
                                                            : "rope.scale_linear";
    double attention;
    char name[64];
    y->kind = kind ? -1 : ROPE_LINEAR;
    for (int i = 0; i < 4; i++)
        if (gguf_is(gguf_text_of(kind), kinds[i])) y->kind = i;
    if (y->kind < 0)
        return gguf_refuse(r->why, "%s.rope.scaling.type is '%s'; this engine computes none, "
                           "linear, yarn and longrope, and the factors of rope_freqs.weight",
                           m->name, gguf_show(gguf_text_of(kind), name, sizeof name));
    if (!model_number(r, key, 0, 1e6, kind && y->kind != ROPE_LONG && y->kind ? MODEL_REQUIRED : 1,
                      &y->factor) ||
        !model_number(r, "rope.scaling.attn_factor", 1e-3, 1e3, 1, &attention) ||
        !model_number(r, "rope.scaling.original_context_length", 1, 1e9, (double)m->context,
                      &y->original) ||
        !model_number(r, "rope.scaling.yarn_beta_fast", 1e-3, 1e6, 32, &y->fast) ||
        !model_number(r, "rope.scaling.yarn_beta_slow", 1e-3, 1e6, 1, &y->slow))
        return 0;
    if (y->factor <= 0 || y->kind == ROPE_NONE || y->kind == ROPE_LONG) y->factor = 1;
    y->whole = !m->oss;
    m->rope_magnitude = attention;
    if (y->kind == ROPE_YARN && y->factor > 1) m->rope_magnitude *= 1 + 0.1 * log(y->factor);
    if (y->kind != ROPE_LONG || (double)m->context > y->original) return 1;
    return gguf_refuse(r->why, "%s has longrope and a context of %lld, no longer than the original "
                       "one; this engine computes the long factors only", m->name,
                       (long long)m->context);
}

static inline int model_read_rope(model_reader *r) {
    model *m = r->m;
    int64_t dims;
    if (!model_integer(r, "rope.dimension_count", m->dim, m->dim, &dims) ||
        !model_number(r, "rope.freq_base", 1.001, 1e12, 10000, &r->rope.base) ||
        !model_number(r, "rope.freq_base_swa", 1.001, 1e12, r->gemma == 3 ? 10000 : r->rope.base,
                      &r->rope.window_base))
        return 0;
    m->rope_dims = (int32_t)dims;
    if (m->rope_dims < 2 || m->rope_dims % 2)
        return gguf_refuse(r->why, "%s.rope.dimension_count is %ld, which is not even and above 0",
                           m->name, (long)m->rope_dims);
    return model_read_scaling(r);
}

/* What families do with scores, logits and windows. */
static inline int model_read_attention(model_reader *r) {
    model *m = r->m;
    const int gemma2 = r->gemma == 2, wide = r->gemma && m->layers == (gemma2 ? 46 : 62);
    double scale, softcap, logit_softcap;
    int64_t pattern;
    const double usual = wide ? 1 / sqrt((double)m->hidden / m->heads) : 0;
    if (!model_number(r, "attention.scale", 0, 1e6, usual, &scale) ||
        !model_number(r, "attn_logit_softcapping", 0, 1e6, gemma2 ? 50 : 0, &softcap) ||
        !model_number(r, "final_logit_softcapping", 0, 1e6, gemma2 ? 30 : 0, &logit_softcap) ||
        !model_integer(r, "attention.sliding_window_pattern", 4096, m->pattern, &pattern))
        return 0;
    if (!m->pattern && model_value(r, "attention.sliding_window_pattern"))
        return gguf_refuse(r->why, "%s.attention.sliding_window_pattern is %lld; this engine knows "
                           "it of gemma2, gemma3 and gpt-oss", m->name, (long long)pattern);
    m->pattern = (int32_t)pattern;
    m->scale = (float)scale;
    m->softcap = (float)softcap;
    m->logit_softcap = (float)logit_softcap;
    m->embedding_scale = m->gelu ? (float)sqrt((double)m->hidden) : 1;
    return 1;
}

/* Of a model with experts, m->feed is that of an expert. */
static inline int model_read_experts(model_reader *r) {
    model *m = r->m;
    const int required = m->oss || !strcmp(m->name, "qwen3moe");
    int64_t experts, used;
    if (!model_integer(r, "expert_count", 4096, required ? MODEL_REQUIRED : 0, &experts) ||
        !model_integer(r, "expert_used_count", 4096, experts ? MODEL_REQUIRED : 0, &used) ||
        !model_integer(r, "expert_feed_forward_length", 1 << 22, (double)m->feed, &m->feed))
        return 0;
    m->experts = (int32_t)experts;
    m->used = (int32_t)used;
    if (experts && m->gelu)
        return gguf_refuse(r->why, "%s.expert_count is %lld; this engine knows experts of llama, "
                           "qwen3moe and gpt-oss", m->name, (long long)experts);
    if (used <= experts && (used > 0 || !experts)) return 1;
    return gguf_refuse(r->why, "%s.expert_used_count is %lld of %lld experts", m->name,
                       (long long)used, (long long)experts);
}

static inline int model_read_values(model_reader *r) {
    model *m = r->m;
    const double window = r->gemma == 3 || m->oss ? MODEL_REQUIRED : r->gemma == 2 ? 4096 : 0;
    int64_t layers, heads, kv_heads, dim, values;
    double epsilon;
    if (!model_integer(r, "block_count", 4096, MODEL_REQUIRED, &layers) ||
        !model_integer(r, "embedding_length", 1 << 20, MODEL_REQUIRED, &m->hidden) ||
        !model_integer(r, "feed_forward_length", 1 << 22, MODEL_REQUIRED, &m->feed) ||
        !model_integer(r, "attention.head_count", 4096, MODEL_REQUIRED, &heads) ||
        !model_integer(r, "attention.head_count_kv", 4096, (double)heads, &kv_heads) ||
        !model_integer(r, "context_length", RA_MAX_POSITION - 1, MODEL_REQUIRED, &m->context) ||
        !model_integer(r, "attention.sliding_window", RA_MAX_POSITION - 1, window, &m->window) ||
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
    return model_read_experts(r) && model_read_attention(r) && model_read_rope(r);
}

static inline void model_close(model *m) {
    free(m->layer);
    free(m->vectors);
    free(m->rope[0]);
    memset(m, 0, sizeof *m);
}

/* The model of a file, which must stay open. 0: see `why`; then there is nothing to close. */
static inline int model_open(model *m, const gguf *g, char why[INFER_WHY]) {
    static const struct { const char *name; int halves, gemma, pattern; } known[] = {
        { "llama", 0, 0, 0 }, { "mistral", 0, 0, 0 }, { "qwen2", 1, 0, 0 }, { "qwen3", 1, 0, 0 },
        { "gemma2", 1, 2, 2 }, { "gemma3", 1, 3, 6 }, { "qwen3moe", 1, 0, 0 },
        { "gpt-oss", 1, 0, 2 } };
    const gguf_text text = gguf_text_of(gguf_find(g, "general.architecture"));
    model_reader r;
    int ok = 0;
    memset(m, 0, sizeof *m);
    memset(&r, 0, sizeof r);
    r.g = m->file = g;
    r.m = m;
    r.why = why;
    gguf_show(text, m->name, sizeof m->name);
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        if (!gguf_is(text, known[i].name)) continue;
        m->rope_halves = known[i].halves;
        r.gemma = known[i].gemma;
        m->gelu = r.gemma > 0;
        m->pattern = known[i].pattern;
        m->oss = gguf_is(text, "gpt-oss");
        ok = 1;
    }
    if (!ok) snprintf(why, INFER_WHY, "general.architecture is '%s'; this engine knows llama, "
                      "mistral, qwen2, qwen3, qwen3moe, gemma2, gemma3 and gpt-oss", m->name);
    ok = ok && model_check_keys(&r) && model_read_values(&r) && model_read_tensors(&r);
    if (!ok) model_close(m);
    return ok;
}

/* A hash of the architecture's values, of the names, sizes and types of all tensors, and of bytes
 * at 8 places of each: it differs between models of the same shape. */
static inline uint64_t model_hash(const model *m) {
    const gguf *g = m->file;
    uint64_t h = 14695981039346656037u;
    for (int64_t i = 0; i < g->value_count; i++) {
        const gguf_value *v = &g->values[i];
        const size_t n = strlen(m->name);
        if (v->key.size <= n || memcmp(v->key.data, m->name, n)) continue;
        h = infer_hash(h, v->key.data, v->key.size);
        h = infer_hash(h, v->data, (size_t)(gguf_type_bytes(v->type) * v->count));
        if (v->type == GGUF_STRING && !v->is_array)
            h = infer_hash(h, gguf_text_of(v).data, gguf_text_of(v).size);
    }
    for (int64_t i = 0; i < g->tensor_count; i++) {
        const gguf_tensor *t = &g->tensors[i];
        const uint64_t bytes = t->data ? gguf_row_bytes(t->dtype, (int64_t)gguf_elements(t)) : 0;
        h = infer_hash(h, t->name.data, t->name.size);
        h = infer_hash(h, t->size, (size_t)t->dims * sizeof *t->size);
        h = infer_hash(h, &t->type, sizeof t->type);
        for (uint64_t k = 0; k < 8 && bytes; k++) {
            const uint64_t at = bytes / 8 * k;
            h = infer_hash(h, t->data + at, (size_t)(bytes - at < 64 ? bytes - at : 64));
        }
    }
    return h;
}

#endif
