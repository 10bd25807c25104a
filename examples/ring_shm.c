/* Ring attention over processes of one machine, through shared memory: transports/ra_shm.h. You
 * will see what every rank sent and received in a forward and a backward pass, how much of that was
 * lent instead of copied, and that all numbers are those of one rank, bit for bit. Exits with 1 if
 * not.
 *
 *   cc -O2 -std=c99 -I. -o ring_shm examples/ring_shm.c -lpthread -lm && ./ring_shm -n 4
 *
 * It starts n processes. Or start each rank yourself, in any order; each then compares its rows
 * with those of one rank:
 *
 *   for r in 0 1 2; do ./ring_shm -n 3 --rank $r & done; wait
 *
 * A job number is part of the name by which ranks meet: a hash of the task, the number of ranks and
 * the version of the library. So ranks that differ in these do not meet. --name NAME keeps apart
 * jobs that are equal and run at the same time.
 * --tokens N --heads N --kv-heads N --dim N --chunk N --full --seconds N change the task. With
 * --decode you will see instead how long one token takes over a cache of 64 tokens that is split
 * over the processes, which is almost nothing but the exchange of partial results:
 *
 *   ./ring_shm -n 2 --decode --heads 32 --kv-heads 8 --dim 128 */
#define RINGATTN_IMPLEMENTATION
#include "transports/ra_shm.h"
#include "transports/ring_check.h"

#include <sys/wait.h>

enum { MOST_RANKS = 64, CACHED = 63, DECODE_ROUNDS = 20, DECODE_CALLS = 200 };

typedef struct board {                 /* in memory that all ranks share */
    ring_figures figures[MOST_RANKS];
    ra_shm_counters loans[MOST_RANKS];
    double decode_us[MOST_RANKS];
} board;

/* One rank, in this process. Returns its exit code. */
static int on_rank(const ring_task *t, const char *name, int rank, int ranks, board *b,
                   float *all) {
    ra_plan *plan = NULL;
    ra_shm *shm = NULL;
    ra_shm_desc sd;
    ra_error why;
    ra_desc d;
    ra_status s;
    memset(&sd, 0, sizeof sd);
    memset(&why, 0, sizeof why);
    ring_describe(&d, t, rank, ranks, &why);
    s = ra_plan_create(&plan, &d, NULL);
    if (!s) {
        sd.name = name;
        sd.rank = rank;
        sd.ranks = ranks;
        sd.slot_bytes = ra_shm_slot_bytes(plan, ranks);
        sd.deadline_ns = ra_deadline_ms(1000 * t->seconds);
        sd.error = &why;
        s = ra_shm_open(&shm, &sd);
    }
    if (s) fprintf(stderr, "rank %d: %s: %s %s\n", rank, ra_status_text(s), why.field, why.text);
    else s = ring_attend(t, plan, ra_shm_transport(shm), rank, all, &b->figures[rank]);
    if (shm) b->loans[rank] = ra_shm_query(shm);
    b->figures[rank].status = s;
    ra_shm_close(shm);
    ra_plan_destroy(plan);
    return s != RA_OK;
}

/* Times rounds of calls that compute one query, which all ranks have, over keys of zeros. *us: of a
 * call in the fastest round. */
static ra_status decode_rounds(ra_cache *c, const ring_task *t, double *us) {
    const size_t row = (size_t)ra_cache_rows(c) * (size_t)t->kv_heads * (size_t)t->dim;
    const size_t query = (size_t)t->heads * (size_t)t->dim;
    float *memory = (float *)calloc(row + 2 * query, sizeof *memory);
    const int64_t cached = CACHED, fresh = 1;
    ra_status s = memory ? RA_OK : RA_E_NOMEM;
    ra_tensors x;
    memset(&x, 0, sizeof x);
    x.k.data = x.v.data = memory;
    x.q.data = memory + row;
    x.o.data = memory + row + query;
    for (int i = 0; i < DECODE_ROUNDS && !s; i++) {
        const int64_t begin = ra_now_ns();
        for (int k = 0; k < DECODE_CALLS && !s; k++)
            s = ra_infer(c, &x, &cached, &fresh, ra_deadline_ms(1000 * t->seconds));
        const double took = (double)(ra_now_ns() - begin) / 1e3 / (double)DECODE_CALLS;
        if (i == 0 || took < *us) *us = took;
    }
    free(memory);
    return s;
}

/* One rank that decodes, in this process. */
static int on_decode(const ring_task *t, const char *name, int rank, int ranks, double *us) {
    ra_desc d = ra_desc_make(t->heads, t->kv_heads, t->dim, RA_F32, RA_MASK_CAUSAL);
    ra_cache *c = NULL;
    ra_shm *shm = NULL;
    ra_shm_desc sd;
    ra_cache_desc cd;
    ra_error why;
    ra_status s = RA_OK;
    memset(&sd, 0, sizeof sd);
    memset(&cd, 0, sizeof cd);
    memset(&why, 0, sizeof why);
    d.tokens = 1;
    d.kv_tokens = CACHED + 1;
    d.rank = rank;
    d.ranks = ranks;
    d.error = sd.error = &why;
    cd.queries = RA_QUERIES_ALL;
    sd.name = name;
    sd.rank = rank;
    sd.ranks = ranks;
    sd.slot_bytes = 4096 + (size_t)t->heads * (size_t)(t->dim + 1) * 64;
    sd.deadline_ns = ra_deadline_ms(1000 * t->seconds);
    if (ranks > 1) s = ra_shm_open(&shm, &sd);
    if (!s) s = ra_cache_create(&c, &d, ranks > 1 ? ra_shm_transport(shm) : NULL, &cd);
    if (s) fprintf(stderr, "rank %d: %s: %s %s\n", rank, ra_status_text(s), why.field, why.text);
    else if ((s = decode_rounds(c, t, us)) != RA_OK)
        fprintf(stderr, "rank %d: %s: %s\n", rank, ra_status_text(s), ra_cache_error(c)->text);
    if (!s) s = ra_cache_destroy(c);
    ra_shm_close(shm);
    return s != RA_OK;
}

