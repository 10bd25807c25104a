/* Which experts a token goes to. Rows of several tokens that go to the same expert are put
 * together, so that an expert is one product.
 *
 *   experts_choose   the experts of a token and their shares
 *   experts_sort     the order of (token, expert) pairs by expert */
#if !defined(INFER_EXPERTS_H)
#define INFER_EXPERTS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

/* The `used` highest of n scores, the first of equal ones, and their shares: e^score over the sum
 * of those of all that are chosen. */
static inline void experts_choose(const float *score, int64_t n, int32_t used, int32_t *id,
                                  float *share) {
    double sum = 0;
    for (int32_t k = 0; k < used; k++) {
        id[k] = -1;
        for (int64_t i = 0; i < n; i++) {
            int taken = 0;
            for (int32_t j = 0; j < k; j++) taken |= id[j] == i;
            if (!taken && (id[k] < 0 || score[i] > score[id[k]])) id[k] = (int32_t)i;
        }
    }
    for (int32_t k = 0; k < used; k++) sum += exp((double)score[id[k]] - (double)score[id[0]]);
    for (int32_t k = 0; k < used; k++)
        share[k] = (float)(exp((double)score[id[k]] - (double)score[id[0]]) / sum);
}

/* place[i]: the row of pair i, whose expert is id[i]. start [experts + 1]: the first row of each
 * expert, then the number of all. */
static inline void experts_sort(const int32_t *id, int64_t pairs, int32_t experts, int64_t *place,
                                int64_t *start) {
    memset(start, 0, (size_t)(experts + 1) * sizeof *start);
    for (int64_t i = 0; i < pairs; i++) start[id[i] + 1]++;
    for (int32_t e = 0; e < experts; e++) start[e + 1] += start[e];
    for (int64_t i = 0; i < pairs; i++) place[i] = start[id[i]]++;
    for (int32_t e = experts; e > 0; e--) start[e] = start[e - 1];
    start[0] = 0;
}

#endif
