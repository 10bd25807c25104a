#ifndef RA_TCP_H
#define RA_TCP_H

/* Ring attention over TCP: plain sockets, one process per rank, one file to copy.
 *
 *   #define _POSIX_C_SOURCE 200809L         before the first include; not needed with -std=gnu99
 *   #define RINGATTN_IMPLEMENTATION
 *   #include "ringattn.h"
 *   #include "ra_tcp.h"
 *
 *   const char *at[] = { "10.0.0.1:4000", "10.0.0.2:4000", "[fd00::3]:4000" };
 *   ra_tcp_desc d; ra_tcp *tcp; ra_error why;
 *   memset(&d, 0, sizeof d);
 *   d.rank = rank; d.ranks = 3; d.addresses = at; d.world = job_number; d.error = &why;
 *   if (ra_tcp_open(&tcp, &d)) fprintf(stderr, "%s: %s\n", why.field, why.text);
 *   ra_ring_create(&ring, plan, ra_tcp_transport(tcp), NULL);    ... passes ...
 *   ra_ring_destroy(ring); ra_tcp_close(tcp);
 *
 *   cc -O2 -I. program.c -pthread -lm                            plain
 *   cc -O2 -I. -DRA_TCP_SODIUM program.c -pthread -lm -lsodium   with a key (libsodium-dev)
 *
 * Trust. Without a key this is for trusted networks only: anyone who reaches the port while the
 * ring connects can take a rank's place, and anyone on the path can read and change everything.
 * With RA_TCP_SODIUM and a key of 32 bytes both sides of a connection prove that they have the key,
 * and every frame is encrypted and authenticated. Without the key nobody can join or crash the
 * ring. A stranger occupies a place for 5 s and 80 ms per rank at most, in bounded memory. If all
 * places are taken, whoever has not said a whole hello is dropped first, otherwise a random one,
 * and ranks call again. So a flood of whole hellos delays a ring, and a fast one can keep it from
 * forming until connect_ns. The port is closed once the ring is connected. (Anyone who can cut the
 * wire can cut the ring.)
 *
 * Connections. A rank listens on its own address and on no other. It connects to all ranks below it
 * and accepts those above. There is one connection per pair, so any rank reaches any other. Ranks
 * may start in any order within connect_ns. Both sides check version, byte order, world, ring,
 * number of ranks, rank and shape, and report which of them differs. A connection counts for both
 * only once the side that accepts has confirmed it. If nobody comes, the sentence names the rank,
 * its address in numbers, and what the last try came to. Later rings may use the same addresses if
 * `ring` counts them; rings at the same time need different ports.
 *
 * On the wire. A message travels in frames of at most 256 KiB, each behind a head of 24 bytes with
 * kind, channel, tag and length. The receiver grants a message when its receive is posted. So
 * nothing is stored for a receive that does not exist, no channel delays another, and the ring's
 * own buffers bound the memory. A head that makes no sense closes the connection.
 *
 * Failure. abort reaches the peers immediately, by a frame if one can be sent without waiting,
 * otherwise by closing: they get RA_E_ABORTED or RA_E_PEER. A process that dies closes its
 * connections, and ops that are pending with it fail with RA_E_PEER. A peer that is stopped or cut
 * off is silent: deadlines and the ring's watchdog end the wait. Keep-alive probes find a host that
 * is cut off. While bytes are on the way to it, the system tries for about 15 minutes instead. The
 * host of a stopped process answers probes. If a connection is reset while no op is pending with
 * its peer, the context fails with RA_E_PEER, because this rank may wait for another one that waits
 * for it. Calls do not block, except wait until its deadline, ra_tcp_open for connect_ns, and
 * quiesce and ra_tcp_close for at most 50 ms. A child that a rank forks may call ra_tcp_close, and
 * nothing else here.
 *
 * Limits. A rank needs a descriptor for each other rank and about ten more (ulimit -n, which must
 * not be lowered afterwards). While it connects it uses up to ranks + 128 for callers if there are
 * as many. ra_tcp_open looks up names once, and may block for as long as DNS does. Hosts of
 * different byte order refuse each other. A program that is started by another thread in the middle
 * of ra_tcp_open may inherit a socket. gcc or clang, POSIX.
 *
 * SPDX-License-Identifier: MIT OR Unlicense */
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>
#ifdef RA_TCP_SODIUM
#include <sodium.h>
#endif

#define RA_TCP_API static __attribute__((unused))

/* Zero it first. Equal on all ranks, except rank, listen_fd and error. */
typedef struct ra_tcp_desc {
    int32_t rank, ranks;
    const char *const *addresses;      /* [ranks] "host:port" or "[v6]:port" */
    uint64_t world;                    /* number of the run: ranks of other runs are refused */
    uint32_t ring;                     /* number of the ring in the run */
    int32_t  listen_fd;                /* a socket that listens, which is taken over; 0: none */
    uint64_t shape;                    /* a digest of anything else that must be equal, or 0 */
    int64_t  connect_ns;               /* time for all ranks to connect; 0: 60 s */
    size_t   max_msg;                  /* 0: 1 GiB */
    const void *key;                   /* 32 secret bytes, copied; null: no encryption. Needs
                                        * RA_TCP_SODIUM */
    ra_error *error;                   /* may be null */
} ra_tcp_desc;

enum { RA_TCP_VERSION = 2, RA_TCP_CHANNELS = 2, RA_TCP_OPS = 256, RA_TCP_STRANGERS = 128 };
/* Bytes of a head and a hello; most bytes of a handshake, and of a body, plain or sealed. */
enum { RA_TCP_HEAD = 24, RA_TCP_HELLO = 96, RA_TCP_TALK = 512 };
enum { RA_TCP_PLAIN = 262144, RA_TCP_SEALED = 65536 };
#define RA_TCP_MS ((int64_t)1000000)
/* The longest handshake: with many ranks on a host each of them rarely has its turn. */
#define RA_TCP_SHAKE_NS(ranks) ((5000 + 80 * (ranks)) * RA_TCP_MS)
#define RA_TCP_DRAIN_NS (50 * RA_TCP_MS)
#define RA_TCP_SWEEP_NS (2 * RA_TCP_MS)        /* between looks at connections without ops */
#ifdef RA_TCP_SODIUM
enum { RA_TCP_A = (int)crypto_secretstream_xchacha20poly1305_ABYTES,
       RA_TCP_START = (int)crypto_secretstream_xchacha20poly1305_HEADERBYTES };
#else
enum { RA_TCP_A = 0, RA_TCP_START = 0 };
#endif

/* The first bytes of a connection, from both sides, in the sender's byte order. */
typedef struct ra_tcp_hello {
    char     magic[8];                 /* "ra_tcp\r\n" */
    uint32_t order, version;           /* 0x01020304, RA_TCP_VERSION */
    uint64_t world, shape;
    uint32_t ring;
    int32_t  ranks, from, to;
    uint32_t sealed, reserved[3];
    uint8_t  public_key[32];           /* of this connection alone; 0 without a key */
} ra_tcp_hello;

enum { RA_TCP_READY = 1,               /* the first frame: shows that its sender has the key */
       RA_TCP_SEATED,                  /* confirms; tag 1: refuses, this rank is there already */
       RA_TCP_GRANT,                   /* tag: number of receives that were posted; 0: farewell */
       RA_TCP_DATA,                    /* a piece of a message follows, `body` bytes */
       RA_TCP_ABORT };                 /* tag: the reason, negated */
typedef struct ra_tcp_head {
    uint32_t body;                     /* bytes that follow */
    uint8_t  kind, channel;
    uint16_t zero;
    uint64_t tag, length;              /* of the whole message */
} ra_tcp_head;

typedef struct ra_tcp_queue { ra_transport_op *first, *last; } ra_tcp_queue;

/* Words of ra_transport_op.scratch: the next op of its queue; bytes moved so far; how it ended; of
 * a receive, the length of its message. */
enum { RA_TCP_NEXT, RA_TCP_MOVED, RA_TCP_END, RA_TCP_LENGTH };

typedef struct ra_tcp_try {            /* the last try to reach a rank */
    const struct addrinfo *at;         /* null: it has to call this one */
    const char *what;                  /* it came to, or null */
    int error;                         /* errno, or 0 */
    int64_t when_ns;
} ra_tcp_try;

/* One connection, with the frame that is being received and the one that is being sent. */
typedef struct ra_tcp_conn {
    int fd, peer;                      /* -1: none */
    int dead;                          /* 0, or the failure: nothing moves any more */
    int stage;                         /* of the handshake, RA_TCP_AT_* */
    int hush;                          /* 1: nothing more may be written */
    int dialed;                        /* 1: this side connected */
    int listed;                        /* 1: it is among those that poll visits */
    int64_t since_ns;                  /* of the handshake */
    ra_tcp_try last;
    ra_tcp_hello hello, peer_hello;
    ra_tcp_queue send[RA_TCP_CHANNELS], recv[RA_TCP_CHANNELS];
    uint32_t granted[RA_TCP_CHANNELS]; /* unfinished sends that the peer has granted */
    uint32_t to_grant[RA_TCP_CHANNELS];/* posted receives that are not granted yet */
    uint32_t awaited[RA_TCP_CHANNELS]; /* unfinished receives that are granted */
    size_t skip[RA_TCP_CHANNELS];      /* bytes to come of a message that did not fit */
    int turn;                          /* channel that sends next */
    /* The frame out: out_len bytes of out_buf, then (plain) out_body bytes from out_data on, of
     * which out_at bytes are written. */
    size_t out_at, out_len, out_body;
    const uint8_t *out_data;
    ra_transport_op *out_op;           /* the send that it is a piece of, or null */
    size_t in_at, in_need;             /* bytes of the head or body in: read; needed */
    int in_body;                       /* 1: the body of `head` is coming */
    ra_tcp_head head;
    uint8_t *out_buf, *in_buf;         /* sealed: whole frames; plain: heads */
#ifdef RA_TCP_SODIUM
    uint8_t secret_key[32];
    crypto_secretstream_xchacha20poly1305_state push, pull;
#endif
} ra_tcp_conn;

