/* Bad input: every field of every descriptor, wrong in every way. Proves that a refusal has the
 * right status, names the field, gives the wrong value and what is allowed, and changes nothing.
 * One status of one field is one check. No random descriptor leads to a crash. Every n-th
 * allocation fails once. */
#define _POSIX_C_SOURCE 200112L
#include "hooks.h"
#include "small.h"

enum { MANY = 4096, POOL = 1 << 22 };

/* -------------------------------------------------------------------------- what was refused */

typedef struct refusal { int status, scope; char field[40], form[RA_TEXT_BYTES]; } refusal;

/* Fields are named together with the call: `out` of two calls is two fields. */
enum { IN_DESC, IN_PLAN, IN_RING, IN_WORLD, IN_TENSORS, IN_JOB, IN_ATTENTION,
       IN_STATE, IN_CACHE };
static refusal refusals[400];
static int refusal_count, scope;
static int64_t produced[64];           /* by -status */

/* The sentence without its numbers and without the names of constants, of which the kind remains
 * ("RA_MASK_#"): what is left belongs to the check. RA_Q8_0 and RA_Q4_0 are of one kind. */
static void form_of(const char *text, char *form) {
    size_t n = 0;
    for (; *text; text++) {
        int digit = *text >= '0' && *text <= '9';
        if (!strncmp(text, "RA_", 3)) {
            size_t length = strspn(text, "ABCDEFGHIJKLMNOPQRSTUVWXYZ_0123456789");
            size_t kind = 3 + strcspn(text + 3, "_ ");
            if (text[kind] == '_') kind++;
            if (kind > length) kind = length;
            memcpy(form + n, !strncmp(text, "RA_Q8_0", 7) ? "RA_Q4_0" : text, kind);
            n += kind;
            text += length - 1;
            digit = 1;
        }
        if (digit && n && form[n - 1] == '#') continue;
        form[n++] = digit ? '#' : *text;
        if (n > 1 && form[n - 1] == '#' && form[n - 2] == '-') { form[n - 2] = '#'; n--; }
    }
    form[n] = 0;
}

/* A value outside a range: the sentence gives the range, or says what is wrong with the sign. */
static int says_what_is_allowed(const ra_error *e) {
    static const char *const ways[] = { "..", "must be", "negative", "positive", "above",
                                        "multiple", "not RA_", "entry", "step", "RA_CAP_" };
    if (strstr(e->text, "too large") || strstr(e->text, "out of range")) return 0;
    if (e->status != RA_E_RANGE && e->status != RA_E_ENUM) return 1;
    for (size_t i = 0; i < sizeof ways / sizeof ways[0]; i++)
        if (strstr(e->text, ways[i])) return 1;
    return 0;
}

/* Checks the form of a refusal. Ranges have two ends, so two sentences may share RA_E_RANGE. */
static void record(const ra_error *e, ra_status status) {
    char form[RA_TEXT_BYTES];
    int other = -1;
    CHECK_EQ(e->status, status);
    CHECK(memchr(e->field, 0, sizeof e->field) && e->field[0]);
    CHECK(memchr(e->text, 0, sizeof e->text) && strlen(e->text) >= 4 && !strpbrk(e->text, "#@"));
    if (!CHECK(says_what_is_allowed(e))) printf("    %s: \"%s\"\n", e->field, e->text);
    if (status > -64) produced[-status]++;
    form_of(e->text, form);
    for (int i = 0; i < refusal_count; i++) {
        if (refusals[i].status != status || refusals[i].scope != scope ||
            strcmp(refusals[i].field, e->field)) continue;
        if (!strcmp(refusals[i].form, form) || status == RA_E_RANGE) return;
        other = i;
    }
    if (other >= 0) {
        h_context("%d %s: \"%s\" and \"%s\"", status, e->field, refusals[other].form, form);
        h_fail(h_args("refusal", __FILE__, __LINE__), "one status and field for two checks");
    }
    if (refusal_count == (int)(sizeof refusals / sizeof refusals[0])) return;
    refusals[refusal_count].status = status;
    refusals[refusal_count].scope = scope;
    memcpy(refusals[refusal_count].field, e->field, sizeof e->field);
    memcpy(refusals[refusal_count++].form, form, sizeof form);
}

/* got is what a call returned and e what it filled in. words: what the sentence must contain; null:
 * any sentence. */
static void refused(ra_status got, const ra_error *e, ra_status status, const char *field,
                    const char *words) {
    int ok = CHECK_EQ(got, status);
    if (!ok || strcmp(e->field, field)) {
        h_fail(h_args("refusal", __FILE__, __LINE__), "not the one that was expected");
        printf("    got %s %s: %s\n    expected %s %s\n", ra_status_text(got), e->field, e->text,
               ra_status_text(status), field);
        return;
    }
    record(e, status);
    if (words && !CHECK(strstr(e->text, words) != NULL))
        printf("    %s: \"%s\" does not say %s\n", e->field, e->text, words);
}

/* As `words`, for a number that is only known here. */
static const char *number(int64_t n) {
    static char text[24];
    snprintf(text, sizeof text, "%lld", (long long)n);
    return text;
}

/* -------------------------------------------------------------------------- ra_desc */

enum { ONE, FOUR, INTERVALS, DOCUMENTS, RUNS, ARRAY, MLA, BATCH, ROUNDS, BASES };

static int32_t ints[MANY];
static int64_t longs[MANY];
static int64_t docs[MANY], lengths[MANY], rows[MANY];
static int32_t counts[MANY];
static ra_run runs[MANY];

static void base_arrays(void) {
    for (int i = 0; i < MANY; i++) {
        ints[i] = i % 300;
        longs[i] = i;
        docs[i] = i * 100;
        lengths[i] = 300 - i % 2;
        rows[i] = runs[i].count = 75;
        counts[i] = 1;
        runs[i].first = i * 75;
        runs[i].stride = 1;
    }
}

static void base_fields(ra_desc *d, int base) {
    *d = ra_desc_make(4, 2, 8, RA_F32, RA_MASK_CAUSAL);
    d->tokens = 300;
    if (base == ONE) return;
    d->ranks = 4;
    d->layout.kind = base == RUNS ? RA_LAYOUT_RUNS : base == ARRAY ? RA_LAYOUT_ARRAY
                                                                   : RA_LAYOUT_CONTIGUOUS;
    if (base == INTERVALS) {
        d->mask.kind = RA_MASK_INTERVALS;
        d->mask.lo = d->mask.hi = ints;
        d->mask.interval_count = 300;
    } else if (base == DOCUMENTS) {
        d->mask.doc_first = docs;
        d->mask.doc_count = 3;
    } else if (base == RUNS) {
        d->layout.q_runs = d->layout.k_runs = runs;
        d->layout.q_run_count = d->layout.k_run_count = counts;
    } else if (base == ARRAY) {
        d->layout.q_rows = d->layout.k_rows = rows;
    } else if (base == MLA) {
        d->v_in_k = 1;
        d->v_dim = 4;
        d->v_dtype = 0;
    } else if (base == BATCH) {
        d->sequences = 2;
        d->tokens_of = lengths;
    } else if (base == ROUNDS) {
        d->order = RA_ORDER_ROUNDS;
    }
}

static void base_desc(ra_desc *d, int base) {
    base_arrays();
    base_fields(d, base);
}

enum { I32, I64, F32, PTR };           /* types of fields */
typedef struct row {                   /* one field of one base set to one value */
    int base;
    size_t at;
    const char *field;                 /* that the refusal names */
    int kind;
    int64_t value;                     /* PTR: 0 null, 1 some memory */
    int status;
    const char *words;                 /* that the sentence must contain */
} row;

static void set_field(void *base, size_t at, int kind, int64_t value) {
    uint8_t *p = (uint8_t *)base + at;
    int32_t narrow = (int32_t)value;
    float real = (float)value;
    void *some = value ? (void *)longs : NULL;
    if (kind == I32) memcpy(p, &narrow, 4);
    if (kind == I64) memcpy(p, &value, 8);
    if (kind == F32) memcpy(p, &real, 4);
    if (kind == PTR) memcpy(p, &some, sizeof some);
}

/* A field that is named itself, and one for whose value another field is named. */
#define D(f) offsetof(ra_desc, f), #f
#define D_AS(f, name) offsetof(ra_desc, f), name
#define TOP ((int64_t)RA_MAX_POSITION)
static const row desc_rows[] = {
    { ONE, D(sequences), I32, -1, RA_E_RANGE, "-1 is not in 0..1048576" },
    { ONE, D(sequences), I32, INT32_MAX, RA_E_RANGE, "2147483647 is not in 0..1048576" },
    { ONE, D(ranks), I32, -1, RA_E_RANGE, "-1 is not in 0..4096" },
    { ONE, D(ranks), I32, 4097, RA_E_RANGE, "4097 is not in 0..4096" },
    { ONE, D(rank), I32, 1, RA_E_RANGE, "below ranks, which is 1; it was 1" },
    { FOUR, D(rank), I32, 4, RA_E_RANGE, "below ranks, which is 4; it was 4" },
    { FOUR, D(rank), I32, -1, RA_E_RANGE, "below ranks, which is 4; it was -1" },
    { ONE, D(q_heads), I32, 0, RA_E_UNSET, "1..65536" },
    { ONE, D(q_heads), I32, -4, RA_E_RANGE, "-4 is not in 1..65536" },
    { ONE, D(q_heads), I32, 5, RA_E_SHAPE, "5 is not a multiple of kv_heads, 2" },
    { ONE, D(kv_heads), I32, 0, RA_E_UNSET, "1..65536" },
    { ONE, D(kv_heads), I32, -2, RA_E_RANGE, "-2 is not in 1..65536" },
    { ONE, D_AS(kv_heads, "q_heads"), I32, 3, RA_E_SHAPE, "4 is not a multiple of kv_heads, 3" },
    { ONE, D_AS(kv_heads, "q_heads"), I32, 8, RA_E_SHAPE, "4 is not a multiple of kv_heads, 8" },
    { ONE, D(k_dim), I32, 0, RA_E_UNSET, "1..1024" },
    { ONE, D(k_dim), I32, -1, RA_E_RANGE, "-1 is not in 1..1024" },
    { ONE, D(k_dim), I32, 1025, RA_E_RANGE, "1025 is not in 1..1024" },
    { ONE, D(v_dim), I32, 0, RA_E_UNSET, "1..1024" },
    { ONE, D(v_dim), I32, -1, RA_E_RANGE, "-1 is not in 1..1024" },
    { ONE, D(v_dim), I32, 1025, RA_E_RANGE, "1025 is not in 1..1024" },
    { ONE, D(q_dtype), I32, 0, RA_E_UNSET, "RA_Q4_0, not 0" },
    { ONE, D(q_dtype), I32, 6, RA_E_ENUM, "RA_Q4_0, not 6" },
    { ONE, D(q_dtype), I32, RA_Q8_0, RA_E_UNSUPPORTED, "is RA_Q8_0, which is for K and V only" },
    { ONE, D(o_dtype), I32, RA_Q8_0, RA_E_UNSUPPORTED, "is RA_Q8_0, which is for K and V only" },
    { ONE, D(q_dtype), I32, RA_Q4_0, RA_E_UNSUPPORTED, "is RA_Q4_0, which is for K and V only" },
    { ONE, D(o_dtype), I32, RA_Q4_0, RA_E_UNSUPPORTED, "is RA_Q4_0, which is for K and V only" },
    { ONE, D(q_dtype), I32, -1, RA_E_ENUM, "RA_Q4_0, not -1" },
    { ONE, D(k_dtype), I32, 0, RA_E_UNSET, "RA_Q4_0, not 0" },
    { ONE, D(k_dtype), I32, 17, RA_E_ENUM, "RA_Q4_0, not 17" },
    { ONE, D(v_dtype), I32, 0, RA_E_UNSET, "RA_Q4_0, not 0" },
    { ONE, D(v_dtype), I32, 6, RA_E_ENUM, "RA_Q4_0, not 6" },
    { ONE, D(o_dtype), I32, 0, RA_E_UNSET, "RA_Q4_0, not 0" },
    { ONE, D(o_dtype), I32, -7, RA_E_ENUM, "RA_Q4_0, not -7" },
    { ONE, D_AS(v_column, "v_in_k"), I32, 1, RA_E_SHAPE, "is 0, but v_column is 1" },
    { ONE, D(v_in_k), I32, 2, RA_E_RANGE, "2 is not in 0..1" },
    { ONE, D(v_in_k), I32, -1, RA_E_RANGE, "-1 is not in 0..1" },
    { MLA, D(v_dtype), I32, RA_BF16, RA_E_SHAPE, "RA_F32, because v_in_k is 1; it was RA_BF16" },
    { MLA, D(v_column), I32, 5, RA_E_SHAPE, "5 + v_dim is more than k_dim, 8" },
    { MLA, D_AS(v_dim, "v_column"), I32, 9, RA_E_SHAPE, "0 + v_dim is more than k_dim, 8" },
    { MLA, D(v_column), I32, -1, RA_E_RANGE, "-1 is not in 0..1024" },
    { MLA, D(v_column), I32, INT32_MAX, RA_E_RANGE, "2147483647 is not in 0..1024" },
    { ONE, D(scores), I32, 8, RA_E_ENUM, "RA_SCORE_SINKS, or 0; it was 8" },
    { ONE, D(scores), I32, 16, RA_E_ENUM, "RA_SCORE_SINKS, or 0; it was 16" },
    { ONE, D(scores), I32, -1, RA_E_ENUM, "RA_SCORE_SINKS, or 0; it was -1" },
    { ONE, D(tokens), I64, 0, RA_E_UNSET, "1..2147483632" },
    { ONE, D(tokens), I64, -300, RA_E_RANGE, "-300 is not in 1..2147483632" },
    { ONE, D(tokens), I64, TOP + 1, RA_E_RANGE, "2147483633 is not in 1..2147483632" },
    { ONE, D(tokens), I64, INT64_MAX, RA_E_RANGE, "9223372036854775807 is not in 1..2147483632" },
    { ONE, D(kv_tokens), I64, -1, RA_E_RANGE, "-1 is not in 0..2147483632" },
    { ONE, D(kv_tokens), I64, TOP + 1, RA_E_RANGE, "2147483633 is not in 0..2147483632" },
    { ONE, D(q_offset), I64, -1, RA_E_RANGE,
      "-1 is not in 0..2147483632; queries before the first key (causal, fewer keys than queries) "
      "have position -1 in t.q_pos" },
    { ONE, D(q_offset), I64, TOP + 1, RA_E_RANGE, "2147483633 is not in 0..2147483632" },
    { ONE, D(q_offset), I64, TOP - 299, RA_E_OVERFLOW,
      "2147483333 + tokens is more than 2147483632" },
    { ONE, D(mask.kind), I32, 0, RA_E_UNSET,
      "must be RA_MASK_NONE, RA_MASK_CAUSAL or RA_MASK_INTERVALS; it was 0" },
    { ONE, D(mask.kind), I32, 4, RA_E_ENUM,
      "RA_MASK_NONE, RA_MASK_CAUSAL or RA_MASK_INTERVALS; it was 4" },
    { ONE, D(mask.kind), I32, -1, RA_E_ENUM,
      "RA_MASK_NONE, RA_MASK_CAUSAL or RA_MASK_INTERVALS; it was -1" },
    { ONE, D(mask.causal_block), I32, -1, RA_E_RANGE, "-1 is not in 0..1073741824" },
    { INTERVALS, D(mask.causal_block), I32, 16, RA_E_SHAPE,
      "16 needs RA_MASK_CAUSAL, not RA_MASK_INTERVALS" },
    { ONE, D(mask.window), I64, -1, RA_E_RANGE, "-1 is not in 0..2147483632; 0 is no limit" },
    { ONE, D(mask.window), I64, INT64_MIN, RA_E_RANGE,
      "-9223372036854775808 is not in 0..2147483632" },
    { INTERVALS, D(mask.window), I64, 5, RA_E_SHAPE, "is 5; it must be 0 with RA_MASK_INTERVALS" },
    { ONE, D(mask.right_limit), I64, -1, RA_E_RANGE, "-1 is not in 0..2147483632" },
    { ONE, D(mask.right_limit), I64, 7, RA_E_SHAPE, "7 needs RA_MASK_NONE, not RA_MASK_" },
    { INTERVALS, D(mask.right_limit), I64, 7, RA_E_SHAPE, "7 needs RA_MASK_NONE, not RA_MASK_" },
    { ONE, D(mask.prefix), I64, -1, RA_E_RANGE, "-1 is not in 0..2147483632" },
    { INTERVALS, D(mask.prefix), I64, 3, RA_E_SHAPE, "is 3; it must be 0 with RA_MASK_INTERVALS" },
    { ONE, D(mask.keep), I64, -1, RA_E_RANGE, "-1 is not in 0..2147483632" },
    { INTERVALS, D(mask.keep), I64, 3, RA_E_SHAPE, "is 3; it must be 0 with RA_MASK_INTERVALS" },
    { ONE, D(mask.doc_count), I64, -1, RA_E_RANGE, "-1 is not in 0..2147483632" },
    { ONE, D_AS(mask.doc_count, "mask.doc_first"), I64, 3, RA_E_NULL,
      "is null, but doc_count is 3" },
    { DOCUMENTS, D(mask.doc_first), PTR, 0, RA_E_NULL, "is null, but doc_count is 3" },
    { DOCUMENTS, D_AS(mask.doc_count, "mask.doc_first"), I64, 0, RA_E_SHAPE,
      "is set, but doc_count is 0" },
    { INTERVALS, D(mask.doc_count), I64, 1, RA_E_SHAPE,
      "is 1; it must be 0 with RA_MASK_INTERVALS" },
    { INTERVALS, D(mask.lo), PTR, 0, RA_E_NULL, "is null, but RA_MASK_INTERVALS needs it" },
    { INTERVALS, D(mask.hi), PTR, 0, RA_E_NULL, "is null, but RA_MASK_INTERVALS needs it" },
    { INTERVALS, D(mask.interval_count), I64, 299, RA_E_POSITIONS,
      "299 is less than q_offset + tokens, 300" },
    { INTERVALS, D(mask.interval_count), I64, -1, RA_E_RANGE, "-1 is not in 0..2147483632" },
    { INTERVALS, D_AS(q_offset, "mask.interval_count"), I64, 1, RA_E_POSITIONS,
      "300 is less than q_offset + tokens, 301" },
    { ONE, D(mask.interval_count), I64, 300, RA_E_SHAPE,
      "300 needs RA_MASK_INTERVALS, not RA_MASK_CAUSAL" },
    { ONE, D(mask.lo), PTR, 1, RA_E_SHAPE, "needs RA_MASK_INTERVALS, not RA_MASK_CAUSAL" },
    { ONE, D(mask.hi), PTR, 1, RA_E_SHAPE, "needs RA_MASK_INTERVALS, not RA_MASK_CAUSAL" },
    { FOUR, D(layout.kind), I32, 0, RA_E_UNSET,
      "must be RA_LAYOUT_CONTIGUOUS, RA_LAYOUT_ZIGZAG, RA_LAYOUT_STRIPED, RA_LAYOUT_RUNS or "
      "RA_LAYOUT_ARRAY; it was 0" },
    { ONE, D(layout.kind), I32, 6, RA_E_ENUM, "RA_LAYOUT_RUNS or RA_LAYOUT_ARRAY; it was 6" },
    { ONE, D(layout.kind), I32, -1, RA_E_ENUM, "RA_LAYOUT_RUNS or RA_LAYOUT_ARRAY; it was -1" },
    { RUNS, D(layout.weights), PTR, 1, RA_E_SHAPE, "or RA_LAYOUT_ZIGZAG, not RA_LAYOUT_RUNS" },
    { FOUR, D(layout.q_runs), PTR, 1, RA_E_SHAPE,
      "needs RA_LAYOUT_RUNS, not RA_LAYOUT_CONTIGUOUS" },
    { FOUR, D(layout.k_runs), PTR, 1, RA_E_SHAPE,
      "needs RA_LAYOUT_RUNS, not RA_LAYOUT_CONTIGUOUS" },
    { FOUR, D(layout.q_run_count), PTR, 1, RA_E_SHAPE,
      "needs RA_LAYOUT_RUNS, not RA_LAYOUT_CONTIGUOUS" },
    { FOUR, D(layout.k_run_count), PTR, 1, RA_E_SHAPE,
      "needs RA_LAYOUT_RUNS, not RA_LAYOUT_CONTIGUOUS" },
    { FOUR, D(layout.q_rows), PTR, 1, RA_E_SHAPE,
      "needs RA_LAYOUT_ARRAY, not RA_LAYOUT_CONTIGUOUS" },
    { FOUR, D(layout.k_rows), PTR, 1, RA_E_SHAPE,
      "needs RA_LAYOUT_ARRAY, not RA_LAYOUT_CONTIGUOUS" },
    { RUNS, D(layout.q_runs), PTR, 0, RA_E_NULL, "is null, but RA_LAYOUT_RUNS needs it" },
    { RUNS, D(layout.q_run_count), PTR, 0, RA_E_NULL, "is null, but RA_LAYOUT_RUNS needs it" },
    { RUNS, D(layout.k_runs), PTR, 0, RA_E_NULL, "is null: set both k_runs and k_run_count, or" },
    { RUNS, D(layout.k_run_count), PTR, 0, RA_E_NULL,
      "is null: set both k_runs and k_run_count, or" },
    { ARRAY, D(layout.q_rows), PTR, 0, RA_E_NULL, "is null, but RA_LAYOUT_ARRAY needs it" },
    { RUNS, D_AS(tokens, "layout.q_runs"), I64, 299, RA_E_RANGE,
      "entry 3 has position 299, which is not in 0..298" },
    { RUNS, D_AS(kv_tokens, "layout.k_runs"), I64, 299, RA_E_RANGE,
      "entry 3 has position 299, which is not in 0..298" },
    { RUNS, D(tokens_of), PTR, 1, RA_E_SHAPE, "must be null: RUNS and ARRAY give every" },
    { ARRAY, D(kv_tokens_of), PTR, 1, RA_E_SHAPE, "must be null: RUNS and ARRAY give every" },
    { BATCH, D_AS(tokens, "tokens_of"), I64, 299, RA_E_RANGE, "300 is not in 0..299 (tokens)" },
    { ONE, D(scale), F32, -1, RA_E_RANGE, "must be 0 or from 1e-20 to 1e20; it was -1" },
    { ONE, D(softcap), F32, -1, RA_E_RANGE, "must be 0 or from 1e-20 to 1e20; it was -1" },
    { ONE, D(chunk_tokens), I32, -64, RA_E_RANGE, "-64 is not in 0..16777216" },
    { ONE, D(chunk_tokens), I32, INT32_MAX, RA_E_RANGE, "2147483647 is not in 0..16777216" },
    { ONE, D(buffers), I32, -1, RA_E_RANGE, "-1 is not in 0..64" },
    { ONE, D(buffers), I32, 65, RA_E_RANGE, "65 is not in 0..64" },
    { ONE, D(form), I32, -1, RA_E_ENUM, "must be RA_FORM_AUTO or RA_FORM_SAME; it was -1" },
    { ONE, D(form), I32, 2, RA_E_ENUM, "must be RA_FORM_AUTO or RA_FORM_SAME; it was 2" },
    { ONE, D(arith), I32, -1, RA_E_ENUM, "must be RA_ARITH_DTYPE or RA_ARITH_BF16; it was -1" },
    { ONE, D(arith), I32, 2, RA_E_ENUM, "must be RA_ARITH_DTYPE or RA_ARITH_BF16; it was 2" },
    { ONE, D(order), I32, -1, RA_E_ENUM, "must be 0 or RA_ORDER_ROUNDS; it was -1" },
    { ONE, D(order), I32, RA_ORDER_DESCENDING, RA_E_UNSUPPORTED,
      "RA_ORDER_DESCENDING follows from layout and mask: leave it 0" },
    { ONE, D(order), I32, RA_ORDER_ASCENDING, RA_E_UNSUPPORTED,
      "RA_ORDER_ASCENDING follows from layout and mask: leave it 0" },
    { ONE, D(order), I32, 4, RA_E_ENUM, "must be 0 or RA_ORDER_ROUNDS; it was 4" },
    { ROUNDS, D(buffers), I32, 1, RA_E_SHAPE, "1 is less than 2, which RA_ORDER_ROUNDS" },
    { ONE, D(threads), I32, -1, RA_E_RANGE, "-1 is not in 0..4096" },
    { ONE, D(threads), I32, INT32_MAX, RA_E_RANGE, "2147483647 is not in 0..4096" },
    { ONE, D(isa), I32, -1, RA_E_ENUM, "RA_ISA_AMX or RA_ISA_NEON; it was -1" },
    { ONE, D(isa), I32, 7, RA_E_ENUM, "RA_ISA_AMX or RA_ISA_NEON; it was 7" },
};

