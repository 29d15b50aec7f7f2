/* How long one look of a thread takes that waits in libgomp's loop (do_spin, cpu_relax): from 4 ns on
   old Xeons over 25 on Zen 3 to 45 on newer ones, and about one where the loop has no instruction
   that pauses. See pipeinfer/waiting.py. */

#include <stdint.h>
#include <time.h>

enum { LOOKS = 2000, TRIES = 5 };

double pipeinfer_look_ns(void)
{
    static volatile int value;
    double best = 0;
    int try, look;

    for (try = 0; try < TRIES; try++) {
        struct timespec from, to;
        double ns;

        clock_gettime(CLOCK_MONOTONIC, &from);
        for (look = 0; look < LOOKS && value == 0; look++) {
#if defined(__x86_64__) || defined(__i386__)
            __builtin_ia32_pause();
#else
            __asm__ __volatile__("" : : : "memory");
#endif
        }
        clock_gettime(CLOCK_MONOTONIC, &to);
        ns = (double)(to.tv_sec - from.tv_sec) * 1e9 + (double)(to.tv_nsec - from.tv_nsec);
        if (try == 0 || ns < best)  /* other programs only make it longer */
            best = ns;
    }
    return best / LOOKS;
}
