/* The conformance suite on examples/transports/ra_mpi.h, between the processes of one run:
 *
 *   mpirun -n 3 mpi_conform FILE      FILE is new and is removed at the end
 *   mpirun -n 3 mpi_conform FILE 0    level 0, ten lines
 *
 * Rank 0 prints the report and the closing line. */
#include "examples/transports/ra_mpi.h"
#include "tests/conformance/conformance.h"
#include "tests/conformance/mpi_leave.h"

typedef struct mpi_world {
    MPI_Comm comm;                     /* of the ranks that have a part; MPI_COMM_NULL elsewhere */
    int level, rings;
    ra_mpi *mpi[CF_MOST_RINGS];
    ra_transport plain[CF_MOST_RINGS];
    MPI_Comm copy[CF_MOST_RINGS];
} mpi_world;

/* Made on all ranks at the same time. Contexts are opened here, because opening is collective. */
static void *mpi_make(void *user, int ranks, int rings) {
    mpi_world *w = (mpi_world *)calloc(1, sizeof *w);
    int rank;
    if (!w) return NULL;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    w->level = *(const int *)user;
    w->rings = rings;
    MPI_Comm_split(MPI_COMM_WORLD, rank < ranks ? 0 : MPI_UNDEFINED, rank, &w->comm);
    for (int i = 0; i < rings && w->comm != MPI_COMM_NULL; i++) {
        w->copy[i] = MPI_COMM_NULL;
        if (w->level == 0) {
            MPI_Comm_dup(w->comm, &w->copy[i]);
            MPI_Comm_set_errhandler(w->copy[i], MPI_ERRORS_RETURN);
            w->plain[i] = ra_mpi_level0(&w->copy[i]);
        } else if (ra_mpi_open(&w->mpi[i], w->comm, 0, NULL)) abort();
    }
    return w;
}

static const ra_transport *mpi_join(void *world, int ring, int rank) {
    mpi_world *w = (mpi_world *)world;
    (void)rank;
    return w->level ? ra_mpi_transport(w->mpi[ring]) : &w->plain[ring];
}

static void mpi_leave(void *world, int ring, int rank, int why) {
    (void)world, (void)ring, (void)rank, (void)why;
}

static void mpi_end(void *world) {
    mpi_world *w = (mpi_world *)world;
    for (int i = 0; i < w->rings && w->comm != MPI_COMM_NULL; i++) {
        if (w->level) (void)ra_mpi_close(w->mpi[i]);
        else MPI_Comm_free(&w->copy[i]);
    }
    if (w->comm != MPI_COMM_NULL) MPI_Comm_free(&w->comm);
    free(w);
}

int main(int argc, char **argv) {
    int given = 0, level;
    cf_maker m = { "MPI", NULL, mpi_make, mpi_join, mpi_leave, mpi_end, 1, 1, 0, 0, NULL };
    cf_report rep;
    cf_outside o;
    MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &given);
    MPI_Comm_rank(MPI_COMM_WORLD, &o.rank);
    MPI_Comm_size(MPI_COMM_WORLD, &o.ranks);
    o.file = argc > 1 ? argv[1] : "/tmp/ra_mpi_conform";
    level = argc > 2 ? atoi(argv[2]) : 1;
    m.user = &level;
    m.outside = &o;
    m.name = level ? "MPI, level 1" : "MPI, level 0";
    rep = cf_judge(&m, NULL, 0, o.rank ? NULL : stdout);
    MPI_Barrier(MPI_COMM_WORLD);
    if (o.rank == 0) {
        remove(o.file);
        printf("%d passed, %d failed\n", rep.passed, rep.failed);
    }
    mpi_leave_all(rep.failed != 0, o.rank);
    return rep.failed != 0;
}
