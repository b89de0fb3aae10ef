# The C types of wakeups_py.py, under whose name it is compiled; the algorithms are there and only there.
import cython
from libc.stdint cimport int32_t, int64_t, uint8_t

cimport kvspool.kernel.frames_c as batches
cimport kvspool.kernel.machine as native

cdef int OVERFLOW, IGNORED, LINKS, WRITTEN
cdef object REAL
cdef Py_ssize_t HEAD, ROOM


cdef class Waiting:
    cdef double _poll
    cdef double _blind_poll
    cdef public dict _keys
    cdef public dict _descriptors
    cdef public object _notifier
    cdef public int _fd
    cdef int _process
    cdef public int _users
    cdef public bint _is_woken
    cdef public bint is_blind
    cdef public set unlinked
    cdef readonly int changes

    cpdef bint _is_ours(self)
    cpdef object _leave(self, object notifier)
    @cython.locals(longest=double, data=bytes)
    cpdef set wait(self, double timeout)
    @cython.locals(events="const uint8_t *", found=set, at=Py_ssize_t, end=Py_ssize_t, watch=int, mask=int)
    cpdef set keys_of(self, bytes data)


cdef class FileSleeper(batches.Sleeper):
    cdef Waiting waiting
    cdef object cursor
    cdef object scan
    cdef int fd
    cdef bint has_more

    cpdef object close(self)
    cdef bint is_undisturbed(self) except -1
    @cython.locals(keys=set, position=int64_t, sequence=object, data=bytes, size=int64_t)
    cdef bint fetch(self, int64_t ns, int64_t most, object make, list out) except -1
