/* examples/infer/cache_file.h: a cache that some ranks save and others load, with the bits of a run
 * without files, whatever happens to the files. Small models of random weights; every test has a
 * folder of its own. --long: every bit and every length instead of a sample. */
#define _DEFAULT_SOURCE 1
#define _POSIX_C_SOURCE 200809L
#define RINGATTN_IMPLEMENTATION
#include "ringattn.h"
#include "harness.h"
#include "model_file.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

/* -------------------------------------------------------------------------- a disk that fails */
enum { NO_FAULT, KILLED, DISK_FULL, FULL_ONCE };

static struct {
    int kind;
    int64_t at, calls;                 /* the call that fails, and how many there were */
    pthread_mutex_t lock;
} fault = { NO_FAULT, 0, 0, PTHREAD_MUTEX_INITIALIZER };

/* 1: this call fails. A full disk stays full. */
static int faulty(void) {
    pthread_mutex_lock(&fault.lock);
    const int64_t call = fault.calls++;
    pthread_mutex_unlock(&fault.lock);
    return fault.kind == DISK_FULL ? call >= fault.at : fault.kind && call == fault.at;
}

/* Half of what is written arrives. */
static ssize_t fault_write(int fd, const void *data, size_t n, off_t at) {
    if (!faulty()) return pwrite(fd, data, n, at);
    if (fault.kind == KILLED || (fault.kind == DISK_FULL && fault.calls == fault.at + 1)) {
        const ssize_t half = pwrite(fd, data, n / 2, at);
        if (fault.kind != KILLED) return half;
        _exit(half >= 0 ? 9 : 8);
    }
    errno = ENOSPC;
    return -1;
}

static int fault_sync(int fd) {
    (void)fd;
    if (!faulty()) return 0;
    if (fault.kind == KILLED) _exit(9);
    errno = ENOSPC;
    return -1;
}

static int fault_rename(const char *from, const char *to) {
    if (!faulty()) return rename(from, to);
    if (fault.kind == KILLED) _exit(9);
    errno = ENOSPC;
    return -1;
}

#define CACHE_FILE_WRITE fault_write
#define CACHE_FILE_SYNC fault_sync
#define CACHE_FILE_RENAME fault_rename
#include "examples/infer/engine.h"

/* -------------------------------------------------------------------------- models and runs */
/* Bytes of a part, the head and the whole of a record are those of plain_shape in f32. */
enum { LANES = 4, PROMPT = 90, SAVED = 70, MORE = 6, WORDS = 32, LAYERS = 2, PART = 16 * 32,
       HEAD = 4096, RECORD = HEAD + 4096 };

static const made_shape plain_shape = { 2, 16, 2, 1, 8, 16, WORDS, 160, 0, RA_F32, 1 };

typedef struct checkpoint { made_file f; gguf g; model m; } checkpoint;

static void open_model(checkpoint *x, const made_shape *s) {
    char why[INFER_WHY] = "";
    memset(x, 0, sizeof *x);
    made_model(&x->f, s);
    if (!CHECK(gguf_open(&x->g, x->f.data, x->f.size, why)) ||
        !CHECK(model_open(&x->m, &x->g, why))) {
        printf("%s\n", why);
        exit(1);
    }
}

static void close_model(checkpoint *x) {
    model_close(&x->m);
    gguf_close(&x->g);
    free(x->f.data);
}

static char folder[128], file[160];    /* of this test */

static void new_folder(void) {
    const char *under = getenv("TMPDIR");
    snprintf(folder, sizeof folder, "%.80s/ringattn.cache.XXXXXX", under ? under : "/tmp");
    if (!mkdtemp(folder)) abort();
    snprintf(file, sizeof file, "%s/c", folder);
}

static void name_of(char to[200], const char *path, int lane) {
    if (lane < 0) snprintf(to, 200, "%s", path);
    else snprintf(to, 200, "%s.%d", path, lane);
}

static void remove_files(const char *path) {
    char name[200];
    for (int lane = -1; lane < 2 * LANES; lane++) {
        name_of(name, path, lane);
        (void)unlink(name);
        snprintf(name, sizeof name, "%s.part%d", path, lane);
        (void)unlink(name);
    }
}

static void remove_folder(void) {
    remove_files(file);
    CHECK_EQ(rmdir(folder), 0);
}

