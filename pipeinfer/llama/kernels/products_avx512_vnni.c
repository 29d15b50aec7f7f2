/* Weights in blocks, for processors with AVX-512 VNNI: registers of AVX2, of which there are 32. See
   products_x86.h. */

#define TARGET __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")))
#define FOURS(sums, a, b) _mm256_dpbusd_epi32(sums, a, b)
#define PAIRS(sums, a, b) _mm256_dpwssd_epi32(sums, a, b)
#define TABLE avx512_vnni_products
#define NEEDS __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vl")              \
    && __builtin_cpu_supports("avx512bw")
#include "products_x86.h"
