#ifndef RINGATTN_TESTS_WORLD_H
#define RINGATTN_TESTS_WORLD_H

/* From a problem by position (oracle.h) to the tensors of every rank, through the library, and
 * back to O and LSE by position. Every gap of every output is checked to be untouched. */
#include "mail.h"
#include <pthread.h>

typedef struct outcome {
    ra_status status;                  /* of the first rank that did not end well */
    char text[900];
    float *o, *lse;                    /* [B][q_max][Hq][Dv], [B][q_max][Hq] */
    float *d_q, *d_k, *d_v;            /* train: as Q, K, V by position; 0 where nobody has them */
    double d_sinks[64];                /* sums over ranks */
    float *d_bias;                     /* [B][Hq][q_max][k_max], or null without a bias */
    int64_t guard_broken;              /* bytes written outside of rows, inputs changed */
    int64_t missing;                   /* query rows that no rank has, or two have */
    int64_t empty_wrong;               /* empty query cells whose o is not 0 */
    int32_t no_lse;
    int32_t rough;                     /* weights were rounded to bf16 */
    int32_t coarse;                    /* q and weights may have 16 bits */
    ra_plan_report report[MAX_RANKS];
    ra_ring_counters counters[MAX_RANKS];
} outcome;

/* -------------------------------------------------------------------------- a copying transport
 * Unlike the bundled world it shares no addresses. */
static inline mail_net *setup_network(const setup *s) {
    uint32_t seed = s->seed >> 8;
    mail_desc d = { 0 };
    d.ranks = s->ranks;
    d.level = s->wire == WIRE_POST;
    d.holds = s->wire == WIRE_POST || seed % 4 == 0;       /* otherwise sends wait for receives */
    d.tells = 1;
    d.moods = s->seed | 1;
    if (s->wire == WIRE_POST) {
        if (seed & 1) d.caps = RA_CAP_ANY_THREAD;
        d.max_ops = (seed >> 1) % 5;
        if (d.max_ops == 1) d.max_ops = 2;
        if (s->train) {
            d.max_ops += 3;
            d.channels = 2;
        }
    }
    if (s->wire == WIRE_SENDRECV && (seed & 8)) d.caps = RA_CAP_HELPER;
    if (s->train && s->grad_return == RA_RETURN_DIRECT) d.caps |= RA_CAP_ANY_PEER;
    return mail_open(&d, NULL);
}

typedef rank_part seat;

typedef struct world {
    const problem *p;
    const setup *s;
    mail_net *network;
    seat seats[MAX_RANKS];
} world;

/* -------------------------------------------------------------------------- calls */
typedef struct stepper { seat *seat; int ith, join, pass; ra_status status; } stepper;

static inline ra_job seat_job(seat *e, uint64_t ticket, int32_t pass) {
    ra_job j = { 0 };
    j.ticket = ticket;
    j.plan = e->plan;
    j.tensors = &e->t;
    j.deadline_ns = ra_deadline_ms(60000);
    j.pass = pass;
    return j;
}

/* One thread of a rank: steps, or joins `passes` tickets with gaps. */
static void *step_thread(void *user) {
    stepper *y = (stepper *)user;
    const setup *s = y->seat->s;
    int passes = y->join && s->passes > 1 ? s->passes : 1;
    for (int pass = 1; pass <= passes; pass++) {
        ra_job job = seat_job(y->seat, (uint64_t)(3 * pass + 1000 * y->pass), y->pass);
        ra_status status;
        do {
            status = y->join ? ra_join(y->seat->ring, &job, y->ith)
                             : ra_step(y->seat->ring, y->ith);
            if (status == RA_WAIT) ra_step_wait(y->seat->ring, ra_deadline_ms(2));
        } while (status > 0);
        y->status = status;
        if (status < 0) break;
    }
    return NULL;
}

