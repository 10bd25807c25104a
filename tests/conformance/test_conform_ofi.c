/* The conformance suite on examples/transports/ra_ofi.h: three providers of libfabric, plain and
 * one-sided. Also what the suite does not test: how ranks meet, who is refused, and peers that are
 * killed or stopped. A provider that the installed libfabric lacks is skipped. All traffic stays on
 * 127.0.0.1.
 * --long: up to 8 ranks. */
#include "examples/transports/ra_ofi.h"
#include "tests/conformance/conformance.h"
#include "tests/harness.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <netinet/in.h>
#include <sys/socket.h>

typedef struct form { const char *provider; int one_sided, registers; } form;

typedef struct ofi_world {
    char directory[64];
    const form *f;
    int ranks;
    ra_ofi *ofi[CF_MOST_RINGS][CF_MOST_RANKS];
} ofi_world;

static ra_ofi_desc describe(const form *f, int rank, int ranks, ra_error *why) {
    ra_ofi_desc d = { 0 };
    memset(why, 0, sizeof *why);
    d.provider = f->provider;
    d.one_sided = f->one_sided;
    d.patience_ns = 2000000000;        /* machines that run tests may be slow */
    d.registers = f->registers;
    d.rank = rank;
    d.ranks = ranks;
    if (strcmp(f->provider, "shm")) d.address = "127.0.0.1";
    d.deadline_ns = ra_deadline_ms(20000);
    d.error = why;
    return d;
}

/* 1: the provider is here; otherwise the test is skipped. */
static int here(const form *f) {
    char text[RA_TEXT_BYTES];
    ra_error why;
    ra_ofi *ofi = NULL;
    ra_ofi_desc d = describe(f, 0, 1, &why);
    if (ra_ofi_open(&ofi, &d) == RA_OK) {
        ra_ofi_close(ofi);
        return 1;
    }
    snprintf(text, sizeof text, "%s", why.text);
    h_skip(text);
    return 0;
}

/* -------------------------------------------------------------------------- the suite */
static void *ofi_make(void *user, int ranks, int rings) {
    ofi_world *w = (ofi_world *)calloc(1, sizeof *w);
    (void)rings;
    if (!w) return NULL;
    w->f = (const form *)user;
    w->ranks = ranks;
    strcpy(w->directory, "/tmp/ra_ofi.XXXXXX");
    if (mkdtemp(w->directory)) return w;
    free(w);
    return NULL;
}

static const ra_transport *ofi_join(void *world, int ring, int rank) {
    ofi_world *w = (ofi_world *)world;
    ra_error why;
    ra_ofi_desc d = describe(w->f, rank, w->ranks, &why);
    d.directory = w->directory;
    d.ring = (uint32_t)ring;
    if (ra_ofi_open(&w->ofi[ring][rank], &d) == RA_OK)
        return ra_ofi_transport(w->ofi[ring][rank]);
    printf("rank %d: %s %s\n", rank, why.field, why.text);
    return NULL;
}

static void ofi_leave(void *world, int ring, int rank, int why) {
    ra_ofi *ofi = ((ofi_world *)world)->ofi[ring][rank];
    if (why) (void)ra_ofi_transport(ofi)->abort(ra_ofi_transport(ofi)->ctx, why);
    (void)ra_ofi_close(ofi);
}

static void ofi_end(void *world) {
    (void)rmdir(((ofi_world *)world)->directory);  /* the ranks removed their files */
    free(world);
}

/* ranks: the most, without --long. */
static void judge(const form *f, const char *name, int processes, int ranks) {
    cf_maker m = { name, NULL, ofi_make, ofi_join, ofi_leave, ofi_end, processes, 1, 0, 0, NULL };
    cf_report rep;
    form copy = *f;
    if (!here(f)) return;
    m.user = &copy;
    if (!h_run.large) m.most_ranks = ranks;
    rep = cf_judge(&m, NULL, 0, stdout);
    CHECK_EQ(rep.failed, 0);
    /* loans, three of sendrecv, and registration if it is not needed */
    CHECK_EQ(rep.unclaimed, 5 - (f->one_sided || f->registers));
}

static const form rxm = { "tcp;ofi_rxm", 0, 0 }, rxm_one_sided = { "tcp;ofi_rxm", 1, 0 },
                  rxm_registered = { "tcp;ofi_rxm", 0, 1 };
static const form shm = { "shm", 1, 0 };
static const form net = { "net", 1, 0 };

