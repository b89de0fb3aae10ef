# The C types of merge_py.py and following_py.py, which are compiled into one module; the algorithms are there and only there.
import cython
from libc.stdint cimport int64_t, uint64_t

cimport kvspool.kernel.machine as native
from kvspool.kernel.frames_c cimport Batch, FrameReader
from kvspool.kernel.wakeups_c cimport Waiting

cdef int64_t LOOK_AROUND, FEW
cdef double NEVER
cdef object LAST_TIME, REAL


cdef class MergeSource:
    cdef readonly object key
    cdef readonly int64_t order
    cdef readonly object cursor
    cdef object make
    cdef readonly object reading
    cdef FrameReader frames
    cdef Batch batch
    cdef readonly int64_t timestamp
    cdef object item
    cdef public bint is_silent
    cdef bint is_new
    cdef bint is_mute
    cdef object _watched
    cdef bint _is_plain

    @cython.locals(batch=Batch)
    cdef bint step(self, int64_t most) except -1
    @cython.locals(frames=FrameReader, position=uint64_t, sequence=uint64_t)
    cdef bint _copy_out(self, int64_t most) except -1
    cdef bint _fill(self, int64_t most) except -1
    cdef bint has_items(self) except -1
    cdef bint has_more(self) except -1
    cdef bint is_watched(self) except -1
    cdef bint will_wake(self) except -1
    cdef object watch(self, Waiting watcher)
    cdef object unwatch(self)
    cdef bint ask(self) except -1


@cython.locals(at=Py_ssize_t, above=Py_ssize_t, other=MergeSource)
cdef object push(list heap, MergeSource source)
@cython.locals(at=Py_ssize_t, end=Py_ssize_t, below=Py_ssize_t, other=MergeSource)
cdef object sink(list heap, MergeSource source)
cdef bint is_before(MergeSource one, MergeSource other) noexcept


cdef class Merging:
    cdef public dict sources
    cdef public object missed
    cdef public object last
    cdef int64_t _left
    cdef object _next
    cdef object _on_gap
    cdef list _ready
    cdef list _new
    cdef bint _is_torn
    cdef int64_t _most
    cdef int64_t _taken
    cdef int64_t _orders
    cdef dict _refused
    cdef list _failures
    cdef bint _is_closed
    cdef str _why

    cdef object _is_to_be_looked_at(self, MergeSource source)
    @cython.locals(source=MergeSource, is_gap=bint)
    cdef object _take(self)
    @cython.locals(source=MergeSource)
    cdef object _rebuild(self)
    @cython.locals(source=MergeSource)
    cdef object _refill(self)
    cdef bint _advance(self, MergeSource source) except -1
    cdef object fall_silent(self, MergeSource source)
    cdef object look_around(self)
    @cython.locals(source=MergeSource)
    cdef bint look_at_new(self) except -1
    @cython.locals(source=MergeSource, has_item=bint, spoke=bint)
    cpdef bint look_at(self, list sources) except -1
    cdef bint listen(self, MergeSource source) except -1
    cdef bint wait(self) except -1


cdef class FollowingLoops(Merging):
    cdef public object timeout
    cdef public Waiting _watcher
    cdef bint _has_mute
    cdef list _still_to_check
    cdef bint _is_lost
    cdef double _must_look
    cdef double _may_look
    cdef double _must_seek

    cdef Waiting _armed(self)
    cdef double _now(self) except -1
    cdef bint _are_few(self) except -1
    @cython.locals(source=MergeSource)
    cdef list _silent(self)
    @cython.locals(deadline=double, now=double, left=double, until=double)
    cdef bint wait(self) except -1
    @cython.locals(watcher=Waiting)
    cdef object _watch(self, MergeSource source)
    @cython.locals(source=MergeSource, watcher=Waiting)
    cdef object _disarm(self)
    @cython.locals(source=MergeSource)
    cpdef object look_at_each(self, list sources)
    @cython.locals(now=double, was_lost=bint, keys=set, watcher=Waiting)
    cdef bint _heed(self, double longest) except -1
    @cython.locals(source=MergeSource)
    cdef object _look_at_keys(self, set keys)
    @cython.locals(source=MergeSource)
    cdef object _look_at_all(self, double now)
    @cython.locals(source=MergeSource)
    cdef object _look_at_mute(self, double now)
    @cython.locals(now=double)
    cdef object _rest(self, double since)
    @cython.locals(source=MergeSource)
    cdef bint _look_for_missed(self, double now) except -1
    @cython.locals(began=double, ended=double)
    cdef object _seek(self)
    @cython.locals(until=double, source=MergeSource)
    cdef object _look_at_next(self)
