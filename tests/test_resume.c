/* Passes that continue after a rank has died (ra_resume). Whole worlds run in one thread on the
 * network of net.h, as in test_sim.c. A rank dies at a random step. The others resume on a new
 * network, lose another rank or meet a fault, and resume again. A pass that ends well has the same
 * bits as if nothing had happened, on every rank that is left. If it cannot continue, all ranks say
 * the same. */
#define _POSIX_C_SOURCE 200112L
#include "hooks.h"
#include "small.h"
#include "mail.h"
#include "net.h"

enum { RANKS = 6, PASSES = 4, ATTEMPTS = 5, WATCHDOG = 2000000, STUCK = 60000 };
enum { NOBODY = 0, SOME = 0x15, EVERYBODY = 0x3F };      /* who can fetch keys again: bits */

static int train;                      /* 1: problems have gradients, and passes are backward */
static int holders;                    /* 1: zigzag, and few can fetch keys again */
static int batches;                    /* 1: blocks are folded several at a time, from messages */
static int staged;                     /* 1: a shard is one chunk; 2: its owner sends it first */

typedef struct seat {                  /* a rank */
    ra_ring *ring;
    small_heap heap;
    rank_part part[PASSES], want[PASSES];       /* the second: of the undisturbed run */
    rank_part fetched[PASSES][RANKS];
    ra_tensors given;
    int begun, ran, over, dead, fetches, spoilt[PASSES];
    ra_ring_counters before;           /* of its resumption */
    ra_status end;
    struct sim *sim;
} seat;

typedef struct sim {
    int ranks, threads, passes, alive;
    int64_t now, idle, steps;
    net *net, *old[ATTEMPTS + 1];
    int nets;
    int fetch, sums;                   /* sums: rings have checksums */
    small problem[PASSES];
    ra_plan *plan[PASSES][RANKS];
    seat seat[RANKS];
    int32_t survivor[RANKS];           /* of the attempt under way */
    int wrong;
} sim;

static int64_t resumed, refused, kept, from_owner, from_holder, again, refetched, ahead;
static int64_t messages, stepped_back; /* of resumed passes, ranks that had been ahead */

static int64_t world_clock(void *ctx) { return ((sim *)ctx)->now; }

/* -------------------------------------------------------------------------- worlds */

static void random_net(net_config *c, int ranks) {
    small_net(c, ranks);
    c->max_ops = small_chance(40) ? 0 : (uint32_t)small_range(2, 40);
    small_net_limits(c);
}

/* A network for ranks that resume. */
static void next_net(sim *w, int fault) {
    net_config c;
    random_net(&c, w->alive);
    c.any_peer = w->alive > 2 || small_chance(50);
    c.train = 1;                       /* two channels */
    c.max_ops = (uint32_t)(2 * w->alive + (small_chance(50) ? 0 : small_range(1, 12)));
    if (fault) {
        static const int kinds[5] = { NET_DAMAGE, NET_DOUBLE, NET_DROP, NET_SWAP, NET_STALE };
        c.fault.kind = kinds[small_rand(5)];
        c.fault.rank = small_range(0, w->alive - 1);
        c.fault.at = small_range(0, 12);
        c.fault.byte = small_range(0, w->sums ? 300 : 63);       /* 0 to 63: of the frame */
        c.fault.value = small_range(1, 255);
    }
    w->net = w->old[w->nets++] = net_create(&c);
    w->net->now = w->now;
}

static void make_ring(sim *w, int r) {
    seat *s = &w->seat[r];
    ra_ring_desc rd = { 0 };
    ra_error error;
    int64_t most = 0;
    for (int i = 0; i < w->passes; i++) {
        ra_plan_report p;
        (void)ra_plan_query(w->plan[i][r], r, &p);
        if (p.workspace_bytes > most) most = p.workspace_bytes;
        if (p.shared_workspace_bytes > most) most = p.shared_workspace_bytes;
    }
    if (w->passes > 1) rd.workspace_bytes = (size_t)most + 64 * w->net->c.align;
    rd.allocator = small_heap_allocator(&s->heap);
    rd.watchdog_ns = WATCHDOG;
    rd.checksums = w->sums;
    rd.resumable = 1;
    rd.clock_ns = world_clock;
    rd.clock_ctx = w;
    rd.error = &error;
    if (!SOUND(w, ra_ring_create(&s->ring, w->plan[0][r], &w->net->rank[r].transport, &rd) ==
                      RA_OK))
        printf("    refused: %s: %s\n", error.field, error.text);
}

static void describe(const sim *w) {
    const ra_desc *d = &w->problem[0].d;
    h_context("P %d passes %d threads %d | B %d T %lld keys %lld H %d/%d D %d/%d dtypes %d%d%d%d "
              "mask %d layout %d chunk %d buffers %d order %d fetch %d",
              w->ranks, w->passes, w->threads, d->sequences, (long long)d->tokens,
              (long long)d->kv_tokens, d->q_heads, d->kv_heads, d->k_dim, d->v_dim, d->q_dtype,
              d->k_dtype, d->v_dtype, d->o_dtype, d->mask.kind, d->layout.kind, d->chunk_tokens,
              d->buffers, d->order, w->fetch);
}

/* A problem in which AMX folds 8 blocks of a chunk at once and reads K from the message. */
static void make_batches(small *s, int ranks, int threads) {
    static const int shape[4] = { 8, 1, 32, 32 };      /* tasks of 2 query blocks share the keys */
    small_plain(s, ranks, 512 * ranks, shape);
    problem_dtypes(&s->p, RA_BF16, RA_BF16, RA_BF16, RA_F32);
    s->p.tq[0] = s->p.q_max = 128 * ranks;
    s->s.isa = RA_ISA_AMX;
    s->s.threads = threads;
    s->s.chunk_tokens = 512;
    s->s.strides = STRIDES_MIXED;
    s->s.seed = small_rand(UINT32_MAX) & ~7u;          /* kv_tokens is given */
    small_data(s);
    small_desc(s);
}

/* A problem for chosen steps: the two pieces of a chunk may travel to unlike distances. */
static void make_staged(small *s, int ranks) {
    static const int shape[4] = { 2, 1, 8, 8 };
    small_plain(s, ranks, 128 * ranks, shape);
    s->p.mask.kind = RA_MASK_CAUSAL;
    s->s.layout = RA_LAYOUT_ZIGZAG;
    s->s.chunk_tokens = 128;
    s->s.buffers = 4;
    s->s.order = staged == 2 ? RA_ORDER_ROUNDS : 0;
    s->s.strides = STRIDES_MIXED;
    small_data(s);
    small_desc(s);
}

