/* What the files about products of few rows share. */

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

/* ggml's numbers of types, and the bytes of their blocks */
enum { F32 = 0, F16 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q8_0 = 8, Q8_1 = 9, Q4_K = 12, Q5_K = 13,
       Q6_K = 14, Q8_K = 15, BF16 = 30, TYPES = 31 };
enum { Q8_0_BYTES = 34, Q4_K_BYTES = 144, Q5_K_BYTES = 176, Q6_K_BYTES = 210, Q8_K_BYTES = 292 };

enum { MOST_ROWS = 16,       /* unpacked together; more are a prompt's */
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

/* hsum_float_8 of llama.cpp: halves, then every second, then the rest */
INLINE float sum_of(__m256 x)
{
    __m128 sum = _mm_add_ps(_mm256_extractf128_ps(x, 1), _mm256_castps256_ps128(x));
    sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
    sum = _mm_add_ss(sum, _mm_movehdup_ps(sum));
    return _mm_cvtss_f32(sum);
}

INLINE __m256 sums_of_halves(__m256 a, __m256 b)
{
    return _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
}

/* The same of four */
INLINE __m128 four_sums(const __m256 *x)
{
    const __m256 ab = sums_of_halves(x[0], x[1]), cd = sums_of_halves(x[2], x[3]);
    const __m128 a = _mm256_castps256_ps128(ab), b = _mm256_extractf128_ps(ab, 1);
    const __m128 c = _mm256_castps256_ps128(cd), d = _mm256_extractf128_ps(cd, 1);
    const __m128 two = _mm_add_ps(_mm_unpacklo_ps(a, b), _mm_unpackhi_ps(a, b));
    const __m128 more = _mm_add_ps(_mm_unpacklo_ps(c, d), _mm_unpackhi_ps(c, d));
    return _mm_add_ps(_mm_movelh_ps(two, more), _mm_movehl_ps(more, two));
}

/* The sum of each row, and what `more` has for it, to numbers that are `apart` */
INLINE void sums_to(int count, const __m256 *sums, const float *more, float *to, int64_t apart)
{
    int row;
    UNROLLED
    for (row = 0; row < count; row++)
        if (row + 4 <= count && row % 4 == 0) {
            __m128 four = four_sums(sums + row);
            if (more)
                four = _mm_add_ps(four, _mm_loadu_ps(more + row));
            to[row * apart] = _mm_cvtss_f32(four);
            to[(row + 1) * apart] = _mm_cvtss_f32(_mm_movehdup_ps(four));
            to[(row + 2) * apart] = _mm_cvtss_f32(_mm_movehl_ps(four, four));
            to[(row + 3) * apart] = _mm_cvtss_f32(_mm_shuffle_ps(four, four, 0xff));
        } else if (row >= count / 4 * 4) {
            to[row * apart] = more ? sum_of(sums[row]) + more[row] : sum_of(sums[row]);
        }
}

INLINE __m256 eight_f32(const uint8_t *from)
{
    return _mm256_loadu_ps((const float *)(const void *)from);
}

INLINE __m256 eight_f16(const uint8_t *from)
{
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)from));
}

INLINE __m256 eight_bf16(const uint8_t *from)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(
        _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(const void *)from)), 16));
}

/* Rows of the right side that a pass takes, `count`, as they are (`at`, `apart` bytes from one to the
   next) and unpacked. Of types with blocks: scale: what a block begins with, of each row
   `length`; and by block and then by row, so that a pass reads on and on: other: a block's
   second number, for MOST_GROUP rows; numbers: the rest, by parts of 32; offsets: what a weight's
   offset adds to products by twos, 16 int16 a part; pairs: of Q8_K, sums of 32 numbers, 8 int16 a
   block. Of types without: floats, `length` in a row. */
struct rows { const uint8_t *at; size_t apart; const float *scale, *other; const int8_t *numbers,
              *offsets; const int16_t *pairs; const float *floats; int64_t length; };

enum { MOST_GROUP = 8,     /* rows that one pass over a weight's row takes */
       MOST_FLOATS = 6 };  /* the same for types without blocks */

typedef void passes(int count, int64_t blocks, const uint8_t *x, size_t x_apart, int64_t weights,
                    const struct rows *y, float *to, int64_t apart);

/* elements: of a block; step: blocks that a row is a multiple of; bytes: of a block; group: rows of a
   pass at most, as registers allow; scales: numbers in 16 bits that a partner's block begins with;
   offset: of stored weights, 0: none that needs sums of the rows; shifted: whether rows' numbers are
   stored with 128 added; as_is: whether rows are taken from where they are */
struct kernel {
    passes *pass;
    int partner, elements, step, bytes, partner_bytes, group, scales, offset;
    bool shifted, as_is;
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

/* The kernel of a type by what it needs of a processor; NULL where there is none, or the processor lacks
   that. avx512_floats: in the order of a llama.cpp that was compiled for AVX-512; avx512_pairs: of one
   that multiplies bfloat16 by twos. */
#define HIDDEN __attribute__((visibility("hidden")))
HIDDEN const struct kernel *avx2_products(int type), *avx_vnni_products(int type),
    *avx512_vnni_products(int type), *avx2_floats(int type), *avx512_floats(int type),
    *avx512_pairs(int type);

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
