/* Characters: UTF-8, the classes that rules for words need, and NFC.
 *
 *   utf8_read, utf8_write      a character
 *   unicode_is                 whether a character is of one of the UNICODE_ classes
 *   unicode_nfc                a text with its characters composed
 *
 * Tables of classes are pairs of "gap since the end of the last range" and "length of this range,
 * less one". The others are rows of three: unicode_parts has a character and its two parts, or one
 * part and 0; unicode_joins has the rows of it that NFC composes, by their parts; unicode_orders
 * has the first and the last of a range of marks, and their combining class. */
#if !defined(INFER_UNICODE_H)
#define INFER_UNICODE_H

#include "unicode_tables.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

/* -------------------------------------------------------------------------- UTF-8 */
/* Reads the character at s; returns its length. A byte that begins no character counts as one. */
static inline int utf8_read(const char *s, size_t n, uint32_t *c) {
    const uint8_t *p = (const uint8_t *)s;
    const int len = p[0] < 0x80 ? 1 : p[0] < 0xC2 ? 0 : p[0] < 0xE0 ? 2 : p[0] < 0xF0 ? 3
                  : p[0] < 0xF5 ? 4 : 0;
    *c = len == 1 ? p[0] : 0xFFFD;
    if (len < 2 || (size_t)len > n) return 1;
    uint32_t x = p[0] & (0x7Fu >> len);
    for (int i = 1; i < len; i++) {
        if ((p[i] & 0xC0) != 0x80) return 1;
        x = x << 6 | (p[i] & 0x3Fu);
    }
    if ((len == 3 && (x < 0x800 || (x >= 0xD800 && x < 0xE000))) ||
        (len == 4 && (x < 0x10000 || x > 0x10FFFF)))
        return 1;
    *c = x;
    return len;
}

static inline int utf8_write(uint32_t c, char *s) {
    const int len = c < 0x80 ? 1 : c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
    if (len == 1) {
        s[0] = (char)c;
        return 1;
    }
    for (int i = len - 1; i > 0; i--, c >>= 6) s[i] = (char)(0x80 | (c & 63));
    s[0] = (char)((0xF00u >> len & 0xFF) | c);
    return len;
}

/* -------------------------------------------------------------------------- classes
 * The categories L, N, M, Lu and Lt, Ll, P and S, and P; and letters with a case. */
enum { UNICODE_LETTER, UNICODE_NUMBER, UNICODE_MARK, UNICODE_CAPITAL, UNICODE_SMALL, UNICODE_SIGN,
       UNICODE_PUNCTUATION, UNICODE_CASED };

static inline int unicode_is(int class_of, uint32_t c) {
#define UNICODE_TABLE(x) { x, sizeof x / sizeof *x }
    static const struct { const uint32_t *pairs; size_t n; } all[] = {
        UNICODE_TABLE(unicode_letters), UNICODE_TABLE(unicode_numbers),
        UNICODE_TABLE(unicode_marks), UNICODE_TABLE(unicode_capitals),
        UNICODE_TABLE(unicode_smalls), UNICODE_TABLE(unicode_signs),
        UNICODE_TABLE(unicode_punctuation), UNICODE_TABLE(unicode_cased) };
#undef UNICODE_TABLE
    uint32_t at = 0;
    if (c < 128 && class_of == UNICODE_LETTER) return (c | 32) >= 'a' && (c | 32) <= 'z';
    if (c < 128 && class_of == UNICODE_NUMBER) return c >= '0' && c <= '9';
    for (size_t i = 0; i < all[class_of].n; i += 2) {
        at += all[class_of].pairs[i];
        if (c < at) return 0;
        at += all[class_of].pairs[i + 1];
        if (c <= at) return 1;
    }
    return 0;
}

