/* The tiles of AMX in vector code. ringattn.h includes this file in place of its assembly if
 * RA__AMX_SOFT names it, so that the kernels of that room run on any machine with AVX512 BF16. Each
 * thread has its own tiles, as on a processor. */
static __thread uint8_t hook_tile[8][1024];
#define HOOK_TILE RA__UNUSED RA__AMX_TARGET static

HOOK_TILE void ra__tile_begin(void) {
    memset(hook_tile, 0, sizeof hook_tile);
}
HOOK_TILE void ra__tile_end(void) {}
HOOK_TILE void ra__tile_zero(int32_t c) {
    memset(hook_tile[c], 0, 1024);
}
HOOK_TILE void ra__tile_load(int32_t i, const void *p, int64_t stride) {
    for (int32_t r = 0; r < 16; r++)
        memcpy(hook_tile[i] + 64 * r, (const uint8_t *)p + r * stride, 64);
}
HOOK_TILE void ra__tile_stream(int32_t i, const void *p, int64_t stride) {
    ra__tile_load(i, p, stride);
}
HOOK_TILE void ra__tile_store(int32_t c, void *p, int64_t stride) {
    for (int32_t r = 0; r < 16; r++) memcpy((uint8_t *)p + r * stride, hook_tile[c] + 64 * r, 64);
}
/* tile[c] += tile[4 + c / 2] tile[6 + c % 2] */
HOOK_TILE void ra__tile_dot(int32_t c) {
    const __m512i high = _mm512_set1_epi32((int32_t)0xffff0000u);
    for (int32_t r = 0; r < 16; r++) {
        __m512 sum = _mm512_loadu_ps((const float *)(const void *)(hook_tile[c] + 64 * r));
        for (int32_t k = 0; k < 16; k++) {
            __m512i a = ra__bf_broadcast(hook_tile[4 + c / 2] + 64 * r + 4 * k);
            __m512i b = _mm512_loadu_si512(hook_tile[6 + c % 2] + 64 * k);
            sum = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(a, 16)),
                                  _mm512_castsi512_ps(_mm512_slli_epi32(b, 16)), sum);
            sum = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(a, high)),
                                  _mm512_castsi512_ps(_mm512_and_si512(b, high)), sum);
        }
        _mm512_storeu_ps((float *)(void *)(hook_tile[c] + 64 * r), sum);
    }
}
