/* The language matrix, tests/matrix.sh, compiles this file with every compiler, dialect and level
 * of optimisation, and runs it. Three ranks attend over 450 tokens: once causal in zigzag layout,
 * once with the caller's own intervals, one of which is empty. A plain loop checks the results.
 * The LSE of the empty row must be -inf. It is tested by its bits, because with -ffast-math isinf()
 * is always 0.
 *
 * Macros from outside:
 *   LANG_HEADER         how the header is included, "ringattn.h" if not given
 *   LANG_FIRST          include the header before anything else
 *   LANG_TWICE          include it once as a user, then twice as the implementer
 *   LANG_ELSEWHERE      lang_impl.c has the implementation
 *   LANG_STATIC_TWO     lang_impl.c has a second, static, copy of the library: call that too
 *   RINGATTN_NO_THREADS, _NO_RINGS
 *                       no world: the three shards are folded and merged on this thread */
#ifndef LANG_HEADER
#define LANG_HEADER "ringattn.h"
#endif
#ifdef LANG_TWICE
#include LANG_HEADER
#endif
#ifndef LANG_FIRST
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#endif
#ifndef LANG_ELSEWHERE
#define RINGATTN_IMPLEMENTATION
#endif
#include LANG_HEADER
#ifdef LANG_TWICE
#include LANG_HEADER
#endif
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#ifdef LANG_STATIC_TWO
#include "lang_impl.h"
#endif

#define RANKS  3
#define TOKENS 450
#define HQ     2
#define HKV    1
#define DIM    16
#define EMPTY  77                      /* the row whose interval is empty */

typedef struct problem {
    float q[TOKENS * HQ * DIM], k[TOKENS * HKV * DIM], v[TOKENS * HKV * DIM];
    float o[TOKENS * HQ * DIM], lse[TOKENS * HQ];
    int32_t lo[TOKENS], hi[TOKENS];
    ra_desc desc;
    ra_status status[RANKS];
} problem;

/* The problem lives outside main: a few hundred KiB are too much for some stacks. */
static problem lang_problem;