TEST(tcp_rxm) { judge(&rxm, "libfabric tcp;ofi_rxm", 1, 3); }
TEST(tcp_rxm_one_sided) { judge(&rxm_one_sided, "libfabric tcp;ofi_rxm, one-sided", 1, 2); }
TEST(tcp_rxm_threads) { judge(&rxm_registered, "libfabric tcp;ofi_rxm, registered", 0, 2); }
TEST(shared_memory) { judge(&shm, "libfabric shm", 1, 3); }
TEST(tcp_net) { judge(&net, "libfabric net", 1, 3); }

/* -------------------------------------------------------------------------- meeting */
typedef struct meeting {               /* one rank of two, as threads */
    ra_ofi_desc d;
    ra_error why;
    ra_ofi *ofi;
    ra_status status;
} meeting;

static void *meet(void *arg) {
    meeting *m = (meeting *)arg;
    m->status = ra_ofi_open(&m->ofi, &m->d);
    return NULL;
}

static void *part(void *arg) {
    meeting *m = (meeting *)arg;
    if (m->status == RA_OK) m->status = ra_ofi_close(m->ofi);
    return NULL;
}

static void both(meeting *m, void *(*what)(void *)) {
    pthread_t id[2];
    for (int r = 0; r < 2; r++)
        if (pthread_create(&id[r], NULL, what, &m[r])) abort();
    for (int r = 0; r < 2; r++) pthread_join(id[r], NULL);
}

static void describe_both(meeting *m, const form *f) {
    memset(m, 0, 2 * sizeof *m);
    for (int r = 0; r < 2; r++) m[r].d = describe(f, r, 2, &m[r].why);
}

/* Gathers as MPI_Allgather does. ctx: this rank's record goes to table[rank]. */
static struct { pthread_barrier_t gate; char record[2][1024]; } table;

static int gather(void *ctx, const void *mine, void *all, size_t bytes) {
    if (bytes > sizeof table.record[0]) return 1;
    memcpy(table.record[*(int *)ctx], mine, bytes);
    (void)pthread_barrier_wait(&table.gate);
    for (int r = 0; r < 2; r++) memcpy((char *)all + (size_t)r * bytes, table.record[r], bytes);
    return 0;
}

TEST(by_exchange) {
    static int rank[2] = { 0, 1 };
    meeting m[2];
    if (!here(&rxm)) return;
    describe_both(m, &rxm);
    pthread_barrier_init(&table.gate, NULL, 2);
    for (int r = 0; r < 2; r++) {
        m[r].d.exchange = gather;
        m[r].d.exchange_ctx = &rank[r];
    }
    both(m, meet);
    for (int r = 0; r < 2; r++) CHECK_EQ(m[r].status, RA_OK);
    both(m, part);
    for (int r = 0; r < 2; r++) CHECK_EQ(m[r].status, RA_OK);
    pthread_barrier_destroy(&table.gate);
}

/* A port that was free a moment ago. */
static int free_port(void) {
    struct sockaddr_in a;
    socklen_t n = sizeof a;
    int fd = socket(AF_INET, SOCK_STREAM, 0), port = 0;
    memset(&a, 0, sizeof a);
    a.sin_family = AF_INET;
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (fd >= 0 && !bind(fd, (struct sockaddr *)(void *)&a, n) &&
        !getsockname(fd, (struct sockaddr *)(void *)&a, &n))
        port = ntohs(a.sin_port);
    if (fd >= 0) close(fd);
    return port;
}

TEST(by_environment) {
    char list[96];
    meeting m[2];
    if (!here(&rxm)) return;
    snprintf(list, sizeof list, "127.0.0.1:%d,127.0.0.1:%d", free_port(), free_port());
    setenv("RA_OFI_ADDRESSES", list, 1);
    describe_both(m, &rxm);
    both(m, meet);
    for (int r = 0; r < 2; r++) CHECK_EQ(m[r].status, RA_OK);
    both(m, part);
    for (int r = 0; r < 2; r++) CHECK_EQ(m[r].status, RA_OK);
    setenv("RA_OFI_ADDRESSES", "only:one", 1);
    describe_both(m, &rxm);
    CHECK_EQ(ra_ofi_open(&m[0].ofi, &m[0].d), RA_E_UNSET);
    setenv("RA_OFI_ADDRESSES", list, 1);
    describe_both(m, &shm);
    CHECK_EQ(ra_ofi_open(&m[0].ofi, &m[0].d), RA_E_TRANSPORT);
    unsetenv("RA_OFI_ADDRESSES");
}