/* All that take a descriptor give the same answer, and nothing is made. */
static void refuse_desc(const ra_desc *bad, int status, const char *field, const char *words) {
    ra_desc d = *bad, out;
    ra_error e[2];
    ra_plan *plan = (ra_plan *)(void *)longs;
    small_heap heap = { 0 };
    ra_allocator a;
    memset(e, 0, sizeof e);
    memset(&out, 0x5A, sizeof out);
    a = small_heap_allocator(&heap);
    d.error = &e[0];
    refused(ra_desc_resolve(&d, &out), &e[0], status, field, words);
    d.error = &e[1];
    CHECK_EQ(ra_plan_create(&plan, &d, &a), status);
    CHECK(e[1].status == e[0].status && !strcmp(e[1].field, e[0].field) &&
          !strcmp(e[1].text, e[0].text));
    CHECK(heap.calls == 0);
    if (d.ranks <= 1) CHECK_EQ((int64_t)ra_attention_bytes(&d, 1), 0);
    d.error = NULL;
    CHECK_EQ(ra_desc_resolve(&d, &out), status);
    CHECK_EQ(ra_ring_once(&d, NULL, NULL, RA_NO_DEADLINE) < 0, 1);
}

/* The scale that is filled in has the same bits on every machine. */
TEST(desc_scale) {
    ra_desc d, out;
    for (int32_t dim = 1; dim <= 1024; dim++) {
        d = ra_desc_make(1, 1, dim, RA_F32, RA_MASK_NONE);
        d.tokens = 1;
        CHECK_EQ(ra_desc_resolve(&d, &out), RA_OK);
        CHECK_EQ(out.scale == (float)(1.0 / sqrt((double)dim)), 1);
    }
}

TEST(desc_fields) {
    ra_desc d, out;
    scope = IN_DESC;
    for (int b = 0; b < BASES; b++) {
        base_desc(&d, b);
        CHECK_EQ(ra_desc_resolve(&d, &out), RA_OK);
    }
    for (size_t i = 0; i < sizeof desc_rows / sizeof desc_rows[0]; i++) {
        const row *r = &desc_rows[i];
        h_context("row %d: %s = %lld", (int)i, r->field, (long long)r->value);
        base_desc(&d, r->base);
        set_field(&d, r->at, r->kind, r->value);
        refuse_desc(&d, r->status, r->field, r->words);
    }
}

/* An engine's dtype that the library lacks: the sentence lists those that exist. */
TEST(dtypes_of_an_engine) {
    static const char *const names[] = { "RA_F32", "RA_F16", "RA_BF16", "RA_Q8_0", "RA_Q4_0" };
    for (int32_t dtype = 0; dtype <= 12; dtype += 12) {
        ra_error why = { 0 };
        ra_desc d;
        base_desc(&d, ONE);
        d.k_dtype = dtype;
        d.error = &why;
        CHECK_EQ(ra_desc_resolve(&d, &d), dtype ? RA_E_ENUM : RA_E_UNSET);
        for (int i = 0; i < 5; i++) CHECK(strstr(why.text, names[i]) != NULL);
    }
}

/* What no single field shows: contents of arrays, and sums. */
TEST(desc_contents) {
    static int64_t first[3], of[2], many[4];
    static int32_t weight[4];
    ra_desc d;
    base_desc(&d, DOCUMENTS);
    d.mask.doc_first = first;
    first[0] = 1; first[1] = 5; first[2] = 9;
    refuse_desc(&d, RA_E_POSITIONS, "mask.doc_first", NULL);
    first[0] = 0; first[1] = 5; first[2] = 5;
    refuse_desc(&d, RA_E_POSITIONS, "mask.doc_first", "2");
    first[2] = TOP + 5;
    refuse_desc(&d, RA_E_OVERFLOW, "mask.doc_first", number(TOP + 5));
    base_desc(&d, BATCH);
    d.tokens_of = of;
    of[0] = 300; of[1] = 301;
    refuse_desc(&d, RA_E_RANGE, "tokens_of", "301");
    of[1] = -1;
    refuse_desc(&d, RA_E_RANGE, "tokens_of", "-1");
    d.tokens_of = NULL;
    d.kv_tokens_of = of;
    refuse_desc(&d, RA_E_RANGE, "kv_tokens_of", "-1");
    of[1] = 301;
    refuse_desc(&d, RA_E_RANGE, "kv_tokens_of", "301");
    base_desc(&d, FOUR);
    d.layout.weights = weight;
    memset(weight, 0, sizeof weight);
    refuse_desc(&d, RA_E_UNSET, "layout.weights", NULL);
    weight[2] = -3; weight[0] = 5;
    refuse_desc(&d, RA_E_RANGE, "layout.weights", "-3");
    base_desc(&d, ARRAY);
    memcpy(many, rows, sizeof many);
    d.layout.q_rows = many;
    many[1] = -5;
    refuse_desc(&d, RA_E_RANGE, "layout.q_rows", "-5");
    d.layout.q_rows = rows;
    d.layout.k_rows = many;
    refuse_desc(&d, RA_E_RANGE, "layout.k_rows", "-5");
    many[1] = TOP + 1;
    refuse_desc(&d, RA_E_RANGE, "layout.k_rows", number(TOP + 1));
    base_desc(&d, ONE);
    d.tokens = TOP - 1;
    d.sequences = 1 << 20;
    d.q_heads = d.kv_heads = 1 << 16;
    d.k_dim = d.v_dim = 1024;
    refuse_desc(&d, RA_E_OVERFLOW, "tokens", number(TOP - 1));
}

TEST(desc_runs) {
    static const struct { int entry; ra_run run; int status; const char *words; } bad[] = {
        { 1, { 74, 75, 1 }, RA_E_POSITIONS, "74" },
        { 1, { 75, 75, -1 }, RA_E_RANGE, "entry 1 has stride -1, which is negative" },
        { 1, { 75, 75, INT64_MAX }, RA_E_RANGE,
          "entry 1 has position 9223372036854775807, which is not in 0..299" },
        { 1, { 75, -1, 1 }, RA_E_RANGE, "entry 1 has count -1, which is not positive" },
        { 1, { 75, INT64_MAX, 1 }, RA_E_RANGE, "entry 1" },
        { 1, { 75, 0, 1 }, RA_E_RANGE, "entry 1 has count 0, which is not positive" },
        { 1, { 75, 300, 1 }, RA_E_RANGE, "entry 1 has position 374, which is not in 0..299" },
        { 0, { -1, 75, 1 }, RA_E_RANGE, "entry 0 has position -1, which is not in 0..299" },
        { 0, { INT64_MIN, 75, 1 }, RA_E_RANGE, "entry 0" },
        { 0, { INT64_MAX, 75, 1 }, RA_E_RANGE, "entry 0" },
    };
    static int32_t count[4];
    static ra_run run[5];
    ra_desc d;
    scope = IN_DESC;
    for (int keys = 0; keys < 2; keys++) {
        base_desc(&d, RUNS);
        memcpy(count, counts, sizeof count);
        if (keys) { d.layout.k_runs = run; d.layout.k_run_count = count; }
        else { d.layout.q_runs = run; d.layout.q_run_count = count; }
        for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
            memcpy(run, runs, sizeof run);
            run[bad[i].entry] = bad[i].run;
            refuse_desc(&d, bad[i].status, keys ? "layout.k_runs" : "layout.q_runs",
                        bad[i].words);
        }
        count[3] = -1;
        refuse_desc(&d, RA_E_RANGE, keys ? "layout.k_run_count" : "layout.q_run_count",
                    "-1 is negative");
    }
    base_desc(&d, RUNS);               /* a run of one row may have any stride */
    ra_plan_report report[2];
    for (int i = 0; i < 2; i++) {
        ra_plan *plan = NULL;
        memcpy(run, runs, sizeof run);
        run[0].count = 1;
        run[0].stride = i ? INT64_MAX : 0;
        d.layout.k_runs = run;
        d.layout.k_run_count = counts;
        CHECK_EQ(ra_plan_create(&plan, &d, NULL), RA_OK);
        CHECK_EQ(ra_plan_query(plan, 0, &report[i]), RA_OK);
        ra_plan_destroy(plan);
    }
    CHECK(report[0].pairs > 0 && report[1].pairs == report[0].pairs);
    base_desc(&d, RUNS);               /* keys as queries, but fewer of them */
    d.layout.k_runs = NULL;
    d.layout.k_run_count = NULL;
    d.kv_tokens = 299;
    refuse_desc(&d, RA_E_POSITIONS, "kv_tokens", "3");
}

