/* Turns the trace of one pass into a picture: who computed which block when, and what travelled.
 * Include it after ringattn.h, give every rank's ring a lane,
 *
 *   rd.trace = tl_trace; rd.trace_ctx = &tl.lanes[rank];
 *
 * and call tl_write when the pass is over: FILE.svg and FILE.html open in a browser, FILE.json in
 * Perfetto or chrome://tracing. One stepping thread per rank (a lane has no lock). */
#ifndef TIMELINE_H
#define TIMELINE_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TL_RANKS = 64, TL_CELLS = 64, TL_ROOM = 1 << 15 };
enum { TL_LEFT = 126, TL_PLOT = 952, TL_WIDTH = 1180, TL_TOP = 122, TL_LANE = 44, TL_PITCH = 74 };

typedef struct tl_mark {               /* consecutive tiles against one chunk are one mark */
    int32_t kind, peer, origin;
    int64_t chunk, begin, end, bytes, tiles;
} tl_mark;

typedef struct tl_lane {
    tl_mark *marks;
    int64_t count, lost, first_ns, last_ns;   /* lost: marks for which there was no room */
    int64_t tokens;
    ra_run runs[2];                    /* positions of this rank, in the order of its rows */
    int32_t run_count, rank;
} tl_lane;

typedef struct tl {
    int32_t ranks, cores;
    int64_t tokens;                    /* of the sequence */
    int64_t first_ns, last_ns;
    const char *title, *note;
    tl_lane lanes[TL_RANKS];
} tl;

static int tl_open(tl *t, int32_t ranks) {
    memset(t, 0, sizeof *t);
    t->ranks = ranks;
    for (int32_t r = 0; r < ranks; r++) {
        t->lanes[r].rank = r;
        t->lanes[r].marks = (tl_mark *)malloc(sizeof(tl_mark) * TL_ROOM);
        if (!t->lanes[r].marks) return -1;
    }
    return 0;
}

static void tl_close(tl *t) {
    for (int32_t r = 0; r < t->ranks; r++) free(t->lanes[r].marks);
}

/* The callback. A tile that follows the last one against the same chunk lengthens its mark. */
static void tl_trace(void *ctx, const ra_event *e) {
    tl_lane *lane = (tl_lane *)ctx;
    tl_mark *last = lane->count ? &lane->marks[lane->count - 1] : NULL;
    if (e->kind == RA_EV_PASS) {
        lane->first_ns = e->begin_ns;
        lane->last_ns = e->end_ns;
        return;
    }
    if (e->kind > RA_EV_PASS) return;
    if (last && e->kind == RA_EV_TILE && last->kind == RA_EV_TILE && last->chunk == e->chunk) {
        last->end = e->end_ns;
        last->tiles += e->tiles;
        return;
    }
    if (lane->count == TL_ROOM) {
        lane->lost++;
        return;
    }
    tl_mark *m = &lane->marks[lane->count++];
    m->kind = e->kind;
    m->peer = e->peer;
    m->origin = e->origin;
    m->chunk = e->chunk;
    m->begin = e->begin_ns;
    m->end = e->end_ns;
    m->bytes = e->bytes;
    m->tiles = e->tiles;
}

/* -------------------------------------------------------------------------- reading the marks */
static const char *tl_colour(int32_t rank) {
    static const char *const palette[8] = {"#4e79a7", "#f28e2b", "#59a14f", "#b07aa1",
                                           "#e15759", "#4fb0ae", "#d4a51c", "#9c755f"};
    return palette[rank & 7];
}

static double tl_ms(const tl *t, int64_t ns) {
    return (double)(ns - t->first_ns) * 1e-6;
}

static double tl_x(const tl *t, int64_t ns) {
    return TL_LEFT + TL_PLOT * (double)(ns - t->first_ns) / (double)(t->last_ns - t->first_ns);
}

static int tl_y(int32_t rank) {
    return TL_TOP + rank * TL_PITCH;
}

/* Nanoseconds that a rank spent in tiles. */
static int64_t tl_busy(const tl_lane *lane) {
    int64_t ns = 0;
    for (int64_t i = 0; i < lane->count; i++)
        if (lane->marks[i].kind == RA_EV_TILE) ns += lane->marks[i].end - lane->marks[i].begin;
    return ns;
}

