# The compiled form of machine.py: same names, same meaning, inline C. See there for what each one promises.
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_CheckExact, PyBytes_GET_SIZE, PyBytes_FromStringAndSize
from cpython.exc cimport PyErr_CheckSignals
from libc.errno cimport EACCES, EAGAIN, EINTR, errno
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport memcmp, memset
from posix.unistd cimport pread


cdef extern from "Python.h":
    ctypedef struct PyThreadState:
        pass
    PyThreadState *PyEval_SaveThread() noexcept
    void PyEval_RestoreThread(PyThreadState *thread) noexcept
    void Py_INCREF(object value) noexcept
    void PyTuple_SET_ITEM(object made, Py_ssize_t at, object value) noexcept


cdef extern from "crc32c.h":
    uint32_t kv_crc32c(uint32_t state, const uint8_t *at, size_t length) noexcept nogil
    uint32_t kv_crc32c_head(uint32_t state, uint64_t first, uint64_t second, uint64_t third, uint32_t fourth) noexcept nogil
    void kv_put_frame(
        uint32_t state, uint8_t *to, uint64_t lengths, uint64_t sequence, uint64_t timestamp, uint64_t tags,
        const uint8_t *key, size_t key_length, const uint8_t *value
    ) noexcept nogil
    uint32_t kv_crc32c_copy(uint32_t state, uint8_t *to, const uint8_t *at, size_t length) noexcept nogil
    uint32_t kv_copy_frame(
        uint32_t state, uint64_t lengths, uint64_t sequence, uint64_t timestamp, uint64_t tags, const uint8_t *at, uint8_t *key,
        size_t key_length, uint8_t *value
    ) noexcept nogil