/* What a connection waits for. Whoever dialed says READY after the other side's, then waits for
 * SEATED as long as it takes: from there on the other side may count the connection as open. */
enum { RA_TCP_AT_NONE, RA_TCP_AT_DIAL, RA_TCP_AT_HELLO, RA_TCP_AT_READY, RA_TCP_AT_SEATED,
       RA_TCP_AT_OPEN };

typedef struct ra_tcp {
    int32_t rank, ranks, sealed;
    pid_t pid;                         /* of this rank; another one has forked from it */
    int32_t busy;                      /* atomic: 1 while a call or an abort is inside */
    int32_t why, told;                 /* atomic: of this rank's abort; 1: the peers know it */
    int32_t heard;                     /* the failure that a peer has reported */
    int32_t wake[2];                   /* a pipe: abort writes, wait reads */
    ra_tcp_desc d;
    uint8_t key[32];
    ra_tcp_conn *conn;                 /* [ranks] by rank */
    ra_tcp_conn *stranger;             /* [places] accepted, rank not known yet */
    int32_t places, active;            /* active: number of ranks in list */
    int32_t *list;                     /* [ranks] those that poll visits: they have ops */
    struct pollfd *fds;                /* [ranks + places + 2] */
    ra_tcp_conn **who;                 /* of fds */
    uint8_t *waste;                    /* RA_TCP_PLAIN bytes for what is discarded */
    int listener;
    int64_t deaf_ns;                   /* until then there is no descriptor for a caller */
    int64_t swept_ns;                  /* when all connections were last looked at */
    char note[216], text[216];         /* why a caller was refused; for error_text */
    ra_transport transport;
    int32_t turn;                      /* of the transport */
} ra_tcp;

/* -------------------------------------------------------------------------- sentences */
static ra_status ra_tcp_refuse(const ra_tcp_desc *d, ra_status s, const char *field,
                               const char *format, ...) {
    va_list args;
    if (!d->error) return s;
    d->error->status = s;
    snprintf(d->error->field, sizeof d->error->field, "tcp.%s", field);
    va_start(args, format);
    vsnprintf(d->error->text, sizeof d->error->text, format, args);
    va_end(args);
    return s;
}

static void ra_tcp_note(ra_tcp *t, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(t->note, sizeof t->note, format, args);
    va_end(args);
}

static void ra_tcp_tried(ra_tcp_conn *c, const char *what, int error) {
    c->last.what = what;
    c->last.error = error;
    c->last.when_ns = ra_now_ns();
}

static const char *ra_tcp_silence(const ra_tcp_conn *c) {
    return c->stage == RA_TCP_AT_DIAL    ? "it does not answer requests to connect"
           : c->stage == RA_TCP_AT_HELLO ? "it accepts connections, but says nothing"
                                         : "it has stopped in the handshake";
}

/* "10.0.0.1:4000", and whether other hosts can reach that. */
static void ra_tcp_numeric(const struct sockaddr *a, socklen_t n, char out[128]) {
    char host[64] = "?", port[8] = "?";
    const int v6 = a->sa_family == AF_INET6;
    int local;
    (void)getnameinfo(a, n, host, sizeof host, port, sizeof port, NI_NUMERICHOST | NI_NUMERICSERV);
    local = v6 ? !strcmp(host, "::1") : !strncmp(host, "127.", 4);
    snprintf(out, 128, v6 ? "[%s]:%s%s" : "%s:%s%s", host, port,
             local ? ", a loopback address, which no other host reaches" : "");
}

/* -------------------------------------------------------------------------- sockets */
static void ra_tcp_option(int fd, int level, int name, int value) {
    (void)setsockopt(fd, level, name, &value, sizeof value);
}

/* 1: the process or the system has no descriptor or memory at the moment. */
static int ra_tcp_is_full(int error) {
    return error == EMFILE || error == ENFILE || error == ENOBUFS || error == ENOMEM;
}

/* Probes are rarer the more ranks there are: a host with many of them drops their probes. */
static int ra_tcp_prepare(int fd, int ranks) {
    int flags = fcntl(fd, F_GETFL, 0);
    if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0) return -1;
    (void)fcntl(fd, F_SETFD, FD_CLOEXEC);
    ra_tcp_option(fd, IPPROTO_TCP, TCP_NODELAY, 1);
    ra_tcp_option(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
#ifdef TCP_KEEPIDLE
    ra_tcp_option(fd, IPPROTO_TCP, TCP_KEEPIDLE, 10 + ranks / 4);
    ra_tcp_option(fd, IPPROTO_TCP, TCP_KEEPINTVL, 5 + ranks / 16);
    ra_tcp_option(fd, IPPROTO_TCP, TCP_KEEPCNT, 4);
#endif
    return 0;
}

/* The port of "host:port" or "[v6]:port"; -1: another form. */
static int ra_tcp_port(const char *address) {
    const char *colon = strrchr(address, ':'), *p = colon ? colon + 1 : "";
    long port = 0;
    if (!*p || colon == address || strlen(p) > 5) return -1;
    for (; *p; p++) {
        if (*p < '0' || *p > '9') return -1;
        port = 10 * port + (*p - '0');
    }
    if (memchr(address, ':', (size_t)(colon - address)) &&
        (address[0] != '[' || colon[-1] != ']')) return -1;
    return port > 65535 ? -1 : (int)port;
}

/* The addresses of "host:port" or "[v6]:port". *why: 0, or an EAI_* for gai_strerror. */
static struct addrinfo *ra_tcp_resolve(const char *address, int listens, int *why) {
    struct addrinfo hints, *out = NULL;
    const char *colon = strrchr(address, ':');
    char host[256];
    size_t n = colon ? (size_t)(colon - address) : 0;
    *why = EAI_NONAME;
    if (ra_tcp_port(address) < 0 || n >= sizeof host) return NULL;
    memcpy(host, address, n);
    host[n] = 0;
    if (host[0] == '[' && host[n - 1] == ']') {
        memmove(host, host + 1, n - 2);
        host[n - 2] = 0;
    }
    memset(&hints, 0, sizeof hints);
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = listens ? AI_PASSIVE : 0;
    *why = getaddrinfo(host, colon + 1, &hints, &out);
    return *why ? NULL : out;
}

/* A socket that listens on this address alone; *port: its port, of which 0 chooses a free one. -1:
 * see errno. */
RA_TCP_API int ra_tcp_listen(const char *address, int *port) {
    int fd = -1, kept = EADDRNOTAVAIL, why;
    struct addrinfo *list = ra_tcp_resolve(address, 1, &why), *a;
    struct sockaddr_storage at;
    socklen_t n = sizeof at;
    if (ra_tcp_port(address) < 0) kept = EINVAL;
    for (a = list; a && fd < 0; a = a->ai_next) {
        fd = socket(a->ai_family, SOCK_STREAM, 0);
        if (fd == 0) fd = dup(0), close(0);      /* listen_fd 0 means none */
        if (fd >= 0) ra_tcp_option(fd, SOL_SOCKET, SO_REUSEADDR, 1);
        if (a->ai_family == AF_INET6) ra_tcp_option(fd, IPPROTO_IPV6, IPV6_V6ONLY, 1);
        if (fd >= 0 && !bind(fd, a->ai_addr, a->ai_addrlen) && !listen(fd, 4096) &&
            !ra_tcp_prepare(fd, 0)) break;
        kept = errno;
        if (fd >= 0) close(fd);
        fd = -1;
    }
    if (list) freeaddrinfo(list);
    if (fd < 0) errno = kept;
    if (fd >= 0 && port && !getsockname(fd, (struct sockaddr *)&at, &n))
        *port = ntohs(at.ss_family == AF_INET6 ? ((struct sockaddr_in6 *)&at)->sin6_port
                                               : ((struct sockaddr_in *)&at)->sin_port);
    return fd;
}

/* -------------------------------------------------------------------------- a connection's end */
static void ra_tcp_drop(ra_tcp_conn *c, int why) {
    if (c->fd >= 0) close(c->fd);
    c->fd = -1;
    c->dead = why;
    c->stage = RA_TCP_AT_NONE;
    c->out_op = NULL;
    c->out_at = c->out_len = c->out_body = 0;
#ifdef RA_TCP_SODIUM
    sodium_memzero(c->secret_key, sizeof c->secret_key);
    sodium_memzero(&c->push, sizeof c->push);
    sodium_memzero(&c->pull, sizeof c->pull);
#endif
}

static void ra_tcp_reset(ra_tcp_conn *c) {
    ra_tcp_conn old;
    ra_tcp_drop(c, 0);                 /* first, so that the copy has no keys */
    old = *c;
    memset(c, 0, sizeof *c);
    c->out_buf = old.out_buf;
    c->in_buf = old.in_buf;
    c->peer = old.peer;
    c->last = old.last;
    c->since_ns = old.since_ns;
    c->fd = -1;
    c->in_need = RA_TCP_HELLO;
}

/* Ends the first op of a queue. The next poll writes its state. */
static void ra_tcp_end(ra_tcp_queue *q, int state) {
    ra_transport_op *op = q->first;
    q->first = (ra_transport_op *)op->scratch[RA_TCP_NEXT];
    if (!q->first) q->last = NULL;
    op->scratch[RA_TCP_END] = (void *)(intptr_t)state;
}