static sim *make_world(int ranks, int passes, const net_config *c) {
    static const int fetch[3] = { NOBODY, SOME, EVERYBODY };
    sim *w = (sim *)calloc(1, sizeof *w);
    const int most = small_range(1, small_chance(70) ? 200 * ranks : 64 * ranks);
    if (!w) abort();
    w->ranks = w->alive = ranks;
    w->passes = passes;
    w->threads = batches || staged || small_chance(50) ? 1 : small_range(1, 4);
    w->fetch = fetch[small_range(0, holders ? 1 : 2)];
    w->sums = small_chance(40);
    for (int i = 0; i < passes; i++) {
        if (batches) make_batches(&w->problem[i], ranks, w->threads);
        else if (staged) make_staged(&w->problem[i], ranks);
        else small_make(&w->problem[i], ranks, most, w->threads);
        while (holders && w->problem[i].d.layout.kind != RA_LAYOUT_ZIGZAG) {
            small_free(&w->problem[i]);
            small_make(&w->problem[i], ranks, most, w->threads);
        }
        if (train) small_train(&w->problem[i], 0);
    }
    describe(w);
    w->net = w->old[w->nets++] = net_create(c);
    for (int r = 0; r < ranks; r++) w->survivor[r] = r;
    for (int i = 0; i < passes; i++)
        for (int r = 0; r < ranks; r++) {
            ra_desc d = w->problem[i].d;
            d.rank = r;
            SOUND(w, ra_plan_create(&w->plan[i][r], &d, NULL) == RA_OK);
        }
    for (int r = 0; r < ranks && !w->wrong; r++) {
        seat *s = &w->seat[r];
        s->sim = w;
        for (int i = 0; i < passes; i++) {
            const small *x = &w->problem[i];
            part_make(&s->part[i], &x->p, &x->s, w->plan[i][r], r);
            part_make(&s->want[i], &x->p, &x->s, w->plan[i][r], r);
        }
        make_ring(w, r);
    }
    return w;
}

static void free_world(sim *w) {
    for (int r = 0; r < w->ranks; r++) {
        seat *s = &w->seat[r];
        small_heap_clear(&s->heap);
        for (int i = 0; i < w->passes; i++) {
            part_free(&s->part[i]);
            part_free(&s->want[i]);
            for (int o = 0; o < w->ranks; o++) part_free(&s->fetched[i][o]);
        }
    }
    for (int i = 0; i < w->passes; i++) {
        for (int r = 0; r < w->ranks; r++) ra_plan_destroy(w->plan[i][r]);
        small_free(&w->problem[i]);
    }
    for (int i = 0; i < w->nets; i++) net_destroy(w->old[i]);
    free(w);
}

/* The undisturbed run: the same plans on ranks that are threads. */
typedef struct fair { sim *w; int pass; } fair;

static ra_status fair_rank(ra_world *threads, int rank, void *user) {
    fair *f = (fair *)user;
    ra_ring *ring = NULL;
    const ra_plan *plan = f->w->plan[f->pass][rank];
    ra_status s = ra_ring_create(&ring, plan, ra_world_transport(threads, rank), NULL);
    if (!s) s = ra_forward(plan, ring, &f->w->seat[rank].want[f->pass].t, RA_NO_DEADLINE);
    ra_ring_destroy(ring);
    return s;
}

static void make_wanted(sim *w) {
    for (int i = 0; i < w->passes && !w->wrong; i++) {
        fair f = { w, i };
        SOUND(w, ra_world_run(w->ranks, fair_rank, &f, NULL) == RA_OK);
    }
}

/* -------------------------------------------------------------------------- stepping */

/* The index of rank r among the ranks that the network joins. */
static int place_of(const sim *w, int r) {
    for (int i = 0; i < w->net->c.ranks; i++) if (w->survivor[i] == r) return i;
    return -1;
}

static ra_status call(sim *w, int r, int ith) {
    seat *s = &w->seat[r];
    ra_job job = { 0 };
    ra_status st;
    if (s->begun) return ra_step(s->ring, ith);
    s->given = s->part[s->ran].t;
    job.plan = w->plan[s->ran][r];
    job.tensors = &s->given;
    job.pass = w->problem[0].d.train ? RA_PASS_BACKWARD : RA_PASS_FORWARD;
    st = ra_begin(s->ring, &job);
    if (!SOUND(w, st == RA_OK)) return st;
    if (batches || small_chance(50)) hook_short_steps(s->ring, small_range(1, 3));
    s->begun = 1;
    return RA_AGAIN;
}

static void step_rank(sim *w, int r) {
    seat *s = &w->seat[r];
    ra_status st;
    int ith;
    w->now += small_range(1, 8);
    w->steps++;
    if (++w->idle > 8 * w->ranks) w->now += 100;
    if (w->idle > 60 * w->ranks * w->threads) w->now += WATCHDOG / (50 * w->ranks);
    w->net->now = w->now;
    if (s->over || s->dead) return;
    ith = small_range(0, w->threads - 1);
    if (w->idle > 60 * w->ranks * w->threads && small_chance(50)) ith = 0;     /* it may talk */
    w->net->thread = ith;
    st = call(w, r, ith);
    if (st == RA_WAIT) return;
    w->idle = 0;
    if (st == RA_AGAIN) return;
    s->end = st;
    s->over = 1;
    if (st != RA_OK || w->nets > 1) return;
    s->begun = 0;
    s->over = ++s->ran == w->passes;
}

static void step_world(sim *w) {
    step_rank(w, w->survivor[small_range(0, w->net->c.ranks - 1)]);
}

static int running(const sim *w) {
    for (int i = 0; i < w->net->c.ranks; i++) {
        const seat *s = &w->seat[w->survivor[i]];
        if (!s->over && !s->dead) return 1;
    }
    return 0;
}

/* Steps until all have ended. `victim` dies after `after` steps. */
static void run_world(sim *w, int victim, int64_t after) {
    int64_t most = 3000000, begin = w->steps;
    w->idle = 0;
    while (running(w) && !w->wrong && !w->net->breaches && w->idle < STUCK && --most > 0) {
        if (victim >= 0 && w->steps - begin >= after && !w->seat[victim].dead) {
            w->seat[victim].dead = 1;
            if (small_chance(70)) w->net->dead = place_of(w, victim);
        }
        step_world(w);
    }
    if (!SOUND(w, w->net->breaches == 0)) printf("    breach: %s\n", w->net->why);
    SOUND(w, w->idle < STUCK && most > 0);
    if (victim >= 0) w->seat[victim].dead = 1;
}

/* -------------------------------------------------------------------------- resuming */

static int may_fetch(const sim *w, int r) {
    return w->fetch >> r & 1;
}

