/* A KV cache split over ranks: a prompt in chunks, then token by token, then a draft of four tokens
 * of which two are rolled back. You will see that every number of ranks gives the same bits, what
 * a call moves, and how long one layer takes. With threads as ranks on one machine nothing becomes
 * faster than on one rank: the ranks share its memory. It shows what sharding costs.
 *
 *   cc -O2 -std=c99 -pthread -I. -o sharded_cache examples/sharded_cache.c -lm && ./sharded_cache
 *   ./sharded_cache TOKENS      length of the prompt, 64..1000000; 4096 if missing */
#define RINGATTN_IMPLEMENTATION
#include "ringattn.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { HEADS = 8, KV_HEADS = 2, DIM = 64, CHUNK = 512, DECODED = 64, MOST_RANKS = 8, LANES = 8 };

typedef struct model { int64_t prompt, text; float *q, *k, *v; } model;    /* by position */

/* The results of a run on some number of ranks. */
typedef struct result {
    const model *m;
    int32_t ranks;
    float *o;                          /* [text][HEADS][DIM], written by each position's owner */
    double prefill_s, decode_us;       /* of rank 0: the whole prompt; a token */
    ra_infer_report prefill, decode;   /* of its last chunk; of its last token */
} result;

static float *numbers(int64_t n, uint32_t seed) {               /* your model does this */
    float *x = (float *)malloc((size_t)n * sizeof *x);
    for (int64_t i = 0; x && i < n; i++) {
        seed = seed * 1664525u + 1013904223u;
        x[i] = (float)(seed >> 8) / 8388608 - 1;
    }
    return x;
}

/* One call of a layer for the new tokens [cached, cached + fresh). */
static ra_status layer(ra_cache *c, const result *r, int rank, ra_tensors *t, float *rows[2],
                       int64_t cached, int64_t fresh) {
    const size_t row = HEADS * DIM * sizeof(float);
    int64_t n = 0;
    ra_status s = RA_OK;
    for (int64_t p = cached; p < cached + fresh && !s; p++) {
        const int64_t kv = p * KV_HEADS * DIM;
        s = ra_cache_store(c, t, 0, p, r->m->k + kv, r->m->v + kv);      /* if this rank holds p */
        if (ra_cache_owner(c, p) == rank)
            memcpy(rows[0] + HEADS * DIM * n++, r->m->q + p * HEADS * DIM, row);
    }
    t->q.data = rows[0];
    t->o.data = rows[1];
    if (!s) s = ra_infer(c, t, &cached, &fresh, ra_deadline_ms(600000));
    n = 0;
    for (int64_t p = cached; p < cached + fresh && !s; p++)
        if (ra_cache_owner(c, p) == rank)
            memcpy(r->o + p * HEADS * DIM, rows[1] + HEADS * DIM * n++, row);
    return s;
}

static ra_status generate(ra_cache *c, result *r, int rank, ra_tensors *t, float *rows[2]) {
    const int64_t prompt = r->m->prompt;
    const int64_t begin = ra_now_ns();
    int64_t at = 0, fresh = 1;
    ra_status s = RA_OK;
    while (at < prompt && !s) {
        fresh = prompt - at < CHUNK ? prompt - at : CHUNK;
        if (rank == 0) s = ra_infer_query(c, &at, &fresh, &r->prefill);
        if (!s) s = layer(c, r, rank, t, rows, at, fresh);
        at += fresh;
    }
    const int64_t middle = ra_now_ns();
    for (fresh = 1; at < prompt + DECODED && !s; at++) {
        if (rank == 0) s = ra_infer_query(c, &at, &fresh, &r->decode);
        if (!s) s = layer(c, r, rank, t, rows, at, 1);
    }
    if (rank == 0) {
        r->prefill_s = (double)(middle - begin) * 1e-9;
        r->decode_us = (double)(ra_now_ns() - middle) * 1e-3 / DECODED;
    }
    if (!s) s = layer(c, r, rank, t, rows, at, 4);                   /* a draft of 4 tokens, */
    return s ? s : layer(c, r, rank, t, rows, at + 2, 2);            /* of which 2 were accepted */
}

