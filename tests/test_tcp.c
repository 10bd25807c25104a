/* examples/transports/ra_tcp.h. Proves the contract over loopback addresses, the end of passes
 * whose peers are killed, stopped or strangers, and the refusal of wrong handshakes. Compiled with
 * RA_TCP_SODIUM it tests the sealed form in the same way, and peers without the key. All traffic
 * stays on 127.0.0.1 and ::1. */
#define _POSIX_C_SOURCE 200809L
#include "ringattn.h"
#include <pthread.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

/* Sees what ra_tcp.h frees, how often it reads and writes, and what it closes; may play an endless
 * sender, a receiver that takes everything, and a system without memory. */
static void tn_free(void *p);
static ssize_t tn_recv(int fd, void *buf, size_t n, int flags);
static ssize_t tn_sendmsg(int fd, const struct msghdr *m, int flags);
static void *tn_malloc(size_t n);
static int tn_close(int fd);
static int tn_reads, tn_writes;
#define free(p) tn_free(p)
#define malloc tn_malloc
#define recv tn_recv
#define sendmsg tn_sendmsg
#define close tn_close
#include "examples/transports/ra_tcp.h"
#undef free
#undef malloc
#undef recv
#undef sendmsg
#undef close
#include <malloc.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include "examples/transports/ring_check.h"
#include "tests/harness.h"
#include "tests/conformance/conformance.h"

enum { TN_RINGS = 2, TN_RANKS = 8 };
#define TN_MS ((int64_t)1000000)

/* Listening sockets of all ranks, made before the ranks start, so that their ports are free. */
typedef struct tn_world {
    int ranks, rings, fd[TN_RINGS][TN_RANKS];
    uint32_t first;                    /* number of its first ring */
    char text[TN_RINGS][TN_RANKS][32];
    const char *at[TN_RINGS][TN_RANKS];
    ra_tcp *tcp[TN_RINGS][TN_RANKS];
    const void *key;
} tn_world;

static const char tn_key[32] = "thirty-two bytes of test secret";

/* 32 secret bytes each, and in how many freed blocks they were still there. */
static uint8_t tn_secret[4][32];
static int tn_secrets, tn_left;

static void tn_free(void *p) {
    const uint8_t *block = (const uint8_t *)p;
    size_t n = p && tn_secrets ? malloc_usable_size(p) : 0;
    for (size_t i = 0; i + 32 <= n; i++)
        for (int k = 0; k < tn_secrets; k++) tn_left += !memcmp(block + i, tn_secret[k], 32);
    free(p);
}

/* Reads that bring as much as fits; writes that succeed at once; and that find no memory; mallocs
 * until there is none, -1: any number. How often descriptor 0 was closed. */
static int tn_endless, tn_sink, tn_no_memory, tn_mallocs = -1, tn_closed_0;

static ssize_t tn_recv(int fd, void *buf, size_t n, int flags) {
    __atomic_add_fetch(&tn_reads, 1, __ATOMIC_RELAXED);
    return tn_endless && tn_endless-- ? (ssize_t)n : recv(fd, buf, n, flags);
}

static ssize_t tn_sendmsg(int fd, const struct msghdr *m, int flags) {
    __atomic_add_fetch(&tn_writes, 1, __ATOMIC_RELAXED);
    if (tn_no_memory && tn_no_memory--) {
        errno = ENOBUFS;
        return -1;
    }
    return tn_sink ? (ssize_t)(m->msg_iov[0].iov_len + m->msg_iov[1].iov_len)
                   : sendmsg(fd, m, flags);
}

static void *tn_malloc(size_t n) {
    return tn_mallocs < 0 || tn_mallocs-- > 0 ? malloc(n) : NULL;
}

static int tn_close(int fd) {
    if (fd == 0) (void)__atomic_add_fetch(&tn_closed_0, 1, __ATOMIC_RELAXED);
    return close(fd);
}

/* Descriptors for a test; 0: the hard limit is lower, and the test is skipped. */
static int tn_descriptors(int n) {
    struct rlimit most;
    if (getrlimit(RLIMIT_NOFILE, &most)) return 0;
    if (most.rlim_cur < (rlim_t)n) {
        most.rlim_cur = most.rlim_max < (rlim_t)n ? most.rlim_max : (rlim_t)n;
        (void)setrlimit(RLIMIT_NOFILE, &most);
    }
    if (most.rlim_cur >= (rlim_t)n) return 1;
    h_skip("needs more descriptors (ulimit -Hn)");
    return 0;
}

