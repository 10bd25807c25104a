/* Text to tokens and back, by the vocabulary in a GGUF file: byte-level BPE ("gpt2", with the rules
 * for words in word_rules below), SentencePiece ("llama") and BPE of characters ("gemma4"). In the
 * last two, blanks are U+2581, and characters without a token become tokens of their bytes. All
 * join two neighbours at a time, the best two first: for BPE those of the lowest merge, for
 * SentencePiece those whose result has the highest score. */
#if !defined(INFER_TOKENIZER_H)
#define INFER_TOKENIZER_H

#include "gguf.h"
#include "unicode.h"

enum { TOKENIZER_NONE, TOKENIZER_BPE, TOKENIZER_SPM, TOKENIZER_CHARS };
enum { TOKEN_NORMAL = 1, TOKEN_UNKNOWN, TOKEN_CONTROL, TOKEN_USER, TOKEN_UNUSED, TOKEN_BYTE };

typedef struct token_ids { int32_t *data; int64_t count, room; } token_ids;

typedef struct token_merge { int32_t left, right, rank, result; } token_merge;

typedef struct tokenizer {
    int kind;                          /* TOKENIZER_* */
    const struct word_rule *words;     /* null: SPM */
    int32_t count;
    gguf_text *text;                   /* [count] */
    float *score;                      /* [count] SPM */
    uint8_t *type;                     /* [count] TOKEN_* */
    int32_t *slot;                     /* hash of texts: a token or -1 */
    token_merge *merge;                /* hash of pairs; left -1: free */
    uint32_t slots, merges;            /* powers of two */
    size_t longest;                    /* bytes of the longest text */
    int32_t byte[256];                 /* the token of a byte or -1 */
    int32_t *special;                  /* tokens that a text may contain literally */
    int32_t specials;
    uint8_t special_first[256];        /* 1: a special token begins with this byte */
    int32_t bos, eos, eot, eom, unknown;       /* -1: none */
    int add_bos, add_space;
    int no_special;                    /* 1: control tokens written in a text are plain text */
} tokenizer;

static inline int token_append(token_ids *ids, int32_t id) {
    if (ids->count == ids->room) {
        const int64_t room = ids->room ? ids->room * 2 : 256;
        int32_t *data = (int32_t *)realloc(ids->data, (size_t)room * sizeof *data);
        if (!data) return 0;
        ids->data = data;
        ids->room = room;
    }
    ids->data[ids->count++] = id;
    return 1;
}

static inline uint32_t token_hash(const char *s, size_t n) {
    uint32_t h = 2166136261u;
    for (size_t i = 0; i < n; i++) h = (h ^ (uint8_t)s[i]) * 16777619u;
    return h ^ h >> 15;
}

/* The slot of the token with a text, or the free slot for it. */
static inline uint32_t token_slot(const tokenizer *t, const char *s, size_t n) {
    uint32_t at = token_hash(s, n) & (t->slots - 1);
    while (t->slot[at] >= 0 && (t->text[t->slot[at]].size != n ||
                                memcmp(t->text[t->slot[at]].data, s, n)))
        at = (at + 1) & (t->slots - 1);
    return at;
}

static inline int32_t token_find(const tokenizer *t, const char *s, size_t n) {
    return t->slot[token_slot(t, s, n)];
}

static inline token_merge *token_pair(const tokenizer *t, int32_t left, int32_t right) {
    uint32_t at = ((uint32_t)left * 2654435761u ^ (uint32_t)right * 2246822519u);
    for (at ^= at >> 15; ; at++) {
        token_merge *m = &t->merge[at & (t->merges - 1)];
        if (m->left < 0 || (m->left == left && m->right == right)) return m;
    }
}

/* -------------------------------------------------------------------------- characters */
/* Byte-level BPE writes bytes as characters: printable ones as themselves, the others in order from
 * 256 on. */
static inline uint32_t byte_character(int b) {
    uint32_t others = 0;
    for (int i = 0; i <= b; i++) {
        if ((i >= 33 && i <= 126) || (i >= 161 && i <= 172) || i >= 174) {
            if (i == b) return (uint32_t)b;
        } else if (i == b) return 256 + others;
        else others++;
    }
    return 0;
}

/* -------------------------------------------------------------------------- words
 * A text is cut into words before pairs are joined. These functions match the regular expressions
 * that come with the vocabularies. A word begins at byte i; each function returns its end. */
typedef struct letters { const char *s; size_t n; } letters;

enum { IS_END, IS_LETTER, IS_NUMBER, IS_NEWLINE, IS_SPACE, IS_OTHER };

static inline int char_kind(letters t, size_t i, size_t *next) {
    uint32_t c;
    *next = i;
    if (i >= t.n) return IS_END;
    *next = i + (size_t)utf8_read(t.s + i, t.n - i, &c);
    return c == '\r' || c == '\n' ? IS_NEWLINE : unicode_space(c) ? IS_SPACE
         : unicode_is(UNICODE_LETTER, c) ? IS_LETTER
         : unicode_is(UNICODE_NUMBER, c) ? IS_NUMBER : IS_OTHER;
}

/* The end of a run of up to `most` characters of one kind. */
static inline size_t char_run(letters t, size_t i, int kind, int64_t most) {
    size_t next;
    while (most-- > 0 && char_kind(t, i, &next) == kind) i = next;
    return i;
}

