/* Products of a matrix with few rows: each block of weights is unpacked once for all rows, and every
   row gets the same bits as alone.

   llama.cpp multiplies a few rows either one by one or, where llamafile's kernels handle them, in
   another order of additions than a single row. It calls llamafile_sgemm for every product, and the
   dynamic linker binds that call to the function here if this library was loaded before, with global
   symbols; see short_runs.py. The kernels stand in files of their own, by what they need of a processor;
   each is used only if its bits are those of the loaded library.
   Kernels that sum eight or more rows in another order (ggml_compute_forward_mul_mat_tiled) are
   avoided in the same way.

   Needs neither Python's nor llama.cpp's headers. */

#include "avx2.h"
#include "neon.h"

enum { MOST_NUMBERS = 32 * MOST_BLOCKS }; /* of a row, which is copied */

typedef bool product(const struct team *, int64_t m, int64_t n, int64_t k, const void *a, int64_t lda,
                     const void *b, int64_t ldb, void *c, int64_t ldc, int a_type, int b_type,
                     int c_type);

/* ggml_compute_forward_mul_mat_tiled: whether it made the product `to` */
typedef bool tiled_product(const struct team *, void *to);

static product *theirs;
static tiled_product *their_tiles;
static int64_t (*rows_of)(const void *tensor);  /* ggml_nrows */
static int most_rows;                           /* 0: everything is left to llama.cpp */
static bool prompts;                            /* whether more rows are taken: blocks first, floats
                                                   where llamafile has no kernel */

#ifdef KERNELS

static int (*next_chunk)(void *pool, int add);  /* ggml_threadpool_chunk_add */

/* Kernels of a type, the fastest first */
static source *const SOURCES[] = {
#ifdef X86
    avx512_vnni_products, avx_vnni_products, avx2_products, avx2_floats, avx512_floats, avx512_pairs
#else
    dotprod_products, dotprod_own_products, neon_products, neon_floats
#endif
};
enum { COUNT = sizeof SOURCES / sizeof *SOURCES };

/* Types that have any, here or on another processor: few rows are not llamafile's then. */
static const uint32_t KNOWN = 1u << F32 | 1u << F16 | 1u << BF16 | 1u << Q4_0 | 1u << Q4_1 | 1u << Q5_0
                              | 1u << Q8_0 | 1u << Q4_K | 1u << Q5_K | 1u << Q6_K;
static const struct kernel *used[TYPES];  /* NULL: left to llama.cpp */
static bool wide[TYPES];                  /* whose prompts wide_prompts.c multiplies */
static bool instead_of_tiles;             /* whether it takes those that llama.cpp would make in tiles */

static bool fits(const struct kernel *kernel, int64_t blocks)
{
    return blocks * kernel->elements <= MOST_NUMBERS && blocks % kernel->step == 0;
}

/* Unpacked rows, as struct rows says; of each group of rows what belongs to it follows that of the last. */
static _Thread_local float scales[MOST_ROWS * MOST_BLOCKS], others[MOST_ROWS * MOST_BLOCKS];
static _Thread_local int16_t pairs_of[MOST_ROWS * MOST_NUMBERS / 32] ALIGNED;
/* A product's rows have blocks or they have none. */
static _Thread_local union {
    struct { int8_t numbers[MOST_ROWS * MOST_NUMBERS], offsets[MOST_ROWS * MOST_NUMBERS]; };
    float floats[MOST_ROWS * MOST_NUMBERS];
} unpacked ALIGNED;

/* Groups of about one size, as few as possible */
static int groups_of(const struct kernel *kernel, int count)
{
    return (count + kernel->group - 1) / kernel->group;
}

