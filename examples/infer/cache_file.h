/* A cache of keys and values in files. Any number of ranks writes them and any other number reads
 * them: positions belong to lanes, each rank has whole lanes, and a lane has a file of its own.
 * FILE says what the cache is of; FILE.0, FILE.1, ... hold the lanes. Ranks on several machines
 * share a folder, or each has FILE and the files of its own lanes.
 *
 * Numbers are little-endian. A lane's file is a sequence of records of one size, each with a run of
 * up to 16 positions: run i of the sequence, positions 16 i and on, belongs to lane i mod lanes.
 * Records are only ever appended. What a save has not completed is no whole record, and the next
 * save begins there. Several records may have the same run: of other texts, or with fewer tokens.
 * A text that begins like another shares its records up to where they part.
 *
 * FILE has 64 bytes. It is replaced, by a rename, after the records of a save are on the disk.
 *
 *    0  8  "RAKVRUNS"
 *    8  4  version: 1
 *   12  4  lanes
 *   16  8  hash of the model: its shape, its tensors and samples of their bytes
 *   24  4  layers
 *   28  4  type of a row: 1 f32, 2 f16, 3 bf16, 4 q8_0, 5 q4_0
 *   32  4  bytes of the row of a position: its keys of all heads in a layer, or its values
 *   36  4  arithmetic: the instruction sets of products (byte 0) and of attention (byte 1), 1 if
 *          products in decoding are of integers (byte 2), and 1 if chunks have at most 32 tokens
 *          (byte 3). Others have other last bits
 *   40  8  positions of the sequence that was saved last
 *   48  8  the hash of its tokens, see below
 *   56  4  0
 *   60  4  CRC-32C of bytes 0 to 59
 *
 * A record has a head, the keys and values, and zeros up to a multiple of 4096 bytes.
 *
 *    0  4  "RUN1"
 *    4  4  n: positions in it, 1 to 16
 *    8  8  number of the run
 *   16  8  hash of all tokens before it
 *   24 64  its tokens, 4 bytes each; those from n on are 0
 *   88  8 layers  CRC-32C of the keys of layer 0, of its values, of the keys of layer 1, ...
 *    +  4  CRC-32C of the head up to here; then zeros up to a multiple of 4096 bytes
 *    +     keys of layer 0, values of layer 0, keys of layer 1, ...: 16 rows each, as the cache has
 *          them; those from n on are 0
 *
 * Hashes are FNV-1a with 64 bits. That of no tokens is the hash of bytes 0 to 39 of FILE, and each
 * run's continues the one before it with the 4-byte numbers of its tokens. So a record is found
 * only by a sequence whose tokens up to there are the same, on the same model, lanes, types and
 * arithmetic.
 *
 *   cache_manifest_read, cache_manifest_write   FILE
 *   cache_lane_open, cache_lane_close           a lane's file and the heads of its records
 *   cache_lane_find, cache_lane_read            the record that begins like a run; its rows
 *   cache_lane_append, cache_lane_sync          a record more; wait for the disk */
#if !defined(INFER_CACHE_FILE_H)
#define INFER_CACHE_FILE_H

#include "model.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { CACHE_RUN = 16, CACHE_PAGE = 4096, CACHE_VERSION = 1, CACHE_MANIFEST = 64, CACHE_SAME = 40,
       CACHE_SUMS = 88, CACHE_LAYERS = 4096, CACHE_PATH = 4096, CACHE_VECTOR = 256 };

/* What writes to the disk, for tests that let it fail. */
#if !defined(CACHE_FILE_WRITE)
#define CACHE_FILE_WRITE pwrite
#define CACHE_FILE_SYNC fsync
#define CACHE_FILE_RENAME rename
#endif

typedef struct cache_shape {           /* what a run must have in common with a file */
    uint64_t model;
    uint32_t lanes, layers, dtype, row_bytes, arithmetic;
} cache_shape;

typedef struct cache_run {             /* the head of a record */
    int64_t run;
    uint64_t before;                   /* hash of the tokens before it */
    int32_t count;
    int32_t token[CACHE_RUN];
} cache_run;

