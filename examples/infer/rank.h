/* What ranks of a run have: its options and result, the state of a rank, messages between them,
 * and how a token is drawn. engine.h says what is done with it. */
#if !defined(INFER_RANK_H)
#define INFER_RANK_H

#include "cache_file.h"
#include "model.h"

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
    int32_t heeded;                    /* what *halt was when this turn began, on ranks from 1 on */
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
enum { INFER_SHARED = 23 };
static inline int infer_shared(const infer_engine *e, int32_t *out, const char **names) {
    const infer_options *o = &e->o;
    const uint64_t weights = model_hash(e->m), start = 14695981039346656037u;
    const uint64_t prompt = infer_hash(start, e->result->tokens,
                                       (size_t)e->result->prompt * sizeof *e->result->tokens);
    const uint64_t wanted = infer_hash(start, o->wanted, (size_t)o->wanted_count * 8);
    const uint64_t stops = infer_hash(start, o->stop, (size_t)o->stops * sizeof *o->stop);
    const struct { const char *name; uint64_t x; } all[INFER_SHARED] = {
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
    const char *text = net->error_text ? net->error_text(net->ctx, s) : NULL;
    s = infer_fail(r->e, s, text ? text : ra_status_text(s));
    if (net->abort) (void)net->abort(net->ctx, s);
    r->unsafe = net->post && (!net->quiesce || net->quiesce(net->ctx, ra_deadline_ms(1000)));
    return s;
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
    r->next[count] = o->halt && *o->halt && *o->halt != r->heeded;
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

#endif
