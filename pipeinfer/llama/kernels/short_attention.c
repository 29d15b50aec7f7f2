/* Flash attention over a cache of q8_0, which dominates the time of long texts on AVX2 processors.

   llama.cpp processes each head of each row alone: cell after cell it multiplies by the keys, unpacks
   the values and adds them in memory. Here values are unpacked once for all heads and rows that read
   them, products of four cells are summed together, and sums stay in registers over a block of cells.
   Cells of several requests lie among one another, so those that a group of rows sees are listed first.
   The operations and their order are the same, and so are the bits: at the start both functions are
   compared on random numbers. This one replaces llama.cpp's own through the dynamic linker, as in
   short_runs.c. */

#include "attention.h"

#include <math.h>

typedef void forward(const struct team *, struct tensor *to);

static forward *theirs;
bool tensors_known;
static void (*quantise)(const float *from, void *to, int64_t count);
static bool used;
static bool fused; /* whether the library rounds once where a sum is scaled and a weight of 1 added */
static bool wide;       /* whether registers of 512 bits are used */
static bool expf_known; /* whether expf is the one that is repeated below */

#ifdef X86

enum { LEAST_WIDE = 4 }; /* pairs for which unpacking keys to 512 bits pays */

/* Up to CELLS cells that some of a group's rows see, and which of them each row sees */
struct cells {
    int count;
    int64_t at[CELLS];
    uint32_t seen[PAIRS];
    bool plain; /* no row's mask adds anything to their scores */
};

static _Thread_local struct space of_thread ALIGNED;

/* Products of one query with the keys of cells, which are `apart` bytes from one another */
INLINE void products_of(int blocks, int count, const uint8_t *keys, size_t apart, const int64_t *cells,
                        const struct space *own, int pair, float scale, float *to)
{
    const __m256i ones = _mm256_set1_epi16(1);
    float both[MOST][CELLS];
    int block, cell, i;
    for (block = 0; block < blocks; block++) {
        const __m256 query = _mm256_set1_ps(own->query_scales[pair][block]);
        for (cell = 0; cell < count; cell += 8)
            _mm256_storeu_ps(&both[block][cell], _mm256_mul_ps(
                query, _mm256_load_ps(&own->key_scales[block][cell])));
    }
    for (cell = 0; cell < count; cell += 4) {
        const uint8_t *four[4];
        __m256 sums[4];
        UNROLLED
        for (i = 0; i < 4; i++) { /* beyond the last cell the last is read again */
            four[i] = keys + cells[cell + i < count ? cell + i : count - 1] * apart + 2;
            sums[i] = _mm256_setzero_ps();
        }
        UNROLLED
        for (block = 0; block < blocks; block++) {
            const __m256i query = _mm256_load_si256(
                (const __m256i *)(const void *)&own->query[pair][32 * block]);
            UNROLLED
            for (i = 0; i < 4; i++) {
                const __m256i key = load(four[i] + block * Q8_0_BYTES);
                const __m256i twos = _mm256_maddubs_epi16(_mm256_sign_epi8(key, key),
                                                          _mm256_sign_epi8(query, key));
                sums[i] = _mm256_fmadd_ps(_mm256_broadcast_ss(&both[block][cell + i]),
                                          _mm256_cvtepi32_ps(_mm256_madd_epi16(ones, twos)), sums[i]);
            }
        }
        _mm_storeu_ps(to + cell, _mm_mul_ps(four_sums(sums), _mm_set1_ps(scale)));
    }
}

AVX2 static void products(int blocks, const struct cells *cells, const uint8_t *keys, size_t apart,
                          const struct space *own, int pair, float scale, float *to)
{
    if (cells->count == CELLS && blocks == 2)
        products_of(2, CELLS, keys, apart, cells->at, own, pair, scale, to);
    else if (cells->count == CELLS && blocks == 4)
        products_of(4, CELLS, keys, apart, cells->at, own, pair, scale, to);
    else
        products_of(blocks, cells->count, keys, apart, cells->at, own, pair, scale, to);
}