/* Where the rows of a run are: those of part p, the keys or the values of a layer, at
 * first + p * apart. */
typedef struct cache_rows { uint8_t *first; size_t apart; } cache_rows;

typedef struct cache_lane {
    cache_shape shape;
    int fd;
    int64_t records;                   /* in the file */
    cache_run *index;                  /* [records]; count 0: damaged */
    uint8_t *record;                   /* a buffer for one */
    char path[CACHE_PATH];
} cache_lane;

/* -------------------------------------------------------------------------- numbers and sums */
static inline void cache_put(uint8_t *to, uint64_t x, int bytes) {
    for (int i = 0; i < bytes; i++) to[i] = (uint8_t)(x >> 8 * i);
}

static inline uint64_t cache_get(const uint8_t *from, int bytes) {
    uint64_t x = 0;
    for (int i = 0; i < bytes; i++) x |= (uint64_t)from[i] << 8 * i;
    return x;
}

typedef struct cache_crc { uint32_t of[8][256]; int fast; } cache_crc;

static inline void cache_crc_make(cache_crc *t) {
    t->fast = 0;
#if defined(__x86_64__)
    t->fast = !!__builtin_cpu_supports("sse4.2");
    if (t->fast) return;
#endif
    for (uint32_t i = 0; i < 256; i++) {
        t->of[0][i] = i;
        for (int bit = 0; bit < 8; bit++)
            t->of[0][i] = t->of[0][i] & 1 ? t->of[0][i] >> 1 ^ 0x82F63B78u : t->of[0][i] >> 1;
    }
    for (int k = 1; k < 8; k++)
        for (int i = 0; i < 256; i++)
            t->of[k][i] = t->of[k - 1][i] >> 8 ^ t->of[0][t->of[k - 1][i] & 255];
}

/* Continues with 8 bytes. */
static inline uint64_t cache_crc_word(const cache_crc *t, uint64_t crc, const uint8_t *p) {
    uint64_t x;
#if defined(__x86_64__)
    if (t->fast) {
        memcpy(&x, p, 8);
        __asm__("crc32q %1, %0" : "+r"(crc) : "r"(x));
        return crc;
    }
#endif
    x = cache_get(p, 8) ^ crc;
    crc = 0;
    for (int k = 0; k < 8; k++) crc ^= t->of[7 - k][x >> 8 * k & 255];
    return crc;
}

/* The sum of n bytes. */
static inline uint32_t cache_sum(const cache_crc *t, const uint8_t *p, size_t n) {
    uint64_t crc = 0xFFFFFFFFu;
    for (; n >= 8; p += 8, n -= 8) crc = cache_crc_word(t, crc, p);
    for (; n > 0; p++, n--) {
        crc ^= *p;
        for (int bit = 0; bit < 8; bit++) crc = crc & 1 ? crc >> 1 ^ 0x82F63B78u : crc >> 1;
    }
    return (uint32_t)~crc;
}

/* The sums of `parts` parts of n bytes, a multiple of 8. PERF: a word waits for the one before it,
 * so four parts go on at a time. */
static inline void cache_sums(const cache_crc *t, cache_rows at, size_t n, int64_t parts,
                              uint32_t *out) {
    int64_t i = 0;
    for (; i + 4 <= parts; i += 4) {
        const uint8_t *p = at.first + (size_t)i * at.apart;
        uint64_t a = 0xFFFFFFFFu, b = a, c = a, d = a;
        for (size_t k = 0; k < n; k += 8, p += 8) {
            a = cache_crc_word(t, a, p);
            b = cache_crc_word(t, b, p + at.apart);
            c = cache_crc_word(t, c, p + 2 * at.apart);
            d = cache_crc_word(t, d, p + 3 * at.apart);
        }
        out[i] = (uint32_t)~a;
        out[i + 1] = (uint32_t)~b;
        out[i + 2] = (uint32_t)~c;
        out[i + 3] = (uint32_t)~d;
    }
    for (; i < parts; i++) out[i] = cache_sum(t, at.first + (size_t)i * at.apart, n);
}

/* -------------------------------------------------------------------------- sizes and hashes */
static inline size_t cache_part_bytes(const cache_shape *s) {
    return (size_t)s->row_bytes * CACHE_RUN;
}

