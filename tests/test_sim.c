/* Whole worlds in one thread: every rank has a ring on a network in memory (net.h) and is stepped
 * at random, by several "threads" per rank, with a clock that the test moves. Nothing may block,
 * every pass must end, and what ends well must be right: against a double-precision reference
 * (small.h) and, where the plan promises it, bit for bit against one rank. Then with faults.
 * Sharded caches too. */
#define _POSIX_C_SOURCE 200112L
#include "hooks.h"
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#if defined(__GLIBC__)
#include <malloc.h>
#endif
#include "small.h"
#include "net.h"

enum { PASSES = 3, STUCK = 60000, WATCHDOG = 2000000 };

typedef struct seat {                  /* one rank */
    ra_ring *ring;
    rank_part part;                   /* of the pass in progress */
    ra_tensors given;                  /* what begin got and copied; overwritten afterwards */
    small_heap heap;
    uint8_t *workspace;                /* the caller's, with a margin behind it; or null */
    size_t workspace_bytes;
    int pass, begun, over;             /* finished problems; over: no more steps */
    int back, ran;                     /* the backward half of a problem; finished passes */
    ra_status end;
    int64_t trace_failures;
    int64_t progress_done, progress_all;
} seat;

typedef struct world {
    net *net;
    int ranks, passes, threads, join, silent;
    int stalled;                       /* rank that does not come, until `stalled_until`; -1 */
    int64_t stalled_until;
    int patient;                       /* 1: no watchdog, because nothing is wrong */
    int few_ops;                       /* 1: a refusal because of max_ops is fine */
    int checksums, resumable;          /* of all rings */
    int64_t deadline;                  /* of every pass, 0: none */
    int64_t idle;                      /* steps since something was done */
    int first_failed;                  /* rank, -1: none */
    int checked;                       /* passes whose result was compared */
    int wrong;                         /* 1: something was wrong, and has been reported */
    small problem[PASSES];
    ra_plan *plan[PASSES][NET_RANKS];
    rank_part whole[PASSES];          /* the same on one rank, where bits must be equal */
    seat seat[NET_RANKS];
} world;

static int64_t seen[128];              /* how often a pass ended with -status */
static FILE *sim_log;                  /* the schedule of every world; null: nowhere */

static int64_t world_clock(void *ctx) { return ((world *)ctx)->net->now; }

static void world_trace(void *ctx, const ra_event *e) {
    seat *s = (seat *)ctx;
    if (e->kind == RA_EV_FAIL) s->trace_failures++;
}

static void world_progress(void *ctx, int64_t done, int64_t all) {
    seat *s = (seat *)ctx;
    s->progress_done = done;
    s->progress_all = all;
}

static void describe(const world *w) {
    const ra_desc *d = &w->problem[0].d;
    const net_config *c = &w->net->c;
    h_context("P %d passes %d threads %d join %d | B %d T %lld keys %lld at %lld H %d/%d D %d/%d "
              "v_in_k %d dtypes %d%d%d%d mask %d layout %d weights %d scores %d chunk %d buffers %d"
              " order %d | delay %lld capacity %d refuse %d lend %d/%d peer %d thread %d shared %d"
              " reg %d bare %d told %d ops %u | fault %d rank %d at %lld value %d byte %d fired %d",
              w->ranks, w->passes, w->threads, w->join, d->sequences, (long long)d->tokens,
              (long long)d->kv_tokens, (long long)d->q_offset, d->q_heads, d->kv_heads, d->k_dim,
              d->v_dim, d->v_in_k, d->q_dtype, d->k_dtype, d->v_dtype, d->o_dtype, d->mask.kind,
              d->layout.kind, d->layout.weights != NULL, d->scores, d->chunk_tokens, d->buffers,
              d->order, (long long)c->delay, c->capacity, c->refuse, c->lend, c->lend_sender,
              c->any_peer, c->any_thread, c->shared, c->reg, c->bare, c->told, c->max_ops,
              c->fault.kind, c->fault.rank, (long long)c->fault.at, c->fault.value, c->fault.byte,
              c->fault.fired);
}

static void random_net(net_config *c, int ranks) {
    small_net(c, ranks);
    c->shared = small_chance(20) && 2 * ranks + 2 <= 64;
    c->any_peer = c->shared || small_chance(50);
    if (!c->shared && small_chance(25)) c->lend = small_range(20, 100);
    if (!c->shared && small_chance(15)) c->lend_sender = small_range(20, 100);
    c->reg = small_chance(40) ? small_range(1, 2) : 0;
    c->max_ops = c->shared ? 64 : small_chance(40) ? 0 : (uint32_t)small_range(2, 40);
    c->train = small_chance(40);
    if (c->train && c->max_ops < 3) c->max_ops = 3;
    small_net_limits(c);
}

/* -------------------------------------------------------------------------- making and ending */

static int make_plans(world *w, int pass) {
    small *s = &w->problem[pass];
    ra_error error;
    for (int r = 0; r < w->ranks; r++) {
        ra_desc d = s->d;
        ra_status st;
        memset(&error, 0, sizeof error);
        d.rank = r;
        d.error = &error;
        st = ra_plan_create(&w->plan[pass][r], &d, NULL);
        if (!SOUND(w, st == RA_OK)) {
            printf("    refused: %s %s: %s\n", ra_status_text(st), error.field, error.text);
            return 0;
        }
    }
    return 1;
}

static int make_ring(world *w, int r) {
    seat *s = &w->seat[r];
    ra_ring_desc rd = { 0 };
    ra_error error = { 0 };
    int64_t most = 0;
    ra_status st;
    for (int i = 0; i < w->passes; i++) {
        ra_plan_report rep;
        int64_t bytes;
        (void)ra_plan_query(w->plan[i][r], r, &rep);
        bytes = w->net->c.shared ? rep.shared_workspace_bytes : rep.workspace_bytes;
        if (bytes > most) most = bytes;
    }
    if (small_chance(50) && w->net->c.align <= 64) {   /* or the plan does not know the size */
        s->workspace = (uint8_t *)net_memory((size_t)most, 64);
        memset(s->workspace, 0xCD, (size_t)most);
        rd.workspace = s->workspace;
    }
    if (s->workspace || w->passes > 1) rd.workspace_bytes = (size_t)most;
    if (w->passes > 1 && w->net->c.align > 64) rd.workspace_bytes += 64 * w->net->c.align;
    rd.allocator = small_heap_allocator(&s->heap);
    rd.checksums = w->checksums;
    rd.resumable = w->resumable;
    rd.watchdog_ns = w->patient ? (int64_t)1 << 50 : WATCHDOG;
    rd.clock_ns = world_clock;
    rd.clock_ctx = w;
    rd.trace = world_trace;
    rd.trace_ctx = s;
    rd.progress = world_progress;
    rd.progress_ctx = s;
    rd.error = &error;
    st = ra_ring_create(&s->ring, w->plan[0][r], &w->net->rank[r].transport, &rd);
    if (st == RA_E_TRANSPORT && w->few_ops && !strcmp(error.field, "transport.max_ops")) return 0;
    if (SOUND(w, st == RA_OK)) return 1;
    printf("    refused: %s %s: %s\n", ra_status_text(st), error.field, error.text);
    return 0;
}

/* One rank's result of the same problem, if the plan reports that its bits are the same. */
static void make_whole(world *w, int pass) {
    ra_plan_report rep;
    small one = w->problem[pass];
    ra_plan *plan = NULL;
    ra_status st;
    if (ra_plan_query(w->plan[pass][0], 0, &rep) != RA_OK || !rep.forward.bits_any_ranks) return;
    one.s.ranks = 1;
    one.s.weighted = 0;
    small_desc(&one);
    if (one.d.layout.kind != RA_LAYOUT_CONTIGUOUS && one.d.layout.kind != RA_LAYOUT_ZIGZAG) return;
    if (!SOUND(w, ra_plan_create(&plan, &one.d, NULL) == RA_OK)) return;
    part_make(&w->whole[pass], &w->problem[pass].p, &one.s, plan, 0);
    w->whole[pass].s = &w->problem[pass].s;
    st = ra_ring_once(&one.d, NULL, &w->whole[pass].t, RA_NO_DEADLINE);
    SOUND(w, st == RA_OK);
    if (rep.backward.bits_any_ranks) {
        ra_ring *ring = NULL;
        SOUND(w, ra_ring_create(&ring, plan, NULL, NULL) == RA_OK);
        SOUND(w, ra_backward(plan, ring, &w->whole[pass].t, RA_NO_DEADLINE) == RA_OK);
        ra_ring_destroy(ring);
    }
    ra_plan_destroy(plan);
}

static world *make_world(int ranks, int passes, int most, const net_config *c) {
    world *w = (world *)calloc(1, sizeof *w);
    h_rng begin = small_rng;
    if (!w) abort();
    w->net = net_create(c);
    w->ranks = ranks;
    w->passes = passes;
    w->threads = small_chance(50) ? 1 : small_range(1, 5);
    w->join = small_chance(40);
    w->checksums = small_chance(40);
    w->resumable = small_chance(50);
    w->silent = w->stalled = w->first_failed = -1;
    w->net->log = sim_log;
    for (int i = 0; i < passes; i++) {
        if (i == 0 || !small_chance(30)) begin = small_rng;
        else small_rng = begin;        /* the same again: frames differ in the pass alone */
        small_make(&w->problem[i], ranks, most, w->threads);
        if (c->train) small_train(&w->problem[i], ranks > 2 && !c->any_peer);
    }
    describe(w);
    return w;
}

static int open_world(world *w) {
    for (int i = 0; i < w->passes; i++) if (!make_plans(w, i)) return 0;
    for (int i = 0; i < w->passes; i++) make_whole(w, i);
    for (int r = 0; r < w->ranks; r++) if (!make_ring(w, r)) return 0;
    return 1;
}

static void free_world(world *w) {
    for (int r = 0; r < w->ranks; r++) {
        seat *s = &w->seat[r];
        free(s->workspace);
        part_free(&s->part);
        small_heap_clear(&s->heap);
    }
    for (int i = 0; i < w->passes; i++) {
        for (int r = 0; r < w->ranks; r++) ra_plan_destroy(w->plan[i][r]);
        part_free(&w->whole[i]);
        small_free(&w->problem[i]);
    }
    net_destroy(w->net);
    free(w);
}