/* Adds values of cells by their weights; `width` is a multiple of 32. */
AVX2 static void add_up(int width, int count, const float *from, const uint8_t *cells,
                        const float *weights, float *sums)
{
    int at, i, part;
    for (at = 0; at + 64 <= width; at += 64) {
        __m256 own_sums[8];
        UNROLLED
        for (part = 0; part < 8; part++)
            own_sums[part] = _mm256_load_ps(sums + at + 8 * part);
        for (i = 0; i < count; i++) {
            const __m256 weight = _mm256_broadcast_ss(weights + i);
            const float *values = from + cells[i] * width + at;
            UNROLLED
            for (part = 0; part < 8; part++)
                own_sums[part] = _mm256_fmadd_ps(_mm256_load_ps(values + 8 * part), weight,
                                                 own_sums[part]);
        }
        UNROLLED
        for (part = 0; part < 8; part++)
            _mm256_store_ps(sums + at + 8 * part, own_sums[part]);
    }
    for (; at < width; at += 8) {
        __m256 sum = _mm256_load_ps(sums + at);
        for (i = 0; i < count; i++)
            sum = _mm256_fmadd_ps(_mm256_load_ps(from + cells[i] * width + at),
                                  _mm256_broadcast_ss(weights + i), sum);
        _mm256_store_ps(sums + at, sum);
    }
}

AVX2 static void scale_sums(int width, float by, float *sums)
{
    int at;
    for (at = 0; at < width; at += 8)
        _mm256_store_ps(sums + at, _mm256_mul_ps(_mm256_load_ps(sums + at), _mm256_set1_ps(by)));
}

