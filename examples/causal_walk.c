/* A causal ring of 2 ranks and 4 tokens, step by step. You will see who computes what at each step,
 * what travels, and that rank 1's keys never travel: the plan finds that no other rank may see
 * them. Every number is checked against full attention, and the same pass on two threads gives the
 * same. Then what a plan says about a larger pass. Exits with 1 if anything differs.
 *
 *   cc -O2 -std=c99 -pthread -I. -o causal_walk examples/causal_walk.c -lm && ./causal_walk */
#define RINGATTN_IMPLEMENTATION
#include "ringattn.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { RANKS = 2, TOKENS = 4, SHARD = TOKENS / RANKS, DIM = 2 };

static const float q[TOKENS][DIM] = {{1, 0}, {0, 1}, {1, 2}, {2, 1}};
static const float k[TOKENS][DIM] = {{1, 1}, {0, 2}, {2, 0}, {2, 1}};
static const float v[TOKENS][DIM] = {{1, 0}, {0, 1}, {2, 2}, {4, 8}};

static int wrong;

static void must(ra_status status, const ra_error *error) {
    if (status == RA_OK) return;
    printf("refused: %s, %s %s\n", ra_status_text(status), error->field, error->text);
    exit(1);
}

static void expect(const char *what, double got, double want, double within) {
    if (fabs(got - want) <= within) return;
    printf("WRONG: %s is %.7f, not %.7f\n", what, got, want);
    wrong = 1;
}

/* The whole pass, seen by one rank. */
static void describe(ra_desc *d, int rank, ra_error *error) {
    *d = ra_desc_make(1, 1, DIM, RA_F32, RA_MASK_CAUSAL);
    d->tokens = TOKENS;
    d->layout.kind = RA_LAYOUT_CONTIGUOUS;
    d->rank = rank;
    d->ranks = RANKS;
    d->error = error;
}

/* The plan of a rank; it needs no network. */
static ra_plan_report ask(int rank) {
    ra_error error = {0};
    ra_plan *plan = NULL;
    ra_plan_report report;
    ra_desc d;
    describe(&d, rank, &error);
    must(ra_plan_create(&plan, &d, NULL), &error);
    must(ra_plan_query(plan, rank, &report), &error);
    ra_plan_destroy(plan);
    return report;
}

/* -------------------------------------------------------------------------- the picture
 * seen[q][k]: 0: not computed yet, 1: in an earlier step, 2: in this one. */
static void picture(int seen[TOKENS][TOKENS]) {
    printf("            k0      k1\n");
    for (int i = 0; i < TOKENS; i++) {
        if (i == SHARD) printf("         ---------------\n");
        printf("   %s  ", i % SHARD ? "  " : i ? "q1" : "q0");
        for (int j = 0; j < TOKENS; j++) {
            if (j == SHARD) printf("  |");
            printf("  %c", seen[i][j] == 2 ? '#' : seen[i][j] ? 'o' : j > i ? 'x' : '.');
            if (seen[i][j]) seen[i][j] = 1;
        }
        printf("\n");
    }
}

/* Attention of query i over the first n keys, from the definition. */
static void by_definition(int i, int n, double out[DIM]) {
    double sum = 0;
    out[0] = out[1] = 0;
    for (int j = 0; j < n; j++) {
        double w = 0;
        for (int d = 0; d < DIM; d++) w += (double)q[i][d] * (double)k[j][d];
        w = exp(w / sqrt(DIM));
        sum += w;
        for (int d = 0; d < DIM; d++) out[d] += w * (double)v[j][d];
    }
    for (int d = 0; d < DIM; d++) out[d] /= sum;
}

/* -------------------------------------------------------------------------- the walk
 * One rank folds the keys of one origin into its state: positions decide what each query sees. */
typedef struct rows { float m[SHARD], l[SHARD], acc[SHARD][DIM], o[SHARD][DIM]; } rows;

