# The compiled form of _machine.py: same names, same meaning, inline C. See there for what each one promises.
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.errno cimport EACCES, EAGAIN, EINTR, errno
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy, memset


cdef extern from "_crc32c.h":
    uint32_t kv_crc32c(uint32_t state, const uint8_t *at, size_t length) noexcept nogil


cdef extern from *:
    """
    #include <fcntl.h>
    #include <pthread.h>
    #include <stdint.h>
    #include <time.h>
    #include <unistd.h>
    #ifndef F_OFD_SETLK
    #define F_OFD_SETLK 37
    #endif

    static inline uint64_t kv_load_acquire(const uint64_t *at) { return __atomic_load_n(at, __ATOMIC_ACQUIRE); }
    static inline uint64_t kv_load_after_reads(const uint64_t *at) {
        __atomic_thread_fence(__ATOMIC_ACQUIRE);
        return __atomic_load_n(at, __ATOMIC_ACQUIRE);
    }
    static inline void kv_store_release(uint64_t *at, uint64_t value) { __atomic_store_n(at, value, __ATOMIC_RELEASE); }
    static inline uint64_t kv_exchange(uint64_t *at, uint64_t value) { return __atomic_exchange_n(at, value, __ATOMIC_SEQ_CST); }
    static inline void kv_fence(void) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
    static inline int64_t kv_now(void) {
        struct timespec t;
        clock_gettime(CLOCK_REALTIME, &t);
        return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
    }
    /* The process id without a system call: whoever forks through libc, Python or not, runs the handler in the child. */
    static int kv_process = 0;
    static void kv_note_process(void) { kv_process = (int)getpid(); }
    __attribute__((constructor)) static void kv_watch_forks(void) {
        kv_note_process();
        pthread_atfork(NULL, NULL, kv_note_process);
    }
    static inline int kv_process_id(void) { return kv_process; }

    static inline int kv_set_lock(int fd, int64_t at, short kind) {
        struct flock request = {0};
        request.l_type = kind;
        request.l_whence = SEEK_SET;
        request.l_start = at;
        request.l_len = 1;
        return fcntl(fd, F_OFD_SETLK, &request);
    }
    static inline int kv_lock(int fd, int64_t at) { return kv_set_lock(fd, at, F_WRLCK); }
    static inline int kv_unlock(int fd, int64_t at) { return kv_set_lock(fd, at, F_UNLCK); }
    """
    uint64_t kv_load_acquire(const uint64_t *at) noexcept nogil
    uint64_t kv_load_after_reads(const uint64_t *at) noexcept nogil
    void kv_store_release(uint64_t *at, uint64_t value) noexcept nogil
    uint64_t kv_exchange(uint64_t *at, uint64_t value) noexcept nogil
    void kv_fence() noexcept nogil
    int64_t kv_now() noexcept nogil
    int kv_lock(int fd, int64_t at) noexcept nogil
    int kv_unlock(int fd, int64_t at) noexcept nogil
    int kv_process_id() noexcept nogil


cdef inline uint8_t *bytes_at(const uint8_t[::1] view) except NULL:
    return <uint8_t *>&view[0]


cdef inline uint64_t *words_at(const uint8_t[::1] view) except NULL:
    return <uint64_t *>&view[0]


cdef inline uint8_t *no_bytes() noexcept:
    return NULL


cdef inline uint64_t *no_words() noexcept:
    return NULL


cdef inline const uint8_t *bytes_of(bytes value) noexcept:
    return <const uint8_t *>PyBytes_AS_STRING(value)


cdef inline bytes copy_out(const uint8_t *data, Py_ssize_t at, Py_ssize_t length):
    return PyBytes_FromStringAndSize(<const char *>data + at, length)


cdef inline void copy_in(uint8_t *data, Py_ssize_t at, const uint8_t *source, Py_ssize_t start, Py_ssize_t length) noexcept:
    memcpy(data + at, source + start, length)


cdef inline bint is_zero(const uint8_t *data, Py_ssize_t at, Py_ssize_t length) noexcept:
    return data[at] == 0 and memcmp(data + at, data + at + 1, length - 1) == 0


cdef inline uint64_t load(const uint64_t *words, Py_ssize_t at) noexcept:
    return kv_load_acquire(words + at)


cdef inline uint64_t load_after_reads(const uint64_t *words, Py_ssize_t at) noexcept:
    return kv_load_after_reads(words + at)


cdef inline void store(uint64_t *words, Py_ssize_t at, uint64_t value) noexcept:
    kv_store_release(words + at, value)


cdef inline uint64_t exchange(uint64_t *words, Py_ssize_t at, uint64_t value) noexcept:
    return kv_exchange(words + at, value)


cdef inline void fence() noexcept:
    kv_fence()


cdef inline uint32_t crc32c(uint32_t state, const uint8_t *source, Py_ssize_t start, Py_ssize_t length) noexcept:
    return kv_crc32c(state, source + start, length)


cdef inline uint32_t crc32c_head(uint32_t state, uint64_t first, uint64_t second, uint64_t third, uint32_t fourth) noexcept:
    cdef uint64_t[4] words
    words[0] = first
    words[1] = second
    words[2] = third
    words[3] = fourth
    return kv_crc32c(state, <const uint8_t *>words, 28)


cdef inline int64_t now() noexcept:
    return kv_now()


cdef inline int process_id() noexcept:
    return kv_process_id()


cdef inline bint is_one_step() noexcept:
    return True


cdef inline void clear(uint8_t *data, Py_ssize_t at, Py_ssize_t length) noexcept:
    memset(data + at, 0, length)


cdef inline bint try_lock(int fd, int64_t at) except -1:
    while kv_lock(fd, at) != 0:
        if errno == EAGAIN or errno == EACCES:
            return False
        if errno != EINTR:
            raise OSError(errno, "could not lock")
    return True


cdef inline int unlock(int fd, int64_t at) except -1:
    while kv_unlock(fd, at) != 0:
        if errno != EINTR:
            raise OSError(errno, "could not unlock")
    return 0
