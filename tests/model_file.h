#ifndef RINGATTN_TESTS_MODEL_FILE_H
#define RINGATTN_TESTS_MODEL_FILE_H

/* A Llama of any shape with random weights, as the bytes of a GGUF file. Its vocabulary has the
 * letters a to z, each a token, and as many words that no text has as fill it. */
#include "ringattn.h"

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct made_shape {
    int32_t layers, hidden, heads, kv_heads, dim, feed, vocabulary, context, window;
    int32_t dtype;                     /* of matrices: RA_F32 or RA_F16 */
    uint32_t seed;
} made_shape;

typedef struct made_file {
    uint8_t *data;                     /* null: only counts */
    size_t size;
} made_file;

static inline void made_put(made_file *f, const void *p, size_t n) {
    if (f->data) memcpy(f->data + f->size, p, n);
    f->size += n;
}

static inline void made_put_number(made_file *f, uint64_t x, int bytes) {
    for (int i = 0; i < bytes; i++) {
        const uint8_t b = (uint8_t)(x >> 8 * i);
        made_put(f, &b, 1);
    }
}

static inline void made_put_text(made_file *f, const char *s) {
    made_put_number(f, strlen(s), 8);
    made_put(f, s, strlen(s));
}

static inline void made_put_key(made_file *f, const char *key, uint32_t type) {
    made_put_text(f, key);
    made_put_number(f, type, 4);
}

static inline void made_put_words(made_file *f, const made_shape *s) {
    char word[24];
    made_put_key(f, "tokenizer.ggml.tokens", 9);
    made_put_number(f, 8, 4);
    made_put_number(f, (uint64_t)s->vocabulary, 8);
    for (int32_t i = 0; i < s->vocabulary; i++) {
        if (i == 0) snprintf(word, sizeof word, "<unk>");
        else if (i < 27) snprintf(word, sizeof word, "%c", 'a' + i - 1);
        else snprintf(word, sizeof word, "-%ld-", (long)i);
        made_put_text(f, word);
    }
    made_put_key(f, "tokenizer.ggml.scores", 9);
    made_put_number(f, 6, 4);
    made_put_number(f, (uint64_t)s->vocabulary, 8);
    for (int32_t i = 0; i < s->vocabulary; i++) made_put_number(f, 0, 4);
    made_put_key(f, "tokenizer.ggml.token_type", 9);
    made_put_number(f, 5, 4);
    made_put_number(f, (uint64_t)s->vocabulary, 8);
    for (int32_t i = 0; i < s->vocabulary; i++) made_put_number(f, i ? 1 : 2, 4);
}

static inline void made_put_values(made_file *f, const made_shape *s) {
    const struct { const char *key; int32_t value; } all[] = {
        { "llama.block_count", s->layers }, { "llama.context_length", s->context },
        { "llama.embedding_length", s->hidden }, { "llama.feed_forward_length", s->feed },
        { "llama.attention.head_count", s->heads },
        { "llama.attention.head_count_kv", s->kv_heads },
        { "llama.attention.key_length", s->dim }, { "llama.attention.value_length", s->dim },
        { "llama.attention.sliding_window", s->window ? s->window : s->context } };
    const float epsilon = 1e-5f;
    made_put_key(f, "general.architecture", 8);
    made_put_text(f, "llama");
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        made_put_key(f, all[i].key, 4);
        made_put_number(f, (uint64_t)all[i].value, 4);
    }
    made_put_key(f, "llama.attention.layer_norm_rms_epsilon", 6);
    made_put(f, &epsilon, 4);
    made_put_key(f, "tokenizer.ggml.model", 8);
    made_put_text(f, "llama");
    made_put_key(f, "tokenizer.ggml.add_bos_token", 7);
    made_put_number(f, 0, 1);
    made_put_key(f, "tokenizer.ggml.add_space_prefix", 7);
    made_put_number(f, 0, 1);
    made_put_words(f, s);
}

enum { MODEL_VALUES = 17, MODEL_OF_LAYER = 9 };

