/* Products of prompts with weights of four bits that llama.cpp has repacked (8x8): Q4_0, IQ4_NL, MXFP4.

   In this layout a lane of a register is a row of weights, a column of the product. Its sum is, block
   after block, fma(float(whole sum of 32 products), scale * scale, sum), as in llama.cpp's kernels for
   AVX2. Whole sums are exact in any order, so the instructions that make many of them at once may make
   them: VNNI on 512 bits, or the tiles of AMX. Only the order of the float part is kept, so the bits
   are llama.cpp's. Columns are unpacked once for up to MOST rows; SLICE blocks of PANELS panels stay in
   the caches while all rows pass. */

#include "repacked.h"

static product *their_gemms[REPACKED_TYPES];

/* Bytes of a block, where its four-bit numbers begin, behind eight scales, and what they stand for */
static const struct { int bytes, start; int8_t values[16]; } layouts[REPACKED_TYPES] = {
    /* llama.cpp has flipped the highest bit */
    {144, 16, {0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1}},
    {144, 16, {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113}},
    /* twice the numbers, and so half the scales */
    {136, 8, {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12}}};

#ifdef X86

#include "wide.h"
#include <cpuid.h>
#include <stdlib.h>
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif

enum { NUMBERS = 32,  /* of a block */
       PANEL = COLUMNS * NUMBERS,
       IN_FOURS = 4 * Q8_0_BYTES,
       LEAST = 8,     /* rows from which on unpacking to 512 bits pays */
       SLICE = 16,    /* blocks of a panel that are unpacked at a time */
       PANELS = 8,    /* unpacked side by side */
       MOST = 128,    /* rows that pass over unpacked panels */
       LIFT = 128 };  /* makes a weight unsigned, as VNNI needs one side */

#define IN_SIXTEENS _Pragma("GCC unroll 16")

static bool taken[REPACKED_TYPES], tiles;

/* Unpacked panels: of each block eight registers, each of which has four numbers of every column */
static _Thread_local int8_t panels[PANELS][SLICE * PANEL] ALIGNED;
static _Thread_local float panel_scales[PANELS][SLICE * COLUMNS] ALIGNED;
static _Thread_local float sums[PANELS][MOST * COLUMNS] ALIGNED;

/* The present rows in groups: [slice][group][block][row of the group]; numbers, scales, and what the
   weights' lift adds to a sum, negative. Grows to the longest rows that its thread has seen. */
static _Thread_local struct { int8_t *numbers; float *scales; int32_t *starts; size_t blocks; } laid;

static bool has_room(size_t blocks)
{
    if (laid.blocks >= blocks)
        return true;
    free(laid.numbers), free(laid.scales), free(laid.starts);
    laid.numbers = aligned_alloc(64, blocks * NUMBERS);
    laid.scales = aligned_alloc(64, blocks * sizeof *laid.scales);
    laid.starts = aligned_alloc(64, blocks * sizeof *laid.starts);
    laid.blocks = laid.numbers && laid.scales && laid.starts ? blocks : 0;
    return laid.blocks != 0;
}

/* Eight scales of each of two blocks that are `next` bytes apart */
LANES __m512 scales_of(enum repacked type, const uint8_t *x, size_t next)
{
    if (type != REPACKED_MXFP4)
        return _mm512_cvtph_ps(_mm256_inserti128_si256(_mm256_castsi128_si256(
            _mm_loadu_si128((const __m128i *)x)), _mm_loadu_si128((const __m128i *)(x + next)), 1));
    /* exponents, less one; the smallest two have no normal float */
    const __m512i powers = _mm512_cvtepu8_epi32(_mm_unpacklo_epi64(
        _mm_loadl_epi64((const __m128i *)x), _mm_loadl_epi64((const __m128i *)(x + next))));
    return _mm512_castsi512_ps(_mm512_mask_sllv_epi32(
        _mm512_slli_epi32(_mm512_sub_epi32(powers, _mm512_set1_epi32(1)), 23),
        _mm512_cmplt_epi32_mask(powers, _mm512_set1_epi32(2)), _mm512_set1_epi32(0x00200000), powers));
}

