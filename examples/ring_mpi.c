/* Ring attention over MPI: transports/ra_mpi.h. You will see what every rank sent and received in a
 * forward and a backward pass, how much of the transfer was hidden behind computation, and that all
 * numbers are those of one rank, bit for bit. Exits with 1 if not.
 *
 *   mpicc -O2 -std=c99 -I. -o ring_mpi examples/ring_mpi.c -lpthread -lm
 *   mpirun -n 4 ./ring_mpi
 *   mpirun -n 4 ./ring_mpi --mesh 2x2
 *
 * (or make build/release/examples/ring_mpi MPICC=mpicc.mpich). --mesh GxR splits the world into G
 * groups with a ring of R ranks each. Every group attends over its own sequence. The gradients of
 * shared parameters, here one gain per kv head, are summed over each ring and then over the groups
 * by MPI_Allreduce, as in data-parallel training.
 *
 * --level 0 uses MPI_Sendrecv alone. --tokens N --heads N --kv-heads N --dim N --chunk N --full
 * --seconds N change the task. */
#define RINGATTN_IMPLEMENTATION
#include "transports/ra_mpi.h"
#include "transports/ring_check.h"

typedef struct mesh {                  /* this process in it */
    int groups, group, ranks, rank;    /* rank, ranks: of its ring */
    MPI_Comm ring, across;             /* its ring; the ranks of all groups that hold its rows */
} mesh;

static mesh mesh_split(int groups, int ranks) {
    mesh m;
    int world = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &world);
    m.groups = groups;
    m.ranks = ranks;
    m.group = world / ranks;
    m.rank = world % ranks;
    MPI_Comm_split(MPI_COMM_WORLD, m.group, m.rank, &m.ring);
    MPI_Comm_split(MPI_COMM_WORLD, m.rank, m.group, &m.across);
    return m;
}

/* Ends the job if a rank cannot go on. The transport tells the others, but those in collective
 * calls of this program would wait. */
static void give_up(const char *field, const char *text) {
    fprintf(stderr, "%s %s\n", field, text);
    MPI_Abort(MPI_COMM_WORLD, 1);
}

/* Forward and backward on this rank's ring. all: zeros, then this rank's rows. */
static ra_status attend(const ring_task *t, const mesh *m, int level, float *all,
                        ring_figures *f) {
    ra_transport simple = ra_mpi_level0((MPI_Comm *)(uintptr_t)&m->ring);
    ra_plan *plan = NULL;
    ra_mpi *mpi = NULL;
    ra_error why;
    ra_desc d;
    ra_status s;
    memset(&why, 0, sizeof why);
    ring_describe(&d, t, m->rank, m->ranks, &why);
    s = ra_plan_create(&plan, &d, NULL);
    if (!s && level) s = ra_mpi_open(&mpi, m->ring, 0, &why);
    if (s) give_up(why.field, why.text);
    s = ring_attend(t, plan, level ? ra_mpi_transport(mpi) : &simple, m->rank, all, f);
    if (ra_mpi_close(mpi)) give_up("ra_mpi_close:", "a rank does not answer");
    ra_plan_destroy(plan);
    return s;
}

/* The gradient of a gain per kv head that multiplies V: over the rows that all has, x dV. */
static void gain_gradient(const ring_task *t, float *all, double *sum) {
    ring_numbers n = ring_numbers_in(t, all);
    for (int64_t i = 0; i < t->tokens; i++)
        for (int c = 0; c < t->kv_heads * t->dim; c++)
            sum[c / t->dim] += (double)ring_input(t, 2, i, c) *
                               (double)n.d_v[i * t->kv_heads * t->dim + c];
}

/* Sums over the ring, then over the groups, for every rank. Compares with the sum of what the first
 * rank of each group finds in its complete gradient. Returns the largest relative error. */
