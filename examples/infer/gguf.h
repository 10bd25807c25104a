/* Reads GGUF, versions 2 and 3: named values and named tensors of a model file that is mapped into
 * memory. Nothing in the file is trusted: every count, length and offset is checked before it is
 * used, and a wrong or truncated file is refused with a sentence. The data is not copied: a value
 * or tensor points to where it begins in the file.
 *
 *   uint32 magic "GGUF", uint32 version, uint64 tensors, uint64 values
 *   values:  string key, uint32 type, the value (array: uint32 type, uint64 count, elements)
 *   tensors: string name, uint32 dims, uint64 size of each, uint32 type, uint64 offset
 *   zeros up to a multiple of general.alignment, then the tensors' data; a file without tensors
 *   may end before the zeros
 *
 * A model may be split into several files, each with some of its tensors: gguf_join puts them
 * together.
 *
 * All numbers are little-endian. A string is a uint64 length and its bytes. */
#if !defined(INFER_GGUF_H)
#define INFER_GGUF_H

#include "ringattn.h"
#include "quants.h"

#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { GGUF_U8, GGUF_I8, GGUF_U16, GGUF_I16, GGUF_U32, GGUF_I32, GGUF_F32, GGUF_BOOL, GGUF_STRING,
       GGUF_ARRAY, GGUF_U64, GGUF_I64, GGUF_F64, GGUF_TYPES };
enum { GGUF_DIMS = 4, INFER_WHY = 784, GGUF_QUANT = 64 };

typedef struct gguf_text { const char *data; size_t size; } gguf_text;   /* no 0 at the end */

typedef struct gguf_value {
    gguf_text key;
    uint32_t type;                     /* of an array: of its elements */
    int is_array;
    uint64_t count;                    /* elements of an array */
    const uint8_t *data;               /* of the value, or of the first element */
} gguf_value;

typedef struct gguf_tensor {
    gguf_text name;
    int32_t dtype;                     /* RA_F32, RA_F16, RA_BF16, RA_Q8_0, or GGUF_QUANT + type;
                                        * RA_DTYPE_UNSET: one that nothing here reads */
    uint32_t type;                     /* as the file has it */
    int32_t dims;
    int64_t size[GGUF_DIMS];           /* of each dim, the contiguous one first */
    const uint8_t *data;
} gguf_tensor;

typedef struct gguf {
    gguf_value *values;
    gguf_tensor *tensors;
    int64_t value_count, tensor_count;
} gguf;

typedef struct gguf_reader {           /* at: the next byte to read */
    const uint8_t *data;
    size_t at, size;
    char *why;                         /* [INFER_WHY] */
} gguf_reader;

/* Writes the sentence that says what is wrong to why[INFER_WHY]; returns 0. */
static inline __attribute__((format(printf, 2, 3))) int gguf_refuse(char *why, const char *format,
                                                                    ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(why, INFER_WHY, format, args);
    va_end(args);
    return 0;
}

static inline const char *gguf_type_name(uint32_t type) {
    static const char *const names[] = {
        "f32", "f16", "q4_0", "q4_1", "type 4", "type 5", "q5_0", "q5_1", "q8_0", "q8_1", "q2_K",
        "q3_K", "q4_K", "q5_K", "q6_K", "q8_K", "iq2_xxs", "iq2_xs", "iq3_xxs", "iq1_s", "iq4_nl",
        "iq3_s", "iq2_s", "iq4_xs", "i8", "i16", "i32", "i64", "f64", "iq1_m", "bf16", "q4_0_4_4",
        "q4_0_4_8", "q4_0_8_8", "tq1_0", "tq2_0", "iq4_nl_4_4", "iq4_nl_4_8", "iq4_nl_8_8",
        "mxfp4" };
    return type < sizeof names / sizeof *names ? names[type] : "unknown";
}

/* The beginning of a name that fits `out`, with ? for control characters. */
static inline const char *gguf_show(gguf_text t, char *out, size_t bytes) {
    size_t i, n = t.size < bytes - 1 ? t.size : bytes - 1;
    for (i = 0; i < n; i++)
        out[i] = t.data[i] >= 32 && t.data[i] < 127 ? t.data[i] : '?';
    out[n] = 0;
    return out;
}

static inline int gguf_is(gguf_text t, const char *s) {
    return t.size == strlen(s) && memcmp(t.data, s, t.size) == 0;
}

static inline uint64_t gguf_little(const uint8_t *p, int bytes) {
    uint64_t x = 0;
    while (bytes-- > 0) x = x << 8 | p[bytes];
    return x;
}

