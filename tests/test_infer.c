/* examples/infer: a tiny model that this file writes as GGUF itself, run on 1 to 8 ranks and
 * compared with a plain forward pass in double precision; guesses, sampling, and files that are
 * truncated or damaged at every byte. */
#define _DEFAULT_SOURCE 1
#define _POSIX_C_SOURCE 200809L
#define RINGATTN_IMPLEMENTATION
#include "ringattn.h"
#include "harness.h"
#include "examples/infer/engine.h"
#include "examples/infer/tokenizer.h"
#if defined(__linux__) && defined(__LP64__)
#include "examples/transports/ra_shm.h"
#endif

enum { LAYERS = 2, HIDDEN = 32, HEADS = 4, KV_HEADS = 2, DIM = 8, FEED = 64, WORDS = 48,
       CONTEXT = 96, Q = HEADS * DIM, KV = KV_HEADS * DIM };

/* -------------------------------------------------------------------------- a file */
typedef struct shape {                 /* what differs from a plain Llama in f32 */
    const char *arch;
    int32_t dtype, tied, norms, biases, window;
    const char *extra_text_key, *extra_text;           /* one value more, or null */
    const char *extra_tensor;                          /* one tensor more, or null */
    const char *less_tensor;                           /* one tensor fewer, or null */
    int32_t layers, context;                           /* 0: LAYERS, CONTEXT */
    float sharp;                                       /* factor of the norm of queries; 0: 1 */
} shape;

typedef struct weight { char name[40]; int32_t columns, rows, dtype; float *exact; } weight;

typedef struct file {
    uint8_t *data;
    size_t size, room, head;           /* head: bytes before the tensors' data */
    weight w[64];
    int32_t weights, values;
} file;

static void put(file *f, const void *p, size_t n) {
    if (f->size + n > f->room) {
        f->room = 2 * (f->size + n);
        f->data = (uint8_t *)realloc(f->data, f->room);
        if (!f->data) abort();
    }
    memcpy(f->data + f->size, p, n);
    f->size += n;
}

static void put_number(file *f, uint64_t x, int bytes) {
    for (int i = 0; i < bytes; i++) {
        const uint8_t b = (uint8_t)(x >> 8 * i);
        put(f, &b, 1);
    }
}

static void put_text(file *f, const char *s) {
    put_number(f, strlen(s), 8);
    put(f, s, strlen(s));
}

static void put_key(file *f, const char *arch, const char *key, int type) {
    char full[80];
    snprintf(full, sizeof full, "%s%s%s", arch, arch[0] ? "." : "", key);
    put_text(f, full);
    put_number(f, (uint64_t)type, 4);
    f->values++;
}

static void put_u32(file *f, const char *arch, const char *key, uint32_t x) {
    put_key(f, arch, key, GGUF_U32);
    put_number(f, x, 4);
}

static void put_string(file *f, const char *key, const char *s) {
    put_key(f, "", key, GGUF_STRING);
    put_text(f, s);
}

static int32_t listed = WORDS;         /* words of the vocabulary */

static void put_array(file *f, const char *key, int type) {
    put_key(f, "", key, GGUF_ARRAY);
    put_number(f, (uint64_t)type, 4);
    put_number(f, (uint64_t)listed, 8);
}

/* Token 0 is unknown, 1 ends a text, 2 is a byte; the others are a blank, letters and two
 * letters. */
static void word(int i, char out[16]) {
    if (i == 0) snprintf(out, 16, "<unk>");
    else if (i == 1) snprintf(out, 16, "</s>");
    else if (i == 2) snprintf(out, 16, "<0x21>");
    else if (i == 3) snprintf(out, 16, "\xE2\x96\x81");
    else if (i < 30) snprintf(out, 16, "%c", 'a' + i - 4);
    else snprintf(out, 16, "%c%c", 'a' + i - 30, 'a' + i - 29);
}

static void put_values(file *f, const shape *s) {
    char text[16];
    const float epsilon = 1e-5f, base = 1e6f;
    put_string(f, "general.architecture", s->arch);
    put_u32(f, s->arch, "block_count", s->layers ? (uint32_t)s->layers : LAYERS);
    put_u32(f, s->arch, "context_length", s->context ? (uint32_t)s->context : CONTEXT);
    put_u32(f, s->arch, "embedding_length", HIDDEN);
    put_u32(f, s->arch, "feed_forward_length", FEED);
    put_u32(f, s->arch, "attention.head_count", HEADS);
    put_u32(f, s->arch, "attention.head_count_kv", KV_HEADS);
    if (s->window) put_u32(f, s->arch, "attention.sliding_window", (uint32_t)s->window);
    put_key(f, s->arch, "attention.layer_norm_rms_epsilon", GGUF_F32);
    put(f, &epsilon, 4);
    if (s->arch[0] == 'g') {
        put_key(f, s->arch, "rope.freq_base", GGUF_F32);
        put(f, &base, 4);
    }
    if (s->extra_text && s->extra_text[1] == '.') {    /* a number */
        const float x = strtof(s->extra_text, NULL);
        put_key(f, "", s->extra_text_key, GGUF_F32);
        put(f, &x, 4);
    } else if (s->extra_text) put_string(f, s->extra_text_key, s->extra_text);
    put_string(f, "tokenizer.ggml.model", "llama");
    put_u32(f, "tokenizer.ggml", "eos_token_id", 1);
    put_array(f, "tokenizer.ggml.tokens", GGUF_STRING);
    for (int i = 0; i < listed; i++) { word(i, text); put_text(f, text); }
    put_array(f, "tokenizer.ggml.scores", GGUF_F32);
    for (int i = 0; i < listed; i++) { const float x = (float)-i; put(f, &x, 4); }
    put_array(f, "tokenizer.ggml.token_type", GGUF_I32);
    for (int i = 0; i < listed; i++)
        put_number(f, i == 0 ? TOKEN_UNKNOWN : i == 1 ? TOKEN_CONTROL : i == 2 ? TOKEN_BYTE : 1, 4);
}

static void add_weight(file *f, const shape *s, const char *name, int32_t columns, int32_t rows) {
    weight *w = &f->w[f->weights];
    const int32_t n = columns * (rows ? rows : 1);
    h_rng r;
    if (s->less_tensor && !strcmp(s->less_tensor, name)) return;
    r.state = (uint64_t)(f->weights++) * 0x9E3779B97F4A7C15u + 77;
    snprintf(w->name, sizeof w->name, "%s", name);
    w->columns = columns;
    w->rows = rows;
    w->dtype = rows ? s->dtype : RA_F32;
    w->exact = (float *)malloc((size_t)n * sizeof(float));
    if (!w->exact) abort();
    for (int32_t i = 0; i < n; i++) {
        const float x = h_normal(&r);
        w->exact[i] = rows ? 1.5f * x / sqrtf((float)columns)
                    : strstr(name, "norm") ? 1 + 0.2f * x : 0.3f * x;
        if (s->sharp > 0 && strstr(name, "attn_q_norm")) w->exact[i] *= s->sharp;
    }
}

static void add_weights(file *f, const shape *s) {
    static const struct { const char *name; int32_t columns, rows; } all[] = {
        { "attn_norm.weight", HIDDEN, 0 }, { "ffn_norm.weight", HIDDEN, 0 },
        { "attn_q.weight", HIDDEN, Q }, { "attn_k.weight", HIDDEN, KV },
        { "attn_v.weight", HIDDEN, KV }, { "attn_output.weight", Q, HIDDEN },
        { "ffn_gate.weight", HIDDEN, FEED }, { "ffn_up.weight", HIDDEN, FEED },
        { "ffn_down.weight", FEED, HIDDEN }, { "attn_q_norm.weight", DIM, 0 },
        { "attn_k_norm.weight", DIM, 0 }, { "attn_q.bias", Q, 0 }, { "attn_k.bias", KV, 0 },
        { "attn_v.bias", KV, 0 }, { "post_attention_norm.weight", HIDDEN, 0 },
        { "post_ffw_norm.weight", HIDDEN, 0 } };
    add_weight(f, s, "token_embd.weight", HIDDEN, WORDS);
    add_weight(f, s, "output_norm.weight", HIDDEN, 0);
    if (!s->tied) add_weight(f, s, "output.weight", HIDDEN, WORDS);
    for (int i = 0; i < (s->layers ? s->layers : LAYERS); i++) {
        for (size_t k = 0; k < sizeof all / sizeof *all; k++) {
            char name[64];
            if (strstr(all[k].name, "_norm.weight") && all[k].columns == DIM && !s->norms) continue;
            if (strstr(all[k].name, "bias") && !s->biases) continue;
            if (strstr(all[k].name, "post_") && s->arch[0] != 'g') continue;
            snprintf(name, sizeof name, "blk.%d.%s", i, all[k].name);
            add_weight(f, s, name, all[k].columns, all[k].rows);
        }
    }
    if (s->extra_tensor) add_weight(f, s, s->extra_tensor, DIM, 0);
}

