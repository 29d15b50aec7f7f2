/* What the files for aarch64 share. */

#ifndef PIPEINFER_NEON_H
#define PIPEINFER_NEON_H

#include "short_runs.h"

#ifdef ARM

#include <arm_neon.h>

#define BASE
#define INLINE static inline __attribute__((always_inline))

INLINE float one(const uint8_t *half)
{
    float16_t number;
    memcpy(&number, half, sizeof number);
    return number;
}

INLINE int8x16x2_t both_of(const int8_t *from)
{
    const int8x16x2_t both = {{vld1q_s8(from), vld1q_s8(from + 16)}};
    return both;
}

/* What sdot sums in a lane, four numbers in a row, is then what a library that was compiled without it
   sums there: two numbers of each eight. */
INLINE int8x16x2_t zip(int8x16x2_t x)
{
    const int16x8_t low = vreinterpretq_s16_s8(x.val[0]), high = vreinterpretq_s16_s8(x.val[1]);
    const int8x16x2_t zipped = {{vreinterpretq_s8_s16(vzip1q_s16(low, high)),
                                 vreinterpretq_s8_s16(vzip2q_s16(low, high))}};
    return zipped;
}

/* What unpacking does for a row; see struct kernel and struct rows. */
INLINE void put_numbers(const struct kernel *as, const uint8_t *from, int8_t *numbers, int8_t *offsets)
{
    const int8x16x2_t plain = both_of((const int8_t *)from), both = as->zipped ? zip(plain) : plain;
    (void)offsets;
    vst1q_s8(numbers, both.val[0]);
    vst1q_s8(numbers + 16, both.val[1]);
}

INLINE void put_pairs(const uint8_t *from, int16_t *pairs)
{
    vst1q_s16(pairs, vpaddq_s16(vreinterpretq_s16_u8(vld1q_u8(from)),
                                vreinterpretq_s16_u8(vld1q_u8(from + 16))));
}

INLINE float32x4_t four_f32(const uint8_t *from) { return vreinterpretq_f32_u8(vld1q_u8(from)); }

INLINE float32x4_t four_f16(const uint8_t *from)
{
    return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(from)));
}

INLINE void put_eight(int type, const uint8_t *from, float *to)
{
    vst1q_f32(to, type == F32 ? four_f32(from) : four_f16(from));
    vst1q_f32(to + 4, type == F32 ? four_f32(from + 16) : four_f16(from + 8));
}

#endif
#endif
