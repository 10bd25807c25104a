/* Loops that do nothing but what limits a kernel, to measure the kernel against, in turn with it.
 *
 *   peak_fma    multiply-adds of one instruction set, from registers, in inline assembly: a loop in
 *               C with that many accumulators is spilled by some compilers and then understates
 *               the peak, which would flatter the kernels.
 *   peak_read   reads two arrays once, as decoding reads K and V.
 *   peak_clock  a chain of dependent multiplications, 3 cycles each on every x86-64 processor since
 *               2008, from which the clock follows, so that it can be shown that peak_fma issues as
 *               many instructions a cycle as the processor has units.
 *
 * "scalar" is the baseline of x86-64, SSE2, which a compiler may use without flags: one multiply
 * and one add, no FMA. Elsewhere it is a loop in C. */
#if !defined(BENCH_PEAK_H)
#define BENCH_PEAK_H

#include <stddef.h>
#include <stdint.h>

enum { PEAK_SCALAR = 1, PEAK_AVX2, PEAK_AVX512 };

#if defined(__x86_64__)
/* 16 chains: a latency of 4 cycles and two units need 8. Returns FLOPs. */
__attribute__((target("avx512f"))) static double peak_fma_avx512(long turns) {
    const float factor = 0.9999f, term = 1e-4f;
    long n = turns;
    __asm__ volatile(
        "vbroadcastss %1, %%zmm16\n\t"
        "vbroadcastss %2, %%zmm17\n\t"
        "vmovaps %%zmm17, %%zmm0\n\t"  "vmovaps %%zmm17, %%zmm1\n\t"
        "vmovaps %%zmm17, %%zmm2\n\t"  "vmovaps %%zmm17, %%zmm3\n\t"
        "vmovaps %%zmm17, %%zmm4\n\t"  "vmovaps %%zmm17, %%zmm5\n\t"
        "vmovaps %%zmm17, %%zmm6\n\t"  "vmovaps %%zmm17, %%zmm7\n\t"
        "vmovaps %%zmm17, %%zmm8\n\t"  "vmovaps %%zmm17, %%zmm9\n\t"
        "vmovaps %%zmm17, %%zmm10\n\t" "vmovaps %%zmm17, %%zmm11\n\t"
        "vmovaps %%zmm17, %%zmm12\n\t" "vmovaps %%zmm17, %%zmm13\n\t"
        "vmovaps %%zmm17, %%zmm14\n\t" "vmovaps %%zmm17, %%zmm15\n\t"
        ".p2align 5\n"
        "1:\n\t"
        "vfmadd213ps %%zmm17, %%zmm16, %%zmm0\n\t"  "vfmadd213ps %%zmm17, %%zmm16, %%zmm1\n\t"
        "vfmadd213ps %%zmm17, %%zmm16, %%zmm2\n\t"  "vfmadd213ps %%zmm17, %%zmm16, %%zmm3\n\t"
        "vfmadd213ps %%zmm17, %%zmm16, %%zmm4\n\t"  "vfmadd213ps %%zmm17, %%zmm16, %%zmm5\n\t"
        "vfmadd213ps %%zmm17, %%zmm16, %%zmm6\n\t"  "vfmadd213ps %%zmm17, %%zmm16, %%zmm7\n\t"
        "vfmadd213ps %%zmm17, %%zmm16, %%zmm8\n\t"  "vfmadd213ps %%zmm17, %%zmm16, %%zmm9\n\t"
        "vfmadd213ps %%zmm17, %%zmm16, %%zmm10\n\t" "vfmadd213ps %%zmm17, %%zmm16, %%zmm11\n\t"
        "vfmadd213ps %%zmm17, %%zmm16, %%zmm12\n\t" "vfmadd213ps %%zmm17, %%zmm16, %%zmm13\n\t"
        "vfmadd213ps %%zmm17, %%zmm16, %%zmm14\n\t" "vfmadd213ps %%zmm17, %%zmm16, %%zmm15\n\t"
        "dec %0\n\t"
        "jnz 1b\n\t"
        "vzeroupper"
        : "+&r"(n)
        : "m"(factor), "m"(term)
        : "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9",
          "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15", "xmm16", "xmm17");
    return (double)turns * 16.0 * 16.0 * 2.0;
}

