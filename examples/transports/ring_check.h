/* What ring_shm.c, ring_mpi.c, ring_ofi.c and ring_nccl.c share: a forward and a backward pass over
 * a given length, their numbers by position, so that they can be compared with those of one rank
 * bit for bit, and a table of bytes, hops and hidden time. It is the same for all transports. The
 * number of a job (ring_job_id) is also ring_tcp.c's. */
#if !defined(RING_CHECK_H)
#define RING_CHECK_H

#include "ringattn.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct ring_task {             /* equal on all ranks */
    int64_t tokens;
    int32_t heads, kv_heads, dim;
    int32_t chunk_tokens;              /* 0: the plan's choice */
    int32_t full;                      /* 1: every query sees every key; 0: causal */
    uint32_t seed;                     /* of the inputs */
    int64_t seconds;                   /* deadline of a pass */
} ring_task;

/* The results by position, one after the other: o, lse, dQ, dK, dV. */
typedef struct ring_numbers { float *o, *lse, *d_q, *d_k, *d_v; } ring_numbers;

typedef struct ring_part {             /* of a pass */
    int64_t bytes_in, bytes_out, messages_in, messages_out, hops;
    int64_t pass_ns, compute_ns, wait_ns;
    int64_t flight_ns, hidden_ns;      /* a message was in flight; and meanwhile a tile computed */
} ring_part;
typedef struct ring_figures { ring_part pass[2]; int32_t status, bits_promised; } ring_figures;

/* A number for a job from what its ranks must agree on, so that ranks of another job, or of another
 * version of the program or the library, are refused instead of taken in. Two starts with the same
 * arguments have the same number. FNV-1a, 64 bits, over the library's version, the program's name,
 * `names` strings and `count` numbers. Never 0. */
static inline uint64_t ring_job_id(const char *program, const char *const *name, int names,
                                   const int64_t *number, int count) {
    uint64_t id = 0xCBF29CE484222325u;
    for (int i = -1; i < names; i++) {
        const char *s = i < 0 ? program : name[i];
        do id = (id ^ (uint8_t)*s) * 0x100000001B3u; while (*s++);
    }
    for (int i = -2; i < count; i++) {
        uint64_t x = i == -2 ? RINGATTN_VERSION : i < 0 ? (uint64_t)names : (uint64_t)number[i];
        for (int byte = 0; byte < 64; byte += 8) id = (id ^ (x >> byte & 255)) * 0x100000001B3u;
    }
    return id ? id : 1;
}

/* The same, of a program whose ranks must agree on a task. */
static inline uint64_t ring_task_id(const char *program, const ring_task *t, int ranks) {
    const int64_t n[] = { ranks, t->tokens, t->heads, t->kv_heads, t->dim, t->chunk_tokens,
                          t->full, (int64_t)t->seed };
    return ring_job_id(program, NULL, 0, n, (int)(sizeof n / sizeof *n));
}

static inline size_t ring_floats(const ring_task *t) {
    size_t q = (size_t)(t->heads * t->dim), kv = (size_t)(t->kv_heads * t->dim);
    return (size_t)t->tokens * (2 * q + (size_t)t->heads + 2 * kv);
}

static inline ring_numbers ring_numbers_in(const ring_task *t, float *all) {
    size_t q = (size_t)(t->tokens * t->heads * t->dim);
    size_t kv = (size_t)(t->tokens * t->kv_heads * t->dim);
    ring_numbers n;
    n.o = all;
    n.lse = n.o + q;
    n.d_q = n.lse + t->tokens * t->heads;
    n.d_k = n.d_q + q;
    n.d_v = n.d_k + kv;
    return n;
}

static inline void ring_describe(ra_desc *d, const ring_task *t, int rank, int ranks,
                                 ra_error *error) {
    *d = ra_desc_make(t->heads, t->kv_heads, t->dim, RA_F32,
                      t->full ? RA_MASK_NONE : RA_MASK_CAUSAL);
    d->train = 1;
    d->rank = rank;
    d->ranks = ranks;
    d->tokens = t->tokens;
    d->layout.kind = RA_LAYOUT_ZIGZAG;
    d->chunk_tokens = t->chunk_tokens;
    d->error = error;
}

/* The number in column c of the row at a position; which: 0 q, 1 k, 2 v, 3 dO. */
static inline float ring_input(const ring_task *t, int which, int64_t position, int c) {
    uint32_t x = (uint32_t)(position * 1024 + c) * 4 + (uint32_t)which + t->seed * 0x9E3779B9u;
    x = (x ^ (x >> 16)) * 0x45d9f3bu;
    x = (x ^ (x >> 16)) * 0x45d9f3bu;
    return (float)((x ^ (x >> 16)) & 0xffff) / 32768 - 1;
}

