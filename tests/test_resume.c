/* Passes that go on after a rank has died (ra_resume). Whole worlds in one thread on the network of
 * net.h, as in test_sim.c: a rank dies at a random step, the others resume on a new network, lose
 * another rank or meet a fault, resume again. What ends well has the bits of the same pass without
 * any of that, on every rank that is left; what cannot go on says the same on all of them. */
#define _POSIX_C_SOURCE 200112L
#include "harness.h"

static int assert_failures;
static int assert_failed(const char *what, int line)
{
    if (assert_failures++ == 0) printf("ringattn.h:%d: assertion: %s\n", line, what);
    return 0;
}
#define RINGATTN_ASSERT(x) ((x) ? (void)0 : (void)assert_failed(#x, __LINE__))
#define RINGATTN_IMPLEMENTATION
#include "ringattn.h"
#include "small.h"
#include "net.h"

enum { RANKS = 6, PASSES = 2, ATTEMPTS = 5, WATCHDOG = 2000000, STUCK = 60000 };
enum { NOBODY, SOME, EVERYBODY };      /* who can fetch keys again */

typedef struct seat {                  /* a rank */
    ra_ring *ring;
    small_heap heap;
    small_part part[PASSES], want[PASSES];       /* the second: of the run that nothing disturbs */
    small_part fetched[PASSES][RANKS];
    ra_tensors given;
    int begun, ran, over, dead, fetches, spoilt[PASSES];
    ra_status end;
    struct world *world;
} seat;

typedef struct world {
    int ranks, threads, passes, alive;
    int64_t now, idle, steps;
    net *net, *old[ATTEMPTS + 1];
    int nets;
    int fetch;
    small problem[PASSES];
    ra_plan *plan[PASSES][RANKS];
    seat seat[RANKS];
    int32_t survivor[RANKS];           /* of the attempt under way */
    int wrong;
} world;

static int64_t resumed, refused, lost, kept, from_owner, from_holder, again, refetched, ahead, torn;

static int sound(world *w, int ok, const char *what, int line)
{
    h_run.checks++;
    if (ok) return 1;
    if (!w->wrong) h_fail(h_args(what, __FILE__, line), "is false");
    w->wrong = 1;
    return 0;
}
#define SOUND(w, x) sound(w, (x) ? 1 : 0, #x, __LINE__)

static int64_t world_clock(void *ctx) { return ((world *)ctx)->now; }

/* -------------------------------------------------------------------------- worlds */

static void random_net(net_config *c, int ranks)
{
    memset(c, 0, sizeof *c);
    c->ranks = ranks;
    c->seed = small_rand(1u << 30);
    c->delay = small_chance(70) ? (int64_t)small_rand(200) : 0;
    c->capacity = small_chance(50) ? 0 : small_range(1, 4);
    c->refuse = small_chance(50) ? 0 : small_range(5, 60);
    c->at_once = small_chance(50) ? 0 : small_range(1, 100);
    c->quiet_done = small_chance(50) ? 0 : 100;
    c->keep = small_chance(70) ? 0 : small_range(10, 60);
    c->any_thread = small_chance(50);
    c->max_ops = small_chance(40) ? 0 : (uint32_t)small_range(2, 40);
    c->tag_bits = small_chance(50) ? 0 : (uint32_t)small_range(1, 64);
    c->align = small_chance(50) ? 0 : (size_t)1 << small_rand(10);
    c->told = small_range(0, 2);
}

/* A network for ranks that resume. */
static void next_net(world *w, int fault)
{
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
        c.fault.byte = small_range(0, 63);       /* of the frame */
        c.fault.value = small_range(1, 255);
    }
    w->net = w->old[w->nets++] = net_create(&c);
    w->net->now = w->now;
}

static void make_ring(world *w, int r)
{
    seat *s = &w->seat[r];
    ra_ring_desc rd;
    ra_error error;
    int64_t most = 0;
    memset(&rd, 0, sizeof rd);
    for (int i = 0; i < w->passes; i++) {
        ra_plan_report p;
        (void)ra_plan_query(w->plan[i][r], r, &p);
        if (p.workspace_bytes > most) most = p.workspace_bytes;
        if (p.shared_workspace_bytes > most) most = p.shared_workspace_bytes;
    }
    if (w->passes > 1) rd.workspace_bytes = (size_t)most + 64 * w->net->c.align;
    rd.allocator = small_heap_allocator(&s->heap);
    rd.watchdog_ns = WATCHDOG;
    rd.clock_ns = world_clock;
    rd.clock_ctx = w;
    rd.error = &error;
    if (!SOUND(w, ra_ring_create(&s->ring, w->plan[0][r], &w->net->rank[r].transport, &rd) == RA_OK))
        printf("    refused: %s: %s\n", error.field, error.text);
}