/* The bytes of FILE (lane -1) or of a lane's file, 0 if there is none. */
static size_t read_file(const char *path, int lane, uint8_t **data) {
    char name[200];
    size_t n = 0;
    FILE *f;
    name_of(name, path, lane);
    *data = (uint8_t *)calloc(1, 1 << 20);
    f = fopen(name, "rb");
    if (!*data) abort();
    if (f) n = fread(*data, 1, 1 << 20, f);
    if (f) fclose(f);
    return n;
}

static void write_file(const char *path, int lane, const uint8_t *data, size_t n) {
    char name[200];
    FILE *f;
    name_of(name, path, lane);
    f = fopen(name, "wb");
    if (!f || fwrite(data, 1, n, f) != n || fclose(f)) abort();
}

typedef struct outcome { infer_result r; char note[INFER_WHY]; int notes, ok; } outcome;

static void hear(void *user, const char *text) {
    outcome *x = (outcome *)user;
    if (!x->notes++) snprintf(x->note, sizeof x->note, "%s", text);
}

/* What a test varies. */
typedef struct how {
    int32_t ranks, dtype, lanes;       /* 0: 1, f32, LANES */
    const char *load, *save;
    int64_t predict, chunk;            /* predict 0: MORE */
} how;

static infer_options options_of(const how *h, outcome *x) {
    infer_options o = { 0 };
    o.ranks = h->ranks;
    o.lanes = h->lanes ? h->lanes : LANES;
    o.cache_dtype = h->dtype;
    o.load = h->load;
    o.save = h->save;
    o.predict = h->predict ? h->predict : MORE;
    o.chunk = h->chunk;
    o.all_logits = 2;
    o.temperature = 1;
    o.note = hear;
    o.user = x;
    return o;
}

static outcome run(const model *m, const how *h, const int32_t *prompt, int64_t n) {
    outcome x;
    memset(&x, 0, sizeof x);
    const infer_options o = options_of(h, &x);
    x.ok = infer_run(m, &o, prompt, n, &x.r);
    return x;
}

static void done(outcome *x) { infer_free(&x->r); }

/* A run has the tokens of another, and the bits of their logits, if both computed all rows in the
 * same way. */
static int same_text(const outcome *got, const outcome *want) {
    if (!CHECK(got->ok) || !CHECK_EQ(got->r.count, want->r.count)) {
        printf("%s\n", got->r.why);
        return 0;
    }
    return CHECK_BITS(got->r.tokens, want->r.tokens, got->r.count * 4);
}

static int same_bits(const outcome *got, const outcome *want) {
    const int64_t first = want->r.prompt - 1, n = want->r.cached - first;
    return same_text(got, want) && CHECK_EQ(got->r.cached, want->r.cached) &&
           CHECK_BITS(got->r.logits + first * WORDS, want->r.logits + first * WORDS, n * WORDS * 4);
}

static void prompt_of(int32_t *prompt, int64_t n) {
    h_rng r = h_case_rng(0);
    for (int64_t i = 0; i < n; i++) prompt[i] = (int32_t)h_range(&r, 0, WORDS - 1);
}

/* -------------------------------------------------------------------------- what is promised */
/* Saved by some ranks and loaded by others, of every type of cache, with a window and without: the
 * bits of a run without files. */
TEST(any_ranks) {
    static const int32_t pairs[][2] = { { 1, 3 }, { 4, 1 }, { 3, 2 }, { 2, 4 } };
    int32_t prompt[PROMPT];
    prompt_of(prompt, PROMPT);
    for (int i = 0; i < 8; i++) {
        made_shape s = plain_shape;
        how h = { 0 };
        checkpoint x;
        if (!h_case(i)) continue;
        new_folder();
        s.dim = 32;
        s.window = i % 2 ? 40 : 0;
        open_model(&x, &s);
        h.dtype = RA_F32 + i / 2;
        outcome alone = run(&x.m, &h, prompt, PROMPT);
        h.save = file;
        h.ranks = pairs[(i + i / 4) % 4][0];
        outcome saved = run(&x.m, &h, prompt, SAVED);
        CHECK_EQ(saved.r.saved, SAVED + MORE - 1);
        h.load = file;
        h.ranks = pairs[(i + i / 4) % 4][1];
        outcome loaded = run(&x.m, &h, prompt, PROMPT);
        CHECK(loaded.r.loaded >= SAVED);
        CHECK_EQ(loaded.notes, 0);
        same_bits(&loaded, &alone);
        done(&alone), done(&saved), done(&loaded);
        h.chunk = 48;                  /* all of it is there: 17 tokens are computed */
        outcome again = run(&x.m, &h, prompt, PROMPT);
        h.load = h.save = NULL;
        outcome plain = run(&x.m, &h, prompt, PROMPT);
        CHECK_EQ(again.r.loaded, PROMPT - INFER_SHORT - 1);
        same_bits(&again, &plain);
        done(&again), done(&plain);
        close_model(&x);
        remove_folder();
    }
}

