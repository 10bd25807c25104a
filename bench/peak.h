/* Loops that do only what limits a kernel. Each kernel is timed in turn with one of them.
 *
 *   peak_fma    multiply-adds of one instruction set, from registers, in inline assembly: a loop in
 *               C with that many accumulators would be spilled by some compilers, understate the
 *               peak and flatter the kernels. For bf16 they are dot products of pairs on random
 *               data, because power, and so the clock, depends on the data. For AMX they are
 *               products of tiles.
 *   peak_read   reads two arrays once, as decoding reads K and V.
 *   peak_clock  a chain of dependent multiplications, 3 cycles each on every x86-64 processor since
 *               2008. The clock follows from it, and from the clock that peak_fma issues as many
 *               instructions per cycle as the processor has units.
 *
 * "scalar" is the baseline of x86-64, SSE2, which a compiler may use without flags: one multiply
 * and one add instead of an FMA. On AArch64 it is NEON's FMA, elsewhere a loop in C. */
#if !defined(BENCH_PEAK_H)
#define BENCH_PEAK_H

#include <stddef.h>
#include <stdint.h>
#if defined(__x86_64__)
#include <cpuid.h>
#include <unistd.h>
#include <sys/syscall.h>
#endif

enum { PEAK_SCALAR = 1, PEAK_AVX2, PEAK_AVX512, PEAK_AVX512_BF16, PEAK_AMX, PEAK_NEON };

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

/* Random bits by xorshift (Marsaglia, 2003). The state must not be 0. */
static uint32_t peak_random(uint32_t *state) {
    *state ^= *state << 13;
    *state ^= *state >> 17;
    return *state ^= *state << 5;
}

/* 64 bytes of random bf16 between 1/2 and 2, either sign, three times. */
static const uint16_t *peak_random_bf16(void) {
    static __thread uint16_t x[96];        /* threads measure at the same time */
    uint32_t state = 1;
    for (int i = 0; i < 96; i++) {
        x[i] = (uint16_t)(0x3f00u + (peak_random(&state) >> 16 & 0x80ffu));
    }
    return x;
}

