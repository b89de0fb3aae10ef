# The C types of _spread_py.py, under whose name it is compiled.
import cython
from libc.stdint cimport int64_t

from kvspool._frames_c cimport Single
cimport kvspool._machine as native
cimport shard._hash_c as hashing


cdef class Spread:
    cdef public list shards
    cdef public bint _are_spools
    cdef public Py_ssize_t _mask, _turn

    @cython.locals(log=Single)
    cdef int64_t append_at_once(self, Py_ssize_t shard, object value, object key, object type, object timestamp, object durable) except? -9
    cdef Py_ssize_t find(self, object key) except -1
