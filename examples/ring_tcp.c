/* Ring attention over TCP, one process per rank, forward and backward. Each rank checks its rows
 * against those of one rank, bit for bit, and prints what it sent, received and waited for. Exits
 * with 1 if a bit differs.
 *
 *   cc -O2 -std=c99 -pthread -I. -o ring_tcp examples/ring_tcp.c -lm
 *   ./ring_tcp --local 4 --tokens 8192                     four processes on 127.0.0.1
 *   ./ring_tcp --rank 0 10.0.0.1:4000 10.0.0.2:4000        on the first host, and
 *   ./ring_tcp --rank 1 10.0.0.1:4000 10.0.0.2:4000        on the second
 *
 * Every rank is given the same addresses in the same order, and the same --tokens. Ranks of a job
 * with other addresses or another --job are refused, and this ring waits for its own. Two starts
 * with the same addresses are one job, unless --job differs.
 *
 * With -DRA_TCP_SODIUM and -lsodium, --key FILE takes 32 secret bytes from a file (head -c 32
 * /dev/urandom > FILE) that all hosts have; without a key this is for trusted networks only.
 *
 * `link ms` is the time during which a receive was posted whose message had not come, `waited ms`
 * the part of the pass in which the rank had nothing to compute, and `hidden` how much of `link ms`
 * was spent computing. */
#define _POSIX_C_SOURCE 200809L
#define RINGATTN_IMPLEMENTATION
#include "ringattn.h"
#include "transports/ra_tcp.h"
#include "transports/ring_check.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { HEADS = 4, KV_HEADS = 2, DIM = 64, ROW = HEADS * DIM, KV_ROW = KV_HEADS * DIM, RANKS = 64 };

typedef struct options {
    int rank, ranks, local;
    int64_t tokens, job;
    const char *at[RANKS];
    const char *key_file;
} options;

/* Time in which at least one receive was under way: events come in the order of their ends. */
typedef struct link_time { int64_t covered_ns, until_ns; } link_time;

typedef struct part {                  /* the rows of one rank */
    ra_plan *plan;
    ra_ring *ring;
    ra_tensors t;
    ra_run runs[2];
    int run_count;
    int64_t rows;
    float *q, *k, *v, *o, *lse, *d_o, *d_q, *d_k, *d_v;
    link_time link;
} part;

static void on_event(void *ctx, const ra_event *e) {
    link_time *l = (link_time *)ctx;
    int64_t begin = e->begin_ns > l->until_ns ? e->begin_ns : l->until_ns;
    if (e->kind != RA_EV_RECV || e->end_ns <= begin) return;
    l->covered_ns += e->end_ns - begin;
    l->until_ns = e->end_ns;
}

/* The number in column c of the row at a position; which: 0 q, 1 k, 2 v, 3 the gradient of o. */
static float input(int which, int64_t position, int c) {
    uint32_t x = (uint32_t)(position * ROW + c) * 4 + (uint32_t)which;
    x = (x ^ (x >> 16)) * 0x45d9f3bu;
    x = (x ^ (x >> 16)) * 0x45d9f3bu;
    return (float)((x ^ (x >> 16)) & 0xffff) / 32768 - 1;
}

static float *rows_of(const part *p, int width, int which) {
    float *rows = (float *)calloc((size_t)(p->rows * width) + 1, sizeof *rows), *row = rows;
    if (!rows) {
        fprintf(stderr, "no memory\n");
        exit(1);
    }
    for (int i = 0; i < p->run_count && which >= 0; i++)
        for (int64_t j = 0; j < p->runs[i].count; j++)
            for (int c = 0; c < width; c++) *row++ = input(which, p->runs[i].first + j, c);
    return rows;
}

static ra_status part_open(part *p, int rank, int ranks, int64_t tokens, const ra_transport *tp) {
    ra_error why;
    ra_ring_desc rd;
    ra_status s;
    ra_desc d = ra_desc_make(HEADS, KV_HEADS, DIM, RA_F32, RA_MASK_CAUSAL);
    memset(p, 0, sizeof *p);
    memset(&rd, 0, sizeof rd);
    memset(&why, 0, sizeof why);
    d.rank = rank;
    d.ranks = ranks;
    d.tokens = tokens;
    d.layout.kind = RA_LAYOUT_ZIGZAG;
    d.train = 1;
    d.error = rd.error = &why;
    rd.trace = on_event;
    rd.trace_ctx = &p->link;
    s = ra_plan_create(&p->plan, &d, NULL);
    if (!s) s = ra_ring_create(&p->ring, p->plan, tp, &rd);
    if (s) {
        fprintf(stderr, "rank %d: %s: %s\n", rank, why.field, why.text);
        return s;
    }
    p->run_count = ra_plan_q_runs(p->plan, rank, 0, p->runs, 2);
    for (int i = 0; i < p->run_count; i++) p->rows += p->runs[i].count;
    p->t.q.data = p->q = rows_of(p, ROW, 0);
    p->t.k.data = p->k = rows_of(p, KV_ROW, 1);
    p->t.v.data = p->v = rows_of(p, KV_ROW, 2);
    p->t.o.data = p->o = rows_of(p, ROW, -1);
    p->t.lse.data = p->lse = rows_of(p, HEADS, -1);
    p->d_o = rows_of(p, ROW, 3);
    p->d_q = rows_of(p, ROW, -1);
    p->d_k = rows_of(p, KV_ROW, -1);
    p->d_v = rows_of(p, KV_ROW, -1);
    return RA_OK;
}

