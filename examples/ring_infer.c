/* Runs a model (Llama, Mistral, Mixtral, Qwen2, Qwen3, Qwen3-MoE, Gemma 2, Gemma 3, gpt-oss) from a
 * GGUF file on ranks that share its weights and split its cache. You will see the text, and on
 * stderr the progress of the prompt, tokens per second and the bytes of cache on each rank. The
 * text is the same for every number of ranks.
 *
 *   cc -O2 -std=c99 -pthread -I. -o ring_infer examples/ring_infer.c -lm
 *   ./ring_infer model.gguf --prompt "Once upon a time" --ranks 4
 *
 * Without arguments it lists its options. Over MPI:
 *
 *   mpicc -O2 -std=c99 -pthread -I. -DRING_INFER_MPI -o ring_infer examples/ring_infer.c -lm
 *   mpirun -n 4 ./ring_infer model.gguf --prompt "Once upon a time" */
#define _DEFAULT_SOURCE 1
#define _POSIX_C_SOURCE 200809L
#define RINGATTN_IMPLEMENTATION
#include "ringattn.h"
#include "cores.h"
#include "infer/chat.h"
#include "infer/engine.h"
#include "transports/ra_shm.h"
#include "transports/ra_tcp.h"
#if defined(RING_INFER_MPI)
#include "transports/ra_mpi.h"
#endif

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static const char usage[] =
    "ring_infer MODEL.gguf [options]\n"
    "  --prompt TEXT     what the model continues; or --file FILE; or --tokens 1,2,3\n"
    "  --chat FORMAT     the prompt is a user's turn: chatml, llama3, mistral, gemma or harmony\n"
    "  --interactive     after each text, a line of stdin is the next turn: only what is new is\n"
    "                    computed. Without a prompt the first line is the first turn\n"
    "  --stop TEXT       the text ends before this; up to 16 times\n"
    "  --no-special      <|tokens|> written in the prompt are plain text\n"
    "  --predict N       tokens to generate at most (64)\n"
    "  --ranks P         ranks that split the cache (1)\n"
    "  --lanes L         parts of the cache, at least as many as ranks (16): the text is the same\n"
    "                    for every number of ranks with the same lanes\n"
    "  --threads T       threads of all ranks together, or with --at and mpirun of this process\n"
    "                    (as many as it has processors)\n"
    "  --cache TYPE      of the cache: f32, f16, bf16, q8_0 or q4_0 (f16)\n"
    "  --context N       positions of the cache (as many as are needed)\n"
    "  --chunk N         tokens of the prompt per call (16 per lane)\n"
    "  --split yes|no    processes each multiply a part of every matrix when decoding (if that\n"
    "                    saves time); the text is the same\n"
    "  --integers        decode weights in q8_0 by integers: faster, logits off by up to 1e-3\n"
    "  --speculate N     guess by the prompt's own n-grams and verify N tokens per call\n"
    "  --temp X, --top-k N, --top-p X, --min-p X, --seed N   draw tokens (0: take the likeliest)\n"
    "  --save FILE       keeps the cache in FILE, FILE.0, FILE.1, ... (of the lanes): while the\n"
    "                    prompt runs, after it, and at the end, also after Ctrl-C\n"
    "  --load FILE       does not compute what such files have of the prompt's beginning\n"
    "  --logits FILE     writes the logits of every position as f32\n"
    "  --perplexity      prints that of the prompt, and how many tokens have a part in it\n"
    "  --ids             prints the numbers of tokens instead of text\n"
    "  --count-tokens    prints how many tokens the prompt has, with --ids which; no model is run\n"
    "  --shm             the ranks are processes that share memory, not threads\n"
    "  --at H:P,H:P,...  with --rank R: this process is rank R, and they meet over TCP\n"
    "  -h, --help        prints this\n"
    "Ctrl-C ends a text, and while a line is awaited the program; twice, at once.\n"
    "Exit status: 0; 1: refused or failed; 2: the context ended before the text; 130: Ctrl-C.\n"
    "Compiled with -DRING_INFER_MPI it runs under mpirun, one rank per process.\n";

enum { AT_BYTES = 4096 };               /* of the list of --at, with its end */

