/* Ring attention over libfabric: transports/ra_ofi.h. You will see what every rank sent and
 * received in a forward and a backward pass, how much of the transfer was hidden behind
 * computation, and that all numbers are those of one rank, bit for bit. Exits with 1 if not.
 *
 *   cc -O2 -std=c99 -I. -o ring_ofi examples/ring_ofi.c -lfabric -lpthread -lm
 *   ./ring_ofi --local 4                                   four processes over tcp;ofi_rxm
 *   ./ring_ofi --local 4 --provider shm                    or net, verbs;ofi_rxm, efa, cxi
 *   ./ring_ofi --local 4 --one-sided                       writes into registered memory
 *
 * Or start each rank yourself, in any order, on machines that share a directory, which is new for
 * the run; each then compares its rows with those of one rank:
 *
 *   ./ring_ofi --ranks 2 --rank 0 --directory /shared/job-1        on the first machine, and
 *   ./ring_ofi --ranks 2 --rank 1 --directory /shared/job-1        on the second
 *
 * --list host:port,host:port takes the place of --directory. --address HOST chooses the interface.
 * The number of the run is a hash of the task, the number of ranks and the version of the library:
 * ranks that differ in these do not meet.
 * --tokens N --heads N --kv-heads N --dim N --chunk N --full --seconds N change the task. */
#define RINGATTN_IMPLEMENTATION
#include "transports/ra_ofi.h"
#include "transports/ring_check.h"

#include <sys/mman.h>
#include <sys/wait.h>

enum { MOST_RANKS = 64 };

typedef struct options {
    ring_task t;
    ra_ofi_desc ofi;
    int local;
} options;

/* One rank, in this process. Returns its exit code. */
static int on_rank(const options *o, int rank, ring_figures *f, float *all) {
    ra_ofi_desc od = o->ofi;
    ra_plan *plan = NULL;
    ra_ofi *ofi = NULL;
    ra_error why;
    ra_desc d;
    ra_status s;
    memset(&why, 0, sizeof why);
    ring_describe(&d, &o->t, rank, od.ranks, &why);
    s = ra_plan_create(&plan, &d, NULL);
    if (!s) {
        od.rank = rank;
        od.deadline_ns = ra_deadline_ms(1000 * o->t.seconds);
        od.error = &why;
        s = ra_ofi_open(&ofi, &od);
    }
    if (s) fprintf(stderr, "rank %d: %s: %s %s\n", rank, ra_status_text(s), why.field, why.text);
    else s = ring_attend(&o->t, plan, ra_ofi_transport(ofi), rank, all, f);
    f->status = s;
    (void)ra_ofi_close(ofi);
    ra_plan_destroy(plan);
    return s != RA_OK;
}

static void *shared_memory(size_t bytes) {
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (at != MAP_FAILED) return at;
    perror("mmap");
    exit(1);
}

/* Processes of our own: all ranks write their rows into one array. */
static int run_all(options *o) {
    int ranks = o->ofi.ranks, bad = 0;
    ring_figures *f = (ring_figures *)shared_memory((size_t)ranks * sizeof *f);
    float *all = (float *)shared_memory(ring_floats(&o->t) * sizeof *all);
    char directory[] = "/tmp/ring_ofi.XXXXXX";
    pid_t pid[MOST_RANKS];
    if (!mkdtemp(directory)) {
        perror(directory);
        return 1;
    }
    o->ofi.directory = directory;
    fflush(stdout);
    for (int r = 0; r < ranks; r++) {
        pid[r] = fork();
        if (pid[r] == 0) {
            alarm(600);                /* ends in any case */
            _exit(on_rank(o, r, &f[r], all));
        }
        if (pid[r] < 0) perror("fork");
    }
    for (int r = 0; r < ranks; r++) {
        int status = 0;
        bad |= pid[r] < 0 || waitpid(pid[r], &status, 0) < 0 || status != 0;
    }
    if (bad) {                         /* ranks that never met leave their files */
        for (int r = 0; r < ranks; r++) {
            char path[64];
            snprintf(path, sizeof path, "%s/ra_ofi.%llu.0.%d", directory,
                     (unsigned long long)o->ofi.world, r);
            (void)unlink(path);
        }
        printf("a rank failed\n");
    }
    (void)rmdir(directory);
    return bad ? 1 : ring_judge(&o->t, f, ranks, all);
}

static int run_one(const options *o) {
    float *all = (float *)calloc(ring_floats(&o->t), sizeof *all);
    ring_figures f;
    memset(&f, 0, sizeof f);
    int bad = !all || on_rank(o, o->ofi.rank, &f, all) ||
              ring_judge_one(&o->t, &f, o->ofi.rank, all);
    free(all);
    return bad;
}

/* Returns how many arguments it took at argv[i], 0 if it is none of these. */
static int option(options *o, int argc, char **argv, int i) {
    const char *value = i + 1 < argc ? argv[i + 1] : NULL;
    if (!strcmp(argv[i], "--one-sided")) {
        o->ofi.one_sided = 1;
        return 1;
    }
    if (!value) return 0;
    if (!strcmp(argv[i], "--local")) o->local = o->ofi.ranks = atoi(value);
    else if (!strcmp(argv[i], "--ranks")) o->ofi.ranks = atoi(value);
    else if (!strcmp(argv[i], "--rank")) o->ofi.rank = atoi(value);
    else if (!strcmp(argv[i], "--provider")) o->ofi.provider = value;
    else if (!strcmp(argv[i], "--directory")) o->ofi.directory = value;
    else if (!strcmp(argv[i], "--address")) o->ofi.address = value;
    else if (!strcmp(argv[i], "--list")) (void)setenv("RA_OFI_ADDRESSES", value, 1);
    else return 0;
    return 2;
}

int main(int argc, char **argv) {
    options o;
    memset(&o, 0, sizeof o);
    o.t = ring_task_default();
    o.ofi.provider = "tcp;ofi_rxm";
    for (int i = 1, took; i < argc; i += took) {
        took = ring_option(&o.t, argc, argv, i);
        if (!took) took = option(&o, argc, argv, i);
        if (!took) {
            fprintf(stderr, "unknown argument %s, see the top of examples/ring_ofi.c\n", argv[i]);
            return 2;
        }
    }
    if (!o.ofi.ranks) o.local = o.ofi.ranks = 3;   /* without arguments */
    if (o.ofi.ranks < 1 || o.ofi.ranks > MOST_RANKS || o.t.tokens < 1 || o.t.heads < 1 ||
        o.t.kv_heads < 1 || o.t.dim < 1) {
        fprintf(stderr, "1 to %d ranks, at least one token\n", MOST_RANKS);
        return 2;
    }
    o.ofi.world = ring_task_id("ring_ofi", &o.t, o.ofi.ranks);
    if (o.local && !o.ofi.address && strstr(o.ofi.provider, "tcp")) o.ofi.address = "127.0.0.1";
    if (o.local || o.ofi.rank == 0) {
        printf("%lld tokens, %d/%d heads of %d, %s, zigzag, %d processes over %s\n",
               (long long)o.t.tokens, o.t.heads, o.t.kv_heads, o.t.dim,
               o.t.full ? "full" : "causal", o.ofi.ranks, o.ofi.provider);
        fflush(stdout);
    }
    return o.local ? run_all(&o) : run_one(&o);
}