/* 's 't 're 've 'm 'll 'd */
static inline size_t word_contraction(letters t, size_t i, int any_case) {
    static const char *const ends[] = { "s", "t", "re", "ve", "m", "ll", "d" };
    if (t.s[i] != '\'') return i;
    for (size_t e = 0; e < sizeof ends / sizeof *ends; e++) {
        size_t k = 0;
        for (; ends[e][k] && i + 1 + k < t.n; k++) {
            const char c = t.s[i + 1 + k];
            if (c != ends[e][k] && !(any_case && (c | 32) == ends[e][k])) break;
        }
        if (!ends[e][k]) return i + 1 + k;
    }
    return i;
}

/* \s*[\r\n]+ (where newlines count) or \s+(?!\S) or \s+ */
static inline size_t word_blank(letters t, size_t i, int newlines) {
    size_t end = i, next, last = i, newline = i;
    for (;;) {
        const int kind = char_kind(t, end, &next);
        if (kind != IS_SPACE && kind != IS_NEWLINE) break;
        last = end;
        end = next;
        if (kind == IS_NEWLINE) newline = end;
    }
    if (newlines && newline > i) return newline;
    return end < t.n && last > i ? last : end;         /* the last blank belongs to the next word */
}

static inline size_t word_end_gpt2(letters t, size_t i) {
    size_t next, after, end = word_contraction(t, i, 0);
    if (end > i) return end;
    int kind = char_kind(t, i, &next);
    size_t from = i;
    if (t.s[i] == ' ') {
        const int then = char_kind(t, next, &after);
        if (then == IS_LETTER || then == IS_NUMBER || then == IS_OTHER) {
            from = next;
            kind = then;
        }
    }
    if (kind == IS_LETTER || kind == IS_NUMBER || kind == IS_OTHER)
        return char_run(t, from, kind, INT64_MAX);
    return word_blank(t, i, 0);
}

static inline size_t word_end_llama3(letters t, size_t i, int digits) {
    size_t next, after, end = word_contraction(t, i, 1);
    const int kind = char_kind(t, i, &next);
    if (end > i) return end;
    if (kind == IS_LETTER) return char_run(t, i, IS_LETTER, INT64_MAX);
    if (kind != IS_NEWLINE && kind != IS_NUMBER && char_kind(t, next, &after) == IS_LETTER)
        return char_run(t, next, IS_LETTER, INT64_MAX);
    if (kind == IS_NUMBER) return char_run(t, i, IS_NUMBER, digits);
    const size_t from = t.s[i] == ' ' ? next : i;
    end = char_run(t, from, IS_OTHER, INT64_MAX);
    if (end > from) return char_run(t, end, IS_NEWLINE, INT64_MAX);
    return word_blank(t, i, 1);
}

/* [^\r\n\p{L}\p{N}]? and then the characters of a word, which begin where a letter may begin. */
static inline size_t word_prefix(letters t, size_t i) {
    size_t next;
    const int kind = char_kind(t, i, &next);
    return kind == IS_SPACE || kind == IS_OTHER ? next : i;
}

/* What follows words in the rules below: numbers, signs with newlines after them (`slash`: also /),
 * blanks. `marks`: marks are no signs. */
static inline size_t word_rest(letters t, size_t i, int digits, int slash, int marks) {
    size_t next;
    uint32_t c;
    if (char_kind(t, i, &next) == IS_NUMBER) return char_run(t, i, IS_NUMBER, digits);
    const size_t from = t.s[i] == ' ' ? next : i;
    size_t end = from;
    while (char_kind(t, end, &next) == IS_OTHER) {
        (void)utf8_read(t.s + end, t.n - end, &c);
        if (marks && unicode_is(UNICODE_MARK, c)) break;
        end = next;
    }
    if (end == from) return word_blank(t, i, 1);
    while (char_kind(t, end, &next) == IS_NEWLINE || (slash && end < t.n && t.s[end] == '/'))
        end = next;
    return end;
}

enum { CASE_NONE, CASE_CAPITAL, CASE_SMALL, CASE_BOTH };   /* BOTH: other letters, and marks */

static inline int char_case(letters t, size_t i, size_t *next) {
    uint32_t c;
    *next = i;
    if (i >= t.n) return CASE_NONE;
    *next = i + (size_t)utf8_read(t.s + i, t.n - i, &c);
    return unicode_is(UNICODE_CAPITAL, c) ? CASE_CAPITAL : unicode_is(UNICODE_SMALL, c) ? CASE_SMALL
         : unicode_is(UNICODE_LETTER, c) || unicode_is(UNICODE_MARK, c) ? CASE_BOTH : CASE_NONE;
}

/* The end of letters and marks. */
static inline size_t word_letters(letters t, size_t i) {
    for (size_t next; char_case(t, i, &next) != CASE_NONE; i = next) {}
    return i;
}

/* \p{N} alone, and words of letters and marks. */
static inline size_t word_end_marks(letters t, size_t i) {
    size_t end = word_contraction(t, i, 1), from = word_prefix(t, i);
    if (end > i) return end;
    end = word_letters(t, from);
    if (end > from) return end;
    end = word_letters(t, i);
    return end > i ? end : word_rest(t, i, 1, 0, 1);
}

