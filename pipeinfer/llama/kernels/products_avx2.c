/* Weights in blocks, for AVX2. See products.h. */

#define TARGET AVX2
#define TABLE avx2_products
#define NEEDS true
#include "products.h"
