/* What the machine itself takes for the pieces of an append: nothing can be faster than its floor.
 *
 * tools/bench compiles this file and calls it; each function does a thing `count` times and returns the seconds that took. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "../kvspool/_crc32c.h"

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static void set_lock(int fd, short kind) {
    struct flock request = {0};
    request.l_type = kind;
    request.l_whence = SEEK_SET;
    request.l_len = 1;
    fcntl(fd, F_OFD_SETLK, &request);
}

/* Take and release the lock on byte 0. */
double lock_pairs(int fd, long count) {
    double start = now();
    for (long i = 0; i < count; i++) {
        set_lock(fd, F_WRLCK);
        set_lock(fd, F_UNLCK);
    }
    return now() - start;
}

/* Copy `size` bytes into a ring of `capacity` bytes, one behind the other; with a CRC32C of them if `sum`. */
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