/* The next turn of a talk: what was generated is loaded too, and what is saved is only appended. */
TEST(turns_append) {
    int32_t prompt[PROMPT];
    uint8_t *before[LANES], *after;
    size_t had[LANES], grown = 0;
    how h = { 0 };
    checkpoint x;
    prompt_of(prompt, PROMPT);
    new_folder();
    open_model(&x, &plain_shape);
    h.save = h.load = file;
    outcome first = run(&x.m, &h, prompt, SAVED);
    CHECK_EQ(first.notes, 1);          /* there is no file yet */
    for (int lane = 0; lane < LANES; lane++) had[lane] = read_file(file, lane, &before[lane]);
    memcpy(prompt, first.r.tokens, (size_t)first.r.count * 4);
    outcome second = run(&x.m, &h, prompt, PROMPT);
    CHECK_EQ(second.r.loaded, PROMPT - INFER_SHORT - 1);
    CHECK_EQ(second.r.saved, PROMPT + MORE - 1);
    h.save = h.load = NULL;
    outcome plain = run(&x.m, &h, prompt, PROMPT);
    same_text(&second, &plain);
    for (int lane = 0; lane < LANES; lane++) {
        const size_t n = read_file(file, lane, &after);
        if (CHECK(n >= had[lane])) CHECK_BITS(after, before[lane], had[lane]);
        grown += n - had[lane];
        free(after);
        free(before[lane]);
    }
    /* Positions 75 to 94: the run of 64 to 79, of which there was a part, and the next one. */
    CHECK_EQ(grown, 2 * RECORD);
    done(&first), done(&second), done(&plain);
    close_model(&x);
    remove_folder();
}

/* -------------------------------------------------------------------------- the format */
static uint32_t slow_sum(const uint8_t *p, size_t n) {
    uint32_t crc = 0xFFFFFFFFu;
    for (size_t i = 0; i < n; i++) {
        crc ^= p[i];
        for (int bit = 0; bit < 8; bit++) crc = crc & 1 ? crc >> 1 ^ 0x82F63B78u : crc >> 1;
    }
    return ~crc;
}

static uint64_t slow_hash(uint64_t h, const uint8_t *p, size_t n) {
    for (size_t i = 0; i < n; i++) h = (h ^ p[i]) * 1099511628211u;
    return h;
}

static uint64_t little(const uint8_t *p, int bytes) {
    return bytes ? *p + 256 * little(p + 1, bytes - 1) : 0;
}

/* A reader made from the comment of cache_file.h alone finds every token and every sum. */
TEST(bytes_of_the_files) {

    int32_t prompt[PROMPT];
    uint8_t *m, *lane[LANES];
    size_t size[LANES];
    how h = { 0 };
    checkpoint x;
    CHECK_EQ(slow_sum((const uint8_t *)"123456789", 9), 0xE3069283u);
    prompt_of(prompt, PROMPT);
    new_folder();
    open_model(&x, &plain_shape);
    h.save = file;
    h.ranks = 3;
    outcome saved = run(&x.m, &h, prompt, PROMPT);
    CHECK_EQ(read_file(file, -1, &m), 64);
    CHECK(!memcmp(m, "RAKVRUNS\1\0\0\0\4\0\0\0", 16));
    CHECK_EQ(little(m + 16, 8), model_hash(&x.m));
    CHECK(!memcmp(m + 24, "\2\0\0\0\1\0\0\0\40\0\0\0", 12));
    CHECK_EQ(little(m + 40, 8), PROMPT + MORE - 1);
    CHECK_EQ(little(m + 60, 4), slow_sum(m, 60));
    uint64_t hash = slow_hash(14695981039346656037u, m, 40);
    for (int i = 0; i < LANES; i++) size[i] = read_file(file, i, &lane[i]);
    for (int64_t run_at = 0, i = 0; i < PROMPT + MORE - 1; run_at++) {
        const int64_t left = PROMPT + MORE - 1 - i, count = left < 16 ? left : 16;
        int64_t k = run_at / LANES;
        const uint8_t *record = lane[run_at % LANES] + k * RECORD;
        if (!CHECK((size_t)((k + 1) * RECORD) <= size[run_at % LANES])) break;
        CHECK(!memcmp(record, "RUN1", 4));
        CHECK_EQ(little(record + 4, 4), count);
        CHECK_EQ(little(record + 8, 8), run_at);
        CHECK_EQ(little(record + 16, 8), hash);
        for (int j = 0; j < count; j++)
            CHECK_EQ(little(record + 24 + 4 * j, 4), saved.r.tokens[i++]);
        hash = slow_hash(hash, record + 24, 4 * (size_t)count);
        for (int p = 0; p < 2 * LAYERS; p++)
            CHECK_EQ(little(record + 88 + 4 * p, 4), slow_sum(record + HEAD + p * PART, PART));
        CHECK_EQ(little(record + 88 + 8 * LAYERS, 4), slow_sum(record, 88 + 8 * LAYERS));
    }
    CHECK_EQ(little(m + 48, 8), hash);
    for (int i = 0; i < LANES; i++) free(lane[i]);
    free(m);
    done(&saved);
    close_model(&x);
    remove_folder();
}