/* Capitals, then small letters, at least one of these if `small`. Letters without case are both.
 * Returns i if there are none. */
static inline size_t word_cased(letters t, size_t i, int small) {
    size_t end = i, next, both = i;
    int kind, any = 0;
    while ((kind = char_case(t, end, &next)) == CASE_CAPITAL || kind == CASE_BOTH) {
        if (kind == CASE_BOTH) both = next;
        end = next;
    }
    while ((kind = char_case(t, end, &next)) == CASE_SMALL || (any && kind == CASE_BOTH)) {
        any = 1;
        end = next;
    }
    return any || !small ? end : both;
}

/* Words change from small to capital letters. */
static inline size_t word_end_cased(letters t, size_t i, int digits, int contractions) {
    const size_t from[2] = { word_prefix(t, i), i };
    for (int k = 0; k < 4; k++) {
        const size_t end = word_cased(t, from[k % 2], k < 2);
        if (end > from[k % 2])
            return contractions && end < t.n ? word_contraction(t, end, 1) : end;
    }
    return word_rest(t, i, digits, 1, 0);
}

static inline int char_sign(letters t, size_t i, size_t *next) {
    uint32_t c;
    *next = i;
    if (i >= t.n) return 0;
    *next = i + (size_t)utf8_read(t.s + i, t.n - i, &c);
    return unicode_is(UNICODE_SIGN, c);
}

/* A sign of ASCII and letters of ASCII; letters and marks after anything that is no sign; signs.
 * Returns i if none of these begins here. */
static inline size_t word_match_deepseek(letters t, size_t i) {
    size_t end, next, from;
    const int sign = char_sign(t, i, &next), kind = char_kind(t, i, &from);
    for (end = i + 1; sign && (uint8_t)t.s[i] < 128 && end < t.n &&
                      ((t.s[end] | 32) >= 'a' && (t.s[end] | 32) <= 'z'); end++) {}
    if (end > i + 1) return end;
    from = sign || kind == IS_LETTER || kind == IS_NEWLINE ? i : next;
    end = word_letters(t, from);
    if (end == from) end = word_letters(t, from = i);
    if (end > from) return end;
    for (from = end = t.s[i] == ' ' ? i + 1 : i; char_sign(t, end, &next); end = next) {}
    if (end > from) return char_run(t, end, IS_NEWLINE, INT64_MAX);
    return kind == IS_SPACE || kind == IS_NEWLINE ? word_blank(t, i, 1) : i;
}

/* What matches nothing is one word. */
static inline size_t word_end_deepseek(letters t, size_t i) {
    size_t next = i, end = word_match_deepseek(t, i);
    while (end == next && next < t.n) {
        (void)char_kind(t, next, &next);
        end = next < t.n ? word_match_deepseek(t, next) : next;
        if (end > next) return next;
    }
    return end;
}

/* A text is cut in stages, each of which cuts the pieces of the one before it. A stage finds words
 * at every place of a piece, or runs of characters of a class: then what is between them is a piece
 * too. */
enum { STAGE_NONE, STAGE_GPT2, STAGE_LLAMA3, STAGE_MARKS, STAGE_CASED, STAGE_CASED_ENDS,
       STAGE_DEEPSEEK, STAGE_LAST_BLANKS, STAGE_CLASSES, CLASS_NUMBER, CLASS_DIGIT, CLASS_NEWLINE,
       CLASS_LETTER, CLASS_CASED, CLASS_PUNCTUATION, CLASS_ASCII, CLASS_SIGN, CLASS_KANA,
       CLASS_CJK };

typedef struct word_stage {
    uint8_t kind, least, most;         /* characters of a run, most 0: any; digits of a word */
    uint8_t blank;                     /* 1: a blank before the run belongs to it. In CLASS_SIGN:
                                        * one character more */
} word_stage;

typedef struct word_rule {
    const char *names;                 /* with a blank on each side */
    int whole, add_bos;                /* whole: a word that is a token is not joined from pairs */
    int nfc;                           /* 1: texts are composed before they are cut */
    word_stage stage[7];
} word_rule;

