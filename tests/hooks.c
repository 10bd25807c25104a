/* The implementation that hooks.h describes, the functions that reach into it, and the tests that
 * do. */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

int64_t hook_asserts, hook_broken, hook_allocations, hook_blocks;
int64_t hook_now_ns;
void (*hook_before_lock)(void);

static void hook_assert(int ok, const char *what, int line) {
    __atomic_fetch_add(&hook_asserts, 1, __ATOMIC_RELAXED);
    if (ok || __atomic_fetch_add(&hook_broken, 1, __ATOMIC_RELAXED)) return;
    printf("ringattn.h:%d: assertion: %s\n", line, what);
}

static void *hook_malloc(size_t bytes) {
    __atomic_fetch_add(&hook_allocations, 1, __ATOMIC_RELAXED);
    __atomic_fetch_add(&hook_blocks, 1, __ATOMIC_RELAXED);
    return malloc(bytes);
}

static void hook_free(void *p) {
    __atomic_fetch_add(&hook_allocations, 1, __ATOMIC_RELAXED);
    if (p) __atomic_fetch_sub(&hook_blocks, 1, __ATOMIC_RELAXED);
    free(p);
}

static int hook_lock(pthread_mutex_t *lock) {
    void (*hook)(void) = hook_before_lock;
    if (hook) {
        hook_before_lock = NULL;
        hook();
    }
    return pthread_mutex_lock(lock);
}

int clock_gettime(int clock, struct timespec *time);
int hook_gettime(int clock, struct timespec *time);

/* The macros rename the field `free` of ra_allocator too, in this file alone. */
#define RINGATTN_ASSERT(x) hook_assert((x) ? 1 : 0, #x, __LINE__)
#define RA__AMX_SOFT "tests/amx_soft.h"
#define malloc  hook_malloc
#define calloc  no_calloc              /* the library uses neither: they would not link */
#define realloc no_realloc
#define free    hook_free
#define pthread_mutex_lock hook_lock
#define clock_gettime hook_gettime
#define RINGATTN_IMPLEMENTATION
#include "ringattn.h"
#undef malloc
#undef calloc
#undef realloc
#undef free
#undef pthread_mutex_lock
#undef clock_gettime
#include "hooks.h"
#include "schedule.h"

int hook_gettime(int clock, struct timespec *time) {
    if (!hook_now_ns) return clock_gettime(clock, time);
    time->tv_sec = (time_t)(hook_now_ns / 1000000000);
    time->tv_nsec = (long)(hook_now_ns % 1000000000);
    return 0;
}

int hook_plans_agree(const ra_plan *a, const ra_plan *b) {
    return !memcmp(&a->agreed, &b->agreed, sizeof a->agreed);
}

uint32_t hook_space(void) { return ra__address_space(); }

int hook_rolls(const ra_plan *plan, int back, int rank) {
    const int rolls = back ? plan->back.rolls : plan->forward.rolls;
    return !rolls ? 0 : rank == 0 || rank == plan->d.ranks - 1 ? 1 : 2;
}

uint32_t hook_crc(uint32_t crc, const void *data, int64_t bytes) {
    return ra__crc(crc, data, bytes);
}

uint32_t hook_crc_by_table(uint32_t crc, const void *data, int64_t bytes) {
    return ra__crc_by_table(crc, (const uint8_t *)data, bytes);
}

int64_t hook_patience(const ra_plan *plan, int pass, int64_t tiles, int64_t ns) {
    const int64_t minute = 60000000000;
    ra_ring ring = { 0 };
    ring.plan = plan;
    ring.lists = pass == RA_PASS_BACKWARD ? &plan->back : &plan->forward;
    ring.counters.tiles_full = tiles;
    ring.counters.compute_ns = tiles * ns;
    return ra__ring_patience(&ring) - minute;
}

static const char *longest_text(void *ctx, int code) {
    (void)code;
    return (const char *)ctx;
}

void hook_longest_failure(int cache, ra_status status, const char *text, ra_failure *out) {
    static const ra__client *const clients[2] = { &ra__ring_client, &ra__cache_client };
    ra__talk talk = { 0 };
    ra__cause cause = ra__nobody;
    talk.client = clients[cache];
    talk.has_transport = talk.rd.trust_plans = 1;
    talk.tp.error_text = longest_text;
    talk.tp.ctx = (void *)(uintptr_t)text;
    talk.differ = UINT64_MAX;
    memset(out, 0, sizeof *out);
    out->status = status;
    out->rank = out->peer = out->code = INT32_MIN;
    out->peer = INT32_MAX;
    out->pass = INT64_MIN;
    out->chunk = out->since_progress_ns = INT64_MAX;
    cause.moved = INT64_MAX;
    ra__failure_text(&talk, out, &cause);
}

