/* Gradients over a ring. Proves that their bits do not depend on the number of ranks, the cut, the
 * chunks, buffers, threads, transport, return path or kind of call, that ra_attention_backward
 * gives the same bits, and that a pass moves and computes exactly what its plan reports. */
#include "harness.h"
#define RINGATTN_IMPLEMENTATION
#include "ringattn.h"
#include "oracle.h"
#include "world.h"

/* A pass counted what its plan reports. */
static void counters_agree(const setup *s, const outcome *r) {
    int shared = s->wire == WIRE_SHARED;
    if (s->call < CALL_FORWARD || s->call > CALL_JOIN) return;
    for (int i = 0; i < s->ranks; i++) {
        const ra_plan_report *plan = &r->report[i];
        const ra_ring_counters *c = &r->counters[i];
        CHECK_EQ(c->chunks_in, plan->backward.chunks_in);
        CHECK_EQ(c->chunks_out, plan->backward.chunks_out);
        CHECK_EQ(c->bytes_in, shared ? plan->backward.shared_bytes_in : plan->backward.bytes_in);
        CHECK_EQ(c->bytes_out, shared ? plan->backward.shared_bytes_out : plan->backward.bytes_out);
        CHECK_EQ(c->tiles_full, plan->backward.tiles_full);
        CHECK_EQ(c->tiles_partial, plan->backward.tiles_partial);
        CHECK_EQ(c->tiles_empty, plan->backward.tiles_empty);
    }
}

/* The gradients have the same bits, and the counters are those of the plan. */
static void sums_agree(const problem *p, const setup *s, const outcome *r, const outcome *first) {
    CHECK_BITS(r->d_q, first->d_q, p->B * p->q_max * p->Hq * p->Dk * 4);
    CHECK_BITS(r->d_k, first->d_k, p->B * p->k_max * p->Hkv * p->Dk * 4);
    CHECK_BITS(r->d_v, first->d_v, p->B * p->k_max * p->Hkv * p->Dv * 4);
    counters_agree(s, r);
}

static int kept;                       /* comparisons that the plan promises */

static void same_gradients(const problem *p, const setup *s, const outcome *first) {
    outcome r;
    int any = 1;
    describe_case(p, s);
    r = world_run(p, s);
    if (outcome_whole(&r)) {
        for (int i = 0; i < s->ranks && s->call != CALL_ATTENTION; i++) {
            any &= r.report[i].backward.bits_any_ranks;
        }
        if (any) kept++;
        if (!any) first = &r;                      /* a sequence too short for the grid */
        sums_agree(p, s, &r, first);
    }
    outcome_free(&r);
}

/* A second world of RUNS that differs only in the length of its messages has the same bits. */
static void same_sums(const problem *p, const setup *s, const outcome *first) {
    outcome r;
    describe_case(p, s);
    r = world_run(p, s);
    if (outcome_whole(&r)) {
        CHECK_BITS(r.o, first->o, p->B * p->q_max * p->Hq * p->Dv * 4);
        sums_agree(p, s, &r, first);
    }
    outcome_free(&r);
}

/* The return path changes too. */
static void train_variant(setup *s, h_rng *r, int ranks) {
    variant(s, r, ranks);
    s->grad_return = h_one_in(r, 3) ? RA_RETURN_RING : RA_RETURN_DIRECT;
    s->exact = h_one_in(r, 2);
}