static void describe(const world *w)
{
    const ra_desc *d = &w->problem[0].d;
    snprintf(h_run.context, sizeof h_run.context,
             "P %d passes %d threads %d | B %d T %lld keys %lld H %d/%d D %d/%d dtypes %d%d%d%d "
             "mask %d layout %d chunk %d buffers %d fetch %d", w->ranks, w->passes, w->threads,
             d->sequences, (long long)d->tokens, (long long)d->kv_tokens, d->q_heads, d->kv_heads,
             d->k_dim, d->v_dim, d->q_dtype, d->k_dtype, d->v_dtype, d->o_dtype, d->mask.kind,
             d->layout.kind, d->chunk_tokens, d->buffers, w->fetch);
}

static world *make_world(int ranks, int passes, const net_config *c)
{
    world *w = (world *)calloc(1, sizeof *w);
    const int most = small_range(1, small_chance(70) ? 200 * ranks : 64 * ranks);
    if (!w) abort();
    w->ranks = w->alive = ranks;
    w->passes = passes;
    w->threads = small_chance(50) ? 1 : small_range(1, 4);
    w->fetch = small_range(NOBODY, EVERYBODY);
    for (int i = 0; i < passes; i++) small_make(&w->problem[i], ranks, most, w->threads);
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
        s->world = w;
        for (int i = 0; i < passes; i++) {
            h_rng at = small_rng;      /* the same strides for both */
            small_part_make(&s->part[i], &w->problem[i], w->plan[i][r], r);
            small_rng = at;
            small_part_make(&s->want[i], &w->problem[i], w->plan[i][r], r);
        }
        make_ring(w, r);
    }
    return w;
}

static void free_world(world *w)
{
    for (int r = 0; r < w->ranks; r++) {
        seat *s = &w->seat[r];
        small_heap_clear(&s->heap);
        for (int i = 0; i < w->passes; i++) {
            small_part_free(&s->part[i]);
            small_part_free(&s->want[i]);
            for (int o = 0; o < w->ranks; o++) small_part_free(&s->fetched[i][o]);
        }
    }
    for (int i = 0; i < w->passes; i++) {
        for (int r = 0; r < w->ranks; r++) ra_plan_destroy(w->plan[i][r]);
        small_free(&w->problem[i]);
    }
    for (int i = 0; i < w->nets; i++) net_destroy(w->old[i]);
    free(w);
}

/* What nothing disturbs: the same plans on ranks that are threads. */
typedef struct fair { world *w; int pass; } fair;

static ra_status fair_rank(ra_world *world, int rank, void *user)
{
    fair *f = (fair *)user;
    ra_ring *ring = NULL;
    ra_status s = ra_ring_create(&ring, f->w->plan[f->pass][rank], ra_world_transport(world, rank),
                                 NULL);
    if (!s) s = ra_forward(f->w->plan[f->pass][rank], ring, &f->w->seat[rank].want[f->pass].t,
                           RA_NO_DEADLINE);
    ra_ring_destroy(ring);
    return s;
}

static void make_wanted(world *w)
{
    for (int i = 0; i < w->passes && !w->wrong; i++) {
        fair f = { w, i };
        SOUND(w, ra_world_run(w->ranks, fair_rank, &f, NULL) == RA_OK);
    }
}

/* -------------------------------------------------------------------------- stepping */

/* Where rank r is among those that the network joins. */
static int place_of(const world *w, int r)
{
    for (int i = 0; i < w->net->c.ranks; i++) if (w->survivor[i] == r) return i;
    return -1;
}

static ra_status call(world *w, int r, int ith)
{
    seat *s = &w->seat[r];
    ra_job job;
    ra_status st;
    if (s->begun) return ra_step(s->ring, ith);
    memset(&job, 0, sizeof job);
    s->given = s->part[s->ran].t;
    job.plan = w->plan[s->ran][r];
    job.tensors = &s->given;
    st = ra_begin(s->ring, &job);
    if (!SOUND(w, st == RA_OK)) return st;
    if (small_chance(50)) s->ring->step_work = small_range(1, 3) * RA__TILE_WORK;
    s->begun = 1;
    return RA_AGAIN;
}

