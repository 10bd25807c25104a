/* Runs a model on P ranks that share its mapped weights. The cache of keys and values is split
 * among the ranks by position. A rank computes all products of the tokens whose positions it owns,
 * so ranks need one another only in ra_infer and infer_share. In decoding one rank multiplies, and
 * all attend over their part of the cache. If ranks are processes and the weights are large, each
 * multiplies a part of the rows of every matrix, and all get the results: with the same bits.
 *
 *   infer_run          ranks as threads: prefill in chunks, then token after token; then perhaps
 *                      another turn, of which only what is new is computed
 *   infer_run_rank     one rank of processes that a transport connects
 *   infer_message_bytes   the longest message that such a transport must carry
 *   infer_forward      one call of the model for new tokens of the sequence, on one rank
 *   infer_share        tells all ranks which tokens follow
 *   infer_restore, infer_save   the cache in files of any number of ranks, see cache_file.h
 *
 * All ranks run the same program on the same tokens, so nothing else is sent. */
#if !defined(INFER_ENGINE_H)
#define INFER_ENGINE_H

#include "cache_file.h"
#include "experts.h"

#include <sched.h>
#include <signal.h>

enum { INFER_RANKS = 64, INFER_LANES = 16, INFER_STOPS = 64, INFER_HEAD_ROWS = 16,
       INFER_TURNS = 8192 };
enum { INFER_SAVE_TOKENS = 4096,       /* of a prompt, after which the cache is saved */
       INFER_SHORT = 16 };             /* a call of more tokens attends in the form of prefill */
enum { INFER_TO_PREDICT, INFER_STOPPED, INFER_FULL, INFER_HALTED };    /* how a text ends */
enum { INFER_PROMPT, INFER_DECODE, INFER_CACHES };

typedef struct infer_options {         /* 0: the default */
    int32_t ranks;                     /* 1 to lanes; 0: 1 */
    int32_t lanes;                     /* of the cache, up to 1024; 0: 16. The same bits for any
                                        * number of ranks need the same lanes */
    int32_t threads;                   /* of all ranks together, and at least one per rank */
    int64_t context;                   /* positions of the cache; 0: prompt and predict, and with
                                        * turns at least 8192 if the model was made for them */
    int64_t chunk;                     /* tokens of the prompt per call; 0: 16 per lane */
    int32_t cache_dtype;               /* RA_F32 (0), RA_F16, RA_BF16, RA_Q8_0, RA_Q4_0 */
    int64_t predict;                   /* tokens to generate at most, in each turn */
    int32_t speculate;                 /* tokens that a call verifies; 0, 1: no guesses */
    int32_t split;                     /* of products in decoding among processes: 1, -1: never, 0:
                                        * if it saves time at 20 GB/s of weights and 0.1 ms per
                                        * message */
    int32_t integers;                  /* 1: decoding multiplies weights in q8_0 by integers, faster
                                        * and with logits off by up to 1e-3 */
    float temperature;                 /* 0: the likeliest token */
    int32_t top_k;                     /* 0: all */
    float top_p;                       /* 0: all */
    float min_p;                       /* least probability, relative to the likeliest token's */
    uint64_t seed;
    int32_t stop[INFER_STOPS], stops;  /* tokens that end the text */
    int32_t all_logits;                /* 1: keep those of every position; 2: from the last token of
                                        * the prompt on, and of the positions `wanted` before it */
    int32_t losses;                    /* 1: result->loss is wanted */
    const int64_t *wanted;             /* [wanted_count] ascending */
    int64_t wanted_count;
    const char *load, *save;           /* files of a cache, see cache_file.h; null: none. What is
                                        * saved of a beginning of the prompt is not computed */
    const volatile sig_atomic_t *halt; /* not 0 on any rank: the turn ends after the current call */
    void (*progress)(void *user, int64_t done, int64_t of);    /* of the prompt, from one thread;
                                        * first of what is loaded, which may be 0 */
    int (*token)(void *user, int32_t id);      /* below 0: it cannot be written, and the run ends */
    int (*ends)(void *user, const int32_t *tokens, int64_t from, int64_t count);   /* 1: the text,
                                        * tokens [from, count), ends; below 0: no memory. Every rank
                                        * asks, perhaps at the same time */
    uint64_t ends_by;                  /* a hash of what `ends` looks for: the same on all ranks */
    int32_t turns;                     /* 1: after a text, rank 0 asks for more */
    int64_t (*more)(void *user, const int32_t **tokens, int64_t room);     /* how many tokens
                                        * follow, at most `room`, and which; 0: none */
    void (*note)(void *user, const char *text);        /* why files of a cache cannot be used; one
                                        * thread at a time */
    void *user;
} infer_options;

typedef struct infer_result {
    int32_t *tokens;                   /* the prompt and what follows; free with infer_free */
    int64_t count, prompt;             /* prompt: of the first turn */
    int64_t given, written;            /* tokens of prompts that are cached, and generated ones, in
                                        * all turns */
    int64_t steps;                     /* calls of the model after the prompts */
    int32_t ended;                     /* INFER_TO_PREDICT, ... */
    int64_t loaded, saved;             /* positions from files and in files; saved -1: not all of
                                        * them could be written */
    int64_t cached;                    /* positions whose logits are known */
    float *logits;                     /* [context][vocabulary] or null */
    double *loss;                      /* [prompt] minus the log of the probability of each token of
                                        * the prompt, 0 for the first; or null */
    int64_t cache_bytes;               /* on a rank */
    int64_t load_ns, prefill_ns, decode_ns;
    char why[INFER_WHY];
} infer_result;

typedef struct infer_engine {          /* shared by the ranks */
    const model *m;
    infer_options o;                   /* resolved */
    infer_result *result;
    int32_t reporter;                  /* the rank that calls back and writes the result */
    int32_t apart;                     /* 1: every rank is a process */
    int32_t attend_threads;            /* of a rank in a call of the cache */
    int32_t split;                     /* 1: decoding splits products */
    pool workers;
    pthread_mutex_t lock;              /* of result->why and note */
} infer_engine;

typedef struct infer_rank {
    infer_engine *e;
    int32_t rank;
    const ra_transport *net;           /* null: one rank */
    ra_cache *cache[2][INFER_CACHES];  /* of layers that see all and of those with a window: two
                                        * forms of calls over the same memory */
    ra_tensors t;
    uint8_t *memory;                   /* K and V of all layers */
    size_t k_bytes, row_bytes;         /* of K of a layer; of a row of K or V */
    float *floats;                     /* what follows is in it */
    float *x, *y, *q, *k, *v, *o, *gate, *up;  /* [chunk][...] */
    float *turn[2];                    /* [chunk][rope_dims / 2][2] cosine and sine, as
                                        * model.rope */
    float *scratch;                    /* of matmul_run */
    float *logits;                     /* [INFER_HEAD_ROWS][vocabulary] */
    float *scores, *shares, *pairs;    /* of experts: [chunk][experts], [chunk][used], and of all
                                        * tokens and their experts [chunk * used][hidden] */
    int32_t *chosen;                   /* [chunk][used] */
    int64_t *place, *start;            /* [chunk * used], [experts + 1] as in experts_sort */
    int64_t *own;                      /* [chunk] which of the new tokens are this rank's */
    int64_t owned, want;               /* how many; the first new token whose logits are needed */
    int64_t skipped;                   /* how many of this rank's tokens are before `want` */
    int64_t begun, from;               /* where this turn begins, and the text of it */
    int32_t *next, *heard;             /* [chunk + 1] the token after each new one, -1 if it is not
                                        * known yet, and after the last whether to halt */
    int32_t *least;                    /* [4] of infer_least */
    float *wire;                       /* [ranks][...] parts of products: this rank's, then those of
                                        * the ranks before it */
    struct infer_choice *choice;       /* [vocabulary] for sampling */
    int32_t *tokens;                   /* [context + 1] */
    int32_t some;                      /* which of the pairs of caches surely is there */
    int32_t decoding;                  /* which of the caches the calls go through */
    cache_shape shape;                 /* of files */
    int64_t saved;                     /* positions that are in the files of o->save */
    ra_transport_op *hop;              /* [2] of infer_hop: a receive, a send */
    int32_t unsafe;                    /* 1: the transport may still use hop, next, ..., wire */
} infer_rank;

typedef struct infer_choice { float logit; int32_t id; } infer_choice;

/* The rank that calls back and writes the result: the first, or the only one of this process. */
static inline int infer_reports(const infer_rank *r) { return r->rank == r->e->reporter; }

/* -------------------------------------------------------------------------- between ranks */
static inline ra_status infer_fail(infer_engine *e, ra_status s, const char *why) {
    pthread_mutex_lock(&e->lock);
    if (!e->result->why[0]) snprintf(e->result->why, INFER_WHY, "%s", why);
    pthread_mutex_unlock(&e->lock);
    return s;
}

