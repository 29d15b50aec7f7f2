/* Products of a matrix with few rows: each block of weights is unpacked once for all rows, and every
   row gets the same bits as alone.

   llama.cpp multiplies a few rows either one by one or, where llamafile's kernels handle them, in
   another order of additions than a single row. It calls llamafile_sgemm for every product, and the
   dynamic linker binds that call to the function here if this library was loaded before, with global
   symbols; see short_runs.py. Each kernel sums in the order of llama.cpp's ggml_vec_dot of that type,
   for AVX2 or (wide_floats.c) AVX-512, and is used only if its bits are those of the loaded library.
   Kernels that sum eight or more rows in another order (ggml_compute_forward_mul_mat_tiled) are
   avoided in the same way.

   Needs neither Python's nor llama.cpp's headers. */

#include "short_runs.h"

enum { Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q8_1 = 9, Q4_K = 12, Q5_K = 13, Q6_K = 14, Q8_K = 15,
       TYPES = 31 };
enum { MOST_NUMBERS = 32 * MOST_BLOCKS,  /* of a row, which is copied */
       MOST_OFFSET = 4 };  /* rows of a pass for types with an offset, of which twice as much is read */

typedef bool product(const struct team *, int64_t m, int64_t n, int64_t k, const void *a, int64_t lda,
                     const void *b, int64_t ldb, void *c, int64_t ldc, int a_type, int b_type,
                     int c_type);

/* ggml_compute_forward_mul_mat_tiled: whether it made the product `to` */
typedef bool tiled_product(const struct team *, void *to);

static product *theirs;
static tiled_product *their_tiles;
static int64_t (*rows_of)(const void *tensor);  /* ggml_nrows */
static int most_rows;                           /* 0: everything is left to llama.cpp */
static bool prompts;                            /* whether more rows are taken, where llamafile has no
                                                   kernel and single rows' would be called */

#ifdef KERNELS

static int (*next_chunk)(void *pool, int add);  /* ggml_threadpool_chunk_add */

/* 32 numbers of 4 bits as bytes: the lower halves of all bytes, then the upper ones */
INLINE __m256i nibbles(const uint8_t *from)
{
    __m128i half = _mm_loadu_si128((const __m128i *)from);
    __m256i both = _mm256_inserti128_si256(_mm256_castsi128_si256(half), _mm_srli_epi16(half, 4), 1);
    return _mm256_and_si256(_mm256_set1_epi8(15), both);
}

/* Products of the scales of a weight's row and of each row on the right */
static _Thread_local float both_scales[MOST_GROUP][MOST_BLOCKS] ALIGNED;

INLINE void scale_all(int count, int64_t blocks, const uint8_t *x, int bytes, const struct rows *y)
{
    int64_t block;
    int row;
    for (block = 0; block + 8 <= blocks; block += 8, x += 8 * bytes) {
        const __m256 eight = _mm256_cvtph_ps(_mm_set_epi16(
            (short)bits_of(x + 7 * bytes), (short)bits_of(x + 6 * bytes),
            (short)bits_of(x + 5 * bytes), (short)bits_of(x + 4 * bytes),
            (short)bits_of(x + 3 * bytes), (short)bits_of(x + 2 * bytes),
            (short)bits_of(x + bytes), (short)bits_of(x)));
        UNROLLED
        for (row = 0; row < count; row++)
            _mm256_storeu_ps(&both_scales[row][block], _mm256_mul_ps(
                eight, _mm256_loadu_ps(y->scale + row * y->blocks + block)));
    }
    for (; block < blocks; block++, x += bytes)
        for (row = 0; row < count; row++)
            both_scales[row][block] = one(x) * y->scale[row * y->blocks + block];
}

INLINE __m256i aligned(const int8_t *of, const struct rows *y, int row, int64_t block)
{
    return _mm256_load_si256((const __m256i *)(const void *)(of + row * y->length + 32 * block));
}

/* Types with blocks of 32. WEIGHTS: the numbers of the block at x as they are stored, of some types with
   an offset; PAIRS: products of the numbers meant with `other`, summed up by twos.
   Blocks are taken by fours as long as there are so many, to look ahead and to count more seldom. */