/* -------------------------------------------------------------------------- results */

static int row_of(const int32_t *of, int64_t rows, int64_t b, int32_t pos) {
    for (int64_t i = 0; i < rows; i++) if (of[b * rows + i] == pos) return (int)i;
    return -1;
}

/* Rows of a gradient of this rank have the bits that one rank computes. */
static int same_grads(const rank_part *p, const rank_part *whole, int keys) {
    const problem *x = p->p;
    const int32_t *pos = keys ? p->k_pos : p->q_pos, *all = keys ? whole->k_pos : whole->q_pos;
    int64_t rows = keys ? p->k_rows : p->q_rows;
    for (int64_t b = 0; b < x->B; b++)
        for (int64_t i = 0; i < rows; i++) {
            int at;
            if (pos[b * rows + i] < 0) continue;
            at = row_of(all, keys ? whole->k_rows : whole->q_rows, b, pos[b * rows + i]);
            if (at < 0) return 0;
            for (int64_t n = 0; n < (keys ? x->Hkv : x->Hq); n++) {
                const view *mine = keys ? &p->d_k : &p->d_q;
                const view *all_of = keys ? &whole->d_k : &whole->d_q;
                if (memcmp(view_at(mine, b, i, n), view_at(all_of, b, at, n), (size_t)x->Dk * 4))
                    return 0;
                if (keys && !x->v_in_k &&
                    memcmp(view_at(&p->d_v, b, i, n), view_at(&whole->d_v, b, at, n),
                           (size_t)x->Dv * 4))
                    return 0;
            }
        }
    return 1;
}

/* Rows of this rank have the bits that one rank computes. */
static int same_bits(const rank_part *p, const rank_part *whole) {
    const problem *x = p->p;
    size_t bytes = (size_t)(x->Dv * element_bytes(x->o_dtype));
    for (int64_t b = 0; b < x->B; b++) {
        int at = -1;
        for (int64_t i = 0; i < p->q_rows; i++) {
            int32_t pos = p->q_pos[b * p->q_rows + i];
            if (pos < 0) continue;
            at++;
            if (at >= whole->q_rows || whole->q_pos[b * whole->q_rows + at] != pos)
                at = row_of(whole->q_pos, whole->q_rows, b, pos);
            if (at < 0) return 0;
            for (int64_t n = 0; n < x->Hq; n++) {
                if (memcmp(view_at(&p->o, b, i, n), view_at(&whole->o, b, at, n), bytes))
                    return 0;
                if (p->t.lse.data && whole->t.lse.data &&
                    memcmp(view_at(&p->lse, b, i, n), view_at(&whole->lse, b, at, n), 4))
                    return 0;
            }
        }
    }
    return 1;
}

/* What the ring counted is what the plan reports. */
static void check_counters(world *w, int r) {
    seat *s = &w->seat[r];
    ra_ring_counters c;
    ra_plan_report p;
    int shared = w->net->c.shared;
    ra_ring_query(s->ring, &c);
    if (!SOUND(w, ra_plan_query(w->plan[s->pass][r], r, &p) == RA_OK)) return;
    SOUND(w, c.state == RA_RING_IDLE);
    SOUND(w, c.pass == s->ran + 1);
    SOUND(w, c.tiles_empty == (s->back ? p.backward.tiles_empty : p.forward.tiles_empty));
    SOUND(w, c.tiles_partial == (s->back ? p.backward.tiles_partial : p.forward.tiles_partial));
    SOUND(w, c.tiles_full == (s->back ? p.backward.tiles_full : p.forward.tiles_full));
    SOUND(w, c.tiles_all == c.tiles_partial + c.tiles_full);
    if (s->back) {
        SOUND(w, c.chunks_in == p.backward.chunks_in);
        SOUND(w, c.chunks_out == p.backward.chunks_out);
        SOUND(w, c.bytes_in == (shared ? p.backward.shared_bytes_in : p.backward.bytes_in));
        SOUND(w, c.bytes_out == (shared ? p.backward.shared_bytes_out : p.backward.bytes_out));
    } else {
        SOUND(w, c.chunks_in == p.forward.chunks_in);
        SOUND(w, c.chunks_out == p.forward.chunks_out);
        SOUND(w, c.bytes_in == (shared ? p.forward.shared_bytes_in : p.forward.bytes_in));
        SOUND(w, c.bytes_out == (shared ? p.forward.shared_bytes_out : p.forward.bytes_out));
    }
    SOUND(w, c.peak_bytes <= (shared ? p.shared_workspace_bytes : p.workspace_bytes) ||
             w->passes > 1 || w->net->c.align > 64);
    SOUND(w, s->progress_all == c.tiles_all || c.tiles_all == 0);
    SOUND(w, s->progress_done == c.tiles_all || c.tiles_all == 0);
}

/* Frames alone that rank r sends: a hello for each plan that it has not used yet, and one more for
 * its gradients; and those of roll calls. It gets as many. */
static int64_t hellos(const world *w, int r) {
    int64_t n = 0;
    for (int i = 0; i < w->passes && w->ranks > 1; i++) {
        int met = 0;
        for (int k = 0; k < i; k++)
            met |= hook_plans_agree(w->plan[k][0], w->plan[i][0]);
        if (!met) n += 1 + w->problem[i].d.train;
        if (w->resumable) n += hook_rolls(w->plan[i][0], 0, r);
        if (w->resumable && w->problem[i].d.train) n += hook_rolls(w->plan[i][0], 1, r);
    }
    return n;
}

/* Counted by the network over all passes. */
static void check_traffic(world *w, int r) {
    const net_rank *n = &w->net->rank[r];
    int64_t chunks[2] = { 0, 0 }, bytes[2] = { 0, 0 };
    for (int i = 0; i < w->passes; i++) {
        ra_plan_report p;
        (void)ra_plan_query(w->plan[i][r], r, &p);
        chunks[0] += p.forward.chunks_in;
        chunks[1] += p.forward.chunks_out;
        bytes[0] += w->net->c.shared ? p.forward.shared_bytes_in + p.backward.shared_bytes_in
                                     : p.forward.bytes_in + p.backward.bytes_in;
        bytes[1] += w->net->c.shared ? p.forward.shared_bytes_out + p.backward.shared_bytes_out
                                     : p.forward.bytes_out + p.backward.bytes_out;
    }
    for (int i = 0; i < 2; i++) {
        if (!w->net->c.train) SOUND(w, n->messages[i] == chunks[i]);
        SOUND(w, n->bytes[i] + n->word_bytes[i] == bytes[i]);
        SOUND(w, n->hellos[i] == hellos(w, r));
    }
}

static int bits_of_grads(const world *w, int pass) {
    ra_plan_report p;
    return ra_plan_query(w->plan[pass][0], 0, &p) == RA_OK && p.backward.bits_any_ranks;
}

/* A pass that ended well is right, if it is resumable all ranks have begun it, and the library does
 * not use its tensors any more. */
static void end_pass(world *w, int r) {
    seat *s = &w->seat[r];
    const rank_part *whole = w->whole[s->pass].s ? &w->whole[s->pass] : NULL;
    int exact = !s->back && !(w->problem[s->pass].d.dropout > 0.0f);   /* what small_exact knows */
    const char *why = exact ? small_part_check(&s->part, 24) : NULL;
    if (!SOUND(w, why == NULL)) printf("    %s\n", why);
    if (!s->back && whole) SOUND(w, same_bits(&s->part, whole));
    if (s->back && whole && whole->s->train && bits_of_grads(w, s->pass))
        SOUND(w, same_grads(&s->part, whole, 0) && same_grads(&s->part, whole, 1));
    check_counters(w, r);
    for (int i = 0; i < w->ranks && w->resumable; i++) {
        ra_ring_counters c;
        ra_ring_query(w->seat[i].ring, &c);
        SOUND(w, c.pass > s->ran);
    }
    s->ran++;
    s->begun = 0;
    s->progress_done = s->progress_all = 0;
    s->back = !s->back && w->problem[s->pass].d.train;
    if (s->back) return;
    small_part_poison(&s->part);
    if (small_chance(20)) SOUND(w, !small_part_spills(&s->part));
    w->checked++;
    part_free(&s->part);
    memset(&s->part, 0, sizeof s->part);
    if (++s->pass == w->passes) s->over = 1;
}

/* -------------------------------------------------------------------------- stepping */

static void fail_pass(world *w, int r, ra_status st) {
    seat *s = &w->seat[r];
    s->over = 1;
    s->end = st;
    if (st > -128) seen[-st]++;
    if (w->first_failed < 0) w->first_failed = r;
}

static void prepare(world *w, int r) {
    seat *s = &w->seat[r];
    if (s->part.s) return;
    part_make(&s->part, &w->problem[s->pass].p, &w->problem[s->pass].s, w->plan[s->pass][r], r);
    s->progress_done = s->progress_all = 0;
}

static ra_status call(world *w, int r, int ith) {
    seat *s = &w->seat[r];
    ra_status st;
    ra_job job = { 0 };
    prepare(w, r);
    s->given = s->part.t;
    job.plan = w->plan[s->pass][r];
    job.tensors = &s->given;
    job.deadline_ns = w->deadline;
    job.pass = s->back ? RA_PASS_BACKWARD : RA_PASS_FORWARD;
    if (w->join) {
        job.ticket = 7u + (uint64_t)s->ran * 3u;
        st = ra_join(s->ring, &job, ith);
    } else if (!s->begun) {
        st = ra_begin(s->ring, &job);
        if (st == RA_OK) {
            s->begun = 1;
            st = RA_AGAIN;
        }
    } else {
        st = ra_step(s->ring, ith);
    }
    memset(&s->given, 0xFF, sizeof s->given);
    return st;
}

