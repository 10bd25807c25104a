/* Planning figures of ring attention: which context fits, how large a block hides the transfer of a
 * hop, and what a device holds, for a preset or for figures of yours. You will see them for four
 * A100 and Llama 3 8B unless you say otherwise, then tables 2 and 3 of the paper (Liu, Zaharia,
 * Abbeel, arXiv 2310.01889v4), and figures often printed wrong. Exits with 1 if it refuses an
 * argument.
 *
 *   cc -O2 -std=c99 -o estimate examples/estimate.c -lm && ./estimate
 *   ./estimate hw tpu-v5e net pcie4x16 model llama3-70b devices 256 element 1 weights 1e9
 *   ./estimate flops 2e12 memory 64e9 link 3e9 layers 32 q_heads 32 kv_heads 8 head_dim 128 */
#include "estimate.h"

#include <stdlib.h>

static const char *names(char *text, size_t bytes, int kind) {
    size_t n = 0;
    const int count = kind == 'd' ? EST_DEVICES : kind == 'n' ? EST_NETS : kind == 'm' ? EST_MODELS
                    : EST_FIELDS;
    for (int i = 0; i < count && n < bytes; i++)
        n += (size_t)snprintf(text + n, bytes - n, " %s", kind == 'd' ? est_devices[i].name
                              : kind == 'n' ? est_nets[i].name : kind == 'm' ? est_models[i].name
                              : est_fields[i].name);
    return text;
}

static int refuse(const char *what, const char *value, int kind) {
    char text[256];
    printf("estimate: %s %s: it must be one of%s\n", what, value,
           names(text, sizeof text, kind));
    return 0;
}

/* One pair of arguments. */
static int set(est_given *g, const char *name, const char *value) {
    char *end = NULL;
    if (strcmp(name, "hw") == 0) return est_set_device(g, value) || refuse(name, value, 'd');
    if (strcmp(name, "net") == 0) return est_set_net(g, value) || refuse(name, value, 'n');
    if (strcmp(name, "model") == 0) return est_set_model(g, value) || refuse(name, value, 'm');
    for (int i = 0; i < EST_FIELDS; i++) {
        if (strcmp(est_fields[i].name, name) != 0) continue;
        *est_at(g, &est_fields[i]) = strtod(value, &end);
        if (end != value && !*end) return 1;
        printf("estimate: %s %s: not a number\n", name, value);
        return 0;
    }
    printf("estimate: an argument is named %s; hw, net and model are presets\n", name);
    return refuse("a figure, not", name, 'f');
}

static void print_given(const est_given *g) {
    printf("Devices   %.4g, each %.4g TFLOP/s, %.4g GB, %.4g GB/s and %.3g us to its neighbour\n",
           g->devices, g->flops / 1e12, g->memory / 1e9, g->link / 1e9, g->latency * 1e6);
    printf("Model     %.4g layers, %.4g query heads, %.4g KV heads of %.4g; weights of %.4g GB on "
           "each device%s\n", g->layers, g->q_heads, g->kv_heads, g->head_dim, g->weights / 1e9,
           g->causal > 0 ? "; causal" : "");
}

static void print_hop(const est_result *r) {
    printf("\nA hop hides its transfer from %.0f tokens per device on; six such blocks are %.0f "
           "tokens.\n", ceil(r->block_min), ceil(r->tokens_min));
    printf("With %.0f tokens per device it computes %.3g ms and transfers %.3g ms: %.0f %% is "
           "hidden.\n", r->block, r->compute_s * 1e3, r->transfer_s * 1e3, r->hidden * 100);
}

/* Six blocks of one layer: Q; K, V in use; K, V arriving; output. The cache is of all layers. */
static void print_memory(const est_given *g, const est_result *r) {
    const double b = g->batch > 0 ? g->batch : 1;
    const double activations = r->activation_token * r->block;
    const double cache = b * r->cache_token * r->block;
    const double all = activations + cache + g->weights;
    printf("\nMemory of a device with %.0f tokens, in GB: %.4g six blocks of one layer + %.4g K "
           "and V of all\nlayers + %.4g weights = %.4g of %.4g%s\n", r->block, activations / 1e9,
           cache / 1e9, g->weights / 1e9, all / 1e9, g->memory / 1e9,
           all > g->memory ? ": does not fit" : "");
    printf("K and V of a million tokens: %.5g GB (%.5g bytes per token)\n",
           r->cache_token * 1e6 / 1e9, r->cache_token);
}

/* What a ring of 1, 2, 4, ... devices can hold, and the block times the ranks. */
static void print_contexts(const est_given *g) {
    char why[EST_WHY];
    printf("\n%10s %20s %20s %16s\n", "ranks", "a block each, tokens", "most tokens",
           "K and V, GB");
    for (double n = 1; n <= fmax(g->devices, 1024); n *= 2) {
        est_given one = *g;
        est_result r;
        one.devices = n;
        if (!est_compute(&one, &r, why)) return;
        printf("%10.0f %20.0f %20.0f %16.5g\n", n, n * floor(r.block), r.context_max,
               r.context_max * (g->batch > 0 ? g->batch : 1) * r.cache_token / 1e9);
    }
}