#define BLOCKS_OF_32(NAME, X_BYTES, WEIGHTS, PAIRS)                                                   \
INLINE void NAME##_block(int count, int64_t block, const uint8_t *x, const struct rows *y,            \
                         __m256 *sums)                                                                \
{                                                                                                     \
    const __m256i weights = WEIGHTS, ones = _mm256_set1_epi16(1);                                     \
    int row;                                                                                          \
    UNROLLED                                                                                          \
    for (row = 0; row < count; row++) {                                                               \
        const __m256i other = aligned(y->numbers, y, row, block);                                     \
        const __m256 fours = _mm256_cvtepi32_ps(_mm256_madd_epi16(ones, PAIRS));                      \
        sums[row] = _mm256_fmadd_ps(_mm256_broadcast_ss(&both_scales[row][block]), fours, sums[row]); \
    }                                                                                                 \
}                                                                                                     \
INLINE void NAME(int count, int64_t blocks, const uint8_t *x, const struct rows *y, float *to,        \
                 int64_t apart)                                                                       \
{                                                                                                     \
    __m256 sums[MOST_GROUP];                                                                          \
    int row, i;                                                                                       \
    int64_t block;                                                                                    \
    scale_all(count, blocks, x, X_BYTES, y);                                                          \
    UNROLLED                                                                                          \
    for (row = 0; row < count; row++)                                                                 \
        sums[row] = _mm256_setzero_ps();                                                              \
    for (block = 0; block + 4 <= blocks; block += 4, x += 4 * X_BYTES) {                              \
        fetch(x, 4 * X_BYTES);                                                                        \
        UNROLLED                                                                                      \
        for (i = 0; i < 4; i++)                                                                       \
            NAME##_block(count, block + i, x + i * X_BYTES, y, sums);                                 \
    }                                                                                                 \
    for (; block < blocks; block++, x += X_BYTES)                                                     \
        NAME##_block(count, block, x, y, sums);                                                       \
    UNROLLED                                                                                          \
    for (row = 0; row < count; row++)                                                                 \
        to[row * apart] = sum_of(sums[row]);                                                          \
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

#define PAIRS_WITHOUT_OFFSET                                                                          \
    _mm256_sub_epi16(_mm256_maddubs_epi16(weights, other), aligned(y->offsets, y, row, block))
BLOCKS_OF_32(dots_q8_0, 34, load(x + 2), _mm256_maddubs_epi16(
    _mm256_sign_epi8(weights, weights), _mm256_sign_epi8(other, weights)))
BLOCKS_OF_32(dots_q4_0, 18, nibbles(x + 2), PAIRS_WITHOUT_OFFSET)
BLOCKS_OF_32(dots_q5_0, 22, _mm256_or_si256(nibbles(x + 6), fifth_bits(x + 2)), PAIRS_WITHOUT_OFFSET)

INLINE void dots_q4_1(int count, int64_t blocks, const uint8_t *x, const struct rows *y, float *to,
                      int64_t apart)
{
    const __m256i ones = _mm256_set1_epi16(1);
    __m256 sums[MOST_GROUP];
    __m128 least[MOST_GROUP];
    int row;
    int64_t block;
    scale_all(count, blocks, x, 20, y);
    UNROLLED
    for (row = 0; row < count; row++) {
        sums[row] = _mm256_setzero_ps();
        least[row] = _mm_setzero_ps();
    }
    for (block = 0; block < blocks; block++, x += 20) {
        const __m256i weights = nibbles(x + 4);
        const __m128 lowest = _mm_cvtph_ps(_mm_set1_epi16((short)bits_of(x + 2)));
        fetch(x, 20);
        UNROLLED
        for (row = 0; row < count; row++) {
            const __m256 fours = _mm256_cvtepi32_ps(_mm256_madd_epi16(ones, _mm256_maddubs_epi16(
                weights, aligned(y->numbers, y, row, block))));
            sums[row] = _mm256_fmadd_ps(_mm256_broadcast_ss(&both_scales[row][block]), fours,
                                        sums[row]);
            least[row] = _mm_fmadd_ss(lowest, _mm_load_ss(y->other + row * y->blocks + block),
                                      least[row]);
        }
    }
    UNROLLED
    for (row = 0; row < count; row++)
        to[row * apart] = sum_of(sums[row]) + _mm_cvtss_f32(least[row]);
}

enum { Q4_K_BYTES = 144, Q5_K_BYTES = 176, Q6_K_BYTES = 210, Q8_K_BYTES = 292 };

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
    const __m256i low = _mm256_set1_epi8(15), one_bit = _mm256_set1_epi8(1);
    __m256 sums[MOST_GROUP];
    __m128 least[MOST_GROUP];
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
            const __m256i packed = load(numbers + 32 * part);
            __m256i l = _mm256_and_si256(packed, low);
            __m256i h = _mm256_and_si256(_mm256_srli_epi16(packed, 4), low);
            if (fifth) {
                l = _mm256_add_epi8(l, _mm256_slli_epi16(_mm256_and_si256(
                    _mm256_srli_epi16(upper, 2 * part), one_bit), 4));
                h = _mm256_add_epi8(h, _mm256_slli_epi16(_mm256_and_si256(
                    _mm256_srli_epi16(upper, 2 * part + 1), one_bit), 4));
            }
            UNROLLED
            for (row = 0; row < count; row++) {
                const __m256i sum = _mm256_add_epi32(
                    _mm256_madd_epi16(scale_l, _mm256_maddubs_epi16(
                        l, aligned(y->numbers, y, row, 8 * block + 2 * part))),
                    _mm256_madd_epi16(scale_h, _mm256_maddubs_epi16(
                        h, aligned(y->numbers, y, row, 8 * block + 2 * part + 1))));
                found[row] = part ? _mm256_add_epi32(found[row], sum) : sum;
            }
        }
        UNROLLED
        for (row = 0; row < count; row++) {
            const float theirs_scale = y->scale[row * y->blocks + block];
            const __m128i products = _mm_madd_epi16(lowest, _mm_load_si128(
                (const __m128i *)(const void *)(y->pairs + 8 * (row * y->blocks + block))));
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
        to[row * apart] = sum_of(sums[row]) + _mm_cvtss_f32(sum);
    }
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
    const __m256i low = _mm256_set1_epi8(15);
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
                const __m256i packed = load(x + 64 * half + 32 * (part % 2));
                const __m256i lower = _mm256_and_si256(
                    part < 2 ? packed : _mm256_srli_epi16(packed, 4), low);
                const __m256i bits = _mm256_and_si256(upper, _mm256_set1_epi8((char)(3 << 2 * part)));
                const __m256i numbers = _mm256_or_si256(lower,
                    part == 0 ? _mm256_slli_epi16(bits, 4) : part == 1 ? _mm256_slli_epi16(bits, 2) :
                    part == 2 ? bits : _mm256_srli_epi16(bits, 2));
                const int number = 8 * half + 2 * part;
                const __m256i by = _mm256_cvtepi8_epi16(_mm_shuffle_epi8(bytes, _mm_set_epi64x(
                    0x0101010101010101LL * (number + 1), 0x0101010101010101LL * number)));
                UNROLLED
                for (row = 0; row < count; row++) {
                    found[row] = _mm256_add_epi32(found[row], _mm256_madd_epi16(
                        by, _mm256_maddubs_epi16(numbers, aligned(
                            y->numbers, y, row, 8 * block + 4 * half + part))));
                }
            }
        }
        UNROLLED
        for (row = 0; row < count; row++) {
            const __m256i parts = load(y->at + row * y->apart + block * Q8_K_BYTES + 260);
            const __m256i offset = _mm256_slli_epi32(_mm256_madd_epi16(parts, scales), 5);
            sums[row] = _mm256_fmadd_ps(_mm256_set1_ps(y->scale[row * y->blocks + block] * scale),
                                        _mm256_cvtepi32_ps(_mm256_sub_epi32(found[row], offset)),
                                        sums[row]);
        }
    }
    for (row = 0; row < count; row++)
        to[row * apart] = sum_of(sums[row]);
}