static void *shared_memory(size_t bytes) {
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (at != MAP_FAILED) return at;
    perror("mmap");
    exit(1);
}

static void print_loans(const board *b, int ranks) {
    printf("%-4s %10s %10s %10s %10s %8s %8s\n", "rank", "copied in", "copied out", "lent",
           "lent on", "sleeps", "wakes");
    for (int r = 0; r < ranks; r++) {
        const ra_shm_counters *c = &b->loans[r];
        printf("%-4d %10lld %10lld %10lld %10lld %8lld %8lld\n", r, (long long)c->copies_in,
               (long long)c->copies_out, (long long)c->loans, (long long)c->forwards,
               (long long)c->sleeps, (long long)c->wakes);
    }
    printf("forward a chunk is copied once, by its owner, and lent from rank to rank\n");
}

static int print_decode(const ring_task *t, const board *b, int ranks) {
    double alone = 0;
    if (on_decode(t, "alone", 0, 1, &alone)) return 1;
    printf("%d/%d heads of %d, 64 tokens: %.1f us per token on one rank, %.1f us on %d processes\n",
           t->heads, t->kv_heads, t->dim, alone, b->decode_us[0], ranks);
    return 0;
}

/* Processes of our own: all ranks write their rows into one array. */
static int run_all(const ring_task *t, int ranks, int decode) {
    board *b = (board *)shared_memory(sizeof *b);
    float *all = (float *)shared_memory(ring_floats(t) * sizeof *all);
    pid_t pid[MOST_RANKS];
    char name[40];
    int bad = 0;
    snprintf(name, sizeof name, "ring_shm.%ld", (long)getpid());
    fflush(stdout);
    for (int r = 0; r < ranks; r++) {
        pid[r] = fork();
        if (pid[r] == 0)
            _exit(decode ? on_decode(t, name, r, ranks, &b->decode_us[r])
                         : on_rank(t, name, r, ranks, b, all));
        if (pid[r] < 0) perror("fork");
    }
    for (int r = 0; r < ranks; r++) {
        int status = 0;
        bad |= pid[r] < 0 || waitpid(pid[r], &status, 0) < 0 || status != 0;
    }
    if (bad) {
        printf("a rank failed\n");
        return 1;
    }
    if (decode) return print_decode(t, b, ranks);
    print_loans(b, ranks);
    return ring_judge(t, b->figures, ranks, all);
}

static int run_one(const ring_task *t, const char *job, int rank, int ranks) {
    static board b;
    float *all = (float *)calloc(ring_floats(t), sizeof *all);
    char name[65];
    snprintf(name, sizeof name, "%.44s.%016llx", job,
             (unsigned long long)ring_task_id("ring_shm", t, ranks));
    int bad = !all || on_rank(t, name, rank, ranks, &b, all) ||
              ring_judge_one(t, &b.figures[rank], rank, all);
    free(all);
    return bad;
}

int main(int argc, char **argv) {
    ring_task t = ring_task_default();
    const char *name = NULL;
    int ranks = 4, rank = -1, decode = 0;
    for (int i = 1, took; i < argc; i += took) {
        took = ring_option(&t, argc, argv, i);
        if (took) continue;
        took = 2;
        if (!strcmp(argv[i], "--decode")) {
            decode = took = 1;
            continue;
        }
        if (!strcmp(argv[i], "-n") && i + 1 < argc) ranks = atoi(argv[i + 1]);
        else if (!strcmp(argv[i], "--name") && i + 1 < argc) name = argv[i + 1];
        else if (!strcmp(argv[i], "--rank") && i + 1 < argc) rank = atoi(argv[i + 1]);
        else {
            fprintf(stderr, "unknown argument %s, see the top of examples/ring_shm.c\n", argv[i]);
            return 2;
        }
    }
    if (ranks < 1 || ranks > MOST_RANKS || t.tokens < 1 || t.heads < 1 || t.kv_heads < 1 ||
        t.dim < 1 || rank >= ranks || (name && (rank < 0 || strlen(name) > 44))) {
        fprintf(stderr, "1 to %d ranks, at least one token, --name of up to 44 characters only "
                        "with --rank\n", MOST_RANKS);
        return 2;
    }
    if (decode && rank >= 0) {
        fprintf(stderr, "--decode starts its processes: without --rank\n");
        return 2;
    }
    if (!decode && rank <= 0)
        printf("%lld tokens, %d/%d heads of %d, %s, zigzag, %d processes\n", (long long)t.tokens,
               t.heads, t.kv_heads, t.dim, t.full ? "full" : "causal", ranks);
    return rank >= 0 ? run_one(&t, name ? name : "job", rank, ranks) : run_all(&t, ranks, decode);
}