cdef extern from *:
    """
    #include <fcntl.h>
    #include <errno.h>
    #include <limits.h>
    #include <linux/futex.h>
    #include <poll.h>
    #include <pthread.h>
    #include <sched.h>
    #include <stdint.h>
    #include <sys/stat.h>
    #include <sys/syscall.h>
    #include <sys/sysmacros.h>
    #include <time.h>
    #include <unistd.h>
    #ifndef F_OFD_SETLK
    #define F_OFD_SETLK 37
    #endif
    #ifndef F_OFD_GETLK
    #define F_OFD_GETLK 36
    #endif

    /* Numbers of a buffer that came over the wire: it may begin at any address. */
    typedef int32_t kv_half __attribute__((aligned(1)));
    typedef int64_t kv_number __attribute__((aligned(1)));

    /* Items of a list, without a reference of one's own. */
    static inline int kv_is_bytes(PyObject *items, Py_ssize_t at) { return PyBytes_CheckExact(PyList_GET_ITEM(items, at)); }
    static inline int kv_is_none(PyObject *items, Py_ssize_t at) { return PyList_GET_ITEM(items, at) == Py_None; }
    static inline Py_ssize_t kv_length(PyObject *items, Py_ssize_t at) { return PyBytes_GET_SIZE(PyList_GET_ITEM(items, at)); }
    static inline const uint8_t *kv_bytes(PyObject *items, Py_ssize_t at) {
        return (const uint8_t *)PyBytes_AS_STRING(PyList_GET_ITEM(items, at));
    }

    static inline uint64_t kv_load_acquire(const uint64_t *at) { return __atomic_load_n(at, __ATOMIC_ACQUIRE); }
    static inline uint64_t kv_load_after_reads(const uint64_t *at) {
        __atomic_thread_fence(__ATOMIC_ACQUIRE);
        return __atomic_load_n(at, __ATOMIC_ACQUIRE);
    }
    static inline void kv_store_release(uint64_t *at, uint64_t value) { __atomic_store_n(at, value, __ATOMIC_RELEASE); }
    static inline uint64_t kv_exchange(uint64_t *at, uint64_t value) { return __atomic_exchange_n(at, value, __ATOMIC_SEQ_CST); }
    #if defined(__x86_64__) || defined(__i386__)
    #define kv_pause() __builtin_ia32_pause()
    #elif defined(__aarch64__)
    #define kv_pause() __asm__ __volatile__("yield")
    #else
    #define kv_pause()
    #endif
    static inline int kv_swap(uint64_t *at, uint64_t expected, uint64_t value) {
        return __atomic_compare_exchange_n(at, &expected, value, 0, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED);
    }
    static inline PyObject *kv_new_tuple_of_two(PyObject *kind) { return ((PyTypeObject *)kind)->tp_alloc((PyTypeObject *)kind, 2); }
    static inline int64_t kv_monotonic(void) {
        struct timespec t;
        clock_gettime(CLOCK_MONOTONIC, &t);
        return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
    }
    static inline void kv_relax(int64_t ns) {
        int64_t until = kv_monotonic() + ns;
        do kv_pause(); while (kv_monotonic() < until);
    }
    static inline void kv_sleep(int64_t ns) {
        struct timespec longest = {ns / 1000000000, ns % 1000000000};
        nanosleep(&longest, NULL);
    }
    static inline void kv_add_one(uint64_t *at) { __atomic_fetch_add(at, 1, __ATOMIC_SEQ_CST); }
    static inline void kv_fence(void) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
    static uint32_t kv_zero[1];
    static inline void kv_prefetch(const uint8_t *at, uint64_t length) {
        if (length > 4096) length = 4096;
        for (uint64_t i = 0; i < length; i += 64) __builtin_prefetch(at + i, 1);
    }
    static inline int64_t kv_now(void) {
        struct timespec t;
        clock_gettime(CLOCK_REALTIME, &t);
        return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
    }
    static inline void kv_spin(const uint64_t *at, uint64_t value, int64_t ns) {
        int64_t until = kv_monotonic() + ns;
        do {
            for (int look = 0; look < 64; look++) {
                if (kv_load_acquire(at) != value) return;
                kv_pause();
            }
        } while (kv_monotonic() < until);
    }
    static inline void kv_wait_count(const uint64_t *at, uint64_t goal, int64_t ns) {
        int64_t until = kv_monotonic() + ns;
        while (goal - kv_load_acquire(at) - 1 < 1024 && kv_monotonic() < until) sched_yield();
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
    /* The low half of a word as a futex that processes share. Each sleep has an end, and may end for no reason. */
    static inline void kv_wait_word(uint64_t *at, uint64_t expected, int64_t ns) {
        struct timespec longest = {ns / 1000000000, ns % 1000000000};
        syscall(SYS_futex, (uint32_t *)at, FUTEX_WAIT, (uint32_t)expected, &longest, NULL, 0);
    }
    static inline void kv_wake_word(uint64_t *at) { syscall(SYS_futex, (uint32_t *)at, FUTEX_WAKE, 1, NULL, NULL, 0); }
    static inline void kv_wake_all(uint64_t *at) { syscall(SYS_futex, (uint32_t *)at, FUTEX_WAKE, INT_MAX, NULL, NULL, 0); }
    /* Where the first lock of another open file description begins in these bytes; -1: there is none. If the kernel doesn't say, all
       bytes count as locked: a caller that took an owner for dead, or a view for closed, would destroy data. */
    static inline int64_t kv_locked_from(int fd, int64_t at, int64_t length) {
        struct flock request = {0};
        request.l_type = F_WRLCK;
        request.l_whence = SEEK_SET;
        request.l_start = at;
        request.l_len = length;
        if (fcntl(fd, F_OFD_GETLK, &request) != 0) return at;
        if (request.l_type == F_UNLCK) return -1;
        return request.l_start > at ? request.l_start : at;
    }
    /* How many bytes of events were read, 0 if none came in time or a signal did, -1 with errno. */
    static inline ssize_t kv_wait_events(int fd, double seconds, char *to, size_t room) {
        struct pollfd looked = {fd, POLLIN, 0};
        struct timespec longest = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
        int found = ppoll(&looked, 1, &longest, NULL);
        if (found > 0) found = (int)read(fd, to, room);
        return found < 0 && errno == EINTR ? 0 : found;
    }
    static inline int kv_write_at(int fd, const uint8_t *data, size_t length, int64_t at) {
        return pwrite(fd, data, length, at) == (ssize_t)length;
    }
    static inline int64_t kv_size_at(const char *path, uint64_t device, uint64_t number) {
        struct statx there;
        if (statx(AT_FDCWD, path, AT_SYMLINK_NOFOLLOW, STATX_INO | STATX_SIZE, &there) != 0) return -1;
        if (makedev(there.stx_dev_major, there.stx_dev_minor) != device || there.stx_ino != number) return -1;
        return there.stx_size;
    }
    static inline int kv_has_name(int fd) {
        struct statx found;
        return statx(fd, "", AT_EMPTY_PATH, STATX_NLINK, &found) == 0 && found.stx_nlink > 0;
    }
    static inline int kv_lock(int fd, int64_t at) { return kv_set_lock(fd, at, F_WRLCK); }
    static inline int kv_share(int fd, int64_t at) { return kv_set_lock(fd, at, F_RDLCK); }
    static inline int kv_unlock(int fd, int64_t at) { return kv_set_lock(fd, at, F_UNLCK); }
    """
    ctypedef int32_t half "kv_half"
    ctypedef int64_t number "kv_number"
    bint kv_is_bytes(list items, Py_ssize_t at) noexcept
    bint kv_is_none(list items, Py_ssize_t at) noexcept
    Py_ssize_t kv_length(list items, Py_ssize_t at) noexcept
    const uint8_t *kv_bytes(list items, Py_ssize_t at) noexcept
    uint64_t kv_load_acquire(const uint64_t *at) noexcept nogil
    uint64_t kv_load_after_reads(const uint64_t *at) noexcept nogil
    void kv_store_release(uint64_t *at, uint64_t value) noexcept nogil
    uint64_t kv_exchange(uint64_t *at, uint64_t value) noexcept nogil
    int kv_swap(uint64_t *at, uint64_t expected, uint64_t value) noexcept nogil
    object kv_new_tuple_of_two(object kind)
    void kv_relax(int64_t ns) noexcept nogil
    void kv_sleep(int64_t ns) noexcept nogil
    void kv_add_one(uint64_t *at) noexcept nogil
    void kv_wait_count(const uint64_t *at, uint64_t goal, int64_t ns) noexcept nogil
    void kv_fence() noexcept nogil
    uint32_t *kv_zero
    void kv_prefetch(const uint8_t *at, uint64_t length) noexcept nogil
    int64_t kv_now() noexcept nogil
    int64_t kv_monotonic() noexcept nogil
    void kv_spin(const uint64_t *at, uint64_t value, int64_t ns) noexcept nogil
    Py_ssize_t kv_wait_events(int fd, double seconds, char *to, size_t room) noexcept nogil
    int kv_write_at(int fd, const uint8_t *data, size_t length, int64_t at) noexcept nogil
    int64_t kv_size_at(const char *path, uint64_t device, uint64_t number) noexcept nogil
    int kv_has_name(int fd) noexcept nogil
    int kv_lock(int fd, int64_t at) noexcept nogil
    int kv_share(int fd, int64_t at) noexcept nogil
    int kv_unlock(int fd, int64_t at) noexcept nogil
    int64_t kv_locked_from(int fd, int64_t at, int64_t length) noexcept nogil
    int kv_process_id() noexcept nogil
    void kv_wait_word(uint64_t *at, uint64_t expected, int64_t ns) noexcept nogil
    void kv_wake_word(uint64_t *at) noexcept nogil
    void kv_wake_all(uint64_t *at) noexcept nogil


