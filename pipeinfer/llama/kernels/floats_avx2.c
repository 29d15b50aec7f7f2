/* Products of few rows with floats, for AVX2: in the order of llama.cpp's ggml_vec_dot, eight sums in
   four registers. floats_avx512.c has that of a llama.cpp compiled for AVX-512. */

#include "avx2.h"

#ifdef X86

/* GGML_F32x8_REDUCE of llama.cpp, of four */
INLINE float sum_of_four(const __m256 *x)
{
    const __m256 sum = _mm256_add_ps(_mm256_add_ps(x[0], x[2]), _mm256_add_ps(x[1], x[3]));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(sum), _mm256_extractf128_ps(sum, 1));
    const __m128 two = _mm_hadd_ps(four, four);
    return _mm_cvtss_f32(_mm_hadd_ps(two, two));
}

/* ggml_vec_dot_bf16 ends otherwise */
INLINE float sum_of_four_bf16(const __m256 *x)
{
    return sum_of(_mm256_add_ps(_mm256_add_ps(x[0], x[2]), _mm256_add_ps(x[1], x[3])));
}

enum { TILE = 256 }; /* elements of a row, so many that those of all rows stay in the first cache */

/* Types without blocks: `blocks` counts elements, which are a multiple of 32. Each row has four sums,
   for which registers do not suffice from four rows on: then two at a time. */
#define ELEMENTS(NAME, BYTES, LOAD, SUM)                                                              \
INLINE void NAME(int count, int64_t blocks, const uint8_t *x, const struct rows *y, float *to,        \
                 int64_t apart)                                                                       \
{                                                                                                     \
    const int step = count > 3 ? 2 : 4;                                                               \
    __m256 sums[MOST_GROUP][4];                                                                       \
    int64_t i, from, until;                                                                           \
    int row, part, first;                                                                             \
    UNROLLED                                                                                          \
    for (row = 0; row < count; row++)                                                                 \
        for (part = 0; part < 4; part++)                                                              \
            sums[row][part] = _mm256_setzero_ps();                                                    \
    for (from = 0; from < blocks; from = until) {                                                     \
        until = from + TILE < blocks ? from + TILE : blocks;                                          \
        UNROLLED                                                                                      \
        for (first = 0; first < 4; first += step)                                                     \
            for (i = from; i < until; i += 32) {                                                      \
                if (first == 0)                                                                       \
                    fetch(x + BYTES * i, 32 * BYTES);                                                 \
                UNROLLED                                                                              \
                for (part = first; part < first + step; part++) {                                     \
                    const __m256 weights = LOAD(x + BYTES * (i + 8 * part));                          \
                    UNROLLED                                                                          \
                    for (row = 0; row < count; row++)                                                 \
                        sums[row][part] = _mm256_fmadd_ps(                                            \
                            weights, _mm256_load_ps(y->floats + row * y->length + i + 8 * part),      \
                            sums[row][part]);                                                         \
                }                                                                                     \
            }                                                                                         \
    }                                                                                                 \
    UNROLLED                                                                                          \
    for (row = 0; row < count; row++)                                                                 \
        to[row * apart] = SUM(sums[row]);                                                             \
}

ELEMENTS(dots_f32, 4, eight_f32, sum_of_four)
ELEMENTS(dots_f16, 2, eight_f16, sum_of_four)
ELEMENTS(dots_bf16, 2, eight_bf16, sum_of_four_bf16)

PASSES(AVX2, all_f32, dots_f32)
PASSES(AVX2, all_f16, dots_f16)
PASSES(AVX2, all_bf16, dots_bf16)

const struct kernel *avx2_floats(int type)
{
    static const struct kernel KERNEL[TYPES] = {
        [F32] = {all_f32, F32, 1, 32, 4, 4, MOST_FLOATS, 0, 0, false, false},
        [F16] = {all_f16, F16, 1, 32, 2, 2, MOST_FLOATS, 0, 0, false, false},
        [BF16] = {all_bf16, BF16, 1, 32, 2, 2, MOST_FLOATS, 0, 0, false, false},
    };
    return KERNEL[type].pass && has_avx2() ? &KERNEL[type] : NULL;
}

#endif
