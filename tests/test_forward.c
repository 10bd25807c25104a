/* Forward attention. Proves it against the double-precision oracle: random shapes, known hard
 * cases, inputs with NaN, infinities and huge values, and the lower levels L0 and L1. */
#include "harness.h"
#define RINGATTN_IMPLEMENTATION
#include "ringattn.h"
#include "oracle.h"
#include "world.h"

static double largest_plain;           /* error of O, unit-normal problems with f32 K, V, O */

static verdict compare(const problem *p, const setup *s) {
    verdict w = world_compare(p, s);
    if (!p->loose && p->o_dtype == RA_F32 && p->k_dtype == RA_F32 && p->v_dtype == RA_F32 &&
        w.o_error > largest_plain) {
        largest_plain = w.o_error;
    }
    return w;
}

/* -------------------------------------------------------------------------- at random */
static void random_case(int64_t i, const wish *w, int32_t dtypes) {
    h_rng r = h_case_rng(i);
    problem p;
    setup s;
    if (!h_case(i)) return;
    random_problem(&p, &r, w);
    random_setup(&s, &p, &r, w);
    if (dtypes < 0) dtypes = h_one_in(&r, 2) ? 0 : (int32_t)h_range(&r, 0, 80);
    problem_dtypes(&p, dtypes % 3 + 1, dtypes / 3 % 3 + 1, dtypes / 9 % 3 + 1, dtypes / 27 + 1);
    problem_data(&p, &r);
    compare(&p, &s);
    setup_free(&s);
    problem_free(&p);
}

TEST(masks_and_layouts) {
    wish w = { M_NONE, L_CONTIGUOUS, ANY, ANY, 4e6 };
    int64_t n = h_run.large ? 40 : 2;
    for (int64_t i = 0; i < n * MASKS * LAYOUTS; i++) {
        int64_t left = i;
        w.mask = h_pick(&left, MASKS);
        w.layout = h_pick(&left, LAYOUTS);
        w.options = i < MASKS * LAYOUTS ? 0 : -1;
        random_case(i, &w, i < MASKS * LAYOUTS ? 0 : -1);
    }
}

TEST(dtypes) {
    wish w = { ANY, ANY, ANY, 0, 3e6 };
    int64_t n = h_run.large ? 40 : 1;
    for (int64_t i = 0; i < 81 * n; i++) random_case(i, &w, (int32_t)(i % 81));
}

/* Each score change alone, then every two of them, over each layout. */
TEST(score_changes) {
    wish w = { ANY, L_CONTIGUOUS, ANY, 0, 3e6 };
    int64_t i = 0, n = h_run.large ? 20 : 1;
    for (int64_t turn = 0; turn < n; turn++) {
        for (w.layout = 0; w.layout < LAYOUTS; w.layout++) {
            for (int a = 0; a < OPTIONS; a++) for (int b = a; b < OPTIONS; b++) {
                w.options = 1 << a | 1 << b;
                random_case(i++, &w, a == b ? 0 : -1);
            }
        }
    }
}

TEST(everything_at_random) {
    wish w = { ANY, ANY, ANY, ANY, 6e6 };
    int64_t n = h_run.large ? 20000 : 300;
    for (int64_t i = 0; i < n; i++) if (h_variant(0, (int)(i % 2))) random_case(i, &w, -1);
    printf("largest error of f32 O on unit-normal data so far: %.3g\n", largest_plain);
}

/* -------------------------------------------------------------------------- by hand */
/* Makes the data, compares over `ranks` ranks in a layout, and ends the problem. */
static verdict compare_on(problem *p, int ranks, int32_t layout) {
    h_rng r = h_case_rng(h_run.case_now < 0 ? 0 : h_run.case_now);
    verdict w;
    setup s;
    setup_plain(&s, ranks, layout);
    problem_data(p, &r);
    w = compare(p, &s);
    problem_free(p);
    return w;
}

TEST(world_sizes) {
    static const int worlds[7] = { 1, 2, 3, 4, 5, 7, 8 };
    int64_t i = 0;
    for (int a = 0; a < 21; a++) {
        int64_t P = worlds[a / 3], tokens[6];
        tokens[0] = 31;                /* not a multiple of 8 */
        tokens[1] = 5 * P - (P - 1);   /* the last rank short by P - 1 */
        tokens[2] = 1;
        tokens[3] = 3;                 /* ranks without tokens */
        tokens[4] = 64 * 2 * P;        /* exactly on the grid of blocks */
        tokens[5] = 64 * 2 * P + 1;
        for (int j = 0; j < 6; j++) {
            problem p;
            if (!h_case(i++)) continue;
            problem_shape(&p, tokens[j], 2, 1, 16, 16);
            p.mask.kind = RA_MASK_CAUSAL;
            compare_on(&p, (int)P, RA_LAYOUT_CONTIGUOUS + a % 3);
        }
    }
}

TEST(long_sequences_5_heads_of_128) {
    for (int64_t i = 0; i < 2; i++) {
        problem p;
        if (!h_case(i) || !h_variant(0, (int)i)) continue;
        problem_shape(&p, i ? 3824 : 3816, 5, 5, 128, 128);
        p.mask.kind = RA_MASK_CAUSAL;
        p.row_step = 129;
        compare_on(&p, 8, i ? RA_LAYOUT_CONTIGUOUS : RA_LAYOUT_ZIGZAG);
    }
}

TEST(packed_documents) {
    static const int64_t firsts[3][3] = { { 0, 120, 1248 }, { 0, 128, 1248 }, { 0, 7, 14 } };
    static const int64_t ends[3] = { 4232, 4240, 16 };
    for (int64_t i = 0; i < 12; i++) {
        problem p;
        int a = (int)(i % 3);
        if (!h_case(i)) continue;
        problem_shape(&p, ends[a], 2, 1, 32, 32);
        p.mask.kind = i % 2 ? RA_MASK_CAUSAL : RA_MASK_NONE;
        memcpy(p.docs, firsts[a], sizeof firsts[a]);
        p.mask.doc_first = p.docs;
        p.mask.doc_count = 3;
        p.row_step = a < 2 ? 61 : 1;
        compare_on(&p, 8, i < 6 ? RA_LAYOUT_ZIGZAG : RA_LAYOUT_STRIPED);
    }
}

TEST(grouped_heads) {
    static const int32_t heads[3][2] = { { 32, 4 }, { 12, 2 }, { 8, 2 } };
    for (int64_t i = 0; i < 3; i++) {
        problem p;
        if (!h_case(i)) continue;
        problem_shape(&p, 129, heads[i][0], heads[i][1], 64, 64);
        p.mask.kind = RA_MASK_CAUSAL;
        compare_on(&p, 3, RA_LAYOUT_ZIGZAG);
    }
}

TEST(unequal_and_large_dims) {
    static const int32_t dims[6][2] = { { 192, 128 }, { 576, 512 }, { 1024, 1024 }, { 1, 1 },
                                        { 1, 1024 }, { 1024, 1 } };
    for (int64_t i = 0; i < 12; i++) {
        problem p;
        const int32_t *d = dims[i % 6];
        if (!h_case(i)) continue;
        problem_shape(&p, 100, 2, 1, d[0], d[1]);
        p.v_in_k = d[0] == 576;        /* multi-head latent attention: V is a view into K */
        p.mask.kind = RA_MASK_CAUSAL;
        if (i >= 6) problem_dtypes(&p, RA_BF16, RA_BF16, RA_BF16, RA_F32);
        compare_on(&p, 3, RA_LAYOUT_CONTIGUOUS);
    }
}

/* window_size (512, 0) and (512, 512) of the flash attention interface. */
TEST(windows_of_512) {
    for (int64_t i = 0; i < 4; i++) {
        problem p;
        if (!h_case(i)) continue;
        problem_shape(&p, 1500, 2, 2, 32, 32);
        p.mask.kind = i % 2 ? RA_MASK_NONE : RA_MASK_CAUSAL;
        p.mask.window = 513;
        p.mask.right_limit = i % 2 ? 512 : 0;
        p.row_step = 11;
        compare_on(&p, 5, i < 2 ? RA_LAYOUT_CONTIGUOUS : RA_LAYOUT_STRIPED);
    }
}

TEST(softcap_sinks_alibi) {
    for (int64_t i = 0; i < 9; i++) {
        problem p;
        if (!h_case(i)) continue;
        problem_shape(&p, 333, 8, 2, 24, 24);
        p.mask.kind = i % 2 ? RA_MASK_NONE : RA_MASK_CAUSAL;
        if (i % 3 == 0) p.softcap = 10;
        if (i % 3 == 1) p.scores = RA_SCORE_SINKS;
        if (i % 3 == 2) { p.scores = RA_SCORE_ALIBI; p.loose = 1; }   /* slopes to 2^-8 */
        compare_on(&p, 4, RA_LAYOUT_CONTIGUOUS + (int32_t)(i / 3));
    }
}

/* A few new queries after, or beside, many keys. */
TEST(cross_attention) {
    static const int64_t keys[3] = { 113, 512, 1024 }, queries[4] = { 1, 3, 32, 75 };
    for (int64_t i = 0; i < 48; i++) {
        problem p;
        int64_t left = i;
        const int64_t rows = queries[h_pick(&left, 4)], all = keys[h_pick(&left, 3)];
        const int ranks = h_pick(&left, 2) ? 5 : 2, causal = (int)left;
        if (!h_case(i)) continue;
        problem_shape(&p, rows, 4, 2, 24, 24);
        p.tk[0] = p.k_max = all;
        if (causal) {
            p.mask.kind = RA_MASK_CAUSAL;
            p.q_offset = p.k_max - p.q_max;
        }
        compare_on(&p, ranks, RA_LAYOUT_CONTIGUOUS + (int32_t)(i % 3));
    }
}

/* The error does not grow with the number of ranks. */
TEST(error_over_1_to_64_ranks) {
    double most = 0, first = 0;
    int step = h_run.large ? 1 : 3, worst = 0;
    h_rng r = h_case_rng(0);
    problem p;
    truth t;
    problem_shape(&p, 777, 2, 1, 64, 64);
    p.mask.kind = RA_MASK_CAUSAL;
    problem_data(&p, &r);
    t = oracle(&p);
    for (int P = 1; P <= 64; P += step) {
        setup s;
        outcome got;
        verdict w;
        if (!h_case(P)) continue;
        setup_plain(&s, P, RA_LAYOUT_ZIGZAG);
        describe_case(&p, &s);
        got = world_run(&p, &s);
        if (outcome_whole(&got)) {
            w = outcome_judge(&got, &p, &t);
            CHECK(w.o_error <= 2e-6);
            CHECK(w.lse_ratio <= 1);
            if (P == 1) first = w.o_error;
            if (w.o_error > most) { most = w.o_error; worst = P; }
        }
        outcome_free(&got);
    }
    printf("largest error of O over 1..64 ranks: %.3g (%d ranks), on 1 rank %.3g\n", most, worst,
           first);
    truth_free(&t);
    problem_free(&p);
}

/* -------------------------------------------------------------------------- hostile numbers */
/* Scores that are exactly +-x: q = x e_0, k = +-e_0, scale 1. */
static void problem_signs(problem *p, float x, h_rng *r) {
    p->scale = 1;
    problem_data(p, r);
    for (int64_t i = 0; i < p->q_max * p->Hq; i++) for (int d = 0; d < p->Dk; d++) {
        p->q[i * p->Dk + d] = d ? 0 : x;
    }
    for (int64_t i = 0; i < p->k_max * p->Hkv; i++) for (int d = 0; d < p->Dk; d++) {
        p->k[i * p->Dk + d] = d ? 0 : h_one_in(r, 2) ? 1.0f : -1.0f;
    }
}

TEST(huge_scores) {
    static const float sizes[5] = { 80, -80, 2e5f, -2e5f, 3e37f };
    for (int64_t i = 0; i < 20; i++) {
        problem p;
        setup s;
        h_rng r = h_case_rng(i);
        int64_t k;
        if (!h_case(i)) continue;
        problem_shape(&p, 150, 2, 1, 8, 8);
        p.mask.kind = i % 2 ? RA_MASK_NONE : RA_MASK_CAUSAL;
        setup_plain(&s, 3, RA_LAYOUT_CONTIGUOUS + (int32_t)(i % 3));
        s.isa = random_isa(&r);
        problem_signs(&p, sizes[i % 5], &r);
        for (k = 0; k < p.k_max && i >= 10; k++) {      /* equal, except one that dominates */
            p.k[k * p.Dk] = k == 77 ? 1.0f : -1.0f;
            if (sizes[i % 5] < 0) p.k[k * p.Dk] *= -1;
        }
        compare(&p, &s);
        problem_free(&p);
    }
}

