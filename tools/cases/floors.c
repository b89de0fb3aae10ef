/* The time that the machine itself takes for the copy in an append.
 *
 * tools/bench compiles this file and calls it; the function copies `count` times and returns the seconds that this took. */
#define _GNU_SOURCE
#include <stdint.h>
#include <string.h>
#include <time.h>

#include "../../kvspool/kernel/crc32c.h"

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

/* Copy `size` bytes into a ring of `capacity` bytes, one after the other; with a CRC32C of them if `sum`. */
double copies(uint8_t *ring, long capacity, const uint8_t *source, long size, long count, int sum) {
    volatile uint32_t sink = 0;
    long at = 0;
    double start = now();
    for (long i = 0; i < count; i++) {
        if (at + size > capacity) at = 0;
        if (sum) sink = kv_crc32c(0xffffffffu, source, size);
        memcpy(ring + at, source, size);
        at += size;
    }
    (void)sink;
    return now() - start;
}