/* GGML_F32x8_REDUCE of llama.cpp, of four */
INLINE float sum_of_four(const __m256 *x)
{
    const __m256 sum = _mm256_add_ps(_mm256_add_ps(x[0], x[2]), _mm256_add_ps(x[1], x[3]));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(sum), _mm256_extractf128_ps(sum, 1));
    const __m128 two = _mm_hadd_ps(four, four);
    return _mm_cvtss_f32(_mm_hadd_ps(two, two));
}

INLINE __m256 floats_of_f32(const uint8_t *from)
{
    return _mm256_loadu_ps((const float *)(const void *)from);
}

INLINE __m256 floats_of_f16(const uint8_t *from)
{
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)from));
}

INLINE __m256 floats_of_bf16(const uint8_t *from)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(
        _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(const void *)from)), 16));
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

ELEMENTS(dots_f32, 4, floats_of_f32, sum_of_four)
ELEMENTS(dots_f16, 2, floats_of_f16, sum_of_four)
ELEMENTS(dots_bf16, 2, floats_of_bf16, sum_of_four_bf16)

PASSES(AVX2, all_f32, dots_f32)
PASSES(AVX2, all_f16, dots_f16)
PASSES(AVX2, all_bf16, dots_bf16)
PASSES(AVX2, all_q4_0, dots_q4_0)
PASSES(AVX2, all_q4_1, dots_q4_1)
PASSES(AVX2, all_q5_0, dots_q5_0)
PASSES(AVX2, all_q8_0, dots_q8_0)
PASSES(AVX2, all_q4_k, dots_q4_k)
PASSES(AVX2, all_q5_k, dots_q5_k)
PASSES(AVX2, all_q6_k, dots_q6_k)