/* The sums by tables and by the processor's instruction. */
TEST(sums) {
    static uint8_t data[7 * 512];
    static cache_crc fast, plain;
    uint32_t sums[7];
    h_rng r = h_case_rng(0);
    const cache_rows rows = { data, 512 };
    cache_crc_make(&fast);
    plain.fast = 0;
    for (uint32_t i = 0; i < 256; i++) {           /* x^8 i, and what follows it */
        uint8_t zeros[8] = { 0 };
        for (int k = 0; k < 8; k++) {
            uint32_t crc = i;
            for (int j = 0; j <= k; j++)
                for (int bit = 0; bit < 8; bit++)
                    crc = crc & 1 ? crc >> 1 ^ 0x82F63B78u : crc >> 1;
            plain.of[k][i] = crc ^ zeros[k];
        }
    }
    for (size_t i = 0; i < sizeof data; i++) data[i] = (uint8_t)h_next(&r);
    for (int i = 0; i < 2; i++) {
        const cache_crc *t = i ? &plain : &fast;
        cache_sums(t, rows, 512, 7, sums);
        for (int k = 0; k < 7; k++) CHECK_EQ(sums[k], slow_sum(data + k * 512, 512));
        for (size_t n = 0; n < 40; n++) CHECK_EQ(cache_sum(t, data, n), slow_sum(data, n));
    }
}

/* -------------------------------------------------------------------------- what may happen */
/* A save that is killed, or finds the disk full, at each of its calls. What was saved before is
 * there, the text is right, and the next save completes. */
static int64_t torn(const checkpoint *x, int kind, int64_t at, const int32_t *prompt,
                    const outcome *alone) {
    how h = { 0 };
    int64_t calls = 0;
    remove_files(file);
    h.save = h.load = file;
    outcome first = run(&x->m, &h, prompt, 40);
    done(&first);
    fault.kind = kind;
    fault.at = at;
    fault.calls = 0;
    if (kind == KILLED) {
        int status = 0;
        const pid_t pid = fork();
        if (pid == 0) {
            outcome killed = run(&x->m, &h, prompt, PROMPT);
            _exit(killed.ok ? 0 : 7);
        }
        CHECK(pid > 0 && waitpid(pid, &status, 0) == pid && WIFEXITED(status));
        CHECK(WEXITSTATUS(status) == 9 || WEXITSTATUS(status) == 0);
        calls = WEXITSTATUS(status) == 9 ? at + 1 : at;
    } else {
        h.ranks = 1 + (int32_t)(at % 3);
        outcome full = run(&x->m, &h, prompt, PROMPT);
        calls = fault.calls;
        same_bits(&full, alone);
        if (calls > at) {
            CHECK_EQ(full.r.saved, -1);
            CHECK(strstr(full.note, "space") || strstr(full.note, "full"));
        }
        done(&full);
    }
    fault.kind = NO_FAULT;
    h.ranks = 2;
    outcome next = run(&x->m, &h, prompt, PROMPT);
    CHECK(next.r.loaded >= 40);
    CHECK_EQ(next.r.saved, PROMPT + MORE - 1);
    same_bits(&next, alone);
    outcome last = run(&x->m, &h, prompt, PROMPT);
    CHECK_EQ(last.r.loaded, PROMPT - INFER_SHORT - 1);
    same_bits(&last, alone);
    done(&next), done(&last);
    return calls;
}