/* A panel's blocks: those of two times eight columns that are `next` bytes apart */
LANES void unpack(enum repacked type, int64_t blocks, const uint8_t *x, size_t next, int lift,
                  int8_t *panel, float *scales)
{
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1)), low = _mm512_set1_epi8(15);
    const __m512i values = _mm512_add_epi8(_mm512_set1_epi8((char)lift), _mm512_broadcast_i32x4(
        _mm_loadu_si128((const __m128i *)layouts[type].values)));
    int64_t block;
    int half;
    for (block = 0; block < blocks; block++, x += layouts[type].bytes, scales += COLUMNS) {
        __m512i *to = (__m512i *)(void *)(panel + block * PANEL);
        _mm512_store_ps(scales, scales_of(type, x, next));
        for (half = 0; half < 2; half++) {
            const uint8_t *from = x + layouts[type].start + 64 * half;
            const __m512i a = _mm512_loadu_si512(from), b = _mm512_loadu_si512(from + next);
            const __m512i four = _mm512_permutex2var_epi32(a, even, b);
            const __m512i more = _mm512_permutex2var_epi32(a, odd, b);
            to[2 * half] = _mm512_shuffle_epi8(values, _mm512_and_si512(four, low));
            to[2 * half + 1] = _mm512_shuffle_epi8(values, _mm512_and_si512(more, low));
            to[2 * half + 4] = _mm512_shuffle_epi8(
                values, _mm512_and_si512(_mm512_srli_epi16(four, 4), low));
            to[2 * half + 5] = _mm512_shuffle_epi8(
                values, _mm512_and_si512(_mm512_srli_epi16(more, 4), low));
        }
    }
}

/* Fills `laid` with rows that lie in fours; what a group has beyond `rows` is zero */
WIDE static void lay_out(int64_t blocks, const uint8_t *y, int rows, int group)
{
    const int64_t groups = (rows + group - 1) / group, all = blocks * groups * group;
    int64_t block;
    int first, row, part;
    if (rows % group) {
        memset(laid.numbers, 0, all * NUMBERS);
        memset(laid.scales, 0, all * sizeof *laid.scales);
        memset(laid.starts, 0, all * sizeof *laid.starts);
    }
    for (first = 0; first < rows; first += 4)
        for (block = 0; block < blocks; block++) {
            const uint8_t *from = y + (first / 4 * blocks + block) * IN_FOURS;
            const int64_t slice = block / SLICE * SLICE;
            const int64_t deep = blocks - slice < SLICE ? blocks - slice : SLICE;
            const int64_t at = (slice * groups + first / group * deep + block - slice) * group
                + first % group;
            _mm_storeu_ps(laid.scales + at, _mm_cvtph_ps(_mm_loadl_epi64((const __m128i *)from)));
            for (row = 0; row < 4; row++) {
                int8_t *to = laid.numbers + (at + row) * NUMBERS;
                __m256i by_eight;
                __m128i by_two;
                for (part = 0; part < 4; part++)
                    memcpy(to + 8 * part, from + 8 + 32 * part + 8 * row, 8);
                /* sums of bytes that 128 has made unsigned */
                by_eight = _mm256_sad_epu8(
                    _mm256_xor_si256(load((const uint8_t *)to), _mm256_set1_epi8((char)0x80)),
                    _mm256_setzero_si256());
                by_two = _mm_add_epi64(_mm256_castsi256_si128(by_eight),
                                       _mm256_extracti128_si256(by_eight, 1));
                laid.starts[at + row] = -LIFT * (int)(
                    _mm_cvtsi128_si64(by_two) + _mm_extract_epi64(by_two, 1) - NUMBERS * 128);
            }
        }
}