cdef inline uint8_t *bytes_at(const uint8_t[::1] view) except NULL:
    return <uint8_t *>&view[0]


cdef inline uint64_t *words_at(const uint8_t[::1] view) except NULL:
    if <uintptr_t>&view[0] & 7:
        raise ValueError("the memory begins at an address that is not a multiple of 8")
    return <uint64_t *>&view[0]


cdef inline bint is_writable(object view) except -1:
    cdef Py_buffer found
    PyObject_GetBuffer(view, &found, PyBUF_SIMPLE)
    cdef bint may_store = not found.readonly
    PyBuffer_Release(&found)
    return may_store


cdef inline half *halves_at(const int32_t[::1] view) except NULL:
    return <half *>&view[0]


cdef inline number *numbers_at(const int64_t[::1] view) except NULL:
    return <number *>&view[0]


cdef inline PyThreadState *release() noexcept:
    return PyEval_SaveThread()


cdef inline void take_back(PyThreadState *thread) noexcept:
    PyEval_RestoreThread(thread)


cdef inline uint8_t *no_bytes() noexcept nogil:
    return NULL


cdef inline uint64_t *no_words() noexcept:
    return NULL


cdef inline const uint8_t *bytes_of(bytes value) noexcept:
    return <const uint8_t *>PyBytes_AS_STRING(value)


