/* Predicts the next byte of real text by exact causal attention alone: no training, no weights.
 *
 * You will see, in under a minute: how many bits a byte costs after 1K, 4K, 16K and 64K bytes,
 * compared with gzip and xz; one passage that it predicted, and where it
 * looked; what each of 4 ranks held, received, computed and waited for; that the numbers agree with
 * double precision, and with one rank bit for bit; and a timeline to open in a browser.
 * It is a show, not a program to copy: for that see minimal.c, decode.c and engine_threads.c.
 *
 *   cc -O2 -std=c99 -pthread -I. -o demo examples/demo.c -lm && ./demo
 *   ./demo [--text FILE] [--tokens N] [--ranks R] [--out FILE.html|FILE.svg] [[--] FILE ...] [N]
 *
 * The model. The query at position t represents the last bytes up to t: a sum of random sign
 * vectors, one per (distance, byte), with weights that decay with distance. The key at s is made in
 * the same way from the bytes BEFORE s, and the value at s is the byte at s, one-hot. So a query
 * finds the places where the text continued as it does here, and its output row is a distribution
 * over the next byte there. Three heads look at different things: the nearest bytes, the word so
 * far, and the last 20 bytes. The LSE of a head says how much it found, which decides its share of
 * the prediction. The rest comes from the head before it, and below all heads from how often each
 * byte has occurred. Every byte is predicted only from the bytes before it, with the same constants
 * for all texts, and the 256 probabilities sum to 1: the bits are what an arithmetic coder would
 * write. */
#define _POSIX_C_SOURCE 200809L
#define RINGATTN_IMPLEMENTATION
#include "ringattn.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { HEADS = 3, KEY_DIM = 64, MAX_RANKS = 64, MAX_FILES = 512 };
enum { TEXT_LIMIT = 64 << 20, DEFAULT_TOKENS = 65536 };

#include "timeline.h"
#include "cores.h"

/* What a head looks at, and its weight: its share of the prediction is sigmoid(gate[0] * evidence +
 * gate[1] + gate[2] * ln(sum of p^2)), evidence = LSE - sharpness, which is the logarithm of how
 * many perfect matches it found. */
typedef struct head_kind {
    const char *name;
    int bytes;                         /* of the context, nearest first */
    float decay;                       /* weight of a byte against that of its successor */
    float word;                        /* weight of the word so far as a whole */
    float sharpness;                   /* score of a perfect match */
    double gate[3];
} head_kind;

static const head_kind kinds[HEADS] = {
    {"near", 5, 0.53f, 0, 16, {0.44, -0.50, -0.17}},
    {"word", 3, 0.67f, 1, 20, {0.44, 1.50, 0.95}},
    {"far", 20, 0.85f, 0, 30, {0.36, 1.00, 1.10}}};

/* ALiBi: newer matches count a little more. */
static const float slopes[HEADS] = {3.0e-5f, 7.5e-5f, 3.0e-5f};

typedef struct text {
    uint8_t *byte;
    int64_t count;
    int64_t files;
    char name[4096];
    int symbol[256];                   /* column of a byte in V, -1: does not occur */
    int32_t v_dim;                     /* columns of V */
} text;

typedef struct options {
    const char *files[MAX_FILES], *out;
    int file_count, ranks;
    int64_t tokens;                    /* 0: as many as a minute allows */
} options;

static void fail(const char *what, const char *why) {
    fflush(stdout);
    fprintf(stderr, "demo: %s%s%s\n", what, why ? ": " : "", why ? why : "");
    exit(1);
}

static void *get(size_t count, size_t bytes) {
    void *p = NULL;
    if (bytes && count > SIZE_MAX / bytes) fail("out of memory", NULL);
    if (posix_memalign(&p, 64, count * bytes + 64)) fail("out of memory", "try --tokens 4096");
    memset(p, 0, count * bytes);
    return p;
}

static const char *s_of(int64_t n) {
    return n == 1 ? "" : "s";
}

/* ========================================================================== the text */
static void text_add(text *x, const char *path) {
    FILE *f = fopen(path, "rb");
    size_t got = 0;
    if (!f) fail(path, strerror(errno));
    errno = 0;
    if (x->count < TEXT_LIMIT)
        got = fread(x->byte + x->count, 1, (size_t)(TEXT_LIMIT - x->count), f);
    if (ferror(f)) fail(path, strerror(errno));
    fclose(f);
    x->count += (int64_t)got;
    x->files++;
}

static int by_name(const void *a, const void *b) {
    return strcmp(*(char *const *)a, *(char *const *)b);
}

/* Adds the files of a directory that end in .c, .h or .md, in the order of their names. */
static void text_add_directory(text *x, const char *dir) {
    char *path[MAX_FILES];
    int n = 0;
    DIR *d = opendir(dir);
    if (!d) return;
    for (struct dirent *e = readdir(d); e && n < MAX_FILES; e = readdir(d)) {
        const char *end = strrchr(e->d_name, '.');
        if (e->d_name[0] == '.' || !end) continue;
        if (strcmp(end, ".c") && strcmp(end, ".h") && strcmp(end, ".md")) continue;
        size_t bytes = strlen(dir) + strlen(e->d_name) + 2;
        path[n] = (char *)get(bytes, 1);
        snprintf(path[n++], bytes, "%s/%s", dir, e->d_name);
    }
    closedir(d);
    qsort(path, (size_t)n, sizeof path[0], by_name);
    for (int i = 0; i < n; i++) {
        text_add(x, path[i]);
        free(path[i]);
    }
}