/* 14 chains of 8 lanes, the two remaining registers hold the factor and the term. */
__attribute__((target("avx2,fma"))) static double peak_fma_avx2(long turns) {
    const float factor = 0.9999f, term = 1e-4f;
    long n = turns;
    __asm__ volatile(
        "vbroadcastss %1, %%ymm14\n\t"
        "vbroadcastss %2, %%ymm15\n\t"
        "vmovaps %%ymm15, %%ymm0\n\t"  "vmovaps %%ymm15, %%ymm1\n\t"
        "vmovaps %%ymm15, %%ymm2\n\t"  "vmovaps %%ymm15, %%ymm3\n\t"
        "vmovaps %%ymm15, %%ymm4\n\t"  "vmovaps %%ymm15, %%ymm5\n\t"
        "vmovaps %%ymm15, %%ymm6\n\t"  "vmovaps %%ymm15, %%ymm7\n\t"
        "vmovaps %%ymm15, %%ymm8\n\t"  "vmovaps %%ymm15, %%ymm9\n\t"
        "vmovaps %%ymm15, %%ymm10\n\t" "vmovaps %%ymm15, %%ymm11\n\t"
        "vmovaps %%ymm15, %%ymm12\n\t" "vmovaps %%ymm15, %%ymm13\n\t"
        ".p2align 5\n"
        "1:\n\t"
        "vfmadd213ps %%ymm15, %%ymm14, %%ymm0\n\t"  "vfmadd213ps %%ymm15, %%ymm14, %%ymm1\n\t"
        "vfmadd213ps %%ymm15, %%ymm14, %%ymm2\n\t"  "vfmadd213ps %%ymm15, %%ymm14, %%ymm3\n\t"
        "vfmadd213ps %%ymm15, %%ymm14, %%ymm4\n\t"  "vfmadd213ps %%ymm15, %%ymm14, %%ymm5\n\t"
        "vfmadd213ps %%ymm15, %%ymm14, %%ymm6\n\t"  "vfmadd213ps %%ymm15, %%ymm14, %%ymm7\n\t"
        "vfmadd213ps %%ymm15, %%ymm14, %%ymm8\n\t"  "vfmadd213ps %%ymm15, %%ymm14, %%ymm9\n\t"
        "vfmadd213ps %%ymm15, %%ymm14, %%ymm10\n\t" "vfmadd213ps %%ymm15, %%ymm14, %%ymm11\n\t"
        "vfmadd213ps %%ymm15, %%ymm14, %%ymm12\n\t" "vfmadd213ps %%ymm15, %%ymm14, %%ymm13\n\t"
        "dec %0\n\t"
        "jnz 1b\n\t"
        "vzeroupper"
        : "+&r"(n)
        : "m"(factor), "m"(term)
        : "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9",
          "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15");
    return (double)turns * 14.0 * 8.0 * 2.0;
}