/* Sends n tokens to one rank and receives n from another. */
static inline ra_status infer_hop(const ra_transport *net, ra_transport_op op[2], int to,
                                  const int32_t *out, int from, int32_t *in, size_t n) {
    ra_transport_op *ops[2];
    int s = RA_AGAIN;
    if (!net->post)
        return net->sendrecv(net->ctx, to, out, n * 4, from, in, n * 4, 0, INT64_MAX);
    memset(op, 0, 2 * sizeof *op);
    op[0].kind = RA_MSG_RECV;
    op[0].peer = from;
    op[0].buf = in;
    op[1].kind = RA_MSG_SEND;
    op[1].peer = to;
    op[1].buf = (void *)(uintptr_t)out;
    op[0].len = op[1].len = n * 4;
    ops[0] = &op[0];
    ops[1] = &op[1];
    for (int idle = 0; s >= 0; idle++) {
        if (op[0].state == RA_MSG_DONE && op[1].state == RA_MSG_DONE) return RA_OK;
        if (op[0].state == RA_MSG_IDLE || op[1].state == RA_MSG_IDLE)
            s = net->post(net->ctx, ops, 2);
        if (s >= 0) s = net->poll(net->ctx, ops, 2);
        for (int i = 0; i < 2 && s >= 0; i++)
            if (op[i].state < 0) s = op[i].state;
        if (idle > 200 && s >= 0 && net->wait)
            s = net->wait(net->ctx, ops, 2, ra_now_ns() + 2000000);
        else if (idle > 100) sched_yield();
        if (s == RA_E_TIMEOUT) s = RA_AGAIN;
    }
    return s;
}

/* What ranks must have in common. Model and prompt are hashes. */
enum { INFER_SHARED = 22 };
static inline int infer_shared(const infer_engine *e, int32_t *out, const char **names) {
    const infer_options *o = &e->o;
    const uint64_t weights = model_hash(e->m), start = 14695981039346656037u;
    const uint64_t prompt = infer_hash(start, e->result->tokens,
                                       (size_t)e->result->prompt * sizeof *e->result->tokens);
    const uint64_t wanted = infer_hash(start, o->wanted, (size_t)o->wanted_count * 8);
    const uint64_t stops = infer_hash(start, o->stop, (size_t)o->stops * sizeof *o->stop);
    const struct { const char *name; uint64_t x; } all[] = {
        { "the model", weights }, { "the model", weights >> 32 }, { "the prompt", prompt },
        { "the prompt", prompt >> 32 }, { "the length of the prompt", (uint64_t)e->result->prompt },
        { "the type of the cache", (uint64_t)o->cache_dtype },
        { "the context", (uint64_t)o->context },
        { "the chunk", (uint64_t)o->chunk }, { "the tokens to predict", (uint64_t)o->predict },
        { "the tokens per call", (uint64_t)o->speculate }, { "--integers", (uint64_t)o->integers },
        { "the lanes", (uint64_t)o->lanes },
        { "--load or --save", (uint64_t)(!!o->load + 2 * !!o->save +
          4 * !!o->halt) }, { "--interactive", (uint64_t)o->turns },
        { "--split", (uint64_t)o->split },
        { "the seed", o->seed }, { "the seed", o->seed >> 32 },
        { "the temperature", infer_hash(start, &o->temperature, 4) },
        { "top-k, top-p or min-p", infer_hash(start, &o->top_k, 4) ^
          infer_hash(start + 1, &o->top_p, 4) ^ infer_hash(start + 2, &o->min_p, 4) },
        { "the wanted logits", wanted ^ (uint64_t)o->all_logits }, { "the stop tokens", stops },
        { "the stop tokens", stops >> 32 }, { "the stop texts", o->ends_by ^ o->ends_by >> 32 } };
    for (int i = 0; i < INFER_SHARED; i++) {
        const uint32_t half = (uint32_t)all[i].x;
        memcpy(&out[i], &half, 4);
        names[i] = all[i].name;
    }
    return INFER_SHARED;
}

/* A hop has failed: stops the other ranks, and waits until the transport no longer uses its ops. */
static inline ra_status infer_hop_failed(infer_rank *r, ra_status s) {
    const ra_transport *net = r->net;
    if (net->abort) (void)net->abort(net->ctx, s);
    r->unsafe = net->post && (!net->quiesce || net->quiesce(net->ctx, ra_deadline_ms(1000)));
    return infer_fail(r->e, s, ra_status_text(s));
}

/* Every rank tells every other what it runs. If they differ, all refuse, and say what differs. */
static inline ra_status infer_agree(infer_rank *r) {
    const int32_t ranks = r->e->o.ranks;
    const char *names[INFER_SHARED];
    int32_t *mine = r->next, *theirs = mine + INFER_SHARED, *first = theirs + INFER_SHARED;
    char text[INFER_WHY] = "";
    ra_status s = RA_OK;
    const int n = infer_shared(r->e, mine, names);
    memcpy(first, mine, (size_t)n * sizeof *mine);
    for (int32_t far = 1; far < ranks && s == RA_OK; far++) {
        const int to = (r->rank + far) % ranks, from = (r->rank + ranks - far) % ranks;
        s = infer_hop(r->net, r->hop, to, mine, from, theirs, (size_t)n);
        for (int i = 0; i < n && s == RA_OK && !text[0]; i++)
            if (theirs[i] != first[i])
                snprintf(text, sizeof text, "rank %d differs from rank %ld in %s", from,
                         (long)r->rank, names[i]);
    }
    if (s != RA_OK) return infer_hop_failed(r, s);
    return text[0] ? infer_fail(r->e, RA_E_MISMATCH, text) : RA_OK;
}

/* Gives every rank the chosen tokens from `want` to `count`: each rank receives from the rank
 * before it what that one has, then from the one 2 before it, which by then has those of two ranks,
 * then 4, and so on. Whether any rank halts goes with them. */
static inline ra_status infer_share(infer_rank *r, int64_t want, int64_t count) {
    const infer_options *o = &r->e->o;
    const int32_t ranks = o->ranks;
    ra_status s = RA_OK;
    r->next[count] = o->halt && *o->halt;
    for (int32_t far = 1; far < ranks && (want < count || o->halt) && s == RA_OK; far *= 2) {
        const int to = (r->rank + far) % ranks, from = (r->rank + ranks - far) % ranks;
        s = infer_hop(r->net, r->hop, to, r->next + want, from, r->heard,
                      (size_t)(count - want + 1));
        for (int64_t i = want; i < count && s == RA_OK; i++)
            if (r->next[i] < 0) r->next[i] = r->heard[i - want];
        if (s == RA_OK) r->next[count] |= r->heard[count - want];
    }
    return s == RA_OK ? s : infer_hop_failed(r, s);
}

/* The least of a number of each rank, in the same way. */
static inline ra_status infer_least(infer_rank *r, int64_t *x) {
    const int32_t ranks = r->e->o.ranks;
    ra_status s = RA_OK;
    int64_t other = 0;
    for (int32_t far = 1; far < ranks && s == RA_OK; far *= 2) {
        const int to = (r->rank + far) % ranks, from = (r->rank + ranks - far) % ranks;
        memcpy(r->least, x, sizeof *x);
        s = infer_hop(r->net, r->hop, to, r->least, from, r->least + 2, 2);
        if (s == RA_OK) memcpy(&other, r->least + 2, sizeof other);
        if (s == RA_OK && other < *x) *x = other;
    }
    return s == RA_OK ? s : infer_hop_failed(r, s);
}

/* -------------------------------------------------------------------------- sampling */
static inline float infer_random(uint64_t seed, int64_t position) {       /* in [0, 1) */
    uint64_t x = seed * 0x9E3779B97F4A7C15u + (uint64_t)position * 0xD1B54A32D192ED03u + 1;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return (float)((x ^ x >> 31) >> 40) / 16777216.0f;
}

static inline int infer_compare(const void *a, const void *b) {
    const infer_choice *x = (const infer_choice *)a, *y = (const infer_choice *)b;
    if (x->logit != y->logit) return x->logit < y->logit ? 1 : -1;
    return x->id < y->id ? -1 : x->id > y->id;
}

/* The probability of a token relative to that of the likeliest, whose logit is `best`. */
static inline double infer_odds(const infer_options *o, float logit, float best) {
    return exp(((double)logit - (double)best) / (double)o->temperature);
}

/* Chooses the token after the one at `position`. The choice depends on seed, position and logits
 * alone, so it is the same for a guess that is verified. */
static inline int32_t infer_sample(const infer_options *o, const float *logits, int64_t count,
                                   int64_t position, infer_choice *choice) {
    int64_t best = 0, n = 0, last;
    double sum = 0, at, mass = 0;
    for (int64_t i = 1; i < count; i++)
        if (logits[i] > logits[best]) best = i;
    if (!(o->temperature > 0) || !isfinite(logits[best])) return (int32_t)best;
    for (int64_t i = 0; i < count; i++) {    /* what is below e^-40 of the best is not drawn */
        if (!(logits[i] >= logits[best] - 40 * o->temperature)) continue;
        choice[n].logit = logits[i];
        choice[n++].id = (int32_t)i;
    }
    qsort(choice, (size_t)n, sizeof *choice, infer_compare);
    if (o->top_k > 0 && n > o->top_k) n = o->top_k;
    for (int64_t i = 0; i < n; i++) sum += infer_odds(o, choice[i].logit, logits[best]);
    for (last = 0; last < n; last++) {
        const double odds = infer_odds(o, choice[last].logit, logits[best]);
        if (odds < (double)o->min_p) break;
        mass += odds;
        if (o->top_p > 0 && mass >= (double)o->top_p * sum) break;
    }
    at = (double)infer_random(o->seed, position) * (mass < sum ? mass : sum);
    for (int64_t i = 0; i < n && i <= last; i++) {
        at -= infer_odds(o, choice[i].logit, logits[best]);
        if (at < 0) return choice[i].id;
    }
    return choice[0].id;
}

/* -------------------------------------------------------------------------- one layer */
typedef struct infer_turned {
    const infer_rank *r;
    float *rows;
    int32_t heads;
    int windowed;
    int64_t from, piece;               /* rows */
} infer_turned;

