/* The order of a llama.cpp that was compiled for dot products. See products_dotprod.c. */

#define ZIPPED false
#define TABLE dotprod_own_products
#include "products_dotprod.c"