/* One problem on 1 rank, then on other numbers of ranks, then with uneven cuts, then by L1. */
static void all_the_same(int64_t index, int mask, int32_t layout, int32_t isa) {
    static const int worlds[6] = { 2, 3, 4, 5, 7, 8 };
    h_rng r = h_case_rng(index);
    int most = (isa == RA_ISA_SCALAR || H_SLOW) && !h_run.large ? 3 : 8, i;
    problem p;
    setup s;
    outcome first;
    if (!h_case(index)) return;
    problem_of_blocks(&p, &r, mask, 2 * most + h_range(&r, 0, 3), isa, 1);
    setup_plain(&s, 1, layout);
    s.isa = isa;
    s.chunk_tokens = 64;
    s.train = 1;
    describe_case(&p, &s);
    first = world_run(&p, &s);
    if (outcome_whole(&first)) {
        CHECK(first.report[0].backward.bits_any_ranks == 1);
        for (i = 0; i < 6 && worlds[i] <= most; i++) {
            if (!h_run.large && i != index % 6) continue;              /* one of them per case */
            train_variant(&s, &r, worlds[i]);
            same_gradients(&p, &s, &first);
        }
        train_variant(&s, &r, (int)h_range(&r, 2, most));
        uneven(&s, &p, &r);
        same_gradients(&p, &s, &first);
        train_variant(&s, &r, 1);
        s.call = CALL_ATTENTION;
        s.threads = (int32_t)h_range(&r, 1, 4);
        same_gradients(&p, &s, &first);
    }
    outcome_free(&first);
    problem_free(&p);
}

static void every_mask(int32_t isa) {
    static const int32_t layouts[2] = { RA_LAYOUT_CONTIGUOUS, RA_LAYOUT_ZIGZAG };
    int64_t n = h_run.large ? 10 : 1, cases = 0;
    if (!isa_is_here(isa)) return;
    kept = 0;
    for (int64_t i = 0; i < 2 * MASKS * n; i++) {
        int mask = (int)(i % MASKS), zigzag = (int)(i / MASKS % 2);
        if (!h_variant(mask + isa, zigzag)) continue;
        all_the_same(i, mask, layouts[zigzag], isa);
        cases++;
    }
    if (h_run.only_case < 0) CHECK(kept > cases);
}

TEST(every_mask_scalar) { every_mask(RA_ISA_SCALAR); }
TEST(every_mask_avx2)   { every_mask(RA_ISA_AVX2); }
TEST(every_mask_avx512) { every_mask(RA_ISA_AVX512); }
TEST(every_mask_avx512_bf16) { every_mask(RA_ISA_AVX512_BF16); }
TEST(every_mask_neon)   { every_mask(RA_ISA_NEON); }

/* -------------------------------------------------------------------------- the oracle */
static void as_the_oracle(const problem *p, const setup *s) {
    outcome r;
    describe_case(p, s);
    r = world_run(p, s);
    if (outcome_whole(&r)) {
        CHECK(outcome_gradients(&r, p) <= 1);
        counters_agree(s, &r);
    }
    outcome_free(&r);
}

/* Any shape, mask, layout, dtypes, transport, call. */
TEST(layouts) {
    wish w = { ANY, L_CONTIGUOUS, ANY, ANY, 3e5 };
    int64_t n = h_run.large ? 3000 : 160;
    for (int64_t i = 0; i < n; i++) {
        h_rng r = h_case_rng(i);
        problem p;
        setup s;
        if (!h_case(i) || !h_variant(i % LAYOUTS, (int)(i / LAYOUTS % 2))) continue;
        w.layout = (int)(i % LAYOUTS);
        random_problem(&p, &r, &w);
        random_setup(&s, &p, &r, &w);
        if (s.call == CALL_ATTEND || s.call == CALL_ATTENTION) s.call = CALL_FORWARD;
        s.train = 1;
        s.no_lse = s.any_isa = s.passes = 0;
        s.grad_return = h_one_in(&r, 3) ? RA_RETURN_RING : RA_RETURN_DIRECT;
        problem_data(&p, &r);
        problem_cotangent(&p, &r);
        if (h_one_in(&r, 4)) p.dropout = 0.5f;
        as_the_oracle(&p, &s);
        setup_free(&s);
        problem_free(&p);
    }
}

