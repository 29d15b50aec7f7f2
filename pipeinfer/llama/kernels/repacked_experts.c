/* Products of experts whose weights llama.cpp has repacked: Q4_0, IQ4_NL, MXFP4.

   llama.cpp multiplies an expert's rows one by one, one expert after the other. Here a call for a row is
   only noted, until the next expert's first call or the end of the whole product: then the rows that
   belong together are laid out in fours and multiplied as those of a prompt are. That has the bits of
   single rows; the trial at load compares them. No thread reads the results before the end, since
   llama.cpp's threads wait for one another behind each whole product. */

#include "repacked.h"
#include <stdlib.h>

static product *their_gemvs[REPACKED_TYPES];
static method *their_forwards[REPACKED_TYPES];
static const char *(*name_of)(const void *tensor); /* ggml_op_desc */
static bool taken[REPACKED_TYPES];

/* With what the present library's functions are replaced */
static product *const gemvs[REPACKED_TYPES] = {
    ggml_gemv_q4_0_8x8_q8_0, ggml_gemv_iq4_nl_8x8_q8_0, ggml_gemv_mxfp4_8x8_q8_0};
static product *const gemms[REPACKED_TYPES] = {
    ggml_gemm_q4_0_8x8_q8_0, ggml_gemm_iq4_nl_8x8_q8_0, ggml_gemm_mxfp4_8x8_q8_0};

enum { LEAST = 4,   /* rows from which on they are laid out: fewer would be padded */
       MOST = 128,  /* rows that are noted */
       NONE = -1 };

/* The noted rows of one expert; type: NONE while no product of experts is computed */
static _Thread_local struct { int type, length, weights, rows; const void *x; } noted = {.type = NONE};
static _Thread_local struct { float *to; const uint8_t *y; } each[MOST];
/* Rows in fours and their results; grow to the largest that their thread has seen */
static _Thread_local struct { uint8_t *fours; float *results; size_t bytes, floats; } room;

static bool has_room(size_t bytes, size_t floats)
{
    if (room.bytes < bytes) {
        free(room.fours);
        room.fours = malloc(bytes);
        room.bytes = room.fours ? bytes : 0;
    }
    if (room.floats < floats) {
        free(room.results);
        room.results = malloc(floats * sizeof(float));
        room.floats = room.results ? floats : 0;
    }
    return room.bytes >= bytes && room.floats >= floats;
}

/* Multiplies the noted rows. */
static void multiply(void)
{
    const int type = noted.type, rows = noted.rows, padded = (rows + 3) / 4 * 4;
    const int64_t blocks = noted.length / 32;
    int row;
    noted.type = NONE; /* calls are computed now */
    noted.rows = 0;
    if (rows >= LEAST
        && has_room(padded * blocks * Q8_0_BYTES, (size_t)padded * (size_t)noted.weights)) {
        if (rows < padded)
            memset(room.fours + (padded - 4) * blocks * Q8_0_BYTES, 0, 4 * blocks * Q8_0_BYTES);
        for (row = 0; row < rows; row++)
            put_in_fours(room.fours, row, blocks, each[row].y);
        gemms[type](noted.length, room.results, noted.weights, noted.x, room.fours, padded,
                    noted.weights);
        for (row = 0; row < rows; row++)
            memcpy(each[row].to, room.results + (size_t)row * noted.weights,
                   noted.weights * sizeof(float));
    } else
        for (row = 0; row < rows; row++)
            gemvs[type](noted.length, each[row].to, noted.weights, noted.x, each[row].y, 1,
                        noted.weights);
    noted.type = type;
}

bool repacked_expert(enum repacked type, int length, float *to, const void *x, const void *y, int rows,
                     int weights)
{
    if (noted.type != (int)type || rows != 1)
        return false;
    if (noted.rows && (noted.x != x || noted.length != length || noted.weights != weights
                       || noted.rows == MOST))
        multiply();
    noted.x = x;
    noted.length = length;
    noted.weights = weights;
    each[noted.rows].to = to;
    each[noted.rows++].y = y;
    return true;
}

static bool whole(enum repacked type, method *forward, const void *self, void *params, void *tensor)
{
    bool done;
    noted.type = taken[type] && strcmp(name_of(tensor), "MUL_MAT_ID") == 0 ? (int)type : NONE;
    noted.rows = 0;
    done = forward(self, params, tensor);
    if (noted.rows)
        multiply();
    noted.type = NONE;
    return done;
}

bool repacked_whole(enum repacked type, const void *self, void *params, void *tensor)
{
    return whole(type, their_forwards[type], self, params, tensor);
}