static inline ra_status seat_step(seat *e, int join, int32_t which) {
    const setup *s = e->s;
    pthread_t threads[8];
    stepper y[8];
    ra_status status = RA_OK;
    int passes = !join && s->passes > 1 ? s->passes : 1;
    for (int pass = 0; pass < passes && status == RA_OK; pass++) {
        ra_job job = seat_job(e, 0, which);
        if (!join) status = ra_begin(e->ring, &job);
        if (status != RA_OK) return status;
        for (int i = 0; i < s->threads; i++) {
            y[i].seat = e; y[i].ith = i; y[i].join = join; y[i].status = RA_OK;
            y[i].pass = which;
            if (i) pthread_create(&threads[i], NULL, step_thread, &y[i]);
        }
        step_thread(&y[0]);
        for (int i = 0; i < s->threads; i++) {
            if (i) pthread_join(threads[i], NULL);
            if (y[i].status != RA_OK) status = y[i].status;
        }
    }
    return status;
}

/* The smallest workspace that the plan allows, full of garbage, with a guard behind it. */
static inline void seat_workspace(seat *e, ra_ring_desc *rd) {
    int shared = e->s->wire == WIRE_SHARED;
    int64_t bytes = shared ? e->report.shared_workspace_bytes : e->report.workspace_bytes;
    uint8_t *mem = (uint8_t *)malloc((size_t)bytes + 128);
    uint8_t *at = mem + (64 - (uintptr_t)mem % 64) % 64;
    memset(mem, 0xA5, (size_t)bytes + 128);
    memset(at + bytes, GUARD, 64);
    rd->workspace = at;
    rd->workspace_bytes = (size_t)bytes;
    e->workspace = mem;
    e->workspace_end = at + bytes;
}

static inline ra_status seat_forward(seat *e, const ra_transport *transport) {
    const setup *s = e->s;
    ra_ring_desc rd = { 0 };
    ra_status status;
    rd.error = &e->error;
    status = ra_plan_create(&e->plan, &e->d, NULL);
    if (status != RA_OK) return status;
    status = ra_plan_query(e->plan, e->rank, &e->report);
    if (s->exact) seat_workspace(e, &rd);
    if (status == RA_OK) status = ra_ring_create(&e->ring, e->plan, transport, &rd);
    if (status == RA_OK && (s->call == CALL_STEP || s->call == CALL_JOIN)) {
        status = seat_step(e, s->call == CALL_JOIN, RA_PASS_FORWARD);
    } else if (status == RA_OK) {
        for (int pass = 0; status == RA_OK && (pass == 0 || pass < s->passes); pass++) {
            status = ra_forward(e->plan, e->ring, &e->t, ra_deadline_ms(60000));
        }
    }
    if (status == RA_OK && s->train && (s->call == CALL_STEP || s->call == CALL_JOIN)) {
        status = seat_step(e, s->call == CALL_JOIN, RA_PASS_BACKWARD);
    } else if (status == RA_OK && s->train) {
        status = ra_backward(e->plan, e->ring, &e->t, ra_deadline_ms(60000));
    }
    if (e->ring) {
        ra_ring_query(e->ring, &e->counters);
        if (status < 0 && !e->error.text[0]) e->error = *ra_ring_error(e->ring);
        if (status < 0 && !e->error.text[0]) {
            ra_failure f;
            if (ra_ring_failure(e->ring, &f) == RA_OK) memcpy(e->error.text, f.text, sizeof f.text);
        }
        ra_ring_destroy(e->ring);
    }
    ra_plan_destroy(e->plan);
    return status;
}

static ra_status seat_run(ra_world *library_world, int rank, void *user) {
    world *w = (world *)user;
    seat *e = &w->seats[rank];
    ra_transport copying;
    const ra_transport *transport = ra_world_transport(library_world, rank);
    if (w->s->wire == WIRE_NULL) transport = NULL;
    if (w->s->wire == WIRE_POST || w->s->wire == WIRE_SENDRECV) {
        copying = mail_transport(w->network, rank);
        transport = &copying;
    }
    if (w->s->call == CALL_ATTEND) {
        e->status = ra_ring_once(&e->d, transport, &e->t, ra_deadline_ms(60000));
    } else {
        e->status = seat_forward(e, transport);
    }
    if (e->status < 0) mail_abort(&w->network->ends[rank], e->status);
    return e->status;
}

