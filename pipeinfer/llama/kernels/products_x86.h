/* Products of few rows with weights in blocks of 32 or 256, each block unpacked once for all rows: the
   bodies, which products_*.c include once for each processor they are for.

   TARGET: the attribute with what the compiler may use
   FOURS(sums, a, b): vpdpbusd, and PAIRS(sums, a, b): vpdpwssd; both defined or neither. Sums of whole
   numbers are exact in any order, so these change no bits.
   TABLE: the name of the function that gives the kernel of a type, NULL for others; NEEDS: whether the
   processor has what TARGET says

   Each sums in the order of llama.cpp's ggml_vec_dot of that type for AVX2. */

#include "avx2.h"

#ifdef X86

#undef INLINE
#define INLINE TARGET static inline __attribute__((always_inline))

enum { EIGHT = 8,  /* numbers of a register */
       LINES = 2 };  /* rows of weights that are taken together for a single row */
#define BY_FOURS _Pragma("GCC unroll 4")

/* Numbers `part` of a row, 32 of them, and what a weight's offset adds to their products by twos */
#define OTHER(part) _mm256_load_si256(                                                                \
    (const __m256i *)(const void *)(y->numbers + 32 * ((part) * count + row)))
#define OFFSET _mm256_load_si256(                                                                     \
    (const __m256i *)(const void *)(y->offsets + 32 * (block * count + row)))

#define HALF(i) (short)bits_of(x + (i) * bytes)

/* Products of the scales of eight blocks of weights, `bytes` long, with those of the rows */
INLINE void scale_all(int count, int64_t block, const uint8_t *x, int bytes, const struct rows *y,
                      float both[][EIGHT])
{
    const __m256 eight = _mm256_cvtph_ps(_mm_set_epi16(
        HALF(7), HALF(6), HALF(5), HALF(4), HALF(3), HALF(2), HALF(1), HALF(0)));
    int row;
    UNROLLED
    for (row = 0; row < count; row++)
        _mm256_store_ps(both[row], _mm256_mul_ps(
            eight, _mm256_loadu_ps(y->scale + row * y->length + block)));
}

/* Types with blocks of 32. WEIGHTS: the numbers of the block at x as they are stored, of some types with
   an offset; SUMS: products of the numbers meant with `other`, summed up by fours; OWN: what else
   belongs to a block; MORE: to the sums. Blocks are taken by eights, whose scales are one register. */