TEST(desc_floats) {
    static const struct { float value; const char *text; } wrong[] = {
        { -0.5f, "it was -0.5" }, { 1.0f, "it was 1" }, { 30.0f, "it was 30" },
        { -0.0001234567f, "it was -0.000123457" }, { -1e-5f, "it was -1e-5" },
        { 1234567.0f, "it was 1234570" }, { 9.9999999e9f, "it was 1e10" },
        { -3.4e38f, "it was -3.4e38" }, { -1e-45f, "it was -1.4013e-45" },
        { 123.456f, "it was 123.456" }, { 1e-45f, "and not subnormal; it was 1.4013e-45" },
    };
    const float bad[7] = { NAN, INFINITY, -INFINITY, 1e38f, 1.1e20f, 0.9e-20f, 1e-45f };
    const char *const text[7] = { "it was NaN", "it was inf", "it was -inf", "it was 1e38",
                                  "it was 1.1e20", "it was 9e-21", "it was 1.4013e-45" };
    ra_desc d;
    for (int i = 0; i < 7; i++) {
        base_desc(&d, ONE);
        d.scale = bad[i];
        refuse_desc(&d, RA_E_RANGE, "scale", text[i]);
        base_desc(&d, ONE);
        d.softcap = bad[i];
        refuse_desc(&d, RA_E_RANGE, "softcap", text[i]);
    }
    for (int i = 0; i < 2; i++) {
        base_desc(&d, ONE);
        *(i ? &d.scale : &d.softcap) = 1e-40f;
        refuse_desc(&d, RA_E_RANGE, i ? "scale" : "softcap", "; it was 9.99995e-41");
    }
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        base_desc(&d, ONE);
        d.train = 1;
        d.dropout = wrong[i].value;
        refuse_desc(&d, RA_E_RANGE, "dropout", wrong[i].text);
    }
    base_desc(&d, ONE);
    d.train = 1;
    d.dropout = 0.25f;
    d.arith = RA_ARITH_BF16;
    refuse_desc(&d, RA_E_UNSUPPORTED, "arith", "RA_ARITH_BF16 needs dropout = 0");
}

/* Rates are either all 0 or all set. */
TEST(desc_rates) {
    static const double bad[5][3] = { { 0, 1, 0 }, { 1, 0, 0 }, { 0, 0, 1 }, { 1, 1, -1 },
                                      { -1, 1, 1 } };
    static const int which[5] = { 0, 1, 0, 2, 0 };
    static const char *const field[3] = { "rates.flops_per_s", "rates.link_bytes_per_s",
                                          "rates.link_latency_s" };
    static const char *const words[6] = { "it was 0", "it was 0", "it was 0", "it was -1",
                                          "it was -1", NULL };
    for (int i = 0; i < 5 + 6; i++) {
        double x[3] = { 1e11, 1e9, 1e-5 };
        ra_desc d;
        if (i < 5) memcpy(x, bad[i], sizeof x);
        else x[(i - 5) % 3] = i < 8 ? (double)NAN : HUGE_VAL;
        base_desc(&d, FOUR);
        d.rates.flops_per_s = x[0];
        d.rates.link_bytes_per_s = x[1];
        d.rates.link_latency_s = x[2];
        refuse_desc(&d, RA_E_RANGE, field[i < 5 ? which[i] : (i - 5) % 3], words[i < 5 ? i : 5]);
    }
}

/* A resolved descriptor means the same as the given one. */
TEST(desc_resolved) {
    for (int b = 0; b < BASES; b++) {
        ra_desc d, once, twice;
        ra_plan *plan[2] = { NULL, NULL };
        ra_plan_report r[2];
        base_desc(&d, b);
        CHECK_EQ(ra_desc_resolve(&d, &once), RA_OK);
        CHECK_EQ(ra_desc_resolve(&once, &twice), RA_OK);
        CHECK_BITS(&twice, &once, sizeof once);
        CHECK(once.scale > 0.35f && once.scale < 0.36f);
        CHECK(once.sequences >= 1 && once.ranks >= 1 && once.buffers == 3 && once.threads == 1);
        CHECK(once.chunk_tokens == 1024 && once.isa == ra_isa_best());
        CHECK_EQ(ra_plan_create(&plan[0], &d, NULL), RA_OK);
        CHECK_EQ(ra_plan_create(&plan[1], &once, NULL), RA_OK);
        for (int i = 0; i < 2; i++) CHECK_EQ(ra_plan_query(plan[i], 0, &r[i]), RA_OK);
        h_context("base %d: pairs %lld, resolved %lld", b, (long long)r[0].pairs,
                  (long long)r[1].pairs);
        CHECK_BITS(&r[1], &r[0], sizeof r[0]);
        for (int i = 0; i < 2; i++) ra_plan_destroy(plan[i]);
    }
}

static void refuse_scaled(int32_t dtype, const char *gradients, const char *multiple) {
    ra_desc d;
    base_desc(&d, ONE);
    d.k_dtype = dtype;
    refuse_desc(&d, RA_E_SHAPE, "k_dim", multiple);
    d.k_dim = 64;
    d.train = 1;
    refuse_desc(&d, RA_E_UNSUPPORTED, "k_dtype", gradients);
    d.k_dtype = RA_F32;
    d.v_dtype = dtype;
    refuse_desc(&d, RA_E_UNSUPPORTED, "v_dtype", gradients);
    d.train = 0;
    refuse_desc(&d, RA_E_SHAPE, "v_dim", multiple);
    base_desc(&d, MLA);
    d.k_dtype = dtype;
    d.k_dim = 96;
    d.v_dim = 64;
    d.v_column = 8;
    refuse_desc(&d, RA_E_ALIGN, "v_column", multiple);
}

TEST(blocks_with_scales) {
    refuse_scaled(RA_Q8_0, "is RA_Q8_0, which has no gradients",
                  "8 is not a multiple of 32, as RA_Q8_0 needs");
    refuse_scaled(RA_Q4_0, "is RA_Q4_0, which has no gradients",
                  "8 is not a multiple of 32, as RA_Q4_0 needs");
}

TEST(isa) {
    ra_desc d;
    int missing = 0;
    CHECK_EQ(ra_isa_available(RA_ISA_SCALAR), 1);
    CHECK_EQ(ra_isa_available(ra_isa_best()), 1);
    CHECK_EQ(ra_isa_available(-1), 0);
    CHECK_EQ(ra_isa_available(99), 0);
    CHECK(ra_isa_name(99) && ra_isa_name(-1) && !strcmp(ra_isa_name(RA_ISA_AVX512), "avx512"));
    for (int isa = RA_ISA_SCALAR; isa <= RA_ISA_NEON; isa++) {
        if (ra_isa_available(isa)) continue;
        base_desc(&d, ONE);
        d.isa = isa;
        refuse_desc(&d, RA_E_ISA, "isa",
                    "is not available on this machine; the fastest is RA_ISA_");
        missing++;
    }
    if (!missing) produced[-RA_E_ISA] = -1;            /* cannot occur on this machine */
}

/* -------------------------------------------------------------------------- ra_engine */

static int stand_in_fold(void *ctx, const ra_block *block) {
    (void)ctx, (void)block;
    return RA_OK;
}

#define E(f) offsetof(ra_engine, f), "engine." #f

TEST(engine) {
    static ra_engine engine;
    static const row engine_rows[] = {
        { 0, E(size), I32, 0, RA_E_ABI, "0 is less than 32, the size of ra_engine in" },
        { 0, E(size), I32, 8, RA_E_ABI, "8 is less than 32, the size of ra_engine in" },
        { 0, E(abi), I32, 0, RA_E_ABI, "0 is not RA_ENGINE_ABI, 2" },
        { 0, E(abi), I32, 1, RA_E_ABI, "1 is not RA_ENGINE_ABI, 2" },
        { 0, E(block_queries), I64, -64, RA_E_RANGE, "-64 is not in 0..16777216" },
        { 0, E(block_queries), I64, INT64_MAX, RA_E_RANGE,
          "9223372036854775807 is not in 0..16777216" },
        { 0, E(block_queries), I64, 65, RA_E_SHAPE, "65 is not a multiple of 64, RA_BLOCK_TOKENS" },
    };
    ra_desc d;
    scope = IN_DESC;
    base_desc(&d, FOUR);
    d.engine = &engine;
    for (size_t i = 0; i <= sizeof engine_rows / sizeof engine_rows[0]; i++) {
        const row *r = &engine_rows[i];
        memset(&engine, 0, sizeof engine);
        engine.size = sizeof engine;
        engine.abi = RA_ENGINE_ABI;
        engine.fold = stand_in_fold;
        CHECK_EQ(ra_desc_resolve(&d, &d), RA_OK);
        base_desc(&d, FOUR);
        d.engine = &engine;
        if (i == sizeof engine_rows / sizeof engine_rows[0]) break;
        set_field(&engine, r->at, r->kind, r->value);
        refuse_desc(&d, r->status, r->field, r->words);
    }
    engine.fold = NULL;
    refuse_desc(&d, RA_E_NULL, "engine.fold", NULL);
}

/* -------------------------------------------------------------------------- ra_transport */

static int stand_in_sendrecv(void *ctx, int to, const void *s, size_t s_len, int from, void *r,
                             size_t r_len, uint64_t tag, int64_t deadline_ns) {
    (void)ctx, (void)to, (void)s, (void)s_len, (void)from, (void)r, (void)r_len, (void)tag;
    (void)deadline_ns;
    return RA_E_IO;
}

static int stand_in_ops(void *ctx, ra_transport_op *const *ops, int n) {
    (void)ctx, (void)ops, (void)n;
    return RA_E_IO;
}

static int stand_in_reg(void *ctx, void *p, size_t n, void **mr) {
    (void)ctx, (void)p, (void)n, (void)mr;
    return RA_E_IO;
}

static int stand_in_dereg(void *ctx, void *mr) { (void)ctx, (void)mr; return RA_OK; }
static int stand_in_abort(void *ctx, int why) { (void)ctx, (void)why; return RA_OK; }
static int stand_in_quiesce(void *ctx, int64_t until) { (void)ctx, (void)until; return RA_OK; }
static int stand_in_release(void *ctx, ra_transport_op *op) { (void)ctx, (void)op; return RA_OK; }

/* level 0, 1, or 2: all that there is but wait */
static void base_transport(ra_transport *t, int level) {
    memset(t, 0, sizeof *t);
    t->size = sizeof *t;
    t->abi = RA_TRANSPORT_ABI;
    if (level == 0) t->sendrecv = stand_in_sendrecv;
    if (level > 0) t->post = t->poll = stand_in_ops;
    if (level > 1) {
        t->caps = RA_CAP_ANY_PEER | RA_CAP_LOAN | RA_CAP_SHARED | RA_CAP_ANY_THREAD;
        t->channels = 2;
        t->max_ops = 64;
        t->reg = stand_in_reg;
        t->dereg = stand_in_dereg;
        t->release = stand_in_release;
        t->abort = stand_in_abort;
        t->quiesce = stand_in_quiesce;
    }
}

#define T(f) offsetof(ra_transport, f), "transport." #f
#define T_AS(f, name) offsetof(ra_transport, f), name
static const row transport_rows[] = {
    { 0, T(size), I32, 0, RA_E_ABI, "must be sizeof(ra_transport), is 0: was it" },
    { 0, T(size), I32, 16, RA_E_ABI, "must be sizeof(ra_transport), is 16: was it" },
    { 0, T(size), I32, -1, RA_E_ABI, "must be sizeof(ra_transport), is 4294967295" },
    { 0, T(abi), I32, 0, RA_E_ABI, "must be RA_TRANSPORT_ABI, which is 1 here" },
    { 0, T(abi), I32, 2, RA_E_ABI, "must be RA_TRANSPORT_ABI, which is 1 here" },
    { 0, T(caps), I32, 64, RA_E_ENUM, "has bits that are not RA_CAP_*: 64" },
    { 1, T(channels), I32, 65, RA_E_RANGE, "must be at most 64, is 65" },
    { 1, T(tag_bits), I32, 65, RA_E_RANGE, "must be at most 64, is 65" },
    { 1, T(max_ops), I32, 1, RA_E_RANGE, "must be at least 2, for a send and" },
    { 1, T(align), I64, 48, RA_E_RANGE, "must be 0 or a power of two up to 4096" },
    { 1, T(align), I64, 65536, RA_E_RANGE, "must be 0 or a power of two up to 4096" },
    { 0, T(sendrecv), PTR, 0, RA_E_TRANSPORT, "is null and so is post: set one of them" },
    { 1, T_AS(post, "transport.sendrecv"), PTR, 0, RA_E_TRANSPORT,
      "is null and so is post: set one of them" },
    { 1, T(poll), PTR, 0, RA_E_TRANSPORT, "is null, but post needs it" },
    { 2, T(dereg), PTR, 0, RA_E_TRANSPORT, "is null, but reg needs it" },
    { 2, T(release), PTR, 0, RA_E_TRANSPORT, "is null, but caps has RA_CAP_LOAN" },
    { 2, T(quiesce), PTR, 0, RA_E_TRANSPORT, "is null, but caps has RA_CAP_SHARED" },
    { 2, T(caps), I32, RA_CAP_SHARED, RA_E_TRANSPORT,
      "has RA_CAP_SHARED, but lacks RA_CAP_ANY_PEER" },
    { 2, T(channels), I32, 1, RA_E_TRANSPORT,
      "is 1 (0 means 1), but RA_CAP_SHARED needs at least 2" },
    { 2, T(max_ops), I32, 9, RA_E_TRANSPORT, "is 9 (0 means 2): RA_CAP_SHARED needs at least 10" },
    { 0, T_AS(caps, "transport.post"), I32, RA_CAP_SHARED, RA_E_TRANSPORT,
      "is null, but caps has RA_CAP_SHARED" },
    { 0, T_AS(rank, "transport.ranks"), I32, 1, RA_E_UNSET,
      "is 0, but transport.rank is 1: set both or" },
    { 0, T(ranks), I32, 5, RA_E_TRANSPORT, "is 5, but the descriptor has 4 ranks" },
    { 0, T(ranks), I32, -4, RA_E_TRANSPORT, "is -4, but the descriptor has 4 ranks" },
    { 0, T(max_msg), I64, 100, RA_E_TRANSPORT, "100 is less than the" },
};

static ra_plan *plan_of(int base, int rank) {
    ra_plan *plan = NULL;
    ra_desc d;
    base_desc(&d, base);
    d.rank = rank;
    CHECK_EQ(ra_plan_create(&plan, &d, NULL), RA_OK);
    return plan;
}

static void refuse_ring(const ra_plan *plan, const ra_transport *t, const ra_ring_desc *rd,
                        int status, const char *field, const char *words) {
    ra_ring *ring = (ra_ring *)(void *)longs;
    ra_ring_desc copy = *rd;
    small_heap heap = { 0 };
    ra_error e = { 0 };
    if (!copy.allocator.alloc && !copy.allocator.free)
        copy.allocator = small_heap_allocator(&heap);
    copy.error = &e;
    refused(ra_ring_create(&ring, plan, t, &copy), &e, status, field, words);
    CHECK(ring == NULL);
    CHECK(heap.live == 0 && heap.wrong == 0);
    copy.error = NULL;
    CHECK_EQ(ra_ring_create(&ring, plan, t, &copy), status);
}

TEST(transport) {
    ra_plan *plan = plan_of(FOUR, 1);
    ra_ring_desc rd = { 0 };
    ra_transport t;
    ra_ring *ring = NULL;
    scope = IN_RING;
    for (int level = 0; level < 3; level++) {
        base_transport(&t, level);
        CHECK_EQ(ra_ring_create(&ring, plan, &t, NULL), RA_OK);
        CHECK_EQ(ra_ring_destroy(ring), RA_OK);
    }
    for (size_t i = 0; i < sizeof transport_rows / sizeof transport_rows[0]; i++) {
        const row *r = &transport_rows[i];
        h_context("row %d: %s = %lld", (int)i, r->field, (long long)r->value);
        base_transport(&t, r->base);
        set_field(&t, r->at, r->kind, r->value);
        refuse_ring(plan, &t, &rd, r->status, r->field, r->words);
    }
    base_transport(&t, 0);
    t.ranks = 4;
    t.rank = 2;
    refuse_ring(plan, &t, &rd, RA_E_TRANSPORT, "transport.rank", "2");
    refuse_ring(plan, NULL, &rd, RA_E_NULL, "transport", NULL);
    ra_plan_destroy(plan);
}

/* -------------------------------------------------------------------------- ra_ring_desc */

#define R(f) offsetof(ra_ring_desc, f), "ring." #f
static const row ring_rows[] = {
    { 0, R(watchdog_ns), I64, -5, RA_E_RANGE, "-5 is negative" },
    { 0, R(quiesce_ns), I64, -6, RA_E_RANGE, "-6 is negative" },
    { 0, R(trust_plans), I32, 2, RA_E_RANGE, "2 is not in 0..1" },
    { 0, R(checksums), I32, -1, RA_E_RANGE, "-1 is not in 0..1" },
    { 0, R(resumable), I32, 2, RA_E_RANGE, "2 is not in 0..1" },
    { 0, R(workspace_bytes), I64, 64, RA_E_WORKSPACE, "64 is less than the" },
};