INLINE float largest(const float *scores)
{
    __m256 most = _mm256_loadu_ps(scores);
    __m128 four;
    int cell;
    for (cell = 8; cell < CELLS; cell += 8)
        most = _mm256_max_ps(most, _mm256_loadu_ps(scores + cell));
    four = _mm_max_ps(_mm256_castps256_ps128(most), _mm256_extractf128_ps(most, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}

/* expf of four numbers between LEAST_POWER and 0 */
INLINE __m128 four_powers(__m128 x)
{
    const __m256d wide = _mm256_cvtps_pd(x), by = _mm256_set1_pd(POWER_BY);
    const __m256d shift = _mm256_set1_pd(POWER_SHIFT);
    const __m256d shifted = _mm256_fmadd_pd(wide, by, shift);
    const __m256i whole = _mm256_castpd_si256(shifted);
    const __m256d rest = _mm256_fmsub_pd(wide, by, _mm256_sub_pd(shifted, shift));
    const __m256i power = _mm256_add_epi64(_mm256_slli_epi64(whole, 47), _mm256_i64gather_epi64(
        (const long long *)POWERS, _mm256_and_si256(whole, _mm256_set1_epi64x(31)), 8));
    const __m256d upper = _mm256_fmadd_pd(_mm256_set1_pd(POWER_3), rest,
                                          _mm256_set1_pd(POWER_2));
    const __m256d lower = _mm256_fmadd_pd(_mm256_set1_pd(POWER_1), rest,
                                          _mm256_set1_pd(1.0));
    return _mm256_cvtpd_ps(_mm256_mul_pd(
        _mm256_fmadd_pd(upper, _mm256_mul_pd(rest, rest), lower), _mm256_castsi256_pd(power)));
}

/* expf of a number that is not above 0, with the same bits whatever the numbers next to it */
AVX2 static float power(float x)
{
    return expf_known && x >= LEAST_POWER ? _mm_cvtss_f32(four_powers(_mm_set1_ps(x))) : expf(x);
}

/* The same of several; `count` is a multiple of four. */
AVX2 static void powers(int count, const float *x, float *to)
{
    int at, i;
    for (at = 0; at < count; at += 4) {
        const __m128 four = _mm_loadu_ps(x + at);
        if (expf_known && _mm_movemask_ps(_mm_cmplt_ps(four, _mm_set1_ps(LEAST_POWER))) == 0)
            _mm_storeu_ps(to + at, four_powers(four));
        else
            for (i = at; i < at + 4; i++)
                to[i] = power(x[i]);
    }
}

/* Whether a pair sees all cells and no score rises above the largest so far: most of a long text. Its scores
   become weights then. */
AVX2 static bool weigh(const struct cells *of, const struct space *own, int pair, float *scores)
{
    const float most = own->most[pair];
    float least = 0;
    int cell;
    if (!of->plain || of->seen[pair] != 0xffffffff || largest(scores) > most)
        return false;
    for (cell = 0; cell < CELLS; cell++) {
        scores[cell] -= most;
        least = scores[cell] < least ? scores[cell] : least;
    }
    if (wide && least >= LEAST_POWER)
        wide_powers(scores);
    else
        powers(CELLS, scores, scores);
    return true;
}

static const uint8_t IN_ORDER[CELLS] = {
    0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26,
    27, 28, 29, 30, 31};

/* Cells for one pair, of which its row sees `seen`. mask: what its row's mask adds; NULL: nothing */
AVX2 static void attend(int width, const struct cells *of, const float *scores, uint32_t seen,
                        const uint16_t *mask, struct space *own, int pair)
{
    uint8_t cells[CELLS];
    bool rises[CELLS];
    float weights[CELLS], most = own->most[pair], total = own->total[pair];
    float *sums = own->sums + pair * width;
    int cell, next, count = 0, from = 0;
    for (cell = 0; cell < of->count; cell++) {
        float score = scores[cell];
        if (!(seen >> cell & 1))
            continue;
        if (mask)
            score += one((const uint8_t *)(mask + of->at[cell]));
        cells[count] = (uint8_t)cell;
        rises[count] = score > most;
        weights[count++] = score > most ? most - score : score - most;
        most = score > most ? score : most;
    }
    for (next = count; next % 4; next++)
        weights[next] = 0.0f;
    powers(next, weights, weights);
    for (next = 0; next < count; next++) {
        if (rises[next]) { /* what was added up so far shrinks, and this one counts whole */
            add_up(width, next - from, own->values, cells + from, weights + from, sums);
            scale_sums(width, weights[next], sums);
            total = fused ? fmaf(total, weights[next], 1.0f) : total * weights[next] + 1.0f;
            weights[next] = 1.0f;
            from = next;
        } else {
            total += weights[next];
        }
    }
    add_up(width, count - from, own->values, cells + from, weights + from, sums);
    own->most[pair] = most;
    own->total[pair] = total;
}

/* All cells of the pairs that `weigh` has taken */
AVX2 static void add_weighed(int width, int count, const int *pairs, const float (*weights)[CELLS],
                             struct space *own)
{
    int next = 0, cell, i;
    for (; wide && width % 64 == 0 && next + FOUR <= count; next += FOUR) {
        const float *by[FOUR];
        float *sums[FOUR], *totals[FOUR];
        for (i = 0; i < FOUR; i++) {
            by[i] = weights[pairs[next + i]];
            sums[i] = own->sums + pairs[next + i] * width;
            totals[i] = &own->total[pairs[next + i]];
        }
        wide_values(width, own->values, by, sums, totals);
    }
    for (; next < count; next++) {
        const float *by = weights[pairs[next]];
        for (cell = 0; cell < CELLS; cell++)
            own->total[pairs[next]] += by[cell];
        add_up(width, CELLS, own->values, IN_ORDER, by, own->sums + pairs[next] * width);
    }
}

/* Scales of the keys and all values of these cells */
AVX2 static void unpack(int blocks, int width, const struct cells *cells, const uint8_t *keys,
                        size_t keys_apart, const uint8_t *values, size_t values_apart,
                        struct space *own)
{
    int cell, block, part;
    for (cell = 0; cell < cells->count; cell++) {
        const uint8_t *key = keys + cells->at[cell] * keys_apart;
        const uint8_t *value = values + cells->at[cell] * values_apart;
        float *to = own->values + cell * width;
        for (block = 0; block < blocks; block++)
            own->key_scales[block][cell] = one(key + block * Q8_0_BYTES);
        for (block = 0; block < width / 32; block++, value += Q8_0_BYTES, to += 32) {
            const __m256 scale = _mm256_cvtph_ps(_mm_set1_epi16((short)bits_of(value)));
            UNROLLED
            for (part = 0; part < 32; part += 8)
                _mm256_store_ps(to + part, _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(
                    _mm_loadl_epi64((const __m128i *)(const void *)(value + 2 + part)))), scale));
        }
    }
}

/* What of a head's cells lies where, and how a pair's number says its head and row */
struct task {
    const struct tensor *q, *k, *v, *mask;
    struct tensor *to;
    float scale;
    int64_t rows, heads, shared; /* heads that read the same keys and values */
};

static const uint16_t *mask_of(const struct task *task, int64_t row, int64_t head, int64_t plane)
{
    const struct tensor *mask = task->mask;
    return mask == NULL ? NULL : (const uint16_t *)(const void *)(
        mask->data + row * mask->nb[1] + head % mask->ne[2] * mask->nb[2]
        + plane % mask->ne[3] * mask->nb[3]);
}