static void step_world(world *w) {
    int r = small_range(0, w->ranks - 1), ith;
    seat *s = &w->seat[r];
    ra_status st;
    w->net->now += small_range(1, 8);
    if (++w->idle > 8 * w->ranks) w->net->now += 100;
    if (w->idle > 60 * w->ranks * w->threads) w->net->now += WATCHDOG / (50 * w->ranks);
    if (s->over || r == w->silent) return;
    if (r == w->stalled && w->net->now < w->stalled_until) return;
    ith = small_range(0, w->threads - 1);
    if (w->idle > 60 * w->ranks * w->threads && small_chance(50)) ith = 0;     /* it may talk */
    w->net->thread = ith;
    st = call(w, r, ith);
    if (st != RA_WAIT)
        net_log(w->net, "%lld: rank %d thread %d pass %d: %s\n", (long long)w->net->now, r, ith,
                s->ran + 1, ra_status_text(st));
    if (st == RA_AGAIN) w->idle = 0;
    if (st == RA_OK) {
        w->idle = 0;
        if (!w->join && small_chance(30)) SOUND(w, ra_step(s->ring, ith) == RA_OK);
        end_pass(w, r);
    } else if (st < 0) {
        fail_pass(w, r, st);
    } else {
        SOUND(w, st == RA_AGAIN || st == RA_WAIT);
    }
}

static int running(const world *w) {
    for (int r = 0; r < w->ranks; r++) if (!w->seat[r].over && r != w->silent) return 1;
    return 0;
}

static void run_world(world *w) {
    int64_t most = 4000000;
    while (running(w) && !w->wrong && !w->net->breaches && w->idle < STUCK && --most > 0)
        step_world(w);
    if (!SOUND(w, w->net->breaches == 0)) printf("    breach: %s\n", w->net->why);
    SOUND(w, w->idle < STUCK && most > 0);
}

static void close_fine(world *w) {
    for (int r = 0; r < w->ranks; r++) {
        seat *s = &w->seat[r];
        if (!s->ring) continue;
        if (!SOUND(w, s->end == RA_OK)) {
            ra_failure f = { 0 };
            (void)ra_ring_failure(s->ring, &f);
            printf("    rank %d: %s: %s\n", r, ra_status_text(s->end),
                   s->begun || f.status ? f.text : ra_ring_error(s->ring)->text);
        }
        if (!w->wrong) check_traffic(w, r);
        if (!w->wrong) net_check_empty(w->net);
        if (w->ranks == 1) SOUND(w, w->net->rank[0].posts + w->net->rank[0].polls == 0);
        if (w->wrong) (void)ra_finish(s->ring, 1);
        SOUND(w, ra_ring_destroy(s->ring) == RA_OK);
        SOUND(w, s->heap.live == 0 && s->heap.wrong == 0);
    }
    net_check_end(w->net);
    if (!w->wrong && !SOUND(w, w->net->breaches == 0)) printf("    breach: %s\n", w->net->why);
    if (w->wrong) h_run.context[0] = 0;
}

static int pick_ranks(void) {
    static const int common[8] = { 1, 2, 3, 4, 5, 6, 7, 8 };
    return small_chance(80) ? common[small_rand(8)] : small_range(9, 16);
}

static int pick_size(int ranks) {
    if (small_chance(60)) return small_range(1, 130);
    if (small_chance(80)) return small_range(1, 64 * (ranks < 5 ? ranks : 5));
    return small_range(1, 200 * (ranks < 6 ? ranks : 6));
}

/* Nothing is wrong: every pass ends and is right. Returns the passes of a rank. */
static int64_t one_fair(h_rng rng, int ranks) {
    net_config c;
    world *w;
    int64_t passes;
    small_seed(rng.state);
    if (!ranks) ranks = pick_ranks();
    random_net(&c, ranks);
    w = make_world(ranks, small_chance(60) ? 1 : small_range(2, PASSES), pick_size(ranks), &c);
    w->patient = 1;
    if (small_chance(10)) {            /* one rank pauses */
        w->stalled = small_range(0, ranks - 1);
        w->stalled_until = small_range(1, 20000);
    }
    if (open_world(w)) run_world(w);
    passes = w->checked;
    close_fine(w);
    free_world(w);
    return passes;
}

TEST(worlds) {
    int64_t worlds = h_run.large ? 20000 : 2000, ran = 0, passes = 0;
    for (int64_t i = 0; i < worlds; i++) {
        if (!h_case(i) || !h_variant(0, (int)(i % 2))) continue;
        passes += one_fair(h_case_rng(i), 0);
        ran++;
    }
    CHECK_EQ(hook_broken, 0);
    printf("%lld worlds, %lld passes of a rank\n", (long long)ran, (long long)passes);
}

/* A transport with one address space that takes few ops at once: used correctly, or refused in
 * time. */
TEST(shared_few_ops) {
    int64_t passes = 0, refusals = 0;
    for (int64_t i = 0; i < 200; i++) {
        net_config c;
        h_rng rng;
        world *w;
        if (!h_case(i)) continue;
        rng = h_case_rng(i);
        small_seed(rng.state);
        random_net(&c, small_range(2, 8));
        c.shared = c.any_peer = 1;
        c.lend = c.lend_sender = 0;
        c.max_ops = i % 10 ? (uint32_t)small_range(2, 12) : 0;
        w = make_world(c.ranks, 1, small_range(1, 300), &c);
        w->patient = w->few_ops = 1;
        if (open_world(w)) run_world(w);
        else refusals++;
        passes += w->checked;
        if (w->seat[c.ranks - 1].ring) close_fine(w);
        else for (int r = 0; r < c.ranks; r++) CHECK_EQ(ra_ring_destroy(w->seat[r].ring), RA_OK);
        free_world(w);
    }
    CHECK(passes > 0 || refusals > 0);
    CHECK_EQ(hook_broken, 0);
}

/* -------------------------------------------------------------------------- after a failure */

/* The first rank that failed met the fault itself. All others may also have been told, or have
 * waited in vain. */
static int64_t unposted, awaited;      /* messages that failures named, by what rings remembered */

static int is_echo(const world *w, ra_status st) {
    if (st == RA_E_ABORTED) return w->net->c.told == 1;
    return st == RA_E_PEER || (st == RA_E_TIMEOUT && w->deadline);
}

/* The events of the ring end with the failure. If they name the message of a chunk, it was posted,
 * unless there was no room for it yet, and has not ended since. */
static void check_events(world *w, const ra_ring *ring, const ra_failure *f) {
    ra_event e[RA_EVENTS + 1];
    const int n = ra_ring_events(ring, e, RA_EVENTS + 1);
    int failed = 0, posted = 0;
    char text[RA_TEXT_BYTES];
    if (!SOUND(w, n > 0 && n <= RA_EVENTS)) return;
    for (int i = 0; i < n; i++) {
        const int post = f->sending == 1 ? RA_EV_POST_SEND : RA_EV_POST_RECV;
        const int end = f->sending == 1 ? RA_EV_SEND : RA_EV_RECV;
        SOUND(w, e[i].rank == f->rank && (i == 0 || e[i].end_ns >= e[i - 1].end_ns));
        SOUND(w, strlen(ra_event_text(&e[i], e[0].end_ns, text)) > 20);
        if (e[i].kind == RA_EV_FAIL) failed = ++i;
        if (failed) break;
        if (f->chunk < 0 || f->sending < 0 || e[i].chunk != f->chunk || e[i].pass != f->pass)
            continue;
        posted += e[i].kind == post && e[i].peer == f->peer && e[i].hop == f->hop;
        SOUND(w, e[i].kind != end);
    }
    if (!SOUND(w, failed)) return;
    SOUND(w, e[failed - 1].status == f->status && e[failed - 1].peer == f->peer);
    SOUND(w, e[failed - 1].chunk == f->chunk && e[failed - 1].pass == f->pass);
    unposted += f->chunk >= 0 && f->sending >= 0 && !posted;
    awaited += f->chunk >= 0 && f->sending >= 0 && posted;
}

static void check_failure(world *w, int r) {
    seat *s = &w->seat[r];
    ra_failure f = { 0 };
    ra_ring_counters c;
    ra_job job = { 0 };
    if (!SOUND(w, ra_ring_failure(s->ring, &f) == RA_OK)) return;
    ra_ring_query(s->ring, &c);
    SOUND(w, c.state == RA_RING_FAILED);
    SOUND(w, f.status == s->end);
    SOUND(w, f.rank == r);
    check_events(w, s->ring, &f);
    SOUND(w, f.pass == s->ran + 1 || f.pass == s->ran);        /* cancelled between passes */
    SOUND(w, f.text[0] != 0 && memchr(f.text, 0, sizeof f.text) != NULL);
    SOUND(w, f.sending >= -1 && f.sending <= 1 && f.peer >= -1 && f.peer < w->ranks);
    SOUND(w, s->trace_failures == 1);
    SOUND(w, ra_step(s->ring, 0) == s->end);
    job.plan = w->plan[0][r];
    job.tensors = &s->part.t;
    SOUND(w, ra_begin(s->ring, &job) == s->end);
    if (w->net->c.bare || w->ranks == 1) return;
    SOUND(w, w->net->rank[r].aborts == 1);
    SOUND(w, w->net->rank[r].why == s->end);
}

/* All ranks have ended, or will not be stepped again: destroys the world. */
static void close_failed(world *w) {
    for (int r = 0; r < w->ranks; r++) {
        seat *s = &w->seat[r];
        net_rank *n = &w->net->rank[r];
        int failed = s->end < 0, under_way = s->begun, unsafe, pending = n->pending;
        ra_status st;
        if (!s->ring) continue;
        w->net->thread = 0;
        if (failed) check_failure(w, r);
        if ((failed && small_chance(80)) || r == w->silent) {
            st = ra_finish(s->ring, RA_NO_DEADLINE);
            SOUND(w, failed ? st == s->end || st == RA_E_UNSAFE : !under_way || st < 0 || w->join);
            if (failed && !w->net->c.bare && w->ranks > 1) SOUND(w, n->quiesces >= 1);
        }
        st = ra_ring_destroy(s->ring);
        unsafe = (w->net->c.unsafe && n->aborts) || (w->net->c.bare && pending);
        if (unsafe) SOUND(w, st == RA_E_UNSAFE);
        else SOUND(w, st == RA_OK || (w->net->c.bare && st == RA_E_UNSAFE));
        if (st == RA_E_UNSAFE) seen[-RA_E_UNSAFE]++;
        if (unsafe && !s->workspace) SOUND(w, s->heap.live > 0);
        if (st == RA_OK) SOUND(w, s->heap.live == 0);
        SOUND(w, s->heap.wrong == 0);
        if (failed && !w->net->c.bare && w->ranks > 1) SOUND(w, n->quiesces >= 1);
        if (w->ranks == 1)
            SOUND(w, n->posts + n->polls + n->aborts + n->quiesces + n->regs == 0);
        s->ring = NULL;
    }
    if (!w->wrong && !SOUND(w, w->net->breaches == 0)) printf("    breach: %s\n", w->net->why);
    if (w->wrong) h_run.context[0] = 0;
}

