/* The interface between sums.c, layer_filter.c and shared_team.py. */

#ifndef PIPEINFER_SUMS_H
#define PIPEINFER_SUMS_H

#include <stddef.h>
#include <stdint.h>

/* The first four are core.messages.Verdict. GIVEN_UP: `idle` ended the waiting;
   UNLIKE: members are at different sums. */
enum { GO, SKIP, STOP, FAILED, GIVEN_UP, UNLIKE };
enum { SUM_F32, SUM_F16, SUM_BF16 };

/* One slice's side of the sums: struct Sums in shared_team.py. */
struct sums {
    char *region;
    size_t bytes;       /* of each slice's place in the region */
    size_t capacity;    /* numbers in one buffer */
    int32_t n, me, leader, kind;
    int32_t alone;      /* no other slice: the partial result is the sum */
    int32_t looks;      /* whether the leader calls `look` */
    int32_t layers;     /* ... at the end of each so many */
    int32_t verdict;    /* of the last turn */
    int32_t awaited;    /* the slice that it is about, where something went wrong */
    int32_t unused;
    uint64_t turn;      /* the last one */
    int64_t run;
    uint64_t spin_ns;   /* before a waiting thread yields the processor */
    int (*idle)(void);  /* waiting takes long: nonzero to give up */
    int (*look)(void);  /* the leader: nonzero to stop */
    uint64_t waited_ns, count;
};

int pipeinfer_sum(struct sums *sums, float *data, size_t count, int32_t place);

#endif