/* Eight rows, whose blocks begin at `at`, by a panel */
LANES void eight_rows(int64_t blocks, int64_t at, int panel, float *to)
{
    const int8_t *w = panels[panel], *a = laid.numbers + at * NUMBERS;
    const float *of_w = panel_scales[panel], *of_a = laid.scales + at;
    const int32_t *starts = laid.starts + at;
    __m512 sum[8];
    int64_t block;
    int row, four;
    UNROLLED
    for (row = 0; row < 8; row++)
        sum[row] = _mm512_load_ps(to + row * COLUMNS);
    for (block = 0; block < blocks; block++, w += PANEL, a += 8 * NUMBERS, of_w += COLUMNS, of_a += 8,
         starts += 8) {
        const __m512 theirs = _mm512_load_ps(of_w);
        __m512i whole[8];
        UNROLLED
        for (row = 0; row < 8; row++)
            whole[row] = _mm512_set1_epi32(starts[row]);
        UNROLLED
        for (four = 0; four < 8; four++) {
            const __m512i weights = _mm512_load_si512(w + 64 * four);
            UNROLLED
            for (row = 0; row < 8; row++) {
                int32_t numbers;
                memcpy(&numbers, a + row * NUMBERS + 4 * four, sizeof numbers);
                whole[row] = _mm512_dpbusd_epi32(whole[row], weights, _mm512_set1_epi32(numbers));
            }
        }
        UNROLLED
        for (row = 0; row < 8; row++)
            sum[row] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(whole[row]),
                                       _mm512_mul_ps(theirs, _mm512_set1_ps(of_a[row])), sum[row]);
    }
    UNROLLED
    for (row = 0; row < 8; row++)
        _mm512_store_ps(to + row * COLUMNS, sum[row]);
}

/* Tiles of AMX: 16 rows of 64 bytes. In C they are for tests on other processors (TILE_MODEL), and for
   compilers that do not know them, where they are not used. */
#ifdef __clang__
#define KNOWS_TILES (__clang_major__ >= 12)
#else
#define KNOWS_TILES (__GNUC__ >= 11)
#endif
#if defined(TILE_MODEL) || !KNOWS_TILES

#define AMX WIDE
#define TILE_ZERO(T) memset(model[T], 0, sizeof model[T])
#define TILE_LOAD(T, FROM, APART) model_load(T, FROM, APART)
#define TILE_STORE(T, TO) memcpy(TO, model[T], sizeof model[T])
#define TILE_PRODUCT(T, A, B) model_product(T, A, B)
#define TILES_BEGIN(SHAPE) (void)(SHAPE)
#define TILES_END() (void)0

static _Thread_local int32_t model[8][16][16];

static void model_load(int tile, const int8_t *from, int apart)
{
    int row;
    for (row = 0; row < (apart == NUMBERS ? 16 : 8); row++)
        memcpy(model[tile][row], from + row * apart, apart);
}

static void model_product(int to, int a, int b)
{
    int row, column, k, i;
    for (row = 0; row < 16; row++)
        for (column = 0; column < 16; column++)
            for (k = 0; k < 8; k++)
                for (i = 0; i < 4; i++)
                    model[to][row][column] += ((const int8_t *)&model[a][row][k])[i]
                        * ((const int8_t *)&model[b][k][column])[i];
}

static bool has_amx(void)
{
#ifdef TILE_MODEL
    return true;
#else
    return false;
#endif
}

#else

#define AMX __attribute__((target(WIDE_FLAGS ",amx-tile,amx-int8")))
#define TILE_ZERO(T) _tile_zero(T)
#define TILE_LOAD(T, FROM, APART) _tile_loadd(T, FROM, APART)
#define TILE_STORE(T, TO) _tile_stored(T, TO, 64)
#define TILE_PRODUCT(T, A, B) _tile_dpbssd(T, A, B)
#define TILES_BEGIN(SHAPE) _tile_loadconfig(SHAPE)
#define TILES_END() _tile_release()