/* 2^32 is e^22.2. */
TEST(sums_past_the_limit) {
    static const int32_t isas[4] = { RA_ISA_SCALAR, RA_ISA_AVX2, RA_ISA_AVX512, RA_ISA_NEON };
    static const float rises[3] = { 5, 16, 200 };
    for (int64_t i = 0; i < 12; i++) {
        h_rng r = h_case_rng(i);
        problem p;
        setup s;
        if (!h_case(i) || !ra_isa_available(isas[i / 3])) continue;
        problem_shape(&p, 230, 1, 1, 40, 40);
        problem_rises(&p, rises[i % 3], &r);
        setup_plain(&s, 1, RA_LAYOUT_CONTIGUOUS);
        s.isa = isas[i / 3];
        compare(&p, &s);
        stale_maxima(&p, s.isa, rises[i % 3] > 10, 4.3e9f);
        problem_free(&p);
    }
}

/* A bias moves the scores of the first block close to the lowest float. That is a maximum, but no
 * weight remains. Or it moves those of the second block so far up that weights come close to the
 * limit of l: values of 1e28 stay finite. */
TEST(scores_near_the_limits) {
    static const int32_t isas[4] = { RA_ISA_SCALAR, RA_ISA_AVX2, RA_ISA_AVX512, RA_ISA_NEON };
    enum { ROWS = 20, KEYS = 128, D = 8 };
    static float q[ROWS * D], k[KEYS * D], v[KEYS * D], o[ROWS * D], lse[ROWS], bias[KEYS];
    ra_desc d = ra_desc_make(1, 1, D, RA_F32, RA_MASK_NONE);
    ra_tensors t = { 0 };
    for (int j = 0; j < KEYS; j++) bias[j] = j < 64 ? -2.2e38f : 0.0f;
    for (int j = 0; j < KEYS * D; j++) v[j] = j < 64 * D ? 2.0f : 3.0f;
    d.tokens = ROWS; d.kv_tokens = KEYS;
    d.scores = RA_SCORE_BIAS;
    t.q.data = q; t.k.data = k; t.v.data = v; t.o.data = o; t.lse.data = lse;
    t.bias.data = bias; t.bias.key_step = 4; t.bias.keys = KEYS;
    for (int i = 0; i < 4; i++) {
        if (!ra_isa_available(isas[i])) continue;
        d.isa = isas[i];
        CHECK_EQ(ra_attention(&d, &t, NULL, 0, 0, 1), RA_OK);
        for (int j = 0; j < ROWS * D; j++) CHECK(fabsf(o[j] - 3.0f) < 1e-6f);
        for (int j = 0; j < ROWS; j++) CHECK(fabsf(lse[j] - 4.15888308f) < 1e-5f);
    }
    for (int j = 0; j < KEYS; j++) bias[j] = j < 64 ? 0.0f : 18.0f;
    for (int j = 0; j < KEYS * D; j++) v[j] = 1e28f;
    for (int i = 0; i < 4; i++) {
        if (!ra_isa_available(isas[i])) continue;
        d.isa = isas[i];
        CHECK_EQ(ra_attention(&d, &t, NULL, 0, 0, 1), RA_OK);
        for (int j = 0; j < ROWS * D; j++) CHECK(fabsf(o[j] / 1e28f - 1.0f) < 1e-6f);
    }
}

/* Rows whose interval is empty: O is exactly 0, and the LSE -inf or the sink. */
TEST(rows_without_keys) {
    for (int64_t i = 0; i < 12; i++) {
        problem p;
        setup s;
        outcome r;
        h_rng rng = h_case_rng(i);
        if (!h_case(i)) continue;
        problem_shape(&p, 200, 2, 1, 16, 16);
        problem_mask(&p, &rng, M_INTERVALS);
        for (int64_t t = 0; t < 200; t++) if (t % 64 >= 40 || t < 70) p.hi[t] = p.lo[t];
        if (i % 2) p.scores = RA_SCORE_SINKS;
        if (i % 4 >= 2) p.o_dtype = RA_BF16;
        problem_data(&p, &rng);
        setup_plain(&s, 4, RA_LAYOUT_CONTIGUOUS + (int32_t)(i % 3));
        compare(&p, &s);
        r = world_run(&p, &s);
        for (int64_t t = 0; t < 70 * 2 && r.status == RA_OK; t++) {
            int zero = 1;
            for (int b = 0; b < 16; b++) zero &= r.o[t * 16 + b] == 0;
            CHECK(zero);
            if (i % 2) CHECK(fabs((double)(r.lse[t] - p.sinks[t % 2])) <= 4e-6);
            else CHECK(r.lse[t] < -3e38f && r.lse[t] == r.lse[t] * 2);
        }
        outcome_free(&r);
        problem_free(&p);
    }
}

/* NaN in one row of Q, K or V must appear where the oracle has it and nowhere else. For each ISA
 * and each dtype. */
TEST(one_nan) {
    for (int64_t i = 0; i < 9 * 4 * MASKS; i++) {
        problem p;
        setup s;
        h_rng r = h_case_rng(i);
        int64_t row, left = i;
        const int which = h_pick(&left, 3), dtype = RA_F32 + h_pick(&left, 3);
        const int isa = h_pick(&left, 4), mask = (int)left;
        float *x;
        if ((!h_run.large && i % 5) || !ra_isa_available(isa ? isa : RA_ISA_SCALAR)) continue;
        if (!h_case(i)) continue;
        problem_shape(&p, 140, 2, 1, 19, 37);
        problem_mask(&p, &r, mask);
        problem_dtypes(&p, dtype, dtype, dtype, RA_F32);
        problem_data(&p, &r);
        row = h_range(&r, 0, 139);
        x = which == 0 ? p.q + (row * 2 + 1) * 19 + h_range(&r, 0, 18)
          : which == 1 ? p.k + row * 19 + h_range(&r, 0, 18) : p.v + row * 37 + h_range(&r, 0, 36);
        *x = (float)NAN;
        setup_plain(&s, (int)h_range(&r, 1, 4), RA_LAYOUT_CONTIGUOUS + (int32_t)h_range(&r, 0, 2));
        s.isa = isa;
        s.chunk_tokens = 64;
        compare(&p, &s);
        problem_free(&p);
    }
}

/* Every key that no query sees holds NaN or infinity. So do empty cells and gaps, in every test. */
TEST(nan_in_everything_unseen) {
    wish w = { M_NONE, ANY, ANY, ANY, 4e5 };
    int64_t q, hidden = 0;
    for (int64_t i = 0; i < 6 * MASKS; i++) {
        problem p;
        setup s;
        h_rng r = h_case_rng(i);
        int seen;
        if (!h_case(i)) continue;
        w.mask = (int)(i % MASKS);
        random_problem(&p, &r, &w);
        random_setup(&s, &p, &r, &w);
        if (i % 2) problem_dtypes(&p, RA_BF16, RA_BF16, RA_F16, RA_F32);
        problem_data(&p, &r);
        for (int b = 0; b < p.B; b++) for (int64_t k = 0; k < p.tk[b]; k++) {
            for (seen = 0, q = 0; q < p.tq[b] && !seen; q++) {
                seen = visible(&p.mask, p.q_offset + q, k);
            }
            if (seen) continue;
            hidden++;
            for (int64_t j = 0; j < p.Hkv * p.Dk; j++) {
                p.k[(b * p.k_max + k) * p.Hkv * p.Dk + j] = k & 1 ? (float)NAN : HUGE_VALF;
            }
            for (int64_t j = 0; j < p.Hkv * p.Dv && !p.v_in_k; j++) {
                p.v[(b * p.k_max + k) * p.Hkv * p.Dv + j] = k & 2 ? (float)NAN : -HUGE_VALF;
            }
        }
        compare(&p, &s);
        setup_free(&s);
        problem_free(&p);
    }
    if (h_run.only_case < 0) CHECK(hidden > 1000);
}

/* Engines pass their own masks as a bias of -inf: such a key has no weight. */
TEST(bias_of_minus_infinity) {
    enum { T = 200 };
    static float bias[T], q[T * 8], k[T * 8], v[T * 8], o[T * 8], lse[T];
    h_rng r = h_case_rng(0);
    ra_desc d = ra_desc_make(1, 1, 8, RA_F32, RA_MASK_NONE);
    ra_tensors t = { 0 };
    void *work;
    problem p;
    truth exact;
    problem_shape(&p, T, 1, 1, 8, 8);
    problem_data(&p, &r);
    for (int64_t i = 0; i < T; i++) {          /* the whole first block and 2 of 3 after it */
        p.absent[i] = i < 70 || i % 3;
        bias[i] = p.absent[i] ? -HUGE_VALF : 0;
    }
    memcpy(q, p.q, sizeof q); memcpy(k, p.k, sizeof k); memcpy(v, p.v, sizeof v);
    t.q.data = q; t.k.data = k; t.v.data = v; t.o.data = o; t.lse.data = lse;
    t.bias.data = bias;
    t.bias.key_step = 4;
    t.bias.keys = T;
    d.tokens = T;
    d.scores = RA_SCORE_BIAS;
    work = malloc(ra_attention_bytes(&d, 1) + 64);
    CHECK_EQ(ra_attention(&d, &t, (uint8_t *)work + (64 - (uintptr_t)work % 64) % 64,
                          ra_attention_bytes(&d, 1), 0, 1), RA_OK);
    exact = oracle(&p);
    CHECK_CLOSE(o, exact.o, T * 8, 2e-6, 0);
    CHECK_CLOSE(lse, exact.lse, T, 4e-6, 4e-6);
    free(work);
    truth_free(&exact);
    problem_free(&p);
}

/* One visible key: O is its V, rounded once. V is every finite 16-bit pattern, and f32 values near
 * ties and limits of the 16-bit formats. What is subnormal in f32 may become 0. */
TEST(one_key_gives_its_value) {
    for (int64_t i = 0; i < 12; i++) {
        problem p;
        setup s;
        outcome got;
        h_rng r = h_case_rng(i);
        int64_t n, wrong = 0, first = -1, left = i;
        const int32_t v = RA_F32 + h_pick(&left, 3), o = RA_F32 + h_pick(&left, 3);
        if (!h_case(i)) continue;
        problem_shape(&p, 1024, 1, 1, 8, 64);
        p.mask.kind = RA_MASK_CAUSAL;
        p.mask.window = 1;
        problem_dtypes(&p, RA_F32, RA_F32, v, o);
        problem_data(&p, &r);
        for (int64_t j = n = 0; j < 65536; j++) {
            uint16_t w = (uint16_t)j;
            float x;
            uint32_t bits = (uint32_t)(j << 16) | (h_next(&r) & 0xFFFFu);
            if (v == RA_F32 && j % 3 == 0) bits = (bits & 0xFFFF0000u) | 0x8000u;      /* a tie */
            if (v == RA_F32 && j % 3 == 1) bits = (bits & 0xFFFFE000u) | 0x1000u;
            if (v == RA_F32) memcpy(&x, &bits, 4);
            else x = dtype_load(&w, v);
            p.v[j] = x - x == 0 ? x : 0;
        }
        setup_plain(&s, 2, RA_LAYOUT_CONTIGUOUS);
        s.isa = i < 9 ? random_isa(&r) : RA_ISA_SCALAR;
        describe_case(&p, &s);
        got = world_run(&p, &s);
        if (outcome_whole(&got)) {
            for (int64_t j = 0; j < 65536; j++) {
                float exact = dtype_round(p.v[j], o);
                int tiny = fabs((double)p.v[j]) < 1.17549435e-38;
                if (got.o[j] == exact || (tiny && got.o[j] == 0)) continue;
                wrong++;
                if (first < 0) first = j;
            }
            if (!CHECK_EQ(wrong, 0)) {
                printf("    v %.9g gave %.9g, expected %.9g\n", (double)p.v[first],
                       (double)got.o[first], (double)dtype_round(p.v[first], o));
            }
        }
        outcome_free(&got);
        problem_free(&p);
    }
}

/* The highest possible positions, in RUNS and in ARRAY: nothing wraps around. */
TEST(positions_near_the_limit) {
    static const int masks[4] = { M_CAUSAL, M_WINDOW, M_BOTH, M_NONE };
    int64_t k;
    for (int64_t i = 0; i < 24; i++) {
        wish w = { M_NONE, L_CONTIGUOUS, ANY, 0, 3e5 };
        problem p;
        setup s;
        h_rng r = h_case_rng(i);
        int64_t left = i;
        if (!h_case(i)) continue;
        w.mask = masks[h_pick(&left, 4)];
        w.layout = h_pick(&left, 2) ? L_RUNS : L_ARRAY;
        w.options = i % 3 ? 0 : RA_SCORE_ALIBI;
        random_problem(&p, &r, &w);
        random_setup(&s, &p, &r, &w);
        problem_data(&p, &r);
        k = p.q_offset + p.q_max;
        s.shift = RA_MAX_POSITION - (k > p.k_max ? k : p.k_max);
        if (s.layout == RA_LAYOUT_RUNS) {               /* separate tables for both */
            int n = 0;
            for (k = 0; k < s.ranks; k++) n += s.q_run_count[k];
            for (k = 0; k < n; k++) s.q_runs[k].first += s.shift;
            for (k = n = 0; k < s.ranks && s.k_runs; k++) n += s.k_run_count[k];
            for (k = 0; k < n; k++) s.k_runs[k].first += s.shift;
        }
        compare(&p, &s);
        setup_free(&s);
        problem_free(&p);
    }
}