static inline void infer_rope_piece(void *ctx, int64_t piece) {
    const infer_turned *t = (const infer_turned *)ctx;
    const model *m = t->r->e->m;
    const int32_t half = m->rope_dims / 2, apart = m->rope_halves ? half : 1;
    const int64_t from = t->from + piece * t->piece;
    const int64_t end = from + t->piece < t->r->owned ? from + t->piece : t->r->owned;
    for (int64_t i = from * t->heads; i < end * t->heads; i++) {
        const float *turn = t->r->turn[t->windowed] + i / t->heads * m->rope_dims;
        float *x = t->rows + i * m->dim;
        for (int32_t p = 0; p < half; p++) {
            float *a = x + (m->rope_halves ? p : 2 * p), *b = a + apart;
            const float c = turn[2 * p], s = turn[2 * p + 1], u = *a, w = *b;
            *a = u * c - w * s;
            *b = u * s + w * c;
        }
    }
}

/* Turns the heads of this rank's rows from `from` on by their positions. */
static inline void infer_rope(const infer_rank *r, int windowed, float *rows, int32_t heads,
                              int64_t from) {
    pool *p = &r->e->workers;
    const int64_t n = r->owned - from, pieces = n * heads * r->e->m->dim > 20000 ? p->threads + 1
                                                                                  : 1;
    infer_turned t;
    t.r = r;
    t.windowed = windowed;
    t.rows = rows;
    t.heads = heads;
    t.from = from;
    t.piece = (n + pieces - 1) / pieces;
    if (n > 0) pool_run(p, infer_rope_piece, &t, (n + t.piece - 1) / t.piece);
}

/* Angles are rounded to f32, as in the libraries that models come from. */
static inline void infer_turns(const infer_rank *r, int windowed, int64_t first) {
    const model *m = r->e->m;
    for (int32_t p = 0; p < m->rope_dims / 2; p++) {
        for (int64_t i = 0; i < r->owned; i++) {
            float *turn = r->turn[windowed] + i * m->rope_dims + 2 * p;
            const float angle = (float)(first + r->own[i]) * m->rope[windowed][p];
            turn[0] = (float)(cos((double)angle) * m->rope_magnitude);
            turn[1] = (float)(sin((double)angle) * m->rope_magnitude);
        }
    }
}

static inline int infer_integers(const infer_rank *r) {
    return r->e->o.integers && r->decoding == INFER_DECODE;
}

/* A product: y = w x + bias, for n rows of x. bias: may be null. */
typedef struct infer_times {
    const matrix *w;
    const float *bias, *x;
    float *y;
    int64_t n;
} infer_times;

static inline infer_times infer_product(const matrix *w, const float *bias, const float *x,
                                        float *y, int64_t n) {
    infer_times p;
    p.w = w;
    p.bias = bias;
    p.x = x;
    p.y = y;
    p.n = n;
    return p;
}

/* 1: this call splits products, and every rank has all of its tokens. */
static inline int infer_splits(const infer_rank *r) {
    return r->e->split && r->decoding == INFER_DECODE;
}

/* How many of `rows` a rank multiplies at most, and which those of `rank` are. */
static inline int64_t infer_part_room(int64_t rows, int32_t ranks) {
    return ((rows + ranks - 1) / ranks + 5) / 6 * 6;
}

static inline int64_t infer_part(const infer_rank *r, int64_t rows, int32_t rank, int64_t *first) {
    const int64_t room = infer_part_room(rows, r->e->o.ranks);
    *first = rank * room < rows ? rank * room : rows;
    return rows - *first < room ? rows - *first : room;
}

/* Every rank has `count` floats at the beginning of r->wire. All get those of all, in blocks: block
 * i is of the rank i before this one. The number of blocks doubles with each message. */
static inline ra_status infer_gather(infer_rank *r, int64_t count) {
    const int32_t ranks = r->e->o.ranks;
    ra_status s = RA_OK;
    for (int32_t far = 1; far < ranks && s == RA_OK; far *= 2) {
        const int to = (r->rank + far) % ranks, from = (r->rank + ranks - far) % ranks;
        const int64_t n = (far < ranks - far ? far : ranks - far) * count;
        s = infer_hop(r->net, r->hop, to, (const int32_t *)(const void *)r->wire, from,
                      (int32_t *)(void *)(r->wire + far * count), (size_t)n);
    }
    return s == RA_OK ? s : infer_hop_failed(r, s);
}

static inline void infer_multiply(const infer_rank *r, const matrix *w, const float *x, float *y,
                                  int64_t n) {
    pool *p = &r->e->workers;
    if (infer_integers(r)) matmul_decode(p, w, x, y, n, r->scratch);
    else matmul_run(p, w, x, y, n, r->scratch);
}

/* Computes this rank's parts of products, and gets those of the others. */
static inline ra_status infer_multiply_parts(infer_rank *r, const infer_times *p, int count) {
    const int32_t ranks = r->e->o.ranks;
    int64_t block = 0, first;
    ra_status s;
    for (int i = 0; i < count; i++) {
        matrix part = *p[i].w;
        part.rows = infer_part(r, p[i].w->rows, r->rank, &first);
        part.data += (size_t)first * (size_t)gguf_row_bytes(part.dtype, part.columns);
        if (part.rows) infer_multiply(r, &part, p[i].x, r->wire + block, p[i].n);
        block += p[i].n * infer_part_room(p[i].w->rows, ranks);
    }
    s = infer_gather(r, block);
    for (int32_t far = 0; far < ranks && s == RA_OK; far++) {
        const float *from = r->wire + far * block;
        for (int i = 0; i < count; i++) {
            const int64_t all = p[i].w->rows;
            const int64_t rows = infer_part(r, all, (r->rank + ranks - far) % ranks, &first);
            for (int64_t t = 0; t < p[i].n && rows; t++)
                memcpy(p[i].y + t * all + first, from + t * rows, (size_t)rows * sizeof *from);
            from += p[i].n * infer_part_room(all, ranks);
        }
    }
    return s;
}

static inline ra_status infer_products(infer_rank *r, const infer_times *p, int count) {
    const ra_status s = infer_splits(r) ? infer_multiply_parts(r, p, count) : RA_OK;
    for (int i = 0; i < count; i++) {
        const int64_t rows = p[i].w->rows;
        if (!infer_splits(r)) infer_multiply(r, p[i].w, p[i].x, p[i].y, p[i].n);
        for (int64_t t = 0; t < p[i].n && p[i].bias; t++)
            for (int64_t j = 0; j < rows; j++) p[i].y[t * rows + j] += p[i].bias[j];
    }
    return s;
}

typedef struct infer_call { ra_cache *cache; ra_status status; } infer_call;

/* A thread of a call. Thread 0 stays until the call is done; the others leave when they have found
 * nothing to do for a while. */
static inline void infer_step(void *ctx, int64_t ith) {
    infer_call *c = (infer_call *)ctx;
    ra_status s;
    for (int idle = 0; (s = ra_infer_step(c->cache, (int)ith)) > 0;) {
        idle = s == RA_AGAIN ? 0 : idle + 1;
        if (idle > 100 && ith) return;
        if (idle > 20) sched_yield();
    }
    if (ith == 0) c->status = s;
}

/* This rank's part of a call, on its share of the threads if the call is large. */
static inline ra_status infer_call_run(infer_rank *r, ra_cache *cache, int64_t first,
                                       int64_t count) {
    const model *m = r->e->m;
    const double work = (double)(r->owned * m->heads) * (double)(first + count) * m->dim;
    infer_call c;
    if (r->e->attend_threads < 2 || work < 2e5)
        return ra_infer(cache, &r->t, &first, &count, RA_NO_DEADLINE);
    c.cache = cache;
    c.status = ra_infer_begin(cache, &r->t, &first, &count, RA_NO_DEADLINE);
    if (c.status == RA_OK) pool_run(&r->e->workers, infer_step, &c, r->e->attend_threads);
    return c.status;
}

/* Each rank has rows of r->o for its own tokens of a call, one after another. All get all. */
static inline ra_status infer_gather_rows(infer_rank *r, const ra_cache *cache, int64_t first,
                                          int64_t count) {
    const int32_t ranks = r->e->o.ranks;
    const int64_t q = (int64_t)r->e->m->heads * r->e->m->dim;
    ra_status s;
    memcpy(r->wire, r->o, (size_t)(count * q) * sizeof *r->o);
    s = infer_gather(r, count * q);
    for (int32_t far = 0; far < ranks && s == RA_OK; far++) {
        const float *from = r->wire + far * count * q;
        for (int64_t i = 0; i < count; i++) {
            if (ra_cache_owner(cache, first + i) != (r->rank + ranks - far) % ranks) continue;
            memcpy(r->o + i * q, from, (size_t)q * sizeof *from);
            from += q;
        }
    }
    return s;
}

/* Stores keys and values of this rank's tokens, then attends its queries to those of all ranks. In
 * the last layer only tokens whose logits are needed have queries. */
