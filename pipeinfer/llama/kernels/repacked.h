/* What the files about weights that llama.cpp has repacked share. */

#ifndef PIPEINFER_REPACKED_H
#define PIPEINFER_REPACKED_H

#include "short_runs.h"

/* Types of four bits in the layout 8x8: the same eight bytes of eight rows of weights side by side */
enum repacked { REPACKED_Q4_0, REPACKED_IQ4_NL, REPACKED_MXFP4, REPACKED_TYPES };

/* llama.cpp's gemv and gemm: `rows` of Q8_0 by `weights` rows of weights, of `length` numbers each; the
   results of a row are `apart` floats behind those of the one before. A gemm's rows lie in fours. */
typedef void product(int length, float *to, size_t apart, const void *x, const void *y, int rows,
                     int weights);

/* Begins to take prompts if `wanted`: of the types whose bits are those of llama.cpp's `gemms`, of which
   each may be NULL. Returns the types, a bit each, and behind them whether by tiles. */
__attribute__((visibility("hidden")))
unsigned repacked_prompts(product *const gemms[REPACKED_TYPES], bool wanted);

/* A gemm's product. Returns how many of the weights' rows were taken, from the first: the others are the
   caller's. */
__attribute__((visibility("hidden")))
int repacked_prompt(enum repacked type, int length, float *to, size_t apart, const void *x, const void *y,
                    int rows, int weights);

#endif
