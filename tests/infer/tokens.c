/* Cuts texts into tokens by the vocabulary of a GGUF file. Each text on stdin is a line with its
 * length in bytes, then the bytes. Prints its tokens on one line, and on the next 1 if they give
 * the same text. With a second argument, control tokens are plain text and none begins a text. */
#define _POSIX_C_SOURCE 200809L
#include "ringattn.h"
#include "examples/infer/tokenizer.h"

static void *read_whole(const char *path, size_t *bytes) {
    FILE *f = fopen(path, "rb");
    void *data = NULL;
    if (!f || fseek(f, 0, SEEK_END)) return NULL;
    *bytes = (size_t)ftell(f);
    rewind(f);
    if (posix_memalign(&data, 64, *bytes + 1) || fread(data, 1, *bytes, f) != *bytes) return NULL;
    fclose(f);
    return data;
}

static int same_text(const tokenizer *t, const token_ids *ids, const char *text, size_t n) {
    char out[1024];
    size_t at = 0;
    for (int64_t i = 0; i < ids->count; i++) {
        const size_t got = token_bytes(t, ids->data[i], out, sizeof out);
        const char *from = out;
        size_t len = got;
        if (i == 0 && t->kind == TOKENIZER_SPM && len && *from == ' ') { from++; len--; }
        if (at + len > n || memcmp(text + at, from, len)) return 0;
        at += len;
    }
    return at == n;
}

int main(int argc, char **argv) {
    char why[INFER_WHY] = "no file";
    size_t bytes = 0;
    unsigned long n;
    gguf g;
    tokenizer t;
    void *data = argc > 1 ? read_whole(argv[1], &bytes) : NULL;
    if (!data || !gguf_open(&g, data, bytes, why) || !tokenizer_open(&t, &g, why)) {
        printf("%s\n", why);
        return 1;
    }
    if (argc > 2) {
        t.add_bos = 0;
        t.no_special = 1;
    }
    while (scanf("%lu", &n) == 1) {
        token_ids ids = { NULL, 0, 0 };
        char *text = (char *)malloc(n + 1);
        if (!text || getchar() != '\n' || fread(text, 1, n, stdin) != n) return 1;
        if (!tokenize(&t, text, n, &ids)) printf("refused");
        for (int64_t i = 0; i < ids.count; i++) printf("%ld ", (long)ids.data[i]);
        printf("\n%d\n", same_text(&t, &ids, text, n));
        free(ids.data);
        free(text);
    }
    tokenizer_close(&t);
    gguf_close(&g);
    free(data);
    return 0;
}
