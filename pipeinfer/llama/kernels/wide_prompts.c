/* Products of prompts with weights in the layout of their file, with VNNI on registers of 512 bits.

   A single row's kernel (products_x86.h) has eight float lanes for an output: lane i sums the products of
   numbers 4i to 4i + 3 of every 32, block after block. Here a lane of a register is a row of weights, a
   column of the product, and those eight sums are eight registers. Whole sums are exact in any order,
   and each float sum is added up in the order of the single row, so the bits are the same. What makes it
   faster is that weights are unpacked once for up to MOST rows, and registers of twice the width. */

#include "wide.h"

#ifdef X86

#include <stdlib.h>

enum { PANELS = 2,    /* taken together by types with blocks of 256 */
       GROUP = 8,     /* rows taken together */
       SUPER = 256,   /* numbers of the larger blocks */
       SLICE = 4,     /* of these in a row that are unpacked at a time */
       DEEP = SLICE * SUPER / PART,
       SCALES = SUMS * SUPER / PART, FALLS = SCALES + 2 * SUMS, REGISTERS = FALLS + SUMS };

/* 256 numbers of a panel by parts of 32, of which a register has four of each column; behind them scales
   of 16 numbers each in 16 registers, and what falls off in 8: twice a column, in 16 bits */
struct super { int8_t parts[REGISTERS][64]; float scale[COLUMNS], fall[COLUMNS]; };

/* 32 numbers of a panel, what the rows' lift adds to their sums, and a type's scale and lowest value */
struct block { int8_t numbers[SUMS][64]; int32_t starts[SUMS][COLUMNS];
               float scale[COLUMNS], other[COLUMNS]; };

static _Thread_local union {
    struct super supers[PANELS][SLICE];
    struct block blocks[DEEP];
} panel ALIGNED;
static _Thread_local float sums[PANELS][WIDE_ROWS][SUMS][COLUMNS] ALIGNED;
static _Thread_local float least[PANELS][WIDE_ROWS][SUMS / 2][COLUMNS] ALIGNED;

/* The present rows of a type with blocks of 32, [row][block]: numbers, to which 128 is added, since VNNI
   needs one side unsigned; their scales; their sums. Grows to the longest that its thread has seen. */
static _Thread_local struct { uint8_t *numbers; float *scales, *others; size_t blocks; } laid;

static bool has_room(size_t blocks)
{
    if (laid.blocks >= blocks)
        return true;
    free(laid.numbers), free(laid.scales), free(laid.others);
    laid.numbers = malloc(blocks * PART);
    laid.scales = malloc(blocks * sizeof *laid.scales);
    laid.others = malloc(blocks * sizeof *laid.others);
    laid.blocks = laid.numbers && laid.scales && laid.others ? blocks : 0;
    return laid.blocks != 0;
}

/* A number of 8 bits in both halves of each 32 */
LANES __m512i twice(__m128i bytes)
{
    const __m512i wide = _mm512_cvtepi8_epi32(bytes);
    return _mm512_mask_blend_epi16(0xaaaaaaaa, wide, _mm512_slli_epi32(wide, 16));
}

/* A block of Q4_K or Q5_K: numbers, scales, lowest values */
LANES void unpack_k(bool fifth, const uint8_t *x, uint8_t *to)
{
    const __m256i upper = fifth ? load(x + 16) : _mm256_setzero_si256();
    const __m128i both = _mm256_cvtepi16_epi8(scales_of_k(x + 4));
    int part;
    UNROLLED
    for (part = 0; part < 4; part++) {
        __m256i l, h;
        numbers_of_k(fifth, part, load(x + (fifth ? 48 : 16) + PART * part), upper, &l, &h);
        put(to + 2 * PART * part, l);
        put(to + 2 * PART * part + PART, h);
    }
    _mm512_storeu_si512(to + SUPER, twice(_mm_unpacklo_epi8(both, both)));
    put(to + SUPER + 64, _mm512_castsi512_si256(twice(_mm_srli_si128(both, 8))));
}

/* The same of Q6_K; what falls off are its scales by the offset of its numbers. */
LANES void unpack_q6_k(const uint8_t *x, uint8_t *to)
{
    const __m128i scales = _mm_loadu_si128((const __m128i *)(x + 192));
    int half, part;
    UNROLLED
    for (half = 0; half < 2; half++) {
        const __m256i upper = load(x + 128 + PART * half);
        UNROLLED
        for (part = 0; part < 4; part++)
            put(to + PART * (4 * half + part), numbers_of_q6_k(part, x + 64 * half, upper));
    }
    _mm512_storeu_si512(to + SUPER, twice(scales));
    put(to + SUPER + 64, _mm256_mullo_epi16(_mm256_cvtepi8_epi16(scales), _mm256_set1_epi16(-32)));
}

