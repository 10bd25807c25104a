/* Writes a Llama with random weights, of the vocabulary that tests/model_file.h describes.
 *
 *   random_model OUT.gguf small|1b CONTEXT */
#define _POSIX_C_SOURCE 200809L
#define RINGATTN_IMPLEMENTATION
#include "ringattn.h"
#include "tests/model_file.h"

int main(int argc, char **argv) {
    made_shape s = { 2, 64, 4, 2, 16, 128, 64, 0, 0, RA_F32, 1 };
    const made_shape large = { 16, 2048, 32, 8, 64, 8192, 32000, 0, 0, RA_F16, 1 };
    made_file f;
    FILE *out;
    int ok;
    if (argc != 4) {
        fprintf(stderr, "random_model OUT.gguf small|1b CONTEXT\n");
        return 1;
    }
    if (!strcmp(argv[2], "1b")) s = large;
    s.context = (int32_t)strtol(argv[3], NULL, 10);
    made_model(&f, &s);
    out = fopen(argv[1], "wb");
    ok = out && fwrite(f.data, 1, f.size, out) == f.size;
    ok = out && fclose(out) == 0 && ok;
    free(f.data);
    if (!ok) perror(argv[1]);
    return !ok;
}