/* Cells in any order, the first of them at the highest position: under ubsan nothing overflows. */
TEST(biased_cells_near_the_limit) {
    enum { CELLS = 20, D = 8 };
    static const int64_t highest[2] = { RA_MAX_POSITION - 1, 1000 };
    float q[D], keys[CELLS * D], bias[CELLS], o[2][D];
    int32_t cells[CELLS], end = RA_MAX_POSITION - 1;
    h_rng r = h_case_rng(0);
    ra_tensors t = { 0 };
    ra_desc d = ra_desc_make(1, 1, D, RA_F32, RA_MASK_NONE);
    for (int i = 0; i < D; i++) q[i] = (float)h_normal(&r);
    for (int i = 0; i < CELLS * D; i++) keys[i] = (float)h_normal(&r);
    for (int i = 0; i < CELLS; i++) bias[i] = (float)h_normal(&r);
    for (int i = 1; i < CELLS; i++) cells[i] = i;
    d.tokens = 1;
    d.kv_tokens = CELLS;
    d.scores = RA_SCORE_BIAS;
    t.q.data = q;
    t.k.data = t.v.data = keys;
    t.q_pos.array = &end;
    t.q_pos.count = 1;
    t.k_pos.array = cells;
    t.k_pos.count = t.bias.keys = CELLS;
    t.bias.data = bias;
    t.bias.key_step = 4;
    for (int i = 0; i < 2; i++) {
        cells[0] = (int32_t)highest[i];
        t.o.data = o[i];
        CHECK_EQ(ra_attention(&d, &t, NULL, 0, 0, 1), RA_OK);
    }
    CHECK(!memcmp(o[0], o[1], sizeof o[0]));
}

/* -------------------------------------------------------------------------- L0 */
static float *floats(int64_t n) { return (float *)calloc((size_t)n + 1, sizeof(float)); }

/* Memory of the right size and alignment for calls on one rank. */
typedef struct scratch { void *raw, *mem; size_t bytes; } scratch;
static scratch scratch_for(const ra_desc *d, int nth) {
    scratch w;
    w.bytes = ra_attention_bytes(d, nth);
    w.raw = malloc(w.bytes + 64);
    memset(w.raw, 0xA5, w.bytes + 64);
    w.mem = (uint8_t *)w.raw + (64 - (uintptr_t)w.raw % 64) % 64;
    return w;
}

static ra_state state_new(const problem *p) {
    ra_state s;
    int64_t rows = p->B * p->q_max * p->Hq;
    s.m = floats(rows);
    s.l = floats(rows);
    s.acc = floats(rows * p->Dv);
    return s;
}

static void state_free(ra_state *s) { free(s->m); free(s->l); free(s->acc); }

/* Folds the keys whose piece is `piece`, as one run or as cells in any order with empty ones
 * between them (which have NaN). f32, packed. */
static void fold_piece(const problem *p, const ra_desc *whole, const ra_state *s,
                       const int *pieces, int piece, h_rng *r) {
    int32_t *cells = (int32_t *)malloc((size_t)(2 * p->k_max + 8) * sizeof *cells);
    int64_t n = 0, j, kn = p->Hkv * p->Dk, vn = p->Hkv * p->Dv;
    float *k, *v;
    ra_desc d = *whole;
    ra_tensors t = { 0 };
    scratch w;
    for (int64_t i = 0; i < p->k_max; i++) if (pieces[i] == piece) {
        if (h_one_in(r, 6)) cells[n++] = -1;
        cells[n++] = (int32_t)i;
    }
    if (n == 0) { free(cells); return; }
    for (int64_t i = n - 1; i > 0 && h_one_in(r, 2); i--) {
        int32_t c = cells[i];
        j = h_range(r, 0, i);
        cells[i] = cells[j];
        cells[j] = c;
    }
    k = floats(p->B * n * kn);
    v = floats(p->B * n * vn);
    memset(k, 0xFF, (size_t)(p->B * n * kn) * 4);
    memset(v, 0xFF, (size_t)(p->B * n * vn) * 4);
    for (int b = 0; b < p->B; b++) for (int64_t i = 0; i < n; i++) if (cells[i] >= 0) {
        memcpy(k + (b * n + i) * kn, k_row(p, b, cells[i], 0), (size_t)kn * 4);
        memcpy(v + (b * n + i) * vn, v_row(p, b, cells[i], 0), (size_t)vn * 4);
    }
    t.q.data = p->q; t.k.data = k; t.v.data = v;
    t.alibi = p->scores & RA_SCORE_ALIBI ? p->alibi : NULL;
    t.sinks = p->scores & RA_SCORE_SINKS ? p->sinks : NULL;
    t.k_pos.array = cells;
    t.k_pos.count = n;
    d.kv_tokens = n;
    w = scratch_for(&d, 1);
    CHECK_EQ(ra_fold(&d, s, &t, w.mem, w.bytes), RA_OK);
    free(w.raw); free(k); free(v); free(cells);
}

/* O and LSE of a state, against the oracle. */
static void check_finish(const problem *p, const ra_desc *d, const ra_state *s) {
    outcome r = { 0 };
    ra_tensors t = { 0 };
    truth exact = oracle(p);
    verdict w;
    int64_t rows = p->B * p->q_max * p->Hq;
    r.o = floats(rows * p->Dv);
    r.lse = floats(rows);
    t.o.data = r.o;
    t.lse.data = r.lse;
    t.sinks = p->scores & RA_SCORE_SINKS ? p->sinks : NULL;
    t.alibi = p->scores & RA_SCORE_ALIBI ? p->alibi : NULL;
    CHECK_EQ(ra_state_finish(d, s, &t), RA_OK);
    r.rough = rounds_weights(d);
    w = outcome_judge(&r, p, &exact);
    CHECK(w.o_ratio <= 1);
    CHECK(w.lse_ratio <= 1);
    truth_free(&exact);
    outcome_free(&r);
}

/* Random pieces go into two states, these into an empty third one, and an empty one into that. */
static void fold_and_merge(const problem *p, const ra_desc *d, h_rng *r) {
    ra_state s[4];
    float *before = floats(p->B * p->q_max * p->Hq * p->Dv);
    size_t bytes = (size_t)(p->B * p->q_max * p->Hq * p->Dv) * 4;
    int pieces[256], n = (int)h_range(r, 1, 8), k, status = 0;
    for (int64_t j = 0; j < p->k_max; j++) pieces[j] = (int)h_range(r, 0, n - 1);
    if (h_one_in(r, 2)) for (int64_t j = 0; j < p->k_max; j++) pieces[j] = (int)(j * n / p->k_max);
    for (k = 0; k < 4; k++) {
        s[k] = state_new(p);
        status |= ra_state_clear(d, &s[k]);
    }
    for (k = 0; k < n; k++) fold_piece(p, d, &s[h_range(r, 0, 1)], pieces, k, r);
    memcpy(before, s[1].acc, bytes);
    status |= ra_state_merge(d, &s[2], &s[0]);
    status |= ra_state_merge(d, &s[2], &s[1]);
    CHECK_BITS(s[1].acc, before, bytes);
    memcpy(before, s[2].acc, bytes);
    status |= ra_state_merge(d, &s[2], &s[3]);
    CHECK_BITS(s[2].acc, before, bytes);
    CHECK_EQ(status, RA_OK);
    check_finish(p, d, &s[2]);
    for (k = 0; k < 4; k++) state_free(&s[k]);
    free(before);
}

TEST(fold_merge_finish) {
    for (int64_t i = 0; i < 3 * MASKS; i++) {
        h_rng r = h_case_rng(i);
        problem p;
        setup s;
        ra_desc d;
        if (!h_case(i)) continue;
        problem_shape(&p, h_range(&r, 1, 150), 4, 2, 20, 28);
        p.B = (int32_t)h_range(&r, 1, 2);
        p.tq[1] = p.q_max;
        p.tk[0] = p.tk[1] = p.k_max = h_range(&r, 1, 200);
        problem_mask(&p, &r, (int)(i % MASKS));
        if (h_one_in(&r, 2)) p.scores = RA_SCORE_SINKS;
        if (h_one_in(&r, 3)) { p.scores |= RA_SCORE_ALIBI; p.loose = 1; }
        problem_data(&p, &r);
        setup_plain(&s, 1, RA_LAYOUT_CONTIGUOUS);
        s.isa = random_isa(&r);
        describe_case(&p, &s);
        d = rank_desc(&p, &s, 0);
        fold_and_merge(&p, &d, &r);
        problem_free(&p);
    }
}

/* Normalised partial results of n sets of keys, merged one after another, against all keys at once.
 * Sets may be empty: lse -inf beside any values. */
static void merge_partials(int sets, int64_t keys_a_set, float spread) {
    enum { D = 8, ROWS = 3 };
    h_rng r = h_case_rng(sets);
    double all[ROWS][D], sum[ROWS];
    float o[ROWS * D], lse[ROWS], o2[ROWS * D], lse2[ROWS];
    memset(all, 0, sizeof all);
    memset(sum, 0, sizeof sum);
    memset(o, 0x7F, sizeof o);
    for (int row = 0; row < ROWS; row++) lse[row] = -HUGE_VALF;
    for (int i = 0; i < sets; i++) {
        for (int row = 0; row < ROWS; row++) {
            double part[D] = { 0 }, l = 0;
            int empty = (i + row) % 5 == 4;
            for (int64_t k = 0; k < keys_a_set && !empty; k++) {
                double w = exp((double)(h_normal(&r) * spread));
                l += w;
                for (int d = 0; d < D; d++) {
                    double v = (double)h_normal(&r);
                    part[d] += w * v;
                    all[row][d] += w * v;
                }
            }
            sum[row] += l;
            lse2[row] = empty ? -HUGE_VALF : (float)log(l);
            for (int d = 0; d < D; d++) o2[row * D + d] = empty ? (float)NAN : (float)(part[d] / l);
        }
        ra_merge(o, lse, o2, lse2, ROWS, D);
    }
    for (int row = 0; row < ROWS; row++) {
        double want_l = log(sum[row]);
        for (int d = 0; d < D; d++) all[row][d] /= sum[row];
        CHECK_CLOSE(o + row * D, all[row], D, 4e-6, 0);
        CHECK_CLOSE(lse + row, &want_l, 1, 4e-6, 4e-6);
    }
}

TEST(merges_of_many_partials) {
    merge_partials(1, 3, 1);
    merge_partials(2, 3, 1);
    merge_partials(100, 4, 1);
    merge_partials(512, 4, 1);
    merge_partials(100, 2, 20);
}

TEST(merge_corners) {
    float o[2] = { 1, 2 }, lse = 3, o2[2] = { 5, 8 }, lse2 = 3, keep[2], inf = HUGE_VALF;
    double half[2] = { 3, 5 }, l = 3 + log(2.0);
    ra_merge(o, &lse, o2, &lse2, 1, 2);                 /* equal: the mean */
    CHECK_CLOSE(o, half, 2, 1e-6, 0);
    CHECK_CLOSE(&lse, &l, 1, 1e-6, 0);
    memcpy(keep, o, sizeof keep);
    lse = 0; lse2 = -100;                               /* one side dominant */
    ra_merge(o, &lse, o2, &lse2, 1, 2);
    CHECK_BITS(o, keep, sizeof keep);
    CHECK(lse == 0);
    lse = -100; lse2 = 0;
    ra_merge(o, &lse, o2, &lse2, 1, 2);
    CHECK_BITS(o, o2, sizeof o);
    CHECK(lse == 0);
    memcpy(o, keep, sizeof keep);
    lse = -7; lse2 = -inf; o2[0] = (float)NAN; o2[1] = inf;   /* neutral, beside any value */
    ra_merge(o, &lse, o2, &lse2, 1, 2);
    CHECK_BITS(o, keep, sizeof keep);
    CHECK(lse == -7);
    lse = -inf; lse2 = -7; o2[0] = 5; o2[1] = 8; o[0] = inf; o[1] = (float)NAN;
    ra_merge(o, &lse, o2, &lse2, 1, 2);
    CHECK_BITS(o, o2, sizeof o);
    CHECK(lse == -7);
    lse = lse2 = -inf; o[0] = o[1] = 0; o2[0] = (float)NAN;   /* both */
    ra_merge(o, &lse, o2, &lse2, 1, 2);
    CHECK(o[0] == 0 && o[1] == 0 && lse == -inf);
    lse = 3e38f; lse2 = 3e38f; o2[0] = 5;
    ra_merge(o, &lse, o2, &lse2, 1, 2);
    CHECK(o[0] == 2.5f && lse == 3e38f);
}

