/* Trains a model over bytes on ranks that share each sequence, and writes it as a GGUF that
 * ring_infer runs. You will see the loss fall, the held-out bits per byte beside gzip and xz, and
 * the files PREFIX.csv and PREFIX.svg. Loss and weights have the same bits for every number of
 * ranks, and a run that was interrupted ends with the bits of one that was not.
 *
 *   cc -O2 -std=c99 -pthread -I. -o ring_train examples/ring_train.c -lm
 *   ./ring_train TEXT --ranks 2 --steps 200 --out /tmp/run --export /tmp/run.gguf
 *
 * Without arguments it lists its options. For mpirun:
 *
 *   mpicc -O2 -std=c99 -pthread -I. -DRING_TRAIN_MPI -o ring_train examples/ring_train.c -lm
 *   mpirun -n 4 ./ring_train TEXT --mesh 2x2 --groups 2 */
#define _DEFAULT_SOURCE 1
#define _POSIX_C_SOURCE 200809L
#define RINGATTN_IMPLEMENTATION
#if defined(RING_TRAIN_MPI)
#define RANKS_MPI
#endif
#include "ringattn.h"
#include "cores.h"
#include "ranks.h"
#include "train/export.h"
#include "train/mesh.h"
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
    "  --mesh DxR        D times R ranks: D groups, R ranks share each sequence of a group (1xP)\n"
    "  --groups G        of the sequences of a step, 1, 2, 4, 8 or 16, a multiple of D. Loss and\n"
    "                    weights have the same bits for every mesh with the same groups (1)\n"
    "  --shm             the ranks are processes that share memory, not threads\n"
    "  --at H:P,H:P,...  with --rank R: this process is rank R, and they meet over TCP\n"
    "  --survive         with --shm: if a rank dies, the others go on from the checkpoint\n"
    "  --layout NAME     zigzag or contiguous (zigzag; 16 ranks: contiguous)\n"
    "  --context N,M@S   tokens of a sequence, multiples of 1024; M from step S on (1024)\n"
    "  --tokens N        of a step, in sequences one after the other (8192)\n"
    "  --layers 5 --hidden 192 --heads 3 --kv-heads 1 --feed 480    the model\n"
    "  --untied          the output has a matrix of its own\n"
    "  --documents       documents (files) of a sequence do not see each other\n"
    "  --recompute       attention is computed again by the pass backward, not kept\n"
    "  --rate X, --warm-up N, --decay X, --clip X, --seed N    (0.002, 50, 0.1, 1, 1)\n"
    "  --cool N          the rate stays until it falls over the last N steps (0: a cosine)\n"
    "  --held PATH       text that is scored at the end; inside TEXT it is not learnt from\n"
    "                    (the last 20th of TEXT)\n"
    "  --without A,B     folders of these names are not read\n"
    "  --save N          steps from checkpoint to checkpoint (500); Ctrl-C writes one too\n"
    "  --resume          goes on from the checkpoint of PREFIX, on any number of ranks; contexts\n"
    "                    of steps to come may change, with --cool also --steps until it cools\n"
    "  --eval PATH       only scores PATH by the checkpoint of PREFIX; TEXT is not needed\n"
    "  --export FILE     writes the model as GGUF, --type f32, f16 or q8_0 (f16)\n"
    "Compiled with -DRING_TRAIN_MPI it runs under mpirun, one rank per process.\n";

enum { TRAIN_STAGES = 8, TRAIN_LOST = 3 };             /* exit status: another rank has died */

typedef struct curriculum { int64_t context, step; } curriculum;

typedef struct train {                 /* a run, as this process sees it */
    net_shape shape;
    optimiser o;
    curriculum stage[TRAIN_STAGES];
    int64_t stages, tokens, steps, save, seed, ranks, D, R, groups, layout, recompute,
            documents;
    int32_t type;
    const char *path, *out, *held_path, *eval, *export, *at;
    int kind, resume, eval_only, quiet, survive;       /* kind: RANKS_* */
    int64_t rank;                      /* of this process; -1: ranks are not processes */
    train_text text, held;             /* text.size: of what is learnt from */
    uint64_t text_hash;
    ra_world *world[MESH_GROUPS];      /* of each group; ranks that are threads */

    pthread_mutex_t lock;              /* of the two below */
    int failed, lost;                  /* lost: because a rank has ended */
    char why[TRAIN_WHY];

    /* Of rank 0, if it is in this process. */
    float *bits;                       /* [steps] bits per byte, of this sitting */
    int64_t first;                     /* step at which this sitting began */
    FILE *csv;
    int64_t began_ns, shown_ns;
    size_t rank_bytes;
    double work;                       /* FLOP of this sitting */
    double peak;                       /* FLOP/s of products on one rank alone */
    double loss, held_bits;            /* loss: of the last step, per token */
    int64_t held_tokens;
} train;

typedef struct worker {                /* a rank */
    train *t;
    mesh m;
    net n;
    seat s;
    checkpoint c;                      /* c.step: steps done */
    double loss[RANKS_MOST][MESH_GROUPS * TRAIN_LANES];    /* of a step, or of the scored text */
    double norm, *squares;             /* of the gradient, and of each of its chunks */
    float *leaf, *grad;                /* see mesh_reduce */
    int32_t stop[RANKS_MOST];          /* train_stop of each rank */
} worker;