typedef struct program {
    const char *path, *prompt, *file, *tokens, *logits, *at;
    const char *chat;
    const chat_format *format;
    stop_texts stop;
    int ids, shm, mpi, no_special;
    int bar;                           /* 1: the bar of a prompt is on the terminal */
    int32_t rank;                      /* of this process, -1: all of them are here */
    infer_options o;
    FILE *logits_file;
    int64_t start_ns, loaded;          /* of the prompt: when it began, after how many tokens */
    int count;                         /* 1: only the tokens of the prompt */
    gguf g;
    model m;
    tokenizer t;
    token_ids in;
    char *line, *held;                 /* read from stdin and not used yet; not printed yet */
    size_t lines, held_size;           /* their bytes */
    int last_ends;                     /* 1: the last token ends a text */
    int over;                          /* 1: the run of all ranks has ended well */
} program;

/* Ctrl-C ends the text after the current call, a second one the program. SIGTERM does the same, and
 * there is no next turn. */
static volatile sig_atomic_t halt;     /* 0, or the signal */

static void on_signal(int number) {
    halt = number;
    (void)signal(number, SIG_DFL);
}

static void listen_to_signals(program *p) {
    p->o.halt = &halt;
    if (signal(SIGINT, on_signal) == SIG_IGN) (void)signal(SIGINT, SIG_IGN);
    (void)signal(SIGTERM, on_signal);
}

static int refuse(const char *what, const char *why) {
    fprintf(stderr, "ring_infer: %s: %s\n", what, why);
    return 0;
}

/* -------------------------------------------------------------------------- command line */
/* The range of a number that an option takes. */
typedef struct range { int64_t least, most; } range;

static int whole_number(const char *name, const char *s, range in, int64_t *out) {
    char *end = NULL, why[96];
    long long x = 0;
    errno = 0;
    if (s) x = strtoll(s, &end, 10);
    snprintf(why, sizeof why, "'%.20s' is no whole number from %lld to %lld", s ? s : "",
             (long long)in.least, (long long)in.most);
    if (!s || end == s || *end || errno || x < in.least || x > in.most) return refuse(name, why);
    *out = x;
    return 1;
}

static int small_number(const char *name, const char *s, int32_t least, int32_t most,
                        int32_t *out) {
    const range in = { least, most };
    int64_t x = 0;
    if (!whole_number(name, s, in, &x)) return 0;
    *out = (int32_t)x;
    return 1;
}

static int fraction(const char *name, const char *s, double most, float *out) {
    char *end = NULL, why[96];
    *out = s ? strtof(s, &end) : 0;
    snprintf(why, sizeof why, "'%.20s' is no number from 0 to %g", s ? s : "", most);
    if (!s || end == s || *end || !(*out >= 0 && (double)*out <= most)) return refuse(name, why);
    return 1;
}

static int cache_type(const char *s, int32_t *out) {
    static const char *const names[] = { "f32", "f16", "bf16", "q8_0", "q4_0" };
    for (int32_t i = 0; s && i < 5; i++) {
        if (strcmp(s, names[i])) continue;
        *out = RA_F32 + i;
        return 1;
    }
    return refuse("--cache", "f32, f16, bf16, q8_0 or q4_0");
}

static int text_ends(void *user, const int32_t *tokens, int64_t from, int64_t count) {
    const program *p = (const program *)user;
    return stop_reached(&p->stop, &p->t, tokens, from, count);
}

static int stop_text(program *p, const char *s) {
    stop_texts *stop = &p->stop;
    const size_t n = s ? strlen(s) : 0;
    if (!n || n > 4096) return refuse("--stop", "a text of 1 to 4096 bytes");
    if (stop->count == STOP_TEXTS) return refuse("--stop", "16 times at most");
    stop->text[stop->count++] = s;
    if (n > stop->longest) stop->longest = n;
    p->o.ends = text_ends;
    p->o.ends_by = infer_hash(p->o.ends_by + 1, s, n);
    return 1;
}

