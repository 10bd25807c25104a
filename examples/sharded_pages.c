/* A paged KV cache split over ranks: a prompt that three sequences share, a page allocator with
 * reference counts, tokens that are rolled back. You will see how many pages each rank has in use,
 * that none is left at the end, and that the bits are those of one rank on which nothing is shared.
 *
 *   cc -O2 -std=c99 -pthread -I. -o sharded_pages examples/sharded_pages.c -lm
 *   ./sharded_pages */
#define RINGATTN_IMPLEMENTATION
#include "ringattn.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { HEADS = 8, KV_HEADS = 2, DIM = 64, ROW = KV_HEADS * DIM, PAGE = 16, LANES = 6,
       SEQUENCES = 3, PROMPT = 100, STEPS = 40, MOST = PROMPT + STEPS, PAGES = 64, ENTRIES = 32 };

/* -------------------------------------------------------------------------- pages
 * One rank's pools of K and V, and for each sequence a table of its pages here. Positions belong to
 * ranks in runs of 16, and ra_cache_row puts each run on a multiple of 16. So a page of 16 rows has
 * one run: all pages of a sequence but that of its last token are full. */
typedef struct pages {
    const ra_cache *c;
    int rank;
    int32_t users[PAGES];              /* how many tables have this page */
    int32_t table[SEQUENCES][ENTRIES]; /* -1: no page */
    uint16_t k[PAGES][PAGE][ROW], v[PAGES][PAGE][ROW];                 /* f16 */
} pages;

/* The entry of the page that has a position of a sequence; null: another rank's. */
static int32_t *entry(pages *p, int sequence, int64_t position) {
    if (ra_cache_owner(p->c, position) != p->rank) return NULL;
    return &p->table[sequence][ra_cache_row(p->c, position) / PAGE];
}

/* Takes a free page; -1: there is none. */
static int32_t take(pages *p) {
    for (int32_t i = 0; i < PAGES; i++)
        if (!p->users[i]) return p->users[i] = 1, i;
    return -1;
}

/* Room for the new tokens [from, to) of a sequence. */
static int extend(pages *p, int sequence, int64_t from, int64_t to) {
    for (int64_t i = from; i < to; i++) {
        int32_t *e = entry(p, sequence, i);
        if (e && *e < 0 && (*e = take(p)) < 0) return 0;
    }
    return 1;
}

/* Rolls back from n tokens to `kept`: pages without a token that is kept are given back. */
static void drop(pages *p, int sequence, int64_t n, int64_t kept) {
    for (int64_t i = (kept + PAGE - 1) / PAGE * PAGE; i < n; i += PAGE) {
        int32_t *e = entry(p, sequence, i);
        if (!e) continue;
        p->users[*e]--;
        *e = -1;
    }
}

/* Sequence `to` begins with the n tokens of `from`. Full pages are shared. The last one is copied,
 * because both sequences go on to write into it. */
static int fork_sequence(pages *p, int from, int to, int64_t n, int share) {
    for (int64_t i = 0; i < n; i += PAGE) {
        const int32_t *source = entry(p, from, i);
        if (!source) continue;
        int32_t *e = entry(p, to, i);
        *e = *source;
        p->users[*e]++;
        if (share && i + PAGE <= n) continue;
        p->users[*e]--;
        if ((*e = take(p)) < 0) return 0;
        memcpy(p->k[*e], p->k[*source], sizeof p->k[0]);
        memcpy(p->v[*e], p->v[*source], sizeof p->v[0]);
    }
    return 1;
}

static int in_use(const pages *p) {
    int n = 0;
    for (int i = 0; i < PAGES; i++) n += p->users[i] > 0;
    return n;
}

/* -------------------------------------------------------------------------- the sequences */
typedef struct result {
    int32_t ranks;
    int share, most[LANES], left;      /* pages of a rank before the end, of all ranks after it */
    float o[STEPS][SEQUENCES][HEADS * DIM];                            /* rank 0's */
} result;

/* Numbers of a row, as your model would make them: which is 0 q, 1 k, 2 v. */
static void numbers(float *x, int n, int which, int sequence, int64_t position) {
    uint32_t seed = (uint32_t)position * 9 + (uint32_t)(which * 3);
    if (position >= PROMPT) seed += (uint32_t)sequence;
    for (int i = 0; i < n; i++) {
        seed = seed * 1664525u + 1013904223u;
        x[i] = (float)(seed >> 8) / 8388608 - 1;
    }
}

/* One layer's call for the new tokens of all sequences. Every rank has all queries. */
static ra_status layer(pages *p, ra_cache *c, ra_tensors *t, const int64_t *cached,
                       const int64_t *fresh) {
    static const int widths[3] = { HEADS * DIM, ROW, ROW };
    float x[3][HEADS * DIM], *q = (float *)(uintptr_t)t->q.data;
    const int64_t rows = fresh[0] > 1 ? fresh[0] : 1;
    for (int s = 0; s < SEQUENCES; s++) {
        if (!extend(p, s, cached[s], cached[s] + fresh[s])) return RA_E_NOMEM;
        for (int64_t i = 0; i < fresh[s]; i++) {
            for (int j = 0; j < 3; j++) numbers(x[j], widths[j], j, s, cached[s] + i);
            memcpy(q + (s * rows + i) * HEADS * DIM, x[0], sizeof x[0]);
            ra_status status = ra_cache_store(c, t, s, cached[s] + i, x[1], x[2]);
            if (status) return status;
        }
    }
    return ra_infer(c, t, cached, fresh, ra_deadline_ms(60000));
}