/* -------------------------------------------------------------------------- L1 */
/* The bits are the same for every nth and order of threads. A byte less of workspace is refused. */
TEST(attention_threads) {
    wish w = { ANY, L_CONTIGUOUS, 1, ANY, 2e6 };
    int64_t n = 40;
    for (int64_t i = 0; i < n; i++) {
        problem p;
        setup s;
        outcome first, r;
        h_rng rng = h_case_rng(i);
        size_t o_bytes, lse_bytes;
        if (!h_case(i)) continue;
        random_problem(&p, &rng, &w);
        if (i % 3 == 0) {                               /* the decoding form */
            p.q_max = 0;
            for (int b = 0; b < p.B; b++) {
                p.tq[b] = h_range(&rng, 1, 4);
                if (p.tq[b] > p.q_max) p.q_max = p.tq[b];
            }
        }
        problem_data(&p, &rng);
        random_setup(&s, &p, &rng, &w);
        s.layout = RA_LAYOUT_CONTIGUOUS + (int32_t)(i % 3);
        s.call = CALL_ATTENTION;
        s.threads = 1;
        compare(&p, &s);
        first = world_run(&p, &s);
        o_bytes = (size_t)(p.B * p.q_max * p.Hq * p.Dv) * 4;
        lse_bytes = (size_t)(p.B * p.q_max * p.Hq) * 4;
        for (int nth = 2; nth <= 5 && first.status == RA_OK; nth++) {
            s.threads = nth;
            s.seed += 8;               /* another order, the same descriptor */
            describe_case(&p, &s);
            r = world_run(&p, &s);
            outcome_whole(&r);
            CHECK_BITS(r.o, first.o, o_bytes);
            CHECK_BITS(r.lse, first.lse, lse_bytes);
            outcome_free(&r);
        }
        outcome_free(&first);
        setup_free(&s);
        problem_free(&p);
    }
}

TEST(attention_workspace) {
    float q[5 * 8], o[5 * 8];
    ra_desc d = ra_desc_make(1, 1, 8, RA_F32, RA_MASK_CAUSAL);
    ra_tensors t = { 0 };
    scratch w;
    memset(q, 0, sizeof q);
    t.q.data = t.k.data = t.v.data = q;
    t.o.data = o;
    d.tokens = 5;
    for (int nth = 1; nth <= 5; nth++) {
        w = scratch_for(&d, nth);
        CHECK(w.bytes > 0);
        CHECK_EQ(ra_attention(&d, &t, w.mem, w.bytes, 0, nth), RA_OK);
        CHECK_EQ(ra_attention(&d, &t, w.mem, w.bytes - 65, 0, nth), RA_E_WORKSPACE);
        CHECK_EQ(ra_attention(&d, &t, (uint8_t *)w.mem + 1, w.bytes - 2, 0, nth), RA_E_WORKSPACE);
        free(w.raw);
    }
    d.tokens = 0;
    CHECK_EQ(ra_attention_bytes(&d, 1), 0);
}

static int32_t random_scaled(h_rng *r) { return h_one_in(r, 2) ? RA_Q8_0 : RA_Q4_0; }

/* Gives K or V or both of some problems in q8_0 or q4_0. */
static void some_scaled(problem *p, h_rng *r) {
    int which = (int)h_range(r, 0, 8);
    if (which >= 4 || which == 0) return;
    if (which & 1) { p->k_dtype = random_scaled(r); p->Dk = (p->Dk + 31) / 32 * 32; }
    if (which & 2) { p->v_dtype = random_scaled(r); p->Dv = (p->Dv + 31) / 32 * 32; }
}

/* Every layout, transport and kind of call, with K and V in q8_0 and q4_0, also with V a part of
 * K. */
TEST(scales_everywhere) {
    wish w = { ANY, L_CONTIGUOUS, ANY, ANY, 2e6 };
    for (int64_t i = 0; i < (h_run.large ? 1000 : 40); i++) {
        h_rng r = h_case_rng(i);
        problem p;
        setup s;
        if (!h_case(i)) continue;
        random_problem(&p, &r, &w);
        random_setup(&s, &p, &r, &w);
        p.v_in_k = i % 4 == 0;
        p.Dk = 32 * (int32_t)h_range(&r, 1, 5);
        p.Dv = p.v_in_k ? p.Dk : 32 * (int32_t)h_range(&r, 1, 4);
        if (p.v_in_k) p.Dv = 32 * (int32_t)h_range(&r, 1, p.Dk / 32);
        p.v_column = p.v_in_k ? (p.Dk - p.Dv) / 2 / 32 * 32 : 0;
        p.k_dtype = p.v_dtype = i / 4 % 2 ? RA_Q4_0 : RA_Q8_0;
        if (!p.v_in_k && i % 4 == 1) p.v_dtype = RA_F16;
        if (!p.v_in_k && i % 4 == 2) p.v_dtype = random_scaled(&r);
        problem_data(&p, &r);
        compare(&p, &s);
        setup_free(&s);
        problem_free(&p);
    }
}

/* A cache in q8_0 or q4_0, or K in one and V in the other, with scales of every kind, and the
 * results for its last rows: one, which are decoded, or many. */
typedef struct q8_case {
    int32_t q_heads, kv_heads, k_dim, v_dim, keys, rows, dtype[2], row_bytes[2];
    float *q, *o, *lse;
    uint8_t *kv[2];
} q8_case;

/* Blocks are whole steps of 2^-6, or powers of two up to 2^12 apart; scales are zero, negative or
 * -0; some blocks have only extremes or only zeros. */
static void q8_fill(uint8_t *block, int64_t n, int32_t dtype, int wild, h_rng *r) {
    const int32_t size = dtype == RA_Q8_0 ? 32 : 16;
    for (; n > 0; n--, block += 2 + size) {
        const int kind = wild ? (int)h_range(r, 0, 7) : 0;
        float scale = (float)ldexp(1 + (double)h_range(r, 0, 1023) / 1024,
                                   wild ? -(int)h_range(r, 0, 12) : -6);
        uint16_t bits;
        if (kind == 1 || kind == 6) scale = -scale;
        if (kind == 2) scale = 0.0f;
        CHECK_EQ(ra_convert(&bits, RA_F16, &scale, RA_F32, 1), RA_OK);
        if (kind == 3) bits = 0x8000u;
        memcpy(block, &bits, 2);
        for (int i = 0; i < size; i++) {
            int x = (int)h_range(r, -128, 127);
            if (kind == 4 || kind == 6) x = x & 1 ? 127 : -128;
            if (kind == 5) x = 0;
            if (dtype == RA_Q4_0 && kind == 4) x = x & 1 ? 0xf0 : 0x0f;
            if (dtype == RA_Q4_0 && kind == 5) x = 0x88;
            block[2 + i] = (uint8_t)(int8_t)x;
        }
    }
}

/* Element d of row j of K (side 0) or V, and the scale of its block times the largest integer. */
static double q8_value(const q8_case *c, int side, int64_t j, int32_t d, double *most) {
    const int32_t q8 = c->dtype[side] == RA_Q8_0;
    const uint8_t *at = c->kv[side] + j * c->row_bytes[side] + d / 32 * (q8 ? 34 : 18);
    float scale;
    (void)ra_convert(&scale, RA_F32, at, RA_F16, 1);
    *most = fabs((double)scale) * (q8 ? 128 : 8);
    if (q8) return (double)scale * (int8_t)at[2 + d % 32];
    return (double)scale * ((at[2 + d % 16] >> d % 32 / 16 * 4 & 15) - 8);
}

/* Row i of all rows of heads against double precision. step: error of q relative to its largest
 * magnitude, and of a weight relative to the largest of 16 keys. In prefill that is the largest
 * weight times the largest scale of 64 keys. */
static void q8_check(const q8_case *c, int32_t i, double step) {
    const int32_t h = i % c->q_heads, kv_head = h / (c->q_heads / c->kv_heads);
    const int32_t n = c->keys - c->rows + i / c->q_heads + 1, unit = c->rows > 1 ? 64 : 16;
    const float *q = c->q + i * c->k_dim;
    double *s = (double *)calloc((size_t)n, sizeof *s), top = -HUGE_VAL, sum = 0, most, worst = 0;
    double *off = (double *)calloc((size_t)n, sizeof *off), *w = (double *)calloc((size_t)n, 8);
    const double root = sqrt((double)c->k_dim);
    for (int32_t j = 0; j < n; j++) {
        double size = 0, largest = 0;
        for (int32_t d = 0; d < c->k_dim; d++) {
            const double x = q8_value(c, 0, j * c->kv_heads + kv_head, d, &most);
            s[j] += (double)q[d] * x / root;
            size += fabs(x) / root;
            if (largest < fabs((double)q[d])) largest = fabs((double)q[d]);
        }
        off[j] = largest * size * (step + 8 * 6e-8) + 6e-8 * fabs(s[j]);
        top = fmax(top, s[j]);
    }
    for (int32_t j = 0; j < n; j++) { s[j] = exp(s[j] - top); sum += s[j]; }
    for (int32_t j = 0; j < n; j++) { w[j] = s[j] / sum; worst += w[j] * off[j]; }
    CHECK(h_distance((double)c->lse[i], top + log(sum), worst + 4e-6 * (1 + fabs(top))) <= 1);
    for (int32_t d = 0; d < c->v_dim; d++) {
        double o = 0, tol = 1e-12, group = 0, scale = 0;
        for (int32_t j = 0; j < n; j++) {
            o += w[j] * q8_value(c, 1, j * c->kv_heads + kv_head, d, &most);
            tol += w[j] * most * (2 * off[j] + worst + 2e-6);
            if (unit == 16) { group = fmax(group, w[j] * most); scale = 1; }
            else { group = fmax(group, w[j]); scale = fmax(scale, most); }
            if (j % unit < unit - 1) continue;
            tol += unit * step * group * scale;
            group = scale = 0;
        }
        for (int32_t j = n; unit == 64 && j % unit && j < c->keys; j++) {      /* not seen */
            (void)q8_value(c, 1, j * c->kv_heads + kv_head, d, &most);
            scale = fmax(scale, most);
        }
        tol += unit * step * group * scale;
        CHECK(h_distance((double)c->o[i * c->v_dim + d], o, tol) <= 1);
    }
    free(s);
    free(off);
    free(w);
}

static ra_desc q8_desc(const q8_case *c, int32_t isa) {
    ra_desc d = ra_desc_make(c->q_heads, c->kv_heads, c->k_dim, RA_F32, RA_MASK_CAUSAL);
    d.v_dim = c->v_dim;
    d.k_dtype = c->dtype[0];
    d.v_dtype = c->dtype[1];
    d.tokens = c->rows;
    d.q_offset = c->keys - c->rows;
    d.isa = isa;
    return d;
}

static void q8_run(const q8_case *c, int32_t isa) {
    ra_desc d = q8_desc(c, isa);
    ra_tensors t = { 0 };
    size_t bytes = ra_attention_bytes(&d, 1);
    void *memory = malloc(bytes + 1);
    t.q.data = c->q;
    t.k.data = c->kv[0];
    t.v.data = c->kv[1];
    t.o.data = c->o;
    t.lse.data = c->lse;
    CHECK_EQ(ra_attention(&d, &t, memory, bytes, 0, 1), RA_OK);
    free(memory);
}

/* A NaN or an infinity in a scale of V reaches the 32 dims of its block in the rows of its head. A
 * NaN in K or q reaches all dims of the rows that see it. Neither reaches any other row. */
static void q8_nan(const q8_case *c, int32_t isa, h_rng *r) {
    const int32_t which = (int32_t)h_range(r, 0, 2), group = c->q_heads / c->kv_heads;
    const int32_t j = (int32_t)h_range(r, 0, c->keys - 1);
    const int32_t row = (int32_t)h_range(r, 0, c->rows - 1);
    const int32_t h = (int32_t)h_range(r, 0, c->q_heads - 1);
    const int32_t dim = which == 1 ? c->v_dim : c->k_dim;
    const int32_t b = (int32_t)h_range(r, 0, dim / 32 - 1);
    const int infinite = which == 1 && h_one_in(r, 2);
    const uint16_t nan = (uint16_t)((h_one_in(r, 2) ? 0x7e00u : 0xfe00u) - (infinite ? 0x200u : 0));
    if (which == 2) c->q[(row * c->q_heads + h) * c->k_dim + 32 * b] = (float)NAN;
    else memcpy(c->kv[which] + (j * c->kv_heads + h / group) * c->row_bytes[which] +
                (c->dtype[which] == RA_Q8_0 ? 34 : 18) * b, &nan, 2);
    q8_run(c, isa);
    for (int32_t i = 0; i < c->rows * c->q_heads * c->v_dim; i++) {
        const int32_t head = i / c->v_dim % c->q_heads, d = i % c->v_dim;
        const int32_t at = i / c->v_dim / c->q_heads;
        const int sees = j <= c->keys - c->rows + at;
        const int hit = which == 2 ? head == h && at == row : head / group == h / group && sees;
        const int bad = hit && (which != 1 || d / 32 == b);
        CHECK_EQ(c->o[i] - c->o[i] != 0, bad);
    }
}