static inline size_t cache_head_bytes(const cache_shape *s) {
    return (CACHE_SUMS + 8 * (size_t)s->layers + 4 + CACHE_PAGE - 1) / CACHE_PAGE * CACHE_PAGE;
}

static inline size_t cache_record_bytes(const cache_shape *s) {
    const size_t rows = 2 * (size_t)s->layers * cache_part_bytes(s);
    return cache_head_bytes(s) + (rows + CACHE_PAGE - 1) / CACHE_PAGE * CACHE_PAGE;
}

static inline void cache_manifest_put(uint8_t *to, const cache_shape *s) {
    memset(to, 0, CACHE_MANIFEST);
    memcpy(to, "RAKVRUNS", 8);
    cache_put(to + 8, CACHE_VERSION, 4);
    cache_put(to + 12, s->lanes, 4);
    cache_put(to + 16, s->model, 8);
    cache_put(to + 24, s->layers, 4);
    cache_put(to + 28, s->dtype, 4);
    cache_put(to + 32, s->row_bytes, 4);
    cache_put(to + 36, s->arithmetic, 4);
}

/* The hash of no tokens. */
static inline uint64_t cache_hash_start(const cache_shape *s) {
    uint8_t m[CACHE_MANIFEST];
    cache_manifest_put(m, s);
    return infer_hash(14695981039346656037u, m, CACHE_SAME);
}

/* Continues the hash of what comes before n tokens. */
static inline uint64_t cache_hash(uint64_t before, const int32_t *tokens, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        uint8_t b[4];
        cache_put(b, (uint32_t)tokens[i], 4);
        before = infer_hash(before, b, 4);
    }
    return before;
}

/* Run `run` of the first `count` tokens. *hash is of the tokens before it, and becomes that of all
 * up to its end. */
static inline cache_run cache_run_of(const int32_t *tokens, int64_t run, int64_t count,
                                     uint64_t *hash) {
    const int64_t left = count - run * CACHE_RUN;
    cache_run x;
    memset(&x, 0, sizeof x);
    x.run = run;
    x.before = *hash;
    x.count = left < CACHE_RUN ? (int32_t)left : CACHE_RUN;
    memcpy(x.token, tokens + run * CACHE_RUN, (size_t)x.count * sizeof *x.token);
    *hash = cache_hash(*hash, x.token, x.count);
    return x;
}

/* -------------------------------------------------------------------------- the manifest */
static inline int cache_refuse(char *why, const char *path, const char *what) {
    return gguf_refuse(why, "%.150s: %.90s", path, what);
}

/* What differs between a manifest and a run. */
static inline int cache_manifest_same(const uint8_t *m, const cache_shape *s, const char *path,
                                      char *why) {
    static const char *const isa[] = { "arithmetic without vectors", "AVX2", "AVX-512" };
    const struct { int at, bytes; uint64_t here; const char *name; } all[] = {
        { 16, 8, s->model, "another model" }, { 24, 4, s->layers, "other layers" },
        { 28, 4, s->dtype, "another --cache" }, { 32, 4, s->row_bytes, "other heads" } };
    const uint64_t lanes = cache_get(m + 12, 4), arithmetic = cache_get(m + 36, 4);
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (cache_get(m + all[i].at, all[i].bytes) != all[i].here)
            return gguf_refuse(why, "%.150s is of %s", path, all[i].name);
    if (lanes != s->lanes)
        return gguf_refuse(why, "%.150s has %lu lanes, this run %lu", path, (unsigned long)lanes,
                           (unsigned long)s->lanes);
    if (arithmetic >> 24 != s->arithmetic >> 24)
        return gguf_refuse(why, "%.150s is of a run with chunks of %s 32 tokens", path,
                           arithmetic >> 24 ? "at most" : "more than");
    if (arithmetic >> 16 != s->arithmetic >> 16)
        return gguf_refuse(why, "%.150s is of a run %s --integers", path,
                           arithmetic >> 16 ? "with" : "without");
    if (arithmetic == s->arithmetic) return 1;
    return gguf_refuse(why, "%.150s has the bits of another processor (%s, attention %s; here %s, "
                       "%s)", path, isa[arithmetic % 256 % 3],
                       ra_isa_name((int32_t)(arithmetic >> 8 & 255)), isa[s->arithmetic % 256 % 3],
                       ra_isa_name((int32_t)(s->arithmetic >> 8 & 255)));
}