static void print_ends(const world *w) {
    for (int r = 0; r < w->ranks; r++) {
        ra_failure f = { 0 };
        if (w->seat[r].end < 0) (void)ra_ring_failure(w->seat[r].ring, &f);
        printf("    rank %d: passes %d, %s (peer %d, code %d, %s)\n", r, w->seat[r].pass,
               ra_status_text(w->seat[r].end), f.peer, f.code, f.text);
    }
}

static world *fault_world(h_rng rng, int fewest) {
    net_config c;
    world *w;
    int ranks;
    small_seed(rng.state);
    ranks = small_range(fewest, small_chance(80) ? 5 : 9);
    random_net(&c, ranks);
    c.bare = small_chance(15) && !c.shared;
    c.unsafe = !c.bare && small_chance(10);
    w = make_world(ranks, small_range(1, 2), small_range(1, 150), &c);
    w->net->expect_faults = 1;
    return w;
}

/* A rank that sends, or -1. */
static int some_sender(const world *w, int64_t *messages) {
    int first = small_range(0, w->ranks - 1);
    for (int i = 0; i < w->ranks; i++) {
        int r = (first + i) % w->ranks;
        *messages = 0;
        for (int k = 0; k < w->passes; k++) {
            ra_plan_report p;
            (void)ra_plan_query(w->plan[k][r], r, &p);
            *messages += p.forward.chunks_out;
        }
        if (*messages) *messages += hellos(w, r);
        if (*messages) return r;
    }
    return -1;
}

static int one_of(int x, int a, int b, int c) { return x == a || x == b || x == c; }

/* 1 if rank r may report this because of the fault itself. */
static int fits(const world *w, int r) {
    const net_fault *f = &w->net->c.fault;
    int status = w->seat[r].end, code = f->value == RA_E_PEER ? RA_E_PEER : RA_E_IO;
    int disorder = status == RA_E_MISMATCH || one_of(status, RA_E_PROTO, RA_E_TRUNC, RA_E_PROTO);
    switch (f->kind) {
    case NET_DAMAGE: return one_of(status, RA_E_PROTO, RA_E_MISMATCH, RA_E_PROTO);
    case NET_SHORT: case NET_LONG: case NET_TRUNC: return status == RA_E_TRUNC;
    case NET_DOUBLE: return disorder;
    case NET_STALE: return disorder;
    case NET_STALL: return 0;
    case NET_DROP: case NET_SWAP: return disorder || status == RA_E_PEER;
    case NET_SEND_FAILS: return status == code || (disorder && r != f->rank);
    default: return status == code;
    }
}

static void choose_fault(world *w) {
    static const int codes[3] = { RA_E_IO, RA_E_PEER, -1234 };
    net_fault *f = &w->net->c.fault;
    int64_t messages = 0;
    int kind = small_range(NET_DAMAGE, NET_POLL_FAILS), r = some_sender(w, &messages);
    if (r < 0) return;
    if (w->net->c.shared && kind == NET_DAMAGE) kind = NET_SHORT;
    f->rank = r;
    f->peer = -1;
    f->at = (int64_t)small_rand((uint32_t)messages);
    f->byte = small_range(0, w->checksums ? 1 << 20 : 63);
    f->value = kind == NET_DAMAGE ? 1 << small_rand(8) : small_range(1, 60);
    if (kind == NET_STALL) f->value = small_range(1, WATCHDOG / 8);
    if (kind >= NET_RECV_FAILS) f->value = codes[small_rand(3)];
    f->kind = kind;
}

typedef struct fault_tally {           /* over all worlds of a test */
    int64_t fired[NET_POLL_FAILS + 1], cut, named; /* named: failures that error_text knows */
    int64_t damaged, payload;          /* first failures by damage, behind the frame */
    int64_t calls, awaited;            /* post or poll that failed, while a peer was waited for */
} fault_tally;

static void check_fault(world *w, fault_tally *t) {
    const net_fault *f = &w->net->c.fault;
    ra_failure why = { 0 };
    if (f->fired) t->fired[f->kind]++;
    if (w->wrong) return;
    if (w->first_failed < 0) {
        SOUND(w, !f->fired || one_of(f->kind, NET_DOUBLE, NET_DROP, NET_SWAP) ||
                 f->kind == NET_STALL || w->net->c.shared);
        if (f->fired) SOUND(w, f->kind != NET_DROP || w->net->c.shared);
        return;
    }
    SOUND(w, f->fired > 0);
    SOUND(w, fits(w, w->first_failed));
    (void)ra_ring_failure(w->seat[w->first_failed].ring, &why);
    if (f->kind >= NET_RECV_FAILS && why.status == RA_E_IO) {
        SOUND(w, why.code == f->value);
        t->cut += f->value == -1234;
        t->named += f->value == -1234 && strstr(why.text, "the cable is cut") != NULL;
    }
    if (f->kind >= NET_POST_FAILS && why.code == f->value) {
        t->calls++;
        t->awaited += why.peer >= 0;
        SOUND(w, why.peer != why.rank && (why.peer >= 0) == (why.sending >= 0));
        SOUND(w, (why.peer >= 0) == (strstr(why.text, "ing from rank") != NULL ||
                                     strstr(why.text, "sending to rank") != NULL));
        SOUND(w, why.peer >= 0 || f->at > 0);      /* nothing is left to move */
    }
    if (f->kind == NET_DAMAGE) {
        t->damaged++;
        t->payload += strstr(why.text, "checksum") != NULL;
        SOUND(w, w->checksums || !strstr(why.text, "the checksum"));
    }
    for (int r = 0; r < w->ranks; r++)
        SOUND(w, w->seat[r].end == RA_OK || is_echo(w, w->seat[r].end) || fits(w, r));
}

/* One fault of the network: an error of the right kind where it happens, an end on every rank,
 * never a wrong number. */
static void one_fault(h_rng rng, fault_tally *t) {
    world *w = fault_world(rng, 2);
    if (open_world(w)) {
        choose_fault(w);
        describe(w);
        run_world(w);
    }
    describe(w);
    check_fault(w, t);
    if (w->wrong) print_ends(w);
    close_failed(w);
    free_world(w);
}

TEST(faults) {
    int64_t worlds = h_run.large ? 30000 : 2000;
    static fault_tally t;
    for (int64_t i = 0; i < worlds; i++) if (h_case(i)) one_fault(h_case_rng(i), &t);
    for (int k = NET_DAMAGE; k <= NET_POLL_FAILS && h_run.only_case < 0; k++)
        CHECK(t.fired[k] > 10);
    CHECK_EQ(t.named, t.cut);
    if (h_run.only_case < 0) CHECK(t.payload > 10 && t.damaged - t.payload > 10);
    CHECK(t.awaited >= t.calls * 3 / 4);
    if (h_run.only_case < 0) CHECK(awaited > worlds / 2 && unposted < awaited / 10);
    CHECK_EQ(hook_broken, 0);
}

/* CRC-32C has the values of RFC 3720, appendix B.4, for every way to compute it and for any parts.
 * Any bit that differs gives another one. */
TEST(checksums) {
    enum { MOST = 1 << 18 };
    uint8_t *data = (uint8_t *)calloc(1, MOST + 64);
    if (!data) abort();
    CHECK_EQ(hook_crc(0, "123456789", 9), 0xe3069283u);
    CHECK_EQ(hook_crc(0, data, 32), 0x8a9136aau);
    for (int i = 0; i < 32; i++) data[i] = (uint8_t)i;
    CHECK_EQ(hook_crc(0, data, 32), 0x46dd794eu);
    for (int i = 0; i < MOST + 64; i++) data[i] = (uint8_t)((uint32_t)i * 2654435761u >> 13);
    for (int64_t i = 0; i < 400; i++) {
        h_rng rng = h_case_rng(i);
        int64_t n = i < 200 ? i : h_range(&rng, 0, MOST), cut = h_range(&rng, 0, n);
        const uint8_t *p = data + h_range(&rng, 0, 63);
        uint32_t crc = ~hook_crc_by_table(~0u, p, n);
        uint8_t *bit = data + (p - data) + (n ? h_range(&rng, 0, n - 1) : 0);
        if (!h_case(i)) continue;
        CHECK_EQ(hook_crc(0, p, n), crc);
        CHECK_EQ(hook_crc(hook_crc(0, p, cut), p + cut, n - cut), crc);
        *bit ^= (uint8_t)(1 << i % 8);
        CHECK(!n || hook_crc(0, p, n) != crc);
        *bit ^= (uint8_t)(1 << i % 8);
    }
    free(data);
}

/* Steps the world to a random moment. Returns a rank that is then at work; -1: there is none. */
static int some_moment(world *w) {
    int victim = small_range(0, w->ranks - 1);
    int64_t steps = (int64_t)small_rand(60) * (int64_t)small_rand(40);
    while (running(w) && !w->wrong && !w->net->breaches && steps-- > 0) step_world(w);
    return w->seat[victim].over ? -1 : victim;
}

static int hellos_left(const world *w, int r) {
    const int64_t *n = w->net->rank[r].hellos, all = hellos(w, r);
    return n[0] < all || n[1] < all;
}