static const word_rule word_rules[] = {
    { " gpt-2 phi-2 mpt olmo jais jina-es jina-de jina-v2-es jina-v2-de gigachat a.x-4.0 mellum "
      "modern-bert trillion granite-docling exaone4 ", 0, 0, 0, { { STAGE_GPT2, 0, 0, 0 } } },
    { " llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano ", 1, 1, 0,
      { { STAGE_LLAMA3, 0, 3, 0 } } },
    { " smaug-bpe dbrx ", 0, 0, 0, { { STAGE_LLAMA3, 0, 3, 0 } } },
    { " qwen2 ", 0, 0, 1, { { STAGE_LLAMA3, 0, 1, 0 } } },
    { " deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open ", 0, 0, 0,
      { { STAGE_LLAMA3, 0, 1, 0 } } },
    { " qwen35 ", 0, 0, 0, { { STAGE_MARKS, 0, 0, 0 } } },
    { " tekken ", 1, 1, 0, { { STAGE_CASED, 0, 1, 0 } } },
    { " gpt-4o llama4 kanana2 talkie ", 0, 0, 0, { { STAGE_CASED_ENDS, 0, 3, 0 } } },
    { " smollm starcoder refact command-r codeshell exaone minerva-7b mellum2 ", 0, 0, 0,
      { { CLASS_NUMBER, 1, 1, 0 }, { STAGE_GPT2, 0, 0, 0 } } },
    { " deepseek-v3 hunyuan-dense joyai-llm hy_v4 ", 0, 0, 0,
      { { CLASS_NUMBER, 1, 3, 0 }, { CLASS_KANA, 1, 0, 0 }, { STAGE_DEEPSEEK, 0, 0, 0 } } },
    { " deepseek-llm ", 0, 0, 0,
      { { CLASS_NEWLINE, 1, 1, 0 }, { CLASS_CASED, 1, 0, 1 }, { CLASS_ASCII, 1, 0, 1 },
        { STAGE_LAST_BLANKS, 0, 0, 0 }, { CLASS_CJK, 1, 0, 0 }, { CLASS_NUMBER, 1, 0, 0 } } },
    { " gemma4 ", 0, 1, 0, { { CLASS_NEWLINE, 1, 0, 0 } } },
    { " deepseek-coder ", 0, 0, 0,
      { { CLASS_NEWLINE, 1, 1, 0 }, { CLASS_LETTER, 1, 0, 1 }, { CLASS_PUNCTUATION, 1, 0, 1 },
        { CLASS_CJK, 1, 0, 0 }, { CLASS_NUMBER, 1, 1, 0 } } },
    { " falcon ", 0, 0, 0,
      { { CLASS_SIGN, 1, 0, '`' }, { STAGE_GPT2, 0, 0, 0 }, { CLASS_DIGIT, 3, 3, 0 } } },
    { " default ", 0, 0, 0,
      { { CLASS_SIGN, 1, 0, 0 }, { STAGE_GPT2, 0, 0, 0 }, { CLASS_NUMBER, 1, 0, 0 },
        { CLASS_DIGIT, 3, 3, 0 } } } };

/* 1: the character at i is of the class of a stage. */
static inline int stage_holds(letters t, size_t i, const word_stage *g, size_t *next) {
    uint32_t c;
    *next = i;
    if (i >= t.n) return 0;
    *next = i + (size_t)utf8_read(t.s + i, t.n - i, &c);
    switch (g->kind) {
    case CLASS_NUMBER: return unicode_is(UNICODE_NUMBER, c);
    case CLASS_DIGIT: return c >= '0' && c <= '9';
    case CLASS_NEWLINE: return (c == '\r' && g->most) || c == '\n';
    case CLASS_LETTER: return unicode_is(UNICODE_LETTER, c);
    case CLASS_CASED: return unicode_is(UNICODE_CASED, c);
    case CLASS_ASCII:                  /* signs and letters, wide ones too, and marks of quotes */
        return (c >= '!' && c <= '/') || (c >= ':' && c <= '~') ||
               (c >= 0xFF01 && c <= 0xFF0F) || (c >= 0xFF1A && c <= 0xFF5E) ||
               (c >= 0x2018 && c <= 0x201F) || (c >= 0x3000 && c <= 0x3002);
    case CLASS_PUNCTUATION: return unicode_is(UNICODE_PUNCTUATION, c);
    case CLASS_SIGN:
        return unicode_is(UNICODE_PUNCTUATION, c) || (g->blank && c == g->blank) ||
               (c && c < 128 && strchr("$+<=>^~|", (int)c));
    case CLASS_KANA: return (c >= 0x4E00 && c <= 0x9FA5) || (c >= 0x3040 && c <= 0x30FF);
    default: return (c >= 0x800 && c <= 0x9FA5) || (c >= 0xAC00 && c <= 0xD7FF);
    }
}

/* The end of the run of a stage's class that begins at i, after a blank if the stage takes one; i:
 * there is none. */
static inline size_t stage_run(letters t, size_t i, const word_stage *g) {
    size_t from = i, end, next;
    const int kind = char_kind(t, i, &next);
    int n = 0;
    if (g->blank == 1 && (kind == IS_NEWLINE || kind == IS_SPACE)) from = next;
    for (end = from; (!g->most || n < g->most) && stage_holds(t, end, g, &next); end = next) n++;
    return n && n >= g->least ? end : i;
}

/* Blanks up to the end are a word, and what is before them. */
static inline size_t word_last_blanks(letters t) {
    size_t last = 0;
    for (size_t i = 0, next; i < t.n; i = next) {
        const int kind = char_kind(t, i, &next);
        if (kind != IS_SPACE && kind != IS_NEWLINE) last = next;
    }
    return last < t.n && last > 0 ? last : t.n;
}

/* The end of the piece that begins at i. */
static inline size_t stage_end(letters t, size_t i, const word_stage *g) {
    size_t end, next;
    switch (g->kind) {
    case STAGE_GPT2: return word_end_gpt2(t, i);
    case STAGE_LLAMA3: return word_end_llama3(t, i, g->most);
    case STAGE_MARKS: return word_end_marks(t, i);
    case STAGE_CASED: return word_end_cased(t, i, g->most, 0);
    case STAGE_CASED_ENDS: return word_end_cased(t, i, g->most, 1);
    case STAGE_DEEPSEEK: return word_end_deepseek(t, i);
    case STAGE_LAST_BLANKS: return i ? t.n : word_last_blanks(t);
    default: break;
    }
    end = stage_run(t, i, g);
    for (next = i; end == next && next < t.n;) {
        (void)char_kind(t, next, &next);
        end = next < t.n ? stage_run(t, next, g) : next;
        if (end > next) return next;
    }
    return end;
}

