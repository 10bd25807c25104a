/* Exact causal attention over 4,096 tokens on 4 ranks, each a thread that holds a quarter of them.
 * You will see the first numbers of every rank's output.
 *
 *   cc -O2 -std=c99 -pthread -I. -o minimal examples/minimal.c -lm && ./minimal */
#define RINGATTN_IMPLEMENTATION
#include "ringattn.h"

#include <stdio.h>
#include <stdlib.h>

static ra_status on_rank(ra_world *world, int rank, void *user) {  /* on its own thread */
    ra_error why = {0};
    ra_desc d = {0};
    d.tokens = 4096; d.q_heads = 8; d.kv_heads = 2; d.k_dim = d.v_dim = 64;
    d.q_dtype = d.k_dtype = d.v_dtype = d.o_dtype = RA_F32;
    d.mask.kind = RA_MASK_CAUSAL;
    d.layout.kind = RA_LAYOUT_ZIGZAG;  /* rank r has the r-th eighth and the r-th from the back */
    d.rank = rank; d.ranks = 4;
    d.error = &why;

    size_t rows = 1024, q_row = 8 * 64, kv_row = 2 * 64;           /* of this rank */
    float *q = (float *)malloc(rows * (2 * q_row + 2 * kv_row) * sizeof *q);
    if (!q) return RA_E_NOMEM;
    float *k = q + rows * q_row, *v = k + rows * kv_row, *o = v + rows * kv_row;
    for (size_t i = 0; i < rows * (q_row + 2 * kv_row); i++)       /* your model does this */
        q[i] = (float)((i * 2654435761u + (size_t)rank * 97) % 2001) / 1000 - 1;

    ra_tensors t = {0};
    t.q.data = q; t.k.data = k; t.v.data = v; t.o.data = o;        /* packed: strides stay 0 */
    ra_status status = ra_attend(&d, ra_world_transport(world, rank), &t, RA_NO_DEADLINE);
    if (status != RA_OK)
        fprintf(stderr, "rank %d: %s %s\n", rank, ra_status_text(status), why.text);
    else printf("rank %d: o[0] = %8.5f %8.5f %8.5f ...\n", rank, (double)o[0], (double)o[1],
                (double)o[2]);
    free(q);
    (void)user;
    return status;
}

int main(void) { return ra_world_run(4, on_rank, NULL, NULL) != RA_OK; }
