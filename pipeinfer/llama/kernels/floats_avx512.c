/* Products of floats in the order of a llama.cpp that was compiled for AVX-512, which adds up by
   sixteens. See short_runs.h. */

#include "avx2.h"

#ifdef X86

#define AVX512 __attribute__((target("avx2,fma,f16c,avx512f")))
#if defined(__clang__) ? __clang_major__ >= 9 : __GNUC__ >= 10
#define AVX512_BF16 __attribute__((target("avx2,fma,f16c,avx512f,avx512bf16")))
#endif
#define ALWAYS static inline __attribute__((always_inline))

/* _mm512_reduce_add_ps: by halves */
AVX512 ALWAYS float halves_of(__m512 x)
{
    const __m256 upper = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x), 1));
    return sum_of(_mm256_add_ps(upper, _mm512_castps512_ps256(x)));
}

/* GGML_F32x16_REDUCE, of four */
AVX512 ALWAYS float sum_of_four(const __m512 *x)
{
    return halves_of(_mm512_add_ps(_mm512_add_ps(x[0], x[2]), _mm512_add_ps(x[1], x[3])));
}

/* ggml_vec_dot_bf16 ends otherwise */
AVX512 ALWAYS float sum_of_two(const __m512 *x)
{
    return (float)((double)halves_of(x[0]) + (double)halves_of(x[1]));
}

AVX512 ALWAYS __m512 floats_of_f32(const uint8_t *from)
{
    return _mm512_loadu_ps((const void *)from);
}

AVX512 ALWAYS __m512 floats_of_f16(const uint8_t *from)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)from));
}

AVX512 ALWAYS __m512 floats_of_bf16(const uint8_t *from)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(
        _mm256_loadu_si256((const __m256i *)(const void *)from)), 16));
}

AVX512 ALWAYS __m512 times(__m512 sum, __m512 weights, const struct rows *y, int row, int64_t at)
{
    return _mm512_fmadd_ps(weights, _mm512_load_ps(y->floats + row * y->length + at), sum);
}

/* `blocks` counts elements. A row has PARTS sums of WIDTH elements each in turn. */
#define ELEMENTS(TARGET, NAME, BYTES, WIDTH, PARTS, REGISTER, LOAD, TIMES, SUM)                       \
TARGET ALWAYS void NAME(int count, int64_t blocks, const uint8_t *x, const struct rows *y, float *to, \
                        int64_t apart)                                                                \
{                                                                                                     \
    __m512 sums[MOST_GROUP][PARTS];                                                                   \
    int64_t i;                                                                                        \
    int row, part;                                                                                    \
    UNROLLED                                                                                          \
    for (row = 0; row < count; row++)                                                                 \
        for (part = 0; part < PARTS; part++)                                                          \
            sums[row][part] = _mm512_setzero_ps();                                                    \
    for (i = 0; i < blocks; i += WIDTH * PARTS) {                                                     \
        fetch(x + BYTES * i, WIDTH * PARTS * BYTES);                                                  \
        UNROLLED                                                                                      \
        for (part = 0; part < PARTS; part++) {                                                        \
            const REGISTER weights = LOAD(x + BYTES * (i + WIDTH * part));                            \
            UNROLLED                                                                                  \
            for (row = 0; row < count; row++)                                                         \
                sums[row][part] = TIMES(sums[row][part], weights, y, row, i + WIDTH * part);          \
        }                                                                                             \
    }                                                                                                 \
    UNROLLED                                                                                          \
    for (row = 0; row < count; row++)                                                                 \
        to[row * apart] = SUM(sums[row]);                                                             \
}

ELEMENTS(AVX512, dots_f32, 4, 16, 4, __m512, floats_of_f32, times, sum_of_four)
ELEMENTS(AVX512, dots_f16, 2, 16, 4, __m512, floats_of_f16, times, sum_of_four)
ELEMENTS(AVX512, dots_bf16, 2, 16, 2, __m512, floats_of_bf16, times, sum_of_two)

PASSES(AVX512, all_f32, dots_f32)
PASSES(AVX512, all_f16, dots_f16)
PASSES(AVX512, all_bf16, dots_bf16)

#ifdef AVX512_BF16

AVX512_BF16 ALWAYS __m512i pairs_of_bf16(const uint8_t *from)
{
    return _mm512_loadu_si512((const void *)from);
}

AVX512_BF16 ALWAYS __m512 times_pairs(__m512 sum, __m512i weights, const struct rows *y, int row,
                                      int64_t at)
{
    const __m512i other = pairs_of_bf16(y->at + row * y->apart + 2 * at);
    return _mm512_dpbf16_ps(sum, (__m512bh)weights, (__m512bh)other);
}

ELEMENTS(AVX512_BF16, dots_pairs, 2, 32, 2, __m512i, pairs_of_bf16, times_pairs, sum_of_two)
PASSES(AVX512_BF16, all_pairs, dots_pairs)

const struct kernel *avx512_pairs(int type)
{
    static const struct kernel kernel = {all_pairs, BF16, 1, 64, 2, 2, MOST_GROUP, 0, 0, false, true, false};
    return type == BF16 && __builtin_cpu_supports("avx512bf16") ? &kernel : NULL;
}

#else /* an older compiler */

const struct kernel *avx512_pairs(int type)
{
    (void)type;
    return NULL;
}

#endif

const struct kernel *avx512_floats(int type)
{
    static const struct kernel KERNEL[TYPES] = {
        [F32] = {all_f32, F32, 1, 64, 4, 4, MOST_FLOATS, 0, 0, false, false},
        [F16] = {all_f16, F16, 1, 64, 2, 2, MOST_FLOATS, 0, 0, false, false},
        [BF16] = {all_bf16, BF16, 1, 32, 2, 2, MOST_FLOATS, 0, 0, false, false},
    };
    return KERNEL[type].pass && __builtin_cpu_supports("avx512f") ? &KERNEL[type] : NULL;
}

#endif
