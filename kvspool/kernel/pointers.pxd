# The compiled form of pointers.py: same names, same meaning, inline C. See there for what each one promises.
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.errno cimport errno
from libc.stdint cimport int32_t, int64_t, uint8_t
from libc.string cimport memcpy


cdef extern from *:
    """
    #include <stdint.h>
    #include <errno.h>
    #include <sys/stat.h>
    #include <unistd.h>

    static inline int32_t kv_pointer(const uint8_t *at) {
        return (int32_t)__builtin_bswap32(__atomic_load_n((const uint32_t *)at, __ATOMIC_ACQUIRE));
    }
    static inline void kv_store_pointer(uint8_t *at, int32_t value) {
        __atomic_store_n((uint32_t *)at, __builtin_bswap32((uint32_t)value), __ATOMIC_RELEASE);
    }
    static inline void kv_ring(int fd, const uint8_t *data, int64_t at) {
        ssize_t done;
        uint32_t same = __atomic_load_n((const uint32_t *)(data + at), __ATOMIC_RELAXED);
        do done = pwrite(fd, &same, 4, at); while (done < 0 && errno == EINTR);
    }
    static inline int kv_reference(int fd) {
        uint8_t two[2];
        ssize_t done;
        do done = pread(fd, two, 2, 0); while (done < 0 && errno == EINTR);
        return done < 0 ? -2 : done < 2 ? -1 : two[0] << 8 | two[1];
    }
    static inline int64_t kv_size_of(int fd) {
        struct stat status;
        if (fstat(fd, &status) != 0) return -2;
        return status.st_nlink ? (int64_t)status.st_size : -1;
    }
    """
    int32_t kv_pointer(const uint8_t *at) noexcept nogil
    void kv_store_pointer(uint8_t *at, int32_t value) noexcept nogil
    void kv_ring(int fd, const uint8_t *data, int64_t at) noexcept nogil
    int kv_reference(int fd) noexcept nogil
    int64_t kv_size_of(int fd) noexcept nogil


cdef inline int32_t pointer(const uint8_t *data, Py_ssize_t at) noexcept:
    return kv_pointer(data + at)


cdef inline void store_pointer(uint8_t *data, Py_ssize_t at, int32_t value) noexcept:
    kv_store_pointer(data + at, value)


cdef inline int number(const uint8_t *data, Py_ssize_t at) noexcept:
    return data[at] << 8 | data[at + 1]


cdef inline void copy_in(uint8_t *data, Py_ssize_t at, bytes entry, Py_ssize_t length) noexcept:
    data[at] = length >> 8
    data[at + 1] = length & 0xFF
    memcpy(data + at + 2, PyBytes_AS_STRING(entry), length)


cdef inline bytes copy_out(const uint8_t *data, Py_ssize_t at, Py_ssize_t length):
    return PyBytes_FromStringAndSize(<const char *>(data + at), length)


cdef inline void ring(int fd, const uint8_t *data, Py_ssize_t at) noexcept:
    kv_ring(fd, data, at)


cdef inline int reference(int fd) except -2:
    cdef int found = kv_reference(fd)
    if found == -2:
        raise OSError(errno, "could not read the header of a queue")
    return found


cdef inline int64_t size_of(int fd) except -2:
    cdef int64_t size = kv_size_of(fd)
    if size == -2:
        raise OSError(errno, "could not look at a file of a queue")
    return size