static void fold(rows *r, int rank, int origin, int seen[TOKENS][TOKENS]) {
    ra_error error = {0};
    ra_desc d;
    ra_tensors t = {0};
    ra_run queries = {0, SHARD, 1}, keys = {0, SHARD, 1};
    ra_state s;
    describe(&d, 0, &error);
    d.ranks = 0;                       /* block mathematics does not depend on ranks */
    d.tokens = d.kv_tokens = SHARD;
    queries.first = rank * SHARD;
    keys.first = origin * SHARD;
    t.q.data = q[rank * SHARD];
    t.k.data = k[origin * SHARD];
    t.v.data = v[origin * SHARD];
    t.q_pos.runs = &queries;
    t.k_pos.runs = &keys;
    t.q_pos.count = t.k_pos.count = 1;
    s.m = r->m;
    s.l = r->l;
    s.acc = r->acc[0];
    size_t bytes = ra_attention_bytes(&d, 1);
    unsigned char *raw = (unsigned char *)malloc(bytes + 64);   /* the workspace, aligned to 64 */
    if (!raw) exit(1);
    if (rank == origin) must(ra_state_clear(&d, &s), &error);
    must(ra_fold(&d, &s, &t, raw + (64 - (uintptr_t)raw % 64) % 64, bytes), &error);
    free(raw);
    for (int i = rank * SHARD; i < (rank + 1) * SHARD; i++)
        for (int j = origin * SHARD; j < (origin + 1) * SHARD; j++)
            if (j <= i) seen[i][j] = 2;
}

/* Compares what the rank has so far with attention over the keys that it has seen. */
static void print_rows(const rows *r, int rank, int whole) {
    for (int i = 0; i < SHARD; i++) {
        double o[DIM], want[DIM];
        int at = rank * SHARD + i;
        for (int d = 0; d < DIM; d++) o[d] = (double)(r->acc[i][d] / r->l[i]);
        printf("     token %d: (%.4f, %.4f)", at, o[0], o[1]);
        if (!whole) printf(" of its own block so far\n");
        if (!whole) continue;
        by_definition(at, at + 1, want);
        printf(", full attention (%.4f, %.4f)\n", want[0], want[1]);
        for (int d = 0; d < DIM; d++) expect("a row", o[d], want[d], 1e-6);
    }
}

static void walk(const ra_plan_report plan[RANKS], rows state[RANKS]) {
    int seen[TOKENS][TOKENS] = {{0}};
    for (int step = 0; step < RANKS; step++) {
        printf("\nStep %d\n", step);
        for (int rank = 0; rank < RANKS; rank++) {
            int origin = (rank + RANKS - step) % RANKS;
            if (step && plan[rank].hops < step) {
                printf("  rank %d: k%d, v%d are not sent here, not computed: all in the future\n",
                       rank, origin, origin);
                continue;
            }
            if (step)
                printf("  rank %d: receives k%d, v%d (%lld bytes on a network)\n", rank, origin,
                       origin, (long long)plan[rank].forward.bytes_in);
            printf("  rank %d: q%d x k%d, %s\n", rank, rank, origin,
                   step ? "full: every query sees every key" : "causal: the lower triangle");
            fold(&state[rank], rank, origin, seen);
            print_rows(&state[rank], rank, step == plan[rank].hops);
        }
        picture(seen);
    }
}

/* -------------------------------------------------------------------------- the same on threads */
typedef struct outcome { ra_ring_counters count; float o[SHARD][DIM]; } outcome;

static ra_status on_rank(ra_world *world, int rank, void *user) {
    outcome *out = (outcome *)user + rank;
    ra_plan *plan = NULL;
    ra_ring *ring = NULL;
    ra_tensors t = {0};
    ra_desc d;
    describe(&d, rank, NULL);
    t.q.data = q[rank * SHARD];
    t.k.data = k[rank * SHARD];
    t.v.data = v[rank * SHARD];
    t.o.data = out->o;
    ra_status status = ra_plan_create(&plan, &d, NULL);
    if (status == RA_OK)
        status = ra_ring_create(&ring, plan, ra_world_transport(world, rank), NULL);
    if (status == RA_OK) status = ra_forward(plan, ring, &t, RA_NO_DEADLINE);
    if (ring) ra_ring_query(ring, &out->count);
    ra_ring_destroy(ring);
    ra_plan_destroy(plan);
    return status;
}

