#ifndef RINGATTN_TESTS_ORACLE_H
#define RINGATTN_TESTS_ORACLE_H

/* What attention is, in double precision, written from the rules of the API section alone. Inputs
 * are f32 by position, already rounded to the dtype that the library gets. Two passes over the
 * visible keys of each row; no tiles, no running maximum. */
#include "problem.h"

enum { LSE_LIMIT = 1 << 23 };          /* rows with an LSE beyond it give no gradients */

typedef struct truth {
    double *o, *lse;                   /* [B][q_max][Hq][Dv], [B][q_max][Hq] */
    double *slack;                     /* [B][q_max][Hq] error that one f32 rounding of each score
                                        * explains, of O (of L where V is below 1) */
    double *rough;                     /* [B][q_max][Hq][Dv] bf16 problems: error of O that rounding
                                        * the weights to bf16, each by 2^-8 of it, can make */
    double *coarse;                    /* [B][q_max][Hq] q8_0 or q4_0: error of O and L that 16
                                        * bits for q and for the weights explain */
} truth;

/* -------------------------------------------------------------------------- masks, scores */
/* Does the query at position p see a key at position k? The rules of ra_mask as a predicate. */
static H_FAST int visible(const ra_mask *m, int64_t p, int64_t k) {
    int64_t doc = 0, end = INT64_MAX, c = m->causal_block > 1 ? m->causal_block : 1;
    if (m->kind == RA_MASK_INTERVALS) return m->lo[p] <= k && k < m->hi[p];
    for (int64_t i = 0; i < m->doc_count; i++) {
        if (m->doc_first[i] > p) { end = m->doc_first[i]; break; }
        doc = m->doc_first[i];
    }
    if (k < doc || k >= end) return 0;
    if (m->kind == RA_MASK_CAUSAL && k - doc >= m->prefix && (k - doc) / c > (p - doc) / c) {
        return 0;
    }
    if (m->right_limit && k > p + m->right_limit) return 0;
    if (m->window && p - k >= m->window && k - doc >= m->keep) return 0;
    return 1;
}

static H_FAST double dot_product(const float *a, const float *b, int n) {
    double s[4] = { 0, 0, 0, 0 };
    int i;
    for (i = 0; i + 4 <= n; i += 4) {
        s[0] += (double)a[i] * (double)b[i];
        s[1] += (double)a[i + 1] * (double)b[i + 1];
        s[2] += (double)a[i + 2] * (double)b[i + 2];
        s[3] += (double)a[i + 3] * (double)b[i + 3];
    }
    for (; i < n; i++) s[0] += (double)a[i] * (double)b[i];
    return s[0] + s[1] + s[2] + s[3];
}

/* Philox4x32-10 from its paper: the word that belongs to one weight. */
static H_FAST uint32_t philox_word(uint64_t seed, const uint32_t counter[4], int word) {
    uint32_t c[4], k[2];
    memcpy(c, counter, sizeof c);
    k[0] = (uint32_t)(seed & 0xFFFFFFFFu);
    k[1] = (uint32_t)(seed >> 32);
    for (uint32_t i = 0; i < 10; i++) {
        uint64_t m0 = 0xD2511F53ull * c[0], m1 = 0xCD9E8D57ull * c[2];
        uint32_t n0 = (uint32_t)(m1 >> 32) ^ c[1] ^ k[0], n2 = (uint32_t)(m0 >> 32) ^ c[3] ^ k[1];
        c[1] = (uint32_t)(m1 & 0xFFFFFFFFu);
        c[3] = (uint32_t)(m0 & 0xFFFFFFFFu);
        c[0] = n0;
        c[2] = n2;
        k[0] += 0x9E3779B9u;
        k[1] += 0xBB67AE85u;
    }
    return c[word];
}

/* What dropout does to one weight: multiplies it by 0, or by more than 1. */
static H_FAST double drop_factor(const problem *p, int b, int64_t i, int head, int64_t key) {
    uint32_t c[4];
    if (p->dropout <= 0) return 1;
    c[0] = (uint32_t)(key / 4);
    c[1] = (uint32_t)(p->q_offset + i);
    c[2] = (uint32_t)head;
    c[3] = (uint32_t)b;
    if (philox_word(p->seed, c, (int)(key % 4)) < (uint32_t)floor(ldexp((double)p->dropout, 32))) {
        return 0;
    }
    return 1 / (1 - (double)p->dropout);
}

/* -------------------------------------------------------------------------- attention */
static H_FAST double problem_scale(const problem *p) {
    return p->scale != 0 ? (double)p->scale : 1 / sqrt((double)p->Dk);
}