BASE static void unpack_blocks(const struct kernel *kernel, const uint8_t *rows, size_t apart,
                               int count, int64_t blocks)
{
    const int begin = kernel->partner == Q8_K ? 4 : 2 * kernel->scales, groups = groups_of(kernel, count);
    const int parts = kernel->elements / 32;
    const struct kernel as = *kernel;  /* which no store can change */
    /* asked for once: each time is a call */
    float *const all_scales = scales, *const all_others = others;
    int16_t *const all_pairs = pairs_of;
    int8_t *const numbers = unpacked.numbers, *const offsets = unpacked.offsets;
    int row, part, group, end = 0;
    int64_t block;
    for (group = 0; group < groups; group++) {
        const int first = end, in_group = (end = (group + 1) * count / groups) - first;
        float *other = all_others + group * MOST_GROUP * blocks;
        for (block = 0; block < blocks; block++)
            for (row = 0; row < in_group; row++) {
                const uint8_t *from = rows + (first + row) * apart + block * kernel->partner_bytes;
                const int64_t at = first * blocks + block * in_group + row;
                float *scale = all_scales + (first + row) * blocks + block;
                if (kernel->partner == Q8_K) {
                    memcpy(scale, from, sizeof *scale);
                    put_pairs(from + 260, all_pairs + 8 * at);
                } else {
                    *scale = one(from);
                    if (kernel->scales > 1)
                        other[block * MOST_GROUP + row] = one(from + 2);
                }
                for (part = 0; part < parts; part++) {
                    const int64_t place = 32 * ((first * blocks + block * in_group) * parts
                                                + part * in_group + row);
                    put_numbers(&as, from + begin + 32 * part, numbers + place, offsets + place);
                }
            }
    }
}

BASE static void unpack_floats(int type, const uint8_t *rows, size_t apart, int count, int64_t length)
{
    int row;
    int64_t i;
    for (row = 0; row < count; row++)
        for (i = 0; i < length; i += 8)
            put_eight(type, rows + row * apart + i * (type == F32 ? 4 : 2),
                      unpacked.floats + row * length + i);
}

static void unpack(const struct kernel *kernel, int type, const uint8_t *rows, size_t apart, int count,
                   int64_t blocks)
{
    if (kernel->elements > 1)
        unpack_blocks(kernel, rows, apart, count, blocks);
    else if (!kernel->as_is)
        unpack_floats(type, rows, apart, count, blocks);
}

/* The part of the product that rows `from` to `until` of the weights make. */
static void piece(const struct kernel *kernel, int64_t from, int64_t until, int count, int64_t blocks,
                  const uint8_t *x, size_t x_apart, const uint8_t *y, size_t y_apart, float *to,
                  int64_t apart)
{
    const int groups = groups_of(kernel, count);
    int group, begin = 0;
    for (group = 0; group < groups; group++) {
        const int end = (group + 1) * count / groups;
        const int64_t at = begin * blocks;
        const struct rows rows = {y + begin * y_apart, y_apart, scales + at,
                                  others + group * MOST_GROUP * blocks,
                                  unpacked.numbers + at * kernel->elements,
                                  unpacked.offsets + at * kernel->elements, pairs_of + 8 * at,
                                  unpacked.floats + at, blocks};
        kernel->pass(end - begin, blocks, x + from * x_apart, x_apart, until - from, &rows,
                     to + from + begin * apart, apart);
        begin = end;
    }
}

/* How many rows of weights a thread takes at a time; of a long run more, for whose sake all of the
   right side is unpacked each time. */
static int64_t chunk_of(int64_t m, const struct team *team, bool few)
{
    const int64_t rows = m / ((few ? 8 : 4) * team->nth) / 16 * 16, most = few ? 64 : 128;
    return rows < 16 ? 16 : rows > most ? most : rows;
}

/* All rows of the right side, `count`, by rows `from` to `until` of the weights. Up to MOST_ROWS are
   unpacked before, if `there`. */
