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
 *   infer_restore, infer_save   the cache in files of any number of ranks, see cache_file.h
 *
 * All ranks run the same program on the same tokens, so nothing else is sent. */
#if !defined(INFER_ENGINE_H)
#define INFER_ENGINE_H

#include "forward.h"

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
            const cache_run x = cache_run_of(r->tokens, i, prompt, &hash);
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
        const cache_run x = cache_run_of(r->tokens, i, count, &hash);
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
    const int64_t prompt = r->from, first = *cached < r->begun ? *cached : r->begun;
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
        for (int64_t i = 0; i < part && s == RA_OK; i++)
            if (r->next[i] < 0 || r->next[i] >= r->e->m->vocabulary) s = RA_E_RANGE;
        if (s == RA_E_RANGE)
            return infer_fail(r->e, s, "a token of the turn is beyond the vocabulary of the model");
        memcpy(r->tokens + *count, r->next, (size_t)part * sizeof *r->next);
        *count += part;
    }
    if (r->rank && o->halt) r->heeded = *o->halt;
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