/* Reads n bytes and returns where they begin; null: the file ends before that. what: their name in
 * the sentence. */
static inline const uint8_t *gguf_bytes(gguf_reader *r, uint64_t n, const char *what) {
    const uint8_t *p = r->data + r->at;
    if (n > r->size - r->at) {
        snprintf(r->why, INFER_WHY, "the file ends at byte %llu, inside %s at byte %llu",
                 (unsigned long long)r->size, what, (unsigned long long)r->at);
        return NULL;
    }
    r->at += (size_t)n;
    return p;
}

static inline int gguf_number(gguf_reader *r, int bytes, const char *what, uint64_t *out) {
    const uint8_t *p = gguf_bytes(r, (uint64_t)bytes, what);
    if (p) *out = gguf_little(p, bytes);
    return p != NULL;
}

static inline int gguf_string(gguf_reader *r, const char *what, gguf_text *out) {
    uint64_t n = 0;
    const uint8_t *p = NULL;
    if (gguf_number(r, 8, what, &n)) p = gguf_bytes(r, n, what);
    if (!p) return 0;
    out->data = (const char *)p;
    out->size = (size_t)n;
    return 1;
}

static inline uint64_t gguf_type_bytes(uint32_t type) {       /* 0: a string or an array */
    static const uint8_t bytes[GGUF_TYPES] = { 1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8 };
    return bytes[type];
}

static inline int gguf_refuse_type(gguf_reader *r, const gguf_value *v) {
    char name[64];
    return gguf_refuse(r->why, "the value '%s' has the type %lu%s, which GGUF does not have",
                       gguf_show(v->key, name, sizeof name), (unsigned long)v->type,
                       v->is_array ? " as elements" : "");
}

static inline int gguf_read_value(gguf_reader *r, gguf_value *v) {
    uint64_t type = 0;
    gguf_text element;
    memset(v, 0, sizeof *v);
    if (!gguf_string(r, "the key of a value", &v->key)) return 0;
    if (!gguf_number(r, 4, "the type of a value", &type)) return 0;
    v->count = 1;
    v->is_array = type == GGUF_ARRAY;
    if (v->is_array) {
        if (!gguf_number(r, 4, "the type of an array", &type)) return 0;
        if (!gguf_number(r, 8, "the length of an array", &v->count)) return 0;
    }
    v->type = (uint32_t)type;
    if (type >= GGUF_TYPES || type == GGUF_ARRAY) return gguf_refuse_type(r, v);
    v->data = r->data + r->at;
    if (type == GGUF_STRING) {
        for (uint64_t i = 0; i < v->count; i++)
            if (!gguf_string(r, "a string", &element)) return 0;
        return 1;
    }
    if (v->count > r->size)
        return gguf_refuse(r->why, "an array at byte %llu has %llu elements, more than the file",
                           (unsigned long long)r->at, (unsigned long long)v->count);
    return gguf_bytes(r, v->count * gguf_type_bytes(v->type), "the elements of a value") != NULL;
}

/* Reads the name, sizes and type of a tensor, and the offset of its data. */
static inline int gguf_read_tensor(gguf_reader *r, gguf_tensor *t, uint64_t *offset) {
    char name[64];
    uint64_t dims = 0, size = 0, type = 0;
    memset(t, 0, sizeof *t);
    if (!gguf_string(r, "the name of a tensor", &t->name)) return 0;
    if (!gguf_number(r, 4, "the dims of a tensor", &dims)) return 0;
    gguf_show(t->name, name, sizeof name);
    if (dims < 1 || dims > GGUF_DIMS)
        return gguf_refuse(r->why, "the tensor '%s' has %llu dims; 1 to 4 are possible", name,
                           (unsigned long long)dims);
    for (t->dims = 0; t->dims < (int32_t)dims; t->dims++) {
        if (!gguf_number(r, 8, "the sizes of a tensor", &size)) return 0;
        if (size < 1 || size > INT32_MAX)
            return gguf_refuse(r->why, "the tensor '%s' has a dim of %llu; 1 to 2147483647 are "
                               "possible", name, (unsigned long long)size);
        t->size[t->dims] = (int64_t)size;
    }
    if (!gguf_number(r, 4, "the type of a tensor", &type)) return 0;
    if (!gguf_number(r, 8, "the offset of a tensor", offset)) return 0;
    t->type = (uint32_t)type;
    t->dtype = type == 0 ? RA_F32 : type == 1 ? RA_F16 : type == 8 ? RA_Q8_0
             : type == 30 ? RA_BF16 : quant_block(t->type).elements ? GGUF_QUANT + (int32_t)type
             : RA_DTYPE_UNSET;
    return 1;
}