static void by_few(const struct kernel *kernel, int type, int64_t from, int64_t until, int64_t count,
                   int64_t blocks, const uint8_t *x, size_t x_apart, const uint8_t *y, size_t y_apart,
                   float *to, int64_t apart, bool there)
{
    int64_t row, some;
    for (row = 0; row < count; row += some) {
        some = count - row < MOST_ROWS ? count - row : MOST_ROWS;
        if (!there)
            unpack(kernel, type, y + row * y_apart, y_apart, (int)some, blocks);
        piece(kernel, from, until, (int)some, blocks, x, x_apart, y + row * y_apart, y_apart,
              to + row * apart, apart);
    }
}

/* The same; of a prompt as much as possible on wide registers */
static void by_rows(const struct kernel *kernel, int type, int64_t from, int64_t until, int64_t count,
                    int64_t blocks, const uint8_t *x, size_t x_apart, const uint8_t *y, size_t y_apart,
                    float *to, int64_t apart, bool there)
{
    int64_t row = 0, some;
    for (; !there && wide[type] && count - row >= WIDE_STEP; row += some) {
        int64_t done;
        some = count - row < WIDE_ROWS ? (count - row) / WIDE_STEP * WIDE_STEP : WIDE_ROWS;
        done = from + wide_prompt(type, kernel, blocks, x + from * x_apart, x_apart, until - from,
                                  y + row * y_apart, y_apart, (int)some, to + from + row * apart, apart);
        if (done < until)
            by_few(kernel, type, done, until, some, blocks, x, x_apart, y + row * y_apart, y_apart,
                   to + row * apart, apart, false);
    }
    by_few(kernel, type, from, until, count - row, blocks, x, x_apart, y + row * y_apart, y_apart,
           to + row * apart, apart, there);
}

static void multiply(const struct kernel *kernel, const struct team *team, int64_t m, int64_t count,
                     int64_t blocks, const void *a, int64_t lda, const void *b, int64_t ldb, float *to,
                     int64_t ldc, int type)
{
    const size_t x_apart = lda * kernel->bytes, y_apart = ldb * kernel->partner_bytes;
    /* ggml has just begun to count this product's chunks anew, before threads met; of several
       products of one operation, whose right sides follow one another, only before the first */
    const bool shares = next_chunk && team->nth > 1 && b == team->work, few = count <= MOST_ROWS;
    const int64_t rows = chunk_of(m, team, few);
    int64_t chunk = team->ith, from, until;

    if (few)
        unpack(kernel, type, b, y_apart, (int)count, blocks);
    if (!shares)
        for (from = team->ith * m / team->nth; from < (team->ith + 1) * m / team->nth; from = until) {
            const int64_t end = (team->ith + 1) * m / team->nth;
            until = few || end - from < rows ? end : from + rows;
            by_rows(kernel, type, from, until, count, blocks, a, x_apart, b, y_apart, to, ldc, few);
        }
    else
        for (; chunk * rows < m; chunk = next_chunk(team->pool, 1)) {
            until = (chunk + 1) * rows;
            by_rows(kernel, type, chunk * rows, until < m ? until : m, count, blocks, a, x_apart, b,
                    y_apart, to, ldc, few);
        }
}

#endif

/* What llama.cpp calls for every product of a matrix: false leaves it to single rows' kernels. */
bool llamafile_sgemm(const struct team *team, int64_t m, int64_t n, int64_t k, const void *a,
                     int64_t lda, const void *b, int64_t ldb, void *c, int64_t ldc, int a_type,
                     int b_type, int c_type)
{
#ifdef KERNELS
    const bool taken = c_type == F32 && a_type >= 0 && a_type < TYPES && KNOWN >> a_type & 1;
    const struct kernel *kernel = taken ? used[a_type] : NULL;
    const bool ours = kernel && b_type == kernel->partner && fits(kernel, k);
    const bool few = taken && n <= most_rows;  /* llamafile's kernels may add up in another order */
    const bool first = few || (ours && prompts && kernel->elements > 1);  /* its floats are faster */
#else
    const bool ours = false, few = false, first = false;
#endif
    if (!first && theirs != NULL
        && theirs(team, m, n, k, a, lda, b, ldb, c, ldc, a_type, b_type, c_type))
        return true;
    if (!ours || !(few || prompts))
        return false;
#ifdef KERNELS
    multiply(kernel, team, m, n, k, a, lda, b, ldb, c, ldc, a_type);
#endif
    return true;
}

