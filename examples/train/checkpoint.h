/* Checkpoints. PREFIX.a.state and PREFIX.b.state take turns: each has the weights and AdamW's two
 * averages of every parameter, under its name, with a CRC-32C of each part. PREFIX.manifest says
 * which of the two is valid. A save writes the other one, and then the manifest beside its place;
 * a rename puts it there. Each file and then the folder is flushed to the disk in this order. So a
 * save that is killed at any point leaves the manifest of the checkpoint before it.
 *
 * Nothing in it depends on ranks: gradients are zero between two steps. */
#if !defined(TRAIN_CHECKPOINT_H)
#define TRAIN_CHECKPOINT_H

#include "net.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <sys/stat.h>
#include <unistd.h>

enum { TRAIN_WHY = 512, TRAIN_PATH = 4096, TRAIN_STEPS = 100000000 };

typedef struct checkpoint {
    uint64_t configuration, text;      /* hashes: what shapes a run, and its text */
    net_shape shape;
    int64_t step;
} checkpoint;

static inline __attribute__((format(printf, 2, 3))) int train_refuse(char *why, const char *format,
                                                                     ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(why, TRAIN_WHY, format, args);
    va_end(args);
    return 0;
}

static inline uint32_t train_crc(uint32_t crc, const void *data, size_t n) {
    static uint32_t table[256];
    const uint8_t *p = (const uint8_t *)data;
    for (uint32_t i = 0; i < 256 && !table[255]; i++) {
        uint32_t x = i;
        for (int k = 0; k < 8; k++) x = x >> 1 ^ (x & 1 ? 0x82F63B78u : 0);
        table[i] = x;
    }
    crc = ~crc;
    while (n--) crc = table[(crc ^ *p++) & 255] ^ crc >> 8;
    return ~crc;
}

static inline uint64_t train_hash(uint64_t h, const void *data, size_t n) {            /* FNV-1a */
    const uint8_t *p = (const uint8_t *)data;
    while (n--) h = (h ^ *p++) * 0x100000001B3u;
    return h;
}

/* -------------------------------------------------------------------------- files */
/* Flushes what a folder lists. */
static inline int train_flush_folder(const char *path) {
    char folder[TRAIN_PATH];
    char *slash;
    snprintf(folder, sizeof folder, "%s", path);
    slash = strrchr(folder, '/');
    if (slash) slash[slash == folder] = 0;
    const int fd = open(slash ? folder : ".", O_RDONLY);
    if (fd < 0) return 0;
    const int ok = fsync(fd) == 0 || errno == EINVAL;      /* some file systems have no such call */
    close(fd);
    return ok;
}

/* Ends the writing of a file: 1 if all of it is on the disk. */
static inline int train_end_file(FILE *f, int ok) {
    ok = fflush(f) == 0 && ok && fsync(fileno(f)) == 0;
    return fclose(f) == 0 && ok;
}

/* A whole file, or null; the caller frees it. */
static inline uint8_t *train_read(const char *path, size_t *bytes) {
    struct stat s;
    FILE *f = fopen(path, "rb");
    uint8_t *p = NULL;
    if (f && !fstat(fileno(f), &s) && S_ISREG(s.st_mode))
        p = (uint8_t *)malloc((size_t)s.st_size + 1);
    if (p) {
        *bytes = (size_t)s.st_size;
        if (fread(p, 1, *bytes, f) != *bytes) { free(p); p = NULL; }
    }
    if (f) fclose(f);
    return p;
}

/* -------------------------------------------------------------------------- the manifest */
typedef struct manifest { checkpoint c; int slot; size_t bytes; uint32_t crc; } manifest;