/* -------------------------------------------------------------------------- joining pairs */
typedef struct token_piece {
    int64_t before, after;
    size_t at, size;                   /* size 0: gone */
    int32_t id;
} token_piece;
typedef struct join { double key; int64_t left, right; size_t size; int32_t id; } join;
typedef struct joiner {
    const tokenizer *t;
    const char *s;
    token_piece *pieces;
    join *heap;                        /* the best join first */
    int64_t joins;
} joiner;

static inline int join_before(const join *a, const join *b) {
    return a->key > b->key || (a->key == b->key && a->left < b->left);
}

static inline void join_push(joiner *j, join x) {
    int64_t at = j->joins++;
    for (; at > 0 && join_before(&x, &j->heap[(at - 1) / 2]); at = (at - 1) / 2)
        j->heap[at] = j->heap[(at - 1) / 2];
    j->heap[at] = x;
}

static inline join join_pop(joiner *j) {
    const join top = j->heap[0], x = j->heap[--j->joins];
    int64_t at = 0, child;
    while ((child = 2 * at + 1) < j->joins) {
        if (child + 1 < j->joins && join_before(&j->heap[child + 1], &j->heap[child])) child++;
        if (!join_before(&j->heap[child], &x)) break;
        j->heap[at] = j->heap[child];
        at = child;
    }
    j->heap[at] = x;
    return top;
}

static inline void join_offer(joiner *j, int64_t left, int64_t right) {
    join x;
    if (left < 0 || right < 0) return;
    const token_piece *a = &j->pieces[left], *b = &j->pieces[right];
    x.left = left;
    x.right = right;
    x.size = a->size + b->size;
    if (j->t->kind != TOKENIZER_SPM) {
        const token_merge *m = token_pair(j->t, a->id, b->id);
        if (m->left < 0) return;
        x.id = m->result;
        x.key = -(double)m->rank;
    } else {
        x.id = token_find(j->t, j->s + a->at, x.size);
        if (x.id < 0) return;
        x.key = (double)j->t->score[x.id];
    }
    join_push(j, x);
}

static inline void join_all(joiner *j, int64_t pieces) {
    for (int64_t i = 0; i + 1 < pieces; i++) join_offer(j, i, i + 1);
    while (j->joins > 0) {
        const join x = join_pop(j);
        token_piece *a = &j->pieces[x.left], *b = &j->pieces[x.right];
        if (!a->size || !b->size || a->size + b->size != x.size) continue; /* of pieces now gone */
        a->size = x.size;
        a->id = x.id;
        a->after = b->after;
        b->size = 0;
        if (a->after >= 0) j->pieces[a->after].before = x.left;
        join_offer(j, a->before, x.left);
        join_offer(j, x.left, a->after);
    }
}

/* Appends the tokens of the bytes of a piece that has no token, or the unknown token. */
static inline int join_bytes(const tokenizer *t, const char *s, size_t n, token_ids *ids) {
    for (size_t i = 0; i < n; i++) {
        const int32_t id = t->byte[(uint8_t)s[i]];
        if (id < 0 && t->unknown < 0) return 0;
        if (id < 0) return token_append(ids, t->unknown);
        if (!token_append(ids, id)) return 0;
    }
    return 1;
}

/* One word of BPE, or one text of SPM. */
static inline int tokens_of_word(const tokenizer *t, const char *s, size_t n, token_ids *ids) {
    joiner j;
    uint32_t c;
    int64_t count = 0;
    int ok = 1;
    j.t = t;
    j.s = s;
    j.joins = 0;
    j.pieces = (token_piece *)malloc((n + 1) * sizeof *j.pieces);
    j.heap = (join *)malloc((3 * n + 1) * sizeof *j.heap);
    ok = j.pieces && j.heap;
    for (size_t i = 0; ok && i < n; count++) {
        token_piece *p = &j.pieces[count];
        p->at = i;
        p->size = t->kind == TOKENIZER_BPE ? 1 : (size_t)utf8_read(s + i, n - i, &c);
        p->id = t->kind == TOKENIZER_BPE ? t->byte[(uint8_t)s[i]] : token_find(t, s + i, p->size);
        p->before = count - 1;
        i += p->size;
        p->after = i < n ? count + 1 : -1;
    }
    if (ok) join_all(&j, count);
    for (int64_t i = 0; ok && i >= 0 && i < count; i = j.pieces[i].after) {
        const token_piece *p = &j.pieces[i];
        ok = p->id >= 0 ? token_append(ids, p->id) : join_bytes(t, s + p->at, p->size, ids);
    }
    free(j.pieces);
    free(j.heap);
    return ok;
}

/* The token that is the whole word, or -1; -2: no memory. */
static inline int32_t token_of_word(const tokenizer *t, const char *s, size_t n) {
    char *name;
    size_t at = 0, newlines = 0;
    int32_t id;
    if (t->kind == TOKENIZER_CHARS) {
        while (newlines < n && s[newlines] == '\n') newlines++;
        return newlines == n ? token_find(t, s, n) : -1;
    }
    if (!t->words->whole || n > t->longest) return -1;
    name = (char *)malloc(2 * n + 1);
    if (!name) return -2;
    for (size_t k = 0; k < n; k++)
        at += (size_t)utf8_write(byte_character((uint8_t)s[k]), name + at);
    id = token_find(t, name, at);
    free(name);
    return id;
}