/* The same for products that llama.cpp would make in tiles: few rows, and prompts that are faster here. */
bool ggml_compute_forward_mul_mat_tiled(const struct team *team, void *to)
{
    if (most_rows && rows_of(to) <= most_rows)
        return false;
#ifdef KERNELS
    if (instead_of_tiles && tensors_known) {
        const struct tensor *weights = ((const struct tensor *)to)->operands[0];
        const int type = weights->type;
        if (type >= 0 && type < TYPES && wide[type] && fits(used[type], weights->ne[0] / used[type]->elements))
            return false;
    }
#endif
    return their_tiles != NULL && their_tiles(team, to);
}

#ifdef KERNELS

static uint32_t dice;

/* Random weights: scales of a moderate size, wherever a type has them. */
static void randomise(const struct kernel *kernel, int type, uint8_t *block)
{
    static const int HALVES[TYPES][2] = {
        [Q4_0] = {0, -1}, [Q4_1] = {0, 2}, [Q5_0] = {0, -1}, [Q8_0] = {0, -1}, [Q4_K] = {0, 2},
        [Q5_K] = {0, 2}, [Q6_K] = {208, -1}};
    int i;
    for (i = 0; i < kernel->bytes; i++)
        block[i] = (uint8_t)roll(&dice);
    for (i = 0; i < 2 && kernel->elements > 1 && HALVES[type][i] >= 0; i++) {
        const uint16_t half = some_scale(&dice);
        memcpy(block + HALVES[type][i], &half, sizeof half);
    }
    if (type == Q8_0)
        for (i = 2; i < 34; i++)
            block[i] = block[i] == 0x80 ? 0 : block[i];
}

/* More numbers than a slice of wide_prompts.c, more rows than it takes at a time, weights for panels of
   both widths */
enum { TRIED = 1280, FEW_WEIGHTS = 5, WEIGHTS = 149, ROWS = WIDE_ROWS + 2 * WIDE_STEP + 1,
       DRAWN = 37, EVERY = 3 }; /* the rest are copies, and some are compared: each start does this */

static uint8_t tried_weights[WEIGHTS][4 * TRIED], tried_rows[ROWS][4 * TRIED];

/* Random weights and rows, quantised as the library does */
static void draw(const struct kernel *kernel, int type, const struct traits *own,
                 const struct traits *partner, int weights, int rows)
{
    const int64_t blocks = TRIED / kernel->elements;
    float from[TRIED];
    int row, weight, i;
    for (row = 0; row < rows; row++) {
        const size_t bytes = blocks * kernel->partner_bytes;
        uint8_t *to = tried_rows[0] + row * bytes;
        if (row >= DRAWN) {
            memcpy(to, tried_rows[0] + row % DRAWN * bytes, bytes);
            continue;
        }
        for (i = 0; i < TRIED; i++)
            from[i] = some_number(&dice);
        if (kernel->partner == F32)
            memcpy(to, from, sizeof from);
        else
            partner->from_float(from, to, TRIED);
    }
    for (weight = 0; weight < weights; weight++)
        for (i = 0; i < blocks; i++) {
            uint8_t *block = tried_weights[0] + (weight * blocks + i) * kernel->bytes;
            if (weight >= DRAWN) {
                memcpy(block, tried_weights[0] + (weight % DRAWN * blocks + i) * kernel->bytes,
                       kernel->bytes);
            } else if (kernel->elements > 1) {
                randomise(kernel, type, block);
            } else {
                const float value = ((int)(roll(&dice) & 0xffff) - 0x8000) / (float)(1 << 15);
                if (type == F32)
                    memcpy(block, &value, sizeof value);
                else
                    own->from_float(&value, block, 1);
            }
        }
}

