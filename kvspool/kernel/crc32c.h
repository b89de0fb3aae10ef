/* CRC32C (Castagnoli, reflected polynomial 0x82f63b78), as RFC 3720 appendix B.4 defines it, and frames whose checksum it is.
 *
 * Every function takes and returns the raw register: begin with all ones, end with its complement.
 * On x86-64 with SSE4.2 and PCLMULQDQ, and on arm64 with CRC32, the instruction is used. It has a latency of three cycles and a
 * throughput of one, so long data is cut into three streams whose registers are joined at the end: V. Gopal et al., "Fast CRC
 * Computation for iSCSI Polynomial Using CRC32 Instruction", Intel, 2011. Elsewhere eight tables are used ("slicing by eight",
 * Kounavis and Berry 2005). */
#ifndef KVSPOOL_CRC32C_H
#define KVSPOOL_CRC32C_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define KV_POLYNOMIAL 0x82f63b78u
#define KV_STREAM 128 /* most bytes of each of the three streams, a multiple of 8: few, so that the memory is still passed over in order */

static uint32_t kv_tables[8][256]; /* kv_tables[k][b]: byte b followed by k zero bytes */
static uint32_t kv_powers[KV_STREAM / 4 + 1]; /* kv_powers[n]: multiply by it and step over the product: n zero words more */
static int kv_hardware = 0;

/* Loads a word once: the compiler can't go back to memory for it, and what is copied is what is summed, also while another process
 * writes there. */
#define KV_ONCE(word) __asm__("" : "+r"(word))

