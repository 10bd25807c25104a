/* The arithmetic of examples/estimate.h. Proves it by published tables and figures worked out by
 * hand: table 2 of Liu, Zaharia, Abbeel, arXiv 2310.01889v4, and the sizes of known caches. Every
 * refusal names its field and value. */
#include "../examples/estimate.h"
#include "harness.h"

/* Multi-head attention as in the paper: 32 heads of 128, 2 bytes per element, not causal. */
static est_given mha(const char *device, const char *net, double devices) {
    est_given g = { 0 };
    CHECK(est_set_device(&g, device));
    if (net) CHECK(est_set_net(&g, net));
    CHECK(est_set_model(&g, "llama2-7b"));
    g.weights = 0;
    g.devices = devices;
    return g;
}

static est_result estimate(const est_given *g) {
    est_result r = { 0 };
    char why[EST_WHY] = "";
    if (!CHECK(est_compute(g, &r, why))) printf("    %s\n", why);
    return r;
}

/* Equal except for rounding in double precision. */
static int near(double got, double want) {
    const double far = fabs(got - want), tolerance = 1e-12 * fabs(want);
    h_context("got %.17g, expected %.17g", got, want);
    return far <= tolerance;
}

typedef struct table2_row {
    const char *name;
    double flops, memory, link;
    int64_t block, tokens;             /* to the token; printed in thousands with one decimal */
} table2_row;

TEST(table_2) {
    static const table2_row rows[] = {
        { "a100-nvlink", 312e12, 80e9, 300e9,  1040,  6240 },
        { "a100-ib",     312e12, 80e9, 12.5e9, 24960, 149760 },
        { "tpu-v3",      123e12, 16e9, 112e9,  1098,  6589 },
        { "tpu-v4",      275e12, 32e9, 268e9,  1026,  6157 },
        { "tpu-v5e",     196e12, 16e9, 186e9,  1054,  6323 },
    };
    CHECK_EQ(EST_DEVICES, 5);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const est_given g = mha(rows[i].name, NULL, 8);
        const est_result r = estimate(&g);
        CHECK(near(g.flops, rows[i].flops));
        CHECK(near(g.memory, rows[i].memory));
        CHECK(near(g.link, rows[i].link));
        CHECK_EQ(llround(r.block_min), rows[i].block);
        CHECK_EQ(llround(r.tokens_min), rows[i].tokens);
        CHECK(near(r.block_min, rows[i].flops / rows[i].link));
        CHECK(near(r.block, r.block_min));
    }
}

TEST(networks) {
    static const struct { const char *name; double link, latency, block; } rows[] = {
        { "nvlink4",  600e9, 1e-6, 8192 },
        { "pcie4x16", 64e9,  5e-6, 4096 },
        { "ib-hdr",   200e9 / 8, 2e-6, 8192 },
    };
    CHECK_EQ(EST_NETS, 3);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        est_given g = mha("tpu-v4", rows[i].name, 2);
        CHECK(near(g.link, rows[i].link));
        CHECK(near(g.latency, rows[i].latency));
        CHECK(near(g.block, rows[i].block));
        CHECK(near(g.flops, 275e12));                 /* a network replaces only the link */
        CHECK(near(g.memory, 32e9));
        CHECK(est_set_device(&g, "tpu-v3"));          /* and a device the network's figures */
        CHECK(near(g.link, 112e9) && g.latency == 0 && g.block == 0);
    }
}

TEST(presets) {
    est_given g, before;
    memset(&before, 0x5a, sizeof before);
    g = before;
    CHECK(!est_set_device(&g, "a100"));
    CHECK(!est_set_net(&g, "ib"));
    CHECK(!est_set_model(&g, "llama3"));
    CHECK_BITS(&g, &before, sizeof g);
    for (int i = 0; i < EST_MODELS; i++) {
        g = mha("a100-ib", "ib-hdr", 8);
        CHECK(est_set_model(&g, est_models[i].name));
        CHECK(g.weights > 0);
        estimate(&g);
    }
}

/* K and V of known models in 16 bits. */
TEST(caches) {
    est_given g = mha("a100-nvlink", NULL, 8);
    CHECK(near(estimate(&g).cache_token * 4096, 2147483648.0));         /* Llama 2 7B: 2 GiB */
    CHECK(est_set_model(&g, "llama3-70b"));
    CHECK(near(estimate(&g).cache_token, 327680));    /* 2 x 80 x 8 x 128 x 2 */
    CHECK(near(estimate(&g).cache_token * 1e6, 327.68e9));
    CHECK(est_set_model(&g, "llama3-8b"));
    CHECK(near(estimate(&g).cache_token * 131072, 17179869184.0));      /* 16 GiB */
    g.element = 34.0 / 32;                            /* q8_0 */
    CHECK(near(estimate(&g).cache_token, 131072 * 17.0 / 32));
}

