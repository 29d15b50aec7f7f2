/* Weights in blocks, for aarch64 processors with dot products. See products_neon.h. The prebuilt
   llama.cpp does without these; products_dotprod_own.c has the order of one that was compiled for them. */

#include "neon.h"

#ifndef TABLE
#define ZIPPED true
#define TABLE dotprod_products
#endif

#ifdef ARM
#if defined(__clang__) ? __clang_major__ >= 16 : __GNUC__ >= 8

#include <sys/auxv.h>

#define DOTS(sums, a, b) vdotq_s32(sums, a, b)
#define TARGET __attribute__((target("arch=armv8.2-a+dotprod")))
#define NEEDS (getauxval(AT_HWCAP) & 1 << 20) /* HWCAP_ASIMDDP */
#include "products_neon.h"

#else /* an older compiler */

const struct kernel *TABLE(int type)
{
    (void)type;
    return NULL;
}

#endif
#endif