/* Each weight is rounded to its dtype; `exact` is the rounded weight in f32. */
static void put_weights(file *f) {
    static const uint32_t code[] = { 0, 0, 1, 30, 8 };
    uint64_t offset = 0;
    for (int32_t i = 0; i < f->weights; i++) {
        const weight *w = &f->w[i];
        put_text(f, w->name);
        put_number(f, w->rows ? 2 : 1, 4);
        put_number(f, (uint64_t)w->columns, 8);
        if (w->rows) put_number(f, (uint64_t)w->rows, 8);
        put_number(f, code[w->dtype], 4);
        put_number(f, offset, 8);
        offset += gguf_row_bytes(w->dtype, (int64_t)w->columns * (w->rows ? w->rows : 1));
        offset = (offset + 31) / 32 * 32;
    }
    while (f->size % 32) put_number(f, 0, 1);
    f->head = f->size;
    for (int32_t i = 0; i < f->weights; i++) {
        const weight *w = &f->w[i];
        const int64_t n = (int64_t)w->columns * (w->rows ? w->rows : 1);
        const size_t bytes = (size_t)gguf_row_bytes(w->dtype, n);
        uint8_t *raw = (uint8_t *)malloc(bytes);
        if (!raw) abort();
        CHECK_EQ(ra_convert(raw, w->dtype, w->exact, RA_F32, n), RA_OK);
        CHECK_EQ(ra_convert(w->exact, RA_F32, raw, w->dtype, n), RA_OK);
        put(f, raw, bytes);
        free(raw);
        while (f->size % 32) put_number(f, 0, 1);
    }
}

static void make_file(file *f, const shape *s) {
    file count = { 0 };
    memset(f, 0, sizeof *f);
    add_weights(f, s);
    put_values(&count, s);
    put_number(f, 0x46554747u, 4);
    put_number(f, 3, 4);
    put_number(f, (uint64_t)f->weights, 8);
    put_number(f, (uint64_t)count.values, 8);
    put_values(f, s);
    put_weights(f);
    free(count.data);
}

static void free_file(file *f) {
    for (int32_t i = 0; i < f->weights; i++) free(f->w[i].exact);
    free(f->data);
}

/* -------------------------------------------------------------------------- a plain pass */
static const float *exact(const file *f, int layer, const char *name) {
    char full[64];
    if (layer < 0) snprintf(full, sizeof full, "%s", name);
    else snprintf(full, sizeof full, "blk.%d.%s", layer, name);
    for (int32_t i = 0; i < f->weights; i++)
        if (!strcmp(f->w[i].name, full)) return f->w[i].exact;
    return NULL;
}

static void plain_product(double *y, const float *w, const double *x, int rows, int columns,
                          const float *bias) {
    for (int i = 0; i < rows; i++) {
        y[i] = bias ? (double)bias[i] : 0;
        for (int k = 0; k < columns; k++) y[i] += (double)w[i * columns + k] * x[k];
    }
}

static void plain_norm(double *y, const double *x, const float *w, int n) {
    double sum = 0;
    for (int i = 0; i < n; i++) sum += x[i] * x[i];
    for (int i = 0; i < n; i++) y[i] = x[i] / sqrt(sum / n + (double)1e-5f) * (double)w[i];
}

static void plain_rope(double *x, int position, int halves) {
    for (int i = 0; i < DIM / 2; i++) {
        const double angle = position * pow(10000, -2.0 * i / DIM);
        double *a = x + (halves ? i : 2 * i), *b = a + (halves ? DIM / 2 : 1), u = *a;
        *a = u * cos(angle) - *b * sin(angle);
        *b = u * sin(angle) + *b * cos(angle);
    }
}

typedef struct plain {
    double k[LAYERS][CONTEXT][KV], v[LAYERS][CONTEXT][KV];
} plain;

static void plain_attend(const plain *c, int layer, int at, int window, const double *q,
                         double *o) {
    const int from = window && at - window + 1 > 0 ? at - window + 1 : 0;
    for (int h = 0; h < HEADS; h++) {
        double part[CONTEXT], sum = 0;
        const int g = h / (HEADS / KV_HEADS) * DIM;
        for (int j = from; j <= at; j++) {
            double s = 0;
            for (int d = 0; d < DIM; d++) s += q[h * DIM + d] * c->k[layer][j][g + d];
            sum += part[j] = exp(s / sqrt(DIM));
        }
        for (int d = 0; d < DIM; d++) {
            o[h * DIM + d] = 0;
            for (int j = from; j <= at; j++)
                o[h * DIM + d] += part[j] / sum * c->v[layer][j][g + d];
        }
    }
}

/* Queries, keys and values of a row of layer l at position `at`. */
static void plain_qkv(const file *f, const shape *s, int l, const double *x, int at, double *q,
                      double *k, double *v) {
    const int halves = s->arch[0] == 'q';
    double y[HIDDEN];
    plain_norm(y, x, exact(f, l, "attn_norm.weight"), HIDDEN);
    plain_product(q, exact(f, l, "attn_q.weight"), y, Q, HIDDEN, exact(f, l, "attn_q.bias"));
    plain_product(k, exact(f, l, "attn_k.weight"), y, KV, HIDDEN, exact(f, l, "attn_k.bias"));
    plain_product(v, exact(f, l, "attn_v.weight"), y, KV, HIDDEN, exact(f, l, "attn_v.bias"));
    for (int h = 0; h < HEADS + KV_HEADS; h++) {
        double *head = h < HEADS ? q + h * DIM : k + (h - HEADS) * DIM;
        if (s->norms)
            plain_norm(head, head, exact(f, l, h < HEADS ? "attn_q_norm.weight"
                                                         : "attn_k_norm.weight"), DIM);
        plain_rope(head, at, halves);
    }
}

/* What follows the attention of layer l, whose output is o. */
static void plain_feed(const file *f, int l, const double *o, double *x) {
    double y[HIDDEN], z[FEED], up[FEED];
    plain_product(y, exact(f, l, "attn_output.weight"), o, HIDDEN, Q, NULL);
    for (int i = 0; i < HIDDEN; i++) x[i] += y[i];
    plain_norm(y, x, exact(f, l, "ffn_norm.weight"), HIDDEN);
    plain_product(z, exact(f, l, "ffn_gate.weight"), y, FEED, HIDDEN, NULL);
    plain_product(up, exact(f, l, "ffn_up.weight"), y, FEED, HIDDEN, NULL);
    for (int i = 0; i < FEED; i++) z[i] = z[i] / (1 + exp(-z[i])) * up[i];
    plain_product(y, exact(f, l, "ffn_down.weight"), z, HIDDEN, FEED, NULL);
    for (int i = 0; i < HIDDEN; i++) x[i] += y[i];
}

static void plain_embed(const file *f, int token, double *x) {
    const float *w = exact(f, -1, "token_embd.weight");
    for (int i = 0; i < HIDDEN; i++) x[i] = (double)w[token * HIDDEN + i];
}

static void plain_logits(const file *f, const shape *s, const double *x, double *logits) {
    double y[HIDDEN];
    plain_norm(y, x, exact(f, -1, "output_norm.weight"), HIDDEN);
    plain_product(logits, exact(f, -1, s->tied ? "token_embd.weight" : "output.weight"), y, WORDS,
                  HIDDEN, NULL);
}

/* Logits of the token at position `at`. */
static void plain_token(const file *f, const shape *s, plain *c, int token, int at,
                        double *logits) {
    double x[HIDDEN], q[Q], o[Q];
    plain_embed(f, token, x);
    for (int l = 0; l < LAYERS; l++) {
        plain_qkv(f, s, l, x, at, q, c->k[l][at], c->v[l][at]);
        plain_attend(c, l, at, s->window, q, o);
        plain_feed(f, l, o, x);
    }
    plain_logits(f, s, x, logits);
}

/* The same for one layer and any number of tokens: keys then depend only on a token and its
 * position. turn[j]: cosines and sines of position j. Returns the largest weight of a key, and its
 * position. */
typedef struct turns { double c[DIM / 2], s[DIM / 2]; } turns;

static void turned(double *y, const double *x, const turns *t) {       /* halves */
    for (int i = 0; i < DIM / 2; i++) {
        y[i] = x[i] * t->c[i] - x[i + DIM / 2] * t->s[i];
        y[i + DIM / 2] = x[i] * t->s[i] + x[i + DIM / 2] * t->c[i];
    }
}

static double plain_long_token(const file *f, const shape *s, const turns *turn,
                               const int32_t *tokens, int64_t at, double *logits,
                               int64_t *where) {
    double q[WORDS][Q], k[WORDS][KV], v[WORDS][KV], x[HIDDEN], o[Q], most = 0;
    double *score = (double *)malloc((size_t)(at + 1) * sizeof *score);
    if (!score) abort();
    for (int i = 0; i < WORDS; i++) {
        plain_embed(f, i, x);
        plain_qkv(f, s, 0, x, 0, q[i], k[i], v[i]);
    }
    for (int h = 0; h < HEADS; h++) {
        const int g = h / (HEADS / KV_HEADS) * DIM;
        double row[DIM], key[DIM], top = -1e300, sum = 0;
        int64_t best = 0;
        turned(row, q[tokens[at]] + h * DIM, &turn[at]);
        for (int64_t j = 0; j <= at; j++) {
            turned(key, k[tokens[j]] + g, &turn[j]);
            score[j] = 0;
            for (int d = 0; d < DIM; d++) score[j] += row[d] * key[d] / sqrt(DIM);
            if (score[j] > top) { top = score[j]; best = j; }
        }
        memset(o + h * DIM, 0, DIM * sizeof *o);
        for (int64_t j = 0; j <= at; j++) {
            const double w = exp(score[j] - top);
            sum += w;
            for (int d = 0; d < DIM; d++) o[h * DIM + d] += w * v[tokens[j]][g + d];
        }
        for (int d = 0; d < DIM; d++) o[h * DIM + d] /= sum;
        if (1 / sum > most) { most = 1 / sum; *where = best; }
    }
    free(score);
    plain_embed(f, tokens[at], x);
    plain_feed(f, 0, o, x);
    plain_logits(f, s, x, logits);
    return most;
}

