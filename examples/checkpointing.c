/* Activation checkpointing: backward needs the output and the log-sum-exp of every layer. They can
 * be kept, or computed again by one more forward pass when backward reaches the layer. You will see
 * how much memory each choice takes, and that all gradients have the same bits.
 *
 *   cc -O2 -std=c99 -pthread -I. -o checkpoint examples/checkpointing.c -lm && ./checkpoint */
#define RINGATTN_IMPLEMENTATION
#include "ringattn.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LAYERS = 6, TOKENS = 1024, HEADS = 4, DIM = 32, N = TOKENS * HEADS * DIM };

/* A layer adds causal self-attention of its input to it: x[i + 1] = x[i] + attention(x[i]). */
static float x[LAYERS + 1][N], o[LAYERS][N], lse[LAYERS][TOKENS * HEADS];
static float d_x[2][N], d_q[N], d_k[N], d_v[N];
static void *workspace;

static ra_desc layer(void) {
    ra_desc d = ra_desc_make(HEADS, HEADS, DIM, RA_F32, RA_MASK_CAUSAL);
    d.train = 1;
    d.tokens = TOKENS;
    return d;
}

/* Computes o and lse of layer i into slot `at`. */
static ra_status forward(int i, int at) {
    const ra_desc d = layer();
    ra_tensors t = {0};
    t.q.data = t.k.data = t.v.data = x[i];
    t.o.data = o[at]; t.lse.data = lse[at];
    return ra_attention(&d, &t, workspace, ra_attention_bytes(&d, 1), 0, 1);
}

/* Turns the gradient g of layer i's output into that of its input, which is added to the output and
 * is also query, key and value. */
static ra_status backward(int i, int at, float *g) {
    const ra_desc d = layer();
    ra_tensors t = {0};
    memset(d_q, 0, sizeof d_q); memset(d_k, 0, sizeof d_k); memset(d_v, 0, sizeof d_v);
    t.q.data = t.k.data = t.v.data = x[i];
    t.o.data = o[at]; t.lse.data = lse[at]; t.d_o.data = g;
    t.d_q.data = d_q; t.d_k.data = d_k; t.d_v.data = d_v;
    const size_t bytes = ra_attention_backward_bytes(&d, 1);
    ra_status s = ra_attention_backward(&d, &t, workspace, bytes, 0, 1);
    for (int j = 0; j < N; j++) g[j] += d_q[j] + d_k[j] + d_v[j];
    return s;
}

/* Runs all layers. keep: 1: every o and lse has its own slot, 0: they share one. */
static ra_status train(int keep, float *g) {
    ra_status s = RA_OK;
    for (int i = 0; i < LAYERS && !s; i++) {
        s = forward(i, keep ? i : 0);
        for (int j = 0; j < N; j++) x[i + 1][j] = x[i][j] + o[keep ? i : 0][j];
    }
    for (int j = 0; j < N; j++) g[j] = x[LAYERS][j] / N;   /* the loss is the mean of x^2 / 2 */
    for (int i = LAYERS - 1; i >= 0 && !s; i--) {
        if (!keep) s = forward(i, 0);
        if (!s) s = backward(i, keep ? i : 0, g);
    }
    return s;
}

int main(void) {
    const ra_desc d = layer();
    const double mib = 1024 * 1024, slot = sizeof o[0] + sizeof lse[0];
    size_t bytes = ra_attention_backward_bytes(&d, 1), more = ra_attention_bytes(&d, 1);
    void *memory = malloc((bytes > more ? bytes : more) + 64);
    if (!memory) return 1;
    workspace = (void *)(((uintptr_t)memory + 63) & ~(uintptr_t)63);
    for (int j = 0; j < N; j++) x[0][j] = (float)(((uint32_t)j * 2654435761u) >> 8) / 8388608 - 1;

    ra_status s = train(1, d_x[0]);
    if (!s) s = train(0, d_x[1]);
    free(memory);
    if (s) { fprintf(stderr, "%s\n", ra_status_text(s)); return 1; }
    int same = memcmp(d_x[0], d_x[1], sizeof d_x[0]) == 0;
    printf("%d layers of %d tokens, inputs %.1f MiB\n", LAYERS, TOKENS, sizeof x / mib);
    printf("outputs kept:           %5.1f MiB more\n", LAYERS * slot / mib);
    printf("outputs computed again: %5.1f MiB more, %d more forward passes\n", slot / mib, LAYERS);
    printf("first gradients %.6f %.6f %.6f ..., the same bits: %s\n", (double)d_x[0][0],
           (double)d_x[0][1], (double)d_x[0][2], same ? "yes" : "NO");
    return !same;
}