static ra_status refetch(void *ctx, int64_t pass, int32_t rank, ra_tensors *t) {
    seat *s = (seat *)ctx;
    sim *w = s->sim;
    int me = (int)(s - w->seat), i = (int)pass - 1;
    if (!may_fetch(w, me)) return RA_E_STATE;
    if (i < 0 || i >= w->passes || rank < 0 || rank >= w->ranks) {
        h_sound(&w->wrong, 0, "refetch of a rank and pass that exist", __FILE__, __LINE__);
        return RA_E_RANGE;
    }
    if (!t) return RA_OK;
    s->fetches++;
    if (!s->fetched[i][rank].s)
        part_make(&s->fetched[i][rank], &w->problem[i].p, &w->problem[i].s, w->plan[i][rank], rank);
    t->k = s->fetched[i][rank].t.k;
    t->v = s->fetched[i][rank].t.v;
    t->k_pos = s->fetched[i][rank].t.k_pos;
    return RA_OK;
}

static void spoil(view *v) {
    if (v->mem) memset(v->mem, NET_POISON, v->bytes);
}

/* All that are left begin. The keys of passes that ended well may be gone. */
static void begin_all(sim *w, int epoch, int odd) {
    int n = 0;
    for (int r = 0; r < w->ranks; r++) if (!w->seat[r].dead) w->survivor[n++] = r;
    for (int i = 0; i < n && !w->wrong; i++) {
        seat *s = &w->seat[w->survivor[i]];
        ra_resume_desc rd = { 0 };
        ra_status st;
        rd.transport = n > 1 ? &w->net->rank[i].transport : NULL;
        rd.survivors = w->survivor;
        rd.ranks = n;
        rd.epoch = epoch + (i == odd);
        rd.refetch = w->fetch ? refetch : NULL;
        rd.ctx = s;
        rd.tensors_kept = 1;
        for (int k = 0; k < PASSES; k++) rd.tensors_kept &= !s->spoilt[k];
        for (int k = 0; k < s->ran && small_chance(30); k++) {
            spoil(&s->part[k].k);
            spoil(&s->part[k].v);
            s->spoilt[k] = 1;
            rd.tensors_kept = 0;
        }
        if (s->end && small_chance(50)) (void)ra_finish(s->ring, RA_NO_DEADLINE);
        ra_ring_query(s->ring, &s->before);
        st = ra_resume_begin(s->ring, &rd, RA_NO_DEADLINE);
        if (!SOUND(w, st == RA_OK))
            printf("    rank %d: %s: %s: %s\n", w->survivor[i], ra_status_text(st),
                   ra_ring_error(s->ring)->field, ra_ring_error(s->ring)->text);
        memset(&rd, 0xFF, sizeof rd);
        s->begun = 1;
        s->over = 0;
    }
    w->alive = n;
}

static int same_result(const rank_part *a, const rank_part *b) {
    return a->o.bytes == b->o.bytes && a->lse.bytes == b->lse.bytes &&
           !memcmp(a->o.mem, b->o.mem, a->o.bytes) &&
           (!a->lse.mem || !memcmp(a->lse.mem, b->lse.mem, a->lse.bytes));
}

/* Every tile of the pass was counted once. */
static void check_tiles(sim *w, int r, int pass) {
    const ra_pass_figures *all;
    ra_plan_report p;
    ra_ring_counters c;
    ra_ring_query(w->seat[r].ring, &c);
    SOUND(w, ra_plan_query(w->plan[pass][r], r, &p) == RA_OK);
    all = &p.forward;
    SOUND(w, c.tiles_empty == all->tiles_empty && c.tiles_partial == all->tiles_partial);
    SOUND(w, c.tiles_full == all->tiles_full && c.tiles_all == c.tiles_partial + c.tiles_full);
}

/* Survivor i has counted every chunk that it sent and received on the network on which it resumed,
 * and nothing else. A rank that was a pass ahead begins with the figures of the pass that it had
 * finished, which are the plan's. */
static void check_messages(sim *w, int i) {
    const int r = w->survivor[i];
    const seat *s = &w->seat[r];
    const int64_t *moved = w->net->rank[i].messages;
    ra_ring_counters c, before = s->before;
    ra_plan_report p;
    ra_ring_query(s->ring, &c);
    if (c.pass < before.pass) {
        SOUND(w, ra_plan_query(w->plan[c.pass - 1][r], r, &p) == RA_OK);
        before.chunks_in = p.forward.chunks_in;
        before.chunks_out = p.forward.chunks_out;
        stepped_back++;
    }
    SOUND(w, c.chunks_in - before.chunks_in == moved[0]);
    SOUND(w, c.chunks_out - before.chunks_out == moved[1]);
    messages += moved[1];
}

/* A rank whose pass has been resumed has the pass number that it would have had. */
static int64_t check_resumed(sim *w, int r) {
    seat *s = &w->seat[r];
    ra_resumed n = { 0 };
    ra_job job = { 0 };
    if (!SOUND(w, ra_ring_resumed(s->ring, &n) == RA_OK)) return 0;
    SOUND(w, n.pass >= 0 && n.pass <= w->passes);
    if (n.pass > s->ran) s->ran = (int)n.pass;
    if (n.pass > 0) SOUND(w, same_result(&s->part[n.pass - 1], &s->want[n.pass - 1]));
    if (n.pass > 0) check_tiles(w, r, (int)n.pass - 1);
    job.plan = w->plan[0][r];
    job.tensors = &s->part[0].t;
    SOUND(w, ra_begin(s->ring, &job) == RA_E_STATE);
    kept += n.chunks_kept;
    from_owner += n.chunks_from_owner;
    from_holder += n.chunks_from_holder;
    refetched += n.chunks_refetched;
    return n.pass;
}

/* All ended well, with the same pass, or all report the same. 1: well. */
static int check_ends(sim *w) {
    ra_failure first = { 0 }, f;
    int64_t pass = -1;
    int well = 0;
    for (int i = 0; i < w->alive; i++) well += w->seat[w->survivor[i]].end == RA_OK;
    if (well) resumed++;
    else refused++;
    for (int i = 0; i < w->alive && !w->wrong; i++) {
        seat *s = &w->seat[w->survivor[i]];
        if (!SOUND(w, well == 0 || s->end == RA_OK)) {
            (void)ra_ring_failure(s->ring, &f);
            printf("    rank %d of %d: %s\n", w->survivor[i], w->alive, f.text);
        } else if (s->end == RA_OK) {
            int64_t its = check_resumed(w, w->survivor[i]);
            check_messages(w, i);
            SOUND(w, pass < 0 || its == pass);
            pass = its;
        } else {
            memset(&f, 0, sizeof f);
            SOUND(w, ra_ring_failure(s->ring, &f) == RA_OK);
            if (i == 0) first = f;
            SOUND(w, f.status == first.status && f.peer == first.peer && f.chunk == first.chunk);
            if (!SOUND(w, f.status == RA_E_PEER && w->fetch != EVERYBODY))
                printf("    rank %d of %d: %s\n", w->survivor[i], w->alive, f.text);
            SOUND(w, strstr(f.text, "nobody holds") && f.chunk >= 0);
        }
    }
    return well > 0;
}