/* The named files one after another, or this repository's own sources and documents. */
static void text_load(text *x, const options *o) {
    static const char *const places[] = {".", "examples", "tests", "bench"};
    x->byte = (uint8_t *)malloc(TEXT_LIMIT);
    if (!x->byte) fail("out of memory", NULL);
    for (int i = 0; i < o->file_count; i++) text_add(x, o->files[i]);
    for (int i = 0; i < 4 && !o->file_count; i++) text_add_directory(x, places[i]);
    if (!x->files) fail("no sources in this directory", "name a file, or run it in the repository");
    if (!x->count) fail(o->files[0], "is empty: there is nothing to predict");
    if (!o->file_count)
        snprintf(x->name, sizeof x->name, "%s", access("ringattn.h", F_OK) ?
                 "the sources in this directory" : "this repository");
    else if (x->files == 1) snprintf(x->name, sizeof x->name, "%s", o->files[0]);
    else snprintf(x->name, sizeof x->name, "%s and %d more", o->files[0], o->file_count - 1);
}

/* Keeps `count` bytes and gives every byte that occurs a column of V. The whole text shows which
 * bytes occur, but no prediction uses that: a byte not seen so far has the probability that all
 * such bytes share, with or without a column. */
static void text_cut(text *x, int64_t count) {
    x->count = count;
    x->v_dim = 0;
    memset(x->symbol, -1, sizeof x->symbol);
    for (int64_t t = 0; t < count; t++)
        if (x->symbol[x->byte[t]] < 0) x->symbol[x->byte[t]] = x->v_dim++;
    x->v_dim = (x->v_dim + 15) / 16 * 16;
}