TEST(scales) {
    for (int64_t i = 0; i < (h_run.large ? 600 : 40); i++) {
        h_rng r = h_case_rng(i);
        q8_case c;
        if (!h_case(i)) continue;
        c.kv_heads = (int32_t)h_range(&r, 1, 3);
        c.q_heads = c.kv_heads * (int32_t)h_range(&r, 1, 9);
        c.k_dim = 32 * (int32_t)h_range(&r, 1, 6);
        c.v_dim = 32 * (int32_t)h_range(&r, 1, 6);
        c.keys = (int32_t)h_range(&r, 1, h_one_in(&r, 2) ? 40 : 300);
        c.rows = i % 2 && c.keys > 17 ? (int32_t)h_range(&r, 17, c.keys < 130 ? c.keys : 130) : 1;
        c.q = (float *)malloc((size_t)(c.rows * c.q_heads * c.k_dim) * 4);
        c.o = (float *)malloc((size_t)(c.rows * c.q_heads * c.v_dim) * 4);
        c.lse = (float *)malloc((size_t)(c.rows * c.q_heads) * 4);
        for (int side = 0; side < 2; side++) {
            c.dtype[side] = i % 5 < 2 ? RA_Q8_0 : i % 5 < 4 ? RA_Q4_0 : random_scaled(&r);
            c.row_bytes[side] = (int32_t)row_bytes(c.dtype[side], side ? c.v_dim : c.k_dim);
            const int64_t rows = (int64_t)c.keys * c.kv_heads;
            c.kv[side] = (uint8_t *)malloc((size_t)(rows * c.row_bytes[side]));
            q8_fill(c.kv[side], rows * (side ? c.v_dim : c.k_dim) / 32, c.dtype[side],
                    side || i % 3 == 0, &r);
        }
        for (int32_t j = 0; j < c.rows * c.q_heads * c.k_dim; j++)
            c.q[j] = (float)((double)h_normal(&r) * ldexp(1, i % 4 ? 0 : (int)h_range(&r, -9, 2)));
        for (int32_t isa = RA_ISA_SCALAR; isa <= RA_ISA_NEON; isa++) {
            if (!ra_isa_available(isa)) continue;
            q8_run(&c, isa);
            for (int32_t h = 0; h < c.rows * c.q_heads; h += 1 + c.rows / (h_run.large ? 20 : 4))
                q8_check(&c, h, isa >= RA_ISA_AVX512_BF16 && isa <= RA_ISA_AMX ? ldexp(1, -16) : 0);
        }
        q8_nan(&c, i % 4 < 2 ? RA_ISA_AUTO : RA_ISA_SCALAR, &r);
        free(c.q);
        free(c.o);
        free(c.lse);
        free(c.kv[0]);
        free(c.kv[1]);
    }
}

/* ggml's rule for a block of q4_0, in its own words: d = x / -8 for the first x of the largest
 * magnitude; n = min(15, truncated (x / d + 8.5)). */
static void q4_rule(uint8_t *block, const float *x) {
    float most = 0, at = 0;
    for (int i = 0; i < 32; i++) if (fabsf(x[i]) > most) { at = x[i]; most = fabsf(at); }
    const float d = at / -8, inverse = d < 0 || d > 0 ? 1 / d : 0;
    dtype_store(block, dtype_round(d, RA_F16), RA_F16);
    for (int i = 0; i < 16; i++) {
        const float lo = x[i] * inverse, hi = x[16 + i] * inverse;
        const int n = (int)(lo + 8.5f), m = (int)(hi + 8.5f);
        block[2 + i] = (uint8_t)((n > 15 ? 15 : n) | (m > 15 ? 15 : m) << 4);
    }
}

/* To q4_0 in the bytes of that rule, and back by its definition; numbers that q4_0 lacks. */
TEST(convert_q4_0) {
    static float x[320], y[320];
    static uint8_t packed[180], want[180], wide[340];
    h_rng r = h_case_rng(0);
    for (int n = 0; n < (h_run.large ? 2000 : 200); n++) {
        for (int i = 0; i < 320; i++) x[i] = h_normal(&r) * (i < 32 ? 0 : i < 64 ? 1e-3f : 30);
        for (int i = 96; i < 160; i++) x[i] = (float)h_range(&r, -16, 16) / 16; /* ties, equals */
        for (int i = 0; i < 10; i++) q4_rule(want + 18 * i, x + 32 * i);
        CHECK_EQ(ra_convert(packed, RA_Q4_0, x, RA_F32, 320), RA_OK);
        CHECK_BITS(packed, want, sizeof want);
        CHECK_EQ(ra_convert(y, RA_F32, packed, RA_Q4_0, 320), RA_OK);
        for (int i = 0; i < 320; i++) {
            const uint8_t *at = packed + i / 32 * 18;
            const int n4 = (at[2 + i % 16] >> i % 32 / 16 * 4 & 15) - 8;
            CHECK(y[i] == dtype_load(at, RA_F16) * (float)n4);
        }
        CHECK_EQ(ra_convert(wide, RA_Q8_0, packed, RA_Q4_0, 320), RA_OK);
        CHECK_EQ(ra_convert(want, RA_Q4_0, wide, RA_Q8_0, 320), RA_OK);
    }
    for (int i = 0; i < 32; i++) x[i] = i ? (float)i : NAN;
    x[1] = HUGE_VALF;
    x[2] = -1e30f;
    CHECK_EQ(ra_convert(packed, RA_Q4_0, x, RA_F32, 32), RA_OK);
    CHECK_EQ(ra_convert(y, RA_F32, packed, RA_Q4_0, 32), RA_OK);
    CHECK(y[0] == 0 && y[1] == 8.0f * 65504.0f && y[2] == -7.0f * 65504.0f && y[3] == 0);
    for (int i = 0; i < 32; i++) x[i] = i ? 0 : 1e-38f;
    CHECK_EQ(ra_convert(packed, RA_Q4_0, x, RA_F32, 32), RA_OK);
    CHECK_EQ(ra_convert(y, RA_F32, packed, RA_Q4_0, 32), RA_OK);
    for (int i = 0; i < 32; i++) CHECK(y[i] == 0);
    memset(packed, 1, 18);             /* a block that does not reach -8 stays as it is */
    CHECK_EQ(ra_convert(want, RA_Q4_0, packed, RA_Q4_0, 32), RA_OK);
    CHECK_BITS(want, packed, 18);
    CHECK_EQ(ra_convert(packed, RA_Q4_0, x, RA_F32, 16), RA_E_SHAPE);
    CHECK_EQ(ra_convert(x, RA_F32, packed, RA_Q4_0, 33), RA_E_SHAPE);
}

/* To q8_0 and back: within half a step of the scale. 16-bit numbers in f32 keep their bits. */
TEST(convert) {
    enum { N = 320 };
    static float x[N], y[N], z[N];
    static uint8_t packed[N / 32 * 34], half[2 * N];
    h_rng r = h_case_rng(0);
    for (int i = 0; i < N; i++) x[i] = h_normal(&r) * (i < 32 ? 0 : i < 64 ? 1e-3f : 30);
    CHECK_EQ(ra_convert(packed, RA_Q8_0, x, RA_F32, N), RA_OK);
    CHECK_EQ(ra_convert(y, RA_F32, packed, RA_Q8_0, N), RA_OK);
    for (int i = 0; i < N; i += 32) {
        float most = 0, scale;
        for (int j = i; j < i + 32; j++) most = fabsf(x[j]) > most ? fabsf(x[j]) : most;
        scale = dtype_load(packed + i / 32 * 34, RA_F16);
        CHECK(fabs((double)(scale - most / 127)) <= (double)most / 127 * 0.0005 + 6e-8);
        for (int j = i; j < i + 32; j++)
            CHECK(fabs((double)(y[j] - x[j])) <= (double)most * (0.5 / 127 + 0.0006) + 8e-6);
    }
    for (int i = RA_F16; i <= RA_BF16; i++) {
        for (int j = 0; j < N; j++) z[j] = dtype_round(x[j], i);
        CHECK_EQ(ra_convert(half, i, x, RA_F32, N - 5), RA_OK);
        CHECK_EQ(ra_convert(y, RA_F32, half, i, N - 5), RA_OK);
        CHECK_BITS(y, z, (N - 5) * 4);
    }
    CHECK_EQ(ra_convert(y, RA_F32, x, RA_F32, N), RA_OK);
    CHECK_BITS(y, x, sizeof x);
    memset(packed, 1, 34);             /* a block that does not reach 127 stays as it is */
    CHECK_EQ(ra_convert(half, RA_Q8_0, packed, RA_Q8_0, 32), RA_OK);
    CHECK_BITS(half, packed, 34);
    for (int i = 0; i < 32; i++) x[i] = i ? (float)i : NAN;  /* numbers that q8_0 lacks */
    x[1] = HUGE_VALF;
    x[2] = -1e30f;
    CHECK_EQ(ra_convert(packed, RA_Q8_0, x, RA_F32, 32), RA_OK);
    CHECK_EQ(ra_convert(y, RA_F32, packed, RA_Q8_0, 32), RA_OK);
    CHECK(y[0] == 0 && y[1] == 127.0f * 65504.0f && y[2] == -127.0f * 65504.0f && y[3] == 0);
    for (int i = 0; i < 32; i++) x[i] = i ? 0 : 1e-38f;
    CHECK_EQ(ra_convert(packed, RA_Q8_0, x, RA_F32, 32), RA_OK);
    CHECK_EQ(ra_convert(y, RA_F32, packed, RA_Q8_0, 32), RA_OK);
    for (int i = 0; i < 32; i++) CHECK(y[i] == 0);
    CHECK_EQ(ra_convert(packed, RA_Q8_0, x, RA_F32, 33), RA_E_SHAPE);
    CHECK_EQ(ra_convert(packed, 6, x, RA_F32, 32), RA_E_ENUM);
    CHECK_EQ(ra_convert(NULL, RA_F16, x, RA_F32, 1), RA_E_NULL);
    CHECK_EQ(ra_convert(packed, RA_F16, x, RA_F32, -1), RA_E_RANGE);
    CHECK_EQ(ra_convert(NULL, RA_F16, NULL, RA_F32, 0), RA_OK);
}

/* 1 to 5 queries, in a quarter of the cases up to 40, after many keys of any dtypes: most calls
 * take the decoding form. Every key that no row sees has a NaN, and sometimes one that is seen. */
TEST(decoding) {
    int64_t i = h_run.other ? 63 : 0, q, n = h_run.large ? 2000 : i + 63;
    for (; i < n; i++) {
        h_rng r = h_case_rng(i);
        problem p;
        setup s;
        if (!h_case(i)) continue;
        problem_shape(&p, h_range(&r, 1, i % 4 ? 5 : 40), 4, i % 2 ? 2 : 1, random_dim(&r),
                      random_dim(&r));
        p.q_offset = i % 3 ? h_range(&r, 0, 200) : h_range(&r, 1000, 5000);
        p.tk[0] = p.k_max = p.q_offset + p.q_max;
        problem_mask(&p, &r, (int)(i % MASKS));
        if (h_one_in(&r, 2)) problem_options(&p, &r, (int)h_range(&r, 0, 31));
        if (h_one_in(&r, 2)) {
            problem_dtypes(&p, (int32_t)h_range(&r, 1, 3), (int32_t)h_range(&r, 1, 3),
                           (int32_t)h_range(&r, 1, 3), (int32_t)h_range(&r, 1, 3));
        }
        some_scaled(&p, &r);
        problem_data(&p, &r);
        for (int64_t k = 0; k < p.k_max; k++) {
            int seen = h_one_in(&r, 4000);
            for (q = 0; q < p.q_max; q++) seen += visible(&p.mask, p.q_offset + q, k) ? 2 : 0;
            if (seen < 2) p.k[k * p.Hkv * p.Dk] = p.v[(k * p.Hkv + 1) * p.Dv - 1] = (float)NAN;
            if ((seen & 1) && !has_scales(p.v_dtype)) p.v[k * p.Hkv * p.Dv] = (float)NAN;
        }
        setup_plain(&s, 1, RA_LAYOUT_CONTIGUOUS + (int32_t)h_range(&r, 0, 2));
        s.call = CALL_ATTENTION;
        s.threads = 1;
        s.isa = random_isa(&r);
        s.strides = (int32_t)h_range(&r, STRIDES_PACKED, STRIDES_MIXED);
        compare(&p, &s);
        same_on_threads(&p, &s, 4);
        problem_free(&p);
    }
}

/* One rank, with positions that come with the call, as runs or as cells. */
TEST(attention_at_positions) {
    wish w = { ANY, L_CONTIGUOUS, 1, ANY, 1.5e6 };
    int64_t n = h_run.large ? 2000 : 80;
    for (int64_t i = 0; i < n; i++) {
        problem p;
        setup s;
        h_rng r = h_case_rng(i);
        if (!h_case(i)) continue;
        w.layout = i % 2 ? L_RUNS : L_ARRAY;
        random_problem(&p, &r, &w);
        random_setup(&s, &p, &r, &w);
        problem_data(&p, &r);
        s.call = CALL_ATTENTION;
        s.threads = (int32_t)h_range(&r, 1, 4);
        compare(&p, &s);
        setup_free(&s);
        problem_free(&p);
    }
}

