/* Exact causal attention over 1,048,576 tokens on 4 ranks of this machine: one head, 64 dims, in
 * f32 and in bf16. You will see how long it takes, compared with the processor's multiply-adds at
 * their measured peak; the memory of a rank, compared with the formula of the ring attention paper;
 * and the error of sampled rows against double precision. Most of these rows have a needle: a key
 * far back that their query matches. Exits with 1 if a row is too far off.
 *
 *   cc -O2 -std=c99 -pthread -I. -o million examples/million.c -lm && ./million
 *   ./million [--tokens N] [--ranks P] [--dtype f32|bf16] [--out TIMELINE.html|.svg|.json]
 *
 * A million tokens are 1.4e14 operations: some minutes for each dtype on two cores. The timeline is
 * that of the last dtype. */
#define _GNU_SOURCE
#define RINGATTN_IMPLEMENTATION
#include "ringattn.h"
#include "timeline.h"
#include "cores.h"

#include <math.h>
#include <time.h>
#include <unistd.h>
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-function"     /* only its peak_fma is used here */
#include "bench/peak.h"
#pragma GCC diagnostic pop

enum { DIM = 64, ROWS = 16, CORES = 64 };

typedef struct job {
    int64_t tokens;
    int32_t ranks, dtype, isa;
    int cores;
    int64_t row[ROWS], needle[ROWS];   /* sampled positions, and their needles; -1: none */
    float out[ROWS][DIM];
    ra_plan_report plan[TL_RANKS];
    double flops_s[CORES];             /* peak of each core, while all of them compute */
    tl picture;
    const char *picture_path;
} job;

/* -------------------------------------------------------------------------- numbers by position */
enum { IS_Q = 1, IS_K, IS_V };

static void random_row(float x[DIM], int what, int64_t position) {
    uint64_t s = (uint64_t)position * 3 + (uint64_t)what;
    for (int i = 0; i < DIM; i++) {
        s = s * 6364136223846793005u + 1442695040888963407u;
        x[i] = ((float)((s ^ s >> 29) >> 24 & 0xffffff) / 8388608.0f - 1) * 1.732f;
    }
}

/* Row `position` of Q, K or V: of mean 0 and variance 1, except for queries with a needle. */
static void row_of(const job *j, float x[DIM], int what, int64_t position) {
    random_row(x, what, position);
    for (int i = 0; what == IS_Q && i < ROWS; i++) {
        if (j->row[i] != position || j->needle[i] < 0) continue;
        random_row(x, IS_K, j->needle[i]);
        for (int d = 0; d < DIM; d++) x[d] *= 2.2f;
    }
}

static void rounded_row(const job *j, float x[DIM], int what, int64_t position) {
    uint16_t half[DIM];
    row_of(j, x, what, position);
    if (j->dtype == RA_F32) return;
    (void)ra_convert(half, RA_BF16, x, RA_F32, DIM);
    (void)ra_convert(x, RA_F32, half, RA_BF16, DIM);
}

static void choose_rows(job *j) {
    for (int i = 0; i < ROWS; i++) {
        j->row[i] = (j->tokens - 1) * (i + 1) / ROWS;
        j->needle[i] = i % 4 == 3 ? -1 : j->row[i] * ((i * 5) % 9) / 9;
    }
}

/* -------------------------------------------------------------------------- on each rank */
static ra_status run_pass(job *j, const ra_plan *plan, ra_world *world, int rank, ra_tensors *t) {
    ra_ring_desc rd;
    ra_ring *ring = NULL;
    memset(&rd, 0, sizeof rd);
    rd.trace = tl_trace;
    rd.trace_ctx = &j->picture.lanes[rank];
    ra_status s = ra_ring_create(&ring, plan, ra_world_transport(world, rank), &rd);
    if (s == RA_OK) s = ra_forward(plan, ring, t, RA_NO_DEADLINE);
    const ra_status gone = ra_ring_destroy(ring);
    return s == RA_OK ? gone : s;
}

/* Fills this rank's rows, or after the pass copies the sampled ones. */
static void each_row(job *j, const ra_run *runs, int32_t n, uint8_t *memory[4], int after) {
    const int64_t bytes = DIM * (j->dtype == RA_F32 ? 4 : 2);
    float x[DIM];
    int64_t at = 0;
    for (int32_t r = 0; r < n; r++) {
        for (int64_t i = 0; i < runs[r].count; i++, at++) {
            const int64_t p = runs[r].first + i;
            for (int k = 0; after && k < ROWS; k++)
                if (j->row[k] == p) memcpy(j->out[k], memory[3] + at * DIM * 4, DIM * 4);
            for (int what = IS_Q; !after && what <= IS_V; what++) {
                row_of(j, x, what, p);
                (void)ra_convert(memory[what - 1] + at * bytes, j->dtype, x, RA_F32, DIM);
            }
        }
    }
}