static volatile sig_atomic_t train_stop;
static volatile pid_t train_process[RANKS_MOST];

/* The first failure is the one that is told. */
static void train_fail(train *t, const char *why) {
    pthread_mutex_lock(&t->lock);
    if (!t->failed) snprintf(t->why, sizeof t->why, "%.*s", TRAIN_WHY - 1, why);
    t->failed = 1;
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

static double train_flops(const worker *w, int64_t context) {      /* of a token, both passes */
    const net_shape *s = &w->n.s;
    return 6.0 * (double)w->n.size +
           7.0 * (double)context * (double)(s->layers * s->heads * s->dim);
}

/* More than the processor can do means that something was not computed. */
static int train_is_possible(train *t, double flops) {
    const double cores = cores_here() < t->ranks ? cores_here() : (double)t->ranks;
    if (t->kind == RANKS_TCP || t->kind == RANKS_MPIRUN || t->peak <= 0) return 1;
    if (flops > t->peak * cores) t->peak = fmax(t->peak, train_peak());
    return flops <= 1.1 * t->peak * cores;
}

/* Rank 0: the step that has just been done. 0: it was too fast to be true. */
static int train_account(worker *w) {
    train *t = w->t;
    const int64_t step = w->c.step, context = train_context(t, step);
    const int64_t tokens = train_sequences(t, step) * context, now = ra_now_ns();
    const double bits = t->loss / log(2.0), seconds = (double)(now - t->began_ns) * 1e-9;
    const double pace = seconds / (double)(step - t->first + 1);
    t->work += (double)tokens * train_flops(w, context);
    const double flops = t->work / seconds;
    t->bits[step] = (float)bits;
    if (t->csv)
        fprintf(t->csv, "%lld,%lld,%.9g,%.6f,%.6g,%.6g,%.2f\n", (long long)step + 1,
                (long long)context, t->loss, bits, w->norm, train_rate(&t->o, step), seconds);
    if (t->quiet || (now - t->shown_ns < 500000000 && step + 1 < t->steps)) return 1;
    t->shown_ns = now;
    fprintf(stderr, "\rstep %lld of %lld  context %lld  loss %.4f  %.3f bits per byte  "
            "%.0f tokens/s  %.1f GFLOP/s, %.0f %% of peak  %.1f MiB per rank  %.0f s left   ",
            (long long)step + 1, (long long)t->steps, (long long)context, t->loss, bits,
            (double)tokens / pace, flops * 1e-9, flops * 100 / (t->peak * (double)t->ranks),
            (double)t->rank_bytes / 1048576, pace * (double)(t->steps - step - 1));
    return train_is_possible(t, flops);
}

/* Hashes all that gives a run its bits up to a step. Ranks are not among it; the layout is. */
static uint64_t train_configuration(const train *t, int64_t step) {
    const net_shape *s = &t->shape;
    const int64_t list[] = { 3, s->layers, s->heads, s->kv_heads, s->hidden, s->feed, s->tied,
                             t->tokens, t->seed, t->layout };
    const int free_end = t->o.cool > 0 && (double)step <= t->o.steps - t->o.cool;
    const double rates[] = { t->o.rate, t->o.warm_up, t->o.decay, t->o.clip,
                             free_end ? 0 : t->o.cool, free_end ? 0 : t->o.steps };
    uint64_t h = train_hash(0xcbf29ce484222325u, list, sizeof list);
    h = train_hash(h, rates, sizeof rates);
    for (int64_t i = 0; i < t->stages && (i == 0 || t->stage[i].step < step); i++)
        h = train_hash(h, &t->stage[i], sizeof t->stage[i]);
    if (t->documents) h = train_hash(h, &t->documents, sizeof t->documents);
    return t->groups > 1 ? train_hash(h, &t->groups, sizeof t->groups) : h;
}

/* -------------------------------------------------------------------------- failures */
/* Tells why this rank stops, and stops the others. */
static ra_status train_rank_failed(worker *w, const char *text, ra_status status) {
    char why[TRAIN_WHY];
    train *t = w->t;
    const ranks_net *nets[] = { &w->m.all, &w->m.part };
    char who[64] = "";
    if (t->ranks > 1 && t->D > 1)
        snprintf(who, sizeof who, "rank %d (%d of group %d): ", w->m.rank, w->m.place, w->m.group);
    else if (t->ranks > 1) snprintf(who, sizeof who, "rank %d: ", w->m.rank);
    snprintf(why, sizeof why, "step %lld: %s%.400s", (long long)w->c.step + 1, who, text);
    if (status != RA_E_ABORTED) train_fail(t, why);
    if (status == RA_E_PEER || status == RA_E_ABORTED) t->lost = 1;
    for (int i = 0; i < 2; i++)
        if (nets[i]->wire && nets[i]->wire->abort)
            (void)nets[i]->wire->abort(nets[i]->wire->ctx, status);
    return status;
}

/* After a pass or the making of its ring. */
static ra_status train_ring_failed(worker *w, const ra_error *e, ra_status status) {
    char text[TRAIN_WHY];
    snprintf(text, sizeof text, "%s: %.400s", ra_status_text(status),
             w->s.ring ? ra_ring_explain(w->s.ring) : e->text);
    return train_rank_failed(w, text, status);
}

/* After messages between all ranks. */
static ra_status train_heard(worker *w, ra_status status) {
    return status ? train_rank_failed(w, w->m.why, status) : status;
}

/* -------------------------------------------------------------------------- between two steps */
/* The state of all ranks, in the memory of rank 0 while it is written or read. */
static ra_status train_state(worker *w, int load, char *why) {
    const int64_t chunks = net_chunks(&w->n);
    const size_t each = TRAIN_CHUNK * sizeof(float), bytes = (size_t)w->n.size * sizeof(float);
    net full = w->n;
    ra_status s = RA_OK;
    if (w->m.rank == 0 && w->m.ranks > 1) {
        full.m = (float *)calloc(1, bytes);
        full.v = (float *)calloc(1, bytes);
        if (!full.m || !full.v) s = RA_E_NOMEM;
    }
    if (s) snprintf(why, TRAIN_WHY, "no memory");
    if (!s && load && w->m.rank == 0 && checkpoint_load(w->t->out, &full, &w->c, why) != 1)
        s = RA_E_IO;
    if (!s && load) s = mesh_tell(&w->m, w->n.w, bytes);
    for (int i = 0; i < 2 && !s && w->m.ranks > 1; i++)
        s = mesh_first(&w->m, i ? full.v : full.m, i ? w->n.v : w->n.m, chunks, each, bytes, load);
    if (!s && !load && w->m.rank == 0 && !checkpoint_save(w->t->out, &full, &w->c, why))
        s = RA_E_IO;
    if (full.m != w->n.m) free(full.m);
    if (full.v != w->n.v) free(full.v);
    return s;
}

enum { TRAIN_SAVES = 1, TRAIN_IS_OVER = 2, TRAIN_STOPS = 4 };

/* Rank 0 says what comes, and any may have got a signal; all save if it is time. */
static ra_status train_between(worker *w, int32_t *next) {
    train *t = w->t;
    char why[TRAIN_WHY] = "";
    int stop = 0;
    *next = 0;
    w->stop[w->m.rank] = train_stop;
    ra_status s = train_heard(w, mesh_show(&w->m, w->stop, sizeof *w->stop));
    if (s) return s;
    for (int q = 0; q < w->m.ranks; q++) stop |= w->stop[q];
    if (w->m.rank == 0) {
        if (stop && w->c.step < t->steps) *next |= TRAIN_STOPS;
        if (w->c.step >= t->steps || *next) *next |= TRAIN_IS_OVER;
        if (!t->eval_only && (*next || w->c.step % t->save == 0) && w->c.step > t->first)
            *next |= TRAIN_SAVES;
        w->c.configuration = train_configuration(t, w->c.step);
    }
    s = train_heard(w, mesh_tell(&w->m, next, sizeof *next));
    if (s || !(*next & TRAIN_SAVES)) return s;
    if (w->m.rank == 0 && t->csv && fflush(t->csv)) {
        snprintf(why, sizeof why, "%.400s.csv: %s", t->out, strerror(errno));
        return train_rank_failed(w, why, RA_E_IO);
    }
    s = train_state(w, 0, why);
    return s ? train_rank_failed(w, why[0] ? why : w->m.why, s) : s;
}

/* The seat for sequences of `context` tokens; the one before is given up. */
static ra_status train_sit(worker *w, int64_t context) {
    seat *s = &w->s;
    ra_error error;
    ra_desc d;
    memset(&error, 0, sizeof error);
    memset(&d, 0, sizeof d);
    if (s->plan && s->context == context) return RA_OK;
    seat_close(s);
    d.ranks = w->m.R;
    d.rank = w->m.place;
    d.layout.kind = (int32_t)w->t->layout;
    d.error = &error;
    s->n = &w->n;
    s->kept = w->t->recompute ? 1 : w->n.s.layers;
    ra_status status = seat_open(s, w->m.ring, &d, context);
    if (!status && w->t->documents) {
        s->doc_first = (int64_t *)malloc((size_t)context * sizeof *s->doc_first);
        if (!s->doc_first) status = RA_E_NOMEM;
    }
    if (w->m.rank == 0)
        w->t->rank_bytes = s->bytes + ((size_t)w->n.size * (size_t)(2 + TRAIN_LANES / w->m.R +
                           mesh_leaves(&w->m)) + (size_t)w->n.owned * 3) * sizeof(float);
    return status ? train_ring_failed(w, &error, status) : RA_OK;
}

/* The pieces of the text that a step reads follow from seed and step alone. */
static sequence train_sequence(worker *w, int64_t step, int64_t i, int64_t context) {
    const train *t = w->t;
    const int64_t n = train_sequences(t, step);
    const uint64_t places = (uint64_t)t->text.size - (uint64_t)context;
    const uint64_t number = train_random((uint64_t)(step << 20 | i));
    const uint64_t place = train_random((uint64_t)t->seed ^ number) % places;
    const sequence q = { t->text.data + place,
                         w->loss[w->m.rank] + i % t->groups * TRAIN_LANES,
                         1 / (float)(n * context) };
    return q;
}

/* Adds up the lanes of this rank's group of sequences `i`, and clears them. */
static void train_fold(worker *w, int64_t i) {
    const int64_t lanes = TRAIN_LANES / w->m.R / w->m.pieces, size = w->n.size;
    for (int64_t p = 0; p < w->m.pieces; p++) {
        float *lane = w->n.lane + p * lanes * size;
        train_tree_of(lane, lanes, size);
        memcpy(w->leaf + (i * w->m.pieces + p) * size, lane, (size_t)size * sizeof *lane);
    }
    memset(w->n.lane, 0, (size_t)(size * TRAIN_LANES / w->m.R) * sizeof(float));
}

/* The loss of all lanes of all ranks. */
static ra_status train_losses(worker *w, double *sum) {
    const int n = (int)w->m.groups * TRAIN_LANES;
    double *own = w->loss[w->m.rank];
    const ra_status s = train_heard(w, mesh_show(&w->m, w->loss, sizeof w->loss[0]));
    for (int q = 0; q < w->m.ranks; q++)
        for (int i = 0; i < n && q != w->m.rank; i++) own[i] += w->loss[q][i];
    *sum = train_tree(own, n);
    memset(w->loss, 0, sizeof w->loss);
    return s;
}

/* Scores the held-out text in pieces of the last context. */
static ra_status train_score(worker *w) {
    train *t = w->t;
    const int64_t context = train_context(t, t->steps), own = w->m.groups / w->m.D;
    ra_status s = train_sit(w, context);
    int64_t i = 0;
    double sum = 0;
    for (; !s && (i + 1) * context < (int64_t)t->held.size; i++) {
        const sequence q = { t->held.data + i * context,
                             w->loss[w->m.rank] + i % w->m.groups * TRAIN_LANES, 0 };
        if (i % w->m.groups / own != w->m.group) continue;
        s = seat_pass(&w->s, &q);
        if (s) (void)train_ring_failed(w, NULL, s);
    }
    if (!s) s = train_losses(w, &sum);
    if (s || w->m.rank) return s;
    t->held_tokens = i * context;
    t->held_bits = i ? sum / (double)t->held_tokens / log(2.0) : 0;
    return RA_OK;
}

/* -------------------------------------------------------------------------- the training loop */
/* Loss and gradients of the sequences of a step, as leaves. */
static ra_status train_passes(worker *w, int64_t step, int64_t context) {
    const int64_t own = w->m.groups / w->m.D;
    ra_status s = train_sit(w, context);
    for (int64_t g = 0; g < own && !s; g++) {
        for (int64_t i = w->m.group * own + g; i < train_sequences(w->t, step) && !s;
             i += w->m.groups) {
            const sequence q = train_sequence(w, step, i, context);
            s = seat_pass(&w->s, &q);
            if (s) (void)train_ring_failed(w, NULL, s);
        }
        train_fold(w, g);
    }
    return s;
}

static ra_status train_step(worker *w) {
    const int64_t step = w->c.step, context = train_context(w->t, step);
    const int64_t chunks = net_chunks(&w->n);
    net *n = &w->n;
    double loss, sum = 0;
    ra_status s = train_passes(w, step, context);
    if (!s) s = train_heard(w, mesh_reduce(&w->m, n, w->leaf, w->grad));
    if (!s) s = train_losses(w, &loss);
    if (s) return s;
    train_squares(n, w->grad, w->squares);
    s = mesh_spread(&w->m, w->squares, chunks, sizeof(double), (size_t)chunks * sizeof(double));
    if (train_heard(w, s)) return s;
    for (int64_t c = 0; c < chunks; c++) sum += w->squares[c];
    w->norm = sqrt(sum);
    if (!isfinite(w->norm))                            /* on all ranks: the weights stay good */
        return train_rank_failed(w, "the gradient is infinite or NaN; a lower --rate may help",
                                 RA_E_RANGE);
    train_update(n, w->grad, &w->t->o, step, w->norm);
    s = mesh_spread(&w->m, n->w, chunks, TRAIN_CHUNK * sizeof(float),
                    (size_t)n->size * sizeof(float));
    if (train_heard(w, s)) return s;
    net_turn(n);
    if (w->m.rank == 0) {
        w->t->loss = loss / (double)(train_sequences(w->t, step) * context);
        if (!train_account(w))
            return train_rank_failed(w, "more FLOP/s than this processor can do: not all was "
                                     "computed", RA_E_STATE);
    }
    w->c.step++;
    return RA_OK;
}

static ra_status train_loop(worker *w) {
    int32_t next = 0;
    ra_status s = train_between(w, &next);
    while (!s && !(next & TRAIN_IS_OVER)) {
        s = train_step(w);
        if (!s) s = train_between(w, &next);
    }
    return s || next & TRAIN_STOPS ? s : train_score(w);
}

/* -------------------------------------------------------------------------- a rank's life */
/* Opens PREFIX.csv, which no other process may have open, for the rows after those of the steps
 * that are done: what a killed run wrote beyond its checkpoint goes. */
static int train_open_rows(train *t, int64_t done, char *why) {
    char path[TRAIN_PATH], row[256];
    long long step = 0;
    long end = 0;
    snprintf(path, sizeof path, "%s.csv", t->out);
    t->csv = fopen(path, "a+");
    if (t->csv && flock(fileno(t->csv), LOCK_EX | LOCK_NB) && errno == EWOULDBLOCK)
        return train_refuse(why, "%s: another process trains with this --out", path);
    if (t->csv) rewind(t->csv);
    while (t->csv && t->resume && fgets(row, sizeof row, t->csv) && strchr(row, '\n') &&
           (sscanf(row, "%lld,", &step) != 1 || step <= done))
        end = ftell(t->csv);
    if (!t->csv || fseek(t->csv, end, SEEK_SET) || ftruncate(fileno(t->csv), end))
        return train_refuse(why, "%s: %s", path, strerror(errno));
    if (!end) fprintf(t->csv, "step,context,loss,bits_per_byte,norm,rate,seconds\n");
    return 1;
}

/* All that a rank needs, and the proof that all ranks do the same. */
static ra_status train_join(worker *w, char *why) {
    static const char *const names[] = { "its options", "its text", "the text that is held out",
                                         "the mesh" };
    train *t = w->t;
    mesh *m = &w->m;
    const uint64_t x[] = { train_configuration(t, t->steps) + (uint64_t)t->resume * 2 +
                           (uint64_t)t->eval_only, t->text_hash,
                           train_hash(0, t->held.data, t->held.size),
                           (uint64_t)(t->D << 32 | t->save) };
    m->groups = t->groups;
    m->pieces = m->R > 1 && t->layout == RA_LAYOUT_ZIGZAG ? 2 : 1;
    const ra_status s = mesh_agree(m, x, names, 4, why);
    if (s) return s;
    if (!net_open(&w->n, &t->shape, m->rank, m->ranks, TRAIN_LANES / m->R)) return RA_E_NOMEM;
    const int64_t leaves = m->groups * m->R * m->pieces;
    w->squares = (double *)calloc((size_t)net_chunks(&w->n), sizeof *w->squares);
    w->leaf = (float *)calloc((size_t)(mesh_leaves(m) * w->n.size), sizeof *w->leaf);
    w->grad = (float *)calloc((size_t)(leaves * w->n.owned) + 1, sizeof *w->grad);
    return w->squares && w->leaf && w->grad ? RA_OK : RA_E_NOMEM;
}

/* The weights: new ones, or those of the checkpoint. Rank 0 has the files. */
static ra_status train_begin(worker *w, char *why) {
    train *t = w->t;
    manifest m;
    ra_status s = RA_OK;
    w->c.text = t->text_hash;
    w->c.shape = t->shape;
    if (w->m.rank == 0) {
        const int found = manifest_read(t->out, &m, why);
        t->bits = (float *)calloc((size_t)t->steps + 1, sizeof *t->bits);
        if (!t->bits) return RA_E_NOMEM;
        if (!found) return RA_E_IO;
        if (found < 0 && (t->resume || t->eval_only))
            snprintf(why, TRAIN_WHY, "%.400s.manifest: there is no checkpoint", t->out);
        if (found > 0 && !t->resume && !t->eval_only)
            snprintf(why, TRAIN_WHY, "%.400s.manifest: there is a checkpoint already: take "
                     "--resume or another --out", t->out);
        if (why[0]) return RA_E_STATE;
        if (t->resume) w->c.configuration = train_configuration(t, m.c.step);
    }
    if (t->resume || t->eval_only) s = train_state(w, 1, why);
    else net_initialise(&w->n, (uint64_t)t->seed);
    if (!s && !t->resume && !t->eval_only)
        s = mesh_tell(&w->m, w->n.w, (size_t)w->n.size * sizeof(float));
    if (!s) s = mesh_tell(&w->m, &w->c.step, sizeof w->c.step);
    if (s) return s;
    net_turn(&w->n);
    if (w->m.rank) return RA_OK;
    t->first = w->c.step;
    return t->eval_only || train_open_rows(t, w->c.step, why) ? RA_OK : RA_E_IO;
}

static void train_say_begin(const train *t, const worker *w) {
    fprintf(stderr, "%lld weights, %lld x %lld ranks, %llu bytes of %llu files to learn from, %llu "
            "files left out, %llu bytes held out; step %lld\n", (long long)w->n.size,
            (long long)t->D, (long long)t->R, (unsigned long long)t->text.size,
            (unsigned long long)t->text.files, (unsigned long long)t->text.left_out,
            (unsigned long long)t->held.size, (long long)w->c.step);
}

static void train_say_held(const train *t) {
    static const char *const packers[] = { "gzip -9", "xz -9e" };
    char path[TRAIN_PATH];
    if (!t->held_tokens || t->quiet) return;
    printf("held-out text: %lld of %llu bytes scored, %.4f bits per byte",
           (long long)t->held_tokens, (unsigned long long)t->held.size, t->held_bits);
    snprintf(path, sizeof path, "%s.held", t->out);
    const int fd = open(path, O_WRONLY | O_CREAT | O_EXCL, 0666);      /* may be a user's */
    FILE *f = fd < 0 ? NULL : fdopen(fd, "wb");
    int ok = f && fwrite(t->held.data, 1, t->held.size, f) == t->held.size;
    if (f) ok = fclose(f) == 0 && ok;
    for (size_t i = 0; i < sizeof packers / sizeof *packers && ok; i++) {
        const int64_t bytes = report_packed(packers[i], path);
        if (bytes > 0) printf("; %s %.4f", packers[i], (double)bytes * 8 / (double)t->held.size);
    }
    printf("\n");
    fflush(stdout);
    if (fd >= 0) (void)remove(path);
}

/* What rank 0 leaves behind. */
static int train_finish(worker *w, char *why) {
    train *t = w->t;
    char path[TRAIN_PATH];
    if (!t->quiet) fprintf(stderr, "\n");
    snprintf(path, sizeof path, "%s.svg", t->out);
    if (w->c.step > t->first &&
        !report_svg(path, t->bits + t->first, t->first, w->c.step - t->first))
        return train_refuse(why, "%s: %s", path, strerror(errno));
    train_say_held(t);
    if (w->c.step < t->steps && !t->quiet)
        fprintf(stderr, "stopped at step %lld; --resume goes on\n", (long long)w->c.step);
    return !t->export || export_gguf(t->export, &w->n, train_context(t, t->steps), t->type, why);
}

/* One rank from beginning to end. */
static ra_status train_rank(train *t, ranks_desc *d) {
    char why[TRAIN_WHY] = "";
    worker *w = (worker *)calloc(1, sizeof *w);
    ra_status s = RA_E_NOMEM;
    if (!w) return s;
    w->t = t;
    s = mesh_open(&w->m, d, (int32_t)t->D, t->world[d->rank / (d->ranks / t->D)], why);
    if (!s) s = train_join(w, why);
    if (!s) s = train_begin(w, why);
    if (s) (void)train_rank_failed(w, why[0] ? why : w->m.why[0] ? w->m.why : ra_status_text(s), s);
    if (!s && d->rank == 0) {
        if (!t->quiet) train_say_begin(t, w);
        t->peak = t->quiet ? 0 : train_peak();
        t->began_ns = ra_now_ns();
    }
    if (!s) s = train_loop(w);
    if (!s && d->rank == 0 && !train_finish(w, why)) {
        train_fail(t, why);
        s = RA_E_IO;
    }
    seat_close(&w->s);
    const ra_status closed = mesh_close(&w->m);
    net_close(&w->n);
    free(w->squares); free(w->leaf); free(w->grad);
    free(w);
    return s ? s : closed;
}

/* -------------------------------------------------------------------------- all ranks */
static ra_status train_on_thread(ra_world *world, int rank, void *user) {
    train *t = (train *)user;
    ranks_desc d;
    memset(&d, 0, sizeof d);
    d.kind = RANKS_THREADS;
    d.rank = rank;
    d.ranks = (int32_t)t->ranks;
    d.world = world;
    const ra_status s = train_rank(t, &d);
    if (t->D > 1) ra_world_leave(t->world[rank / t->R], (int)(rank % t->R), s);
    return s;
}

static ra_status train_on_threads(train *t) {
    ra_world_desc d;
    ra_status s = RA_OK;
    memset(&d, 0, sizeof d);
    d.ranks = (int32_t)t->R;
    for (int64_t i = 0; i < t->D && t->D > 1 && !s; i++) s = ra_world_create(&t->world[i], &d);
    if (!s) s = ra_world_run((int)t->ranks, train_on_thread, t, NULL);
    for (int64_t i = 0; i < t->D; i++) {
        ra_world_destroy(t->world[i]);
        t->world[i] = NULL;
    }
    return s;
}

/* This process is one of the ranks. */
static ra_status train_on_process(train *t, int32_t rank, const char *name) {
    ranks_desc d;
    memset(&d, 0, sizeof d);
    d.kind = t->kind;
    d.rank = rank;
    d.ranks = (int32_t)t->ranks;
    d.name = name;
    d.at = t->at;
    d.message = MESH_PIECE;
    for (int64_t i = 0; i < t->stages && t->kind == RANKS_SHM; i++) {
        const size_t bytes = seat_message_bytes(&t->shape, t->R, t->layout, t->stage[i].context);
        if (bytes > d.message) d.message = bytes;
    }
    return train_rank(t, &d);
}

typedef struct train_family { train *t; char name[40]; } train_family;

static int train_child(void *user, int32_t rank) {
    train_family *f = (train_family *)user;
    const ra_status s = train_on_process(f->t, rank, f->name);
    if (f->t->why[0]) fprintf(stderr, "ring_train: %s\n", f->t->why);
    return !s ? 0 : f->t->lost ? TRAIN_LOST : 1;
}

/* The ranks that are left become a mesh that the groups allow. */
static void train_shrink(train *t, int64_t left) {
    while (t->ranks > left) t->ranks /= 2;
    if (t->D > t->ranks) t->D = t->ranks;
    t->R = t->ranks / t->D;
}

/* Processes that share memory. With --survive those that are left go on. 0: see why. */
static int train_on_processes(train *t, char *why) {
    train_family f = { t, "" };
    int status[RANKS_MOST], died, failed;
    for (int sitting = 0;; sitting++) {
        manifest m;
        snprintf(f.name, sizeof f.name, "ring_train.%ld.%d", (long)getpid(), sitting);
        ranks_fork((int32_t)t->ranks, train_child, &f, train_process, status);
        died = failed = 0;
        for (int i = 0; i < t->ranks; i++) {
            const int ended = status[i] != -1 && WIFSIGNALED(status[i]);
            if (ended) fprintf(stderr, "ring_train: rank %d was ended by signal %d\n", i,
                               WTERMSIG(status[i]));
            died += ended;
            failed += !ended && status[i] && (status[i] == -1 ||
                                              WEXITSTATUS(status[i]) != TRAIN_LOST);
        }
        int all = 1;
        for (int i = 0; i < t->ranks; i++) all = all && status[i] == 0;
        if (all) return 1;
        if (failed) return train_refuse(why, "a rank has failed");
        if (!t->survive || died == t->ranks || train_stop)
            return train_refuse(why, "%d of %lld ranks died; --resume goes on from the last "
                                "checkpoint, with fewer ranks if need be", died,
                                (long long)t->ranks);
        train_shrink(t, t->ranks - died);
        t->resume = manifest_read(t->out, &m, why) >= 0;
        fprintf(stderr, "ring_train: %lld x %lld ranks go on from the last checkpoint\n",
                (long long)t->D, (long long)t->R);
    }
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

static int train_mesh(train *t, const char *s, char *why) {
    long long D = 0, R = 0;
    int length = 0;
    if (sscanf(s, "%lldx%lld%n", &D, &R, &length) != 2 || s[length] || D < 1 || R < 1 ||
        D > MESH_GROUPS || R > TRAIN_LANES)
        return train_refuse(why, "--mesh: '%.40s' is not DxR, groups times ranks of a group, such "
                            "as 2x2; both at most 16", s);
    t->D = D;
    t->R = R;
    return 1;
}

/* An option without a value: 1. Otherwise 0. */
static int train_flag(train *t, const char *name) {
    if (!strcmp(name, "--resume")) t->resume = 1;
    else if (!strcmp(name, "--untied")) t->shape.tied = 0;
    else if (!strcmp(name, "--recompute")) t->recompute = 1;
    else if (!strcmp(name, "--documents")) t->documents = 1;
    else if (!strcmp(name, "--quiet")) t->quiet = 1;
    else if (!strcmp(name, "--shm")) t->kind = RANKS_SHM;
    else if (!strcmp(name, "--survive")) t->survive = 1;
    else return 0;
    return 1;
}

static int train_option(train *t, const char *name, const char *s, char *why) {
    const struct { const char *name, **to; } texts[] = {
        { "--out", &t->out }, { "--held", &t->held_path }, { "--eval", &t->eval },
        { "--export", &t->export }, { "--without", &t->text.without }, { "--at", &t->at } };
    const struct { const char *name; int64_t *to, least, most; } numbers[] = {
        { "--steps", &t->steps, 1, TRAIN_STEPS }, { "--tokens", &t->tokens, 1024, 1 << 30 },
        { "--layers", &t->shape.layers, 1, 1024 }, { "--hidden", &t->shape.hidden, 16, 65536 },
        { "--heads", &t->shape.heads, 1, 1024 }, { "--kv-heads", &t->shape.kv_heads, 1, 1024 },
        { "--feed", &t->shape.feed, 16, 1 << 20 }, { "--seed", &t->seed, 0, INT64_MAX },
        { "--save", &t->save, 1, 100000000 }, { "--ranks", &t->ranks, 1, TRAIN_LANES },
        { "--rank", &t->rank, 0, RANKS_MOST - 1 }, { "--groups", &t->groups, 1, MESH_GROUPS } };
    const struct { const char *name; double *to, most; } fractions[] = {
        { "--rate", &t->o.rate, 1 }, { "--warm-up", &t->o.warm_up, 1e8 },
        { "--cool", &t->o.cool, 1e8 },
        { "--decay", &t->o.decay, 10 }, { "--clip", &t->o.clip, 1e30 } };
    if (!strcmp(name, "--bf16")) return train_refuse(why, "--bf16: arithmetic is f32");
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
    if (!strcmp(name, "--mesh")) return train_mesh(t, s ? s : "", why);
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
    return 1;
}

/* How many addresses a list has. */
static int64_t train_listed(const char *at) {
    int64_t n = 1;
    for (; *at; at++) n += *at == ',';
    return n;
}

/* How the ranks are arranged, and how they meet. mpi: ranks that mpirun says, or 0. */
static int train_mesh_fits(train *t, int64_t mpi, char *why) {
    const char *said = t->at ? "--at" : "mpirun";
    const int64_t told = mpi ? mpi : t->at ? train_listed(t->at) : 0;
    if ((t->at != NULL) + (t->kind == RANKS_SHM) + (mpi > 0) > 1)
        return train_refuse(why, "--at, --shm or mpirun, one of them");
    if (!mpi && !t->at != (t->rank < 0)) return train_refuse(why, "--at and --rank go together");
    if (t->survive && t->kind != RANKS_SHM)
        return train_refuse(why, "--survive: only with --shm; elsewhere --resume goes on, with the "
                            "ranks that are left");
    if (t->at) t->kind = RANKS_TCP;
    if (mpi) t->kind = RANKS_MPIRUN;
    if (!t->D) t->D = 1;
    if (!t->R) t->R = told ? told / t->D : t->ranks;
    if (told && told != t->D * t->R)
        return train_refuse(why, "--mesh: %lld x %lld ranks, but %s has %lld", (long long)t->D,
                            (long long)t->R, said, (long long)told);
    t->ranks = t->D * t->R;
    if (t->R & (t->R - 1) || t->R > TRAIN_LANES)
        return train_refuse(why, "--ranks: %lld is none of 1, 2, 4, 8 and 16, which divide the 16 "
                            "lanes of a sequence", (long long)t->R);
    if (t->groups & (t->groups - 1) || t->groups % t->D)
        return train_refuse(why, "--groups: %lld is none of 1, 2, 4, 8 and 16 that %lld groups of "
                            "ranks divide", (long long)t->groups, (long long)t->D);
    if (t->ranks > RANKS_MOST)
        return train_refuse(why, "--mesh: %lld ranks; 64 are possible", (long long)t->ranks);
    if (t->at && (strlen(t->at) >= RANKS_LIST || t->rank >= t->ranks))
        return train_refuse(why, "--rank: %lld is not in 0..%lld, or the list of --at is too long",
                            (long long)t->rank, (long long)t->ranks - 1);
    if (t->R == TRAIN_LANES && !t->layout) t->layout = RA_LAYOUT_CONTIGUOUS;
    if (!t->layout) t->layout = RA_LAYOUT_ZIGZAG;
    if (t->R == TRAIN_LANES && t->layout == RA_LAYOUT_ZIGZAG)
        return train_refuse(why, "--ranks: 16 ranks need --layout contiguous: a zigzag rank holds "
                            "two lanes at least");
    for (int64_t i = 0; i < t->stages && t->D > 1; i++)
        if (t->tokens / t->stage[i].context < t->D)
            return train_refuse(why, "--tokens: %lld are fewer than one sequence of %lld for each "
                                "of %lld groups", (long long)t->tokens,
                                (long long)t->stage[i].context, (long long)t->D);
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
    t->groups = 1;
    t->rank = -1;
    pthread_mutex_init(&t->lock, NULL);
}

/* mpi, rank: what mpirun says, or 0 and -1. */
static int train_arguments(train *t, int argc, char **argv, int mpi, int rank, char *why) {
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
    if (mpi) t->rank = rank;
    t->eval_only = t->eval != NULL;
    t->o.steps = (double)t->steps;
    if (!t->path && !t->eval_only) return train_refuse(why, "a text to learn from is missing");
    return train_shape_fits(t, why) && train_mesh_fits(t, mpi, why);
}

/* -------------------------------------------------------------------------- one run */
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
    t->text_hash = t->eval_only ? 0
                 : train_hash(0xcbf29ce484222325u, t->text.data, t->text.size);
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

static void train_close(train *t) {
    if (t->csv) fclose(t->csv);
    free(t->bits); free(t->text.data); free(t->held.data);
    pthread_mutex_destroy(&t->lock);
}

/* Everything after the arguments. 0: see why. */
static int train_run(train *t, char *why) {
    if (t->eval_only && !train_shape_found(t, why)) return 0;
    if (!train_read_texts(t, why)) return 0;
    if (t->kind == RANKS_SHM && t->ranks > 1) return train_on_processes(t, why);
    const ra_status s = t->kind == RANKS_TCP || t->kind == RANKS_MPIRUN
        ? train_on_process(t, (int32_t)t->rank, NULL) : train_on_threads(t);
    if (s || t->failed)
        return train_refuse(why, "%s", t->failed ? t->why : ra_status_text(s));
    return 1;
}

#if !defined(RING_TRAIN_NO_MAIN)
static void train_on_signal(int sign) {
    train_stop = 1;
    if (train_process[0] > 0) (void)kill(train_process[0], sign);
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
#if defined(RING_TRAIN_MPI)
    int level = 0, rank = 0, ranks = 0;
    MPI_Init_thread(&argc, &argv, MPI_THREAD_SERIALIZED, &level);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    ok = train_arguments(&t, argc, argv, ranks, rank, why) && train_run(&t, why);
#else
    ok = train_arguments(&t, argc, argv, 0, -1, why) && train_run(&t, why);
#endif
    if (!ok && why[0]) fprintf(stderr, "ring_train: %s\n", why);
    const int code = ok ? 0 : t.lost ? TRAIN_LOST : 1;
    train_close(&t);
#if defined(RING_TRAIN_MPI)
    if (code) MPI_Abort(MPI_COMM_WORLD, code);
    MPI_Finalize();
#endif
    return code;
}
#endif