/* Opens both ranks in a directory of their own, which is removed again; 0: they did not meet. */
static int open_both(meeting *m, const form *f) {
    char directory[] = "/tmp/ra_ofi.XXXXXX";
    if (!CHECK(mkdtemp(directory) != NULL)) return 0;
    describe_both(m, f);
    for (int r = 0; r < 2; r++) m[r].d.directory = directory;
    both(m, meet);
    CHECK_EQ(rmdir(directory), 0);
    return CHECK_EQ(m[0].status, RA_OK) && CHECK_EQ(m[1].status, RA_OK);
}

/* A receive that meets another length has what fits, and says which length: unless `loses`, a
 * provider that ends the connection at a short message that is too long. */
static void other_lengths(const form *f, int loses) {
    static uint8_t from[1 << 17], to[1 << 17];
    static const size_t sent[4] = { 1000, 1000, 100000, 100000 };
    static const size_t want[4] = { 200, 1600, 70000, 130000 };
    meeting m[2];
    if (!here(f)) return;
    for (int i = 0; i < 4 && open_both(m, f); i++) {
        const size_t fits = sent[i] < want[i] ? sent[i] : want[i];
        const int64_t until = ra_deadline_ms(10000);
        ra_transport_op op[2];
        h_context("%zu bytes meet a receive of %zu", sent[i], want[i]);
        memset(op, 0, sizeof op);
        memset(to, 0, sizeof to);
        for (size_t k = 0; k < sizeof from; k++) from[k] = (uint8_t)(k * 7 + (size_t)i + k / 256);
        for (int r = 0; r < 2; r++) {
            const ra_transport *t = ra_ofi_transport(m[r].ofi);
            ra_transport_op *list[1] = { &op[r] };
            op[r].kind = (uint8_t)(r ? RA_MSG_RECV : RA_MSG_SEND);
            op[r].channel = (uint8_t)(i & 1);
            op[r].peer = 1 - r;
            op[r].buf = r ? to : from;
            op[r].len = r ? want[i] : sent[i];
            CHECK_EQ(t->post(t->ctx, list, 1), RA_OK);
        }
        while ((op[0].state == RA_MSG_PENDING || op[1].state == RA_MSG_PENDING) &&
               ra_now_ns() < until)
            for (int r = 0; r < 2; r++)
                (void)ra_ofi_transport(m[r].ofi)->poll(ra_ofi_transport(m[r].ofi)->ctx, NULL, 0);
        CHECK(op[0].state == RA_MSG_DONE || op[0].state == RA_E_TRUNC);
        CHECK_EQ(op[1].state, RA_E_TRUNC);
        if (!loses || i || op[1].done) {
            CHECK_EQ(op[1].done, sent[i]);
            CHECK_BITS(to, from, fits);
        }
        CHECK_EQ(to[fits], 0);
        both(m, part);
    }
}

TEST(other_lengths_of_rxm) { other_lengths(&rxm, 1); }
TEST(other_lengths_of_rxm_one_sided) { other_lengths(&rxm_one_sided, 0); }
TEST(other_lengths_of_shm) { other_lengths(&shm, 0); }
TEST(other_lengths_of_net) { other_lengths(&net, 0); }

/* Once ranks have met, /dev/shm has no file of theirs, which would stay if all were killed. */
TEST(shm_leaves_no_file) {
    meeting m[2];
    char mine[40];
    struct dirent *e;
    DIR *d;
    if (!here(&shm) || !open_both(m, &shm)) return;
    d = opendir("/dev/shm");
    snprintf(mine, sizeof mine, "%ld:", (long)getpid());
    while (CHECK(d != NULL) && (e = readdir(d)) != NULL)
        if (!CHECK(strncmp(e->d_name, mine, strlen(mine)) != 0)) printf("left: %s\n", e->d_name);
    if (d) closedir(d);
    both(m, part);
}

TEST(whoever_differs_is_told) {
    char directory[] = "/tmp/ra_ofi.XXXXXX", path[64];
    meeting m[2];
    if (!here(&rxm) || !CHECK(mkdtemp(directory) != NULL)) return;
    describe_both(m, &rxm);
    for (int r = 0; r < 2; r++) {
        m[r].d.directory = directory;
        m[r].d.shape = 7 + (uint64_t)r;
    }
    both(m, meet);
    for (int r = 0; r < 2; r++) {
        CHECK_EQ(m[r].status, RA_E_SHAPE);
        CHECK(strstr(m[r].why.text, "shape differs at rank") != NULL);
        snprintf(path, sizeof path, "%s/ra_ofi.0.0.%d", directory, r);
        CHECK_EQ(unlink(path), 0);     /* ranks that never met leave their files */
    }
    CHECK_EQ(rmdir(directory), 0);
}