/* -------------------------------------------------------------------------- frames out */
static size_t ra_tcp_piece(const ra_tcp *t) {
    return t->sealed ? (size_t)RA_TCP_SEALED : (size_t)RA_TCP_PLAIN;
}

/* Makes a frame the one that is sent. data: h->body bytes in a send's buffer. */
static void ra_tcp_stage(ra_tcp *t, ra_tcp_conn *c, const ra_tcp_head *h, const uint8_t *data) {
    c->out_at = 0;
    if (!t->sealed) {
        memcpy(c->out_buf, h, RA_TCP_HEAD);
        c->out_len = RA_TCP_HEAD;
        c->out_data = data;
        c->out_body = h->body;
        return;
    }
#ifdef RA_TCP_SODIUM
    (void)crypto_secretstream_xchacha20poly1305_push(&c->push, c->out_buf, NULL,
                                                     (const unsigned char *)h, RA_TCP_HEAD, NULL, 0,
                                                     0);
    c->out_len = RA_TCP_HEAD + RA_TCP_A;
    if (!h->body) return;
    (void)crypto_secretstream_xchacha20poly1305_push(&c->push, c->out_buf + c->out_len, NULL, data,
                                                     h->body, NULL, 0, 0);
    c->out_len += h->body + RA_TCP_A;
#endif
}

static ra_tcp_head ra_tcp_head_of(int kind, int channel, uint64_t tag) {
    ra_tcp_head h;
    memset(&h, 0, sizeof h);
    h.kind = (uint8_t)kind;
    h.channel = (uint8_t)channel;
    h.tag = tag;
    return h;
}

/* Stages the next frame: grants first, because peers wait for them, then pieces of messages,
 * channels in turn. 0: there is none. */
static int ra_tcp_next(ra_tcp *t, ra_tcp_conn *c) {
    for (int i = 0; i < RA_TCP_CHANNELS; i++) {
        ra_tcp_head h = ra_tcp_head_of(RA_TCP_GRANT, i, c->to_grant[i]);
        if (!c->to_grant[i]) continue;
        c->awaited[i] += c->to_grant[i];
        c->to_grant[i] = 0;
        ra_tcp_stage(t, c, &h, NULL);
        return 1;
    }
    for (int i = 0; i < RA_TCP_CHANNELS; i++) {
        int channel = (c->turn + i) % RA_TCP_CHANNELS;
        ra_transport_op *op = c->send[channel].first;
        size_t moved, left;
        ra_tcp_head h;
        if (!op || !c->granted[channel]) continue;
        moved = (size_t)(uintptr_t)op->scratch[RA_TCP_MOVED];
        left = op->len - moved;
        h = ra_tcp_head_of(RA_TCP_DATA, channel, op->tag);
        h.length = op->len;
        h.body = (uint32_t)(left < ra_tcp_piece(t) ? left : ra_tcp_piece(t));
        ra_tcp_stage(t, c, &h, (const uint8_t *)op->buf + moved);
        op->scratch[RA_TCP_MOVED] = (void *)(uintptr_t)(moved + h.body);
        c->out_op = op;
        c->turn = (channel + 1) % RA_TCP_CHANNELS;
        return 1;
    }
    return 0;
}

/* Writes what is staged. 1: all of it; 0: the socket is full; -1: the connection is gone. */
static int ra_tcp_write(ra_tcp_conn *c) {
    while (c->out_at < c->out_len + c->out_body) {
        size_t head = c->out_at < c->out_len ? c->out_len - c->out_at : 0;
        size_t past = head ? 0 : c->out_at - c->out_len;
        struct iovec part[2];
        struct msghdr m;
        ssize_t n;
        part[0].iov_base = c->out_buf + (head ? c->out_at : 0);
        part[0].iov_len = head;
        part[1].iov_base = (void *)(uintptr_t)(c->out_body ? c->out_data + past : c->out_buf);
        part[1].iov_len = c->out_body - past;
        memset(&m, 0, sizeof m);
        m.msg_iov = part;
        m.msg_iovlen = 2;
        n = sendmsg(c->fd, &m, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0)
            return errno == EAGAIN || errno == EWOULDBLOCK || ra_tcp_is_full(errno) ? 0 : -1;
        c->out_at += (size_t)n;
    }
    c->out_at = c->out_len = c->out_body = 0;
    return 1;
}

/* The system has taken a frame. Ends the send whose last piece it was. */
static void ra_tcp_sent(ra_tcp_conn *c) {
    ra_transport_op *op = c->out_op;
    c->out_op = NULL;
    if (!op || (size_t)(uintptr_t)op->scratch[RA_TCP_MOVED] < op->len) return;
    c->granted[op->channel]--;
    ra_tcp_end(&c->send[op->channel], RA_MSG_DONE);
}

/* Writes what is staged and more, a few MiB at most, so that others get a turn. */
static void ra_tcp_flush(ra_tcp *t, ra_tcp_conn *c) {
    for (int frames = 0; c->fd >= 0 && !c->hush && frames < 32; frames++) {
        int done = ra_tcp_write(c);
        if (done < 0) {
            c->hush = 1;               /* what the peer has sent can still be read */
            return;
        }
        if (done == 0) return;
        ra_tcp_sent(c);
        if (!ra_tcp_next(t, c)) return;
    }
}

/* -------------------------------------------------------------------------- frames in */
/* Bytes on the wire of n bytes of a head or body. */
static size_t ra_tcp_on_wire(const ra_tcp *t, size_t n) {
    return n + (t->sealed ? (size_t)RA_TCP_A : 0);
}

/* Where the body of c->head goes from byte `at` on: into a receive's buffer, or where it is
 * discarded. *n: at most so many bytes. */
static uint8_t *ra_tcp_target(ra_tcp *t, const ra_tcp_conn *c, size_t at, size_t *n) {
    const ra_transport_op *op = c->recv[c->head.channel].first;
    size_t moved = c->skip[c->head.channel] || !op ? 0
                   : (size_t)(uintptr_t)op->scratch[RA_TCP_MOVED] + at;
    if (c->skip[c->head.channel] || !op || moved >= op->len) return t->waste;
    if (*n > op->len - moved) *n = op->len - moved;
    return (uint8_t *)op->buf + moved;
}

/* Takes a head. 0, or the failure of the connection. */
static int ra_tcp_take_head(ra_tcp *t, ra_tcp_conn *c) {
    const ra_tcp_head *h = &c->head;
    int channel = h->channel;
    ra_transport_op *op;
    size_t moved;
    if (h->zero || channel >= RA_TCP_CHANNELS || h->body > ra_tcp_piece(t)) return RA_E_PROTO;
    if (h->kind == RA_TCP_ABORT) {
        t->heard = RA_E_ABORTED;
        snprintf(t->text, sizeof t->text, "rank %d aborted: %s", c->peer,
                 ra_status_text(-(int)(h->tag & 255)));
        return RA_E_ABORTED;
    }
    if (h->kind == RA_TCP_GRANT) {
        if (h->body || h->tag > RA_TCP_OPS || c->granted[channel] + h->tag > RA_TCP_OPS)
            return RA_E_PROTO;
        c->granted[channel] += (uint32_t)h->tag;
        return RA_OK;
    }
    op = c->recv[channel].first;
    if (h->kind != RA_TCP_DATA) return RA_E_PROTO;
    if (c->skip[channel]) return h->body > c->skip[channel] ? RA_E_PROTO : RA_OK;
    if (!c->awaited[channel] || !op || !h->body) return RA_E_PROTO;
    moved = (size_t)(uintptr_t)op->scratch[RA_TCP_MOVED];
    if (h->length != op->len && h->length > t->d.max_msg) return RA_E_PROTO;
    if (moved == 0) op->scratch[RA_TCP_LENGTH] = (void *)(uintptr_t)h->length;
    return h->length != (uintptr_t)op->scratch[RA_TCP_LENGTH] || h->body > h->length - moved
               ? RA_E_PROTO : RA_OK;
}

/* Takes the body of c->head, whose bytes are in place. A message of another length than agreed
 * fills the buffer as far as it goes, and the rest of it is discarded. */
static void ra_tcp_take_body(ra_tcp_conn *c) {
    int channel = c->head.channel;
    ra_transport_op *op = c->recv[channel].first;
    const size_t length = (size_t)c->head.length;
    size_t moved;
    if (c->skip[channel]) {
        c->skip[channel] -= c->head.body;
        return;
    }
    if (!op) return;
    moved = (size_t)(uintptr_t)op->scratch[RA_TCP_MOVED] + c->head.body;
    op->scratch[RA_TCP_MOVED] = (void *)(uintptr_t)moved;
    if (moved < op->len && moved < length) return;
    c->awaited[channel]--;
    c->skip[channel] = length - moved;
    op->done = length;
    ra_tcp_end(&c->recv[channel], length != op->len           ? (int)RA_E_TRUNC
                                  : c->head.tag != op->tag ? (int)RA_E_PROTO : (int)RA_MSG_DONE);
}

/* Decrypts the n bytes of in_buf to `to`; 0: they are not a frame of this connection. */
static int ra_tcp_unseal(ra_tcp_conn *c, uint8_t *to, size_t n) {
#ifdef RA_TCP_SODIUM
    unsigned char tag;
    return crypto_secretstream_xchacha20poly1305_pull(&c->pull, to, NULL, &tag, c->in_buf, n, NULL,
                                                      0) == 0;
#else
    (void)c, (void)to, (void)n;
    return 0;
#endif
}