/* A piece of a text, from a stage on. */
static inline int tokens_of_stage(const tokenizer *t, letters all, const word_stage *stage,
                                  token_ids *ids) {
    if (stage->kind == STAGE_NONE) {
        const int32_t id = token_of_word(t, all.s, all.n);
        if (id < -1) return 0;
        return id >= 0 ? token_append(ids, id) : tokens_of_word(t, all.s, all.n, ids);
    }
    for (size_t i = 0, end; i < all.n; i = end) {
        letters part;
        end = stage_end(all, i, stage);
        part.s = all.s + i;
        part.n = end - i;
        if (!tokens_of_stage(t, part, stage + 1, ids)) return 0;
    }
    return 1;
}

static inline int tokens_of_bpe(const tokenizer *t, const char *s, size_t n, token_ids *ids) {
    letters all;
    char *composed = NULL;
    int ok;
    all.s = s;
    all.n = n;
    if (t->words->nfc && unicode_may_compose(s, n)) {
        composed = unicode_nfc(s, n, &all.n);
        if (!composed) return 0;
        all.s = composed;
    }
    ok = tokens_of_stage(t, all, t->words->stage, ids);
    free(composed);
    return ok;
}

/* Blanks become U+2581, and one comes before the text if the vocabulary says so. */
static inline int tokens_of_blanks(const tokenizer *t, const char *s, size_t n, token_ids *ids) {
    size_t at = 0;
    int ok;
    char *blanks = (char *)malloc(3 * n + 4);
    if (!blanks) return 0;
    if (t->add_space && n) at += (size_t)utf8_write(0x2581, blanks);
    for (size_t i = 0; i < n; i++) {
        if (s[i] == ' ') at += (size_t)utf8_write(0x2581, blanks + at);
        else blanks[at++] = s[i];
    }
    ok = (t->words ? tokens_of_bpe : tokens_of_word)(t, blanks, at, ids);
    free(blanks);
    return ok;
}

/* The longest special token with which the text at s begins, or -1. */
static inline int32_t token_special(const tokenizer *t, const char *s, size_t n) {
    int32_t best = -1;
    if (!t->special_first[(uint8_t)s[0]]) return -1;
    for (int32_t i = 0; i < t->specials; i++) {
        const gguf_text x = t->text[t->special[i]];
        if (t->no_special && t->type[t->special[i]] != TOKEN_USER) continue;
        if (x.size <= n && memcmp(x.data, s, x.size) == 0 &&
            (best < 0 || x.size > t->text[best].size))
            best = t->special[i];
    }
    return best;
}

/* Appends the tokens of a text, after the token of a beginning if the vocabulary requires it. 0: no
 * memory, or the vocabulary lacks a byte of the text. */
static inline int tokenize(const tokenizer *t, const char *s, size_t n, token_ids *ids) {
    size_t from = 0, i = 0;
    if (t->add_bos && t->bos >= 0 && !token_append(ids, t->bos)) return 0;
    for (;;) {
        const int32_t special = i < n ? token_special(t, s + i, n - i) : -1;
        if (i < n && special < 0) { i++; continue; }
        if (i > from && !(t->kind == TOKENIZER_BPE ? tokens_of_bpe : tokens_of_blanks)
                            (t, s + from, i - from, ids))
            return 0;
        if (i >= n) return 1;
        if (!token_append(ids, special)) return 0;
        i += t->text[special].size;
        from = i;
    }
}

/* -------------------------------------------------------------------------- back to text */
/* Writes the bytes of a token, as far as there is room, and returns how many. A control token has
 * none. */
static inline size_t token_bytes(const tokenizer *t, int32_t id, char *out, size_t room) {
    size_t at = 0;
    if (id < 0 || id >= t->count || t->type[id] == TOKEN_CONTROL) return 0;
    const gguf_text x = t->text[id];
    if (t->kind != TOKENIZER_BPE && t->type[id] == TOKEN_BYTE) {
        for (int b = 0; b < 256; b++)
            if (t->byte[b] == id && room) out[at++] = (char)b;
        return at;
    }
    for (size_t i = 0; i < x.size && at + 4 <= room;) {
        uint32_t c;
        const int len = utf8_read(x.data + i, x.size - i, &c);
        int b = 0;
        while (t->kind == TOKENIZER_BPE && c < 324 && b < 256 && byte_character(b) != c) b++;
        if (t->kind != TOKENIZER_BPE && c == 0x2581) out[at++] = ' ';
        else if (t->kind == TOKENIZER_BPE && t->type[id] != TOKEN_USER && c < 324 && b < 256)
            out[at++] = (char)b;
        else for (int k = 0; k < len; k++) out[at++] = x.data[i + (size_t)k];
        i += (size_t)len;
    }
    return at;
}

/* -------------------------------------------------------------------------- from a file */
static inline void tokenizer_close(tokenizer *t) {
    free(t->text);
    free(t->score);
    free(t->type);
    free(t->slot);
    free(t->merge);
    free(t->special);
    memset(t, 0, sizeof *t);
}

