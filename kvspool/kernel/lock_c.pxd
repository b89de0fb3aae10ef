# The C types of lock_py.py, under whose name it is compiled; the algorithm is there and only there.
import cython
from libc.stdint cimport int64_t, uint64_t

cimport kvspool.kernel.machine as native

cdef int64_t GATE, WRITER_SLOTS_AT
cdef uint64_t WRITER_SLOTS, OWNER, WAITERS, STEP, WORD


@cython.final
cdef class AppendLock:
    cdef object owner
    cdef uint64_t *words
    cdef Py_ssize_t at
    cdef readonly int fd
    cdef int64_t gate
    cdef int64_t first_poll
    cdef int64_t last_poll
    cdef int64_t first_sleep
    cdef int64_t longest_sleep
    cdef readonly uint64_t own
    cdef readonly bint is_inside
    cdef readonly bint is_taken
    cdef readonly object taken_by
    cdef bint has_slept

    @cython.locals(is_ours=bint)
    cpdef bint take(self, object token=*) except -1
    @cython.locals(own=uint64_t)
    cdef bint take_word(self) noexcept
    @cython.locals(until=int64_t, pause=int64_t, left=int64_t)
    cpdef bint take_within(self, int64_t ns) except -1
    cdef bint pass_gate(self) except -1
    cpdef bint is_gate_open(self) except -1
    @cython.locals(slot=uint64_t, _try=uint64_t)
    cdef bint find_slot(self) except -1
    @cython.locals(pause=int64_t)
    cdef bint take_soon(self, uint64_t own) noexcept
    @cython.locals(seen=uint64_t)
    cdef bint replace_dead(self, uint64_t own) noexcept
    @cython.locals(slot=uint64_t)
    cdef bint is_alive(self, uint64_t word) noexcept
    @cython.locals(seen=uint64_t, owner=object)
    cpdef object rest(self, int64_t ns)
    cpdef int free(self) except -1
    cdef bint free_word(self) noexcept
    cdef int leave(self) except -1
    cpdef object close(self)
