# The C types of fixed_py.py, under whose name it is compiled.
import cython
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

cimport kvspool.kernel.crc32 as checksums
cimport kvspool.kernel.network as network

cdef int CHECKSUM, WHOLE, SHORT, DAMAGED

@cython.locals(row=Py_ssize_t, value=bytes)
cpdef Py_ssize_t first_unfit(list values, Py_ssize_t size) except -2
@cython.locals(out=bytearray, data="uint8_t *", at=Py_ssize_t, row=Py_ssize_t)
cpdef bytearray encode(list values, Py_ssize_t start, Py_ssize_t count, Py_ssize_t size)
cdef Py_ssize_t put(uint8_t *data, Py_ssize_t at, Py_ssize_t size, bytes value) noexcept
cdef bint is_sound(const uint8_t *data, Py_ssize_t at, Py_ssize_t size) noexcept
@cython.locals(data="const uint8_t *", length=Py_ssize_t, at=Py_ssize_t, record=Py_ssize_t, turn=Py_ssize_t, is_bare=bint, item=bytes)
cpdef tuple scan(bytes content, uint64_t sequence, Py_ssize_t most, Py_ssize_t size, object make, list items)
@cython.locals(data="const uint8_t *", length=Py_ssize_t, at=Py_ssize_t, record=Py_ssize_t)
cpdef tuple pass_over(bytes content, uint64_t sequence, Py_ssize_t most, Py_ssize_t size)
@cython.locals(data="const uint8_t *", at=Py_ssize_t, record=Py_ssize_t)
cpdef Py_ssize_t last_sound(bytes content, Py_ssize_t size) except -1
@cython.locals(data="const uint8_t *")
cpdef bytes item_of(bytes content, Py_ssize_t size)
