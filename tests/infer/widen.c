/* Widens blocks of a quantised type, which it reads from stdin, and writes them as f32 to stdout.
 *
 *   widen TYPE      the number of the type in GGUF */
#include "examples/infer/quants.h"

#include <stdio.h>
#include <stdlib.h>

int main(int argc, char **argv) {
    const uint32_t type = argc > 1 ? (uint32_t)atoi(argv[1]) : 0;
    const quant_size s = quant_block(type);
    uint8_t block[256];
    float wide[256];
    if (!s.elements) return 1;
    while (fread(block, (size_t)s.bytes, 1, stdin) == 1) {
        quant_widen(type, block, s.elements, wide);
        fwrite(wide, sizeof *wide, (size_t)s.elements, stdout);
    }
    return fflush(stdout) != 0;
}