WIDE static void unpack_super(int type, const uint8_t *x, size_t x_apart, struct super *to)
{
    uint8_t columns[COLUMNS][SUPER + 3 * PART] ALIGNED;
    int column, part;
    for (column = 0; column < COLUMNS; column++, x += x_apart) {
        if (type == Q6_K)
            unpack_q6_k(x, columns[column]);
        else
            unpack_k(type == Q5_K, x, columns[column]);
        to->scale[column] = one(type == Q6_K ? x + 208 : x);
        to->fall[column] = type == Q6_K ? 0 : one(x + 2);
    }
    for (part = 0; part < REGISTERS / SUMS; part++)
        transpose(columns[0] + PART * part, sizeof columns[0], to->parts + SUMS * part);
}

/* What the lowest values of a block take from rows' sums: Q4_K's by four lanes, Q5_K's by one */
LANES void add_least(int type, int panels, const struct super *const *of, const uint8_t *const *y, int row)
{
    float theirs;
    int p, i, sum;
    if (type == Q6_K)
        return;
    UNROLLED
    for (i = 0; i < GROUP; i++) {
        memcpy(&theirs, y[i], sizeof theirs);
        UNROLLED
        for (p = 0; p < panels; p++) {
            const __m512 by = _mm512_mul_ps(_mm512_set1_ps(-theirs), _mm512_load_ps(of[p]->fall));
            __m512i whole = _mm512_setzero_si512();
            UNROLLED
            for (sum = 0; sum < SUMS; sum++) {
                whole = _mm512_dpwssd_epi32(whole, _mm512_load_si512(of[p]->parts[FALLS + sum]),
                                            repeated(y[i] + 4 + SUPER + 4 * sum));
                if (type == Q4_K ? sum % 2 : sum == SUMS - 1) {
                    float *to = least[p][row + i][type == Q4_K ? sum / 2 : 0];
                    _mm512_store_ps(to, _mm512_fmadd_ps(by, _mm512_cvtepi32_ps(whole), _mm512_load_ps(to)));
                    whole = _mm512_setzero_si512();
                }
            }
        }
    }
}

/* Eight rows from `row` on, whose blocks begin at `from`, by one or two panels */
LANES void rows_by_supers(int type, int panels, int64_t blocks, const uint8_t *from, size_t y_apart, int row)
{
    int64_t block;
    for (block = 0; block < blocks; block++, from += Q8_K_BYTES) {
        const struct super *of[PANELS] = {&panel.supers[0][block], &panel.supers[1][block]};
        const uint8_t *y[GROUP];
        __m512 by[PANELS][GROUP];
        int sum, part, i, p;
        UNROLLED
        for (i = 0; i < GROUP; i++) {
            float theirs;
            y[i] = from + i * y_apart;
            memcpy(&theirs, y[i], sizeof theirs);
            UNROLLED
            for (p = 0; p < panels; p++)
                by[p][i] = _mm512_mul_ps(_mm512_set1_ps(theirs), _mm512_load_ps(of[p]->scale));
        }
        for (sum = 0; sum < SUMS; sum++) {
            __m512i whole[PANELS][GROUP];
            UNROLLED
            for (i = 0; i < GROUP; i++)
                UNROLLED
                for (p = 0; p < panels; p++)
                    whole[p][i] = type != Q6_K ? _mm512_setzero_si512() : _mm512_dpwssd_epi32(
                        _mm512_setzero_si512(), _mm512_load_si512(of[p]->parts[FALLS + sum]),
                        repeated(y[i] + 4 + SUPER + 4 * sum));
            UNROLLED  /* else the compiler copies every sum each time */
            for (part = 0; part < SUPER / PART; part++) {
                const int scale = SCALES + 2 * part + (sum >= SUMS / 2), at = 4 + PART * part + 4 * sum;
                __m512i w[PANELS], scales[PANELS];
                UNROLLED
                for (p = 0; p < panels; p++) {
                    w[p] = _mm512_load_si512(of[p]->parts[SUMS * part + sum]);
                    scales[p] = _mm512_load_si512(of[p]->parts[scale]);
                }
                UNROLLED
                for (i = 0; i < GROUP; i++) {
                    const __m512i four = repeated(y[i] + at);
                    UNROLLED
                    for (p = 0; p < panels; p++)
                        whole[p][i] = _mm512_dpwssd_epi32(
                            whole[p][i], _mm512_maddubs_epi16(w[p], four), scales[p]);
                }
            }
            UNROLLED
            for (i = 0; i < GROUP; i++)
                UNROLLED
                for (p = 0; p < panels; p++) {
                    float *to = sums[p][row + i][sum];
                    _mm512_store_ps(to, _mm512_fmadd_ps(
                        by[p][i], _mm512_cvtepi32_ps(whole[p][i]), _mm512_load_ps(to)));
                }
        }
        add_least(type, panels, of, y, row);
    }
}