TEST(ring_desc) {
    ra_plan *plan = plan_of(FOUR, 1);
    ra_plan_report rep;
    ra_ring_desc rd;
    ra_transport t;
    ra_ring *ring = NULL;
    ra_error e = { 0 };
    int64_t need;
    uint8_t *room;
    scope = IN_RING;
    base_transport(&t, 1);
    CHECK_EQ(ra_plan_query(plan, 1, &rep), RA_OK);
    need = rep.workspace_bytes;
    room = (uint8_t *)small_memory((size_t)need + 64);
    for (size_t i = 0; i < sizeof ring_rows / sizeof ring_rows[0]; i++) {
        const row *r = &ring_rows[i];
        h_context("row %d: %s", (int)i, r->field);
        memset(&rd, 0, sizeof rd);
        set_field(&rd, r->at, r->kind, r->value);
        refuse_ring(plan, &t, &rd, r->status, r->field, r->words);
    }
    memset(&rd, 0, sizeof rd);
    rd.workspace = room + 1;
    rd.workspace_bytes = (size_t)need;
    refuse_ring(plan, &t, &rd, RA_E_ALIGN, "ring.workspace", NULL);
    rd.workspace = room + 32;
    refuse_ring(plan, &t, &rd, RA_E_ALIGN, "ring.workspace", NULL);
    rd.workspace = room;
    rd.workspace_bytes = (size_t)need - 1;
    refuse_ring(plan, &t, &rd, RA_E_WORKSPACE, "ring.workspace_bytes", number(need));
    rd.workspace_bytes = 0;
    refuse_ring(plan, &t, &rd, RA_E_WORKSPACE, "ring.workspace_bytes", number(need));
    rd.workspace_bytes = (size_t)need;
    CHECK_EQ(ra_ring_create(&ring, plan, &t, &rd), RA_OK);
    CHECK_EQ(ra_ring_destroy(ring), RA_OK);
    memset(&rd, 0, sizeof rd);
    rd.allocator.alloc = small_heap_alloc;
    refuse_ring(plan, &t, &rd, RA_E_NULL, "ring.allocator.free", NULL);
    rd.allocator.alloc = NULL;
    rd.allocator.free = small_heap_free;
    refuse_ring(plan, &t, &rd, RA_E_NULL, "ring.allocator.alloc", NULL);
    memset(&rd, 0, sizeof rd);
    refuse_ring(NULL, &t, &rd, RA_E_NULL, "plan", NULL);
    rd.error = &e;
    refused(ra_ring_create(NULL, plan, &t, &rd), &e, RA_E_NULL, "out", NULL);
    CHECK_EQ(ra_ring_destroy(NULL), RA_OK);
    ra_plan_destroy(plan);
    ra_plan_destroy(NULL);
    free(room);
}

/* -------------------------------------------------------------------------- plan */

TEST(plan_arguments) {
    ra_plan *plan = plan_of(FOUR, 1), *none = NULL;
    ra_plan_report rep;
    ra_allocator half = { 0 };
    ra_error e = { 0 };
    ra_desc d;
    ra_run run[4];
    scope = IN_PLAN;
    base_desc(&d, FOUR);
    d.error = &e;
    refused(ra_plan_create(NULL, &d, NULL), &e, RA_E_NULL, "out", NULL);
    CHECK_EQ(ra_plan_create(&none, NULL, NULL), RA_E_NULL);
    none = plan;
    d.k_dim = -1;
    CHECK_EQ(ra_plan_create(&none, &d, NULL), RA_E_RANGE);
    CHECK(none == NULL);               /* as rings and worlds: destroying none is always right */
    none = NULL;
    d.k_dim = 8;
    CHECK_EQ(ra_desc_resolve(NULL, &d), RA_E_NULL);
    refused(ra_desc_resolve(&d, NULL), &e, RA_E_NULL, "out", NULL);
    half.alloc = small_heap_alloc;
    refused(ra_plan_create(&none, &d, &half), &e, RA_E_NULL, "allocator.free", NULL);
    half.alloc = NULL;
    half.free = small_heap_free;
    refused(ra_plan_create(&none, &d, &half), &e, RA_E_NULL, "allocator.alloc", NULL);
    CHECK_EQ(ra_plan_query(NULL, 0, &rep), RA_E_NULL);
    CHECK_EQ(ra_plan_query(plan, 0, NULL), RA_E_NULL);
    CHECK_EQ(ra_plan_query(plan, 4, &rep), RA_E_RANGE);
    CHECK_EQ(ra_plan_query(plan, -1, &rep), RA_E_RANGE);
    CHECK_EQ(ra_plan_q_runs(NULL, 0, 0, run, 4), -1);
    CHECK_EQ(ra_plan_q_runs(plan, 4, 0, run, 4), -1);
    CHECK_EQ(ra_plan_k_runs(plan, -1, 0, run, 4), -1);
    CHECK_EQ(ra_plan_k_runs(plan, 0, 1, run, 4), -1);
    CHECK_EQ(ra_plan_k_runs(plan, 0, -1, run, 4), -1);
    CHECK_EQ(ra_plan_k_runs(plan, 0, 0, run, -1), -1);
    CHECK_EQ(ra_plan_k_runs(plan, 0, 0, NULL, 4), -1);
    memset(run, 0x5A, sizeof run);
    CHECK_EQ(ra_plan_k_runs(plan, 0, 0, NULL, 0), 1);
    CHECK_EQ(ra_plan_k_runs(plan, 0, 0, run, 4), 1);
    CHECK(run[0].first == 0 && run[1].first != 0);
    ra_plan_destroy(plan);
}

TEST(rates) {
    const double bad[4] = { 0, -1, (double)NAN, HUGE_VAL };
    ra_plan *plan = plan_of(FOUR, 1);
    ra_prediction out;
    ra_rates good, r;
    good.flops_per_s = 1e11;
    good.link_bytes_per_s = 1e9;
    good.link_latency_s = 0;
    CHECK_EQ(ra_plan_predict(plan, 1, &good, &out), RA_OK);
    CHECK(out.compute_s > 0 && out.done_s >= out.compute_s && out.all_done_s >= out.done_s);
    CHECK(out.hidden_s >= 0 && out.hidden_s <= out.transfer_s && out.wait_s >= 0);
    CHECK_EQ(ra_plan_predict(NULL, 1, &good, &out), RA_E_NULL);
    CHECK_EQ(ra_plan_predict(plan, 1, NULL, &out), RA_E_NULL);
    CHECK_EQ(ra_plan_predict(plan, 1, &good, NULL), RA_E_NULL);
    CHECK_EQ(ra_plan_predict(plan, 4, &good, &out), RA_E_RANGE);
    CHECK_EQ(ra_plan_predict(plan, -1, &good, &out), RA_E_RANGE);
    for (int i = 0; i < 12; i++) {
        double *field[3];
        int s;
        r = good;
        field[0] = &r.flops_per_s;
        field[1] = &r.link_bytes_per_s;
        field[2] = &r.link_latency_s;
        *field[i / 4] = bad[i % 4];
        s = ra_plan_predict(plan, 1, &r, &out);
        h_context("rate %d: %g", i / 4, bad[i % 4]);
        if (i == 8) CHECK_EQ(s, RA_OK);            /* no latency */
        else if (i % 4 == 3) CHECK(s == RA_OK || s == RA_E_RANGE);
        else CHECK(s == RA_E_RANGE || (s == RA_E_UNSET && i % 4 == 0));
    }
    ra_plan_destroy(plan);
}

/* -------------------------------------------------------------------------- world */

static ra_status no_rank(ra_world *world, int rank, void *user) {
    (void)world, (void)rank, (void)user;
    return RA_OK;
}

#define W(f) offsetof(ra_world_desc, f), #f

TEST(world) {
    static const row world_rows[] = {
        { 0, W(ranks), I32, 0, RA_E_UNSET, "must be set, 1 to 4096, is 0" },
        { 0, W(ranks), I32, -2, RA_E_RANGE, "must be 1 to 4096, is -2" },
        { 0, W(ranks), I32, 4097, RA_E_RANGE, "must be 1 to 4096, is 4097" },
    };
    ra_world_desc wd;
    ra_world *world = NULL;
    ra_error e;
    scope = IN_WORLD;
    for (size_t i = 0; i < sizeof world_rows / sizeof world_rows[0]; i++) {
        const row *r = &world_rows[i];
        memset(&wd, 0, sizeof wd);
        memset(&e, 0, sizeof e);
        wd.ranks = 2;
        wd.error = &e;
        set_field(&wd, r->at, r->kind, r->value);
        refused(ra_world_create(&world, &wd), &e, r->status, r->field, r->words);
        CHECK(world == NULL);
        CHECK_EQ(ra_world_run(wd.ranks, no_rank, NULL, &wd), r->value ? r->status : RA_E_RANGE);
    }
    memset(&wd, 0, sizeof wd);
    wd.ranks = 2;
    wd.error = &e;
    refused(ra_world_create(NULL, &wd), &e, RA_E_NULL, "out", NULL);
    refused(ra_world_run(2, NULL, NULL, &wd), &e, RA_E_NULL, "fn", NULL);
    refused(ra_world_run(3, no_rank, NULL, &wd), &e, RA_E_SHAPE, "ranks", "2");
    wd.allocator.alloc = small_heap_alloc;
    refused(ra_world_create(&world, &wd), &e, RA_E_NULL, "allocator.free", NULL);
    wd.allocator.alloc = NULL;
    wd.allocator.free = small_heap_free;
    refused(ra_world_create(&world, &wd), &e, RA_E_NULL, "allocator.alloc", NULL);
    CHECK_EQ(ra_world_create(&world, NULL), RA_E_UNSET);
    memset(&wd, 0, sizeof wd);
    wd.ranks = 2;
    CHECK_EQ(ra_world_create(&world, &wd), RA_OK);
    CHECK(ra_world_transport(world, 2) == NULL && ra_world_transport(world, -1) == NULL);
    CHECK(ra_world_transport(NULL, 0) == NULL && ra_world_transport(world, 1) != NULL);
    ra_world_leave(world, 7, RA_OK);
    ra_world_leave(NULL, 0, RA_OK);
    ra_world_destroy(world);
    ra_world_destroy(NULL);
}

/* -------------------------------------------------------------------------- ra_tensors */

static uint8_t *pool;                  /* POOL bytes: all that a small call reads */
static uint8_t *out_pool;              /* all that it writes */

static void base_tensors(ra_tensors *t, int base) {
    memset(t, 0, sizeof *t);
    t->q.data = pool;
    t->k.data = pool;
    if (base != MLA) t->v.data = pool;
    t->o.data = out_pool + POOL / 4;
    t->lse.data = out_pool;
    if (base == ARRAY) {
        t->q_pos.array = t->k_pos.array = ints;
        t->q_pos.count = t->k_pos.count = 75;
    }
}

static ra_plan *ring_plan;             /* of the ring that refuses */
static ra_ring *make_base_ring(int base) {
    ra_transport t;
    ra_ring *ring = NULL;
    base_transport(&t, 1);
    ring_plan = plan_of(base, 0);
    CHECK_EQ(ra_ring_create(&ring, ring_plan, base == ONE ? NULL : &t, NULL), RA_OK);
    return ring;
}

/* A refused begin leaves the ring idle and says why, also by ra_join and ra_forward. */
static void refuse_begin(ra_ring *ring, const ra_tensors *t, int status, const char *field,
                         const char *words) {
    static uint64_t ticket = 10;
    ra_ring_counters c;
    ra_failure f;
    ra_job job = { 0 };
    job.plan = ring_plan;
    job.tensors = t;
    refused(ra_begin(ring, &job), ra_ring_error(ring), status, field, words);
    ra_ring_query(ring, &c);
    CHECK_EQ(c.state, RA_RING_IDLE);
    CHECK_EQ(ra_ring_failure(ring, &f), RA_E_STATE);
    CHECK_EQ(ra_forward(ring_plan, ring, t, RA_NO_DEADLINE), status);
    job.ticket = ++ticket;
    CHECK_EQ(ra_join(ring, &job, 0), status);
    CHECK_EQ(ra_join(ring, &job, 0), status);       /* what every thread then gets */
}

#define X(f) offsetof(ra_tensors, f), "t." #f
#define X_AS(f, name) offsetof(ra_tensors, f), name
static const row tensor_rows[] = {
    { ONE, X_AS(q.data, "t.q"), PTR, 0, RA_E_NULL, "required" },
    { ONE, X_AS(k.data, "t.k"), PTR, 0, RA_E_NULL, "required" },
    { ONE, X_AS(v.data, "t.v"), PTR, 0, RA_E_NULL, "required" },
    { ONE, X_AS(o.data, "t.o"), PTR, 0, RA_E_NULL, "required" },
    { MLA, X_AS(v.data, "t.v"), PTR, 1, RA_E_SHAPE, "must be {0} because v_in_k is 1" },
    { ONE, X(q.token_stride), I64, 130, RA_E_STRIDE, "130 is negative or not a multiple of 4" },
    { ONE, X(q.head_stride), I64, -4, RA_E_STRIDE, "-4 is negative or not a multiple of 4" },
    { ONE, X(k.token_stride), I64, 3, RA_E_STRIDE, "3 is negative or not a multiple of 4" },
    { ONE, X(k.head_stride), I64, INT64_MIN, RA_E_STRIDE,
      "-9223372036854775808 is negative or not a multiple of 4" },
    { ONE, X(v.batch_stride), I64, 1, RA_E_STRIDE, "1 is negative or not a multiple of 4" },
    { ONE, X(v.token_stride), I64, (int64_t)1 << 61, RA_E_OVERFLOW,
      "2305843009213693952 bytes times 300 overflow" },
    { ONE, X(q.token_stride), I64, INT64_MAX - 3, RA_E_OVERFLOW,
      "9223372036854775804 bytes times 300 overflow" },
    { ONE, X(o.token_stride), I64, INT64_MAX - 3, RA_E_OVERFLOW,
      "9223372036854775804 bytes times 300 overflow" },
    { ONE, X(o.token_stride), I64, 126, RA_E_STRIDE, "126 is negative or not a multiple of 4" },
    { ONE, X_AS(o.token_stride, "t.o"), I64, 124, RA_E_STRIDE,
      "124 makes rows overlap: it must be at least 128 here. Packed, rows of 8 RA_F32 are 32 bytes "
      "per head, 128 per token, 38400 per sequence" },
    { ONE, X_AS(o.head_stride, "t.o"), I64, 28, RA_E_STRIDE,
      "28 makes rows overlap: it must be at least 32" },
    { ONE, X_AS(lse.token_stride, "t.lse"), I64, 12, RA_E_STRIDE,
      "at least 16 here. Packed, rows of 1 RA_F32 are 4 bytes per head, 16 per token" },
    { ONE, X_AS(k.token_stride, "t.k"), I64, 32, RA_E_STRIDE,
      "32 makes rows overlap: it must be at least 64 here" },
    { ONE, X_AS(q.head_stride, "t.q.token_stride"), I64, 9600, RA_E_UNSET,
      "is 0, but head_stride is 9600, not the 32 bytes of a row: set both" },
    { ONE, X_AS(v.head_stride, "t.v.token_stride"), I64, 9600, RA_E_UNSET, "set both" },
    { ONE, X_AS(o.head_stride, "t.o.token_stride"), I64, 9600, RA_E_UNSET, "set both" },
    { ONE, X_AS(lse.head_stride, "t.lse.token_stride"), I64, 1200, RA_E_UNSET,
      "is 0, but head_stride is 1200, not the 4 bytes of a row: set both" },
    { ONE, X(lse.head_stride), I64, 2, RA_E_STRIDE, "2 is negative or not a multiple of 4" },
    { ONE, X(q.rows), I64, 299, RA_E_SHAPE, "299 is not 300, the rows that this rank holds" },
    { ONE, X(k.rows), I64, 4096, RA_E_SHAPE, "4096 is not 300, the rows that this rank holds" },
    { ONE, X(v.rows), I64, -1, RA_E_SHAPE, "-1 is not 300, the rows that this rank holds" },
    { ARRAY, X(o.rows), I64, 76, RA_E_SHAPE, "76 is not 75, the rows that this rank holds" },
    { ONE, X(lse.rows), I64, 1, RA_E_SHAPE, "1 is not 300, the rows that this rank holds" },
    { ONE, X(d_v.rows), I64, INT64_MAX, RA_E_SHAPE, "9223372036854775807 is not 300" },
    { ONE, X(alibi), PTR, 1, RA_E_SHAPE, "is set, but scores lacks RA_SCORE_ALIBI" },
    { ONE, X(sinks), PTR, 1, RA_E_SHAPE, "is set, but scores lacks RA_SCORE_SINKS" },
    { ONE, X_AS(bias.data, "t.bias"), PTR, 1, RA_E_SHAPE,
      "is set, but scores lacks RA_SCORE_BIAS" },
    { ONE, X(bias_factors), PTR, 1, RA_E_SHAPE, "is set, but scores lacks RA_SCORE_FACTORS" },
    { FOUR, X_AS(q_pos.array, "t.q_pos"), PTR, 1, RA_E_POSITIONS,
      "must be {0}: it needs RA_LAYOUT_ARRAY, not RA_LAYOUT_CONTIGUOUS" },
    { FOUR, X_AS(k_pos.runs, "t.k_pos"), PTR, 1, RA_E_POSITIONS,
      "must be {0}: it needs RA_LAYOUT_ARRAY, not RA_LAYOUT_CONTIGUOUS" },
    { FOUR, X_AS(k_pos.count, "t.k_pos"), I64, 5, RA_E_POSITIONS,
      "must be {0}: it needs RA_LAYOUT_ARRAY, not RA_LAYOUT_CONTIGUOUS" },
    { ARRAY, X(q_pos.array), PTR, 0, RA_E_NULL, "required" },
    { ARRAY, X(k_pos.array), PTR, 0, RA_E_NULL, "required" },
    { ARRAY, X(q_pos.count), I64, 74, RA_E_POSITIONS, "74 is not 75, the number of rows" },
    { ARRAY, X(k_pos.count), I64, 76, RA_E_POSITIONS, "76 is not 75, the number of rows" },
    { ARRAY, X(q_pos.batch_step), I64, -3, RA_E_STRIDE, "-3 is negative" },
    { ARRAY, X(k_pos.batch_step), I64, INT64_MAX, RA_E_OVERFLOW, "9223372036854775807 overflows" },
};