/* An option and its value. */
static int option(program *p, const char *name, const char *s) {
    static const range tokens = { 0, INT32_MAX }, chunk = { 0, 1 << 20 }, any = { 0, INT64_MAX };
    infer_options *o = &p->o;
    int64_t seed = 0;
    const struct { const char *name, **to; } texts[] = {
        { "--prompt", &p->prompt }, { "--file", &p->file }, { "--tokens", &p->tokens },
        { "--logits", &p->logits }, { "--at", &p->at }, { "--chat", &p->chat },
        { "--load", &o->load }, { "--save", &o->save } };
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        if (strcmp(name, texts[i].name)) continue;
        *texts[i].to = s;
        return s ? 1 : refuse(name, "needs a value");
    }
    if (!strcmp(name, "--split")) {
        o->split = s && !strcmp(s, "yes") ? 1 : s && !strcmp(s, "no") ? -1 : 0;
        return o->split ? 1 : refuse(name, "yes or no");
    }
    if (!strcmp(name, "--stop")) return stop_text(p, s);
    if (p->mpi && !strncmp(name, "--rank", 6)) return refuse(name, "mpirun says that");
    if (!strcmp(name, "--cache")) return cache_type(s, &o->cache_dtype);
    if (!strcmp(name, "--predict")) return whole_number(name, s, tokens, &o->predict);
    if (!strcmp(name, "--context")) return whole_number(name, s, tokens, &o->context);
    if (!strcmp(name, "--chunk")) return whole_number(name, s, chunk, &o->chunk);
    if (!strcmp(name, "--ranks")) return small_number(name, s, 1, INFER_RANKS, &o->ranks);
    if (!strcmp(name, "--rank")) return small_number(name, s, 0, INFER_RANKS - 1, &p->rank);
    if (!strcmp(name, "--threads")) return small_number(name, s, 1, 1024, &o->threads);
    if (!strcmp(name, "--speculate")) return small_number(name, s, 0, 1 << 20, &o->speculate);
    if (!strcmp(name, "--top-k")) return small_number(name, s, 0, INT32_MAX, &o->top_k);
    if (!strcmp(name, "--temp")) return fraction(name, s, 1e6, &o->temperature);
    if (!strcmp(name, "--top-p")) return fraction(name, s, 1, &o->top_p);
    if (!strcmp(name, "--min-p")) return fraction(name, s, 1, &o->min_p);
    if (!strcmp(name, "--lanes")) return small_number(name, s, 1, 1024, &o->lanes);
    if (strcmp(name, "--seed")) return refuse(name, "no such option; -h lists them");
    if (!whole_number(name, s, any, &seed)) return 0;
    o->seed = (uint64_t)seed;
    return 1;
}

/* --at lists as many addresses as there are ranks, and --rank is one of them. */
static int ranks_agree(const program *p) {
    int64_t listed = 0;
    char why[96];
    if (p->mpi) return 1;
    if (!p->at != (p->rank < 0)) return refuse(p->path, "--at and --rank go together");
    if (!p->at) return 1;
    if (p->o.ranks) return refuse("--ranks", "the list of --at says how many there are");
    if (strlen(p->at) >= AT_BYTES) return refuse("--at", "the list is too long");
    for (const char *s = p->at; *s; s++) listed += *s != ',' && (s == p->at || s[-1] == ',');
    snprintf(why, sizeof why, "it lists %lld; 2 to %d addresses are possible",
             (long long)listed, INFER_RANKS);
    if (listed < 2 || listed > INFER_RANKS) return refuse("--at", why);
    snprintf(why, sizeof why, "%ld is not in 0..%lld, the ranks that --at lists", (long)p->rank,
             (long long)listed - 1);
    return p->rank < listed ? 1 : refuse("--rank", why);
}

