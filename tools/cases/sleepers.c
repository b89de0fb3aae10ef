/* One futex word that many readers sleep on, and a writer that wakes all of them by one broadcast if any sleeps.
 *
 *     sleepers READERS RECORDS GAP
 *
 * The writer copies 100 bytes and advances the word, RECORDS times, GAP microseconds apart. The program prints the median time that
 * this took the writer, and the median time until a reader had the record, both in nanoseconds. */
#define _GNU_SOURCE
#include <linux/futex.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

struct record {
    int64_t sent;
    char value[104];
};

struct shared {
    _Atomic uint32_t word; /* how many records there are */
    _Atomic uint32_t sleepers;
    _Atomic uint32_t ready;
    struct record records[];
};

static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ll + t.tv_nsec;
}

static int smaller_first(const void *a, const void *b) {
    int64_t one = *(const int64_t *)a, other = *(const int64_t *)b;
    return (one > other) - (one < other);
}

static int64_t median(int64_t *values, long count) {
    qsort(values, count, sizeof *values, smaller_first);
    return values[count / 2];
}

static void sleep_until_changed(struct shared *log, uint32_t seen) {
    atomic_fetch_add(&log->sleepers, 1);
    syscall(SYS_futex, &log->word, FUTEX_WAIT, seen, NULL, NULL, 0);
    atomic_fetch_sub(&log->sleepers, 1);
}

/* Read all records, and store the median of the times that they took. */
static void read_all(struct shared *log, uint32_t records, int64_t *latencies, int64_t *result) {
    char value[100];
    atomic_fetch_add(&log->ready, 1);
    for (uint32_t next = 0; next < records; next++) {
        uint32_t seen;
        while ((seen = atomic_load(&log->word)) == next) sleep_until_changed(log, seen);
        memcpy(value, log->records[next].value, sizeof value);
        latencies[next] = now() - log->records[next].sent;
    }
    *result = median(latencies, records);
}

/* Append one record, and return how long that took. */
static int64_t append(struct shared *log, const char *value) {
    uint32_t next = atomic_load(&log->word);
    int64_t start = now();
    log->records[next].sent = start;
    memcpy(log->records[next].value, value, 100);
    atomic_store(&log->word, next + 1);
    if (atomic_load(&log->sleepers)) syscall(SYS_futex, &log->word, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
    return now() - start;
}

static void *shared_memory(size_t size) {
    void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
        perror("mmap");
        exit(1);
    }
    return memory;
}

int main(int count, char **arguments) {
    if (count != 4) return 2;
    long readers = atol(arguments[1]), records = atol(arguments[2]), gap = atol(arguments[3]);
    struct shared *log = shared_memory(sizeof *log + records * sizeof(struct record));
    int64_t *medians = shared_memory(readers * sizeof *medians), *times = calloc(records, sizeof *times);
    for (long reader = 0; reader < readers; reader++) {
        pid_t child = fork();
        if (child < 0) {
            perror("fork");
            return 1;
        }
        if (child == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            read_all(log, records, times, medians + reader);
            _exit(0);
        }
    }
    char value[100] = {0};
    struct timespec pause = {0, gap * 1000};
    while (atomic_load(&log->ready) < readers) nanosleep(&pause, NULL);
    for (long i = 0; i < records; i++) {
        nanosleep(&pause, NULL);
        times[i] = append(log, value);
    }
    while (wait(NULL) > 0) {}
    printf("%lld %lld\n", (long long)median(times, records), (long long)median(medians, readers));
    return 0;
}
