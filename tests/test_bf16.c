/* Arithmetic in bf16, which rounds weights and may keep an old maximum. Proves every mask against
 * the oracle on both instruction sets, forward and backward, with tolerances from a plain softmax
 * in low precision; equal bits for any cut; and rows whose sums exceed the limit. AMX runs in
 * software (hooks.h), so that its room is tested on every machine with AVX-512. */
#include "hooks.h"
#include "oracle.h"
#include "world.h"

static const int32_t isas[2] = { RA_ISA_AVX512_BF16, RA_ISA_AMX };

/* 1 if this test cannot run here; reports why. */
static int machine_lacks(void) {
    if (ra_isa_available(RA_ISA_AMX)) return 0;
    h_skip("this machine has no AVX-512 with bf16");
    return 1;
}

static void judge_gradients(const problem *p, const setup *s) {
    outcome r = world_run(p, s);
    if (outcome_whole(&r)) CHECK(outcome_gradients(&r, p) <= 1);
    outcome_free(&r);
}

/* A NaN in one of the inputs. Without sinks: a row that sees only a sink has NaN from dO too. */
static void spoil(problem *p, h_rng *r) {
    const int64_t nq = p->B * p->q_max * p->Hq, nk = p->B * p->k_max * p->Hkv;
    const int which = (int)h_range(r, 0, p->v_in_k ? 2 : 3);
    float *x = which == 0 ? p->q : which == 1 ? p->k : which == 2 ? p->d_o : p->v;
    p->scores &= ~RA_SCORE_SINKS;
    x[h_range(r, 0, (which % 2 ? nk : nq) * (which < 2 ? p->Dk : p->Dv) - 1)] = (float)NAN;
}

/* Case i of all masks and layouts. */
static void random_case(problem *p, setup *s, h_rng *r, wish *w, int64_t i) {
    w->mask = h_pick(&i, MASKS);
    w->layout = h_pick(&i, LAYOUTS);
    random_problem(p, r, w);
    random_setup(s, p, r, w);
    problem_dtypes(p, RA_BF16, RA_BF16, RA_BF16, (int32_t)h_range(r, RA_F32, RA_BF16));
}

/* Every mask, score change and layout, tails, odd and unequal dims, NaN in what nobody sees. */
TEST(masks_and_layouts) {
    wish w = { M_NONE, L_CONTIGUOUS, ANY, ANY, 2e6 };
    int64_t n = h_run.large ? 20 : 1;
    if (machine_lacks()) return;
    for (int64_t i = 0; i < n * MASKS * LAYOUTS; i++) {
        h_rng r = h_case_rng(i);
        problem p;
        setup s;
        if (!h_case(i)) continue;
        random_case(&p, &s, &r, &w, i);
        s.isa = isas[h_one_in(&r, 3) ? 0 : 1];
        s.any_isa = 0;
        problem_data(&p, &r);
        world_compare(&p, &s);
        setup_free(&s);
        problem_free(&p);
    }
}

/* NaN in one row of Q, K or V must appear where the oracle has it and nowhere else. */
TEST(one_nan) {
    if (machine_lacks()) return;
    for (int64_t i = 0; i < 6 * MASKS; i++) {
        h_rng r = h_case_rng(i);
        int64_t row = h_range(&r, 0, 139);
        problem p;
        setup s;
        float *x;
        int64_t left = i;
        const int which = h_pick(&left, 3), isa = h_pick(&left, 2), mask = (int)left;
        if (!h_case(i)) continue;
        problem_shape(&p, 140, 2, 1, 35, 37);
        problem_mask(&p, &r, mask);
        problem_dtypes(&p, RA_BF16, RA_BF16, RA_BF16, RA_F32);
        problem_data(&p, &r);
        x = which == 0 ? p.q + (row * 2 + 1) * 35 + h_range(&r, 0, 34)
          : which == 1 ? p.k + row * 35 + h_range(&r, 0, 34) : p.v + row * 37 + h_range(&r, 0, 36);
        *x = h_one_in(&r, 2) ? (float)NAN : HUGE_VALF;
        if (which < 2) *x = (float)NAN;
        setup_plain(&s, (int)h_range(&r, 1, 4), RA_LAYOUT_CONTIGUOUS + (int32_t)h_range(&r, 0, 2));
        s.isa = isas[isa];
        s.chunk_tokens = 64;
        world_compare(&p, &s);
        problem_free(&p);
    }
}