/* -------------------------------------------------------------------------- tests */
static const shape shapes[] = {
    { "llama", RA_F32, 0, 0, 0, 0, NULL, NULL, NULL, NULL, 0, 0, 0 },
    { "llama", RA_BF16, 1, 0, 0, 0, NULL, NULL, NULL, NULL, 0, 0, 0 },
    { "mistral", RA_F16, 0, 0, 0, 20, NULL, NULL, NULL, NULL, 0, 0, 0 },
    { "qwen2", RA_Q8_0, 0, 0, 1, 0, NULL, NULL, NULL, NULL, 0, 0, 0 },
    { "qwen3", RA_F32, 1, 1, 0, 33, NULL, NULL, NULL, NULL, 0, 0, 0 } };
enum { SHAPES = sizeof shapes / sizeof *shapes, PROMPT = 50 };

typedef struct checkpoint { file f; gguf g; model m; } checkpoint;

/* Makes a file of a shape and opens its model. 0: it does not open, and nothing is to be closed. */
static int open_shape(checkpoint *x, const shape *s) {
    char why[INFER_WHY] = "";
    make_file(&x->f, s);
    if (CHECK(gguf_open(&x->g, x->f.data, x->f.size, why))) {
        if (CHECK(model_open(&x->m, &x->g, why))) return 1;
        gguf_close(&x->g);
    }
    printf("%s\n", why);
    free_file(&x->f);
    return 0;
}

static void close_shape(checkpoint *x) {
    model_close(&x->m);
    gguf_close(&x->g);
    free_file(&x->f);
}

static void prompt_of(int32_t *prompt, h_rng *r, int64_t tokens) {
    for (int64_t i = 0; i < tokens; i++) prompt[i] = (int32_t)h_range(r, 0, WORDS - 1);
}

/* One shape with one chunk on the first `most` of these numbers of ranks: the logits have the same
 * bits for all, and match the plain pass. Returns the last result. */
static infer_result on_ranks(const file *f, const shape *s, const model *m, int64_t chunk,
                             const int32_t *prompt, int most) {
    static plain c;
    static const int32_t several[] = { 1, 3, 2, 4, 5, 8 };
    infer_result one = { 0 }, got = { 0 };
    for (int i = 0; i < most; i++) {
        const int32_t ranks = several[i];
        infer_options o = { 0 };
        o.ranks = ranks;
        o.threads = 1 + ranks % 2 * 2;
        o.chunk = chunk;
        o.predict = 30;
        o.all_logits = 1;
        h_context("%s, %d ranks, chunks of %lld", s->arch, (int)ranks, (long long)chunk);
        if (!CHECK(infer_run(m, &o, prompt, PROMPT, &got))) printf("%s\n", got.why);
        CHECK_EQ(got.count, PROMPT + 30);
        CHECK_EQ(got.cached, PROMPT + 29);
        CHECK_EQ(got.steps, 29);
        for (int64_t t = 0; got.logits && t < got.cached; t++) {
            double want[WORDS];
            plain_token(f, s, &c, got.tokens[t], (int)t, want);
            if (!CHECK_CLOSE(got.logits + t * WORDS, want, WORDS, 1e-4, 0))
                break;
        }
        if (one.logits && got.logits) {
            CHECK_BITS(got.logits, one.logits, got.cached * WORDS * 4);
            CHECK_BITS(got.tokens, one.tokens, got.count * 4);
        }
        if (i == 0) one = got;
        else if (i < most - 1) infer_free(&got);
    }
    infer_free(&one);
    return got;
}

/* The tokens are the same for every number of ranks and every chunk. */
TEST(ranks_and_chunks) {
    static const int64_t chunks[] = { 1, 7, 64 };
    for (int i = 0; i < SHAPES; i++) {
        checkpoint x;
        infer_result first = { 0 };
        int32_t prompt[PROMPT];
        h_rng r = h_case_rng(i);
        if (!h_case(i) || !open_shape(&x, &shapes[i])) continue;
        prompt_of(prompt, &r, PROMPT);
        for (int k = 0; k < 3; k++) {
            infer_result got = on_ranks(&x.f, &shapes[i], &x.m, chunks[k], prompt,
                                        i == 0 && k == 2 ? 6 : 2);
            if (k && got.tokens && first.tokens)
                CHECK_BITS(got.tokens, first.tokens, got.count * 4);
            if (k) infer_free(&got);
            else first = got;
        }
        infer_free(&first);
        close_shape(&x);
    }
}

/* Ranks that share nothing but a transport, as processes do: each gets the text of one rank. */
typedef struct apart { const model *m; const int32_t *prompt; infer_result got[3]; } apart;

static ra_status on_rank_apart(ra_world *world, int rank, void *user) {
    apart *a = (apart *)user;
    infer_options o = { 0 };
    o.ranks = 3;
    o.threads = 1 + rank;
    o.predict = 20;
    o.speculate = 3;
    return infer_run_rank(a->m, &o, a->prompt, PROMPT, ra_world_transport(world, rank),
                          &a->got[rank]) ? RA_OK : RA_E_STATE;
}

/* Three ranks get the tokens of one. */
static void three_ranks(const shape *s, ra_rank_fn on_rank) {
    int32_t prompt[PROMPT];
    h_rng r = h_case_rng(0);
    checkpoint x;
    infer_options o = { 0 };
    infer_result one;
    apart a = { &x.m, prompt, { { 0 } } };
    if (!open_shape(&x, s)) return;
    prompt_of(prompt, &r, PROMPT);
    o.predict = 20;
    CHECK(infer_run(&x.m, &o, prompt, PROMPT, &one));
    CHECK_EQ(ra_world_run(3, on_rank, &a, NULL), RA_OK);
    for (int i = 0; i < 3; i++) {
        if (CHECK_EQ(a.got[i].count, one.count))
            CHECK_BITS(a.got[i].tokens, one.tokens, one.count * 4);
        infer_free(&a.got[i]);
    }
    infer_free(&one);
    close_shape(&x);
}

TEST(ranks_apart) { three_ranks(&shapes[2], on_rank_apart); }

/* If ranks split products, what is decoded has the bits of one rank, whatever the number of ranks,
 * the type of the weights and the tokens per call are. A matrix may have fewer rows than parts. */
typedef struct splitting { const model *m; const int32_t *prompt; infer_options o; } splitting;

static ra_status on_rank_that_splits(ra_world *world, int rank, void *user) {
    const splitting *x = (const splitting *)user;
    infer_options o = x->o;
    infer_result one, got;
    o.split = 0;
    o.speculate = 0;
    o.ranks = 1;
    CHECK(infer_run(x->m, &o, x->prompt, PROMPT, &one));
    CHECK(infer_run_rank(x->m, &x->o, x->prompt, PROMPT, ra_world_transport(world, rank), &got));
    if (CHECK_EQ(got.count, one.count) && CHECK_EQ(got.cached, PROMPT + 19)) {
        CHECK_BITS(got.tokens, one.tokens, one.count * 4);
        CHECK_BITS(got.logits + PROMPT * WORDS, one.logits + PROMPT * WORDS, 19 * WORDS * 4);
    }
    infer_free(&one);
    infer_free(&got);
    return RA_OK;
}

TEST(ranks_that_split) {
    for (int i = 0; i < 2 * SHAPES; i++) {
        int32_t prompt[PROMPT];
        h_rng r = h_case_rng(i);
        checkpoint x;
        splitting all = { &x.m, prompt, { 0 } };
        if (!h_case(i) || !open_shape(&x, &shapes[i % SHAPES])) continue;
        prompt_of(prompt, &r, PROMPT);
        all.o.ranks = i < SHAPES ? 2 + i : 12 - i;
        all.o.predict = 20;
        all.o.split = 1;
        all.o.integers = i == 3;
        all.o.speculate = i % 3 * 9;
        all.o.all_logits = 1;
        h_context("%s, %d ranks", shapes[i % SHAPES].arch, (int)all.o.ranks);
        CHECK_EQ(ra_world_run(all.o.ranks, on_rank_that_splits, &all, NULL), RA_OK);
        close_shape(&x);
    }
}

/* Ranks of which the last has another model of the same shape, another prompt of the same length,
 * another seed, another type of cache or other lanes: all are refused and say what differs. */
typedef struct differing { const model *m, *other; int what; int64_t named; } differing;