static void check_silence(world *w) {
    const seat *s = &w->seat[w->first_failed];
    ra_failure f = { 0 };
    (void)ra_ring_failure(s->ring, &f);
    SOUND(w, s->end == RA_E_PEER || (s->end == RA_E_TIMEOUT && w->deadline));
    if (f.peer >= 0 || s->end == RA_E_PEER) {
        SOUND(w, f.sending == 0 || f.sending == 1);
        SOUND(w, f.peer >= 0 && f.peer != w->first_failed);
        if (!w->net->c.shared)             /* a hello is no chunk */
            SOUND(w, (f.chunk >= 0 || hellos_left(w, w->first_failed)) &&
                     (net_is_neighbour(w->net, f.peer, w->first_failed) || s->back));
        if (w->ranks == 2) SOUND(w, f.peer == w->silent);
    }
    if (s->end == RA_E_PEER) SOUND(w, f.since_progress_ns >= WATCHDOG || w->net->dead >= 0);
    if (w->net->dead >= 0) SOUND(w, f.peer == w->net->dead || s->end == RA_E_TIMEOUT);
    for (int r = 0; r < w->ranks; r++)
        SOUND(w, w->seat[r].end == RA_OK || is_echo(w, w->seat[r].end));
}

/* A rank stops coming. The ranks that wait for it report it: by the watchdog, earlier by a
 * deadline, or immediately if the transport knows that it is dead. tally: how many ranks the
 * watchdog or such a notice ended, and how many a deadline. */
static void one_silence(h_rng rng, int told, int64_t tally[2]) {
    world *w = fault_world(rng, 2);
    if (open_world(w)) {
        w->silent = some_moment(w);
        if (told && w->silent >= 0) {
            w->net->dead = w->silent;
            net_log(w->net, "rank %d is dead\n", w->silent);
        }
        if (small_chance(30)) w->deadline = w->net->now + small_range(1, WATCHDOG);
        run_world(w);
    }
    if (w->first_failed >= 0 && !w->wrong) {
        tally[w->seat[w->first_failed].end == RA_E_TIMEOUT]++;
        check_silence(w);
    }
    if (w->wrong) print_ends(w);
    close_failed(w);
    free_world(w);
}

TEST(silence) {
    int64_t worlds = h_run.large ? 10000 : 400, tally[2] = { 0, 0 };
    for (int64_t i = 0; i < worlds; i++) if (h_case(i)) one_silence(h_case_rng(i), 0, tally);
    if (h_run.only_case < 0) CHECK(tally[0] > 20 && tally[1] > 5);
    CHECK_EQ(hook_broken, 0);
}

TEST(notified_deaths) {
    int64_t worlds = h_run.large ? 10000 : 400, tally[2] = { 0, 0 };
    for (int64_t i = 0; i < worlds; i++) if (h_case(i)) one_silence(h_case_rng(i), 1, tally);
    if (h_run.only_case < 0) CHECK(tally[0] > 20);
    CHECK_EQ(hook_broken, 0);
}

/* Returns 1 if cancelling ended the pass of the rank that did it. */
static int one_cancel(h_rng rng) {
    world *w = fault_world(rng, 1);
    int victim = -1, cancelled = 0;
    if (open_world(w)) {
        victim = some_moment(w);
        if (victim >= 0) {
            net_log(w->net, "rank %d cancels\n", victim);
            ra_ring_cancel(w->seat[victim].ring);
        }
        run_world(w);
    }
    if (victim >= 0 && w->seat[victim].end < 0 && !w->wrong) {
        cancelled = 1;
        SOUND(w, w->seat[victim].end == RA_E_CANCELLED || w->seat[victim].end == RA_E_PEER);
        SOUND(w, w->first_failed != victim || w->seat[victim].end == RA_E_CANCELLED);
        for (int r = 0; r < w->ranks; r++)
            SOUND(w, w->seat[r].end == RA_OK || r == victim || is_echo(w, w->seat[r].end));
    }
    if (w->wrong) print_ends(w);
    close_failed(w);
    free_world(w);
    return cancelled;
}

TEST(cancel) {
    int64_t worlds = h_run.large ? 10000 : 400, cancelled = 0;
    for (int64_t i = 0; i < worlds; i++) if (h_case(i)) cancelled += one_cancel(h_case_rng(i));
    if (h_run.only_case < 0) CHECK(cancelled > 50);
    CHECK_EQ(hook_broken, 0);
}

/* A fault of the network, and then a rank that stops coming, dies or cancels: all passes end, each
 * for a reason that one of the two explains, and what ended well is right. */
static void one_of_both(h_rng rng) {
    world *w = fault_world(rng, 2);
    if (open_world(w)) {
        int victim, how = small_range(0, 2);
        choose_fault(w);
        victim = some_moment(w);
        if (how == 2 && victim >= 0) ra_ring_cancel(w->seat[victim].ring);
        else w->silent = victim;
        if (how == 1) w->net->dead = victim;
        if (small_chance(30)) w->deadline = w->net->now + small_range(1, WATCHDOG);
        describe(w);
        run_world(w);
        for (int r = 0; r < w->ranks; r++) {
            int end = w->seat[r].end;
            SOUND(w, end == RA_OK || is_echo(w, end) || fits(w, r) ||
                     (r == victim && end == RA_E_CANCELLED));
        }
    }
    if (w->wrong) print_ends(w);
    close_failed(w);
    free_world(w);
}

/* -------------------------------------------------------------------------- ranks that differ */

enum {
    DIFF_SCALE, DIFF_SOFTCAP, DIFF_SINKS, DIFF_O_DTYPE, DIFF_WINDOW, DIFF_WINDOW_RIGHT, DIFF_KEEP,
    DIFF_INTERVALS, DIFF_INTERVAL_COUNT, DIFF_TOKENS_OF, DIFF_CHUNK, DIFF_BUFFERS, DIFF_WEIGHTS,
    DIFF_COLUMN, DIFF_DOCUMENTS, DIFF_DOC_COUNT, DIFF_SEQUENCES, DIFF_KV_TOKENS, DIFF_Q_OFFSET,
    DIFF_CAUSAL, DIFF_CAUSAL_BLOCK, DIFF_PREFIX, DIFF_Q_RUNS, DIFF_KV_TOKENS_OF, DIFF_Q_DTYPE,
    DIFF_Q_HEADS, DIFF_LAYOUT, DIFF_ALIBI, DIFF_SINK, DIFF_FACTORS, DIFF_SEED, DIFF_ORDER,
    DIFF_ARITH, DIFF_ISA, DIFF_THREADS, DIFFS
};

static int diff_named, diff_seen;

/* What the text of the failure must say. In one case of 256 a byte of hash is equal by chance. */
static const char *const diff_text[DIFFS] = {
    ": scale", ": scale", ": scale", ": dtypes", ": mask", ": mask", ": mask", ": mask", ": mask",
    ": sizes", ": chunk_tokens", ": chunk_tokens", ": layout", ": sizes", ": mask", ": mask",
    ": sizes", ": sizes", ": sizes", ": mask", ": mask", ": mask", ": layout", ": sizes",
    ": dtypes", ": sizes", ": layout", ": scale", ": scale", ": scale", ": forward or backward",
    ": chunk_tokens", ": dtypes or arith", "", ""
};

/* A problem in which every rank sends something to every other rank. The number and length of
 * messages do not depend on what is changed below. */
static void agree(small *s, int ranks, int diff) {
    static const int shape[4] = { 2, 1, 4, 4 };
    problem *p = &s->p;
    const int64_t n = small_range(3, 20), tokens = n * ranks;
    small_plain(s, ranks, tokens, shape);
    if (diff == DIFF_TOKENS_OF || diff == DIFF_KV_TOKENS_OF) p->B = 2;
    p->tq[1] = tokens - (diff == DIFF_TOKENS_OF);
    p->tk[1] = tokens;
    if (diff == DIFF_CAUSAL_BLOCK || diff == DIFF_PREFIX) p->mask.kind = RA_MASK_CAUSAL;
    if (diff == DIFF_CAUSAL_BLOCK || diff == DIFF_PREFIX || diff == DIFF_CAUSAL)
        s->s.layout = RA_LAYOUT_STRIPED;
    if (diff == DIFF_COLUMN) { p->v_in_k = 1; p->Dv = 2; }
    if (diff == DIFF_KEEP) { p->mask.window = tokens; p->mask.keep = 1; }
    if (diff == DIFF_INTERVALS || diff == DIFF_INTERVAL_COUNT) {
        p->mask.kind = RA_MASK_INTERVALS;
        p->lo = (int32_t *)small_memory((size_t)(tokens + 1) * 4);
        p->hi = (int32_t *)small_memory((size_t)(tokens + 1) * 4);
        for (int64_t i = 0; i <= tokens; i++) { p->lo[i] = 0; p->hi[i] = (int32_t)tokens; }
        p->mask.lo = p->lo;
        p->mask.hi = p->hi;
        p->mask.interval_count = tokens;
    }
    if (diff == DIFF_DOCUMENTS) {
        p->docs[1] = 1;
        p->mask.doc_first = p->docs;
        p->mask.doc_count = 2;
    }
    if (diff == DIFF_Q_RUNS) {
        s->s.layout = RA_LAYOUT_RUNS;
        s->s.q_runs = (ra_run *)calloc((size_t)ranks, sizeof(ra_run));
        s->s.k_runs = (ra_run *)calloc((size_t)ranks, sizeof(ra_run));
        for (int r = 0; r < ranks; r++) {
            s->s.q_runs[r].first = s->s.k_runs[r].first = r * n;
            s->s.q_runs[r].count = s->s.k_runs[r].count = n;
            s->s.q_run_count[r] = s->s.k_run_count[r] = 1;
        }
    }
    p->scores = diff == DIFF_ALIBI ? RA_SCORE_ALIBI : diff == DIFF_SINK ? RA_SCORE_SINKS :
                diff == DIFF_FACTORS ? RA_SCORE_BIAS | RA_SCORE_FACTORS : 0;
    small_data(s);
    if (diff == DIFF_SEED) small_train(s, 1);
    if (diff == DIFF_SEED) p->dropout = 0.25f;
    small_desc(s);
    if (diff == DIFF_SEQUENCES) s->d.sequences = 0;
    if (diff == DIFF_KV_TOKENS) s->d.kv_tokens = 0;
    if (diff == DIFF_KV_TOKENS_OF) s->d.tokens_of = s->d.kv_tokens_of = NULL;
    if (diff == DIFF_TOKENS_OF) s->d.kv_tokens_of = NULL;
}