/* Whether a kernel gives the bits of the library's own products of single rows: few rows, or as many as
   wide_prompts.c takes */
static bool agrees(const struct kernel *kernel, int type, const struct traits *own,
                   const struct traits *partner, bool few)
{
    static float to[ROWS][WEIGHTS];
    const int64_t blocks = TRIED / kernel->elements;
    const int rows = few ? MOST_ROWS : ROWS, weights = few ? FEW_WEIGHTS : WEIGHTS;
    const struct team alone = {0, 1, 0, NULL, NULL};
    int row, weight, count;

    if (own->partner != kernel->partner || (kernel->partner != F32 && !partner->from_float))
        return false;
    draw(kernel, type, own, partner, weights, rows);
    for (count = few ? 1 : rows; count <= rows; count++) {
        memset(to, 0, sizeof to);
        multiply(kernel, &alone, weights, count, blocks, tried_weights, blocks, tried_rows, blocks, to[0],
                 WEIGHTS, type);
        for (row = 0; row < count; row++)
            for (weight = few ? 0 : row % EVERY; weight < weights; weight += few ? 1 : EVERY) {
                float wanted;
                own->dot(TRIED, &wanted, 0, tried_weights[0] + weight * blocks * kernel->bytes, 0,
                         tried_rows[0] + row * blocks * kernel->partner_bytes, 0, 1);
                if (memcmp(&wanted, &to[row][weight], sizeof wanted) != 0)
                    return false;
            }
    }
    return true;
}

/* The first kernel of this type that gives the library's bits; NULL if there is none. */
static const struct kernel *fitting(int type, const void *(*traits_of)(int))
{
    int source;
    for (source = 0; source < COUNT; source++) {
        const struct kernel *kernel = SOURCES[source](type);
        if (kernel && agrees(kernel, type, traits_of(type), traits_of(kernel->partner), true))
            return kernel;
    }
    return NULL;
}

#endif

/* Begins to take products of up to `most` rows, of those of `wanted` types (bits) whose kernels give
   the library's own bits; if `long_ones`, also longer ones, but for floats that llamafile's take; of these,
   if `tiled_ones`, also those that the library would make in tiles.
   Returns these types, and from bit 32 on those whose prompts are multiplied on registers of 512 bits. The library's functions: its llamafile_sgemm and
   ggml_compute_forward_mul_mat_tiled, which the rest is left to, ggml_get_type_traits_cpu,
   ggml_nrows, and ggml_threadpool_chunk_add or NULL. */
uint64_t pipeinfer_short_runs(product *own, tiled_product *tiles, const void *(*traits_of)(int),
                              int64_t (*rows)(const void *), int (*chunk)(void *, int), int most,
                              uint32_t wanted, bool long_ones, bool tiled_ones)
{
    theirs = own;
    their_tiles = tiles;
    rows_of = rows;
    most_rows = 0;
    prompts = false;
#ifdef KERNELS
    instead_of_tiles = false;
    memset(used, 0, sizeof used);
    if (most > 0) {
        int type;
        uint64_t found = 0;
        dice = 1;
        for (type = 0; type < TYPES; type++) {
            const struct kernel *kernel = wanted >> type & 1 ? fitting(type, traits_of) : NULL;
            used[type] = kernel;
            wide[type] = kernel && long_ones && wide_knows(type);
            wide[type] = wide[type] && agrees(kernel, type, traits_of(type), traits_of(kernel->partner), false);
            found |= (uint64_t)(kernel != NULL) << type | (uint64_t)wide[type] << (32 + type);
        }
        next_chunk = chunk;
        most_rows = most < MOST_ROWS ? most : MOST_ROWS;
        prompts = long_ones;
        instead_of_tiles = tiled_ones;
        return found;
    }
#else
    (void)traits_of, (void)chunk, (void)most, (void)wanted, (void)long_ones, (void)tiled_ones;
#endif
    return 0;
}