/* One kv head of a cache that `tokens` rows of `heads` heads read; the last keys are their own. */
typedef struct company {
    int32_t dtype, isa, dim, keys, heads, tokens, window;
    void *k, *v, *q;
    int64_t row, q_row;                /* bytes of a row of K and V, of Q */
} company;

/* The rows [token, token + tokens) of heads [head, head + heads), among `batch` equal sequences. */
static void company_call(const company *c, int32_t token, int32_t tokens, int32_t head,
                         int32_t heads, int32_t batch, int nth, float *o) {
    ra_desc d = { 0 };
    ra_tensors t = { 0 };
    scratch w;
    d.q_heads = heads;
    d.kv_heads = 1;
    d.k_dim = d.v_dim = c->dim;
    d.q_dtype = has_scales(c->dtype) ? RA_F32 : c->dtype;
    d.k_dtype = d.v_dtype = c->dtype;
    d.o_dtype = RA_F32;
    d.sequences = batch;
    d.tokens = tokens;
    d.q_offset = c->keys - c->tokens + token;
    d.mask.kind = RA_MASK_CAUSAL;
    d.mask.window = c->window;
    d.isa = c->isa;
    t.q.data = (const uint8_t *)c->q + (token * c->heads + head) * c->q_row;
    t.q.token_stride = c->heads * c->q_row;
    t.q.batch_stride = 16;             /* overlaps: other sequences only take part */
    t.k.data = c->k;
    t.v.data = c->v;
    t.k.batch_stride = t.v.batch_stride = c->row * 64;
    t.o.data = o;
    w = scratch_for(&d, nth);
    for (int i = 0; i < nth; i++) CHECK_EQ(ra_attention(&d, &t, w.mem, w.bytes, i, nth), RA_OK);
    free(w.raw);
}

static void company_check(const company *c) {
    const size_t size = (size_t)c->dim * sizeof(float);
    float *all = (float *)malloc(16 * size), *some = (float *)malloc(48 * size);
    company_call(c, 0, c->tokens, 0, c->heads, 1, 1, all);
    for (int32_t t = 0; t < c->tokens; t++)
        for (int32_t h = 0; h < c->heads; h++) {
            company_call(c, t, 1, h, 1, 1, 1, some);
            CHECK_BITS(some, all + (t * c->heads + h) * c->dim, size);
        }
    for (int32_t t = 1; t < c->tokens; t++) {
        company_call(c, t, c->tokens - t, 0, c->heads, 1, 1, some);
        CHECK_BITS(some, all + t * c->heads * c->dim,
                   (size_t)((c->tokens - t) * c->heads) * size);
    }
    company_call(c, 0, c->tokens, 0, c->heads, 3, 1, some);
    CHECK_BITS(some, all, (size_t)(c->tokens * c->heads) * size);
    company_call(c, 0, c->tokens, 0, c->heads, 1, 3, some);
    CHECK_BITS(some, all, (size_t)(c->tokens * c->heads) * size);
    free(all);
    free(some);
}

/* Decoding: a row has the same bits alone and beside up to 15 others, of its token, of later tokens
 * and of other sequences, and with any number of threads. Scores grow along the cache, so maxima
 * rise. */
TEST(row_bits_do_not_depend_on_other_rows) {
    static const int32_t isas[4] = { RA_ISA_SCALAR, RA_ISA_AVX2, RA_ISA_AVX512,
                                     RA_ISA_AVX512_BF16 };
    static const int32_t keys[8] = { 7, 33, 64, 66, 1026, 1500, 16386, 17000 };
    static const int32_t shape[4][2] = { { 4, 4 }, { 1, 16 }, { 8, 2 }, { 1, 3 } };
    enum { MOST = (17000 + 128) * 160, APART = 1000 };     /* V begins that much later than K */
    const int64_t cases = 8 * 5 * 4 * 4;
    float *normal = (float *)malloc((MOST + APART) * sizeof *normal);
    h_rng every = h_case_rng(-1);
    for (int64_t j = 0; j < MOST + APART; j++) normal[j] = h_normal(&every);
    for (int64_t i = 0; i < cases; i++) {
        h_rng r = h_case_rng(i);
        company c;
        float *x;
        int64_t n, left = i;
        c.isa = isas[h_pick(&left, 4)];
        c.dtype = RA_F32 + h_pick(&left, 5);
        c.keys = keys[h_pick(&left, 8)];
        c.heads = shape[left][0];
        c.tokens = shape[left][1];
        if (!ra_isa_available(c.isa) || !h_case(i)) continue;
        if (c.tokens > c.keys) c.tokens = c.keys;
        if (c.keys > 2000 && !h_run.large && (left || c.isa == RA_ISA_SCALAR)) continue;
        c.dim = (int32_t)h_range(&r, 1, 5) * (has_scales(c.dtype) || h_one_in(&r, 2) ? 32 : 24);
        c.window = h_one_in(&r, 3) ? (int32_t)h_range(&r, 1, c.keys) : 0;
        c.row = row_bytes(c.dtype, c.dim);
        c.q_row = c.dim * (c.dtype == RA_F32 || has_scales(c.dtype) ? 4 : 2);
        n = (int64_t)(c.keys + 128) * c.dim;
        x = (float *)malloc((size_t)n * sizeof *x);
        c.k = malloc((size_t)(c.keys + 128) * (size_t)c.row);
        c.v = malloc((size_t)(c.keys + 128) * (size_t)c.row);
        c.q = malloc((size_t)(16 * c.q_row + 64));
        for (int64_t j = 0; j < n; j++) x[j] = normal[j] * (1.0f + 40.0f * (float)j / (float)n);
        ra_convert(c.k, c.dtype, x, RA_F32, n);
        ra_convert(c.v, c.dtype, normal + APART, RA_F32, n);
        for (int64_t j = 0; j < 16 * c.dim; j++) x[j] = h_normal(&r);
        memset(c.q, 0, (size_t)(16 * c.q_row + 64));
        ra_convert(c.q, has_scales(c.dtype) ? RA_F32 : c.dtype, x, RA_F32, 16 * c.dim);
        company_check(&c);
        free(x);
        free(c.k);
        free(c.v);
        free(c.q);
    }
    free(normal);
}

/* A sequence of one row in a batch whose other sequence has more rows, with one query head per KV
 * head or two: the row has the bits that it has alone, whatever the workspace held before. */
TEST(short_row_in_a_longer_batch) {
    enum { D = 32, KEYS = 100, MOST = 16, HEADS = 6, ROWS = KEYS + MOST };
    static float q[2][MOST][2 * HEADS][D], o[2][MOST][2 * HEADS][D], alone[2 * HEADS][D];
    static float x[2 * ROWS * HEADS * D], k[2][ROWS][HEADS][D], v[2][ROWS][HEADS][D];
    for (int64_t i = 0; i < 5 * 4 * MOST; i++) {
        h_rng r = h_case_rng(i);
        int64_t left = i;
        const int32_t most = 1 + h_pick(&left, MOST), isa = RA_ISA_SCALAR + h_pick(&left, 4);
        const int32_t dtype = RA_F32 + (int32_t)left;
        const int32_t group = most > 8 ? 1 : (int32_t)h_range(&r, 1, 2);   /* decoding form */
        const int64_t tokens[2] = { most, 1 }, kv_tokens[2] = { KEYS + most, KEYS + 1 };
        ra_desc d = ra_desc_make(HEADS * group, HEADS, D, RA_F32, RA_MASK_CAUSAL);
        const int64_t row = row_bytes(dtype, D);
        ra_tensors t = { 0 };
        scratch w;
        if (!ra_isa_available(isa) || !h_case(i)) continue;
        for (int j = 0; j < 2 * MOST * 2 * HEADS * D; j++) (&q[0][0][0][0])[j] = h_normal(&r);
        for (int j = 0; j < 2 * ROWS * HEADS * D; j++) x[j] = h_normal(&r);
        ra_convert(k, dtype, x, RA_F32, 2 * ROWS * HEADS * D);
        for (int j = 0; j < 2 * ROWS * HEADS * D; j++) x[j] = h_normal(&r);
        ra_convert(v, dtype, x, RA_F32, 2 * ROWS * HEADS * D);
        d.k_dtype = d.v_dtype = dtype;
        d.isa = isa;
        d.sequences = 2;
        d.tokens = most;
        d.tokens_of = tokens;
        d.kv_tokens = KEYS + most;
        d.kv_tokens_of = kv_tokens;
        d.q_offset = KEYS;
        t.q.data = q;
        t.k.data = k;
        t.v.data = v;
        t.o.data = o;
        t.k.batch_stride = t.v.batch_stride = ROWS * HEADS * row;
        w = scratch_for(&d, 1);
        memset(w.mem, (int)h_range(&r, 0, 255), w.bytes);
        CHECK_EQ(ra_attention(&d, &t, w.mem, w.bytes, 0, 1), RA_OK);
        d.sequences = 1;
        d.tokens = 1;
        d.tokens_of = d.kv_tokens_of = NULL;
        d.kv_tokens = 0;
        t.q.data = &q[0][0][0][0] + (int64_t)most * HEADS * group * D;
        t.k.data = (const uint8_t *)&k[0][0][0][0] + t.k.batch_stride;
        t.v.data = (const uint8_t *)&v[0][0][0][0] + t.v.batch_stride;
        t.o.data = alone;
        CHECK_EQ(ra_attention(&d, &t, w.mem, w.bytes, 0, 1), RA_OK);
        CHECK_BITS(alone, &o[0][0][0][0] + (int64_t)most * HEADS * group * D,
                   (size_t)(HEADS * group * D) * sizeof(float));
        free(w.raw);
    }
}

/* Keys that a bias of -inf hides have the effect of keys that intervals mask, to the bit: whole
 * blocks, with NaN in K and V, and parts of blocks. Decoding, short calls and prefill; heads that
 * share a bias or have their own; a row that sees no key. */
TEST(hidden_blocks_equal_masked_ones) {
    enum { D = 40, KEYS = 1300, HEADS = 4, ROWS = 70, ALL = HEADS * ROWS * KEYS };
    static const int32_t tokens[4] = { 1, 3, 8, ROWS };
    static float x[KEYS * 2 * D], q[ROWS * HEADS * D], o[2][ROWS * HEADS * (D + 1)], wide[2][ALL];
    static uint8_t kept[KEYS * 2 * D * 4], asked[ROWS * HEADS * D * 4], bias[2][ALL * 4];
    for (int64_t i = 0; i < 4 * 3 * 2 * 5; i++) {
        h_rng r = h_case_rng(i);
        int64_t left = i;
        const int32_t rows = tokens[h_pick(&left, 4)], dtype = RA_F32 + h_pick(&left, 3);
        const int32_t each = h_pick(&left, 2), isa = RA_ISA_SCALAR + (int32_t)left;
        const int32_t size = dtype == RA_F32 ? 4 : 2;
        const int32_t data = isa == RA_ISA_AVX512_BF16 ? RA_BF16 : RA_F32;
        int32_t lo[ROWS], hi[ROWS];
        ra_desc d;
        ra_tensors t = { 0 };
        scratch w;
        if (!ra_isa_available(isa) || !h_case(i)) continue;
        d = ra_desc_make(HEADS, 2, D, data, RA_MASK_NONE);
        d.o_dtype = RA_F32;
        d.tokens = rows;
        d.kv_tokens = KEYS;
        d.scores = RA_SCORE_BIAS;
        d.isa = isa;
        for (int32_t j = 0; j < ROWS; j++) {
            lo[j] = 128 + 2 * j;
            hi[j] = j == 2 ? lo[j] : j % 3 ? 1088 : 600;
        }
        for (int64_t j = 0; j < KEYS * 2 * D; j++)
            x[j] = j / (2 * D) < 128 || j / (2 * D) >= 1088 ? (float)NAN : (float)h_normal(&r);
        for (int64_t j = 0; j < ROWS * HEADS * D; j++) q[j] = (float)h_normal(&r);
        for (int64_t j = 0; j < ALL; j++) {
            const int64_t row = j / KEYS % ROWS, key = j % KEYS;
            wide[0][j] = wide[1][j] = h_one_in(&r, 2) ? 0.0f : (float)h_normal(&r);
            if (key < lo[row] || key >= hi[row]) wide[1][j] = -INFINITY;
        }
        CHECK_EQ(ra_convert(kept, data, x, RA_F32, KEYS * 2 * D), RA_OK);
        CHECK_EQ(ra_convert(asked, data, q, RA_F32, ROWS * HEADS * D), RA_OK);
        t.q.data = asked;
        t.k.data = t.v.data = kept;
        t.bias.keys = KEYS;
        t.bias.dtype = dtype;
        t.bias.key_step = size;
        t.bias.row_step = KEYS * size;
        t.bias.head_step = each ? ROWS * KEYS * size : 0;
        w = scratch_for(&d, 1);
        for (int j = 0; j < 2; j++) {
            CHECK_EQ(ra_convert(bias[j], dtype, wide[j], RA_F32, ALL), RA_OK);
            t.bias.data = bias[j];
            t.o.data = o[j];
            t.lse.data = o[j] + ROWS * HEADS * D;
            memset(o[j], 0, sizeof o[j]);
            d.mask.kind = j ? RA_MASK_NONE : RA_MASK_INTERVALS;
            d.mask.lo = j ? NULL : lo;
            d.mask.hi = j ? NULL : hi;
            d.mask.interval_count = j ? 0 : ROWS;
            CHECK_EQ(ra_attention(&d, &t, w.mem, w.bytes, 0, 1), RA_OK);
        }
        CHECK_BITS(o[0], o[1], sizeof o[0]);
        if (rows > 2) CHECK(isinf(o[1][ROWS * HEADS * D + 2 * HEADS]));
        if (rows > 2) CHECK_EQ(o[1][2 * HEADS * D] == 0, 1);
        free(w.raw);
    }
}

