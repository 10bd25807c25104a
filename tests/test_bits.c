/* The promise on bits. Proves that with shards on the grid of blocks O and LSE do not depend on
 * the number of ranks, the cuts, chunks, buffers, threads, transport or kind of call, and that
 * ra_attention with the same layout gives the same bits. For every mask, contiguous and zigzag, on
 * every instruction set. */
#include "harness.h"
#define RINGATTN_IMPLEMENTATION
#include "ringattn.h"
#include "oracle.h"
#include "world.h"

static void same_bits(const problem *p, const setup *s, const outcome *first, int promised) {
    outcome r;
    int any = 1;
    describe_case(p, s);
    r = world_run(p, s);
    if (outcome_whole(&r)) {
        for (int i = 0; i < s->ranks && s->call >= CALL_FORWARD && s->call <= CALL_JOIN; i++) {
            any &= r.report[i].forward.bits_any_ranks;
        }
        if (promised) CHECK(any);
        if (any) {
            CHECK_BITS(r.o, first->o, p->B * p->q_max * p->Hq * p->Dv * 4);
            CHECK_BITS(r.lse, first->lse, p->B * p->q_max * p->Hq * 4);
        }
    }
    outcome_free(&r);
}

/* One problem on 1 rank, then on other numbers of ranks, then with uneven cuts, then by L1. */
static void all_the_same(int64_t index, int mask, int32_t layout, int32_t isa) {
    static const int worlds[5] = { 2, 3, 4, 5, 8 };
    h_rng r = h_case_rng(index);
    int most = (isa == RA_ISA_SCALAR || H_SLOW) && !h_run.large ? 3 : 8, i;
    problem p;
    setup s;
    outcome first;
    if (!h_case(index)) return;
    problem_of_blocks(&p, &r, mask, 2 * most + h_range(&r, 0, 3), isa, 0);
    setup_plain(&s, 1, layout);
    s.isa = isa;
    s.chunk_tokens = 64;
    describe_case(&p, &s);
    first = world_run(&p, &s);
    if (outcome_whole(&first)) {
        CHECK(first.report[0].forward.bits_any_ranks == 1);
        for (i = 0; i < 5 && worlds[i] <= most; i++) {
            variant(&s, &r, worlds[i]);
            same_bits(&p, &s, &first, 1);
        }
        for (i = 0; i < 2; i++) {
            variant(&s, &r, (int)h_range(&r, 2, most));
            uneven(&s, &p, &r);
            same_bits(&p, &s, &first, 1);
        }
        variant(&s, &r, 1);
        s.call = CALL_ATTENTION;
        s.threads = (int32_t)h_range(&r, 1, 4);
        if (p.q_max * p.Hq / p.Hkv > 16) same_bits(&p, &s, &first, 0);  /* otherwise decoding */
    }
    outcome_free(&first);
    problem_free(&p);
}

static void every_mask(int32_t isa) {
    static const int32_t layouts[2] = { RA_LAYOUT_CONTIGUOUS, RA_LAYOUT_ZIGZAG };
    int64_t n = h_run.large ? 10 : 1;
    if (!ra_isa_available(isa)) {
        h_skip("this machine does not have the instruction set");
        return;
    }
    for (int64_t i = 0; i < 2 * MASKS * n; i++) {
        int mask = (int)(i % MASKS), zigzag = (int)(i / MASKS % 2);
        if (h_variant(mask + isa, zigzag)) all_the_same(i, mask, layouts[zigzag], isa);
    }
}

TEST(every_mask_scalar) { every_mask(RA_ISA_SCALAR); }
TEST(every_mask_avx2)   { every_mask(RA_ISA_AVX2); }
TEST(every_mask_avx512) { every_mask(RA_ISA_AVX512); }
TEST(every_mask_avx512_bf16) { every_mask(RA_ISA_AVX512_BF16); }
TEST(every_mask_amx)    { every_mask(RA_ISA_AMX); }
TEST(every_mask_neon)   { every_mask(RA_ISA_NEON); }

