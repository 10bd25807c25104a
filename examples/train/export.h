/* Writes a trained model as GGUF: architecture llama, a vocabulary of 256 tokens, which are the
 * bytes (the kind gpt2 without merges). Byte 0, which stands between documents, ends a text. */
#if !defined(TRAIN_EXPORT_H)
#define TRAIN_EXPORT_H

#include "checkpoint.h"

enum { EXPORT_U32 = 4, EXPORT_I32 = 5, EXPORT_F32 = 6, EXPORT_BOOL = 7, EXPORT_STRING = 8,
       EXPORT_ARRAY = 9, EXPORT_ALIGNMENT = 32 };

typedef struct export_file { FILE *f; int ok; uint64_t at; } export_file;

static inline void export_put(export_file *e, const void *data, size_t n) {
    e->ok = e->ok && fwrite(data, 1, n, e->f) == n;
    e->at += n;
}

static inline void export_number(export_file *e, uint64_t x, int bytes) {
    uint8_t b[8];
    for (int i = 0; i < bytes; i++) b[i] = (uint8_t)(x >> 8 * i);
    export_put(e, b, (size_t)bytes);
}

static inline void export_text(export_file *e, const char *s) {
    export_number(e, strlen(s), 8);
    export_put(e, s, strlen(s));
}

static inline void export_string(export_file *e, const char *key, const char *s) {
    export_text(e, key);
    export_number(e, EXPORT_STRING, 4);
    export_text(e, s);
}

static inline void export_value(export_file *e, const char *key, int type, uint64_t x) {
    export_text(e, key);
    export_number(e, (uint64_t)type, 4);
    export_number(e, x, type == EXPORT_BOOL ? 1 : 4);
}

static inline void export_f32(export_file *e, const char *key, float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    export_value(e, key, EXPORT_F32, bits);
}

static inline void export_array(export_file *e, const char *key, int type, uint64_t count) {
    export_text(e, key);
    export_number(e, EXPORT_ARRAY, 4);
    export_number(e, (uint64_t)type, 4);
    export_number(e, count, 8);
}

/* The character by which a vocabulary of the kind gpt2 names a byte: itself if it is printable,
 * otherwise one from 256 on, in order. */