static const struct kernel KERNEL[TYPES] = {
    [F32] = {all_f32, F32, 1, 32, 4, 4, MOST_FLOATS, 0, 0, false},
    [F16] = {all_f16, F16, 1, 32, 2, 2, MOST_FLOATS, 0, 0, false},
    [BF16] = {all_bf16, BF16, 1, 32, 2, 2, MOST_FLOATS, 0, 0, false},
    [Q4_0] = {all_q4_0, Q8_0, 32, 1, 18, Q8_0_BYTES, MOST_OFFSET, 1, 8, false},
    [Q4_1] = {all_q4_1, Q8_1, 32, 1, 20, 36, MOST_GROUP, 2, 0, false},
    [Q5_0] = {all_q5_0, Q8_0, 32, 1, 22, Q8_0_BYTES, MOST_OFFSET, 1, 16, false},
    [Q8_0] = {all_q8_0, Q8_0, 32, 1, Q8_0_BYTES, Q8_0_BYTES, MOST_GROUP, 1, 0, false},
    [Q4_K] = {all_q4_k, Q8_K, 256, 1, Q4_K_BYTES, Q8_K_BYTES, MOST_GROUP, 0, 0, false},
    [Q5_K] = {all_q5_k, Q8_K, 256, 1, Q5_K_BYTES, Q8_K_BYTES, MOST_GROUP, 0, 0, false},
    [Q6_K] = {all_q6_k, Q8_K, 256, 1, Q6_K_BYTES, Q8_K_BYTES, MOST_GROUP, 0, 0, false},
};

static const struct kernel *used[TYPES];  /* NULL: left to llama.cpp */

static bool fits(const struct kernel *kernel, int64_t blocks)
{
    return blocks * kernel->elements <= MOST_NUMBERS && blocks % kernel->step == 0;
}

static _Thread_local float scales[2 * MOST_ROWS * MOST_BLOCKS];
static _Thread_local int16_t pairs_of[MOST_ROWS * MOST_NUMBERS / 32] ALIGNED;
/* A product's rows have blocks or they have none. */
static _Thread_local union {
    struct { int8_t numbers[MOST_ROWS * MOST_NUMBERS], offsets[MOST_ROWS * MOST_NUMBERS]; };
    float floats[MOST_ROWS * MOST_NUMBERS];
} unpacked ALIGNED;