/* Which of the CELLS cells from `first` on a row sees; `plain` becomes false if its mask adds anything */
AVX2 static uint32_t seen_by(const uint16_t *mask, int64_t first, int64_t cells, bool *plain)
{
    const int count = (int)(cells - first < CELLS ? cells - first : CELLS);
    uint32_t seen = 0;
    int cell;
    if (mask == NULL)
        return count == CELLS ? 0xffffffff : (1u << count) - 1;
    if (count == CELLS) {
        const __m256i hidden = _mm256_set1_epi16((short)0xfc00);
        const __m256i a = load((const uint8_t *)(mask + first)), b = load((const uint8_t *)(mask + first + 16));
        const __m256i both = _mm256_packs_epi16(_mm256_cmpeq_epi16(a, hidden), _mm256_cmpeq_epi16(b, hidden));
        seen = ~(uint32_t)_mm256_movemask_epi8(_mm256_permute4x64_epi64(both, 0xd8));
        if (*plain && seen && !_mm256_testz_si256(
                _mm256_or_si256(_mm256_andnot_si256(_mm256_cmpeq_epi16(a, hidden), a),
                                _mm256_andnot_si256(_mm256_cmpeq_epi16(b, hidden), b)),
                _mm256_set1_epi8(-1)))
            *plain = false;
        return seen;
    }
    for (cell = 0; cell < count; cell++)
        if (mask[first + cell] != 0xfc00) {
            seen |= 1u << cell;
            *plain &= mask[first + cell] == 0;
        }
    return seen;
}

/* Heads that read the same keys, of a group of rows: the cells that are listed, and no more */
AVX2 static void some_cells(const struct task *task, int64_t plane, int pairs, const struct cells *cells,
                            struct space *own)
{
    const struct tensor *q = task->q, *k = task->k, *v = task->v;
    const int64_t source = own->heads[0] / task->shared;
    const int width = (int)v->ne[0], blocks = (int)k->ne[0] / 32;
    const uint8_t *keys = k->data + source * k->nb[2] + plane / (q->ne[3] / k->ne[3]) * k->nb[3];
    const uint8_t *values = v->data + source * v->nb[2] + plane / (q->ne[3] / v->ne[3]) * v->nb[3];
    const bool by_sixteens = wide && pairs >= LEAST_WIDE && cells->count == CELLS;
    float scores[PAIRS][CELLS];
    int weighed[PAIRS], count = 0, pair;
    unpack(blocks, width, cells, keys, k->nb[1], values, v->nb[1], own);
    if (by_sixteens)
        wide_scores(blocks, keys, k->nb[1], cells->at, own, pairs, task->scale, scores);
    for (pair = 0; pair < pairs; pair++) {
        if (cells->seen[pair] == 0)
            continue;
        if (!by_sixteens)
            products(blocks, cells, keys, k->nb[1], own, pair, task->scale, scores[pair]);
        if (weigh(cells, own, pair, scores[pair]))
            weighed[count++] = pair;
        else
            attend(width, cells, scores[pair], cells->seen[pair], cells->plain ? NULL : mask_of(
                task, own->rows[pair], own->heads[pair], plane), own, pair);
    }
    add_weighed(width, count, weighed, scores, own);
}

static void forget(struct cells *cells)
{
    memset(cells->seen, 0, sizeof cells->seen);
    cells->count = 0;
    cells->plain = true;
}

INLINE void put_query(const uint8_t *from, int8_t *to, uint8_t *lifted)
{
    const __m256i numbers = load(from);
    _mm256_storeu_si256((__m256i *)(void *)to, numbers);
    _mm256_storeu_si256((__m256i *)(void *)lifted,
                        _mm256_xor_si256(numbers, _mm256_set1_epi8((char)0x80)));
}

