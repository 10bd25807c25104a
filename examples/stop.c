/* How to stop: a pass and a cache's call that one rank cancels while the others compute, and a rank
 * that leaves. The ranks run on threads of this program. You will see what every rank gets, what it
 * did last, and how soon. Exits with 1 if a rank gets anything else.
 *
 *   cc -O2 -std=c99 -pthread -I. -o stop examples/stop.c -lm && ./stop */
#define RINGATTN_IMPLEMENTATION
#include "ringattn.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { RANKS = 3, TOKENS = 12288, ROWS = TOKENS / RANKS, HEADS = 8, DIM = 64 };
enum { CANCEL_PASS, CANCEL_CALL, LEAVE, SCENES };

/* What a rank has, on a thread of its own. */
typedef struct rank_state {
    pthread_t thread;
    ra_world *world;
    int rank, scene;
    float *q, *k, *v, *o;
    ra_status status;
    ra_failure failure;                /* {0}: there was none */
    ra_event last;                     /* what the ring or cache did last */
} rank_state;

static int64_t cancelled_ns;           /* when rank 1 gave up */

/* Steps until the pass ends. Rank 1 has had enough after 20 steps. Any other thread may cancel as
 * well: a user's button, a timer. Then every ra_step returns RA_E_CANCELLED. */
static ra_status some_pass(const rank_state *x, ra_ring *ring, const ra_plan *plan,
                           const ra_tensors *t) {
    ra_job job = {0};
    ra_status s;
    job.plan = plan;
    job.tensors = t;
    s = ra_begin(ring, &job);
    for (int i = 0; s >= 0 && (i == 0 || s != RA_OK); i++) {
        if (x->rank == 1 && i == 20) {
            cancelled_ns = ra_now_ns();
            ra_ring_cancel(ring);
        }
        s = ra_step(ring, 0);
        if (s == RA_WAIT) (void)ra_step_wait(ring, RA_NO_DEADLINE);
    }
    (void)ra_finish(ring, ra_deadline_ms(1000));       /* from here on no rank reads q, k and v */
    return s;
}

static ra_status pass(rank_state *x) {
    ra_desc d = ra_desc_make(HEADS, HEADS, DIM, RA_F32, RA_MASK_NONE);
    ra_plan *plan = NULL;
    ra_ring *ring = NULL;
    ra_tensors t = {0};
    d.tokens = TOKENS; d.ranks = RANKS; d.rank = x->rank; d.layout.kind = RA_LAYOUT_CONTIGUOUS;
    t.q.data = x->q; t.k.data = x->k; t.v.data = x->v; t.o.data = x->o;
    ra_status s = ra_plan_create(&plan, &d, NULL);
    if (!s) s = ra_ring_create(&ring, plan, ra_world_transport(x->world, x->rank), NULL);
    if (!s && x->scene == LEAVE && x->rank == 1) {
        cancelled_ns = ra_now_ns();                    /* it could not read its part of a file */
        ra_world_leave(x->world, x->rank, RA_E_IO);
        s = RA_E_IO;
    } else if (!s) {
        s = some_pass(x, ring, plan, &t);
        (void)ra_ring_failure(ring, &x->failure);
        (void)ra_ring_events(ring, &x->last, 1);
    }
    (void)ra_ring_destroy(ring);
    ra_plan_destroy(plan);
    return s;
}

static ra_status call(rank_state *x) {
    ra_desc d = ra_desc_make(HEADS, HEADS, DIM, RA_F32, RA_MASK_CAUSAL);
    ra_cache *c = NULL;
    ra_tensors t = {0};
    const int64_t cached = 0, fresh = TOKENS / 2;
    d.tokens = d.kv_tokens = TOKENS / 2; d.ranks = RANKS; d.rank = x->rank;
    t.q.data = x->q; t.k.data = x->k; t.v.data = x->v; t.o.data = x->o;
    ra_status s = ra_cache_create(&c, &d, ra_world_transport(x->world, x->rank), NULL);
    if (!s) s = ra_infer_begin(c, &t, &cached, &fresh, RA_NO_DEADLINE);
    for (int i = 0; s >= 0 && (i == 0 || s != RA_OK); i++) {
        if (x->rank == 1 && i == 3) {
            cancelled_ns = ra_now_ns();
            ra_infer_cancel(c);
        }
        s = ra_infer_step(c, 0);
    }
    if (c) {
        (void)ra_cache_failure(c, &x->failure);
        (void)ra_cache_events(c, &x->last, 1);
    }
    (void)ra_cache_destroy(c);
    return s;
}

static void *rank_main(void *arg) {
    rank_state *x = (rank_state *)arg;
    x->status = x->scene == CANCEL_CALL ? call(x) : pass(x);
    if (x->scene != LEAVE) ra_world_leave(x->world, x->rank, x->status);
    return NULL;
}

int main(void) {
    static const char *const title[SCENES] = {
        "Rank 1 cancels its pass", "Rank 1 cancels a call of its cache",
        "Rank 1 leaves with RA_E_IO" };
    static const ra_status first[SCENES] = { RA_E_CANCELLED, RA_E_CANCELLED, RA_E_IO };
    const size_t n = (size_t)ROWS * HEADS * DIM;
    rank_state x[RANKS];
    int wrong = 0;
    float *memory = (float *)calloc(4 * RANKS * n, sizeof *memory);
    if (!memory) return 1;
    for (int scene = 0; scene < SCENES; scene++) {
        ra_world_desc wd = {0};
        ra_world *world = NULL;
        wd.ranks = RANKS;
        if (ra_world_create(&world, &wd)) return 1;
        for (int r = 0; r < RANKS; r++) {
            memset(&x[r], 0, sizeof x[r]);
            x[r].world = world;
            x[r].rank = r;
            x[r].scene = scene;
            x[r].q = memory + 4 * n * (size_t)r;
            x[r].k = x[r].q + n;
            x[r].v = x[r].k + n;
            x[r].o = x[r].v + n;
            if (pthread_create(&x[r].thread, NULL, rank_main, &x[r])) return 1;
        }
        for (int r = 0; r < RANKS; r++) (void)pthread_join(x[r].thread, NULL);
        printf("%s. All have noticed after %.1f ms.\n", title[scene],
               (double)(ra_now_ns() - cancelled_ns) * 1e-6);
        for (int r = 0; r < RANKS; r++) {
            char line[RA_TEXT_BYTES];
            printf("  rank %d: %s\n", r, ra_status_text(x[r].status));
            if (x[r].failure.status) printf("    %s\n", x[r].failure.text);
            if (x[r].last.kind) printf("   %s\n", ra_event_text(&x[r].last, cancelled_ns, line));
            wrong |= x[r].status != (r == 1 ? first[scene] : RA_E_ABORTED);
        }
        ra_world_destroy(world);
    }
    free(memory);
    return wrong;
}
