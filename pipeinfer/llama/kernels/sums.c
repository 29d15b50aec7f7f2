/* The all-reduce of a wide stage in memory that all of its slices share. See backends/shared_team.py.

   Each slice has a place in the region: a count of its sums (turns), the headers of its last turns,
   and two buffers of numbers that it uses alternately. Partial results are added in the order of the
   slices, so the sums have the same bits everywhere. While it waits, a slice calls `idle` at intervals
   and gives up if that says so. Called from llama.cpp's evaluation callback, without Python's lock. */

#ifdef __linux__
#define _GNU_SOURCE
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <limits.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#include "sums.h"

enum { RING = 64 };                       /* stored headers, of turns without numbers */
enum { YIELD_NS = 200000, NAP_NS = 2000000, ASK_NS = 5000000 };

struct header {
    int64_t run;
    int32_t place, verdict;
    uint32_t count, unused;
};

struct slice {
    _Atomic uint64_t turn;   /* the newest that it has published */
    _Atomic uint64_t done;   /* the newest whose numbers it has read */
    _Atomic uint32_t asleep; /* how many wait for `turn` */
    char apart[64 - 20];
    struct header headers[RING];
    float numbers[];
};

static struct slice *slice_of(const struct sums *sums, int32_t index)
{
    return (struct slice *)(sums->region + sums->bytes * (size_t)index);
}

size_t pipeinfer_sums_bytes(size_t capacity)
{
    size_t bytes = sizeof(struct slice) + 2 * capacity * sizeof(float);
    return (bytes + 63) / 64 * 64;
}

static uint64_t now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

static void relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

static void nap(struct slice *slice, uint64_t seen)
{
#if defined(__linux__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    const struct timespec most = {0, NAP_NS};
    atomic_fetch_add(&slice->asleep, 1);
    if (atomic_load(&slice->turn) == seen)
        syscall(SYS_futex, &slice->turn, FUTEX_WAIT, (uint32_t)seen, &most, NULL, 0);
    atomic_fetch_sub(&slice->asleep, 1);
#else
    const struct timespec most = {0, 50000};
    (void)slice, (void)seen;
    nanosleep(&most, NULL);
#endif
}

/* Wait until a slice's count has come so far; nonzero: give up. */
static int await(struct sums *sums, struct slice *slice, _Atomic uint64_t *count, uint64_t wanted)
{
    uint64_t start, asked, seen, time;
    if (atomic_load_explicit(count, memory_order_acquire) >= wanted)
        return 0;
    start = asked = now();
    for (;;) {
        for (int i = 0; i < 50; i++) {
            if (atomic_load_explicit(count, memory_order_acquire) >= wanted) {
                sums->waited_ns += now() - start;
                return 0;
            }
            relax();
        }
        time = now();
        if (time - start < sums->spin_ns)
            continue;
        if (time - start < sums->spin_ns + YIELD_NS || count != &slice->turn)
            sched_yield();
        else if ((seen = atomic_load(&slice->turn)) < wanted)
            nap(slice, seen);
        if (time - asked > ASK_NS) {
            asked = time;
            if (sums->idle != NULL && sums->idle()) {
                sums->waited_ns += time - start;
                return 1;
            }
        }
    }
}

/* Wait until no slice reads the data of `lag` turns before `turn`, which used the same place. */
static int await_room(struct sums *sums, uint64_t turn, uint64_t lag)
{
    if (turn <= lag)
        return 0;
    for (int32_t i = 0; i < sums->n; i++) {
        struct slice *slice = slice_of(sums, i);
        if (i != sums->me && await(sums, slice, &slice->done, turn - lag)) {
            sums->awaited = i;
            return 1;
        }
    }
    return 0;
}

