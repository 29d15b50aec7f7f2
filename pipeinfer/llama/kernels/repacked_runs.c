/* Products of few rows with weights that llama.cpp has repacked: Q4_0 in its layout 8x8, which has the
   same eight bytes of eight rows of weights side by side.

   llama.cpp's kernels for a single row (gemv) and for four rows (gemm) give the same bits, and so do
   the ones here, which take half as long. llama.cpp multiplies two or three rows one by one. Here the
   first call computes them all, if it is known that they belong together: llama.cpp's method for the
   whole product is replaced by one that stores the number of rows and then calls the original. These
   functions replace llama.cpp's own through the dynamic linker, as in short_runs.c. */

#include "avx2.h"
#include "repacked.h"

static product *their_gemv, *their_gemm;
/* ggml_nrows, ggml_is_matrix, ggml_is_contiguous, ggml_op_desc */
static int64_t (*rows_of)(const void *tensor);
static bool (*is_matrix)(const void *tensor), (*is_contiguous)(const void *tensor);
static const char *(*name_of)(const void *tensor);
static bool used, prompts_too;

/* Rows left after the groups of four in the present product; 0: unknown */
static _Thread_local int rest;
/* The products that the first call computed for the following ones */
static _Thread_local struct { const void *x; const uint8_t *y; int rows; } made;

#ifdef X86

enum { COLUMNS = 8,       /* rows of weights that lie side by side */
       IN_FOURS = 4,
       WEIGHTS = 16,      /* where a block's numbers begin, behind eight scales */
       BLOCK = 144 };     /* bytes of eight blocks of weights */

/* Of the rows on the right, per block: its scale, and what the weights' offset of 8 adds to a sum */
static _Thread_local float scales[MOST_ROWS][MOST_BLOCKS];
static _Thread_local int32_t offsets[MOST_ROWS][MOST_BLOCKS];

/* `count` rows by eight rows of weights. The parts of eight numbers of a row's block are `step` apart,
   the rows `apart` bytes, their blocks `bytes`. */
INLINE void eight(int count, int64_t blocks, const uint8_t *x, const uint8_t *y, int64_t bytes,
                  int64_t step, int64_t apart, int first, float *to, size_t to_apart)
{
    const __m256i low = _mm256_set1_epi8(15), signs = _mm256_set1_epi8((char)0x88);
    const __m256i ones = _mm256_set1_epi16(1);
    __m256 sums[IN_FOURS];
    int64_t block;
    int row, part;
    UNROLLED
    for (row = 0; row < count; row++)
        sums[row] = _mm256_setzero_ps();
    for (block = 0; block < blocks; block++, x += BLOCK, y += bytes) {
        /* scales in the order that sums of pairs bring about: 0 1 4 5 2 3 6 7 */
        const __m256 theirs = _mm256_cvtph_ps(_mm_shuffle_epi32(
            _mm_loadu_si128((const __m128i *)x), _MM_SHUFFLE(3, 1, 2, 0)));
        __m256i weights[4][2]; /* by eight numbers: of rows 0 to 3 and 4 to 7 */
        fetch(x, BLOCK);
        UNROLLED
        for (part = 0; part < 4; part++) {
            const __m256i both = _mm256_xor_si256(signs, load(x + WEIGHTS + 32 * part));
            weights[part / 2][part % 2] = _mm256_and_si256(both, low);
            weights[2 + part / 2][part % 2] = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
        }
        UNROLLED
        for (row = 0; row < count; row++) {
            __m256i left = _mm256_setzero_si256(), right = left, whole;
            UNROLLED
            for (part = 0; part < 4; part++) {
                int64_t number;
                memcpy(&number, y + row * apart + part * step, sizeof number);
                /* at most 4 * 2 * 15 * 127 in 16 bits */
                left = _mm256_add_epi16(left, _mm256_maddubs_epi16(
                    weights[part][0], _mm256_set1_epi64x(number)));
                right = _mm256_add_epi16(right, _mm256_maddubs_epi16(
                    weights[part][1], _mm256_set1_epi64x(number)));
            }
            whole = _mm256_sub_epi32(_mm256_hadd_epi32(_mm256_madd_epi16(left, ones),
                                                       _mm256_madd_epi16(right, ones)),
                                     _mm256_set1_epi32(offsets[first + row][block]));
            sums[row] = _mm256_fmadd_ps(
                _mm256_cvtepi32_ps(whole),
                _mm256_mul_ps(theirs, _mm256_broadcast_ss(&scales[first + row][block])), sums[row]);
        }
    }
    UNROLLED
    for (row = 0; row < count; row++)
        _mm256_storeu_ps(to + row * to_apart, _mm256_castpd_ps(_mm256_permute4x64_pd(
            _mm256_castps_pd(sums[row]), _MM_SHUFFLE(3, 1, 2, 0))));
}