/* The span of the pass over all ranks; a rank without a PASS event counts by its marks. */
static void tl_span(tl *t) {
    int64_t first = INT64_MAX, last = 0;
    for (int32_t r = 0; r < t->ranks; r++) {
        const tl_lane *lane = &t->lanes[r];
        if (lane->last_ns && lane->first_ns < first) first = lane->first_ns;
        if (lane->last_ns > last) last = lane->last_ns;
        for (int64_t i = 0; i < lane->count; i++) {
            if (lane->marks[i].begin < first) first = lane->marks[i].begin;
            if (lane->marks[i].end > last) last = lane->marks[i].end;
        }
    }
    t->first_ns = last ? first : 0;
    t->last_ns = last > first ? last : t->first_ns + 1;
}

/* Text for XML: markup escaped, control bytes dropped, at most `most` characters. */
static void tl_text(FILE *f, const char *s, int most) {
    int n = 0;
    for (; *s && n < most; s++) {
        if (((unsigned char)*s & 0xc0) != 0x80) n++;
        if (*s == '<') fputs("&lt;", f);
        else if (*s == '>') fputs("&gt;", f);
        else if (*s == '&') fputs("&amp;", f);
        else if (*s == '"') fputs("&quot;", f);
        else if ((unsigned char)*s >= 32) fputc(*s, f);
    }
    while (((unsigned char)*s & 0xc0) == 0x80) fputc(*s++, f);
    if (*s) fputs("&#8230;", f);
}

/* 65536 as 65,536. Four buffers in turn, for calls within one printf. */
static const char *tl_count(int64_t n) {
    static char text[4][32];
    static int turn;
    char digits[32];
    char *out = text[turn = (turn + 1) & 3];
    int len = snprintf(digits, sizeof digits, "%lld", (long long)n), at = 0;
    for (int i = 0; i < len; i++) {
        if (i && (len - i) % 3 == 0 && digits[i - 1] != '-') out[at++] = ',';
        out[at++] = digits[i];
    }
    out[at] = 0;
    return out;
}

/* -------------------------------------------------------------------------- the picture */
static void tl_style(FILE *f) {
    fputs("<style>\n"
          ".tl{--ink:#222;--soft:#666;--rule:#ddd;--lane:#f1f2f4;--idle:#fff;--paper:#fff;"
          "font-family:system-ui,'Segoe UI','DejaVu Sans',sans-serif}\n"
          "@media(prefers-color-scheme:dark){.tl{--ink:#e8e8e8;--soft:#a8a8a8;--rule:#3a3d42;"
          "--lane:#2a2d32;--idle:#1b1d20;--paper:#1b1d20}}\n"
          ".tl text{fill:var(--ink);font-size:13px}.tl .h{font-size:20px;font-weight:600}\n"
          ".tl .s{fill:var(--soft);font-size:12px}.tl .e{text-anchor:end}.tl .m{text-anchor:"
          "middle}\n.tl .t{stroke:var(--idle);stroke-width:.5}.tl .t:hover{stroke:var(--ink);"
          "stroke-width:1.5}\n.tl .hop{fill:none;stroke-width:1.3;opacity:.75}"
          ".tl .hop:hover{stroke-width:3;opacity:1}\n</style>\n",
          f);
}

static void tl_head(const tl *t, FILE *f, int height) {
    fprintf(f,
            "<svg class=\"tl\" xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" "
            "width=\"%d\" height=\"%d\" role=\"img\">\n<title>",
            TL_WIDTH, height, TL_WIDTH, height);
    tl_text(f, t->title, 400);
    fputs("</title>\n", f);
    tl_style(f);
    fputs("<defs><pattern id=\"wait\" width=\"6\" height=\"6\" patternUnits=\"userSpaceOnUse\" "
          "patternTransform=\"rotate(45)\"><path d=\"M0 0V6\" stroke=\"#999\" stroke-width=\"1.6\""
          "/></pattern></defs>\n"
          "<rect width=\"100%\" height=\"100%\" fill=\"var(--paper)\"/>\n<text class=\"h\" x=\"20\""
          " y=\"36\">",
          f);
    tl_text(f, t->title, 92);
    fputs("</text>\n<text class=\"s\" x=\"20\" y=\"58\">", f);
    tl_text(f, t->note, 160);
    fputs("</text>\n<text class=\"s\" x=\"20\" y=\"76\">Each bar: one rank computing its queries "
          "against one chunk of keys. The colour says whose keys they were.</text>\n",
          f);
}