static H_FAST const float *q_row(const problem *p, int b, int64_t i, int head) {
    return p->q + ((b * p->q_max + i) * p->Hq + head) * p->Dk;
}
static H_FAST const float *k_row(const problem *p, int b, int64_t k, int head) {
    return p->k + ((b * p->k_max + k) * p->Hkv + head) * p->Dk;
}
static H_FAST const float *v_row(const problem *p, int b, int64_t k, int head) {
    if (p->v_in_k) return k_row(p, b, k, head) + p->v_column;
    return p->v + ((b * p->k_max + k) * p->Hkv + head) * p->Dv;
}

/* The final score of a query and a key; *size gets the sum of the magnitudes that went into it. */
static H_FAST double score_of(const problem *p, int b, int64_t i, int head, int64_t key,
                              double *size) {
    const float *q = q_row(p, b, i, head), *k = k_row(p, b, key, head / (p->Hq / p->Hkv));
    double c = problem_scale(p), s = c * dot_product(q, k, p->Dk), a;
    if (p->loose) *size = c * sqrt(dot_product(q, q, p->Dk) * dot_product(k, k, p->Dk));
    if (p->softcap > 0) s = (double)p->softcap * tanh(s / (double)p->softcap);
    if (p->scores & RA_SCORE_ALIBI) {
        a = (double)p->alibi[head] * fabs((double)(p->q_offset + i - key));
        s -= a;
        *size += fabs(a);
    }
    if (p->scores & RA_SCORE_BIAS) {
        a = bias_factor(p, head) * (double)bias_value(p, b, head, i, key);
        s += a;
        *size += fabs(a);
    }
    return s;
}

/* q, k and v all bf16: the kernels may round the weights to bf16 too. */
static H_FAST int is_bf16(const problem *p) {
    return p->q_dtype == RA_BF16 && p->k_dtype == RA_BF16 &&
           (p->v_in_k || p->v_dtype == RA_BF16);
}

static H_FAST int is_scaled(const problem *p) {
    return has_scales(p->k_dtype) && (p->v_in_k || has_scales(p->v_dtype));
}

/* One row: keys [n] are the visible ones; s, size [n] is scratch. */
static H_FAST void oracle_row(const problem *p, const truth *t, int b, int64_t i, int head,
                              const int32_t *keys, int64_t n, double *s, double *size) {
    double top = -HUGE_VAL, sum = 0, slack = 0, coarse = 0, big = 1;
    int64_t at = (b * p->q_max + i) * p->Hq + head, j;
    double *o = t->o + at * p->Dv;
    for (int d = 0; d < p->Dv; d++) o[d] = 0;
    for (j = 0; j < n; j++) {
        size[j] = 0;
        s[j] = score_of(p, b, i, head, keys[j], &size[j]);
        if (s[j] > top || s[j] != s[j]) top = s[j];
    }
    if ((p->scores & RA_SCORE_SINKS) && (double)p->sinks[head] > top) top = (double)p->sinks[head];
    if (p->scores & RA_SCORE_SINKS) sum = exp((double)p->sinks[head] - top);
    for (j = 0; j < n; j++) {
        const float *v = v_row(p, b, keys[j], head / (p->Hq / p->Hkv));
        double w = exp(s[j] - top);
        sum += w;
        slack += w * size[j];
        if (is_scaled(p)) {
            const float *q = q_row(p, b, i, head);
            const float *k = k_row(p, b, keys[j], head / (p->Hq / p->Hkv));
            double length = sqrt(dot_product(q, q, p->Dk) * dot_product(k, k, p->Dk));
            coarse += w * (1 + problem_scale(p) * length);
        }
        w *= drop_factor(p, b, i, head, keys[j]);
        for (int d = 0; d < p->Dv; d++) {
            o[d] += w * (double)v[d];
            if (fabs((double)v[d]) > big) big = fabs((double)v[d]);
        }
    }
    for (int d = 0; d < p->Dv && n; d++) o[d] /= sum;
    for (j = 0; j < n && is_bf16(p); j++) {
        const float *v = v_row(p, b, keys[j], head / (p->Hq / p->Hkv));
        double w = exp(s[j] - top) / sum / 256;
        for (int d = 0; d < p->Dv; d++) t->rough[at * p->Dv + d] += w * fabs((double)v[d] - o[d]);
    }
    t->lse[at] = sum == 0 ? -HUGE_VAL : top + log(sum);
    t->coarse[at] = sum == 0 || coarse != coarse ? 0 : coarse / sum * big * 6 / 65536;
    t->slack[at] = sum == 0 || slack != slack ? 0 : slack / sum * big * 1.2e-7;
}