/* Elements of a block: rows are whole blocks. */
static inline int gguf_block(int32_t dtype) {
    return dtype >= GGUF_QUANT ? quant_block((uint32_t)(dtype - GGUF_QUANT)).elements
         : dtype == RA_Q8_0 ? 32 : 1;
}

/* Bytes of n contiguous elements. */
static inline uint64_t gguf_row_bytes(int32_t dtype, int64_t n) {
    if (dtype >= GGUF_QUANT) {
        const quant_size s = quant_block((uint32_t)(dtype - GGUF_QUANT));
        return (uint64_t)n / (uint64_t)s.elements * (uint64_t)s.bytes;
    }
    if (dtype == RA_Q8_0) return (uint64_t)n / 32 * 34;
    return (uint64_t)n * (dtype == RA_F32 ? 4 : 2);
}

/* n contiguous elements as f32. */
static inline void gguf_widen(int32_t dtype, const uint8_t *from, int64_t n, float *to) {
    if (dtype >= GGUF_QUANT) quant_widen((uint32_t)(dtype - GGUF_QUANT), from, n, to);
    else (void)ra_convert(to, RA_F32, from, dtype, n);
}

static inline uint64_t gguf_elements(const gguf_tensor *t) {
    uint64_t n = 1;
    for (int32_t i = 0; i < t->dims; i++) n *= (uint64_t)t->size[i];
    return n;
}

/* Sets where the data of a tensor begins, if all of it is in the file. */
static inline int gguf_place_tensor(gguf_reader *r, gguf_tensor *t, uint64_t offset) {
    char name[64];
    const int block = gguf_block(t->dtype);
    const uint64_t left = r->size - r->at, plain = t->dtype == RA_F32 ? 4
                        : t->dtype == RA_F16 || t->dtype == RA_BF16 ? 2 : 1;
    uint64_t bytes;
    const char *wrong = NULL;
    if (t->dtype == RA_DTYPE_UNSET) return 1;
    gguf_show(t->name, name, sizeof name);
    if (t->size[0] % block)
        return gguf_refuse(r->why, "the tensor '%s' has rows that are not whole blocks of %d", name,
                           block);
    bytes = gguf_row_bytes(t->dtype, t->size[0]);
    if ((r->at + offset) % plain) wrong = "an offset that is no multiple of its elements' bytes";
    for (int32_t i = 1; i < t->dims && !wrong; i++) {
        if (bytes > left / (uint64_t)t->size[i]) wrong = "data beyond the end of the file";
        bytes *= (uint64_t)t->size[i];
    }
    if (!wrong && (bytes > left || offset > left - bytes))
        wrong = "data beyond the end of the file";
    if (wrong) return gguf_refuse(r->why, "the tensor '%s' has %s", name, wrong);
    t->data = r->data + r->at + offset;
    return 1;
}

static inline const gguf_value *gguf_find(const gguf *g, const char *key) {
    for (int64_t i = 0; i < g->value_count; i++)
        if (gguf_is(g->values[i].key, key)) return &g->values[i];
    return NULL;
}

static inline const gguf_tensor *gguf_find_tensor(const gguf *g, const char *name) {
    for (int64_t i = 0; i < g->tensor_count; i++)
        if (gguf_is(g->tensors[i].name, name)) return &g->tensors[i];
    return NULL;
}

/* Element i of an array of numbers, or a plain number, as a double; integers are exact below
 * 2^53. */
static inline double gguf_element(const gguf_value *v, uint64_t i) {
    const uint8_t *p = v->data + i * gguf_type_bytes(v->type);
    const uint64_t raw = gguf_little(p, (int)gguf_type_bytes(v->type));
    const uint32_t half = (uint32_t)raw;
    float f;
    double d;
    switch (v->type) {
    case GGUF_I8: return (int8_t)raw;
    case GGUF_I16: return (int16_t)raw;
    case GGUF_I32: return (int32_t)raw;
    case GGUF_I64: return (double)(int64_t)raw;
    case GGUF_F32: memcpy(&f, &half, 4); return (double)f;
    case GGUF_F64: memcpy(&d, &raw, 8); return d;
    default: return (double)raw;
    }
}

/* The string that begins at *p, which moves to the next one. The value was checked when it was
 * read. */
static inline gguf_text gguf_next_string(const uint8_t **p) {
    gguf_text t;
    t.size = (size_t)gguf_little(*p, 8);
    t.data = (const char *)*p + 8;
    *p += 8 + t.size;
    return t;
}