static int arguments(program *p, int argc, char **argv) {
    const int cores = cores_here();
    struct stat from, to;
    p->path = argv[1];
    p->o.predict = 64;
    p->o.cache_dtype = RA_F16;
    p->o.threads = cores < 1024 ? cores : 1024;
    for (int i = 2; i < argc; i++) {
        if (!strcmp(argv[i], "--ids")) p->ids = 1;
        else if (!strcmp(argv[i], "--count-tokens")) p->count = 1;
        else if (!strcmp(argv[i], "--no-special")) p->no_special = 1;
        else if (!strcmp(argv[i], "--integers")) p->o.integers = 1;
        else if (!strcmp(argv[i], "--interactive")) p->o.turns = 1;
        else if (!strcmp(argv[i], "--perplexity")) p->o.losses = 1;
        else if (!strcmp(argv[i], "--shm")) p->shm = 1;
        else if (!option(p, argv[i], argv[i + 1])) return 0;
        else i++;
    }
    const int given = !!p->prompt + !!p->file + !!p->tokens;
    const int one = !p->at && !p->mpi;
    if (given > 1 || given + (p->o.turns && one) < 1)
        return refuse(p->path, "give one of --prompt, --file and --tokens");
    if (p->o.turns && p->ids) return refuse("--interactive", "turns are texts, not --ids");
    p->format = chat_named(p->chat ? p->chat : "none");
    if (!p->format) return refuse("--chat", "chatml, llama3, mistral, gemma or harmony");
    if (!!p->at + p->shm + p->mpi > 1) return refuse(p->path, "--at, --shm or mpirun, one of them");
    if (!ranks_agree(p)) return 0;
    if (p->o.losses) p->o.predict = 0;
    if (p->o.losses && (p->o.turns || p->o.load))
        return refuse("--perplexity", "of one prompt: without --interactive and --load");
    if ((p->at || p->shm || p->mpi) && (p->logits || p->o.losses))
        return refuse(p->logits ? "--logits" : "--perplexity",
                      "no process has the logits of all positions");
    if (p->logits && p->o.load)
        return refuse("--logits", "those of a loaded cache are not known");
    if (p->o.save && strlen(p->o.save) > CACHE_PATH / 2) return refuse("--save", "is too long");
    if (p->logits && !stat(p->logits, &to) && !stat(p->path, &from) && to.st_ino == from.st_ino &&
        to.st_dev == from.st_dev)
        return refuse("--logits", "that is the model");
    p->o.all_logits = p->logits != NULL;
    if (p->logits && p->count) return refuse("--logits", "--count-tokens runs no model");
    if (p->o.split > 0 && !p->at && !p->shm && !p->mpi)
        return refuse("--split", "ranks that are threads share products anyway; with --shm, --at "
                      "or mpirun");
    if (p->logits) p->logits_file = fopen(p->logits, "wb");
    if (p->logits && !p->logits_file) return refuse(p->logits, strerror(errno));
    return 1;
}

/* -------------------------------------------------------------------------- input */
/* Maps a whole file for reading. An empty one is refused. */
static const void *map(const char *path, size_t *bytes) {
    struct stat about;
    void *data = MAP_FAILED;
    const char *why = NULL;
    const int fd = open(path, O_RDONLY | O_NONBLOCK);      /* a pipe is refused at once */
    if (fd < 0 || fstat(fd, &about)) why = strerror(errno);
    else if (!S_ISREG(about.st_mode)) why = "is no regular file";
    else if (about.st_size == 0) why = "is empty";
    if (!why) {
        *bytes = (size_t)about.st_size;
        data = mmap(NULL, *bytes, PROT_READ, MAP_PRIVATE, fd, 0);
        if (data == MAP_FAILED) why = strerror(errno);
    }
    if (fd >= 0) close(fd);
    if (!why) return data;
    (void)refuse(path, why);
    return NULL;
}

static int read_ids(program *p) {
    const char *s = p->tokens;
    for (;;) {
        char *end = NULL;
        const long x = strtol(s, &end, 10);
        if (end == s || (*end && *end != ',') || x < 0 || x > INT32_MAX)
            return refuse("--tokens", "numbers with commas between them");
        if (!token_append(&p->in, (int32_t)x)) return refuse("--tokens", "no memory");
        if (!*end) return 1;
        s = end + 1;
    }
}

/* Why a text has no tokens. */
static int lacks_byte(const program *p, const char *text, size_t n) {
    char why[96];
    for (size_t i = 0; i < n && p->t.unknown < 0; i++) {
        if (p->t.byte[(uint8_t)text[i]] >= 0) continue;
        snprintf(why, sizeof why, "the vocabulary has no token for byte %u of the prompt, 0x%02X",
                 (unsigned)i, (unsigned)(uint8_t)text[i]);
        return refuse(p->path, why);
    }
    return refuse(p->path, "no memory for the tokens of the prompt");
}

/* Waits for a line of stdin. Returns its bytes, with its end; 0: there is none, or Ctrl-C. The line
 * is at p->line. */
static size_t await_line(program *p) {
    for (;;) {
        struct pollfd in = { 0, POLLIN, 0 };
        const char *end = p->lines ? (const char *)memchr(p->line, '\n', p->lines) : NULL;
        char *line;
        ssize_t n;
        if (end) return (size_t)(end + 1 - p->line);
        if (halt) return 0;
        if (poll(&in, 1, 100) <= 0) continue;
        line = (char *)realloc(p->line, p->lines + 4096);
        if (!line) return 0;
        p->line = line;
        n = read(0, line + p->lines, 4096);
        if (n == 0) return p->lines;                   /* the last line has no end */
        if (n < 0 && errno != EINTR) return 0;
        if (n > 0) p->lines += (size_t)n;
    }
}

/* Removes a line that has been used. */
static void drop_line(program *p, size_t n) {
    p->lines -= n;
    memmove(p->line, p->line + n, p->lines);
}