/* Pairs of a head and a row, PAIRS at most, whose heads read the same keys. */
AVX2 static void some_pairs(const struct task *task, int64_t plane, int pairs, struct space *own)
{
    const struct tensor *q = task->q;
    const int width = (int)task->v->ne[0], blocks = (int)task->k->ne[0] / 32;
    const uint16_t *masks[PAIRS];
    struct cells cells = {0, {0}, {0}, true};
    int64_t first;
    int pair, block;
    for (pair = 0; pair < pairs; pair++) {
        const int64_t row = own->rows[pair], head = own->heads[pair];
        uint8_t packed[MOST * Q8_0_BYTES];
        quantise((const float *)(const void *)(q->data + row * q->nb[1] + head * q->nb[2]
                                               + plane * q->nb[3]), packed, q->ne[0]);
        for (block = 0; block < blocks; block++) {
            own->query_scales[pair][block] = one(packed + block * Q8_0_BYTES);
            put_query(packed + block * Q8_0_BYTES + 2, &own->query[pair][32 * block],
                      &own->lifted[pair][32 * block]);
        }
        memset(own->sums + pair * width, 0, width * sizeof(float));
        own->total[pair] = 0.0f;
        own->most[pair] = -INFINITY;
        masks[pair] = mask_of(task, row, head, plane);
    }
    for (first = 0; first < task->k->ne[1]; first += CELLS) {
        uint32_t seen[PAIRS], any = 0;
        bool plain = true;
        for (pair = 0; pair < pairs; pair++) {
            seen[pair] = pair && masks[pair] == masks[pair - 1] ? seen[pair - 1]
                : seen_by(masks[pair], first, task->k->ne[1], &plain);
            any |= seen[pair];
        }
        if (any == 0xffffffff && cells.count == 0) { /* most of a long text */
            for (; cells.count < CELLS; cells.count++)
                cells.at[cells.count] = first + cells.count;
            memcpy(cells.seen, seen, sizeof seen);
            cells.plain = plain;
            some_cells(task, plane, pairs, &cells, own);
            forget(&cells);
            continue;
        }
        for (; any; any &= any - 1) {
            const int cell = __builtin_ctz(any);
            for (pair = 0; pair < pairs; pair++)
                cells.seen[pair] |= (seen[pair] >> cell & 1) << cells.count;
            cells.plain &= plain;
            cells.at[cells.count++] = first + cell;
            if (cells.count == CELLS) {
                some_cells(task, plane, pairs, &cells, own);
                forget(&cells);
            }
        }
    }
    if (cells.count)
        some_cells(task, plane, pairs, &cells, own);
    for (pair = 0; pair < pairs; pair++) {
        const float total = own->total[pair];
        scale_sums(width, total == 0.0f ? 0.0f : 1.0f / total, own->sums + pair * width);
        memcpy(task->to->data + ((plane * task->rows + own->rows[pair]) * task->heads + own->heads[pair])
               * task->to->nb[1], own->sums + pair * width, width * sizeof(float));
    }
}

/* Whether two rows see mostly the same cells, so that these are worth unpacking for both */
AVX2 static bool alike(const struct task *task, int64_t row, int64_t other, int64_t plane)
{
    const uint16_t *a = mask_of(task, row, 0, plane), *b = mask_of(task, other, 0, plane);
    int64_t first, both = 0, either = 0;
    bool plain = true;
    for (first = 0; a && first < task->k->ne[1]; first += CELLS) {
        const uint32_t x = seen_by(a, first, task->k->ne[1], &plain);
        const uint32_t y = seen_by(b, first, task->k->ne[1], &plain);
        both += __builtin_popcount(x & y);
        either += __builtin_popcount(x | y);
    }
    return 2 * both >= either;
}

enum { SCALE, PRECISION = 3 };

/* Whether the product is one that is made here: nothing but keys, values and a mask, no bias and no cap,
   and no parameter that versions to come may add. */
static bool fits(const struct tensor *to)
{
    const struct tensor *q = to->operands[0], *k = to->operands[1], *v = to->operands[2];
    const struct tensor *mask = to->operands[3];
    int i;
    for (i = 4; i < OPERANDS; i++)
        if (to->operands[i] != NULL)
            return false;
    for (i = 0; i < PARAMETERS; i++)
        if (i != SCALE && i != PRECISION && to->parameters[i] != 0)
            return false;
    return q->type == F32 && k->type == Q8_0 && v->type == Q8_0 && (!mask || mask->type == F16)
        && k->ne[0] <= WIDEST && v->ne[0] <= WIDEST && q->nb[0] == sizeof(float)
        && k->nb[0] == Q8_0_BYTES && v->nb[0] == Q8_0_BYTES && k->ne[2] == v->ne[2]
        && to->nb[1] == v->ne[0] * sizeof(float);
}