static inline uint64_t kv_load64(const uint8_t *at) {
    uint64_t word;
    memcpy(&word, at, 8);
    KV_ONCE(word);
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
#include <wmmintrin.h>
#define KV_TARGET __attribute__((target("sse4.2,pclmul")))
#define KV_STEP64(state, word) (_mm_crc32_u64((state), (word)))
#define KV_STEP32(state, word) (_mm_crc32_u32((uint32_t)(state), (word)))
#define KV_STEP8(state, byte) (_mm_crc32_u8((uint32_t)(state), (byte)))
#define KV_LONG 192 /* bytes from which on three streams are faster than one */
static int kv_detect(void) { return __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul"); }
/* The product of two polynomials of 32 bits. */
KV_TARGET static inline uint64_t kv_product(uint64_t a, uint64_t b) {
    return (uint64_t)_mm_cvtsi128_si64(_mm_clmulepi64_si128(_mm_cvtsi64_si128((int64_t)a), _mm_cvtsi64_si128((int64_t)b), 0));
}
#elif defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>
#define KV_TARGET
#define KV_STEP64(state, word) (__crc32cd((uint32_t)(state), (word)))
#define KV_STEP32(state, word) (__crc32cw((uint32_t)(state), (word)))
#define KV_STEP8(state, byte) (__crc32cb((uint32_t)(state), (byte)))
#define KV_LONG 1536
static int kv_detect(void) { return 1; }
static inline uint64_t kv_product(uint64_t a, uint64_t b) {
    uint64_t product = 0;
    for (int bit = 0; bit < 32; bit++) product ^= (b << bit) & -(a >> bit & 1);
    return product;
}
#endif

#ifdef KV_TARGET
/* All three go through registers, each word once, and are stored at `to` unless that is NULL: one pass, and no load waits for a store.
 * A register has 64 bits, so that no step has to clear its upper half. */
#define KV_INLINE static inline __attribute__((always_inline))

/* Three streams of `size` bytes, one after the other. */
KV_TARGET KV_INLINE uint64_t kv_three(uint64_t first, uint8_t *to, const uint8_t *at, size_t size) {
    uint64_t second = 0, third = 0;
    for (size_t i = 0; i < size; i += 8) {
        uint64_t a = kv_load64(at + i), b = kv_load64(at + size + i), c = kv_load64(at + 2 * size + i);
        if (to) {
            memcpy(to + i, &a, 8);
            memcpy(to + size + i, &b, 8);
            memcpy(to + 2 * size + i, &c, 8);
        }
        first = KV_STEP64(first, a);
        second = KV_STEP64(second, b);
        third = KV_STEP64(third, c);
    }
    return KV_STEP64(0, kv_product(first, kv_powers[size / 4]) ^ kv_product(second, kv_powers[size / 8])) ^ third;
}

KV_TARGET KV_INLINE uint32_t kv_one(uint64_t state, uint8_t *to, const uint8_t *at, size_t length) {
    size_t i = 0;
    for (; i + 32 <= length; i += 32)
        for (size_t k = i; k < i + 32; k += 8) {
            uint64_t word = kv_load64(at + k);
            if (to) memcpy(to + k, &word, 8);
            state = KV_STEP64(state, word);
        }
    for (; i + 8 <= length; i += 8) {
        uint64_t word = kv_load64(at + i);
        if (to) memcpy(to + i, &word, 8);
        state = KV_STEP64(state, word);
    }
    if (i + 4 <= length) {
        uint32_t word;
        memcpy(&word, at + i, 4);
        KV_ONCE(word);
        if (to) memcpy(to + i, &word, 4);
        state = KV_STEP32(state, word);
        i += 4;
    }
    for (; i < length; i++) {
        uint32_t byte = at[i];
        KV_ONCE(byte);
        if (to) to[i] = (uint8_t)byte;
        state = KV_STEP8(state, (uint8_t)byte);
    }
    return (uint32_t)state;
}

KV_TARGET KV_INLINE uint32_t kv_long(uint64_t state, uint8_t *to, const uint8_t *at, size_t length) {
    while (length >= KV_LONG) {
        size_t size = length < 3 * KV_STREAM ? length / 24 * 8 : KV_STREAM;
        state = kv_three(state, to, at, size);
        at += 3 * size;
        to += to ? 3 * size : 0;
        length -= 3 * size;
    }
    return kv_one(state, to, at, length);
}

KV_TARGET static uint32_t kv_crc32c_hardware(uint32_t state, const uint8_t *at, size_t length) { return kv_long(state, NULL, at, length); }

KV_TARGET static __attribute__((noinline)) uint32_t kv_copy_long(uint32_t state, uint8_t *to, const uint8_t *at, size_t length) {
    return kv_long(state, to, at, length);
}

KV_TARGET static inline uint32_t kv_crc32c_copy_hardware(uint32_t state, uint8_t *to, const uint8_t *at, size_t length) {
    return length < KV_LONG ? kv_one(state, to, at, length) : kv_copy_long(state, to, at, length);
}

KV_TARGET static uint32_t kv_crc32c_head_hardware(uint64_t state, uint64_t first, uint64_t second, uint64_t third, uint32_t fourth) {
    return (uint32_t)KV_STEP32(KV_STEP64(KV_STEP64(KV_STEP64(state, first), second), third), fourth);
}
#endif

static uint32_t kv_crc32c(uint32_t state, const uint8_t *at, size_t length) {
#ifdef KV_TARGET
    if (kv_hardware) return kv_crc32c_hardware(state, at, length);
#endif
    return kv_crc32c_tables(state, at, length);
}

/* The register after the first 28 bytes of a frame. */
static uint32_t kv_crc32c_head(uint64_t state, uint64_t first, uint64_t second, uint64_t third, uint32_t fourth) {
#ifdef KV_TARGET
    if (kv_hardware) return kv_crc32c_head_hardware(state, first, second, third, fourth);
#endif
    uint64_t words[4] = {first, second, third, fourth};
    return kv_crc32c_tables((uint32_t)state, (const uint8_t *)words, 28);
}

/* Copies, and returns the register after the copied bytes. Each byte is read and written once: others may write to either side. */
static uint32_t kv_crc32c_copy(uint32_t state, uint8_t *to, const uint8_t *at, size_t length) {
#ifdef KV_TARGET
    if (kv_hardware) return kv_crc32c_copy_hardware(state, to, at, length);
#endif
    while (length) {
        size_t size = length < 8 ? length : 8;
        uint8_t word[8];
        memcpy(word, at, size);
        memcpy(to, word, size);
        state = kv_crc32c_tables(state, word, size);
        at += size;
        to += size;
        length -= size;
    }
    return state;
}

/* Stores a frame: zeros in its last word, key, value, then the header, whose checksum belongs into the upper half of `tags`.
 * Inlined into both functions below, each with the functions of its own. */
static inline __attribute__((always_inline)) void kv_store_frame(
    uint32_t (*head)(uint64_t, uint64_t, uint64_t, uint64_t, uint32_t), uint32_t (*copy)(uint32_t, uint8_t *, const uint8_t *, size_t),
    uint32_t state, uint8_t *to, uint64_t lengths, uint64_t sequence, uint64_t timestamp, uint64_t tags,
    const uint8_t *key, size_t key_length, const uint8_t *value
) {
    uint64_t *words = (uint64_t *)to;
    words[((uint32_t)lengths >> 3) - 1] = 0;
    state = head(state, lengths, sequence, timestamp, (uint32_t)tags);
    to += 32;
    if (key_length) state = copy(state, to, key, key_length);
    state = copy(state, to + key_length, value, (size_t)(lengths >> 32) - key_length);
    words[0] = lengths;
    words[1] = sequence;
    words[2] = timestamp;
    words[3] = tags | (uint64_t)~state << 32;
}

#ifdef KV_TARGET
KV_TARGET static void kv_put_frame_hardware(
    uint32_t state, uint8_t *to, uint64_t lengths, uint64_t sequence, uint64_t timestamp, uint64_t tags,
    const uint8_t *key, size_t key_length, const uint8_t *value
) {
    kv_store_frame(
        kv_crc32c_head_hardware, kv_crc32c_copy_hardware, state, to, lengths, sequence, timestamp, tags, key, key_length, value
    );
}
#endif

static inline void kv_put_frame(
    uint32_t state, uint8_t *to, uint64_t lengths, uint64_t sequence, uint64_t timestamp, uint64_t tags,
    const uint8_t *key, size_t key_length, const uint8_t *value
) {
#ifdef KV_TARGET
    if (kv_hardware) {
        kv_put_frame_hardware(state, to, lengths, sequence, timestamp, tags, key, key_length, value);
        return;
    }
#endif
    kv_store_frame(kv_crc32c_head, kv_crc32c_copy, state, to, lengths, sequence, timestamp, tags, key, key_length, value);
}

#ifdef KV_TARGET
KV_TARGET static uint32_t kv_copy_frame_hardware(uint64_t state, uint64_t lengths, uint64_t sequence, uint64_t timestamp, uint64_t tags,
                                                 const uint8_t *at, uint8_t *key, size_t key_length, uint8_t *value) {
    size_t content = lengths >> 32;
    state = kv_crc32c_head_hardware(state, lengths, sequence, timestamp, (uint32_t)tags);
    if (key_length) state = kv_crc32c_copy_hardware((uint32_t)state, key, at, key_length);
    return kv_crc32c_copy_hardware((uint32_t)state, value, at + key_length, content - key_length);
}
#endif

/* Copies a frame's key and value out of the ring, and returns the register after its header, as it was read, and the private copies. */
static inline uint32_t kv_copy_frame(uint32_t state, uint64_t lengths, uint64_t sequence, uint64_t timestamp, uint64_t tags,
                                     const uint8_t *at, uint8_t *key, size_t key_length, uint8_t *value) {
#ifdef KV_TARGET
    if (kv_hardware) return kv_copy_frame_hardware(state, lengths, sequence, timestamp, tags, at, key, key_length, value);
#endif
    state = kv_crc32c_head(state, lengths, sequence, timestamp, (uint32_t)tags);
    state = kv_crc32c_copy(state, key, at, key_length);
    return kv_crc32c_copy(state, value, at + key_length, (lengths >> 32) - key_length);
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
    static const uint8_t zeros[8];
    kv_powers[1] = 1; /* x^31 in this order of bits: the product with it, and the step over that, multiply by x^64 */
    for (size_t n = 2; n < sizeof kv_powers / sizeof *kv_powers; n++) kv_powers[n] = kv_crc32c_tables(kv_powers[n - 1], zeros, 8);
#ifdef KV_TARGET
    kv_hardware = kv_detect();
#endif
}

#endif