/* In a format, the end of a line is no part of the turn. */
static size_t turn_bytes(const program *p, size_t n) {
    if (p->chat && n && p->line[n - 1] == '\n') n--;
    if (p->chat && n && p->line[n - 1] == '\r') n--;
    return n;
}

static void show_mark(void) {
    if (isatty(0)) fprintf(stderr, "> ");
}

static int read_first_line(program *p) {
    size_t n;
    int ok;
    show_mark();
    n = await_line(p);
    if (!n) return refuse("--interactive", "stdin has no line");
    ok = chat_turn(&p->t, p->format, CHAT_FIRST, p->line, turn_bytes(p, n), &p->in);
    if (!ok) (void)lacks_byte(p, p->line, n);
    drop_line(p, n);
    return ok;
}

static int read_text(program *p) {
    const char *text = p->prompt;
    size_t n = text ? strlen(text) : 0;
    int ok;
    if (p->file) {
        text = (const char *)map(p->file, &n);
        if (!text) return 0;
    }
    ok = chat_turn(&p->t, p->format, CHAT_FIRST, text, n, &p->in);
    if (!ok) (void)lacks_byte(p, text, n);
    if (p->file) munmap((void *)(uintptr_t)text, n);
    return ok;
}

static int is_stop(const program *p, int32_t id) {
    for (int32_t i = 0; i < p->o.stops; i++)
        if (p->o.stop[i] == id) return 1;
    return 0;
}

static int open_file(const char *path, gguf *g, gguf_split *split) {
    char why[INFER_WHY];
    size_t bytes = 0;
    const void *data = map(path, &bytes);
    if (!data) return 0;
    if (!gguf_open(g, data, bytes, why)) return refuse(path, why);
    return gguf_split_of(g, split, why) ? 1 : refuse(path, why);
}

/* Opens the model's file, and the others if it is the first of NAME-00001-of-00003.gguf. */
static int open_files(program *p) {
    char path[4096], why[INFER_WHY], end[32];
    gguf_split all, one;
    if (!open_file(p->path, &p->g, &all)) return 0;
    if (all.count == 1) return 1;
    snprintf(end, sizeof end, "-00001-of-%05lld.gguf", (long long)all.count);
    const size_t n = strlen(p->path), tail = strlen(end);
    if (all.number || n < tail || n >= sizeof path || strcmp(p->path + n - tail, end)) {
        snprintf(why, sizeof why, "it is file %lld of %lld of a model; name the first one, which "
                 "ends in %s", (long long)all.number + 1, (long long)all.count, end);
        return refuse(p->path, why);
    }
    for (int64_t i = 1; i < all.count; i++) {
        gguf more;
        snprintf(path, sizeof path, "%.*s-%05lld-of-%05lld.gguf", (int)(n - tail), p->path,
                 (long long)i + 1, (long long)all.count);
        if (!open_file(path, &more, &one)) return 0;
        if (one.number != i || one.count != all.count)
            return refuse(path, "is of another split of a model");
        if (!gguf_join(&p->g, &more, why)) return refuse(path, why);
    }
    if (p->g.tensor_count == all.tensors) return 1;
    return refuse(p->path, "split.tensors.count is not the number of tensors in all files");
}

/* The stop tokens that the file names, where its vocabulary cannot be read. */
static void stops_without_texts(program *p) {
    static const char *const keys[] = { "tokenizer.ggml.eos_token_id",
        "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id" };
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        const gguf_value *v = gguf_find(&p->g, keys[i]);
        if (v && v->type == GGUF_U32 && !v->is_array && gguf_element(v, 0) < 2147483648.0)
            p->o.stop[p->o.stops++] = (int32_t)gguf_element(v, 0);
    }
}

static int open_model(program *p) {
    char why[INFER_WHY];
    if (!open_files(p)) return 0;
    if (!p->count && !model_open(&p->m, &p->g, why)) return refuse(p->path, why);
    if (p->m.unknown[0] && p->rank < 1)
        fprintf(stderr, "ring_infer: %s: keys that this engine does not know: %s\n", p->path,
                p->m.unknown);
    const int open = tokenizer_open(&p->t, &p->g, why);
    if (!open && p->tokens && p->ids && !p->stop.count) {  /* needs no vocabulary */
        stops_without_texts(p);
        return read_ids(p);
    }
    if (!open) {
        fprintf(stderr, "ring_infer: %s: %s; --tokens with --ids needs none\n", p->path, why);
        return 0;
    }
    p->t.no_special = p->no_special;
    for (int32_t i = 0; i < p->t.count; i++)
        if (token_ends(&p->t, i) && p->o.stops < INFER_STOPS) p->o.stop[p->o.stops++] = i;
    if (p->tokens) return read_ids(p);
    return p->prompt || p->file ? read_text(p) : read_first_line(p);
}

