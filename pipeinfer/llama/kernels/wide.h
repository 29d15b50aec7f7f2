/* What the files for VNNI on registers of 512 bits share. */

#ifndef PIPEINFER_WIDE_H
#define PIPEINFER_WIDE_H

#include "avx2.h"

#ifdef X86

#define WIDE_FLAGS "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni"
#define WIDE __attribute__((target(WIDE_FLAGS)))
#define LANES WIDE static inline __attribute__((always_inline))

enum { COLUMNS = 16,  /* of a panel: the lanes of a register of 512 bits */
       PART = 32,     /* numbers, eight registers of a panel */
       SUMS = 8 };    /* float lanes of a single row's kernel */

static inline bool has_wide_vnni(void)
{
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")
        && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
}

LANES __m512i repeated(const void *four)
{
    int32_t numbers;
    memcpy(&numbers, four, sizeof numbers);
    return _mm512_set1_epi32(numbers);
}

LANES void put(uint8_t *to, __m256i x) { _mm256_storeu_si256((__m256i *)(void *)to, x); }

/* 32 bytes of each of 16 columns, `apart` from one to the next, to registers of four of each */
LANES void transpose(const uint8_t *from, size_t apart, int8_t (*to)[64])
{
    __m512i a[8], b[8];
    int i;
    UNROLLED
    for (i = 0; i < 8; i++)
        a[i] = _mm512_inserti64x4(_mm512_castsi256_si512(load(from + i * apart)),
                                  load(from + (i + 8) * apart), 1);
    UNROLLED
    for (i = 0; i < 8; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    UNROLLED
    for (i = 0; i < 8; i += 4) {
        a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
    UNROLLED
    for (i = 0; i < 4; i++) {
        const __m512i first = _mm512_setr_epi64(0, 1, 8, 9, 4, 5, 12, 13);
        const __m512i second = _mm512_setr_epi64(2, 3, 10, 11, 6, 7, 14, 15);
        _mm512_store_si512(to[i], _mm512_permutex2var_epi64(a[i], first, a[i + 4]));
        _mm512_store_si512(to[i + 4], _mm512_permutex2var_epi64(a[i], second, a[i + 4]));
    }
}

/* What 128 that is added to the other side adds to sums of four numbers, negative: VNNI needs one side
   unsigned. */
LANES void lift(int8_t (*numbers)[64], int32_t (*starts)[COLUMNS])
{
    int sum;
    UNROLLED
    for (sum = 0; sum < SUMS; sum++)
        _mm512_store_si512(starts[sum], _mm512_sub_epi32(_mm512_setzero_si512(), _mm512_dpbusd_epi32(
            _mm512_setzero_si512(), _mm512_set1_epi8((char)0x80), _mm512_load_si512(numbers[sum]))));
}

/* Eight sums in the order of sum_of in avx2.h */
LANES __m512 sum_of_eight(const __m512 *x)
{
    return _mm512_add_ps(
        _mm512_add_ps(_mm512_add_ps(x[4], x[0]), _mm512_add_ps(x[6], x[2])),
        _mm512_add_ps(_mm512_add_ps(x[5], x[1]), _mm512_add_ps(x[7], x[3])));
}

#endif
#endif
