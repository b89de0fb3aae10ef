# The C types of sej_py.py, under whose name it is compiled.
import cython
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

cimport kvspool.kernel.network as network

cdef int HEAD, SIZES, LONGEST_KEY, WHOLE, SHORT, DAMAGED, JUMPED
cdef int64_t LONGEST_VALUE, NO_TIME

@cython.locals(
    end=Py_ssize_t, total=Py_ssize_t, out=bytearray, data="uint8_t *", at=Py_ssize_t, row=Py_ssize_t, value=bytes, key=bytes
)
cpdef tuple encode(
    list values, list keys, list types, list timestamps, int type, int64_t timestamp, Py_ssize_t start, uint64_t sequence, Py_ssize_t room,
    int64_t last
)
@cython.locals(value_size=Py_ssize_t, key_size=Py_ssize_t)
cdef Py_ssize_t put(uint8_t *data, Py_ssize_t at, uint64_t sequence, int64_t timestamp, int type, bytes key, bytes value) noexcept
@cython.locals(data="const uint8_t *", length=Py_ssize_t, at=Py_ssize_t, key_size=int, size=int64_t, turn=Py_ssize_t)
cpdef tuple scan(bytes content, uint64_t sequence, Py_ssize_t most, object make, list items)
@cython.locals(data="const uint8_t *", length=Py_ssize_t, at=Py_ssize_t, size=int64_t, time=int64_t, latest=int64_t)
cpdef tuple pass_over(bytes content, uint64_t sequence, uint64_t until, int64_t timestamp)
@cython.locals(key_size=int, size=int64_t)
cdef int64_t size_of(const uint8_t *data, Py_ssize_t at, int64_t left, uint64_t sequence) noexcept
@cython.locals(found=uint64_t, key_size=int, value_size=int64_t, size=int64_t)
cdef tuple why(const uint8_t *data, Py_ssize_t at, int64_t left, uint64_t sequence)