static inline ra_status infer_attend(infer_rank *r, int32_t layer, int64_t first, int64_t count) {
    const model *m = r->e->m;
    ra_cache *cache = r->cache[model_windowed(m, layer)][r->decoding];
    const int64_t row = (int64_t)m->kv_heads * m->dim, q = (int64_t)m->heads * m->dim;
    int64_t mine = 0;
    const int64_t skip = layer + 1 < m->layers ? 0 : r->want;
    const int64_t skipped = layer + 1 < m->layers ? 0 : r->skipped;
    ra_status s = RA_OK;
    r->t.k.data = r->memory + (size_t)layer * 2 * r->k_bytes;
    r->t.v.data = r->memory + (size_t)layer * 2 * r->k_bytes + r->k_bytes;
    r->t.q.data = r->q + skipped * m->heads * m->dim;
    r->t.o.data = r->o + skipped * m->heads * m->dim;
    r->t.sinks = m->layer[layer].sinks;
    for (int64_t i = 0; i < r->owned && s == RA_OK; i++) {
        if (ra_cache_owner(cache, first + r->own[i]) != r->rank) continue;
        s = ra_cache_store(cache, &r->t, 0, first + r->own[i], r->k + i * row, r->v + i * row);
        if (infer_splits(r))
            memmove(r->q + mine++ * q, r->q + i * q, (size_t)q * sizeof *r->q);
    }
    if (s == RA_OK && skip < count) s = infer_call_run(r, cache, first + skip, count - skip);
    if (s != RA_OK) return infer_fail(r->e, s, ra_cache_error(cache)->text);
    return infer_splits(r) ? infer_gather_rows(r, cache, first, count) : s;
}

static inline float infer_gelu(float x) {
    return 0.5f * x * (1 + tanhf(0.7978845608028654f * (x + 0.044715f * x * x * x)));
}

/* gate = what the model makes of gate and up, n elements. */
static inline void infer_gate(const infer_rank *r, float *gate, const float *up, int64_t n) {
    const model *m = r->e->m;
    pool *p = &r->e->workers;
    if (!m->gelu && !m->oss) matmul_gate(p, gate, up, n);
    for (int64_t i = 0; i < n && m->gelu; i++) gate[i] = infer_gelu(gate[i]) * up[i];
    for (int64_t i = 0; i < n && m->oss; i++) {
        const float g = gate[i] < 7 ? gate[i] : 7, u = up[i] < -7 ? -7 : up[i] < 7 ? up[i] : 7;
        gate[i] = g / (1 + expf(-1.702f * g)) * (u + 1);
    }
}

/* Adds y to x, for this rank's rows from `from` on, after a norm if the model has one there. */
static inline void infer_add(const infer_rank *r, const float *norm, int64_t from) {
    const model *m = r->e->m;
    pool *p = &r->e->workers;
    float *x = r->x + from * m->hidden, *y = r->y + from * m->hidden;
    if (norm) matmul_norm(p, y, y, norm, r->owned - from, m->hidden, m->epsilon);
    matmul_add(p, x, y, (r->owned - from) * m->hidden);
}

/* Ends the run of all ranks if a row of n numbers of the token at a position, which a layer or,
 * after the last, the output has computed, has one that is none. */
static inline ra_status infer_finite(infer_rank *r, const float *row, int64_t n, int32_t layer,
                                     int64_t position) {
    char text[INFER_WHY], where[32] = "in the logits";
    float sum = 0;
    for (int64_t k = 0; k < n; k++) sum += row[k] * 0;
    if (sum == 0) return RA_OK;
    if (layer < r->e->m->layers) snprintf(where, sizeof where, "after layer %ld", (long)layer);
    snprintf(text, sizeof text, "infinite or NaN %s at token %lld: the weights are damaged, or too "
             "large for f32", where, (long long)position);
    if (r->net && r->net->abort) (void)r->net->abort(r->net->ctx, RA_E_ENGINE);
    return infer_fail(r->e, RA_E_ENGINE, text);
}

/* Rows of one expert: y = w x + bias for the pairs that go to it, of [experts][rows] w and bias. */
static inline ra_status infer_expert(infer_rank *r, const matrix *w, const float *bias,
                                     const float *x, float *y, int32_t expert) {
    const int64_t first = r->start[expert], n = r->start[expert + 1] - first;
    matrix one = *w;
    one.rows = w->rows / r->e->m->experts;
    one.data += (size_t)(expert * one.rows) * (size_t)gguf_row_bytes(w->dtype, w->columns);
    const infer_times p = infer_product(&one, bias ? bias + expert * one.rows : NULL,
                                        x + first * w->columns, y + first * one.rows, n);
    return infer_products(r, &p, 1);
}

/* y of this rank's rows from `from` on becomes what their experts make of it. */
static inline ra_status infer_experts(infer_rank *r, const model_layer *l, int64_t from) {
    const model *m = r->e->m;
    const int64_t n = r->owned - from, pairs = n * m->used, hidden = m->hidden;
    const size_t bytes = (size_t)hidden * sizeof(float);
    float *y = r->y + from * hidden;
    const infer_times route = infer_product(&l->router, l->router_bias, y, r->scores, n);
    ra_status s = infer_products(r, &route, 1);
    if (s != RA_OK) return s;
    for (int64_t i = 0; i < n; i++)
        experts_choose(r->scores + i * m->experts, m->experts, m->used, r->chosen + i * m->used,
                       r->shares + i * m->used);
    experts_sort(r->chosen, pairs, m->experts, r->place, r->start);
    for (int64_t i = 0; i < pairs; i++)
        memcpy(r->pairs + r->place[i] * hidden, y + i / m->used * hidden, bytes);
    for (int32_t e = 0; e < m->experts && s == RA_OK; e++) {
        if (r->start[e] == r->start[e + 1]) continue;
        s = infer_expert(r, &l->gate, l->gate_bias, r->pairs, r->gate, e);
        if (s == RA_OK) s = infer_expert(r, &l->up, l->up_bias, r->pairs, r->up, e);
    }
    infer_gate(r, r->gate, r->up, pairs * m->feed);
    for (int32_t e = 0; e < m->experts && s == RA_OK; e++)
        if (r->start[e] < r->start[e + 1])
            s = infer_expert(r, &l->down, l->down_bias, r->gate, r->pairs, e);
    memset(y, 0, (size_t)n * bytes);
    for (int64_t i = 0; i < pairs; i++) {
        const float *x = r->pairs + r->place[i] * hidden;
        float *to = y + i / m->used * hidden;
        for (int64_t j = 0; j < hidden; j++) to[j] += r->shares[i] * x[j];
    }
    return s;
}

/* What follows the attention of a layer, for this rank's rows from `from` on. */
static inline ra_status infer_feed(infer_rank *r, const model_layer *l, int64_t from) {
    const model *m = r->e->m;
    pool *p = &r->e->workers;
    const int64_t n = r->owned - from;
    float *x = r->x + from * m->hidden, *y = r->y + from * m->hidden;
    float *gate = r->gate + from * m->feed, *up = r->up + from * m->feed;
    const infer_times after = infer_product(&l->o, l->o_bias, r->o + from * l->o.columns, y, n);
    const infer_times feed[] = { infer_product(&l->gate, NULL, y, gate, n),
                                 infer_product(&l->up, NULL, y, up, n),
                                 infer_product(&l->down, NULL, gate, y, n) };
    ra_status s = infer_products(r, &after, 1);
    if (s != RA_OK) return s;
    infer_add(r, l->attention_after, from);
    matmul_norm(p, y, x, l->feed_norm, n, m->hidden, m->epsilon);
    if (m->experts) {
        s = infer_experts(r, l, from);
    } else {
        s = infer_products(r, feed, 2);
        infer_gate(r, gate, up, n * m->feed);
        if (s == RA_OK) s = infer_products(r, feed + 2, 1);
    }
    infer_add(r, l->feed_after, from);
    return s;
}

/* The last layer computes queries, and what follows the attention, for wanted tokens alone. */
static inline ra_status infer_layer(infer_rank *r, int32_t layer, int64_t first, int64_t count) {
    const model *m = r->e->m;
    const model_layer *l = &m->layer[layer];
    const int64_t n = r->owned, from = layer + 1 < m->layers ? 0 : r->skipped;
    const int64_t q = (int64_t)m->heads * m->dim;
    const int windowed = model_windowed(m, layer);
    pool *p = &r->e->workers;
    const infer_times qkv[] = {
        infer_product(&l->q, l->q_bias, r->y + from * m->hidden, r->q + from * q, n - from),
        infer_product(&l->k, l->k_bias, r->y, r->k, n),
        infer_product(&l->v, l->v_bias, r->y, r->v, n) };
    ra_status s;
    matmul_norm(p, r->y, r->x, l->attention_norm, n, m->hidden, m->epsilon);
    s = infer_products(r, qkv, 3);
    if (s != RA_OK) return s;
    if (l->q_norm)
        matmul_norm(p, r->q + from * q, r->q + from * q, l->q_norm,
                    (n - from) * m->heads, m->dim, m->epsilon);
    if (l->k_norm) matmul_norm(p, r->k, r->k, l->k_norm, n * m->kv_heads, m->dim, m->epsilon);
    infer_rope(r, windowed, r->q, m->heads, from);
    infer_rope(r, windowed, r->k, m->kv_heads, 0);
    s = infer_attend(r, layer, first, count);
    if (s != RA_OK) return s;
    s = infer_feed(r, l, from);
    for (int64_t i = 0; i < n && s == RA_OK; i++)
        s = infer_finite(r, r->x + i * m->hidden, m->hidden, layer, first + r->own[i]);
    return s;
}

/* -------------------------------------------------------------------------- the model */
static inline void infer_embed(infer_rank *r, const int32_t *tokens) {
    const matrix *w = &r->e->m->embedding;
    const size_t bytes = (size_t)gguf_row_bytes(w->dtype, w->columns);
    for (int64_t i = 0; i < r->owned; i++)
        gguf_widen(w->dtype, w->data + (size_t)tokens[r->own[i]] * bytes, w->columns,
                   r->x + i * w->columns);
    for (int64_t i = 0; i < r->owned * w->columns; i++) r->x[i] *= r->e->m->embedding_scale;
}