/* -------------------------------------------------------------------------- ranks */
/* Why a transport could not be opened. */
static int no_transport(infer_result *r, const ra_error *why) {
    snprintf(r->why, sizeof r->why, "%.40s: %.200s", why->field, why->text);
    return 0;
}

/* Runs this process as one of the ranks that --at lists. */
static int run_over_tcp(program *p, infer_result *r) {
    const char *at[INFER_RANKS];
    char list[AT_BYTES];
    ra_tcp_desc d;
    ra_tcp *tcp = NULL;
    ra_error why;
    int ok;
    memset(&d, 0, sizeof d);
    memset(&why, 0, sizeof why);
    snprintf(list, sizeof list, "%s", p->at);
    for (char *s = strtok(list, ","); s && d.ranks < INFER_RANKS; s = strtok(NULL, ","))
        at[d.ranks++] = s;
    d.rank = p->rank;
    d.addresses = at;
    d.error = &why;
    fprintf(stderr, "ring_infer: rank %ld waits at %s for the other %ld ranks, at most 60 s\n",
            (long)d.rank, at[d.rank], (long)d.ranks - 1);
    if (ra_tcp_open(&tcp, &d) != RA_OK) return no_transport(r, &why);
    p->o.ranks = d.ranks;
    listen_to_signals(p);
    ok = infer_run_rank(&p->m, &p->o, p->in.data, p->in.count, ra_tcp_transport(tcp), r);
    ra_tcp_close(tcp);
    return ok;
}

/* One of the processes that share memory. */
static int run_in_shm(const program *p, const char *name, infer_result *r) {
    ra_shm_desc d;
    ra_shm *shm = NULL;
    ra_error why;
    int ok;
    memset(&d, 0, sizeof d);
    memset(&why, 0, sizeof why);
    d.name = name;
    d.rank = p->rank;
    d.ranks = p->o.ranks;
    d.slot_bytes = infer_message_bytes(&p->m, &p->o, p->in.count);
    d.error = &why;
    if (ra_shm_open(&shm, &d) != RA_OK) return no_transport(r, &why);
    ok = infer_run_rank(&p->m, &p->o, p->in.data, p->in.count, ra_shm_transport(shm), r);
    ra_shm_close(shm);
    return ok;
}

/* This process becomes rank 0 and starts the others, which share the mapped weights with it. */
static int run_over_shm(program *p, infer_result *r) {
    pid_t pid[INFER_RANKS];
    char name[40];
    int ok;
    snprintf(name, sizeof name, "ring_infer.%ld", (long)getpid());
    p->o.threads = p->o.threads > p->o.ranks ? p->o.threads / p->o.ranks : 1;
    p->rank = 0;
    for (int32_t i = 1; i < p->o.ranks; i++) {
        pid[i] = fork();
        if (pid[i]) continue;
        p->rank = i;
        p->o.progress = NULL;
        p->o.token = NULL;
        if (p->o.turns) (void)signal(SIGINT, SIG_IGN);     /* rank 0 says what to do */
        ok = run_in_shm(p, name, r);
        if (!ok && r->why[0]) fprintf(stderr, "ring_infer: rank %ld: %s\n", (long)i, r->why);
        _exit(!ok);
    }
    ok = run_in_shm(p, name, r);
    for (int32_t i = 1; i < p->o.ranks; i++) {
        int status = 0;
        ok &= pid[i] > 0 && waitpid(pid[i], &status, 0) == pid[i] && !status;
    }
    if (!ok && !r->why[0]) snprintf(r->why, sizeof r->why, "a process failed");
    return ok;
}

#if defined(RING_INFER_MPI)
static int run_over_mpi(program *p, infer_result *r) {
    ra_mpi *mpi = NULL;
    ra_error why;
    int ok;
    memset(&why, 0, sizeof why);
    if (ra_mpi_open(&mpi, MPI_COMM_WORLD, 0, &why) != RA_OK) return no_transport(r, &why);
    ok = infer_run_rank(&p->m, &p->o, p->in.data, p->in.count, ra_mpi_transport(mpi), r);
    return ra_mpi_close(mpi) == RA_OK && ok;
}
#else
static int run_over_mpi(program *p, infer_result *r) { (void)p; (void)r; return 0; }
#endif

