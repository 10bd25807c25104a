/* ra_estimate, ra_hardware_preset and ra_cache_bytes. Proves them by published tables and figures
 * worked out by hand: table 2 of Liu, Zaharia, Abbeel, arXiv 2310.01889v4, and the sizes of known
 * caches. Every refusal names its field. */
#define RINGATTN_IMPLEMENTATION
#include "ringattn.h"
#include "harness.h"

/* Multi-head attention as in the paper: 32 heads of 128, 2 bytes per element, not causal. */
static ra_model mha(void) {
    ra_model m = { 0 };
    m.layers = 32;
    m.q_heads = m.kv_heads = 32;
    m.head_dim = 128;
    return m;
}

static ra_hardware device(int32_t hw, int32_t net, int64_t devices) {
    ra_hardware preset;
    memset(&preset, 0xff, sizeof preset);
    CHECK_EQ(ra_hardware_preset(hw, net, devices, &preset), RA_OK);
    return preset;
}

static ra_estimate_result estimate(const ra_hardware *hw, const ra_model *m) {
    ra_estimate_result r = { 0 };
    CHECK_EQ(ra_estimate(hw, m, &r), RA_OK);
    return r;
}

/* Equal except for rounding in double precision. */
static int near(double got, double want) {
    const double far = fabs(got - want), tolerance = 1e-12 * fabs(want);
    h_context("got %.17g, expected %.17g", got, want);
    return far <= tolerance;
}

typedef struct table2_row {
    int32_t hw;
    double flops, memory, link;
    int64_t block, tokens;             /* to the token; printed in thousands with one decimal */
} table2_row;

TEST(table_2) {
    static const table2_row rows[] = {
        { RA_HW_A100_NVLINK, 312e12, 80e9, 300e9,  1040,  6240 },
        { RA_HW_A100_IB,     312e12, 80e9, 12.5e9, 24960, 149760 },
        { RA_HW_TPU_V3,      123e12, 16e9, 112e9,  1098,  6589 },
        { RA_HW_TPU_V4,      275e12, 32e9, 268e9,  1026,  6157 },
        { RA_HW_TPU_V5E,     196e12, 16e9, 186e9,  1054,  6323 },
    };
    const ra_model m = mha();
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const ra_hardware hw = device(rows[i].hw, RA_NET_NONE, 8);
        const ra_estimate_result r = estimate(&hw, &m);
        CHECK(near(hw.flops_per_s, rows[i].flops));
        CHECK(near(hw.memory_bytes, rows[i].memory));
        CHECK(near(hw.link_bytes_per_s, rows[i].link));
        CHECK_EQ(hw.devices, 8);
        CHECK_EQ(llround(r.block_min), rows[i].block);
        CHECK_EQ(llround(r.device_tokens_min), rows[i].tokens);
        CHECK(near(r.block_min, rows[i].flops / rows[i].link));
        CHECK(near(r.device_tokens_min, 6 * r.block_min));
    }
}

TEST(networks) {
    ra_hardware hw = device(RA_HW_NONE, RA_NET_NVLINK4, 3);
    CHECK(near(hw.link_bytes_per_s, 600e9));
    CHECK(near(hw.link_latency_s, 1e-6));
    CHECK_EQ(hw.block_tokens, 8192);
    CHECK_EQ(hw.devices, 3);
    CHECK(hw.flops_per_s == 0 && hw.memory_bytes == 0);

    hw = device(RA_HW_NONE, RA_NET_PCIE4_X16, 1);
    CHECK(near(hw.link_bytes_per_s, 64e9));
    CHECK(near(hw.link_latency_s, 5e-6));
    CHECK_EQ(hw.block_tokens, 4096);

    hw = device(RA_HW_NONE, RA_NET_IB_HDR, 1);        /* 200 Gbit/s */
    CHECK(near(hw.link_bytes_per_s, 200e9 / 8));
    CHECK(near(hw.link_latency_s, 2e-6));
    CHECK_EQ(hw.block_tokens, 8192);

    hw = device(RA_HW_TPU_V4, RA_NET_PCIE4_X16, 2);   /* the net overrides only the link */
    CHECK(near(hw.flops_per_s, 275e12));
    CHECK(near(hw.memory_bytes, 32e9));
    CHECK(near(hw.link_bytes_per_s, 64e9));
    CHECK(near(hw.link_latency_s, 5e-6));

    hw = device(RA_HW_NONE, RA_NET_NONE, 7);
    CHECK(hw.flops_per_s == 0 && hw.memory_bytes == 0 && hw.link_bytes_per_s == 0);
    CHECK(hw.link_latency_s == 0 && hw.block_tokens == 0);
    CHECK_EQ(hw.devices, 7);
}

