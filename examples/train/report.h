/* What a run shows: the loss as an SVG, and the size that gzip and xz give a text. */
#if !defined(TRAIN_REPORT_H)
#define TRAIN_REPORT_H

#include "checkpoint.h"

/* Draws bits per byte by step, n values in [0, 9), averaged so that at most 600 points remain. */
static inline int report_svg(const char *path, const float *bits, int64_t first, int64_t n) {
    const int64_t each = n / 600 + 1;
    FILE *f = fopen(path, "w");
    if (!f) return 0;
    fprintf(f, "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 700 360\" "
               "font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"700\" height=\"360\" "
               "fill=\"#fff\"/>\n<text x=\"60\" y=\"20\">bits per byte by step</text>\n");
    for (int y = 0; y <= 8; y++)
        fprintf(f, "<path d=\"M60 %d H680\" stroke=\"#ddd\"/><text x=\"40\" y=\"%d\">%d</text>\n",
                330 - y * 36, 334 - y * 36, y);
    fprintf(f, "<text x=\"56\" y=\"350\">%lld</text><text x=\"640\" y=\"350\">%lld</text>\n"
               "<polyline fill=\"none\" stroke=\"#06c\" points=\"", (long long)first,
            (long long)(first + n));
    for (int64_t i = 0; i < n; i += each) {
        double sum = 0;
        int64_t j = i;
        for (; j < n && j < i + each; j++) sum += (double)bits[j];
        fprintf(f, "%.1f,%.1f ", 60 + 620.0 * (double)i / (double)(n > 1 ? n : 2),
                330 - 36 * sum / (double)(j - i));
    }
    fprintf(f, "\"/>\n</svg>\n");
    const int ok = !ferror(f);
    return fclose(f) == 0 && ok;
}

/* Bytes that a command makes of a file; 0: it is not there, or it failed. */
static inline int64_t report_packed(const char *command, const char *path) {
    char line[TRAIN_PATH + 64];
    long long bytes = 0;
    if (strchr(path, '\'')) return 0;
    snprintf(line, sizeof line, "%s -c '%s' 2>/dev/null | wc -c", command, path);
    FILE *f = popen(line, "r");
    if (!f) return 0;
    if (fscanf(f, "%lld", &bytes) != 1) bytes = 0;
    (void)pclose(f);
    return (int64_t)bytes;
}

#endif