/* Gradients of every mask and layout, incomplete blocks, odd and unequal dims, grouped heads, every
 * change of scores, and the gradient of the bias, against the oracle. In a third of the cases a row
 * of Q, K, V or dO has a NaN, which must appear where the oracle has it and nowhere else. dO holds
 * bf16 numbers, whatever its dtype: test_backward tests how dO itself is rounded. */
TEST(gradients) {
    wish w = { M_NONE, L_CONTIGUOUS, ANY, ANY, 3e5 };
    int64_t k, n = h_run.large ? 20 : 2;
    if (machine_lacks()) return;
    for (int64_t i = 0; i < n * MASKS * LAYOUTS; i++) {
        h_rng r = h_case_rng(i);
        problem p;
        setup s;
        if (!h_case(i)) continue;
        random_case(&p, &s, &r, &w, i);
        if (s.call == CALL_ATTEND || s.call == CALL_ATTENTION) s.call = CALL_FORWARD;
        s.train = 1;
        s.no_lse = s.any_isa = s.passes = 0;
        s.isa = isas[h_one_in(&r, 3) ? 0 : 1];
        problem_data(&p, &r);
        problem_cotangent(&p, &r);
        for (k = 0; k < p.B * p.q_max * p.Hq * p.Dv; k++) p.d_o[k] = dtype_round(p.d_o[k], RA_BF16);
        if (h_one_in(&r, 3)) spoil(&p, &r);
        describe_case(&p, &s);
        judge_gradients(&p, &s);
        setup_free(&s);
        problem_free(&p);
    }
}

/* 1 if n floats are equal to the bit, or both are NaN. */
static int same_numbers(const float *a, const float *b, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        if (memcmp(a + i, b + i, 4) && !(a[i] != a[i] && b[i] != b[i])) {
            printf("    number %lld of %lld: %.9g and %.9g\n", (long long)i, (long long)n,
                   (double)a[i], (double)b[i]);
            return 0;
        }
    return 1;
}

/* Rounds the inputs of a problem to bf16. */
static void round_inputs(problem *p) {
    for (int64_t i = 0; i < p->B * p->q_max * p->Hq * p->Dk; i++)
        p->q[i] = dtype_round(p->q[i], RA_BF16);
    for (int64_t i = 0; i < p->B * p->k_max * p->Hkv * p->Dk; i++)
        p->k[i] = dtype_round(p->k[i], RA_BF16);
    for (int64_t i = 0; i < p->B * p->k_max * p->Hkv * p->Dv && !p->v_in_k; i++)
        p->v[i] = dtype_round(p->v[i], RA_BF16);
    problem_dtypes(p, RA_BF16, RA_BF16, RA_BF16, p->o_dtype);
    p->arith = 0;
}

/* Numbers of every magnitude in some keys, as large as the dtype has them. */
static void stretch_keys(problem *p, h_rng *r) {
    const float most = p->k_dtype == RA_F16 ? 65504 : 1e20f;
    for (int n = 0; n < 5 && !has_scales(p->k_dtype); n++) {
        float *x = p->k + h_range(r, 0, p->B * p->k_max * p->Hkv - 1) * p->Dk;
        x[h_range(r, 0, p->Dk - 1)] = n % 2 ? -most : most;
        x[h_range(r, 0, p->Dk - 1)] = dtype_round(1e-5f, p->k_dtype);
    }
}

/* Of q, k and v a mix of dtypes; those of q8_0 and q4_0 have no gradients. */
static void mixed_dtypes(problem *p, setup *s, h_rng *r) {
    const int32_t o = (int32_t)h_range(r, RA_F32, RA_BF16);
    const int most = p->Dk % 32 || p->Dv % 32 || p->v_column % 32 ? RA_BF16 : RA_Q4_0;
    problem_dtypes(p, (int32_t)h_range(r, RA_F32, RA_BF16), (int32_t)h_range(r, RA_F32, most),
                   (int32_t)h_range(r, RA_F32, most), o);
    s->train = !has_scales(p->k_dtype) && !has_scales(p->v_dtype) && h_one_in(r, 2);
}