TEST(tensors) {
    scope = IN_TENSORS;
    for (int base = 0; base < BASES; base++) {
        ra_ring *ring = make_base_ring(base);
        ra_tensors t;
        for (size_t i = 0; i < sizeof tensor_rows / sizeof tensor_rows[0]; i++) {
            const row *r = &tensor_rows[i];
            if (r->base != base) continue;
            h_context("row %d: %s = %lld", (int)i, r->field, (long long)r->value);
            base_tensors(&t, base);
            set_field(&t, r->at, r->kind, r->value);
            refuse_begin(ring, &t, r->status, r->field, r->words);
        }
        CHECK_EQ(ra_ring_destroy(ring), RA_OK);
        ra_plan_destroy(ring_plan);
    }
}

TEST(tensor_alignment) {
    static const struct { size_t at; const char *field; int off; } cases[5] = {
        { X_AS(q.data, "t.q"), 1 }, { X_AS(k.data, "t.k"), 2 }, { X_AS(v.data, "t.v"), 3 },
        { X_AS(o.data, "t.o"), 2 }, { X_AS(lse.data, "t.lse"), 1 },
    };
    ra_ring *ring = make_base_ring(ONE);
    scope = IN_TENSORS;
    for (int i = 0; i < 5; i++) {
        ra_tensors t;
        uint8_t *data = pool + cases[i].off;
        base_tensors(&t, ONE);
        memcpy((uint8_t *)&t + cases[i].at, &data, sizeof data);
        refuse_begin(ring, &t, RA_E_ALIGN, cases[i].field, "aligned to 4 bytes");
    }
    CHECK_EQ(ra_ring_destroy(ring), RA_OK);
    ra_plan_destroy(ring_plan);
}

TEST(tensor_scores) {
    static const float ones[8] = { 1, 1, 1, 1, 1, 1, 1, 1 };
    static const row rows_of[] = {
        { ONE, X(bias_factors), PTR, 0, RA_E_NULL, "is null, but scores has RA_SCORE_FACTORS" },
        { ONE, X(bias_factors), PTR, 1, RA_E_RANGE, "element 0 is not positive" },
        { ONE, X(alibi), PTR, 0, RA_E_NULL, "is null, but scores has RA_SCORE_ALIBI" },
        { ONE, X(sinks), PTR, 0, RA_E_NULL, "is null, but scores has RA_SCORE_SINKS" },
        { ONE, X_AS(bias.data, "t.bias"), PTR, 0, RA_E_NULL,
          "is null, but scores has RA_SCORE_BIAS" },
        { ONE, X(bias.keys), I64, 0, RA_E_RANGE, "0 is not positive" },
        { ONE, X(bias.keys), I64, -1, RA_E_RANGE, "-1 is not positive" },
        { ONE, X(bias.batch_step), I64, 6, RA_E_STRIDE, "6 is negative or not" },
        { ONE, X(bias.head_step), I64, 7, RA_E_STRIDE, "7 is negative or not" },
        { ONE, X(bias.row_step), I64, -8, RA_E_STRIDE, "-8 is negative or not" },
        { ONE, X(bias.key_step), I64, 9, RA_E_STRIDE, "not a multiple of 4" },
        { ONE, X(bias.batch_step), I64, INT64_MAX - 3, RA_E_OVERFLOW,
          "overflows 62 bits" },
        { ONE, X(bias.head_step), I64, INT64_MAX - 3, RA_E_OVERFLOW,
          "overflows 62 bits" },
        { ONE, X(bias.row_step), I64, INT64_MAX - 3, RA_E_OVERFLOW,
          "overflows 62 bits" },
        { ONE, X(bias.key_step), I64, INT64_MAX - 3, RA_E_OVERFLOW,
          "overflows 62 bits" },
    };
    ra_desc d;
    ra_ring *ring = NULL;
    scope = IN_TENSORS;
    base_desc(&d, ONE);
    d.scores = RA_SCORE_ALIBI | RA_SCORE_BIAS | RA_SCORE_SINKS | RA_SCORE_FACTORS;
    CHECK_EQ(ra_plan_create(&ring_plan, &d, NULL), RA_OK);
    CHECK_EQ(ra_ring_create(&ring, ring_plan, NULL, NULL), RA_OK);
    for (size_t i = 0; i < sizeof rows_of / sizeof rows_of[0]; i++) {
        const row *r = &rows_of[i];
        ra_tensors t;
        base_tensors(&t, ONE);
        t.alibi = t.sinks = t.bias.data = (const float *)(void *)pool;
        t.bias.keys = 300;
        t.bias_factors = ones;
        set_field(&t, r->at, r->kind, r->value);
        refuse_begin(ring, &t, r->status, r->field, r->words);
    }
    CHECK_EQ(ra_ring_destroy(ring), RA_OK);
    ra_plan_destroy(ring_plan);
}

/* What is no tensor has to be aligned too, in a call on one rank as in a ring. */
TEST(addresses) {
    static const struct { size_t at; const char *field; int off, words; int32_t dtype; } cases[] = {
        { X_AS(alibi, "t.alibi"), 2, 4, RA_F32 }, { X_AS(sinks, "t.sinks"), 3, 4, RA_F32 },
        { X_AS(bias.data, "t.bias"), 2, 4, RA_F32 }, { X_AS(bias.data, "t.bias"), 1, 2, RA_F16 },
    };
    ra_ring *ring = NULL;
    ra_desc d;
    scope = IN_TENSORS;
    base_desc(&d, ONE);
    d.scores = RA_SCORE_ALIBI | RA_SCORE_BIAS | RA_SCORE_SINKS;
    CHECK_EQ(ra_plan_create(&ring_plan, &d, NULL), RA_OK);
    CHECK_EQ(ra_ring_create(&ring, ring_plan, NULL, NULL), RA_OK);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        ra_tensors t;
        ra_error why = { 0 };
        char words[100];
        const uint8_t *data = pool + cases[i].off;
        base_tensors(&t, ONE);
        t.alibi = t.sinks = t.bias.data = (const float *)(void *)pool;
        t.bias.keys = 300;
        t.bias.dtype = cases[i].dtype;
        memcpy((uint8_t *)&t + cases[i].at, &data, sizeof data);
        snprintf(words, sizeof words, "data must be aligned to %d bytes; the address is a multiple "
                 "of that plus %d", cases[i].words, cases[i].off);
        refuse_begin(ring, &t, RA_E_ALIGN, cases[i].field, words);
        d.error = &why;
        CHECK_EQ(ra_attention(&d, &t, NULL, 0, 0, 1), RA_E_ALIGN);
        CHECK(!strcmp(why.field, cases[i].field) && !strcmp(why.text, words));
    }
    CHECK_EQ(ra_ring_destroy(ring), RA_OK);
    ra_plan_destroy(ring_plan);
}

/* The same of the block mathematics. */
TEST(addresses_of_states) {
    static float all[4][64];
    for (int i = 0; i < 8; i++) {
        static const char *const field[8] = { "state.m", "state.l", "state.acc", "delta", "delta",
                                              "grads.d_q", "grads.d_k", "grads.d_v" };
        ra_error why = { 0 };
        ra_desc d = ra_desc_make(1, 1, 4, RA_F32, RA_MASK_CAUSAL);
        ra_tensors t = { 0 };
        ra_state state = { all[0], all[0] + 8, all[0] + 16 };
        ra_grads g = { all[1], all[1] + 8, all[1] + 16 };
        float *delta = all[0] + 40, **at[8] = { &state.m, &state.l, &state.acc, &delta, &delta,
                                                &g.d_q, &g.d_k, &g.d_v };
        ra_status s;
        d.tokens = 1;
        d.train = 1;
        d.error = &why;
        t.q.data = t.k.data = t.v.data = t.d_o.data = all[2];
        t.o.data = all[3];
        t.lse.data = all[3] + 8;
        *at[i] = (float *)(void *)((uint8_t *)*at[i] + 2);
        if (i < 3) s = ra_state_clear(&d, &state);
        else if (i == 3) s = ra_delta(&d, &t, delta);
        else s = ra_fold_backward(&d, &t, delta, &g, pool, ra_attention_backward_bytes(&d, 1));
        CHECK_EQ(s, RA_E_ALIGN);
        CHECK(!strcmp(why.field, field[i]));
    }
}

/* Positions that only their owner knows, against mask and range. */
TEST(tensor_positions) {
    static int32_t cells[75];
    ra_desc d;
    ra_tensors t;
    ra_transport net;
    ra_ring *ring = NULL;
    scope = IN_TENSORS;
    base_desc(&d, ARRAY);
    d.mask.kind = RA_MASK_INTERVALS;
    d.mask.lo = d.mask.hi = ints;
    d.mask.interval_count = 300;
    base_transport(&net, 1);
    CHECK_EQ(ra_plan_create(&ring_plan, &d, NULL), RA_OK);
    CHECK_EQ(ra_ring_create(&ring, ring_plan, &net, NULL), RA_OK);
    for (int i = 0; i < 75; i++) cells[i] = i;
    base_tensors(&t, ARRAY);
    t.q_pos.array = cells;
    cells[74] = 300;
    refuse_begin(ring, &t, RA_E_POSITIONS, "t.q_pos.array", "300");
    cells[74] = -2;
    refuse_begin(ring, &t, RA_E_RANGE, "t.q_pos.array", "-2");
    t.q_pos.array = ints;
    t.k_pos.array = cells;
    refuse_begin(ring, &t, RA_E_RANGE, "t.k_pos.array", "-2");
    cells[74] = RA_MAX_POSITION;
    refuse_begin(ring, &t, RA_E_RANGE, "t.k_pos.array", number(RA_MAX_POSITION));
    CHECK_EQ(ra_ring_destroy(ring), RA_OK);
    ra_plan_destroy(ring_plan);
}

/* -------------------------------------------------------------------------- jobs */

TEST(jobs) {
    ra_ring *ring = make_base_ring(ONE);
    ra_plan *other = plan_of(FOUR, 1), *large = NULL;
    const ra_error *e = ra_ring_error(ring);
    ra_tensors t;
    ra_failure f;
    ra_desc d;
    ra_job job = { 0 };
    scope = IN_JOB;
    CHECK(e != NULL && e->status == RA_OK && !ra_ring_explain(ring)[0]);
    base_tensors(&t, ONE);
    job.tensors = &t;
    refused(ra_begin(ring, &job), ra_ring_error(ring), RA_E_NULL, "job.plan", NULL);
    job.plan = ring_plan;
    job.tensors = NULL;
    refused(ra_begin(ring, &job), ra_ring_error(ring), RA_E_NULL, "job.tensors", NULL);
    job.tensors = &t;
    job.deadline_ns = -9;
    refused(ra_begin(ring, &job), ra_ring_error(ring), RA_E_RANGE, "job.deadline_ns", "-9");
    job.deadline_ns = 0;
    job.ticket = 23;
    refused(ra_begin(ring, &job), ra_ring_error(ring), RA_E_SHAPE, "job.ticket", "23");
    job.ticket = 0;
    job.pass = RA_PASS_BACKWARD;
    refused(ra_begin(ring, &job), ra_ring_error(ring), RA_E_SHAPE, "job.pass",
            "RA_PASS_BACKWARD needs a plan with train = 1");
    job.pass = 2;
    refused(ra_begin(ring, &job), ra_ring_error(ring), RA_E_ENUM, "job.pass",
            "must be RA_PASS_FORWARD or RA_PASS_BACKWARD; it was 2");
    job.pass = RA_PASS_FORWARD;
    CHECK_EQ(ra_join(ring, &job, 0), RA_E_RANGE);   /* ticket 0 */
    CHECK_EQ(ra_join(ring, NULL, 0), RA_E_NULL);
    job.ticket = 1;
    CHECK_EQ(ra_join(ring, &job, -1), RA_E_RANGE);
    job.ticket = 0;
    refused(ra_begin(ring, NULL), ra_ring_error(ring), RA_E_NULL, "job", NULL);
    CHECK(!strcmp(ra_ring_explain(ring), "job: is required"));
    job.plan = other;
    refused(ra_begin(ring, &job), ra_ring_error(ring), RA_E_SHAPE, "job.plan",
            "is for rank 1 of 4; the ring is for another rank");
    base_desc(&d, ONE);
    d.tokens = 3000;
    d.q_heads = 64;
    CHECK_EQ(ra_plan_create(&large, &d, NULL), RA_OK);
    job.plan = large;
    refused(ra_begin(ring, &job), ra_ring_error(ring), RA_E_WORKSPACE, "ring.workspace_bytes",
            "less than the");
    CHECK_EQ(ra_begin(NULL, &job), RA_E_NULL);
    CHECK_EQ(ra_join(NULL, &job, 0), RA_E_NULL);
    CHECK_EQ(ra_step(NULL, 0), RA_E_NULL);
    CHECK_EQ(ra_step_wait(NULL, 1), RA_E_NULL);
    CHECK_EQ(ra_finish(NULL, 1), RA_E_NULL);
    CHECK_EQ(ra_forward(ring_plan, NULL, &t, 0), RA_E_NULL);
    CHECK_EQ(ra_forward(NULL, ring, &t, 0), RA_E_NULL);
    CHECK_EQ(ra_forward(ring_plan, ring, NULL, 0), RA_E_NULL);
    CHECK_EQ(ra_ring_failure(NULL, &f), RA_E_NULL);
    CHECK_EQ(ra_ring_failure(ring, NULL), RA_E_NULL);
    CHECK(ra_ring_error(NULL) != NULL);
    ra_ring_cancel(NULL);
    ra_ring_query(NULL, NULL);
    CHECK_EQ(ra_ring_destroy(ring), RA_OK);
    ra_plan_destroy(ring_plan);
    ra_plan_destroy(other);
    ra_plan_destroy(large);
}

TEST(order_of_calls) {
    ra_ring *ring = make_base_ring(ONE);
    ra_ring_counters c;
    ra_tensors t;
    ra_job job = { 0 };
    ra_status s = RA_AGAIN;
    scope = IN_JOB;
    base_tensors(&t, ONE);
    memset(pool, 0, POOL);
    job.plan = ring_plan;
    job.tensors = &t;
    refused(ra_step(ring, 0), ra_ring_error(ring), RA_E_STATE, "ring.pass", NULL);
    CHECK_EQ(ra_begin(ring, &job), RA_OK);
    refused(ra_begin(ring, &job), ra_ring_error(ring), RA_E_BUSY, "ring", NULL);
    CHECK_EQ(ra_forward(ring_plan, ring, &t, RA_NO_DEADLINE), RA_E_BUSY);
    refused(ra_step(ring, -1), ra_ring_error(ring), RA_E_RANGE, "ith", "-1");
    CHECK_EQ(ra_step(ring, 1), RA_WAIT);            /* one more than the plan has memory for */
    ra_ring_query(ring, &c);
    CHECK_EQ(c.state, RA_RING_RUNNING);
    while (s == RA_AGAIN) s = ra_step(ring, 0);
    CHECK_EQ(s, RA_OK);
    CHECK_EQ(ra_step(ring, 1), RA_OK);
    ra_ring_query(ring, &c);
    CHECK(c.state == RA_RING_IDLE && c.pass == 1);
    CHECK_EQ(ra_finish(ring, RA_NO_DEADLINE), RA_OK);
    CHECK_EQ(ra_forward(ring_plan, ring, &t, RA_NO_DEADLINE), RA_OK);
    CHECK_EQ(ra_ring_destroy(ring), RA_OK);
    ra_plan_destroy(ring_plan);
}

