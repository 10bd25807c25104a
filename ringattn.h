/* ringattn.h - v0.2.0 - exact attention for sequences that do not fit one machine
 *
 * One C header for CPUs, without dependencies. It computes attention, forward and backward, on one
 * machine or on a sequence sharded across ranks (ring attention: Liu, Zaharia, Abbeel, arXiv
 * 2310.01889). The result is that of ordinary attention, not an approximation, and with the usual
 * layouts it has the same bits for every number of ranks.
 *
 *   You want                                             Call
 *   one call with the arguments small engines share     ra_attention_simple
 *   prefill or decode over a cache, any dtype or mask   ra_attention
 *   gradients on one machine                            ra_attention_backward
 *   a sharded sequence: once                            ra_ring_once
 *     for every layer and step                          ra_plan_create, ra_ring_create, ra_forward
 *     inference over a cache that is sharded            ra_cache_create, ra_infer
 *   gradients of a sharded sequence                     ra_backward
 *   passes on your own threads, without blocking        ra_begin and ra_step, or ra_join
 *     the same for inference                            ra_infer_begin and _step, ra_infer_join
 *   ranks as threads of one process                     ra_world_run
 *   your own network                                    ra_transport
 *   FLOPs, bytes, memory and time in advance            ra_plan_query, ra_plan_predict, ra_estimate
 *
 * In one C or C++ file of a program define RINGATTN_IMPLEMENTATION before the include; everywhere
 * else only include the header. Link with -lpthread (not with RINGATTN_NO_THREADS). No -m flags are
 * needed: kernels for every instruction set are compiled in and chosen at run time. C++ compilers
 * may warn about `= {0}`; write `= {}` there.
 *
 * Program 1: decode over a cache (cc -O2 decode.c -lpthread).
 *
 *   #define RINGATTN_IMPLEMENTATION
 *   #include "ringattn.h"
 *   static float q[8][64], o[8][64], keys[4096][2][64], values[4096][2][64];   // the cache
 *
 *   int main(void) {
 *       ra_desc d = ra_desc_make(8, 2, 64, RA_F32, RA_MASK_CAUSAL);   // 8 query heads, 2 KV heads
 *       ra_tensors t = {0};
 *       t.q.data = q; t.k.data = keys; t.v.data = values; t.o.data = o;
 *       d.tokens = 1;                             // one new token per call
 *       for (int n = 0; n < 100; n++) {           // n tokens are cached already
 *           keys[n][0][0] = values[n][0][0] = q[0][0] = 1;   // your model: q, row n of k, v
 *           d.q_offset = n;                       // the new token sees rows 0..n
 *           if (ra_attention(&d, &t, NULL, 0, 0, 1)) return 1;
 *       }
 *       return 0;
 *   }
 *
 * Program 2: a prompt in pieces of 512 tokens over a cache in f16, on four threads of the engine.
 *
 *   #define RINGATTN_IMPLEMENTATION
 *   #include "ringattn.h"
 *   #include <pthread.h>
 *   #include <stdlib.h>
 *   static ra_desc d; static ra_tensors t; static void *memory; static size_t bytes;
 *   static float q[512][8][64], o[512][8][64];
 *   static uint16_t keys[4096][2][64], values[4096][2][64];
 *
 *   static void *work(void *ith) {                // every thread makes the same call
 *       if (ra_attention(&d, &t, memory, bytes, (int)(intptr_t)ith, 4)) abort();
 *       return NULL;
 *   }
 *   int main(void) {
 *       d = ra_desc_make(8, 2, 64, RA_F32, RA_MASK_CAUSAL);
 *       d.k_dtype = d.v_dtype = RA_F16;
 *       t.q.data = q; t.k.data = keys; t.v.data = values; t.o.data = o;
 *       d.tokens = 512; d.q_offset = 4096 - 512;  // the largest call sizes the workspace
 *       bytes = ra_attention_bytes(&d, 4);
 *       memory = malloc(bytes);
 *       for (d.q_offset = 0; d.q_offset < 4096; d.q_offset += 512) {   // your model: q, 512 keys
 *           pthread_t id[4];
 *           for (int i = 0; i < 4; i++) pthread_create(&id[i], NULL, work, (void *)(intptr_t)i);
 *           for (int i = 0; i < 4; i++) pthread_join(id[i], NULL);
 *       }
 *       free(memory);
 *       return 0;
 *   }
 *
 * Program 3: four ranks in one process, 4096 tokens, causal.
 *
 *   #define RINGATTN_IMPLEMENTATION
 *   #include "ringattn.h"
 *   #include <stdio.h>
 *   static float q[4][1024][8][64], k[4][1024][2][64], v[4][1024][2][64], o[4][1024][8][64];
 *
 *   static ra_status on_rank(ra_world *world, int rank, void *user) {
 *       ra_desc d = ra_desc_make(8, 2, 64, RA_F32, RA_MASK_CAUSAL);
 *       ra_tensors t = {0};
 *       ra_error why;
 *       d.tokens = 4096; d.ranks = 4; d.rank = rank; d.layout.kind = RA_LAYOUT_ZIGZAG;
 *       d.error = &why;
 *       t.q.data = q[rank]; t.k.data = k[rank]; t.v.data = v[rank]; t.o.data = o[rank];
 *       ra_status s = ra_ring_once(&d, ra_world_transport(world, rank), &t, RA_NO_DEADLINE);
 *       if (s) fprintf(stderr, "rank %d: %s: %s\n", rank, why.field, why.text);
 *       return user ? RA_E_STATE : s;
 *   }
 *   int main(void) { return ra_world_run(4, on_rank, NULL, NULL) ? 1 : 0; }
 *
 * Program 4: one plan and one ring for all layers, over a network of yours. send_receive sends s
 * and receives r at the same time and returns 0 when both are done.
 *
 *   #define RINGATTN_IMPLEMENTATION
 *   #include "ringattn.h"
 *   int send_receive(int to, const void *s, size_t s_len, int from, void *r, size_t r_len);
 *
 *   static int exchange(void *ctx, int to, const void *s, size_t s_len, int from, void *r,
 *                       size_t r_len, uint64_t tag, int64_t deadline_ns) {
 *       (void)ctx; (void)tag; (void)deadline_ns;  // a peer of RA_NO_PEER has length 0
 *       return send_receive(to, s, s_len, from, r, r_len) ? RA_E_IO : RA_OK;
 *   }
 *   int attend_layers(int rank, int ranks, int layers, const ra_tensors *layer) {
 *       ra_plan *plan = NULL; ra_ring *ring = NULL; ra_transport net = {0};
 *       ra_desc d = ra_desc_make(8, 2, 64, RA_F32, RA_MASK_CAUSAL);
 *       d.tokens = 4096; d.ranks = ranks; d.rank = rank; d.layout.kind = RA_LAYOUT_ZIGZAG;
 *       net.size = sizeof net; net.abi = RA_TRANSPORT_ABI; net.sendrecv = exchange;
 *       ra_status s = ra_plan_create(&plan, &d, NULL);
 *       if (!s) s = ra_ring_create(&ring, plan, &net, NULL);
 *       for (int i = 0; i < layers && !s; i++)
 *           s = ra_forward(plan, ring, &layer[i], RA_NO_DEADLINE);
 *       ra_ring_destroy(ring);
 *       ra_plan_destroy(plan);
 *       return s;
 *   }
 *
 * Program 5: decode over a cache that is split over three ranks, here threads of one process.
 *
 *   #define RINGATTN_IMPLEMENTATION
 *   #include "ringattn.h"
 *   static float q[8][64], k[2][64], v[2][64], o[3][8][64];
 *   static float keys[3][1376][2][64], values[3][1376][2][64];    // ra_cache_rows of each rank
 *
 *   static ra_status on_rank(ra_world *world, int rank, void *user) {
 *       ra_desc d = ra_desc_make(8, 2, 64, RA_F32, RA_MASK_CAUSAL);
 *       ra_cache_desc cd = {0}; ra_cache *cache = NULL; ra_tensors t = {0};
 *       d.tokens = 1; d.kv_tokens = 4096; d.ranks = 3; d.rank = rank;    // the most new, of all
 *       cd.queries = RA_QUERIES_ALL;              // every rank passes the token's q and gets its o
 *       t.q.data = q; t.k.data = keys[rank]; t.v.data = values[rank]; t.o.data = o[rank];
 *       ra_status s = ra_cache_create(&cache, &d, ra_world_transport(world, rank), &cd);
 *       for (int64_t n = 0, fresh = 1; n < 100 && !s; n++) {    // your model: q, k, v of token n
 *           s = ra_cache_store(cache, &t, 0, n, k[0], v[0]);    // if this rank holds position n
 *           if (!s) s = ra_infer(cache, &t, &n, &fresh, RA_NO_DEADLINE);
 *       }
 *       ra_cache_destroy(cache);
 *       return user ? RA_E_STATE : s;
 *   }
 *   int main(void) { return ra_world_run(3, on_rank, NULL, NULL) ? 1 : 0; }
 *
 * What the library does not do: projections, RoPE (rotate before you cache), tensor or pipeline
 * parallelism (they work around it), GPUs, networking of its own except threads. Sharding a
 * sequence of fewer than about 8K tokens gains nothing. A forked child must not use rings or worlds
 * created before fork(). Do not call the library from signal handlers or with thread cancellation
 * enabled. It needs gcc or clang, on Linux or mingw; x86-64 and AArch64 have kernels of their own.
 *
 * Words that this file uses
 *   rank      one participant of a ring: a process, or a thread of the bundled world
 *   shard     the tokens of the sequence that one rank stores
 *   run       rows at positions first, first + stride, ...
 *   block     up to RA_BLOCK_TOKENS (64) consecutive rows of a run: the grid of cuts and sums
 *   tile      one block of queries against one block of keys, of one head
 *   chunk     consecutive blocks of one rank's shard that travel in one message
 *   hop       the way of a chunk from one rank to the next
 *   pass      one forward or backward, on all ranks of a ring
 *   plan      the schedule of a rank for passes of one shape: knowledge only
 *   ring      a rank's memory, its transport and the pass in progress
 *   lane      a part of a sharded KV cache: every n-th group of 16 positions
 *   world     ranks as threads of this process, with their transports
 *   task      inside: up to 256 query rows of one head group that one thread works on
 *   panel     inside: the rows of a task that one call of a kernel holds in registers and cache
 *   segment   inside: a piece of a run
 * and LSE is the natural log of the sum of exp of a row's scores.
 *
 * How a call runs
 *   ra_attention   checks the descriptor and tensors (ra__local_check), picks a form and runs it:
 *                  few (token, head) pairs per KV head by ra__decode_run (DECODE), everything else
 *                  by ra__local_run (LOCAL), which gives each thread its tasks. A task loads query
 *                  rows (ra__task_load), folds one block of keys after the other through the table
 *                  of kernels (ra__task_fold, FORWARD; KERNEL), divides and writes o.
 *   ra_forward     is ra_begin, then ra_step until done. A step either moves messages or claims a
 *                  task and folds the next chunk for it by the same ra__task_fold (RING). Which
 *                  chunks, in which order, from and to whom: ra_plan_create wrote those lists
 *                  (SCHEDULE, PLAN).
 *   ra_infer       is ra_infer_begin, then ra_infer_step until done. A call has a few stages with
 *                  messages between them: attend some rows to the keys of one rank, and at last
 *                  merge. A step goes on with an item of a stage: the tasks of LOCAL or DECODE for
 *                  some rows (CACHE).
 *
 * Contents. Each room uses only rooms above it.
 *   API          types, descriptors, functions, the transport's contract; ends with a stop sign
 *   PLATFORM     compiler, system and processor; strict floating point
 *   TYPES        query blocks, blocks of keys, and the table of functions of one instruction set
 *   CLOCK        monotonic time, sleep
 *   ATOMICS      loads acquire, stores release
 *   MEM          sentences of refusal, memory from the caller's allocator
 *   MATH         exp, log, half floats; merging normalised partial results
 *   KERNEL       the tile: one block of keys folded into 64 query rows; included once per ISA
 *   SCALAR       its operations in plain C
 *   AVX2         its operations on 8 floats
 *   AVX512       its operations on 16 floats
 *   AVX512 BF16  a body of its own for bf16, by dot products of pairs
 *   AMX          the same by tiles
 *   NEON         its operations on 4 floats
 *   DISPATCH     which instruction sets this processor has
 *   GEOMETRY     positions, masks and chunks: which rows a rank holds, and who sees whom
 *   TENSORS      views, and checks of a call's tensors
 *   CHECK        checks of a descriptor, and its defaults
 *   FORWARD      query rows against one chunk, with our kernels or somebody else's
 *   BACKWARD     gradients of query rows and of the keys of one chunk
 *   LOCAL        one call on one rank, by tasks that its threads share
 *   DECODE       the same for few query rows
 *   ATTENTION    ra_attention and its relatives: the forward calls of one rank
 *   LOCAL BACKWARD   gradients on one rank; what follows is needed for rings only
 *   SCHEDULE     chunks, their order and how far they travel; proof against deadlock
 *   WORKSPACE    the memory of a ring
 *   PLAN         the schedule of a rank, and its figures
 *   TRANSPORT    checks and defaults of transports
 *   SHM          the bundled world: ranks as threads
 *   RING         one rank's pass as a state machine
 *   CACHE        inference over a sharded KV cache
 *   ESTIMATE     how long a context fits, how large a block hides a hop
 *
 * Configuration, defined before the include that has the implementation:
 *   RINGATTN_IMPLEMENTATION   this is the one file with the code
 *   RINGATTN_STATIC           makes all functions static (define it wherever you include the file)
 *   RINGATTN_API              replaces `extern` before every public function
 *   RINGATTN_ASSERT(x)        checks the library's own invariants; default: nothing
 *   RINGATTN_NO_THREADS       no pthreads: no ra_world; rings on your own threads still work
 *   RINGATTN_SCALAR           only the scalar kernels, on any processor
 *   RINGATTN_SELF             the name by which the file includes itself, where the compiler has
 *                             no __FILE_NAME__
 *
 * Promises
 *   Memory   A plan is one allocation, a ring is one or none (your workspace); nothing allocates
 *            during a pass. The plan reports every byte in advance. Beside the running state of the
 *            local queries (forward it is kept in an f32 o; backward it is the f32 sums of dQ, or
 *            of dK and dV) a rank needs scratch for each thread and a few chunks: forward `buffers`
 *            + 2 messages. A backward message carries the chunk and its f32 gradients: `buffers` +
 *            2 of them and 4 chunks of gradients, or with RA_CAP_SHARED ranks + 3 chunks of
 *            gradients, because that many of a rank's own chunks are on their way at once. (With
 *            RA_TRAVEL_Q these too are whole messages.) Where messages are copied, default chunks
 *            make that less than K and V (RA_TRAVEL_Q: Q and O) of a shard of 32K tokens or more.
 *            A shorter shard has relatively larger buffers, up to 8192 keys: computing hides
 *            only transfers for which there is room.
 *   Threads  Plans may be shared. A ring runs one pass at a time, stepped by any number of your
 *            threads. The library starts threads only in ra_world_run.
 *   Errors   Every call that can fail returns a status; refusals name the field and say why.
 *            Nothing is printed, nothing aborts, and no wait is unbounded, except inside a sendrecv
 *            callback of yours that ignores its deadline.
 *   Numbers  Scores, softmax and sums are f32 with two-level summation. For any number of ranks an
 *            element of an f32 o is within 2^-23 (1 + scale |q| |k| + sqrt(keys) / 8) max |V| of
 *            double precision. |q| and |k| are Euclidean norms; keys, the largest |k| and max |V|
 *            are those that the row sees; what ALiBi and bias add to a score counts like
 *            scale |q| |k|. On unit-normal data of up to 128 dims every row measured was within
 *            3e-6, and all but 1 in 100,000 within 2e-6. Gradients are summed in the same way.
 *            With bf16 arithmetic (see RA_ISA_*) the softmax weights are rounded to bf16, in the
 *            numerator and in the denominator; the backward pass also rounds dO and the score
 *            gradients. Bits do not depend on threads, chunks, timing or transport, and with shards
 *            cut on the grid of 64 tokens (contiguous and zigzag) they do not depend on the number
 *            of ranks. A row without keys gives 0, and its LSE is -inf, or the sink where sinks are
 *            given. NaN in Q stays in its row; NaN in K or V reaches the rows that see it and no
 *            others. V up to 1e28 stays finite (weights are as large as 2^32 until they are
 *            divided). All this also holds if your program is compiled with -Ofast.
 *
 *                       scalar  AVX2  AVX-512  NEON
 *   f32                   +      +      +      +
 *   f16, bf16 storage,    +      +      +      +   arithmetic in f32, widened block by block
 *     q8_0 for K and V
 *   every mask            +      +      +      +
 *   softcap, ALiBi,       +      +      +      +
 *     bias, sinks
 *   GQA, Dk != Dv, MLA    +      +      +      +
 *   decoding form         +      +      +      +   ra_attention with few query rows
 *   gradients, dropout    +      +      +      +
 *   bf16 arithmetic       -      -      +      -   where q, k and v are bf16, by AVX512_BF16 or
 *                                                  AMX; not under dropout
 *
 * SPDX-License-Identifier: MIT OR Unlicense (both texts at the end)
 */
#if !defined(RINGATTN_H)
#define RINGATTN_H

#if !defined(__GNUC__)
#error "ringattn.h needs gcc 12 or later, or clang 14 or later"
#endif

#include <stddef.h>
#include <stdint.h>

#ifndef RINGATTN_API
#ifdef RINGATTN_STATIC
#define RINGATTN_API static __attribute__((unused))
#else
#define RINGATTN_API extern
#endif
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ========================================================================== API
 * Zero. Every struct works from {0}, and every field that is 0 has its default, which is given at
 * the field. Where a default could give wrong numbers (dtypes, mask.kind, head counts, tokens) 0 is
 * refused. The word "step" in a name marks the few distances whose 0 means "the same for all".
 *
 * Agreed and local fields. AGREED fields must be equal on every rank. Every message carries a
 * 64-byte frame with a hash of these fields as you set them (0 is hashed as 0, not as the default)
 * and of the call's alibi, sinks and, with dropout, seed. If ranks disagree the pass fails; it
 * never gives a wrong result. Usually the status is RA_E_MISMATCH and ra_failure.text names the
 * group of fields. If the disagreement changes message sizes or peers, the status is RA_E_TRUNC,
 * RA_E_PEER or RA_E_TIMEOUT instead. All other fields are local.
 *
 * Units. Strides are bytes, dims are elements, positions and tokens are tokens, *_ns nanoseconds,
 * *_s seconds. B sequences, Hq and Hkv heads, Tq and Tk tokens, Dk and Dv elements per row of K, V.
 *
 * Lifetimes. Arrays of a descriptor are copied by ra_plan_create; one call on one rank reads them
 * during the call. Destroy rings first, then transports (worlds), then plans. */

#define RINGATTN_VERSION 0x000200      /* major << 16 | minor << 8 | patch */
#define RA_MAX_POSITION  2147483632    /* positions are below it: they are int32 in the kernels */
#define RA_BLOCK_TOKENS  64            /* the grid of tiles, cuts and sums: 64 tokens per block */
#define RA_NO_DEADLINE   0             /* deadlines are absolute: see ra_deadline_ms */
#define RA_NO_PEER       (-1)

/* -------------------------------------------------------------------------- status
 * 0 is done, positive is "not done, nothing wrong", negative is an error. Errors above
 * RA_E_MISMATCH are refusals: nothing was done, everything is as it was. From RA_E_MISMATCH on a
 * pass has failed, and its ring stays failed: later calls return the same status
 * (ra_ring_failure has the details). */
#define RA_STATUS_LIST(X)                                                                        \
    X(RA_OK,             0, "done")                                                              \
    X(RA_AGAIN,          1, "something was done, call again")                                    \
    X(RA_WAIT,           2, "nothing to do for this thread now: call again or do other work")    \
    X(RA_E_NULL,        -1, "a required pointer is null")                                        \
    X(RA_E_UNSET,       -2, "a field without a safe default was left zero")                      \
    X(RA_E_RANGE,       -3, "a value lies outside its range")                                    \
    X(RA_E_ENUM,        -4, "an unknown constant")                                               \
    X(RA_E_OVERFLOW,    -5, "sizes overflow 64 bits or positions reach RA_MAX_POSITION")         \
    X(RA_E_SHAPE,       -6, "shapes or fields contradict each other")                            \
    X(RA_E_STRIDE,      -7, "a stride does not suit the element or the rows")                    \
    X(RA_E_ALIGN,       -8, "an address is not aligned")                                         \
    X(RA_E_POSITIONS,   -9, "positions contradict layout, mask or row count")                    \
    X(RA_E_UNSUPPORTED,-10, "valid, but not supported by this path")                             \
    X(RA_E_ISA,        -11, "the forced instruction set is not available here")                  \
    X(RA_E_WORKSPACE,  -12, "the workspace is too small")                                        \
    X(RA_E_NOMEM,      -13, "the allocator returned null")                                       \
    X(RA_E_TRANSPORT,  -14, "the transport lacks a callback or property that this plan needs")   \
    X(RA_E_ABI,        -15, "struct size or ABI number of a vtable is not known here")           \
    X(RA_E_BUSY,       -16, "a pass is under way in this ring")                                  \
    X(RA_E_STATE,      -17, "call out of order")                                                 \
    X(RA_E_MISMATCH,   -30, "ranks disagree on an agreed value")                                 \
    X(RA_E_IO,         -31, "the transport failed")                                              \
    X(RA_E_PEER,       -32, "a peer is gone or silent")                                          \
    X(RA_E_TIMEOUT,    -33, "the deadline passed")                                               \
    X(RA_E_CANCELLED,  -34, "ra_ring_cancel was called on this rank")                            \
    X(RA_E_ABORTED,    -35, "another rank failed or was cancelled")                              \
    X(RA_E_TRUNC,      -36, "a message was shorter or longer than agreed")                       \
    X(RA_E_PROTO,      -37, "a frame was damaged, stale, doubled or out of order")               \
    X(RA_E_ENGINE,     -38, "the block engine reported an error")                                \
    X(RA_E_UNSAFE,     -39, "the transport may still touch buffers: they were leaked on purpose")

typedef int ra_status;
#define RA__ENUM(name, value, text) name = (value),
enum { RA_STATUS_LIST(RA__ENUM) RA__STATUS_END = 99 };
#undef RA__ENUM

RINGATTN_API const char *ra_status_text(ra_status status);           /* never null */
RINGATTN_API int32_t     ra_version(void);                           /* RINGATTN_VERSION */

/* Why something was refused. Status and field together identify one check. */
typedef struct ra_error {
    ra_status status;
    char field[40];                    /* "mask.window" */
    char text[216];                    /* a sentence with the offending value and what is allowed */
} ra_error;

/* -------------------------------------------------------------------------- time and memory
 * The library's monotonic clock. Deadlines are absolute times on it; 0 is none. (A ring may have a
 * clock of its own: see ra_ring_desc.clock_ns.) */
RINGATTN_API int64_t ra_now_ns(void);
RINGATTN_API int64_t ra_deadline_ms(int64_t ms);                     /* ra_now_ns() + ms */

typedef struct ra_allocator {          /* all zero: malloc and free; otherwise set both callbacks */
    void *(*alloc)(void *ctx, size_t bytes, size_t align);           /* may return null */
    void  (*free)(void *ctx, void *ptr, size_t bytes);
    void  *ctx;
} ra_allocator;

/* -------------------------------------------------------------------------- constants
 * Stored in int32_t fields. */
enum { RA_DTYPE_UNSET, RA_F32, RA_F16, RA_BF16, RA_Q8_0 };
/* Instruction sets. AVX512_BF16 and AMX multiply bf16 where q, k and v are all bf16 (not under
 * dropout; AMX not in the decoding form); otherwise they are the same as AVX512. AUTO is the
 * fastest that this processor has. */
enum { RA_ISA_AUTO, RA_ISA_SCALAR, RA_ISA_AVX2, RA_ISA_AVX512, RA_ISA_AVX512_BF16, RA_ISA_AMX,
       RA_ISA_NEON };
enum { RA_MASK_UNSET, RA_MASK_NONE, RA_MASK_CAUSAL, RA_MASK_INTERVALS };
enum { RA_LAYOUT_UNSET, RA_LAYOUT_CONTIGUOUS, RA_LAYOUT_ZIGZAG, RA_LAYOUT_STRIPED, RA_LAYOUT_RUNS,
       RA_LAYOUT_ARRAY };
enum { RA_SCORE_ALIBI = 1, RA_SCORE_BIAS = 2, RA_SCORE_SINKS = 4 };  /* flags */
/* The order in which a row sums blocks of keys. DESCENDING: from its own block downwards.
 * ASCENDING: from the first to the last (zigzag: the mirrored pairs of blocks {k, n - 1 - k}). */
enum { RA_ORDER_DESCENDING = 1, RA_ORDER_ASCENDING = 2 };
/* What travels in a backward pass: K and V with their gradients, or Q, dO, LSE and delta with
 * dQ. */
enum { RA_TRAVEL_AUTO, RA_TRAVEL_KV, RA_TRAVEL_Q };
/* How a gradient returns to its owner: in one message from the last rank that used the chunk, or on
 * around the ring from neighbour to neighbour. */
enum { RA_RETURN_DIRECT, RA_RETURN_RING };
enum { RA_PASS_FORWARD, RA_PASS_BACKWARD };
RINGATTN_API int32_t     ra_isa_best(void);             /* what RA_ISA_AUTO selects here */
RINGATTN_API int32_t     ra_isa_available(int32_t isa); /* 1: can be forced here */
RINGATTN_API const char *ra_isa_name(int32_t isa);      /* "avx512"; never null */

/* -------------------------------------------------------------------------- views
 * Element (b, t, h, d) is at data + b*batch_stride + t*token_stride + h*head_stride + d*element.
 * Rows are contiguous. Strides are bytes: keys in a cache of kv_dim floats per token have
 * token_stride kv_dim * sizeof(float). A stride of 0 means packed: head = one row, token = all
 * heads, batch = the rows of the longest sequence on this rank times the token_stride. That is the
 * rule of every call. (On one rank those rows are the largest of tokens_of and of kv_tokens_of,
 * whatever tokens and kv_tokens are. K and V of a sharded cache have ra_cache_rows rows.) Memory
 * with room for more rows, such as a cache, needs its own batch_stride, also where the token_stride
 * is set. The dtype is in the descriptor. (q8_0 rows consist of blocks of 34 bytes.)
 *
 * The memory stays yours. It must stay where it is and, for inputs, unchanged until the pass is
 * done. Any alignment that suits the element will do. Inputs may overlap one another, and the
 * sequences of one input may share memory. Otherwise the rows of a tensor must not overlap, and
 * outputs must overlap nothing; but rows of several tensors may alternate in one buffer, as q, k
 * and v or d_q, d_k and d_v do in (B, T, 3C), with a token_stride of 3C floats for each. (Overlap
 * is refused, except between tensors of unlike strides that both have gaps.)
 *
 * A rank's shard is a view into a tensor of the whole sequence if the layout is CONTIGUOUS (data at
 * its first row) or STRIPED (data at row `rank`, token_stride of `ranks` rows). The two pieces of a
 * ZIGZAG shard are no view: copy them together. */
typedef struct ra_in  { const void *data; int64_t batch_stride, token_stride, head_stride; } ra_in;
typedef struct ra_out { void *data;       int64_t batch_stride, token_stride, head_stride; } ra_out;

/* -------------------------------------------------------------------------- positions
 * A run is `count` rows at positions first, first + stride, ... (stride 0: 1). */
typedef struct ra_run { int64_t first, count, stride; } ra_run;

/* Positions of the rows of one tensor. {0}: rows follow one another from position 0 (keys) or
 * d.q_offset (queries). Used by ra_attention, ra_fold and RA_LAYOUT_ARRAY. With them every sequence
 * has the same number of rows: d.tokens_of and kv_tokens_of stay null, and shorter ones are padded
 * with -1. A batch that decodes after n0 and n1 cached tokens: d.tokens 1, d.kv_tokens
 * max(n0, n1) + 1, q_pos.array {n0, n1}, count 1, batch_step 1.
 *
 * One cache whose cells belong to any of several sequences (llama.cpp's unified cache) is one
 * sequence of documents: a token at position p of sequence s, cached or new, has position
 * s * span + p, with a span of your choice and mask.doc_first = {0, span, 2 * span, ...}. */
typedef struct ra_positions {
    const ra_run  *runs;               /* one after the other, or */
    const int32_t *array;              /* one entry per row, in any order. -1 marks an empty cell:
                                        * it is masked as a key, and its output row is 0. If you
                                        * request d_bias, no position may occur twice among the keys
                                        * of a sequence */
    int64_t count;                     /* number of runs, or of array entries (rows of a
                                        * sequence) */
    int64_t batch_step;                /* array: entries from one sequence to the next; 0: all
                                        * sequences share one array */
} ra_positions;

/* -------------------------------------------------------------------------- mask. AGREED.
 * The query at position p, in the document [d, e), sees the keys k with lo <= k < hi, and those
 * with d <= k < d + keep that are below hi:
 *   1 lo = d.  NONE: hi = e.  CAUSAL: hi = p + 1, with causal_block c > 1 rounded up so that hi - d
 *     is a multiple of c (a query sees its whole block).
 *   2 hi = max(hi, d + prefix); hi = min(hi, e).
 *   3 window: lo = max(lo, p - window + 1).  right_limit: hi = min(hi, p + right_limit + 1).
 * INTERVALS: lo and hi come from you, entry p for position p; nothing else may be set. On one rank
 * positions of queries may be mere numbers of rows: only lo and hi are compared with keys. */
typedef struct ra_mask {
    int32_t kind;                      /* RA_MASK_*; required */
    int32_t causal_block;              /* CAUSAL: tokens per block; 0, 1: plain causal */
    int64_t window;                    /* number of latest keys seen, the query's own included;
                                        * 0: no limit. (window_left elsewhere is window - 1) */
    int64_t right_limit;               /* NONE: number of keys seen after the query's own; 0: no
                                        * limit. (For none, which other libraries write as
                                        * window_right 0, use CAUSAL) */
    int64_t prefix;                    /* prefix-LM: queries of the document see these first tokens
                                        * even if they come later; a window still applies (use keep
                                        * for tokens that no window hides) */
    int64_t keep;                      /* first tokens of a document that no window hides, seen
                                        * beside it ("attention sinks"; t.sinks are logits) */
    const int64_t *doc_first;          /* [doc_count] packed documents: ascending first positions,
                                        * the first 0 (cu_seqlens without its last entry) */
    int64_t doc_count;                 /* 0: one document */
    const int32_t *lo, *hi;            /* [interval_count] INTERVALS, by the query's position */
    int64_t interval_count;            /* positions of queries are below it */
} ra_mask;

/* -------------------------------------------------------------------------- layout. AGREED.
 * Who holds which positions: of the queries [q_offset, q_offset + tokens) and, cut in the same way,
 * of the keys [0, kv_tokens). Any length, empty shards, more ranks than tokens; nothing is padded.
 *   CONTIGUOUS  rank r holds the r-th piece.
 *   ZIGZAG      rank r holds two: the r-th from the front, then the r-th from the back.
 *   STRIPED     rank r holds positions r, r + ranks, ...
 *   RUNS        your table, complete on every rank, the same for all sequences (tokens_of and
 *               kv_tokens_of stay null). A position held by nobody is an absent key; none may be
 *               held twice. Runs that follow one another travel together, up to chunk_tokens rows,
 *               as far as one of them is needed: for packed documents, each cut like ZIGZAG, list
 *               all front pieces of a rank before the back pieces. Tiles end with a run: runs of
 *               RA_BLOCK_TOKENS and more are as fast as CONTIGUOUS, shorter ones slower.
 *   ARRAY       your int32 positions, given with each call (t.q_pos, t.k_pos) and known only to
 *               their owner. They travel with the keys, and nothing is pruned by position. Every
 *               sequence has the same number of rows; pad shorter ones with -1. Set tokens to any
 *               positive value: the counts are q_rows and k_rows. (ra_attention takes arrays with
 *               layout 0.)
 * For causal work without a window take ZIGZAG: it gives all ranks the same work. With a window
 * take CONTIGUOUS: it is balanced by itself, and chunks travel one or two hops. CONTIGUOUS and
 * ZIGZAG cut on the grid of RA_BLOCK_TOKENS if there are at least 2 * ranks blocks, otherwise as
 * evenly as possible. A sequence that grows would be cut anew at every call, and one query would
 * have all keys sent to it: for a sharded cache use ra_cache_create and ra_infer. */
typedef struct ra_layout {
    int32_t kind;                      /* RA_LAYOUT_*; required if ranks > 1; 0: CONTIGUOUS */
    const int32_t *weights;            /* [ranks] CONTIGUOUS, ZIGZAG: relative speeds, >= 0, not all
                                        * 0; null: equal. Shares of blocks, largest remainder first,
                                        * so weights that are block counts cut exactly there
                                        * (ZIGZAG: counts of mirrored pairs of blocks) */
    const ra_run  *q_runs, *k_runs;    /* RUNS: of rank 0, rank 1, ...; k_runs null: as q_runs */
    const int32_t *q_run_count, *k_run_count; /* RUNS: [ranks] */
    const int64_t *q_rows, *k_rows;    /* ARRAY: [ranks] rows of a sequence; k_rows null: q_rows */
} ra_layout;

struct ra_engine;

typedef struct ra_rates {              /* all required and > 0, except latency, which may be 0 */
    double flops_per_s;                /* of one rank, all its threads */
    double link_bytes_per_s;           /* of one direction of one link */
    double link_latency_s;
} ra_rates;

/* -------------------------------------------------------------------------- the descriptor
 * One struct describes every computation. AGREED unless marked local. For one rank leave the part
 * `ranks` zero, for inference the part `training`. */
typedef struct ra_desc {
    /* What to compute */
    int32_t q_heads, kv_heads;         /* required; Hq is a multiple of Hkv: query head h reads KV
                                        * head h / (Hq / Hkv). MHA, GQA, MQA */
    int32_t k_dim, v_dim;              /* required; Dk (of Q and K) and Dv (of V and O), 1..1024 */
    int32_t q_dtype, k_dtype, v_dtype, o_dtype; /* required; RA_F32, RA_F16, RA_BF16 in any mix; K
                                        * and V may be RA_Q8_0 (see ra_convert), without
                                        * gradients */
    int32_t v_in_k, v_column;          /* 1: V is columns [v_column, v_column + Dv) of K's rows
                                        * (MLA): t.v stays {0}, v_dtype = k_dtype or 0, and only K
                                        * travels */
    int32_t scores;                    /* RA_SCORE_* of what comes with each call; 0: none */
    int32_t sequences;                 /* B; 0: 1 */
    int64_t tokens;                    /* required; queries of a sequence, all ranks together */
    int64_t kv_tokens;                 /* keys of a sequence; 0: tokens + q_offset, so set it where
                                        * t.q_pos is given */
    int64_t q_offset;                  /* position of the first query of every sequence (keys start
                                        * at 0): a decode token after n cached ones has tokens 1,
                                        * q_offset n. For different n see ra_positions */
    const int64_t *tokens_of;          /* [B] if sequences differ, each <= tokens */
    const int64_t *kv_tokens_of;       /* [B] the same for keys; null: kv_tokens, or tokens_of +
                                        * q_offset if kv_tokens is 0 */
    ra_mask mask;
    float scale;                       /* a score is scaled (0: 1/sqrt(Dk), otherwise positive), */
    float softcap;                     /* then capped: s = cap * tanh(s / cap), 0: not; then ALiBi
                                        * and bias are added */
    /* Ranks */
    int32_t ranks, rank;               /* ranks 0: 1. rank is local */
    ra_layout layout;
    int32_t chunk_tokens;              /* keys per message; 0: by the ranks, the shard and the work
                                        * per key, 256 to 4096. Rounded up to blocks (zigzag: to
                                        * mirrored pairs; RUNS: the last block may go beyond it) */
    int32_t buffers;                   /* receive buffers, 1..64; 0: 3 to 8, of up to 8192 keys
                                        * together (training: 5120), but three chunks */
    ra_rates rates;                    /* what you know of machines and network; {0}: nothing. A
                                        * default chunk then takes no less time than two latencies,
                                        * and a fast link gets fewer buffers */
    /* Training */
    int32_t train;                     /* 1: backward passes will follow. o and lse have the same
                                        * bits either way, except under dropout */
    int32_t grad_dtype;                /* 0, RA_F32: t.d_q, d_k, d_v are f32 and added to; RA_F16,
                                        * RA_BF16: of this dtype and overwritten */
    float dropout;                     /* probability in [0, 1) that a softmax weight is set to 0;
                                        * the others are multiplied by 1 / (1 - dropout). The choice
                                        * follows from t.seed, sequence, head and positions alone.
                                        * The LSE is computed before dropout */
    int32_t backward_travel;           /* RA_TRAVEL_*. Q not with bias, not with ARRAY. AUTO: the
                                        * one with fewer bytes per token, which is Q if there are
                                        * about as many KV heads as query heads. Each has its own
                                        * order of sums, also on one rank */
    int32_t grad_return;               /* RA_RETURN_*. With more than 2 ranks DIRECT needs
                                        * RA_CAP_ANY_PEER */
    /* This machine. Local. */
    int32_t threads;                   /* rings: how many threads may compute a pass at the same
                                        * time; 0: 1. Set it to the number of your engine's threads:
                                        * any beyond it find no work. ra_attention takes nth instead
                                        * and ignores this */
    int32_t isa;                       /* RA_ISA_*; 0: the fastest of this machine */
    const struct ra_engine *engine;    /* null: our kernels. Read until the plan is destroyed */
    ra_error *error;                   /* may be null; written on refusal, and by ra_ring_once when
                                        * the pass failed */
} ra_desc;

/* The common descriptor: all four dtypes alike, Dk = Dv = dim. Set tokens, and for a cache
 * q_offset, and what else differs. It checks nothing; the call that takes it does. */
RINGATTN_API ra_desc ra_desc_make(int32_t q_heads, int32_t kv_heads, int32_t dim, int32_t dtype,
                                  int32_t mask);
/* Fills in the defaults, or refuses what ra_plan_create would refuse. out may be d. (kv_tokens
 * stays 0 if it follows from tokens_of.) */
RINGATTN_API ra_status ra_desc_resolve(const ra_desc *d, ra_desc *out);

/* -------------------------------------------------------------------------- tensors. Local.
 * Bias: data[batch + head + row * row_step + p * key_step] is added to the score of the query
 * in row `row` of this rank and the key at position p. It is indexed by the key's POSITION, because
 * keys come from other ranks. A step of 0 means the same bias for all: with row_step 0 it is one
 * per key.
 *
 * A bias of -inf, or of -2.36e38 or less (so also -FLT_MAX), hides the key from the row. So a mask
 * may be given as a bias alone (ggml's kq_mask): blocks of keys that it hides from all rows of a
 * tile are left out. A finite mask value such as -1e9 hides a key only beside keys without it: a
 * row of which -1e9 hides every key still sees them all, and has an output. Its gradients are 0:
 * backward computes weights again from the f32 LSE, which puts them off by a factor of at most
 * exp(|LSE| / 2^23), and a row whose |LSE| is 2^23 or more counts there as one without keys. */
typedef struct ra_bias {
    const void *data;
    int64_t batch_step, head_step, row_step, key_step; /* bytes, multiples of an element */
    int64_t keys;                      /* required: positions from here on have bias 0 */
    int32_t dtype;                     /* of data: RA_F32 (0: too), RA_F16 or RA_BF16 */
} ra_bias;

/* Gradient of the bias, f32, added to: shaped as ra_bias, with steps of its own. With row_step 0 it
 * is summed over rows, with key_step 0 over keys, but not with both. The elements of different
 * sequences and heads must not overlap: sum over those yourself. */
typedef struct ra_bias_out {
    float *data;
    int64_t batch_step, head_step, row_step, key_step;               /* bytes, multiples of 4 */
    int64_t keys;                      /* required: keys from this position on are left out */
} ra_bias_out;

typedef struct ra_tensors {
    ra_in  q, k, v;                    /* [B][rows of this rank][Hq or Hkv][Dk or Dv] */
    ra_out o;                          /* [B][rows][Hq][Dv], every row is written. If it is f32 the
                                        * running sums are kept in it: undefined until the pass is
                                        * done */
    ra_out lse;                        /* f32 [B][rows][Hq] (strides as in a view with rows of one
                                        * element), natural log of the sum of exp of the final
                                        * scores, sink included. A row without keys: the sink, or
                                        * -inf without sinks. May be {0} */
    ra_positions q_pos, k_pos;         /* see ra_positions; usually {0} */
    const float *alibi;                /* [Hq] slope: score - slope * |p - key position| */
    const float *sinks;                /* [Hq] one logit per head, natural, in the denominator once
                                        * per row: not scaled, capped or dropped. alibi, sinks and
                                        * seed must be equal on all ranks */
    ra_bias bias;
    uint64_t seed;                     /* of dropout: the same forward and backward */
    /* Only for backward calls, which also read o and lse as forward left them: lse is required
     * there. A gradient that you do not want is {0} or null; on one rank, and for d_q in a ring,
     * that saves its share of the work. */
    ra_in  d_o;                        /* [B][rows][Hq][Dv], of o_dtype: the gradient of o */
    ra_out d_q, d_k, d_v;              /* shapes of q, k, v, strides of their own, of grad_dtype.
                                        * They may be interleaved in one buffer. v_in_k: d_v stays
                                        * {0} and d_k receives both */
    float *d_sinks;                    /* [Hq] added to: the part of this rank's rows; sum the
                                        * ranks */
    ra_bias_out d_bias;                /* the same where rows of several ranks share an element */
} ra_tensors;

/* ========================================================================== L0: block mathematics
 * No threads, no network, no allocation. A state is one online softmax per query row and head,
 * unnormalised, f32, packed. m is a running maximum of score * log2(e). It may lag behind the true
 * maximum: it is raised only when l would exceed 2^32. l is the sum of 2^(score log2(e) - m), acc
 * the same sum weighted by V. Empty: m = -inf, l = 0, acc = 0. Milakov and Gimelshein, arXiv
 * 1805.02867, algorithm 3. */
typedef struct ra_state {
    float *m, *l;                      /* [B][tokens][Hq]; here, in ra_grads and in delta it is
                                        * d.tokens even where every sequence is shorter */
    float *acc;                        /* [B][tokens][Hq][Dv] */
} ra_state;

RINGATTN_API ra_status ra_state_clear(const ra_desc *d, const ra_state *s);
/* Folds the keys t->k, t->v at t->k_pos into s for the queries t->q at t->q_pos. t->o and t->lse
 * are not used. The workspace is that of ra_attention with nth = 1. */
RINGATTN_API ra_status ra_fold(const ra_desc *d, const ra_state *s, const ra_tensors *t,
                               void *workspace, size_t bytes);
/* into = into and from together; from is unchanged. */
RINGATTN_API ra_status ra_state_merge(const ra_desc *d, const ra_state *into, const ra_state *from);
/* Applies t->sinks, divides, writes t->o and, if given, t->lse. */
RINGATTN_API ra_status ra_state_finish(const ra_desc *d, const ra_state *s, const ra_tensors *t);

/* delta [B][tokens][Hq], packed: the sum over Dv of t->o times t->d_o, which every block of the
 * backward pass needs. */
RINGATTN_API ra_status ra_delta(const ra_desc *d, const ra_tensors *t, float *delta);

/* Sums of gradients, f32, packed, added to; null: not wanted. */
typedef struct ra_grads {
    float *d_q;                        /* [B][tokens][Hq][Dk] */
    float *d_k;                        /* [B][kv_tokens][Hkv][Dk]; v_in_k: receives both */
    float *d_v;                        /* [B][kv_tokens][Hkv][Dv]; v_in_k: null */
} ra_grads;
/* Adds to g, and to t->d_bias if given, what the keys t->k, t->v at t->k_pos contribute for the
 * queries t->q at t->q_pos. t->d_o is the gradient of the output and t->lse the LSE of all keys
 * together. t->o, t->d_q, t->d_k, t->d_v and t->d_sinks are not used. The order of calls fixes the
 * bits: use the order in which forward folded. The workspace is that of ra_attention_backward with
 * nth = 1. */
RINGATTN_API ra_status ra_fold_backward(const ra_desc *d, const ra_tensors *t, const float *delta,
                                        const ra_grads *g, void *workspace, size_t bytes);

/* Merges normalised partial results of two sets of keys, (o, lse) = (o, lse) + (o2, lse2): o
 * [rows][dim], lse [rows], natural log. (anything, -inf) is neutral; on both sides it gives (0,
 * -inf). The order of calls fixes the bits. No aliasing. A row may be a (token, head) pair. */
RINGATTN_API void ra_merge(float *o, float *lse, const float *o2, const float *lse2, int64_t rows,
                           int32_t dim);

/* Converts n elements of one dtype to another, rounding to nearest. RA_Q8_0 is ggml's: blocks of 34
 * bytes, a scale in f16 and 32 int8, element = scale * int8. A row of dim elements is dim / 32
 * blocks, so n, k_dim, v_dim and v_column are multiples of 32 there; alignment 2. Converting to it:
 * scale = max |x| / 127; NaN becomes 0, and magnitudes are limited to 127 * 65504. */
RINGATTN_API ra_status ra_convert(void *dst, int32_t dst_dtype, const void *src, int32_t src_dtype,
                                  int64_t n);

/* ========================================================================== L1: one rank, one call
 * The argument list that small engines share. All f32; q, out [seq_q][n_heads][head_dim], k, v
 * [seq_k][n_kv_heads][head_dim]. Causal, query i at position q_offset + i, key j at j. window <= 0
 * is off; otherwise a query sees the last `window` keys, its own included. scale 0:
 * 1/sqrt(head_dim). One thread, no allocation, at most 208 KiB of stack (52 KiB where seq_q *
 * n_heads / n_kv_heads is at most 8), twice that without optimisation; head_dim <= 256. It has no
 * ra_error for a sentence. RA_E_RANGE: a count or q_offset is negative, heads or head_dim are below
 * 1, head_dim is above 256, positions reach RA_MAX_POSITION, or scale is negative or not finite.
 * RA_E_SHAPE: n_heads is not a multiple of n_kv_heads. RA_E_NULL: a pointer to rows is null. */
RINGATTN_API ra_status ra_attention_simple(float *out, const float *q, const float *k,
                                           const float *v, int seq_q, int seq_k, int n_heads,
                                           int n_kv_heads, int head_dim, float scale, int window,
                                           int q_offset);

/* Bytes of workspace for ra_attention and ra_fold on nth threads; 0: d or nth is refused. They are
 * enough for every call with the same heads, dims, dtypes, scores, mask, layout and dropout on at
 * most nth threads, with at most as many sequences, tokens and kv_tokens, whatever q_offset is: ask
 * once for the largest. From 300 KiB per thread (D 64) to some MiB, also for one token. */
RINGATTN_API size_t ra_attention_bytes(const ra_desc *d, int nth);

/* Everything on one rank: tokens and kv_tokens rows at t->q_pos and t->k_pos. Called by nth threads
 * with ith = 0..nth-1, in any order, at any time, no barrier: no thread waits for another, each
 * returns when its share is done, and o is complete when all have returned. All of them must call:
 * with OpenMP, nth is omp_get_num_threads() inside the parallel region. d, t and what they point to
 * have equal contents on all threads: one copy, or one each. Bits do not depend on nth. Only the
 * thread with ith 0 writes d->error.
 *
 * layout.kind names the order of summation (see ra_plan_report.order), so that a ring of the same
 * layout gives the same bits. Exception: calls with tokens * Hq / Hkv <= 16 and no dropout use a
 * separate decoding form, fastest if all heads of a token, or all tokens of a head, are contiguous.
 * There too a row's bits depend on no other row of the call. d.engine must be null.
 *
 * workspace: ra_attention_bytes(d, nth) bytes at any address, which need not be cleared. One call
 * at a time: all nth threads must have returned before any of them begins the next one with it. If
 * some of the nth threads did not make a call, zero the workspace before the next. One workspace
 * may serve forward and backward. With nth = 1 it may be null if k_dim + v_dim is at most 512, or
 * 256 if K or V is not f32 (longer rows may be refused): then up to 256 KiB of the stack are used,
 * or 384 in a program compiled without optimisation. */
RINGATTN_API ra_status ra_attention(const ra_desc *d, const ra_tensors *t, void *workspace,
                                    size_t bytes, int ith, int nth);

/* Gradients of t->q, t->k, t->v, t->sinks and t->bias, as far as you request them, from t->d_o and
 * from t->o and t->lse as ra_attention (or a ring) left them. Threads as in ra_attention. Each
 * gradient is summed in f32 from 0 in the workspace and added once to yours, or written. Rows
 * without keys give zeros. d.train must be 1; dropout takes the seed of forward. workspace:
 * ra_attention_backward_bytes(d, nth) bytes at any address, required, sufficient in the same sense
 * as above; it is about nth (tokens Hq / Hkv Dk + kv_tokens (Dk + Dv)) floats, and as much again
 * for up to 16384 keys of 16 bits, which a thread keeps in the form of its kernel. Work is divided
 * into (sequence, KV head) pairs. If their number is not a multiple of nth, the remaining pairs are
 * split further, which repeats part of the work. */
RINGATTN_API size_t    ra_attention_backward_bytes(const ra_desc *d, int nth); /* 0: d is refused */
RINGATTN_API ra_status ra_attention_backward(const ra_desc *d, const ra_tensors *t,
                                             void *workspace, size_t bytes, int ith, int nth);

/* ========================================================================== L2: plan */
typedef struct ra_plan ra_plan;
typedef struct ra_transport ra_transport;

/* Makes the schedule of d->rank and proves that it cannot deadlock, or refuses with d->error
 * filled. One allocation from a (null: malloc). It takes time in proportion to tokens /
 * RA_BLOCK_TOKENS + chunks * ranks (INTERVALS: tokens + chunks * ranks), and memory of 2 bits per
 * rank and chunk and some hundred bytes per chunk. It needs no network and no workspace. d and its
 * arrays are copied. A plan never changes: threads, rings and layers may share it. */
RINGATTN_API ra_status ra_plan_create(ra_plan **out, const ra_desc *d, const ra_allocator *a);
RINGATTN_API void      ra_plan_destroy(ra_plan *plan);               /* null is fine */

/* Which positions of a sequence's queries, or keys, a rank holds, in the order of its rows. Returns
 * how many runs there are and writes at most max_runs; ARRAY has none. -1: bad argument. */
RINGATTN_API int32_t ra_plan_q_runs(const ra_plan *plan, int32_t rank, int32_t sequence,
                                    ra_run *runs, int32_t max_runs);
RINGATTN_API int32_t ra_plan_k_runs(const ra_plan *plan, int32_t rank, int32_t sequence,
                                    ra_run *runs, int32_t max_runs);

/* One pass of one rank. A tile is RA_BLOCK_TOKENS x RA_BLOCK_TOKENS tokens (fewer at the end of a
 * run) of one head; tiles are empty, partial or full by the bounds of their rows. */
typedef struct ra_pass_figures {
    double  flops;                     /* multiply and add count 2: forward 2 (Dk + Dv) Hq pairs,
                                        * backward 2 (3 Dk + 2 Dv) Hq pairs */
    int64_t tiles_empty, tiles_partial, tiles_full; /* ARRAY: all partial, positions are unknown */
    int64_t chunks_in, chunks_out;     /* messages */
    int64_t bytes_in, bytes_out;       /* on the wire, frames included, where messages are copied */
    int64_t shared_bytes_in, shared_bytes_out; /* the same with RA_CAP_SHARED: addresses only, and
                                        * the notices that end the pass */
    int64_t state_bytes;               /* of workspace_bytes: forward the running m and l, and the
                                        * sums of the local queries unless an f32 o holds them;
                                        * backward the f32 sums of dQ */
    int64_t chunk_bytes;               /* largest message, which is the size of a buffer */
    int32_t travel;                    /* RA_TRAVEL_KV or RA_TRAVEL_Q */
    int32_t direction;                 /* +1: chunks go to rank + 1; -1: to rank - 1 */
    int32_t bits_any_ranks;            /* 1: forward o and lse, backward d_q, d_k and d_v have the
                                        * same bits for every number of ranks with this property,
                                        * this layout.kind and mask. (They never depend on threads,
                                        * chunks, timing or transport; with an engine, on chunks) */
} ra_pass_figures;

/* What passes of a plan do on one rank. Counters of a run (ra_ring_counters) equal these figures;
 * counts stop at INT64_MAX. For the plan's own rank the answer is stored; for another it takes time
 * in proportion to that rank's rows and all chunks. */
typedef struct ra_plan_report {
    ra_pass_figures forward, backward; /* backward: all 0 without d.train */
    int64_t q_rows, k_rows;            /* rows of the longest sequence on this rank */
    int64_t pairs;                     /* visible (query, key) pairs of one head */
    int64_t hops, hops_skipped;        /* forward: other ranks (counted per sequence) whose keys
                                        * pass through here, and those whose keys do not, because no
                                        * rank from here on needs them */
    int64_t resident_bytes;            /* your q, k, v, o and lse of this rank, packed */
    int64_t workspace_bytes;           /* of a ring that copies, to the byte; with d.train the
                                        * larger of both passes */
    int64_t shared_workspace_bytes;    /* of a ring with RA_CAP_SHARED, to the byte */
    int32_t order;                     /* RA_ORDER_* */
    int32_t chunk_tokens, buffers;     /* as resolved */
} ra_plan_report;
RINGATTN_API ra_status ra_plan_query(const ra_plan *plan, int32_t rank, ra_plan_report *out);

/* How long a forward pass takes at given rates: the schedule played through with every transfer and
 * every chunk's tiles (those not empty, each counted whole) in order, buffers included. A model,
 * not a measurement. It takes as long as ra_plan_create, and 8 bytes per rank and chunk while it
 * runs. */
typedef struct ra_prediction {         /* seconds */
    double compute_s;                  /* this rank computes */
    double transfer_s;                 /* the link into this rank is busy */
    double wait_s;                     /* this rank has nothing to compute before its last tile */
    double hidden_s;                   /* the part of transfer_s during which this rank computes */
    double done_s;                     /* until this rank is done */
    double all_done_s;                 /* until the last rank is done */
    double bound_s;                    /* the same with any number of buffers: what the order of
                                        * keys, which makes bits independent of ranks, allows.
                                        * Without a mask the last rank's own keys come last, so at
                                        * most 1 - 1 / ranks of a transfer as long as computing can
                                        * be hidden; causal ZIGZAG has no such limit */
} ra_prediction;
RINGATTN_API ra_status ra_plan_predict(const ra_plan *plan, int32_t rank, const ra_rates *rates,
                                       ra_prediction *out);

/* ========================================================================== L2: ring
 * A ring is a rank's workspace, its binding to one transport, the pass in progress and, after a
 * failure, the failure. It runs one pass at a time and serves any number of plans. Ranks start the
 * same passes in the same order; nothing else matches them up. */
typedef struct ra_ring ra_ring;

enum { RA_EV_TILE = 1, RA_EV_SEND, RA_EV_RECV, RA_EV_WAIT, RA_EV_PASS, RA_EV_FAIL };
typedef struct ra_event {              /* one event each, sent when it ends */
    int32_t kind, rank, thread;        /* thread: ith, or -1 */
    int32_t peer, origin, sequence;    /* -1: does not apply */
    int64_t pass, chunk;               /* chunk: its number in the plan; -1 */
    int64_t q_row, q_rows, head;       /* TILE: what was computed against the chunk */
    int64_t begin_ns, end_ns;
    int64_t bytes;                     /* SEND, RECV: of the message */
    int64_t tiles;                     /* TILE: tiles of this step that were not empty */
    int32_t backward;                  /* 1: of a backward pass, whose TILE is one step of the work
                                        * on one KV head (head is its first query head) of all rows,
                                        * or with RA_TRAVEL_Q of the chunk's rows, against this
                                        * rank's keys */
} ra_event;

typedef struct ra_ring_desc {          /* {0} or a null pointer: all defaults */
    void   *workspace;                 /* aligned to 64, yours, until destroy; null: from the
                                        * allocator */
    size_t  workspace_bytes;           /* of workspace: required beside it. Without it 0 is what the
                                        * first plan needs; more leaves room for later plans */
    ra_allocator allocator;
    int64_t watchdog_ns;               /* fail with RA_E_PEER after this long without progress. 0:
                                        * 60 s plus the time that the rank with most tiles needs for
                                        * a whole pass, at the speed and with the threads of this
                                        * rank. If you set it, remember that in a contiguous causal
                                        * ring the first ranks finish early and wait for the last */
    int64_t quiesce_ns;                /* patience with quiesce after a failure; 0: 30 s */
    int64_t (*clock_ns)(void *ctx);    /* null: ra_now_ns. The ring measures all its times on this
                                        * clock: deadlines of calls on it, watchdog, events. It may
                                        * start anywhere and run at any speed, but never backwards.
                                        * A transport gets the time left, on ra_now_ns() */
    void   *clock_ctx;
    void  (*trace)(void *ctx, const ra_event *e);  /* from any stepping thread; must not block */
    void   *trace_ctx;
    void  (*progress)(void *ctx, int64_t tiles_done, int64_t tiles_all); /* from any stepping
                                        * thread, one at a time; tiles that are not empty */
    void   *progress_ctx;
    ra_error *error;                   /* of ra_ring_create */
} ra_ring_desc;

/* Binds a transport (null: a ring of one) and memory. Sends nothing, so ranks need not meet here.
 * `first` sizes the workspace; later plans must have its rank and ranks, and fit. */
RINGATTN_API ra_status ra_ring_create(ra_ring **out, const ra_plan *first,
                                      const ra_transport *transport, const ra_ring_desc *rd);
/* No thread may be inside a call. After a failed pass with RA_CAP_SHARED it may wait, up to
 * quiesce_ns, until the other ranks have noticed, in ra_step or by ending. RA_E_UNSAFE: a pass
 * failed and the transport cannot promise to leave the buffers alone. They were leaked (do not free
 * a workspace of yours). null is fine. */
RINGATTN_API ra_status ra_ring_destroy(ra_ring *ring);

/* One blocking pass on the calling thread. Collective. On a refusal nothing has moved and the ring
 * is whole (the other ranks wait for this one until it comes, their deadline or ra_ring_cancel). On
 * a failure o is undefined, the ring stays failed, and no rank reads this rank's tensors any more;
 * with RA_CAP_SHARED, if that could not be achieved, the status is RA_E_UNSAFE. A rank that has all
 * it needs may return RA_OK from a pass that fails on another. */
RINGATTN_API ra_status ra_forward(const ra_plan *plan, ra_ring *ring, const ra_tensors *t,
                                  int64_t deadline_ns);
/* The same for gradients: t as in forward, with o and lse as forward left them (or as the same
 * forward makes them again), d_o, and the gradients that you want. Collective like ra_forward. On a
 * failure gradients may have been added to in part. */
RINGATTN_API ra_status ra_backward(const ra_plan *plan, ra_ring *ring, const ra_tensors *t,
                                   int64_t deadline_ns);
/* Plan, ring, forward, and both destroyed: for programs that attend once. Allocates. */
RINGATTN_API ra_status ra_ring_once(const ra_desc *d, const ra_transport *transport,
                                    const ra_tensors *t, int64_t deadline_ns);

/* The sentence of the ring's failure if it has failed, otherwise of the last refusal by one of its
 * calls, otherwise "". It is valid until the next call on the ring. */
RINGATTN_API const char *ra_ring_explain(const ra_ring *ring);

/* -------------------------------------------------------------------------- engines with threads
 * Two ways into a pass. With a main thread: ra_begin on it, then ra_step on any thread until RA_OK
 * or an error. Without one (ggml): every thread calls ra_join with equal jobs until RA_OK or an
 * error. ra_finish is needed only to leave early and after an error. */
typedef struct ra_job {                /* copied by begin, with *tensors, without data */
    uint64_t ticket;                   /* ra_join: number of the pass, from 1, rising, gaps are
                                        * fine; each thread brings the tickets in this order.
                                        * ra_begin: 0 */
    const ra_plan *plan;
    const ra_tensors *tensors;
    int64_t deadline_ns;
    int32_t pass;                      /* RA_PASS_*; backward needs a plan with train = 1 */
} ra_job;

/* Checks and copies. Reads no data (except the positions of ARRAY), sends nothing. Call it only
 * after every thread has returned from ra_step (otherwise RA_E_BUSY): one thread may get RA_OK
 * while others are still inside. A refusal leaves the ring as it was. */
RINGATTN_API ra_status ra_begin(ra_ring *ring, const ra_job *job);
/* One bounded piece of work: a round of communication, then tiles of at most 2^26 multiply-adds (64
 * * 64 * (Dk + Dv) each, backward 64 * 64 * (3 Dk + 2 Dv)) and one block of keys more, whatever the
 * length of chunks and shards; with an engine, one of its tasks against one chunk. Cancellation,
 * deadline and failures are noticed between two steps; progress is reported after each. Never
 * blocks (except in a level-0 sendrecv), never spins, waits for no thread. ith >= 0, unique among
 * the threads inside; threads with an ith from d.threads of the plan on get RA_WAIT until the pass
 * is done, and compute nothing. Any thread may stay away or leave (others finish what it has
 * begun), but without RA_CAP_ANY_THREAD ith 0 must keep coming. RA_AGAIN: there may be more to do.
 * RA_WAIT: nothing to do now. RA_OK: the whole pass is done on this rank, and all its outputs are
 * visible to this thread. */
RINGATTN_API ra_status ra_step(ra_ring *ring, int ith);
/* Begins the pass, if this thread is the first to bring this ticket, then ra_step. RA_OK at once
 * for tickets whose pass is done; RA_WAIT while a thread is still inside the pass before. If begin
 * is refused, every thread gets that refusal for that ticket, however late; a thread that is more
 * than 32 refusals late gets RA_E_STATE. */
RINGATTN_API ra_status ra_join(ra_ring *ring, const ra_job *job, int ith);
/* After RA_WAIT, if there is nothing better to do: spins a little, yields, then sleeps until there
 * may be work (RA_OK) or deadline_ns (RA_E_TIMEOUT, of this call alone). */
RINGATTN_API ra_status ra_step_wait(ra_ring *ring, int64_t deadline_ns);
/* One thread, none in ra_step or ra_step_wait. After a pass that ended well it does nothing;
 * otherwise it aborts and quiesces. Returns how the pass ended. */
RINGATTN_API ra_status ra_finish(ra_ring *ring, int64_t deadline_ns);
/* Any thread, any time, wait-free: calls on this ring end with RA_E_CANCELLED after the step in
 * progress, the peers' calls with RA_E_ABORTED or RA_E_PEER. An emergency brake: the ring has then
 * failed. To stop politely stop between passes, on all ranks at the same one. */
RINGATTN_API void ra_ring_cancel(ra_ring *ring);

enum { RA_RING_IDLE, RA_RING_RUNNING, RA_RING_FAILED };
typedef struct ra_ring_counters {      /* of the pass in progress or the last one; any thread */
    int32_t state;                     /* RA_RING_* */
    int32_t waiting_peer;              /* neighbour that still has chunks to send, -1: none */
    int32_t bounded;                   /* 0: a dead peer may block a call for ever (sendrecv without
                                        * RA_CAP_DEADLINE) */
    int64_t pass;                      /* number of the pass, from 1 */
    int64_t tiles_empty, tiles_partial, tiles_full, tiles_all; /* done; all: not empty, in all */
    int64_t chunks_in, chunks_out, bytes_in, bytes_out; /* with RA_CAP_SHARED: shared_bytes_* of the
                                        * report */
    int64_t compute_ns, wait_ns;       /* in tiles, and in ra_step_wait; sums over threads */
    int64_t peak_bytes;                /* workspace in use */
} ra_ring_counters;
RINGATTN_API void ra_ring_query(const ra_ring *ring, ra_ring_counters *out);

typedef struct ra_failure {            /* the first failure of the ring */
    ra_status status;
    int32_t rank, peer;                /* this rank; the peer it waited for or that differs; -1 */
    int32_t sending;                   /* 1 sending, 0 receiving, -1 neither */
    int32_t code;                      /* what the transport or engine returned */
    int64_t pass, chunk, since_progress_ns;
    char    text[216];
} ra_failure;
RINGATTN_API ra_status ra_ring_failure(const ra_ring *ring, ra_failure *out); /* RA_E_STATE: none */
RINGATTN_API const ra_error *ra_ring_error(const ra_ring *ring); /* the last refusal; never null */

/* ========================================================================== L2: sharded cache
 * Inference over a KV cache that is split along the sequence over ranks: prefill in chunks, decode,
 * verify drafts, roll back. The cache memory is yours: per layer K and V of [B][ra_cache_rows]
 * [Hkv][Dk or Dv] on each rank. Positions belong to lanes in blocks of 16 (block i to lane i mod
 * lanes), and every rank holds a range of lanes, so shards stay balanced while sequences grow, and
 * no position ever changes its owner. A call says how many tokens of each sequence are cached and
 * how many are new. It plans and allocates nothing. Rolling back is passing a smaller count. A
 * batch_stride of 0 of K and V is ra_cache_rows rows.
 *
 * Every rank attends the queries to its own keys or receives the keys of the others, whichever
 * moves fewer bytes, and the partial results of the lanes are merged in a fixed tree. So bits do
 * not depend on threads, on the way, on transport, or, for an equal number of lanes, on ranks. */
typedef struct ra_cache ra_cache;
/* Whose queries a call has. OWN: each rank passes those of the new tokens whose positions it holds,
 * and gets their outputs. ALL: every rank passes the queries of all new tokens and gets all
 * outputs. */
enum { RA_QUERIES_OWN, RA_QUERIES_ALL };
/* What travels (OWN): queries to all ranks and partial results back, or keys and values to the
 * queries. AUTO: what takes fewer bytes in this call, if there is memory for it. */
enum { RA_INFER_AUTO, RA_INFER_PASS_Q, RA_INFER_PASS_KV };
/* AUTO: at most 16 new (token, head) pairs per KV head take the form of decoding, more the form of
 * prefill, which differ in the last bits. SAME: always the form of decoding (where Hq / Hkv <= 16),
 * so the bits of a row depend on nothing but the row: tokens of a draft that were verified together
 * are those of plain decoding, however the prompt was cut. Prefill is several times slower then. */
enum { RA_FORM_AUTO, RA_FORM_SAME };
typedef struct ra_cache_desc {         /* {0} or a null pointer: all defaults. AGREED: the first
                                        * five */
    int64_t new_tokens;                /* most new tokens of a call, all sequences together; 0:
                                        * sequences * tokens */
    int32_t lanes;                     /* ranks..1024; 0: ranks. A number that many numbers of ranks
                                        * share, such as 8 or 64, gives them the same bits */
    int32_t queries;                   /* RA_QUERIES_* */
    int32_t way;                       /* RA_INFER_*; PASS_Q needs no buffers for keys */
    int32_t form;                      /* RA_FORM_* */
    void   *workspace;                 /* aligned to 64, yours, until destroy; null: from the
                                        * allocator */
    size_t  workspace_bytes;           /* see ra_cache_workspace */
    ra_allocator allocator;
    int64_t watchdog_ns;               /* RA_E_PEER after this long without progress; 0: 60 s */
    int64_t quiesce_ns;                /* patience of ra_cache_destroy after a failure; 0: 30 s */
} ra_cache_desc;

/* d->tokens is the most new tokens of a sequence per call, d->kv_tokens the most positions of a
 * sequence, ranks and rank as for a plan; q_offset, tokens_of, kv_tokens_of and layout.kind stay 0.
 * layout.weights: relative sizes of the shards. d->mask is NONE or CAUSAL without documents,
 * d->scores without bias. d->threads threads may step a call. With more than 2 ranks the transport
 * must reach any peer; null: one rank. One cache object serves all layers of a model. */
RINGATTN_API ra_status ra_cache_create(ra_cache **out, const ra_desc *d, const ra_transport *net,
                                       const ra_cache_desc *cd);
/* Bytes of workspace on this rank; 0: d or cd is refused. A transport with an align above 64 needs
 * more: ra_cache_create says how much. */
RINGATTN_API size_t ra_cache_workspace(const ra_desc *d, const ra_cache_desc *cd);
/* No thread may be inside a call. RA_E_UNSAFE: as ra_ring_destroy. null is fine. */
RINGATTN_API ra_status ra_cache_destroy(ra_cache *c);

/* Rows of K and of V that one sequence needs on this rank: room for d->kv_tokens positions. Which
 * rank holds a position, and in which of its rows. -1: no such position. */
RINGATTN_API int64_t ra_cache_rows(const ra_cache *c);
RINGATTN_API int32_t ra_cache_owner(const ra_cache *c, int64_t position);
RINGATTN_API int64_t ra_cache_row(const ra_cache *c, int64_t position);
/* Converts K [Hkv][Dk] and V [Hkv][Dv] of one token from f32 and stores them in t->k and t->v, if
 * this rank holds the position; otherwise does nothing. v_in_k: v is null. Any thread. Leaves no
 * sentence: RA_E_RANGE is the sequence or the position, RA_E_NULL a pointer. */
RINGATTN_API ra_status ra_cache_store(const ra_cache *c, const ra_tensors *t, int32_t sequence,
                                      int64_t position, const float *k, const float *v);

/* The attention of one layer. Collective; ranks make the same calls in the same order. Sequence s
 * has cached[s] tokens from before and fresh[s] >= 0 new ones at the positions after them. K and V
 * of all of them are in t->k, t->v. t->q, t->o and t->lse (or {0}) are [B][rows][Hq][..], a row for
 * each new token (OWN: of those with ra_cache_owner(c, position) == rank), by ascending position.
 * With a batch_stride of 0 rows is the largest such count of a sequence here, so it changes from
 * call to call. A rank without rows may pass null. cached and fresh are AGREED; they are copied.
 * Blocks until this rank is done, on the calling thread alone; then no rank reads its tensors.
 * Statuses as ra_forward. */
RINGATTN_API ra_status ra_infer(ra_cache *c, const ra_tensors *t, const int64_t *cached,
                                const int64_t *fresh, int64_t deadline_ns);
/* The same on threads of yours: begin on one of them, then step on any. A step is bounded as
 * ra_step: a round of communication, then at most 2^26 multiply-adds and one block of keys more.
 * Cancellation, deadline and failures are noticed between two steps. A thread that is late, stays
 * away or leaves stalls nobody (without RA_CAP_ANY_THREAD ith 0 must come). After RA_WAIT yield or
 * do other work. To leave early cancel. */
RINGATTN_API ra_status ra_infer_begin(ra_cache *c, const ra_tensors *t, const int64_t *cached,
                                      const int64_t *fresh, int64_t deadline_ns);
RINGATTN_API ra_status ra_infer_step(ra_cache *c, int ith);
/* Without a main thread (ggml), as ra_join: every thread calls it with equal jobs until RA_OK or an
 * error. The first to bring a ticket begins; RA_OK at once for tickets whose call is done, RA_WAIT
 * while a thread is still inside the call before. A refusal goes to every thread that brings the
 * ticket. */
typedef struct ra_infer_job {          /* copied by begin, with *tensors and counts, without data */
    uint64_t ticket;                   /* number of the call, from 1, rising, gaps are fine; each
                                        * thread brings the tickets in this order */
    const ra_tensors *tensors;
    const int64_t *cached, *fresh;
    int64_t deadline_ns;
} ra_infer_job;
RINGATTN_API ra_status ra_infer_join(ra_cache *c, const ra_infer_job *job, int ith);
/* Any thread, any time: as ra_ring_cancel. */
RINGATTN_API void ra_infer_cancel(ra_cache *c);
/* The failure, otherwise the last refusal: field and sentence, or status 0. Never null. */
RINGATTN_API const ra_error *ra_cache_error(const ra_cache *c);

/* What a call with these counts does on this rank; sends nothing. */
typedef struct ra_infer_report {
    int32_t way;                       /* RA_INFER_PASS_Q or PASS_KV; one rank: PASS_Q */
    int64_t q_rows, keys;              /* rows of t->q, and keys held here, of all sequences */
    int64_t messages_in, messages_out, bytes_in, bytes_out;
    int32_t bits_any_company;          /* 1: the bits of a row depend on nothing but the row */
} ra_infer_report;
RINGATTN_API ra_status ra_infer_query(ra_cache *c, const int64_t *cached, const int64_t *fresh,
                                      ra_infer_report *out);

/* ========================================================================== L3: transports
 * Life of a transport, seen by its author:
 *  1 You fill an ra_transport; it and ctx are yours and outlive the ring. Peers are ring ranks
 *    0..ranks-1: map them to your communicator inside ctx.
 *  2 ra_ring_create copies the struct and may call reg for its buffers. No message travels.
 *  3 A pass: the library posts batches of ops, polls, waits. Calls of one ring never overlap. They
 *    come from whichever thread steps, without RA_CAP_ANY_THREAD only from steps with ith = 0. Only
 *    abort may come from any thread beside any other call.
 *  4 A failure: the library calls abort once, posts no more, calls quiesce.
 *  5 ra_ring_destroy: quiesce if a pass failed, then dereg. Your resources are yours to free.
 *
 * Level 0 is sendrecv alone; level 1 is post and poll; everything else is optional.
 *
 * Messages. The n-th send matches the n-th receive per (peer, channel). Channel 0 carries chunks
 * from a rank to its neighbour (r + 1 or r - 1 mod ranks, as the plan says). Channel 1 is used with
 * RA_CAP_SHARED, and in backward passes, where gradients return on it: from any rank, for which the
 * transport needs RA_CAP_ANY_PEER, or with RA_RETURN_RING from a neighbour. So a plan with train =
 * 1 needs two channels and max_ops of 3 of a transport that has post.
 *
 * A forward message is a 64-byte frame and the chunk: for each of its pieces of positions (zigzag
 * chunks have two) the positions if the layout is ARRAY, K rows, V rows, each part on a multiple of
 * 64. The piece that travels farther comes first, and the other is left off where no rank needs it
 * any more. Backward the f32 sums of gradients are between frame and chunk; on the return they are
 * alone.
 * Lengths are computed in the same way by both sides, exact, and at most max_msg; nothing is split
 * and no message is empty. Keep message boundaries: another length is RA_E_TRUNC. Tags start anew
 * with each pass. A cache (ra_infer) uses channel 0 alone, between any two ranks.
 *
 * Time. deadline_ns of a callback is an absolute time on ra_now_ns(), whatever the ring's clock is.
 * RA_NO_DEADLINE does not occur. INT64_MAX does: subtract, do not add. */
#define RA_TRANSPORT_ABI 1u
enum { RA_MSG_SEND = 1, RA_MSG_RECV = 2 };                          /* ra_transport_op.kind */
enum { RA_MSG_IDLE = 0, RA_MSG_PENDING = 1, RA_MSG_DONE = 2 };      /* ra_transport_op.state;
                                                                     * otherwise RA_E_*; anything
                                                                     * else is RA_E_IO */
enum { RA_MSG_LOAN_OK = 1 };           /* ra_transport_op.flags: a receive may point buf to lent
                                        * memory */
enum {
    RA_CAP_ANY_THREAD = 1,             /* calls may come from any thread, one at a time */
    RA_CAP_ANY_PEER = 2,               /* not only rank +- 1 */
    RA_CAP_LOAN = 4,                   /* honours RA_MSG_LOAN_OK and has release */
    RA_CAP_DEADLINE = 8,               /* sendrecv and wait return by deadline_ns even if the peer
                                        * is dead */
    RA_CAP_SHARED = 16                 /* all ranks are threads of one process: messages carry
                                        * addresses, nothing is packed. Needs ANY_PEER, post,
                                        * quiesce, two channels, and max_ops of at least
                                        * 2 ranks + 2. A message from another process is
                                        * RA_E_MISMATCH before any address in it is used */
};

typedef struct ra_transport_op {       /* the library's; stays at its address while PENDING */
    uint8_t  kind, channel;
    uint16_t flags;
    int32_t  peer;
    uint64_t tag;                      /* below 2^tag_bits; equal on both sides */
    void    *buf;                      /* send: read-only for everyone while PENDING; receive: yours
                                        * until DONE */
    size_t   len;                      /* exact */
    void    *mr;                       /* from reg, or null */
    int32_t  state;                    /* RA_MSG_IDLE when posted; written by post and poll */
    size_t   done;                     /* bytes moved, written before DONE; 0 counts as len. With
                                        * RA_E_TRUNC: bytes of buf that have come, if at least 64;
                                        * then the failure names what ranks disagree about. DONE of
                                        * a send: buf may be used again, whether or not the message
                                        * has been received */
    void    *scratch[8];               /* yours while PENDING; zero when posted */
} ra_transport_op;

struct ra_transport {
    uint32_t size, abi;                /* sizeof(ra_transport), RA_TRANSPORT_ABI: always first */
    uint32_t caps;                     /* RA_CAP_* */
    uint32_t channels;                 /* 0: 1; SHARED and train = 1 (with post) need 2 */
    uint32_t tag_bits;                 /* 0: 15 */
    uint32_t max_ops;                  /* most PENDING at once; 0: 2, one send and one receive.
                                        * train = 1 (with post) needs 3 */
    int32_t  rank, ranks;              /* 0, 0: not told; otherwise checked against the plan */
    size_t   max_msg;                  /* 0: 1 GiB; larger chunks are refused by ra_ring_create */
    size_t   align;                    /* of buffers for chunks, a power of two; 0: 64. More costs
                                        * more workspace than the plan says */
    const char *name;                  /* for messages; may be null */
    void    *ctx;                      /* passed to every callback */

    /* Level 0, required if post is null. Sends to `to` and receives from `from` at the same time;
     * returns when both are done. A side with nothing to move has RA_NO_PEER and length 0 (MPI: map
     * it to MPI_PROC_NULL). May block until deadline_ns, the call's deadline or the watchdog's, and
     * then returns RA_E_TIMEOUT; without RA_CAP_DEADLINE it may block for ever, and a dead peer
     * hangs this rank. Both buffers are yours until you return. Both sides of a message use the
     * same tag. Returns RA_OK, or an RA_E_* from RA_E_MISMATCH on (others count as RA_E_IO), after
     * which the ring has failed. */
    int (*sendrecv)(void *ctx, int to, const void *s, size_t s_len, int from, void *r, size_t r_len,
                    uint64_t tag, int64_t deadline_ns);

    /* Level 1. Never blocks. Looks at ops[0..n) that are RA_MSG_IDLE, accepts a prefix of them per
     * (peer, channel, direction), receives first, and sets each accepted op PENDING or at once
     * DONE. RA_OK: none is left IDLE. RA_AGAIN: some are; the library polls and posts them again.
     * All accepted ops make progress at the same time, whatever the order at the peers. Buffers are
     * as described at ra_transport_op.buf. Errors: as poll. */
    int (*post)(void *ctx, ra_transport_op *const *ops, int n);

    /* Required with post. Drives progress, also with n = 0; never blocks; moves PENDING ops among
     * ops[0..n), and any others if that is easier, to DONE or to a negative status. Returns RA_OK,
     * or an RA_E_* of the context itself: the ring has then failed. */
    int (*poll)(void *ctx, ra_transport_op *const *ops, int n);

    /* The callbacks from here on are optional. wait: as poll, but may block until one of ops leaves
     * PENDING, until abort, or until deadline_ns, which may be past; then it returns RA_OK, for an
     * error ends the pass. Returns at once if none is PENDING. Without it the library polls, yields
     * and sleeps. */
    int (*wait)(void *ctx, ra_transport_op *const *ops, int n, int64_t deadline_ns);

    /* Registers n bytes of the ring's buffers once, in ra_ring_create; dereg in ra_ring_destroy.
     * The handle you store in *mr is passed in every op that uses these buffers. If reg fails, the
     * library goes on without registration. */
    int (*reg)(void *ctx, void *p, size_t n, void **mr);
    int (*dereg)(void *ctx, void *mr);

    /* Required with RA_CAP_LOAN. Gives back op->buf of a receive that lent memory (the transport
     * changed buf), after its last use and its last onward send. Lent memory is aligned as buffers
     * are. After abort lent memory is yours again without it. */
    int (*release)(void *ctx, ra_transport_op *op);

    /* Any thread, any time, wait-free, idempotent: makes pending and later ops fail and wakes wait;
     * frees nothing. `why` is the RA_E_* of this rank. Tell the peers if the network can: their
     * passes then end at once with RA_E_ABORTED, otherwise by their deadline or watchdog. */
    int (*abort)(void *ctx, int why);

    /* Required with RA_CAP_SHARED. After abort. RA_OK: no buffer of the ring, and with
     * RA_CAP_SHARED no tensor of this rank, will be touched again. Return anything else if you
     * cannot guarantee that. You may block until deadline_ns. It may be called several times; the
     * first call may come with a deadline already passed, and then only announces that this rank
     * has stopped. */
    int (*quiesce)(void *ctx, int64_t deadline_ns);

    /* Text for a code that a callback returned; may return null. */
    const char *(*error_text)(void *ctx, int code);
    /* v1 ends here; append only */
};

/* -------------------------------------------------------------------------- bundled world
 * Ranks as threads of this process; a hop is a pointer. With RINGATTN_NO_THREADS all of it is
 * RA_E_UNSUPPORTED. Waiting spins briefly, then yields, then sleeps. */
typedef struct ra_world ra_world;
typedef ra_status (*ra_rank_fn)(ra_world *world, int rank, void *user);
typedef struct ra_world_desc {         /* {0} or a null pointer: all defaults */
    int32_t ranks;                     /* ra_world_create: required, 1..4096 */
    ra_allocator allocator;
    ra_error *error;
} ra_world_desc;

/* Creates a world, runs fn on `ranks` threads, joins, destroys. When fn of one rank returns an
 * error, pending and later calls of every other rank fail with RA_E_ABORTED instead of hanging.
 * When it returns RA_OK while others still wait for it, they get RA_E_PEER. Returns the first
 * cause. */
RINGATTN_API ra_status ra_world_run(int ranks, ra_rank_fn fn, void *user, const ra_world_desc *wd);

/* The same in parts, for programs with threads of their own. */
RINGATTN_API ra_status ra_world_create(ra_world **out, const ra_world_desc *wd);
RINGATTN_API const ra_transport *ra_world_transport(ra_world *world, int rank); /* lives as long as
                                        * world; null: no such rank */
RINGATTN_API void ra_world_leave(ra_world *world, int rank, ra_status why); /* this rank makes no
                                        * more calls; an error aborts the others. Any thread. */
RINGATTN_API void ra_world_destroy(ra_world *world); /* after all rings on it; null is fine */

/* ========================================================================== block engines
 * User-supplied arithmetic; plan, pruning, ring, order and merge stay here. fold gets query rows of
 * one sequence, all heads, against some keys of one chunk, and writes the normalised partial
 * result, which the library merges. (RUNS: the keys are those of several runs, the rows of one.)
 * Calls for the same rows come one at a time in the order that fixes the bits; calls for other rows
 * may come at the same time from other stepping threads. Returns RA_OK or a negative code: the pass
 * then fails with RA_E_ENGINE and that code. */
#define RA_ENGINE_ABI 1u
typedef struct ra_block {
    const ra_desc *desc;               /* resolved */
    const ra_tensors *tensors;         /* of the call: alibi and bias (the library applies sinks) */
    int32_t sequence, thread;
    int32_t partial;                   /* 0: every row sees every key, ignore the intervals */
    int64_t q_row, q_rows, k_rows;     /* q_row: first row among this rank's (for bias) */
    const uint8_t *q, *k, *v;          /* row 0, head 0 */
    int64_t q_token_stride, q_head_stride, k_token_stride, k_head_stride, v_token_stride,
        v_head_stride;
    const int32_t *q_pos, *k_pos;      /* [q_rows], [k_rows]; -1: empty cell */
    const int32_t *lo, *hi;            /* [q_rows] row sees lo <= key position < hi, */
    const int32_t *doc, *keep_end;     /* [q_rows] and doc <= key position < keep_end (<= hi) */
    float *o, *lse;                    /* write here: [q_rows][Hq][Dv], [q_rows][Hq] natural log; a
                                        * row that sees none of these keys: lse -inf */
} ra_block;
typedef struct ra_engine {
    uint32_t size, abi;                /* sizeof(ra_engine), RA_ENGINE_ABI */
    int64_t  block_queries;            /* most rows of a call, a multiple of RA_BLOCK_TOKENS; 0:
                                        * 256 */
    void    *ctx;
    int    (*fold)(void *ctx, const ra_block *block);                /* required */
    /* v1 ends here; append only */
} ra_engine;

/* ========================================================================== estimates
 * How long a context fits and how large a block hides a hop, before anything is bought. Formulas of
 * Liu, Zaharia, Abbeel, arXiv 2310.01889, section 3 and tables 2 and 3, generalised to GQA and
 * balanced causal work. Presets are published figures. */
enum { RA_HW_NONE, RA_HW_A100_NVLINK, RA_HW_A100_IB, RA_HW_TPU_V3, RA_HW_TPU_V4, RA_HW_TPU_V5E };
enum { RA_NET_NONE, RA_NET_NVLINK4, RA_NET_PCIE4_X16, RA_NET_IB_HDR };
typedef struct ra_hardware {           /* of one device */
    double  flops_per_s, memory_bytes, link_bytes_per_s, link_latency_s;
    int64_t devices;                   /* in the ring */
    int64_t block_tokens;              /* a preset's suggestion; 0: none */
} ra_hardware;
typedef struct ra_model {
    int64_t layers, q_heads, kv_heads, head_dim; /* required */
    int64_t hidden;                    /* 0: q_heads * head_dim */
    int64_t batch;                     /* 0: 1 */
    int32_t element_bytes;             /* 0: 2 */
    int32_t causal;                    /* 1: half the work, balanced */
    int64_t weight_bytes;              /* on each device, beside activations; 0: none */
    ra_error *error;
} ra_model;
typedef struct ra_estimate_result {
    double  block_min;                 /* tokens: smallest block per device that hides a hop,
                                        * (F/W) e Hkv / (2 f Hq), f = 1/2 if causal */
    double  device_tokens_min;         /* six such blocks: Q; K, V in use; K, V arriving; output */
    double  activation_bytes_token;    /* per layer, token and device: 6 b h e */
    double  cache_bytes_token;         /* K and V of all layers: 2 layers Hkv D e */
    int64_t context_max;               /* tokens over all devices whose activations of one layer and
                                        * K, V of all layers fit beside the weights */
    double  cache_bytes;               /* of context_max, all devices together */
    double  hop_compute_s, hop_transfer_s; /* of blocks of hw->block_tokens, or block_min */
    double  hidden_fraction;           /* min(1, compute / transfer) */
} ra_estimate_result;
/* Either preset may be NONE; a net overrides the link of hw. */
RINGATTN_API ra_status ra_hardware_preset(int32_t hw, int32_t net, int64_t devices,
                                          ra_hardware *out);
RINGATTN_API ra_status ra_estimate(const ra_hardware *hw, const ra_model *model,
                                   ra_estimate_result *out);
/* Bytes of K and V of `tokens` tokens: 2 tokens layers Hkv D e. 0: bad argument or overflow. */
RINGATTN_API int64_t ra_cache_bytes(int64_t tokens, int64_t layers, int64_t kv_heads,
                                    int64_t head_dim, int64_t element_bytes);

#ifdef __cplusplus
}
#endif
#endif /* RINGATTN_H ======== whoever only wants the API stops reading here ======== */
#if defined(RINGATTN_IMPLEMENTATION) && !defined(RA__IMPLEMENTED) && !defined(RA__BODY)
#define RA__IMPLEMENTED

/* ========================================================================== PLATFORM
 * Compiler, operating system and processor. Gives includes, attributes, strict floating point for
 * all that follows, and what strict C99 hides. */
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <sched.h>
#ifndef RINGATTN_NO_THREADS
#include <pthread.h>
#endif
#if defined(_WIN32)
#include <process.h>
#define RA__PROCESS_ID() _getpid()
#else
#include <unistd.h>
#define RA__PROCESS_ID() getpid()
#endif
#if defined(__linux__)
#include <sys/auxv.h>
#endif

#if defined(__x86_64__) && !defined(RINGATTN_SCALAR)
#define RA__X86 1
#include <cpuid.h>
#include <immintrin.h>
#else
#define RA__X86 0
#endif

#if defined(__aarch64__) && defined(__ARM_NEON) && !defined(__AARCH64EB__) && \
    !defined(RINGATTN_SCALAR)
#define RA__NEON 1
#include <arm_neon.h>
#else
#define RA__NEON 0
#endif

#ifndef RINGATTN_ASSERT
#define RINGATTN_ASSERT(x) ((void)0)
#endif
#ifndef RINGATTN_SELF                  /* how this file includes itself for the kernel bodies */
#ifdef __FILE_NAME__
#define RINGATTN_SELF __FILE_NAME__
#else
#define RINGATTN_SELF "ringattn.h"
#endif
#endif

#define RA__INLINE   static inline __attribute__((always_inline, unused))
#define RA__NOINLINE static __attribute__((noinline, unused))
#define RA__UNUSED   __attribute__((unused))

/* Clients compile with -Ofast: from here on arithmetic is IEEE again, and a*b + c is fused only
 * where it says so, or bits would depend on the compiler's mood. */
#if defined(__clang__)
#if defined(__x86_64__)                /* clang 14 has it on x86 alone */
#pragma float_control(precise, on, push)
#endif
#pragma STDC FP_CONTRACT OFF
#pragma clang fp contract(off)
#else
#pragma GCC push_options
#pragma GCC optimize("no-fast-math", "fp-contract=off")
#endif

/* gcc spends a quarter of -O2 on passes that find little here. Kernels are unrolled and vectorised
 * by hand; only those between RA__RANGES_BEGIN and RA__RANGES_END gain from value ranges. Rooms
 * between RA__ONCE_BEGIN and RA__ONCE_END run per plan or message, not per tile. Clients that do
 * not optimise get none of this. */
#if !defined(__clang__) && defined(__OPTIMIZE__) && !defined(__OPTIMIZE_SIZE__)
#pragma GCC optimize("no-tree-vrp", "no-tree-pre", "no-gcse", "no-tree-slp-vectorize")
#define RA__ONCE_BEGIN                                                                           \
    _Pragma("GCC push_options")                                                                  \
    _Pragma("GCC optimize(\"O1\", \"no-fast-math\", \"fp-contract=off\")")
#define RA__ONCE_END _Pragma("GCC pop_options")
#define RA__RANGES_BEGIN                                                                         \
    _Pragma("GCC push_options")                                                                  \
    _Pragma("GCC optimize(\"tree-vrp\")")
#define RA__RANGES_END _Pragma("GCC pop_options")
#else
#define RA__ONCE_BEGIN
#define RA__ONCE_END
#define RA__RANGES_BEGIN
#define RA__RANGES_END
#endif

#ifdef __cplusplus
extern "C" {
#elif defined(__STRICT_ANSI__) && !defined(_WIN32)
extern int clock_gettime(int clock, struct timespec *time);
extern int nanosleep(const struct timespec *request, struct timespec *remain);
#endif

/* ========================================================================== TYPES
 * What the rooms below share: a query block and a block of keys as the kernels see them, and the
 * table of functions that one instruction set provides. */

/* Per-row geometry of one query block: row i sees key position k iff
 * (lo <= k < hi) or (keep_first <= k < keep_end). Rows beyond the last have 0 in all four. */
typedef struct ra__rows {
    int32_t pos[RA_BLOCK_TOKENS];
    int32_t lo[RA_BLOCK_TOKENS], hi[RA_BLOCK_TOKENS];
    int32_t keep_first[RA_BLOCK_TOKENS], keep_end[RA_BLOCK_TOKENS];
    int64_t bias[RA_BLOCK_TOKENS];     /* see ra__score.bias_rows */
} ra__rows;

/* How a scaled score s is modified, in this order: s = cap * tanh(s / cap),
 * s = s - slope * |p - k|, s = s + bias. */
typedef struct ra__score {
    float softcap;                     /* 0: off */
    float slope;                       /* ALiBi of this head, 0: off */
    const uint8_t *bias;               /* of this head and row 0 of the block, or null */
    int64_t bias_row_stride, bias_key_stride; /* bytes; row 0: the same for all rows */
    const int64_t *bias_rows;          /* bytes from bias to each row, instead of the stride, which
                                        * is then not 0; or null */
    int32_t bias_dtype;                /* RA_F32, RA_F16, RA_BF16 */
    int64_t bias_keys;                 /* key positions from here on have bias 0 */
} ra__score;

/* Dropout: which weights become 0, the others are multiplied by `scale`. See ra__drop_apply. */
typedef struct ra__drop {
    uint64_t seed;
    uint32_t head, sequence;
    uint32_t threshold;                /* random words below it drop; 0: off */
    float scale;                       /* 1 / (1 - probability) */
} ra__drop;

/* Which keys of a tile its rows see: none, some, all. */
enum { RA__EMPTY, RA__PARTIAL, RA__FULL };
enum { RA__BATCH = 8 };                /* most blocks of keys that a kernel takes at once */

/* Rows that are needed next. Kernels prefetch them while they compute. */
enum { RA__PREFETCH_TENSORS = 2 * RA__BATCH + 1 };
typedef struct ra__prefetch_list {
    const uint8_t *at[RA__PREFETCH_TENSORS];      /* tensors one after the other, */
    int64_t stride[RA__PREFETCH_TENSORS];
    int32_t rows[RA__PREFETCH_TENSORS], bytes[RA__PREFETCH_TENSORS]; /* rows of so many bytes */
    int32_t count;
    int32_t which, row;                /* to prefetch next */
    int32_t step;                      /* rows to prefetch at once */
} ra__prefetch_list;

/* Up to 64 query rows of one head. q [Dk x 64] and acc [Dv x 64] are floats in a layout that only
 * the kernel knows, aligned to 64 bytes; m and l are [64]. The bits of a row depend on it alone. */
typedef struct ra__panel {
    float *q, *acc, *m, *l;
    int32_t rows;
    float factor;                      /* of q k: scale * log2 e, or scale under a softcap */
    const ra__rows *geo;               /* used in partial tiles, for ALiBi and dropout */
    ra__score score;
    ra__drop drop;
    ra__prefetch_list *prefetch;       /* shared by the panels of a task */
} ra__panel;

/* Bytes that a kernel needs: for q and acc of a panel, for scores, and for its copies of 64 keys.
 * batch: how many blocks it prefers to fold in one call. */
typedef struct ra__bytes {
    int64_t q, acc, s, k, v;
    int32_t batch;
} ra__bytes;

/* Memory of one thread with those sizes, aligned to 64. */
typedef struct ra__key_scratch {
    uint8_t *k, *v;
    float *s;
    int32_t shared;                    /* 1: several panels will read what is copied */
} ra__key_scratch;

/* At most 64 keys of one head. The rows are as stored; after prepare they have the form that the
 * kernel needs. */
typedef struct ra__keys {
    const uint8_t *k, *v;
    int64_t k_stride, v_stride;        /* bytes from row to row */
    int32_t n;                         /* 1..64 keys */
    int32_t v_clean;                   /* 1: no NaN or infinity in these V rows; by prepare */
    const int32_t *pos;                /* [n] positions, -1: empty cell; may be null if the tile is
                                        * full and neither ALiBi nor bias is on */
} ra__keys;

/* Rows of one head as stored: stride in bytes, dim elements of dtype. */
typedef struct ra__source { const uint8_t *data; int64_t stride; int32_t dtype, dim; } ra__source;

/* A panel of backward. fwd.q is Q as in forward, fwd.acc are the sums of dQ [Dk x 64], fwd.m is the
 * LSE of a row times log2(e), or +inf for a row without keys, and fwd.l is delta of a row. */
typedef struct ra__back_panel {
    ra__panel fwd;
    float *g;                          /* dO, laid out like p.q [Dv x 64] */
    float *q_rows, *g_rows;            /* Q and dO by rows, in the kernel's own layout */
    int32_t clean;                     /* 1: no NaN or infinity in Q and dO; by load_back */
    uint8_t *d_bias;                   /* of this head and row 0 of the block, or null */
    int64_t d_bias_row_stride, d_bias_key_stride, d_bias_keys;
} ra__back_panel;

/* Backward of one panel against one block of keys. Scratch: [64 keys][64 rows] floats each. */
typedef struct ra__back_job {
    const ra__back_panel *panel;
    const ra__keys *keys;
    int32_t k_dim, v_dim, partial;
    int32_t k_clean;                   /* 1: no NaN or infinity in K; used in partial tiles */
    int32_t want_q;                    /* 1: add to dQ */
    int32_t v_in_k;                    /* 1: dv are columns of dk */
    float scale;
    float *dk, *dv;                    /* sums of these keys' rows; null: not wanted */
    int64_t dk_stride, dv_stride;      /* floats from row to row */
    float *p, *ds;                     /* weights, and the gradient of scores */
    float *cap, *drop;                 /* 1 - tanh^2 under a softcap; factors of dropout */
    float *form;                       /* the store's s, for the kernel */
    const void *k_form;                /* the store of K, as prepare_back left it */
} ra__back_job;

/* Memory to prefetch in the order of its addresses: stretches of `lines` lines of 64 bytes, `jump`
 * bytes from the end of one to the next. */
typedef struct ra__stream {
    uintptr_t at;
    int64_t jump;
    int32_t left, lines;               /* of this stretch, of each */
} ra__stream;

/* Decoding: up to 4 query rows that read the same kv head, in the kernel's own order of dims. The
 * sums of row r so far are acc and l, in units of 2^m. Those of the current block are kept apart,
 * in block_acc and block_l. Arrays of 16 numbers hold those of row r at r, r + 4, r + 8, r + 12. */
typedef struct ra__decode_rows {
    const ra_desc *d;
    float *q, *acc, *block_acc;        /* [4][Dk], [4][Dv]; dims rounded up to RA__DECODE_DIMS */
    float *wide;                       /* q of up to 16 rows that these share, or null */
    int32_t lane;                      /* of row 0 among the 16 */
    float m[16], block_l[16], slope[16], l[4];
    ra__score score[4];                /* per row: its bias is row 0 */
    int32_t pos[4];
    float factor;                      /* of q k */
    int32_t modified;                  /* 1: some score needs more than the dot product */
    int32_t has_keys;                  /* bit r: row r has seen keys of the current block */
    int32_t one_row;                   /* 1: row 0 is the only one; scores and p are [key] */
} ra__decode_rows;

/* At most 16 keys of one head, as stored. Up to 64 if there is one row, it sees all of them, and
 * scores are not modified. */
typedef struct ra__decode_keys {
    const uint8_t *k, *v;
    int64_t k_stride, v_stride;        /* bytes from row to row */
    const int32_t *pos;                /* [n] needed only where scores are modified */
    uint64_t seen;                     /* bit 4 j + r: row r sees key j */
    int32_t n, partial;                /* partial: some row does not see some key */
    ra__stream *streams;               /* [2] or null: as much as these rows of K, V to prefetch */
} ra__decode_keys;
enum { RA__DECODE_ROWS = 4, RA__DECODE_KEYS = 16, RA__DECODE_DIMS = 32 };
enum { RA__DECODE_UNIT = 4 };          /* keys for which a maximum may rise; stretches are whole */

typedef struct ra__kernel {
    int32_t isa;
    void (*sizes)(ra__bytes *out, const ra_desc *d, int32_t shared);
    /* rows x dim elements, rows `stride` bytes apart, to packed f32 rows of dim floats. */
    void (*widen)(float *dst, const void *src, int64_t stride, int32_t dtype, int32_t rows,
                  int32_t dim);
    /* Brings keys from rows as stored to the form that the kernel needs, in place or in scratch.
     * Sets v_clean if the block has a partial tile. If d->v_in_k is set, V is found in K. */
    void (*prepare)(ra__keys *keys, const ra_desc *d, const ra__key_scratch *store,
                    int32_t partial);
    /* Packs p->rows query rows (stride in bytes) times p->factor into p->q. */
    void (*load_q)(const ra__panel *p, const void *src, int64_t stride, int32_t dtype, int32_t dim);
    /* acc from and to f32 rows (stride in floats); null src: zero. */
    void (*load_acc)(const ra__panel *p, const float *src, int64_t stride, int32_t dim);
    void (*store_acc)(const ra__panel *p, float *dst, int64_t stride, int32_t dim);
    /* Folds `count` blocks into the panel, one after the other, block i being RA__EMPTY (left out),
     * RA__PARTIAL or RA__FULL by kind[i]. s is scratch. Bits do not depend on how calls group the
     * blocks. */
    void (*fold)(const ra__panel *p, const ra__keys *keys, const int8_t *kind, int32_t count,
                 const ra_desc *d, float *s);
    /* dst row i = acc row i * factor[i], converted (stride in bytes). */
    void (*store_o)(const ra__panel *p, void *dst, int64_t stride, int32_t dtype, int32_t dim,
                    const float *factor);
    int32_t decode_unit;               /* keys: 4, or 8 in kernels that do not know one_row */
    /* Decoding. Loads row r of q, times factor. */
    void (*decode_load)(const ra__decode_rows *rows, int32_t r, const void *src, float factor);
    /* Folds keys into the current block of rows[0 .. n - 1]. keys[i]: how rows[i] see them. */
    void (*decode_fold)(ra__decode_rows *rows, const ra__decode_keys *keys, int32_t n);
    /* Ends the current block: adds its sums to acc and l. */
    void (*decode_close)(ra__decode_rows *rows);
    /* Multiplies row r of acc by factor and writes it to dst. */
    void (*decode_store)(const ra__decode_rows *rows, int32_t r, void *dst, float factor);
    /* Merges m [4], l [4] and acc (in the layout of rows->acc) of other keys. Exchanging the two
     * sides gives the same bits. */
    void (*decode_merge)(ra__decode_rows *rows, const float *other);
    /* Backward: sizes of the copies of 64 keys; batch: how many panels share them, at most
     * RA__BACK_PANELS; s: scratch for any use by the kernel. prepare_back returns 0 if K has a NaN
     * or an infinity, or may have one in blocks without partial tiles. */
    void (*sizes_back)(ra__bytes *out, const ra_desc *d);
    int32_t (*prepare_back)(ra__keys *keys, const ra_desc *d, const ra__key_scratch *store,
                            int32_t partial);
    /* Packs p.rows rows of Q and dO. q_rows and g_rows hold 64 rows of dims rounded up to 64. */
    void (*load_back)(ra__back_panel *x, const ra__source *q, const ra__source *g);
    /* delta[row] = sum of o[row] g[row] for `rows` rows. */
    void (*deltas)(float *delta, const ra__source *o, const ra__source *g, int32_t rows);
    /* The jobs of one block of keys, in the order of their panels. */
    void (*fold_back)(const ra__back_job *x, int32_t count);
    /* Adds a row of sums to the caller's gradient if dtype is RA_F32, otherwise writes it. */
    void (*put_grad)(void *to, const float *x, int32_t dtype, int32_t n);
} ra__kernel;

/* ========================================================================== CLOCK
 * Monotonic time, sleeping, and a condition variable with a timeout, on what strict C99 leaves
 * visible: the numbers of the clocks and two functions are hidden there by glibc and musl. Nothing
 * here depends on the wall clock where the system allows that: on Linux condition variables count
 * on the monotonic clock too; elsewhere a step of the wall clock can lengthen one slice of sleep,
 * from which a signal still wakes. */
#if defined(CLOCK_MONOTONIC)
#define RA__CLOCK_MONOTONIC CLOCK_MONOTONIC
#else
#define RA__CLOCK_MONOTONIC 1          /* Linux, in strict C99 */
#endif

RINGATTN_API int64_t ra_now_ns(void) {
    struct timespec t;
    clock_gettime(RA__CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + (int64_t)t.tv_nsec;
}

/* Saturates at both ends; never 0, which would be RA_NO_DEADLINE. */
RINGATTN_API int64_t ra_deadline_ms(int64_t ms) {
    int64_t now = ra_now_ns();
    if (ms > (INT64_MAX - now) / 1000000) return INT64_MAX;
    if (ms <= -now / 1000000) return 1;
    return now + ms * 1000000;
}

/* Sums and differences of times saturate. */
RA__INLINE int64_t ra__time_add(int64_t a, int64_t b) {
    int64_t sum;
    if (!__builtin_add_overflow(a, b, &sum)) return sum;
    return b < 0 ? INT64_MIN : INT64_MAX;
}

RA__INLINE int64_t ra__time_since(int64_t now, int64_t then) {
    int64_t ns;
    if (!__builtin_sub_overflow(now, then, &ns)) return ns;
    return now < then ? INT64_MIN : INT64_MAX;
}

/* Gives the processor's other hyperthread a chance; nanoseconds. */
RA__INLINE void ra__pause(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

RA__INLINE void ra__yield(void) {
    sched_yield();
}

/* Sleeps about ns nanoseconds, less if a signal arrives. ns <= 0: returns at once. */
RA__UNUSED static void ra__sleep_ns(int64_t ns) {
    struct timespec t;
    if (ns <= 0) return;
    memset(&t, 0, sizeof t);
    t.tv_sec = (time_t)(ns / 1000000000);
    t.tv_nsec = (long)(ns % 1000000000);
    nanosleep(&t, NULL);
}

#ifndef RINGATTN_NO_THREADS
#if defined(__linux__)
#define RA__COND_CLOCK RA__CLOCK_MONOTONIC
#if defined(__STRICT_ANSI__) && !defined(__cplusplus)
extern int pthread_condattr_setclock(pthread_condattr_t *attr, int clock);
#endif
#else
#define RA__COND_CLOCK 0               /* CLOCK_REALTIME everywhere: the default of pthreads */
#endif

/* 0: fine. */
RA__UNUSED static int ra__cond_init(pthread_cond_t *cond) {
    pthread_condattr_t attr;
    int bad = pthread_condattr_init(&attr);
    if (bad) return bad;
#if defined(__linux__)
    bad = pthread_condattr_setclock(&attr, RA__COND_CLOCK);
#endif
    if (!bad) bad = pthread_cond_init(cond, &attr);
    pthread_condattr_destroy(&attr);
    return bad;
}

/* Sleeps on cond, with lock held, until a signal, spuriously, or for ns nanoseconds. */
RA__UNUSED static void ra__cond_sleep(pthread_cond_t *cond, pthread_mutex_t *lock, int64_t ns) {
    struct timespec t;
    int64_t until;
    clock_gettime(RA__COND_CLOCK, &t);
    until = (int64_t)t.tv_nsec + ns;
    t.tv_sec += (time_t)(until / 1000000000);
    t.tv_nsec = (long)(until % 1000000000);
    pthread_cond_timedwait(cond, lock, &t);
}
#undef RA__COND_CLOCK
#endif
#undef RA__CLOCK_MONOTONIC

/* ========================================================================== ATOMICS
 * Loads acquire, stores release, everything that reads and writes does both. There are no fences:
 * ThreadSanitizer cannot read them, and where a store must be ordered before a later load both
 * sides use read-modify-writes. */
RA__INLINE int32_t ra__load_i32(const int32_t *p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
RA__INLINE int64_t ra__load_i64(const int64_t *p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
RA__INLINE void *ra__load_ptr(void *const *p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }

RA__INLINE void ra__store_i32(int32_t *p, int32_t v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
RA__INLINE void ra__store_i64(int64_t *p, int64_t v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
RA__INLINE void ra__store_ptr(void **p, void *v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }

/* Return the value before. */
RA__INLINE int32_t ra__add_i32(int32_t *p, int32_t v) {
    return __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST);
}
RA__INLINE int64_t ra__add_i64(int64_t *p, int64_t v) {
    return __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST);
}

/* 1: *p was `from` and is now `to`; 0: it was something else and stays. Never fails by chance. */
RA__INLINE int32_t ra__cas_i32(int32_t *p, int32_t from, int32_t to) {
    return __atomic_compare_exchange_n(p, &from, to, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST) ? 1 : 0;
}

RA__INLINE int32_t ra__cas_i64(int64_t *p, int64_t from, int64_t to) {
    return __atomic_compare_exchange_n(p, &from, to, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST) ? 1 : 0;
}

/* ========================================================================== MEM
 * Sentences of refusal, checked sizes, and memory from the caller's allocator. Nothing here knows
 * attention. */

/* Appends s to dst[*at..cap), always terminated. */
static void ra__put(char *dst, size_t cap, size_t *at, const char *s) {
    while (*s && *at + 1 < cap) dst[(*at)++] = *s++;
    dst[*at] = 0;
}

static void ra__put_i64(char *dst, size_t cap, size_t *at, int64_t value) {
    char digits[24];
    size_t n = sizeof digits;
    uint64_t u = value < 0 ? 0 - (uint64_t)value : (uint64_t)value;
    digits[--n] = 0;
    do { digits[--n] = (char)('0' + (int)(u % 10)); u /= 10; } while (u);
    if (value < 0) digits[--n] = '-';
    ra__put(dst, cap, at, digits + n);
}

/* text with '#' replaced by value. */
static void ra__sentence(char *dst, size_t cap, const char *text, int64_t value) {
    size_t at = 0;
    dst[0] = 0;
    for (; *text; text++) {
        char one[2] = { 0, 0 };
        one[0] = *text;
        if (*text == '#') ra__put_i64(dst, cap, &at, value);
        else ra__put(dst, cap, &at, one);
    }
}

/* Fills e (may be null) and returns s. status and field together name one check. */
RA__NOINLINE ra_status ra__refuse(ra_error *e, ra_status s, const char *field, const char *text,
                                  int64_t value) {
    size_t at = 0;
    if (!e) return s;
    e->status = s;
    ra__put(e->field, sizeof e->field, &at, field);
    ra__sentence(e->text, sizeof e->text, text, value);
    return s;
}

/* The same for part of a field: "t.o" and ".head_stride". */
RA__NOINLINE ra_status ra__refuse_part(ra_error *e, ra_status s, const char *const name[2],
                                       const char *text, int64_t value) {
    char field[sizeof e->field];
    size_t at = 0;
    ra__put(field, sizeof field, &at, name[0]);
    ra__put(field, sizeof field, &at, name[1]);
    return ra__refuse(e, s, field, text, value);
}

/* *out = a * b; 0 if that overflows 62 bits. a, b >= 0. */
RA__INLINE int ra__mul(int64_t a, int64_t b, int64_t *out) {
    return !__builtin_mul_overflow(a, b, out) && *out < ((int64_t)1 << 62);
}

RA__INLINE int64_t ra__min(int64_t a, int64_t b) { return a < b ? a : b; }
RA__INLINE int64_t ra__max(int64_t a, int64_t b) { return a > b ? a : b; }
RA__INLINE int64_t ra__ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
RA__INLINE int64_t ra__round_up(int64_t a, int64_t b) { return ra__ceil_div(a, b) * b; }

/* a + b and a * b for figures, a, b >= 0: INT64_MAX if that overflows. */
RA__INLINE int64_t ra__add_sat(int64_t a, int64_t b) {
    int64_t sum;
    return __builtin_add_overflow(a, b, &sum) ? INT64_MAX : sum;
}
RA__INLINE int64_t ra__mul_sat(int64_t a, int64_t b) {
    int64_t product;
    return __builtin_mul_overflow(a, b, &product) ? INT64_MAX : product;
}

/* align: a power of two up to 4096. The default allocator keeps malloc's pointer just below. bytes
 * is of 64 bits everywhere: null if a size_t does not hold it. */
static void *ra__alloc(const ra_allocator *a, int64_t bytes, size_t align) {
    if ((uint64_t)bytes > SIZE_MAX - align - sizeof(void *)) return NULL;
    if (a && a->alloc) return a->alloc(a->ctx, (size_t)bytes, align);
    unsigned char *base = (unsigned char *)malloc((size_t)bytes + align + sizeof(void *));
    if (!base) return NULL;
    uintptr_t at = ((uintptr_t)base + sizeof(void *) + align - 1) & ~(uintptr_t)(align - 1);
    memcpy((void *)(at - sizeof(void *)), &base, sizeof base);
    return (void *)at;
}

static void ra__free(const ra_allocator *a, void *p, size_t bytes) {
    void *base;
    if (!p) return;
    if (a && a->alloc) { a->free(a->ctx, p, bytes); return; }
    memcpy(&base, (unsigned char *)p - sizeof(void *), sizeof base);
    free(base);
}

/* Carves pieces out of one block. With base null it only counts. Every piece starts on 64. */
typedef struct ra__arena { uint8_t *base; int64_t used; } ra__arena;

static void *ra__carve(ra__arena *a, int64_t bytes) {
    void *p = a->base ? a->base + a->used : NULL;
    a->used += ra__round_up(bytes, 64);
    return p;
}

/* The same on a multiple of align, 64 or more. */
static uint8_t *ra__carve_aligned(ra__arena *a, int64_t bytes, int64_t align) {
    uint8_t *p = (uint8_t *)ra__carve(a, align - 64 + bytes);
    return p ? p + ((0 - (uintptr_t)p) & (uintptr_t)(align - 1)) : NULL;
}

/* The part of a workspace that starts on a multiple of 64; *bytes becomes its length. */
static uint8_t *ra__workspace_align(void *workspace, size_t *bytes) {
    const size_t skip = (64 - (size_t)((uintptr_t)workspace % 64)) % 64;
    *bytes = *bytes < skip ? 0 : *bytes - skip;
    return (uint8_t *)workspace + skip;
}

RINGATTN_API const char *ra_status_text(ra_status status) {
    switch (status) {
#define RA__TEXT(name, value, text) case name: return text;
        RA_STATUS_LIST(RA__TEXT)
#undef RA__TEXT
        default: return "unknown status";
    }
}

RINGATTN_API int32_t ra_version(void) { return RINGATTN_VERSION; }

/* ========================================================================== MATH
 * Scalar arithmetic without libm: bits of floats, 16-bit formats, exp, log, sqrt, and the merge of
 * partial results. NaN and infinity are told by their bits, which no compiler flag can take away.
 * Works with and without flushing of denormals. In and out: plain numbers; no state. */
RA__INLINE uint32_t ra__f32_bits(float x) {
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}
RA__INLINE float ra__f32_of(uint32_t u) {
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}
RA__INLINE uint64_t ra__f64_bits(double x) {
    uint64_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}
RA__INLINE double ra__f64_of(uint64_t u) {
    double x;
    memcpy(&x, &u, sizeof x);
    return x;
}
RA__INLINE float ra__neg_inf(void) { return ra__f32_of(0xff800000u); }
RA__INLINE int32_t ra__is_neg_inf(float x) { return ra__f32_bits(x) == 0xff800000u; }
RA__INLINE int32_t ra__is_finite(float x) {
    return (ra__f32_bits(x) & 0x7f800000u) != 0x7f800000u;
}

RA__INLINE float ra__f32_of_bf16(uint16_t h) { return ra__f32_of((uint32_t)h << 16); }

/* Nearest even; a NaN keeps its upper bits and becomes quiet. */
RA__INLINE uint16_t ra__bf16_of_f32(float x) {
    uint32_t u = ra__f32_bits(x);
    if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((u >> 16) | 0x40u);
    return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

RA__INLINE float ra__f32_of_f16(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, a = h & 0x7fffu;
    if (a > 0x7c00u) return ra__f32_of(sign | 0x7fc00000u | (a << 13));
    if (a == 0x7c00u) return ra__f32_of(sign | 0x7f800000u);
    if (a >= 0x400u) return ra__f32_of(sign | ((a << 13) + (112u << 23)));
    return ra__f32_of(sign | ra__f32_bits((float)a * (1.0f / 16777216.0f)));
}

/* Nearest even, to infinity from 65520 on, subnormals exactly, NaN as vcvtps2ph does. */
RA__INLINE uint16_t ra__f16_of_f32(float x) {
    uint32_t u = ra__f32_bits(x), sign = (u >> 16) & 0x8000u, a = u & 0x7fffffffu, r, rest, shift;
    if (a > 0x7f800000u) return (uint16_t)(sign | 0x7e00u | ((a >> 13) & 0x1ffu));
    if (a >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u);
    if (a >= 0x38800000u) {
        a -= 112u << 23;
        return (uint16_t)(sign | ((a + 0xfffu + ((a >> 13) & 1u)) >> 13));
    }
    if (a < 0x33000000u) return (uint16_t)sign;
    shift = 126u - (a >> 23);          /* 14..24: the result counts units of 2^-24 */
    a = (a & 0x7fffffu) | 0x800000u;
    r = a >> shift;
    rest = a & ((1u << shift) - 1u);
    if (rest > 1u << (shift - 1u) || (rest == 1u << (shift - 1u) && (r & 1u))) r++;
    return (uint16_t)(sign | r);
}

/* 32 elements of dtype; q: a block. */
static void ra__block_load(float x[32], const uint8_t *p, int32_t dtype) {
    uint16_t h;
    int32_t i;
    if (dtype == RA_F32) memcpy(x, p, 128);
    for (i = 0; i < 32 && dtype != RA_F32; i++) {
        memcpy(&h, p + (dtype == RA_Q8_0 ? 0 : 2 * i), sizeof h);
        x[i] = dtype == RA_BF16 ? ra__f32_of_bf16(h) : ra__f32_of_f16(h);
        if (dtype == RA_Q8_0) x[i] *= (float)(int8_t)p[2 + i];
    }
}

/* The same back. RA_Q8_0: the scale is 1/127 of the largest magnitude of the block; NaN becomes 0,
 * and what no f16 scale reaches the largest number that one does. */
static void ra__block_store(uint8_t *p, const float x[32], int32_t dtype) {
    const float reach = 127.0f * 65504.0f;
    float most = 0.0f, inverse, y[32];
    uint16_t h;
    int32_t i;
    if (dtype == RA_F32) memcpy(p, x, 128);
    for (i = 0; i < 32 && (dtype == RA_F16 || dtype == RA_BF16); i++) {
        h = dtype == RA_F16 ? ra__f16_of_f32(x[i]) : ra__bf16_of_f32(x[i]);
        memcpy(p + 2 * i, &h, sizeof h);
    }
    if (dtype != RA_Q8_0) return;
    for (i = 0; i < 32; i++) {
        y[i] = (ra__f32_bits(x[i]) & 0x7fffffffu) > 0x7f800000u ? 0.0f : x[i];
        y[i] = y[i] > reach ? reach : y[i] < -reach ? -reach : y[i];
        if (y[i] > most || -y[i] > most) most = y[i] < 0.0f ? -y[i] : y[i];
    }
    h = ra__f16_of_f32(most / 127.0f);
    memcpy(p, &h, sizeof h);
    inverse = h ? 127.0f / most : 0.0f;
    for (i = 0; i < 32; i++)
        p[2 + i] = (uint8_t)(int8_t)(y[i] * inverse + (y[i] < 0.0f ? -0.5f : 0.5f));
}

RINGATTN_API ra_status ra_convert(void *dst, int32_t dst_dtype, const void *src, int32_t src_dtype,
                                  int64_t n) {
    static const uint8_t size[] = {0, 4, 2, 2}; /* bytes of an element */
    uint8_t *to = (uint8_t *)dst;
    const uint8_t *from = (const uint8_t *)src;
    if (dst_dtype < RA_F32 || dst_dtype > RA_Q8_0 || src_dtype < RA_F32 || src_dtype > RA_Q8_0)
        return RA_E_ENUM;
    if (n < 0) return RA_E_RANGE;
    if ((dst_dtype == RA_Q8_0 || src_dtype == RA_Q8_0) && n % 32) return RA_E_SHAPE;
    if (n > 0 && (!dst || !src)) return RA_E_NULL;
    for (; n > 0; n -= 32) {
        const size_t in = src_dtype == RA_Q8_0 ? 34 : (size_t)(n < 32 ? n : 32) * size[src_dtype];
        const size_t out = dst_dtype == RA_Q8_0 ? 34 : (size_t)(n < 32 ? n : 32) * size[dst_dtype];
        uint8_t block[2][128] = {{0}};
        float x[32];
        memcpy(block[0], from, in);
        ra__block_load(x, block[0], src_dtype);
        ra__block_store(block[1], x, dst_dtype);
        memcpy(to, block[1], out);
        from += in;
        to += out;
    }
    return RA_OK;
}

/* exp(x), relative error below 1e-15; 0 below -708, infinity above 709.7. With n the integer next
 * to x / ln 2 and r = x - n ln 2, |r| <= 0.347: exp(x) = 2^n sum r^k / k!, k to 13. ln 2 comes in
 * two parts, the first with zeros at its end, so that n * part is exact. */
RA__NOINLINE double ra__exp(double x) {
    double p = 1.0, r;
    int32_t n, k;
    if ((ra__f64_bits(x) & 0x7fffffffffffffffu) > 0x7ff0000000000000u) return x;
    if (x < -708.0) return 0.0;
    if (x > 709.7) return ra__f64_of(0x7ff0000000000000u);
    n = (int32_t)(x * 1.4426950408889634 + (x < 0.0 ? -0.5 : 0.5));
    r = (x - (double)n * 6.93147180369123816490e-01) - (double)n * 1.90821492927058770002e-10;
    for (k = 13; k > 0; k--) p = 1.0 + p * r / (double)k;
    return p * ra__f64_of((uint64_t)(n + 1022) << 52) * 2.0;
}

/* log(x), absolute error below 1e-15 near 1. x = 2^n f with f in [sqrt 1/2, sqrt 2) and
 * t = (f - 1) / (f + 1), |t| < 0.172: log f = 2 (t + t^3/3 + ... + t^21/21). */
RA__NOINLINE double ra__log(double x) {
    uint64_t u = ra__f64_bits(x);
    double f, t, p = 0.0;
    int32_t n, k;
    if ((u & 0x7fffffffffffffffu) > 0x7ff0000000000000u || u == 0x7ff0000000000000u) return x;
    if ((u << 1) < 0x0020000000000000u) return ra__f64_of(0xfff0000000000000u);
    if (u >> 63) return ra__f64_of(0x7ff8000000000000u);
    n = (int32_t)(u >> 52) - 1023;
    f = ra__f64_of((u & 0x000fffffffffffffu) | 0x3ff0000000000000u);
    if (f > 1.4142135623730951) {
        f *= 0.5;
        n++;
    }
    t = (f - 1.0) / (f + 1.0);
    for (k = 21; k > 0; k -= 2) p = p * (t * t) + 2.0 / (double)k;
    return (double)n * 0.69314718055994531 + p * t;
}

/* Square root of x >= 0 by Newton's iteration from a guess that is 4 % off; each step halves the
 * square of that. */
RA__NOINLINE double ra__sqrt(double x) {
    double y;
    int32_t i;
    if (!(x > 0.0)) return 0.0;
    y = ra__f64_of((ra__f64_bits(x) >> 1) + 0x1ff7a3bea91d9b1bu);
    for (i = 0; i < 4; i++) y = 0.5 * (y + x / y);
    return y;
}

/* With a = lse, b = lse2, hi and lo the larger and the smaller of them and e = exp(lo - hi) <= 1:
 *   lse = log(exp(a) + exp(b)) = hi + log(1 + e)
 *   o   = (exp(a) o + exp(b) o2) / (exp(a) + exp(b)), the weights being 1 / (1 + e), e / (1 + e),
 * in which nothing can overflow. A side whose lse is -inf has weight 0 and is left out by branch,
 * for its o may hold anything, and 0 * NaN is NaN. Swapping the sides gives the same bits. */
RINGATTN_API void ra_merge(float *o, float *lse, const float *o2, const float *lse2, int64_t rows,
                           int32_t dim) {
    int64_t row;
    int32_t i;
    for (row = 0; row < rows; row++, o += dim, o2 += dim) {
        float a = lse[row], b = lse2[row];
        double e, w, w2;
        if (ra__is_neg_inf(a) && ra__is_neg_inf(b)) {
            memset(o, 0, (size_t)dim * sizeof *o);
            continue;
        }
        if (ra__is_neg_inf(b)) continue;
        if (ra__is_neg_inf(a)) {
            memcpy(o, o2, (size_t)dim * sizeof *o);
            lse[row] = b;
            continue;
        }
        e = ra__exp(a > b ? (double)b - (double)a : (double)a - (double)b);
        w = (a > b ? 1.0 : e) / (1.0 + e);
        w2 = (a > b ? e : 1.0) / (1.0 + e);
        for (i = 0; i < dim; i++) o[i] = (float)((double)o[i] * w + (double)o2[i] * w2);
        lse[row] = (float)((double)(a > b ? a : b) + ra__log(1.0 + e));
    }
}

/* ========================================================================== KERNEL
 * Folds one block of at most 64 keys into one panel of at most 64 query rows. The text is the same
 * for every instruction set. Lanes are query rows: S^T = K Q^T, O^T = V^T P^T. So keys and values
 * are broadcast from where they are stored, the softmax needs no sum across lanes, and the result
 * of a row does not depend on other rows.
 *
 * A panel consists of slabs of RA__SLAB rows: q [slab][Dk][RA__SLAB], acc [slab][Dv][RA__SLAB].
 * Scores are in base 2, because q is multiplied by scale * log2 e. Per slab and block:
 *   s = K q, modified, and -inf where masked;  u = m, or 0 where m = -inf
 *   p = 2^(s - u);  l = l + sum p;  acc = acc + V^T p
 * The sums over a block start at 0, so the rounding error grows with the number of blocks, not of
 * keys.
 *
 * The maximum m is stale: it is that of the first block in which the row saw a key. p may therefore
 * exceed 1. This is harmless, because a shift does not change a softmax and floats have exponents
 * to spare. So scores become p while they are in registers, and acc is not rescaled. When l of a
 * row would pass 2^32, the row gets a new m, its l and acc are rescaled, and the strip folds the
 * block again. The other rows of the strip keep their m, and so their bits.
 *
 * A row that sees none of the keys keeps m, l and acc to the bit. Its acc is selected, not added
 * to, because even x + 0 changes the bits of -0. A NaN reaches only rows that see it: scores are
 * masked after they are computed, and values that a row does not see are multiplied by p = 0. If
 * such a value is a NaN or infinite (v_clean 0), each product is selected instead.
 *
 * The online softmax is that of Milakov and Gimelshein, arXiv 1805.02867. Blocks and rescaling are
 * those of FlashAttention-2, arXiv 2307.08691, section 3.1.
 *
 * This file includes itself once per instruction set with RA__BODY defined. The room of an
 * instruction set defines the operations that the body calls and these macros:
 *   RA__NAME(x)                      x with the suffix of the instruction set
 *   RA__ISA_INLINE, RA__ISA_STATIC   attributes of its functions
 *   RA__FLOATS, RA__INTS, RA__MASK   vectors of floats, of integers, of lanes that are set
 *   RA__WIDTH, RA__VECTORS           lanes per vector, vectors per slab
 *   RA__TILE_HEIGHT                  keys (scores) or dims (values) per tile of a whole slab
 *   RA__DECODE_TILE_KEYS             decode: keys per tile of scores
 *   RA__DECODE_TILE_CHUNKS           decode: chunks per tile of values
 * + - * / on RA__FLOATS are the compiler's. A tile is ni broadcast elements by nt vectors; these
 * parameters, and the dtype of inline functions, are constants after inlining. A slab with few rows
 * left, and half a slab in partial tiles, takes tiles of height 8 with fewer vectors. */
enum { RA__DEPTH = 128 };              /* most products that one chain of sums adds up */
enum { RA__DELTA_DIMS = 64 };          /* dims of a row that deltas converts at once */
enum { RA__ALIAS_BYTES = 4096 };       /* rows this far apart compete for the same cache sets */

static const float ra__log2e = 1.44269504f;
static const float ra__l_limit = 4294967296.0f;
static const float ra__decode_slack = 16.0f; /* decode: how far scores may exceed m */
/* Flags that decode_value_tile takes with a dtype: any keys and dims; row 0 only. */
enum { RA__DECODE_ANY = 8, RA__DECODE_ONE_ROW = 16 };
enum { RA__DECODE_ROW_CHUNKS = 4 };    /* per tile of values if there is one row */
static const uint64_t ra__seen_by_row_0 = 0x1111111111111111u; /* in ra__decode_keys.seen */

/* 2^f as a polynomial: coefficients by powers of f, minimax in relative error. c0 = 1, so that 2^0
 * is exactly 1. The error before rounding is 4e-9 for f in [-1/2, 1/2] and 3e-8 for f in [0, 1]. */
static const float ra__exp2_near[7] = {1.0f, 0.693147206f, 0.240226469f, 0.0555032878f,
                                       0.00961848896f, 0.001339993f, 0.000153458f};
static const float ra__exp2_floor[7] = {1.0f, 0.693146984f, 0.240229836f, 0.055483342f,
                                        0.00967884101f, 0.00124396877f, 0.000217022557f};

/* tanh(y) = y + y^3 P(y^2) for |y| < 0.625: Moshier, Cephes, tanhf. */
static const float ra__tanh_c[5] = {-0.333332819f, 0.133314422f, -0.0537397155f, 0.0206390888f,
                                    -0.00570498872f};

/* Bias of row `row` of the query block and the key at position 0. */
RA__INLINE const uint8_t *ra__bias_row(const ra__score *score, int32_t row) {
    return score->bias + (score->bias_rows ? score->bias_rows[row] : row * score->bias_row_stride);
}

/* Bias of row `row` of the query block and the key at position `pos`. */
RA__INLINE float ra__bias_at(const ra__score *score, int32_t row, int32_t pos) {
    const uint8_t *at = ra__bias_row(score, row) + pos * score->bias_key_stride;
    float x = 0.0f;
    uint16_t half;
    if (pos < 0 || pos >= score->bias_keys) return x;
    if (score->bias_dtype == RA_F32) {
        memcpy(&x, at, sizeof x);
        return x;
    }
    memcpy(&half, at, sizeof half);
    return score->bias_dtype == RA_F16 ? ra__f32_of_f16(half) : ra__f32_of_bf16(half);
}

/* Prefetches the lines of 64 bytes of [at, at + bytes). The addresses may be invalid. */
RA__INLINE void ra__prefetch(uintptr_t at, int32_t bytes) {
    for (int32_t i = 0; i < bytes; i += 64) __builtin_prefetch((const void *)(at + (uintptr_t)i));
}

/* Prefetches the line at `at` into the level 2 cache. The address may be invalid. */
RA__INLINE void ra__prefetch_far(uintptr_t at) { __builtin_prefetch((const void *)at, 0, 2); }

/* Prefetches the row of `bytes` bytes at p + offset floats. The address may be invalid. */
RA__INLINE void ra__prefetch_row(const float *p, int64_t offset, int32_t bytes) {
    ra__prefetch((uintptr_t)p + (uintptr_t)(offset * 4), bytes);
}

/* Adds rows to the list, if there are any. */
RA__INLINE void ra__prefetch_add(ra__prefetch_list *x, const uint8_t *at, int64_t stride,
                                 int64_t rows, int64_t bytes) {
    x->at[x->count] = at;
    x->stride[x->count] = stride;
    x->bytes[x->count] = (int32_t)bytes;
    x->rows[x->count] = (int32_t)rows;
    x->count += bytes > 0 && rows > 0;
}

/* Prefetches the next rows of the list.
 * PERF: a few at a time, because processors drop requests that come all at once. Zen 5, 4096 tokens
 * of 8 heads, AVX-512: D 64 80 -> 83, D 128 83 -> 86 % of the FMA peak. */
RA__NOINLINE void ra__prefetch_some(ra__prefetch_list *x) {
    for (int32_t i = 0; i < x->step && x->which < x->count; i++) {
        int64_t offset = x->row * x->stride[x->which];
        ra__prefetch((uintptr_t)x->at[x->which] + (uintptr_t)offset, x->bytes[x->which]);
        if (++x->row < x->rows[x->which]) continue;
        x->row = 0;
        x->which++;
    }
}

/* n lines have been prefetched. At the end of a stretch the stream goes on to the next one. */
RA__INLINE void ra__stream_advance(ra__stream *a, int32_t n) {
    a->left -= n;
    if (a->left > 0) return;
    a->at += (uintptr_t)(a->jump + 64 * (int64_t)a->left);
    a->left = a->lines;
}

/* Returns x about 9 cycles later. */
RA__INLINE uintptr_t ra__delay_address(uintptr_t x) {
    uintptr_t one = 1;
    __asm__("" : "+r"(one));
    for (int32_t i = 0; i < 3; i++) {
        x *= one;
        __asm__("" : "+r"(x));
    }
    return x;
}

/* Prefetches the next n lines of two streams, at the end of a stretch perhaps some beyond it.
 * PERF: processors drop requests that come faster than memory can serve them, and requests that
 * have waited come all at once. So each address is made to depend on the one before. Zen 5, 8 heads
 * of 512 bytes side by side: 54 -> 80 % of the read bandwidth, bf16 55 -> 75 %. */
RA__INLINE void ra__stream_prefetch(ra__stream *a, int32_t n) {
    uintptr_t k = a[0].at, v = a[1].at;
    for (int32_t i = 0; i < n; i++) {
        ra__prefetch(k, 64);
        ra__prefetch(v, 64);
        k = ra__delay_address(k + 64);
        v = ra__delay_address(v + 64);
    }
    a[0].at = k;
    a[1].at = v;
    ra__stream_advance(&a[0], n);
    ra__stream_advance(&a[1], n);
}

/* Row j of f32 keys and values. */
RA__INLINE const float *ra__key_row(const ra__keys *keys, int32_t j) {
    return (const float *)(const void *)(keys->k + j * keys->k_stride);
}
RA__INLINE const float *ra__value_row(const ra__keys *keys, int32_t j) {
    return (const float *)(const void *)(keys->v + j * keys->v_stride);
}

/* 1 if f32 kernels copy rows: always if they are not f32, otherwise if several panels will read
 * them by columns and their stride is bad. stride 0: any stride.
 * PERF: rows a multiple of 4 KB apart share a few sets of the L1 cache. So the rows that are read
 * by columns, V forward and K backward, are copied once for the panels of a task. Zen 5, D 128, 8
 * heads: AVX-512 79 -> 83, AVX2 71 -> 87 % of the FMA peak. Strides of 2 KB and less gain nothing.
 * Rows that are read one by one are not copied: forward 90 -> 91.5 %, backward 87 -> 88 %. */
RA__INLINE int32_t ra__is_copied(int32_t dtype, int64_t stride, int32_t shared) {
    return dtype != RA_F32 || (shared && stride % RA__ALIAS_BYTES == 0);
}

/* Philox4x32-10: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC
 * 2011. In: x is the counter. Out: x holds four random words. */
RA__INLINE void ra__philox(uint32_t x[4], uint64_t seed) {
    uint32_t key0 = (uint32_t)seed, key1 = (uint32_t)(seed >> 32);
    for (int32_t i = 0; i < 10; i++) {
        uint64_t a = (uint64_t)x[0] * 0xd2511f53u, b = (uint64_t)x[2] * 0xcd9e8d57u;
        x[0] = (uint32_t)(b >> 32) ^ x[1] ^ key0;
        x[1] = (uint32_t)b;
        x[2] = (uint32_t)(a >> 32) ^ x[3] ^ key1;
        x[3] = (uint32_t)a;
        key0 += 0x9e3779b9u;
        key1 += 0xbb67ae85u;
    }
}

/* Multiplies the weights s [keys][stride] of rows [row, row + n) of the panel by 0 or by the scale.
 * The counter is (key position / 4, query position, head, sequence), and the last two bits of the
 * key position choose the word. So a weight is dropped or not whatever the order of the work. */
static RA__UNUSED void ra__drop_apply(const ra__panel *panel, const ra__keys *keys, int32_t row,
                                      int32_t n, float *s, int32_t stride) {
    uint32_t word[RA_BLOCK_TOKENS][4];
    const ra__drop *x = &panel->drop;
    int32_t last = -1;
    for (int32_t j = 0; j < keys->n; j++) {
        int32_t pos = keys->pos[j];
        if (pos < 0) continue;
        for (int32_t i = 0; i < n && (last < 0 || pos >> 2 != last >> 2); i++) {
            word[i][0] = (uint32_t)pos >> 2;
            word[i][1] = (uint32_t)panel->geo->pos[row + i];
            word[i][2] = x->head;
            word[i][3] = x->sequence;
            ra__philox(word[i], x->seed);
        }
        last = pos;
        for (int32_t i = 0; i < n; i++)
            s[j * stride + i] *= word[i][pos & 3] < x->threshold ? 0.0f : x->scale;
    }
}

/* Adds the gradient of scores ds [keys][64] to the caller's gradient of the bias. If the bias is
 * broadcast along rows or keys, the sums over the block start at 0. */
static RA__UNUSED void ra__bias_grad_add(const ra__back_panel *panel, const ra__keys *keys,
                                         const float *ds) {
    int32_t one_key = panel->d_bias_key_stride == 0, one_row = panel->d_bias_row_stride == 0;
    float of_key[RA_BLOCK_TOKENS] = {0}, of_row[RA_BLOCK_TOKENS] = {0};
    for (int32_t j = 0; j < keys->n; j++) {
        int64_t pos = keys->pos[j];
        if (pos < 0 || pos >= panel->d_bias_keys) continue;
        for (int32_t r = 0; r < panel->fwd.rows; r++) {
            float *to = one_row ? &of_key[j] : one_key ? &of_row[r] :
                        (float *)(void *)(panel->d_bias + r * panel->d_bias_row_stride +
                                          pos * panel->d_bias_key_stride);
            *to += ds[j * RA_BLOCK_TOKENS + r];
        }
        if (one_row)
            *(float *)(void *)(panel->d_bias + pos * panel->d_bias_key_stride) += of_key[j];
    }
    for (int32_t r = 0; one_key && r < panel->fwd.rows; r++)
        *(float *)(void *)(panel->d_bias + r * panel->d_bias_row_stride) += of_row[r];
}

/* 1 if the row sees the position k. */
RA__INLINE int32_t ra__row_sees(const ra__rows *geo, int32_t row, int32_t k) {
    return k >= 0 && ((geo->lo[row] <= k && k < geo->hi[row]) ||
                      (geo->keep_first[row] <= k && k < geo->keep_end[row]));
}

/* 1 if the score needs more than the dot product. */
RA__INLINE int32_t ra__score_is_modified(const ra__score *score) {
    return score->softcap != 0.0f || score->slope != 0.0f || score->bias;
}

#if defined(__clang__)
#define RA__UNROLL _Pragma("clang loop unroll(full)")
#define RA__UNROLL_2                   /* clang does so by itself */
#else
#define RA__UNROLL _Pragma("GCC unroll 16")
#define RA__UNROLL_2 _Pragma("GCC unroll 2")
#endif
#define RA__MAIN                       /* the first inclusion: rooms follow the body */
#endif /* RINGATTN_IMPLEMENTATION, first part */

#if defined(RA__BODY)
#define RA__SLAB (RA__VECTORS * RA__WIDTH)
/* A phase of the work. As a function of its own it has all registers. */
#define RA__ISA_NOINLINE __attribute__((noinline)) RA__ISA_STATIC

/* RA__WIDTH elements of a q8_0 row from element i on, a multiple of RA__WIDTH. of_f16 converts
 * several halves, of which the first is the scale. */
RA__ISA_INLINE RA__FLOATS RA__NAME(of_q8_0)(const uint8_t *row, int32_t i) {
    const uint8_t *block = row + (int64_t)(i / 32) * 34;
    RA__FLOATS scale = RA__NAME(of_f16)(block);
    return RA__NAME(of_i8)(block + 2 + i % 32) * RA__NAME(set)(scale[0]);
}

/* RA__WIDTH elements of dtype. src may have any alignment. */
RA__ISA_INLINE RA__FLOATS RA__NAME(convert)(const uint8_t *src, int32_t dtype) {
    if (dtype == RA_F16) return RA__NAME(of_f16)(src);
    if (dtype == RA_BF16) return RA__NAME(of_bf16)(src);
    return RA__NAME(load)((const float *)(const void *)src);
}

/* n elements of dtype to floats. src may have any alignment. */
RA__ISA_STATIC void RA__NAME(read_row)(float *dst, const uint8_t *src, int32_t dtype, int32_t n) {
    int32_t size = dtype == RA_F32 ? 4 : 2, i = 0;
    for (; dtype == RA_Q8_0 && i < n; i += RA__WIDTH)
        RA__NAME(store)(dst + i, RA__NAME(of_q8_0)(src, i));
    for (; n - i >= RA__WIDTH; i += RA__WIDTH)
        RA__NAME(store)(dst + i, RA__NAME(convert)(src + (int64_t)i * size, dtype));
    for (; i < n; i++) {
        if (dtype == RA_F32) {
            memcpy(dst + i, src + (int64_t)i * 4, sizeof *dst);
            continue;
        }
        uint16_t h;
        memcpy(&h, src + (int64_t)i * 2, sizeof h);
        dst[i] = dtype == RA_F16 ? ra__f32_of_f16(h) : ra__f32_of_bf16(h);
    }
}

/* n floats to elements of dtype. dst may have any alignment. */
RA__ISA_STATIC void RA__NAME(write_row)(uint8_t *dst, const float *src, int32_t dtype, int32_t n) {
    if (dtype == RA_F32) {
        memcpy(dst, src, (size_t)n * sizeof *src);
        return;
    }
    int32_t i = 0;
    for (; n - i >= RA__WIDTH; i += RA__WIDTH) {
        if (dtype == RA_F16) RA__NAME(to_f16)(dst + 2 * i, RA__NAME(load)(src + i));
        else RA__NAME(to_bf16)(dst + 2 * i, RA__NAME(load)(src + i));
    }
    for (; i < n; i++) {
        uint16_t h = dtype == RA_F16 ? ra__f16_of_f32(src[i]) : ra__bf16_of_f32(src[i]);
        memcpy(dst + 2 * i, &h, sizeof h);
    }
}

/* v[i] = row i of a square of RA__WIDTH rows and columns. Only `rows` rows of n elements of dtype
 * are in memory; the others are 0. */
RA__ISA_INLINE void RA__NAME(read_square)(RA__FLOATS *v, const uint8_t *src, int64_t stride,
                                          int32_t dtype, int32_t rows, int32_t n) {
    float x[RA__WIDTH][RA__WIDTH] = {{0}};
    if (rows >= RA__WIDTH && n >= RA__WIDTH) {
        RA__UNROLL for (int32_t i = 0; i < RA__WIDTH; i++)
            v[i] = RA__NAME(convert)(src + i * stride, dtype);
        return;
    }
    n = n < RA__WIDTH ? n : RA__WIDTH;
    for (int32_t i = 0; i < RA__WIDTH && i < rows; i++)
        RA__NAME(read_row)(x[i], src + i * stride, dtype, n);
    RA__UNROLL for (int32_t i = 0; i < RA__WIDTH; i++) v[i] = RA__NAME(load)(x[i]);
}

/* The other way: writes what exists of the square. */
RA__ISA_INLINE void RA__NAME(write_square)(uint8_t *dst, int64_t stride, int32_t dtype,
                                           const RA__FLOATS *v, int32_t rows, int32_t n) {
    float x[RA__WIDTH][RA__WIDTH];
    if (rows >= RA__WIDTH && n >= RA__WIDTH && dtype == RA_F32) {
        RA__UNROLL for (int32_t i = 0; i < RA__WIDTH; i++)
            RA__NAME(store)((float *)(void *)(dst + i * stride), v[i]);
        return;
    }
    n = n < RA__WIDTH ? n : RA__WIDTH;
    RA__UNROLL for (int32_t i = 0; i < RA__WIDTH; i++) RA__NAME(store)(x[i], v[i]);
    for (int32_t i = 0; i < RA__WIDTH && i < rows; i++)
        RA__NAME(write_row)(dst + i * stride, x[i], dtype, n);
}

/* A strip, which is nt vectors of one slab, against the keys [first, last) of one block. */
typedef struct RA__NAME(strip) {
    const ra__panel *panel;
    const ra__keys *keys;
    float *s;                          /* [keys][RA__SLAB]: scores, then p */
    int32_t row;                       /* first row of the strip */
    int32_t nt;                        /* vectors: 1, RA__VECTORS / 2 or RA__VECTORS */
    int32_t first, last;               /* no row sees the other keys */
    int32_t partial;                   /* 1: some row does not see some key */
    int32_t stored;                    /* 1: s gets scores, and max is found; 0: s gets p */
    float max[RA__SLAB];               /* largest score of the block */
    float shift[RA__SLAB];             /* u, see above */
    float sum[RA__SLAB];               /* of p over the block */
    RA__MASK seen[RA__VECTORS];        /* partial: rows that see a key of the block */
} RA__NAME(strip);

/* The product of a matrix A, whose elements are broadcast, and a matrix B, read in vectors. Strides
 * are in floats. */
typedef struct RA__NAME(product) {
    const float *a, *b;
    int64_t row, step;                 /* of A: from row to row, from column to column */
    int32_t b_step, depth;             /* from row to row of B; columns of A and rows of B */
} RA__NAME(product);

/* c[i][t] = sum over k < depth of a[i * row + k * step] b[k * b_step + t], with t in vectors. c is
 * in registers. */
RA__ISA_INLINE void RA__NAME(multiply)(const RA__NAME(product) *ab, RA__FLOATS (*c)[RA__VECTORS],
                                       int32_t ni, int32_t nt) {
    const float *a = ab->a, *b = ab->b;
    int64_t row = ab->row, step = ab->step;
    int32_t b_step = ab->b_step;
    RA__UNROLL for (int32_t i = 0; i < ni; i++)
        RA__UNROLL for (int32_t t = 0; t < nt; t++) c[i][t] = RA__NAME(set)(0.0f);
    RA__UNROLL_2 for (int32_t k = 0; k < ab->depth; k++, a += step, b += b_step) {
        RA__FLOATS y[RA__VECTORS];
        RA__UNROLL for (int32_t t = 0; t < nt; t++)
            y[t] = RA__NAME(hold)(RA__NAME(load)(b + t * RA__WIDTH));
        RA__UNROLL for (int32_t i = 0; i < ni; i++) {
            RA__FLOATS z = RA__NAME(set)(a[i * row]);
            RA__UNROLL for (int32_t t = 0; t < nt; t++) c[i][t] = RA__NAME(fma)(z, y[t], c[i][t]);
        }
    }
}

/* The product in pieces of RA__DEPTH columns of A, which is dim columns in all and contiguous by
 * rows; B has the layout of a panel. sum [ni][sum_row] is scratch where the pieces meet. A single
 * chain of 576 products would lose one digit more. */
RA__ISA_INLINE void RA__NAME(multiply_long)(RA__NAME(product) *ab, int32_t dim, float *sum,
                                            int32_t sum_row, RA__FLOATS (*c)[RA__VECTORS],
                                            int32_t ni, int32_t nt) {
    ab->step = 1;
    ab->b_step = RA__SLAB;
    for (int32_t d = 0;; d += RA__DEPTH) {
        ab->depth = dim - d < RA__DEPTH ? dim - d : RA__DEPTH;
        RA__NAME(multiply)(ab, c, ni, nt);
        RA__UNROLL for (int32_t i = 0; i < ni; i++)
            RA__UNROLL for (int32_t t = 0; t < nt; t++)
                if (d > 0) c[i][t] = c[i][t] + RA__NAME(load)(sum + i * sum_row + t * RA__WIDTH);
        if (dim - d <= RA__DEPTH) break;
        RA__UNROLL for (int32_t i = 0; i < ni; i++)
            RA__UNROLL for (int32_t t = 0; t < nt; t++)
                RA__NAME(store)(sum + i * sum_row + t * RA__WIDTH, c[i][t]);
        ab->a += RA__DEPTH;
        ab->b += RA__DEPTH * RA__SLAB;
    }
}

/* Address of element (row, 0) of an array of a panel; the elements of a row are RA__SLAB apart. */
RA__ISA_INLINE float *RA__NAME(panel_row)(float *base, int32_t row, int32_t dim) {
    return base + (int64_t)(row / RA__SLAB) * RA__SLAB * dim + row % RA__SLAB;
}

/* Stores p of ni keys and vector t, from their scores c, to s. */
RA__ISA_INLINE void RA__NAME(tile_weights)(RA__NAME(strip) *strip, float *s,
                                           RA__FLOATS (*c)[RA__VECTORS], int32_t ni, int32_t t) {
    RA__FLOATS shift = RA__NAME(load)(strip->shift + t * RA__WIDTH);
    RA__FLOATS sum = RA__NAME(load)(strip->sum + t * RA__WIDTH);
    RA__UNROLL for (int32_t i = 0; i < ni; i++) {
        RA__FLOATS p = RA__NAME(exp2)(c[i][t] - shift);
        RA__NAME(store)(s + i * RA__SLAB + t * RA__WIDTH, p);
        sum = sum + p;
    }
    RA__NAME(store)(strip->sum + t * RA__WIDTH, sum);
}

/* Stores the scores of ni keys and vector t to s and finds their maximum. */
RA__ISA_INLINE void RA__NAME(tile_scores)(RA__NAME(strip) *strip, float *s,
                                          RA__FLOATS (*c)[RA__VECTORS], int32_t ni, int32_t t) {
    RA__FLOATS top = RA__NAME(load)(strip->max + t * RA__WIDTH);
    RA__UNROLL for (int32_t i = 0; i < ni; i++) {
        RA__NAME(store)(s + i * RA__SLAB + t * RA__WIDTH, c[i][t]);
        top = RA__NAME(max)(top, c[i][t]);
    }
    RA__NAME(store)(strip->max + t * RA__WIDTH, top);
}

/* Scores, or p, of ni keys from key j on. */
RA__ISA_INLINE void RA__NAME(score_tile)(RA__NAME(strip) *strip, int32_t k_dim, int32_t j,
                                         int32_t ni, int32_t nt) {
    RA__NAME(product) ab;
    RA__FLOATS c[8][RA__VECTORS];
    float *s = strip->s + j * RA__SLAB;
    ab.a = ra__key_row(strip->keys, j);
    ab.row = strip->keys->k_stride / 4;
    ab.b = RA__NAME(panel_row)(strip->panel->q, strip->row, k_dim);
    RA__NAME(multiply_long)(&ab, k_dim, s, RA__SLAB, c, ni, nt);
    if (strip->stored) {
        RA__UNROLL for (int32_t t = 0; t < nt; t++) RA__NAME(tile_scores)(strip, s, c, ni, t);
        return;
    }
    RA__UNROLL for (int32_t t = 0; t < nt; t++) RA__NAME(tile_weights)(strip, s, c, ni, t);
}

/* Scores, or p, of all keys; the last few in smaller tiles. */
RA__ISA_INLINE void RA__NAME(score_tiles)(RA__NAME(strip) *strip, int32_t k_dim, int32_t ni,
                                          int32_t nt) {
    int32_t j = strip->first;
    for (int32_t t = 0; t < nt; t++)
        RA__NAME(store)(strip->max + t * RA__WIDTH, RA__NAME(set)(ra__neg_inf()));
    for (; strip->last - j >= ni; j += ni) {
        RA__NAME(score_tile)(strip, k_dim, j, ni, nt);
        ra__prefetch_some(strip->panel->prefetch);
    }
    for (; ni > 4 && strip->last - j >= 4; j += 4) RA__NAME(score_tile)(strip, k_dim, j, 4, nt);
    for (; j < strip->last; j++) RA__NAME(score_tile)(strip, k_dim, j, 1, nt);
}

RA__ISA_NOINLINE void RA__NAME(scores)(RA__NAME(strip) *strip, int32_t k_dim) {
    if (strip->nt == RA__VECTORS) RA__NAME(score_tiles)(strip, k_dim, RA__TILE_HEIGHT, RA__VECTORS);
    else if (RA__VECTORS > 2 && strip->nt > 1)
        RA__NAME(score_tiles)(strip, k_dim, 8, RA__VECTORS / 2);
    else RA__NAME(score_tiles)(strip, k_dim, 8, 1);
}

/* tanh(y): y + y^3 P(y^2) for |y| < 0.625, otherwise (1 - e) / (1 + e) with e = exp(-2 |y|) and the
 * sign of y. The error is about 1e-7, relative to y if y is small. */
RA__ISA_INLINE RA__FLOATS RA__NAME(tanh)(RA__FLOATS y) {
    RA__FLOATS zero = RA__NAME(set)(0.0f), one = RA__NAME(set)(1.0f);
    RA__FLOATS square = y * y, a = RA__NAME(abs)(y);
    RA__FLOATS e = RA__NAME(exp2)(a * RA__NAME(set)(-2.88539008f));
    RA__FLOATS small = RA__NAME(set)(ra__tanh_c[4]), large = (one - e) / (one + e);
    RA__UNROLL for (int32_t i = 3; i >= 0; i--)
        small = RA__NAME(fma)(small, square, RA__NAME(set)(ra__tanh_c[i]));
    small = RA__NAME(fma)(small * square, y, y);
    large = RA__NAME(select)(RA__NAME(less)(y, zero), zero - large, large);
    return RA__NAME(select)(RA__NAME(less)(a, RA__NAME(set)(0.625f)), small, large);
}

/* The score to base 2: s = cap tanh(s / cap), s - slope |p - k|, s + bias. s comes in base 2, or in
 * base e under a softcap. */
RA__ISA_INLINE RA__FLOATS RA__NAME(modify)(const ra__score *score, RA__FLOATS s,
                                           RA__FLOATS distance, RA__FLOATS bias) {
    if (score->softcap != 0.0f)
        s = RA__NAME(tanh)(s * RA__NAME(set)(1.0f / score->softcap)) *
            RA__NAME(set)(score->softcap * ra__log2e);
    if (score->slope != 0.0f)
        s = RA__NAME(fma)(RA__NAME(set)(-score->slope * ra__log2e), distance, s);
    if (score->bias) s = RA__NAME(fma)(bias, RA__NAME(set)(ra__log2e), s);
    return s;
}

/* Lanes of the rows from `row` on that see the position k. */
RA__ISA_INLINE RA__MASK RA__NAME(sees)(const ra__rows *geo, int32_t row, int32_t k) {
    if (k < 0) return RA__NAME(none)();
    return RA__NAME(any_of)(
        RA__NAME(within)(RA__NAME(load_int)(geo->lo + row), RA__NAME(load_int)(geo->hi + row), k),
        RA__NAME(within)(RA__NAME(load_int)(geo->keep_first + row),
                         RA__NAME(load_int)(geo->keep_end + row), k));
}

/* Bias of one vector of rows from `row` on and the key at position pos; 0 beyond the panel. */
RA__ISA_INLINE RA__FLOATS RA__NAME(vector_bias)(const ra__panel *panel, int32_t row, int32_t pos) {
    float bias[RA__WIDTH];
    for (int32_t i = 0; i < RA__WIDTH; i++)
        bias[i] = row + i < panel->rows ? ra__bias_at(&panel->score, row + i, pos) : 0.0f;
    return RA__NAME(load)(bias);
}

/* 1 if the biases of RA__WIDTH keys from key j on are contiguous. */
RA__ISA_INLINE int32_t RA__NAME(bias_is_contiguous)(const RA__NAME(strip) *strip, int32_t j) {
    const int32_t *pos = strip->keys->pos + j;
    int32_t size = strip->panel->score.bias_dtype == RA_F32 ? 4 : 2;
    if (strip->panel->score.bias_key_stride != size || strip->last - j < RA__WIDTH) return 0;
    if (pos[0] < 0 || strip->panel->score.bias_keys - pos[0] < RA__WIDTH) return 0;
    for (int32_t i = 1; i < RA__WIDTH; i++)
        if (pos[i] != pos[0] + i) return 0;
    return 1;
}

/* to[j - strip->first] = bias of key j for the rows from `row` on; 0 beyond the panel.
 * PERF: rows of the bias are loaded as vectors and transposed. Zen 5, D 128: AVX-512 51 -> 68, AVX2
 * 64 -> 75 % of the FMA peak. The bias of the next block is prefetched, although other panels come
 * before it: 72.8 -> 76.1 %, bf16 60 -> 70 % of its peak. */
RA__ISA_NOINLINE void RA__NAME(load_bias)(const RA__NAME(strip) *strip, int32_t row,
                                          float (*to)[RA__WIDTH]) {
    const ra__score *score = &strip->panel->score;
    int32_t j = strip->first;
    while (j < strip->last) {
        float *at = to[j - strip->first];
        if (strip->panel->rows - row >= RA__WIDTH && RA__NAME(bias_is_contiguous)(strip, j)) {
            int64_t first = strip->keys->pos[j] * score->bias_key_stride;
            RA__FLOATS v[RA__WIDTH];
            for (int32_t i = 0; i < RA__WIDTH; i++) {
                const uint8_t *from = ra__bias_row(score, row + i) + first;
                v[i] = RA__NAME(convert)(from, score->bias_dtype);
                ra__prefetch_far((uintptr_t)from +
                                 (uintptr_t)(RA_BLOCK_TOKENS * score->bias_key_stride));
            }
            RA__NAME(transpose)(v);
            RA__UNROLL for (int32_t i = 0; i < RA__WIDTH; i++)
                RA__NAME(store)(at + i * RA__WIDTH, v[i]);
            j += RA__WIDTH;
        } else {
            RA__NAME(store)(at, RA__NAME(vector_bias)(strip->panel, row, strip->keys->pos[j]));
            j++;
        }
    }
}

/* Modifies the scores of vector t and finds their maximum. */
RA__ISA_NOINLINE void RA__NAME(modify_vector)(RA__NAME(strip) *strip, int32_t t) {
    const ra__score *score = &strip->panel->score;
    int32_t row = strip->row + t * RA__WIDTH, full = score->bias && score->bias_row_stride != 0;
    float bias[RA_BLOCK_TOKENS][RA__WIDTH];
    RA__FLOATS top = RA__NAME(set)(ra__neg_inf()), b = RA__NAME(set)(0.0f);
    if (full) RA__NAME(load_bias)(strip, row, bias);
    for (int32_t j = strip->first; j < strip->last; j++) {
        int32_t pos = strip->keys->pos ? strip->keys->pos[j] : 0;
        float *s = strip->s + j * RA__SLAB + t * RA__WIDTH;
        if (full) b = RA__NAME(load)(bias[j - strip->first]);
        else if (score->bias) b = RA__NAME(set)(ra__bias_at(score, 0, pos));
        RA__FLOATS x = RA__NAME(distance)(strip->panel->geo->pos + row, pos);
        x = RA__NAME(modify)(score, RA__NAME(load)(s), x, b);
        top = RA__NAME(max)(top, x);
        RA__NAME(store)(s, x);
    }
    RA__NAME(store)(strip->max + t * RA__WIDTH, top);
}

/* Masks the scores of vector t. Finds their maximum, and which rows see a key. */
RA__ISA_INLINE void RA__NAME(mask_vector)(RA__NAME(strip) *strip, int32_t t, int32_t keep) {
    const ra__rows *geo = strip->panel->geo;
    const int32_t *pos = strip->keys->pos;
    int32_t row = strip->row + t * RA__WIDTH;
    RA__INTS lo = RA__NAME(load_int)(geo->lo + row), hi = RA__NAME(load_int)(geo->hi + row);
    RA__INTS first = RA__NAME(load_int)(geo->keep_first + row);
    RA__INTS end = RA__NAME(load_int)(geo->keep_end + row);
    RA__FLOATS low = RA__NAME(set)(ra__neg_inf()), top = low;
    RA__MASK any = RA__NAME(none)();
    for (int32_t j = strip->first; j < strip->last; j++) {
        float *s = strip->s + j * RA__SLAB + t * RA__WIDTH;
        RA__MASK seen = RA__NAME(none)();
        if (pos[j] >= 0) seen = RA__NAME(within)(lo, hi, pos[j]);
        if (keep && pos[j] >= 0)
            seen = RA__NAME(any_of)(seen, RA__NAME(within)(first, end, pos[j]));
        any = RA__NAME(any_of)(any, seen);
        RA__FLOATS x = RA__NAME(select)(seen, RA__NAME(load)(s), low);
        top = RA__NAME(max)(top, x);
        RA__NAME(store)(s, x);
    }
    RA__NAME(store)(strip->max + t * RA__WIDTH, top);
    strip->seen[t] = any;
}

/* Second pass over the scores if the dot product is not all: modifies and masks them, and finds
 * their maximum. */
RA__ISA_NOINLINE void RA__NAME(adjust)(RA__NAME(strip) *strip) {
    const ra__rows *geo = strip->panel->geo;
    int32_t keep = 0, last = strip->row + strip->nt * RA__WIDTH;
    for (int32_t i = strip->row; i < last && strip->partial; i++)
        keep |= geo->keep_first[i] < geo->keep_end[i];
    for (int32_t t = 0; t < strip->nt; t++) {
        if (ra__score_is_modified(&strip->panel->score)) RA__NAME(modify_vector)(strip, t);
        if (strip->partial && !keep) RA__NAME(mask_vector)(strip, t, 0);
        if (strip->partial && keep) RA__NAME(mask_vector)(strip, t, 1);
    }
}

/* Scores become p, and p is summed. */
RA__ISA_INLINE void RA__NAME(weigh_vectors)(RA__NAME(strip) *strip, int32_t nt) {
    RA__FLOATS shift[RA__VECTORS], sum[RA__VECTORS];
    float *s = strip->s + strip->first * RA__SLAB;
    int32_t n = strip->last - strip->first;
    RA__UNROLL for (int32_t t = 0; t < nt; t++) {
        shift[t] = RA__NAME(load)(strip->shift + t * RA__WIDTH);
        sum[t] = RA__NAME(set)(0.0f);
    }
    for (int32_t j = 0; j < n; j++, s += RA__SLAB)
        RA__UNROLL for (int32_t t = 0; t < nt; t++) {
            RA__FLOATS p = RA__NAME(exp2)(RA__NAME(load)(s + t * RA__WIDTH) - shift[t]);
            RA__NAME(store)(s + t * RA__WIDTH, p);
            sum[t] = sum[t] + p;
        }
    RA__UNROLL for (int32_t t = 0; t < nt; t++) RA__NAME(store)(strip->sum + t * RA__WIDTH, sum[t]);
}

RA__ISA_NOINLINE void RA__NAME(weigh)(RA__NAME(strip) *strip) {
    if (strip->nt == RA__VECTORS) RA__NAME(weigh_vectors)(strip, RA__VECTORS);
    else if (RA__VECTORS > 2 && strip->nt > 1) RA__NAME(weigh_vectors)(strip, RA__VECTORS / 2);
    else RA__NAME(weigh_vectors)(strip, 1);
}

/* Sets the shift from m. Returns nonzero if some row has no maximum yet. */
RA__ISA_NOINLINE int32_t RA__NAME(load_shift)(RA__NAME(strip) *strip) {
    int32_t fresh = 0;
    for (int32_t t = 0; t < strip->nt; t++) {
        RA__FLOATS m = RA__NAME(load)(strip->panel->m + strip->row + t * RA__WIDTH);
        fresh |= RA__NAME(any_nonfinite)(m);
        RA__NAME(store)(strip->shift + t * RA__WIDTH, RA__NAME(shift_of)(m));
        RA__NAME(store)(strip->sum + t * RA__WIDTH, RA__NAME(set)(0.0f));
    }
    return fresh;
}

/* Lanes of the rows of vector t whose l passes the limit. */
RA__ISA_INLINE RA__MASK RA__NAME(over_limit)(const RA__NAME(strip) *strip, int32_t t) {
    RA__FLOATS l = RA__NAME(load)(strip->panel->l + strip->row + t * RA__WIDTH) +
                   RA__NAME(load)(strip->sum + t * RA__WIDTH);
    return RA__NAME(less)(RA__NAME(set)(ra__l_limit), l);
}

/* Nonzero if there are any. */
RA__ISA_NOINLINE int32_t RA__NAME(any_over_limit)(const RA__NAME(strip) *strip) {
    RA__FLOATS zero = RA__NAME(set)(0.0f), inf = RA__NAME(set)(-ra__neg_inf());
    int32_t any = 0;
    for (int32_t t = 0; t < strip->nt; t++)
        any |= RA__NAME(any_nonfinite)(RA__NAME(select)(RA__NAME(over_limit)(strip, t), inf, zero));
    return any;
}

/* Rows without a maximum get that of the block as m. If `again`, rows that are over the limit get a
 * new m as well, which is at least their old one + 24, and their sums are rescaled. */
RA__ISA_NOINLINE void RA__NAME(raise_max)(RA__NAME(strip) *strip, int32_t v_dim, int32_t again) {
    for (int32_t t = 0; t < strip->nt; t++) {
        int32_t row = strip->row + t * RA__WIDTH;
        float *m = strip->panel->m + row, *l = strip->panel->l + row;
        float *acc = RA__NAME(panel_row)(strip->panel->acc, strip->row, v_dim) + t * RA__WIDTH;
        RA__FLOATS old = RA__NAME(load)(m), top = RA__NAME(load)(strip->max + t * RA__WIDTH);
        RA__MASK fresh = RA__NAME(less)(old, RA__NAME(set)(-3.40282347e38f));
        RA__FLOATS next = RA__NAME(select)(fresh, top, old);
        if (again) {
            RA__MASK over = RA__NAME(over_limit)(strip, t);
            top = RA__NAME(max)(top, old + RA__NAME(set)(24.0f));
            next = RA__NAME(select)(over, top, next);
            RA__FLOATS alpha = RA__NAME(exp2)(old - next);
            alpha = RA__NAME(select)(over, alpha, RA__NAME(set)(1.0f));
            RA__NAME(store)(l, RA__NAME(load)(l) * alpha);
            for (int32_t d = 0; d < v_dim; d++, acc += RA__SLAB)
                RA__NAME(store)(acc, RA__NAME(load)(acc) * alpha);
        }
        RA__NAME(store)(m, next);
        RA__NAME(store)(strip->shift + t * RA__WIDTH, RA__NAME(shift_of)(next));
    }
}

/* Stores the scores of the block, sets the maxima, and computes p. again: 1 if l of some row has
 * passed the limit. */
RA__ISA_STATIC void RA__NAME(weigh_stored)(RA__NAME(strip) *strip, const ra_desc *d,
                                           int32_t again) {
    strip->stored = 1;
    RA__NAME(scores)(strip, d->k_dim);
    if (strip->partial || ra__score_is_modified(&strip->panel->score)) RA__NAME(adjust)(strip);
    RA__NAME(raise_max)(strip, d->v_dim, again);
    RA__NAME(weigh)(strip);
}

/* Computes p of the block and updates m and l. */
RA__ISA_STATIC void RA__NAME(softmax)(RA__NAME(strip) *strip, const ra_desc *d) {
    strip->stored = RA__NAME(load_shift)(strip) || strip->partial ||
                    ra__score_is_modified(&strip->panel->score);
    if (strip->stored) RA__NAME(weigh_stored)(strip, d, 0);
    else RA__NAME(scores)(strip, d->k_dim);
    if (RA__NAME(any_over_limit)(strip)) RA__NAME(weigh_stored)(strip, d, 1);
    for (int32_t t = 0; t < strip->nt; t++) {
        float *l = strip->panel->l + strip->row + t * RA__WIDTH;
        RA__NAME(store)(l, RA__NAME(load)(l) + RA__NAME(load)(strip->sum + t * RA__WIDTH));
    }
}

/* acc of one dim and vector t += sum, except in rows that see none of the keys. */
RA__ISA_INLINE void RA__NAME(accumulate)(const RA__NAME(strip) *strip, float *acc, int32_t t,
                                         RA__FLOATS sum) {
    RA__FLOATS old = RA__NAME(load)(acc + t * RA__WIDTH), next = old + sum;
    if (strip->partial) next = RA__NAME(select)(strip->seen[t], next, old);
    RA__NAME(store)(acc + t * RA__WIDTH, next);
}

/* acc of ni dims from dim d on += V^T p. */
RA__ISA_INLINE void RA__NAME(value_tile)(const RA__NAME(strip) *strip, float *acc, int32_t d,
                                         int32_t ni, int32_t nt) {
    RA__NAME(product) ab;
    RA__FLOATS c[8][RA__VECTORS];
    ab.a = ra__value_row(strip->keys, strip->first) + d;
    ab.b = strip->s + strip->first * RA__SLAB;
    ab.row = 1;
    ab.step = strip->keys->v_stride / 4;
    ab.b_step = RA__SLAB;
    ab.depth = strip->last - strip->first;
    RA__NAME(multiply)(&ab, c, ni, nt);
    RA__UNROLL for (int32_t i = 0; i < ni; i++)
        RA__UNROLL for (int32_t t = 0; t < nt; t++)
            RA__NAME(accumulate)(strip, acc + (d + i) * RA__SLAB, t, c[i][t]);
}

RA__ISA_INLINE void RA__NAME(value_tiles)(const RA__NAME(strip) *strip, int32_t v_dim, int32_t ni,
                                          int32_t nt) {
    float *acc = RA__NAME(panel_row)(strip->panel->acc, strip->row, v_dim);
    int32_t d = 0;
    for (; v_dim - d >= ni; d += ni) {
        RA__NAME(value_tile)(strip, acc, d, ni, nt);
        ra__prefetch_some(strip->panel->prefetch);
    }
    for (; ni % 4 && v_dim - d >= 4; d += 4) RA__NAME(value_tile)(strip, acc, d, 4, nt);
    for (; ni % 4 && v_dim - d >= 2; d += 2) RA__NAME(value_tile)(strip, acc, d, 2, nt);
    for (; d < v_dim; d++) RA__NAME(value_tile)(strip, acc, d, 1, nt);
}

RA__ISA_NOINLINE void RA__NAME(values)(const RA__NAME(strip) *strip, int32_t v_dim) {
    if (strip->nt == RA__VECTORS) RA__NAME(value_tiles)(strip, v_dim, RA__TILE_HEIGHT, RA__VECTORS);
    else if (RA__VECTORS > 2 && strip->nt > 1)
        RA__NAME(value_tiles)(strip, v_dim, 8, RA__VECTORS / 2);
    else RA__NAME(value_tiles)(strip, v_dim, 8, 1);
}

/* The same for V with a NaN or infinity that not every row sees. */
RA__ISA_NOINLINE void RA__NAME(values_dirty)(RA__NAME(strip) *strip, int32_t v_dim) {
    const ra__keys *keys = strip->keys;
    float *acc = RA__NAME(panel_row)(strip->panel->acc, strip->row, v_dim);
    for (int32_t d = 0; d < v_dim; d++)
        for (int32_t t = 0; t < strip->nt; t++) {
            RA__FLOATS sum = RA__NAME(set)(0.0f);
            for (int32_t j = strip->first; j < strip->last; j++) {
                RA__MASK seen = RA__NAME(sees)(strip->panel->geo, strip->row + t * RA__WIDTH,
                                               keys->pos[j]);
                RA__FLOATS p = RA__NAME(load)(strip->s + j * RA__SLAB + t * RA__WIDTH);
                RA__FLOATS v = RA__NAME(set)(ra__value_row(keys, j)[d]);
                sum = RA__NAME(select)(seen, RA__NAME(fma)(v, p, sum), sum);
            }
            RA__NAME(accumulate)(strip, acc + d * RA__SLAB, t, sum);
        }
}

/* Vectors to work on in a slab that has `rows` rows, or more than a slab. */
RA__ISA_INLINE int32_t RA__NAME(vectors_of)(int32_t rows) {
    if (rows <= RA__WIDTH) return 1;
    return RA__VECTORS > 2 && rows <= RA__WIDTH * (RA__VECTORS / 2) ? RA__VECTORS / 2 : RA__VECTORS;
}

/* Finds the first and the last key that rows of the strip see, rounded to multiples of 4, so that
 * tiles divide them. p of the other keys would be 0. Leaving them out changes at most the sign of a
 * zero, which store_o removes. */
RA__ISA_STATIC void RA__NAME(find_keys)(RA__NAME(strip) *strip) {
    const ra__rows *geo = strip->panel->geo;
    const int32_t *pos = strip->keys->pos;
    int32_t end = strip->row + strip->nt * RA__WIDTH;
    int32_t lo = INT32_MAX, hi = 0, keep_first = INT32_MAX, keep_end = 0;
    strip->first = 0;
    strip->last = strip->keys->n;
    if (!strip->partial) return;
    for (int32_t i = strip->row; i < end; i++) {
        if (geo->lo[i] < geo->hi[i]) {
            lo = geo->lo[i] < lo ? geo->lo[i] : lo;
            hi = geo->hi[i] > hi ? geo->hi[i] : hi;
        }
        if (geo->keep_first[i] < geo->keep_end[i]) {
            keep_first = geo->keep_first[i] < keep_first ? geo->keep_first[i] : keep_first;
            keep_end = geo->keep_end[i] > keep_end ? geo->keep_end[i] : keep_end;
        }
    }
    strip->last = 0;
    for (int32_t i = strip->keys->n - 1; i >= 0; i--) {
        if ((lo > pos[i] || pos[i] >= hi) && (keep_first > pos[i] || pos[i] >= keep_end)) continue;
        strip->first = i / 4 * 4;
        if (strip->last == 0) strip->last = i / 4 * 4 + 4;
    }
    if (strip->last > strip->keys->n) strip->last = strip->keys->n;
}

/* A strip is a slab. In partial tiles it is at most half of a slab with more than two vectors, so
 * that fewer products are wasted. */
RA__ISA_STATIC void RA__NAME(fold_block)(RA__NAME(strip) *strip, const ra_desc *d) {
    for (strip->row = 0; strip->row < strip->panel->rows; strip->row += strip->nt * RA__WIDTH) {
        strip->nt = RA__NAME(vectors_of)(strip->panel->rows - strip->row);
        if (strip->partial && RA__VECTORS > 2 && strip->nt == RA__VECTORS)
            strip->nt = RA__VECTORS / 2;
        RA__NAME(find_keys)(strip);
        if (strip->first == strip->last) continue;
        RA__NAME(softmax)(strip, d);
        if (strip->panel->drop.threshold)
            ra__drop_apply(strip->panel, strip->keys, strip->row, strip->nt * RA__WIDTH, strip->s,
                           RA__SLAB);
        if (strip->partial && !strip->keys->v_clean) RA__NAME(values_dirty)(strip, d->v_dim);
        else RA__NAME(values)(strip, d->v_dim);
    }
}

RA__ISA_STATIC void RA__NAME(fold)(const ra__panel *panel, const ra__keys *keys,
                                   const int8_t *kind, int32_t count, const ra_desc *d, float *s) {
    RA__NAME(strip) strip;
    strip.panel = panel;
    strip.s = s;
    for (int32_t i = 0; i < count; i++) {
        if (kind[i] == RA__EMPTY) continue;
        strip.keys = keys + i;
        strip.partial = kind[i] == RA__PARTIAL;
        RA__NAME(fold_block)(&strip, d);
    }
}

/* PERF: prefetches 10 rows ahead, for rows that are far apart. Zen 5, 8 heads of 128 side by side,
 * f32 backward: 86.9 -> 88.2 % of the FMA peak. */
RA__ISA_STATIC void RA__NAME(widen)(float *dst, const void *src, int64_t stride, int32_t dtype,
                                    int32_t rows, int32_t dim) {
    int32_t bytes = dim * (dtype == RA_F32 ? 4 : 2);
    const uint8_t *from = (const uint8_t *)src;
    for (int32_t row = 0; row < rows; row++, from += stride, dst += dim) {
        ra__prefetch((uintptr_t)from + (uintptr_t)(10 * stride), bytes);
        RA__NAME(read_row)(dst, from, dtype, dim);
    }
}

/* 1 if rows x dim floats (stride in floats) have no NaN and no infinity. */
RA__ISA_STATIC int32_t RA__NAME(rows_are_finite)(const float *src, int64_t stride, int32_t rows,
                                                 int32_t dim) {
    int32_t bad = 0;
    for (int32_t row = 0; row < rows && !bad; row++, src += stride) {
        int32_t i = 0;
        for (; dim - i >= RA__WIDTH; i += RA__WIDTH)
            bad |= RA__NAME(any_nonfinite)(RA__NAME(load)(src + i));
        for (; i < dim; i++) bad |= !ra__is_finite(src[i]);
    }
    return !bad;
}

RA__ISA_STATIC void RA__NAME(sizes)(ra__bytes *out, const ra_desc *d, int32_t shared) {
    int64_t column = RA_BLOCK_TOKENS * (int64_t)sizeof(float);
    out->q = column * d->k_dim;
    out->acc = column * d->v_dim;
    out->s = column * RA_BLOCK_TOKENS;
    out->batch = 1;
    out->k = ra__is_copied(d->k_dtype, 0, shared && d->v_in_k) ? column * d->k_dim : 0;
    out->v = ra__is_copied(d->v_dtype, 0, shared) && !d->v_in_k ? column * d->v_dim : 0;
}

/* Converts n rows of K or V to f32 in `copy`, and lets *rows and *stride point there. */
RA__ISA_STATIC void RA__NAME(copy_rows)(const uint8_t **rows, int64_t *stride, uint8_t *copy,
                                        int32_t dtype, int32_t dim, int32_t n) {
    RA__NAME(widen)((float *)(void *)copy, *rows, *stride, dtype, n, dim);
    *rows = copy;
    *stride = (int64_t)dim * 4;
}

/* Copies K and V as far as ra__is_copied says. */
RA__ISA_STATIC void RA__NAME(copy_keys)(ra__keys *keys, const ra_desc *d,
                                        const ra__key_scratch *scratch, int32_t k_shared,
                                        int32_t v_shared) {
    if (ra__is_copied(d->k_dtype, keys->k_stride, k_shared))
        RA__NAME(copy_rows)(&keys->k, &keys->k_stride, scratch->k, d->k_dtype, d->k_dim, keys->n);
    if (d->v_in_k) {
        keys->v = keys->k + (int64_t)d->v_column * 4;
        keys->v_stride = keys->k_stride;
    } else if (ra__is_copied(d->v_dtype, keys->v_stride, v_shared)) {
        RA__NAME(copy_rows)(&keys->v, &keys->v_stride, scratch->v, d->v_dtype, d->v_dim, keys->n);
    }
}

RA__ISA_STATIC void RA__NAME(prepare)(ra__keys *keys, const ra_desc *d,
                                      const ra__key_scratch *scratch, int32_t partial) {
    RA__NAME(copy_keys)(keys, d, scratch, scratch->shared && d->v_in_k, scratch->shared);
    keys->v_clean = !partial ||
                    RA__NAME(rows_are_finite)(ra__value_row(keys, 0), keys->v_stride / 4, keys->n,
                                              d->v_dim);
}

/* Rows beyond the last one are 0 as far as fold works on them.
 * PERF: rows are transposed in registers. A buffer between would be written and read with different
 * widths, and such loads wait for the stores. */
RA__ISA_STATIC void RA__NAME(load_q)(const ra__panel *panel, const void *src, int64_t stride,
                                     int32_t dtype, int32_t dim) {
    int32_t size = dtype == RA_F32 ? 4 : 2, last = (panel->rows - 1) / RA__SLAB * RA__SLAB;
    int32_t rows = last + RA__NAME(vectors_of)(panel->rows - last) * RA__WIDTH;
    RA__FLOATS factor = RA__NAME(set)(panel->factor);
    for (int32_t row = 0; row < rows; row += RA__WIDTH)
        for (int32_t d = 0; d < dim; d += RA__WIDTH) {
            const uint8_t *from = (const uint8_t *)src + row * stride + (int64_t)d * size;
            float *to = RA__NAME(panel_row)(panel->q, row, dim) + d * RA__SLAB;
            RA__FLOATS v[RA__WIDTH];
            RA__NAME(read_square)(v, from, stride, dtype, panel->rows - row, dim - d);
            RA__NAME(transpose)(v);
            RA__UNROLL for (int32_t i = 0; i < RA__WIDTH; i++)
                if (i < dim - d) RA__NAME(store)(to + i * RA__SLAB, v[i] * factor);
        }
}

/* acc has the layout of q. */
RA__ISA_STATIC void RA__NAME(load_acc)(const ra__panel *panel, const float *src, int64_t stride,
                                       int32_t dim) {
    ra__panel as_q = *panel;
    as_q.q = panel->acc;
    as_q.factor = 1.0f;
    if (src) RA__NAME(load_q)(&as_q, src, stride * 4, RA_F32, dim);
    else memset(panel->acc, 0, (size_t)RA_BLOCK_TOKENS * (size_t)dim * sizeof *panel->acc);
}

/* Writes rows of acc to dst. If factor is not null, row i is multiplied by factor[i], and negative
 * zeros become 0. */
RA__ISA_STATIC void RA__NAME(store_o)(const ra__panel *panel, void *dst, int64_t stride,
                                      int32_t dtype, int32_t dim, const float *factor) {
    int32_t size = dtype == RA_F32 ? 4 : 2;
    RA__FLOATS zero = RA__NAME(set)(0.0f);
    for (int32_t row = 0; row < panel->rows; row += RA__WIDTH)
        for (int32_t d = 0; d < dim; d += RA__WIDTH) {
            const float *acc = RA__NAME(panel_row)(panel->acc, row, dim) + d * RA__SLAB;
            uint8_t *to = (uint8_t *)dst + row * stride + (int64_t)d * size;
            RA__FLOATS v[RA__WIDTH], x = zero;
            if (factor) x = RA__NAME(load)(factor + row);
            RA__UNROLL for (int32_t i = 0; i < RA__WIDTH; i++) {
                v[i] = zero;
                if (i < dim - d) v[i] = RA__NAME(load)(acc + i * RA__SLAB);
                if (factor) v[i] = v[i] * x + zero;
            }
            RA__NAME(transpose)(v);
            RA__NAME(write_square)(to, stride, dtype, v, panel->rows - row, dim - d);
        }
}

RA__ISA_STATIC void RA__NAME(store_acc)(const ra__panel *panel, float *dst, int64_t stride,
                                        int32_t dim) {
    RA__NAME(store_o)(panel, dst, stride * 4, RA_F32, dim, NULL);
}

/* ---- decode: lanes are dims. Scores and p are [key][4 rows], or [key] if there is one row. Arrays
 * of ra__decode_rows consist of chunks of RA__CHUNK dims: [chunk][4 rows][RA__CHUNK].
 * PERF: 4 rows of D 128 take 64 multiply-adds of 16 lanes per key. On Zen 5 a fold of keys that are
 * in L1 takes 11.5 ns per key of f32, 12.5 of f16, 14.9 of q8_0. Reading them from memory takes
 * 25.6, 12.8 and 6.8 ns at 40 GB/s. So f32 is bound by memory, f16 by both, q8_0 by arithmetic. */
#define RA__CHUNK (2 * RA__WIDTH)

/* Elements [d, d + RA__CHUNK) of a row. d: a multiple of RA__CHUNK. */
RA__ISA_INLINE void RA__NAME(load_chunk)(RA__FLOATS *out, const uint8_t *row, int32_t d,
                                         int32_t dtype) {
    const uint8_t *block = row + (int64_t)(d / 32) * 34;
    RA__FLOATS scale = RA__NAME(set)(0.0f);
    if (dtype == RA_Q8_0) scale = RA__NAME(set)(RA__NAME(of_f16)(block)[0]);
    RA__UNROLL for (int32_t i = 0; i < 2; i++, d += RA__WIDTH) {
        if (dtype == RA_Q8_0) out[i] = RA__NAME(of_i8)(block + 2 + d % 32) * scale;
        else out[i] = RA__NAME(convert)(row + (int64_t)d * (dtype == RA_F32 ? 4 : 2), dtype);
    }
}

/* The same for any dtype, also at the end of a row: elements beyond dim are 0. */
RA__ISA_NOINLINE void RA__NAME(load_last_chunk)(RA__FLOATS *out, const uint8_t *row, int32_t d,
                                                int32_t dim, int32_t dtype) {
    int32_t size = dtype == RA_F32 ? 4 : 2;
    float copy[RA__CHUNK];
    if (dim - d < RA__CHUNK) {
        memset(copy, 0, sizeof copy);
        memcpy(copy, row + (int64_t)d * size, (size_t)((dim - d) * size));
        row = (const uint8_t *)(const void *)copy;
        d = 0;
    }
    RA__NAME(load_chunk)(out, row, d, dtype);
}

/* c[4 key + row] += products of the elements of a chunk. */
RA__ISA_INLINE void RA__NAME(decode_products)(RA__FLOATS *c, RA__FLOATS (*k)[2], const float *q) {
    RA__UNROLL for (int32_t t = 0; t < 2; t++)
        RA__UNROLL for (int32_t r = 0; r < 4; r++) {
            RA__FLOATS y = RA__NAME(hold)(RA__NAME(load)(q + r * RA__CHUNK + t * RA__WIDTH));
            RA__UNROLL for (int32_t i = 0; i < RA__DECODE_TILE_KEYS; i++)
                c[4 * i + r] = RA__NAME(fma)(y, k[i][t], c[4 * i + r]);
        }
}

/* Scores [key][4 rows] of RA__DECODE_TILE_KEYS keys from key j on. Beyond the last key that key is
 * computed again. */
RA__ISA_INLINE void RA__NAME(decode_dots)(const ra__decode_rows *rows, const ra__decode_keys *keys,
                                          int32_t j, float *s, int32_t dtype) {
    int32_t dim = rows->d->k_dim;
    int32_t bytes = RA__CHUNK * (dtype == RA_F32 ? 4 : dtype == RA_Q8_0 ? 1 : 2);
    const uint8_t *row[RA__DECODE_TILE_KEYS];
    RA__FLOATS c[4 * RA__DECODE_TILE_KEYS];
    int32_t d = 0;
    row[0] = keys->k + j * keys->k_stride;
    RA__UNROLL for (int32_t i = 1; i < RA__DECODE_TILE_KEYS; i++) {
        row[i] = row[i - 1];
        if (j + i < keys->n) row[i] += keys->k_stride;
    }
    RA__UNROLL for (int32_t i = 0; i < 4 * RA__DECODE_TILE_KEYS; i++) c[i] = RA__NAME(set)(0.0f);
    for (; dim - d >= RA__CHUNK; d += RA__CHUNK) {
        RA__FLOATS k[RA__DECODE_TILE_KEYS][2];
        RA__UNROLL for (int32_t i = 0; i < RA__DECODE_TILE_KEYS; i++)
            RA__NAME(load_chunk)(k[i], row[i], d, dtype);
        RA__NAME(decode_products)(c, k, rows->q + 4 * d);
        if (keys->streams)
            ra__stream_prefetch(keys->streams, (RA__DECODE_TILE_KEYS * bytes + 127) / 128);
    }
    if (d < dim) {
        RA__FLOATS k[RA__DECODE_TILE_KEYS][2]; /* not that above, which stays in registers */
        for (int32_t i = 0; i < RA__DECODE_TILE_KEYS; i++)
            RA__NAME(load_last_chunk)(k[i], row[i], d, dim, dtype);
        RA__NAME(decode_products)(c, k, rows->q + 4 * d);
    }
    RA__UNROLL for (int32_t i = 0; i < 4 * RA__DECODE_TILE_KEYS; i += RA__WIDTH)
        RA__NAME(store)(s + 4 * j + i, RA__NAME(sums)(c + i));
}

/* Score of row 0 and the key at `row`, by the same chain as in decode_dots, not yet summed over
 * lanes. */
RA__ISA_INLINE RA__FLOATS RA__NAME(decode_row_dot)(const ra__decode_rows *rows, const uint8_t *row,
                                                   int32_t dtype) {
    int32_t dim = rows->d->k_dim;
    const float *q = rows->q;
    RA__FLOATS sum = RA__NAME(set)(0.0f);
    int32_t d = 0;
    RA__UNROLL_2 for (; dim - d >= RA__CHUNK; d += RA__CHUNK, q += 4 * RA__CHUNK) {
        RA__FLOATS k[2];
        RA__NAME(load_chunk)(k, row, d, dtype);
        sum = RA__NAME(fma)(RA__NAME(load)(q), k[0], sum);
        sum = RA__NAME(fma)(RA__NAME(load)(q + RA__WIDTH), k[1], sum);
    }
    if (d < dim) {
        RA__FLOATS k[2];
        RA__NAME(load_last_chunk)(k, row, d, dim, dtype);
        sum = RA__NAME(fma)(RA__NAME(load)(q), k[0], sum);
        sum = RA__NAME(fma)(RA__NAME(load)(q + RA__WIDTH), k[1], sum);
    }
    return sum;
}

/* Scores of row 0 and RA__WIDTH keys from key j on: key by key, because processors prefetch in the
 * order of addresses by themselves, and as many keys at once as they have room for. */
RA__ISA_INLINE void RA__NAME(decode_row_dots)(const ra__decode_rows *rows,
                                              const ra__decode_keys *keys, int32_t j, float *s,
                                              int32_t dtype) {
    int32_t n = keys->n - j < RA__WIDTH ? keys->n - j : RA__WIDTH;
    int32_t bytes = rows->d->k_dim * (dtype == RA_F32 ? 4 : dtype == RA_Q8_0 ? 1 : 2);
    const uint8_t *row = keys->k + j * keys->k_stride;
    RA__FLOATS c[RA__WIDTH];
    int32_t i = 0;
    for (; i < n; i++, row += keys->k_stride) {
        c[i] = RA__NAME(decode_row_dot)(rows, row, dtype);
        if (keys->streams) ra__stream_prefetch(keys->streams, (bytes + 127) / 128);
    }
    for (; i < RA__WIDTH; i++) c[i] = RA__NAME(hold)(RA__NAME(set)(0.0f)); /* hold: no memset */
    RA__NAME(store)(s + j, RA__NAME(sums)(c));
}

RA__ISA_INLINE void RA__NAME(decode_scores_of)(const ra__decode_rows *rows,
                                               const ra__decode_keys *keys, float *s,
                                               int32_t dtype) {
    for (int32_t j = 0; rows->one_row && j < keys->n; j += RA__WIDTH)
        RA__NAME(decode_row_dots)(rows, keys, j, s, dtype);
    for (int32_t j = 0; !rows->one_row && j < keys->n; j += RA__DECODE_TILE_KEYS)
        RA__NAME(decode_dots)(rows, keys, j, s, dtype);
}

RA__ISA_NOINLINE void RA__NAME(decode_scores)(const ra__decode_rows *rows,
                                              const ra__decode_keys *keys, float *s) {
    int32_t dtype = rows->d->k_dtype;
    if (dtype == RA_F32) RA__NAME(decode_scores_of)(rows, keys, s, RA_F32);
    else if (dtype == RA_F16) RA__NAME(decode_scores_of)(rows, keys, s, RA_F16);
    else if (dtype == RA_BF16) RA__NAME(decode_scores_of)(rows, keys, s, RA_BF16);
    else RA__NAME(decode_scores_of)(rows, keys, s, RA_Q8_0);
}

/* Bias of row r and the keys; 0: all of it is 0, and nothing is written.
 * PERF: masks are 0 nearly everywhere, and heads share them. */
RA__ISA_NOINLINE int32_t RA__NAME(decode_bias)(const ra__decode_rows *rows,
                                               const ra__decode_keys *keys, int32_t r,
                                               float *bias) {
    const ra__score *score = &rows->score[r];
    const uint8_t *at = score->bias + (int64_t)keys->pos[0] * score->bias_key_stride;
    int32_t dtype = score->bias_dtype, size = dtype == RA_F32 ? 4 : 2, bytes = keys->n * size;
    int32_t contiguous = score->bias_key_stride == size && keys->pos[0] >= 0, any = 0;
    for (int32_t j = 0; j < keys->n && contiguous; j++)
        contiguous = keys->pos[j] == keys->pos[0] + j && keys->pos[j] < score->bias_keys;
    for (int32_t j = 0; j < bytes && contiguous && !any; j += 4) {
        uint32_t word = 0;
        memcpy(&word, at + j, (size_t)(bytes - j < 4 ? bytes - j : 4));
        any |= word != 0;
    }
    if (contiguous && !any) return 0;
    for (int32_t j = 0; j < keys->n; j += RA__WIDTH) {
        int32_t n = keys->n - j < RA__WIDTH ? keys->n - j : RA__WIDTH;
        float line[RA__WIDTH];
        if (contiguous) RA__NAME(read_row)(line, at + j * size, dtype, n);
        for (int32_t i = 0; i < n; i++)
            bias[4 * (j + i) + r] = contiguous ? line[i]
                                               : ra__bias_at(score, 0, keys->pos[j + i]);
    }
    return 1;
}

/* Applies softcap, ALiBi and bias to n scores [key][4 rows]. */
RA__ISA_NOINLINE void RA__NAME(decode_modify)(const ra__decode_rows *rows,
                                              const ra__decode_keys *keys, float *s, int32_t n) {
    ra__score cap = rows->score[0];
    float bias[4 * RA__DECODE_KEYS] = {0};
    int32_t apart[4 * RA__DECODE_KEYS] = {0}, some = 0, any = 0;
    for (int32_t r = 0; r < 4; r++) {
        if (!rows->score[r].bias) continue;
        if (r == 0 || rows->score[r].bias != rows->score[r - 1].bias)
            some = RA__NAME(decode_bias)(rows, keys, r, bias);
        else
            for (int32_t j = 0; j < keys->n && some; j++) bias[4 * j + r] = bias[4 * j + r - 1];
        any |= some;
    }
    if (!any && cap.softcap == 0.0f && !(rows->d->scores & RA_SCORE_ALIBI)) return;
    cap.slope = 0.0f;
    cap.bias = NULL;
    for (int32_t i = 0; i < 4 * keys->n; i++) apart[i] = keys->pos[i / 4] - rows->pos[i % 4];
    for (int32_t i = 0; i < n; i += RA__WIDTH) {
        RA__FLOATS slope = RA__NAME(load)(rows->slope) * RA__NAME(set)(-ra__log2e);
        RA__FLOATS y = RA__NAME(modify)(&cap, RA__NAME(load)(s + i), slope, slope);
        y = RA__NAME(fma)(slope, RA__NAME(distance)(apart + i, 0), y);
        y = RA__NAME(fma)(RA__NAME(load)(bias + i), RA__NAME(set)(ra__log2e), y);
        RA__NAME(store)(s + i, y);
    }
}

/* Modifies the scores. Those that are not seen become -inf. */
RA__ISA_NOINLINE void RA__NAME(decode_adjust)(const ra__decode_rows *rows,
                                              const ra__decode_keys *keys, float *s) {
    int32_t nr = rows->one_row ? 1 : 4;
    float all[4 * RA__DECODE_KEYS], *to = s;
    if (rows->one_row && rows->modified) {
        memset(all, 0, sizeof all);
        for (int32_t i = 0; i < keys->n; i++) all[4 * i] = s[i];
        to = all;
    }
    if (rows->modified)
        RA__NAME(decode_modify)(rows, keys, to,
                                (4 * keys->n + RA__WIDTH - 1) / RA__WIDTH * RA__WIDTH);
    for (int32_t i = 0; to == all && i < keys->n; i++) s[i] = all[4 * i];
    for (int32_t i = 0; keys->partial && i < nr * keys->n; i++)
        if (!(keys->seen >> (rows->one_row ? 4 * i : i) & 1)) s[i] = ra__neg_inf();
}

/* Multiplies row r of an array of chunks by the factor. */
RA__ISA_INLINE void RA__NAME(decode_scale)(float *x, int32_t r, int32_t dim, RA__FLOATS factor) {
    x += r * RA__CHUNK;
    for (int32_t d = 0; d < dim; d += RA__CHUNK, x += 4 * RA__CHUNK) {
        RA__NAME(store)(x, RA__NAME(load)(x) * factor);
        RA__NAME(store)(x + RA__WIDTH, RA__NAME(load)(x + RA__WIDTH) * factor);
    }
}

/* Rows with one of n scores far above their maximum get a new one, and their sums are rescaled. */
RA__ISA_NOINLINE void RA__NAME(decode_raise)(ra__decode_rows *rows, const float *s, int32_t n) {
    int32_t nr = rows->one_row ? 1 : 4;
    float alpha[RA__WIDTH];
    for (int32_t r = 0; r < nr; r++) {
        float top = ra__neg_inf();
        for (int32_t i = r; i < n; i += nr) top = s[i] > top ? s[i] : top;
        if (!(top > rows->m[r] + ra__decode_slack)) continue;
        if (ra__is_neg_inf(rows->m[r])) {
            for (int32_t i = r; i < 16; i += 4) rows->m[i] = top;
            continue;                  /* the sums are 0 or NaN */
        }
        RA__NAME(store)(alpha, RA__NAME(exp2)(RA__NAME(set)(rows->m[r] - top)));
        RA__NAME(decode_scale)(rows->acc, r, rows->d->v_dim, RA__NAME(set)(alpha[0]));
        if (rows->has_keys)
            RA__NAME(decode_scale)(rows->block_acc, r, rows->d->v_dim, RA__NAME(set)(alpha[0]));
        rows->l[r] *= alpha[0];
        for (int32_t i = r; i < 16; i += 4) {
            rows->block_l[i] *= alpha[0];
            rows->m[i] = top;
        }
    }
}

/* The maxima that belong to the lanes of a vector of scores. */
RA__ISA_INLINE RA__FLOATS RA__NAME(decode_max)(const ra__decode_rows *rows) {
    return rows->one_row ? RA__NAME(set)(rows->m[0]) : RA__NAME(load)(rows->m);
}

/* 1 if none of n scores is far above the maximum of its row. */
RA__ISA_INLINE int32_t RA__NAME(decode_max_holds)(const ra__decode_rows *rows, const float *s,
                                                  int32_t n) {
    RA__FLOATS low = RA__NAME(set)(ra__neg_inf());
    RA__FLOATS limit = RA__NAME(decode_max)(rows) + RA__NAME(set)(ra__decode_slack), top = low;
    for (int32_t i = 0; i < n; i += RA__WIDTH) top = RA__NAME(max)(top, RA__NAME(load)(s + i));
    RA__FLOATS flag = RA__NAME(select)(RA__NAME(less)(limit, top), low, RA__NAME(set)(0.0f));
    return !RA__NAME(any_nonfinite)(flag);
}

/* s [n] becomes p, which is added to block_l. Lanes beyond n, up to RA__WIDTH of them, become 0. A
 * single row is summed as it would be beside others: in RA__WIDTH / 4 chains of keys. */
RA__ISA_INLINE void RA__NAME(decode_weigh)(ra__decode_rows *rows, float *s, int32_t n) {
    RA__FLOATS shift = RA__NAME(shift_of)(RA__NAME(decode_max)(rows));
    RA__FLOATS sum = RA__NAME(load)(rows->block_l);
    float chain[RA__WIDTH / 4];
    for (int32_t i = 0; i < n; i += RA__WIDTH) {
        RA__FLOATS p = RA__NAME(exp2)(RA__NAME(load)(s + i) - shift);
        RA__NAME(store)(s + i, p);
        sum = sum + p;
    }
    if (!rows->one_row) {
        RA__NAME(store)(rows->block_l, sum);
        return;
    }
    RA__UNROLL for (int32_t e = 0; e < RA__WIDTH / 4; e++) chain[e] = rows->block_l[4 * e];
    for (int32_t i = 0; i < n; i += RA__WIDTH / 4)
        RA__UNROLL for (int32_t e = 0; e < RA__WIDTH / 4; e++) chain[e] += s[i + e];
    RA__UNROLL for (int32_t e = 0; e < RA__WIDTH / 4; e++) rows->block_l[4 * e] = chain[e];
}

/* c += p [nr rows] of one key times nc chunks v of its value, in rows whose bit of seen is set. */
RA__ISA_INLINE void RA__NAME(decode_value_step)(RA__FLOATS *c, const RA__FLOATS *v, const float *p,
                                                int32_t nc, int32_t nr, uint64_t seen) {
    RA__UNROLL for (int32_t r = 0; r < nr; r++) {
        RA__FLOATS y = RA__NAME(set)(p[r]);
        if (!(seen >> r & 1)) continue;
        RA__UNROLL for (int32_t i = 0; i < 2 * nc; i++) {
            int32_t at = i / 2 * 2 * nr + 2 * r + i % 2;
            c[at] = RA__NAME(fma)(y, v[i], c[at]);
        }
    }
}

/* Offset in block_acc of vector i of a tile of nr rows. */
RA__ISA_INLINE int32_t RA__NAME(decode_sum_offset)(int32_t i, int32_t nr) {
    return nr == 4 ? i * RA__WIDTH : i / 2 * (4 * RA__CHUNK) + i % 2 * RA__WIDTH;
}

/* block_acc += p V in nc chunks of dims from d on. form: a dtype; with RA__DECODE_ANY for keys that
 * not all rows see and for incomplete chunks; with RA__DECODE_ONE_ROW for row 0 only. */
RA__ISA_INLINE void RA__NAME(decode_value_tile)(const ra__decode_rows *rows,
                                                const ra__decode_keys *keys, const float *p,
                                                int32_t d, int32_t nc, int32_t form) {
    int32_t dtype = form & 7, rest = form & RA__DECODE_ANY, nr = form & RA__DECODE_ONE_ROW ? 1 : 4;
    int32_t bytes = RA__CHUNK * (dtype == RA_F32 ? 4 : dtype == RA_Q8_0 ? 1 : 2);
    const uint8_t *row = keys->v;
    float *to = rows->block_acc + 4 * d;
    RA__FLOATS c[8 * RA__DECODE_TILE_CHUNKS], v[2 * RA__DECODE_ROW_CHUNKS];
    RA__UNROLL for (int32_t i = 0; i < 2 * nr * nc; i++)
        c[i] = rows->has_keys ? RA__NAME(load)(to + RA__NAME(decode_sum_offset)(i, nr)) :
               RA__NAME(set)(0.0f);
    for (int32_t j = 0; j < keys->n; j++, row += keys->v_stride, p += nr) {
        if (rest) RA__NAME(load_last_chunk)(v, row, d, rows->d->v_dim, dtype);
        else RA__UNROLL for (int32_t i = 0; i < nc; i++)
            RA__NAME(load_chunk)(v + 2 * i, row, d + i * RA__CHUNK, dtype);
        int32_t all = !rest || keys->n > RA__DECODE_KEYS; /* so many only if the row sees all */
        RA__NAME(decode_value_step)(c, v, p, nc, nr, all ? ~(uint64_t)0 : keys->seen >> 4 * j);
        if (keys->streams && (nc * bytes >= 128 || j % 2 == 0))
            ra__stream_prefetch(keys->streams, (nc * bytes + 127) / 128);
    }
    RA__UNROLL for (int32_t i = 0; i < 2 * nr * nc; i++)
        RA__NAME(store)(to + RA__NAME(decode_sum_offset)(i, nr), c[i]);
}

/* Takes complete chunks of keys that all rows see. Returns the first dim that is left. */
RA__ISA_INLINE int32_t RA__NAME(decode_value_tiles)(const ra__decode_rows *rows,
                                                    const ra__decode_keys *keys, const float *p,
                                                    int32_t dtype) {
    int32_t dim = rows->d->v_dim, d = 0;
    if (rows->one_row) {
        for (; dim - d >= RA__DECODE_ROW_CHUNKS * RA__CHUNK; d += RA__DECODE_ROW_CHUNKS * RA__CHUNK)
            RA__NAME(decode_value_tile)(rows, keys, p, d, RA__DECODE_ROW_CHUNKS,
                                        dtype | RA__DECODE_ONE_ROW);
        for (; dim - d >= 2 * RA__CHUNK; d += 2 * RA__CHUNK)
            RA__NAME(decode_value_tile)(rows, keys, p, d, 2, dtype | RA__DECODE_ONE_ROW);
        for (; dim - d >= RA__CHUNK; d += RA__CHUNK)
            RA__NAME(decode_value_tile)(rows, keys, p, d, 1, dtype | RA__DECODE_ONE_ROW);
        return d;
    }
    for (; dim - d >= RA__DECODE_TILE_CHUNKS * RA__CHUNK; d += RA__DECODE_TILE_CHUNKS * RA__CHUNK)
        RA__NAME(decode_value_tile)(rows, keys, p, d, RA__DECODE_TILE_CHUNKS, dtype);
    for (; RA__DECODE_TILE_CHUNKS > 1 && dim - d >= RA__CHUNK; d += RA__CHUNK)
        RA__NAME(decode_value_tile)(rows, keys, p, d, 1, dtype);
    return d;
}

RA__ISA_NOINLINE void RA__NAME(decode_values)(const ra__decode_rows *rows,
                                              const ra__decode_keys *keys, const float *p) {
    int32_t dtype = rows->d->v_dtype & 7; /* compilers see that the flags of form are 0 */
    int32_t d = 0;
    if (keys->partial) d = 0;          /* all chunks take the general form below */
    else if (dtype == RA_F32) d = RA__NAME(decode_value_tiles)(rows, keys, p, RA_F32);
    else if (dtype == RA_F16) d = RA__NAME(decode_value_tiles)(rows, keys, p, RA_F16);
    else if (dtype == RA_BF16) d = RA__NAME(decode_value_tiles)(rows, keys, p, RA_BF16);
    else d = RA__NAME(decode_value_tiles)(rows, keys, p, RA_Q8_0);
    for (; d < rows->d->v_dim; d += RA__CHUNK) {
        if (rows->one_row)
            RA__NAME(decode_value_tile)(rows, keys, p, d, 1,
                                        dtype | RA__DECODE_ANY | RA__DECODE_ONE_ROW);
        else RA__NAME(decode_value_tile)(rows, keys, p, d, 1, dtype | RA__DECODE_ANY);
    }
}

/* Adds keys [j, j + n), whose scores are s, to the sums: all keys that are left, or one unit. */
RA__ISA_NOINLINE void RA__NAME(decode_add)(ra__decode_rows *rows, const ra__decode_keys *keys,
                                           float *s, int32_t j, int32_t n) {
    int32_t nr = rows->one_row ? 1 : 4;
    float unit[4 * RA__DECODE_UNIT + RA__WIDTH], *p = s + j * nr;
    ra__decode_keys y = *keys;
    y.v += j * keys->v_stride;
    if (keys->partial) y.seen >>= 4 * j;
    y.n = n;
    if (j + n < keys->n) {             /* scores of later keys are still needed */
        memcpy(unit, p, (size_t)(n * nr) * sizeof *unit);
        p = unit;
        RA__NAME(store)(p + n * nr, RA__NAME(set)(ra__neg_inf()));
    }
    RA__NAME(decode_weigh)(rows, p, n * nr);
    RA__NAME(decode_values)(rows, &y, p);
    for (int32_t r = 0; r < nr; r++)
        if (y.seen >> r & ra__seen_by_row_0) rows->has_keys |= 1 << r;
}

/* Adds keys to the sums of up to 4 rows. A maximum rises for one unit of keys. Units are the same
 * for all ways to cut keys into calls, and whatever other rows there are; so are the bits. */
RA__ISA_STATIC void RA__NAME(decode_fold_keys)(ra__decode_rows *rows, const ra__decode_keys *keys) {
    int32_t nr = rows->one_row ? 1 : 4;
    float s[4 * RA__DECODE_KEYS + RA__WIDTH];
    RA__NAME(decode_scores)(rows, keys, s);
    if (rows->modified || keys->partial) RA__NAME(decode_adjust)(rows, keys, s);
    RA__NAME(store)(s + nr * keys->n, RA__NAME(set)(ra__neg_inf()));
    for (int32_t j = 0; j < keys->n; j += RA__DECODE_UNIT) {
        int32_t n = keys->n - j < RA__DECODE_UNIT ? keys->n - j : RA__DECODE_UNIT;
        if (!RA__NAME(decode_max_holds)(rows, s + j * nr, (keys->n - j) * nr)) {
            RA__NAME(decode_raise)(rows, s + j * nr, n * nr);
            if (!RA__NAME(decode_max_holds)(rows, s + j * nr, (keys->n - j) * nr)) {
                RA__NAME(decode_add)(rows, keys, s, j, n);
                continue;
            }
        }
        RA__NAME(decode_add)(rows, keys, s, j, keys->n - j);
        return;
    }
}

RA__ISA_STATIC void RA__NAME(decode_fold)(ra__decode_rows *rows, const ra__decode_keys *keys,
                                          int32_t n) {
    for (; n > 0; n--, rows++, keys++)
        if (keys->seen) RA__NAME(decode_fold_keys)(rows, keys);
}

RA__ISA_STATIC void RA__NAME(decode_close)(ra__decode_rows *rows) {
    for (int32_t r = 0; r < 4; r++) {
        float total = 0.0f;
        for (int32_t i = r; i < RA__WIDTH; i += 4) total += rows->block_l[i];
        if (!(rows->has_keys >> r & 1)) continue;
        rows->l[r] += total;
        for (int32_t d = 0; d < rows->d->v_dim; d += RA__CHUNK)
            for (int32_t i = 0; i < RA__CHUNK; i += RA__WIDTH) {
                int32_t at = 4 * d + r * RA__CHUNK + i;
                RA__FLOATS sum = RA__NAME(load)(rows->block_acc + at);
                RA__NAME(store)(rows->acc + at, RA__NAME(load)(rows->acc + at) + sum);
            }
    }
    for (int32_t i = 0; i < 16; i++) rows->block_l[i] = 0.0f;
    rows->has_keys = 0;
}

RA__ISA_STATIC void RA__NAME(decode_load)(const ra__decode_rows *rows, int32_t r, const void *src,
                                          float factor) {
    int32_t dim = rows->d->k_dim, dtype = rows->d->q_dtype, size = dtype == RA_F32 ? 4 : 2;
    for (int32_t d = 0; d < dim; d += RA__CHUNK) {
        float *to = rows->q + 4 * d + r * RA__CHUNK;
        memset(to, 0, RA__CHUNK * sizeof *to);
        RA__NAME(read_row)(to, (const uint8_t *)src + (int64_t)d * size, dtype,
                           dim - d < RA__CHUNK ? dim - d : RA__CHUNK);
    }
    RA__NAME(decode_scale)(rows->q, r, dim, RA__NAME(set)(factor));
}

RA__ISA_STATIC void RA__NAME(decode_store)(const ra__decode_rows *rows, int32_t r, void *dst,
                                           float factor) {
    int32_t dim = rows->d->v_dim, dtype = rows->d->o_dtype, size = dtype == RA_F32 ? 4 : 2;
    RA__NAME(decode_scale)(rows->acc, r, dim, RA__NAME(set)(factor));
    for (int32_t d = 0; d < dim; d += RA__CHUNK) {
        const float *from = rows->acc + 4 * d + r * RA__CHUNK;
        RA__NAME(write_row)((uint8_t *)dst + (int64_t)d * size, from, dtype,
                            dim - d < RA__CHUNK ? dim - d : RA__CHUNK);
    }
}

/* Sums are in units of 2^m. A row without keys has l = 0. */
RA__ISA_STATIC void RA__NAME(decode_merge)(ra__decode_rows *rows, const float *other) {
    float alpha[RA__WIDTH], beta[RA__WIDTH];
    for (int32_t r = 0; r < 4; r++) {
        int32_t fresh = rows->l[r] == 0.0f;
        float top = fresh || other[r] > rows->m[r] ? other[r] : rows->m[r];
        RA__FLOATS a = RA__NAME(exp2)(RA__NAME(set)(rows->m[r] - top));
        RA__FLOATS b = RA__NAME(exp2)(RA__NAME(set)(other[r] - top));
        if (other[4 + r] == 0.0f) continue;
        RA__NAME(store)(alpha, a);
        RA__NAME(store)(beta, b);
        rows->l[r] = fresh ? other[4 + r] : rows->l[r] * alpha[0] + other[4 + r] * beta[0];
        for (int32_t i = r; i < 16; i += 4) rows->m[i] = top;
        for (int32_t d = 0; d < rows->d->v_dim; d += RA__CHUNK)
            for (int32_t i = 0; i < RA__CHUNK; i += RA__WIDTH) {
                int32_t at = 4 * d + r * RA__CHUNK + i;
                RA__FLOATS x = RA__NAME(load)(other + 8 + at);
                if (!fresh) x = RA__NAME(load)(rows->acc + at) * a + x * b;
                RA__NAME(store)(rows->acc + at, x);
            }
    }
}
#undef RA__CHUNK

/* ---- backward: lanes are query rows for S, dP and dQ, columns for dK and dV.
 *
 * With LSE in base 2 and delta = sum over Dv of O dO (FlashAttention-2, arXiv 2307.08691, section
 * 3.2), a tile computes, transposed to [keys][64 rows]:
 *   S = K Q^T,  P = 2^(S - LSE),  dP = V dO^T,  dS = P (dP - delta) scale
 *   dQ^T += K^T dS,  dV += P dO,  dK += dS Q
 * The sums over a tile start at 0, as in forward. Where a row does not see a key, P and dS are set
 * to 0, so the value in dP does not matter, not even a NaN. If K, Q or dO have NaN or infinities,
 * each product is selected instead, as forward did for V. */

/* Scores of ni keys from key j on for the slab at `row`, or dP if `grads` is set. Unless they need
 * changing, they become p or dS at once. */
RA__ISA_INLINE void RA__NAME(back_dot_tile)(const ra__back_job *job, int32_t row, int32_t j,
                                            int32_t general, int32_t grads, int32_t ni) {
    const ra__panel *fwd = &job->panel->fwd;
    int32_t dim = grads ? job->v_dim : job->k_dim;
    const float *p = job->p + j * RA_BLOCK_TOKENS + row;
    float *to = (grads ? job->ds : job->p) + j * RA_BLOCK_TOKENS + row;
    RA__FLOATS c[8][RA__VECTORS], scale = RA__NAME(set)(job->scale);
    RA__NAME(product) ab;
    ab.a = grads ? ra__value_row(job->keys, j) : ra__key_row(job->keys, j);
    ab.row = (grads ? job->keys->v_stride : job->keys->k_stride) / 4;
    ab.b = (grads ? job->panel->g : fwd->q) + (int64_t)row * dim;
    if (!grads) ra__prefetch_some(fwd->prefetch);
    RA__NAME(multiply_long)(&ab, dim, to, RA_BLOCK_TOKENS, c, ni, RA__VECTORS);
    RA__UNROLL for (int32_t t = 0; t < RA__VECTORS; t++) {
        RA__FLOATS lse_or_delta = RA__NAME(load)((grads ? fwd->l : fwd->m) + row + t * RA__WIDTH);
        RA__UNROLL for (int32_t i = 0; i < ni; i++) {
            int32_t at = i * RA_BLOCK_TOKENS + t * RA__WIDTH;
            if (!general && grads)
                c[i][t] = RA__NAME(load)(p + at) * (c[i][t] - lse_or_delta) * scale;
            else if (!general) c[i][t] = RA__NAME(exp2)(c[i][t] - lse_or_delta);
            RA__NAME(store)(to + at, c[i][t]);
        }
    }
}

RA__ISA_INLINE void RA__NAME(back_dot_tiles)(const ra__back_job *job, int32_t general,
                                             int32_t grads) {
    int32_t n = job->keys->n;
    for (int32_t row = 0; row < job->panel->fwd.rows; row += RA__SLAB) {
        int32_t j = 0;
        for (; n - j >= RA__TILE_HEIGHT; j += RA__TILE_HEIGHT)
            RA__NAME(back_dot_tile)(job, row, j, general, grads, RA__TILE_HEIGHT);
        for (; RA__TILE_HEIGHT > 4 && n - j >= 4; j += 4)
            RA__NAME(back_dot_tile)(job, row, j, general, grads, 4);
        for (; j < n; j++) RA__NAME(back_dot_tile)(job, row, j, general, grads, 1);
    }
}

RA__ISA_NOINLINE void RA__NAME(back_scores)(const ra__back_job *job, int32_t general) {
    RA__NAME(back_dot_tiles)(job, general, 0);
}

RA__ISA_NOINLINE void RA__NAME(back_score_grads)(const ra__back_job *job, int32_t general) {
    RA__NAME(back_dot_tiles)(job, general, 1);
}

/* Scores in job->p become p, for rows [row, row + RA__WIDTH): they are modified first, and p is 0
 * where a row does not see the key. */
RA__ISA_NOINLINE void RA__NAME(back_weights)(const ra__back_job *job, int32_t row) {
    const ra__panel *fwd = &job->panel->fwd;
    const ra__score *score = &fwd->score;
    int32_t modified = ra__score_is_modified(score);
    RA__FLOATS lse = RA__NAME(load)(fwd->m + row), zero = RA__NAME(set)(0.0f), bias = zero;
    for (int32_t j = 0; j < job->keys->n; j++) {
        int32_t pos = job->keys->pos[j], at = j * RA_BLOCK_TOKENS + row;
        RA__FLOATS s = RA__NAME(load)(job->p + at);
        if (score->softcap != 0.0f) {  /* 0 where not seen, because 0 times NaN is NaN */
            RA__FLOATS y = RA__NAME(tanh)(s * RA__NAME(set)(1.0f / score->softcap));
            y = RA__NAME(set)(1.0f) - y * y;
            if (job->partial) y = RA__NAME(select)(RA__NAME(sees)(fwd->geo, row, pos), y, zero);
            RA__NAME(store)(job->cap + at, y);
        }
        if (modified) {
            if (score->bias) bias = RA__NAME(vector_bias)(fwd, row, pos);
            s = RA__NAME(modify)(score, s, RA__NAME(distance)(fwd->geo->pos + row, pos), bias);
        }
        s = RA__NAME(exp2)(s - lse);
        if (job->partial) s = RA__NAME(select)(RA__NAME(sees)(fwd->geo, row, pos), s, zero);
        RA__NAME(store)(job->p + at, s);
    }
}

/* dP in job->ds becomes dS without scale, for rows [row, row + RA__WIDTH); 0 where a row does not
 * see the key. With dropout the loss depends on the dropped weights only. So dP is dropped in the
 * same way as the weight, and dV takes the dropped weight. */
RA__ISA_NOINLINE void RA__NAME(back_score_grads_general)(const ra__back_job *job, int32_t row) {
    const ra__panel *fwd = &job->panel->fwd;
    RA__FLOATS delta = RA__NAME(load)(fwd->l + row), zero = RA__NAME(set)(0.0f);
    for (int32_t j = 0; j < job->keys->n; j++) {
        int32_t at = j * RA_BLOCK_TOKENS + row;
        RA__FLOATS w = RA__NAME(load)(job->p + at), g = RA__NAME(load)(job->ds + at);
        if (fwd->drop.threshold) {
            RA__FLOATS drop = RA__NAME(load)(job->drop + at);
            g = g * drop;
            RA__NAME(store)(job->p + at, w * drop);
        }
        g = w * (g - delta);
        if (job->partial)
            g = RA__NAME(select)(RA__NAME(sees)(fwd->geo, row, job->keys->pos[j]), g, zero);
        RA__NAME(store)(job->ds + at, g);
    }
}

/* Multiplies dS by the scale and by the derivative of the softcap. */
RA__ISA_NOINLINE void RA__NAME(back_scale)(const ra__back_job *job) {
    int32_t n = job->keys->n * RA_BLOCK_TOKENS, capped = job->panel->fwd.score.softcap != 0.0f;
    RA__FLOATS scale = RA__NAME(set)(job->scale);
    for (int32_t i = 0; i < n; i += RA__WIDTH) {
        RA__FLOATS g = RA__NAME(load)(job->ds + i) * scale;
        if (capped) g = g * RA__NAME(load)(job->cap + i);
        RA__NAME(store)(job->ds + i, g);
    }
}

/* dQ += K^T dS for ni dims from dim d on and the slab at `row`. */
RA__ISA_INLINE void RA__NAME(back_query_tile)(const ra__back_job *job, int32_t row, int32_t d,
                                              int32_t ni) {
    float *acc = job->panel->fwd.acc + (int64_t)row * job->k_dim + d * RA__SLAB;
    RA__NAME(product) ab;
    RA__FLOATS c[8][RA__VECTORS];
    ab.a = ra__key_row(job->keys, 0) + d;
    ab.row = 1;
    ab.step = job->keys->k_stride / 4;
    ab.b = job->ds + row;
    ab.b_step = RA_BLOCK_TOKENS;
    ab.depth = job->keys->n;
    RA__NAME(multiply)(&ab, c, ni, RA__VECTORS);
    RA__UNROLL for (int32_t i = 0; i < ni; i++)
        RA__UNROLL for (int32_t t = 0; t < RA__VECTORS; t++) {
            float *to = acc + i * RA__SLAB + t * RA__WIDTH;
            RA__NAME(store)(to, RA__NAME(load)(to) + c[i][t]);
        }
}

RA__ISA_NOINLINE void RA__NAME(back_queries)(const ra__back_job *job) {
    int32_t n = job->k_dim;
    for (int32_t row = 0; row < job->panel->fwd.rows; row += RA__SLAB) {
        int32_t d = 0;
        for (; n - d >= RA__TILE_HEIGHT; d += RA__TILE_HEIGHT)
            RA__NAME(back_query_tile)(job, row, d, RA__TILE_HEIGHT);
        for (; RA__TILE_HEIGHT > 4 && n - d >= 4; d += 4) RA__NAME(back_query_tile)(job, row, d, 4);
        for (; d < n; d++) RA__NAME(back_query_tile)(job, row, d, 1);
    }
}

/* The same for K with a NaN or infinity that not every row sees. */
RA__ISA_NOINLINE void RA__NAME(back_queries_dirty)(const ra__back_job *job) {
    const ra__keys *keys = job->keys;
    for (int32_t row = 0; row < job->panel->fwd.rows; row += RA__SLAB)
        for (int32_t d = 0; d < job->k_dim; d++)
            for (int32_t t = 0; t < RA__VECTORS; t++) {
                int32_t at = row + t * RA__WIDTH;
                float *acc = job->panel->fwd.acc + (int64_t)row * job->k_dim;
                float *to = acc + d * RA__SLAB + t * RA__WIDTH;
                RA__FLOATS sum = RA__NAME(set)(0.0f);
                for (int32_t j = 0; j < keys->n; j++) {
                    RA__MASK seen = RA__NAME(sees)(job->panel->fwd.geo, at, keys->pos[j]);
                    RA__FLOATS ds = RA__NAME(load)(job->ds + j * RA_BLOCK_TOKENS + at);
                    RA__FLOATS k = RA__NAME(set)(ra__key_row(keys, j)[d]);
                    sum = RA__NAME(select)(seen, RA__NAME(fma)(k, ds, sum), sum);
                }
                RA__NAME(store)(to, RA__NAME(load)(to) + sum);
            }
}

/* dK or dV of a tile: to[j] += sum over rows of a[j][row] rows[row]. */
typedef struct RA__NAME(key_grads) {
    const ra__back_job *job;
    const float *a, *rows;             /* [keys][64]; packed as by pack_rows */
    float *to;
    int64_t stride;
    int32_t dim;
} RA__NAME(key_grads);

/* to[n] += c. n may be more than a slab, which is then complete. */
RA__ISA_INLINE void RA__NAME(back_add)(float *to, const RA__FLOATS *c, int32_t n) {
    if (n >= RA__SLAB) {
        RA__UNROLL for (int32_t t = 0; t < RA__VECTORS; t++)
            RA__NAME(store)(to + t * RA__WIDTH, RA__NAME(load)(to + t * RA__WIDTH) + c[t]);
        return;
    }
    RA__UNROLL for (int32_t t = 0; t < RA__VECTORS; t++) {
        int32_t rest = n - t * RA__WIDTH, m = rest > RA__WIDTH ? RA__WIDTH : rest;
        if (m > 0)
            RA__NAME(store_n)(to + t * RA__WIDTH, RA__NAME(load_n)(to + t * RA__WIDTH, m) + c[t],
                              m);
    }
}

/* A slab of columns from column d on of the gradient of ni keys from key j on. */
RA__ISA_INLINE void RA__NAME(back_key_tile)(const RA__NAME(key_grads) *grads, int32_t d, int32_t j,
                                            int32_t ni) {
    RA__NAME(product) ab;
    RA__FLOATS c[8][RA__VECTORS];
    ab.a = grads->a + j * RA_BLOCK_TOKENS;
    ab.row = RA_BLOCK_TOKENS;
    ab.step = 1;
    ab.b = grads->rows + (int64_t)d * RA_BLOCK_TOKENS;
    ab.b_step = RA__SLAB;
    ab.depth = grads->job->panel->fwd.rows;
    RA__UNROLL for (int32_t i = 0; i < ni; i++)
        ra__prefetch_row(grads->to + (j + ni + i) * grads->stride, d, RA__SLAB * 4);
    RA__NAME(multiply)(&ab, c, ni, RA__VECTORS);
    RA__UNROLL for (int32_t i = 0; i < ni; i++)
        RA__NAME(back_add)(grads->to + (j + i) * grads->stride + d, c[i], grads->dim - d);
}

RA__ISA_NOINLINE void RA__NAME(back_keys)(const RA__NAME(key_grads) *grads) {
    int32_t n = grads->job->keys->n;
    for (int32_t d = 0; d < grads->dim; d += RA__SLAB) {
        int32_t j = 0;
        for (; n - j >= RA__TILE_HEIGHT; j += RA__TILE_HEIGHT)
            RA__NAME(back_key_tile)(grads, d, j, RA__TILE_HEIGHT);
        for (; RA__TILE_HEIGHT > 4 && n - j >= 4; j += 4) RA__NAME(back_key_tile)(grads, d, j, 4);
        for (; j < n; j++) RA__NAME(back_key_tile)(grads, d, j, 1);
    }
}

/* The same for Q or dO with a NaN or infinity in rows that do not see every key. */
RA__ISA_NOINLINE void RA__NAME(back_keys_dirty)(const RA__NAME(key_grads) *grads) {
    const ra__panel *fwd = &grads->job->panel->fwd;
    for (int32_t d = 0; d < grads->dim; d += RA__SLAB)
        for (int32_t j = 0; j < grads->job->keys->n; j++) {
            const float *from = grads->rows + (int64_t)d * RA_BLOCK_TOKENS;
            RA__FLOATS c[RA__VECTORS];
            for (int32_t t = 0; t < RA__VECTORS; t++) c[t] = RA__NAME(set)(0.0f);
            for (int32_t r = 0; r < fwd->rows; r++, from += RA__SLAB) {
                RA__FLOATS a = RA__NAME(set)(grads->a[j * RA_BLOCK_TOKENS + r]);
                if (!ra__row_sees(fwd->geo, r, grads->job->keys->pos[j])) continue;
                for (int32_t t = 0; t < RA__VECTORS; t++)
                    c[t] = RA__NAME(fma)(a, RA__NAME(load)(from + t * RA__WIDTH), c[t]);
            }
            RA__NAME(back_add)(grads->to + j * grads->stride + d, c, grads->dim - d);
        }
}

/* Adds dK of a tile if dk is set, otherwise dV. */
RA__ISA_STATIC void RA__NAME(back_key_grads)(const ra__back_job *job, int32_t dk) {
    RA__NAME(key_grads) grads;
    grads.job = job;
    grads.a = dk ? job->ds : job->p;
    grads.rows = dk ? job->panel->q_rows : job->panel->g_rows;
    grads.to = dk ? job->dk : job->dv;
    grads.stride = dk ? job->dk_stride : job->dv_stride;
    grads.dim = dk ? job->k_dim : job->v_dim;
    if (!grads.to) return;
    if (job->partial && !job->panel->clean) RA__NAME(back_keys_dirty)(&grads);
    else RA__NAME(back_keys)(&grads);
}

/* dP becomes dS where back_dot_tile does not do it. */
RA__ISA_STATIC void RA__NAME(back_general)(const ra__back_job *job) {
    if (job->panel->fwd.drop.threshold) {
        for (int32_t row = 0; row < RA_BLOCK_TOKENS * RA_BLOCK_TOKENS; row++) job->drop[row] = 1.0f;
        ra__drop_apply(&job->panel->fwd, job->keys, 0, RA_BLOCK_TOKENS, job->drop, RA_BLOCK_TOKENS);
    }
    for (int32_t row = 0; row < job->panel->fwd.rows; row += RA__WIDTH)
        RA__NAME(back_score_grads_general)(job, row);
    if (job->panel->d_bias) ra__bias_grad_add(job->panel, job->keys, job->ds);
    RA__NAME(back_scale)(job);
}

/* One panel against one block of keys. general: 1 if the products alone do not give P and dS. */
RA__ISA_STATIC void RA__NAME(fold_back_tile)(const ra__back_job *job) {
    const ra__panel *fwd = &job->panel->fwd;
    int32_t general = job->partial || ra__score_is_modified(&fwd->score) || fwd->drop.threshold ||
                      job->panel->d_bias;
    RA__NAME(back_scores)(job, general);
    for (int32_t row = 0; general && row < fwd->rows; row += RA__WIDTH)
        RA__NAME(back_weights)(job, row);
    if (job->want_q || job->dk || job->panel->d_bias || fwd->drop.threshold) {
        RA__NAME(back_score_grads)(job, general);
        if (general) RA__NAME(back_general)(job);
    }
    if (job->want_q && job->partial && !job->k_clean) RA__NAME(back_queries_dirty)(job);
    else if (job->want_q) RA__NAME(back_queries)(job);
    RA__NAME(back_key_grads)(job, 0);
    RA__NAME(back_key_grads)(job, 1);
}

RA__ISA_STATIC void RA__NAME(fold_back)(const ra__back_job *job, int32_t count) {
    for (int32_t i = 0; i < count; i++) RA__NAME(fold_back_tile)(job + i);
}

RA__ISA_STATIC void RA__NAME(sizes_back)(ra__bytes *out, const ra_desc *d) {
    RA__NAME(sizes)(out, d, 1);
    out->batch = 4;
    out->s = 0;
    out->k = RA_BLOCK_TOKENS * (int64_t)sizeof(float) * d->k_dim;
    if (d->v_dtype == RA_F32) out->v = 0;
}

RA__ISA_STATIC int32_t RA__NAME(prepare_back)(ra__keys *keys, const ra_desc *d,
                                              const ra__key_scratch *scratch, int32_t partial) {
    RA__NAME(copy_keys)(keys, d, scratch, 1, 0);
    return partial &&
           RA__NAME(rows_are_finite)(ra__key_row(keys, 0), keys->k_stride / 4, keys->n, d->k_dim);
}

RA__ISA_STATIC void RA__NAME(put_grad)(void *to, const float *x, int32_t dtype, int32_t n) {
    float *sum = (float *)to;
    int32_t i = 0;
    if (dtype != RA_F32) {
        RA__NAME(write_row)((uint8_t *)to, x, dtype, n);
        return;
    }
    for (; n - i >= RA__WIDTH; i += RA__WIDTH)
        RA__NAME(store)(sum + i, RA__NAME(load)(sum + i) + RA__NAME(load)(x + i));
    for (; i < n; i++) sum[i] += x[i];
}

/* Rows as [slab of columns][64][RA__SLAB] floats; columns beyond dim are 0. Returns 1 if all
 * elements are finite. */
RA__ISA_STATIC int32_t RA__NAME(pack_rows)(float *dst, const ra__source *s, int32_t rows) {
    int32_t size = s->dtype == RA_F32 ? 4 : 2, bad = 0;
    for (int32_t d = 0; d < s->dim; d += RA__SLAB) {
        int32_t n = s->dim - d < RA__SLAB ? s->dim - d : RA__SLAB;
        int32_t direct = s->dtype == RA_F32 && n == RA__SLAB;
        for (int32_t row = 0; row < rows; row++, dst += RA__SLAB) {
            const uint8_t *from = s->data + row * s->stride + d * size;
            if (!direct) RA__NAME(read_row)(dst, from, s->dtype, n);
            if (!direct) memset(dst + n, 0, (size_t)(RA__SLAB - n) * sizeof *dst);
            RA__UNROLL for (int32_t t = 0; t < RA__VECTORS; t++) {
                const float *x = direct ? (const float *)(const void *)from : dst;
                RA__FLOATS y = RA__NAME(load)(x + t * RA__WIDTH);
                bad |= RA__NAME(any_nonfinite)(y);
                RA__NAME(store)(dst + t * RA__WIDTH, y);
            }
        }
        dst += (RA_BLOCK_TOKENS - rows) * RA__SLAB;
    }
    return !bad;
}

RA__ISA_STATIC void RA__NAME(load_back)(ra__back_panel *panel, const ra__source *q,
                                        const ra__source *g) {
    ra__panel as_q = panel->fwd;
    /* PERF: Zen 5, 2048 tokens, D 64: 88 -> 89 % of the FMA peak. */
    for (int32_t row = 0; row < panel->fwd.rows; row++) {
        ra__prefetch((uintptr_t)(q->data + row * q->stride), q->dim * (q->dtype == RA_F32 ? 4 : 2));
        ra__prefetch((uintptr_t)(g->data + row * g->stride), g->dim * (g->dtype == RA_F32 ? 4 : 2));
    }
    if (panel->fwd.rows < RA_BLOCK_TOKENS) {
        memset(panel->fwd.q, 0, (size_t)RA_BLOCK_TOKENS * (size_t)q->dim * sizeof(float));
        memset(panel->g, 0, (size_t)RA_BLOCK_TOKENS * (size_t)g->dim * sizeof(float));
    }
    RA__NAME(load_q)(&panel->fwd, q->data, q->stride, q->dtype, q->dim);
    as_q.q = panel->g;
    as_q.factor = 1.0f;
    RA__NAME(load_q)(&as_q, g->data, g->stride, g->dtype, g->dim);
    panel->clean = RA__NAME(pack_rows)(panel->q_rows, q, panel->fwd.rows);
    panel->clean &= RA__NAME(pack_rows)(panel->g_rows, g, panel->fwd.rows);
}

/* n elements as floats, then zeros up to a whole vector. They are copied to `copy` if needed. */
RA__ISA_STATIC const float *RA__NAME(floats)(float *copy, const ra__source *s, int32_t row,
                                             int32_t d, int32_t n) {
    const uint8_t *from = s->data + row * s->stride + d * (s->dtype == RA_F32 ? 4 : 2);
    if (s->dtype == RA_F32 && n % RA__WIDTH == 0) return (const float *)(const void *)from;
    RA__NAME(read_row)(copy, from, s->dtype, n);
    memset(copy + n, 0, (size_t)(RA__DELTA_DIMS - n) * sizeof *copy);
    return copy;
}

RA__ISA_STATIC void RA__NAME(deltas)(float *delta, const ra__source *o, const ra__source *g,
                                     int32_t rows) {
    float a[RA__DELTA_DIMS], b[RA__DELTA_DIMS];
    for (int32_t row = 0; row < rows; row++) {
        RA__FLOATS sum = RA__NAME(set)(0.0f);
        for (int32_t d = 0; d < o->dim; d += RA__DELTA_DIMS) {
            int32_t n = o->dim - d < RA__DELTA_DIMS ? o->dim - d : RA__DELTA_DIMS;
            const float *x = RA__NAME(floats)(a, o, row, d, n);
            const float *y = RA__NAME(floats)(b, g, row, d, n);
            for (int32_t i = 0; i < n; i += RA__WIDTH)
                sum = RA__NAME(fma)(RA__NAME(load)(x + i), RA__NAME(load)(y + i), sum);
        }
        delta[row] = RA__NAME(sum)(sum);
    }
}

static const ra__kernel RA__NAME(kernel) = {
    RA__ISA, RA__NAME(sizes), RA__NAME(widen), RA__NAME(prepare), RA__NAME(load_q),
    RA__NAME(load_acc), RA__NAME(store_acc), RA__NAME(fold), RA__NAME(store_o), RA__DECODE_UNIT,
    RA__NAME(decode_load), RA__NAME(decode_fold), RA__NAME(decode_close), RA__NAME(decode_store),
    RA__NAME(decode_merge), RA__NAME(sizes_back), RA__NAME(prepare_back), RA__NAME(load_back),
    RA__NAME(deltas), RA__NAME(fold_back), RA__NAME(put_grad)};

#undef RA__SLAB
#undef RA__ISA_NOINLINE
/* What the room of the instruction set defines. */
#undef RA__NAME
#undef RA__ISA
#undef RA__TARGET
#undef RA__ISA_STATIC
#undef RA__ISA_INLINE
#undef RA__FLOATS
#undef RA__INTS
#undef RA__MASK
#undef RA__WIDTH
#undef RA__VECTORS
#undef RA__TILE_HEIGHT
#undef RA__DECODE_TILE_KEYS
#undef RA__DECODE_TILE_CHUNKS
#endif /* RA__BODY */

#if defined(RA__MAIN)
#undef RA__MAIN
#define RA__BODY

/* ========================================================================== SCALAR
 * For every processor: vectors of four floats as the compiler's extension, which become SSE2, NEON
 * or plain scalars. Comments on operations hold for the other instruction sets too. */
#define RA__NAME(name)         ra__##name##_scalar
#define RA__ISA                RA_ISA_SCALAR
#define RA__ISA_STATIC         RA__UNUSED static
#define RA__ISA_INLINE         RA__INLINE
#define RA__FLOATS             ra__v4f
#define RA__INTS               ra__v4i
#define RA__MASK               ra__v4i
#define RA__WIDTH              4
#define RA__VECTORS            2
#define RA__TILE_HEIGHT        4
#define RA__DECODE_TILE_KEYS   2
#define RA__DECODE_TILE_CHUNKS 1

typedef float ra__v4f __attribute__((vector_size(16)));
typedef int32_t ra__v4i __attribute__((vector_size(16)));
typedef uint32_t ra__v4u __attribute__((vector_size(16)));

RA__ISA_INLINE ra__v4f ra__set_scalar(float x) {
    ra__v4f v = {x, x, x, x};
    return v;
}
RA__ISA_INLINE ra__v4i ra__set_int_scalar(int32_t x) {
    ra__v4i v = {x, x, x, x};
    return v;
}
RA__ISA_INLINE ra__v4f ra__load_scalar(const float *p) {
    ra__v4f v;
    memcpy(&v, p, sizeof v);
    return v;
}
RA__ISA_INLINE ra__v4i ra__load_int_scalar(const int32_t *p) {
    ra__v4i v;
    memcpy(&v, p, sizeof v);
    return v;
}
RA__ISA_INLINE void ra__store_scalar(float *p, ra__v4f v) { memcpy(p, &v, sizeof v); }
/* Only n lanes are in memory; the others are 0. */
RA__ISA_INLINE ra__v4f ra__load_n_scalar(const float *p, int32_t n) {
    ra__v4f v = {0.0f, 0.0f, 0.0f, 0.0f};
    memcpy(&v, p, (size_t)n * sizeof *p);
    return v;
}
RA__ISA_INLINE void ra__store_n_scalar(float *p, ra__v4f v, int32_t n) {
    memcpy(p, &v, (size_t)n * sizeof *p);
}
/* Returns v, computed and in a register: it is neither fused with another operation nor loaded
 * again. */
RA__ISA_INLINE ra__v4f ra__hold_scalar(ra__v4f v) {
#if RA__X86
    __asm__("" : "+x"(v));
#endif
    return v;
}
/* a b + c, not fused on any x86. hold: clang 14 with -ffast-math -mfma would fuse in spite of the
 * pragmas. */
RA__ISA_INLINE ra__v4f ra__fma_scalar(ra__v4f a, ra__v4f b, ra__v4f c) {
    return ra__hold_scalar(a * b) + c;
}
/* m ? a : b */
RA__ISA_INLINE ra__v4f ra__select_scalar(ra__v4i m, ra__v4f a, ra__v4f b) {
    return (ra__v4f)((m & (ra__v4i)a) | (~m & (ra__v4i)b));
}
RA__ISA_INLINE ra__v4i ra__less_scalar(ra__v4f a, ra__v4f b) { return (ra__v4i)(a < b); }
RA__ISA_INLINE ra__v4f ra__max_scalar(ra__v4f a,
                                      ra__v4f b) { return ra__select_scalar(b < a, a, b); }
RA__ISA_INLINE ra__v4f ra__abs_scalar(ra__v4f a) {
    return (ra__v4f)((ra__v4i)a & ra__set_int_scalar(0x7fffffff));
}
RA__ISA_INLINE ra__v4i ra__none_scalar(void) { return ra__set_int_scalar(0); }
RA__ISA_INLINE ra__v4i ra__any_of_scalar(ra__v4i a, ra__v4i b) { return a | b; }
/* lo <= k < hi */
RA__ISA_INLINE ra__v4i ra__within_scalar(ra__v4i lo, ra__v4i hi, int32_t k) {
    ra__v4i v = ra__set_int_scalar(k);
    return (ra__v4i)(lo <= v) & (ra__v4i)(v < hi);
}
/* |p[i] - k| */
RA__ISA_INLINE ra__v4f ra__distance_scalar(const int32_t *p, int32_t k) {
    ra__v4f v = {0.0f, 0.0f, 0.0f, 0.0f};
    for (int32_t i = 0; i < 4; i++)
        v[i] = (float)(p[i] < k ? (int64_t)k - p[i] : (int64_t)p[i] - k);
    return v;
}
/* m, or 0 where m is -inf */
RA__ISA_INLINE ra__v4f ra__shift_of_scalar(ra__v4f m) {
    return (ra__v4f)((ra__v4i)m & ((ra__v4i)m != ra__set_int_scalar(-0x800000)));
}
/* 2^x; 0 below -126.5, infinite from 127.5 on. Adding 1.5 * 2^23 + 127 leaves x, rounded and with
 * the bias of exponents, in the low bits. A shift makes it an exponent. */
RA__ISA_INLINE ra__v4f ra__exp2_scalar(ra__v4f x) {
    ra__v4f magic = ra__set_scalar(12583039.0f), p = ra__set_scalar(ra__exp2_near[6]);
    ra__v4f low = ra__set_scalar(-127.0f), high = ra__set_scalar(128.0f);
    x = ra__select_scalar(x < low, low, x);
    x = ra__select_scalar(high < x, high, x);
    ra__v4f n = x + magic, f = x - (n - magic);
    RA__UNROLL for (int32_t i = 5; i >= 0; i--)
        p = ra__fma_scalar(p, f, ra__set_scalar(ra__exp2_near[i]));
    return p * (ra__v4f)((ra__v4u)n << 23);
}
/* v[c][r] = v[r][c] */
RA__ISA_INLINE void ra__transpose_scalar(ra__v4f *v) {
    ra__v4f a = __builtin_shufflevector(v[0], v[1], 0, 4, 1, 5);
    ra__v4f b = __builtin_shufflevector(v[2], v[3], 0, 4, 1, 5);
    ra__v4f c = __builtin_shufflevector(v[0], v[1], 2, 6, 3, 7);
    ra__v4f d = __builtin_shufflevector(v[2], v[3], 2, 6, 3, 7);
    v[0] = __builtin_shufflevector(a, b, 0, 1, 4, 5);
    v[1] = __builtin_shufflevector(a, b, 2, 3, 6, 7);
    v[2] = __builtin_shufflevector(c, d, 0, 1, 4, 5);
    v[3] = __builtin_shufflevector(c, d, 2, 3, 6, 7);
}
/* Sum of the lanes. */
RA__ISA_INLINE float ra__sum_scalar(ra__v4f v) { return (v[0] + v[2]) + (v[1] + v[3]); }
/* Lane i: the sum of v[i]. */
RA__ISA_INLINE ra__v4f ra__sums_scalar(const ra__v4f *v) {
    ra__v4f s = {ra__sum_scalar(v[0]), ra__sum_scalar(v[1]), ra__sum_scalar(v[2]),
                 ra__sum_scalar(v[3])};
    return s;
}
/* Nonzero if a lane is a NaN or infinite. */
RA__ISA_INLINE int32_t ra__any_nonfinite_scalar(ra__v4f v) {
    ra__v4i e = ra__set_int_scalar(0x7f800000), b = (ra__v4i)(((ra__v4i)v & e) == e);
    return b[0] | b[1] | b[2] | b[3];
}
RA__ISA_INLINE ra__v4i ra__load_half_scalar(const uint8_t *p) {
    uint16_t h[4];
    memcpy(h, p, sizeof h);
    ra__v4i v = {h[0], h[1], h[2], h[3]};
    return v;
}
/* As ra__f32_of_f16, with all branches at once. */
RA__ISA_INLINE ra__v4f ra__of_f16_scalar(const uint8_t *p) {
    ra__v4i h = ra__load_half_scalar(p), a = h & 0x7fff;
    ra__v4f tiny = __builtin_convertvector(a, ra__v4f) * (1.0f / 16777216.0f);
    ra__v4i u = (a << 13) + (112 << 23);
    u = (ra__v4i)ra__select_scalar(a < 0x400, tiny, (ra__v4f)u);
    u |= (a >= 0x7c00) & 0x7f800000;
    u |= (a > 0x7c00) & 0x400000;
    return (ra__v4f)((ra__v4u)u | (ra__v4u)(h & 0x8000) << 16);
}
RA__ISA_INLINE ra__v4f ra__of_i8_scalar(const uint8_t *p) {
    ra__v4f v = {(float)(int8_t)p[0], (float)(int8_t)p[1], (float)(int8_t)p[2],
                 (float)(int8_t)p[3]};
    return v;
}
RA__ISA_INLINE ra__v4f ra__of_bf16_scalar(const uint8_t *p) {
    return (ra__v4f)((ra__v4u)ra__load_half_scalar(p) << 16);
}
RA__ISA_INLINE void ra__to_f16_scalar(uint8_t *p, ra__v4f v) {
    uint16_t h[4];
    for (int32_t i = 0; i < 4; i++) h[i] = ra__f16_of_f32(v[i]);
    memcpy(p, h, sizeof h);
}
RA__ISA_INLINE void ra__to_bf16_scalar(uint8_t *p, ra__v4f v) {
    uint16_t h[4];
    for (int32_t i = 0; i < 4; i++) h[i] = ra__bf16_of_f32(v[i]);
    memcpy(p, h, sizeof h);
}

#include RINGATTN_SELF

#if RA__X86
/* ========================================================================== AVX2
 * AVX2, FMA, F16C: 16 registers of 8 lanes, tiles of 6 keys and 16 rows. */

/* The instructions of a kernel, whatever the program is compiled for.
 * PERF: gcc's tuning for one processor costs. gcc 12, -march=native (znver3) on a Zen 4, decoding
 * f32 over 1024 keys, 8/2 heads, D 64: 39 us as here, 46 us tuned. */
#if defined(__clang__)
#define RA__INSTRUCTIONS(list) __attribute__((target(list)))
#else
#define RA__INSTRUCTIONS(list) __attribute__((target("tune=generic," list)))
#endif
#define RA__NAME(name)         ra__##name##_avx2
#define RA__ISA                RA_ISA_AVX2
#define RA__TARGET             RA__INSTRUCTIONS("avx2,fma,f16c")
#define RA__ISA_STATIC         RA__UNUSED RA__TARGET static
#define RA__ISA_INLINE         RA__INLINE RA__TARGET
#define RA__FLOATS             __m256
#define RA__INTS               __m256i
#define RA__MASK               __m256i
#define RA__WIDTH              8
#define RA__VECTORS            2
#define RA__TILE_HEIGHT        6
#define RA__DECODE_TILE_KEYS   2
#define RA__DECODE_TILE_CHUNKS 1

RA__ISA_INLINE __m256 ra__set_avx2(float x) { return _mm256_set1_ps(x); }
RA__ISA_INLINE __m256 ra__load_avx2(const float *p) { return _mm256_loadu_ps(p); }
RA__ISA_INLINE void ra__store_avx2(float *p, __m256 v) { _mm256_storeu_ps(p, v); }
RA__ISA_INLINE __m256i ra__load_int_avx2(const int32_t *p) {
    return _mm256_loadu_si256((const __m256i *)(const void *)p);
}
RA__ISA_INLINE __m256i ra__first_lanes_avx2(int32_t n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
RA__ISA_INLINE __m256 ra__load_n_avx2(const float *p, int32_t n) {
    return _mm256_maskload_ps(p, ra__first_lanes_avx2(n));
}
RA__ISA_INLINE void ra__store_n_avx2(float *p, __m256 v, int32_t n) {
    _mm256_maskstore_ps(p, ra__first_lanes_avx2(n), v);
}
RA__ISA_INLINE __m256 ra__hold_avx2(__m256 v) {
    __asm__("" : "+x"(v));
    return v;
}
RA__ISA_INLINE __m256 ra__fma_avx2(__m256 a, __m256 b, __m256 c) { return _mm256_fmadd_ps(a, b, c);
                                                                  }
RA__ISA_INLINE __m256 ra__select_avx2(__m256i m, __m256 a, __m256 b) {
    return _mm256_blendv_ps(b, a, _mm256_castsi256_ps(m));
}
RA__ISA_INLINE __m256i ra__less_avx2(__m256 a, __m256 b) {
    return _mm256_castps_si256(_mm256_cmp_ps(a, b, _CMP_LT_OQ));
}
RA__ISA_INLINE __m256 ra__max_avx2(__m256 a, __m256 b) { return _mm256_max_ps(a, b); }
RA__ISA_INLINE __m256 ra__abs_avx2(__m256 a) {
    return _mm256_castsi256_ps(
        _mm256_and_si256(_mm256_castps_si256(a), _mm256_set1_epi32(0x7fffffff)));
}
RA__ISA_INLINE __m256i ra__none_avx2(void) { return _mm256_setzero_si256(); }
RA__ISA_INLINE __m256i ra__any_of_avx2(__m256i a, __m256i b) { return _mm256_or_si256(a, b); }
RA__ISA_INLINE __m256i ra__within_avx2(__m256i lo, __m256i hi, int32_t k) {
    __m256i v = _mm256_set1_epi32(k);
    return _mm256_andnot_si256(_mm256_cmpgt_epi32(lo, v), _mm256_cmpgt_epi32(hi, v));
}
RA__ISA_INLINE __m256 ra__distance_avx2(const int32_t *p, int32_t k) {
    return _mm256_cvtepi32_ps(
        _mm256_abs_epi32(_mm256_sub_epi32(ra__load_int_avx2(p), _mm256_set1_epi32(k))));
}
RA__ISA_INLINE __m256 ra__shift_of_avx2(__m256 m) {
    __m256i u = _mm256_castps_si256(m);
    return _mm256_castsi256_ps(
        _mm256_andnot_si256(_mm256_cmpeq_epi32(u, _mm256_set1_epi32(-0x800000)), u));
}
/* As ra__exp2_scalar. max and min return the second operand if one of them is a NaN. */
RA__ISA_INLINE __m256 ra__exp2_avx2(__m256 x) {
    __m256 magic = ra__set_avx2(12583039.0f), p = ra__set_avx2(ra__exp2_near[6]);
    x = _mm256_min_ps(ra__set_avx2(128.0f), _mm256_max_ps(ra__set_avx2(-127.0f), x));
    __m256 n = x + magic, f = x - (n - magic);
    RA__UNROLL for (int32_t i = 5; i >= 0; i--)
        p = _mm256_fmadd_ps(p, f, ra__set_avx2(ra__exp2_near[i]));
    return p * _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(n), 23));
}
/* Pairs of elements, then fours, then halves of vectors. */
RA__ISA_INLINE void ra__transpose_avx2(__m256 *v) {
    __m256 a[8];
    RA__UNROLL for (int32_t i = 0; i < 8; i += 2) {
        a[i] = _mm256_unpacklo_ps(v[i], v[i + 1]);
        a[i + 1] = _mm256_unpackhi_ps(v[i], v[i + 1]);
    }
    RA__UNROLL for (int32_t i = 0; i < 8; i += 4) {
        v[i] = _mm256_shuffle_ps(a[i], a[i + 2], 0x44);
        v[i + 1] = _mm256_shuffle_ps(a[i], a[i + 2], 0xee);
        v[i + 2] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0x44);
        v[i + 3] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0xee);
    }
    RA__UNROLL for (int32_t i = 0; i < 4; i++) {
        a[i] = _mm256_permute2f128_ps(v[i], v[i + 4], 0x20);
        a[i + 4] = _mm256_permute2f128_ps(v[i], v[i + 4], 0x31);
    }
    RA__UNROLL for (int32_t i = 0; i < 8; i++) v[i] = a[i];
}
RA__ISA_INLINE float ra__sum_avx2(__m256 v) {
    __m128 a = _mm256_castps256_ps128(v) + _mm256_extractf128_ps(v, 1);
    a = a + _mm_movehl_ps(a, a);
    return _mm_cvtss_f32(a + _mm_shuffle_ps(a, a, 1));
}
RA__ISA_INLINE __m256 ra__sums_avx2(const __m256 *v) {
    __m256 a = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
    __m256 b = _mm256_hadd_ps(_mm256_hadd_ps(v[4], v[5]), _mm256_hadd_ps(v[6], v[7]));
    return _mm256_permute2f128_ps(a, b, 0x20) + _mm256_permute2f128_ps(a, b, 0x31);
}
RA__ISA_INLINE int32_t ra__any_nonfinite_avx2(__m256 v) {
    __m256i e = _mm256_set1_epi32(0x7f800000);
    return _mm256_movemask_epi8(
        _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_castps_si256(v), e), e));
}
RA__ISA_INLINE __m128i ra__load_half_avx2(const uint8_t *p) {
    return _mm_loadu_si128((const __m128i *)(const void *)p);
}
RA__ISA_INLINE __m256 ra__of_f16_avx2(const uint8_t *p) {
    return _mm256_cvtph_ps(ra__load_half_avx2(p));
}
RA__ISA_INLINE __m256 ra__of_i8_avx2(const uint8_t *p) {
    return _mm256_cvtepi32_ps(
        _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)p)));
}
RA__ISA_INLINE __m256 ra__of_bf16_avx2(const uint8_t *p) {
    return _mm256_castsi256_ps(
        _mm256_slli_epi32(_mm256_cvtepu16_epi32(ra__load_half_avx2(p)), 16));
}
RA__ISA_INLINE void ra__to_f16_avx2(uint8_t *p, __m256 v) {
    _mm_storeu_si128((__m128i *)(void *)p, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}
/* As ra__bf16_of_f32. */
RA__ISA_INLINE void ra__to_bf16_avx2(uint8_t *p, __m256 v) {
    __m256i u = _mm256_castps_si256(v), high = _mm256_srli_epi32(u, 16), one = _mm256_set1_epi32(1);
    __m256i nan = _mm256_cmpgt_epi32(_mm256_and_si256(u, _mm256_set1_epi32(0x7fffffff)),
                                     _mm256_set1_epi32(0x7f800000));
    __m256i r = _mm256_add_epi32(_mm256_and_si256(high, one), _mm256_set1_epi32(0x7fff));
    r = _mm256_srli_epi32(_mm256_add_epi32(u, r), 16);
    r = _mm256_blendv_epi8(r, _mm256_or_si256(high, _mm256_set1_epi32(0x40)), nan);
    r = _mm256_permute4x64_epi64(_mm256_packus_epi32(r, r), 0x08);
    _mm_storeu_si128((__m128i *)(void *)p, _mm256_castsi256_si128(r));
}

#include RINGATTN_SELF

/* ========================================================================== AVX512
 * AVX-512 F, BW, DQ, VL: 32 registers of 16 lanes, tiles of 4 keys and 64 rows. gcc 12 warns of its
 * own intrinsics: of reading unset values (its bug 105593) and, at -O0, of sign conversion. */
#if !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wsign-conversion"
#endif
#define RA__NAME(name)         ra__##name##_avx512
#define RA__ISA                RA_ISA_AVX512
#define RA__TARGET                                                                               \
    RA__INSTRUCTIONS("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#define RA__ISA_STATIC         RA__UNUSED RA__TARGET static
#define RA__ISA_INLINE         RA__INLINE RA__TARGET
#define RA__FLOATS             __m512
#define RA__INTS               __m512i
#define RA__MASK               __mmask16
#define RA__WIDTH              16
#define RA__VECTORS            4
#define RA__TILE_HEIGHT        4
#define RA__DECODE_TILE_KEYS   4
#define RA__DECODE_TILE_CHUNKS 2

RA__ISA_INLINE __m512 ra__set_avx512(float x) { return _mm512_set1_ps(x); }
RA__ISA_INLINE __m512 ra__load_avx512(const float *p) { return _mm512_loadu_ps(p); }
RA__ISA_INLINE void ra__store_avx512(float *p, __m512 v) { _mm512_storeu_ps(p, v); }
RA__ISA_INLINE __m512i ra__load_int_avx512(const int32_t *p) { return _mm512_loadu_si512(p); }
RA__ISA_INLINE __mmask16 ra__first_lanes_avx512(int32_t n) { return (__mmask16)((1u << n) - 1u); }
RA__ISA_INLINE __m512 ra__load_n_avx512(const float *p, int32_t n) {
    return _mm512_maskz_loadu_ps(ra__first_lanes_avx512(n), p);
}
RA__ISA_INLINE void ra__store_n_avx512(float *p, __m512 v, int32_t n) {
    _mm512_mask_storeu_ps(p, ra__first_lanes_avx512(n), v);
}
/* PERF: without it gcc 12 loads an operand again for each of its four uses. Zen 5, D 64: 78 -> 85 %
 * of the FMA peak. */
RA__ISA_INLINE __m512 ra__hold_avx512(__m512 v) {
    __asm__("" : "+v"(v));
    return v;
}
RA__ISA_INLINE __m512 ra__fma_avx512(__m512 a, __m512 b,
                                     __m512 c) { return _mm512_fmadd_ps(a, b, c); }
RA__ISA_INLINE __m512 ra__select_avx512(__mmask16 m, __m512 a, __m512 b) {
    return _mm512_mask_blend_ps(m, b, a);
}
RA__ISA_INLINE __mmask16 ra__less_avx512(__m512 a, __m512 b) {
    return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ);
}
RA__ISA_INLINE __m512 ra__max_avx512(__m512 a, __m512 b) { return _mm512_max_ps(a, b); }
RA__ISA_INLINE __m512 ra__abs_avx512(__m512 a) {
    return _mm512_castsi512_ps(
        _mm512_and_si512(_mm512_castps_si512(a), _mm512_set1_epi32(0x7fffffff)));
}
RA__ISA_INLINE __mmask16 ra__none_avx512(void) { return 0; }
RA__ISA_INLINE __mmask16 ra__any_of_avx512(__mmask16 a, __mmask16 b) { return (__mmask16)(a | b); }
RA__ISA_INLINE __mmask16 ra__within_avx512(__m512i lo, __m512i hi, int32_t k) {
    __m512i v = _mm512_set1_epi32(k);
    return _mm512_mask_cmplt_epi32_mask(_mm512_cmple_epi32_mask(lo, v), v, hi);
}
RA__ISA_INLINE __m512 ra__distance_avx512(const int32_t *p, int32_t k) {
    __m512i d = _mm512_sub_epi32(ra__load_int_avx512(p), _mm512_set1_epi32(k));
    return _mm512_cvtepi32_ps(_mm512_abs_epi32(d));
}
RA__ISA_INLINE __m512 ra__shift_of_avx512(__m512 m) {
    return _mm512_maskz_mov_ps(
        _mm512_cmpneq_epi32_mask(_mm512_castps_si512(m), _mm512_set1_epi32(-0x800000)), m);
}
/* 2^x = 2^(x - floor x) 2^floor x. For -inf vreduceps gives 0, and vscalefps 0 too. */
RA__ISA_INLINE __m512 ra__exp2_avx512(__m512 x) {
    __m512 f = _mm512_reduce_ps(x, 1), p = ra__set_avx512(ra__exp2_floor[6]);
    RA__UNROLL for (int32_t i = 5; i >= 0; i--)
        p = _mm512_fmadd_ps(p, f, ra__set_avx512(ra__exp2_floor[i]));
    return _mm512_scalef_ps(p, x);
}
/* Pairs of elements, then fours, then quarters of vectors twice. */
RA__ISA_INLINE void ra__transpose_avx512(__m512 *v) {
    __m512 a[16];
    RA__UNROLL for (int32_t i = 0; i < 16; i += 2) {
        a[i] = _mm512_unpacklo_ps(v[i], v[i + 1]);
        a[i + 1] = _mm512_unpackhi_ps(v[i], v[i + 1]);
    }
    RA__UNROLL for (int32_t i = 0; i < 16; i += 4) {
        v[i] = _mm512_shuffle_ps(a[i], a[i + 2], 0x44);
        v[i + 1] = _mm512_shuffle_ps(a[i], a[i + 2], 0xee);
        v[i + 2] = _mm512_shuffle_ps(a[i + 1], a[i + 3], 0x44);
        v[i + 3] = _mm512_shuffle_ps(a[i + 1], a[i + 3], 0xee);
    }
    RA__UNROLL for (int32_t i = 0; i < 4; i++) {
        a[i] = _mm512_shuffle_f32x4(v[i], v[i + 4], 0x88);
        a[i + 4] = _mm512_shuffle_f32x4(v[i], v[i + 4], 0xdd);
        a[i + 8] = _mm512_shuffle_f32x4(v[i + 8], v[i + 12], 0x88);
        a[i + 12] = _mm512_shuffle_f32x4(v[i + 8], v[i + 12], 0xdd);
    }
    RA__UNROLL for (int32_t i = 0; i < 8; i++) {
        v[i] = _mm512_shuffle_f32x4(a[i], a[i + 8], 0x88);
        v[i + 8] = _mm512_shuffle_f32x4(a[i], a[i + 8], 0xdd);
    }
}
RA__ISA_INLINE float ra__sum_avx512(__m512 v) {
    __m256 b = _mm512_castps512_ps256(v) + _mm512_extractf32x8_ps(v, 1);
    __m128 a = _mm256_castps256_ps128(b) + _mm256_extractf128_ps(b, 1);
    a = a + _mm_movehl_ps(a, a);
    return _mm_cvtss_f32(a + _mm_shuffle_ps(a, a, 1));
}
/* Lane 4 i + j: the sum over the 128 bits i of v[j]. */
RA__ISA_INLINE __m512 ra__sums_4_avx512(const __m512 *v) {
    __m512 a = _mm512_unpacklo_ps(v[0], v[1]) + _mm512_unpackhi_ps(v[0], v[1]);
    __m512 b = _mm512_unpacklo_ps(v[2], v[3]) + _mm512_unpackhi_ps(v[2], v[3]);
    __m512d c = _mm512_castps_pd(a), d = _mm512_castps_pd(b);
    return _mm512_castpd_ps(_mm512_unpacklo_pd(c, d)) + _mm512_castpd_ps(_mm512_unpackhi_pd(c, d));
}
RA__ISA_INLINE __m512 ra__sums_avx512(const __m512 *v) {
    __m512 a = ra__sums_4_avx512(v), b = ra__sums_4_avx512(v + 4);
    __m512 c = ra__sums_4_avx512(v + 8), d = ra__sums_4_avx512(v + 12);
    a = _mm512_shuffle_f32x4(a, b, 0x88) + _mm512_shuffle_f32x4(a, b, 0xdd);
    c = _mm512_shuffle_f32x4(c, d, 0x88) + _mm512_shuffle_f32x4(c, d, 0xdd);
    return _mm512_shuffle_f32x4(a, c, 0x88) + _mm512_shuffle_f32x4(a, c, 0xdd);
}
RA__ISA_INLINE int32_t ra__any_nonfinite_avx512(__m512 v) {
    __m512i e = _mm512_set1_epi32(0x7f800000);
    return _mm512_cmpeq_epi32_mask(_mm512_and_si512(_mm512_castps_si512(v), e), e);
}
RA__ISA_INLINE __m256i ra__load_half_avx512(const uint8_t *p) {
    return _mm256_loadu_si256((const __m256i *)(const void *)p);
}
RA__ISA_INLINE __m512 ra__of_f16_avx512(const uint8_t *p) {
    return _mm512_cvtph_ps(ra__load_half_avx512(p));
}
RA__ISA_INLINE __m512 ra__of_i8_avx512(const uint8_t *p) {
    return _mm512_cvtepi32_ps(
        _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(const void *)p)));
}
RA__ISA_INLINE __m512 ra__of_bf16_avx512(const uint8_t *p) {
    return _mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_cvtepu16_epi32(ra__load_half_avx512(p)), 16));
}
RA__ISA_INLINE void ra__to_f16_avx512(uint8_t *p, __m512 v) {
    _mm256_storeu_si256((__m256i *)(void *)p,
                        _mm512_maskz_cvtps_ph(0xffff, v, _MM_FROUND_TO_NEAREST_INT));
}
/* As ra__bf16_of_f32. */
RA__ISA_INLINE void ra__to_bf16_avx512(uint8_t *p, __m512 v) {
    __m512i u = _mm512_castps_si512(v), high = _mm512_srli_epi32(u, 16), one = _mm512_set1_epi32(1);
    __mmask16 nan = _mm512_cmpgt_epi32_mask(_mm512_and_si512(u, _mm512_set1_epi32(0x7fffffff)),
                                            _mm512_set1_epi32(0x7f800000));
    __m512i r = _mm512_add_epi32(_mm512_and_si512(high, one), _mm512_set1_epi32(0x7fff));
    r = _mm512_srli_epi32(_mm512_add_epi32(u, r), 16);
    r = _mm512_mask_or_epi32(r, nan, high, _mm512_set1_epi32(0x40));
    _mm256_storeu_si256((__m256i *)(void *)p, _mm512_cvtepi32_epi16(r));
}

#include RINGATTN_SELF

RA__RANGES_BEGIN

/* ========================================================================== AVX512 BF16
 * The tile body for q, k and v of bf16. Its products are vdpbf16ps: c += a1 b1, then c += a0 b0,
 * where a and b are pairs of bf16; each step is rounded to f32, and denormals count as zero. Panels
 * are laid out as in KERNEL, except that a lane of q and p holds a pair:
 *   q    [Dk / 2][64 rows]  pairs of dims, multiplied by pairs of dims of K, broadcast
 *   p    [32][64 rows]      pairs of keys, multiplied by pairs of keys of V, broadcast
 *   acc  [Dv][64 rows]      f32
 * Dk and Dv are rounded up to 32 there, with zeros. K is read as stored. V is packed into pairs of
 * keys once for all panels of a task.
 *
 * In the functions below c[i][t] is a tile of sums in registers: ni keys, dims or query rows by nt
 * vectors of 16 lanes. s is a tile of scores. A piece is the softmax of a small part of a tile: it
 * runs while the multipliers work on the next tile.
 *
 * The maximum m is stale: it is that of the first block in which the row saw a key, and it stays.
 * So p = 2^(s - m) may exceed 1. That is harmless, because softmax does not change under shifts and
 * bf16 has the exponents of f32. It allows scores to become p while the next scores are summed, and
 * acc to continue from key to key in one chain without rescaling. A row whose l exceeds 2^32 after
 * a block gets a new m, its sums are rescaled, and its part of the block is done again. The other
 * rows keep their bits. PERF: a maximum per block costs 2.5 % of the peak at D 64 and 1.5 % at D
 * 128 (Zen 5).
 *
 * p is rounded to nearest, and l sums the rounded values, so that numerator and denominator agree.
 * Q is not scaled in advance, because rounding q * scale would lose another half bit: the scale is
 * in the multiply-add before 2^x. */
#define RA__BF_TARGET                                                                            \
    RA__INSTRUCTIONS("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")
#define RA__BF_STATIC RA__UNUSED RA__BF_TARGET static
#define RA__BF_INLINE RA__INLINE RA__BF_TARGET

/* 2^f for f in [0, 1] with an error of 7.5e-5, far below half a step of bf16. With half a step
 * added to the constant term, cutting off the low 16 bits rounds to nearest. */
static const float ra__bf_exp2[4] = {0.999925219f, 0.69583354f, 0.226067155f, 0.0780245227f};
static const float ra__bf_half_step = 0.00390625f;

/* Rows [row, row + 16 vectors) of a panel against one block of keys. */
typedef struct ra__bf_strip {
    const ra__panel *panel;
    const ra__keys *keys;
    int32_t k_dim, v_dim;
    float *scores;                     /* [keys][64 rows]: sums of products, until they are
                                        * finished; key j is in row j & slot_mask */
    float *p_pairs;                    /* [32][64 rows] pairs of p */
    int32_t row, vectors;
    int32_t first, last;               /* some row sees some of the keys [first, last). Both are
                                        * even, except where last is the number of keys */
    int32_t masked;                    /* 0: all rows see all keys, and `seen` is not set */
    uint64_t seen[64];                 /* bit r: row r sees this key */
    uint64_t seeing;                   /* bit r: row r sees some key */
    float factor;                      /* score * factor is to base 2 */
    int32_t slot_mask;                 /* 63: scores of all keys are kept; 15: of the last 16 */
    int32_t finished;                  /* AMX: 1: scores are modified and masked */
    float *bias;                       /* [64 keys], or [4][64 keys][16 rows] */
    float shift[64];                   /* per row: m, or 0 if m is -inf */
    float old_l[64];                   /* l before this block */
    float block_max[64];               /* of the scores of this block */
} ra__bf_strip;

RA__BF_INLINE __m512 ra__bf_dot(__m512 c, __m512i a, __m512i b) {
    return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b);
}
/* Loads into a register and keeps it there. gcc 12 would otherwise load the operand again for each
 * use. */
RA__BF_INLINE __m512i ra__bf_load(const float *p) {
    __m512i v = _mm512_loadu_si512(p);
    __asm__("" : "+v"(v));
    return v;
}
RA__BF_INLINE __m512i ra__bf_broadcast(const uint8_t *p) {
    int32_t pair;
    memcpy(&pair, p, sizeof pair);
    return _mm512_set1_epi32(pair);
}

/* 2^x. `more` is added to the constant term, and so to the result for integer x (see
 * ra__bf_half_step). */
RA__BF_INLINE __m512 ra__bf_exp(__m512 x, const float more) {
    __m512 f = _mm512_reduce_ps(x, 1), p = _mm512_set1_ps(ra__bf_exp2[3]);
    RA__UNROLL for (int32_t i = 2; i > 0; i--)
        p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(ra__bf_exp2[i]));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(ra__bf_exp2[0] + more));
    return _mm512_scalef_ps(p, x);
}

/* p of two keys as pairs; adds both to l. */
RA__BF_INLINE __m512i ra__bf_exp_pair(__m512 x0, __m512 x1, __m512 *l) {
    const __m512i high = _mm512_set1_epi32((int32_t)0xffff0000u);
    const __m512 p0 = ra__bf_exp(x0, ra__bf_half_step), p1 = ra__bf_exp(x1, ra__bf_half_step);
    const __m512i a = _mm512_and_si512(_mm512_castps_si512(p0), high);
    const __m512i b = _mm512_and_si512(_mm512_castps_si512(p1), high);
    *l = _mm512_add_ps(*l, _mm512_add_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b)));
    return _mm512_or_si512(_mm512_srli_epi32(a, 16), b);
}

/* A mask of the first n lanes of 16 or 32. n may be any number. */
RA__BF_INLINE uint32_t ra__bf_first_lanes(int32_t n, const int32_t lanes) {
    if (n >= lanes) return 0xffffffffu >> (32 - lanes);
    return n > 0 ? ((uint32_t)1 << n) - 1 : 0;
}

/* The lanes of vector t whose rows see key j. */
RA__BF_INLINE __mmask16 ra__bf_lanes_seeing(const ra__bf_strip *strip, int32_t j, int32_t t) {
    return (__mmask16)(strip->seen[j] >> (strip->row + 16 * t));
}

/* Addresses of ni rows of K from key j on. Rows beyond the last key repeat the last one. */
RA__BF_INLINE void ra__bf_key_rows(const ra__bf_strip *strip, int32_t j, const uint8_t **k,
                                   const int32_t ni) {
    RA__UNROLL for (int32_t i = 0; i < ni; i++) {
        const int32_t key = j + i < strip->keys->n ? j + i : strip->keys->n - 1;
        k[i] = strip->keys->k + key * strip->keys->k_stride;
    }
}

/* c[i][t] += the pair at a[i] + at, broadcast, times vector t of the pairs at b. */
RA__BF_INLINE void ra__bf_product(__m512 (*c)[4], const uint8_t *const *a, int64_t at,
                                  const float *b, const int32_t ni, const int32_t nt) {
    __m512i y[4];
    RA__UNROLL for (int32_t t = 0; t < nt; t++) y[t] = ra__bf_load(b + 16 * t);
    RA__UNROLL for (int32_t i = 0; i < ni; i++) {
        const __m512i z = ra__bf_broadcast(a[i] + at);
        RA__UNROLL for (int32_t t = 0; t < nt; t++) c[i][t] = ra__bf_dot(c[i][t], y[t], z);
    }
}

/* c[i][t] += the sum over n pairs of a and b. Pair j of row i is at a + row * i + step * j, in
 * bytes; those of b are [n][64]. */
RA__BF_INLINE void ra__bf_products(__m512 (*c)[4], const uint8_t *a, int64_t row, int64_t step,
                                   const float *b, int32_t n, const int32_t ni, const int32_t nt) {
    RA__UNROLL_2 for (int32_t j = 0; j < n; j++, b += 64, a += step) {
        const uint8_t *at[8];
        RA__UNROLL for (int32_t i = 0; i < ni; i++) at[i] = a + row * i;
        ra__bf_product(c, at, 0, b, ni, nt);
    }
}

/* c[i][t] += K Q^T of dims [d, Dk). An odd last dim has no partner in K and is loaded alone. */
RA__BF_INLINE void ra__bf_dots_from(const ra__bf_strip *strip, const uint8_t *const *k, int32_t d,
                                    __m512 (*c)[4], const int32_t ni, const int32_t nt) {
    const float *q = strip->panel->q + strip->row;
    RA__UNROLL_2 for (; d + 1 < strip->k_dim; d += 2)
        ra__bf_product(c, k, 2 * d, q + d * 32, ni, nt);
    if (d == strip->k_dim) return;
    RA__UNROLL for (int32_t i = 0; i < ni; i++) {
        uint16_t y;
        memcpy(&y, k[i] + 2 * d, sizeof y);
        RA__UNROLL for (int32_t t = 0; t < nt; t++)
            c[i][t] = ra__bf_dot(c[i][t], ra__bf_load(q + d * 32 + 16 * t), _mm512_set1_epi32(y));
    }
}

RA__BF_INLINE void ra__bf_zero_sums(__m512 (*c)[4], const int32_t ni, const int32_t nt) {
    RA__UNROLL for (int32_t i = 0; i < ni; i++)
        RA__UNROLL for (int32_t t = 0; t < nt; t++) c[i][t] = _mm512_setzero_ps();
}

/* c[i][t] += K Q^T of dims [d, d + 8). The empty assembly keeps these products before the piece
 * that follows: clang 14 would move them behind it, but not their operands. */
RA__BF_INLINE void ra__bf_eight_dims(__m512 (*c)[4], const uint8_t *const *k, int32_t d,
                                     const float *q, const int32_t ni, const int32_t nt) {
    ra__bf_product(c, k, 2 * d, q + d * 32, ni, nt);
    ra__bf_product(c, k, 2 * d + 4, q + d * 32 + 64, ni, nt);
    ra__bf_product(c, k, 2 * d + 8, q + d * 32 + 128, ni, nt);
    ra__bf_product(c, k, 2 * d + 12, q + d * 32 + 192, ni, nt);
    RA__UNROLL for (int32_t i = 0; i < ni; i++)
        RA__UNROLL for (int32_t t = 0; t < nt; t++) __asm__ volatile("" : "+v"(c[i][t]));
}

/* Tiles from and to memory with rows of 64 floats. */
RA__BF_INLINE void ra__bf_load_sums(__m512 (*c)[4], const float *from, const int32_t ni,
                                    const int32_t nt) {
    RA__UNROLL for (int32_t i = 0; i < ni; i++)
        RA__UNROLL for (int32_t t = 0; t < nt; t++)
            c[i][t] = _mm512_loadu_ps(from + i * 64 + t * 16);
}
RA__BF_INLINE void ra__bf_store_sums(float *to, __m512 (*c)[4], const int32_t ni,
                                     const int32_t nt) {
    RA__UNROLL for (int32_t i = 0; i < ni; i++)
        RA__UNROLL for (int32_t t = 0; t < nt; t++) _mm512_storeu_ps(to + i * 64 + t * 16, c[i][t]);
}

/* Loads the bias of the keys and rows of a strip into strip->bias. */
RA__BF_STATIC void ra__bf_load_bias(const ra__bf_strip *strip) {
    const ra__score *score = &strip->panel->score;
    ra__strip_avx512 forward;
    forward.panel = strip->panel;
    forward.keys = strip->keys;
    forward.first = strip->first;
    forward.last = strip->last < strip->keys->n ? strip->last : strip->keys->n;
    for (int32_t t = strip->row / 16;
         t < strip->row / 16 + strip->vectors && score->bias_row_stride; t++)
        ra__load_bias_avx512(&forward, 16 * t,
                             (float(*)[16])(strip->bias + (t * 64 + forward.first) * 16));
    for (int32_t j = forward.first; j < forward.last && !score->bias_row_stride; j++)
        strip->bias[j] = ra__bias_at(score, 0, strip->keys->pos[j]);
}

/* The modified score, to base 2, of key j and rows [row, row + 16). x is the dot product. */
RA__BF_INLINE __m512 ra__bf_modify(const ra__bf_strip *strip, const ra__score *score, int32_t j,
                                   int32_t row, __m512 x) {
    const int32_t pos = strip->keys->pos ? strip->keys->pos[j] : 0;
    __m512 bias = _mm512_setzero_ps();
    if (score->bias && !score->bias_row_stride) bias = _mm512_set1_ps(strip->bias[j]);
    else if (score->bias) bias = _mm512_loadu_ps(strip->bias + (row / 16 * 64 + j) * 16);
    x = _mm512_mul_ps(x, _mm512_set1_ps(strip->panel->factor));
    return ra__modify_avx512(score, x, ra__distance_avx512(strip->panel->geo->pos + row, pos),
                             bias);
}

/* log2 of p of key j and vector t. modified: by ALiBi or a bias. */
RA__BF_INLINE __m512 ra__bf_exponent(const ra__bf_strip *strip, int32_t j, int32_t t,
                                     const int32_t masked, const int32_t modified) {
    const int32_t row = strip->row + 16 * t;
    const __m512 shift = _mm512_loadu_ps(strip->shift + row);
    const __m512 factor = _mm512_set1_ps(strip->factor);
    __m512 x = _mm512_loadu_ps(strip->scores + (j & strip->slot_mask) * 64 + row);
    ra__score score = strip->panel->score;
    score.softcap = 0.0f;
    if (modified) x = _mm512_sub_ps(ra__bf_modify(strip, &score, j, row, x), shift);
    else x = _mm512_fmsub_ps(x, factor, shift);
    if (!masked) return x;
    return _mm512_mask_blend_ps(ra__bf_lanes_seeing(strip, j, t), _mm512_set1_ps(ra__neg_inf()), x);
}

/* A piece: turns the scores of keys j and j + 1 and vector t into p, and adds them to l. */
RA__BF_INLINE void ra__bf_piece(const ra__bf_strip *strip, int32_t j, int32_t t,
                                const int32_t masked, const int32_t modified) {
    float *l = strip->panel->l + strip->row + 16 * t;
    __m512 sum = _mm512_loadu_ps(l);
    __m512 x = ra__bf_exponent(strip, j, t, masked, modified);
    __m512 y = ra__bf_exponent(strip, j + 1, t, masked, modified);
    _mm512_storeu_si512(strip->p_pairs + j / 2 * 64 + strip->row + 16 * t,
                        ra__bf_exp_pair(x, y, &sum));
    _mm512_storeu_ps(l, sum);
}

/* Pieces [n, pieces) of the tile of keys from j on, with no products beside them. */
RA__NOINLINE RA__BF_TARGET void ra__bf_last_pieces(const ra__bf_strip *strip, int32_t j, int32_t n,
                                                   int32_t pieces, int32_t modified) {
    for (; n < pieces; n++)
        ra__bf_piece(strip, j + n / strip->vectors * 2, n % strip->vectors, strip->vectors < 4,
                     modified);
}

/* Scores of ni keys from j on, and between their products the first `pieces` pieces of the tile
 * before. */
RA__BF_INLINE void ra__bf_score_tile(const ra__bf_strip *strip, int32_t j, int32_t pieces,
                                     const int32_t ni, const int32_t nt, const int32_t modified) {
    __m512 c[8][4];
    const uint8_t *k[8];
    const float *q = strip->panel->q + strip->row;
    float *s = strip->scores + (j & strip->slot_mask) * 64 + strip->row;
    int32_t d, n = 0;
    ra__bf_key_rows(strip, j, k, ni);
    ra__bf_zero_sums(c, ni, nt);
    for (d = 0; n < pieces && d + 8 <= strip->k_dim; d += 8, n++) {
        ra__bf_eight_dims(c, k, d, q, ni, nt);
        ra__bf_piece(strip, j - ni + n / nt * 2, n % nt, nt < 4, modified);
    }
    ra__bf_dots_from(strip, k, d, c, ni, nt);
    ra__bf_store_sums(s, c, ni, nt);
    if (n < pieces) ra__bf_last_pieces(strip, j - ni, n, pieces, modified);
}

/* Products and pieces of all keys of a strip. PERF: 2^x is a long chain, which leaves the
 * multipliers idle unless products run beside it. Pieces at the end of each tile, from registers ->
 * beside the products of the next tile: 81 -> 82.5 % of the peak at D 64, 85 -> 86.5 % at D 128
 * (Zen 5, 4096 tokens). Modifying scores in a pass over the block -> in the pieces, relative to
 * unmodified scores: ALiBi 0.90 -> 0.95, bias per key 0.56 -> 0.97, full bias 0.41 -> 0.71 (D 128,
 * 2048 tokens). */
RA__BF_INLINE void ra__bf_score_tiles(const ra__bf_strip *strip, const int32_t ni, const int32_t nt,
                                      const int32_t modified) {
    int32_t j = strip->first, pieces = 0;
    for (; j < strip->last; j += ni) {
        ra__bf_score_tile(strip, j, pieces, ni, nt, modified);
        pieces = strip->slot_mask == 63 ? 0 : ni / 2 * nt;
        ra__prefetch_some(strip->panel->prefetch);
    }
    ra__bf_last_pieces(strip, j - ni, 0, pieces, modified);
}

/* store: writes all scores to strip->scores. Otherwise makes p and l of them, and keeps only the
 * last tiles. */
RA__NOINLINE RA__BF_TARGET void ra__bf_scores(ra__bf_strip *strip, int32_t store) {
    const int32_t modified = !store && ra__score_is_modified(&strip->panel->score);
    strip->slot_mask = store ? 63 : 15;
    if (strip->vectors == 4 && modified) ra__bf_score_tiles(strip, 4, 4, 1);
    else if (strip->vectors == 4) ra__bf_score_tiles(strip, 4, 4, 0);
    else if (strip->vectors == 2) ra__bf_score_tiles(strip, 8, 2, modified);
    else ra__bf_score_tiles(strip, 8, 1, modified);
}

/* Modifies and masks the stored scores of vector t, and finds their maximum. */
RA__BF_STATIC void ra__bf_finish_scores(ra__bf_strip *strip, int32_t t) {
    const int32_t row = strip->row + 16 * t, modified = ra__score_is_modified(&strip->panel->score);
    __m512 top = _mm512_set1_ps(ra__neg_inf());
    for (int32_t j = strip->first; j < strip->last; j++) {
        __m512 x = _mm512_loadu_ps(strip->scores + j * 64 + row);
        if (modified) x = ra__bf_modify(strip, &strip->panel->score, j, row, x);
        if (strip->masked)
            x = _mm512_mask_blend_ps(ra__bf_lanes_seeing(strip, j, t),
                                     _mm512_set1_ps(ra__neg_inf()), x);
        top = _mm512_max_ps(x, top);
        _mm512_storeu_ps(strip->scores + j * 64 + row, x);
    }
    _mm512_storeu_ps(strip->block_max + row, top);
}

/* Sets m of vector t. A row without m gets the block's maximum. A row in `over`, whose l exceeds
 * the limit, gets at least so much more that its old l becomes about 1, and its sums are
 * rescaled. */
RA__BF_STATIC void ra__bf_raise_max(ra__bf_strip *strip, int32_t t, __mmask16 over) {
    const int32_t row = strip->row + 16 * t;
    float *acc = strip->panel->acc + row;
    const __m512 m = _mm512_loadu_ps(strip->panel->m + row);
    __m512 l = _mm512_loadu_ps(strip->old_l + row);
    const __m512 top =
        _mm512_mul_ps(_mm512_loadu_ps(strip->block_max + row), _mm512_set1_ps(strip->factor));
    const __mmask16 fresh = _mm512_mask_cmpeq_ps_mask(
        _mm512_cmpeq_ps_mask(m, _mm512_set1_ps(ra__neg_inf())), l, _mm512_setzero_ps());
    __m512 more = _mm512_max_ps(top, _mm512_add_ps(m, _mm512_getexp_ps(l)));
    more = _mm512_mask_blend_ps(fresh, _mm512_mask_blend_ps(over, m, more), top);
    _mm512_storeu_ps(strip->panel->m + row, more);
    _mm512_storeu_ps(strip->shift + row, ra__shift_of_avx512(more));
    if (over) {
        const __m512 alpha = ra__exp2_avx512(_mm512_sub_ps(m, more));
        l = _mm512_mask_mul_ps(l, over, l, alpha);
        for (int32_t d = 0; d < strip->v_dim; d++, acc += 64) {
            const __m512 sum = _mm512_loadu_ps(acc);
            _mm512_storeu_ps(acc, _mm512_mask_mul_ps(sum, over, sum, alpha));
        }
    }
    _mm512_storeu_ps(strip->panel->l + row, l);
}

/* The lanes of vector t that are rows of the panel. */
RA__BF_INLINE __mmask16 ra__bf_live_lanes(const ra__bf_strip *strip, int32_t t) {
    return (__mmask16)ra__bf_first_lanes(strip->panel->rows - strip->row - 16 * t, 16);
}

/* Saves l and sets shift. Returns 1 if some row has no maximum yet. */
RA__BF_INLINE int32_t ra__bf_lacks_max(ra__bf_strip *strip) {
    int32_t fresh = 0;
    for (int32_t t = 0; t < strip->vectors; t++) {
        const int32_t row = strip->row + 16 * t;
        const __m512 m = _mm512_loadu_ps(strip->panel->m + row);
        const __m512 l = _mm512_loadu_ps(strip->panel->l + row);
        _mm512_storeu_ps(strip->old_l + row, l);
        _mm512_storeu_ps(strip->shift + row, ra__shift_of_avx512(m));
        fresh |= _mm512_mask_cmpeq_ps_mask(_mm512_mask_cmpeq_ps_mask(ra__bf_live_lanes(strip, t), m,
                                                                     _mm512_set1_ps(ra__neg_inf())),
                                           l, _mm512_setzero_ps());
    }
    return fresh;
}

/* Stores all scores of the block, modified and masked. */
RA__BF_STATIC void ra__bf_store_scores(ra__bf_strip *strip) {
    ra__bf_scores(strip, 1);
    for (int32_t t = 0; t < strip->vectors; t++) ra__bf_finish_scores(strip, t);
    if (ra__score_is_modified(&strip->panel->score)) strip->factor = 1.0f;
}

/* p, m and l from stored scores. Rows in `over` get a new maximum. */
RA__BF_STATIC void ra__bf_pieces_from_scores(ra__bf_strip *strip, const __mmask16 over[4]) {
    for (int32_t t = 0; t < strip->vectors; t++) {
        ra__bf_raise_max(strip, t, over[t]);
        for (int32_t j = strip->first; j < strip->last; j += 2) ra__bf_piece(strip, j, t, 0, 0);
    }
}

/* Finds rows whose l exceeds the limit. Returns 1 if there are any. */
RA__BF_INLINE int32_t ra__bf_past_limit(const ra__bf_strip *strip, __mmask16 over[4]) {
    const __m512 limit = _mm512_set1_ps(ra__l_limit);
    int32_t any = 0;
    for (int32_t t = 0; t < strip->vectors; t++) {
        over[t] = _mm512_mask_cmp_ps_mask(ra__bf_live_lanes(strip, t),
                                          _mm512_loadu_ps(strip->panel->l + strip->row + 16 * t),
                                          limit, _CMP_GT_OQ);
        any |= over[t];
    }
    return any;
}

/* p, m and l of the block. Scores are stored only where a maximum is needed: for rows without one,
 * under a softcap, and for rows whose l exceeds the limit. */
RA__BF_STATIC void ra__bf_softmax(ra__bf_strip *strip) {
    const int32_t kept = ra__bf_lacks_max(strip) || strip->panel->score.softcap != 0.0f;
    __mmask16 over[4] = {0, 0, 0, 0};
    strip->factor = strip->panel->factor;
    if (strip->panel->score.bias) ra__bf_load_bias(strip);
    if (kept) {
        ra__bf_store_scores(strip);
        ra__bf_pieces_from_scores(strip, over);
    } else {
        ra__bf_scores(strip, 0);
    }
    if (!ra__bf_past_limit(strip, over)) return;
    if (!kept) ra__bf_store_scores(strip);
    ra__bf_pieces_from_scores(strip, over);
}

/* The end of the pairs of keys that the product with V takes. */
RA__BF_INLINE int32_t ra__bf_pairs_end(const ra__bf_strip *strip) {
    return ((strip->last < strip->keys->n ? strip->last : strip->keys->n) + 1) / 2;
}

/* Adds V^T p to acc of ni dims from d on. masked: rows that see nothing keep their bits. */
RA__BF_INLINE void ra__bf_value_tile(const ra__bf_strip *strip, int32_t d, const int32_t ni,
                                     const int32_t nt, const int32_t masked) {
    const int64_t step = strip->keys->v_stride;
    const uint8_t *v = strip->keys->v + strip->first / 2 * step + 4 * d;
    float *acc = strip->panel->acc + d * 64 + strip->row;
    __m512 c[8][4];
    ra__bf_load_sums(c, acc, ni, nt);
    ra__bf_products(c, v, 4, step, strip->p_pairs + strip->first / 2 * 64 + strip->row,
                    ra__bf_pairs_end(strip) - strip->first / 2, ni, nt);
    if (!masked) {
        ra__bf_store_sums(acc, c, ni, nt);
        return;
    }
    RA__UNROLL for (int32_t t = 0; t < nt; t++) {
        const __mmask16 any = (__mmask16)(strip->seeing >> (strip->row + 16 * t));
        RA__UNROLL for (int32_t i = 0; i < ni; i++)
            _mm512_mask_storeu_ps(acc + i * 64 + t * 16, any, c[i][t]);
    }
}

RA__NOINLINE RA__BF_TARGET void ra__bf_values(const ra__bf_strip *strip) {
    const int32_t ni = strip->vectors == 4 ? 4 : 8;
    for (int32_t d = 0; d < strip->v_dim; d += ni) {
        if (strip->vectors == 4) ra__bf_value_tile(strip, d, 4, 4, 0);
        else if (strip->vectors == 2) ra__bf_value_tile(strip, d, 8, 2, 1);
        else ra__bf_value_tile(strip, d, 8, 1, 1);
        ra__prefetch_some(strip->panel->prefetch);
    }
}

/* As ra__bf_values, for V with NaN or infinities that not every row sees. It adds key by key in the
 * order of vdpbf16ps, and a row takes only the products of keys that it sees. V holds `side` pairs
 * of keys next to one another per dim. */
RA__BF_STATIC void ra__bf_values_dirty(const ra__bf_strip *strip, int32_t side) {
    const __m512i half = _mm512_set1_epi32((int32_t)0xffff0000u);
    for (int32_t d = 0; d < strip->v_dim; d++)
        for (int32_t t = 0; t < strip->vectors; t++) {
            float *acc = strip->panel->acc + d * 64 + strip->row + 16 * t;
            __m512 c = _mm512_loadu_ps(acc);
            for (int32_t j = strip->first / 2; j < ra__bf_pairs_end(strip); j++) {
                const uint8_t *at = strip->keys->v + j / side * strip->keys->v_stride;
                const __m512i v = ra__bf_broadcast(at + 4 * (side * d + j % side));
                const __m512i p = ra__bf_load(strip->p_pairs + j * 64 + strip->row + 16 * t);
                __m512 x = ra__bf_dot(c, p, _mm512_and_si512(v, half));
                c = _mm512_mask_blend_ps(ra__bf_lanes_seeing(strip, 2 * j + 1, t), c, x);
                x = ra__bf_dot(c, p, _mm512_andnot_si512(half, v));
                c = _mm512_mask_blend_ps(ra__bf_lanes_seeing(strip, 2 * j, t), c, x);
            }
            _mm512_storeu_ps(acc, c);
        }
}

/* Fills strip->seen. Keys beyond the last are seen by no row. */
RA__BF_STATIC void ra__bf_find_seen(ra__bf_strip *strip, int32_t partial) {
    const ra__rows *geo = strip->panel->geo;
    for (int32_t j = 0; j < 64; j++)
        strip->seen[j] = !partial && j < strip->keys->n ? ~(uint64_t)0 : 0;
    for (int32_t t = 0; t < 64 && partial; t += 16) {
        __m512i lo = ra__load_int_avx512(geo->lo + t), hi = ra__load_int_avx512(geo->hi + t);
        __m512i doc = ra__load_int_avx512(geo->keep_first + t),
                end = ra__load_int_avx512(geo->keep_end + t);
        for (int32_t j = 0; j < strip->keys->n; j++) {
            const int32_t pos = strip->keys->pos[j];
            const __mmask16 m =
                ra__any_of_avx512(ra__within_avx512(lo, hi, pos), ra__within_avx512(doc, end, pos));
            if (pos >= 0) strip->seen[j] |= (uint64_t)m << t;
        }
    }
}

/* Narrows [first, last) to the keys that the rows of the strip see, in groups of 8. Returns 0 if
 * there are none. */
RA__BF_STATIC int32_t ra__bf_narrow(ra__bf_strip *strip) {
    const uint64_t rows = (uint64_t)(strip->vectors == 1 ? 0xffffu : 0xffffffffu) << strip->row;
    strip->seeing = 0;
    strip->first = 64;
    strip->last = 0;
    for (int32_t j = 0; j < 64; j++) {
        if (!(strip->seen[j] & rows)) continue;
        strip->seeing |= strip->seen[j];
        if (strip->first > j) strip->first = j / 8 * 8;
        strip->last = j / 8 * 8 + 8;
    }
    return strip->last > 0;
}

/* Folds one block. If all rows see all keys, they form one strip. Otherwise there are strips of 32
 * rows, each with the keys that it sees, and a last one of 16: of a block on the diagonal three
 * quarters are computed. */
RA__BF_STATIC void ra__bf_fold_block(ra__bf_strip *strip, int32_t partial) {
    strip->row = 0;
    strip->masked = partial || strip->panel->rows <= 32 || strip->keys->n % 4;
    if (!strip->masked) {
        strip->vectors = 4;
        strip->first = 0;
        strip->last = strip->keys->n;
        ra__bf_softmax(strip);
        ra__bf_values(strip);
        return;
    }
    ra__bf_find_seen(strip, partial);
    for (; strip->row < strip->panel->rows; strip->row += 32) {
        strip->vectors = strip->panel->rows - strip->row > 16 ? 2 : 1;
        if (!ra__bf_narrow(strip)) continue;
        ra__bf_softmax(strip);
        if (partial && !strip->keys->v_clean) ra__bf_values_dirty(strip, 1);
        else ra__bf_values(strip);
    }
}

RA__BF_STATIC void ra__fold_bf16(const ra__panel *panel, const ra__keys *keys, const int8_t *kind,
                                 int32_t count, const ra_desc *d, float *s) {
    ra__bf_strip strip;
    strip.panel = panel;
    strip.k_dim = d->k_dim;
    strip.v_dim = d->v_dim;
    strip.scores = s;
    strip.p_pairs = s + 64 * 64;
    strip.bias = strip.p_pairs + 32 * 64;
    for (int32_t i = 0; i < count; i++) {
        if (kind[i] == RA__EMPTY) continue;
        strip.keys = keys + i;
        ra__bf_fold_block(&strip, kind[i] == RA__PARTIAL);
    }
}

/* Packs Q as pairs of dims. Missing rows are zero, and so are dims up to a multiple of 32. PERF:
 * prefetching all rows first: 64.3 -> 65.4 % of the peak at D 64, 71.5 -> 73 % at D 128 (Zen 5,
 * causal, 1024 tokens). */
RA__BF_STATIC void ra__load_q_bf16(const ra__panel *panel, const void *src, int64_t stride,
                                   int32_t dtype, int32_t dim) {
    const uint8_t *from = (const uint8_t *)src;
    __m512 r[16];
    (void)dtype;
    for (int32_t row = 0; row < panel->rows; row++)
        ra__prefetch((uintptr_t)(from + row * stride), 2 * dim);
    for (int32_t row = 0; row < RA_BLOCK_TOKENS; row += 16)
        for (int32_t d = 0; d < dim; d += 32) {
            const uint32_t first = ra__bf_first_lanes(dim - d, 32);
            const uint8_t *at = from + row * stride + 2 * d;
            RA__UNROLL for (int32_t i = 0; i < 16; i++)
                r[i] = _mm512_castsi512_ps(
                    _mm512_maskz_loadu_epi16(row + i < panel->rows ? first : 0, at + i * stride));
            ra__transpose_avx512(r);
            RA__UNROLL for (int32_t i = 0; i < 16; i++)
                _mm512_storeu_ps(panel->q + (d / 2 + i) * 64 + row, r[i]);
        }
}

/* Dims up to a multiple of 32 are zero. */
RA__BF_STATIC void ra__load_acc_bf16(const ra__panel *panel, const float *src, int64_t stride,
                                     int32_t dim) {
    const int64_t more = ra__round_up(dim, 32) - dim;
    ra__load_acc_avx512(panel, src, stride, dim);
    memset(panel->acc + dim * 64, 0, 64 * (size_t)more * sizeof *panel->acc);
}

RA__BF_STATIC void ra__sizes_bf16(ra__bytes *out, const ra_desc *d, int32_t shared) {
    const int64_t lane = RA_BLOCK_TOKENS * (int64_t)sizeof(float);
    out->q = lane / 2 * ra__round_up(d->k_dim, 32);
    out->acc = lane * ra__round_up(d->v_dim, 32);
    out->s = lane * (64 + 32 + (d->scores & RA_SCORE_BIAS ? 64 : 0));
    out->batch = 1;
    out->k = shared ? lane / 2 * d->k_dim : 0;
    out->v = lane / 2 * ra__round_up(d->v_dim, 16);
}

/* Pairs of two rows, of which `rows` exist: the elements in m, zeros elsewhere. Sets bits of bad
 * for NaN and infinities. */
RA__BF_INLINE __m512i ra__bf_pair_rows(const uint8_t *from, int64_t stride, int32_t rows,
                                       __mmask16 m, uint32_t *bad) {
    const __m256i e = _mm256_set1_epi16(0x7f80);
    __m256i a = _mm256_setzero_si256(), b = a;
    if (rows > 0) a = _mm256_maskz_loadu_epi16(m, from);
    if (rows > 1) b = _mm256_maskz_loadu_epi16(m, from + stride);
    *bad |= _mm256_cmpeq_epi16_mask(_mm256_and_si256(a, e), e);
    *bad |= _mm256_cmpeq_epi16_mask(_mm256_and_si256(b, e), e);
    return _mm512_or_si512(_mm512_cvtepu16_epi32(a),
                           _mm512_slli_epi32(_mm512_cvtepu16_epi32(b), 16));
}

/* Packs rows as pairs of keys [n / 2][dim rounded up to 16]. Returns 0 if there is a NaN or an
 * infinity: `top` is the largest magnitude as an integer. PERF: 32 dims at a time, not 16: 65.4 ->
 * 66.2 % of the peak at D 64, 73 -> 74 % at D 128 (Zen 5, causal, 1024 tokens). */
RA__BF_STATIC int32_t ra__bf_pack_v(uint8_t *to, const uint8_t *from, int64_t stride, int32_t n,
                                    int32_t dim) {
    const __m512i index = _mm512_add_epi32(
        _mm512_mullo_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                           _mm512_set1_epi32(0x00010001)), _mm512_set1_epi32(0x00200000));
    const __m512i next = _mm512_add_epi16(index, _mm512_set1_epi16(16));
    const __m512i size = _mm512_set1_epi16(0x7fff);
    const int64_t row = 4 * ra__round_up(dim, 16);
    __m512i top = _mm512_setzero_si512();
    for (int32_t j = 0; j < n; j += 2, to += row)
        for (int32_t d = 0; d < dim; d += 32) {
            const uint32_t m = ra__bf_first_lanes(dim - d, 32);
            const uint8_t *v = from + j * stride + 2 * d;
            const __m512i a = _mm512_maskz_loadu_epi16(m, v);
            const __m512i b = _mm512_maskz_loadu_epi16(j + 1 < n ? m : 0, v + stride);
            top = _mm512_max_epu16(top, _mm512_and_si512(a, size));
            top = _mm512_max_epu16(top, _mm512_and_si512(b, size));
            _mm512_storeu_si512(to + 4 * d, _mm512_permutex2var_epi16(a, index, b));
            if (dim - d <= 16) continue;
            _mm512_storeu_si512(to + 4 * d + 64, _mm512_permutex2var_epi16(a, next, b));
        }
    return !_mm512_cmpge_epu16_mask(top, _mm512_set1_epi16(0x7f80));
}

/* Copies rows that several panels will read, so that they have no gaps. unit 1: rows without gaps
 * stay where they are. Tiles need unit 32: dims are zero up to a multiple of it, and rows up to
 * 64. */
RA__BF_STATIC void ra__bf_copy(uint8_t *to, const uint8_t **from, int64_t *stride, int32_t rows,
                               int32_t dim, int32_t unit) {
    const int64_t row = 2 * ra__round_up(dim, unit);
    if (unit > 1) memset(to, 0, 64 * (size_t)row);
    else if (*stride == row) return;
    for (int32_t j = 0; j < rows; j++) memcpy(to + j * row, *from + j * *stride, 2 * (size_t)dim);
    *from = to;
    *stride = row;
}

/* Finds V in K if it is part of K. */
RA__BF_INLINE void ra__bf_find_v_in_k(ra__keys *keys, const ra_desc *d) {
    if (!d->v_in_k) return;
    keys->v = keys->k + 2 * (int64_t)d->v_column;
    keys->v_stride = keys->k_stride;
}

RA__BF_STATIC void ra__prepare_bf16(ra__keys *keys, const ra_desc *d, const ra__key_scratch *store,
                                    int32_t partial) {
    (void)partial;
    ra__bf_find_v_in_k(keys, d);
    keys->v_clean = ra__bf_pack_v(store->v, keys->v, keys->v_stride, keys->n, d->v_dim);
    keys->v = store->v;
    keys->v_stride = 4 * ra__round_up(d->v_dim, 16);
    if (store->shared) ra__bf_copy(store->k, &keys->k, &keys->k_stride, keys->n, d->k_dim, 1);
}

/* ---- decoding
 * Scores. A lane is one of 4 rows and one of 4 pairs of dims: q is [Dk / 8][4 rows][8 dims], and 8
 * dims of K are broadcast. If up to 16 rows share the keys, a lane is a row: `wide` is [Dk / 2][16
 * rows][2 dims], and a pair of K is broadcast, as for panels. Both add the same numbers in the same
 * order, so their bits are the same.
 *
 * Values. Lanes are dims, as in KERNEL. Keys come in groups of 8: key j is paired with key j + 4,
 * so that two vectors of scores [4 keys][4 rows] become the pairs of p. The unpack instructions
 * leave dims of the two vectors of a chunk in alternate groups of 4; ra__decode_store_bf16 puts
 * them in order. */
enum { RA__BF_DECODE_UNIT = 8 };       /* dims per step; keys per group with one maximum */

/* The 8 dims of a step, once per row. */
RA__BF_INLINE __m512i ra__bf_decode_spread(const uint8_t *k) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)(const void *)k));
}

/* c[i] = products of key j + i for i < 8, not yet summed over the pairs of dims of a row. Keys
 * beyond the last repeat it. Each key has two chains of sums. */
RA__BF_INLINE void ra__bf_decode_dots(const ra__decode_rows *rows, const ra__decode_keys *keys,
                                      int32_t j, __m512 *c) {
    const int32_t dim = rows->d->k_dim, last = keys->n - 1;
    const int32_t step = RA__BF_DECODE_UNIT;
    const float *q = rows->q;
    const uint8_t *k[8];
    __m512 odd[8];
    int32_t d;
    RA__UNROLL for (int32_t i = 0; i < 8; i++) {
        k[i] = keys->k + (j + i < last ? j + i : last) * keys->k_stride;
        c[i] = odd[i] = _mm512_setzero_ps();
    }
    for (d = 0; dim - d >= 4 * step; d += 4 * step) {
        RA__UNROLL for (int32_t e = 0; e < 4; e++, q += 16) {
            const __m512i y = ra__bf_load(q);
            RA__UNROLL for (int32_t i = 0; i < 8; i++) {
                const __m512i z = ra__bf_decode_spread(k[i] + 2 * d + 2 * e * step);
                if (e % 2) odd[i] = ra__bf_dot(odd[i], y, z);
                else c[i] = ra__bf_dot(c[i], y, z);
            }
        }
        if (keys->streams) ra__stream_prefetch(keys->streams, step / 2);
    }
    for (; d < dim; d += step, q += 16)
        RA__UNROLL for (int32_t i = 0; i < 8; i++) {
            uint8_t rest[16] = {0};
            memcpy(rest, k[i] + 2 * d, 2 * (size_t)(dim - d < step ? dim - d : step));
            c[i] = ra__bf_dot(c[i], ra__bf_load(q), ra__bf_decode_spread(rest));
        }
    RA__UNROLL for (int32_t i = 0; i < 8; i++) c[i] = _mm512_add_ps(c[i], odd[i]);
}

/* Scores [key][4 rows]. */
RA__NOINLINE RA__BF_TARGET void ra__bf_decode_scores(const ra__decode_rows *rows,
                                                     const ra__decode_keys *keys, float *s) {
    const __m512i turn = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512 factor = _mm512_set1_ps(rows->factor);
    __m512 c[8];
    for (int32_t j = 0; j < keys->n; j += 8) {
        ra__bf_decode_dots(rows, keys, j, c);
        RA__UNROLL for (int32_t i = 0; i < 8; i += 4) {
            const __m512 y = _mm512_permutexvar_ps(turn, ra__sums_4_avx512(c + i));
            _mm512_storeu_ps(s + 4 * (j + i), _mm512_mul_ps(y, factor));
        }
    }
}

/* Modifies and masks the scores of n keys, a multiple of 8. */
RA__BF_INLINE void ra__bf_decode_modify(const ra__decode_rows *rows, const ra__decode_keys *keys,
                                        float *s, int32_t n) {
    const __m512 low = _mm512_set1_ps(ra__neg_inf());
    if (rows->modified) ra__decode_modify_avx512(rows, keys, s, 4 * keys->n);
    for (int32_t i = 0; i < 4 * n && (keys->partial || n > keys->n); i += 16)
        _mm512_storeu_ps(
            s + i, _mm512_mask_blend_ps((__mmask16)(keys->seen >> i), low, _mm512_loadu_ps(s + i)));
}

/* p of n keys, a multiple of 8, as pairs [n / 2][4 rows]; adds them to the partial sums of l. */
RA__BF_INLINE void ra__bf_decode_weights(ra__decode_rows *rows, const float *s, int32_t n,
                                         float *pairs) {
    const __m512 shift = ra__shift_of_avx512(_mm512_loadu_ps(rows->m));
    __m512 part = _mm512_loadu_ps(rows->block_l);
    for (int32_t i = 0; i < 4 * n; i += 32) {
        __m512 a = _mm512_sub_ps(_mm512_loadu_ps(s + i), shift);
        __m512 b = _mm512_sub_ps(_mm512_loadu_ps(s + i + 16), shift);
        _mm512_storeu_si512(pairs + i / 2, ra__bf_exp_pair(a, b, &part));
    }
    _mm512_storeu_ps(rows->block_l, part);
}

/* A mask of the halves of a pair, keys j and j + 4, that row r sees. */
RA__BF_INLINE __m512i ra__bf_decode_seen(const ra__decode_keys *keys, int32_t j, int32_t r) {
    const uint32_t low = keys->seen >> (4 * j + r) & 1 ? 0xffffu : 0;
    const uint32_t high = keys->seen >> (4 * j + 16 + r) & 1 ? 0xffff0000u : 0;
    return _mm512_set1_epi32((int32_t)(low | high));
}

/* Pairs of two keys for 32 dims. Elements not in m are zero. */
RA__BF_INLINE void ra__bf_decode_pair(__m512i *v, const uint8_t *a, const uint8_t *b,
                                      const uint32_t m) {
    const __m512i y = m == ~0u ? _mm512_loadu_si512(a) : _mm512_maskz_loadu_epi16(m, a);
    const __m512i z = m == ~0u ? _mm512_loadu_si512(b) : _mm512_maskz_loadu_epi16(m, b);
    v[0] = _mm512_unpacklo_epi16(y, z);
    v[1] = _mm512_unpackhi_epi16(y, z);
}

/* c += p times the pairs v of keys j and j + 4, in nc chunks of 32 dims. nc 2: all rows see
 * both. */
RA__BF_INLINE void ra__bf_decode_product(const ra__decode_keys *keys, __m512 *c, int32_t j,
                                         const __m512i *v, const float *p, const int32_t nc) {
    RA__UNROLL for (int32_t r = 0; r < 4; r++) {
        const __m512i y = ra__bf_broadcast((const uint8_t *)(p + r));
        RA__UNROLL for (int32_t t = 0; t < 2 * nc; t++) {
            const int32_t at = t / 2 * 8 + 2 * r + t % 2;
            __m512i z = v[t];
            if (nc == 1) z = _mm512_and_si512(z, ra__bf_decode_seen(keys, j, r));
            c[at] = ra__bf_dot(c[at], z, y);
        }
    }
    if (keys->streams) ra__stream_prefetch(keys->streams, nc);
}

/* Adds p V to the sums of nc chunks of 32 dims from d on. nc 2 needs whole groups of keys that all
 * rows see. row: 4, or 16 if the pairs are shared. */
RA__BF_INLINE void ra__bf_decode_value_tile(const ra__decode_rows *rows,
                                            const ra__decode_keys *keys, const float *pairs,
                                            int32_t d, const int32_t nc, int32_t row) {
    const int32_t dim = rows->d->v_dim, last = keys->n - 1;
    const uint32_t m = nc > 1 ? ~0u : ra__bf_first_lanes(dim - d, 32);
    const uint8_t *v0 = keys->v + 2 * (int64_t)d;
    float *to = rows->block_acc + 4 * d;
    __m512 c[16];
    RA__UNROLL for (int32_t i = 0; i < 8 * nc; i++)
        c[i] = rows->has_keys ? _mm512_loadu_ps(to + i * 16) : _mm512_setzero_ps();
    for (int32_t j = 0; j < keys->n; j += 8)
        for (int32_t i = j; i < j + 4; i++, pairs += row) {
            const uint8_t *a = v0 + (nc > 1 || i < last ? i : last) * keys->v_stride;
            const uint8_t *b = v0 + (nc > 1 || i + 4 < last ? i + 4 : last) * keys->v_stride;
            __m512i v[4];
            RA__UNROLL for (int32_t t = 0; t < nc; t++)
                ra__bf_decode_pair(v + 2 * t, a + 64 * t, b + 64 * t, m);
            ra__bf_decode_product(keys, c, i, v, pairs, nc);
        }
    RA__UNROLL for (int32_t i = 0; i < 8 * nc; i++) _mm512_storeu_ps(to + i * 16, c[i]);
}

RA__NOINLINE RA__BF_TARGET void ra__bf_decode_values(const ra__decode_rows *rows,
                                                     const ra__decode_keys *keys,
                                                     const float *pairs, int32_t row) {
    const int32_t dim = rows->d->v_dim, whole = !keys->partial && keys->n % RA__BF_DECODE_UNIT == 0;
    int32_t d = 0;
    for (; whole && dim - d >= 64; d += 64) ra__bf_decode_value_tile(rows, keys, pairs, d, 2, row);
    for (; d < dim; d += 32) ra__bf_decode_value_tile(rows, keys, pairs, d, 1, row);
}

/* Adds keys [j, j + n), whose scores are in s, to the sums. n is a multiple of 8. */
RA__BF_INLINE void ra__bf_decode_add(ra__decode_rows *rows, const ra__decode_keys *keys,
                                     const float *s, int32_t j, int32_t n) {
    float pairs[2 * RA__DECODE_KEYS];
    ra__decode_keys part = *keys;
    part.v += j * keys->v_stride;
    part.seen >>= 4 * j;
    part.n = keys->n - j < n ? keys->n - j : n;
    ra__bf_decode_weights(rows, s + 4 * j, n, pairs);
    ra__bf_decode_values(rows, &part, pairs, 4);
    for (int32_t r = 0; r < 4; r++)
        if (part.seen >> r & ra__seen_by_row_0) rows->has_keys |= 1 << r;
}

/* Folds keys into the sums of up to 4 rows. A group of keys whose scores exceed the limit gets a
 * new maximum, as in KERNEL. */
RA__BF_STATIC void ra__bf_decode_fold_keys(ra__decode_rows *rows, const ra__decode_keys *keys) {
    const int32_t n = (keys->n + RA__BF_DECODE_UNIT - 1) / RA__BF_DECODE_UNIT * RA__BF_DECODE_UNIT;
    float s[4 * RA__DECODE_KEYS];
    ra__bf_decode_scores(rows, keys, s);
    ra__bf_decode_modify(rows, keys, s, n);
    for (int32_t j = 0; j < n; j += RA__BF_DECODE_UNIT) {
        if (!ra__decode_max_holds_avx512(rows, s + 4 * j, 4 * (n - j))) {
            ra__decode_raise_avx512(rows, s + 4 * j, 4 * RA__BF_DECODE_UNIT);
            if (!ra__decode_max_holds_avx512(rows, s + 4 * j, 4 * (n - j))) {
                ra__bf_decode_add(rows, keys, s, j, RA__BF_DECODE_UNIT);
                continue;
            }
        }
        ra__bf_decode_add(rows, keys, s, j, n - j);
        return;
    }
}

/* Scores [key][16 rows] of keys j and j + 1, by the same chains and sums as in ra__bf_decode_dots:
 * each of the 4 pairs of 8 dims has two. */
RA__BF_INLINE void ra__bf_wide_dots(const ra__decode_rows *rows, const ra__decode_keys *keys,
                                    int32_t j, float *s) {
    const uint8_t *k[2];
    const float *q = rows->wide;
    __m512 c[2][8];
    RA__UNROLL for (int32_t i = 0; i < 2; i++) {
        k[i] = keys->k + (j + i) * keys->k_stride;
        RA__UNROLL for (int32_t e = 0; e < 8; e++) c[i][e] = _mm512_setzero_ps();
    }
    for (int32_t d = 0; d < rows->d->k_dim; d += 16) {
        RA__UNROLL for (int32_t e = 0; e < 8; e++, q += 16) {
            const __m512i y = ra__bf_load(q);
            RA__UNROLL for (int32_t i = 0; i < 2; i++)
                c[i][e] = ra__bf_dot(c[i][e], y, ra__bf_broadcast(k[i] + 2 * d + 4 * e));
        }
        if (keys->streams && d % 64 == 0) ra__stream_prefetch(keys->streams, 2);
    }
    RA__UNROLL for (int32_t i = 0; i < 2; i++) {
        const __m512 a = _mm512_add_ps(c[i][0], c[i][4]), b = _mm512_add_ps(c[i][1], c[i][5]);
        const __m512 y = _mm512_add_ps(c[i][2], c[i][6]), z = _mm512_add_ps(c[i][3], c[i][7]);
        const __m512 sum = _mm512_add_ps(_mm512_add_ps(a, y), _mm512_add_ps(b, z));
        _mm512_storeu_ps(s + 16 * (j + i), _mm512_mul_ps(sum, _mm512_set1_ps(rows->factor)));
    }
}

RA__NOINLINE RA__BF_TARGET void ra__bf_wide_scores(const ra__decode_rows *rows,
                                                   const ra__decode_keys *keys, float *s) {
    for (int32_t j = 0; j < keys->n; j += 2) ra__bf_wide_dots(rows, keys, j, s);
}

/* p of n groups of 4 rows as pairs [pair of keys][16 rows], and the partial sums of l. Returns 0,
 * and does nothing, if a score is too far above m. */
RA__BF_STATIC int32_t ra__bf_wide_softmax(ra__decode_rows *rows, const ra__decode_keys *keys,
                                          int32_t n, const float *s, float *pairs) {
    __m512 top = _mm512_set1_ps(ra__neg_inf()), shift, part;
    float m[16] = {0}, l[4][16] = {{0}};
    for (int32_t i = 0; i < n; i++) {
        memcpy(m + 4 * i, rows[i].m, 4 * sizeof *m);
        for (int32_t j = 0; j < 4; j++)
            memcpy(l[j] + 4 * i, rows[i].block_l + 4 * j, 4 * sizeof *m);
    }
    for (int32_t j = 0; j < keys->n; j++) top = _mm512_max_ps(_mm512_loadu_ps(s + 16 * j), top);
    shift = _mm512_loadu_ps(m);
    if (_mm512_cmp_ps_mask(_mm512_add_ps(shift, _mm512_set1_ps(ra__decode_slack)), top, _CMP_LT_OQ))
        return 0;
    shift = ra__shift_of_avx512(shift);
    for (int32_t j = 0; j < keys->n; j += j % 4 < 3 ? 1 : 5, pairs += 16) {
        const __m512 a = _mm512_sub_ps(_mm512_loadu_ps(s + 16 * j), shift);
        const __m512 b = _mm512_sub_ps(_mm512_loadu_ps(s + 16 * j + 64), shift);
        part = _mm512_loadu_ps(l[j % 4]);
        _mm512_storeu_si512(pairs, ra__bf_exp_pair(a, b, &part));
        _mm512_storeu_ps(l[j % 4], part);
    }
    for (int32_t i = 0; i < n; i++)
        for (int32_t j = 0; j < 4; j++)
            memcpy(rows[i].block_l + 4 * j, l[j] + 4 * i, 4 * sizeof *m);
    return 1;
}

/* 1 if all rows of n groups see all keys, in groups of 8, and no score is modified. */
RA__BF_INLINE int32_t ra__bf_may_be_wide(const ra__decode_rows *rows, const ra__decode_keys *keys,
                                         int32_t n) {
    int32_t wide = rows->wide && keys->n % RA__BF_DECODE_UNIT == 0 && rows->d->k_dim % 32 == 0;
    for (int32_t i = 0; i < n; i++) wide &= !keys[i].partial && !rows[i].modified;
    return wide;
}

RA__BF_STATIC void ra__decode_fold_bf16(ra__decode_rows *rows, const ra__decode_keys *keys,
                                        int32_t n) {
    float s[16 * RA__DECODE_KEYS], pairs[8 * RA__DECODE_KEYS];
    if (ra__bf_may_be_wide(rows, keys, n)) {
        ra__bf_wide_scores(rows, keys, s);
        if (ra__bf_wide_softmax(rows, keys, n, s, pairs)) {
            for (int32_t i = 0; i < n; i++) {
                ra__bf_decode_values(&rows[i], &keys[i], pairs + rows[i].lane, 16);
                rows[i].has_keys = 15;
            }
            return;
        }
    }
    for (int32_t i = 0; i < n; i++)
        if (keys[i].seen) ra__bf_decode_fold_keys(&rows[i], &keys[i]);
}

/* Loads a row of Q. It is not scaled: the factor is in `rows`. */
RA__BF_STATIC void ra__decode_load_bf16(const ra__decode_rows *rows, int32_t r, const void *src,
                                        float factor) {
    const int32_t dim = rows->d->k_dim;
    const uint8_t *from = (const uint8_t *)src;
    (void)factor;
    for (int32_t d = 0; d < dim; d += 8) {
        float *to = rows->q + 2 * d + 4 * r;
        memset(to, 0, 16);
        memcpy(to, from + 2 * d, 2 * (size_t)(dim - d < 8 ? dim - d : 8));
    }
    for (int32_t d = 0; rows->wide && d < dim; d += 2)
        memcpy(rows->wide + 8 * d + rows->lane + r, from + 2 * d, dim - d > 1 ? 4 : 2);
}

/* Puts the dims of a row in order and stores it. */
RA__BF_STATIC void ra__decode_store_bf16(const ra__decode_rows *rows, int32_t r, void *dst,
                                         float factor) {
    const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    for (int32_t d = 0; d < rows->d->v_dim; d += 32) {
        float *at = rows->acc + 4 * d + 32 * r;
        const __m512 a = _mm512_loadu_ps(at), b = _mm512_loadu_ps(at + 16);
        _mm512_storeu_ps(at, _mm512_permutex2var_ps(a, low, b));
        _mm512_storeu_ps(at + 16, _mm512_permutex2var_ps(a, high, b));
    }
    ra__decode_store_avx512(rows, r, dst, factor);
}

/* ---- backward
 * As in KERNEL, in pairs. S and dP are computed as scores are in forward. P and dS leave the
 * registers as rows of bf16 [keys][64 rows]. For dV and dK, pairs of their rows are broadcast and
 * multiplied by pairs of rows of dO and Q, [Dv or Dk / 64][32][64 columns]. dS is also stored as
 * pairs of keys [32][64 rows], for dQ^T. So nothing is transposed.
 *
 * Sums continue from block to block in one chain. Therefore dK and dV have the same bits however
 * many panels they take at a time; it is two. Modified scores go through f32 and the functions of
 * AVX-512. */
enum { RA__BF_SLOT = 2 * 64 * 64 };    /* numbers of P and dS of a block, which are adjacent */

/* One panel against one block of keys. dP is made of dO and V as S is of Q and K; dQ^T of packed K
 * and dS as O^T is of packed V and p. */
typedef struct ra__bf_back {
    const ra__back_job *job;
    ra__panel d_o;                     /* its q is dO */
    ra__keys k;                        /* its v is packed K */
    ra__keys v;                        /* its k is V */
    ra__bf_strip s;                    /* makes S and dQ; AMX: shift is the LSE */
    ra__bf_strip dp;                   /* makes dP; AMX: shift is delta * scale */
    uint16_t *p, *ds;                  /* [64 keys][64 rows] bf16 */
    float *ds_pairs;                   /* [32][64 rows] pairs of dS */
} ra__bf_back;

/* Starts a job. Its P and dS go to slot `slot` of `slots`. */
RA__BF_STATIC void ra__bf_back_begin(ra__bf_back *back, const ra__back_job *job, int32_t slot,
                                     int32_t slots) {
    back->job = job;
    back->p = (uint16_t *)(void *)job->form + slot * RA__BF_SLOT;
    back->ds = back->p + RA__BF_SLOT / 2;
    back->ds_pairs = job->form + slots * (RA__BF_SLOT / 2);
    back->d_o = job->panel->fwd;
    back->d_o.q = job->panel->g;
    back->v = back->k = *job->keys;
    back->v.k = job->keys->v;
    back->v.k_stride = job->keys->v_stride;
    back->k.v = (const uint8_t *)job->k_form;
    back->k.v_stride = 4 * ra__round_up(job->k_dim, 16);
    back->s.panel = &job->panel->fwd;
    back->s.keys = &back->k;
    back->s.k_dim = back->s.v_dim = job->k_dim;
    back->s.p_pairs = back->ds_pairs;
    back->s.vectors = 4;
    back->s.first = 0;
    back->s.last = job->keys->n;
    back->dp.panel = &back->d_o;
    back->dp.keys = &back->v;
    back->dp.k_dim = job->v_dim;
    back->s.row = back->dp.row = 0;
}

/* 1 if P and dS need more than products and a mask. */
RA__BF_INLINE int32_t ra__bf_back_is_general(const ra__back_job *job) {
    return ra__score_is_modified(&job->panel->fwd.score) || job->panel->d_bias;
}

/* 32 numbers as bf16: those of a, then those of b. */
RA__BF_INLINE __m512i ra__bf_of_f32(__m512 a, __m512 b) {
    return (__m512i)_mm512_cvtne2ps_pbh(b, a);
}

/* Stores dS of keys j and j + 1 and 32 query rows, as rows and as pairs of keys. */
RA__BF_INLINE void ra__bf_store_ds(const ra__bf_back *back, int32_t j, int32_t row,
                                   const __m512i r[2]) {
    static const uint16_t order[32] = { 0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39, 8,
                                        40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47 };
    const __m512i low = _mm512_loadu_si512(order);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    float *to = back->ds_pairs + j / 2 * 64 + row;
    _mm512_storeu_si512(back->ds + j * 64 + row, r[0]);
    _mm512_storeu_si512(back->ds + (j + 1) * 64 + row, r[1]);
    _mm512_storeu_si512(to, _mm512_permutex2var_epi16(r[0], low, r[1]));
    _mm512_storeu_si512(to + 16, _mm512_permutex2var_epi16(r[0], high, r[1]));
}

/* P of key j and the 32 rows from vector t on, from the scores in job->p, which P * scale
 * replaces. */
RA__BF_INLINE void ra__bf_back_p(const ra__bf_back *back, int32_t j, int32_t t,
                                 const int32_t masked) {
    const ra__panel *panel = &back->job->panel->fwd;
    const __m512 factor = _mm512_set1_ps(panel->factor), scale = _mm512_set1_ps(back->job->scale);
    float *at = back->job->p + j % 4 * 64 + 16 * t;
    __m512 w[2];
    RA__UNROLL for (int32_t i = 0; i < 2; i++) {
        __m512 lse = _mm512_loadu_ps(panel->m + 16 * (t + i));
        w[i] = ra__bf_exp(_mm512_fmsub_ps(_mm512_loadu_ps(at + 16 * i), factor, lse), 0.0f);
        if (masked) w[i] = _mm512_maskz_mov_ps(ra__bf_lanes_seeing(&back->s, j, t + i), w[i]);
        _mm512_storeu_ps(at + 16 * i, _mm512_mul_ps(w[i], scale));
    }
    _mm512_storeu_si512(back->p + j * 64 + 16 * t, ra__bf_of_f32(w[0], w[1]));
}

/* dS of keys j and j + 1 and the 32 rows from vector t on, from P * scale and dP of the tile. */
RA__BF_INLINE void ra__bf_back_ds(const ra__bf_back *back, int32_t j, int32_t t,
                                  const int32_t masked) {
    const int32_t at = j % 4 * 64 + 16 * t;
    __m512i r[2];
    RA__UNROLL for (int32_t i = 0; i < 2; i++) {
        __m512 y[2];
        RA__UNROLL for (int32_t e = 0; e < 2; e++) {
            y[e] = _mm512_mul_ps(_mm512_loadu_ps(back->job->p + at + i * 64 + e * 16),
                                 _mm512_loadu_ps(back->job->ds + at + i * 64 + e * 16));
            if (masked)
                y[e] = _mm512_maskz_mov_ps(ra__bf_lanes_seeing(&back->s, j + i, t + e), y[e]);
        }
        r[i] = ra__bf_of_f32(y[0], y[1]);
    }
    ra__bf_store_ds(back, j, 16 * t, r);
}

/* Piece n of a tile of 4 keys from j on. The tile has 8 pieces for P and 4 for dS. */
RA__BF_INLINE void ra__bf_back_piece(const ra__bf_back *back, int32_t j, int32_t n,
                                     const int32_t of_ds, const int32_t masked) {
    if (of_ds) ra__bf_back_ds(back, j + n / 2 * 2, n % 2 * 2, masked);
    else ra__bf_back_p(back, j + n / 2, n % 2 * 2, masked);
}

/* Pieces [n, pieces), with no products beside them. */
RA__NOINLINE RA__BF_TARGET void ra__bf_back_last_pieces(const ra__bf_back *back, int32_t j,
                                                        int32_t n, int32_t pieces, int32_t of_ds) {
    const int32_t masked = back->job->partial || back->job->keys->n % 4;
    for (; n < pieces; n++) ra__bf_back_piece(back, j, n, of_ds, masked);
}

/* Adds the products of 4 keys from j on to c and stores them in job->p (S) or job->ds (dP). Between
 * them run pieces: dS of the tile before during S, P of this tile during dP. */
RA__BF_INLINE void ra__bf_back_dots(const ra__bf_back *back, const ra__bf_strip *strip, int32_t j,
                                    __m512 (*c)[4], const int32_t of_ds, const int32_t masked) {
    const int32_t pieces = !of_ds ? 8 : j > 0 ? 4 : 0, tile = of_ds ? j - 4 : j;
    float *to = of_ds ? back->job->p : back->job->ds;
    const float *q = strip->panel->q;
    const uint8_t *k[8];
    int32_t d, n = 0;
    ra__bf_key_rows(strip, j, k, 4);
    for (d = 0; n < pieces && d + 8 <= strip->k_dim; d += 8, n++) {
        ra__bf_eight_dims(c, k, d, q, 4, 4);
        ra__bf_back_piece(back, tile, n, of_ds, masked);
    }
    ra__bf_dots_from(strip, k, d, c, 4, 4);
    if (n < pieces) ra__bf_back_last_pieces(back, tile, n, pieces, of_ds);
    ra__bf_store_sums(to, c, 4, 4);
}

/* P and dS of a block. masked: some rows do not see some keys. dP starts at -delta. */
RA__BF_INLINE void ra__bf_back_softmax(const ra__bf_back *back, const int32_t masked) {
    const ra__panel *panel = &back->job->panel->fwd;
    __m512 c[8][4];
    int32_t j;
    for (j = 0; j < back->job->keys->n; j += 4) {
        ra__bf_zero_sums(c, 4, 4);
        ra__bf_back_dots(back, &back->s, j, c, 1, masked);
        RA__UNROLL for (int32_t t = 0; t < 4; t++) {
            c[0][t] = _mm512_sub_ps(_mm512_setzero_ps(), _mm512_loadu_ps(panel->l + 16 * t));
            RA__UNROLL for (int32_t i = 1; i < 4; i++) c[i][t] = c[0][t];
        }
        ra__bf_back_dots(back, &back->dp, j, c, 0, masked);
        ra__prefetch_some(panel->prefetch);
    }
    ra__bf_back_last_pieces(back, j - 4, 0, 4, 1);
}

RA__NOINLINE RA__BF_TARGET void ra__bf_back_plain(const ra__bf_back *back) {
    if (back->job->partial || back->job->keys->n % 4) ra__bf_back_softmax(back, 1);
    else ra__bf_back_softmax(back, 0);
}

/* Dot products as f32 [keys][64 rows]. */
RA__BF_STATIC void ra__bf_store_products(const ra__bf_strip *strip, float *to) {
    const uint8_t *k[8];
    __m512 c[8][4];
    for (int32_t j = 0; j < strip->keys->n; j += 4) {
        ra__bf_key_rows(strip, j, k, 4);
        ra__bf_zero_sums(c, 4, 4);
        ra__bf_dots_from(strip, k, 0, c, 4, 4);
        ra__bf_store_sums(to + j * 64, c, 4, 4);
    }
}

/* 32 numbers of key j, from row `row` on, as bf16. Missing keys and rows are 0. */
RA__BF_INLINE __m512i ra__bf_back_row(const ra__back_job *job, const float *from, int32_t j,
                                      int32_t row) {
    const __m512 none = _mm512_setzero_ps();
    const int32_t rows = j < job->keys->n ? job->panel->fwd.rows : 0;
    from += j * 64 + row;
    return ra__bf_of_f32(row < rows ? _mm512_loadu_ps(from) : none,
                         row + 16 < rows ? _mm512_loadu_ps(from + 16) : none);
}

/* P and dS of modified scores, from the products in job->p and job->ds. */
RA__BF_STATIC void ra__bf_back_general(const ra__bf_back *back) {
    const ra__back_job *job = back->job;
    const __m512 factor = _mm512_set1_ps(job->panel->fwd.factor);
    __m512i r[2];
    for (int32_t j = 0; j < job->keys->n * 64; j += 16)
        _mm512_storeu_ps(job->p + j, _mm512_mul_ps(_mm512_loadu_ps(job->p + j), factor));
    for (int32_t row = 0; row < job->panel->fwd.rows; row += 16) ra__back_weights_avx512(job, row);
    ra__back_general_avx512(job);
    for (int32_t j = 0; j < 64; j += 2)
        for (int32_t row = 0; row < 64; row += 32) {
            _mm512_storeu_si512(back->p + j * 64 + row, ra__bf_back_row(job, job->p, j, row));
            _mm512_storeu_si512(back->p + (j + 1) * 64 + row,
                                ra__bf_back_row(job, job->p, j + 1, row));
            r[0] = ra__bf_back_row(job, job->ds, j, row);
            r[1] = ra__bf_back_row(job, job->ds, j + 1, row);
            ra__bf_store_ds(back, j, row, r);
        }
}

/* dK or dV of one block of keys: the sum over one or two panels of A^T B, where A is dS or P and B
 * is Q or dO. */
typedef struct ra__bf_key_grad {
    const ra__back_job *jobs;              /* [panels] */
    int32_t panels, dim;
    const uint16_t *a;                 /* [keys][64 rows]; RA__BF_SLOT further on for panel 1 */
    const float *row_pairs[2];         /* B of each panel, from ra__bf_pack_rows */
    float *to;                         /* [keys][dim] */
    int64_t stride;                    /* floats from row to row of `to` */
} ra__bf_key_grad;

/* The lanes of columns [d, d + 16) that exist. */
RA__BF_INLINE __mmask16 ra__bf_key_columns(const ra__bf_key_grad *grad, int32_t d) {
    return (__mmask16)ra__bf_first_lanes(grad->dim - d, 16);
}

/* Sums of key j, columns [d, d + 16); 0 where there are none. */
RA__BF_INLINE __m512 ra__bf_load_key_sums(const ra__bf_key_grad *grad, int32_t d, int32_t j,
                                          int32_t whole) {
    const float *to = grad->to + j * grad->stride + d;
    if (whole) return _mm512_loadu_ps(to);
    if (j >= grad->jobs->keys->n) return _mm512_setzero_ps();
    return _mm512_maskz_loadu_ps(ra__bf_key_columns(grad, d), to);
}

/* Adds to 4 keys from j on, 64 columns from d on. whole: all of them exist. */
RA__BF_INLINE void ra__bf_key_grad_tile(const ra__bf_key_grad *grad, int32_t d, int32_t j,
                                        const int32_t whole) {
    float *to = grad->to + j * grad->stride + d;
    __m512 c[4][4];
    RA__UNROLL for (int32_t i = 0; i < 4; i++) {
        ra__prefetch((uintptr_t)(to + (4 + i) * grad->stride), 256);
        RA__UNROLL for (int32_t t = 0; t < 4; t++)
            c[i][t] = ra__bf_load_key_sums(grad, d + 16 * t, j + i, whole);
    }
    for (int32_t e = 0; e < grad->panels; e++) {
        const uint8_t *a = (const uint8_t *)(grad->a + e * RA__BF_SLOT + j * 64);
        ra__prefetch((uintptr_t)(a + 4 * 128), 512);
        ra__bf_products(c, a, 128, 4, grad->row_pairs[e] + d * 32,
                        (grad->jobs[e].panel->fwd.rows + 1) / 2, 4, 4);
    }
    RA__UNROLL for (int32_t i = 0; i < 4; i++, to += grad->stride)
        RA__UNROLL for (int32_t t = 0; t < 4; t++) {
            if (whole) _mm512_storeu_ps(to + 16 * t, c[i][t]);
            else if (j + i < grad->jobs->keys->n)
                _mm512_mask_storeu_ps(to + 16 * t, ra__bf_key_columns(grad, d + 16 * t), c[i][t]);
        }
}

/* As ra__bf_add_key_grad, for one panel whose Q or dO has NaN or infinities in rows that do not see
 * every key. Of a pair of rows, the one that does not see the key counts as 0. */
RA__BF_STATIC void ra__bf_add_key_grad_dirty(const ra__bf_key_grad *grad) {
    const ra__panel *panel = &grad->jobs->panel->fwd;
    for (int32_t d = 0; d < grad->dim; d += 16)
        for (int32_t j = 0; j < grad->jobs->keys->n; j++) {
            float *to = grad->to + j * grad->stride + d;
            const int32_t pos = grad->jobs->keys->pos[j];
            __m512 c = _mm512_maskz_loadu_ps(ra__bf_key_columns(grad, d), to);
            for (int32_t r = 0; r < panel->rows; r += 2) {
                const uint32_t low = ra__row_sees(panel->geo, r, pos) ? 0xffffu : 0;
                const uint32_t high = ra__row_sees(panel->geo, r + 1, pos) ? 0xffff0000u : 0;
                const __m512i seen = _mm512_set1_epi32((int32_t)(low | high));
                __m512i z = ra__bf_broadcast((const uint8_t *)(grad->a + j * 64 + r));
                __m512i y =
                    ra__bf_load(grad->row_pairs[0] + d / 64 * 64 * 32 + r / 2 * 64 + d % 64);
                c = ra__bf_dot(c, _mm512_and_si512(y, seen), _mm512_and_si512(z, seen));
            }
            _mm512_mask_storeu_ps(to, ra__bf_key_columns(grad, d), c);
        }
}

RA__BF_INLINE int32_t ra__bf_is_dirty(const ra__back_job *job) {
    return job->partial && !job->panel->clean;
}

RA__BF_STATIC void ra__bf_add_key_grad(void *amx, const ra__bf_key_grad *grad) {
    int32_t n = grad->jobs->keys->n;
    (void)amx;
    if (ra__bf_is_dirty(grad->jobs)) {
        ra__bf_add_key_grad_dirty(grad);
        return;
    }
    for (int32_t d = 0; d < grad->dim; d += 64)
        for (int32_t j = 0; j < n; j += 4) {
            if (grad->dim - d >= 64 && n - j >= 4) ra__bf_key_grad_tile(grad, d, j, 1);
            else ra__bf_key_grad_tile(grad, d, j, 0);
        }
}

/* 1 if two jobs must be added one after the other, because some sum would otherwise take its terms
 * in another order. */
RA__BF_INLINE int32_t ra__bf_one_by_one(const ra__back_job *job) {
    return job->v_in_k || ra__bf_is_dirty(job) || ra__bf_is_dirty(job + 1);
}

/* dV of n jobs, or dK if dk is 1. p is P of the first job. */
RA__BF_INLINE ra__bf_key_grad ra__bf_key_grad_of(const ra__back_job *jobs, int32_t n,
                                                 const uint16_t *p, int32_t dk) {
    ra__bf_key_grad grad;
    grad.jobs = jobs;
    grad.panels = n;
    grad.a = dk ? p + RA__BF_SLOT / 2 : p;
    for (int32_t e = 0; e < n; e++)
        grad.row_pairs[e] = dk ? jobs[e].panel->q_rows : jobs[e].panel->g_rows;
    grad.to = dk ? jobs->dk : jobs->dv;
    grad.stride = dk ? jobs->dk_stride : jobs->dv_stride;
    grad.dim = dk ? jobs->k_dim : jobs->v_dim;
    return grad;
}

/* dK and dV of n jobs, one or two, whose P and dS begin at p. add(state, grad) adds each of
 * them. */
RA__BF_STATIC void ra__bf_key_grads(const ra__back_job *jobs, int32_t n, const uint16_t *p,
                                    void (*add)(void *amx, const ra__bf_key_grad *grad),
                                    void *amx) {
    if (n == 2 && ra__bf_one_by_one(jobs)) {
        ra__bf_key_grads(jobs, 1, p, add, amx);
        ra__bf_key_grads(jobs + 1, 1, p + RA__BF_SLOT, add, amx);
        return;
    }
    for (int32_t dk = 0; dk < 2; dk++) {
        const ra__bf_key_grad grad = ra__bf_key_grad_of(jobs, n, p, dk);
        if (grad.to) add(amx, &grad);
    }
}

RA__BF_STATIC void ra__fold_back_bf16(const ra__back_job *jobs, int32_t count) {
    ra__bf_back back;
    for (int32_t i = 0; i < count; i++) {
        ra__bf_back_begin(&back, jobs + i, i % 2, 2);
        if (jobs[i].partial || jobs->keys->n % 4) ra__bf_find_seen(&back.s, jobs[i].partial);
        if (ra__bf_back_is_general(back.job)) {
            ra__bf_store_products(&back.s, back.job->p);
            ra__bf_store_products(&back.dp, back.job->ds);
            ra__bf_back_general(&back);
        } else {
            ra__bf_back_plain(&back);
        }
        if (jobs->want_q && jobs[i].partial && !jobs->k_clean) ra__bf_values_dirty(&back.s, 1);
        else if (jobs->want_q) ra__bf_values(&back.s);
        if (i % 2)
            ra__bf_key_grads(jobs + i - 1, 2, back.p - RA__BF_SLOT, ra__bf_add_key_grad, NULL);
        else if (i == count - 1) ra__bf_key_grads(jobs + i, 1, back.p, ra__bf_add_key_grad, NULL);
    }
}

/* Packs rows of bf16 as pairs of rows [dim / 64][32][64 columns], with zeros for what is missing.
 * Returns 0 if there is a NaN or an infinity. */
RA__BF_STATIC int32_t ra__bf_pack_rows(float *to, const ra__source *s, int32_t rows) {
    uint32_t bad = 0;
    for (int32_t d = 0; d < ra__round_up(s->dim, 64); d += 16)
        for (int32_t r = 0; r < 64; r += 2)
            _mm512_storeu_si512(
                to + d / 64 * 64 * 32 + r / 2 * 64 + d % 64,
                ra__bf_pair_rows(s->data + r * s->stride + 2 * d, s->stride, rows - r,
                                 (__mmask16)ra__bf_first_lanes(s->dim - d, 16), &bad));
    return !bad;
}

/* Packs Q and dO. dO of another dtype is rounded to bf16
 * in the half of g_rows that the pairs do not use. */
RA__BF_STATIC void ra__load_back_bf16(ra__back_panel *panel, const ra__source *q,
                                      const ra__source *g) {
    ra__panel g_panel = panel->fwd;
    ra__source bf = *g;
    g_panel.q = panel->g;
    if (g->dtype != RA_BF16) {
        bf.stride = 2 * (int64_t)g->dim;
        bf.data = (const uint8_t *)(panel->g_rows + 32 * ra__round_up(g->dim, 64));
        for (int32_t row = 0; row < panel->fwd.rows; row++)
            for (int32_t d = 0; d < g->dim; d += RA__DELTA_DIMS) {
                const int32_t n = g->dim - d < RA__DELTA_DIMS ? g->dim - d : RA__DELTA_DIMS;
                float line[RA__DELTA_DIMS];
                ra__read_row_avx512(line,
                                    g->data + row * g->stride + d * (g->dtype == RA_F32 ? 4 : 2),
                                    g->dtype, n);
                ra__write_row_avx512((uint8_t *)(uintptr_t)bf.data + row * bf.stride + 2 * d, line,
                                     RA_BF16, n);
            }
    }
    ra__load_q_bf16(&panel->fwd, q->data, q->stride, RA_BF16, q->dim);
    ra__load_q_bf16(&g_panel, bf.data, bf.stride, RA_BF16, g->dim);
    panel->clean = ra__bf_pack_rows(panel->q_rows, q, panel->fwd.rows);
    panel->clean &= ra__bf_pack_rows(panel->g_rows, &bf, panel->fwd.rows);
}

/* PERF: 16 rows at a time instead of single widened rows: all of backward 74 -> 77 % of the peak at
 * D 64, 75 -> 78 % at D 128 (Zen 5, 2048 tokens, 8 heads). */
RA__BF_STATIC void ra__deltas_bf16(float *delta, const ra__source *o, const ra__source *g,
                                   int32_t rows) {
    if (o->dtype != RA_BF16) {
        ra__deltas_avx512(delta, o, g, rows);
        return;
    }
    for (int32_t row = 0; row < rows; row += 16) {
        const int32_t n = rows - row < 16 ? rows - row : 16;
        __m512 sum[16];
        RA__UNROLL for (int32_t i = 0; i < 16; i++) sum[i] = _mm512_setzero_ps();
        for (int32_t d = 0; d < o->dim; d += 32) {
            const uint32_t m = ra__bf_first_lanes(o->dim - d, 32);
            RA__UNROLL for (int32_t i = 0; i < 16; i++) {
                const uint32_t some = i < n ? m : 0;
                __m512i x = _mm512_maskz_loadu_epi16(some,
                                                     o->data + (row + i) * o->stride + 2 * d);
                __m512i y = _mm512_maskz_loadu_epi16(some,
                                                     g->data + (row + i) * g->stride + 2 * d);
                sum[i] = ra__bf_dot(sum[i], x, y);
            }
        }
        ra__store_n_avx512(delta + row, ra__sums_avx512(sum), n);
    }
}

/* Sizes for pairs of keys of K, and for copies of K and V without gaps. */
RA__BF_STATIC void ra__sizes_back_bf16(ra__bytes *out, const ra_desc *d) {
    ra__sizes_avx512(out, d, 1);
    out->s = 4 * RA__BF_SLOT + 128 * 64;
    out->batch = d->k_dim + d->v_dim <= 160 ? 8 : 4; /* 48 KB each at D 64: they stay in L2 */
    out->k = 128 * (ra__round_up(d->k_dim, 16) + d->k_dim);
    out->v = d->v_in_k ? 0 : 128 * (int64_t)d->v_dim;
}

RA__BF_STATIC int32_t ra__prepare_back_bf16(ra__keys *keys, const ra_desc *d,
                                            const ra__key_scratch *store, int32_t partial) {
    const int32_t clean = ra__bf_pack_v(store->k, keys->k, keys->k_stride, keys->n, d->k_dim);
    (void)partial;
    ra__bf_copy(store->k + 128 * ra__round_up(d->k_dim, 16), &keys->k, &keys->k_stride, keys->n,
                d->k_dim, 1);
    if (d->v_in_k) ra__bf_find_v_in_k(keys, d);
    else ra__bf_copy(store->v, &keys->v, &keys->v_stride, keys->n, d->v_dim, 1);
    return clean;
}

static const ra__kernel ra__kernel_bf16 = {
    RA_ISA_AVX512_BF16, ra__sizes_bf16, ra__widen_avx512, ra__prepare_bf16, ra__load_q_bf16,
    ra__load_acc_bf16, ra__store_acc_avx512, ra__fold_bf16, ra__store_o_avx512,
    RA__BF_DECODE_UNIT,
    ra__decode_load_bf16, ra__decode_fold_bf16, ra__decode_close_avx512, ra__decode_store_bf16,
    ra__decode_merge_avx512,
    ra__sizes_back_bf16, ra__prepare_back_bf16, ra__load_back_bf16, ra__deltas_bf16,
    ra__fold_back_bf16, ra__put_grad_avx512};

/* ========================================================================== AMX
 * The same with tile registers of 16 rows of 64 bytes: C[16][16] f32 += A B, where A is 16 rows of
 * 32 bf16 and B is 16 rows of 16 pairs. q, p, acc and s are laid out as in AVX512 BF16, so that
 *   S^T: A = K as stored, 16 keys x 32 dims;   B = q, 16 pairs of dims x 16 query rows
 *   O^T: A = V^T, 16 dims x 32 keys, packed;   B = p, 16 pairs of keys x 16 query rows
 * and C is a part of s or acc with rows 256 bytes apart. Dk, Dv and keys are rounded up to 32.
 *
 * An item is 64 keys against 32 query rows. One stage mixes three items: the products K Q of item
 * i, the pieces of item i - 1 and the products V P of item i - 2. A few pieces follow each tile
 * product. Known facts about Granite Rapids:
 *   - A store of C directly after its last product stalls, so it comes among the first products of
 *     the next group.
 *   - K and V^T are loaded by TILELOADDT1; otherwise they push s, p and acc out of the L1 cache.
 *   - vdpbf16ps and vcvtne2ps2pbh beside tile products cost a third, so l is summed from p by masks
 *     and additions.
 *
 * All tiles go through six operations. With RA__AMX_SOFT these are vector code on an array, and
 * tests run this room on any machine with AVX512 BF16. Without it they are inline assembly, because
 * gcc 12's _tile_loadconfig drops the stores to its operand and needs literal tile numbers. */
#if defined(RA__AMX_SOFT)
#define RA__AMX_TARGET RA__BF_TARGET
#else
#define RA__AMX_TARGET                                                                           \
    RA__INSTRUCTIONS("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c,"              \
                     "amx-tile,amx-bf16")
#endif
#define RA__AMX_STATIC RA__UNUSED RA__AMX_TARGET static
#define RA__AMX_INLINE RA__INLINE RA__AMX_TARGET

/* The items of a stage, and the sums that tiles 0 to 3 still hold. */
typedef struct ra__amx_state {
    ra__bf_strip item[3];
    float *sums;                       /* where tiles 0 to 3 are to be stored; null: nowhere */
    int64_t sums_stride;               /* bytes from row to row there */
    const ra__bf_strip *p_item;        /* forward: the item whose p is made */
    const ra__bf_back *back;           /* backward: the block whose P and dS are made, */
    int32_t row;                       /* for rows [row, row + 32) */
    int32_t piece, pieces;             /* the next piece, and how many there are */
    int32_t per_product;               /* forward: pieces after each product; backward: products
                                        * per piece, */
    int32_t wait;                      /* of which so many have passed */
#if defined(RA__AMX_SOFT)
    uint8_t tile[8][1024];
#endif
} ra__amx_state;

#if defined(RA__AMX_SOFT)
RA__AMX_STATIC void ra__tile_begin(ra__amx_state *amx) {
    memset(amx->tile, 0, sizeof amx->tile);
}
RA__AMX_STATIC void ra__tile_end(void) {}
RA__AMX_STATIC void ra__tile_zero(ra__amx_state *amx, int32_t c) {
    memset(amx->tile[c], 0, 1024);
}
RA__AMX_STATIC void ra__tile_load(ra__amx_state *amx, int32_t i, const void *p, int64_t stride) {
    for (int32_t r = 0; r < 16; r++)
        memcpy(amx->tile[i] + 64 * r, (const uint8_t *)p + r * stride, 64);
}
RA__AMX_STATIC void ra__tile_stream(ra__amx_state *amx, int32_t i, const void *p,
                                    int64_t stride) {
    ra__tile_load(amx, i, p, stride);
}
RA__AMX_STATIC void ra__tile_store(ra__amx_state *amx, int32_t c, void *p, int64_t stride) {
    for (int32_t r = 0; r < 16; r++) memcpy((uint8_t *)p + r * stride, amx->tile[c] + 64 * r, 64);
}
/* tile[c] += tile[4 + c / 2] tile[6 + c % 2] */
RA__AMX_STATIC void ra__tile_dot(ra__amx_state *amx, int32_t c) {
    const __m512i high = _mm512_set1_epi32((int32_t)0xffff0000u);
    for (int32_t r = 0; r < 16; r++) {
        __m512 sum = _mm512_loadu_ps((const float *)(const void *)(amx->tile[c] + 64 * r));
        for (int32_t k = 0; k < 16; k++) {
            __m512i a = ra__bf_broadcast(amx->tile[4 + c / 2] + 64 * r + 4 * k);
            __m512i b = _mm512_loadu_si512(amx->tile[6 + c % 2] + 64 * k);
            sum = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(a, 16)),
                                  _mm512_castsi512_ps(_mm512_slli_epi32(b, 16)), sum);
            sum = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(a, high)),
                                  _mm512_castsi512_ps(_mm512_and_si512(b, high)), sum);
        }
        _mm512_storeu_ps((float *)(void *)(amx->tile[c] + 64 * r), sum);
    }
}
#else
/* Palette 1: eight tiles of 16 rows of 64 bytes. The tile state of the caller is lost, and
 * ra__tile_end leaves none behind. */
RA__AMX_INLINE void ra__tile_begin(ra__amx_state *amx) {
    struct { uint8_t palette, start, none[14]; uint16_t bytes[16]; uint8_t rows[16]; } c;
    (void)amx;
    memset(&c, 0, sizeof c);
    c.palette = 1;
    for (int32_t i = 0; i < 8; i++) {
        c.bytes[i] = 64;
        c.rows[i] = 16;
    }
    __asm__ volatile("ldtilecfg %0" : : "m"(c));
}
RA__AMX_INLINE void ra__tile_end(void) { __asm__ volatile("tilerelease"); }
RA__AMX_INLINE void ra__tile_zero(ra__amx_state *amx, int32_t c) {
    (void)amx;
    switch (c) {
    case 0: __asm__ volatile("tilezero %%tmm0" : :); break;
    case 1: __asm__ volatile("tilezero %%tmm1" : :); break;
    case 2: __asm__ volatile("tilezero %%tmm2" : :); break;
    default: __asm__ volatile("tilezero %%tmm3" : :); break;
    }
}
RA__AMX_INLINE void ra__tile_load(ra__amx_state *amx, int32_t i, const void *p, int64_t n) {
    (void)amx;
    switch (i) {
    case 0: __asm__ volatile("tileloadd (%0,%1), %%tmm0" : : "r"(p), "r"(n) : "memory"); break;
    case 1: __asm__ volatile("tileloadd (%0,%1), %%tmm1" : : "r"(p), "r"(n) : "memory"); break;
    case 2: __asm__ volatile("tileloadd (%0,%1), %%tmm2" : : "r"(p), "r"(n) : "memory"); break;
    case 3: __asm__ volatile("tileloadd (%0,%1), %%tmm3" : : "r"(p), "r"(n) : "memory"); break;
    case 4: __asm__ volatile("tileloadd (%0,%1), %%tmm4" : : "r"(p), "r"(n) : "memory"); break;
    case 5: __asm__ volatile("tileloadd (%0,%1), %%tmm5" : : "r"(p), "r"(n) : "memory"); break;
    case 6: __asm__ volatile("tileloadd (%0,%1), %%tmm6" : : "r"(p), "r"(n) : "memory"); break;
    default: __asm__ volatile("tileloadd (%0,%1), %%tmm7" : : "r"(p), "r"(n) : "memory"); break;
    }
}
/* Loads tile 4 or 5 without filling the L1 cache. */
RA__AMX_INLINE void ra__tile_stream(ra__amx_state *amx, int32_t i, const void *p, int64_t n) {
    (void)amx;
    if (i == 4) __asm__ volatile("tileloaddt1 (%0,%1), %%tmm4" : : "r"(p), "r"(n) : "memory");
    else __asm__ volatile("tileloaddt1 (%0,%1), %%tmm5" : : "r"(p), "r"(n) : "memory");
}
RA__AMX_INLINE void ra__tile_store(ra__amx_state *amx, int32_t c, void *p, int64_t n) {
    (void)amx;
    switch (c) {
    case 0: __asm__ volatile("tilestored %%tmm0, (%0,%1)" : : "r"(p), "r"(n) : "memory"); break;
    case 1: __asm__ volatile("tilestored %%tmm1, (%0,%1)" : : "r"(p), "r"(n) : "memory"); break;
    case 2: __asm__ volatile("tilestored %%tmm2, (%0,%1)" : : "r"(p), "r"(n) : "memory"); break;
    default: __asm__ volatile("tilestored %%tmm3, (%0,%1)" : : "r"(p), "r"(n) : "memory"); break;
    }
}
/* tile[c] += tile[4 + c / 2] tile[6 + c % 2] */
RA__AMX_INLINE void ra__tile_dot(ra__amx_state *amx, int32_t c) {
    (void)amx;
    switch (c) {
    case 0: __asm__ volatile("tdpbf16ps %%tmm6, %%tmm4, %%tmm0" : :); break;
    case 1: __asm__ volatile("tdpbf16ps %%tmm7, %%tmm4, %%tmm1" : :); break;
    case 2: __asm__ volatile("tdpbf16ps %%tmm6, %%tmm5, %%tmm2" : :); break;
    default: __asm__ volatile("tdpbf16ps %%tmm7, %%tmm5, %%tmm3" : :); break;
    }
}
#endif

/* A piece of backward: P and dS of two keys and 32 rows, from their products. They are rounded by
 * adding half a step, because conversions to bf16 are slow beside tile products. */
RA__NOINLINE RA__AMX_TARGET void ra__amx_back_piece(const ra__bf_back *back, int32_t row,
                                                    int32_t j) {
    static const uint16_t upper[32] = {
        1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
        33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63 };
    const __m512i order = _mm512_loadu_si512(upper), half = _mm512_set1_epi32(0x8000);
    const __m512 factor = _mm512_set1_ps(back->job->panel->fwd.factor);
    const __m512 scale = _mm512_set1_ps(back->job->scale);
    __m512i p[2], ds[2][2];
    RA__UNROLL for (int32_t i = 0; i < 2; i++) {
        RA__UNROLL for (int32_t t = 0; t < 2; t++) {
            const int32_t to = row + 16 * t, at = (j + i) * 64 + to;
            const __mmask16 m = (__mmask16)(back->s.seen[j + i] >> to);
            __m512 x = _mm512_fmsub_ps(_mm512_loadu_ps(back->job->p + at), factor,
                                       _mm512_loadu_ps(back->s.shift + to));
            __m512 y = _mm512_fmsub_ps(_mm512_loadu_ps(back->job->ds + at), scale,
                                       _mm512_loadu_ps(back->dp.shift + to));
            x = _mm512_maskz_mov_ps(m, ra__bf_exp(x, 0.0f));
            y = _mm512_maskz_mul_ps(m, x, y);
            p[t] = _mm512_add_epi32(_mm512_castps_si512(x), half);
            ds[i][t] = _mm512_add_epi32(_mm512_castps_si512(y), half);
        }
        _mm512_storeu_si512(back->p + (j + i) * 64 + row,
                            _mm512_permutex2var_epi16(p[0], order, p[1]));
        _mm512_storeu_si512(back->ds + (j + i) * 64 + row,
                            _mm512_permutex2var_epi16(ds[i][0], order, ds[i][1]));
    }
    RA__UNROLL for (int32_t t = 0; t < 2; t++)
        _mm512_storeu_si512(
            back->ds_pairs + j / 2 * 64 + row + 16 * t,
            _mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_srli_epi32(ds[0][t], 16), ds[1][t]));
}

/* The next n pieces of forward. */
RA__AMX_INLINE void ra__amx_some_pieces(ra__amx_state *amx, int32_t n) {
    for (; n > 0 && amx->piece < amx->pieces; n--, amx->piece++)
        ra__bf_piece(amx->p_item, amx->piece / 2 * 2, amx->piece % 2, 0, 0);
}

RA__AMX_INLINE void ra__amx_back_next_piece(ra__amx_state *amx) {
    if (amx->piece == amx->pieces || ++amx->wait < amx->per_product) return;
    ra__amx_back_piece(amx->back, amx->row, 2 * amx->piece++);
    amx->wait = 0;
}

/* Four tiles of sums c[32][32] over `runs` runs of n steps of 32. A step takes two tiles of A, one
 * below the other, and two tiles of B, side by side with rows 256 bytes apart. */
typedef struct ra__amx_group {
    const uint8_t *a, *b;
    int64_t a_stride, a_step, b_step;
    int64_t a_run, b_run;              /* from run to run */
    int32_t n, runs;
    float *c;
    int64_t c_stride;                  /* bytes */
} ra__amx_group;

/* The usual group: one run of n steps, each 16 rows of b further on; sums with rows of 64
 * floats. */
RA__AMX_INLINE ra__amx_group ra__amx_group_of(int64_t a_stride, int64_t a_step, const float *b,
                                              int32_t n) {
    ra__amx_group group;
    memset(&group, 0, sizeof group);
    group.a_stride = a_stride;
    group.a_step = a_step;
    group.b = (const uint8_t *)b;
    group.b_step = 16 * 256;
    group.n = n;
    group.runs = 1;
    group.c_stride = 256;
    return group;
}

RA__AMX_INLINE void *ra__amx_sums_at(float *c, int64_t stride, int32_t i) {
    return (uint8_t *)c + i / 2 * 16 * stride + i % 2 * 64;
}

/* Stores the sums of the group before from tile i, and loads those of this one, or zeros. */
RA__AMX_INLINE void ra__amx_swap_sums(ra__amx_state *amx, const ra__amx_group *group, int32_t i,
                                      const int32_t fresh) {
    if (amx->sums)
        ra__tile_store(amx, i, ra__amx_sums_at(amx->sums, amx->sums_stride, i), amx->sums_stride);
    if (fresh) ra__tile_zero(amx, i);
    else ra__tile_load(amx, i, ra__amx_sums_at(group->c, group->c_stride, i), group->c_stride);
}

enum { RA__AMX_FRESH = 1, RA__AMX_BACK = 2, RA__AMX_NEAR = 4 }; /* NEAR: A is in L1 */

/* Loads tile i of A, without filling the L1 cache unless A is there. */
RA__AMX_INLINE void ra__amx_load_a(ra__amx_state *amx, int32_t i, const uint8_t *a, int64_t stride,
                                   const int32_t form) {
    if (form & RA__AMX_NEAR) ra__tile_load(amx, i, a, stride);
    else ra__tile_stream(amx, i, a, stride);
}

RA__AMX_INLINE void ra__amx_multiply(ra__amx_state *amx, const ra__amx_group *group,
                                     const int32_t form) {
    const int64_t stride = group->a_stride;
    int32_t first = 1;
    for (int32_t run = 0; run < group->runs; run++) {
        const uint8_t *a = group->a + run * group->a_run, *b = group->b + run * group->b_run;
        for (int32_t k = 0; k < group->n; k++, a += group->a_step, b += group->b_step, first = 0) {
            ra__amx_load_a(amx, 4, a, stride, form);
            ra__tile_load(amx, 6, b, 256);
            RA__UNROLL for (int32_t i = 0; i < 4; i++) {
                if (i == 1) ra__tile_load(amx, 7, b + 64, 256);
                if (i == 2) ra__amx_load_a(amx, 5, a + 16 * stride, stride, form);
                if (first) ra__amx_swap_sums(amx, group, i, form & RA__AMX_FRESH);
                ra__tile_dot(amx, i);
                if (form & RA__AMX_BACK) ra__amx_back_next_piece(amx);
                else ra__amx_some_pieces(amx, amx->per_product);
            }
        }
    }
    amx->sums = group->c;
    amx->sums_stride = group->c_stride;
}

RA__AMX_INLINE void ra__amx_store_sums(ra__amx_state *amx) {
    if (!amx->sums) return;
    RA__UNROLL for (int32_t i = 0; i < 4; i++)
        ra__tile_store(amx, i, ra__amx_sums_at(amx->sums, amx->sums_stride, i), amx->sums_stride);
    amx->sums = NULL;
}

/* s = K Q^T of an item. */
RA__AMX_INLINE void ra__amx_scores(ra__amx_state *amx, const ra__bf_strip *strip,
                                   const int32_t form) {
    ra__amx_group group = ra__amx_group_of(strip->keys->k_stride, 64, strip->panel->q + strip->row,
                                           (strip->k_dim + 31) / 32);
    for (int32_t j = strip->first; j < strip->last; j += 32) {
        group.a = strip->keys->k + j * group.a_stride;
        group.c = strip->scores + j * 64 + strip->row;
        ra__amx_multiply(amx, &group, form | RA__AMX_FRESH);
        ra__prefetch_some(strip->panel->prefetch);
    }
}

/* acc += V^T p of an item. */
RA__AMX_INLINE void ra__amx_values(ra__amx_state *amx, const ra__bf_strip *strip,
                                   const int32_t form) {
    ra__amx_group group = ra__amx_group_of(64, strip->keys->v_stride,
                                           strip->p_pairs + strip->first / 2 * 64 + strip->row,
                                           (strip->last - strip->first) / 32);
    for (int32_t d = 0; d < strip->v_dim; d += 32) {
        group.a = strip->keys->v + strip->first / 32 * group.a_step + d * 64;
        group.c = strip->panel->acc + d * 64 + strip->row;
        ra__amx_multiply(amx, &group, form);
        ra__prefetch_some(strip->panel->prefetch);
    }
}

/* As ra__amx_values, for V with NaN or infinities that not every row sees. */
RA__AMX_STATIC void ra__amx_values_dirty(const ra__bf_strip *strip) {
    const __m512i high = _mm512_set1_epi32((int32_t)0xffff0000u);
    for (int32_t d = 0; d < strip->v_dim; d++)
        for (int32_t t = 0; t < 2; t++) {
            float *acc = strip->panel->acc + d * 64 + strip->row + 16 * t;
            __m512 c = _mm512_loadu_ps(acc);
            for (int32_t j = strip->first; j < strip->last; j++) {
                __m512i p = _mm512_loadu_si512(strip->p_pairs + j / 2 * 64 + strip->row + 16 * t);
                uint16_t v;
                memcpy(&v, strip->keys->v + j / 32 * strip->keys->v_stride + 64 * d + 2 * (j % 32),
                       sizeof v);
                p = j % 2 ? _mm512_and_si512(p, high) : _mm512_slli_epi32(p, 16);
                c = _mm512_mask3_fmadd_ps(_mm512_castsi512_ps(p),
                                          _mm512_set1_ps(ra__f32_of_bf16(v)), c,
                                          ra__bf_lanes_seeing(strip, j, t));
            }
            _mm512_storeu_ps(acc, c);
        }
}

/* Before the pieces of an item: modifies and masks its scores if needed, and gives rows without a
 * maximum one. */
RA__AMX_STATIC void ra__amx_prepare_p(ra__bf_strip *strip) {
    const int32_t modified = ra__score_is_modified(&strip->panel->score);
    const int32_t fresh = ra__bf_lacks_max(strip);
    strip->factor = modified ? 1.0f : strip->panel->factor;
    strip->slot_mask = 63;
    strip->finished = fresh || modified || strip->masked;
    if (strip->panel->score.bias) ra__bf_load_bias(strip);
    for (int32_t t = 0; t < 2 && strip->finished; t++) ra__bf_finish_scores(strip, t);
    for (int32_t t = 0; t < 2 && fresh; t++) ra__bf_raise_max(strip, t, 0);
}

/* After the pieces of an item: does it again for rows whose l exceeds the limit. */
RA__AMX_STATIC void ra__amx_redo_past_limit(ra__amx_state *amx, ra__bf_strip *strip) {
    __mmask16 over[4] = {0, 0, 0, 0};
    if (!ra__bf_past_limit(strip, over)) return;
    ra__amx_store_sums(amx);
    for (int32_t t = 0; t < 2 && !strip->finished; t++) ra__bf_finish_scores(strip, t);
    ra__bf_pieces_from_scores(strip, over);
}

/* One stage: the scores of one item, the pieces of another, the values of a third. Each may be
 * null. */
RA__AMX_STATIC void ra__amx_stage(ra__amx_state *amx, ra__bf_strip *s_item, ra__bf_strip *p_item,
                                  ra__bf_strip *v_item) {
    int32_t products = 0;
    const int32_t dirty = v_item && v_item->masked && !v_item->keys->v_clean;
    if (s_item) products += (s_item->last - s_item->first) / 8 * ((s_item->k_dim + 31) / 32);
    if (v_item && !dirty)
        products += (v_item->last - v_item->first) / 8 * ((v_item->v_dim + 31) / 32);
    if (p_item) ra__amx_prepare_p(p_item);
    amx->p_item = p_item;
    amx->piece = p_item ? p_item->first : 0;
    amx->pieces = p_item ? p_item->last : 0;
    amx->per_product = products ? (amx->pieces - amx->piece + products - 1) / products : 0;
    if (s_item) ra__amx_scores(amx, s_item, 0);
    if (v_item && !dirty) ra__amx_values(amx, v_item, 0);
    if (p_item) ra__amx_some_pieces(amx, 64);
    if (!v_item || dirty) ra__amx_store_sums(amx);
    if (dirty) ra__amx_values_dirty(v_item);
    if (p_item) ra__amx_redo_past_limit(amx, p_item);
}

/* The next item from (*block, *row) on. Returns 0 if there is none. */
RA__AMX_STATIC int32_t ra__amx_next_item(ra__bf_strip *strip, const ra__keys *keys,
                                         const int8_t *kind, int32_t count, int32_t *block,
                                         int32_t *row) {
    for (; *block < count; ++*block, *row = 0) {
        if (kind[*block] == RA__EMPTY) continue;
        strip->keys = keys + *block;
        strip->masked = kind[*block] == RA__PARTIAL || strip->keys->n % 32;
        strip->first = 0;
        strip->last = strip->keys->n;
        strip->vectors = 2;
        if (strip->masked && *row < strip->panel->rows)
            ra__bf_find_seen(strip, kind[*block] == RA__PARTIAL);
        for (; *row < strip->panel->rows; *row += 32) {
            strip->row = *row;
            if (strip->masked && !ra__bf_narrow(strip)) continue;
            *row += 32;
            strip->first = strip->first / 32 * 32;
            strip->last = (strip->last + 31) / 32 * 32;
            return 1;
        }
    }
    return 0;
}

RA__AMX_STATIC void ra__fold_amx(const ra__panel *panel, const ra__keys *keys, const int8_t *kind,
                                 int32_t count, const ra_desc *d, float *s) {
    ra__amx_state amx;
    ra__bf_strip *before[2] = {NULL, NULL};
    int32_t block = 0, row = 0;
    amx.sums = NULL;
    ra__tile_begin(&amx);
    for (int32_t i = 0; i == 0 || before[0] || before[1]; i++) {
        ra__bf_strip *strip = &amx.item[i % 3];
        strip->panel = panel;
        strip->k_dim = d->k_dim;
        strip->v_dim = d->v_dim;
        strip->scores = s + i % 2 * 64 * 64;
        strip->p_pairs = s + 2 * 64 * 64 + i % 2 * 32 * 64;
        strip->bias = s + 3 * 64 * 64;
        if (!ra__amx_next_item(strip, keys, kind, count, &block, &row)) strip = NULL;
        ra__amx_stage(&amx, strip, before[0], before[1]);
        before[1] = before[0];
        before[0] = strip;
    }
    ra__amx_store_sums(&amx);
    ra__tile_end();
}

RA__AMX_STATIC void ra__sizes_amx(ra__bytes *out, const ra_desc *d, int32_t shared) {
    const int64_t lane = RA_BLOCK_TOKENS * (int64_t)sizeof(float);
    out->q = lane / 2 * ra__round_up(d->k_dim, 32);
    out->acc = lane * ra__round_up(d->v_dim, 32);
    out->s = lane * (2 * (64 + 32) + (d->scores & RA_SCORE_BIAS ? 64 : 0));
    out->batch = shared ? RA__BATCH : 1;
    out->k = lane / 2 * ra__round_up(d->k_dim, 32);
    out->v = lane / 2 * ra__round_up(d->v_dim, 32);
}

/* Packs V^T as [2][dim rounded up to 32][32 keys], with zeros beyond the last key. Returns 0 if
 * there is a NaN or an infinity. */
RA__AMX_STATIC int32_t ra__amx_pack_v(uint8_t *to, const uint8_t *from, int64_t stride, int32_t n,
                                      int32_t dim) {
    uint32_t bad = 0;
    for (int32_t j = 0; j < 64; j += 32)
        for (int32_t d = 0; d < ra__round_up(dim, 32); d += 16, to += 16 * 64) {
            const __mmask16 m = (__mmask16)ra__bf_first_lanes(dim - d, 16);
            __m512 r[16];
            for (int32_t i = 0; i < 16; i++)
                r[i] = _mm512_castsi512_ps(ra__bf_pair_rows(
                    from + (j + 2 * i) * stride + 2 * d, stride, n - j - 2 * i, m, &bad));
            ra__transpose_avx512(r);
            for (int32_t i = 0; i < 16; i++) _mm512_storeu_ps(to + 64 * i, r[i]);
        }
    return !bad;
}

RA__AMX_STATIC void ra__prepare_amx(ra__keys *keys, const ra_desc *d, const ra__key_scratch *store,
                                    int32_t partial) {
    const int64_t row = 2 * ra__round_up(d->k_dim, 32);
    (void)partial;
    ra__bf_find_v_in_k(keys, d);
    keys->v_clean = ra__amx_pack_v(store->v, keys->v, keys->v_stride, keys->n, d->v_dim);
    keys->v = store->v;
    keys->v_stride = 64 * ra__round_up(d->v_dim, 32);
    if (d->k_dim % 32 || keys->n % 32 || (store->shared && keys->k_stride != row))
        ra__bf_copy(store->k, &keys->k, &keys->k_stride, keys->n, d->k_dim, 32);
}

/* ---- backward
 * The products of AVX512 BF16 in tiles:
 *   S^T, dP^T: A = K, V as stored, 16 keys x 32 dims;   B = q, g, 16 pairs of dims x 16 query rows
 *   dQ^T:      A = K^T, 16 dims x 32 keys, packed;      B = dS, 16 pairs of keys x 16 query rows
 *   dV, dK:    A = P, dS, 16 keys x 32 query rows;      B = dO, Q, 16 pairs of rows x 16 columns
 * An item is 32 rows of a panel against 64 keys. One stage mixes three items: the products for S
 * and dP of item i, P and dS of item i - 1, and dQ of item i - 2. dV and dK follow whenever two
 * panels are complete, because single panels would load and store the sums too often. */
typedef struct ra__amx_back_state {
    ra__amx_state amx;
    const ra__back_job *jobs;
    int32_t count;
    ra__bf_back under_way[2];          /* job i is in under_way[i % 2] */
} ra__amx_back_state;
enum { RA__AMX_SLOTS = 4 };            /* P and dS of two pairs of panels: one written, one read */

/* Replaces every NaN by one without a payload, because rounding could lose the payload. */
RA__AMX_INLINE __m512 ra__amx_plain_nan(__m512 x) {
    return _mm512_mask_mov_ps(x, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q),
                              _mm512_castsi512_ps(_mm512_set1_epi32(0x7fc00000)));
}

RA__AMX_STATIC void ra__amx_back_begin(ra__bf_back *back, const ra__back_job *job, int32_t i) {
    const __m512 scale = _mm512_set1_ps(job->scale);
    ra__bf_back_begin(back, job, i % RA__AMX_SLOTS, RA__AMX_SLOTS);
    ra__bf_find_seen(&back->s, job->partial);
    back->s.scores = job->p;
    back->dp.scores = job->ds;
    back->k.v_stride = 64 * ra__round_up(job->k_dim, 32);
    back->s.vectors = 2;
    back->dp.first = 0;
    back->s.last = back->dp.last = (job->keys->n + 31) / 32 * 32;
    for (int32_t row = 0; row < 64; row += 16) {
        __m512 delta = _mm512_mul_ps(scale, _mm512_loadu_ps(job->panel->fwd.l + row));
        _mm512_storeu_ps(back->s.shift + row,
                         ra__amx_plain_nan(_mm512_loadu_ps(job->panel->fwd.m + row)));
        _mm512_storeu_ps(back->dp.shift + row, ra__amx_plain_nan(delta));
    }
}

/* Copies up to 32 keys and columns of dK or dV to [32][32], or back if `back` is 1. */
RA__AMX_STATIC void ra__amx_copy_edge(const ra__bf_key_grad *grad, int32_t d, int32_t j, float *c,
                                      int32_t back) {
    for (int32_t i = 0; i < 32; i++)
        for (int32_t t = 0; t < 32; t += 16) {
            const __mmask16 m = j + i < grad->jobs->keys->n ? ra__bf_key_columns(grad, d + t) : 0;
            float *at = grad->to + (j + i) * grad->stride + d + t;
            if (back) _mm512_mask_storeu_ps(at, m, _mm512_loadu_ps(c + i * 32 + t));
            else _mm512_storeu_ps(c + i * 32 + t, _mm512_maskz_loadu_ps(m, at));
        }
}

/* As ra__bf_add_key_grad. */
RA__AMX_STATIC void ra__amx_add_key_grad(void *state, const ra__bf_key_grad *grad) {
    ra__amx_state *amx = (ra__amx_state *)state;
    float edge[32 * 32];
    ra__amx_group group = ra__amx_group_of(128, 64, NULL, 2);
    if (grad->jobs->v_in_k || ra__bf_is_dirty(grad->jobs)) ra__amx_store_sums(amx);
    if (ra__bf_is_dirty(grad->jobs)) {
        ra__bf_add_key_grad_dirty(grad);
        return;
    }
    group.a_run = 2 * RA__BF_SLOT;
    group.runs = grad->panels;
    if (grad->panels == 2)
        group.b_run = (const uint8_t *)grad->row_pairs[1] - (const uint8_t *)grad->row_pairs[0];
    for (int32_t d = 0; d < grad->dim; d += 32)
        for (int32_t j = 0; j < grad->jobs->keys->n; j += 32) {
            const int32_t whole = grad->dim - d >= 32 && grad->jobs->keys->n - j >= 32;
            group.a = (const uint8_t *)(grad->a + j * 64);
            group.b = (const uint8_t *)(grad->row_pairs[0] + d / 64 * 64 * 32 + d % 64);
            group.c = whole ? grad->to + j * grad->stride + d : edge;
            group.c_stride = whole ? grad->stride * 4 : 128;
            if (!whole) ra__amx_copy_edge(grad, d, j, edge, 0);
            ra__amx_multiply(amx, &group, RA__AMX_BACK | RA__AMX_NEAR);
            if (whole) continue;
            ra__amx_store_sums(amx);
            ra__amx_copy_edge(grad, d, j, edge, 1);
        }
}

/* The products that use item k: dQ, and dV and dK after the last item of two panels. */
RA__AMX_STATIC void ra__amx_back_consume(ra__amx_back_state *all, int32_t k) {
    const int32_t i = k / 2, n = i % 2 + 1;
    ra__bf_back *back = &all->under_way[i % 2];
    back->s.row = k % 2 * 32;
    if (back->job->want_q && back->job->partial && !back->job->k_clean) {
        ra__amx_store_sums(&all->amx);
        ra__bf_values_dirty(&back->s, 16);
    } else if (back->job->want_q) {
        ra__amx_values(&all->amx, &back->s, RA__AMX_BACK);
    }
    if (k % 2 && (n == 2 || i == all->count - 1))
        ra__bf_key_grads(all->jobs + i + 1 - n, n, back->p - (n - 1) * RA__BF_SLOT,
                         ra__amx_add_key_grad, &all->amx);
}

/* Spreads the pieces of item k over the products of S, dP and dQ of other items. */
RA__AMX_STATIC void ra__amx_back_plan_pieces(ra__amx_back_state *all, int32_t k) {
    const int64_t dims =
        2 * ra__round_up(all->jobs->k_dim, 32) + ra__round_up(all->jobs->v_dim, 32);
    ra__amx_state *amx = &all->amx;
    amx->back = &all->under_way[k / 2 % 2];
    amx->row = k % 2 * 32;
    amx->piece = amx->wait = 0;
    amx->pieces = amx->back->s.last / 2;
    amx->per_product = (int32_t)(dims / 128);   /* 64 keys: 2 dims / 8 products, 32 pieces */
    if (!ra__bf_back_is_general(amx->back->job)) return;
    amx->pieces = 0;
    if (k % 2) ra__bf_back_general(amx->back);
}

/* Stage k: S and dP of item k, the pieces of item k - 1, the products that use item k - 2. */
RA__AMX_STATIC void ra__amx_back_stage(ra__amx_back_state *all, int32_t k) {
    const int32_t items = 2 * all->count;
    ra__amx_state *amx = &all->amx;
    ra__bf_back *back = &all->under_way[k / 2 % 2];
    amx->piece = amx->pieces = 0;
    if (k < items && k % 2 == 0) ra__amx_back_begin(back, all->jobs + k / 2, k / 2);
    if (k > 0 && k <= items) ra__amx_back_plan_pieces(all, k - 1);
    if (k < items) {
        back->s.row = back->dp.row = k % 2 * 32;
        ra__amx_scores(amx, &back->s, RA__AMX_BACK);
        ra__amx_scores(amx, &back->dp, RA__AMX_BACK);
    }
    if (k > 1) ra__amx_back_consume(all, k - 2);
    if (k < 2 || !all->jobs->want_q) ra__amx_store_sums(amx);
    while (amx->piece < amx->pieces) ra__amx_back_piece(amx->back, amx->row, 2 * amx->piece++);
}

RA__AMX_STATIC void ra__fold_back_amx(const ra__back_job *jobs, int32_t count) {
    ra__amx_back_state all;
    all.jobs = jobs;
    all.count = count;
    all.amx.sums = NULL;
    ra__tile_begin(&all.amx);
    for (int32_t k = 0; k < 2 * count + 2; k++) ra__amx_back_stage(&all, k);
    ra__amx_store_sums(&all.amx);
    ra__tile_end();
}

/* Sizes for K^T, and for K and V padded for tiles. */
RA__AMX_STATIC void ra__sizes_back_amx(ra__bytes *out, const ra_desc *d) {
    ra__sizes_back_bf16(out, d);
    out->s = RA__AMX_SLOTS * 2 * RA__BF_SLOT + 128 * 64;
    out->k = 2 * 128 * ra__round_up(d->k_dim, 32);
    out->v = 128 * ra__round_up(d->v_dim, 32);
}

RA__AMX_STATIC int32_t ra__prepare_back_amx(ra__keys *keys, const ra_desc *d,
                                            const ra__key_scratch *store, int32_t partial) {
    const int32_t clean = ra__amx_pack_v(store->k, keys->k, keys->k_stride, keys->n, d->k_dim);
    (void)partial;
    ra__bf_find_v_in_k(keys, d);
    if (d->k_dim % 32 || keys->n % 32 || keys->k_stride % RA__ALIAS_BYTES == 0)
        ra__bf_copy(store->k + 128 * ra__round_up(d->k_dim, 32), &keys->k, &keys->k_stride, keys->n,
                    d->k_dim, 32);
    if (d->v_dim % 32 || keys->n % 32 || keys->v_stride % RA__ALIAS_BYTES == 0)
        ra__bf_copy(store->v, &keys->v, &keys->v_stride, keys->n, d->v_dim, 32);
    return clean;
}

static const ra__kernel ra__kernel_amx = {
    RA_ISA_AMX, ra__sizes_amx, ra__widen_avx512, ra__prepare_amx, ra__load_q_bf16,
    ra__load_acc_bf16, ra__store_acc_avx512, ra__fold_amx, ra__store_o_avx512,
    0, NULL, NULL, NULL, NULL, NULL,
    ra__sizes_back_amx, ra__prepare_back_amx, ra__load_back_bf16, ra__deltas_bf16,
    ra__fold_back_amx, ra__put_grad_avx512};

#undef RA__AMX_TARGET
#undef RA__AMX_STATIC
#undef RA__AMX_INLINE
#undef RA__BF_TARGET
#undef RA__BF_STATIC
#undef RA__BF_INLINE
RA__RANGES_END

#if !defined(__clang__)
#pragma GCC diagnostic pop
#endif
#endif /* RA__X86 */

#if RA__NEON
/* ========================================================================== NEON
 * Advanced SIMD of AArch64, which all such processors have: 32 registers of 4 lanes. Tiles have 5
 * keys and 16 rows; with 6 keys gcc 12 spills operands of 7 of 48 products. Little endian only. */
#define RA__NAME(name)         ra__##name##_neon
#define RA__ISA                RA_ISA_NEON
#define RA__ISA_STATIC         RA__UNUSED static
#define RA__ISA_INLINE         RA__INLINE
#define RA__FLOATS             float32x4_t
#define RA__INTS               int32x4_t
#define RA__MASK               uint32x4_t
#define RA__WIDTH              4
#define RA__VECTORS            4
#define RA__TILE_HEIGHT        5
#define RA__DECODE_TILE_KEYS   4
#define RA__DECODE_TILE_CHUNKS 2

RA__ISA_INLINE float32x4_t ra__set_neon(float x) { return vdupq_n_f32(x); }
RA__ISA_INLINE float32x4_t ra__load_neon(const float *p) { return vld1q_f32(p); }
RA__ISA_INLINE void ra__store_neon(float *p, float32x4_t v) { vst1q_f32(p, v); }
RA__ISA_INLINE int32x4_t ra__load_int_neon(const int32_t *p) { return vld1q_s32(p); }
RA__ISA_INLINE float32x4_t ra__load_n_neon(const float *p, int32_t n) {
    float32x4_t v = vdupq_n_f32(0.0f);
    memcpy(&v, p, (size_t)n * sizeof *p);
    return v;
}
RA__ISA_INLINE void ra__store_n_neon(float *p, float32x4_t v, int32_t n) {
    memcpy(p, &v, (size_t)n * sizeof *p);
}
RA__ISA_INLINE float32x4_t ra__hold_neon(float32x4_t v) { return v; } /* it is not loaded again */
RA__ISA_INLINE float32x4_t ra__fma_neon(float32x4_t a, float32x4_t b, float32x4_t c) {
    return vfmaq_f32(c, a, b);
}
RA__ISA_INLINE float32x4_t ra__select_neon(uint32x4_t m, float32x4_t a, float32x4_t b) {
    return vbslq_f32(m, a, b);
}
RA__ISA_INLINE uint32x4_t ra__less_neon(float32x4_t a, float32x4_t b) { return vcltq_f32(a, b); }
RA__ISA_INLINE float32x4_t ra__max_neon(float32x4_t a, float32x4_t b) { return vmaxq_f32(a, b); }
RA__ISA_INLINE float32x4_t ra__abs_neon(float32x4_t a) { return vabsq_f32(a); }
RA__ISA_INLINE uint32x4_t ra__none_neon(void) { return vdupq_n_u32(0); }
RA__ISA_INLINE uint32x4_t ra__any_of_neon(uint32x4_t a, uint32x4_t b) { return vorrq_u32(a, b); }
RA__ISA_INLINE uint32x4_t ra__within_neon(int32x4_t lo, int32x4_t hi, int32_t k) {
    int32x4_t v = vdupq_n_s32(k);
    return vandq_u32(vcleq_s32(lo, v), vcgtq_s32(hi, v));
}
RA__ISA_INLINE float32x4_t ra__distance_neon(const int32_t *p, int32_t k) {
    return vcvtq_f32_s32(vabdq_s32(vld1q_s32(p), vdupq_n_s32(k)));
}
RA__ISA_INLINE float32x4_t ra__shift_of_neon(float32x4_t m) {
    uint32x4_t u = vreinterpretq_u32_f32(m);
    return vreinterpretq_f32_u32(vbicq_u32(u, vceqq_u32(u, vdupq_n_u32(0xff800000u))));
}
/* As ra__exp2_scalar. FMAX and FMIN return a NaN if an operand is one. */
RA__ISA_INLINE float32x4_t ra__exp2_neon(float32x4_t x) {
    float32x4_t magic = vdupq_n_f32(12583039.0f), p = vdupq_n_f32(ra__exp2_near[6]);
    x = vminq_f32(vmaxq_f32(x, vdupq_n_f32(-127.0f)), vdupq_n_f32(128.0f));
    float32x4_t n = x + magic, f = x - (n - magic);
    RA__UNROLL for (int32_t i = 5; i >= 0; i--) p = vfmaq_f32(vdupq_n_f32(ra__exp2_near[i]), p, f);
    return p * vreinterpretq_f32_s32(vshlq_n_s32(vreinterpretq_s32_f32(n), 23));
}
RA__ISA_INLINE void ra__transpose_neon(float32x4_t *v) {
    ra__v4f x[4] = {(ra__v4f)v[0], (ra__v4f)v[1], (ra__v4f)v[2], (ra__v4f)v[3]};
    ra__transpose_scalar(x);
    for (int32_t i = 0; i < 4; i++) v[i] = (float32x4_t)x[i];
}
RA__ISA_INLINE float ra__sum_neon(float32x4_t v) { return vaddvq_f32(v); }
RA__ISA_INLINE float32x4_t ra__sums_neon(const float32x4_t *v) {
    return vpaddq_f32(vpaddq_f32(v[0], v[1]), vpaddq_f32(v[2], v[3]));
}
RA__ISA_INLINE int32_t ra__any_nonfinite_neon(float32x4_t v) {
    uint32x4_t e = vdupq_n_u32(0x7f800000u);
    return vmaxvq_u32(vceqq_u32(vandq_u32(vreinterpretq_u32_f32(v), e), e)) != 0;
}
RA__ISA_INLINE float32x4_t ra__of_f16_neon(const uint8_t *p) {
    return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p)));
}
RA__ISA_INLINE float32x4_t ra__of_i8_neon(const uint8_t *p) {
    uint32_t u;
    memcpy(&u, p, sizeof u);
    return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8(u)))));
}
RA__ISA_INLINE float32x4_t ra__of_bf16_neon(const uint8_t *p) {
    return vreinterpretq_f32_u32(vshll_n_u16(vreinterpret_u16_u8(vld1_u8(p)), 16));
}
RA__ISA_INLINE void ra__to_f16_neon(uint8_t *p, float32x4_t v) {
    vst1_u8(p, vreinterpret_u8_f16(vcvt_f16_f32(v)));
}
/* As ra__bf16_of_f32. */
RA__ISA_INLINE void ra__to_bf16_neon(uint8_t *p, float32x4_t v) {
    uint32x4_t u = vreinterpretq_u32_f32(v), high = vshrq_n_u32(u, 16);
    uint32x4_t nan = vcgtq_u32(vandq_u32(u, vdupq_n_u32(0x7fffffffu)), vdupq_n_u32(0x7f800000u));
    uint32x4_t r = vaddq_u32(vandq_u32(high, vdupq_n_u32(1)), vdupq_n_u32(0x7fff));
    r = vshrq_n_u32(vaddq_u32(u, r), 16);
    r = vbslq_u32(nan, vorrq_u32(high, vdupq_n_u32(0x40)), r);
    vst1_u8(p, vreinterpret_u8_u16(vmovn_u32(r)));
}

#include RINGATTN_SELF
#endif /* RA__NEON */
#undef RA__BODY
#undef RA__UNROLL
#undef RA__UNROLL_2

/* ========================================================================== DISPATCH
 * Finds out which kernels this processor can run, once, and keeps the answer in an atomic word, the
 * only mutable global. A feature counts only if the operating system saves its registers (XCR0).
 * Sets the floating-point mode of the kernels. */
enum { RA__BF16_FAST = 1 << 30 };      /* a bit of ra__isa_found: see ra__isa_bf16_fast */

#if RA__X86
/* 1 if vdpbf16ps issues as often as a multiply-add, so that it does twice the work: AMD from Zen 4
 * on. Intel has a quarter of that rate, which is slower than f32 arithmetic on widened values. */
static int32_t ra__isa_bf16_fast(void) {
    uint32_t a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid(0, &a, &b, &c, &d) || b != 0x68747541u) return 0; /* "Auth" of AMD */
    if (!__get_cpuid(1, &a, &b, &c, &d)) return 0;
    uint32_t family = (a >> 8 & 15u) + (a >> 20 & 255u);
    uint32_t model = (a >> 4 & 15u) | (a >> 12 & 0xf0u);
    return family >= 0x1au || (family == 0x19u && model >= 0x10u);
}

/* 1 if the processor has tiles with bf16 products and this process may use them. Linux grants the
 * use to a process that calls arch_prctl(ARCH_REQ_XCOMP_PERM, XTILEDATA). It may do so again. */
static int32_t ra__isa_amx(uint32_t d7, uint32_t xcr0) {
#if defined(RA__AMX_SOFT)
    (void)d7;
    (void)xcr0;
    return 1;
#elif defined(__linux__)
    if ((d7 & (1u << 22 | 1u << 24)) != (1u << 22 | 1u << 24)) return 0;
    if ((xcr0 & 0x60000u) != 0x60000u) return 0;
    long result;
    __asm__ volatile("syscall" : "=a"(result) : "a"(158L), "D"(0x1023L), "S"(18L)
                     : "rcx", "r11", "memory");
    return result == 0;
#else
    (void)d7;
    (void)xcr0;
    return 0;
#endif
}

/* Bit `isa` is set for each available instruction set. CPUID: Intel SDM volume 2A; XCR0: volume 1,
 * section 13.3. */
static uint32_t ra__isa_probe(void) {
    uint32_t fma_f16c_osxsave = 1u << 12 | 1u << 29 | 1u << 27;
    uint32_t avx512 = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;
    uint32_t a = 0, b = 0, c = 0, d = 0, b7 = 0, d7 = 0, xcr0 = 0, high = 0;
    uint32_t found = 1u << RA_ISA_SCALAR;
    if (!__get_cpuid(1, &a, &b, &c, &d) || (c & fma_f16c_osxsave) != fma_f16c_osxsave) return found;
    if (!__get_cpuid_count(7, 0, &a, &b7, &c, &d7) || !(b7 >> 5 & 1u)) return found;
    __asm__ volatile("xgetbv" : "=a"(xcr0), "=d"(high) : "c"(0));
    if ((xcr0 & 6u) != 6u) return found;
    found |= 1u << RA_ISA_AVX2;
    if ((xcr0 & 0xe6u) != 0xe6u || (b7 & avx512) != avx512) return found;
    found |= 1u << RA_ISA_AVX512;
    if (!__get_cpuid_count(7, 1, &a, &b, &c, &d) || !(a >> 5 & 1u)) return found;
    found |= 1u << RA_ISA_AVX512_BF16;
    if (ra__isa_bf16_fast()) found |= RA__BF16_FAST;
    if (ra__isa_amx(d7, xcr0)) found |= 1u << RA_ISA_AMX;
    return found;
}

#elif RA__NEON
static uint32_t ra__isa_probe(void) { return 1u << RA_ISA_SCALAR | 1u << RA_ISA_NEON; }
#else
static uint32_t ra__isa_probe(void) { return 1u << RA_ISA_SCALAR; }
#endif

/* Denormals are flushed during a call, also in a build without vector kernels, so that the numbers
 * do not depend on the mode of the caller. Returns the mode of the caller, for ra__fp_leave. */
#if defined(__x86_64__)
RA__INLINE uint32_t ra__fp_enter(void) {           /* MXCSR: FTZ and DAZ */
    uint32_t before = __builtin_ia32_stmxcsr();
    __builtin_ia32_ldmxcsr(before | 0x8040u);
    return before;
}
RA__INLINE void ra__fp_leave(uint32_t before) { __builtin_ia32_ldmxcsr(before); }
#elif defined(__aarch64__)
RA__INLINE uint32_t ra__fp_enter(void) {           /* FPCR: FZ */
    uint64_t before;
    __asm__ volatile("mrs %0, fpcr" : "=r"(before));
    __asm__ volatile("msr fpcr, %0" : : "r"(before | 1u << 24));
    return (uint32_t)before;
}
RA__INLINE void ra__fp_leave(uint32_t before) {
    __asm__ volatile("msr fpcr, %0" : : "r"((uint64_t)before));
}
#else
RA__INLINE uint32_t ra__fp_enter(void) { return 0; }
RA__INLINE void ra__fp_leave(uint32_t before) { (void)before; }
#endif

static int32_t ra__isa_found;          /* result of ra__isa_probe; 0: not called yet */

static uint32_t ra__isa_detect(void) {
    int32_t found = __atomic_load_n(&ra__isa_found, __ATOMIC_RELAXED);
    if (found == 0) {
        found = (int32_t)ra__isa_probe();
        __atomic_store_n(&ra__isa_found, found, __ATOMIC_RELAXED);
    }
    return (uint32_t)found;
}

/* The kernel with f32 arithmetic of `isa`, or of the instruction set that it extends. */
static const ra__kernel *ra__kernel_f32(int32_t isa) {
#if RA__X86
    if (isa >= RA_ISA_AVX512 && isa <= RA_ISA_AMX) return &ra__kernel_avx512;
    if (isa == RA_ISA_AVX2) return &ra__kernel_avx2;
#endif
#if RA__NEON
    if (isa == RA_ISA_NEON) return &ra__kernel_neon;
#endif
    (void)isa;
    return &ra__kernel_scalar;
}

/* The kernel of a resolved descriptor. It depends on instruction set, dtypes and dropout, not on
 * the number of rows. Only kernels with f32 arithmetic have dropout. */
static RA__UNUSED const ra__kernel *ra__kernel_of(const ra_desc *d) {
#if RA__X86
    if (d->q_dtype == RA_BF16 && d->k_dtype == RA_BF16 && d->v_dtype == RA_BF16)
        if (d->isa >= RA_ISA_AVX512_BF16 && d->dropout <= 0.0f)
            return d->isa == RA_ISA_AMX ? &ra__kernel_amx : &ra__kernel_bf16;
#endif
    return ra__kernel_f32(d->isa);
}

/* The kernel for decoding. AMX has none and takes that of AVX-512. */
static RA__UNUSED const ra__kernel *ra__kernel_decode(const ra_desc *d) {
    const ra__kernel *kernel = ra__kernel_of(d);
    return kernel->decode_fold ? kernel : ra__kernel_f32(d->isa);
}

RINGATTN_API int32_t ra_isa_best(void) {
    uint32_t found = ra__isa_detect();
    if (found >> RA_ISA_AMX & 1) return RA_ISA_AMX;
    if (found & (uint32_t)RA__BF16_FAST) return RA_ISA_AVX512_BF16;
    if (found >> RA_ISA_AVX512 & 1) return RA_ISA_AVX512;
    if (found >> RA_ISA_NEON & 1) return RA_ISA_NEON;
    return found >> RA_ISA_AVX2 & 1 ? RA_ISA_AVX2 : RA_ISA_SCALAR;
}

RINGATTN_API int32_t ra_isa_available(int32_t isa) {
    if (isa < RA_ISA_AUTO || isa > RA_ISA_NEON) return 0;
    return isa == RA_ISA_AUTO || (ra__isa_detect() >> isa & 1);
}

RINGATTN_API const char *ra_isa_name(int32_t isa) {
    switch (isa) {
    case RA_ISA_AUTO: return "auto";
    case RA_ISA_SCALAR: return "scalar";
    case RA_ISA_AVX2: return "avx2";
    case RA_ISA_AVX512: return "avx512";
    case RA_ISA_AVX512_BF16: return "avx512_bf16";
    case RA_ISA_AMX: return "amx";
    case RA_ISA_NEON: return "neon";
    default: return "unknown";
    }
}

/* ========================================================================== GEOMETRY
 * Positions and masks: which rows a rank holds, and which keys a row sees. In: descriptor. Out:
 * runs of rows, blocks of at most 64 rows, intervals per row, bounds per block, and the class of a
 * pair of blocks (empty, partial, full). All comparisons of positions happen here and in the
 * kernels. */

/* Rows [row, row + rows) of a shard hold positions pos, pos + stride, ...; with positions from an
 * array pos is unused. */
typedef struct ra__seg { int64_t row, rows, pos, stride; } ra__seg;

/* What comes before a run in its list: rows, blocks, and calls of a block engine. */
enum { RA__ROWS, RA__BLOCKS, RA__CALLS };
typedef struct ra__before { int64_t n[3]; } ra__before;

/* A run that was looked up, and what comes before it. Calls are not counted. */
typedef struct ra__cursor { int64_t run; ra__before at; } ra__cursor;

/* Runs of consecutive rows. A plan has sums of what comes before each and finds a row or a block by
 * bisection. A call on one rank has no memory for them: its cursor walks from the run that was
 * looked up last, so that going through rows or blocks in order is linear in the runs. */
typedef struct ra__run_list {
    const ra_run *run;                 /* null: positions are not given as runs */
    int64_t count;
    const ra__before *before;          /* [count + 1], or */
    ra__cursor *cursor;                /* of one thread */
} ra__run_list;

/* The rows of one rank, of the queries or of the keys. */
typedef struct ra__side {
    int32_t layout, rank, ranks;
    int32_t batch_cuts;                /* 1: cut has an entry for each sequence */
    int64_t offset;                    /* position of the first token of a sequence */
    const int64_t *cut;                /* [B][2 ranks + 1] see ra__cut; null: one rank */
    ra__run_list list;                 /* RUNS: of this rank */
    const int32_t *array;              /* ARRAY: of this rank, if known */
    int64_t array_stride, array_rows;
} ra__side;

RA__INLINE int64_t ra__q_len(const ra_desc *d, int32_t b) {
    return d->tokens_of ? d->tokens_of[b] : d->tokens;
}

RA__INLINE int64_t ra__k_len(const ra_desc *d, int32_t b) {
    if (d->kv_tokens_of) return d->kv_tokens_of[b];
    return d->kv_tokens ? d->kv_tokens : ra__q_len(d, b) + d->q_offset;
}

/* Most keys that a sequence may have. */
RA__INLINE int64_t ra__k_most(const ra_desc *d) {
    return d->kv_tokens ? d->kv_tokens : d->tokens + d->q_offset;
}

/* Queries, or keys, of the longest sequence: what packed tensors of one rank are cut by. */
static int64_t ra__longest(const ra_desc *d, int keys) {
    int64_t most = 0;
    if (!d->tokens_of && !d->kv_tokens_of) return keys ? ra__k_most(d) : d->tokens;
    for (int32_t b = 0; b < d->sequences; b++)
        most = ra__max(most, keys ? ra__k_len(d, b) : ra__q_len(d, b));
    return most;
}

/* Tokens of a unit of cuts: the block grid if there are 2 blocks a rank, else single tokens. */
static int64_t ra__cut_unit(int64_t tokens, int32_t ranks) {
    return ra__ceil_div(tokens, RA_BLOCK_TOKENS) >= 2 * (int64_t)ranks ? RA_BLOCK_TOKENS : 1;
}

/* share[r] of `units` for rank r by relative weights (null: equal), largest remainder first, ties
 * to the lower rank. Sum of shares = units. Weights are integers, so every rank computes the same.
 * */
static void ra__shares(int64_t units, int32_t ranks, const int32_t *weights, int64_t *share) {
    int64_t sum = 0, given = 0;
    for (int32_t r = 0; r < ranks; r++) sum += weights ? weights[r] : 1;
    for (int32_t r = 0; r < ranks; r++) {
        int64_t w = weights ? weights[r] : 1;
        share[r] = (int64_t)((uint64_t)units * (uint64_t)w / (uint64_t)sum);
        given += share[r];
    }
    while (given < units) {
        int32_t best = -1;
        int64_t most = -1;
        for (int32_t r = 0; r < ranks; r++) {
            int64_t w = weights ? weights[r] : 1;
            int64_t rest = units * w - share[r] * sum;     /* < sum until this rank got its one */
            if (rest < sum && rest > most) { most = rest; best = r; }
        }
        RINGATTN_ASSERT(best >= 0);
        share[best]++;
        given++;
        if (!weights) {                                    /* equal: the first ranks, in one go */
            for (int32_t r = best + 1; given < units && r < ranks; r++) { share[r]++; given++; }
        }
    }
}

/* Boundaries of 2 ranks + 1 pieces, in tokens. CONTIGUOUS: rank r has piece r, pieces from `ranks`
 * on are empty. ZIGZAG: pieces r and 2 ranks - 1 - r; the units shared out are mirrored pairs of
 * blocks {k, n - 1 - k}, and a middle block counts as a pair (SCHEDULE: one chain a row in the
 * order of these units gives the same sums for every number of ranks). */
static void ra__cut(int64_t tokens, int32_t ranks, const int32_t *weights, int zigzag,
                    int64_t *cut) {
    int64_t unit = ra__cut_unit(tokens, ranks), blocks = ra__ceil_div(tokens, unit);
    int64_t units = zigzag ? ra__ceil_div(blocks, 2) : blocks;
    ra__shares(units, ranks, weights, cut + 1);
    cut[0] = 0;
    for (int32_t r = 1; r <= ranks; r++) cut[r] = ra__min(cut[r - 1] + cut[r] * unit, tokens);
    for (int32_t r = 1; r <= ranks; r++) {
        if (zigzag) {
            int32_t i = ranks - r;                         /* mirror of the boundary cut[i] */
            int64_t k = ra__ceil_div(cut[i], unit);
            cut[ranks + r] = ra__min(tokens, ra__max((blocks - k) * unit, cut[ranks]));
        } else {
            cut[ranks + r] = tokens;
        }
    }
}

RA__INLINE int64_t ra__run_step(const ra_run *run) { return run->stride ? run->stride : 1; }

/* Position of the last row of a run. */
RA__INLINE int64_t ra__run_last(const ra_run *run) {
    return run->first + (run->count - 1) * ra__run_step(run);
}

RA__INLINE int64_t ra__run_blocks(const ra_run *run) {
    return ra__ceil_div(run->count, RA_BLOCK_TOKENS);
}

/* Moves a cursor one run on or back. */
static void ra__cursor_step(const ra__run_list *l, int back) {
    ra__cursor *c = l->cursor;
    const ra_run *run = &l->run[c->run - back];
    int64_t sign = back ? -1 : 1;
    RINGATTN_ASSERT(c->run - back >= 0 && c->run - back < l->count);
    c->run += sign;
    c->at.n[RA__ROWS] += sign * run->count;
    c->at.n[RA__BLOCKS] += sign * ra__run_blocks(run);
}

/* The last run with at most `value` rows, blocks or calls before it, hence the run of that row,
 * block or call; list.count for the end. Writes what comes before it. */
static int64_t ra__list_find(const ra__run_list *l, int what, int64_t value, ra__before *at) {
    int64_t low = 0, high = l->count;
    if (!l->before) {
        ra__cursor *c = l->cursor;
        while (c->run > 0 && value < c->at.n[what]) ra__cursor_step(l, 1);
        while (c->run < l->count &&
               value >= c->at.n[what] + (what == RA__ROWS ? l->run[c->run].count
                                                          : ra__run_blocks(&l->run[c->run])))
            ra__cursor_step(l, 0);
        *at = c->at;
        return c->run;
    }
    while (low < high) {
        int64_t mid = low + (high - low + 1) / 2;
        RINGATTN_ASSERT(mid <= l->count);
        if (l->before[mid].n[what] <= value) low = mid;
        else high = mid - 1;
    }
    *at = l->before[low];
    return low;
}

/* All rows of run i. */
static ra__seg ra__list_run(const ra__run_list *l, int64_t i) {
    ra__seg s;
    while (!l->before && l->cursor->run != i) ra__cursor_step(l, l->cursor->run > i);
    s.row = l->before ? l->before[i].n[RA__ROWS] : l->cursor->at.n[RA__ROWS];
    s.rows = l->run[i].count;
    s.pos = l->run[i].first;
    s.stride = ra__run_step(&l->run[i]);
    return s;
}

/* The row that a block starts with; of the block behind the last one: the number of rows. */
static int64_t ra__list_row(const ra__run_list *l, int64_t block) {
    ra__before at;
    (void)ra__list_find(l, RA__BLOCKS, block, &at);
    return at.n[RA__ROWS] + (block - at.n[RA__BLOCKS]) * RA_BLOCK_TOKENS;
}

/* Rows and blocks of all runs. */
static ra__before ra__list_all(const ra__run_list *l) {
    ra__before all = { { 0, 0, 0 } };
    if (l->before) return l->before[l->count];
    for (int64_t i = 0; i < l->count; i++) {
        all.n[RA__ROWS] += l->run[i].count;
        all.n[RA__BLOCKS] += ra__run_blocks(&l->run[i]);
    }
    return all;
}

/* Segment i of the rank's rows of sequence b with `tokens` tokens; 0 if there is none. */
static int ra__side_seg(const ra__side *s, int32_t b, int64_t tokens, int64_t i, ra__seg *out) {
    int64_t own[3];
    const int64_t *cut = s->cut;
    out->row = out->rows = out->pos = 0;
    out->stride = 1;
    if (s->array || s->layout == RA_LAYOUT_ARRAY) {
        out->rows = s->array_rows;
        out->pos = 0;
        return i == 0;
    }
    if (s->layout == RA_LAYOUT_RUNS) {
        if (i >= s->list.count) return 0;
        *out = ra__list_run(&s->list, i);
        return 1;
    }
    if (s->layout == RA_LAYOUT_STRIPED) {
        out->rows = tokens > s->rank ? ra__ceil_div(tokens - s->rank, s->ranks) : 0;
        out->pos = s->offset + s->rank;
        out->stride = s->ranks;
        return i == 0;
    }
    if (!cut && s->layout != RA_LAYOUT_ZIGZAG && s->ranks == 1) {
        out->rows = tokens;
        out->pos = s->offset;
        return i == 0;
    }
    if (cut) {
        if (s->batch_cuts) cut += (int64_t)b * (2 * s->ranks + 1);
    } else {
        ra__cut(tokens, 1, NULL, s->layout == RA_LAYOUT_ZIGZAG, own);
        cut = own;
    }
    if (i > (s->layout == RA_LAYOUT_ZIGZAG)) return 0;
    int32_t piece = i ? 2 * s->ranks - 1 - s->rank : s->rank;
    if (i) out->row = cut[s->rank + 1] - cut[s->rank];
    out->rows = cut[piece + 1] - cut[piece];
    out->pos = s->offset + cut[piece];
    return 1;
}

/* Rows of sequence b on this side. */
static int64_t ra__side_rows(const ra__side *s, int32_t b, int64_t tokens) {
    ra__seg seg;
    int64_t rows = 0;
    if (s->layout == RA_LAYOUT_RUNS) return ra__list_all(&s->list).n[RA__ROWS];
    for (int64_t i = 0; ra__side_seg(s, b, tokens, i, &seg); i++) rows += seg.rows;
    return rows;
}

/* Blocks of at most 64 rows, counted from the start of each segment, never across two. */
static int64_t ra__side_blocks(const ra__side *s, int32_t b, int64_t tokens) {
    ra__seg seg;
    int64_t n = 0;
    if (s->layout == RA_LAYOUT_RUNS) return ra__list_all(&s->list).n[RA__BLOCKS];
    for (int64_t i = 0; ra__side_seg(s, b, tokens, i, &seg); i++)
        n += ra__ceil_div(seg.rows, RA_BLOCK_TOKENS);
    return n;
}

RA__INLINE ra__seg ra__seg_part(const ra__seg *s, int64_t first, int64_t rows) {
    ra__seg part;
    part.row = s->row + first;
    part.rows = rows;
    part.pos = s->pos + first * s->stride;
    part.stride = s->stride;
    return part;
}

/* Block i of the segment, at most 64 rows. */
RA__INLINE ra__seg ra__seg_block(const ra__seg *s, int64_t i) {
    int64_t first = i * RA_BLOCK_TOKENS;
    return ra__seg_part(s, first, ra__min(RA_BLOCK_TOKENS, s->rows - first));
}

/* A block of a list, which must have it. */
static ra__seg ra__list_block(const ra__run_list *l, int64_t block) {
    ra__before at;
    int64_t i = ra__list_find(l, RA__BLOCKS, block, &at);
    ra__seg s = ra__list_run(l, i);
    return ra__seg_block(&s, block - at.n[RA__BLOCKS]);
}

/* A block of the rank's rows of sequence b; 0 if there is none, but of RUNS it must be there. */
static int ra__side_block(const ra__side *s, int32_t b, int64_t tokens, int64_t block,
                          ra__seg *out) {
    ra__seg seg;
    memset(out, 0, sizeof *out);
    if (s->layout == RA_LAYOUT_RUNS) { *out = ra__list_block(&s->list, block); return 1; }
    for (int64_t i = 0; ra__side_seg(s, b, tokens, i, &seg); i++) {
        int64_t n = ra__ceil_div(seg.rows, RA_BLOCK_TOKENS);
        if (block < n) { *out = ra__seg_block(&seg, block); return 1; }
        block -= n;
    }
    return 0;
}

/* Positions of the rows of a segment; array: entry of its first row, or null. */
static void ra__seg_positions(const ra__seg *s, const int32_t *array, int32_t *pos) {
    for (int64_t i = 0; i < s->rows; i++)
        pos[i] = array ? array[i] : (int32_t)(s->pos + i * s->stride);
}

/* The document in [from, to) that holds p, which is not below its first position. */
static int64_t ra__document_of(const ra_mask *m, int64_t p, int64_t from, int64_t to) {
    while (to - from > 1) {
        int64_t mid = from + (to - from) / 2;
        if (m->doc_first[mid] <= p) from = mid;
        else to = mid;
    }
    return from;
}

/* The document that holds p, from document `from` on: near it if p is. */
static int64_t ra__document_after(const ra_mask *m, int64_t p, int64_t from) {
    int64_t step = 1;
    while (from + step < m->doc_count && m->doc_first[from + step] <= p) {
        from += step;
        step *= 2;
    }
    return ra__document_of(m, p, from, ra__min(from + step, m->doc_count));
}

/* What the query at position p >= 0 sees in its document, whose keys are [doc, last), by the three
 * steps of ra_mask: [v[0], v[1]) and [v[2], v[3]). Not for INTERVALS. */
RA__INLINE void ra__mask_in(const ra_mask *m, int64_t p, int64_t doc, int64_t last, int32_t v[4]) {
    int64_t lo = doc, hi = last;
    if (m->kind == RA_MASK_CAUSAL) {
        hi = p + 1;
        if (m->causal_block > 1) hi = doc + ra__round_up(hi - doc, m->causal_block);
    }
    if (m->prefix) hi = ra__max(hi, doc + m->prefix);
    hi = ra__min(hi, last);
    if (m->window) lo = ra__max(lo, p - m->window + 1);
    if (m->right_limit) hi = ra__min(hi, p + m->right_limit + 1);
    v[0] = (int32_t)lo;
    v[1] = (int32_t)hi;
    v[2] = (int32_t)doc;
    v[3] = (int32_t)(m->keep ? ra__min(doc + m->keep, hi) : doc);
}

/* The same of any mask. end: keys from this position on do not exist. p = -1 sees nothing. */
static void ra__mask_row(const ra_mask *m, int64_t p, int64_t end, int32_t v[4]) {
    int64_t doc = 0, last = end;
    v[0] = v[1] = v[2] = v[3] = 0;
    if (p < 0) return;
    if (m->kind == RA_MASK_INTERVALS) {
        v[0] = (int32_t)ra__max(m->lo[p], 0);
        v[1] = (int32_t)ra__min(m->hi[p], end);
        return;
    }
    if (m->doc_count) {
        int64_t i = ra__document_of(m, p, 0, m->doc_count);
        doc = m->doc_first[i];
        if (i + 1 < m->doc_count) last = ra__min(end, m->doc_first[i + 1]);
    }
    ra__mask_in(m, p, doc, last, v);
}

/* Bounds over the rows of one query block: of [lo, hi) and of [doc, keep), each over the rows where
 * it is not empty; `all_*` are intersections over every row, empty if one row has none. */
typedef struct ra__bounds {
    int32_t lo_min, hi_max, doc_min, keep_max;
    int32_t lo_max, hi_min, doc_max, keep_min;
} ra__bounds;

static void ra__bounds_row(ra__bounds *b, const int32_t v[4]) {
    if (v[0] < v[1]) {
        b->lo_min = v[0] < b->lo_min ? v[0] : b->lo_min;
        b->hi_max = v[1] > b->hi_max ? v[1] : b->hi_max;
    }
    if (v[2] < v[3]) {
        b->doc_min = v[2] < b->doc_min ? v[2] : b->doc_min;
        b->keep_max = v[3] > b->keep_max ? v[3] : b->keep_max;
    }
    b->lo_max = v[0] > b->lo_max ? v[0] : b->lo_max;
    b->hi_min = v[1] < b->hi_min ? v[1] : b->hi_min;
    b->doc_max = v[2] > b->doc_max ? v[2] : b->doc_max;
    b->keep_min = v[3] < b->keep_min ? v[3] : b->keep_min;
}

/* Bounds of no rows. */
static ra__bounds ra__bounds_none(void) {
    const ra__bounds b = { INT32_MAX, INT32_MIN, INT32_MAX, INT32_MIN,
                           INT32_MIN, INT32_MAX, INT32_MIN, INT32_MAX };
    return b;
}

/* Bounds of the rows of a and of more. */
static void ra__bounds_join(ra__bounds *a, const ra__bounds *more) {
    a->lo_min = more->lo_min < a->lo_min ? more->lo_min : a->lo_min;
    a->hi_max = more->hi_max > a->hi_max ? more->hi_max : a->hi_max;
    a->doc_min = more->doc_min < a->doc_min ? more->doc_min : a->doc_min;
    a->keep_max = more->keep_max > a->keep_max ? more->keep_max : a->keep_max;
    a->lo_max = more->lo_max > a->lo_max ? more->lo_max : a->lo_max;
    a->hi_min = more->hi_min < a->hi_min ? more->hi_min : a->hi_min;
    a->doc_max = more->doc_max > a->doc_max ? more->doc_max : a->doc_max;
    a->keep_min = more->keep_min < a->keep_min ? more->keep_min : a->keep_min;
}

/* Geometry of a query block: rows of a segment of at most 64; g may be null. */
static ra__bounds ra__rows_fill(const ra_mask *m, int64_t end, const ra__seg *s,
                                const int32_t *array, ra__rows *g) {
    ra__bounds b = ra__bounds_none();
    for (int64_t i = 0; i < s->rows; i++) {
        int64_t p = array ? array[s->row + i] : s->pos + i * s->stride;
        int32_t v[4];
        ra__mask_row(m, p, end, v);
        ra__bounds_row(&b, v);
        if (!g) continue;
        g->pos[i] = (int32_t)p;
        g->lo[i] = v[0];
        g->hi[i] = v[1];
        g->keep_first[i] = v[2];
        g->keep_end[i] = v[3];
    }
    for (int64_t i = s->rows; g && i < RA_BLOCK_TOKENS; i++)
        g->pos[i] = g->lo[i] = g->hi[i] = g->keep_first[i] = g->keep_end[i] = 0;
    return b;
}

/* Rows of a segment that lie in one document. */
typedef struct ra__doc_rows {
    int64_t from, rows;                /* rows [from, from + rows) of the segment */
    int64_t doc, last;                 /* keys of the document; last as in ra__mask_in */
    int64_t index;                     /* of the document */
} ra__doc_rows;

/* Moves on to the next document of a segment, from {0}; 0 if there is none. */
static int ra__doc_next(const ra_mask *m, int64_t end, const ra__seg *s, ra__doc_rows *at) {
    int64_t p, next;
    at->from += at->rows;
    if (at->from >= s->rows) return 0;
    at->rows = s->rows - at->from;
    at->doc = 0;
    at->last = end;
    if (!m->doc_count) return 1;
    p = s->pos + at->from * s->stride;
    at->index = ra__document_after(m, p, at->index);
    at->doc = m->doc_first[at->index];
    if (at->index + 1 == m->doc_count) return 1;
    next = m->doc_first[at->index + 1];
    at->last = ra__min(end, next);
    at->rows = ra__min(at->rows, ra__ceil_div(next - p, s->stride));
    return 1;
}

/* The bounds of ra__rows_fill, at the cost of two rows a document: in a document lo, hi and keep
 * never fall from a row to the next, and if the last row sees something, all do. */
static ra__bounds ra__seg_bounds(const ra_mask *m, int64_t end, const ra__seg *s) {
    ra__bounds b = { INT32_MAX, INT32_MIN, INT32_MAX, INT32_MIN,
                     INT32_MIN, INT32_MAX, INT32_MIN, INT32_MAX };
    ra__doc_rows at = { 0, 0, 0, 0, 0 };
    int32_t v[4];
    if (m->kind == RA_MASK_INTERVALS) return ra__rows_fill(m, end, s, NULL, NULL);
    while (ra__doc_next(m, end, s, &at)) {
        int64_t first = s->pos + at.from * s->stride;
        int64_t others = at.rows - 1;
        ra__mask_in(m, first + others * s->stride, at.doc, at.last, v);
        ra__bounds_row(&b, v);
        if (v[0] < v[1]) others = ra__min(others, 1);
        for (int64_t i = 0; i < others; i++) {
            ra__mask_in(m, first + i * s->stride, at.doc, at.last, v);
            ra__bounds_row(&b, v);
        }
    }
    return b;
}

/* Class of keys whose positions lie in [first, last] for the rows of b. Empty and full are certain,
 * partial may be either. */
RA__INLINE int ra__classify(const ra__bounds *b, int64_t first, int64_t last) {
    if (first >= 0 && ((first >= b->lo_max && last < b->hi_min) ||
                       (first >= b->doc_max && last < b->keep_min)))
        return RA__FULL;
    if ((first < b->hi_max && last >= b->lo_min) || (first < b->keep_max && last >= b->doc_min))
        return RA__PARTIAL;
    return RA__EMPTY;
}

/* Smallest and largest position of a segment's rows; array as above. */
static void ra__seg_span(const ra__seg *s, const int32_t *array, int64_t *first, int64_t *last) {
    *first = s->pos;
    *last = s->pos + (s->rows - 1) * s->stride;
    if (!array) return;
    *first = *last = array[0];
    for (int64_t i = 1; i < s->rows; i++) {
        *first = ra__min(*first, array[i]);
        *last = ra__max(*last, array[i]);
    }
}

/* Visible keys of a row among the dense positions [0, end). */
RA__INLINE int64_t ra__pairs_row(const int32_t v[4]) {
    if (v[0] >= v[1]) return ra__max(0, v[3] - v[2]);
    return v[1] - v[0] + ra__max(0, ra__min(v[3], v[0]) - v[2]);
}

/* Sum of floor((a i + b) / m) over i in [0, n), for a, b >= 0 and m > 0, by Euclid's algorithm:
 * what is left of a and b below m counts points under a line, which is the same sum with the axes
 * exchanged. */
static int64_t ra__floor_sum(int64_t n, int64_t a, int64_t b, int64_t m) {
    int64_t sum = 0;
    while (n > 0) {
        int64_t top, t;
        sum += (a / m) * (n * (n - 1) / 2) + (b / m) * n;
        a %= m;
        b %= m;
        top = a * n + b;
        n = top / m;
        b = top % m;
        t = m;
        m = a;
        a = t;
    }
    return sum;
}

/* Visible pairs of n rows at p, p + step, ... of one document, none of which is beyond an edge of
 * ra__pairs_edges that the first is not: all counts grow evenly, but for causal blocks. */
static int64_t ra__pairs_piece(const ra_mask *m, int64_t p, int64_t step, int64_t n, int64_t doc,
                               int64_t last) {
    int32_t v[4], w[4];
    int64_t c = m->causal_block, a, z, flat;
    ra__mask_in(m, p, doc, last, v);
    ra__mask_in(m, p + (n - 1) * step, doc, last, w);
    a = ra__pairs_row(v);
    z = ra__pairs_row(w);
    if (c <= 1 || v[0] >= v[1] || v[1] != doc + ra__round_up(p + 1 - doc, c) ||
        w[1] != doc + ra__round_up(p + (n - 1) * step + 1 - doc, c))
        return (a + z) * n / 2;
    flat = (a - v[1] + z - w[1]) * n / 2;      /* without hi, which is doc + c + c floor(./c) */
    return flat + n * (doc + c) + c * ra__floor_sum(n, step, p - doc, c);
}

/* Positions of a document at which the number of keys that a row sees starts to grow in another
 * way: ascending, six. */
static void ra__pairs_edges(const ra_mask *m, int64_t doc, int64_t last, int64_t edge[6]) {
    int64_t c = m->kind == RA_MASK_CAUSAL ? ra__max(1, m->causal_block) : 1;
    int64_t w = m->window ? m->window : 2 * (int64_t)RA_MAX_POSITION;
    edge[0] = m->prefix ? doc + (m->prefix - 1) / c * c : doc; /* causal passes the prefix */
    edge[1] = doc + (last - doc) / c * c;                      /* causal passes the last key */
    edge[2] = doc + w - 1;                                     /* the window leaves the start, */
    edge[3] = doc + w - 1 + m->keep;                           /* the kept keys, */
    edge[4] = last + w - 1;                                    /* and all keys */
    edge[5] = last - m->right_limit - 1;                      /* the right side is cut */
    for (int32_t i = 1; i < 6; i++)
        for (int32_t j = i; j > 0 && edge[j] < edge[j - 1]; j--) {
            int64_t t = edge[j];
            edge[j] = edge[j - 1];
            edge[j - 1] = t;
        }
}

/* Visible pairs of the rows of a segment with the dense positions [0, end). */
static int64_t ra__pairs_seg(const ra_mask *m, int64_t end, const ra__seg *s) {
    ra__doc_rows at = { 0, 0, 0, 0, 0 };
    int64_t n = 0;
    if (m->kind == RA_MASK_INTERVALS) {
        for (int64_t i = 0; i < s->rows; i++) {
            int32_t v[4];
            ra__mask_row(m, s->pos + i * s->stride, end, v);
            n += ra__pairs_row(v);
        }
        return n;
    }
    while (ra__doc_next(m, end, s, &at)) {
        int64_t p = s->pos + at.from * s->stride, edge[6], from = 0;
        if (at.last <= at.doc) continue;
        ra__pairs_edges(m, at.doc, at.last, edge);
        for (int32_t i = 0; i <= 6 && from < at.rows; i++) {
            int64_t to = at.rows;
            if (i < 6) to = edge[i] > p ? ra__min(to, ra__ceil_div(edge[i] - p, s->stride)) : 0;
            if (to <= from) continue;
            n += ra__pairs_piece(m, p + from * s->stride, s->stride, to - from, at.doc, at.last);
            from = to;
        }
    }
    return n;
}
/* Keys of one owner that travel together: one segment, or for zigzag two, mirrored. Of RUNS the
 * segment is rows of several runs that follow one another, whole blocks of a list: pos and stride
 * are those of its first row. */
typedef struct ra__chunk {
    int32_t sequence, owner;
    int32_t segs;
    int32_t lead;                      /* the segment that travels farther: first in a message */
    int32_t hops[2];                   /* ranks that a segment visits after its owner */
    int32_t back_lead, back_hops[2];   /* the same in a backward pass */
    int32_t up[2], down[2];            /* ranks that a segment would visit upwards, downwards */
    ra__seg seg[2];
    ra__run_list list;                 /* RUNS: the runs of the segment, the first and the last one
                                        * perhaps in part; list.run null: no runs */
    int64_t block, blocks, row;        /* which blocks of the list; its row where they begin */
    int64_t low, high;                 /* smallest and largest position; in a plan */
} ra__chunk;

/* Positions from here on hold no key of sequence b. */
RA__INLINE int64_t ra__key_end(const ra_desc *d, int32_t b, int array) {
    return array ? RA_MAX_POSITION : ra__k_len(d, b);
}

RA__INLINE int64_t ra__chunk_rows(const ra__chunk *c) {
    return c->seg[0].rows + (c->segs > 1 ? c->seg[1].rows : 0);
}

/* Blocks of segment i of a chunk. */
RA__INLINE int64_t ra__seg_blocks(const ra__chunk *c, int32_t i) {
    return c->list.run ? c->blocks : ra__ceil_div(c->seg[i].rows, RA_BLOCK_TOKENS);
}

/* Block j of segment i, from the front. */
static ra__seg ra__seg_block_at(const ra__chunk *c, int32_t i, int64_t j) {
    ra__seg s;
    if (!c->list.run) return ra__seg_block(&c->seg[i], j);
    s = ra__list_block(&c->list, c->block + j);
    s.row += c->seg[0].row - c->row;
    return s;
}

/* Run i of a chunk of runs, as far as it belongs to the chunk; in a plan. */
static ra__seg ra__chunk_run(const ra__chunk *c, int64_t i) {
    ra__seg s = ra__list_run(&c->list, i);
    int64_t from = ra__max(0, c->row - s.row);
    int64_t to = ra__min(s.rows, c->row + c->seg[0].rows - s.row);
    s = ra__seg_part(&s, from, to - from);
    s.row += c->seg[0].row - c->row;
    return s;
}

/* Smallest and largest position of segment i of a chunk in a plan; not known of ARRAY. */
static void ra__chunk_span(const ra__chunk *c, int32_t i, int64_t *first, int64_t *last) {
    if (!c->list.run) {
        ra__seg_span(&c->seg[i], NULL, first, last);
        return;
    }
    *first = c->low;
    *last = c->high;
}

/* Positions of the rows of segment i of a chunk in a plan; array as in ra__seg_positions. */
static void ra__chunk_positions(const ra__chunk *c, int32_t i, const int32_t *array,
                                int32_t *pos) {
    if (!c->list.run) ra__seg_positions(&c->seg[i], array, pos);
    for (int64_t j = 0; c->list.run && j < c->list.count; j++) {
        ra__seg s = ra__chunk_run(c, j);
        ra__seg_positions(&s, NULL, pos + s.row - c->seg[0].row);
    }
}

/* Blocks of a chunk, in the order in which a row folds them. */
RA__INLINE int64_t ra__chunk_blocks(const ra__chunk *c) {
    return c->segs > 1 ? ra__seg_blocks(c, 0) + ra__seg_blocks(c, 1) : ra__seg_blocks(c, 0);
}

/* Block i of chunk c in folding order: DESC downwards; zigzag the pairs {k, n - 1 - k}, front block
 * first; else upwards. *which: its segment. */
static ra__seg ra__chunk_block(const ra__chunk *c, int32_t order, int64_t i, int32_t *which) {
    int64_t n0 = ra__ceil_div(c->seg[0].rows, RA_BLOCK_TOKENS), n1, pair;
    *which = 0;
    if (c->list.run) return ra__seg_block_at(c, 0, i);
    if (c->segs < 2)
        return ra__seg_block(&c->seg[0], order == RA_ORDER_DESCENDING ? n0 - 1 - i : i);
    n1 = ra__ceil_div(c->seg[1].rows, RA_BLOCK_TOKENS);
    pair = ra__min(n0, n1);
    *which = i < 2 * pair ? (int32_t)(i % 2) : n0 <= n1;
    i = i < 2 * pair ? i / 2 : i - pair;
    return ra__seg_block(&c->seg[*which], *which ? n1 - 1 - i : i);
}

/* Part i of n nearly equal parts of `blocks` blocks, as first block (i = n: the end). */
RA__INLINE int64_t ra__part(int64_t blocks, int64_t n, int64_t i) { return blocks * i / n; }

/* Chunk j of a zigzag shard with front segment s[0] and back segment s[1]: mirrored blocks
 * [a, b) from the front of the one and from the back of the other. */
static void ra__chunk_zigzag(ra__chunk *c, const ra__seg s[2], int64_t n, int64_t j) {
    int64_t n0 = ra__ceil_div(s[0].rows, RA_BLOCK_TOKENS);
    int64_t n1 = ra__ceil_div(s[1].rows, RA_BLOCK_TOKENS), units = ra__max(n0, n1);
    int64_t a = ra__part(units, n, j), b = ra__part(units, n, j + 1);
    int64_t f0 = ra__min(a * RA_BLOCK_TOKENS, s[0].rows);
    int64_t f1 = ra__min(b * RA_BLOCK_TOKENS, s[0].rows);
    int64_t g0 = ra__max(n1 - b, 0) * RA_BLOCK_TOKENS;
    int64_t g1 = ra__min(ra__max(n1 - a, 0) * RA_BLOCK_TOKENS, s[1].rows);
    c->segs = 0;
    if (f1 > f0) c->seg[c->segs++] = ra__seg_part(&s[0], f0, f1 - f0);
    if (g1 > g0) c->seg[c->segs++] = ra__seg_part(&s[1], g0, g1 - g0);
}

/* Makes a chunk blocks [from, to) of a list. */
static void ra__chunk_of_list(ra__chunk *c, const ra__run_list *l, int64_t from, int64_t to) {
    ra__seg s = { 0, 0, 0, 1 };
    if (to > from) s = ra__list_block(l, from);
    c->segs = 1;
    c->list = *l;
    c->block = from;
    c->blocks = to - from;
    c->row = s.row;
    c->seg[0] = s;
    c->seg[0].rows = to > from ? ra__list_row(l, to) - s.row : 0;
}

/* Leaves of segment i of a chunk blocks [from, to), as far as there are so many; returns the rows
 * before them. */
static int64_t ra__seg_cut(ra__chunk *c, int32_t i, int64_t from, int64_t to) {
    int64_t n = ra__seg_blocks(c, i), row = c->row, first = c->seg[i].row;
    from = ra__min(from, n);
    to = ra__min(to, n);
    if (c->list.run) {
        ra__run_list l = c->list;
        ra__chunk_of_list(c, &l, c->block + from, c->block + to);
        if (from == to) c->row = row;  /* no rows, at some place */
        c->seg[0].row = first + c->row - row;
        return c->row - row;
    }
    from *= RA_BLOCK_TOKENS;
    to = ra__min(to * RA_BLOCK_TOKENS, c->seg[i].rows);
    from = ra__min(from, to);
    c->seg[i] = ra__seg_part(&c->seg[i], from, to - from);
    return from;
}

/* All rows of a side as one chunk. */
static void ra__chunk_side(const ra__side *side, int32_t b, int64_t tokens, ra__chunk *c) {
    memset(c, 0, sizeof *c);
    c->sequence = b;
    c->owner = side->rank;
    if (side->layout == RA_LAYOUT_RUNS) {
        ra__chunk_of_list(c, &side->list, 0, ra__side_blocks(side, b, tokens));
        return;
    }
    c->segs = 1 + (side->layout == RA_LAYOUT_ZIGZAG);
    for (int32_t i = 0; i < c->segs; i++) (void)ra__side_seg(side, b, tokens, i, &c->seg[i]);
}

/* Tiles whose query unit is not below the key's, and the others. */
enum { RA__AFTER = 1, RA__BEFORE = 2, RA__BOTH = 3 };

/* ========================================================================== TENSORS
 * Views with all defaults filled in, and the checks of a call's tensors against its descriptor. In:
 * what the caller gave. Out: views in bytes, or a refusal. Reads no data except positions. */

/* Addresses and strides of a dtype are multiples of this many bytes. */
RA__INLINE int32_t ra__element(int32_t dtype) { return dtype == RA_F32 ? 4 : 2; }

/* Bytes of dim adjacent elements. */
RA__INLINE int64_t ra__row_bytes(int32_t dtype, int64_t dim) {
    return dtype == RA_Q8_0 ? dim / 32 * 34 : dim * ra__element(dtype);
}

/* Strided rows with all defaults filled in: bytes. */
typedef struct ra__view { const uint8_t *data; int64_t batch, token, head; } ra__view;

RA__INLINE ra__view ra__view_at(ra__view v, int32_t b, int64_t row, int64_t head) {
    if (v.data) v.data += (int64_t)b * v.batch + row * v.token + head * v.head;
    return v;
}

/* Rows of `heads` adjacent heads; one sequence. */
static ra__view ra__view_packed(const uint8_t *data, int32_t heads, int32_t dim, int32_t dtype) {
    ra__view v;
    v.data = data;
    v.head = ra__row_bytes(dtype, dim);
    v.token = v.head * heads;
    v.batch = 0;
    return v;
}

/* What all tasks of a call share. */
typedef struct ra__work {
    const ra_desc *d;                  /* resolved */
    const ra_tensors *t;
    const ra__kernel *kernel;
    ra__side q_side;
    ra__view q, o, lse, acc;           /* acc: f32 running sums, o itself or workspace */
    float *m, *l;
    int64_t ml_batch, ml_row, ml_head; /* strides of m and l in floats */
    int32_t order;
    int32_t clear, finish;             /* first chunk clears the state; last one writes o */
    int32_t any_position;              /* keys may be at any position, not only below kv_tokens */
    int32_t look;                      /* 1: blocks are empty, partial or full by the positions of
                                        * an array, too */
} ra__work;

RA__ONCE_BEGIN

/* One thing that a caller may get wrong, and what to say then ('#': value). */
typedef struct ra__rule {
    int broken;
    ra_status status;
    const char *field, *text;
    int64_t value;
} ra__rule;

/* Refuses the first rule that is broken. */
static ra_status ra__check_rules(const ra__rule *rule, size_t n, ra_error *e) {
    for (size_t i = 0; i < n; i++)
        if (rule[i].broken)
            return ra__refuse(e, rule[i].status, rule[i].field, rule[i].text, rule[i].value);
    return RA_OK;
}

/* An allocator has both of its callbacks or neither. */
static ra_status ra__check_allocator(const ra_allocator *a, const char *field, ra_error *e) {
    const char *const name[2] = { field, a->alloc ? ".free" : ".alloc" };
    if (!a->alloc == !a->free) return RA_OK;
    return ra__refuse_part(e, RA_E_NULL, name, "is null: set both alloc and free, or neither", 0);
}

/* What one view must look like. */
typedef struct ra__shape { const char *field; int64_t batch, rows, heads, dim; int32_t dtype; }
    ra__shape;

RA__INLINE ra__shape ra__shape_of(const char *field, const ra_desc *d, int64_t rows, int64_t heads,
                              int64_t dim) {
    ra__shape s;
    s.field = field;
    s.batch = d->sequences;
    s.rows = rows;
    s.heads = heads;
    s.dim = dim;
    s.dtype = RA_F32;
    return s;
}

/* Fills in default strides and checks a view: distinct rows must not overlap, except inputs of
 * different sequences. */
static ra_status ra__view_check(const void *data, const int64_t stride[3], const ra__shape *s,
                                int writable, ra__view *out, ra_error *e) {
    static const char *const part[3] = { ".batch_stride", ".token_stride", ".head_stride" };
    int64_t element = ra__element(s->dtype), row = ra__row_bytes(s->dtype, s->dim), span = row;
    int64_t step[3], extent, count[3] = { s->batch, s->rows, s->heads };
    const char *name[2];
    name[0] = s->field;
    for (int i = 2; i >= 0; i--) {                         /* packed: extent of what is inside */
        name[1] = part[i];
        if (stride[i] < 0 || (stride[i] && stride[i] % element))
            return ra__refuse_part(e, RA_E_STRIDE, name,
                                   "# is negative or not a multiple of the element", stride[i]);
        step[i] = stride[i] ? stride[i] : span;
        if (!ra__mul(ra__max(count[i], 1), step[i], &extent))
            return ra__refuse_part(e, RA_E_OVERFLOW, name, "# overflows", step[i]);
        span = ra__max(span, extent);
    }
    if (s->rows && !data) return ra__refuse(e, RA_E_NULL, s->field, "data is required", 0);
    if ((uintptr_t)data & (uintptr_t)(element - 1))
        return ra__refuse(e, RA_E_ALIGN, s->field, "data must be aligned to # bytes", element);
    for (int i = 2; !writable && i > 0; i--) {
        name[1] = part[i];
        if (count[i] > 1 && step[i] < row && s->rows)
            return ra__refuse_part(e, RA_E_STRIDE, name,
                                   "# is less than one row; strides are bytes", step[i]);
    }
    for (int i = 2; i >= !writable; i--) {                 /* what is inside fits into the step */
        int64_t inner = row;
        for (int j = !writable; j < 3; j++)
            if (j != i && count[j] > 1 && step[j] <= step[i]) inner += step[j] * (count[j] - 1);
        if (count[i] > 1 && step[i] < inner && s->rows)
            return ra__refuse(e, RA_E_STRIDE, s->field,
                              "stride # makes rows overlap; strides are bytes", step[i]);
    }
    out->data = (const uint8_t *)data;
    out->batch = step[0];
    out->token = step[1];
    out->head = step[2];
    return RA_OK;
}

static ra_status ra__in_check(const ra_in *in, ra__shape s, int32_t dtype, ra__view *out,
                              ra_error *e) {
    int64_t stride[3] = { in->batch_stride, in->token_stride, in->head_stride };
    s.dtype = dtype;
    return ra__view_check(in->data, stride, &s, 0, out, e);
}

static ra_status ra__out_check(const ra_out *o, ra__shape s, int32_t dtype, ra__view *out,
                               ra_error *e) {
    int64_t stride[3] = { o->batch_stride, o->token_stride, o->head_stride };
    s.dtype = dtype;
    return ra__view_check(o->data, stride, &s, 1, out, e);
}

/* The memory of a tensor: pieces of `bytes` without gaps, and the steps between them. */
typedef struct ra__region {
    const uint8_t *data;
    int64_t bytes, step[3], count[3];
    int64_t extent;                    /* bytes from the first to the last; 0: no memory */
    int32_t steps;
} ra__region;

/* Of a view that ra__view_check has accepted. */
RA__INLINE ra__region ra__region_of(const void *data, const int64_t stride[3], const ra__shape *s) {
    const int64_t count[3] = { s->heads, s->rows, s->batch };
    int64_t span = ra__row_bytes(s->dtype, s->dim);
    ra__region r;
    memset(&r, 0, sizeof r);
    if (!data) return r;
    r.data = (const uint8_t *)data;
    r.bytes = r.extent = span;
    r.steps = 3;
    for (int i = 0; i < 3; i++) {                          /* packed: extent of what is inside */
        r.step[i] = stride[2 - i] ? stride[2 - i] : span;
        r.count[i] = count[i];
        span = ra__max(span, count[i] * r.step[i]);
        r.extent = ra__add_sat(r.extent, (count[i] - 1) * r.step[i]);
    }
    if (!s->heads || !s->rows || !s->batch) r.extent = 0;
    return r;
}

/* The same memory with the shortest step first, and no step where there is no gap. */
static ra__region ra__region_sorted(const ra__region *r) {
    ra__region out = *r;
    int32_t dense = 0;
    out.steps = 0;
    for (int i = 0; i < 3; i++) {
        int at = out.steps;
        if (r->count[i] == 1) continue;
        for (; at > 0 && out.step[at - 1] > r->step[i]; at--) {
            out.step[at] = out.step[at - 1];
            out.count[at] = out.count[at - 1];
        }
        out.step[at] = r->step[i];
        out.count[at] = r->count[i];
        out.steps++;
    }
    for (; dense < out.steps && out.step[dense] == out.bytes; dense++)
        out.bytes *= out.count[dense];
    out.steps -= dense;
    for (int i = 0; i < out.steps; i++) {
        out.step[i] = out.step[i + dense];
        out.count[i] = out.count[i + dense];
    }
    return out;
}

RA__INLINE ra__region ra__region_in(const ra_in *in, ra__shape s, int32_t dtype) {
    const int64_t stride[3] = { in->batch_stride, in->token_stride, in->head_stride };
    s.dtype = dtype;
    return ra__region_of(in->data, stride, &s);
}

RA__INLINE ra__region ra__region_out(const ra_out *out, ra__shape s, int32_t dtype) {
    const int64_t stride[3] = { out->batch_stride, out->token_stride, out->head_stride };
    s.dtype = dtype;
    return ra__region_of(out->data, stride, &s);
}

/* Bytes from the first to the last of a part of a region that has only the first n steps. */
static int64_t ra__region_extent(const ra__region *r, int32_t n) {
    int64_t bytes = r->bytes;
    for (int32_t i = 0; i < n; i++)
        bytes = ra__add_sat(bytes, ra__mul_sat(r->step[i], r->count[i] - 1));
    return bytes;
}

/* Parts of two sorted regions, na and nb steps deep, share a byte; b begins `gap` bytes after a.
 * Regions with unlike steps, both with gaps, are not told apart. */
static int ra__regions_meet(const ra__region *a, int32_t na, const ra__region *b, int32_t nb,
                            int64_t gap) {
    const int64_t step = ra__max(na ? a->step[na - 1] : 0, nb ? b->step[nb - 1] : 0);
    const int da = na && a->step[na - 1] == step, db = nb && b->step[nb - 1] == step;
    int64_t size[2], d, last;
    if (gap >= ra__region_extent(a, na) || -gap >= ra__region_extent(b, nb)) return 0;
    if (!na && !nb) return 1;
    if (na && nb && !(da && db)) return 0;
    size[0] = ra__region_extent(a, na - da);
    size[1] = ra__region_extent(b, nb - db);
    d = ra__max(da ? 1 - a->count[na - 1] : 0, (-size[1] - gap) / step - 1);
    last = ra__min(db ? b->count[nb - 1] - 1 : 0, (size[0] - gap) / step + 1);
    for (last = ra__min(last, d + 8); d <= last; d++)
        if (ra__regions_meet(a, na - da, b, nb - db, gap + d * step)) return 1;
    return 0;
}

/* Tensors of a call by which another may not be overwritten. */
enum { RA__REGION_Q, RA__REGION_K, RA__REGION_V, RA__REGION_O, RA__REGION_LSE, RA__REGION_D_O,
       RA__REGION_D_Q, RA__REGION_D_K, RA__REGIONS };

/* What is written must not share memory with the first n regions. */
static ra_status ra__check_apart(const ra__region *out, const ra__region *others, int32_t n,
                                 const char *field, ra_error *e) {
    static const char *const text[RA__REGIONS] = {
        "overlaps t.q", "overlaps t.k", "overlaps t.v", "overlaps t.o", "overlaps t.lse",
        "overlaps t.d_o", "overlaps t.d_q", "overlaps t.d_k",
    };
    for (int32_t i = 0; i < n && out->extent; i++) {
        const int64_t gap = (int64_t)((uintptr_t)others[i].data - (uintptr_t)out->data);
        ra__region a, b;
        if (!others[i].extent || gap >= out->extent || -gap >= others[i].extent) continue;
        a = ra__region_sorted(out);
        b = ra__region_sorted(&others[i]);
        if (ra__regions_meet(&a, a.steps, &b, b.steps, gap))
            return ra__refuse(e, RA_E_SHAPE, field, text[i], 0);
    }
    return RA_OK;
}

/* q, k and v. */
static void ra__regions_inputs(const ra_desc *d, const ra_tensors *t, const int64_t rows[2],
                               ra__region *r) {
    r[RA__REGION_Q] = ra__region_in(&t->q, ra__shape_of("", d, rows[0], d->q_heads, d->k_dim),
                             d->q_dtype);
    r[RA__REGION_K] = ra__region_in(&t->k, ra__shape_of("", d, rows[1], d->kv_heads, d->k_dim),
                             d->k_dtype);
    r[RA__REGION_V] = ra__region_in(&t->v, ra__shape_of("", d, rows[1], d->kv_heads, d->v_dim),
                             d->v_dtype);
}

/* Steps of a bias: bytes, and 0 where elements are shared. */
static ra_status ra__check_steps(const int64_t step[4], int64_t element, const char *field,
                                 ra_error *e) {
    for (int i = 0; i < 4; i++)
        if (step[i] < 0 || step[i] % element)
            return ra__refuse(e, RA_E_STRIDE, field,
                              element == 2 ? "step # is negative or not a multiple of 2"
                                           : "step # is negative or not a multiple of 4, the bytes "
                                             "of f32 (dtype 0)", step[i]);
    return RA_OK;
}

/* Pointers of score changes are given if and only if the descriptor says so. */
static ra_status ra__check_scores(const ra_desc *d, const ra_tensors *t, ra_error *e) {
    const ra_bias *b = &t->bias;
    const int64_t steps[4] = { b->batch_step, b->head_step, b->row_step, b->key_step };
    const ra__rule rules[] = {
        { !(d->scores & RA_SCORE_ALIBI) != !t->alibi, t->alibi ? RA_E_SHAPE : RA_E_NULL, "t.alibi",
          "must be set if and only if scores has RA_SCORE_ALIBI; scores is #", d->scores },
        { !(d->scores & RA_SCORE_SINKS) != !t->sinks, t->sinks ? RA_E_SHAPE : RA_E_NULL, "t.sinks",
          "must be set if and only if scores has RA_SCORE_SINKS; scores is #", d->scores },
        { !(d->scores & RA_SCORE_BIAS) != !b->data, b->data ? RA_E_SHAPE : RA_E_NULL, "t.bias",
          "must be set if and only if scores has RA_SCORE_BIAS; scores is #", d->scores },
        { b->data && b->keys < 1, RA_E_RANGE, "t.bias.keys", "# is not positive", b->keys },
        { b->dtype < 0 || b->dtype > RA_BF16, RA_E_ENUM, "t.bias.dtype",
          "# is not RA_F32, RA_F16 or RA_BF16", b->dtype },
    };
    ra_status s = ra__check_rules(rules, sizeof rules / sizeof *rules, e);
    return s ? s : ra__check_steps(steps, b->dtype > RA_F32 ? 2 : 4, "t.bias", e);
}

/* Positions are below this. Those of queries must have an entry in the caller's intervals. */
static int64_t ra__position_top(const ra_desc *d, int keys) {
    return !keys && d->mask.kind == RA_MASK_INTERVALS ? d->mask.interval_count : RA_MAX_POSITION;
}

/* A position array of `rows` entries per sequence. */
static ra_status ra__check_array(const ra_desc *d, const ra_positions *p, int64_t rows, int keys,
                                 ra_error *e) {
    int64_t top = ra__position_top(d, keys);
    if (p->batch_step < 0)
        return ra__refuse(e, RA_E_STRIDE, keys ? "t.k_pos.batch_step" : "t.q_pos.batch_step",
                          "# is negative", p->batch_step);
    if (p->count != rows)
        return ra__refuse(e, RA_E_POSITIONS, keys ? "t.k_pos.count" : "t.q_pos.count",
                          "# is not the number of rows", p->count);
    if (!p->array && rows)
        return ra__refuse(e, RA_E_NULL, keys ? "t.k_pos.array" : "t.q_pos.array", "is required", 0);
    for (int32_t b = 0; b < (p->batch_step ? d->sequences : 1); b++)
        for (int64_t i = 0; i < rows; i++) {
            int32_t v = p->array[b * p->batch_step + i];
            if (v < -1 || v >= RA_MAX_POSITION)
                return ra__refuse(e, RA_E_RANGE, keys ? "t.k_pos.array" : "t.q_pos.array",
                                  "position # is out of range", v);
            if (v >= top)
                return ra__refuse(e, RA_E_POSITIONS, "t.q_pos.array",
                                  "position # has no entry in mask.lo and mask.hi", v);
        }
    return RA_OK;
}

static int ra__positions_set(const ra_positions *p) {
    return p->runs || p->array || p->count || p->batch_step;
}

/* Views and score pointers of a call with these numbers of rows. */
static ra_status ra__check_tensors(const ra_desc *d, const ra_tensors *t, const int64_t rows[2],
                                   ra__work *w, ra__view kv[2], ra_error *e) {
    ra_status s;
    s = ra__check_scores(d, t, e);
    if (!s) s = ra__in_check(&t->q, ra__shape_of("t.q", d, rows[0], d->q_heads, d->k_dim),
                             d->q_dtype, &w->q, e);
    if (!s) s = ra__in_check(&t->k, ra__shape_of("t.k", d, rows[1], d->kv_heads, d->k_dim),
                             d->k_dtype, &kv[0], e);
    kv[1] = kv[0];
    if (!s && !d->v_in_k)
        s = ra__in_check(&t->v, ra__shape_of("t.v", d, rows[1], d->kv_heads, d->v_dim),
                         d->v_dtype, &kv[1], e);
    if (!s && d->v_in_k && t->v.data)
        return ra__refuse(e, RA_E_SHAPE, "t.v", "must be {0} because v_in_k is #", d->v_in_k);
    return s;
}

static ra_status ra__check_outputs(const ra_desc *d, const ra_tensors *t, int64_t rows,
                                   ra__work *w, ra_error *e) {
    ra_status s = ra__out_check(&t->o, ra__shape_of("t.o", d, rows, d->q_heads, d->v_dim),
                                d->o_dtype, &w->o, e);
    memset(&w->lse, 0, sizeof w->lse);
    if (!s && t->lse.data)
        s = ra__out_check(&t->lse, ra__shape_of("t.lse", d, rows, d->q_heads, 1), RA_F32, &w->lse,
                          e);
    return s;
}

/* What a forward call writes is apart from what it reads. All views have been accepted. */
static ra_status ra__check_forward(const ra_desc *d, const ra_tensors *t, const int64_t rows[2],
                                   ra_error *e) {
    ra__region r[RA__REGION_LSE + 1];
    ra_status s;
    ra__regions_inputs(d, t, rows, r);
    r[RA__REGION_O] = ra__region_out(&t->o, ra__shape_of("", d, rows[0], d->q_heads, d->v_dim),
                                     d->o_dtype);
    r[RA__REGION_LSE] = ra__region_out(&t->lse, ra__shape_of("", d, rows[0], d->q_heads, 1),
                                       RA_F32);
    s = ra__check_apart(&r[RA__REGION_O], r, RA__REGION_O, "t.o", e);
    return s ? s : ra__check_apart(&r[RA__REGION_LSE], r, RA__REGION_LSE, "t.lse", e);
}

/* The view and the region of a gradient, if it is requested. It is apart from the first n of
 * `others`. */
static ra_status ra__check_grad(const ra_desc *d, const ra_out *out, ra__shape shape,
                                const ra__region *others, int32_t n, ra__region *region,
                                ra__view *view) {
    ra_status s;
    memset(view, 0, sizeof *view);
    memset(region, 0, sizeof *region);
    if (!out->data) return RA_OK;
    s = ra__out_check(out, shape, d->grad_dtype, view, d->error);
    if (s) return s;
    *region = ra__region_out(out, shape, d->grad_dtype);
    return ra__check_apart(region, others, n, shape.field, d->error);
}

/* Two elements of a tensor with these strides and counts overlap, other than by a stride of 0. */
static int ra__strides_overlap(const int64_t stride[4], const int64_t count[4]) {
    for (int i = 0; i < 4; i++) {
        int64_t space = stride[i] - 4, inner;
        if (count[i] <= 1 || !stride[i]) continue;
        for (int j = 0; j < 4; j++) {
            if (j == i || count[j] <= 1 || stride[j] > stride[i]) continue;
            if (!ra__mul(stride[j], count[j] - 1, &inner) || inner > space) return 1;
            space -= inner;
        }
    }
    return 0;
}

static ra_status ra__check_bias_out(const ra_desc *d, const ra_tensors *t, int64_t rows) {
    const ra_bias_out *b = &t->d_bias;
    const int64_t keys = ra__min(b->keys, RA_MAX_POSITION); /* positions are below it */
    const int64_t counts[4] = { d->sequences, d->q_heads, rows, keys };
    const int64_t steps[4] = { b->batch_step, b->head_step, b->row_step, b->key_step };
    const ra__rule rules[] = {
        { !b->batch_step && d->sequences > 1 && rows, RA_E_SHAPE, "t.d_bias.batch_step",
          "is 0, which would add up # sequences", d->sequences },
        { !b->head_step && d->q_heads > 1 && rows, RA_E_SHAPE, "t.d_bias.head_step",
          "is 0, which would add up # heads", d->q_heads },
        { !b->row_step && !b->key_step, RA_E_SHAPE, "t.d_bias.key_step",
          "is #, and so is row_step", 0 },
        { (uintptr_t)b->data % 4 != 0, RA_E_ALIGN, "t.d_bias", "data must be aligned to # bytes",
          4 },
        { b->data == t->bias.data || b->data == t->d_sinks, RA_E_SHAPE, "t.d_bias",
          "is the memory of another tensor; it has # rows", rows },
        { ra__strides_overlap(steps, counts), RA_E_STRIDE, "t.d_bias",
          "has steps that make elements of its # rows overlap", rows },
    };
    ra_error *e = d->error;
    ra_status s;
    if (!b->data) return RA_OK;
    if (!(d->scores & RA_SCORE_BIAS))
        return ra__refuse(e, RA_E_SHAPE, "t.d_bias", "needs RA_SCORE_BIAS; scores is #", d->scores);
    if (b->keys < 1)
        return ra__refuse(e, RA_E_RANGE, "t.d_bias.keys", "# is not positive", b->keys);
    s = ra__check_steps(steps, 4, "t.d_bias", e);
    return s ? s : ra__check_rules(rules, sizeof rules / sizeof *rules, e);
}

/* Additional tensors of backward calls: view [0..3] are d_o, d_q, d_k, d_v. rows: of queries,
 * keys. */
static ra_status ra__check_grads(const ra_desc *d, const ra_tensors *t, const int64_t rows[2],
                                 ra__view view[4]) {
    const ra__shape q = ra__shape_of("t.d_q", d, rows[0], d->q_heads, d->k_dim);
    const ra__shape k = ra__shape_of("t.d_k", d, rows[1], d->kv_heads, d->k_dim);
    const ra__shape v = ra__shape_of("t.d_v", d, rows[1], d->kv_heads, d->v_dim);
    const ra__shape o = ra__shape_of("t.d_o", d, rows[0], d->q_heads, d->v_dim);
    ra__region r[RA__REGIONS + 1];
    ra_error *e = d->error;
    ra_status s = RA_OK;
    if (!d->train)
        return ra__refuse(e, RA_E_SHAPE, "train", "must be 1 for gradients, is #", d->train);
    if (rows[0] && !t->lse.data) return ra__refuse(e, RA_E_NULL, "t.lse", "is required", 0);
    if (t->d_sinks && !(d->scores & RA_SCORE_SINKS))
        return ra__refuse(e, RA_E_SHAPE, "t.d_sinks", "needs RA_SCORE_SINKS; scores is #",
                          d->scores);
    s = ra__check_bias_out(d, t, rows[0]);
    if (!s) s = ra__in_check(&t->d_o, o, d->o_dtype, &view[0], e);
    if (s) return s;
    memset(r, 0, sizeof r);
    if (t->d_q.data || t->d_k.data || t->d_v.data) {       /* such calls read o and lse */
        const ra__shape lse = ra__shape_of("t.lse", d, rows[0], d->q_heads, 1);
        ra__shape out = o;
        out.field = "t.o";
        s = ra__out_check(&t->o, out, d->o_dtype, &view[1], e);
        if (!s) s = ra__out_check(&t->lse, lse, RA_F32, &view[1], e);
        if (s) return s;
        ra__regions_inputs(d, t, rows, r);
        r[RA__REGION_O] = ra__region_out(&t->o, o, d->o_dtype);
        r[RA__REGION_LSE] = ra__region_out(&t->lse, lse, RA_F32);
        r[RA__REGION_D_O] = ra__region_in(&t->d_o, o, d->o_dtype);
    }
    s = ra__check_grad(d, &t->d_q, q, r, RA__REGION_D_Q, &r[RA__REGION_D_Q], &view[1]);
    if (!s) s = ra__check_grad(d, &t->d_k, k, r, RA__REGION_D_K, &r[RA__REGION_D_K], &view[2]);
    if (!s && d->v_in_k && t->d_v.data)
        return ra__refuse(e, RA_E_SHAPE, "t.d_v", "must be {0} because v_in_k is #", d->v_in_k);
    if (!s) s = ra__check_grad(d, &t->d_v, v, r, RA__REGIONS, &r[RA__REGIONS], &view[3]);
    return s;
}

/* ========================================================================== CHECK
 * Checks a descriptor and fills in its defaults. Numbers, enums and sizes are checked before any
 * pointer is followed. */

enum { RA__MOST_RANKS = 4096 };

/* A number or a constant of the descriptor: what it may be, and where 0 is refused. */
enum { RA__OPTIONAL = 0, RA__REQUIRED = 1, RA__REQUIRED_V = 2, RA__REQUIRED_RING = 4 };
typedef struct ra__field {
    const char *name;
    size_t at, bytes;
    ra_status status;                  /* RA_E_RANGE: a number; RA_E_ENUM: a constant */
    int32_t required;
    int64_t low, high;
} ra__field;

#define RA__FIELD(name) #name, offsetof(ra_desc, name), sizeof(((const ra_desc *)0)->name)

static ra_status ra__check_fields(const ra_desc *d, ra_error *e) {
    static const ra__field list[] = {
        { RA__FIELD(sequences), RA_E_RANGE, RA__OPTIONAL, 0, 1 << 20 },
        { RA__FIELD(ranks), RA_E_RANGE, RA__OPTIONAL, 0, RA__MOST_RANKS },
        { RA__FIELD(rank), RA_E_RANGE, RA__OPTIONAL, 0, RA__MOST_RANKS },
        { RA__FIELD(q_heads), RA_E_RANGE, RA__REQUIRED, 0, 1 << 16 },
        { RA__FIELD(kv_heads), RA_E_RANGE, RA__REQUIRED, 0, 1 << 16 },
        { RA__FIELD(k_dim), RA_E_RANGE, RA__REQUIRED, 0, 1024 },
        { RA__FIELD(v_dim), RA_E_RANGE, RA__REQUIRED, 0, 1024 },
        { RA__FIELD(v_in_k), RA_E_RANGE, RA__OPTIONAL, 0, 1 },
        { RA__FIELD(v_column), RA_E_RANGE, RA__OPTIONAL, 0, 1024 },
        { RA__FIELD(scores), RA_E_RANGE, RA__OPTIONAL, 0,
          RA_SCORE_ALIBI | RA_SCORE_BIAS | RA_SCORE_SINKS },
        { RA__FIELD(q_dtype), RA_E_ENUM, RA__REQUIRED, RA_F32, RA_Q8_0 },
        { RA__FIELD(k_dtype), RA_E_ENUM, RA__REQUIRED, RA_F32, RA_Q8_0 },
        { RA__FIELD(v_dtype), RA_E_ENUM, RA__REQUIRED_V, 0, RA_Q8_0 },
        { RA__FIELD(o_dtype), RA_E_ENUM, RA__REQUIRED, RA_F32, RA_Q8_0 },
        { RA__FIELD(tokens), RA_E_RANGE, RA__REQUIRED, 0, RA_MAX_POSITION },
        { RA__FIELD(kv_tokens), RA_E_RANGE, RA__OPTIONAL, 0, RA_MAX_POSITION },
        { RA__FIELD(q_offset), RA_E_RANGE, RA__OPTIONAL, 0, RA_MAX_POSITION },
        { RA__FIELD(chunk_tokens), RA_E_RANGE, RA__OPTIONAL, 0, 1 << 24 },
        { RA__FIELD(buffers), RA_E_RANGE, RA__OPTIONAL, 0, 64 },
        { RA__FIELD(threads), RA_E_RANGE, RA__OPTIONAL, 0, 4096 },
        { RA__FIELD(mask.kind), RA_E_ENUM, RA__REQUIRED, RA_MASK_NONE, RA_MASK_INTERVALS },
        { RA__FIELD(mask.causal_block), RA_E_RANGE, RA__OPTIONAL, 0, 1 << 30 },
        { RA__FIELD(mask.window), RA_E_RANGE, RA__OPTIONAL, 0, RA_MAX_POSITION },
        { RA__FIELD(mask.right_limit), RA_E_RANGE, RA__OPTIONAL, 0, RA_MAX_POSITION },
        { RA__FIELD(mask.prefix), RA_E_RANGE, RA__OPTIONAL, 0, RA_MAX_POSITION },
        { RA__FIELD(mask.keep), RA_E_RANGE, RA__OPTIONAL, 0, RA_MAX_POSITION },
        { RA__FIELD(mask.doc_count), RA_E_RANGE, RA__OPTIONAL, 0, RA_MAX_POSITION },
        { RA__FIELD(mask.interval_count), RA_E_RANGE, RA__OPTIONAL, 0, RA_MAX_POSITION },
        { RA__FIELD(layout.kind), RA_E_ENUM, RA__REQUIRED_RING, 0, RA_LAYOUT_ARRAY },
        { RA__FIELD(train), RA_E_ENUM, RA__OPTIONAL, 0, 1 },
        { RA__FIELD(grad_dtype), RA_E_ENUM, RA__OPTIONAL, 0, RA_BF16 },
        { RA__FIELD(grad_return), RA_E_ENUM, RA__OPTIONAL, RA_RETURN_DIRECT, RA_RETURN_RING },
        { RA__FIELD(backward_travel), RA_E_ENUM, RA__OPTIONAL, RA_TRAVEL_AUTO, RA_TRAVEL_Q },
        { RA__FIELD(isa), RA_E_ENUM, RA__OPTIONAL, RA_ISA_AUTO, RA_ISA_NEON },
    };
    const int32_t required = RA__REQUIRED | (d->v_in_k ? 0 : RA__REQUIRED_V) |
                             (d->ranks > 1 ? RA__REQUIRED_RING : 0);
    for (size_t i = 0; i < sizeof list / sizeof *list; i++) {
        const uint8_t *at = (const uint8_t *)d + list[i].at;
        int32_t narrow;
        int64_t value;
        memcpy(&narrow, at, sizeof narrow);
        value = narrow;
        if (list[i].bytes == sizeof value) memcpy(&value, at, sizeof value);
        if (!value && (list[i].required & required))
            return ra__refuse(e, RA_E_UNSET, list[i].name, "must be set; it was left 0", 0);
        if (value >= list[i].low && value <= list[i].high) continue;
        return ra__refuse(e, list[i].status, list[i].name,
                          list[i].status == RA_E_ENUM ? "# is not one of its constants"
                          : value < list[i].low       ? "# is too small" : "# is too large", value);
    }
    if (d->rank >= ra__max(d->ranks, 1))
        return ra__refuse(e, RA_E_RANGE, "rank", "# is too large", d->rank);
    return RA_OK;
}
#undef RA__FIELD

/* No infinity. */
RA__INLINE int ra__rate_valid(double x) { return x > 0 && x <= 1e300; }
RA__INLINE int ra__rates_unknown(const ra_rates *x) {
    return x->flops_per_s == 0 && x->link_bytes_per_s == 0 && x->link_latency_s == 0;
}
RA__INLINE int ra__rates_valid(const ra_rates *x) {
    return ra__rate_valid(x->flops_per_s) && ra__rate_valid(x->link_bytes_per_s) &&
           (x->link_latency_s == 0 || ra__rate_valid(x->link_latency_s));
}

static ra_status ra__check_floats(const ra_desc *d, ra_error *e) {
    const ra__rule rules[] = {
        { !ra__is_finite(d->scale) || d->scale < 0.0f, RA_E_RANGE, "scale",
          "must be finite and not negative", 0 },
        { !ra__is_finite(d->softcap) || d->softcap < 0.0f, RA_E_RANGE, "softcap",
          "must be finite and not negative", 0 },
        { !(d->dropout >= 0.0f && d->dropout < 1.0f), RA_E_RANGE, "dropout",
          "must be at least 0 and less than 1", 0 },
        { !ra__rates_unknown(&d->rates) && !ra__rates_valid(&d->rates), RA_E_RANGE, "rates",
          "must be finite and above 0 (the latency: not below), or all 0", 0 },
    };
    return ra__check_rules(rules, sizeof rules / sizeof *rules, e);
}

/* RA_Q8_0 has blocks of 32 elements, and serves keys and values only. */
static ra_status ra__check_blocks(const ra_desc *d, ra_error *e) {
    const int k = d->k_dtype == RA_Q8_0, v = d->v_in_k ? k : d->v_dtype == RA_Q8_0;
    const int32_t dims[3] = { k ? d->k_dim : 0, v ? d->v_dim : 0, v ? d->v_column : 0 };
    static const char *const name[3] = { "k_dim", "v_dim", "v_column" };
    if (d->q_dtype == RA_Q8_0 || d->o_dtype == RA_Q8_0)
        return ra__refuse(e, RA_E_UNSUPPORTED, d->q_dtype == RA_Q8_0 ? "q_dtype" : "o_dtype",
                          "# is RA_Q8_0, which serves K and V only", RA_Q8_0);
    if (d->train && (k || v))
        return ra__refuse(e, RA_E_UNSUPPORTED, k ? "k_dtype" : "v_dtype",
                          "# is RA_Q8_0, which has no gradients", RA_Q8_0);
    for (int i = 0; i < 3; i++)
        if (dims[i] % 32)
            return ra__refuse(e, i < 2 ? RA_E_SHAPE : RA_E_ALIGN, name[i],
                              "# is not a multiple of 32, as RA_Q8_0 needs", dims[i]);
    return RA_OK;
}

/* Only the owner of queries knows their rows of a bias or their positions in an array. */
static int ra__q_may_travel(const ra_desc *d) {
    return !(d->scores & RA_SCORE_BIAS) && d->layout.kind != RA_LAYOUT_ARRAY;
}

/* The side with fewer bytes per token and hop, with f32 gradients (the Q side for Hq / Hkv below
 * 1.49 with 16-bit rows, 1.33 with f32). Rows must be set. */
static int32_t ra__cheaper_travel(const ra_desc *d) {
    int64_t v = d->v_in_k ? 0 : d->v_dim;
    int64_t keys = d->kv_heads * (4 * (d->k_dim + v) + ra__row_bytes(d->k_dtype, d->k_dim) +
                                  ra__row_bytes(d->v_dtype, v));
    int64_t queries = d->q_heads * (4 * (int64_t)d->k_dim + ra__row_bytes(d->q_dtype, d->k_dim) +
                                    ra__row_bytes(d->o_dtype, d->v_dim) + 8);
    return ra__q_may_travel(d) && queries < keys ? RA_TRAVEL_Q : RA_TRAVEL_KV;
}

static ra_status ra__check_shape(const ra_desc *d, ra_error *e) {
    int64_t bytes, rows = ra__max(d->tokens, ra__k_most(d));
    int64_t width = ra__max(d->k_dim, d->v_dim) * (int64_t)sizeof(float);
    const int q_travels = d->backward_travel == RA_TRAVEL_Q;
    const int fits = ra__mul(rows, d->q_heads * width, &bytes) &&
                     ra__mul(bytes, ra__max(d->sequences, 1), &bytes);
    const ra__rule rules[] = {
        { d->q_heads % d->kv_heads != 0, RA_E_SHAPE, "q_heads", "# is not a multiple of kv_heads",
          d->q_heads },
        { d->tokens + d->q_offset > RA_MAX_POSITION, RA_E_OVERFLOW, "q_offset",
          "tokens + # exceeds RA_MAX_POSITION", d->q_offset },
        { !fits, RA_E_OVERFLOW, "tokens", "# tokens of this shape overflow 62 bits", d->tokens },
        { !d->v_in_k && d->v_column, RA_E_SHAPE, "v_in_k", "is 0, but v_column is #",
          d->v_column },
        { d->v_in_k && d->v_column + d->v_dim > d->k_dim, RA_E_SHAPE, "v_column",
          "# + v_dim exceeds k_dim", d->v_column },
        { !d->train && d->backward_travel, RA_E_SHAPE, "backward_travel", "# needs train = 1",
          d->backward_travel },
        { q_travels && !ra__q_may_travel(d), RA_E_UNSUPPORTED, "backward_travel",
          "# (RA_TRAVEL_Q) does not work with a bias or RA_LAYOUT_ARRAY", d->backward_travel },
        { !d->train && d->grad_return, RA_E_SHAPE, "grad_return", "# needs train = 1",
          d->grad_return },
        { !d->train && d->grad_dtype, RA_E_SHAPE, "grad_dtype", "# needs train = 1",
          d->grad_dtype },
        { !d->train && d->dropout > 0.0f, RA_E_SHAPE, "dropout", "needs train = 1; train is #",
          d->train },
        { d->v_in_k && d->v_dtype && d->v_dtype != d->k_dtype, RA_E_SHAPE, "v_dtype",
          "# differs from k_dtype although v_in_k is 1", d->v_dtype },
    };
    return ra__check_rules(rules, sizeof rules / sizeof *rules, e);
}

/* Fields of a mask that contradict each other; follows no pointer. */
static ra_status ra__check_mask(const ra_desc *d, ra_error *e) {
    const ra_mask *m = &d->mask;
    int intervals = m->kind == RA_MASK_INTERVALS;
    const char *alone = "is #; it must be 0 with RA_MASK_INTERVALS";
    const ra__rule rules[] = {
        { m->causal_block > 1 && m->kind != RA_MASK_CAUSAL, RA_E_SHAPE, "mask.causal_block",
          "# needs RA_MASK_CAUSAL", m->causal_block },
        { m->right_limit && m->kind != RA_MASK_NONE, RA_E_SHAPE, "mask.right_limit",
          "# needs RA_MASK_NONE", m->right_limit },
        { intervals && m->window, RA_E_SHAPE, "mask.window", alone, m->window },
        { intervals && m->prefix, RA_E_SHAPE, "mask.prefix", alone, m->prefix },
        { intervals && m->keep, RA_E_SHAPE, "mask.keep", alone, m->keep },
        { intervals && m->doc_count, RA_E_SHAPE, "mask.doc_count", alone, m->doc_count },
        { !intervals && m->interval_count, RA_E_SHAPE, "mask.interval_count",
          "# needs RA_MASK_INTERVALS", m->interval_count },
        { !intervals && (m->lo || m->hi), RA_E_SHAPE, m->lo ? "mask.lo" : "mask.hi",
          "needs RA_MASK_INTERVALS, not kind #", m->kind },
        { intervals && (!m->lo || !m->hi), RA_E_NULL, m->lo ? "mask.hi" : "mask.lo",
          "is null, but RA_MASK_INTERVALS needs it", 0 },
        { m->doc_count && !m->doc_first, RA_E_NULL, "mask.doc_first",
          "is null, but doc_count is #", m->doc_count },
        { !m->doc_count && m->doc_first, RA_E_SHAPE, "mask.doc_first",
          "is set, but doc_count is 0", 0 },
    };
    return ra__check_rules(rules, sizeof rules / sizeof *rules, e);
}

/* Positions that follow from the descriptor have an entry in the caller's intervals. */
static ra_status ra__check_intervals(const ra_desc *d, ra_error *e) {
    if (d->mask.kind == RA_MASK_INTERVALS && d->layout.kind != RA_LAYOUT_ARRAY &&
        d->mask.interval_count < d->q_offset + d->tokens)
        return ra__refuse(e, RA_E_POSITIONS, "mask.interval_count",
                          "# entries do not reach q_offset + tokens", d->mask.interval_count);
    return RA_OK;
}

static ra_status ra__check_documents(const ra_mask *m, ra_error *e) {
    for (int64_t i = 0; i < m->doc_count; i++) {
        if (i ? m->doc_first[i] <= m->doc_first[i - 1] : m->doc_first[0] != 0)
            return ra__refuse(e, RA_E_POSITIONS, "mask.doc_first",
                              "must start with 0 and ascend; entry # does not", i);
        if (m->doc_first[i] > RA_MAX_POSITION)
            return ra__refuse(e, RA_E_OVERFLOW, "mask.doc_first", "# is above RA_MAX_POSITION",
                              m->doc_first[i]);
    }
    return RA_OK;
}

static ra_status ra__check_lengths(const ra_desc *d, ra_error *e) {
    for (int32_t b = 0; d->tokens_of && b < d->sequences; b++)
        if (d->tokens_of[b] < 0 || d->tokens_of[b] > d->tokens)
            return ra__refuse(e, RA_E_RANGE, "tokens_of", "# is negative or above tokens",
                              d->tokens_of[b]);
    for (int32_t b = 0; d->kv_tokens_of && b < d->sequences; b++)
        if (d->kv_tokens_of[b] < 0 || d->kv_tokens_of[b] > ra__k_most(d))
            return ra__refuse(e, RA_E_RANGE, "kv_tokens_of", "# is negative or above kv_tokens",
                              d->kv_tokens_of[b]);
    return RA_OK;
}

/* Fields of a layout that contradict each other; follows no pointer. */
static ra_status ra__check_layout(const ra_desc *d, ra_error *e) {
    const ra_layout *l = &d->layout;
    int runs = l->kind == RA_LAYOUT_RUNS, array = l->kind == RA_LAYOUT_ARRAY;
    const char *run = l->q_runs        ? "layout.q_runs"
                      : l->q_run_count ? "layout.q_run_count"
                      : l->k_runs      ? "layout.k_runs" : "layout.k_run_count";
    const ra__rule rules[] = {
        { l->weights && l->kind != RA_LAYOUT_CONTIGUOUS && l->kind != RA_LAYOUT_ZIGZAG, RA_E_SHAPE,
          "layout.weights", "need CONTIGUOUS or ZIGZAG, not kind #", l->kind },
        { !runs && (l->q_runs || l->q_run_count || l->k_runs || l->k_run_count), RA_E_SHAPE, run,
          "needs RA_LAYOUT_RUNS, not kind #", l->kind },
        { !array && (l->q_rows || l->k_rows), RA_E_SHAPE,
          l->q_rows ? "layout.q_rows" : "layout.k_rows", "needs RA_LAYOUT_ARRAY, not kind #",
          l->kind },
        { runs && !l->q_run_count, RA_E_NULL, "layout.q_run_count",
          "is null, but RA_LAYOUT_RUNS needs it", 0 },
        { runs && !l->q_runs, RA_E_NULL, "layout.q_runs", "is null, but RA_LAYOUT_RUNS needs it",
          0 },
        { runs && !l->k_runs != !l->k_run_count, RA_E_NULL,
          l->k_runs ? "layout.k_run_count" : "layout.k_runs",
          "is null: set both k_runs and k_run_count, or neither", 0 },
        { array && !l->q_rows, RA_E_NULL, "layout.q_rows",
          "is null, but RA_LAYOUT_ARRAY needs it", 0 },
        { (runs || array) && (d->tokens_of || d->kv_tokens_of), RA_E_SHAPE,
          d->tokens_of ? "tokens_of" : "kv_tokens_of",
          "must be null: RUNS and ARRAY give every sequence the same rows", 0 },
    };
    return ra__check_rules(rules, sizeof rules / sizeof *rules, e);
}

/* First common position of two runs, or -1. With strides s and t and g = gcd(s, t) the positions
 * a.first + i s of run a are also b.first + j t where i s = b.first - a.first mod t, hence for
 * i = (b.first - a.first) / g * (s / g)^-1 mod t / g, the inverse by Euclid's algorithm, and then
 * every lcm(s, t). Strides of more than one row are below 2^31. */
static int64_t ra__runs_meet(const ra_run *a, const ra_run *b) {
    const int64_t sa = a->count > 1 ? ra__run_step(a) : 1, sb = b->count > 1 ? ra__run_step(b) : 1;
    int64_t g = sa, rest = sb, x = 1, y = 0, step, i, p;
    int64_t low = ra__max(a->first, b->first);
    while (rest) {                     /* g = x s mod t, rest = y s mod t */
        int64_t q = g / rest, t = g - q * rest;
        g = rest;
        rest = t;
        t = x - q * y;
        x = y;
        y = t;
    }
    if ((b->first - a->first) % g) return -1;
    step = sb / g;
    i = (b->first - a->first) / g % step * (x % step) % step;
    p = a->first + (i < 0 ? i + step : i) * sa;
    step *= sa;
    if (p < low) p += ra__ceil_div(low - p, step) * step;
    return p <= ra__min(ra__run_last(a), ra__run_last(b)) ? p : -1;
}

/* Run i comes before run j by first position. */
RA__INLINE int ra__run_before(const ra_run *runs, int64_t i, int64_t j) {
    return runs[i].first < runs[j].first || (runs[i].first == runs[j].first && i < j);
}

/* Sifts entry i of a heap of n runs down: none comes after those above it. */
static void ra__order_sift(const ra_run *runs, int64_t *at, int64_t i, int64_t n) {
    int64_t x = at[i];
    for (int64_t child; (child = 2 * i + 1) < n; i = child) {
        if (child + 1 < n && ra__run_before(runs, at[child], at[child + 1])) child++;
        if (ra__run_before(runs, at[child], x)) break;
        at[i] = at[child];
    }
    at[i] = x;
}

static void ra__order_heap(const ra_run *runs, int64_t *at, int64_t n) {
    for (int64_t i = n / 2 - 1; i >= 0; i--) ra__order_sift(runs, at, i, n);
}

/* Sorts n runs of a table by first position. */
static void ra__order_sort(const ra_run *runs, int64_t *at, int64_t n) {
    ra__order_heap(runs, at, n);
    for (int64_t i = n - 1; i > 0; i--) {
        int64_t top = at[0];
        at[0] = at[i];
        at[i] = top;
        ra__order_sift(runs, at, 0, i);
    }
}

/* The first runs of a table of n after run `after` (-1: from the start), sorted; returns how many.
 * A refusal allocates nothing, so a large table is sorted in windows of this size. */
enum { RA__ORDER = 2048 };
static int64_t ra__order_next(const ra_run *runs, int64_t n, int64_t after,
                              int64_t at[RA__ORDER]) {
    int64_t m = 0;
    for (int64_t i = 0; i < n; i++) {
        if (after >= 0 && !ra__run_before(runs, after, i)) continue;
        if (m < RA__ORDER) {
            at[m++] = i;
            if (m == RA__ORDER) ra__order_heap(runs, at, m);
        } else if (ra__run_before(runs, i, at[0])) {
            at[0] = i;
            ra__order_sift(runs, at, 0, m);
        }
    }
    ra__order_sort(runs, at, m);
    return m;
}

/* A position that one of m sorted runs has in common with another one, or with a run up to `after`,
 * which all come before them; or -1. Runs that end before another begins are not compared. */
static int64_t ra__order_meet(const ra_run *runs, int64_t n, int64_t after, const int64_t *at,
                              int64_t m) {
    int64_t reach = -1, group = 0, p = -1;
    for (int64_t i = 0; i < m && p < 0; i++) {
        const ra_run *run = &runs[at[i]];
        if (run->first > reach) group = i;
        for (int64_t j = group; j < i && p < 0; j++)
            if (ra__run_last(&runs[at[j]]) >= run->first) p = ra__runs_meet(&runs[at[j]], run);
        reach = ra__max(reach, ra__run_last(run));
    }
    for (int64_t i = 0; after >= 0 && i < n && p < 0; i++) {
        const int64_t last = ra__run_last(&runs[i]);
        if (last < runs[at[0]].first || ra__run_before(runs, after, i)) continue;
        for (int64_t j = 0; j < m && p < 0 && runs[at[j]].first <= last; j++)
            p = ra__runs_meet(&runs[i], &runs[at[j]]);
    }
    return p;
}

/* No position is in two runs of a table whose entries are in range. */
static ra_status ra__check_held(const ra_run *runs, int64_t n, const char *field, ra_error *e) {
    int64_t at[RA__ORDER], after = -1, m;
    for (int64_t done = 0; done < n; done += m, after = at[m - 1]) {
        m = ra__order_next(runs, n, after, at);
        int64_t p = ra__order_meet(runs, n, after, at, m);
        if (p >= 0) return ra__refuse(e, RA_E_POSITIONS, field, "position # is held twice", p);
    }
    return RA_OK;
}

/* Runs of all ranks, `count` of each, within positions [first, end); the names of their fields. */
typedef struct ra__run_table {
    const ra_run *run;
    const int32_t *count;
    int64_t first, end;
    const char *run_field, *count_field;
} ra__run_table;

/* Entries are in range and no position is in two of them. */
static ra_status ra__check_runs(const ra__run_table *t, int32_t ranks, ra_error *e) {
    int64_t n = 0;
    for (int32_t r = 0; r < ranks; r++) {
        if (t->count[r] < 0)
            return ra__refuse(e, RA_E_RANGE, t->count_field, "# is negative", t->count[r]);
        n += t->count[r];
    }
    for (int64_t i = 0; i < n; i++) {
        const ra_run *run = &t->run[i];
        int64_t stride = ra__run_step(run), last;
        if (run->count < 1 || stride < 1 || run->first < t->first || run->first >= t->end ||
            !ra__mul(run->count - 1, stride, &last) || run->first + last >= t->end)
            return ra__refuse(e, RA_E_RANGE, t->run_field,
                              "entry # has no rows, or steps back, or leaves the tokens", i);
    }
    return ra__check_held(t->run, n, t->run_field, e);
}

static ra_status ra__check_tables(const ra_desc *d, ra_error *e) {
    const ra_layout *l = &d->layout;
    const ra__run_table q = { l->q_runs, l->q_run_count, d->q_offset, d->q_offset + d->tokens,
                              "layout.q_runs", "layout.q_run_count" };
    const ra__run_table k = { l->k_runs, l->k_run_count, 0, ra__k_most(d), "layout.k_runs",
                              "layout.k_run_count" };
    int64_t sum = 0, rows = 0, bytes;
    ra_status s = RA_OK;
    for (int32_t r = 0; l->weights && r < d->ranks; r++) {
        sum += l->weights[r];
        if (l->weights[r] < 0)
            return ra__refuse(e, RA_E_RANGE, "layout.weights", "# is negative", l->weights[r]);
    }
    if (l->weights && !sum)
        return ra__refuse(e, RA_E_UNSET, "layout.weights", "are all 0", 0);
    for (int32_t r = 0; l->kind == RA_LAYOUT_ARRAY && r < d->ranks; r++) {
        if (l->q_rows[r] < 0 || l->q_rows[r] > RA_MAX_POSITION)
            return ra__refuse(e, RA_E_RANGE, "layout.q_rows", "# is out of range", l->q_rows[r]);
        if (l->k_rows && (l->k_rows[r] < 0 || l->k_rows[r] > RA_MAX_POSITION))
            return ra__refuse(e, RA_E_RANGE, "layout.k_rows", "# is out of range", l->k_rows[r]);
        rows += l->q_rows[r] + (l->k_rows ? l->k_rows[r] : 0);
    }
    if (!ra__mul(rows, d->q_heads * (4 * (int64_t)ra__max(d->k_dim, d->v_dim)), &bytes) ||
        !ra__mul(bytes, d->sequences, &bytes))
        return ra__refuse(e, RA_E_OVERFLOW, "layout.q_rows", "# rows in all overflow 62 bits",
                          rows);
    if (l->kind != RA_LAYOUT_RUNS) return RA_OK;
    s = ra__check_runs(&q, d->ranks, e);
    if (!s && l->k_runs) s = ra__check_runs(&k, d->ranks, e);
    for (int32_t r = 0, at = 0; !s && !l->k_runs && r < d->ranks; r++)
        for (int32_t i = 0; i < l->q_run_count[r]; i++, at++)
            if (ra__run_last(&l->q_runs[at]) >= ra__k_most(d))
                return ra__refuse(e, RA_E_POSITIONS, "kv_tokens",
                                  "does not reach entry # of q_runs, which are k_runs too", at);
    return s;
}

static ra_status ra__check_engine(const ra_desc *d, ra_error *e) {
    const ra_engine *engine = d->engine;
    if (!engine) return RA_OK;
    const ra__rule rules[] = {
        { engine->size < sizeof(ra_engine), RA_E_ABI, "engine.size",
          "# is smaller than ra_engine of version 1", engine->size },
        { engine->abi != RA_ENGINE_ABI, RA_E_ABI, "engine.abi", "# is not RA_ENGINE_ABI",
          engine->abi },
        { engine->block_queries < 0 || engine->block_queries > 1 << 24, RA_E_RANGE,
          "engine.block_queries", "# is out of range", engine->block_queries },
        { engine->block_queries % RA_BLOCK_TOKENS != 0, RA_E_SHAPE, "engine.block_queries",
          "# is not a multiple of RA_BLOCK_TOKENS", engine->block_queries },
        { !engine->fold, RA_E_NULL, "engine.fold", "is required", 0 },
        { d->train != 0, RA_E_UNSUPPORTED, "train", "must be 0 with an engine, is #", d->train },
    };
    return ra__check_rules(rules, sizeof rules / sizeof *rules, e);
}

/* Queries or keys of an average shard. The tables of the layout have not been checked yet. */
static int64_t ra__shard_tokens(const ra_desc *d, int keys) {
    const int64_t *rows = keys && d->layout.k_rows ? d->layout.k_rows : d->layout.q_rows;
    int64_t sum = 0;
    if (d->layout.kind != RA_LAYOUT_ARRAY)
        return ra__ceil_div(keys ? ra__k_most(d) : d->tokens, d->ranks);
    for (int32_t r = 0; r < d->ranks; r++)
        sum += ra__max(0, ra__min(rows[r], RA_MAX_POSITION));
    return ra__ceil_div(sum, d->ranks);
}

/* What a rank computes on a key. */
static double ra__flops_per_key(const ra_desc *d) {
    const double seen = d->mask.kind == RA_MASK_CAUSAL ? 0.5 : 1.0;
    return 2.0 * ((double)d->k_dim + d->v_dim) * d->q_heads * seen *
           (double)ra__max(1, ra__shard_tokens(d, 0));
}

/* Keys per message. A rank folds its own keys when its turn as an owner comes. Until then, and
 * after it, it lives on what the link brings; meanwhile the link fills its buffers and then stops.
 * So what can be hidden behind computing grows with the number of chunks per shard and with the
 * part of a shard that fits into the buffers. Where the transfer takes as long as computing, a
 * shard of 16 chunks with 8 buffers hides 89 to 96 % of it on 2 to 8 ranks, causal zigzag, against
 * 75 to 86 % with 1024 keys and 3 buffers (2 ranks and 4096 to 8192 keys). From 24 ranks on
 * buffers hardly matter, and around 16 ranks, where a chunk comes around the ring about when its
 * owner's last one leaves, 32 chunks are better. Beyond 64 ranks the schedule, whose cost is chunks
 * x ranks, allows fewer.
 *
 * A message also costs time of its own: what a rank computes on each is at least RA__CHUNK_WORK
 * flops, which takes some ms on a few cores, or takes twice the latency if that is known. */
enum { RA__CHUNK_LEAST = 256, RA__CHUNK_WORK = 1 << 29 };
static int32_t ra__default_chunk(const ra_desc *d) {
    const int64_t shard = ra__shard_tokens(d, 1);
    const int64_t most = ra__max(1024, ra__min(4096, ra__ceil_div(shard, 32)));
    const int64_t parts = d->ranks > 8 && d->ranks < 24 ? 32 : 16;
    const int64_t few = ra__max(1, 1024 / d->ranks);
    const double least = ra__rates_unknown(&d->rates)
                             ? (double)RA__CHUNK_WORK
                             : 2 * d->rates.link_latency_s * d->rates.flops_per_s;
    const double flops = ra__flops_per_key(d);
    int64_t chunk = ra__max(RA__CHUNK_LEAST, ra__ceil_div(shard, ra__min(parts, few)));
    if (flops * (double)chunk < least)
        chunk = flops * (double)most <= least ? most : (int64_t)(least / flops);
    return (int32_t)ra__min(chunk, most);
}

/* Receive buffers: three at least, and no more than a shard and two. With gradients, which make
 * messages up to three times as long, they hold fewer keys. While a rank computes half a shard, its
 * own, the link brings the rest of what it cannot bring during the other half: nothing if it is
 * twice as fast as computing. */
enum { RA__BUFFER_TOKENS = 8192, RA__TRAIN_TOKENS = 5120 };
static int32_t ra__default_buffers(const ra_desc *d) {
    const int64_t parts = ra__ceil_div(ra__shard_tokens(d, 1), d->chunk_tokens);
    const int64_t tokens = d->train ? RA__TRAIN_TOKENS : RA__BUFFER_TOKENS;
    const double bytes = (double)d->kv_heads * (double)(ra__row_bytes(d->k_dtype, d->k_dim) +
                         (d->v_in_k ? 0 : ra__row_bytes(d->v_dtype, d->v_dim)));
    int64_t most = ra__min(d->ranks < 24 ? 8 : 3, tokens / d->chunk_tokens);
    if (!ra__rates_unknown(&d->rates) &&
        2 * bytes * d->rates.flops_per_s <= ra__flops_per_key(d) * d->rates.link_bytes_per_s)
        most = 3;
    return (int32_t)ra__max(3, ra__min(most, parts + 2));
}

static void ra__defaults(ra_desc *d) {
    if (!d->sequences) d->sequences = 1;
    if (!d->ranks) d->ranks = 1;
    if (!d->layout.kind) d->layout.kind = RA_LAYOUT_CONTIGUOUS;
    if (d->v_in_k) d->v_dtype = d->k_dtype;
    if (d->train && !d->grad_dtype) d->grad_dtype = RA_F32;
    if (d->train && !d->backward_travel) d->backward_travel = ra__cheaper_travel(d);
    if (d->scale == 0.0f) d->scale = (float)(1.0 / ra__sqrt((double)d->k_dim));
    if (!d->mask.causal_block) d->mask.causal_block = 1;
    if (!d->threads) d->threads = 1;
    if (d->isa == RA_ISA_AUTO) d->isa = ra_isa_best();
    if (!d->chunk_tokens) d->chunk_tokens = ra__default_chunk(d);
    d->chunk_tokens = (int32_t)ra__round_up(d->chunk_tokens,
                                            d->layout.kind == RA_LAYOUT_ZIGZAG
                                                ? 2 * RA_BLOCK_TOKENS : RA_BLOCK_TOKENS);
    if (!d->buffers) d->buffers = ra__default_buffers(d);
}

/* Checks everything that follows no pointer to an array, then the arrays. kv_tokens may stay 0: see
 * ra__k_len. */
static ra_status ra__resolve(const ra_desc *d, ra_desc *out) {
    ra_error *e;
    ra_status s;
    if (!d) return RA_E_NULL;
    e = d->error;
    *out = *d;
    s = ra__check_fields(d, e);
    if (!s) s = ra__check_floats(d, e);
    if (!s) s = ra__check_blocks(d, e);
    if (!s) s = ra__check_shape(d, e);
    if (!s) s = ra__check_mask(d, e);
    if (!s) s = ra__check_layout(d, e);
    if (!s && !ra_isa_available(d->isa))
        s = ra__refuse(e, RA_E_ISA, "isa", "# is not available on this machine", d->isa);
    if (s) return s;
    ra__defaults(out);
    s = ra__check_documents(&out->mask, e);
    if (!s) s = ra__check_lengths(out, e);
    if (!s) s = ra__check_tables(out, e);
    return s ? s : ra__check_engine(out, e);
}

RINGATTN_API ra_desc ra_desc_make(int32_t q_heads, int32_t kv_heads, int32_t dim, int32_t dtype,
                                  int32_t mask) {
    ra_desc d;
    memset(&d, 0, sizeof d);
    d.q_heads = q_heads;
    d.kv_heads = kv_heads;
    d.k_dim = d.v_dim = dim;
    d.q_dtype = d.k_dtype = d.v_dtype = d.o_dtype = dtype;
    d.mask.kind = mask;
    return d;
}

RINGATTN_API ra_status ra_desc_resolve(const ra_desc *d, ra_desc *out) {
    ra_desc full;
    ra_status s = ra__resolve(d, &full);
    if (!s) s = ra__check_intervals(&full, d->error);
    if (s) return s;
    if (!out) return ra__refuse(d->error, RA_E_NULL, "out", "is required", 0);
    if (!full.tokens_of) full.kv_tokens = ra__k_most(&full);
    *out = full;
    return RA_OK;
}

/* RA_ORDER_DESCENDING if no row of a contiguous layout sees a key after itself; square: queries and
 * keys are the same positions. */
static int32_t ra__desc_order(const ra_desc *d, int square) {
    return square && !d->q_offset && d->layout.kind == RA_LAYOUT_CONTIGUOUS &&
                   d->mask.kind == RA_MASK_CAUSAL && d->mask.causal_block <= 1 && !d->mask.prefix
               ? RA_ORDER_DESCENDING : RA_ORDER_ASCENDING;
}

RA__ONCE_END

/* ========================================================================== FORWARD
 * Computes: some query rows against the keys of one chunk. In: the call's tensors and where the
 * keys are. Out: running (m, l, acc), or O and LSE after the last chunk. Every row meets the blocks
 * of the grid one by one in the order of SCHEDULE, and each block is one step of the online
 * softmax, so cutting keys into chunks and rows into tasks changes no bit. */

enum { RA__PANELS = 16 };              /* most query blocks of a task */
enum { RA__TILE_WORK = 64 };           /* work of a tile, in looks at one that turns out empty */
enum { RA__FIRST = 1, RA__LAST = 2 };  /* a chunk among those of a task */

/* One chunk, and where the rows of its segments are: in a message or in the owner's memory. A
 * segment that did not come along has no row that anybody here sees, and is never touched. */
typedef struct ra__item {
    ra__chunk c;
    ra__view k[2], v[2];               /* first row of each segment */
    const int32_t *pos[2];             /* ARRAY: its position; otherwise null */
} ra__item;

/* Points an item at its segments in the owner's memory: kv are the views of K and V, array the
 * positions of this sequence or null. */
static void ra__item_owned(ra__item *item, const ra__view kv[2], const int32_t *array) {
    for (int32_t i = 0; i < item->c.segs; i++) {
        int64_t row = item->c.seg[i].row;
        item->k[i] = ra__view_at(kv[0], item->c.sequence, row, 0);
        item->v[i] = ra__view_at(kv[1], item->c.sequence, row, 0);
        item->pos[i] = array ? array + row : NULL;
    }
}

/* Tiles of one task. */
typedef struct ra__tally { int64_t empty, partial, full; } ra__tally;

/* Panels [panel0, panel0 + count) of kv head `kv_head` of a sequence. Panel i is query block
 * i / (Hq / Hkv), head i % (Hq / Hkv) of the group. */
typedef struct ra__task {
    int32_t sequence, kv_head, count;
    int64_t panel0;
} ra__task;

/* Scratch of one thread for our kernels; geometry is made once a query block and shared by its
 * heads. */
typedef struct ra__scratch {
    ra__panel panel[RA__PANELS];
    ra__rows *rows[RA__PANELS];
    ra__seg seg[RA__PANELS];
    ra__bounds bounds[RA__PANELS];
    int32_t head[RA__PANELS];
    ra__bytes size;
    ra__key_scratch store;             /* k, v, pos: of size.batch blocks */
    int32_t *pos;
    ra__keys keys[RA__BATCH];          /* blocks that wait to be folded */
    int8_t kind[RA__PANELS][RA__BATCH];
    int32_t waiting;
    int64_t block;                     /* next one of the chunk in hand */
    int64_t folded;                    /* blocks folded since the task was loaded */
    int64_t left;                      /* work that this step may still do, see RA__TILE_WORK */
    ra__prefetch_list ahead;
    ra__task next;                     /* of this thread; count 0: not known */
    int32_t asked;                     /* panels of it whose queries were asked for */
} ra__scratch;

/* Query blocks of a task, which share each block of K and V: as many as fit in half of a level 2
 * cache with queries and sums. Bits do not depend on it.
 * PERF: Zen 5, 4096 tokens, 8 heads. AVX-512, D 128 (64 KB a panel), 8 against 4: 84 to 88 % of the
 * FMA peak. bf16, D 64 (24 KB), 16 against 8: 81.7 to 82.7 % of its peak, causal 79 to 80.3 %;
 * AVX-512, D 64 (32 KB), 16 against 8: 88.2 to 87.2 %. */
static int32_t ra__panels(const ra_desc *d) {
    ra__bytes size;
    ra__kernel_of(d)->sizes(&size, d, 1);
    if (size.q + size.acc > 64 * 1024) return RA__PANELS / 4;
    return size.q + size.acc > 24 * 1024 ? RA__PANELS / 2 : RA__PANELS;
}

static void ra__store_carve(ra__arena *a, const ra__bytes *size, int32_t shared,
                            ra__key_scratch *x) {
    x->shared = shared;
    x->s = (float *)ra__carve(a, size->s);
    x->k = (uint8_t *)ra__carve(a, size->k * size->batch);
    x->v = (uint8_t *)ra__carve(a, size->v * size->batch);
}

static void ra__scratch_carve(ra__arena *a, const ra_desc *d, int32_t panels, ra__scratch *x) {
    const int64_t lane = RA_BLOCK_TOKENS * (int64_t)sizeof(float);
    ra__kernel_of(d)->sizes(&x->size, d, panels > 1);
    for (int32_t i = 0; i < panels; i++) {
        x->panel[i].q = (float *)ra__carve(a, x->size.q);
        x->panel[i].acc = (float *)ra__carve(a, x->size.acc);
        x->panel[i].m = (float *)ra__carve(a, lane);
        x->panel[i].l = (float *)ra__carve(a, lane);
        x->rows[i] = (ra__rows *)ra__carve(a, (int64_t)sizeof(ra__rows));
    }
    ra__store_carve(a, &x->size, panels > 1, &x->store);
    x->pos = (int32_t *)ra__carve(a, lane * x->size.batch);
    memset(&x->ahead, 0, sizeof x->ahead);
    x->waiting = 0;
    x->block = x->folded = 0;
    x->next.count = x->asked = 0;
}

static int64_t ra__scratch_bytes(const ra_desc *d, int32_t panels) {
    ra__arena a = { NULL, 0 };
    ra__scratch x;
    ra__scratch_carve(&a, d, panels, &x);
    return a.used;
}

RA__INLINE int64_t ra__ml_at(const ra__work *w, int32_t b, int64_t row, int64_t head) {
    return (int64_t)b * w->ml_batch + row * w->ml_row + head * w->ml_head;
}

/* Factor of a panel: scores in kernels are times log2(e), under a softcap still natural. */
RA__INLINE float ra__q_factor(const ra_desc *d) {
    return d->softcap > 0 ? d->scale : (float)((double)d->scale * 1.4426950408889634074);
}

static ra__score ra__score_of(const ra__work *w, int32_t b, int64_t row, int32_t head) {
    const ra_bias *bias = &w->t->bias;
    ra__score s;
    memset(&s, 0, sizeof s);
    s.softcap = w->d->softcap;
    if (w->d->scores & RA_SCORE_ALIBI) s.slope = w->t->alibi[head];
    if (w->d->scores & RA_SCORE_BIAS) {
        s.bias = (const uint8_t *)bias->data + b * bias->batch_step + head * bias->head_step +
                 row * bias->row_step;
        s.bias_row_stride = bias->row_step;
        s.bias_key_stride = bias->key_step;
        s.bias_keys = bias->keys;
        s.bias_dtype = bias->dtype ? bias->dtype : RA_F32;
    }
    return s;
}

/* 1 if a bias of n keys, `step` bytes apart, hides them all: -inf, or from -2.36e38 down. */
static int ra__bias_hides_row(const uint8_t *at, int32_t n, int64_t step, int32_t dtype) {
    const int32_t size = dtype == RA_F32 ? 4 : 2;
    const uint64_t all = dtype == RA_F32 ? UINT64_C(0xff800000ff800000)
                                         : UINT64_C(0x0001000100010001) *
                                               (dtype == RA_F16 ? 0xfc00u : 0xff80u);
    int32_t i = 0;
    while (step == size && i + 8 / size <= n) {
        uint64_t word;
        memcpy(&word, at + i * size, sizeof word);
        if (word != all) break;
        i += 8 / size;
    }
    for (; i < n; i++) {
        uint16_t half = 0;
        float x;
        memcpy(size == 4 ? (void *)&x : (void *)&half, at + i * step, (size_t)size);
        if (dtype == RA_F16) x = ra__f32_of_f16(half);
        else if (dtype == RA_BF16) x = ra__f32_of_bf16(half);
        if (!(x <= -2.36e38f)) return 0;
    }
    return 1;
}

/* 1 if the bias hides the n keys at `pos` from the first `rows` rows of a block. Looks at the last
 * row first: under most masks it sees more than the others. */
static int ra__bias_hides(const ra__score *s, int32_t rows, const int32_t *pos, int32_t n) {
    int32_t run = 1;
    for (int32_t i = 0; i < n; i += run) {
        if (pos[i] < 0 || pos[i] >= s->bias_keys) return 0;
        for (run = 1; i + run < n && pos[i + run] == pos[i] + run; run++) continue;
        if (pos[i + run - 1] >= s->bias_keys) return 0;
        for (int32_t r = rows - 1; r >= 0; r--)
            if (!ra__bias_hides_row(ra__bias_row(s, r) + pos[i] * s->bias_key_stride, run,
                                    s->bias_key_stride, s->bias_dtype))
                return 0;
    }
    return 1;
}

static ra__drop ra__drop_of(const ra__work *w, int32_t b, int32_t head) {
    ra__drop x;
    memset(&x, 0, sizeof x);
    if (w->d->dropout <= 0.0f) return x;
    x.seed = w->t->seed;
    x.head = (uint32_t)head;
    x.sequence = (uint32_t)b;
    x.threshold = (uint32_t)((double)w->d->dropout * 4294967296.0);
    x.scale = (float)(1.0 / (1.0 - (double)w->d->dropout));
    return x;
}

/* State of panel i: empty at the first chunk, else from memory. */
static void ra__panel_load(const ra__work *w, const ra__task *t, ra__scratch *x, int32_t i,
                           int first) {
    const ra__panel *p = &x->panel[i];
    ra__view acc = ra__view_at(w->acc, t->sequence, x->seg[i].row, x->head[i]);
    int64_t at = ra__ml_at(w, t->sequence, x->seg[i].row, x->head[i]);
    int clear = first && w->clear;
    for (int32_t r = 0; r < RA_BLOCK_TOKENS; r++) {
        int live = !clear && r < p->rows;
        p->m[r] = live ? w->m[at + r * w->ml_row] : r < p->rows ? ra__neg_inf() : 0.0f;
        p->l[r] = live ? w->l[at + r * w->ml_row] : 0.0f;
    }
    w->kernel->load_acc(p, clear ? NULL : (const float *)(const void *)acc.data, acc.token / 4,
                        w->d->v_dim);
}

static void ra__panel_store(const ra__work *w, const ra__task *t, const ra__scratch *x,
                            int32_t i) {
    const ra__panel *p = &x->panel[i];
    ra__view acc = ra__view_at(w->acc, t->sequence, x->seg[i].row, x->head[i]);
    int64_t at = ra__ml_at(w, t->sequence, x->seg[i].row, x->head[i]);
    for (int32_t r = 0; r < p->rows; r++) {
        w->m[at + r * w->ml_row] = p->m[r];
        w->l[at + r * w->ml_row] = p->l[r];
    }
    w->kernel->store_acc(p, (float *)(uintptr_t)acc.data, acc.token / 4, w->d->v_dim);
}

/* Final factor of a row's sums and its LSE, from (m, l) in powers of two and an optional sink: one
 * more score in the denominator, once a row. A row without keys: factor 0, LSE -inf or the sink.
 * lse may be null.
 * PERF: logarithms that nobody wants: Zen 5, bf16, causal, 1024 tokens, D 64: 59 to 62 % of the
 * vdpbf16ps peak without them. */
static float ra__row_finish(float m, float l, const float *sink, float *lse) {
    const double ln2 = 0.69314718055994530942, log2e = 1.4426950408889634074;
    if (l == 0.0f) {
        if (lse) *lse = sink ? *sink : ra__neg_inf();
        return 0.0f;
    }
    if (!sink || ra__is_neg_inf(*sink)) {
        if (lse) *lse = (float)((double)m * ln2 + ra__log((double)l));
        return 1.0f / l;
    }
    double s = (double)*sink * log2e, top = s > (double)m ? s : (double)m;
    double keep = ra__exp(((double)m - top) * ln2);
    double sum = (double)l * keep + ra__exp((s - top) * ln2);
    if (lse) *lse = (float)(top * ln2 + ra__log(sum));
    return (float)(keep / sum);
}

/* Writes the rows of panel i to o and lse. */
static void ra__panel_finish(const ra__work *w, const ra__task *t, const ra__scratch *x,
                             int32_t i) {
    const ra__panel *p = &x->panel[i];
    ra__view o = ra__view_at(w->o, t->sequence, x->seg[i].row, x->head[i]);
    ra__view lse = ra__view_at(w->lse, t->sequence, x->seg[i].row, x->head[i]);
    const float *sink = w->d->scores & RA_SCORE_SINKS ? w->t->sinks + x->head[i] : NULL;
    float factor[RA_BLOCK_TOKENS], sum;
    for (int32_t r = 0; r < p->rows; r++) {
        factor[r] = ra__row_finish(p->m[r], p->l[r], sink, lse.data ? &sum : NULL);
        if (lse.data) memcpy((void *)(uintptr_t)(lse.data + r * lse.token), &sum, sizeof sum);
    }
    for (int32_t r = p->rows; r < RA_BLOCK_TOKENS; r++) factor[r] = 0.0f;
    w->kernel->store_o(p, (void *)(uintptr_t)o.data, o.token, w->d->o_dtype, w->d->v_dim, factor);
}

/* What the rows of seg see, as bounds and, per row, in `rows`. */
static ra__bounds ra__panel_mask(const ra__work *w, int32_t sequence, const ra__seg *seg,
                                 ra__rows *rows, ra__panel *p) {
    const int32_t *array = w->q_side.array;
    if (array) array += sequence * w->q_side.array_stride;
    p->geo = rows;
    int64_t end = ra__key_end(w->d, sequence, w->any_position);
    return ra__rows_fill(&w->d->mask, end, seg, array, rows);
}

/* Number of rows of a panel, how their scores are modified, and what to prefetch meanwhile. */
static void ra__panel_scores(const ra__work *w, int32_t sequence, const ra__seg *seg, int32_t head,
                             ra__prefetch_list *prefetch, ra__panel *p) {
    p->rows = (int32_t)seg->rows;
    p->score = ra__score_of(w, sequence, seg->row, head);
    p->drop = ra__drop_of(w, sequence, head);
    p->factor = ra__q_factor(w->d);
    p->prefetch = prefetch;
}

/* Rows, heads and geometry of the panels of a task. Reads none of the call's tensors. */
static void ra__task_rows(const ra__work *w, const ra__task *t, ra__scratch *x) {
    int32_t group = w->d->q_heads / w->d->kv_heads;
    int64_t tokens = ra__q_len(w->d, t->sequence);
    for (int32_t i = 0; i < t->count; i++) {
        int64_t block = (t->panel0 + i) / group;
        ra__panel *p = &x->panel[i];
        x->head[i] = t->kv_head * group + (int32_t)((t->panel0 + i) % group);
        if (i && block == (t->panel0 + i - 1) / group) {
            x->seg[i] = x->seg[i - 1];
            x->bounds[i] = x->bounds[i - 1];
            p->geo = x->panel[i - 1].geo;
        } else {
            (void)ra__side_block(&w->q_side, t->sequence, tokens, block, &x->seg[i]);
            x->bounds[i] = ra__panel_mask(w, t->sequence, &x->seg[i], x->rows[i], p);
        }
        ra__panel_scores(w, t->sequence, &x->seg[i], x->head[i], &x->ahead, p);
    }
}

/* Packed queries and state of the panels of a task that has its rows. */
static void ra__task_data(const ra__work *w, const ra__task *t, ra__scratch *x, int first) {
    for (int32_t i = 0; i < t->count; i++) {
        ra__view q = ra__view_at(w->q, t->sequence, x->seg[i].row, x->head[i]);
        w->kernel->load_q(&x->panel[i], q.data, q.token, w->d->q_dtype, w->d->k_dim);
        ra__panel_load(w, t, x, i, first);
    }
}

/* Prepares the panels of a task: rows, geometry, packed queries, state. */
static void ra__task_load(const ra__work *w, const ra__task *t, ra__scratch *x, int first) {
    ra__task_rows(w, t, x);
    ra__task_data(w, t, x, first);
}

/* Block s of segment i as it is stored; its positions stand in `pos`. */
static ra__keys ra__block_keys(const ra__item *item, int32_t i, const ra__seg *s, int32_t kv_head,
                               const int32_t *pos) {
    int64_t row = s->row - item->c.seg[i].row;
    ra__view k = ra__view_at(item->k[i], 0, row, kv_head);
    ra__view v = ra__view_at(item->v[i], 0, row, kv_head);
    ra__keys keys;
    memset(&keys, 0, sizeof keys);
    keys.n = (int32_t)s->rows;
    keys.pos = pos;
    keys.k = k.data;
    keys.k_stride = k.token;
    keys.v = v.data;
    keys.v_stride = v.token;
    return keys;
}

/* Folds the blocks that wait. */
static void ra__task_flush(const ra__work *w, const ra__task *t, ra__scratch *x) {
    for (int32_t j = 0; j < t->count && x->waiting; j++)
        w->kernel->fold(&x->panel[j], x->keys, x->kind[j], x->waiting, w->d, x->store.s);
    x->waiting = 0;
}

/* Block i of a chunk, the segment it belongs to, and its positions if they are an array's. */
static ra__seg ra__item_block(const ra__work *w, const ra__item *item, int64_t i, int32_t *which,
                              const int32_t **pos) {
    ra__seg s = ra__chunk_block(&item->c, w->order, i, which);
    *pos = item->pos[*which];
    if (*pos) *pos += s.row - item->c.seg[*which].row;
    return s;
}

/* What the panels of a task see of a block of keys; returns if any sees any. Positions of an array
 * count on one rank only: the figures of a plan call such blocks partial.
 * PERF: Zen 4, 32K keys of 8 lanes of a sharded cache: 13 % of a prefill. */
static int ra__task_kinds(const ra__work *w, const ra__task *t, const ra__scratch *x,
                          const ra__seg *s, const int32_t *pos, int8_t *kind) {
    const int known = !pos || w->look;
    int64_t first, last;
    int any = 0;
    ra__seg_span(s, pos, &first, &last);
    for (int32_t j = 0; j < t->count; j++) {
        kind[j] = (int8_t)(known ? ra__classify(&x->bounds[j], first, last) : RA__PARTIAL);
        any |= kind[j] != RA__EMPTY;
    }
    return any;
}

/* Empties the tiles of a block that a bias hides from all rows of their panels; returns if any is
 * left. In the tally they stay what the mask says: a plan knows no bias.
 * PERF: Zen 4, 1024 tokens, 8 heads, D 128, a causal mask given as a bias of f16 alone: 2.15 to
 * 1.3 times the time of RA_MASK_CAUSAL. */
static int ra__task_hide(const ra__task *t, const ra__scratch *x, const ra__keys *keys,
                         int8_t *kind) {
    int any = 0, hidden = 0;
    const uint8_t *looked = NULL;
    for (int32_t j = 0; j < t->count; j++) {
        const ra__panel *p = &x->panel[j];
        const int32_t rows = p->score.bias_row_stride ? p->rows : 1;
        if (kind[j] == RA__EMPTY) continue;
        if (!looked || p->score.bias != looked || p->geo != x->panel[j - 1].geo)
            hidden = ra__bias_hides(&p->score, rows, keys->pos, keys->n);
        looked = p->score.bias;
        if (hidden) kind[j] = RA__EMPTY;
        any |= !hidden;
    }
    return any;
}

/* Notes the queries of one more panel of the next task.
 * PERF: Zen 5, bf16, D 128, 2048 tokens: a window of 256 57.4 to 58.4, documents of 512 61.7 to
 * 62.8 % of the peak. */
static void ra__next_ahead(const ra__work *w, ra__scratch *x) {
    const ra_desc *d = w->d;
    const int32_t group = d->q_heads / d->kv_heads;
    const int64_t panel = x->next.panel0 + x->asked;
    ra__seg s;
    if (x->asked == x->next.count) return;
    x->asked++;
    (void)ra__side_block(&w->q_side, x->next.sequence, ra__q_len(d, x->next.sequence),
                         panel / group, &s);
    ra__view q = ra__view_at(w->q, x->next.sequence, s.row,
                             x->next.kv_head * group + panel % group);
    ra__prefetch_add(&x->ahead, q.data, q.token, s.rows, ra__row_bytes(d->q_dtype, d->k_dim));
}

/* Notes the next blocks from block i on that will be wanted. */
static void ra__task_ahead(const ra__work *w, const ra__task *t, const ra__item *item, int64_t i,
                           ra__scratch *x) {
    int64_t blocks = ra__chunk_blocks(&item->c);
    int64_t k_bytes = ra__row_bytes(w->d->k_dtype, w->d->k_dim);
    int64_t v_bytes = w->d->v_in_k ? 0 : ra__row_bytes(w->d->v_dtype, w->d->v_dim);
    int32_t n = 0;
    ra__prefetch_list *a = &x->ahead;
    memset(a, 0, sizeof *a);
    for (; i < blocks && n < x->size.batch; i++) {
        int8_t kind[RA__PANELS];
        int32_t which;
        const int32_t *pos;
        ra__seg s = ra__item_block(w, item, i, &which, &pos);
        if (!ra__task_kinds(w, t, x, &s, pos, kind)) continue;
        ra__keys keys = ra__block_keys(item, which, &s, t->kv_head, NULL);
        ra__prefetch_add(a, keys.k, keys.k_stride, keys.n, k_bytes);
        ra__prefetch_add(a, keys.v, keys.v_stride, keys.n, v_bytes);
        n++;
    }
    ra__next_ahead(w, x);
    a->step = 2 * RA_BLOCK_TOKENS * n / (32 * t->count * x->size.batch) + 1;
}

/* One block of keys, to be folded into the panels of a task that see any of it. */
static void ra__task_block(const ra__work *w, const ra__task *t, const ra__item *item, int64_t i,
                           ra__scratch *x, ra__tally *tally) {
    const int32_t at = x->waiting;
    int partial = 0;
    int8_t kind[RA__PANELS];
    int32_t which, *to = x->pos + at * RA_BLOCK_TOKENS;
    const int32_t *pos;
    ra__seg s = ra__item_block(w, item, i, &which, &pos);
    ra__key_scratch store = x->store;
    int any = ra__task_kinds(w, t, x, &s, pos, kind);
    for (int32_t j = 0; j < t->count; j++) {
        tally->empty += kind[j] == RA__EMPTY;
        tally->partial += kind[j] == RA__PARTIAL;
        tally->full += kind[j] == RA__FULL;
    }
    if (!any) return;
    x->folded++;
    ra__seg_positions(&s, pos, to);
    x->keys[at] = ra__block_keys(item, which, &s, t->kv_head, to);
    if ((w->d->scores & RA_SCORE_BIAS) && !ra__task_hide(t, x, &x->keys[at], kind)) return;
    for (int32_t j = 0; j < t->count; j++) {
        x->kind[j][at] = kind[j];
        partial |= kind[j] == RA__PARTIAL;
    }
    store.k += at * x->size.k;
    store.v += at * x->size.v;
    w->kernel->prepare(&x->keys[at], w->d, &store, partial);
    if (++x->waiting < x->size.batch) return;
    ra__task_ahead(w, t, item, i + 1, x);
    ra__task_flush(w, t, x);
}

static void ra__task_save(const ra__work *w, const ra__task *t, const ra__scratch *x, int last) {
    for (int32_t i = 0; i < t->count; i++) {
        if (last && w->finish) ra__panel_finish(w, t, x, i);
        else ra__panel_store(w, t, x, i);
    }
}

/* The blocks of a chunk from x->block on (0 at its start) until x->left is used up. 1: the chunk is
 * folded. */
static int ra__task_some(const ra__work *w, const ra__task *t, const ra__item *item,
                         ra__scratch *x, ra__tally *tally) {
    int64_t blocks = ra__chunk_blocks(&item->c);
    if (x->block == 0) x->ahead.count = 0;
    for (; x->block < blocks; x->block++) {
        int64_t done = tally->partial + tally->full;
        if (x->left <= 0) return 0;
        ra__task_block(w, t, item, x->block, x, tally);
        x->left -= t->count + RA__TILE_WORK * (tally->partial + tally->full - done);
    }
    ra__task_flush(w, t, x);
    return 1;
}

static void ra__task_fold(const ra__work *w, const ra__task *t, const ra__item *item,
                          ra__scratch *x, ra__tally *tally) {
    x->block = 0;
    x->left = INT64_MAX;
    (void)ra__task_some(w, t, item, x, tally);
}

/* Tasks of a sequence with `blocks` query blocks. */
RA__INLINE int64_t ra__tasks(const ra_desc *d, int64_t blocks, int32_t panels) {
    return d->kv_heads * ra__ceil_div(blocks * (d->q_heads / d->kv_heads), panels);
}

static ra__task ra__task_of(const ra_desc *d, int32_t b, int64_t blocks, int32_t panels,
                            int64_t index) {
    int64_t all = blocks * (d->q_heads / d->kv_heads), a_head = ra__ceil_div(all, panels);
    ra__task t;
    t.sequence = b;
    t.kv_head = (int32_t)(index / a_head);
    t.panel0 = index % a_head * panels;
    t.count = (int32_t)ra__min(panels, all - t.panel0);
    return t;
}

/* -------------------------------------------------------------------------- somebody else's kernel
 * The same for a block engine: a task is `block_queries` rows of a sequence, all heads; each
 * segment of a chunk is one call, and its partial result is merged into (m, l, acc). */
typedef struct ra__engine_scratch {
    int32_t thread;
    int32_t *q_pos, *lo, *hi, *doc, *keep, *k_pos;
    float *o, *lse;
} ra__engine_scratch;

RA__INLINE int64_t ra__engine_rows(const ra_desc *d) {
    return d->engine->block_queries ? d->engine->block_queries : 256;
}

static void ra__engine_carve(ra__arena *a, const ra_desc *d, int64_t chunk_rows,
                             ra__engine_scratch *x) {
    int64_t rows = ra__engine_rows(d);
    int32_t **list[5];
    list[0] = &x->q_pos; list[1] = &x->lo; list[2] = &x->hi; list[3] = &x->doc; list[4] = &x->keep;
    for (int32_t i = 0; i < 5; i++) *list[i] = (int32_t *)ra__carve(a, rows * 4);
    x->k_pos = (int32_t *)ra__carve(a, chunk_rows * 4);
    x->o = (float *)ra__carve(a, rows * d->q_heads * d->v_dim * 4);
    x->lse = (float *)ra__carve(a, rows * d->q_heads * 4);
}

/* Query rows of engine task `index` of sequence b: never across two segments. */
static int ra__engine_task(const ra__work *w, int32_t b, int64_t index, ra__seg *out) {
    int64_t rows = ra__engine_rows(w->d), tokens = ra__q_len(w->d, b);
    ra__seg s;
    ra__before at;
    int64_t from = 0;
    if (w->q_side.layout == RA_LAYOUT_RUNS) {
        from = ra__list_find(&w->q_side.list, RA__CALLS, index, &at);
        index -= at.n[RA__CALLS];
    }
    for (int64_t i = from; ra__side_seg(&w->q_side, b, tokens, i, &s); i++) {
        int64_t n = ra__ceil_div(s.rows, rows);
        if (index < n) {
            *out = ra__seg_part(&s, index * rows, ra__min(rows, s.rows - index * rows));
            return 1;
        }
        index -= n;
    }
    return 0;
}

static int64_t ra__engine_tasks(const ra_desc *d, const ra__side *side, int32_t b) {
    ra__seg s;
    int64_t n = 0;
    if (side->layout == RA_LAYOUT_RUNS) return ra__list_all(&side->list).n[RA__CALLS];
    for (int64_t i = 0; ra__side_seg(side, b, ra__q_len(d, b), i, &s); i++)
        n += ra__ceil_div(s.rows, ra__engine_rows(d));
    return n;
}

/* Merges the engine's normalised partial (o, lse natural) of one row and head into the state. */
static void ra__engine_merge(const float *o, float lse, float *m, float *l, float *acc,
                             int32_t dim) {
    const double ln2 = 0.69314718055994530942;
    float m2 = (float)((double)lse / ln2);
    if (ra__is_neg_inf(lse)) return;
    float top = *l == 0.0f || m2 > *m ? m2 : *m;
    float old = *l == 0.0f ? 0.0f : (float)ra__exp(((double)*m - (double)top) * ln2);
    float now = (float)ra__exp(((double)m2 - (double)top) * ln2);
    for (int32_t i = 0; i < dim; i++) acc[i] = acc[i] * old + o[i] * now;
    *l = *l * old + now;
    *m = top;
}

/* Element i of a row of the given dtype. */
RA__INLINE void ra__store_element(uint8_t *row, int32_t i, int32_t dtype, float x) {
    uint16_t half = dtype == RA_F16 ? ra__f16_of_f32(x) : ra__bf16_of_f32(x);
    if (dtype == RA_F32) memcpy(row + 4 * (int64_t)i, &x, 4);
    else memcpy(row + 2 * (int64_t)i, &half, 2);
}

/* Writes final rows from a state in memory: for engines and ra_state_finish. */
static void ra__rows_finish(const ra__work *w, int32_t b, const ra__seg *s, int32_t head) {
    float factor, sum;
    for (int64_t r = s->row; r < s->row + s->rows; r++) {
        int64_t at = ra__ml_at(w, b, r, head);
        const float *sink = w->d->scores & RA_SCORE_SINKS ? w->t->sinks + head : NULL;
        ra__view acc = ra__view_at(w->acc, b, r, head), o = ra__view_at(w->o, b, r, head);
        const float *from = (const float *)(const void *)acc.data;
        uint8_t *to = (uint8_t *)(uintptr_t)o.data;
        factor = ra__row_finish(w->m[at], w->l[at], sink, &sum);
        for (int32_t i = 0; i < w->d->v_dim; i++)
            ra__store_element(to, i, w->d->o_dtype, from[i] * factor);
        if (w->lse.data)
            memcpy((void *)(uintptr_t)ra__view_at(w->lse, b, r, head).data, &sum, sizeof sum);
    }
}

static void ra__rows_clear(const ra__work *w, int32_t b, const ra__seg *s, int32_t head) {
    for (int64_t r = s->row; r < s->row + s->rows; r++) {
        int64_t at = ra__ml_at(w, b, r, head);
        w->m[at] = ra__neg_inf();
        w->l[at] = 0.0f;
        memset((void *)(uintptr_t)ra__view_at(w->acc, b, r, head).data, 0,
               (size_t)w->d->v_dim * sizeof(float));
    }
}

/* Fills the geometry of an engine's rows; returns their bounds. */
static ra__bounds ra__engine_geometry(const ra__work *w, int32_t b, const ra__seg *rows,
                                      const ra__engine_scratch *x) {
    ra__bounds all = { INT32_MAX, INT32_MIN, INT32_MAX, INT32_MIN,
                       INT32_MIN, INT32_MAX, INT32_MIN, INT32_MAX };
    int64_t end = ra__key_end(w->d, b, w->any_position);
    const int32_t *array = w->q_side.array;
    if (array) array += b * w->q_side.array_stride + rows->row;
    for (int64_t i = 0; i < rows->rows; i++) {
        int64_t p = array ? array[i] : rows->pos + i * rows->stride;
        int32_t v[4];
        ra__mask_row(&w->d->mask, p, end, v);
        ra__bounds_row(&all, v);
        x->q_pos[i] = (int32_t)p;
        x->lo[i] = v[0];
        x->hi[i] = v[1];
        x->doc[i] = v[2];
        x->keep[i] = v[3];
    }
    return all;
}

/* One call of the engine: rows against segment i of the item's chunk. 0 or its error. */
static int ra__engine_call(const ra__work *w, const ra__item *item, const ra__seg *rows,
                           int32_t i, const ra__engine_scratch *x) {
    const ra_desc *d = w->d;
    int32_t b = item->c.sequence;
    ra__seg keys = item->c.seg[i];
    ra__bounds bounds = ra__engine_geometry(w, b, rows, x);
    ra__view q = ra__view_at(w->q, b, rows->row, 0), k, v;
    ra_block call;
    int64_t first, last;
    if (!item->k[i].data) return 0;    /* left off: no block of rows sees it, only their union */
    ra__chunk_span(&item->c, i, &first, &last);
    int kind = item->pos[i] ? RA__PARTIAL : ra__classify(&bounds, first, last);
    if (kind == RA__EMPTY) return 0;
    ra__chunk_positions(&item->c, i, item->pos[i], x->k_pos);
    k = item->k[i];
    v = item->v[i];
    memset(&call, 0, sizeof call);
    call.desc = d; call.tensors = w->t; call.sequence = b; call.thread = x->thread;
    call.partial = kind == RA__PARTIAL;
    call.q_row = rows->row; call.q_rows = rows->rows; call.k_rows = keys.rows;
    call.q = q.data; call.q_token_stride = q.token; call.q_head_stride = q.head;
    call.k = k.data; call.k_token_stride = k.token; call.k_head_stride = k.head;
    call.v = v.data; call.v_token_stride = v.token; call.v_head_stride = v.head;
    if (d->v_in_k) {
        call.v = k.data + ra__row_bytes(d->k_dtype, d->v_column);
        call.v_token_stride = k.token; call.v_head_stride = k.head;
    }
    call.q_pos = x->q_pos; call.k_pos = x->k_pos; call.lo = x->lo; call.hi = x->hi;
    call.doc = x->doc; call.keep_end = x->keep; call.o = x->o; call.lse = x->lse;
    int code = d->engine->fold(d->engine->ctx, &call);
    for (int64_t r = 0; code == 0 && r < rows->rows; r++) {
        for (int32_t h = 0; h < d->q_heads; h++) {
            int64_t ml = ra__ml_at(w, b, rows->row + r, h), part = r * d->q_heads + h;
            ra__view acc = ra__view_at(w->acc, b, rows->row + r, h);
            ra__engine_merge(x->o + part * d->v_dim, x->lse[part], w->m + ml, w->l + ml,
                             (float *)(uintptr_t)acc.data, d->v_dim);
        }
    }
    return code;
}

/* Tiles of one head in a piece of work that an engine did in one call. */
static void ra__engine_tally(const ra__work *w, int32_t b, const ra__seg *rows,
                             const ra__item *item, ra__tally *tally) {
    int64_t end = ra__key_end(w->d, b, w->any_position);
    int32_t which;
    for (int64_t i = 0; i < ra__ceil_div(rows->rows, RA_BLOCK_TOKENS); i++) {
        ra__seg block = ra__seg_block(rows, i);
        ra__bounds bounds = { 0, 0, 0, 0, 0, 0, 0, 0 };
        if (!item->pos[0]) bounds = ra__seg_bounds(&w->d->mask, end, &block);
        for (int64_t j = 0; j < ra__chunk_blocks(&item->c); j++) {
            ra__seg s = ra__chunk_block(&item->c, w->order, j, &which);
            int64_t first, last;
            ra__seg_span(&s, NULL, &first, &last);
            int kind = item->pos[0] ? RA__PARTIAL : ra__classify(&bounds, first, last);
            tally->empty += (kind == RA__EMPTY) * w->d->q_heads;
            tally->partial += (kind == RA__PARTIAL) * w->d->q_heads;
            tally->full += (kind == RA__FULL) * w->d->q_heads;
        }
    }
}

/* Some rows of sequence b against one chunk (null: none). */
static int ra__engine_run(const ra__work *w, int32_t b, const ra__seg *rows, const ra__item *item,
                          int edge, const ra__engine_scratch *x) {
    int code = 0;
    if (edge & RA__FIRST)
        for (int32_t h = 0; h < w->d->q_heads; h++) ra__rows_clear(w, b, rows, h);
    for (int32_t i = 0; item && code == 0 && i < item->c.segs; i++)
        code = ra__engine_call(w, item, rows, i, x);
    if (edge & RA__LAST)
        for (int32_t h = 0; code == 0 && h < w->d->q_heads; h++) ra__rows_finish(w, b, rows, h);
    return code;
}

/* ========================================================================== BACKWARD
 * Computes: gradients of some query rows and of the keys of one chunk, from O's gradient and the
 * global LSE. In: the call's tensors and where the keys are. Out: f32 sums of dQ, dK and dV, which
 * start at 0 and are handed to the caller once. Nothing of size Tq x Tk is stored: P is computed
 * again from Q, K and LSE, tile by tile (FlashAttention-2, arXiv 2307.08691, section 3.2).
 *
 * Order, so that bits depend neither on ranks nor threads nor chunks. Let a unit be a block of the
 * grid (zigzag: the pair of blocks {k, n - 1 - k}, front first). The dQ of a row takes blocks of
 * keys in the row's forward order. The dK and dV of a block of keys take query blocks by unit,
 * ascending and cyclic from their own unit on, of a query block all heads of the group: so a chunk
 * meets the query blocks of its own unit and later ones first (RA__AFTER), the earlier ones last
 * (RA__BEFORE); in a ring its sums start at its owner with the first, travel, and come home to the
 * second. Within both, query blocks ascend outside and key blocks are in forward's order inside.
 * With RA_TRAVEL_Q it is the other way round: dK and dV take query blocks from the first on, and dQ
 * takes keys by unit cyclically from the row's own on, so RA__AFTER is query units up to the key's.
 * Where queries and keys are not the same positions all is RA__AFTER. */

enum { RA__BACK_PANELS = 8,            /* most panels that share a block of keys and its sums */
       RA__BACK_READY = 256 };         /* most blocks of keys that stay in the kernel's form */

/* What all tasks of a call share. */
typedef struct ra__back {
    const ra__work *w;                 /* of forward: descriptor, tensors, order; views q, o, lse */
    const ra__kernel *kernel;
    ra__view d_o, d_q;                 /* the caller's */
    const float *delta;                /* [B][rows][Hq], strides of m and l in w; null: from O and
                                        * dO whenever a panel is loaded */
    int32_t square;                    /* 1: queries and keys are the same positions of the grid */
    const ra__chunk *rows;             /* RA_TRAVEL_Q: the query rows of the views; null: the
                                        * side's */
    const ra__bounds *stripe;          /* [stripes] what each `stripe_blocks` query blocks of a
                                        * sequence see together, by unit; null: not known */
    int64_t stripe_blocks, stripes;
} ra__back;

/* Where the sums of one task are, f32, strides in bytes; data null: not wanted. */
typedef struct ra__grads {
    ra__view dq;                       /* row 0 and first head of the group; token, head strides */
    ra__view dk[2], dv[2];             /* first row of each segment of the item, this kv head.
                                        * v_in_k: dv are columns of dk */
    int32_t edge;                      /* RA__FIRST: dQ starts at 0, dq is not read; RA__LAST: it
                                        * goes to the caller's d_q, dq is not written */
    int32_t bias;                      /* 1: add to the caller's d_bias */
} ra__grads;

/* What one task of a backward pass does with its keys: a kv head whole (both wanted, one part), or
 * with more threads than kv heads dQ of some query blocks or dK and dV of some blocks of keys: part
 * `part` of `parts`. */
typedef struct ra__share {
    ra__task t;
    int32_t want_q, want_k, part, parts;
} ra__share;

/* Points g at the sums of a chunk's keys, of one head, in arrays of all the shard's rows:
 * sums[0] of dK, sums[1] of dV, data null if they are not wanted. Under v_in_k dV is part of dK. */
static void ra__grads_at(const ra_desc *d, const ra__chunk *c, const ra__view sums[2],
                         int32_t head, ra__grads *g) {
    ra__view dk = sums[0], dv = sums[1];
    if (d->v_in_k) {
        dv = dk;
        if (dv.data) dv.data += (int64_t)d->v_column * 4;
    }
    memset(g->dk, 0, sizeof g->dk);
    memset(g->dv, 0, sizeof g->dv);
    for (int32_t i = 0; i < c->segs; i++) {
        g->dk[i] = ra__view_at(dk, c->sequence, c->seg[i].row, head);
        g->dv[i] = ra__view_at(dv, c->sequence, c->seg[i].row, head);
    }
}

/* A block of keys in the kernel's form, keys.n 0: not yet. */
typedef struct ra__ready { ra__keys keys; int32_t clean; } ra__ready;

/* Scratch of one thread. */
typedef struct ra__back_scratch {
    ra__back_panel panel[RA__BACK_PANELS];
    ra__rows *rows[RA__BACK_PANELS];
    ra__seg seg[RA__BACK_PANELS];
    ra__bounds bounds[RA__BACK_PANELS];
    int32_t head[RA__BACK_PANELS];
    ra__back_job tile[RA__BACK_PANELS];
    ra__prefetch_list ahead;
    int32_t next, asked;               /* panels of the next group; how many were asked for */
    ra__key_scratch store;             /* [most]: of block i, or of one that is not kept */
    ra__bytes size;
    ra__ready *ready;                  /* [most] */
    int64_t most;
    int32_t *pos;
    int32_t panels;                    /* as many as the kernel likes */
    int32_t phase;                     /* RA__AFTER | RA__BEFORE: which tiles of a chunk count */
    int kind[RA__BACK_PANELS];         /* classes of the tiles of one block of keys */
    ra__tally tally;
    ra__task part;                     /* the group in hand, if any is loaded */
    int64_t done, block;               /* panels before the group; its next block of keys */
    int32_t loaded, used;
    int64_t left;                      /* work that this step may still do, see RA__TILE_WORK */
    double sum;                        /* of a sink's gradient; with the next block: */
    int64_t sum_block;
    int32_t sum_sequence;
} ra__back_scratch;

/* For tasks of more panels than are taken at a time `blocks` blocks of keys are kept, at most. */
static void ra__back_carve(ra__arena *a, const ra_desc *d, int64_t blocks, ra__back_scratch *x) {
    const int64_t lane = RA_BLOCK_TOKENS * (int64_t)sizeof(float), tile = lane * RA_BLOCK_TOKENS;
    const int64_t k_dim = ra__round_up(d->k_dim, 32); /* as AMX pads */
    memset(x, 0, sizeof *x);
    ra__kernel_of(d)->sizes_back(&x->size, d);
    x->panels = x->size.batch;
    x->most = d->k_dtype == RA_F32 ? 1 : ra__min(blocks, RA__BACK_READY) + 1;
    x->size.batch = (int32_t)x->most;
    for (int32_t i = 0; i < x->panels; i++) {
        ra__back_panel *p = &x->panel[i];
        p->fwd.q = (float *)ra__carve(a, lane * k_dim);
        p->fwd.acc = (float *)ra__carve(a, lane * k_dim);
        p->fwd.m = (float *)ra__carve(a, lane);
        p->fwd.l = (float *)ra__carve(a, lane);
        p->g = (float *)ra__carve(a, lane * ra__round_up(d->v_dim, 32));
        p->q_rows = (float *)ra__carve(a, lane * ra__round_up(d->k_dim, RA_BLOCK_TOKENS));
        p->g_rows = (float *)ra__carve(a, lane * ra__round_up(d->v_dim, RA_BLOCK_TOKENS));
        x->rows[i] = (ra__rows *)ra__carve(a, (int64_t)sizeof(ra__rows));
    }
    x->tile->p = (float *)ra__carve(a, tile);
    x->tile->ds = (float *)ra__carve(a, tile);
    x->tile->cap = (float *)ra__carve(a, d->softcap > 0.0f ? tile : 0);
    x->tile->drop = (float *)ra__carve(a, d->dropout > 0.0f ? tile : 0);
    ra__store_carve(a, &x->size, 1, &x->store);
    x->ready = (ra__ready *)ra__carve(a, x->most * (int64_t)sizeof *x->ready);
    x->tile->form = x->store.s;
    x->pos = (int32_t *)ra__carve(a, lane);
}

static int64_t ra__back_scratch_bytes(const ra_desc *d) {
    ra__arena a = { NULL, 0 };
    ra__back_scratch x;
    ra__back_carve(&a, d, 0, &x);
    return a.used;
}

/* Unit of the block at position pos of sequence b. */
static int64_t ra__unit(const ra_desc *d, int32_t b, int64_t pos) {
    int64_t block = pos / RA_BLOCK_TOKENS;
    int64_t last = ra__ceil_div(ra__q_len(d, b), RA_BLOCK_TOKENS) - 1;
    return d->layout.kind == RA_LAYOUT_ZIGZAG ? ra__min(block, last - block) : block;
}

/* Query block i of sequence b by unit, ascending: zigzag's two segments in turn, as keys are. */
static void ra__back_block(const ra__back *x, int32_t b, int64_t i, ra__seg *out) {
    const ra__work *w = x->w;
    int64_t tokens = ra__q_len(w->d, b);
    int32_t which;
    ra__chunk c;
    if (x->rows) {
        *out = ra__chunk_block(x->rows, RA_ORDER_ASCENDING, i, &which);
        return;
    }
    if (w->q_side.layout != RA_LAYOUT_ZIGZAG) {
        (void)ra__side_block(&w->q_side, b, tokens, i, out);
        return;
    }
    ra__chunk_side(&w->q_side, b, tokens, &c);
    *out = ra__chunk_block(&c, RA_ORDER_ASCENDING, i, &which);
}

static ra__source ra__source_of(ra__view v, int32_t dtype, int32_t dim) {
    ra__source s;
    s.data = v.data;
    s.stride = v.token;
    s.dtype = dtype;
    s.dim = dim;
    return s;
}

/* Weights can be made again from this LSE: half an ulp of it and half an ulp of it times log2(e)
 * change them by a factor of at most e. A row of larger scores, such as one of which -1e9 masks
 * every key, has an LSE that says nothing of the number of its keys. */
RA__INLINE int ra__lse_serves(float lse) {
    return !(lse <= -8388608.0f) && !(lse >= 8388608.0f && lse <= 3.40282347e38f);
}

/* LSE in powers of two and delta of a panel's rows. A row without keys has weights 0 then, as has
 * one whose LSE does not serve. */
static void ra__back_stats(const ra__back *b, const ra__task *t, ra__back_scratch *x, int32_t i) {
    const ra__work *w = b->w;
    const ra__panel *p = &x->panel[i].fwd;
    int64_t row = x->seg[i].row, at = ra__ml_at(w, t->sequence, row, x->head[i]);
    ra__view lse = ra__view_at(w->lse, t->sequence, row, x->head[i]);
    ra__source o = ra__source_of(ra__view_at(w->o, t->sequence, row, x->head[i]), w->d->o_dtype,
                                 w->d->v_dim);
    ra__source g = ra__source_of(ra__view_at(b->d_o, t->sequence, row, x->head[i]),
                                 w->d->o_dtype, w->d->v_dim);
    if (!b->delta) b->kernel->deltas(p->l, &o, &g, p->rows);
    for (int32_t r = 0; r < RA_BLOCK_TOKENS; r++) {
        float sum = ra__neg_inf();
        if (r < p->rows) memcpy(&sum, lse.data + r * lse.token, sizeof sum);
        if (b->delta && r < p->rows) p->l[r] = b->delta[at + r * w->ml_row];
        p->m[r] = (float)((double)sum * 1.4426950408889634074);
        if (ra__lse_serves(sum)) continue;
        p->m[r] = -ra__neg_inf();
        p->l[r] = 0.0f;
    }
}

/* The caller's gradient of the bias for panel i. */
static void ra__back_bias(const ra__back *b, const ra__task *t, ra__back_scratch *x, int32_t i,
                          int wanted) {
    const ra_bias_out *bias = &b->w->t->d_bias;
    ra__back_panel *p = &x->panel[i];
    p->d_bias = NULL;
    if (!wanted || !bias->data) return;
    p->d_bias = (uint8_t *)bias->data + t->sequence * bias->batch_step +
                x->head[i] * bias->head_step + x->seg[i].row * bias->row_step;
    p->d_bias_row_stride = bias->row_step;
    p->d_bias_key_stride = bias->key_step;
    p->d_bias_keys = bias->keys;
}

/* Rows, heads and geometry of the panels of a group. */
static void ra__back_geometry(const ra__back *b, const ra__task *t, ra__back_scratch *x) {
    int32_t group = b->w->d->q_heads / b->w->d->kv_heads;
    for (int32_t i = 0; i < t->count; i++) {
        int64_t block = (t->panel0 + i) / group;
        ra__panel *p = &x->panel[i].fwd;
        x->head[i] = t->kv_head * group + (int32_t)((t->panel0 + i) % group);
        if (i && block == (t->panel0 + i - 1) / group) {
            x->seg[i] = x->seg[i - 1];
            x->bounds[i] = x->bounds[i - 1];
            p->geo = x->panel[i - 1].fwd.geo;
        } else {
            ra__back_block(b, t->sequence, block, &x->seg[i]);
            x->bounds[i] = ra__panel_mask(b->w, t->sequence, &x->seg[i], x->rows[i], p);
        }
        ra__panel_scores(b->w, t->sequence, &x->seg[i], x->head[i], &x->ahead, p);
    }
}

/* Where the sums of dQ of panel i are. */
RA__INLINE ra__view ra__back_dq(const ra__task *t, const ra__back *b, const ra__grads *g,
                                const ra__back_scratch *x, int32_t i) {
    int32_t group = b->w->d->q_heads / b->w->d->kv_heads;
    return ra__view_at(g->dq, 0, x->seg[i].row, x->head[i] - t->kv_head * group);
}

/* Q, dO, statistics and sums of the panels of a group; `used` 0: only the sums. */
static void ra__back_load(const ra__back *b, const ra__task *t, const ra__grads *g, int used,
                          ra__back_scratch *x) {
    const ra_desc *d = b->w->d;
    for (int32_t i = 0; i < t->count; i++) {
        ra__back_panel *p = &x->panel[i];
        ra__view q = ra__view_at(b->w->q, t->sequence, x->seg[i].row, x->head[i]);
        ra__view d_o = ra__view_at(b->d_o, t->sequence, x->seg[i].row, x->head[i]);
        ra__source from[2];
        from[0] = ra__source_of(q, d->q_dtype, d->k_dim);
        from[1] = ra__source_of(d_o, d->o_dtype, d->v_dim);
        if (used) {
            b->kernel->load_back(p, &from[0], &from[1]);
            ra__back_stats(b, t, x, i);
            ra__back_bias(b, t, x, i, g->bias);
        }
        if (!g->dq.data) continue;
        ra__view dq = ra__back_dq(t, b, g, x, i);
        if (g->edge & RA__FIRST) dq.data = NULL;
        b->kernel->load_acc(&p->fwd, (const float *)(const void *)dq.data, dq.token / 4, d->k_dim);
    }
}

/* Sums of dQ go to memory, or after the last chunk to the caller. */
static void ra__back_save(const ra__back *b, const ra__task *t, const ra__grads *g,
                          ra__back_scratch *x) {
    const ra_desc *d = b->w->d;
    for (int32_t i = 0; i < t->count && g->dq.data; i++) {
        const ra__panel *p = &x->panel[i].fwd;
        ra__view dq = ra__back_dq(t, b, g, x, i);
        if (!(g->edge & RA__LAST)) {
            b->kernel->store_acc(p, (float *)(uintptr_t)dq.data, dq.token / 4, d->k_dim);
            continue;
        }
        b->kernel->store_acc(p, p->q, d->k_dim, d->k_dim); /* Q is not needed any more */
        dq = ra__view_at(b->d_q, t->sequence, x->seg[i].row, x->head[i]);
        for (int32_t r = 0; r < p->rows; r++)
            b->kernel->put_grad((void *)(uintptr_t)(dq.data + r * dq.token),
                                p->q + (int64_t)r * d->k_dim, d->grad_dtype, d->k_dim);
    }
}

/* Class of one block of keys (segment `which` of the item) for each panel of a group in a phase;
 * tiles of the other phase are empty and not counted. Returns RA__PARTIAL if any tile is, else
 * RA__FULL or RA__EMPTY. */
static int ra__back_kinds(const ra__back *b, const ra__task *t, const ra__seg *s,
                          const int32_t *pos, ra__back_scratch *x) {
    int64_t first, last;
    int any = 0, partial = 0;
    ra__seg_span(s, pos, &first, &last);
    for (int32_t j = 0; j < t->count; j++) {
        int64_t q = ra__unit(b->w->d, t->sequence, x->seg[j].pos);
        int64_t k = ra__unit(b->w->d, t->sequence, s->pos);
        int32_t own = RA__AFTER;
        if (b->square && (b->w->d->backward_travel == RA_TRAVEL_Q ? q > k : q < k))
            own = RA__BEFORE;
        x->kind[j] = RA__EMPTY;
        if (!(x->phase & own)) continue;
        x->kind[j] = pos ? RA__PARTIAL : ra__classify(&x->bounds[j], first, last);
        any |= x->kind[j] != RA__EMPTY;
        partial |= x->kind[j] == RA__PARTIAL;
        x->tally.empty += x->kind[j] == RA__EMPTY;
        x->tally.partial += x->kind[j] == RA__PARTIAL;
        x->tally.full += x->kind[j] == RA__FULL;
    }
    return partial ? RA__PARTIAL : any ? RA__FULL : RA__EMPTY;
}

/* Block i of a task's keys in the kernel's form, kept for the groups of panels to come if there is
 * room. Returns its store.
 * PERF: rows of several heads lie apart and are slow to get again and again. Zen 5, bf16, 4096
 * tokens of 8 heads, D 64 and 128: 82 to 83 and 81 to 84 % of the peak. */
static const void *ra__back_prepare(const ra__back *b, ra__back_scratch *x, int64_t i,
                                    ra__keys *keys, int partial) {
    const int64_t at = ra__min(i, x->most - 1), kept = i < x->most - 1;
    ra__ready *r = &x->ready[at];
    ra__key_scratch store = x->store;
    store.k += at * x->size.k;
    store.v += at * x->size.v;
    if (!kept || r->keys.n == 0) {
        r->keys = *keys;
        r->clean = b->kernel->prepare_back(&r->keys, b->w->d, &store, kept || partial);
    }
    r->keys.pos = keys->pos;
    *keys = r->keys;
    x->tile->k_clean = r->clean;
    return store.k;
}

/* Notes what will be wanted next: the keys of block i and, in a group's last blocks, one after the
 * other the panels of the next group. */
static void ra__back_ahead(const ra__back *b, const ra__task *t, const ra__item *item, int64_t i,
                           ra__back_scratch *x) {
    const ra_desc *d = b->w->d;
    const int32_t group = d->q_heads / d->kv_heads;
    const int64_t left = ra__chunk_blocks(&item->c) - i, panel = t->panel0 + t->count + x->asked;
    int64_t rows = 0;
    ra__prefetch_list *a = &x->ahead;
    memset(a, 0, sizeof *a);
    if (left > 0 && (i >= x->most - 1 || x->ready[i].keys.n == 0)) {
        int32_t which;
        ra__seg s = ra__chunk_block(&item->c, b->w->order, i, &which);
        ra__keys keys = ra__block_keys(item, which, &s, t->kv_head, NULL);
        ra__prefetch_add(a, keys.k, keys.k_stride, keys.n, ra__row_bytes(d->k_dtype, d->k_dim));
        if (!d->v_in_k)
            ra__prefetch_add(a, keys.v, keys.v_stride, keys.n, ra__row_bytes(d->v_dtype, d->v_dim));
    } else if (left > 0) {
        ra__prefetch_add(a, x->store.k + i * x->size.k, 256, x->size.k / 256, 256);
        ra__prefetch_add(a, x->store.v + i * x->size.v, 256, x->size.v / 256, 256);
    }
    if (x->asked < x->next && left < x->next - x->asked) {
        const int64_t o_bytes = ra__row_bytes(d->o_dtype, d->v_dim);
        const int32_t head = t->kv_head * group + (int32_t)(panel % group);
        ra__view q, o, d_o, lse;
        ra__seg s;
        ra__back_block(b, t->sequence, panel / group, &s);
        q = ra__view_at(b->w->q, t->sequence, s.row, head);
        o = ra__view_at(b->w->o, t->sequence, s.row, head);
        d_o = ra__view_at(b->d_o, t->sequence, s.row, head);
        lse = ra__view_at(b->w->lse, t->sequence, s.row, head);
        ra__prefetch_add(a, q.data, q.token, s.rows, ra__row_bytes(d->q_dtype, d->k_dim));
        ra__prefetch_add(a, d_o.data, d_o.token, s.rows, o_bytes);
        ra__prefetch_add(a, lse.data, lse.token, s.rows, 4);
        if (!b->delta) ra__prefetch_add(a, o.data, o.token, s.rows, o_bytes);
        x->asked++;
    }
    for (int32_t n = 0; n < a->count; n++) rows += a->rows[n];
    a->step = (int32_t)ra__ceil_div(rows, 16 * t->count);
}

/* One block of keys against the panels of a group. */
static void ra__back_tiles(const ra__back *b, const ra__task *t, const ra__item *item, int64_t i,
                           const ra__grads *g, ra__back_scratch *x) {
    const ra_desc *d = b->w->d;
    int32_t which;
    ra__seg s = ra__chunk_block(&item->c, b->w->order, i, &which);
    int64_t row = s.row - item->c.seg[which].row;
    const int32_t *pos = item->pos[which] ? item->pos[which] + row : NULL;
    ra__view dk = ra__view_at(g->dk[which], 0, row, 0), dv = ra__view_at(g->dv[which], 0, row, 0);
    ra__back_job *tile = x->tile;
    ra__keys keys;
    int32_t count = 0;
    int any = ra__back_kinds(b, t, &s, pos, x);
    if (any == RA__EMPTY) return;
    ra__back_ahead(b, t, item, i + 1, x);
    ra__seg_positions(&s, pos, x->pos);
    keys = ra__block_keys(item, which, &s, t->kv_head, x->pos);
    tile->k_form = ra__back_prepare(b, x, i, &keys, any == RA__PARTIAL);
    tile->keys = &keys;
    tile->k_dim = d->k_dim;
    tile->v_dim = d->v_dim;
    tile->scale = d->scale;
    tile->want_q = g->dq.data != NULL;
    tile->v_in_k = d->v_in_k;
    tile->dk = (float *)(uintptr_t)dk.data;
    tile->dv = (float *)(uintptr_t)dv.data;
    tile->dk_stride = dk.token / 4;
    tile->dv_stride = dv.token / 4;
    for (int32_t j = 0; j < t->count; j++) {
        if (x->kind[j] == RA__EMPTY) continue;
        tile[count] = tile[0];
        tile[count].panel = &x->panel[j];
        tile[count++].partial = x->kind[j] == RA__PARTIAL;
    }
    x->left -= RA__TILE_WORK * count;
    b->kernel->fold_back(tile, count);
}

/* Does any tile of a group and the item's chunk count in this phase? If not, all are counted. */
static int ra__back_any(const ra__back *b, const ra__task *t, const ra__item *item,
                        ra__back_scratch *x) {
    ra__tally before = x->tally;
    int any = 0;
    int64_t blocks = ra__chunk_blocks(&item->c);
    int32_t which;
    for (int64_t i = 0; i < blocks && !any; i++) {
        ra__seg s = ra__chunk_block(&item->c, b->w->order, i, &which);
        const int32_t *pos = item->pos[which];
        if (pos) pos += s.row - item->c.seg[which].row;
        any = ra__back_kinds(b, t, &s, pos, x) != RA__EMPTY;
    }
    if (any) x->tally = before;
    return any;
}

/* May rows with these bounds see any key of the chunk? */
static int ra__chunk_seen(const ra__chunk *c, const ra__bounds *b) {
    int64_t first, last;
    for (int32_t i = 0; i < c->segs; i++) {
        ra__chunk_span(c, i, &first, &last);
        if (c->seg[i].rows && ra__classify(b, first, last) != RA__EMPTY) return 1;
    }
    return 0;
}

/* Panels from x->done on, in whole stripes, that see nothing of the item's chunk; 0: the first may
 * see some of it. */
static int64_t ra__back_blind(const ra__back *b, const ra__task *t, const ra__item *item,
                              ra__back_scratch *x) {
    const int64_t stripe = b->stripe_blocks * (b->w->d->q_heads / b->w->d->kv_heads);
    int64_t at = t->panel0 + x->done, end = t->panel0 + t->count;
    const ra__bounds *seen;
    if (!b->stripe) return 0;
    seen = b->stripe + t->sequence * b->stripes;
    for (; at < end && !ra__chunk_seen(&item->c, &seen[at / stripe]); at += stripe - at % stripe)
        x->left--;
    return ra__min(at, end) - t->panel0 - x->done;
}

/* Loads the next group of panels; 0: they have nothing to do here. Tiles of panels that see nothing
 * of the chunk are all counted in the first of both phases. */
static int ra__back_open(const ra__back *b, const ra__task *t, const ra__item *item,
                         const ra__grads *g, ra__back_scratch *x) {
    const int edge = g->edge && g->dq.data;
    const int64_t blind = ra__back_blind(b, t, item, x), rest = t->count - x->done;
    const int64_t blocks = ra__chunk_blocks(&item->c);
    x->part = *t;
    x->part.panel0 = t->panel0 + x->done;
    x->part.count = (int32_t)(blind && !edge ? blind : ra__min(x->panels, blind ? blind : rest));
    if (blind && (x->phase & RA__AFTER)) x->tally.empty += x->part.count * blocks;
    if (blind && !edge) return 0;
    ra__back_geometry(b, &x->part, x);
    x->used = !blind && ra__back_any(b, &x->part, item, x);
    x->left -= x->part.count * (1 + blocks);
    if (!x->used && !edge) return 0;
    x->next = (int32_t)ra__min(x->panels, rest - x->part.count);
    x->asked = 0;
    x->block = 0;
    ra__back_load(b, &x->part, g, x->used, x);
    x->left -= RA__TILE_WORK * x->part.count;
    return 1;
}

/* A task against one chunk begins. */
static void ra__back_begin(ra__back_scratch *x) {
    for (int64_t i = 0; i < x->most; i++) x->ready[i].keys.n = 0;
    x->done = 0;
    x->loaded = 0;
}

/* The panels of a task (any number) against one chunk, in those tiles that belong to a phase of
 * x->phase (RA__AFTER, RA__BEFORE or both), from where the last call stopped until x->left is used
 * up. Panel i is query block i / group by unit, head i % group. 1: all are done. */
static int ra__back_some(const ra__back *b, const ra__task *t, const ra__item *item,
                         const ra__grads *g, ra__back_scratch *x) {
    int64_t blocks = ra__chunk_blocks(&item->c);
    uint32_t mode = ra__fp_enter();
    for (; x->done < t->count && x->left > 0; x->done += x->part.count) {
        if (!x->loaded) x->loaded = ra__back_open(b, t, item, g, x);
        if (!x->loaded) continue;
        for (; x->block < blocks && x->used && x->left > 0; x->block++)
            ra__back_tiles(b, &x->part, item, x->block, g, x);
        if (x->block < blocks && x->used) break;
        ra__back_save(b, &x->part, g, x);
        x->loaded = 0;
    }
    ra__fp_leave(mode);
    return x->done >= t->count;
}

/* All of that in one go. */
static void ra__back_task(const ra__back *b, const ra__task *t, const ra__item *item,
                          const ra__grads *g, ra__back_scratch *x) {
    ra__back_begin(x);
    x->left = INT64_MAX;
    (void)ra__back_some(b, t, item, g, x);
}

/* The sums of a chunk's keys, of one kv head, begin at 0. Under v_in_k dV is part of dK. */
static void ra__grads_clear(const ra_desc *d, const ra__chunk *c, const ra__grads *g) {
    for (int32_t i = 0; i < c->segs; i++)
        for (int64_t j = 0; j < c->seg[i].rows; j++) {
            ra__view k = ra__view_at(g->dk[i], 0, j, 0), v = ra__view_at(g->dv[i], 0, j, 0);
            if (k.data) memset((void *)(uintptr_t)k.data, 0, (size_t)d->k_dim * 4);
            if (v.data && !d->v_in_k)
                memset((void *)(uintptr_t)v.data, 0, (size_t)d->v_dim * 4);
        }
}

/* Hands the sums of a chunk's keys, of one kv head, to the caller's d_k and d_v. */
static void ra__grads_finish(const ra__back *b, const ra__chunk *c, int32_t kv_head,
                             const ra__view out[2], const ra__grads *g) {
    const ra_desc *d = b->w->d;
    uint32_t mode = ra__fp_enter();
    for (int32_t i = 0; i < c->segs; i++)
        for (int64_t j = 0; j < c->seg[i].rows; j++) {
            int64_t row = c->seg[i].row + j;
            void *dk = (void *)(uintptr_t)ra__view_at(out[0], c->sequence, row, kv_head).data;
            void *dv = (void *)(uintptr_t)ra__view_at(out[1], c->sequence, row, kv_head).data;
            ra__view k = ra__view_at(g->dk[i], 0, j, 0), v = ra__view_at(g->dv[i], 0, j, 0);
            ra__prefetch_row((const float *)dk, out[0].token, d->k_dim * 4);
            ra__prefetch_row((const float *)dv, out[1].token, d->v_dim * 4);
            if (dk)
                b->kernel->put_grad(dk, (const float *)(const void *)k.data, d->grad_dtype,
                                    d->k_dim);
            if (dv)
                b->kernel->put_grad(dv, (const float *)(const void *)v.data, d->grad_dtype,
                                    d->v_dim);
        }
    ra__fp_leave(mode);
}

/* The part of the gradient of a sink that one query block has. */
static double ra__back_sink_block(const ra__back *b, int32_t head, const ra__task *t, int64_t i,
                                  ra__back_scratch *x) {
    const double ln2 = 0.69314718055994530942;
    const float sink = b->w->t->sinks[head];
    const int32_t *pos = b->w->q_side.array;       /* empty cells have dO, but no part in this */
    const ra__panel *p = &x->panel[0].fwd;
    double sum = x->sum;
    if (pos) pos += t->sequence * b->w->q_side.array_stride;
    ra__back_block(b, t->sequence, i, &x->seg[0]);
    x->head[0] = head;
    x->panel[0].fwd.rows = (int32_t)x->seg[0].rows;
    ra__back_stats(b, t, x, 0);
    for (int32_t r = 0; r < p->rows && !ra__is_neg_inf(sink); r++)
        if (!ra__is_neg_inf(-p->m[r]) && !(pos && pos[x->seg[0].row + r] < 0))
            sum -= ra__exp((double)sink - (double)p->m[r] * ln2) * (double)p->l[r];
    return sum;
}

/* Gradient of the sinks of one head: - sum over rows of exp(sink - LSE) delta, of this rank's rows,
 * sequence by sequence, added once. Goes on where the last call stopped, until x->left is used up;
 * 1: done. */
static int ra__back_sink_some(const ra__back *b, int32_t head, ra__back_scratch *x) {
    const ra_desc *d = b->w->d;
    uint32_t mode = ra__fp_enter();
    ra__task t;
    memset(&t, 0, sizeof t);
    t.count = 1;
    for (; x->sum_sequence < d->sequences; x->sum_sequence++, x->sum_block = 0) {
        int64_t n;
        t.sequence = x->sum_sequence;
        n = ra__side_blocks(&b->w->q_side, t.sequence, ra__q_len(d, t.sequence));
        for (; x->sum_block < n && x->left > 0; x->sum_block++) {
            x->sum = ra__back_sink_block(b, head, &t, x->sum_block, x);
            x->left -= RA__TILE_WORK;
        }
        if (x->sum_block < n) break;
    }
    ra__fp_leave(mode);
    if (x->sum_sequence < d->sequences) return 0;
    b->w->t->d_sinks[head] += (float)x->sum;
    x->sum = 0.0;
    x->sum_block = x->sum_sequence = 0;
    return 1;
}

static void ra__back_sink(const ra__back *b, int32_t head, ra__back_scratch *x) {
    x->left = INT64_MAX;
    (void)ra__back_sink_some(b, head, x);
}

/* ========================================================================== LOCAL
 * One call on one rank: its checks, and attention by tasks that the threads (ith of nth) share. In:
 * a descriptor and tensors. Out: O and LSE. No plan, no ring, no allocation. */

/* A call on one rank: the work, the side of the keys, and where they are. */
typedef struct ra__local {
    ra_desc d;
    ra__work w;
    ra__side k_side;
    ra__cursor q_cursor, k_cursor;     /* of the sides, if they are runs: a call is one thread's */
    ra__view kv[2];
    int64_t rows[2];                   /* of queries and keys in the longest sequence: views */
    int32_t pairs;                     /* 1: lanes of panels are (token, head) pairs */
} ra__local;

/* Positions given with the call replace the layout's. */
static ra_status ra__local_side(const ra_desc *d, const ra_positions *p, int keys, ra__side *side,
                                ra__cursor *cursor) {
    ra_error *e = d->error;
    int64_t rows = keys ? ra__k_most(d) : d->tokens, sum = 0;
    memset(side, 0, sizeof *side);
    side->layout = d->layout.kind == RA_LAYOUT_STRIPED ? RA_LAYOUT_CONTIGUOUS : d->layout.kind;
    side->ranks = 1;
    side->offset = keys ? 0 : d->q_offset;
    if (!ra__positions_set(p)) return keys ? RA_OK : ra__check_intervals(d, e);
    if (d->tokens_of || d->kv_tokens_of)
        return ra__refuse(e, RA_E_SHAPE, keys ? "t.k_pos" : "t.q_pos",
                          "give every sequence the same rows: no tokens_of, no kv_tokens_of", 0);
    if (p->array) {
        side->layout = RA_LAYOUT_ARRAY;
        side->array = p->array;
        side->array_stride = p->batch_step;
        side->array_rows = rows;
        if (p->runs)
            return ra__refuse(e, RA_E_SHAPE, keys ? "t.k_pos.runs" : "t.q_pos.runs",
                              "beside an array", 0);
        return ra__check_array(d, p, rows, keys, e);
    }
    side->layout = RA_LAYOUT_RUNS;
    side->list.run = p->runs;
    side->list.count = p->count;
    side->list.cursor = cursor;
    memset(cursor, 0, sizeof *cursor);
    if (p->count < 0)
        return ra__refuse(e, RA_E_RANGE, keys ? "t.k_pos.count" : "t.q_pos.count",
                          "# is negative", p->count);
    if (!p->runs)
        return ra__refuse(e, RA_E_NULL, keys ? "t.k_pos.runs" : "t.q_pos.runs",
                          "are null, but count is #", p->count);
    if (p->batch_step)
        return ra__refuse(e, RA_E_SHAPE, keys ? "t.k_pos.batch_step" : "t.q_pos.batch_step",
                          "# needs an array", p->batch_step);
    for (int64_t i = 0; i < p->count; i++) {
        int64_t last, step = ra__run_step(&p->runs[i]);
        int64_t top = ra__position_top(d, keys);
        if (p->runs[i].count < 0 || p->runs[i].first < 0 || p->runs[i].first >= top || step < 0 ||
            !ra__mul(ra__max(p->runs[i].count - 1, 0), step, &last) ||
            p->runs[i].first + last >= top)
            return ra__refuse(e, RA_E_RANGE, keys ? "t.k_pos.runs" : "t.q_pos.runs",
                              "entry # steps back or leaves the positions", i);
        sum += p->runs[i].count;
    }
    if (sum != rows)
        return ra__refuse(e, RA_E_POSITIONS, keys ? "t.k_pos.runs" : "t.q_pos.runs",
                          "hold # rows, not as many as there are tokens", sum);
    return RA_OK;
}

static int ra__local_square(const ra__local *c) {
    for (int32_t b = 0; b < c->d.sequences; b++)
        if (ra__q_len(&c->d, b) != ra__k_len(&c->d, b)) return 0;
    return 1;
}

/* Resolves and checks a call on one rank. t null: descriptor only. */
static ra_status ra__local_check(const ra_desc *d, const ra_tensors *t, ra__local *c) {
    ra_error *e = d ? d->error : NULL;
    ra_status s;
    if (d && d->ranks > 1)
        return ra__refuse(e, RA_E_SHAPE, "ranks", "# must be 0 or 1 on one rank", d->ranks);
    s = ra__resolve(d, &c->d);
    if (s) return s;
    if (c->d.layout.kind > RA_LAYOUT_STRIPED)
        return ra__refuse(e, RA_E_UNSUPPORTED, "layout.kind",
                          "# on one rank: positions come with the call", c->d.layout.kind);
    memset(&c->w, 0, sizeof c->w);
    c->pairs = 0;
    c->w.d = &c->d;
    c->w.t = t;
    c->w.kernel = ra__kernel_of(&c->d);
    c->rows[0] = ra__longest(&c->d, 0);
    c->rows[1] = ra__longest(&c->d, 1);
    if (!t) return RA_OK;
    s = ra__local_side(&c->d, &t->q_pos, 0, &c->w.q_side, &c->q_cursor);
    if (!s) s = ra__local_side(&c->d, &t->k_pos, 1, &c->k_side, &c->k_cursor);
    if (!s) s = ra__check_tensors(&c->d, t, c->rows, &c->w, c->kv, e);
    c->w.any_position = ra__positions_set(&t->k_pos);
    c->w.look = 1;
    c->w.order = ra__desc_order(&c->d, ra__local_square(c) && !ra__positions_set(&t->q_pos) &&
                                           !ra__positions_set(&t->k_pos));
    return s;
}

RA__INLINE int ra__may_be_short(const ra_desc *d) {
    return d->q_heads > d->kv_heads && d->dropout <= 0.0f &&
           !(d->scores & RA_SCORE_ALIBI);
}

RA__INLINE int ra__is_short(const ra_desc *d) {
    return d->tokens < RA_BLOCK_TOKENS && ra__may_be_short(d);
}

/* Bytes of the rows of one panel. */
static int64_t ra__short_bytes(const ra_desc *d) {
    return RA_BLOCK_TOKENS * ra__max(ra__row_bytes(d->q_dtype, d->k_dim),
                                     ra__row_bytes(d->o_dtype, d->v_dim));
}

/* Position of a query row of this rank. */
static int64_t ra__query_position(const ra__local *c, int32_t b, int64_t row) {
    const int32_t *array = c->w.q_side.array;
    ra__seg s;
    if (array) return array[b * c->w.q_side.array_stride + row];
    if (c->w.q_side.layout == RA_LAYOUT_RUNS) {
        ra__before at;
        s = ra__list_run(&c->w.q_side.list, ra__list_find(&c->w.q_side.list, RA__ROWS, row, &at));
        return s.pos + (row - s.row) * s.stride;
    }
    for (int64_t j = 0; ra__side_seg(&c->w.q_side, b, ra__q_len(&c->d, b), j, &s); j++)
        if (row >= s.row && row < s.row + s.rows) return s.pos + (row - s.row) * s.stride;
    return 0;
}

/* Points each pair of a panel, from `pair` on, at its row of the bias. */
static void ra__short_bias(const ra_bias *bias, int32_t group, int64_t pair, ra__panel *p,
                           ra__rows *rows) {
    if (!bias->row_step && !bias->head_step) return;
    for (int32_t r = 0; r < p->rows; r++)
        rows->bias[r] = (pair + r) / group * bias->row_step + (pair + r) % group * bias->head_step;
    p->score.bias_rows = rows->bias;
    p->score.bias_row_stride = 1;
}

/* Panel i of a task: pairs from `pair` on. */
static void ra__short_load(const ra__local *c, const ra__task *t, ra__scratch *x, int32_t i,
                           uint8_t *gather) {
    const ra_desc *d = &c->d;
    const int32_t group = d->q_heads / d->kv_heads;
    const int64_t pair = (t->panel0 + i) * RA_BLOCK_TOKENS;
    const int64_t size = ra__row_bytes(d->q_dtype, d->k_dim);
    int32_t pos[RA_BLOCK_TOKENS];
    ra__panel *p = &x->panel[i];
    ra__seg s = { 0, 0, 0, 1 };
    s.rows = ra__min(RA_BLOCK_TOKENS, ra__q_len(d, t->sequence) * group - pair);
    for (int64_t r = 0; r < s.rows; r++) {
        int64_t row = (pair + r) / group, head = t->kv_head * group + (pair + r) % group;
        pos[r] = (int32_t)ra__query_position(c, t->sequence, row);
        memcpy(gather + r * size, ra__view_at(c->w.q, t->sequence, row, head).data, (size_t)size);
    }
    x->bounds[i] = ra__rows_fill(&d->mask, ra__key_end(d, t->sequence, c->w.any_position), &s, pos,
                                 x->rows[i]);
    p->geo = x->rows[i];
    ra__panel_scores(&c->w, t->sequence, &s, 0, &x->ahead, p);
    p->score = ra__score_of(&c->w, t->sequence, 0, t->kv_head * group);
    if (p->score.bias) ra__short_bias(&c->w.t->bias, group, pair, p, x->rows[i]);
    c->w.kernel->load_q(p, gather, size, d->q_dtype, d->k_dim);
    for (int32_t r = 0; r < RA_BLOCK_TOKENS; r++) {
        p->m[r] = r < p->rows ? ra__neg_inf() : 0.0f;
        p->l[r] = 0.0f;
    }
    c->w.kernel->load_acc(p, NULL, 0, d->v_dim);
}

static void ra__short_save(const ra__local *c, const ra__task *t, const ra__scratch *x, int32_t i,
                           uint8_t *gather) {
    const ra_desc *d = &c->d;
    const int32_t group = d->q_heads / d->kv_heads;
    const int64_t pair = (t->panel0 + i) * RA_BLOCK_TOKENS;
    const int64_t size = ra__row_bytes(d->o_dtype, d->v_dim);
    const ra__panel *p = &x->panel[i];
    float factor[RA_BLOCK_TOKENS] = { 0 }, sum;
    for (int32_t r = 0; r < p->rows; r++) {
        int64_t row = (pair + r) / group, head = t->kv_head * group + (pair + r) % group;
        ra__view lse = ra__view_at(c->w.lse, t->sequence, row, head);
        factor[r] = ra__row_finish(p->m[r], p->l[r],
                                   d->scores & RA_SCORE_SINKS ? c->w.t->sinks + head : NULL, &sum);
        if (lse.data) memcpy((void *)(uintptr_t)lse.data, &sum, sizeof sum);
    }
    c->w.kernel->store_o(p, gather, size, d->o_dtype, d->v_dim, factor);
    for (int64_t r = 0; r < p->rows; r++) {
        int64_t row = (pair + r) / group, head = t->kv_head * group + (pair + r) % group;
        memcpy((void *)(uintptr_t)ra__view_at(c->w.o, t->sequence, row, head).data,
               gather + r * size, (size_t)size);
    }
}

/* Panels of one kv head of a sequence. */
static int64_t ra__local_blocks(const ra__local *c, int32_t b) {
    int64_t group = c->d.q_heads / c->d.kv_heads, tokens = ra__q_len(&c->d, b);
    if (c->pairs) return ra__ceil_div(tokens * group, RA_BLOCK_TOKENS);
    return ra__side_blocks(&c->w.q_side, b, tokens) * group;
}

/* -------------------------------------------------------------------------- tasks */
/* A task with its rows loaded, and all keys of its sequence, none of them folded. */
static void ra__local_load(const ra__local *c, const ra__task *t, ra__scratch *x, uint8_t *gather,
                           ra__item *item) {
    const int32_t *array = c->k_side.array;
    memset(item, 0, sizeof *item);
    if (array) array += t->sequence * c->k_side.array_stride;
    for (int32_t i = 0; c->pairs && i < t->count; i++) ra__short_load(c, t, x, i, gather);
    if (!c->pairs) ra__task_load(&c->w, t, x, 1);
    ra__chunk_side(&c->k_side, t->sequence, ra__k_len(&c->d, t->sequence), &item->c);
    ra__item_owned(item, c->kv, array);
    x->block = 0;
}

static void ra__local_save(const ra__local *c, const ra__task *t, const ra__scratch *x,
                           uint8_t *gather) {
    for (int32_t i = 0; c->pairs && i < t->count; i++) ra__short_save(c, t, x, i, gather);
    if (!c->pairs) ra__task_save(&c->w, t, x, 1);
}

/* One task against all keys of its sequence. */
static void ra__local_task(const ra__local *c, const ra__task *t, ra__scratch *x,
                           uint8_t *gather) {
    uint32_t mode = ra__fp_enter();
    ra__tally tally = { 0, 0, 0 };
    ra__item item;
    ra__local_load(c, t, x, gather, &item);
    ra__task_fold(&c->w, t, &item, x, &tally);
    ra__local_save(c, t, x, gather);
    ra__fp_leave(mode);
}

/* Panels of a task: fewer if threads would else stand idle. */
static int32_t ra__local_panels(const ra__local *c, int nth) {
    int32_t panels = ra__panels(&c->d);
    for (; nth > 1 && panels > 1; panels /= 2) {
        int64_t tasks = 0;
        for (int32_t b = 0; b < c->d.sequences; b++)
            tasks += c->d.kv_heads * ra__ceil_div(ra__local_blocks(c, b), panels);
        if (tasks >= 8 * (int64_t)nth) break;
    }
    return panels;
}

/* Thread ith's share: every nth task, forwards and backwards in turn, for causal rows cost more
 * towards the end. */
static void ra__local_run(const ra__local *c, int32_t panels, uint8_t *memory, int ith, int nth) {
    ra__arena a = { NULL, 0 };
    ra__scratch x;
    int64_t index = 0;
    a.base = memory;
    ra__scratch_carve(&a, &c->d, panels, &x);
    uint8_t *gather = c->pairs ? (uint8_t *)ra__carve(&a, ra__short_bytes(&c->d)) : NULL;
    ra__task t;
    t.count = 0;
    for (int32_t b = 0; b < c->d.sequences; b++) {
        int64_t all = ra__local_blocks(c, b), a_head = ra__ceil_div(all, panels);
        for (int64_t i = 0; i < c->d.kv_heads * a_head; i++, index++) {
            int64_t turn = index / nth, place = index % nth;
            if ((turn % 2 ? nth - 1 - place : place) != ith) continue;
            x.next.sequence = b;
            x.next.kv_head = (int32_t)(i / a_head);
            x.next.panel0 = i % a_head * panels;
            x.next.count = (int32_t)ra__min(panels, all - x.next.panel0);
            x.asked = c->pairs ? x.next.count : 0;
            if (t.count) ra__local_task(c, &t, &x, gather);
            t = x.next;
        }
    }
    x.next.count = x.asked = 0;
    if (t.count) ra__local_task(c, &t, &x, gather);
}

/* The tasks of a call of one sequence, one after the other, which may stop after any block of keys
 * and go on in another thread. */
typedef struct ra__local_walk {
    ra__scratch x;
    ra__task t;
    ra__item item;
    uint8_t *gather;
    int64_t index, tasks;              /* of the task in hand; of all */
    int32_t panels, loaded;            /* loaded: 1: the task in hand is */
} ra__local_walk;

static void ra__local_walk_begin(const ra__local *c, uint8_t *memory, ra__local_walk *w) {
    ra__arena a = { NULL, 0 };
    a.base = memory;
    w->panels = ra__panels(&c->d);
    ra__scratch_carve(&a, &c->d, w->panels, &w->x);
    w->gather = c->pairs ? (uint8_t *)ra__carve(&a, ra__short_bytes(&c->d)) : NULL;
    w->tasks = c->d.kv_heads * ra__ceil_div(ra__local_blocks(c, 0), w->panels);
    w->index = 0;
    w->loaded = 0;
}

static ra__task ra__local_walk_task(const ra__local *c, const ra__local_walk *w, int64_t index) {
    const int64_t all = ra__local_blocks(c, 0), a_head = ra__ceil_div(all, w->panels);
    ra__task t = { 0, 0, 0, 0 };
    if (index >= w->tasks) return t;
    t.kv_head = (int32_t)(index / a_head);
    t.panel0 = index % a_head * w->panels;
    t.count = (int32_t)ra__min(w->panels, all - t.panel0);
    return t;
}

/* Goes on until *left, in the measure of RA__TILE_WORK, is used up. 1: all tasks are done. */
static int ra__local_walk_some(const ra__local *c, ra__local_walk *w, int64_t *left) {
    for (; w->index < w->tasks; w->index++) {
        ra__tally tally = { 0, 0, 0 };
        if (*left <= 0) return 0;
        if (!w->loaded) {
            w->t = ra__local_walk_task(c, w, w->index);
            w->x.next = ra__local_walk_task(c, w, w->index + 1);
            w->x.asked = c->pairs ? w->x.next.count : 0;
            ra__local_load(c, &w->t, &w->x, w->gather, &w->item);
            w->loaded = 1;
        }
        w->x.left = *left;
        const int done = ra__task_some(&c->w, &w->t, &w->item, &w->x, &tally);
        *left = w->x.left;
        if (!done) return 0;
        ra__local_save(c, &w->t, &w->x, w->gather);
        w->loaded = 0;
    }
    return 1;
}

/* ========================================================================== DECODE
 * Few query rows: M = tokens * Hq / Hkv (token, head) pairs read each kv head, in fours, with dot
 * products over Dk instead of lanes of rows. Memory is all here, so a task is several kv heads of a
 * sequence, and a stretch of tokens is read for all of them before the next one: where the heads of
 * a token lie side by side, memory is read and asked for in the order of its addresses.
 * One row per kv head over few keys goes row by row instead, 64 keys of a head at a time, which the
 * processor prefetches by itself.
 * PERF: Zen 4, f32, beside a plain loop: 32 heads of D 128 over 128 keys 0.60 to 1.38 of its speed,
 * 12 of D 64 over 1024 keys 0.72 to 1.42.
 * PERF: Zen 5, rows of 512 bytes every 4 KB: 17 GB/s head by head, 33 in the order of addresses;
 * head after head, [Hkv][T][D], 13 without asking ahead along the rows of one head, 32 with it. */
enum { RA__DECODE_PAIRS = 16, RA__DECODE_HEADS = 8, RA__DECODE_BYTES = 2304,
       RA__DECODE_AHEAD = 4096, RA__DECODE_NEAR = 16 << 20,
       RA__DECODE_PART = 16, RA__DECODE_SLOTS = 128 };

/* One thread's state, and the task under way. */
typedef struct ra__decode {
    ra__decode_rows *few;              /* [heads][fours] */
    int32_t *pos;                      /* [64] of a block */
    float *slot;                       /* [heads][fours] sums of the parts before, if any */
    int32_t heads;                     /* most of a task */
    int32_t sequence, head, count;     /* kv heads [head, head + count) */
    int32_t part, parts;               /* of the blocks [first, last) that some row sees */
    int64_t first, last, blocks;       /* blocks: of all keys */
    int32_t pairs, fours, rows, keys, run; /* keys: of a stretch; of one head at once */
    int32_t near;                      /* 1: one row, and keys that caches may hold */
    int32_t row[RA__DECODE_PAIRS];     /* of a pair */
    int32_t at[RA__DECODE_PAIRS], sees[RA__DECODE_PAIRS][4]; /* of a row: position, ra__mask_row */
    ra__bounds bounds[RA__DECODE_PAIRS];
    uint64_t seen[RA__DECODE_PAIRS];   /* of a row: keys of the block */
    ra__decode_keys stretch[RA_BLOCK_TOKENS / 4][RA__DECODE_PAIRS / RA__DECODE_ROWS]; /* of block */
} ra__decode;

/* 1 if calls like this, with few enough tokens, take the decoding form. */
RA__INLINE int ra__may_decode(const ra_desc *d) {
    return d->q_heads / d->kv_heads <= RA__DECODE_PAIRS && d->dropout <= 0.0f;
}

/* 1 if this call does. */
RA__INLINE int ra__decodes(const ra_desc *d) {
    return d->tokens * (d->q_heads / d->kv_heads) <= RA__DECODE_PAIRS && ra__may_decode(d);
}

/* Keys are summed in parts that begin at fixed blocks, 16 parts of 16 blocks, then 16 of 32, and so
 * on: the cuts show in the bits, and a row's bits depend on the row alone. */
RA__INLINE int64_t ra__part_first(int64_t part) {
    const int64_t level = part / RA__DECODE_PART, size = (int64_t)RA__DECODE_PART << level;
    return (size - RA__DECODE_PART) * RA__DECODE_PART + part % RA__DECODE_PART * size;
}
RA__INLINE int64_t ra__part_of(int64_t block) {
    int64_t level = 0;
    while (block >= ra__part_first((level + 1) * RA__DECODE_PART)) level++;
    return level * RA__DECODE_PART + (block - ra__part_first(level * RA__DECODE_PART)) /
                                         ((int64_t)RA__DECODE_PART << level);
}

/* Most parts of a sequence; where runs make for more blocks, they belong to the last part. */
RA__INLINE int64_t ra__decode_limit(const ra_desc *d) {
    const int64_t blocks = ra__ceil_div(ra__k_most(d), RA_BLOCK_TOKENS);
    return ra__part_of(ra__max(blocks, 1) - 1) + 1;
}

/* 1 if several threads share out the parts of a sequence; otherwise each takes all parts of some kv
 * heads, with the same bits. */
RA__INLINE int ra__decode_shares(const ra_desc *d) {
    const int64_t limit = ra__decode_limit(d);
    return limit > 1 && limit <= RA__DECODE_SLOTS / d->sequences;
}

/* Floats of m, l and acc of a four. */
RA__INLINE int64_t ra__slot_floats(const ra_desc *d) {
    return RA__DECODE_ROWS * (2 + ra__round_up(d->v_dim, RA__DECODE_DIMS));
}

static void ra__decode_carve(ra__arena *a, const ra_desc *d, int32_t heads, ra__decode *x) {
    int64_t k = ra__round_up(d->k_dim, RA__DECODE_DIMS) * RA__DECODE_ROWS * (int64_t)sizeof(float);
    int64_t v = ra__round_up(d->v_dim, RA__DECODE_DIMS) * RA__DECODE_ROWS * (int64_t)sizeof(float);
    int64_t pairs = d->tokens * (d->q_heads / d->kv_heads);
    float *wide = NULL;
    x->heads = heads;
    x->fours = (int32_t)ra__ceil_div(ra__min(pairs, RA__DECODE_PAIRS), RA__DECODE_ROWS);
    x->few = (ra__decode_rows *)ra__carve(a, heads * x->fours * (int64_t)sizeof *x->few);
    x->pos = (int32_t *)ra__carve(a, RA_BLOCK_TOKENS * (int64_t)sizeof *x->pos);
    x->slot = NULL;
    if (ra__k_most(d) > RA__DECODE_PART * RA_BLOCK_TOKENS)
        x->slot = (float *)ra__carve(a, heads * x->fours * ra__slot_floats(d) * 4);
    for (int32_t i = 0; i < heads * x->fours; i++) {
        float *q = (float *)ra__carve(a, k), *acc = (float *)ra__carve(a, v);
        float *sum = (float *)ra__carve(a, v);
        if (x->fours > 2 && i % x->fours == 0) wide = (float *)ra__carve(a, 2 * k);
        if (!a->base) continue;
        x->few[i].wide = wide;
        x->few[i].lane = i % x->fours * RA__DECODE_ROWS;
        x->few[i].d = d;
        x->few[i].q = q;
        x->few[i].acc = acc;
        x->few[i].block_acc = sum;
    }
}

static int64_t ra__decode_bytes(const ra_desc *d, int32_t heads) {
    ra__arena a = { NULL, 0 };
    ra__decode x;
    ra__decode_carve(&a, d, heads, &x);
    return a.used;
}

/* Bytes of the sums of all parts of all sequences, where several threads share out keys: enough for
 * every call with fewer tokens, keys or sequences. */
static int64_t ra__decode_slots(const ra_desc *d) {
    const int64_t group = d->q_heads / d->kv_heads;
    const int64_t pairs = ra__min(d->tokens * group, RA__DECODE_PAIRS);
    const int64_t parts = ra__decode_limit(d);
    const int64_t most = RA__DECODE_SLOTS;
    const int64_t slots = parts < most / d->sequences ? parts * d->sequences : most;
    if (parts < 2 || !ra__may_decode(d)) return 0;
    return ra__round_up(slots * d->kv_heads *
                        ra__ceil_div(pairs, RA__DECODE_ROWS) * ra__slot_floats(d) * 4, 64);
}

/* kv heads of a task: as many as nth threads can share evenly, or all if they share out keys. */
static int32_t ra__decode_heads(const ra_desc *d, int nth) {
    const int64_t turns_least = ra__ceil_div(d->kv_heads, RA__DECODE_HEADS);
    int32_t best = 1, most = (int32_t)ra__ceil_div(d->kv_heads, turns_least);
    int64_t least = INT64_MAX;
    if (nth == 1 || ra__decode_shares(d)) return most;
    for (int32_t n = most; n > 0; n--) {
        int64_t tasks = d->sequences * ra__ceil_div(d->kv_heads, n);
        int64_t turns = ra__ceil_div(tasks, nth) * n;
        if (turns < least) { least = turns; best = n; }
    }
    return best;
}

/* Position of row i and what it sees. */
static void ra__decode_row(const ra__local *c, ra__decode *x, int32_t i) {
    int64_t p = ra__query_position(c, x->sequence, i);
    int64_t end = ra__key_end(&c->d, x->sequence, c->w.any_position);
    const ra__bounds none = { INT32_MAX, INT32_MIN, INT32_MAX, INT32_MIN,
                              INT32_MIN, INT32_MAX, INT32_MIN, INT32_MAX };
    ra__mask_row(&c->d.mask, p, end, x->sees[i]);
    x->bounds[i] = none;
    ra__bounds_row(&x->bounds[i], x->sees[i]);
    x->at[i] = (int32_t)p;
}

/* Queries and empty state of up to 4 pairs from `pair` on, of kv head `head` of the task. */
static void ra__decode_load(const ra__local *c, ra__decode *x, int32_t head, int32_t pair) {
    const int32_t group = c->d.q_heads / c->d.kv_heads;
    ra__decode_rows *f = &x->few[head * x->fours + pair / RA__DECODE_ROWS];
    size_t wide = (size_t)ra__round_up(c->d.k_dim, RA__DECODE_DIMS) * sizeof(float);
    f->one_row = x->pairs == 1 && c->w.kernel->decode_unit == RA__DECODE_UNIT;
    if (x->pairs - pair < RA__DECODE_ROWS && !f->one_row) memset(f->q, 0, RA__DECODE_ROWS * wide);
    if (f->wide && pair == 0) memset(f->wide, 0, 8 * wide);
    wide = (size_t)ra__round_up(c->d.v_dim, RA__DECODE_DIMS) * sizeof(float);
    memset(f->acc, 0, RA__DECODE_ROWS * wide);
    memset(f->slope, 0, sizeof f->slope);
    memset(f->pos, 0, sizeof f->pos);
    memset(f->block_l, 0, sizeof f->block_l);
    memset(f->score, 0, sizeof f->score);
    memset(f->l, 0, sizeof f->l);
    for (int32_t i = 0; i < 16; i++)
        f->m[i] = pair + i % RA__DECODE_ROWS < x->pairs ? ra__neg_inf() : 0.0f;
    f->has_keys = f->modified = 0;
    f->factor = ra__q_factor(&c->d);
    for (int32_t r = 0; r < RA__DECODE_ROWS && pair + r < x->pairs; r++) {
        int32_t row = x->row[pair + r], q_head = (x->head + head) * group + (pair + r) % group;
        f->score[r] = ra__score_of(&c->w, x->sequence, row, q_head);
        f->modified |= ra__score_is_modified(&f->score[r]);
        for (int32_t i = r; i < 16; i += RA__DECODE_ROWS) f->slope[i] = f->score[r].slope;
        f->pos[r] = x->at[row];
        c->w.kernel->decode_load(f, r, ra__view_at(c->w.q, x->sequence, row, q_head).data,
                              f->factor);
    }
}

static void ra__decode_store(const ra__local *c, const ra__decode *x, int32_t head,
                             int32_t pair) {
    int32_t group = c->d.q_heads / c->d.kv_heads, q_head = (x->head + head) * group + pair % group;
    const ra__decode_rows *f = &x->few[head * x->fours + pair / RA__DECODE_ROWS];
    const float *sink = c->d.scores & RA_SCORE_SINKS ? c->w.t->sinks + q_head : NULL;
    ra__view o = ra__view_at(c->w.o, x->sequence, x->row[pair], q_head);
    ra__view lse = ra__view_at(c->w.lse, x->sequence, x->row[pair], q_head);
    int32_t r = pair % RA__DECODE_ROWS;
    float sum, factor = ra__row_finish(f->m[r], f->l[r], sink, lse.data ? &sum : NULL);
    c->w.kernel->decode_store(f, r, (void *)(uintptr_t)o.data, factor);
    if (lse.data) memcpy((void *)(uintptr_t)lse.data, &sum, sizeof sum);
}

/* Which keys of a block each row sees; the union. pos: of the array, or null. */
static uint64_t ra__decode_sees(ra__decode *x, const ra__seg *s, const int32_t *pos) {
    uint64_t all = ~(uint64_t)0 >> (RA_BLOCK_TOKENS - s->rows), any = 0;
    int64_t first, last;
    ra__seg_span(s, pos, &first, &last);
    ra__seg_positions(s, pos, x->pos);
    for (int32_t i = 0; i < x->rows; i++) {
        const int32_t *v = x->sees[i];
        int kind = pos ? RA__PARTIAL : ra__classify(&x->bounds[i], first, last);
        x->seen[i] = kind == RA__FULL ? all : 0;
        for (int32_t j = 0; j < s->rows && kind == RA__PARTIAL; j++) {
            int32_t k = x->pos[j];
            if (k >= 0 && ((v[0] <= k && k < v[1]) || (v[2] <= k && k < v[3])))
                x->seen[i] |= (uint64_t)1 << j;
        }
        any |= x->seen[i];
    }
    return any;
}

/* Rows do not see a block that their bias hides for all heads of the task. The union of what rows
 * see then. */
static uint64_t ra__decode_hide(const ra__local *c, ra__decode *x, int32_t n) {
    const int32_t group = c->d.q_heads / c->d.kv_heads;
    const int32_t heads = c->w.t->bias.head_step ? x->count * group : 1;
    uint64_t any = 0;
    for (int32_t i = 0; i < x->rows; i++) {
        int hidden = x->seen[i] != 0;
        for (int32_t h = 0; h < heads && hidden; h++) {
            const ra__score s = ra__score_of(&c->w, x->sequence, i, x->head * group + h);
            hidden = ra__bias_hides(&s, 1, x->pos, n);
        }
        if (hidden) x->seen[i] = 0;
        any |= x->seen[i];
    }
    return any;
}

/* Keys [j, j + n) of the block as four `four` sees them; seen 0: none of them. Rows that are not
 * there see all. */
static void ra__decode_stretch(const ra__decode *x, int32_t four, int32_t j, ra__decode_keys *t) {
    const uint32_t all = 0xffffu >> (RA__DECODE_KEYS -
                                     (t->n < RA__DECODE_KEYS ? t->n : RA__DECODE_KEYS));
    uint32_t bits[RA__DECODE_ROWS], some = 0, every = all;
    t->partial = 0;
    t->seen = ~(uint64_t)0;
    if (t->n > RA__DECODE_KEYS) return;
    for (int32_t r = 0; r < RA__DECODE_ROWS; r++) {
        int32_t pair = four * RA__DECODE_ROWS + r;
        bits[r] = all;
        if (pair >= x->pairs) continue;
        bits[r] = (uint32_t)(x->seen[x->row[pair]] >> j) & all;
        some |= bits[r];
        every &= bits[r];
    }
    t->partial = every != all;
    t->seen = ~(uint64_t)0 >> (64 - RA__DECODE_ROWS * t->n);
    if (!t->partial) return;
    t->seen = 0;
    if (!some) return;
    for (int32_t i = 0; i < 4 * t->n; i++)
        t->seen |= (uint64_t)(bits[i % RA__DECODE_ROWS] >> i / RA__DECODE_ROWS & 1) << i;
}

/* Points a stream at the rows of all heads of the task, some 4 KB beyond token row `row`. */
static void ra__decode_ahead(ra__stream *a, const ra__decode *x, const ra__view *v, int64_t row) {
    const int64_t all = x->count > 1 ? x->count * v->head : ra__min(v->token, v->head);
    const int64_t far = ra__max(x->run, RA__DECODE_AHEAD / all);
    a->at = (uintptr_t)v->data + (uintptr_t)((row + far) * v->token);
    a->lines = a->left = (int32_t)ra__ceil_div(all, 64);
    a->jump = v->token - (int64_t)a->lines * 64;
}

/* Keys [from, to) of a block, whose first is token row `row`, for all heads and fours. */
static void ra__decode_fold(const ra__local *c, const ra__view kv[2], int64_t row, int32_t from,
                            int32_t to, ra__decode *x) {
    const int32_t fours = (int32_t)ra__ceil_div(x->pairs, RA__DECODE_ROWS);
    const int more = !x->near && row + from + x->run < ra__k_len(&c->d, x->sequence);
    ra__stream a[2];
    for (int i = 0; i < 2 && more; i++) ra__decode_ahead(&a[i], x, &kv[i], row + from);
    for (int32_t h = 0; h < x->count; h++)
        for (int32_t j = from; j < to; j += x->keys) {
            ra__decode_keys *t = x->stretch[j / x->keys];
            int first = more;
            for (int32_t g = 0; g * RA__DECODE_ROWS < x->pairs; g++) {
                if (!t[g].seen) continue;
                t[g].k = ra__view_at(kv[0], 0, row + j, h).data;
                t[g].v = ra__view_at(kv[1], 0, row + j, h).data;
                t[g].streams = first ? a : NULL;
                first = 0;
            }
            c->w.kernel->decode_fold(&x->few[h * x->fours], t, fours);
        }
}

/* One block of keys for all pairs and heads of the task. */
static void ra__decode_block(const ra__local *c, const ra__view kv[2], const ra__seg *s,
                             const int32_t *pos, ra__decode *x) {
    const int32_t keys = x->keys, run = x->run;
    if (!ra__decode_sees(x, s, pos)) return;
    if ((c->d.scores & RA_SCORE_BIAS) && !ra__decode_hide(c, x, (int32_t)s->rows)) return;
    if (x->near && x->few->one_row && c->d.softcap == 0.0f &&
        !(c->d.scores & (RA_SCORE_ALIBI | RA_SCORE_BIAS)) &&       /* of any head */
        x->seen[0] == ~(uint64_t)0 >> (RA_BLOCK_TOKENS - s->rows))
        x->keys = x->run = RA_BLOCK_TOKENS;
    for (int32_t j = 0; j < s->rows; j += x->keys)
        for (int32_t g = 0; g * RA__DECODE_ROWS < x->pairs; g++) {
            ra__decode_keys *t = &x->stretch[j / x->keys][g];
            t->n = (int32_t)ra__min(x->keys, s->rows - j);
            t->pos = x->pos + j;
            t->k_stride = kv[0].token;
            t->v_stride = kv[1].token;
            ra__decode_stretch(x, g, j, t);
        }
    for (int32_t j = 0; j < s->rows; j += x->run)
        ra__decode_fold(c, kv, s->row, j, (int32_t)ra__min(j + x->run, s->rows), x);
    for (int32_t h = 0; h < x->count; h++)
        for (int32_t g = 0; g * RA__DECODE_ROWS < x->pairs; g++)
            if (x->few[h * x->fours + g].has_keys)
                c->w.kernel->decode_close(&x->few[h * x->fours + g]);
    x->keys = keys;
    x->run = run;
}

/* Rows of a sequence, and the parts of the blocks of keys that they see. */
static void ra__decode_begin(const ra__local *c, ra__decode *x) {
    const int64_t tokens = ra__k_len(&c->d, x->sequence), limit = ra__decode_limit(&c->d);
    const int32_t group = c->d.q_heads / c->d.kv_heads;
    int64_t first, last;
    ra__seg s;
    x->rows = (int32_t)ra__q_len(&c->d, x->sequence);
    x->pairs = x->rows * group;
    for (int32_t i = 0; i < x->rows; i++) ra__decode_row(c, x, i);
    for (int32_t i = 0; i < x->pairs; i++) x->row[i] = i / group;
    x->near = x->pairs == 1 && tokens * c->d.kv_heads <= RA__DECODE_NEAR /
              (ra__row_bytes(c->d.k_dtype, c->d.k_dim) + ra__row_bytes(c->d.v_dtype, c->d.v_dim));
    x->blocks = ra__side_blocks(&c->k_side, x->sequence, tokens);
    x->first = limit > 1 ? x->blocks : 0;
    x->last = limit > 1 ? 0 : x->blocks;
    x->parts = 1;
    for (int64_t i = 0; limit > 1 && i < x->blocks; i++) {
        int seen = c->k_side.array != NULL;
        (void)ra__side_block(&c->k_side, x->sequence, tokens, i, &s);
        ra__seg_span(&s, NULL, &first, &last);
        for (int32_t r = 0; r < x->rows && !seen; r++)
            seen = ra__classify(&x->bounds[r], first, last) != RA__EMPTY;
        if (!seen) continue;
        x->first = ra__min(x->first, i);
        x->last = i + 1;
    }
    if (x->first < x->last && limit > 1)
        x->parts = (int32_t)(ra__min(ra__part_of(x->last - 1), limit - 1) + 1 -
                             ra__min(ra__part_of(x->first), limit - 1));
}

/* Sums of a four from and to a slot. */
static void ra__slot_load(ra__decode_rows *f, const float *slot) {
    memcpy(f->l, slot + RA__DECODE_ROWS, sizeof f->l);
    for (int32_t i = 0; i < 16; i++) f->m[i] = slot[i % RA__DECODE_ROWS];
    memcpy(f->acc, slot + 2 * RA__DECODE_ROWS,
           (size_t)(ra__slot_floats(f->d) - 2 * RA__DECODE_ROWS) * sizeof *slot);
}
static void ra__slot_save(const ra__decode_rows *f, float *slot) {
    memcpy(slot, f->m, RA__DECODE_ROWS * sizeof *slot);
    memcpy(slot + RA__DECODE_ROWS, f->l, sizeof f->l);
    memcpy(slot + 2 * RA__DECODE_ROWS, f->acc,
           (size_t)(ra__slot_floats(f->d) - 2 * RA__DECODE_ROWS) * sizeof *slot);
}

/* Slot of a part, kv head and four among those of all threads. */
static float *ra__slot_at(const ra__local *c, const ra__decode *x, float *slots, int32_t part,
                          int32_t head, int32_t four) {
    int64_t at = x->sequence * ra__decode_limit(&c->d) + part;
    return slots + ((at * c->d.kv_heads + head) * x->fours + four) * ra__slot_floats(&c->d);
}

/* What comes of the sums of a part: O if it is the only one or the last; else they go to slots, of
 * all threads or, these being null, of this one, and to those of the parts before. */
static void ra__decode_end(const ra__local *c, ra__decode *x, float *slots) {
    const int last = x->parts == 1 || (!slots && x->part + 1 == x->parts);
    for (int32_t h = 0; h < x->count; h++) {
        for (int32_t g = 0; g * RA__DECODE_ROWS < x->pairs && x->parts > 1; g++) {
            ra__decode_rows *f = &x->few[h * x->fours + g];
            float *to = slots ? ra__slot_at(c, x, slots, x->part, x->head + h, g)
                              : x->slot + (h * x->fours + g) * ra__slot_floats(&c->d);
            if (!slots && x->part) c->w.kernel->decode_merge(f, to);
            if (!last) ra__slot_save(f, to);
        }
        for (int32_t i = 0; i < x->pairs && last; i++) ra__decode_store(c, x, h, i);
    }
}

/* First block of a part, counting from the first that has a key that some row sees. */
static int64_t ra__decode_cut(const ra__local *c, const ra__decode *x, int32_t part) {
    const int64_t first = ra__min(ra__part_of(x->first), ra__decode_limit(&c->d) - 1);
    if (part == 0) return x->first;
    return part < x->parts ? ra__part_first(first + part) : x->last;
}

/* Part x->part of the keys, for kv heads [x->head, x->head + x->count) of a sequence. */
static void ra__decode_task(const ra__local *c, ra__decode *x, float *slots) {
    const int64_t tokens = ra__k_len(&c->d, x->sequence);
    const int64_t from = ra__decode_cut(c, x, x->part), to = ra__decode_cut(c, x, x->part + 1);
    const int32_t *array = c->k_side.array;
    ra__view kv[2];
    ra__seg block;
    if (array) array += x->sequence * c->k_side.array_stride;
    for (int i = 0; i < 2; i++) kv[i] = ra__view_at(c->kv[i], x->sequence, 0, x->head);
    if (c->d.v_in_k) kv[1].data += ra__row_bytes(c->d.k_dtype, c->d.v_column);
    for (int32_t h = 0; h < x->count; h++)
        for (int32_t i = 0; i < x->pairs; i += RA__DECODE_ROWS) ra__decode_load(c, x, h, i);
    for (int64_t i = from; i < to; i++) {
        (void)ra__side_block(&c->k_side, x->sequence, tokens, i, &block);
        ra__decode_block(c, kv, &block, array ? array + block.row : NULL, x);
    }
    ra__decode_end(c, x, slots);
}

/* O from the parts of all threads. */
static void ra__decode_finish(const ra__local *c, ra__decode *x, float *slots) {
    x->count = 1;
    for (x->sequence = 0; x->sequence < c->d.sequences; x->sequence++) {
        ra__decode_begin(c, x);
        for (x->head = 0; x->head < c->d.kv_heads && x->parts > 1; x->head++) {
            for (int32_t g = 0; g * RA__DECODE_ROWS < x->pairs; g++) {
                ra__slot_load(&x->few[g], ra__slot_at(c, x, slots, 0, x->head, g));
                for (int32_t i = 1; i < x->parts; i++)
                    c->w.kernel->decode_merge(&x->few[g], ra__slot_at(c, x, slots, i, x->head, g));
            }
            for (int32_t i = 0; i < x->pairs; i++) ra__decode_store(c, x, 0, i);
        }
    }
}

/* Heads of one token lie side by side in K and in V. */
static int ra__decode_beside(const ra__local *c) {
    const ra_desc *d = &c->d;
    return c->kv[0].head == ra__row_bytes(d->k_dtype, d->k_dim) &&
           (d->v_in_k || c->kv[1].head == ra__row_bytes(d->v_dtype, d->v_dim));
}

/* Tasks of all sequences; runs those that begin at [from, to) of all blocks one after the other. */
static int64_t ra__decode_tasks(const ra__local *c, ra__decode *x, float *slots, int64_t from,
                                int64_t to) {
    int64_t index = 0;
    for (x->sequence = 0; x->sequence < c->d.sequences; x->sequence++) {
        ra__decode_begin(c, x);
        for (x->head = 0; x->head < c->d.kv_heads; x->head += x->heads) {
            const int64_t first = index;
            x->count = (int32_t)ra__min(x->heads, c->d.kv_heads - x->head);
            for (x->part = 0; x->part < x->parts; x->part++) {
                const int64_t at = slots ? index : first;
                const int64_t blocks = ra__decode_cut(c, x, x->part + 1) -
                                       ra__decode_cut(c, x, x->part);
                index += ra__max(blocks, 1) * x->count;
                if (at >= from && at < to) ra__decode_task(c, x, slots);
            }
        }
    }
    return index;
}

/* 1 for the last of nth threads. *done is memory that nobody has cleared: what does not bear the
 * mark is a count of 0, and so it is left behind. */
static int ra__decode_last(int64_t *done, int nth) {
    const int64_t mark = (int64_t)0x52a77e9d31 << 24, most = ((int64_t)1 << 24) - 1;
    for (;;) {
        int64_t seen = ra__load_i64(done), count = (seen & ~most) == mark ? seen & most : 0;
        int last = ++count == nth;
        if (ra__cas_i64(done, seen, mark | (last ? 0 : count))) return last;
    }
}

/* shared, of several threads: a counter in 64 bytes, and slots. */
static void ra__decode_run(const ra__local *c, int32_t heads, uint8_t *memory, uint8_t *shared,
                           const int who[2]) {
    const int64_t row = ra__max(ra__row_bytes(c->d.k_dtype, c->d.k_dim),
                                ra__row_bytes(c->d.v_dtype, c->d.v_dim));
    const int shares = who[1] > 1 && ra__decode_shares(&c->d);
    float *slots = shares ? (float *)(void *)(shared + 64) : NULL;
    int64_t *done = (int64_t *)(void *)shared;
    uint32_t mode = ra__fp_enter();
    ra__arena a = { NULL, 0 };
    ra__decode x;
    int64_t n = INT64_MAX, from = 0, to = n;
    a.base = memory;
    ra__decode_carve(&a, &c->d, heads, &x);
    if (!ra__decode_beside(c)) x.heads = 1;
    x.keys = RA__DECODE_KEYS;
    while (x.fours == 1 && x.keys > c->w.kernel->decode_unit && x.keys * row > RA__DECODE_BYTES)
        x.keys /= 2;
    x.run = 2 * x.keys;
    if (who[1] > 1) {
        n = ra__decode_tasks(c, &x, slots, 0, 0);
        from = n / who[1] * who[0] + n % who[1] * who[0] / who[1];
        to = n / who[1] * (who[0] + 1) + n % who[1] * (who[0] + 1) / who[1];
    }
    ra__decode_tasks(c, &x, slots, from, to);
    if (slots && ra__decode_last(done, who[1]))
        ra__decode_finish(c, &x, slots);
    ra__fp_leave(mode);
}

/* ========================================================================== ATTENTION
 * The calls of one rank: ra_attention, which chooses between LOCAL and DECODE, and the block
 * mathematics on a state of the caller's. */

enum { RA__STACK_BYTES = 192 * 1024, RA__STACK_DECODE = 32 * 1024 };

/* Sizes of workspaces. Each grows with tokens, keys, sequences and threads, and counts the forms
 * that smaller calls may take: so the workspace of the largest call serves all. */

/* Bytes that nth threads share, before those of each. */
static int64_t ra__local_shared(const ra_desc *d, int nth) {
    return nth == 1 ? 0 : 64 + ra__decode_slots(d);
}

/* Bytes of each thread. */
static int64_t ra__local_bytes(const ra_desc *d) {
    int64_t bytes = ra__scratch_bytes(d, ra__panels(d));
    if (ra__may_be_short(d)) bytes += ra__short_bytes(d);
    if (ra__may_decode(d)) bytes = ra__max(bytes, ra__decode_bytes(d, ra__decode_heads(d, 1)));
    return bytes;
}

static ra_status ra__check_who(int ith, int nth, ra_error *e) {
    if (nth < 1 || nth > 4096) return ra__refuse(e, RA_E_RANGE, "nth", "# is not in 1..4096", nth);
    if (ith < 0 || ith >= nth)
        return ra__refuse(e, RA_E_RANGE, "ith", "# is not in 0..nth-1", ith);
    return RA_OK;
}

RINGATTN_API size_t ra_attention_bytes(const ra_desc *d, int nth) {
    ra__local c;
    if (!d || ra__check_who(0, nth, d->error) || ra__local_check(d, NULL, &c)) return 0;
    return (size_t)(64 + ra__local_shared(&c.d, nth) + ra__local_bytes(&c.d) * nth);
}

RA__NOINLINE void ra__local_on_stack(const ra__local *c, int decode) {
    uint8_t memory[RA__STACK_BYTES + 64];
    uintptr_t at = ((uintptr_t)memory + 63) & ~(uintptr_t)63;
    const int who[2] = { 0, 1 };
    if (decode) ra__decode_run(c, 1, (uint8_t *)at, NULL, who);
    else ra__local_run(c, 1, (uint8_t *)at, 0, 1);
}

/* With as many kv heads at once as fit, at least one. */
RA__NOINLINE void ra__decode_on_stack(const ra__local *c) {
    uint8_t memory[RA__STACK_DECODE + 64];
    uintptr_t at = ((uintptr_t)memory + 63) & ~(uintptr_t)63;
    int32_t heads = ra__decode_heads(&c->d, 1);
    const int who[2] = { 0, 1 };
    while (heads > 1 && ra__decode_bytes(&c->d, heads) > RA__STACK_DECODE) heads--;
    ra__decode_run(c, heads, (uint8_t *)at, NULL, who);
}

/* Runs a checked call in the workspace, or on the stack if there is none. */
static ra_status ra__local_go(const ra__local *c, void *workspace, size_t bytes, const int who[2],
                              int decode) {
    ra_error *e = c->d.error;
    int64_t need, shared;
    ra_status s = ra__check_who(who[0], who[1], e);
    if (s) return s;
    if (!workspace) {
        if (who[1] > 1)
            return ra__refuse(e, RA_E_NULL, "workspace", "is required for # threads", who[1]);
        if ((decode ? ra__decode_bytes(&c->d, 1) : ra__scratch_bytes(&c->d, 1)) > RA__STACK_BYTES)
            return ra__refuse(e, RA_E_WORKSPACE, "k_dim",
                              "rows of # elements do not fit on the stack: give a workspace",
                              c->d.k_dim);
        if (decode && ra__decode_bytes(&c->d, 1) <= RA__STACK_DECODE) ra__decode_on_stack(c);
        else ra__local_on_stack(c, decode);
        return RA_OK;
    }
    uint8_t *base = ra__workspace_align(workspace, &bytes);
    shared = ra__local_shared(&c->d, who[1]);
    need = ra__local_bytes(&c->d);
    if (bytes < (size_t)shared || (int64_t)((bytes - (size_t)shared) / (size_t)who[1]) < need)
        return ra__refuse(e, RA_E_WORKSPACE, "workspace", "needs # bytes",
                          64 + shared + need * who[1]);
    uint8_t *memory = base + shared + need * who[0];
    const int32_t heads = ra__decode_heads(&c->d, who[1]);
    if (decode) ra__decode_run(c, heads, memory, base, who);
    else ra__local_run(c, ra__local_panels(c, who[1]), memory, who[0], who[1]);
    return RA_OK;
}

RINGATTN_API ra_status ra_attention(const ra_desc *d, const ra_tensors *t, void *workspace,
                                    size_t bytes, int ith, int nth) {
    ra__local c;
    ra_desc mine;
    int who[2];
    ra_status s;
    if (!d) return RA_E_NULL;
    mine = *d;
    if (ith > 0 && ith < nth) mine.error = NULL; /* the threads share d->error: one writes */
    if (!t) return ra__refuse(mine.error, RA_E_NULL, "t", "is required", 0);
    s = ra__local_check(&mine, t, &c);
    if (!s && c.d.engine)
        s = ra__refuse(mine.error, RA_E_UNSUPPORTED, "engine", "serves rings only", 0);
    if (!s) s = ra__check_outputs(&c.d, t, c.rows[0], &c.w, mine.error);
    if (!s) s = ra__check_forward(&c.d, t, c.rows, mine.error);
    if (s) return s;
    c.w.clear = c.w.finish = 1;
    who[0] = ith;
    who[1] = nth;
    const int decode = ra__decodes(&c.d);
    c.pairs = !decode && ra__is_short(&c.d) &&
              (workspace || ra__scratch_bytes(&c.d, 1) + ra__short_bytes(&c.d) <= RA__STACK_BYTES);
    if (decode) c.w.kernel = ra__kernel_decode(&c.d);
    return ra__local_go(&c, workspace, bytes, who, decode);
}

/* One call of one thread in a form that the caller has chosen, with that form's kernel, in a
 * workspace that is large enough: DECODE at once, TILES as a walk. */
typedef struct ra__attend { ra__local c; ra__local_walk walk; } ra__attend;

static ra_status ra__attend_check(const ra_desc *d, const ra_tensors *t, ra__local *c,
                                  const ra__kernel *kernel) {
    ra_status s = ra__local_check(d, t, c);
    if (!s) s = ra__check_outputs(&c->d, t, c->rows[0], &c->w, c->d.error);
    c->w.clear = c->w.finish = 1;
    c->w.kernel = kernel;
    return s;
}

static ra_status ra__attend_decode(const ra_desc *d, const ra_tensors *t, uint8_t *workspace,
                                   const ra__kernel *kernel) {
    const int who[2] = { 0, 1 };
    ra__local c;
    ra_status s = ra__attend_check(d, t, &c, kernel);
    if (!s) ra__decode_run(&c, ra__decode_heads(&c.d, 1), workspace, NULL, who);
    return s;
}

/* t and what it points at stay until the walk is done. */
static ra_status ra__attend_walk(const ra_desc *d, const ra_tensors *t, uint8_t *workspace,
                                 const ra__kernel *kernel, ra__attend *a) {
    ra_status s = ra__attend_check(d, t, &a->c, kernel);
    if (s) return s;
    a->c.pairs = ra__is_short(&a->c.d);
    ra__local_walk_begin(&a->c, workspace, &a->walk);
    return RA_OK;
}

static void ra__simple_view(ra__view *v, const float *data, int32_t heads, int32_t dim) {
    *v = ra__view_packed((const uint8_t *)data, heads, dim, RA_F32);
}

RINGATTN_API ra_status ra_attention_simple(float *out, const float *q, const float *k,
                                           const float *v, int seq_q, int seq_k, int n_heads,
                                           int n_kv_heads, int head_dim, float scale, int window,
                                           int q_offset) {
    const int64_t keys = seq_k;
    ra__local c;
    ra_tensors t;
    if (seq_q < 0 || seq_k < 0 || n_heads < 1 || n_kv_heads < 1 || head_dim < 1 || q_offset < 0 ||
        head_dim > 256 || seq_q > RA_MAX_POSITION - q_offset || seq_k > RA_MAX_POSITION ||
        !ra__is_finite(scale) || scale < 0.0f)
        return RA_E_RANGE;
    if (n_heads % n_kv_heads) return RA_E_SHAPE;
    if ((seq_q && (!out || !q)) || (seq_k && (!k || !v))) return RA_E_NULL;
    memset(&c, 0, sizeof c);
    memset(&t, 0, sizeof t);
    c.d.sequences = c.d.ranks = 1;
    c.d.q_heads = n_heads;
    c.d.kv_heads = n_kv_heads;
    c.d.k_dim = c.d.v_dim = head_dim;
    c.d.q_dtype = c.d.k_dtype = c.d.v_dtype = c.d.o_dtype = RA_F32;
    c.d.tokens = seq_q;
    c.d.kv_tokens_of = &keys;
    c.d.q_offset = q_offset;
    c.d.scale = scale;
    c.d.mask.kind = RA_MASK_CAUSAL;
    c.d.mask.window = window > 0 ? window : 0;
    c.d.isa = ra_isa_best();
    c.d.layout.kind = c.w.q_side.layout = c.k_side.layout = RA_LAYOUT_CONTIGUOUS;
    if (scale == 0.0f) c.d.scale = (float)(1.0 / ra__sqrt((double)head_dim));
    c.w.d = &c.d;
    c.w.t = &t;
    c.w.kernel = ra__kernel_of(&c.d);
    c.w.q_side.ranks = c.k_side.ranks = 1;
    c.w.q_side.offset = q_offset;
    c.w.order = RA_ORDER_ASCENDING;
    c.w.clear = c.w.finish = 1;
    ra__simple_view(&c.w.q, q, n_heads, head_dim);
    ra__simple_view(&c.w.o, out, n_heads, head_dim);
    ra__simple_view(&c.kv[0], k, n_kv_heads, head_dim);
    ra__simple_view(&c.kv[1], v, n_kv_heads, head_dim);
    c.w.acc = c.w.o;
    if (ra__decodes(&c.d) && ra__decode_bytes(&c.d, 1) <= RA__STACK_DECODE) ra__decode_on_stack(&c);
    else ra__local_on_stack(&c, ra__decodes(&c.d));
    return RA_OK;
}

/* Checks a state and points the work at it. */
static ra_status ra__state_use(const ra_state *s, ra__local *c, ra_error *e) {
    if (!s) return ra__refuse(e, RA_E_NULL, "state", "is required", 0);
    if (!s->m) return ra__refuse(e, RA_E_NULL, "state.m", "is required", 0);
    if (!s->l) return ra__refuse(e, RA_E_NULL, "state.l", "is required", 0);
    if (!s->acc) return ra__refuse(e, RA_E_NULL, "state.acc", "is required", 0);
    c->w.m = s->m;
    c->w.l = s->l;
    c->w.ml_head = 1;
    c->w.ml_row = c->d.q_heads;
    c->w.ml_batch = c->d.tokens * c->w.ml_row;
    c->w.acc = ra__view_packed((const uint8_t *)s->acc, c->d.q_heads, c->d.v_dim, RA_F32);
    c->w.acc.batch = c->d.tokens * c->w.acc.token;
    return RA_OK;
}

RINGATTN_API ra_status ra_state_clear(const ra_desc *d, const ra_state *s) {
    ra__local c;
    ra__seg all = { 0, 0, 0, 1 };
    ra_status status = ra__local_check(d, NULL, &c);
    if (!status) status = ra__state_use(s, &c, d->error);
    if (status) return status;
    all.rows = c.d.tokens;
    for (int32_t b = 0; b < c.d.sequences; b++)
        for (int32_t h = 0; h < c.d.q_heads; h++) ra__rows_clear(&c.w, b, &all, h);
    return RA_OK;
}

RINGATTN_API ra_status ra_fold(const ra_desc *d, const ra_state *s, const ra_tensors *t,
                               void *workspace, size_t bytes) {
    ra__local c;
    const int who[2] = { 0, 1 };
    ra_status status;
    if (d && !t) return ra__refuse(d->error, RA_E_NULL, "t", "is required", 0);
    status = ra__local_check(d, t, &c);
    if (!status) status = ra__state_use(s, &c, d->error);
    if (status) return status;
    if (c.d.engine) return ra__refuse(d->error, RA_E_UNSUPPORTED, "engine", "serves rings only", 0);
    return ra__local_go(&c, workspace, bytes, who, 0);
}

/* (m, l, acc) of one row and head: rescales both sums to the larger maximum. l = 0 is empty. */
static void ra__state_merge_row(const float from[2], const float *from_acc, float *m, float *l,
                                float *acc, int32_t dim) {
    const double ln2 = 0.69314718055994530942;
    float top = from[0] > *m ? from[0] : *m, a, b;
    if (from[1] == 0.0f) return;
    if (*l == 0.0f) {
        memcpy(acc, from_acc, (size_t)dim * sizeof(float));
        *m = from[0];
        *l = from[1];
        return;
    }
    a = (float)ra__exp(((double)*m - (double)top) * ln2);
    b = (float)ra__exp(((double)from[0] - (double)top) * ln2);
    for (int32_t i = 0; i < dim; i++) acc[i] = acc[i] * a + from_acc[i] * b;
    *l = *l * a + from[1] * b;
    *m = top;
}

RINGATTN_API ra_status ra_state_merge(const ra_desc *d, const ra_state *into,
                                      const ra_state *from) {
    ra__local c;
    ra_status s = ra__local_check(d, NULL, &c);
    if (!s) s = ra__state_use(from, &c, d->error);
    if (!s) s = ra__state_use(into, &c, d->error);
    if (s) return s;
    for (int64_t i = 0; i < c.d.sequences * c.w.ml_batch; i++) {
        float ml[2];
        ml[0] = from->m[i];
        ml[1] = from->l[i];
        ra__state_merge_row(ml, from->acc + i * c.d.v_dim, into->m + i, into->l + i,
                            into->acc + i * c.d.v_dim, c.d.v_dim);
    }
    return RA_OK;
}

RINGATTN_API ra_status ra_state_finish(const ra_desc *d, const ra_state *s, const ra_tensors *t) {
    ra__local c;
    ra__seg all = { 0, 0, 0, 1 };
    ra_status status = ra__local_check(d, NULL, &c);
    if (!status) status = ra__state_use(s, &c, d->error);
    if (status) return status;
    if (!t) return ra__refuse(d->error, RA_E_NULL, "t", "is required", 0);
    if ((c.d.scores & RA_SCORE_SINKS) && !t->sinks)
        return ra__refuse(d->error, RA_E_NULL, "t.sinks", "scores is #", c.d.scores);
    c.w.t = t;
    status = ra__check_outputs(&c.d, t, c.rows[0], &c.w, d->error);
    if (status) return status;
    for (int32_t b = 0; b < c.d.sequences; b++) {
        all.rows = ra__q_len(&c.d, b);
        for (int32_t h = 0; h < c.d.q_heads; h++) ra__rows_finish(&c.w, b, &all, h);
    }
    return RA_OK;
}

/* ========================================================================== LOCAL BACKWARD
 * Gradients on one rank. In: the tensors of a call, dO, and O and LSE of its forward pass. Out: dQ,
 * dK, dV, or sums of them in a state of the caller's.
 * Work is cut in pairs of a sequence and a kv head; a thread does whole pairs. What is left when
 * they do not go round is cut into pieces: dQ by query blocks and dK, dV by key blocks, each of
 * which computes S and dP for itself: 7 products instead of 5, and the same sums. */
typedef struct ra__back_local {
    ra__local c;
    ra__back b;
    ra__view d_k, d_v;
} ra__back_local;

/* Memory of one thread: sums of one pair. */
typedef struct ra__back_memory {
    ra__back_scratch x;
    float *dq, *dk, *dv;               /* [Tq][group][Dk], [Tk][Dk], [Tk][Dv] */
} ra__back_memory;

static void ra__back_memory_carve(ra__arena *a, const ra_desc *d, ra__back_memory *m) {
    int64_t group = d->q_heads / d->kv_heads, keys = ra__k_most(d);
    ra__back_carve(a, d, ra__ceil_div(keys, RA_BLOCK_TOKENS), &m->x);
    m->dq = (float *)ra__carve(a, d->tokens * group * d->k_dim * 4);
    m->dk = (float *)ra__carve(a, keys * d->k_dim * 4);
    m->dv = (float *)ra__carve(a, d->v_in_k ? 0 : keys * d->v_dim * 4);
}

static int64_t ra__back_bytes(const ra_desc *d) {
    ra__arena a = { NULL, 0 };
    ra__back_memory m;
    ra__back_memory_carve(&a, d, &m);
    return a.used;
}

/* A sequence's keys, or of a share without queries its part of them. */
static void ra__back_item(const ra__back_local *l, const ra__share *p, ra__item *item) {
    const ra__local *c = &l->c;
    const int32_t *array = c->k_side.array;
    memset(item, 0, sizeof *item);
    if (array) array += p->t.sequence * c->k_side.array_stride;
    ra__chunk_side(&c->k_side, p->t.sequence, ra__k_len(&c->d, p->t.sequence), &item->c);
    if (item->c.segs > 1) {
        ra__seg s[2];
        memcpy(s, item->c.seg, sizeof s);
        memset(item->c.seg, 0, sizeof s);
        ra__chunk_zigzag(&item->c, s, p->want_q ? 1 : p->parts, p->want_q ? 0 : p->part);
    } else if (!p->want_q) {
        int64_t n = ra__seg_blocks(&item->c, 0);
        (void)ra__seg_cut(&item->c, 0, ra__part(n, p->parts, p->part),
                          ra__part(n, p->parts, p->part + 1));
    }
    ra__item_owned(item, c->kv, array);
}

static void ra__back_keys_finish(const ra__back_local *l, const ra__share *p,
                                 const ra__item *item, const ra__grads *g) {
    ra__view out[2];
    out[0] = l->d_k;
    out[1] = l->d_v;
    ra__grads_finish(&l->b, &item->c, p->t.kv_head, out, g);
}

/* Does the piece own sums of the bias' gradient? Those of a key go with dK, others with dQ. */
static int32_t ra__back_has_bias(const ra__back_local *l, const ra__share *p) {
    const ra_bias_out *bias = &l->c.w.t->d_bias;
    if (!bias->data) return 0;
    return bias->row_step == 0 ? p->want_k : p->want_q;
}

/* Points g at the sums of a chunk's keys in the memory of a thread, where they are wanted. */
static void ra__back_point(const ra__back_local *l, const ra__share *p, const ra__chunk *c,
                           const ra__back_memory *m, ra__grads *g) {
    const float *dk = p->want_k && l->d_k.data ? m->dk : NULL;
    const float *dv = p->want_k && l->d_v.data ? m->dv : NULL;
    ra__view sums[2];
    sums[0] = ra__view_packed((const uint8_t *)dk, 1, l->c.d.k_dim, RA_F32);
    sums[1] = ra__view_packed((const uint8_t *)dv, 1, l->c.d.v_dim, RA_F32);
    ra__grads_at(&l->c.d, c, sums, 0, g);
}

/* A share in one phase; g->edge loses RA__FIRST when the sums of dQ have begun. */
static void ra__back_pass(const ra__back_local *l, const ra__share *p, ra__grads *g,
                          int last, ra__back_memory *m) {
    const ra_desc *d = &l->c.d;
    int32_t group = d->q_heads / d->kv_heads;
    int64_t blocks = ra__side_blocks(&l->c.w.q_side, p->t.sequence, ra__q_len(d, p->t.sequence));
    int64_t from = p->want_k ? 0 : ra__part(blocks, p->parts, p->part);
    int64_t to = p->want_k ? blocks : ra__part(blocks, p->parts, p->part + 1);
    ra__task t;
    ra__item item;
    t.sequence = p->t.sequence;
    t.kv_head = p->t.kv_head;
    t.panel0 = from * group;
    t.count = (int32_t)((to - from) * group);
    ra__back_item(l, p, &item);
    ra__back_point(l, p, &item.c, m, g);
    if (last) g->edge |= RA__LAST;
    ra__back_task(&l->b, &t, &item, g, &m->x);
    g->edge &= ~RA__FIRST;
}

static void ra__back_run_piece(const ra__back_local *l, const ra__share *p,
                               ra__back_memory *m) {
    const ra_desc *d = &l->c.d;
    int32_t group = d->q_heads / d->kv_heads;
    ra__grads g;
    ra__item item;
    memset(&g, 0, sizeof g);
    g.edge = RA__FIRST;
    g.bias = ra__back_has_bias(l, p);
    if (!(p->want_q && l->b.d_q.data) && !(p->want_k && (l->d_k.data || l->d_v.data)) && !g.bias)
        return;
    if (p->want_q && l->b.d_q.data)
        g.dq = ra__view_packed((const uint8_t *)m->dq, group, d->k_dim, RA_F32);
    if (p->want_k) {
        ra__back_item(l, p, &item);
        ra__back_point(l, p, &item.c, m, &g);
        ra__grads_clear(d, &item.c, &g);
    }
    if (l->b.square && l->c.w.order != RA_ORDER_DESCENDING) {
        m->x.phase = RA__AFTER;
        ra__back_pass(l, p, &g, 0, m);
        m->x.phase = RA__BEFORE;
        ra__back_pass(l, p, &g, 1, m);
    } else {                           /* DESC: there are no others */
        m->x.phase = RA__AFTER | RA__BEFORE;
        ra__back_pass(l, p, &g, 1, m);
    }
    if (p->want_k) {
        ra__back_item(l, p, &item);
        ra__back_point(l, p, &item.c, m, &g);
        ra__back_keys_finish(l, p, &item, &g);
    }
}

/* Thread ith's share: whole pairs, then pieces of those that are left; sinks by head. */
static void ra__back_run(const ra__back_local *l, uint8_t *memory, int ith, int nth) {
    const ra_desc *d = &l->c.d;
    int64_t pairs = (int64_t)d->sequences * d->kv_heads, rest = pairs % nth;
    int64_t whole = rest * 7 < (int64_t)nth * 5 ? pairs - rest : pairs, index = 0;
    ra__arena a = { NULL, 0 };
    ra__back_memory m;
    ra__share p;
    a.base = memory;
    ra__back_memory_carve(&a, d, &m);
    for (int64_t i = ith; i < whole; i += nth) {
        p.t.sequence = (int32_t)(i / d->kv_heads);
        p.t.kv_head = (int32_t)(i % d->kv_heads);
        p.want_q = p.want_k = p.parts = 1;
        p.part = 0;
        ra__back_run_piece(l, &p, &m);
    }
    for (int64_t i = whole; i < pairs; i++) {
        p.t.sequence = (int32_t)(i / d->kv_heads);
        p.t.kv_head = (int32_t)(i % d->kv_heads);
        p.parts = 4 * nth;
        for (p.want_k = 0; p.want_k < 2; p.want_k++)
            for (p.part = 0; p.part < p.parts; p.part++, index++) {
                int64_t place = index % nth;
                if ((index / nth % 2 ? nth - 1 - place : place) != ith) continue;
                p.want_q = !p.want_k;
                ra__back_run_piece(l, &p, &m);
            }
    }
    for (int32_t h = ith; l->c.w.t->d_sinks && h < d->q_heads; h += nth)
        ra__back_sink(&l->b, h, &m.x);
}

/* Points a checked call at the gradients. */
static ra_status ra__back_check(const ra_desc *d, const ra_tensors *t, ra__back_local *l) {
    ra__view view[4];
    ra_error *e = d->error;
    ra_status s;
    if (!t) return ra__refuse(e, RA_E_NULL, "t", "is required", 0);
    memset(l, 0, sizeof *l);
    s = ra__local_check(d, t, &l->c);
    if (s) return s;
    if (l->c.d.engine) return ra__refuse(e, RA_E_UNSUPPORTED, "engine", "serves rings only", 0);
    l->c.d.error = e;
    s = ra__check_grads(&l->c.d, t, l->c.rows, view);
    if (s) return s;
    l->b.w = &l->c.w;
    l->b.kernel = ra__kernel_of(&l->c.d);
    l->b.d_o = view[0];
    l->b.d_q = view[1];
    l->d_k = view[2];
    l->d_v = view[3];
    l->b.square = ra__local_square(&l->c) && !l->c.d.q_offset && !ra__positions_set(&t->q_pos) &&
                  !ra__positions_set(&t->k_pos);
    return RA_OK;
}

/* The caller's packed sums of all keys. */
static void ra__fold_back_sums(const ra_desc *d, const ra_grads *into, ra__view sums[2]) {
    sums[0] = ra__view_packed((const uint8_t *)into->d_k, d->kv_heads, d->k_dim, RA_F32);
    sums[1] = ra__view_packed((const uint8_t *)into->d_v, d->kv_heads, d->v_dim, RA_F32);
    for (int32_t i = 0; i < 2; i++) sums[i].batch = ra__k_most(d) * sums[i].token;
}

/* delta of all rows. */
static void ra__delta_rows(const ra__work *w, ra__view d_o, const ra__kernel *kernel,
                           float *delta) {
    const ra_desc *d = w->d;
    uint32_t mode = ra__fp_enter();
    for (int32_t b = 0; b < d->sequences; b++)
        for (int64_t r = 0; r < ra__q_len(d, b); r++)
            for (int32_t h = 0; h < d->q_heads; h++) {
                ra__source o = ra__source_of(ra__view_at(w->o, b, r, h), d->o_dtype, d->v_dim);
                ra__source g = ra__source_of(ra__view_at(d_o, b, r, h), d->o_dtype, d->v_dim);
                kernel->deltas(delta + (b * d->tokens + r) * d->q_heads + h, &o, &g, 1);
            }
    ra__fp_leave(mode);
}

/* L0: every sequence and kv head, with the caller's arrays as the sums. */
static void ra__fold_back_run(ra__back_local *l, const ra_grads *into, uint8_t *memory) {
    const ra_desc *d = &l->c.d;
    const int32_t group = d->q_heads / d->kv_heads;
    ra__arena a = { NULL, 0 };
    ra__back_memory m;
    ra__share p;
    ra__view sums[2];
    ra__grads g;
    ra__task t;
    ra__item item;
    a.base = memory;
    ra__back_memory_carve(&a, d, &m);
    m.x.phase = RA__AFTER | RA__BEFORE;
    l->c.w.ml_head = 1;
    l->c.w.ml_row = d->q_heads;
    l->c.w.ml_batch = d->tokens * d->q_heads;
    p.want_q = p.want_k = p.parts = 1;
    p.part = 0;
    memset(&g, 0, sizeof g);
    ra__fold_back_sums(d, into, sums);
    g.bias = 1;
    for (int32_t i = 0; i < d->sequences * d->kv_heads; i++) {
        p.t.sequence = t.sequence = i / d->kv_heads;
        p.t.kv_head = t.kv_head = i % d->kv_heads;
        t.panel0 = 0;
        t.count = (int32_t)ra__side_blocks(&l->c.w.q_side, p.t.sequence,
                                           ra__q_len(d, p.t.sequence)) * group;
        if (into->d_q) {
            g.dq = ra__view_packed((const uint8_t *)into->d_q, d->q_heads, d->k_dim, RA_F32);
            g.dq.batch = d->tokens * g.dq.token;
            g.dq = ra__view_at(g.dq, p.t.sequence, 0, p.t.kv_head * group);
        }
        ra__back_item(l, &p, &item);
        ra__grads_at(d, &item.c, sums, t.kv_head, &g);
        ra__back_task(&l->b, &t, &item, &g, &m.x);
    }
}

/* Points *memory at the part of thread ith, or refuses. */
static ra_status ra__back_workspace(const ra_desc *d, void *workspace, size_t bytes, int ith,
                                    int nth, uint8_t **memory) {
    int64_t need = ra__back_bytes(d);
    ra_error *e = d->error;
    ra_status s = ra__check_who(ith, nth, e);
    if (s) return s;
    if (!workspace) return ra__refuse(e, RA_E_NULL, "workspace", "is required", 0);
    *memory = ra__workspace_align(workspace, &bytes) + need * ith;
    if ((int64_t)(bytes / (size_t)nth) < need)
        return ra__refuse(e, RA_E_WORKSPACE, "workspace", "needs # bytes", 64 + need * nth);
    return RA_OK;
}

RINGATTN_API size_t ra_attention_backward_bytes(const ra_desc *d, int nth) {
    ra__local c;
    if (!d || ra__check_who(0, nth, d->error) || ra__local_check(d, NULL, &c)) return 0;
    if (!c.d.train) {
        ra__refuse(d->error, RA_E_SHAPE, "train", "must be 1 for gradients, is #", c.d.train);
        return 0;
    }
    return (size_t)(64 + ra__back_bytes(&c.d) * nth);
}

RINGATTN_API ra_status ra_attention_backward(const ra_desc *d, const ra_tensors *t,
                                             void *workspace, size_t bytes, int ith, int nth) {
    ra__back_local l;
    uint8_t *memory = NULL;
    ra_desc mine;
    ra_status s;
    if (!d) return RA_E_NULL;
    mine = *d;
    if (ith > 0 && ith < nth) mine.error = NULL; /* as in ra_attention */
    s = ra__back_check(&mine, t, &l);
    if (!s) s = ra__check_outputs(&l.c.d, t, l.c.rows[0], &l.c.w, mine.error);
    if (!s && !t->d_q.data && !t->d_k.data && !t->d_v.data && !t->d_sinks && !t->d_bias.data)
        s = ra__refuse(mine.error, RA_E_NULL, "t.d_q",
                       "is null, and so are all other gradients", 0);
    if (!s) s = ra__back_workspace(&l.c.d, workspace, bytes, ith, nth, &memory);
    if (s) return s;
    l.c.w.ml_head = 1;
    ra__back_run(&l, memory, ith, nth);
    return RA_OK;
}

RINGATTN_API ra_status ra_delta(const ra_desc *d, const ra_tensors *t, float *delta) {
    ra__local c;
    ra__view d_o;
    ra_status s;
    if (!d) return RA_E_NULL;
    if (!t) return ra__refuse(d->error, RA_E_NULL, "t", "is required", 0);
    if (!delta) return ra__refuse(d->error, RA_E_NULL, "delta", "is required", 0);
    s = ra__local_check(d, NULL, &c);
    if (!s) s = ra__check_outputs(&c.d, t, c.rows[0], &c.w, d->error);
    if (!s) s = ra__in_check(&t->d_o, ra__shape_of("t.d_o", &c.d, c.rows[0], c.d.q_heads,
                                                   c.d.v_dim), c.d.o_dtype, &d_o, d->error);
    if (s) return s;
    ra__delta_rows(&c.w, d_o, ra__kernel_f32(c.d.isa), delta);
    return RA_OK;
}

RINGATTN_API ra_status ra_fold_backward(const ra_desc *d, const ra_tensors *t, const float *delta,
                                        const ra_grads *g, void *workspace, size_t bytes) {
    ra__back_local l;
    uint8_t *memory = NULL;
    ra_status s;
    if (!d) return RA_E_NULL;
    if (!delta) return ra__refuse(d->error, RA_E_NULL, "delta", "is required", 0);
    if (!g) return ra__refuse(d->error, RA_E_NULL, "grads", "is required", 0);
    s = ra__back_check(d, t, &l);
    if (!s && l.c.d.v_in_k && g->d_v)
        s = ra__refuse(d->error, RA_E_SHAPE, "grads.d_v", "must be null, for v_in_k is #", 1);
    if (!s) s = ra__back_workspace(&l.c.d, workspace, bytes, 0, 1, &memory);
    if (!s) s = ra__out_check(&t->lse, ra__shape_of("t.lse", &l.c.d, l.c.rows[0], l.c.d.q_heads,
                                                    1), RA_F32, &l.c.w.lse, d->error);
    if (s) return s;
    l.b.delta = delta;
    ra__fold_back_run(&l, g, memory);
    return RA_OK;
}

RA__ONCE_BEGIN

/* ========================================================================== SCHEDULE
 * Chunks, their order, and how far each travels. In: a resolved descriptor. Out: one list of chunks
 * in the order in which every row folds them and every link carries them, and for one rank the
 * sublists of what it folds, receives and sends.
 *
 * Order. RA_ORDER_DESCENDING goes sequence by sequence, with owners and chunks descending. It
 * serves contiguous causal shards: a row then takes keys from its own block downwards. Under
 * RA_ORDER_ASCENDING owners and chunks ascend: owner 0 sends its whole shard around, then owner 1,
 * and a rank folds its own keys when its turn as an owner comes. In both cases the order in which a
 * row meets the blocks of the grid does not depend on the number of ranks.
 *
 * No deadlock. All links carry chunks in the order of the one list. Take the first chunk of the
 * list that has not finished its journey: it is at the head of its link, and the receiver's buffers
 * hold only chunks before it, which are done. So with one buffer or more something can always move.
 * ra__tour_steps shows it: it gives every message a step, and whatever a message waits for has an
 * earlier step.
 *
 * Time. With two buffers or more a forward pass of C chunks on P ranks takes less than C +
 * (sequences + 1) P steps, for every mask and layout. Going up, chunk c of the list may leave its
 * owner o in step c + o + P * sequence and never stop: a chunk of a later owner then stays behind
 * those before it all the way around. RA_ORDER_DESCENDING needs C + P, because nobody is above the
 * last owner. The chosen steps are never later than these, and the other direction is taken only if
 * it needs fewer. A backward pass has the same bound unless the chunks of one owner differ in how
 * far they travel (windows to both sides, zigzag windows), because gradients return in the order of
 * the list. */

enum { RA__FRAME_BYTES = 64, RA__ADDRESS_BYTES = 128 };
enum { RA__GROUP_KEYS = 4096 };        /* keys after which the state of a task is stored */

/* Backward. The gradient of a chunk travels with the chunk. It starts at zero on the owner. The
 * owner adds its query rows whose unit is not below the key's (RA__AFTER; a unit is a block, or
 * with zigzag a mirrored pair of blocks). Then the chunk visits the ranks above, up to the last one
 * that needs it, and its gradient returns to the owner, directly or on around the ring. There the
 * owner adds its rows below (RA__BEFORE). So dK and dV of a key sum query units upwards from its
 * own, cyclically, and dQ sums keys as forward does, in the same way for any number of ranks.
 * RA_ORDER_DESCENDING has no rows below, and layouts without units do everything at the first
 * visit.
 *
 * The second visits of own chunks are placed between the first visits of own chunks: each before
 * the first one that starts at least two steps after the return, and in any case before chunks of
 * other ranks, those that never leave, or the next sequence. Returned gradients have separate
 * buffers. */
enum { RA__PACK_SLOTS = 2, RA__RETURN_SLOTS = 2, RA__SEND_SLOTS = 8, RA__SHARED_BUFFERS = 16 };

/* What travels in a pass: chunks of keys, or of queries, in global order. */
typedef struct ra__travel {
    ra__chunk *chunk;
    int64_t chunks;
    uint8_t *need;                     /* [ranks][need_row] bit 2 c + i: the rank folds segment i of
                                        * chunk c */
    int64_t need_row;                  /* bytes */
} ra__travel;

/* A segment of a chunk of keys among all of its sequence, which are sorted by `first`. */
typedef struct ra__place {
    int64_t first;                     /* smallest position */
    int64_t top;                       /* largest position up to here */
    int64_t blocks;                    /* of all places before this one */
    int32_t chunk, seg;
} ra__place;

/* Adjacent keys of a rank: smallest and largest position. */
typedef struct ra__span { int64_t first, last; int32_t rank; } ra__span;

typedef struct ra__exchange {          /* a call of sendrecv */
    int32_t send, recv, returned;      /* indices in the lists of these names, -1: none; of recv and
                                        * returned one at most */
    int64_t step;                      /* equal on both sides */
    int64_t after_tiles, after_folds;  /* tiles and entries of the fold list that this rank has
                                        * done by then: an earlier call would only block */
} ra__exchange;

/* What one rank does in one kind of pass: lists of what it folds, receives and sends, each in the
 * order that the plan fixes. Entries name each other by index; -1: there is none. */
typedef struct ra__fold {
    int32_t sequence, chunk;           /* chunk -1: the sequence has rows and no keys */
    int32_t recv;                      /* the message that brings it; -1: its own chunk */
    int32_t index;                     /* how many entries of its sequence come before it */
    int32_t own;                       /* backward: its own chunk's entry in `own` */
    uint8_t last;                      /* 1: the last of its sequence */
    uint8_t phase;                     /* backward: RA__AFTER, RA__BEFORE: which tiles */
} ra__fold;
typedef struct ra__recv { int32_t chunk, fold, send; } ra__recv;   /* from a neighbour */
typedef struct ra__send { int32_t chunk, recv, fold; } ra__send;   /* goes after `fold` */
typedef struct ra__own { int32_t chunk, fold, returned; } ra__own; /* fold: where it starts */
typedef struct ra__returned {          /* the gradient of an own chunk */
    int32_t chunk, own, fold;          /* fold: the second visit */
} ra__returned;

typedef struct ra__pass_lists {
    ra__fold *fold;
    ra__recv *recv;
    ra__send *send;
    ra__exchange *exchange;
    ra__own *own;                      /* backward: chunks that this rank owns */
    ra__returned *returned;            /* backward: those of them that leave and return */
    int64_t folds, recvs, sends, exchanges, owns, returns;
    int64_t steps;                     /* of the lock-step run on all ranks */
    int32_t backward, direction;       /* +1: chunks go to rank + 1 */
    int64_t chunk_bytes;               /* longest message between neighbours */
    int64_t return_bytes;              /* backward: longest message to an owner */
    const ra__chunk *chunk;            /* all chunks of the pass */
} ra__pass_lists;

/* Counts that size a rank's workspace. own: own chunks that leave; stays: those that do not. */
typedef struct ra__counts { int64_t tasks, recvs, sends, own, stays; } ra__counts;
typedef struct ra__sizes {
    int64_t rows, key_rows, notices_in, notices_out;
    int32_t panels, back_parts;
    ra__counts forward, back;
} ra__sizes;

/* Hashes of AGREED values as given, by what they concern. */
enum { RA__AGREE_SIZES, RA__AGREE_DTYPES, RA__AGREE_MASK, RA__AGREE_LAYOUT, RA__AGREE_SCORES,
       RA__AGREE_TRAINING, RA__AGREE_MESSAGES, RA__AGREE_PARTS };
typedef struct ra__agreed { uint64_t part[RA__AGREE_PARTS]; } ra__agreed;

/* A run among all runs of a table, by first position. */
typedef struct ra__held {
    ra_run run;
    int64_t rows;                      /* of all entries before it */
    int64_t group;                     /* entries from here to this one may reach beyond its first
                                        * position; earlier ones do not */
} ra__held;

/* A rank whose keys are read, and the entries of fold after which they are not read again. */
typedef struct ra__source_rank { int64_t end; int32_t rank; } ra__source_rank;

struct ra_plan {
    ra_desc d;                         /* resolved; its arrays are copies in this plan */
    ra_allocator allocator;
    int64_t bytes;                     /* of this allocation */
    ra__agreed agreed;
    int32_t order, direction;
    int32_t on_grid;                   /* 1: all cuts are on the block grid */
    int32_t all_positions_held;        /* 1: some rank holds each key position [0, kv_tokens) */
    int64_t *q_cut, *k_cut;            /* [B][2 ranks + 1], null for STRIPED, RUNS, ARRAY */
    int64_t *q_run_begin, *k_run_begin; /* RUNS: [ranks + 1] first entry in the tables */
    ra__before *q_before, *k_before;   /* RUNS: of rank r from entry run_begin[r] + r on */
    ra__held *held;                    /* RUNS: all runs of keys by their first position */
    int64_t *held_order, held_count;   /* entries of k_runs in that order */
    ra__travel keys, queries;          /* queries: RA_TRAVEL_Q */
    ra__place *place;                  /* all segments of keys, and one entry that ends them; not
                                        * of ARRAY */
    int64_t *place_begin;              /* [B + 1] first place of a sequence */
    ra__pass_lists forward, back;           /* back: if d.train is 1 */
    int32_t same_positions;            /* queries and keys are the same positions everywhere */
    int32_t owner_folds_twice;         /* backward, see ra__back_lists */
    int32_t back_direction;
    int64_t *task_begin, *back_task_begin; /* [B + 1] first task of a sequence */
    ra__sizes sizes;                   /* of d.rank */
    int32_t *readers;                  /* ranks that read this rank's keys */
    ra__source_rank *source;           /* ranks whose keys it reads, by `end` */
    int64_t reader_count, source_count;
    int64_t chunk_bytes;               /* longest message */
    int64_t *start;                    /* [chunks] scratch: the step in which a chunk leaves its
                                        * owner, see ra__tour_steps */
    int64_t *line;                     /* [2 ranks] scratch of ra__tour_steps */
    ra__span *span;                    /* RA_TRAVEL_Q: scratch of ra__key_spans */
    struct ra__play *play;             /* scratch of ra__tour_exchanges */
    int64_t unvisited, back_unvisited; /* empty tiles of chunks that this rank never folds */
    ra_plan_report report;             /* of d.rank */
};

/* The rank `steps` above another, and how many steps one is above another; cyclic. */
RA__INLINE int32_t ra__rank_up(const ra_plan *p, int32_t rank, int32_t steps) {
    int32_t n = rank + steps;
    return n < 0 ? n + p->d.ranks : n >= p->d.ranks ? n - p->d.ranks : n;
}
RA__INLINE int32_t ra__ranks_up(const ra_plan *p, int32_t from, int32_t to) {
    return to < from ? to - from + p->d.ranks : to - from;
}

/* What travels backward. */
RA__INLINE const ra__travel *ra__back_travel(const ra_plan *p) {
    return p->d.backward_travel == RA_TRAVEL_Q ? &p->queries : &p->keys;
}

/* The rank needs segment i of chunk c, needs any of the chunk. */
RA__INLINE int ra__need_seg(const ra__travel *t, int64_t c, int32_t i, int32_t rank) {
    int64_t bit = 2 * c + i;
    return (t->need[rank * t->need_row + bit / 8] >> (bit % 8)) & 1;
}
RA__INLINE int ra__need(const ra__travel *t, int64_t c, int32_t rank) {
    return ((t->need[rank * t->need_row + c / 4] >> (2 * c % 8)) & 3) != 0;
}
RA__INLINE int ra__needs(const ra_plan *p, int64_t chunk, int32_t rank) {
    return ra__need(&p->keys, chunk, rank);
}
RA__INLINE int ra__needs_q(const ra_plan *p, int64_t chunk, int32_t rank) {
    return ra__need(&p->queries, chunk, rank);
}

/* Rows of the queries (keys = 0) or keys of a rank. ARRAY positions are filled in by the pass. */
static ra__side ra__plan_side(const ra_plan *p, int keys, int32_t rank) {
    const ra_layout *l = &p->d.layout;
    const int64_t *run_begin = keys ? p->k_run_begin : p->q_run_begin;
    ra__side s;
    memset(&s, 0, sizeof s);
    s.layout = l->kind;
    s.rank = rank;
    s.ranks = p->d.ranks;
    s.batch_cuts = 1;
    s.offset = keys ? 0 : p->d.q_offset;
    s.cut = keys ? p->k_cut : p->q_cut;
    if (l->kind == RA_LAYOUT_RUNS) {
        s.list.run = (keys ? l->k_runs : l->q_runs) + run_begin[rank];
        s.list.count = run_begin[rank + 1] - run_begin[rank];
        s.list.before = (keys ? p->k_before : p->q_before) + run_begin[rank] + rank;
    }
    if (l->kind == RA_LAYOUT_ARRAY) s.array_rows = (keys ? l->k_rows : l->q_rows)[rank];
    return s;
}

/* Offsets of the positions, K and V of a segment in its message. */
typedef struct ra__message_offsets { int64_t pos, k, v; } ra__message_offsets;

/* Positions, K and V of a segment from offset `at` on; returns where they end. */
static int64_t ra__message_keys(const ra_desc *d, const ra__seg *s, int64_t at,
                                ra__message_offsets *part) {
    int64_t heads = s->rows * d->kv_heads;
    part->pos = at;
    if (d->layout.kind == RA_LAYOUT_ARRAY) at += ra__round_up(4 * s->rows, 64);
    part->k = part->v = at;
    at += ra__round_up(heads * ra__row_bytes(d->k_dtype, d->k_dim), 64);
    if (d->v_in_k) return at;
    part->v = at;
    return at + ra__round_up(heads * ra__row_bytes(d->v_dtype, d->v_dim), 64);
}

/* Lays out the message of a chunk to the rank `hop` ranks after its owner: the segments that travel
 * that far. Returns its length. Each part starts on a multiple of 64; there is no other padding. */
static int64_t ra__message(const ra_desc *d, const ra__chunk *c, int32_t hop,
                           ra__message_offsets part[2]) {
    int64_t at = RA__FRAME_BYTES;
    for (int32_t i = 0; i < c->segs; i++) {
        int32_t s = i ? 1 - c->lead : c->lead;
        if (c->hops[s] < hop) break;
        at = ra__message_keys(d, &c->seg[s], at, &part[s]);
    }
    return at;
}

static int64_t ra__message_bytes(const ra_desc *d, const ra__chunk *c, int32_t hop) {
    ra__message_offsets part[2];
    return ra__message(d, c, hop, part);
}

RA__INLINE int32_t ra__chunk_reach(const ra__chunk *c) { return c->hops[c->lead]; }

/* The f32 gradients of a chunk: offsets of dK and dV of each segment, all heads packed, from `at`
 * on; returns where they end. Under v_in_k dK has both. RA_TRAVEL_Q: dQ of both segments
 * together. */
static int64_t ra__grad_parts(const ra_desc *d, const ra__chunk *c, int64_t at,
                              ra__message_offsets grad[2]) {
    memset(grad, 0, 2 * sizeof *grad);
    grad[0].k = at;
    if (d->backward_travel == RA_TRAVEL_Q)
        return at + ra__round_up(ra__chunk_rows(c) * d->q_heads * d->k_dim * 4, 64);
    for (int32_t i = 0; i < c->segs; i++) {
        int64_t heads = c->seg[i].rows * d->kv_heads;
        grad[i].k = grad[i].v = at;
        at += ra__round_up(heads * d->k_dim * 4, 64);
        if (d->v_in_k) continue;
        grad[i].v = at;
        at += ra__round_up(heads * d->v_dim * 4, 64);
    }
    return at;
}

/* Backward: the message of a chunk to the rank `hop` ranks after its owner has gradients, then keys
 * of the segments that are still needed there. hop = ranks: back to its owner. RA_TRAVEL_Q: dQ, and
 * part[0].k, .v, .pos are Q, dO, and LSE and delta [2][Hq][rows], of both segments together. */
static int64_t ra__back_message(const ra_desc *d, const ra__chunk *c, int32_t hop,
                                ra__message_offsets part[2], ra__message_offsets grad[2]) {
    int64_t rows = ra__chunk_rows(c), at = ra__grad_parts(d, c, RA__FRAME_BYTES, grad);
    if (d->backward_travel == RA_TRAVEL_Q) {
        if (c->back_hops[c->back_lead] < hop) return at;
        part[0].k = at;
        at += ra__round_up(rows * d->q_heads * ra__row_bytes(d->q_dtype, d->k_dim), 64);
        part[0].v = at;
        at += ra__round_up(rows * d->q_heads * ra__row_bytes(d->o_dtype, d->v_dim), 64);
        part[0].pos = at;
        return at + ra__round_up(2 * rows * d->q_heads * 4, 64);
    }
    for (int32_t i = 0; i < c->segs; i++) {
        int32_t s = i ? 1 - c->back_lead : c->back_lead;
        if (c->back_hops[s] < hop) break;
        at = ra__message_keys(d, &c->seg[s], at, &part[s]);
    }
    return at;
}

static int64_t ra__back_length(const ra_desc *d, const ra__chunk *c, int32_t hop) {
    ra__message_offsets part[2], grad[2];
    return ra__back_message(d, c, hop, part, grad);
}

/* Ranks that a chunk visits in a backward pass before its gradient returns to the owner. */
RA__INLINE int32_t ra__back_stations(const ra_plan *p, const ra__chunk *c) {
    int32_t reach = c->back_hops[c->back_lead];
    return reach && p->d.grad_return == RA_RETURN_RING ? p->d.ranks - 1 : reach;
}

/* Pieces of a chunk in a plan, whose positions are one run each: its segments, or its runs. */
RA__INLINE int32_t ra__chunk_pieces(const ra__chunk *c) {
    return c->list.run ? (int32_t)c->list.count : c->segs;
}
static ra__seg ra__chunk_piece(const ra__chunk *c, int32_t i) {
    return c->list.run ? ra__chunk_run(c, i) : c->seg[i];
}

/* The chunks of a list, cut between blocks so that they have nearly equally many rows. */
static int64_t ra__chunk_runs(const ra__side *side, int32_t b, int64_t chunk_tokens,
                              ra__chunk *out) {
    const ra__run_list *l = &side->list;
    int64_t rows = ra__list_all(l).n[RA__ROWS], n = ra__ceil_div(rows, chunk_tokens), count = 0;
    int64_t from = 0;
    for (int64_t j = 1; j <= n; j++) {
        int64_t cut = rows * j / n, to, first, last;
        ra__chunk *c = &out[count];
        ra__before at;
        (void)ra__list_find(l, RA__ROWS, cut, &at);
        to = at.n[RA__BLOCKS] + ra__ceil_div(cut - at.n[RA__ROWS], RA_BLOCK_TOKENS);
        if (to == from) continue;
        memset(c, 0, sizeof *c);
        c->sequence = b;
        c->owner = side->rank;
        ra__chunk_of_list(c, l, from, to);
        first = ra__list_find(l, RA__BLOCKS, from, &at);
        last = ra__list_find(l, RA__BLOCKS, to - 1, &at);
        c->list.run += first;
        c->list.before += first;
        c->list.count = last + 1 - first;
        c->low = INT64_MAX;
        for (int64_t i = 0; i < c->list.count; i++) {
            ra__seg s = ra__chunk_run(c, i);
            c->low = ra__min(c->low, s.pos);
            c->high = ra__max(c->high, s.pos + (s.rows - 1) * s.stride);
        }
        from = to;
        count++;
    }
    return count;
}

/* Writes the chunks of one shard, ascending; returns how many. */
static int64_t ra__chunk_shard(const ra__side *side, int32_t b, int64_t tokens,
                               int64_t chunk_tokens, ra__chunk *out) {
    int zigzag = side->layout == RA_LAYOUT_ZIGZAG;
    int64_t rows, blocks, n;
    ra__chunk all;
    if (side->layout == RA_LAYOUT_RUNS) return ra__chunk_runs(side, b, chunk_tokens, out);
    ra__chunk_side(side, b, tokens, &all);
    rows = ra__chunk_rows(&all);
    blocks = ra__seg_blocks(&all, 0);
    if (zigzag) blocks = ra__max(blocks, ra__seg_blocks(&all, 1));
    n = ra__min(blocks, ra__ceil_div(rows, chunk_tokens));
    for (int64_t j = 0; j < n; j++) {
        ra__chunk *c = &out[j];
        int64_t from = ra__part(blocks, n, j) * RA_BLOCK_TOKENS;
        int64_t to = ra__min(ra__part(blocks, n, j + 1) * RA_BLOCK_TOKENS, all.seg[0].rows);
        memset(c, 0, sizeof *c);
        c->sequence = b;
        c->owner = side->rank;
        c->segs = 1;
        if (zigzag) ra__chunk_zigzag(c, all.seg, n, j);
        else c->seg[0] = ra__seg_part(&all.seg[0], from, to - from);
    }
    return n;
}

/* Writes all chunks of keys, or of queries, in global order; returns how many. down: owners and
 * chunks descend. */
static int64_t ra__chunk_all(const ra_plan *p, int keys, int down, ra__chunk *out) {
    int64_t n = 0;
    for (int32_t b = 0; b < p->d.sequences; b++) {
        for (int32_t i = 0; i < p->d.ranks; i++) {
            ra__side side = ra__plan_side(p, keys, down ? p->d.ranks - 1 - i : i);
            int64_t k = ra__chunk_shard(&side, b, keys ? ra__k_len(&p->d, b) : ra__q_len(&p->d, b),
                                        p->d.chunk_tokens, out + n);
            for (int64_t j = 0; down && j < k / 2; j++) {
                ra__chunk t = out[n + j];
                out[n + j] = out[n + k - 1 - j];
                out[n + k - 1 - j] = t;
            }
            n += k;
        }
    }
    return n;
}

/* -------------------------------------------------------------------------- who needs what
 * Positions that some rows may see: disjoint spans [at[0], at[1]) in ascending order. */
enum { RA__SPANS = 256 };
typedef struct ra__spans { int64_t at[RA__SPANS][2]; int32_t n; } ra__spans;

/* Adds [from, to); 0 if there is no room for one more. */
static int ra__spans_add(ra__spans *s, int64_t from, int64_t to) {
    int32_t i = s->n, end;
    if (from >= to) return 1;
    while (i > 0 && s->at[i - 1][1] >= from) i--;      /* [i, end): what it touches */
    for (end = i; end < s->n && s->at[end][0] <= to; end++) {
        from = ra__min(from, s->at[end][0]);
        to = ra__max(to, s->at[end][1]);
    }
    if (end == i) {
        if (s->n == RA__SPANS) return 0;
        memmove(s->at[i + 1], s->at[i], (size_t)(s->n - i) * sizeof s->at[0]);
        s->n++;
    } else {
        memmove(s->at[i + 1], s->at[end], (size_t)(s->n - end) * sizeof s->at[0]);
        s->n -= end - i - 1;
    }
    s->at[i][0] = from;
    s->at[i][1] = to;
    return 1;
}

/* Adds what rows with these bounds may see: all that ra__classify does not call empty. */
static int ra__spans_bounds(ra__spans *s, const ra__bounds *b) {
    return ra__spans_add(s, b->lo_min, b->hi_max) && ra__spans_add(s, b->doc_min, b->keep_max);
}

/* One of the spans reaches into the positions [first, last]. */
RA__INLINE int ra__spans_meet(const ra__spans *s, int64_t first, int64_t last) {
    int32_t from = 0, to = s->n;
    while (from < to) {                                /* the first span that ends after `first` */
        int32_t mid = (from + to) / 2;
        if (s->at[mid][1] > first) to = mid;
        else from = mid + 1;
    }
    return from < s->n && s->at[from][0] <= last;
}

static void ra__need_set(const ra_plan *p, const ra__travel *t, int64_t c, int32_t i,
                         int32_t rank) {
    ra__chunk *chunk = &t->chunk[c];
    int64_t bit = 2 * c + i;
    int32_t up = ra__ranks_up(p, chunk->owner, rank);
    t->need[rank * t->need_row + bit / 8] |= (uint8_t)(1 << (bit % 8));
    if (up > chunk->up[i]) chunk->up[i] = up;
    if (up && p->d.ranks - up > chunk->down[i]) chunk->down[i] = p->d.ranks - up;
}

/* Chunks [*first, *end) of sequence b: the list is sorted by sequence. */
static void ra__chunk_range(const ra__travel *t, int32_t b, int64_t *first, int64_t *end) {
    int64_t edge[2];
    for (int32_t i = 0; i < 2; i++) {
        int64_t lo = 0, hi = t->chunks;
        while (lo < hi) {
            int64_t mid = lo + (hi - lo) / 2;
            if (t->chunk[mid].sequence < b + i) lo = mid + 1;
            else hi = mid;
        }
        edge[i] = lo;
    }
    *first = edge[0];
    *end = edge[1];
}

/* One of the runs of a chunk has keys in one of the spans; 1 for chunks without runs. */
static int ra__pieces_meet(const ra__chunk *c, const ra__spans *s) {
    int64_t first, last;
    if (!c->list.run) return 1;
    for (int64_t i = 0; i < c->list.count; i++) {
        ra__seg run = ra__chunk_run(c, i);
        ra__seg_span(&run, NULL, &first, &last);
        if (ra__spans_meet(s, first, last)) return 1;
    }
    return 0;
}

/* Marks the chunks of keys [first, end) of which the rows of a rank may see something. */
static void ra__needs_mark(const ra_plan *p, int32_t rank, int64_t first, int64_t end,
                           const ra__spans *s) {
    for (int64_t c = first; c < end; c++)
        for (int32_t i = 0; i < p->keys.chunk[c].segs; i++) {
            int64_t low, high;
            ra__chunk_span(&p->keys.chunk[c], i, &low, &high);
            if (ra__spans_meet(s, low, high) && ra__pieces_meet(&p->keys.chunk[c], s))
                ra__need_set(p, &p->keys, c, i, rank);
        }
}

/* Marks who needs which chunk of keys: rank r if a block of its queries may see one of the keys. */
static void ra__chunk_needs(const ra_plan *p, int32_t rank, int32_t b) {
    ra__side side = ra__plan_side(p, 0, rank);
    int64_t tokens = ra__q_len(&p->d, b), first, end;
    ra__spans spans;
    ra__seg s;
    spans.n = 0;
    ra__chunk_range(&p->keys, b, &first, &end);
    if (first == end) return;
    for (int64_t i = 0; ra__side_seg(&side, b, tokens, i, &s); i++) {
        if (p->d.layout.kind == RA_LAYOUT_ARRAY) {
            if (s.rows) (void)ra__spans_add(&spans, 0, RA_MAX_POSITION);
            continue;
        }
        for (int64_t j = 0; j < ra__ceil_div(s.rows, RA_BLOCK_TOKENS); j++) {
            ra__seg block = ra__seg_block(&s, j);
            ra__bounds bounds = ra__seg_bounds(&p->d.mask, ra__key_end(&p->d, b, 0), &block);
            if (ra__spans_bounds(&spans, &bounds)) continue;
            ra__needs_mark(p, rank, first, end, &spans);
            spans.n = 0;
            (void)ra__spans_bounds(&spans, &bounds);
        }
    }
    ra__needs_mark(p, rank, first, end, &spans);
}

/* Marks the ranks with keys of the chunk's sequence where segment i of a chunk of queries sees
 * something. */
static void ra__q_needs_mark(const ra_plan *p, int64_t c, int32_t i, const ra__span *span,
                             int64_t spans, const ra__spans *s) {
    for (int64_t k = 0; k < spans; k++)
        if (ra__spans_meet(s, span[k].first, span[k].last))
            ra__need_set(p, &p->queries, c, i, span[k].rank);
}

/* Marks which ranks have keys that rows of a chunk of queries may see. */
static void ra__chunk_q_needs(const ra_plan *p, int64_t c, const ra__span *span,
                              int64_t spans) {
    const ra__chunk *chunk = &p->queries.chunk[c];
    int64_t keys = ra__key_end(&p->d, chunk->sequence, 0);
    for (int32_t i = 0; i < chunk->segs; i++) {
        ra__spans s;
        s.n = 0;
        for (int64_t j = 0; j < ra__seg_blocks(chunk, i); j++) {
            ra__seg rows = ra__seg_block_at(chunk, i, j);
            ra__bounds bounds = ra__seg_bounds(&p->d.mask, keys, &rows);
            if (ra__spans_bounds(&s, &bounds)) continue;
            ra__q_needs_mark(p, c, i, span, spans, &s);
            s.n = 0;
            (void)ra__spans_bounds(&s, &bounds);
        }
        ra__q_needs_mark(p, c, i, span, spans, &s);
    }
}

/* Writes the keys of sequence b on all ranks; returns how many spans. */
static int64_t ra__key_spans(const ra_plan *p, int32_t b, ra__span *span) {
    int64_t n = 0, keys = ra__k_len(&p->d, b);
    for (int32_t r = 0; r < p->d.ranks; r++) {
        ra__side side = ra__plan_side(p, 1, r);
        ra__seg s;
        for (int64_t i = 0; ra__side_seg(&side, b, keys, i, &s); i++) {
            if (!s.rows) continue;
            ra__seg_span(&s, NULL, &span[n].first, &span[n].last);
            span[n++].rank = r;
        }
    }
    return n;
}

/* -------------------------------------------------------------------------- tours
 * The journey of all chunks of one kind of pass around the ring. Backward, the gradient of a chunk
 * that leaves returns from the last rank that it visits. */
typedef struct ra__tour {
    const ra_plan *p;
    const ra__travel *t;
    int32_t back, direction;
} ra__tour;

static ra__tour ra__tour_of(const ra_plan *p, int back) {
    ra__tour w;
    w.p = p;
    w.t = back ? ra__back_travel(p) : &p->keys;
    w.back = back;
    w.direction = back ? p->back_direction : p->direction;
    return w;
}

/* Steps from one rank to another in the direction of travel; ranks that a chunk visits after its
 * owner. */
RA__INLINE int32_t ra__tour_apart(const ra__tour *w, int32_t from, int32_t to) {
    return w->direction > 0 ? ra__ranks_up(w->p, from, to) : ra__ranks_up(w->p, to, from);
}
RA__INLINE int32_t ra__tour_stations(const ra__tour *w, int64_t c) {
    return w->back ? ra__back_stations(w->p, &w->t->chunk[c]) : ra__chunk_reach(&w->t->chunk[c]);
}

/* Chunk c comes to a rank that is not its owner; it leaves the rank, to the next one or back to its
 * owner. */
RA__INLINE int ra__tour_arrives(const ra__tour *w, int64_t c, int32_t rank) {
    int32_t n = ra__tour_apart(w, w->t->chunk[c].owner, rank);
    return n > 0 && n <= ra__tour_stations(w, c);
}
RA__INLINE int ra__tour_leaves(const ra__tour *w, int64_t c, int32_t rank) {
    int32_t n = ra__tour_apart(w, w->t->chunk[c].owner, rank), stations = ra__tour_stations(w, c);
    return n < stations || (w->back && stations && n == stations);
}

/* Sets how far every segment travels. Forward: returns the bytes on all links together. */
static int64_t ra__tour_hops(const ra__tour *w) {
    int64_t bytes = 0;
    for (int64_t c = 0; c < w->t->chunks; c++) {
        ra__chunk *chunk = &w->t->chunk[c];
        int32_t *hops = w->back ? chunk->back_hops : chunk->hops;
        for (int32_t i = 0; i < 2; i++)
            hops[i] = w->direction > 0 ? chunk->up[i] : chunk->down[i];
        *(w->back ? &chunk->back_lead : &chunk->lead) = hops[1] > hops[0];
        for (int32_t h = 0; !w->back && h < ra__chunk_reach(chunk);) {
            int32_t on = hops[0] > h && (hops[0] < hops[1] || hops[1] <= h) ? hops[0] : hops[1];
            int64_t length = ra__message_bytes(&w->p->d, chunk, h + 1);
            bytes = ra__add_sat(bytes, (on - h) * length);     /* same length up to hop `on` */
            h = on;
        }
    }
    return bytes;
}

/* A chunk leaves its owner in some step and each rank after it one step later; backward its
 * gradient returns in the step after it came to its last rank. Chunks move on in the first half of
 * a step and return in the second half. A count is a step less the place of a rank in the direction
 * of travel: a chunk leaves all its ranks in the same count, those beyond the end of the ring
 * `ranks` later. free[x]: the first count in which a chunk may leave place x. Returns the first
 * count in which one may leave `leaves` places from `place` on. */
static int64_t ra__line_least(const int64_t *free, int32_t ranks, int32_t place, int32_t leaves) {
    int64_t least = free[place];
    int32_t over = place + leaves - ranks;
    for (int32_t x = place + 1; x < place + leaves && x < ranks; x++)
        least = free[x] > least ? free[x] : least;
    for (int32_t x = 0; x < over; x++)
        least = free[x] - ranks > least ? free[x] - ranks : least;
    return least;
}

static void ra__line_set(int64_t *free, int32_t ranks, int32_t place, int32_t leaves,
                         int64_t next) {
    int32_t over = place + leaves - ranks;
    for (int32_t x = place; x < place + leaves && x < ranks; x++) free[x] = next;
    for (int32_t x = 0; x < over; x++) free[x] = next + ranks;
}

/* Lets every chunk start, in the order of the list, in the first step from which it can travel
 * without a stop. start[c]: that step, -1: it stays. Returns the number of steps.
 *
 * A rank sends and receives in the order of the list. A chunk that comes in one step is sent on in
 * the next, so a rank keeps at most one while another comes: that takes two buffers. With one
 * buffer a rank is free in every other step. Own chunks return in order, one per step. If owners
 * fold twice, own chunks have returned before the rank folds one that stays, one of another rank,
 * or one of another sequence.
 *
 * Cost: chunks x ranks. */
static int64_t ra__tour_steps(const ra__tour *w, int64_t *line, int64_t *start) {
    const ra_plan *p = w->p;
    int32_t ranks = p->d.ranks, gap = p->d.buffers > 1 ? 1 : 2, last = 0;
    int64_t *free = line, *returned = line + ranks, steps = 0;
    for (int32_t x = 0; x < ranks; x++) {
        free[x] = -x;
        returned[x] = -1;
    }
    for (int64_t c = 0; c < w->t->chunks; c++) {
        const ra__chunk *chunk = &w->t->chunk[c];
        int32_t n = ra__tour_stations(w, c), leaves = n + w->back;
        int32_t place = w->direction > 0 ? chunk->owner : ranks - 1 - chunk->owner;
        int64_t least;
        if (c && w->back && p->owner_folds_twice &&
            (!n || place != last || chunk->sequence != chunk[-1].sequence))
            free[last] = ra__max(free[last], returned[last] + 1 - last);
        last = place;
        start[c] = -1;
        if (!n) continue;
        least = ra__line_least(free, ranks, place, leaves);
        if (w->back) least = ra__max(least, returned[place] + 1 - n - place);
        ra__line_set(free, ranks, place, leaves, least + gap);
        start[c] = least + place;
        returned[place] = start[c] + n;
        steps = ra__max(steps, start[c] + leaves);
    }
    return steps;
}

/* -------------------------------------------------------------------------- exchanges
 * A transport that has only sendrecv blocks until the peer comes, so all ranks must agree when each
 * message moves. Every rank plays the pass of all ranks through, with computing that takes time and
 * a network that takes none, and gives every message a moment. Both sides find the same moment, and
 * make their exchanges in this order. Whatever a message waits for has an earlier moment: that is
 * why exchanges cannot deadlock, however long a rank really computes.
 *
 * A moment is a time, in units of work, and in its lower bits a count for what moves at one time.
 * Moments of gradients that return are odd and all others even, so a rank never receives two
 * messages at once.
 *
 * Work is an estimate: what a few blocks of queries see of the chunk (with RA_TRAVEL_Q: what blocks
 * of the chunk see of the rank's keys). A poor one costs time and nothing else. */
enum { RA__MOMENT_BITS = 24, RA__WORK_BITS = 36, RA__SAMPLES = 16 };

typedef struct ra__play_slot { int64_t arrived, folded, sent; } ra__play_slot;

/* Positions that a block of queries sees: [lo, hi) and [doc, keep). */
typedef struct ra__sight { int64_t lo, hi, doc, keep; } ra__sight;

/* What a rank has done. send, fold, home: the next chunk of the list that it looks at for sending,
 * for folding, and for its return. Message i of a kind is in slot i mod slots. */
typedef struct ra__play_seat {
    int64_t send, fold, home;
    int64_t received, sent_on, visited; /* chunks of others: came, are past `send`, past `fold` */
    int64_t started, own_sent, returned, ended; /* own chunks that leave: first visit, sent, back,
                                        * second visit */
    int64_t next_send, next_receive, next_return; /* not before these moments */
    int64_t busy;                      /* it has folded everything before `fold` */
    int64_t group, group_keys, group_from; /* forward: when the chunks that it folds together
                                        * began, their keys, the first received one of them */
    int64_t released;                  /* latest moment of a slot that is free again */
    int64_t blocks, own, own_first, own_last; /* of this sequence: its blocks of what stays, of what
                                        * travels, and those of the visits so far */
    int64_t own_next;                  /* own chunk whose second visit is next */
    int64_t own_folded[RA__PACK_SLOTS], own_left[RA__PACK_SLOTS];
    int64_t came_back[RA__RETURN_SLOTS], folded_again[RA__RETURN_SLOTS];
    int32_t sequence;                  /* of the blocks; -1: none yet */
    int32_t samples;                   /* of queries that stay */
    ra__sight sight[RA__SAMPLES];
} ra__play_seat;

/* Chunks that are folded together. */
typedef struct ra__play_work { int64_t begin, end, folds; } ra__play_work;

/* Scratch of a plan, and how far its exchanges are made. */
enum { RA__PLAY_NONE, RA__PLAY_STARTED, RA__PLAY_DONE };
typedef struct ra__play {
    ra__play_seat *seat;               /* [ranks] */
    ra__play_slot *slot;               /* [ranks][buffers] */
    int64_t *moment[3];                /* of this rank's messages: sent, received, returned */
    ra__play_work *work;               /* what this rank folds, in order */
    int64_t *come;                     /* when each entry of its fold list and all before it have
                                        * come */
    int64_t count[3], works, comes;
    int32_t shift;                     /* of work, so that a pass fits into RA__WORK_BITS */
    int32_t state;                     /* atomic: RA__PLAY_* */
} ra__play;

RA__INLINE int64_t ra__play_tokens(const ra__tour *w, int stays, int32_t b) {
    int keys = stays == (w->t == &w->p->queries);
    return keys ? ra__k_len(&w->p->d, b) : ra__q_len(&w->p->d, b);
}

static ra__sight ra__sight_of(const ra_plan *p, int32_t b, const ra__seg *rows) {
    ra__bounds x = ra__seg_bounds(&p->d.mask, ra__key_end(&p->d, b, 0), rows);
    ra__sight s;
    s.lo = ((int64_t)x.lo_min + x.lo_max) / 2;
    s.hi = ((int64_t)x.hi_min + x.hi_max) / 2;
    s.doc = x.doc_min;
    s.keep = x.keep_max;
    return s;
}

/* How many keys of a run are at [lo, hi). */
static int64_t ra__sight_keys(const ra__seg *s, int64_t lo, int64_t hi) {
    int64_t from = ra__max(0, lo - s->pos), to = ra__max(0, hi - s->pos);
    if (s->stride > 1) {
        from /= s->stride;
        to = ra__ceil_div(to, s->stride);
    }
    return ra__max(0, ra__min(s->rows, to) - from);
}
static int64_t ra__sight_all(const ra__seg *s, const ra__sight *x) {
    int64_t n = ra__sight_keys(s, x->lo, x->hi);
    return x->doc < x->keep ? n + ra__sight_keys(s, x->doc, x->keep) : n;
}

RA__INLINE int64_t ra__play_samples(const ra__tour *w) {
    return w->p->d.ranks > 64 ? RA__SAMPLES / 4 : RA__SAMPLES;
}

/* Sets what some of a rank's blocks of queries see; none with ARRAY. */
static void ra__play_sights(const ra__tour *w, ra__play_seat *s, int32_t rank) {
    ra__side side = ra__plan_side(w->p, 0, rank);
    const int64_t tokens = ra__q_len(&w->p->d, s->sequence);
    const int64_t n = ra__min(ra__play_samples(w), s->blocks);
    int64_t before = 0;
    ra__seg seg;
    s->samples = 0;
    if (side.layout == RA_LAYOUT_ARRAY || w->t == &w->p->queries) return;
    for (int64_t i = 0; s->samples < n && ra__side_seg(&side, s->sequence, tokens, i, &seg); i++) {
        const int64_t blocks = ra__ceil_div(seg.rows, RA_BLOCK_TOKENS);
        for (; s->samples < n; s->samples++) {
            const int64_t at = (2 * s->samples + 1) * s->blocks / (2 * n) - before;
            if (at >= blocks) break;
            ra__seg rows = ra__seg_block(&seg, at);
            s->sight[s->samples] = ra__sight_of(w->p, s->sequence, &rows);
        }
        before += blocks;
    }
}

/* A run of positions like those of a chunk's segment. */
static ra__seg ra__play_seg(const ra__chunk *c, int32_t i) {
    ra__seg s = c->seg[i];
    if (!c->list.run) return s;
    s.pos = c->low;
    s.rows = ra__chunk_rows(c);
    s.stride = ra__max(1, (c->high - c->low) / ra__max(1, s.rows));
    return s;
}

/* RA_TRAVEL_Q: what some blocks of a chunk of queries see of a rank's keys, or of some runs of
 * them. */
static int64_t ra__play_seen(const ra__tour *w, const ra__chunk *c, int32_t rank) {
    ra__side side = ra__plan_side(w->p, 1, rank);
    const int64_t blocks = ra__chunk_blocks(c), n = ra__min(ra__play_samples(w), blocks);
    const int64_t tokens = ra__k_len(&w->p->d, c->sequence);
    const int64_t skip = side.layout == RA_LAYOUT_RUNS
                             ? ra__max(1, side.list.count / RA__SAMPLES) : 1;
    int64_t all = 0;
    ra__sight x[RA__SAMPLES];
    ra__seg s;
    for (int64_t i = 0; i < n; i++) {
        int64_t at = (2 * i + 1) * blocks / (2 * n);
        int32_t which;
        if (c->segs == 2) at = ra__min(at / 2 * 2 + i % 2, blocks - 1);    /* blocks alternate */
        ra__seg rows = ra__chunk_block(c, RA_ORDER_ASCENDING, at, &which);
        x[i] = ra__sight_of(w->p, c->sequence, &rows);
    }
    for (int64_t i = 0; ra__side_seg(&side, c->sequence, tokens, i, &s); i += skip)
        for (int64_t k = 0; k < n && s.rows; k++) all += ra__sight_all(&s, &x[k]);
    return n ? ra__mul_sat(ra__mul_sat(all, skip), blocks) / n : 0;
}

/* Blocks of a rank's sequence of what stays, or of what travels. */
static int64_t ra__play_blocks(const ra__tour *w, int stays, int32_t rank, int32_t b) {
    ra__side side = ra__plan_side(w->p, stays == (w->t == &w->p->queries), rank);
    return ra__side_blocks(&side, b, ra__play_tokens(w, stays, b));
}

/* The time after `when` and some work. */
RA__INLINE int64_t ra__play_after(const ra__play *y, int64_t when, int64_t work) {
    if (!work) return when;
    return ((when >> RA__MOMENT_BITS) + ra__max(1, work >> y->shift)) << RA__MOMENT_BITS;
}

/* The first own chunk from c on that leaves a rank. */
static int64_t ra__play_own(const ra__tour *w, int32_t rank, int64_t c) {
    while (c < w->t->chunks && (w->t->chunk[c].owner != rank || !ra__tour_stations(w, c))) c++;
    return c;
}

/* This rank has folded something, after `begin` or together with what it folded before. */
static void ra__play_note(const ra__tour *w, ra__play *y, int32_t rank, int64_t begin,
                          int64_t ready, int joins) {
    ra__play_work *work = &y->work[y->works];
    if (rank != w->p->d.rank) return;
    y->come[y->comes] = y->comes ? ra__max(ready, y->come[y->comes - 1]) : ready;
    y->comes++;
    if (joins) work--;
    else y->works++;
    if (!joins) work->begin = begin;
    work->end = y->seat[rank].busy;
    work->folds = (joins ? work->folds : 0) + 1;
}

/* Work of a chunk on a rank. */
static int64_t ra__play_all(const ra__tour *w, const ra__play *y, int32_t rank, int64_t c) {
    const ra__play_seat *s = &y->seat[rank];
    const ra__chunk *chunk = &w->t->chunk[c];
    int64_t all = 0;
    if (w->p->d.layout.kind == RA_LAYOUT_ARRAY)
        return ra__mul_sat(ra__chunk_rows(chunk), s->blocks);
    if (w->t == &w->p->queries) return ra__play_seen(w, chunk, rank);
    for (int32_t i = 0; i < (chunk->list.run ? 1 : chunk->segs); i++) {
        ra__seg seg = ra__play_seg(chunk, i);
        for (int32_t k = 0; k < s->samples; k++) all += ra__sight_all(&seg, &s->sight[k]);
    }
    return s->samples ? ra__mul_sat(all, s->blocks) / s->samples : 0;
}

/* Work of an own chunk, which is folded once or in two parts of the rows that stay. These are
 * nearly proportional to where it is in the shard. */
static int64_t ra__play_part(const ra__tour *w, const ra__play *y, int32_t rank, int64_t c,
                             int second) {
    const ra__play_seat *s = &y->seat[rank];
    const int64_t all = ra__play_all(w, y, rank, c), own = ra__max(2 * s->own, 1);
    const int64_t middle = 2 * (second ? s->own_last : s->own_first) +
                           ra__chunk_blocks(&w->t->chunk[c]);
    if (!w->back || !w->p->owner_folds_twice || !ra__tour_stations(w, c)) return all;
    return all / own * ra__min(own, second ? middle : own - middle);
}

/* The second visit of the own chunk of a rank that started first, if it comes before chunk c; as
 * ra__back_late. */
static int ra__play_again(const ra__tour *w, ra__play *y, int32_t rank, int64_t c) {
    ra__play_seat *s = &y->seat[rank];
    int64_t i = s->ended % RA__RETURN_SLOTS, begin, again, start;
    const int64_t *step = w->p->start;
    if (!w->p->owner_folds_twice || s->ended == s->started) return 0;
    again = s->own_next;
    if (c < w->t->chunks && w->t->chunk[c].sequence == s->sequence) {
        if (!(w->t->chunk[c].owner == rank || ra__tour_arrives(w, c, rank))) return 0;
        start = step[again] + ra__tour_stations(w, again) + 2;
        if (w->t->chunk[c].owner == rank && ra__tour_stations(w, c) && start > step[c]) return 0;
    }
    if (s->ended == s->returned) return -1;
    begin = ra__max(s->busy, s->came_back[i] + 1);
    s->busy = ra__play_after(y, begin, ra__play_part(w, y, rank, again, 1));
    s->own_last += ra__chunk_blocks(&w->t->chunk[again]);
    s->folded_again[i] = s->busy;
    s->ended++;
    s->own_next = ra__play_own(w, rank, again + 1);
    ra__play_note(w, y, rank, begin, s->came_back[i] + 1, 0);
    return 1;
}

/* Forward: chunks that have come are folded together, up to RA__GROUP_KEYS keys, and end
 * together. */
static void ra__play_group(const ra__tour *w, ra__play *y, int32_t rank, int64_t c, int64_t ready) {
    ra__play_seat *s = &y->seat[rank];
    const int32_t n = w->p->d.buffers;
    const int joins = !w->back && !w->p->d.engine && s->group_keys < RA__GROUP_KEYS &&
                      s->group_keys && ready >> RA__MOMENT_BITS <= s->group >> RA__MOMENT_BITS;
    const int64_t begin = joins ? s->busy : ra__max(s->busy, ready);
    const int own = w->t->chunk[c].owner == rank;
    if (!joins) {
        s->group = begin;
        s->group_keys = 0;
        s->group_from = s->visited;
    }
    s->group_keys += ra__chunk_rows(&w->t->chunk[c]);
    s->busy = ra__play_after(y, begin, own ? ra__play_part(w, y, rank, c, 0)
                                           : ra__play_all(w, y, rank, c));
    for (int64_t i = ra__max(s->group_from, s->visited - n + 1); i < s->visited + !own; i++)
        y->slot[(int64_t)rank * n + i % n].folded = s->busy;
    ra__play_note(w, y, rank, begin, ready, joins);
}

/* The next visit of a chunk to a rank; 0: it must wait, or has had all. */
static int ra__play_visit(const ra__tour *w, ra__play *y, int32_t rank) {
    ra__play_seat *s = &y->seat[rank];
    const int64_t c = s->fold;
    const int32_t n = w->p->d.buffers;
    int64_t ready = 0;
    int again = ra__play_again(w, y, rank, c), own, leaves;
    if (again) return again > 0;
    if (c == w->t->chunks) return 0;
    if (w->t->chunk[c].sequence != s->sequence) {
        s->sequence = w->t->chunk[c].sequence;
        s->blocks = ra__play_blocks(w, 1, rank, s->sequence);
        s->own = ra__play_blocks(w, 0, rank, s->sequence);
        s->own_first = s->own_last = s->group_keys = 0;
        ra__play_sights(w, s, rank);
    }
    own = w->t->chunk[c].owner == rank;
    leaves = own && w->back && ra__tour_stations(w, c);
    if (leaves && s->started - s->own_sent >= RA__PACK_SLOTS) return 0;
    if (leaves && s->started >= RA__PACK_SLOTS) ready = s->own_left[s->started % RA__PACK_SLOTS];
    if (!own && !ra__tour_arrives(w, c, rank)) return (int)(++s->fold > 0);
    if (!own && s->visited == s->received) return 0;
    if (!own) ready = y->slot[(int64_t)rank * n + s->visited % n].arrived + 1;
    if (ra__need(w->t, c, rank) || (own && w->back)) ra__play_group(w, y, rank, c, ready);
    if (leaves) {
        if (s->started == s->ended) s->own_next = c;
        s->own_folded[s->started++ % RA__PACK_SLOTS] = s->busy;
    }
    if (own) s->own_first += ra__chunk_blocks(&w->t->chunk[c]);
    if (own && !leaves) s->own_last = s->own_first;
    s->visited += !own;
    return (int)(++s->fold > 0);
}

/* From which moment on a rank may send chunk c; -1: not known yet. */
static int64_t ra__play_ready(const ra__tour *w, const ra__play *y, int32_t rank, int64_t c) {
    const ra__play_seat *s = &y->seat[rank];
    const int32_t n = w->p->d.buffers;
    const ra__play_slot *slot = &y->slot[(int64_t)rank * n + s->sent_on % n];
    if (w->t->chunk[c].owner == rank) {
        if (!w->back) return s->next_send;
        if (s->started == s->own_sent) return -1;
        return ra__max(s->next_send, s->own_folded[s->own_sent % RA__PACK_SLOTS]);
    }
    if (s->sent_on == s->received || (w->back && s->sent_on == s->visited)) return -1;
    return ra__max(s->next_send, ra__max(slot->arrived + 1, w->back ? slot->folded : 0));
}

/* From which moment on the next rank may receive; -1: not known yet. */
static int64_t ra__play_free(const ra__tour *w, ra__play *y, int32_t rank) {
    ra__play_seat *s = &y->seat[rank];
    const int32_t n = w->p->d.buffers;
    const int64_t before = s->received - n;
    if (before >= 0) {
        const ra__play_slot *slot = &y->slot[(int64_t)rank * n + s->received % n];
        if (s->visited <= before || s->sent_on <= before) return -1;
        s->released = ra__max(s->released, ra__max(slot->folded, slot->sent));
    }
    return ra__max(s->released, s->next_receive);
}

/* From which moment on the owner of chunk c may receive its gradient; -1: not known yet. */
static int64_t ra__play_home(const ra__tour *w, const ra__play *y, int64_t c) {
    const ra__play_seat *s = &y->seat[w->t->chunk[c].owner];
    const int64_t before = s->returned - RA__RETURN_SLOTS;
    if (s->home != c || (w->p->owner_folds_twice && s->ended <= before)) return -1;
    if (before < 0 || !w->p->owner_folds_twice) return s->next_return;
    return ra__max(s->next_return, s->folded_again[before % RA__RETURN_SLOTS]);
}

static void ra__play_record(const ra__tour *w, ra__play *y, int32_t rank, int32_t kind,
                            int64_t moment) {
    if (rank == w->p->d.rank) y->moment[kind][y->count[kind]++] = moment;
}

/* What is sent, at which moment. */
enum { RA__LEAVES, RA__ARRIVES, RA__RETURNS_TO };
static void ra__play_move(const ra__tour *w, ra__play *y, int32_t rank, int32_t to, int64_t when) {
    ra__play_seat *s = &y->seat[rank], *o = &y->seat[to];
    const int32_t n = w->p->d.buffers;
    const int64_t c = s->send++;
    const int returns = w->t->chunk[c].owner == to;
    s->next_send = when + 1;
    if (w->t->chunk[c].owner == rank) s->own_left[s->own_sent++ % RA__PACK_SLOTS] = when + 1;
    else y->slot[(int64_t)rank * n + s->sent_on++ % n].sent = when + 1;
    ra__play_record(w, y, rank, RA__LEAVES, when);
    ra__play_record(w, y, to, returns ? RA__RETURNS_TO : RA__ARRIVES, when);
    if (returns) {
        o->came_back[o->returned++ % RA__RETURN_SLOTS] = when;
        o->next_return = when + 1;
        o->home = ra__play_own(w, to, c + 1);
    } else {
        ra__play_slot *slot = &y->slot[(int64_t)to * n + o->received++ % n];
        slot->arrived = when;
        slot->folded = slot->sent = 0;
        o->next_receive = when + 1;
    }
}

/* The next message of a rank; 0: it must wait, or has sent all. */
static int ra__play_send(const ra__tour *w, ra__play *y, int32_t rank) {
    ra__play_seat *s = &y->seat[rank];
    for (; s->send < w->t->chunks; s->send++) {
        const int64_t c = s->send;
        const int32_t owner = w->t->chunk[c].owner, hop = ra__tour_apart(w, owner, rank);
        const int arrives = ra__tour_arrives(w, c, rank);
        int64_t ready, free;
        if (ra__tour_leaves(w, c, rank)) {
            const int returns = hop == ra__tour_stations(w, c);
            const int32_t to = returns ? owner : ra__rank_up(w->p, rank, w->direction);
            ready = ra__play_ready(w, y, rank, c);
            free = ready < 0 ? -1 : returns ? ra__play_home(w, y, c) : ra__play_free(w, y, to);
            if (free < 0) return 0;
            free = ra__max(free, ready);
            ra__play_move(w, y, rank, to, free + ((free & 1) != returns));
            return 1;
        }
        if (arrives && s->sent_on == s->received) return 0;
        s->sent_on += arrives;
    }
    return 0;
}

/* Work fits into RA__WORK_BITS, all ranks together. */
static int32_t ra__play_shift(const ra__tour *w) {
    int64_t all = 0, blocks = 0;
    int32_t shift = 0;
    for (int64_t c = 0; c < w->t->chunks; c++)
        blocks = ra__add_sat(blocks, ra__chunk_rows(&w->t->chunk[c]));
    for (int32_t r = 0; r < w->p->d.ranks; r++)
        for (int32_t b = 0; b < w->p->d.sequences; b++)
            all = ra__add_sat(all, ra__play_blocks(w, 1, r, b));
    all = ra__mul_sat(ra__add_sat(all, 1), ra__add_sat(blocks, 1));
    while (all >> shift >> RA__WORK_BITS) shift++;
    return shift;
}

/* Plays the pass through. Cost: chunks x ranks. */
static void ra__play_through(const ra__tour *w, ra__play *y) {
    const int32_t ranks = w->p->d.ranks;
    int any = 1;
    memset(y->seat, 0, (size_t)ranks * sizeof *y->seat);
    memset(y->slot, 0, (size_t)ranks * (size_t)w->p->d.buffers * sizeof *y->slot);
    memset(y->count, 0, sizeof y->count);
    y->works = y->comes = 0;
    y->shift = ra__play_shift(w);
    for (int32_t r = 0; r < ranks; r++) {
        y->seat[r].sequence = -1;
        y->seat[r].home = ra__play_own(w, r, 0);
    }
    while (any) {
        any = 0;                       /* folds first: a group must be complete before a receive
                                        * waits for its end */
        for (int32_t r = 0; r < ranks; r++)
            while (ra__play_visit(w, y, r)) any = 1;
        for (int32_t r = 0; r < ranks; r++) any |= ra__play_send(w, y, r);
    }
    for (int32_t r = 0; r < ranks; r++)
        RINGATTN_ASSERT(y->seat[r].send == w->t->chunks && y->seat[r].fold == w->t->chunks);
}

/* Sets how much this rank has computed before each of its exchanges, of `tiles` in all. x->step is
 * its moment. */
static void ra__play_progress(const ra__play *y, int64_t tiles, ra__exchange *x, int64_t count) {
    int64_t all = 0, done = 0, folds = 0, come = 0, k = 0;
    for (int64_t i = 0; i < y->works; i++)
        all += (y->work[i].end - y->work[i].begin) >> RA__MOMENT_BITS;
    for (int64_t i = 0; i < count; i++, x++) {
        int64_t part = 0;
        for (; k < y->works && y->work[k].end <= x->step; k++) {
            done += (y->work[k].end - y->work[k].begin) >> RA__MOMENT_BITS;
            folds += y->work[k].folds;
        }
        x->after_folds = folds;
        if (k < y->works && y->work[k].begin < x->step) {
            part = (x->step - y->work[k].begin) >> RA__MOMENT_BITS;
            x->after_folds += y->work[k].folds;
        }
        while (come < y->comes && y->come[come] <= x->step) come++;
        x->after_folds = ra__min(x->after_folds, come);
        x->after_tiles = all ? (int64_t)((double)tiles * ((double)(done + part) / (double)all)) : 0;
    }
}

/* Writes this rank's exchanges, in the order of their moments; returns how many. tiles: that this
 * rank computes. */
static int64_t ra__tour_exchanges(const ra__tour *w, ra__play *y, int64_t tiles,
                                  ra__exchange *out) {
    int64_t next[3] = { 0, 0, 0 }, count = 0;
    if (w->p->d.ranks < 2) return 0;
    ra__play_through(w, y);
    for (;; count++) {
        int64_t when = INT64_MAX;
        ra__exchange *x = &out[count];
        for (int32_t i = 0; i < 3; i++)
            if (next[i] < y->count[i]) when = ra__min(when, y->moment[i][next[i]]);
        if (when == INT64_MAX) break;
        memset(x, 0, sizeof *x);
        x->send = x->recv = x->returned = -1;
        x->step = when;
        for (int32_t i = 0; i < 3; i++) {
            int32_t index = (int32_t)next[i];
            if (next[i] == y->count[i] || y->moment[i][next[i]] != when) continue;
            *(i == RA__LEAVES ? &x->send : i == RA__ARRIVES ? &x->recv : &x->returned) = index;
            next[i]++;
        }
    }
    ra__play_progress(y, tiles, out, count);
    for (int64_t i = 0; i < count; i++)
        out[i].step = (out[i].step >> RA__MOMENT_BITS) +
                      (out[i].step & (((int64_t)1 << RA__MOMENT_BITS) - 1));
    return count;
}

/* Own chunks that have left and not returned yet, at most. */
RA__INLINE int64_t ra__back_lag(const ra_plan *p) {
    return p->d.ranks + (p->d.buffers > 1);
}

/* The rank that a chunk goes to next, and the hop of that message. */
RA__INLINE int32_t ra__back_to(const ra_plan *p, const ra__chunk *c, int32_t rank, int32_t *hop) {
    int32_t n = p->back_direction > 0 ? ra__ranks_up(p, c->owner, rank)
                                      : ra__ranks_up(p, rank, c->owner);
    int returned = n == ra__back_stations(p, c);
    *hop = returned ? p->d.ranks : n + 1;
    return returned ? c->owner : ra__rank_up(p, rank, p->back_direction);
}

/* ========================================================================== WORKSPACE
 * The memory of a ring: its structs, how they are laid out in one workspace, and how many bytes
 * that takes. The plan reports these bytes, so they are counted here, before it. */

/* Longest gradients of a chunk; RA_TRAVEL_Q: longest message, which holds its rows too. */
static int64_t ra__plan_grad_bytes(const ra_plan *p) {
    const ra__travel *t = ra__back_travel(p);
    ra__message_offsets part[2], grad[2];
    int64_t most = 0;
    for (int64_t c = 0; c < t->chunks; c++)
        most = ra__max(most, p->d.backward_travel == RA_TRAVEL_Q
                                 ? ra__back_message(&p->d, &t->chunk[c], 0, part, grad)
                                 : ra__grad_parts(&p->d, &t->chunk[c], 0, grad));
    return most;
}

/* reads[r]: 1 if another rank r needs one of the rank's chunks of keys; read[r]: if the rank needs
 * one of r's. */
typedef struct ra__readers { uint8_t reads[RA__MOST_RANKS], read[RA__MOST_RANKS]; } ra__readers;

static void ra__readers_of(const ra_plan *p, int32_t rank, ra__readers *out) {
    memset(out, 0, sizeof *out);
    for (int64_t c = 0; c < p->keys.chunks; c++) {
        int32_t owner = p->keys.chunk[c].owner;
        if (owner != rank) {
            out->read[owner] |= (uint8_t)ra__needs(p, c, rank);
            continue;
        }
        for (int32_t r = 0; r < p->d.ranks; r++)
            out->reads[r] |= (uint8_t)(r != rank && ra__needs(p, c, r));
    }
}

/* The notices that end a shared pass: one from each reader, one to each owner that is read. */
static void ra__count_notices(const ra_plan *p, int32_t rank, int64_t *in, int64_t *out) {
    ra__readers all;
    ra__readers_of(p, rank, &all);
    *in = *out = 0;
    for (int32_t r = 0; r < p->d.ranks; r++) {
        *in += all.reads[r];
        *out += all.read[r];
    }
}

enum { RA__MAGIC = 0x31464152 };
enum { RA__REFUSALS = 32 };            /* refused tickets that are remembered */

/* Tickets of ra_join and ra_infer_join. A thread that begins or looks up holds `join`. */
typedef struct ra__tickets {
    int64_t last;                      /* atomic: the latest that was begun or refused */
    ra_status status;                  /* atomic: what its beginning returned */
    int32_t join;                      /* atomic */
    int64_t refusals, forgotten;       /* tickets refused so far; the last that is not kept. Under
                                        * join, but atomic to see whether there are any */
    int64_t refused[RA__REFUSALS];
    ra_status refused_status[RA__REFUSALS];
} ra__tickets;
enum { RA__RING_ENDING = 3 };          /* a pass that went well, while its last callbacks run */
enum { RA__FRAME_CHUNK = 1, RA__FRAME_DONE = 2, RA__FRAME_GRAD = 3 };
#define RA__QUIET_NS ((int64_t)60 * 1000000000)        /* silence that is never a failure */

typedef struct ra__frame {             /* RA__FRAME_BYTES in front of every chunk */
    uint32_t magic, abi;
    int64_t pass;
    uint64_t hash;                     /* of all agreed values */
    int64_t length;                    /* of the message that left the owner */
    int32_t origin, chunk, kind;
    uint32_t space;                    /* address space of the sender if messages carry addresses;
                                        * otherwise 0 */
    uint64_t parts, check;             /* a byte of each part of the hash; hash of all before */
} ra__frame;

typedef struct ra__address {           /* instead of the chunk, where memory is shared */
    const uint8_t *k, *v;              /* row 0 of the owner's shard of this sequence */
    const int32_t *pos;
    int64_t *alive;                    /* counts while a reader makes progress with anything */
    int64_t k_token, k_head, v_token, v_head;
    uint8_t *grad;                     /* backward: the chunk's gradients, see ra__grad_parts */
    int64_t spare[7];
} ra__address;

/* Multiply-adds that a step does in tiles: one has 64 * 64 * (Dk + Dv), backward 64 * 64 * (3 Dk +
 * 2 Dv). A step ends after the block of keys, against the panels of its task, that uses this up.
 * PERF: Zen 5, one thread, D 128, AVX-512: a step takes 1.4 ms forward, 1.7 ms backward; with 2^28,
 * 4.9 and 5.8 ms, in the same time overall. */
enum { RA__STEP_WORK = 1 << 26 };
enum { RA__STRIPES = 256 };            /* bounds of query rows that a backward pass keeps */
enum { RA__PATIENT = 64 };             /* looks at a task left in hand, before one takes it */
#define RA__NO_FOLD INT64_MAX          /* no entry of the fold list */

/* A task and the entry of the fold list that it takes next. */
typedef struct ra__claim { int64_t fold, task; } ra__claim;

/* Progress of a task. */
typedef struct ra__turn {
    int32_t next;                      /* index in its sequence of the entry that it takes next */
    int32_t begun;                     /* forward: its running state is in memory */
} ra__turn;

/* Where the rows of a packed chunk of queries are: renumbered, one segment after the other. */
typedef struct ra__packed { ra__work w; ra__back b; ra__chunk c; uint8_t *sums; } ra__packed;

/* A task in hand of a backward pass. Sums begin and end with the chunk (those of the side that
 * travels) or with the sequence's list of chunks (those of the side that stays). */
typedef struct ra__back_hand {
    ra__back_scratch x;
    ra__share s;
    ra__packed p;                      /* RA_TRAVEL_Q: the chunk */
    ra__bounds seen;                   /* RA_TRAVEL_Q: of all its rows */
    ra__item item;                     /* keys in hand, with their gradients */
    ra__grads g;
    int32_t keys_first, keys_last;     /* dK and dV begin at 0, go to the caller */
    int32_t q_first, q_last;           /* dQ does */
    int32_t stage, opened;             /* RA__STAGE_*; the item in hand is prepared */
    int64_t index, at;                 /* of a stage: items that are done, rows of the next */
} ra__back_hand;

/* A task in hand of a forward pass. */
typedef struct ra__fold_hand {
    ra__scratch x;
    ra__task t;
    ra__item item;                     /* of entry `next`, once x.block is not 0 */
    ra__bounds seen;                   /* of all its rows */
    int64_t next;                      /* entry that it folds next */
    int32_t loaded;                    /* queries and state are in the scratch */
    int32_t received;                  /* the message of the last one folded since then, or -1 */
} ra__fold_hand;

/* Where a thread computes: scratch and the task in hand, which a step may leave half done. There
 * are as many desks as threads. A thread takes its own, or another one if its own is taken. If a
 * thread does not come back, others finish the task on its desk when they have nothing else to
 * do. */
typedef struct ra__desk {
    int32_t taken;                     /* 1: a thread uses it */
    int32_t idle;                      /* how often others found it free with a task in hand */
    int64_t fold;                      /* entry of that task, which has folded all before it;
                                        * RA__NO_FOLD: no task */
    ra__claim claim;
    int32_t open;                      /* 1: `hand` is set */
    union { ra__fold_hand fold; ra__back_hand back; } hand;
} ra__desk;

/* A queue of messages of one kind and direction. Message i of the pass uses slot i mod slots
 * and is posted after message i - 1; messages are taken in the same order. */
typedef struct ra__lane {
    ra_transport_op *op;               /* [slots] */
    uint8_t *buf;                      /* [slots][bytes]; null: each send has its own place */
    int64_t *ns;                       /* [slots] when each was posted; null: not noted */
    int64_t bytes, posted, done;       /* done is written under comm and read by all threads */
    int32_t slots, total;              /* total: messages of this pass */
} ra__lane;

/* Notices end a pass with shared memory: a rank sends one to each owner of keys that it reads when
 * it has finished with them. */
enum { RA__RECEIVES, RA__SENDS, RA__RETURNS, RA__NOTICES_IN, RA__NOTICES_OUT, RA__LANES };

struct ra_ring {
    ra_ring_desc rd;
    ra_transport tp;
    uint8_t *base;                     /* workspace; it starts with this struct */
    int64_t bytes;
    int32_t has_transport, shared, rank, ranks;

    const ra_plan *plan;               /* of the pass; below: what begin sets */
    const ra__pass_lists *lists;            /* of the plan, for this kind of pass */
    const int64_t *task_begin;         /* [B + 1] first task of a sequence */
    ra_tensors t;
    ra__agreed agreed;                 /* of plan and call; under comm, as the next two */
    uint32_t space;                    /* see ra__frame */
    int32_t agreed_known;              /* 1: this pass has set both */
    ra__work work;
    ra__view kv[2];                    /* this rank's keys and values */
    int64_t pass, deadline, begin_ns;

    int32_t unsafe, quiet;             /* of ra_finish: buffers are leaked; it has run */
    int32_t parted;                    /* under comm: see ra__ring_part */
    int32_t state, cancelled, aborted; /* state: RA_RING_*, RA__RING_ENDING; from here on threads
                                        * share. RUNNING is left once, by whoever swaps it first */
    int32_t threads, backward;         /* of the plan; 1: a backward pass */
    int32_t failed;                    /* status, set once `failure` is complete */
    int32_t comm, sched, progress, inside;
    ra__tickets tickets;
    int64_t progress_ns, looked_ns, events;
    int64_t most_tiles;                /* see ra__ring_patience; 0: not counted in this pass */
    int64_t alive, alive_seen;         /* shared: readers of this rank's keys count alive up */
    int64_t computed, computed_seen;   /* tasks done here, and as last announced to owners */
    int64_t **owner_alive;             /* [sources] under comm: `alive` of an owner read here */

    int64_t claim_fold, claim_task;    /* under sched */
    int64_t packing, packed;           /* RA_TRAVEL_Q: own chunks of queries up to this entry of
                                        * fold are being packed (under sched), are packed */
    int64_t folded;                    /* entries of lists->fold that all tasks have folded */
    ra__turn *turn;                    /* [tasks] */
    ra__desk *desk;                    /* [threads of the plan] */
    ra__bounds *stripe;                /* backward: of back.stripe */
    int64_t step_work;                 /* most of one step, see RA__TILE_WORK */

    ra__lane lane[RA__LANES];          /* under comm */
    ra_transport_op **list;            /* of all lanes: what is posted and not taken */
    uint8_t *pack_buf;                 /* [pack_slots] own chunks that leave */
    int64_t pack_slots, own_posted, own_sent; /* own chunks that have been packed, and sent */
    int64_t released;                  /* receives that are folded by all tasks and sent on */
    int64_t moves;                     /* messages posted and taken */
    int64_t exchanged;
    int32_t notices;                   /* 1: this pass ends with notices: shared, forward */
    int32_t met;                       /* some rank's frame was as it should be, or a pass with a
                                        * descriptor that agrees went well */
    uint64_t met_with;                 /* hash of what the plan of the pass agrees on */
    uint64_t differ;                   /* parts in which the frame that failed differs */
    ra__back back;                     /* backward from here on */
    ra__view d_kv[2];                  /* the caller's dK and dV */
    float *dq;                         /* RA_TRAVEL_KV: [B][rows][Hq][Dk] sums */
    float *dk, *dv;                    /* RA_TRAVEL_Q: [B][key rows][Hkv][Dk], [Dv] sums */
    int64_t grad_slots, grad_bytes;
    int64_t returns_folded;            /* own chunks that returned and need no buffer any more */
    uint8_t *grad_buf;                 /* gradients of own chunks that stay, or all if shared */
    void *mr;                          /* of the whole workspace */
    uint8_t *scratch;                  /* [threads][scratch_bytes] */
    int64_t scratch_bytes;

    ra_ring_counters counters;         /* each word on its own is atomic */
    ra_failure failure;
    ra_error refusal;
};

/* Tasks of a rank with `panels` query blocks each; task_begin [B + 1], may be null: first of each
 * sequence. */
static int64_t ra__plan_tasks(const ra_plan *p, int32_t rank, int32_t panels, int64_t *task_begin) {
    ra__side side = ra__plan_side(p, 0, rank);
    int64_t n = 0;
    for (int32_t b = 0; b < p->d.sequences; b++) {
        if (task_begin) task_begin[b] = n;
        n += p->d.engine ? ra__engine_tasks(&p->d, &side, b)
                         : ra__tasks(&p->d, ra__side_blocks(&side, b, ra__q_len(&p->d, b)), panels);
    }
    if (task_begin) task_begin[p->d.sequences] = n;
    return n;
}

/* Counts the messages and own chunks of a rank. */
static void ra__plan_pass_sizes(const ra__tour *w, int32_t rank, ra__counts *s) {
    for (int64_t c = 0; c < w->t->chunks; c++) {
        int own = w->t->chunk[c].owner == rank, leaves = ra__tour_leaves(w, c, rank);
        s->recvs += ra__tour_arrives(w, c, rank);
        s->sends += leaves;
        s->own += leaves && own;
        s->stays += !leaves && own;
    }
}

/* Counts of one rank. There are fewer panels per task if threads would otherwise have no work; bits
 * do not depend on it. */
static ra__sizes ra__plan_sizes(const ra_plan *p, int32_t rank, int64_t *task_begin) {
    ra__side side = ra__plan_side(p, 0, rank), keys = ra__plan_side(p, 1, rank);
    ra__tour forward = ra__tour_of(p, 0), back = ra__tour_of(p, 1);
    ra__sizes s;
    memset(&s, 0, sizeof s);
    for (int32_t b = 0; b < p->d.sequences; b++)
        s.rows = ra__max(s.rows, ra__side_rows(&side, b, ra__q_len(&p->d, b)));
    s.panels = ra__panels(&p->d);
    s.back_parts = (int32_t)ra__ceil_div(p->d.threads, p->d.kv_heads);
    s.back.tasks = p->d.kv_heads * (s.back_parts > 1 ? 2 * (int64_t)s.back_parts : 1);
    while ((s.forward.tasks = ra__plan_tasks(p, rank, s.panels, task_begin)) <
               8 * (int64_t)p->d.threads && s.panels > 1)
        s.panels /= 2;
    ra__plan_pass_sizes(&forward, rank, &s.forward);
    ra__count_notices(p, rank, &s.notices_in, &s.notices_out);
    if (!p->d.train) return s;
    ra__plan_pass_sizes(&back, rank, &s.back);
    for (int32_t b = 0; b < p->d.sequences; b++)
        s.key_rows = ra__max(s.key_rows, ra__side_rows(&keys, b, ra__k_len(&p->d, b)));
    return s;
}

/* Bytes of scratch of one thread. */
static int64_t ra__thread_bytes(const ra_plan *p, int32_t panels) {
    ra__arena a = { NULL, 0 };
    ra__engine_scratch x;
    if (!p->d.engine) return ra__scratch_bytes(&p->d, panels);
    ra__engine_carve(&a, &p->d, p->d.chunk_tokens + 2 * RA_BLOCK_TOKENS, &x);
    return a.used;
}

/* Ops of a lane, and buffers of `bytes` bytes unless that is 0. */
static void ra__lane_carve(ra__arena *a, ra__lane *lane, int64_t slots, int64_t bytes,
                           int64_t align) {
    lane->slots = (int32_t)slots;
    lane->bytes = ra__round_up(bytes, align);
    lane->op = (ra_transport_op *)ra__carve(a, slots * (int64_t)sizeof *lane->op);
    lane->buf = bytes ? ra__carve_aligned(a, lane->bytes * slots, align) : NULL;
    lane->ns = NULL;
}

/* The lanes between neighbours, for messages of up to `bytes` bytes; the other lanes are empty. */
static void ra__ring_carve_links(ra__arena *a, const ra_plan *p, const ra__counts *n,
                                 int64_t bytes, ra_ring *r) {
    int64_t align = ra__max(64, (int64_t)r->tp.align);
    ra__lane *in = &r->lane[RA__RECEIVES], *out = &r->lane[RA__SENDS];
    memset(r->lane, 0, sizeof r->lane);
    if (r->shared) bytes = RA__FRAME_BYTES + RA__ADDRESS_BYTES;
    ra__lane_carve(a, in, ra__min(r->shared ? RA__SHARED_BUFFERS : p->d.buffers, n->recvs), bytes,
                   align);
    ra__lane_carve(a, out, ra__min(RA__SEND_SLOTS, n->sends), 0, align);
    in->ns = (int64_t *)ra__carve(a, in->slots * 8);
    out->ns = (int64_t *)ra__carve(a, out->slots * 8);
    r->pack_slots = ra__min(n->own, r->shared ? RA__SEND_SLOTS : RA__PACK_SLOTS);
    r->pack_buf = ra__carve_aligned(a, in->bytes * r->pack_slots, align);
}

/* Stripes of each sequence. */
RA__INLINE int64_t ra__ring_stripes(const ra_desc *d) {
    return ra__max(1, RA__STRIPES / d->sequences);
}

/* Lays out the workspace of a forward pass of one rank; counts only if a->base is null. Returns
 * bytes of state. */
static int64_t ra__ring_carve(ra__arena *a, const ra_plan *p, const ra__sizes *n, ra_ring *r) {
    const ra_desc *d = &p->d;
    int64_t heads = d->sequences * n->rows * d->q_heads, before, state;
    int64_t notices = r->shared ? n->notices_in + n->notices_out : 0;
    (void)ra__carve(a, (int64_t)sizeof *r);
    before = a->used;
    r->work.m = (float *)ra__carve(a, heads * 4);
    r->work.l = (float *)ra__carve(a, heads * 4);
    r->work.acc.data = d->o_dtype == RA_F32 ? NULL
                                            : (uint8_t *)ra__carve(a, heads * d->v_dim * 4);
    r->turn = (ra__turn *)ra__carve(a, n->forward.tasks * (int64_t)sizeof *r->turn);
    state = a->used - before;
    ra__ring_carve_links(a, p, &n->forward, p->chunk_bytes, r);
    if (r->shared) {
        ra__lane_carve(a, &r->lane[RA__NOTICES_IN], n->notices_in, RA__FRAME_BYTES, 64);
        ra__lane_carve(a, &r->lane[RA__NOTICES_OUT], n->notices_out, RA__FRAME_BYTES, 64);
        r->owner_alive = (int64_t **)ra__carve(a, n->notices_out * 8);
    }
    r->list = (ra_transport_op **)ra__carve(a, (r->lane[RA__RECEIVES].slots +
                                                r->lane[RA__SENDS].slots + notices) * 8);
    r->desk = (ra__desk *)ra__carve(a, d->threads * (int64_t)sizeof *r->desk);
    r->scratch_bytes = ra__thread_bytes(p, n->panels);
    r->scratch = (uint8_t *)ra__carve(a, r->scratch_bytes * d->threads);
    return state;
}

/* The same for a backward pass, in the same memory: only one pass runs at a time. */
static int64_t ra__ring_carve_back(ra__arena *a, const ra_plan *p, const ra__sizes *n,
                                   ra_ring *r) {
    const ra_desc *d = &p->d;
    int64_t heads = d->sequences * n->rows * d->q_heads, before, state;
    int64_t align = ra__max(64, (int64_t)r->tp.align), own = n->back.own + n->back.stays;
    int64_t longest = p->back.return_bytes;
    (void)ra__carve(a, (int64_t)sizeof *r);
    before = a->used;
    r->dq = r->dk = r->dv = NULL;
    if (d->backward_travel == RA_TRAVEL_Q) {
        int64_t keys = d->sequences * n->key_rows * d->kv_heads;
        r->dk = (float *)ra__carve(a, keys * d->k_dim * 4);
        r->dv = (float *)ra__carve(a, d->v_in_k ? 0 : keys * d->v_dim * 4);
    } else {
        r->dq = (float *)ra__carve(a, heads * d->k_dim * 4);
    }
    r->turn = (ra__turn *)ra__carve(a, n->back.tasks * d->sequences * (int64_t)sizeof *r->turn);
    state = a->used - before;
    ra__ring_carve_links(a, p, &n->back, p->back.chunk_bytes, r);
    if (d->backward_travel == RA_TRAVEL_Q) longest = p->back.chunk_bytes;
    if (r->shared) longest = RA__FRAME_BYTES + RA__ADDRESS_BYTES;
    ra__lane_carve(a, &r->lane[RA__RETURNS],
                   ra__min(n->back.own, r->shared ? RA__SHARED_BUFFERS : RA__RETURN_SLOTS), longest,
                   align);
    r->grad_slots = n->back.stays ? ra__min(own, RA__PACK_SLOTS) : 0;
    if (r->shared) r->grad_slots = ra__min(own, ra__back_lag(p) + 2);
    r->grad_bytes = ra__plan_grad_bytes(p);
    r->grad_buf = (uint8_t *)ra__carve(a, r->grad_slots * r->grad_bytes);
    r->list = (ra_transport_op **)ra__carve(a, ((int64_t)r->lane[RA__RECEIVES].slots +
                                                r->lane[RA__SENDS].slots +
                                                r->lane[RA__RETURNS].slots) * 8);
    r->stripe = (ra__bounds *)ra__carve(a, d->sequences * ra__ring_stripes(d) *
                                               (int64_t)sizeof *r->stripe);
    r->desk = (ra__desk *)ra__carve(a, d->threads * (int64_t)sizeof *r->desk);
    r->scratch_bytes = ra__back_scratch_bytes(d);
    r->scratch = (uint8_t *)ra__carve(a, r->scratch_bytes * d->threads);
    return state;
}

/* Bytes of a ring's workspace, and those of its running state in either pass. */
typedef struct ra__ring_size { int64_t bytes, state, back_state; } ra__ring_size;

/* For the ring of a rank with these counts, with buffers aligned as the transport wants. */
static ra__ring_size ra__ring_bytes(const ra_plan *p, const ra__sizes *n, int shared,
                                    size_t align) {
    ra__arena a = { NULL, 0 }, b = { NULL, 0 };
    ra__ring_size size = { 0, 0, 0 };
    ra_ring r;
    memset(&r, 0, sizeof r);
    r.tp.align = align;
    r.shared = shared;
    size.state = ra__ring_carve(&a, p, n, &r);
    if (p->d.train) size.back_state = ra__ring_carve_back(&b, p, n, &r);
    size.bytes = ra__max(a.used, b.used);
    return size;
}

/* ========================================================================== PLAN
 * Everything that can be known before a pass: the schedule of a rank, the hash of what ranks must
 * agree on, and the figures of ra_plan_report. In: a checked descriptor. Out: one allocation. */

/* Runs of all ranks together. */
static int64_t ra__runs_count(const ra_layout *l, int32_t ranks, int keys) {
    const int32_t *count = keys ? l->k_run_count : l->q_run_count;
    int64_t n = 0;
    for (int32_t r = 0; count && r < ranks; r++) n += count[r];
    return n;
}

/* FNV-1a over the bytes of agreed values. */
static uint64_t ra__hash(uint64_t h, const void *data, size_t bytes) {
    const uint8_t *p = (const uint8_t *)data;
    for (size_t i = 0; i < bytes; i++) h = (h ^ p[i]) * 1099511628211u;
    return h;
}

static uint64_t ra__hash_i64(uint64_t h, int64_t v) { return ra__hash(h, &v, sizeof v); }

static uint64_t ra__hash_array(uint64_t h, const void *data, int64_t n, size_t element) {
    h = ra__hash_i64(h, data ? n : -1);
    return data ? ra__hash(h, data, (size_t)n * element) : h;
}

static uint64_t ra__hash_fields(const int64_t *fields, size_t n) {
    uint64_t h = 14695981039346656037u;
    for (size_t i = 0; i < n; i++) h = ra__hash_i64(h, fields[i]);
    return h;
}

/* AGREED fields as given, except mask and layout. */
static void ra__agree_plain(const ra_desc *d, uint64_t *part) {
    const int64_t sizes[] = { RINGATTN_VERSION, d->sequences, d->ranks, d->q_heads, d->kv_heads,
                              d->k_dim, d->v_dim, d->v_in_k, d->v_column, d->tokens, d->kv_tokens,
                              d->q_offset };
    const int64_t dtypes[] = { d->q_dtype, d->k_dtype, d->v_dtype, d->o_dtype };
    const int64_t scores[] = { d->scores };
    const int64_t training[] = { d->train, d->grad_dtype, d->grad_return, d->backward_travel };
    const int64_t messages[] = { d->chunk_tokens, d->buffers };
    part[RA__AGREE_SIZES] = ra__hash_fields(sizes, sizeof sizes / sizeof *sizes);
    part[RA__AGREE_DTYPES] = ra__hash_fields(dtypes, sizeof dtypes / sizeof *dtypes);
    part[RA__AGREE_SCORES] = ra__hash_fields(scores, 1);
    part[RA__AGREE_TRAINING] = ra__hash_fields(training, sizeof training / sizeof *training);
    part[RA__AGREE_MESSAGES] = ra__hash(ra__hash_fields(messages, 2), &d->rates, sizeof d->rates);
    part[RA__AGREE_SCORES] = ra__hash(part[RA__AGREE_SCORES], &d->scale, sizeof d->scale);
    part[RA__AGREE_SCORES] = ra__hash(part[RA__AGREE_SCORES], &d->softcap, sizeof d->softcap);
    part[RA__AGREE_TRAINING] = ra__hash(part[RA__AGREE_TRAINING], &d->dropout, sizeof d->dropout);
}

static uint64_t ra__agree_layout(const ra_layout *l, int32_t ranks) {
    uint64_t h = ra__hash_i64(14695981039346656037u, l->kind);
    h = ra__hash_array(h, l->weights, ranks, 4);
    h = ra__hash_array(h, l->q_rows, ranks, 8);
    h = ra__hash_array(h, l->k_rows, ranks, 8);
    h = ra__hash_array(h, l->q_run_count, ranks, 4);
    h = ra__hash_array(h, l->k_run_count, ranks, 4);
    h = ra__hash_array(h, l->q_runs, ra__runs_count(l, ranks, 0), sizeof(ra_run));
    return ra__hash_array(h, l->k_runs, ra__runs_count(l, ranks, 1), sizeof(ra_run));
}

/* All AGREED fields as given; full: the same resolved, for the lengths of arrays. */
static void ra__agree(const ra_desc *d, const ra_desc *full, ra__agreed *out) {
    const ra_mask *m = &d->mask;
    const int64_t mask[] = { m->kind, m->causal_block, m->window, m->right_limit, m->prefix,
                             m->keep, m->doc_count, m->interval_count };
    uint64_t h = ra__hash_fields(mask, sizeof mask / sizeof *mask);
    h = ra__hash_array(h, m->doc_first, m->doc_count, 8);
    h = ra__hash_array(h, m->lo, m->interval_count, 4);
    ra__agree_plain(d, out->part);
    out->part[RA__AGREE_MASK] = ra__hash_array(h, m->hi, m->interval_count, 4);
    h = ra__hash_array(out->part[RA__AGREE_SIZES], d->tokens_of, full->sequences, 8);
    out->part[RA__AGREE_SIZES] = ra__hash_array(h, d->kv_tokens_of, full->sequences, 8);
    out->part[RA__AGREE_LAYOUT] = ra__agree_layout(&d->layout, full->ranks);
}

/* The same, with what must be equal in every rank's tensors of a call. */
static ra__agreed ra__agree_call(const ra_plan *p, const ra_tensors *t) {
    const ra_desc *d = &p->d;
    ra__agreed a = p->agreed;
    uint64_t h = a.part[RA__AGREE_SCORES];
    if (d->scores & RA_SCORE_ALIBI) h = ra__hash_array(h, t->alibi, d->q_heads, 4);
    if (d->scores & RA_SCORE_SINKS) h = ra__hash_array(h, t->sinks, d->q_heads, 4);
    a.part[RA__AGREE_SCORES] = h;
    if (d->dropout > 0.0f)
        a.part[RA__AGREE_TRAINING] = ra__hash(a.part[RA__AGREE_TRAINING], &t->seed, sizeof t->seed);
    return a;
}

/* Copies n elements into the arena; null stays null. */
static void *ra__carve_copy(ra__arena *a, const void *from, int64_t n, size_t element) {
    void *to;
    if (!from) return NULL;
    to = ra__carve(a, n * (int64_t)element);
    if (a->base && n) memcpy(to, from, (size_t)n * element);
    return to;
}

/* Runs of all ranks, the first entry of each, and what comes before each run of a rank. */
static void ra__carve_runs(ra__arena *a, ra_plan *p, int keys) {
    ra_layout *l = &p->d.layout;
    const ra_run **runs = keys ? &l->k_runs : &l->q_runs;
    const int32_t **count = keys ? &l->k_run_count : &l->q_run_count;
    const int32_t ranks = p->d.ranks;
    const int64_t n = ra__runs_count(l, ranks, keys);
    const int64_t call = p->d.engine ? ra__engine_rows(&p->d) : RA_BLOCK_TOKENS;
    int64_t *run_begin = (int64_t *)ra__carve(a, ((int64_t)ranks + 1) * 8);
    ra__before *before = (ra__before *)ra__carve(a, (n + ranks) * (int64_t)sizeof *before);
    *(keys ? &p->k_run_begin : &p->q_run_begin) = run_begin;
    *(keys ? &p->k_before : &p->q_before) = before;
    *runs = (const ra_run *)ra__carve_copy(a, *runs, n, sizeof(ra_run));
    *count = (const int32_t *)ra__carve_copy(a, *count, ranks, 4);
    if (!a->base) return;
    run_begin[0] = 0;
    for (int32_t r = 0; r < ranks; r++) {
        const ra_run *run = *runs + run_begin[r];
        run_begin[r + 1] = run_begin[r] + (*count)[r];
        memset(before, 0, sizeof *before);
        for (int32_t i = 0; i < (*count)[r]; i++, before++) {
            before[1].n[RA__ROWS] = before->n[RA__ROWS] + run[i].count;
            before[1].n[RA__BLOCKS] = before->n[RA__BLOCKS] + ra__run_blocks(&run[i]);
            before[1].n[RA__CALLS] = before->n[RA__CALLS] + ra__ceil_div(run[i].count, call);
        }
        before++;
    }
}

/* Sorts the runs of keys. */
static void ra__plan_held(ra_plan *p) {
    const ra_run *runs = p->d.layout.k_runs;
    int64_t reach = -1, group = 0, rows = 0;
    for (int64_t i = 0; i < p->held_count; i++) p->held_order[i] = i;
    ra__order_sort(runs, p->held_order, p->held_count);
    for (int64_t i = 0; i < p->held_count; i++) {
        ra__held *h = &p->held[i];
        h->run = runs[p->held_order[i]];
        if (h->run.first > reach) group = i;
        h->rows = rows;
        h->group = group;
        rows += h->run.count;
        reach = ra__max(reach, ra__run_last(&h->run));
    }
}

/* Carves the arrays of the descriptor (copies) and of cuts. Counting only if a->base is null. */
static void ra__plan_arrays(ra__arena *a, ra_plan *p, const ra_desc *full) {
    ra_desc *d = &p->d;
    ra_layout *l = &d->layout;
    ra_mask *m = &d->mask;
    int64_t B = full->sequences, cuts = B * (2 * (int64_t)full->ranks + 1) * 8;
    *d = *full;
    d->tokens_of = (const int64_t *)ra__carve_copy(a, d->tokens_of, B, 8);
    d->kv_tokens_of = (const int64_t *)ra__carve_copy(a, d->kv_tokens_of, B, 8);
    m->doc_first = (const int64_t *)ra__carve_copy(a, m->doc_first, m->doc_count, 8);
    m->lo = (const int32_t *)ra__carve_copy(a, m->lo, m->interval_count, 4);
    m->hi = (const int32_t *)ra__carve_copy(a, m->hi, m->interval_count, 4);
    l->weights = (const int32_t *)ra__carve_copy(a, l->weights, d->ranks, 4);
    p->q_run_begin = p->k_run_begin = NULL;
    p->q_before = p->k_before = NULL;
    p->held = NULL;
    if (l->kind == RA_LAYOUT_RUNS) {
        if (!l->k_runs) { l->k_runs = l->q_runs; l->k_run_count = l->q_run_count; }
        p->held_count = ra__runs_count(l, d->ranks, 1);
        p->held = (ra__held *)ra__carve(a, p->held_count * (int64_t)sizeof(ra__held));
        p->held_order = (int64_t *)ra__carve(a, p->held_count * 8);
        ra__carve_runs(a, p, 0);
        ra__carve_runs(a, p, 1);
        if (a->base) ra__plan_held(p);
    }
    if (l->kind == RA_LAYOUT_ARRAY) {
        if (!l->k_rows) l->k_rows = l->q_rows;
        l->q_rows = (const int64_t *)ra__carve_copy(a, l->q_rows, d->ranks, 8);
        l->k_rows = (const int64_t *)ra__carve_copy(a, l->k_rows, d->ranks, 8);
    }
    p->q_cut = p->k_cut = NULL;
    if (l->kind == RA_LAYOUT_CONTIGUOUS || l->kind == RA_LAYOUT_ZIGZAG) {
        p->q_cut = (int64_t *)ra__carve(a, cuts);
        p->k_cut = (int64_t *)ra__carve(a, cuts);
    }
    p->task_begin = (int64_t *)ra__carve(a, (B + 1) * 8);
    p->back_task_begin = (int64_t *)ra__carve(a, (B + 1) * 8);
    p->readers = (int32_t *)ra__carve(a, (int64_t)d->ranks * 4);
    p->source = (ra__source_rank *)ra__carve(a, d->ranks * (int64_t)sizeof *p->source);
}

/* Cuts of every sequence, order, and whether the promise on bits holds. */
static void ra__plan_cuts(ra_plan *p) {
    const ra_desc *d = &p->d;
    int zigzag = d->layout.kind == RA_LAYOUT_ZIGZAG, square = 1;
    int64_t stride = 2 * (int64_t)d->ranks + 1;
    p->on_grid = p->q_cut != NULL;
    for (int32_t b = 0; b < d->sequences; b++) {
        int64_t tq = ra__q_len(d, b), tk = ra__k_len(d, b);
        square &= tq == tk && !d->q_offset;
        if (!p->q_cut) continue;
        ra__cut(tq, d->ranks, d->layout.weights, zigzag, p->q_cut + b * stride);
        ra__cut(tk, d->ranks, d->layout.weights, zigzag, p->k_cut + b * stride);
        p->on_grid &= tk == 0 || ra__cut_unit(tk, d->ranks) > 1 || (d->ranks == 1 && !zigzag);
    }
    p->order = ra__desc_order(d, square);
    p->same_positions = square;
    p->all_positions_held = d->layout.kind != RA_LAYOUT_RUNS && d->layout.kind != RA_LAYOUT_ARRAY;
}

/* Chunks of a list with need bits. The bits of different ranks are in different lines and sets of a
 * cache, because a chunk sets a bit in each. */
static void ra__travel_carve(ra__arena *a, const ra_plan *p, ra__travel *t, int64_t chunks) {
    t->chunks = chunks;
    t->chunk = (ra__chunk *)ra__carve(a, chunks * (int64_t)sizeof(ra__chunk));
    t->need_row = (ra__ceil_div(chunks, 256) | 1) * 64;
    t->need = (uint8_t *)ra__carve(a, p->d.ranks * t->need_row);
}

/* Room for n messages each way, and for so many folds, exchanges and own chunks. */
static void ra__lists_carve(ra__arena *a, ra__pass_lists *w, int64_t n, int64_t folds,
                            int64_t exchanges, int64_t own) {
    w->fold = (ra__fold *)ra__carve(a, folds * (int64_t)sizeof *w->fold);
    w->recv = (ra__recv *)ra__carve(a, n * (int64_t)sizeof *w->recv);
    w->send = (ra__send *)ra__carve(a, n * (int64_t)sizeof *w->send);
    w->own = (ra__own *)ra__carve(a, own * (int64_t)sizeof *w->own);
    w->returned = (ra__returned *)ra__carve(a, own * (int64_t)sizeof *w->returned);
    w->exchange = (ra__exchange *)ra__carve(a, exchanges * (int64_t)sizeof *w->exchange);
}

/* Own chunks may be folded twice. */
static void ra__play_carve(ra__arena *a, ra_plan *p) {
    const int64_t chunks = ra__max(p->keys.chunks, p->queries.chunks), ranks = p->d.ranks;
    ra__play y;
    memset(&y, 0, sizeof y);
    p->play = (ra__play *)ra__carve(a, (int64_t)sizeof y);
    if (ranks < 2) return;
    y.seat = (ra__play_seat *)ra__carve(a, ranks * (int64_t)sizeof *y.seat);
    y.slot = (ra__play_slot *)ra__carve(a, ranks * p->d.buffers * (int64_t)sizeof *y.slot);
    y.work = (ra__play_work *)ra__carve(a, 2 * chunks * (int64_t)sizeof *y.work);
    y.come = (int64_t *)ra__carve(a, 2 * chunks * 8);
    for (int32_t i = 0; i < 3; i++) y.moment[i] = (int64_t *)ra__carve(a, chunks * 8);
    if (a->base) *p->play = y;
}

/* Most segments of keys of a sequence, on all ranks together. */
static int64_t ra__most_spans(const ra_plan *p) {
    return p->d.layout.kind == RA_LAYOUT_RUNS ? p->held_count : 2 * (int64_t)p->d.ranks;
}

/* Carves what depends on the number of chunks: at most `keys` of keys, `queries` of queries. */
static void ra__plan_lists(ra__arena *a, ra_plan *p, int64_t keys, int64_t queries) {
    const int32_t B = p->d.sequences;
    const int q = p->d.train && p->d.backward_travel == RA_TRAVEL_Q;
    int64_t places = 2 * keys + 1, back;
    if (p->d.layout.kind == RA_LAYOUT_RUNS) places += p->held_count * B;
    if (p->d.layout.kind == RA_LAYOUT_ARRAY) places = 0;
    ra__travel_carve(a, p, &p->keys, keys);
    ra__travel_carve(a, p, &p->queries, q ? queries : 0);
    p->place = (ra__place *)ra__carve(a, places * (int64_t)sizeof(ra__place));
    p->place_begin = (int64_t *)ra__carve(a, ((int64_t)B + 1) * 8);
    p->start = (int64_t *)ra__carve(a, ra__max(keys, p->queries.chunks) * 8);
    p->line = (int64_t *)ra__carve(a, 2 * (int64_t)p->d.ranks * 8);
    p->span = (ra__span *)ra__carve(a, q ? ra__most_spans(p) * (int64_t)sizeof(ra__span) : 0);
    ra__play_carve(a, p);
    ra__lists_carve(a, &p->forward, keys, keys + B, 2 * keys, 0);
    back = p->d.train ? ra__back_travel(p)->chunks : 0;        /* own chunks may be folded twice */
    if (p->d.train) ra__lists_carve(a, &p->back, back, 2 * back + B, 3 * back, back);
}

/* Appends an entry to the list of folds. chunk -1: the caller sets the sequence. */
static ra__fold *ra__lists_fold(ra__pass_lists *w, int32_t chunk, int32_t recv, int32_t index) {
    ra__fold *f = &w->fold[w->folds++];
    memset(f, 0, sizeof *f);
    f->sequence = chunk < 0 ? -1 : w->chunk[chunk].sequence;
    f->chunk = chunk;
    f->recv = recv;
    f->index = index;
    f->own = -1;
    return f;
}

static void ra__lists_recv(ra__pass_lists *w, int32_t chunk, int32_t fold, int32_t send) {
    ra__recv *m = &w->recv[w->recvs++];
    m->chunk = chunk;
    m->fold = fold;
    m->send = send;
}

static void ra__lists_send(ra__pass_lists *w, int32_t chunk, int32_t recv, int32_t fold) {
    ra__send *m = &w->send[w->sends++];
    m->chunk = chunk;
    m->recv = recv;
    m->fold = fold;
}

/* What this rank folds, receives and sends, in the order of the one list. */
static void ra__plan_own_lists(ra_plan *p) {
    int32_t me = p->d.rank;
    const ra__tour tour = ra__tour_of(p, 0);
    ra__pass_lists *w = &p->forward;
    int64_t c = 0;
    w->folds = w->recvs = w->sends = 0;
    for (int32_t b = 0; b < p->d.sequences; b++) {
        int64_t before = w->folds;
        for (; c < p->keys.chunks && p->keys.chunk[c].sequence == b; c++) {
            int32_t recv = ra__tour_arrives(&tour, c, me) ? (int32_t)w->recvs : -1;
            int32_t fold = ra__needs(p, c, me) ? (int32_t)w->folds : -1;
            int32_t send = ra__tour_leaves(&tour, c, me) ? (int32_t)w->sends : -1;
            if (fold >= 0) (void)ra__lists_fold(w, (int32_t)c, recv, (int32_t)(fold - before));
            if (send >= 0) ra__lists_send(w, (int32_t)c, recv, -1);
            if (recv >= 0) ra__lists_recv(w, (int32_t)c, fold, send);
        }
        if (w->folds == before && p->task_begin[b + 1] > p->task_begin[b])
            ra__lists_fold(w, -1, -1, 0)->sequence = b;
        if (w->folds > before) w->fold[w->folds - 1].last = 1;
    }
}

/* The lists of a backward pass while they are made. */
typedef struct ra__back_lists {
    const ra__tour *w;
    const int64_t *start;              /* of ra__tour_steps */
    int64_t ended;                     /* own chunks that have returned and been folded again */
    int32_t sequence;                  /* of the own chunk that started last */
} ra__back_lists;

/* The next entry of this rank's fold list is the second visit of an own chunk, not chunk c. */
static int ra__back_late(const ra__back_lists *l, const ra__pass_lists *r, int64_t c) {
    const ra__tour *w = l->w;
    int32_t me = w->p->d.rank;
    int64_t returned;
    if (!w->p->owner_folds_twice || l->ended == r->returns) return 0;
    if (c == w->t->chunks || w->t->chunk[c].owner != me || !ra__tour_leaves(w, c, me) ||
        w->t->chunk[c].sequence != l->sequence)
        return 1;
    returned = r->returned[l->ended].chunk;
    return l->start[returned] + ra__tour_stations(w, returned) + 2 <= l->start[c];
}

/* Adds the second visits of own chunks that come before the visit of chunk c; returns how many. */
static int32_t ra__back_ends(ra__back_lists *l, ra__pass_lists *r, int64_t c, int32_t index) {
    int32_t n = 0;
    while (ra__back_late(l, r, c)) {
        ra__returned *returned = &r->returned[l->ended++];
        ra__fold *f = ra__lists_fold(r, returned->chunk, -1, index + n++);
        f->phase = RA__BEFORE;
        f->own = returned->own;
        returned->fold = (int32_t)r->folds - 1;
    }
    return n;
}

/* This rank's own chunk c: its first visit. */
static void ra__back_own(ra__back_lists *l, ra__pass_lists *r, int64_t c, int32_t index) {
    int travels = ra__tour_leaves(l->w, c, l->w->p->d.rank);
    ra__fold *f = ra__lists_fold(r, (int32_t)c, -1, index);
    ra__own *own = &r->own[r->owns];
    f->phase = travels && l->w->p->owner_folds_twice ? RA__AFTER : RA__BOTH;
    f->own = (int32_t)r->owns++;
    own->chunk = (int32_t)c;
    own->fold = (int32_t)r->folds - 1;
    own->returned = travels ? (int32_t)r->returns : -1;
    if (travels) {
        ra__returned *returned = &r->returned[r->returns++];
        returned->chunk = (int32_t)c;
        returned->own = f->own;
        returned->fold = -1;
        l->sequence = l->w->t->chunk[c].sequence;
    }
}

/* Visits of chunk c: received, folded, sent, in the order of the one list. Returns folds. */
static int32_t ra__back_visit(ra__back_lists *l, ra__pass_lists *r, int64_t c, int32_t index) {
    const ra__tour *w = l->w;
    int32_t me = w->p->d.rank, before = index, fold = -1;
    int own = w->t->chunk[c].owner == me, arrives = ra__tour_arrives(w, c, me);
    int needs = ra__need(w->t, c, me);
    int32_t recv = arrives ? (int32_t)r->recvs : -1;
    if (!own && !arrives) return 0;
    index += ra__back_ends(l, r, c, index);
    if (own) ra__back_own(l, r, c, index);
    else if (needs) ra__lists_fold(r, (int32_t)c, recv, index)->phase = RA__BOTH;
    if (own || needs) {
        fold = (int32_t)r->folds - 1;
        index++;
    }
    if (arrives) ra__lists_recv(r, (int32_t)c, fold, (int32_t)r->sends);
    if (ra__tour_leaves(w, c, me)) ra__lists_send(r, (int32_t)c, recv, fold);
    return index - before;
}

/* What this rank does in a backward pass. Where own chunks are folded twice, all of those end
 * before the list of their sequence does. */
static void ra__plan_back_lists(const ra__tour *w, const int64_t *start, ra__pass_lists *r) {
    ra__back_lists l;
    int64_t c = 0;
    memset(&l, 0, sizeof l);
    l.w = w;
    l.start = start;
    r->backward = 1;
    r->direction = w->direction;
    r->chunk = w->t->chunk;
    r->folds = r->recvs = r->sends = r->owns = r->returns = 0;
    for (int32_t b = 0; b < w->p->d.sequences; b++) {
        int32_t index = 0;
        for (; c < w->t->chunks && w->t->chunk[c].sequence == b; c++)
            index += ra__back_visit(&l, r, c, index);
        index += ra__back_ends(&l, r, w->t->chunks, index);
        if (!index) ra__lists_fold(r, -1, -1, 0)->sequence = b;
        r->fold[r->folds - 1].last = 1;
    }
}

/* Longest messages of a backward pass. */
static void ra__plan_back_bytes(ra_plan *p) {
    const ra__travel *t = ra__back_travel(p);
    ra__pass_lists *w = &p->back;
    w->chunk_bytes = w->return_bytes = 0;
    for (int64_t c = 0; c < t->chunks; c++) {
        if (!ra__back_stations(p, &t->chunk[c])) continue;
        w->chunk_bytes = ra__max(w->chunk_bytes, ra__back_length(&p->d, &t->chunk[c], 1));
        w->return_bytes =
            ra__max(w->return_bytes, ra__back_length(&p->d, &t->chunk[c], p->d.ranks));
    }
}

/* Owners fold twice if a contiguous or zigzag layout has units and queries and keys are the same
 * positions. Under RA_ORDER_DESCENDING no row comes before its key. */
static int ra__back_folds_twice(const ra_plan *p) {
    return p->same_positions && p->q_cut != NULL && p->order == RA_ORDER_ASCENDING;
}

/* Ranks that read this rank's keys, and ranks whose keys it reads. With addresses instead of copies
 * a pass ends when the former have sent their notices. */
static void ra__plan_readers(ra_plan *p) {
    ra__readers all;
    p->reader_count = p->source_count = 0;
    ra__readers_of(p, p->d.rank, &all);
    for (int32_t r = 0; r < p->d.ranks; r++)
        if (all.reads[r]) p->readers[p->reader_count++] = r;
    for (int64_t f = p->forward.folds; f-- > 0;) {     /* the last entry of each comes first */
        int32_t c = p->forward.fold[f].chunk, owner = c < 0 ? p->d.rank : p->keys.chunk[c].owner;
        if (!all.read[owner]) continue;
        all.read[owner] = 0;
        p->source[p->source_count].end = f + 1;
        p->source[p->source_count++].rank = owner;
    }
    for (int64_t i = 0; i < p->source_count / 2; i++) {
        ra__source_rank t = p->source[i];
        p->source[i] = p->source[p->source_count - 1 - i];
        p->source[p->source_count - 1 - i] = t;
    }
}

/* The direction in which a pass takes fewer steps, then the one with fewer bytes on the links.
 * RA_ORDER_DESCENDING goes up, as the bounds of its steps assume. */
static void ra__plan_direction(ra_plan *p) {
    int64_t steps[2], bytes[2];
    for (int32_t down = 0; down < 2; down++) {
        ra__tour w;
        p->direction = down ? -1 : 1;
        w = ra__tour_of(p, 0);
        bytes[down] = ra__tour_hops(&w);
        steps[down] = ra__tour_steps(&w, p->line, p->start);
        p->forward.steps = steps[down];
        if (p->order == RA_ORDER_DESCENDING || p->d.ranks < 3) return;
    }
    if (steps[1] < steps[0] || (steps[1] == steps[0] && bytes[1] < bytes[0])) return;
    p->direction = 1;
    ra__tour up = ra__tour_of(p, 0);
    (void)ra__tour_hops(&up);
    p->forward.steps = ra__tour_steps(&up, p->line, p->start);
}

/* Sifts place i of the heap [0, n) down, by first position. */
static void ra__place_sift(ra__place *heap, int64_t i, int64_t n) {
    ra__place moved = heap[i];
    for (int64_t child; (child = 2 * i + 1) < n; i = child) {
        if (child + 1 < n && heap[child + 1].first > heap[child].first) child++;
        if (heap[child].first <= moved.first) break;
        heap[i] = heap[child];
    }
    heap[i] = moved;
}

/* Sorts n places by their first positions. */
static void ra__place_sort(ra__place *place, int64_t n) {
    for (int64_t i = n / 2; i-- > 0;) ra__place_sift(place, i, n);
    for (int64_t i = n; i-- > 1;) {
        ra__place top = place[0];
        place[0] = place[i];
        place[i] = top;
        ra__place_sift(place, 0, i);
    }
}

/* Fills in the places of all segments of keys. */
static void ra__plan_places(ra_plan *p) {
    int64_t n = 0, c = 0, blocks = 0, last;
    if (p->d.layout.kind == RA_LAYOUT_ARRAY) return;
    for (int32_t b = 0; b < p->d.sequences; b++) {
        int64_t from = n, top = -1;
        p->place_begin[b] = n;
        for (; c < p->keys.chunks && p->keys.chunk[c].sequence == b; c++)
            for (int32_t i = 0; i < ra__chunk_pieces(&p->keys.chunk[c]); i++) {
                p->place[n].first = ra__chunk_piece(&p->keys.chunk[c], i).pos;
                p->place[n].chunk = (int32_t)c;
                p->place[n++].seg = i;
            }
        ra__place_sort(p->place + from, n - from);
        for (int64_t i = from; i < n; i++) {
            ra__seg s = ra__chunk_piece(&p->keys.chunk[p->place[i].chunk], p->place[i].seg);
            ra__seg_span(&s, NULL, &p->place[i].first, &last);
            top = p->place[i].top = ra__max(top, last);
            p->place[i].blocks = blocks;
            blocks += ra__ceil_div(s.rows, RA_BLOCK_TOKENS);
        }
    }
    p->place_begin[p->d.sequences] = n;
    memset(&p->place[n], 0, sizeof p->place[n]);
    p->place[n].blocks = blocks;
}

/* -------------------------------------------------------------------------- blocks against chunks
 * The class of a position for a block of queries changes at eight edges at most. Keys with no edge
 * among them are all of one class, and so are all their blocks: that leaves few segments to look
 * into, and few blocks of those. An edge x is among the keys of [first, last] if
 * first < x <= last. */
typedef struct ra__edges { int64_t at[8]; int32_t n; } ra__edges;

static ra__edges ra__edges_of(const ra__bounds *b) {
    const int32_t all[8] = { b->lo_min, b->lo_max, b->hi_min, b->hi_max,
                             b->doc_min, b->doc_max, b->keep_min, b->keep_max };
    int32_t n = b->doc_min < b->keep_max ? 8 : 4;      /* 4: no key is kept */
    ra__edges e;
    e.n = 0;
    for (int32_t i = 0; i < n; i++) {
        int32_t j = e.n++;
        for (; j > 0 && e.at[j - 1] > all[i]; j--) e.at[j] = e.at[j - 1];
        e.at[j] = all[i];
    }
    return e;
}

/* Adds the blocks of a run of keys to tally[class]. */
static void ra__tally_run(const ra__seg *s, const ra__bounds *b, const ra__edges *e,
                          int64_t tally[3]) {
    int64_t n = ra__ceil_div(s->rows, RA_BLOCK_TOKENS), step = RA_BLOCK_TOKENS * s->stride;
    int64_t end = s->pos + (s->rows - 1) * s->stride, i = 0, first, last;
    for (int32_t k = 0; k < e->n; k++) {
        int64_t j = (e->at[k] - 1 - s->pos) / step;    /* the block with the edge, if any */
        if (e->at[k] <= s->pos || e->at[k] > end || j < i) continue;
        ra__seg block = ra__seg_block(s, j);
        if (j > i) tally[ra__classify(b, s->pos + i * step, s->pos + i * step)] += j - i;
        ra__seg_span(&block, NULL, &first, &last);
        tally[ra__classify(b, first, last)]++;
        i = j + 1;
    }
    if (n > i) tally[ra__classify(b, s->pos + i * step, s->pos + i * step)] += n - i;
}

/* The same for piece i of a chunk. */
static void ra__tally_seg(const ra__chunk *c, int32_t i, const ra__bounds *b, const ra__edges *e,
                          int64_t tally[3]) {
    ra__seg s = ra__chunk_piece(c, i);
    ra__tally_run(&s, b, e, tally);
}

/* A walk over the places [next, end) of a sequence for one block of queries: each step is places
 * [from, to) whose blocks are all of class `kind`, or one with kind -1 to be looked into. */
typedef struct ra__walk {
    const ra__place *place;
    const ra__bounds *bounds;
    ra__edges edges;
    int64_t next, end, from, to;
    int32_t edge, kind;
} ra__walk;

static ra__walk ra__walk_start(const ra_plan *p, int32_t b, const ra__bounds *bounds) {
    ra__walk w;
    memset(&w, 0, sizeof w);
    w.place = p->place;
    w.bounds = bounds;
    w.edges = ra__edges_of(bounds);
    w.next = p->place_begin[b];
    w.end = p->place_begin[b + 1];
    return w;
}

static int ra__walk_next(ra__walk *w) {
    w->from = w->next;
    w->to = w->end;
    w->kind = -1;
    if (w->next >= w->end) return 0;
    for (; w->edge < w->edges.n; w->edge++) {
        int64_t x = w->edges.at[w->edge], to = w->end;
        while (w->next < to && w->place[w->next].top < x) {    /* find the first that reaches x */
            int64_t mid = w->next + (to - w->next) / 2;
            if (w->place[mid].top < x) w->next = mid + 1;
            else to = mid;
        }
        if (w->next > w->from) break;
        if (w->place[w->from].first >= x) continue;
        w->next = w->to = w->from + 1;
        return 1;
    }
    if (w->edge < w->edges.n) w->to = w->next;
    else w->next = w->end;
    w->kind = ra__classify(w->bounds, w->place[w->from].first, w->place[w->from].first);
    return 1;
}

/* -------------------------------------------------------------------------- figures of one rank */
static void ra__report_tiles(const ra_plan *p, int32_t rank, int32_t b, int64_t tally[3]) {
    ra__side side = ra__plan_side(p, 0, rank);
    int64_t tokens = ra__q_len(&p->d, b), end = ra__key_end(&p->d, b, 0);
    ra__seg s;
    for (int64_t i = 0; ra__side_seg(&side, b, tokens, i, &s); i++) {
        for (int64_t j = 0; j < ra__ceil_div(s.rows, RA_BLOCK_TOKENS); j++) {
            ra__seg block = ra__seg_block(&s, j);
            ra__bounds bounds = ra__seg_bounds(&p->d.mask, end, &block);
            ra__walk w = ra__walk_start(p, b, &bounds);
            while (ra__walk_next(&w)) {
                const ra__place *at = &p->place[w.from];
                if (w.kind >= 0) tally[w.kind] += p->place[w.to].blocks - at->blocks;
                else ra__tally_seg(&p->keys.chunk[at->chunk], at->seg, &bounds, &w.edges, tally);
            }
        }
    }
}

/* ARRAY: all tiles may be partial. */
static int64_t ra__report_array_tiles(const ra_plan *p, int32_t rank) {
    ra__side side = ra__plan_side(p, 0, rank);
    int64_t blocks = 0;
    for (int64_t c = 0; c < p->keys.chunks; c++) blocks += ra__chunk_blocks(&p->keys.chunk[c]);
    return ra__mul_sat(blocks, ra__side_blocks(&side, 0, ra__q_len(&p->d, 0)));
}

/* Keys below a position that some rank holds. */
static int64_t ra__keys_below(const ra_plan *p, int64_t pos) {
    int64_t low = 0, high = p->held_count, n;
    while (low < high) {               /* entries that begin below it */
        int64_t mid = low + (high - low) / 2;
        if (p->held[mid].run.first < pos) low = mid + 1;
        else high = mid;
    }
    if (low == 0) return 0;
    n = p->held[p->held[low - 1].group].rows;
    for (int64_t i = p->held[low - 1].group; i < low; i++) {
        const ra_run *run = &p->held[i].run;
        n += ra__min(run->count, ra__ceil_div(pos - run->first, ra__run_step(run)));
    }
    return n;
}

/* Keys in [lo, hi) that some rank holds. */
static int64_t ra__keys_held(const ra_plan *p, int64_t lo, int64_t hi) {
    return lo < hi ? ra__keys_below(p, hi) - ra__keys_below(p, lo) : 0;
}

static int64_t ra__report_pairs(const ra_plan *p, int32_t rank, int32_t b) {
    ra__side side = ra__plan_side(p, 0, rank);
    int64_t tokens = ra__q_len(&p->d, b), end = ra__k_len(&p->d, b), n = 0;
    ra__seg s;
    if (p->d.layout.kind == RA_LAYOUT_ARRAY) {
        for (int32_t r = 0; r < p->d.ranks; r++) n += p->d.layout.k_rows[r];
        return ra__mul_sat(n, p->d.layout.q_rows[rank]);
    }
    for (int64_t i = 0; ra__side_seg(&side, b, tokens, i, &s); i++) {
        if (p->all_positions_held) n += ra__pairs_seg(&p->d.mask, end, &s);
        for (int64_t j = 0; !p->all_positions_held && j < s.rows; j++) {
            int32_t v[4];
            ra__mask_row(&p->d.mask, s.pos + j * s.stride, end, v);
            if (v[0] >= v[1]) n += ra__keys_held(p, v[2], v[3]);
            else n += ra__keys_held(p, v[0], v[1]) + ra__keys_held(p, v[2], ra__min(v[3], v[0]));
        }
    }
    return n;
}

/* Bytes of a chunk's message to the rank `hop` ranks after its owner; backward, hop = ranks: to the
 * owner. */
static int64_t ra__tour_length(const ra__tour *w, const ra__chunk *c, int32_t hop) {
    return w->back ? ra__back_length(&w->p->d, c, hop) : ra__message_bytes(&w->p->d, c, hop);
}

/* Messages and bytes of a pass at one rank. */
static void ra__report_messages(const ra__tour *w, int32_t rank, ra_pass_figures *f) {
    const int64_t address = RA__FRAME_BYTES + RA__ADDRESS_BYTES;
    for (int64_t c = 0; c < w->t->chunks; c++) {
        const ra__chunk *chunk = &w->t->chunk[c];
        int32_t hop = ra__tour_apart(w, chunk->owner, rank), ranks = w->p->d.ranks;
        int last = w->back && hop == ra__tour_stations(w, c);
        int leaves = ra__tour_leaves(w, c, rank);
        if (leaves) {
            f->chunks_out++;
            f->bytes_out += ra__tour_length(w, chunk, last ? ranks : hop + 1);
            f->shared_bytes_out += address;
        }
        if (hop ? !ra__tour_arrives(w, c, rank) : !(w->back && leaves)) continue;
        f->chunks_in++;
        f->bytes_in += ra__tour_length(w, chunk, hop ? hop : ranks);
        f->shared_bytes_in += address;
    }
}

/* Shards of other ranks that come to a rank, and those of which no chunk does. */
static void ra__report_hops(const ra__tour *w, int32_t rank, ra_plan_report *r) {
    int came = 0;
    for (int64_t c = 0; c < w->t->chunks; c++) {
        const ra__chunk *chunk = &w->t->chunk[c];
        if (chunk->owner == rank) continue;
        if (!c || chunk->owner != chunk[-1].owner || chunk->sequence != chunk[-1].sequence) {
            came = 0;
            r->hops_skipped++;
        }
        if (came || !ra__tour_arrives(w, c, rank)) continue;
        r->hops++;
        r->hops_skipped--;
        came = 1;
    }
}

static void ra__report_back(const ra_plan *p, int32_t rank, ra_plan_report *r) {
    const ra__tour w = ra__tour_of(p, 1);
    if (!p->d.train) return;
    ra__report_messages(&w, rank, &r->backward);
    r->backward.flops = 2.0 * (3 * p->d.k_dim + 2 * p->d.v_dim) * p->d.q_heads * (double)r->pairs;
    r->backward.chunk_bytes = p->back.chunk_bytes;
    r->backward.bits_any_ranks = p->on_grid && p->same_positions;
    r->backward.travel = p->d.backward_travel;
    r->backward.direction = p->back_direction;
}

/* Adds the blocks of a rank's keys of sequence b for one block of queries. */
static void ra__tally_rank(const ra_plan *p, int32_t rank, int32_t b, const ra__bounds *bounds,
                           int64_t tally[3]) {
    ra__side side = ra__plan_side(p, 1, rank);
    ra__edges edges = ra__edges_of(bounds);
    int64_t c, end, first, last;
    ra__seg s;
    ra__chunk_range(&p->keys, b, &c, &end);
    for (; side.layout == RA_LAYOUT_RUNS && c < end; c++) {    /* chunks first: runs may be many */
        const ra__chunk *chunk = &p->keys.chunk[c];
        int kind;
        if (chunk->owner != rank) continue;
        ra__chunk_span(chunk, 0, &first, &last);
        kind = ra__classify(bounds, first, last);
        if (kind != RA__PARTIAL) tally[kind] += ra__chunk_blocks(chunk);
        for (int32_t i = 0; kind == RA__PARTIAL && i < ra__chunk_pieces(chunk); i++)
            ra__tally_seg(chunk, i, bounds, &edges, tally);
    }
    for (int64_t j = 0; side.layout != RA_LAYOUT_RUNS &&
                        ra__side_seg(&side, b, ra__k_len(&p->d, b), j, &s); j++)
        if (s.rows) ra__tally_run(&s, bounds, &edges, tally);
}

/* RA_TRAVEL_Q: the tiles of all chunks of queries against this rank's keys. */
static void ra__report_q_tiles(const ra_plan *p, int32_t rank, int64_t tally[3]) {
    for (int64_t c = 0; c < p->queries.chunks; c++) {
        const ra__chunk *chunk = &p->queries.chunk[c];
        for (int64_t i = 0; i < ra__chunk_blocks(chunk); i++) {
            int32_t which;
            ra__seg rows = ra__chunk_block(chunk, RA_ORDER_ASCENDING, i, &which);
            ra__bounds bounds = ra__seg_bounds(&p->d.mask, ra__key_end(&p->d, chunk->sequence, 0),
                                               &rows);
            ra__tally_rank(p, rank, chunk->sequence, &bounds, tally);
        }
    }
}

static void ra__report_all_tiles(const ra_plan *p, int32_t rank, ra_plan_report *r) {
    int64_t tally[2][3] = { { 0, 0, 0 }, { 0, 0, 0 } }, *back = tally[0];
    for (int32_t b = 0; b < p->d.sequences && p->d.layout.kind != RA_LAYOUT_ARRAY; b++)
        ra__report_tiles(p, rank, b, tally[0]);
    if (p->d.layout.kind == RA_LAYOUT_ARRAY)
        tally[0][RA__PARTIAL] = ra__report_array_tiles(p, rank);
    r->forward.tiles_empty = ra__mul_sat(tally[0][RA__EMPTY], p->d.q_heads);
    r->forward.tiles_partial = ra__mul_sat(tally[0][RA__PARTIAL], p->d.q_heads);
    r->forward.tiles_full = ra__mul_sat(tally[0][RA__FULL], p->d.q_heads);
    if (!p->d.train) return;
    if (p->d.backward_travel == RA_TRAVEL_Q) ra__report_q_tiles(p, rank, back = tally[1]);
    r->backward.tiles_empty = ra__mul_sat(back[RA__EMPTY], p->d.q_heads);
    r->backward.tiles_partial = ra__mul_sat(back[RA__PARTIAL], p->d.q_heads);
    r->backward.tiles_full = ra__mul_sat(back[RA__FULL], p->d.q_heads);
}

static void ra__report_memory(const ra_plan *p, int32_t rank, ra_plan_report *r) {
    const ra_desc *d = &p->d;
    ra__side q = ra__plan_side(p, 0, rank), k = ra__plan_side(p, 1, rank);
    int64_t q_rows = 0, k_rows = 0;
    for (int32_t b = 0; b < d->sequences; b++) {
        int64_t nq = ra__side_rows(&q, b, ra__q_len(d, b));
        int64_t nk = ra__side_rows(&k, b, ra__k_len(d, b));
        q_rows += nq;
        k_rows += nk;
        r->q_rows = ra__max(r->q_rows, nq);
        r->k_rows = ra__max(r->k_rows, nk);
    }
    r->resident_bytes = q_rows * d->q_heads *
                            (ra__row_bytes(d->q_dtype, d->k_dim) +
                             ra__row_bytes(d->o_dtype, d->v_dim) + 4) +
                        k_rows * d->kv_heads * ra__row_bytes(d->k_dtype, d->k_dim);
    if (!d->v_in_k)
        r->resident_bytes += k_rows * d->kv_heads * ra__row_bytes(d->v_dtype, d->v_dim);
}

static void ra__plan_report_rank(const ra_plan *p, int32_t rank, ra_plan_report *r) {
    const ra__tour w = ra__tour_of(p, 0);
    int64_t in, out;
    memset(r, 0, sizeof *r);
    ra__report_memory(p, rank, r);
    ra__report_all_tiles(p, rank, r);
    for (int32_t b = 0; b < p->d.sequences; b++)
        r->pairs = ra__add_sat(r->pairs, ra__report_pairs(p, rank, b));
    r->forward.flops = 2.0 * (p->d.k_dim + p->d.v_dim) * p->d.q_heads * (double)r->pairs;
    ra__report_messages(&w, rank, &r->forward);
    ra__report_hops(&w, rank, r);
    ra__count_notices(p, rank, &in, &out);
    r->forward.shared_bytes_in += in * RA__FRAME_BYTES;
    r->forward.shared_bytes_out += out * RA__FRAME_BYTES;
    ra__report_back(p, rank, r);
    r->forward.chunk_bytes = p->chunk_bytes;
    r->order = p->order;
    r->forward.direction = p->direction;
    r->forward.travel = RA_TRAVEL_KV;
    r->forward.bits_any_ranks = p->on_grid && !p->d.engine;
    r->chunk_tokens = p->d.chunk_tokens;
    r->buffers = p->d.buffers;
}

/* -------------------------------------------------------------------------- prediction
 * Scratch of the prediction in seconds: all [ranks] except freed, work and step. */
typedef struct ra__prediction_scratch {
    double *link_free, *busy, *compute, *folded, *idle;
    double *freed;                     /* [ranks][buffers] when a receive buffer is free again */
    double *work;                      /* [ranks][chunks] time of computing */
    double *step;                      /* [places + 1] of one rank */
    int64_t *received;
    int32_t unlimited;                 /* 1: as if a buffer were always free */
} ra__prediction_scratch;

static void ra__predict_carve(ra__arena *a, const ra_plan *p, ra__prediction_scratch *m) {
    double **list[5];
    int64_t ranks = p->d.ranks;
    list[0] = &m->link_free; list[1] = &m->busy; list[2] = &m->compute; list[3] = &m->folded;
    list[4] = &m->idle;
    for (int32_t i = 0; i < 5; i++) *list[i] = (double *)ra__carve(a, ranks * 8);
    m->freed = (double *)ra__carve(a, ranks * p->d.buffers * 8);
    m->work = (double *)ra__carve(a, ranks * p->keys.chunks * 8);
    m->step = (double *)ra__carve(a, p->d.layout.kind == RA_LAYOUT_ARRAY ? 0
                                           : (p->place_begin[p->d.sequences] + 1) * 8);
    m->received = (int64_t *)ra__carve(a, ranks * 8);
}

/* Seconds of a rank's rows against every chunk: tiles that are not empty, counted whole. For places
 * without an edge only the first and the end are noted, as changes of the seconds per block. */
static void ra__predict_work(const ra_plan *p, int32_t rank, int32_t b, double pair_s,
                             ra__prediction_scratch *m) {
    ra__side side = ra__plan_side(p, 0, rank);
    int64_t tokens = ra__q_len(&p->d, b), end = ra__key_end(&p->d, b, 0);
    double *work = m->work + rank * p->keys.chunks, block_s = 0;
    ra__seg s;
    for (int64_t i = 0; ra__side_seg(&side, b, tokens, i, &s); i++) {
        for (int64_t j = 0; j < ra__ceil_div(s.rows, RA_BLOCK_TOKENS); j++) {
            ra__seg block = ra__seg_block(&s, j);
            ra__bounds bounds = ra__seg_bounds(&p->d.mask, end, &block);
            ra__walk w = ra__walk_start(p, b, &bounds);
            while (ra__walk_next(&w)) {
                const ra__place *at = &p->place[w.from];
                int64_t tally[3] = { 0, 0, 0 };
                if (w.kind == RA__EMPTY) continue;
                if (w.kind >= 0) {
                    m->step[w.from] += (double)block.rows;
                    m->step[w.to] -= (double)block.rows;
                    continue;
                }
                ra__tally_seg(&p->keys.chunk[at->chunk], at->seg, &bounds, &w.edges, tally);
                work[at->chunk] += (double)block.rows * RA_BLOCK_TOKENS * pair_s *
                                   (double)(tally[RA__PARTIAL] + tally[RA__FULL]);
            }
        }
    }
    for (int64_t i = p->place_begin[b]; i < p->place_begin[b + 1]; i++) {
        block_s += m->step[i];
        work[p->place[i].chunk] += block_s * RA_BLOCK_TOKENS * pair_s *
                                   (double)(p->place[i + 1].blocks - p->place[i].blocks);
    }
    memset(m->step + p->place_begin[b], 0,
           (size_t)(p->place_begin[b + 1] + 1 - p->place_begin[b]) * sizeof *m->step);
}

/* The same for ARRAY: no tile is known to be empty. */
static void ra__predict_array(const ra_plan *p, int32_t rank, double pair_s,
                              ra__prediction_scratch *m) {
    double rows = (double)p->d.layout.q_rows[rank];
    for (int64_t c = 0; c < p->keys.chunks; c++)
        m->work[rank * p->keys.chunks + c] =
            rows * RA_BLOCK_TOKENS * pair_s * (double)ra__chunk_blocks(&p->keys.chunk[c]);
}

/* Simulates one chunk on its way around the ring: it arrives, is folded in order, and is sent on
 * when the link is free and the next rank has a buffer. */
static void ra__predict_chunk(const ra_plan *p, const ra_rates *rates, int64_t c,
                              ra__prediction_scratch *m) {
    const ra__chunk *chunk = &p->keys.chunk[c];
    int32_t buffers = p->d.buffers;
    double here = 0;
    for (int32_t h = 0; h < p->d.ranks; h++) {
        int32_t rank = ra__rank_up(p, chunk->owner, h * p->direction);
        int32_t next = ra__rank_up(p, rank, p->direction);
        double sent = here, work = m->work[rank * p->keys.chunks + c], folded = here;
        if (work > 0) {
            m->idle[rank] += here > m->folded[rank] ? here - m->folded[rank] : 0;
            folded = m->folded[rank] = work + (here > m->folded[rank] ? here : m->folded[rank]);
            m->compute[rank] += work;
        }
        if (h < ra__chunk_reach(chunk)) {
            double bytes = (double)ra__message_bytes(&p->d, chunk, h + 1);
            double move = rates->link_latency_s + bytes / rates->link_bytes_per_s;
            double free = m->freed[(int64_t)next * buffers + m->received[next]++ % buffers];
            double start = here > m->link_free[rank] ? here : m->link_free[rank];
            if (m->unlimited) free = 0;
            sent = m->link_free[rank] = move + (free > start ? free : start);
            m->busy[next] += move;
        }
        if (h > 0 && h <= ra__chunk_reach(chunk))
            m->freed[(int64_t)rank * buffers + (m->received[rank] - 1) % buffers] =
                sent > folded ? sent : folded;
        here = sent;
    }
}

/* Simulates all chunks; returns when the last rank is done. */
static double ra__predict_pass(const ra_plan *p, const ra_rates *rates, int32_t unlimited,
                               ra__prediction_scratch *m) {
    double *zero[6], done = 0;
    zero[0] = m->link_free; zero[1] = m->busy; zero[2] = m->compute; zero[3] = m->folded;
    zero[4] = m->idle; zero[5] = m->freed;
    for (int32_t i = 0; i < 6; i++)
        memset(zero[i], 0, (size_t)p->d.ranks * (i < 5 ? 1 : (size_t)p->d.buffers) * 8);
    memset(m->received, 0, (size_t)p->d.ranks * 8);
    m->unlimited = unlimited;
    for (int64_t c = 0; c < p->keys.chunks; c++) ra__predict_chunk(p, rates, c, m);
    for (int32_t r = 0; r < p->d.ranks; r++) done = m->folded[r] > done ? m->folded[r] : done;
    return done;
}

/* -------------------------------------------------------------------------- plans */
static void ra__need_none(const ra_plan *p, const ra__travel *t) {
    memset(t->need, 0, (size_t)(p->d.ranks * t->need_row));
}

/* Chunks of queries and who needs them. */
static void ra__plan_queries(ra_plan *p) {
    int64_t spans = 0;
    p->queries.chunks = ra__chunk_all(p, 0, 0, p->queries.chunk);
    ra__need_none(p, &p->queries);
    for (int64_t c = 0; c < p->queries.chunks; c++) {
        int32_t b = p->queries.chunk[c].sequence;
        if (!c || b != p->queries.chunk[c - 1].sequence) spans = ra__key_spans(p, b, p->span);
        ra__chunk_q_needs(p, c, p->span, spans);
    }
}

/* The lists of a backward pass. */
static void ra__plan_fill_back(ra_plan *p) {
    int q = p->d.backward_travel == RA_TRAVEL_Q;
    ra__tour w;
    if (q) ra__plan_queries(p);
    p->owner_folds_twice = ra__back_folds_twice(p);
    p->back_direction = p->order == RA_ORDER_DESCENDING && q ? -1 : 1;
    w = ra__tour_of(p, 1);
    (void)ra__tour_hops(&w);
    p->back.steps = ra__tour_steps(&w, p->line, p->start);
    ra__plan_back_lists(&w, p->start, &p->back);
    ra__plan_back_bytes(p);
}

/* From the list of chunks to the lists of this rank. */
static void ra__plan_fill(ra_plan *p) {
    ra__need_none(p, &p->keys);
    for (int32_t r = 0; r < p->d.ranks; r++)
        for (int32_t b = 0; b < p->d.sequences; b++) ra__chunk_needs(p, r, b);
    ra__plan_places(p);
    ra__plan_direction(p);
    p->chunk_bytes = 0;
    for (int64_t c = 0; c < p->keys.chunks; c++)
        if (ra__chunk_reach(&p->keys.chunk[c]))
            p->chunk_bytes =
                ra__max(p->chunk_bytes, ra__message_bytes(&p->d, &p->keys.chunk[c], 1));
    p->forward.direction = p->direction;
    p->forward.chunk = p->keys.chunk;
    p->forward.chunk_bytes = p->chunk_bytes;
    if (p->d.train) ra__plan_fill_back(p);
    p->sizes = ra__plan_sizes(p, p->d.rank, p->task_begin);
    for (int32_t b = 0; b <= p->d.sequences; b++) p->back_task_begin[b] = b * p->sizes.back.tasks;
    ra__plan_own_lists(p);
    ra__plan_readers(p);
}

/* Empty tiles of chunks that never come here: a pass counts them without looking. */
static int64_t ra__plan_unvisited(const ra_plan *p, const ra__travel *t) {
    int keys = t == &p->queries;                       /* what stays here */
    ra__side side = ra__plan_side(p, keys, p->d.rank);
    int64_t n = 0, blocks = 0;
    for (int64_t c = 0; c < t->chunks; c++) {
        int32_t b = t->chunk[c].sequence;
        if (!c || b != t->chunk[c - 1].sequence)
            blocks = ra__side_blocks(&side, b, keys ? ra__k_len(&p->d, b) : ra__q_len(&p->d, b));
        if (!ra__need(t, c, p->d.rank))
            n = ra__add_sat(n, ra__mul_sat(blocks, ra__chunk_blocks(&t->chunk[c])));
    }
    return ra__mul_sat(n, p->d.q_heads);
}

static void ra__plan_full_report(const ra_plan *p, int32_t rank, ra_plan_report *r) {
    ra__sizes n = rank == p->d.rank ? p->sizes : ra__plan_sizes(p, rank, NULL);
    ra__ring_size size = ra__ring_bytes(p, &n, 0, 64);
    ra__plan_report_rank(p, rank, r);
    r->workspace_bytes = size.bytes;
    r->shared_workspace_bytes = ra__ring_bytes(p, &n, 1, 64).bytes;
    r->forward.state_bytes = size.state;
    r->backward.state_bytes = size.back_state;
}

/* The calls of sendrecv, for transports that have nothing else: made when a ring first needs them,
 * because all ranks are played through. Rings of several threads may share the plan. */
static void ra__plan_exchanges(const ra_plan *plan) {
    const ra_pass_figures *f = &plan->report.forward, *g = &plan->report.backward;
    ra_plan *p = (ra_plan *)(uintptr_t)plan;
    ra__tour w = ra__tour_of(p, 0);
    if (p->d.ranks < 2) return;
    if (!ra__cas_i32(&p->play->state, RA__PLAY_NONE, RA__PLAY_STARTED)) {
        while (ra__load_i32(&p->play->state) != RA__PLAY_DONE) ra__yield();
        return;
    }
    p->forward.exchanges = ra__tour_exchanges(&w, p->play, f->tiles_partial + f->tiles_full,
                                              p->forward.exchange);
    w = ra__tour_of(p, 1);
    if (p->d.train)
        p->back.exchanges = ra__tour_exchanges(&w, p->play, g->tiles_partial + g->tiles_full,
                                               p->back.exchange);
    ra__store_i32(&p->play->state, RA__PLAY_DONE);
}

/* Rows that a sequence has on all ranks together, at most: those of the tables if there are any. */
static int64_t ra__layout_rows(const ra_desc *d, int32_t b, int keys) {
    const ra_layout *l = &d->layout;
    const int64_t *rows = keys && l->k_rows ? l->k_rows : l->q_rows;
    const int runs_of_k = keys && l->k_runs != NULL;
    const ra_run *run = runs_of_k ? l->k_runs : l->q_runs;
    int64_t n = 0;
    if (l->kind == RA_LAYOUT_RUNS) {
        const int64_t count = ra__runs_count(l, d->ranks, runs_of_k);
        for (int64_t i = 0; i < count; i++) n = ra__add_sat(n, run[i].count);
    } else if (l->kind == RA_LAYOUT_ARRAY) {
        for (int32_t r = 0; r < d->ranks; r++) n = ra__add_sat(n, rows[r]);
    } else {
        n = keys ? ra__k_len(d, b) : ra__q_len(d, b);
    }
    return n;
}

/* An upper bound on chunks: each shard of a sequence adds one to rows / chunk_tokens. */
static int64_t ra__plan_most_chunks(const ra_desc *d, int keys) {
    int64_t n = 0;
    for (int32_t b = 0; b < d->sequences; b++)
        n += ra__layout_rows(d, b, keys) / d->chunk_tokens + d->ranks;
    return n;
}

static void ra__plan_carve(ra__arena *a, ra_plan *p, const ra_desc *full, int64_t keys,
                           int64_t queries) {
    (void)ra__carve(a, (int64_t)sizeof *p);
    ra__plan_arrays(a, p, full);
    ra__plan_lists(a, p, keys, queries);
}

RINGATTN_API ra_status ra_plan_create(ra_plan **out, const ra_desc *d, const ra_allocator *a) {
    ra_desc full;
    ra_plan *p, probe;
    ra__arena arena = { NULL, 0 };
    int64_t bytes, keys, queries;
    ra_status s;
    if (out) *out = NULL;
    s = ra__resolve(d, &full);
    if (!s) s = ra__check_intervals(&full, d->error);
    if (s) return s;
    if (!out) return ra__refuse(d->error, RA_E_NULL, "out", "is required", 0);
    s = a ? ra__check_allocator(a, "allocator", d->error) : RA_OK;
    if (s) return s;
    memset(&probe, 0, sizeof probe);
    keys = ra__plan_most_chunks(&full, 1);
    queries = ra__plan_most_chunks(&full, 0);
    if (keys > INT32_MAX / 2 || queries > INT32_MAX / 2)
        return ra__refuse(d->error, RA_E_OVERFLOW, "chunk_tokens",
                          "# leads to too many chunks", full.chunk_tokens);
    ra__plan_carve(&arena, &probe, &full, keys, queries);
    bytes = arena.used;
    arena.base = (uint8_t *)ra__alloc(a, bytes, 64);
    if (!arena.base)
        return ra__refuse(d->error, RA_E_NOMEM, "allocator", "has no # bytes for the plan", bytes);
    arena.used = 0;
    p = (ra_plan *)(void *)arena.base;
    memset(p, 0, sizeof *p);
    p->bytes = bytes;
    if (a) p->allocator = *a;
    ra__plan_carve(&arena, p, &full, keys, queries);
    ra__agree(d, &full, &p->agreed);
    ra__plan_cuts(p);
    p->keys.chunks = ra__chunk_all(p, 1, p->order == RA_ORDER_DESCENDING, p->keys.chunk);
    RINGATTN_ASSERT(p->keys.chunks <= keys);
    ra__plan_fill(p);
    p->unvisited = ra__plan_unvisited(p, &p->keys);
    p->back_unvisited = ra__plan_unvisited(p, ra__back_travel(p));
    ra__plan_full_report(p, p->d.rank, &p->report);
    p->d.error = NULL;
    *out = p;
    return RA_OK;
}

RINGATTN_API void ra_plan_destroy(ra_plan *plan) {
    ra_allocator a;
    if (!plan) return;
    a = plan->allocator;
    ra__free(&a, plan, (size_t)plan->bytes);
}

static int32_t ra__plan_runs(const ra_plan *p, int keys, int32_t rank, int32_t sequence,
                             ra_run *runs, int32_t max_runs) {
    ra__side side;
    ra__seg s;
    int64_t tokens;
    int32_t n = 0;
    if (!p || rank < 0 || rank >= p->d.ranks || sequence < 0 || sequence >= p->d.sequences ||
        max_runs < 0 || (max_runs && !runs))
        return -1;
    if (p->d.layout.kind == RA_LAYOUT_ARRAY) return 0;
    side = ra__plan_side(p, keys, rank);
    tokens = keys ? ra__k_len(&p->d, sequence) : ra__q_len(&p->d, sequence);
    for (int64_t i = 0; ra__side_seg(&side, sequence, tokens, i, &s); i++) {
        if (!s.rows) continue;
        if (n < max_runs) {
            runs[n].first = s.pos;
            runs[n].count = s.rows;
            runs[n].stride = s.stride;
        }
        n++;
    }
    return n;
}

RINGATTN_API int32_t ra_plan_q_runs(const ra_plan *plan, int32_t rank, int32_t sequence,
                                    ra_run *runs, int32_t max_runs) {
    return ra__plan_runs(plan, 0, rank, sequence, runs, max_runs);
}

RINGATTN_API int32_t ra_plan_k_runs(const ra_plan *plan, int32_t rank, int32_t sequence,
                                    ra_run *runs, int32_t max_runs) {
    return ra__plan_runs(plan, 1, rank, sequence, runs, max_runs);
}

RINGATTN_API ra_status ra_plan_query(const ra_plan *plan, int32_t rank, ra_plan_report *out) {
    if (!plan || !out) return RA_E_NULL;
    if (rank < 0 || rank >= plan->d.ranks) return RA_E_RANGE;
    if (rank == plan->d.rank) *out = plan->report;
    else ra__plan_full_report(plan, rank, out);
    return RA_OK;
}

RINGATTN_API ra_status ra_plan_predict(const ra_plan *plan, int32_t rank, const ra_rates *rates,
                                       ra_prediction *out) {
    ra__arena arena = { NULL, 0 };
    ra__prediction_scratch m;
    int64_t bytes;
    double pair_s;
    if (!plan || !rates || !out) return RA_E_NULL;
    if (rank < 0 || rank >= plan->d.ranks) return RA_E_RANGE;
    if (!ra__rates_valid(rates)) return RA_E_RANGE;
    ra__predict_carve(&arena, plan, &m);
    bytes = arena.used;
    arena.base = (uint8_t *)ra__alloc(&plan->allocator, bytes, 64);
    if (!arena.base) return RA_E_NOMEM;
    memset(arena.base, 0, (size_t)bytes);
    arena.used = 0;
    ra__predict_carve(&arena, plan, &m);
    pair_s = 2.0 * (plan->d.k_dim + plan->d.v_dim) * plan->d.q_heads / rates->flops_per_s;
    for (int32_t r = 0; r < plan->d.ranks; r++) {
        if (plan->d.layout.kind == RA_LAYOUT_ARRAY)
            ra__predict_array(plan, r, pair_s, &m);
        for (int32_t b = 0; b < plan->d.sequences && plan->d.layout.kind != RA_LAYOUT_ARRAY; b++)
            ra__predict_work(plan, r, b, pair_s, &m);
    }
    memset(out, 0, sizeof *out);
    out->bound_s = ra__predict_pass(plan, rates, 1, &m);
    out->all_done_s = ra__predict_pass(plan, rates, 0, &m);
    out->compute_s = m.compute[rank];
    out->transfer_s = m.busy[rank];
    out->wait_s = m.idle[rank];
    out->done_s = m.folded[rank];
    out->hidden_s = m.busy[rank] > m.idle[rank] ? m.busy[rank] - m.idle[rank] : 0;
    ra__free(&plan->allocator, arena.base, (size_t)bytes);
    return RA_OK;
}

/* ========================================================================== TRANSPORT
 * Checks an ra_transport before any of it is used, and fills in its defaults. In: the struct from
 * the caller and what the plan needs. Out: a refusal whose (status, field) names one check, or
 * nothing. Size and ABI come first, then plain numbers, then pointers. No callback is called
 * here. */

enum { RA__TP_CAPS = RA_CAP_ANY_THREAD | RA_CAP_ANY_PEER | RA_CAP_LOAN | RA_CAP_DEADLINE
                     | RA_CAP_SHARED };
#define RA__TP_SIZE_V1 (offsetof(ra_transport, error_text) + sizeof(void *))
#define RA__TP_SIZE_MAX 4096           /* no version will be larger: the field holds garbage */
#define RA__TP_MAX_MSG ((size_t)1 << 30)

static ra_status ra__tp_check_numbers(const ra_transport *t, ra_error *e) {
    const ra__rule rules[] = {
        { t->size < RA__TP_SIZE_V1 || t->size > RA__TP_SIZE_MAX, RA_E_ABI, "transport.size",
          "must be sizeof(ra_transport), is #: was it set?", (int64_t)t->size },
        { t->abi != RA_TRANSPORT_ABI, RA_E_ABI, "transport.abi",
          "must be RA_TRANSPORT_ABI, which is 1 here, is #", (int64_t)t->abi },
        { (t->caps & ~(uint32_t)RA__TP_CAPS) != 0, RA_E_ENUM, "transport.caps",
          "has bits that are not RA_CAP_*: #", (int64_t)t->caps },
        { t->channels > 64, RA_E_RANGE, "transport.channels", "must be 0 (1) to 64, is #",
          (int64_t)t->channels },
        { t->tag_bits > 64, RA_E_RANGE, "transport.tag_bits", "must be 0 (15) to 64, is #",
          (int64_t)t->tag_bits },
        { t->max_ops == 1, RA_E_RANGE, "transport.max_ops",
          "must be 0 (2) or at least 2, for a send and a receive; is #", 1 },
        { t->align > 4096 || (t->align & (t->align - 1)), RA_E_RANGE, "transport.align",
          "must be 0 (64) or a power of two up to 4096, is #", (int64_t)t->align },
    };
    return ra__check_rules(rules, sizeof rules / sizeof *rules, e);
}

/* Callbacks and properties that need another one. */
static ra_status ra__tp_check_callbacks(const ra_transport *t, ra_error *e) {
    const int shared = (t->caps & RA_CAP_SHARED) != 0;
    const int64_t caps = (int64_t)t->caps;
    const ra__rule rules[] = {
        { !t->sendrecv && !t->post, RA_E_TRANSPORT, "transport.sendrecv",
          "is null and so is post: set one of them", 0 },
        { t->post && !t->poll, RA_E_TRANSPORT, "transport.poll", "is null, but post needs it", 0 },
        { t->reg && !t->dereg, RA_E_TRANSPORT, "transport.dereg", "is null, but reg needs it", 0 },
        { (t->caps & RA_CAP_LOAN) && !t->release, RA_E_TRANSPORT, "transport.release",
          "is null, but caps (#) has RA_CAP_LOAN", caps },
        { shared && !t->post, RA_E_TRANSPORT, "transport.post",
          "is null, but caps (#) has RA_CAP_SHARED", caps },
        { shared && !t->quiesce, RA_E_TRANSPORT, "transport.quiesce",
          "is null, but caps (#) has RA_CAP_SHARED", caps },
        { shared && !(t->caps & RA_CAP_ANY_PEER), RA_E_TRANSPORT, "transport.caps",
          "is #: RA_CAP_SHARED needs RA_CAP_ANY_PEER", caps },
        { shared && t->channels < 2, RA_E_TRANSPORT, "transport.channels",
          "is #: RA_CAP_SHARED needs at least 2 channels", (int64_t)t->channels },
    };
    return ra__check_rules(rules, sizeof rules / sizeof *rules, e);
}

/* rank and ranks of the plan; chunk_bytes: the longest message that it sends. */
static ra_status ra__tp_check_plan(const ra_transport *t, int32_t rank, int32_t ranks,
                                   int64_t chunk_bytes, ra_error *e) {
    const uint64_t max_msg = t->max_msg ? t->max_msg : RA__TP_MAX_MSG;
    const ra__rule rules[] = {
        { !t->ranks && t->rank, RA_E_UNSET, "transport.ranks",
          "is 0, but transport.rank is #: set both or neither", t->rank },
        { t->ranks && t->ranks != ranks, RA_E_TRANSPORT, "transport.ranks",
          "is #, but the descriptor has another number of ranks", t->ranks },
        { t->ranks && t->rank != rank, RA_E_TRANSPORT, "transport.rank",
          "is #, but the plan is for another rank", t->rank },
        { (t->caps & RA_CAP_SHARED) && (int64_t)t->max_ops < 2 * (int64_t)ranks + 2,
          RA_E_TRANSPORT, "transport.max_ops", "is #: RA_CAP_SHARED needs at least 2 ranks + 2",
          (int64_t)t->max_ops },
        { ranks > 1 && chunk_bytes > 0 && (uint64_t)chunk_bytes > max_msg, RA_E_TRANSPORT,
          "transport.max_msg",
          "is less than the # bytes of a message of this plan: lower chunk_tokens", chunk_bytes },
    };
    return ra__check_rules(rules, sizeof rules / sizeof *rules, e);
}

static ra_status ra__tp_check(const ra_transport *t, int32_t rank, int32_t ranks,
                              int64_t chunk_bytes, ra_error *e) {
    ra_status s;
    if (!t && ranks == 1) return RA_OK;
    if (!t)
        return ra__refuse(e, RA_E_NULL, "transport", "is null, but the plan has # ranks", ranks);
    s = ra__tp_check_numbers(t, e);
    if (!s) s = ra__tp_check_callbacks(t, e);
    return s ? s : ra__tp_check_plan(t, rank, ranks, chunk_bytes, e);
}

/* What a backward pass needs of a transport: gradients return on a channel of their own. */
static ra_status ra__tp_check_back(const ra_transport *t, const ra_plan *p, ra_error *e) {
    const ra__rule rules[] = {
        { t->post && t->channels < 2, RA_E_TRANSPORT, "transport.channels",
          "is #; backward passes need at least 2", (int64_t)t->channels },
        { t->post && t->max_ops < 3, RA_E_TRANSPORT, "transport.max_ops",
          "is # (0: 2); backward passes need at least 3", (int64_t)t->max_ops },
        { p->d.ranks > 2 && p->d.grad_return == RA_RETURN_DIRECT &&
          !(t->caps & RA_CAP_ANY_PEER), RA_E_TRANSPORT, "transport.caps",
          "# lacks RA_CAP_ANY_PEER: set grad_return of the plan to RA_RETURN_RING",
          (int64_t)t->caps },
    };
    if (!p->d.train || p->d.ranks < 2) return RA_OK;
    return ra__check_rules(rules, sizeof rules / sizeof *rules, e);
}

/* A copy with the defaults in place of zeros. t has passed ra__tp_check. What a later version
 * appends is not copied, because nothing here would call it. */
static ra_transport ra__tp_resolved(const ra_transport *t) {
    ra_transport r = *t;
    r.size = (uint32_t)sizeof r;
    if (!r.channels) r.channels = 1;
    if (!r.tag_bits) r.tag_bits = 15;
    if (!r.max_ops) r.max_ops = 2;
    if (!r.max_msg) r.max_msg = RA__TP_MAX_MSG;
    if (!r.align) r.align = 64;
    if (!r.name) r.name = "unnamed";
    return r;
}

#undef RA__TP_SIZE_V1
#undef RA__TP_SIZE_MAX
#undef RA__TP_MAX_MSG

/* ========================================================================== SHM
 * The bundled world: its ranks are threads of this process, and each has a seat. A world carries
 * one ring per rank at a time, because quiesce is for the whole rank and a failure is for the life
 * of the world.
 *
 * A send and a receive match in order per (source, destination, channel). Both look into the inbox
 * of the destination, under its lock. Whichever comes second takes the other's op out, copies the
 * bytes after unlocking, and reports to its owner in scratch. Hence
 *   - in one flow only sends or only receives are ever queued, so a match is the first of its flow;
 *   - an op's state is written only by calls of its owner;
 *   - nobody else touches an op that is no longer PENDING, or its buffer.
 * Whoever changes something that a seat may sleep for first writes the atomics that show it, then
 * adds to the seat's event word. The sleeper announces itself in the same word, so one order holds
 * for both and no wake-up is lost.
 *
 * Errors of the callbacks: RA_OK or the permanent failure of the seat, which is `why` on the rank
 * that aborted and RA_E_ABORTED on others. Single ops fail with RA_E_TRUNC (on both sides; nothing
 * is copied), RA_E_PEER (the peer left or quiesced) or RA_E_IO (kind, channel or peer is invalid).
 * Each callback says who calls it, whether it blocks, who owns the buffers, in which order it acts,
 * how it fails, and whether it is required. The "owner" is the thread that makes the calls of a
 * rank. */

#ifdef RINGATTN_NO_THREADS

static ra_status ra__shm_none(ra_error *e) {
    return ra__refuse(e, RA_E_UNSUPPORTED, "RINGATTN_NO_THREADS",
                      "is defined: this build has no world of threads", 0);
}

RINGATTN_API ra_status ra_world_create(ra_world **out, const ra_world_desc *wd) {
    if (out) *out = NULL;
    return ra__shm_none(wd ? wd->error : NULL);
}

RINGATTN_API ra_status ra_world_run(int ranks, ra_rank_fn fn, void *user, const ra_world_desc *wd) {
    (void)ranks, (void)fn, (void)user;
    return ra__shm_none(wd ? wd->error : NULL);
}

RINGATTN_API const ra_transport *ra_world_transport(ra_world *world, int rank) {
    (void)world, (void)rank;
    return NULL;
}

RINGATTN_API void ra_world_leave(ra_world *world, int rank, ra_status why) {
    (void)world, (void)rank, (void)why;
}

RINGATTN_API void ra_world_destroy(ra_world *world) {
    (void)world;
}

#else

enum { RA__SHM_BUCKETS = 16, RA__SHM_CHANNELS = 2 };
enum { RA__SHM_SPINS = 200, RA__SHM_YIELDS = 8 };
#define RA__SHM_SLICE_NS 10000000      /* longest single sleep */
#define RA__SHM_EVENT 65536            /* event word: events times this plus sleepers */
#define RA__SHM_LINE __attribute__((aligned(128))) /* two lines: processors fetch pairs */

/* Words of ra_transport_op.scratch of a PENDING op. All except the report are read and written
 * under the lock of the inbox that queues the op. */
enum { RA__SHM_NEXT, RA__SHM_PREV,     /* in its bucket */
       RA__SHM_OWNER, RA__SHM_SOURCE,  /* seats: who posted it, from where the bytes come */
       RA__SHM_REPORT };               /* atomic: RA__SHM_QUEUED, _TAKEN, _MOVED or RA_E_TRUNC */
enum { RA__SHM_QUEUED = 0, RA__SHM_TAKEN = 1, RA__SHM_MOVED = 2 };

typedef struct ra__shm_bucket { ra_transport_op *head, *tail; } ra__shm_bucket;

typedef struct ra__shm_seat {
    RA__SHM_LINE int64_t event;        /* others write it */
    int32_t open;                      /* ops of this rank that are queued or being copied */
    RA__SHM_LINE int32_t why;          /* failure of this rank, 0: none; rarely written */
    int32_t gone;                      /* 1: has quiesced or left */
    int32_t rank;
    struct ra_world *world;
    RA__SHM_LINE pthread_mutex_t inbox_lock; /* guards bucket[] and the scratch of ops in it */
    ra__shm_bucket bucket[RA__SHM_BUCKETS]; /* messages to this rank, both sides of them */
    RA__SHM_LINE pthread_mutex_t sleep_lock;
    pthread_cond_t wake;
    ra_transport transport;
} ra__shm_seat;

struct ra_world {
    RA__SHM_LINE int32_t aborted;      /* 1: some rank aborted */
    int32_t gone;                      /* ranks that have quiesced or left */
    int32_t ranks;
    ra__shm_seat *seats;               /* [ranks], behind this struct */
    size_t bytes;
    ra_allocator allocator;
};

/* -------------------------------------------------------------------------- waking and sleeping */

static int ra__shm_eventless(const ra__shm_seat *seat, int64_t seen) {
    return ra__load_i64(&seat->event) / RA__SHM_EVENT == seen;
}

static void ra__shm_notify(ra__shm_seat *seat) {
    if (ra__add_i64(&seat->event, RA__SHM_EVENT) % RA__SHM_EVENT == 0) return;
    pthread_mutex_lock(&seat->sleep_lock);
    pthread_cond_broadcast(&seat->wake);
    pthread_mutex_unlock(&seat->sleep_lock);
}

/* Skips seats whose lock another thread holds: their sleepers wake at the end of their slice. */
static void ra__shm_notify_all(ra_world *world) {
    for (int32_t r = 0; r < world->ranks; r++) {
        ra__shm_seat *seat = &world->seats[r];
        if (ra__add_i64(&seat->event, RA__SHM_EVENT) % RA__SHM_EVENT == 0) continue;
        if (pthread_mutex_trylock(&seat->sleep_lock)) continue;
        pthread_cond_broadcast(&seat->wake);
        pthread_mutex_unlock(&seat->sleep_lock);
    }
}

/* Sleeps for one slice, unless there was an event since `seen` was read. */
static void ra__shm_sleep(ra__shm_seat *seat, int64_t seen, int64_t ns) {
    pthread_mutex_lock(&seat->sleep_lock);
    if (ra__add_i64(&seat->event, 1) / RA__SHM_EVENT == seen)
        ra__cond_sleep(&seat->wake, &seat->sleep_lock, ns);
    ra__add_i64(&seat->event, -1);
    pthread_mutex_unlock(&seat->sleep_lock);
}

/* Waits for an event later than `seen`: 1; 0: the deadline came first. */
static int ra__shm_doze(ra__shm_seat *seat, int64_t seen, int64_t deadline_ns) {
    for (int i = 0; i < RA__SHM_SPINS; i++) {
        if (!ra__shm_eventless(seat, seen)) return 1;
        ra__pause();
    }
    for (int i = 0; i < RA__SHM_YIELDS; i++) {
        if (!ra__shm_eventless(seat, seen)) return 1;
        ra__yield();
    }
    while (ra__shm_eventless(seat, seen)) {
        int64_t ns = RA__SHM_SLICE_NS;
        if (deadline_ns != RA_NO_DEADLINE) {
            int64_t left = ra__time_since(deadline_ns, ra_now_ns());
            if (left <= 0) return 0;
            if (left < ns) ns = left;
        }
        ra__shm_sleep(seat, seen, ns);
    }
    return 1;
}

/* -------------------------------------------------------------------------- queues; the inbox is
 * locked */

static ra_transport_op *ra__shm_op(const ra_transport_op *op, int word) {
    return (ra_transport_op *)op->scratch[word];
}

static void ra__shm_report(ra_transport_op *op, int32_t report) {
    ra__store_ptr(&op->scratch[RA__SHM_REPORT], (void *)(intptr_t)report);
}

static int32_t ra__shm_reported(const ra_transport_op *op) {
    return (int32_t)(intptr_t)ra__load_ptr(&op->scratch[RA__SHM_REPORT]);
}

static ra__shm_seat *ra__shm_inbox(ra__shm_seat *seat, const ra_transport_op *op) {
    return op->kind == RA_MSG_RECV ? seat : &seat->world->seats[op->peer];
}

static ra__shm_bucket *ra__shm_bucket_of(ra__shm_seat *inbox, const ra_transport_op *op) {
    const ra__shm_seat *source = (const ra__shm_seat *)op->scratch[RA__SHM_SOURCE];
    return &inbox->bucket[(source->rank * RA__SHM_CHANNELS + op->channel) % RA__SHM_BUCKETS];
}

/* First op of the flow of `op`, or null. Ops of other flows come before it only if their sources
 * share the bucket. */
static ra_transport_op *ra__shm_first(const ra__shm_bucket *b, const ra_transport_op *op) {
    ra_transport_op *at = b->head;
    while (at && (at->scratch[RA__SHM_SOURCE] != op->scratch[RA__SHM_SOURCE] ||
                  at->channel != op->channel))
        at = ra__shm_op(at, RA__SHM_NEXT);
    return at;
}

static void ra__shm_append(ra__shm_bucket *b, ra_transport_op *op) {
    op->scratch[RA__SHM_NEXT] = NULL;
    op->scratch[RA__SHM_PREV] = b->tail;
    if (b->tail) b->tail->scratch[RA__SHM_NEXT] = op;
    else b->head = op;
    b->tail = op;
}

static void ra__shm_unlink(ra__shm_bucket *b, const ra_transport_op *op) {
    ra_transport_op *next = ra__shm_op(op, RA__SHM_NEXT), *prev = ra__shm_op(op, RA__SHM_PREV);
    if (prev) prev->scratch[RA__SHM_NEXT] = next;
    else b->head = next;
    if (next) next->scratch[RA__SHM_PREV] = prev;
    else b->tail = prev;
}

/* -------------------------------------------------------------------------- ops */

/* The failure that all calls of this rank return, or RA_OK. */
static int32_t ra__shm_failure(const ra__shm_seat *seat) {
    int32_t why = ra__load_i32(&seat->why);
    if (why) return why;
    return ra__load_i32(&seat->world->aborted) ? RA_E_ABORTED : RA_OK;
}

/* For an op whose peer is gone. Reads the failure again: a rank aborts before it is gone, so if it
 * is seen to be gone, its abort can be seen too. */
static int32_t ra__shm_why_gone(const ra__shm_seat *seat) {
    int32_t failure = ra__shm_failure(seat);
    return failure ? failure : RA_E_PEER;
}

/* Stores the state last and with release, because another thread of the rank may load it. */
static void ra__shm_close(ra_transport_op *op, int32_t state) {
    op->done = state == RA_MSG_DONE ? op->len : 0;
    ra__store_i32(&op->state, state);
}

/* This thread posts `op` and has taken `other` out of its inbox. It must not touch `other` after
 * its report, because the owner may use it again. */
static void ra__shm_move(ra_transport_op *op, ra_transport_op *other) {
    ra__shm_seat *owner = (ra__shm_seat *)other->scratch[RA__SHM_OWNER];
    ra_transport_op *to = op->kind == RA_MSG_RECV ? op : other;
    const ra_transport_op *from = op->kind == RA_MSG_RECV ? other : op;
    int fits = to->len == from->len;
    if (fits && to->len) memcpy(to->buf, from->buf, to->len);
    ra__shm_close(op, fits ? (int32_t)RA_MSG_DONE : (int32_t)RA_E_TRUNC);
    ra__shm_report(other, fits ? (int32_t)RA__SHM_MOVED : (int32_t)RA_E_TRUNC);
    ra__add_i32(&owner->open, -1);
    ra__shm_notify(owner);
}

static void ra__shm_post_one(ra__shm_seat *seat, ra_transport_op *op) {
    ra__shm_seat *peer, *inbox;
    ra__shm_bucket *bucket;
    ra_transport_op *other;
    if (op->channel >= RA__SHM_CHANNELS || op->peer < 0 || op->peer >= seat->world->ranks) {
        ra__shm_close(op, RA_E_IO);
        return;
    }
    peer = &seat->world->seats[op->peer];
    inbox = ra__shm_inbox(seat, op);
    op->scratch[RA__SHM_OWNER] = seat;
    op->scratch[RA__SHM_SOURCE] = op->kind == RA_MSG_RECV ? peer : seat;
    ra__shm_report(op, RA__SHM_QUEUED);
    bucket = ra__shm_bucket_of(inbox, op);
    pthread_mutex_lock(&inbox->inbox_lock);
    other = ra__shm_first(bucket, op);
    if (ra__load_i32(&seat->why)) {    /* see ra__shm_purge */
        ra__shm_close(op, ra__load_i32(&seat->why));
        other = NULL;
    } else if (ra__load_i32(&peer->gone)) {
        ra__shm_close(op, ra__shm_why_gone(seat));
        other = NULL;
    } else if (other && other->kind != op->kind) {
        ra__shm_unlink(bucket, other);
        ra__shm_report(other, RA__SHM_TAKEN);
    } else {
        ra__store_i32(&op->state, RA_MSG_PENDING);
        ra__add_i32(&seat->open, 1);
        ra__shm_append(bucket, op);
        other = NULL;
    }
    pthread_mutex_unlock(&inbox->inbox_lock);
    if (other) ra__shm_move(op, other);
}

/* Takes a queued op back. Returns the report: RA__SHM_QUEUED if it was still queued, and never
 * RA__SHM_TAKEN, because it waits for a copy that has begun. That takes no longer than the
 * memcpy. */
static int32_t ra__shm_withdraw(ra__shm_seat *seat, ra_transport_op *op) {
    ra__shm_seat *inbox = ra__shm_inbox(seat, op);
    int32_t report;
    pthread_mutex_lock(&inbox->inbox_lock);
    report = ra__shm_reported(op);
    if (report == RA__SHM_QUEUED) {
        ra__shm_unlink(ra__shm_bucket_of(inbox, op), op);
        ra__add_i32(&seat->open, -1);
    }
    pthread_mutex_unlock(&inbox->inbox_lock);
    while (report == RA__SHM_TAKEN) {
        ra__yield();
        report = ra__shm_reported(op);
    }
    return report;
}

/* Ends one PENDING op if it can be ended. failure: of the seat. */
static void ra__shm_settle(ra__shm_seat *seat, ra_transport_op *op, int32_t failure) {
    int32_t report = ra__shm_reported(op);
    if (failure) {
        if (report == RA__SHM_QUEUED || report == RA__SHM_TAKEN) ra__shm_withdraw(seat, op);
        ra__shm_close(op, failure);
        return;
    }
    if (report == RA__SHM_QUEUED && ra__load_i32(&seat->world->gone) &&
        ra__load_i32(&seat->world->seats[op->peer].gone)) {
        report = ra__shm_withdraw(seat, op);
        if (report == RA__SHM_QUEUED) report = ra__shm_why_gone(seat);
    }
    if (report == RA__SHM_MOVED) ra__shm_close(op, RA_MSG_DONE);
    else if (report < 0) ra__shm_close(op, report);
}

/* How many ops were PENDING before a sweep, and still are. */
typedef struct ra__shm_pending { int before, after; } ra__shm_pending;

/* Settles ops[0..n). */
static ra__shm_pending ra__shm_sweep(ra__shm_seat *seat, ra_transport_op *const *ops, int n,
                                     int32_t failure) {
    ra__shm_pending count = { 0, 0 };
    for (int i = 0; i < n; i++) {
        if (ra__load_i32(&ops[i]->state) != RA_MSG_PENDING) continue;
        count.before++;
        ra__shm_settle(seat, ops[i], failure);
        count.after += ra__load_i32(&ops[i]->state) == RA_MSG_PENDING;
    }
    return count;
}

/* -------------------------------------------------------------------------- callbacks */

/* Who: the owner. Blocks: no; copies the bytes of ops that match immediately. Buffers: as
 * ra_transport_op.buf says. Order: receives first, each flow in the order of ops; all are accepted,
 * and it never returns RA_AGAIN. Errors: see above; every idle op then fails in the same way.
 * Required. */
static int ra__shm_post(void *ctx, ra_transport_op *const *ops, int n) {
    ra__shm_seat *seat = (ra__shm_seat *)ctx;
    int32_t failure = ra__shm_failure(seat);
    for (int kind = RA_MSG_RECV; kind >= RA_MSG_SEND; kind--) {
        for (int i = 0; i < n; i++) {
            if (ops[i]->kind != kind || ra__load_i32(&ops[i]->state) != RA_MSG_IDLE) continue;
            if (failure) ra__shm_close(ops[i], failure);
            else ra__shm_post_one(seat, ops[i]);
        }
    }
    for (int i = 0; i < n; i++)
        if (ra__load_i32(&ops[i]->state) == RA_MSG_IDLE) ra__shm_close(ops[i], RA_E_IO);
    return failure;
}

/* Who: the owner. Blocks: no, except for a copy in progress after a failure. Buffers: free again
 * when their op leaves PENDING. Order: ops of a flow may be found done in any order. Errors: see
 * above. Required with post. */
static int ra__shm_poll(void *ctx, ra_transport_op *const *ops, int n) {
    ra__shm_seat *seat = (ra__shm_seat *)ctx;
    int32_t failure = ra__shm_failure(seat);
    (void)ra__shm_sweep(seat, ops, n, failure);
    return failure;
}

/* As poll, except that it blocks until one of ops leaves PENDING, a rank aborts, or deadline_ns (it
 * then returns RA_OK). Optional. */
static int ra__shm_wait(void *ctx, ra_transport_op *const *ops, int n, int64_t deadline_ns) {
    ra__shm_seat *seat = (ra__shm_seat *)ctx;
    for (;;) {
        int64_t seen = ra__load_i64(&seat->event) / RA__SHM_EVENT;
        int32_t failure = ra__shm_failure(seat);
        ra__shm_pending pending = ra__shm_sweep(seat, ops, n, failure);
        if (failure || pending.after < pending.before || pending.after == 0) return failure;
        if (!ra__shm_doze(seat, seen, deadline_ns)) return RA_OK;
    }
}

/* Who: any thread at any time, during any other call. Blocks: no. Buffers: still in use until
 * quiesce. Order: the first abort of a rank counts and is in effect when this returns. Errors:
 * none. Optional. */
static int ra__shm_abort(void *ctx, int why) {
    ra__shm_seat *seat = (ra__shm_seat *)ctx;
    ra__cas_i32(&seat->why, 0, why < 0 ? why : RA_E_ABORTED);
    if (ra__cas_i32(&seat->world->aborted, 0, 1)) ra__shm_notify_all(seat->world);
    return RA_OK;
}

/* Takes back everything that this rank has queued, and waits for copies in progress. The `why` of
 * its seat is set: a concurrent post either has queued its op before this takes the lock of the
 * inbox, or sees `why` under that lock and queues nothing. */
static void ra__shm_purge(ra__shm_seat *seat) {
    for (int32_t r = 0; r < seat->world->ranks; r++) {
        ra__shm_seat *inbox = &seat->world->seats[r];
        pthread_mutex_lock(&inbox->inbox_lock);
        for (int b = 0; b < RA__SHM_BUCKETS; b++) {
            ra_transport_op *op = inbox->bucket[b].head, *next;
            for (; op; op = next) {
                next = ra__shm_op(op, RA__SHM_NEXT);
                if (op->scratch[RA__SHM_OWNER] != seat) continue;
                ra__shm_unlink(&inbox->bucket[b], op);
                ra__shm_report(op, RA_E_ABORTED);
                ra__add_i32(&seat->open, -1);
            }
        }
        pthread_mutex_unlock(&inbox->inbox_lock);
    }
    while (ra__load_i32(&seat->open)) ra__yield();
}

/* After this the rank reads nothing of others, and others get RA_E_PEER instead of waiting. */
static void ra__shm_part(ra__shm_seat *seat) {
    ra_world *world = seat->world;
    int32_t failure = ra__shm_failure(seat);
    ra__cas_i32(&seat->why, 0, failure ? failure : RA_E_STATE);
    ra__shm_purge(seat);
    if (!ra__cas_i32(&seat->gone, 0, 1)) return;
    if (ra__add_i32(&world->gone, 1) + 1 == world->ranks || !ra__load_i32(&world->aborted))
        ra__shm_notify_all(world);
}

/* Who: the owner, when no thread of the rank reads what it received. Blocks: until every rank has
 * quiesced or left, or deadline_ns. Buffers: all belong to the rank again after RA_OK. Order: the
 * rank leaves permanently, even if nobody aborted; later ops fail. Errors: RA_E_UNSAFE at the
 * deadline; may be called again. Optional. */
static int ra__shm_quiesce(void *ctx, int64_t deadline_ns) {
    ra__shm_seat *seat = (ra__shm_seat *)ctx;
    ra__shm_part(seat);
    for (;;) {
        int64_t seen = ra__load_i64(&seat->event) / RA__SHM_EVENT;
        if (ra__load_i32(&seat->world->gone) == seat->world->ranks) return RA_OK;
        if (!ra__shm_doze(seat, seen, deadline_ns)) return RA_E_UNSAFE;
    }
}

/* Who: any thread, with any code. Blocks: no. The text is static; null: see ra_status_text.
 * Optional. */
static const char *ra__shm_error_text(void *ctx, int code) {
    (void)ctx;
    if (code == RA_E_ABORTED) return "another rank of this world failed or was cancelled";
    if (code == RA_E_PEER) return "the other rank has left this world";
    if (code == RA_E_TRUNC) return "send and receive differ in length";
    if (code == RA_E_IO) return "an op has an unknown kind or channel, or a peer outside the world";
    if (code == RA_E_STATE) return "this rank has left this world";
    if (code == RA_E_UNSAFE) return "some rank of this world neither left nor quiesced in time";
    return NULL;
}

/* -------------------------------------------------------------------------- the world */

static void ra__shm_close_seats(ra_world *world, int32_t n) {
    while (n-- > 0) {
        pthread_cond_destroy(&world->seats[n].wake);
        pthread_mutex_destroy(&world->seats[n].sleep_lock);
        pthread_mutex_destroy(&world->seats[n].inbox_lock);
    }
}

/* 1: done; 0: the system has no more locks, and nothing has been created. */
static int ra__shm_open_seat(ra_world *world, int32_t rank) {
    ra__shm_seat *seat = &world->seats[rank];
    ra_transport *t = &seat->transport;
    seat->world = world;
    seat->rank = rank;
    t->size = (uint32_t)sizeof *t;
    t->abi = RA_TRANSPORT_ABI;
    t->caps = RA_CAP_ANY_THREAD | RA_CAP_ANY_PEER | RA_CAP_DEADLINE | RA_CAP_SHARED;
    t->channels = RA__SHM_CHANNELS;
    t->tag_bits = 64;
    t->max_ops = 65536;
    t->rank = rank;
    t->ranks = world->ranks;
    t->max_msg = SIZE_MAX / 2;
    t->align = 64;
    t->name = "world";
    t->ctx = seat;
    t->post = ra__shm_post;
    t->poll = ra__shm_poll;
    t->wait = ra__shm_wait;
    t->abort = ra__shm_abort;
    t->quiesce = ra__shm_quiesce;
    t->error_text = ra__shm_error_text;
    if (pthread_mutex_init(&seat->inbox_lock, NULL)) return 0;
    if (!pthread_mutex_init(&seat->sleep_lock, NULL)) {
        if (!ra__cond_init(&seat->wake)) return 1;
        pthread_mutex_destroy(&seat->sleep_lock);
    }
    pthread_mutex_destroy(&seat->inbox_lock);
    return 0;
}

static ra_status ra__shm_check(const ra_world_desc *wd, int32_t ranks, ra_error *e) {
    if (ranks < 1 || ranks > 4096)
        return ra__refuse(e, RA_E_RANGE, "ranks", "must be 1 to 4096, is #", ranks);
    return wd ? ra__check_allocator(&wd->allocator, "allocator", e) : RA_OK;
}

/* wd has been checked; only its allocator is used here. Null: no memory, or no locks. */
static ra_world *ra__shm_create(const ra_world_desc *wd, int32_t ranks) {
    size_t bytes = sizeof(ra_world) + (size_t)ranks * sizeof(ra__shm_seat);
    ra_world *world = (ra_world *)ra__alloc(wd ? &wd->allocator : NULL, (int64_t)bytes, 128);
    if (!world) return NULL;
    memset((void *)world, 0, bytes);
    world->ranks = ranks;
    world->seats = (ra__shm_seat *)(world + 1);
    world->bytes = bytes;
    if (wd) world->allocator = wd->allocator;
    for (int32_t r = 0; r < ranks; r++) {
        if (ra__shm_open_seat(world, r)) continue;
        ra__shm_close_seats(world, r);
        ra__free(wd ? &wd->allocator : NULL, world, bytes);
        return NULL;
    }
    return world;
}

static ra_status ra__shm_no_memory(ra_error *e, int32_t ranks) {
    return ra__refuse(e, RA_E_NOMEM, "ranks", "no memory or locks for # ranks", ranks);
}

RINGATTN_API ra_status ra_world_create(ra_world **out, const ra_world_desc *wd) {
    ra_error *e = wd ? wd->error : NULL;
    ra_status s;
    if (!out) return ra__refuse(e, RA_E_NULL, "out", "is null: it receives the world", 0);
    *out = NULL;
    if (!wd || !wd->ranks)
        return ra__refuse(e, RA_E_UNSET, "ranks", "must be set, 1 to 4096, is #", 0);
    s = ra__shm_check(wd, wd->ranks, e);
    if (s) return s;
    *out = ra__shm_create(wd, wd->ranks);
    return *out ? RA_OK : ra__shm_no_memory(e, wd->ranks);
}

RINGATTN_API const ra_transport *ra_world_transport(ra_world *world, int rank) {
    if (!world || rank < 0 || rank >= world->ranks) return NULL;
    return &world->seats[rank].transport;
}

RINGATTN_API void ra_world_leave(ra_world *world, int rank, ra_status why) {
    if (!world || rank < 0 || rank >= world->ranks) return;
    if (why != RA_OK) ra__shm_abort(&world->seats[rank], why);
    ra__shm_part(&world->seats[rank]);
}

/* No call on the world may be in progress. */
RINGATTN_API void ra_world_destroy(ra_world *world) {
    ra_allocator allocator;
    if (!world) return;
    allocator = world->allocator;
    ra__shm_close_seats(world, world->ranks);
    ra__free(&allocator, world, world->bytes);
}

typedef struct ra__shm_run {
    ra_world *world;
    ra_rank_fn fn;
    void *user;
    int32_t cause;                     /* first status except RA_OK and RA_E_ABORTED; 0: none */
    int32_t aborted;                   /* 1: some rank returned RA_E_ABORTED */
} ra__shm_run;

typedef struct ra__shm_thread {
    ra__shm_run *run;
    int32_t rank;
    pthread_t id;
} ra__shm_thread;

static void *ra__shm_main(void *arg) {
    ra__shm_thread *thread = (ra__shm_thread *)arg;
    ra__shm_run *run = thread->run;
    ra_status s = run->fn(run->world, thread->rank, run->user);
    if (s == RA_E_ABORTED) ra__store_i32(&run->aborted, 1);
    else if (s != RA_OK) ra__cas_i32(&run->cause, 0, s);
    ra_world_leave(run->world, thread->rank, s);
    return NULL;
}

/* Starts threads 0..ranks-1 and joins them. Ranks whose thread does not start leave immediately
 * with RA_E_NOMEM, so that the others end too. Returns how many started. */
static int32_t ra__shm_threads(ra__shm_run *run, ra__shm_thread *threads) {
    int32_t ranks = run->world->ranks, started = 0;
    while (started < ranks) {
        ra__shm_thread *t = &threads[started];
        t->run = run;
        t->rank = started;
        if (pthread_create(&t->id, NULL, ra__shm_main, t)) break;
        started++;
    }
    if (started < ranks) ra__cas_i32(&run->cause, 0, RA_E_NOMEM);
    for (int32_t r = started; r < ranks; r++) ra_world_leave(run->world, r, RA_E_NOMEM);
    for (int32_t r = 0; r < started; r++) pthread_join(threads[r].id, NULL);
    return started;
}

RINGATTN_API ra_status ra_world_run(int ranks, ra_rank_fn fn, void *user, const ra_world_desc *wd) {
    ra_error *e = wd ? wd->error : NULL;
    const ra_allocator *a = wd ? &wd->allocator : NULL;
    ra__shm_thread *threads;
    ra__shm_run run;
    ra_status s;
    int32_t started;
    if (!fn) return ra__refuse(e, RA_E_NULL, "fn", "is null: what should the ranks run?", 0);
    s = ra__shm_check(wd, ranks, e);
    if (s != RA_OK) return s;
    if (wd && wd->ranks && wd->ranks != ranks)
        return ra__refuse(e, RA_E_SHAPE, "ranks",
                          "is # in the descriptor and differs in the call: leave it 0", wd->ranks);
    memset(&run, 0, sizeof run);
    run.fn = fn;
    run.user = user;
    run.world = ra__shm_create(wd, ranks);
    if (!run.world) return ra__shm_no_memory(e, ranks);
    threads = (ra__shm_thread *)ra__alloc(a, ranks * (int64_t)sizeof *threads, 64);
    if (!threads) {
        ra_world_destroy(run.world);
        return ra__shm_no_memory(e, ranks);
    }
    started = ra__shm_threads(&run, threads);
    ra__free(a, threads, (size_t)ranks * sizeof *threads);
    ra_world_destroy(run.world);
    if (started < ranks)
        return ra__refuse(e, RA_E_NOMEM, "threads", "the thread of rank # did not start", started);
    if (run.cause) return run.cause;
    return run.aborted ? RA_E_ABORTED : RA_OK;
}

#undef RA__SHM_SLICE_NS
#undef RA__SHM_EVENT
#undef RA__SHM_LINE
#endif

/* ========================================================================== RING
 * One rank's pass as a state machine: it takes completions and the time, and does one bounded step
 * per call. In: a plan, a transport, the tensors of a call. Out: outputs and counters, or one
 * failure.
 *
 * Threads. There are two try-locks, which nobody waits for: `comm` for everything that talks to the
 * transport, `sched` for handing out tasks. Threads compute outside both. A task (query rows x
 * heads) may fold chunk f only after it has folded chunk f - 1. Tasks are handed out chunk by
 * chunk, so each row meets the chunks in the order of the plan, whichever thread computes it.
 *
 * Buffers. Receive i uses buffer i mod n and is posted when all tasks have folded receive i - n and
 * it has been sent on. Own chunks are packed into separate buffers, so they never delay a chunk
 * that is on its way. With RA_CAP_SHARED a message is a frame and an address record, and a chunk is
 * "folded" when its owner's memory is no longer read here. */

/* -------------------------------------------------------------------------- failure and time */
static int64_t ra__ring_now(const ra_ring *r) {
    return r->rd.clock_ns ? r->rd.clock_ns(r->rd.clock_ctx) : ra_now_ns();
}

/* Time left until a deadline on the ring's clock (0: none), at most `most` ns. */
static int64_t ra__ring_left(const ra_ring *r, int64_t deadline_ns, int64_t most) {
    if (!deadline_ns) return most;
    return ra__min(most, ra__max(0, ra__time_since(deadline_ns, ra__ring_now(r))));
}

/* A time left as the deadline that a transport gets. */
static int64_t ra__ring_until(int64_t left_ns) { return ra__time_add(ra_now_ns(), left_ns); }

static void ra__ring_event(const ra_ring *r, int32_t kind, int32_t ith, const ra_event *more) {
    ra_event e;
    if (!r->rd.trace) return;
    e = *more;
    e.kind = kind;
    e.rank = r->rank;
    e.thread = ith;
    e.pass = ra__load_i64(&r->counters.pass);
    e.backward = ra__load_i32(&r->backward);
    e.end_ns = ra__ring_now(r);
    r->rd.trace(r->rd.trace_ctx, &e);
}

static ra_event ra__event_none(void) {
    ra_event e;
    memset(&e, 0, sizeof e);
    e.peer = e.origin = e.sequence = -1;
    e.chunk = -1;
    return e;
}

/* What a failure concerns; -1 where it does not apply. moved: bytes, if the length is wrong. */
typedef struct ra__blame { int32_t peer, sending, code; int64_t chunk, moved; } ra__blame;

static ra__blame ra__blame_of(int32_t peer, int32_t sending, int32_t code, int64_t chunk) {
    ra__blame b;
    b.peer = peer;
    b.sending = sending;
    b.code = code;
    b.chunk = chunk;
    b.moved = -1;
    return b;
}

/* Says what ranks disagree about, or that they may if nothing has come yet. */
static void ra__failure_hint(const ra_ring *r, ra_failure *f, size_t *at) {
    static const char *const name[RA__AGREE_PARTS + 1] = {
        "sizes", "dtypes", "mask", "layout", "scale, scores, alibi or sinks",
        "op, gradients, dropout or seed", "chunk_tokens, buffers or rates",
        "the address space, although the transport declares RA_CAP_SHARED" };
    const size_t cap = sizeof f->text;
    const int silent = f->status == RA_E_TRUNC || f->status == RA_E_TIMEOUT ||
                       f->status == RA_E_PEER;
    const char *comma = ": ";
    for (int i = 0; i <= RA__AGREE_PARTS && f->status == RA_E_MISMATCH; i++) {
        if (!(r->differ >> 8 * i & 255)) continue;
        ra__put(f->text, cap, at, comma);
        ra__put(f->text, cap, at, name[i]);
        comma = "; ";
    }
    if (silent && f->peer >= 0 && !ra__load_i32(&r->met))
        ra__put(f->text, cap, at, "; nothing has come yet: do all ranks have equal descriptors?");
}

static void ra__failure_number(ra_failure *f, size_t *at, const char *what, int64_t value) {
    ra__put(f->text, sizeof f->text, at, what);
    ra__put_i64(f->text, sizeof f->text, at, value);
}

static void ra__failure_text(const ra_ring *r, ra_failure *f, int64_t moved) {
    size_t at = 0, cap = sizeof f->text;
    const char *why = NULL;
    if (f->code && f->status != RA_E_ENGINE && r->has_transport && r->tp.error_text)
        why = r->tp.error_text(r->tp.ctx, f->code);
    f->text[0] = 0;
    ra__failure_number(f, &at, "rank ", f->rank);
    ra__failure_number(f, &at, ", pass ", f->pass);
    ra__put(f->text, cap, &at, ": ");
    ra__put(f->text, cap, &at, ra_status_text(f->status));
    ra__failure_hint(r, f, &at);
    if (f->peer >= 0)
        ra__failure_number(f, &at, f->sending == 1 ? "; sending to rank "
                                                   : "; receiving from rank ", f->peer);
    if (f->chunk >= 0) ra__failure_number(f, &at, ", chunk ", f->chunk);
    if (moved >= 0) ra__failure_number(f, &at, ", bytes moved ", moved);
    if (f->code) ra__failure_number(f, &at, ", code ", f->code);
    if (why) {
        ra__put(f->text, cap, &at, " (");
        ra__put(f->text, cap, &at, why);
        ra__put(f->text, cap, &at, ")");
    }
    if (f->since_progress_ns < 1000000) return;
    ra__failure_number(f, &at, ", ms since progress: ", f->since_progress_ns / 1000000);
}

/* Aborts the transport, once in the life of a ring. */
static void ra__ring_abort(ra_ring *r, ra_status why) {
    if (r->has_transport && r->tp.abort && ra__cas_i32(&r->aborted, 0, 1))
        (void)r->tp.abort(r->tp.ctx, why);
}

/* The first failure of a pass that has not ended is recorded, and the transport is aborted. Returns
 * the status of the ring, which may be that of an earlier failure; s if there is none (yet). */
static ra_status ra__ring_fail(ra_ring *r, ra_status s, ra__blame why) {
    ra_event e = ra__event_none();
    if (ra__load_i32(&r->cancelled)) s = RA_E_CANCELLED;   /* it may be what failed the network */
    if (ra__cas_i32(&r->state, RA_RING_RUNNING, RA_RING_FAILED)) {
        ra_failure *f = &r->failure;
        f->status = s;
        f->rank = r->rank;
        f->peer = why.peer;
        f->sending = why.sending;
        f->code = why.code;
        f->chunk = why.chunk;
        f->pass = r->pass;
        f->since_progress_ns = ra__time_since(ra__ring_now(r), ra__load_i64(&r->progress_ns));
        ra__failure_text(r, f, why.moved);
        ra__store_i32(&r->failed, s);
        ra__ring_abort(r, s);
        e.peer = why.peer;
        e.chunk = why.chunk;
        e.begin_ns = r->begin_ns;
        ra__ring_event(r, RA_EV_FAIL, -1, &e);
    }
    (void)ra__add_i64(&r->events, 1);
    return ra__load_i32(&r->failed) ? ra__load_i32(&r->failed) : s;
}

/* What a callback returned, as a status of a failed pass. */
static ra_status ra__ring_code(int code) {
    return code <= RA_E_MISMATCH && code >= RA_E_UNSAFE ? code : RA_E_IO;
}

static void ra__ring_note_progress(ra_ring *r) {
    ra__store_i64(&r->progress_ns, ra__ring_now(r));
    (void)ra__add_i64(&r->events, 1);
}

/* -------------------------------------------------------------------------- frames */
/* A number for the address space of the caller, never 0 and the same for all threads of a process.
 * A forked child differs by its process id. Any other process differs by what the system draws at
 * random for each start: 16 bytes for this purpose on Linux, otherwise the address of the C
 * library. */
static uint32_t ra__address_space(void) {
    uint64_t h = ra__hash_i64(14695981039346656037u, (int64_t)RA__PROCESS_ID());
#if defined(__linux__)
    const void *drawn = (const void *)(uintptr_t)getauxval(AT_RANDOM);
    if (drawn) h = ra__hash(h, drawn, 16);
#else
    h = ra__hash_i64(h, (int64_t)(uintptr_t)&malloc);
#endif
    h ^= h >> 32;
    return (uint32_t)h ? (uint32_t)h : 1u;
}

/* Sets what the frames of this pass contain. Under `comm`, in its first round of communication,
 * because some of these values are data and ra_begin reads no data. */
static void ra__ring_agree(ra_ring *r) {
    if (r->agreed_known) return;
    r->agreed = ra__agree_call(r->plan, &r->t);
    r->space = r->shared ? ra__address_space() : 0;
    r->agreed_known = 1;
}

static ra__frame ra__ring_frame(const ra_ring *r, int32_t kind, int32_t origin, int64_t chunk,
                                int64_t length) {
    ra__frame f;
    memset(&f, 0, sizeof f);
    f.magic = RA__MAGIC;
    f.abi = RA_TRANSPORT_ABI;
    f.pass = r->pass;
    f.hash = ra__hash(14695981039346656037u, &r->agreed, sizeof r->agreed);
    for (int i = 0; i < RA__AGREE_PARTS; i++) {
        uint64_t h = r->agreed.part[i] ^ r->agreed.part[i] >> 29;
        f.parts |= h * 0x9e3779b97f4a7c15u >> 56 << 8 * i;
    }
    f.length = length;
    f.origin = origin;
    f.chunk = (int32_t)chunk;
    f.kind = kind;
    f.space = r->space;
    f.check = ra__hash(14695981039346656037u, &f, offsetof(ra__frame, check));
    return f;
}

/* A frame is complete, of an equal plan, and the one that is due. */
static ra_status ra__frame_check(const void *message, const ra__frame *due, uint64_t *differ) {
    ra__frame f;
    memcpy(&f, message, sizeof f);
    if (f.magic != due->magic || f.abi != due->abi) return RA_E_PROTO;
    if (f.check != ra__hash(14695981039346656037u, &f, offsetof(ra__frame, check)))
        return RA_E_PROTO;
    *differ = f.parts ^ due->parts;
    if (f.space != due->space) *differ |= (uint64_t)1 << 8 * RA__AGREE_PARTS;
    if (f.hash != due->hash || f.space != due->space) return RA_E_MISMATCH;
    return memcmp(&f, due, sizeof f) ? RA_E_PROTO : RA_OK;
}

/* Checks that the message of op, chunk c, begins with the frame that is due; otherwise the pass
 * fails. */
static ra_status ra__ring_check(ra_ring *r, const ra_transport_op *op, const ra__frame *due,
                                int64_t c) {
    ra_status s = ra__frame_check(op->buf, due, &r->differ);
    if (s == RA_OK) ra__store_i32(&r->met, 1);
    return s ? ra__ring_fail(r, s, ra__blame_of(op->peer, 0, 0, c)) : RA_OK;
}

/* Slot of message i of a lane. */
RA__INLINE ra_transport_op *ra__lane_op(const ra__lane *lane, int64_t i) {
    return &lane->op[i % lane->slots];
}
RA__INLINE uint8_t *ra__lane_buf(const ra__lane *lane, int64_t i) {
    return lane->buf + i % lane->slots * lane->bytes;
}

/* -------------------------------------------------------------------------- where chunks are */
/* Length of chunk c's message to the rank `hop` ranks after its owner. */
static int64_t ra__ring_length(const ra_ring *r, int64_t c, int32_t hop) {
    const ra__chunk *chunk = &r->lists->chunk[c];
    if (r->shared) return RA__FRAME_BYTES + RA__ADDRESS_BYTES;
    return r->lists->backward ? ra__back_length(&r->plan->d, chunk, hop)
                              : ra__message_bytes(&r->plan->d, chunk, hop);
}

/* The rank `steps` further in the direction of travel. */
static int32_t ra__ring_peer(const ra_ring *r, int32_t steps) {
    return ra__rank_up(r->plan, r->rank, steps * r->lists->direction);
}

/* How many ranks after the owner of chunk c this rank is. */
static int32_t ra__ring_hop(const ra_ring *r, int64_t c) {
    int32_t owner = r->lists->chunk[c].owner;
    return r->lists->direction > 0 ? ra__ranks_up(r->plan, owner, r->rank)
                                   : ra__ranks_up(r->plan, r->rank, owner);
}

static int32_t ra__ring_kind(const ra_ring *r) {
    return r->lists->backward ? RA__FRAME_GRAD : RA__FRAME_CHUNK;
}

/* The segments that came in a message `hop` ranks away from their owner. */
static void ra__item_packed(const ra_ring *r, const uint8_t *message, int32_t hop, ra__item *out) {
    const ra_desc *d = &r->plan->d;
    const int32_t *hops = r->lists->backward ? out->c.back_hops : out->c.hops;
    ra__message_offsets part[2], grad[2];
    if (r->lists->backward) (void)ra__back_message(d, &out->c, hop, part, grad);
    else (void)ra__message(d, &out->c, hop, part);
    for (int32_t i = 0; i < out->c.segs; i++) {
        if (hops[i] < hop) continue;
        out->k[i] = ra__view_packed(message + part[i].k, d->kv_heads, d->k_dim, d->k_dtype);
        out->v[i] = ra__view_packed(message + part[i].v, d->kv_heads, d->v_dim, d->v_dtype);
        if (d->layout.kind == RA_LAYOUT_ARRAY)
            out->pos[i] = (const int32_t *)(const void *)(message + part[i].pos);
    }
}

static void ra__item_address(const uint8_t *message, ra__item *out) {
    ra__address a;
    ra__view kv[2];
    memset(kv, 0, sizeof kv);
    memcpy(&a, message + RA__FRAME_BYTES, sizeof a);
    kv[0].data = a.k;
    kv[0].token = a.k_token;
    kv[0].head = a.k_head;
    kv[1].data = a.v;
    kv[1].token = a.v_token;
    kv[1].head = a.v_head;
    ra__item_owned(out, kv, a.pos);
}

/* The chunk of entry f of the fold list; null: a sequence without keys. */
RA__INLINE const ra__chunk *ra__entry_chunk(const ra_ring *r, int64_t f) {
    int32_t c = r->lists->fold[f].chunk;
    return c < 0 ? NULL : &r->lists->chunk[c];
}

/* The keys of entry f of the fold list; 0: a sequence without keys. */
static int ra__ring_item(const ra_ring *r, int64_t f, ra__item *out) {
    const int32_t *array = r->t.k_pos.array;
    const ra__fold *at = &r->lists->fold[f];
    int32_t recv = at->recv;
    memset(out, 0, sizeof *out);
    out->c.sequence = at->sequence;
    if (at->chunk < 0) return 0;
    out->c = r->lists->chunk[at->chunk];
    if (recv >= 0) {
        const uint8_t *message = (const uint8_t *)ra__lane_op(&r->lane[RA__RECEIVES], recv)->buf;
        if (r->shared) ra__item_address(message, out);
        else ra__item_packed(r, message, ra__ring_hop(r, at->chunk), out);
        return 1;
    }
    if (array) array += out->c.sequence * r->t.k_pos.batch_step;
    ra__item_owned(out, r->kv, array);
    return 1;
}

/* Gradients of own chunk `own` if they do not travel in its messages. */
static uint8_t *ra__ring_grads(const ra_ring *r, int64_t own) {
    return r->grad_buf + own % r->grad_slots * r->grad_bytes +
           (r->plan->d.backward_travel == RA_TRAVEL_Q ? RA__FRAME_BYTES : 0);
}

/* Buffer of own chunk i of those that leave. */
static uint8_t *ra__ring_packed(const ra_ring *r, int64_t i) {
    return r->pack_buf + i % r->pack_slots * r->lane[RA__RECEIVES].bytes;
}

/* Gradients that belong to a message, or with shared memory to the address in it. */
static uint8_t *ra__ring_message_grads(const ra_ring *r, uint8_t *message) {
    ra__address a;
    if (!r->shared) return message + RA__FRAME_BYTES;
    memcpy(&a, message + RA__FRAME_BYTES, sizeof a);
    return a.grad;
}

/* Where entry f of a backward fold list finds the gradients of its chunk. */
static uint8_t *ra__ring_fold_grads(const ra_ring *r, int64_t f) {
    const ra__fold *at = &r->lists->fold[f];
    int32_t recv = at->recv, returned;
    if (recv >= 0)
        return ra__ring_message_grads(
            r, (uint8_t *)ra__lane_op(&r->lane[RA__RECEIVES], recv)->buf);
    returned = r->lists->own[at->own].returned;
    if (returned < 0 || r->shared) return ra__ring_grads(r, at->own);
    if (at->phase == RA__BEFORE)
        return ra__lane_buf(&r->lane[RA__RETURNS], returned) + RA__FRAME_BYTES;
    return ra__ring_packed(r, returned) + RA__FRAME_BYTES;
}

/* Rows of a segment into a message, all heads packed. */
static void ra__pack_rows(uint8_t *to, ra__view from, const ra__seg *s, int32_t heads,
                          int64_t bytes) {
    for (int64_t i = 0; i < s->rows; i++) {
        ra__view row = ra__view_at(from, 0, s->row + i, 0);
        if (row.head == bytes) {
            memcpy(to, row.data, (size_t)(bytes * heads));
            to += bytes * heads;
            continue;
        }
        for (int32_t h = 0; h < heads; h++, to += bytes)
            memcpy(to, row.data + h * row.head, (size_t)bytes);
    }
}

/* RA_TRAVEL_Q: packs own rows of queries into their message, which has their sums too. */
static void ra__ring_pack_q(const ra_ring *r, const ra__chunk *chunk, uint8_t *message) {
    const ra_desc *d = &r->plan->d;
    uint32_t mode = ra__fp_enter();
    int64_t rows = ra__chunk_rows(chunk), at = 0;
    int64_t q_row = ra__row_bytes(d->q_dtype, d->k_dim);
    int64_t o_row = ra__row_bytes(d->o_dtype, d->v_dim);
    ra__message_offsets part[2], grad[2];
    (void)ra__back_message(d, chunk, 0, part, grad);
    for (int32_t i = 0; i < chunk->segs; at += chunk->seg[i++].rows) {
        const ra__seg *s = &chunk->seg[i];
        float *stats = (float *)(void *)(message + part[0].pos) + at;
        ra__pack_rows(message + part[0].k + at * d->q_heads * q_row,
                      ra__view_at(r->work.q, chunk->sequence, 0, 0), s, d->q_heads, q_row);
        ra__pack_rows(message + part[0].v + at * d->q_heads * o_row,
                      ra__view_at(r->back.d_o, chunk->sequence, 0, 0), s, d->q_heads, o_row);
        for (int32_t h = 0; h < d->q_heads; h++, stats += rows) {
            ra__view lse = ra__view_at(r->work.lse, chunk->sequence, s->row, h);
            ra__source o = ra__source_of(ra__view_at(r->work.o, chunk->sequence, s->row, h),
                                         d->o_dtype, d->v_dim);
            ra__source g = ra__source_of(ra__view_at(r->back.d_o, chunk->sequence, s->row, h),
                                         d->o_dtype, d->v_dim);
            for (int64_t j = 0; j < s->rows; j++, lse.data += lse.token)
                memcpy(stats + j, lse.data, sizeof *stats);
            r->back.kernel->deltas(stats + d->q_heads * rows, &o, &g, (int32_t)s->rows);
        }
    }
    ra__fp_leave(mode);
}

/* Packs own chunk c, or its address, into a message: number `own` of those that leave. Backward its
 * gradients are there already. */
static void ra__ring_pack(const ra_ring *r, int64_t c, int64_t own, uint8_t *message) {
    const ra_plan *p = r->plan;
    const ra_desc *d = &p->d;
    const ra__chunk *chunk = &r->lists->chunk[c];
    ra__view k = ra__view_at(r->kv[0], chunk->sequence, 0, 0);
    ra__view v = ra__view_at(r->kv[1], chunk->sequence, 0, 0);
    const int32_t *pos = r->t.k_pos.array;
    ra__frame f = ra__ring_frame(r, ra__ring_kind(r), r->rank, c, ra__ring_length(r, c, 1));
    const int32_t *hops = r->lists->backward ? chunk->back_hops : chunk->hops;
    ra__message_offsets part[2], grad[2];
    memcpy(message, &f, sizeof f);
    if (pos) pos += chunk->sequence * r->t.k_pos.batch_step;
    if (r->shared) {
        ra__address a;
        memset(&a, 0, sizeof a);
        a.k = k.data; a.k_token = k.token; a.k_head = k.head;
        a.v = v.data; a.v_token = v.token; a.v_head = v.head;
        a.pos = pos;
        a.alive = (int64_t *)(uintptr_t)&r->alive;
        if (r->lists->backward) a.grad = ra__ring_grads(r, r->lists->returned[own].own);
        memcpy(message + RA__FRAME_BYTES, &a, sizeof a);
        return;
    }
    if (r->lists->backward) (void)ra__back_message(d, chunk, 1, part, grad);
    else (void)ra__message(d, chunk, 1, part);
    if (r->lists->backward && d->backward_travel == RA_TRAVEL_Q) return; /* packed at its start */
    for (int32_t i = 0; i < chunk->segs; i++) {
        const ra__seg *s = &chunk->seg[i];
        if (hops[i] < 1) continue;
        if (d->layout.kind == RA_LAYOUT_ARRAY)
            memcpy(message + part[i].pos, pos + s->row, (size_t)s->rows * 4);
        ra__pack_rows(message + part[i].k, k, s, d->kv_heads,
                      ra__row_bytes(d->k_dtype, d->k_dim));
        if (!d->v_in_k)
            ra__pack_rows(message + part[i].v, v, s, d->kv_heads,
                          ra__row_bytes(d->v_dtype, d->v_dim));
    }
}

/* -------------------------------------------------------------------------- communication */
static uint64_t ra__ring_tag(const ra_ring *r, int64_t number) {
    return r->tp.tag_bits >= 64 ? (uint64_t)number
                                : (uint64_t)number & (((uint64_t)1 << r->tp.tag_bits) - 1);
}

/* Posts the next message of a lane, of at most lane->bytes bytes at buf; returns its op. */
static ra_transport_op *ra__lane_post(ra_ring *r, int which, int32_t peer, int64_t number,
                                      void *buf, int64_t length) {
    ra__lane *lane = &r->lane[which];
    ra_transport_op *op = ra__lane_op(lane, lane->posted);
    memset(op, 0, sizeof *op);
    op->kind = which == RA__SENDS || which == RA__NOTICES_OUT ? RA_MSG_SEND : RA_MSG_RECV;
    op->channel = which >= RA__RETURNS;
    op->peer = peer;
    op->tag = ra__ring_tag(r, number);
    op->buf = buf;
    op->len = (size_t)length;
    op->mr = r->mr;
    if (lane->ns) lane->ns[lane->posted % lane->slots] = ra__ring_now(r);
    lane->posted++;
    r->moves++;
    return op;
}

/* A lane has a message to post and room for it. freed: messages whose slots are free again; most:
 * ops that may be pending. */
static int ra__lane_open(const ra__lane *lane, int64_t freed, int64_t most) {
    return lane->posted < lane->total && lane->posted - freed < lane->slots &&
           lane->posted - lane->done < most;
}

/* Receive i, which has come, is folded by all tasks and sent on. */
static int ra__ring_recv_slot_free(const ra_ring *r, int64_t i) {
    int32_t fold = r->lists->recv[i].fold, send = r->lists->recv[i].send;
    return (fold < 0 || fold < ra__load_i64(&r->folded)) &&
           (send < 0 || send < r->lane[RA__SENDS].done);
}

/* Frees the buffers of receives that are no longer needed, in order, and releases lent memory. */
static void ra__ring_release(ra_ring *r) {
    const ra__lane *lane = &r->lane[RA__RECEIVES];
    while (r->released < lane->done && ra__ring_recv_slot_free(r, r->released)) {
        ra_transport_op *op = ra__lane_op(lane, r->released);
        void *own = ra__lane_buf(lane, r->released);
        if (op->buf != own && (r->tp.caps & RA_CAP_LOAN)) (void)r->tp.release(r->tp.ctx, op);
        op->buf = own;
        r->released++;
    }
}

/* Ops that may be pending for returned gradients, and between neighbours: those that notices may
 * need are kept free. */
static int64_t ra__ring_return_ops(const ra_ring *r) {
    int64_t all = (int64_t)r->tp.max_ops - (r->shared ? 2 * ((int64_t)r->ranks - 1) : 0);
    return r->lists->backward ? ra__max(1, all / 4) : 0;
}
static int64_t ra__ring_ops(const ra_ring *r) {
    return (int64_t)r->tp.max_ops - (r->shared ? 2 * ((int64_t)r->ranks - 1) : 0) -
           ra__ring_return_ops(r);
}

/* Posts receives that have a free buffer. */
static void ra__ring_more_receives(ra_ring *r) {
    const ra__lane *lane = &r->lane[RA__RECEIVES];
    int64_t most = ra__max(1, ra__ring_ops(r) / 2);
    while (ra__lane_open(lane, r->released, most)) {
        int32_t c = r->lists->recv[lane->posted].chunk;
        ra_transport_op *op = ra__lane_post(r, RA__RECEIVES, ra__ring_peer(r, -1), c,
                                            ra__lane_buf(lane, lane->posted),
                                            ra__ring_length(r, c, ra__ring_hop(r, c)));
        if ((r->tp.caps & RA_CAP_LOAN) && !r->lists->backward) op->flags = RA_MSG_LOAN_OK;
    }
}

/* Send i may be posted: its chunk has come and, backward, is folded; an own one has a buffer. */
static int ra__ring_may_send(const ra_ring *r, int64_t i) {
    int32_t recv = r->lists->send[i].recv, fold = r->lists->send[i].fold;
    if (fold >= 0 && fold >= ra__load_i64(&r->folded)) return 0;
    return recv >= 0 ? recv < r->lane[RA__RECEIVES].done
                     : r->own_posted - r->own_sent < r->pack_slots;
}

/* Posts sends that may go, in order; packs own chunks. */
static void ra__ring_more_sends(ra_ring *r) {
    const ra__pass_lists *lists = r->lists;
    const ra__lane *lane = &r->lane[RA__SENDS];
    int64_t most = ra__max(1, ra__ring_ops(r) - ra__ring_ops(r) / 2);
    while (ra__lane_open(lane, lane->done, most) && ra__ring_may_send(r, lane->posted)) {
        int32_t c = lists->send[lane->posted].chunk, recv = lists->send[lane->posted].recv;
        int32_t to = ra__ring_peer(r, 1), hop = 1 + ra__ring_hop(r, c);
        uint8_t *buf = recv >= 0 ? (uint8_t *)ra__lane_op(&r->lane[RA__RECEIVES], recv)->buf
                                 : ra__ring_packed(r, r->own_posted);
        ra_transport_op *op;
        if (lists->backward) to = ra__back_to(r->plan, &lists->chunk[c], r->rank, &hop);
        if (recv < 0) ra__ring_pack(r, c, r->own_posted++, buf);
        op = ra__lane_post(r, RA__SENDS, to, c, buf, ra__ring_length(r, c, hop));
        op->channel = lists->backward && hop == r->ranks;
        if (buf < r->base || buf >= r->base + r->bytes) op->mr = NULL; /* lent, not in reg */
    }
}

/* Backward: posts receives of the gradients of own chunks, from the last rank that had each. */
static void ra__ring_more_returns(ra_ring *r) {
    const ra__pass_lists *lists = r->lists;
    const ra__lane *lane = &r->lane[RA__RETURNS];
    while (r->returns_folded < lane->done &&
           lists->returned[r->returns_folded].fold < ra__load_i64(&r->folded))
        ra__store_i64(&r->returns_folded, r->returns_folded + 1);
    while (ra__lane_open(lane, r->returns_folded, ra__ring_return_ops(r))) {
        int32_t c = lists->returned[lane->posted].chunk;
        (void)ra__lane_post(r, RA__RETURNS,
                            ra__ring_peer(r, ra__back_stations(r->plan, &lists->chunk[c])), c,
                            ra__lane_buf(lane, lane->posted), ra__ring_length(r, c, r->ranks));
    }
}

/* Posts the receives of all notices at once, and the notice to each owner when its keys are no
 * longer read here. */
static void ra__ring_more_notices(ra_ring *r) {
    const ra_plan *p = r->plan;
    const ra__lane *in = &r->lane[RA__NOTICES_IN], *out = &r->lane[RA__NOTICES_OUT];
    while (in->posted < in->total)
        (void)ra__lane_post(r, RA__NOTICES_IN, p->readers[in->posted], r->pass,
                            ra__lane_buf(in, in->posted), RA__FRAME_BYTES);
    while (out->posted < out->total && ra__load_i64(&r->folded) >= p->source[out->posted].end) {
        int32_t owner = p->source[out->posted].rank;
        uint8_t *buf = ra__lane_buf(out, out->posted);
        ra__frame f = ra__ring_frame(r, RA__FRAME_DONE, owner, -1, RA__FRAME_BYTES);
        memcpy(buf, &f, sizeof f);
        r->owner_alive[out->posted] = NULL;
        (void)ra__lane_post(r, RA__NOTICES_OUT, owner, r->pass, buf, RA__FRAME_BYTES);
    }
}

/* Lists ops that have been posted and not taken, lane by lane, each in order. */
static int ra__ring_list(const ra_ring *r) {
    int n = 0;
    for (int32_t k = 0; k < RA__LANES; k++)
        for (int64_t i = r->lane[k].done; i < r->lane[k].posted; i++)
            r->list[n++] = ra__lane_op(&r->lane[k], i);
    return n;
}

/* Upper bounds for one rank in a pass. seen: tiles that are not empty, from the spans of positions
 * that its query blocks see; all: tiles of all its query blocks with all keys. */
typedef struct ra__load { int64_t seen, all; } ra__load;

/* Most blocks of keys of a sequence on all ranks: each piece of the layout has a short one. */
static int64_t ra__load_keys(const ra_plan *p, int32_t b) {
    int64_t n = 2 * (int64_t)p->d.ranks;
    int loose = p->d.layout.kind == RA_LAYOUT_ARRAY || p->d.layout.kind == RA_LAYOUT_RUNS;
    for (int32_t r = 0; loose && r < p->d.ranks; r++) {
        ra__side side = ra__plan_side(p, 1, r);
        n += side.list.count + side.array_rows / RA_BLOCK_TOKENS;
    }
    return p->d.layout.kind == RA_LAYOUT_ARRAY
               ? n : n + ra__ceil_div(ra__k_len(&p->d, b), RA_BLOCK_TOKENS);
}

/* keys: blocks of keys of the sequence on all ranks. loose: how many of them may be only partly in
 * a span. */
static void ra__load_block(const ra_plan *p, int32_t b, const ra__seg *rows, int64_t keys,
                           ra__load *n) {
    int64_t loose = p->d.layout.kind == RA_LAYOUT_STRIPED ? p->d.ranks : 1, seen = 0;
    ra__bounds x = ra__seg_bounds(&p->d.mask, ra__key_end(&p->d, b, 0), rows);
    if (x.lo_min < x.hi_max)
        seen += ra__ceil_div((int64_t)x.hi_max - x.lo_min, RA_BLOCK_TOKENS) + loose;
    if (x.doc_min < x.keep_max)
        seen += ra__ceil_div((int64_t)x.keep_max - x.doc_min, RA_BLOCK_TOKENS) + loose;
    n->seen += ra__min(seen, keys);
}

static void ra__load_rank(const ra_plan *p, int32_t rank, int32_t b, int64_t keys, ra__load *n) {
    ra__side side = ra__plan_side(p, 0, rank);
    ra__seg s;
    for (int64_t i = 0; ra__side_seg(&side, b, ra__q_len(&p->d, b), i, &s); i++) {
        int64_t blocks = ra__ceil_div(s.rows, RA_BLOCK_TOKENS);
        n->all += blocks * keys;
        if (p->d.layout.kind == RA_LAYOUT_ARRAY) n->seen += blocks * keys;
        for (int64_t k = 0; k < blocks && p->d.layout.kind != RA_LAYOUT_ARRAY; k++) {
            ra__seg rows = ra__seg_block(&s, k);
            ra__load_block(p, b, &rows, keys, n);
        }
    }
}

/* An upper bound on the tiles that are not empty on any one rank. Under RA_TRAVEL_Q a rank computes
 * what all queries see of its keys: at most what is seen on all ranks together, and at most all
 * tiles of one rank. */
static int64_t ra__load_most(const ra_plan *p, int backward) {
    ra__load most = { 0, 0 };
    int64_t total = 0, tiles;
    for (int32_t r = 0; r < p->d.ranks; r++) {
        ra__load n = { 0, 0 };
        for (int32_t b = 0; b < p->d.sequences; b++)
            ra__load_rank(p, r, b, ra__load_keys(p, b), &n);
        most.seen = ra__max(most.seen, n.seen);
        most.all = ra__max(most.all, n.all);
        total += n.seen;
    }
    tiles = backward && p->d.backward_travel == RA_TRAVEL_Q ? ra__min(total, most.all) : most.seen;
    return ra__mul(tiles, p->d.q_heads, &tiles) ? tiles : INT64_MAX;
}

/* How long nothing may move while this rank waits: 60 s plus the time that a healthy neighbour may
 * compute, which is the most that any rank computes in a pass, at the speed of the threads here.
 * A slow last rank can hold up the first ones that long, which is not a failure. */
static int64_t ra__ring_patience(ra_ring *r) {
    const ra_desc *d = &r->plan->d;
    const ra_ring_counters *c = &r->counters;
    int64_t done = ra__load_i64(&c->tiles_partial) + ra__load_i64(&c->tiles_full), ns;
    if (r->rd.watchdog_ns) return r->rd.watchdog_ns;
    if (!ra__load_i64(&r->most_tiles))
        ra__store_i64(&r->most_tiles, ra__max(1, ra__load_most(r->plan, r->lists->backward)));
    ns = (int64_t)400 * (d->k_dim + d->v_dim);         /* a tile at 20 GFLOP/s */
    if (r->lists->backward) ns *= 3;
    if (done) ns = ra__load_i64(&c->compute_ns) / done;
    if (!ra__mul(ra__load_i64(&r->most_tiles), ns, &ns)) return INT64_MAX;
    return ra__time_add(RA__QUIET_NS, ns / d->threads);
}

/* This rank has computed as much as it should have by the time of an exchange. Tiles tell how far
 * it is within a chunk; chunks of which everything is folded also count if the plan's figure of
 * tiles is too high, as with positions that it does not know. */
static int ra__exchange_due(ra_ring *r, const ra__exchange *x) {
    const ra_ring_counters *c = &r->counters;
    return ra__load_i64(&c->tiles_partial) + ra__load_i64(&c->tiles_full) >= x->after_tiles ||
           ra__load_i64(&r->folded) >= x->after_folds;
}

/* Transports with sendrecv only: the next exchange, if both its halves have been posted and it is
 * due. */
static ra_status ra__ring_exchange(ra_ring *r) {
    const ra__pass_lists *lists = r->lists;
    while (r->exchanged < lists->exchanges) {
        const ra__exchange *x = &lists->exchange[r->exchanged];
        ra_transport_op *in = NULL, *out = NULL;
        int64_t patience = ra__ring_patience(r), left = ra__ring_left(r, r->deadline, patience);
        int code;
        if (x->recv >= r->lane[RA__RECEIVES].posted || x->send >= r->lane[RA__SENDS].posted ||
            x->returned >= r->lane[RA__RETURNS].posted || !ra__exchange_due(r, x))
            return RA_OK;
        if (x->recv >= 0) in = ra__lane_op(&r->lane[RA__RECEIVES], x->recv);
        if (x->returned >= 0) in = ra__lane_op(&r->lane[RA__RETURNS], x->returned);
        if (x->send >= 0) out = ra__lane_op(&r->lane[RA__SENDS], x->send);
        code = r->tp.sendrecv(r->tp.ctx, out ? out->peer : RA_NO_PEER, out ? out->buf : NULL,
                              out ? out->len : 0, in ? in->peer : RA_NO_PEER,
                              in ? in->buf : NULL, in ? in->len : 0, ra__ring_tag(r, x->step),
                              ra__ring_until(left));
        if (code == RA_E_TIMEOUT && left == patience) code = RA_E_PEER; /* the watchdog's time */
        if (code)
            return ra__ring_fail(r, ra__ring_code(code),
                                 ra__blame_of(in ? in->peer : out->peer, !in, code,
                                              x->send >= 0 ? lists->send[x->send].chunk :
                                              x->recv >= 0 ? lists->recv[x->recv].chunk
                                                           : lists->returned[x->returned].chunk));
        if (in) in->state = RA_MSG_DONE;
        if (out) out->state = RA_MSG_DONE;
        r->exchanged++;
        return RA_OK;                  /* one at a time: the next may send on what came in this */
    }
    return RA_OK;
}

/* Posts what is idle and polls. */
static ra_status ra__ring_drive(ra_ring *r) {
    int n = ra__ring_list(r), idle = 0, code = RA_OK;
    if (!r->tp.post) return ra__ring_exchange(r);
    for (int i = 0; i < n; i++) idle |= r->list[i]->state == RA_MSG_IDLE;
    if (idle) code = r->tp.post(r->tp.ctx, r->list, n);
    if (code >= 0) code = r->tp.poll(r->tp.ctx, r->list, n);
    if (code < 0) return ra__ring_fail(r, ra__ring_code(code), ra__blame_of(-1, -1, code, -1));
    return RA_OK;
}

/* The frame of the next message of a lane that receives: of chunk c or, if c is -1, of a notice. */
static ra__frame ra__ring_due(const ra_ring *r, int64_t c) {
    if (c < 0) return ra__ring_frame(r, RA__FRAME_DONE, r->rank, -1, RA__FRAME_BYTES);
    return ra__ring_frame(r, ra__ring_kind(r), r->lists->chunk[c].owner, c,
                          ra__ring_length(r, c, 1));
}

/* A message has another length, says `done` or the transport. If its frame has come and is of this
 * pass, it tells what the ranks disagree about. */
static int ra__ring_fail_length(ra_ring *r, const ra_transport_op *op, int64_t chunk) {
    const int sending = op->kind == RA_MSG_SEND;
    ra__blame why = ra__blame_of(op->peer, sending, op->state < 0 ? op->state : 0, chunk);
    if (op->state > 0) why.moved = (int64_t)op->done;
    if (!sending && op->done >= RA__FRAME_BYTES) {
        ra__frame due = ra__ring_due(r, chunk), came;
        memcpy(&came, op->buf, sizeof came);
        if (came.pass == due.pass &&
            ra__frame_check(op->buf, &due, &r->differ) == RA_E_MISMATCH)
            return ra__ring_fail(r, RA_E_MISMATCH, why);
    }
    return ra__ring_fail(r, RA_E_TRUNC, why);
}

/* Looks at one op; 1 done, 0 not yet, negative: the pass has failed. */
static int ra__ring_op_done(ra_ring *r, const ra_transport_op *op, int64_t chunk) {
    int sending = op->kind == RA_MSG_SEND;
    if (op->state == RA_E_TRUNC) return ra__ring_fail_length(r, op, chunk);
    if (op->state < 0 || op->state > RA_MSG_DONE)
        return ra__ring_fail(r, ra__ring_code(op->state),
                             ra__blame_of(op->peer, sending, op->state, chunk));
    if (op->state != RA_MSG_DONE) return 0;
    if (op->done && op->done != op->len)
        return ra__ring_fail_length(r, op, chunk);
    return 1;
}

static void ra__ring_trace_op(const ra_ring *r, int32_t kind, const ra_transport_op *op, int64_t c,
                              int64_t begin_ns) {
    ra_event e = ra__event_none();
    if (!r->rd.trace) return;
    e.peer = op->peer;
    e.chunk = c;
    e.origin = r->lists->chunk[c].owner;
    e.sequence = r->lists->chunk[c].sequence;
    e.begin_ns = begin_ns;
    e.bytes = (int64_t)op->len;
    ra__ring_event(r, kind, -1, &e);
}

/* Looks at the next message of a lane, which is chunk c or, if c is -1, a notice: 1 done and as it
 * should be, 0 not yet, negative: the pass has failed. */
static int ra__lane_look(ra_ring *r, const ra__lane *lane, int64_t c) {
    const ra_transport_op *op;
    int done, sending;
    if (lane->done == lane->posted) return 0;
    op = ra__lane_op(lane, lane->done);
    if ((done = ra__ring_op_done(r, op, c)) <= 0) return done;
    sending = op->kind == RA_MSG_SEND;
    if (!sending) {
        ra__frame due = ra__ring_due(r, c);
        ra_status s = ra__ring_check(r, op, &due, c);
        if (s) return s;
    }
    if (c >= 0) {
        (void)ra__add_i64(sending ? &r->counters.chunks_out : &r->counters.chunks_in, 1);
        ra__ring_trace_op(r, sending ? RA_EV_SEND : RA_EV_RECV, op, c,
                          lane->ns ? lane->ns[lane->done % lane->slots] : r->begin_ns);
    }
    (void)ra__add_i64(sending ? &r->counters.bytes_out : &r->counters.bytes_in, (int64_t)op->len);
    return 1;
}

/* The next message of a lane has been taken: other threads may use what came. */
static void ra__lane_next(ra_ring *r, ra__lane *lane) {
    ra__store_i64(&lane->done, lane->done + 1);
    r->moves++;
}

/* Shared memory: notes where an owner listens for signs of life, for as long as it is read here. */
static void ra__ring_listen(ra_ring *r, const ra_transport_op *op, int32_t owner) {
    const ra__lane *out = &r->lane[RA__NOTICES_OUT];
    ra__address a;
    memcpy(&a, (const uint8_t *)op->buf + RA__FRAME_BYTES, sizeof a);
    for (int64_t i = out->posted; i < out->total; i++)
        if (r->plan->source[i].rank == owner) r->owner_alive[i] = a.alive;
}

/* Takes chunks that came from the neighbour. 0, or the failure of the pass; as the others below. */
static int ra__ring_take_receives(ra_ring *r) {
    ra__lane *lane = &r->lane[RA__RECEIVES];
    for (;;) {
        int64_t c = lane->done < lane->total ? r->lists->recv[lane->done].chunk : -1;
        int done = ra__lane_look(r, lane, c);
        if (done <= 0) return done;
        if (r->notices)
            ra__ring_listen(r, ra__lane_op(lane, lane->done), r->lists->chunk[c].owner);
        ra__lane_next(r, lane);
        if (lane->done == lane->total) ra__store_i32(&r->counters.waiting_peer, -1);
    }
}

/* Views of a chunk's gradients of one kv head, first row of each segment. */
static void ra__ring_grad_views(const ra_desc *d, const ra__chunk *c, const uint8_t *base,
                                int32_t kv_head, ra__grads *g) {
    ra__message_offsets part[2];
    (void)ra__grad_parts(d, c, 0, part);
    for (int32_t i = 0; i < c->segs; i++) {
        ra__view k = ra__view_packed(base + part[i].k, d->kv_heads, d->k_dim, RA_F32);
        ra__view v = ra__view_packed(base + part[i].v, d->kv_heads, d->v_dim, RA_F32);
        g->dk[i] = ra__view_at(k, 0, 0, kv_head);
        g->dv[i] = ra__view_at(v, 0, 0, kv_head);
        if (!d->v_in_k) continue;
        g->dv[i] = g->dk[i];
        g->dv[i].data += (int64_t)d->v_column * 4;
    }
}

/* RA_TRAVEL_Q: writes dQ of blocks [from, to) of an own chunk, of the heads of one kv head, from
 * packed sums. */
static void ra__ring_hand_over_q(const ra_ring *r, const ra__chunk *c, int32_t kv_head,
                                 int64_t from, int64_t to, const uint8_t *sums) {
    const ra_desc *d = &r->plan->d;
    int32_t group = d->q_heads / d->kv_heads, which;
    ra__view packed = ra__view_packed(sums, d->q_heads, d->k_dim, RA_F32);
    uint32_t mode = ra__fp_enter();
    for (int64_t i = from; i < to && r->back.d_q.data; i++) {
        ra__seg s = ra__chunk_block(c, RA_ORDER_ASCENDING, i, &which);
        int64_t row = s.row - c->seg[which].row + (which ? c->seg[0].rows : 0);
        for (int64_t j = 0; j < s.rows; j++)
            for (int32_t h = kv_head * group; h < (kv_head + 1) * group; h++) {
                ra__view q = ra__view_at(r->back.d_q, c->sequence, s.row + j, h);
                ra__view x = ra__view_at(packed, 0, row + j, h);
                r->back.kernel->put_grad((void *)(uintptr_t)q.data,
                                         (const float *)(const void *)x.data, d->grad_dtype,
                                         d->k_dim);
            }
    }
    ra__fp_leave(mode);
}

/* Adds the i-th returned gradients, of all heads, to the caller's. */
static void ra__ring_return_over(const ra_ring *r, int64_t i) {
    const ra_desc *d = &r->plan->d;
    const ra__chunk *c = &r->lists->chunk[r->lists->returned[i].chunk];
    const uint8_t *sums = ra__ring_message_grads(r, ra__lane_buf(&r->lane[RA__RETURNS], i));
    ra__grads g;
    for (int32_t h = 0; h < d->kv_heads; h++) {
        if (d->backward_travel == RA_TRAVEL_Q) {
            ra__ring_hand_over_q(r, c, h, 0, ra__chunk_blocks(c), sums);
            continue;
        }
        ra__ring_grad_views(d, c, sums, h, &g);
        ra__grads_finish(&r->back, c, h, r->d_kv, &g);
    }
}

/* Backward: takes returned gradients; adds them to the caller's if nothing is left to fold. */
static int ra__ring_take_returns(ra_ring *r) {
    const ra__pass_lists *lists = r->lists;
    ra__lane *lane = &r->lane[RA__RETURNS];
    for (;;) {
        int64_t i = lane->done, c = i < lane->total ? lists->returned[i].chunk : -1;
        int done = ra__lane_look(r, lane, c);
        if (done <= 0) return done;
        if (lists->returned[i].fold < 0) ra__ring_return_over(r, i);
        else if (r->plan->d.backward_travel == RA_TRAVEL_Q && !r->shared)
            ra__ring_pack_q(r, &lists->chunk[c], ra__lane_buf(lane, i));
        ra__lane_next(r, lane);
    }
}

static int ra__ring_take_sends(ra_ring *r) {
    ra__lane *lane = &r->lane[RA__SENDS];
    for (;;) {
        int64_t c = lane->done < lane->total ? r->lists->send[lane->done].chunk : -1;
        int done = ra__lane_look(r, lane, c);
        if (done <= 0) return done;
        if (r->lists->send[lane->done].recv < 0) ra__store_i64(&r->own_sent, r->own_sent + 1);
        ra__lane_next(r, lane);
    }
}

/* Takes notices. One that fails is seen at once, whichever others are still to come. */
static int ra__ring_take_notices(ra_ring *r) {
    for (int32_t k = RA__NOTICES_IN; k <= RA__NOTICES_OUT; k++) {
        ra__lane *lane = &r->lane[k];
        int done;
        while ((done = ra__lane_look(r, lane, -1)) > 0) ra__lane_next(r, lane);
        for (int64_t i = lane->done; i < lane->posted && done >= 0; i++)
            if (ra__lane_op(lane, i)->state < 0)
                done = ra__ring_op_done(r, ra__lane_op(lane, i), -1);
        if (done < 0) return done;
    }
    return 0;
}

/* Shows the owners whose keys are read here that this rank computes, and looks for the same from
 * the readers of its own keys. A pass may end long after this rank has finished its own work; that
 * is progress. */
static void ra__ring_pulse(ra_ring *r) {
    int64_t computed = ra__load_i64(&r->computed), alive = ra__load_i64(&r->alive);
    if (computed != r->computed_seen)
        for (int32_t i = 0; i < r->lane[RA__NOTICES_OUT].total; i++)
            if (r->owner_alive[i]) (void)ra__add_i64(r->owner_alive[i], 1);
    if (alive != r->alive_seen) ra__store_i64(&r->progress_ns, ra__ring_now(r));
    r->computed_seen = computed;
    r->alive_seen = alive;
}

/* A round of communication, under `comm`: > 0 something moved, 0 nothing, < 0 failed. */
static int ra__ring_comm(ra_ring *r) {
    int64_t before = r->moves;
    ra_status s;
    ra__ring_agree(r);
    ra__ring_release(r);
    if (r->notices) ra__ring_pulse(r);
    ra__ring_more_receives(r);
    ra__ring_more_returns(r);
    ra__ring_more_sends(r);
    ra__ring_more_notices(r);
    s = ra__ring_drive(r);
    if (!s) s = ra__ring_take_receives(r);
    if (!s) s = ra__ring_take_returns(r);
    if (!s) s = ra__ring_take_sends(r);
    if (!s) s = ra__ring_take_notices(r);
    if (s) return s;
    ra__ring_release(r);
    if (r->moves == before) return 0;
    ra__ring_note_progress(r);
    return 1;
}

/* Nothing of this pass is left to move. Under `comm`. */
static int ra__ring_all_messages_done(const ra_ring *r) {
    for (int32_t k = 0; k < RA__LANES; k++)
        if (r->lane[k].done < r->lane[k].total) return 0;
    return r->released == r->lane[RA__RECEIVES].total &&
           r->returns_folded == r->lane[RA__RETURNS].total;
}

/* -------------------------------------------------------------------------- compute */
/* Updates how many entries all tasks have folded: no task has an earlier one in hand or will take
 * one. Under `sched`. */
static void ra__ring_advance(ra_ring *r) {
    int64_t f = r->claim_fold;
    for (int32_t i = 0; i < r->plan->d.threads; i++)
        f = ra__min(f, ra__load_i64(&r->desk[i].fold));
    if (f > r->folded) ra__store_i64(&r->folded, f);
}

/* Backward: an own chunk may start, because there is a buffer for its gradient. */
static int ra__ring_grad_slot_free(const ra_ring *r, int64_t own) {
    const ra__pass_lists *lists = r->lists;
    int64_t returned = lists->own[own].returned, before = own - r->grad_slots;
    if (returned >= 0 && !r->shared)
        return returned - ra__load_i64(&r->own_sent) < r->pack_slots;
    if (before < 0) return 1;
    returned = lists->own[before].returned;
    if (r->shared && returned >= 0) return returned < ra__load_i64(&r->returns_folded);
    return lists->own[before].fold < ra__load_i64(&r->folded);
}

/* Everything that entry f of the fold list needs has come. */
static int ra__ring_inputs_ready(const ra_ring *r, int64_t f) {
    const ra__fold *at = &r->lists->fold[f];
    if (at->recv >= 0) return at->recv < ra__load_i64(&r->lane[RA__RECEIVES].done);
    if (at->own < 0) return 1;
    if (at->phase != RA__BEFORE) return ra__ring_grad_slot_free(r, at->own);
    return r->lists->own[at->own].returned < ra__load_i64(&r->lane[RA__RETURNS].done);
}

/* RA_TRAVEL_Q: entry f starts an own chunk of queries, which must be packed before it is folded. */
static int ra__ring_packs(const ra_ring *r, int64_t f) {
    const ra__fold *at = &r->lists->fold[f];
    return at->own >= 0 && at->phase != RA__BEFORE && r->plan->d.backward_travel == RA_TRAVEL_Q;
}

/* The most work that one step does. */
static int64_t ra__step_work(const ra_desc *d, int32_t backward) {
    int64_t dims = backward ? 3 * (int64_t)d->k_dim + 2 * d->v_dim : (int64_t)d->k_dim + d->v_dim;
    return ra__max(1, RA__STEP_WORK / (RA_BLOCK_TOKENS * RA_BLOCK_TOKENS * dims)) * RA__TILE_WORK;
}

/* Claims the next task if its chunk has come and the task has folded the chunk before. Skips tasks
 * that have folded it already, together with an earlier one, or see none of it. Under `sched`. */
static int ra__ring_claim(ra_ring *r, ra__desk *desk) {
    ra__ring_advance(r);
    for (;;) {
        int64_t f = r->claim_fold;
        int32_t b, before, next;
        if (f >= r->lists->folds || !ra__ring_inputs_ready(r, f)) return 0;
        desk->claim.fold = f;
        if (ra__ring_packs(r, f) && ra__load_i64(&r->packed) <= f) {
            if (r->packing > f) return 0;
            r->packing = f + 1;
            desk->claim.task = -1;
            return 1;
        }
        b = r->lists->fold[f].sequence;
        desk->claim.task = r->task_begin[b] + r->claim_task;
        before = r->lists->fold[f].index;
        next = ra__load_i32(&r->turn[desk->claim.task].next);
        if (next < before) return 0;
        if (next == before) {
            desk->open = 0;
            ra__store_i64(&desk->fold, f);
        }
        if (++r->claim_task == r->task_begin[b + 1] - r->task_begin[b]) {
            r->claim_task = 0;
            r->claim_fold++;
        }
        if (next == before) return 1;
    }
}

static void ra__ring_count(ra_ring *r, const ra__tally *n, int64_t ns) {
    (void)ra__add_i64(&r->counters.tiles_empty, n->empty);
    (void)ra__add_i64(&r->counters.tiles_partial, n->partial);
    (void)ra__add_i64(&r->counters.tiles_full, n->full);
    (void)ra__add_i64(&r->counters.compute_ns, ns);
}

/* Calls the progress callback, one thread at a time: a thread that finds another one inside leaves
 * a mark, and that one calls again. */
static void ra__ring_progress(ra_ring *r) {
    const ra_ring_counters *c = &r->counters;
    if (!r->rd.progress || ra__add_i32(&r->progress, 1)) return;
    do {
        ra__store_i32(&r->progress, 1);
        r->rd.progress(r->rd.progress_ctx,
                       ra__load_i64(&c->tiles_partial) + ra__load_i64(&c->tiles_full),
                       ra__load_i64(&c->tiles_all));
    } while (!ra__cas_i32(&r->progress, 1, 0));
}

/* Accounts for entry f of the fold list, folded by one task. */
static void ra__ring_folded(ra_ring *r, int64_t f, const ra__tally *n, ra_event *e) {
    const ra__chunk *chunk = ra__entry_chunk(r, f);
    e->chunk = chunk ? r->lists->fold[f].chunk : -1;
    e->origin = chunk ? chunk->owner : -1;
    e->tiles = n->partial + n->full;
    ra__ring_count(r, n, ra__time_since(ra__ring_now(r), e->begin_ns));
    ra__ring_event(r, RA_EV_TILE, e->thread, e);
    e->begin_ns = ra__ring_now(r);
}

/* The first entry from f on of a task's sequence that any of its rows may see; RA__NO_FOLD: none.
 * Counts the tiles of the entries that it skips. */
static int64_t ra__fold_next(const ra_ring *r, const ra__fold_hand *h, int64_t f, ra__tally *n) {
    for (;; f++) {
        const ra__chunk *c = ra__entry_chunk(r, f);
        if (c && (r->work.any_position || ra__chunk_seen(c, &h->seen))) return f;
        if (c) n->empty += h->t.count * ra__chunk_blocks(c);
        if (r->lists->fold[f].last) return RA__NO_FOLD;
    }
}

/* Sets the geometry and the first chunk of a claimed task. */
static void ra__fold_open(const ra_ring *r, ra__desk *desk, uint8_t *memory, ra__tally *n) {
    const ra_plan *p = r->plan;
    const int32_t b = r->lists->fold[desk->claim.fold].sequence;
    ra__fold_hand *h = &desk->hand.fold;
    ra__side side = r->work.q_side;
    ra__arena a = { NULL, 0 };
    a.base = memory;
    ra__scratch_carve(&a, &p->d, p->sizes.panels, &h->x);
    h->t = ra__task_of(&p->d, b, ra__side_blocks(&side, b, ra__q_len(&p->d, b)), p->sizes.panels,
                       desk->claim.task - p->task_begin[b]);
    ra__task_rows(&r->work, &h->t, &h->x);
    h->seen = ra__bounds_none();
    for (int32_t i = 0; i < h->t.count; i++) ra__bounds_join(&h->seen, &h->x.bounds[i]);
    h->next = ra__fold_next(r, h, desk->claim.fold, n);
    h->loaded = 0;
    h->received = -1;
    desk->open = 1;
}

/* Loads the queries and the running state of a task into its scratch. */
static void ra__fold_load(const ra_ring *r, const ra__desk *desk, ra__fold_hand *h) {
    if (!h->loaded)
        ra__task_data(&r->work, &h->t, &h->x, !r->turn[desk->claim.task].begun);
    h->loaded = 1;
}

/* Continues the chunk in hand; 1: it is folded, and the next one is known. */
static int ra__fold_chunk(ra_ring *r, ra__desk *desk, ra__tally *n, ra_event *e) {
    ra__fold_hand *h = &desk->hand.fold;
    const int64_t f = h->next;
    int done;
    ra__fold_load(r, desk, h);
    if (h->x.block == 0) (void)ra__ring_item(r, f, &h->item);
    h->received = r->lists->fold[f].recv;
    done = ra__task_some(&r->work, &h->t, &h->item, &h->x, n);
    if (done) {
        h->x.block = 0;
        h->next = r->lists->fold[f].last ? RA__NO_FOLD : ra__fold_next(r, h, f + 1, n);
        if (h->next != RA__NO_FOLD) ra__store_i64(&desk->fold, h->next);
    }
    ra__ring_folded(r, f, n, e);
    memset(n, 0, sizeof *n);
    return done;
}

/* A task may fold its next entry. With a transport that has only sendrecv it does not go past an
 * entry that has not come: buffers are free only when every task is done with them, and a peer may
 * be waiting for that. */
static int ra__fold_goes_on(const ra_ring *r, int64_t from, int64_t next) {
    if (next == RA__NO_FOLD || !ra__ring_inputs_ready(r, next)) return 0;
    if (!r->has_transport || r->tp.post) return 1;
    while (from < next && ra__ring_inputs_ready(r, from)) from++;
    return from == next;
}

/* Received chunks keep their buffers until tasks that fold them are stored. So that others can come
 * meanwhile, all tasks also store each time as many have been received as make half of the buffers,
 * unless that is so few keys that storing would cost too much, and before own chunks. Shared chunks
 * need no buffers, and during a sendrecv nothing is computed anyway. */
enum { RA__GROUP_LEAST = 1024 };
static int ra__fold_joins(const ra_ring *r, const ra__fold_hand *h) {
    const ra_desc *d = &r->plan->d;
    const int32_t recv = r->lists->fold[h->next].recv;
    const int32_t most = (int32_t)ra__max(1, ra__max(d->buffers / 2,
                                                     RA__GROUP_LEAST / d->chunk_tokens));
    if (h->x.block > 0) return 1;
    if (h->x.folded * RA_BLOCK_TOKENS >= RA__GROUP_KEYS) return 0;
    if (h->received < 0 || r->shared || !r->tp.post) return 1;
    return recv >= 0 && recv / most == h->received / most;
}

/* Continues a task: the claimed chunk, then later ones that it sees and that have come, until
 * RA__GROUP_KEYS keys are folded or buffers should be released. The running sums stay in the
 * scratch until then. 1: the task is stored and may be claimed again.
 * PERF: at 16K tokens, 4 ranks, D 64/96, storing to O after every 256 keys costs 30 %. */
static int ra__ring_fold(ra_ring *r, ra__desk *desk, ra_event *e, uint8_t *memory) {
    ra__fold_hand *h = &desk->hand.fold;
    ra__turn *turn = &r->turn[desk->claim.task];
    ra__tally n = { 0, 0, 0 };
    uint32_t mode = ra__fp_enter();
    int more = 1;
    if (!desk->open) ra__fold_open(r, desk, memory, &n);
    h->x.left = r->step_work;
    e->q_row = h->x.seg[0].row;
    e->q_rows = h->x.seg[h->t.count - 1].row + h->x.seg[h->t.count - 1].rows - e->q_row;
    e->head = h->x.head[0];
    while (more && ra__fold_goes_on(r, desk->claim.fold, h->next) && ra__fold_joins(r, h))
        more = h->x.left > 0 && ra__fold_chunk(r, desk, &n, e);
    if (more) {
        if (h->next == RA__NO_FOLD) ra__fold_load(r, desk, h);
        if (n.empty) ra__ring_folded(r, desk->claim.fold, &n, e);
        if (h->loaded) ra__task_save(&r->work, &h->t, &h->x, h->next == RA__NO_FOLD);
        turn->begun |= h->loaded;
        ra__store_i32(&turn->next, h->next == RA__NO_FOLD ? INT32_MAX
                                                          : r->lists->fold[h->next].index);
    }
    ra__fp_leave(mode);
    return more;
}

/* The same with a user-supplied kernel, one chunk; 0 or its error. */
static int ra__ring_engine(ra_ring *r, const ra__claim *claim, ra_event *e, uint8_t *memory) {
    const ra_plan *p = r->plan;
    ra__turn *turn = &r->turn[claim->task];
    ra__arena a = { NULL, 0 };
    ra__tally n = { 0, 0, 0 };
    ra__seg rows = { 0, 0, 0, 1 };
    ra__engine_scratch x;
    ra__item item;
    int64_t f = claim->fold;
    int any = ra__ring_item(r, f, &item), code = 0;
    int edge = (r->lists->fold[f].index == 0 ? RA__FIRST : 0) |
               (r->lists->fold[f].last ? RA__LAST : 0);
    a.base = memory;
    ra__engine_carve(&a, &p->d, p->d.chunk_tokens + 2 * RA_BLOCK_TOKENS, &x);
    x.thread = e->thread;
    if (ra__engine_task(&r->work, e->sequence, claim->task - p->task_begin[e->sequence], &rows))
        code = ra__engine_run(&r->work, e->sequence, &rows, any ? &item : NULL, edge, &x);
    if (any) ra__engine_tally(&r->work, e->sequence, &rows, &item, &n);
    e->q_row = rows.row;
    e->q_rows = rows.rows;
    if (!code) ra__ring_folded(r, f, &n, e);
    ra__store_i32(&turn->next, r->lists->fold[f].index + 1);
    return code;
}

/* Cuts an item down to units [from, to) of its blocks of keys, with their gradients. In zigzag's
 * second segment units count from its end. */
static void ra__item_cut(ra__item *item, ra__grads *g, int64_t from, int64_t to) {
    ra__chunk *c = &item->c;
    for (int32_t i = 0; i < c->segs; i++) {
        int64_t n = ra__seg_blocks(c, i);
        int64_t row = i == 1 ? ra__seg_cut(c, i, ra__max(n - to, 0), ra__max(n - from, 0))
                             : ra__seg_cut(c, i, from, to);
        item->k[i] = ra__view_at(item->k[i], 0, row, 0);
        item->v[i] = ra__view_at(item->v[i], 0, row, 0);
        if (item->pos[i]) item->pos[i] += row;
        g->dk[i] = ra__view_at(g->dk[i], 0, row, 0);
        g->dv[i] = ra__view_at(g->dv[i], 0, row, 0);
    }
}

static int64_t ra__item_units(const ra__item *item) {
    int64_t most = 0;
    for (int32_t i = 0; i < item->c.segs; i++)
        most = ra__max(most, ra__seg_blocks(&item->c, i));
    return most;
}

/* Part `part` of `parts` of an item's blocks of keys. */
static void ra__item_part(ra__item *item, ra__grads *g, int32_t part, int32_t parts) {
    int64_t units = ra__item_units(item);
    ra__item_cut(item, g, ra__part(units, parts, part), ra__part(units, parts, part + 1));
}

/* Cuts an item down to the units from the first to the last that rows with these bounds may see. */
static void ra__item_narrow(ra__item *item, ra__grads *g, const ra__bounds *seen) {
    const int64_t lo = ra__min(seen->lo_min, seen->doc_min);
    const int64_t hi = ra__max(seen->hi_max, seen->keep_max);
    int64_t from = ra__item_units(item), to = 0;
    if (item->c.list.run) return;      /* runs may be in any order */
    for (int32_t i = 0; i < item->c.segs; i++) {
        const ra__seg *s = &item->c.seg[i];
        int64_t n = ra__ceil_div(s->rows, RA_BLOCK_TOKENS);
        int64_t first = ra__max(lo - s->pos, 0) / s->stride / RA_BLOCK_TOKENS;
        int64_t end = ra__min(n, ra__ceil_div(ra__ceil_div(ra__max(hi - s->pos, 0), s->stride),
                                              RA_BLOCK_TOKENS));
        if (first >= end) continue;
        from = ra__min(from, i == 1 ? n - end : first);
        to = ra__max(to, i == 1 ? n - first : end);
    }
    ra__item_cut(item, g, ra__min(from, to), to);
}

static ra__share ra__ring_share(const ra_ring *r, int32_t b, int64_t task, int64_t blocks) {
    const ra_desc *d = &r->plan->d;
    int32_t parts = r->plan->sizes.back_parts, group = d->q_heads / d->kv_heads;
    int32_t a_head = parts > 1 ? 2 * parts : 1, index = (int32_t)(task % a_head);
    int64_t from = 0, to = blocks;
    ra__share s;
    s.want_q = parts == 1 || index < parts;
    s.want_k = parts == 1 || index >= parts;
    s.part = index % parts;
    s.parts = parts;
    if (!s.want_k) {
        from = ra__part(blocks, parts, s.part);
        to = ra__part(blocks, parts, s.part + 1);
    }
    s.t.sequence = b;
    s.t.kv_head = (int32_t)(task / a_head);
    s.t.panel0 = from * group;
    s.t.count = (int32_t)((to - from) * group);
    return s;
}

/* RA_TRAVEL_Q: this rank's keys of a sequence, with the sums of one kv head. */
static void ra__ring_key_item(const ra_ring *r, const ra__share *s, ra__item *item, ra__grads *g) {
    const ra_desc *d = &r->plan->d;
    ra__side side = ra__plan_side(r->plan, 1, r->rank);
    ra__view sums[2];
    memset(item, 0, sizeof *item);
    ra__chunk_side(&side, s->t.sequence, ra__k_len(d, s->t.sequence), &item->c);
    ra__item_owned(item, r->kv, NULL);
    sums[0] = ra__view_packed((const uint8_t *)r->dk, d->kv_heads, d->k_dim, RA_F32);
    sums[1] = ra__view_packed((const uint8_t *)r->dv, d->kv_heads, d->v_dim, RA_F32);
    for (int32_t j = 0; j < 2; j++) sums[j].batch = r->plan->sizes.key_rows * sums[j].token;
    ra__grads_at(d, &item->c, sums, s->t.kv_head, g);
    if (!s->want_q) ra__item_part(item, g, s->part, s->parts);
}

static void ra__ring_unpack_q(const ra_ring *r, int64_t f, ra__packed *x) {
    const ra_desc *d = &r->plan->d;
    uint8_t *message = ra__ring_fold_grads(r, f) - RA__FRAME_BYTES;
    int64_t rows;
    ra__message_offsets part[2], grad[2];
    x->w = r->work;
    x->b = r->back;
    x->c = *ra__entry_chunk(r, f);
    rows = ra__chunk_rows(&x->c);
    (void)ra__back_message(d, &x->c, 0, part, grad);
    x->sums = message + grad[0].k;
    x->w.q = ra__view_packed(message + part[0].k, d->q_heads, d->k_dim, d->q_dtype);
    x->w.lse = ra__view_packed(message + part[0].pos, 1, 1, RA_F32);
    x->w.lse.head = rows * 4;
    x->w.ml_batch = 0;
    x->w.ml_row = 1;
    x->w.ml_head = rows;
    x->b.d_o = ra__view_packed(message + part[0].v, d->q_heads, d->v_dim, d->o_dtype);
    x->b.delta = (const float *)(const void *)(message + part[0].pos) + d->q_heads * rows;
    x->b.w = &x->w;
    x->b.rows = &x->c;
    x->c.seg[0].row = 0;
    x->c.seg[1].row = x->c.seg[0].rows;
}

/* Joins the bounds of the query rows of each stripe. */
static void ra__ring_stripe(ra_ring *r) {
    const ra_desc *d = &r->plan->d;
    const ra__side *side = &r->work.q_side;
    int64_t most = 1;
    r->back.stripe = NULL;
    if (r->work.any_position || d->backward_travel == RA_TRAVEL_Q) return;
    for (int32_t b = 0; b < d->sequences; b++)
        most = ra__max(most, ra__side_blocks(side, b, ra__q_len(d, b)));
    r->back.stripe = r->stripe;
    r->back.stripes = ra__ring_stripes(d);
    r->back.stripe_blocks = ra__ceil_div(most, r->back.stripes);
    for (int64_t i = 0; i < d->sequences * r->back.stripes; i++) r->stripe[i] = ra__bounds_none();
    for (int32_t b = 0; b < d->sequences; b++) {
        int64_t blocks = ra__side_blocks(side, b, ra__q_len(d, b));
        for (int64_t i = 0; i < blocks; i++) {
            ra__seg s;
            ra__bounds bounds;
            ra__back_block(&r->back, b, i, &s);
            bounds = ra__seg_bounds(&d->mask, ra__key_end(d, b, 0), &s);
            ra__bounds_join(&r->stripe[b * r->back.stripes + i / r->back.stripe_blocks], &bounds);
        }
    }
}

/* The joint bounds of the rows of a packed chunk of queries. */
static ra__bounds ra__packed_bounds(const ra_desc *d, const ra__chunk *c) {
    ra__bounds all = ra__bounds_none();
    for (int32_t i = 0; i < c->segs; i++)
        for (int64_t j = 0; j < ra__seg_blocks(c, i); j++) {
            ra__seg s = ra__seg_block_at(c, i, j);
            ra__bounds b = ra__seg_bounds(&d->mask, ra__key_end(d, c->sequence, 0), &s);
            ra__bounds_join(&all, &b);
        }
    return all;
}

/* Item i of the keys of a task, with the sums of its kv head: the chunk, or with RA_TRAVEL_Q the
 * keys of this rank. 0: there is none. */
static int ra__ring_keys(const ra_ring *r, const ra__desk *desk, int64_t i, ra__item *item,
                         ra__grads *g) {
    const ra__share *s = &desk->hand.back.s;
    const int64_t f = desk->claim.fold;
    if (i > 0) return 0;
    if (r->plan->d.backward_travel == RA_TRAVEL_Q) {
        ra__ring_key_item(r, s, item, g);
        return 1;
    }
    if (!ra__ring_item(r, f, item)) return 0;
    ra__ring_grad_views(&r->plan->d, &item->c, ra__ring_fold_grads(r, f), s->t.kv_head, g);
    if (!s->want_q) ra__item_part(item, g, s->part, s->parts);
    return 1;
}

/* Rows of a chunk's segments from `at` on, at most a block of one segment, with their gradients;
 * returns how many. */
static int64_t ra__grads_rows(const ra__item *item, const ra__grads *g, int64_t at, ra__chunk *c,
                              ra__grads *part) {
    int32_t i = 0;
    for (; i < item->c.segs && at >= item->c.seg[i].rows; i++) at -= item->c.seg[i].rows;
    *c = item->c;
    *part = *g;
    c->segs = 1;
    c->seg[0] = ra__seg_part(&item->c.seg[i], at,
                             ra__min(RA_BLOCK_TOKENS, item->c.seg[i].rows - at));
    part->dk[0] = ra__view_at(g->dk[i], 0, at, 0);
    part->dv[0] = ra__view_at(g->dv[i], 0, at, 0);
    return c->seg[0].rows;
}

/* Clears the sums of dK and dV of a task or, if `last`, adds them to the caller's. 1: all of
 * them. */
static int ra__back_keys(const ra_ring *r, ra__desk *desk, int last) {
    ra__back_hand *h = &desk->hand.back;
    ra__item item;
    ra__grads g, part;
    ra__chunk c;
    if (!(last ? h->keys_last : h->keys_first)) return 1;
    memset(&g, 0, sizeof g);
    for (; ra__ring_keys(r, desk, h->index, &item, &g); h->index++, h->at = 0) {
        const int64_t rows = ra__chunk_rows(&item.c);
        while (h->at < rows) {
            if (h->x.left <= 0) return 0;
            h->at += ra__grads_rows(&item, &g, h->at, &c, &part);
            h->x.left -= RA__TILE_WORK;
            if (last) ra__grads_finish(&r->back, &c, h->s.t.kv_head, r->d_kv, &part);
            else ra__grads_clear(&r->plan->d, &c, &part);
        }
    }
    return 1;
}

/* RA_TRAVEL_Q: writes the sums of dQ of an own chunk to the caller's. 1: all of them. */
static int ra__back_queries(const ra_ring *r, ra__desk *desk) {
    ra__back_hand *h = &desk->hand.back;
    const int32_t group = r->plan->d.q_heads / r->plan->d.kv_heads;
    const ra__task *t = &h->s.t;
    if (r->plan->d.backward_travel != RA_TRAVEL_Q || !h->q_last) return 1;
    for (; h->at < t->count / group; h->at++) {
        int64_t block = t->panel0 / group + h->at;
        if (h->x.left <= 0) return 0;
        ra__ring_hand_over_q(r, ra__entry_chunk(r, desk->claim.fold), t->kv_head, block, block + 1,
                             h->p.sums);
        h->x.left -= RA__TILE_WORK * group;
    }
    return 1;
}

/* Prepares item h->index of the keys; 0: there is none. Without any keys there is one empty item,
 * because dQ must be cleared and written. */
static int ra__back_item_open(const ra_ring *r, ra__desk *desk, int begins, int ends) {
    ra__back_hand *h = &desk->hand.back;
    const int q = r->plan->d.backward_travel == RA_TRAVEL_Q;
    int any = ra__ring_keys(r, desk, h->index, &h->item, &h->g);
    if (!any && h->index) return 0;
    if (!any) memset(&h->item, 0, sizeof h->item);
    if (any && q) {
        int64_t blocks = ra__chunk_blocks(&h->item.c);
        ra__item_narrow(&h->item, &h->g, &h->seen);
        blocks -= ra__chunk_blocks(&h->item.c);
        if (h->x.phase & RA__AFTER) h->x.tally.empty += h->s.t.count * blocks;
    }
    if (!any || !h->s.want_k) {
        memset(h->g.dk, 0, sizeof h->g.dk);
        memset(h->g.dv, 0, sizeof h->g.dv);
    }
    h->g.edge = (begins && h->index == 0 && h->q_first ? RA__FIRST : 0) |
                (ends && !q && h->q_last ? RA__LAST : 0);
    ra__back_begin(&h->x);
    return h->opened = 1;
}

/* Continues all keys of a task against all its queries, in the tiles of a phase. begins, ends: this
 * is the first, the last phase of the chunk. 1: done. */
static int ra__back_pass_some(const ra_ring *r, ra__desk *desk, int32_t phase, int begins,
                              int ends) {
    ra__back_hand *h = &desk->hand.back;
    const ra__back *b = r->plan->d.backward_travel == RA_TRAVEL_Q ? &h->p.b : &r->back;
    h->x.phase = phase;
    for (; h->opened || ra__back_item_open(r, desk, begins, ends); h->index++, h->opened = 0)
        if (!ra__back_some(b, &h->s.t, &h->item, &h->g, &h->x)) return 0;
    return 1;
}

/* Gradients of the sinks of the heads of a task. 1: all of them. */
static int ra__back_sinks(const ra_ring *r, ra__desk *desk) {
    ra__back_hand *h = &desk->hand.back;
    const int32_t group = r->plan->d.q_heads / r->plan->d.kv_heads;
    if (desk->claim.fold != 0 || !r->t.d_sinks || !h->s.want_q || h->s.part) return 1;
    for (; h->index < group; h->index++)
        if (!ra__back_sink_some(&r->back, h->s.t.kv_head * group + (int32_t)h->index, &h->x))
            return 0;
    return 1;
}

/* The stages of a task with a chunk, in this order. */
enum { RA__STAGE_CLEAR, RA__STAGE_TILES, RA__STAGE_BEFORE, RA__STAGE_QUERIES, RA__STAGE_KEYS,
       RA__STAGE_SINKS, RA__STAGES };

/* Continues the stage in hand; 1: it is done. */
static int ra__back_stage(const ra_ring *r, ra__desk *desk) {
    const ra__fold *at = &r->lists->fold[desk->claim.fold];
    const int32_t phase = at->phase;
    const int twice = r->plan->owner_folds_twice && phase == RA__BOTH;
    const int tiles = r->plan->d.backward_travel != RA_TRAVEL_Q || at->chunk >= 0;
    ra__back_hand *h = &desk->hand.back;
    switch (h->stage) {
    case RA__STAGE_CLEAR: return ra__back_keys(r, desk, 0);
    case RA__STAGE_TILES:
        return !tiles || ra__back_pass_some(r, desk, twice ? RA__AFTER : phase, 1, !twice);
    case RA__STAGE_BEFORE:
        return !tiles || !twice || ra__back_pass_some(r, desk, RA__BEFORE, 0, 1);
    case RA__STAGE_QUERIES: return ra__back_queries(r, desk);
    case RA__STAGE_KEYS: return ra__back_keys(r, desk, 1);
    default: return ra__back_sinks(r, desk);
    }
}

/* Sets the share of a claimed task, and which of its sums begin and end with this chunk. */
static void ra__back_hand_open(const ra_ring *r, ra__desk *desk, uint8_t *memory) {
    const ra_desc *d = &r->plan->d;
    const int64_t f = desk->claim.fold;
    const ra__fold *at = &r->lists->fold[f];
    const int32_t own = at->own, b = at->sequence;
    const int32_t group = d->q_heads / d->kv_heads, any = at->chunk >= 0;
    const int q = d->backward_travel == RA_TRAVEL_Q;
    const int travel_first = own >= 0 && (at->phase & RA__AFTER);
    const int travel_last = own >= 0 &&
                            (r->lists->own[own].returned < 0 || at->phase == RA__BEFORE);
    const int stay_first = at->index == 0, stay_last = at->last;
    ra__back_hand *h = &desk->hand.back;
    ra__arena a = { NULL, 0 };
    ra__view dq = ra__view_packed((const uint8_t *)r->dq, d->q_heads, d->k_dim, RA_F32);
    int64_t blocks = ra__side_blocks(&r->work.q_side, b, ra__q_len(d, b));
    memset(h, 0, sizeof *h);
    a.base = memory;
    ra__back_carve(&a, d, 0, &h->x);
    if (q && any) {
        ra__ring_unpack_q(r, f, &h->p);
        h->seen = ra__packed_bounds(d, &h->p.c);
    }
    if (q) blocks = any ? ra__chunk_blocks(&h->p.c) : 0;
    h->s = ra__ring_share(r, b, desk->claim.task - r->task_begin[b], blocks);
    dq.batch = r->plan->report.q_rows * dq.token;
    if (q) dq = ra__view_packed(h->p.sums, d->q_heads, d->k_dim, RA_F32);
    if (h->s.want_q && (q || r->back.d_q.data))
        h->g.dq = ra__view_at(dq, q ? 0 : b, 0, h->s.t.kv_head * group);
    h->g.bias = r->work.t->d_bias.row_step == 0 ? h->s.want_k : h->s.want_q;
    h->keys_first = h->s.want_k && (q ? stay_first : travel_first);
    h->keys_last = h->s.want_k && (q ? stay_last : travel_last);
    h->q_first = q ? travel_first : stay_first;
    h->q_last = q ? h->s.want_q && travel_last : stay_last;
    desk->open = 1;
}

/* Continues a task of a backward pass; 1: it has folded the claimed chunk. */
static int ra__ring_back(ra_ring *r, ra__desk *desk, ra_event *e, uint8_t *memory) {
    const ra_plan *p = r->plan;
    const int64_t f = desk->claim.fold;
    const int32_t chunk = r->lists->fold[f].chunk;
    const int q = p->d.backward_travel == RA_TRAVEL_Q;
    ra__back_hand *h = &desk->hand.back;
    int done;
    if (!desk->open) ra__back_hand_open(r, desk, memory);
    h->x.left = r->step_work;
    while (h->stage < RA__STAGES && h->x.left > 0 && ra__back_stage(r, desk)) {
        h->stage++;
        h->index = h->at = 0;
    }
    done = h->stage == RA__STAGES;
    if (!h->s.want_q ||
        (chunk >= 0 && !(q ? ra__needs_q(p, chunk, r->rank) : ra__needs(p, chunk, r->rank))))
        memset(&h->x.tally, 0, sizeof h->x.tally); /* counted with dQ, or as unvisited */
    e->q_row = q && chunk >= 0 ? h->p.c.seg[0].pos : 0;
    e->q_rows = !q ? p->report.q_rows : chunk >= 0 ? ra__chunk_rows(&h->p.c) : 0;
    e->head = h->s.t.kv_head * (p->d.q_heads / p->d.kv_heads);
    ra__ring_folded(r, f, &h->x.tally, e);
    memset(&h->x.tally, 0, sizeof h->x.tally);
    if (done) ra__store_i32(&r->turn[desk->claim.task].next, r->lists->fold[f].index + 1);
    return done;
}

/* Packs the claimed chunk; the tasks that fold it wait for this. */
static ra_status ra__ring_start_q(ra_ring *r, int64_t f) {
    ra__ring_pack_q(r, ra__entry_chunk(r, f), ra__ring_fold_grads(r, f) - RA__FRAME_BYTES);
    ra__store_i64(&r->packed, f + 1);
    ra__ring_note_progress(r);
    return RA_AGAIN;
}

/* Computes the task in hand for one step. */
static ra_status ra__ring_compute(ra_ring *r, int ith, ra__desk *desk) {
    const ra_plan *p = r->plan;
    uint8_t *memory = r->scratch + r->scratch_bytes * (desk - r->desk);
    int64_t f = desk->claim.fold;
    int code = 0, done = 1;
    ra_event e = ra__event_none();
    e.sequence = r->lists->fold[f].sequence;
    e.thread = ith;
    e.begin_ns = ra__ring_now(r);
    if (p->d.engine) code = ra__ring_engine(r, &desk->claim, &e, memory);
    else if (r->lists->backward) done = ra__ring_back(r, desk, &e, memory);
    else done = ra__ring_fold(r, desk, &e, memory);
    if (code)
        return ra__ring_fail(r, RA_E_ENGINE, ra__blame_of(-1, -1, code, r->lists->fold[f].chunk));
    if (done) ra__store_i64(&desk->fold, RA__NO_FOLD);
    (void)ra__add_i64(&r->computed, 1);
    ra__ring_note_progress(r);
    ra__ring_progress(r);
    return RA_AGAIN;
}

/* Takes a desk for thread ith: its own, otherwise one without a task in hand, otherwise any. There
 * is one for each thread inside. Null: another thread was faster. */
static ra__desk *ra__desk_take(ra_ring *r, int ith) {
    const int32_t n = ra__load_i32(&r->threads);
    for (int32_t i = 0; i < 2 * n; i++) {
        ra__desk *desk = &r->desk[(ith + i) % n];
        int busy = ra__load_i32(&desk->taken) ||
                   (i > 0 && i < n && ra__load_i64(&desk->fold) != RA__NO_FOLD);
        if (busy || !ra__cas_i32(&desk->taken, 0, 1)) continue;
        ra__store_i32(&desk->idle, 0);
        return desk;
    }
    return NULL;
}

/* Takes a desk whose thread does not return to the task in hand. *more: some desk has been left,
 * but not for long enough. */
static ra__desk *ra__desk_adopt(ra_ring *r, int *more) {
    for (int32_t i = 0; i < ra__load_i32(&r->threads); i++) {
        ra__desk *desk = &r->desk[i];
        if (ra__load_i32(&desk->taken) || ra__load_i64(&desk->fold) == RA__NO_FOLD) continue;
        *more = 1;
        if (ra__add_i32(&desk->idle, 1) < RA__PATIENT || !ra__cas_i32(&desk->taken, 0, 1)) continue;
        if (ra__load_i64(&desk->fold) != RA__NO_FOLD) return desk;
        ra__store_i32(&desk->taken, 0);
    }
    return NULL;
}

/* Ends a pass that has done everything, unless it has failed. Under `comm`. */
static void ra__ring_complete(ra_ring *r) {
    ra_event e = ra__event_none();
    if (!ra__cas_i32(&r->state, RA_RING_RUNNING, RA__RING_ENDING)) return;
    ra__store_i32(&r->met, 1);
    e.begin_ns = r->begin_ns;
    ra__ring_event(r, RA_EV_PASS, -1, &e);
    ra__ring_progress(r);
    ra__store_i32(&r->state, RA_RING_IDLE);
    (void)ra__add_i64(&r->events, 1);
}

/* The message that this rank waits for: the next chunk to receive, otherwise to send, otherwise the
 * next gradient to return, otherwise the notice of a reader. */
static ra__blame ra__ring_awaits(const ra_ring *r) {
    const ra_plan *p = r->plan;
    const ra__pass_lists *lists = r->lists;
    int64_t next[RA__LANES];
    for (int32_t k = 0; k < RA__LANES; k++) next[k] = ra__load_i64(&r->lane[k].done);
    if (next[RA__RECEIVES] < lists->recvs)
        return ra__blame_of(ra__ring_peer(r, -1), 0, 0, lists->recv[next[RA__RECEIVES]].chunk);
    if (next[RA__SENDS] < lists->sends)
        return ra__blame_of(ra__ring_peer(r, 1), 1, 0, lists->send[next[RA__SENDS]].chunk);
    if (next[RA__RETURNS] < r->lane[RA__RETURNS].total) {
        int32_t c = lists->returned[next[RA__RETURNS]].chunk;
        return ra__blame_of(ra__ring_peer(r, ra__back_stations(p, &lists->chunk[c])), 0, 0, c);
    }
    if (next[RA__NOTICES_IN] < r->lane[RA__NOTICES_IN].total)
        return ra__blame_of(p->readers[next[RA__NOTICES_IN]], 0, 0, -1);
    return ra__blame_of(-1, -1, 0, -1);
}

/* Checks deadline, watchdog and cancellation, and for a failure that another thread has
 * recorded. */
static ra_status ra__ring_alarm(ra_ring *r) {
    int64_t now, looked, quiet, patience;
    if (ra__load_i32(&r->failed)) return ra__load_i32(&r->failed);
    if (ra__load_i32(&r->cancelled))
        return ra__ring_fail(r, RA_E_CANCELLED, ra__blame_of(-1, -1, 0, -1));
    now = ra__ring_now(r);
    looked = ra__load_i64(&r->looked_ns);
    ra__store_i64(&r->looked_ns, now);
    if (r->deadline && now > r->deadline)
        return ra__ring_fail(r, RA_E_TIMEOUT, ra__ring_awaits(r));
    quiet = ra__time_since(now, ra__load_i64(&r->progress_ns));
    if (!r->has_transport || quiet <= (r->rd.watchdog_ns ? r->rd.watchdog_ns : RA__QUIET_NS))
        return RA_OK;
    patience = ra__ring_patience(r);
    if (ra__time_since(now, looked) > patience)
        ra__store_i64(&r->progress_ns, now);   /* no thread was inside to see progress */
    else if (quiet > patience)
        return ra__ring_fail(r, RA_E_PEER, ra__ring_awaits(r));
    return RA_OK;
}

/* All threads return the same failure. RA_AGAIN while another thread still records it. */
static ra_status ra__ring_agree_on_failure(const ra_ring *r, ra_status s) {
    ra_status failed = s < 0 ? ra__load_i32(&r->failed) : RA_OK;
    return s >= 0 ? s : failed ? failed : RA_AGAIN;
}

/* Once no thread is inside a failed pass, announces that this rank reads nothing of others any
 * more, so that they need not wait for its ra_finish. Does not wait for them. The last thread to
 * leave calls it, and so does a thread that held `comm` without being inside. */
static void ra__ring_part(ra_ring *r) {
    if (ra__add_i32(&r->inside, 0) || !ra__load_i32(&r->failed) || !r->shared) return;
    if (!ra__cas_i32(&r->comm, 0, 1)) return;
    if (!r->parted) (void)r->tp.quiesce(r->tp.ctx, 1);
    r->parted = 1;
    ra__store_i32(&r->comm, 0);
}

static void ra__ring_leave(ra_ring *r) {
    if (ra__add_i32(&r->inside, -1) == 1) ra__ring_part(r);
}

/* Tries to claim a task for a desk: RA_WAIT if there is none, RA_AGAIN if there is one or another
 * thread is claiming. *moved: more entries are folded by all tasks. */
static ra_status ra__ring_deal(ra_ring *r, ra__desk *desk, int *moved) {
    int claimed = 0;
    if (!ra__cas_i32(&r->sched, 0, 1)) return RA_AGAIN;
    if (ra__load_i32(&r->state) == RA_RING_RUNNING) {
        int64_t before = r->folded;
        claimed = ra__ring_claim(r, desk);
        *moved |= r->folded != before;
    }
    ra__store_i32(&r->sched, 0);
    return claimed ? RA_AGAIN : RA_WAIT;
}

/* ra_step without the argument checks. */
static ra_status ra__ring_step(ra_ring *r, int ith) {
    ra_status s = RA_OK;
    ra__desk *desk;
    int moved = 0;
    if (ra__load_i32(&r->state) == RA_RING_IDLE) return RA_OK;
    if ((s = ra__ring_alarm(r)) != RA_OK) return s;
    if ((ith == 0 || !r->has_transport || (r->tp.caps & RA_CAP_ANY_THREAD)) &&
        ra__cas_i32(&r->comm, 0, 1)) {
        int live = ra__load_i32(&r->state) == RA_RING_RUNNING;     /* it ends only under comm */
        if (live && r->has_transport) moved = ra__ring_comm(r);
        if (live && moved == 0 && ra__load_i64(&r->folded) == r->lists->folds &&
            ra__ring_all_messages_done(r))
            ra__ring_complete(r);
        ra__store_i32(&r->comm, 0);
        if (moved < 0) return moved;
        if (moved && r->has_transport && !r->tp.post) return RA_AGAIN; /* peers may be waiting */
    }
    if (ith >= ra__load_i32(&r->threads)) {            /* the plan has no memory for it */
        if (ra__load_i32(&r->state) == RA_RING_IDLE) return RA_OK;
        return moved ? RA_AGAIN : RA_WAIT;
    }
    desk = ra__desk_take(r, ith);
    if (!desk) return RA_AGAIN;
    s = RA_AGAIN;
    desk->claim.task = ra__load_i64(&desk->fold) == RA__NO_FOLD ? 0 : desk->claim.task;
    if (ra__load_i64(&desk->fold) == RA__NO_FOLD) s = ra__ring_deal(r, desk, &moved);
    if (s == RA_WAIT) {
        ra__store_i32(&desk->taken, 0);
        desk = ra__desk_adopt(r, &moved);
        if (!desk) return ra__load_i32(&r->state) == RA_RING_IDLE ? RA_OK : moved ? RA_AGAIN : s;
    }
    if (ra__load_i64(&desk->fold) != RA__NO_FOLD) s = ra__ring_compute(r, ith, desk);
    else if (desk->claim.task < 0) s = ra__ring_start_q(r, desk->claim.fold);
    ra__store_i32(&desk->taken, 0);
    return s;
}

/* -------------------------------------------------------------------------- rings */
static ra_status ra__ring_desc_check(const ra_ring_desc *rd, ra_error *e) {
    const ra__rule rules[] = {
        { rd->watchdog_ns < 0, RA_E_RANGE, "ring.watchdog_ns", "# is negative", rd->watchdog_ns },
        { rd->quiesce_ns < 0, RA_E_RANGE, "ring.quiesce_ns", "# is negative", rd->quiesce_ns },
        { (uintptr_t)rd->workspace % 64 != 0, RA_E_ALIGN, "ring.workspace", "must be aligned to #",
          64 },
    };
    ra_status s = ra__check_rules(rules, sizeof rules / sizeof *rules, e);
    return s ? s : ra__check_allocator(&rd->allocator, "ring.allocator", e);
}

/* Lays out the ring for a pass of a plan; RA_E_WORKSPACE if it does not fit. */
static ra_status ra__ring_use(ra_ring *r, const ra_plan *p, int32_t pass, ra_error *e) {
    ra__arena a = { NULL, 0 };
    int64_t need = ra__ring_bytes(p, &p->sizes, r->shared, r->tp.align).bytes;
    if (need > r->bytes)
        return ra__refuse(e, RA_E_WORKSPACE, "ring.workspace_bytes", "this plan needs # bytes",
                          need);
    a.base = r->base;
    if (pass == RA_PASS_BACKWARD) (void)ra__ring_carve_back(&a, p, &p->sizes, r);
    else (void)ra__ring_carve(&a, p, &p->sizes, r);
    ra__store_i64(&r->counters.peak_bytes, a.used);
    return RA_OK;
}

/* Sets up a ring in its workspace, which may be refused as too small or not be available. */
static ra_status ra__ring_open(ra_ring **out, const ra_plan *p, const ra_transport *transport,
                               const ra_ring_desc *rd) {
    ra_transport tp;
    ra_ring *r;
    ra_error *e = rd->error;
    int64_t need, bytes = (int64_t)rd->workspace_bytes;
    int shared = transport && p->d.ranks > 1 && (transport->caps & RA_CAP_SHARED);
    uint8_t *base = (uint8_t *)rd->workspace;
    memset(&tp, 0, sizeof tp);
    if (transport && p->d.ranks > 1) tp = ra__tp_resolved(transport);
    need = ra__ring_bytes(p, &p->sizes, shared, tp.align).bytes;
    if (!bytes && !base) bytes = need;
    if (bytes < need)
        return ra__refuse(e, RA_E_WORKSPACE, "ring.workspace_bytes", "this plan needs # bytes",
                          need);
    if (!base) base = (uint8_t *)ra__alloc(&rd->allocator, bytes, 64);
    if (!base)
        return ra__refuse(e, RA_E_NOMEM, "ring.allocator", "has no # bytes for the workspace",
                          bytes);
    r = (ra_ring *)(void *)base;
    memset(r, 0, sizeof *r);
    r->base = base;
    r->bytes = bytes;
    r->rd = *rd;
    r->tp = tp;
    r->has_transport = p->d.ranks > 1;
    r->shared = shared;
    r->rank = p->d.rank;
    r->ranks = p->d.ranks;
    r->counters.waiting_peer = -1;
    if (!r->rd.quiesce_ns) r->rd.quiesce_ns = (int64_t)30 * 1000000000;
    if (r->has_transport && !tp.post) ra__plan_exchanges(p);
    if (r->has_transport && tp.reg && tp.reg(tp.ctx, base, (size_t)bytes, &r->mr)) r->mr = NULL;
    *out = r;
    return RA_OK;
}

RINGATTN_API ra_status ra_ring_create(ra_ring **out, const ra_plan *first,
                                      const ra_transport *transport, const ra_ring_desc *rd) {
    ra_ring_desc none;
    ra_status s;
    int64_t bytes;
    memset(&none, 0, sizeof none);
    if (!rd) rd = &none;
    if (!out) return ra__refuse(rd->error, RA_E_NULL, "out", "is required", 0);
    *out = NULL;
    if (!first) return ra__refuse(rd->error, RA_E_NULL, "plan", "is required", 0);
    s = ra__ring_desc_check(rd, rd->error);
    bytes = ra__max(first->chunk_bytes, first->back.chunk_bytes);
    if (transport && (transport->caps & RA_CAP_SHARED)) bytes = RA__FRAME_BYTES + RA__ADDRESS_BYTES;
    if (!s) s = ra__tp_check(transport, first->d.rank, first->d.ranks, bytes, rd->error);
    if (!s && transport) s = ra__tp_check_back(transport, first, rd->error);
    return s ? s : ra__ring_open(out, first, transport, rd);
}

RINGATTN_API ra_status ra_ring_destroy(ra_ring *ring) {
    ra_allocator a;
    if (!ring) return RA_OK;
    if (ra__load_i32(&ring->state) != RA_RING_IDLE || ra__load_i32(&ring->cancelled))
        (void)ra_finish(ring, RA_NO_DEADLINE);
    if (ring->unsafe) return RA_E_UNSAFE;
    if (ring->mr && ring->tp.dereg) (void)ring->tp.dereg(ring->tp.ctx, ring->mr);
    a = ring->rd.allocator;
    if (!ring->rd.workspace) ra__free(&a, ring->base, (size_t)ring->bytes);
    return RA_OK;
}

/* -------------------------------------------------------------------------- passes
 * Checks the gradients of a backward pass and notes where they are. */
static ra_status ra__begin_grads(ra_ring *r, const ra_plan *p, const ra_tensors *t, ra_error *e) {
    const int64_t rows[2] = { p->report.q_rows, p->report.k_rows };
    ra__view view[4];
    ra_desc d = p->d;
    ra_status s;
    d.error = e;
    s = ra__check_grads(&d, t, rows, view);
    if (s) return s;
    memset(&r->back, 0, sizeof r->back);
    r->back.w = &r->work;
    r->back.kernel = ra__kernel_of(&p->d);
    r->back.d_o = view[0];
    r->back.d_q = view[1];
    r->back.square = p->same_positions && p->q_cut;
    r->d_kv[0] = view[2];
    r->d_kv[1] = view[3];
    return RA_OK;
}

/* Checks a job against ring and plan, without its tensors. */
static ra_status ra__begin_check_job(ra_ring *r, const ra_job *job) {
    ra_error *e = &r->refusal;
    const ra_plan *p = job ? job->plan : NULL;
    const int back = job && job->pass == RA_PASS_BACKWARD;
    ra_status s = ra__load_i32(&r->failed);
    if (!job) return ra__refuse(e, RA_E_NULL, "job", "is required", 0);
    if (!p) return ra__refuse(e, RA_E_NULL, "job.plan", "is required", 0);
    const int64_t bytes = back ? p->back.chunk_bytes : p->chunk_bytes;
    const ra__rule rules[] = {
        { !job->tensors, RA_E_NULL, "job.tensors", "is required", 0 },
        { job->deadline_ns < 0, RA_E_RANGE, "job.deadline_ns", "# is negative", job->deadline_ns },
        { job->pass != RA_PASS_FORWARD && !back, RA_E_ENUM, "job.pass", "# is not an RA_PASS_*",
          job->pass },
        { back && !p->d.train, RA_E_SHAPE, "job.pass", "backward needs train = 1, not #",
          p->d.train },
        { s != RA_OK, s, "ring", "has failed in its pass #: create a new one", r->pass },
        { ra__load_i32(&r->state) != RA_RING_IDLE, RA_E_BUSY, "ring", "is still in its pass #",
          r->pass },
        { p->d.rank != r->rank || p->d.ranks != r->ranks, RA_E_SHAPE, "job.plan",
          "is for rank # or another number of ranks, unlike the ring", p->d.rank },
        { r->has_transport && bytes > (int64_t)r->tp.max_msg && !r->shared, RA_E_TRANSPORT,
          "job.plan", "has chunks of # bytes, which exceed the transport's max_msg", bytes },
    };
    s = ra__check_rules(rules, sizeof rules / sizeof *rules, e);
    return s || !r->has_transport || !back ? s : ra__tp_check_back(&r->tp, p, e);
}

/* Checks a job and its tensors. */
static ra_status ra__begin_check(ra_ring *r, const ra_job *job, ra__work *w, ra__view kv[2]) {
    ra_error *e = &r->refusal;
    ra_status s = ra__begin_check_job(r, job);
    if (s) return s;
    const ra_plan *p = job->plan;
    const ra_tensors *t = job->tensors;
    const int64_t rows[2] = { p->report.q_rows, p->report.k_rows };
    const ra__rule rules[] = {
        { ra__positions_set(&t->q_pos), RA_E_POSITIONS, "t.q_pos",
          "must be {0}: layout.kind is #", p->d.layout.kind },
        { ra__positions_set(&t->k_pos), RA_E_POSITIONS, "t.k_pos",
          "must be {0}: layout.kind is #", p->d.layout.kind },
    };
    s = ra__check_tensors(&p->d, t, rows, w, kv, e);
    if (!s) s = ra__check_outputs(&p->d, t, rows[0], w, e);
    if (!s) s = job->pass == RA_PASS_BACKWARD ? ra__begin_grads(r, p, t, e)
                                              : ra__check_forward(&p->d, t, rows, e);
    if (s) return s;
    if (p->d.layout.kind != RA_LAYOUT_ARRAY)
        return ra__check_rules(rules, sizeof rules / sizeof *rules, e);
    s = ra__check_array(&p->d, &t->q_pos, rows[0], 0, e);
    return s ? s : ra__check_array(&p->d, &t->k_pos, rows[1], 1, e);
}

/* Where the running state lives and what the tasks share. */
static void ra__begin_work(ra_ring *r, const ra_plan *p) {
    ra__work *w = &r->work;
    int64_t rows = p->report.q_rows;
    w->d = &p->d;
    w->t = &r->t;
    w->kernel = ra__kernel_of(&p->d);
    w->q_side = ra__plan_side(p, 0, r->rank);
    w->any_position = p->d.layout.kind == RA_LAYOUT_ARRAY;
    if (w->any_position) {
        w->q_side.array = r->t.q_pos.array;
        w->q_side.array_stride = r->t.q_pos.batch_step;
    }
    w->order = p->order;
    w->clear = w->finish = 1;
    w->ml_row = 1;
    w->ml_head = rows;
    w->ml_batch = rows * p->d.q_heads;
    if (p->d.o_dtype == RA_F32) {
        w->acc = w->o;
    } else {
        const uint8_t *own = w->acc.data;
        w->acc = ra__view_packed(own, p->d.q_heads, p->d.v_dim, RA_F32);
        w->acc.batch = rows * w->acc.token;
    }
}

/* Counters and cursors of a new pass. */
static void ra__begin_reset(ra_ring *r, const ra_plan *p) {
    const int64_t total[RA__LANES] = { r->lists->recvs, r->lists->sends, r->lists->returns,
                                       r->notices ? p->reader_count : 0,
                                       r->notices ? p->source_count : 0 };
    ra_ring_counters *c = &r->counters;
    int64_t *zero[] = { &c->tiles_partial, &c->tiles_full, &c->chunks_in, &c->chunks_out,
                        &c->bytes_in, &c->bytes_out, &c->compute_ns, &c->wait_ns };
    for (size_t i = 0; i < sizeof zero / sizeof zero[0]; i++) ra__store_i64(zero[i], 0);
    int back = r->lists->backward;
    ra__store_i64(&c->tiles_empty, back ? p->back_unvisited : p->unvisited);
    ra__store_i64(&c->tiles_all,
                  back ? p->report.backward.tiles_partial + p->report.backward.tiles_full
                       : p->report.forward.tiles_partial + p->report.forward.tiles_full);
    ra__store_i32(&c->waiting_peer,
                  r->lists->recvs ? ra__ring_peer(r, -1) : -1);
    ra__store_i64(&c->pass, r->pass);
    r->claim_fold = r->claim_task = r->packing = 0;
    ra__store_i64(&r->packed, 0);
    r->released = r->own_posted = r->exchanged = 0;
    ra__store_i64(&r->own_sent, 0);
    ra__store_i64(&r->folded, 0);
    ra__store_i64(&r->returns_folded, 0);
    for (int32_t k = 0; k < RA__LANES; k++) {
        r->lane[k].total = (int32_t)total[k];
        r->lane[k].posted = 0;
        ra__store_i64(&r->lane[k].done, 0);
    }
    memset(r->turn, 0, (size_t)r->task_begin[p->d.sequences] * sizeof *r->turn);
    for (int32_t i = 0; i < p->d.threads; i++) {
        ra__store_i32(&r->desk[i].taken, 0);
        ra__store_i64(&r->desk[i].fold, RA__NO_FOLD);
    }
    r->step_work = ra__step_work(&p->d, back);
    if (back) ra__ring_stripe(r);
    for (int64_t i = 0; i < total[RA__NOTICES_OUT]; i++) r->owner_alive[i] = NULL;
}

/* ra_begin, and ra_join for the thread that holds `join`; other threads get RA_WAIT meanwhile. */
static ra_status ra__ring_begin(ra_ring *ring, const ra_job *job) {
    ra__work w;
    ra__view kv[2];
    uint64_t agreed;
    ra_status s;
    memset(&w, 0, sizeof w);
    s = ra__begin_check(ring, job, &w, kv);
    if (s) return s;
    ring->work = w;
    s = ra__ring_use(ring, job->plan, job->pass, &ring->refusal);
    if (s) return s;
    if (ring->has_transport && !ring->tp.post) ra__plan_exchanges(job->plan);
    ring->plan = job->plan;
    ring->lists = job->pass == RA_PASS_BACKWARD ? &job->plan->back : &job->plan->forward;
    ring->task_begin = job->pass == RA_PASS_BACKWARD ? job->plan->back_task_begin
                                                     : job->plan->task_begin;
    ring->notices = ring->shared && job->pass == RA_PASS_FORWARD;
    ring->t = *job->tensors;
    ring->agreed_known = 0;
    agreed = ra__hash(14695981039346656037u, &job->plan->agreed, sizeof job->plan->agreed);
    if (ring->met_with != agreed) ra__store_i32(&ring->met, 0);
    ring->met_with = agreed;
    ring->kv[0] = kv[0];
    ring->kv[1] = kv[1];
    ring->deadline = job->deadline_ns;
    ring->pass++;
    ra__begin_work(ring, job->plan);
    ra__begin_reset(ring, job->plan);
    ring->begin_ns = ra__ring_now(ring);
    ra__store_i64(&ring->most_tiles, 0);
    ra__store_i64(&ring->progress_ns, ring->begin_ns);
    ra__store_i64(&ring->looked_ns, ring->begin_ns);
    ra__store_i32(&ring->threads, job->plan->d.threads);
    ra__store_i32(&ring->backward, ring->lists->backward);
    ra__store_i32(&ring->state, RA_RING_RUNNING);
    return RA_OK;
}

RINGATTN_API ra_status ra_begin(ra_ring *ring, const ra_job *job) {
    int32_t inside;
    if (!ring) return RA_E_NULL;
    if (job && job->ticket)
        return ra__refuse(&ring->refusal, RA_E_SHAPE, "job.ticket", "# is for ra_join only",
                          (int64_t)job->ticket);
    inside = ra__add_i32(&ring->inside, 0);
    if (inside)
        return ra__refuse(&ring->refusal, RA_E_BUSY, "ring.threads",
                          "# threads are still inside ra_step", inside);
    return ra__ring_begin(ring, job);
}

/* Adds itself to `inside` before it looks at the pass, because ra_begin does not wait but
 * refuses. */
RINGATTN_API ra_status ra_step(ra_ring *ring, int ith) {
    ra_status s;
    if (!ring) return RA_E_NULL;
    (void)ra__add_i32(&ring->inside, 1);
    if (ra__load_i32(&ring->state) == RA_RING_IDLE)
        s = ra__load_i64(&ring->counters.pass)
                ? RA_OK
                : ra__refuse(&ring->refusal, RA_E_STATE, "ring.pass", "is 0: none has begun", 0);
    else if (ith < 0)
        s = ra__refuse(&ring->refusal, RA_E_RANGE, "ith", "# is negative", ith);
    else
        s = ra__ring_agree_on_failure(ring, ra__ring_step(ring, ith));
    ra__ring_leave(ring);
    return s;
}

/* Under `join`: how the beginning of a ticket ended. */
static void ra__ticket_begun(ra__tickets *t, int64_t ticket, ra_status s) {
    const int64_t n = t->refusals, i = n % RA__REFUSALS;
    ra__store_i32(&t->status, s);
    if (s && n >= RA__REFUSALS) t->forgotten = t->refused[i];
    if (s) {
        t->refused[i] = ticket;
        t->refused_status[i] = s;
        ra__store_i64(&t->refusals, n + 1);
    }
    ra__store_i64(&t->last, ticket);
}

/* How the call of an earlier ticket ended, of an object that has not failed. */
static ra_status ra__ticket_late(ra__tickets *t, int64_t ticket, ra_error *e) {
    ra_status s = RA_OK;
    if (!ra__load_i64(&t->refusals)) return RA_OK;
    if (!ra__cas_i32(&t->join, 0, 1)) return RA_WAIT;
    if (ticket <= t->forgotten)
        s = ra__refuse(e, RA_E_STATE, "job.ticket",
                       "# is too old: too many tickets have been refused since", ticket);
    for (int64_t i = 0; i < ra__min(t->refusals, RA__REFUSALS); i++)
        if (t->refused[i] == ticket) s = t->refused_status[i];
    ra__store_i32(&t->join, 0);
    return s;
}

static ra_status ra__ticket_check(uint64_t ticket, int ith, ra_error *e) {
    if (!ticket || ticket > INT64_MAX)
        return ra__refuse(e, RA_E_RANGE, "job.ticket", "must be 1 or more; as signed it is #",
                          (int64_t)ticket);
    if (ith < 0) return ra__refuse(e, RA_E_RANGE, "ith", "# is negative", ith);
    return RA_OK;
}

/* The first thread with a new ticket begins, if no thread is inside the pass before. It sets `join`
 * and reads `inside`; the others set `inside` and read `join`. */
static ra_status ra__join_begin(ra_ring *r, const ra_job *job) {
    ra_status s = RA_WAIT;
    if (!ra__cas_i32(&r->tickets.join, 0, 1)) return RA_WAIT;
    if (ra__load_i64(&r->tickets.last) >= (int64_t)job->ticket) {
        s = RA_AGAIN;
    } else if (ra__load_i32(&r->failed)) {
        s = ra__load_i32(&r->failed);
    } else if (!ra__add_i32(&r->inside, 0) && ra__load_i32(&r->state) == RA_RING_IDLE) {
        s = ra__ring_begin(r, job);
        ra__ticket_begun(&r->tickets, (int64_t)job->ticket, s);
    }
    ra__store_i32(&r->tickets.join, 0);
    return s;
}

/* How the pass of an earlier ticket ended. */
static ra_status ra__join_late(ra_ring *r, int64_t ticket) {
    const ra_status s = ra__load_i32(&r->failed);
    return s ? s : ra__ticket_late(&r->tickets, ticket, &r->refusal);
}

RINGATTN_API ra_status ra_join(ra_ring *ring, const ra_job *job, int ith) {
    ra_status s;
    int64_t ticket;
    if (!ring || !job) return RA_E_NULL;
    if (!job->plan) return ra__refuse(&ring->refusal, RA_E_NULL, "job.plan", "is required", 0);
    s = ra__ticket_check(job->ticket, ith, &ring->refusal);
    if (s) return s;
    ticket = (int64_t)job->ticket;
    if (ticket < ra__load_i64(&ring->tickets.last)) return ra__join_late(ring, ticket);
    if (ticket > ra__load_i64(&ring->tickets.last)) {
        s = ra__join_begin(ring, job);
        if (s) return s;
    }
    (void)ra__add_i32(&ring->inside, 1);
    if (ra__add_i32(&ring->tickets.join, 0)) {
        s = RA_WAIT;
    } else if (ra__load_i64(&ring->tickets.last) != ticket) {
        s = ra__join_late(ring, ticket);
    } else {
        s = ra__load_i32(&ring->tickets.status);
        if (!s) s = ra__ring_agree_on_failure(ring, ra__ring_step(ring, ith));
    }
    ra__ring_leave(ring);
    return s;
}

/* Sleeps in the transport if that is possible, otherwise for 100 us. */
static void ra__wait_slice(ra_ring *r, int64_t deadline_ns) {
    int64_t slice = ra__ring_left(r, deadline_ns, ra__load_i32(&r->threads) > 1 ? 200000 : 2000000);
    if (r->has_transport && r->tp.wait && (r->tp.caps & RA_CAP_ANY_THREAD) &&
        ra__cas_i32(&r->comm, 0, 1)) {
        int live = ra__load_i32(&r->state) == RA_RING_RUNNING;     /* as long as comm is held */
        int n = live ? ra__ring_list(r) : 0;
        int code = n ? r->tp.wait(r->tp.ctx, r->list, n, ra__ring_until(slice)) : RA_OK;
        if (code < 0) (void)ra__ring_fail(r, ra__ring_code(code), ra__blame_of(-1, -1, code, -1));
        (void)ra__add_i32(&r->comm, -1); /* before it reads `inside` */
        ra__ring_part(r);
        if (n || !live) return;
    }
    ra__sleep_ns(100000);
}

RINGATTN_API ra_status ra_step_wait(ra_ring *ring, int64_t deadline_ns) {
    int64_t seen, begin;
    ra_event e = ra__event_none();
    if (!ring) return RA_E_NULL;
    seen = ra__load_i64(&ring->events);
    begin = ra__ring_now(ring);
    if (deadline_ns && begin > deadline_ns) return RA_E_TIMEOUT;
    for (int i = 0; i < 200 && ra__load_i64(&ring->events) == seen; i++) ra__pause();
    for (int i = 0; i < 4 && ra__load_i64(&ring->events) == seen; i++) ra__yield();
    if (ra__load_i64(&ring->events) == seen && ra__load_i32(&ring->state) == RA_RING_RUNNING)
        ra__wait_slice(ring, deadline_ns);
    e.begin_ns = begin;
    (void)ra__add_i64(&ring->counters.wait_ns, ra__time_since(ra__ring_now(ring), begin));
    ra__ring_event(ring, RA_EV_WAIT, -1, &e);
    return RA_OK;
}

RINGATTN_API ra_status ra_finish(ra_ring *ring, int64_t deadline_ns) {
    int64_t left;
    ra_status s;
    if (!ring) return RA_E_NULL;
    if (ra__load_i32(&ring->state) == RA_RING_IDLE && !ra__load_i32(&ring->cancelled))
        return RA_OK;
    s = ra__load_i32(&ring->failed);
    if (!s) s = ra__ring_fail(ring, RA_E_CANCELLED, ra__blame_of(-1, -1, 0, -1));
    if (!ring->has_transport || ring->quiet) return ring->unsafe && ring->shared ? RA_E_UNSAFE : s;
    left = ra__ring_left(ring, deadline_ns, ring->rd.quiesce_ns);
    ring->quiet = 1;
    if (ring->tp.quiesce ? ring->tp.quiesce(ring->tp.ctx, ra__ring_until(left)) != RA_OK
                         : ra__ring_list(ring) > 0 && ring->tp.post != NULL)
        ring->unsafe = 1;
    return ring->unsafe && ring->shared ? RA_E_UNSAFE : s;
}

RINGATTN_API void ra_ring_cancel(ra_ring *ring) {
    if (!ring) return;
    ra__store_i32(&ring->cancelled, 1);
    ra__ring_abort(ring, RA_E_CANCELLED);
    (void)ra__add_i64(&ring->events, 1);
}

/* A whole pass on the calling thread. */
static ra_status ra__ring_pass(ra_ring *ring, const ra_plan *plan, const ra_tensors *t,
                               int64_t deadline_ns, int32_t pass) {
    ra_job job;
    ra_status end, s;
    memset(&job, 0, sizeof job);
    job.plan = plan;
    job.tensors = t;
    job.deadline_ns = deadline_ns;
    job.pass = pass;
    s = ra_begin(ring, &job);
    if (s) return s;
    while ((s = ra_step(ring, 0)) > 0)
        if (s == RA_WAIT) (void)ra_step_wait(ring, deadline_ns);
    if (!s) return RA_OK;
    end = ra_finish(ring, RA_NO_DEADLINE);
    return end ? end : s;
}

RINGATTN_API ra_status ra_forward(const ra_plan *plan, ra_ring *ring, const ra_tensors *t,
                                  int64_t deadline_ns) {
    return ra__ring_pass(ring, plan, t, deadline_ns, RA_PASS_FORWARD);
}

RINGATTN_API ra_status ra_backward(const ra_plan *plan, ra_ring *ring, const ra_tensors *t,
                                   int64_t deadline_ns) {
    return ra__ring_pass(ring, plan, t, deadline_ns, RA_PASS_BACKWARD);
}

RINGATTN_API ra_status ra_ring_once(const ra_desc *d, const ra_transport *transport,
                                 const ra_tensors *t, int64_t deadline_ns) {
    ra_plan *plan = NULL;
    ra_ring *ring = NULL;
    ra_ring_desc rd;
    ra_status s, end;
    memset(&rd, 0, sizeof rd);
    s = ra_plan_create(&plan, d, NULL);
    if (s) return s;
    rd.error = d->error;
    s = ra_ring_create(&ring, plan, transport, &rd);
    if (!s) {
        s = ra_forward(plan, ring, t, deadline_ns);
        if (s < 0 && s > RA_E_MISMATCH && d->error) *d->error = ring->refusal;
        if (s <= RA_E_MISMATCH && d->error) {
            (void)ra__refuse(d->error, s, "pass", "", 0);
            memcpy(d->error->text, ring->failure.text, sizeof d->error->text);
        }
        end = ra_ring_destroy(ring);
        if (!s) s = end;
    }
    ra_plan_destroy(plan);
    return s;
}

RINGATTN_API void ra_ring_query(const ra_ring *ring, ra_ring_counters *out) {
    const ra_ring_counters *c;
    if (!out) return;
    memset(out, 0, sizeof *out);
    out->waiting_peer = -1;
    if (!ring) return;
    c = &ring->counters;
    out->state = ra__load_i32(&ring->state);
    if (out->state != RA_RING_IDLE)
        out->state = ra__load_i32(&ring->failed) ? RA_RING_FAILED : RA_RING_RUNNING;
    out->bounded = !ring->has_transport || ring->tp.post || (ring->tp.caps & RA_CAP_DEADLINE);
    out->pass = ra__load_i64(&c->pass);
    out->tiles_empty = ra__load_i64(&c->tiles_empty);
    out->tiles_partial = ra__load_i64(&c->tiles_partial);
    out->tiles_full = ra__load_i64(&c->tiles_full);
    out->tiles_all = ra__load_i64(&c->tiles_all);
    out->chunks_in = ra__load_i64(&c->chunks_in);
    out->chunks_out = ra__load_i64(&c->chunks_out);
    out->bytes_in = ra__load_i64(&c->bytes_in);
    out->bytes_out = ra__load_i64(&c->bytes_out);
    out->compute_ns = ra__load_i64(&c->compute_ns);
    out->wait_ns = ra__load_i64(&c->wait_ns);
    out->peak_bytes = ra__load_i64(&c->peak_bytes);
    if (out->state == RA_RING_RUNNING) out->waiting_peer = ra__load_i32(&c->waiting_peer);
}

RINGATTN_API ra_status ra_ring_failure(const ra_ring *ring, ra_failure *out) {
    if (!ring || !out) return RA_E_NULL;
    if (!ra__load_i32(&ring->failed)) return RA_E_STATE;
    *out = ring->failure;
    return RA_OK;
}

RINGATTN_API const char *ra_ring_explain(const ra_ring *ring) {
    if (!ring) return "";
    return ra__load_i32(&ring->failed) ? ring->failure.text : ring->refusal.text;
}

RINGATTN_API const ra_error *ra_ring_error(const ra_ring *ring) {
    static const ra_error none = { RA_OK, "", "" };
    return ring ? &ring->refusal : &none;
}

/* ========================================================================== CACHE
 * Inference over a sharded cache. In: queries of new tokens, and K and V of the lanes of this rank.
 * Out: O and LSE of the queries. A call consists of stages (attend some rows to the keys of one
 * rank; at last merge) and swaps (messages with the other ranks), in a fixed order: a stage waits
 * for swaps, a swap for stages. Threads share out the items of the stage that is open. A step does
 * a bounded part of one, and the next step of any thread goes on with it.
 *
 * Order of sums. The keys of a lane are summed in ascending order: in the form of prefill block by
 * block in one online softmax; in the form of decoding RA__LEAF keys in one, RA__SPAN such leaves
 * merged one after the other, then spans one after the other. Lanes are merged in a binary tree
 * over all lanes. A rank's lanes are the leaves of a few whole subtrees, and it hands on one
 * partial result for each. Nothing of this depends on ranks, threads, other rows, or the way. */

enum { RA__HOLD = 16 };                /* consecutive positions of a lane */
enum { RA__LEAF = 1024, RA__SPAN = 4, RA__WRITE_ROWS = 16 };
enum { RA__MOST_LANES = 1024, RA__TREE_DEPTH = 11 };        /* of the tree: log2 of lanes, plus 1 */
enum { RA__FRAME_Q = 4, RA__FRAME_KV = 5, RA__FRAME_PART = 6 };
enum { RA__SWAP_IDLE, RA__SWAP_POSTED, RA__SWAP_DONE };
#define RA__CLAIM_ITEMS (((int64_t)1 << 40) - 1)

/* A whole subtree of the tree of lanes, held by one rank: lanes [first, last). */
typedef struct ra__subtree { int32_t first, last; } ra__subtree;

/* One message out and one in. */
typedef struct ra__swap {
    int32_t kind, to, from;            /* RA__FRAME_*; ranks, or RA_NO_PEER */
    uint8_t *send, *recv;              /* frame, then payload */
    int64_t send_len, recv_len;
    int32_t send_after, recv_after;    /* stages that must be done before it is posted */
    int32_t sent, received;            /* RA__SWAP_* */
    ra_transport_op out, in;
} ra__swap;

/* Query rows, sequence by sequence: row at[b] + i is row i of sequence b. */
typedef struct ra__query_rows {
    ra__view v;
    int32_t packed;                    /* 1: row at[b] + i of v; 0: row i of its sequence b */
    const int64_t *at;                 /* [B + 1] */
    const int32_t *pos;                /* [rows] */
} ra__query_rows;

/* Keys of one rank. */
typedef struct ra__key_rows {
    int32_t rank;
    ra__view k, v;
    const int64_t *row;                /* [B][lanes of the rank] first row; null: the caller's */
} ra__key_rows;

/* Partial results: O [rows][Hq][Dv], then LSE [rows][Hq], for each subtree of a rank. */
typedef struct ra__partials { float *data; int64_t rows; } ra__partials;

/* Where a partial result of an item goes: rows `step` (heads) apart. */
typedef struct ra__partial { float *o, *lse; int64_t step; } ra__partial;

/* An item is some rows of a sequence against lanes of one rank: in the form of prefill up to
 * tile_rows rows of one KV head, in the form of decoding up to few_tokens rows of all heads; there
 * also, with slots, against one span of one lane. At the end of a call it is some rows to write. */
typedef struct ra__cache_item {
    int32_t b, head, few;              /* head: KV head, 0 where all are meant */
    int64_t n;                         /* its number in the stage */
    int64_t row, rows;                 /* of the sequence, in `queries` */
    int64_t lo, hi;                    /* some row may see positions lo <= p < hi */
    int32_t lane;                      /* one span: of this lane of the rank; -1: all lanes */
    int64_t span;

    /* How far it is: what comes next. */
    int32_t at_tree, at_lane, at_head; /* at_head: KV head in a leaf */
    int64_t at_span, at_leaf;
    int32_t walking;                   /* 1: a lane in the form of prefill is begun */
} ra__cache_item;

/* A desk: memory of one thread, and the item that is in hand there. A step leaves an item that is
 * not done, and the next step of any thread may take it up. */
typedef struct ra__cache_desk {
    float *part[RA__TREE_DEPTH + 3];
    uint8_t *workspace;
    int32_t busy, open, idle;          /* atomic: a thread is at the desk; there is an item in
                                        * hand; looks at it since it was left */
    ra__cache_item x;
    ra_tensors t;                      /* of the walk */
    ra_run run;
    ra__attend a;
} ra__cache_desk;

struct ra_cache {
    ra_desc d;                         /* resolved */
    ra_desc tile, few;                 /* of the calls of one item: one KV head; all heads */
    const ra__kernel *tile_kernel, *decode_kernel;
    ra_cache_desc cd;
    ra_transport tp;
    uint8_t *base;                     /* workspace; this struct is at its start */
    int64_t bytes;
    int32_t owns_base, has_transport, rank, ranks, lanes, unsafe;
    int32_t group;                     /* Hq / Hkv */
    int32_t few_tokens;                /* most new tokens of a sequence that takes the form of
                                        * decoding, 0: none does; also most tokens of one item */
    int64_t lane_rows, tile_rows, write_rows; /* write_rows: of an item at the end of a call */
    int32_t *lane_first;               /* [ranks + 1] */
    int32_t *lane_owner;               /* [lanes] */
    int32_t *tree_first;               /* [ranks + 1] first subtree of a rank */
    ra__subtree *tree;                 /* [lanes] */
    int32_t *pos;                      /* [lanes][lane_rows] positions; one lane: null */
    int64_t most_rows, most_own, most_keys; /* rows and own rows of a call; bytes of keys sent */
    int64_t slots, slot_floats;
    void *mr;

    ra_tensors t;                      /* of the call: what begin sets */
    ra__view q, k, v, o, lse;
    int64_t call, deadline, rows, own_rows;
    uint64_t agreed[2];                /* hashes of the descriptor and of the counts */
    int64_t *cached, *fresh;           /* [B] */
    int64_t *all_at, *own_at;          /* [B + 1] */
    int32_t *all_pos, *own_pos;
    int64_t *rank_rows;                /* [ranks] */
    int64_t *slot;                     /* [B] first slot; -1: none */
    int64_t *slot_done;                /* [B] */
    int64_t *key_row;                  /* [B][lanes] of received keys */
    uint8_t **result;                  /* [ranks] frame and partial results of the own rows */
    uint8_t *q_send, **q_recv, *q_all, *kv_send, *kv_recv[2];
    uint8_t *part_out, **part_send;
    float *slot_data;
    ra__swap *swap;
    ra_transport_op **list;
    int32_t way, swaps, stages;

    ra__query_rows queries;            /* of the open stage */
    ra__key_rows keys;
    ra__partials out;
    int64_t items, opened;             /* of the open stage; stages opened so far */
    int64_t claim, finished;           /* atomic: `opened` and items that are left to claim, in one
                                        * word, so that nobody claims an item of an earlier stage;
                                        * items that are done */
    int64_t packed_call;               /* the call whose messages are packed */
    int32_t open, stage;               /* atomic: 1: a stage is open; stages that are done */
    int32_t ran;                       /* level 0: swaps that are done */
    int32_t state, failed, cancelled, aborted, comm, inside, parted; /* atomic but parted */
    ra__tickets tickets;
    int64_t progress_ns, looked_ns;    /* atomic */
    ra_error why;
    ra__cache_desk *desk;                    /* [threads] */
};

/* -------------------------------------------------------------------------- ownership */
/* Keys of a lane at positions below `end`, which is also the lane's row of the position `end` if it
 * holds that. */
static int64_t ra__lane_keys(const ra_cache *c, int32_t lane, int64_t end) {
    const int64_t blocks = end / RA__HOLD, last = blocks % c->lanes;
    return (blocks / c->lanes + (lane < last)) * RA__HOLD + (lane == last ? end % RA__HOLD : 0);
}

static int32_t ra__lane_of(const ra_cache *c, int64_t position) {
    return (int32_t)(position / RA__HOLD % c->lanes);
}

/* Keys of a sequence of `tokens` tokens at a rank. */
static int64_t ra__rank_keys(const ra_cache *c, int32_t rank, int64_t tokens) {
    int64_t n = 0;
    for (int32_t l = c->lane_first[rank]; l < c->lane_first[rank + 1]; l++)
        n += ra__lane_keys(c, l, tokens);
    return n;
}

RINGATTN_API int64_t ra_cache_rows(const ra_cache *c) {
    return c ? (c->lane_first[c->rank + 1] - c->lane_first[c->rank]) * c->lane_rows : -1;
}

RINGATTN_API int32_t ra_cache_owner(const ra_cache *c, int64_t position) {
    if (!c || position < 0 || position >= c->d.kv_tokens) return -1;
    return c->lane_owner[ra__lane_of(c, position)];
}

RINGATTN_API int64_t ra_cache_row(const ra_cache *c, int64_t position) {
    if (!c || position < 0 || position >= c->d.kv_tokens) return -1;
    const int32_t lane = ra__lane_of(c, position);
    return (lane - c->lane_first[c->lane_owner[lane]]) * c->lane_rows +
           ra__lane_keys(c, lane, position);
}

/* The whole subtrees of the tree over lanes [first, last) that lie in a rank's lanes. */
static int32_t ra__subtrees(const ra_cache *c, int32_t rank, int32_t first, int32_t last,
                            ra__subtree *out) {
    const int32_t from = c->lane_first[rank], to = c->lane_first[rank + 1];
    const int32_t middle = first + (last - first + 1) / 2;
    if (last <= from || first >= to || first >= last) return 0;
    if (first >= from && last <= to) {
        out->first = first;
        out->last = last;
        return 1;
    }
    const int32_t n = ra__subtrees(c, rank, first, middle, out);
    return n + ra__subtrees(c, rank, middle, last, out + n);
}

/* Lanes of each rank: equal ranges, or in proportion to weights, at least one each. */
static void ra__lane_ranges(ra_cache *c) {
    const int32_t *w = c->d.layout.weights;
    int64_t sum = 0, before = 0;
    for (int32_t r = 0; r < c->ranks; r++) sum += w ? w[r] : 1;
    for (int32_t r = 0; r < c->ranks; r++) {
        const int64_t least = r ? c->lane_first[r - 1] + 1 : 0, most = c->lanes - (c->ranks - r);
        const int64_t at = (2 * before * c->lanes + sum) / (2 * sum);
        c->lane_first[r] = (int32_t)ra__min(ra__max(at, least), most);
        before += w ? w[r] : 1;
    }
    c->lane_first[c->ranks] = c->lanes;
    for (int32_t r = 0; r < c->ranks; r++)
        for (int32_t l = c->lane_first[r]; l < c->lane_first[r + 1]; l++) c->lane_owner[l] = r;
}

static void ra__lane_tables(ra_cache *c) {
    int32_t n = 0;
    ra__lane_ranges(c);
    for (int32_t r = 0; r < c->ranks; r++) {
        c->tree_first[r] = n;
        n += ra__subtrees(c, r, 0, c->lanes, c->tree + n);
    }
    c->tree_first[c->ranks] = n;
    for (int32_t l = 0; c->lanes > 1 && l < c->lanes; l++)
        for (int64_t i = 0; i < c->lane_rows; i++)
            c->pos[l * c->lane_rows + i] =
                (int32_t)ra__min((i / RA__HOLD * c->lanes + l) * RA__HOLD + i % RA__HOLD,
                                 RA_MAX_POSITION - 1);
}

RINGATTN_API ra_status ra_cache_store(const ra_cache *c, const ra_tensors *t, int32_t sequence,
                                      int64_t position, const float *k, const float *v) {
    ra__view to[2];
    ra_status s = RA_OK;
    if (!c || !t || !k || (!v && !c->d.v_in_k)) return RA_E_NULL;
    if (sequence < 0 || sequence >= c->d.sequences || position < 0 || position >= c->d.kv_tokens)
        return RA_E_RANGE;
    if (ra_cache_owner(c, position) != c->rank) return RA_OK;
    memset(to, 0, sizeof to);
    s = ra__in_check(&t->k, ra__shape_of("t.k", &c->d, ra_cache_rows(c), c->d.kv_heads,
                                         c->d.k_dim), c->d.k_dtype, &to[0], NULL);
    if (!s && !c->d.v_in_k)
        s = ra__in_check(&t->v, ra__shape_of("t.v", &c->d, ra_cache_rows(c), c->d.kv_heads,
                                             c->d.v_dim), c->d.v_dtype, &to[1], NULL);
    for (int32_t h = 0; h < c->d.kv_heads && !s; h++) {
        const int64_t row = ra_cache_row(c, position);
        ra__view a = ra__view_at(to[0], sequence, row, h), b = ra__view_at(to[1], sequence, row, h);
        s = ra_convert((void *)(uintptr_t)a.data, c->d.k_dtype, k + h * c->d.k_dim, RA_F32,
                       c->d.k_dim);
        if (!s && !c->d.v_in_k)
            s = ra_convert((void *)(uintptr_t)b.data, c->d.v_dtype, v + h * c->d.v_dim, RA_F32,
                           c->d.v_dim);
    }
    return s;
}

/* -------------------------------------------------------------------------- memory */
/* Bytes of a query row, of the keys of a token, and floats of a partial result. */
static int64_t ra__query_bytes(const ra_desc *d) {
    return d->q_heads * ra__row_bytes(d->q_dtype, d->k_dim);
}

static int64_t ra__key_bytes(const ra_desc *d) {
    return d->kv_heads * (ra__row_bytes(d->k_dtype, d->k_dim) +
                          (d->v_in_k ? 0 : ra__row_bytes(d->v_dtype, d->v_dim)));
}

static int64_t ra__partial_floats(const ra_desc *d) {
    return d->q_heads * (int64_t)(d->v_dim + 1);
}

static int32_t ra__rank_trees(const ra_cache *c, int32_t rank) {
    return c->tree_first[rank + 1] - c->tree_first[rank];
}

/* Most rows of a call that a rank holds: whole rounds of all lanes, and for each sequence three
 * more, of which only a part may be there. */
static int64_t ra__own_most(const ra_cache *c, int32_t rank) {
    const int64_t lanes = c->lane_first[rank + 1] - c->lane_first[rank];
    const int64_t rounds = c->most_rows / (RA__HOLD * c->lanes) + 3 * (int64_t)c->d.sequences;
    if (c->cd.queries == RA_QUERIES_ALL) return c->most_rows;
    return ra__min(c->most_rows, ra__mul_sat(rounds, lanes * RA__HOLD));
}

/* Bytes of keys that a rank may have to send at once. AUTO: not more than what the queries of the
 * largest call would take. */
static int64_t ra__keys_most(const ra_cache *c) {
    int64_t lanes = 0, full;
    for (int32_t r = 0; r < c->ranks; r++)
        lanes = ra__max(lanes, c->lane_first[r + 1] - c->lane_first[r]);
    full = ra__mul_sat(c->d.sequences * lanes * c->lane_rows, ra__key_bytes(&c->d));
    full = ra__min(full, INT64_MAX / 8);
    if (c->cd.way == RA_INFER_PASS_KV) return full;
    return ra__min(full, ra__mul_sat(c->most_rows, ra__query_bytes(&c->d) +
                                                       8 * ra__partial_floats(&c->d)));
}

static void ra__cache_carve_desks(ra__arena *a, ra_cache *c) {
    const int64_t tile = c->tile_rows * c->group * (c->d.v_dim + 1);
    const int64_t few = c->few_tokens * ra__partial_floats(&c->d);
    const int64_t bytes = (int64_t)ra__max((int64_t)ra_attention_bytes(&c->tile, 1),
                                           (int64_t)ra_attention_bytes(&c->few, 1));
    for (int32_t i = 0; i < c->d.threads; i++) {
        ra__cache_desk x;
        memset(&x, 0, sizeof x);
        for (int32_t j = 0; j < RA__TREE_DEPTH + 3; j++)
            x.part[j] = (float *)ra__carve(a, 4 * ra__max(ra__max(tile, few),
                                                         ra__partial_floats(&c->d)));
        x.workspace = (uint8_t *)ra__carve(a, bytes);
        if (a->base) c->desk[i] = x;
    }
}

/* Buffers of messages and of partial results. */
static void ra__cache_carve_messages(ra__arena *a, ra_cache *c) {
    const int64_t align = ra__max(64, (int64_t)c->tp.align), q = ra__query_bytes(&c->d);
    const int64_t part = 4 * ra__partial_floats(&c->d), own = ra__own_most(c, c->rank);
    const int moves = c->ranks > 1 && c->cd.queries == RA_QUERIES_OWN;
    const int64_t mine = part * ra__rank_trees(c, c->rank);
    for (int32_t r = 0; r < c->ranks; r++) {
        const int64_t rows = ra__own_most(c, r);
        uint8_t *result = ra__carve_aligned(a, RA__FRAME_BYTES + part * ra__rank_trees(c, r) * own,
                                            align);
        uint8_t *recv = NULL, *send = NULL;
        if (moves && r != c->rank) {
            recv = ra__carve_aligned(a, RA__FRAME_BYTES + rows * q, align);
            send = ra__carve_aligned(a, RA__FRAME_BYTES + rows * mine, align);
        }
        if (!a->base) continue;
        c->result[r] = result;
        c->q_recv[r] = recv;
        c->part_send[r] = send;
    }
    if (!moves) return;
    c->q_send = ra__carve_aligned(a, RA__FRAME_BYTES + own * q, align);
    c->q_all = (uint8_t *)ra__carve(a, c->most_rows * q);
    c->part_out = (uint8_t *)ra__carve(a, c->most_rows * mine);
    if (c->cd.way == RA_INFER_PASS_Q) return;
    c->most_keys = ra__keys_most(c);
    c->kv_send = ra__carve_aligned(a, RA__FRAME_BYTES + 64 + c->most_keys, align);
    for (int i = 0; i < 2; i++)
        c->kv_recv[i] = ra__carve_aligned(a, RA__FRAME_BYTES + 64 + c->most_keys, align);
}

/* Slots for the spans of sequences whose keys several threads share out. */
static void ra__cache_slots(ra_cache *c) {
    int64_t lanes = 0;
    for (int32_t r = 0; r < c->ranks; r++)
        lanes = ra__max(lanes, c->lane_first[r + 1] - c->lane_first[r]);
    c->slot_floats = c->few_tokens * ra__partial_floats(&c->d);
    c->slots = lanes * ra__ceil_div(c->lane_rows, RA__LEAF * RA__SPAN) *
               ra__min(c->d.sequences, 2 * c->d.threads);
    if (c->d.threads == 1 || c->cd.form == RA_FORM_SAME) c->slots = 0;
}

/* Lays out the workspace in two rounds: tables, which the sizes of the rest follow from, and the
 * rest. */
static void ra__cache_carve_tables(ra__arena *a, ra_cache *c) {
    (void)ra__carve(a, (int64_t)sizeof *c);
    c->lane_first = (int32_t *)ra__carve(a, (c->ranks + 1) * 4);
    c->lane_owner = (int32_t *)ra__carve(a, c->lanes * 4);
    c->tree_first = (int32_t *)ra__carve(a, (c->ranks + 1) * 4);
    c->tree = (ra__subtree *)ra__carve(a, c->lanes * (int64_t)sizeof(ra__subtree));
    c->pos = c->lanes > 1 ? (int32_t *)ra__carve(a, c->lanes * c->lane_rows * 4) : NULL;
}

static void ra__cache_carve(ra__arena *a, ra_cache *c) {
    const int64_t b = c->d.sequences, swaps = 2 * ((int64_t)c->ranks - 1);
    c->cached = (int64_t *)ra__carve(a, b * 8);
    c->fresh = (int64_t *)ra__carve(a, b * 8);
    c->all_at = (int64_t *)ra__carve(a, (b + 1) * 8);
    c->own_at = (int64_t *)ra__carve(a, (b + 1) * 8);
    c->all_pos = (int32_t *)ra__carve(a, c->most_rows * 4);
    c->own_pos = (int32_t *)ra__carve(a, c->most_rows * 4);
    c->rank_rows = (int64_t *)ra__carve(a, c->ranks * 8);
    c->slot = (int64_t *)ra__carve(a, b * 8);
    c->slot_done = (int64_t *)ra__carve(a, b * 8);
    c->key_row = (int64_t *)ra__carve(a, b * c->lanes * 8);
    c->result = (uint8_t **)ra__carve(a, c->ranks * (int64_t)sizeof(uint8_t *));
    c->q_recv = (uint8_t **)ra__carve(a, c->ranks * (int64_t)sizeof(uint8_t *));
    c->part_send = (uint8_t **)ra__carve(a, c->ranks * (int64_t)sizeof(uint8_t *));
    c->swap = (ra__swap *)ra__carve(a, swaps * (int64_t)sizeof(ra__swap));
    c->list = (ra_transport_op **)ra__carve(a, 2 * swaps * (int64_t)sizeof(ra_transport_op *));
    c->desk = (ra__cache_desk *)ra__carve(a, c->d.threads * (int64_t)sizeof(ra__cache_desk));
    ra__cache_slots(c);
    c->slot_data = (float *)ra__carve(a, 4 * c->slots * c->slot_floats);
    ra__cache_carve_messages(a, c);
    ra__cache_carve_desks(a, c);
}

/* -------------------------------------------------------------------------- checks */
static ra_status ra__cache_check_desc(const ra_desc *d, ra_error *e) {
    if (d->kv_tokens < 1)
        return ra__refuse(e, RA_E_UNSET, "kv_tokens",
                          "the most positions of a sequence are required, is #", d->kv_tokens);
    if (d->q_offset)
        return ra__refuse(e, RA_E_SHAPE, "q_offset", "comes with each call: must be 0, is #",
                          d->q_offset);
    if (d->tokens_of || d->kv_tokens_of)
        return ra__refuse(e, RA_E_SHAPE, d->tokens_of ? "tokens_of" : "kv_tokens_of",
                          "comes with each call, of # sequences: must be null", d->sequences);
    if (d->layout.kind)
        return ra__refuse(e, RA_E_SHAPE, "layout.kind", "must be 0, is #", d->layout.kind);
    if (d->mask.kind == RA_MASK_INTERVALS)
        return ra__refuse(e, RA_E_UNSUPPORTED, "mask.kind", "# (INTERVALS) has no cache",
                          d->mask.kind);
    if (d->mask.doc_count)
        return ra__refuse(e, RA_E_UNSUPPORTED, "mask.doc_count", "must be 0 with a cache, is #",
                          d->mask.doc_count);
    if (d->scores & RA_SCORE_BIAS)
        return ra__refuse(e, RA_E_UNSUPPORTED, "scores", "# has RA_SCORE_BIAS", d->scores);
    if (d->train) return ra__refuse(e, RA_E_UNSUPPORTED, "train", "must be 0, is #", d->train);
    if (d->dropout > 0.0f)
        return ra__refuse(e, RA_E_UNSUPPORTED, "dropout", "is for training: must be 0", 0);
    if (d->engine) return ra__refuse(e, RA_E_UNSUPPORTED, "engine", "serves rings only", 0);
    return RA_OK;
}

static ra_status ra__cache_check_rest(const ra_desc *d, const ra_cache_desc *cd, ra_error *e) {
    const int32_t ranks = d->ranks ? d->ranks : 1;
    const int32_t choice[3] = { cd->queries, cd->way, cd->form };
    static const int32_t last[3] = { RA_QUERIES_ALL, RA_INFER_PASS_KV, RA_FORM_SAME };
    static const char *const name[3] = { "cache.queries", "cache.way", "cache.form" };
    const int64_t count[3] = { cd->new_tokens, cd->watchdog_ns, cd->quiesce_ns };
    static const char *const count_name[3] = { "cache.new_tokens", "cache.watchdog_ns",
                                               "cache.quiesce_ns" };
    for (int i = 0; i < 3; i++)
        if (choice[i] < 0 || choice[i] > last[i])
            return ra__refuse(e, RA_E_ENUM, name[i], "# is no constant of it", choice[i]);
    if (cd->lanes && (cd->lanes < ranks || cd->lanes > RA__MOST_LANES))
        return ra__refuse(e, RA_E_RANGE, "cache.lanes", "# is not in ranks..1024", cd->lanes);
    if (ranks > RA__MOST_LANES)
        return ra__refuse(e, RA_E_RANGE, "ranks", "# are more than 1024 lanes", ranks);
    for (int i = 0; i < 3; i++)
        if (count[i] < 0)
            return ra__refuse(e, RA_E_RANGE, count_name[i], "# is negative", count[i]);
    if (cd->queries == RA_QUERIES_ALL && cd->way == RA_INFER_PASS_KV && ranks > 1)
        return ra__refuse(e, RA_E_SHAPE, "cache.way",
                          "# needs RA_QUERIES_OWN: every rank would compute every row", cd->way);
    if (!cd->allocator.alloc != !cd->allocator.free)
        return ra__refuse(e, RA_E_NULL, "cache.allocator", "needs both callbacks or none", 0);
    if (cd->workspace && !cd->workspace_bytes)
        return ra__refuse(e, RA_E_WORKSPACE, "cache.workspace_bytes", "is # beside a workspace", 0);
    if ((uintptr_t)cd->workspace % 64)
        return ra__refuse(e, RA_E_ALIGN, "cache.workspace", "must be aligned to #", 64);
    return RA_OK;
}

/* Everything of a cache but its memory. */
static ra_status ra__cache_resolve(const ra_desc *d, const ra_cache_desc *cd, ra_cache *c) {
    ra_error *e = d ? d->error : NULL;
    ra_desc plain;
    int64_t all;
    ra_status s;
    if (!d) return RA_E_NULL;
    memset(c, 0, sizeof *c);
    s = ra__cache_check_desc(d, e);
    plain = *d;
    plain.layout.kind = RA_LAYOUT_CONTIGUOUS;
    if (!s) s = ra__resolve(&plain, &c->d);
    if (!s && cd) c->cd = *cd;
    if (!s) s = ra__cache_check_rest(d, &c->cd, e);
    if (s) return s;
    c->ranks = c->d.ranks;
    c->rank = c->d.rank;
    c->lanes = c->cd.lanes ? c->cd.lanes : c->ranks;
    c->group = c->d.q_heads / c->d.kv_heads;
    c->few_tokens = c->group <= RA__DECODE_PAIRS ? RA__DECODE_PAIRS / c->group : 0;
    c->lane_rows = ra__ceil_div(c->d.kv_tokens, RA__HOLD * (int64_t)c->lanes) * RA__HOLD;
    c->tile_rows = RA_BLOCK_TOKENS * ra__max(1, ra__min(4, RA__PANELS / c->group));
    c->most_rows = c->cd.new_tokens ? c->cd.new_tokens : ra__mul_sat(c->d.sequences, c->d.tokens);
    if (c->most_rows > (int64_t)1 << 31)
        return ra__refuse(e, RA_E_RANGE, "cache.new_tokens", "# are too many", c->most_rows);
    if (!ra__mul(c->most_rows, 4 * ra__partial_floats(&c->d) + ra__query_bytes(&c->d), &all) ||
        !ra__mul(all, 32 * (int64_t)c->lanes, &all))
        return ra__refuse(e, RA_E_OVERFLOW, "cache.new_tokens",
                          "# tokens of this shape overflow 62 bits", c->most_rows);
    c->tile = c->d;
    c->tile.ranks = c->tile.rank = 0;
    c->tile.sequences = 1;
    c->tile.threads = 1;
    c->tile.layout.weights = NULL;
    c->tile.o_dtype = RA_F32;
    c->tile.scores &= ~RA_SCORE_SINKS;
    c->tile.error = NULL;
    c->few = c->tile;
    c->tile.q_heads = c->group;
    c->tile.kv_heads = 1;
    c->tile.tokens = c->tile_rows;
    c->tile.kv_tokens = c->lane_rows;
    c->tile_kernel = ra__kernel_of(&c->d);
    c->decode_kernel = ra__kernel_decode(&c->d);
    c->write_rows = RA__STEP_WORK / c->lanes / ra__partial_floats(&c->d);
    c->write_rows = ra__max(1, ra__min(RA__WRITE_ROWS, c->write_rows));
    c->few.tokens = ra__max(1, c->few_tokens);
    c->few.kv_tokens = ra__min(RA__LEAF, c->lane_rows);
    return RA_OK;
}

/* Bytes of the workspace. The tables have to exist before the rest can be sized: they are made in
 * memory of malloc for that. */
static int64_t ra__cache_bytes(ra_cache *c, ra_error *e) {
    ra__arena a = { NULL, 0 };
    int64_t bytes;
    ra__cache_carve_tables(&a, c);
    bytes = a.used;
    a.base = (uint8_t *)ra__alloc(&c->cd.allocator, bytes, 64);
    if (!a.base) {
        (void)ra__refuse(e, RA_E_NOMEM, "cache.allocator", "no # bytes for tables", bytes);
        return 0;
    }
    a.used = 0;
    ra__cache_carve_tables(&a, c);
    ra__lane_tables(c);
    uint8_t *tables = a.base;
    a.base = NULL;
    ra__cache_carve(&a, c);
    ra__free(&c->cd.allocator, tables, (size_t)bytes);
    return a.used;
}

RINGATTN_API size_t ra_cache_workspace(const ra_desc *d, const ra_cache_desc *cd) {
    ra_cache c;
    if (ra__cache_resolve(d, cd, &c)) return 0;
    c.tp.align = 64;
    return (size_t)ra__cache_bytes(&c, d->error);
}

/* Longest message but those of keys. */
static int64_t ra__cache_message(const ra_cache *c) {
    int64_t most = 0;
    for (int32_t r = 0; r < c->ranks; r++) {
        const int64_t rows = ra__own_most(c, r);
        most = ra__max(most, rows * ra__query_bytes(&c->d));
        for (int32_t q = 0; q < c->ranks; q++)
            most = ra__max(most, rows * 4 * ra__partial_floats(&c->d) * ra__rank_trees(c, q));
    }
    return RA__FRAME_BYTES + most;
}

static uint64_t ra__cache_agree(const ra_cache *c, const ra_desc *d) {
    ra__agreed a;
    uint64_t h;
    memset(&a, 0, sizeof a);
    ra__agree(d, &c->d, &a);
    h = ra__hash(14695981039346656037u, &a, sizeof a);
    h = ra__hash_i64(ra__hash_i64(ra__hash_i64(h, c->most_rows), c->lanes), c->cd.queries);
    return ra__hash_i64(ra__hash_i64(h, c->cd.way), c->cd.form);
}

RINGATTN_API ra_status ra_cache_create(ra_cache **out, const ra_desc *d, const ra_transport *net,
                                       const ra_cache_desc *cd) {
    ra_error *e = d ? d->error : NULL;
    ra_cache c, *made;
    ra__arena a = { NULL, 0 };
    int64_t need, align;
    if (!out) return ra__refuse(e, RA_E_NULL, "out", "is required", 0);
    *out = NULL;
    ra_status s = ra__cache_resolve(d, cd, &c);
    if (!s) s = ra__tp_check(net, c.rank, c.ranks, 0, e);
    if (s) return s;
    c.has_transport = c.ranks > 1;
    if (c.has_transport) c.tp = ra__tp_resolved(net);
    if (c.ranks > 2 && !(net->caps & RA_CAP_ANY_PEER))
        return ra__refuse(e, RA_E_TRANSPORT, "transport.caps",
                          "# lacks RA_CAP_ANY_PEER: ranks of a cache talk to all others",
                          (int64_t)net->caps);
    align = ra__max(64, (int64_t)c.tp.align);
    c.tp.align = (size_t)align;
    need = ra__cache_bytes(&c, e);
    if (!need) return RA_E_NOMEM;
    c.bytes = c.cd.workspace ? (int64_t)c.cd.workspace_bytes : need;
    if (c.bytes < need)
        return ra__refuse(e, RA_E_WORKSPACE, "cache.workspace_bytes", "needs # bytes", need);
    c.owns_base = !c.cd.workspace;
    c.base = c.owns_base ? (uint8_t *)ra__alloc(&c.cd.allocator, need, 64)
                         : (uint8_t *)c.cd.workspace;
    if (!c.base)
        return ra__refuse(e, RA_E_NOMEM, "cache.allocator", "no # bytes for the workspace", need);
    a.base = c.base;
    ra__cache_carve_tables(&a, &c);
    ra__lane_tables(&c);
    ra__cache_carve(&a, &c);
    c.d.layout.weights = NULL;         /* the tables have them */
    if (!c.cd.watchdog_ns) c.cd.watchdog_ns = RA__QUIET_NS;
    if (!c.cd.quiesce_ns) c.cd.quiesce_ns = RA__QUIET_NS / 2;
    c.agreed[0] = ra__cache_agree(&c, d);
    made = (ra_cache *)(void *)c.base;
    *made = c;
    if (c.has_transport && ra__cache_message(made) > (int64_t)c.tp.max_msg) {
        s = ra__refuse(e, RA_E_TRANSPORT, "transport.max_msg",
                       "is less than # bytes, of a message: lower cache.new_tokens",
                       ra__cache_message(made));
        (void)ra_cache_destroy(made);
        return s;
    }
    if (c.has_transport && c.tp.reg && c.tp.reg(c.tp.ctx, c.base, (size_t)c.bytes, &made->mr))
        made->mr = NULL;
    *out = made;
    return RA_OK;
}

/* -------------------------------------------------------------------------- a call */
static ra_status ra__cache_check_counts(ra_cache *c, const int64_t *cached, const int64_t *fresh) {
    int64_t sum = 0;
    if (!cached) return ra__refuse(&c->why, RA_E_NULL, "cached", "is required", 0);
    if (!fresh) return ra__refuse(&c->why, RA_E_NULL, "fresh", "is required", 0);
    for (int32_t b = 0; b < c->d.sequences; b++) {
        if (cached[b] < 0 || cached[b] > c->d.kv_tokens)
            return ra__refuse(&c->why, RA_E_RANGE, "cached", "# is not in 0..kv_tokens", cached[b]);
        if (fresh[b] < 0 || fresh[b] > c->d.tokens)
            return ra__refuse(&c->why, RA_E_RANGE, "fresh", "# is not in 0..tokens", fresh[b]);
        if (cached[b] + fresh[b] > c->d.kv_tokens)
            return ra__refuse(&c->why, RA_E_RANGE, "fresh",
                              "and cached tokens of a sequence are # together, above kv_tokens",
                              cached[b] + fresh[b]);
        sum += fresh[b];
    }
    if (sum > c->most_rows)
        return ra__refuse(&c->why, RA_E_RANGE, "fresh", "has # tokens, above cache.new_tokens",
                          sum);
    return RA_OK;
}

/* Rows of all ranks, and which of them are here. */
static void ra__cache_rows_of(ra_cache *c) {
    int64_t all = 0, own = 0;
    memset(c->rank_rows, 0, (size_t)c->ranks * sizeof *c->rank_rows);
    for (int32_t b = 0; b < c->d.sequences; b++) {
        c->all_at[b] = all;
        c->own_at[b] = own;
        for (int64_t i = 0; i < c->fresh[b]; i++) {
            const int64_t p = c->cached[b] + i;
            const int32_t r = c->lane_owner[ra__lane_of(c, p)];
            c->all_pos[all++] = (int32_t)p;
            c->rank_rows[r]++;
            if (r == c->rank || c->cd.queries == RA_QUERIES_ALL) c->own_pos[own++] = (int32_t)p;
        }
    }
    c->all_at[c->d.sequences] = c->rows = all;
    c->own_at[c->d.sequences] = c->own_rows = own;
}

/* Rows of the longest sequence of the call on this rank. */
static int64_t ra__cache_longest(const ra_cache *c) {
    int64_t most = 0;
    for (int32_t b = 0; b < c->d.sequences; b++)
        most = ra__max(most, c->own_at[b + 1] - c->own_at[b]);
    return most;
}

/* Bytes of the message of keys of a rank: K of all rows, then V. */
static int64_t ra__keys_length(const ra_cache *c, int32_t rank, int64_t *rows) {
    *rows = 0;
    for (int32_t b = 0; b < c->d.sequences; b++)
        *rows += ra__rank_keys(c, rank, c->fresh[b] ? c->cached[b] + c->fresh[b] : 0);
    return RA__FRAME_BYTES + ra__round_up(*rows * ra__key_bytes(&c->d), 64) + 64;
}

/* PASS_KV if that moves fewer bytes and there is memory for it. Every rank comes to the same. */
static int32_t ra__cache_way(const ra_cache *c) {
    double q, part = 0, keys = 0;
    if (c->ranks == 1 || c->cd.queries == RA_QUERIES_ALL || c->cd.way == RA_INFER_PASS_Q)
        return RA_INFER_PASS_Q;
    if (c->cd.way == RA_INFER_PASS_KV) return RA_INFER_PASS_KV;
    for (int32_t r = 0; r < c->ranks; r++) {
        int64_t rows, bytes = ra__keys_length(c, r, &rows);
        if (bytes > RA__FRAME_BYTES + 64 + c->most_keys || bytes > (int64_t)c->tp.max_msg)
            return RA_INFER_PASS_Q;
        keys += (double)rows;
        part += (double)ra__rank_trees(c, r) * (double)(c->rows - c->rank_rows[r]);
    }
    q = (double)c->rows * (c->ranks - 1) * (double)ra__query_bytes(&c->d) +
        part * 4.0 * (double)ra__partial_floats(&c->d);
    keys *= (c->ranks - 1) * (double)ra__key_bytes(&c->d);
    return keys < q ? RA_INFER_PASS_KV : RA_INFER_PASS_Q;
}

static int64_t ra__part_length(const ra_cache *c, int32_t rank, int64_t rows) {
    return RA__FRAME_BYTES + rows * 4 * ra__partial_floats(&c->d) * ra__rank_trees(c, rank);
}

/* Adds a swap unless both its messages are empty. */
static void ra__swap_add(ra_cache *c, ra__swap s) {
    if (!s.send_len) s.to = RA_NO_PEER;
    if (!s.recv_len) s.from = RA_NO_PEER;
    if (s.to == RA_NO_PEER) s.sent = RA__SWAP_DONE;
    if (s.from == RA_NO_PEER) s.received = RA__SWAP_DONE;
    c->swap[c->swaps++] = s;
}

/* Messages of a call, in an order that is the same on all ranks: swap number i of one is swap
 * number i of its peers. */
static void ra__cache_swaps(ra_cache *c) {
    const int own = c->cd.queries == RA_QUERIES_OWN;
    const int64_t q = ra__query_bytes(&c->d);
    int64_t rows;
    c->swaps = 0;
    for (int32_t s = 1; s < c->ranks && own; s++) {
        ra__swap x;
        memset(&x, 0, sizeof x);
        x.to = (c->rank + s) % c->ranks;
        x.from = (c->rank + c->ranks - s) % c->ranks;
        if (c->way == RA_INFER_PASS_KV) {
            x.kind = RA__FRAME_KV;
            x.send = c->kv_send;
            x.recv = c->kv_recv[s % 2];
            x.recv_after = s > 2 ? s - 1 : 0;
            x.send_len = ra__keys_length(c, c->rank, &rows);
            if (!rows || !c->rank_rows[x.to]) x.send_len = 0;
            x.recv_len = ra__keys_length(c, x.from, &rows);
            if (!rows || !c->rank_rows[c->rank]) x.recv_len = 0;
        } else {
            x.kind = RA__FRAME_Q;
            x.send = c->q_send;
            x.recv = c->q_recv[x.from];
            if (c->rank_rows[c->rank]) x.send_len = RA__FRAME_BYTES + c->rank_rows[c->rank] * q;
            if (c->rank_rows[x.from]) x.recv_len = RA__FRAME_BYTES + c->rank_rows[x.from] * q;
        }
        ra__swap_add(c, x);
    }
    for (int32_t s = 1; s < c->ranks && c->way == RA_INFER_PASS_Q; s++) {
        ra__swap x;
        memset(&x, 0, sizeof x);
        x.kind = RA__FRAME_PART;
        x.to = (c->rank + c->ranks - s) % c->ranks;
        x.from = (c->rank + s) % c->ranks;
        x.send = own ? c->part_send[x.to] : c->result[c->rank];
        x.recv = c->result[x.from];
        x.send_after = 1;
        rows = own ? c->rank_rows[x.to] : c->rows;
        if (rows) x.send_len = ra__part_length(c, c->rank, rows);
        if (c->own_rows) x.recv_len = ra__part_length(c, x.from, c->own_rows);
        ra__swap_add(c, x);
    }
    c->stages = c->way == RA_INFER_PASS_KV ? c->ranks + 1 : 2;
}

/* 1: this sequence takes the form of decoding. */
static int ra__cache_few(const ra_cache *c, int32_t b) {
    if (!c->few_tokens) return 0;
    return c->cd.form == RA_FORM_SAME || c->fresh[b] <= c->few_tokens;
}

/* Spans of the longest lane of a sequence. */
static int64_t ra__cache_spans(const ra_cache *c, int32_t b) {
    return ra__max(1, ra__ceil_div(ra__lane_keys(c, 0, c->cached[b] + c->fresh[b]),
                                   RA__LEAF * RA__SPAN));
}

static int64_t ra__most_rank_lanes(const ra_cache *c) {
    int64_t lanes = 0;
    for (int32_t r = 0; r < c->ranks; r++)
        lanes = ra__max(lanes, c->lane_first[r + 1] - c->lane_first[r]);
    return lanes;
}

/* Slots for the spans of sequences in the form of decoding, as far as there are any. */
static void ra__cache_share_slots(ra_cache *c) {
    const int64_t lanes = ra__most_rank_lanes(c);
    int64_t used = 0;
    for (int32_t b = 0; b < c->d.sequences; b++) {
        const int64_t n = lanes * ra__cache_spans(c, b);
        c->slot[b] = -1;
        if (!c->fresh[b] || !ra__cache_few(c, b) || c->fresh[b] > c->few_tokens || n < 2 ||
            used + n > c->slots)
            continue;
        c->slot[b] = used;
        used += n;
    }
}

static ra_status ra__cache_begin(ra_cache *c, const ra_tensors *t, const int64_t *cached,
                                 const int64_t *fresh, int64_t deadline_ns) {
    const ra_desc *d = &c->d;
    ra_error *e = &c->why;
    ra__work w;
    ra__view kv[2];
    int64_t rows[2], n;
    uint64_t h = 14695981039346656037u;
    ra_status s = ra__cache_check_counts(c, cached, fresh);
    if (s) return s;
    if (!t) return ra__refuse(e, RA_E_NULL, "t", "is required", 0);
    if (deadline_ns < 0) return ra__refuse(e, RA_E_RANGE, "deadline_ns", "# is negative",
                                           deadline_ns);
    if (ra__positions_set(&t->q_pos))
        return ra__refuse(e, RA_E_SHAPE, "t.q_pos", "must be {0}: the counts say it", 0);
    if (ra__positions_set(&t->k_pos))
        return ra__refuse(e, RA_E_SHAPE, "t.k_pos", "must be {0}: the counts say it", 0);
    memcpy(c->cached, cached, (size_t)d->sequences * sizeof *cached);
    memcpy(c->fresh, fresh, (size_t)d->sequences * sizeof *fresh);
    ra__cache_rows_of(c);
    c->way = ra__cache_way(c);
    for (int32_t r = 0; r < c->ranks && c->way == RA_INFER_PASS_KV; r++)   /* alike on all ranks */
        if (ra__keys_length(c, r, &n) > (int64_t)c->tp.max_msg)
            return ra__refuse(e, RA_E_TRANSPORT, "transport.max_msg",
                              "is less than a message of # rows of keys", n);
    memset(&w, 0, sizeof w);
    rows[0] = ra__cache_longest(c);
    rows[1] = ra_cache_rows(c);
    s = ra__check_tensors(d, t, rows, &w, kv, e);
    if (!s) s = ra__check_outputs(d, t, rows[0], &w, e);
    if (!s) s = ra__check_forward(d, t, rows, e);
    if (s) return s;
    c->t = *t;
    c->q = w.q;
    c->o = w.o;
    c->lse = w.lse;
    c->k = kv[0];
    c->v = kv[1];
    for (int32_t b = 0; b < d->sequences; b++)
        h = ra__hash_i64(ra__hash_i64(h, cached[b]), fresh[b]);
    if (d->scores & RA_SCORE_ALIBI) h = ra__hash_array(h, t->alibi, d->q_heads, 4);
    if (d->scores & RA_SCORE_SINKS) h = ra__hash_array(h, t->sinks, d->q_heads, 4);
    c->agreed[1] = h;
    c->deadline = deadline_ns;
    ra__store_i64(&c->call, c->call + 1);
    ra__cache_swaps(c);
    ra__cache_share_slots(c);
    c->ran = 0;
    ra__store_i32(&c->stage, 0);
    ra__store_i32(&c->open, 0);
    ra__store_i64(&c->progress_ns, ra_now_ns());
    ra__store_i64(&c->looked_ns, ra_now_ns());
    ra__store_i32(&c->state, RA_RING_RUNNING);
    return RA_OK;
}

/* -------------------------------------------------------------------------- failure */
static void ra__cache_abort(ra_cache *c, ra_status why) {
    if (c->has_transport && c->tp.abort && ra__cas_i32(&c->aborted, 0, 1))
        (void)c->tp.abort(c->tp.ctx, why);
}

/* The first failure of a call wins. Returns the status that all get. */
static ra_status ra__cache_fail(ra_cache *c, ra_status s, const char *field, const char *text,
                                int64_t value) {
    if (ra__load_i32(&c->cancelled)) s = RA_E_CANCELLED;
    if (ra__cas_i32(&c->state, RA_RING_RUNNING, RA_RING_FAILED)) {
        (void)ra__refuse(&c->why, s, field, text, value);
        ra__store_i32(&c->failed, s);
        ra__cache_abort(c, s);
    }
    return ra__load_i32(&c->failed) ? ra__load_i32(&c->failed) : s;
}

static ra_status ra__cache_code(int code) {
    return code <= RA_E_MISMATCH && code >= RA_E_UNSAFE ? code : RA_E_IO;
}

/* A code of the transport about a message to or from a peer. */
static ra_status ra__cache_op_failed(ra_cache *c, int code, int32_t peer) {
    const char *text = "the transport failed on a message of rank #";
    if (code == RA_E_PEER) text = "rank # is gone or silent";
    if (code == RA_E_TRUNC) text = "a message of rank # has another length: do counts agree?";
    if (code == RA_E_ABORTED) text = "another rank failed or was cancelled; heard of rank #";
    if (code == RA_E_TIMEOUT) text = "the deadline passed while this rank waited for rank #";
    return ra__cache_fail(c, ra__cache_code(code), "transport", text, peer);
}

/* The peer of the first message that is due. */
static int32_t ra__cache_awaits(const ra_cache *c) {
    for (int32_t i = 0; i < c->swaps; i++) {
        if (c->swap[i].received != RA__SWAP_DONE) return c->swap[i].from;
        if (c->swap[i].sent != RA__SWAP_DONE) return c->swap[i].to;
    }
    return RA_NO_PEER;
}

static ra_status ra__cache_alarm(ra_cache *c) {
    const int64_t now = ra_now_ns(), looked = ra__load_i64(&c->looked_ns);
    ra__store_i64(&c->looked_ns, now);
    if (ra__load_i32(&c->failed)) return ra__load_i32(&c->failed);
    if (ra__load_i32(&c->cancelled))
        return ra__cache_fail(c, RA_E_CANCELLED, "cache", "ra_infer_cancel was called in call #",
                              c->call);
    if (c->deadline && now > c->deadline)
        return ra__cache_op_failed(c, RA_E_TIMEOUT, ra__cache_awaits(c));
    if (!c->has_transport || ra__load_i32(&c->open) ||
        now - ra__load_i64(&c->progress_ns) <= c->cd.watchdog_ns)
        return RA_OK;
    if (now - looked <= c->cd.watchdog_ns)
        return ra__cache_op_failed(c, RA_E_PEER, ra__cache_awaits(c));
    ra__store_i64(&c->progress_ns, now);       /* nobody waited while nobody looked */
    return RA_OK;
}

/* -------------------------------------------------------------------------- messages */
static ra__frame ra__cache_frame(const ra_cache *c, int32_t kind, int32_t origin, int64_t length) {
    ra__frame f;
    memset(&f, 0, sizeof f);
    f.magic = RA__MAGIC;
    f.abi = RA_TRANSPORT_ABI;
    f.pass = c->call;
    f.hash = c->agreed[0];
    f.parts = c->agreed[1];
    f.length = length;
    f.origin = origin;
    f.kind = kind;
    f.check = ra__hash(14695981039346656037u, &f, offsetof(ra__frame, check));
    return f;
}

static ra_status ra__cache_check_frame(ra_cache *c, const ra__swap *x) {
    const ra__frame due = ra__cache_frame(c, x->kind, x->from, x->recv_len);
    ra__frame f;
    memcpy(&f, x->recv, sizeof f);
    if (f.magic != due.magic || f.abi != due.abi ||
        f.check != ra__hash(14695981039346656037u, &f, offsetof(ra__frame, check)))
        return ra__cache_fail(c, RA_E_PROTO, "transport", "a frame of rank # is damaged", x->from);
    if (f.hash != due.hash)
        return ra__cache_fail(c, RA_E_MISMATCH, "d",
                              "rank # has another descriptor or ra_cache_desc", x->from);
    if (f.parts != due.parts)
        return ra__cache_fail(c, RA_E_MISMATCH, "cached",
                              "or fresh, alibi or sinks of rank # differ from ours", x->from);
    if (memcmp(&f, &due, sizeof f))
        return ra__cache_fail(c, RA_E_PROTO, "transport", "a frame of rank # is not the one due",
                              x->from);
    return RA_OK;
}

static void ra__cache_put_frame(const ra_cache *c, uint8_t *message, int32_t kind, int64_t length) {
    const ra__frame f = ra__cache_frame(c, kind, c->rank, length);
    memcpy(message, &f, sizeof f);
}

/* Packed rows of `heads` heads. */
static void ra__cache_pack(uint8_t *to, ra__view v, int64_t rows, int32_t heads, int64_t bytes) {
    for (int64_t i = 0; i < rows; i++)
        for (int32_t h = 0; h < heads; h++, to += bytes)
            memcpy(to, v.data + i * v.token + h * v.head, (size_t)bytes);
}

static void ra__cache_pack_q(ra_cache *c) {
    const int64_t head = ra__row_bytes(c->d.q_dtype, c->d.k_dim), row = ra__query_bytes(&c->d);
    for (int32_t b = 0; b < c->d.sequences; b++)
        ra__cache_pack(c->q_send + RA__FRAME_BYTES + c->own_at[b] * row,
                       ra__view_at(c->q, b, 0, 0), c->own_at[b + 1] - c->own_at[b], c->d.q_heads,
                       head);
    ra__cache_put_frame(c, c->q_send, RA__FRAME_Q, RA__FRAME_BYTES + c->own_rows * row);
}

static void ra__cache_pack_keys(ra_cache *c) {
    const ra_desc *d = &c->d;
    const int64_t k = ra__row_bytes(d->k_dtype, d->k_dim), v = ra__row_bytes(d->v_dtype, d->v_dim);
    uint8_t *to = c->kv_send + RA__FRAME_BYTES;
    int64_t all, length = ra__keys_length(c, c->rank, &all);
    uint8_t *values = to + ra__round_up(all * d->kv_heads * k, 64);
    for (int32_t b = 0; b < d->sequences; b++)
        for (int32_t l = c->lane_first[c->rank]; l < c->lane_first[c->rank + 1]; l++) {
            const int64_t row = (l - c->lane_first[c->rank]) * c->lane_rows;
            const int64_t n = ra__lane_keys(c, l, c->fresh[b] ? c->cached[b] + c->fresh[b] : 0);
            ra__cache_pack(to, ra__view_at(c->k, b, row, 0), n, d->kv_heads, k);
            to += n * d->kv_heads * k;
            if (d->v_in_k) continue;
            ra__cache_pack(values, ra__view_at(c->v, b, row, 0), n, d->kv_heads, v);
            values += n * d->kv_heads * v;
        }
    ra__cache_put_frame(c, c->kv_send, RA__FRAME_KV, length);
}

/* Queries of a rank to their places among all rows. */
static void ra__cache_place_q(ra_cache *c, int32_t rank, const uint8_t *from) {
    const int64_t row = ra__query_bytes(&c->d);
    for (int64_t i = 0; i < c->rows; i++) {
        if (c->lane_owner[ra__lane_of(c, c->all_pos[i])] != rank) continue;
        memcpy(c->q_all + i * row, from, (size_t)row);
        from += row;
    }
}

static float *ra__part_o(const ra_cache *c, ra__partials p, int64_t tree) {
    return p.data + tree * p.rows * ra__partial_floats(&c->d);
}

static float *ra__part_lse(const ra_cache *c, ra__partials p, int64_t tree) {
    return ra__part_o(c, p, tree) + p.rows * c->d.q_heads * c->d.v_dim;
}

static ra__partials ra__result_of(const ra_cache *c, int32_t rank) {
    ra__partials p;
    p.data = (float *)(void *)(c->result[rank] + RA__FRAME_BYTES);
    p.rows = c->own_rows;
    return p;
}

/* Partial results of a rank's rows, out of those of all rows. */
static void ra__cache_pack_part(const ra_cache *c, int32_t rank, ra__partials to) {
    const int64_t o = c->d.q_heads * c->d.v_dim, lse = c->d.q_heads;
    ra__partials all;
    all.data = (float *)(void *)c->part_out;
    all.rows = c->rows;
    for (int32_t s = 0; s < ra__rank_trees(c, c->rank); s++) {
        int64_t n = 0;
        for (int64_t i = 0; i < c->rows; i++) {
            if (c->lane_owner[ra__lane_of(c, c->all_pos[i])] != rank) continue;
            memcpy(ra__part_o(c, to, s) + n * o, ra__part_o(c, all, s) + i * o, (size_t)o * 4);
            memcpy(ra__part_lse(c, to, s) + n * lse, ra__part_lse(c, all, s) + i * lse,
                   (size_t)lse * 4);
            n++;
        }
    }
}

/* After the only stage of PASS_Q that computes. */
static void ra__cache_hand_out(ra_cache *c) {
    if (c->cd.queries == RA_QUERIES_ALL) {
        ra__cache_put_frame(c, c->result[c->rank], RA__FRAME_PART,
                            ra__part_length(c, c->rank, c->rows));
        return;
    }
    for (int32_t r = 0; r < c->ranks; r++) {
        ra__partials to = ra__result_of(c, c->rank);
        if (!c->rank_rows[r]) continue;
        to.rows = c->rank_rows[r];
        if (r != c->rank) to.data = (float *)(void *)(c->part_send[r] + RA__FRAME_BYTES);
        ra__cache_pack_part(c, r, to);
        if (r == c->rank) continue;
        ra__cache_put_frame(c, c->part_send[r], RA__FRAME_PART,
                            ra__part_length(c, c->rank, to.rows));
    }
}

/* Under comm: a message has come. */
static ra_status ra__swap_came(ra_cache *c, ra__swap *x) {
    ra_status s = ra__cache_check_frame(c, x);
    if (s) return s;
    x->received = RA__SWAP_DONE;
    if (x->kind == RA__FRAME_Q) ra__cache_place_q(c, x->from, x->recv + RA__FRAME_BYTES);
    return RA_OK;
}

/* The op of one side of a swap, set when it is first listed. */
static ra_transport_op *ra__swap_op(ra_cache *c, int32_t i, int sending) {
    ra__swap *x = &c->swap[i];
    ra_transport_op *op = sending ? &x->out : &x->in;
    int32_t *state = sending ? &x->sent : &x->received;
    const uint64_t tag = (uint64_t)(c->call * 64 + i % 64);
    if (*state != RA__SWAP_IDLE) return op;
    memset(op, 0, sizeof *op);
    op->kind = sending ? RA_MSG_SEND : RA_MSG_RECV;
    op->peer = sending ? x->to : x->from;
    op->tag = c->tp.tag_bits >= 64 ? tag : tag & (((uint64_t)1 << c->tp.tag_bits) - 1);
    op->buf = sending ? x->send : x->recv;
    op->len = (size_t)(sending ? x->send_len : x->recv_len);
    op->mr = c->mr;
    *state = RA__SWAP_POSTED;
    return op;
}

/* Ops that are posted or may be: receives first, at most half of max_ops of each kind. */
static int ra__cache_list(ra_cache *c) {
    const int32_t stage = ra__load_i32(&c->stage);
    int n = 0;
    for (int sending = 0; sending < 2; sending++) {
        int room = (int)(c->tp.max_ops / 2);
        for (int32_t i = 0; i < c->swaps && room > 0; i++) {
            ra__swap *x = &c->swap[i];
            const int32_t state = sending ? x->sent : x->received;
            if (state == RA__SWAP_DONE) continue;
            if ((sending ? x->send_after : x->recv_after) > stage) break;
            c->list[n++] = ra__swap_op(c, i, sending);
            room--;
        }
    }
    return n;
}

/* Level 1: posts, polls, and looks at what is done. > 0 something moved, < 0 failed. */
static int ra__cache_drive(ra_cache *c) {
    int n = ra__cache_list(c), idle = 0, moved = 0, code = RA_OK;
    for (int i = 0; i < n; i++) idle |= c->list[i]->state == RA_MSG_IDLE;
    if (idle) code = c->tp.post(c->tp.ctx, c->list, n);
    if (code >= 0) code = c->tp.poll(c->tp.ctx, c->list, n);
    if (code < 0) return ra__cache_op_failed(c, code, ra__cache_awaits(c));
    for (int32_t i = 0; i < c->swaps; i++) {
        ra__swap *x = &c->swap[i];
        for (int sending = 0; sending < 2; sending++) {
            const ra_transport_op *op = sending ? &x->out : &x->in;
            if ((sending ? x->sent : x->received) != RA__SWAP_POSTED) continue;
            if (op->state < 0) return ra__cache_op_failed(c, op->state, op->peer);
            if (op->state != RA_MSG_DONE) continue;
            if (op->done && op->done != op->len)
                return ra__cache_op_failed(c, RA_E_TRUNC, op->peer);
            moved = 1;
            if (sending) x->sent = RA__SWAP_DONE;
            else if (ra__swap_came(c, x)) return ra__load_i32(&c->failed);
        }
    }
    return moved;
}

/* Level 0: the next swap, once both sides may move. */
static int ra__cache_exchange(ra_cache *c) {
    ra__swap *x = &c->swap[c->ran];
    const int32_t stage = ra__load_i32(&c->stage);
    int64_t until = ra__add_sat(ra_now_ns(), c->cd.watchdog_ns);
    int code, late = !c->deadline || until < c->deadline;
    if (c->ran == c->swaps || x->send_after > stage || x->recv_after > stage) return 0;
    c->ran++;
    if (x->to == RA_NO_PEER && x->from == RA_NO_PEER) return 1;
    if (!late) until = c->deadline;
    const ra_transport_op *out = x->to == RA_NO_PEER ? NULL : ra__swap_op(c, c->ran - 1, 1);
    const ra_transport_op *in = x->from == RA_NO_PEER ? NULL : ra__swap_op(c, c->ran - 1, 0);
    code = c->tp.sendrecv(c->tp.ctx, x->to, out ? out->buf : NULL, out ? out->len : 0, x->from,
                          in ? in->buf : NULL, in ? in->len : 0, in ? in->tag : out->tag, until);
    if (code == RA_E_TIMEOUT && late) code = RA_E_PEER;
    if (code) return ra__cache_op_failed(c, code, in ? x->from : x->to);
    x->sent = RA__SWAP_DONE;
    if (in && ra__swap_came(c, x)) return ra__load_i32(&c->failed);
    return 1;
}

/* Swaps whose messages have all come: the first so many. */
static int32_t ra__swaps_in(const ra_cache *c) {
    int32_t n = 0;
    while (n < c->swaps && c->swap[n].received == RA__SWAP_DONE) n++;
    return n;
}

/* -------------------------------------------------------------------------- items
 * Functions named _some go on with the item of a desk until *left multiply-adds are used up: RA_OK
 * if they are done, RA_AGAIN if not. */
static int32_t ra__item_heads(const ra_cache *c, const ra__cache_item *x) {
    return x->few ? c->d.q_heads : c->group;
}

/* A packed one in scratch. */
static ra__partial ra__part_packed(const ra_cache *c, const ra__cache_item *x, float *data) {
    ra__partial p;
    p.step = ra__item_heads(c, x);
    p.o = data;
    p.lse = data + x->rows * p.step * c->d.v_dim;
    return p;
}

static void ra__part_clear(const ra_cache *c, const ra__cache_item *x, ra__partial p) {
    const int32_t heads = ra__item_heads(c, x);
    for (int64_t i = 0; i < x->rows; i++) {
        memset(p.o + i * p.step * c->d.v_dim, 0, (size_t)(heads * c->d.v_dim) * sizeof(float));
        for (int32_t h = 0; h < heads; h++) p.lse[i * p.step + h] = ra__neg_inf();
    }
}

static void ra__part_merge(const ra_cache *c, const ra__cache_item *x, ra__partial into,
                           ra__partial from) {
    for (int64_t i = 0; i < x->rows; i++)
        ra_merge(into.o + i * into.step * c->d.v_dim, into.lse + i * into.step,
                 from.o + i * from.step * c->d.v_dim, from.lse + i * from.step,
                 ra__item_heads(c, x), c->d.v_dim);
}

/* A call of one item: `heads` KV heads from `head` on against rows [row[0], row[1]) of a lane. */
static void ra__lane_call(const ra_cache *c, ra__cache_desk *y, int32_t lane, const int64_t row[2],
                          ra__partial out, ra_desc *d) {
    const ra__query_rows *q = &c->queries;
    const ra__cache_item *x = &y->x;
    const int32_t local = lane - c->lane_first[c->keys.rank], head = x->head + x->at_head;
    const int64_t at = q->at[x->b] + x->row, q_head = head * (int64_t)c->group;
    const int64_t first = row[0] + (c->keys.row ? c->keys.row[x->b * c->lanes + local]
                                                : local * c->lane_rows);
    const ra__view qv = q->packed ? ra__view_at(q->v, 0, at, q_head)
                                  : ra__view_at(q->v, x->b, x->row, q_head);
    const int32_t kb = c->keys.row ? 0 : x->b;
    const ra__view k = ra__view_at(c->keys.k, kb, first, head);
    const ra__view v = ra__view_at(c->keys.v, kb, first, head);
    ra_tensors *t = &y->t;
    memset(t, 0, sizeof *t);
    d->tokens = x->rows;
    d->kv_tokens = row[1] - row[0];
    t->q.data = qv.data;
    t->q.token_stride = qv.token;
    t->q.head_stride = qv.head;
    t->k.data = k.data;
    t->k.token_stride = k.token;
    t->k.head_stride = k.head;
    if (!d->v_in_k) {
        t->v.data = v.data;
        t->v.token_stride = v.token;
        t->v.head_stride = v.head;
    }
    t->o.data = out.o + x->at_head * c->group * (int64_t)c->d.v_dim;
    t->o.token_stride = out.step * c->d.v_dim * (int64_t)sizeof(float);
    t->o.head_stride = c->d.v_dim * (int64_t)sizeof(float);
    t->lse.data = out.lse + x->at_head * c->group;
    t->lse.token_stride = out.step * (int64_t)sizeof(float);
    t->lse.head_stride = (int64_t)sizeof(float);
    t->q_pos.array = q->pos + at;
    t->q_pos.count = x->rows;
    t->k_pos.count = d->kv_tokens;
    if (c->lanes > 1) {
        t->k_pos.array = c->pos + lane * c->lane_rows + row[0];
    } else {
        y->run.first = row[0];
        y->run.count = d->kv_tokens;
        y->run.stride = 1;
        t->k_pos.runs = &y->run;
        t->k_pos.count = 1;
    }
    if (c->d.scores & RA_SCORE_ALIBI) t->alibi = c->t.alibi + q_head;
}

/* Multiply-adds of a row of one head against one key. */
static int64_t ra__cache_dims(const ra_cache *c) {
    return c->d.k_dim + (int64_t)c->d.v_dim;
}

/* Rows [row[0], row[1]) of a lane in the form of prefill, in one online softmax. */
static ra_status ra__tiles_some(const ra_cache *c, ra__cache_desk *y, int32_t lane,
                                const int64_t row[2], ra__partial out, int64_t *left) {
    const int64_t tile = RA_BLOCK_TOKENS * RA_BLOCK_TOKENS * ra__cache_dims(c);
    int64_t work = ra__max(1, *left / tile) * RA__TILE_WORK;
    const int64_t all = work;
    if (*left <= 0) return RA_AGAIN;
    if (!y->x.walking) {
        ra_desc d = c->tile;
        ra__lane_call(c, y, lane, row, out, &d);
        ra_status s = ra__attend_walk(&d, &y->t, y->workspace, c->tile_kernel, &y->a);
        if (s) return s;
        y->x.walking = 1;
    }
    const int done = ra__local_walk_some(&y->a.c, &y->a.walk, &work);
    *left -= ra__ceil_div((all - work) * tile, RA__TILE_WORK);
    if (!done) return RA_AGAIN;
    y->x.walking = 0;
    return RA_OK;
}

/* Rows [row[0], row[1]) of a lane in the form of decoding, in one online softmax; heads are cut off
 * only where all of them together are more than a step. */
static ra_status ra__leaf_some(const ra_cache *c, ra__cache_desk *y, int32_t lane,
                               const int64_t row[2], ra__partial out, int64_t *left) {
    ra__cache_item *x = &y->x;
    const int64_t price = x->rows * c->group * (row[1] - row[0]) * ra__cache_dims(c);
    while (x->at_head < c->d.kv_heads) {
        int64_t heads = c->d.kv_heads - x->at_head;
        ra_desc d = c->few;
        if (*left <= 0 || (heads * price > *left && *left < RA__STEP_WORK)) return RA_AGAIN;
        heads = ra__max(1, ra__min(heads, *left / price));
        d.kv_heads = (int32_t)heads;
        d.q_heads = (int32_t)heads * c->group;
        ra__lane_call(c, y, lane, row, out, &d);
        ra_status s = ra__attend_decode(&d, &y->t, y->workspace, c->decode_kernel);
        if (s) return s;
        *left -= heads * price;
        x->at_head += (int32_t)heads;
    }
    x->at_head = 0;
    return RA_OK;
}

/* What it costs to clear the partial result of an item, or to merge two. */
static int64_t ra__part_work(const ra_cache *c, const ra__cache_item *x) {
    return x->rows * ra__item_heads(c, x) * ((int64_t)c->d.v_dim + 1);
}

/* A span of a lane: its leaves one after the other. */
static ra_status ra__span_some(const ra_cache *c, ra__cache_desk *y, int32_t lane, int64_t span,
                               ra__partial out, int64_t *left) {
    ra__cache_item *x = &y->x;
    const int64_t from = ra__lane_keys(c, lane, x->lo), to = ra__lane_keys(c, lane, x->hi);
    const int64_t first = ra__max(span * RA__SPAN, from / RA__LEAF);
    const int64_t last = ra__min((span + 1) * RA__SPAN, ra__ceil_div(to, RA__LEAF));
    if (first >= last || from >= to) {
        ra__part_clear(c, x, out);
        return RA_OK;
    }
    for (x->at_leaf = ra__max(x->at_leaf, first); x->at_leaf < last; x->at_leaf++) {
        const int64_t row[2] = { x->at_leaf * RA__LEAF, ra__min((x->at_leaf + 1) * RA__LEAF, to) };
        ra__partial part = x->at_leaf > first ? ra__part_packed(c, x, y->part[0]) : out;
        ra_status s = ra__leaf_some(c, y, lane, row, part, left);
        if (s) return s;
        if (x->at_leaf > first) ra__part_merge(c, x, out, part);
    }
    return RA_OK;
}

static float *ra__span_slot(const ra_cache *c, int32_t b, int32_t local, int64_t span) {
    return c->slot_data + (c->slot[b] + local * ra__cache_spans(c, b) + span) * c->slot_floats;
}

/* A span of a lane that is in its slot. */
static ra_status ra__slot_some(const ra_cache *c, ra__cache_desk *y, int32_t lane, ra__partial out,
                               int64_t *left) {
    const ra__cache_item *x = &y->x;
    const int32_t local = lane - c->lane_first[c->keys.rank];
    if (*left <= 0) return RA_AGAIN;
    *left -= x->rows * ra__partial_floats(&c->d);
    if (x->at_span == 0) ra__part_clear(c, x, out);
    ra__part_merge(c, x, out, ra__part_packed(c, x, ra__span_slot(c, x->b, local, x->at_span)));
    return RA_OK;
}

/* All keys of a lane that rows of the item see. */
static ra_status ra__lane_some(const ra_cache *c, ra__cache_desk *y, int32_t lane, ra__partial out,
                               int64_t *left) {
    ra__cache_item *x = &y->x;
    const int64_t row[2] = {
        ra__lane_keys(c, lane, x->lo) / RA_BLOCK_TOKENS * RA_BLOCK_TOKENS,
        ra__lane_keys(c, lane, x->hi)
    };
    const int64_t spans = ra__cache_spans(c, x->b);
    if (row[0] >= row[1]) {
        ra__part_clear(c, x, out);
        return RA_OK;
    }
    if (!x->few) return ra__tiles_some(c, y, lane, row, out, left);
    for (; x->at_span < spans; x->at_span++, x->at_leaf = 0) {
        const int slot = c->slot[x->b] >= 0;
        ra__partial part = x->at_span ? ra__part_packed(c, x, y->part[1]) : out;
        if (*left <= 0) return RA_AGAIN;
        ra_status s = slot ? ra__slot_some(c, y, lane, out, left)
                           : ra__span_some(c, y, lane, x->at_span, part, left);
        if (s) return s;
        *left -= ra__part_work(c, x);
        if (x->at_span && !slot) ra__part_merge(c, x, out, part);
    }
    x->at_span = 0;
    return RA_OK;
}

/* The way from a subtree down to one of its lanes: to[0] is where the sum of the subtree goes, and
 * each turn to the right adds a place. Returns the number of turns; *closed: how many of the last
 * ones this lane brings to an end. */
static int32_t ra__lane_places(const ra_cache *c, const ra__cache_desk *y, ra__subtree lanes,
                               int32_t lane, ra__partial *to, int32_t *closed) {
    int32_t n = 0;
    *closed = 0;
    for (int32_t depth = 0; lanes.last - lanes.first > 1; depth++) {
        const int32_t middle = lanes.first + (lanes.last - lanes.first + 1) / 2;
        if (lane < middle) {
            lanes.last = middle;
            *closed = 0;
        } else {
            to[++n] = ra__part_packed(c, &y->x, y->part[2 + depth]);
            lanes.first = middle;
            ++*closed;
        }
    }
    return n;
}

static ra_status ra__trees_some(const ra_cache *c, ra__cache_desk *y, int64_t *left) {
    ra__cache_item *x = &y->x;
    const int64_t row = (c->queries.at[x->b] + x->row) * c->d.q_heads + x->head * (int64_t)c->group;
    const int32_t rank = c->keys.rank;
    for (; x->at_tree < ra__rank_trees(c, rank); x->at_tree++) {
        const ra__subtree lanes = c->tree[c->tree_first[rank] + x->at_tree];
        if (x->at_lane < lanes.first) x->at_lane = lanes.first;
        for (; x->at_lane < lanes.last; x->at_lane++) {
            ra__partial to[RA__TREE_DEPTH + 1];
            int32_t n, closed;
            to[0].step = c->d.q_heads;
            to[0].o = ra__part_o(c, c->out, x->at_tree) + row * c->d.v_dim;
            to[0].lse = ra__part_lse(c, c->out, x->at_tree) + row;
            n = ra__lane_places(c, y, lanes, x->at_lane, to, &closed);
            if (*left <= 0) return RA_AGAIN;
            ra_status s = ra__lane_some(c, y, x->at_lane, to[n], left);
            if (s) return s;
            *left -= (1 + closed) * ra__part_work(c, x);   /* lanes without keys cost this alone */
            for (; closed > 0; closed--, n--) ra__part_merge(c, x, to[n - 1], to[n]);
        }
    }
    return RA_OK;
}

/* Items of a sequence in the stage. */
static int64_t ra__sequence_items(const ra_cache *c, int32_t b) {
    const int64_t rows = c->queries.at[b + 1] - c->queries.at[b];
    const int32_t rank = c->keys.rank, lanes = c->lane_first[rank + 1] - c->lane_first[rank];
    if (!rows) return 0;
    if (!ra__cache_few(c, b)) return ra__ceil_div(rows, c->tile_rows) * c->d.kv_heads;
    if (c->slot[b] >= 0) return lanes * ra__cache_spans(c, b);
    return ra__ceil_div(rows, c->few_tokens);
}

/* Item n of a sequence; the cheapest rows come last. */
static ra__cache_item ra__item_at(const ra_cache *c, int32_t b, int64_t n) {
    const int64_t rows = c->queries.at[b + 1] - c->queries.at[b];
    const int32_t *pos = c->queries.pos + c->queries.at[b];
    int32_t first[4], last[4];
    int64_t step = c->tile_rows, group = n;
    ra__cache_item x;
    memset(&x, 0, sizeof x);
    x.b = b;
    x.n = n;
    x.lane = -1;
    x.few = ra__cache_few(c, b);
    if (x.few) step = c->few_tokens;
    else {
        group = ra__ceil_div(rows, step) - 1 - n / c->d.kv_heads;
        x.head = (int32_t)(n % c->d.kv_heads);
    }
    if (c->slot[b] >= 0) {
        x.lane = c->lane_first[c->keys.rank] + (int32_t)(n / ra__cache_spans(c, b));
        x.span = n % ra__cache_spans(c, b);
        group = 0;
    }
    x.row = group * step;
    x.rows = ra__min(step, rows - x.row);
    ra__mask_row(&c->d.mask, pos[x.row], c->cached[b] + c->fresh[b], first);
    ra__mask_row(&c->d.mask, pos[x.row + x.rows - 1], c->cached[b] + c->fresh[b], last);
    x.lo = c->d.mask.keep ? 0 : first[0];
    x.hi = ra__max(last[1], last[3]);
    return x;
}

/* Item n of the open stage. */
static ra__cache_item ra__item_new(const ra_cache *c, int64_t n) {
    ra__cache_item x;
    int32_t b = 0;
    memset(&x, 0, sizeof x);
    x.n = n;
    if (ra__load_i32(&c->stage) == c->stages - 1) return x;
    while (n >= ra__sequence_items(c, b)) n -= ra__sequence_items(c, b++);
    return ra__item_at(c, b, n);
}

static ra_status ra__cache_compute(ra_cache *c, ra__cache_desk *y) {
    ra__cache_item *x = &y->x;
    int64_t left = RA__STEP_WORK;
    if (x->lane >= 0) {
        float *slot = ra__span_slot(c, x->b, x->lane - c->lane_first[c->keys.rank], x->span);
        ra_status s = ra__span_some(c, y, x->lane, x->span, ra__part_packed(c, x, slot), &left);
        if (s || ra__add_i64(&c->slot_done[x->b], 1) + 1 < ra__sequence_items(c, x->b)) return s;
        x->lane = -1;                  /* this was the last span */
        x->at_leaf = 0;
    }
    return ra__trees_some(c, y, &left);
}

/* -------------------------------------------------------------------------- the end of a call */
/* Lanes [first, last) of own row n, out of the partial results of all ranks. */
static void ra__row_sum(const ra_cache *c, const ra__cache_desk *y, int64_t n,
                        ra__subtree lanes, int32_t depth, float *out) {
    const int32_t middle = lanes.first + (lanes.last - lanes.first + 1) / 2;
    const int32_t rank = c->lane_owner[lanes.first], heads = c->d.q_heads;
    const int64_t dims = (int64_t)heads * c->d.v_dim;
    const ra__subtree left = { lanes.first, middle }, right = { middle, lanes.last };
    for (int32_t i = c->tree_first[rank]; i < c->tree_first[rank + 1]; i++) {
        const ra__partials p = ra__result_of(c, rank);
        if (c->tree[i].first != lanes.first || c->tree[i].last != lanes.last) continue;
        memcpy(out, ra__part_o(c, p, i - c->tree_first[rank]) + n * dims, (size_t)dims * 4);
        memcpy(out + dims, ra__part_lse(c, p, i - c->tree_first[rank]) + n * heads,
               (size_t)heads * 4);
        return;
    }
    float *part = y->part[depth];
    ra__row_sum(c, y, n, left, depth + 1, out);
    ra__row_sum(c, y, n, right, depth + 1, part);
    ra_merge(out, out + dims, part, part + dims, heads, c->d.v_dim);
}

/* Writes own row n: row i of sequence b. */
static ra_status ra__row_write(const ra_cache *c, int32_t b, int64_t i, float *sum) {
    float *lse = sum + c->d.q_heads * c->d.v_dim;
    ra_status s = RA_OK;
    for (int32_t h = 0; h < c->d.q_heads && !s; h++, sum += c->d.v_dim) {
        ra__view o = ra__view_at(c->o, b, i, h), l = ra__view_at(c->lse, b, i, h);
        if (c->d.scores & RA_SCORE_SINKS) {
            const double sink = (double)c->t.sinks[h], was = (double)lse[h];
            const double top = sink > was ? sink : was;
            const double all = ra__exp(was - top) + ra__exp(sink - top);
            const double factor = ra__is_neg_inf(lse[h]) ? 0.0 : ra__exp(was - top) / all;
            for (int32_t j = 0; j < c->d.v_dim; j++) sum[j] = (float)((double)sum[j] * factor);
            lse[h] = ra__is_neg_inf(lse[h]) ? c->t.sinks[h] : (float)(top + ra__log(all));
        }
        if (l.data) memcpy((void *)(uintptr_t)l.data, &lse[h], sizeof lse[h]);
        s = ra_convert((void *)(uintptr_t)o.data, c->d.o_dtype, sum, RA_F32, c->d.v_dim);
    }
    return s;
}

static ra_status ra__cache_write(const ra_cache *c, const ra__cache_desk *y) {
    const ra__subtree all = { 0, c->lanes };
    const int64_t first = y->x.n * c->write_rows;
    ra_status s = RA_OK;
    int32_t b = 0;
    for (int64_t i = first; i < c->own_rows && i < first + c->write_rows && !s; i++) {
        while (i >= c->own_at[b + 1]) b++;
        ra__row_sum(c, y, i, all, 1, y->part[0]);
        s = ra__row_write(c, b, i - c->own_at[b], y->part[0]);
    }
    return s;
}

/* -------------------------------------------------------------------------- stages */
/* Under comm, before the first message: what this rank sends, and its own part of what it
 * receives. */
static void ra__cache_pack_all(ra_cache *c) {
    if (c->ranks == 1 || c->cd.queries == RA_QUERIES_ALL) return;
    if (c->way == RA_INFER_PASS_KV) {
        ra__cache_pack_keys(c);
        return;
    }
    ra__cache_pack_q(c);
    ra__cache_place_q(c, c->rank, c->q_send + RA__FRAME_BYTES);
}

/* Rows of received keys, and where they are. */
static void ra__cache_keys_of(ra_cache *c, int32_t rank, const uint8_t *message) {
    const ra_desc *d = &c->d;
    int64_t rows = 0;
    for (int32_t b = 0; b < d->sequences; b++)
        for (int32_t l = c->lane_first[rank]; l < c->lane_first[rank + 1]; l++) {
            c->key_row[b * c->lanes + l - c->lane_first[rank]] = rows;
            rows += ra__lane_keys(c, l, c->fresh[b] ? c->cached[b] + c->fresh[b] : 0);
        }
    c->keys.row = c->key_row;
    c->keys.k = ra__view_packed(message + RA__FRAME_BYTES, d->kv_heads, d->k_dim, d->k_dtype);
    c->keys.v = c->keys.k;
    if (d->v_in_k) return;
    message += RA__FRAME_BYTES + ra__round_up(rows * c->keys.k.token, 64);
    c->keys.v = ra__view_packed(message, d->kv_heads, d->v_dim, d->v_dtype);
}

/* Messages that a stage waits for: the first so many swaps. */
static int32_t ra__stage_swaps(const ra_cache *c, int32_t stage) {
    if (c->way == RA_INFER_PASS_KV) return (int32_t)ra__min(stage, c->ranks - 1);
    return stage ? c->swaps : c->cd.queries == RA_QUERIES_OWN ? c->ranks - 1 : 0;
}

/* Under comm: sets what a stage computes and opens it. */
static void ra__stage_open(ra_cache *c, int32_t stage) {
    const int own = c->way == RA_INFER_PASS_KV || c->ranks == 1 ||
                    c->cd.queries == RA_QUERIES_ALL;
    c->items = 0;
    if (stage == c->stages - 1) {
        c->items = ra__ceil_div(c->own_rows, c->write_rows);
    } else {
        c->queries.v = own ? c->q : ra__view_packed(c->q_all, c->d.q_heads, c->d.k_dim,
                                                    c->d.q_dtype);
        c->queries.packed = !own;
        c->queries.at = own ? c->own_at : c->all_at;
        c->queries.pos = own ? c->own_pos : c->all_pos;
        c->keys.rank = (c->rank + c->ranks - stage) % c->ranks;
        c->keys.row = NULL;
        c->keys.k = c->k;
        c->keys.v = c->v;
        if (stage) ra__cache_keys_of(c, c->keys.rank, c->kv_recv[stage % 2]);
        c->out = ra__result_of(c, c->keys.rank);
        if (!own) {
            c->out.data = (float *)(void *)c->part_out;
            c->out.rows = c->rows;
        }
        for (int32_t b = 0; b < c->d.sequences; b++) {
            c->slot_done[b] = 0;
            c->items += ra__sequence_items(c, b);
        }
    }
    c->opened++;
    ra__store_i64(&c->finished, 0);
    ra__store_i32(&c->open, 1);
    ra__store_i64(&c->claim, (c->opened & 0x3fffff) << 40 | c->items);
}

/* Under comm: ends the open stage if all its items are done, opens the next if its messages are
 * here. 1: something changed. */
static int ra__stage_turn(ra_cache *c) {
    const int32_t stage = ra__load_i32(&c->stage);
    if (ra__load_i32(&c->open)) {
        if (ra__load_i64(&c->finished) < c->items) return 0;
        ra__store_i32(&c->open, 0);
        if (stage == 0 && c->way == RA_INFER_PASS_Q && c->ranks > 1) ra__cache_hand_out(c);
        ra__store_i32(&c->stage, stage + 1);
        return 1;
    }
    if (stage == c->stages || ra__swaps_in(c) < ra__stage_swaps(c, stage)) return 0;
    ra__stage_open(c, stage);
    return 1;
}

/* Under comm: 1 if the call has ended well. */
static int ra__cache_complete(ra_cache *c) {
    if (ra__load_i32(&c->stage) < c->stages) return 0;
    for (int32_t i = 0; i < c->swaps; i++)
        if (c->swap[i].sent != RA__SWAP_DONE || c->swap[i].received != RA__SWAP_DONE) return 0;
    return ra__cas_i32(&c->state, RA_RING_RUNNING, RA_RING_IDLE);
}

/* A round under comm: > 0 something moved, < 0 failed. */
static int ra__cache_round(ra_cache *c) {
    int moved = 0;
    if (ra__load_i32(&c->stage) == 0 && !ra__load_i32(&c->open) && c->packed_call != c->call) {
        ra__cache_pack_all(c);
        c->packed_call = c->call;
    }
    if (c->has_transport && c->swaps)
        moved = c->tp.post ? ra__cache_drive(c) : ra__cache_exchange(c);
    if (moved < 0) return moved;
    while (ra__stage_turn(c)) moved = 1;
    if (moved) ra__store_i64(&c->progress_ns, ra_now_ns());
    return ra__cache_complete(c) ? 1 : moved;
}

/* Claims an item of the open stage: its number, or -1. */
static int64_t ra__item_claim(ra_cache *c) {
    for (;;) {
        const int64_t word = ra__load_i64(&c->claim), left = word & RA__CLAIM_ITEMS;
        if (!left) return -1;
        if (ra__cas_i64(&c->claim, word, word - 1)) return c->items - left;
    }
}

/* Takes a desk for thread ith, with an item in hand: its own with what was left there, otherwise
 * any with a new item, otherwise one whose thread does not return. *more: some desk has been left,
 * but not for long enough. */
static ra__cache_desk *ra__cache_desk_take(ra_cache *c, int ith, int *more) {
    const int32_t n = c->d.threads;
    for (int32_t i = 0; i < 2 * n; i++) {
        ra__cache_desk *y = &c->desk[(ith + i) % n];
        const int adopt = i >= n, open = ra__load_i32(&y->open);
        if (ra__load_i32(&y->busy) || (i > 0 && open != adopt)) continue;
        if (adopt) *more = 1;
        if (adopt && ra__add_i32(&y->idle, 1) + 1 < RA__PATIENT) continue;
        if (!ra__cas_i32(&y->busy, 0, 1)) continue;
        ra__store_i32(&y->idle, 0);
        if (ra__load_i32(&y->open)) return y;
        const int64_t item = ra__item_claim(c);
        if (item >= 0) {
            y->x = ra__item_new(c, item);
            ra__store_i32(&y->open, 1);
            return y;
        }
        ra__store_i32(&y->busy, 0);
    }
    return NULL;
}

/* Goes on with the item of a desk, and leaves the desk. */
static ra_status ra__cache_desk_work(ra_cache *c, ra__cache_desk *y) {
    const uint32_t mode = ra__fp_enter();
    const int last = ra__load_i32(&c->stage) == c->stages - 1;
    const ra_status s = last ? ra__cache_write(c, y) : ra__cache_compute(c, y);
    ra__fp_leave(mode);
    if (s < 0) return ra__cache_fail(c, RA_E_ENGINE, "cache", "an item ended with status #", s);
    if (s == RA_OK) ra__store_i32(&y->open, 0);
    ra__store_i32(&y->busy, 0);
    if (s == RA_OK) (void)ra__add_i64(&c->finished, 1);
    ra__store_i64(&c->progress_ns, ra_now_ns());
    return RA_AGAIN;
}

static ra_status ra__cache_step(ra_cache *c, int ith) {
    int moved = 0;
    ra_status s;
    if (ra__load_i32(&c->state) == RA_RING_IDLE) return RA_OK;
    if ((s = ra__cache_alarm(c)) != RA_OK) return s;
    if ((ith == 0 || !c->has_transport || (c->tp.caps & RA_CAP_ANY_THREAD)) &&
        ra__cas_i32(&c->comm, 0, 1)) {
        if (ra__load_i32(&c->state) == RA_RING_RUNNING) moved = ra__cache_round(c);
        ra__store_i32(&c->comm, 0);
        if (moved < 0) return moved;
    }
    if (ra__load_i32(&c->state) == RA_RING_IDLE) return RA_OK;
    ra__cache_desk *y = ith < c->d.threads ? ra__cache_desk_take(c, ith, &moved) : NULL;
    return y ? ra__cache_desk_work(c, y) : moved ? RA_AGAIN : RA_WAIT;
}

/* Once no thread is inside a failed call: tells the other ranks of the process, without waiting,
 * that this one reads nothing any more. */
static void ra__cache_part(ra_cache *c) {
    if (ra__add_i32(&c->inside, 0) || !ra__load_i32(&c->failed) ||
        !(c->tp.caps & RA_CAP_SHARED))
        return;
    if (!ra__cas_i32(&c->comm, 0, 1)) return;
    if (!c->parted) (void)c->tp.quiesce(c->tp.ctx, 1);
    c->parted = 1;
    ra__store_i32(&c->comm, 0);
}

static void ra__cache_leave(ra_cache *c) {
    if (ra__add_i32(&c->inside, -1) == 1) ra__cache_part(c);
}

RINGATTN_API ra_status ra_infer_begin(ra_cache *c, const ra_tensors *t, const int64_t *cached,
                                      const int64_t *fresh, int64_t deadline_ns) {
    if (!c) return RA_E_NULL;
    if (ra__load_i32(&c->failed)) return ra__load_i32(&c->failed);
    if (ra__add_i32(&c->inside, 0) || ra__load_i32(&c->state) == RA_RING_RUNNING)
        return ra__refuse(&c->why, RA_E_BUSY, "cache", "call # is under way", c->call);
    return ra__cache_begin(c, t, cached, fresh, deadline_ns);
}

/* A step; after a failure the first one is what all threads get. */
static ra_status ra__cache_step_any(ra_cache *c, int ith) {
    ra_status s = ra__cache_step(c, ith);
    if (s < 0 && s <= RA_E_MISMATCH) s = ra__load_i32(&c->failed) ? ra__load_i32(&c->failed)
                                                                    : RA_AGAIN;
    return s;
}

RINGATTN_API ra_status ra_infer_step(ra_cache *c, int ith) {
    if (!c) return RA_E_NULL;
    if (ith < 0) return RA_E_RANGE;
    (void)ra__add_i32(&c->inside, 1);
    const ra_status s = ra__load_i64(&c->call) ? ra__cache_step_any(c, ith) : RA_E_STATE;
    ra__cache_leave(c);
    return s;
}

/* As ra__join_begin. */
static ra_status ra__cache_join_begin(ra_cache *c, const ra_infer_job *job) {
    ra_status s = RA_WAIT;
    if (!ra__cas_i32(&c->tickets.join, 0, 1)) return RA_WAIT;
    if (ra__load_i64(&c->tickets.last) >= (int64_t)job->ticket) {
        s = RA_AGAIN;
    } else if (ra__load_i32(&c->failed)) {
        s = ra__load_i32(&c->failed);
    } else if (!ra__add_i32(&c->inside, 0) && ra__load_i32(&c->state) == RA_RING_IDLE) {
        s = ra__cache_begin(c, job->tensors, job->cached, job->fresh, job->deadline_ns);
        ra__ticket_begun(&c->tickets, (int64_t)job->ticket, s);
    }
    ra__store_i32(&c->tickets.join, 0);
    return s;
}

/* How the call of an earlier ticket ended. */
static ra_status ra__cache_join_late(ra_cache *c, int64_t ticket) {
    const ra_status s = ra__load_i32(&c->failed);
    return s ? s : ra__ticket_late(&c->tickets, ticket, &c->why);
}

RINGATTN_API ra_status ra_infer_join(ra_cache *c, const ra_infer_job *job, int ith) {
    ra_status s;
    int64_t ticket;
    if (!c || !job) return RA_E_NULL;
    s = ra__ticket_check(job->ticket, ith, &c->why);
    if (s) return s;
    ticket = (int64_t)job->ticket;
    if (ticket < ra__load_i64(&c->tickets.last)) return ra__cache_join_late(c, ticket);
    if (ticket > ra__load_i64(&c->tickets.last)) {
        s = ra__cache_join_begin(c, job);
        if (s) return s;
    }
    (void)ra__add_i32(&c->inside, 1);
    if (ra__add_i32(&c->tickets.join, 0)) {
        s = RA_WAIT;
    } else if (ra__load_i64(&c->tickets.last) != ticket) {
        s = ra__cache_join_late(c, ticket);
    } else {
        s = ra__load_i32(&c->tickets.status);
        if (!s) s = ra__cache_step_any(c, ith);
    }
    ra__cache_leave(c);
    return s;
}

/* Sleeps in the transport if that is possible, otherwise for a moment. */
static void ra__cache_wait(ra_cache *c) {
    if (c->has_transport && c->tp.wait && c->tp.post && ra__cas_i32(&c->comm, 0, 1)) {
        const int live = ra__load_i32(&c->state) == RA_RING_RUNNING && !ra__load_i32(&c->open);
        const int n = live ? ra__cache_list(c) : 0;
        const int64_t until = ra_now_ns() + (c->d.threads > 1 ? 200000 : 2000000);
        const int code = n ? c->tp.wait(c->tp.ctx, c->list, n, until) : RA_OK;
        if (code < 0) (void)ra__cache_op_failed(c, code, ra__cache_awaits(c));
        ra__store_i32(&c->comm, 0);
        if (n) return;
    }
    ra__sleep_ns(50000);
}

RINGATTN_API ra_status ra_infer(ra_cache *c, const ra_tensors *t, const int64_t *cached,
                                const int64_t *fresh, int64_t deadline_ns) {
    ra_status s = ra_infer_begin(c, t, cached, fresh, deadline_ns);
    int idle = 0;
    if (s) return s;
    while ((s = ra_infer_step(c, 0)) > 0) {
        idle = s == RA_AGAIN ? 0 : idle + 1;
        if (idle > 220) ra__cache_wait(c);
        else if (idle > 200) ra__yield();
        else if (idle) ra__pause();
    }
    return s;
}

RINGATTN_API void ra_infer_cancel(ra_cache *c) {
    if (!c) return;
    ra__store_i32(&c->cancelled, 1);
    ra__cache_abort(c, RA_E_CANCELLED);
}

RINGATTN_API const ra_error *ra_cache_error(const ra_cache *c) {
    static const ra_error none = { RA_OK, "", "" };
    return c ? &c->why : &none;
}

RINGATTN_API ra_status ra_infer_query(ra_cache *c, const int64_t *cached, const int64_t *fresh,
                                      ra_infer_report *out) {
    ra_status s;
    if (!c || !out) return RA_E_NULL;
    if (ra__load_i32(&c->failed)) return ra__load_i32(&c->failed);
    if (ra__add_i32(&c->inside, 0) || ra__load_i32(&c->state) == RA_RING_RUNNING)
        return ra__refuse(&c->why, RA_E_BUSY, "cache", "call # is under way", c->call);
    s = ra__cache_check_counts(c, cached, fresh);
    if (s) return s;
    memset(out, 0, sizeof *out);
    memcpy(c->cached, cached, (size_t)c->d.sequences * sizeof *cached);
    memcpy(c->fresh, fresh, (size_t)c->d.sequences * sizeof *fresh);
    ra__cache_rows_of(c);
    c->way = ra__cache_way(c);
    ra__cache_swaps(c);
    out->way = c->way;
    out->q_rows = c->own_rows;
    for (int32_t b = 0; b < c->d.sequences; b++)
        out->keys += ra__rank_keys(c, c->rank, cached[b] + fresh[b]);
    for (int32_t i = 0; i < c->swaps; i++) {
        const ra__swap *x = &c->swap[i];
        out->messages_out += x->to != RA_NO_PEER;
        out->messages_in += x->from != RA_NO_PEER;
        out->bytes_out += x->to == RA_NO_PEER ? 0 : x->send_len;
        out->bytes_in += x->from == RA_NO_PEER ? 0 : x->recv_len;
    }
    out->bits_any_company = c->cd.form == RA_FORM_SAME || !c->few_tokens;
    return RA_OK;
}

/* 1: the transport has an op that is not done. */
static int ra__cache_pending(const ra_cache *c) {
    int pending = 0;
    for (int32_t i = 0; i < c->swaps && c->tp.post; i++) {
        const ra__swap *x = &c->swap[i];
        pending |= x->sent == RA__SWAP_POSTED && x->out.state == RA_MSG_PENDING;
        pending |= x->received == RA__SWAP_POSTED && x->in.state == RA_MSG_PENDING;
    }
    return pending;
}

RINGATTN_API ra_status ra_cache_destroy(ra_cache *c) {
    ra_allocator a;
    if (!c) return RA_OK;
    if (ra__load_i32(&c->state) == RA_RING_RUNNING || ra__load_i32(&c->cancelled)) {
        ra__store_i32(&c->state, RA_RING_RUNNING);
        (void)ra__cache_fail(c, RA_E_CANCELLED, "cache", "was destroyed in call #", c->call);
    }
    if (ra__load_i32(&c->failed) && c->has_transport && !c->unsafe) {
        const int64_t until = ra__add_sat(ra_now_ns(), c->cd.quiesce_ns);
        if (c->tp.quiesce ? c->tp.quiesce(c->tp.ctx, until) != RA_OK : ra__cache_pending(c))
            c->unsafe = 1;
    }
    if (c->unsafe) return RA_E_UNSAFE;
    if (c->mr && c->tp.dereg) (void)c->tp.dereg(c->tp.ctx, c->mr);
    a = c->cd.allocator;
    if (c->owns_base) ra__free(&a, c->base, (size_t)c->bytes);
    return RA_OK;
}

/* ========================================================================== ESTIMATE
 * How long a context fits into given hardware, and whether computing hides the transfer of a hop.
 * Takes figures of hardware and model and returns figures; uses nothing else of the library except
 * refusals. With F FLOP/s and W bytes/s per device, c tokens per block, b sequences, e bytes per
 * element and f = 1 (balanced causal: 1/2), one hop computes 4 f b Hq D c^2 FLOPs and moves 2 b c
 * Hkv D e bytes. Compute covers the transfer from c = (F/W) e Hkv / (2 f Hq) on, which is F/W for
 * MHA at 2 bytes. A device holds six blocks of hidden size h: Q; K, V in use; K, V arriving; the
 * output: 6 b c h e bytes. Liu, Zaharia, Abbeel, arXiv 2310.01889v4, section 3 and table 2. The
 * paper prints 6 b c h, which is the figure for one byte per element. For A100 with InfiniBand it
 * prints 24.5 and 149.5 thousand tokens, 2 % below its own formula. Everything is computed in
 * doubles. The checks keep counts below 2^31, and rates and memory between 1 and 1e30, so that no
 * product overflows; only context_max must fit 64 bits. */

#define RA__EST_LIMIT 1e30             /* of FLOP/s, bytes, bytes/s and seconds */

/* FLOP/s, memory bytes and link bytes/s of one device, as printed in table 2 of the paper, which
 * gives neither latencies nor blocks. Indexed by RA_HW_*. */
static const ra_hardware ra__est_devices[] = {
    { 0.0,    0.0,   0.0,     0.0, 0, 0 },
    { 312e12, 80e9,  300e9,   0.0, 0, 0 },   /* A100, NVLink */
    { 312e12, 80e9,  12.5e9,  0.0, 0, 0 },   /* A100, InfiniBand */
    { 123e12, 16e9,  112e9,   0.0, 0, 0 },   /* TPU v3 */
    { 275e12, 32e9,  268e9,   0.0, 0, 0 },   /* TPU v4 */
    { 196e12, 16e9,  186e9,   0.0, 0, 0 },   /* TPU v5e */
};

/* Link bytes/s, latency and a suitable block. Indexed by RA_NET_*. InfiniBand HDR (4 lanes)
 * carries 200 Gbit/s = 25 GB/s. */
static const ra_hardware ra__est_networks[] = {
    { 0.0, 0.0, 0.0,   0.0,  0, 0 },
    { 0.0, 0.0, 600e9, 1e-6, 0, 8192 },      /* NVLink 4.0 */
    { 0.0, 0.0, 64e9,  5e-6, 0, 4096 },      /* PCIe 4.0 x16 */
    { 0.0, 0.0, 25e9,  2e-6, 0, 8192 },      /* InfiniBand HDR */
};

/* 1 unless x is an infinity or NaN. */
static int32_t ra__est_finite(double x) {
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    return ((bits >> 52) & 0x7ff) != 0x7ff;
}

/* Refuses what is not a number between least and RA__EST_LIMIT. A zero below least counts as
 * unset. */
static ra_status ra__est_check_real(ra_error *e, const char *field, double x, double least) {
    const int32_t finite = ra__est_finite(x);
    int64_t about = 0;
    if (finite && x == 0.0 && least > 0.0)
        return ra__refuse(e, RA_E_UNSET, field, "must be set, is #", 0);
    if (finite && x >= least && x <= RA__EST_LIMIT) return RA_OK;
    if (finite) about = x < -9e18 ? INT64_MIN : x > 9e18 ? INT64_MAX : (int64_t)x;
    return ra__refuse(e, RA_E_RANGE, field,
                      finite ? "must be between 1 (a latency: 0) and 1e30, is about #"
                             : "must be a finite number", about);
}

/* Refuses a count outside [0, INT32_MAX], and a zero if it is required. */
static ra_status ra__est_check_count(ra_error *e, const char *field, int64_t n, int32_t required) {
    if (n < 0 || n > INT32_MAX)
        return ra__refuse(e, RA_E_RANGE, field, "must be between 0 and 2147483647, is #", n);
    if (required && n == 0) return ra__refuse(e, RA_E_UNSET, field, "must be set, is #", 0);
    return RA_OK;
}

static ra_status ra__est_check_hardware(ra_error *e, const ra_hardware *hw) {
    ra_status s = ra__est_check_real(e, "hw.flops_per_s", hw->flops_per_s, 1.0);
    if (!s) s = ra__est_check_real(e, "hw.memory_bytes", hw->memory_bytes, 1.0);
    if (!s) s = ra__est_check_real(e, "hw.link_bytes_per_s", hw->link_bytes_per_s, 1.0);
    if (!s) s = ra__est_check_real(e, "hw.link_latency_s", hw->link_latency_s, 0.0);
    if (!s) s = ra__est_check_count(e, "hw.devices", hw->devices, 1);
    if (!s) s = ra__est_check_count(e, "hw.block_tokens", hw->block_tokens, 0);
    return s;
}

static ra_status ra__est_check_model(ra_error *e, const ra_model *m) {
    ra_status s = ra__est_check_count(e, "model.layers", m->layers, 1);
    if (!s) s = ra__est_check_count(e, "model.q_heads", m->q_heads, 1);
    if (!s) s = ra__est_check_count(e, "model.kv_heads", m->kv_heads, 1);
    if (!s) s = ra__est_check_count(e, "model.head_dim", m->head_dim, 1);
    if (!s) s = ra__est_check_count(e, "model.hidden", m->hidden, 0);
    if (!s) s = ra__est_check_count(e, "model.batch", m->batch, 0);
    if (s) return s;
    const ra__rule rules[] = {
        { m->q_heads % m->kv_heads != 0, RA_E_SHAPE, "model.q_heads",
          "must be a multiple of kv_heads, leaves #", m->q_heads % m->kv_heads },
        { m->element_bytes < 0 || m->element_bytes > 8, RA_E_RANGE, "model.element_bytes",
          "must be 1 to 8, or 0 for 2; is #", m->element_bytes },
        { m->causal != 0 && m->causal != 1, RA_E_RANGE, "model.causal", "must be 0 or 1, is #",
          m->causal },
        { m->weight_bytes < 0, RA_E_RANGE, "model.weight_bytes", "must not be negative, is #",
          m->weight_bytes },
    };
    return ra__check_rules(rules, sizeof rules / sizeof *rules, e);
}

/* Whole tokens per device in the memory that the weights leave, times the devices. RA_E_OVERFLOW if
 * they do not fit 64 bits. */
static ra_status ra__est_context(const ra_hardware *hw, const ra_model *m, double bytes_token,
                                 int64_t *out) {
    const double room = hw->memory_bytes - (double)m->weight_bytes;
    const double tokens = room > 0.0 ? room / bytes_token : 0.0;
    if (tokens >= 9.2e18 || (int64_t)tokens > INT64_MAX / hw->devices)
        return ra__refuse(m->error, RA_E_OVERFLOW, "hw.memory_bytes",
                          "gives more than 2^63 tokens on # devices", hw->devices);
    *out = (int64_t)tokens * hw->devices;
    return RA_OK;
}

/* The formulas of the banner on checked arguments. */
static ra_status ra__est_compute(const ra_hardware *hw, const ra_model *m, ra_estimate_result *r) {
    const double e = m->element_bytes ? m->element_bytes : 2;
    const double b = m->batch ? (double)m->batch : 1.0;
    const double f = m->causal ? 0.5 : 1.0;
    const double q_row = (double)m->q_heads * (double)m->head_dim;     /* elements per token */
    const double kv_row = (double)m->kv_heads * (double)m->head_dim;
    const double hidden = m->hidden ? (double)m->hidden : q_row;
    double c;
    ra_status s;

    r->block_min = hw->flops_per_s / hw->link_bytes_per_s * e * kv_row / (2.0 * f * q_row);
    r->device_tokens_min = 6.0 * r->block_min;
    r->activation_bytes_token = 6.0 * b * hidden * e;
    r->cache_bytes_token = 2.0 * (double)m->layers * kv_row * e;
    s = ra__est_context(hw, m, r->activation_bytes_token + b * r->cache_bytes_token,
                        &r->context_max);
    if (s) return s;
    r->cache_bytes = (double)r->context_max * b * r->cache_bytes_token;

    c = hw->block_tokens ? (double)hw->block_tokens : r->block_min;
    r->hop_compute_s = 4.0 * f * b * q_row * c * c / hw->flops_per_s;
    r->hop_transfer_s = hw->link_latency_s + 2.0 * b * kv_row * c * e / hw->link_bytes_per_s;
    r->hidden_fraction = r->hop_compute_s < r->hop_transfer_s
                       ? r->hop_compute_s / r->hop_transfer_s : 1.0;
    return RA_OK;
}

RINGATTN_API ra_status ra_hardware_preset(int32_t hw, int32_t net, int64_t devices,
                                          ra_hardware *out) {
    ra_hardware h;
    if (!out) return RA_E_NULL;
    if (hw < RA_HW_NONE || hw > RA_HW_TPU_V5E) return RA_E_ENUM;
    if (net < RA_NET_NONE || net > RA_NET_IB_HDR) return RA_E_ENUM;
    if (devices < 1 || devices > INT32_MAX) return RA_E_RANGE;
    h = ra__est_devices[hw];
    if (net != RA_NET_NONE) {
        h.link_bytes_per_s = ra__est_networks[net].link_bytes_per_s;
        h.link_latency_s = ra__est_networks[net].link_latency_s;
        h.block_tokens = ra__est_networks[net].block_tokens;
    }
    h.devices = devices;
    *out = h;
    return RA_OK;
}

RINGATTN_API ra_status ra_estimate(const ra_hardware *hw, const ra_model *model,
                                   ra_estimate_result *out) {
    ra_estimate_result r;
    ra_status s;
    if (!model) return RA_E_NULL;
    if (!hw) return ra__refuse(model->error, RA_E_NULL, "hw", "must not be null", 0);
    if (!out) return ra__refuse(model->error, RA_E_NULL, "out", "must not be null", 0);
    s = ra__est_check_hardware(model->error, hw);
    if (!s) s = ra__est_check_model(model->error, model);
    if (!s) s = ra__est_compute(hw, model, &r);
    if (!s) *out = r;
    return s;
}

RINGATTN_API int64_t ra_cache_bytes(int64_t tokens, int64_t layers, int64_t kv_heads,
                                    int64_t head_dim, int64_t element_bytes) {
    const int64_t factor[5] = { tokens, layers, kv_heads, head_dim, element_bytes };
    int64_t bytes = 2;
    for (int i = 0; i < 5; i++) {
        if (factor[i] < 1 || bytes > INT64_MAX / factor[i]) return 0;
        bytes *= factor[i];
    }
    return bytes;
}
#undef RA__EST_LIMIT

RA__ONCE_END

#ifdef __cplusplus
}
#endif
#if !defined(__clang__)
#pragma GCC pop_options
#elif defined(__x86_64__)
#pragma float_control(pop)
#endif
#undef RA__PROCESS_ID
#undef RA__QUIET_NS
#undef RA__CLAIM_ITEMS
#undef RA__ONCE_BEGIN
#undef RA__ONCE_END
#undef RA__RANGES_BEGIN
#undef RA__RANGES_END
#undef RA__INSTRUCTIONS
#undef RA__X86
#undef RA__NEON
#undef RA__INLINE
#undef RA__NO_FOLD
#undef RA__NOINLINE
#undef RA__UNUSED
#endif /* RINGATTN_IMPLEMENTATION */

/* ------------------------------------------------------------------------------
 * This software is available under two licences. Choose whichever you prefer.
 * ------------------------------------------------------------------------------
 * ALTERNATIVE A - MIT License
 * Copyright (c) 2026 the ringattn.h authors
 * Permission is hereby granted, free of charge, to any person obtaining a copy of this software and
 * associated documentation files (the "Software"), to deal in the Software without restriction,
 * including without limitation the rights to use, copy, modify, merge, publish, distribute,
 * sublicense, and/or sell copies of the Software, and to permit persons to whom the Software is
 * furnished to do so, subject to the following conditions:
 * The above copyright notice and this permission notice shall be included in all copies or
 * substantial portions of the Software.
 * THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT
 * NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND
 * NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM,
 * DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM,
 * OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE.
 * ------------------------------------------------------------------------------
 * ALTERNATIVE B - Public Domain (www.unlicense.org)
 * This is free and unencumbered software released into the public domain.
 * Anyone is free to copy, modify, publish, use, compile, sell, or distribute this software, either
 * in source code form or as a compiled binary, for any purpose, commercial or non-commercial, and
 * by any means.
 * In jurisdictions that recognize copyright laws, the author or authors of this software dedicate
 * any and all copyright interest in the software to the public domain. We make this dedication for
 * the benefit of the public at large and to the detriment of our heirs and successors. We intend
 * this dedication to be an overt act of relinquishment in perpetuity of all present and future
 * rights to this software under copyright law.
 * THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT
 * NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND
 * NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER
 * LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM, OUT OF OR IN
 * CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE.
 * ------------------------------------------------------------------------------ */