static int run_ranks(program *p, infer_result *r) {
    memset(r, 0, sizeof *r);
    if (p->at) return run_over_tcp(p, r);
    listen_to_signals(p);
    if (p->mpi) return run_over_mpi(p, r);
    if (p->shm && p->o.ranks > 1) return run_over_shm(p, r);
    return infer_run(&p->m, &p->o, p->in.data, p->in.count, r);
}

/* -------------------------------------------------------------------------- output */
/* A bar, the rate, and what is left at this rate; on a terminal, and if there is more to come. */
static void show_progress(void *user, int64_t done, int64_t of) {
    static const char bar[] = "########################################";
    program *p = (program *)user;
    const int width = (int)(40 * done / of);
    const double seconds = (double)(ra_now_ns() - p->start_ns) / 1e9 + 1e-9;
    const double rate = (double)(done - p->loaded) / seconds;
    if (p->loaded < 0) {               /* the first call */
        p->loaded = done;
        p->start_ns = ra_now_ns();
        return;
    }
    if (!isatty(2) || (done == of && !p->bar)) return;     /* a call is enough */
    p->bar = done < of;
    fprintf(stderr, "\rprompt [%-40.*s] %lld of %lld tokens, %.1f/s, %.0f s left   %s", width, bar,
            (long long)done, (long long)of, rate, (double)(of - done) / rate,
            done == of ? "\n" : "");
}

/* Prints what is held, except an end that may begin a stop text if more may follow. */
static int show_held(program *p, int over) {
    if (!p->held) return 0;
    size_t n = stop_find(&p->stop, p->held, p->held_size);
    const int found = n < p->held_size;
    if (!over && !found) n -= stop_kept(&p->stop, p->held, n);
    const int ok = fwrite(p->held, 1, n, stdout) == n && fflush(stdout) == 0;
    p->held_size = over || found ? 0 : p->held_size - n;
    memmove(p->held, p->held + n, p->held_size);
    return ok ? 0 : -1;
}

static int show_token(void *user, int32_t id) {
    program *p = (program *)user;
    size_t room = p->held_size + 16;
    char *held;
    p->last_ends = is_stop(p, id);
    if (p->ids) return printf("%ld\n", (long)id) > 0 && fflush(stdout) == 0 ? 0 : -1;
    if (p->last_ends) return 0;
    room += 4 * p->t.text[id].size;
    held = (char *)realloc(p->held, room);
    if (!held) return -1;
    p->held = held;
    p->held_size += token_bytes(&p->t, id, held + p->held_size, room - p->held_size);
    return show_held(p, 0);
}

/* The next turn: a line of stdin. */
static int64_t next_turn(void *user, const int32_t **tokens, int64_t room) {
    program *p = (program *)user;
    const int where = p->last_ends ? CHAT_AFTER_END : CHAT_AFTER_CUT;
    size_t n;
    int ok;
    (void)show_held(p, 1);
    printf("\n");
    (void)fflush(stdout);
    if (halt == SIGTERM) return 0;
    halt = 0;
    listen_to_signals(p);
    show_mark();
    n = await_line(p);
    p->in.count = 0;
    p->last_ends = 0;
    p->start_ns = ra_now_ns();
    p->loaded = 0;
    if (!n) return 0;
    ok = chat_turn(&p->t, p->format, where, p->line, turn_bytes(p, n), &p->in);
    if (!ok) (void)lacks_byte(p, p->line, n);
    drop_line(p, n);
    if (ok && p->in.count > room)
        (void)refuse("--interactive", "the turn does not fit the context; see --context");
    *tokens = p->in.data;
    return ok && p->in.count <= room ? p->in.count : 0;
}

static void show_note(void *user, const char *text) {
    const program *p = (const program *)user;
    if (p->o.ranks > 1 && p->rank >= 0)
        fprintf(stderr, "ring_infer: rank %ld: %s\n", (long)p->rank, text);
    else fprintf(stderr, "ring_infer: %s\n", text);
}

/* With --count-tokens. Returns the exit status. */
static int show_prompt(const program *p) {
    for (int64_t i = 0; p->ids && i < p->in.count; i++) printf("%ld\n", (long)p->in.data[i]);
    if (!p->ids) printf("%lld\n", (long long)p->in.count);
    return fflush(stdout) != 0;
}