static void close_world(sim *w) {
    for (int r = 0; r < w->ranks; r++) {
        seat *s = &w->seat[r];
        ra_status st;
        if (!s->ring) continue;
        if (s->dead || s->over == 0) (void)ra_finish(s->ring, 1);
        st = ra_ring_destroy(s->ring);
        SOUND(w, w->wrong || st == RA_OK);
        SOUND(w, w->wrong || (s->heap.live == 0 && s->heap.wrong == 0));
    }
    for (int i = 0; i < w->nets; i++)
        if (!SOUND(w, w->wrong || w->old[i]->breaches == 0))
            printf("    breach: %s\n", w->old[i]->why);
    if (w->wrong) h_run.context[0] = 0;
}

/* The memory of a dead rank, and what a network had lent, is gone. */
static void forget(sim *w, int victim) {
    for (int i = 0; i < w->passes; i++) {
        spoil(&w->seat[victim].part[i].k);
        spoil(&w->seat[victim].part[i].v);
    }
    for (int i = 0; i < w->old[0]->loan_count; i++) {
        net_loan *l = &w->old[0]->loans[i];
        if (l->back || l->from_rank >= 0) continue;
        memset(l->ptr, NET_POISON, l->len);
    }
}

/* One attempt after another, each perhaps with another death or fault. The last one is undisturbed
 * and, if keys were lost, can fetch all of them. */
static void resume_until_done(sim *w) {
    int epoch = small_range(1, 3), last = 0;
    for (int a = 0; a < ATTEMPTS && !last && !w->wrong; a++) {
        int fault = a < ATTEMPTS - 2 && small_chance(30);
        int victim = -1;
        int64_t after = 0;
        w->alive = 0;
        for (int r = 0; r < w->ranks; r++) w->alive += !w->seat[r].dead;
        next_net(w, fault);
        if (a == ATTEMPTS - 1) w->fetch = EVERYBODY;
        begin_all(w, epoch, -1);
        if (!fault && a < ATTEMPTS - 2 && w->alive > 1 && small_chance(40)) {
            victim = w->survivor[small_range(0, w->alive - 1)];
            after = small_range(0, small_chance(50) ? 60 : 600) * w->alive;
        }
        run_world(w, victim, after);
        epoch += small_range(1, 3);
        if (w->wrong) return;
        if (fault || victim >= 0) {
            again++;
            for (int i = 0; i < w->alive; i++) {
                seat *s = &w->seat[w->survivor[i]];
                if (!s->dead && s->end == RA_OK) (void)check_resumed(w, w->survivor[i]);
            }
        } else {
            last = check_ends(w);
            if (!last && a < ATTEMPTS - 2) a = ATTEMPTS - 2;
        }
    }
}

static void one_case(h_rng rng, int lend) {
    net_config c;
    sim *w;
    int ranks, victim, passes;
    small_seed(rng.state);
    ranks = small_range(2, batches ? 3 : RANKS);
    passes = batches || small_chance(holders ? 20 : 60) ? 1 : small_range(2, PASSES);
    random_net(&c, ranks);
    c.any_peer = small_chance(50);
    c.reg = small_chance(30) ? 1 : 0;
    c.shared = !lend && small_chance(15);
    if (c.shared) c.any_peer = 1;
    if (c.shared) c.max_ops = 64;
    if (lend) c.lend = batches ? 100 : small_range(20, 100);
    if (lend && small_chance(50)) c.lend_sender = small_range(20, 100);
    w = make_world(ranks, passes, &c);
    make_wanted(w);
    victim = small_range(0, ranks - 1);
    if (!w->wrong)
        run_world(w, victim, small_range(0, batches ? 150 : small_chance(50) ? 100 : 1500) * ranks);
    for (int r = 0; r < ranks && !w->wrong; r++)
        for (int i = 0; i < ranks; i++)
            ahead += !w->seat[r].dead && !w->seat[i].dead && w->seat[r].end &&
                     w->seat[r].ran > w->seat[i].ran;
    if (!w->wrong) forget(w, victim);
    if (!w->wrong) resume_until_done(w);
    close_world(w);
    free_world(w);
}

static void forget_counts(void) {
    resumed = again = refused = kept = from_owner = from_holder = refetched = 0;
    ahead = messages = stepped_back = 0;
}

static void run_cases(int64_t n, int lend) {
    for (int64_t i = 0; i < n; i++) {
        if (!h_case(i)) continue;
        one_case(h_case_rng(i), lend);
        if (h_run.bad) break;
    }
    printf("%lld resumed, %lld disturbed attempts, %lld with lost chunks; chunks: "
           "%lld kept, %lld of owners, %lld of holders, %lld fetched again; %lld ahead\n",
           (long long)resumed, (long long)again, (long long)refused, (long long)kept,
           (long long)from_owner, (long long)from_holder, (long long)refetched, (long long)ahead);
    if (h_run.only_case < 0) CHECK(resumed > 0 && refetched > 0 && refused > 0 && messages > 0);
    if (h_run.only_case < 0 && !lend) CHECK(stepped_back > 0);
    if (h_run.large && !batches)
        CHECK(from_holder > 0);        /* rare: the owner is dead, its chunk still there */
    forget_counts();
}

TEST(deaths) { run_cases(h_run.large ? 20000 : 300, 0); }

/* Chunks of which only a piece travels on, and keys that nobody has but a rank that received them,
 * perhaps one that was a pass ahead. */
TEST(held) {
    holders = 1;
    run_cases(h_run.large ? 10000 : 400, 0);
    holders = 0;
}

TEST(lent) { run_cases(h_run.large ? 5000 : 160, 1); }

/* A task that stopped within a batch of lent memory folds its blocks again and counts them once. */
TEST(lent_batches) {
    if (!ra_isa_available(RA_ISA_AMX)) {
        h_run.skipped = 1;
        return;
    }
    batches = 1;
    run_cases(h_run.large ? 300 : 40, 1);
    batches = 0;
}

/* -------------------------------------------------------------------------- chosen steps */

/* A staged world on a network that takes everything and delays nothing. */
static sim *on_stage(h_rng rng, int ranks, int passes) {
    net_config c = { 0 };
    sim *w;
    small_seed(rng.state);
    c.ranks = ranks;
    c.capacity = 8;
    c.max_ops = 64;
    staged = passes;
    w = make_world(ranks, passes, &c);
    staged = 0;
    make_wanted(w);
    return w;
}

/* The figures of rank r on the present network. */
static const net_rank *link_of(const sim *w, int r) { return &w->net->rank[place_of(w, r)]; }

/* The chunks that rank r has received in the pass; -1: it has not begun it. */
static int64_t chunks_in(const sim *w, int r, int64_t pass) {
    ra_ring_counters c;
    ra_ring_query(w->seat[r].ring, &c);
    return c.pass == pass ? c.chunks_in : -1;
}