/* What the plan of a larger pass chooses for figures of a network, and how long it would take. */
static void forecast(void) {
    ra_error error = {0};
    ra_plan *plan = NULL;
    ra_prediction p;
    ra_desc d, full;
    describe(&d, 0, &error);
    d.tokens = 65536;
    d.ranks = 8;
    d.layout.kind = RA_LAYOUT_ZIGZAG;
    d.q_heads = 32;
    d.kv_heads = 8;
    d.k_dim = d.v_dim = 128;
    d.rates.flops_per_s = 1e12;        /* of a rank: measure yours */
    d.rates.link_bytes_per_s = 1.25e9;
    d.rates.link_latency_s = 20e-6;
    must(ra_desc_resolve(&d, &full), &error);
    must(ra_plan_create(&plan, &d, NULL), &error);
    must(ra_plan_predict(plan, 0, &d.rates, &p), &error);
    printf("\n%lld tokens, 32/8 heads of 128, on 8 ranks, zigzag: chunks of %d tokens, %d buffers. "
           "At 1 TFLOP/s\nand 1.25 GB/s a pass takes %.2f s: computing %.2f, transfer %.2f, of "
           "which %.0f %% is hidden.\n", (long long)full.tokens, full.chunk_tokens, full.buffers,
           p.all_done_s, p.compute_s, p.transfer_s, 100 * p.hidden_s / p.transfer_s);
    ra_plan_destroy(plan);
}

static void run(const ra_plan_report plan[RANKS], const rows state[RANKS]) {
    ra_error none = {0};
    outcome out[RANKS];
    must(ra_world_run(RANKS, on_rank, out, NULL), &none);
    printf("\nThe same pass on %d threads\n", RANKS);
    for (int rank = 0; rank < RANKS; rank++) {
        const ra_ring_counters *c = &out[rank].count;
        printf("  rank %d: %lld chunk in, %lld out; planned %lld in, %lld out; hops %lld, skipped "
               "%lld\n", rank, (long long)c->chunks_in, (long long)c->chunks_out,
               (long long)plan[rank].forward.chunks_in, (long long)plan[rank].forward.chunks_out,
               (long long)plan[rank].hops, (long long)plan[rank].hops_skipped);
        expect("chunks in", (double)c->chunks_in, (double)plan[rank].forward.chunks_in, 0);
        expect("chunks out", (double)c->chunks_out, (double)plan[rank].forward.chunks_out, 0);
        for (int i = 0; i < SHARD; i++)
            for (int d = 0; d < DIM; d++)
                expect("a number of the ring", (double)out[rank].o[i][d],
                       (double)(state[rank].acc[i][d] / state[rank].l[i]), 1e-6);
    }
}

int main(void) {
    rows state[RANKS];
    ra_plan_report plan[RANKS];
    printf("2 ranks, 4 tokens, causal: rank 0 holds tokens 0, 1 (q0, k0, v0), rank 1 tokens 2, 3.\n"
           "# computed in this step, o before, . still to come, x masked\n");
    for (int rank = 0; rank < RANKS; rank++) plan[rank] = ask(rank);
    walk(plan, state);
    run(plan, state);
    forecast();
    for (int rank = 0; rank < RANKS; rank++) {
        expect("hops", (double)plan[rank].hops, rank, 0);
        expect("hops skipped", (double)plan[rank].hops_skipped, RANKS - 1 - rank, 0);
    }
    printf("\n%s\n", wrong ? "SOMETHING ABOVE IS WRONG" :
           "All equals full causal attention; 1 of 2 transfers and 1 of 4 blocks were left out.");
    return wrong;
}