/* What the differing rank has instead. x: room for its own arrays. */
static void disagree(small *x, int diff) {
    static ra_run runs[NET_RANKS];
    ra_desc *d = &x->d;
    switch (diff) {
    case DIFF_SCALE: d->scale = 0.5000001f; break;
    case DIFF_SOFTCAP: d->softcap = 30; break;
    case DIFF_SINKS: d->scores = x->p.scores = RA_SCORE_SINKS; break;
    case DIFF_O_DTYPE: d->o_dtype = RA_BF16; break;
    case DIFF_WINDOW: d->mask.window = d->tokens + 1; break;
    case DIFF_WINDOW_RIGHT: d->mask.right_limit = d->tokens + 1; break;
    case DIFF_KEEP: d->mask.keep = 2; break;
    case DIFF_INTERVALS: {
        int32_t *lo = (int32_t *)small_memory((size_t)(d->tokens + 1) * 4);
        memcpy(lo, x->p.lo, (size_t)(d->tokens + 1) * 4);
        lo[small_rand((uint32_t)d->tokens)] = 1;
        d->mask.lo = x->p.lo = lo;
        break;
    }
    case DIFF_INTERVAL_COUNT: d->mask.interval_count++; break;
    case DIFF_TOKENS_OF: --x->p.tq[1]; d->tokens_of = x->p.tq; break;
    case DIFF_KV_TOKENS_OF: d->kv_tokens_of = x->p.tk; break;
    case DIFF_CHUNK: d->chunk_tokens = 128; break;
    case DIFF_BUFFERS: d->buffers = 3; break;
    case DIFF_WEIGHTS:
        for (int r = 0; r < d->ranks; r++) x->s.weights[r] = 1;
        d->layout.weights = x->s.weights;
        break;
    case DIFF_COLUMN: d->v_column = 2; break;
    case DIFF_DOCUMENTS: x->p.docs[1] = 2; d->mask.doc_first = x->p.docs; break;
    case DIFF_DOC_COUNT: d->mask.doc_first = x->p.docs; d->mask.doc_count = 1; break;
    case DIFF_SEQUENCES: d->sequences = 1; break;
    case DIFF_KV_TOKENS: d->kv_tokens = d->tokens; break;
    case DIFF_Q_OFFSET: d->q_offset = 1; break;
    case DIFF_CAUSAL: d->mask.kind = RA_MASK_CAUSAL; break;
    case DIFF_CAUSAL_BLOCK: d->mask.causal_block = 1; break;
    case DIFF_PREFIX: d->mask.prefix = 1; break;
    case DIFF_Q_RUNS:
        memcpy(runs, x->s.k_runs, (size_t)d->ranks * sizeof *runs);
        runs[0] = x->s.k_runs[1];
        runs[1] = x->s.k_runs[0];
        d->layout.q_runs = runs;
        break;
    case DIFF_Q_DTYPE: d->q_dtype = RA_BF16; break;
    case DIFF_Q_HEADS: d->q_heads = 1; break;
    case DIFF_LAYOUT: d->layout.kind = RA_LAYOUT_STRIPED; break;
    case DIFF_ORDER: d->order = RA_ORDER_ROUNDS; break;
    case DIFF_ARITH: d->arith = RA_ARITH_BF16; break;
    case DIFF_ISA: d->isa = RA_ISA_SCALAR; break;
    case DIFF_THREADS: d->threads = 7; break;
    default: break;
    }
}

/* One descriptor field differs on one rank: RA_E_MISMATCH for every field, unless it is local. */
static void one_difference(int64_t i) {
    h_rng rng = h_case_rng(i);
    int diff = (int)(i % DIFFS), local = diff == DIFF_ISA || diff == DIFF_THREADS, ranks, odd;
    small *x = (small *)calloc(1, sizeof *x);
    net_config c;
    world *w;
    ra_plan *plan = NULL;
    static const float other[2] = { 0.5f, 0.25f };
    if (!x) abort();
    small_seed(rng.state);
    ranks = small_range(2, 5);
    odd = small_range(0, ranks - 1);
    random_net(&c, ranks);
    c.train = diff == DIFF_SEED;
    if (c.train && c.max_ops < 3) c.max_ops = 3;
    w = make_world(ranks, 1, 2, &c);
    small_free(&w->problem[0]);
    agree(&w->problem[0], ranks, diff);
    w->threads = 1;
    w->net->expect_faults = 1;
    *x = w->problem[0];
    disagree(x, diff);
    x->d.rank = odd;
    describe(w);
    h_more(" | difference %d on rank %d", diff, odd);
    if (make_plans(w, 0) && SOUND(w, ra_plan_create(&plan, &x->d, NULL) == RA_OK)) {
        ra_plan_destroy(w->plan[0][odd]);
        w->plan[0][odd] = plan;
        part_make(&w->seat[odd].part, &x->p, &x->s, plan, odd);
        if (diff == DIFF_ALIBI) w->seat[odd].part.t.alibi = other;
        if (diff == DIFF_SINK) w->seat[odd].part.t.sinks = other;
        if (diff == DIFF_FACTORS) w->seat[odd].part.t.bias_factors = other;
        if (diff == DIFF_SEED) w->seat[odd].part.t.seed++;
        for (int r = 0; r < ranks; r++) (void)make_ring(w, r);
        run_world(w);
    }
    if (!w->wrong && local) SOUND(w, w->first_failed < 0);
    if (!w->wrong && !local && SOUND(w, w->first_failed >= 0)) {
        ra_failure f = { 0 };
        (void)ra_ring_failure(w->seat[w->first_failed].ring, &f);
        SOUND(w, f.status == RA_E_MISMATCH);
        SOUND(w, strstr(f.text, diff_text[diff]) || strstr(f.text, "value;"));
        SOUND(w, !strchr(f.text, '?'));
        diff_named += strstr(f.text, diff_text[diff]) != NULL;
        diff_seen++;
        SOUND(w, (w->first_failed == odd) != (f.peer == odd));
        for (int r = 0; r < ranks; r++)
            SOUND(w, w->seat[r].end == RA_E_MISMATCH || is_echo(w, w->seat[r].end) ||
                     (w->seat[r].end == RA_OK && r != odd));
    }
    if (w->wrong) print_ends(w);
    close_failed(w);
    if (x->p.lo != w->problem[0].p.lo) free(x->p.lo);
    free(x);
    free_world(w);
}

TEST(differences) {
    for (int64_t i = 0; i < (h_run.large ? 100 : 12) * DIFFS; i++) if (h_case(i)) one_difference(i);
    CHECK(diff_named >= diff_seen * 15 / 16);
    CHECK_EQ(hook_broken, 0);
}

/* Differences that change who sends what, and how long messages are. */
enum { ROUTE_WINDOW, ROUTE_LAYOUT, ROUTE_CHUNK, ROUTE_MASK, ROUTE_DTYPE, ROUTE_TOKENS, ROUTE_HEADS,
       ROUTES };
static const char *const route_text[ROUTES] = { ": mask", ": layout", ": chunk_tokens", ": mask",
                                                ": dtypes", ": sizes", ": sizes" };

static void route_make(small *s, int ranks, int other) {
    const int shape[4] = { 2, other == ROUTE_HEADS ? 2 : 1, 4, 4 };
    const int32_t keys = other == ROUTE_DTYPE ? RA_BF16 : RA_F32;
    small_plain(s, ranks, 140 * ranks - (other == ROUTE_TOKENS ? 70 : 0), shape);
    problem_dtypes(&s->p, RA_F32, keys, keys, RA_F32);
    s->p.mask.kind = other == ROUTE_MASK ? RA_MASK_NONE : RA_MASK_CAUSAL;
    if (other == ROUTE_WINDOW) s->p.mask.window = 8;
    s->s.chunk_tokens = other == ROUTE_CHUNK ? 128 : 64;
    if (other == ROUTE_LAYOUT) s->s.layout = RA_LAYOUT_ZIGZAG;
    small_data(s);
    small_desc(s);
}

/* One rank has another plan. It and the rank after it report in what it differs from the rank
 * before; the others learn that they have stopped. No time passes: there is neither a deadline nor
 * a watchdog. With LENT every send of a chunk waits for its release, which a rank that has stopped
 * never gives. */
enum { ROUTE_DRAWN, ROUTE_SHARED, ROUTE_LENT, ROUTE_WAYS };
static void one_route(h_rng rng, int ranks, int odd, int other, int way) {
    small *x = (small *)calloc(1, sizeof *x);
    net_config c;
    world *w;
    if (!x) abort();
    small_seed(rng.state);
    random_net(&c, ranks);
    c.told = 2;
    c.shared = way == ROUTE_SHARED;
    c.train = 0;
    if (way == ROUTE_LENT) {
        c.lend = c.capacity = 0;
        c.lend_sender = 100;
    }
    if (c.shared) {
        c.any_peer = 1;
        c.lend = c.lend_sender = 0;
        c.max_ops = 64;
    }
    w = make_world(ranks, 1, 2, &c);
    small_free(&w->problem[0]);
    route_make(&w->problem[0], ranks, -1);
    route_make(x, ranks, other);
    x->d.rank = odd;
    w->threads = w->patient = 1;
    w->net->expect_faults = 1;
    describe(w);
    h_more(" | route %d of rank %d", other, odd);
    if (make_plans(w, 0)) {
        ra_plan_destroy(w->plan[0][odd]);
        SOUND(w, ra_plan_create(&w->plan[0][odd], &x->d, NULL) == RA_OK);
        part_make(&w->seat[odd].part, &x->p, &x->s, w->plan[0][odd], odd);
        for (int r = 0; r < ranks; r++) (void)make_ring(w, r);
        run_world(w);
    }
    for (int r = 0; r < ranks && !w->wrong; r++) {
        ra_failure f = { 0 };
        if (r != odd && r != (odd + 1) % ranks) {
            SOUND(w, w->seat[r].end == RA_OK || is_echo(w, w->seat[r].end));
            continue;
        }
        (void)ra_ring_failure(w->seat[r].ring, &f);
        SOUND(w, f.status == RA_E_MISMATCH && w->seat[r].end == RA_E_MISMATCH);
        SOUND(w, strstr(f.text, route_text[other]) || strstr(f.text, "value;"));
        SOUND(w, f.peer == (r + ranks - 1) % ranks && f.sending == 0 && f.chunk == -1);
        diff_named += strstr(f.text, route_text[other]) != NULL;
        diff_seen++;
    }
    if (w->wrong) print_ends(w);
    close_failed(w);
    small_free(x);
    free(x);
    free_world(w);
}

