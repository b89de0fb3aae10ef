# The compiled form of network.py: same names, same meaning, inline C.
from cpython.bytearray cimport PyByteArray_AS_STRING
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy


cdef extern from *:
    """
    #include <stdint.h>
    #include <string.h>
    static inline uint16_t kv_get16(const uint8_t *at) { uint16_t v; memcpy(&v, at, 2); return __builtin_bswap16(v); }
    static inline uint32_t kv_get32(const uint8_t *at) { uint32_t v; memcpy(&v, at, 4); return __builtin_bswap32(v); }
    static inline uint64_t kv_get64(const uint8_t *at) { uint64_t v; memcpy(&v, at, 8); return __builtin_bswap64(v); }
    static inline void kv_put16(uint8_t *at, uint16_t v) { v = __builtin_bswap16(v); memcpy(at, &v, 2); }
    static inline void kv_put32(uint8_t *at, uint32_t v) { v = __builtin_bswap32(v); memcpy(at, &v, 4); }
    static inline void kv_put64(uint8_t *at, uint64_t v) { v = __builtin_bswap64(v); memcpy(at, &v, 8); }
    """
    uint16_t kv_get16(const uint8_t *at) noexcept nogil
    uint32_t kv_get32(const uint8_t *at) noexcept nogil
    uint64_t kv_get64(const uint8_t *at) noexcept nogil
    void kv_put16(uint8_t *at, uint16_t value) noexcept nogil
    void kv_put32(uint8_t *at, uint32_t value) noexcept nogil
    void kv_put64(uint8_t *at, uint64_t value) noexcept nogil


cdef inline const uint8_t *bytes_in(bytes data) noexcept:
    return <const uint8_t *>PyBytes_AS_STRING(data)

cdef inline uint8_t *room_in(bytearray data) noexcept:
    return <uint8_t *>PyByteArray_AS_STRING(data)

cdef inline uint8_t get_u8(const uint8_t *data, Py_ssize_t at) noexcept nogil:
    return data[at]

cdef inline uint16_t get_u16(const uint8_t *data, Py_ssize_t at) noexcept nogil:
    return kv_get16(data + at)

cdef inline uint32_t get_u32(const uint8_t *data, Py_ssize_t at) noexcept nogil:
    return kv_get32(data + at)

cdef inline uint64_t get_u64(const uint8_t *data, Py_ssize_t at) noexcept nogil:
    return kv_get64(data + at)

cdef inline int64_t get_i64(const uint8_t *data, Py_ssize_t at) noexcept nogil:
    return <int64_t>kv_get64(data + at)

cdef inline void put_u8(uint8_t *data, Py_ssize_t at, uint8_t value) noexcept nogil:
    data[at] = value

cdef inline void put_u16(uint8_t *data, Py_ssize_t at, uint16_t value) noexcept nogil:
    kv_put16(data + at, value)

cdef inline void put_u32(uint8_t *data, Py_ssize_t at, uint32_t value) noexcept nogil:
    kv_put32(data + at, value)

cdef inline void put_u64(uint8_t *data, Py_ssize_t at, uint64_t value) noexcept nogil:
    kv_put64(data + at, value)

cdef inline void put_i64(uint8_t *data, Py_ssize_t at, int64_t value) noexcept nogil:
    kv_put64(data + at, <uint64_t>value)

cdef inline void put_bytes(uint8_t *data, Py_ssize_t at, bytes value, Py_ssize_t length) noexcept:
    memcpy(data + at, PyBytes_AS_STRING(value), length)

cdef inline bytes cut(const uint8_t *data, Py_ssize_t at, Py_ssize_t length):
    return PyBytes_FromStringAndSize(<const char *>data + at, length)