TEST(preset_refusals) {
    ra_hardware hw, before;
    memset(&before, 0x5a, sizeof before);
    hw = before;
    CHECK_EQ(ra_hardware_preset(RA_HW_A100_IB, RA_NET_NONE, 1, NULL), RA_E_NULL);
    CHECK_EQ(ra_hardware_preset(-1, RA_NET_NONE, 1, &hw), RA_E_ENUM);
    CHECK_EQ(ra_hardware_preset(RA_HW_TPU_V5E + 1, RA_NET_NONE, 1, &hw), RA_E_ENUM);
    CHECK_EQ(ra_hardware_preset(RA_HW_A100_IB, -1, 1, &hw), RA_E_ENUM);
    CHECK_EQ(ra_hardware_preset(RA_HW_A100_IB, RA_NET_IB_HDR + 1, 1, &hw), RA_E_ENUM);
    CHECK_EQ(ra_hardware_preset(RA_HW_A100_IB, RA_NET_NONE, 0, &hw), RA_E_RANGE);
    CHECK_EQ(ra_hardware_preset(RA_HW_A100_IB, RA_NET_NONE, -8, &hw), RA_E_RANGE);
    CHECK_EQ(ra_hardware_preset(RA_HW_A100_IB, RA_NET_NONE, (int64_t)1 << 31, &hw), RA_E_RANGE);
    CHECK_BITS(&hw, &before, sizeof hw);
}

TEST(cache_bytes) {
    /* Llama-3-70B, a million tokens, 16 bits: 2 x 1e6 x 80 x 8 x 128 x 2. */
    CHECK_EQ(ra_cache_bytes(1000000, 80, 8, 128, 2), 327680000000);
    CHECK_EQ(ra_cache_bytes(1, 80, 8, 128, 2), 327680);
    CHECK_EQ(ra_cache_bytes(131072, 32, 8, 128, 2), 17179869184);    /* Llama-3-8B: 16 GiB */
    CHECK_EQ(ra_cache_bytes(4096, 32, 32, 128, 2), 2147483648);      /* Llama-2-7B: 2 GiB */
    CHECK_EQ(ra_cache_bytes(1, 1, 1, 1, 1), 2);
    CHECK_EQ(ra_cache_bytes((int64_t)1 << 40, 1 << 10, 1 << 5, 1 << 6, 1),
             (int64_t)1 << 62);
}

TEST(cache_bytes_refusals) {
    CHECK_EQ(ra_cache_bytes(0, 80, 8, 128, 2), 0);
    CHECK_EQ(ra_cache_bytes(1, 0, 8, 128, 2), 0);
    CHECK_EQ(ra_cache_bytes(1, 80, 0, 128, 2), 0);
    CHECK_EQ(ra_cache_bytes(1, 80, 8, 0, 2), 0);
    CHECK_EQ(ra_cache_bytes(1, 80, 8, 128, 0), 0);
    CHECK_EQ(ra_cache_bytes(-1, -80, 8, 128, 2), 0);
    CHECK_EQ(ra_cache_bytes(INT64_MIN, 1, 1, 1, 1), 0);
    CHECK_EQ(ra_cache_bytes(INT64_MAX, 1, 1, 1, 1), 0);
    CHECK_EQ(ra_cache_bytes((int64_t)1 << 62, 1, 1, 1, 1), 0);      /* 2^63 */
    CHECK_EQ(ra_cache_bytes((int64_t)1 << 32, (int64_t)1 << 32, 1, 1, 1), 0);   /* wraps to 0 */
    CHECK_EQ(ra_cache_bytes(((int64_t)1 << 62) - 1, 1, 1, 1, 1), INT64_MAX - 1);
}

