/* Which context fits into given hardware, and how large a block hides the transfer of a hop: the
 * arithmetic of estimate.c, without ringattn.h.
 *
 * With F FLOP/s and W bytes/s per device, c tokens per block, b sequences, e bytes per element and
 * f = 1 (balanced causal: 1/2), one hop computes 4 f b Hq D c^2 FLOPs and moves 2 b c Hkv D e
 * bytes. Computing takes at least as long as the transfer from c = (F/W) e Hkv / (2 f Hq) on, which
 * is F/W for MHA at 2 bytes. A device holds six blocks of hidden size h: Q; K and V in use; K and V
 * arriving; the output: 6 b c h e bytes. Liu, Zaharia, Abbeel, arXiv 2310.01889v4, section 3.
 *
 * Every figure is a double. They are bounded so that no product overflows. */
#ifndef RINGATTN_EXAMPLES_ESTIMATE_H
#define RINGATTN_EXAMPLES_ESTIMATE_H

#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

/* What is given. 0 is the default that stands beside a field; the others are required. */
typedef struct est_given {
    double flops, memory, link;        /* of a device: FLOP/s, bytes, bytes/s to its neighbour */
    double latency;                    /* seconds per message; 0 */
    double devices;                    /* in the ring */
    double block;                      /* tokens; 0: the smallest that hides a hop */
    double layers, q_heads, kv_heads, head_dim;
    double hidden;                     /* 0: q_heads * head_dim */
    double batch;                      /* sequences; 0: 1 */
    double element;                    /* bytes; 0: 2 */
    double causal;                     /* 1: half the work, balanced */
    double weights;                    /* bytes on each device; 0 */
} est_given;

typedef struct est_result {
    double block_min, tokens_min;      /* per device: smallest block that hides a hop; six such */
    double activation_token;           /* bytes per token of one layer: 6 b h e */
    double cache_token;                /* bytes per token: K and V of all layers of one sequence */
    double context_max;                /* tokens on all devices, if six blocks of one layer and the
                                        * cache of all layers fit beside the weights */
    double block;                      /* tokens per device of the hop below */
    double compute_s, transfer_s;      /* of a hop */
    double hidden;                     /* part of the transfer that computing hides, 0 to 1 */
} est_result;

/* A field: its name in sentences and on the command line, and its bounds. */
typedef struct est_field {
    const char *name;
    size_t offset;
    double least, most;
    int whole;                         /* 1: an integer */
} est_field;

#define EST_FIELD(name, least, most, whole) { #name, offsetof(est_given, name), least, most, whole }
static const est_field est_fields[] = {
    EST_FIELD(flops, 1, 1e30, 0), EST_FIELD(memory, 1, 1e30, 0), EST_FIELD(link, 1, 1e30, 0),
    EST_FIELD(latency, 0, 1e30, 0), EST_FIELD(devices, 1, 2147483647, 1),
    EST_FIELD(block, 0, 2147483647, 1), EST_FIELD(layers, 1, 2147483647, 1),
    EST_FIELD(q_heads, 1, 2147483647, 1), EST_FIELD(kv_heads, 1, 2147483647, 1),
    EST_FIELD(head_dim, 1, 2147483647, 1), EST_FIELD(hidden, 0, 2147483647, 1),
    EST_FIELD(batch, 0, 2147483647, 1), EST_FIELD(element, 0, 8, 0), EST_FIELD(causal, 0, 1, 1),
    EST_FIELD(weights, 0, 1e30, 0),
};

/* Devices as in table 2 of the paper, which gives neither latencies nor blocks. */
typedef struct est_device {
    const char *name, *text;
    double flops, memory, link;
} est_device;
static const est_device est_devices[] = {
    { "a100-nvlink", "A100 NVLink",     312e12, 80e9, 300e9 },
    { "a100-ib",     "A100 InfiniBand", 312e12, 80e9, 12.5e9 },
    { "tpu-v3",      "TPU v3",          123e12, 16e9, 112e9 },
    { "tpu-v4",      "TPU v4",          275e12, 32e9, 268e9 },
    { "tpu-v5e",     "TPU v5e",         196e12, 16e9, 186e9 },
};

/* Links with a suitable block. InfiniBand HDR of 4 lanes carries 200 Gbit/s, which is 25 GB/s. */
typedef struct est_net {
    const char *name;
    double link, latency, block;
} est_net;
static const est_net est_nets[] = {
    { "nvlink4",  600e9, 1e-6, 8192 },
    { "pcie4x16", 64e9,  5e-6, 4096 },
    { "ib-hdr",   25e9,  2e-6, 8192 },
};