/* What blocks begin with, and their numbers to where loads cross no line. */
AVX2 static void unpack_blocks(const struct kernel *kernel, const uint8_t *rows, size_t apart,
                               int count, int64_t blocks)
{
    const int begin = kernel->partner == Q8_K ? 4 : 2 * kernel->scales;
    int number, row, part;
    int64_t block;
    float *to = scales;
    for (number = 0; number < kernel->scales; number++)
        for (row = 0; row < count; row++)
            for (block = 0; block < blocks; block++)
                *to++ = one(rows + row * apart + block * kernel->partner_bytes + 2 * number);
    for (row = 0; row < count && kernel->partner == Q8_K; row++)
        for (block = 0; block < blocks; block++) {
            const uint8_t *from = rows + row * apart + block * Q8_K_BYTES;
            const __m256i parts = load(from + 260);
            memcpy(scales + row * blocks + block, from, sizeof *scales);
            _mm_store_si128((__m128i *)(void *)(pairs_of + 8 * (row * blocks + block)),
                            _mm_hadd_epi16(_mm256_extracti128_si256(parts, 0),
                                           _mm256_extracti128_si256(parts, 1)));
        }
    for (row = 0; row < count; row++)
        for (block = 0; block < blocks; block++)
            for (part = 0; part < kernel->elements; part += 32) {
                const int64_t at = (row * blocks + block) * kernel->elements + part;
                const __m256i few = load(rows + row * apart + block * kernel->partner_bytes + begin
                                         + part);
                _mm256_store_si256((__m256i *)(void *)(unpacked.numbers + at), few);
                if (kernel->offset)
                    _mm256_store_si256((__m256i *)(void *)(unpacked.offsets + at), _mm256_maddubs_epi16(
                        _mm256_set1_epi8(kernel->offset), few));
            }
}

AVX2 static void unpack_floats(int type, const uint8_t *rows, size_t apart, int count, int64_t length)
{
    int row;
    int64_t i;
    for (row = 0; row < count; row++)
        for (i = 0; i < length; i += 8) {
            const uint8_t *from = rows + row * apart + i * KERNEL[type].partner_bytes;
            _mm256_store_ps(unpacked.floats + row * length + i, type == F32 ? floats_of_f32(from) :
                            type == F16 ? floats_of_f16(from) : floats_of_bf16(from));
        }
}

static void unpack(const struct kernel *kernel, int type, const uint8_t *rows, size_t apart, int count,
                   int64_t blocks)
{
    if (kernel->elements > 1)
        unpack_blocks(kernel, rows, apart, count, blocks);
    else if (!kernel->as_is)
        unpack_floats(type, rows, apart, count, blocks);
}

/* The part of the product that rows `from` to `until` of the weights make. */
static void piece(const struct kernel *kernel, int64_t from, int64_t until, int count, int64_t blocks,
                  const uint8_t *x, size_t x_apart, const uint8_t *y, size_t y_apart, float *to,
                  int64_t apart)
{
    const int groups = (count + kernel->group - 1) / kernel->group;
    int group, begin = 0;
    for (group = 0; group < groups; group++) {
        const int end = (group + 1) * count / groups;  /* groups of about one size */
        const struct rows rows = {y + begin * y_apart, y_apart, scales + begin * blocks,
                                  scales + (count + begin) * blocks,
                                  unpacked.numbers + begin * blocks * kernel->elements,
                                  unpacked.offsets + begin * blocks * kernel->elements,
                                  unpacked.floats + begin * blocks, blocks,
                                  blocks * kernel->elements, pairs_of + 8 * begin * blocks};
        kernel->pass(end - begin, blocks, x + from * x_apart, x_apart, until - from, &rows,
                     to + from + begin * apart, apart);
        begin = end;
    }
}

/* How many rows of weights a thread takes at a time. */
static int64_t chunk_of(int64_t m, const struct team *team)
{
    const int64_t rows = m / (8 * team->nth) / 16 * 16;
    return rows < 16 ? 16 : rows > 64 ? 64 : rows;
}

/* All rows of the right side, `count`, by rows `from` to `until` of the weights. Up to MOST_ROWS are
   unpacked before, if `there`. */
static void by_rows(const struct kernel *kernel, int type, int64_t from, int64_t until, int64_t count,
                    int64_t blocks, const uint8_t *x, size_t x_apart, const uint8_t *y, size_t y_apart,
                    float *to, int64_t apart, bool there)
{
    int64_t row, some;
    for (row = 0; row < count; row += some) {
        some = count - row < MOST_ROWS ? count - row : MOST_ROWS;
        if (!there)
            unpack(kernel, type, y + row * y_apart, y_apart, (int)some, blocks);
        piece(kernel, from, until, (int)some, blocks, x, x_apart, y + row * y_apart, y_apart,
              to + row * apart, apart);
    }
}