static ra_status on_rank_that_differs(ra_world *world, int rank, void *user) {
    static const char *const names[] = { "the model", "the prompt", "the seed",
                                         "the type of the cache", "the lanes" };
    differing *x = (differing *)user;
    const int what = rank == 2 ? x->what : -1;
    int32_t prompt[] = { 4, 5, 6, 7, 8 };
    infer_options o = { 0 };
    infer_result got;
    o.ranks = 3;
    o.predict = 5;
    o.chunk = 16;
    o.seed = what == 2;
    o.cache_dtype = what == 3 ? RA_F16 : RA_F32;
    o.lanes = what == 4 ? 32 : 16;
    if (what == 1) prompt[4] = 9;
    CHECK(!infer_run_rank(what == 0 ? x->other : x->m, &o, prompt, 5,
                          ra_world_transport(world, rank), &got));
    if (!CHECK(strstr(got.why, names[x->what]) != NULL)) printf("%s\n", got.why);
    infer_free(&got);
    return RA_OK;
}

TEST(ranks_that_differ) {
    static const shape tied = { "llama", RA_F32, 0, 0, 0, 0, NULL, NULL, NULL, NULL, 0, 0, 0 };
    checkpoint one, two;
    if (!open_shape(&one, &tied)) return;
    if (open_shape(&two, &tied)) {
        two.f.data[two.f.head] ^= 1;
        for (int i = 0; i < 5; i++) {
            differing x = { &one.m, &two.m, i, 0 };
            if (h_case(i)) CHECK_EQ(ra_world_run(3, on_rank_that_differs, &x, NULL), RA_OK);
        }
        close_shape(&two);
    }
    close_shape(&one);
}

/* A weight that is no number ends the run; a stream that cannot be written too. The end of the
 * context is told apart from the end of a text. */
static int cannot_write(void *user, int32_t id) { (void)user; return id < 0 ? 0 : -1; }

TEST(how_a_run_ends) {
    static const int32_t prompt[] = { 4, 5, 6, 7, 8 };
    checkpoint x;
    infer_options o = { 0 };
    infer_result got;
    if (!open_shape(&x, &shapes[0])) return;
    o.ranks = 2;
    o.predict = 3;
    CHECK(infer_run(&x.m, &o, prompt, 5, &got));
    CHECK_EQ(got.ended, INFER_TO_PREDICT);
    o.stop[0] = got.tokens[5];
    infer_free(&got);
    o.stops = 1;
    CHECK(infer_run(&x.m, &o, prompt, 5, &got));
    CHECK_EQ(got.ended, INFER_STOPPED);
    infer_free(&got);
    o.stops = 0;
    o.context = 7;
    CHECK(infer_run(&x.m, &o, prompt, 5, &got));
    CHECK_EQ(got.ended, INFER_FULL);
    CHECK_EQ(got.count, 7);
    infer_free(&got);
    o.token = cannot_write;
    CHECK(!infer_run(&x.m, &o, prompt, 5, &got));
    CHECK(strstr(got.why, "cannot be written") != NULL);
    infer_free(&got);
    o.token = NULL;
    memset((uint8_t *)(uintptr_t)x.m.layer[1].up.data, 0xFF, 4);
    CHECK(!infer_run(&x.m, &o, prompt, 5, &got));
    CHECK(strstr(got.why, "after layer 1 at token 4") != NULL);
    infer_free(&got);
    close_shape(&x);
    if (!open_shape(&x, &shapes[0])) return;
    for (int i = 0; i < 2; i++) {      /* a tanh of infinity is 1 */
        float *row = (float *)(uintptr_t)x.m.output.data;
        row[0] = i ? HUGE_VALF : NAN;
        x.m.logit_softcap = (float)i;
        CHECK(!infer_run(&x.m, &o, prompt, 5, &got));
        CHECK(strstr(got.why, "in the logits at token 4") != NULL);
        infer_free(&got);
    }
    close_shape(&x);
}

/* Tokens that follow a text are computed on the cache of what is before them, on one rank and on
 * ranks that share only a transport. The tokens are those of a run with the same tokens as one
 * prompt. The text ends where `ends` says, and rank 0 alone is asked for more. */
enum { TURNS = 3 };
typedef struct turns_of { const model *m; int32_t said[TURNS][40]; int64_t size[TURNS]; } turns_of;
typedef struct turn_of_rank {
    const turns_of *all;
    int turn, asked;
} turn_of_rank;

static int64_t say_more(void *user, const int32_t **tokens, int64_t room) {
    turn_of_rank *t = (turn_of_rank *)user;
    t->asked++;
    if (++t->turn == TURNS) return 0;
    CHECK(room > 30);
    *tokens = t->all->said[t->turn];
    return t->all->size[t->turn];
}

static int ends_in_7(void *user, const int32_t *tokens, int64_t from, int64_t count) {
    (void)user;
    return count - from > 3 && tokens[count - 1] % 7 == 0;
}

static infer_options options_of_turns(int32_t ranks, turn_of_rank *t) {
    infer_options o = { 0 };
    o.ranks = ranks;
    o.chunk = 9;
    o.predict = 8;
    o.turns = 1;
    o.speculate = ranks % 3;
    o.more = say_more;
    o.ends = ends_in_7;
    o.user = t;
    return o;
}

static ra_status turns_on_rank(ra_world *world, int rank, void *user) {
    infer_result *got = (infer_result *)user;
    const turns_of *all = (const turns_of *)got[3].tokens;
    turn_of_rank t = { all, 0, 0 };
    infer_options o = options_of_turns(3, &t);
    CHECK(infer_run_rank(all->m, &o, all->said[0], all->size[0], ra_world_transport(world, rank),
                         &got[rank]));
    CHECK_EQ(t.asked, rank ? 0 : TURNS);
    return RA_OK;
}

/* The tokens of three turns, each computed from the beginning. */
static int64_t turns_from_scratch(const turns_of *all, int32_t *tokens) {
    int64_t n = 0;
    for (int i = 0; i < TURNS; i++) {
        turn_of_rank t = { all, 0, 0 };
        infer_options o = options_of_turns(1, &t);
        infer_result got;
        o.turns = 0;
        memcpy(tokens + n, all->said[i], (size_t)all->size[i] * sizeof *tokens);
        n += all->size[i];
        CHECK(infer_run(all->m, &o, tokens, n, &got));
        n = got.count;
        memcpy(tokens, got.tokens, (size_t)n * sizeof *tokens);
        infer_free(&got);
    }
    return n;
}

TEST(turns) {
    static turns_of all;
    checkpoint x;
    int32_t want[CONTEXT + 1];
    infer_result got[4] = { { 0 } };
    h_rng r = h_case_rng(0);
    if (!open_shape(&x, &shapes[2])) return;
    all.m = &x.m;
    for (int i = 0; i < TURNS; i++) prompt_of(all.said[i], &r, all.size[i] = i ? 10 + i : 30);
    const int64_t n = turns_from_scratch(&all, want);
    for (int32_t ranks = 1; ranks < 6; ranks += 2) {
        turn_of_rank t = { &all, 0, 0 };
        infer_options o = options_of_turns(ranks, &t);
        CHECK(infer_run(&x.m, &o, all.said[0], all.size[0], &got[0]));
        if (CHECK_EQ(got[0].count, n)) CHECK_BITS(got[0].tokens, want, n * 4);
        CHECK_EQ(got[0].given + got[0].written, n + TURNS - 1);
        CHECK_EQ(t.asked, TURNS);
        infer_free(&got[0]);
    }
    got[3].tokens = (int32_t *)(void *)&all;
    CHECK_EQ(ra_world_run(3, turns_on_rank, got, NULL), RA_OK);
    for (int i = 0; i < 3; i++) {
        if (CHECK_EQ(got[i].count, n)) CHECK_BITS(got[i].tokens, want, n * 4);
        infer_free(&got[i]);
    }
    close_shape(&x);
}

/* 9 ranks have the bits of one. */
TEST(more_ranks_than_eight) {
    static const int32_t prompt[] = { 4, 5, 6, 7, 8 };
    checkpoint x;
    infer_options o = { 0 };
    infer_result one, nine;
    if (!open_shape(&x, &shapes[0])) return;
    o.predict = 20;
    o.all_logits = 1;
    CHECK(infer_run(&x.m, &o, prompt, 5, &one));
    o.ranks = 9;
    CHECK(infer_run(&x.m, &o, prompt, 5, &nine));
    if (one.logits && nine.logits) CHECK_BITS(nine.logits, one.logits, 24 * WORDS * 4);
    infer_free(&nine);
    o.ranks = 17;
    CHECK(!infer_run(&x.m, &o, prompt, 5, &nine));
    CHECK(strstr(nine.why, "16 lanes for 17 ranks") != NULL);
    infer_free(&nine);
    infer_free(&one);
    close_shape(&x);
}

/* A transport whose sends fail and whose receives end only in quiesce. */
typedef struct broken { ra_transport_op *receive; int32_t aborts; int quiesce; } broken;

static int broken_post(void *ctx, ra_transport_op *const *ops, int n) {
    broken *b = (broken *)ctx;
    for (int i = 0; i < n; i++) {
        ops[i]->state = ops[i]->kind == RA_MSG_SEND ? (int)RA_E_PEER : (int)RA_MSG_PENDING;
        if (ops[i]->kind == RA_MSG_RECV) b->receive = ops[i];
    }
    return RA_OK;
}

