/* What the files for x86 share. */

#ifndef PIPEINFER_AVX2_H
#define PIPEINFER_AVX2_H

#include "short_runs.h"

#ifdef X86

#include <immintrin.h>

#define AVX2 __attribute__((target("avx2,fma,f16c")))
#define BASE AVX2
#define INLINE BASE static inline __attribute__((always_inline))

INLINE float one(const uint8_t *half) { return _cvtsh_ss(bits_of(half)); }

INLINE __m256i load(const uint8_t *from) { return _mm256_loadu_si256((const __m256i *)from); }

/* 32 numbers of 4 bits as bytes: the lower halves of all bytes, then the upper ones */
INLINE __m256i nibbles(const uint8_t *from)
{
    __m128i half = _mm_loadu_si128((const __m128i *)from);
    __m256i both = _mm256_inserti128_si256(_mm256_castsi128_si256(half), _mm_srli_epi16(half, 4), 1);
    return _mm256_and_si256(_mm256_set1_epi8(15), both);
}

/* The fifth bits of 32 numbers, as bytes of 16 or 0 */
INLINE __m256i fifth_bits(const uint8_t *from)
{
    uint32_t bits;
    __m256i bytes;
    memcpy(&bits, from, sizeof bits);
    bytes = _mm256_shuffle_epi8(_mm256_set1_epi32((int)bits), _mm256_set_epi64x(
        0x0303030303030303, 0x0202020202020202, 0x0101010101010101, 0x0000000000000000));
    bytes = _mm256_or_si256(bytes, _mm256_set1_epi64x(0x7fbfdfeff7fbfdfe));
    return _mm256_and_si256(_mm256_cmpeq_epi8(bytes, _mm256_set1_epi64x(-1)), _mm256_set1_epi8(16));
}

/* Scales and lowest values of a block of Q4_K or Q5_K: 8 each, in 16 bits. */
INLINE __m256i scales_of_k(const uint8_t *from)
{
    uint32_t words[4], aside;
    memcpy(words, from, 12);
    words[3] = ((words[2] >> 4) & 0x0f0f0f0f) | (((words[1] >> 6) & 0x03030303) << 4);
    aside = words[1] & 0x3f3f3f3f;
    words[1] = (words[2] & 0x0f0f0f0f) | (((words[0] >> 6) & 0x03030303) << 4);
    words[2] = aside;
    words[0] &= 0x3f3f3f3f;
    return _mm256_cvtepu8_epi16(
        _mm_set_epi32((int)words[3], (int)words[2], (int)words[1], (int)words[0]));
}

/* Part `part` of a block of Q4_K, or with their fifth bits of Q5_K: the numbers of its lower halves and of
   its upper ones */
INLINE void numbers_of_k(bool fifth, int part, __m256i packed, __m256i upper, __m256i *l, __m256i *h)
{
    const __m256i low = _mm256_set1_epi8(15), one_bit = _mm256_set1_epi8(1);
    *l = _mm256_and_si256(packed, low);
    *h = _mm256_and_si256(_mm256_srli_epi16(packed, 4), low);
    if (fifth) {
        *l = _mm256_or_si256(*l, _mm256_slli_epi16(_mm256_and_si256(
            _mm256_srli_epi16(upper, 2 * part), one_bit), 4));
        *h = _mm256_or_si256(*h, _mm256_slli_epi16(_mm256_and_si256(
            _mm256_srli_epi16(upper, 2 * part + 1), one_bit), 4));
    }
}

/* The same of half a block of Q6_K, which begins at x and has these upper bits */
INLINE __m256i numbers_of_q6_k(int part, const uint8_t *x, __m256i upper)
{
    const __m256i packed = load(x + 32 * (part % 2));
    const __m256i lower = _mm256_and_si256(
        part < 2 ? packed : _mm256_srli_epi16(packed, 4), _mm256_set1_epi8(15));
    const __m256i bits = _mm256_and_si256(upper, _mm256_set1_epi8((char)(3 << 2 * part)));
    return _mm256_or_si256(lower,
        part == 0 ? _mm256_slli_epi16(bits, 4) : part == 1 ? _mm256_slli_epi16(bits, 2) :
        part == 2 ? bits : _mm256_srli_epi16(bits, 2));
}

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

/* What unpacking does for a row; see struct kernel and struct rows. */
INLINE void put_numbers(const struct kernel *as, const uint8_t *from, int8_t *numbers, int8_t *offsets)
{
    const __m256i few = load(from);
    _mm256_store_si256((__m256i *)(void *)numbers,
                       _mm256_xor_si256(few, _mm256_set1_epi8(as->shifted ? (char)0x80 : 0)));
    if (as->offset)
        _mm256_store_si256((__m256i *)(void *)offsets,
                           _mm256_maddubs_epi16(_mm256_set1_epi8((char)as->offset), few));
}

INLINE void put_pairs(const uint8_t *from, int16_t *pairs)
{
    const __m256i sums = load(from);
    _mm_store_si128((__m128i *)(void *)pairs, _mm_hadd_epi16(
        _mm256_extracti128_si256(sums, 0), _mm256_extracti128_si256(sums, 1)));
}

INLINE void put_eight(int type, const uint8_t *from, float *to)
{
    _mm256_store_ps(to, type == F32 ? eight_f32(from) : type == F16 ? eight_f16(from)
                    : eight_bf16(from));
}

#endif
#endif
