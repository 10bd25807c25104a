/* The conformance suite on examples/transports/ra_tcp.h between network namespaces: each rank is a
 * process in a separate namespace. bench/netns.sh makes the namespaces and their links.
 *
 *   conform_netns PORT NAMESPACE ADDRESS [NAMESPACE ADDRESS]...
 *
 * The suite tests each rule with as many ranks as there are namespaces. */
#define _GNU_SOURCE
#define RINGATTN_IMPLEMENTATION
#include "ringattn.h"
#include "examples/transports/ra_tcp.h"
#include "tests/conformance/conformance.h"
#include <fcntl.h>
#include <sched.h>

typedef struct nn_world {
    int ranks;
    uint32_t first;                    /* number of its first ring */
    char text[CF_MOST_RINGS][CF_MOST_RANKS][64];
    const char *at[CF_MOST_RINGS][CF_MOST_RANKS];
    ra_tcp *tcp[CF_MOST_RINGS];
} nn_world;

static char **nn_names;                /* of rank r: [2 r] the namespace, [2 r + 1] the address */
static int nn_port;

/* Every world has separate ports, because a port that was closed may still have late segments. */
static void *nn_make(void *user, int ranks, int rings) {
    static uint32_t worlds;
    nn_world *w = (nn_world *)calloc(1, sizeof *w);
    (void)user;
    if (!w) return NULL;
    w->ranks = ranks;
    for (int i = 0; i < rings; i++)
        for (int r = 0; r < ranks; r++) {
            snprintf(w->text[i][r], sizeof w->text[i][r], "%s:%d", nn_names[2 * r + 1],
                     nn_port + (int)(worlds * CF_MOST_RINGS) + i);
            w->at[i][r] = w->text[i][r];
        }
    w->first = worlds++ * CF_MOST_RINGS;
    return w;
}

static const ra_transport *nn_join(void *world, int ring, int rank) {
    nn_world *w = (nn_world *)world;
    char path[256];
    ra_tcp_desc d = { 0 };
    ra_error why;
    int there;
    snprintf(path, sizeof path, "/var/run/netns/%s", nn_names[2 * rank]);
    there = open(path, O_RDONLY);
    if (there < 0 || setns(there, CLONE_NEWNET)) {
        perror(path);
        return NULL;
    }
    close(there);
    d.rank = rank;
    d.ranks = w->ranks;
    d.addresses = w->at[ring];
    d.world = 78;
    d.ring = w->first + (uint32_t)ring;
    d.connect_ns = (int64_t)20000 * 1000000;
    d.error = &why;
    if (ra_tcp_open(&w->tcp[ring], &d) == RA_OK) return ra_tcp_transport(w->tcp[ring]);
    printf("rank %d: %s %s\n", rank, why.field, why.text);
    return NULL;
}

static void nn_leave(void *world, int ring, int rank, int why) {
    (void)rank, (void)why;
    ra_tcp_close(((nn_world *)world)->tcp[ring]);
}

static void nn_end(void *world) { free(world); }

int main(int argc, char **argv) {
    cf_maker m = { "tcp between network namespaces", NULL, nn_make, nn_join, nn_leave, nn_end, 1, 1,
                   0, 0, NULL };
    if (argc < 6 || argc % 2 || argc > 2 + 2 * CF_MOST_RANKS) {
        fprintf(stderr, "usage: conform_netns PORT NAMESPACE ADDRESS NAMESPACE ADDRESS... "
                        "(2 to %d)\n", CF_MOST_RANKS);
        return 2;
    }
    nn_port = atoi(argv[1]);
    nn_names = argv + 2;
    m.most_ranks = (argc - 2) / 2;
    return cf_suite(&m, stdout) != 0;
}