#define BLOCKS_OF_32(NAME, BYTES, WEIGHTS, SUMS, OWN, MORE)                                           \
INLINE void NAME##_block(int count, int64_t block, const uint8_t *x, const struct rows *y,            \
                         float (*both)[EIGHT], int i, __m256 *sums, __m256 *least)                    \
{                                                                                                     \
    const __m256i weights = WEIGHTS, start = START;                                                   \
    int row;                                                                                          \
    (void)start, (void)least;                                                                         \
    OWN;                                                                                              \
    UNROLLED                                                                                          \
    for (row = 0; row < count; row++) {                                                               \
        const __m256i other = OTHER(block);                                                           \
        sums[row] = _mm256_fmadd_ps(_mm256_broadcast_ss(&both[row][i]), _mm256_cvtepi32_ps(SUMS),     \
                                    sums[row]);                                                       \
    }                                                                                                 \
}                                                                                                     \
INLINE void NAME##_lines(int lines, int count, int64_t blocks, const uint8_t *x, size_t x_apart,       \
                         const struct rows *y, float *to, int64_t apart)                              \
{                                                                                                     \
    __m256 sums[LINES][MOST_GROUP], least[LINES];                                                     \
    float both[LINES][MOST_GROUP][EIGHT] ALIGNED, more[MOST_GROUP] ALIGNED;                           \
    int row, i, line;                                                                                 \
    int64_t block;                                                                                    \
    UNROLLED                                                                                          \
    for (line = 0; line < lines; line++) {                                                            \
        least[line] = _mm256_setzero_ps();                                                            \
        UNROLLED                                                                                      \
        for (row = 0; row < count; row++)                                                             \
            sums[line][row] = _mm256_setzero_ps();                                                    \
    }                                                                                                 \
    for (block = 0; block + EIGHT <= blocks; block += EIGHT, x += EIGHT * BYTES) {                    \
        UNROLLED                                                                                      \
        for (line = 0; line < lines; line++) {                                                        \
            scale_all(count, block, x + line * x_apart, BYTES, y, both[line]);                        \
            fetch(x + line * x_apart, EIGHT * BYTES);                                                 \
        }                                                                                             \
        BY_FOURS                                                                                      \
        for (i = 0; i < EIGHT; i++)                                                                   \
            UNROLLED                                                                                  \
            for (line = 0; line < lines; line++)                                                      \
                NAME##_block(count, block + i, x + line * x_apart + i * BYTES, y, both[line], i,      \
                             sums[line], &least[line]);                                               \
    }                                                                                                 \
    UNROLLED                                                                                          \
    for (line = 0; line < lines; line++) {                                                            \
        const uint8_t *rest = x + line * x_apart;                                                     \
        for (i = 0; i < blocks - block; i++) {                                                        \
            UNROLLED                                                                                  \
            for (row = 0; row < count; row++)                                                         \
                both[line][row][i] = one(rest + i * BYTES)                                            \
                    * y->scale[row * y->length + block + i];                                          \
            NAME##_block(count, block + i, rest + i * BYTES, y, both[line], i, sums[line],            \
                         &least[line]);                                                               \
        }                                                                                             \
        _mm256_store_ps(more, least[line]);                                                           \
        sums_to(count, sums[line], MORE, to + line, apart);                                           \
    }                                                                                                 \
}                                                                                                     \
INLINE void NAME(int count, int64_t blocks, const uint8_t *x, const struct rows *y, float *to,        \
                 int64_t apart)                                                                       \
{                                                                                                     \
    NAME##_lines(1, count, blocks, x, 0, y, to, apart);                                               \
}                                                                                                     \
PASSES(TARGET, some_##NAME, NAME)                                                                     \
/* A single row's sums wait for one another, so rows of weights are taken by twos. */                 \
TARGET static void all_##NAME(int count, int64_t blocks, const uint8_t *x, size_t x_apart,            \
                              int64_t weights, const struct rows *y, float *to, int64_t apart)        \
{                                                                                                     \
    int64_t i = 0;                                                                                    \
    for (; count == 1 && i + LINES <= weights; i += LINES)                                            \
        NAME##_lines(LINES, 1, blocks, x + i * x_apart, x_apart, y, to + i, apart);                   \
    some_##NAME(count, blocks, x + i * x_apart, x_apart, weights - i, y, to + i, apart);              \
}

#ifdef FOURS

/* The rows' numbers are stored with 128 added, without a sign. `start` takes that back. */
#define START _mm256_sub_epi32(_mm256_setzero_si256(), FOURS(                                         \
    _mm256_setzero_si256(), _mm256_set1_epi8((char)0x80), weights))
#define SIGNED FOURS(start, other, weights)
#define LESS(weights, offset) _mm256_sub_epi8(weights, _mm256_set1_epi8(offset))
#define WITH_OFFSET SIGNED
#define UNSIGNED FOURS(_mm256_setzero_si256(), weights, other)

/* One row's sums would wait for one another. */
INLINE __m256i add_scaled(int count, __m256i sums, __m256i by, __m256i weights, __m256i other)
{
    const __m256i twos = _mm256_maddubs_epi16(weights, other);
    return count > 1 ? PAIRS(sums, by, twos) : _mm256_add_epi32(sums, _mm256_madd_epi16(by, twos));
}

#else

#define START _mm256_set1_epi16(1)
#define SIGNED _mm256_madd_epi16(start, _mm256_maddubs_epi16(                                         \
    _mm256_sign_epi8(weights, weights), _mm256_sign_epi8(other, weights)))
#define LESS(weights, offset) (weights)
#define WITH_OFFSET _mm256_madd_epi16(start, _mm256_sub_epi16(                                        \
    _mm256_maddubs_epi16(weights, other), OFFSET))
#define UNSIGNED _mm256_madd_epi16(start, _mm256_maddubs_epi16(weights, other))

INLINE __m256i add_scaled(int count, __m256i sums, __m256i by, __m256i weights, __m256i other)
{
    (void)count;
    return _mm256_add_epi32(sums, _mm256_madd_epi16(by, _mm256_maddubs_epi16(weights, other)));
}

#endif