static void part_close(part *p) {
    (void)ra_ring_destroy(p->ring);
    ra_plan_destroy(p->plan);
    free(p->q); free(p->k); free(p->v); free(p->o); free(p->lse);
    free(p->d_o); free(p->d_q); free(p->d_k); free(p->d_v);
}

static void print_pass(const part *p, int rank, const char *name, int64_t ns) {
    ra_ring_counters c;
    ra_plan_report report;
    double link = (double)p->link.covered_ns / 1e6, waited, hidden;
    ra_ring_query(p->ring, &c);
    (void)ra_plan_query(p->plan, rank, &report);
    waited = (double)c.wait_ns / 1e6;
    hidden = link > waited ? link - waited : 0;
    printf("%4d  %-8s %5lld %6lld %10.2f %10.2f %9.1f %9.1f %9.1f %9.1f %7.0f %%\n", rank, name,
           (long long)report.hops, (long long)c.chunks_in, (double)c.bytes_in / 1048576,
           (double)c.bytes_out / 1048576, (double)ns / 1e6, (double)c.compute_ns / 1e6, link,
           waited, link > 0 ? 100 * hidden / link : 100);
}

/* Both passes; prints a line for each if there is a ring. */
static ra_status part_run(part *p, int rank, int ranks) {
    ra_failure why;
    ra_status s = RA_OK;
    for (int back = 0; back < 2 && !s; back++) {
        int64_t begin = ra_now_ns();
        memset(&p->link, 0, sizeof p->link);
        if (back) {
            p->t.d_o.data = p->d_o;
            p->t.d_q.data = p->d_q;
            p->t.d_k.data = p->d_k;
            p->t.d_v.data = p->d_v;
            s = ra_backward(p->plan, p->ring, &p->t, ra_deadline_ms(120000));
        } else s = ra_forward(p->plan, p->ring, &p->t, ra_deadline_ms(120000));
        if (!s && ranks > 1) print_pass(p, rank, back ? "backward" : "forward",
                                        ra_now_ns() - begin);
    }
    if (s && ra_ring_failure(p->ring, &why) == RA_OK) fprintf(stderr, "%s\n", why.text);
    else if (s) fprintf(stderr, "rank %d: %s\n", rank, ra_ring_error(p->ring)->text);
    return s;
}

static int64_t differ(const part *p, const float *mine, const float *all, int width) {
    int64_t n = 0;
    for (int i = 0; i < p->run_count; i++)
        for (int64_t j = 0; j < p->runs[i].count; j++, mine += width)
            for (int c = 0; c < width; c++)
                n += memcmp(mine + c, all + (p->runs[i].first + j) * width + c, sizeof *mine) != 0;
    return n;
}

/* One rank: the ring, then the whole sequence alone, then the comparison. Exit code. */
static int attend(const options *o, const ra_transport *tp) {
    part mine, one;
    int64_t other, numbers;
    int failed = part_open(&mine, o->rank, o->ranks, o->tokens, tp) ||
                 part_run(&mine, o->rank, o->ranks);
    if (failed) return 1;
    failed = part_open(&one, 0, 1, o->tokens, NULL) || part_run(&one, 0, 1);
    if (failed) return 1;
    other = differ(&mine, mine.o, one.o, ROW) + differ(&mine, mine.lse, one.lse, HEADS) +
            differ(&mine, mine.d_q, one.d_q, ROW) + differ(&mine, mine.d_k, one.d_k, KV_ROW) +
            differ(&mine, mine.d_v, one.d_v, KV_ROW);
    numbers = mine.rows * (2 * ROW + 2 * KV_ROW + HEADS);
    printf("%4d  against one rank: %lld of %lld numbers have other bits\n", o->rank,
           (long long)other, (long long)numbers);
    part_close(&mine);
    part_close(&one);
    return other != 0;
}

