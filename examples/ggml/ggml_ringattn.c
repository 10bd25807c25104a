/* ringattn.h as a plugin of ggml: an unmodified llama.cpp that finds this shared library in
 * GGML_BACKEND_PATH computes its attention here. README.md says how to build and use it.
 *
 *   RINGATTN_GGML=hook      (default) replaces nodes inside graphs of the CPU backend
 *   RINGATTN_GGML=device    a device of type ACCEL for nodes of FLASH_ATTN_EXT
 *   RINGATTN_GGML=off       is not loaded
 *   RINGATTN_GGML_TRACE=1   at exit: nodes taken, nodes left to ggml and why, time
 *   RINGATTN_GGML_ARITH=16  queries, keys and values may be rounded to bf16 before products
 *   RINGATTN_GGML_MASK=bias reads no intervals from masks: for tests
 *
 * You will see nothing but speed and the trace. Nothing of ggml is linked: functions come at run
 * time from the object that loads this one. At load the engine builds nodes and calls through its
 * own vtables, which shows whether its structs are those compiled in here, and computes a node that
 * is compared with a plain loop. If anything is not as expected, one line on stderr says what, and
 * the engine runs without this library. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define RINGATTN_STATIC
#define RINGATTN_IMPLEMENTATION
#include "ringattn.h"

#include "ggml-backend-impl.h"

#include <math.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#ifdef _WIN32
#include <windows.h>
#define EXPORTED __declspec(dllexport)
#else
#include <dlfcn.h>
#define EXPORTED __attribute__((visibility("default")))
#endif

enum { MASKS = 16, REASONS = 24, PARAMS = GGML_MAX_OP_PARAMS / 4,
       MASK_ROWS = 64 };               /* in the engine's own nodes: older ones demand a multiple */

/* ========================================================================== functions */
#define ENGINE(X)                                                                                  \
    X(ggml_backend_buffer_type_t, ggml_backend_cpu_buffer_type, (void))                            \
    X(ggml_backend_buffer_t, ggml_backend_cpu_buffer_from_ptr, (void *, size_t))                   \
    X(bool, ggml_backend_buft_is_host, (ggml_backend_buffer_type_t))                               \
    X(ggml_backend_dev_t, ggml_backend_dev_by_type, (enum ggml_backend_dev_type))                  \
    X(ggml_backend_t, ggml_backend_dev_init, (ggml_backend_dev_t, const char *))                   \
    X(ggml_backend_reg_t, ggml_backend_dev_backend_reg, (ggml_backend_dev_t))                      \
    X(void *, ggml_backend_reg_get_proc_address, (ggml_backend_reg_t, const char *))               \
    X(enum ggml_status, ggml_backend_graph_compute, (ggml_backend_t, struct ggml_cgraph *))        \
    X(void, ggml_backend_free, (ggml_backend_t))                                                   \
    X(struct ggml_context *, ggml_init, (struct ggml_init_params))                                 \
    X(void, ggml_free, (struct ggml_context *))                                                    \
    X(struct ggml_tensor *, ggml_new_tensor_4d,                                                    \
      (struct ggml_context *, enum ggml_type, int64_t, int64_t, int64_t, int64_t))                 \
    X(struct ggml_tensor *, ggml_flash_attn_ext,                                                   \
      (struct ggml_context *, struct ggml_tensor *, struct ggml_tensor *, struct ggml_tensor *,    \
       struct ggml_tensor *, float, float, float))                                                 \
    X(struct ggml_tensor *, ggml_custom_4d,                                                        \
      (struct ggml_context *, enum ggml_type, int64_t, int64_t, int64_t, int64_t,                  \
       struct ggml_tensor **, int, ggml_custom_op_t, int, void *))                                 \
    X(struct ggml_tensor *, ggml_view_4d,                                                          \
      (struct ggml_context *, struct ggml_tensor *, int64_t, int64_t, int64_t, int64_t, size_t,    \
       size_t, size_t, size_t))                                                                    \
    X(struct ggml_tensor *, ggml_permute,                                                          \
      (struct ggml_context *, struct ggml_tensor *, int, int, int, int))                           \
    X(struct ggml_tensor *, ggml_transpose, (struct ggml_context *, struct ggml_tensor *))         \
    X(struct ggml_tensor *, ggml_reshape, (struct ggml_context *, struct ggml_tensor *,            \
                                           struct ggml_tensor *))                                  \
    X(size_t, ggml_tensor_overhead, (void))                                                        \
    X(struct ggml_cgraph *, ggml_new_graph, (struct ggml_context *))                               \
    X(void, ggml_build_forward_expand, (struct ggml_cgraph *, struct ggml_tensor *))               \
    X(int, ggml_graph_n_nodes, (struct ggml_cgraph *))                                             \
    X(struct ggml_tensor *, ggml_graph_node, (struct ggml_cgraph *, int))

#define FIELD(type, name, args) type (*name) args;
static struct {
    ENGINE(FIELD)
    void (*ggml_flash_attn_ext_add_sinks)(struct ggml_tensor *, struct ggml_tensor *); /* or null */
} engine;
#undef FIELD

/* Says on stderr why this library is not used. Returns 0. */
static int unfit(const char *why, const char *what) {
    fprintf(stderr, "ringattn: not used: %s%s\n", why, what);
    return 0;
}

#ifdef _WIN32
static void *object_of(void *address) {
    HMODULE module = NULL;
    return GetModuleHandleExA(GET_MODULE_HANDLE_EX_FLAG_FROM_ADDRESS |
                                  GET_MODULE_HANDLE_EX_FLAG_UNCHANGED_REFCOUNT,
                              (const char *)address, &module) ? (void *)module : NULL;
}

static void *find(void *object, const char *name) {
    static const char *const parts[] = { "ggml-base.dll", "libggml-base.dll", "ggml.dll",
                                         "libggml.dll" };
    FARPROC p = GetProcAddress((HMODULE)object, name);
    for (size_t i = 0; !p && i < sizeof parts / sizeof *parts; i++)
        if (GetModuleHandleA(parts[i])) p = GetProcAddress(GetModuleHandleA(parts[i]), name);
    return (void *)(uintptr_t)p;
}