/* Models, with weights in 16 bits. */
typedef struct est_model {
    const char *name;
    double layers, q_heads, kv_heads, head_dim, weights;
} est_model;
static const est_model est_models[] = {
    { "llama2-7b",  32, 32, 32, 128, 13.48e9 },
    { "llama2-13b", 40, 40, 40, 128, 26.03e9 },
    { "llama3-8b",  32, 32, 8,  128, 16.06e9 },
    { "llama3-70b", 80, 64, 8,  128, 141.1e9 },
};

enum { EST_FIELDS = sizeof est_fields / sizeof *est_fields,
       EST_DEVICES = sizeof est_devices / sizeof *est_devices,
       EST_NETS = sizeof est_nets / sizeof *est_nets,
       EST_MODELS = sizeof est_models / sizeof *est_models, EST_WHY = 160 };

/* Fill in a preset's figures; 0: there is none of that name. A link replaces that of a device. */
static inline int est_set_device(est_given *g, const char *name) {
    for (int i = 0; i < EST_DEVICES; i++) {
        if (strcmp(est_devices[i].name, name) != 0) continue;
        g->flops = est_devices[i].flops;
        g->memory = est_devices[i].memory;
        g->link = est_devices[i].link;
        g->latency = g->block = 0;
        return 1;
    }
    return 0;
}

static inline int est_set_net(est_given *g, const char *name) {
    for (int i = 0; i < EST_NETS; i++) {
        if (strcmp(est_nets[i].name, name) != 0) continue;
        g->link = est_nets[i].link;
        g->latency = est_nets[i].latency;
        g->block = est_nets[i].block;
        return 1;
    }
    return 0;
}

static inline int est_set_model(est_given *g, const char *name) {
    for (int i = 0; i < EST_MODELS; i++) {
        if (strcmp(est_models[i].name, name) != 0) continue;
        g->layers = est_models[i].layers;
        g->q_heads = est_models[i].q_heads;
        g->kv_heads = est_models[i].kv_heads;
        g->head_dim = est_models[i].head_dim;
        g->weights = est_models[i].weights;
        return 1;
    }
    return 0;
}

static inline double *est_at(est_given *g, const est_field *f) {
    return (double *)(void *)((char *)g + f->offset);
}

/* 1: every figure is possible. 0: `why` names the field, its value and what is allowed. */
static inline int est_check(const est_given *g, char why[EST_WHY]) {
    est_given copy = *g;
    for (int i = 0; i < EST_FIELDS; i++) {
        const est_field *f = &est_fields[i];
        const double v = *est_at(&copy, f);
        if (v >= f->least && v <= f->most && (!f->whole || floor(v) == v)) continue;
        (void)snprintf(why, EST_WHY, "%s must be %s from %.10g to %.10g; it is %.10g", f->name,
                       f->whole ? "an integer" : "a number", f->least, f->most, v);
        return 0;
    }
    if (fmod(g->q_heads, g->kv_heads) == 0.0) return 1;
    (void)snprintf(why, EST_WHY, "q_heads, %.10g, must be a multiple of kv_heads, %.10g",
                   g->q_heads, g->kv_heads);
    return 0;
}

/* 1: r has the result. 0: `why` says which figure is impossible, and r is unchanged. */
static inline int est_compute(const est_given *g, est_result *r, char why[EST_WHY]) {
    if (!est_check(g, why)) return 0;
    const double e = g->element > 0.0 ? g->element : 2.0;
    const double b = g->batch > 0.0 ? g->batch : 1.0;
    const double f = g->causal > 0.0 ? 0.5 : 1.0;
    const double q_row = g->q_heads * g->head_dim;                     /* elements per token */
    const double kv_row = g->kv_heads * g->head_dim;
    const double room = fmax(g->memory - g->weights, 0.0);
    r->block_min = g->flops / g->link * e * kv_row / (2.0 * f * q_row);
    r->tokens_min = 6.0 * r->block_min;
    r->activation_token = 6.0 * b * (g->hidden > 0.0 ? g->hidden : q_row) * e;
    r->cache_token = 2.0 * g->layers * kv_row * e;
    r->context_max = floor(room / (r->activation_token + b * r->cache_token)) * g->devices;
    r->block = g->block > 0.0 ? g->block : r->block_min;
    r->compute_s = 4.0 * f * b * q_row * r->block * r->block / g->flops;
    r->transfer_s = g->latency + 2.0 * b * kv_row * r->block * e / g->link;
    r->hidden = fmin(r->compute_s / r->transfer_s, 1.0);
    return 1;
}

#endif
