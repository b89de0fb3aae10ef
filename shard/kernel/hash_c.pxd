# The C types of hash_py.py, under whose name it is compiled.
import cython
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t

cimport kvspool.kernel.machine as native
from kvspool.kernel.frames_c cimport Single

cdef uint32_t BASIS, PRIME, LOW

@cython.locals(state=uint32_t, at=Py_ssize_t)
cdef uint32_t fold(const uint8_t *data, Py_ssize_t start, Py_ssize_t length) noexcept
cpdef uint32_t hash16(bytes key) except? 0
@cython.locals(data="const uint8_t *", row=Py_ssize_t)
cpdef int64_t hash_column(
    const int32_t[::1] offsets, const uint8_t[::1] keys, const uint8_t[::1] has_key, uint32_t mask, int64_t turn, int32_t[::1] shards
) except? -1
@cython.locals(row=Py_ssize_t, shard=Py_ssize_t, total=int32_t, count=int32_t)
cpdef int group(const int32_t[::1] shards, int32_t[::1] ends, int32_t[::1] rows) except -1


cdef class Spread:
    cdef public list shards
    cdef public bint _are_spools
    cdef public Py_ssize_t _mask, _turn

    @cython.locals(log=Single, sequence=int64_t)
    cdef int64_t append_at_once(self, Py_ssize_t shard, object value, object key, object type, object timestamp, object durable) except? -9
    cdef Py_ssize_t find(self, object key) except -1
