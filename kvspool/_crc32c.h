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
#define KV_PIECE 12288 /* bytes that are copied at once; a multiple of 3 * KV_STREAM */
#define KV_SHORT 128   /* and where there are fewer than three of those */

static uint32_t kv_tables[8][256]; /* kv_tables[k][b]: byte b followed by k zero bytes */
static uint32_t kv_shift[4][256];  /* the register after KV_STREAM zero bytes, a byte of it at a time */
static uint32_t kv_short_shift[4][256]; /* and after KV_SHORT of them */
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
#define KV_STEP64(state, word) (_mm_crc32_u64((state), (word)))
#define KV_STEP32(state, word) (_mm_crc32_u32((uint32_t)(state), (word)))
#define KV_STEP8(state, byte) (_mm_crc32_u8((uint32_t)(state), (byte)))
static int kv_detect(void) { return __builtin_cpu_supports("sse4.2"); }
#elif defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>
#define KV_TARGET
#define KV_STEP64(state, word) (__crc32cd((uint32_t)(state), (word)))
#define KV_STEP32(state, word) (__crc32cw((uint32_t)(state), (word)))
#define KV_STEP8(state, byte) (__crc32cb((uint32_t)(state), (byte)))
static int kv_detect(void) { return 1; }
#endif

#ifdef KV_TARGET
/* The register after as many zero bytes as a stream has. */
static inline uint32_t kv_after(uint32_t shift[4][256], uint64_t state) {
    return shift[0][state & 0xff] ^ shift[1][(state >> 8) & 0xff]
         ^ shift[2][(state >> 16) & 0xff] ^ shift[3][(state >> 24) & 0xff];
}

/* Three streams of `size` bytes, one behind the other. */
KV_TARGET static inline uint64_t kv_three(uint64_t state, const uint8_t *at, size_t size, uint32_t shift[4][256]) {
    uint64_t second = 0, third = 0;
    for (size_t i = 0; i < size; i += 8) {
        state = KV_STEP64(state, kv_load64(at + i));
        second = KV_STEP64(second, kv_load64(at + size + i));
        third = KV_STEP64(third, kv_load64(at + 2 * size + i));
    }
    return kv_after(shift, kv_after(shift, state) ^ second) ^ third;
}

KV_TARGET static uint32_t kv_crc32c_hardware(uint32_t before, const uint8_t *at, size_t length) {
    uint64_t state = before; /* 64 bits, so that no step has to clear the upper half again */
    for (; length >= 3 * KV_STREAM; at += 3 * KV_STREAM, length -= 3 * KV_STREAM) state = kv_three(state, at, KV_STREAM, kv_shift);
    for (; length >= 3 * KV_SHORT; at += 3 * KV_SHORT, length -= 3 * KV_SHORT) state = kv_three(state, at, KV_SHORT, kv_short_shift);
    for (; length >= 8; at += 8, length -= 8) state = KV_STEP64(state, kv_load64(at));
    if (length >= 4) {
        uint32_t word;
        memcpy(&word, at, 4);
        state = KV_STEP32(state, word);
        at += 4;
        length -= 4;
    }
    while (length--) state = KV_STEP8(state, *at++);
    return (uint32_t)state;
}
#endif

static uint32_t kv_crc32c(uint32_t state, const uint8_t *at, size_t length) {
#ifdef KV_TARGET
    if (kv_hardware) return kv_crc32c_hardware(state, at, length);
#endif
    return kv_crc32c_tables(state, at, length);
}

#ifdef KV_TARGET
/* Each word goes through a register: one pass, and no wait for a copy that has not left the processor yet. */
KV_TARGET static uint32_t kv_crc32c_copy_hardware(uint32_t before, uint8_t *to, const uint8_t *at, size_t length) {
    uint64_t state = before;
    for (; length >= 8; at += 8, to += 8, length -= 8) {
        uint64_t word = kv_load64(at);
        memcpy(to, &word, 8);
        state = KV_STEP64(state, word);
    }
    if (length >= 4) {
        uint32_t word;
        memcpy(&word, at, 4);
        memcpy(to, &word, 4);
        state = KV_STEP32(state, word);
        at += 4;
        to += 4;
        length -= 4;
    }
    for (; length; at++, to++, length--) state = KV_STEP8(state, *to = *at);
    return (uint32_t)state;
}
#endif

#ifdef KV_TARGET
KV_TARGET static uint32_t kv_crc32c_head_hardware(uint64_t state, uint64_t first, uint64_t second, uint64_t third, uint32_t fourth) {
    return (uint32_t)KV_STEP32(KV_STEP64(KV_STEP64(KV_STEP64(state, first), second), third), fourth);
}
#endif