/* Whether the processor has tiles of bytes and the system lets this process use them */
static bool has_amx(void)
{
#if defined(__linux__) && defined(SYS_arch_prctl)
    enum { REQUEST = 0x1023, TILE_DATA = 18, AMX_TILE = 1 << 24, AMX_INT8 = 1 << 25 };
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & AMX_TILE) && (d & AMX_INT8)
        && syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
#else
    return false;
#endif
}

#endif

/* Adds a tile of whole sums to 16 rows of a panel */
LANES void add(const int32_t *whole, const float *of_w, const float *of_a, float *to)
{
    const __m512 theirs = _mm512_load_ps(of_w);
    int row;
    IN_SIXTEENS
    for (row = 0; row < 16; row++)
        _mm512_store_ps(to + COLUMNS * row, _mm512_fmadd_ps(
            _mm512_cvtepi32_ps(_mm512_load_si512(whole + 16 * row)),
            _mm512_mul_ps(theirs, _mm512_set1_ps(of_a[row])), _mm512_load_ps(to + COLUMNS * row)));
}

/* 32 rows by two panels: four tiles by two loads each way. They are stored together before any is added:
   one by one, loads would wait for the stores before them. */
AMX static inline __attribute__((always_inline))
void four_tiles(int64_t blocks, int64_t at, int panel, float *to)
{
    static _Thread_local int32_t whole[4][256] ALIGNED;
    const int8_t *w = panels[panel], *v = panels[panel + 1];
    const int8_t *a = laid.numbers + at * NUMBERS;
    const float *of_w = panel_scales[panel], *of_v = panel_scales[panel + 1], *of_a = laid.scales + at;
    float *next = to + MOST * COLUMNS;
    for (; blocks; blocks--, a += 32 * NUMBERS, of_a += 32, w += PANEL, v += PANEL, of_w += COLUMNS,
         of_v += COLUMNS) {
        TILE_LOAD(4, a, NUMBERS); TILE_LOAD(5, w, 64);
        TILE_LOAD(6, a + 16 * NUMBERS, NUMBERS); TILE_LOAD(7, v, 64);
        TILE_ZERO(0); TILE_ZERO(1); TILE_ZERO(2); TILE_ZERO(3);
        TILE_PRODUCT(0, 4, 5); TILE_PRODUCT(1, 4, 7); TILE_PRODUCT(2, 6, 5); TILE_PRODUCT(3, 6, 7);
        TILE_STORE(0, whole[0]); TILE_STORE(1, whole[1]);
        TILE_STORE(2, whole[2]); TILE_STORE(3, whole[3]);
        add(whole[0], of_w, of_a, to);
        add(whole[1], of_v, of_a, next);
        add(whole[2], of_w, of_a + 16, to + 16 * COLUMNS);
        add(whole[3], of_v, of_a + 16, next + 16 * COLUMNS);
    }
}

WIDE static void by_vnni(int wide, int64_t groups, int64_t blocks, int64_t at)
{
    int64_t group;
    int panel;
    for (panel = 0; panel < wide; panel++)
        for (group = 0; group < groups; group++)
            eight_rows(blocks, at + group * blocks * 8, panel, sums[panel] + group * 8 * COLUMNS);
}

AMX static void by_tiles(int wide, int64_t groups, int64_t blocks, int64_t at)
{
    /* 4, 6: rows, of 32 bytes; 5, 7: columns, eight rows of 64 */
    static const struct { uint8_t palette, first, zero[14]; uint16_t bytes[16]; uint8_t rows[16]; } shape
        = {1, 0, {0}, {64, 64, 64, 64, 32, 64, 32, 64}, {16, 16, 16, 16, 16, 8, 16, 8}};
    int64_t group;
    int panel;
    TILES_BEGIN(&shape);
    for (panel = 0; panel < wide; panel += 2)
        for (group = 0; group < groups; group++)
            four_tiles(blocks, at + group * blocks * 32, panel, sums[panel] + group * 32 * COLUMNS);
    TILES_END();
}