/* How improbable logits make the token at a position, if it is of the prompt. */
static inline void infer_lose(const infer_engine *e, const float *logits, int64_t position) {
    double sum = 0, most = (double)logits[0];
    if (!e->result->loss || position >= e->result->prompt) return;
    for (int64_t i = 1; i < e->m->vocabulary; i++)
        if ((double)logits[i] > most) most = (double)logits[i];
    for (int64_t i = 0; i < e->m->vocabulary; i++) sum += exp((double)logits[i] - most);
    e->result->loss[position] = log(sum) + most -
                                (double)logits[e->result->tokens[position]];
}

/* Computes logits and next tokens of the wanted rows of x. New token i is at position first + i. */
static inline ra_status infer_head(infer_rank *r, int64_t first) {
    const infer_engine *e = r->e;
    const model *m = e->m;
    const int64_t from = r->skipped;
    pool *p = &r->e->workers;
    matmul_norm(p, r->y + from * m->hidden, r->x + from * m->hidden, m->output_norm,
                r->owned - from, m->hidden, m->epsilon);
    for (int64_t at = from; at < r->owned; at += INFER_HEAD_ROWS) {
        const int64_t most = INFER_HEAD_ROWS, n = r->owned - at < most ? r->owned - at : most;
        const infer_times head = infer_product(&m->output, NULL, r->y + at * m->hidden, r->logits,
                                               n);
        ra_status s = infer_products(r, &head, 1);
        if (s != RA_OK) return s;
        for (int64_t i = 0; i < n; i++) {
            const int64_t token = r->own[at + i];
            float *row = r->logits + i * m->vocabulary;
            s = infer_finite(r, row, m->vocabulary, m->layers, first + token);
            if (s != RA_OK) return s;
            for (int64_t k = 0; k < m->vocabulary && m->logit_softcap > 0; k++)
                row[k] = m->logit_softcap * tanhf(row[k] / m->logit_softcap);
            infer_lose(e, row, first + token + 1);
            r->next[token] = infer_sample(&e->o, row, m->vocabulary, first + token, r->choice);
            if (e->result->logits)
                memcpy(e->result->logits + (first + token) * m->vocabulary, row,
                       (size_t)m->vocabulary * sizeof *row);
        }
    }
    return RA_OK;
}

/* Runs the model for tokens [first, first + count) of r->tokens; those before them are cached. From
 * new token `want` on, r->next gets the token that follows each. */
static inline ra_status infer_forward(infer_rank *r, int64_t first, int64_t count, int64_t want) {
    infer_engine *e = r->e;
    ra_status s = RA_OK;
    r->owned = r->skipped = 0;
    r->want = want;
    for (int64_t i = 0; i < count; i++) {
        r->next[i] = -1;
        if (!infer_splits(r) &&
            ra_cache_owner(r->cache[r->some][INFER_PROMPT], first + i) != r->rank)
            continue;
        if (i < want) r->skipped++;
        r->own[r->owned++] = i;
    }
    infer_embed(r, r->tokens + first);
    for (int i = 0; i < 2; i++)
        if (r->cache[i][INFER_PROMPT]) infer_turns(r, i, first);
    for (int32_t i = 0; i < e->m->layers && s == RA_OK; i++) s = infer_layer(r, i, first, count);
    if (s != RA_OK) return s;
    if (r->skipped < r->owned) s = infer_head(r, first);
    return s == RA_OK ? infer_share(r, infer_splits(r) ? count : want, count) : s;
}

/* -------------------------------------------------------------------------- a cache that lasts */
static inline void infer_note(infer_engine *e, const char *text) {
    pthread_mutex_lock(&e->lock);
    if (e->o.note) e->o.note(e->o.user, text);
    pthread_mutex_unlock(&e->lock);
}

/* 1: calls of the prompt may have no more than INFER_SHORT tokens. */
static inline int infer_short(const infer_options *o) { return o->chunk <= 2 * INFER_SHORT; }

/* What the files of a cache must have in common with this run. */
static inline void infer_set_shape(infer_rank *r) {
    const infer_engine *e = r->e;
    r->shape.model = model_hash(e->m);
    r->shape.lanes = (uint32_t)e->o.lanes;
    r->shape.layers = (uint32_t)e->m->layers;
    r->shape.dtype = (uint32_t)e->o.cache_dtype;
    r->shape.row_bytes = (uint32_t)r->row_bytes;
    r->shape.arithmetic = (uint32_t)(e->workers.isa + (ra_isa_best() << 8) +
                                     (e->o.integers << 16) + (infer_short(&e->o) << 24));
}

static inline int infer_has_lane(const infer_rank *r, int64_t lane) {
    return ra_cache_owner(r->cache[r->some][INFER_PROMPT], lane * CACHE_RUN) == r->rank;
}

/* Where the rows of a run are in the memory of its rank. */
static inline cache_rows infer_rows(const infer_rank *r, int64_t run) {
    const ra_cache *cache = r->cache[r->some][INFER_PROMPT];
    cache_rows at;
    at.first = r->memory + (size_t)ra_cache_row(cache, run * CACHE_RUN) * r->row_bytes;
    at.apart = r->k_bytes;
    return at;
}

/* The next run of the first `count` tokens; *hash becomes that of the tokens up to its end. */
static inline cache_run infer_run_of(const infer_rank *r, int64_t run, int64_t count,
                                     uint64_t *hash) {
    const int64_t left = count - run * CACHE_RUN;
    cache_run x;
    memset(&x, 0, sizeof x);
    x.run = run;
    x.before = *hash;
    x.count = left < CACHE_RUN ? (int32_t)left : CACHE_RUN;
    memcpy(x.token, r->tokens + run * CACHE_RUN, (size_t)x.count * sizeof *x.token);
    *hash = cache_hash(*hash, x.token, x.count);
    return x;
}

/* Runs of one lane that are read on all threads. */
typedef struct infer_loading {
    const infer_rank *r;
    const cache_lane *lane;
    const cache_run *want;             /* [count] and what was found for each */
    int64_t *record;
    int32_t *tokens;                   /* how many of its tokens are there; then are read */
    int64_t damaged;                   /* records */
} infer_loading;

/* Reads a run. If its record is damaged, an older one will do. */
static inline void infer_load_run(void *ctx, int64_t i) {
    infer_loading *x = (infer_loading *)ctx;
    const cache_rows to = infer_rows(x->r, x->want[i].run);
    while (x->record[i] >= 0 && !cache_lane_read(x->lane, x->record[i], to)) {
        x->record[i] = cache_lane_find(x->lane, &x->want[i], x->record[i], -1, &x->tokens[i]);
        pthread_mutex_lock(&x->r->e->lock);
        x->damaged++;
        pthread_mutex_unlock(&x->r->e->lock);
    }
}

/* Reads what a lane's file has of `count` runs. Returns the first position of the lane that it
 * lacks, or `end`. */
static inline int64_t infer_load_lane(infer_rank *r, int64_t lane, const cache_run *want,
                                      int64_t count, int64_t end) {
    char why[INFER_WHY];
    cache_lane file;
    infer_loading x;
    int64_t guess = -1, found = 0;
    if (!cache_lane_open(&file, r->e->o.load, &r->shape, (int32_t)lane, 0, 1, why)) {
        infer_note(r->e, why);
        return lane * CACHE_RUN;
    }
    memset(&x, 0, sizeof x);
    x.r = r;
    x.lane = &file;
    x.want = want;
    x.record = (int64_t *)calloc((size_t)count + 1, sizeof *x.record);
    x.tokens = (int32_t *)calloc((size_t)count + 1, sizeof *x.tokens);
    if (!x.record || !x.tokens) count = found = 0, end = lane * CACHE_RUN;
    for (; found < count; found++) {
        guess = cache_lane_find(&file, &want[found], file.records, guess + 1, &x.tokens[found]);
        x.record[found] = guess;
        if (guess < 0) break;
    }
    if (found) pool_run(&r->e->workers, infer_load_run, &x, found);
    for (int64_t i = 0; i < file.records; i++) x.damaged += !file.index[i].count;
    snprintf(why, sizeof why, "%.150s: records that are damaged or incomplete: %lld", file.path,
             (long long)x.damaged);
    if (x.damaged) infer_note(r->e, why);
    for (int64_t i = 0; i < count; i++) {
        if (x.tokens[i] == want[i].count) continue;
        end = want[i].run * CACHE_RUN + x.tokens[i];
        break;
    }
    free(x.record);
    free(x.tokens);
    cache_lane_close(&file);
    return end;
}

/* Reads the lanes of this rank. Returns the first position of its own that is missing, or that
 * after the last token of the prompt. */
static inline int64_t infer_load(infer_rank *r) {
    const int64_t prompt = r->e->result->prompt, lanes = r->e->o.lanes;
    const int64_t runs = (prompt + CACHE_RUN - 1) / CACHE_RUN;
    cache_run *all = (cache_run *)calloc((size_t)runs, sizeof *all);
    int64_t end = all ? prompt : 0;
    for (int64_t lane = 0; lane < lanes && lane < runs && end > lane * CACHE_RUN; lane++) {
        uint64_t hash = cache_hash_start(&r->shape);
        int64_t count = 0;
        if (!infer_has_lane(r, lane)) continue;
        for (int64_t i = 0; i < (end + CACHE_RUN - 1) / CACHE_RUN; i++) {
            const cache_run x = infer_run_of(r, i, prompt, &hash);
            if (i % lanes == lane) all[count++] = x;
        }
        end = infer_load_lane(r, lane, all, count, end);
    }
    free(all);
    return end;
}