TEST(bad_descriptors) {
    static const form nobody = { "no such provider", 0, 0 };
    ra_error why;
    ra_ofi *ofi = NULL;
    ra_ofi_desc d = describe(&nobody, 0, 1, &why);
    CHECK_EQ(ra_ofi_open(&ofi, &d), RA_E_TRANSPORT);
    d.provider = NULL;
    CHECK_EQ(ra_ofi_open(&ofi, &d), RA_E_NULL);
    d.provider = "shm";
    d.rank = 1;
    CHECK_EQ(ra_ofi_open(&ofi, &d), RA_E_RANGE);
    d.rank = 0;
    d.ranks = 2;
    CHECK_EQ(ra_ofi_open(&ofi, &d), RA_E_UNSET);
    d.ranks = 1;
    d.patience_ns = -1;
    CHECK_EQ(ra_ofi_open(&ofi, &d), RA_E_RANGE);
    CHECK(ofi == NULL);
}

/* -------------------------------------------------------------------------- dead peers */
/* Rank 1, in a separate process, ends without notice while rank 0 awaits its message. Rank 0's op
 * ends with RA_E_PEER, and the context can be closed. */
static void lose_a_peer(const form *f, int no_pidfd) {
    char directory[] = "/tmp/ra_ofi.XXXXXX", byte[1024];
    ra_transport_op op, *list[1] = { &op };
    int64_t until = ra_deadline_ms(15000);
    const ra_transport *t;
    ra_ofi *ofi = NULL;
    ra_error why;
    ra_ofi_desc d;
    pid_t pid;
    if (!here(f) || !CHECK(mkdtemp(directory) != NULL)) return;
    fflush(NULL);
    pid = fork();
    d = describe(f, pid == 0, 2, &why);
    d.directory = directory;
    d.no_pidfd = no_pidfd;
    d.patience_ns = 0;
    if (pid == 0) {
        if (ra_ofi_open(&ofi, &d)) _exit(1);
        usleep(100000);
        kill(getpid(), SIGKILL);
    }
    memset(&op, 0, sizeof op);
    op.kind = RA_MSG_RECV;
    op.peer = 1;
    op.buf = byte;
    op.len = sizeof byte;
    if (CHECK_EQ(ra_ofi_open(&ofi, &d), RA_OK)) {
        t = ra_ofi_transport(ofi);
        CHECK_EQ(t->post(t->ctx, list, 1), RA_OK);
        while (op.state == RA_MSG_PENDING && ra_now_ns() < until)
            if (t->wait(t->ctx, list, 1, until)) break;
        CHECK_EQ(op.state, RA_E_PEER);
        CHECK(t->error_text(t->ctx, RA_E_PEER) != NULL);
        CHECK_EQ(t->abort(t->ctx, RA_E_PEER), RA_OK);
        CHECK_EQ(t->quiesce(t->ctx, ra_deadline_ms(5000)), RA_OK);
        CHECK_EQ(ra_ofi_close(ofi), RA_OK);
    }
    (void)waitpid(pid, NULL, 0);
    CHECK_EQ(rmdir(directory), 0);
}

/* Rank 1 of three ends while rank 0 still waits for rank 2, which never comes. */
TEST(a_process_that_dies_while_ranks_meet) {
    char directory[] = "/tmp/ra_ofi.XXXXXX", path[64];
    ra_ofi *ofi = NULL;
    ra_error why;
    ra_ofi_desc d;
    pid_t pid;
    if (!here(&rxm) || !CHECK(mkdtemp(directory) != NULL)) return;
    fflush(NULL);
    pid = fork();
    d = describe(&rxm, pid == 0, 3, &why);
    d.directory = directory;
    if (pid == 0) {
        alarm(2);
        (void)ra_ofi_open(&ofi, &d);
        _exit(1);
    }
    CHECK_EQ(ra_ofi_open(&ofi, &d), RA_E_PEER);
    CHECK(strstr(why.text, "the process of rank 1 has ended") != NULL);
    (void)waitpid(pid, NULL, 0);
    for (int r = 0; r < 2; r++) {
        snprintf(path, sizeof path, "%s/ra_ofi.0.0.%d", directory, r);
        CHECK_EQ(unlink(path), 0);
    }
    CHECK_EQ(rmdir(directory), 0);
}

