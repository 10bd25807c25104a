/* A query row of causal attention as small engines write it: scores, softmax and a weighted sum. It
 * is a separate translation unit, because the Makefile compiles it with all that a compiler can do:
 * -Ofast -march=native. */
#include <math.h>
#include <stdint.h>

void loop_row(const float *q, const float *k, const float *v, float *o, int64_t keys,
              int64_t stride, int dim);

/* Rows of k and v are `stride` floats apart. At most 65536 keys. */
void loop_row(const float *q, const float *k, const float *v, float *o, int64_t keys,
              int64_t stride, int dim) {
    static float att[65536];
    const float scale = 1.0f / sqrtf((float)dim);
    float most = -1e30f, sum = 0;
    for (int64_t j = 0; j < keys; j++) {
        float score = 0;
        for (int d = 0; d < dim; d++) score += q[d] * k[j * stride + d];
        att[j] = score * scale;
        most = att[j] > most ? att[j] : most;
    }
    for (int64_t j = 0; j < keys; j++) {
        att[j] = expf(att[j] - most);
        sum += att[j];
    }
    for (int d = 0; d < dim; d++) o[d] = 0;
    for (int64_t j = 0; j < keys; j++) {
        const float weight = att[j] / sum;
        for (int d = 0; d < dim; d++) o[d] += weight * v[j * stride + d];
    }
}
