/* Weights in blocks, for AVX2. See products_x86.h. */

#define TARGET AVX2
#define TABLE avx2_products
#define NEEDS has_avx2()
#include "products_x86.h"
