/* A cache in files (examples/infer/cache_file.h) of a model of 1B parameters, with random weights
 * and rows: how fast it loads, beside plain reading of the same files; how long it takes until the
 * first token; how many bytes another turn adds.
 *
 *   make build/release/bench/cache && build/release/bench/cache FOLDER [TOKENS]
 *
 * FOLDER gets 32 KiB per token; TOKENS are 32768. Ratios are medians of 7 measurements in turn. */
#define _DEFAULT_SOURCE 1
#define _POSIX_C_SOURCE 200809L
#define RINGATTN_IMPLEMENTATION
#include "ringattn.h"
#include "examples/cores.h"
#include "examples/infer/engine.h"
#include "tests/model_file.h"

#include <time.h>

enum { LANES = 16, TURN = 100, TIMES = 7, WORDS = 32000 };

static const made_shape shape = { 16, 2048, 32, 8, 64, 8192, WORDS, 1 << 20, 0, RA_F16, 1 };

typedef struct work {
    char file[1024];
    gguf g;
    model m;
    int32_t *prompt;
    int64_t tokens;
    uint8_t *memory;                   /* what plain reading fills */
} work;

static void fail(const char *what, const char *why) {
    fprintf(stderr, "cache: %s: %s\n", what, why);
    exit(1);
}

/* The shape of files that infer_run accepts. */
static cache_shape shape_of(const work *w) {
    cache_shape s;
    memset(&s, 0, sizeof s);
    s.model = model_hash(&w->m);
    s.lanes = LANES;
    s.layers = (uint32_t)shape.layers;
    s.dtype = RA_F16;
    s.row_bytes = (uint32_t)(shape.kv_heads * shape.dim * 2);
    s.arithmetic = (uint32_t)(matmul_isa() + (ra_isa_best() << 8));
    return s;
}

/* Writes rows that no model has computed. */
static void make_cache(work *w) {
    const cache_shape s = shape_of(w);
    const size_t part = cache_part_bytes(&s);
    char why[INFER_WHY];
    cache_rows rows = { (uint8_t *)malloc(2 * part * s.layers), part };
    cache_lane lane[LANES];
    uint64_t hash = cache_hash_start(&s), state = 1;
    if (!rows.first) fail("rows", "no memory");
    for (size_t i = 0; i < 2 * part * s.layers; i += 2) {
        const float x = made_random(&state);
        (void)ra_convert(rows.first + i, RA_F16, &x, RA_F32, 1);
    }
    for (int i = 0; i < LANES; i++) {
        char name[1100];
        snprintf(name, sizeof name, "%s.%d", w->file, i);
        (void)unlink(name);
        if (!cache_lane_open(&lane[i], w->file, &s, i, 1, 0, why)) fail(name, why);
    }
    for (int64_t i = 0; i * CACHE_RUN < w->tokens; i++) {
        const cache_run run = cache_run_of(w->prompt, i, w->tokens, &hash);
        if (!cache_lane_append(&lane[i % LANES], &run, rows, why)) fail("append", why);
    }
    for (int i = 0; i < LANES; i++) {
        if (!cache_lane_sync(&lane[i], why)) fail("sync", why);
        cache_lane_close(&lane[i]);
    }
    if (!cache_manifest_write(w->file, &s, 0, w->tokens, hash, why)) fail("manifest", why);
    free(rows.first);
}

static int64_t size_of(const work *w, int lane) {
    struct stat about;
    char name[1100];
    snprintf(name, sizeof name, "%s.%d", w->file, lane);
    if (stat(name, &about)) fail(name, strerror(errno));
    return (int64_t)about.st_size;
}

static int64_t all_bytes(const work *w) {
    int64_t n = 0;
    for (int i = 0; i < LANES; i++) n += size_of(w, i);
    return n;
}

/* Reads a lane's file as it is, to memory of its own. */
static void read_lane(void *ctx, int64_t lane) {
    const work *w = (const work *)ctx;
    const int64_t size = size_of(w, (int)lane);
    char name[1100];
    int fd;
    snprintf(name, sizeof name, "%s.%d", w->file, (int)lane);
    fd = open(name, O_RDONLY);
    for (int64_t at = 0; at < size;) {
        const int64_t left = size - at, n = left < 1 << 20 ? left : 1 << 20;
        if (pread(fd, w->memory + lane * size + at, (size_t)n, (off_t)at) != n)
            fail(name, "cannot be read");
        at += n;
    }
    close(fd);
}

/* Reads and checks the records of a lane, as a run does that loads them. */
static void load_lane(void *ctx, int64_t lane) {
    const work *w = (const work *)ctx;
    const cache_shape s = shape_of(w);
    const size_t part = cache_part_bytes(&s);
    uint64_t hash = cache_hash_start(&s);
    char why[INFER_WHY];
    cache_lane file;
    int64_t guess = -1;
    if (!cache_lane_open(&file, w->file, &s, (int32_t)lane, 0, 1, why)) fail("open", why);
    for (int64_t i = 0; i * CACHE_RUN < w->tokens; i++) {
        const cache_run run = cache_run_of(w->prompt, i, w->tokens, &hash);
        cache_rows to;
        int32_t n;
        if (i % LANES != lane) continue;
        guess = cache_lane_find(&file, &run, file.records, guess + 1, &n);
        to.first = w->memory + (size_t)i * part;
        to.apart = (size_t)w->tokens / CACHE_RUN * part;
        if (n < CACHE_RUN || !cache_lane_read(&file, guess, to)) fail(file.path, "is damaged");
    }
    cache_lane_close(&file);
}