/* With RA_ARITH_BF16 every number of o, LSE and the gradients has the bits that inputs rounded to
 * bf16 give. So does the decoding form where k and v are bf16. */
TEST(rounded_inputs) {
    int64_t n = h_run.large ? 30 : 3;
    if (machine_lacks()) return;
    for (int64_t i = 0; i < n * MASKS * LAYOUTS; i++) {
        wish w = { M_NONE, L_CONTIGUOUS, ANY, ANY, 3e5 };
        h_rng r = h_case_rng(i);
        problem p;
        setup s;
        outcome a, b;
        const int few = i % 4 == 3;
        if (!h_case(i)) continue;
        random_case(&p, &s, &r, &w, i);
        p.Dk = h_one_in(&r, 2) ? 32 * (p.Dk / 32 + 1) : p.Dk;
        if (!p.v_in_k) p.Dv = p.Dk % 32 ? p.Dv : 32 * (p.Dv / 32 + 1);
        s.isa = isas[few || h_one_in(&r, 3) ? 0 : 1];
        if (!few && s.call == CALL_ATTENTION) s.call = CALL_FORWARD;
        s.any_isa = s.passes = 0;
        mixed_dtypes(&p, &s, &r);
        if (few) problem_dtypes(&p, p.q_dtype, RA_BF16, RA_BF16, p.o_dtype);
        if (s.train && s.call <= CALL_ATTEND) s.call = CALL_FORWARD;
        if (s.train) s.no_lse = 0;
        p.arith = RA_ARITH_BF16;
        problem_data(&p, &r);
        if (s.train) problem_cotangent(&p, &r);
        if (h_one_in(&r, 2)) stretch_keys(&p, &r);
        describe_case(&p, &s);
        a = world_run(&p, &s);
        round_inputs(&p);
        b = world_run(&p, &s);
        if (outcome_whole(&a) && outcome_whole(&b)) {
            CHECK(same_numbers(a.o, b.o, p.B * p.q_max * p.Hq * p.Dv));
            if (!s.no_lse) CHECK(same_numbers(a.lse, b.lse, p.B * p.q_max * p.Hq));
            CHECK(same_numbers(a.d_q, b.d_q, p.B * p.q_max * p.Hq * p.Dk));
            CHECK(same_numbers(a.d_k, b.d_k, p.B * p.k_max * p.Hkv * p.Dk));
            if (!p.v_in_k) CHECK(same_numbers(a.d_v, b.d_v, p.B * p.k_max * p.Hkv * p.Dv));
        }
        outcome_free(&a);
        outcome_free(&b);
        setup_free(&s);
        problem_free(&p);
    }
}

/* Biases of huge finite values as masks, in rings and on one rank. */
TEST(huge_bias) {
    if (machine_lacks()) return;
    for (int64_t i = 0; i < 24; i++) {
        h_rng r = h_case_rng(i);
        problem p;
        setup s;
        wish w = { M_CAUSAL, L_CONTIGUOUS, ANY, 0, 1e5 };
        if (!h_case(i)) continue;
        random_problem(&p, &r, &w);
        p.scores = RA_SCORE_BIAS | (i % 3 ? 0 : RA_SCORE_SINKS);
        random_setup(&s, &p, &r, &w);
        s.ranks = 1 + (int32_t)(i % 3);
        s.layout = i % 2 ? RA_LAYOUT_ZIGZAG : RA_LAYOUT_CONTIGUOUS;
        s.wire = WIRE_POST;
        s.call = CALL_FORWARD;
        s.threads = 0;
        s.train = 1;
        s.no_lse = s.any_isa = 0;
        s.passes = 1;
        s.isa = isas[i / 2 % 2];
        problem_dtypes(&p, RA_BF16, RA_BF16, RA_BF16, RA_F32);
        if (i >= 16) {                 /* also in a ring, in f32 */
            problem_dtypes(&p, RA_F32, RA_F32, RA_F32, RA_F32);
            s.isa = RA_ISA_AUTO;
        }
        problem_data(&p, &r);
        problem_huge_bias(&p, &r);
        problem_cotangent(&p, &r);
        for (int64_t k = 0; k < p.B * p.q_max * p.Hq * p.Dv; k++)
            p.d_o[k] = dtype_round(p.d_o[k], RA_BF16);
        describe_case(&p, &s);
        judge_gradients(&p, &s);
        setup_free(&s);
        problem_free(&p);
    }
}