/* Takes from files what they have of a beginning of the prompt; *at: how many positions. The last
 * tokens are computed in a call that gives them the bits of a run without files, see infer_prompt,
 * and the logits of the last one are needed. */
static inline ra_status infer_restore(infer_rank *r, int64_t *at) {
    infer_engine *e = r->e;
    const int64_t most = e->result->prompt - INFER_SHORT - 1;
    char why[INFER_WHY];
    int absent;
    int64_t least = 0;
    ra_status s;
    if (!e->o.load) return RA_OK;
    if (cache_manifest_read(e->o.load, &r->shape, &absent, why)) least = infer_load(r);
    else infer_note(e, why);
    s = infer_least(r, &least);
    if (least > most) least = most;
    if (e->o.wanted_count && least > e->o.wanted[0]) least = e->o.wanted[0];
    *at = least > 0 ? least : 0;
    if (infer_reports(r)) e->result->loaded = *at;
    return s;
}

/* Appends the runs of a lane that its file lacks, from number `from` on. At the first save records
 * may be there already. */
static inline int infer_save_lane(infer_rank *r, int64_t lane, int64_t count, char *why) {
    const int64_t lanes = r->e->o.lanes, from = r->saved / CACHE_RUN;
    uint64_t hash = cache_hash_start(&r->shape);
    cache_lane file;
    cache_rows spare;
    int64_t guess = -1;
    int ok = cache_lane_open(&file, r->e->o.save, &r->shape, (int32_t)lane, 1, !r->saved, why);
    const int64_t had = ok && !r->saved ? file.records : 0;
    if (!ok) return 0;
    spare.apart = cache_part_bytes(&r->shape);
    spare.first = (uint8_t *)malloc(2 * (size_t)r->shape.layers * spare.apart);
    for (int64_t i = 0; i < (count + CACHE_RUN - 1) / CACHE_RUN && ok; i++) {
        const cache_run x = infer_run_of(r, i, count, &hash);
        int32_t n = 0;
        if (i < from || i % lanes != lane) continue;
        if (had) guess = cache_lane_find(&file, &x, had, guess + 1, &n);
        if (n < x.count || !spare.first || !cache_lane_read(&file, guess, spare))
            ok = cache_lane_append(&file, &x, infer_rows(r, i), why);
    }
    if (ok) ok = cache_lane_sync(&file, why);
    free(spare.first);
    cache_lane_close(&file);
    return ok;
}

/* Writes what is not in the files yet of the first `count` positions: every rank its lanes, then
 * FILE. What cannot be written is said, and the run goes on. */
static inline ra_status infer_save(infer_rank *r, int64_t count) {
    infer_engine *e = r->e;
    const int64_t lanes = e->o.lanes, runs = (count + CACHE_RUN - 1) / CACHE_RUN;
    const uint64_t start = cache_hash_start(&r->shape);
    char why[INFER_WHY];
    int64_t ok = 1;
    ra_status s;
    if (!e->o.save || count <= r->saved) return RA_OK;
    for (int64_t lane = 0; lane < lanes && lane < runs && ok; lane++)
        if (infer_has_lane(r, lane)) ok = infer_save_lane(r, lane, count, why);
    if (!ok) infer_note(e, why);
    s = infer_least(r, &ok);
    if (ok) r->saved = count;
    if (s == RA_OK && ok && infer_reports(r)) {
        ok = cache_manifest_write(e->o.save, &r->shape, r->rank, count,
                                  cache_hash(start, r->tokens, count), why);
        if (!ok) infer_note(e, why);
    }
    if (infer_reports(r)) e->result->saved = ok ? count : -1;
    return s;
}

/* Whether this rank will be able to save, before anything is computed. */
static inline ra_status infer_may_save(infer_rank *r) {
    infer_engine *e = r->e;
    char why[INFER_WHY] = "";
    cache_lane file;
    int absent = 0;
    int64_t ok = cache_manifest_read(e->o.save, &r->shape, &absent, why) || absent;
    ra_status s;
    for (int64_t lane = 0; lane < e->o.lanes && ok; lane++) {
        if (!infer_has_lane(r, lane)) continue;
        ok = cache_lane_open(&file, e->o.save, &r->shape, (int32_t)lane, 1, 1, why);
        if (ok) cache_lane_close(&file);
    }
    if (!ok) (void)infer_fail(e, RA_E_STATE, why);
    s = infer_least(r, &ok);
    if (s == RA_OK && !ok) s = infer_fail(e, RA_E_STATE, "another rank cannot save its lanes");
    return s;
}

/* -------------------------------------------------------------------------- a text */
/* Guesses the next tokens as those that followed the last few tokens at an earlier place: the
 * longest match of 3, 2 or 1 tokens, at the latest such place. */
static inline int64_t infer_guess(const int32_t *tokens, int64_t count, int64_t most,
                                  int32_t *guess) {
    for (int64_t n = 3; n >= 1; n--) {
        for (int64_t at = count - n - 1; at >= 0; at--) {
            int64_t k = 0;
            if (memcmp(tokens + at, tokens + count - n, (size_t)n * sizeof *tokens)) continue;
            for (; k < most && at + n + k < count; k++) guess[k] = tokens[at + n + k];
            return k;
        }
    }
    return 0;
}

static inline int infer_stops(const infer_options *o, int32_t id) {
    for (int32_t i = 0; i < o->stops; i++)
        if (o->stop[i] == id) return 1;
    return 0;
}

/* Appends the next token. *over: the text ends with it. */
static inline ra_status infer_take(infer_rank *r, int64_t *count, int32_t id, int *over) {
    infer_engine *e = r->e;
    const infer_options *o = &e->o;
    int stop = infer_stops(o, id);
    r->tokens[(*count)++] = id;
    if (!stop && o->ends) stop = o->ends(o->user, r->tokens, r->from, *count);
    if (stop < 0) return infer_fail(e, RA_E_NOMEM, "no memory for the end of the text");
    *over = stop || *count - r->from >= o->predict || *count >= o->context;
    if (!infer_reports(r)) return RA_OK;
    e->result->written++;
    e->result->ended = stop ? INFER_STOPPED
                     : *count - r->from < o->predict ? INFER_FULL : INFER_TO_PREDICT;
    if (!e->o.token || e->o.token(e->o.user, id) >= 0) return RA_OK;
    if (r->net && r->net->abort) (void)r->net->abort(r->net->ctx, RA_E_CANCELLED);
    return infer_fail(e, RA_E_CANCELLED, "the text cannot be written");
}

static inline int infer_halt(infer_rank *r) {
    if (infer_reports(r)) r->e->result->ended = INFER_HALTED;
    return 1;
}

/* Generates token after token. `count` tokens are known, and all except the last are cached. With
 * guesses, a call computes the last token and the guesses. A guess is right if it is the token that
 * follows the one before it. Wrong ones in the cache are overwritten later: the next call passes a
 * smaller count. */
static inline ra_status infer_decode(infer_rank *r, int64_t *count, int64_t *cached) {
    const infer_options *o = &r->e->o;
    ra_status s = RA_OK;
    int over = 0;
    r->decoding = INFER_DECODE;
    while (s == RA_OK && !over) {
        const int64_t at = *count - 1;
        int64_t most = o->speculate - 1, n = 0;
        if (most > o->context - *count) most = o->context - *count;
        if (most > 0) n = infer_guess(r->tokens, *count, most, r->tokens + *count);
        s = infer_forward(r, at, n + 1, 0);
        for (int64_t i = 0; s == RA_OK && !over; i++) {
            const int held = i < n && r->tokens[at + 1 + i] == r->next[i];
            *cached = at + 1 + i;
            s = infer_take(r, count, r->next[i], &over);
            if (!held) break;
        }
        if (s == RA_OK && !over && r->next[n + 1]) over = infer_halt(r);
        if (infer_reports(r)) r->e->result->steps++;
    }
    return s;
}

/* Which of the n tokens of the prompt at position `at` is the first whose logits are needed. */
static inline int64_t infer_first_wanted(const infer_rank *r, int64_t at, int64_t n) {
    const infer_options *o = &r->e->o;
    if (o->all_logits == 1 || o->losses) return 0;
    for (int64_t i = 0; i < o->wanted_count; i++)
        if (o->wanted[i] >= at && o->wanted[i] < at + n) return o->wanted[i] - at;
    return at + n == r->from ? n - 1 : n;
}

/* The prompt of a turn from position *cached on. Calls have more than INFER_SHORT tokens, if the
 * prompt has and chunks allow it: then rows have the bits of one form of attention, however the
 * prompt is cut and wherever it begins. *over: the run halts. */
static inline ra_status infer_prompt(infer_rank *r, int64_t *cached, int *over) {
    const infer_options *o = &r->e->o;
    const int64_t prompt = r->from, first = r->begun;
    ra_status s = RA_OK;
    while (*cached < prompt && s == RA_OK && !*over) {
        const int64_t at = *cached, left = prompt - at;
        const int64_t beyond = left > o->chunk ? left - o->chunk : 0;
        const int again = beyond && beyond <= INFER_SHORT && !infer_short(o);
        const int64_t n = left - beyond - (again ? INFER_SHORT : 0);
        s = infer_forward(r, at, n, infer_first_wanted(r, at, n));
        if (s != RA_OK) break;
        *cached += n;
        if (infer_reports(r) && o->progress) o->progress(o->user, *cached - first, prompt - first);
        if (r->next[n]) *over = infer_halt(r);
        if (*cached == prompt) r->next[0] = r->next[n - 1];
        if (*cached == prompt || *cached / INFER_SAVE_TOKENS > at / INFER_SAVE_TOKENS)
            s = infer_save(r, *cached / CACHE_RUN * CACHE_RUN);
    }
    return s;
}