/* Seconds of the clock and of the processors. */
typedef struct seconds { double clock, processor; } seconds;

static seconds now(void) {
    struct timespec t;
    seconds s;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    s.processor = (double)t.tv_sec + (double)t.tv_nsec / 1e9;
    s.clock = (double)ra_now_ns() / 1e9;
    return s;
}

static seconds since(seconds start) {
    seconds s = now();
    s.clock -= start.clock;
    s.processor -= start.processor;
    return s;
}

/* Reads all lanes in one of the two ways to memory that nobody has touched. */
static seconds timed(work *w, pool *threads, void (*lane)(void *ctx, int64_t lane)) {
    const seconds start = now();
    w->memory = (uint8_t *)calloc((size_t)all_bytes(w), 1);
    if (!w->memory) fail("reading", "no memory");
    pool_run(threads, lane, w, LANES);
    free(w->memory);
    return since(start);
}

/* Loads, and generates `predict` tokens. Returns what infer_run says. */
static infer_result run(work *w, int64_t tokens, int64_t predict, int save) {
    infer_options o;
    infer_result r;
    memset(&o, 0, sizeof o);
    o.lanes = LANES;
    o.threads = cores_here();
    o.cache_dtype = RA_F16;
    o.predict = predict;
    o.load = w->file;
    if (save) o.save = w->file;
    if (!infer_run(&w->m, &o, w->prompt, tokens, &r)) fail("infer_run", r.why);
    return r;
}

static int by_size(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static double median(double *x) {
    qsort(x, TIMES, sizeof *x, by_size);
    return x[TIMES / 2];
}

static void measure(work *w) {
    double ratio[TIMES], work_ratio[TIMES], rate[TIMES], first[TIMES], first_work[TIMES];
    pool threads;
    const int64_t bytes = all_bytes(w);
    infer_result r;
    pool_start(&threads, cores_here() - 1);
    (void)timed(w, &threads, read_lane);           /* now it is in memory, if it fits */
    for (int i = 0; i < TIMES; i++) {
        const seconds plain = timed(w, &threads, read_lane);
        const seconds load = timed(w, &threads, load_lane), start = now();
        r = run(w, w->tokens, 1, 0);
        const seconds all = since(start);
        if (r.loaded != w->tokens - INFER_SHORT - 1) fail(w->file, "is not loaded");
        ratio[i] = plain.clock / load.clock;
        work_ratio[i] = plain.processor / load.processor;
        rate[i] = (double)bytes / load.clock / 1e9;
        first[i] = all.clock;
        first_work[i] = all.processor;
        infer_free(&r);
    }
    pool_stop(&threads);
    printf("load: %.2f of the speed of plain reading (%.2f by processor time), %.1f GB/s\n",
           median(ratio), median(work_ratio), median(rate));
    printf("first token after %lld tokens: %.2f s (%.2f s of processor time)\n",
           (long long)w->tokens, median(first), median(first_work));
    r = run(w, w->tokens + TURN, 0, 1);
    printf("a turn of %d tokens: appends %.2f of their bytes\n", TURN,
           (double)(all_bytes(w) - bytes) / ((double)bytes / (double)w->tokens * TURN));
    infer_free(&r);
}

int main(int argc, char **argv) {
    static work w;
    made_file f;
    char why[INFER_WHY];
    w.tokens = argc > 2 ? strtoll(argv[2], NULL, 10) / 256 * 256 : 32768;
    if (argc < 2 || w.tokens < 256 || strlen(argv[1]) > 900) {
        fprintf(stderr, "cache FOLDER [TOKENS, from 256 on]\n");
        return 1;
    }
    snprintf(w.file, sizeof w.file, "%s/bench.kv", argv[1]);
    w.prompt = (int32_t *)calloc((size_t)w.tokens + TURN, sizeof *w.prompt);
    if (!w.prompt) fail("the prompt", "no memory");
    for (int64_t i = 0; i < w.tokens + TURN; i++) w.prompt[i] = (int32_t)(i * 7919 % WORDS);
    made_model(&f, &shape);
    if (!gguf_open(&w.g, f.data, f.size, why) || !model_open(&w.m, &w.g, why)) fail("model", why);
    make_cache(&w);
    measure(&w);
    for (int i = -1; i < LANES; i++) {
        char name[1100];
        if (i < 0) snprintf(name, sizeof name, "%s", w.file);
        else snprintf(name, sizeof name, "%s.%d", w.file, i);
        (void)unlink(name);
    }
    free(w.prompt);
    model_close(&w.m);
    gguf_close(&w.g);
    free(f.data);
    return 0;
}
