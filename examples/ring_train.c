/* Trains a model over bytes on ranks that share each sequence, and writes it as a GGUF that
 * ring_infer runs. You will see the loss fall, the held-out bits per byte beside gzip and xz, and
 * the files PREFIX.csv and PREFIX.svg. Loss and weights have the same bits for every number of
 * ranks, and a run that was interrupted ends with the bits of one that was not.
 *
 *   cc -O2 -std=c99 -pthread -I. -o ring_train examples/ring_train.c -lm
 *   ./ring_train TEXT --ranks 2 --steps 200 --out /tmp/run --export /tmp/run.gguf
 *
 * Without arguments it lists its options. Ranks are threads of this process. */
#define _DEFAULT_SOURCE 1
#define _POSIX_C_SOURCE 200809L
#define RINGATTN_IMPLEMENTATION
#include "ringattn.h"
#include "cores.h"
#include "train/export.h"
#include "train/report.h"
#include "train/text.h"

#include <pthread.h>
#include <signal.h>
#include <sys/file.h>

static const char train_usage[] =
    "ring_train TEXT [options]            TEXT: a file, or a folder of them\n"
    "  --out PREFIX      of the checkpoint, PREFIX.csv and PREFIX.svg (ring_train.out)\n"
    "  --steps N         optimiser steps of the whole run (200)\n"
    "  --ranks P         1, 2, 4, 8 or 16 threads, each with a part of every sequence (by cores)\n"
    "  --layout NAME     zigzag or contiguous (zigzag; 16 ranks: contiguous)\n"
    "  --context N,M@S   tokens of a sequence, multiples of 1024; M from step S on (1024)\n"
    "  --tokens N        of a step, in sequences one after the other (8192)\n"
    "  --layers 5 --hidden 192 --heads 3 --kv-heads 1 --feed 480    the model\n"
    "  --untied          the output has a matrix of its own\n"
    "  --recompute       attention is computed again by the pass backward, not kept\n"
    "  --rate X, --warm-up N, --decay X, --clip X, --seed N    (0.002, 50, 0.1, 1, 1)\n"
    "  --held PATH       text that is scored at the end; inside TEXT it is not learnt from\n"
    "                    (the last 20th of TEXT)\n"
    "  --without A,B     folders of these names are not read\n"
    "  --save N          steps from checkpoint to checkpoint (500); Ctrl-C writes one too\n"
    "  --resume          goes on from the checkpoint of PREFIX, on any number of ranks\n"
    "  --eval PATH       only scores PATH by the checkpoint of PREFIX; TEXT is not needed\n"
    "  --export FILE     writes the model as GGUF, --type f32, f16 or q8_0 (f16)\n";

enum { TRAIN_STAGES = 8, TRAIN_RANKS = 16 };

typedef struct curriculum { int64_t context, step; } curriculum;

typedef struct train {
    net n;
    net_shape shape;
    optimiser o;
    curriculum stage[TRAIN_STAGES];
    int64_t stages, tokens, steps, save, seed, ranks, layout, recompute;
    int32_t type;
    const char *path, *out, *held_path, *eval, *export;
    int resume, eval_only, quiet;
    train_text text, held;             /* text.size: of what is learnt from */
    checkpoint c;                      /* c.step: steps done */

    pthread_mutex_t lock;              /* of the four below */
    pthread_cond_t all_here;
    int64_t waiting, round;
    int failed;
    char why[TRAIN_WHY];

    double loss[TRAIN_LANES];          /* of the step, or of the text that is scored */
    double *squares;                   /* of each chunk of the gradient */
    float *bits;                       /* [steps] bits per byte, of this sitting */
    int64_t first;                     /* step at which this sitting began */
    int over, stopped;                 /* the ranks leave the loop; before its end */
    FILE *csv;
    int64_t began_ns, shown_ns;
    size_t rank_bytes;
    double peak;                       /* FLOP/s of products on one rank alone */
    double norm, held_bits;
    int64_t held_tokens;
} train;

static volatile sig_atomic_t train_stop;

/* -------------------------------------------------------------------------- ranks meet
 * Returns when all ranks have called it: 1, or 0 if one of them has failed. */
