/* Exact causal attention over 4,096 tokens on 4 ranks, each a thread that holds a quarter of them.
 * You will see the first numbers of every rank's output.
 *
 *   cc -O2 -std=c99 -pthread -I. -o minimal examples/minimal.c -lm && ./minimal */
#define RINGATTN_IMPLEMENTATION
#include "ringattn.h"

#include <stdio.h>

static float q[4][1024][8][64], k[4][1024][2][64], v[4][1024][2][64], o[4][1024][8][64];

static void fill(float *x, size_t n, uint32_t seed) {          /* your model does this */
    for (size_t i = 0; i < n; i++) {
        seed = seed * 1664525u + 1013904223u;
        x[i] = (float)(seed >> 8) / 8388608 - 1;
    }
}

static ra_status on_rank(ra_world *world, int rank, void *user) {   /* on the rank's thread */
    ra_error why = {0};
    ra_desc d = ra_desc_make(8, 2, 64, RA_F32, RA_MASK_CAUSAL);    /* 8 query heads, 2 KV heads */
    ra_tensors t = {0};
    d.tokens = 4096; d.rank = rank; d.ranks = 4;
    d.layout.kind = RA_LAYOUT_ZIGZAG;  /* rank r has the r-th eighth and the r-th from the back */
    d.error = &why;
    t.q.data = q[rank]; t.k.data = k[rank]; t.v.data = v[rank]; t.o.data = o[rank];
    (void)user;

    fill(&q[rank][0][0][0], sizeof q[rank] / sizeof(float), 3 * (uint32_t)rank);
    fill(&k[rank][0][0][0], sizeof k[rank] / sizeof(float), 3 * (uint32_t)rank + 1);
    fill(&v[rank][0][0][0], sizeof v[rank] / sizeof(float), 3 * (uint32_t)rank + 2);
    ra_status status = ra_ring_once(&d, ra_world_transport(world, rank), &t, RA_NO_DEADLINE);
    if (status != RA_OK)
        fprintf(stderr, "rank %d: %s: %s %s\n", rank, ra_status_text(status), why.field, why.text);
    return status;
}

int main(void) {
    if (ra_world_run(4, on_rank, NULL, NULL) != RA_OK) return 1;
    for (int rank = 0; rank < 4; rank++)
        printf("rank %d: o[0][0] = %8.5f %8.5f %8.5f ...\n", rank, (double)o[rank][0][0][0],
               (double)o[rank][0][0][1], (double)o[rank][0][0][2]);
    return 0;
}