/* Decoding with biases that are 0 in most blocks, with ALiBi or a softcap or neither: the same bits
 * whether biases are contiguous or every second element, and beside another row. The last block has
 * 7 keys, whose biases are not whole words, and as a rule only that of the last key is not 0. */
TEST(modified_decode_ignores_other_rows) {
    enum { D = 64, KEYS = 903, HEADS = 16, ALL = HEADS * KEYS, LATE = KEYS - 300 };
    static float x[KEYS * HEADS * D], q[2 * HEADS * D], o[3][2 * HEADS * D], wide[2 * ALL];
    static uint8_t kept[KEYS * HEADS * D * 4], asked[sizeof q], bias[2][ALL * 4 * 4];
    float slope[HEADS];
    h_rng every = h_case_rng(-1);
    for (int i = 0; i < HEADS; i++) slope[i] = 0.02f * (float)i;
    for (int64_t j = 0; j < KEYS * HEADS * D; j++) x[j] = h_normal(&every);
    for (int64_t i = 0; i < 5 * 3 * 5 * 3 * 2; i++) {
        h_rng r = h_case_rng(i);
        int64_t left = i;
        const int32_t form = h_pick(&left, 3), data = RA_F32 + h_pick(&left, 5);
        const int32_t dtype = RA_F32 + h_pick(&left, 3), each = h_pick(&left, 2);
        const int32_t isa = RA_ISA_SCALAR + (int32_t)left;
        const int32_t asks = has_scales(data) ? RA_F32 : data, size = dtype == RA_F32 ? 4 : 2;
        const int32_t kv_heads = h_one_in(&r, 3) ? HEADS : h_one_in(&r, 2) ? 4 : 8;
        ra_tensors t = { 0 };
        ra_desc d;
        if (!ra_isa_available(isa) || !h_case(i)) continue;
        d = ra_desc_make(HEADS, kv_heads, D, data, RA_MASK_NONE);
        d.q_dtype = asks;
        d.o_dtype = RA_F32;
        d.kv_tokens = KEYS;
        d.scores = RA_SCORE_BIAS | (form == 1 ? RA_SCORE_ALIBI : 0);
        d.softcap = form == 2 ? 5.0f : 0.0f;
        d.isa = isa;
        if (form == 1) t.alibi = slope;
        for (int64_t j = 0; j < 2 * HEADS * D; j++) q[j] = 3 * (float)h_normal(&r);
        memset(wide, 0, sizeof wide);
        for (int j = 0; j < 2 * HEADS; j++) {          /* [head][row] */
            wide[j * KEYS + h_range(&r, 0, KEYS - 1)] = 9.0f;
            wide[j * KEYS + KEYS - 1] = (float)h_normal(&r);
            for (int k = LATE; k < LATE + 150; k++) wide[j * KEYS + k] = (float)h_normal(&r);
            for (int k = 70; k < 150; k++) wide[j * KEYS + k] = -INFINITY;
        }
        CHECK_EQ(ra_convert(kept, data, x, RA_F32, KEYS * kv_heads * D), RA_OK);
        CHECK_EQ(ra_convert(asked, asks, q, RA_F32, 2 * HEADS * D), RA_OK);
        CHECK_EQ(ra_convert(bias[0], dtype, wide, RA_F32, 2 * ALL), RA_OK);
        for (int64_t j = 0; j < 2 * ALL; j++)
            memcpy(bias[1] + 2 * j * size, bias[0] + j * size, (size_t)size);
        t.k.data = t.v.data = kept;
        if (h_one_in(&r, 2)) {                         /* [head][key], otherwise [key][head] */
            t.k.token_stride = row_bytes(data, D);
            t.k.head_stride = KEYS * t.k.token_stride;
            t.v = t.k;
        }
        t.bias.keys = KEYS;
        t.bias.dtype = dtype;
        for (int j = 0; j < 3; j++) {                  /* the last call has both rows */
            const int apart = j ? 2 : 1, late = j == 2 ? 0 : 1;
            scratch w;
            d.tokens = j == 2 ? 2 : 1;
            d.q_offset = KEYS - d.tokens;
            t.q.data = asked + late * HEADS * D * (asks == RA_F32 ? 4 : 2);
            t.bias.data = bias[j != 0] + late * apart * KEYS * size;
            t.bias.key_step = apart * size;
            t.bias.row_step = apart * KEYS * size;
            t.bias.head_step = each ? 2 * apart * KEYS * size : 0;
            t.o.data = o[j];
            w = scratch_for(&d, 1);
            CHECK_EQ(ra_attention(&d, &t, w.mem, w.bytes, 0, 1), RA_OK);
            free(w.raw);
        }
        CHECK_BITS(o[0], o[1], HEADS * D * sizeof(float));
        CHECK_BITS(o[0], o[2] + HEADS * D, HEADS * D * sizeof(float));
    }
}

/* One cache for several sequences, with a sequence and a position per cell, as documents of SPAN
 * positions: cells in any order, empty ones with NaN, a window and kept tokens per sequence, and
 * new tokens of all of them in one call. */
enum { CELLS = 330, CELL_DIM = 24, SPAN = 1 << 20 };

typedef struct shelf {
    float q[70 * 4 * CELL_DIM], k[CELLS * 2 * CELL_DIM], v[CELLS * 2 * CELL_DIM];
    float o[70 * 4 * CELL_DIM];
    int32_t at[CELLS], asks[70], window, keep;
} shelf;

static double cells_score(const shelf *x, int row, int head, int cell) {
    const int32_t p = x->asks[row], key = x->at[cell];
    double s = 0;
    if (key < 0 || key / SPAN != p / SPAN || key > p) return -HUGE_VAL;
    if (x->window && key <= p - x->window && key % SPAN >= x->keep) return -HUGE_VAL;
    for (int i = 0; i < CELL_DIM; i++)
        s += (double)x->q[(row * 4 + head) * CELL_DIM + i] *
             (double)x->k[(cell * 2 + head / 2) * CELL_DIM + i];
    return s / sqrt((double)CELL_DIM);
}

static void cells_row(const shelf *x, int row, int head, double *o) {
    double top = -HUGE_VAL, sum = 0;
    memset(o, 0, CELL_DIM * sizeof *o);
    for (int c = 0; c < CELLS; c++) top = fmax(top, cells_score(x, row, head, c));
    for (int c = 0; c < CELLS; c++) {
        const double s = cells_score(x, row, head, c), w = isinf(s) ? 0 : exp(s - top);
        sum += w;
        for (int i = 0; i < CELL_DIM && w > 0; i++)
            o[i] += w * (double)x->v[(c * 2 + head / 2) * CELL_DIM + i];
    }
    for (int i = 0; i < CELL_DIM; i++) o[i] /= sum;
}

/* Cells that are taken by one of three sequences, each of which grows from position 0. */
static void cells_fill(shelf *x, h_rng *r, int rows) {
    int32_t next[3] = { 0, 0, 0 };
    for (int i = 0; i < rows * 4 * CELL_DIM; i++) x->q[i] = (float)h_normal(r);
    for (int c = 0; c < CELLS; c++) {
        const int32_t s = (int32_t)h_range(r, 0, 2);
        x->at[c] = h_one_in(r, 4) && c + rows < CELLS ? -1 : s * SPAN + next[s]++;
        if (c + rows >= CELLS) x->asks[c + rows - CELLS] = x->at[c];
        for (int i = c * 2 * CELL_DIM; i < (c + 1) * 2 * CELL_DIM; i++) {
            x->k[i] = x->at[c] < 0 ? (float)NAN : (float)h_normal(r);
            x->v[i] = x->at[c] < 0 ? (float)NAN : (float)h_normal(r);
        }
    }
    for (int c = CELLS - rows - 1; c > 0; c--) {       /* shuffles them */
        const int other = (int)h_range(r, 0, c);
        const int32_t at = x->at[c];
        if ((x->at[c] < 0) != (x->at[other] < 0)) continue;
        x->at[c] = x->at[other];
        x->at[other] = at;
    }
}

TEST(sequences_in_one_cache) {
    static const int32_t rows[4] = { 3, 4, 20, 70 };
    static const int64_t first[3] = { 0, SPAN, 2 * SPAN };
    static shelf x;
    for (int64_t i = 0; i < 24; i++) {
        h_rng r = h_case_rng(i);
        double right[CELL_DIM];
        ra_desc d;
        ra_tensors t = { 0 };
        scratch w;
        int64_t left = i;
        const int32_t tokens = rows[h_pick(&left, 4)];
        const int kind = h_pick(&left, 3);             /* plain, a window, a window and keep */
        if (!h_case(i)) continue;
        cells_fill(&x, &r, tokens);
        x.window = kind ? 24 : 0;
        x.keep = kind == 2 ? 3 : 0;
        d = ra_desc_make(4, 2, CELL_DIM, RA_F32, RA_MASK_CAUSAL);
        d.tokens = tokens;
        d.kv_tokens = CELLS;
        d.mask.doc_first = first;
        d.mask.doc_count = 3;
        d.mask.window = x.window;
        d.mask.keep = x.keep;
        t.q.data = x.q; t.k.data = x.k; t.v.data = x.v; t.o.data = x.o;
        t.q_pos.array = x.asks;
        t.q_pos.count = d.tokens;
        t.k_pos.array = x.at;
        t.k_pos.count = CELLS;
        w = scratch_for(&d, 1);
        CHECK_EQ(ra_attention(&d, &t, w.mem, w.bytes, 0, 1), RA_OK);
        for (int row = 0; row < d.tokens; row++)
            for (int h = 0; h < 4; h++) {
                cells_row(&x, row, h, right);
                CHECK_CLOSE(x.o + (row * 4 + h) * CELL_DIM, right, CELL_DIM, 4e-6, 0);
            }
        free(w.raw);
    }
}

/* A bias of f16 or bf16 gives the bits of the same numbers in f32, also with -inf as in a mask;
 * decoding, short calls and prefill, and every kind of broadcast. */
TEST(bias_in_16_bits) {
    static const int32_t tokens[3] = { 1, 8, 70 };
    enum { D = 40, KEYS = 150, HEADS = 4, ALL = HEADS * 70 * KEYS };
    static float x[KEYS * HEADS * D], q[70 * HEADS * D], o[2][70 * HEADS * D], wide[ALL];
    static uint16_t half[ALL];
    for (int64_t i = 0; i < 3 * 2 * 4 * 4; i++) {
        h_rng r = h_case_rng(i);
        int64_t left = i;
        const int32_t rows = tokens[h_pick(&left, 3)], dtype = h_pick(&left, 2) ? RA_BF16 : RA_F16;
        const int32_t isa = RA_ISA_SCALAR + h_pick(&left, 4), kind = (int32_t)left;
        ra_error e = { 0 };
        ra_desc d;
        ra_tensors t = { 0 };
        scratch w;
        if (!ra_isa_available(isa) || !h_case(i)) continue;
        d = ra_desc_make(HEADS, 2, D, RA_F32, RA_MASK_NONE);
        d.tokens = rows;
        d.kv_tokens = KEYS;
        d.scores = RA_SCORE_BIAS;
        d.isa = isa;
        d.error = &e;
        t.bias.dtype = dtype;
        for (int64_t j = 0; j < ALL; j++) wide[j] = h_one_in(&r, 3) ? -INFINITY : h_normal(&r);
        for (int64_t j = 0; j < KEYS * HEADS * D; j++) x[j] = h_normal(&r);
        for (int64_t j = 0; j < 70 * HEADS * D; j++) q[j] = h_normal(&r);
        CHECK_EQ(ra_convert(half, t.bias.dtype, wide, RA_F32, ALL), RA_OK);
        CHECK_EQ(ra_convert(wide, RA_F32, half, t.bias.dtype, ALL), RA_OK);
        t.q.data = q;
        t.k.data = t.v.data = x;
        t.bias.keys = KEYS - 7;
        w = scratch_for(&d, 1);
        for (int64_t j = 0; j < 2; j++) {
            const int64_t size = j ? 4 : 2;
            t.bias.data = j ? (const void *)wide : (const void *)half;
            if (j) t.bias.dtype = 0;
            t.bias.key_step = kind == 3 ? 0 : size;
            t.bias.row_step = kind == 2 ? 0 : KEYS * size;
            t.bias.head_step = kind == 1 ? 0 : 70 * KEYS * size;
            t.o.data = o[j];
            CHECK_EQ(ra_attention(&d, &t, w.mem, w.bytes, 0, 1), RA_OK);
        }
        CHECK_BITS(o[0], o[1], (size_t)(d.tokens * HEADS * D) * sizeof(float));
        t.bias.dtype = RA_Q4_0;
        CHECK_EQ(ra_attention(&d, &t, w.mem, w.bytes, 0, 1), RA_E_ENUM);
        t.bias.dtype = RA_F16;
        t.bias.key_step = 3;
        CHECK_EQ(ra_attention(&d, &t, w.mem, w.bytes, 0, 1), RA_E_STRIDE);
        t.bias.dtype = 0;
        d.k_dtype = 12;                /* ggml's q4_K */
        CHECK_EQ(ra_attention(&d, &t, w.mem, w.bytes, 0, 1), RA_E_ENUM);
        CHECK(strcmp(e.field, "k_dtype") == 0);
        free(w.raw);
    }
}