/* Up to MOST rows by `weights` columns, a multiple of 16, by tiles of 32; false: no memory */
WIDE static bool rows_by_columns(enum repacked type, int64_t blocks, float *to, size_t apart,
                                 const uint8_t *x, const uint8_t *y, int rows, int weights, bool amx)
{
    const int group = amx ? 32 : 8, bytes = layouts[type].bytes;
    const int64_t groups = (rows + group - 1) / group;
    int64_t block;
    int column, panel, row;
    if (!has_room(blocks * groups * group))
        return false;
    lay_out(blocks, y, rows, group);
    for (column = 0; column < weights; column += PANELS * COLUMNS) {
        const int left = (weights - column) / COLUMNS, wide = left < PANELS ? left : PANELS;
        for (panel = 0; panel < wide; panel++)
            memset(sums[panel], 0, groups * group * COLUMNS * sizeof(float));
        for (block = 0; block < blocks; block += SLICE) {
            const int64_t deep = blocks - block < SLICE ? blocks - block : SLICE;
            for (panel = 0; panel < wide; panel++) {
                const uint8_t *from = x + ((column / 8 + 2 * panel) * blocks + block) * bytes;
                unpack(type, deep, from, blocks * bytes, amx ? 0 : LIFT, panels[panel],
                       panel_scales[panel]);
            }
            (amx ? by_tiles : by_vnni)(wide, groups, deep, block * groups * group);
        }
        for (row = 0; row < rows; row++)
            for (panel = 0; panel < wide; panel++)
                _mm512_storeu_ps(to + row * apart + column + panel * COLUMNS,
                                 _mm512_load_ps(sums[panel] + row * COLUMNS));
    }
    return true;
}

/* The columns that were taken */
static int some_columns(enum repacked type, int length, float *to, size_t apart, const uint8_t *x,
                        const uint8_t *y, int rows, int weights, bool amx)
{
    const int64_t blocks = length / NUMBERS;
    const int columns = weights - weights % (amx ? 2 * COLUMNS : COLUMNS);
    int row;
    for (row = 0; columns && row < rows; row += MOST)
        if (!rows_by_columns(type, blocks, to + row * apart, apart, x, y + row * blocks * Q8_0_BYTES,
                             rows - row < MOST ? rows - row : MOST, columns, amx))
            return 0;
    return columns;
}

int repacked_prompt(enum repacked type, int length, float *to, size_t apart, const void *x,
                    const void *y, int rows, int weights)
{
    const int64_t bytes = length / NUMBERS * layouts[type].bytes / 8;
    int done = 0;
    if (!taken[type] || rows < LEAST)
        return 0;
    if (tiles && rows >= 32)
        done = some_columns(type, length, to, apart, x, y, rows, weights, true);
    return done + some_columns(type, length, to + done, apart, (const uint8_t *)x + done * bytes, y,
                               rows, weights - done, false);
}

void repacked_example(enum repacked type, uint8_t *x, size_t blocks, uint32_t *dice)
{
    const size_t bytes = layouts[type].bytes;
    size_t i, k;
    for (i = 0; i < blocks * bytes; i++)
        x[i] = (uint8_t)roll(dice);
    for (i = 0; i < blocks; i++)
        for (k = 0; k < 8; k++) {
            const uint16_t half = some_scale(dice);
            if (type == REPACKED_MXFP4)
                x[i * bytes + k] = (uint8_t)(120 + half % 16);
            else
                memcpy(x + i * bytes + 2 * k, &half, sizeof half);
        }
}

enum { TRIED = 19 * NUMBERS, TRIED_ROWS = MOST + 36, TRIED_COLUMNS = 48 };