static inline uint32_t token_room(uint64_t n) {
    uint32_t room = 16;
    while (room < 2 * n) room *= 2;
    return room;
}

static inline int tokenizer_texts(tokenizer *t, const gguf *g, char *why) {
    const gguf_value *v = gguf_find(g, "tokenizer.ggml.tokens");
    const gguf_value *score = gguf_find(g, "tokenizer.ggml.scores");
    const gguf_value *type = gguf_find(g, "tokenizer.ggml.token_type");
    const uint8_t *p;
    if (!v || !v->is_array || v->type != GGUF_STRING || v->count < 1 || v->count > 1 << 24)
        return gguf_refuse(why, "tokenizer.ggml.tokens is not there, or is no list of 1 to "
                           "16777216 texts");
    if ((score && (!score->is_array || score->type != GGUF_F32 || score->count != v->count)) ||
        (type && (!type->is_array || type->type != GGUF_I32 || type->count != v->count)))
        return gguf_refuse(why, "tokenizer.ggml.scores or token_type has no number (f32, i32) for "
                           "each of %llu tokens", (unsigned long long)v->count);
    t->count = (int32_t)v->count;
    t->slots = token_room(v->count);
    t->text = (gguf_text *)calloc(v->count, sizeof *t->text);
    t->score = (float *)calloc(v->count, sizeof *t->score);
    t->type = (uint8_t *)calloc(v->count, 1);
    t->special = (int32_t *)calloc(v->count, sizeof *t->special);
    t->slot = (int32_t *)malloc(t->slots * sizeof *t->slot);
    if (!t->text || !t->score || !t->type || !t->special || !t->slot)
        return gguf_refuse(why, "no memory for %llu tokens", (unsigned long long)v->count);
    memset(t->slot, 0xFF, t->slots * sizeof *t->slot);
    p = v->data;
    for (int32_t i = 0; i < t->count; i++) {
        const double kind = type ? gguf_element(type, (uint64_t)i) : 0;
        t->text[i] = gguf_next_string(&p);
        if (t->text[i].size > t->longest) t->longest = t->text[i].size;
        t->score[i] = score ? (float)gguf_element(score, (uint64_t)i) : 0;
        if (t->score[i] != t->score[i] || !(kind >= 0 && kind <= (double)TOKEN_BYTE))
            return gguf_refuse(why, "token %ld has the score %g and the type %g: not a number, or "
                               "not 0 to 6", (long)i, (double)t->score[i], kind);
        t->type[i] = (uint8_t)(kind > 0 ? (int)kind : TOKEN_NORMAL);
        const uint32_t at = token_slot(t, t->text[i].data, t->text[i].size);
        if (t->slot[at] < 0) t->slot[at] = i;
        if ((t->type[i] != TOKEN_CONTROL && t->type[i] != TOKEN_USER &&
             t->type[i] != TOKEN_UNKNOWN) || !t->text[i].size)
            continue;
        t->special[t->specials++] = i;
        t->special_first[(uint8_t)t->text[i].data[0]] = 1;
    }
    return 1;
}

static inline int tokenizer_merges(tokenizer *t, const gguf *g, char *why) {
    const gguf_value *v = gguf_find(g, "tokenizer.ggml.merges");
    char name[64];
    if (!v || !v->is_array || v->type != GGUF_STRING || v->count > 1 << 24)
        return gguf_refuse(why, "tokenizer.ggml.merges is not there, or is no list of at most "
                           "16777216 texts");
    t->merges = token_room(v->count);
    t->merge = (token_merge *)malloc(t->merges * sizeof *t->merge);
    if (!t->merge)
        return gguf_refuse(why, "no memory for %llu merges", (unsigned long long)v->count);
    memset(t->merge, 0xFF, t->merges * sizeof *t->merge);
    const uint8_t *p = v->data;
    for (uint64_t i = 0; i < v->count; i++) {
        const gguf_text x = gguf_next_string(&p);
        const char *blank = x.size > 2 ? (const char *)memchr(x.data + 1, ' ', x.size - 2) : NULL;
        int32_t left = -1, right = -1, result = -1;
        char *both = blank ? (char *)malloc(x.size) : NULL;
        if (both) {
            const size_t first = (size_t)(blank - x.data);
            memcpy(both, x.data, first);
            memcpy(both + first, blank + 1, x.size - first - 1);
            left = token_find(t, both, first);
            right = token_find(t, both + first, x.size - first - 1);
            result = token_find(t, both, x.size - 1);
        }
        free(both);
        if (left < 0 || right < 0 || result < 0)
            return gguf_refuse(why, "merge %llu, '%s', does not join two tokens to a third",
                               (unsigned long long)i, gguf_show(x, name, sizeof name));
        token_merge *m = token_pair(t, left, right);
        if (m->left >= 0) continue;
        m->left = left;
        m->right = right;
        m->rank = (int32_t)i;
        m->result = result;
    }
    return 1;
}

static inline void tokenizer_bytes(tokenizer *t) {
    for (int b = 0; b < 256; b++) {
        char s[16];
        const int n = t->kind == TOKENIZER_BPE ? utf8_write(byte_character(b), s)
                                               : snprintf(s, sizeof s, "<0x%02X>", (unsigned)b);
        t->byte[b] = token_find(t, s, (size_t)n);
    }
}