/* c = (F/W) e Hkv / (2 f Hq) on A100 with InfiniBand, F/W = 24960. */
TEST(block_of_other_models) {
    est_given g = mha("a100-ib", NULL, 8);
    CHECK(near(estimate(&g).block_min, 24960));
    g.causal = 1;                                     /* half the work per hop */
    CHECK(near(estimate(&g).block_min, 49920));
    g.kv_heads = 8;                                   /* a quarter of the bytes */
    CHECK(near(estimate(&g).block_min, 12480));
    CHECK(near(estimate(&g).tokens_min, 74880));
    g.causal = 0;
    CHECK(near(estimate(&g).block_min, 6240));
    g.element = 4;
    CHECK(near(estimate(&g).block_min, 12480));
    g.element = 1;
    CHECK(near(estimate(&g).block_min, 3120));
    g.kv_heads = 1;                                   /* MQA */
    CHECK(near(estimate(&g).block_min, 390));
    g.batch = 16; g.head_dim = 64; g.layers = 7; g.hidden = 12345; g.weights = 5;
    CHECK(near(estimate(&g).block_min, 390));   /* none of these changes it */
}

/* Six blocks of b c h elements: 12 b c h bytes at 2 bytes per element, 6 b c h at one. */
TEST(activations) {
    est_given g = mha("a100-nvlink", NULL, 8);
    CHECK(near(estimate(&g).activation_token, 49152));       /* 12 x 4096 */
    g.element = 1;
    CHECK(near(estimate(&g).activation_token, 24576));       /* 6 x 4096 */
    g.element = 0; g.batch = 3;
    CHECK(near(estimate(&g).activation_token, 147456));
    g.hidden = 5120;
    CHECK(near(estimate(&g).activation_token, 184320));      /* 12 x 3 x 5120 */
    CHECK(near(estimate(&g).cache_token, 524288));           /* 2 x 32 x 4096 x 2 */
    g.layers = 80; g.q_heads = 64; g.kv_heads = 8;
    CHECK(near(estimate(&g).cache_token, 327680));
}

TEST(longest_context) {
    est_given g = mha("a100-nvlink", NULL, 8);
    est_result r;
    /* 7B in 16 bits: 80e9 - 14e9 for 49152 + 524288 = 573440 bytes per token: 115094 on each. */
    g.weights = 14000000000;
    r = estimate(&g);
    CHECK_EQ((int64_t)r.context_max, 920752);
    /* Two sequences: 1146880 bytes per token, 57547 on each. */
    g.batch = 2;
    r = estimate(&g);
    CHECK_EQ((int64_t)r.context_max, 460376);
    /* Linear in the devices. */
    g.batch = 1; g.devices = 512;
    CHECK_EQ((int64_t)estimate(&g).context_max, 115094 * 512);
    /* Room for exactly one token, and for none. */
    g.devices = 1; g.memory = 573440 + 1e9; g.weights = 1000000000;
    CHECK_EQ((int64_t)estimate(&g).context_max, 1);
    g.weights++;
    CHECK_EQ((int64_t)estimate(&g).context_max, 0);
    g.weights = 9e18;
    r = estimate(&g);
    CHECK_EQ((int64_t)r.context_max, 0);
}

/* c = 8192, Hq = 32, Hkv = 8, D = 128: 4 x 4096 x c^2 = 1.0995e12 FLOPs, 4 x 1024 x c bytes. */
TEST(hops) {
    est_given g = mha("a100-nvlink", "nvlink4", 8);
    est_result r;
    g.flops = 1e15;
    g.memory = 80e9;
    g.kv_heads = 8;
    r = estimate(&g);
    CHECK(near(r.compute_s, 1099511627776.0 / 1e15));
    CHECK(near(r.transfer_s, 1e-6 + 33554432.0 / 600e9));
    CHECK(r.hidden == 1);
    /* A slow link hides only a part; causal work is half of it. */
    g.link = 1e9;
    g.causal = 1;
    r = estimate(&g);
    CHECK(near(r.compute_s, 549755813888.0 / 1e15));
    CHECK(near(r.hidden, r.compute_s / (1e-6 + 0.033554432)));
    CHECK(r.hidden < 0.02);
    /* Batches take proportionally longer to compute and to send, except for the latency. */
    g.batch = 4;
    CHECK(near(estimate(&g).compute_s, 4 * r.compute_s));
    CHECK(near(estimate(&g).transfer_s, 1e-6 + 4 * 0.033554432));
    /* Without a suggested block, the smallest that hides a hop just hides it. */
    g.block = 0; g.latency = 0;
    r = estimate(&g);
    CHECK(near(r.compute_s, r.transfer_s));
    CHECK(near(r.hidden, 1));
    CHECK(near(r.transfer_s, 4 * 4 * 1024.0 * r.block_min / 1e9));
}

/* What is just outside of each field's bounds, by the sentence that refuses it. */
typedef struct refusal {
    const char *field;
    double value;
    const char *sentence;
} refusal;