/* c = (F/W) e Hkv / (2 f Hq) on A100 with InfiniBand, F/W = 24960. */
TEST(block_of_other_models) {
    const ra_hardware hw = device(RA_HW_A100_IB, RA_NET_NONE, 8);
    ra_model m = mha();
    CHECK(near(estimate(&hw, &m).block_min, 24960));
    m.causal = 1;                                     /* half the work per hop */
    CHECK(near(estimate(&hw, &m).block_min, 49920));
    m.kv_heads = 8;                                   /* a quarter of the bytes */
    CHECK(near(estimate(&hw, &m).block_min, 12480));
    CHECK(near(estimate(&hw, &m).device_tokens_min, 74880));
    m.causal = 0;
    CHECK(near(estimate(&hw, &m).block_min, 6240));
    m.element_bytes = 4;
    CHECK(near(estimate(&hw, &m).block_min, 12480));
    m.element_bytes = 1;
    CHECK(near(estimate(&hw, &m).block_min, 3120));
    m.kv_heads = 1;                                   /* MQA */
    CHECK(near(estimate(&hw, &m).block_min, 390));
    m.batch = 16; m.head_dim = 64; m.layers = 7; m.hidden = 12345; m.weight_bytes = 5;
    CHECK(near(estimate(&hw, &m).block_min, 390));   /* none of these changes it */
}

/* Six blocks of b c h elements: 12 b c h bytes at 2 bytes per element, 6 b c h at one. */
TEST(activations) {
    const ra_hardware hw = device(RA_HW_A100_NVLINK, RA_NET_NONE, 8);
    ra_model m = mha();
    CHECK(near(estimate(&hw, &m).activation_bytes_token, 49152));       /* 12 x 4096 */
    m.element_bytes = 1;
    CHECK(near(estimate(&hw, &m).activation_bytes_token, 24576));       /* 6 x 4096 */
    m.element_bytes = 0; m.batch = 3;
    CHECK(near(estimate(&hw, &m).activation_bytes_token, 147456));
    m.hidden = 5120;
    CHECK(near(estimate(&hw, &m).activation_bytes_token, 184320));      /* 12 x 3 x 5120 */
    CHECK(near(estimate(&hw, &m).cache_bytes_token, 524288));           /* 2 x 32 x 4096 x 2 */
    m.layers = 80; m.q_heads = 64; m.kv_heads = 8;
    CHECK(near(estimate(&hw, &m).cache_bytes_token, 327680));
    CHECK_EQ(ra_cache_bytes(1, 80, 8, 128, 2), 327680);
}

TEST(longest_context) {
    ra_hardware hw = device(RA_HW_A100_NVLINK, RA_NET_NONE, 8);
    ra_model m = mha();
    ra_estimate_result r;
    /* 7B in 16 bits: 80e9 - 14e9 for 49152 + 524288 = 573440 bytes per token: 115094 on each. */
    m.weight_bytes = 14000000000;
    r = estimate(&hw, &m);
    CHECK_EQ(r.context_max, 920752);
    CHECK(near(r.cache_bytes, 920752.0 * 524288.0));
    /* Two sequences: 1146880 bytes per token, 57547 on each. */
    m.batch = 2;
    r = estimate(&hw, &m);
    CHECK_EQ(r.context_max, 460376);
    CHECK(near(r.cache_bytes, 2.0 * 460376.0 * 524288.0));
    /* Linear in the devices. */
    m.batch = 1; hw.devices = 512;
    CHECK_EQ(estimate(&hw, &m).context_max, 115094 * 512);
    /* Room for exactly one token, and for none. */
    hw.devices = 1; hw.memory_bytes = 573440 + 1e9; m.weight_bytes = 1000000000;
    CHECK_EQ(estimate(&hw, &m).context_max, 1);
    m.weight_bytes++;
    CHECK_EQ(estimate(&hw, &m).context_max, 0);
    m.weight_bytes = INT64_MAX;
    r = estimate(&hw, &m);
    CHECK_EQ(r.context_max, 0);
    CHECK(r.cache_bytes == 0);
}

