# The C types of tail_py.py, under whose name it is compiled; the algorithm is there and only there.
import cython
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

cimport kvspool.kernel.fflg_c as fflg
cimport kvspool.kernel.fixed_c as fixed
cimport kvspool.kernel.group_c as group
cimport kvspool.kernel.kvj_c as kvj
cimport kvspool.kernel.machine as native
cimport kvspool.kernel.network as network
cimport kvspool.kernel.sej_c as sej
from kvspool.kernel.lock_c cimport AppendLock

cdef Py_ssize_t LOCK, COUNT, HOLDER, HOLDER_WORDS, ERROR, REWINDS, COPIES, COPY_WORDS
cdef Py_ssize_t BASE, END, NEXT, LATEST, SYNCED, CHECK, GROUP, LEADER, WORDS
cdef uint64_t ELSEWHERE, WRITING, STEP, WORD, LOW, HIGH, MOST
cdef int64_t SLOW, BUSY
cdef int KVJ, SEJ, FFLG, FIXED
cdef Py_ssize_t LARGEST, SMALL, LONGEST_KEY, LONGEST_KVJ_KEY


@cython.locals(state=uint64_t)
cdef uint64_t error_word(uint32_t seed, uint64_t error) noexcept
@cython.locals(error=uint64_t)
cdef uint64_t error_in(uint32_t seed, uint64_t word) noexcept


# Not final: it has a method of its base.
cdef class Tail(group.Progress):
    cdef object owner
    cdef uint8_t *data
    cdef uint64_t *words
    cdef readonly AppendLock lock
    cdef int lock_fd
    cdef uint32_t seed
    cdef object holder_owner
    cdef uint64_t *holder
    cdef public object guard
    cdef int process
    cdef int64_t fresh
    cdef int64_t pause
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
    cdef readonly uint64_t flush_to
    cdef readonly uint64_t flush_end
    cdef uint64_t rewinds_seen

    cpdef object attach(
        self, int format, Py_ssize_t item_bytes, int fd, bytes path, uint64_t device, uint64_t number, uint64_t base, uint64_t limit
    )
    cpdef object detach(self)
    @cython.locals(count=uint64_t, at=Py_ssize_t, latest=int64_t, base=uint64_t, end=uint64_t, words="uint64_t *")
    cpdef object found(self)
    @cython.locals(at=Py_ssize_t)
    cpdef uint64_t synced(self) except? 0
    cpdef object tell_elsewhere(self)
    cpdef object note_rewind(self)
    @cython.locals(word=uint64_t)
    cpdef object tell(self, uint64_t base, uint64_t end, uint64_t sequence, int64_t latest, uint64_t synced)
    cpdef uint64_t rewinds(self) except? 0
    cpdef bint is_valid(self) except -1
    @cython.locals(at=Py_ssize_t)
    cpdef int sign(self, Py_ssize_t place=*) except -1
    @cython.locals(words="uint64_t *")
    cpdef object signed_by(self, Py_ssize_t place=*)
    cpdef object append(self, object value, object key, object type, int codec)
    @cython.locals(size=Py_ssize_t)
    cdef object append_alone(self, object value, object key, object type, int codec)
    cdef int leave(self) except -1
    @cython.locals(size=Py_ssize_t, key_size=Py_ssize_t)
    cdef Py_ssize_t most(self, object value, object key, object type) except -2
    @cython.locals(
        count=uint64_t, at=Py_ssize_t, end=uint64_t, sequence=uint64_t, latest=int64_t, now=int64_t, data="uint8_t *"
    )
    cdef object append_locked(self, bytes value, bytes key, int type, int codec, uint64_t size)
    @cython.locals(now=int64_t)
    cdef bint is_in_place(self, int64_t end) noexcept
    @cython.locals(at=Py_ssize_t, is_done=bint)
    cpdef int look(self, uint64_t sequence) except -1
    @cython.locals(count=uint64_t, at=Py_ssize_t, size=int64_t)
    cpdef int begin_flush(self, uint64_t base, bytes path, uint64_t device, uint64_t number) except -9
    @cython.locals(words="uint64_t *", count=uint64_t, at=Py_ssize_t, latest=int64_t)
    cpdef bint end_flush(self) except -1
    cpdef uint64_t error(self) except? 0
    cpdef object fail(self, uint64_t error)
    cdef Py_ssize_t copy(self, uint64_t count) noexcept
    cdef bint is_sound(self, Py_ssize_t at) noexcept
    cdef uint64_t check(self, Py_ssize_t at) noexcept
    @cython.locals(words="uint64_t *", count=uint64_t, at=Py_ssize_t)
    cdef int publish(self, uint64_t base, uint64_t end, uint64_t sequence, int64_t latest, uint64_t synced) noexcept
    cpdef object close(self)