/* One call of all threads, one after another in an order, in a workspace full of garbage. */
static inline ra_status seat_call(seat *e, const int *order, int backward) {
    const int nth = e->s->threads;
    const size_t bytes = backward ? ra_attention_backward_bytes(&e->d, nth)
                                  : ra_attention_bytes(&e->d, nth);
    uint8_t *mem = (uint8_t *)malloc(bytes + 64), *work = mem + (64 - (uintptr_t)mem % 64) % 64;
    ra_status status = bytes ? RA_OK : e->error.status;
    memset(mem, 0xA5, bytes + 64);
    for (int i = 0; i < nth && status == RA_OK; i++)
        status = backward ? ra_attention_backward(&e->d, &e->t, work, bytes, order[i], nth)
                          : ra_attention(&e->d, &e->t, work, bytes, order[i], nth);
    free(mem);
    return status;
}

/* Without a ring, with threads in a random order. */
static inline ra_status seat_attention(seat *e) {
    int order[16];
    h_rng rng = { e->s->seed };
    for (int i = 0; i < e->s->threads; i++) order[i] = i;
    for (int i = e->s->threads - 1; i > 0; i--) {
        const int j = (int)h_range(&rng, 0, i), swap = order[i];
        order[i] = order[j];
        order[j] = swap;
    }
    ra_status status = seat_call(e, order, 0);
    return e->s->train && status == RA_OK ? seat_call(e, order, 1) : status;
}

/* -------------------------------------------------------------------------- outcomes */

/* The gradient of the bias, by position. */
static inline void outcome_bias(outcome *r, const seat *e) {
    const problem *p = e->p;
    int64_t shift = e->s->shift, keys = p->k_max + shift;
    for (int b = 0; b < p->B; b++) for (int64_t t = 0; t < e->q_len[b]; t++) {
        int64_t pos = e->q_pos[b * e->q_rows + t];
        for (int head = 0; head < p->Hq && pos >= 0; head++) {
            int64_t row = (b * p->Hq + head) * p->q_max + pos - p->q_offset;
            memcpy(r->d_bias + row * p->k_max,
                   e->d_bias + ((b * p->Hq + head) * (e->q_rows + 1) + t) * keys + shift,
                   (size_t)p->k_max * 4);
        }
    }
}

/* Rows of a gradient to their positions. */
static inline void outcome_grad(float *to, const view *v, const seat *e, int keys) {
    const problem *p = e->p;
    const int32_t *pos = keys ? e->k_pos : e->q_pos;
    const int64_t *len = keys ? e->k_len : e->q_len;
    int64_t rows = keys ? e->k_rows : e->q_rows, most = keys ? p->k_max : p->q_max;
    int64_t n = (int64_t)v->heads * v->dim, from = keys ? 0 : p->q_offset;
    for (int b = 0; b < p->B; b++) for (int64_t t = 0; t < len[b]; t++) {
        int64_t at = pos[b * rows + t];
        if (at >= 0) view_take(v, b, t, to + (b * most + at - from) * n);
    }
}