static int train_meet(train *t) {
    int ok;
    pthread_mutex_lock(&t->lock);
    const int64_t round = t->round;
    if (++t->waiting == t->ranks) {
        t->waiting = 0;
        t->round++;
        pthread_cond_broadcast(&t->all_here);
    }
    while (t->round == round && !t->failed) pthread_cond_wait(&t->all_here, &t->lock);
    ok = !t->failed;
    pthread_mutex_unlock(&t->lock);
    return ok;
}

/* The first failure is the one that is told. */
static void train_fail(train *t, const char *why) {
    pthread_mutex_lock(&t->lock);
    if (!t->failed) snprintf(t->why, sizeof t->why, "%.*s", TRAIN_WHY - 1, why);
    t->failed = 1;
    pthread_cond_broadcast(&t->all_here);
    pthread_mutex_unlock(&t->lock);
}

static int64_t train_context(const train *t, int64_t step) {
    int64_t context = t->stage[0].context;
    for (int64_t i = 0; i < t->stages; i++)
        if (step >= t->stage[i].step) context = t->stage[i].context;
    return context;
}

static int64_t train_sequences(const train *t, int64_t step) {
    const int64_t n = t->tokens / train_context(t, step);
    return n < 1 ? 1 : n;
}

/* -------------------------------------------------------------------------- what a user sees */
/* The fastest of many products that fit the first cache: what this processor can do. */
static double train_peak(void) {
    static float a[64 * 64], b[64 * 96], out[64 * 96];
    const product p = { a, 64, 1, b, out, 64, 96, 64, 1 };
    const train_math *m = train_math_here();
    double best = 0;
    for (int i = 0; i < 100; i++) {
        const int64_t begin = ra_now_ns();
        for (int k = 0; k < 10; k++) m->product(&p);
        best = fmax(best, 10 * 2.0 * 64 * 96 * 64 / (double)(ra_now_ns() - begin + 1) * 1e9);
    }
    return best;
}

static double train_flops(const train *t, int64_t context) {       /* of a token, both passes */
    const net_shape *s = &t->n.s;
    return 6.0 * (double)t->n.size +
           7.0 * (double)context * (double)(s->layers * s->heads * s->dim);
}

/* Rank 0, while no other rank changes anything: the step that has just been done. */
static void train_account(train *t) {
    const int64_t step = t->c.step, context = train_context(t, step);
    const int64_t tokens = train_sequences(t, step) * context, now = ra_now_ns();
    const double loss = train_tree(t->loss) / (double)tokens, bits = loss / log(2.0);
    const double seconds = (double)(now - t->began_ns) * 1e-9;
    const double pace = seconds / (double)(step - t->first + 1);
    const double flops = (double)tokens / pace * train_flops(t, context);
    t->bits[step] = (float)bits;
    t->c.step = step + 1;
    if (t->csv)
        fprintf(t->csv, "%lld,%lld,%.9g,%.6f,%.6g,%.6g,%.2f\n", (long long)step + 1,
                (long long)context, loss, bits, t->norm, train_rate(&t->o, step), seconds);
    memset(t->loss, 0, sizeof t->loss);
    if (t->quiet || (now - t->shown_ns < 500000000 && step + 1 < t->steps)) return;
    t->shown_ns = now;
    fprintf(stderr, "\rstep %lld of %lld  context %lld  loss %.4f  %.3f bits per byte  "
            "%.0f tokens/s  %.1f GFLOP/s, %.0f %% of peak  %.1f MiB per rank  %.0f s left   ",
            (long long)step + 1, (long long)t->steps, (long long)context, loss, bits,
            (double)tokens / pace, flops * 1e-9, flops * 100 / (t->peak * (double)t->ranks),
            (double)t->rank_bytes / 1048576, pace * (double)(t->steps - step - 1));
}

/* Rank 0 between two steps: saves if it is time, and says whether the ranks go on. */
static int train_between(train *t) {
    char why[TRAIN_WHY];
    t->stopped = train_stop && t->c.step < t->steps;
    t->over = t->c.step >= t->steps || t->stopped;
    if (!t->eval_only && (t->over || t->c.step % t->save == 0) && t->c.step > t->first) {
        if ((t->csv && fflush(t->csv) &&
             !train_refuse(why, "%s.csv: %s", t->out, strerror(errno))) ||
            !checkpoint_save(t->out, &t->n, &t->c, why)) {
            train_fail(t, why);
            return 0;
        }
    }
    return 1;
}