static void tear(int kind) {
    int32_t prompt[PROMPT];
    how h = { 0 };
    checkpoint x;
    int64_t at = 0, calls = 1;
    prompt_of(prompt, PROMPT);
    new_folder();
    open_model(&x, &plain_shape);
    outcome alone = run(&x.m, &h, prompt, PROMPT);
    for (; calls > at - 1 && at < 200; at++) {
        if (!h_case(at)) break;
        calls = torn(&x, kind, at, prompt, &alone);
        if (calls <= at) break;
    }
    CHECK(at > 15 && at < 200);
    done(&alone);
    close_model(&x);
    remove_folder();
}

TEST(killed_at_every_write) { tear(KILLED); }
TEST(full_at_every_write) { tear(DISK_FULL); }

/* A disk that is full for a moment: the next save of the same run writes what is missing. */
TEST(room_comes_back) {
    int32_t prompt[PROMPT];
    checkpoint x;
    prompt_of(prompt, PROMPT);
    new_folder();
    open_model(&x, &plain_shape);
    for (int i = 0; i < 6; i++) {
        how h = { 0 };
        if (!h_case(i)) continue;
        remove_files(file);
        h.save = file;
        h.ranks = 1 + i % 2;
        fault.kind = FULL_ONCE;
        fault.at = i;
        fault.calls = 0;
        outcome full = run(&x.m, &h, prompt, PROMPT);
        fault.kind = NO_FAULT;
        CHECK(fault.calls > 2 * i && full.notes == 1);
        CHECK_EQ(full.r.saved, PROMPT + MORE - 1);
        h.load = file;
        outcome next = run(&x.m, &h, prompt, PROMPT);
        CHECK_EQ(next.r.loaded, PROMPT - INFER_SHORT - 1);
        done(&full), done(&next);
    }
    close_model(&x);
    remove_folder();
}

/* Files that a test damages, and what they were. */
typedef struct files { uint8_t *data[LANES + 1]; size_t size[LANES + 1]; } files;

static void keep_files(files *f) {
    for (int i = 0; i <= LANES; i++) f->size[i] = read_file(file, i - 1, &f->data[i]);
}

static void restore_files(const files *f) {
    for (int i = 0; i <= LANES; i++) write_file(file, i - 1, f->data[i], f->size[i]);
}

static void free_files(files *f) {
    for (int i = 0; i <= LANES; i++) free(f->data[i]);
}

/* A run that loads what is there now: its text is right. */
static int64_t right_after(const checkpoint *x, const int32_t *prompt, const outcome *alone) {
    how h = { 0 };
    h.load = file;
    outcome got = run(&x->m, &h, prompt, PROMPT);
    const int64_t loaded = got.r.loaded;
    CHECK(loaded == PROMPT - INFER_SHORT - 1 || got.notes > 0 || loaded % CACHE_RUN == 0);
    same_bits(&got, alone);
    done(&got);
    return loaded;
}

typedef struct damage { checkpoint x; int32_t prompt[PROMPT]; outcome alone; files f; } damage;

static void damage_open(damage *d) {
    how h = { 0 };
    prompt_of(d->prompt, PROMPT);
    new_folder();
    open_model(&d->x, &plain_shape);
    d->alone = run(&d->x.m, &h, d->prompt, PROMPT);
    h.save = file;
    h.ranks = 2;
    outcome saved = run(&d->x.m, &h, d->prompt, PROMPT);
    done(&saved);
    keep_files(&d->f);
}

static void damage_close(damage *d) {
    free_files(&d->f);
    done(&d->alone);
    close_model(&d->x);
    remove_folder();
}

/* A bit of any file is flipped. If it matters, the positions of its run and later ones are not
 * loaded; the rest is. --long: every bit of FILE and of the first records of two lanes. */