static int write_logits(const program *p, const infer_result *r) {
    FILE *f = p->logits_file;
    const size_t n = (size_t)(r->cached * p->m.vocabulary);
    int ok = fwrite(r->logits, sizeof *r->logits, n, f) == n;
    ok = !fclose(f) && ok;
    return ok ? 1 : refuse(p->logits, "cannot be written");
}

static int show_perplexity(const infer_result *r) {
    double sum = 0;
    for (int64_t i = 1; i < r->prompt; i++) sum += r->loss[i];
    printf("%.6f %lld\n", r->prompt > 1 ? exp(sum / (double)(r->prompt - 1)) : 1,
           (long long)r->prompt - 1);
    return fflush(stdout) == 0;
}

static void show_figures(const program *p, const infer_result *r) {
    const int64_t more = r->written, computed = r->given - r->loaded;
    fprintf(stderr, "\nprompt  %6lld tokens, %8.1f tokens/s", (long long)r->given,
            (double)computed * 1e9 / (double)(r->prefill_ns + 1));
    if (computed < r->prompt)
        fprintf(stderr, ", %lld of them loaded in %.1f s, %lld computed", (long long)r->loaded,
                (double)r->load_ns / 1e9, (long long)computed);
    fprintf(stderr, "\ntext    %6lld tokens, %8.1f tokens/s, %lld calls of the model\n",
            (long long)more, (double)more * 1e9 / (double)(r->decode_ns + 1), (long long)r->steps);
    fprintf(stderr, "cache   %6.1f KiB on each of %ld ranks\n",
            (double)r->cache_bytes / 1024, (long)(p->o.ranks ? p->o.ranks : 1));
    if (r->saved > 0)
        fprintf(stderr, "saved   %6lld positions in %s\n", (long long)r->saved, p->o.save);
}

static int run(program *p, int argc, char **argv) {
    infer_result r;
    int ok, full, bad, help = argc < 2;
    for (int i = 1; i < argc; i++) help |= !strcmp(argv[i], "-h") || !strcmp(argv[i], "--help");
    if (help || argv[1][0] == '-') {
        fputs(usage, help ? stdout : stderr);
        return !help;
    }
    if (!arguments(p, argc, argv) || !open_model(p)) return 1;
    if (p->count) return show_prompt(p);
    p->loaded = -1;
    p->o.note = show_note;
    p->o.user = p;
    if (p->rank < 1) {                 /* the others compute and say nothing else */
        p->o.progress = show_progress;
        p->o.token = show_token;
        p->o.more = next_turn;
    }
    ok = p->over = run_ranks(p, &r);
    if (!ok) (void)refuse(p->path, r.why);
    if (ok && p->rank < 1) ok = show_held(p, 1) == 0;
    if (ok && p->logits) ok = write_logits(p, &r);
    if (ok && p->o.losses && r.ended != INFER_HALTED) ok = show_perplexity(&r);
    if (ok && p->rank < 1) show_figures(p, &r);
    full = ok && r.ended == INFER_FULL;
    if (full && p->rank < 1)
        fprintf(stderr, "ring_infer: the context is full; the text may go on\n");
    if (r.saved < 0) (void)refuse(p->o.save, "not all of the cache is saved");
    bad = r.saved < 0 || !ok ? 1 : full ? 2 : 0;
    if (!bad && r.ended == INFER_HALTED) bad = 128 + (halt ? halt : SIGINT);
    infer_free(&r);
    free(p->in.data);
    tokenizer_close(&p->t);
    model_close(&p->m);
    gguf_close(&p->g);
    free(p->line);
    free(p->held);
    return bad;
}

int main(int argc, char **argv) {
    static program p;
    int bad;
    p.rank = -1;
    (void)signal(SIGPIPE, SIG_IGN);    /* a closed stdout is an error of fwrite */
#if defined(RING_INFER_MPI)
    int level = 0, ranks = 0;
    MPI_Init_thread(&argc, &argv, MPI_THREAD_SERIALIZED, &level);
    MPI_Comm_rank(MPI_COMM_WORLD, &p.rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    p.mpi = 1;
    p.o.ranks = ranks;
#endif
    bad = run(&p, argc, argv);
#if defined(RING_INFER_MPI)
    if (bad && !p.over) MPI_Abort(MPI_COMM_WORLD, bad);
    MPI_Finalize();
#endif
    return bad;
}