/* -------------------------------------------------------------------------- the training loop */
static ra_status train_rank_failed(train *t, const seat *s, const ra_error *e, ra_status status) {
    char why[TRAIN_WHY + RA_TEXT_BYTES];
    snprintf(why, sizeof why, "%s: %.300s", ra_status_text(status),
             s->ring ? ra_ring_explain(s->ring) : e->text);
    if (status != RA_E_ABORTED) train_fail(t, why);
    return status;
}

/* The seat for sequences of `context` tokens; the one before is given up. */
static ra_status train_sit(train *t, seat *s, const ra_transport *wire, int rank,
                           int64_t context) {
    ra_error error;
    ra_desc d;
    memset(&error, 0, sizeof error);
    memset(&d, 0, sizeof d);
    if (s->plan && s->context == context) return RA_OK;
    seat_close(s);
    d.ranks = (int32_t)t->ranks;
    d.rank = rank;
    d.layout.kind = (int32_t)t->layout;
    d.error = &error;
    s->kept = t->recompute ? 1 : t->n.s.layers;
    const ra_status status = seat_open(s, wire, &d, context);
    if (rank == 0) t->rank_bytes = s->bytes;
    return status ? train_rank_failed(t, s, &error, status) : RA_OK;
}

/* The pieces of the text that a step reads follow from seed and step alone. */
static sequence train_sequence(train *t, int64_t step, int64_t i, int64_t context) {
    const int64_t n = train_sequences(t, step);
    const uint64_t places = (uint64_t)t->text.size - (uint64_t)context;
    const uint64_t number = train_random((uint64_t)(step << 20 | i));
    const uint64_t place = train_random((uint64_t)t->seed ^ number) % places;
    const sequence q = { t->text.data + place, t->loss, 1 / (float)(n * context) };
    return q;
}

/* Scores the held-out text in pieces of the last context. */
static ra_status train_score(train *t, seat *s, const ra_transport *wire, int rank) {
    const int64_t context = train_context(t, t->steps);
    ra_status status = train_sit(t, s, wire, rank, context);
    int64_t at = 0;
    for (; !status && at + context < (int64_t)t->held.size; at += context) {
        const sequence q = { t->held.data + at, t->loss, 0 };
        status = seat_pass(s, &q);
        if (status) train_rank_failed(t, s, NULL, status);
    }
    if (status || !train_meet(t) || rank) return status;
    t->held_tokens = at;
    t->held_bits = at ? train_tree(t->loss) / (double)at / log(2.0) : 0;
    return RA_OK;
}

static ra_status train_rank(ra_world *world, int rank, void *user) {
    train *t = (train *)user;
    const ra_transport *wire = ra_world_transport(world, rank);
    const int64_t chunks = (t->n.size + TRAIN_CHUNK - 1) / TRAIN_CHUNK;
    seat s;
    ra_status status = RA_OK;
    memset(&s, 0, sizeof s);
    s.n = &t->n;
    net_turn(&t->n, rank, t->ranks);
    while (!status) {
        if (rank == 0 && !train_between(t)) status = RA_E_IO;
        if (status || !train_meet(t)) break;
        if (t->over) {
            if (!t->stopped) status = train_score(t, &s, wire, rank);
            break;
        }
        const int64_t step = t->c.step, context = train_context(t, step);
        status = train_sit(t, &s, wire, rank, context);
        for (int64_t i = 0; i < train_sequences(t, step) && !status; i++) {
            const sequence q = train_sequence(t, step, i, context);
            status = seat_pass(&s, &q);
            if (status) train_rank_failed(t, &s, NULL, status);
        }
        if (status || !train_meet(t)) break;           /* all lanes are summed */
        for (int64_t c = rank; c < chunks; c += t->ranks) t->squares[c] = train_merge(&t->n, c);
        if (!train_meet(t)) break;                     /* the gradient is complete */
        double norm = 0;
        for (int64_t c = 0; c < chunks; c++) norm += t->squares[c];
        norm = sqrt(norm);
        if (!isfinite(norm)) {                         /* on all ranks: the weights stay good */
            train_fail(t, "the gradient is infinite or NaN; a lower --rate may help");
            break;
        }
        for (int64_t c = rank; c < chunks; c += t->ranks)
            train_update(&t->n, c, &t->o, step, norm);
        if (!train_meet(t)) break;                     /* the weights are new */
        net_turn(&t->n, rank, t->ranks);
        if (rank == 0) {
            t->norm = norm;
            train_account(t);
        }
    }
    seat_close(&s);
    return status;
}

