/* What the files about products of few rows share. */

#ifndef PIPEINFER_SHORT_RUNS_H
#define PIPEINFER_SHORT_RUNS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__GNUC__) || defined(__clang__)
#if defined(__x86_64__)
#define X86 1
#define KERNELS 1
#elif defined(__aarch64__) && defined(__ARM_NEON)
#define ARM 1
#define KERNELS 1
#endif
#endif

/* ggml's numbers of types, and the bytes of their blocks */
enum { F32 = 0, F16 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q8_0 = 8, Q8_1 = 9, Q4_K = 12, Q5_K = 13,
       Q6_K = 14, Q8_K = 15, BF16 = 30, TYPES = 31 };
enum { Q8_0_BYTES = 34, Q4_K_BYTES = 144, Q5_K_BYTES = 176, Q6_K_BYTES = 210, Q8_K_BYTES = 292 };

enum { MOST_ROWS = 16,       /* unpacked together; more are a prompt's */
       MOST_BLOCKS = 1024 }; /* of a row whose scales are kept unpacked */

/* ggml_compute_params, as far as it is known */
struct team { int ith, nth; size_t bytes; void *work; void *pool; };

/* ggml_type_traits_cpu */
struct traits {
    void (*from_float)(const float *from, void *to, int64_t count);
    void (*dot)(int n, float *to, size_t, const void *x, size_t, const void *y, size_t, int);
    int partner;
    int64_t rows;
};

enum { OPERANDS = 10, PARAMETERS = 16 };

/* ggml_tensor, as far as it is needed; whether it is laid out so is tried first */
struct tensor {
    int type;
    void *buffer;
    int64_t ne[4];
    size_t nb[4];
    int op;
    int32_t parameters[PARAMETERS]; /* the first three are floats */
    int32_t flags;
    struct tensor *operands[OPERANDS];
    struct tensor *viewed;
    size_t offset;
    uint8_t *data;
};

struct memory { size_t bytes; void *at; bool only_sizes; }; /* ggml_init_params */

/* Whether a trial of short_attention.c has found tensors laid out so */
extern __attribute__((visibility("hidden"))) bool tensors_known;

#ifdef KERNELS

#define UNROLLED _Pragma("GCC unroll 8")
#define ALIGNED __attribute__((aligned(64)))

static inline __attribute__((always_inline)) uint16_t bits_of(const uint8_t *half)
{
    uint16_t bits;
    memcpy(&bits, half, sizeof bits);
    return bits;
}

/* Rows of the right side that a pass takes, `count`, as they are (`at`, `apart` bytes from one to the
   next) and unpacked. Of types with blocks: scale: what a block begins with, of each row
   `length`; and by block and then by row, so that a pass reads on and on: other: a block's
   second number, for MOST_GROUP rows; numbers: the rest, by parts of 32; offsets: what a weight's
   offset adds to products by twos, 16 int16 a part; pairs: of Q8_K, sums of 32 numbers, 8 int16 a
   block. Of types without: floats, `length` in a row. */
struct rows { const uint8_t *at; size_t apart; const float *scale, *other; const int8_t *numbers,
              *offsets; const int16_t *pairs; const float *floats; int64_t length; };

enum { MOST_GROUP = 8,     /* rows that one pass over a weight's row takes */
       MOST_FLOATS = 6 };  /* the same for types without blocks */

typedef void passes(int count, int64_t blocks, const uint8_t *x, size_t x_apart, int64_t weights,
                    const struct rows *y, float *to, int64_t apart);

/* elements: of a block; step: blocks that a row is a multiple of; bytes: of a block; group: rows of a
   pass at most, as registers allow; scales: numbers in 16 bits that a partner's block begins with;
   offset: of stored weights, 0: none that needs sums of the rows; shifted: whether rows' numbers are
   stored with 128 added; as_is: whether rows are taken from where they are; zipped: whether rows'
   numbers are stored in the order of `zip` in neon.h */
struct kernel {
    passes *pass;
    int partner, elements, step, bytes, partner_bytes, group, scales, offset;
    bool shifted, as_is, zipped;
};

/* `weights` rows of weights by `count` rows, which the compiler knows in each of the loops */
#define PASSES(TARGET, NAME, DOTS)                                                                    \
TARGET static void NAME(int count, int64_t blocks, const uint8_t *x, size_t x_apart, int64_t weights, \
                        const struct rows *y, float *to, int64_t apart)                               \
{                                                                                                     \
    int64_t i;                                                                                        \
    switch (count) {                                                                                  \
    case 1: for (i = 0; i < weights; i++) DOTS(1, blocks, x + i * x_apart, y, to + i, apart); break;  \
    case 2: for (i = 0; i < weights; i++) DOTS(2, blocks, x + i * x_apart, y, to + i, apart); break;  \
    case 3: for (i = 0; i < weights; i++) DOTS(3, blocks, x + i * x_apart, y, to + i, apart); break;  \
    case 4: for (i = 0; i < weights; i++) DOTS(4, blocks, x + i * x_apart, y, to + i, apart); break;  \
    case 5: for (i = 0; i < weights; i++) DOTS(5, blocks, x + i * x_apart, y, to + i, apart); break;  \
    case 6: for (i = 0; i < weights; i++) DOTS(6, blocks, x + i * x_apart, y, to + i, apart); break;  \
    case 7: for (i = 0; i < weights; i++) DOTS(7, blocks, x + i * x_apart, y, to + i, apart); break;  \
    default: for (i = 0; i < weights; i++) DOTS(8, blocks, x + i * x_apart, y, to + i, apart);        \
    }                                                                                                 \
}

/* The kernel of a type by what it needs of a processor; NULL where there is none, or the processor lacks
   that. avx512_floats: in the order of a llama.cpp that was compiled for AVX-512; avx512_pairs: of one
   that multiplies bfloat16 by twos. */
#define HIDDEN __attribute__((visibility("hidden")))
typedef const struct kernel *source(int type);
#ifdef X86
HIDDEN source avx2_products, avx_vnni_products, avx512_vnni_products, avx2_floats, avx512_floats,
    avx512_pairs;
#else
HIDDEN source neon_products, dotprod_products, dotprod_own_products, neon_floats;
#endif

/* The same for prompts, on registers of 512 bits: up to WIDE_ROWS rows, a multiple of WIDE_STEP. Returns how
   many rows of weights were taken, from the first: the others are the caller's. */
enum { WIDE_ROWS = 128, WIDE_STEP = 8 };
HIDDEN bool wide_knows(int type);
HIDDEN int64_t wide_prompt(int type, const struct kernel *kernel, int64_t blocks, const uint8_t *x,
                           size_t x_apart, int64_t weights, const uint8_t *y, size_t y_apart, int rows,
                           float *to, int64_t apart);

/* Numbers for trials of kernels: the same in every process. */
static inline uint32_t roll(uint32_t *dice)
{
    *dice = *dice * 1664525u + 1013904223u;
    return *dice >> 8;
}

/* A scale of a moderate size, as float16 */
static inline uint16_t some_scale(uint32_t *dice)
{
    const uint32_t bits = roll(dice) & 0x83ff;
    return (uint16_t)(bits | 0x2800 | (roll(dice) & 0x0400));
}

/* A number of a row before it is quantised */
static inline float some_number(uint32_t *dice)
{
    const float whole = (float)((int)(roll(dice) & 0xffff) - 0x8000);
    return whole / (float)(1 << (13 + roll(dice) % 4));
}

#endif
#endif