static double share_gradients(const ring_task *t, const mesh *m, float *all, float *complete) {
    double *g = (double *)calloc((size_t)(4 * t->kv_heads), sizeof *g), worst = 0;
    double *ring = g + t->kv_heads, *sum = ring + t->kv_heads, *due = sum + t->kv_heads;
    if (!g) give_up("gradients:", "no memory");
    gain_gradient(t, all, g);
    MPI_Allreduce(g, ring, t->kv_heads, MPI_DOUBLE, MPI_SUM, m->ring);
    MPI_Allreduce(ring, sum, t->kv_heads, MPI_DOUBLE, MPI_SUM, m->across);
    if (m->rank == 0) {
        memset(g, 0, (size_t)t->kv_heads * sizeof *g);
        gain_gradient(t, complete, g);
        MPI_Allreduce(g, due, t->kv_heads, MPI_DOUBLE, MPI_SUM, m->across);
        for (int h = 0; h < t->kv_heads; h++) {
            double far = sum[h] - due[h], size = due[h] < 0 ? -due[h] : due[h];
            if (m->group == 0) printf("gradient of the gain of kv head %d: %.9g\n", h, sum[h]);
            if ((far < 0 ? -far : far) > worst * size) worst = (far < 0 ? -far : far) / size;
        }
    }
    free(g);
    return worst;
}

static int run(const ring_task *task, const mesh *m, int level) {
    ring_task t = *task;
    size_t n = ring_floats(&t);
    float *all = (float *)calloc(2 * n, sizeof *all), *complete = all + n;
    ring_figures mine, *figures = (ring_figures *)calloc((size_t)m->ranks, sizeof *figures);
    int bad = 0, any = 0;
    double error;
    if (!all || !figures || n > INT_MAX) give_up("--tokens:", "too many for this example");
    memset(&mine, 0, sizeof mine);
    t.seed = (uint32_t)(1 + m->group);
    bad = attend(&t, m, level, all, &mine) != RA_OK;
    MPI_Allreduce(&bad, &any, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
    if (!any) {
        MPI_Gather(&mine, (int)sizeof mine, MPI_BYTE, figures, (int)sizeof mine, MPI_BYTE, 0,
                   m->ring);
        MPI_Reduce(all, complete, (int)n, MPI_UINT32_T, MPI_BOR, 0, m->ring); /* others have 0 */
        for (int g = 0; g < m->groups; g++) {
            MPI_Barrier(MPI_COMM_WORLD);
            if (g != m->group || m->rank) continue;
            if (m->groups > 1) printf("group %d\n", g);
            bad = ring_judge(&t, figures, m->ranks, complete);
            fflush(stdout);
        }
        MPI_Barrier(MPI_COMM_WORLD);
        error = m->groups > 1 ? share_gradients(&t, m, all, complete) : 0;
        if (m->groups > 1 && m->rank == 0 && m->group == 0)
            printf("summed over %d groups of %d ranks, at most %.1e from the sums of whole "
                   "gradients\n", m->groups, m->ranks, error);
        bad |= !(error <= 1e-9);
        MPI_Allreduce(&bad, &any, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
    }
    free(all);
    free(figures);
    return any;
}

static int usage(int rank, const char *what) {
    if (rank == 0) fprintf(stderr, "%s: see the top of examples/ring_mpi.c\n", what);
    MPI_Finalize();
    return 2;
}

int main(int argc, char **argv) {
    ring_task t = ring_task_default();
    int groups = 1, ranks = 0, rank = 0, size = 0, level = 1, threads = 0, bad;
    mesh m;
    MPI_Init_thread(&argc, &argv, MPI_THREAD_SERIALIZED, &threads);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    for (int i = 1, took; i < argc; i += took) {
        took = ring_option(&t, argc, argv, i);
        if (took) continue;
        took = 2;
        if (!strcmp(argv[i], "--level") && i + 1 < argc) level = atoi(argv[i + 1]);
        else if (strcmp(argv[i], "--mesh") || i + 1 >= argc ||
                 sscanf(argv[i + 1], "%dx%d", &groups, &ranks) != 2)
            return usage(rank, argv[i]);
    }
    if (!ranks) ranks = size;
    if (t.tokens < 1 || t.heads < 1 || t.kv_heads < 1 || t.dim < 1)
        return usage(rank, "at least one token, head and dimension");
    if (groups < 1 || ranks < 1 || (int64_t)groups * ranks != size)
        return usage(rank, "--mesh GxR needs G times R processes");
    m = mesh_split(groups, ranks);
    if (rank == 0)
        printf("%lld tokens, %d/%d heads of %d, %s, zigzag, %d x %d processes, level %d\n",
               (long long)t.tokens, t.heads, t.kv_heads, t.dim, t.full ? "full" : "causal", groups,
               ranks, level);
    fflush(stdout);
    bad = run(&t, &m, level);
    MPI_Comm_free(&m.ring);
    MPI_Comm_free(&m.across);
    MPI_Finalize();
    return bad;
}