/* A ring whose pass failed accepts no other, and reports what happened. */
TEST(failed_ring) {
    ra_plan *plan = plan_of(FOUR, 0);
    ra_ring *ring = NULL;
    ra_transport net;
    ra_tensors t;
    ra_failure f;
    ra_status again;
    ra_job job = { 0 };
    scope = IN_JOB;
    base_transport(&net, 2);
    net.caps = RA_CAP_ANY_THREAD;      /* its post returns RA_E_IO, its quiesce RA_OK */
    base_tensors(&t, FOUR);
    job.plan = plan;
    job.tensors = &t;
    CHECK_EQ(ra_ring_create(&ring, plan, &net, NULL), RA_OK);
    CHECK_EQ(ra_forward(plan, ring, &t, RA_NO_DEADLINE), RA_E_IO);
    CHECK_EQ(ra_ring_failure(ring, &f), RA_OK);
    CHECK(f.status == RA_E_IO && f.code == RA_E_IO && f.rank == 0 && f.pass == 1 && f.text[0]);
    again = ra_begin(ring, &job);
    refused(again, ra_ring_error(ring), RA_E_IO, "ring", "1");
    CHECK_EQ(ra_ring_destroy(ring), RA_OK);
    ra_plan_destroy(plan);
}

/* -------------------------------------------------------------------------- one rank */

TEST(attention) {
    ra_desc d, vast;
    ra_tensors t;
    ra_error e = { 0 };
    size_t n;
    uint8_t *ws;
    scope = IN_ATTENTION;
    memset(pool, 0, POOL);
    base_desc(&d, ONE);
    base_tensors(&t, ONE);
    d.error = &e;
    d.threads = 2;
    n = ra_attention_bytes(&d, 2);
    ws = (uint8_t *)small_memory(n + 64);
    CHECK(n > 0);
    CHECK_EQ((int64_t)ra_attention_bytes(NULL, 1), 0);
    CHECK_EQ((int64_t)ra_attention_bytes(&d, 0), 0);
    vast = d;                          /* 2^59 bytes of dQ per thread */
    vast.train = vast.kv_heads = 1;
    vast.tokens = TOP - 1;
    vast.q_heads = 1 << 16;
    vast.k_dim = 1024;
    CHECK_EQ((int64_t)ra_attention_backward_bytes(&vast, 4096), 0);
    refused(e.status, &e, RA_E_OVERFLOW, "nth", "4096");
    CHECK_EQ(ra_attention(&d, &t, ws, n, 0, 2), RA_OK);
    CHECK_EQ(ra_attention(&d, &t, ws, n, 1, 2), RA_OK);
    refused(ra_attention(&d, &t, ws, n - 65, 0, 2), &e, RA_E_WORKSPACE, "workspace",
            number((int64_t)n));
    refused(ra_attention(&d, &t, ws + 1, n - 2, 0, 2), &e, RA_E_WORKSPACE, "workspace",
            number((int64_t)n));
    refused(ra_attention(&d, &t, ws, 100, 0, 2), &e, RA_E_WORKSPACE, "workspace",
            "has 100 bytes, but this call needs");
    refused(ra_attention(&d, &t, NULL, n, 0, 2), &e, RA_E_NULL, "workspace",
            "2 threads need one: see ra_attention_bytes");
    refused(ra_attention(&d, NULL, ws, n, 0, 2), &e, RA_E_NULL, "t", NULL);
    refused(ra_attention(&d, &t, ws, n, 2, 2), &e, RA_E_RANGE, "ith", "2");
    refused(ra_attention(&d, &t, ws, n, -1, 2), &e, RA_E_RANGE, "ith", "-1");
    refused(ra_attention(&d, &t, ws, n, 0, 0), &e, RA_E_RANGE, "nth", NULL);
    CHECK_EQ(ra_attention(NULL, &t, ws, n, 0, 2), RA_E_NULL);
    t.q.data = NULL;
    refused(ra_attention(&d, &t, ws, n, 0, 2), &e, RA_E_NULL, "t.q", NULL);
    base_tensors(&t, ONE);
    d.ranks = 4;
    d.layout.kind = RA_LAYOUT_CONTIGUOUS;
    refused(ra_attention(&d, &t, ws, n, 0, 2), &e, RA_E_SHAPE, "ranks", "4");
    CHECK_EQ((int64_t)ra_attention_bytes(&d, 2), 0);
    base_desc(&d, ONE);
    d.error = &e;
    d.layout.kind = RA_LAYOUT_RUNS;
    d.layout.q_runs = runs;
    d.layout.q_run_count = counts;
    runs[0].count = 300;
    refused(ra_attention(&d, &t, ws, n, 0, 1), &e, RA_E_UNSUPPORTED, "layout.kind",
            "RA_LAYOUT_RUNS is for rings: leave it 0");
    base_desc(&d, ONE);
    d.error = &e;
    d.k_dim = d.v_dim = 1000;
    refused(ra_attention(&d, &t, NULL, 0, 0, 1), &e, RA_E_WORKSPACE, "k_dim", "1000");
    free(ws);
}

/* Sequences of different lengths without lengths of keys mean tokens_of (+ q_offset). */
TEST(attention_lengths) {
    ra_desc d;
    ra_tensors t;
    ra_error e = { 0 };
    size_t n;
    uint8_t *ws;
    base_desc(&d, ONE);
    base_tensors(&t, ONE);
    d.error = &e;
    d.sequences = 2;
    d.tokens_of = lengths;
    n = ra_attention_bytes(&d, 1);
    CHECK(n > 0);
    ws = (uint8_t *)small_memory(n);
    h_context("%s: %s", e.field, e.text);
    CHECK_EQ(ra_attention(&d, &t, ws, n, 0, 1), RA_OK);
    free(ws);
}

TEST(attention_positions) {
    static ra_run list[2];
    static int32_t cells[300];
    ra_positions *of[2];
    ra_desc d;
    ra_tensors t;
    ra_error e = { 0 };
    size_t n;
    uint8_t *ws;
    scope = IN_ATTENTION;
    base_desc(&d, ONE);
    d.error = &e;
    n = ra_attention_bytes(&d, 1);
    ws = (uint8_t *)small_memory(n);
    for (int keys = 0; keys < 2; keys++) {
        const char *runs_field = keys ? "t.k_pos.runs" : "t.q_pos.runs";
        const char *array_field = keys ? "t.k_pos.array" : "t.q_pos.array";
        const char *count_field = keys ? "t.k_pos.count" : "t.q_pos.count";
        const char *step_field = keys ? "t.k_pos.batch_step" : "t.q_pos.batch_step";
        ra_positions *p;
        base_tensors(&t, ONE);
        of[0] = &t.q_pos;
        of[1] = &t.k_pos;
        p = of[keys];
        for (int i = 0; i < 300; i++) cells[i] = 299 - i;
        p->array = cells;
        p->count = 300;
        d.kv_tokens = 0;               /* the default of queries at positions that are given */
        if (keys) CHECK_EQ(ra_attention(&d, &t, ws, n, 0, 1), RA_OK);
        else refused(ra_attention(&d, &t, ws, n, 0, 1), &e, RA_E_UNSET, "kv_tokens", "300");
        d.kv_tokens = 300;
        CHECK_EQ(ra_attention(&d, &t, ws, n, 0, 1), RA_OK);
        p->count = 299;
        refused(ra_attention(&d, &t, ws, n, 0, 1), &e, RA_E_POSITIONS, count_field, "299");
        p->count = 300;
        cells[7] = -2;
        refused(ra_attention(&d, &t, ws, n, 0, 1), &e, RA_E_RANGE, array_field, "-2");
        cells[7] = -1;
        CHECK_EQ(ra_attention(&d, &t, ws, n, 0, 1), RA_OK);
        p->runs = list;
        refused(ra_attention(&d, &t, ws, n, 0, 1), &e, RA_E_SHAPE, runs_field, NULL);
        p->array = NULL;
        p->count = 2;
        list[0].first = 0; list[0].count = 150; list[0].stride = 0;
        list[1].first = 1000; list[1].count = 150; list[1].stride = 3;
        CHECK_EQ(ra_attention(&d, &t, ws, n, 0, 1), RA_OK);
        list[1].count = 151;
        refused(ra_attention(&d, &t, ws, n, 0, 1), &e, RA_E_POSITIONS, runs_field, "301");
        list[1].count = 150;
        list[1].stride = INT64_MAX;
        refused(ra_attention(&d, &t, ws, n, 0, 1), &e, RA_E_RANGE, runs_field, "1");
        list[1].stride = 1;
        list[1].first = INT64_MAX;
        refused(ra_attention(&d, &t, ws, n, 0, 1), &e, RA_E_RANGE, runs_field, "1");
        list[1].first = -1;
        refused(ra_attention(&d, &t, ws, n, 0, 1), &e, RA_E_RANGE, runs_field, "1");
        list[1].first = 1000;
        p->batch_step = 16;
        refused(ra_attention(&d, &t, ws, n, 0, 1), &e, RA_E_SHAPE, step_field, "16");
        p->batch_step = 0;
        p->count = -1;
        refused(ra_attention(&d, &t, ws, n, 0, 1), &e, RA_E_RANGE, count_field, "-1");
        p->count = 2;
        p->runs = NULL;
        refused(ra_attention(&d, &t, ws, n, 0, 1), &e, RA_E_NULL, runs_field, "2");
    }
    free(ws);
}

static int simple(const int *a, float scale) {
    const float *in = (const float *)(void *)pool;
    return ra_attention_simple((float *)(void *)out_pool, in, in, in, a[0], a[1], a[2], a[3], a[4],
                               scale, a[5], a[6]);
}

TEST(attention_simple) {
    static const int good[7] = { 4, 8, 4, 2, 16, 0, 4 };
    static const struct { int at, value, status; } bad[] = {
        { 0, -1, RA_E_RANGE }, { 1, -8, RA_E_RANGE },
        { 2, 0, RA_E_RANGE }, { 2, -4, RA_E_RANGE }, { 2, 3, RA_E_SHAPE }, { 3, 0, RA_E_RANGE },
        { 3, 3, RA_E_SHAPE }, { 3, 8, RA_E_SHAPE }, { 4, 0, RA_E_RANGE }, { 4, 257, RA_E_RANGE },
        { 6, -1, RA_E_RANGE }, { 6, INT32_MAX, RA_E_OVERFLOW },
    };
    const float *in = (const float *)(void *)pool;
    float *out = (float *)(void *)out_pool;
    memset(pool, 0, POOL);
    CHECK_EQ(simple(good, 0), RA_OK);
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        int a[7], s;
        memcpy(a, good, sizeof a);
        a[bad[i].at] = bad[i].value;
        s = simple(a, 0);
        h_context("argument %d = %d: %s", bad[i].at, bad[i].value, ra_status_text(s));
        CHECK(s == bad[i].status || (bad[i].value == 0 && s == RA_E_UNSET) ||
              (bad[i].status == RA_E_OVERFLOW && s == RA_E_RANGE));
    }
    CHECK_EQ(simple(good, NAN), RA_E_RANGE);
    CHECK_EQ(ra_attention_simple(NULL, in, in, in, 1, 1, 1, 1, 8, 0, 0, 0), RA_E_NULL);
    CHECK_EQ(ra_attention_simple(out, NULL, in, in, 1, 1, 1, 1, 8, 0, 0, 0), RA_E_NULL);
    CHECK_EQ(ra_attention_simple(out, in, NULL, in, 1, 1, 1, 1, 8, 0, 0, 0), RA_E_NULL);
    CHECK_EQ(ra_attention_simple(out, in, in, NULL, 1, 1, 1, 1, 8, 0, 0, 0), RA_E_NULL);
}

TEST(states) {
    ra_desc d, out;
    ra_plan *plan = NULL;
    ra_tensors t;
    ra_state s, bad;
    ra_error e = { 0 };
    size_t n;
    float *room = (float *)(void *)out_pool;
    uint8_t *ws;
    scope = IN_STATE;
    base_desc(&d, ONE);
    base_tensors(&t, ONE);
    d.error = &e;
    n = ra_attention_bytes(&d, 1);
    ws = (uint8_t *)small_memory(n);
    s.m = room + POOL / 16;
    s.l = s.m + 300 * 4;
    s.acc = s.l + 300 * 4;
    CHECK_EQ(ra_state_clear(&d, &s), RA_OK);
    CHECK_EQ(ra_fold(&d, &s, &t, ws, n), RA_OK);
    CHECK_EQ(ra_state_finish(&d, &s, &t), RA_OK);
    for (int i = 0; i < 3; i++) {
        bad = s;
        if (i == 0) bad.m = NULL;
        if (i == 1) bad.l = NULL;
        if (i == 2) bad.acc = NULL;
        CHECK_EQ(ra_state_clear(&d, &bad), RA_E_NULL);
        CHECK_EQ(ra_fold(&d, &bad, &t, ws, n), RA_E_NULL);
        CHECK_EQ(ra_state_merge(&d, &bad, &s), RA_E_NULL);
        CHECK_EQ(ra_state_merge(&d, &s, &bad), RA_E_NULL);
        CHECK_EQ(ra_state_finish(&d, &bad, &t), RA_E_NULL);
    }
    CHECK_EQ(ra_state_clear(NULL, &s), RA_E_NULL);
    CHECK_EQ(ra_state_clear(&d, NULL), RA_E_NULL);
    CHECK_EQ(ra_fold(&d, NULL, &t, ws, n), RA_E_NULL);
    CHECK_EQ(ra_fold(&d, &s, NULL, ws, n), RA_E_NULL);
    CHECK_EQ(ra_state_merge(&d, NULL, &s), RA_E_NULL);
    CHECK_EQ(ra_state_finish(&d, &s, NULL), RA_E_NULL);
    refused(ra_fold(&d, &s, &t, ws, n - 65), &e, RA_E_WORKSPACE, "workspace",
            number((int64_t)n));
    refused(ra_fold(&d, &s, &t, ws + 1, n - 2), &e, RA_E_WORKSPACE, "workspace",
            number((int64_t)n));
    CHECK_EQ(ra_fold(&d, &s, &t, NULL, 0), RA_OK);     /* one thread, short rows: the stack */
    d.form = RA_FORM_SAME;             /* other calls refuse it too */
    refused(ra_fold(&d, &s, &t, ws, n), &e, RA_E_UNSUPPORTED, "form",
            "RA_FORM_SAME is for ra_attention and caches only");
    CHECK_EQ(ra_plan_create(&plan, &d, NULL), RA_E_UNSUPPORTED);
    CHECK_EQ(ra_ring_once(&d, NULL, &t, 0), RA_E_UNSUPPORTED);
    CHECK_EQ(ra_desc_resolve(&d, &out), RA_OK);
    d.train = 1;
    CHECK_EQ(ra_attention_backward_bytes(&d, 1), 0);
    refused(e.status, &e, RA_E_SHAPE, "form", "RA_FORM_SAME needs train = 0");
    d.form = d.train = 0;
    t.o.data = NULL;
    refused(ra_state_finish(&d, &s, &t), &e, RA_E_NULL, "t.o", NULL);
    d.k_dim = 0;
    CHECK_EQ(ra_state_clear(&d, &s), RA_E_UNSET);
    CHECK_EQ(ra_state_merge(&d, &s, &s), RA_E_UNSET);
    free(ws);
}

/* -------------------------------------------------------------------------- memory runs out */

static int64_t plan_refusals, ring_refusals, world_refusals;

static void fail_plan(int base) {
    for (int64_t n = 1; ; n++) {
        small_heap heap = { 0 };
        ra_allocator a = small_heap_allocator(&heap);
        ra_plan *plan = NULL;
        ra_error e = { 0 };
        ra_desc d;
        ra_status s;
        heap.fail_at = n;
        base_desc(&d, base);
        d.error = &e;
        s = ra_plan_create(&plan, &d, &a);
        if (s == RA_OK) {
            CHECK(n == 2 && heap.calls == 1 && heap.live == 1);        /* one allocation */
            ra_plan_destroy(plan);
            CHECK(heap.live == 0 && heap.wrong == 0);
            return;
        }
        CHECK_EQ(s, RA_E_NOMEM);
        record(&e, s);
        CHECK(plan == NULL && heap.live == 0 && heap.wrong == 0 && n == 1);
        plan_refusals++;
        if (n > 1) return;
    }
}

static void fail_ring(int base, int own_workspace) {
    ra_plan *plan = plan_of(base, 0);
    ra_plan_report rep;
    uint8_t *room;
    CHECK_EQ(ra_plan_query(plan, 0, &rep), RA_OK);
    room = (uint8_t *)small_memory((size_t)rep.workspace_bytes);
    for (int64_t n = 1; n < 50; n++) {
        small_heap heap = { 0 };
        ra_ring_desc rd = { 0 };
        ra_ring *ring = NULL;
        ra_transport t;
        ra_error e = { 0 };
        ra_status s;
        rd.allocator = small_heap_allocator(&heap);
        rd.error = &e;
        if (own_workspace) {
            rd.workspace = room;
            rd.workspace_bytes = (size_t)rep.workspace_bytes;
        }
        heap.fail_at = n;
        base_transport(&t, 1);
        s = ra_ring_create(&ring, plan, base == ONE ? NULL : &t, &rd);
        if (s == RA_OK) {
            CHECK_EQ(ra_ring_destroy(ring), RA_OK);
            CHECK(heap.live == 0 && heap.wrong == 0 && heap.calls < n);
            CHECK_EQ(heap.calls, !own_workspace);
            break;
        }
        CHECK_EQ(s, RA_E_NOMEM);
        record(&e, s);
        CHECK(ring == NULL && heap.live == 0 && heap.wrong == 0);
        ring_refusals++;
    }
    free(room);
    ra_plan_destroy(plan);
}

