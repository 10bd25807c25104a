#ifndef RINGATTN_TESTS_HARNESS_H
#define RINGATTN_TESTS_HARNESS_H

/* A test harness in plain C99. A program defines tests with TEST(name) { ... }, lists them as
 * ENTRY(name) in a table and hands that to h_main; a test left out of the table is a compiler
 * warning (unused function). Command line:
 * [filter] [--seed N] [--case I] [--long] [--other] [--list] [--first] [-v]
 * [--from N] [--count N], for tests that take seeds
 * --first ends the program at the first failure.
 *
 * Whatever is random comes from h_case_rng(i), which depends on --seed, the test's name and i
 * alone, so that `filter --seed N --case I` runs one case again. A failing check prints file, line
 * and the context (h_context), which tests set to a line that describes the case. */
#include <math.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define TEST(name)  static void test_##name(void)
#define ENTRY(name) { #name, test_##name }
#define CHECK(x)    h_check((x) ? 1 : 0, #x, __FILE__, __LINE__)
#define SOUND(world, x) h_sound(&(world)->wrong, (x) ? 1 : 0, #x, __FILE__, __LINE__)
#define CHECK_EQ(got, want) \
    h_check_eq((int64_t)(got), (int64_t)(want), #got " == " #want, __FILE__, __LINE__)
#define CHECK_CLOSE(got, want, n, atol, rtol) \
    h_check_close(h_args(#got, __FILE__, __LINE__), got, want, n, atol, rtol)
#define CHECK_BITS(got, want, bytes) \
    h_check_bits(h_args(#got, __FILE__, __LINE__), got, want, (size_t)(bytes))

/* 1 if programs run several times slower than elsewhere: under a sanitizer, on an emulated machine
 * (-DH_SLOW=1). Tests of bits over every mask then have at most 3 ranks, as with scalar kernels. */
#ifndef H_SLOW
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define H_SLOW 1
#else
#define H_SLOW 0
#endif
#endif

/* Functions that only the tests need: the sanitizers of address and of undefined behaviour are for
 * the library, and would take a third of the time here. */
#define H_FAST inline __attribute__((no_sanitize("address"), no_sanitize("undefined")))

typedef struct h_test { const char *name; void (*run)(void); } h_test;
typedef struct h_rng { uint64_t state; } h_rng;
typedef struct h_site { const char *what, *file; int line; } h_site;

typedef struct h_globals {
    uint64_t seed;
    int64_t only_case, case_now;       /* -1: all, none */
    int64_t from, count;               /* count 0: the test decides */
    int verbose, large, other, first, checks, bad, skipped;
    const char *test, *program, *filter;
    char context[900];
} h_globals;
static h_globals h_run = { 1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0, 0, "", "", "", "" };

static inline h_site h_args(const char *what, const char *file, int line) {
    h_site s;
    s.what = what; s.file = file; s.line = line;
    return s;
}

/* Describes the case, for the next failure. */
__attribute__((format(printf, 1, 2))) static inline void h_context(const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(h_run.context, sizeof h_run.context, format, args);
    va_end(args);
}

/* Adds to the description. */
__attribute__((format(printf, 1, 2))) static inline void h_more(const char *format, ...) {
    const size_t n = strlen(h_run.context);
    va_list args;
    va_start(args, format);
    vsnprintf(h_run.context + n, sizeof h_run.context - n, format, args);
    va_end(args);
}

/* Counts a failure and prints where; the first of a test also prints the case and how to rerun. */
static inline void h_fail(h_site at, const char *message) {
    printf("%s:%d: %s: %s: %s\n", at.file, at.line, h_run.test, at.what, message);
    if (h_run.context[0]) {
        printf("    case: %s\n", h_run.context);
        h_run.context[0] = 0;
    }
    if (h_run.case_now >= 0) {
        printf("    rerun: %s %s --seed %llu --case %lld\n", h_run.program, h_run.test,
               (unsigned long long)h_run.seed, (long long)h_run.case_now);
    }
    h_run.bad++;
    if (h_run.first) exit(1);
}

static inline int h_check(int ok, const char *what, const char *file, int line) {
    h_run.checks++;
    if (!ok) h_fail(h_args(what, file, line), "is false");
    return ok;
}

static inline int h_check_eq(int64_t got, int64_t want, const char *what, const char *file,
                             int line) {
    char m[80];
    h_run.checks++;
    if (got == want) return 1;
    snprintf(m, sizeof m, "%lld, expected %lld", (long long)got, (long long)want);
    h_fail(h_args(what, file, line), m);
    return 0;
}

/* As h_check, for a world, whose *wrong is set: only the first failure is reported. */
static inline int h_sound(int *wrong, int ok, const char *what, const char *file, int line) {
    h_run.checks++;
    if (ok) return 1;
    if (!*wrong) h_fail(h_args(what, file, line), "is false");
    *wrong = 1;
    return 0;
}

/* How far got is from want, in units of tol. NaN and infinities must be the same. */
static inline double h_distance(double got, double want, double tol) {
    if (got != got || want != want) return (got != got) == (want != want) ? 0 : 1e300;
    if (got > 1e300 || got < -1e300 || want > 1e300 || want < -1e300) {
        return (got > 1e300) == (want > 1e300) && (got < -1e300) == (want < -1e300) ? 0 : 1e300;
    }
    return fabs(got - want) / tol;
}

/* |got - want| <= atol + rtol |want| for all n. Reports the worst. */
static inline int h_check_close(h_site at, const float *got, const double *want, int64_t n,
                                double atol, double rtol) {
    double worst = -1;
    int64_t w = 0;
    char m[200];
    h_run.checks++;
    for (int64_t i = 0; i < n; i++) {
        double far = h_distance((double)got[i], want[i], atol + rtol * fabs(want[i]));
        if (far > worst) { worst = far; w = i; }
    }
    if (worst <= 1) return 1;
    snprintf(m, sizeof m, "worst at %lld of %lld: %.9g, expected %.9g (%.3g times the tolerance)",
             (long long)w, (long long)n, (double)got[w], want[w], worst);
    h_fail(at, m);
    return 0;
}

/* The same bytes; reports the first 32-bit word that differs and how many do. */
static inline int h_check_bits(h_site at, const void *got, const void *want, size_t bytes) {
    const uint8_t *a = (const uint8_t *)got, *b = (const uint8_t *)want;
    size_t first = bytes, differ = 0;
    float fa = 0, fb = 0;
    char m[200];
    h_run.checks++;
    if (memcmp(a, b, bytes) == 0) return 1;
    for (size_t i = 0; i + 4 <= bytes; i += 4) {
        if (memcmp(a + i, b + i, 4) == 0) continue;
        if (first == bytes) first = i;
        differ++;
    }
    if (first + 4 <= bytes) { memcpy(&fa, a + first, 4); memcpy(&fb, b + first, 4); }
    snprintf(m, sizeof m, "%llu of %llu words differ, the first at %llu: %.9g and %.9g",
             (unsigned long long)differ, (unsigned long long)(bytes / 4),
             (unsigned long long)(first / 4), (double)fa, (double)fb);
    h_fail(at, m);
    return 0;
}

/* One parameter of a case, 0..n - 1: the last digit in base n of the case's number, which loses it.
 * The parameter that is taken first changes from case to case. */
static inline int h_pick(int64_t *number, int n) {
    const int digit = (int)(*number % n);
    *number /= n;
    return digit;
}

/* Says that this test cannot run here. */
static inline void h_skip(const char *why) {
    printf("%s: skipped: %s\n", h_run.test, why);
    h_run.skipped = 1;
}

/* PCG XSH RR 64/32 (O'Neill, 2014), fixed stream. */
static H_FAST uint32_t h_next(h_rng *r) {
    uint64_t s = r->state;
    uint32_t x = (uint32_t)(((s >> 18) ^ s) >> 27), turn = (uint32_t)(s >> 59);
    r->state = s * 6364136223846793005u + 1442695040888963407u;
    return (x >> turn) | (x << ((32u - turn) & 31u));
}

/* From and to are included. */
static H_FAST int64_t h_range(h_rng *r, int64_t from, int64_t to) {
    return from + (int64_t)(h_next(r) % (uint64_t)(to - from + 1));
}

static inline int h_one_in(h_rng *r, int n) { return h_next(r) % (uint32_t)n == 0; }

/* Marsaglia's polar form. */
static H_FAST float h_normal(h_rng *r) {
    double x, y, s;
    do {
        x = h_next(r) * (2.0 / 4294967296.0) - 1;
        y = h_next(r) * (2.0 / 4294967296.0) - 1;
        s = x * x + y * y;
    } while (s >= 1 || s == 0);
    return (float)(x * sqrt(-2 * log(s) / s));
}

/* Begins case i of this test. 0 if --case selects another one. */
static inline int h_case(int64_t i) {
    h_run.case_now = i;
    h_run.context[0] = 0;
    return (h_run.only_case < 0 || h_run.only_case == i) && h_run.bad < 5;
}

/* For tests whose cases are the entries of a table in two variants each: 1 if this run has
 * `variant`, 0 or 1, of entry i. A run has one variant of each entry, with --other the other one,
 * and with --long or --case both. */
static inline int h_variant(int64_t i, int variant) {
    return h_run.large || h_run.only_case >= 0 || (int)((i + h_run.other) & 1) == variant;
}

static inline h_rng h_case_rng(int64_t i) {
    h_rng r;
    const char *c;
    r.state = h_run.seed * 0x9E3779B97F4A7C15u + (uint64_t)i * 0xD1B54A32D192ED03u + 1;
    for (c = h_run.test; *c; c++) r.state = (r.state ^ (unsigned char)*c) * 0x100000001B3u;
    h_next(&r); h_next(&r);
    return r;
}

/* The number that follows an option; "random" draws one. Anything else ends the program. */
static inline uint64_t h_number(const char *option, const char *text) {
    char *end;
    const uint64_t n = strtoull(text, &end, 0);
    if (!strcmp(text, "random")) return (uint64_t)time(NULL) * 1000003 % 1000000000000;
    if (*text && !*end) return n;
    printf("%s %s: must be a number or random\n0 passed, 1 failed\n", option, text);
    exit(2);
}

static inline int h_arguments(int argc, char **argv) {
    int list = 0;
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--seed") && i + 1 < argc)
            h_run.seed = h_number(argv[i], argv[i + 1]), i++;
        else if (!strcmp(argv[i], "--case") && i + 1 < argc)
            h_run.only_case = (int64_t)h_number(argv[i], argv[i + 1]), i++;
        else if (!strcmp(argv[i], "--from") && i + 1 < argc)
            h_run.from = (int64_t)h_number(argv[i], argv[i + 1]), i++;
        else if (!strcmp(argv[i], "--count") && i + 1 < argc)
            h_run.count = (int64_t)h_number(argv[i], argv[i + 1]), i++;
        else if (!strcmp(argv[i], "--long")) h_run.large = 1;
        else if (!strcmp(argv[i], "--other")) h_run.other = 1;
        else if (!strcmp(argv[i], "--list")) list = 1;
        else if (!strcmp(argv[i], "--first")) h_run.first = 1;
        else if (!strcmp(argv[i], "-v")) h_run.verbose = 1;
        else h_run.filter = argv[i];
    }
    return list;
}

static inline int h_main(int argc, char **argv, const h_test *tests, size_t n) {
    int passed = 0, failed = 0, skipped = 0, list = h_arguments(argc, argv);
    h_run.program = argv[0];
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (!list) printf("seed %llu\n", (unsigned long long)h_run.seed);
    for (size_t i = 0; i < n; i++) {
        if (h_run.filter[0] && !strstr(tests[i].name, h_run.filter)) continue;
        if (list) { printf("%s\n", tests[i].name); continue; }
        h_run.test = tests[i].name;
        h_run.checks = h_run.bad = h_run.skipped = 0;
        h_run.case_now = -1;
        h_run.context[0] = 0;
        tests[i].run();
        /* A test that checks nothing proves nothing. With --case it may lack that case. */
        if (!h_run.checks && !h_run.skipped && h_run.only_case < 0) {
            h_fail(h_args("test", __FILE__, __LINE__), "no check ran");
        }
        if (h_run.bad) failed++;
        else if (h_run.skipped) skipped++;
        else passed++;
        if (h_run.verbose || h_run.bad) {
            printf("%s %s (%d checks)\n", h_run.bad ? "FAIL" : "ok", h_run.test, h_run.checks);
        }
    }
    if (list) return 0;
    printf("%d passed, %d failed", passed, failed);
    if (skipped) printf(", %d skipped", skipped);
    printf("\n");
    return failed != 0;
}

#endif