TEST(flipped_bits) {
    damage d;
    int64_t misses = 0, cases = 0;
    h_rng r = h_case_rng(1);
    damage_open(&d);
    for (int k = 0; k < 3; k++) {
        const size_t bits = 8 * (k ? (size_t)HEAD + 2 * LAYERS * PART : d.f.size[0]);
        const size_t step = h_run.large ? 1 : k ? bits / 150 : 5;
        for (size_t bit = 0; bit < bits; bit += step) {
            size_t at = bit;
            if (k && !h_run.large) at = (size_t)h_range(&r, 0, (int64_t)bits - 1);
            if (k && at >= 8 * 108 && at < 8 * HEAD) {     /* zeros */
                if (h_run.large && bit % 64) continue;
                if (!h_run.large && h_one_in(&r, 2)) at = at % (8 * 108);
            }
            if (h_run.bad) break;
            h_context("file %d, bit %d", k - 1, (int)at);
            d.f.data[k][at / 8] ^= (uint8_t)(1 << at % 8);
            write_file(file, k - 1, d.f.data[k], d.f.size[k]);
            misses += right_after(&d.x, d.prompt, &d.alone) < PROMPT - INFER_SHORT - 1;
            d.f.data[k][at / 8] ^= (uint8_t)(1 << at % 8);
            cases++;
        }
        restore_files(&d.f);
    }
    CHECK(2 * misses > cases && misses < cases);
    damage_close(&d);
}

/* Files of every length (a sample), and with rubbish after their end; then a save mends them. */
TEST(every_length) {
    damage d;
    int64_t least = PROMPT;
    damage_open(&d);
    for (int k = 0; k <= LANES; k++) {
        const size_t step = h_run.large ? k ? 7 : 1 : k ? 937 : 9;
        for (size_t n = 0; n <= d.f.size[k] + 600 && !h_run.bad; n += step) {
            uint8_t more[600];
            how h = { 0 };
            const size_t end = n < d.f.size[k] ? n : d.f.size[k];
            memset(more, (int)(n % 256), sizeof more);
            h_context("file %d, %d of %d bytes", k - 1, (int)n, (int)d.f.size[k]);
            write_file(file, k - 1, d.f.data[k], end);
            if (n > end) {
                FILE *f;
                char name[200];
                name_of(name, file, k - 1);
                f = fopen(name, "ab");
                if (!f || fwrite(more, 1, n - end, f) != n - end || fclose(f)) abort();
            }
            const int64_t loaded = right_after(&d.x, d.prompt, &d.alone);
            if (loaded < least) least = loaded;
            h.load = h.save = file;
            if (k && n % 4 == 0) {
                outcome mended = run(&d.x.m, &h, d.prompt, PROMPT);
                CHECK_EQ(mended.r.saved, PROMPT + MORE - 1);
                done(&mended);
                CHECK_EQ(right_after(&d.x, d.prompt, &d.alone), PROMPT - INFER_SHORT - 1);
            }
        }
        restore_files(&d.f);
    }
    CHECK_EQ(least, 0);
    damage_close(&d);
}

/* A token of the prompt is another one, at any position: what is before it is loaded. Both texts
 * are then in the files. */
TEST(other_tokens) {
    damage d;
    damage_open(&d);
    for (int at = 0; at < PROMPT; at += h_run.large ? 1 : 7) {
        int32_t other[PROMPT];
        const int64_t most = PROMPT - INFER_SHORT - 1;
        how h = { 0 };
        if (!h_case(at)) continue;
        memcpy(other, d.prompt, sizeof other);
        other[at] = (other[at] + 1) % WORDS;
        outcome plain = run(&d.x.m, &h, other, PROMPT);
        h.load = h.save = file;
        outcome got = run(&d.x.m, &h, other, PROMPT);
        CHECK_EQ(got.r.loaded, at < most ? at : most);
        same_bits(&got, &plain);
        outcome again = run(&d.x.m, &h, other, PROMPT);
        CHECK_EQ(again.r.loaded, most);
        same_bits(&again, &plain);
        CHECK_EQ(right_after(&d.x, d.prompt, &d.alone), most);
        done(&plain), done(&got), done(&again);
    }
    damage_close(&d);
}

/* Files of another model, cache, number of lanes, chunk, processor or version are not loaded, a
 * sentence says why, and nothing is saved to them. */