TEST(differing_routes) {
    static const int worlds[3] = { 2, 3, 5 };
    int64_t i = 0;
    diff_named = diff_seen = 0;
    for (int again = 0; again < (h_run.large ? 20 : 1); again++)
        for (int way = 0; way < ROUTE_WAYS; way++)
            for (int other = 0; other < ROUTES; other++)
                for (int odd = 0; odd < 5; odd++)
                    for (int w = 0; w < 3; w++, i++)
                        if (odd < worlds[w] && h_case(i))
                            one_route(h_case_rng(i), worlds[w], odd, other, way);
    CHECK(diff_named >= diff_seen * 15 / 16);
    CHECK_EQ(hook_broken, 0);
}

/* -------------------------------------------------------------------------- caches
 * Sharded caches on the same network: keys or queries that travel, one exchange or two. What ends
 * well on a rank has the bits of one rank, also if something fails elsewhere. */
enum { CACHE_B = 3, CACHE_KV = 230, CACHE_DIM = 16, CACHE_ROW = 4 * CACHE_DIM, CACHE_CALLS = 3,
       CACHE_ROWS = CACHE_B * CACHE_KV, CACHE_LANES = 48 };

typedef struct cache_seat {
    ra_cache *c;
    ra_tensors t;
    float kv[CACHE_B * CACHE_LANES * 16 * CACHE_ROW / 2];
    float q[CACHE_ROWS * CACHE_ROW], o[CACHE_ROWS * CACHE_ROW];
    ra_status end;
} cache_seat;

typedef struct cache_world {
    net *net;
    ra_desc d;
    ra_cache_desc cd;
    int64_t cached[CACHE_B], fresh[CACHE_B];
    float kv[CACHE_ROWS * CACHE_ROW / 2], q[CACHE_ROWS * CACHE_ROW], o[CACHE_ROWS * CACHE_ROW];
    cache_seat *seat;                  /* [ranks] */
    int ranks, merges, keys, wrong;
    uint32_t tick_ns;                  /* a step takes less */
} cache_world;

enum { CACHE_QUERIES, CACHE_OUTPUTS, CACHE_COMPARE };

/* Between the rows of this call on a rank and those of all, by position. */
static void cache_rows(cache_world *w, cache_seat *s, int what) {
    const int all = w->cd.queries == RA_QUERIES_ALL || what == CACHE_OUTPUTS;
    for (int32_t b = 0; b < w->d.sequences; b++) {
        int64_t row = (int64_t)b * CACHE_KV;
        for (int64_t p = w->cached[b]; p < w->cached[b] + w->fresh[b]; p++) {
            float *whole = w->o + (b * CACHE_KV + p) * CACHE_ROW, *o = s->o + row * CACHE_ROW;
            const float *q = w->q + (b * CACHE_KV + p) * CACHE_ROW;
            if (!all && ra_cache_owner(s->c, p) != s - w->seat) continue;
            if (what == CACHE_QUERIES) memcpy(s->q + row * CACHE_ROW, q, CACHE_ROW * 4);
            else if (what == CACHE_OUTPUTS) memcpy(whole, o, CACHE_ROW * 4);
            else SOUND(w, !memcmp(o, whole, CACHE_ROW * 4));
            row++;
        }
    }
}

/* A cache of a rank with all its keys; net null: of one rank. */
static void cache_open(cache_world *w, cache_seat *s, int rank, const ra_transport *t) {
    const int64_t stride = CACHE_KV * CACHE_ROW * 4;
    ra_desc d = w->d;
    ra_error why = { 0 };
    memset(s, 0, sizeof *s);
    d.error = &why;
    d.ranks = t ? w->ranks : 1;
    d.rank = t ? rank : 0;
    if (!SOUND(w, ra_cache_create(&s->c, &d, t, &w->cd) == RA_OK))
        printf("    refused: %s: %s\n", why.field, why.text);
    s->t.k.data = s->t.v.data = s->kv;
    s->t.q.data = s->q;
    s->t.o.data = s->o;
    s->t.q.batch_stride = s->t.o.batch_stride = stride;
    for (int64_t i = 0; s->c && i < (int64_t)w->d.sequences * CACHE_KV; i++) {
        const float *kv = w->kv + i * CACHE_ROW / 2;
        SOUND(w, !ra_cache_store(s->c, &s->t, (int32_t)(i / CACHE_KV), i % CACHE_KV, kv, kv));
    }
}

static void cache_random(cache_world *w) {
    static const int ranks[] = { 2, 3, 4, 4, 5, 8, 8, 16 };
    net_config c;
    memset(w, 0, sizeof *w);
    w->ranks = ranks[small_rand(8)];
    w->tick_ns = small_chance(50) ? 100000 : 1000;     /* polls may wait for 200000 */
    small_net(&c, w->ranks);
    small_net_limits(&c);
    c.told = 1 + (int)small_rand(2);
    c.any_peer = 1;
    c.max_ops = small_chance(40) ? 0 : (uint32_t)small_range(2, 40);
    c.reg = (int)small_rand(3);
    w->d = ra_desc_make(4, 2, CACHE_DIM, RA_F32, RA_MASK_CAUSAL);
    w->d.sequences = small_range(1, CACHE_B);
    w->d.tokens = small_chance(50) ? small_range(1, 12) : 90;
    w->d.kv_tokens = CACHE_KV;
    w->d.threads = small_range(1, 3);
    if (small_chance(60)) w->d.rates.flops_per_s = w->d.rates.link_bytes_per_s = 1e12;
    w->cd.queries = small_chance(60) ? RA_QUERIES_ALL : RA_QUERIES_OWN;
    w->cd.travel = (int32_t)small_rand(4);
    if (w->cd.queries && w->cd.travel == RA_INFER_PASS_KV) w->cd.travel = RA_INFER_MERGE;
    w->cd.checksums = small_chance(50);
    w->cd.lanes = small_chance(70) ? w->ranks * small_range(1, 3) : w->ranks + small_range(0, 9);
    w->net = net_create(&c);
    w->seat = (cache_seat *)calloc((size_t)w->ranks, sizeof *w->seat);
    if (!w->seat) abort();
    for (int i = 0; i < CACHE_ROWS * CACHE_ROW; i++) w->q[i] = small_float();
    for (int i = 0; i < CACHE_ROWS * CACHE_ROW / 2; i++) w->kv[i] = small_float();
    h_context("P %d lanes %d queries %d travel %d B %d tokens %lld checksums %d told %d ops %u",
              w->ranks, w->cd.lanes, w->cd.queries, w->cd.travel, w->d.sequences,
              (long long)w->d.tokens, w->cd.checksums, c.told, c.max_ops);
}

/* Steps random threads of random ranks until all calls have ended. If nothing happens for long, a
 * message was lost: then rank 0 is cancelled, and if the others do not learn of it so are they. */
static void cache_step_all(cache_world *w) {
    int left = w->ranks, idle = 0;
    while (left && SOUND(w, idle < 2 * STUCK)) {
        cache_seat *s = &w->seat[small_rand((uint32_t)w->ranks)];
        const int ith = (int)small_rand((uint32_t)w->d.threads);
        if (s->end <= 0) continue;
        w->net->now++;
        w->net->thread = ith;
        hook_now_ns += small_rand(w->tick_ns);
        if (++idle == STUCK && SOUND(w, w->net->expect_faults))
            for (int i = 0; i < (w->net->c.told == 1 ? 1 : w->ranks); i++)
                ra_infer_cancel(w->seat[i].c);
        s->end = ra_infer_step(s->c, ith);
        if (s->end != RA_WAIT) idle = idle < STUCK ? 0 : idle;
        left -= s->end <= 0;
    }
}

/* One call of all ranks. 1: it ended well on all. */
static int cache_call(cache_world *w, cache_seat *one) {
    int fine = 1;
    for (int32_t b = 0; b < w->d.sequences; b++) {
        w->fresh[b] = small_chance(20) ? 0 : small_range(1, (int)w->d.tokens);
        w->cached[b] = small_range(0, CACHE_KV - (int)w->fresh[b]);
    }
    for (int i = -1; i < w->ranks && !w->wrong; i++) {
        cache_seat *s = i < 0 ? one : &w->seat[i];
        ra_infer_report report;
        memset(s->o, 0xff, sizeof s->o);
        if (i < 0) memcpy(s->q, w->q, sizeof s->q);
        for (int32_t b = 0; i < 0 && b < w->d.sequences; b++)
            memcpy(s->q + b * CACHE_KV * CACHE_ROW,
                   w->q + (b * CACHE_KV + w->cached[b]) * CACHE_ROW,
                   (size_t)w->fresh[b] * CACHE_ROW * 4);
        if (i < 0) SOUND(w, !ra_infer(s->c, &s->t, w->cached, w->fresh, 0));
        if (i < 0) cache_rows(w, s, CACHE_OUTPUTS);
        if (i < 0) continue;
        cache_rows(w, s, CACHE_QUERIES);
        SOUND(w, !ra_infer_query(s->c, w->cached, w->fresh, &report));
        w->merges += report.travel == RA_INFER_MERGE;
        w->keys += report.travel == RA_INFER_PASS_KV;
        s->end = ra_infer_begin(s->c, &s->t, w->cached, w->fresh, 0);
        SOUND(w, s->end == RA_OK);
        s->end = RA_WAIT;
    }
    if (!w->wrong) cache_step_all(w);
    for (int i = 0; i < w->ranks && !w->wrong; i++) {
        fine &= w->seat[i].end == RA_OK;
        if (w->seat[i].end == RA_OK) cache_rows(w, &w->seat[i], CACHE_COMPARE);
        else SOUND(w, ra_cache_error(w->seat[i].c)->status == w->seat[i].end);
    }
    return fine && !w->wrong;
}