static ra_status generate(pages *p, ra_cache *c, ra_tensors *t, result *r) {
    int64_t cached[SEQUENCES] = { 0 }, fresh[SEQUENCES] = { PROMPT, 0, 0 };
    ra_status s = layer(p, c, t, cached, fresh);
    for (int i = 0; i < SEQUENCES; i++) {
        if (i && !fork_sequence(p, 0, i, PROMPT, r->share)) return RA_E_NOMEM;
        cached[i] = PROMPT;
        fresh[i] = 1;
    }
    for (int step = 0; step < STEPS && !s; step++) {
        s = layer(p, c, t, cached, fresh);
        for (int i = 0; i < SEQUENCES; i++) cached[i]++;
        if (p->rank == 0) memcpy(r->o[step], t->o.data, sizeof r->o[step]);
        if (step % 10 == 9) {          /* the last 7 tokens of sequence 2 were a wrong guess */
            drop(p, 2, cached[2], cached[2] - 7);
            cached[2] -= 7;
        }
    }
    r->most[p->rank] = in_use(p);
    for (int i = 0; i < SEQUENCES; i++) drop(p, i, cached[i], 0);
    return s;
}

static ra_status on_rank(ra_world *world, int rank, void *user) {
    result *r = (result *)user;
    ra_desc d = ra_desc_make(HEADS, KV_HEADS, DIM, RA_F32, RA_MASK_CAUSAL);
    ra_cache_desc cd;
    ra_error why = {0};
    ra_cache *c = NULL;
    ra_tensors t = {0};
    memset(&cd, 0, sizeof cd);
    d.sequences = SEQUENCES; d.tokens = PROMPT; d.kv_tokens = MOST; d.page_tokens = PAGE;
    d.k_dtype = d.v_dtype = RA_F16;
    d.ranks = r->ranks; d.rank = rank; d.error = &why;
    cd.lanes = LANES;                  /* the same for every number of ranks: the same bits */
    cd.queries = RA_QUERIES_ALL;
    cd.workspace_bytes = ra_cache_workspace(&d, &cd) + 64;             /* + 0 if d is refused */
    void *memory = malloc(cd.workspace_bytes);
    pages *p = (pages *)calloc(1, sizeof *p);
    float *rows = (float *)malloc(2 * sizeof *rows * SEQUENCES * PROMPT * HEADS * DIM);
    cd.workspace = (void *)(((uintptr_t)memory + 63) & ~(uintptr_t)63);
    cd.workspace_bytes -= 64;
    ra_status s = RA_E_NOMEM;
    if (memory && p && rows) s = ra_cache_create(&c, &d, ra_world_transport(world, rank), &cd);
    if (!s) {
        p->c = c;
        p->rank = rank;
        memset(p->table, 0xff, sizeof p->table);
        t.q.data = rows;
        t.o.data = rows + SEQUENCES * PROMPT * HEADS * DIM;
        t.k.data = p->k;
        t.v.data = p->v;
        t.pages.table = p->table[0];
        t.pages.batch_step = ENTRIES;
        t.pages.count = PAGES;
        s = generate(p, c, &t, r);
        r->left |= in_use(p);
        if (s) why = *ra_cache_error(c);
    }
    if (s) fprintf(stderr, "rank %d: %s: %s %s\n", rank, ra_status_text(s), why.field, why.text);
    const ra_status end = ra_cache_destroy(c);
    free(rows);
    free(p);
    free(memory);
    return s ? s : end;
}

int main(void) {
    static const struct { int32_t ranks; int share; } runs[] = { {1, 0}, {1, 1}, {2, 1}, {3, 1} };
    static result r[4];
    int wrong = 0;
    printf("%d sequences with a common prompt of %d tokens, then %d tokens each; pages of %d\n",
           SEQUENCES, PROMPT, STEPS, PAGE);
    for (int i = 0; i < 4; i++) {
        r[i].ranks = runs[i].ranks;
        r[i].share = runs[i].share;
        if (ra_world_run(r[i].ranks, on_rank, &r[i], NULL)) return 1;
        const int equal = !memcmp(r[0].o, r[i].o, sizeof r[0].o);
        wrong |= !equal || r[i].left;
        printf("%d rank%s, prompt %s: pages", r[i].ranks, r[i].ranks > 1 ? "s" : "",
               r[i].share ? "shared" : "copied");
        for (int k = 0; k < r[i].ranks; k++) printf(" %d", r[i].most[k]);
        printf(", %s left; bits %s\n", r[i].left ? "SOME" : "none", equal ? "equal" : "DIFFERENT");
    }
    return wrong;
}