int64_t hook_open_ops(const ra_transport *t) {
    return ((const ra__shm_seat *)t->ctx)->open;
}

void hook_remember(ra_ring *ring, const ra_event *e) {
    ra__journal_put(&ring->talk.journal, e);
}

int64_t hook_parted(const ra_ring *ring) {
    return ring->talk.parted;
}

void hook_short_steps(ra_ring *ring, int64_t tiles) {
    ring->step_work = tiles * RA__TILE_WORK;
}

int64_t hook_chunks(const ra_plan *plan) { return plan->keys.chunks; }
int hook_chunk_owner(const ra_plan *plan, int64_t c) { return plan->keys.chunk[c].owner; }

/* The reports of ranks, as they are sent. */
static ra__reports hook_pack_reports(const hook_reports *h) {
    const int64_t chunks = h->plan->keys.chunks;
    ra__reports v;
    v.p = h->plan;
    v.rank = h->rank;
    v.n = h->n;
    v.bytes = ra__reports_size(h->plan);
    v.of = (uint8_t *)hook_malloc((size_t)(v.bytes * h->n));
    memset(v.of, 0, (size_t)(v.bytes * h->n));
    for (int r = 0; r < h->n; r++) {
        for (int64_t bit = 0; bit < 2 * chunks; bit++) {
            const int64_t at = r * chunks + bit / 2;
            uint8_t *need = ra__reports_need(&v, r), *held = ra__reports_held(&v, r);
            if (h->need[at] >> bit % 2 & 1)
                need[bit / 8] = (uint8_t)(need[bit / 8] | 1 << bit % 8);
            if (h->held[at] >> bit % 2 & 1)
                held[bit / 8] = (uint8_t)(held[bit / 8] | 1 << bit % 8);
        }
        for (int o = 0; o < h->plan->d.ranks; o++) {
            uint8_t *gives = ra__reports_gives(&v, r) + o / 8;
            if (h->gives[r] >> o & 1) *gives = (uint8_t)(*gives | 1 << o % 8);
        }
    }
    return v;
}

int hook_source(const hook_reports *h, int64_t c, int to) {
    ra__reports v = hook_pack_reports(h);
    int source = ra__reports_source(&v, c, to);
    hook_free(v.of);
    return source;
}

int64_t hook_lost(const hook_reports *h) {
    ra__reports v = hook_pack_reports(h);
    int64_t c = ra__reports_lost(&v);
    hook_free(v.of);
    return c;
}

static ra__kernel watched;             /* the kernel of the ring that is watched, */
static const ra__kernel *real;         /* and the kernel that it replaces */

static ra__kernel *watch(ra_ring *ring) {
    real = ring->work.kernel;
    watched = *real;
    ring->work.kernel = &watched;
    return &watched;
}

static int64_t *loads_seen;

static void watched_load(const ra__panel *p, const void *src, int64_t stride, int32_t dtype,
                         int32_t dim) {
    __atomic_fetch_add(loads_seen, 1, __ATOMIC_RELAXED);
    real->load_q(p, src, stride, dtype, dim);
}

static void (*before_put)(void);

static void watched_put(void *dst, const float *src, int32_t dtype, int32_t dim) {
    before_put();
    real->put_grad(dst, src, dtype, dim);
}

void hook_puts(ra_ring *ring, void (*before)(void)) {
    before_put = before;
    watch(ring)->put_grad = watched_put;
}

void hook_loads(ra_ring *ring, int64_t *loads) {
    loads_seen = loads;
    watch(ring)->load_q = watched_load;
}

static void (*after_work)(int64_t multiply_adds);

static void timed_fold(const ra__panel *p, const ra__keys *keys, const int8_t *kind,
                       int32_t count, const ra_desc *d, float *s) {
    int64_t n = 0;
    for (int32_t i = 0; i < count; i++) n += kind[i] != RA__EMPTY;
    real->fold(p, keys, kind, count, d, s);
    after_work(n * 64 * 64 * ((int64_t)d->k_dim + d->v_dim));
}

static void timed_fold_back(const ra__back_job *x, int32_t count) {
    real->fold_back(x, count);
    after_work(count * (int64_t)64 * 64 * (3 * x->k_dim + 2 * x->v_dim));
}

void hook_work(ra_ring *ring, void (*after)(int64_t multiply_adds)) {
    after_work = after;
    watch(ring)->fold = timed_fold;
    watched.fold_back = timed_fold_back;
}