/* Any shape and layout at all: whatever says bits_any_ranks must keep to it. */
TEST(whoever_promises_keeps) {
    wish w = { -1, 0, 0, -1, 4e5 };
    int64_t n = h_run.large ? 5000 : 150;
    int kept = 0;
    for (int64_t i = 0; i < n; i++) {
        static const int kinds[4] = { L_CONTIGUOUS, L_ZIGZAG, L_CONTIGUOUS_W, L_ZIGZAG_W };
        h_rng r = h_case_rng(i);
        problem p;
        setup s, one;
        outcome first;
        if (!h_case(i)) continue;
        w.layout = kinds[i % 4];
        random_problem(&p, &r, &w);
        random_setup(&s, &p, &r, &w);
        problem_data(&p, &r);
        s.any_isa = 0;                                 /* bits are those of one instruction set */
        one = s;
        one.ranks = 1;
        one.weighted = 0;
        one.call = CALL_FORWARD;
        one.wire = WIRE_SHARED;
        s.call = CALL_FORWARD;
        describe_case(&p, &one);
        first = world_run(&p, &one);
        if (outcome_whole(&first) && first.report[0].forward.bits_any_ranks) {
            same_bits(&p, &s, &first, 0);
            for (int j = 2; j <= 3; j++) {
                variant(&s, &r, j);
                same_bits(&p, &s, &first, 0);
                kept++;
            }
        }
        outcome_free(&first);
        problem_free(&p);
    }
    if (h_run.only_case < 0) CHECK(kept > 100);
}

/* The comparison sees differences: two layouts sum in two orders, and striped sums in as many as
 * there are ranks, which the plan admits. */
TEST(other_orders_differ) {
    h_rng r = h_case_rng(0);
    problem p;
    setup s;
    outcome a, b, c, d;
    size_t bytes;
    problem_shape(&p, 18 * 64 - 5, 2, 1, 16, 16);
    p.mask.kind = RA_MASK_CAUSAL;
    problem_data(&p, &r);
    bytes = (size_t)(p.q_max * p.Hq * p.Dv) * 4;
    setup_plain(&s, 1, RA_LAYOUT_CONTIGUOUS);
    a = world_run(&p, &s);
    s.layout = RA_LAYOUT_ZIGZAG;
    b = world_run(&p, &s);
    s.layout = RA_LAYOUT_STRIPED;
    s.ranks = 3;
    c = world_run(&p, &s);
    s.ranks = 4;
    d = world_run(&p, &s);
    CHECK(outcome_whole(&a) && outcome_whole(&b) && outcome_whole(&c) && outcome_whole(&d));
    CHECK(memcmp(a.o, b.o, bytes) != 0);
    CHECK(memcmp(c.o, d.o, bytes) != 0);
    CHECK_EQ(a.report[0].forward.bits_any_ranks, 1);
    CHECK_EQ(b.report[0].forward.bits_any_ranks, 1);
    CHECK_EQ(c.report[2].forward.bits_any_ranks, 0);
    CHECK_EQ(d.report[3].forward.bits_any_ranks, 0);
    outcome_free(&a); outcome_free(&b); outcome_free(&c); outcome_free(&d);
    problem_free(&p);
}

/* Rounds: bits that follow from ranks and chunks alone, whatever the transport, the threads, the
 * buffers and the call. They are other ones than those of the usual order, and on one rank they are
 * the same. */
TEST(rounds) {
    static const int worlds[5] = { 2, 3, 4, 5, 8 };
    int64_t n = h_run.large ? 10 : 1;
    int differ = 0;
    for (int64_t i = 0; i < 2 * MASKS * n; i++) {
        const int P = worlds[i % 5], mask = (int)(i % MASKS), zigzag = (int)(i / MASKS % 2);
        h_rng r = h_case_rng(i);
        problem p;
        setup s = { 0 };
        outcome usual, first, again;
        size_t bytes;
        if (!h_case(i) || !h_variant(mask, zigzag)) continue;
        problem_of_blocks(&p, &r, mask, 2 * P + h_range(&r, 0, 3), RA_ISA_AUTO, 0);
        bytes = (size_t)(p.B * p.q_max * p.Hq * p.Dv) * 4;
        s.layout = zigzag ? RA_LAYOUT_ZIGZAG : RA_LAYOUT_CONTIGUOUS;
        s.call = CALL_FORWARD;
        s.ranks = 1;
        s.order = RA_ORDER_ROUNDS;
        first = world_run(&p, &s);
        s.order = 0;
        usual = world_run(&p, &s);
        if (outcome_whole(&first) && outcome_whole(&usual)) {
            CHECK_BITS(first.o, usual.o, (int64_t)bytes);
            CHECK_EQ(first.report[0].forward.bits_any_ranks, 1);
            CHECK_EQ(first.report[0].order, usual.report[0].order);
        }
        outcome_free(&first);
        s.ranks = P;
        s.chunk_tokens = 128;
        s.order = RA_ORDER_ROUNDS;
        first = world_run(&p, &s);
        if (outcome_whole(&first) && outcome_whole(&usual)) {
            differ += memcmp(first.o, usual.o, bytes) != 0;
            CHECK_EQ(first.report[0].forward.bits_any_ranks, 0);
            CHECK_EQ(first.report[0].order, RA_ORDER_ROUNDS);
        }
        for (int j = 0; j < 4; j++) {
            variant(&s, &r, P);
            s.chunk_tokens = 128;
            describe_case(&p, &s);
            again = world_run(&p, &s);
            if (outcome_whole(&first) && outcome_whole(&again)) {
                CHECK_BITS(again.o, first.o, (int64_t)bytes);
                CHECK_BITS(again.lse, first.lse, p.B * p.q_max * p.Hq * 4);
            }
            outcome_free(&again);
        }
        outcome_free(&first);
        outcome_free(&usual);
        problem_free(&p);
    }
    if (h_run.only_case < 0) CHECK(differ > MASKS / 2);
}