/* Table 2, computed: multi-head attention at 2 bytes per element. */
static void print_table_2(void) {
    static const double printed[EST_DEVICES][2] = {{1.0, 6.2}, {24.5, 149.5}, {1.1, 6.6},
                                                   {1.0, 6.2}, {1.1, 6.3}};
    char why[EST_WHY];
    printf("\nTable 2 of the paper: smallest block and smallest sequence per device, tokens\n");
    printf("%-16s %9s %5s %7s %9s %10s   %s\n", "", "TFLOP/s", "GB", "GB/s", "block", "sequence",
           "printed, in thousands");
    for (int i = 0; i < EST_DEVICES; i++) {
        est_given g = { 0 };
        est_result r;
        (void)est_set_device(&g, est_devices[i].name);
        (void)est_set_model(&g, "llama2-7b");
        g.devices = 1;
        if (!est_compute(&g, &r, why)) return;
        printf("%-16s %9.0f %5.0f %7.4g %9.0f %10.0f   %5.1f %6.1f\n", est_devices[i].text,
               g.flops / 1e12, g.memory / 1e9, g.link / 1e9, r.block_min, r.tokens_min,
               printed[i][0], printed[i][1]);
    }
    printf("The printed pair of A100 InfiniBand is 2 %% below its own formula.\n");
}

/* Table 3, as printed: measured, so not computed here. In thousands of tokens. */
static void print_table_3(void) {
    static const struct {
        const char *devices, *model;
        int count, vanilla, efficient, blockwise, ring;
    } rows[] = {
        { "A100 NVLink",     "3B",  8,    4, 32, 64,  512 },
        { "A100 NVLink",     "7B",  8,    2, 16, 32,  256 },
        { "A100 NVLink",     "13B", 8,    2, 4,  16,  128 },
        { "A100 InfiniBand", "7B",  32,   4, 64, 128, 4096 },
        { "A100 InfiniBand", "13B", 32,   4, 32, 64,  2048 },
        { "TPU v3",          "7B",  512,  1, 4,  8,   2048 },
        { "TPU v3",          "13B", 512,  1, 2,  8,   1024 },
        { "TPU v4",          "3B",  1024, 8, 16, 32,  16384 },
        { "TPU v4",          "7B",  1024, 4, 8,  16,  8192 },
        { "TPU v4",          "13B", 1024, 4, 8,  16,  4096 },
        { "TPU v4",          "30B", 1024, 2, 4,  8,   2048 },
        { "TPU v5e",         "3B",  256,  4, 8,  32,  4096 },
        { "TPU v5e",         "7B",  256,  2, 8,  16,  2048 },
    };
    printf("\nTable 3 of the paper, as printed: longest context in training, in thousands\n");
    printf("%-16s %7s %6s %9s %10s %10s %7s   %s\n", "", "devices", "model", "attention",
           "efficient", "blockwise", "ring", "ring / blockwise");
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        printf("%-16s %7d %6s %9d %10d %10d %7d   %d\n", rows[i].devices, rows[i].count,
               rows[i].model, rows[i].vanilla, rows[i].efficient, rows[i].blockwise, rows[i].ring,
               rows[i].ring / rows[i].blockwise);
    printf("The last column is the devices of the ring; the others share its layers' weights.\n");
}

/* What the paper and texts about it print otherwise. */
static void print_corrections(void) {
    est_given g = { 0 };
    est_result r;
    char why[EST_WHY];
    (void)est_set_device(&g, "a100-nvlink");
    (void)est_set_model(&g, "llama3-70b");
    g.devices = 1;
    if (!est_compute(&g, &r, why)) return;
    printf("\nOften printed wrong\n");
    printf("- Six blocks at 2 bytes per element are 12 b c h bytes; 6 b c h are elements.\n");
    printf("- K and V of a million tokens of Llama 3 70B in 16 bits are %.5g GB, not half of it.\n",
           r.cache_token * 1e6 / 1e9);
    printf("- InfiniBand HDR carries 200 Gbit/s, which is %.3g GB/s, not 400.\n",
           est_nets[2].link / 1e9);
    printf("- 512 devices with a model sharded over 8 leave rings of %d, not 32.\n", 512 / 8);
}

int main(int argc, char **argv) {
    est_given g = { 0 };
    est_result r;
    char why[EST_WHY];
    (void)est_set_device(&g, "a100-nvlink");
    (void)est_set_net(&g, "nvlink4");
    (void)est_set_model(&g, "llama3-8b");
    g.devices = 4;
    for (int i = 1; i < argc; i += 2) {
        if (i + 1 == argc) {
            printf("estimate: %s has no value\n", argv[i]);
            return 1;
        }
        if (!set(&g, argv[i], argv[i + 1])) return 1;
    }
    if (!est_compute(&g, &r, why)) {
        printf("estimate: %s\n", why);
        return 1;
    }
    print_given(&g);
    print_hop(&r);
    print_memory(&g, &r);
    print_contexts(&g);
    print_table_2();
    print_table_3();
    print_corrections();
    return 0;
}
