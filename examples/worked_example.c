/* Ring attention by hand: 4 ranks, 8 tokens of 2 dimensions, every number of every round.
 * You will see the keys and values travel around the ring, each rank fold them into its running
 * (m, l, acc), and the result equal attention over all 8 tokens. Exits with 1 if it does not.
 *
 *   cc -O2 -std=c99 -pthread -I. -o worked examples/worked_example.c -lm && ./worked */
#define RINGATTN_IMPLEMENTATION
#include "ringattn.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { RANKS = 4, TOKENS = 8, SHARD = TOKENS / RANKS, DIM = 2 };

/* The embeddings. Projections are the identity, so a row is query, key and value at once. */
static const float token[TOKENS][DIM] = {{1, 0}, {0, 1}, {1, 1}, {1, 2},
                                         {2, 1}, {2, 2}, {3, 1}, {3, 3}};

/* One online softmax per row: m is the largest score so far (here times log2(e), because the
 * library works in powers of two), l the sum of exp(score - m), acc the sum of exp(score - m) V. */
typedef struct rows {
    float m[SHARD], l[SHARD], acc[SHARD][DIM];
    float o[SHARD][DIM], lse[SHARD];
} rows;

static const double ln2 = 0.69314718055994531;
static int wrong;

/* Every claim that this program prints is checked here. */
static void expect(const char *what, double got, double want) {
    if (fabs(got - want) <= 1e-5) return;
    printf("WRONG: %s is %.7f, not %.7f\n", what, got, want);
    wrong = 1;
}

static double scaled_score(int q, int k) {
    double dot = 0;
    for (int d = 0; d < DIM; d++) dot += (double)token[q][d] * (double)token[k][d];
    return dot / sqrt(DIM);
}

/* The same figures straight from their definition, over keys [first, first + count). */
static void by_definition(int q, int first, int count, double *m, double *l, double acc[DIM]) {
    *m = scaled_score(q, first);
    *l = acc[0] = acc[1] = 0;
    for (int k = first; k < first + count; k++) *m = fmax(*m, scaled_score(q, k));
    for (int k = first; k < first + count; k++) {
        double w = exp(scaled_score(q, k) - *m);
        *l += w;
        for (int d = 0; d < DIM; d++) acc[d] += w * (double)token[k][d];
    }
}

static void must(ra_status status, const ra_error *error) {
    if (status == RA_OK) return;
    printf("refused: %s, %s %s\n", ra_status_text(status), error->field, error->text);
    exit(1);
}

/* Describes what a rank does in a round: its 2 queries over 2 keys. */
static void describe(ra_desc *d, ra_error *error) {
    *d = ra_desc_make(1, 1, DIM, RA_F32, RA_MASK_NONE);
    d->tokens = SHARD;
    d->scale = 0;                      /* 0 is 1/sqrt(DIM) = 0.7071 */
    d->error = error;
}

static ra_state state_of(rows *r) {
    ra_state s;
    s.m = r->m;
    s.l = r->l;
    s.acc = r->acc[0];
    return s;
}

/* One rank, one round: prints scores and weights, folds, prints the state before and after. */
static void fold(rows *r, int rank, int origin, int round) {
    ra_error error = {0};
    ra_desc d;
    ra_tensors t = {0};
    describe(&d, &error);
    t.q.data = token[rank * SHARD];
    t.k.data = t.v.data = token[origin * SHARD];
    size_t bytes = ra_attention_bytes(&d, 1);
    unsigned char *raw = (unsigned char *)malloc(bytes + 64);   /* the workspace, aligned to 64 */
    if (!raw) exit(1);
    rows before = *r;
    ra_state state = state_of(r);
    must(ra_fold(&d, &state, &t, raw + (64 - (uintptr_t)raw % 64) % 64, bytes), &error);
    free(raw);
    printf("  rank %d: queries %d, %d against keys %d, %d of rank %d\n", rank, rank * SHARD,
           rank * SHARD + 1, origin * SHARD, origin * SHARD + 1, origin);
    for (int i = 0; i < SHARD; i++) {
        int q = rank * SHARD + i, k = origin * SHARD;
        double m = (double)r->m[i] * ln2;
        printf("    q%d  scaled scores %.3f %.3f", q, scaled_score(q, k), scaled_score(q, k + 1));
        printf("   exp(score - m) %.3f %.3f", exp(scaled_score(q, k) - m),
               exp(scaled_score(q, k + 1) - m));
        if (round) printf("   old sums x %.3f", exp((double)before.m[i] * ln2 - m));
        printf("\n        m %.3f   l %.3f   acc (%.3f, %.3f)   acc / l (%.3f, %.3f)\n", m,
               (double)r->l[i], (double)r->acc[i][0], (double)r->acc[i][1],
               (double)(r->acc[i][0] / r->l[i]), (double)(r->acc[i][1] / r->l[i]));
    }
}

