#ifndef RINGATTN_TESTS_HOOKS_H
#define RINGATTN_TESTS_HOOKS_H

/* The implementation under observation. hooks.c compiles ringattn.h once, with its assertions on,
 * with its allocations and locks routed through the test, and with AMX in software. Programs that
 * watch what the library does are linked with that object instead of the plain one. What is not in
 * the API is reached through the functions below, so that no test repeats a private declaration. */
#include "harness.h"
#include "ringattn.h"

extern int64_t hook_asserts, hook_broken;      /* assertions that were evaluated, that failed */
extern int64_t hook_allocations, hook_blocks;  /* calls of malloc and free; blocks now allocated */

/* The time of the library's clock; 0: that of the system. */
extern int64_t hook_now_ns;

/* Called once, just before the library next takes a lock; null: not called. */
extern void (*hook_before_lock)(void);

/* As h_main. A failed assertion of the library fails the program. */
static inline int hook_main(int argc, char **argv, const h_test *tests, size_t n) {
    int failed = h_main(argc, argv, tests, n);
    if (hook_broken) printf("%lld assertions failed\n", (long long)hook_broken);
    return failed || hook_broken;
}

/* A world of that many ranks. */
static inline ra_world *hook_world(int ranks) {
    ra_world *world = NULL;
    ra_world_desc wd = { 0 };
    wd.ranks = ranks;
    CHECK_EQ(ra_world_create(&world, &wd), RA_OK);
    return world;
}

/* 1: ranks with these plans find no difference when they compare them. */
int hook_plans_agree(const ra_plan *a, const ra_plan *b);

/* The number of the caller's address space. */
uint32_t hook_space(void);

/* Messages that a rank sends, and as many that it gets, in the roll call of a pass. */
int hook_rolls(const ra_plan *plan, int back, int rank);

/* CRC-32C of data that follow those of crc; by the table, not inverted. */
uint32_t hook_crc(uint32_t crc, const void *data, int64_t bytes);
uint32_t hook_crc_by_table(uint32_t crc, const void *data, int64_t bytes);

/* How long beyond 60 s the default watchdog waits for a rank that has computed `tiles` tiles of
 * `ns` each. */
int64_t hook_patience(const ra_plan *plan, int pass, int64_t tiles, int64_t ns);

/* The failure of a ring or a cache with this status whose sentence is longest: all numbers have all
 * digits, ranks disagree about everything, and text is the transport's own. */
void hook_longest_failure(int cache, ra_status status, const char *text, ra_failure *out);

/* Operations of a world's rank that are pending. */
int64_t hook_open_ops(const ra_transport *t);

/* Makes the ring remember this event. */
void hook_remember(ra_ring *ring, const ra_event *e);

/* 1 once the ring has left its transport after a failure. */
int64_t hook_parted(const ra_ring *ring);

/* Limits the steps of the pass that has begun to this many tiles, so that tasks stop within
 * chunks. */
void hook_short_steps(ra_ring *ring, int64_t tiles);

/* What n ranks of a plan report when they resume a pass. Bit i of need[r * chunks + c] or held[..]:
 * rank r of them needs or holds piece i of chunk c. Bit o of gives[r]: it can give the keys of rank
 * o of the plan. */
typedef struct hook_reports {
    const ra_plan *plan;
    const int32_t *rank;               /* [n] */
    int n;
    const uint8_t *need, *held;
    const uint32_t *gives;
} hook_reports;

/* Which of them sends chunk c to number `to`; -1: none can. */
int hook_source(const hook_reports *v, int64_t c, int to);

/* The first chunk that no rank can give to one that needs it; -1: there is none. */
int64_t hook_lost(const hook_reports *v);

/* Owner and number of chunks of keys. */
int64_t hook_chunks(const ra_plan *plan);
int hook_chunk_owner(const ra_plan *plan, int64_t c);

/* From now on `before` is called before each row of gradients that the pass adds to the caller's.
 * One ring at a time; between begin and the first step. */
void hook_puts(ra_ring *ring, void (*before)(void));

/* From now on *loads counts the panels of queries that the pass loads. One ring at a time; between
 * begin and the first step. */
void hook_loads(ra_ring *ring, int64_t *loads);

/* From now on `after` is called after each call of a kernel, with its multiply-adds: whole tiles.
 * One ring at a time; between begin and the first step. */
void hook_work(ra_ring *ring, void (*after)(int64_t multiply_adds));

/* Bundled world: a peer begins to copy a message into a receive of this rank, or has finished. */
void hook_copy_begins(const ra_transport *net, ra_transport_op *op);
void hook_copy_ends(const ra_transport *net, ra_transport_op *op);

/* Bundled world: posts an op like a rank that has not heard of an abort. */
void hook_post_unheard(const ra_transport *net, ra_transport_op *op);

/* From now on *work counts the multiply-adds of calls on this cache: whole tiles, and all four rows
 * in the decoding form. One cache at a time. */
void hook_cache_work(ra_cache *c, int64_t *work);

/* ra_merge by the kernel of an instruction set that this machine has, into rows that are
 * apart. */
void hook_merge(int32_t isa, float *o, float *lse, const float *o2, const float *lse2, int64_t rows,
                int32_t dim);

/* All of test_schedule. */
int hook_schedule(int argc, char **argv);

/* Rows out of n <= 64 whose factor or LSE at the end of a panel differs from ra__row_finish. */
int64_t hook_finish(int32_t isa, const float *m, const float *l, int32_t n);

#endif