static void multiply(const struct kernel *kernel, const struct team *team, int64_t m, int64_t count,
                     int64_t blocks, const void *a, int64_t lda, const void *b, int64_t ldb, float *to,
                     int64_t ldc, int type)
{
    const size_t x_apart = lda * kernel->bytes, y_apart = ldb * kernel->partner_bytes;
    /* ggml has just begun to count this product's chunks anew, before threads met; of several
       products of one operation, whose right sides follow one another, only before the first */
    const bool shares = next_chunk && team->nth > 1 && b == team->work, few = count <= MOST_ROWS;
    const int64_t rows = chunk_of(m, team);
    int64_t chunk = team->ith, from, until;

    if (few)
        unpack(kernel, type, b, y_apart, (int)count, blocks);
    if (!shares)
        for (from = team->ith * m / team->nth; from < (team->ith + 1) * m / team->nth; from = until) {
            const int64_t end = (team->ith + 1) * m / team->nth;
            until = few || end - from < rows ? end : from + rows;
            by_rows(kernel, type, from, until, count, blocks, a, x_apart, b, y_apart, to, ldc, few);
        }
    else
        for (; chunk * rows < m; chunk = next_chunk(team->pool, 1)) {
            until = (chunk + 1) * rows;
            by_rows(kernel, type, chunk * rows, until < m ? until : m, count, blocks, a, x_apart, b,
                    y_apart, to, ldc, few);
        }
}

#endif

/* What llama.cpp calls for every product of a matrix: false leaves it to single rows' kernels. */
bool llamafile_sgemm(const struct team *team, int64_t m, int64_t n, int64_t k, const void *a,
                     int64_t lda, const void *b, int64_t ldb, void *c, int64_t ldc, int a_type,
                     int b_type, int c_type)
{
#ifdef KERNELS
    const bool known = c_type == F32 && a_type >= 0 && a_type < TYPES && KERNEL[a_type].pass;
    const struct kernel *kernel = known ? used[a_type] : NULL;
    const bool ours = kernel && b_type == kernel->partner && fits(kernel, k);
    const bool few = known && n <= most_rows;  /* llamafile's kernels may add up in another order */
#else
    const bool ours = false, few = false;
#endif
    if (!few && theirs != NULL
        && theirs(team, m, n, k, a, lda, b, ldb, c, ldc, a_type, b_type, c_type))
        return true;
    if (!ours || !(few || prompts))
        return false;
#ifdef KERNELS
    multiply(kernel, team, m, n, k, a, lda, b, ldb, c, ldc, a_type);
#endif
    return true;
}

/* The same for products that llama.cpp would make in tiles. */
bool ggml_compute_forward_mul_mat_tiled(const struct team *team, void *to)
{
    if (most_rows && rows_of(to) <= most_rows)
        return false;
    return their_tiles != NULL && their_tiles(team, to);
}

#ifdef KERNELS

static uint32_t dice;

/* Random weights: scales of a moderate size, wherever a type has them. */
static void randomise(int type, uint8_t *block)
{
    static const int HALVES[TYPES][2] = {
        [Q4_0] = {0, -1}, [Q4_1] = {0, 2}, [Q5_0] = {0, -1}, [Q8_0] = {0, -1}, [Q4_K] = {0, 2},
        [Q5_K] = {0, 2}, [Q6_K] = {208, -1}};
    int i;
    for (i = 0; i < KERNEL[type].bytes; i++)
        block[i] = (uint8_t)roll(&dice);
    for (i = 0; i < 2 && KERNEL[type].elements > 1 && HALVES[type][i] >= 0; i++) {
        const uint16_t half = some_scale(&dice);
        memcpy(block + HALVES[type][i], &half, sizeof half);
    }
    if (type == Q8_0)
        for (i = 2; i < 34; i++)
            block[i] = block[i] == 0x80 ? 0 : block[i];
}

enum { TRIED = 768, WEIGHTS = 5 };