/* The largest error of O from rounding alone: weights to bf16, before they are summed and
 * multiplied, and the result to bf16. All else is double precision. */
static double plain_error(const problem *p) {
    double *w = (double *)malloc((size_t)p->k_max * sizeof *w), worst = 0, size;
    for (int64_t i = 0; i < p->q_max; i++) {
        double top = -HUGE_VAL, sum = 0, rounded = 0;
        int64_t n = p->mask.kind == RA_MASK_CAUSAL ? i + 1 : p->k_max;
        for (int64_t k = 0; k < n; k++) {
            w[k] = score_of(p, 0, i, 0, k, &size);
            if (w[k] > top) top = w[k];
        }
        for (int64_t k = 0; k < n; k++) {
            w[k] = exp(w[k] - top);
            sum += w[k];
            rounded += (double)dtype_round((float)w[k], RA_BF16);
        }
        for (int d = 0; d < p->Dv; d++) {
            double x = 0, y = 0;
            for (int64_t k = 0; k < n; k++) {
                x += w[k] * (double)v_row(p, 0, k, 0)[d];
                y += (double)dtype_round((float)w[k], RA_BF16) * (double)v_row(p, 0, k, 0)[d];
            }
            x /= sum;
            y = fabs(y / rounded - x) + fabs((double)dtype_round((float)x, RA_BF16) - x);
            if (y > worst) worst = y;
        }
    }
    free(w);
    return worst;
}

/* With O in bf16 the error is at most twice that of this plain form. */
TEST(error_of_rounding) {
    static const int32_t dims[3] = { 64, 128, 80 };
    if (machine_lacks()) return;
    for (int64_t i = 0; i < 12; i++) {
        h_rng r = h_case_rng(i);
        problem p;
        setup s;
        verdict w;
        double plain;
        if (!h_case(i) || !h_variant(i % 6, (int)(i / 6))) continue;
        problem_shape(&p, i < 6 ? 300 : 520, 1, 1, dims[i % 3], dims[i % 3]);
        p.mask.kind = i % 2 ? RA_MASK_CAUSAL : RA_MASK_NONE;
        problem_dtypes(&p, RA_BF16, RA_BF16, RA_BF16, RA_BF16);
        problem_data(&p, &r);
        plain = plain_error(&p);
        setup_plain(&s, 2, RA_LAYOUT_CONTIGUOUS);
        s.isa = isas[i / 6];
        w = world_compare(&p, &s);
        if (w.o_error > 2 * plain) printf("    %.3g, plain %.3g\n", w.o_error, plain);
        CHECK(w.o_error <= 2 * plain);
        problem_free(&p);
    }
}

/* Scores whose rounding is far more than 1: rows with one key, with few and with many, over blocks
 * and ranks. All values of a column are equal, and so is o. */