/* -------------------------------------------------------------------------- command line */
static int train_whole(const char *name, const char *s, int64_t least, int64_t most, int64_t *out,
                       char *why) {
    char *end = NULL;
    long long x = 0;
    errno = 0;
    if (s) x = strtoll(s, &end, 10);
    if (!s || end == s || *end || errno || x < least || x > most)
        return train_refuse(why, "%s: '%.40s' is no whole number from %lld to %lld", name,
                            s ? s : "", (long long)least, (long long)most);
    *out = x;
    return 1;
}

static int train_fraction(const char *name, const char *s, double most, double *out, char *why) {
    char *end = NULL;
    const double x = s ? strtod(s, &end) : 0;
    if (!s || end == s || *end || !(x >= 0 && x <= most))
        return train_refuse(why, "%s: '%.40s' is no number from 0 to %g", name, s ? s : "", most);
    *out = x;
    return 1;
}

static int train_contexts(train *t, const char *s, char *why) {
    long long context = 0, step = 0;
    int length = 0;
    for (t->stages = 0; t->stages < TRAIN_STAGES; s += length + 1) {
        curriculum *next = &t->stage[t->stages];
        length = 0;
        step = 0;
        if (t->stages == 0 && sscanf(s, "%lld%n", &context, &length) != 1) break;
        if (t->stages && sscanf(s, "%lld@%lld%n", &context, &step, &length) != 2) break;
        if (context < 1024 || context % 1024 || context > RA_MAX_POSITION - 1024 || length == 0 ||
            (t->stages && step <= next[-1].step))
            break;
        next->context = context;
        next->step = step;
        t->stages++;
        if (!s[length]) return 1;
        if (s[length] != ',') break;
    }
    return train_refuse(why, "--context: '%.40s' is no list such as 1024,8192@3000: multiples of "
                        "1024, from rising steps on, at most %d", s, TRAIN_STAGES);
}

/* An option without a value: 1. Otherwise 0. */
static int train_flag(train *t, const char *name) {
    if (!strcmp(name, "--resume")) t->resume = 1;
    else if (!strcmp(name, "--untied")) t->shape.tied = 0;
    else if (!strcmp(name, "--recompute")) t->recompute = 1;
    else if (!strcmp(name, "--quiet")) t->quiet = 1;
    else return 0;
    return 1;
}

static int train_option(train *t, const char *name, const char *s, char *why) {
    static const char *const absent[] = { "--mesh", "--shm", "--at", "--rank", "--bf16",
                                          "--survive", "--documents" };
    const struct { const char *name, **to; } texts[] = {
        { "--out", &t->out }, { "--held", &t->held_path }, { "--eval", &t->eval },
        { "--export", &t->export }, { "--without", &t->text.without } };
    const struct { const char *name; int64_t *to, least, most; } numbers[] = {
        { "--steps", &t->steps, 1, TRAIN_STEPS }, { "--tokens", &t->tokens, 1024, 1 << 30 },
        { "--layers", &t->shape.layers, 1, 1024 }, { "--hidden", &t->shape.hidden, 16, 65536 },
        { "--heads", &t->shape.heads, 1, 1024 }, { "--kv-heads", &t->shape.kv_heads, 1, 1024 },
        { "--feed", &t->shape.feed, 16, 1 << 20 }, { "--seed", &t->seed, 0, INT64_MAX },
        { "--save", &t->save, 1, 100000000 }, { "--ranks", &t->ranks, 1, TRAIN_RANKS } };
    const struct { const char *name; double *to, most; } fractions[] = {
        { "--rate", &t->o.rate, 1 }, { "--warm-up", &t->o.warm_up, 1e8 },
        { "--decay", &t->o.decay, 10 }, { "--clip", &t->o.clip, 1e30 } };
    for (size_t i = 0; i < sizeof absent / sizeof *absent; i++)
        if (!strcmp(name, absent[i]))
            return train_refuse(why, "%s: ranks are threads of this process, arithmetic is f32 and "
                                "a text is one document", name);
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        if (strcmp(name, texts[i].name)) continue;
        *texts[i].to = s;
        return s && *s ? 1 : train_refuse(why, "%s: it needs a value", name);
    }
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        if (!strcmp(name, numbers[i].name))
            return train_whole(name, s, numbers[i].least, numbers[i].most, numbers[i].to, why);
    for (size_t i = 0; i < sizeof fractions / sizeof *fractions; i++)
        if (!strcmp(name, fractions[i].name))
            return train_fraction(name, s, fractions[i].most, fractions[i].to, why);
    if (!strcmp(name, "--context")) return train_contexts(t, s ? s : "", why);
    if (!strcmp(name, "--layout")) {
        t->layout = !s ? 0 : !strcmp(s, "zigzag") ? RA_LAYOUT_ZIGZAG
                  : !strcmp(s, "contiguous") ? RA_LAYOUT_CONTIGUOUS : 0;
        return t->layout ? 1 : train_refuse(why, "--layout: zigzag or contiguous");
    }
    if (!strcmp(name, "--type")) {
        t->type = !s ? 0 : !strcmp(s, "f32") ? RA_F32 : !strcmp(s, "f16") ? RA_F16
                : !strcmp(s, "q8_0") ? RA_Q8_0 : 0;
        return t->type ? 1 : train_refuse(why, "--type: f32, f16 or q8_0");
    }
    return train_refuse(why, "%s: there is no such option", name);
}

