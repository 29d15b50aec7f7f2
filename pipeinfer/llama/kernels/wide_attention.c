/* Parts of attention over a cache of q8_0 with VNNI on registers of 512 bits, for many pairs of a head and a
   row that see the same cells. In products with keys a lane is a cell, and the eight float lanes of a
   single product are registers of their own, as in wide_prompts.c: the operations and their order are
   those of short_attention.c. */

#include "attention.h"

#ifdef X86

struct keys { int8_t numbers[MOST][SUMS][64]; int32_t starts[MOST][SUMS][COLUMNS]; };

/* One or two pairs by COLUMNS cells from `first` on */
LANES void pairs_by_keys(int count, int blocks, int pair, int first, const struct keys *keys,
                         const struct space *own, float scale, float (*scores)[CELLS])
{
    __m512 sums[2][SUMS];
    int block, sum, i;
    UNROLLED
    for (i = 0; i < count; i++)
        UNROLLED
        for (sum = 0; sum < SUMS; sum++)
            sums[i][sum] = _mm512_setzero_ps();
    for (block = 0; block < blocks; block++) {
        const __m512 theirs = _mm512_loadu_ps(&own->key_scales[block][first]);
        __m512 by[2];
        UNROLLED
        for (i = 0; i < count; i++)
            by[i] = _mm512_mul_ps(_mm512_set1_ps(own->query_scales[pair + i][block]), theirs);
        UNROLLED
        for (sum = 0; sum < SUMS; sum++)
            UNROLLED
            for (i = 0; i < count; i++)
                sums[i][sum] = _mm512_fmadd_ps(by[i], _mm512_cvtepi32_ps(_mm512_dpbusd_epi32(
                    _mm512_load_si512(keys->starts[block][sum]),
                    repeated(&own->lifted[pair + i][PART * block + 4 * sum]),
                    _mm512_load_si512(keys->numbers[block][sum]))), sums[i][sum]);
    }
    UNROLLED
    for (i = 0; i < count; i++)
        _mm512_storeu_ps(scores[pair + i] + first,
                         _mm512_mul_ps(sum_of_eight(sums[i]), _mm512_set1_ps(scale)));
}

WIDE void wide_scores(int blocks, const uint8_t *keys, size_t apart, const int64_t *cells,
                      const struct space *own, int pairs, float scale, float (*scores)[CELLS])
{
    struct keys unpacked ALIGNED;
    int first, block, cell, pair;
    for (first = 0; first < CELLS; first += COLUMNS) {
        for (block = 0; block < blocks; block++) {
            uint8_t columns[COLUMNS][PART] ALIGNED;
            for (cell = 0; cell < COLUMNS; cell++)
                put(columns[cell], load(keys + cells[first + cell] * apart + block * Q8_0_BYTES + 2));
            transpose(columns[0], PART, unpacked.numbers[block]);
            lift(unpacked.numbers[block], unpacked.starts[block]);
        }
        for (pair = 0; pair + 2 <= pairs; pair += 2)
            if (blocks == 2)
                pairs_by_keys(2, 2, pair, first, &unpacked, own, scale, scores);
            else if (blocks == 4)
                pairs_by_keys(2, 4, pair, first, &unpacked, own, scale, scores);
            else
                pairs_by_keys(2, blocks, pair, first, &unpacked, own, scale, scores);
        if (pair < pairs)
            pairs_by_keys(1, blocks, pair, first, &unpacked, own, scale, scores);
    }
}

/* four_powers of short_attention.c */
LANES __m256 eight_powers(__m256 x)
{
    const __m512d wide = _mm512_cvtps_pd(x), by = _mm512_set1_pd(POWER_BY);
    const __m512d shift = _mm512_set1_pd(POWER_SHIFT);
    const __m512d shifted = _mm512_fmadd_pd(wide, by, shift);
    const __m512i whole = _mm512_castpd_si512(shifted);
    const __m512d rest = _mm512_fmsub_pd(wide, by, _mm512_sub_pd(shifted, shift));
    const __m512i power = _mm512_add_epi64(_mm512_slli_epi64(whole, 47), _mm512_i64gather_epi64(
        _mm512_and_si512(whole, _mm512_set1_epi64(31)), (const long long *)POWERS, 8));
    const __m512d upper = _mm512_fmadd_pd(_mm512_set1_pd(POWER_3), rest,
                                          _mm512_set1_pd(POWER_2));
    const __m512d lower = _mm512_fmadd_pd(_mm512_set1_pd(POWER_1), rest,
                                          _mm512_set1_pd(1.0));
    return _mm512_cvtpd_ps(_mm512_mul_pd(
        _mm512_fmadd_pd(upper, _mm512_mul_pd(rest, rest), lower), _mm512_castsi512_pd(power)));
}

WIDE void wide_powers(float *x)
{
    int i;
    for (i = 0; i < CELLS; i += 8)
        _mm256_storeu_ps(x + i, eight_powers(_mm256_loadu_ps(x + i)));
}

WIDE void wide_values(int width, const float *values, const float *const *weights,
                      float *const *sums, float *const *totals)
{
    int at, cell, pair, part;
    for (at = 0; at < width; at += 64) {
        __m512 own[FOUR][4];
        UNROLLED
        for (pair = 0; pair < FOUR; pair++)
            UNROLLED
            for (part = 0; part < 4; part++)
                own[pair][part] = _mm512_load_ps(sums[pair] + at + 16 * part);
        UNROLLED
        for (cell = 0; cell < CELLS; cell++) {
            const float *of_cell = values + cell * width + at;
            __m512 weight[FOUR];
            UNROLLED
            for (pair = 0; pair < FOUR; pair++)
                weight[pair] = _mm512_set1_ps(weights[pair][cell]);
            UNROLLED
            for (part = 0; part < 4; part++) {
                const __m512 some = _mm512_load_ps(of_cell + 16 * part);
                UNROLLED
                for (pair = 0; pair < FOUR; pair++)
                    own[pair][part] = _mm512_fmadd_ps(some, weight[pair], own[pair][part]);
            }
        }
        UNROLLED
        for (pair = 0; pair < FOUR; pair++)
            UNROLLED
            for (part = 0; part < 4; part++)
                _mm512_store_ps(sums[pair] + at + 16 * part, own[pair][part]);
    }
    UNROLLED
    for (pair = 0; pair < FOUR; pair++) {
        float total = *totals[pair];
        for (cell = 0; cell < CELLS; cell++)
            total += weights[pair][cell];
        *totals[pair] = total;
    }
}

#endif
