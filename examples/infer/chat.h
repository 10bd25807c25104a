/* Turns of a chat as tokens, and texts that end a turn.
 *
 *   chat_named      a format of chats
 *   chat_turn       tokens of a user's turn
 *   stop_find       where a text has one of the texts that end it
 *   stop_kept       how much of the end of a text may be the beginning of one
 *   stop_reached    whether tokens have one */
#if !defined(INFER_CHAT_H)
#define INFER_CHAT_H

#include "tokenizer.h"

/* What a format has before and after a user's turn; what ends the model's turn, and what follows
 * that. */
typedef struct chat_format { const char *name, *before, *after, *end, *between; } chat_format;

static inline const chat_format *chat_named(const char *name) {
    static const chat_format all[] = {
        { "none", "", "", "", "" },
        { "chatml", "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n", "<|im_end|>",
          "\n" },
        { "llama3", "<|start_header_id|>user<|end_header_id|>\n\n",
          "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>", "" },
        { "mistral", "[INST] ", " [/INST]", "</s>", "" },
        { "gemma", "<start_of_turn>user\n", "<end_of_turn>\n<start_of_turn>model\n",
          "<end_of_turn>", "\n" },
        { "harmony", "<|start|>user<|message|>", "<|end|><|start|>assistant", "<|end|>", "" } };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (!strcmp(name, all[i].name)) return &all[i];
    return NULL;
}

/* Where a turn stands: the first, or one after a turn of the model's that its end token has ended,
 * or that was cut. */
enum { CHAT_FIRST, CHAT_AFTER_END, CHAT_AFTER_CUT };

/* Tokens of the text, between those of the format, whose control tokens always count. Those of the
 * text count unless t->no_special. 0: as tokenize. */
static inline int chat_turn(tokenizer *t, const chat_format *c, int where, const char *text,
                            size_t n, token_ids *ids) {
    const int add_bos = t->add_bos, add_space = t->add_space, no_special = t->no_special;
    const char *before[] = { where == CHAT_AFTER_CUT ? c->end : "",
                             where == CHAT_FIRST ? "" : c->between, c->before };
    int ok = 1;
    t->no_special = 0;
    if (where != CHAT_FIRST) t->add_bos = t->add_space = 0;
    for (int i = 0; i < 3 && ok; i++) {
        if (!before[i][0]) continue;
        ok = tokenize(t, before[i], strlen(before[i]), ids);
        t->add_bos = t->add_space = 0;
    }
    t->no_special = no_special;
    ok = ok && tokenize(t, text, n, ids);
    t->no_special = t->add_bos = t->add_space = 0;
    if (c->after[0]) ok = ok && tokenize(t, c->after, strlen(c->after), ids);
    t->no_special = no_special;
    t->add_bos = add_bos;
    t->add_space = add_space;
    return ok;
}

/* -------------------------------------------------------------------------- texts that end */
enum { STOP_TEXTS = 16 };

typedef struct stop_texts {
    const char *text[STOP_TEXTS];
    int count;
    size_t longest;
} stop_texts;

/* Where the first of them begins; n: there is none. */
static inline size_t stop_find(const stop_texts *stop, const char *s, size_t n) {
    for (size_t at = 0; at < n; at++) {
        for (int i = 0; i < stop->count; i++) {
            const size_t size = strlen(stop->text[i]);
            if (size <= n - at && !memcmp(s + at, stop->text[i], size)) return at;
        }
    }
    return n;
}

/* How many bytes at the end may be the beginning of one. */
static inline size_t stop_kept(const stop_texts *stop, const char *s, size_t n) {
    for (size_t kept = stop->longest < n ? stop->longest : n; kept > 0; kept--)
        for (int i = 0; i < stop->count; i++)
            if (kept < strlen(stop->text[i]) && !memcmp(s + n - kept, stop->text[i], kept))
                return kept;
    return 0;
}

/* 1: the text of tokens [from, count) has one that ends in the last token. -1: no memory. */
static inline int stop_reached(const stop_texts *stop, const tokenizer *t, const int32_t *tokens,
                               int64_t from, int64_t count) {
    const size_t most = 4 * t->longest + 16;
    char *text, *one;
    size_t n = 0, last;
    int64_t i = count - 1;
    if (!stop->count || count <= from) return 0;
    text = (char *)malloc(stop->longest + 3 * most);
    if (!text) return -1;
    one = text + stop->longest + 2 * most;
    last = token_bytes(t, tokens[i], one, most);
    while (n < last + stop->longest - 1 && i >= from) n += token_bytes(t, tokens[i--], one, most);
    for (n = 0, i++; i < count; i++) n += token_bytes(t, tokens[i], text + n, most);
    i = stop_find(stop, text, n) < n;
    free(text);
    return (int)i;
}

#endif
