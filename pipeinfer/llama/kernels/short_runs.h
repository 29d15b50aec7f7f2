/* What short_runs.c, wide_floats.c and repacked_runs.c share: products of few rows. */

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
enum { F32 = 0, F16 = 1, Q8_0 = 8, BF16 = 30, Q8_0_BYTES = 34 };

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

/* hsum_float_8 of llama.cpp */
INLINE float sum_of(__m256 x)
{
    __m128 sum = _mm_add_ps(_mm256_extractf128_ps(x, 1), _mm256_castps256_ps128(x));
    sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
    sum = _mm_add_ss(sum, _mm_movehdup_ps(sum));
    return _mm_cvtss_f32(sum);
}

/* Rows of the right side, `apart` bytes from one to the next. Of types with blocks, of which a row has
   `blocks`: scale, other: what each begins with; numbers: the rest, `length` in a row; offsets: what
   a weight's offset adds to their sums by twos, int16. Of types without blocks: floats, `length` in a
   row. Of Q8_K: sums of 32 numbers, 8 a block, int16. */
struct rows { const uint8_t *at; size_t apart; const float *scale, *other; const int8_t *numbers,
              *offsets; const float *floats; int64_t blocks, length; const int16_t *pairs; };

enum { MOST_GROUP = 8,     /* rows that one pass over a weight's row takes */
       MOST_FLOATS = 6 };  /* the same for types without blocks */

typedef void passes(int count, int64_t blocks, const uint8_t *x, size_t x_apart, int64_t weights,
                    const struct rows *y, float *to, int64_t apart);

/* elements: of a block; step: blocks that a row is a multiple of; bytes: of a block; group: rows of a
   pass at most, as registers allow; scales: numbers in 16 bits that a partner's block begins with;
   offset: of what is stored; as_is: whether rows are taken from where they are */
struct kernel {
    passes *pass;
    int partner, elements, step, bytes, partner_bytes, group, scales, offset;
    bool as_is;
};

/* `weights` rows of weights by `count` rows, which the compiler knows in each of the loops */
#define PASSES(TARGET, NAME, DOTS)                                                                    \
TARGET static void NAME(int count, int64_t blocks, const uint8_t *x, size_t x_apart, int64_t weights, \
                        const struct rows *y, float *to, int64_t apart)                               \
{                                                                                                     \
    int64_t i;                                                                                        \
    switch (count) {                                                                                  \
    case 1: for (i = 0; i < weights; i++) DOTS(1, blocks, x + i * x_apart, y, to + i, apart); break;  \
    case 2: for (i = 0; i < weights; i++) DOTS(2, blocks, x + i * x_apart, y, to + i, apart); break;  \
    case 3: for (i = 0; i < weights; i++) DOTS(3, blocks, x + i * x_apart, y, to + i, apart); break;  \
    case 4: for (i = 0; i < weights; i++) DOTS(4, blocks, x + i * x_apart, y, to + i, apart); break;  \
    case 5: for (i = 0; i < weights; i++) DOTS(5, blocks, x + i * x_apart, y, to + i, apart); break;  \
    case 6: for (i = 0; i < weights; i++) DOTS(6, blocks, x + i * x_apart, y, to + i, apart); break;  \
    case 7: for (i = 0; i < weights; i++) DOTS(7, blocks, x + i * x_apart, y, to + i, apart); break;  \
    default: for (i = 0; i < weights; i++) DOTS(8, blocks, x + i * x_apart, y, to + i, apart);        \
    }                                                                                                 \
}

/* The `nth` kernel (0, 1, ...) of a type without blocks in the order of a llama.cpp that was compiled
   for AVX-512; NULL where there is none, or the processor lacks what it needs (wide_floats.c). */
__attribute__((visibility("hidden"))) const struct kernel *wide_kernel(int type, int nth);

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