static inline int manifest_text(const manifest *m, char *out, size_t room) {
    const net_shape *s = &m->c.shape;
    const int n = snprintf(out, room, "ring_train 1\nmodel %lld %lld %lld %lld %lld %lld\n"
                           "configuration %016llx\ntext %016llx\nstep %lld\nstate %c\n"
                           "bytes %llu\ncrc %08x\n", (long long)s->layers, (long long)s->hidden,
                           (long long)s->heads, (long long)s->kv_heads, (long long)s->feed,
                           (long long)s->tied, (unsigned long long)m->c.configuration,
                           (unsigned long long)m->c.text, (long long)m->c.step, 'a' + m->slot,
                           (unsigned long long)m->bytes, (unsigned)m->crc);
    return n + snprintf(out + n, room - (size_t)n, "end %08x\n",
                        (unsigned)train_crc(0, out, (size_t)n));
}

/* 1: read. 0: damaged, see why. -1: there is none. The numbers are those that options can have. */
static inline int manifest_read(const char *prefix, manifest *m, char *why) {
    static const long long least[] = { 1, 16, 1, 1, 16, 0 };
    static const long long most[] = { 1024, 65536, 1024, 1024, 1 << 20, 1 };
    char path[TRAIN_PATH], text[512] = "", again[512], slot = 0;
    unsigned long long configuration = 0, hash = 0, bytes = 0;
    long long step = 0, x[6] = { 0 };
    unsigned crc = 0;
    int possible;
    snprintf(path, sizeof path, "%s.manifest", prefix);
    FILE *f = fopen(path, "rb");
    if (!f && errno == ENOENT) return -1;
    if (!f) return train_refuse(why, "%s: %s", path, strerror(errno));
    text[fread(text, 1, sizeof text - 1, f)] = 0;
    fclose(f);
    if (sscanf(text, "ring_train 1\nmodel %lld %lld %lld %lld %lld %lld\nconfiguration %llx\n"
                     "text %llx\nstep %lld\nstate %c\nbytes %llu\ncrc %x\n", &x[0], &x[1], &x[2],
                     &x[3], &x[4], &x[5], &configuration, &hash, &step, &slot, &bytes, &crc) != 12)
        return train_refuse(why, "%s: this is no manifest of ring_train, version 1", path);
    possible = step >= 0 && step <= TRAIN_STEPS;
    for (int i = 0; i < 6; i++) possible = possible && x[i] >= least[i] && x[i] <= most[i];
    const net_shape shape = { x[0], x[2], x[3], possible ? x[1] / x[2] : 0, x[1], x[4], x[5] };
    m->c.shape = shape;
    m->c.configuration = configuration;
    m->c.text = hash;
    m->c.step = step;
    m->slot = slot - 'a';
    m->bytes = (size_t)bytes;
    m->crc = crc;
    manifest_text(m, again, sizeof again);
    if (!strcmp(text, again) && (m->slot == 0 || m->slot == 1) && possible) return 1;
    return train_refuse(why, "%s: its checksum does not match, or a number in it is not possible: "
                        "the file is damaged", path);
}

/* -------------------------------------------------------------------------- save and load */
/* A part: 64 bytes of name, int64 count, uint32 CRC-32C, uint32 0, then its floats. */
typedef struct part_head { char name[64]; int64_t count; uint32_t crc, zero; } part_head;

static inline void part_of(const net *n, int64_t k, int which, part_head *h, float **data) {
    const net_tensor *t = &n->tensor[k];
    memset(h, 0, sizeof *h);
    snprintf(h->name, sizeof h->name, "%s", t->name);
    h->name[sizeof h->name - 1] = (char)('0' + which);
    h->count = t->rows * t->columns;
    *data = (which == 0 ? n->w : which == 1 ? n->m : n->v) + t->at;
}

