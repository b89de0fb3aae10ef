# The C types of _tail_py.py, under whose name it is compiled; the algorithm is there and only there.
import cython
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

cimport kvspool._fflg_c as fflg
cimport kvspool._fixed_c as fixed
cimport kvspool._kvj_c as kvj
cimport kvspool._machine as native
cimport kvspool._network as network
cimport kvspool._sej_c as sej
from kvspool._lock_c cimport AppendLock

cdef Py_ssize_t LOCK, COUNT, HOLDER, HOLDER_WORDS, COPIES, COPY_WORDS, BASE, END, NEXT, LATEST, CHECK, WORDS
cdef uint64_t ELSEWHERE, WRITING, STEP, HIGH, MOST
cdef int64_t SLOW, BUSY, FRESH, GAP
cdef int KVJ, SEJ, FFLG, FIXED
cdef Py_ssize_t LARGEST, SMALL, LONGEST_KEY, LONGEST_KVJ_KEY


@cython.final
cdef class Tail:
    cdef object owner
    cdef uint8_t *data
    cdef uint64_t *words
    cdef readonly AppendLock lock
    cdef int lock_fd
    cdef uint32_t seed
    cdef object holder_owner
    cdef uint64_t *holder
    cdef int process
    cdef bytearray room
    cdef readonly bint is_busy
    cdef readonly bint is_open
    cdef int format
    cdef Py_ssize_t item_bytes
    cdef int fd
    cdef bytes path
    cdef uint64_t device
    cdef uint64_t number
    cdef uint64_t base
    cdef int64_t left_at
    cdef int64_t looked_at
    cdef readonly uint64_t limit

    cpdef object attach(
        self, int format, Py_ssize_t item_bytes, int fd, bytes path, uint64_t device, uint64_t number, uint64_t base, uint64_t limit
    )
    cpdef object detach(self)
    @cython.locals(count=uint64_t, at=Py_ssize_t, latest=int64_t, words="uint64_t *")
    cpdef object found(self)
    cpdef object tell_elsewhere(self)
    cpdef object tell(self, uint64_t base, uint64_t end, uint64_t sequence, int64_t latest)
    cpdef bint is_told(self) except -1
    @cython.locals(at=Py_ssize_t)
    cpdef int sign(self) except -1
    @cython.locals(words="uint64_t *")
    cpdef object signed_by(self)
    @cython.locals(size=Py_ssize_t)
    cpdef object append(self, object value, object key, object type, int codec)
    cdef int leave(self) except -1
    @cython.locals(size=Py_ssize_t, key_size=Py_ssize_t)
    cdef Py_ssize_t most(self, object value, object key, object type) except -2
    @cython.locals(
        count=uint64_t, at=Py_ssize_t, end=uint64_t, sequence=uint64_t, latest=int64_t, now=int64_t, data="uint8_t *"
    )
    cdef object append_locked(self, bytes value, bytes key, int type, int codec, uint64_t size)
    @cython.locals(now=int64_t)
    cdef bint is_in_place(self, int64_t end) noexcept
    cdef Py_ssize_t copy(self, uint64_t count) noexcept
    cdef bint is_sound(self, Py_ssize_t at) noexcept
    cdef uint64_t check(self, Py_ssize_t at) noexcept
    @cython.locals(words="uint64_t *", count=uint64_t, at=Py_ssize_t)
    cdef int publish(self, uint64_t base, uint64_t end, uint64_t sequence, int64_t latest) noexcept
    cpdef object close(self)