static void stay_loaded(void) {
    HMODULE module;
    (void)GetModuleHandleExA(GET_MODULE_HANDLE_EX_FLAG_FROM_ADDRESS | GET_MODULE_HANDLE_EX_FLAG_PIN,
                             (const char *)&engine, &module);
}
#else
/* A handle of the shared object that holds the address; dlsym searches it and what it needs. */
static void *object_of(void *address) {
    Dl_info at;
    void *handle = dladdr(address, &at) ? dlopen(at.dli_fname, RTLD_LAZY | RTLD_NOLOAD) : NULL;
    return handle ? handle : dlopen(NULL, RTLD_LAZY);  /* the program itself has another name */
}

static void *find(void *object, const char *name) { return dlsym(object, name); }

static void stay_loaded(void) {
    Dl_info at;
    if (dladdr(&engine, &at)) (void)dlopen(at.dli_fname, RTLD_LAZY | RTLD_NOLOAD | RTLD_NODELETE);
}
#endif

static int find_engine(void *object) {
    void *p;
    if (!object) return unfit("the object that loads it is unknown", "");
#define FIND(type, name, args)                                                                     \
    if (!(p = find(object, #name))) return unfit("this engine has no ", #name);                    \
    memcpy(&engine.name, &p, sizeof p);
    ENGINE(FIND)
#undef FIND
    p = find(object, "ggml_flash_attn_ext_add_sinks");
    memcpy(&engine.ggml_flash_attn_ext_add_sinks, &p, sizeof p);
    return 1;
}

/* ========================================================================== known structs */
typedef void (*function)(void);

struct custom_params { ggml_custom_op_t fun; int n_tasks; void *userdata; };

static struct { enum ggml_op flash, custom, view, permute, transpose, reshape, none; } ops;
static int32_t flag_compute;           /* on nodes that run; 0: engines that have no such flag */
static int masks_as_bias;
static int32_t arith;                  /* RA_ARITH_* */

static void no_custom(struct ggml_tensor *dst, int ith, int nth, void *userdata) {
    (void)dst; (void)ith; (void)nth; (void)userdata;
}

/* The engine builds nodes, which must be as they are read here. Numbers of ops come from them. */
static int nodes_known(struct ggml_context *c) {
    struct ggml_tensor *q = engine.ggml_new_tensor_4d(c, GGML_TYPE_F32, 64, 3, 8, 1);
    struct ggml_tensor *k = engine.ggml_new_tensor_4d(c, GGML_TYPE_Q8_0, 64, 5, 2, 1);
    struct ggml_tensor *v = engine.ggml_new_tensor_4d(c, GGML_TYPE_BF16, 32, 5, 2, 1);
    struct ggml_tensor *m = engine.ggml_new_tensor_4d(c, GGML_TYPE_F16, 5, MASK_ROWS, 1, 1);
    struct ggml_tensor *s = engine.ggml_new_tensor_4d(c, GGML_TYPE_F32, 8, 1, 1, 1);
    struct ggml_tensor *a = engine.ggml_flash_attn_ext(c, q, k, v, m, 0.5f, 4.0f, 3.0f);
    if (engine.ggml_flash_attn_ext_add_sinks) engine.ggml_flash_attn_ext_add_sinks(a, s);
    else s = NULL;
    struct ggml_tensor *u = engine.ggml_custom_4d(c, GGML_TYPE_F32, 32, 8, 3, 1, a->src, 4,
                                                  no_custom, GGML_N_TASKS_MAX, &engine);
    struct custom_params cp;
    float f[3];
    memcpy(&cp, u->op_params, sizeof cp);
    memcpy(f, a->op_params, sizeof f);
    int good = a->type == GGML_TYPE_F32 && a->ne[0] == 32 && a->ne[1] == 8 && a->ne[2] == 3 &&
        a->nb[1] == 128 && a->src[0] == q && a->src[1] == k && a->src[2] == v && a->src[3] == m &&
        a->src[4] == s && !a->src[5] && f[0] == 0.5f && f[1] == 4.0f && f[2] == 3.0f &&
        k->nb[0] == 34 && k->nb[1] == 68 && k->type == GGML_TYPE_Q8_0 && v->nb[1] == 64 &&
        m->nb[0] == 2 && a->data && !a->view_src && !a->buffer;
    for (int i = 5; i < PARAMS; i++) good &= a->op_params[i] == 0;
    good &= cp.fun == no_custom && cp.n_tasks == GGML_N_TASKS_MAX && cp.userdata == &engine;
    const size_t overhead = engine.ggml_tensor_overhead();
    good &= overhead > sizeof *a && overhead <= sizeof *a + 64;
    struct ggml_tensor *w = engine.ggml_view_4d(c, k, 64, 2, 2, 1, k->nb[1], k->nb[2], k->nb[3], 0);
    good &= w->view_src == k && w->data == k->data;
    ops.flash = a->op;
    ops.custom = u->op;
    ops.none = q->op;
    ops.view = w->op;
    ops.permute = engine.ggml_permute(c, q, 0, 2, 1, 3)->op;
    ops.transpose = engine.ggml_transpose(c, q)->op;
    ops.reshape = engine.ggml_reshape(c, q, q)->op;
    return good ? 1 : unfit("this engine's tensors differ from those of the headers", "");
}

static atomic_int reached;             /* engines free backends on any thread */

static void *probe(void) {
    reached = 1;
    return NULL;
}

/* Index of the word in [first, end) of an object where the engine looks for the function that
 * `reach` makes it call; -1: none. likely: where the headers have it. Words without a function are
 * left alone, and each gets its value back before the next one is tried. */
static int slot_of(void **words, int first, int end, int likely, void (*reach)(void *, void *),
                   void *with) {
    void *(*p)(void) = probe;
    for (int i = first - 1; i < end; i++) {
        const int at = i < first ? likely : i;
        void *const kept = at < end ? words[at] : NULL;
        if (!kept) continue;
        memcpy(&words[at], &p, sizeof p);
        reached = 0;
        reach(words, with);
        words[at] = kept;
        if (reached) return at;
    }
    return -1;
}

/* Index of the word that holds p; -1: not among the first ones. */
static int word_of(void **words, const void *p) {
    for (int i = 0; i < 24; i++) if (words[i] == p) return i;
    return -1;
}

#define WORD(type, member) ((int)(offsetof(type, member) / sizeof(void *)))

static struct {                        /* the CPU backend as it is, and where its functions stand */
    ggml_backend_dev_t device;
    int at_init, at_compute, at_reg, at_device;
    ggml_backend_t (*init)(ggml_backend_dev_t, const char *);
    enum ggml_status (*compute)(ggml_backend_t, struct ggml_cgraph *);
    void (*free)(ggml_backend_t);
} cpu;

static void reach_init(void *device, void *unused) {
    (void)unused;
    ggml_backend_t b = engine.ggml_backend_dev_init((ggml_backend_dev_t)device, NULL);
    if (b) engine.ggml_backend_free(b);
}

static void reach_compute(void *backend, void *graph) {
    (void)engine.ggml_backend_graph_compute((ggml_backend_t)backend, (struct ggml_cgraph *)graph);
}

static int vtables_known(struct ggml_cgraph *graph) {
    cpu.device = engine.ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    if (!cpu.device) return unfit("there is no CPU backend", "");
    void **words = (void **)cpu.device;
    cpu.at_reg = word_of(words, engine.ggml_backend_dev_backend_reg(cpu.device));
    if (cpu.at_reg < 0) return unfit("this engine's devices differ from those of the headers", "");
    cpu.at_init = slot_of(words, 3, cpu.at_reg,
                          WORD(struct ggml_backend_device, iface.init_backend), reach_init, NULL);
    if (cpu.at_init < 0) return unfit("the CPU device does not make its backends", "");
    memcpy(&cpu.init, &words[cpu.at_init], sizeof cpu.init);
    ggml_backend_t b = engine.ggml_backend_dev_init(cpu.device, NULL);
    if (!b) return unfit("the CPU device makes no backend", "");
    words = (void **)b;
    cpu.at_device = word_of(words, cpu.device);
    cpu.at_compute = cpu.at_device < 0 ? -1 :
        slot_of(words, 2, cpu.at_device, WORD(struct ggml_backend, iface.graph_compute),
                reach_compute, graph);
    if (cpu.at_compute >= 0) {
        memcpy(&cpu.compute, &words[cpu.at_compute], sizeof cpu.compute);
        cpu.free = b->iface.free;
    }
    engine.ggml_backend_free(b);
    return cpu.at_compute >= 0 ? 1 : unfit("backends of the CPU compute in another way", "");
}

/* ========================================================================== trace */
static struct {
    int on;
    atomic_llong nodes, intervals, biases, ns, read_ns;
    struct { _Atomic(const char *) why; atomic_llong count; } refused[REASONS];
} trace;

static void refuse(const char *why) {
    for (int i = 0; trace.on && i < REASONS; i++) {
        const char *none = NULL;
        if (atomic_compare_exchange_strong(&trace.refused[i].why, &none, why) || none == why) {
            trace.refused[i].count++;
            break;
        }
    }
}

static void report(void) {
    fprintf(stderr, "ringattn: %lld nodes taken, %.3f s; masks: %lld intervals, %lld bias, read in "
            "%.3f s\n", (long long)trace.nodes, (double)trace.ns * 1e-9, (long long)trace.intervals,
            (long long)trace.biases, (double)trace.read_ns * 1e-9);
    for (int i = 0; i < REASONS && trace.refused[i].why; i++)
        fprintf(stderr, "ringattn: %lld nodes left to ggml: %s\n",
                (long long)trace.refused[i].count, (const char *)trace.refused[i].why);
}

static int64_t trace_now(int ith) { return trace.on && ith == 0 ? ra_now_ns() : 0; }

/* ========================================================================== what a node says */
/* Types that rows may have: elements of a block, its bytes and its alignment. */
static const struct kind { enum ggml_type type; int32_t dtype, block, bytes, unit; } kinds[] = {
    { GGML_TYPE_F32, RA_F32, 1, 4, 4 }, { GGML_TYPE_F16, RA_F16, 1, 2, 2 },
    { GGML_TYPE_BF16, RA_BF16, 1, 2, 2 }, { GGML_TYPE_Q8_0, RA_Q8_0, 32, 34, 2 },
    { GGML_TYPE_Q4_0, RA_Q4_0, 32, 18, 2 } };

static const struct kind *kind_of(enum ggml_type type) {
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        if (kinds[i].type == type) return &kinds[i];
    return NULL;
}

static const char *unfit_rows(const struct ggml_tensor *x) {
    const struct kind *kind = kind_of(x->type);
    if (!kind) return "a type other than f32, f16, bf16, q8_0 and q4_0";
    const size_t unit = (size_t)kind->unit;
    const size_t row = (size_t)(x->ne[0] / kind->block * kind->bytes);
    if (x->nb[0] != (size_t)kind->bytes) return "elements of a row apart from each other";
    if (x->ne[0] < 1 || x->ne[0] > 1024) return "a head of more than 1024 elements";
    if (x->ne[0] % kind->block) return "rows that are not whole blocks";
    for (int i = 1; i < 4; i++)
        if (x->nb[i] % unit || (i < 3 && x->ne[i] > 1 && x->nb[i] < row) ||
            (uintptr_t)x->data % unit)
            return "rows that overlap, or are not aligned to their elements";
    return NULL;
}

/* Why a node of FLASH_ATTN_EXT stays with ggml; null: it does not. data 1: it is about to run. */
static const char *unsupported(const struct ggml_tensor *n, int data) {
    const struct ggml_tensor *q = n->src[0], *k = n->src[1], *v = n->src[2], *m = n->src[3];
    const struct ggml_tensor *s = n->src[4];
    const char *why = NULL;
    float scale;
    memcpy(&scale, n->op_params, sizeof scale);
    if (!(scale > 0)) return "a scale that is not positive";   /* the library's 0 is a default */
    if (!q || !k || !v || n->type != GGML_TYPE_F32 || q->type != GGML_TYPE_F32)
        return "queries or results that are not f32";
    if ((why = unfit_rows(q)) || (why = unfit_rows(k)) || (why = unfit_rows(v))) return why;
    if (q->ne[0] != k->ne[0] || k->ne[2] != v->ne[2] || k->ne[1] != v->ne[1] || k->ne[2] < 1 ||
        q->ne[2] % k->ne[2] || q->ne[2] > 65536 || q->ne[2] < 1)
        return "shapes of Q, K and V";
    if (q->ne[3] != k->ne[3] || q->ne[3] != v->ne[3]) return "sequences that share K and V";
    if (k->ne[1] < 1 || k->ne[1] >= RA_MAX_POSITION || q->ne[1] < 1 || q->ne[3] < 1 ||
        q->ne[3] > 1 << 20 || q->ne[1] >= RA_MAX_POSITION / q->ne[3])
        return "no rows, or too many";
    if (m && (m->type != GGML_TYPE_F16 || m->nb[0] != 2 || m->ne[0] < k->ne[1] ||
              m->ne[1] < q->ne[1]))
        return "a mask of another type or shape";
    if (m && ((m->ne[3] != 1 && m->ne[3] != q->ne[3]) || (m->ne[2] != 1 && m->ne[2] != q->ne[2])))
        return "a mask that some heads or sequences share";
    if (s && (s->type != GGML_TYPE_F32 || s->nb[0] != 4 || s->ne[0] != q->ne[2]))
        return "sinks of another type or shape";
    for (int i = 5; i < GGML_MAX_SRC; i++) if (n->src[i]) return "an unknown source";
    for (int i = 5; i < PARAMS; i++) if (n->op_params[i]) return "an unknown parameter";
    if (data && (!n->data || !q->data || !k->data || !v->data || (m && !m->data) ||
                 (s && !s->data)))
        return "tensors without data";
    return NULL;
}

static int is_view(const struct ggml_tensor *n) {
    return n->op == ops.none || n->op == ops.view || n->op == ops.permute ||
        n->op == ops.transpose || n->op == ops.reshape;
}

static ra_in view_of(const struct ggml_tensor *x) {
    const ra_in v = { x->data, x->ne[3] > 1 ? (int64_t)x->nb[3] : 0, (int64_t)x->nb[1],
                      (int64_t)x->nb[2], 0 };
    return v;
}

/* ========================================================================== masks
 * A mask whose rows are 0 in one interval of keys and -inf elsewhere (causal, windows, padding,
 * streams) is given as RA_MASK_INTERVALS and is not read again by other nodes of the graph. It is
 * read by all threads, in place of a node before that which computes nothing. */
struct bounds {
    const struct ggml_tensor *read;    /* the mask */
    const struct ggml_tensor *mask;    /* the same; null: not for other nodes */
    int64_t rows, keys, sequences;
    int32_t *of;                       /* lo, hi and positions of all rows */
    size_t room;                       /* for so many numbers */
    int checked;                       /* no node from where it is read to this one writes to it */
    atomic_llong found;                /* rows that are intervals */
    atomic_int other;                  /* 1: a row is not */
};

#if defined __x86_64__ && defined __linux__ && defined __GNUC__ && !defined __SANITIZE_THREAD__
#ifdef __clang__
__attribute__((target_clones("avx2", "default")))
#else
__attribute__((target_clones("arch=skylake-avx512", "avx2", "default")))
#endif
#endif
static int64_t zeros_of(const uint16_t *m, int64_t n, int64_t *hidden) {
    int64_t zeros = 0, minus = 0;
    while (n > 0) {
        const int64_t some = n < 16384 ? n : 16384;
        uint16_t z = 0, i = 0;
        for (int64_t j = 0; j < some; j++) {
            z = (uint16_t)(z + ((uint16_t)(m[j] << 1) == 0));
            i = (uint16_t)(i + (m[j] == 0xfc00));
        }
        zeros += z; minus += i; m += some; n -= some;
    }
    *hidden = minus;
    return zeros;
}

/* 1 if the row is an interval, [*lo, *hi). */
static int interval_of(const uint16_t *row, int64_t keys, int32_t *lo, int32_t *hi) {
    int64_t hidden, first = 0, last = keys;
    const int64_t zeros = zeros_of(row, keys, &hidden);
    if (zeros + hidden != keys) return 0;
    if (!zeros) last = 0;
    while (zeros && (row[first] & 0x7fff)) first++;
    while (zeros && (row[last - 1] & 0x7fff)) last--;
    *lo = (int32_t)first;
    *hi = (int32_t)last;
    return last - first == zeros;
}

/* Reads share ith of nth of the rows: a custom op, or a call before the graph runs. */
static void read_mask(struct ggml_tensor *dst, int ith, int nth, void *userdata) {
    struct bounds *x = userdata;
    const struct ggml_tensor *m = x->read;
    const int64_t all = x->rows * x->sequences, before = trace_now(ith);
    int64_t found = 0;
    (void)dst;
    for (int64_t i = all * ith / nth; i < all * (ith + 1) / nth; i++) {
        const int64_t b = m->ne[3] > 1 ? i / x->rows : 0, r = i % x->rows;
        const char *row = (const char *)m->data + b * (int64_t)m->nb[3] + r * (int64_t)m->nb[1];
        if (x->other || !interval_of((const uint16_t *)(const void *)row, x->keys, x->of + i,
                                     x->of + all + i)) {
            x->other = 1;
            break;
        }
        x->of[2 * all + i] = (int32_t)i;
        found++;
    }
    x->found += found;
    if (before) trace.read_ns += ra_now_ns() - before;
}

/* ========================================================================== one node */
struct call {
    struct ggml_tensor *node;
    struct state *state;
    ra_desc d;                         /* without a mask */
    ra_tensors t;
    ra_error why;
    struct bounds *bounds;             /* of its mask; null: none, or it is a bias */
    const float *slopes;               /* factors of the mask per head; null: no max_bias */
    atomic_int bad;
};

struct swap { struct ggml_tensor *node; enum ggml_op op; int32_t params[PARAMS]; };

/* Of a backend that is hooked. Entries of the list are never removed, so that it needs no lock. */
struct state {
    struct state *next;
    _Atomic(ggml_backend_t) backend;   /* null: the entry is free */
    int threads, wanted;               /* that the workspace serves; that the engine had */
    int masks;
    size_t calls, swaps, slopes;       /* used, and how many there is room for: */
    size_t call_room, swap_room, slope_room, bytes;
    struct call *call;
    struct swap *swap;
    float *slope;
    void *memory;                      /* the workspace */
    struct bounds bounds[MASKS];
};

/* Room for `wanted` elements, whose contents are lost if it has to grow. */
static void *grow(void *memory, size_t *room, size_t wanted, size_t each) {
    if (wanted <= *room) return memory;
    free(memory);
    memory = malloc(wanted * each);
    *room = memory ? wanted : 0;
    return memory;
}

/* Adds the mask to a description: as intervals, or as a bias. */
static void add_mask(const struct call *c, int as_intervals, ra_desc *d, ra_tensors *t) {
    const struct ggml_tensor *m = c->node->src[3];
    if (as_intervals) {
        const int64_t rows = c->d.tokens, all = rows * c->d.sequences;
        const int32_t *of = c->bounds->of;
        d->mask.kind = RA_MASK_INTERVALS;
        d->mask.lo = of;
        d->mask.hi = of + all;
        d->mask.interval_count = all;
        if (c->d.sequences > 1) {
            t->q_pos.array = of + 2 * all;
            t->q_pos.count = rows;
            t->q_pos.batch_step = rows;
        }
    } else if (m) {
        const ra_bias b = { m->data, m->ne[3] > 1 ? (int64_t)m->nb[3] : 0,
                            m->ne[2] > 1 ? (int64_t)m->nb[2] : 0, (int64_t)m->nb[1], 2,
                            c->d.kv_tokens, RA_F16 };
        d->scores |= RA_SCORE_BIAS;
        t->bias = b;
        if (!c->slopes) return;
        d->scores |= RA_SCORE_FACTORS;
        t->bias_factors = c->slopes;
    }
}

/* Returns the bytes of the workspace; 0: the library does not take it. */
static size_t bytes_of(const struct call *c, int as_intervals) {
    ra_desc d = c->d;
    ra_tensors t = c->t;
    add_mask(c, as_intervals, &d, &t);
    return ra_attention_bytes(&d, c->state->threads);
}

/* The factors of ggml's max_bias, one per head. */
static void slopes_for(float *slope, float max_bias, int heads) {
    const int two = 1 << (int)floor(log2(heads));
    for (int h = 0; h < heads; h++)
        slope[h] = h < two ? powf(powf(2.0f, -max_bias / (float)two), (float)(h + 1))
            : powf(powf(2.0f, -max_bias / 2.0f / (float)two), (float)(2 * (h - two) + 1));
}

/* Describes the node. slopes: room for a factor per head. Returns the bytes of its workspace. */
static size_t describe(struct call *c, struct ggml_tensor *n, float *slopes) {
    const struct ggml_tensor *q = n->src[0], *k = n->src[1], *v = n->src[2], *s = n->src[4];
    float params[3];
    memcpy(params, n->op_params, sizeof params);
    memset(&c->d, 0, sizeof c->d);
    memset(&c->t, 0, sizeof c->t);
    memset(&c->why, 0, sizeof c->why);
    c->node = n;
    c->bad = 0;
    c->d.q_heads = (int32_t)q->ne[2];
    c->d.kv_heads = (int32_t)k->ne[2];
    c->d.k_dim = (int32_t)q->ne[0];
    c->d.v_dim = (int32_t)v->ne[0];
    c->d.q_dtype = c->d.o_dtype = RA_F32;
    c->d.k_dtype = kind_of(k->type)->dtype;
    c->d.v_dtype = kind_of(v->type)->dtype;
    c->d.sequences = (int32_t)q->ne[3];
    c->d.tokens = q->ne[1];
    c->d.kv_tokens = k->ne[1];
    c->d.mask.kind = RA_MASK_NONE;
    c->d.arith = arith;
    c->d.scale = params[0];
    c->d.softcap = params[2];
    c->t.q = view_of(q);
    c->t.k = view_of(k);
    c->t.v = view_of(v);
    c->t.o.data = n->data;
    c->t.o.head_stride = (int64_t)n->nb[1];
    c->t.o.token_stride = (int64_t)n->nb[2];
    if (q->ne[3] > 1) c->t.o.batch_stride = (int64_t)n->nb[3];
    if (s) {
        c->d.scores |= RA_SCORE_SINKS;
        c->t.sinks = s->data;
    }
    c->slopes = NULL;
    if (params[1] > 0 && n->src[3]) {
        slopes_for(slopes, params[1], (int)q->ne[2]);
        c->slopes = slopes;
    }
    const size_t bias = bytes_of(c, 0), intervals = c->bounds ? bytes_of(c, 1) : bias;
    return !bias || !intervals ? 0 : bias > intervals ? bias : intervals;
}

/* A custom op in place of the node. */
static void run_node(struct ggml_tensor *dst, int ith, int nth, void *userdata) {
    struct call *c = userdata;
    const int64_t before = trace_now(ith);
    const int most = c->state->threads;
    const int as_intervals = c->bounds && c->bounds->found == c->d.tokens * c->d.sequences;
    (void)dst;
    if (ith == 0 && nth > c->state->wanted) c->state->wanted = nth;
    if (nth > most) nth = most;        /* the next graph has room for all of them */
    if (ith >= nth) return;
    ra_desc d = c->d;
    ra_tensors t = c->t;
    add_mask(c, as_intervals, &d, &t);
    if (ith == 0) d.error = &c->why;
    const ra_status s = ra_attention(&d, &t, c->state->memory, c->state->bytes, ith, nth);
    if (s) c->bad = s;
    if (!before) return;
    trace.ns += ra_now_ns() - before;
    if (as_intervals) trace.intervals++;
    else if (c->node->src[3]) trace.biases++;
}

/* ========================================================================== the hook */
static _Atomic(struct state *) states;

static struct state *state_of(ggml_backend_t b) {
    struct state *s = states;
    while (s && s->backend != b) s = s->next;
    return s;
}

/* Takes a free entry of the list, or adds one. */
static struct state *state_for(ggml_backend_t b) {
    struct state *s = states;
    ggml_backend_t none = NULL;
    while (s && !atomic_compare_exchange_strong(&s->backend, &none, b)) {
        none = NULL;
        s = s->next;
    }
    if (s || !(s = calloc(1, sizeof *s))) return s;
    s->threads = 16;
    s->backend = b;
    s->next = states;
    while (!atomic_compare_exchange_weak(&states, &s->next, s)) continue;
    return s;
}

static void state_free(struct state *s) {
    for (int i = 0; i < MASKS; i++) free(s->bounds[i].of);
    free(s->call);
    free(s->swap);
    free(s->slope);
    free(s->memory);
    memset(s->bounds, 0, sizeof s->bounds);
    s->call_room = s->swap_room = s->slope_room = s->bytes = 0;
    s->call = NULL;
    s->swap = NULL;
    s->slope = NULL;
    s->memory = NULL;
    s->backend = NULL;                 /* from here on another thread may take the entry */
}

static const struct ggml_tensor *storage(const struct ggml_tensor *x) {
    while (x->view_src) x = x->view_src;
    return x;
}

static int reads_mask(const struct ggml_tensor *n) {
    struct custom_params p;
    memcpy(&p, n->op_params, sizeof p);
    return n->op == ops.custom && p.fun == read_mask;
}

/* The last node in [first, end) that writes to the storage of x; -1: none. */
static int last_writer(struct ggml_cgraph *g, int first, int end, const struct ggml_tensor *x) {
    const struct ggml_tensor *root = storage(x);
    for (int i = end - 1; i >= first; i--) {
        const struct ggml_tensor *n = engine.ggml_graph_node(g, i);
        if (!is_view(n) && storage(n) == root && !reads_mask(n)) return i;
    }
    return -1;
}

static int runs(const struct ggml_tensor *n) {     /* 1: the engine computes this node */
    return (!flag_compute || (n->flags & flag_compute)) && n->ne[0] > 0 && n->ne[1] > 0 &&
        n->ne[2] > 0 && n->ne[3] > 0;
}

/* Makes a node a custom op until the graph has run. */
static void swap_in(struct state *s, struct ggml_tensor *n, ggml_custom_op_t fun, void *userdata) {
    const struct custom_params p = { fun, GGML_N_TASKS_MAX, userdata };
    struct swap *w = &s->swap[s->swaps++];
    w->node = n;
    w->op = n->op;
    memcpy(w->params, n->op_params, sizeof w->params);
    memset(n->op_params, 0, sizeof n->op_params);
    memcpy(n->op_params, &p, sizeof p);
    n->op = ops.custom;
}

static void swap_out(struct state *s) {
    while (s->swaps) {
        const struct swap *w = &s->swap[--s->swaps];
        w->node->op = w->op;
        memcpy(w->node->op_params, w->params, sizeof w->params);
    }
}

/* Sees to it that the mask of node i is read before that: by a node that only makes a view, or else
 * now. Returns where its intervals will be; null: it has to be a bias. */
static struct bounds *bounds_for(struct state *s, struct ggml_cgraph *g, int i,
                                 const struct ggml_tensor *n) {
    const struct ggml_tensor *q = n->src[0], *k = n->src[1], *m = n->src[3];
    const int64_t all = q->ne[1] * q->ne[3];
    struct bounds *x = s->bounds;
    if (!m || m->ne[2] != 1 || masks_as_bias) return NULL;
    for (; x < s->bounds + s->masks; x++) {
        if (x->mask != m || x->rows != q->ne[1] || x->keys != k->ne[1] || x->sequences != q->ne[3])
            continue;
        const int written = last_writer(g, x->checked, i, m);
        x->checked = i;
        if (written < 0) return x;
        x->mask = NULL;                /* nodes before this one go on using it */
    }
    if (s->masks == MASKS) return NULL;
    x->of = grow(x->of, &x->room, (size_t)all * 3, sizeof *x->of);
    if (!x->of) return NULL;
    x->mask = x->read = m;
    x->rows = q->ne[1];
    x->keys = k->ne[1];
    x->sequences = q->ne[3];
    x->found = 0;
    x->other = 0;
    x->checked = i;
    const int written = last_writer(g, 0, i, m);
    int at = i - 1;
    for (; at > written; at--) {
        struct ggml_tensor *view = engine.ggml_graph_node(g, at);
        if (is_view(view) && runs(view)) break;
    }
    if (at > written) swap_in(s, engine.ggml_graph_node(g, at), read_mask, x);
    else if (written < 0) read_mask(NULL, 0, 1, x);
    else return NULL;
    s->masks++;
    return x;
}

/* Replaces the nodes of a graph that the library takes. Returns 0 if there is no memory. */
static int prepare(struct state *s, struct ggml_cgraph *g) {
    const int nodes = engine.ggml_graph_n_nodes(g);
    size_t most = 0, heads = 0, need = 0;
    s->calls = s->swaps = s->slopes = 0;
    s->masks = 0;
    for (int i = 0; i < nodes; i++) {
        const struct ggml_tensor *n = engine.ggml_graph_node(g, i);
        if (n->op != ops.flash || !runs(n)) continue;
        most++;
        heads += (size_t)n->ne[1];
    }
    if (!most) return 1;
    s->call = grow(s->call, &s->call_room, most, sizeof *s->call);
    s->swap = grow(s->swap, &s->swap_room, most + MASKS, sizeof *s->swap);
    s->slope = grow(s->slope, &s->slope_room, heads, sizeof *s->slope);
    if (!s->call || !s->swap || !s->slope) return 0;
    for (int i = 0; i < nodes; i++) {
        struct ggml_tensor *n = engine.ggml_graph_node(g, i);
        if (n->op != ops.flash || !runs(n)) continue;
        const char *why = unsupported(n, 1);
        struct call *c = &s->call[s->calls];
        c->state = s;
        if (!why) c->bounds = bounds_for(s, g, i, n);
        const size_t bytes = why ? 0 : describe(c, n, s->slope + s->slopes);
        if (!bytes) {
            refuse(why ? why : "what the library refuses");
            continue;
        }
        if (bytes > need) need = bytes;
        swap_in(s, n, run_node, c);
        if (c->slopes) s->slopes += (size_t)c->d.q_heads;
        s->calls++;
    }
    trace.nodes += trace.on ? (long long)s->calls : 0;
    s->memory = grow(s->memory, &s->bytes, need, 1);
    return s->memory != NULL || !need;
}

/* 1 if a node failed; says which sentence the library has for it. */
static int failed(const struct state *s) {
    for (size_t i = 0; i < s->calls; i++) {
        const struct call *c = &s->call[i];
        if (!c->bad) continue;
        fprintf(stderr, "ringattn: %s: %s: %s\n", ra_status_text((ra_status)(int)c->bad),
                c->why.field, c->why.text);
        return 1;
    }
    return 0;
}

static enum ggml_status hooked_compute(ggml_backend_t b, struct ggml_cgraph *graph) {
    struct state *s = state_of(b);
    if (!s) return cpu.compute(b, graph);
    if (!prepare(s, graph)) {
        swap_out(s);
        refuse("no memory");
        s->calls = 0;
    }
    const enum ggml_status status = cpu.compute(b, graph);
    swap_out(s);
    if (s->wanted > s->threads) s->threads = s->wanted;
    return status == GGML_STATUS_SUCCESS && failed(s) ? GGML_STATUS_FAILED : status;
}

static void hooked_free(ggml_backend_t b) {
    struct state *s = state_of(b);
    reached = 1;
    if (s) state_free(s);
    cpu.free(b);
}

/* In place of the CPU device's function. A backend without a state stays as it is. */
static ggml_backend_t hooked_init(ggml_backend_dev_t d, const char *params) {
    enum ggml_status (*compute)(ggml_backend_t, struct ggml_cgraph *) = hooked_compute;
    ggml_backend_t b = cpu.init(d, params);
    if (!b || !state_for(b)) return b;
    memcpy((void **)b + cpu.at_compute, &compute, sizeof compute);
    b->iface.free = hooked_free;
    return b;
}

/* ========================================================================== a device
 * For programs that make the CPU backend in a way of their own but ask all devices. Its backends
 * are hooked ones of the CPU under another name, so the engine's threads compute here too. */
enum { SLOTS = 32 };

static union {
    struct ggml_backend_device as;
    void *words[SLOTS];
} device;

static union {
    struct ggml_backend_reg as;
    void *words[SLOTS];
} reg;

static int as_device;                  /* RINGATTN_GGML=device */

static const char *text_name(void) { return "RINGATTN"; }
static const char *backend_name(ggml_backend_t b) { (void)b; return text_name(); }
static const char *device_name(ggml_backend_dev_t d) { (void)d; return text_name(); }
static const char *device_text(ggml_backend_dev_t d) { (void)d; return "attention by ringattn.h"; }
static void device_memory(ggml_backend_dev_t d, size_t *f, size_t *t) { (void)d; *f = *t = 0; }
static enum ggml_backend_dev_type device_type(ggml_backend_dev_t d) {
    (void)d;
    return GGML_BACKEND_DEVICE_TYPE_ACCEL;
}
static void device_props(ggml_backend_dev_t d, struct ggml_backend_dev_props *p) {
    p->name = device_name(d);
    p->description = device_text(d);
    p->memory_free = p->memory_total = 0;
    p->type = device_type(d);
    memset(&p->caps, 0, sizeof p->caps);
    p->caps.buffer_from_host_ptr = true;
}
static ggml_backend_buffer_type_t device_buffers(ggml_backend_dev_t d) {
    (void)d;
    return engine.ggml_backend_cpu_buffer_type();
}
static ggml_backend_buffer_t device_wrap(ggml_backend_dev_t d, void *p, size_t size, size_t most) {
    (void)d; (void)most;
    return engine.ggml_backend_cpu_buffer_from_ptr(p, size);
}
static bool device_supports(ggml_backend_dev_t d, const struct ggml_tensor *n) {
    (void)d;
    return is_view(n) || (n->op == ops.flash && !unsupported(n, 0));
}
static bool device_reads(ggml_backend_dev_t d, ggml_backend_buffer_type_t b) {
    (void)d;
    return engine.ggml_backend_buft_is_host(b);
}

static ggml_backend_t device_init(ggml_backend_dev_t d, const char *params) {
    ggml_backend_t b = hooked_init(cpu.device, params);
    if (b && !state_of(b)) {
        engine.ggml_backend_free(b);
        b = NULL;
    }
    if (!b) return NULL;
    b->iface.get_name = backend_name;
    b->device = d;
    return b;
}

static const char *reg_name(ggml_backend_reg_t r) { (void)r; return text_name(); }
static size_t reg_count(ggml_backend_reg_t r) { (void)r; return as_device ? 1 : 0; }
static ggml_backend_dev_t reg_device(ggml_backend_reg_t r, size_t i) {
    (void)r; (void)i;
    return &device.as;
}

static void *reg_function(ggml_backend_reg_t r, const char *name) {
    (void)r;
    if (!as_device || (strcmp(name, "ggml_backend_set_n_threads") &&
                       strcmp(name, "ggml_backend_set_abort_callback")))
        return NULL;
    return engine.ggml_backend_reg_get_proc_address(
        engine.ggml_backend_dev_backend_reg(cpu.device), name);
}

static void make_registry(void) {
    /* The version is the engine's: what it stands for has been looked at. */
    reg.as.api_version = engine.ggml_backend_dev_backend_reg(cpu.device)->api_version;
    reg.as.iface.get_name = reg_name;
    reg.as.iface.get_device_count = reg_count;
    reg.as.iface.get_device = reg_device;
    reg.as.iface.get_proc_address = reg_function;
    device.as.reg = &reg.as;
    device.as.iface.get_name = device_name;
    device.as.iface.get_description = device_text;
    device.as.iface.get_memory = device_memory;
    device.as.iface.get_type = device_type;
    device.as.iface.get_props = device_props;
    device.as.iface.init_backend = device_init;
    device.as.iface.get_buffer_type = device_buffers;
    device.as.iface.buffer_from_host_ptr = device_wrap;
    device.as.iface.supports_op = device_supports;
    device.as.iface.supports_buft = device_reads;
}

/* ========================================================================== one whole node */
enum { D = 32, HEADS = 4, KV_HEADS = 2, ROWS = 5, KEYS = 40, ROW_BYTES = D * 2 };

static float number(int i) { return (float)((i * 7919 + 13) % 31 - 15) / 8.0f; }

static int visible(int row, int key) { return key >= 2 + row && key <= KEYS - ROWS + row; }

/* Element e of the result by definition, in double. */
static double expected(int row, int head, int e) {
    double sum = 0, value = 0;
    for (int j = 0; j < KEYS; j++) {
        const int at = (head / (HEADS / KV_HEADS) * KEYS + j) * D;
        double score = 0;
        for (int i = 0; i < D && visible(row, j); i++)
            score += (double)number((row * HEADS + head) * D + i) * (double)number(at + i + 7);
        const double p = visible(row, j) ? exp(score / 16) : 0;
        sum += p;
        value += p * (double)number(at + e + 3);
    }
    return value / sum;
}

static void fill(struct ggml_tensor *x, int plus, int half) {
    for (int i = 0; i < (int)(x->ne[0] * x->ne[1] * x->ne[2]); i++) {
        const float f = number(i + plus);
        if (half) (void)ra_convert((uint16_t *)x->data + i, RA_F16, &f, RA_F32, 1);
        else ((float *)x->data)[i] = f;
    }
}

static struct ggml_tensor *test_node(struct ggml_context *c, struct ggml_cgraph *graph) {
    struct ggml_tensor *q = engine.ggml_new_tensor_4d(c, GGML_TYPE_F32, D, HEADS, ROWS, 1);
    struct ggml_tensor *k = engine.ggml_new_tensor_4d(c, GGML_TYPE_F16, D, KEYS, KV_HEADS, 1);
    struct ggml_tensor *v = engine.ggml_new_tensor_4d(c, GGML_TYPE_F16, D, KEYS, KV_HEADS, 1);
    struct ggml_tensor *m = engine.ggml_new_tensor_4d(c, GGML_TYPE_F16, KEYS, MASK_ROWS, 1, 1);
    fill(q, 0, 0);
    fill(k, 7, 1);
    fill(v, 3, 1);
    for (int r = 0; r < ROWS; r++)
        for (int j = 0; j < KEYS; j++)
            ((uint16_t *)m->data)[r * KEYS + j] = visible(r, j) ? 0 : 0xfc00;
    struct ggml_tensor *a = engine.ggml_flash_attn_ext(c, engine.ggml_permute(c, q, 0, 2, 1, 3), k,
                                                       v, m, 1.0f / 16, 0, 0);
    engine.ggml_build_forward_expand(graph, a);
    return a;
}

/* Computes the node through a hooked backend of the engine's CPU device. */
static int node_right(struct ggml_cgraph *graph, const struct ggml_tensor *a) {
    double worst = 0;
    ggml_backend_t b = engine.ggml_backend_dev_init(cpu.device, NULL);
    struct state *s = b ? state_of(b) : NULL;
    if (b && !s) engine.ggml_backend_free(b);
    if (!s) return unfit("the CPU device does not make its backends", "");
    memset(a->data, 0xff, D * HEADS * ROWS * sizeof(float));
    const enum ggml_status status = engine.ggml_backend_graph_compute(b, graph);
    const int taken = s->calls == 1 &&
        (masks_as_bias || (s->masks == 1 && s->bounds[0].found == ROWS));
    reached = 0;
    engine.ggml_backend_free(b);
    for (int i = 0; i < D * HEADS * ROWS; i++) {
        const double e = fabs((double)((const float *)a->data)[i] -
                              expected(i / D / HEADS, i / D % HEADS, i % D));
        if (!(e <= worst)) worst = e;
    }
    if (!reached) return unfit("backends of the CPU are freed in another way", "");
    if (status != GGML_STATUS_SUCCESS || !taken || a->op != ops.flash)
        return unfit("a node in a graph of the CPU is not computed here", "");
    return worst < 1e-5 ? 1 : unfit("a node computed here has a wrong result", "");
}

/* ========================================================================== loading */
static int self_test(void) {
    const size_t bytes = 1 << 20;
    void *memory = malloc(bytes);
    const struct ggml_init_params p = { bytes, memory, false };
    struct ggml_context *c = memory ? engine.ggml_init(p) : NULL;
    int good = c && nodes_known(c);
    if (good) {
        struct ggml_cgraph *graph = engine.ggml_new_graph(c);
        struct ggml_tensor *a = test_node(c, graph);
        flag_compute = a->flags & GGML_TENSOR_FLAG_COMPUTE;
        good = vtables_known(graph);
        if (good) {
            ggml_backend_t (*init)(ggml_backend_dev_t, const char *) = hooked_init;
            void **slot = (void **)cpu.device + cpu.at_init, *const kept = *slot;
            memcpy(slot, &init, sizeof init);
            good = node_right(graph, a);
            if (!good || as_device) *slot = kept;
        }
    }
    if (good && as_device) {
        good = cpu.at_reg == WORD(struct ggml_backend_device, reg) &&
            cpu.at_device == WORD(struct ggml_backend, device);
        if (!good) (void)unfit("this engine's vtables differ from those of the headers", "");
    }
    if (c) engine.ggml_free(c);
    free(memory);
    return good;
}

static int load(void *object) {
    static int tried, good;
    const char *mode = getenv("RINGATTN_GGML"), *mask = getenv("RINGATTN_GGML_MASK");
    const char *bits = getenv("RINGATTN_GGML_ARITH");
    void *p = object ? find(object, "ggml_init") : NULL, *ours;
    memcpy(&ours, &engine.ggml_init, sizeof ours);
    if (tried && good && p != ours) return unfit("it serves another copy of ggml", "");
    if (tried) return good;
    tried = 1;
    if (mode && !strcmp(mode, "off")) return 0;
    as_device = mode && !strcmp(mode, "device");
    if (mode && !as_device && strcmp(mode, "hook"))
        return unfit("RINGATTN_GGML is not off, hook or device: ", mode);
    if (bits && *bits && strcmp(bits, "16"))
        return unfit("RINGATTN_GGML_ARITH is not 16: ", bits);
    masks_as_bias = mask && !strcmp(mask, "bias");
    good = find_engine(object) && self_test();     /* which wants exact products */
    if (!good) return 0;
    arith = bits && *bits ? RA_ARITH_BF16 : RA_ARITH_DTYPE;
    stay_loaded();
    make_registry();
    trace.on = getenv("RINGATTN_GGML_TRACE") != NULL;
    if (trace.on) atexit(report);
    return 1;
}

EXPORTED int ggml_backend_score(void);
EXPORTED ggml_backend_reg_t ggml_backend_init(void);

/* 0: ggml does not load this library. */
EXPORTED int ggml_backend_score(void) { return load(object_of(__builtin_return_address(0))); }

EXPORTED ggml_backend_reg_t ggml_backend_init(void) {
    return load(object_of(__builtin_return_address(0))) ? &reg.as : NULL;
}