/* One turn: of `count` tokens, `cached` are computed. The others are, and text follows. */
static inline ra_status infer_turn(infer_rank *r, int64_t *count, int64_t *cached) {
    infer_result *out = r->e->result;
    const infer_options *o = &r->e->o;
    const int64_t start = ra_now_ns(), before = *cached;
    int over = 0;
    ra_status s;
    r->from = *count;
    r->decoding = INFER_PROMPT;
    s = infer_prompt(r, cached, &over);
    const int64_t prefilled = ra_now_ns(), given = *cached - before;
    if (infer_reports(r) && !over)
        out->ended = o->predict < 1 ? INFER_TO_PREDICT : INFER_FULL;
    over |= o->predict < 1 || *count >= o->context;
    if (s == RA_OK && !over) s = infer_take(r, count, r->next[0], &over);
    if (s == RA_OK && !over) s = infer_decode(r, count, cached);
    if (s == RA_OK) s = infer_save(r, *cached);
    if (infer_reports(r)) {
        out->given += given;
        out->prefill_ns += prefilled - start;
        out->decode_ns += ra_now_ns() - prefilled;
    }
    return s;
}

/* Rank 0 asks for the tokens of the next turn, and gives them to all. *count grows by them. */
static inline ra_status infer_more(infer_rank *r, int64_t *count) {
    const infer_options *o = &r->e->o;
    const int32_t *tokens = NULL;
    int64_t n = 0, part;
    ra_status s;
    if (r->rank == 0 && *count < o->context)
        n = o->more(o->user, &tokens, o->context - *count);
    r->next[0] = r->rank == 0 ? (int32_t)n : -1;
    s = infer_share(r, 0, 1);
    n = r->next[0];
    for (int64_t at = 0; at < n && s == RA_OK; at += part) {
        part = n - at < o->chunk ? n - at : o->chunk;
        for (int64_t i = 0; i < part; i++) r->next[i] = r->rank == 0 ? tokens[at + i] : -1;
        s = infer_share(r, 0, part);
        memcpy(r->tokens + *count, r->next, (size_t)part * sizeof *r->next);
        *count += part;
    }
    return s;
}

static inline ra_status infer_text(infer_rank *r) {
    infer_engine *e = r->e;
    infer_result *out = e->result;
    int64_t count = out->prompt, cached = 0, known = 0;
    const int64_t start = ra_now_ns();
    ra_status s = infer_restore(r, &cached);
    if (infer_reports(r)) out->load_ns = ra_now_ns() - start;
    if (infer_reports(r) && e->o.progress) e->o.progress(e->o.user, cached, count);
    if (infer_reports(r)) out->given = cached;
    while (s == RA_OK && count > known) {
        s = infer_turn(r, &count, &cached);
        known = r->begun = count;
        if (s == RA_OK && e->o.turns) s = infer_more(r, &count);
    }
    if (infer_reports(r)) {
        out->count = count;
        out->cached = cached;
        memcpy(out->tokens, r->tokens, (size_t)count * sizeof *out->tokens);
    }
    return s;
}

/* -------------------------------------------------------------------------- memory of a rank */
/* Floats of all ranks' parts of what is multiplied at once in a split call. */
static inline int64_t infer_wire(const model *m, const infer_options *o) {
    const int32_t ranks = o->ranks > 0 ? o->ranks : 1;
    const int64_t n = o->speculate > 0 ? o->speculate : 1, q = (int64_t)m->heads * m->dim;
    const int64_t qkv = infer_part_room(q, ranks) +
                        2 * infer_part_room((int64_t)m->kv_heads * m->dim, ranks);
    const int64_t sizes[] = { qkv, q, 2 * infer_part_room(m->feed, ranks),
                              infer_part_room(m->hidden, ranks),
                              infer_part_room(m->vocabulary, ranks),
                              infer_part_room(m->experts, ranks) };
    int64_t most = 0;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        if (sizes[i] > most) most = sizes[i];
    return ranks * n * most;
}

/* 1: splitting products saves more time than its messages take. */
static inline int infer_saves_time(const model *m, int32_t ranks) {
    double bytes = 0, messages = 0;
    for (int32_t i = 0; i < m->layers; i++) {
        const model_layer *l = &m->layer[i];
        const matrix *all[] = { &l->q, &l->k, &l->v, &l->o, &l->gate, &l->up, &l->down };
        for (int k = 0; k < 7; k++) {
            const double share = k > 3 && m->experts ? (double)m->used / m->experts : 1;
            bytes += share * (double)all[k]->rows *
                     (double)gguf_row_bytes(all[k]->dtype, all[k]->columns);
        }
        for (int32_t far = 1; far < ranks; far *= 2) messages += m->experts ? 4 + 3 * m->used : 5;
    }
    return bytes * (1 - 1.0 / ranks) / 20e9 > messages * 1e-4;
}

static inline void infer_close_rank(infer_rank *r) {
    int unsafe = 0;
    for (int i = 0; i < 2 * INFER_CACHES; i++)
        unsafe |= ra_cache_destroy(r->cache[i / INFER_CACHES][i % INFER_CACHES]) == RA_E_UNSAFE;
    if (!unsafe) {                     /* otherwise other ranks may still read it */
        free(r->memory);
        free(r->floats);
    }
    if (!r->unsafe) {
        free(r->next);
        free(r->hop);
        free(r->wire);
    }
    free(r->own);
    free(r->chosen);
    free(r->place);
    free(r->choice);
    free(r->tokens);
}

/* How many floats a rank needs. Where r->floats is set, it is divided. */
static inline size_t infer_floats(infer_rank *r, int64_t columns) {
    const model *m = r->e->m;
    const int64_t chunk = r->e->o.chunk, q = (int64_t)m->heads * m->dim;
    const int64_t kv = (int64_t)m->kv_heads * m->dim, pairs = m->experts ? chunk * m->used : 0;
    const int64_t feeds = m->experts ? pairs : chunk;
    const struct { float **at; int64_t count; } part[] = {
        { &r->x, chunk * m->hidden }, { &r->y, chunk * m->hidden }, { &r->q, chunk * q },
        { &r->o, chunk * q }, { &r->k, chunk * kv }, { &r->v, chunk * kv },
        { &r->gate, feeds * m->feed }, { &r->up, feeds * m->feed },
        { &r->scores, chunk * m->experts }, { &r->shares, pairs }, { &r->pairs, pairs * m->hidden },
        { &r->turn[0], chunk * m->rope_dims }, { &r->turn[1], chunk * m->rope_dims },
        { &r->scratch, (int64_t)matmul_scratch(columns) },
        { &r->logits, INFER_HEAD_ROWS * m->vocabulary } };
    size_t all = 0;
    for (size_t i = 0; i < sizeof part / sizeof part[0]; all += (size_t)part[i++].count)
        if (r->floats) *part[i].at = r->floats + all;
    return all;
}

/* Two caches over the same memory. That of the prompt takes the fastest form. That of decoding
 * gives the same bits for any number of tokens per call, so guesses never change the text. */
static inline ra_status infer_open_caches(infer_rank *r, int windowed) {
    infer_engine *e = r->e;
    const model *m = e->m;
    ra_error why;
    ra_cache_desc cd;
    ra_desc d = ra_desc_make(m->heads, m->kv_heads, m->dim, RA_F32, RA_MASK_CAUSAL);
    ra_status s = RA_OK;
    memset(&cd, 0, sizeof cd);
    memset(&why, 0, sizeof why);
    d.k_dtype = d.v_dtype = e->o.cache_dtype;
    d.kv_tokens = e->o.context;
    d.mask.window = windowed && m->window < e->o.context ? m->window : 0;
    d.scale = m->scale;
    d.softcap = m->softcap;
    d.scores = m->oss ? RA_SCORE_SINKS : 0;
    d.ranks = e->o.ranks;
    d.rank = r->rank;
    d.threads = e->attend_threads;
    d.error = &why;
    cd.lanes = e->o.lanes;
    for (int i = 0; i < INFER_CACHES && s == RA_OK; i++) {
        d.tokens = i == INFER_PROMPT ? e->o.chunk : e->o.speculate;
        d.form = i == INFER_DECODE && m->heads / m->kv_heads <= 16 ? RA_FORM_SAME : RA_FORM_AUTO;
        s = ra_cache_create(&r->cache[windowed][i], &d, r->net, &cd);
    }
    if (s != RA_OK) {
        char text[INFER_WHY];
        snprintf(text, sizeof text, "the cache: %.30s: %.200s", why.field, why.text);
        return infer_fail(e, s, text);
    }
    r->some = windowed;
    r->row_bytes = (size_t)gguf_row_bytes(d.k_dtype, m->dim) * (size_t)m->kv_heads;
    r->k_bytes = r->row_bytes * (size_t)ra_cache_rows(r->cache[windowed][INFER_PROMPT]);
    return RA_OK;
}

/* The caches of the kinds of layers that the model has. */
static inline ra_status infer_open_cache(infer_rank *r) {
    const model *m = r->e->m;
    ra_status s = RA_OK;
    int has[2] = { 0, 0 };
    for (int32_t i = 0; i < m->layers; i++) has[model_windowed(m, i)] = 1;
    for (int i = 0; i < 2 && s == RA_OK; i++)
        if (has[i]) s = infer_open_caches(r, i);
    return s;
}