/* Computes all rows, or every row_step-th; the others stay 0. */
static H_FAST truth oracle(const problem *p) {
    truth t;
    size_t rows = (size_t)(p->B * p->q_max * p->Hq), room = (size_t)p->k_max + 1;
    int32_t *keys = (int32_t *)malloc(room * sizeof *keys);
    double *s = (double *)malloc(2 * room * sizeof *s);
    int64_t k, n, step = p->row_step ? p->row_step : 1;
    t.o = (double *)calloc(rows * (size_t)p->Dv + 1, sizeof(double));
    t.lse = (double *)calloc(rows + 1, sizeof(double));
    t.slack = (double *)calloc(rows + 1, sizeof(double));
    t.coarse = (double *)calloc(rows + 1, sizeof(double));
    t.rough = (double *)calloc(rows * (size_t)p->Dv + 1, sizeof(double));
    for (int b = 0; b < p->B; b++) {
        for (int64_t i = 0; i < p->tq[b]; i += step) {
            for (n = k = 0; k < p->tk[b]; k++) {
                if (!p->absent[b * p->k_max + k] && visible(&p->mask, p->q_offset + i, k)) {
                    keys[n++] = (int32_t)k;
                }
            }
            for (int head = 0; head < p->Hq; head++) {
                oracle_row(p, &t, b, i, head, keys, n, s, s + room);
            }
        }
    }
    free(keys);
    free(s);
    return t;
}

static H_FAST void truth_free(truth *t) {
    free(t->o); free(t->lse); free(t->slack); free(t->rough);
    free(t->coarse);
}

/* -------------------------------------------------------------------------- gradients
 * Of sum(d_o * o), and for each the error that f32 arithmetic may make: `bar` counts what goes into
 * the sums in magnitude, times the rounding of the scores. */
typedef struct slopes {
    double *q, *k, *v;                 /* [B][q_max][Hq][Dk], [B][k_max][Hkv][Dk], [..][Dv];
                                        * v_in_k: k has both */
    double *q_bar, *k_bar, *v_bar;
    double sinks[64], sinks_bar[64];
    double *bias, *bias_bar;           /* [B][Hq][q_max][k_max] gradient of final scores; or null */
} slopes;

typedef struct slope_key { double w, drop, score, ds, size, rounding, bar; } slope_key;

/* out += x a, bar += error |a|, for n elements. */
static H_FAST void slope_add(double *out, double *bar, double x, double error, const float *a,
                             int n) {
    for (int d = 0; d < n; d++) {
        out[d] += x * (double)a[d];
        bar[d] += error * fabs((double)a[d]);
    }
}

/* Weights of one row (sequence, row, head) over its visible keys [n], then dS. Returns delta, and
 * in *bar the error of that. */
static H_FAST double slope_weights(const problem *p, const int64_t at[3], const int32_t *keys,
                                   int64_t n, slope_key *x, double *bar) {
    const int b = (int)at[0], head = (int)at[2], kv = head / (p->Hq / p->Hkv);
    const float *g = p->d_o + ((b * p->q_max + at[1]) * p->Hq + head) * p->Dv;
    double top = -HUGE_VAL, sum = 0, delta = 0, o_half_ulp = p->o_dtype == RA_F32 ? 0 : 0.004;
    double o_least = p->o_dtype == RA_F16 ? 3.1e-8 : 0;
    int d;
    for (int64_t j = 0; j < n; j++) {
        x[j].rounding = 0;
        x[j].score = score_of(p, b, at[1], head, keys[j], &x[j].rounding);
        if (x[j].score > top) top = x[j].score;
    }
    if ((p->scores & RA_SCORE_SINKS) && (double)p->sinks[head] > top) top = (double)p->sinks[head];
    if (p->scores & RA_SCORE_SINKS) sum = exp((double)p->sinks[head] - top);
    for (int64_t j = 0; j < n; j++) sum += exp(x[j].score - top);
    if (fabs(top + log(sum)) >= LSE_LIMIT) {           /* counts as a row without keys */
        for (int64_t j = 0; j < n; j++) x[j].w = x[j].drop = x[j].ds = x[j].rounding = x[j].bar = 0;
        *bar = 0;
        return 0;
    }
    for (*bar = 0, d = 0; d < p->Dv; d++) *bar += o_least * fabs((double)g[d]);
    for (int64_t j = 0; j < n; j++) {
        const float *v = v_row(p, b, keys[j], kv);
        x[j].w = exp(x[j].score - top) / sum;
        x[j].drop = drop_factor(p, b, at[1], head, keys[j]);
        x[j].ds = x[j].drop * dot_product(g, v, p->Dv);
        for (x[j].size = 0, d = 0; d < p->Dv; d++) x[j].size += fabs((double)g[d] * (double)v[d]);
        x[j].size *= x[j].drop;
        x[j].rounding = 1.5e-6 + 2.5e-7 * (x[j].rounding + fabs(x[j].score) + fabs(top));
        delta += x[j].w * x[j].ds;
        *bar += x[j].w * x[j].size * (x[j].rounding + o_half_ulp);
    }
    for (int64_t j = 0; j < n; j++) {
        x[j].bar = x[j].w * ((fabs(x[j].ds - delta) + x[j].size) * x[j].rounding + *bar);
        x[j].ds = x[j].w * (x[j].ds - delta);
    }
    return delta;
}