static ra_status on_rank(ra_world *world, int rank, void *user) {
    job *j = (job *)user;
    ra_desc d = ra_desc_make(1, 1, DIM, j->dtype, RA_MASK_CAUSAL);
    ra_tensors t;
    ra_plan *plan = NULL;
    tl_lane *lane = &j->picture.lanes[rank];
    uint8_t *memory[4] = { NULL, NULL, NULL, NULL };
    memset(&t, 0, sizeof t);
    d.o_dtype = RA_F32;
    d.tokens = j->tokens;
    d.ranks = j->ranks;
    d.rank = rank;
    d.layout.kind = RA_LAYOUT_ZIGZAG;
    ra_status s = ra_plan_create(&plan, &d, NULL);
    if (s == RA_OK) s = ra_plan_query(plan, rank, &j->plan[rank]);
    for (int i = 0; i < 4 && s == RA_OK; i++) {
        memory[i] = (uint8_t *)malloc((size_t)(j->plan[rank].q_rows + 1) * DIM * 4);
        if (!memory[i]) s = RA_E_NOMEM;
    }
    if (s == RA_OK) {
        lane->run_count = ra_plan_q_runs(plan, rank, 0, lane->runs, 2);
        lane->tokens = j->plan[rank].q_rows;
        each_row(j, lane->runs, lane->run_count, memory, 0);
        t.q.data = memory[0]; t.k.data = memory[1]; t.v.data = memory[2]; t.o.data = memory[3];
        s = run_pass(j, plan, world, rank, &t);
    }
    if (s == RA_OK) each_row(j, lane->runs, lane->run_count, memory, 1);
    for (int i = 0; i < 4; i++) free(memory[i]);
    ra_plan_destroy(plan);
    return s;
}

/* -------------------------------------------------------------------------- references */
/* The rows of the sample in double precision, all in one walk over the keys. */
static double worst_error(const job *j) {
    static double out[ROWS][DIM], sum[ROWS];
    float q[ROWS][DIM], k[DIM], v[DIM];
    double worst = 0;
    memset(out, 0, sizeof out);
    memset(sum, 0, sizeof sum);
    for (int i = 0; i < ROWS; i++) rounded_row(j, q[i], IS_Q, j->row[i]);
    for (int64_t p = 0; p < j->tokens; p++) {
        rounded_row(j, k, IS_K, p);
        rounded_row(j, v, IS_V, p);
        for (int i = 0; i < ROWS; i++) {
            double score = 0;
            if (p > j->row[i]) continue;
            for (int d = 0; d < DIM; d++) score += (double)q[i][d] * (double)k[d];
            const double weight = exp(score / sqrt(DIM));
            sum[i] += weight;
            for (int d = 0; d < DIM; d++) out[i][d] += weight * (double)v[d];
        }
    }
    for (int i = 0; i < ROWS; i++)
        for (int d = 0; d < DIM; d++)
            worst = fmax(worst, fabs(out[i][d] / sum[i] - (double)j->out[i][d]));
    return worst;
}