static float scale_of(const struct tensor *to)
{
    float scale;
    memcpy(&scale, &to->parameters[SCALE], sizeof scale);
    return scale;
}

static void attention(const struct team *team, struct tensor *to)
{
    struct task task = {to->operands[0], to->operands[1], to->operands[2], to->operands[3], to,
                        scale_of(to), 0, 0, 0};
    struct space *own = &of_thread;
    int64_t all, plane, from, until;
    __asm__("" : "+r"(own)); /* or GCC asks for the thread's address in the innermost loops */
    task.rows = task.q->ne[1];
    task.heads = task.q->ne[2];
    task.shared = task.heads / task.k->ne[2];
    all = task.rows * task.heads;
    for (plane = 0; plane < task.q->ne[3]; plane++)
        for (from = team->ith * all / team->nth; from < (team->ith + 1) * all / team->nth;
             from = until) {
            /* rows that see the same, as many as there is room for with the heads of one source */
            const int64_t end = (team->ith + 1) * all / team->nth, row = from / task.heads;
            int64_t rows = 1, source, head, other, start;
            const int64_t fit = PAIRS / task.shared;
            while (rows < fit && (row + rows) * task.heads < end && alike(&task, row, row + rows, plane))
                rows++;
            until = (row + rows) * task.heads < end ? (row + rows) * task.heads : end;
            for (source = 0; source < task.heads / task.shared; source++)
                for (start = 0; start < task.shared; start += PAIRS) {
                    int pairs = 0;
                    for (other = row; other < row + rows; other++)
                        for (head = source * task.shared + start;
                             head < (source + 1) * task.shared
                             && head < source * task.shared + start + PAIRS; head++)
                            if (other * task.heads + head >= from && other * task.heads + head < until) {
                                own->rows[pairs] = other;
                                own->heads[pairs++] = head;
                            }
                    if (pairs)
                        some_pairs(&task, plane, pairs, own);
                }
        }
}

#endif

void ggml_compute_forward_flash_attn_ext(const struct team *team, struct tensor *to)
{
#ifdef X86
    if (used && fits(to)) {
        attention(team, to);
        return;
    }
#endif
    theirs(team, to);
}

#ifdef X86

/* ggml's, for a trial: see below */
static struct {
    void *(*init)(struct memory);
    void (*free)(void *context);
    struct tensor *(*tensor)(void *context, int type, int64_t, int64_t, int64_t, int64_t);
    struct tensor *(*attention)(void *context, struct tensor *q, struct tensor *k, struct tensor *v,
                                struct tensor *mask, float scale, float bias, float cap);
    void *(*graph)(void *context);
    void (*expand)(void *graph, struct tensor *);
    int (*compute)(void *context, void *graph, int threads);
    void *(*data)(const struct tensor *);
} ggml;

enum { TRIED = 134, OPEN = 96, TRIED_ROWS = 3, HEADS = 6, SOURCES = 2, ROOM = 1 << 20 };

/* Random numbers; of masks the first OPEN cells are seen by all. */
static void fill(struct tensor *to, uint32_t *dice)
{
    int64_t i, number, count = to->ne[0] * to->ne[1] * to->ne[2];
    float some[32];
    for (i = 0; i < count; i++)
        if (to->type == F32) {
            ((float *)(void *)to->data)[i] = some_number(dice);
        } else if (to->type == F16) {
            ((uint16_t *)(void *)to->data)[i] = i % to->ne[0] < OPEN || roll(dice) % 4 ? 0 : 0xfc00;
        } else if (i % 32 == 0) {
            for (number = 0; number < 32; number++)
                some[number] = some_number(dice);
            quantise(some, to->data + i / 32 * Q8_0_BYTES, 32);
        }
}