/* ========================================================================== the model */
static uint64_t scramble(uint64_t z) { /* splitmix64 */
    z += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* row[KEY_DIM] += weight * the random signs of `what`. */
static void add_signs(float *row, uint64_t what, float weight) {
    uint64_t bits = scramble(what);
    for (int i = 0; i < KEY_DIM; i++) row[i] += bits >> i & 1 ? weight : -weight;
}

static int in_word(int c) {
    return isalnum(c) || c == '_' || c >= 128;
}

/* row[KEY_DIM] = what a head sees of the bytes up to t (t = -1: none), scaled to `length`. */
static void embed(const text *x, int64_t t, const head_kind *kind, float length, float *row) {
    float weight = 1, sum = 0;
    uint64_t word = 99;
    memset(row, 0, sizeof(float) * KEY_DIM);
    for (int i = 0; i < kind->bytes && t - i >= 0; i++, weight *= kind->decay)
        add_signs(row, scramble((uint64_t)i * 1000 + x->byte[t - i] + 77), weight);
    for (int64_t p = t; kind->word > 0 && p >= 0 && p > t - 32 && in_word(x->byte[p]); p--)
        word = scramble(word * 37 + (x->byte[p] | 32));
    if (kind->word > 0) add_signs(row, word, kind->word);
    for (int i = 0; i < KEY_DIM; i++) sum += row[i] * row[i];
    float scale = sum > 0 ? length / sqrtf(sum) : 0;
    for (int i = 0; i < KEY_DIM; i++) row[i] *= scale;
}

/* Queries, keys and values of one rank, packed [rows][HEADS][dim]. The key at a position represents
 * the bytes before it: the query at t, which sees the keys up to t, predicts byte t + 1. */
typedef struct shard {
    int64_t rows;
    float *q, *k, *v, *o, *lse;
    ra_run runs[2];
    int32_t run_count;
} shard;

static void shard_fill(shard *s, const text *x) {
    int64_t row = 0;
    for (int32_t i = 0; i < s->run_count; i++)
        for (int64_t j = 0; j < s->runs[i].count; j++, row++) {
            int64_t t = s->runs[i].first + j;
            for (int h = 0; h < HEADS; h++) {
                int64_t at = row * HEADS + h;
                embed(x, t, &kinds[h], kinds[h].sharpness, s->q + at * KEY_DIM);
                embed(x, t - 1, &kinds[h], 1, s->k + at * KEY_DIM);
                s->v[at * x->v_dim + x->symbol[x->byte[t]]] = 1;
            }
        }
}

static void shard_open(shard *s, const text *x, int64_t rows) {
    size_t n = (size_t)rows * HEADS, dim = (size_t)x->v_dim;
    s->rows = rows;
    s->q = (float *)get(n * KEY_DIM, sizeof(float));
    s->k = (float *)get(n * KEY_DIM, sizeof(float));
    s->v = (float *)get(n * dim, sizeof(float));
    s->o = (float *)get(n * dim, sizeof(float));
    s->lse = (float *)get(n, sizeof(float));
}

static void shard_close(shard *s) {
    free(s->q);
    free(s->k);
    free(s->v);
    free(s->o);
    free(s->lse);
    memset(s, 0, sizeof *s);
}

static void shard_tensors(const shard *s, ra_tensors *t) {
    memset(t, 0, sizeof *t);
    t->q.data = s->q;
    t->k.data = s->k;
    t->v.data = s->v;
    t->o.data = s->o;
    t->lse.data = s->lse;
    t->alibi = slopes;
}

static void describe(ra_desc *d, const text *x, ra_error *error) {
    *d = ra_desc_make(HEADS, HEADS, KEY_DIM, RA_F32, RA_MASK_CAUSAL);
    d->tokens = x->count;
    d->v_dim = x->v_dim;
    d->scores = RA_SCORE_ALIBI;
    d->scale = 1;                      /* the queries include the sharpness */
    d->layout.kind = RA_LAYOUT_ZIGZAG;
    d->error = error;
}

/* ========================================================================== a pass on ranks */
typedef struct seat {                  /* one rank of the pass, and what it reports */
    ra_plan_report plan;
    ra_ring_counters count;
    int64_t begin_ns, end_ns;
} seat;

typedef struct pass {
    const text *x;
    int ranks, threads;                /* threads: of each rank */
    float *o, *lse;                    /* gathered: [tokens][HEADS][v_dim], [tokens][HEADS] */
    shard *keep;                       /* rank 0's shard stays here, if not null */
    tl *picture;                       /* may be null */
    seat seats[MAX_RANKS];
    char why[RA_TEXT_BYTES + 48];
} pass;

static pthread_mutex_t why_lock = PTHREAD_MUTEX_INITIALIZER;

typedef struct worker { ra_ring *ring; ra_job job; } worker;

/* Thread `ith` of a rank that has several. There is no main thread: the first to come begins the
 * pass. */
static ra_status work(ra_world *unused, int ith, void *user) {
    worker *w = (worker *)user;
    ra_status status;
    (void)unused;
    while ((status = ra_join(w->ring, &w->job, ith)) > 0)
        if (status == RA_WAIT) ra_step_wait(w->ring, ra_deadline_ms(100));
    return status;
}

/* ra_world_run starts the threads here: they are no ranks and send nothing. */
static ra_status forward(const ra_plan *plan, ra_ring *ring, const ra_tensors *t, int threads) {
    worker w = {ring, {0}};
    if (threads == 1) return ra_forward(plan, ring, t, RA_NO_DEADLINE);
    w.job.ticket = 1;
    w.job.plan = plan;
    w.job.tensors = t;
    return ra_world_run(threads, work, &w, NULL);
}

/* Rows of this rank to their places in the whole. */
static void gather(const pass *p, const shard *s) {
    size_t o = sizeof(float) * HEADS * (size_t)p->x->v_dim, lse = sizeof(float) * HEADS;
    int64_t row = 0;
    for (int32_t i = 0; i < s->run_count; i++) {
        int64_t to = s->runs[i].first;
        size_t n = (size_t)s->runs[i].count;
        memcpy((char *)p->o + (size_t)to * o, (char *)s->o + (size_t)row * o, n * o);
        memcpy((char *)p->lse + (size_t)to * lse, (char *)s->lse + (size_t)row * lse, n * lse);
        row += s->runs[i].count;
    }
}

/* The pass itself: ring, forward, counters. */
static ra_status seat_run(pass *p, int rank, const ra_plan *plan, const ra_transport *tr,
                          const shard *s) {
    seat *me = &p->seats[rank];
    ra_ring *ring = NULL;
    ra_ring_desc rd = {0};
    ra_tensors t;
    ra_failure failure;
    if (p->picture) {
        rd.trace = tl_trace;
        rd.trace_ctx = &p->picture->lanes[rank];
    }
    ra_status status = ra_ring_create(&ring, plan, tr, &rd);
    if (status != RA_OK) return status;
    shard_tensors(s, &t);
    me->begin_ns = ra_now_ns();
    status = forward(plan, ring, &t, p->threads);
    me->end_ns = ra_now_ns();
    ra_ring_query(ring, &me->count);
    if (status < 0 && ra_ring_failure(ring, &failure) == RA_OK && failure.status != RA_E_ABORTED) {
        pthread_mutex_lock(&why_lock);
        snprintf(p->why, sizeof p->why, "rank %d: %s", rank, failure.text);
        pthread_mutex_unlock(&why_lock);
    }
    ra_ring_destroy(ring);
    return status;
}

/* What every rank does, on its own thread; world is null if there is only one rank. */
static ra_status on_rank(ra_world *world, int rank, void *user) {
    pass *p = (pass *)user;
    ra_plan *plan = NULL;
    ra_error error = {0};
    ra_desc d;
    shard s = {0};
    describe(&d, p->x, &error);
    d.rank = rank;
    d.ranks = p->ranks;
    d.threads = p->threads;
    ra_status status = ra_plan_create(&plan, &d, NULL);
    if (status != RA_OK) {
        if (rank == 0) snprintf(p->why, sizeof p->why, "%s: %s", error.field, error.text);
        return status;
    }
    ra_plan_query(plan, rank, &p->seats[rank].plan);
    s.run_count = ra_plan_q_runs(plan, rank, 0, s.runs, 2);
    shard_open(&s, p->x, p->seats[rank].plan.q_rows);
    shard_fill(&s, p->x);
    if (p->picture) {
        tl_lane *lane = &p->picture->lanes[rank];
        lane->tokens = s.rows;
        lane->run_count = s.run_count;
        memcpy(lane->runs, s.runs, sizeof s.runs);
    }
    status = seat_run(p, rank, plan, world ? ra_world_transport(world, rank) : NULL, &s);
    if (status == RA_OK) gather(p, &s);
    if (p->keep && rank == 0) *p->keep = s;
    else shard_close(&s);
    ra_plan_destroy(plan);
    return status;
}

/* Nanoseconds from the first rank's start to the last one's end. */
static int64_t pass_ns(const pass *p) {
    int64_t begin = INT64_MAX, end = 0;
    for (int r = 0; r < p->ranks; r++) {
        if (p->seats[r].begin_ns < begin) begin = p->seats[r].begin_ns;
        if (p->seats[r].end_ns > end) end = p->seats[r].end_ns;
    }
    return end - begin;
}

static void pass_run(pass *p, const text *x, const char *what) {
    size_t rows = (size_t)x->count * HEADS;
    p->x = x;
    p->o = (float *)get(rows * (size_t)x->v_dim, sizeof(float));
    p->lse = (float *)get(rows, sizeof(float));
    printf("%s: ", what);
    fflush(stdout);
    ra_status status = p->ranks == 1 ? on_rank(NULL, 0, p) :
                       ra_world_run(p->ranks, on_rank, p, NULL);
    if (status != RA_OK) fail(ra_status_text(status), p->why[0] ? p->why : NULL);
    printf("%.2f s\n", (double)pass_ns(p) * 1e-9);
}

/* ========================================================================== one call, no ring */
typedef struct caller {
    const ra_desc *d;
    const ra_tensors *t;
    void *workspace;
    size_t bytes;
    int nth;
} caller;

static ra_status call(ra_world *unused, int ith, void *user) {
    const caller *c = (const caller *)user;
    (void)unused;
    return ra_attention(c->d, c->t, c->workspace, c->bytes, ith, c->nth);
}

/* ra_attention on nth threads; returns nanoseconds. */
static int64_t attend(const ra_desc *d, const ra_tensors *t, int nth) {
    caller c = {d, t, NULL, ra_attention_bytes(d, nth), nth};
    c.workspace = get(c.bytes, 1);
    int64_t begin = ra_now_ns();
    ra_status status = ra_world_run(nth, call, &c, NULL);
    int64_t ns = ra_now_ns() - begin;
    free(c.workspace);
    if (status != RA_OK) fail(ra_status_text(status), d->error->text);
    return ns;
}

/* Multiplies and adds for the causal triangle over n tokens. */
static double work_of(int64_t n, int32_t v_dim) {
    return 2.0 * (KEY_DIM + v_dim) * HEADS * (double)n * ((double)n + 1) / 2;
}

/* 1 if the machine has twice the memory for n tokens: q, k, v, o of all, and two more o. */
static int fits_memory(int64_t n, int32_t v_dim) {
    long pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGESIZE);
    double bytes = (double)n * HEADS * (2 * KEY_DIM + 4 * v_dim) * sizeof(float);
    return pages <= 0 || page <= 0 || 2 * bytes < (double)pages * (double)page;
}

