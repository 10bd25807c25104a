/* examples/cores.h: affinity masks, and quotas of control groups of both versions. */
#define _GNU_SOURCE
#include "harness.h"
#include "examples/cores.h"
#include <sched.h>
#include <sys/stat.h>

static char top[64];

static const char *at(const char *name) {
    static char path[4][300];
    static int n;
    char *to = path[n++ % 4];
    snprintf(to, sizeof path[0], "%s/%s", top, name);
    return to;
}

/* Writes a file, and the directories above it. */
static void put(const char *name, const char *text) {
    char path[300];
    snprintf(path, sizeof path, "%s", at(name));
    for (char *s = path + strlen(top) + 1; (s = strchr(s, '/')) != NULL; s++) {
        *s = 0;
        mkdir(path, 0700);
        *s = '/';
    }
    FILE *f = fopen(path, "w");
    CHECK(f != NULL);
    if (f) {
        fputs(text, f);
        fclose(f);
    }
}

static void tree(void) {
    snprintf(top, sizeof top, "/tmp/ringattn_cores_XXXXXX");
    CHECK(mkdtemp(top) != NULL);
}

static void gone(void) {
    char command[100];
    snprintf(command, sizeof command, "rm -rf %s", top);
    CHECK_EQ(system(command), 0);
}

TEST(masks) {
    tree();
    put("a", "Name:\tx\nCpus_allowed:\t00000000,0000f001,00000000\nCpus_allowed_list:\t0\n");
    put("b", "Name:\tx\n");
    CHECK_EQ(cores_allowed(at("a")), 5);
    CHECK_EQ(cores_allowed(at("b")), 0);
    CHECK_EQ(cores_allowed(at("none")), 0);
    gone();
}

TEST(quotas) {
    static const struct { const char *group, *file, *text; int want; } cases[] = {
        { "0::/\n", "cpu.max", "150000 100000\n", 2 },
        { "0::/\n", "cpu.max", "max 100000\n", 0 },
        { "0::/\n", "cpu.max", "200000 100000\n", 2 },
        { "0::/\n", "cpu.max", "20000 100000\n", 1 },
        { "0::/a/b\n", "a/b/cpu.max", "300000 100000\n", 3 },
        { "0::/a/b\n", "a/cpu.max", "300000 100000\n", 3 },    /* the group above has it */
        { "0::/../x\n", "cpu.max", "400000 100000\n", 4 },     /* a container: not mounted */
        { "0::/a\n", "b/cpu.max", "100000 100000\n", 0 },      /* another group's */
        { "3:cpuset:/a\n", "cpuset/a/cpu.max", "100000 100000\n", 0 },
        { "no group\n", "cpu.max", "100000 100000\n", 0 },
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        tree();
        put("group", cases[i].group);
        put(cases[i].file, cases[i].text);
        h_context("case %d", (int)i);
        CHECK_EQ(cores_groups(at("group"), top), cases[i].want);
        gone();
    }
}

TEST(quotas_of_version_1) {
    tree();
    put("group", "4:memory:/m\n3:cpu,cpuacct:/a/b\n2:cpuset:/a\n");
    put("cpu/a/cpu.cfs_quota_us", "250000\n");
    put("cpu/a/cpu.cfs_period_us", "100000\n");
    put("cpu/a/b/cpu.cfs_quota_us", "-1\n");
    put("cpu/a/b/cpu.cfs_period_us", "100000\n");
    CHECK_EQ(cores_groups(at("group"), top), 3);
    put("cpu/a/b/cpu.cfs_quota_us", "50000\n");
    CHECK_EQ(cores_groups(at("group"), top), 1);
    gone();
}

#if defined(__linux__)
/* A process that may use one processor starts one thread. */
TEST(affinity) {
    cpu_set_t before, one;
    size_t first = 0;
    CHECK_EQ(sched_getaffinity(0, sizeof before, &before), 0);
    while (first < CPU_SETSIZE - 1 && !CPU_ISSET(first, &before)) first++;
    CPU_ZERO(&one);
    CPU_SET(first, &one);
    CHECK(cores_here() <= CPU_COUNT(&before) && cores_here() >= 1);
    CHECK_EQ(sched_setaffinity(0, sizeof one, &one), 0);
    CHECK_EQ(cores_here(), 1);
    CHECK_EQ(sched_setaffinity(0, sizeof before, &before), 0);
}
#else
TEST(affinity) { h_skip("no affinity mask here"); }
#endif

int main(int argc, char **argv) {
    static const h_test tests[] = {
        ENTRY(masks), ENTRY(quotas), ENTRY(quotas_of_version_1), ENTRY(affinity),
    };
    return h_main(argc, argv, tests, sizeof tests / sizeof tests[0]);
}