static int broken_poll(void *ctx, ra_transport_op *const *ops, int n) {
    (void)ctx, (void)ops, (void)n;
    return RA_OK;
}

static int broken_abort(void *ctx, int why) {
    ((broken *)ctx)->aborts += why == RA_E_PEER;
    return RA_OK;
}

static int broken_quiesce(void *ctx, int64_t deadline_ns) {
    broken *b = (broken *)ctx;
    (void)deadline_ns;
    b->receive->state = RA_E_ABORTED;
    return b->quiesce;
}

/* If tokens cannot be shared, the other ranks are stopped, and the receive has ended before its
 * memory is freed. If it has not ended, the memory is kept. */
TEST(tokens_cannot_be_shared) {
    static const int ends[] = { RA_OK, RA_E_UNSAFE };
    for (int i = 0; i < 2; i++) {
        broken b = { NULL, 0, ends[i] };
        ra_transport_op hop[2];
        int32_t next[3] = { 1, -1, 0 }, heard[3];
        ra_transport net = { 0 };
        infer_result result = { 0 };
        infer_engine e = { 0 };
        infer_rank r = { 0 };
        net.ctx = &b;
        net.post = broken_post;
        net.poll = broken_poll;
        net.abort = broken_abort;
        net.quiesce = broken_quiesce;
        e.o.ranks = 2;
        e.result = &result;
        pthread_mutex_init(&e.lock, NULL);
        r.e = &e;
        r.net = &net;
        r.hop = hop;
        r.next = next;
        r.heard = heard;
        CHECK_EQ(infer_share(&r, 0, 2), RA_E_PEER);
        CHECK_EQ(b.aborts, 1);
        CHECK_EQ(hop[0].state, RA_E_ABORTED);
        CHECK_EQ(r.unsafe, ends[i] != RA_OK);
        pthread_mutex_destroy(&e.lock);
    }
}

#if defined(__linux__) && defined(__LP64__)
/* The same on a transport whose messages are no longer than the engine requires, with keys that do
 * not fit: their queries travel. */
static ra_status on_rank_in_shm(ra_world *world, int rank, void *user) {
    apart *a = (apart *)user;
    infer_options o = { 0 };
    ra_shm_desc d = { 0 };
    ra_shm *shm = NULL;
    ra_error why;
    char name[40];
    int ok = 0;
    (void)world;
    o.ranks = 3;
    o.threads = 1;
    o.predict = 20;
    o.speculate = 3;
    o.chunk = 17;
    snprintf(name, sizeof name, "test_infer.%ld", (long)getpid());
    d.name = name;
    d.rank = rank;
    d.ranks = 3;
    d.slot_bytes = infer_message_bytes(a->m, &o, PROMPT);
    d.error = &why;
    if (!CHECK_EQ(ra_shm_open(&shm, &d), RA_OK)) printf("%s: %s\n", why.field, why.text);
    else ok = infer_run_rank(a->m, &o, a->prompt, PROMPT, ra_shm_transport(shm), &a->got[rank]);
    ra_shm_close(shm);
    return ok ? RA_OK : RA_E_STATE;
}

TEST(ranks_in_shared_memory) { three_ranks(&shapes[4], on_rank_in_shm); }
#endif

/* Guesses change how often the model is called, never the tokens. */
TEST(guesses) {
    checkpoint x;
    if (!open_shape(&x, &shapes[0])) return;
    for (int i = 0; i < 12; i++) {
        infer_options o = { 0 };
        infer_result plainly, guessed;
        int32_t prompt[PROMPT];
        h_rng r = h_case_rng(i);
        if (!h_case(i)) continue;
        prompt_of(prompt, &r, PROMPT);
        for (int k = 12; k < PROMPT; k++) prompt[k] = prompt[k % 12];   /* repeats itself */
        o.predict = 40;
        o.temperature = i % 3 == 2 ? 0.7f : 0;
        o.seed = (uint64_t)i;
        CHECK(infer_run(&x.m, &o, prompt, PROMPT, &plainly));
        o.speculate = 2 + i % 4;
        o.ranks = 1 + i % 3;
        CHECK(infer_run(&x.m, &o, prompt, PROMPT, &guessed));
        CHECK_EQ(plainly.count, guessed.count);
        CHECK_BITS(plainly.tokens, guessed.tokens, (size_t)plainly.count * 4);
        CHECK(guessed.steps <= plainly.steps);
        if (i % 3 == 0) CHECK(guessed.steps < plainly.steps);
        infer_free(&plainly);
        infer_free(&guessed);
    }
    close_shape(&x);
}

/* Tokens are drawn as often as softmax says, and never those that top-k or top-p excludes. */
TEST(sampling) {
    enum { N = 6, DRAWS = 60000 };
    static const float logits[N] = { 0.5f, 2.0f, -1.0f, 1.0f, 1.5f, -80.0f };
    infer_choice choice[N];
    for (int i = 0; i < 4; i++) {
        infer_options o = { 0 };
        double p[N], sum = 0, keep = 0;
        int count[N] = { 0 };
        if (!h_case(i)) continue;
        o.temperature = 0.8f;
        o.seed = (uint64_t)i;
        if (i == 1) o.top_k = 3;
        if (i == 2) o.top_p = 0.6f;
        if (i == 3) o.top_k = 1;
        for (int k = 0; k < N; k++) sum += p[k] = exp((double)logits[k] / (double)o.temperature);
        for (int k = 0; k < N; k++) p[k] /= sum;
        /* From the likeliest on: 1, 4, 3, 0, 2, 5. */
        if (i == 1) p[0] = p[2] = p[5] = 0;
        if (i == 2) p[3] = p[0] = p[2] = p[5] = 0;
        if (i == 3) p[4] = p[3] = p[0] = p[2] = p[5] = 0;
        for (int k = 0; k < N; k++) keep += p[k];
        for (int k = 0; k < DRAWS; k++) count[infer_sample(&o, logits, N, k, choice)]++;
        for (int k = 0; k < N; k++) {
            const double want = p[k] / keep;
            CHECK(fabs(count[k] / (double)DRAWS - want) <= 5 * sqrt(want * (1 - want) / DRAWS));
        }
    }
}

/* A cache in fewer bits, all threads, and refused options. */
TEST(options) {
    checkpoint x;
    int32_t prompt[PROMPT] = { 0 };
    h_rng r = h_case_rng(0);
    prompt_of(prompt, &r, PROMPT);
    if (!open_shape(&x, &shapes[0])) return;
    infer_options o = { 0 };
    infer_result a, b;
    o.predict = 10;
    o.ranks = 3;
    CHECK(infer_run(&x.m, &o, prompt, PROMPT, &a));
    o.cache_dtype = RA_F16;
    CHECK(infer_run(&x.m, &o, prompt, PROMPT, &b));
    CHECK_EQ(a.cache_bytes, 2 * b.cache_bytes);
    infer_free(&b);
    o.stop[0] = a.tokens[PROMPT + 2];
    o.stops = 1;
    o.cache_dtype = 0;
    CHECK(infer_run(&x.m, &o, prompt, PROMPT, &b));
    CHECK(b.count <= PROMPT + 3);
    infer_free(&b);
    prompt[3] = WORDS;
    CHECK(!infer_run(&x.m, &o, prompt, PROMPT, &b));
    CHECK(strstr(b.why, "token 3 of the prompt is 48") != NULL);
    infer_free(&b);
    prompt[3] = 0;
    o.context = CONTEXT + 1;
    CHECK(!infer_run(&x.m, &o, prompt, PROMPT, &b));
    CHECK(strstr(b.why, "the model was made for at most 96") != NULL);
    infer_free(&b);
    o.context = 0;
    o.cache_dtype = RA_Q8_0;
    CHECK(!infer_run(&x.m, &o, prompt, PROMPT, &b));
    CHECK(strstr(b.why, "q8_0") != NULL);
    infer_free(&b);
    o.cache_dtype = RA_Q4_0;
    CHECK(!infer_run(&x.m, &o, prompt, PROMPT, &b));
    CHECK(strstr(b.why, "q4_0") != NULL);
    infer_free(&b);
    o.cache_dtype = 0;
    o.chunk = 4;
    o.speculate = 5;
    CHECK(!infer_run(&x.m, &o, prompt, PROMPT, &b));
    CHECK(strstr(b.why, "5 tokens to verify per call, but chunks of 4") != NULL);
    infer_free(&b);
    infer_free(&a);
    close_shape(&x);
}

/* A prompt long enough for the threads of a rank to share its attention. */
TEST(threads_of_a_rank) {
    enum { LONG = 90 };
    checkpoint x;
    int32_t prompt[LONG];
    h_rng r = h_case_rng(0);
    prompt_of(prompt, &r, LONG);
    if (!open_shape(&x, &shapes[4])) return;
    infer_options o = { 0 };
    infer_result one, four;
    o.all_logits = 1;
    CHECK(infer_run(&x.m, &o, prompt, LONG, &one));
    for (o.threads = 2; o.threads <= 6; o.threads += 2) {
        o.ranks = o.threads / 3 + 1;
        CHECK(infer_run(&x.m, &o, prompt, LONG, &four));
        if (one.logits && four.logits)
            CHECK_BITS(four.logits, one.logits, LONG * WORDS * 4);
        infer_free(&four);
    }
    infer_free(&one);
    close_shape(&x);
}