static const refusal refusals[] = {
    { "flops", 0, "flops must be a number from 1 to 1e+30; it is 0" },
    { "flops", -312e12, "flops must be a number from 1 to 1e+30; it is -3.12e+14" },
    { "flops", 1e31, "flops must be a number from 1 to 1e+30; it is 1e+31" },
    { "memory", 0.5, "memory must be a number from 1 to 1e+30; it is 0.5" },
    { "link", -1, "link must be a number from 1 to 1e+30; it is -1" },
    { "latency", -1e-6, "latency must be a number from 0 to 1e+30; it is -1e-06" },
    { "devices", 0, "devices must be an integer from 1 to 2147483647; it is 0" },
    { "devices", 1.5, "devices must be an integer from 1 to 2147483647; it is 1.5" },
    { "devices", 4294967296.0,
      "devices must be an integer from 1 to 2147483647; it is 4294967296" },
    { "block", -1, "block must be an integer from 0 to 2147483647; it is -1" },
    { "layers", 0, "layers must be an integer from 1 to 2147483647; it is 0" },
    { "q_heads", -32, "q_heads must be an integer from 1 to 2147483647; it is -32" },
    { "kv_heads", 0, "kv_heads must be an integer from 1 to 2147483647; it is 0" },
    { "head_dim", 0, "head_dim must be an integer from 1 to 2147483647; it is 0" },
    { "hidden", -1, "hidden must be an integer from 0 to 2147483647; it is -1" },
    { "batch", 0.5, "batch must be an integer from 0 to 2147483647; it is 0.5" },
    { "element", 9, "element must be a number from 0 to 8; it is 9" },
    { "causal", 2, "causal must be an integer from 0 to 1; it is 2" },
    { "weights", -1, "weights must be a number from 0 to 1e+30; it is -1" },
    { "q_heads", 33, "q_heads, 33, must be a multiple of kv_heads, 32" },
};

/* Expects a refusal by that sentence, and r unchanged. */
static void refused(const est_given *g, const char *sentence) {
    est_result r, before;
    char why[EST_WHY] = "";
    memset(&before, 0x5a, sizeof before);
    r = before;
    CHECK(!est_compute(g, &r, why));
    if (!CHECK(strcmp(why, sentence) == 0)) printf("    %s\n", why);
    CHECK_BITS(&r, &before, sizeof r);
}

static const est_field *field(const char *name) {
    for (int i = 0; i < EST_FIELDS; i++)
        if (strcmp(est_fields[i].name, name) == 0) return &est_fields[i];
    CHECK(0);
    return est_fields;
}

TEST(refusals) {
    for (size_t i = 0; i < sizeof refusals / sizeof *refusals; i++) {
        est_given g = mha("a100-nvlink", "pcie4x16", 8);
        estimate(&g);
        *est_at(&g, field(refusals[i].field)) = refusals[i].value;
        h_context("%s = %g", refusals[i].field, refusals[i].value);
        refused(&g, refusals[i].sentence);
    }
}

TEST(not_finite) {
    const double values[] = { HUGE_VAL, -HUGE_VAL, nan("") };
    for (int i = 0; i < EST_FIELDS; i++) {
        for (int k = 0; k < 3; k++) {
            est_given g = mha("a100-nvlink", NULL, 8);
            est_result r;
            char why[EST_WHY] = "";
            *est_at(&g, &est_fields[i]) = values[k];
            h_context("%s = %g", est_fields[i].name, values[k]);
            CHECK(!est_compute(&g, &r, why));
            CHECK(strstr(why, est_fields[i].name) == why);
        }
    }
}

/* Every field at its bounds: every result is a finite number. */
TEST(extremes) {
    for (int i = 0; i < 2 * EST_FIELDS; i++) {
        est_given g = { 0 };
        for (int k = 0; k < EST_FIELDS; k++)
            *est_at(&g, &est_fields[k]) = i & 1 ? est_fields[k].most : est_fields[k].least;
        const est_field *one = &est_fields[i / 2];
        *est_at(&g, one) = i & 1 ? one->least : one->most;
        g.q_heads = fmax(g.q_heads, g.kv_heads);
        if (fmod(g.q_heads, g.kv_heads) != 0) g.kv_heads = 1;
        h_context("%s = %g", one->name, *est_at(&g, one));
        const est_result r = estimate(&g);
        CHECK(r.block_min > 0 && r.block_min < 1e300);
        CHECK(r.context_max >= 0 && r.context_max < 1e300);
        CHECK(r.compute_s > 0 && r.compute_s < 1e300);
        CHECK(r.transfer_s > 0 && r.transfer_s < 1e300);
        CHECK(r.hidden >= 0 && r.hidden <= 1);
    }
}

static const h_test tests[] = {
    ENTRY(table_2), ENTRY(networks), ENTRY(presets), ENTRY(caches), ENTRY(block_of_other_models),
    ENTRY(activations), ENTRY(longest_context), ENTRY(hops), ENTRY(refusals), ENTRY(not_finite),
    ENTRY(extremes),
};

int main(int argc, char **argv) {
    return h_main(argc, argv, tests, sizeof tests / sizeof *tests);
}