/* Tensor i: its name, columns and rows (0: a vector). */
static inline void made_tensor(const made_shape *s, int32_t i, char name[64],
                               int32_t size[2]) {
    const int32_t q = s->heads * s->dim, kv = s->kv_heads * s->dim, h = s->hidden;
    const struct { const char *name; int32_t columns, rows; } all[MODEL_OF_LAYER] = {
        { "attn_norm", h, 0 }, { "ffn_norm", h, 0 }, { "attn_q", h, q }, { "attn_k", h, kv },
        { "attn_v", h, kv }, { "attn_output", q, h }, { "ffn_gate", h, s->feed },
        { "ffn_up", h, s->feed }, { "ffn_down", s->feed, h } };
    const int32_t k = (i - 2) % MODEL_OF_LAYER;
    size[0] = h;
    size[1] = i ? 0 : s->vocabulary;
    if (i < 2) snprintf(name, 64, "%s.weight", i ? "output_norm" : "token_embd");
    else {
        snprintf(name, 64, "blk.%ld.%s.weight", (long)((i - 2) / MODEL_OF_LAYER), all[k].name);
        size[0] = all[k].columns;
        size[1] = all[k].rows;
    }
}

/* A bell-shaped number of variance 1. */
static inline float made_random(uint64_t *state) {
    uint64_t x = *state += 0x9E3779B97F4A7C15u;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    x ^= x >> 31;
    return ((float)(x & 0xFFFF) + (float)(x >> 16 & 0xFFFF) + (float)(x >> 32 & 0xFFFF) +
            (float)(x >> 48) - 131070) / 65536 * 1.7320508f;
}

/* Random numbers, repeated: a row has other ones than its neighbours. */
static inline void made_put_weights(made_file *f, const made_shape *s, int32_t i) {
    enum { BLOCK = 8191 };
    float x[BLOCK];
    uint8_t raw[4 * BLOCK];
    int32_t size[2];
    char name[64];
    made_tensor(s, i, name, size);
    const int64_t n = (int64_t)size[0] * (size[1] ? size[1] : 1);
    const int32_t dtype = size[1] ? s->dtype : (int32_t)RA_F32;
    const float scale = 1.5f / sqrtf((float)size[0]);
    uint64_t state = s->seed * 1000003u + (uint64_t)i;
    for (int k = 0; k < BLOCK; k++) {
        x[k] = made_random(&state);
        x[k] = size[1] ? scale * x[k] : 1 + 0.2f * x[k];
    }
    (void)ra_convert(raw, dtype, x, RA_F32, BLOCK);
    for (int64_t k = 0; k < n; k += BLOCK)
        made_put(f, raw, (size_t)(n - k < BLOCK ? n - k : BLOCK) * (dtype == RA_F32 ? 4 : 2));
    while (f->size % 32) made_put_number(f, 0, 1);
}

static inline void made_put_all(made_file *f, const made_shape *s, int weights) {
    const int32_t tensors = 2 + s->layers * MODEL_OF_LAYER;
    uint64_t offset = 0;
    made_put_number(f, 0x46554747u, 4);
    made_put_number(f, 3, 4);
    made_put_number(f, (uint64_t)tensors, 8);
    made_put_number(f, MODEL_VALUES, 8);
    made_put_values(f, s);
    for (int32_t i = 0; i < tensors; i++) {
        int32_t size[2];
        char name[64];
        made_tensor(s, i, name, size);
        const uint64_t n = (uint64_t)size[0] * (uint64_t)(size[1] ? size[1] : 1);
        const int is_half = size[1] && s->dtype == RA_F16;
        made_put_text(f, name);
        made_put_number(f, size[1] ? 2 : 1, 4);
        made_put_number(f, (uint64_t)size[0], 8);
        if (size[1]) made_put_number(f, (uint64_t)size[1], 8);
        made_put_number(f, (uint64_t)is_half, 4);
        made_put_number(f, offset, 8);
        offset += (n * (is_half ? 2 : 4) + 31) / 32 * 32;
    }
    while (f->size % 32) made_put_number(f, 0, 1);
    if (!weights) f->size += offset;
    for (int32_t i = 0; weights && i < tensors; i++) made_put_weights(f, s, i);
}

/* The bytes of a file; free f->data. */
static inline void made_model(made_file *f, const made_shape *s) {
    void *data = NULL;
    memset(f, 0, sizeof *f);
    made_put_all(f, s, 0);
    if (posix_memalign(&data, 64, f->size)) abort();
    f->data = (uint8_t *)data;
    f->size = 0;
    made_put_all(f, s, 1);
}

#endif
