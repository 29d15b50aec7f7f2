/* Puts large buffers of llama.cpp into huge pages: weights that it has repacked or reads without mmap,
   and the KV cache. They are read once for every token, and with pages of 4 KiB the translation of
   addresses takes long. Many systems use huge pages only on request (madvise). This function replaces
   llama.cpp's own through the dynamic linker, as in short_runs.c. */

#define _GNU_SOURCE
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>

enum { HUGE = 2 << 20, LARGE = 4 * HUGE };

typedef void *allocator(size_t size);

static allocator *theirs;

void *ggml_aligned_malloc(size_t size)
{
    void *found = NULL;
    if (theirs)
        found = theirs(size);
    else if (size == 0 || posix_memalign(&found, 64, size) != 0)
        return NULL;
#ifdef MADV_HUGEPAGE
    if (found && size >= LARGE) {
        const uintptr_t from = ((uintptr_t)found + HUGE - 1) / HUGE * HUGE;
        const uintptr_t until = ((uintptr_t)found + size) / HUGE * HUGE;
        madvise((void *)from, until - from, MADV_HUGEPAGE); /* a wish: without them it is as it was */
    }
#endif
    return found;
}

/* llama.cpp's own, which does the rest. */
void pipeinfer_huge_pages(allocator *own) { theirs = own; }