static int train_shape_fits(train *t, char *why) {
    net_shape *s = &t->shape;
    s->dim = s->hidden / s->heads;
    if (s->hidden % 16 || s->feed % 16 || s->hidden % s->heads || s->dim % 2 || s->dim > 1024 ||
        s->heads % s->kv_heads || s->kv_heads * s->dim % 16)
        return train_refuse(why, "--hidden %lld, --heads %lld, --kv-heads %lld, --feed %lld: "
                            "hidden, feed and the width of keys must be multiples of 16, hidden of "
                            "twice the heads, heads of kv-heads", (long long)s->hidden,
                            (long long)s->heads, (long long)s->kv_heads, (long long)s->feed);
    if (t->ranks & (t->ranks - 1))
        return train_refuse(why, "--ranks: %lld is none of 1, 2, 4, 8 and 16, which divide the 16 "
                            "lanes of a step", (long long)t->ranks);
    if (t->ranks == TRAIN_RANKS && !t->layout) t->layout = RA_LAYOUT_CONTIGUOUS;
    if (!t->layout) t->layout = RA_LAYOUT_ZIGZAG;
    if (t->ranks == TRAIN_RANKS && t->layout == RA_LAYOUT_ZIGZAG)
        return train_refuse(why, "--ranks: 16 ranks need --layout contiguous: a zigzag rank holds "
                            "two lanes at least");
    return 1;
}

static void train_defaults(train *t) {
    static const net_shape shape = { 5, 3, 1, 0, 192, 480, 1 };
    const int cores = cores_here();
    memset(t, 0, sizeof *t);
    t->shape = shape;
    t->o.rate = 0.002;
    t->o.warm_up = 50;
    t->o.decay = 0.1;
    t->o.clip = 1;
    t->stages = 1;
    t->stage[0].context = 1024;
    t->tokens = 8192;
    t->steps = 200;
    t->save = 500;
    t->seed = 1;
    t->type = RA_F16;
    t->out = "ring_train.out";
    for (t->ranks = 1; t->ranks * 2 <= cores && t->ranks < 8;) t->ranks *= 2;
    pthread_mutex_init(&t->lock, NULL);
    pthread_cond_init(&t->all_here, NULL);
}

static int train_arguments(train *t, int argc, char **argv, char *why) {
    train_defaults(t);
    for (int i = 1; i < argc; i++) {
        if (argv[i][0] != '-') {
            if (t->path)
                return train_refuse(why, "%s: there is a text already, %s", argv[i], t->path);
            t->path = argv[i];
        } else if (!train_flag(t, argv[i])) {
            if (!train_option(t, argv[i], i + 1 < argc ? argv[i + 1] : NULL, why)) return 0;
            i++;
        }
    }
    t->eval_only = t->eval != NULL;
    t->o.steps = (double)t->steps;
    if (!t->path && !t->eval_only) return train_refuse(why, "a text to learn from is missing");
    return train_shape_fits(t, why);
}