/* Eight times the sums of eight numbers each */
INLINE __m256i eight_times(__m256i numbers)
{
    const __m256i sums = _mm256_sad_epu8(_mm256_xor_si256(numbers, _mm256_set1_epi8((char)0x80)),
                                         _mm256_setzero_si256());
    return _mm256_slli_epi64(_mm256_sub_epi64(sums, _mm256_set1_epi64x(8 * 128)), 3);
}

/* Up to three rows, one after another as Q8_0 */
AVX2 static void few(int count, int length, float *to, size_t to_apart, const uint8_t *x,
                     const uint8_t *y, int weights)
{
    const int64_t blocks = length / 32, apart = blocks * Q8_0_BYTES;
    int64_t block;
    int row, at;
    for (row = 0; row < count; row++)
        for (block = 0; block < blocks; block++) {
            const uint8_t *other = y + row * apart + block * Q8_0_BYTES;
            int64_t sums[4];
            _mm256_storeu_si256((__m256i *)(void *)sums, eight_times(load(other + 2)));
            scales[row][block] = one(other);
            offsets[row][block] = (int32_t)(sums[0] + sums[1] + sums[2] + sums[3]);
        }
#define ALL(COUNT)                                                                                    \
    for (at = 0; at < weights; at += COLUMNS, x += blocks * BLOCK)                                    \
        eight(COUNT, blocks, x, y + 2, Q8_0_BYTES, 8, apart, 0, to + at, to_apart)
    switch (count) {
    case 1: ALL(1); break;
    case 2: ALL(2); break;
    default: ALL(3);
    }
}

/* Rows in fours, of which eight numbers each lie side by side */
AVX2 static void fours(int count, int length, float *to, size_t to_apart, const uint8_t *x,
                       const uint8_t *y, int weights)
{
    const int64_t blocks = length / 32, bytes = IN_FOURS * Q8_0_BYTES;
    int64_t block;
    int row, at, part;
    for (row = 0; row < count; row += IN_FOURS)
        for (block = 0; block < blocks; block++) {
            const uint8_t *other = y + row * blocks * Q8_0_BYTES + block * bytes;
            __m256i all = _mm256_setzero_si256();
            int64_t sums[IN_FOURS];
            for (part = 0; part < 4; part++)
                all = _mm256_add_epi64(all, eight_times(load(other + 2 * IN_FOURS + 32 * part)));
            _mm256_storeu_si256((__m256i *)(void *)sums, all);
            for (part = 0; part < IN_FOURS; part++) {
                scales[row + part][block] = one(other + 2 * part);
                offsets[row + part][block] = (int32_t)sums[part];
            }
        }
    for (at = 0; at < weights; at += COLUMNS, x += blocks * BLOCK)
        for (row = 0; row < count; row += IN_FOURS)
            eight(IN_FOURS, blocks, x, y + row * blocks * Q8_0_BYTES + 2 * IN_FOURS, bytes, 32, 8, row,
                  to + row * to_apart + at, to_apart);
}

static bool fits(int length) { return length / 32 <= MOST_BLOCKS; }

#endif

/* A single row. */
void ggml_gemv_q4_0_8x8_q8_0(int length, float *to, size_t apart, const void *x, const void *y,
                             int rows, int weights)
{
    if (repacked_expert(REPACKED_Q4_0, length, to, x, y, rows, weights))
        return;
#ifdef X86
    if (used && rows == 1 && fits(length)) {
        const int64_t bytes = length / 32 * Q8_0_BYTES;
        if (made.rows && made.x == x && made.y == y) {
            made.rows--;
            made.y += bytes;
            return;
        }
        few(rest ? rest : 1, length, to, apart, x, y, weights);
        made.x = x;
        made.y = (const uint8_t *)y + bytes;
        made.rows = rest ? rest - 1 : 0;
        return;
    }
#endif
    their_gemv(length, to, apart, x, y, rows, weights);
}

/* Rows in fours. */
void ggml_gemm_q4_0_8x8_q8_0(int length, float *to, size_t apart, const void *x, const void *y,
                             int rows, int weights)
{
    const int done = repacked_prompt(REPACKED_Q4_0, length, to, apart, x, y, rows, weights);
    if (done == weights)
        return;
    to += done;
    weights -= done;
#ifdef X86
    x = (const uint8_t *)x + length / 32 * (done / COLUMNS) * BLOCK;
    if (used && (rows <= MOST_ROWS || prompts_too) && fits(length)) {
        const int64_t bytes = length / 32 * Q8_0_BYTES;
        int row;
        for (row = 0; row < rows; row += MOST_ROWS) /* more would not stay in the first cache */
            fours(rows - row < MOST_ROWS ? rows - row : MOST_ROWS, length, to + row * apart, apart, x,
                  (const uint8_t *)y + row * bytes, weights);
        return;
    }
#endif
    their_gemm(length, to, apart, x, y, rows, weights);
}

