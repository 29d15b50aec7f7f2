/* What the files about attention share. */

#ifndef PIPEINFER_ATTENTION_H
#define PIPEINFER_ATTENTION_H

#include "wide.h"

#ifdef X86

enum { CELLS = 32,       /* that are taken together */
       PAIRS = 16,       /* of a head and a row, likewise */
       WIDEST = 256,     /* numbers of a head */
       MOST = WIDEST / 32 };

/* What one thread works with; rows of values and sums are as wide as a head */
struct space {
    float sums[PAIRS * WIDEST], values[CELLS * WIDEST], key_scales[MOST][CELLS];
    int8_t query[PAIRS][WIDEST];
    uint8_t lifted[PAIRS][WIDEST]; /* the query with 128 added */
    float query_scales[PAIRS][MOST];
    float total[PAIRS], most[PAIRS];
    int64_t rows[PAIRS], heads[PAIRS]; /* of each pair */
};

/* The same as in short_attention.c for CELLS cells that all pairs see, on registers of 512 bits: products
   of `pairs` queries with keys, of `blocks` blocks; expf of CELLS numbers, all of them at least
   LEAST_POWER; values of cells by the weights of FOUR pairs, `width` a multiple of 64. */
enum { FOUR = 4 };
HIDDEN void wide_scores(int blocks, const uint8_t *keys, size_t apart, const int64_t *cells,
                        const struct space *own, int pairs, float scale, float (*scores)[CELLS]);
HIDDEN void wide_powers(float *x);
HIDDEN void wide_values(int width, const float *values, const float *const *weights,
                        float *const *sums, float *const *totals);

/* 2^(i / 32) as bits, less i * 2^47 */
static const int64_t POWERS[32] = {
    0x3ff0000000000000, 0x3fefd9b0d3158574, 0x3fefb5586cf9890f, 0x3fef9301d0125b51,
    0x3fef72b83c7d517b, 0x3fef54873168b9aa, 0x3fef387a6e756238, 0x3fef1e9df51fdee1,
    0x3fef06fe0a31b715, 0x3feef1a7373aa9cb, 0x3feedea64c123422, 0x3feece086061892d,
    0x3feebfdad5362a27, 0x3feeb42b569d4f82, 0x3feeab07dd485429, 0x3feea47eb03a5585,
    0x3feea09e667f3bcd, 0x3fee9f75e8ec5f74, 0x3feea11473eb0187, 0x3feea589994cce13,
    0x3feeace5422aa0db, 0x3feeb737b0cdc5e5, 0x3feec49182a3f090, 0x3feed503b23e255d,
    0x3feee89f995ad3ad, 0x3feeff76f2fb5e47, 0x3fef199bdd85529c, 0x3fef3720dcef9069,
    0x3fef5818dcfba487, 0x3fef7c97337b9b5f, 0x3fefa4afa2a490da, 0x3fefd0765b6e4540};
/* expf as glibc computes it since 2.28 with FMA, and musl: a polynomial of x * 32 / log 2 less the nearest
   whole number, in doubles */
#define POWER_BY 0x1.71547652b82fep+5
#define POWER_SHIFT 0x1.8p+52
#define POWER_3 0x1.c6af84b912394p-20
#define POWER_2 0x1.ebfce50fac4f3p-13
#define POWER_1 0x1.62e42ff0c52d6p-6
static const float LEAST_POWER = -87.0f; /* below it expf has cases of their own */

#endif
#endif