/* -------------------------------------------------------------------------- one run */
/* Hashes all that gives a run its bits. Ranks are not among it; the layout is. */
static uint64_t train_configuration(const train *t) {
    const net_shape *s = &t->shape;
    const int64_t list[] = { 2, s->layers, s->heads, s->kv_heads, s->hidden, s->feed, s->tied,
                             t->tokens, t->seed, t->layout, t->stages };
    const double rates[] = { t->o.rate, t->o.warm_up, t->o.decay, t->o.clip, t->o.steps };
    uint64_t h = train_hash(0xcbf29ce484222325u, list, sizeof list);
    h = train_hash(h, rates, sizeof rates);
    return train_hash(h, t->stage, (size_t)t->stages * sizeof *t->stage);
}

static int train_read_texts(train *t, char *why) {
    const char *held = t->eval ? t->eval : t->held_path;
    int64_t longest = 0;
    for (int64_t i = 0; i < t->stages; i++)
        if (t->stage[i].context > longest) longest = t->stage[i].context;
    if (held && !text_leave_out(&t->text, held, why)) return 0;
    if (t->path && !t->eval_only && !text_open(&t->text, t->path, 0, why)) return 0;
    if (held && !text_open(&t->held, held, 0, why)) return 0;
    if (!t->eval_only && !held && t->text.size) {
        const size_t n = t->text.size / 20;
        t->text.size -= n;
        t->held.data = (uint8_t *)malloc(n + 1);
        if (!t->held.data) return train_refuse(why, "%s: no memory for this text", t->path);
        memcpy(t->held.data, t->text.data + t->text.size, n);
        t->held.size = n;
    }
    if (!t->eval_only && (int64_t)t->text.size <= longest + 1)
        return train_refuse(why, "%s: %llu bytes to learn from are fewer than one sequence of %lld "
                            "and its label", t->path, (unsigned long long)t->text.size,
                            (long long)longest);
    if (held && (int64_t)t->held.size <= train_context(t, t->steps))
        return train_refuse(why, "%s: %llu bytes of text are fewer than one sequence of %lld and "
                            "its label", held, (unsigned long long)t->held.size,
                            (long long)train_context(t, t->steps));
    t->c.text = t->eval_only ? 0 : train_hash(0xcbf29ce484222325u, t->text.data, t->text.size);
    t->c.configuration = t->eval_only ? 0 : train_configuration(t);
    t->c.shape = t->shape;
    return 1;
}

/* --eval: the model is that of the checkpoint. */
static int train_shape_found(train *t, char *why) {
    manifest m;
    const int found = manifest_read(t->out, &m, why);
    if (found < 0) return train_refuse(why, "%s.manifest: there is no checkpoint", t->out);
    if (!found) return 0;
    t->shape = m.c.shape;
    t->steps = m.c.step;
    return train_shape_fits(t, why);
}

/* Opens PREFIX.csv, which no other process may have open, for the rows after those of the steps
 * that are done: what a killed run wrote beyond its checkpoint goes. */
static int train_open_rows(train *t, char *why) {
    char path[TRAIN_PATH], row[256];
    long long step = 0;
    long end = 0;
    snprintf(path, sizeof path, "%s.csv", t->out);
    t->csv = fopen(path, "a+");
    if (t->csv && flock(fileno(t->csv), LOCK_EX | LOCK_NB) && errno == EWOULDBLOCK)
        return train_refuse(why, "%s: another process trains with this --out", path);
    if (t->csv) rewind(t->csv);
    while (t->csv && t->resume && fgets(row, sizeof row, t->csv) && strchr(row, '\n') &&
           (sscanf(row, "%lld,", &step) != 1 || step <= t->c.step))
        end = ftell(t->csv);
    if (!t->csv || fseek(t->csv, end, SEEK_SET) || ftruncate(fileno(t->csv), end))
        return train_refuse(why, "%s: %s", path, strerror(errno));
    if (!end) fprintf(t->csv, "step,context,loss,bits_per_byte,norm,rate,seconds\n");
    return 1;
}