TEST(huge_scores) {
    static const float sizes[4] = { 3e7f, 1e10f, -1e10f, 1e30f };
    if (machine_lacks()) return;
    for (int64_t i = 0; i < 48; i++) {
        h_rng r = h_case_rng(i);
        problem p;
        setup s;
        outcome got;
        int64_t left = i, k, wrong = 0;
        const int32_t isa = isas[h_pick(&left, 2)], ranks = 1 + h_pick(&left, 3);
        const float size = sizes[h_pick(&left, 4)];
        if (!h_case(i)) continue;
        problem_shape(&p, 200, 1, 1, 16, 16);
        p.mask.kind = left ? RA_MASK_CAUSAL : RA_MASK_NONE;
        p.scale = 0.37f;
        problem_dtypes(&p, RA_BF16, RA_BF16, RA_BF16, RA_F32);
        problem_data(&p, &r);
        for (k = 0; k < 200 * 16; k++) {
            p.q[k] = dtype_round(size * (1 + (float)(k / 16) / 64), RA_BF16);
            p.k[k] = dtype_round(1 + (float)h_range(&r, 0, 3) / 64, RA_BF16);
            p.v[k] = 1 + (float)(k % 16) / 16;
        }
        setup_plain(&s, ranks, RA_LAYOUT_CONTIGUOUS + (int32_t)(i % 2));
        s.isa = isa;
        s.chunk_tokens = 64;
        describe_case(&p, &s);
        got = world_run(&p, &s);
        for (k = 0; k < 200 * 16 && got.status == RA_OK; k++)
            wrong += !(fabsf(got.o[k] - p.v[k]) <= 0.01f) ||
                     !(fabsf(got.lse[k / 16]) <= 1e35f && fabsf(got.lse[k / 16]) >= 1e7f);
        if (outcome_whole(&got)) CHECK_EQ(wrong, 0);
        outcome_free(&got);
        problem_free(&p);
    }
}

/* 2^32 is e^22.2. The second half of the cases has a bias, or ALiBi and a bias. */
TEST(sums_past_the_limit) {
    static const float rises[4] = { 5, 16, 48, 200 };
    if (machine_lacks()) return;
    for (int64_t i = 0; i < 16; i++) {
        h_rng r = h_case_rng(i);
        problem p;
        setup s;
        int64_t left = i;
        const float rise = rises[h_pick(&left, 4)];
        const int32_t isa = isas[h_pick(&left, 2)];
        if (!h_case(i)) continue;
        problem_shape(&p, 230, 1, 1, 40, 40);
        problem_dtypes(&p, RA_BF16, RA_BF16, RA_BF16, RA_F32);
        if (i >= 8) problem_options(&p, &r, i % 2 ? RA_SCORE_BIAS : RA_SCORE_BIAS | RA_SCORE_ALIBI);
        problem_rises(&p, rise, &r);
        setup_plain(&s, 1, RA_LAYOUT_CONTIGUOUS);
        s.isa = isa;
        world_compare(&p, &s);
        if (i < 8) stale_maxima(&p, s.isa, rise > 10, 4.3e9f);
        problem_free(&p);
    }
}

/* The decoding form: 1 to 16 query rows per kv head after many keys, with any dims, strides and
 * masks, and with scores that grow. Every key that no row sees has a NaN, and sometimes a key that
 * is seen. The bits are the same for any number of threads. */
TEST(decoding) {
    int64_t i = h_run.other ? 75 : 0, q, n = h_run.large ? 2000 : i + 75;
    if (machine_lacks()) return;
    for (; i < n; i++) {
        h_rng r = h_case_rng(i);
        problem p;
        setup s = { 0 };
        int32_t group = 1 << h_range(&r, 0, 4), heads = (int32_t)h_range(&r, 1, 3);
        int32_t dims[2];
        if (!h_case(i)) continue;
        for (int64_t k = 0; k < 2; k++)
            dims[k] = (int32_t)(i % 9 == k ? h_range(&r, 300, 576) : h_one_in(&r, 2)
                                ? 32 * h_range(&r, 1, 4) : h_range(&r, 1, 140));
        problem_shape(&p, h_range(&r, 1, 16 / group), heads * group, heads, dims[0], dims[1]);
        p.q_offset = h_range(&r, 0, i % 3 ? 200 : 3000);
        p.tk[0] = p.k_max = p.q_offset + p.q_max;
        problem_mask(&p, &r, (int)(i % MASKS));
        if (h_one_in(&r, 3)) problem_options(&p, &r, (int)h_range(&r, 0, 31));
        problem_dtypes(&p, RA_BF16, RA_BF16, RA_BF16, (int32_t)h_range(&r, RA_F32, RA_BF16));
        problem_data(&p, &r);
        if (i % 8 == 0) p.loose = 1;
        for (int64_t k = 0; i % 8 == 0 && k < p.k_max * heads * p.Dk; k++)
            p.k[k] = dtype_round(p.k[k] * (float)(k / (heads * p.Dk)) * 0.04f, RA_BF16);
        for (int64_t k = 0; k < p.k_max; k++) {
            int seen = h_one_in(&r, 4000);
            for (q = 0; q < p.q_max; q++) seen += visible(&p.mask, p.q_offset + q, k) ? 2 : 0;
            if (seen < 2) p.k[k * heads * p.Dk] = p.v[(k + 1) * heads * p.Dv - 1] = (float)NAN;
            if (seen & 1) p.v[k * heads * p.Dv] = (float)NAN;
        }
        s.ranks = 1;
        s.layout = RA_LAYOUT_CONTIGUOUS + (int32_t)h_range(&r, 0, 2);
        s.call = CALL_ATTENTION;
        s.threads = 1;
        s.isa = isas[h_one_in(&r, 8)];
        s.strides = (int32_t)h_range(&r, STRIDES_PACKED, STRIDES_MIXED);
        world_compare(&p, &s);
        same_on_threads(&p, &s, 3);
        problem_free(&p);
    }
}