/* c = 8192, Hq = 32, Hkv = 8, D = 128: 4 x 4096 x c^2 = 1.0995e12 FLOPs, 4 x 1024 x c bytes. */
TEST(hops) {
    ra_hardware hw = device(RA_HW_NONE, RA_NET_NVLINK4, 8);
    ra_model m = mha();
    ra_estimate_result r;
    hw.flops_per_s = 1e15;
    hw.memory_bytes = 80e9;
    m.kv_heads = 8;
    r = estimate(&hw, &m);
    CHECK(near(r.hop_compute_s, 1099511627776.0 / 1e15));
    CHECK(near(r.hop_transfer_s, 1e-6 + 33554432.0 / 600e9));
    CHECK(r.hidden_fraction == 1);
    /* A slow link hides only a part; causal work is half of it. */
    hw.link_bytes_per_s = 1e9;
    m.causal = 1;
    r = estimate(&hw, &m);
    CHECK(near(r.hop_compute_s, 549755813888.0 / 1e15));
    CHECK(near(r.hidden_fraction, r.hop_compute_s / (1e-6 + 0.033554432)));
    CHECK(r.hidden_fraction < 0.02);
    /* Batches take proportionally longer to compute and to send, except for the latency. */
    m.batch = 4;
    CHECK(near(estimate(&hw, &m).hop_compute_s, 4 * r.hop_compute_s));
    CHECK(near(estimate(&hw, &m).hop_transfer_s, 1e-6 + 4 * 0.033554432));
    /* Without a suggested block, the smallest that hides a hop just hides it. */
    hw.block_tokens = 0; hw.link_latency_s = 0;
    r = estimate(&hw, &m);
    CHECK(near(r.hop_compute_s, r.hop_transfer_s));
    CHECK(near(r.hidden_fraction, 1));
    CHECK(near(r.hop_transfer_s, 4 * 4 * 1024.0 * r.block_min / 1e9));
}

typedef struct refusal {
    ra_status status;
    const char *field;
    size_t offset;
    int kind;                          /* 'd' double, 'q' int64_t, 'i' int32_t */
    double value;
    const char *words;                 /* of the sentence: the value and what is allowed */
} refusal;

#define HW(field)    "hw." #field, offsetof(ra_hardware, field)
#define MODEL(field) "model." #field, offsetof(ra_model, field)