/* Chunks and tasks of many short runs, over rings and on one rank. */
TEST(many_short_runs) {
    wish w = { ANY, L_RUNS, 1, ANY, 1.5e6 };
    int64_t n = h_run.large ? 2000 : 80;
    for (int64_t i = 0; i < n; i++) {
        problem p;
        setup s;
        h_rng r = h_case_rng(i);
        if (!h_case(i)) continue;
        w.ranks = i % 4 ? -1 : 1;
        random_problem(&p, &r, &w);
        random_setup(&s, &p, &r, &w);
        short_layout(&s, &p, &r);
        problem_data(&p, &r);
        if (i % 4 == 0) s.call = CALL_ATTENTION;
        if (i % 4 == 0) s.threads = (int32_t)h_range(&r, 1, 4);
        compare(&p, &s);
        setup_free(&s);
        problem_free(&p);
    }
}

/* Runs of whole blocks in order hold the rows of CONTIGUOUS: without a mask the bits are the same
 * for every length of messages and every call, and with runs of keys alone for few query rows. */
TEST(runs_of_whole_blocks_keep_the_bits) {
    enum { N = 21, T = 64 * 70 };
    static const int64_t lengths[N] = { 64, 64, 128, 64, 64, 64, 256, 64, 64, 512, 64, 64, 64, 128,
                                        640, 1024, 64, 64, 64, 64, 896 };
    int64_t at = 0;
    ra_run runs[N];
    for (int64_t i = 0; i < N; i++) {
        runs[i].first = at;
        runs[i].count = lengths[i];
        runs[i].stride = i % 2;
        at += lengths[i];
    }
    CHECK_EQ(at, T);
    for (int64_t i = 0; i < 8; i++) {
        h_rng r = h_case_rng(i);
        problem p;
        setup s = { 0 };
        outcome plain, listed;
        if (!h_case(i)) continue;
        problem_shape(&p, i % 4 == 3 ? 3 : T, 2, 1, 16, 16);
        p.k_max = p.tk[0] = T;
        problem_data(&p, &r);
        s.ranks = 1;
        s.layout = RA_LAYOUT_CONTIGUOUS;
        s.call = i % 4 < 2 ? CALL_FORWARD : CALL_ATTENTION;
        s.threads = 1;
        describe_case(&p, &s);
        plain = world_run(&p, &s);
        s.layout = RA_LAYOUT_RUNS;
        s.chunk_tokens = i % 4 ? 64 : 1000;
        s.q_runs = s.k_runs = runs;
        s.q_run_count[0] = s.k_run_count[0] = N;
        if (i % 4 == 3) {
            static ra_run three = { 0, 3, 1 };
            s.q_runs = &three;
            s.q_run_count[0] = 1;
        }
        listed = world_run(&p, &s);
        if (outcome_whole(&plain) && outcome_whole(&listed)) {
            CHECK_BITS(listed.o, plain.o, p.q_max * 32 * 4);
            CHECK_BITS(listed.lse, plain.lse, p.q_max * 2 * 4);
        }
        outcome_free(&plain);
        outcome_free(&listed);
        problem_free(&p);
    }
}

/* A ring-buffer cache: key p is in cell p mod cells, so keys are out of order, some cells are not
 * filled yet, and a kept prefix is never overwritten. */
TEST(ring_buffer_cache) {
    for (int64_t i = 0; i < 36; i++) {
        problem p;
        setup s;
        ra_desc d;
        h_rng r = h_case_rng(i);
        int64_t cells = 300, past = i % 3 == 0 ? 100 : i % 3 == 1 ? 300 : 1000;
        int64_t new_tokens = i % 4 == 0 ? 1 : i % 4 == 1 ? 3 : 40;
        int32_t *c;
        if (!h_case(i)) continue;
        problem_shape(&p, new_tokens, 4, 2, 32, 32);
        p.q_offset = past;
        p.tk[0] = p.k_max = past + new_tokens;
        p.mask.kind = RA_MASK_CAUSAL;
        p.mask.window = 250;
        p.mask.keep = i % 2 ? 4 : 0;
        p.absent = (uint8_t *)calloc((size_t)p.k_max, 1);
        setup_plain(&s, 1, RA_LAYOUT_ARRAY);
        s.k_rows[0] = cells + 50;
        s.q_rows[0] = new_tokens;
        s.k_cells[0] = c = (int32_t *)malloc((size_t)s.k_rows[0] * sizeof *c);
        s.q_cells[0] = (int32_t *)malloc((size_t)new_tokens * sizeof *c);
        memset(c, 0xFF, (size_t)s.k_rows[0] * sizeof *c);
        for (int64_t k = 0; k < new_tokens; k++) s.q_cells[0][k] = (int32_t)(past + k);
        for (int64_t k = 0; k < p.k_max; k++) c[k < 4 ? k : 4 + (k - 4) % (cells - 4)] = (int32_t)k;
        memset(p.absent, 1, (size_t)p.k_max);
        for (int64_t k = 0; k < s.k_rows[0]; k++) if (c[k] >= 0) p.absent[c[k]] = 0;
        problem_data(&p, &r);
        s.call = i % 2 ? CALL_ATTENTION : CALL_FORWARD;
        s.threads = 1 + (int32_t)(i % 3);
        s.isa = random_isa(&r);
        d = rank_desc(&p, &s, 0);
        CHECK_EQ(d.kv_tokens, cells + 50);
        compare(&p, &s);
        setup_free(&s);
        problem_free(&p);
    }
}

/* One ring serves plans of several shapes in turn, and each pass is as if it were alone. */
typedef struct two_plans { world w[2]; } two_plans;

static ra_status two_plans_rank(ra_world *library_world, int rank, void *user) {
    two_plans *y = (two_plans *)user;
    ra_plan *plans[2] = { NULL, NULL };
    ra_plan_report g;
    ra_ring *ring = NULL;
    ra_ring_desc rd = { 0 };
    ra_status status = RA_OK;
    for (int i = 0; i < 2 && status == RA_OK; i++) {
        status = ra_plan_create(&plans[i], &y->w[i].seats[rank].d, NULL);
        if (status == RA_OK) status = ra_plan_query(plans[i], rank, &g);
        if (status == RA_OK && (size_t)g.shared_workspace_bytes > rd.workspace_bytes) {
            rd.workspace_bytes = (size_t)g.shared_workspace_bytes;
        }
    }
    if (status == RA_OK) {
        status = ra_ring_create(&ring, plans[0], ra_world_transport(library_world, rank), &rd);
    }
    for (int i = 0; i < 5 && status == RA_OK; i++) {
        status = ra_forward(plans[i % 2], ring, &y->w[i % 2].seats[rank].t, ra_deadline_ms(60000));
    }
    ra_ring_destroy(ring);
    ra_plan_destroy(plans[0]);
    ra_plan_destroy(plans[1]);
    y->w[0].seats[rank].status = y->w[1].seats[rank].status = status;
    return status;
}

TEST(a_ring_serves_several_plans) {
    static two_plans y;
    for (int64_t i = 0; i < 12; i++) {
        wish w = { ANY, ANY, 4, ANY, 3e5 };
        h_rng r = h_case_rng(i);
        problem p[2];
        setup s[2];
        if (!h_case(i)) continue;
        for (int k = 0; k < 2; k++) {
            random_problem(&p[k], &r, &w);
            random_setup(&s[k], &p[k], &r, &w);
            problem_data(&p[k], &r);
            s[k].no_lse = 0;
            CHECK_EQ(world_open(&y.w[k], &p[k], &s[k]), RA_OK);
        }
        CHECK_EQ(ra_world_run(4, two_plans_rank, &y, NULL), RA_OK);
        for (int k = 0; k < 2; k++) {
            outcome got = outcome_gather(&y.w[k]);
            truth t = oracle(&p[k]);
            verdict v;
            describe_case(&p[k], &s[k]);
            if (outcome_whole(&got)) {
                v = outcome_judge(&got, &p[k], &t);
                CHECK(v.o_ratio <= 1);
                CHECK(v.lse_ratio <= 1);
            }
            truth_free(&t);
            outcome_free(&got);
        }
        for (int k = 0; k < 2; k++) { setup_free(&s[k]); problem_free(&p[k]); }
    }
}

/* ra_attention_simple: prefill, chunks after a past, decoding, windows. */
TEST(simple_signature) {
    static const int dims[6] = { 64, 128, 8, 80, 256, 3 };
    for (int64_t i = 0; i < 90; i++) {
        problem p;
        outcome r = { 0 };
        truth t;
        verdict w;
        setup s;
        h_rng rng = h_case_rng(i);
        int64_t nq = i % 3 ? h_range(&rng, 1, 5) : h_range(&rng, 5, 130);
        int64_t past = h_range(&rng, 0, 300);
        if (!h_case(i)) continue;
        problem_shape(&p, nq, 4, i % 2 ? 4 : 2, dims[i % 6], dims[i % 6]);
        p.q_offset = i % 4 ? past : 0;
        p.tk[0] = p.k_max = p.q_offset + nq;
        p.mask.kind = RA_MASK_CAUSAL;
        if (i % 5 < 2) p.mask.window = h_range(&rng, 1, 200);
        if (i % 7 == 0) { p.scale = 0.25f; p.loose = 1; }
        problem_data(&p, &rng);
        setup_plain(&s, 1, RA_LAYOUT_CONTIGUOUS);
        describe_case(&p, &s);
        r.o = floats(nq * 4 * p.Dv);
        r.lse = floats(nq * 4);
        CHECK_EQ(ra_attention_simple(r.o, p.q, p.k, p.v, (int)nq, (int)p.k_max, 4, p.Hkv, p.Dk,
                                     p.scale, i % 5 < 2 ? (int)p.mask.window : -(int)(i % 2),
                                     (int)p.q_offset), RA_OK);
        t = oracle(&p);
        for (past = 0; past < nq * 4; past++) r.lse[past] = (float)t.lse[past];
        w = outcome_judge(&r, &p, &t);
        CHECK(w.o_ratio <= 1);
        truth_free(&t);
        outcome_free(&r);
        problem_free(&p);
    }
}

static const h_test tests[] = {
    ENTRY(masks_and_layouts), ENTRY(dtypes), ENTRY(score_changes), ENTRY(everything_at_random),
    ENTRY(world_sizes), ENTRY(long_sequences_5_heads_of_128), ENTRY(packed_documents),
    ENTRY(grouped_heads), ENTRY(unequal_and_large_dims), ENTRY(windows_of_512),
    ENTRY(softcap_sinks_alibi), ENTRY(cross_attention), ENTRY(error_over_1_to_64_ranks),
    ENTRY(huge_scores), ENTRY(sums_past_the_limit), ENTRY(scores_near_the_limits),
    ENTRY(rows_without_keys), ENTRY(one_nan), ENTRY(nan_in_everything_unseen),
    ENTRY(sequences_in_one_cache), ENTRY(bias_of_minus_infinity),
    ENTRY(hidden_blocks_equal_masked_ones), ENTRY(modified_decode_ignores_other_rows),
    ENTRY(one_key_gives_its_value), ENTRY(positions_near_the_limit),
    ENTRY(biased_cells_near_the_limit),
    ENTRY(fold_merge_finish), ENTRY(merges_of_many_partials), ENTRY(merge_corners),
    ENTRY(attention_threads), ENTRY(attention_workspace), ENTRY(scales_everywhere),
    ENTRY(scales), ENTRY(convert_q4_0), ENTRY(convert),
    ENTRY(decoding), ENTRY(attention_at_positions), ENTRY(many_short_runs),
    ENTRY(row_bits_do_not_depend_on_other_rows), ENTRY(short_row_in_a_longer_batch),
    ENTRY(bias_in_16_bits),
    ENTRY(runs_of_whole_blocks_keep_the_bits), ENTRY(ring_buffer_cache),
    ENTRY(a_ring_serves_several_plans), ENTRY(simple_signature),
};

int main(int argc, char **argv) {
    return h_main(argc, argv, tests, sizeof tests / sizeof tests[0]);
}
