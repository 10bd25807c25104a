/* The text to learn from: a file, or all files of a folder and its folders in the order of their
 * names. A byte 0 stands before each file. Links and files with a byte 0 (which are no text) are
 * left out. */
#if !defined(TRAIN_TEXT_H)
#define TRAIN_TEXT_H

#include "checkpoint.h"

#include <dirent.h>

typedef struct train_text {
    uint8_t *data;
    size_t size, room, files, left_out;
    const char *without;               /* names, with commas between them, or null */
    dev_t device;                      /* of the file or folder that is left out; inode 0: none */
    ino_t inode;
} train_text;

static inline int text_leave_out(train_text *t, const char *path, char *why) {
    struct stat s;
    if (stat(path, &s)) return train_refuse(why, "%s: %s", path, strerror(errno));
    t->device = s.st_dev;
    t->inode = s.st_ino;
    return 1;
}

static inline int text_add(train_text *t, const char *path, char *why) {
    size_t bytes = 0;
    uint8_t *file = train_read(path, &bytes);
    if (!file) return train_refuse(why, "%s: it cannot be read: %s", path, strerror(errno));
    if (memchr(file, 0, bytes)) {
        t->left_out++;
        free(file);
        return 1;
    }
    if (t->size + bytes + 1 > t->room) {
        t->room = 2 * (t->size + bytes + 1);
        uint8_t *more = (uint8_t *)realloc(t->data, t->room);
        if (!more) {
            free(file);
            return train_refuse(why, "%s: no memory for this text", path);
        }
        t->data = more;
    }
    t->data[t->size] = 0;
    memcpy(t->data + t->size + 1, file, bytes);
    t->size += bytes + 1;
    t->files++;
    free(file);
    return 1;
}

/* 1: a name is in the list. */
static inline int text_is_without(const train_text *t, const char *name) {
    const size_t n = strlen(name);
    for (const char *s = t->without; s && *s; s = strchr(s, ',') ? strchr(s, ',') + 1 : NULL)
        if (!strncmp(s, name, n) && (!s[n] || s[n] == ',')) return 1;
    return 0;
}

static inline int text_open(train_text *t, const char *path, int depth, char *why) {
    struct dirent **entry = NULL;
    struct stat s;
    int ok = 1;
    if (depth > 40 || lstat(path, &s))
        return train_refuse(why, "%s: %s", path, depth > 40 ? "folders are too deep"
                                                            : strerror(errno));
    if (S_ISLNK(s.st_mode) && depth == 0 && stat(path, &s))
        return train_refuse(why, "%s: %s", path, strerror(errno));
    if (t->inode && s.st_ino == t->inode && s.st_dev == t->device) return 1;
    if (S_ISREG(s.st_mode)) return text_add(t, path, why);
    if (!S_ISDIR(s.st_mode) && depth) return 1;
    if (!S_ISDIR(s.st_mode))
        return train_refuse(why, "%s: it is neither a file nor a folder", path);
    const int n = scandir(path, &entry, NULL, alphasort);
    if (n < 0) return train_refuse(why, "%s: %s", path, strerror(errno));
    for (int i = 0; i < n; i++) {
        char full[TRAIN_PATH];
        const int length = snprintf(full, sizeof full, "%s/%s", path, entry[i]->d_name);
        if (ok && length < (int)sizeof full && entry[i]->d_name[0] != '.' &&
            !text_is_without(t, entry[i]->d_name))
            ok = text_open(t, full, depth + 1, why);
        free(entry[i]);
    }
    free(entry);
    return ok;
}

#endif