/* Chunks of many short runs, of keys and of queries. The length of messages changes no bit. */
TEST(many_short_runs) {
    wish w = { ANY, L_RUNS, ANY, ANY, 3e5 };
    int64_t n = h_run.large ? 2000 : 60;
    for (int64_t i = 0; i < n; i++) {
        h_rng r = h_case_rng(i);
        problem p;
        setup s;
        outcome first;
        if (!h_case(i)) continue;
        random_problem(&p, &r, &w);
        random_setup(&s, &p, &r, &w);
        short_layout(&s, &p, &r);
        s.call = CALL_FORWARD;
        s.train = 1;
        s.threads = 0;
        s.no_lse = s.any_isa = s.passes = 0;
        s.order = 0;                   /* rounds depend on chunks */
        problem_data(&p, &r);
        problem_cotangent(&p, &r);
        s.chunk_tokens = 4096;
        as_the_oracle(&p, &s);
        first = world_run(&p, &s);
        s.chunk_tokens = 64;
        if (outcome_whole(&first)) same_sums(&p, &s, &first);
        outcome_free(&first);
        setup_free(&s);
        problem_free(&p);
    }
}

/* Errors do not grow with the number of ranks. */
TEST(sixty_four_ranks) {
    h_rng r = h_case_rng(0);
    problem p;
    setup s;
    problem_shape(&p, 700, 2, 1, 16, 16);
    p.mask.kind = RA_MASK_CAUSAL;
    problem_data(&p, &r);
    problem_cotangent(&p, &r);
    setup_plain(&s, 64, RA_LAYOUT_ZIGZAG);
    s.train = 1;
    as_the_oracle(&p, &s);
    s.layout = RA_LAYOUT_STRIPED;
    as_the_oracle(&p, &s);
    problem_free(&p);
}

/* One rank alone keeps the first blocks of 16-bit keys in the form of its kernels, for tasks of
 * many queries. A ring does not. */
TEST(more_blocks_than_are_kept) {
    h_rng r = h_case_rng(0);
    problem p;
    setup s;
    outcome first;
    problem_shape(&p, 258 * 64 + 3, 1, 1, 8, 8);
    p.tq[0] = p.q_max = 20 * 64 + 7;               /* three batches of panels */
    problem_dtypes(&p, RA_BF16, RA_BF16, RA_BF16, RA_BF16);
    problem_data(&p, &r);
    problem_cotangent(&p, &r);
    setup_plain(&s, 1, RA_LAYOUT_CONTIGUOUS);
    s.train = 1;
    first = world_run(&p, &s);
    s.call = CALL_ATTENTION;
    s.threads = 1;
    if (outcome_whole(&first)) same_gradients(&p, &s, &first);
    outcome_free(&first);
    problem_free(&p);
}

/* More threads than kv heads: dQ apart from dK and dV. Few threads, for a race detector. */
TEST(threads) {
    for (int64_t i = 0; i < 6; i++) {
        h_rng r = h_case_rng(i);
        problem p;
        setup s = { 0 };
        if (!h_case(i)) continue;
        problem_shape(&p, 500, 2, 1, 8, 8);
        p.mask.kind = i % 2 ? RA_MASK_CAUSAL : RA_MASK_NONE;
        problem_data(&p, &r);
        problem_cotangent(&p, &r);
        s.layout = i < 3 ? RA_LAYOUT_ZIGZAG : RA_LAYOUT_CONTIGUOUS;
        s.ranks = 3;
        s.seed = h_next(&r) | 1u << 8;         /* any thread may call the transport */
        s.wire = i % 3 ? WIRE_SHARED : WIRE_POST;
        s.call = i % 2 ? CALL_STEP : CALL_JOIN;
        s.threads = 3;
        s.chunk_tokens = 64;
        s.train = 1;
        as_the_oracle(&p, &s);
        problem_free(&p);
    }
}

/* -------------------------------------------------------------------------- memory */
static ra_plan_report report_of(const ra_desc *d) {
    ra_plan *plan = NULL;
    ra_plan_report g = { 0 };
    if (CHECK_EQ(ra_plan_create(&plan, d, NULL), RA_OK)) {
        CHECK_EQ(ra_plan_query(plan, d->rank, &g), RA_OK);
    }
    ra_plan_destroy(plan);
    return g;
}