static inline void export_byte(int byte, char out[4]) {
    int others = 0, code = byte;
    for (int b = 0; b <= byte; b++) {
        const int printable = (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174;
        if (b == byte && !printable) code = 256 + others;
        others += !printable;
    }
    if (code < 128) snprintf(out, 4, "%c", code);
    else snprintf(out, 4, "%c%c", (char)(0xC0 | code >> 6), (char)(0x80 | (code & 63)));
}

static inline void export_head(export_file *e, const net *n, int64_t context) {
    const net_shape *s = &n->s;
    char text[4];
    export_string(e, "general.architecture", "llama");
    export_string(e, "general.name", "ring_train");
    export_value(e, "llama.block_count", EXPORT_U32, (uint64_t)s->layers);
    export_value(e, "llama.context_length", EXPORT_U32, (uint64_t)context);
    export_value(e, "llama.embedding_length", EXPORT_U32, (uint64_t)s->hidden);
    export_value(e, "llama.feed_forward_length", EXPORT_U32, (uint64_t)s->feed);
    export_value(e, "llama.attention.head_count", EXPORT_U32, (uint64_t)s->heads);
    export_value(e, "llama.attention.head_count_kv", EXPORT_U32, (uint64_t)s->kv_heads);
    export_value(e, "llama.attention.key_length", EXPORT_U32, (uint64_t)s->dim);
    export_value(e, "llama.attention.value_length", EXPORT_U32, (uint64_t)s->dim);
    export_value(e, "llama.rope.dimension_count", EXPORT_U32, (uint64_t)s->dim);
    export_value(e, "llama.vocab_size", EXPORT_U32, TRAIN_VOCABULARY);
    export_f32(e, "llama.rope.freq_base", (float)train_rope_base);
    export_f32(e, "llama.attention.layer_norm_rms_epsilon", train_epsilon);
    export_string(e, "tokenizer.ggml.model", "gpt2");
    export_string(e, "tokenizer.ggml.pre", "gpt-2");
    export_value(e, "tokenizer.ggml.eos_token_id", EXPORT_U32, 0);
    export_value(e, "tokenizer.ggml.bos_token_id", EXPORT_U32, 0);
    export_value(e, "tokenizer.ggml.add_bos_token", EXPORT_BOOL, 0);
    export_array(e, "tokenizer.ggml.merges", EXPORT_STRING, 0);
    export_array(e, "tokenizer.ggml.token_type", EXPORT_I32, TRAIN_VOCABULARY);
    for (int b = 0; b < TRAIN_VOCABULARY; b++) export_number(e, 1, 4);
    export_array(e, "tokenizer.ggml.tokens", EXPORT_STRING, TRAIN_VOCABULARY);
    for (int b = 0; b < TRAIN_VOCABULARY; b++) {
        export_byte(b, text);
        export_text(e, text);
    }
}
enum { EXPORT_VALUES = 22 };

/* Vectors are f32 in every model; q8_0 has blocks of 32. */
static inline int32_t export_dtype(const net_tensor *t, int32_t dtype) {
    return t->rows == 1 ? RA_F32 : dtype == RA_Q8_0 && t->columns % 32 ? RA_F16 : dtype;
}

static inline uint64_t export_bytes(const net_tensor *t, int32_t dtype) {
    const uint64_t n = (uint64_t)(t->rows * t->columns);
    return dtype == RA_F32 ? n * 4 : dtype == RA_F16 ? n * 2 : n / 32 * 34;
}

static inline uint64_t export_padded(uint64_t bytes) {
    return (bytes + EXPORT_ALIGNMENT - 1) / EXPORT_ALIGNMENT * EXPORT_ALIGNMENT;
}

static inline void export_pad(export_file *e) {
    while (e->at % EXPORT_ALIGNMENT) export_number(e, 0, 1);
}

/* dtype of the matrices: RA_F32, RA_F16 or RA_Q8_0. The file is written beside its place. */
static inline int export_gguf(const char *path, const net *n, int64_t context, int32_t dtype,
                              char *why) {
    char beside[TRAIN_PATH];
    uint64_t offset = 0;
    export_file e = { NULL, 1, 0 };
    snprintf(beside, sizeof beside, "%s.new", path);
    e.f = fopen(beside, "wb");
    if (!e.f) return train_refuse(why, "%s: %s", beside, strerror(errno));
    export_put(&e, "GGUF", 4);
    export_number(&e, 3, 4);
    export_number(&e, (uint64_t)n->tensors, 8);
    export_number(&e, EXPORT_VALUES, 8);
    export_head(&e, n, context);
    for (int64_t k = 0; k < n->tensors; k++) {
        const net_tensor *t = &n->tensor[k];
        const int32_t as = export_dtype(t, dtype);
        export_text(&e, t->name);
        export_number(&e, t->rows == 1 ? 1 : 2, 4);
        export_number(&e, (uint64_t)t->columns, 8);
        if (t->rows > 1) export_number(&e, (uint64_t)t->rows, 8);
        export_number(&e, as == RA_F32 ? 0 : as == RA_F16 ? 1 : 8, 4);
        export_number(&e, offset, 8);
        offset += export_padded(export_bytes(t, as));
    }
    export_pad(&e);
    for (int64_t k = 0; k < n->tensors && e.ok; k++) {
        const net_tensor *t = &n->tensor[k];
        const int32_t as = export_dtype(t, dtype);
        const size_t bytes = (size_t)export_bytes(t, as);
        void *data = malloc(bytes);
        e.ok = data && !ra_convert(data, as, n->w + t->at, RA_F32, t->rows * t->columns);
        if (e.ok) export_put(&e, data, bytes);
        export_pad(&e);
        free(data);
    }
    if (train_end_file(e.f, e.ok) && !rename(beside, path)) return 1;
    (void)remove(beside);
    return train_refuse(why, "%s: %s; nothing was changed there", path, strerror(errno));
}

#endif