/* Connects and attends. listen_fd: 0, or a socket made before. */
static int run_rank(const options *o, int listen_fd) {
    static unsigned char key[32];
    const int64_t agreed[4] = { o->tokens, HEADS, KV_HEADS, DIM };
    ra_tcp_desc d;
    ra_tcp *tcp = NULL;
    ra_error why;
    int failed;
    memset(&d, 0, sizeof d);
    memset(&why, 0, sizeof why);
    d.rank = o->rank;
    d.ranks = o->ranks;
    d.addresses = o->at;
    d.listen_fd = listen_fd;
    d.world = ring_job_id("ring_tcp", o->at, o->ranks, &o->job, 1);
    d.shape = ring_job_id("ring_tcp", NULL, 0, agreed, 4);
    d.error = &why;
    if (o->key_file) {
        FILE *f = fopen(o->key_file, "rb");
        if (!f || fread(key, 1, sizeof key, f) != sizeof key) {
            fprintf(stderr, "%s: no 32 bytes of a key\n", o->key_file);
            return 1;
        }
        fclose(f);
        d.key = key;
    }
    if (ra_tcp_open(&tcp, &d)) {
        fprintf(stderr, "rank %d: %s: %s\n", o->rank, why.field, why.text);
        if (why.status == RA_E_MISMATCH)
            fprintf(stderr, "All ranks need the same addresses in the same order, the same --job "
                            "and --tokens, and the same version of this program.\n");
        return 1;
    }
    failed = attend(o, ra_tcp_transport(tcp));
    ra_tcp_close(tcp);
    return failed;
}

static void print_head(const options *o) {
    printf("%lld tokens, %d/%d heads of %d, f32, causal, zigzag, %d ranks\n",
           (long long)o->tokens, HEADS, KV_HEADS, DIM, o->ranks);
    printf("rank  pass      hops chunks     MiB in    MiB out        ms  computed   link ms"
           " waited ms   hidden\n");
    fflush(stdout);
}

/* All ranks as processes of this machine; prints what each of them printed, in order. */
static int run_local(options *o) {
    static char text[RANKS][32];
    int fd[RANKS], out[RANKS][2], failed = 0, status;
    pid_t pid[RANKS];
    print_head(o);
    for (int r = 0; r < o->ranks; r++) {
        int port = 0;
        fd[r] = ra_tcp_listen("127.0.0.1:0", &port);
        if (fd[r] < 0 || pipe(out[r])) {
            perror("127.0.0.1");
            return 1;
        }
        snprintf(text[r], sizeof text[r], "127.0.0.1:%d", port);
        o->at[r] = text[r];
    }
    for (int r = 0; r < o->ranks; r++) {
        pid[r] = fork();
        if (pid[r] == 0) {
            alarm(600);                /* ends in any case */
            for (int i = 0; i < o->ranks; i++) if (i != r) close(fd[i]);
            dup2(out[r][1], STDOUT_FILENO);
            for (int i = 0; i < o->ranks; i++) close(out[i][0]), close(out[i][1]);
            o->rank = r;
            exit(run_rank(o, fd[r]));
        }
        failed |= pid[r] < 0;
    }
    for (int r = 0; r < o->ranks; r++) {
        char line[512];
        FILE *f = fdopen(out[r][0], "r");
        close(fd[r]);
        close(out[r][1]);
        while (f && fgets(line, sizeof line, f)) fputs(line, stdout);
        if (f) fclose(f);
        failed |= pid[r] < 0 || waitpid(pid[r], &status, 0) < 0 || status != 0;
    }
    return failed;
}

static int usage(void) {
    fprintf(stderr, "ring_tcp [--tokens N] [--key FILE] --local RANKS\n"
                    "ring_tcp [--tokens N] [--key FILE] [--job N] --rank R host:port...\n");
    return 2;
}

int main(int argc, char **argv) {
    options o;
    memset(&o, 0, sizeof o);
    o.tokens = 2048;
    for (int i = 1; i < argc; i++) {
        int more = i + 1 < argc;
        if (!strcmp(argv[i], "--tokens") && more) o.tokens = atoll(argv[++i]);
        else if (!strcmp(argv[i], "--job") && more) o.job = atoll(argv[++i]);
        else if (!strcmp(argv[i], "--key") && more) o.key_file = argv[++i];
        else if (!strcmp(argv[i], "--local") && more) o.local = atoi(argv[++i]);
        else if (!strcmp(argv[i], "--rank") && more) o.rank = atoi(argv[++i]);
        else if (argv[i][0] != '-' && o.ranks < RANKS) o.at[o.ranks++] = argv[i];
        else return usage();
    }
    if (argc == 1) o.local = 3;        /* without arguments */
    if (o.local < 0 || o.local > RANKS || o.tokens < 1) return usage();
    if (o.local) {
        o.ranks = o.local;
        return run_local(&o);
    }
    if (!o.ranks || o.rank < 0 || o.rank >= o.ranks) return usage();
    if (o.rank == 0) print_head(&o);
    return run_rank(&o, 0);
}