/* The text of a value; without characters if there is no value, or one of another type. */
static inline gguf_text gguf_text_of(const gguf_value *v) {
    gguf_text none = { NULL, 0 };
    if (!v || v->type != GGUF_STRING || v->is_array) return none;
    const uint8_t *p = v->data;
    return gguf_next_string(&p);
}

static inline void gguf_close(gguf *g) {
    free(g->values);
    free(g->tensors);
    memset(g, 0, sizeof *g);
}

static inline int gguf_read_head(gguf_reader *r, gguf *g) {
    uint64_t magic = 0, version = 0, tensors = 0, values = 0;
    if (!gguf_number(r, 4, "the magic", &magic)) return 0;
    if (magic != 0x46554747u)
        return gguf_refuse(r->why, "this is not a GGUF file: it does not begin with 'GGUF'");
    if (!gguf_number(r, 4, "the version", &version)) return 0;
    if (version != 2 && version != 3)
        return gguf_refuse(r->why, version & 0xffff ? "version %llu of GGUF is not 2 or 3"
                           : "the file is big-endian (version %llu)", (unsigned long long)version);
    if (!gguf_number(r, 8, "the number of tensors", &tensors)) return 0;
    if (!gguf_number(r, 8, "the number of values", &values)) return 0;
    /* A value has at least 13 bytes and a tensor 32. */
    if (values > r->size / 13 || tensors > r->size / 32)
        return gguf_refuse(r->why, "the file has %llu bytes, too few for %llu values and %llu "
                           "tensors", (unsigned long long)r->size, (unsigned long long)values,
                           (unsigned long long)tensors);
    g->value_count = (int64_t)values;
    g->tensor_count = (int64_t)tensors;
    g->values = (gguf_value *)calloc((size_t)values + 1, sizeof *g->values);
    g->tensors = (gguf_tensor *)calloc((size_t)tensors + 1, sizeof *g->tensors);
    if (g->values && g->tensors) return 1;
    return gguf_refuse(r->why, "no memory for %llu values and %llu tensors",
                       (unsigned long long)values, (unsigned long long)tensors);
}

/* The text, or tensor's data, of an entry, by which entries are sorted to find equal neighbours. */
typedef struct gguf_entry { gguf_text name; const uint8_t *data; uint64_t bytes; } gguf_entry;

static inline int gguf_by_name(const void *a, const void *b) {
    const gguf_text x = ((const gguf_entry *)a)->name, y = ((const gguf_entry *)b)->name;
    const int c = memcmp(x.data, y.data, x.size < y.size ? x.size : y.size);
    return c ? c : (x.size > y.size) - (x.size < y.size);
}

static inline int gguf_by_place(const void *a, const void *b) {
    const uint8_t *x = ((const gguf_entry *)a)->data, *y = ((const gguf_entry *)b)->data;
    return (x > y) - (x < y);
}

static inline int gguf_names_differ(gguf_entry *e, int64_t n, const char *what, char *why) {
    char name[64];
    qsort(e, (size_t)n, sizeof *e, gguf_by_name);
    for (int64_t i = 1; i < n; i++)
        if (!gguf_by_name(&e[i - 1], &e[i]))
            return gguf_refuse(why, "%s '%s' is there twice", what,
                               gguf_show(e[i].name, name, sizeof name));
    return 1;
}

static inline int gguf_places_differ(gguf_entry *e, int64_t n, char *why) {
    char one[64], two[64];
    qsort(e, (size_t)n, sizeof *e, gguf_by_place);
    for (int64_t i = 1; i < n; i++)
        if (e[i - 1].data && e[i - 1].data + e[i - 1].bytes > e[i].data)
            return gguf_refuse(why, "the tensors '%s' and '%s' overlap",
                               gguf_show(e[i - 1].name, one, sizeof one),
                               gguf_show(e[i].name, two, sizeof two));
    return 1;
}

/* No key and no tensor is there twice, and no two tensors overlap. */
static inline int gguf_all_differ(const gguf *g, char *why) {
    const int64_t most = g->value_count > g->tensor_count ? g->value_count : g->tensor_count;
    gguf_entry *e = (gguf_entry *)calloc((size_t)most + 1, sizeof *e);
    int ok;
    if (!e) return gguf_refuse(why, "no memory");
    for (int64_t i = 0; i < g->value_count; i++) e[i].name = g->values[i].key;
    ok = gguf_names_differ(e, g->value_count, "the key", why);
    for (int64_t i = 0; i < g->tensor_count; i++) {
        const gguf_tensor *t = &g->tensors[i];
        e[i].name = t->name;
        e[i].data = t->data;
        e[i].bytes = t->data ? gguf_row_bytes(t->dtype, (int64_t)gguf_elements(t)) : 0;
    }
    ok = ok && gguf_names_differ(e, g->tensor_count, "the tensor", why) &&
         gguf_places_differ(e, g->tensor_count, why);
    free(e);
    return ok;
}