/* Axis in ms with a round step, gridlines through the lanes. */
static void tl_axis(const tl *t, FILE *f) {
    double span = tl_ms(t, t->last_ns), step = 1e-3;
    int bottom = tl_y(t->ranks - 1) + TL_LANE + 14;
    for (int i = 0; span / step > 10; i++) step *= i % 3 == 1 ? 2.5 : 2;
    for (int i = 0; i * step <= span * 1.0001; i++) {
        double x = TL_LEFT + TL_PLOT * i * step / span;
        fprintf(f, "<path d=\"M%.1f %dV%d\" stroke=\"var(--rule)\"/>", x, TL_TOP - 14, bottom);
        fprintf(f, "<text class=\"s m\" x=\"%.1f\" y=\"%d\">%g</text>\n", x, bottom + 16, i * step);
    }
    fprintf(f, "<text class=\"s e\" x=\"%d\" y=\"%d\">ms</text>\n", TL_WIDTH - 8, bottom + 16);
}

static void tl_bar(const tl *t, FILE *f, int32_t rank, const tl_mark *m) {
    double x = tl_x(t, m->begin), w = tl_x(t, m->end) - x;
    if (m->kind == RA_EV_WAIT) {
        if (w < 0.3) return;
        fprintf(f, "<rect x=\"%.2f\" y=\"%d\" width=\"%.2f\" height=\"%d\" fill=\"url(#wait)\">", x,
                tl_y(rank) + 10, w, TL_LANE - 20);
        fprintf(f, "<title>rank %d waits %.2f ms</title></rect>\n", (int)rank,
                (double)(m->end - m->begin) * 1e-6);
        return;
    }
    if (w < 0.4) w = 0.4;
    fprintf(f, "<path class=\"t\" d=\"M%.2f %dh%.2fv%dh%.2fz\" fill=\"%s\">", x, tl_y(rank), w,
            TL_LANE, -w, tl_colour(m->origin));
    fprintf(f, "<title>rank %d: %s tiles against chunk %lld, keys of rank %d\n%.2f to %.2f ms",
            (int)rank, tl_count(m->tiles), (long long)m->chunk, (int)m->origin,
            tl_ms(t, m->begin), tl_ms(t, m->end));
    fprintf(f, " (%.2f ms)</title></path>\n", (double)(m->end - m->begin) * 1e-6);
}

/* Label, background, bars, busy share of one rank. */
static void tl_draw_lane(const tl *t, FILE *f, int32_t rank) {
    const tl_lane *lane = &t->lanes[rank];
    int y = tl_y(rank);
    fprintf(f, "<rect x=\"20\" y=\"%d\" width=\"5\" height=\"%d\" fill=\"%s\"/>", y, TL_LANE,
            tl_colour(rank));
    fprintf(f, "<text x=\"32\" y=\"%d\">rank %d</text>", y + 19, (int)rank);
    fprintf(f, "<text class=\"s\" x=\"32\" y=\"%d\">%s token%s</text>\n", y + 36,
            tl_count(lane->tokens), lane->tokens == 1 ? "" : "s");
    fprintf(f, "<rect x=\"%d\" y=\"%d\" width=\"%d\" height=\"%d\" fill=\"var(--lane)\"/>\n",
            TL_LEFT, y, TL_PLOT, TL_LANE);
    for (int pass = 0; pass < 2; pass++)
        for (int64_t i = 0; i < lane->count; i++)
            if (lane->marks[i].kind == (pass ? RA_EV_TILE : RA_EV_WAIT))
                tl_bar(t, f, rank, &lane->marks[i]);
    fprintf(f, "<text class=\"s\" x=\"%d\" y=\"%d\">%.0f %%</text>", TL_LEFT + TL_PLOT + 12, y + 19,
            100 * (double)tl_busy(lane) / (double)(t->last_ns - t->first_ns));
    fprintf(f, "<text class=\"s\" x=\"%d\" y=\"%d\">in tiles</text>\n", TL_LEFT + TL_PLOT + 12,
            y + 36);
}