/* All rows of a type with blocks of 256 by one or two panels */
LANES void by_supers(int type, int panels, int64_t blocks, const uint8_t *x, size_t x_apart, size_t bytes,
                     const uint8_t *y, size_t y_apart, int rows)
{
    int64_t slice, block;
    int p, row;
    for (slice = 0; slice < blocks; slice += SLICE) {
        const int64_t deep = blocks - slice < SLICE ? blocks - slice : SLICE;
        for (p = 0; p < panels; p++)
            for (block = 0; block < deep; block++)
                unpack_super(type, x + p * COLUMNS * x_apart + (slice + block) * bytes, x_apart,
                             &panel.supers[p][block]);
        for (row = 0; row < rows; row += GROUP)
            rows_by_supers(type, panels, deep, y + row * y_apart + slice * Q8_K_BYTES, y_apart, row);
    }
}

/* A block of 32 of each column, signed */
LANES void unpack_block(int type, const uint8_t *x, size_t x_apart, struct block *to)
{
    uint8_t columns[COLUMNS][PART] ALIGNED;
    int column;
    for (column = 0; column < COLUMNS; column++, x += x_apart) {
        put(columns[column],
            type == Q8_0 ? load(x + 2) : type == Q4_1 ? nibbles(x + 4) : _mm256_sub_epi8(
                type == Q4_0 ? nibbles(x + 2) : _mm256_or_si256(nibbles(x + 6), fifth_bits(x + 2)),
                _mm256_set1_epi8(type == Q4_0 ? 8 : 16)));
        to->scale[column] = one(x);
        to->other[column] = type == Q4_1 ? one(x + 2) : 0;
    }
    transpose(columns[0], PART, to->numbers);
    lift(to->numbers, to->starts);
}

/* Two rows from `row` on, whose blocks begin at `from`, by a panel */
LANES void two_rows(int type, int64_t all, int64_t from, int64_t blocks, int row)
{
    __m512 sum[2][SUMS], less[2];
    int64_t block;
    int i, k;
    UNROLLED
    for (i = 0; i < 2; i++) {
        less[i] = _mm512_load_ps(least[0][row + i][0]);
        UNROLLED
        for (k = 0; k < SUMS; k++)
            sum[i][k] = _mm512_load_ps(sums[0][row + i][k]);
    }
    for (block = 0; block < blocks; block++) {
        const struct block *of = &panel.blocks[block];
        const int64_t at[2] = {row * all + from + block, (row + 1) * all + from + block};
        __m512 by[2];
        UNROLLED
        for (i = 0; i < 2; i++) {
            by[i] = _mm512_mul_ps(_mm512_load_ps(of->scale), _mm512_set1_ps(laid.scales[at[i]]));
            if (type == Q4_1)
                less[i] = _mm512_fmadd_ps(_mm512_load_ps(of->other), _mm512_set1_ps(laid.others[at[i]]),
                                          less[i]);
        }
        UNROLLED
        for (k = 0; k < SUMS; k++) {
            __m512i starts = _mm512_load_si512(of->starts[k]), w = _mm512_load_si512(of->numbers[k]);
            __asm__("" : "+v"(starts), "+v"(w)); /* or GCC loads them for each row */
            UNROLLED
            for (i = 0; i < 2; i++)
                sum[i][k] = _mm512_fmadd_ps(by[i], _mm512_cvtepi32_ps(_mm512_dpbusd_epi32(
                    starts, repeated(laid.numbers + PART * at[i] + 4 * k), w)), sum[i][k]);
        }
    }
    UNROLLED
    for (i = 0; i < 2; i++) {
        _mm512_store_ps(least[0][row + i][0], less[i]);
        UNROLLED
        for (k = 0; k < SUMS; k++)
            _mm512_store_ps(sums[0][row + i][k], sum[i][k]);
    }
}

/* All rows of a type with blocks of 32, which `laid` has, by a panel */
LANES void by_blocks(int type, int64_t blocks, const uint8_t *x, size_t x_apart, size_t bytes, int rows)
{
    int64_t slice, block;
    int row;
    for (slice = 0; slice < blocks; slice += DEEP) {
        const int64_t deep = blocks - slice < DEEP ? blocks - slice : DEEP;
        for (block = 0; block < deep; block++)
            unpack_block(type, x + (slice + block) * bytes, x_apart, &panel.blocks[block]);
        for (row = 0; row < rows; row += 2)
            two_rows(type, blocks, slice, deep, row);
    }
}