/* -------------------------------------------------------------------------- time
 * Messages are in flight from the posting of their op to its end. */
enum { RING_SPANS = 16384 };
typedef struct ring_span { int64_t begin, end; } ring_span;
typedef struct ring_clock {
    int32_t messages, tiles;
    int64_t pass_ns;
    ring_span message[RING_SPANS], tile[RING_SPANS];
} ring_clock;

static inline void ring_trace(void *ctx, const ra_event *e) {
    ring_clock *k = (ring_clock *)ctx;
    ring_span s;
    s.begin = e->begin_ns;
    s.end = e->end_ns;
    if (e->kind == RA_EV_PASS) k->pass_ns = s.end - s.begin;
    if (e->kind == RA_EV_TILE && k->tiles < RING_SPANS) k->tile[k->tiles++] = s;
    if ((e->kind == RA_EV_SEND || e->kind == RA_EV_RECV) && k->messages < RING_SPANS)
        k->message[k->messages++] = s;
}

static inline int ring_by_begin(const void *a, const void *b) {
    int64_t x = ((const ring_span *)a)->begin, y = ((const ring_span *)b)->begin;
    return (x > y) - (x < y);
}

/* Sorts spans by time and joins those that touch; returns how many are left. */
static inline int32_t ring_union(ring_span *s, int32_t n) {
    int32_t out = 0;
    qsort(s, (size_t)n, sizeof *s, ring_by_begin);
    for (int32_t i = 0; i < n; i++) {
        if (out && s[i].begin <= s[out - 1].end) {
            if (s[i].end > s[out - 1].end) s[out - 1].end = s[i].end;
        } else {
            s[out++] = s[i];
        }
    }
    return out;
}

static inline void ring_clock_read(ring_clock *k, ring_part *p) {
    int32_t m = ring_union(k->message, k->messages), t = ring_union(k->tile, k->tiles);
    for (int32_t i = 0; i < m; i++) p->flight_ns += k->message[i].end - k->message[i].begin;
    for (int32_t i = 0, j = 0; i < m && j < t;) {
        const ring_span *a = &k->message[i], *b = &k->tile[j];
        int64_t from = a->begin > b->begin ? a->begin : b->begin;
        int64_t to = a->end < b->end ? a->end : b->end;
        if (to > from) p->hidden_ns += to - from;
        if (a->end < b->end) i++;
        else j++;
    }
    p->pass_ns = k->pass_ns;
    k->messages = k->tiles = 0;
}

/* -------------------------------------------------------------------------- one rank */
typedef struct ring_rows {             /* this rank's, in the order of its rows */
    const ra_plan *plan;
    int rank;
    float *q, *k, *v, *d_o, *o, *lse, *d_q, *d_k, *d_v, *all;
    int64_t count;
} ring_rows;

static inline int ring_rows_make(ring_rows *r, const ring_task *t, const ra_plan *plan, int rank) {
    int64_t q, kv, row = 0;
    ra_plan_report report;
    ra_run run[2];
    int n = ra_plan_q_runs(plan, rank, 0, run, 2);
    memset(r, 0, sizeof *r);
    if (ra_plan_query(plan, rank, &report)) return -1;
    r->plan = plan;
    r->rank = rank;
    r->count = report.q_rows;
    q = r->count * t->heads * t->dim;
    kv = r->count * t->kv_heads * t->dim;
    r->all = (float *)calloc((size_t)(4 * q + 4 * kv + r->count * t->heads) + 1, sizeof(float));
    if (!r->all) return -1;
    r->q = r->all;
    r->d_o = r->q + q;
    r->o = r->d_o + q;
    r->d_q = r->o + q;
    r->k = r->d_q + q;
    r->v = r->k + kv;
    r->d_k = r->v + kv;
    r->d_v = r->d_k + kv;
    r->lse = r->d_v + kv;
    for (int i = 0; i < n; i++)
        for (int64_t j = 0; j < run[i].count; j++, row++) {
            int64_t at = run[i].first + j;
            for (int c = 0; c < t->heads * t->dim; c++) {
                r->q[row * t->heads * t->dim + c] = ring_input(t, 0, at, c);
                r->d_o[row * t->heads * t->dim + c] = ring_input(t, 3, at, c);
            }
            for (int c = 0; c < t->kv_heads * t->dim; c++) {
                r->k[row * t->kv_heads * t->dim + c] = ring_input(t, 1, at, c);
                r->v[row * t->kv_heads * t->dim + c] = ring_input(t, 2, at, c);
            }
        }
    return 0;
}