static inline void outcome_take(outcome *r, seat *e, uint8_t *seen) {
    const problem *p = e->p;
    int64_t n = p->Hq * p->Dv;
    float *row = (float *)malloc((size_t)n * sizeof *row), lse[64];
    int b;
    r->guard_broken += part_hash(e) != e->hash;
    for (b = 0; e->workspace_end && b < 64; b++) r->guard_broken += e->workspace_end[b] != GUARD;
    for (b = 0; b < p->B; b++) for (int64_t t = 0; t < e->q_len[b]; t++) {
        int64_t pos = e->q_pos[b * e->q_rows + t], at = b * p->q_max + pos - p->q_offset;
        view_take(&e->o, b, t, row);
        if (!e->s->no_lse) view_take(&e->lse, b, t, lse);
        else memset(lse, 0, sizeof lse);
        if (pos < 0) {
            for (int64_t d = 0; d < n; d++) r->empty_wrong += row[d] != 0;
            continue;
        }
        seen[at]++;
        memcpy(r->o + at * n, row, (size_t)n * sizeof *row);
        memcpy(r->lse + at * p->Hq, lse, (size_t)p->Hq * sizeof *lse);
    }
    if (e->q_rows) r->guard_broken += view_guard(&e->o) + view_guard(&e->lse);
    if (e->s->train) {
        outcome_grad(r->d_q, &e->d_q, e, 0);
        outcome_grad(r->d_k, &e->d_k, e, 1);
        if (!p->v_in_k) outcome_grad(r->d_v, &e->d_v, e, 1);
        for (b = 0; b < p->Hq; b++) r->d_sinks[b] += (double)e->d_sinks[b];
        if (e->d_bias) outcome_bias(r, e);
    }
    r->report[e->rank] = e->report;
    r->counters[e->rank] = e->counters;
    free(row);
}

static inline void outcome_blame(outcome *r, const seat *e) {
    if (r->status == RA_OK || (r->status == RA_E_ABORTED && e->status != RA_E_ABORTED)) {
        r->status = e->status;
        snprintf(r->text, sizeof r->text, "rank %d: %s (%s: %s)", e->rank,
                 ra_status_text(e->status), e->error.field, e->error.text);
    }
}

/* The tensors of all ranks; the status of the first refusal. */
static inline ra_status world_open(world *w, const problem *p, const setup *s) {
    ra_plan *plan = NULL;
    ra_status status = RA_OK;
    ra_desc d = rank_desc(p, s, 0);
    int rank;
    memset(w, 0, sizeof *w);
    w->p = p;
    w->s = s;
    d.error = &w->seats[0].error;
    if (!positions_with_call(s)) status = ra_plan_create(&plan, &d, NULL);
    for (rank = 0; rank < s->ranks && !status; rank++) part_make(&w->seats[rank], p, s, plan, rank);
    w->seats[0].status = status;
    ra_plan_destroy(plan);
    return status;
}

/* 1 if the library computes d in bf16: not under dropout, and by AMX not in the decoding form of
 * ra_attention, see decodes_in_f32. */
static inline int rounds_weights(const ra_desc *d) {
    int32_t isa = d->isa ? d->isa : ra_isa_best();
    return (d->arith || (d->q_dtype == RA_BF16 && d->k_dtype == RA_BF16 &&
                         (d->v_in_k || d->v_dtype == RA_BF16))) &&
           (isa == RA_ISA_AVX512_BF16 || isa == RA_ISA_AMX) && d->dropout <= 0;
}

static inline int decodes_in_f32(const setup *s, const ra_desc *d) {
    return s->call == CALL_ATTENTION && d->tokens * (d->q_heads / d->kv_heads) <= 16 &&
           (d->isa ? d->isa : ra_isa_best()) != RA_ISA_AVX512_BF16;
}

/* 1 if the library may compute d, in q8_0 or q4_0, by products of integers. */
static inline int may_use_integers(const ra_desc *d) {
    const int32_t isa = d->isa ? d->isa : ra_isa_best();
    return has_scales(d->k_dtype) && (d->v_in_k || has_scales(d->v_dtype)) &&
           (isa == RA_ISA_AVX512_BF16 || isa == RA_ISA_AMX);
}