static tn_world *tn_make(const char *host, int ranks, int rings) {
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

static ra_tcp_desc tn_desc(tn_world *w, int ring, int rank) {
    ra_tcp_desc d = { 0 };
    d.rank = rank;
    d.ranks = w->ranks;
    d.addresses = w->at[ring];
    d.world = 77;
    d.ring = w->first + (uint32_t)ring;
    d.listen_fd = w->fd[ring][rank];
    d.connect_ns = 10000 * TN_MS;
    d.key = w->key;
    w->fd[ring][rank] = -1;
    return d;
}

TEST(job_ids) {
    static const char *const names[3] = { "ab", "c", "" }, *const split[2] = { "a", "bc" };
    static const int64_t numbers[2] = { 1, 2 };
    const uint64_t id = ring_job_id("program", names, 2, numbers, 2);
    CHECK(id != 0 && id == ring_job_id("program", names, 2, numbers, 2));
    CHECK(id != ring_job_id("programs", names, 2, numbers, 2));
    CHECK(id != ring_job_id("program", split, 2, numbers, 2));
    CHECK(id != ring_job_id("program", names, 3, numbers, 2));
    CHECK(id != ring_job_id("program", names, 2, numbers, 1));
    CHECK(id != ring_job_id("program", names, 2, numbers + 1, 1));
}

static void *tn_maker_make(void *user, int ranks, int rings) {
    return tn_make((const char *)user, ranks, rings);
}

/* A rank in a separate process closes the sockets of the others. */
static const ra_transport *tn_join(void *world, int ring, int rank) {
    tn_world *w = (tn_world *)world;
    ra_error why;
    ra_tcp_desc d = tn_desc(w, ring, rank);
    d.error = &why;
    if (ra_tcp_open(&w->tcp[ring][rank], &d) == RA_OK) return ra_tcp_transport(w->tcp[ring][rank]);
    printf("rank %d: %s %s\n", rank, why.field, why.text);
    return NULL;
}

static void tn_leave(void *world, int ring, int rank, int why) {
    tn_world *w = (tn_world *)world;
    (void)why;
    ra_tcp_close(w->tcp[ring][rank]);
}

static void tn_end(void *world) {
    tn_world *w = (tn_world *)world;
    for (int i = 0; i < w->rings; i++)
        for (int r = 0; r < w->ranks; r++) if (w->fd[i][r] > 0) close(w->fd[i][r]);
    free(w);
}

static cf_maker tn_maker(const char *host, int processes) {
    static char name[80];
    cf_maker m = { "tcp", NULL, tn_maker_make, tn_join, tn_leave, tn_end, 0, 1, 0, 0, NULL };
    m.user = (void *)(uintptr_t)host;
    m.processes = processes;
    snprintf(name, sizeof name, "tcp, %s, ranks are %s", host, processes ? "processes" : "threads");
    m.name = name;
    return m;
}

static int tn_has_v6(void) {
    int port = 0, fd = ra_tcp_listen("[::1]:0", &port);
    if (fd >= 0) close(fd);
    return fd >= 0;
}

TEST(conformance_threads) {
    cf_maker m = tn_maker("127.0.0.1", 0);
    cf_report rep;
    m.most_ranks = h_run.large ? 0 : 3;
    rep = cf_judge(&m, NULL, 0, stdout);
    CHECK_EQ(rep.failed, 0);
    CHECK_EQ(rep.unclaimed, 5);            /* loans, registration, and those of sendrecv */
}

TEST(conformance_processes) {
    cf_maker m = tn_maker("127.0.0.1", 1);
    m.most_ranks = h_run.large ? 0 : 3;
    CHECK_EQ(cf_judge(&m, h_run.large ? NULL : "pass", 0, stdout).failed, 0);
}

TEST(conformance_v6) {
    cf_maker m = tn_maker("[::1]", 0);
    m.most_ranks = h_run.large ? 0 : 3;
    if (!tn_has_v6()) h_skip("no ::1 here");
    else CHECK_EQ(cf_judge(&m, h_run.large ? NULL : "es", 0, stdout).failed, 0);
}

/* Processes that the suite did not start, as under mpirun. Every world uses the same ports; the
 * number of its ring tells it from the others. */
static void *tn_outside_make(void *user, int ranks, int rings) {
    static uint32_t count;
    const tn_world *ports = (const tn_world *)user;
    tn_world *w = (tn_world *)calloc(1, sizeof *w);
    if (!w) abort();
    *w = *ports;
    w->ranks = ranks;
    w->rings = rings;
    w->first = count;
    count += 2;
    return w;
}

TEST(conformance_from_outside) {
    enum { RANKS = 3 };
    tn_world *ports = tn_make("127.0.0.1", RANKS, 2);
    cf_maker m = tn_maker("127.0.0.1", 1);
    char file[] = "/tmp/ra_conformance_XXXXXX";
    int fd = mkstemp(file), status;
    cf_outside o;
    pid_t pid[RANKS];
    CHECK(fd >= 0);
    close(fd);
    for (int i = 0; i < 2; i++)
        for (int r = 0; r < RANKS; r++) {
            close(ports->fd[i][r]);
            ports->fd[i][r] = 0;
        }
    m.make = tn_outside_make;
    m.user = ports;
    m.outside = &o;
    fflush(NULL);
    for (int r = 0; r < RANKS; r++) {
        pid[r] = fork();
        if (pid[r] == 0) {
            alarm(200);
            o.rank = r;
            o.ranks = RANKS;
            o.file = file;
            exit(cf_judge(&m, h_run.large ? NULL : "es", 0, r ? NULL : stdout).failed);
        }
    }
    for (int r = 0; r < RANKS; r++) {
        CHECK(waitpid(pid[r], &status, 0) > 0);
        CHECK_EQ(status, 0);
    }
    remove(file);
    free(ports);
}

/* -------------------------------------------------------------------------- a peer that is gone */
typedef struct tn_watch { int32_t passes[TN_RANKS], status[TN_RANKS], late_ms[TN_RANKS]; } tn_watch;

static tn_watch *tn_watch_new(void) {
    FILE *f = tmpfile();
    void *p = MAP_FAILED;
    if (f && !ftruncate(fileno(f), (off_t)sizeof(tn_watch)))
        p = mmap(NULL, sizeof(tn_watch), PROT_READ | PROT_WRITE, MAP_SHARED, fileno(f), 0);
    if (p == MAP_FAILED) abort();
    fclose(f);
    return (tn_watch *)p;
}

/* Passes until one fails. Returns how it ended, and how long after its deadline. */
static void tn_passes(tn_world *w, tn_watch *seen, int rank, int64_t ms) {
    static cf_shared shared;
    cf_maker m = tn_maker("", 1);
    cf_rank r = { 0 };
    cf_pass p;
    ra_error e;
    int64_t deadline = 0;
    r.shared = &shared;
    r.maker = &m;
    r.rank = rank;
    r.ranks = w->ranks;
    r.patience = 5000 * TN_MS;
    for (int i = 0; i < w->ranks; i++)
        if (i != rank) {
            close(w->fd[0][i]);
            w->fd[0][i] = -1;
        }
    r.t[0] = tn_join(w, 0, rank);
    if (!r.t[0] || cf_pass_open(&r, &p, rank, w->ranks, r.t[0], &e)) exit(1);
    while (!cf_load(&seen->status[rank])) {
        deadline = ra_deadline_ms(ms);
        cf_store(&seen->status[rank], cf_pass_run(&p, deadline));
        __atomic_add_fetch(&seen->passes[rank], 1, __ATOMIC_ACQ_REL);
    }
    cf_store(&seen->late_ms[rank], (int32_t)((ra_now_ns() - deadline) / TN_MS));
    cf_pass_close(&r, &p);
    tn_leave(w, 0, rank, RA_OK);
    tn_end(w);
    exit(0);
}

static int tn_reap(pid_t pid, int64_t limit_ms) {
    int64_t until = ra_deadline_ms(limit_ms);
    int status = -1;
    while (waitpid(pid, &status, WNOHANG) == 0) {
        if (ra_now_ns() > until) {
            kill(pid, SIGKILL);
            waitpid(pid, &status, 0);
            return -1;
        }
        cf_sleep_us(500);
    }
    return status;
}

/* In a signal handler: every connection of this process is cut, or gets bytes that belong to no
 * message. */
static void tn_spoil(int signal_number) {
    static const char garbage[57] = "not a message of any ring";
    const int was = errno;
    for (int fd = 3; fd < 256; fd++) {
        struct sockaddr_storage peer;
        socklen_t n = sizeof peer;
        if (getpeername(fd, (struct sockaddr *)&peer, &n) || peer.ss_family != AF_INET) continue;
        if (signal_number == SIGUSR1) (void)shutdown(fd, SHUT_RDWR);
        else (void)send(fd, garbage, sizeof garbage, MSG_DONTWAIT | MSG_NOSIGNAL);
    }
    errno = was;
}

/* A rank of two or three gets a signal at a random moment. The others must return, and so must this
 * one, unless it is killed or stopped. */
static void tn_lose_a_rank(int signal_number, int rounds) {
    const int spoils = signal_number == SIGUSR1 || signal_number == SIGUSR2;
    tn_watch *seen = tn_watch_new();
    (void)signal(SIGUSR1, tn_spoil);
    (void)signal(SIGUSR2, tn_spoil);
    for (int round = 0; round < rounds; round++) {
        h_rng rng = h_case_rng(round);
        const int ranks = 2 + round % 2, victim = (int)h_range(&rng, 0, ranks - 1);
        tn_world *w;
        pid_t pid[3];
        if (!h_case(round)) continue;
        w = tn_make("127.0.0.1", ranks, 1);
        memset(seen, 0, sizeof *seen);
        fflush(NULL);
        for (int r = 0; r < ranks; r++) {
            pid[r] = fork();
            if (pid[r] == 0) {
                alarm(60);
                tn_passes(w, seen, r, signal_number == SIGSTOP ? 1500 : 8000);
            }
        }
        for (int i = 0; i < 20000 && cf_load(&seen->passes[0]) < 2; i++) cf_sleep_us(500);
        CHECK(cf_load(&seen->passes[0]) >= 2);
        cf_sleep_us((long)h_range(&rng, 0, 20000));
        kill(pid[victim], signal_number);
        for (int r = 0; r < ranks; r++)
            if (r != victim || spoils) CHECK_EQ(tn_reap(pid[r], 10000), 0);
        if (!spoils) kill(pid[victim], SIGKILL);
        if (!spoils) (void)tn_reap(pid[victim], 1000);
        for (int r = 0; r < ranks; r++) {
            int s = seen->status[r];
            if (r == victim && !spoils) continue;
            CHECK(s == RA_E_PEER || s == RA_E_ABORTED ||
                  (signal_number == SIGSTOP && s == RA_E_TIMEOUT) ||
                  (signal_number == SIGUSR2 && (s == RA_E_PROTO || s == RA_E_MISMATCH)));
            if (h_run.verbose) printf("rank %d of %d: %s, %d ms after its deadline\n", r,
                                      ranks, ra_status_text(s), seen->late_ms[r]);
            CHECK(seen->late_ms[r] <= (h_run.large ? 100 : 1000));
        }
        tn_end(w);
    }
    munmap(seen, sizeof *seen);
}

TEST(killed_rank) { tn_lose_a_rank(SIGKILL, h_run.large ? 30 : 3); }
TEST(cut_rank) { tn_lose_a_rank(SIGUSR1, h_run.large ? 30 : 2); }
TEST(garbage_of_a_rank) { tn_lose_a_rank(SIGUSR2, h_run.large ? 30 : 2); }
TEST(stopped_rank) { tn_lose_a_rank(SIGSTOP, h_run.large ? 10 : 1); }

/* -------------------------------------------------------------------------- handshakes */
typedef struct tn_opening {            /* ra_tcp_open on a separate thread */
    ra_tcp_desc d;
    ra_tcp *tcp;
    ra_error why;
    int32_t status, done;
    pthread_t id;
} tn_opening;

static void *tn_open_main(void *arg) {
    tn_opening *o = (tn_opening *)arg;
    o->d.error = &o->why;
    o->status = ra_tcp_open(&o->tcp, &o->d);
    cf_store(&o->done, 1);
    return NULL;
}

static void tn_start(tn_opening *o, const ra_tcp_desc *d) {
    memset(o, 0, sizeof *o);
    o->d = *d;
    if (pthread_create(&o->id, NULL, tn_open_main, o)) abort();
}

static int tn_join_open(tn_opening *o) {
    pthread_join(o->id, NULL);
    return o->status;
}

/* A raw connection to a rank's port; -1: refused. */
static int tn_call(const char *address) {
    int why;
    struct addrinfo *a = ra_tcp_resolve(address, 0, &why);
    int fd = a ? socket(a->ai_family, SOCK_STREAM, 0) : -1;
    if (fd >= 0 && connect(fd, a->ai_addr, a->ai_addrlen)) {
        close(fd);
        fd = -1;
    }
    if (a) freeaddrinfo(a);
    return fd;
}

/* One message from rank 1 to rank 0 through two open transports; returns how the receive ended. */
static int tn_message(ra_tcp *zero, ra_tcp *one) {
    uint8_t in[3000], out[3000];
    ra_transport_op op[2], *list[2] = { &op[0], &op[1] };
    int64_t until = ra_deadline_ms(5000);
    memset(op, 0, sizeof op);
    memset(out, 7, sizeof out);
    memset(in, 0, sizeof in);
    op[0].kind = RA_MSG_RECV;
    op[0].peer = 1;
    op[0].buf = in;
    op[1].kind = RA_MSG_SEND;
    op[1].peer = 0;
    op[1].buf = out;
    op[0].len = op[1].len = sizeof in;
    (void)ra_tcp_post(zero, &list[0], 1);
    (void)ra_tcp_post(one, &list[1], 1);
    while (op[0].state == RA_MSG_PENDING && ra_now_ns() < until) {
        (void)ra_tcp_poll(zero, &list[0], 1);
        (void)ra_tcp_poll(one, &list[1], 1);
    }
    (void)ra_tcp_abort(zero, RA_E_CANCELLED);
    (void)ra_tcp_abort(one, RA_E_CANCELLED);
    (void)ra_tcp_quiesce(zero, ra_now_ns());
    (void)ra_tcp_quiesce(one, ra_now_ns());
    if (op[0].state == RA_MSG_DONE && memcmp(in, out, sizeof in)) return RA_E_IO;
    return op[0].state;
}

/* Opens two ranks that differ. Expected: statuses, and a word of the sentences. */
static void tn_refused(const ra_tcp_desc *zero, const ra_tcp_desc *one, int want_zero, int want_one,
                       const char *word) {
    tn_opening o[2];
    tn_start(&o[0], zero);
    tn_start(&o[1], one);
    CHECK_EQ(tn_join_open(&o[0]), want_zero);
    CHECK_EQ(tn_join_open(&o[1]), want_one);
    if (!CHECK(strstr(o[1].why.text, word) != NULL))
        printf("    rank 1 says: %s: %s\n", o[1].why.field, o[1].why.text);
    if (!CHECK(want_zero != RA_E_MISMATCH || strstr(o[0].why.text, word) != NULL))
        printf("    rank 0 says: %s: %s\n", o[0].why.field, o[0].why.text);
    ra_tcp_close(o[0].tcp);
    ra_tcp_close(o[1].tcp);
}

/* What differs is named, and ra_tcp_open fails immediately, with a key once the peer has shown it.
 * Ranks of another run or ring may call by mistake and end nothing. */
TEST(ranks_that_disagree) {
    for (int i = 0; i < 4; i++) {
        static const char *const word[] = { "world", "ring", "ranks", "shape" };
        tn_world *w = tn_make("127.0.0.1", 2, 1);
        ra_tcp_desc zero = tn_desc(w, 0, 0), one = tn_desc(w, 0, 1);
        int64_t begin = ra_now_ns();
        const char *at[3];
        if (!h_case(i)) { tn_end(w); continue; }
        at[0] = w->at[0][0];
        at[1] = w->at[0][1];
        at[2] = w->at[0][1];
        zero.connect_ns = one.connect_ns = (i < 2 ? 300 : 60000) * TN_MS;
        if (i == 0) one.world = 78;
        if (i == 1) one.ring = 1;
        if (i == 2) { one.ranks = 3; one.addresses = at; }
        if (i == 3) one.shape = 5;
        tn_refused(&zero, &one, i < 2 ? RA_E_TIMEOUT : RA_E_MISMATCH,
                   i == 1 ? RA_E_TIMEOUT : RA_E_MISMATCH, word[i]);
        CHECK(ra_now_ns() - begin < 10000 * TN_MS);
        tn_end(w);
    }
}

TEST(another_byte_order) {
    tn_world *w = tn_make("127.0.0.1", 2, 1);
    ra_tcp_desc d = tn_desc(w, 0, 0);
    ra_tcp_hello hello = { 0 };
    tn_opening o;
    int fd;
    d.connect_ns = 300 * TN_MS;
    tn_start(&o, &d);
    fd = tn_call(w->at[0][0]);
    memcpy(hello.magic, "ra_tcp\r\n", 8);
    hello.order = 0x04030201;
    CHECK(fd >= 0 && send(fd, &hello, sizeof hello, MSG_NOSIGNAL) == (ssize_t)sizeof hello);
    CHECK_EQ(tn_join_open(&o), w->key ? RA_E_TIMEOUT : RA_E_MISMATCH);
    CHECK(strstr(o.why.text, "byte order") != NULL);
    close(fd);
    tn_end(w);
}

/* A rank of another ring answers and then closes its port: its ring is named, not the port. */
TEST(the_reason_is_kept) {
    tn_world *w = tn_make("127.0.0.1", 2, 1);
    ra_tcp_desc d = tn_desc(w, 0, 1);
    ra_tcp_hello hello = { 0 };
    struct pollfd calls = { w->fd[0][0], POLLIN, 0 };
    tn_opening o;
    int fd;
    d.connect_ns = 400 * TN_MS;
    tn_start(&o, &d);
    memcpy(hello.magic, "ra_tcp\r\n", 8);
    hello.order = 0x01020304;
    hello.version = RA_TCP_VERSION;
    hello.world = d.world;
    hello.shape = d.shape;
    hello.ring = d.ring + 1;
    hello.ranks = 2;
    hello.to = 1;
    CHECK_EQ(poll(&calls, 1, 5000), 1);
    fd = accept(w->fd[0][0], NULL, NULL);
    CHECK(fd >= 0 && send(fd, &hello, sizeof hello, MSG_NOSIGNAL) == (ssize_t)sizeof hello);
    close(w->fd[0][0]);
    w->fd[0][0] = -1;
    CHECK_EQ(tn_join_open(&o), RA_E_TIMEOUT);
    if (!CHECK(strstr(o.why.text, "in ring") != NULL)) printf("    it says: %s\n", o.why.text);
    close(fd);
    tn_end(w);
}

TEST(no_peer_answers) {
    tn_world *w = tn_make("127.0.0.1", 2, 1);
    ra_tcp_desc d = tn_desc(w, 0, 1);
    ra_tcp *tcp = NULL;
    ra_error why;
    close(w->fd[0][0]);
    w->fd[0][0] = -1;
    d.error = &why;
    d.connect_ns = 200 * TN_MS;
    CHECK_EQ(ra_tcp_open(&tcp, &d), RA_E_TIMEOUT);
    CHECK(strstr(why.text, "without rank 0") != NULL);
    d.rank = 2;
    CHECK_EQ(ra_tcp_open(&tcp, &d), RA_E_RANGE);
    d.rank = d.ranks = 0;
    CHECK_EQ(ra_tcp_open(&tcp, &d), RA_E_RANGE);
    d.ranks = 2;
    d.connect_ns = -1;
    CHECK_EQ(ra_tcp_open(&tcp, &d), RA_E_RANGE);
    d.addresses = NULL;
    CHECK_EQ(ra_tcp_open(&tcp, &d), RA_E_NULL);
    tn_end(w);
}

/* The longest possible connect_ns. */
TEST(longest_patience) {
    tn_world *w = tn_make("127.0.0.1", 2, 1);
    ra_tcp_desc zero = tn_desc(w, 0, 0), one = tn_desc(w, 0, 1);
    zero.connect_ns = one.connect_ns = INT64_MAX;
    tn_refused(&zero, &one, RA_OK, RA_OK, "");
    CHECK_EQ(ra_tcp_open(NULL, &zero), RA_E_NULL);
    tn_end(w);
}

TEST(listens_on_its_own_address_alone) {
    tn_world *w = tn_make("127.0.0.1", 2, 1);
    char other[40];
    int fd;
    snprintf(other, sizeof other, "127.0.0.2%s", strchr(w->at[0][0], ':'));
    fd = tn_call(w->at[0][0]);
    CHECK(fd >= 0);
    if (fd >= 0) close(fd);
    CHECK(tn_call(other) < 0);
    tn_end(w);
}

/* Strangers call first: silent ones, more than there are places for, one that sends nonsense, one
 * that begins like a rank and continues byte by byte. The ring forms nevertheless, and then nobody
 * can connect any more. */
TEST(strangers) {
    enum { SILENT = 2 * RA_TCP_STRANGERS };
    static const char nonsense[] = "GET / HTTP/1.1\r\nHost: the ring, please, and a lot of bytes "
                                   "so that a whole hello is here: 0123456789 0123456789 012345";
    static const char like_a_rank[] = "ra_tcp\r\n\4\3\2\1";
    tn_world *w = tn_make("127.0.0.1", 2, 1);
    ra_tcp_desc zero = tn_desc(w, 0, 0), one = tn_desc(w, 0, 1);
    int fd[SILENT + 2], again;
    tn_opening o[2];
    if (!tn_descriptors(SILENT + 2 + RA_TCP_STRANGERS + 50)) {
        tn_end(w);
        return;
    }
    tn_start(&o[0], &zero);
    for (int i = 0; i < SILENT + 2; i++) CHECK((fd[i] = tn_call(w->at[0][0])) >= 0);
    CHECK(send(fd[SILENT], nonsense, sizeof nonsense, MSG_NOSIGNAL) > 0);
    for (int i = 0; i < 10; i++) {
        (void)send(fd[SILENT + 1], &like_a_rank[i], 1, MSG_NOSIGNAL);
        cf_sleep_us(2000);
    }
    CHECK(!cf_load(&o[0].done));
    tn_start(&o[1], &one);
    CHECK_EQ(tn_join_open(&o[0]), RA_OK);
    CHECK_EQ(tn_join_open(&o[1]), RA_OK);
    again = tn_call(w->at[0][0]);
    CHECK(again < 0);
    if (o[0].tcp && o[1].tcp) CHECK_EQ(tn_message(o[0].tcp, o[1].tcp), RA_MSG_DONE);
    for (int i = 0; i < SILENT + 2; i++) close(fd[i]);
    ra_tcp_close(o[0].tcp);
    ra_tcp_close(o[1].tcp);
    tn_end(w);
}

/* -------------------------------------------------------------------------- open connections */
/* Opens all ranks of w on threads. */
static void tn_open_all(tn_world *w, tn_opening *o) {
    for (int r = 0; r < w->ranks; r++) {
        ra_tcp_desc d = tn_desc(w, 0, r);
        tn_start(&o[r], &d);
    }
    for (int r = 0; r < w->ranks; r++) {
        CHECK_EQ(tn_join_open(&o[r]), RA_OK);
        if (!o[r].tcp) abort();
    }
}

static void tn_close_all(tn_world *w, tn_opening *o) {
    for (int r = 0; r < w->ranks; r++) ra_tcp_close(o[r].tcp);
    tn_end(w);
}

static ra_transport_op tn_op(int kind, int peer, void *buf, size_t len) {
    ra_transport_op op;
    memset(&op, 0, sizeof op);
    op.kind = (uint8_t)kind;
    op.peer = peer;
    op.buf = buf;
    op.len = len;
    return op;
}

/* A message of another length fills the buffer as far as it goes; `done` is its whole length. The
 * next message of the channel is not disturbed. */
TEST(another_length) {
    static const size_t sent[6] = { 100, 3000, 700000, 700000, 1, 64 };
    static const size_t room[6] = { 3000, 100, 300000, 64, 2, 300000 };
    static uint8_t out[700000], in[700064];
    for (size_t i = 0; i < sizeof out; i++) out[i] = (uint8_t)(i * 7 + i / 251);
    for (int i = 0; i < 6; i++) {
        tn_world *w = tn_make("127.0.0.1", 2, 1);
        const size_t got = sent[i] < room[i] ? sent[i] : room[i];
        size_t beyond;
        int64_t until = ra_deadline_ms(5000);
        int next = 0, later = 77;
        ra_transport_op op[4], *list[4];
        tn_opening o[2];
        if (!h_case(i)) { tn_end(w); continue; }
        tn_open_all(w, o);
        memset(in, 0xAA, sizeof in);
        op[0] = tn_op(RA_MSG_RECV, 1, in, room[i]);
        op[1] = tn_op(RA_MSG_RECV, 1, &next, sizeof next);
        op[2] = tn_op(RA_MSG_SEND, 0, out, sent[i]);
        op[3] = tn_op(RA_MSG_SEND, 0, &later, sizeof later);
        for (int k = 0; k < 4; k++) list[k] = &op[k];
        (void)ra_tcp_post(o[0].tcp, list, 2);
        (void)ra_tcp_post(o[1].tcp, list + 2, 2);
        while (op[1].state == RA_MSG_PENDING && ra_now_ns() < until) {
            (void)ra_tcp_poll(o[0].tcp, list, 2);
            (void)ra_tcp_poll(o[1].tcp, list + 2, 2);
        }
        CHECK_EQ(op[0].state, RA_E_TRUNC);
        CHECK_EQ(op[0].done, sent[i]);
        CHECK(!memcmp(in, out, got));
        for (beyond = got; beyond < sizeof in && in[beyond] == 0xAA;) beyond++;
        CHECK_EQ(beyond, sizeof in);
        CHECK_EQ(op[1].state, RA_MSG_DONE);
        CHECK_EQ(next, 77);
        tn_close_all(w, o);
    }
}

/* A connection without ops that is reset ends the wait for another rank at once, and so does one
 * with ops. */
TEST(reset_connection) {
    for (int i = 0; i < 4; i++) {
        const struct linger reset = { 1, 0 };
        tn_world *w = tn_make("127.0.0.1", 3, 1);
        int in = 0, code = RA_OK, *fd;
        int64_t begin;
        ra_transport_op op, *list[1] = { &op };
        tn_opening o[3];
        if (!h_case(i)) { tn_end(w); continue; }
        tn_open_all(w, o);
        op = tn_op(RA_MSG_RECV, i & 1 ? 2 : 1, &in, sizeof in);
        (void)ra_tcp_post(o[0].tcp, list, 1);
        fd = &o[2].tcp->conn[0].fd;
        CHECK_EQ(setsockopt(*fd, SOL_SOCKET, SO_LINGER, &reset, sizeof reset), 0);
        close(*fd);
        *fd = -1;
        begin = ra_now_ns();
        while (code == RA_OK && op.state == RA_MSG_PENDING && ra_now_ns() - begin < 3000 * TN_MS)
            code = i < 2 ? ra_tcp_wait(o[0].tcp, list, 1, ra_deadline_ms(2))
                         : ra_tcp_poll(o[0].tcp, list, 1);
        CHECK(ra_now_ns() - begin < 1000 * TN_MS);
        CHECK_EQ(code, i & 1 ? RA_OK : RA_E_PEER);
        CHECK_EQ(op.state, RA_E_PEER);
        CHECK(strstr(ra_tcp_error_text(o[0].tcp, RA_E_PEER), "rank 2 is broken") != NULL);
        tn_close_all(w, o);
    }
}

/* A child that a rank forks closes what it has: the ring stays. */
TEST(a_forked_child_closes) {
    tn_world *w = tn_make("127.0.0.1", 2, 1);
    tn_opening o[2];
    pid_t pid;
    tn_open_all(w, o);
    fflush(NULL);
    pid = fork();
    if (pid == 0) {
        for (int r = 0; r < 2; r++) ra_tcp_close(o[r].tcp);
        _exit(0);
    }
    CHECK_EQ(tn_reap(pid, 5000), 0);
    CHECK_EQ(tn_message(o[0].tcp, o[1].tcp), RA_MSG_DONE);
    tn_close_all(w, o);
}

/* A peer that never stops sending does not delay quiesce and close; one that takes everything at
 * once does not keep a call from returning; and a system without memory delays a write. */
TEST(calls_are_bounded) {
    tn_world *w = tn_make("127.0.0.1", 2, 1);
    const size_t len = (size_t)32 << 20;
    ra_transport_op op, *list[1] = { &op };
    uint8_t *big = (uint8_t *)calloc(1, len);
    int before;
    tn_opening o[2];
    tn_open_all(w, o);
    tn_no_memory = 4;
    CHECK_EQ(tn_message(o[0].tcp, o[1].tcp), RA_MSG_DONE);
    CHECK_EQ(tn_no_memory, 0);
    tn_close_all(w, o);
    w = tn_make("127.0.0.1", 2, 1);
    tn_open_all(w, o);
    op = tn_op(RA_MSG_SEND, 1, big, len);
    before = tn_writes;
    tn_sink = 1;
    o[0].tcp->conn[1].granted[0] = 1;
    (void)ra_tcp_post(o[0].tcp, list, 1);
    CHECK(tn_writes - before < 80);
    CHECK_EQ(op.state, RA_MSG_PENDING);
    for (int i = 0; i < 64 && op.state == RA_MSG_PENDING; i++)
        (void)ra_tcp_poll(o[0].tcp, list, 1);
    CHECK_EQ(op.state, RA_MSG_DONE);
    tn_sink = 0;
    before = tn_reads;
    tn_endless = 1000000;
    (void)ra_tcp_quiesce(o[0].tcp, ra_now_ns());
    tn_endless = 0;
    CHECK(tn_reads - before < 10);
    free(big);
    tn_close_all(w, o);
}

/* When memory runs out, what was never open is not closed. */
TEST(no_memory) {
    for (int i = 0; i < 8; i++) {
        tn_world *w = tn_make("127.0.0.1", 2, 1);
        ra_tcp_desc d = tn_desc(w, 0, 0);
        ra_tcp *tcp = NULL;
        tn_closed_0 = 0;
        tn_mallocs = i;
        CHECK_EQ(ra_tcp_open(&tcp, &d), RA_E_NOMEM);
        tn_mallocs = -1;
        CHECK_EQ(tn_closed_0, 0);
        tn_end(w);
    }
}

/* ra_tcp_open of one rank of two fails like this. */
static void tn_says(const ra_tcp_desc *d, int status, const char *one, const char *two) {
    ra_tcp_desc mine = *d;
    ra_tcp *tcp = NULL;
    ra_error why = { 0 };
    mine.error = &why;
    CHECK_EQ(ra_tcp_open(&tcp, &mine), status);
    if (!CHECK(strstr(why.text, one) != NULL && strstr(why.text, two) != NULL))
        printf("    it says: %s: %s\n", why.field, why.text);
    ra_tcp_close(tcp);
}

/* A listening socket that was made elsewhere may block; one that does not listen is refused. */
TEST(listening_sockets) {
    tn_world *w = tn_make("127.0.0.1", 2, 1);
    ra_tcp_desc d = tn_desc(w, 0, 0);
    ra_tcp *tcp = NULL;
    int fd = tn_call(w->at[0][0]), first;
    pid_t pid;
    CHECK_EQ(fcntl(d.listen_fd, F_SETFL, 0), 0);
    d.connect_ns = 50 * TN_MS;
    fflush(NULL);
    pid = fork();
    if (pid == 0) _exit(ra_tcp_open(&tcp, &d) != RA_E_TIMEOUT);
    CHECK_EQ(tn_reap(pid, 5000), 0);
    close(d.listen_fd);
    d.listen_fd = fd;
    tn_says(&d, RA_E_RANGE, "is no socket that listens", "");
    fflush(NULL);
    pid = fork();
    if (pid == 0) {
        close(0);
        first = ra_tcp_listen("127.0.0.1:0", NULL);
        _exit(first <= 0 || fcntl(0, F_GETFD) >= 0);
    }
    CHECK_EQ(tn_reap(pid, 5000), 0);
    tn_end(w);
}

/* Of callers that have said hello a random one makes room, but first who has not. */
TEST(who_makes_room) {
    ra_tcp_conn callers[32];
    ra_tcp t;
    unsigned gone = 0;
    memset(&t, 0, sizeof t);
    memset(callers, 0, sizeof callers);
    t.stranger = callers;
    t.places = 32;
    for (int i = 0; i < 32; i++) {
        callers[i].stage = RA_TCP_AT_READY;
        callers[i].since_ns = 100 + i;
    }
    for (int i = 0; i < 200; i++) gone |= 1u << (ra_tcp_place(&t, 0) - callers);
    CHECK((gone & (gone - 1)) != 0);
    callers[7].stage = callers[9].stage = RA_TCP_AT_HELLO;
    CHECK(ra_tcp_place(&t, 0) == &callers[7]);
    callers[3].fd = -1;
    CHECK(ra_tcp_place(&t, 0) == &callers[3]);
    CHECK(ra_tcp_place(&t, 1) == &callers[7]);
}

/* poll reads from the connections that have ops, and not from all. */
TEST(polls_of_many_ranks) {
    enum { POLLS = 2000 };
    tn_world *w = tn_make("127.0.0.1", TN_RANKS, 1);
    tn_opening o[TN_RANKS];
    ra_transport_op op, *list[1] = { &op };
    int in = 0, before;
    tn_open_all(w, o);
    op = tn_op(RA_MSG_RECV, 1, &in, sizeof in);
    (void)ra_tcp_post(o[0].tcp, list, 1);
    before = tn_reads;
    for (int i = 0; i < POLLS; i++) (void)ra_tcp_poll(o[0].tcp, list, 1);
    CHECK(tn_reads - before <= POLLS + TN_RANKS);
    tn_close_all(w, o);
}

#ifdef RA_TCP_SODIUM
/* Neither the shared key nor those of connections stay in memory that is given back. */
TEST(keys_are_wiped) {
    tn_world *w = tn_make("127.0.0.1", 2, 1);
    tn_opening o[2];
    tn_open_all(w, o);
    CHECK(memcmp(o[0].tcp->key, tn_key, sizeof tn_key) != 0);
    memcpy(tn_secret[0], tn_key, 32);
    for (int r = 0; r < 2; r++) memcpy(tn_secret[1 + r], o[r].tcp->conn[1 - r].push.k, 32);
    tn_secrets = 3;
    tn_close_all(w, o);
    CHECK_EQ(tn_left, 0);
    tn_secrets = 0;
}
#endif

/* -------------------------------------------------------------------------- hostile bytes */
/* A head that is nearly one. */
static ra_tcp_head tn_hostile_head(h_rng *rng, uint32_t body) {
    static const uint64_t odd[8] = { 0, 1, 4, 64, 256, 257, 1u << 30, UINT64_MAX };
    ra_tcp_head h = ra_tcp_head_of((int)h_range(rng, 0, 7), (int)h_range(rng, 0, 2), 0);
    if (h_range(rng, 0, 9) == 0) h.channel = (uint8_t)h_range(rng, 0, 255);
    if (h_range(rng, 0, 19) == 0) h.zero = 1;
    h.tag = odd[h_range(rng, 0, 7)];
    h.length = h_range(rng, 0, 1) ? body : odd[h_range(rng, 0, 7)];
    h.body = h_range(rng, 0, 9) ? body : (uint32_t)odd[h_range(rng, 0, 7)];
    return h;
}

/* Callers that say nearly what a rank says. With a key they end nothing. Without one they may, with
 * a sentence, or take the place of a rank that is not there yet. */
TEST(hostile_handshakes) {
    const int rounds = h_run.large ? 200 : 12;
    for (int i = 0; i < rounds; i++) {
        h_rng rng = h_case_rng(i);
        tn_world *w = tn_make("127.0.0.1", 2, 1);
        ra_tcp_desc zero = tn_desc(w, 0, 0), one = tn_desc(w, 0, 1);
        tn_opening o[2];
        int fd[20], status;
        if (!h_case(i)) { tn_end(w); continue; }
        tn_start(&o[0], &zero);
        for (int k = 0; k < 20; k++) {
            uint8_t talk[RA_TCP_HELLO + 3 * (RA_TCP_HEAD + 64)] = { 0 };
            ra_tcp_hello hello = { 0 };
            size_t n = (size_t)h_range(&rng, 0, (int64_t)sizeof talk), at = 0;
            memcpy(hello.magic, "ra_tcp\r\n", 8);
            hello.order = 0x01020304;
            hello.version = RA_TCP_VERSION;
            hello.world = h_range(&rng, 0, 3) ? zero.world : 1;
            hello.ring = zero.ring;
            hello.ranks = 2;
            hello.from = h_range(&rng, 0, 3) ? 1 : (int32_t)h_range(&rng, -2, 3);
            hello.to = h_range(&rng, 0, 7) ? 0 : (int32_t)h_range(&rng, -2, 3);
            hello.sealed = RA_TCP_START != 0;
            for (int b = 0; b < 32; b++) hello.public_key[b] = (uint8_t)h_range(&rng, 0, 255);
            memcpy(talk, &hello, sizeof hello);
            for (int f = 0; f < 3; f++) {
                ra_tcp_head h = tn_hostile_head(&rng, 0);
                if (f == 0 && h_range(&rng, 0, 1)) h.kind = RA_TCP_READY;
                memcpy(talk + RA_TCP_HELLO + f * (RA_TCP_HEAD + RA_TCP_START), &h, sizeof h);
            }
            if (k % 4 == 0) talk[h_range(&rng, 0, sizeof talk - 1)] ^= (uint8_t)(1 << k % 8);
            fd[k] = tn_call(w->at[0][0]);
            while (at < n && fd[k] >= 0) {
                ssize_t part = (ssize_t)h_range(&rng, 1, (int64_t)(n - at));
                if (send(fd[k], talk + at, (size_t)part, MSG_NOSIGNAL) != part) break;
                at += (size_t)part;
            }
            if (fd[k] >= 0 && h_range(&rng, 0, 1)) close(fd[k]), fd[k] = -1;
        }
        cf_sleep_us(20000);
        for (int k = 0; k < 20; k++) if (fd[k] >= 0) close(fd[k]);
        tn_start(&o[1], &one);
        status = tn_join_open(&o[0]);
        CHECK(status == RA_OK || (!w->key && status == RA_E_MISMATCH && o[0].why.text[0]));
        if (status == RA_OK && w->key) CHECK_EQ(tn_join_open(&o[1]), RA_OK);
        else pthread_join(o[1].id, NULL);
        ra_tcp_close(o[0].tcp);
        ra_tcp_close(o[1].tcp);
        tn_end(w);
    }
}

#ifndef RA_TCP_SODIUM
/* READY with a channel that does not exist is no frame of the handshake. */
TEST(ready_without_a_channel) {
    tn_world *w = tn_make("127.0.0.1", 2, 1);
    ra_tcp_desc d = tn_desc(w, 0, 0);
    ra_tcp_hello hello = { 0 };
    ra_tcp_head h = ra_tcp_head_of(RA_TCP_READY, 255, 0);
    tn_opening o;
    int fd;
    d.connect_ns = 300 * TN_MS;
    tn_start(&o, &d);
    memcpy(hello.magic, "ra_tcp\r\n", 8);
    hello.order = 0x01020304;
    hello.version = RA_TCP_VERSION;
    hello.world = d.world;
    hello.ring = d.ring;
    hello.ranks = 2;
    hello.from = 1;
    fd = tn_call(w->at[0][0]);
    CHECK(fd >= 0 && send(fd, &hello, sizeof hello, MSG_NOSIGNAL) == (ssize_t)sizeof hello);
    CHECK(fd >= 0 && send(fd, &h, sizeof h, MSG_NOSIGNAL) == (ssize_t)sizeof h);
    CHECK_EQ(tn_join_open(&o), RA_E_TIMEOUT);
    CHECK(strstr(o.why.text, "no frame in the handshake") != NULL);
    close(fd);
    ra_tcp_close(o.tcp);
    tn_end(w);
}

#endif

/* A rank that has the key and sends frames that are nearly right writes nothing outside buffers. */
TEST(hostile_frames) {
    static uint8_t data[RA_TCP_PLAIN];
    const int rounds = h_run.large ? 400 : 30;
    for (int i = 0; i < rounds; i++) {
        h_rng rng = h_case_rng(i);
        tn_world *w = tn_make("127.0.0.1", 2, 1);
        ra_transport_op op[8], *list[8];
        uint8_t *buf[8];
        tn_opening o[2];
        ra_tcp_conn *c;
        if (!h_case(i)) { tn_end(w); continue; }
        tn_open_all(w, o);
        for (int k = 0; k < 8; k++) {
            const size_t n = k % 3 == 2 ? 70000 : 64;
            buf[k] = (uint8_t *)calloc(n, 1);
            op[k] = tn_op(k < 6 ? RA_MSG_RECV : RA_MSG_SEND, 1, buf[k], n);
            op[k].channel = (uint8_t)(k & 1);
            list[k] = &op[k];
        }
        (void)ra_tcp_post(o[0].tcp, list, 8);
        c = &o[1].tcp->conn[0];
        for (int f = 0; f < 40; f++) {
            uint32_t body = (uint32_t)h_range(&rng, 0, 1) ? 64 : (uint32_t)h_range(&rng, 0, 65536);
            ra_tcp_head h = tn_hostile_head(&rng, body);
            if (f < 20 && h_range(&rng, 0, 3)) {
                h = ra_tcp_head_of(RA_TCP_DATA, (int)h_range(&rng, 0, 1), 0);
                h.body = body;
                h.length = h_range(&rng, 0, 1) ? body : body + (uint32_t)h_range(&rng, 0, 90000);
            }
            if (h.body > ra_tcp_piece(o[1].tcp)) h.body = 1;
            ra_tcp_stage(o[1].tcp, c, &h, data);
            if (ra_tcp_write(c) != 1) break;
            (void)ra_tcp_poll(o[0].tcp, list, 8);
        }
        for (int k = 0; k < 50; k++) (void)ra_tcp_poll(o[0].tcp, list, 8);
        tn_close_all(w, o);
        for (int k = 0; k < 8; k++) free(buf[k]);
    }
}

/* -------------------------------------------------------------------------- what is said */

/* Who is missing, at which address in numbers, and what the last try came to. */
TEST(who_is_missing) {
    tn_world *w = tn_make("127.0.0.1", 2, 1);
    ra_tcp_desc d = tn_desc(w, 0, 1);
    const char *at[2];
    char text[40];
    int fd[8], why;
    d.listen_fd = 0;
    d.connect_ns = 300 * TN_MS;
    at[0] = text;
    at[1] = w->at[0][1];
    d.addresses = at;
    snprintf(text, sizeof text, "localhost%s", strchr(w->at[0][0], ':'));
    tn_says(&d, RA_E_TIMEOUT, "without rank 0 at localhost:", "1:");
    tn_says(&d, RA_E_TIMEOUT, "a loopback address", "accepts connections, but says nothing");
    for (int i = 0; i < 8; i++) {      /* of a full queue the system drops the requests */
        struct addrinfo *a = ra_tcp_resolve(w->at[0][0], 0, &why);
        fd[i] = a ? socket(AF_INET, SOCK_STREAM, 0) : -1;
        if (i == 0) (void)listen(w->fd[0][0], 0);
        (void)fcntl(fd[i], F_SETFL, O_NONBLOCK);
        if (a) (void)connect(fd[i], a->ai_addr, a->ai_addrlen);
        if (a) freeaddrinfo(a);
    }
    tn_says(&d, RA_E_TIMEOUT, "does not answer requests to connect", " ms ago");
    for (int i = 0; i < 8; i++) close(fd[i]);
    close(w->fd[0][0]);
    w->fd[0][0] = -1;
    tn_says(&d, RA_E_TIMEOUT, "without rank 0 at localhost:", "Connection refused");
    d.rank = 0;
    at[0] = w->at[0][0];
    tn_says(&d, RA_E_TIMEOUT, "without rank 1, which has not called this one at 127.0.0.1:",
            "a loopback address");
    d.rank = 1;
    at[0] = "no-such-host.invalid:4000";
    tn_says(&d, RA_E_RANGE, "of rank 0, no-such-host.invalid:4000", "");
    tn_end(w);
}

TEST(addresses_that_are_none) {
    static const char *const bad[] = { "127.0.0.1:99999", "127.0.0.1:65536", "127.0.0.1:0", ":4000",
                                       "127.0.0.1:", "127.0.0.1", "::1:4000", "127.0.0.1:-1", "",
                                       "127.0.0.1:http", "[::1:4000", "127.0.0.1:4 ", "a]:80:4" };
    tn_world *w = tn_make("127.0.0.1", 2, 1);
    for (int i = 0; i < 2 * (int)(sizeof bad / sizeof *bad); i++) {
        ra_tcp_desc d = tn_desc(w, 0, i & 1);
        const char *at[2];
        d.listen_fd = 0;
        d.connect_ns = 300 * TN_MS;
        at[0] = bad[i / 2];
        at[1] = w->at[0][1];
        d.addresses = at;
        tn_says(&d, RA_E_RANGE, "of rank 0 is no \"host:port\"", bad[i / 2]);
        if (i / 2 != 2) CHECK(ra_tcp_listen(bad[i / 2], NULL) < 0);
    }
    tn_end(w);
}

/* Processor time of this process in ms. */
static int64_t tn_cpu_ms(void) {
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    return (u.ru_utime.tv_sec + u.ru_stime.tv_sec) * 1000 +
           (u.ru_utime.tv_usec + u.ru_stime.tv_usec) / 1000;
}

/* In a process of its own: rank 0 of three with `spare` free descriptors of `limit`. */
static int tn_starved(tn_world *w, int limit, int spare) {
    ra_tcp_desc d = tn_desc(w, 0, 0);
    struct rlimit most;
    int64_t cpu;
    int bad = h_run.bad, fd = 3;
    w->ranks = 3;
    d.ranks = 3;
    if (spare < 3) d.listen_fd = 0;
    d.connect_ns = 600 * TN_MS;
    getrlimit(RLIMIT_NOFILE, &most);
    most.rlim_cur = (rlim_t)limit;
    setrlimit(RLIMIT_NOFILE, &most);
    while (fd >= 0 && fd < limit - spare - 1) fd = dup(0);
    cpu = tn_cpu_ms();
    if (spare > limit) tn_says(&d, RA_E_IO, "3 ranks need at least 12 descriptors, the limit is 11",
                               "ulimit -n");
    else if (spare < 3) tn_says(&d, RA_E_IO, "cannot listen on 127.0.0.1", "Too many open files");
    else tn_says(&d, RA_E_TIMEOUT, "without rank 1", "no descriptor for a connection: Too many");
    CHECK(tn_cpu_ms() - cpu < 200);
    fflush(NULL);
    return h_run.bad - bad;
}

/* Where descriptors end it is said, and nothing spins. Before that, callers have to leave. */
TEST(few_descriptors) {
    static const int limit[3] = { 11, 100, 100 }, spare[3] = { 999, 2, 3 };
    for (int i = 0; i < 3; i++) {
        tn_world *w = tn_make("127.0.0.1", 3, 1);
        pid_t pid;
        int fd[4];
        if (!h_case(i)) { tn_end(w); continue; }
        if (i == 1) close(w->fd[0][0]);
        fflush(NULL);
        pid = fork();
        if (pid == 0) _exit(tn_starved(w, limit[i], spare[i]));
        for (int k = 0; k < 4; k++) fd[k] = i == 2 ? tn_call(w->at[0][0]) : -1;
        CHECK_EQ(tn_reap(pid, 5000), 0);
        for (int k = 0; k < 4; k++) if (fd[k] >= 0) close(fd[k]);
        if (i == 1) w->fd[0][0] = -1;
        tn_end(w);
    }
}

/* With descriptors for the ring and hardly more it forms, although many call. */
TEST(descriptors_that_do) {
    enum { CALLERS = 60 };
    tn_world *w = tn_make("127.0.0.1", 3, 1);
    ra_tcp_desc d[3];
    tn_opening o[2];
    int fd[CALLERS], status = -1;
    pid_t pid;
    for (int r = 0; r < 3; r++) d[r] = tn_desc(w, 0, r);
    fflush(NULL);
    pid = fork();
    if (pid == 0) {
        struct rlimit most;
        ra_tcp *tcp = NULL;
        alarm(60);
        getrlimit(RLIMIT_NOFILE, &most);
        most.rlim_cur = 24;
        setrlimit(RLIMIT_NOFILE, &most);
        status = ra_tcp_open(&tcp, &d[0]);
        cf_sleep_us(100000);
        ra_tcp_close(tcp);
        _exit(status != RA_OK);
    }
    for (int i = 0; i < CALLERS; i++) fd[i] = tn_call(w->at[0][0]);
    cf_sleep_us(50000);
    for (int r = 0; r < 2; r++) tn_start(&o[r], &d[r + 1]);
    for (int r = 0; r < 2; r++) CHECK_EQ(tn_join_open(&o[r]), RA_OK);
    CHECK_EQ(tn_reap(pid, 15000), 0);
    for (int r = 0; r < 2; r++) ra_tcp_close(o[r].tcp);
    for (int i = 0; i < CALLERS; i++) if (fd[i] >= 0) close(fd[i]);
    close(d[0].listen_fd);
    tn_end(w);
}

/* -------------------------------------------------------------------------- many ranks */
enum { TN_MANY = 256 };
typedef struct tn_crowd {
    int ranks, fd[TN_MANY];
    char text[TN_MANY][32];
    const char *at[TN_MANY];
} tn_crowd;

/* Connects to every port again and again, and says nothing, or in every other lot of calls the
 * hello of another run. Another user where that is possible. */
static void tn_flood(const tn_crowd *c) {
    enum { HELD = 200 };
    int held[HELD], calls = 0;
    struct sockaddr_in to = { 0 };
    ra_tcp_hello hello = { 0 };
    memcpy(hello.magic, "ra_tcp\r\n", 8);
    hello.order = 0x01020304;
    hello.version = RA_TCP_VERSION;
    hello.world = 999;
    hello.sealed = RA_TCP_START != 0;
    hello.public_key[0] = 9;
    to.sin_family = AF_INET;
    to.sin_addr.s_addr = htonl(0x7F000001);
    for (int i = 0; i < HELD; i++) held[i] = -1;
    for (int r = 0; r < c->ranks; r++) close(c->fd[r]);
    if (getuid() == 0 && setuid(65534)) _exit(1);
    alarm(320);
    for (;; calls++) {
        int *fd = &held[calls % HELD];
        if (*fd >= 0) close(*fd);
        *fd = socket(AF_INET, SOCK_STREAM, 0);
        if (*fd < 0) continue;
        (void)fcntl(*fd, F_SETFL, O_NONBLOCK);
        to.sin_port = htons((uint16_t)atoi(strrchr(c->text[calls % c->ranks], ':') + 1));
        (void)connect(*fd, (struct sockaddr *)&to, sizeof to);
        if (calls / HELD % 2) (void)send(*fd, &hello, sizeof hello, MSG_NOSIGNAL | MSG_DONTWAIT);
    }
}

/* One rank: opens, passes a message to the next one, closes. */
static int tn_member(const tn_crowd *c, int rank, int64_t ms) {
    ra_tcp_desc d = { 0 };
    ra_tcp *tcp = NULL;
    ra_error why;
    ra_transport_op op[2], *list[2] = { &op[0], &op[1] };
    int in = -1, out = rank;
    alarm(320);
    for (int r = 0; r < c->ranks; r++) if (r != rank) close(c->fd[r]);
    d.rank = rank;
    d.ranks = c->ranks;
    d.addresses = c->at;
    d.listen_fd = c->fd[rank];
    d.connect_ns = ms * TN_MS;
    d.error = &why;
#ifdef RA_TCP_SODIUM
    d.key = tn_key;
#endif
    if (ra_tcp_open(&tcp, &d)) {
        printf("rank %d: %s: %s\n", rank, why.field, why.text);
        return 1;
    }
    memset(op, 0, sizeof op);
    op[0].kind = RA_MSG_RECV;
    op[0].peer = (rank + c->ranks - 1) % c->ranks;
    op[0].buf = &in;
    op[1].kind = RA_MSG_SEND;
    op[1].peer = (rank + 1) % c->ranks;
    op[1].buf = &out;
    op[0].len = op[1].len = sizeof in;
    (void)ra_tcp_post(tcp, list, 2);
    for (int64_t until = ra_deadline_ms(ms); ra_now_ns() < until;) {
        if (ra_tcp_wait(tcp, list, 2, ra_deadline_ms(2))) break;
        if (op[0].state != RA_MSG_PENDING && op[1].state != RA_MSG_PENDING) break;
    }
    if (op[0].state != RA_MSG_DONE || op[1].state != RA_MSG_DONE || in != op[0].peer) {
        printf("rank %d: states %d %d, %s\n", rank, op[0].state, op[1].state, tcp->text);
        return 1;
    }
    ra_tcp_close(tcp);
    return 0;
}

/* Returns how many ranks failed. */
static int tn_world_of(int ranks, int flooded, int64_t ms) {
    static tn_crowd c;
    static pid_t pid[TN_MANY];
    int failed = 0, port = 0, status;
    pid_t flood = -1;
    c.ranks = ranks;
    for (int r = 0; r < ranks; r++) {
        c.fd[r] = ra_tcp_listen("127.0.0.1:0", &port);
        if (c.fd[r] < 0) abort();
        snprintf(c.text[r], sizeof c.text[r], "127.0.0.1:%d", port);
        c.at[r] = c.text[r];
    }
    fflush(NULL);
    if (flooded && (flood = fork()) == 0) tn_flood(&c);
    if (flooded) cf_sleep_us(100000);
    for (int r = 0; r < ranks; r++) {
        if (flooded && ranks < 8) cf_sleep_us(30000);
        pid[r] = fork();
        if (pid[r] == 0) exit(tn_member(&c, r, ms));
    }
    for (int r = 0; r < ranks; r++) {
        close(c.fd[r]);
        failed += pid[r] < 0 || waitpid(pid[r], &status, 0) < 0 || status != 0;
    }
    if (flood > 0) {
        kill(flood, SIGKILL);
        waitpid(flood, &status, 0);
    }
    return failed;
}

/* Rings form with more ranks than there are places for strangers, and while a process that is no
 * rank calls all of them as fast as it can. --long: 256 ranks, --count worlds of them, or 3. */
static void tn_many(int worlds, int ranks, int flooded) {
    if (!tn_descriptors(2 * ranks + RA_TCP_STRANGERS + 50)) return;
    for (int i = 0; i < worlds; i++) {
        int64_t begin = ra_now_ns();
        if (!h_case(i)) continue;
        CHECK_EQ(tn_world_of(ranks, flooded, ranks < 100 ? 60000 : 150000), 0);
        if (h_run.verbose) printf("%d ranks%s: %lld ms\n", ranks, flooded ? ", flooded" : "",
                                  (long long)((ra_now_ns() - begin) / TN_MS));
    }
}
static int tn_worlds(void) { return h_run.count ? (int)h_run.count : h_run.large ? 3 : 1; }
TEST(many_ranks) { tn_many(tn_worlds(), h_run.large ? 256 : 48, 0); }
TEST(many_ranks_flooded) { tn_many(tn_worlds(), h_run.large ? 256 : 24, 1); }
TEST(few_ranks_flooded) { tn_many(h_run.large ? 40 : 4, 3, 1); }

/* -------------------------------------------------------------------------- in between
 * A relay on the path of rank 1 to rank 0: passes bytes on, keeps a copy of what rank 1 sends, and
 * changes it from byte `spoil` on. It closes the first connection after `cut` bytes of rank 1, or
 * of rank 0 with cut_back, and relays the next one. */
typedef struct tn_path {
    int listener, stop;                /* stop: atomic */
    const char *to;
    size_t spoil, kept;                /* 0: never */
    size_t cut, passed[2];             /* bytes, cut 0: never */
    int cut_back, calls, ended;        /* connections; atomic */
    uint8_t copy[20000];
    pthread_t id;
} tn_path;

static int tn_relay(tn_path *p, int from, int to, int keeps) {
    uint8_t buf[4096];
    const int counts = p->cut && p->calls == 1 && keeps != p->cut_back;
    size_t most = counts && p->cut < sizeof buf + p->passed[keeps] ? p->cut - p->passed[keeps]
                                                                   : sizeof buf;
    ssize_t n = most ? recv(from, buf, most, MSG_DONTWAIT) : 0;
    if (n > 0) p->passed[keeps] += (size_t)n;
    if (n == 0 || (n < 0 && errno != EAGAIN && errno != EWOULDBLOCK)) return 0;
    for (ssize_t i = 0; i < n && keeps && p->kept < sizeof p->copy; i++) {
        if (p->spoil && p->kept >= p->spoil) buf[i] ^= 0x10;
        p->copy[p->kept++] = buf[i];
    }
    return n < 0 || send(to, buf, (size_t)n, MSG_NOSIGNAL) == n;
}

static void *tn_path_main(void *arg) {
    tn_path *p = (tn_path *)arg;
    while (!cf_load(&p->stop)) {
        int a = accept(p->listener, NULL, NULL), open = 1;
        int b = a >= 0 ? tn_call(p->to) : -1;
        if (b >= 0) cf_store(&p->calls, p->calls + 1);
        while (!cf_load(&p->stop) && b >= 0 && open) {
            open = tn_relay(p, a, b, 1) && tn_relay(p, b, a, 0);
            cf_sleep_us(100);
        }
        if (a >= 0) close(a);
        if (b >= 0) close(b);
        if (b >= 0) cf_store(&p->ended, p->ended + 1);
        cf_sleep_us(500);
    }
    return NULL;
}

/* Two ranks, rank 1 through p; its address goes to `at`. Returns how a message ended. */
static int tn_by_way_of(tn_path *p, tn_world *w) {
    ra_tcp_desc zero = tn_desc(w, 0, 0), one = tn_desc(w, 0, 1);
    const char *at[2];
    char text[32];
    tn_opening o[2];
    int port = 0, got = RA_E_PEER;
    p->listener = ra_tcp_listen("127.0.0.1:0", &port);
    snprintf(text, sizeof text, "127.0.0.1:%d", port);
    at[0] = text;
    at[1] = w->at[0][1];
    p->to = w->at[0][0];
    one.addresses = at;
    zero.connect_ns = one.connect_ns = 3000 * TN_MS;
    if (pthread_create(&p->id, NULL, tn_path_main, p)) abort();
    tn_start(&o[0], &zero);
    tn_start(&o[1], &one);
    (void)tn_join_open(&o[0]);
    (void)tn_join_open(&o[1]);
    if (o[0].tcp && o[1].tcp) got = tn_message(o[0].tcp, o[1].tcp);
    ra_tcp_close(o[0].tcp);
    ra_tcp_close(o[1].tcp);
    cf_store(&p->stop, 1);
    pthread_join(p->id, NULL);
    close(p->listener);
    return got;
}

/* A connection that ends anywhere in its handshake or after it, while another rank is missing, is
 * made anew, by whichever side sees it first. */
TEST(cut_in_the_handshake) {
    const size_t shake[2] = { RA_TCP_HELLO + RA_TCP_START + RA_TCP_HEAD + RA_TCP_A,
                              RA_TCP_HELLO + RA_TCP_START + 2 * (RA_TCP_HEAD + RA_TCP_A) };
    for (int i = 0; i < 2 * (int)shake[1]; i++) {
        const int back = i & 1;
        tn_world *w;
        ra_tcp_desc d[3];
        const char *at[3];
        char text[32];
        tn_opening o[3];
        tn_path p = { 0 };
        int port = 0;
        p.cut = (size_t)i / 2 + 1;
        p.cut_back = back;
        if (p.cut > shake[back] || !h_case(i)) continue;
        if (!h_run.large && p.cut != 1 && p.cut != RA_TCP_HELLO && p.cut < shake[0] - 1) continue;
        if (!h_run.large && p.cut > shake[0] && p.cut < shake[1]) continue;
        w = tn_make("127.0.0.1", 3, 1);
        p.listener = ra_tcp_listen("127.0.0.1:0", &port);
        snprintf(text, sizeof text, "127.0.0.1:%d", port);
        p.to = w->at[0][0];
        for (int r = 0; r < 3; r++) {
            d[r] = tn_desc(w, 0, r);
            at[r] = w->at[0][r];
        }
        at[0] = text;
        d[1].addresses = at;
        if (pthread_create(&p.id, NULL, tn_path_main, &p)) abort();
        for (int r = 0; r < 2; r++) tn_start(&o[r], &d[r]);
        for (int n = 0; n < 10000 && !cf_load(&p.ended); n++) cf_sleep_us(500);
        tn_start(&o[2], &d[2]);
        for (int r = 0; r < 3; r++)
            if (!CHECK_EQ(tn_join_open(&o[r]), RA_OK))
                printf("    cut %zu back %d: %s\n", p.cut, back, o[r].why.text);
        if (o[0].tcp && o[1].tcp) CHECK_EQ(tn_message(o[0].tcp, o[1].tcp), RA_MSG_DONE);
        for (int r = 0; r < 3; r++) ra_tcp_close(o[r].tcp);
        cf_store(&p.stop, 1);
        pthread_join(p.id, NULL);
        CHECK(p.calls >= 2);
        close(p.listener);
        tn_end(w);
    }
}

/* A rank that gives up while the ring connects, and begins again, gets in. */
TEST(a_rank_restarts) {
    for (int restarts = 0; restarts < 2; restarts++) {
        tn_world *w = tn_make("127.0.0.1", 3, 1);
        ra_tcp_desc d[3];
        tn_opening o[4];
        if (!h_case(restarts)) { tn_end(w); continue; }
        for (int r = 0; r < 3; r++) d[r] = tn_desc(w, 0, r);
        d[restarts].connect_ns = 200 * TN_MS;
        for (int r = 0; r < 2; r++) tn_start(&o[r], &d[r]);
        CHECK_EQ(tn_join_open(&o[restarts]), RA_E_TIMEOUT);
        CHECK(strstr(o[restarts].why.text, "without rank 2, which has not called") != NULL);
        d[restarts].connect_ns = 10000 * TN_MS;
        d[restarts].listen_fd = 0;
        o[3] = o[1 - restarts];
        tn_start(&o[restarts], &d[restarts]);
        cf_sleep_us(100000);
        tn_start(&o[2], &d[2]);
        CHECK_EQ(tn_join_open(&o[restarts]), RA_OK);
        CHECK_EQ(tn_join_open(&o[2]), RA_OK);
        CHECK_EQ(tn_join_open(&o[1 - restarts]), RA_OK);
        if (o[0].tcp && o[1].tcp) CHECK_EQ(tn_message(o[0].tcp, o[1].tcp), RA_MSG_DONE);
        for (int r = 0; r < 3; r++) ra_tcp_close(o[r].tcp);
        tn_end(w);
    }
}

/* The second process that says that it is rank 1 is told so, and the first one stays. */
TEST(two_processes_of_one_rank) {
    tn_world *w = tn_make("127.0.0.1", 3, 1);
    ra_tcp_desc d[3], again;
    tn_opening o[3], second;
    for (int r = 0; r < 3; r++) d[r] = tn_desc(w, 0, r);
    again = d[1];
    again.listen_fd = ra_tcp_listen("127.0.0.1:0", NULL);
    again.connect_ns = 300 * TN_MS;
    for (int r = 0; r < 2; r++) tn_start(&o[r], &d[r]);
    cf_sleep_us(100000);
    tn_start(&second, &again);
    CHECK_EQ(tn_join_open(&second), RA_E_TIMEOUT);
    if (!CHECK(strstr(second.why.text, "another process that is rank 1") != NULL))
        printf("    it says: %s\n", second.why.text);
    tn_start(&o[2], &d[2]);
    for (int r = 0; r < 3; r++) CHECK_EQ(tn_join_open(&o[r]), RA_OK);
    if (o[0].tcp && o[1].tcp) CHECK_EQ(tn_message(o[0].tcp, o[1].tcp), RA_MSG_DONE);
    for (int r = 0; r < 3; r++) ra_tcp_close(o[r].tcp);
    tn_end(w);
}

/* Bytes that change on the way. Nonsense in a head closes the connection, and in the sealed form so
 * does any change. Nothing is written where it does not belong. */
TEST(bytes_changed_on_the_way) {
    for (int i = 0; i < 8; i++) {
        size_t shake = RA_TCP_HELLO + RA_TCP_START + RA_TCP_HEAD + RA_TCP_A;
        tn_world *w = tn_make("127.0.0.1", 2, 1);
        tn_path p = { 0 };
        int got;
        if (!h_case(i)) continue;
        p.spoil = i ? shake + (size_t)i : 0;
        got = tn_by_way_of(&p, w);
        CHECK(p.kept > shake);
        if (i == 0) CHECK_EQ(got, RA_MSG_DONE);
        else if (w->key || i < 5) CHECK_EQ(got, RA_E_PROTO);   /* plain: body, kind, channel */
        else CHECK(got != RA_MSG_PENDING);
        tn_end(w);
    }
}

#ifdef RA_TCP_SODIUM
/* Rank 1 with another key does not get in, nor does one without; then one with the right key
 * does. */
TEST(wrong_key) {
    static const char wrong[32] = "thirty-two bytes of test secreT";
    for (int i = 0; i < 2; i++) {
        tn_world *w = tn_make("127.0.0.1", 2, 1);
        ra_tcp_desc zero = tn_desc(w, 0, 0), one = tn_desc(w, 0, 1);
        tn_opening o[2], right;
        if (!h_case(i)) continue;
        tn_start(&o[0], &zero);
        one.listen_fd = 0;
        one.connect_ns = 300 * TN_MS;
        one.key = i ? NULL : wrong;
        tn_start(&o[1], &one);
        CHECK_EQ(tn_join_open(&o[1]), i ? RA_E_MISMATCH : RA_E_TIMEOUT);
        CHECK(strstr(o[1].why.text, "key") != NULL);
        CHECK(!cf_load(&o[0].done));
        one.key = tn_key;
        one.connect_ns = 5000 * TN_MS;
        tn_start(&right, &one);
        CHECK_EQ(tn_join_open(&right), RA_OK);
        CHECK_EQ(tn_join_open(&o[0]), RA_OK);
        if (o[0].tcp && right.tcp) CHECK_EQ(tn_message(o[0].tcp, right.tcp), RA_MSG_DONE);
        ra_tcp_close(o[0].tcp);
        ra_tcp_close(right.tcp);
        tn_end(w);
    }
}

/* All that rank 1 sent in a good run, sent again by a stranger, opens nothing. */
TEST(replayed_handshake) {
    tn_world *w = tn_make("127.0.0.1", 2, 1);
    ra_tcp_desc zero, one;
    tn_opening o[2];
    tn_path p = { 0 };
    int fd;
    CHECK_EQ(tn_by_way_of(&p, w), RA_MSG_DONE);
    tn_end(w);
    w = tn_make("127.0.0.1", 2, 1);
    zero = tn_desc(w, 0, 0);
    one = tn_desc(w, 0, 1);
    tn_start(&o[0], &zero);
    fd = tn_call(w->at[0][0]);
    CHECK(fd >= 0 && send(fd, p.copy, p.kept, MSG_NOSIGNAL) == (ssize_t)p.kept);
    cf_sleep_us(100000);
    CHECK(!cf_load(&o[0].done));
    tn_start(&o[1], &one);
    CHECK_EQ(tn_join_open(&o[1]), RA_OK);
    CHECK_EQ(tn_join_open(&o[0]), RA_OK);
    if (o[0].tcp && o[1].tcp) CHECK_EQ(tn_message(o[0].tcp, o[1].tcp), RA_MSG_DONE);
    ra_tcp_close(o[0].tcp);
    ra_tcp_close(o[1].tcp);
    close(fd);
    tn_end(w);
}

/* The bytes on the wire do not show what is sent. */
TEST(nothing_in_the_clear) {
    tn_world *w = tn_make("127.0.0.1", 2, 1);
    int run = 0, longest = 0;
    tn_path p = { 0 };
    CHECK_EQ(tn_by_way_of(&p, w), RA_MSG_DONE);
    for (size_t i = 0; i < p.kept; i++) {
        run = p.copy[i] == 7 ? run + 1 : 0;
        if (run > longest) longest = run;
    }
    CHECK(p.kept > 3000);
    CHECK(longest < 8);
    tn_end(w);
}
#else
TEST(a_key_needs_sodium) {
    tn_world *w = tn_make("127.0.0.1", 2, 1);
    ra_tcp_desc d = tn_desc(w, 0, 0);
    ra_tcp *tcp = NULL;
    ra_error why;
    d.error = &why;
    d.key = tn_key;
    CHECK_EQ(ra_tcp_open(&tcp, &d), RA_E_UNSUPPORTED);
    CHECK(strstr(why.text, "RA_TCP_SODIUM") != NULL);
    tn_end(w);
}
#endif

int main(int argc, char **argv) {
    static const h_test tests[] = {
        ENTRY(job_ids), ENTRY(conformance_threads), ENTRY(conformance_processes),
        ENTRY(conformance_v6), ENTRY(conformance_from_outside),
        ENTRY(killed_rank), ENTRY(stopped_rank), ENTRY(cut_rank), ENTRY(garbage_of_a_rank),
        ENTRY(ranks_that_disagree), ENTRY(the_reason_is_kept),
        ENTRY(another_byte_order), ENTRY(no_peer_answers), ENTRY(longest_patience),
        ENTRY(listens_on_its_own_address_alone), ENTRY(strangers), ENTRY(many_ranks),
        ENTRY(many_ranks_flooded), ENTRY(few_ranks_flooded),
        ENTRY(cut_in_the_handshake), ENTRY(a_rank_restarts), ENTRY(two_processes_of_one_rank),
        ENTRY(who_is_missing), ENTRY(addresses_that_are_none),
        ENTRY(few_descriptors), ENTRY(descriptors_that_do), ENTRY(another_length),
        ENTRY(a_forked_child_closes), ENTRY(calls_are_bounded), ENTRY(no_memory),
        ENTRY(listening_sockets), ENTRY(who_makes_room), ENTRY(reset_connection),
        ENTRY(polls_of_many_ranks), ENTRY(hostile_handshakes), ENTRY(hostile_frames),
        ENTRY(bytes_changed_on_the_way),
#ifdef RA_TCP_SODIUM
        ENTRY(keys_are_wiped), ENTRY(wrong_key), ENTRY(replayed_handshake),
        ENTRY(nothing_in_the_clear),
#else
        ENTRY(ready_without_a_channel), ENTRY(a_key_needs_sodium),
#endif
    };
    return h_main(argc, argv, tests, sizeof tests / sizeof *tests);
}