static double processor_s(clockid_t whose) {
    struct timespec t;
    clock_gettime(whose, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* Multiply-adds, or dot products of bf16, for a fifth of a second on every core at once. Speed is
 * per second of processor time, so that other programs do not count. */
static ra_status on_core(ra_world *world, int rank, void *user) {
    job *j = (job *)user;
    const double start = processor_s(CLOCK_THREAD_CPUTIME_ID);
    double flops = 0, used = 0;
    (void)world;
    for (; used < 0.2; used = processor_s(CLOCK_THREAD_CPUTIME_ID) - start)
        flops += peak_fma(j->isa, 10000);
    j->flops_s[rank] = flops / used;
    return RA_OK;
}

static double peak_flops_s(job *j) {
    double sum = 0;
    j->isa = ra_isa_best();
    if (j->dtype == RA_F32 && (j->isa == RA_ISA_AVX512_BF16 || j->isa == RA_ISA_AMX))
        j->isa = RA_ISA_AVX512;
    if (ra_world_run(j->cores, on_core, j, NULL) != RA_OK) return 1;
    for (int i = 0; i < j->cores; i++) sum += j->flops_s[i];
    return sum;
}

static int run(job *j) {
    const double bytes = j->dtype == RA_F32 ? 4 : 2, mib = 1048576, peak = peak_flops_s(j);
    /* The bound that the header states, with scale |q| |k| up to 25; bf16 rounds the weights. */
    const double limit = j->dtype == RA_F32 ? (26 + sqrt((double)j->tokens) / 8) * 0x1p-23 * 1.74
                                            : 4e-3;
    double flops = 0, most = 0, used, error;
    int64_t start;
    choose_rows(j);
    printf("%s, %lld tokens on %d ranks: about %.0f s at the peak of %d cores\n",
           j->dtype == RA_F32 ? "f32" : "bf16", (long long)j->tokens, (int)j->ranks,
           2.0 * 2 * DIM * (double)j->tokens * (double)j->tokens / 2 / peak, j->cores);
    fflush(stdout);
    start = ra_now_ns();
    used = processor_s(CLOCK_PROCESS_CPUTIME_ID);
    const ra_status s = ra_world_run(j->ranks, on_rank, j, NULL);
    const double seconds = (double)(ra_now_ns() - start) * 1e-9;
    used = processor_s(CLOCK_PROCESS_CPUTIME_ID) - used;
    if (s != RA_OK) {
        printf("%s\n", ra_status_text(s));
        return 1;
    }
    const double roof = (peak + peak_flops_s(j)) / 2 / j->cores;
    for (int i = 0; i < j->ranks; i++) {
        const ra_plan_report *r = &j->plan[i];
        flops += r->forward.flops;
        most = fmax(most, (double)(r->resident_bytes + r->shared_workspace_bytes));
    }
    error = worst_error(j);
    printf("  time    %.1f s (of processors %.1f); of each %.1f GFLOP/s, %.0f %% of its %.1f\n",
           seconds, used, flops / used * 1e-9, 100 * flops / used / roof, roof * 1e-9);
    printf("  memory  %.1f MiB per rank with the output in f32; 6 c h e of the paper: %.1f MiB\n",
           most / mib, 6.0 * (double)j->tokens / j->ranks * DIM * bytes / mib);
    printf("  error   %.1e in %d rows, at most %.0e\n", error, (int)ROWS, limit);
    if (j->picture_path && tl_write(&j->picture, j->picture_path)) return 1;
    return !(error <= limit);
}

/* -------------------------------------------------------------------------- command line */
static int number(const char *s, int64_t least, int64_t most, int64_t *out) {
    char *end = NULL;
    *out = s ? strtoll(s, &end, 10) : 0;
    return s && end != s && !*end && *out >= least && *out <= most;
}

int main(int argc, char **argv) {
    static job j;
    const int cores = cores_here();
    int64_t tokens = 1 << 20, ranks = 4;
    int32_t only = 0;
    int bad = 0;
    for (int i = 1; i < argc && !bad; i += 2) {
        const char *value = argv[i + 1];
        if (!strcmp(argv[i], "--tokens")) bad = !number(value, ROWS, 1 << 24, &tokens);
        else if (!strcmp(argv[i], "--ranks")) bad = !number(value, 1, TL_RANKS, &ranks);
        else if (!strcmp(argv[i], "--out") && value) j.picture_path = value;
        else if (strcmp(argv[i], "--dtype") || !value) bad = 1;
        else if (!strcmp(value, "f32")) only = RA_F32;
        else if (!strcmp(value, "bf16")) only = RA_BF16;
        else bad = 1;
    }
    if (bad) {
        fprintf(stderr, "million [--tokens N] [--ranks P] [--dtype f32|bf16] [--out FILE]\n");
        return 1;
    }
    j.tokens = tokens;
    j.ranks = (int32_t)ranks;
    j.cores = cores > CORES ? CORES : cores;
    if (j.cores > j.ranks) j.cores = j.ranks;
    for (j.dtype = RA_F32; j.dtype <= RA_BF16; j.dtype += RA_BF16 - RA_F32) {
        if ((only && only != j.dtype) || tl_open(&j.picture, j.ranks)) continue;
        j.picture.tokens = tokens;
        j.picture.cores = j.cores;
        j.picture.title = "a million tokens";
        j.picture.note = "";
        bad |= run(&j);
        tl_close(&j.picture);
    }
    return bad;
}
