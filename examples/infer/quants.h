/* The quantised types of weights in GGUF files, widened to f32. Every function widens one block;
 * its elements have the bits that the gguf package gives. A block of 32 or 256 elements has one
 * scale (a half), and in the types of 256 every 16 or 32 elements have a small integer that
 * multiplies it. Types ending in 1 and q2_K, q4_K and q5_K also subtract a minimum.
 *
 *   quant_block(type)              elements and bytes of a block; 0 elements: no such type
 *   quant_widen(type, from, n, to) n elements, whole blocks
 *
 * `type` is the number that the file has. */
#if !defined(INFER_QUANTS_H)
#define INFER_QUANTS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { QUANT_Q4_0 = 2, QUANT_Q4_1 = 3, QUANT_Q5_0 = 6, QUANT_Q5_1 = 7, QUANT_Q2_K = 10,
       QUANT_Q3_K = 11, QUANT_Q4_K = 12, QUANT_Q5_K = 13, QUANT_Q6_K = 14, QUANT_IQ4_NL = 20,
       QUANT_IQ4_XS = 23, QUANT_MXFP4 = 39 };

typedef struct quant_size { int elements, bytes; } quant_size;

static inline quant_size quant_block(uint32_t type) {
    static const struct { uint8_t type, bytes, small; } all[] = {
        { QUANT_Q4_0, 18, 1 }, { QUANT_Q4_1, 20, 1 }, { QUANT_Q5_0, 22, 1 }, { QUANT_Q5_1, 24, 1 },
        { QUANT_Q2_K, 84, 0 }, { QUANT_Q3_K, 110, 0 }, { QUANT_Q4_K, 144, 0 },
        { QUANT_Q5_K, 176, 0 }, { QUANT_Q6_K, 210, 0 }, { QUANT_IQ4_NL, 18, 1 },
        { QUANT_IQ4_XS, 136, 0 }, { QUANT_MXFP4, 17, 1 } };
    quant_size s = { 0, 0 };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        if (all[i].type != type) continue;
        s.elements = all[i].small ? 32 : 256;
        s.bytes = all[i].bytes;
    }
    return s;
}

/* -------------------------------------------------------------------------- parts of a block */
static inline float quant_of_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