static const refusal refusals[] = {
    { RA_E_UNSET, HW(flops_per_s), 'd', 0, "from 1 to 1e30; it was 0" },
    { RA_E_RANGE, HW(flops_per_s), 'd', -312e12, "from 1 to 1e30; it was -3.12e14" },
    { RA_E_RANGE, HW(flops_per_s), 'd', 0.5, "from 1 to 1e30; it was 0.5" },
    { RA_E_RANGE, HW(flops_per_s), 'd', 1e31, "from 1 to 1e30; it was 1e31" },
    { RA_E_UNSET, HW(memory_bytes), 'd', 0, "from 1 to 1e30; it was 0" },
    { RA_E_RANGE, HW(memory_bytes), 'd', -1, "from 1 to 1e30; it was -1" },
    { RA_E_RANGE, HW(memory_bytes), 'd', 1e300, "from 1 to 1e30; it was 1e300" },
    { RA_E_UNSET, HW(link_bytes_per_s), 'd', 0, "from 1 to 1e30; it was 0" },
    { RA_E_RANGE, HW(link_bytes_per_s), 'd', -1e300, "from 1 to 1e30; it was -1e300" },
    { RA_E_RANGE, HW(link_latency_s), 'd', -1e-6, "from 0 to 1e30; it was -1e-6" },
    { RA_E_RANGE, HW(link_latency_s), 'd', 1e40, "from 0 to 1e30; it was 1e40" },
    { RA_E_UNSET, HW(devices), 'q', 0, "1..2147483647; it was 0" },
    { RA_E_RANGE, HW(devices), 'q', -1, "-1 is not in 1..2147483647" },
    { RA_E_RANGE, HW(devices), 'q', 2147483648.0, "2147483648 is not in 1..2147483647" },
    { RA_E_RANGE, HW(block_tokens), 'q', -4096, "-4096 is not in 0..2147483647" },
    { RA_E_RANGE, HW(block_tokens), 'q', 1e18, "1000000000000000000 is not in 0..2147483647" },
    { RA_E_UNSET, MODEL(layers), 'q', 0, "1..2147483647; it was 0" },
    { RA_E_RANGE, MODEL(layers), 'q', -1, "-1 is not in 1..2147483647" },
    { RA_E_RANGE, MODEL(layers), 'q', 2147483648.0, "2147483648 is not in 1..2147483647" },
    { RA_E_UNSET, MODEL(q_heads), 'q', 0, "1..2147483647; it was 0" },
    { RA_E_RANGE, MODEL(q_heads), 'q', -32, "-32 is not in 1..2147483647" },
    { RA_E_RANGE, MODEL(q_heads), 'q', 9e18, "9000000000000000000 is not in 1..2147483647" },
    { RA_E_UNSET, MODEL(kv_heads), 'q', 0, "1..2147483647; it was 0" },
    { RA_E_RANGE, MODEL(kv_heads), 'q', -8, "-8 is not in 1..2147483647" },
    { RA_E_UNSET, MODEL(head_dim), 'q', 0, "1..2147483647; it was 0" },
    { RA_E_RANGE, MODEL(head_dim), 'q', -128, "-128 is not in 1..2147483647" },
    { RA_E_RANGE, MODEL(hidden), 'q', -1, "-1 is not in 0..2147483647" },
    { RA_E_RANGE, MODEL(batch), 'q', -1, "-1 is not in 0..2147483647" },
    { RA_E_RANGE, MODEL(element_bytes), 'i', -2, "-2 is not in 0..8" },
    { RA_E_RANGE, MODEL(element_bytes), 'i', 9, "9 is not in 0..8" },
    { RA_E_RANGE, MODEL(causal), 'i', 2, "2 is not in 0..1" },
    { RA_E_RANGE, MODEL(causal), 'i', -1, "-1 is not in 0..1" },
    { RA_E_RANGE, MODEL(weight_bytes), 'q', -1, "-1 is negative" },
    { RA_E_SHAPE, MODEL(q_heads), 'q', 33, "33 is not a multiple of kv_heads, 32" },
    { RA_E_SHAPE, "model.q_heads", offsetof(ra_model, kv_heads), 'q', 3,
      "32 is not a multiple of kv_heads, 3" },
    { RA_E_OVERFLOW, HW(memory_bytes), 'd', 1e28, "more than 2^63 tokens on 8 devices" },
};

/* Expects a refusal: its status, field and sentence, `out` unchanged, and the same without an error
 * to write to. */
static void refused(const ra_hardware *hw, const ra_model *m, ra_status status, const char *field) {
    ra_model quiet = *m;
    ra_estimate_result r, before;
    ra_error *e = m->error;
    memset(e, 0, sizeof *e);
    memset(&before, 0x5a, sizeof before);
    r = before;
    CHECK_EQ(ra_estimate(hw, m, &r), status);
    CHECK_EQ(e->status, status);
    CHECK(strcmp(e->field, field) == 0);
    CHECK(strlen(e->text) > 8);
    CHECK(strpbrk(e->text, "#@") == NULL);
    quiet.error = NULL;
    CHECK_EQ(ra_estimate(hw, &quiet, &r), status);
    CHECK_BITS(&r, &before, sizeof r);
}

TEST(refusals) {
    for (size_t i = 0; i < sizeof refusals / sizeof *refusals; i++) {
        const refusal *f = &refusals[i];
        ra_hardware hw = device(RA_HW_A100_NVLINK, RA_NET_PCIE4_X16, 8);
        ra_model m = mha();
        ra_error e;
        unsigned char *base = f->field[0] == 'h' ? (unsigned char *)&hw : (unsigned char *)&m;
        const int64_t q = f->kind == 'd' ? 0 : (int64_t)f->value;
        const int32_t narrow = (int32_t)(f->kind == 'i' ? q : 0);
        m.error = &e;
        estimate(&hw, &m);
        if (f->kind == 'd') memcpy(base + f->offset, &f->value, sizeof f->value);
        if (f->kind == 'q') memcpy(base + f->offset, &q, sizeof q);
        if (f->kind == 'i') memcpy(base + f->offset, &narrow, sizeof narrow);
        h_context("%s = %g", f->field, f->value);
        refused(&hw, &m, f->status, f->field);
        if (!CHECK(strstr(e.text, f->words))) printf("    %s\n", e.text);
    }
}