/* Angles are rounded to f32, as in models. */
static void make_turns(turns *turn, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        for (int p = 0; p < DIM / 2; p++) {
            const float angle = (float)i * (float)(1 / pow(10000, 2.0 * p / DIM));
            turn[i].c[p] = cos((double)angle);
            turn[i].s[p] = sin((double)angle);
        }
}

/* Compares the rows at these positions with double precision. Returns how many of them have their
 * largest weight in the first half of what they see. */
static int64_t long_rows(const file *f, const shape *s, const turns *turn,
                         const infer_result *got, const int64_t *at, int64_t count) {
    double logits[WORDS];
    int64_t far = 0, where = 0;
    for (int64_t i = 0; i < count && got->logits; i++) {
        CHECK(plain_long_token(f, s, turn, got->tokens, at[i], logits, &where) > 0.03);
        CHECK_CLOSE(got->logits + at[i] * WORDS, logits, WORDS, 1e-4, 1e-4);
        far += 2 * where < at[i];
    }
    return far;
}

/* A cache of 2^20 positions on 8 ranks (--long, 30 s of processor time; otherwise 20,000 on 3), of
 * a model with one layer whose rows look at a few keys each. 64 needles are spread over the prompt,
 * each in a separate call. From a needle to the end of its call all rows attend to what is cached:
 * up to 512 rows, and in the last call all 4092. The logits of needles, of the last token of the
 * prompt and of the tokens after it are compared with double precision.
 *
 * A second layer would need queries of every token of the prompt in the first layer: 2^39 scores
 * per head, about 200 s of processor time. */
TEST(a_million_tokens) {
    enum { ROWS = 4, NEEDLES = 64, CHUNK = 4096 };
    static const shape one = { "qwen3", RA_F32, 0, 1, 0, 0, NULL, NULL, NULL, NULL, 1, 1 << 20,
                               30 };
    const int64_t n = (h_run.large ? 1 << 20 : 20000) - ROWS;
    const int64_t between = h_run.large ? (1 << 20) / NEEDLES : CHUNK;
    int32_t *prompt = (int32_t *)malloc((size_t)n * sizeof *prompt);
    turns *turn = (turns *)malloc((size_t)(n + ROWS) * sizeof *turn);
    int64_t needle[NEEDLES], needles = 0;
    checkpoint x;
    h_rng r = h_case_rng(0);
    if (!prompt || !turn) abort();
    if (!open_shape(&x, &one)) return;
    prompt_of(prompt, &r, n);
    for (int64_t end = between; end <= n; end += between)
        needle[needles++] = end - h_range(&r, 1, 512);
    needle[needles++] = (n - 1) / CHUNK * CHUNK;
    make_turns(turn, n + ROWS);
    infer_options o = { 0 };
    infer_result got;
    o.ranks = h_run.large ? 8 : 3;
    o.chunk = CHUNK;
    o.predict = ROWS;
    o.all_logits = 2;
    o.wanted = needle;
    o.wanted_count = needles;
    CHECK(infer_run(&x.m, &o, prompt, n, &got));
    CHECK_EQ(got.count, n + ROWS);
    CHECK(8 * long_rows(&x.f, &one, turn, &got, needle, needles) >= needles);
    for (int64_t i = n - 1; i < n + ROWS - 1; i++) long_rows(&x.f, &one, turn, &got, &i, 1);
    infer_free(&got);
    close_shape(&x);
    free(prompt);
    free(turn);
}

/* -------------------------------------------------------------------------- wrong files */
/* Opens a file and, if that works, tokenizes a text and runs a few tokens. Returns 1 if it worked;
 * otherwise there is a sentence. The copy ends where the file ends, for the sanitizer. */
static int try_file(const uint8_t *data, size_t size, char why[INFER_WHY]) {
    static const int32_t prompt[] = { 4, 5, 6, 7, 8 };
    void *copy = NULL;
    gguf g;
    model m;
    tokenizer t;
    int ok = 0;
    why[0] = 0;
    if (posix_memalign(&copy, 32, size ? size : 1)) abort();
    memcpy(copy, data, size);
    if (gguf_open(&g, copy, size, why)) {
        if (tokenizer_open(&t, &g, why)) {
            token_ids ids = { NULL, 0, 0 };
            char out[64];
            (void)tokenize(&t, "abc d!</s>\xFF zz", 14, &ids);
            for (int64_t i = 0; i < ids.count; i++) (void)token_bytes(&t, ids.data[i], out, 64);
            free(ids.data);
            tokenizer_close(&t);
        }
        if (model_open(&m, &g, why)) {
            infer_options o = { 0 };
            infer_result got;
            o.predict = 2;
            ok = infer_run(&m, &o, prompt, 5, &got);
            memcpy(why, got.why, INFER_WHY);
            infer_free(&got);
            model_close(&m);
        }
        gguf_close(&g);
    }
    free(copy);
    if (!ok) CHECK(why[0] != 0);
    return ok;
}

TEST(truncated_at_every_byte) {
    file f;
    char why[INFER_WHY];
    make_file(&f, &shapes[0]);
    size_t end = f.size;
    for (size_t n = 0; n < f.size; n += n < f.head ? 1 : 61)
        if (try_file(f.data, n, why)) { end = n; break; }
    CHECK(f.size - end < 32);          /* only padding may be missing */
    CHECK(try_file(f.data, f.size, why));
    free_file(&f);
}

TEST(damaged_at_every_byte) {
    static const uint8_t flips[] = { 0x01, 0x80, 0xFF };
    file f;
    char why[INFER_WHY];
    int64_t opened = 0, refused = 0;
    make_file(&f, &shapes[3]);
    for (size_t at = 0; at < f.head; at++) {
        for (size_t k = 0; k < sizeof flips; k++) {
            f.data[at] ^= flips[k];
            if (try_file(f.data, f.size, why)) opened++;
            else refused++;
            f.data[at] ^= flips[k];
        }
    }
    CHECK(opened > 100 && refused > 1000);
    free_file(&f);
}

TEST(sentences) {
    static const struct { shape s; const char *says; } cases[] = {
        { { "gpt2", RA_F32, 0, 0, 0, 0, NULL, NULL, NULL, NULL, 0, 0, 0 },
          "general.architecture is 'gpt2'" },
        { { "llama", RA_F32, 0, 0, 0, 0, "llama.rope.scaling.type", "su", NULL, NULL, 0, 0, 0 },
          "llama.rope.scaling.type is 'su'" },
        { { "llama", RA_F32, 0, 0, 0, 0, "llama.attention.key_length", "8", NULL, NULL, 0, 0, 0 },
          "llama.attention.key_length is no single number" },
        { { "llama", RA_F32, 0, 0, 0, 0, "llama.rope.dimension_count", "4.5", NULL, NULL, 0, 0, 0 },
          "llama.rope.dimension_count is 4.5, not a whole number" },
        { { "llama", RA_F32, 0, 0, 0, 0, "llama.attention.causal", "0.0", NULL, NULL, 0, 0, 0 },
          "llama.attention.causal is 0; this engine computes only 1" },
        { { "llama", RA_F32, 0, 0, 0, 0, "llama.expert_count", "8.0", NULL, NULL, 0, 0, 0 },
          "llama.expert_used_count is missing" },
        { { "llama", RA_F32, 0, 0, 0, 0, "llama.block_count", "2", NULL, NULL, 0, 0, 0 },
          "the key 'llama.block_count' is there twice" },
        { { "llama", RA_F32, 0, 0, 0, 0, NULL, NULL, "blk.0.ffn_up.weight", NULL, 0, 0, 0 },
          "the tensor 'blk.0.ffn_up.weight' is there twice" },
        { { "llama", RA_F32, 0, 0, 0, 0, "general.alignment", "8", NULL, NULL, 0, 0, 0 },
          "general.alignment is no u32" },
        { { "llama", RA_F32, 0, 0, 0, 0, NULL, NULL, "blk.0.ffn_gate_inp.weight", NULL, 0, 0, 0 },
          "of a kind that this engine does not know" },
        { { "llama", RA_F32, 0, 0, 0, 0, NULL, NULL, NULL, "blk.1.ffn_up.weight", 0, 0, 0 },
          "the tensor 'blk.1.ffn_up.weight' is missing" },
        { { "gemma3", RA_F32, 0, 0, 0, 0, NULL, NULL, NULL, NULL, 0, 0, 0 },
          "gemma3.attention.sliding_window is missing" },
        { { "llama", RA_F32, 0, 0, 0, 0, "tokenizer.ggml.add_eos_token", "1.0", NULL, NULL, 0, 0,
            0 }, "tokenizer.ggml.add_eos_token is 1; this engine computes only 0" },
        { { "llama", RA_F32, 0, 0, 0, 0, NULL, NULL, NULL, NULL, 0, 0, 0 },
          "tokenizer.ggml.tokens has 47 tokens and token_embd.weight 48 rows" } };
    for (int i = 0; i < (int)(sizeof cases / sizeof *cases); i++) {
        char why[INFER_WHY];
        file f;
        if (!h_case(i)) continue;
        listed = WORDS - (strstr(cases[i].says, "47") != NULL);
        make_file(&f, &cases[i].s);
        listed = WORDS;
        CHECK(!try_file(f.data, f.size, why));
        if (!CHECK(strstr(why, cases[i].says) != NULL)) printf("%s\n", why);
        free_file(&f);
    }
}

