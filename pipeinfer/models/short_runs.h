/* What short_runs.c and repacked_runs.c share: products of few rows with AVX2. */

#ifndef PIPEINFER_SHORT_RUNS_H
#define PIPEINFER_SHORT_RUNS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define KERNELS 1
#include <immintrin.h>
#endif

/* ggml's numbers of types that several files know, and the bytes of a block of 32 */
enum { F32 = 0, F16 = 1, Q8_0 = 8, Q8_0_BYTES = 34 };

enum { MOST_ROWS = 16,       /* more are a prompt's, where other kernels are better */
       MOST_BLOCKS = 1024 }; /* of a row whose scales are kept unpacked */

/* ggml_compute_params, as far as it is known */
struct team { int ith, nth; size_t bytes; void *work; void *pool; };

/* ggml_type_traits_cpu */
struct traits {
    void (*from_float)(const float *from, void *to, int64_t count);
    void (*dot)(int n, float *to, size_t, const void *x, size_t, const void *y, size_t, int);
    int partner;
    int64_t rows;
};

#ifdef KERNELS

#define AVX2 __attribute__((target("avx2,fma,f16c")))
#define UNROLLED _Pragma("GCC unroll 8")
#define ALIGNED __attribute__((aligned(64)))
#define INLINE AVX2 static inline __attribute__((always_inline))

INLINE uint16_t bits_of(const uint8_t *half)
{
    uint16_t bits;
    memcpy(&bits, half, sizeof bits);
    return bits;
}

INLINE float one(const uint8_t *half) { return _cvtsh_ss(bits_of(half)); }

INLINE __m256i load(const uint8_t *from) { return _mm256_loadu_si256((const __m256i *)from); }

/* Weights come from memory once, row after row, and the processor's own look ahead ends with each
   page. */
enum { AHEAD = 2048, LINE = 64 };

INLINE void fetch(const uint8_t *x, int bytes)
{
    int at;
    UNROLLED
    for (at = 0; at < bytes; at += LINE)
        _mm_prefetch((const char *)x + AHEAD + at, _MM_HINT_T0);
}

static inline bool has_avx2(void)
{
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")
        && __builtin_cpu_supports("f16c");
}

/* Numbers for trials of kernels: the same in every process. */
static inline uint32_t roll(uint32_t *dice)
{
    *dice = *dice * 1664525u + 1013904223u;
    return *dice >> 8;
}

/* A scale of a moderate size, as float16 */
static inline uint16_t some_scale(uint32_t *dice)
{
    const uint32_t bits = roll(dice) & 0x83ff;
    return (uint16_t)(bits | 0x2800 | (roll(dice) & 0x0400));
}

/* A number of a row before it is quantised */
static inline float some_number(uint32_t *dice)
{
    const float whole = (float)((int)(roll(dice) & 0xffff) - 0x8000);
    return whole / (float)(1 << (13 + roll(dice) % 4));
}

#endif
#endif
