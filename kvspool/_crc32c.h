/* CRC32C (Castagnoli, reflected polynomial 0x82f63b78), as RFC 3720 appendix B.4 defines it.
 *
 * Every function takes and returns the raw register: begin with all ones, end with its complement.
 * On x86-64 with SSE4.2 and on arm64 with CRC32 the instruction is used, three streams at a time where the
 * data is long, because the instruction has a latency of three cycles and a throughput of one; elsewhere
 * eight tables ("slicing by eight", Kounavis and Berry 2005). */
#ifndef KVSPOOL_CRC32C_H
#define KVSPOOL_CRC32C_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define KV_POLYNOMIAL 0x82f63b78u
#define KV_STREAM 1024 /* bytes of one of the three streams; a multiple of 8 */

static uint32_t kv_tables[8][256]; /* kv_tables[k][b]: byte b followed by k zero bytes */
static uint32_t kv_shift[4][256];  /* the register after KV_STREAM zero bytes, a byte of it at a time */
static int kv_hardware = 0;

static inline uint64_t kv_load64(const uint8_t *at) {
    uint64_t word;
    memcpy(&word, at, 8);
    return word;
}

static uint32_t kv_crc32c_tables(uint32_t state, const uint8_t *at, size_t length) {
    while (length >= 8) {
        uint64_t word = kv_load64(at) ^ state;
        state = kv_tables[7][word & 0xff] ^ kv_tables[6][(word >> 8) & 0xff]
              ^ kv_tables[5][(word >> 16) & 0xff] ^ kv_tables[4][(word >> 24) & 0xff]
              ^ kv_tables[3][(word >> 32) & 0xff] ^ kv_tables[2][(word >> 40) & 0xff]
              ^ kv_tables[1][(word >> 48) & 0xff] ^ kv_tables[0][word >> 56];
        at += 8;
        length -= 8;
    }
    while (length--) state = (state >> 8) ^ kv_tables[0][(state ^ *at++) & 0xff];
    return state;
}

#if defined(__x86_64__) && defined(__GNUC__)
#include <nmmintrin.h>
#define KV_TARGET __attribute__((target("sse4.2")))
#define KV_STEP64(state, word) ((uint32_t)_mm_crc32_u64((state), (word)))
#define KV_STEP8(state, byte) (_mm_crc32_u8((state), (byte)))
static int kv_detect(void) { return __builtin_cpu_supports("sse4.2"); }
#elif defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>
#define KV_TARGET
#define KV_STEP64(state, word) (__crc32cd((state), (word)))
#define KV_STEP8(state, byte) (__crc32cb((state), (byte)))
static int kv_detect(void) { return 1; }
#endif

#ifdef KV_TARGET
static inline uint32_t kv_after_stream(uint32_t state) {
    return kv_shift[0][state & 0xff] ^ kv_shift[1][(state >> 8) & 0xff]
         ^ kv_shift[2][(state >> 16) & 0xff] ^ kv_shift[3][state >> 24];
}

KV_TARGET static uint32_t kv_crc32c_hardware(uint32_t state, const uint8_t *at, size_t length) {
    while (length >= 3 * KV_STREAM) {
        uint32_t first = state, second = 0, third = 0;
        for (size_t i = 0; i < KV_STREAM; i += 8) {
            first = KV_STEP64(first, kv_load64(at + i));
            second = KV_STEP64(second, kv_load64(at + KV_STREAM + i));
            third = KV_STEP64(third, kv_load64(at + 2 * KV_STREAM + i));
        }
        state = kv_after_stream(kv_after_stream(first) ^ second) ^ third;
        at += 3 * KV_STREAM;
        length -= 3 * KV_STREAM;
    }
    while (length >= 8) {
        state = KV_STEP64(state, kv_load64(at));
        at += 8;
        length -= 8;
    }
    while (length--) state = KV_STEP8(state, *at++);
    return state;
}
#endif

static uint32_t kv_crc32c(uint32_t state, const uint8_t *at, size_t length) {
#ifdef KV_TARGET
    if (kv_hardware) return kv_crc32c_hardware(state, at, length);
#endif
    return kv_crc32c_tables(state, at, length);
}

__attribute__((constructor)) static void kv_crc32c_prepare(void) {
    for (int byte = 0; byte < 256; byte++) {
        uint32_t state = (uint32_t)byte;
        for (int bit = 0; bit < 8; bit++) state = (state >> 1) ^ ((state & 1) ? KV_POLYNOMIAL : 0);
        kv_tables[0][byte] = state;
    }
    for (int k = 1; k < 8; k++)
        for (int byte = 0; byte < 256; byte++) {
            uint32_t state = kv_tables[k - 1][byte];
            kv_tables[k][byte] = (state >> 8) ^ kv_tables[0][state & 0xff];
        }
#ifdef KV_TARGET
    kv_hardware = kv_detect();
    static const uint8_t zeros[KV_STREAM];
    for (int k = 0; k < 4; k++)
        for (int byte = 0; byte < 256; byte++)
            kv_shift[k][byte] = kv_crc32c_tables((uint32_t)byte << (8 * k), zeros, KV_STREAM);
#endif
}

#endif