/* Beyond its state and the scratch of threads, a rank has the chunks that the promise on memory
 * counts, for any ranks, shards and layouts. If messages are copied and shards have 32K
 * tokens or more, that is less than a second shard. */
TEST(memory_as_promised) {
    static const int64_t shards[3] = { 4096, 8192, 32768 };
    enum { ZIGZAG = 1, IN_BF16 = 2, KINDS = 4 };
    int64_t i = 0;
    for (int32_t ranks = 2; ranks <= 16; ranks *= 2)
    for (int which = 0; which < 3; which++)
    for (int kind = 0; kind < KINDS; kind++, i++) {
        const int zigzag = kind & ZIGZAG, bf16 = kind & IN_BF16;
        const int64_t shard = shards[which];
        int64_t gradients, thread, forward, back, lists, kv;
        ra_plan_report one, two, alone;
        ra_desc d = ra_desc_make(4, 2, 128, bf16 ? RA_BF16 : RA_F32, RA_MASK_CAUSAL), bare;
        if (!h_case(i)) continue;
        d.ranks = ranks;
        d.rank = d.ranks / 2;
        d.layout.kind = zigzag ? RA_LAYOUT_ZIGZAG : RA_LAYOUT_CONTIGUOUS;
        d.tokens = shard * d.ranks;
        d.v_dim = 64;
        d.train = 1;
        one = report_of(&d);
        d.threads = 2;
        two = report_of(&d);
        bare = d;                      /* the ring has room for a pass without gradients */
        bare.threads = 1;
        bare.train = 0;
        alone = report_of(&bare);
        CHECK(alone.workspace_bytes <= one.workspace_bytes);
        CHECK(alone.shared_workspace_bytes <= one.shared_workspace_bytes);
        thread = two.workspace_bytes - one.workspace_bytes;
        gradients = one.chunk_tokens * 2 * (128 + 64) * 4 + 4096;
        kv = shard * (128 + 64) * (bf16 ? 2 : 4) * d.kv_heads;
        lists = 65536;
        forward = one.forward.state_bytes + (alone.buffers + 2) * one.forward.chunk_bytes + thread +
                  lists;
        back = one.backward.state_bytes + (one.buffers + 2) * one.backward.chunk_bytes +
               4 * gradients + thread + lists;
        CHECK(one.workspace_bytes <= (forward > back ? forward : back));
        if (shard >= 32768) CHECK(back - one.backward.state_bytes - thread < kv);
        forward = one.forward.state_bytes + thread + lists;
        back = one.backward.state_bytes + (d.ranks + 3) * gradients + thread + lists;
        CHECK(one.shared_workspace_bytes <= (forward > back ? forward : back));
    }
}

/* A forward plan has more buffers by default. A ring made by the training plan has room for
 * them. */
TEST(training_has_room_for_forward) {
    for (int32_t ranks = 2; ranks <= 16; ranks *= 2) {
        ra_plan_report train, alone;
        ra_desc d = ra_desc_make(32, 1, 128, RA_BF16, RA_MASK_CAUSAL);
        d.ranks = ranks;
        d.layout.kind = RA_LAYOUT_ZIGZAG;
        d.tokens = ranks < 8 ? 131072 : 524288;
        alone = report_of(&d);
        d.train = 1;
        train = report_of(&d);
        CHECK(alone.buffers > train.buffers);
        CHECK(alone.workspace_bytes <= train.workspace_bytes);
        CHECK(alone.shared_workspace_bytes <= train.shared_workspace_bytes);
    }
}

/* -------------------------------------------------------------------------- refusals */
static int no_ops(void *ctx, ra_transport_op *const *ops, int n) {
    (void)ctx;
    (void)ops;
    (void)n;
    return 0;
}
static int no_engine(void *ctx, const ra_block *b) { (void)ctx; (void)b; return 0; }