/* Infinities and NaN of both signs, made from bits: this file may be compiled with -ffast-math. */
TEST(not_finite) {
    static const uint64_t bits[] = { 0x7ff0000000000000, 0xfff0000000000000, 0x7ff8000000000000,
                                     0xfff8000000000001, 0x7ff0000000000001 };
    static const struct { const char *field; size_t offset; } fields[] = {
        { HW(flops_per_s) }, { HW(memory_bytes) }, { HW(link_bytes_per_s) }, { HW(link_latency_s) },
    };
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        for (size_t k = 0; k < sizeof bits / sizeof *bits; k++) {
            ra_hardware hw = device(RA_HW_A100_NVLINK, RA_NET_NONE, 8);
            ra_model m = mha();
            ra_error e;
            m.error = &e;
            memcpy((unsigned char *)&hw + fields[i].offset, &bits[k], sizeof bits[k]);
            h_context("%s = %llx", fields[i].field, (unsigned long long)bits[k]);
            refused(&hw, &m, RA_E_RANGE, fields[i].field);
        }
    }
}

TEST(null_arguments) {
    const ra_hardware hw = device(RA_HW_A100_NVLINK, RA_NET_NONE, 8);
    ra_model m = mha();
    ra_error e = { 0 };
    ra_estimate_result r = { 0 };
    CHECK_EQ(ra_estimate(&hw, NULL, &r), RA_E_NULL);
    CHECK_EQ(ra_estimate(NULL, &m, &r), RA_E_NULL);
    CHECK_EQ(ra_estimate(&hw, &m, NULL), RA_E_NULL);
    m.error = &e;
    CHECK_EQ(ra_estimate(NULL, &m, &r), RA_E_NULL);
    CHECK(e.status == RA_E_NULL && strcmp(e.field, "hw") == 0);
    CHECK_EQ(ra_estimate(&hw, &m, NULL), RA_E_NULL);
    CHECK(e.status == RA_E_NULL && strcmp(e.field, "out") == 0);
}

/* The largest and smallest accepted figures: every result is finite. */
TEST(extremes) {
    ra_hardware hw = device(RA_HW_NONE, RA_NET_NONE, INT32_MAX);
    ra_model m = mha();
    ra_estimate_result r;
    hw.flops_per_s = 1e30; hw.link_bytes_per_s = 1; hw.link_latency_s = 1e30;
    hw.memory_bytes = 1e30;
    m.layers = m.q_heads = m.kv_heads = m.head_dim = m.hidden = m.batch = INT32_MAX;
    m.element_bytes = 8; m.causal = 1;
    r = estimate(&hw, &m);
    CHECK(r.block_min > 0 && r.block_min <= 8e30);
    CHECK(r.hop_compute_s > 0 && r.hop_compute_s < 1e100);
    CHECK(r.hop_transfer_s > 0 && r.hop_transfer_s < 1e100);
    CHECK(r.hidden_fraction >= 0 && r.hidden_fraction <= 1);
    CHECK_EQ(r.context_max, 0);
    hw.block_tokens = INT32_MAX; hw.flops_per_s = 1; hw.link_bytes_per_s = 1e30;
    r = estimate(&hw, &m);
    CHECK(r.hop_compute_s > 0 && r.hop_compute_s < 1e100);
    m.layers = m.q_heads = m.kv_heads = m.head_dim = m.hidden = m.batch = 1;
    m.element_bytes = 1;
    hw.devices = 1; hw.memory_bytes = 8e18;           /* 8 bytes per token */
    CHECK_EQ(estimate(&hw, &m).context_max, 1000000000000000000);
}

static const h_test tests[] = {
    ENTRY(table_2), ENTRY(networks), ENTRY(preset_refusals), ENTRY(cache_bytes),
    ENTRY(cache_bytes_refusals), ENTRY(block_of_other_models), ENTRY(activations),
    ENTRY(longest_context), ENTRY(hops), ENTRY(refusals), ENTRY(not_finite), ENTRY(null_arguments),
    ENTRY(extremes),
};

int main(int argc, char **argv) {
    return h_main(argc, argv, tests, sizeof tests / sizeof *tests);
}