/* FLOP/s of all processors on this machine, from a short run over the first n tokens. */
static double measure(const text *x, int64_t n, int nth) {
    text few = *x;
    shard s = {0};
    ra_tensors t;
    ra_desc d;
    ra_error error = {0};
    text_cut(&few, n);
    describe(&d, &few, &error);
    d.threads = nth;
    s.run_count = 1;
    s.runs[0].count = n;
    shard_open(&s, &few, n);
    shard_fill(&s, &few);
    shard_tensors(&s, &t);
    int64_t first = attend(&d, &t, nth), second = attend(&d, &t, nth);
    shard_close(&s);
    return work_of(n, few.v_dim) / (1e-9 * (double)(first < second ? first : second));
}

/* The longest text, a power of two, whose two passes and all else take about 45 seconds. */
static int64_t choose_tokens(const text *x, const options *o, int nth) {
    int64_t limit = o->tokens ? o->tokens : DEFAULT_TOKENS, n = x->count < limit ? x->count : limit;
    if (n < 2048) return n;
    if (o->tokens && !fits_memory(n, 112)) fail("not enough memory", "try a smaller --tokens");
    double rate = measure(x, 1024, nth);
    if (rate > 2e10 && n >= 4096) rate = measure(x, 4096, nth);
    double seconds = 2.2 * work_of(n, 112) / rate;
    printf("%.3g GFLOP/s on %d processor%s (%s): ", rate * 1e-9, nth, s_of(nth),
           ra_isa_name(ra_isa_best()));
    if (o->tokens) {
        printf("%s tokens will take about %.0f s.\n", tl_count(n), seconds + 1);
        return n;
    }
    int64_t fit = n;
    while (fit > 1024 && (2.2 * work_of(fit, 112) / rate > 45 || !fits_memory(fit, 112)))
        fit = fit / 2;
    if (fit < n)
        printf("%s of %s tokens fit in a minute (--tokens N for more).\n", tl_count(fit),
               tl_count(x->count));
    else printf("%s tokens, about %.0f s.\n", tl_count(n), seconds + 1);
    return fit;
}

/* ========================================================================== prediction */
typedef struct guess {                 /* of byte t, made from the bytes before it */
    float bits;                        /* the cost of the byte that came */
    uint8_t top;                       /* the likeliest byte */
} guess;

/* p[256] after n bytes, before the next is looked at: seen[] counts them. Bytes not seen so far
 * share a part that shrinks; the sum is 1. */
static void order_zero(const int64_t *seen, int64_t n, double *p) {
    int kinds_seen = 0;
    for (int c = 0; c < 256; c++) kinds_seen += seen[c] > 0;
    for (int c = 0; c < 256; c++)
        p[c] = n ? ((double)seen[c] + kinds_seen / 256.0) / (double)(n + kinds_seen) : 1 / 256.0;
}