/* 8 chains of multiplications, 1 * 1, and 8 of additions, 0 + 0, of 4 lanes. */
static double peak_fma_scalar(long turns) {
    const float one = 1.0f;
    long n = turns;
    __asm__ volatile(
        "movss %1, %%xmm0\n\t"      "shufps $0, %%xmm0, %%xmm0\n\t"
        "movaps %%xmm0, %%xmm1\n\t" "xorps %%xmm8, %%xmm8\n\t"
        "movaps %%xmm0, %%xmm2\n\t" "xorps %%xmm9, %%xmm9\n\t"
        "movaps %%xmm0, %%xmm3\n\t" "xorps %%xmm10, %%xmm10\n\t"
        "movaps %%xmm0, %%xmm4\n\t" "xorps %%xmm11, %%xmm11\n\t"
        "movaps %%xmm0, %%xmm5\n\t" "xorps %%xmm12, %%xmm12\n\t"
        "movaps %%xmm0, %%xmm6\n\t" "xorps %%xmm13, %%xmm13\n\t"
        "movaps %%xmm0, %%xmm7\n\t" "xorps %%xmm14, %%xmm14\n\t"
        "xorps %%xmm15, %%xmm15\n\t"
        ".p2align 5\n"
        "1:\n\t"
        "mulps %%xmm0, %%xmm0\n\t" "addps %%xmm8, %%xmm8\n\t"
        "mulps %%xmm1, %%xmm1\n\t" "addps %%xmm9, %%xmm9\n\t"
        "mulps %%xmm2, %%xmm2\n\t" "addps %%xmm10, %%xmm10\n\t"
        "mulps %%xmm3, %%xmm3\n\t" "addps %%xmm11, %%xmm11\n\t"
        "mulps %%xmm4, %%xmm4\n\t" "addps %%xmm12, %%xmm12\n\t"
        "mulps %%xmm5, %%xmm5\n\t" "addps %%xmm13, %%xmm13\n\t"
        "mulps %%xmm6, %%xmm6\n\t" "addps %%xmm14, %%xmm14\n\t"
        "mulps %%xmm7, %%xmm7\n\t" "addps %%xmm15, %%xmm15\n\t"
        "dec %0\n\t"
        "jnz 1b"
        : "+&r"(n)
        : "m"(one)
        : "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9",
          "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15");
    return (double)turns * 16.0 * 4.0;
}

/* Returns the cycles of `turns` turns. */
static double peak_clock(long turns) {
    long n = turns;
    uint32_t x = 3;
    __asm__ volatile("1:\n\t"
                     "imul %1, %1\n\t" "imul %1, %1\n\t" "imul %1, %1\n\t" "imul %1, %1\n\t"
                     "imul %1, %1\n\t" "imul %1, %1\n\t" "imul %1, %1\n\t" "imul %1, %1\n\t"
                     "dec %0\n\t"
                     "jnz 1b"
                     : "+&r"(n), "+&r"(x) : : "cc");
    return (double)turns * 8.0 * 3.0;
}

/* FLOPs an instruction of peak_fma does. */
static double peak_flops_instruction(int32_t isa) {
    return isa == PEAK_AVX512 ? 32.0 : isa == PEAK_AVX2 ? 16.0 : 4.0;
}

static double peak_fma(int32_t isa, long turns) {
    if (isa == PEAK_AVX512) return peak_fma_avx512(turns);
    if (isa == PEAK_AVX2) return peak_fma_avx2(turns);
    return peak_fma_scalar(turns);
}
#else
static float peak_sink;

static double peak_fma(int32_t isa, long turns) {
    float a[32];
    (void)isa;
    for (int i = 0; i < 32; i++) a[i] = (float)i;
    for (long n = 0; n < turns; n++) {
        for (int i = 0; i < 32; i++) a[i] = a[i] * 0.9999f + 1e-4f;
    }
    for (int i = 0; i < 32; i++) peak_sink += a[i];
    return (double)turns * 64.0;
}
#endif

/* Touches every line of 64 bytes of both arrays once, in step, 4 KiB of each prefetched: two
 * streams fetch a little faster than one, and a longer distance gains nothing. bytes: a multiple
 * of 256, of each. Returns something that depends on all of it. */
static uint64_t peak_read(const void *a, const void *b, size_t bytes) {
    const char *p = (const char *)a, *q = (const char *)b;
    uint64_t sum = 0;
    for (size_t i = 0; i < bytes; i += 256) {
        for (size_t j = i; j < i + 256; j += 64) {
            __builtin_prefetch(p + j + 4096);
            __builtin_prefetch(q + j + 4096);
            sum += *(const volatile uint64_t *)(const void *)(p + j);
            sum += *(const volatile uint64_t *)(const void *)(q + j);
        }
    }
    return sum;
}

#endif