/* Rank 1 is stopped while rank 0 sends it a message and awaits one: wait ends at its deadline, and
 * quiesce when nothing has moved for a while. If closing the endpoint is enough, the buffers are
 * then safe. */
static void stop_a_peer(const form *f, int safe) {
    static char byte[2][1 << 20];
    char directory[] = "/tmp/ra_ofi.XXXXXX";
    ra_transport_op op[2], *list[2] = { &op[0], &op[1] };
    const ra_transport *t;
    ra_ofi *ofi = NULL;
    ra_error why;
    ra_ofi_desc d;
    int code;
    pid_t pid;
    if (!here(f) || !CHECK(mkdtemp(directory) != NULL)) return;
    fflush(NULL);
    pid = fork();
    d = describe(f, pid == 0, 2, &why);
    d.directory = directory;
    d.patience_ns = 0;
    if (pid == 0) {
        if (ra_ofi_open(&ofi, &d) == RA_OK) kill(getpid(), SIGSTOP);
        _exit(1);
    }
    memset(op, 0, sizeof op);
    for (int i = 0; i < 2; i++) {
        op[i].kind = (uint8_t)(i ? RA_MSG_RECV : RA_MSG_SEND);
        op[i].peer = 1;
        op[i].buf = byte[i];
        op[i].len = sizeof byte[i];
    }
    if (CHECK_EQ(ra_ofi_open(&ofi, &d), RA_OK)) {
        t = ra_ofi_transport(ofi);
        (void)waitpid(pid, NULL, WUNTRACED);
        CHECK_EQ(t->post(t->ctx, list, 2), RA_OK);
        CHECK_EQ(t->wait(t->ctx, list, 2, ra_deadline_ms(50)), RA_OK);
        CHECK_EQ(op[1].state, RA_MSG_PENDING);
        CHECK_EQ(t->abort(t->ctx, RA_E_TIMEOUT), RA_OK);
        code = t->quiesce(t->ctx, ra_deadline_ms(20000));
        CHECK(code == RA_OK || (code == RA_E_UNSAFE && !safe));
        kill(pid, SIGKILL);
        code = ra_ofi_close(ofi);
        CHECK(code == RA_OK || (code == RA_E_UNSAFE && !safe));
    }
    kill(pid, SIGKILL);
    (void)waitpid(pid, NULL, 0);
    CHECK_EQ(rmdir(directory), 0);
}

TEST(a_stopped_process) { stop_a_peer(&rxm, 0); }
TEST(a_stopped_process_of_shm) { stop_a_peer(&shm, 0); }
TEST(a_stopped_process_of_net) { stop_a_peer(&net, 1); }
TEST(a_killed_process) { lose_a_peer(&rxm, 0); }
TEST(a_killed_process_one_sided) { lose_a_peer(&rxm_one_sided, 0); }
TEST(a_killed_process_of_shm) { lose_a_peer(&shm, 0); }
TEST(a_killed_process_of_net) { lose_a_peer(&net, 0); }
TEST(a_peer_that_only_pings_find) { lose_a_peer(&rxm, 1); }

int main(int argc, char **argv) {
    static const h_test tests[] = {
        ENTRY(tcp_rxm), ENTRY(tcp_rxm_one_sided), ENTRY(tcp_rxm_threads), ENTRY(shared_memory),
        ENTRY(tcp_net), ENTRY(by_exchange), ENTRY(by_environment), ENTRY(whoever_differs_is_told),
        ENTRY(other_lengths_of_rxm), ENTRY(other_lengths_of_rxm_one_sided),
        ENTRY(other_lengths_of_shm), ENTRY(other_lengths_of_net), ENTRY(shm_leaves_no_file),
        ENTRY(bad_descriptors), ENTRY(a_killed_process), ENTRY(a_killed_process_one_sided),
        ENTRY(a_killed_process_of_shm), ENTRY(a_killed_process_of_net),
        ENTRY(a_peer_that_only_pings_find), ENTRY(a_stopped_process),
        ENTRY(a_stopped_process_of_shm), ENTRY(a_stopped_process_of_net),
        ENTRY(a_process_that_dies_while_ranks_meet),
    };
    return h_main(argc, argv, tests, sizeof tests / sizeof *tests);
}