/* Collects what all ranks wrote and frees their tensors. */
static inline outcome outcome_gather(world *w) {
    const problem *p = w->p;
    const setup *s = w->s;
    outcome r = { 0 };
    size_t rows = (size_t)(p->B * p->q_max);
    uint8_t *seen = (uint8_t *)calloc(rows + 1, 1);
    r.no_lse = s->no_lse;
    r.o = (float *)calloc(rows * (size_t)(p->Hq * p->Dv) + 1, sizeof *r.o);
    r.lse = (float *)calloc(rows * (size_t)p->Hq + 1, sizeof *r.lse);
    r.d_q = (float *)calloc(rows * (size_t)(p->Hq * p->Dk) + 1, sizeof *r.d_q);
    r.d_k = (float *)calloc((size_t)(p->B * p->k_max * p->Hkv * p->Dk) + 1, sizeof *r.d_k);
    r.d_v = (float *)calloc((size_t)(p->B * p->k_max * p->Hkv * p->Dv) + 1, sizeof *r.d_v);
    if (s->train && (p->scores & RA_SCORE_BIAS)) {
        r.d_bias = (float *)calloc(rows * (size_t)(p->Hq * p->k_max) + 1, sizeof *r.d_bias);
    }
    for (int rank = 0; rank < s->ranks; rank++) {
        if (w->seats[rank].status != RA_OK) outcome_blame(&r, &w->seats[rank]);
    }
    for (int rank = 0; rank < s->ranks; rank++) {
        if (r.status == RA_OK) outcome_take(&r, &w->seats[rank], seen);
        r.rough |= rounds_weights(&w->seats[rank].d) && !decodes_in_f32(s, &w->seats[rank].d);
        r.coarse |= may_use_integers(&w->seats[rank].d);
        part_free(&w->seats[rank]);
    }
    for (int b = 0; b < p->B; b++) for (int64_t i = 0; i < p->tq[b]; i++) {
        r.missing += seen[b * p->q_max + i] != 1;
    }
    free(seen);
    return r;
}

static inline outcome world_run(const problem *p, const setup *s) {
    static world w;
    int64_t left = 0;
    outcome r;
    if (world_open(&w, p, s) == RA_OK) {
        w.network = setup_network(s);
        if (s->call == CALL_ATTENTION) w.seats[0].status = seat_attention(&w.seats[0]);
        else ra_world_run(s->ranks, seat_run, &w, NULL);
        left = mail_close(w.network);
    }
    r = outcome_gather(&w);
    r.guard_broken += left;
    return r;
}

/* Worst |got - real| over the tolerance. rough: P, dS and dO are rounded to bf16. Where the oracle
 * has a NaN there must be one. */
static inline double worst_gradient(const float *got, const double *real, const double *bar,
                                    int64_t n, int rough) {
    double worst = 0;
    for (int64_t i = 0; i < n; i++) {
        double tol = 3e-7 + (rough ? 4096 : 1) * bar[i] + 1.2e-7 * fabs(real[i]);
        double x = fabs((double)got[i] - real[i]) / tol;
        if (real[i] != real[i]) x = got[i] != got[i] ? 0 : HUGE_VAL;
        if (!(x <= worst)) worst = x;
    }
    return worst;
}

/* The worst of all gradients of a training pass. */
static inline double outcome_gradients(const outcome *r, const problem *p) {
    const int64_t nq = p->B * p->q_max * p->Hq, nk = p->B * p->k_max * p->Hkv;
    slopes real = oracle_slopes(p, r->d_bias != NULL);
    double worst[5] = { 0 };
    worst[0] = worst_gradient(r->d_q, real.q, real.q_bar, nq * p->Dk, r->rough);
    worst[1] = worst_gradient(r->d_k, real.k, real.k_bar, nk * p->Dk, r->rough);
    if (!p->v_in_k) worst[2] = worst_gradient(r->d_v, real.v, real.v_bar, nk * p->Dv, r->rough);
    if (r->d_bias)
        worst[3] = worst_gradient(r->d_bias, real.bias, real.bias_bar, nq * p->k_max, r->rough);
    for (int i = 0; i < p->Hq && (p->scores & RA_SCORE_SINKS); i++) {
        double tol = 3e-6 + (r->rough ? 4096 : 1) * real.sinks_bar[i];
        double x = fabs(r->d_sinks[i] - real.sinks[i]) / (tol + 1e-6 * fabs(real.sinks[i]));
        if (real.sinks[i] != real.sinks[i]) x = r->d_sinks[i] != r->d_sinks[i] ? 0 : HUGE_VAL;
        if (!(x <= worst[4])) worst[4] = x;
    }
    slopes_free(&real);
    for (int i = 1; i < 5; i++) if (!(worst[i] <= worst[0])) worst[0] = worst[i];
    if (!(worst[0] <= 1)) printf("    %.3g times the bar\n", worst[0]);
    return worst[0];
}