static const tl_mark *tl_find(const tl_lane *lane, int32_t kind, int64_t chunk) {
    for (int64_t i = 0; i < lane->count; i++)
        if (lane->marks[i].kind == kind && lane->marks[i].chunk == chunk) return &lane->marks[i];
    return NULL;
}

/* An arrow from the sender for the first chunk of every hop, behind the lanes. */
static void tl_hops(const tl *t, FILE *f, int32_t rank) {
    const tl_lane *lane = &t->lanes[rank];
    uint8_t seen[TL_RANKS] = {0};
    for (int64_t i = 0; i < lane->count; i++) {
        const tl_mark *m = &lane->marks[i];
        if (m->kind != RA_EV_RECV || m->origin < 0 || m->origin >= t->ranks) continue;
        if (seen[m->origin]++ || m->peer < 0 || m->peer >= t->ranks) continue;
        const tl_mark *s = tl_find(&t->lanes[m->peer], RA_EV_SEND, m->chunk);
        if (!s) continue;
        double x0 = tl_x(t, s->begin), x = tl_x(t, m->end);
        int down = m->peer < rank;
        int y0 = tl_y(m->peer) + (down ? TL_LANE : 0), y = tl_y(rank) + (down ? -8 : TL_LANE + 8);
        int mid = (y0 + y) / 2;
        fprintf(f, "<path class=\"hop\" stroke=\"%s\" d=\"M%.1f %dC%.1f %d %.1f %d %.1f %d\">",
                tl_colour(m->origin), x0, y0, x0, mid, x, mid, x, y);
        fprintf(f, "<title>first chunk of rank %d: sent by rank %d at %.2f ms, at rank %d at "
                "%.2f ms</title></path>\n", (int)m->origin, (int)m->peer, tl_ms(t, s->begin),
                (int)rank, tl_ms(t, m->end));
    }
}

/* A triangle for every chunk that arrives, at the side of the lane that it comes from. */
static void tl_arrivals(const tl *t, FILE *f, int32_t rank) {
    const tl_lane *lane = &t->lanes[rank];
    for (int64_t i = 0; i < lane->count; i++) {
        const tl_mark *m = &lane->marks[i];
        if (m->kind != RA_EV_RECV || m->origin < 0) continue;
        int down = m->peer < rank;
        fprintf(f, "<path d=\"M%.1f %dl-3 %dh6z\" fill=\"%s\"><title>rank %d has chunk %lld of "
                "rank %d, ", tl_x(t, m->end), tl_y(rank) + (down ? -2 : TL_LANE + 2), down ? -7 : 7,
                tl_colour(m->origin), (int)rank, (long long)m->chunk, (int)m->origin);
        fprintf(f, "from rank %d\n%.2f ms, %s bytes</title></path>\n", (int)m->peer,
                tl_ms(t, m->end), tl_count(m->bytes));
    }
}

static void tl_legend(const tl *t, FILE *f, int y) {
    int x = TL_LEFT;
    for (int r = 0; r < t->ranks && t->ranks <= 6; r++, x += 118)
        fprintf(f, "<rect x=\"%d\" y=\"%d\" width=\"14\" height=\"12\" fill=\"%s\"/><text "
                "class=\"s\" x=\"%d\" y=\"%d\">keys of rank %d</text>\n", x, y, tl_colour(r),
                x + 19, y + 11, r);
    if (t->ranks > 6) {
        fprintf(f, "<text class=\"s\" x=\"%d\" y=\"%d\">colours of the ranks as on the left%s"
                "</text>\n", x, y + 11, t->ranks > 8 ? ", repeated after 8" : "");
        x += 340;
    }
    fprintf(f, "<rect x=\"%d\" y=\"%d\" width=\"14\" height=\"12\" fill=\"url(#wait)\"/><text "
            "class=\"s\" x=\"%d\" y=\"%d\">waiting</text>\n", x, y, x + 19, y + 11);
    x += 86;
    fprintf(f, "<path d=\"M%d %dl-3 -7h6z\" fill=\"var(--soft)\"/><text class=\"s\" x=\"%d\" "
            "y=\"%d\">a chunk arrives</text>\n", x + 6, y + 10, x + 15, y + 11);
    x += 126;
    fprintf(f, "<path class=\"hop\" stroke=\"var(--soft)\" d=\"M%d %dc8 0 8 10 16 10\"/><text "
            "class=\"s\" x=\"%d\" y=\"%d\">first chunk of a hop</text>\n", x, y + 1, x + 21,
            y + 11);
}