/* The half at p: its exponent moves by a product with 2^112; infinity and NaN are put back. */
static inline float quant_half(const uint8_t *p) {
    const uint32_t h = (uint32_t)p[0] | (uint32_t)p[1] << 8;
    const float x = quant_of_bits((h & 0x7fffu) << 13) * 5192296858534827628530496329220096.0f;
    uint32_t bits;
    memcpy(&bits, &x, 4);
    bits |= (h & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0;
    return quant_of_bits(bits | (h & 0x8000u) << 16);
}

/* A product and a sum are rounded separately, so they may not become one instruction. */
#if defined(__clang__)
#define QUANT_EXACT __attribute__((noinline, unused))
#define QUANT_ROUND_BOTH _Pragma("clang fp contract(off)")
#else
#define QUANT_EXACT __attribute__((noinline, unused, optimize("O3", "fp-contract=off")))
#define QUANT_ROUND_BOTH
#endif

/* to = scale q, and to = scale q - less. */
static inline void quant_scale(const int8_t *q, int n, float scale, float *to) {
    for (int i = 0; i < n; i++) to[i] = scale * (float)q[i];
}

static QUANT_EXACT void quant_scale_less(const int8_t *q, int n, float scale, float less,
                                         float *to) {
    QUANT_ROUND_BOTH
    for (int i = 0; i < n; i++) to[i] = scale * (float)q[i] - less;
}

/* n low halves of bytes, then n high halves. */
static inline void quant_nibbles(const uint8_t *from, int n, int8_t *q) {
    for (int i = 0; i < n; i++) q[i] = (int8_t)(from[i] & 15);
    for (int i = 0; i < n; i++) q[n + i] = (int8_t)(from[i] >> 4);
}

/* -------------------------------------------------------------------------- blocks of 32 */
static inline void quant_q4_0(const uint8_t *b, float *to) {
    int8_t q[32];
    quant_nibbles(b + 2, 16, q);
    for (int i = 0; i < 32; i++) q[i] = (int8_t)(q[i] - 8);
    quant_scale(q, 32, quant_half(b), to);
}

static inline void quant_q4_1(const uint8_t *b, float *to) {
    int8_t q[32];
    quant_nibbles(b + 4, 16, q);
    quant_scale_less(q, 32, quant_half(b), -quant_half(b + 2), to);
}

/* Nibbles at b + 4, with the fifth bits of all elements at b. */
static inline void quant_five(const uint8_t *b, int8_t *q) {
    quant_nibbles(b + 4, 16, q);
    for (int i = 0; i < 32; i++) q[i] = (int8_t)(q[i] | (b[i / 8] >> i % 8 & 1) << 4);
}

static inline void quant_q5_0(const uint8_t *b, float *to) {
    int8_t q[32];
    quant_five(b + 2, q);
    for (int i = 0; i < 32; i++) q[i] = (int8_t)(q[i] - 16);
    quant_scale(q, 32, quant_half(b), to);
}

static inline void quant_q5_1(const uint8_t *b, float *to) {
    int8_t q[32];
    quant_five(b + 4, q);
    quant_scale_less(q, 32, quant_half(b), -quant_half(b + 2), to);
}

/* Sixteen values that are closer together near 0, by nibble. */
static inline void quant_curve(const uint8_t *from, float scale, float *to) {
    static const int8_t curve[16] = { -127, -104, -83, -65, -49, -35, -22, -10,
                                      1, 13, 25, 38, 53, 69, 89, 113 };
    int8_t q[32];
    quant_nibbles(from, 16, q);
    for (int i = 0; i < 32; i++) q[i] = curve[q[i]];
    quant_scale(q, 32, scale, to);
}

/* Floats of 4 bits (here doubled, to be whole), with a power of two as their scale. */
static inline void quant_mxfp4(const uint8_t *b, float *to) {
    static const int8_t twice[16] = { 0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12 };
    const uint32_t bits = b[0] < 2 ? 0x200000u << b[0] : (uint32_t)(b[0] - 1) << 23;
    int8_t q[32];
    quant_nibbles(b + 1, 16, q);
    for (int i = 0; i < 32; i++) q[i] = twice[q[i]];
    quant_scale(q, 32, quant_of_bits(bits), to);
}

/* -------------------------------------------------------------------------- blocks of 256 */
/* Two bits per element: 32 bytes have elements i, i + 32, i + 64 and i + 96. */
static inline int quant_two(const uint8_t *from, int i) {
    return from[i / 128 * 32 + i % 32] >> i % 128 / 32 * 2 & 3;
}

static inline void quant_q2_k(const uint8_t *b, float *to) {
    const float scale = quant_half(b + 80), less = quant_half(b + 82);
    int8_t q[256];
    for (int i = 0; i < 256; i++) q[i] = (int8_t)quant_two(b + 16, i);
    for (int g = 0; g < 16; g++)
        quant_scale_less(q + 16 * g, 16, scale * (float)(b[g] & 15), less * (float)(b[g] >> 4),
                         to + 16 * g);
}

/* The factor of group g has 4 bits at b[96..103] and 2 at b[104..107]. */
static inline void quant_q3_k(const uint8_t *b, float *to) {
    const float scale = quant_half(b + 108);
    int8_t q[256];
    for (int i = 0; i < 256; i++)
        q[i] = (int8_t)(quant_two(b + 32, i) - (b[i % 32] >> i / 32 & 1 ? 0 : 4));
    for (int g = 0; g < 16; g++) {
        const int low = b[96 + g % 8] >> g / 8 * 4 & 15, high = b[104 + g % 4] >> g / 4 * 2 & 3;
        quant_scale(q + 16 * g, 16, scale * (float)((low | high << 4) - 32), to + 16 * g);
    }
}

/* Factors and minima of q4_K and q5_K, 6 bits each: those of groups 0 to 3 in s[0..3] and s[4..7],
 * of groups 4 to 7 in the nibbles of s[8..11] and the two high bits of the others. */
static inline void quant_group(const uint8_t *b, int g, const int8_t *q, float *to) {
    const uint8_t *s = b + 4;
    const int k = g % 4;
    const int factor = g < 4 ? s[k] & 63 : (s[8 + k] & 15) | (s[k] >> 6) << 4;
    const int least = g < 4 ? s[4 + k] & 63 : s[8 + k] >> 4 | (s[4 + k] >> 6) << 4;
    quant_scale_less(q, 32, quant_half(b) * (float)factor, quant_half(b + 2) * (float)least, to);
}

static inline void quant_q4_k(const uint8_t *b, float *to) {
    int8_t q[256];
    for (int i = 0; i < 4; i++) quant_nibbles(b + 16 + 32 * i, 32, q + 64 * i);
    for (int g = 0; g < 8; g++) quant_group(b, g, q + 32 * g, to + 32 * g);
}

static inline void quant_q5_k(const uint8_t *b, float *to) {
    int8_t q[256];
    for (int i = 0; i < 4; i++) quant_nibbles(b + 48 + 32 * i, 32, q + 64 * i);
    for (int i = 0; i < 256; i++) q[i] = (int8_t)(q[i] | (b[16 + i % 32] >> i / 32 & 1) << 4);
    for (int g = 0; g < 8; g++) quant_group(b, g, q + 32 * g, to + 32 * g);
}

static inline void quant_q6_k(const uint8_t *b, float *to) {
    const float scale = quant_half(b + 208);
    int8_t q[256];
    for (int i = 0; i < 2; i++) quant_nibbles(b + 64 * i, 64, q + 128 * i);
    for (int i = 0; i < 256; i++) q[i] = (int8_t)((q[i] | quant_two(b + 128, i) << 4) - 32);
    for (int g = 0; g < 16; g++)
        quant_scale(q + 16 * g, 16, scale * (float)(int8_t)b[192 + g], to + 16 * g);
}

/* The factor of group g has 4 bits in b[4..7] and 2 in b[2..3]. */
static inline void quant_iq4_xs(const uint8_t *b, float *to) {
    const float scale = quant_half(b);
    const int highs = b[2] | b[3] << 8;
    for (int g = 0; g < 8; g++) {
        const int low = b[4 + g / 2] >> g % 2 * 4 & 15, high = highs >> 2 * g & 3;
        quant_curve(b + 8 + 16 * g, scale * (float)((low | high << 4) - 32), to + 32 * g);
    }
}

/* -------------------------------------------------------------------------- all of them */
static QUANT_EXACT void quant_widen(uint32_t type, const uint8_t *from, int64_t n, float *to) {
    const quant_size s = quant_block(type);
    for (int64_t i = 0; s.elements && i < n; i += s.elements, from += s.bytes, to += s.elements) {
        switch (type) {
        case QUANT_Q4_0: quant_q4_0(from, to); break;
        case QUANT_Q4_1: quant_q4_1(from, to); break;
        case QUANT_Q5_0: quant_q5_0(from, to); break;
        case QUANT_Q5_1: quant_q5_1(from, to); break;
        case QUANT_Q2_K: quant_q2_k(from, to); break;
        case QUANT_Q3_K: quant_q3_k(from, to); break;
        case QUANT_Q4_K: quant_q4_k(from, to); break;
        case QUANT_Q5_K: quant_q5_k(from, to); break;
        case QUANT_Q6_K: quant_q6_k(from, to); break;
        case QUANT_IQ4_NL: quant_curve(from + 2, quant_half(from), to); break;
        case QUANT_IQ4_XS: quant_iq4_xs(from, to); break;
        default: quant_mxfp4(from, to); break;
        }
    }
}

#endif