static void step_world(world *w)
{
    const int r = w->survivor[small_range(0, w->net->c.ranks - 1)];
    seat *s = &w->seat[r];
    ra_status st;
    int ith;
    w->now += small_range(1, 8);
    w->steps++;
    if (++w->idle > 8 * w->ranks) w->now += 100;
    if (w->idle > 60 * w->ranks * w->threads) w->now += WATCHDOG / (50 * w->ranks);
    w->net->now = w->now;
    if (s->over || s->dead) return;
    ith = w->net->thread = small_range(0, w->threads - 1);
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

static int running(const world *w)
{
    for (int i = 0; i < w->net->c.ranks; i++) {
        const seat *s = &w->seat[w->survivor[i]];
        if (!s->over && !s->dead) return 1;
    }
    return 0;
}

/* Steps until all have ended; `victim` dies after `after` steps. */
static void run_world(world *w, int victim, int64_t after)
{
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

static int may_fetch(const world *w, int r)
{
    return w->fetch == EVERYBODY || (w->fetch == SOME && r % 2 == 0);
}

static ra_status refetch(void *ctx, int64_t pass, int32_t rank, ra_tensors *t)
{
    seat *s = (seat *)ctx;
    world *w = s->world;
    int me = (int)(s - w->seat), i = (int)pass - 1;
    if (!may_fetch(w, me)) return RA_E_STATE;
    if (i < 0 || i >= w->passes || rank < 0 || rank >= w->ranks) {
        SOUND(w, !"refetch of a rank that is not there");
        return RA_E_RANGE;
    }
    if (!t) return RA_OK;
    s->fetches++;
    if (!s->fetched[i][rank].s)
        small_part_make(&s->fetched[i][rank], &w->problem[i], w->plan[i][rank], rank);
    t->k = s->fetched[i][rank].t.k;
    t->v = s->fetched[i][rank].t.v;
    t->k_pos = s->fetched[i][rank].t.k_pos;
    return RA_OK;
}

static void spoil(small_view *v)
{
    if (v->base) memset(v->base, NET_POISON, v->bytes);
}

/* All that are left begin; the keys of passes that ended well may be gone. */
static void begin_all(world *w, int epoch, int odd)
{
    int n = 0;
    for (int r = 0; r < w->ranks; r++) if (!w->seat[r].dead) w->survivor[n++] = r;
    for (int i = 0; i < n && !w->wrong; i++) {
        seat *s = &w->seat[w->survivor[i]];
        ra_resume_desc rd;
        ra_status st;
        memset(&rd, 0, sizeof rd);
        rd.transport = n > 1 ? &w->net->rank[i].transport : NULL;
        rd.survivors = w->survivor;
        rd.ranks = n;
        rd.epoch = epoch + (i == odd);
        rd.refetch = w->fetch ? refetch : NULL;
        rd.ctx = s;
        rd.tensors_kept = !s->spoilt[0] && !s->spoilt[1];
        for (int k = 0; k < w->passes && (k < s->ran || s->end == RA_OK) && small_chance(30); k++) {
            if (s->ring->survivor && k == s->ran) break;
            spoil(&s->part[k].k);
            spoil(&s->part[k].v);
            s->spoilt[k] = 1;
            rd.tensors_kept = 0;
        }
        if (s->end && small_chance(50)) (void)ra_finish(s->ring, RA_NO_DEADLINE);
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

static int same_result(const small_part *a, const small_part *b)
{
    return a->o.bytes == b->o.bytes && a->lse.bytes == b->lse.bytes &&
           !memcmp(a->o.base, b->o.base, a->o.bytes) &&
           (!a->lse.base || !memcmp(a->lse.base, b->lse.base, a->lse.bytes));
}

/* A rank whose pass has been resumed: it is the pass that it would have been. */
static int64_t check_resumed(world *w, int r)
{
    seat *s = &w->seat[r];
    ra_resumed n;
    ra_job job;
    memset(&n, 0, sizeof n);
    if (!SOUND(w, ra_ring_resumed(s->ring, &n) == RA_OK)) return 0;
    SOUND(w, n.pass >= 0 && n.pass <= w->passes);
    if (n.pass > 0) SOUND(w, same_result(&s->part[n.pass - 1], &s->want[n.pass - 1]));
    memset(&job, 0, sizeof job);
    job.plan = w->plan[0][r];
    job.tensors = &s->part[0].t;
    SOUND(w, ra_begin(s->ring, &job) == RA_E_STATE);
    kept += n.chunks_kept;
    from_owner += n.chunks_from_owner;
    from_holder += n.chunks_from_holder;
    refetched += n.chunks_refetched;
    return n.pass;
}

/* All ended well, on the same pass, or all say the same. 1: well. */
static int check_ends(world *w)
{
    ra_failure first, f;
    int64_t pass = -1;
    int well = 0;
    memset(&first, 0, sizeof first);
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
            SOUND(w, pass < 0 || its == pass);
            pass = its;
        } else {
            memset(&f, 0, sizeof f);
            SOUND(w, ra_ring_failure(s->ring, &f) == RA_OK);
            if (i == 0) first = f;
            SOUND(w, f.status == first.status && f.peer == first.peer && f.chunk == first.chunk);
            if (!SOUND(w, f.status == RA_E_PEER || f.status == RA_E_UNSUPPORTED))
                printf("    rank %d of %d: %s\n", w->survivor[i], w->alive, f.text);
            if (f.status == RA_E_PEER) SOUND(w, w->fetch != EVERYBODY);
            if (f.status == RA_E_PEER) SOUND(w, strstr(f.text, "nobody holds") && f.chunk >= 0);
            lost += f.status == RA_E_PEER && i == 0;
            torn += f.status == RA_E_UNSUPPORTED && i == 0;
        }
    }
    return well > 0;
}

static void close_world(world *w)
{
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

/* One attempt after another, each with perhaps another death or a fault in the way; at last one
 * that nothing disturbs, and if keys were lost in it, one that can fetch everything. */
static void resume_until_done(world *w)
{
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

static void one_case(h_rng rng, int lend)
{
    net_config c;
    world *w;
    int ranks, victim, passes;
    small_seed(rng.state);
    ranks = small_range(2, RANKS);
    passes = small_chance(60) ? 1 : 2;
    random_net(&c, ranks);
    c.any_peer = small_chance(50);
    c.reg = small_chance(30) ? 1 : 0;
    if (lend) c.lend = small_range(20, 100);
    if (lend && small_chance(50)) c.lend_sender = small_range(20, 100);
    w = make_world(ranks, passes, &c);
    make_wanted(w);
    victim = small_range(0, ranks - 1);
    if (!w->wrong) run_world(w, victim, small_range(0, small_chance(50) ? 100 : 1500) * ranks);
    for (int r = 0; r < ranks && !w->wrong; r++)
        for (int i = 0; i < ranks; i++)
            ahead += !w->seat[r].dead && !w->seat[i].dead && w->seat[r].end &&
                     w->seat[r].ran > w->seat[i].ran;
    if (!w->wrong) resume_until_done(w);
    close_world(w);
    free_world(w);
}

static void run_cases(int64_t n, int lend)
{
    for (int64_t i = 0; i < n; i++) {
        if (!h_case(i)) continue;
        one_case(h_case_rng(i), lend);
        if (h_run.bad) break;
    }
    CHECK_EQ(assert_failures, 0);
    printf("%lld resumed, %lld disturbed attempts, %lld not: %lld lost, %lld torn; chunks: %lld kept, "
           "%lld of owners, %lld of holders, %lld fetched again; %lld ahead\n", (long long)resumed,
           (long long)again, (long long)refused, (long long)lost, (long long)torn, (long long)kept,
           (long long)from_owner, (long long)from_holder, (long long)refetched, (long long)ahead);
    if (h_run.only_case < 0) CHECK(resumed > 0 && from_holder > 0 && refetched > 0 && lost > 0);
    resumed = again = refused = lost = torn = kept = from_owner = from_holder = refetched = 0;
    ahead = 0;
}

TEST(deaths) { run_cases(h_run.large ? 20000 : 400, 0); }
TEST(lent) { run_cases(h_run.large ? 5000 : 100, 1); }

int main(int argc, char **argv)
{
    static const h_test tests[] = { ENTRY(deaths), ENTRY(lent) };
    return h_main(argc, argv, tests, sizeof tests / sizeof tests[0]);
}