static H_FAST void slope_row(const problem *p, slopes *s, const int64_t at[3],
                             const int32_t *keys, int64_t n, slope_key *x) {
    const int b = (int)at[0], head = (int)at[2], kv = head / (p->Hq / p->Hkv);
    const int64_t row = (b * p->q_max + at[1]) * p->Hq + head;
    const float *q = p->q + row * p->Dk, *g = p->d_o + row * p->Dv;
    double c = problem_scale(p), bar, delta = slope_weights(p, at, keys, n, x, &bar), rest = 1;
    for (int64_t j = 0; j < n; j++) {
        int64_t key = (b * p->k_max + keys[j]) * p->Hkv + kv;
        int64_t at_v = p->v_in_k ? key * p->Dk + p->v_column : key * p->Dv;
        int64_t pair = ((b * p->Hq + head) * p->q_max + at[1]) * p->k_max + keys[j];
        const float *k = p->k + key * p->Dk;
        double ds = x[j].ds, w = x[j].w * x[j].drop;
        if (s->bias) {
            s->bias[pair] = bias_factor(p, head) * ds;
            s->bias_bar[pair] = bias_factor(p, head) * x[j].bar;
        }
        if (p->softcap > 0) {
            double t = tanh(c * dot_product(q, k, p->Dk) / (double)p->softcap);
            ds *= 1 - t * t;
        }
        slope_add(s->q + row * p->Dk, s->q_bar + row * p->Dk, c * ds, c * x[j].bar, k, p->Dk);
        slope_add(s->k + key * p->Dk, s->k_bar + key * p->Dk, c * ds, c * x[j].bar, q, p->Dk);
        slope_add((p->v_in_k ? s->k : s->v) + at_v, (p->v_in_k ? s->k_bar : s->v_bar) + at_v, w,
                  w * x[j].rounding, g, p->Dv);
        rest -= x[j].w;
    }
    if (n == 0 || !(p->scores & RA_SCORE_SINKS)) return;
    s->sinks[head] -= rest * delta;
    s->sinks_bar[head] += rest * (fabs(delta) * 4e-6 + bar);
}

/* with_bias: also the gradients of all final scores. */
static H_FAST slopes oracle_slopes(const problem *p, int with_bias) {
    size_t nq = (size_t)(p->B * p->q_max * p->Hq * p->Dk) + 1;
    size_t nk = (size_t)(p->B * p->k_max * p->Hkv) + 1, room = (size_t)p->k_max + 1;
    size_t pairs = (size_t)(p->B * p->Hq * p->q_max * p->k_max) + 1;
    slope_key *x = (slope_key *)malloc(room * sizeof *x);
    int32_t *keys = (int32_t *)malloc(room * sizeof *keys);
    int64_t at[3], k, n;
    slopes s = { 0 };
    s.q = (double *)calloc(2 * nq, sizeof(double));
    s.k = (double *)calloc(2 * nk * (size_t)p->Dk, sizeof(double));
    s.v = (double *)calloc(2 * nk * (size_t)p->Dv, sizeof(double));
    s.bias = with_bias ? (double *)calloc(2 * pairs, sizeof(double)) : NULL;
    s.q_bar = s.q + nq;
    s.k_bar = s.k + nk * (size_t)p->Dk;
    s.v_bar = s.v + nk * (size_t)p->Dv;
    s.bias_bar = with_bias ? s.bias + pairs : NULL;
    for (at[0] = 0; at[0] < p->B; at[0]++) for (at[1] = 0; at[1] < p->tq[at[0]]; at[1]++) {
        for (n = k = 0; k < p->tk[at[0]]; k++) {
            if (p->absent[at[0] * p->k_max + k]) continue;
            if (visible(&p->mask, p->q_offset + at[1], k)) keys[n++] = (int32_t)k;
        }
        for (at[2] = 0; at[2] < p->Hq; at[2]++) slope_row(p, &s, at, keys, n, x);
    }
    free(keys);
    free(x);
    return s;
}

static H_FAST void slopes_free(slopes *s) { free(s->q); free(s->k); free(s->v); free(s->bias); }

#endif