/* -------------------------------------------------------------------------- queries x keys Which
 * rank holds position p, and where in its shard (0 first, 1 last). In a zigzag shard the second
 * piece runs backwards: its last block mirrors the first one. */
static int32_t tl_owner(const tl *t, int64_t p, double *where) {
    for (int32_t r = 0; r < t->ranks; r++)
        for (int32_t i = 0; i < t->lanes[r].run_count; i++) {
            const ra_run *run = &t->lanes[r].runs[i];
            if (p < run->first || p >= run->first + run->count) continue;
            *where = ((double)(p - run->first) + 0.5) / (double)run->count;
            if (i == 1) *where = 1 - *where;
            return r;
        }
    return -1;
}

/* First and last number of the chunks of every origin, as far as a tile was computed on them. */
static void tl_chunks(const tl *t, int64_t *first, int64_t *last) {
    for (int32_t r = 0; r < t->ranks; r++) {
        first[r] = INT64_MAX;
        last[r] = -1;
    }
    for (int32_t r = 0; r < t->ranks; r++)
        for (int64_t i = 0; i < t->lanes[r].count; i++) {
            const tl_mark *m = &t->lanes[r].marks[i];
            if (m->kind != RA_EV_TILE || m->origin < 0 || m->origin >= t->ranks) continue;
            if (m->chunk < first[m->origin]) first[m->origin] = m->chunk;
            if (m->chunk > last[m->origin]) last[m->origin] = m->chunk;
        }
}

/* Colour of a moment: 0 the first, 1 the last of the pass. */
static void tl_moment(double at, int rgb[3]) {
    static const int stop[5][3] = {{68, 1, 84}, {59, 82, 139}, {33, 145, 140}, {94, 201, 98},
                                   {253, 231, 37}};
    double s = (at < 0 ? 0 : at > 1 ? 1 : at) * 3.9999;
    int i = (int)s;
    for (int c = 0; c < 3; c++)
        rgb[c] = (int)(stop[i][c] + (s - i) * (stop[i + 1][c] - stop[i][c]));
}

typedef struct tl_grid {
    int x, y, cell, cells;             /* corner, pixels per cell, cells per side */
    int64_t first[TL_RANKS], last[TL_RANKS];
} tl_grid;

/* Rank and chunk of the keys in a column; -1: no rank has them. */
static int32_t tl_column(const tl *t, const tl_grid *g, int col, int64_t *chunk) {
    double where;
    int32_t r = tl_owner(t, (2 * (int64_t)col + 1) * t->tokens / (2 * g->cells), &where);
    if (r >= 0) *chunk = g->first[r] + (int64_t)(where * (double)(g->last[r] - g->first[r] + 1));
    return r;
}

/* Columns [col, next) of rows [row, row + rows): queries of one rank, keys of one chunk. */
static void tl_map_block(const tl *t, FILE *f, const tl_grid *g, const int at[4], int32_t rank) {
    int64_t chunk = 0;
    int rgb[3], row = at[0], rows = at[1], col = at[2], columns = at[3];
    int32_t origin = tl_column(t, g, col, &chunk);
    const tl_mark *m = origin < 0 || g->last[origin] < 0 ? NULL :
                       tl_find(&t->lanes[rank], RA_EV_TILE, chunk);
    if (!m || columns < 1) return;
    tl_moment(tl_ms(t, (m->begin + m->end) / 2) / tl_ms(t, t->last_ns), rgb);
    fprintf(f, "<path d=\"M%d %dh%dv%dh%dz\" fill=\"#%02x%02x%02x\"><title>queries of rank %d, "
            "keys of rank %d\nchunk %lld, %.2f ms</title></path>\n", g->x + col * g->cell,
            g->y + row * g->cell, columns * g->cell, rows * g->cell, -columns * g->cell,
            (unsigned)rgb[0], (unsigned)rgb[1], (unsigned)rgb[2], (int)rank, (int)origin,
            (long long)chunk, tl_ms(t, m->begin));
}

