/* An engine's cache of keys and values: a prompt in pieces, then token by token, then four guessed
 * tokens verified at once, with a sliding window. You will see that each call gives what one call
 * over the whole text gives, and how much memory the cache takes in each dtype.
 *
 *   cc -O2 -std=c99 -pthread -I. -o decode examples/decode.c -lm && ./decode */
#define RINGATTN_IMPLEMENTATION
#include "ringattn.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { HEADS = 8, KV_HEADS = 2, DIM = 64, CAPACITY = 2048, TEXT = 1100, WINDOW = 512 };

typedef struct cache {                 /* [CAPACITY][KV_HEADS][DIM], elements of dtype */
    uint8_t *k, *v;
    int64_t row;                       /* bytes of a token */
    int32_t dtype;
    int64_t count;                     /* tokens in it */
} cache;

static float q[TEXT][HEADS][DIM], k[TEXT][KV_HEADS][DIM], v[TEXT][KV_HEADS][DIM];
static float o[TEXT][HEADS][DIM], whole[TEXT][HEADS][DIM];

static void fill(float *x, size_t n, uint32_t seed) {          /* your model does this */
    for (size_t i = 0; i < n; i++) {
        seed = seed * 1664525u + 1013904223u;
        x[i] = (float)(seed >> 8) / 8388608 - 1;
    }
}

/* Stores keys and values of the tokens [from, to) in the cache. */
static ra_status append(cache *c, int64_t from, int64_t to) {
    const int64_t n = (to - from) * KV_HEADS * DIM;
    ra_status s = ra_convert(c->k + from * c->row, c->dtype, k[from], RA_F32, n);
    if (s == RA_OK) s = ra_convert(c->v + from * c->row, c->dtype, v[from], RA_F32, n);
    c->count = to;
    return s;
}

/* Attends the queries [from, from + tokens) to the tokens in the cache. */
static ra_status attend(const cache *c, int64_t from, int64_t tokens, void *out) {
    ra_error why = {0};
    ra_desc d = ra_desc_make(HEADS, KV_HEADS, DIM, RA_F32, RA_MASK_CAUSAL);
    ra_tensors t = {0};
    d.tokens = tokens; d.q_offset = from; d.kv_tokens = c->count;
    d.k_dtype = d.v_dtype = c->dtype;
    d.mask.window = WINDOW;
    d.error = &why;
    t.q.data = q[from]; t.k.data = c->k; t.v.data = c->v; t.o.data = out;
    const ra_status s = ra_attention(&d, &t, NULL, 0, 0, 1);   /* one thread, on its stack */
    if (s != RA_OK) fprintf(stderr, "%s: %s\n", why.field, why.text);
    return s;
}

static double largest(int64_t from, int64_t to) {
    double most = 0;
    for (int64_t i = from * HEADS * DIM; i < to * HEADS * DIM; i++)
        most = fmax(most, fabs((double)(&o[0][0][0])[i] - (double)(&whole[0][0][0])[i]));
    return most;
}

/* Computes the tokens [from, to), `step` at a time. Returns the largest difference from the call
 * over the whole text. */
static ra_status stretch(cache *c, const char *what, int64_t from, int64_t to, int64_t step) {
    ra_status s = RA_OK;
    for (int64_t i = from; i < to && s == RA_OK; i += step) {
        s = append(c, i, i + step);
        if (s == RA_OK) s = attend(c, i, step, o[i]);
    }
    printf("  %-22s %4lld tokens, %3lld at a time: largest difference %.1e\n", what,
           (long long)(to - from), (long long)step, largest(from, to));
    return s;
}

static ra_status run(const char *name, int32_t dtype, int64_t row) {
    cache c = {0};
    c.dtype = dtype;
    c.row = row * KV_HEADS;
    c.k = (uint8_t *)malloc((size_t)(c.row * CAPACITY));
    c.v = (uint8_t *)malloc((size_t)(c.row * CAPACITY));
    if (!c.k || !c.v) return RA_E_NOMEM;
    printf("%s cache, %.2f MiB for %d tokens of a layer\n", name,
           (double)(2 * c.row * CAPACITY) / 1048576, (int)CAPACITY);
    ra_status s = append(&c, 0, TEXT);
    if (s == RA_OK) s = attend(&c, 0, TEXT, whole);
    if (s == RA_OK) s = stretch(&c, "prompt in pieces", 0, 1000, 250);
    if (s == RA_OK) s = stretch(&c, "decode", 1000, 1060, 1);
    if (s == RA_OK) s = stretch(&c, "verify guessed tokens", 1060, 1100, 4);
    free(c.k);
    free(c.v);
    /* Both sides round to 16 bits where the processor multiplies q8_0 and q4_0 as integers. */
    const double most = dtype == RA_Q8_0 || dtype == RA_Q4_0 ? 4e-6 : 2e-6;
    return s == RA_OK && largest(0, TEXT) > most ? RA_E_RANGE : s;
}

int main(void) {
    fill(&q[0][0][0], sizeof q / sizeof(float), 1);
    fill(&k[0][0][0], sizeof k / sizeof(float), 2);
    fill(&v[0][0][0], sizeof v / sizeof(float), 3);
    if (run("f32", RA_F32, DIM * 4) != RA_OK) return 1;
    if (run("f16", RA_F16, DIM * 2) != RA_OK) return 1;
    if (run("q8_0", RA_Q8_0, DIM / 32 * 34) != RA_OK) return 1;
    return run("q4_0", RA_Q4_0, DIM / 32 * 18) != RA_OK;
}