/* p[256] = share * what the head saw + (1 - share) * p, from one row of its output. */
static void add_head(const text *x, const head_kind *kind, const float *o, float lse, double *p) {
    double square = 1e-9, evidence = (double)(lse - kind->sharpness);
    for (int32_t i = 0; i < x->v_dim; i++) square += (double)o[i] * (double)o[i];
    double gate = kind->gate[0] * evidence + kind->gate[1] + kind->gate[2] * log(square);
    double share = 1 / (1 + exp(-gate));
    if (share > 0.999) share = 0.999;
    for (int c = 0; c < 256; c++) {
        double head = x->symbol[c] < 0 ? 0 : (double)o[x->symbol[c]];
        p[c] = share * head + (1 - share) * p[c];
    }
}

/* Guesses for bytes [first, first + n). Row i of o and lse is the query of the byte before byte
 * first + i; byte 0 has none. Returns the largest distance of a sum of probabilities from 1. */
static double predict(const text *x, int64_t first, int64_t n, const float *o, const float *lse,
                      guess *out) {
    int64_t seen[256] = {0};
    double p[256], worst = 0;
    for (int64_t t = 0; t < first; t++) seen[x->byte[t]]++;
    for (int64_t i = 0; i < n; i++) {
        int64_t t = first + i;
        double sum = 0;
        int top = 0;
        order_zero(seen, t, p);
        for (int h = 0; h < HEADS && t; h++)
            add_head(x, &kinds[h], o + (i * HEADS + h) * x->v_dim, lse[i * HEADS + h], p);
        for (int c = 0; c < 256; c++) {
            sum += p[c];
            if (p[c] > p[top]) top = c;
        }
        if (fabs(sum - 1) > worst) worst = fabs(sum - 1);
        out[i].bits = (float)-log2(p[x->byte[t]] / sum);
        out[i].top = (uint8_t)top;
        seen[x->byte[t]]++;
    }
    return worst;
}

static double bits_a_byte(const guess *g, int64_t n) {
    double bits = 0;
    for (int64_t i = 0; i < n; i++) bits += (double)g[i].bits;
    return n ? bits / (double)n : 0;
}

static double hits(const text *x, const guess *g, int64_t first, int64_t n) {
    int64_t right = 0;
    for (int64_t i = 0; i < n; i++) right += g[i].top == x->byte[first + i];
    return n ? 100 * (double)right / (double)n : 0;
}

/* Bits that a compressor needs for bytes [first, first + n); -1 if it is not installed. */
static double packed_bits(const char *command, const text *x, int64_t first, int64_t n) {
    char path[] = "/tmp/ringattn-demo-XXXXXX", line[128];
    long long bytes = 0;
    int fd = mkstemp(path);
    FILE *f = fd < 0 ? NULL : fdopen(fd, "wb");
    if (!f) return -1;
    int bad = fwrite(x->byte + first, 1, (size_t)n, f) != (size_t)n;
    bad |= fclose(f) != 0;
    snprintf(line, sizeof line, "%s < %s 2>/dev/null | wc -c", command, path);
    FILE *out = bad ? NULL : popen(line, "r");
    if (out && fscanf(out, "%lld", &bytes) != 1) bytes = 0;
    if (out) pclose(out);
    unlink(path);
    return bytes > 0 ? 8.0 * (double)bytes : -1;
}

/* ========================================================================== tables */
/* cells: texts, separated by '|', set flush right in columns of these widths. */
static void table_row(const int *width, const char *cells) {
    for (; *width; width++) {
        int n = (int)strcspn(cells, "|");
        printf("%*.*s", *width, n, cells);
        cells += n + (cells[n] == '|');
    }
    printf("\n");
}

/* "2.31", or "-" for a compressor that is not installed. */
static const char *per_byte(double bits, int64_t n) {
    static char texts[4][16];
    static int turn;
    char *s = texts[turn = (turn + 1) & 3];
    if (bits < 0) snprintf(s, 16, "-");
    else snprintf(s, 16, "%.2f", bits / (double)n);
    return s;
}

/* The first N bytes of the text, read from the first to the last. */
static void table_lengths(const text *x, const guess *g) {
    static const int width[] = {9, 15, 14, 10, 11, 9, 0};
    char row[256];
    int64_t n = x->count < 1024 ? x->count : 1024;
    double gz, xz;
    printf("\nBits per byte of the first N bytes, every byte from all bytes before it\n");
    table_row(width, "N|this attention|its last half|top-1|gzip -9|xz -9e");
    for (;;) {
        gz = packed_bits("gzip -9 -c", x, 0, n);
        xz = packed_bits("xz -9e -c", x, 0, n);
        snprintf(row, sizeof row, "%s|%.2f|%.2f|%.0f %%|%s|%s", tl_count(n), bits_a_byte(g, n),
                 bits_a_byte(g + n / 2, n - n / 2), hits(x, g, 0, n), per_byte(gz, n),
                 per_byte(xz, n));
        table_row(width, row);
        if (n == x->count) break;
        n = n * 4 < x->count ? n * 4 : x->count;
    }
    double own = bits_a_byte(g, n) * (double)n;
    if (n < 1024)
        printf("Compressors need some bytes for their headers; a text that short says little.\n");
    else if (gz > 0 && xz > 0)
        printf("That is %.0f %% %s than gzip and %.0f %% %s than xz.\n", 100 * fabs(1 - own / gz),
            own < gz ? "less" : "more", 100 * fabs(1 - own / xz), own < xz ? "less" : "more");
    if (gz < 0 || xz < 0)
        printf("Not available here: %s%s%s.\n", gz < 0 ? "gzip" : "", gz < 0 && xz < 0 ? ", " : "",
            xz < 0 ? "xz" : "");
}

