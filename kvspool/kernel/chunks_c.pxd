# The C types of chunks_py.py, under whose name it is compiled; the algorithms are there and only there.
import cython
from libc.stdint cimport int64_t, uint8_t

cimport kvspool.kernel.machine as native
cimport kvspool.kernel.pointers as chunks

cdef Py_ssize_t HEAD, TAIL, NEXT, FIRST_ENTRY, PREFIX, LONGEST
cdef int64_t OPERATION, HEADER_SIZE
cdef int DONE, LOOK, BUSY, NOTHING, FULL


cdef class Ends:
    cdef readonly int fd
    cdef int process
    cdef readonly bint is_one_step
    cdef public bint is_held
    cdef public int64_t look_at
    cdef readonly int stop
    cdef readonly int first_id
    cdef readonly Py_ssize_t head
    cdef readonly Py_ssize_t tail
    cdef object first_owner
    cdef object last_owner
    cdef uint8_t *first
    cdef uint8_t *last
    cdef int first_fd
    cdef int last_fd
    cdef int64_t first_size
    cdef int64_t last_size

    cpdef bint is_current(self) except -1
    cdef bint is_good(self, int fd, int64_t size) except -1
    cpdef int put(self, bytes entry) except -1
    @cython.locals(tail=Py_ssize_t, length=Py_ssize_t)
    cpdef int place(self, bytes entry) except -1
    @cython.locals(tail=Py_ssize_t, length=Py_ssize_t, at=Py_ssize_t, index=Py_ssize_t, entry=bytes)
    cpdef Py_ssize_t place_many(self, list entries, Py_ssize_t start) except -1
    @cython.locals(tail=Py_ssize_t, head=Py_ssize_t)
    cdef Py_ssize_t tail_of_last(self) noexcept
    @cython.locals(was_empty=bint)
    cdef void publish(self, Py_ssize_t before, Py_ssize_t tail) noexcept
    cpdef bytes get(self)
    cpdef bytes take(self)
    @cython.locals(taken=list, at=Py_ssize_t, tail=Py_ssize_t, begin=Py_ssize_t, length=Py_ssize_t)
    cpdef list take_many(self, Py_ssize_t limit)
    @cython.locals(head=Py_ssize_t, length=Py_ssize_t)
    cpdef bytes peek(self)
    @cython.locals(head=Py_ssize_t, tail=Py_ssize_t)
    cpdef int find_first(self) noexcept
    cpdef void advance(self, Py_ssize_t head) noexcept
    cpdef bint is_drained(self) noexcept


@cython.locals(length=Py_ssize_t)
cdef Py_ssize_t length_at(const uint8_t *data, Py_ssize_t at, Py_ssize_t tail) noexcept
cdef int check_offsets(Py_ssize_t size, Py_ssize_t at, Py_ssize_t tail) except -1
@cython.locals(data="const uint8_t *", found=Py_ssize_t, length=Py_ssize_t)
cpdef tuple count(const uint8_t[::1] view, Py_ssize_t at, Py_ssize_t tail)
@cython.locals(data="const uint8_t *", found=list, length=Py_ssize_t)
cpdef tuple copies(const uint8_t[::1] view, Py_ssize_t at, Py_ssize_t tail, Py_ssize_t limit)