BLOCKS_OF_32(dots_q8_0, 34, load(x + 2), SIGNED, , NULL)
BLOCKS_OF_32(dots_q4_0, 18, LESS(nibbles(x + 2), 8), WITH_OFFSET, , NULL)
BLOCKS_OF_32(dots_q5_0, 22, LESS(_mm256_or_si256(nibbles(x + 6), fifth_bits(x + 2)), 16), WITH_OFFSET, ,
             NULL)
BLOCKS_OF_32(dots_q4_1, 20, nibbles(x + 4), UNSIGNED,
             *least = _mm256_fmadd_ps(_mm256_cvtph_ps(_mm_set1_epi16((short)bits_of(x + 2))),
                                      _mm256_loadu_ps(y->other + block * MOST_GROUP), *least), more)

/* The scale with this number in all places */
INLINE __m256i spread(__m256i scales, int number)
{
    const int low = 2 * number, both = low + 256 * (low + 1);
    return _mm256_shuffle_epi8(scales, _mm256_set1_epi16((short)both));
}

/* Q4_K; with fifth bits Q5_K. They differ in the order in which the lowest values are added. */
INLINE void dots_k(bool fifth, int count, int64_t blocks, const uint8_t *x, const struct rows *y,
                   float *to, int64_t apart)
{
    __m256 sums[MOST_GROUP];
    __m128 least[MOST_GROUP];
    float leasts[MOST_GROUP];
    int row, part;
    int64_t block;
    UNROLLED
    for (row = 0; row < count; row++) {
        sums[row] = _mm256_setzero_ps();
        least[row] = _mm_setzero_ps();
    }
    for (block = 0; block < blocks; block++, x += fifth ? Q5_K_BYTES : Q4_K_BYTES) {
        const uint8_t *numbers = x + (fifth ? 48 : 16);
        const __m256i both = scales_of_k(x + 4);
        const __m128i first = _mm256_extracti128_si256(both, 0);
        const __m128i lowest = _mm256_extracti128_si256(both, 1);
        const __m256i scales = _mm256_inserti128_si256(_mm256_castsi128_si256(first), first, 1);
        const __m256i upper = fifth ? load(x + 16) : _mm256_setzero_si256();
        const float scale = one(x), fall = one(x + 2);
        __m256i found[MOST_GROUP];
        fetch(x, fifth ? Q5_K_BYTES : Q4_K_BYTES);
        UNROLLED
        for (part = 0; part < 4; part++) {
            const __m256i scale_l = spread(scales, 2 * part), scale_h = spread(scales, 2 * part + 1);
            __m256i l, h;
            numbers_of_k(fifth, part, load(numbers + 32 * part), upper, &l, &h);
            UNROLLED
            for (row = 0; row < count; row++) {
                const __m256i sum = add_scaled(count, part ? found[row] : _mm256_setzero_si256(), scale_l, l,
                                               OTHER(8 * block + 2 * part));
                found[row] = add_scaled(count, sum, scale_h, h,
                                        OTHER(8 * block + 2 * part + 1));
            }
        }
        UNROLLED
        for (row = 0; row < count; row++) {
            const float theirs_scale = y->scale[row * y->length + block];
            const __m128i products = _mm_madd_epi16(lowest, _mm_load_si128(
                (const __m128i *)(const void *)(y->pairs + 8 * (block * count + row))));
            if (fifth) {
                const __m128i zero = _mm_setzero_si128();
                const __m128i sum = _mm_hadd_epi32(_mm_hadd_epi32(products, zero), zero);
                least[row] = _mm_fmadd_ss(_mm_set_ss(-theirs_scale * fall), _mm_cvtepi32_ps(sum),
                                          least[row]);
            } else {
                least[row] = _mm_fmadd_ps(_mm_set1_ps(-theirs_scale * fall),
                                          _mm_cvtepi32_ps(products), least[row]);
            }
            sums[row] = _mm256_fmadd_ps(_mm256_set1_ps(theirs_scale * scale),
                                        _mm256_cvtepi32_ps(found[row]), sums[row]);
        }
    }
    UNROLLED
    for (row = 0; row < count; row++) {
        __m128 sum = least[row];
        if (!fifth) {
            sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
            sum = _mm_add_ss(sum, _mm_movehdup_ps(sum));
        }
        leasts[row] = _mm_cvtss_f32(sum);
    }
    sums_to(count, sums, leasts, to, apart);
}