static uint32_t lang_bits(float x) {
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

/* By the bits of the exponent: with -ffast-math a comparison may overlook a NaN. */
static int lang_not_finite(float x) {
    return (lang_bits(x) & 0x7f800000u) == 0x7f800000u;
}

/* Numbers in [-1, 1) from a linear congruential generator. */
static void lang_fill(float *x, int n, uint32_t seed) {
    int i;
    for (i = 0; i < n; i++) {
        seed = seed * 1664525u + 1013904223u;
        x[i] = (float)(int32_t)(seed >> 8) / 8388608.0f - 1.0f;
    }
}

static void lang_set_up(problem *p, int intervals) {
    int i;
    memset(p, 0, sizeof *p);
    lang_fill(p->q, TOKENS * HQ * DIM, 1);
    lang_fill(p->k, TOKENS * HKV * DIM, 2);
    lang_fill(p->v, TOKENS * HKV * DIM, 3);
    for (i = 0; i < TOKENS; i++) {
        p->lo[i] = i > 100 ? i - 100 : 0;
        p->hi[i] = i == EMPTY ? p->lo[i] : i + 1;
    }
    p->desc.ranks = RANKS;
    p->desc.q_heads = HQ;
    p->desc.kv_heads = HKV;
    p->desc.k_dim = p->desc.v_dim = DIM;
    p->desc.q_dtype = p->desc.k_dtype = p->desc.v_dtype = p->desc.o_dtype = RA_F32;
    p->desc.tokens = TOKENS;
    p->desc.mask.kind = intervals ? RA_MASK_INTERVALS : RA_MASK_CAUSAL;
    p->desc.layout.kind = intervals ? RA_LAYOUT_CONTIGUOUS : RA_LAYOUT_ZIGZAG;
    if (intervals) {
        p->desc.mask.lo = p->lo;
        p->desc.mask.hi = p->hi;
        p->desc.mask.interval_count = TOKENS;
    }
}

/* o[DIM] of one query and head in double precision. Returns the LSE; *ok is 0 for an empty row. */
static double lang_row(const problem *p, int row, int head, double *o, int *ok) {
    const int causal = p->desc.mask.kind == RA_MASK_CAUSAL;
    const int lo = causal ? 0 : p->lo[row], hi = causal ? row + 1 : p->hi[row];
    double sum = 0, s, w;
    int j, d;
    for (d = 0; d < DIM; d++) o[d] = 0;
    *ok = hi > lo;
    for (j = lo; j < hi; j++) {
        for (s = 0, d = 0; d < DIM; d++)
            s += (double)p->q[(row * HQ + head) * DIM + d] * (double)p->k[j * DIM + d];
        w = exp(s / sqrt((double)DIM));
        sum += w;
        for (d = 0; d < DIM; d++) o[d] += w * (double)p->v[j * DIM + d];
    }
    for (d = 0; d < DIM; d++) o[d] = *ok ? o[d] / sum : 0;
    return *ok ? log(sum) : 0;
}

static int lang_check(const problem *p, const char *what) {
    double o[DIM], lse, worst = 0, e;
    int row, head, d, ok, bad = 0;
    for (row = 0; row < TOKENS; row++)
        for (head = 0; head < HQ; head++) {
            const int at = row * HQ + head;
            lse = lang_row(p, row, head, o, &ok);
            for (d = 0; d < DIM; d++) {
                e = fabs((double)p->o[at * DIM + d] - o[d]);
                if (e > 2e-6 || lang_not_finite(p->o[at * DIM + d])) bad++;
                if (e > worst) worst = e;
            }
            e = fabs((double)p->lse[at] - lse);
            if (ok && (e > 4e-6 || lang_not_finite(p->lse[at]))) bad++;
            if (!ok && lang_bits(p->lse[at]) != 0xff800000u) bad++;
            if (!ok && lang_bits(p->o[at * DIM]) != 0) bad++;
        }
    printf("%s: largest difference %.2g, %d wrong\n", what, worst, bad);
    return bad != 0;
}

#if !defined(RINGATTN_NO_THREADS) && !defined(RINGATTN_NO_RINGS)

/* Copies the rows of a rank between the whole tensor and the packed one, `width` floats per row. */
static void lang_rows(float *whole, float *mine, const ra_run *runs, int n, int width, int gather) {
    int i;
    int64_t j;
    for (i = 0; i < n; i++)
        for (j = 0; j < runs[i].count; j++, mine += width) {
            const int64_t stride = runs[i].stride ? runs[i].stride : 1;
            float *row = whole + (runs[i].first + j * stride) * width;
            memcpy(gather ? mine : row, gather ? row : mine, (size_t)width * sizeof *mine);
        }
}

/* What one rank does: takes its rows from the whole, makes one pass, puts its results back. */
static ra_status lang_pass(problem *p, const ra_plan *plan, ra_ring *ring, int rank) {
    const size_t floats = (size_t)TOKENS * DIM;
    const size_t all = floats * (2 * HQ + 2 * HKV) + (size_t)TOKENS * HQ;
    float *memory = (float *)calloc(all, sizeof(float));
    float *q = memory, *k = q + floats * HQ, *v = k + floats * HKV, *o = v + floats * HKV;
    float *lse = o + floats * HQ;
    ra_run runs[8];
    ra_tensors t;
    ra_status status = RA_E_NOMEM;
    const int n = (int)ra_plan_q_runs(plan, rank, 0, runs, 8);
    if (memory && n >= 0 && n <= 8) {
        memset(&t, 0, sizeof t);
        lang_rows(p->q, q, runs, n, HQ * DIM, 1);
        lang_rows(p->k, k, runs, n, HKV * DIM, 1);
        lang_rows(p->v, v, runs, n, HKV * DIM, 1);
        t.q.data = q;
        t.k.data = k;
        t.v.data = v;
        t.o.data = o;
        t.lse.data = lse;
        status = ra_forward(plan, ring, &t, ra_deadline_ms(60000));
        lang_rows(p->o, o, runs, n, HQ * DIM, 0);
        lang_rows(p->lse, lse, runs, n, HQ, 0);
    }
    free(memory);
    return status;
}

static ra_status lang_rank(ra_world *world, int rank, void *user) {
    problem *p = (problem *)user;
    ra_desc d = p->desc;
    ra_plan *plan = NULL;
    ra_ring *ring = NULL;
    ra_status status;
    d.rank = rank;
    status = ra_plan_create(&plan, &d, NULL);
    if (status == RA_OK)
        status = ra_ring_create(&ring, plan, ra_world_transport(world, rank), NULL);
    if (status == RA_OK) status = lang_pass(p, plan, ring, rank);
    ra_ring_destroy(ring);
    ra_plan_destroy(plan);
    p->status[rank] = status;
    return status;
}

static ra_status lang_solve(problem *p) {
    return ra_world_run(RANKS, lang_rank, p, NULL);
}

#else

#ifndef RINGATTN_NO_RINGS
static ra_status lang_no_rank(ra_world *world, int rank, void *user) {
    (void)world;
    (void)rank;
    (void)user;
    return RA_OK;
}
#endif

/* Folds thirds of the keys into three states, and merges these. */
static ra_status lang_solve(problem *p) {
    const int third = TOKENS / RANKS;
    const size_t rows = (size_t)TOKENS * HQ;
    float *memory = (float *)malloc((size_t)RANKS * rows * (2 + DIM) * sizeof(float));
    ra_state state[RANKS];
    ra_desc d = p->desc;
    ra_tensors t;
    ra_run keys;
    void *workspace;
    size_t bytes;
    ra_status status = RA_OK;
    int r;
#ifndef RINGATTN_NO_RINGS
    if (ra_world_run(RANKS, lang_no_rank, NULL, NULL) != RA_E_UNSUPPORTED) return RA_E_UNSUPPORTED;
#endif
    d.ranks = 0;
    d.kv_tokens = third;
    memset(&t, 0, sizeof t);
    t.q.data = p->q;
    t.o.data = p->o;
    t.lse.data = p->lse;
    bytes = ra_attention_bytes(&d, 1);
    workspace = malloc(bytes + 64);
    if (!memory || !workspace || !bytes) status = RA_E_NOMEM;
    for (r = 0; r < RANKS && status == RA_OK; r++) {
        state[r].m = memory + (size_t)r * rows * (2 + DIM);
        state[r].l = state[r].m + rows;
        state[r].acc = state[r].l + rows;
        keys.first = r * third;
        keys.count = third;
        keys.stride = 1;
        t.k.data = p->k + r * third * HKV * DIM;
        t.v.data = p->v + r * third * HKV * DIM;
        t.k_pos.runs = &keys;
        t.k_pos.count = 1;
        status = ra_state_clear(&d, &state[r]);
        if (status == RA_OK)
            status = ra_fold(&d, &state[r], &t,
                             (void *)(((uintptr_t)workspace + 63) & ~(uintptr_t)63), bytes);
        if (status == RA_OK && r > 0) status = ra_state_merge(&d, &state[0], &state[r]);
    }
    if (status == RA_OK) status = ra_state_finish(&d, &state[0], &t);
    free(workspace);
    free(memory);
    return status;
}

#endif

int main(void) {
    static const char *const name[] = {"causal, zigzag", "intervals, contiguous"};
    problem *p = &lang_problem;
    int bad = 0, i;
    for (i = 0; i < 2; i++) {
        ra_status status;
        lang_set_up(p, i);
        status = lang_solve(p);
        if (status != RA_OK) printf("%s: %s\n", name[i], ra_status_text(status));
        bad |= status != RA_OK || lang_check(p, name[i]);
    }
#ifdef RINGATTN_NO_GRADIENTS
    p->desc.ranks = 1;
    bad |= ra_attention_bytes(&p->desc, 1) == 0;
    p->desc.train = 1;
    bad |= ra_attention_bytes(&p->desc, 1) != 0;           /* refused */
#endif
#ifdef LANG_STATIC_TWO
    bad |= lang_other_version() != ra_version();
#endif
    printf("%s, isa %s\n", bad ? "wrong" : "right", ra_isa_name(ra_isa_best()));
    return bad;
}
