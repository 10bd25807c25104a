/* A hub of Ethernet between network namespaces of this machine, with a rate, a delay and losses,
 * for kernels that have no netem. Needs root and /dev/net/tun.
 *
 *   hub [--rate BITS] [--delay US] [--loss PERCENT] [--seed N] NAMESPACE NAMESPACE...
 *
 * In each namespace it makes a device eth0, and then carries frames between them. A frame leaves
 * the sender's port at the rate, is lost with the given probability, and arrives after the delay.
 * It prints "ready" when the devices exist. SIGUSR1 cuts the second port, whose frames are then
 * lost. It ends with SIGTERM, which also removes the devices. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

enum { PORTS = 8, FRAME = 9100, QUEUE = 8 << 20 };

typedef struct frame {
    struct frame *next;
    int64_t due_ns;                    /* when it arrives */
    int length;
    uint8_t bytes[FRAME];
} frame;

typedef struct port {
    int fd;
    int64_t free_ns;                   /* when its sender may send the next frame */
    int64_t queued;                    /* bytes of frames on the way from it */
    frame *first, **last;              /* in the order of due_ns */
    uint8_t mac[6];                    /* of its last sender */
} port;

static port ports[PORTS];
static int count;
static double rate, loss;              /* bits per second, 0: no limit; 0..1 */
static int64_t delay_ns;
static uint64_t dice = 1;
static volatile sig_atomic_t cut;

static void on_cut(int signal) {
    (void)signal;
    cut = 1;
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* splitmix64 */
static double roll(void) {
    uint64_t z = dice += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return (double)((z ^ z >> 31) >> 11) / 9007199254740992.0;
}

static void die(const char *what) {
    fprintf(stderr, "hub: %s: %s\n", what, strerror(errno));
    exit(1);
}

/* Makes eth0 in a namespace; a descriptor stays with the namespace in which it was opened. */
static int tap(const char *name) {
    static int home = -1;
    char path[256];
    struct ifreq request = { 0 };
    int there, fd;
    if (home < 0) home = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
    snprintf(path, sizeof path, "/var/run/netns/%s", name);
    there = open(path, O_RDONLY | O_CLOEXEC);
    if (there < 0 || setns(there, CLONE_NEWNET)) die(path);
    close(there);
    fd = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0) die("/dev/net/tun");
    snprintf(request.ifr_name, sizeof request.ifr_name, "eth0");
    request.ifr_flags = IFF_TAP | IFF_NO_PI;
    if (ioctl(fd, TUNSETIFF, &request)) die("eth0");
    if (setns(home, CLONE_NEWNET)) die("back home");
    return fd;
}

/* Takes one frame from a port: 0 if there is none. */
static int take(port *p) {
    frame *f = (frame *)malloc(sizeof *f);
    int64_t now = now_ns();
    if (!f) die("memory");
    f->length = (int)read(p->fd, f->bytes, sizeof f->bytes);
    if (f->length < 14) {
        free(f);
        return 0;
    }
    memcpy(p->mac, f->bytes + 6, 6);
    if (p->free_ns < now) p->free_ns = now;
    if (p->queued + f->length > QUEUE || roll() < loss) {
        free(f);
        return 1;
    }
    if (rate > 0) p->free_ns += (int64_t)(f->length * 8e9 / rate);
    f->due_ns = p->free_ns + delay_ns;
    f->next = NULL;
    p->queued += f->length;
    *p->last = f;
    p->last = &f->next;
    return 1;
}

/* Delivers what is due; returns when the next frame will be, or -1. */
static int64_t deliver(void) {
    int64_t next = -1, now = now_ns();
    for (int i = 0; i < count; i++) {
        port *p = &ports[i];
        while (p->first && p->first->due_ns <= now) {
            frame *f = p->first;
            p->first = f->next;
            if (!p->first) p->last = &p->first;
            p->queued -= f->length;
            for (int k = 0; k < count; k++) {
                int mine = (f->bytes[0] & 1) || !memcmp(ports[k].mac, f->bytes, 6);
                if (k == i || !mine || (cut && (k == 1 || i == 1))) continue;
                if (write(ports[k].fd, f->bytes, (size_t)f->length) < 0 && errno != EAGAIN &&
                    errno != EIO && errno != ENOBUFS) die("write");
            }
            free(f);
        }
        if (p->first && (next < 0 || p->first->due_ns < next)) next = p->first->due_ns;
    }
    return next;
}

int main(int argc, char **argv) {
    int at = 1;
    for (; at + 1 < argc && argv[at][0] == '-'; at += 2) {
        double value = atof(argv[at + 1]);
        if (!strcmp(argv[at], "--rate")) rate = value;
        else if (!strcmp(argv[at], "--delay")) delay_ns = (int64_t)(value * 1000);
        else if (!strcmp(argv[at], "--loss")) loss = value / 100;
        else if (!strcmp(argv[at], "--seed")) dice = (uint64_t)value;
        else break;
    }
    if (argc - at < 2 || argc - at > PORTS || argv[at][0] == '-') {
        fprintf(stderr, "usage: hub [--rate BITS] [--delay US] [--loss PERCENT] [--seed N] "
                        "NAMESPACE NAMESPACE... (2 to %d)\n", PORTS);
        return 2;
    }
    for (; at < argc; at++, count++) {
        ports[count].fd = tap(argv[at]);
        ports[count].last = &ports[count].first;
    }
    signal(SIGUSR1, on_cut);
    puts("ready");
    fflush(stdout);
    for (;;) {
        struct pollfd list[PORTS];
        struct timespec wait;
        int64_t next = deliver(), left = next - now_ns();
        for (int i = 0; i < count; i++) {
            list[i].fd = ports[i].fd;
            list[i].events = POLLIN;
        }
        if (left < 0) left = 0;
        wait.tv_sec = (time_t)(left / 1000000000);
        wait.tv_nsec = (long)(left % 1000000000);
        if (ppoll(list, (nfds_t)count, next < 0 ? NULL : &wait, NULL) < 0 && errno != EINTR)
            die("poll");
        for (int i = 0; i < count; i++)
            for (int n = 0; n < 64 && take(&ports[i]); n++) { }
    }
}