/* Steps the ranks of a set (bits) in turn, `rounds` times. */
static void step_set(sim *w, int set, int rounds) {
    for (; rounds > 0; rounds--)
        for (int r = 0; r < w->ranks; r++) if (set >> r & 1) step_rank(w, r);
}

/* Rank `victim` dies, and the attempt ends for the others before anything else comes. */
static void end_attempt(sim *w, int victim) {
    for (int r = 0; r < w->ranks; r++)
        if (r != victim && !w->seat[r].dead) ra_ring_cancel(w->seat[r].ring);
    run_world(w, victim, 0);
    w->alive = 0;
    for (int r = 0; r < w->ranks; r++) w->alive += !w->seat[r].dead;
    forget(w, victim);
}

/* The others resume on a network as that of on_stage; `fetch` (bits) can fetch keys again. */
static void begin_staged(sim *w, int epoch, int fetch) {
    net_config c = { 0 };
    c.ranks = w->alive;
    c.capacity = 8;
    c.any_peer = c.train = 1;
    c.max_ops = 64;
    w->fetch = fetch;
    w->net = w->old[w->nets++] = net_create(&c);
    w->net->now = w->now;
    begin_all(w, epoch, -1);
}

/* Rank 1 is dead. Of its chunk rank 3 has the piece that it needs, and rank 0 needs both. Rank 3
 * sends both if it can fetch them again; otherwise rank 0, which can, does not ask it. */
TEST(pieces_of_a_holder) {
    for (int64_t i = 0; i < 8; i++) {
        sim *w;
        ra_resumed n = { 0 };
        if (!h_case(i)) continue;
        w = on_stage(h_case_rng(i), 4, 1);
        for (int k = 0; k < 200 && chunks_in(w, 3, 1) < 1; k++)
            step_set(w, 1 << 0 | 1 << 2 | 1 << 3, 1);
        SOUND(w, chunks_in(w, 3, 1) == 1 && chunks_in(w, 0, 1) == 0);
        end_attempt(w, 1);
        begin_staged(w, 1, 1 << 2);
        for (int k = 0; k < 200 && chunks_in(w, 3, 1) < 3; k++) {
            step_set(w, 1 << 2 | 1 << 3, 1);
            if (link_of(w, 0)->words[0] < 4) step_set(w, 1 << 0, 1);     /* it only meets them */
        }
        SOUND(w, chunks_in(w, 3, 1) == 3 && chunks_in(w, 0, 1) == 0);
        end_attempt(w, 2);
        begin_staged(w, 2, 1 << (i % 2 ? 0 : 3));
        run_world(w, -1, 0);
        SOUND(w, check_ends(w));
        SOUND(w, ra_ring_resumed(w->seat[3].ring, &n) == RA_OK && n.chunks_kept == 4);
        SOUND(w, w->seat[i % 2 ? 0 : 3].fetches > 0 && w->seat[i % 2 ? 3 : 0].fetches == 0);
        close_world(w);
        free_world(w);
    }
    forget_counts();
}

/* Rank 1 has ended a pass and has the next chunk of rank 2, which dies. Rank 0 still needs that of
 * the pass before. What rank 1 has is not that. */
TEST(messages_of_a_later_pass) {
    for (int64_t i = 0; i < 8; i++) {
        sim *w;
        if (!h_case(i)) continue;
        w = on_stage(h_case_rng(i), 3, 2);
        step_set(w, 1 << 2, 10);       /* it waits for the hello of rank 1 */
        for (int k = 0; k < 200 && link_of(w, 0)->messages[1] < 2; k++)
            step_set(w, 1 << 0 | 1 << 1, 1);
        for (int k = 0; k < 200 && chunks_in(w, 1, 2) < 1; k++)
            step_set(w, 1 << 1 | 1 << 2, 1);
        SOUND(w, chunks_in(w, 1, 2) == 1 && chunks_in(w, 0, 1) == 1);
        end_attempt(w, 2);
        begin_staged(w, 1, 1 << 0);
        run_world(w, -1, 0);
        SOUND(w, check_ends(w) && stepped_back == 1);
        stepped_back = 0;
        close_world(w);
        free_world(w);
    }
    forget_counts();
}

/* -------------------------------------------------------------------------- one thing at a time */

/* A world of one pass in which rank `victim` has died after some steps. */
static sim *after_a_death(uint64_t seed, int ranks, int victim, int64_t after) {
    net_config c;
    sim *w;
    small_seed(seed);
    random_net(&c, ranks);
    w = make_world(ranks, 1, &c);
    w->fetch = EVERYBODY;
    make_wanted(w);
    run_world(w, victim, after);
    w->alive = 0;
    for (int r = 0; r < ranks; r++) w->alive += !w->seat[r].dead;
    return w;
}

/* One rank brings another epoch, so no rank continues; then all bring the same one. */
TEST(epochs) {
    for (int64_t i = 0; i < 40; i++) {
        sim *w;
        if (!h_case(i)) continue;
        w = after_a_death(h_case_rng(i).state, 3 + (int)(i % 3), (int)(i % 3), 30 + 10 * i);
        next_net(w, 0);
        begin_all(w, 4, (int)(i % w->alive));
        run_world(w, -1, 0);
        for (int k = 0; k < w->alive; k++) SOUND(w, w->seat[w->survivor[k]].end < 0);
        next_net(w, 0);
        begin_all(w, 6, -1);
        run_world(w, -1, 0);
        SOUND(w, check_ends(w));
        close_world(w);
        free_world(w);
    }
    resumed = 0;
}

static int (*poll_of_net)(void *ctx, ra_transport_op *const *ops, int n);
static int bent;

/* Changes one bit of the first report that comes. */
static int bend_report(void *ctx, ra_transport_op *const *ops, int n) {
    const int code = poll_of_net(ctx, ops, n);
    for (int i = 0; i < n && !bent; i++) {
        const ra_transport_op *op = ops[i];
        if (op->kind != RA_MSG_RECV || op->channel != 1 || op->state != RA_MSG_DONE ||
            op->len <= 64)
            continue;
        ((uint8_t *)op->buf)[64] ^= 1;
        bent = 1;
    }
    return code;
}

/* A report that is not what its rank sent is not believed: what ranks choose from unlike reports
 * would not fit together. */