static void train_desc(ra_desc *d, ra_error *e) {
    *d = ra_desc_make(1, 1, 8, RA_F32, RA_MASK_CAUSAL);
    d->ranks = 3;
    d->tokens = 640;
    d->layout.kind = RA_LAYOUT_ZIGZAG;
    d->train = 1;
    d->error = e;
}

static void refused(ra_status got, const ra_error *e, ra_status status, const char *field) {
    CHECK_EQ(got, status);
    CHECK_EQ(e->status, status);
    CHECK(strcmp(e->field, field) == 0);
    if (strcmp(e->field, field)) printf("    %s, not %s: %s\n", e->field, field, e->text);
}

TEST(refusals) {
    ra_error e;
    ra_desc d;
    ra_engine engine = { 0 };
    ra_plan *plan = NULL;
    ra_ring *ring = NULL;
    ra_ring_desc rd = { 0 };
    ra_transport tp = { 0 };
    ra_job job = { 0 };
    ra_tensors t = { 0 };
    rd.error = &e;
    train_desc(&d, &e);
    d.grad_return = 2;
    refused(ra_plan_create(&plan, &d, NULL), &e, RA_E_ENUM, "grad_return");
    d.grad_return = RA_RETURN_RING;
    d.train = 0;
    refused(ra_plan_create(&plan, &d, NULL), &e, RA_E_SHAPE, "grad_return");
    train_desc(&d, &e);
    engine.size = sizeof engine;
    engine.abi = RA_ENGINE_ABI;
    engine.fold = no_engine;
    d.engine = &engine;
    refused(ra_plan_create(&plan, &d, NULL), &e, RA_E_UNSUPPORTED, "train");
    d.engine = NULL;
    CHECK_EQ(ra_plan_create(&plan, &d, NULL), RA_OK);
    tp.size = sizeof tp;
    tp.abi = RA_TRANSPORT_ABI;
    tp.post = tp.poll = no_ops;
    tp.channels = 1;
    tp.max_ops = 3;
    tp.caps = RA_CAP_ANY_PEER;
    refused(ra_ring_create(&ring, plan, &tp, &rd), &e, RA_E_TRANSPORT, "transport.channels");
    tp.channels = 2;
    tp.max_ops = 2;
    refused(ra_ring_create(&ring, plan, &tp, &rd), &e, RA_E_TRANSPORT, "transport.max_ops");
    tp.max_ops = 3;
    tp.caps = 0;
    refused(ra_ring_create(&ring, plan, &tp, &rd), &e, RA_E_TRANSPORT, "transport.caps");
    tp.caps = RA_CAP_ANY_PEER;
    CHECK_EQ(ra_ring_create(&ring, plan, &tp, &rd), RA_OK);
    job.plan = plan;
    job.tensors = &t;
    job.pass = 2;
    refused(ra_begin(ring, &job), ra_ring_error(ring), RA_E_ENUM, "job.pass");
    job.pass = RA_PASS_BACKWARD;
    ra_plan_destroy(plan);
    ra_ring_destroy(ring);
    d.train = 0;
    CHECK_EQ(ra_plan_create(&plan, &d, NULL), RA_OK);
    CHECK_EQ(ra_ring_create(&ring, plan, &tp, &rd), RA_OK);
    refused(ra_backward(plan, ring, &t, RA_NO_DEADLINE), ra_ring_error(ring), RA_E_SHAPE,
            "job.pass");
    ra_ring_destroy(ring);
    ra_plan_destroy(plan);
}

static const h_test tests[] = {
    ENTRY(every_mask_scalar), ENTRY(every_mask_avx2), ENTRY(every_mask_avx512),
    ENTRY(every_mask_avx512_bf16),
    ENTRY(every_mask_neon), ENTRY(layouts), ENTRY(many_short_runs), ENTRY(sixty_four_ranks),
    ENTRY(more_blocks_than_are_kept), ENTRY(threads), ENTRY(memory_as_promised),
    ENTRY(training_has_room_for_forward),
    ENTRY(refusals)
};

int main(int argc, char **argv) {
    return h_main(argc, argv, tests, sizeof tests / sizeof tests[0]);
}