TEST(allocations) {
    scope = IN_PLAN;
    for (int base = 0; base < BASES; base++) {
        fail_plan(base);
        fail_ring(base, 0);
        fail_ring(base, 1);
    }
    for (int run = 0; run < 2; run++) {
        for (int64_t n = 1; n < 50; n++) {
            small_heap heap = { 0 };
            ra_world_desc wd = { 0 };
            ra_world *world = NULL;
            ra_error e = { 0 };
            ra_status s;
            heap.fail_at = n;
            wd.ranks = 3;
            wd.allocator = small_heap_allocator(&heap);
            wd.error = &e;
            s = run ? ra_world_run(3, no_rank, NULL, &wd) : ra_world_create(&world, &wd);
            if (s == RA_OK) ra_world_destroy(world);
            CHECK(heap.live == 0 && heap.wrong == 0);
            if (s == RA_OK) break;
            CHECK_EQ(s, RA_E_NOMEM);
            record(&e, s);
            world_refusals++;
        }
    }
    CHECK_EQ(plan_refusals, BASES);
    CHECK_EQ(ring_refusals, BASES);    /* none with the caller's workspace */
    CHECK(world_refusals >= 2);
}

/* Nothing allocates between the creation of a ring and its end. */
TEST(no_allocation_in_a_pass) {
    ra_plan *plan = plan_of(ONE, 0);
    small_heap heap = { 0 };
    ra_ring_desc rd = { 0 };
    ra_ring *ring = NULL;
    ra_tensors t;
    int64_t calls;
    memset(pool, 0, POOL);
    rd.allocator = small_heap_allocator(&heap);
    CHECK_EQ(ra_ring_create(&ring, plan, NULL, &rd), RA_OK);
    calls = heap.calls;
    base_tensors(&t, ONE);
    for (int i = 0; i < 3; i++) CHECK_EQ(ra_forward(plan, ring, &t, RA_NO_DEADLINE), RA_OK);
    CHECK_EQ(heap.calls, calls);
    CHECK_EQ(ra_ring_destroy(ring), RA_OK);
    CHECK_EQ(heap.live, 0);
    ra_plan_destroy(plan);
}

/* -------------------------------------------------------------------------- random bytes
 * Pointers are null or valid: arrays have MANY entries, so counts are small or out of range, and
 * strides are small or absurd. What is accepted is small enough to be run. */

static int64_t some_number(void) {
    static const int64_t odd[] = { 0, 1, -1, 2, 3, 4, 63, 64, 65, 127, 300, 1024, 1025, 4096, 4097,
                                   INT32_MAX, INT32_MIN, RA_MAX_POSITION, INT64_MAX, INT64_MIN };
    if (small_chance(50)) return odd[small_rand(sizeof odd / sizeof odd[0])];
    if (small_chance(80)) return small_range(0, 20);
    return (int64_t)(((uint64_t)small_rand(UINT32_MAX) << 32) | small_rand(UINT32_MAX));
}

static float some_float(void) {
    uint32_t bits = small_rand(UINT32_MAX);
    float x;
    if (small_chance(40)) return 0;
    if (small_chance(50)) return small_float() * 3;
    memcpy(&x, &bits, 4);
    return x;
}

/* Keeps counts that are refused, or small. */
static int64_t small_or_absurd(int64_t value, int64_t most, int64_t absurd) {
    if (value < 0 || value > absurd) return value;
    return value > most ? value % (most + 1) : value;
}

static const void *null_or(const void *p) { return small_chance(50) ? p : NULL; }

static void random_arrays(void) {
    static const int32_t small_values[8] = { 0, 1, 2, 3, -1, 64, 5, 7 };
    int wild = small_chance(30);
    for (int i = 0; i < MANY; i++) {
        ints[i] = wild ? (int32_t)some_number() : small_values[small_rand(8)];
        if (ints[i] > 200 && ints[i] < RA_MAX_POSITION) ints[i] = 200;
        longs[i] = wild ? some_number() : (int64_t)i * small_rand(3);
        if (longs[i] > 200 && longs[i] < RA_MAX_POSITION) longs[i] = 200;
    }
}

/* Tables of runs have as many entries as their counts say. */
static ra_run run_table[3 * MANY];
static int32_t run_counts[MANY];

static void random_table(void) {
    int64_t at = 0;
    for (int i = 0; i < MANY; i++) run_counts[i] = small_chance(99) ? (int32_t)small_rand(3) : -1;
    for (int i = 0; i < 200; i++) {
        run_table[i].first = small_chance(90) ? at : some_number();
        run_table[i].count = small_chance(90) ? small_range(0, 6) : some_number();
        run_table[i].stride = small_chance(90) ? small_range(0, 1) : some_number();
        at += run_table[i].count > 0 && run_table[i].count < 10 ? run_table[i].count : 1;
    }
}

static void random_fields(ra_desc *d) {
    int32_t *narrow[] = { &d->sequences, &d->ranks, &d->rank, &d->q_heads, &d->kv_heads, &d->k_dim,
        &d->v_dim, &d->q_dtype, &d->k_dtype, &d->v_dtype, &d->o_dtype, &d->v_in_k, &d->v_column,
        &d->scores, &d->form, &d->chunk_tokens, &d->buffers, &d->order, &d->threads, &d->isa,
        &d->mask.kind, &d->mask.causal_block, &d->layout.kind };
    int64_t *wide[] = { &d->tokens, &d->kv_tokens, &d->q_offset, &d->mask.window,
        &d->mask.right_limit, &d->mask.prefix, &d->mask.keep, &d->mask.doc_count,
        &d->mask.interval_count };
    int chance = small_chance(60) ? 1 : small_chance(60) ? 5 : 60;
    for (size_t i = 0; i < sizeof narrow / sizeof narrow[0]; i++)
        if (small_chance(chance)) *narrow[i] = (int32_t)some_number();
    for (size_t i = 0; i < sizeof wide / sizeof wide[0]; i++)
        if (small_chance(chance)) *wide[i] = some_number();
    if (small_chance(chance)) d->scale = some_float();
    if (small_chance(chance)) d->softcap = some_float();
}

static void random_desc(ra_desc *d) {
    int chance = small_chance(60) ? 0 : small_chance(60) ? 4 : 40;
    base_fields(d, small_range(0, BASES - 1));
    random_table();
    random_fields(d);
    if (small_chance(chance)) d->tokens_of = (const int64_t *)null_or(longs);
    if (small_chance(chance)) d->kv_tokens_of = (const int64_t *)null_or(longs);
    if (small_chance(chance)) d->mask.doc_first = (const int64_t *)null_or(longs);
    if (small_chance(chance)) d->mask.lo = (const int32_t *)null_or(ints);
    if (small_chance(chance)) d->mask.hi = (const int32_t *)null_or(ints);
    if (small_chance(chance)) d->layout.weights = (const int32_t *)null_or(ints);
    if (small_chance(chance)) d->layout.q_rows = (const int64_t *)null_or(longs);
    if (small_chance(chance)) d->layout.k_rows = (const int64_t *)null_or(longs);
    if (d->layout.q_runs || small_chance(chance)) {
        d->layout.q_runs = (const ra_run *)null_or(run_table);
        d->layout.q_run_count = (const int32_t *)null_or(run_counts);
        d->layout.k_runs = (const ra_run *)null_or(run_table);
        d->layout.k_run_count = (const int32_t *)null_or(run_counts);
    }
    d->sequences = (int32_t)small_or_absurd(d->sequences, 3, 1 << 20);
    d->ranks = (int32_t)small_or_absurd(d->ranks, 16, 4096);
    d->tokens = small_or_absurd(d->tokens, 300, RA_MAX_POSITION);
    d->kv_tokens = small_or_absurd(d->kv_tokens, 300, RA_MAX_POSITION);
    d->q_offset = small_or_absurd(d->q_offset, 300, RA_MAX_POSITION);
    d->q_heads = (int32_t)small_or_absurd(d->q_heads, 8, 1 << 16);
    d->k_dim = (int32_t)small_or_absurd(d->k_dim, 40, 1024);
    d->v_dim = (int32_t)small_or_absurd(d->v_dim, 40, 1024);
    d->threads = (int32_t)small_or_absurd(d->threads, 8, 4096);
    d->mask.doc_count = small_or_absurd(d->mask.doc_count, MANY, RA_MAX_POSITION);
    d->mask.interval_count = small_or_absurd(d->mask.interval_count, MANY, RA_MAX_POSITION);
}

/* Two or more rows that are 2^61 bytes apart are refused. A single row may have such a stride,
 * because nothing is read there. */
static int64_t small_stride(void) {
    int64_t x = small_chance(50) ? 0 : small_chance(90) ? 4 * small_range(0, 128) : some_number();
    return small_or_absurd(x, 512, (int64_t)1 << 61);
}

static void random_positions(ra_positions *p) {
    if (small_chance(70)) return;
    p->array = (const int32_t *)null_or(ints);
    p->runs = small_chance(30) ? run_table : NULL;
    p->count = small_or_absurd(some_number(), p->runs ? 200 : MANY / 16, INT32_MAX);
    if (p->count > MANY) p->runs = NULL;
    p->batch_step = small_or_absurd(some_number(), MANY / 16 - 1, INT32_MAX);
    if (p->count > MANY / 16 || p->batch_step > MANY / 16) p->array = NULL;
}

static void random_tensors(ra_tensors *t, const ra_desc *d) {
    ra_in *in[3];
    ra_out *out[2];
    memset(t, 0, sizeof *t);
    in[0] = &t->q; in[1] = &t->k; in[2] = &t->v;
    out[0] = &t->o; out[1] = &t->lse;
    for (int i = 0; i < 3; i++) {
        in[i]->data = small_chance(98) ? pool + (small_chance(95) ? 64 : small_range(0, 64)) : NULL;
        if (small_chance(60)) continue;
        in[i]->batch_stride = small_stride();
        in[i]->token_stride = small_stride();
        in[i]->head_stride = small_stride();
    }
    if (d->v_in_k && small_chance(95)) t->v.data = NULL;
    for (int i = 0; i < 2; i++) {
        out[i]->data = small_chance(98) ? out_pool + i * (POOL / 2) : NULL;
        if (small_chance(60)) continue;
        out[i]->batch_stride = small_stride();
        out[i]->token_stride = small_stride();
        out[i]->head_stride = small_stride();
    }
    if ((d->scores & RA_SCORE_ALIBI) || small_chance(3)) t->alibi = (const float *)(void *)pool;
    if ((d->scores & RA_SCORE_SINKS) || small_chance(3)) t->sinks = (const float *)(void *)pool;
    if ((d->scores & RA_SCORE_BIAS) || small_chance(3)) t->bias.data = (const float *)(void *)pool;
    if (d->scores & RA_SCORE_FACTORS) t->bias_factors = (const float *)(void *)pool;
    t->bias.keys = t->bias.data ? small_or_absurd(some_number(), 1000, INT64_MAX - 1) : 0;
    t->bias.key_step = small_chance(50) ? 4 : small_or_absurd(small_stride(), 400, INT64_MAX - 1);
    t->bias.row_step = small_stride();
    t->bias.head_step = small_stride();
    t->bias.batch_step = small_stride();
    random_positions(&t->q_pos);
    random_positions(&t->k_pos);
}

static void random_call(const ra_desc *given, int64_t *ran) {
    ra_desc d = *given;
    ra_tensors t;
    int nth = small_range(1, 3), ok = 1;
    size_t n;
    uint8_t *ws;
    random_tensors(&t, &d);
    n = ra_attention_bytes(&d, nth);
    if (n == 0) {
        CHECK(ra_attention(&d, &t, pool, POOL, 0, nth) < 0);
        return;
    }
    if (!CHECK(n < (size_t)1 << 28)) return;
    ws = (uint8_t *)small_memory(n);
    for (int i = 0; i < nth; i++) {
        ra_status s = ra_attention(&d, &t, ws, n, i, nth);
        CHECK(s <= RA_OK && s > RA_E_MISMATCH);
        ok &= s == RA_OK;
    }
    *ran += ok;
    free(ws);
}

static void random_transport(ra_transport *t) {
    base_transport(t, small_range(0, 2));
    if (small_chance(10)) t->size = small_rand(400);
    if (small_chance(5)) t->abi = small_rand(3);
    if (small_chance(30)) t->caps = small_chance(80) ? small_rand(32) : small_rand(UINT32_MAX);
    if (small_chance(30)) t->channels = small_rand(70);
    if (small_chance(30)) t->tag_bits = small_rand(70);
    if (small_chance(30)) t->max_ops = small_rand(10);
    if (small_chance(20)) { t->rank = small_range(-1, 4); t->ranks = small_range(-1, 16); }
    if (small_chance(30)) t->max_msg = (size_t)some_number();
    if (small_chance(30)) t->align = small_chance(80) ? (size_t)1 << small_rand(14)
                                                      : (size_t)some_number();
    if (small_chance(5)) t->post = NULL;
    if (small_chance(5)) t->poll = NULL;
    if (small_chance(5)) t->dereg = NULL;
    if (small_chance(5)) t->release = NULL;
    if (small_chance(20)) t->abort = NULL;
    if (small_chance(20)) t->quiesce = NULL;
}

static void random_ring(const ra_plan *plan, small_heap *heap, int64_t *made) {
    ra_ring_desc rd = { 0 };
    ra_transport t;
    ra_ring *ring = NULL;
    ra_status s;
    ra_error e = { 0 };
    random_transport(&t);
    rd.allocator = small_heap_allocator(heap);
    rd.error = &e;
    if (small_chance(20)) {
        rd.workspace = pool + small_range(0, 128);
        rd.workspace_bytes = POOL / 2;
    }
    if (small_chance(20)) rd.workspace_bytes = (size_t)some_number();
    if (rd.workspace && rd.workspace_bytes > POOL / 2) rd.workspace_bytes = POOL / 2;
    if (small_chance(20)) rd.watchdog_ns = some_number();
    if (small_chance(20)) rd.quiesce_ns = some_number();
    s = ra_ring_create(&ring, plan, small_chance(95) ? &t : NULL, &rd);
    CHECK((s == RA_OK) == (ring != NULL) && s > RA_E_MISMATCH);
    if (s) CHECK(e.status == s && e.field[0] && e.text[0]);
    else (*made)++;
    CHECK_EQ(ra_ring_destroy(ring), RA_OK);
    CHECK(heap->wrong == 0);
}

TEST(random_bytes) {
    int64_t cases = h_run.large ? 1000000 : 25000, accepted = 0, ran = 0, made = 0;
    base_arrays();
    for (int64_t i = 0; i < cases; i++) {
        h_rng rng;
        ra_desc d, out;
        ra_plan *plan = NULL;
        ra_error e[2];
        small_heap heap = { 0 };
        ra_allocator a;
        ra_status s;
        if (!h_case(i)) continue;
        if (i % 8 == 0 || h_run.only_case >= 0) {      /* eight descriptors with these arrays */
            rng = h_case_rng(-1 - i / 8);
            small_seed(rng.state);
            random_arrays();
        }
        rng = h_case_rng(i);
        small_seed(rng.state);
        memset(e, 0, sizeof e);
        a = small_heap_allocator(&heap);
        random_desc(&d);
        h_context("B %d P %d T %lld mask %d layout %d", d.sequences, d.ranks, (long long)d.tokens,
                  d.mask.kind, d.layout.kind);
        d.error = &e[0];
        s = ra_desc_resolve(&d, &out);
        CHECK(s <= RA_OK && s > RA_E_MISMATCH);
        if (s) CHECK(e[0].status == s && e[0].field[0] && e[0].text[0]);
        d.error = small_chance(50) ? &e[1] : NULL;
        if (s || d.ranks <= 16) {
            ra_status made_plan = ra_plan_create(&plan, &d, &a);
            CHECK(made_plan == s || (s == RA_OK && made_plan < 0 && made_plan > RA_E_MISMATCH));
            if (d.error && made_plan) CHECK_EQ(e[1].status, made_plan);
        }
        if (plan) random_ring(plan, &heap, &made);
        accepted += plan != NULL;
        ra_plan_destroy(plan);
        CHECK(heap.live == 0 && heap.wrong == 0);
        if (small_chance(50)) { d.ranks = d.rank = 0; }
        random_call(&d, &ran);
    }
    if (h_run.only_case < 0) {
        printf("%lld of %lld accepted, %lld rings, %lld calls ran\n", (long long)accepted,
               (long long)cases, (long long)made, (long long)ran);
        CHECK(accepted > cases / 50 && ran > cases / 100 && made > cases / 100);
    }
}

/* -------------------------------------------------------------------------- every refusal */

/* Strides that fit each dimension and its neighbour, but not all dimensions together; strides in
 * elements instead of bytes; an output in the memory of an input. */