TEST(bent_reports) {
    int64_t found = 0;
    for (int64_t i = 0; i < 10; i++) {
        sim *w;
        if (!h_case(i)) continue;
        w = after_a_death(h_case_rng(i).state, 3, (int)(i % 3), 30 + 10 * i);
        next_net(w, 0);
        bent = 0;
        poll_of_net = w->net->rank[0].transport.poll;
        w->net->rank[0].transport.poll = bend_report;
        begin_all(w, 1, -1);
        run_world(w, -1, 0);
        if (bent) SOUND(w, w->seat[w->survivor[0]].end == RA_E_PROTO);
        found += bent;
        next_net(w, 0);
        begin_all(w, 2, -1);
        run_world(w, -1, 0);
        SOUND(w, check_ends(w));
        close_world(w);
        free_world(w);
    }
    if (h_run.only_case < 0) CHECK(found > 0);
    resumed = 0;
}

/* Each of these has one thing wrong; `good` is right. */
static void refuse_each(ra_ring *ring, const ra_resume_desc *good) {
    static const int32_t all[3] = { 0, 1, 2 }, down[3] = { 2, 1, 0 }, wide[3] = { 0, 1, 9 };
    static const int32_t short_list[2] = { 0, 2 };
    ra_transport tp = *good->transport;
    tp.rank = tp.ranks = 0;
    struct {
        int32_t ranks, epoch, tensors_kept;
        const int32_t *survivors;
        uint32_t caps, channels, max_ops;
        ra_status want;
        const char *field;
    } bad[] = {
        { 0, 1, 0, all, tp.caps, 2, 8, RA_E_RANGE, "resume.ranks" },
        { 5, 1, 0, all, tp.caps, 2, 8, RA_E_RANGE, "resume.ranks" },
        { 3, 0, 0, all, tp.caps, 2, 8, RA_E_RANGE, "resume.epoch" },
        { 3, 1 << 22, 0, all, tp.caps, 2, 8, RA_E_RANGE, "resume.epoch" },
        { 3, 1, 2, all, tp.caps, 2, 8, RA_E_RANGE, "resume.tensors_kept" },
        { 3, 1, 0, NULL, tp.caps, 2, 8, RA_E_NULL, "resume.survivors" },
        { 2, 1, 0, short_list, tp.caps, 2, 8, RA_E_SHAPE, "resume.survivors" },
        { 3, 1, 0, down, tp.caps, 2, 8, RA_E_SHAPE, "resume.survivors" },
        { 3, 1, 0, wide, tp.caps, 2, 8, RA_E_SHAPE, "resume.survivors" },
        { 3, 1, 0, all, tp.caps & ~(uint32_t)RA_CAP_ANY_PEER, 2, 8, RA_E_TRANSPORT,
          "transport.caps" },
        { 3, 1, 0, all, tp.caps, 1, 8, RA_E_TRANSPORT, "transport.channels" },
        { 3, 1, 0, all, tp.caps, 2, 5, RA_E_TRANSPORT, "transport.max_ops" },
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        ra_resume_desc rd = *good;
        rd.transport = &tp;
        tp.caps = bad[i].caps;
        tp.channels = bad[i].channels;
        tp.max_ops = bad[i].max_ops;
        rd.ranks = bad[i].ranks;
        rd.epoch = bad[i].epoch;
        rd.tensors_kept = bad[i].tensors_kept;
        rd.survivors = bad[i].survivors;
        CHECK_EQ(ra_resume_begin(ring, &rd, 0), bad[i].want);
        CHECK(!strcmp(ra_ring_error(ring)->field, bad[i].field));
    }
}

/* What is wrong with a call is refused by name, and the ring can still be resumed. */
TEST(refusals) {
    sim *w = after_a_death(7, 4, 3, 40);
    ra_ring *ring = w->seat[1].ring;
    ra_resume_desc good = { 0 }, rd;
    ra_transport tp;
    ra_resumed n;
    next_net(w, 0);
    good.transport = &w->net->rank[1].transport;
    good.survivors = w->survivor;
    good.ranks = 3;
    good.epoch = 1;
    for (int r = 0; r < 3; r++) w->survivor[r] = r;
    refuse_each(ring, &good);
    CHECK_EQ(ra_resume_begin(ring, &good, -1), RA_E_RANGE);
    CHECK_EQ(ra_resume_begin(ring, NULL, 0), RA_E_NULL);
    CHECK_EQ(ra_resume_begin(NULL, &good, 0), RA_E_NULL);
    CHECK_EQ(ra_resume(NULL, &good, 0), RA_E_NULL);
    CHECK_EQ(ra_ring_resumed(ring, &n), RA_E_STATE);
    CHECK_EQ(ra_ring_resumed(NULL, &n), RA_E_NULL);
    rd = good;
    rd.transport = NULL;
    CHECK_EQ(ra_resume_begin(ring, &rd, 0), RA_E_NULL);
    tp = *good.transport;
    tp.post = NULL;
    tp.sendrecv = mail_sendrecv;
    rd.transport = &tp;
    CHECK_EQ(ra_resume_begin(ring, &rd, 0), RA_E_TRANSPORT);
    CHECK(!strcmp(ra_ring_error(ring)->field, "transport.post"));
    w->seat[1].heap.fail_at = w->seat[1].heap.calls + 1;
    CHECK_EQ(ra_resume_begin(ring, &good, 0), RA_E_NOMEM);
    CHECK_EQ(ra_resume_begin(w->seat[1].ring, &good, RA_NO_DEADLINE), RA_OK);
    CHECK_EQ(ra_resume_begin(ring, &good, 0), RA_E_BUSY);
    CHECK_EQ(ra_finish(ring, 1), RA_E_CANCELLED);
    good.epoch = 2;
    w->alive = 3;
    next_net(w, 0);
    begin_all(w, 3, -1);
    run_world(w, -1, 0);
    CHECK(check_ends(w));
    good.epoch = 9;
    w->survivor[2] = 3;                /* left out before */
    CHECK_EQ(ra_resume_begin(ring, &good, 0), RA_E_SHAPE);
    CHECK(strstr(ra_ring_error(ring)->text, "last attempt"));
    w->survivor[2] = 2;
    close_world(w);
    free_world(w);
    resumed = 0;
}

/* A ring that has not begun a pass, and a ring of one. */
TEST(nothing_to_resume) {
    ra_desc d = ra_desc_make(1, 1, 8, RA_F32, RA_MASK_CAUSAL);
    net_config c = { 0 };
    net *n;
    int32_t alive[1] = { 0 };
    ra_resume_desc rd = { 0 };
    ra_plan *plan = NULL;
    ra_ring *ring = NULL;
    c.ranks = 2;
    n = net_create(&c);
    d.tokens = 100;
    d.ranks = 2;
    d.layout.kind = RA_LAYOUT_CONTIGUOUS;
    rd.survivors = alive;
    rd.ranks = rd.epoch = 1;
    CHECK_EQ(ra_plan_create(&plan, &d, NULL), RA_OK);
    CHECK_EQ(ra_ring_create(&ring, plan, &n->rank[0].transport, NULL), RA_OK);
    CHECK_EQ(ra_resume(ring, &rd, 0), RA_E_STATE);
    CHECK_EQ(ra_ring_destroy(ring), RA_OK);
    ra_plan_destroy(plan);
    net_destroy(n);
}

