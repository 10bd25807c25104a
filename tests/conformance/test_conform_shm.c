/* The conformance suite on examples/transports/ra_shm.h: ranks as processes, and as threads of one
 * process. --long: up to 8 ranks of each. */
#include "examples/transports/ra_shm.h"
#include "tests/conformance/conformance.h"
#include "tests/harness.h"

typedef struct shm_world {
    char name[40];
    int ranks;
    ra_shm *shm[CF_MOST_RINGS][CF_MOST_RANKS];
} shm_world;

static void *shm_make(void *user, int ranks, int rings) {
    static int number;
    shm_world *w = (shm_world *)calloc(1, sizeof *w);
    (void)user, (void)rings;
    if (!w) return NULL;
    snprintf(w->name, sizeof w->name, "conform.%ld.%d", (long)getpid(), number++);
    w->ranks = ranks;
    return w;
}

static const ra_transport *shm_join(void *world, int ring, int rank) {
    shm_world *w = (shm_world *)world;
    char name[64];
    ra_shm_desc d = { 0 };
    ra_error why;
    snprintf(name, sizeof name, "%s.%d", w->name, ring);
    d.name = name;
    d.rank = rank;
    d.ranks = w->ranks;
    d.slot_bytes = 1 << 20;
    d.error = &why;
    if (ra_shm_open(&w->shm[ring][rank], &d)) {
        fprintf(stderr, "%s %s\n", why.field, why.text);
        return NULL;
    }
    return ra_shm_transport(w->shm[ring][rank]);
}

static void shm_leave(void *world, int ring, int rank, int why) {
    (void)why;
    ra_shm_close(((shm_world *)world)->shm[ring][rank]);
}

static void shm_end(void *world) { free(world); }

static void judge(const char *name, int processes) {
    cf_maker m = { name, NULL, shm_make, shm_join, shm_leave, shm_end, processes, 1, 0, 0, NULL };
    cf_report rep;
    if (!h_run.large) m.most_ranks = 3;
    rep = cf_judge(&m, NULL, 0, stdout);
    CHECK_EQ(rep.failed, 0);
    CHECK_EQ(rep.unclaimed, 4);        /* registration, and three of sendrecv */
}

TEST(processes) { judge("shared memory between processes", 1); }
TEST(threads) { judge("shared memory between threads", 0); }

int main(int argc, char **argv) {
    static const h_test tests[] = { ENTRY(processes), ENTRY(threads) };
    return h_main(argc, argv, tests, sizeof tests / sizeof tests[0]);
}