static const char *mib(int64_t bytes) {
    static char texts[8][24];
    static int turn;
    char *s = texts[turn = (turn + 1) & 7];
    if (bytes < 1024) snprintf(s, 24, "%d B", (int)bytes);
    else if (bytes < 1 << 20) snprintf(s, 24, "%.1f KiB", (double)bytes / 1024);
    else snprintf(s, 24, "%.1f MiB", (double)bytes / 1048576);
    return s;
}

/* 1 if a run matched its plan to the tile, message and byte. */
static int as_planned(const pass *p) {
    for (int r = 0; r < p->ranks; r++) {
        const ra_plan_report *q = &p->seats[r].plan;
        const ra_ring_counters *c = &p->seats[r].count;
        if (c->tiles_empty != q->forward.tiles_empty ||
            c->tiles_partial != q->forward.tiles_partial ||
            c->tiles_full != q->forward.tiles_full || c->chunks_in != q->forward.chunks_in ||
            c->bytes_in != q->forward.shared_bytes_in || c->peak_bytes != q->shared_workspace_bytes)
            return 0;
    }
    return 1;
}

/* What each rank had, received and did. Hops: how many other ranks' keys passed through it;
 * skipped: how many did not, because no rank from here on needs them. */
static void table_ranks(const pass *p) {
    static const int width[] = {4, 8, 11, 11, 6, 9, 10, 16, 28, 11, 9, 0};
    char row[512];
    printf("\nWhat %sthe %d rank%s held, got and did\n", p->ranks > 1 ? "each of " : "", p->ranks,
           s_of(p->ranks));
    table_row(width, "rank|tokens|resident|extra|hops|skipped|got here|over a network|"
                  "tiles empty / part / full|computing|waiting");
    for (int r = 0; r < p->ranks; r++) {
        const ra_plan_report *q = &p->seats[r].plan;
        const ra_ring_counters *c = &p->seats[r].count;
        snprintf(row, sizeof row, "%d|%s|%s|%s|%lld|%lld|%s|%s|%s / %s / %s|%.2f s|%.2f s", r,
                 tl_count(q->q_rows), mib(q->resident_bytes), mib(c->peak_bytes),
                 (long long)q->hops, (long long)q->hops_skipped, mib(c->bytes_in),
                 mib(q->forward.bytes_in), tl_count(c->tiles_empty), tl_count(c->tiles_partial),
                 tl_count(c->tiles_full), (double)c->compute_ns * 1e-9, (double)c->wait_ns * 1e-9);
        table_row(width, row);
    }
    if (p->ranks > 1)
        printf("Got here: addresses, for the ranks share memory. A network would carry keys\n"
            "and values, %s tokens a message, and need %s a rank instead of the extra.\n",
            tl_count(p->seats[0].plan.chunk_tokens), mib(p->seats[0].plan.workspace_bytes));
    if (cores_here() < p->ranks)
        printf("There are more ranks than processors: computing counts the time in which\n"
            "another rank had the processor, too.\n");
    printf("Tiles, messages and bytes are %s the plan had said before the run.\n",
        as_planned(p) ? "what" : "NOT what");
}

/* ========================================================================== checks */
typedef struct error_of { double o, lse; int64_t rows; } error_of;

/* Scores of the query at t in one head, in double precision; s: the whole text on one rank.
 * Returns the largest. */
static double scores(const shard *s, int h, int64_t t, double *score) {
    const float *q = s->q + (t * HEADS + h) * KEY_DIM;
    double most = -HUGE_VAL;
    for (int64_t i = 0; i <= t; i++) {
        const float *k = s->k + (i * HEADS + h) * KEY_DIM;
        double sum = 0;
        for (int d = 0; d < KEY_DIM; d++) sum += (double)q[d] * (double)k[d];
        score[i] = sum - (double)slopes[h] * (double)(t - i);
        if (score[i] > most) most = score[i];
    }
    return most;
}

/* The largest differences of 48 rows, spread over the text, from the same sums in double
 * precision. */
static error_of check(const text *x, const shard *s, const float *o, const float *lse) {
    error_of worst = {0, 0, x->count < 48 ? x->count : 48};
    double *score = (double *)get((size_t)x->count, sizeof(double)), sum[256];
    for (int64_t i = 0; i < worst.rows; i++)
        for (int h = 0; h < HEADS; h++) {
            int64_t t = worst.rows == 1 ? 0 : i * (x->count - 1) / (worst.rows - 1);
            double most = scores(s, h, t, score), all = 0;
            memset(sum, 0, sizeof sum);
            for (int64_t k = 0; k <= t; k++) {
                double e = exp(score[k] - most);
                all += e;
                sum[x->symbol[x->byte[k]]] += e;
            }
            for (int32_t c = 0; c < x->v_dim; c++)
                worst.o = fmax(worst.o,
                               fabs((double)o[(t * HEADS + h) * x->v_dim + c] - sum[c] / all));
            worst.lse = fmax(worst.lse, fabs((double)lse[t * HEADS + h] - (most + log(all))));
        }
    free(score);
    return worst;
}

static int64_t differing(const float *a, const float *b, int64_t n) {
    int64_t count = 0;
    for (int64_t i = 0; i < n; i++) count += memcmp(a + i, b + i, sizeof(float)) != 0;
    return count;
}