static inline void ring_rows_place(const ring_rows *r, const float *rows, float *all,
                                   int64_t width) {
    ra_run run[2];
    int n = ra_plan_q_runs(r->plan, r->rank, 0, run, 2);
    for (int i = 0; i < n; i++) {
        memcpy(all + run[i].first * width, rows,
               (size_t)(run[i].count * width) * sizeof *rows);
        rows += run[i].count * width;
    }
}

static inline void ring_counted(const ra_ring *ring, ring_part *p) {
    ra_ring_counters c;
    ra_ring_query(ring, &c);
    p->bytes_in = c.bytes_in;
    p->bytes_out = c.bytes_out;
    p->messages_in = c.chunks_in;
    p->messages_out = c.chunks_out;
    p->compute_ns = c.compute_ns;
    p->wait_ns = c.wait_ns;
}

static inline void ring_complain(const ra_ring *ring, int rank, ra_status s) {
    ra_failure f;
    if (ra_ring_failure(ring, &f) == RA_OK) fprintf(stderr, "rank %d: %s\n", rank, f.text);
    else fprintf(stderr, "rank %d: %s: %s %s\n", rank, ra_status_text(s),
                 ra_ring_error(ring)->field, ra_ring_error(ring)->text);
}

/* Forward and backward on an open transport (null: a ring of one). all: [ring_floats], of which
 * this rank's rows are written. */
static inline ra_status ring_attend(const ring_task *t, const ra_plan *plan,
                                    const ra_transport *transport, int rank, float *all,
                                    ring_figures *f) {
    static ring_clock clock;
    ra_ring *ring = NULL;
    ra_ring_desc rd;
    ra_error error;
    ra_plan_report report;
    ra_tensors x;
    ring_rows r;
    ring_numbers n = ring_numbers_in(t, all);
    ra_status s = ring_rows_make(&r, t, plan, rank) ? RA_E_NOMEM : RA_OK;
    memset(&rd, 0, sizeof rd);
    memset(&x, 0, sizeof x);
    memset(&error, 0, sizeof error);
    rd.error = &error;
    rd.trace = ring_trace;
    rd.trace_ctx = &clock;
    clock.messages = clock.tiles = 0;
    if (!s) s = ra_ring_create(&ring, plan, transport, &rd);
    if (s) {
        fprintf(stderr, "rank %d: %s: %s %s\n", rank, ra_status_text(s), error.field, error.text);
        free(r.all);
        return s;
    }
    x.q.data = r.q; x.k.data = r.k; x.v.data = r.v; x.o.data = r.o; x.lse.data = r.lse;
    x.d_o.data = r.d_o; x.d_q.data = r.d_q; x.d_k.data = r.d_k; x.d_v.data = r.d_v;
    for (int pass = 0; pass < 2 && !s; pass++) {
        int64_t deadline = ra_deadline_ms(1000 * t->seconds);
        s = pass ? ra_backward(plan, ring, &x, deadline) : ra_forward(plan, ring, &x, deadline);
        ring_counted(ring, &f->pass[pass]);
        ring_clock_read(&clock, &f->pass[pass]);
    }
    if (s) ring_complain(ring, rank, s);
    (void)ra_plan_query(plan, rank, &report);
    f->pass[0].hops = f->pass[1].hops = report.hops;
    f->bits_promised = report.forward.bits_any_ranks && report.backward.bits_any_ranks;
    f->status = s;
    ring_rows_place(&r, r.o, n.o, t->heads * t->dim);
    ring_rows_place(&r, r.lse, n.lse, t->heads);
    ring_rows_place(&r, r.d_q, n.d_q, t->heads * t->dim);
    ring_rows_place(&r, r.d_k, n.d_k, t->kv_heads * t->dim);
    ring_rows_place(&r, r.d_v, n.d_v, t->kv_heads * t->dim);
    (void)ra_ring_destroy(ring);       /* RA_E_UNSAFE: leaked */
    free(r.all);
    return s;
}

/* The same on one rank; one: [ring_floats]. */
static inline ra_status ring_alone(const ring_task *t, float *one) {
    ring_figures f;
    ra_plan *plan = NULL;
    ra_error error;
    ra_desc d;
    ra_status s;
    memset(&f, 0, sizeof f);
    memset(&error, 0, sizeof error);
    ring_describe(&d, t, 0, 1, &error);
    s = ra_plan_create(&plan, &d, NULL);
    if (s) fprintf(stderr, "%s %s\n", error.field, error.text);
    else s = ring_attend(t, plan, NULL, 0, one, &f);
    ra_plan_destroy(plan);
    return s;
}

