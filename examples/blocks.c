/* Block mathematics, for programs that move keys themselves: the keys in two halves, each folded
 * into a state of its own, and the states merged; then the gradients half by half. You will see
 * that o, LSE and gradients are those of one call over all keys. Exits with 1 if not.
 *
 *   cc -O2 -std=c99 -pthread -I. -o blocks examples/blocks.c -lm && ./blocks */
#define RINGATTN_IMPLEMENTATION
#include "ringattn.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { TOKENS = 200, HALF = TOKENS / 2, HEADS = 4, KV_HEADS = 2, DIM = 32,
       Q = TOKENS * HEADS * DIM, K = TOKENS * KV_HEADS * DIM };

static float q[Q], k[K], v[K], d_o[Q];
static float o[Q], lse[TOKENS * HEADS], d_q[Q], d_k[K], d_v[K];        /* from halves */
static float whole_o[Q], whole_lse[TOKENS * HEADS], whole_q[Q], whole_k[K], whole_v[K];
static ra_error why;

static void must(ra_status s) {
    if (s == RA_OK) return;
    printf("%s: %s %s\n", ra_status_text(s), why.field, why.text);
    exit(1);
}

static void fill(float *x, int n, uint32_t seed) {
    for (int i = 0; i < n; i++) {
        seed = seed * 1664525u + 1013904223u;
        x[i] = (float)(seed >> 8) / 8388608 - 1;
    }
}

/* All queries and the keys of a half, which tells its positions. */
static void half_of(int half, ra_desc *d, ra_tensors *t, ra_run *run) {
    d->kv_tokens = HALF;
    run->first = half * HALF;
    run->count = HALF;
    run->stride = 1;
    t->k.data = k + half * (K / 2);
    t->v.data = v + half * (K / 2);
    t->k_pos.runs = run;
    t->k_pos.count = 1;
}

static void forward(ra_desc d, ra_tensors t) {
    static float memory[2][TOKENS * HEADS * (2 + DIM)];
    ra_state s[2];
    ra_run run;
    for (int half = 0; half < 2; half++) {             /* these could be two threads or machines */
        s[half].m = memory[half];
        s[half].l = s[half].m + TOKENS * HEADS;
        s[half].acc = s[half].l + TOKENS * HEADS;
        half_of(half, &d, &t, &run);
        must(ra_state_clear(&d, &s[half]));
        must(ra_fold(&d, &s[half], &t, NULL, 0));
    }
    must(ra_state_merge(&d, &s[0], &s[1]));            /* one after the other into s[0] would do */
    must(ra_state_finish(&d, &s[0], &t));
}

/* After forward, whose o and lse it needs: they are of all keys. */
static void backward(ra_desc d, ra_tensors t) {
    static float delta[TOKENS * HEADS];
    const size_t bytes = ra_attention_backward_bytes(&d, 1);
    void *workspace = malloc(bytes);
    ra_run run;
    if (!workspace) exit(1);
    must(ra_delta(&d, &t, delta));
    for (int half = 0; half < 2; half++) {             /* added to: d_q gets both halves' parts */
        const ra_grads sums = { d_q, d_k + half * (K / 2), d_v + half * (K / 2) };
        half_of(half, &d, &t, &run);
        must(ra_fold_backward(&d, &t, delta, &sums, workspace, bytes));
    }
    free(workspace);
}

static void at_once(ra_desc d, ra_tensors t) {
    const size_t bytes = ra_attention_backward_bytes(&d, 1);
    void *workspace = malloc(bytes);
    if (!workspace) exit(1);
    t.o.data = whole_o;
    t.lse.data = whole_lse;
    t.d_q.data = whole_q;
    t.d_k.data = whole_k;
    t.d_v.data = whole_v;
    must(ra_attention(&d, &t, NULL, 0, 0, 1));
    must(ra_attention_backward(&d, &t, workspace, bytes, 0, 1));
    free(workspace);
}

static int compared(const char *what, const float *a, const float *b, int n) {
    double far = 0;
    for (int i = 0; i < n; i++) far = fmax(far, fabs((double)a[i] - (double)b[i]));
    printf("%-4s largest difference %.1e\n", what, far);
    return !(far < 1e-5);
}

int main(void) {
    ra_desc d = ra_desc_make(HEADS, KV_HEADS, DIM, RA_F32, RA_MASK_CAUSAL);
    ra_tensors t = {0};
    const int32_t version = ra_version();
    printf("ringattn %d.%d.%d, instruction sets here:", version >> 16, version >> 8 & 255,
           version & 255);
    for (int32_t isa = RA_ISA_SCALAR; isa <= RA_ISA_NEON; isa++)       /* d.isa takes any of them */
        if (ra_isa_available(isa)) printf(" %s", ra_isa_name(isa));
    printf("\n%d tokens, %d query heads, %d KV heads of %d, causal; keys in two halves\n", TOKENS,
           HEADS, KV_HEADS, DIM);
    fill(q, Q, 1);
    fill(k, K, 2);
    fill(v, K, 3);
    fill(d_o, Q, 4);
    d.tokens = TOKENS;
    d.train = 1;
    d.error = &why;
    t.q.data = q; t.k.data = k; t.v.data = v; t.d_o.data = d_o;
    t.o.data = o; t.lse.data = lse;
    forward(d, t);
    backward(d, t);
    at_once(d, t);
    int wrong = compared("o", o, whole_o, Q);
    wrong |= compared("lse", lse, whole_lse, TOKENS * HEADS);
    wrong |= compared("d_q", d_q, whole_q, Q);
    wrong |= compared("d_k", d_k, whole_k, K);
    return wrong | compared("d_v", d_v, whole_v, K);
}