/* Takes the head of a frame to c->head; 0: it is not one of this connection. */
static int ra_tcp_open_head(const ra_tcp *t, ra_tcp_conn *c) {
    if (t->sealed) return ra_tcp_unseal(c, (uint8_t *)&c->head, c->in_need);
    memcpy(&c->head, c->in_buf, RA_TCP_HEAD);
    return 1;
}

/* Decrypts the body of c->head to where it goes; 0: as above. */
static int ra_tcp_open_body(ra_tcp *t, ra_tcp_conn *c) {
    size_t n = c->head.body;
    uint8_t *to = t->sealed ? ra_tcp_target(t, c, 0, &n) : NULL;
    int whole = n == c->head.body;
    if (!t->sealed) return 1;
    if (!ra_tcp_unseal(c, whole ? to : t->waste, c->in_need)) return 0;
    if (!whole) memcpy(to, t->waste, n);
    return 1;
}

/* Takes the head or body that has come. 0, or the failure of the connection. */
static int ra_tcp_take(ra_tcp *t, ra_tcp_conn *c) {
    if (!c->in_body) {
        int code = ra_tcp_open_head(t, c) ? ra_tcp_take_head(t, c) : RA_E_PROTO;
        if (code) return code;
        c->in_body = c->head.body > 0;
    } else {
        if (!ra_tcp_open_body(t, c)) return RA_E_PROTO;
        ra_tcp_take_body(c);
        c->in_body = 0;
    }
    c->in_at = 0;
    c->in_need = ra_tcp_on_wire(t, c->in_body ? c->head.body : (size_t)RA_TCP_HEAD);
    return RA_OK;
}

/* Reads up to in_need bytes. 1: they have come; 0: not yet; RA_E_PEER: the peer has closed;
 * RA_E_IO: the connection is broken, see errno. */
static int ra_tcp_read(ra_tcp *t, ra_tcp_conn *c) {
    while (c->in_at < c->in_need) {
        size_t most = c->in_need - c->in_at;
        uint8_t *to = c->in_body && !t->sealed ? ra_tcp_target(t, c, c->in_at, &most)
                                               : c->in_buf + c->in_at;
        ssize_t n = recv(c->fd, to, most, MSG_DONTWAIT);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return errno == EAGAIN || errno == EWOULDBLOCK ? 0 : RA_E_IO;
        if (n == 0) return RA_E_PEER;
        c->in_at += (size_t)n;
    }
    return 1;
}

static int ra_tcp_has_ops(const ra_tcp_conn *c) {
    return c->send[0].first || c->send[1].first || c->recv[0].first || c->recv[1].first;
}

/* Reads what has come on an open connection, a few MiB at most, so that others get a turn. */
static void ra_tcp_drink(ra_tcp *t, ra_tcp_conn *c) {
    for (int frames = 0; c->fd >= 0 && frames < 32; frames++) {
        int code = ra_tcp_read(t, c);
        if (code == 0) return;
        if (code == RA_E_IO) {
            snprintf(t->text, sizeof t->text, "the connection with rank %d is broken: %s", c->peer,
                     strerror(errno));
            code = RA_E_PEER;
            if (!ra_tcp_has_ops(c)) t->heard = code;   /* otherwise these fail, and name it */
        } else if (code == RA_E_PEER)
            snprintf(t->text, sizeof t->text, "rank %d has closed its connection", c->peer);
        if (code > 0) code = ra_tcp_take(t, c);
        if (code >= 0) continue;
        if (code == RA_E_PROTO)
            snprintf(t->text, sizeof t->text, "rank %d sent what is no frame", c->peer);
        ra_tcp_drop(c, code);
    }
}

/* -------------------------------------------------------------------------- handshake */
static ra_tcp_hello ra_tcp_hello_of(const ra_tcp *t, int to) {
    ra_tcp_hello h;
    memset(&h, 0, sizeof h);
    memcpy(h.magic, "ra_tcp\r\n", 8);
    h.order = 0x01020304;
    h.version = RA_TCP_VERSION;
    h.world = t->d.world;
    h.shape = t->d.shape;
    h.ring = t->d.ring;
    h.ranks = t->ranks;
    h.from = t->rank;
    h.to = to;
    h.sealed = (uint32_t)t->sealed;
    return h;
}

/* Appends bytes of a handshake, which are few, to those that are to be written. */
static void ra_tcp_append(ra_tcp_conn *c, const void *data, size_t n) {
    memcpy(c->out_buf + c->out_len, data, n);
    c->out_len += n;
}

/* Appends a frame of the handshake. */
static void ra_tcp_put(ra_tcp *t, ra_tcp_conn *c, int kind, uint64_t tag) {
    ra_tcp_head h = ra_tcp_head_of(kind, 0, tag);
    uint8_t frame[RA_TCP_HEAD + 64];
    memcpy(frame, &h, RA_TCP_HEAD);
#ifdef RA_TCP_SODIUM
    if (t->sealed)
        (void)crypto_secretstream_xchacha20poly1305_push(
            &c->push, frame, NULL, (const unsigned char *)&h, RA_TCP_HEAD, NULL, 0, 0);
#endif
    ra_tcp_append(c, frame, ra_tcp_on_wire(t, RA_TCP_HEAD));
}

/* Derives the keys of both directions from the shared key, the key pairs of this connection, and
 * both hellos. Appends the start of the output. 0: a public key is invalid. */
static int ra_tcp_agree(ra_tcp *t, ra_tcp_conn *c) {
#ifdef RA_TCP_SODIUM
    uint8_t said[32 + 2 * RA_TCP_HELLO], rx[32], tx[32], key[32], start[RA_TCP_START];
    const ra_tcp_hello *first = c->dialed ? &c->hello : &c->peer_hello;
    const ra_tcp_hello *second = c->dialed ? &c->peer_hello : &c->hello;
    int bad = c->dialed ? crypto_kx_client_session_keys(rx, tx, c->hello.public_key, c->secret_key,
                                                        c->peer_hello.public_key)
                        : crypto_kx_server_session_keys(rx, tx, c->hello.public_key, c->secret_key,
                                                        c->peer_hello.public_key);
    if (bad) return 0;
    memcpy(said + 32, first, RA_TCP_HELLO);
    memcpy(said + 32 + RA_TCP_HELLO, second, RA_TCP_HELLO);
    memcpy(said, rx, 32);
    (void)crypto_generichash(c->pull.k, 32, said, sizeof said, t->key, 32);
    memcpy(key, c->pull.k, 32);
    memcpy(c->secret_key, key, 32);    /* of the input, until its start has come */
    memcpy(said, tx, 32);
    (void)crypto_generichash(key, 32, said, sizeof said, t->key, 32);
    (void)crypto_secretstream_xchacha20poly1305_init_push(&c->push, start, key);
    ra_tcp_append(c, start, sizeof start);
    sodium_memzero(said, sizeof said);
    sodium_memzero(key, sizeof key);
    sodium_memzero(rx, sizeof rx);
    sodium_memzero(tx, sizeof tx);
    return 1;
#else
    (void)t, (void)c;
    return 0;
#endif
}

/* Stages this rank's hello. */
static void ra_tcp_say_hello(ra_tcp *t, ra_tcp_conn *c, int to) {
    c->hello = ra_tcp_hello_of(t, to);
#ifdef RA_TCP_SODIUM
    if (t->sealed) (void)crypto_kx_keypair(c->hello.public_key, c->secret_key);
#endif
    c->out_at = c->out_len = c->out_body = 0;
    ra_tcp_append(c, &c->hello, sizeof c->hello);
}

/* Checks a hello. RA_AGAIN: this peer is refused, but the right one may still come; negative: the
 * ring cannot form, which a peer cannot decide before it has shown that it has the key. The reason
 * goes to t->note. */
static int ra_tcp_judge(ra_tcp *t, const ra_tcp_conn *c) {
    const ra_tcp_hello *h = &c->peer_hello;
    int again = t->sealed && c->stage != RA_TCP_AT_READY ? (int)RA_AGAIN : (int)RA_E_MISMATCH;
    if (h->order != 0x01020304) {
        ra_tcp_note(t, "a rank has another byte order, which this transport does not convert");
        return again;
    }
    if (h->version != RA_TCP_VERSION) {
        ra_tcp_note(t, "a rank has version %u of this transport, here it is %d",
                    (unsigned)h->version, RA_TCP_VERSION);
        return again;
    }
    if (h->world != t->d.world) {
        ra_tcp_note(t, "rank %d is in world %llu, this rank in %llu", (int)h->from,
                    (unsigned long long)h->world, (unsigned long long)t->d.world);
        return c->dialed ? again : RA_AGAIN;
    }
    if (h->ring != t->d.ring) {
        ra_tcp_note(t, "rank %d is in ring %u, this rank in %u", (int)h->from, (unsigned)h->ring,
                    (unsigned)t->d.ring);
        return RA_AGAIN;
    }
    if (h->ranks != t->ranks) {
        ra_tcp_note(t, "rank %d counts %d ranks, this rank %d", (int)h->from, (int)h->ranks,
                    (int)t->ranks);
        return again;
    }
    if (h->shape != t->d.shape) {
        ra_tcp_note(t, "rank %d has shape %llx, this rank %llx: they differ in what must be equal",
                    (int)h->from, (unsigned long long)h->shape, (unsigned long long)t->d.shape);
        return again;
    }
    if (h->to != t->rank || h->from >= t->ranks ||
        (c->dialed ? h->from != c->peer : h->from <= t->rank)) {
        ra_tcp_note(t, "rank %d takes this one for rank %d, which is %d", (int)h->from, (int)h->to,
                    (int)t->rank);
        return RA_AGAIN;
    }
    if (h->sealed != (uint32_t)t->sealed) {
        ra_tcp_note(t, "rank %d has %s key, this rank has %s", (int)h->from, h->sealed ? "a" : "no",
                    t->sealed ? "one" : "none");
        return again;
    }
    return RA_OK;
}

