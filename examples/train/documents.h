/* Packed documents on several ranks: who holds which positions, as a table for RA_LAYOUT_RUNS.
 *
 *   documents_layout    makes the table
 *   documents_bytes     what the ranks of a plan send in a forward pass
 *
 * A document goes to one rank as a whole if it fits into what is left of that rank's share of the
 * work; then its keys never travel. Otherwise it is cut into mirrored pairs of pieces, as zigzag
 * does, for as few ranks as have room. A pair of pieces of t rows, from the front and from the back
 * of a document of n tokens, sees t * n keys, wherever it is cut. So a pair can have just the work
 * that a rank has left. Pieces have at least RA_BLOCK_TOKENS rows. */
#if !defined(TRAIN_DOCUMENTS_H)
#define TRAIN_DOCUMENTS_H

#include "ringattn.h"

#include <stdlib.h>
#include <string.h>

typedef struct documents {             /* what one must know */
    const int64_t *length;             /* [count] tokens of each, in the order of their positions */
    int64_t count;
    int32_t ranks;
    const double *speed;               /* [ranks] relative; null: equal */
    double per_token;                  /* work besides attention, in keys that a query sees */
} documents;

typedef struct documents_table {       /* free with documents_free */
    ra_run *runs;                      /* of rank 0, rank 1, ...; first pieces before last ones */
    int32_t *run_count;                /* [ranks] */
    double *work;                      /* [ranks] over its speed */
    int64_t *rows;                     /* [ranks] */
    int64_t cut;                       /* documents that are on several ranks */
    double imbalance;                  /* most work of a rank over the average, less 1 */
} documents_table;

typedef struct documents_piece { ra_run run; int32_t rank, back; } documents_piece;

typedef struct documents_maker {
    const documents *d;
    documents_table *to;
    documents_piece *piece;
    int64_t pieces;
    double *left;                      /* [ranks] work that fits, over all ranks' speeds */
    double slack;
} documents_maker;

static inline void documents_free(documents_table *t) {
    free(t->runs); free(t->run_count); free(t->work); free(t->rows);
    memset(t, 0, sizeof *t);
}

static inline double documents_speed(const documents *d, int32_t r) {
    return d->speed ? d->speed[r] : 1;
}

/* Work of n rows that are a whole document. */
static inline double documents_whole(const documents *d, int64_t n) {
    return (double)n * ((double)n / 2 + d->per_token);
}

static inline void documents_give(documents_maker *m, int64_t first, int64_t rows, int32_t rank,
                                  int back) {
    documents_piece *p = &m->piece[m->pieces];
    if (rows < 1) return;
    memset(p, 0, sizeof *p);
    p->run.first = first;
    p->run.count = rows;
    p->run.stride = 1;
    p->rank = rank;
    p->back = back;
    m->pieces++;
    m->to->rows[rank] += rows;
}

static inline int32_t documents_roomiest(const documents_maker *m, const uint8_t *taken) {
    int32_t best = -1;
    for (int32_t r = 0; r < m->d->ranks; r++)
        if (!(taken && taken[r]) && (best < 0 || m->left[r] > m->left[best])) best = r;
    return best;
}

/* Cuts a document at position `at` for the ranks with most room. taken: [ranks] 0. */
static inline void documents_cut(documents_maker *m, int64_t at, int64_t n, uint8_t *taken) {
    const double each = (double)n + 2 * m->d->per_token;       /* work of a row of a pair */
    int64_t from = at, to = at + n;
    int32_t last = -1;
    while (from < to) {
        const int32_t r = documents_roomiest(m, taken);
        const int64_t half = (to - from + 1) / 2;
        int64_t t = r < 0 ? half : (int64_t)(m->left[r] / each + 0.5);
        t = (t + RA_BLOCK_TOKENS / 2) / RA_BLOCK_TOKENS * RA_BLOCK_TOKENS;
        if (t < RA_BLOCK_TOKENS) t = RA_BLOCK_TOKENS;
        if (t + RA_BLOCK_TOKENS > half) t = half;      /* no short piece is left over */
        const int32_t rank = r < 0 ? last : r;
        const int64_t rows = t == half ? to - from : t;
        documents_give(m, from, rows, rank, 0);
        if (t < half) documents_give(m, to - t, t, rank, 1);
        m->left[rank] -= (double)(t == half ? to - from : 2 * t) / 2 * each;
        taken[rank] = 1;
        last = rank;
        from += rows;
        to -= t < half ? t : 0;
    }
    m->to->cut++;
}