/* The register after the first 28 bytes of a frame. */
static uint32_t kv_crc32c_head(uint32_t state, uint64_t first, uint64_t second, uint64_t third, uint32_t fourth) {
#ifdef KV_TARGET
    if (kv_hardware) return kv_crc32c_head_hardware(state, first, second, third, fourth);
#endif
    uint64_t words[4] = {first, second, third, fourth};
    return kv_crc32c_tables(state, (const uint8_t *)words, 28);
}

/* Copies, and returns the register after the bytes that were copied. Whichever side others may write to is touched once for each byte:
 * short ones go through a register; long ones in pieces that stay in the cache, with the checksum taken from the private side. */
static uint32_t kv_crc32c_copy(uint32_t state, uint8_t *to, const uint8_t *at, size_t length, int is_from_private) {
#ifdef KV_TARGET
    if (kv_hardware && length < 3 * KV_SHORT) return kv_crc32c_copy_hardware(state, to, at, length);
#endif
    while (length) {
        size_t piece = length < KV_PIECE ? length : KV_PIECE;
        memcpy(to, at, piece);
        state = kv_crc32c(state, is_from_private ? at : to, piece);
        at += piece;
        to += piece;
        length -= piece;
    }
    return state;
}

#ifdef KV_TARGET
/* Short content goes 32 bytes at a time, without a call between the header, the key and the value. */
KV_TARGET static inline uint64_t kv_copy_short(uint64_t state, uint8_t *to, const uint8_t *at, size_t length) {
    for (; length >= 32; at += 32, to += 32, length -= 32) {
        uint64_t a = kv_load64(at), b = kv_load64(at + 8), c = kv_load64(at + 16), d = kv_load64(at + 24);
        memcpy(to, &a, 8);
        memcpy(to + 8, &b, 8);
        memcpy(to + 16, &c, 8);
        memcpy(to + 24, &d, 8);
        state = KV_STEP64(KV_STEP64(KV_STEP64(KV_STEP64(state, a), b), c), d);
    }
    for (; length >= 8; at += 8, to += 8, length -= 8) {
        uint64_t word = kv_load64(at);
        memcpy(to, &word, 8);
        state = KV_STEP64(state, word);
    }
    if (length >= 4) {
        uint32_t word;
        memcpy(&word, at, 4);
        memcpy(to, &word, 4);
        state = KV_STEP32(state, word);
        at += 4;
        to += 4;
        length -= 4;
    }
    for (; length; at++, to++, length--) state = KV_STEP8(state, *to = *at);
    return state;
}

KV_TARGET static uint32_t kv_copy_out_hardware(uint64_t state, uint8_t *to, const uint8_t *at, size_t length) {
    return (uint32_t)kv_copy_short(state, to, at, length);
}

KV_TARGET static uint32_t kv_copy_frame_hardware(uint64_t state, uint64_t lengths, uint64_t sequence, uint64_t timestamp, uint64_t tags,
                                                 const uint8_t *at, uint8_t *key, size_t key_length, uint8_t *value) {
    size_t content = lengths >> 32;
    state = KV_STEP32(KV_STEP64(KV_STEP64(KV_STEP64(state, lengths), sequence), timestamp), (uint32_t)tags);
    if (key_length) {
        state = kv_copy_short(state, key, at, key_length);
        at += key_length;
        content -= key_length;
    }
    return (uint32_t)kv_copy_short(state, value, at, content);
}
#endif

/* Copies out of the ring, and returns the register after the private copy. */
static inline uint32_t kv_copy_out(uint32_t state, uint8_t *to, const uint8_t *at, size_t length) {
#ifdef KV_TARGET
    if (kv_hardware && length < 3 * KV_SHORT) return kv_copy_out_hardware(state, to, at, length);
#endif
    return kv_crc32c_copy(state, to, at, length, 0);
}

/* Copies a frame's key and value out of the ring, and returns the register after its header, as it was read, and the private copies. */
static inline uint32_t kv_copy_frame(uint32_t state, uint64_t lengths, uint64_t sequence, uint64_t timestamp, uint64_t tags,
                                     const uint8_t *at, uint8_t *key, size_t key_length, uint8_t *value) {
#ifdef KV_TARGET
    if (kv_hardware && lengths >> 32 < 3 * KV_SHORT)
        return kv_copy_frame_hardware(state, lengths, sequence, timestamp, tags, at, key, key_length, value);
#endif
    state = kv_crc32c_head(state, lengths, sequence, timestamp, (uint32_t)tags);
    state = kv_crc32c_copy(state, key, at, key_length, 0);
    return kv_crc32c_copy(state, value, at + key_length, (lengths >> 32) - key_length, 0);
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
        for (int byte = 0; byte < 256; byte++) {
            kv_shift[k][byte] = kv_crc32c_tables((uint32_t)byte << (8 * k), zeros, KV_STREAM);
            kv_short_shift[k][byte] = kv_crc32c_tables((uint32_t)byte << (8 * k), zeros, KV_SHORT);
        }
#endif
}

#endif