/* Takes the peer's hello. Returns as ra_tcp_judge. With a key on both sides, what differs is judged
 * once the peer has shown its key. */
static int ra_tcp_heard_hello(ra_tcp *t, ra_tcp_conn *c) {
    const ra_tcp_hello *h = &c->peer_hello;
    int code;
    memcpy(&c->peer_hello, c->in_buf, sizeof c->peer_hello);
    if (memcmp(h->magic, "ra_tcp\r\n", 8)) {
        ra_tcp_note(t, "something else than a rank %s", c->dialed ? "listens there" : "called");
        return RA_AGAIN;
    }
    if (!c->dialed) ra_tcp_say_hello(t, c, h->from);
    code = ra_tcp_judge(t, c);
    if (code != RA_OK && !(t->sealed && h->sealed == 1 && h->order == 0x01020304 &&
                           h->version == RA_TCP_VERSION)) {
        (void)ra_tcp_write(c);         /* so that the other side can name the reason */
        return code;
    }
    if (t->sealed && !ra_tcp_agree(t, c)) return RA_AGAIN;
    if (!c->dialed) ra_tcp_put(t, c, RA_TCP_READY, 0);
    c->stage = RA_TCP_AT_READY;
    c->in_at = 0;
    c->in_need = (t->sealed ? (size_t)RA_TCP_START : (size_t)0) + ra_tcp_on_wire(t, RA_TCP_HEAD);
    return RA_OK;
}

/* The first frame comes behind the start of its stream. 0: it does not open. */
static int ra_tcp_open_ready(ra_tcp *t, ra_tcp_conn *c) {
#ifdef RA_TCP_SODIUM
    if (t->sealed) {
        c->in_need -= RA_TCP_START;
        if (crypto_secretstream_xchacha20poly1305_init_pull(&c->pull, c->in_buf, c->secret_key))
            return 0;
        sodium_memzero(c->secret_key, sizeof c->secret_key);
        memmove(c->in_buf, c->in_buf + RA_TCP_START, c->in_need);
    }
#endif
    return ra_tcp_open_head(t, c);
}

/* 1: the peer of an open connection has gone, and has neither sent anything nor said farewell. */
static int ra_tcp_gone(const ra_tcp_conn *c) {
    char byte;
    ssize_t n = recv(c->fd, &byte, 1, MSG_DONTWAIT | MSG_PEEK);
    return n == 0 || (n < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR);
}

/* Takes READY or SEATED. Returns as ra_tcp_judge. */
static int ra_tcp_heard_frame(ra_tcp *t, ra_tcp_conn *c) {
    const int from = c->peer_hello.from, last = c->stage == RA_TCP_AT_SEATED;
    ra_tcp_head h;
    int code, taken;
    if (!(last ? ra_tcp_open_head(t, c) : ra_tcp_open_ready(t, c))) {
        ra_tcp_note(t, "rank %d does not have this rank's key", from);
        return RA_AGAIN;
    }
    h = ra_tcp_head_of(last ? RA_TCP_SEATED : RA_TCP_READY, 0, last ? c->head.tag & 1 : 0);
    if (memcmp(&c->head, &h, sizeof h)) {
        ra_tcp_note(t, "rank %d sent what is no frame in the handshake", from);
        return RA_AGAIN;
    }
    c->in_at = 0;
    if (last) {
        if (h.tag) ra_tcp_note(t, "rank %d is connected to another process that is rank %d", from,
                               (int)t->rank);
        else c->stage = RA_TCP_AT_OPEN;
        return h.tag ? RA_AGAIN : RA_OK;
    }
    code = ra_tcp_judge(t, c);
    if (c->dialed) {
        ra_tcp_put(t, c, RA_TCP_READY, 0);
        c->stage = RA_TCP_AT_SEATED;
    }
    if (code || c->dialed) {
        (void)ra_tcp_write(c);
        return code;
    }
    taken = t->conn[from].stage == RA_TCP_AT_OPEN && !ra_tcp_gone(&t->conn[from]);
    ra_tcp_put(t, c, RA_TCP_SEATED, (uint64_t)taken);
    (void)ra_tcp_write(c);
    if (taken) ra_tcp_note(t, "two processes say that they are rank %d", from);
    else c->stage = RA_TCP_AT_OPEN;
    return taken ? RA_AGAIN : RA_OK;
}

/* Continues a handshake. RA_OK; RA_AGAIN: this connection is useless; negative: the ring cannot
 * form. */
static int ra_tcp_shake(ra_tcp *t, ra_tcp_conn *c) {
    for (;;) {
        int code = ra_tcp_write(c) < 0 ? (int)RA_E_IO : c->stage == RA_TCP_AT_OPEN ? 0
                   : ra_tcp_read(t, c);
        if (code == 0) return RA_OK;
        if (code < 0) {
            ra_tcp_tried(c, "it closed the connection in the handshake",
                         code == RA_E_IO ? errno : 0);
            if (c->stage > RA_TCP_AT_HELLO)
                ra_tcp_note(t, "rank %d closed the connection in the handshake%s",
                            (int)c->peer_hello.from, t->sealed ? ": is its key another one?" : "");
            return RA_AGAIN;
        }
        code = c->stage == RA_TCP_AT_HELLO ? ra_tcp_heard_hello(t, c) : ra_tcp_heard_frame(t, c);
        if (code != RA_OK) return code;
    }
}

/* -------------------------------------------------------------------------- connecting */
/* A free place for a caller, unless `taken`; otherwise that of the oldest who has not said a whole
 * hello, or a random one, which no flood of hellos can foresee. Null: there is none. */
static ra_tcp_conn *ra_tcp_place(ra_tcp *t, int taken) {
    const int64_t first = ra_now_ns();
    ra_tcp_conn *best = NULL;
    for (int i = 0; i < t->places; i++) {
        ra_tcp_conn *c = &t->stranger[(first + i) % t->places];
        int dumb = c->stage == RA_TCP_AT_HELLO, best_dumb = best && best->stage == RA_TCP_AT_HELLO;
        if (c->fd < 0 && !taken) return c;
        if (c->fd >= 0 && (!best || dumb > best_dumb ||
                           (dumb && best_dumb && c->since_ns < best->since_ns))) best = c;
    }
    return best;
}

/* There is no descriptor: drops a caller. 0: there is none. */
static int ra_tcp_make_room(ra_tcp *t, int error) {
    ra_tcp_conn *c = ra_tcp_place(t, 1);
    struct rlimit most;
    if (getrlimit(RLIMIT_NOFILE, &most)) most.rlim_cur = 0;
    ra_tcp_note(t, "no descriptor for a connection: %s; the limit is %lld (ulimit -n)",
                strerror(error), (long long)most.rlim_cur);
    if (c) ra_tcp_reset(c);
    return c != NULL;
}

static void ra_tcp_dial(ra_tcp *t, ra_tcp_conn *c, const struct addrinfo *list) {
    int count = 0, pick, fd;
    const struct addrinfo *a;
    for (a = list; a; a = a->ai_next) count++;
    pick = (int)(ra_now_ns() / (60 * RA_TCP_MS) % count);  /* tries all addresses over time */
    for (a = list; pick; a = a->ai_next) pick--;
    ra_tcp_reset(c);
    c->since_ns = ra_now_ns();
    c->dialed = 1;
    c->last.at = a;
    fd = socket(a->ai_family, SOCK_STREAM, 0);
    if (fd < 0 && ra_tcp_is_full(errno) && ra_tcp_make_room(t, errno))
        fd = socket(a->ai_family, SOCK_STREAM, 0);
    if (fd < 0 || ra_tcp_prepare(fd, t->ranks) ||
        (connect(fd, a->ai_addr, a->ai_addrlen) && errno != EINPROGRESS)) {
        ra_tcp_tried(c, "it cannot be called", errno);
        if (fd >= 0) close(fd);
        return;
    }
    c->fd = fd;
    c->stage = RA_TCP_AT_DIAL;
}

/* The connection is made: stages the hello. */
static int ra_tcp_dialed(ra_tcp *t, ra_tcp_conn *c) {
    int error = 0;
    socklen_t n = sizeof error;
    if (getsockopt(c->fd, SOL_SOCKET, SO_ERROR, &error, &n) || error) {
        ra_tcp_tried(c, "it cannot be reached", error);
        return RA_AGAIN;
    }
    c->stage = RA_TCP_AT_HELLO;
    ra_tcp_say_hello(t, c, c->peer);
    return RA_OK;
}

/* Moves a connection to its rank, once that is known, and drops an earlier one of this rank. It
 * gets the rank's buffers, which have room for messages. */
static void ra_tcp_seat(ra_tcp *t, ra_tcp_conn *c) {
    ra_tcp_conn *seat = &t->conn[c->peer_hello.from], old;
    ra_tcp_reset(seat);
    memcpy(seat->out_buf, c->out_buf, c->out_len);
    old = *seat;
    *seat = *c;
    seat->peer = c->peer_hello.from;
    seat->out_buf = old.out_buf;
    seat->in_buf = old.in_buf;
    c->fd = -1;
    ra_tcp_reset(c);
}

/* A step of a connection that is not open yet, with what has come until `now`. Negative: the ring
 * cannot form. */