TEST(other_runs) {
    static const struct { int model; how h; int at, flip; const char *says; } cases[] = {
        { 1, { 0 }, 0, 0, "is of another model" },
        { 0, { 0, RA_F16, 0, NULL, NULL, 0, 0 }, 0, 0, "is of another --cache" },
        { 0, { 0, 0, 5, NULL, NULL, 0, 0 }, 0, 0, "has 4 lanes, this run 5" },
        { 0, { 0, 0, 0, NULL, NULL, 0, 20 }, 0, 0, "with chunks of more than 32 tokens" },
        { 0, { 0 }, 36, 1, "the bits of another processor" },
        { 0, { 0 }, 37, 1, "the bits of another processor" },
        { 0, { 0 }, 38, 1, "of a run with --integers" },
        { 0, { 0 }, 8, 3, "has version 2 of the format" },
        { 0, { 0 }, 0, 1, "is no saved cache" } };
    damage d;
    checkpoint other;
    made_shape s = plain_shape;
    damage_open(&d);
    s.seed = 2;
    open_model(&other, &s);
    for (int i = 0; i < (int)(sizeof cases / sizeof *cases); i++) {
        const model *m = cases[i].model ? &other.m : &d.x.m;
        how h = cases[i].h;
        uint8_t manifest[64];
        if (!h_case(i)) continue;
        memcpy(manifest, d.f.data[0], 64);
        manifest[cases[i].at] ^= (uint8_t)cases[i].flip;
        cache_put(manifest + 60, slow_sum(manifest, 60), 4);
        write_file(file, -1, manifest, 64);
        outcome plain = run(m, &h, d.prompt, PROMPT);
        h.load = file;
        h.ranks = 2;
        outcome got = run(m, &h, d.prompt, PROMPT);
        CHECK_EQ(got.r.loaded, 0);
        same_bits(&got, &plain);
        if (!CHECK(strstr(got.note, cases[i].says) != NULL)) printf("%s\n", got.note);
        h.save = file;
        outcome refused = run(m, &h, d.prompt, PROMPT);
        CHECK(!refused.ok && strstr(refused.r.why, cases[i].says));
        done(&plain), done(&got), done(&refused);
    }
    close_model(&other);
    damage_close(&d);
}

/* Saving is refused before anything is computed: no folder, another process saves, a lane's file is
 * of something else. */
TEST(cannot_save) {
    damage d;
    how h = { 0 };
    cache_lane held;
    char why[INFER_WHY], name[300];
    damage_open(&d);
    snprintf(name, sizeof name, "%s/none/c", folder);
    h.save = name;
    outcome none = run(&d.x.m, &h, d.prompt, PROMPT);
    CHECK(!none.ok && strstr(none.r.why, "No such file"));
    h.save = file;
    const cache_shape shape = { 0, LANES, 2, RA_F32, 32, 0 };
    CHECK(cache_lane_open(&held, file, &shape, 1, 1, 0, why));
    h.ranks = 2;
    outcome busy = run(&d.x.m, &h, d.prompt, PROMPT);
    CHECK(!busy.ok && strstr(busy.r.why, "another process saves to it"));
    cache_lane_close(&held);
    write_file(file, 2, (const uint8_t *)"notes of a user", 15);
    outcome foreign = run(&d.x.m, &h, d.prompt, PROMPT);
    CHECK(!foreign.ok && strstr(foreign.r.why, "is no lane of a saved cache"));
    CHECK_EQ(foreign.r.loaded, 0);
    done(&none), done(&busy), done(&foreign);
    damage_close(&d);
}

/* -------------------------------------------------------------------------- halts, machines */
typedef struct halting { outcome x; volatile sig_atomic_t halt; int64_t tokens, prompt; } halting;

static int halt_at_token(void *user, int32_t id) {
    halting *h = (halting *)user;
    if (h->tokens-- == 1) h->halt = 1;
    return id < 0;
}

static void halt_in_prompt(void *user, int64_t at, int64_t of) {
    halting *h = (halting *)user;
    if (at >= h->prompt && at < of) h->halt = 1;
}

static void hear_halting(void *user, const char *text) { hear(&((halting *)user)->x, text); }

/* Ctrl-C in the text or in the prompt: all ranks end after the call, the cache is saved, and
 * another run goes on from it. */
