/* examples/transports/ra_tcp.h: conformance over loopback addresses, peers that are killed,
 * stopped or strangers, and handshakes that must be refused. Compiled with RA_TCP_SODIUM it tests
 * the sealed form: the same, and who has no key. All traffic stays on 127.0.0.1 and ::1. */
#define _POSIX_C_SOURCE 200809L
#include "ringattn.h"
#include "examples/transports/ra_tcp.h"
#include "tests/harness.h"
#include "tests/conformance/conformance.h"

enum { TN_RINGS = 2, TN_RANKS = 8 };
#define TN_MS ((int64_t)1000000)

/* Listening sockets of all ranks, made before the ranks start, so that ports are free ones. */
typedef struct tn_world {
    int ranks, rings, fd[TN_RINGS][TN_RANKS];
    char text[TN_RINGS][TN_RANKS][32];
    const char *at[TN_RINGS][TN_RANKS];
    ra_tcp *tcp[TN_RINGS][TN_RANKS];
    const void *key;
} tn_world;

static const char tn_key[32] = "thirty-two bytes of test secret";

static tn_world *tn_make(const char *host, int ranks, int rings)
{
    tn_world *w = (tn_world *)calloc(1, sizeof *w);
    if (!w) abort();
    w->ranks = ranks;
    w->rings = rings;
#ifdef RA_TCP_SODIUM
    w->key = tn_key;
#endif
    for (int i = 0; i < rings; i++)
        for (int r = 0; r < ranks; r++) {
            int port = 0;
            char any[32];
            snprintf(any, sizeof any, "%s:0", host);
            w->fd[i][r] = ra_tcp_listen(any, &port);
            if (w->fd[i][r] < 0) abort();
            snprintf(w->text[i][r], sizeof w->text[i][r], "%s:%d", host, port);
            w->at[i][r] = w->text[i][r];
        }
    return w;
}

static ra_tcp_desc tn_desc(tn_world *w, int ring, int rank)
{
    ra_tcp_desc d;
    memset(&d, 0, sizeof d);
    d.rank = rank;
    d.ranks = w->ranks;
    d.addresses = w->at[ring];
    d.world = 77;
    d.ring = (uint32_t)ring;
    d.listen_fd = w->fd[ring][rank];
    d.connect_ns = 10000 * TN_MS;
    d.key = w->key;
    w->fd[ring][rank] = -1;
    return d;
}

static void *tn_maker_make(void *user, int ranks, int rings)
{
    return tn_make((const char *)user, ranks, rings);
}

/* In a process of its own a rank lets go of the others' sockets. */
static const ra_transport *tn_join(void *world, int ring, int rank)
{
    tn_world *w = (tn_world *)world;
    ra_error why;
    ra_tcp_desc d = tn_desc(w, ring, rank);
    d.error = &why;
    if (ra_tcp_open(&w->tcp[ring][rank], &d) == RA_OK) return ra_tcp_transport(w->tcp[ring][rank]);
    printf("rank %d: %s %s\n", rank, why.field, why.text);
    return NULL;
}

static void tn_leave(void *world, int ring, int rank, int why)
{
    tn_world *w = (tn_world *)world;
    (void)why;
    ra_tcp_close(w->tcp[ring][rank]);
}

static void tn_end(void *world)
{
    tn_world *w = (tn_world *)world;
    for (int i = 0; i < w->rings; i++)
        for (int r = 0; r < w->ranks; r++) if (w->fd[i][r] >= 0) close(w->fd[i][r]);
    free(w);
}

static cf_maker tn_maker(const char *host, int processes)
{
    static char name[80];
    cf_maker m = { "tcp", NULL, tn_maker_make, tn_join, tn_leave, tn_end, 0, 1, 0, 0 };
    m.user = (void *)(uintptr_t)host;
    m.processes = processes;
    snprintf(name, sizeof name, "tcp, %s, ranks are %s", host, processes ? "processes" : "threads");
    m.name = name;
    return m;
}

static int tn_has_v6(void)
{
    int port = 0, fd = ra_tcp_listen("[::1]:0", &port);
    if (fd >= 0) close(fd);
    return fd >= 0;
}

TEST(conformance_threads)
{
    cf_maker m = tn_maker("127.0.0.1", 0);
    cf_report rep = cf_judge(&m, NULL, 0, stdout);
    CHECK_EQ(rep.failed, 0);
    CHECK_EQ(rep.unclaimed, 5);
}

TEST(conformance_processes)
{
    cf_maker m = tn_maker("127.0.0.1", 1);
    m.most_ranks = h_run.large ? 0 : 3;
    CHECK_EQ(cf_judge(&m, NULL, 0, stdout).failed, 0);
}

TEST(conformance_v6)
{
    cf_maker m = tn_maker("[::1]", 0);
    m.most_ranks = h_run.large ? 0 : 3;
    if (!tn_has_v6()) h_skip("no ::1 here");
    else CHECK_EQ(cf_judge(&m, NULL, 0, stdout).failed, 0);
}

int main(int argc, char **argv)
{
    static const h_test tests[] = {
        ENTRY(conformance_threads), ENTRY(conformance_processes), ENTRY(conformance_v6),
    };
    return h_main(argc, argv, tests, sizeof tests / sizeof *tests);
}