void hook_copy_begins(const ra_transport *net, ra_transport_op *op) {
    ra__shm_seat *seat = (ra__shm_seat *)net->ctx;
    pthread_mutex_lock(&seat->inbox_lock);
    ra__shm_unlink(ra__shm_bucket_of(seat, op), op);
    ra__shm_report(op, RA__SHM_TAKEN);
    pthread_mutex_unlock(&seat->inbox_lock);
}

void hook_copy_ends(const ra_transport *net, ra_transport_op *op) {
    ra__shm_seat *seat = (ra__shm_seat *)net->ctx;
    ra__shm_report(op, RA__SHM_MOVED);
    ra__add_i32(&seat->open, -1);
    ra__shm_notify(seat, 1);
}

void hook_post_unheard(const ra_transport *net, ra_transport_op *op) {
    ra__shm_post_one((ra__shm_seat *)net->ctx, op);
}

static ra__kernel watched_tile, watched_decode;
static const ra__kernel *real_tile, *real_decode;
static int64_t *work_seen;

static void watched_fold(const ra__panel *p, const ra__keys *keys, const int8_t *kind,
                         int32_t count, const ra_desc *d, float *s) {
    int64_t n = 0;
    for (int32_t i = 0; i < count; i++) n += kind[i] != RA__EMPTY;
    __atomic_fetch_add(work_seen, n * 64 * 64 * ((int64_t)d->k_dim + d->v_dim), __ATOMIC_RELAXED);
    real_tile->fold(p, keys, kind, count, d, s);
}

static void watched_decode_fold(ra__decode_rows *f, const ra__decode_keys *x, int32_t n) {
    int64_t keys = 0;
    for (int32_t i = 0; i < n; i++) keys += x[i].seen ? x[i].n : 0;
    keys *= (f->one_row ? 1 : 4) * ((int64_t)f->d->k_dim + f->d->v_dim);
    __atomic_fetch_add(work_seen, keys, __ATOMIC_RELAXED);
    real_decode->decode_fold(f, x, n);
}

static void watched_decode_near(ra__decode_rows *f, const ra__decode_keys *x, int32_t n) {
    int64_t keys = (int64_t)n * x->n * 4 * ((int64_t)f->d->k_dim + f->d->v_dim);
    __atomic_fetch_add(work_seen, keys, __ATOMIC_RELAXED);
    real_decode->decode_near(f, x, n);
}

void hook_cache_work(ra_cache *c, int64_t *work) {
    real_tile = c->tile_kernel;
    real_decode = c->decode_kernel;
    watched_tile = *real_tile;
    watched_decode = *real_decode;
    watched_tile.fold = watched_fold;
    watched_decode.decode_fold = watched_decode_fold;
    if (real_decode->decode_near) watched_decode.decode_near = watched_decode_near;
    work_seen = work;
    c->tile_kernel = &watched_tile;
    c->decode_kernel = &watched_decode;
}

void hook_merge(int32_t isa, float *o, float *lse, const float *o2, const float *lse2, int64_t rows,
                int32_t dim) {
    ra_desc d = ra_desc_make(1, 1, dim, RA_BF16, RA_MASK_NONE);
    enum { STEP = 3 };
    float *spread = (float *)malloc((size_t)(rows * (dim + 1)) * STEP * sizeof *spread);
    float *sums = spread + rows * dim * STEP;
    const size_t bytes = (size_t)dim * sizeof *o;
    d.isa = isa;
    for (int64_t i = 0; i < rows; i++) {
        memcpy(spread + i * STEP * dim, o + i * dim, bytes);
        sums[i * STEP] = lse[i];
    }
    ra__kernel_of(&d)->merge(spread, sums, STEP, o2, lse2, rows, dim);
    for (int64_t i = 0; i < rows; i++) {
        memcpy(o + i * dim, spread + i * STEP * dim, bytes);
        lse[i] = sums[i * STEP];
    }
    free(spread);
}

int64_t hook_finish(int32_t isa, const float *m, const float *l, int32_t n) {
    ra_desc d = ra_desc_make(1, 1, 64, RA_BF16, RA_MASK_NONE);
    float factor[64], lse[64], one;
    int64_t differ = 0;
    d.isa = isa;
    ra__kernel_of(&d)->finish(m, l, n, factor, lse);
    for (int32_t i = 0; i < n; i++) {
        const float due = ra__row_finish(m[i], l[i], NULL, &one);
        differ += memcmp(&due, &factor[i], sizeof due) || memcmp(&one, &lse[i], sizeof one);
    }
    return differ;
}