/* Layers of Gemma 3 with a window turn by a base of their own, whatever the pattern. Gemma 2 sees
 * 4096 positions if the file does not say how many. Keys that nothing uses are named. */
TEST(families) {
    static const shape gemma[] = {
        { "gemma2", RA_F32, 1, 0, 0, 0, NULL, NULL, NULL, NULL, 0, 0, 0 },
        { "gemma3", RA_F32, 1, 0, 0, 20, "gemma3.attention.sliding_window_pattern", "2.0", NULL,
          NULL, 0, 0, 0 },
        { "llama", RA_F32, 0, 0, 0, 0, "tokenizer.ggml.remove_extra_whitespaces", "1.0", NULL,
          NULL, 0, 0, 0 } };
    for (int i = 0; i < 3; i++) {
        const double local = i == 1 ? 10000 : 1e6;
        checkpoint x;
        if (!h_case(i) || !open_shape(&x, &gemma[i])) continue;
        if (i == 0) CHECK_EQ(x.m.window, 4096);
        if (i < 2) CHECK(fabs((double)x.m.rope[0][1] - pow(1e6, -2.0 / DIM)) < 1e-8);
        if (i < 2) CHECK(fabs((double)x.m.rope[1][1] - pow(local, -2.0 / DIM)) < 1e-8);
        if (i == 2) CHECK(!strcmp(x.m.unknown, gemma[i].extra_text_key));
        close_shape(&x);
    }
}

/* Neighbours join by score, a blank comes first, and what no token has becomes bytes or the unknown
 * token. */
TEST(tokens_of_a_text) {
    static const int32_t want[] = { 3, 30, 6, 3, 34, 9, 1, 5, 2, 0 };
    checkpoint x;
    tokenizer t;
    char why[INFER_WHY] = "";
    token_ids ids = { NULL, 0, 0 };
    if (!open_shape(&x, &shapes[0])) return;
    if (CHECK(tokenizer_open(&t, &x.g, why))) {
        t.add_bos = 0;
        CHECK(tokenize(&t, "abc eff", 7, &ids));
        CHECK(tokenize(&t, "</s>", 4, &ids));
        t.add_space = 0;
        CHECK(tokenize(&t, "b!?", 3, &ids));
        CHECK_EQ(ids.count, sizeof want / sizeof *want);
        if (ids.count == (int64_t)(sizeof want / sizeof *want))
            CHECK_BITS(ids.data, want, sizeof want);
        tokenizer_close(&t);
    }
    free(ids.data);
    close_shape(&x);
}

/* The highest scores are chosen, the first of equal ones, with shares that are their exponentials
 * over the sum of them. Pairs are put in order of their experts, and keep their order in each. */
TEST(experts) {
    static const float score[] = { 1, 3, 3, -200, 2, 3 };
    static const int32_t ids[] = { 4, 0, 4, 2, 0, 2, 2 };
    static const int64_t places[] = { 5, 0, 6, 2, 1, 3, 4 }, starts[] = { 0, 2, 2, 5, 5, 7 };
    int32_t id[4];
    float share[4];
    int64_t place[7], start[6];
    experts_choose(score, 6, 4, id, share);
    CHECK(id[0] == 1 && id[1] == 2 && id[2] == 5 && id[3] == 4);
    CHECK(share[0] == share[2] && fabs((double)share[3] - 1 / (3 * exp(1) + 1)) < 1e-7);
    experts_sort(ids, 7, 5, place, start);
    CHECK_BITS(place, places, sizeof places);
    CHECK_BITS(start, starts, sizeof starts);
}

/* Every character with marks and the next one in NFC: the FNV-1a hash of what Python makes of them
 * with Unicode 16. Bytes that are no characters stay; many marks take no longer than a sort. */
TEST(composed_characters) {
    enum { MARKS = 200000 };
    static const char odd[] = "e\xCC\x81\xFF\xCC\x81\xE1\x84\x92\xE1\x85\xA1\xE1\x86\xAB\xE2\x84";
    static const char want[] = "\xC3\xA9\xFF\xCC\x81\xED\x95\x9C\xE2\x84";
    uint32_t hash = 2166136261u;
    char *many = (char *)malloc(2 * MARKS), *out;
    size_t size;
    for (uint32_t c = 0x300; c < 0x30000; c++) {
        char text[24];
        size_t n = 0;
        if (c >= 0xD800 && c < 0xE000) continue;
        n += (size_t)utf8_write(c, text);
        n += (size_t)utf8_write(0x301, text + n);
        n += (size_t)utf8_write(0x327, text + n);
        n += (size_t)utf8_write(c == 0xD7FF ? 0x41 : c + 1, text + n);
        n += (size_t)utf8_write(0x300, text + n);
        out = unicode_nfc(text, n, &size);
        for (size_t i = 0; out && i < size; i++) hash = (hash ^ (uint8_t)out[i]) * 16777619u;
        free(out);
    }
    CHECK_EQ(hash, 0x9BD90293u);
    out = unicode_nfc(odd, sizeof odd - 1, &size);
    if (CHECK(out != NULL) && CHECK_EQ(size, sizeof want - 1)) CHECK_BITS(out, want, size);
    free(out);
    for (int i = 0; many && i < MARKS; i++)
        memcpy(many + 2 * i, i % 2 ? "\xCC\x81" : "\xCC\xA7", 2);
    out = many ? unicode_nfc(many, 2 * MARKS, &size) : NULL;
    if (CHECK(out != NULL)) CHECK(size == 2 * MARKS && !memcmp(out, "\xCC\xA7\xCC\xA7", 4));
    free(out);
    free(many);
}

/* Blocks of pseudo-random bytes become the floats that the gguf package makes of them: their FNV-1a
 * hashes. A NaN counts as 0x7FC00000. */
TEST(quantised_blocks) {
    static const struct { uint32_t type, hash; } all[] = {
        { QUANT_Q4_0, 0x192FD31Cu }, { QUANT_Q4_1, 0x9A17CCF3u }, { QUANT_Q5_0, 0xA762DBBCu },
        { QUANT_Q5_1, 0x768CE977u }, { QUANT_Q2_K, 0x5D8459ACu }, { QUANT_Q3_K, 0x40104565u },
        { QUANT_Q4_K, 0x7FC84B31u }, { QUANT_Q5_K, 0xAA79D489u }, { QUANT_Q6_K, 0x2651494Fu },
        { QUANT_IQ4_NL, 0xEFA334DAu }, { QUANT_IQ4_XS, 0x79545510u },
        { QUANT_MXFP4, 0x3D602919u } };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        uint8_t raw[8 * 256];
        float wide[8 * 256];
        const quant_size size = quant_block(all[i].type);
        uint32_t x = 7, hash = 2166136261u, bits;
        for (int k = 0; k < 8 * size.bytes; k++) {
            x = x * 1664525u + 1013904223u;
            raw[k] = (uint8_t)(x >> 24);
        }
        gguf_widen(GGUF_QUANT + (int32_t)all[i].type, raw, 8 * size.elements, wide);
        for (int k = 0; k < 8 * size.elements; k++) {
            memcpy(&bits, &wide[k], 4);
            if (isnan(wide[k])) bits = 0x7FC00000u;
            for (int b = 0; b < 32; b += 8) hash = (hash ^ (bits >> b & 255)) * 16777619u;
        }
        h_context("type %u", all[i].type);
        CHECK_EQ(hash, all[i].hash);
    }
}

/* -------------------------------------------------------------------------- products */
enum { MOST_ROWS = 61, MOST_COLUMNS = 1088, MOST_TOKENS = 150,
       PRODUCT_Q4 = GGUF_QUANT + QUANT_Q4_0 };

typedef struct product {
    uint8_t w[MOST_ROWS * MOST_COLUMNS * 4];
    float wide[MOST_ROWS * MOST_COLUMNS], x[MOST_TOKENS * MOST_COLUMNS];
    float y[MOST_TOKENS * MOST_ROWS], alone[MOST_ROWS], again[MOST_TOKENS * MOST_ROWS];
    float scratch[(MOST_COLUMNS + 32) * MATMUL_BLOCK_TOKENS + 16 + sizeof(matmul_block) / 4];
    matrix m;
} product;