INLINE void dots_q4_k(int count, int64_t blocks, const uint8_t *x, const struct rows *y, float *to,
                      int64_t apart)
{
    dots_k(false, count, blocks, x, y, to, apart);
}

INLINE void dots_q5_k(int count, int64_t blocks, const uint8_t *x, const struct rows *y, float *to,
                      int64_t apart)
{
    dots_k(true, count, blocks, x, y, to, apart);
}

INLINE void dots_q6_k(int count, int64_t blocks, const uint8_t *x, const struct rows *y, float *to,
                      int64_t apart)
{
    __m256 sums[MOST_GROUP];
    int row, half, part;
    int64_t block;
    for (row = 0; row < count; row++)
        sums[row] = _mm256_setzero_ps();
    for (block = 0; block < blocks; block++, x += Q6_K_BYTES) {
        const __m128i bytes = _mm_loadu_si128((const __m128i *)(x + 192));
        const __m256i scales = _mm256_cvtepi8_epi16(bytes);
        const float scale = one(x + 208);
        __m256i found[MOST_GROUP];
        fetch(x, Q6_K_BYTES);
        UNROLLED
        for (row = 0; row < count; row++)
            found[row] = _mm256_setzero_si256();
        UNROLLED
        for (half = 0; half < 2; half++) {
            const __m256i upper = load(x + 128 + 32 * half);
            UNROLLED
            for (part = 0; part < 4; part++) {
                const __m256i numbers = numbers_of_q6_k(part, x + 64 * half, upper);
                const int number = 8 * half + 2 * part;
                const __m256i by = _mm256_cvtepi8_epi16(_mm_shuffle_epi8(bytes, _mm_set_epi64x(
                    0x0101010101010101LL * (number + 1), 0x0101010101010101LL * number)));
                UNROLLED
                for (row = 0; row < count; row++) {
                    found[row] = add_scaled(count, found[row], by, numbers,
                                            OTHER(8 * block + 4 * half + part));
                }
            }
        }
        UNROLLED
        for (row = 0; row < count; row++) {
            const __m256i parts = load(y->at + row * y->apart + block * Q8_K_BYTES + 260);
            const __m256i offset = _mm256_slli_epi32(_mm256_madd_epi16(parts, scales), 5);
            sums[row] = _mm256_fmadd_ps(_mm256_set1_ps(y->scale[row * y->length + block] * scale),
                                        _mm256_cvtepi32_ps(_mm256_sub_epi32(found[row], offset)),
                                        sums[row]);
        }
    }
    sums_to(count, sums, NULL, to, apart);
}

PASSES(TARGET, all_q4_k, dots_q4_k)
PASSES(TARGET, all_q5_k, dots_q5_k)
PASSES(TARGET, all_q6_k, dots_q6_k)

#ifdef FOURS
enum { SHIFTED = true, OFFSETS = 0 };
#else
enum { SHIFTED = false, OFFSETS = 1 };
#endif

const struct kernel *TABLE(int type)
{
    static const struct kernel KERNEL[TYPES] = {
        [Q4_0] = {all_dots_q4_0, Q8_0, 32, 1, 18, Q8_0_BYTES, MOST_GROUP, 1, 8 * OFFSETS, SHIFTED, false},
        [Q4_1] = {all_dots_q4_1, Q8_1, 32, 1, 20, 36, MOST_GROUP, 2, 0, false, false},
        [Q5_0] = {all_dots_q5_0, Q8_0, 32, 1, 22, Q8_0_BYTES, MOST_GROUP, 1, 16 * OFFSETS, SHIFTED, false},
        [Q8_0] = {all_dots_q8_0, Q8_0, 32, 1, Q8_0_BYTES, Q8_0_BYTES, MOST_GROUP, 1, 0, SHIFTED, false},
        [Q4_K] = {all_q4_k, Q8_K, 256, 1, Q4_K_BYTES, Q8_K_BYTES, MOST_GROUP, 0, 0, false, false},
        [Q5_K] = {all_q5_k, Q8_K, 256, 1, Q5_K_BYTES, Q8_K_BYTES, MOST_GROUP, 0, 0, false, false},
        [Q6_K] = {all_q6_k, Q8_K, 256, 1, Q6_K_BYTES, Q8_K_BYTES, MOST_GROUP, 0, 0, false, false},
    };
    return KERNEL[type].pass && NEEDS ? &KERNEL[type] : NULL;
}

#endif