/* Whether a type's products have the bits of llama.cpp's gemm, by tiles or by VNNI */
static bool agree(enum repacked type, bool amx)
{
    static uint8_t x[TRIED_COLUMNS / 8 * TRIED / NUMBERS * REPACKED_BYTES], y[TRIED_ROWS * TRIED / NUMBERS * Q8_0_BYTES];
    static float wanted[TRIED_ROWS * TRIED_COLUMNS], to[TRIED_ROWS * TRIED_COLUMNS];
    static const int counts[] = {8, 12, 20, 32, 36, 64, TRIED_ROWS};
    uint32_t dice = 1;
    size_t i, k;
    repacked_example(type, x, TRIED_COLUMNS / 8 * TRIED / NUMBERS, &dice);
    for (i = 0; i < sizeof y; i++)
        y[i] = (uint8_t)(roll(&dice) % 255 - 127);
    for (i = 0; i < sizeof y; i += IN_FOURS)
        for (k = 0; k < 4; k++) {
            const uint16_t half = some_scale(&dice);
            memcpy(y + i + 2 * k, &half, sizeof half);
        }
    for (i = 0; i < sizeof counts / sizeof *counts; i++) {
        const int rows = counts[i], columns = TRIED_COLUMNS - (amx ? TRIED_COLUMNS % 32 : 0);
        memset(to, 0, sizeof to);
        memset(wanted, 0, sizeof wanted);
        their_gemms[type](TRIED, wanted, TRIED_COLUMNS, x, y, rows, columns);
        if (some_columns(type, TRIED, to, TRIED_COLUMNS, x, y, rows, columns, amx) != columns
            || memcmp(to, wanted, sizeof to) != 0)
            return false;
    }
    return true;
}

unsigned repacked_prompts(product *const gemms[REPACKED_TYPES], bool wanted)
{
    const bool able = wanted && has_wide_vnni();
    unsigned found = 0;
    int type;
    memcpy(their_gemms, gemms, sizeof their_gemms);
    tiles = able && has_amx();
    for (type = 0; type < REPACKED_TYPES; type++) {
        taken[type] = able && gemms[type] && agree(type, false);
        tiles = tiles && (!taken[type] || agree(type, true));
        found |= (unsigned)taken[type] << type;
    }
    tiles = tiles && found;
    return found | (unsigned)tiles << REPACKED_TYPES;
}

#else

int repacked_prompt(enum repacked type, int length, float *to, size_t apart, const void *x,
                    const void *y, int rows, int weights)
{
    (void)type, (void)length, (void)to, (void)apart, (void)x, (void)y, (void)rows, (void)weights;
    return 0;
}

unsigned repacked_prompts(product *const gemms[REPACKED_TYPES], bool wanted)
{
    (void)wanted;
    memcpy(their_gemms, gemms, sizeof their_gemms);
    return 0;
}

#endif

static void prompt(enum repacked type, int length, float *to, size_t apart, const void *x,
                   const void *y, int rows, int weights)
{
    const int done = repacked_prompt(type, length, to, apart, x, y, rows, weights);
    const int64_t bytes = length / 32 * layouts[type].bytes / 8;
    if (done < weights)
        their_gemms[type](length, to + done, apart, (const uint8_t *)x + done * bytes, y, rows,
                          weights - done);
}

/* In place of llama.cpp's own, as in short_runs.c */
void ggml_gemm_iq4_nl_8x8_q8_0(int length, float *to, size_t apart, const void *x, const void *y,
                               int rows, int weights)
{
    prompt(REPACKED_IQ4_NL, length, to, apart, x, y, rows, weights);
}

void ggml_gemm_mxfp4_8x8_q8_0(int length, float *to, size_t apart, const void *x, const void *y,
                              int rows, int weights)
{
    prompt(REPACKED_MXFP4, length, to, apart, x, y, rows, weights);
}