static void compare(const text *x, const pass *ring, const pass *one, error_of e) {
    int64_t rows = x->count * HEADS, n = rows * x->v_dim + rows;
    int64_t d = differing(ring->o, one->o, rows * x->v_dim) + differing(ring->lse, one->lse, rows);
    double a = (double)pass_ns(ring) * 1e-9, b = (double)pass_ns(one) * 1e-9;
    double work = work_of(x->count, x->v_dim) * 1e-9;
    printf("\n");
    printf("Against double precision, %lld row%s of %d heads: outputs differ by at most %.1e,\n"
        "log-sum-exps (of scores up to 30) by at most %.1e.\n", (long long)e.rows, s_of(e.rows),
        HEADS, e.o, e.lse);
    printf("The same on 1 rank with %d thread%s: %s of %s numbers have other bits.\n",
        one->threads, s_of(one->threads), tl_count(d), tl_count(n));
    if (!ring->seats[0].plan.forward.bits_any_ranks)
        printf("(This text is too short for the grid of blocks on which the bits are equal.)\n");
    printf("%d rank%s: %.2f s, %.3g GFLOP/s. 1 rank: %.2f s, %.3g GFLOP/s.\n", ring->ranks,
        s_of(ring->ranks), a, work / a, b, work / b);
}

/* ========================================================================== one passage */
enum { PASSAGE = 56 };

/* 1 if the passage is worth showing: mostly words, and no repetition of a few characters. */
static int readable(const uint8_t *b) {
    int letters = 0, gaps = 0, kinds_seen = 0;
    uint8_t seen[256] = {0};
    for (int i = 0; i < PASSAGE; i++) {
        letters += isalpha(b[i]) != 0;
        gaps += i && b[i] == ' ' && b[i - 1] == ' ';
        kinds_seen += !seen[b[i]]++;
    }
    return letters > PASSAGE * 2 / 3 && gaps < 3 && kinds_seen >= 14;
}

static int64_t best_passage(const text *x, const guess *g) {
    double least = 1e30;
    int64_t best = -1;
    for (int64_t t = x->count / 4; t + PASSAGE <= x->count; t++) {
        double bits = bits_a_byte(g + t, PASSAGE);
        if (bits >= least || !readable(x->byte + t)) continue;
        least = bits;
        best = t;
    }
    return best;
}

/* n bytes of the text from `first` on (which may be negative), one column each. */
static void show(const text *x, int64_t first, int64_t n) {
    for (int64_t t = first; t < first + n; t++) {
        int c = t < 0 || t >= x->count ? ' ' : x->byte[t];
        putchar(c >= 32 && c < 127 ? c : c == '\n' ? '|' : c < 32 ? ' ' : '?');
    }
}

/* The three keys that the last head weighs most for the byte at t, weights in double, and the ranks
 * that held them. */
static void show_sources(const text *x, const shard *s, const tl *ring, int64_t t) {
    double *score = (double *)get((size_t)t, sizeof(double)), all = 0, where;
    double most = scores(s, HEADS - 1, t - 1, score);
    for (int64_t k = 0; k < t; k++) all += score[k] = exp(score[k] - most);
    printf("   weight  at byte  of rank   the %d bytes before it, and the byte there\n", 40);
    for (int i = 0; i < 3; i++) {
        int64_t best = 0;
        for (int64_t k = 1; k < t; k++)
            if (score[k] > score[best]) best = k;
        if (score[best] / all < 1e-4) break;
        printf("  %6.1f %%  %7s  %7d   ", 100 * score[best] / all, tl_count(best),
                (int)tl_owner(ring, best, &where));
        show(x, best - 40, 40);
        printf(" -> ");
        show(x, best, 1);
        printf("\n");
        score[best] = 0;
    }
    free(score);
}

static void passage(const text *x, const shard *s, const tl *ring, const guess *g) {
    int64_t first = best_passage(x, g), t = first + PASSAGE / 2;
    double where;
    if (first < 0) {
        printf("No passage of %d letters to show in this text.\n", PASSAGE);
        return;
    }
    printf("The passage it foresaw best, %d bytes at %s for %.1f bits (| ends a line):\n",
            PASSAGE, tl_count(first), bits_a_byte(g + first, PASSAGE) * PASSAGE);
    printf("  text   ");
    show(x, first - 20, PASSAGE + 20);
    printf("\n  bits   %20s", "");
    for (int64_t i = first; i < first + PASSAGE; i++) {
        int bits = (int)((double)g[i].bits + 0.5);
        putchar(bits == 0 ? '.' : bits > 9 ? '+' : '0' + bits);
    }
    printf("   (. less than half a bit)\n");
    printf("For its byte '");
    show(x, t, 1);
    printf("' at %s (given %.1f %%) head \"%s\" of rank %d had looked at:\n", tl_count(t),
            100 * exp2(-(double)g[t].bits), kinds[HEADS - 1].name,
            (int)tl_owner(ring, t - 1, &where));
    show_sources(x, s, ring, t);
}

/* ========================================================================== main */
static int64_t number(const char *s, const char *what, int64_t least, int64_t most) {
    char *end = NULL;
    errno = 0;
    long long v = s ? strtoll(s, &end, 10) : 0;
    if (!s || end == s || *end || errno || v < least || v > most) {
        fprintf(stderr, "demo: %s needs a number from %lld to %lld%s%s\n", what, (long long)least,
                (long long)most, s ? ", not " : "", s ? s : "");
        exit(2);
    }
    return v;
}

static int is_number(const char *s) {
    return *s && strspn(s, "0123456789") == strlen(s) && access(s, F_OK);
}

