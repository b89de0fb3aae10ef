# The C types of group_py.py, under whose name it is compiled; the algorithm is there and only there.
import cython
from libc.stdint cimport int64_t, uint64_t

cimport kvspool.kernel.machine as native

cdef Py_ssize_t FLUSHES, CAME, BEGAN, GOAL, WORDS
cdef int WAITS, DONE, LEADS, LATE, FAILED
cdef uint64_t WORD


cdef class Progress:
    cpdef int look(self, uint64_t sequence) except -1


@cython.final
cdef class FlushGroup:
    cdef Progress progress
    cdef object owner
    cdef uint64_t *words
    cdef Py_ssize_t at
    cdef int64_t lock_byte
    cdef public int lock_fd
    cdef readonly uint64_t leader
    cdef object guard
    cdef readonly bint is_open

    cpdef int check_open(self) except -1
    cpdef object close(self)
    @cython.locals(owner=object, until=int64_t, left=int64_t, seen=uint64_t, found=int)
    cpdef int come(self, uint64_t sequence, uint64_t thread, int64_t ns, int64_t longest) except -1
    cdef bint lead(self, uint64_t thread) except -1
    @cython.locals(owner=object, came=uint64_t, size=uint64_t)
    cpdef uint64_t gather(self, int64_t ns) except? 0
    cpdef object leave(self, uint64_t thread, uint64_t expected)