/* In place of llama.cpp's own, as in short_runs.c */
void ggml_gemv_iq4_nl_8x8_q8_0(int length, float *to, size_t apart, const void *x, const void *y,
                               int rows, int weights)
{
    if (!repacked_expert(REPACKED_IQ4_NL, length, to, x, y, rows, weights))
        their_gemvs[REPACKED_IQ4_NL](length, to, apart, x, y, rows, weights);
}

void ggml_gemv_mxfp4_8x8_q8_0(int length, float *to, size_t apart, const void *x, const void *y,
                              int rows, int weights)
{
    if (!repacked_expert(REPACKED_MXFP4, length, to, x, y, rows, weights))
        their_gemvs[REPACKED_MXFP4](length, to, apart, x, y, rows, weights);
}

bool _ZN4ggml3cpu6repack13tensor_traitsI12block_iq4_nlLl8ELl8EL9ggml_type8EE15compute_forwardEP19ggml_compute_paramsP11ggml_tensor(
    const void *self, void *params, void *tensor)
{
    return repacked_whole(REPACKED_IQ4_NL, self, params, tensor);
}

bool _ZN4ggml3cpu6repack13tensor_traitsI11block_mxfp4Ll8ELl8EL9ggml_type8EE15compute_forwardEP19ggml_compute_paramsP11ggml_tensor(
    const void *self, void *params, void *tensor)
{
    return repacked_whole(REPACKED_MXFP4, self, params, tensor);
}

#ifdef X86

enum { TRIED_BLOCKS = 9, TRIED_COLUMNS = 24, TRIED_ROWS = 44 };

/* Calls as llama.cpp makes them: rows of two experts, to places that do not follow one another */
static float tried[TRIED_ROWS][TRIED_COLUMNS];
static uint8_t tried_x[2][TRIED_COLUMNS / 8 * TRIED_BLOCKS * REPACKED_BYTES];
static uint8_t tried_y[TRIED_ROWS * TRIED_BLOCKS * Q8_0_BYTES];
static product *tried_gemv;

static bool try(const void *self, void *params, void *tensor)
{
    static const int bounds[] = {0, 1, 4, 8, 13, 20, TRIED_ROWS};
    size_t part;
    int row;
    (void)self, (void)params, (void)tensor;
    for (part = 0; part + 1 < sizeof bounds / sizeof *bounds; part++)
        for (row = bounds[part]; row < bounds[part + 1]; row++)
            tried_gemv(32 * TRIED_BLOCKS, tried[(7 * row) % TRIED_ROWS], TRIED_COLUMNS,
                       tried_x[part % 2], tried_y + row * TRIED_BLOCKS * Q8_0_BYTES, 1,
                       TRIED_COLUMNS);
    return true;
}

/* Whether rows that are multiplied together have the bits of llama.cpp's gemv */
static bool agree(enum repacked type)
{
    static float wanted[TRIED_ROWS][TRIED_COLUMNS];
    uint32_t dice = 1;
    size_t i;
    repacked_example(type, tried_x[0], TRIED_COLUMNS / 8 * TRIED_BLOCKS, &dice);
    repacked_example(type, tried_x[1], TRIED_COLUMNS / 8 * TRIED_BLOCKS, &dice);
    for (i = 0; i < sizeof tried_y; i++)
        tried_y[i] = (uint8_t)(roll(&dice) % 255 - 127);
    for (i = 0; i < sizeof tried_y; i += Q8_0_BYTES) {
        const uint16_t half = some_scale(&dice);
        memcpy(tried_y + i, &half, sizeof half);
    }
    tried_gemv = their_gemvs[type];
    try(NULL, NULL, NULL);
    memcpy(wanted, tried, sizeof wanted);
    memset(tried, 0, sizeof tried);
    tried_gemv = gemvs[type];
    return whole(type, try, NULL, NULL, NULL) && memcmp(tried, wanted, sizeof wanted) == 0;
}

static const char *experts(const void *tensor)
{
    (void)tensor;
    return "MUL_MAT_ID";
}

#endif

unsigned repacked_experts(product *const ones[REPACKED_TYPES], method *const forwards[REPACKED_TYPES],
                          const char *(*name)(const void *), bool wanted)
{
    unsigned found = 0;
    memcpy(their_gemvs, ones, sizeof their_gemvs);
    memcpy(their_forwards, forwards, sizeof their_forwards);
    memset(taken, 0, sizeof taken);
#ifdef X86
    name_of = experts;
    for (int type = 0; wanted && name && type < REPACKED_TYPES; type++) {
        taken[type] = ones[type] && forwards[type];
        taken[type] = taken[type] && agree(type);
        found |= (unsigned)taken[type] << type;
    }
#else
    (void)wanted;
#endif
    name_of = name;
    return found;
}