static inline void outcome_free(outcome *r) {
    free(r->o); free(r->lse);
    free(r->d_q); free(r->d_k); free(r->d_v); free(r->d_bias);
}

/* CHECKs that a run ended well and stayed within its memory. */
static inline int outcome_whole(const outcome *r) {
    if (!CHECK_EQ(r->status, RA_OK)) { printf("    %s\n", r->text); return 0; }
    return CHECK_EQ(r->guard_broken, 0) & CHECK_EQ(r->missing, 0) & CHECK_EQ(r->empty_wrong, 0);
}

/* -------------------------------------------------------------------------- comparing */
typedef struct verdict { double o_error, lse_error, o_ratio, lse_ratio; } verdict;

/* Compares with the oracle. O: 2e-6, plus the slack if the problem is loose, plus half a step of a
 * 16-bit o, plus what the rounding of weights to bf16 and of integer products explains. LSE: 4e-6
 * max(1, |L|), plus the slack, plus one rounding. Ratios are in units of these. */
static inline verdict outcome_judge(const outcome *r, const problem *p, const truth *t) {
    verdict w = { 0, 0, 0, 0 };
    int64_t at, step = p->row_step ? p->row_step : 1, worst_o = -1, worst_l = -1;
    for (int b = 0; b < p->B; b++) for (int64_t i = 0; i < p->tq[b]; i += step) {
        for (int head = 0; head < p->Hq; head++) {
            double slack, want, far, tol;
            at = (b * p->q_max + i) * p->Hq + head;
            slack = (p->loose ? t->slack[at] : 0) + (r->coarse ? t->coarse[at] : 0);
            want = t->lse[at];
            tol = 4e-6 * (fabs(want) > 1 ? fabs(want) : 1) + slack + (r->rough ? 0.0041 : 0);
            far = r->no_lse ? 0 : h_distance((double)r->lse[at], want, tol);
            if (far > w.lse_ratio) { w.lse_ratio = far; worst_l = at; }
            if (far * tol > w.lse_error) w.lse_error = far * tol;
            for (int64_t d = 0; d < p->Dv; d++) {
                want = t->o[at * p->Dv + d];
                tol = 2e-6 + slack + (r->rough ? 1.05 * t->rough[at * p->Dv + d] : 0);
                if (p->o_dtype != RA_F32) tol += 0.505 * dtype_ulp(want, p->o_dtype);
                far = h_distance((double)r->o[at * p->Dv + d], want, tol);
                if (far > w.o_ratio) { w.o_ratio = far; worst_o = at * p->Dv + d; }
                if (far * tol > w.o_error) w.o_error = far * tol;
            }
        }
    }
    if (worst_o >= 0 && w.o_ratio > 1) {
        at = worst_o / p->Dv;
        printf("    o: sequence %lld query %lld head %lld column %lld: %.9g, expected %.9g\n",
               (long long)(at / p->Hq / p->q_max), (long long)(at / p->Hq % p->q_max),
               (long long)(at % p->Hq), (long long)(worst_o % p->Dv), (double)r->o[worst_o],
               t->o[worst_o]);
    }
    if (worst_l >= 0 && w.lse_ratio > 1) {
        printf("    lse: sequence %lld query %lld head %lld: %.9g, expected %.9g\n",
               (long long)(worst_l / p->Hq / p->q_max), (long long)(worst_l / p->Hq % p->q_max),
               (long long)(worst_l % p->Hq), (double)r->lse[worst_l], t->lse[worst_l]);
    }
    return w;
}