TEST(halts) {
    int32_t prompt[PROMPT];
    checkpoint x;
    how h = { 0 };
    prompt_of(prompt, PROMPT);
    new_folder();
    open_model(&x, &plain_shape);
    outcome alone = run(&x.m, &h, prompt, PROMPT);
    for (int i = 0; i < 6; i++) {
        halting at;
        if (!h_case(i)) continue;
        remove_files(file);
        memset(&at, 0, sizeof at);
        at.tokens = i < 3 ? 1 + i : -1;
        at.prompt = i < 3 ? PROMPT : 1;
        h.save = file;
        h.load = NULL;
        h.ranks = 1 + i % 3;
        h.chunk = i < 3 ? 0 : 40;
        infer_options o = options_of(&h, NULL);
        o.halt = &at.halt;
        o.token = halt_at_token;
        o.progress = halt_in_prompt;
        o.note = hear_halting;
        o.user = &at;
        at.x.ok = infer_run(&x.m, &o, prompt, PROMPT, &at.x.r);
        CHECK(at.x.ok);
        CHECK_EQ(at.x.r.ended, INFER_HALTED);
        CHECK_EQ(at.x.r.saved, at.x.r.cached);
        if (i < 3) CHECK(at.x.r.count > PROMPT + i && at.x.r.count < PROMPT + MORE);
        else CHECK(at.x.r.cached > 0 && at.x.r.cached < PROMPT && at.x.r.count == PROMPT);
        CHECK_BITS(at.x.r.tokens, alone.r.tokens, at.x.r.count * 4);
        h.load = file;
        outcome later = run(&x.m, &h, prompt, PROMPT);
        CHECK(later.r.loaded > 0);
        same_bits(&later, &alone);
        done(&at.x), done(&later);
    }
    done(&alone);
    close_model(&x);
    remove_folder();
}

/* Three machines without a common folder: each has FILE and its own lanes. Loaded by the same
 * three, all is there. Two of them miss the lanes of the third, say so, and compute. */
typedef struct machines { const model *m; const int32_t *prompt; int load; outcome x[3]; } machines;

static ra_status on_machine(ra_world *world, int rank, void *user) {
    machines *a = (machines *)user;
    char own[200];
    how h = { 0 };
    snprintf(own, sizeof own, "%s.of%d", file, rank);
    h.ranks = ra_world_transport(world, rank)->ranks;
    if (a->load) h.load = own;
    else h.save = own;
    infer_options o = options_of(&h, &a->x[rank]);
    o.all_logits = 0;
    a->x[rank].ok = infer_run_rank(a->m, &o, a->prompt, PROMPT, ra_world_transport(world, rank),
                                   &a->x[rank].r);
    return a->x[rank].ok ? RA_OK : RA_E_STATE;
}

TEST(machines_apart) {
    static const int ranks[] = { 3, 3, 2 };
    int32_t prompt[PROMPT];
    checkpoint x;
    how h = { 0 };
    prompt_of(prompt, PROMPT);
    new_folder();
    open_model(&x, &plain_shape);
    outcome alone = run(&x.m, &h, prompt, PROMPT);
    for (int i = 0; i < 3; i++) {
        machines a;
        int notes = 0;
        memset(&a, 0, sizeof a);
        a.m = &x.m;
        a.prompt = prompt;
        a.load = i > 0;
        CHECK_EQ(ra_world_run(ranks[i], on_machine, &a, NULL), RA_OK);
        for (int k = 0; k < ranks[i]; k++) {
            same_text(&a.x[k], &alone);
            CHECK_EQ(a.x[k].r.loaded, i == 0 ? 0 : i == 1 ? PROMPT - INFER_SHORT - 1 : 16);
            CHECK_EQ(a.x[k].r.saved, i ? 0 : PROMPT + MORE - 1);
            notes += a.x[k].notes;
            done(&a.x[k]);
        }
        CHECK_EQ(notes > 0, i == 2);
    }
    for (int k = 0; k < 3; k++) {
        char own[200];
        snprintf(own, sizeof own, "%s.of%d", file, k);
        remove_files(own);
    }
    done(&alone);
    close_model(&x);
    remove_folder();
}

int main(int argc, char **argv) {
    static const h_test tests[] = {
        ENTRY(any_ranks), ENTRY(turns_append), ENTRY(bytes_of_the_files), ENTRY(sums),
        ENTRY(killed_at_every_write), ENTRY(full_at_every_write), ENTRY(room_comes_back),
        ENTRY(flipped_bits),
        ENTRY(every_length), ENTRY(other_tokens), ENTRY(other_runs), ENTRY(cannot_save),
        ENTRY(halts), ENTRY(machines_apart) };
    return h_main(argc, argv, tests, sizeof tests / sizeof *tests);
}
