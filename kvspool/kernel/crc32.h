/* CRC-32 (IEEE 802.3, reflected polynomial 0xedb88320), the same as zlib's: all ones before, the complement after.
 *
 * Sixteen tables, two words at a time ("slicing", Kounavis and Berry 2005): items are short, so that folding by carry-less
 * multiplication would hardly begin before it ended. */
#ifndef KVSPOOL_CRC32_H
#define KVSPOOL_CRC32_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define KV_CRC32_POLYNOMIAL 0xedb88320u

static uint32_t kv_crc32_tables[16][256]; /* kv_crc32_tables[k][b]: byte b followed by k zero bytes */

/* What the eight bytes of a word come to, when `behind` bytes follow them. */
static inline uint32_t kv_crc32_word(uint64_t word, int behind) {
    uint32_t state = 0;
    for (int k = 0; k < 8; k++) state ^= kv_crc32_tables[behind + 7 - k][(word >> (8 * k)) & 0xff];
    return state;
}

static inline uint32_t kv_crc32(const uint8_t *at, size_t length) {
    uint32_t state = 0xffffffffu;
    uint64_t first, second;
    for (; length >= 16; at += 16, length -= 16) {
        memcpy(&first, at, 8);
        memcpy(&second, at + 8, 8);
        state = kv_crc32_word(first ^ state, 8) ^ kv_crc32_word(second, 0);
    }
    if (length >= 8) {
        memcpy(&first, at, 8);
        state = kv_crc32_word(first ^ state, 0);
        at += 8;
        length -= 8;
    }
    while (length--) state = (state >> 8) ^ kv_crc32_tables[0][(state ^ *at++) & 0xff];
    return ~state;
}

__attribute__((constructor)) static void kv_crc32_prepare(void) {
    for (int byte = 0; byte < 256; byte++) {
        uint32_t state = (uint32_t)byte;
        for (int bit = 0; bit < 8; bit++) state = (state >> 1) ^ ((state & 1) ? KV_CRC32_POLYNOMIAL : 0);
        kv_crc32_tables[0][byte] = state;
    }
    for (int k = 1; k < 16; k++)
        for (int byte = 0; byte < 256; byte++) {
            uint32_t state = kv_crc32_tables[k - 1][byte];
            kv_crc32_tables[k][byte] = (state >> 8) ^ kv_crc32_tables[0][state & 0xff];
        }
}

#endif