/* A transport that cannot promise to leave the buffers alone. */
TEST(unsafe) {
    sim *w = after_a_death(11, 2, 1, 0);
    ra_resume_desc rd = { 0 };
    int32_t alive[1] = { 0 };
    rd.survivors = alive;
    rd.ranks = rd.epoch = 1;
    for (uint64_t seed = 12; w->seat[0].end == RA_OK; seed++) {      /* it waits for the dead */
        close_world(w);
        free_world(w);
        w = after_a_death(seed, 2, 1, 0);
    }
    w->old[0]->c.unsafe = 1;
    CHECK_EQ(ra_resume(w->seat[0].ring, &rd, 0), RA_E_UNSAFE);
    CHECK_EQ(ra_ring_destroy(w->seat[0].ring), RA_E_UNSAFE);
    w->seat[0].ring = NULL;
    close_world(w);
    free_world(w);
}

/* A world of three ranks that computes gradients. */
static sim *with_gradients(h_rng rng) {
    net_config c;
    sim *w;
    small_seed(rng.state);
    random_net(&c, 3);
    c.any_peer = c.train = 1;
    if (c.max_ops < 3) c.max_ops = 3;
    train = 1;
    w = make_world(3, 1, &c);
    train = 0;
    w->fetch = EVERYBODY;
    return w;
}

/* Backward passes are not resumed; they must begin again. Every rank gets the same status. */
TEST(backward) {
    for (int64_t i = 0; i < 30; i++) {
        sim *w;
        int failed = 0;
        if (!h_case(i)) continue;
        w = with_gradients(h_case_rng(i));
        run_world(w, (int)(i % 3), 10 + 20 * i);
        for (int r = 0; r < 3; r++) failed += !w->seat[r].dead && w->seat[r].end < 0;
        w->alive = 2;
        next_net(w, 0);
        begin_all(w, 1, -1);
        run_world(w, -1, 0);
        for (int k = 0; k < 2 && failed; k++) {
            ra_failure f = { 0 };
            SOUND(w, ra_ring_failure(w->seat[w->survivor[k]].ring, &f) == RA_OK);
            SOUND(w, f.status == RA_E_UNSUPPORTED && strstr(f.text, "backward"));
        }
        close_world(w);
        free_world(w);
    }
}

/* Gradients that are complete on all ranks need no new start, for one rank or more. */
TEST(backward_is_complete) {
    for (int64_t i = 0; i < 20; i++) {
        const int left = 1 + (int)(i % 3);
        sim *w;
        if (!h_case(i)) continue;
        w = with_gradients(h_case_rng(i));
        run_world(w, -1, 0);
        for (int r = left; r < 3; r++) w->seat[r].dead = 1;
        w->alive = left;
        next_net(w, 0);
        begin_all(w, 1, -1);
        run_world(w, -1, 0);
        for (int r = 0; r < left; r++) {
            ra_resumed n;
            SOUND(w, w->seat[r].end == RA_OK);
            SOUND(w, ra_ring_resumed(w->seat[r].ring, &n) == RA_OK && n.pass == 1);
        }
        close_world(w);
        free_world(w);
    }
}

/* An engine that fails leaves its state in the middle of a chunk, whatever else fails in the
 * pass. */
typedef struct broken_engine { ra_ring *ring; int calls, fails, cancels; } broken_engine;

static int broken_fold(void *ctx, const ra_block *b) {
    broken_engine *e = (broken_engine *)ctx;
    for (int64_t i = 0; i < b->q_rows * b->desc->q_heads; i++) b->lse[i] = -INFINITY;
    if (++e->calls != e->fails) return 0;
    if (e->cancels) ra_ring_cancel(e->ring);
    return -77;
}

TEST(engines_that_failed) {
    static float x[3][512][8], o[512][8];
    for (int i = 0; i < 12; i++) {
        ra_desc d = ra_desc_make(1, 1, 8, RA_F32, RA_MASK_CAUSAL);
        broken_engine e = { NULL, 0, 1 + i / 2, i % 2 };
        int32_t alive[1] = { 0 };
        ra_engine engine = { 0 };
        ra_resume_desc rd = { 0 };
        ra_plan *plan = NULL;
        ra_tensors t = { 0 };
        ra_status s;
        net_config c = { 0 };
        net *n;
        c.ranks = 2;
        n = net_create(&c);
        engine.size = sizeof engine;
        engine.abi = RA_ENGINE_ABI;
        engine.fold = broken_fold;
        engine.ctx = &e;
        d.engine = &engine;
        d.tokens = 1024;
        d.chunk_tokens = 128;
        d.ranks = 2;
        d.layout.kind = RA_LAYOUT_ZIGZAG;
        t.q.data = x[0];
        t.k.data = x[1];
        t.v.data = x[2];
        t.o.data = o;
        rd.survivors = alive;
        rd.ranks = rd.epoch = 1;
        CHECK_EQ(ra_plan_create(&plan, &d, NULL), RA_OK);
        CHECK_EQ(ra_ring_create(&e.ring, plan, &n->rank[0].transport, NULL), RA_OK);
        s = ra_forward(plan, e.ring, &t, ra_deadline_ms(1));
        if (e.calls >= e.fails) {
            CHECK_EQ(s, e.cancels ? RA_E_CANCELLED : RA_E_ENGINE);
            CHECK_EQ(ra_resume(e.ring, &rd, 0), RA_E_UNSUPPORTED);
            CHECK(strstr(ra_ring_explain(e.ring), "engine"));
        }
        CHECK_EQ(ra_ring_destroy(e.ring), RA_OK);
        ra_plan_destroy(plan);
        net_destroy(n);
    }
}

/* -------------------------------------------------------------------------- the pure part */

/* The order of sources, computed in another way. */
static int want_source(const hook_reports *v, int64_t chunks, int64_t c, int to) {
    const int owner = hook_chunk_owner(v->plan, c);
    int best = -1, rank = 99;
    for (int i = v->n - 1; i >= 0; i--) {
        const int gives = v->gives[i] >> owner & 1, need = v->need[to * chunks + c];
        const int holds = i != to && (v->held[i * chunks + c] & need) == need;
        const int its = gives && v->rank[i] == owner ? 0 : holds ? 1 : gives && i == to ? 2
                      : gives ? 3 : 99;
        if (its > rank || its == 99) continue;
        rank = its;
        best = i;
    }
    return best;
}

