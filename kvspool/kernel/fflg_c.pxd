# The C types of fflg_py.py, under whose name it is compiled.
import cython
from libc.stdint cimport int64_t, uint8_t, uint64_t

cimport kvspool.kernel.network as network

cdef int SIZE, WHOLE, SHORT

@cython.locals(
    end=Py_ssize_t, stop=Py_ssize_t, total=int64_t, size=int64_t, out=bytearray, data="uint8_t *", at=Py_ssize_t, row=Py_ssize_t,
    value=bytes
)
cpdef tuple encode(list values, Py_ssize_t start, Py_ssize_t most, int64_t room, int64_t enough)
@cython.locals(size=Py_ssize_t)
cdef Py_ssize_t put(uint8_t *data, Py_ssize_t at, bytes value) noexcept
@cython.locals(data="const uint8_t *", length=int64_t, at=int64_t, size=int64_t, turn=Py_ssize_t, value=bytes)
cpdef tuple scan(bytes content, uint64_t sequence, Py_ssize_t most, object make, list items)
@cython.locals(data="const uint8_t *", length=int64_t, at=int64_t, size=int64_t)
cpdef tuple pass_over(bytes content, uint64_t sequence, uint64_t until)