static void usage(FILE *f) {
    fputs("usage: demo [--text FILE] [--tokens N] [--ranks R] [--out FILE] [[--] FILE ...] [N]\n"
          "  FILE ...  predict these, one after the other (default: this repository's files)\n"
          "            (64 MiB are read at most)\n"
          "  N         only the first N bytes (default: at most 65536, as fits a minute)\n"
          "  R         ranks of the ring, 1 to 64 (default: 4)\n"
          "  --out     timeline: .html, .svg or .json for Perfetto (default: beside the program)\n",
          f);
}

static void parse(options *o, int argc, char **argv) {
    int plain = 0;
    memset(o, 0, sizeof *o);
    o->ranks = 4;
    for (int i = 1; i < argc; i++) {
        const char *a = argv[i], *next = i + 1 < argc ? argv[i + 1] : NULL;
        if (!plain && !strcmp(a, "--")) plain = 1;
        else if (!plain && (!strcmp(a, "--help") || !strcmp(a, "-h"))) {
            usage(stdout);
            exit(0);
        } else if (!plain && !strcmp(a, "--tokens")) {
            o->tokens = number(next, a, 1, TEXT_LIMIT);
            i++;
        } else if (!plain && !strcmp(a, "--ranks")) {
            o->ranks = (int)number(next, a, 1, MAX_RANKS);
            i++;
        } else if (!plain && next && !strcmp(a, "--out")) o->out = next, i++;
        else if (!plain && next && !strcmp(a, "--text")) {
            if (o->file_count < MAX_FILES) o->files[o->file_count++] = next;
            i++;
        } else if (!plain && is_number(a)) o->tokens = number(a, "N", 1, TEXT_LIMIT);
        else if (!plain && a[0] == '-') {
            fprintf(stderr, "demo: %s: unknown, or its value is missing\n", a);
            usage(stderr);
            exit(2);
        } else if (o->file_count < MAX_FILES) o->files[o->file_count++] = a;
        else fail("too many files", NULL);
    }
}

/* Writes the timeline where --out says, or beside the program (the build directory). */
static void write_picture(tl *picture, const options *o, const char *program) {
    char path[4096];
    const char *slash = strrchr(program, '/');
    int dir = slash ? (int)(slash - program) + 1 : 0;
    if (o->out) snprintf(path, sizeof path, "%s", o->out);
    else snprintf(path, sizeof path, "%.*stimeline.html", dir, program);
    if (tl_write(picture, path)) fail(path, strerror(errno));
    printf("\nWho computed what when: open %s in a browser.\n", path);
}

/* The two passes: on the ring, and on one rank, whose shard is kept for what follows. */
static void run_passes(const text *x, int nth, pass *ring, pass *one, shard *all) {
    char what[64];
    int ranks = ring->ranks;
    snprintf(what, sizeof what, "%d rank%s", ranks, s_of(ranks));
    pass_run(ring, x, what);
    one->ranks = 1;
    one->threads = nth;
    one->keep = all;
    snprintf(what, sizeof what, "1 rank, %d thread%s", nth, s_of(nth));
    pass_run(one, x, what);
}

static void report(const text *x, const pass *ring, const pass *one, const shard *all) {
    guess *g = (guess *)get((size_t)x->count, sizeof(guess));
    double worst = 0;
    /* Row t of the pass predicts byte t + 1. Byte 0 is predicted from nothing. */
    predict(x, 0, 1, NULL, NULL, g);
    if (x->count > 1) worst = predict(x, 1, x->count - 1, ring->o, ring->lse, g + 1);
    table_lengths(x, g);
    printf("The probabilities of the 256 bytes sum to 1 within %.0e.\n", worst);
    printf("\n");
    passage(x, all, ring->picture, g);
    table_ranks(ring);
    compare(x, ring, one, check(x, all, ring->o, ring->lse));
    free(g);
}

int main(int argc, char **argv) {
    static text x;
    static options o;
    static pass ring, one;
    static tl picture;
    shard all = {0};
    char title[4400], note[256];
    const int cores = cores_here();
    parse(&o, argc, argv);
    int nth = cores < o.ranks ? cores : o.ranks;
    text_load(&x, &o);
    printf("Predicting %s, %s byte%s, by exact causal attention: %d heads of %d dimensions.\n",
           x.name, tl_count(x.count), s_of(x.count), HEADS, KEY_DIM);
    text_cut(&x, choose_tokens(&x, &o, nth));
    if (tl_open(&picture, o.ranks)) fail("out of memory", NULL);
    ring.ranks = o.ranks;
    ring.threads = 1;
    ring.picture = &picture;
    run_passes(&x, nth, &ring, &one, &all);
    report(&x, &ring, &one, &all);
    snprintf(title, sizeof title, "Exact attention over %s byte%s of %s on %d rank%s",
             tl_count(x.count), s_of(x.count), x.name, o.ranks, s_of(o.ranks));
    snprintf(note, sizeof note, "Causal, %d heads of %d dimensions, zigzag layout, f32, %s, %.3g "
             "GFLOP/s in all.", HEADS, KEY_DIM, ra_isa_name(ra_isa_best()),
             work_of(x.count, x.v_dim) / (double)pass_ns(&ring));
    picture.title = title;
    picture.note = note;
    picture.tokens = x.count;
    picture.cores = cores;
    write_picture(&picture, &o, argv[0]);
    tl_close(&picture);
    shard_close(&all);
    free(ring.o), free(ring.lse), free(one.o), free(one.lse), free(x.byte);
    return 0;
}