/* Saves; 0: see why, and the checkpoint before this one is still valid. */
static inline int checkpoint_save(const char *prefix, const net *n, const checkpoint *c,
                                  char *why) {
    char path[TRAIN_PATH], final[TRAIN_PATH], text[512];
    manifest old, m;
    part_head h;
    float *data;
    int ok = 1, length;
    memset(&old, 0, sizeof old);
    memset(&m, 0, sizeof m);
    const int found = manifest_read(prefix, &old, why);
    if (!found) return 0;
    m.c = *c;
    m.slot = found == 1 ? !old.slot : 0;
    snprintf(path, sizeof path, "%s.%c.state", prefix, 'a' + m.slot);
    FILE *f = fopen(path, "wb");
    if (!f) return train_refuse(why, "%s: %s", path, strerror(errno));
    for (int64_t k = 0; k < n->tensors * 3 && ok; k++) {
        part_of(n, k / 3, (int)(k % 3), &h, &data);
        h.crc = train_crc(0, data, (size_t)h.count * sizeof *data);
        m.crc = train_crc(m.crc, &h, sizeof h);
        m.bytes += sizeof h + (size_t)h.count * sizeof *data;
        ok = fwrite(&h, sizeof h, 1, f) == 1 &&
             fwrite(data, sizeof *data, (size_t)h.count, f) == (size_t)h.count;
    }
    if (!train_end_file(f, ok) || !train_flush_folder(path))
        return train_refuse(why, "%s: %s; the checkpoint before it is unharmed", path,
                            strerror(errno));
    length = manifest_text(&m, text, sizeof text);
    snprintf(path, sizeof path, "%s.manifest.new", prefix);
    snprintf(final, sizeof final, "%s.manifest", prefix);
    f = fopen(path, "wb");
    if (!f || !train_end_file(f, fwrite(text, 1, (size_t)length, f) == (size_t)length) ||
        rename(path, final) || !train_flush_folder(final))
        return train_refuse(why, "%s: %s; the checkpoint before it is unharmed", path,
                            strerror(errno));
    return 1;
}

/* Loads into n and c->step if the checkpoint is of c's configuration and text (0: of any) and
 * undamaged. 1: loaded. 0: see why; n is as it was. -1: there is none. */
static inline int checkpoint_load(const char *prefix, net *n, checkpoint *c, char *why) {
    char path[TRAIN_PATH];
    manifest m;
    part_head h, want;
    float *data;
    size_t bytes = 0, at = 0;
    uint32_t crc = 0;
    const int found = manifest_read(prefix, &m, why);
    if (found < 1) return found;
    if (c->configuration && m.c.configuration != c->configuration)
        return train_refuse(why, "%s.manifest: it is of a run with other options: model, schedule, "
                            "seed and layout of the tokens must be the same", prefix);
    if (c->text && m.c.text != c->text)
        return train_refuse(why, "%s.manifest: it is of a run over another text", prefix);
    snprintf(path, sizeof path, "%s.%c.state", prefix, 'a' + m.slot);
    uint8_t *file = train_read(path, &bytes);
    if (!file) return train_refuse(why, "%s: it cannot be read: %s", path, strerror(errno));
    int ok = bytes == m.bytes;
    for (int64_t k = 0; k < n->tensors * 3 && ok; k++) {   /* all before anything is used */
        part_of(n, k / 3, (int)(k % 3), &want, &data);
        const size_t size = (size_t)want.count * sizeof *data;
        ok = bytes - at >= sizeof h + size;
        if (!ok) break;
        memcpy(&h, file + at, sizeof h);
        crc = train_crc(crc, &h, sizeof h);
        ok = !memcmp(h.name, want.name, sizeof h.name) && h.count == want.count && !h.zero &&
             h.crc == train_crc(0, file + at + sizeof h, size);
        at += sizeof h + size;
    }
    ok = ok && at == bytes && crc == m.crc;
    for (int64_t k = 0, from = 0; k < n->tensors * 3 && ok; k++) {
        part_of(n, k / 3, (int)(k % 3), &want, &data);
        memcpy(data, file + from + (int64_t)sizeof h, (size_t)want.count * sizeof *data);
        from += (int64_t)sizeof h + want.count * (int64_t)sizeof *data;
    }
    free(file);
    if (!ok) return train_refuse(why, "%s: it is damaged or cut: lengths or checksums differ from "
                                 "those of the manifest", path);
    c->step = m.c.step;
    c->text = m.c.text;
    return 1;
}

#endif