/* Whether ours and theirs have the same bits for heads of this width. */
static bool agrees(int width, uint32_t *dice)
{
    static uint8_t room[ROOM];
    static float wanted[TRIED_ROWS * HEADS * WIDEST];
    const struct memory memory = {ROOM, room, false};
    const float scale = 0.125f;
    void *context = ggml.init(memory), *graph;
    struct tensor *q, *k, *v, *mask, *to;
    size_t bytes;
    bool same;
    if (context == NULL)
        return false;
    q = ggml.tensor(context, F32, width, TRIED_ROWS, HEADS, 1);
    k = ggml.tensor(context, Q8_0, width, TRIED, SOURCES, 1);
    v = ggml.tensor(context, Q8_0, width, TRIED, SOURCES, 1);
    mask = ggml.tensor(context, F16, TRIED, TRIED_ROWS, 1, 1);
    to = ggml.attention(context, q, k, v, mask, scale, 0.0f, 0.0f);
    bytes = (size_t)width * HEADS * TRIED_ROWS * sizeof(float);
    same = k->type == Q8_0 && k->ne[0] == width && k->ne[1] == TRIED && k->ne[2] == SOURCES
        && k->ne[3] == 1 && k->nb[0] == Q8_0_BYTES && k->nb[1] == (size_t)width / 32 * Q8_0_BYTES
        && k->nb[2] == TRIED * k->nb[1] && k->data == ggml.data(k) && to->data == ggml.data(to)
        && q->data == ggml.data(q) && to->operands[0] == q && to->operands[1] == k
        && to->operands[2] == v && to->operands[3] == mask && to->operands[4] == NULL
        && to->operands[OPERANDS - 1] == NULL && to->viewed == NULL && scale_of(to) == scale
        && to->ne[0] == width && to->ne[1] == HEADS && to->ne[2] == TRIED_ROWS;
    if (same) {
        const struct team alone = {0, 1, 0, NULL, NULL};
        fill(q, dice);
        fill(k, dice);
        fill(v, dice);
        fill(mask, dice);
        graph = ggml.graph(context);
        ggml.expand(graph, to);
        same = ggml.compute(context, graph, 1) == 0;
        memcpy(wanted, to->data, bytes);
        memset(to->data, 0, bytes);
        same = same && fits(to);
        if (same)
            attention(&alone, to);
        same = same && memcmp(wanted, to->data, bytes) == 0;
    }
    ggml.free(context);
    return same;
}

/* Whether expf is what `powers`, or on registers of 512 bits `wide_powers`, computes */
static bool knows_expf(bool on_512)
{
    float x[CELLS], found[CELLS];
    uint32_t dice = 1;
    int i, trial;
    for (trial = 0; trial < 64; trial++) {
        for (i = 0; i < CELLS; i++) { /* of all sizes down to LEAST_POWER */
            x[i] = LEAST_POWER * (float)(roll(&dice) % 1000 + 1) / (float)(1000 << roll(&dice) % 16);
            found[i] = x[i];
        }
        expf_known = true;
        if (on_512)
            wide_powers(found);
        else
            powers(CELLS, x, found);
        expf_known = false;
        for (i = 0; i < CELLS; i++)
            if (found[i] != expf(x[i]))
                return false;
    }
    return true;
}

static bool agree(void)
{
    static const int WIDTHS[] = {64, 96, 128, 256};
    uint32_t dice = 1;
    int i;
    for (i = 0; i < 4; i++)
        if (!agrees(WIDTHS[i], &dice))
            return false;
    return true;
}

#endif

/* Begins to make these products if `wanted` and their bits are the library's own; returns 1 then, 3 if on
   registers of 512 bits, else 0.
   functions, all needed: its ggml_compute_forward_flash_attn_ext, ggml_get_type_traits_cpu, ggml_init,
   ggml_free, ggml_new_tensor_4d, ggml_flash_attn_ext, ggml_new_graph, ggml_build_forward_expand,
   ggml_graph_compute_with_ctx, ggml_get_data. */
unsigned pipeinfer_short_attention(void *const *functions, bool wanted)
{
    used = wide = false;
    theirs = (forward *)functions[0];
#ifdef X86
    if (wanted && has_avx2()) {
        const struct traits *(*traits_of)(int) = (const struct traits *(*)(int))functions[1];
        bool found, may_widen;
        memcpy(&ggml, functions + 2, sizeof ggml);
        quantise = traits_of(Q8_0)->from_float;
        may_widen = has_wide_vnni() && knows_expf(true);
        expf_known = knows_expf(false);
        fused = true;
        found = agree();
        if (!found) {
            fused = false;
            found = agree();
        }
        wide = found && may_widen && expf_known;
        wide = wide && agree();
        tensors_known = found;
        used = found; /* not before: the library's own would be ours */
    }
#else
    (void)wanted, (void)quantise, (void)fused, (void)expf_known, (void)wide;
#endif
    return (unsigned)used | (unsigned)wide << 1;
}