cdef inline uint32_t *one_state() noexcept:
    return kv_zero


cdef inline bytes copy_out(const uint8_t *data, Py_ssize_t at, Py_ssize_t length, uint32_t *state):
    cdef bytes piece = PyBytes_FromStringAndSize(NULL, length)
    state[0] = kv_crc32c_copy(state[0], <uint8_t *>PyBytes_AS_STRING(piece), data + at, length)
    return piece


cdef inline uint32_t copy_frame(
    uint32_t state, uint64_t lengths, uint64_t sequence, uint64_t timestamp, uint64_t tags, const uint8_t *data, uint64_t at, uint8_t *keys,
    uint64_t key_to, uint64_t key_length, uint8_t *values, uint64_t value_to
) noexcept:
    return kv_copy_frame(state, lengths, sequence, timestamp, tags, data + at, keys + key_to, key_length, values + value_to)


cdef inline uint32_t copy_over(
    uint32_t state, uint8_t *target, Py_ssize_t to, const uint8_t *data, Py_ssize_t at, Py_ssize_t length
) noexcept:
    return kv_crc32c_copy(state, target + to, data + at, length)


cdef inline uint32_t copy_in(
    uint32_t state, uint8_t *data, Py_ssize_t at, const uint8_t *source, Py_ssize_t start, Py_ssize_t length
) noexcept nogil:
    return kv_crc32c_copy(state, data + at, source + start, length)


cdef inline void put_frame(
    uint32_t state, uint8_t *data, uint64_t *words, uint64_t offset, uint64_t lengths, uint64_t sequence, uint64_t timestamp,
    uint64_t tags, const uint8_t *key, Py_ssize_t key_at, Py_ssize_t key_length, const uint8_t *value, Py_ssize_t value_at
) noexcept:
    kv_put_frame(state, data + offset, lengths, sequence, timestamp, tags, key + key_at, key_length, value + value_at)


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


cdef inline bint swap(uint64_t *words, Py_ssize_t at, uint64_t expected, uint64_t value) noexcept:
    return kv_swap(words + at, expected, value)


cdef inline int64_t signed(uint64_t word) noexcept:
    return <int64_t>word


cdef inline uint64_t unsigned(int64_t number) noexcept:
    return <uint64_t>number


cdef inline object new_tuple_of_two(object kind, object first, object second):
    made = kv_new_tuple_of_two(kind)
    Py_INCREF(first)
    PyTuple_SET_ITEM(made, 0, first)
    Py_INCREF(second)
    PyTuple_SET_ITEM(made, 1, second)
    return made


cdef inline void pause(int64_t ns) noexcept:
    kv_relax(ns)


cdef inline void sleep(int64_t ns) noexcept:
    with nogil:
        kv_sleep(ns)


cdef inline void add_one(uint64_t *words, Py_ssize_t at) noexcept:
    kv_add_one(words + at)


cdef inline void wait_count(uint64_t *words, Py_ssize_t at, uint64_t goal, int64_t ns) noexcept:
    with nogil:
        kv_wait_count(words + at, goal, ns)


cdef inline int check_signals() except -1:
    return PyErr_CheckSignals()


cdef inline void fence() noexcept:
    kv_fence()