/* The token whose number a value has, or -1 if there is no such value. */
static inline int tokenizer_named(const tokenizer *t, const gguf *g, const char *key, int32_t *out,
                                  char *why) {
    const gguf_value *v = gguf_find(g, key);
    const double x = v && !v->is_array && v->type != GGUF_STRING ? gguf_element(v, 0) : -1;
    *out = x >= 0 && x < t->count ? (int32_t)x : -1;
    if (!v || *out >= 0 || (v->type == GGUF_U32 && x >= 4294967295.0)) return 1;   /* -1: none */
    return gguf_refuse(why, "%s is not the number of one of the %ld tokens", key, (long)t->count);
}

static inline int tokenizer_flag(const gguf *g, const char *key, int otherwise, int *out,
                                 char *why) {
    const gguf_value *v = gguf_find(g, key);
    *out = otherwise;
    if (v && (v->type != GGUF_BOOL || v->is_array)) return gguf_refuse(why, "%s is no bool", key);
    if (v) *out = v->data[0] != 0;
    return 1;
}

static inline int tokenizer_choices(tokenizer *t, const gguf *g, char *why) {
    const int spm = t->kind == TOKENIZER_SPM, adds_bos = spm || t->words->add_bos;
    int ok = tokenizer_named(t, g, "tokenizer.ggml.bos_token_id", &t->bos, why) &&
             tokenizer_named(t, g, "tokenizer.ggml.eos_token_id", &t->eos, why) &&
             tokenizer_named(t, g, "tokenizer.ggml.eot_token_id", &t->eot, why) &&
             tokenizer_named(t, g, "tokenizer.ggml.eom_token_id", &t->eom, why) &&
             tokenizer_named(t, g, "tokenizer.ggml.unknown_token_id", &t->unknown, why) &&
             tokenizer_flag(g, "tokenizer.ggml.add_bos_token", adds_bos, &t->add_bos,
                            why) &&
             tokenizer_flag(g, "tokenizer.ggml.add_space_prefix", spm, &t->add_space, why);
    for (int32_t i = 0; ok && i < t->count && t->unknown < 0; i++)
        if (t->type[i] == TOKEN_UNKNOWN) t->unknown = i;
    return ok;
}

/* 1: the text ends with this token: one that the file names, or a control token whose text says
 * that a turn or a text ends. */
static inline int token_ends(const tokenizer *t, int32_t id) {
    static const char *const ends[] = {
        "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>",
        "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<EOT>", "<end_of_utterance>",
        "<\357\275\234end\342\226\201of\342\226\201sentence\357\275\234>" };
    if (id == t->eos || id == t->eot || id == t->eom) return 1;
    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++)
        if ((t->type[id] == TOKEN_CONTROL || t->type[id] == TOKEN_USER) &&
            gguf_is(t->text[id], ends[i]))
            return 1;
    return 0;
}

static inline int tokenizer_word_rule(tokenizer *t, const gguf *g, char *why) {
    gguf_text pre = gguf_text_of(gguf_find(g, "tokenizer.ggml.pre"));
    char name[64], padded[72];
    if (!pre.size || t->kind == TOKENIZER_CHARS) {
        pre.data = t->kind == TOKENIZER_CHARS ? "gemma4" : "default";
        pre.size = strlen(pre.data);
    }
    snprintf(padded, sizeof padded, " %s ", gguf_show(pre, name, sizeof name));
    for (size_t i = 0; i < sizeof word_rules / sizeof *word_rules; i++) {
        t->words = &word_rules[i];
        if (!memchr(pre.data, ' ', pre.size) && strstr(word_rules[i].names, padded)) return 1;
    }
    return gguf_refuse(why, "tokenizer.ggml.pre is '%s', a rule for words that this engine does "
                       "not have (tokenizer.h lists those it has)", name);
}

/* The tokenizer of a file, which must stay open. 0: see `why`; then there is nothing to close. */
static inline int tokenizer_open(tokenizer *t, const gguf *g, char why[INFER_WHY]) {
    const gguf_text kind = gguf_text_of(gguf_find(g, "tokenizer.ggml.model"));
    char name[64] = "none";
    int ok;
    memset(t, 0, sizeof *t);
    if (kind.size) gguf_show(kind, name, sizeof name);
    t->kind = gguf_is(kind, "gpt2") ? TOKENIZER_BPE
            : gguf_is(kind, "llama") ? TOKENIZER_SPM
            : gguf_is(kind, "gemma4") ? TOKENIZER_CHARS : TOKENIZER_NONE;
    if (t->kind == TOKENIZER_NONE)
        return gguf_refuse(why, "tokenizer.ggml.model is '%s'%s; this engine knows gpt2, llama and "
                           "gemma4", name, gguf_is(kind, "bert") || gguf_is(kind, "t5")
                           ? ", of models that encode texts and do not continue them" : "");
    ok = tokenizer_texts(t, g, why);
    if (ok && t->kind != TOKENIZER_SPM)
        ok = tokenizer_word_rule(t, g, why) && tokenizer_merges(t, g, why);
    if (ok) tokenizer_bytes(t);
    if (ok && tokenizer_choices(t, g, why)) return 1;
    tokenizer_close(t);
    return 0;
}

#endif