WIDE static bool lay_out(const struct kernel *kernel, int64_t blocks, const uint8_t *y, size_t y_apart,
                         int rows)
{
    int64_t block;
    int row;
    if (!has_room(blocks * rows))
        return false;
    for (row = 0; row < rows; row++, y += y_apart)
        for (block = 0; block < blocks; block++) {
            const uint8_t *from = y + block * kernel->partner_bytes;
            const int64_t at = row * blocks + block;
            laid.scales[at] = one(from);
            laid.others[at] = kernel->scales > 1 ? one(from + 2) : 0;
            put(laid.numbers + PART * at, _mm256_xor_si256(load(from + 2 * kernel->scales),
                                                           _mm256_set1_epi8((char)0x80)));
        }
    return true;
}

/* The sums of all lanes, in the order of sums_to in avx2.h */
WIDE static void sum_up(int type, int panels, int rows, float *to, int64_t apart)
{
    int p, row, i;
    for (p = 0; p < panels; p++)
        for (row = 0; row < rows; row++) {
            __m512 of[SUMS], low[SUMS / 2];
            UNROLLED
            for (i = 0; i < SUMS; i++)
                of[i] = _mm512_load_ps(sums[p][row][i]);
            UNROLLED
            for (i = 0; i < SUMS / 2; i++)
                low[i] = _mm512_load_ps(least[p][row][i]);
            of[0] = sum_of_eight(of);
            if (type == Q4_K)
                low[0] = _mm512_add_ps(_mm512_add_ps(low[0], low[2]), _mm512_add_ps(low[1], low[3]));
            if (type == Q4_K || type == Q5_K || type == Q4_1)
                of[0] = _mm512_add_ps(of[0], low[0]);
            _mm512_storeu_ps(to + p * COLUMNS + row * apart, of[0]);
        }
}

WIDE static void by_panels(int type, int panels, const struct kernel *kernel, int64_t blocks,
                           const uint8_t *x, size_t x_apart, const uint8_t *y, size_t y_apart, int rows)
{
    const size_t bytes = kernel->bytes;
#define SUPERS(TYPE) case TYPE: panels == 1 ? by_supers(TYPE, 1, blocks, x, x_apart, bytes, y, y_apart, rows) \
                                            : by_supers(TYPE, 2, blocks, x, x_apart, bytes, y, y_apart, rows)
#define BLOCKS(TYPE) case TYPE: by_blocks(TYPE, blocks, x, x_apart, bytes, rows)
    switch (type) {
    SUPERS(Q4_K); break;
    SUPERS(Q5_K); break;
    SUPERS(Q6_K); break;
    BLOCKS(Q4_0); break;
    BLOCKS(Q4_1); break;
    BLOCKS(Q5_0); break;
    BLOCKS(Q8_0);
    }
}

bool wide_knows(int type)
{
    return (type == Q4_0 || type == Q4_1 || type == Q5_0 || type == Q8_0 || type == Q4_K || type == Q5_K
            || type == Q6_K) && has_wide_vnni();
}

WIDE int64_t wide_prompt(int type, const struct kernel *kernel, int64_t blocks, const uint8_t *x,
                         size_t x_apart, int64_t weights, const uint8_t *y, size_t y_apart, int rows,
                         float *to, int64_t apart)
{
    const bool super = kernel->elements == SUPER;
    int64_t column;
    int panels = 1, p;
    if (!super && !lay_out(kernel, blocks, y, y_apart, rows))
        return 0;
    for (column = 0; column + COLUMNS <= weights; column += panels * COLUMNS) {
        panels = super && column + 2 * COLUMNS <= weights ? 2 : 1;
        for (p = 0; p < panels; p++) {
            memset(sums[p], 0, rows * sizeof *sums[p]);
            memset(least[p], 0, rows * sizeof *least[p]);
        }
        by_panels(type, panels, kernel, blocks, x + column * x_apart, x_apart, y, y_apart, rows);
        sum_up(type, panels, rows, to + column, apart);
    }
    return column;
}

#else

bool wide_knows(int type) { (void)type; return false; }

int64_t wide_prompt(int type, const struct kernel *kernel, int64_t blocks, const uint8_t *x,
                    size_t x_apart, int64_t weights, const uint8_t *y, size_t y_apart, int rows,
                    float *to, int64_t apart)
{
    (void)type, (void)kernel, (void)blocks, (void)x, (void)x_apart, (void)weights, (void)y, (void)y_apart,
    (void)rows, (void)to, (void)apart;
    return 0;
}

#endif