TEST(sources) {
    static uint8_t need[RANKS * 256], held[RANKS * 256];
    int64_t seen[2] = { 0, 0 };
    for (int64_t i = 0; i < (h_run.large ? 3000 : 300); i++) {
        ra_desc d = ra_desc_make(1, 1, 8, RA_F32, RA_MASK_CAUSAL);
        int32_t rank[RANKS];
        uint32_t gives[RANKS];
        hook_reports v = { 0 };
        ra_plan *plan = NULL;
        int64_t first = -1, chunks;
        if (!h_case(i)) continue;
        small_seed(h_case_rng(i).state);
        d.tokens = small_range(1, 900);
        d.chunk_tokens = 64;
        d.ranks = small_range(2, RANKS);
        d.layout.kind = small_chance(50) ? RA_LAYOUT_ZIGZAG : RA_LAYOUT_CONTIGUOUS;
        CHECK_EQ(ra_plan_create(&plan, &d, NULL), RA_OK);
        chunks = hook_chunks(plan);
        v.plan = plan;
        v.rank = rank;
        v.need = need;
        v.held = held;
        v.gives = gives;
        for (int r = 0; r < d.ranks; r++) if (small_chance(60) || (!r && !v.n)) rank[v.n++] = r;
        for (int r = 0; r < v.n; r++) {
            gives[r] = small_chance(50) ? small_rand(1u << RANKS) : 1u << rank[r];
            for (int64_t c = 0; c < chunks; c++) {
                need[r * chunks + c] = (uint8_t)(small_chance(40) ? small_rand(4) : 0);
                held[r * chunks + c] = (uint8_t)(small_chance(30) ? small_rand(4) : 0);
            }
        }
        for (int64_t c = chunks - 1; c >= 0; c--)
            for (int r = 0; r < v.n; r++) {
                int want = want_source(&v, chunks, c, r);
                CHECK_EQ(hook_source(&v, c, r), want);
                seen[want < 0]++;
                if (want < 0 && need[r * chunks + c]) first = c;
            }
        CHECK_EQ(hook_lost(&v), first);
        ra_plan_destroy(plan);
    }
    CHECK(h_run.only_case >= 0 || (seen[0] > 0 && seen[1] > 0));
}

/* -------------------------------------------------------------------------- threads
 * ra_resume itself, on a thread per rank. The first ring has sendrecv alone; one rank cancels. */
typedef struct party {
    sim *w;
    mail_net *first, *then;
    int32_t alive[RANKS];
    int victim, tiles;
} party;
typedef struct guest { party *p; int rank, tiles; ra_status end; } guest;

static void on_event(void *ctx, const ra_event *e) {
    guest *g = (guest *)ctx;
    if (e->kind != RA_EV_TILE || g->rank != g->p->victim || ++g->tiles <= g->p->tiles) return;
    ra_ring_cancel(g->p->w->seat[g->rank].ring);
}

static void *attend(void *arg) {
    guest *g = (guest *)arg;
    party *p = g->p;
    seat *s = &p->w->seat[g->rank];
    ra_transport tp = mail_transport(p->first, g->rank);
    ra_ring_desc rd = { 0 };
    ra_resume_desc go_on = { 0 };
    rd.trace = on_event;
    rd.trace_ctx = g;
    g->end = ra_ring_create(&s->ring, p->w->plan[0][g->rank], &tp, &rd);
    if (!g->end) g->end = ra_forward(p->w->plan[0][g->rank], s->ring, &s->part[0].t, 0);
    s->ran = g->end == RA_OK;
    if (g->rank == p->victim) return NULL;
    tp = mail_transport(p->then, g->rank - (g->rank > p->victim));
    go_on.transport = &tp;
    go_on.survivors = p->alive;
    go_on.ranks = p->w->ranks - 1;
    go_on.epoch = 5;
    go_on.tensors_kept = 1;
    go_on.refetch = refetch;
    go_on.ctx = s;
    g->end = ra_resume(s->ring, &go_on, ra_deadline_ms(60000));
    return NULL;
}

static void one_party(h_rng rng) {
    net_config c;
    mail_desc m = { 0 };
    guest g[RANKS];
    pthread_t id[RANKS];
    party p = { 0 };
    sim *w;
    small_seed(rng.state);
    random_net(&c, small_range(2, RANKS));
    p.w = w = make_world(c.ranks, 1, &c);
    for (int r = 0; r < w->ranks; r++) (void)ra_ring_destroy(w->seat[r].ring);
    w->fetch = EVERYBODY;
    make_wanted(w);
    m.ranks = w->ranks;
    m.tells = 1;
    p.first = mail_open(&m, NULL);
    m.ranks--;
    m.level = m.waits = 1;
    m.moods = small_rand(1u << 30);
    m.holds = small_chance(50);
    m.caps = RA_CAP_ANY_PEER | RA_CAP_ANY_THREAD;
    m.channels = 2;
    m.max_ops = (uint32_t)(2 * w->ranks + small_range(0, 8));
    p.then = mail_open(&m, NULL);
    p.victim = small_range(0, w->ranks - 1);
    p.tiles = small_range(0, 12);
    for (int r = 0, n = 0; r < w->ranks; r++) if (r != p.victim) p.alive[n++] = r;
    for (int r = 0; r < w->ranks; r++) {
        g[r].p = &p;
        g[r].rank = r;
        g[r].tiles = 0;
        if (pthread_create(&id[r], NULL, attend, &g[r])) abort();
    }
    for (int r = 0; r < w->ranks; r++) pthread_join(id[r], NULL);
    for (int r = 0; r < w->ranks; r++) {
        seat *s = &w->seat[r];
        ra_resumed n;
        if (r != p.victim && SOUND(w, g[r].end == RA_OK)) {
            SOUND(w, ra_ring_resumed(s->ring, &n) == RA_OK && n.pass == 1 && n.epoch == 5);
            SOUND(w, same_result(&s->part[0], &s->want[0]));
        } else if (r != p.victim) {
            printf("    rank %d: %s / %s\n", r, ra_ring_explain(s->ring),
                   ra_ring_error(s->ring)->text);
        }
        (void)ra_ring_destroy(s->ring);
    }
    (void)mail_close(p.first);
    SOUND(w, mail_close(p.then) == 0);
    free_world(w);
}

TEST(threads) {
    for (int64_t i = 0; i < (h_run.large ? 400 : 25); i++)
        if (h_case(i)) one_party(h_case_rng(i));
}

int main(int argc, char **argv) {
    static const h_test tests[] = {
        ENTRY(sources), ENTRY(pieces_of_a_holder), ENTRY(messages_of_a_later_pass),
        ENTRY(deaths), ENTRY(held), ENTRY(lent), ENTRY(lent_batches), ENTRY(epochs),
        ENTRY(bent_reports), ENTRY(refusals), ENTRY(nothing_to_resume), ENTRY(unsafe),
        ENTRY(backward), ENTRY(backward_is_complete), ENTRY(engines_that_failed), ENTRY(threads),
    };
    return hook_main(argc, argv, tests, sizeof tests / sizeof tests[0]);
}