static inline int unicode_space(uint32_t c) {          /* White_Space */
    return (c >= 9 && c <= 13) || c == 32 || c == 0x85 || c == 0xA0 || c == 0x1680 ||
           (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F ||
           c == 0x205F || c == 0x3000;
}

/* -------------------------------------------------------------------------- NFC
 * Characters are split into their parts, marks sorted by their class, and parts composed again. A
 * byte that is no character is kept, as NFC_BYTE + byte. */
enum { NFC_BYTE = 0x110000, NFC_PARTS = 4 };

typedef struct nfc_char { uint32_t c, order; size_t at; } nfc_char;

/* The combining class; 0: no mark that moves. */
static inline uint32_t nfc_order(uint32_t c) {
    size_t low = 0, high = sizeof unicode_orders / sizeof *unicode_orders / 3;
    const size_t n = high;
    while (low < high) {
        const size_t middle = (low + high) / 2;
        if (c > unicode_orders[3 * middle + 1]) low = middle + 1;
        else high = middle;
    }
    return low < n && c >= unicode_orders[3 * low] ? unicode_orders[3 * low + 2] : 0;
}

/* Writes the parts of a character, up to NFC_PARTS; returns how many. */
static inline int nfc_split(uint32_t c, nfc_char *to) {
    const uint32_t hangul = c - 0xAC00;
    size_t low = 0, high = sizeof unicode_parts / sizeof *unicode_parts / 3;
    const size_t n = high;
    int count;
    to[0].c = c;
    if (hangul < 11172) {
        to[0].c = 0x1100 + hangul / 588;
        to[1].c = 0x1161 + hangul % 588 / 28;
        to[2].c = 0x11A7 + hangul % 28;
        return hangul % 28 ? 3 : 2;
    }
    while (low < high) {
        const size_t middle = (low + high) / 2;
        if (c > unicode_parts[3 * middle]) low = middle + 1;
        else high = middle;
    }
    if (low == n || unicode_parts[3 * low] != c) return 1;
    count = nfc_split(unicode_parts[3 * low + 1], to);
    if (unicode_parts[3 * low + 2]) to[count++].c = unicode_parts[3 * low + 2];
    return count;
}

/* What two characters compose; 0: nothing. */
static inline uint32_t nfc_join(uint32_t a, uint32_t b) {
    size_t low = 0, high = sizeof unicode_joins / sizeof *unicode_joins;
    const size_t n = high;
    const uint32_t *row;
    if (a - 0x1100 < 19 && b - 0x1161 < 21) return 0xAC00 + ((a - 0x1100) * 21 + b - 0x1161) * 28;
    if (a - 0xAC00 < 11172 && (a - 0xAC00) % 28 == 0 && b - 0x11A8 < 27) return a + b - 0x11A7;
    while (low < high) {
        const size_t middle = (low + high) / 2;
        row = unicode_parts + 3 * unicode_joins[middle];
        if (a > row[1] || (a == row[1] && b > row[2])) low = middle + 1;
        else high = middle;
    }
    if (low == n) return 0;
    row = unicode_parts + 3 * unicode_joins[low];
    return row[1] == a && row[2] == b ? row[0] : 0;
}

static inline int nfc_compare(const void *a, const void *b) {
    const nfc_char *x = (const nfc_char *)a, *y = (const nfc_char *)b;
    if (x->order != y->order) return x->order < y->order ? -1 : 1;
    return x->at < y->at ? -1 : x->at > y->at;
}

/* Splits a text and sorts its marks. part: room for NFC_PARTS per byte. Returns how many. */
static inline size_t nfc_sorted(const char *s, size_t n, nfc_char *part) {
    size_t count = 0, marks = 0;
    for (size_t i = 0; i < n;) {
        uint32_t c;
        const int len = utf8_read(s + i, n - i, &c);
        int parts = 1;
        if (len == 1 && c > 127) part[count].c = NFC_BYTE + (uint8_t)s[i];
        else parts = nfc_split(c, part + count);
        i += (size_t)len;
        for (; parts; parts--, count++) {
            part[count].at = count;
            part[count].order = nfc_order(part[count].c);
            if (part[count].order) continue;
            qsort(part + marks, count - marks, sizeof *part, nfc_compare);
            marks = count + 1;
        }
    }
    qsort(part + marks, count - marks, sizeof *part, nfc_compare);
    return count;
}

/* Composes the parts in place. Returns how many are left. */
static inline size_t nfc_composed(nfc_char *part, size_t count) {
    size_t left = 0, start = 0;
    uint32_t last = 256;               /* class of the last part that stays after the start */
    for (size_t i = 0; i < count; i++) {
        const uint32_t both = last < 256 && (last < part[i].order || last == 0)
                            ? nfc_join(part[start].c, part[i].c) : 0;
        if (both) {
            part[start].c = both;
            continue;
        }
        if (part[i].order == 0) start = left;
        if (part[i].order == 0 || last < 256) last = part[i].order;
        part[left++] = part[i];
    }
    return left;
}

/* The text in NFC, in memory that the caller frees, and its size; null: no memory. */
static inline char *unicode_nfc(const char *s, size_t n, size_t *size) {
    nfc_char *part = n < SIZE_MAX / NFC_PARTS / sizeof *part
                   ? (nfc_char *)malloc((NFC_PARTS * n + 1) * sizeof *part) : NULL;
    char *out = part ? (char *)malloc(4 * NFC_PARTS * n + 1) : NULL;
    *size = 0;
    if (out) {
        const size_t count = nfc_composed(part, nfc_sorted(s, n, part));
        for (size_t i = 0; i < count; i++) {
            if (part[i].c >= NFC_BYTE) out[(*size)++] = (char)(part[i].c - NFC_BYTE);
            else *size += (size_t)utf8_write(part[i].c, out + *size);
        }
    }
    free(part);
    return out;
}

/* 1: the text may not be in NFC. Characters below U+0300 are. */
static inline int unicode_may_compose(const char *s, size_t n) {
    for (size_t i = 0; i < n; i++)
        if ((uint8_t)s[i] >= 0xCC) return 1;
    return 0;
}

#endif