/* Rows [row, row + rows), all of one rank: keys from 0 to the diagonal. What all rows have left of
 * the diagonal is one block per chunk; the rest is drawn row by row. */
static void tl_map_band(const tl *t, FILE *f, const tl_grid *g, int row, int rows) {
    double where;
    int64_t chunk = 0, other = 0;
    int32_t rank = tl_owner(t, (2 * (int64_t)row + 1) * t->tokens / (2 * g->cells), &where);
    if (rank < 0) return;
    fprintf(f, "<path d=\"M%d %dh6v%dh-6z\" fill=\"%s\"/>\n", g->x - 10, g->y + row * g->cell,
            rows * g->cell, tl_colour(rank));
    for (int col = 0, next; col < row + rows; col = next) {
        int32_t origin = tl_column(t, g, col, &chunk);
        for (next = col + 1; next < row + rows; next++)
            if (tl_column(t, g, next, &other) != origin || other != chunk) break;
        int whole[4] = {row, rows, col, next - col};
        if (next - 1 <= row) tl_map_block(t, f, g, whole, rank);
        for (int r = row; r < row + rows && next - 1 > row; r++) {
            int part[4] = {r, 1, col, (next < r + 1 ? next : r + 1) - col};
            tl_map_block(t, f, g, part, rank);
        }
    }
}

static void tl_map_words(const tl *t, FILE *f, int x, int y) {
    static const char *const words[] = {
        "A row is a stretch of queries, a column a stretch of keys; causal, so half is empty.",
        "The strip on the left says which rank holds the row: zigzag gives every rank one",
        "early and one late stretch, so that all have the same work to do.",
        "The colour says when the block was computed, from dark (first) to yellow (last).",
        "Every row meets its keys in one and the same order, whatever the number of ranks:",
        "that is why the result has the same bits on 1 rank and on any number of them."};
    fprintf(f, "<text x=\"%d\" y=\"%d\" font-weight=\"600\">The same pass as a map</text>\n", x, y);
    for (int i = 0; i < 6; i++)
        fprintf(f, "<text class=\"s\" x=\"%d\" y=\"%d\">%s</text>\n", x, y + 26 + 20 * i, words[i]);
    for (int i = 0; i < 60; i++) {
        int rgb[3];
        tl_moment(i / 59.0, rgb);
        fprintf(f, "<rect x=\"%d\" y=\"%d\" width=\"5\" height=\"12\" fill=\"#%02x%02x%02x\"/>",
                x + i * 4, y + 158, (unsigned)rgb[0], (unsigned)rgb[1], (unsigned)rgb[2]);
    }
    fprintf(f, "\n<text class=\"s\" x=\"%d\" y=\"%d\">0 ms</text><text class=\"s e\" x=\"%d\" "
            "y=\"%d\">%.*f ms</text>\n", x, y + 186, x + 241, y + 186,
            tl_ms(t, t->last_ns) < 100 ? 2 : 0, tl_ms(t, t->last_ns));
    if (t->cores < t->ranks)
        fprintf(f, "<text class=\"s\" x=\"%d\" y=\"%d\">%d ranks shared %d processor%s here: a bar "
                "also covers the time in which another rank had it.</text>\n", x, y + 216,
                (int)t->ranks, (int)t->cores, t->cores == 1 ? "" : "s");
}

static void tl_map(const tl *t, FILE *f, int x, int y) {
    tl_grid g;
    g.x = x;
    g.y = y;
    g.cells = t->tokens < TL_CELLS ? (int)t->tokens : TL_CELLS;
    g.cell = g.cells ? 320 / g.cells : 1;
    tl_chunks(t, g.first, g.last);
    fprintf(f, "<g shape-rendering=\"crispEdges\"><rect x=\"%d\" y=\"%d\" width=\"%d\" "
            "height=\"%d\" fill=\"var(--lane)\"/>\n", x, y, g.cells * g.cell, g.cells * g.cell);
    for (int row = 0, next; row < g.cells; row = next) {
        double where;
        int32_t rank = tl_owner(t, (2 * (int64_t)row + 1) * t->tokens / (2 * g.cells), &where);
        for (next = row + 1; next < g.cells; next++)
            if (tl_owner(t, (2 * (int64_t)next + 1) * t->tokens / (2 * g.cells), &where) != rank)
                break;
        tl_map_band(t, f, &g, row, next - row);
    }
    fputs("</g>\n", f);
    fprintf(f, "<text class=\"s m\" x=\"%d\" y=\"%d\">keys, first to last</text>", x + 160,
            y + 340);
    fprintf(f, "<text class=\"s m\" transform=\"translate(%d %d)rotate(-90)\">queries, first to "
            "last</text>\n", x - 18, y + 160);
    tl_map_words(t, f, x + 370, y + 16);
}