/* Whether a kernel gives the bits of the library's own products of single rows. */
static bool agrees(const struct kernel *kernel, int type, const struct traits *own,
                   const struct traits *partner)
{
    static float from[MOST_ROWS][TRIED], to[MOST_ROWS][WEIGHTS];
    static uint8_t x[WEIGHTS][4 * TRIED], y[MOST_ROWS][4 * TRIED];
    const int64_t blocks = TRIED / kernel->elements;
    const size_t x_bytes = blocks * kernel->bytes, y_bytes = blocks * kernel->partner_bytes;
    const struct team alone = {0, 1, 0, NULL, NULL};
    int row, weight, i, count;

    if (own->partner != kernel->partner || (kernel->partner != F32 && !partner->from_float))
        return false;
    for (row = 0; row < MOST_ROWS; row++) {
        for (i = 0; i < TRIED; i++)
            from[row][i] = some_number(&dice);
        if (kernel->partner == F32)
            memcpy(y[0] + row * y_bytes, from[row], y_bytes);
        else
            partner->from_float(from[row], y[0] + row * y_bytes, TRIED);
    }
    for (weight = 0; weight < WEIGHTS; weight++)
        for (i = 0; i < blocks; i++) {
            uint8_t *block = x[0] + weight * x_bytes + i * kernel->bytes;
            if (kernel->elements > 1) {
                randomise(type, block);
            } else {
                const float value = ((int)(roll(&dice) & 0xffff) - 0x8000) / (float)(1 << 15);
                if (type == F32)
                    memcpy(block, &value, sizeof value);
                else
                    own->from_float(&value, block, 1);
            }
        }
    for (count = 1; count <= MOST_ROWS; count++) {
        memset(to, 0, sizeof to);
        multiply(kernel, &alone, WEIGHTS, count, blocks, x, blocks, y, blocks, to[0], WEIGHTS, type);
        for (row = 0; row < count; row++)
            for (weight = 0; weight < WEIGHTS; weight++) {
                float wanted;
                own->dot(TRIED, &wanted, 0, x[0] + weight * x_bytes, 0, y[0] + row * y_bytes, 0, 1);
                if (memcmp(&wanted, &to[row][weight], sizeof wanted) != 0)
                    return false;
            }
    }
    return true;
}

/* The kernel of this type that gives the library's bits; NULL if there is none. */
static const struct kernel *fitting(int type, const struct traits *own, const struct traits *partner)
{
    const struct kernel *kernel = &KERNEL[type];
    int nth;
    for (nth = 0; kernel != NULL && !agrees(kernel, type, own, partner); nth++)
        kernel = wide_kernel(type, nth);
    return kernel;
}

#endif

/* Begins to take products of up to `most` rows, of those of `wanted` types (bits) whose kernels give
   the library's own bits; if `long_ones`, also longer ones that llamafile's leave to those of single
   rows. Returns these types. The library's functions: its llamafile_sgemm and
   ggml_compute_forward_mul_mat_tiled, which the rest is left to, ggml_get_type_traits_cpu,
   ggml_nrows, and ggml_threadpool_chunk_add or NULL. */
uint32_t pipeinfer_short_runs(product *own, tiled_product *tiles, const void *(*traits_of)(int),
                              int64_t (*rows)(const void *), int (*chunk)(void *, int), int most,
                              uint32_t wanted, bool long_ones)
{
    theirs = own;
    their_tiles = tiles;
    rows_of = rows;
    most_rows = 0;
    prompts = false;
#ifdef KERNELS
    memset(used, 0, sizeof used);
    if (most > 0) {
        const bool avx2 = has_avx2();
        int type;
        uint32_t found = 0;
        dice = 1;
        for (type = 0; type < TYPES && avx2; type++)
            if (wanted >> type & 1 && KERNEL[type].pass && (used[type] = fitting(
                    type, traits_of(type), traits_of(KERNEL[type].partner))) != NULL)
                found |= 1u << type;
        next_chunk = chunk;
        most_rows = most < MOST_ROWS ? most : MOST_ROWS;
        prompts = long_ones;
        return found;
    }
#else
    (void)traits_of, (void)chunk, (void)most, (void)wanted, (void)long_ones;
#endif
    return 0;
}