TEST(strides_together) {
    static float q[4096], o[4096];
    ra_error e;
    ra_desc d = ra_desc_make(2, 2, 16, RA_F32, RA_MASK_NONE);
    ra_tensors t = { 0 };
    d.sequences = 2;
    d.tokens = 2;
    d.error = &e;
    t.q.data = t.k.data = t.v.data = q;
    t.o.data = o;
    scope = IN_ATTENTION;
    CHECK_EQ(ra_attention(&d, &t, NULL, 0, 0, 1), RA_OK);
    t.o.head_stride = 64; t.o.token_stride = 128; t.o.batch_stride = 192;
    refused(ra_attention(&d, &t, NULL, 0, 0, 1), &e, RA_E_STRIDE, "t.o",
            "stride 192 makes rows overlap: it must be at least 256");
    t.o.batch_stride = 256;
    CHECK_EQ(ra_attention(&d, &t, NULL, 0, 0, 1), RA_OK);
    t.k.token_stride = 32;             /* elements of two heads */
    refused(ra_attention(&d, &t, NULL, 0, 0, 1), &e, RA_E_STRIDE, "t.k.token_stride", "32");
    t.k.token_stride = 0;
    t.k.head_stride = 2 * 64;          /* of [head][token][dim], and token_stride forgotten */
    refused(ra_attention(&d, &t, NULL, 0, 0, 1), &e, RA_E_UNSET, "t.k.token_stride", "set both");
    t.k.token_stride = 64;
    CHECK_EQ(ra_attention(&d, &t, NULL, 0, 0, 1), RA_OK);
    t.k.head_stride = t.k.token_stride = 0;
    t.o.head_stride = 128;             /* [token][head][dim] with gaps between heads */
    t.o.token_stride = 256;
    t.o.batch_stride = 0;
    CHECK_EQ(ra_attention(&d, &t, NULL, 0, 0, 1), RA_OK);
    t.o.head_stride = 160;             /* a head has two rows, 128 apart */
    t.o.token_stride = 128;
    refused(ra_attention(&d, &t, NULL, 0, 0, 1), &e, RA_E_STRIDE, "t.o",
            "stride 160 makes rows overlap: it must be at least 192");
    t.o.head_stride = t.o.token_stride = 0;
    t.o.data = q;
    refused(ra_attention(&d, &t, NULL, 0, 0, 1), &e, RA_E_SHAPE, "t.o", NULL);
    t.o.data = q + 1;                  /* not the first element */
    refused(ra_attention(&d, &t, NULL, 0, 0, 1), &e, RA_E_SHAPE, "t.o", NULL);
}

/* -------------------------------------------------------------------------- names of constants */

#define NAMED(c) { c, #c }
typedef struct named { int32_t value; const char *name; } named;

/* An unknown constant of a field is refused with the names of all that there are, in order. */
static void refuse_unknown(ra_desc *d, int32_t *field, const char *name, const named *known,
                           int n) {
    char list[RA_TEXT_BYTES] = "must be ";
    ra_error e = { 0 };
    const int32_t kept = *field;
    for (int i = 0; i < n; i++) {
        CHECK_EQ(known[i].value, known[0].value + i);
        if (i) strcat(list, i + 1 < n ? ", " : " or ");
        strcat(list, known[i].name);
    }
    strcat(list, "; it was 77");
    d->error = &e;
    *field = 77;
    refused(ra_desc_resolve(d, d), &e, RA_E_ENUM, name, list);
    CHECK_EQ((int64_t)strlen(e.text), (int64_t)strlen(list));
    *field = kept;
}

TEST(names_of_constants) {
    static const named mask[] = { NAMED(RA_MASK_NONE), NAMED(RA_MASK_CAUSAL),
                                  NAMED(RA_MASK_INTERVALS) };
    static const named layout[] = { NAMED(RA_LAYOUT_UNSET), NAMED(RA_LAYOUT_CONTIGUOUS),
                                    NAMED(RA_LAYOUT_ZIGZAG), NAMED(RA_LAYOUT_STRIPED),
                                    NAMED(RA_LAYOUT_RUNS), NAMED(RA_LAYOUT_ARRAY) };
    static const named isa[] = { NAMED(RA_ISA_AUTO), NAMED(RA_ISA_SCALAR), NAMED(RA_ISA_AVX2),
                                 NAMED(RA_ISA_AVX512), NAMED(RA_ISA_AVX512_BF16),
                                 NAMED(RA_ISA_AMX), NAMED(RA_ISA_NEON) };
    static const named form[] = { NAMED(RA_FORM_AUTO), NAMED(RA_FORM_SAME) };
    static const named arith[] = { NAMED(RA_ARITH_DTYPE), NAMED(RA_ARITH_BF16) };
    static const named way[] = { NAMED(RA_RETURN_DIRECT), NAMED(RA_RETURN_RING) };
    static const named dtype[] = { NAMED(RA_DTYPE_UNSET), NAMED(RA_F32), NAMED(RA_F16),
                                   NAMED(RA_BF16) };
#define COUNT(a) (int)(sizeof(a) / sizeof((a)[0]))
    ra_desc d;
    scope = IN_DESC;
    base_desc(&d, ONE);
    refuse_unknown(&d, &d.mask.kind, "mask.kind", mask, COUNT(mask));
    refuse_unknown(&d, &d.layout.kind, "layout.kind", layout, COUNT(layout));
    refuse_unknown(&d, &d.isa, "isa", isa, COUNT(isa));
    refuse_unknown(&d, &d.form, "form", form, COUNT(form));
    refuse_unknown(&d, &d.arith, "arith", arith, COUNT(arith));
    refuse_unknown(&d, &d.grad_return, "grad_return", way, COUNT(way));
    refuse_unknown(&d, &d.grad_dtype, "grad_dtype", dtype, COUNT(dtype));
}

/* Fields that only training has: the sentence names the constant that was set. */
TEST(training_fields) {
    static const row rows_of_training[] = {
        { ONE, D(grad_return), I32, RA_RETURN_RING, RA_E_SHAPE, "RA_RETURN_RING needs train = 1" },
        { ONE, D(grad_dtype), I32, RA_BF16, RA_E_SHAPE, "RA_BF16 needs train = 1" },
        { ONE, D(train), I32, 2, RA_E_RANGE, "2 is not in 0..1" },
    };
    ra_desc d;
    scope = IN_DESC;
    for (size_t i = 0; i < sizeof rows_of_training / sizeof rows_of_training[0]; i++) {
        const row *r = &rows_of_training[i];
        base_desc(&d, r->base);
        set_field(&d, r->at, r->kind, r->value);
        refuse_desc(&d, r->status, r->field, r->words);
    }
}

/* What a cache refuses, in words; test_cache.c has what its calls refuse. */
TEST(cache) {
    static const row cache_rows[] = {
        { 0, D(kv_tokens), I64, 0, RA_E_UNSET, "must be set to the most positions of a sequence" },
        { 0, D(q_offset), I64, 3, RA_E_SHAPE, "must be 0, is 3: each call brings its counts" },
        { 0, D(layout.kind), I32, RA_LAYOUT_ZIGZAG, RA_E_SHAPE, "must be 0, is RA_LAYOUT_ZIGZAG" },
        { 0, D(mask.kind), I32, RA_MASK_INTERVALS, RA_E_UNSUPPORTED,
          "must be RA_MASK_NONE or RA_MASK_CAUSAL with a cache, is RA_MASK_INTERVALS" },
        { 0, D(scores), I32, RA_SCORE_BIAS, RA_E_UNSUPPORTED, "must be without RA_SCORE_BIAS" },
        { 0, D(train), I32, 1, RA_E_UNSUPPORTED, "must be 0 with a cache, is 1" },
        { 0, D(order), I32, RA_ORDER_ROUNDS, RA_E_UNSUPPORTED, "is RA_ORDER_ROUNDS" },
        { 0, D(tokens_of), PTR, 1, RA_E_SHAPE, "must be null: each call brings the lengths" },
        { 0, D(engine), PTR, 1, RA_E_UNSUPPORTED, "must be null: engines serve rings only" },
    };
    ra_cache_desc cd = { 0 };
    ra_cache *c = NULL;
    ra_transport t;
    ra_error e = { 0 };
    ra_desc d;
    scope = IN_CACHE;
    for (size_t i = 0; i <= sizeof cache_rows / sizeof cache_rows[0]; i++) {
        const row *r = &cache_rows[i];
        d = ra_desc_make(4, 2, 8, RA_F32, RA_MASK_CAUSAL);
        d.tokens = 4;
        d.kv_tokens = 64;
        d.error = &e;
        if (i == sizeof cache_rows / sizeof cache_rows[0]) break;
        set_field(&d, r->at, r->kind, r->value);
        refused(ra_cache_create(&c, &d, NULL, NULL), &e, r->status, r->field, r->words);
    }
    cd.queries = 2;
    refused(ra_cache_create(&c, &d, NULL, &cd), &e, RA_E_ENUM, "cache.queries",
            "must be RA_QUERIES_OWN or RA_QUERIES_ALL; it was 2");
    cd.queries = RA_QUERIES_ALL;
    cd.travel = 4;
    refused(ra_cache_create(&c, &d, NULL, &cd), &e, RA_E_ENUM, "cache.travel",
            "must be RA_INFER_AUTO, RA_INFER_PASS_Q, RA_INFER_PASS_KV or RA_INFER_MERGE; it was 4");
    cd.travel = 0;
    d.ranks = 3;
    cd.lanes = 2;
    refused(ra_cache_create(&c, &d, NULL, &cd), &e, RA_E_RANGE, "cache.lanes",
            "must be 0 or at least ranks, which is 3, and at most 1024; it was 2");
    cd.lanes = 0;
    refused(ra_cache_create(&c, &d, NULL, &cd), &e, RA_E_NULL, "transport",
            "is null, but ranks is 3");
    base_transport(&t, 0);
    refused(ra_cache_create(&c, &d, &t, &cd), &e, RA_E_TRANSPORT, "transport.caps",
            "lacks RA_CAP_ANY_PEER: ranks of a cache send to all others");
    t.caps = RA_CAP_ANY_PEER;
    cd.travel = RA_INFER_PASS_KV;
    refused(ra_cache_create(&c, &d, &t, &cd), &e, RA_E_SHAPE, "cache.travel",
            "RA_INFER_PASS_KV needs cache.queries = RA_QUERIES_OWN; with "
            "RA_QUERIES_ALL every rank would compute every row");
    CHECK(c == NULL);
}

/* Keys may travel in the cache, but in this call they are too many for one message. */
TEST(cache_of_long_messages) {
    const int64_t cached = 4000, fresh = 4;
    ra_cache_desc cd = { 0 };
    ra_cache *c = NULL;
    ra_tensors none = { 0 };
    ra_transport t;
    ra_desc d = ra_desc_make(4, 2, 8, RA_F32, RA_MASK_CAUSAL);
    scope = IN_CACHE;
    d.tokens = 4;
    d.kv_tokens = 4096;
    d.ranks = 2;
    cd.travel = RA_INFER_PASS_KV;
    base_transport(&t, 0);
    t.max_msg = 65536;
    CHECK_EQ(ra_cache_create(&c, &d, &t, &cd), RA_OK);
    refused(ra_infer(c, &none, &cached, &fresh, RA_NO_DEADLINE), ra_cache_error(c),
            RA_E_TRANSPORT, "transport.max_msg",
            "rows of keys, which RA_INFER_PASS_KV sends in one message: take RA_INFER_AUTO");
    CHECK_EQ(ra_cache_destroy(c), RA_OK);
}

/* A thread that brings a ticket late learns how that pass ended, not how a later one did. */
TEST(late_tickets) {
    static float q[64 * 16], o[64 * 16];
    ra_plan *plan = NULL;
    ra_ring *ring = NULL;
    ra_tensors good = { 0 }, bad;
    ra_status s;
    ra_job job = { 0 };
    ra_desc d = ra_desc_make(1, 1, 16, RA_F32, RA_MASK_CAUSAL);
    d.tokens = 64;
    d.threads = 2;
    good.q.data = good.k.data = good.v.data = q;
    good.o.data = o;
    bad = good;
    bad.q.data = NULL;
    CHECK_EQ(ra_plan_create(&plan, &d, NULL), RA_OK);
    CHECK_EQ(ra_ring_create(&ring, plan, NULL, NULL), RA_OK);
    job.plan = plan;
    job.ticket = 1;
    job.tensors = &bad;
    CHECK_EQ(ra_join(ring, &job, 0), RA_E_NULL);
    job.ticket = 2;
    job.tensors = &good;
    while ((s = ra_join(ring, &job, 0)) > 0) { }
    CHECK_EQ(s, RA_OK);
    job.ticket = 1;
    CHECK_EQ(ra_join(ring, &job, 1), RA_E_NULL);
    job.ticket = 3;
    while ((s = ra_join(ring, &job, 0)) > 0) { }
    CHECK_EQ(s, RA_OK);
    job.ticket = 2;
    CHECK_EQ(ra_join(ring, &job, 1), RA_OK);
    ra_ring_destroy(ring);
    ra_plan_destroy(plan);
}

TEST(every_refusal) {
    static const int statuses[] = {
        RA_E_NULL, RA_E_UNSET, RA_E_RANGE, RA_E_ENUM, RA_E_OVERFLOW, RA_E_SHAPE, RA_E_STRIDE,
        RA_E_ALIGN, RA_E_POSITIONS, RA_E_UNSUPPORTED, RA_E_ISA, RA_E_WORKSPACE, RA_E_NOMEM,
        RA_E_TRANSPORT, RA_E_ABI, RA_E_BUSY, RA_E_STATE,
    };
    /* Failures of a pass: test_sim.c and test_clients.c produce each of them and count them. */
    static const int failures[] = {
        RA_E_MISMATCH, RA_E_IO, RA_E_PEER, RA_E_TIMEOUT, RA_E_CANCELLED, RA_E_ABORTED, RA_E_TRUNC,
        RA_E_PROTO, RA_E_ENGINE, RA_E_UNSAFE,
    };
#define LISTED(name, value, text) name,
    static const int all[] = { RA_STATUS_LIST(LISTED) };
#undef LISTED
    size_t n = sizeof all / sizeof all[0];
    for (size_t i = 0; i < n; i++) {
        int known = all[i] >= 0;
        const char *text = ra_status_text(all[i]);
        CHECK(text && strlen(text) > 3 && strcmp(text, ra_status_text(-999)));
        for (size_t k = 0; k < sizeof statuses / sizeof statuses[0]; k++)
            known |= statuses[k] == all[i];
        for (size_t k = 0; k < sizeof failures / sizeof failures[0]; k++)
            known |= failures[k] == all[i];
        h_context("status %d: %s", all[i], text);
        CHECK(known);
        for (size_t k = 0; k < i; k++) CHECK(strcmp(text, ra_status_text(all[k])) != 0);
    }
    CHECK(ra_status_text(12345) != NULL && ra_status_text(INT32_MIN) != NULL);
    CHECK_EQ(ra_version(), RINGATTN_VERSION);
    if (h_run.filter[0] || h_run.only_case >= 0) return;
    for (size_t i = 0; i < sizeof statuses / sizeof statuses[0]; i++) {
        h_context("%s", ra_status_text(statuses[i]));
        CHECK(produced[-statuses[i]] != 0);
    }
    printf("%d pairs of status and field\n", refusal_count);
}

int main(int argc, char **argv) {
    static const h_test tests[] = {
        ENTRY(desc_fields), ENTRY(desc_scale),
        ENTRY(dtypes_of_an_engine), ENTRY(desc_contents), ENTRY(desc_runs),
        ENTRY(desc_floats), ENTRY(desc_rates), ENTRY(desc_resolved),
        ENTRY(blocks_with_scales),
        ENTRY(isa), ENTRY(engine), ENTRY(transport), ENTRY(ring_desc), ENTRY(plan_arguments),
        ENTRY(rates), ENTRY(world), ENTRY(tensors), ENTRY(tensor_alignment),
        ENTRY(tensor_scores), ENTRY(addresses), ENTRY(addresses_of_states), ENTRY(tensor_positions),
        ENTRY(jobs), ENTRY(order_of_calls),
        ENTRY(failed_ring),
        ENTRY(attention), ENTRY(attention_lengths), ENTRY(attention_positions),
        ENTRY(attention_simple), ENTRY(states), ENTRY(allocations),
        ENTRY(no_allocation_in_a_pass), ENTRY(random_bytes), ENTRY(strides_together),
        ENTRY(late_tickets), ENTRY(names_of_constants), ENTRY(training_fields), ENTRY(cache),
        ENTRY(cache_of_long_messages),
        ENTRY(every_refusal),
    };
    int failed;
    pool = (uint8_t *)small_memory(POOL * 2);
    out_pool = (uint8_t *)small_memory(POOL * 2);
    memset(pool, 0, POOL * 2);
    failed = hook_main(argc, argv, tests, sizeof tests / sizeof tests[0]);
    free(pool);
    free(out_pool);
    return failed;
}