static void tl_svg(const tl *t, FILE *f) {
    int legend = tl_y(t->ranks - 1) + TL_LANE + 46, map = legend + 44;
    tl_head(t, f, map + 360);
    tl_axis(t, f);
    for (int32_t r = 0; r < t->ranks; r++) tl_hops(t, f, r);
    for (int32_t r = 0; r < t->ranks; r++) tl_draw_lane(t, f, r);
    for (int32_t r = 0; r < t->ranks; r++) tl_arrivals(t, f, r);
    tl_legend(t, f, legend);
    tl_map(t, f, TL_LEFT, map);
    fputs("</svg>\n", f);
}

static void tl_html(const tl *t, FILE *f) {
    fputs("<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">"
          "<meta name=\"viewport\" content=\"width=device-width,initial-scale=1\"><title>", f);
    tl_text(f, t->title, 400);
    fputs("</title>\n<style>body{margin:0;font:14px/1.5 system-ui,'Segoe UI','DejaVu Sans',"
          "sans-serif;color:#222;background:#fff}.w{overflow-x:auto}.w svg{display:block;margin:0 "
          "auto;width:100%;max-width:1180px;min-width:860px;height:auto}"
          "@media(prefers-color-scheme:dark){body{color:#e8e8e8;background:#1b1d20}}</style>"
          "</head><body><div class=\"w\">\n", f);
    tl_svg(t, f);
    fputs("</div></body></html>\n", f);
}

/* Chrome's trace format: complete events in microseconds, a thread per rank. */
static void tl_json(const tl *t, FILE *f) {
    const char *const what[] = {"", "tiles", "send", "receive", "wait", "pass", "fail"};
    fputs("{\"traceEvents\":[\n", f);
    for (int32_t r = 0; r < t->ranks; r++) {
        int last = r + 1 == t->ranks && !t->lanes[r].count;
        fprintf(f, "{\"name\":\"thread_name\",\"ph\":\"M\",\"pid\":0,\"tid\":%d,\"args\":{\"name\":"
                "\"rank %d\"}}%s\n", (int)r, (int)r, last ? "" : ",");
        for (int64_t i = 0; i < t->lanes[r].count; i++) {
            const tl_mark *m = &t->lanes[r].marks[i];
            int more = i + 1 < t->lanes[r].count || r + 1 < t->ranks;
            fprintf(f, "{\"name\":\"%s, keys of rank %d\",\"ph\":\"X\",\"pid\":0,\"tid\":%d,\"ts\":"
                    "%.3f,\"dur\":%.3f,", what[m->kind >= 0 && m->kind < 7 ? m->kind : 0],
                    (int)m->origin, (int)r, tl_ms(t, m->begin) * 1e3,
                    (double)(m->end - m->begin) * 1e-3);
            fprintf(f, "\"args\":{\"chunk\":%lld,\"tiles\":%lld,\"bytes\":%lld,\"peer\":%d}}%s\n",
                    (long long)m->chunk, (long long)m->tiles, (long long)m->bytes, (int)m->peer,
                    more ? "," : "");
        }
    }
    fputs("]}\n", f);
}

/* The end of the name decides: .svg, .json, else HTML. 0, or -1 with errno set. */
static int tl_write(tl *t, const char *path) {
    size_t n = strlen(path);
    FILE *f = fopen(path, "wb");
    if (!f) return -1;
    tl_span(t);
    if (n > 4 && !strcmp(path + n - 4, ".svg")) tl_svg(t, f);
    else if (n > 5 && !strcmp(path + n - 5, ".json")) tl_json(t, f);
    else tl_html(t, f);
    int bad = ferror(f);
    return fclose(f) || bad ? -1 : 0;
}

#endif
