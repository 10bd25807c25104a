/* The promise on bits. Proves that with shards on the grid of blocks O and LSE do not depend on
 * the number of ranks, the cuts, chunks, buffers, threads, transport or kind of call, and that
 * ra_attention with the same layout gives the same bits. For every mask, contiguous and zigzag, on
 * every instruction set. And that with RA_FORM_SAME rows have the bits of the row alone. */
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
    if (!isa_is_here(isa)) return;
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

/* Any shape and layout: whatever the plan says in bits_any_ranks must be true. */
TEST(promised_bits_are_kept) {
    wish w = { ANY, L_CONTIGUOUS, ANY, ANY, 4e5 };
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

/* The comparison sees differences: two layouts have two orders of sums, and striped has one for
 * each number of ranks, which its plan reports. */
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

/* Rounds: bits depend on ranks and chunks, not on the transport, threads, buffers or call. They
 * differ from those of the usual order, except on one rank. */
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

/* ra_attention of few tokens and grouped heads, whose panels have head rows and whose tasks have
 * several kv heads, has the bits of a ring of one, whose panels have the rows of a head. */
TEST(panels_of_head_rows) {
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
        ra_desc d = ra_desc_make(HQ, HKV, D, i % 2 ? RA_BF16 : RA_F32, RA_MASK_CAUSAL);
        ra_tensors t = { 0 };
        d.isa = (int32_t)(i / 6);
        if (!h_case(i) || !ra_isa_available(d.isa)) continue;
        d.tokens = h_range(&r, 5, T);
        d.q_offset = K - T;
        d.o_dtype = RA_F32;
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

/* A block that the cut at a power of two would split: off the grid nothing is promised. */
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

/* -------------------------------------------------------------------------- RA_FORM_SAME */
/* A call of some rows, and its memory. K and V are [sequence][token][head] or, if `apart` is 1,
 * [sequence][head][token], or in pages. */
enum { SAME_T = 64, SAME_K = 1400, SAME_FLOATS = 1 << 21, SAME_BIAS = 1 << 17, SAME_B = 3 };
typedef struct many_rows {
    ra_desc d;
    ra_tensors t;
    int apart, arrays;
    int32_t at[SAME_B * SAME_T], page[SAME_B * SAME_K / 16 + 64], lo[SAME_K], hi[SAME_K];
    int64_t docs[3];
    float alibi[64], sinks[64];
    uint8_t q[4 * SAME_FLOATS], k[4 * SAME_FLOATS], v[4 * SAME_FLOATS], bias[2 * SAME_BIAS];
} many_rows;

static void same_fill(h_rng *r, void *to, int32_t dtype, int64_t n) {
    static float x[SAME_FLOATS];
    for (int64_t i = 0; i < n; i++) x[i] = h_normal(r);
    CHECK_EQ(ra_convert(to, dtype, x, RA_F32, n), RA_OK);
}

static int64_t same_bytes(int32_t dtype, int64_t n) {
    if (dtype >= RA_Q8_0) return n / 32 * (dtype == RA_Q8_0 ? 34 : 18);
    return dtype == RA_F32 ? 4 * n : 2 * n;
}

static void same_mask(many_rows *m, h_rng *r) {
    ra_mask *mask = &m->d.mask;
    const int64_t keys = m->d.kv_tokens;
    mask->kind = (int32_t)h_range(r, RA_MASK_NONE, RA_MASK_INTERVALS);
    if (mask->kind == RA_MASK_INTERVALS) {
        for (int64_t i = 0; i < keys; i++) {
            m->lo[i] = (int32_t)h_range(r, 0, keys);
            m->hi[i] = (int32_t)h_range(r, 0, keys);
        }
        mask->lo = m->lo;
        mask->hi = m->hi;
        mask->interval_count = keys;
        return;
    }
    if (h_one_in(r, 3)) mask->window = h_range(r, 1, keys);
    if (h_one_in(r, 4)) mask->keep = h_range(r, 1, 40);
    if (h_one_in(r, 5)) mask->prefix = h_range(r, 1, keys);
    if (h_one_in(r, 5) && mask->kind == RA_MASK_CAUSAL) mask->causal_block = 16;
    if (h_one_in(r, 4)) {
        m->docs[1] = h_range(r, 1, keys);
        m->docs[2] = m->docs[1] + h_range(r, 1, 30);
        mask->doc_first = m->docs;
        mask->doc_count = h_range(r, 2, 3);
    }
}

static void same_scores(many_rows *m, h_rng *r) {
    ra_desc *d = &m->d;
    ra_bias *bias = &m->t.bias;
    d->scores = h_one_in(r, 2) ? 0 : (int32_t)h_range(r, 0, 7);
    if (h_one_in(r, 5)) d->softcap = 20.0f;
    for (int i = 0; i < 64; i++) m->alibi[i] = 0.02f * (float)i;
    same_fill(r, m->sinks, RA_F32, 64);
    if (d->scores & RA_SCORE_ALIBI) m->t.alibi = m->alibi;
    if (d->scores & RA_SCORE_SINKS) m->t.sinks = m->sinks;
    if (!(d->scores & RA_SCORE_BIAS)) return;
    bias->dtype = RA_BF16;
    same_fill(r, m->bias, RA_BF16, SAME_BIAS);
    if (h_one_in(r, 2))                /* blocks that are hidden from some rows */
        for (int64_t i = 0; i < 100; i++)
            for (int64_t j = 0, at = h_range(r, 0, SAME_BIAS - 200); j < 200; j++)
                memcpy(m->bias + 2 * (at + j), "\x80\xff", 2);
    bias->data = m->bias;
    bias->keys = h_range(r, 1, d->kv_tokens);
    bias->key_step = 2;
    bias->row_step = 2 * SAME_K;
    bias->head_step = h_one_in(r, 2) ? 2 * 64 : 0;
    bias->batch_step = 2 * 128;
}

/* The keys and values: side 0 and 1. */
static void same_keys(many_rows *m, h_rng *r, int side) {
    const ra_desc *d = &m->d;
    const int64_t dim = side ? d->v_dim : d->k_dim, heads = d->kv_heads;
    const int64_t row = same_bytes(side ? d->v_dtype : d->k_dtype, dim);
    const int64_t rows = d->page_tokens ? m->t.pages.count * d->page_tokens
                                        : d->sequences * d->kv_tokens;
    ra_in *x = side ? &m->t.v : &m->t.k;
    x->data = side ? m->v : m->k;
    same_fill(r, side ? m->v : m->k, side ? d->v_dtype : d->k_dtype, rows * heads * dim);
    x->head_stride = m->apart ? d->kv_tokens * row : row;
    x->token_stride = m->apart ? row : heads * row;
    x->batch_stride = (d->page_tokens ? d->page_tokens : d->kv_tokens) * heads * row;
}

static void same_pages(many_rows *m, h_rng *r) {
    ra_pages *p = &m->t.pages;
    m->d.page_tokens = (int32_t)(16 * h_range(r, 1, 5));
    p->first = h_range(r, 0, m->d.page_tokens - 1);
    p->batch_step = (m->d.kv_tokens + p->first) / m->d.page_tokens + 1;
    p->count = m->d.sequences * p->batch_step;
    p->table = m->page;
    for (int64_t i = 0; i < p->count; i++) m->page[i] = (int32_t)i;
    for (int64_t i = p->count - 1; i > 0; i--) {
        const int64_t j = h_range(r, 0, i);
        const int32_t swap = m->page[i];
        m->page[i] = m->page[j];
        m->page[j] = swap;
    }
}

static void same_random(many_rows *m, h_rng *r, int32_t isa) {
    static const int32_t dims[] = { 32, 64, 96, 128 }, groups[] = { 1, 1, 2, 3, 4, 8, 16, 17 };
    ra_desc *d = &m->d;
    memset(d, 0, sizeof *d);
    memset(&m->t, 0, sizeof m->t);
    d->isa = isa;
    d->form = RA_FORM_SAME;
    d->kv_heads = (int32_t)h_range(r, 1, 3);
    d->q_heads = d->kv_heads * groups[h_range(r, 0, 7)];
    d->k_dim = dims[h_range(r, 0, 3)];
    d->v_dim = h_one_in(r, 2) ? d->k_dim : dims[h_range(r, 0, 3)];
    d->k_dtype = (int32_t)h_range(r, RA_F32, RA_Q4_0);
    d->v_dtype = h_one_in(r, 3) ? (int32_t)h_range(r, RA_F32, RA_Q4_0) : d->k_dtype;
    d->q_dtype = h_one_in(r, 2) && d->k_dtype == RA_BF16 ? RA_BF16
                                                         : (int32_t)h_range(r, RA_F32, RA_BF16);
    d->o_dtype = (int32_t)h_range(r, RA_F32, RA_BF16);
    d->sequences = (int32_t)h_range(r, 1, SAME_B);
    d->tokens = h_range(r, 1, SAME_T);
    d->kv_tokens = h_range(r, d->tokens, h_one_in(r, 3) ? SAME_K : 200);
    d->q_offset = h_range(r, 0, d->kv_tokens - d->tokens);
    while (d->sequences * d->kv_tokens * d->kv_heads * 128 > SAME_FLOATS / 2) d->sequences--;
    m->apart = h_one_in(r, 3);
    m->arrays = h_one_in(r, 3);
    if (!m->apart && h_one_in(r, 3)) same_pages(m, r);
    for (int32_t i = 0; i < SAME_B * SAME_T; i++)
        m->at[i] = h_one_in(r, 20) ? -1 : (int32_t)h_range(r, 0, d->kv_tokens - 1);
    if (m->arrays) {
        m->t.q_pos.array = m->at;
        m->t.q_pos.count = m->t.q_pos.batch_step = d->tokens;
        m->t.q_pos.batch_step *= h_one_in(r, 2);
        d->q_offset = 0;
    }
    same_mask(m, r);
    same_scores(m, r);
    same_keys(m, r, 0);
    same_keys(m, r, 1);
    m->t.q.data = m->q;
    same_fill(r, m->q, d->q_dtype, d->sequences * d->tokens * d->q_heads * d->k_dim);
}

/* Makes the call on nth threads, one after another. */
static void same_run(const ra_desc *d, const ra_tensors *t, int nth) {
    static uint8_t memory[16 << 20];
    ra_error why = { 0 };
    ra_desc mine = *d;
    mine.error = &why;
    CHECK(ra_attention_bytes(d, nth) <= sizeof memory);
    for (int ith = 0; ith < nth; ith++)
        if (!CHECK_EQ(ra_attention(&mine, t, memory, ra_attention_bytes(d, nth), ith, nth), RA_OK))
            printf("    %s %s\n", why.field, why.text);
}

/* The call of one row of m. */
static void same_row(const many_rows *m, int32_t b, int64_t row, ra_desc *d, ra_tensors *t) {
    *d = m->d;
    *t = m->t;
    d->sequences = 1;
    d->tokens = 1;
    if (!m->arrays) d->q_offset += row;
    if (m->arrays) t->q_pos.array += b * t->q_pos.batch_step + row;
    if (m->arrays) t->q_pos.count = 1;
    t->q.data = m->q + (b * m->d.tokens + row) * same_bytes(d->q_dtype, d->q_heads * d->k_dim);
    if (d->page_tokens) t->pages.table += b * t->pages.batch_step;
    if (!d->page_tokens) t->k.data = m->k + b * t->k.batch_stride;
    if (!d->page_tokens) t->v.data = m->v + b * t->v.batch_stride;
    if (t->bias.data)
        t->bias.data = m->bias + b * t->bias.batch_step + row * t->bias.row_step;
}

/* Rows of any call have the bits of the row alone: 1 to 64 tokens, any threads, batch, dtypes,
 * mask, scores and pages. With RA_FORM_AUTO the bits of some rows differ. */
static void rows_of_any_call(int32_t isa) {
    static many_rows m;
    static float o[2][SAME_B * SAME_T * 51 * 128], lse[2][SAME_B * SAME_T * 51];
    static float one[51 * 128], one_lse[51];
    const int64_t n = h_run.large ? 2000 : H_SLOW ? 12 : 60;
    int differ = 0;
    if (!isa_is_here(isa)) return;
    for (int64_t i = 0; i < n; i++) {
        h_rng r = h_case_rng(i);
        if (!h_case(i)) continue;
        same_random(&m, &r, isa);
        const ra_desc *d = &m.d;
        const int64_t dims = d->q_heads * d->v_dim, bytes = same_bytes(d->o_dtype, dims);
        const int64_t rows = d->sequences * d->tokens;
        ra_desc x = m.d;
        ra_tensors t = m.t;
        h_context("%d/%d heads of %d, %d; dtypes %d %d %d; %d sequences of %d over %d tokens",
                  d->q_heads, d->kv_heads, d->k_dim, d->v_dim, d->q_dtype, d->k_dtype, d->v_dtype,
                  d->sequences, (int)d->tokens, (int)d->kv_tokens);
        for (int k = 0; k < 2; k++) {
            x.form = k ? RA_FORM_AUTO : RA_FORM_SAME;
            t.o.data = o[k];
            t.lse.data = lse[k];
            same_run(&x, &t, (int)h_range(&r, 1, 4));
        }
        CHECK_EQ(ra_attention_bytes(&x, 3), ra_attention_bytes(d, 3));
        const int other = memcmp(o[0], o[1], (size_t)(rows * bytes)) != 0;
        differ += other;
        if (d->q_heads > 16 * d->kv_heads) CHECK(!other);
        for (int64_t j = 0; j < rows; j += 1 + h_range(&r, 0, rows / 16)) {
            same_row(&m, (int32_t)(j / d->tokens), j % d->tokens, &x, &t);
            x.form = (int32_t)h_range(&r, RA_FORM_AUTO, RA_FORM_SAME);
            t.o.data = one;
            t.lse.data = one_lse;
            same_run(&x, &t, (int)h_range(&r, 1, 3));
            CHECK_BITS((uint8_t *)o[0] + j * bytes, one, bytes);
            CHECK_BITS(lse[0] + j * d->q_heads, one_lse, d->q_heads * 4);
        }
    }
    if (h_run.only_case < 0) CHECK(differ > n / 8);
}

TEST(rows_of_any_call_scalar) { rows_of_any_call(RA_ISA_SCALAR); }
TEST(rows_of_any_call_avx2)   { rows_of_any_call(RA_ISA_AVX2); }
TEST(rows_of_any_call_avx512) { rows_of_any_call(RA_ISA_AVX512); }
TEST(rows_of_any_call_avx512_bf16) { rows_of_any_call(RA_ISA_AVX512_BF16); }
TEST(rows_of_any_call_amx)    { rows_of_any_call(RA_ISA_AMX); }
TEST(rows_of_any_call_neon)   { rows_of_any_call(RA_ISA_NEON); }

static const h_test tests[] = {
    ENTRY(every_mask_scalar), ENTRY(every_mask_avx2), ENTRY(every_mask_avx512),
    ENTRY(every_mask_avx512_bf16), ENTRY(every_mask_amx),
    ENTRY(every_mask_neon), ENTRY(promised_bits_are_kept), ENTRY(other_orders_differ),
    ENTRY(rounds), ENTRY(panels_of_head_rows), ENTRY(no_promise_off_the_grid),
    ENTRY(rows_of_any_call_scalar), ENTRY(rows_of_any_call_avx2), ENTRY(rows_of_any_call_avx512),
    ENTRY(rows_of_any_call_avx512_bf16), ENTRY(rows_of_any_call_amx),
    ENTRY(rows_of_any_call_neon)
};

int main(int argc, char **argv) {
    return h_main(argc, argv, tests, sizeof tests / sizeof tests[0]);
}