/* Something that caches notice: a frame is damaged, a length differs, a message is lost, doubled,
 * late or old, or the network fails. */
static void cache_fault(net_fault *f, int ranks, int checksums) {
    static const int kinds[] = { NET_DAMAGE, NET_SHORT, NET_LONG, NET_TRUNC, NET_DOUBLE, NET_DROP,
                                 NET_SWAP, NET_STALE, NET_RECV_FAILS, NET_SEND_FAILS,
                                 NET_POST_FAILS, NET_POLL_FAILS };
    f->kind = kinds[small_rand(12)];
    f->rank = (int)small_rand((uint32_t)ranks);
    f->at = (int64_t)small_rand(small_chance(50) ? 5 : 60);
    f->byte = small_range(0, checksums ? 1 << 20 : 63);
    f->value = f->kind == NET_DAMAGE ? 1 << small_rand(8) : f->kind <= NET_LONG ? 8 : RA_E_IO;
}

/* Returns the calls that ended well. */
static int one_cache(h_rng rng, int faulty, int64_t tally[2]) {
    static cache_world w;
    static cache_seat one;
    int calls = 0;
    small_seed(rng.state);
    cache_random(&w);
    if (faulty) cache_fault(&w.net->c.fault, w.ranks, w.cd.checksums);
    w.net->expect_faults = faulty;
    hook_now_ns = 1000000000;
    cache_open(&w, &one, 0, NULL);
    for (int i = 0; i < w.ranks; i++)
        cache_open(&w, &w.seat[i], i, &w.net->rank[i].transport);
    while (!w.wrong && calls < CACHE_CALLS && cache_call(&w, &one)) calls++;
    if (!faulty) SOUND(&w, w.wrong || calls == CACHE_CALLS);
    if (!faulty && !w.wrong) net_check_empty(w.net);
    for (int i = 0; i < w.ranks && !w.wrong; i++)
        SOUND(&w, ra_cache_destroy(w.seat[i].c) == RA_OK);
    SOUND(&w, ra_cache_destroy(one.c) == RA_OK);
    if (!w.wrong) net_check_end(w.net);
    if (!SOUND(&w, !w.net->breaches)) printf("    %s\n", w.net->why);
    tally[0] += w.merges;
    tally[1] += w.keys;
    free(w.seat);
    net_destroy(w.net);
    hook_now_ns = 0;
    return calls;
}

TEST(caches) {
    int64_t tally[2] = { 0, 0 }, calls = 0;
    for (int64_t i = 0; i < (h_run.large ? 4000 : 300); i++)
        if (h_case(i)) calls += one_cache(h_case_rng(i), (int)(i % 2), tally);
    if (h_run.only_case < 0) CHECK(tally[0] > 100 && tally[1] > 100);
    printf("%lld calls, %lld of a rank by MERGE, %lld by PASS_KV\n", (long long)calls,
           (long long)tally[0], (long long)tally[1]);
}

static int (*poll_of_world)(void *ctx, ra_transport_op *const *ops, int n);
static int64_t polls;
static int counted_poll(void *ctx, ra_transport_op *const *ops, int n) {
    polls++;
    return poll_of_world(ctx, ops, n);
}

/* Polls of two ranks that decode a token of each of 40 sequences, one a step, which takes so long
 * on the library's clock. ith: 1: a thread that does not compute makes a step before each. */
static int64_t polls_of_call(int64_t step_ns, int ith) {
    enum { B = 40, KV = 64 };
    static float kv[B * KV * CACHE_ROW / 2], q[B * CACHE_ROW], o[2][B * CACHE_ROW];
    int64_t cached[B], fresh[B];
    ra_world *both = hook_world(2);
    ra_cache *c[2] = { NULL, NULL };
    ra_status end[2] = { RA_WAIT, RA_WAIT };
    hook_now_ns = 1000000000;
    polls = 0;
    for (int b = 0; b < B; b++) {
        cached[b] = KV - 1;
        fresh[b] = 1;
    }
    for (int r = 0; r < 2; r++) {
        ra_desc d = ra_desc_make(4, 2, CACHE_DIM, RA_F32, RA_MASK_CAUSAL);
        ra_transport tp = *ra_world_transport(both, r);
        ra_cache_desc cd = { 0 };
        ra_tensors t = { 0 };
        poll_of_world = tp.poll;
        tp.poll = counted_poll;
        tp.caps &= ~(uint32_t)RA_CAP_SHARED;
        d.sequences = B;
        d.tokens = 1;
        d.kv_tokens = KV;
        d.ranks = 2;
        d.rank = r;
        cd.queries = RA_QUERIES_ALL;
        t.q.data = q; t.k.data = kv; t.v.data = kv; t.o.data = o[r];
        CHECK_EQ(ra_cache_create(&c[r], &d, &tp, &cd), RA_OK);
        CHECK_EQ(ra_infer_begin(c[r], &t, cached, fresh, 0), RA_OK);
    }
    for (int i = 0; end[0] > 0 || end[1] > 0; i++, hook_now_ns += step_ns)
        if (end[i % 2] > 0) {
            if (ith) (void)ra_infer_step(c[i % 2], ith);
            end[i % 2] = ra_infer_step(c[i % 2], 0);
        }
    for (int r = 0; r < 2; r++) CHECK(!end[r] && !ra_cache_destroy(c[r]));
    ra_world_destroy(both);
    hook_now_ns = 0;
    return polls;
}

TEST(caches_poll_between_portions) {
    CHECK(polls_of_call(1000, 0) <= 24);
    CHECK(polls_of_call(1000000, 0) >= 2 * 40);
    CHECK(polls_of_call(1000, 1) >= 2 * 40);
}

/* -------------------------------------------------------------------------- seeds */

/* What a seed means depends only on the seed. Returns 1 if something was wrong. */
static int one_seed(int64_t seed) {
    static fault_tally faults;
    static int64_t tally[2];
    h_rng rng = h_case_rng(seed);
    int bad = h_run.bad, kind = (int)h_range(&rng, 0, 999);
    if (kind < 3) (void)one_fair(rng, (int)h_range(&rng, 17, NET_RANKS));
    else if (kind < 300) (void)one_fair(rng, 0);
    else if (kind < 600) one_fault(rng, &faults);
    else if (kind < 700) one_silence(rng, 0, tally);
    else if (kind < 800) one_silence(rng, 1, tally);
    else if (kind < 900) (void)one_cancel(rng);
    else one_of_both(rng);
    if (hook_broken) CHECK_EQ(hook_broken, 0);
    return h_run.bad > bad;
}

/* Seeds from + nth, from + nth + workers, ... Stops at the first that fails. If it is the only
 * seed, it is run again and its schedule printed. */
static int some_seeds(int64_t from, int64_t seeds, int nth, int workers) {
    for (int64_t i = nth; i < seeds; i += workers) {
        h_run.case_now = -1;
        h_run.context[0] = 0;
        h_run.checks++;
        if (!one_seed(from + i)) continue;
        printf("seed %lld is wrong; again: make sim SEEDS=1 FROM=%lld\n", (long long)(from + i),
               (long long)(from + i));
        if (seeds > 1) return 1;
        sim_log = stdout;
        printf("its schedule:\n");
        (void)one_seed(from + i);
        sim_log = NULL;
        return 1;
    }
    return 0;
}

/* make sim SEEDS=n FROM=seed. On all cores with --long. */
TEST(seeds) {
    int64_t from = h_run.from, seeds = h_run.count, begin;
    int workers = 1, bad = 0, status;
    if (seeds <= 0) seeds = h_run.large ? 200000 : 1000;
    if (h_run.large && seeds > 100)
        workers = (int)sysconf(_SC_NPROCESSORS_ONLN);
    if (workers < 1) workers = 1;
    begin = (int64_t)time(NULL);
    printf("seeds from %lld\n", (long long)from);
    fflush(NULL);
    for (int i = 1; i < workers; i++) {
        pid_t pid = fork();
        if (pid == 0) {
            bad = some_seeds(from, seeds, i, workers);
            fflush(NULL);
            _exit(bad);
        }
        CHECK(pid > 0);
    }
    bad = some_seeds(from, seeds, 0, workers);
    for (int i = 1; i < workers; i++) {
        CHECK(wait(&status) > 0);
        bad |= status != 0;
    }
    CHECK_EQ(bad, 0);
    printf("seeds %lld to %lld, %lld s on %d cores\n", (long long)from,
           (long long)(from + seeds - 1), (long long)time(NULL) - (long long)begin, workers);
}

/* The tests above together produced every way in which a pass can fail, except those of engines
 * (test_clients.c). */
TEST(statuses) {
    static const int failures[] = { RA_E_MISMATCH, RA_E_IO, RA_E_PEER, RA_E_TIMEOUT,
                                    RA_E_CANCELLED, RA_E_ABORTED, RA_E_TRUNC, RA_E_PROTO,
                                    RA_E_UNSAFE };
    if (h_run.filter[0] || h_run.only_case >= 0) {
        h_skip("runs after all other tests only");
        return;
    }
    for (size_t i = 0; i < sizeof failures / sizeof failures[0]; i++) {
        h_context("%s", ra_status_text(failures[i]));
        CHECK(seen[-failures[i]] > 0);
    }
}

int main(int argc, char **argv) {
    static const h_test tests[] = {
        ENTRY(worlds), ENTRY(shared_few_ops), ENTRY(faults), ENTRY(silence), ENTRY(cancel),
        ENTRY(notified_deaths), ENTRY(differences),
        ENTRY(differing_routes), ENTRY(checksums), ENTRY(caches),
        ENTRY(caches_poll_between_portions), ENTRY(seeds), ENTRY(statuses),
    };
#if defined(M_MMAP_THRESHOLD)
    /* Worlds come and go: their memory need not go back to the system each time. */
    (void)mallopt(M_MMAP_THRESHOLD, 1 << 28);
    (void)mallopt(M_TRIM_THRESHOLD, 1 << 29);
#endif
    return hook_main(argc, argv, tests, sizeof tests / sizeof tests[0]);
}
