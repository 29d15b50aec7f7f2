/* Weights in blocks, for every aarch64 processor. See products_neon.h. */

/* Two products of numbers from -128 to 127 by -127 to 127 fit 16 bits. */
#define DOTS(sums, a, b) vpadalq_s16(sums, vmlal_high_s8(                                             \
    vmull_s8(vget_low_s8(a), vget_low_s8(b)), a, b))
#define TARGET
#define ZIPPED false
#define TABLE neon_products
#define NEEDS true
#include "products_neon.h"
