# The C types of kvj_py.py, under whose name it is compiled.
import cython
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

cimport kvspool.kernel.machine as native
cimport kvspool.kernel.network as network

cdef int HEAD, NO_KEY, LONGEST_KEY, WHOLE, SHORT, DAMAGED, JUMPED, SOUND, OFFSETS, TYPES, CODECS
cdef int64_t LARGEST, NO_TIME
cdef uint32_t ONES

@cython.locals(
    end=Py_ssize_t, total=Py_ssize_t, out=bytearray, data="uint8_t *", at=Py_ssize_t, row=Py_ssize_t, value=bytes, key=bytes
)
cpdef tuple encode(
    list values, list keys, list types, list timestamps, bytes codecs, int type, int64_t timestamp, int codec, Py_ssize_t start,
    uint64_t sequence, Py_ssize_t room, int64_t last
)
@cython.locals(size=Py_ssize_t, after=Py_ssize_t, key_size=Py_ssize_t)
cdef Py_ssize_t put(
    uint8_t *data, Py_ssize_t at, uint64_t sequence, int64_t timestamp, int type, int codec, bytes key, bytes value
) noexcept
@cython.locals(
    end=Py_ssize_t, total=Py_ssize_t, out=bytearray, data="uint8_t *", key_data="const uint8_t *", value_data="const uint8_t *",
    at=Py_ssize_t, turn=Py_ssize_t, row=Py_ssize_t, value_from=Py_ssize_t, value_length=Py_ssize_t, size=Py_ssize_t, key_size=Py_ssize_t,
    after=Py_ssize_t, state=uint32_t, time=int64_t
)
cpdef tuple encode_columns(
    const int32_t[::1] rows, Py_ssize_t count, Py_ssize_t start, uint64_t sequence, Py_ssize_t room, int64_t last,
    const int32_t[::1] key_offsets,    const uint8_t[::1] keys, const uint8_t[::1] has_key, const int32_t[::1] value_offsets,
    const uint8_t[::1] values,
    const uint8_t[::1] types, const int64_t[::1] timestamps, const uint8_t[::1] codecs, int64_t timestamp, int codec
)
@cython.locals(
    fault=int, found=Py_ssize_t, longest_key=Py_ssize_t, longest_value=Py_ssize_t, key_places="const native.half *",
    value_places="const native.half *", kinds="const native.half *", row=Py_ssize_t, place=int64_t, after=int64_t, size=int64_t
)
cpdef tuple check_columns(
    Py_ssize_t rows, const uint8_t[::1] key_bits, Py_ssize_t key_bit, const int32_t[::1] key_offsets, Py_ssize_t key_room,
    const int32_t[::1] value_offsets, Py_ssize_t value_room, const int32_t[::1] types, const uint8_t[::1] codecs, int most
)
@cython.locals(
    end=Py_ssize_t, total=Py_ssize_t, data="uint8_t *", bits="const uint8_t *", key_places="const native.half *",
    key_data="const uint8_t *",
    value_places="const native.half *", value_data="const uint8_t *", kinds="const native.half *", times="const native.number *",
    marks="const uint8_t *",
    thread="native.PyThreadState *"
)
cpdef tuple encode_records(
    bytearray out, Py_ssize_t rows, Py_ssize_t start, uint64_t sequence, Py_ssize_t room, int64_t last,
    const uint8_t[::1] key_bits, Py_ssize_t key_bit, const int32_t[::1] key_offsets, const uint8_t[::1] keys,
    const int32_t[::1] value_offsets, const uint8_t[::1] values,
    const int32_t[::1] types, const int64_t[::1] timestamps, const uint8_t[::1] codecs
)
@cython.locals(
    at=Py_ssize_t, value_from=Py_ssize_t, value_length=Py_ssize_t, size=uint64_t, key_size=Py_ssize_t, state=uint32_t, after=Py_ssize_t,
    word=uint64_t, low=uint64_t, tail=uint64_t, time=int64_t
)
cdef int64_t fill(
    uint8_t *data, Py_ssize_t row, Py_ssize_t end, uint64_t sequence, const uint8_t *bits, Py_ssize_t bit, const native.half *key_places,
    const uint8_t *keys, const native.half *value_places, const uint8_t *values, const native.half *types, const native.number *timestamps,
    const uint8_t *codecs, int64_t last
) noexcept nogil
@cython.locals(
    data="const uint8_t *", length=Py_ssize_t, key_data="uint8_t *", value_data="uint8_t *", key_room=Py_ssize_t, value_room=Py_ssize_t,
    key_at=Py_ssize_t, value_at=Py_ssize_t, at=Py_ssize_t, left=Py_ssize_t, size=int64_t, tag=int, key_length=Py_ssize_t,
    value_length=int64_t, state=uint32_t
)
cpdef tuple gather(
    bytes content, uint64_t sequence, Py_ssize_t most, Py_ssize_t count, int64_t[::1] sequences, int64_t[::1] timestamps,
    int32_t[::1] types, int32_t[::1] key_offsets, uint8_t[::1] keys, uint8_t[::1] key_bits, int32_t[::1] value_offsets,
    uint8_t[::1] values, uint8_t[::1] codecs
)
@cython.locals(data="const uint8_t *", length=Py_ssize_t, at=Py_ssize_t, key_size=int, begin=int64_t, size=int64_t, turn=Py_ssize_t)
cpdef tuple scan(bytes content, uint64_t sequence, Py_ssize_t most, object make, list items)
@cython.locals(data="const uint8_t *", length=Py_ssize_t, at=Py_ssize_t, size=int64_t, found=uint64_t, time=int64_t, latest=int64_t)
cpdef tuple pass_over(bytes content, uint64_t sequence, uint64_t until, int64_t timestamp)
@cython.locals(data="const uint8_t *", length=Py_ssize_t, at=Py_ssize_t, found=uint64_t)
cpdef Py_ssize_t find(bytes content, uint64_t sequence, uint64_t until) except? -2
cpdef uint64_t sequence_at(bytes content, Py_ssize_t at) except? 0
@cython.locals(key_size=int, size=int64_t)
cdef int64_t size_of(const uint8_t *data, Py_ssize_t at, int64_t left) noexcept
cdef tuple why(const uint8_t *data, Py_ssize_t at, int64_t left, int64_t size)