cdef inline void prefetch(const uint8_t *data, uint64_t at, uint64_t length) noexcept:
    kv_prefetch(data + at, length)


cdef inline void wait_word(uint64_t *words, Py_ssize_t at, uint64_t expected, int64_t longest) noexcept:
    with nogil:
        kv_wait_word(words + at, expected, longest)


cdef inline void wake_word(uint64_t *words, Py_ssize_t at) noexcept:
    kv_wake_word(words + at)


cdef inline void wake_all(uint64_t *words, Py_ssize_t at) noexcept:
    kv_wake_all(words + at)


cdef inline bytes wait_events(int fd, double seconds):
    cdef char[8192] found
    cdef Py_ssize_t size
    with nogil:
        size = kv_wait_events(fd, seconds, found, sizeof(found))
    if size < 0:
        raise OSError(errno, "could not wait for events")
    PyErr_CheckSignals()
    return PyBytes_FromStringAndSize(found, size)


cdef inline int32_t half_of(const uint8_t *data, Py_ssize_t at) noexcept:
    return (<const half *>(data + at))[0]


cdef inline bint is_bytes(object value) noexcept:
    return PyBytes_CheckExact(value)


cdef inline Py_ssize_t length(object value) noexcept:
    return PyBytes_GET_SIZE(value)


cdef inline bint is_bytes_in(list items, Py_ssize_t at) noexcept:
    return kv_is_bytes(items, at)


cdef inline bint is_none_in(list items, Py_ssize_t at) noexcept:
    return kv_is_none(items, at)


cdef inline Py_ssize_t length_in(list items, Py_ssize_t at) noexcept:
    return kv_length(items, at)


cdef inline const uint8_t *bytes_in(list items, Py_ssize_t at) noexcept:
    return kv_bytes(items, at)


cdef inline int64_t locked_from(int fd, int64_t at, int64_t length) noexcept:
    return kv_locked_from(fd, at, length)


cdef inline uint32_t crc32c(uint32_t state, const uint8_t *source, Py_ssize_t start, Py_ssize_t length) noexcept nogil:
    return kv_crc32c(state, source + start, length)


cdef inline uint32_t crc32c_head(uint32_t state, uint64_t first, uint64_t second, uint64_t third, uint32_t fourth) noexcept:
    return kv_crc32c_head(state, first, second, third, fourth)


cdef inline int64_t now() noexcept:
    return kv_now()


cdef inline int64_t monotonic() noexcept:
    return kv_monotonic()


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


cdef inline bint try_gate(int fd, int64_t at) except -1:
    while kv_share(fd, at) != 0:
        if errno == EAGAIN or errno == EACCES:
            return False
        if errno != EINTR:
            raise OSError(errno, "could not lock")
    return True


cdef inline bint has_sharers(int fd, int64_t at) except -1:
    return False  # no compiled handle waits for one


cdef inline int unlock(int fd, int64_t at) except -1:
    while kv_unlock(fd, at) != 0:
        if errno != EINTR:
            raise OSError(errno, "could not unlock")
    return 0


cdef inline bint write_at(int fd, const uint8_t *data, Py_ssize_t length, int64_t at) noexcept:
    cdef bint is_whole
    with nogil:
        is_whole = kv_write_at(fd, data, length, at)
    return is_whole


cdef inline bytes read_at(int fd, Py_ssize_t length, int64_t at):
    """Other threads don't run meanwhile: one of them could close the file. What was just written is in memory."""
    cdef char[8192] found
    cdef ssize_t size = pread(fd, found, length, at)
    return None if size < 0 else PyBytes_FromStringAndSize(found, size)


cdef inline int64_t size_at(bytes path, uint64_t device, uint64_t number) noexcept:
    return kv_size_at(PyBytes_AS_STRING(path), device, number)


cdef inline bint has_name(int fd) noexcept:
    return kv_has_name(fd)


cdef inline int spin(object owner, const uint64_t *words, Py_ssize_t at, uint64_t value, int64_t ns) except -1:
    with nogil:
        kv_spin(words + at, value, ns)
    PyErr_CheckSignals()
    return 0
