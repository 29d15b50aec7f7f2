/* Weights in blocks, for processors with AVX-VNNI. See products_x86.h. */

#include "avx2.h"

#ifdef X86
#if defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11

#include <cpuid.h>

static bool has_avx_vnni(void)
{
    unsigned a = 0, b, c, d;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && a >> 4 & 1;
}

#define TARGET __attribute__((target("avx2,fma,f16c,avxvnni")))
#define FOURS(sums, a, b) _mm256_dpbusd_avx_epi32(sums, a, b)
#define PAIRS(sums, a, b) _mm256_dpwssd_avx_epi32(sums, a, b)
#define TABLE avx_vnni_products
#define NEEDS has_avx_vnni()
#include "products_x86.h"

#else /* an older compiler */

const struct kernel *avx_vnni_products(int type)
{
    (void)type;
    return NULL;
}

#endif
#endif