/* The weights: new ones, or those of the checkpoint. */
static int train_begin(train *t, char *why) {
    const size_t chunks = (size_t)((t->n.size + TRAIN_CHUNK - 1) / TRAIN_CHUNK);
    manifest m;
    t->squares = (double *)calloc(chunks, sizeof *t->squares);
    t->bits = (float *)calloc((size_t)t->steps + 1, sizeof *t->bits);
    if (!t->squares || !t->bits) return train_refuse(why, "no memory");
    if (t->resume || t->eval_only) {
        const int found = checkpoint_load(t->out, &t->n, &t->c, why);
        if (found < 0)
            return train_refuse(why, "%s.manifest: there is no checkpoint", t->out);
        if (!found) return 0;
    } else {
        if (manifest_read(t->out, &m, why) >= 0)
            return train_refuse(why, "%s.manifest: there is a checkpoint already: take --resume or "
                                "another --out", t->out);
        net_initialise(&t->n, (uint64_t)t->seed);
    }
    t->first = t->c.step;
    return t->eval_only || train_open_rows(t, why);
}

static void train_say_held(const train *t) {
    static const char *const packers[] = { "gzip -9", "xz -9e" };
    char path[TRAIN_PATH];
    if (!t->held_tokens || t->quiet) return;
    printf("held-out text: %lld of %llu bytes scored, %.4f bits per byte",
           (long long)t->held_tokens, (unsigned long long)t->held.size, t->held_bits);
    snprintf(path, sizeof path, "%s.held", t->out);
    FILE *f = fopen(path, "wb");
    int ok = f && fwrite(t->held.data, 1, t->held.size, f) == t->held.size;
    if (f) ok = fclose(f) == 0 && ok;
    for (size_t i = 0; i < sizeof packers / sizeof *packers && ok; i++) {
        const int64_t bytes = report_packed(packers[i], path);
        if (bytes > 0) printf("; %s %.4f", packers[i], (double)bytes * 8 / (double)t->held.size);
    }
    printf("\n");
    (void)remove(path);
}

static void train_close(train *t) {
    if (t->csv) fclose(t->csv);
    net_close(&t->n);
    free(t->squares); free(t->bits); free(t->text.data); free(t->held.data);
    pthread_cond_destroy(&t->all_here);
    pthread_mutex_destroy(&t->lock);
}

/* Everything after the arguments. 0: see why. */
static int train_run(train *t, char *why) {
    char path[TRAIN_PATH];
    if (t->eval_only && !train_shape_found(t, why)) return 0;
    if (!train_read_texts(t, why)) return 0;
    if (!net_open(&t->n, &t->shape)) return train_refuse(why, "no memory for this model");
    if (!train_begin(t, why)) return 0;
    if (!t->quiet)
        fprintf(stderr, "%lld weights, %lld ranks, %llu bytes of %llu files to learn from, %llu "
                "files left out, %llu bytes held out; step %lld\n", (long long)t->n.size,
                (long long)t->ranks,
                (unsigned long long)t->text.size, (unsigned long long)t->text.files,
                (unsigned long long)t->text.left_out, (unsigned long long)t->held.size,
                (long long)t->c.step);
    t->peak = t->quiet ? 1 : train_peak();
    t->began_ns = ra_now_ns();
    const ra_status status = ra_world_run((int)t->ranks, train_rank, t, NULL);
    if (!t->quiet) fprintf(stderr, "\n");
    if (status || t->failed)
        return train_refuse(why, "step %lld: %s", (long long)t->c.step + 1,
                            t->failed ? t->why : ra_status_text(status));
    snprintf(path, sizeof path, "%s.svg", t->out);
    if (t->c.step > t->first &&
        !report_svg(path, t->bits + t->first, t->first, t->c.step - t->first))
        return train_refuse(why, "%s: %s", path, strerror(errno));
    train_say_held(t);
    if (t->c.step < t->steps && !t->quiet)
        fprintf(stderr, "stopped at step %lld; --resume goes on\n", (long long)t->c.step);
    return !t->export || export_gguf(t->export, &t->n, train_context(t, t->steps), t->type, why);
}

#if !defined(RING_TRAIN_NO_MAIN)
static void train_on_signal(int sign) {
    (void)sign;
    train_stop = 1;
}

int main(int argc, char **argv) {
    static train t;
    char why[TRAIN_WHY] = "";
    int ok;
    if (argc < 2) {
        fputs(train_usage, stdout);
        return 0;
    }
    signal(SIGINT, train_on_signal);
    signal(SIGTERM, train_on_signal);
    ok = train_arguments(&t, argc, argv, why) && train_run(&t, why);
    if (!ok) fprintf(stderr, "ring_train: %s\n", why);
    train_close(&t);
    return !ok;
}
#endif