/* 1: FILE is there and of this shape. 0: `why` says why not, and *absent is 1 if there is none. */
static inline int cache_manifest_read(const char *path, const cache_shape *s, int *absent,
                                      char *why) {
    uint8_t m[CACHE_MANIFEST + 1];
    cache_crc t;
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    const ssize_t n = fd < 0 ? -1 : pread(fd, m, sizeof m, 0);
    const int error = errno;
    *absent = fd < 0 && error == ENOENT;
    if (fd >= 0) close(fd);
    if (n < 0) return cache_refuse(why, path, strerror(error));
    cache_crc_make(&t);
    if (n < 8 || memcmp(m, "RAKVRUNS", 8)) return cache_refuse(why, path, "is no saved cache");
    if (n != CACHE_MANIFEST || cache_get(m + 60, 4) != cache_sum(&t, m, 60))
        return cache_refuse(why, path, "is damaged");
    if (cache_get(m + 8, 4) != CACHE_VERSION)
        return gguf_refuse(why, "%.150s has version %lu of the format; this program knows 1", path,
                           (unsigned long)cache_get(m + 8, 4));
    return cache_manifest_same(m, s, path, why);
}

/* Waits until a folder's names are on the disk. */
static inline void cache_folder_sync(const char *path) {
    char folder[CACHE_PATH];
    char *end;
    int fd;
    snprintf(folder, sizeof folder, "%s", path);
    end = strrchr(folder, '/');
    if (end == folder) end++;
    if (end) *end = 0;
    fd = open(end ? folder : ".", O_RDONLY | O_CLOEXEC);
    if (fd < 0) return;
    (void)fsync(fd);                   /* some systems cannot, and need not */
    close(fd);
}