/* Says on stderr why a call failed or was refused, and what this rank did last. */
static void tell(const ra_cache *c, int rank, ra_status s) {
    const ra_error *why = ra_cache_error(c);
    char line[RA_TEXT_BYTES];
    ra_event last[8];
    ra_failure f;
    const int n = ra_cache_events(c, last, 8);
    if (!ra_cache_failure(c, &f)) fprintf(stderr, "%s\n", f.text);
    else fprintf(stderr, "rank %d: %s: %s: %s\n", rank, ra_status_text(s), why->field, why->text);
    for (int i = 0; i < n; i++)
        fprintf(stderr, "  %s\n", ra_event_text(&last[i], last[0].begin_ns, line));
}

static ra_status on_rank(ra_world *world, int rank, void *user) {
    result *r = (result *)user;
    ra_desc d = ra_desc_make(HEADS, KV_HEADS, DIM, RA_F32, RA_MASK_CAUSAL);
    ra_cache_desc cd;
    ra_error why = {0};
    ra_cache *c = NULL;
    ra_tensors t = {0};
    float *rows[2] = { NULL, NULL };
    memset(&cd, 0, sizeof cd);
    d.tokens = CHUNK; d.kv_tokens = r->m->text;
    d.k_dtype = d.v_dtype = RA_F16;
    d.ranks = r->ranks; d.rank = rank; d.error = &why;
    cd.lanes = LANES;                  /* the same for every number of ranks: the same bits */
    ra_status s = ra_cache_create(&c, &d, ra_world_transport(world, rank), &cd);
    if (s) {
        fprintf(stderr, "%s: %s\n", why.field, why.text);
        return s;
    }
    const size_t cache = (size_t)ra_cache_rows(c) * KV_HEADS * DIM * sizeof(uint16_t);
    void *k = malloc(cache), *v = malloc(cache);
    for (int i = 0; i < 2; i++) rows[i] = (float *)malloc(CHUNK * HEADS * DIM * sizeof(float));
    t.k.data = k;
    t.v.data = v;
    s = k && v && rows[0] && rows[1] ? generate(c, r, rank, &t, rows) : RA_E_NOMEM;
    if (s) tell(c, rank, s);
    free(k);
    free(v);
    free(rows[0]);
    free(rows[1]);
    const ra_status end = ra_cache_destroy(c);
    return s ? s : end;
}

int main(int argc, char **argv) {
    static const int32_t ranks[] = { 1, 2, 3, 4, 8 };
    model m;
    float *first = NULL;
    int same = 1;
    m.prompt = argc > 1 ? atoll(argv[1]) : 4096;
    if (m.prompt < 64 || m.prompt > 1000000) {
        fprintf(stderr, "TOKENS must be in 64..1000000\n");
        return 2;
    }
    m.text = m.prompt + DECODED + 4;
    m.q = numbers(m.text * HEADS * DIM, 1);
    m.k = numbers(m.text * KV_HEADS * DIM, 2);
    m.v = numbers(m.text * KV_HEADS * DIM, 3);
    if (!m.q || !m.k || !m.v) return 1;
    printf("one layer, %lld tokens in chunks of %d, then %d decoded; %d query heads, %d KV heads, "
           "dim %d, cache f16\n", (long long)m.prompt, CHUNK, DECODED, HEADS, KV_HEADS, DIM);
    printf("ranks  prefill s  travel   KB/chunk   decode us/token  travel  bytes/token  bits\n");
    for (size_t i = 0; i < sizeof ranks / sizeof *ranks; i++) {
        static const char *const travel[] = { "", "pass-Q", "pass-KV", "merge" };
        const size_t bytes = (size_t)m.text * HEADS * DIM * sizeof(float);
        result r;
        memset(&r, 0, sizeof r);
        r.m = &m;
        r.ranks = ranks[i];
        r.o = (float *)malloc(bytes);
        if (!r.o || ra_world_run(r.ranks, on_rank, &r, NULL)) return 1;
        const int equal = !first || !memcmp(first, r.o, bytes);
        same &= equal;
        printf("%5d  %9.3f  %-7s  %8.1f   %15.1f  %-7s %11lld  %s\n", r.ranks, r.prefill_s,
               ranks[i] == 1 ? "-" : travel[r.prefill.travel],
               (double)(r.prefill.bytes_in + r.prefill.bytes_out) / 1024, r.decode_us,
               ranks[i] == 1 ? "-" : travel[r.decode.travel],
               (long long)(r.decode.bytes_in + r.decode.bytes_out),
               equal ? "equal" : "DIFFERENT");
        if (first) free(r.o);
        else first = r.o;
    }
    free(first);
    free(m.q);
    free(m.k);
    free(m.v);
    return same ? 0 : 1;
}