static int ra_tcp_attend(ra_tcp *t, ra_tcp_conn *c, int events, int64_t now) {
    int code = RA_OK;
    if (events && c->stage == RA_TCP_AT_DIAL) code = ra_tcp_dialed(t, c);
    if (code == RA_OK && events && c->stage != RA_TCP_AT_DIAL) code = ra_tcp_shake(t, c);
    if (code == RA_OK && c->stage < RA_TCP_AT_SEATED &&
        now > c->since_ns + RA_TCP_SHAKE_NS(t->ranks)) {
        ra_tcp_tried(c, ra_tcp_silence(c), 0);
        code = RA_AGAIN;
    }
    if (code < 0) return code;
    if (code == RA_AGAIN) ra_tcp_reset(c);
    else if (c->stage == RA_TCP_AT_OPEN && c->peer < 0) ra_tcp_seat(t, c);
    return RA_OK;
}

/* Accepts connections. Most have said hello when their turn comes. */
static int ra_tcp_callers(ra_tcp *t) {
    int code = RA_OK;
    for (int n = 0; n < RA_TCP_STRANGERS && code >= 0; n++) {
        ra_tcp_conn *c;
        int fd = accept(t->listener, NULL, NULL);
        if (fd < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
        if (fd < 0 && ra_tcp_is_full(errno) && !ra_tcp_make_room(t, errno)) {
            t->deaf_ns = ra_now_ns() + 100 * RA_TCP_MS;
            break;
        }
        if (fd < 0) continue;
        c = ra_tcp_place(t, 0);
        ra_tcp_reset(c);
        if (ra_tcp_prepare(fd, t->ranks)) {
            close(fd);
            continue;
        }
        c->fd = fd;
        c->stage = RA_TCP_AT_HELLO;
        c->since_ns = ra_now_ns();
        code = ra_tcp_attend(t, c, 1, c->since_ns);
    }
    return code;
}

/* The first rank that is not connected, and *others: how many more; -1: there is none. */
static int ra_tcp_missing(const ra_tcp *t, int *others) {
    int first = -1;
    *others = 0;
    for (int r = 0; r < t->ranks; r++) {
        if (r == t->rank || (t->conn[r].stage == RA_TCP_AT_OPEN && !t->conn[r].out_len)) continue;
        if (first < 0) first = r;
        else ++*others;
    }
    return first;
}

/* Says who is missing, at which address, and what the last try came to. */
static ra_status ra_tcp_late(ra_tcp *t, int r, int others) {
    ra_tcp_conn *c = &t->conn[r];
    char at[128], what[200] = "", more[40] = "";
    struct sockaddr_storage own;
    socklen_t n = sizeof own;
    const struct addrinfo *a = c->last.at;
    if (c->fd >= 0) ra_tcp_tried(c, ra_tcp_silence(c), 0);
    if (a) ra_tcp_numeric(a->ai_addr, a->ai_addrlen, at);
    else if (getsockname(t->listener, (struct sockaddr *)&own, &n)) snprintf(at, sizeof at, "?");
    else ra_tcp_numeric((const struct sockaddr *)&own, n, at);
    if (c->last.what)
        snprintf(what, sizeof what, ": %s%s%s, %lld ms ago", c->last.what,
                 c->last.error ? ": " : "", c->last.error ? strerror(c->last.error) : "",
                 (long long)((ra_now_ns() - (c->fd >= 0 ? c->since_ns : c->last.when_ns)) /
                             RA_TCP_MS));
    if (others) snprintf(more, sizeof more, ", nor %d others", others);
    return ra_tcp_refuse(&t->d, RA_E_TIMEOUT, "connect_ns",
                         "%lld ms have passed without rank %d%s%s (%s)%s%s%s%s",
                         (long long)(t->d.connect_ns / RA_TCP_MS), r,
                         a ? " at " : ", which has not called this one at ",
                         t->d.addresses[a ? r : t->rank], at, what, more, t->note[0] ? "; " : "",
                         t->note);
}

/* A peer that closes while the ring connects, and that had not connected itself with all others,
 * may be one that starts again: it is missing. Looks for such peers every 100 ms, and last. */
static void ra_tcp_look_around(ra_tcp *t, int last) {
    const int64_t now = ra_now_ns();
    if (!last && now - t->swept_ns < 100 * RA_TCP_MS) return;
    t->swept_ns = now;
    for (int r = 0; r < t->ranks; r++) {
        ra_tcp_conn *c = &t->conn[r];
        if (c->stage != RA_TCP_AT_OPEN || !ra_tcp_gone(c)) continue;
        ra_tcp_reset(c);
        ra_tcp_tried(c, "it closed its connection before all ranks were there", 0);
    }
}

/* Adds a connection to those of the next poll. */
static int ra_tcp_await(ra_tcp *t, int n, ra_tcp_conn *c, int events) {
    t->who[n] = c;
    t->fds[n].fd = c ? c->fd : t->listener;
    t->fds[n].events = (short)events;
    t->fds[n].revents = 0;
    return n + 1;
}

/* A round of connecting. list: addresses of the ranks below. */
static int ra_tcp_round(ra_tcp *t, struct addrinfo *const *list) {
    const int64_t now = ra_now_ns(), pause = (50 + t->ranks) * RA_TCP_MS;
    int n = 0, code = RA_OK;
    ra_tcp_look_around(t, 0);
    for (int r = 0; r < t->rank; r++) {
        ra_tcp_conn *c = &t->conn[r];
        if (c->fd < 0 && now - c->since_ns > pause) ra_tcp_dial(t, c, list[r]);
    }
    for (int i = 0; i < t->ranks + t->places; i++) {
        ra_tcp_conn *c = i < t->ranks ? &t->conn[i] : &t->stranger[i - t->ranks];
        int writes = c->stage == RA_TCP_AT_DIAL || c->out_at < c->out_len;
        int reads = c->stage != RA_TCP_AT_DIAL && c->stage != RA_TCP_AT_OPEN;
        if (c->fd >= 0 && (reads || writes))
            n = ra_tcp_await(t, n, c, (reads ? POLLIN : 0) | (writes ? POLLOUT : 0));
    }
    if (t->listener >= 0 && now >= t->deaf_ns) n = ra_tcp_await(t, n, NULL, POLLIN);
    if (poll(t->fds, (nfds_t)n, 20 + t->ranks / 4) < 0 && errno != EINTR) {
        ra_tcp_note(t, "poll: %s", strerror(errno));
        return RA_E_IO;
    }
    for (int i = 0; i < n && code >= 0; i++) {
        if (!t->who[i]) code = t->fds[i].revents ? ra_tcp_callers(t) : (int)RA_OK;
        else if (t->fds[i].fd == t->who[i]->fd)
            code = ra_tcp_attend(t, t->who[i], t->fds[i].revents, now);
    }
    return code;
}

static ra_status ra_tcp_connect(ra_tcp *t) {
    struct addrinfo **list = (struct addrinfo **)calloc((size_t)t->ranks, sizeof *list);
    int64_t begin = ra_now_ns();
    int code = list ? RA_OK : RA_E_NOMEM, missing, others, why;
    if (!list) (void)ra_tcp_refuse(&t->d, RA_E_NOMEM, "ranks", "no memory");
    for (int r = 0; r < t->rank && code == RA_OK; r++) {
        list[r] = ra_tcp_resolve(t->d.addresses[r], 0, &why);
        if (!list[r])
            code = ra_tcp_refuse(&t->d, RA_E_RANGE, "addresses", "of rank %d, %s: %s", r,
                                 t->d.addresses[r], gai_strerror(why));
    }
    while (code >= 0) {
        if (ra_tcp_missing(t, &others) < 0) ra_tcp_look_around(t, 1);
        if ((missing = ra_tcp_missing(t, &others)) < 0) break;
        code = ra_tcp_round(t, list);
        if (code < 0) (void)ra_tcp_refuse(&t->d, code, "handshake", "%s", t->note);
        else if (ra_now_ns() - begin > t->d.connect_ns) code = ra_tcp_late(t, missing, others);
    }
    for (int r = 0; list && r < t->rank; r++) if (list[r]) freeaddrinfo(list[r]);
    free(list);
    return code < 0 ? code : RA_OK;
}

/* -------------------------------------------------------------------------- one call at a time
 * A call holds `busy` except while it sleeps. abort does not wait for it: if it is held, the holder
 * tells the peers, because it checks `why` once more after it has released `busy`. */

/* Sends this rank's abort, or without one a farewell, to all peers, once. */
static void ra_tcp_tell(ra_tcp *t, int farewell) {
    int why = __atomic_load_n(&t->why, __ATOMIC_SEQ_CST);
    if ((!why && !farewell) || t->told) return;
    __atomic_store_n(&t->told, 1, __ATOMIC_SEQ_CST);
    for (int r = 0; r < t->ranks; r++) {
        ra_tcp_conn *c = &t->conn[r];
        ra_tcp_head h = ra_tcp_head_of(why ? RA_TCP_ABORT : RA_TCP_GRANT, 0,
                                       (uint64_t)-(int64_t)why & 255);
        if (c->fd < 0) continue;
        if (!c->hush && ra_tcp_write(c) == 1) {
            ra_tcp_stage(t, c, &h, NULL);
            (void)ra_tcp_write(c);
        }
        c->hush = 1;
        c->out_op = NULL;
        (void)shutdown(c->fd, SHUT_WR);
    }
}

static void ra_tcp_enter(ra_tcp *t) {
    while (__atomic_exchange_n(&t->busy, 1, __ATOMIC_SEQ_CST)) sched_yield();
}

static void ra_tcp_leave(ra_tcp *t) {
    do {
        ra_tcp_tell(t, 0);
        __atomic_store_n(&t->busy, 0, __ATOMIC_SEQ_CST);
    } while (__atomic_load_n(&t->why, __ATOMIC_SEQ_CST) &&
             !__atomic_load_n(&t->told, __ATOMIC_SEQ_CST) &&
             !__atomic_exchange_n(&t->busy, 1, __ATOMIC_SEQ_CST));
}

static int ra_tcp_failure(const ra_tcp *t) {
    int why = __atomic_load_n(&t->why, __ATOMIC_SEQ_CST);
    return why ? why : t->heard;
}

/* -------------------------------------------------------------------------- callbacks */
static void ra_tcp_enlist(ra_tcp *t, ra_tcp_conn *c) {
    if (!c->listed) t->list[t->active++] = c->peer;
    c->listed = 1;
}

/* Lists what poll(2) looks at: open sockets, those of the list or all. Returns how many. */
static int ra_tcp_watch(ra_tcp *t, int all) {
    int n = 0;
    for (int i = 0; i < (all ? t->ranks : t->active); i++) {
        ra_tcp_conn *c = &t->conn[all ? i : t->list[i]];
        int writes = !c->hush && c->out_at < c->out_len + c->out_body;
        if (c->fd >= 0) n = ra_tcp_await(t, n, c, writes ? POLLIN | POLLOUT : POLLIN);
    }
    return n;
}

/* Moves bytes of the connections that have ops or an unfinished frame. The others may bring an
 * abort or break: one call looks at all of them from time to time. */
static void ra_tcp_move(ra_tcp *t) {
    const int64_t now = ra_now_ns();
    if (now - t->swept_ns >= RA_TCP_SWEEP_NS) {
        int n = ra_tcp_watch(t, 1);
        t->swept_ns = now;
        if (poll(t->fds, (nfds_t)n, 0) > 0)
            for (int i = 0; i < n; i++) if (t->fds[i].revents) ra_tcp_enlist(t, t->who[i]);
    }
    for (int i = 0; i < t->active && !ra_tcp_failure(t);) {
        ra_tcp_conn *c = &t->conn[t->list[i]];
        if (c->fd >= 0) ra_tcp_drink(t, c);
        if (c->fd >= 0) ra_tcp_flush(t, c);
        if (c->fd >= 0 && (ra_tcp_has_ops(c) || c->in_at || c->in_body || c->out_len)) i++;
        else {
            c->listed = 0;
            t->list[i] = t->list[--t->active];
        }
    }
}

/* Writes the states of ops that have ended. Returns how many are PENDING. */
static int ra_tcp_settle(ra_tcp *t, ra_transport_op *const *ops, int n) {
    int failure = ra_tcp_failure(t), left = 0;
    for (int i = 0; i < n; i++) {
        ra_transport_op *op = ops[i];
        int end = (int)(intptr_t)op->scratch[RA_TCP_END];
        if (op->state != RA_MSG_PENDING) continue;
        if (!end) end = failure ? failure : t->conn[op->peer].dead;
        if (!end) left++;
        else op->state = end;
    }
    return left;
}

static void ra_tcp_queue_op(ra_tcp *t, ra_transport_op *op) {
    ra_tcp_conn *c;
    ra_tcp_queue *q;
    int good = op->peer >= 0 && op->peer < t->ranks && op->peer != t->rank && op->len > 0 &&
               op->channel < RA_TCP_CHANNELS;
    c = good ? &t->conn[op->peer] : NULL;
    op->state = !good ? RA_E_IO : c->dead ? c->dead : (int)RA_MSG_PENDING;
    if (op->state != RA_MSG_PENDING) return;
    q = op->kind == RA_MSG_SEND ? &c->send[op->channel] : &c->recv[op->channel];
    op->scratch[RA_TCP_NEXT] = NULL;
    if (q->last) q->last->scratch[RA_TCP_NEXT] = op;
    else q->first = op;
    q->last = op;
    ra_tcp_enlist(t, c);
    if (op->kind == RA_MSG_RECV) c->to_grant[op->channel]++;
}

/* Accepts all ops; their bytes begin to move here. */
static int ra_tcp_post(void *ctx, ra_transport_op *const *ops, int n) {
    ra_tcp *t = (ra_tcp *)ctx;
    int failure;
    ra_tcp_enter(t);
    failure = ra_tcp_failure(t);
    for (int kind = RA_MSG_RECV; kind >= RA_MSG_SEND; kind--)
        for (int i = 0; i < n; i++) {
            if (ops[i]->kind != kind || ops[i]->state != RA_MSG_IDLE) continue;
            if (failure) ops[i]->state = failure;
            else ra_tcp_queue_op(t, ops[i]);
        }
    for (int i = 0; i < t->active && !failure; i++) ra_tcp_flush(t, &t->conn[t->list[i]]);
    ra_tcp_leave(t);
    return failure;
}

static int ra_tcp_poll(void *ctx, ra_transport_op *const *ops, int n) {
    ra_tcp *t = (ra_tcp *)ctx;
    int failure;
    ra_tcp_enter(t);
    ra_tcp_move(t);
    (void)ra_tcp_settle(t, ops, n);
    failure = ra_tcp_failure(t);
    ra_tcp_leave(t);
    return failure;
}

/* Sleeps until one of n sockets of ra_tcp_watch is ready, an abort or the deadline, and at most
 * until all connections are looked at again. */
static void ra_tcp_sleep(ra_tcp *t, int n, int64_t deadline_ns) {
    int64_t left = t->swept_ns + RA_TCP_SWEEP_NS - ra_now_ns();
    char drain[64];
    if (deadline_ns && deadline_ns - ra_now_ns() < left) left = deadline_ns - ra_now_ns();
    if (left <= 0) return;
    t->fds[n].fd = t->wake[0];
    t->fds[n].events = POLLIN;
    t->fds[n].revents = 0;
    left = (left + RA_TCP_MS - 1) / RA_TCP_MS;
    if (poll(t->fds, (nfds_t)n + 1, (int)left) > 0 && t->fds[n].revents)
        while (read(t->wake[0], drain, sizeof drain) == (ssize_t)sizeof drain) {}
}

static int ra_tcp_wait(void *ctx, ra_transport_op *const *ops, int n, int64_t deadline_ns) {
    ra_tcp *t = (ra_tcp *)ctx;
    int before = 0, left, failure, sockets;
    for (int i = 0; i < n; i++) before += ops[i]->state == RA_MSG_PENDING;
    for (;;) {
        ra_tcp_enter(t);
        ra_tcp_move(t);
        left = ra_tcp_settle(t, ops, n);
        failure = ra_tcp_failure(t);
        sockets = ra_tcp_watch(t, 0);
        ra_tcp_leave(t);
        if (failure || left == 0 || left < before) return failure;
        if (deadline_ns && ra_now_ns() >= deadline_ns) return RA_OK;
        ra_tcp_sleep(t, sockets, deadline_ns);
    }
}

static int ra_tcp_abort(void *ctx, int why) {
    ra_tcp *t = (ra_tcp *)ctx;
    int32_t none = 0;
    ssize_t n;
    (void)__atomic_compare_exchange_n(&t->why, &none, why < 0 ? why : RA_E_ABORTED, 0,
                                      __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    n = write(t->wake[1], "", 1);      /* if the pipe is full, a byte is there already */
    (void)n;
    if (!__atomic_exchange_n(&t->busy, 1, __ATOMIC_SEQ_CST)) ra_tcp_leave(t);
    return RA_OK;
}

/* Reads and discards what the peers still send, until they have closed too or until the deadline,
 * after which it reads once from each. If unread bytes are left when a socket closes, the system
 * drops what it has not sent yet. */
static void ra_tcp_drain(ra_tcp *t, int64_t deadline_ns) {
    int open = 1;
    while (open) {
        open = 0;
        for (int r = 0; r < t->ranks; r++) {
            ra_tcp_conn *c = &t->conn[r];
            ssize_t n;
            int reads = 0;
            if (c->fd < 0) continue;
            do n = recv(c->fd, t->waste, RA_TCP_PLAIN, MSG_DONTWAIT);
            while (n > 0 && ++reads < 32 && ra_now_ns() < deadline_ns);
            if (n == 0 || (n < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR))
                ra_tcp_drop(c, RA_E_PEER);
            else open = 1;
        }
        if (open && ra_now_ns() >= deadline_ns) return;
        t->swept_ns = ra_now_ns();
        if (open) ra_tcp_sleep(t, ra_tcp_watch(t, 1), deadline_ns);
    }
}

/* Only calls of this rank use its buffers, and after this they do not. Waits for the peers to close
 * too, at most 50 ms. */
static int ra_tcp_quiesce(void *ctx, int64_t deadline_ns) {
    ra_tcp *t = (ra_tcp *)ctx;
    int64_t until = ra_now_ns() + RA_TCP_DRAIN_NS;
    (void)ra_tcp_abort(t, RA_E_ABORTED);
    ra_tcp_enter(t);
    ra_tcp_drain(t, deadline_ns && deadline_ns < until ? deadline_ns : until);
    ra_tcp_leave(t);
    return RA_OK;
}

static const char *ra_tcp_error_text(void *ctx, int code) {
    const ra_tcp *t = (const ra_tcp *)ctx;
    if (code == RA_E_TRUNC) return "send and receive differ in length";
    if (code == RA_E_IO) return "an op has no bytes, an unknown channel, or no peer of the ring";
    return t->text[0] && (code == RA_E_PEER || code == RA_E_ABORTED || code == RA_E_PROTO)
               ? t->text : NULL;
}

/* -------------------------------------------------------------------------- life */
static void ra_tcp_free(ra_tcp *t) {
    if (!t) return;
    for (int r = 0; t->conn && r < t->ranks; r++) {
        ra_tcp_drop(&t->conn[r], RA_E_PEER);
        free(t->conn[r].out_buf);
        free(t->conn[r].in_buf);
    }
    for (int i = 0; t->stranger && i < t->places; i++) {
        ra_tcp_drop(&t->stranger[i], RA_E_PEER);
        free(t->stranger[i].out_buf);
        free(t->stranger[i].in_buf);
    }
    if (t->listener >= 0) close(t->listener);
    for (int i = 0; i < 2; i++) if (t->wake[i] >= 0) close(t->wake[i]);
#ifdef RA_TCP_SODIUM
    sodium_memzero(t->key, sizeof t->key);
    if (t->waste) sodium_memzero(t->waste, RA_TCP_PLAIN);
#endif
    free(t->conn);
    free(t->stranger);
    free(t->list);
    free(t->who);
    free(t->fds);
    free(t->waste);
    free(t);
}

static ra_status ra_tcp_check(const ra_tcp_desc *d) {
    if (d->ranks < 1 || d->ranks > 1024)
        return ra_tcp_refuse(d, RA_E_RANGE, "ranks", "must be 1 to 1024, is %d", (int)d->ranks);
    if (d->rank < 0 || d->rank >= d->ranks)
        return ra_tcp_refuse(d, RA_E_RANGE, "rank", "must be 0 to %d, is %d", (int)d->ranks - 1,
                             (int)d->rank);
    for (int r = 0; r < d->ranks && d->ranks > 1; r++) {
        if (!d->addresses || !d->addresses[r])
            return ra_tcp_refuse(d, RA_E_NULL, "addresses", "of rank %d is not given", r);
        if (ra_tcp_port(d->addresses[r]) < 1)
            return ra_tcp_refuse(d, RA_E_RANGE, "addresses", "of rank %d is no \"host:port\" with "
                                 "a port of 1 to 65535: %s", r, d->addresses[r]);
    }
    if (d->connect_ns < 0)
        return ra_tcp_refuse(d, RA_E_RANGE, "connect_ns", "%lld is negative",
                             (long long)d->connect_ns);
#ifndef RA_TCP_SODIUM
    if (d->key)
        return ra_tcp_refuse(d, RA_E_UNSUPPORTED, "key",
                             "is given, but this program was compiled without RA_TCP_SODIUM");
#endif
    return RA_OK;
}

static int ra_tcp_conns(ra_tcp_conn *c, int n, const ra_tcp *t, size_t bytes) {
    for (int i = 0; i < n; i++) {
        c[i].peer = t->conn == c ? i : -1;
        c[i].out_buf = (uint8_t *)malloc(bytes);
        c[i].in_buf = (uint8_t *)malloc(bytes);
        c[i].in_need = RA_TCP_HELLO;
        if (!c[i].out_buf || !c[i].in_buf) return 0;
    }
    return 1;
}

static void ra_tcp_fill(ra_tcp *t) {
    ra_transport *tp = &t->transport;
    tp->size = (uint32_t)sizeof *tp;
    tp->abi = RA_TRANSPORT_ABI;
    tp->caps = RA_CAP_ANY_THREAD | RA_CAP_ANY_PEER | RA_CAP_DEADLINE;
    tp->channels = RA_TCP_CHANNELS;
    tp->tag_bits = 64;
    tp->max_ops = RA_TCP_OPS;
    tp->rank = t->rank;
    tp->ranks = t->ranks;
    tp->max_msg = t->d.max_msg;
    tp->name = t->sealed ? "tcp, sealed" : "tcp";
    tp->ctx = t;
    tp->turn = &t->turn;
    tp->post = ra_tcp_post;
    tp->poll = ra_tcp_poll;
    tp->wait = ra_tcp_wait;
    tp->abort = ra_tcp_abort;
    tp->quiesce = ra_tcp_quiesce;
    tp->error_text = ra_tcp_error_text;
}

/* Allocates, and opens the pipe and the listening socket. */
static ra_status ra_tcp_begin(ra_tcp *t) {
    size_t bytes = RA_TCP_TALK + (t->sealed ? (size_t)RA_TCP_SEALED + RA_TCP_HEAD : (size_t)0);
    struct rlimit most;
    int port = 0, listens = 0;
    socklen_t n = sizeof listens;
    t->places = t->ranks + RA_TCP_STRANGERS;
    if (!getrlimit(RLIMIT_NOFILE, &most) && most.rlim_cur < (rlim_t)t->ranks + 9)
        return ra_tcp_refuse(&t->d, RA_E_IO, "ranks", "%d ranks need at least %d descriptors, the "
                             "limit is %lld (ulimit -n)", (int)t->ranks, (int)t->ranks + 9,
                             (long long)most.rlim_cur);
    t->conn = (ra_tcp_conn *)calloc((size_t)t->ranks, sizeof *t->conn);
    t->stranger = (ra_tcp_conn *)calloc((size_t)t->places, sizeof *t->stranger);
    t->list = (int32_t *)calloc((size_t)t->ranks, sizeof *t->list);
    t->who = (ra_tcp_conn **)calloc((size_t)(t->ranks + t->places) + 2, sizeof *t->who);
    t->fds = (struct pollfd *)calloc((size_t)(t->ranks + t->places) + 2, sizeof *t->fds);
    t->waste = (uint8_t *)malloc(RA_TCP_PLAIN);
    for (int r = 0; t->conn && r < t->ranks; r++) t->conn[r].fd = -1;
    for (int i = 0; t->stranger && i < t->places; i++) t->stranger[i].fd = -1;
    if (!t->conn || !t->stranger || !t->list || !t->who || !t->fds || !t->waste ||
        !ra_tcp_conns(t->conn, t->ranks, t, bytes) ||
        !ra_tcp_conns(t->stranger, t->places, t, RA_TCP_TALK))
        return ra_tcp_refuse(&t->d, RA_E_NOMEM, "ranks", "no memory for %d connections", t->ranks);
    if (pipe(t->wake) || ra_tcp_prepare(t->wake[0], 0) || ra_tcp_prepare(t->wake[1], 0))
        return ra_tcp_refuse(&t->d, RA_E_IO, "wake", "no pipe: %s", strerror(errno));
    if (t->listener >= 0 &&
        (getsockopt(t->listener, SOL_SOCKET, SO_ACCEPTCONN, &listens, &n) || !listens ||
         ra_tcp_prepare(t->listener, 0)))
        return ra_tcp_refuse(&t->d, RA_E_RANGE, "listen_fd", "%d is no socket that listens",
                             (int)t->d.listen_fd);
    if (t->listener < 0 && t->ranks > 1 && t->rank < t->ranks - 1)
        t->listener = ra_tcp_listen(t->d.addresses[t->rank], &port);
    if (t->listener < 0 && t->rank < t->ranks - 1)
        return ra_tcp_refuse(&t->d, RA_E_IO, "addresses", "cannot listen on %s: %s",
                             t->d.addresses[t->rank], strerror(errno));
    return RA_OK;
}

/* Returns when all ranks have connected, or refuses after connect_ns. */
RA_TCP_API ra_status ra_tcp_open(ra_tcp **out, const ra_tcp_desc *d) {
    ra_status s = out && d ? ra_tcp_check(d) : RA_E_NULL;
    ra_tcp *t = NULL;
    if (!out || !d) return s;
    *out = NULL;
    if (s == RA_OK) t = (ra_tcp *)calloc(1, sizeof *t);
    if (s == RA_OK && !t) s = ra_tcp_refuse(d, RA_E_NOMEM, "ranks", "no memory");
    if (s != RA_OK) {
        if (d->listen_fd > 0) close(d->listen_fd);
        return s;
    }
    t->d = *d;
    t->pid = getpid();
    if (!t->d.connect_ns) t->d.connect_ns = 60000 * RA_TCP_MS;
    if (!t->d.max_msg) t->d.max_msg = (size_t)1 << 30;
    t->rank = d->rank;
    t->ranks = d->ranks;
    t->listener = d->listen_fd > 0 ? d->listen_fd : -1;
    t->wake[0] = t->wake[1] = -1;
    t->sealed = d->key != NULL;
    if (d->key) memcpy(t->key, d->key, sizeof t->key);
#ifdef RA_TCP_SODIUM
    if (sodium_init() < 0) s = ra_tcp_refuse(d, RA_E_IO, "key", "libsodium does not start");
#endif
    if (s == RA_OK) s = ra_tcp_begin(t);
    if (s == RA_OK) s = ra_tcp_connect(t);
    if (s != RA_OK) {
        ra_tcp_free(t);
        return s;
    }
    for (int i = 0; i < t->places; i++) ra_tcp_drop(&t->stranger[i], RA_E_PEER);
#ifdef RA_TCP_SODIUM
    sodium_memzero(t->key, sizeof t->key);
#endif
    if (t->listener >= 0) close(t->listener);
    t->listener = -1;
    ra_tcp_fill(t);
    *out = t;
    return RA_OK;
}

RA_TCP_API const ra_transport *ra_tcp_transport(ra_tcp *t) { return &t->transport; }

/* Call it after the rings on it; null is fine. */
RA_TCP_API void ra_tcp_close(ra_tcp *t) {
    if (t && t->pid == getpid()) {
        ra_tcp_tell(t, 1);
        ra_tcp_drain(t, ra_now_ns() + RA_TCP_DRAIN_NS);
    }
    ra_tcp_free(t);
}

#undef RA_TCP_MS
#undef RA_TCP_SHAKE_NS
#undef RA_TCP_DRAIN_NS
#undef RA_TCP_SWEEP_NS
#endif