/* ra_attention of few tokens and grouped heads, whose lanes are (token, head) pairs and whose tasks
 * are several kv heads, gives the bits of a ring of one, whose lanes are tokens. */
TEST(lanes_of_pairs) {
    enum { T = 63, HQ = 20, HKV = 5, D = 40, K = 264 };
    static float q[T * HQ * D], k[K * HKV * D], v[K * HKV * D], o[2][T * HQ * D], lse[2][T * HQ];
    static uint16_t half[3][T * HQ * D + K * HKV * D];
    static uint8_t memory[(8 << 20) + 64];
    uint8_t *workspace = memory + (64 - (uintptr_t)memory % 64) % 64;
    h_rng r = h_case_rng(0);
    for (int64_t i = 0; i < T * HQ * D; i++) q[i] = h_normal(&r);
    for (int64_t i = 0; i < K * HKV * D; i++) { k[i] = h_normal(&r); v[i] = h_normal(&r); }
    ra_convert(half[0], RA_BF16, q, RA_F32, T * HQ * D);
    ra_convert(half[1], RA_BF16, k, RA_F32, K * HKV * D);
    ra_convert(half[2], RA_BF16, v, RA_F32, K * HKV * D);
    for (int64_t i = 0; i < 2 * 3 * (RA_ISA_NEON + 1); i++) {
        ra_desc d = { 0 };
        ra_tensors t = { 0 };
        d.isa = (int32_t)(i / 6);
        if (!h_case(i) || !ra_isa_available(d.isa)) continue;
        d.tokens = h_range(&r, 5, T);
        d.q_offset = K - T;
        d.q_heads = HQ; d.kv_heads = HKV; d.k_dim = d.v_dim = D;
        d.q_dtype = d.k_dtype = d.v_dtype = i % 2 ? RA_BF16 : RA_F32;
        d.o_dtype = RA_F32;
        d.mask.kind = RA_MASK_CAUSAL;
        d.mask.window = i % 3 ? 70 : 0;
        t.q.data = i % 2 ? (void *)half[0] : q;
        t.k.data = i % 2 ? (void *)half[1] : k;
        t.v.data = i % 2 ? (void *)half[2] : v;
        t.o.data = o[0];
        t.lse.data = lse[0];
        for (int64_t j = 0; j < 1 + i % 3; j++) {
            CHECK_EQ(ra_attention(&d, &t, workspace, 8 << 20, (int)j, 1 + (int)(i % 3)), RA_OK);
        }
        t.o.data = o[1];
        t.lse.data = lse[1];
        CHECK_EQ(ra_ring_once(&d, NULL, &t, 0), RA_OK);
        CHECK_BITS(o[0], o[1], d.tokens * HQ * D * 4);
        CHECK_BITS(lse[0], lse[1], d.tokens * HQ * 4);
    }
}

/* One block that the cut at a power of two would split: nothing is promised off the grid. */
TEST(no_promise_off_the_grid) {
    h_rng r = h_case_rng(0);
    problem p;
    setup s;
    outcome a;
    problem_shape(&p, 300, 1, 1, 8, 8);        /* 5 blocks, fewer than 2 per rank */
    p.mask.kind = RA_MASK_CAUSAL;
    problem_data(&p, &r);
    setup_plain(&s, 3, RA_LAYOUT_CONTIGUOUS);
    a = world_run(&p, &s);
    CHECK(outcome_whole(&a));
    CHECK_EQ(a.report[0].forward.bits_any_ranks, 0);
    outcome_free(&a);
    problem_free(&p);
}

static const h_test tests[] = {
    ENTRY(every_mask_scalar), ENTRY(every_mask_avx2), ENTRY(every_mask_avx512),
    ENTRY(every_mask_avx512_bf16), ENTRY(every_mask_amx),
    ENTRY(every_mask_neon), ENTRY(whoever_promises_keeps), ENTRY(other_orders_differ),
    ENTRY(rounds), ENTRY(lanes_of_pairs), ENTRY(no_promise_off_the_grid)
};

int main(int argc, char **argv) {
    return h_main(argc, argv, tests, sizeof tests / sizeof tests[0]);
}