static void publish(struct sums *sums, uint64_t turn, int32_t place, int32_t verdict,
                    uint32_t count)
{
    struct slice *own = slice_of(sums, sums->me);
    struct header *header = &own->headers[turn % RING];
    header->run = sums->run;
    header->place = place;
    header->verdict = verdict;
    header->count = count;
    atomic_store(&own->turn, turn);
#if defined(__linux__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    if (atomic_load(&own->asleep))
        syscall(SYS_futex, &own->turn, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
#endif
}

/* A turn is over for this slice. */
static int leave(struct sums *sums, uint64_t turn, int verdict)
{
    sums->turn = turn;
    atomic_store_explicit(&slice_of(sums, sums->me)->done, turn, memory_order_release);
    sums->verdict = verdict;
    return verdict;
}

/* --- shorter floats ------------------------------------------------------------------------ */

static uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

static float of_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static float to_bf16(float value)
{
    uint32_t bits = bits_of(value);
    if ((bits & 0x7fffffff) > 0x7f800000)
        return of_bits((bits | 0x400000) & 0xffff0000);
    return of_bits((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000);
}

/* The nearest float16, ties to even. */
static float to_f16(float value)
{
    uint32_t bits = bits_of(value), sign = bits & 0x80000000, size = bits & 0x7fffffff;
    if (size > 0x7f800000)
        return value;
    if (size >= 0x477ff000)  /* 65520 and more */
        return of_bits(sign | 0x7f800000);
    if (size < 0x38800000) {  /* below 2^-14: multiples of 2^-24, the distance of floats at 0.5 */
        float rounded = of_bits(size) + 0.5f;
        return of_bits(sign | bits_of(rounded - 0.5f));
    }
    size += 0xfff + (size >> 13 & 1);
    return of_bits(sign | (size & 0xffffe000));
}

static void shorten(int32_t kind, float *to, const float *from, size_t count)
{
    if (kind == SUM_F16)
        for (size_t i = 0; i < count; i++)
            to[i] = to_f16(from[i]);
    else if (kind == SUM_BF16)
        for (size_t i = 0; i < count; i++)
            to[i] = to_bf16(from[i]);
    else if (to != from)
        memcpy(to, from, count * sizeof(float));
}

static uint16_t bits_of_f16(float value)
{
    uint32_t bits = bits_of(to_f16(value)), size = bits & 0x7fffffff;
    uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
    if (size > 0x7f800000)
        return sign | 0x7e00;
    if (size == 0x7f800000)
        return sign | 0x7c00;
    if (size < 0x38800000)  /* a multiple of 2^-24 */
        return sign | (uint16_t)(of_bits(size) * 16777216.0f);
    return sign | (uint16_t)((size - 0x38000000) >> 13);
}

static float of_f16(uint16_t bits)
{
    uint32_t sign = (uint32_t)(bits & 0x8000) << 16, size = bits & 0x7fff;
    if (size >= 0x7c00)
        return of_bits(sign | 0x7f800000 | (size & 0x3ff) << 13);
    if (size < 0x400)
        return of_bits(sign | bits_of((float)size / 16777216.0f));
    return of_bits(sign | ((size << 13) + 0x38000000));
}

#if defined(__x86_64__)
#include <immintrin.h>

__attribute__((target("avx,f16c")))
static size_t narrow_fast(uint16_t *to, const float *from, size_t count)
{
    size_t i = 0;
    for (; i + 8 <= count; i += 8)
        _mm_storeu_si128((__m128i *)(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), 0));
    return i;
}

__attribute__((target("avx,f16c")))
static size_t widen_fast(float *to, const uint16_t *from, size_t count)
{
    size_t i = 0;
    for (; i + 8 <= count; i += 8)
        _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + i))));
    return i;
}

static int fast(void)
{
    return __builtin_cpu_supports("avx") && __builtin_cpu_supports("f16c");
}
#else
static size_t narrow_fast(uint16_t *to, const float *from, size_t count)
{
    (void)to, (void)from, (void)count;
    return 0;
}

static size_t widen_fast(float *to, const uint16_t *from, size_t count)
{
    (void)to, (void)from, (void)count;
    return 0;
}

static int fast(void)
{
    return 0;
}
#endif

/* Numbers as they travel, see team.shorten and team.lengthen. */
void pipeinfer_sums_narrow(int32_t kind, uint16_t *to, const float *from, size_t count)
{
    size_t i = 0;
    if (kind == SUM_F16) {
        if (fast())
            i = narrow_fast(to, from, count);
        for (; i < count; i++)
            to[i] = bits_of_f16(from[i]);
    } else {
        for (; i < count; i++)
            to[i] = (uint16_t)(bits_of(to_bf16(from[i])) >> 16);
    }
}

void pipeinfer_sums_widen(int32_t kind, float *to, const uint16_t *from, size_t count)
{
    size_t i = 0;
    if (kind == SUM_F16) {
        if (fast())
            i = widen_fast(to, from, count);
        for (; i < count; i++)
            to[i] = of_f16(from[i]);
    } else {
        for (; i < count; i++)
            to[i] = of_bits((uint32_t)from[i] << 16);
    }
}

/* --- turns --------------------------------------------------------------------------------- */