/* After round n a rank has seen the keys of n + 1 ranks, in any order. l and acc are those of all
 * these keys at once, for whatever m the library has. */
static void check_round(const rows *r, int rank, int round) {
    for (int i = 0; i < SHARD; i++) {
        double sum = 0, out[DIM] = {0, 0};
        for (int n = 0; n <= round; n++) {
            double m, l, acc[DIM];
            by_definition(rank * SHARD + i, (rank + RANKS - n) % RANKS * SHARD, SHARD, &m, &l, acc);
            sum += l * exp(m);
            for (int d = 0; d < DIM; d++) out[d] += acc[d] * exp(m);
        }
        double unit = exp((double)r->m[i] * ln2);
        expect("l exp(m) / the sum of exp(score)", (double)r->l[i] * unit / sum, 1);
        for (int d = 0; d < DIM; d++)
            expect("acc / l", (double)(r->acc[i][d] / r->l[i]), out[d] / sum);
    }
}

/* Divides once, at the end. */
static void finish(rows *r) {
    ra_error error = {0};
    ra_desc d;
    ra_tensors t = {0};
    describe(&d, &error);
    ra_state state = state_of(r);
    t.o.data = r->o;
    t.lse.data = r->lse;
    must(ra_state_finish(&d, &state, &t), &error);
}

/* Another way to the same result: normalised partial results are merged by their LSE. */
static void check_merge(const rows *r, int rank) {
    for (int i = 0; i < SHARD; i++) {
        float o[DIM] = {0, 0}, lse = -HUGE_VALF;               /* the neutral element */
        for (int n = 0; n < RANKS; n++) {
            double m, l, acc[DIM];
            by_definition(rank * SHARD + i, (rank + RANKS - n) % RANKS * SHARD, SHARD, &m, &l, acc);
            float part[DIM] = {(float)(acc[0] / l), (float)(acc[1] / l)};
            float part_lse = (float)(m + log(l));
            ra_merge(o, &lse, part, &part_lse, 1, DIM);
        }
        for (int d = 0; d < DIM; d++)
            expect("merged partial results", (double)o[d], (double)r->o[i][d]);
        expect("merged LSE", (double)lse, (double)r->lse[i]);
    }
}

static void print_result(const rows *all) {
    printf("After round 3: acc / l, beside attention over all 8 tokens at once\n");
    for (int q = 0; q < TOKENS; q++) {
        const rows *r = &all[q / SHARD];
        double m, l, acc[DIM];
        by_definition(q, 0, TOKENS, &m, &l, acc);
        printf("  token %d  ring (%.6f, %.6f)  LSE %.6f   all at once (%.6f, %.6f)  LSE %.6f\n", q,
               (double)r->o[q % SHARD][0], (double)r->o[q % SHARD][1], (double)r->lse[q % SHARD],
               acc[0] / l, acc[1] / l, m + log(l));
        for (int d = 0; d < DIM; d++) expect("output", (double)r->o[q % SHARD][d], acc[d] / l);
        expect("LSE", (double)r->lse[q % SHARD], m + log(l));
    }
}

int main(void) {
    static rows all[RANKS];
    printf("4 ranks, 8 tokens, 2 dimensions, no mask. Query = key = value = embedding:\n");
    for (int r = 0; r < RANKS; r++)
        printf("  rank %d holds token %d (%g, %g) and token %d (%g, %g)\n", r, 2 * r,
               (double)token[2 * r][0], (double)token[2 * r][1], 2 * r + 1,
               (double)token[2 * r + 1][0], (double)token[2 * r + 1][1]);
    for (int r = 0; r < RANKS; r++) {
        ra_error error = {0};
        ra_desc d;
        describe(&d, &error);
        ra_state state = state_of(&all[r]);
        must(ra_state_clear(&d, &state), &error);              /* m -inf, l 0, acc 0 */
    }
    for (int round = 0; round < RANKS; round++) {
        printf("\nRound %d: %s\n", round, round ? "each rank has the keys its left neighbour had" :
               "each rank has its own keys");
        for (int r = 0; r < RANKS; r++) {
            fold(&all[r], r, (r + RANKS - round) % RANKS, round);
            check_round(&all[r], r, round);
        }
        if (round + 1 < RANKS)
            printf("  then rank r sends the keys and values it has to rank (r + 1) mod 4\n");
    }
    printf("\n");
    for (int r = 0; r < RANKS; r++) {
        finish(&all[r]);
        check_merge(&all[r], r);
    }
    print_result(all);
    printf("\nA common mistake is to scale the scores but take softmax of the unscaled, and to\n"
           "add up the outputs of the rounds: each is normalised by its own sum, so the weights\n"
           "of a row add up to 4; what may be added is l and acc in units of one m, or outputs\n"
           "weighted by their LSE.\n%s\n", wrong ? "SOMETHING ABOVE IS WRONG" :
           "All of the above agrees with full attention.");
    return wrong;
}