/* Replaces FILE. writer: a number that no other process which writes it has. */
static inline int cache_manifest_write(const char *path, const cache_shape *s, int32_t writer,
                                       int64_t tokens, uint64_t hash, char *why) {
    char part[CACHE_PATH + 24];
    uint8_t m[CACHE_MANIFEST];
    cache_crc t;
    int fd, ok;
    snprintf(part, sizeof part, "%s.part%ld", path, (long)writer);
    cache_crc_make(&t);
    cache_manifest_put(m, s);
    cache_put(m + 40, (uint64_t)tokens, 8);
    cache_put(m + 48, hash, 8);
    cache_put(m + 60, cache_sum(&t, m, 60), 4);
    errno = 0;
    fd = open(part, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    ok = fd >= 0;
    ok = ok && CACHE_FILE_WRITE(fd, m, sizeof m, 0) == (ssize_t)sizeof m;
    ok = ok && CACHE_FILE_SYNC(fd) == 0;
    if (fd >= 0) ok = close(fd) == 0 && ok;
    ok = ok && CACHE_FILE_RENAME(part, path) == 0;
    if (!ok) {
        (void)cache_refuse(why, part, errno ? strerror(errno) : "the disk is full");
        (void)unlink(part);
        return 0;
    }
    cache_folder_sync(path);
    return 1;
}

/* -------------------------------------------------------------------------- a lane */
static inline void cache_lane_close(cache_lane *l) {
    if (l->fd >= 0) close(l->fd);
    free(l->index);
    free(l->record);
    memset(l, 0, sizeof *l);
    l->fd = -1;
}

/* Takes the head of a record apart. 0: it is damaged. */
static inline int cache_head_get(const cache_shape *s, const uint8_t *head, cache_run *out) {
    const size_t n = CACHE_SUMS + 8 * (size_t)s->layers;
    cache_crc t;
    cache_crc_make(&t);
    memset(out, 0, sizeof *out);
    if (memcmp(head, "RUN1", 4) || cache_get(head + n, 4) != cache_sum(&t, head, n)) return 0;
    out->count = (int32_t)cache_get(head + 4, 4);
    out->run = (int64_t)cache_get(head + 8, 8);
    out->before = cache_get(head + 16, 8);
    for (int i = 0; i < CACHE_RUN; i++)
        out->token[i] = (int32_t)cache_get(head + 24 + 4 * i, 4);
    return out->count >= 1 && out->count <= CACHE_RUN;
}

static inline int cache_lane_index(cache_lane *l, char *why) {
    const size_t head = cache_head_bytes(&l->shape), record = cache_record_bytes(&l->shape);
    l->index = (cache_run *)calloc((size_t)l->records + 1, sizeof *l->index);
    if (!l->index) return cache_refuse(why, l->path, "no memory");
    for (int64_t i = 0; i < l->records; i++) {
        cache_run *run = &l->index[i];
        if (pread(l->fd, l->record, head, (off_t)((size_t)i * record)) != (ssize_t)head ||
            !cache_head_get(&l->shape, l->record, run))
            run->count = 0;
    }
    return 1;
}

/* 1: the file is empty, ends inside its first record, or has a whole record. Nothing is appended to
 * other files. */
static inline int cache_is_lane(const cache_lane *l) {
    uint8_t first[4] = { 0 };
    const ssize_t n = pread(l->fd, first, 4, 0);
    for (int64_t i = 0; i < l->records; i++)
        if (l->index[i].count) return 1;
    return n >= 0 && (!memcmp(first, "RUN1", (size_t)n) || !memcmp(first, "\0\0\0", (size_t)n));
}

/* Opens a lane's file, to append if `append`, which makes the file if there is none. `index`: reads
 * the heads of its records. */
static inline int cache_lane_open(cache_lane *l, const char *path, const cache_shape *s,
                                  int32_t lane, int append, int index, char *why) {
    struct stat about;
    memset(l, 0, sizeof *l);
    l->shape = *s;
    snprintf(l->path, sizeof l->path, "%.*s.%ld", CACHE_PATH - 16, path, (long)lane);
    l->fd = open(l->path, (append ? O_RDWR | O_CREAT : O_RDONLY) | O_CLOEXEC | O_NONBLOCK, 0666);
    if (l->fd < 0) (void)cache_refuse(why, l->path, strerror(errno));
    else if (append && flock(l->fd, LOCK_EX | LOCK_NB) && errno == EWOULDBLOCK)
        (void)cache_refuse(why, l->path, "another process saves to it");
    else if (fstat(l->fd, &about)) (void)cache_refuse(why, l->path, strerror(errno));
    else if (!S_ISREG(about.st_mode)) (void)cache_refuse(why, l->path, "is no regular file");
    else {
        l->records = (int64_t)((size_t)about.st_size / cache_record_bytes(s));
        l->record = (uint8_t *)malloc(cache_record_bytes(s));
        if (!l->record) (void)cache_refuse(why, l->path, "no memory");
        else if (!index) return 1;
        else if (cache_lane_index(l, why)) {
            if (!append || cache_is_lane(l)) return 1;
            (void)cache_refuse(why, l->path, "is no lane of a saved cache");
        }
    }
    cache_lane_close(l);
    return 0;
}

/* How many tokens of a record are those of a run. */
static inline int32_t cache_match(const cache_run *have, const cache_run *want) {
    int32_t n = 0;
    if (have->run != want->run || have->before != want->before) return 0;
    while (n < have->count && n < want->count && have->token[n] == want->token[n]) n++;
    return n;
}

/* The record before number `end` that has the most tokens of a run, the newest of them, and how
 * many. -1: none. Record `guess` is looked at first. */
static inline int64_t cache_lane_find(const cache_lane *l, const cache_run *want, int64_t end,
                                      int64_t guess, int32_t *matching) {
    int64_t best = -1;
    *matching = 0;
    if (guess >= 0 && guess < end && cache_match(&l->index[guess], want) == want->count) {
        *matching = want->count;
        return guess;
    }
    for (int64_t i = end - 1; i >= 0 && *matching < want->count; i--) {
        const int32_t n = cache_match(&l->index[i], want);
        if (n <= *matching) continue;
        *matching = n;
        best = i;
    }
    return best;
}

/* Reads n bytes at a place of the file into parts of memory. */
static inline int cache_read_parts(int fd, off_t at, cache_rows to, size_t bytes, int64_t parts) {
    struct iovec v[CACHE_VECTOR];
    for (int64_t i = 0; i < parts;) {
        const int64_t most = CACHE_VECTOR, n = parts - i < most ? parts - i : most;
        for (int64_t k = 0; k < n; k++) {
            v[k].iov_base = to.first + (size_t)(i + k) * to.apart;
            v[k].iov_len = bytes;
        }
        if (preadv(fd, v, (int)n, at) != (ssize_t)((size_t)n * bytes)) return 0;
        at += (off_t)((size_t)n * bytes);
        i += n;
    }
    return 1;
}

/* Reads the rows of a record. 0: it is damaged, and the rows are undefined. Several threads may
 * read from one lane. */
static inline int cache_lane_read(const cache_lane *l, int64_t record, cache_rows to) {
    const cache_shape *s = &l->shape;
    const size_t head = cache_head_bytes(s), part = cache_part_bytes(s);
    const int64_t parts = 2 * (int64_t)s->layers;
    const off_t at = (off_t)((size_t)record * cache_record_bytes(s));
    uint8_t *raw = (uint8_t *)malloc(head + 4 * (size_t)parts);
    uint32_t *sums = (uint32_t *)(void *)(raw + head);
    cache_run run;
    cache_crc t;
    int ok = raw && pread(l->fd, raw, head, at) == (ssize_t)head &&
             cache_head_get(s, raw, &run) && !memcmp(&run, &l->index[record], sizeof run) &&
             cache_read_parts(l->fd, at + (off_t)head, to, part, parts);
    cache_crc_make(&t);
    if (ok) cache_sums(&t, to, part, parts, sums);
    for (int64_t i = 0; i < parts && ok; i++)
        ok = cache_get(raw + CACHE_SUMS + 4 * i, 4) == sums[i];
    free(raw);
    return ok;
}

/* Writes a record after the last. 0: it is not there, and the next one will be in its place. */
static inline int cache_lane_append(cache_lane *l, const cache_run *run, cache_rows from,
                                    char *why) {
    const cache_shape *s = &l->shape;
    const size_t head = cache_head_bytes(s), part = cache_part_bytes(s);
    const size_t bytes = cache_record_bytes(s), sums = CACHE_SUMS + 8 * (size_t)s->layers;
    const off_t at = (off_t)((size_t)l->records * bytes);
    cache_rows rows;
    cache_crc t;
    ssize_t n = 0;
    memset(l->record, 0, bytes);
    cache_crc_make(&t);
    memcpy(l->record, "RUN1", 4);
    cache_put(l->record + 4, (uint32_t)run->count, 4);
    cache_put(l->record + 8, (uint64_t)run->run, 8);
    cache_put(l->record + 16, run->before, 8);
    rows.first = l->record + head;
    rows.apart = part;
    for (int32_t i = 0; i < run->count; i++)
        cache_put(l->record + 24 + 4 * i, (uint32_t)run->token[i], 4);
    for (size_t i = 0; i < 2 * (size_t)s->layers; i++)
        memcpy(rows.first + i * part, from.first + i * from.apart,
               (size_t)run->count * s->row_bytes);
    for (size_t i = 0; i < 2 * (size_t)s->layers; i++)
        cache_put(l->record + CACHE_SUMS + 4 * i, cache_sum(&t, rows.first + i * part, part), 4);
    cache_put(l->record + sums, cache_sum(&t, l->record, sums), 4);
    for (size_t done = 0; done < bytes; done += (size_t)n) {
        errno = 0;
        n = CACHE_FILE_WRITE(l->fd, l->record + done, bytes - done, at + (off_t)done);
        if (n <= 0)
            return cache_refuse(why, l->path, errno ? strerror(errno) : "the disk is full");
    }
    l->records++;
    return 1;
}

static inline int cache_lane_sync(cache_lane *l, char *why) {
    return CACHE_FILE_SYNC(l->fd) == 0 ? 1 : cache_refuse(why, l->path, strerror(errno));
}

#endif