static inline int gguf_read_all(gguf_reader *r, gguf *g, uint64_t *offset) {
    const gguf_value *a;
    uint64_t alignment = 32;
    for (int64_t i = 0; i < g->value_count; i++)
        if (!gguf_read_value(r, &g->values[i])) return 0;
    a = gguf_find(g, "general.alignment");
    if (a && (a->type != GGUF_U32 || a->is_array))
        return gguf_refuse(r->why, "general.alignment is no u32");
    if (a) alignment = gguf_little(a->data, 4);
    if (alignment < 1 || alignment > 1 << 20 || (alignment & (alignment - 1)))
        return gguf_refuse(r->why, "general.alignment is %llu; it must be a power of two, at most "
                           "1048576", (unsigned long long)alignment);
    for (int64_t i = 0; i < g->tensor_count; i++)
        if (!gguf_read_tensor(r, &g->tensors[i], &offset[i])) return 0;
    if (g->tensor_count && !gguf_bytes(r, (alignment - r->at % alignment) % alignment,
                                       "the padding before the data"))
        return 0;
    for (int64_t i = 0; i < g->tensor_count; i++)
        if (!gguf_place_tensor(r, &g->tensors[i], offset[i])) return 0;
    return gguf_all_differ(g, r->why);
}

/* Opens the file in `data`, which is aligned to at least 32 bytes (mapped memory is) and must stay
 * there until gguf_close. 0: see `why`; then there is nothing to close. */
static inline int gguf_open(gguf *g, const void *data, size_t size, char why[INFER_WHY]) {
    gguf_reader r;
    uint64_t *offset = NULL;
    int ok;
    memset(g, 0, sizeof *g);
    r.data = (const uint8_t *)data;
    r.at = 0;
    r.size = size;
    r.why = why;
    ok = gguf_read_head(&r, g);
    if (ok) offset = (uint64_t *)calloc((size_t)g->tensor_count + 1, sizeof *offset);
    if (ok && !offset) snprintf(why, INFER_WHY, "no memory");
    ok = ok && offset && gguf_read_all(&r, g, offset);
    free(offset);
    if (!ok) gguf_close(g);
    return ok;
}

/* How many files the model is split into; which of them this is, from 0; and the tensors of all. */
typedef struct gguf_split { int64_t count, number, tensors; } gguf_split;

static inline int gguf_split_of(const gguf *g, gguf_split *out, char why[INFER_WHY]) {
    const struct { const char *key; int64_t *to; } part[] = {
        { "split.count", &out->count }, { "split.no", &out->number },
        { "split.tensors.count", &out->tensors } };
    out->count = 1;
    out->number = 0;
    out->tensors = g->tensor_count;
    for (size_t i = 0; i < sizeof part / sizeof *part; i++) {
        const gguf_value *v = gguf_find(g, part[i].key);
        const double x = v && !v->is_array && v->type != GGUF_STRING ? gguf_element(v, 0) : -1;
        if (v && !(x >= 0 && x < 1e9)) return gguf_refuse(why, "%s is no count", part[i].key);
        if (v) *part[i].to = (int64_t)x;
    }
    if (out->count < 2) out->count = 1;
    if (out->count <= 9999 && out->number >= 0 && out->number < out->count) return 1;
    return gguf_refuse(why, "it is file %lld of %lld; 1 of 1 to 9999 of 9999 are possible",
                       (long long)out->number + 1, (long long)out->count);
}

/* Appends the tensors of another file of the same model and closes that file. */
static inline int gguf_join(gguf *g, gguf *more, char why[INFER_WHY]) {
    const int64_t all = g->tensor_count + more->tensor_count;
    gguf_tensor *t = (gguf_tensor *)realloc(g->tensors, (size_t)(all + 1) * sizeof *t);
    if (!t) return gguf_refuse(why, "no memory for %lld tensors", (long long)all);
    memcpy(t + g->tensor_count, more->tensors, (size_t)more->tensor_count * sizeof *t);
    g->tensors = t;
    g->tensor_count = all;
    gguf_close(more);
    return gguf_all_differ(g, why);
}

#endif
