/* Products of few rows with weights in blocks of 32 or 256 for aarch64, each block unpacked once for all
   rows: the bodies, which products_neon.c and products_dotprod.c include.

   TARGET: the attribute with what the compiler may use
   DOTS(sums, a, b): adds products of 16 numbers to four sums
   ZIPPED: whether numbers are in the order of `zip`
   TABLE: the name of the function that gives the kernel of a type, NULL for others; NEEDS: whether the
   processor has what TARGET says

   Each sums in the order of llama.cpp's ggml_vec_dot of that type for NEON; with blocks of 32 two
   after each other, so a row has an even number of them. */

#include "neon.h"

#ifdef ARM

#undef INLINE
#define INLINE TARGET static inline __attribute__((always_inline))

/* Numbers `part` of a row, 32 of them */
#define OTHER(part) both_of(y->numbers + 32 * ((part) * count + row))

INLINE int32x4_t products(int8x16x2_t a, int8x16x2_t b)
{
    return DOTS(DOTS(vdupq_n_s32(0), a.val[0], b.val[0]), a.val[1], b.val[1]);
}

/* 32 numbers of 4 bits, each less by as much: the lower halves of 16 bytes, then the upper ones */
INLINE int8x16x2_t nibbles(const uint8_t *from, int less)
{
    const uint8x16_t packed = vld1q_u8(from);
    const int8x16_t offset = vdupq_n_s8((int8_t)less);
    const int8x16x2_t both = {{
        vsubq_s8(vreinterpretq_s8_u8(vandq_u8(packed, vdupq_n_u8(15))), offset),
        vsubq_s8(vreinterpretq_s8_u8(vshrq_n_u8(packed, 4)), offset)}};
    return both;
}

/* The fifth bits of 16 numbers, as bytes of 16 or 0 */
INLINE int8x16_t fifth_bits(const uint8_t *two)
{
    const uint8x16_t bytes = vcombine_u8(vdup_n_u8(two[0]), vdup_n_u8(two[1]));
    const uint8x16_t places = vreinterpretq_u8_u64(vdupq_n_u64(0x8040201008040201));
    return vreinterpretq_s8_u8(vandq_u8(vtstq_u8(bytes, places), vdupq_n_u8(16)));
}

INLINE int8x16x2_t fives(const uint8_t *from)
{
    int8x16x2_t both = nibbles(from + 4, 16);
    both.val[0] = vaddq_s8(both.val[0], fifth_bits(from));
    both.val[1] = vaddq_s8(both.val[1], fifth_bits(from + 2));
    return both;
}

/* Types with blocks of 32. WEIGHTS: the numbers of the block at `from`; LEAST: whether a lowest value
   follows the scale. */
