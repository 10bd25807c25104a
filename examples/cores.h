/* How many threads are worth starting: the processors that this process may use. That is fewer than
 * the machine has if an affinity mask (taskset, a batch system) or a quota of its control group (a
 * container) says so. Linux; elsewhere the processors that are online. */
#ifndef RINGATTN_EXAMPLES_CORES_H
#define RINGATTN_EXAMPLES_CORES_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { CORES_PATH = 1024 };

/* The processors in the mask of a /proc/.../status; 0: unknown. */
static inline int cores_allowed(const char *status) {
    static const char name[] = "Cpus_allowed:";
    char line[4096];
    int n = 0;
    FILE *f = fopen(status, "r");
    while (f && !n && fgets(line, sizeof line, f)) {
        if (strncmp(line, name, sizeof name - 1)) continue;
        for (const char *s = line + sizeof name - 1; *s; s++) {
            const char digit[2] = { *s, 0 };
            for (unsigned long bits = strtoul(digit, NULL, 16); bits; bits &= bits - 1) n++;
        }
    }
    if (f) fclose(f);
    return n;
}

/* The quota in the files `a` of a directory, and `b` for the period if that has a file of its own,
 * in processors, rounded up; 0: none. */
static inline int cores_quota(const char *dir, const char *a, const char *b) {
    char path[CORES_PATH + 64];
    double quota = 0, period = 0;
    snprintf(path, sizeof path, "%s/%s", dir, a);
    FILE *f = fopen(path, "r");
    if (!f) return 0;
    int n = fscanf(f, "%lf %lf", &quota, &period);         /* "max" is no number */
    fclose(f);
    if (b && n == 1) {
        snprintf(path, sizeof path, "%s/%s", dir, b);
        f = fopen(path, "r");
        if (f && fscanf(f, "%lf", &period) == 1) n = 2;
        if (f) fclose(f);
    }
    if (n != 2 || quota <= 0 || period <= 0) return 0;
    const double cores = quota / period;
    return cores > 1e6 ? 0 : (int)cores + (cores > (int)cores);
}

/* The smallest quota of the groups from `mount`/`group` up to `mount`; 0: none. */
static inline int cores_group(const char *mount, const char *group, const char *a, const char *b) {
    char dir[CORES_PATH];
    const size_t top = strlen(mount);
    int least = 0;
    snprintf(dir, sizeof dir, "%s%s", mount, group);
    for (;;) {
        const int n = cores_quota(dir, a, b);
        if (n && (!least || n < least)) least = n;
        char *end = strrchr(dir, '/');
        if (strlen(dir) <= top || !end || end < dir + top) return least;
        *end = 0;
    }
}

/* The same of all groups of a /proc/.../cgroup, whose hierarchies are mounted below `root`. */
static inline int cores_groups(const char *cgroup, const char *root) {
    char line[CORES_PATH], mount[CORES_PATH + 64];
    int least = 0;
    FILE *f = fopen(cgroup, "r");
    while (f && fgets(line, sizeof line, f)) {             /* number:controllers:/group */
        char *kind = strchr(line, ':'), *group = kind ? strchr(kind + 1, ':') : NULL;
        int n = 0;
        if (!group) continue;
        *group++ = 0;
        group[strcspn(group, "\n")] = 0;
        if (!kind[1]) {
            n = cores_group(root, group, "cpu.max", NULL);
        } else if (!strcmp(kind + 1, "cpu") || !strncmp(kind + 1, "cpu,", 4) ||
                   strstr(kind + 1, ",cpu,")) {
            snprintf(mount, sizeof mount, "%s/cpu", root);
            n = cores_group(mount, group, "cpu.cfs_quota_us", "cpu.cfs_period_us");
        }
        if (n && (!least || n < least)) least = n;
    }
    if (f) fclose(f);
    return least;
}

/* At least 1. */
static inline int cores_here(void) {
    const int allowed = cores_allowed("/proc/self/status");
    const int quota = cores_groups("/proc/self/cgroup", "/sys/fs/cgroup");
    const long online = sysconf(_SC_NPROCESSORS_ONLN);
    const int n = allowed ? allowed : online > 0 ? (int)online : 1;
    return quota && quota < n ? quota : n;
}

#endif