static int answer(struct sums *sums, uint64_t turn, int32_t index, int32_t place, uint32_t count)
{
    struct slice *slice = slice_of(sums, index);
    const struct header *header = &slice->headers[turn % RING];
    if (await(sums, slice, &slice->turn, turn)) {
        sums->awaited = index;
        return GIVEN_UP;
    }
    if (header->verdict == FAILED || header->run != sums->run) {
        sums->awaited = index;
        return header->verdict == FAILED ? FAILED : UNLIKE;
    }
    if (header->verdict != GO)
        return header->verdict;
    if (header->place != place || header->count != count) {
        sums->awaited = index;
        return UNLIKE;
    }
    return GO;
}

int pipeinfer_sum(struct sums *sums, float *data, size_t count, int32_t place)
{
    uint64_t turn = sums->turn + 1;
    struct slice *own = slice_of(sums, sums->me), *leader = slice_of(sums, sums->leader);
    float *mine = own->numbers + (turn & 1) * sums->capacity;
    int verdict;

    if (sums->alone)
        return GO;
    if (count > sums->capacity)
        return leave(sums, turn, UNLIKE);
    if (sums->me == sums->leader) {
        if (sums->look != NULL && sums->looks && (place & 1)
            && (place / 2 + 1) % sums->layers == 0 && sums->look()) {
            if (await_room(sums, turn, RING))
                return leave(sums, turn, GIVEN_UP);
            publish(sums, turn, place, STOP, 0);
            return leave(sums, turn, STOP);
        }
    } else if (atomic_load_explicit(&leader->turn, memory_order_acquire) >= turn) {
        verdict = leader->headers[turn % RING].verdict;
        if (verdict != GO && leader->headers[turn % RING].run == sums->run)
            return leave(sums, turn, verdict);
    }
    if (await_room(sums, turn, 2))
        return leave(sums, turn, GIVEN_UP);
    shorten(sums->kind, mine, data, count);
    publish(sums, turn, place, GO, (uint32_t)count);
    if ((verdict = answer(sums, turn, sums->leader, place, (uint32_t)count)) != GO)
        return leave(sums, turn, verdict);
    for (int32_t i = 0; i < sums->n; i++)
        if (i != sums->leader && (verdict = answer(sums, turn, i, place, (uint32_t)count)) != GO)
            return leave(sums, turn, verdict);
    for (int32_t i = 0; i < sums->n; i++) {
        const float *part = slice_of(sums, i)->numbers + (turn & 1) * sums->capacity;
        if (i == 0)
            memcpy(data, part, count * sizeof(float));
        else
            for (size_t k = 0; k < count; k++)
                data[k] += part[k];
    }
    shorten(sums->kind, data, data, count);
    sums->count++;
    return leave(sums, turn, GO);
}

int pipeinfer_sums_gather(struct sums *sums, const float *data, size_t count, int32_t place,
                          float *out, const size_t *starts, const size_t *counts)
{
    uint64_t turn = sums->turn + 1;
    struct slice *own = slice_of(sums, sums->me);

    if (count > sums->capacity)
        return leave(sums, turn, UNLIKE);
    if (await_room(sums, turn, 2))
        return leave(sums, turn, GIVEN_UP);
    memcpy(own->numbers + (turn & 1) * sums->capacity, data, count * sizeof(float));
    publish(sums, turn, place, GO, (uint32_t)count);
    if (out == NULL)
        return leave(sums, turn, GO);
    for (int32_t i = 0; i < sums->n; i++) {
        int verdict = answer(sums, turn, i, place, (uint32_t)counts[i]);
        if (verdict != GO)
            return leave(sums, turn, verdict);
        memcpy(out + starts[i], slice_of(sums, i)->numbers + (turn & 1) * sums->capacity,
               counts[i] * sizeof(float));
    }
    return leave(sums, turn, GO);
}

int pipeinfer_sums_say(struct sums *sums, int32_t verdict)
{
    uint64_t turn = sums->turn + 1;
    if (await_room(sums, turn, RING))
        return leave(sums, turn, GIVEN_UP);
    publish(sums, turn, -1, verdict, 0);
    return leave(sums, turn, GO);
}

/* Whether the leader has already published that the run is to be skipped. */
int pipeinfer_sums_skipped(struct sums *sums)
{
    uint64_t turn = sums->turn + 1;
    struct slice *leader = slice_of(sums, sums->leader);
    if (atomic_load_explicit(&leader->turn, memory_order_acquire) < turn)
        return 0;
    return leader->headers[turn % RING].verdict == SKIP
        && leader->headers[turn % RING].run == sums->run;
}

void pipeinfer_sums_pass(struct sums *sums)
{
    leave(sums, sums->turn + 1, GO);
}