#define BLOCKS_OF_32(NAME, BYTES, WEIGHTS, LEAST)                                                     \
INLINE void NAME(int count, int64_t blocks, const uint8_t *x, const struct rows *y, float *to,        \
                 int64_t apart)                                                                       \
{                                                                                                     \
    float32x4_t sums[MOST_GROUP][2];                                                                  \
    float least[MOST_GROUP];                                                                          \
    int row, half;                                                                                    \
    int64_t block;                                                                                    \
    UNROLLED                                                                                          \
    for (row = 0; row < count; row++) {                                                               \
        sums[row][0] = sums[row][1] = vdupq_n_f32(0);                                                 \
        least[row] = 0;                                                                               \
    }                                                                                                 \
    for (block = 0; block < blocks; block += 2, x += 2 * BYTES) {                                     \
        UNROLLED                                                                                      \
        for (half = 0; half < 2; half++) {                                                            \
            const uint8_t *from = x + half * BYTES;                                                   \
            const int8x16x2_t plain = WEIGHTS, weights = ZIPPED ? zip(plain) : plain;                 \
            const float scale = one(from);                                                            \
            UNROLLED                                                                                  \
            for (row = 0; row < count; row++) {                                                       \
                const float both = scale * y->scale[row * y->length + block + half];                  \
                sums[row][half] = vaddq_f32(sums[row][half], vmulq_n_f32(                             \
                    vcvtq_f32_s32(products(weights, OTHER(block + half))), both));                    \
            }                                                                                         \
        }                                                                                             \
        UNROLLED                                                                                      \
        for (row = 0; row < count && LEAST; row++)                                                    \
            least[row] += __builtin_fmaf(                                                             \
                one(x + 2), y->other[block * MOST_GROUP + row],                                       \
                one(x + BYTES + 2) * y->other[(block + 1) * MOST_GROUP + row]);                       \
    }                                                                                                 \
    UNROLLED                                                                                          \
    for (row = 0; row < count; row++) {                                                               \
        const float sum = vaddvq_f32(sums[row][0]) + vaddvq_f32(sums[row][1]);                        \
        to[row * apart] = LEAST ? sum + least[row] : sum;                                             \
    }                                                                                                 \
}                                                                                                     \
PASSES(TARGET, all_##NAME, NAME)

BLOCKS_OF_32(q8_0, 34, both_of((const int8_t *)from + 2), false)
BLOCKS_OF_32(q4_0, 18, nibbles(from + 2, 8), false)
BLOCKS_OF_32(q4_1, 20, nibbles(from + 4, 0), true)
BLOCKS_OF_32(q5_0, 22, fives(from + 2), false)

/* Scales of a block of Q4_K or Q5_K, 8, and its lowest values, 8 */
INLINE void scales_of_k(const uint8_t *from, uint8_t *to)
{
    int i;
    UNROLLED
    for (i = 0; i < 4; i++) {
        to[i] = from[i] & 63;
        to[i + 4] = (from[i + 8] & 15) | from[i] >> 6 << 4;
        to[i + 8] = from[i + 4] & 63;
        to[i + 12] = from[i + 8] >> 4 | from[i + 4] >> 6 << 4;
    }
}

/* Q4_K; with fifth bits Q5_K. Of sums over a whole block the order of their parts has no effect. */
INLINE void dots_k(bool fifth, int count, int64_t blocks, const uint8_t *x, const struct rows *y,
                   float *to, int64_t apart)
{
    const uint8x16_t low = vdupq_n_u8(15), sixteen = vdupq_n_u8(16);
    float sums[MOST_GROUP];
    int row, part, half;
    int64_t block;
    UNROLLED
    for (row = 0; row < count; row++)
        sums[row] = 0;
    for (block = 0; block < blocks; block++, x += fifth ? Q5_K_BYTES : Q4_K_BYTES) {
        const uint8_t *packed = x + (fifth ? 48 : 16);
        const float scale = one(x), fall = one(x + 2);
        uint8_t scales[16];
        int16x8_t lowest;
        int32x4_t found[MOST_GROUP];
        scales_of_k(x + 4, scales);
        lowest = vreinterpretq_s16_u16(vmovl_u8(vld1_u8(scales + 8)));
        UNROLLED
        for (row = 0; row < count; row++)
            found[row] = vdupq_n_s32(0);
        for (part = 0; part < 4; part++) {
            int8x16x2_t lower, upper;
            UNROLLED
            for (half = 0; half < 2; half++) {
                const uint8x16_t bytes = vld1q_u8(packed + 32 * part + 16 * half);
                uint8x16_t l = vandq_u8(bytes, low), u = vshrq_n_u8(bytes, 4);
                if (fifth) {
                    const uint8x16_t bits = vld1q_u8(x + 16 + 16 * half);
                    l = vorrq_u8(l, vandq_u8(vtstq_u8(bits, vdupq_n_u8((uint8_t)(1 << 2 * part))),
                                             sixteen));
                    u = vorrq_u8(u, vandq_u8(vtstq_u8(bits, vdupq_n_u8((uint8_t)(2 << 2 * part))),
                                             sixteen));
                }
                lower.val[half] = vreinterpretq_s8_u8(l);
                upper.val[half] = vreinterpretq_s8_u8(u);
            }
            UNROLLED
            for (row = 0; row < count; row++) {
                found[row] = vmlaq_n_s32(found[row], products(lower, OTHER(8 * block + 2 * part)),
                                         scales[2 * part]);
                found[row] = vmlaq_n_s32(found[row], products(upper, OTHER(8 * block + 2 * part + 1)),
                                         scales[2 * part + 1]);
            }
        }
        UNROLLED
        for (row = 0; row < count; row++) {
            const float other = y->scale[row * y->length + block];
            const int16x8_t pairs = vld1q_s16(y->pairs + 8 * (block * count + row));
            const float whole = (float)vaddvq_s32(found[row]), falls = (float)vaddvq_s32(vmlal_high_s16(
                vmull_s16(vget_low_s16(pairs), vget_low_s16(lowest)), pairs, lowest));
            if (fifth)
                sums[row] += __builtin_fmaf(other * scale, whole, -(other * fall * falls));
            else
                sums[row] = __builtin_fmaf(other * scale, whole, __builtin_fmaf(
                    -(other * fall), falls, sums[row]));
        }
    }
    UNROLLED
    for (row = 0; row < count; row++)
        to[row * apart] = sums[row];
}

INLINE void q4_k(int count, int64_t blocks, const uint8_t *x, const struct rows *y, float *to,
                 int64_t apart)
{
    dots_k(false, count, blocks, x, y, to, apart);
}

INLINE void q5_k(int count, int64_t blocks, const uint8_t *x, const struct rows *y, float *to,
                 int64_t apart)
{
    dots_k(true, count, blocks, x, y, to, apart);
}

INLINE void q6_k(int count, int64_t blocks, const uint8_t *x, const struct rows *y, float *to,
                 int64_t apart)
{
    const uint8x16_t low = vdupq_n_u8(15), two_bits = vdupq_n_u8(3);
    const int8x16_t offset = vdupq_n_s8(32);
    float sums[MOST_GROUP];
    int row, part, half;
    int64_t block;
    UNROLLED
    for (row = 0; row < count; row++)
        sums[row] = 0;
    for (block = 0; block < blocks; block++, x += Q6_K_BYTES) {
        const int8_t *scales = (const int8_t *)x + 192;
        const float scale = one(x + 208);
        int32x4_t found[MOST_GROUP];
        UNROLLED
        for (row = 0; row < count; row++)
            found[row] = vdupq_n_s32(0);
        for (part = 0; part < 8; part++) {
            const int8x16_t down = vdupq_n_s8((int8_t)(-2 * (part % 4))), by = vdupq_n_s8((int8_t)(
                part % 4 < 2 ? 0 : -4));
            int8x16x2_t weights;
            UNROLLED
            for (half = 0; half < 2; half++) {
                const uint8x16_t packed = vld1q_u8(x + 64 * (part / 4) + 32 * (part % 2) + 16 * half);
                const uint8x16_t bits = vld1q_u8(x + 128 + 32 * (part / 4) + 16 * half);
                weights.val[half] = vsubq_s8(vreinterpretq_s8_u8(vorrq_u8(
                    vandq_u8(vshlq_u8(packed, by), low),
                    vshlq_n_u8(vandq_u8(vshlq_u8(bits, down), two_bits), 4))), offset);
            }
            UNROLLED
            for (row = 0; row < count; row++) {
                const int8x16x2_t other = OTHER(8 * block + part);
                UNROLLED
                for (half = 0; half < 2; half++)
                    found[row] = vmlaq_n_s32(found[row], DOTS(
                        vdupq_n_s32(0), weights.val[half], other.val[half]), scales[2 * part + half]);
            }
        }
        UNROLLED
        for (row = 0; row < count; row++)
            sums[row] = __builtin_fmaf(scale * y->scale[row * y->length + block],
                                       (float)vaddvq_s32(found[row]), sums[row]);
    }
    UNROLLED
    for (row = 0; row < count; row++)
        to[row * apart] = sums[row];
}

PASSES(TARGET, all_q4_k, q4_k)
PASSES(TARGET, all_q5_k, q5_k)
PASSES(TARGET, all_q6_k, q6_k)

const struct kernel *TABLE(int type)
{
    static const struct kernel KERNEL[TYPES] = {
        [Q4_0] = {all_q4_0, Q8_0, 32, 2, 18, Q8_0_BYTES, MOST_GROUP, 1, 0, false, false, ZIPPED},
        [Q4_1] = {all_q4_1, Q8_1, 32, 2, 20, 36, MOST_GROUP, 2, 0, false, false, ZIPPED},
        [Q5_0] = {all_q5_0, Q8_0, 32, 2, 22, Q8_0_BYTES, MOST_GROUP, 1, 0, false, false, ZIPPED},
        [Q8_0] = {all_q8_0, Q8_0, 32, 2, Q8_0_BYTES, Q8_0_BYTES, MOST_GROUP, 1, 0, false, false, ZIPPED},
        [Q4_K] = {all_q4_k, Q8_K, 256, 1, Q4_K_BYTES, Q8_K_BYTES, MOST_GROUP, 0, 0, false, false, false},
        [Q5_K] = {all_q5_k, Q8_K, 256, 1, Q5_K_BYTES, Q8_K_BYTES, MOST_GROUP, 0, 0, false, false, false},
        [Q6_K] = {all_q6_k, Q8_K, 256, 1, Q6_K_BYTES, Q8_K_BYTES, MOST_GROUP, 0, 0, false, false, false},
    };
    return KERNEL[type].pass && NEEDS ? &KERNEL[type] : NULL;
}

#endif