/* 16 chains as in the kernels, latency 6 cycles on Zen 5. */
__attribute__((target("avx512f,avx512bf16"))) static double peak_dot_bf16(long turns) {
    const uint16_t *x = peak_random_bf16();
    long n = turns;
    __asm__ volatile(
        "vmovups (%1), %%zmm29\n\t" "vmovups 64(%1), %%zmm30\n\t" "vmovups 128(%1), %%zmm31\n\t"
        "vpxord %%zmm0, %%zmm0, %%zmm0\n\t" "vpxord %%zmm1, %%zmm1, %%zmm1\n\t"
        "vpxord %%zmm2, %%zmm2, %%zmm2\n\t" "vpxord %%zmm3, %%zmm3, %%zmm3\n\t"
        "vpxord %%zmm4, %%zmm4, %%zmm4\n\t" "vpxord %%zmm5, %%zmm5, %%zmm5\n\t"
        "vpxord %%zmm6, %%zmm6, %%zmm6\n\t" "vpxord %%zmm7, %%zmm7, %%zmm7\n\t"
        "vpxord %%zmm8, %%zmm8, %%zmm8\n\t" "vpxord %%zmm9, %%zmm9, %%zmm9\n\t"
        "vpxord %%zmm10, %%zmm10, %%zmm10\n\t" "vpxord %%zmm11, %%zmm11, %%zmm11\n\t"
        "vpxord %%zmm12, %%zmm12, %%zmm12\n\t" "vpxord %%zmm13, %%zmm13, %%zmm13\n\t"
        "vpxord %%zmm14, %%zmm14, %%zmm14\n\t" "vpxord %%zmm15, %%zmm15, %%zmm15\n\t"
        ".p2align 5\n"
        "1:\n\t"
        "vdpbf16ps %%zmm30, %%zmm31, %%zmm0\n\t" "vdpbf16ps %%zmm30, %%zmm31, %%zmm1\n\t"
        "vdpbf16ps %%zmm30, %%zmm31, %%zmm2\n\t" "vdpbf16ps %%zmm30, %%zmm31, %%zmm3\n\t"
        "vdpbf16ps %%zmm30, %%zmm31, %%zmm4\n\t" "vdpbf16ps %%zmm30, %%zmm31, %%zmm5\n\t"
        "vdpbf16ps %%zmm30, %%zmm31, %%zmm6\n\t" "vdpbf16ps %%zmm30, %%zmm31, %%zmm7\n\t"
        "vdpbf16ps %%zmm30, %%zmm31, %%zmm8\n\t" "vdpbf16ps %%zmm30, %%zmm31, %%zmm9\n\t"
        "vdpbf16ps %%zmm30, %%zmm31, %%zmm10\n\t" "vdpbf16ps %%zmm30, %%zmm31, %%zmm11\n\t"
        "vdpbf16ps %%zmm30, %%zmm31, %%zmm12\n\t" "vdpbf16ps %%zmm30, %%zmm31, %%zmm13\n\t"
        "vdpbf16ps %%zmm30, %%zmm31, %%zmm14\n\t" "vdpbf16ps %%zmm30, %%zmm31, %%zmm15\n\t"
        "vdpbf16ps %%zmm29, %%zmm31, %%zmm0\n\t" "vdpbf16ps %%zmm29, %%zmm31, %%zmm1\n\t"
        "vdpbf16ps %%zmm29, %%zmm31, %%zmm2\n\t" "vdpbf16ps %%zmm29, %%zmm31, %%zmm3\n\t"
        "vdpbf16ps %%zmm29, %%zmm31, %%zmm4\n\t" "vdpbf16ps %%zmm29, %%zmm31, %%zmm5\n\t"
        "vdpbf16ps %%zmm29, %%zmm31, %%zmm6\n\t" "vdpbf16ps %%zmm29, %%zmm31, %%zmm7\n\t"
        "vdpbf16ps %%zmm29, %%zmm31, %%zmm8\n\t" "vdpbf16ps %%zmm29, %%zmm31, %%zmm9\n\t"
        "vdpbf16ps %%zmm29, %%zmm31, %%zmm10\n\t" "vdpbf16ps %%zmm29, %%zmm31, %%zmm11\n\t"
        "vdpbf16ps %%zmm29, %%zmm31, %%zmm12\n\t" "vdpbf16ps %%zmm29, %%zmm31, %%zmm13\n\t"
        "vdpbf16ps %%zmm29, %%zmm31, %%zmm14\n\t" "vdpbf16ps %%zmm29, %%zmm31, %%zmm15\n\t"
        "dec %0\n\t"
        "jnz 1b\n\t"
        "vzeroupper"
        : "+&r"(n)
        : "r"(x)
        : "cc", "memory", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8",
          "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15", "xmm29", "xmm30", "xmm31");
    return (double)turns * 32.0 * 64.0;
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

/* Products of tiles of 16 x 32 bf16, four accumulators, 8 per turn. Requests permission for tile
 * data from Linux, arch_prctl ARCH_REQ_XCOMP_PERM; 0 if it is refused. */
__attribute__((target("amx-tile,amx-bf16"))) static double peak_tiles_amx(long turns) {
    static __thread uint16_t data[4][512];
    uint8_t config[64] = { 1 };
    uint32_t state = 1;
    long n = turns;
    if (syscall(SYS_arch_prctl, 0x1023, 18) != 0) return 0;
    for (int i = 0; i < 8; i++) {
        config[16 + 2 * i] = 64;       /* bytes per row */
        config[48 + i] = 16;           /* rows */
    }
    for (int i = 0; i < 4 * 512; i++) {
        data[i / 512][i % 512] = (uint16_t)(0x3f00u + (peak_random(&state) >> 16 & 0x80ffu));
    }
    __asm__ volatile(
        "ldtilecfg (%2)\n\t"
        "tilezero %%tmm0\n\t" "tilezero %%tmm1\n\t" "tilezero %%tmm2\n\t" "tilezero %%tmm3\n\t"
        "tileloadd (%1,%3,1), %%tmm4\n\t"     "tileloadd 1024(%1,%3,1), %%tmm5\n\t"
        "tileloadd 2048(%1,%3,1), %%tmm6\n\t" "tileloadd 3072(%1,%3,1), %%tmm7\n\t"
        ".p2align 5\n"
        "1:\n\t"
        "tdpbf16ps %%tmm6, %%tmm4, %%tmm0\n\t" "tdpbf16ps %%tmm7, %%tmm4, %%tmm1\n\t"
        "tdpbf16ps %%tmm6, %%tmm5, %%tmm2\n\t" "tdpbf16ps %%tmm7, %%tmm5, %%tmm3\n\t"
        "tdpbf16ps %%tmm7, %%tmm5, %%tmm0\n\t" "tdpbf16ps %%tmm6, %%tmm5, %%tmm1\n\t"
        "tdpbf16ps %%tmm7, %%tmm4, %%tmm2\n\t" "tdpbf16ps %%tmm6, %%tmm4, %%tmm3\n\t"
        "dec %0\n\t"
        "jnz 1b\n\t"
        "tilerelease"
        : "+&r"(n)
        : "r"(data), "r"(config), "r"((size_t)64)
        : "cc", "memory");
    return (double)turns * 8.0 * 16384.0;
}

/* FLOPs per instruction of peak_fma. */
static double peak_flops_instruction(int32_t isa) {
    static const double flops[] = { 1, 4, 16, 32, 64, 16384, 8 };
    return flops[isa];
}

static const char *peak_text(int32_t isa) {
    static const char *const text[] = { "", "SSE multiplies and adds", "FMA instructions",
                                        "FMA instructions", "dot products", "tile products",
                                        "FMA instructions" };
    return text[isa];
}

static double peak_fma(int32_t isa, long turns) {
    if (isa == PEAK_AMX) return peak_tiles_amx(turns);
    if (isa == PEAK_AVX512_BF16) return peak_dot_bf16(turns);
    if (isa == PEAK_AVX512) return peak_fma_avx512(turns);
    if (isa == PEAK_AVX2) return peak_fma_avx2(turns);
    return peak_fma_scalar(turns);
}

/* Family and model of the processor; 0 for a maker that peak_nominal does not know. */
static uint32_t peak_model(int32_t *amd) {
    uint32_t a = 0, b = 0, c = 0, d = 0, family, model;
    if (!__get_cpuid(0, &a, &b, &c, &d)) return 0;
    *amd = b == 0x68747541u;           /* "Auth"enticAMD; "Genu"ineIntel */
    if (!*amd && b != 0x756e6547u) return 0;
    __get_cpuid(1, &a, &b, &c, &d);
    family = (a >> 8 & 15) + (a >> 20 & 255);
    model = (a >> 4 & 15) | (a >> 12 & 0xf0);
    return family << 8 | model;
}

/* Instructions of peak_fma that the processor is known to start per cycle; 0: not known here. AMD's
 * optimisation guides for families 17h, 19h and 1Ah; Intel's manual, throughput of FMA (two units
 * of 512 bits on servers) and of TDPBF16PS (16 cycles). */
static double peak_nominal(int32_t isa) {
    int32_t amd = 0;
    const uint32_t id = peak_model(&amd), family = id >> 8, model = id & 255;
    const int server = !amd && (model == 0x55 || model == 0x6a || model == 0x8f || model == 0xcf ||
                                model == 0xad);
    if (id == 0) return 0;
    if (isa == PEAK_AMX) return 1.0 / 16.0;
    if (amd && (family < 0x17 || (family == 0x17 && model < 0x30))) return 0;
    if (isa == PEAK_SCALAR) return amd ? 4 : 0;
    if (isa == PEAK_AVX2) return 2;
    if (amd && family == 0x1a) return model >> 4 & 2 ? 1 : 2; /* 1: models for laptops */
    if (amd) return 1;                 /* Zen 4: 512 bits in two halves */
    return isa == PEAK_AVX512 && server ? 2 : 0;
}
#elif defined(__aarch64__)
/* 24 chains of 4 lanes. */
static double peak_fma_neon(long turns) {
    long n = turns;
    __asm__ volatile(
        "fmov v30.4s, #0.5\n\t" "fmov v31.4s, #0.25\n"
        "1:\n\t"
        "fmla v0.4s, v30.4s, v31.4s\n\t"  "fmla v1.4s, v30.4s, v31.4s\n\t"
        "fmla v2.4s, v30.4s, v31.4s\n\t"  "fmla v3.4s, v30.4s, v31.4s\n\t"
        "fmla v4.4s, v30.4s, v31.4s\n\t"  "fmla v5.4s, v30.4s, v31.4s\n\t"
        "fmla v6.4s, v30.4s, v31.4s\n\t"  "fmla v7.4s, v30.4s, v31.4s\n\t"
        "fmla v8.4s, v30.4s, v31.4s\n\t"  "fmla v9.4s, v30.4s, v31.4s\n\t"
        "fmla v10.4s, v30.4s, v31.4s\n\t" "fmla v11.4s, v30.4s, v31.4s\n\t"
        "fmla v12.4s, v30.4s, v31.4s\n\t" "fmla v13.4s, v30.4s, v31.4s\n\t"
        "fmla v14.4s, v30.4s, v31.4s\n\t" "fmla v15.4s, v30.4s, v31.4s\n\t"
        "fmla v16.4s, v30.4s, v31.4s\n\t" "fmla v17.4s, v30.4s, v31.4s\n\t"
        "fmla v18.4s, v30.4s, v31.4s\n\t" "fmla v19.4s, v30.4s, v31.4s\n\t"
        "fmla v20.4s, v30.4s, v31.4s\n\t" "fmla v21.4s, v30.4s, v31.4s\n\t"
        "fmla v22.4s, v30.4s, v31.4s\n\t" "fmla v23.4s, v30.4s, v31.4s\n\t"
        "subs %0, %0, #1\n\t"
        "b.ne 1b"
        : "+&r"(n) : : "cc", "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10",
          "v11", "v12", "v13", "v14", "v15", "v16", "v17", "v18", "v19", "v20", "v21", "v22", "v23",
          "v30", "v31");
    return (double)turns * 24.0 * 8.0;
}

static double peak_fma(int32_t isa, long turns) { return (void)isa, peak_fma_neon(turns); }
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

/* Touches every line of 64 bytes of both arrays once, alternately, and prefetches 4 KiB of each:
 * two streams are a little faster than one, and a longer distance gains nothing. bytes: of each
 * array, a multiple of 256. Returns something that depends on all of it. */
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