static inline int documents_longer(const void *a, const void *b) {
    const int64_t *x = (const int64_t *)a, *y = (const int64_t *)b;
    return x[1] != y[1] ? (x[1] < y[1] ? 1 : -1) : (x[0] > y[0]) - (x[0] < y[0]);
}

static inline int documents_earlier(const void *a, const void *b) {
    const documents_piece *x = (const documents_piece *)a, *y = (const documents_piece *)b;
    if (x->rank != y->rank) return x->rank < y->rank ? -1 : 1;
    if (x->back != y->back) return x->back - y->back;
    return x->run.first < y->run.first ? -1 : 1;
}

/* Longest first. order: pairs of position and length. */
static inline void documents_place(documents_maker *m, const int64_t *order, uint8_t *taken) {
    for (int64_t i = 0; i < m->d->count; i++) {
        const int64_t at = order[2 * i], n = order[2 * i + 1];
        const int32_t r = documents_roomiest(m, NULL);
        const double whole = documents_whole(m->d, n);
        if (whole <= m->left[r] + m->slack || n < 4 * RA_BLOCK_TOKENS) {
            documents_give(m, at, n, r, 0);
            m->left[r] -= whole;
            continue;
        }
        memset(taken, 0, (size_t)m->d->ranks);
        documents_cut(m, at, n, taken);
    }
}

static inline void documents_finish(documents_maker *m, double average) {
    documents_table *t = m->to;
    qsort(m->piece, (size_t)m->pieces, sizeof *m->piece, documents_earlier);
    for (int64_t i = 0; i < m->pieces; i++) {
        t->runs[i] = m->piece[i].run;
        t->run_count[m->piece[i].rank]++;
    }
    for (int32_t r = 0; r < m->d->ranks; r++) {
        const double share = average * documents_speed(m->d, r);
        t->work[r] = (share - m->left[r]) / documents_speed(m->d, r);
        if (t->work[r] / average - 1 > t->imbalance) t->imbalance = t->work[r] / average - 1;
    }
}

/* 0: no memory, or a number is not possible. */
static inline int documents_layout(documents_table *to, const documents *d) {
    documents_maker m = { d, to, NULL, 0, NULL, 0 };
    double work = 0, speed = 0;
    memset(to, 0, sizeof *to);
    if (d->count < 1 || d->ranks < 1 || d->per_token < 0) return 0;
    const size_t ranks = (size_t)d->ranks, most = (size_t)d->count * (2 * ranks + 1);
    int64_t *order = (int64_t *)malloc((size_t)d->count * 2 * sizeof *order);
    uint8_t *taken = (uint8_t *)malloc(ranks);
    m.piece = (documents_piece *)malloc(most * sizeof *m.piece);
    m.left = (double *)malloc(ranks * sizeof *m.left);
    to->runs = (ra_run *)calloc(most, sizeof *to->runs);
    to->run_count = (int32_t *)calloc(ranks, sizeof *to->run_count);
    to->work = (double *)calloc(ranks, sizeof *to->work);
    to->rows = (int64_t *)calloc(ranks, sizeof *to->rows);
    int ok = order && taken && m.piece && m.left && to->runs && to->run_count && to->work &&
             to->rows;
    int64_t at = 0;
    for (int64_t i = 0; i < d->count && ok; at += d->length[i++]) {
        ok = d->length[i] > 0;
        order[2 * i] = at;
        order[2 * i + 1] = d->length[i];
        work += documents_whole(d, d->length[i]);
    }
    for (int32_t r = 0; r < d->ranks && ok; r++) {
        ok = documents_speed(d, r) > 0;
        speed += documents_speed(d, r);
    }
    if (ok) {
        for (int32_t r = 0; r < d->ranks; r++) m.left[r] = work / speed * documents_speed(d, r);
        m.slack = work / speed / 200;
        qsort(order, (size_t)d->count, 2 * sizeof *order, documents_longer);
        documents_place(&m, order, taken);
        documents_finish(&m, work / speed);
    }
    free(order); free(taken); free(m.piece); free(m.left);
    if (!ok) documents_free(to);
    return ok;
}

/* -1: a plan refuses. */
static inline int64_t documents_bytes(const ra_plan *plan, int32_t ranks) {
    int64_t bytes = 0;
    for (int32_t r = 0; r < ranks; r++) {
        ra_plan_report report;
        if (ra_plan_query(plan, r, &report)) return -1;
        bytes += report.forward.bytes_out;
    }
    return bytes;
}

#endif