/* -------------------------------------------------------------------------- what is printed */
/* How many numbers have other bits; -1: one rank failed, or no memory. partly: rows of other ranks
 * are zero in `all`, and are not compared. */
static inline int64_t ring_compare_some(const ring_task *t, const float *all, int partly) {
    const size_t n = ring_floats(t);
    float *one = (float *)calloc(n, sizeof *one);
    int64_t differ = -1;
    if (one && !ring_alone(t, one)) {
        differ = 0;
        for (size_t i = 0; i < n; i++)
            if (!partly || all[i] > 0 || all[i] < 0)
                differ += memcmp(&all[i], &one[i], sizeof *one) != 0;
    }
    free(one);
    return differ;
}
static inline int64_t ring_compare(const ring_task *t, const float *all) {
    return ring_compare_some(t, all, 0);
}

static inline void ring_table(const ring_figures *f, int ranks) {
    static const char *const name[2] = { "forward", "backward" };
    printf("%-9s %4s %4s %8s %10s %10s %9s %9s %9s %9s %7s\n", "pass", "rank", "hops", "messages",
           "MB in", "MB out", "pass ms", "tiles ms", "wait ms", "flight ms", "hidden");
    for (int pass = 0; pass < 2; pass++)
        for (int r = 0; r < ranks; r++) {
            const ring_part *p = &f[r].pass[pass];
            printf("%-9s %4d %4lld %8lld %10.3f %10.3f %9.2f %9.2f %9.2f %9.2f ", name[pass], r,
                   (long long)p->hops, (long long)(p->messages_in + p->messages_out),
                   (double)p->bytes_in / 1e6, (double)p->bytes_out / 1e6,
                   (double)p->pass_ns / 1e6, (double)p->compute_ns / 1e6,
                   (double)p->wait_ns / 1e6, (double)p->flight_ns / 1e6);
            if (p->flight_ns) printf("%5.1f %%\n", 100.0 * (double)p->hidden_ns /
                                                      (double)p->flight_ns);
            else printf("%7s\n", "-");
        }
    printf("flight: time in which some message was posted and not done; hidden: the part of it in "
           "which\nthe rank computed. hops: ranks whose keys arrive.\n");
}

/* Prints the table and the comparison; the exit code of the program. */
static inline int ring_judge(const ring_task *t, const ring_figures *f, int ranks,
                             const float *all) {
    int64_t differ;
    for (int r = 0; r < ranks; r++)
        if (f[r].status) return 1;
    ring_table(f, ranks);
    differ = ring_compare(t, all);
    printf("against one rank: %lld of %lld numbers of o, lse, dQ, dK, dV have other bits%s\n",
           (long long)differ, (long long)ring_floats(t),
           f[0].bits_promised || !differ ? "" : " (not promised for this length)");
    return differ < 0 || (differ > 0 && f[0].bits_promised);
}

/* The same for one rank of many, which computes alone what one rank would. */
static inline int ring_judge_one(const ring_task *t, const ring_figures *f, int rank,
                                 const float *all) {
    const int64_t differ = ring_compare_some(t, all, 1);
    ring_table(f, 1);
    printf("rank %d: %lld of its numbers have other bits than those of one rank\n", rank,
           (long long)differ);
    return differ < 0 || (differ > 0 && f->bits_promised);
}

/* --tokens N --heads N --kv-heads N --dim N --chunk N --full --seconds N. Returns how many
 * arguments it took at argv[i], 0 if it is none of these. */
static inline int ring_option(ring_task *t, int argc, char **argv, int i) {
    static const char *const name[6] = { "--tokens", "--heads", "--kv-heads", "--dim", "--chunk",
                                         "--seconds" };
    int64_t value = i + 1 < argc ? atoll(argv[i + 1]) : 0;
    if (!strcmp(argv[i], "--full")) {
        t->full = 1;
        return 1;
    }
    for (int k = 0; k < 6; k++) {
        if (strcmp(argv[i], name[k]) || i + 1 >= argc) continue;
        if (k == 0) t->tokens = value;
        else if (k == 5) t->seconds = value;
        else *(k == 1 ? &t->heads : k == 2 ? &t->kv_heads : k == 3 ? &t->dim : &t->chunk_tokens) =
                 value > 0 && value < 1 << 30 ? (int32_t)value : 0;
        return 2;
    }
    return 0;
}

static inline ring_task ring_task_default(void) {
    ring_task t;
    memset(&t, 0, sizeof t);
    t.tokens = 2048;
    t.heads = 4;
    t.kv_heads = 2;
    t.dim = 64;
    t.seed = 1;
    t.seconds = 60;
    return t;
}

#endif