/* One problem through the library and through the oracle. */
static inline verdict world_compare(const problem *p, const setup *s) {
    verdict w = { 0, 0, 0, 0 };
    truth t;
    outcome r;
    describe_case(p, s);
    r = world_run(p, s);
    if (outcome_whole(&r)) {
        t = oracle(p);
        w = outcome_judge(&r, p, &t);
        CHECK(w.o_ratio <= 1);
        CHECK(w.lse_ratio <= 1);
        truth_free(&t);
    }
    outcome_free(&r);
    return w;
}

/* O and LSE of ra_attention on 1 to `most` threads have the same bits. */
static inline void same_on_threads(const problem *p, setup *s, int32_t most) {
    outcome first = world_run(p, s), got;
    for (s->threads = 2; s->threads <= most; s->threads++) {
        got = world_run(p, s);
        CHECK_BITS(got.o, first.o, p->q_max * p->Hq * p->Dv * 4);
        CHECK_BITS(got.lse, first.lse, p->q_max * p->Hq * 4);
        outcome_free(&got);
    }
    outcome_free(&first);
}

/* Scores are exact: those of block b are b times the rise and one more for odd keys, or 0 for every
 * third query. */
static inline void problem_rises(problem *p, float rise, h_rng *r) {
    p->scale = 1;
    p->loose = 1;
    problem_data(p, r);
    for (int64_t i = 0; i < p->q_max; i++)
        for (int64_t d = 0; d < p->Dk; d++) p->q[i * p->Dk + d] = d == 0 && i % 3 ? 1.0f : 0.0f;
    for (int64_t i = 0; i < p->k_max; i++)
        for (int64_t d = 0; d < p->Dk; d++)
            p->k[i * p->Dk + d] = d ? 0.0f
                                    : dtype_round(rise * (float)(i / 64) + (float)(i % 2), RA_BF16);
}

/* m of such a problem's state after all keys is the maximum of the first block, except in rows
 * whose scores `rise` so far that l would exceed the limit. */
static inline void stale_maxima(const problem *p, int32_t isa, int rise, float limit) {
    const int64_t rows = p->q_max, n = rows * p->Dk;
    const int32_t size = (int32_t)element_bytes(p->q_dtype);
    uint8_t *data[3];
    float *m = (float *)malloc((size_t)(rows * 2 + n) * sizeof *m);
    int64_t kept = 0, raised = 0;
    ra_desc d = ra_desc_make(1, 1, p->Dk, p->q_dtype, RA_MASK_NONE);
    ra_tensors t = { 0 };
    ra_state state;
    size_t bytes;
    uint8_t *work;
    for (int64_t i = 0; i < 3; i++) {
        const float *from = i == 0 ? p->q : i == 1 ? p->k : p->v;
        data[i] = (uint8_t *)malloc((size_t)(n * size));
        for (int64_t j = 0; j < n; j++) dtype_store(data[i] + j * size, from[j], p->q_dtype);
    }
    d.tokens = rows; d.scale = 1; d.o_dtype = RA_F32; d.isa = isa;
    t.q.data = data[0]; t.k.data = data[1]; t.v.data = data[2];
    state.m = m; state.l = m + rows; state.acc = m + 2 * rows;
    bytes = ra_attention_bytes(&d, 1);
    work = (uint8_t *)malloc(bytes + 64);
    CHECK_EQ(ra_state_clear(&d, &state), RA_OK);
    CHECK_EQ(ra_fold(&d, &state, &t, work + (64 - (uintptr_t)work % 64) % 64, bytes), RA_OK);
    for (int64_t i = 0; i < rows; i++) {
        CHECK(state.l[i] > 0 && state.l[i] <= limit);
        if (fabsf(m[i] - (i % 3 ? 1.4427f : 0)) < 0.01f) kept++;
        else raised += i % 3 != 0;
    }
    CHECK_EQ(kept, rise ? (rows + 2) / 3 : rows);
    CHECK_EQ(kept + raised, rows);
    for (int64_t i = 0; i < 3; i++) free(data[i]);
    free(work);
    free(m);
}

#endif
