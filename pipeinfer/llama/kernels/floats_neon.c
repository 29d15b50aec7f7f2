/* Products of few rows with floats, for aarch64: in the order of llama.cpp's ggml_vec_dot, four sums of
   four. Its ggml_vec_dot_bf16 adds one number after the other in twice the precision, which gains nothing
   from more rows. */

#include "neon.h"

#ifdef ARM

/* Types without blocks: `blocks` counts elements, which are a multiple of 16. */
#define ELEMENTS(NAME, BYTES, LOAD)                                                                   \
INLINE void NAME(int count, int64_t blocks, const uint8_t *x, const struct rows *y, float *to,        \
                 int64_t apart)                                                                       \
{                                                                                                     \
    float32x4_t sums[MOST_GROUP][4];                                                                  \
    int64_t i;                                                                                        \
    int row, part;                                                                                    \
    UNROLLED                                                                                          \
    for (row = 0; row < count; row++)                                                                 \
        for (part = 0; part < 4; part++)                                                              \
            sums[row][part] = vdupq_n_f32(0);                                                         \
    for (i = 0; i < blocks; i += 16)                                                                  \
        UNROLLED                                                                                      \
        for (part = 0; part < 4; part++) {                                                            \
            const float32x4_t weights = LOAD(x + BYTES * (i + 4 * part));                             \
            UNROLLED                                                                                  \
            for (row = 0; row < count; row++)                                                         \
                sums[row][part] = vfmaq_f32(                                                          \
                    sums[row][part], weights, vld1q_f32(y->floats + row * y->length + i + 4 * part)); \
        }                                                                                             \
    UNROLLED                                                                                          \
    for (row = 0; row < count; row++)                                                                 \
        to[row * apart] = vaddvq_f32(vaddq_f32(vaddq_f32(sums[row][0], sums[row][2]),                 \
                                               vaddq_f32(sums[row][1], sums[row][3])));               \
}

ELEMENTS(f32, 4, four_f32)
ELEMENTS(f16, 2, four_f16)

PASSES(BASE, all_f32, f32)
PASSES(BASE, all_f16, f16)

const struct kernel *neon_floats(int type)
{
    static const struct kernel KERNEL[TYPES] = {
        [F32] = {all_f32, F32, 1, 16, 4, 4, MOST_FLOATS, 0, 0, false, false, false},
        [F16] = {all_f16, F16, 1, 16, 2, 2, MOST_FLOATS, 0, 0, false, false, false},
    };
    return KERNEL[type].pass ? &KERNEL[type] : NULL;
}

#endif
