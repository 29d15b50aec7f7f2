/* What the files about weights that llama.cpp has repacked share. */

#ifndef PIPEINFER_REPACKED_H
#define PIPEINFER_REPACKED_H

#include "short_runs.h"

/* Types of four bits in the layout 8x8: the same eight bytes of eight rows of weights side by side */
enum repacked { REPACKED_Q4_0, REPACKED_IQ4_NL, REPACKED_MXFP4, REPACKED_TYPES };

enum { REPACKED_BYTES = 144 }; /* of a block of the largest type */

/* llama.cpp's gemv and gemm: `rows` of Q8_0 by `weights` rows of weights, of `length` numbers each; the
   results of a row are `apart` floats behind those of the one before. A gemm's rows lie in fours. */
typedef void product(int length, float *to, size_t apart, const void *x, const void *y, int rows,
                     int weights);

/* Puts a row of Q8_0 among rows that lie in fours: eight numbers of four rows side by side. */
static inline void put_in_fours(uint8_t *fours, int row, int64_t blocks, const uint8_t *y)
{
    uint8_t *to = fours + row / 4 * 4 * blocks * Q8_0_BYTES;
    int64_t block;
    int part;
    for (block = 0; block < blocks; block++, to += 4 * Q8_0_BYTES, y += Q8_0_BYTES) {
        memcpy(to + row % 4 * 2, y, 2);
        for (part = 0; part < 4; part++)
            memcpy(to + 8 + 32 * part + row % 4 * 8, y + 2 + 8 * part, 8);
    }
}

/* A whole product: compute_forward of ggml::cpu::repack::tensor_traits */
typedef bool method(const void *self, void *params, void *tensor);

/* What stands in place of llama.cpp's */
product ggml_gemv_q4_0_8x8_q8_0, ggml_gemv_iq4_nl_8x8_q8_0, ggml_gemv_mxfp4_8x8_q8_0;
product ggml_gemm_q4_0_8x8_q8_0, ggml_gemm_iq4_nl_8x8_q8_0, ggml_gemm_mxfp4_8x8_q8_0;

/* Begins to take prompts if `wanted`: of the types whose bits are those of llama.cpp's `gemms`, of which
   each may be NULL. Returns the types, a bit each, and behind them whether by tiles. */
__attribute__((visibility("hidden")))
unsigned repacked_prompts(product *const gemms[REPACKED_TYPES], bool wanted);

/* A gemm's product. Returns how many of the weights' rows were taken, from the first: the others are the
   caller's. */
__attribute__((visibility("hidden")))
int repacked_prompt(enum repacked type, int length, float *to, size_t apart, const void *x, const void *y,
                    int rows, int weights);

/* Random blocks of a type, for a trial; on x86-64 only. */
__attribute__((visibility("hidden")))
void repacked_example(enum repacked type, uint8_t *x, size_t blocks, uint32_t *dice);

/* Begins to multiply rows of experts together if `wanted`: of the types whose bits are those of
   llama.cpp's gemvs `ones`, of which each may be NULL. `name`: ggml_op_desc. Returns the types, a bit
   each. */
__attribute__((visibility("hidden")))
unsigned repacked_experts(product *const ones[REPACKED_TYPES], method *const forwards[REPACKED_TYPES],
                          const char *(*name)(const void *), bool wanted);

/* A gemv. Returns whether it was noted, to be computed before the whole product of experts ends. */
__attribute__((visibility("hidden")))
bool repacked_expert(enum repacked type, int length, float *to, const void *x, const void *y, int rows,
                     int weights);

/* A whole product by llama.cpp's method, in which rows of experts are noted. */
__attribute__((visibility("hidden")))
bool repacked_whole(enum repacked type, const void *self, void *params, void *tensor);

#endif