static inline ra_status infer_open_rank(infer_rank *r) {
    infer_engine *e = r->e;
    const model *m = e->m;
    const int64_t q = (int64_t)m->heads * m->dim;
    int64_t columns = m->hidden > m->feed ? m->hidden : m->feed;
    const int64_t two = 2 * (e->o.chunk + 1);
    const int64_t room = two > 3 * INFER_SHARED ? two : 3 * INFER_SHARED;
    ra_status s = RA_OK;
    r->next = (int32_t *)calloc((size_t)room + 4, sizeof *r->next);
    r->hop = (ra_transport_op *)calloc(2, sizeof *r->hop);
    if (!r->next || !r->hop) return infer_fail(e, RA_E_NOMEM, "no memory");
    if (e->apart && e->o.ranks > 1) s = infer_agree(r);
    if (s == RA_OK) s = infer_open_cache(r);
    if (s != RA_OK) return s;
    r->least = r->next + room;
    r->heard = r->next + e->o.chunk + 1;
    if (e->o.load || e->o.save) infer_set_shape(r);
    if (e->o.save) s = infer_may_save(r);
    if (s != RA_OK) return s;
    if (columns < q) columns = q;
    r->memory = (uint8_t *)calloc((size_t)m->layers * 2, r->k_bytes ? r->k_bytes : 1);
    r->floats = (float *)calloc(infer_floats(r, columns), sizeof *r->floats);
    r->own = (int64_t *)calloc((size_t)e->o.chunk, sizeof *r->own);
    r->chosen = (int32_t *)calloc((size_t)(e->o.chunk * m->used + 1), sizeof *r->chosen);
    r->place = (int64_t *)calloc((size_t)(e->o.chunk * m->used + m->experts + 1),
                                 sizeof *r->place);
    r->start = r->place ? r->place + e->o.chunk * m->used : NULL;
    r->choice = (infer_choice *)calloc((size_t)m->vocabulary, sizeof *r->choice);
    r->tokens = (int32_t *)calloc((size_t)e->o.context + 1, sizeof *r->tokens);
    if (e->split)
        r->wire = (float *)calloc((size_t)infer_wire(m, &e->o) + 1, sizeof *r->wire);
    if ((e->split && !r->wire) || !r->memory || !r->floats || !r->own || !r->chosen || !r->place ||
        !r->choice || !r->tokens) {
        char text[INFER_WHY];
        snprintf(text, sizeof text, "no memory for %.1f MiB of cache and %.1f MiB beside it on a "
                 "rank", (double)m->layers * 2 * (double)r->k_bytes / 1048576,
                 (double)infer_floats(r, columns) * 4 / 1048576);
        return infer_fail(e, RA_E_NOMEM, text);
    }
    (void)infer_floats(r, columns);
    memcpy(r->tokens, e->result->tokens, (size_t)e->result->prompt * sizeof *r->tokens);
    if (infer_reports(r)) e->result->cache_bytes = (int64_t)(r->k_bytes * 2) * m->layers;
    return RA_OK;
}

static inline ra_status infer_rank_main(infer_engine *e, int32_t rank, const ra_transport *net) {
    infer_rank r;
    ra_status s;
    memset(&r, 0, sizeof r);
    r.e = e;
    r.rank = rank;
    r.net = net;
    s = infer_open_rank(&r);
    if (s == RA_OK) s = infer_text(&r);
    infer_close_rank(&r);
    return s;
}

static inline ra_status infer_on_rank(ra_world *world, int rank, void *user) {
    return infer_rank_main((infer_engine *)user, rank, ra_world_transport(world, rank));
}

/* -------------------------------------------------------------------------- everything */
static inline int64_t infer_context(const model *m, const infer_options *o, int64_t prompt) {
    int64_t n = prompt + o->predict;
    if (o->context) return o->context;
    if (o->turns && n < INFER_TURNS) n = INFER_TURNS;
    return n < m->context ? n : m->context;
}

static inline int infer_resolve(infer_engine *e, const int32_t *prompt, int64_t count) {
    const model *m = e->m;
    infer_options *o = &e->o;
    char *why = e->result->why;
    if (!o->ranks) o->ranks = 1;
    if (!o->cache_dtype) o->cache_dtype = RA_F32;
    if (!o->lanes) o->lanes = INFER_LANES;
    e->attend_threads = e->apart || o->ranks < 1 ? o->threads : o->threads / o->ranks;
    if (e->attend_threads < 1) e->attend_threads = 1;
    if (!o->chunk) o->chunk = 16 * o->lanes;
    for (int64_t i = 0; i < count; i++)
        if (prompt[i] < 0 || prompt[i] >= m->vocabulary)
            return gguf_refuse(why, "token %lld of the prompt is %ld; the model has 0 to %lld",
                               (long long)i, (long)prompt[i], (long long)m->vocabulary - 1);
    if (count < 1) return gguf_refuse(why, "the prompt has no token");
    if (o->ranks < 1 || o->ranks > INFER_RANKS)
        return gguf_refuse(why, "%ld ranks; 1 to 64 are possible", (long)o->ranks);
    if (o->lanes < o->ranks || o->lanes > 1024)
        return gguf_refuse(why, "%ld lanes for %ld ranks; as many lanes as ranks, up to 1024, are "
                           "possible", (long)o->lanes, (long)o->ranks);
    if (o->predict < 0 || o->predict > INT32_MAX || o->chunk < 1 || o->context < 0)
        return gguf_refuse(why, "%lld tokens to generate, chunks of %lld and a context of %lld are "
                           "not possible", (long long)o->predict, (long long)o->chunk,
                           (long long)o->context);
    if (o->speculate > o->chunk)
        return gguf_refuse(why, "%ld tokens to verify per call, but chunks of %lld: a call has no "
                           "more than a chunk", (long)o->speculate, (long long)o->chunk);
    o->context = infer_context(m, o, count);
    if (o->context > m->context || count > o->context)
        return gguf_refuse(why, "a prompt of %lld tokens in a context of %lld; the model was made "
                           "for at most %lld", (long long)count, (long long)o->context,
                           (long long)m->context);
    if (o->chunk > o->context) o->chunk = o->context;
    if (o->speculate < 1) o->speculate = 1;
    if (o->speculate > o->chunk) o->speculate = (int32_t)o->chunk;
    if (o->load && o->all_logits == 1)
        return gguf_refuse(why, "logits of every position, but those of a loaded cache are not "
                           "known");
    e->split = e->apart && o->ranks > 1 &&
               (o->split > 0 || (!o->split && infer_saves_time(m, o->ranks)));
    if (o->cache_dtype >= RA_Q8_0 && m->dim % 32)
        return gguf_refuse(why, "a cache in %s needs heads of a multiple of 32 dims; the model "
                           "has %ld", o->cache_dtype == RA_Q8_0 ? "q8_0" : "q4_0", (long)m->dim);
    return 1;
}

/* The longest message of a run: the partial results of a chunk from all lanes. Longer messages of
 * keys are not sent. */
static inline size_t infer_message_bytes(const model *m, const infer_options *o, int64_t prompt) {
    const int64_t lanes = o->lanes ? o->lanes : INFER_LANES;
    const int64_t chunk = o->chunk ? o->chunk : 16 * lanes;
    const int64_t context = infer_context(m, o, prompt);
    const int64_t rows = chunk < context ? chunk : context;
    return 65536 + (size_t)(rows * lanes) * (size_t)m->heads * (size_t)(m->dim + 2) * 4 +
           (size_t)infer_wire(m, o) * 4;
}

static inline void infer_free(infer_result *r) {
    free(r->tokens);
    free(r->logits);
    free(r->loss);
    memset(r, 0, sizeof *r);
}

/* Runs the prompt and generates what follows. 0: result->why says why not. Free the result either
 * way. net: of one rank of o->ranks; every process makes the same call with its own, all get the
 * tokens, and the logits are those of this rank's positions. Null: all ranks are threads of this
 * process. */
static inline int infer_run_rank(const model *m, const infer_options *o, const int32_t *prompt,
                                 int64_t count, const ra_transport *net,
                                 infer_result *result) {
    infer_engine e;
    ra_status s = RA_E_NOMEM;
    memset(&e, 0, sizeof e);
    memset(result, 0, sizeof *result);
    e.m = m;
    e.o = *o;
    e.result = result;
    e.reporter = net ? net->rank : 0;
    e.apart = net != NULL;
    if (!infer_resolve(&e, prompt, count)) return 0;
    result->tokens = (int32_t *)calloc((size_t)e.o.context + 1, sizeof *result->tokens);
    if (e.o.all_logits)
        result->logits = (float *)calloc((size_t)e.o.context * (size_t)m->vocabulary,
                                         sizeof *result->logits);
    if (e.o.losses) result->loss = (double *)calloc((size_t)count, sizeof *result->loss);
    if (result->tokens && (result->logits || !e.o.all_logits) && (result->loss || !e.o.losses)) {
        memcpy(result->tokens, prompt, (size_t)count * sizeof *prompt);
        result->prompt = result->count = count;
        pthread_mutex_init(&e.lock, NULL);
        pool_start(&e.workers, e.o.threads > 1 ? e.o.threads - 1 : 0);
        s = net ? infer_rank_main(&e, e.reporter, net)
                : ra_world_run(e.o.ranks, infer_on_rank, &e, NULL);
        pool_stop(&e.workers);
        pthread_mutex_destroy(&e.lock);
    }
    if (s != RA_OK && !result->why[0])
        snprintf(result->why, INFER_WHY, "%s", ra_status_text(s));
    return s == RA_OK;
}

static inline int infer_run(const model *m, const infer_options *o, const int32_t *prompt,
                            int64_t count, infer_result *result) {
    return infer_run_rank(m, o, prompt, count, NULL, result);
}

#endif