/* ggml::cpu::repack::tensor_traits<block_q4_0, 8, 8, GGML_TYPE_Q8_0>::compute_forward: a whole product.
   Rows of a matrix follow one another on both sides; those of experts are noted (repacked_experts.c). */
bool _ZN4ggml3cpu6repack13tensor_traitsI10block_q4_0Ll8ELl8EL9ggml_type8EE15compute_forwardEP19ggml_compute_paramsP11ggml_tensor(
    const void *self, void *params, void *tensor)
{
    bool done;
    made.rows = rest = 0;
    if (used && rows_of && is_matrix && is_contiguous && name_of
        && strcmp(name_of(tensor), "MUL_MAT") == 0 && is_matrix(tensor) && is_contiguous(tensor))
        rest = (int)(rows_of(tensor) % 4);
    done = repacked_whole(REPACKED_Q4_0, self, params, tensor);
    made.rows = rest = 0;
    return done;
}

#ifdef X86

enum { TRIED = 256 };

/* Whether the kernels give the bits of the library's own for single rows, for rows in fours as well. */
static bool agree(const struct traits *partner)
{
    enum { BLOCKS = TRIED / 32, LENGTH = BLOCKS * Q8_0_BYTES };
    static float from[TRIED], wanted[MOST_ROWS][COLUMNS], to[MOST_ROWS][COLUMNS];
    static uint8_t x[BLOCKS * BLOCK], y[MOST_ROWS][LENGTH], sided[MOST_ROWS * LENGTH];
    uint32_t dice = 1;
    int row, i, count;
    repacked_example(REPACKED_Q4_0, x, BLOCKS, &dice);
    for (row = 0; row < MOST_ROWS; row++) {
        for (i = 0; i < TRIED; i++)
            from[i] = some_number(&dice);
        partner->from_float(from, y[row], TRIED);
        their_gemv(TRIED, wanted[row], COLUMNS, x, y[row], 1, COLUMNS);
        put_in_fours(sided, row, BLOCKS, y[row]);
    }
    for (count = 1; count < IN_FOURS; count++) {
        memset(to, 0, sizeof to);
        few(count, TRIED, to[0], COLUMNS, x, y[0], COLUMNS);
        if (memcmp(to, wanted, count * sizeof to[0]) != 0)
            return false;
    }
    for (count = IN_FOURS; count <= MOST_ROWS; count += IN_FOURS) {
        memset(to, 0, sizeof to);
        fours(count, TRIED, to[0], COLUMNS, x, sided, COLUMNS);
        if (memcmp(to, wanted, count * sizeof to[0]) != 0)
            return false;
        memset(to, 0, sizeof to);
        their_gemm(TRIED, to[0], COLUMNS, x, sided, count, COLUMNS);
        if (memcmp(to, wanted, count * sizeof to[0]) != 0)
            return false;
    }
    return true;
}

#endif

/* Begins to make these products if `wanted` and their bits are the library's own; returns whether, and
   from the second bit on the types whose prompts are taken (repacked.h), and behind those the types whose
   experts are.
   `prompts`: those of more than MOST_ROWS rows as well, where repacked_prompts.c does not take them. The
   library's functions: the first three are needed, without the next five two or three rows go one by
   one, without the others these types are llama.cpp's. */
unsigned pipeinfer_repacked_runs(product *gemv, product *gemm, const struct traits *(*traits_of)(int),
                             method *forward, int64_t (*rows)(const void *),
                             bool (*matrix)(const void *), bool (*contiguous)(const void *),
                             const char *(*name)(const void *), product *iq4_nl, product *mxfp4,
                             product *one_iq4_nl, product *one_mxfp4, method *whole_iq4_nl,
                             method *whole_mxfp4, bool wanted, bool prompts)
{
    product *const gemms[REPACKED_TYPES] = {gemm, iq4_nl, mxfp4};
    product *const ones[REPACKED_TYPES] = {gemv, one_iq4_nl, one_mxfp4};
    method *const forwards[REPACKED_TYPES] = {forward, whole_iq4_nl, whole_mxfp4};
    unsigned found;
    their_gemv = gemv;
    their_gemm = gemm;
    rows_of = rows;
    is_matrix = matrix;
    is_contiguous = contiguous;
    name_of = name;
    used = false;
    prompts_too = prompts;
#ifdef X86
    used = wanted && has_avx2() && agree(traits_of(Q8_0));
#else
    (void)traits_of, (void)wanted;
#endif
    found = used | repacked_prompts(gemms, wanted) << 1;
    return found | repacked_experts(ones, forwards, name, wanted) << (REPACKED_TYPES + 2);
}
