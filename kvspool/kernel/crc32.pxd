# The compiled form of crc32.py.
from libc.stdint cimport uint8_t, uint32_t


cdef extern from "crc32.h":
    uint32_t kv_crc32(const uint8_t *at, size_t length) noexcept nogil


cdef inline uint32_t crc32(const uint8_t *data, Py_ssize_t at, Py_ssize_t length) noexcept:
    return kv_crc32(data + at, length)