static void make_product(product *p, int32_t dtype, int64_t rows, int64_t columns, h_rng *r) {
    const int64_t n = rows * columns, row = (int64_t)gguf_row_bytes(dtype, columns);
    p->m.data = p->w;
    p->m.rows = rows;
    p->m.columns = columns;
    p->m.dtype = dtype;
    for (int64_t i = 0; i < n; i++) p->wide[i] = h_normal(r);
    for (int64_t i = 0; i < MOST_TOKENS * columns; i++) p->x[i] = h_normal(r);
    for (int64_t i = 0; i < rows * row && dtype == PRODUCT_Q4; i++)
        p->w[i] = i % 18 == 0 ? 0 : i % 18 == 1 ? 0x2c : (uint8_t)(int)(128 + 30 * h_normal(r));
    for (int64_t i = 0; i < rows; i++) {
        float *wide = p->wide + i * columns;
        if (dtype == PRODUCT_Q4) {
            gguf_widen(dtype, p->w + i * row, columns, wide);
            continue;
        }
        CHECK_EQ(ra_convert(p->w + i * row, dtype, wide, RA_F32, columns), RA_OK);
        CHECK_EQ(ra_convert(wide, RA_F32, p->w + i * row, dtype, columns), RA_OK);
    }
}

/* y beside sums in double precision; `loss`: of a product, relative to the sum of magnitudes. */
static void product_is_right(const product *p, int64_t tokens, double loss) {
    const int64_t n = p->m.columns;
    for (int64_t t = 0; t < tokens; t++) {
        for (int64_t r = 0; r < p->m.rows; r++) {
            double sum = 0, size = 0;
            for (int64_t i = 0; i < n; i++) {
                const double a = (double)p->wide[r * n + i] * (double)p->x[t * n + i];
                sum += a;
                size += fabs(a);
            }
            if (!CHECK(fabs((double)p->y[t * p->m.rows + r] - sum) <= loss * size)) return;
        }
    }
}

/* All tokens, each alone, and on another number of threads: the same bits. */
static void product_is_one(product *p, pool *threads, pool *one, int64_t tokens, int decode) {
    void (*run)(pool *, const matrix *, const float *, float *, int64_t, float *) =
        decode ? matmul_decode : matmul_run;
    const int64_t rows = p->m.rows;
    run(threads, &p->m, p->x, p->y, tokens, p->scratch);
    run(one, &p->m, p->x, p->again, tokens, p->scratch);
    CHECK_BITS(p->again, p->y, tokens * rows * 4);
    for (int64_t t = 0; t < tokens; t++) {
        run(one, &p->m, p->x + t * p->m.columns, p->alone, 1, p->scratch);
        if (!CHECK_BITS(p->alone, p->y + t * rows, rows * 4)) break;
    }
    product_is_right(p, tokens, decode && p->m.dtype == RA_Q8_0 ? 4e-5 : 4e-6);
}

TEST(products) {
    static const int32_t dtypes[] = { RA_F32, RA_F16, RA_BF16, RA_Q8_0, PRODUCT_Q4 };
    static const int32_t sizes[][2] = { { 1, 32 }, { 61, 544 }, { 48, 1088 }, { 13, 37 } };
    static const int32_t tokens[] = { 1, 3, 8, 9, 150 };
    static product p;
    pool threads, one;
    pool_start(&threads, 3);
    pool_start(&one, 0);
    for (int i = 0; i < 5 * 4 * 3; i++) {
        const int32_t dtype = dtypes[i % 5], *size = sizes[i / 5 % 4];
        h_rng r = h_case_rng(i);
        if (!h_case(i) || i / 20 > matmul_isa() || (i % 5 > 2 && size[1] % 32)) continue;
        threads.isa = one.isa = i / 20;
        make_product(&p, dtype, size[0], size[1], &r);
        for (int k = 0; k < 5; k++) {
            h_context("dtype %d, %d x %d, %d tokens, instruction set %d", (int)dtype, (int)size[0],
                      (int)size[1], (int)tokens[k], one.isa);
            product_is_one(&p, &threads, &one, tokens[k], 0);
            product_is_one(&p, &threads, &one, tokens[k], 1);
        }
    }
    pool_stop(&threads);
    pool_stop(&one);
}

/* Products on a caller's stack of 128 KiB, which is what musl gives a thread. */
static void *on_a_small_stack(void *arg) {
    product *p = (product *)arg;
    pool threads, one;
    pool_start(&threads, 3);
    pool_start(&one, 0);
    product_is_one(p, &threads, &one, 150, 0);
    pool_stop(&threads);
    pool_stop(&one);
    return NULL;
}

TEST(products_on_a_small_stack) {
    static product p;
    h_rng r = h_case_rng(0);
    pthread_attr_t how;
    pthread_t thread;
    make_product(&p, RA_BF16, 48, 1088, &r);
    pthread_attr_init(&how);
    CHECK_EQ(pthread_attr_setstacksize(&how, 128 << 10), 0);
    if (CHECK_EQ(pthread_create(&thread, &how, on_a_small_stack, &p), 0))
        pthread_join(thread, NULL);
    pthread_attr_destroy(&how);
}

/* What is not finite in a row of x makes that row of y so, and no other. */
TEST(products_of_infinities) {
    static product p;
    pool one;
    h_rng r = h_case_rng(0);
    pool_start(&one, 0);
    make_product(&p, RA_Q8_0, 5, 64, &r);
    p.x[64 + 40] = HUGE_VALF;
    p.x[3 * 64] = NAN;
    for (int tokens = 4; tokens <= 16; tokens += 12) {
        for (int decode = 0; decode < 2; decode++) {
            if (decode) matmul_decode(&one, &p.m, p.x, p.y, tokens, p.scratch);
            else matmul_run(&one, &p.m, p.x, p.y, tokens, p.scratch);
            for (int i = 0; i < tokens * 5; i++)
                CHECK_EQ(!isfinite(p.y[i]), i / 5 == 1 || i / 5 == 3);
        }
    }
    pool_stop(&one);
}

/* Norms, gates and sums beside double precision, with the same bits on any number of threads. */
static void each_is_right(pool *threads, pool *one, int64_t rows, int64_t n, h_rng *r) {
    enum { MOST = 64 * 1000 };
    static float x[MOST], w[MOST], got[3][MOST], again[3][MOST];
    for (int64_t i = 0; i < rows * n; i++) x[i] = 4 * h_normal(r) * (i % 7 ? 1 : 30);
    for (int64_t i = 0; i < rows * n; i++) w[i] = h_normal(r);
    for (int k = 0; k < 2; k++) {
        float (*to)[MOST] = k ? again : got;
        pool *p = k ? one : threads;
        matmul_norm(p, to[0], x, w, rows, n, 1e-5f);
        memcpy(to[1], x, sizeof x);
        matmul_gate(p, to[1], w, rows * n);
        memcpy(to[2], x, sizeof x);
        matmul_add(p, to[2], w, rows * n);
    }
    for (int k = 0; k < 3; k++) CHECK_BITS(again[k], got[k], rows * n * 4);
    for (int64_t i = 0; i < rows * n; i++) {
        const double v = (double)x[i], gate = v / (1 + exp(-v)) * (double)w[i];
        double sum = 0;
        for (int64_t j = i / n * n; j < i / n * n + n; j++) sum += (double)x[j] * (double)x[j];
        const double norm = v / sqrt(sum / (double)n + (double)1e-5f) * (double)w[i % n];
        if (!CHECK(fabs((double)got[0][i] - norm) <= 4e-7 * fabs(norm)) ||
            !CHECK(fabs((double)got[1][i] - gate) <= 1e-6 * fabs(gate) + 1e-30) ||
            !CHECK(fabs((double)got[2][i] - (v + (double)w[i])) <= 1e-7 * fabs(v) + 1e-6)) return;
    }
}

TEST(between_products) {
    static const int32_t sizes[][2] = { { 1, 1 }, { 3, 37 }, { 64, 1000 } };
    pool threads, one;
    pool_start(&threads, 3);
    pool_start(&one, 0);
    for (int i = 0; i < 9; i++) {
        h_rng r = h_case_rng(i);
        if (!h_case(i) || i / 3 > matmul_isa()) continue;
        threads.isa = one.isa = i / 3;
        h_context("%d x %d, instruction set %d", (int)sizes[i % 3][0], (int)sizes[i % 3][1],
                  one.isa);
        each_is_right(&threads, &one, sizes[i % 3][0], sizes[i % 3][1], &r);
    }
    pool_stop(&threads);
    pool_stop(&one);
}

int main(int argc, char **argv) {
    static const h_test tests[] = {
        ENTRY(ranks_and_chunks), ENTRY(ranks_apart), ENTRY(ranks_that_split),
        ENTRY(ranks_that_differ),
        ENTRY(how_a_run_ends), ENTRY(more_ranks_than_eight), ENTRY(turns), ENTRY(guesses),
        ENTRY(tokens_cannot_be_shared), ENTRY(sampling), ENTRY(options), ENTRY(threads_of_a_rank),
        ENTRY(a_million_tokens), ENTRY(products), ENTRY(products_of_infinities),
        ENTRY(products_on_a_small_stack),
        ENTRY(between_products),
#if defined(__linux__) && defined(__LP64__)
        ENTRY(ranks_in_shared_memory),
#endif
        ENTRY(truncated_at_every_byte),
        ENTRY(damaged_at_every_byte), ENTRY(sentences), ENTRY(families), ENTRY(tokens_of_a_text),
        ENTRY(experts), ENTRY(composed_characters), ENTRY(quantised_blocks) };
    return h_main(argc, argv, tests, sizeof tests / sizeof *tests);
}