/* O, LSE and gradients do not depend on ranks, chunks and threads. */
TEST(same_bits) {
    if (machine_lacks()) return;
    for (int64_t i = 0; i < 2 * MASKS; i++) {
        static const int32_t chunks[4] = { 64, 192, 0, 64 };
        h_rng r = h_case_rng(i);
        problem p;
        setup s;
        outcome first, next;
        if (!h_case(i) || !h_variant(i % MASKS, (int)(i / MASKS))) continue;
        problem_shape(&p, 16 * 64 + h_range(&r, 1, 64), 2, 1, (int32_t)h_range(&r, 1, 70),
                      (int32_t)h_range(&r, 1, 70));
        problem_mask(&p, &r, (int)(i % MASKS));
        problem_options(&p, &r, h_one_in(&r, 2) ? (int)h_range(&r, 0, 31) : 0);
        problem_dtypes(&p, RA_BF16, RA_BF16, RA_BF16, RA_F32);
        problem_data(&p, &r);
        problem_cotangent(&p, &r);
        setup_plain(&s, 1, i / MASKS ? RA_LAYOUT_ZIGZAG : RA_LAYOUT_CONTIGUOUS);
        s.isa = RA_ISA_AMX;
        s.train = 1;
        describe_case(&p, &s);
        first = world_run(&p, &s);
        for (int j = 0; j < 4 && outcome_whole(&first); j++) {
            s.ranks = j < 3 ? (int32_t)h_range(&r, 2, 4) : 1;
            s.chunk_tokens = chunks[j];
            s.call = j < 3 ? (int32_t)h_range(&r, CALL_FORWARD, CALL_JOIN) : CALL_ATTENTION;
            s.threads = s.call >= CALL_STEP || j == 3 ? (int32_t)h_range(&r, 1, 3) : 0;
            s.seed = h_next(&r);
            describe_case(&p, &s);
            next = world_run(&p, &s);
            if (outcome_whole(&next)) {
                CHECK_BITS(next.o, first.o, p.q_max * p.Hq * p.Dv * 4);
                CHECK_BITS(next.lse, first.lse, p.q_max * p.Hq * 4);
                CHECK_BITS(next.d_q, first.d_q, p.q_max * p.Hq * p.Dk * 4);
                CHECK_BITS(next.d_k, first.d_k, p.k_max * p.Hkv * p.Dk * 4);
                CHECK_BITS(next.d_v, first.d_v, p.k_max * p.Hkv * p.Dv * 4);
            }
            outcome_free(&next);
        }
        outcome_free(&first);
        problem_free(&p);
    }
}

static const h_test tests[] = {
    ENTRY(masks_and_layouts), ENTRY(one_nan), ENTRY(gradients), ENTRY(rounded_inputs),
    ENTRY(huge_bias),
    ENTRY(error_of_rounding), ENTRY(huge_scores), ENTRY(sums_past_the_limit), ENTRY(decoding),
    ENTRY(same_bits)
};

int main(int argc, char **argv) {
    return hook_main(argc, argv, tests, sizeof tests / sizeof tests[0]);
}
