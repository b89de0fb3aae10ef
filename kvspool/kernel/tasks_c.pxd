# The C types of tasks_py.py, under whose name it is compiled; the algorithm is there and only there.
import cython
from libc.stdint cimport int64_t, uint64_t

cimport kvspool.kernel.group_c as group
cimport kvspool.kernel.machine as native
from kvspool.kernel.lock_c cimport AppendLock

cdef Py_ssize_t LOCK, DIRTY, LOW, NEXT, READY_FROM, DUE, LEASES, ASKED, GROUP, CHANGES, SYNCED, ERROR, SAFE, BOOT, BURIED_FROM, BURYING
cdef Py_ssize_t WORKERS, KEPT, REPEATED, DEAD, WATCHERS, CALLS
cdef Py_ssize_t WORDS
cdef uint64_t FREE, READY, DELAYED, TAKEN, HELD, DONE, DYING
cdef uint64_t STATE, OWNERS, COUNTS, SERIALS, LAPS, HALF_LAPS, NONE
cdef int OWNER_AT, COUNT_AT, SERIAL_AT, LAP_AT
cdef Py_ssize_t MARK, UNTIL, BUCKET, AFTER, PLAIN_STRIDE, ORDERED_STRIDE
cdef int64_t BUSY, LOST, MOVED, WATCHES
cdef uint64_t CALL_BITS


# Not final: it has a method of its base.
cdef class TaskSlots(group.Progress):
    cdef object memory
    cdef uint64_t *words
    cdef readonly AppendLock lock
    cdef readonly uint64_t window
    cdef int bits
    cdef readonly bint is_ordered
    cdef Py_ssize_t stride
    cdef Py_ssize_t buckets
    cdef public uint64_t owner
    cdef readonly bint is_open
    cdef bint has_news
    cdef public bint must_ring
    cdef public bint must_call
    cdef public list ahead
    cdef public uint64_t ahead_first
    cdef public int64_t tick_after

    cdef Py_ssize_t at(self, uint64_t sequence) noexcept
    cpdef uint64_t mark_of(self, uint64_t sequence) noexcept
    @cython.locals(found=int64_t)
    cpdef int64_t age(self, uint64_t sequence, uint64_t mark) noexcept
    @cython.locals(mark=uint64_t, age=int64_t)
    cpdef bint is_done(self, uint64_t sequence) noexcept
    @cython.locals(lap=uint64_t, mark=uint64_t)
    cdef uint64_t put(self, uint64_t sequence, uint64_t state, uint64_t owner, uint64_t count, uint64_t serial) noexcept
    cdef uint64_t change(self, uint64_t sequence, uint64_t mark, uint64_t state, uint64_t owner) noexcept
    @cython.locals(lap=uint64_t)
    cdef void blank(self, uint64_t sequence) noexcept
    cdef int check_open(self) except -1
    cdef bint begin(self) except -1
    cdef int64_t leave(self, int64_t result) noexcept
    cdef int end(self) except -1
    @cython.locals(words="uint64_t *", low=uint64_t, after=uint64_t, mark=uint64_t)
    cdef int derive(self) except -1
    @cython.locals(bucket=uint64_t)
    cdef void forget_buckets(self) noexcept
    @cython.locals(low=uint64_t, after=uint64_t, first=uint64_t)
    cdef int advance(self) except -1
    @cython.locals(due=uint64_t, leases=uint64_t)
    cdef bint is_due(self) noexcept
    @cython.locals(
        words="uint64_t *", low=uint64_t, after=uint64_t, due=uint64_t, leases=uint64_t, sequence=uint64_t, mark=uint64_t, state=uint64_t,
        until=uint64_t
    )
    cdef int look_at_times(self, uint64_t now, uint64_t clock) except -1
    cdef int make_ready(self, uint64_t sequence, uint64_t mark) except -1
    @cython.locals(words="uint64_t *", low=uint64_t, after=uint64_t)
    cpdef int64_t skip_below(self, uint64_t sequence) except? -9
    @cython.locals(words="uint64_t *", end=uint64_t, at=uint64_t)
    cpdef int start_at(self, uint64_t sequence) except -1
    @cython.locals(words="uint64_t *", low=uint64_t, sequence=uint64_t, hole=uint64_t, mark=uint64_t, age=int64_t)
    cpdef int64_t restart(self, uint64_t safe, uint64_t end) except? -9
    @cython.locals(words="uint64_t *")
    cdef int forget_times(self, uint64_t after) except -1
    @cython.locals(low=uint64_t, latest=uint64_t, sequence=uint64_t, mark=uint64_t, age=int64_t)
    cdef uint64_t least_low(self) except? 0
    cpdef int look(self, uint64_t sequence) except -1
    cpdef uint64_t word(self, Py_ssize_t at) except? 0
    cpdef int set_word(self, Py_ssize_t at, uint64_t value) except -1
    cpdef int ask(self) except -1
    @cython.locals(mark=uint64_t, age=int64_t)
    cpdef int state_of(self, uint64_t sequence) except -1
    @cython.locals(sequence=uint64_t, after=uint64_t)
    cpdef list counts(self)
    cpdef int close(self) except -1


cdef class TaskWaiters(TaskSlots):
    @cython.locals(clock=uint64_t, place=int)
    cpdef int64_t stand_watch(self, uint64_t patience) except? -9
    cdef int place_for(self, uint64_t clock, uint64_t patience) noexcept
    @cython.locals(since=uint64_t)
    cdef bint is_free(self, int place, uint64_t clock, uint64_t patience) noexcept
    @cython.locals(clock=uint64_t)
    cpdef int64_t end_watch(self, uint64_t patience) except? -9
    @cython.locals(place=int)
    cdef int free_place(self, uint64_t owner) except -1
    cdef int note_call(self) except -1
    cpdef int call_one(self) except -1
    cpdef int call_all(self) except -1
    cpdef int rest(self, uint64_t calls, int64_t ns) except -1


cdef class TaskWindow(TaskWaiters):
    @cython.locals(words="uint64_t *", until=uint64_t, count=int64_t)
    cpdef int64_t take(self, int64_t most, uint64_t end, int64_t lease, list sequences, list marks) except? -9
    @cython.locals(ahead=list, first=uint64_t, clock=int64_t, sequence=uint64_t, mark=uint64_t)
    cpdef object next_ahead(self, int64_t lease, object make, object source)
    @cython.locals(
        ahead=list, first=uint64_t, clock=int64_t, marks=list, count=uint64_t, at=uint64_t, sequence=uint64_t, mark=uint64_t
    )
    cpdef object take_ahead(self, int64_t most, int64_t lease, object make, object source)
    @cython.locals(words="uint64_t *", low=uint64_t)
    cdef uint64_t can_continue(self, uint64_t sequence, uint64_t most, uint64_t first, uint64_t size) noexcept
    @cython.locals(words="uint64_t *", at=Py_ssize_t, until=uint64_t)
    cdef uint64_t claim_next(self, uint64_t sequence, uint64_t lease, uint64_t clock) noexcept
    @cython.locals(sequence=uint64_t, mark=uint64_t, is_over=bint, is_done=bint)
    cpdef bint finish_task(self, object task) except -1
    @cython.locals(words="uint64_t *", sequence=uint64_t, after=uint64_t, mark=uint64_t, state=uint64_t, count=int64_t)
    cdef int64_t take_again(self, int64_t most, uint64_t until, list sequences, list marks) except? -9
    @cython.locals(words="uint64_t *", sequence=uint64_t, mark=uint64_t, count=int64_t)
    cdef int64_t take_new(self, int64_t most, uint64_t end, uint64_t until, list sequences, list marks) except? -9
    @cython.locals(count=uint64_t)
    cdef int give(self, uint64_t sequence, uint64_t mark, uint64_t state, uint64_t until, list sequences, list marks) except -1
    @cython.locals(words="uint64_t *", sequence=uint64_t, end=uint64_t, bucket=uint64_t)
    cpdef int64_t admit(self, uint64_t first, list hashes) except? -9
    @cython.locals(words="uint64_t *", at=Py_ssize_t, mark=uint64_t, is_new=bint, last=uint64_t, is_first=bint)
    cdef object admit_one(self, uint64_t sequence, uint64_t bucket)
    cpdef int64_t finish(self, uint64_t sequence, uint64_t mark) except? -9
    @cython.locals(mark=uint64_t)
    cpdef int64_t finish_all(self, list tasks, list lost) except? -9
    @cython.locals(words="uint64_t *")
    cdef bint finish_one(self, uint64_t sequence, uint64_t mark) except -1
    @cython.locals(after=uint64_t, mark=uint64_t)
    cdef object let_next(self, uint64_t sequence)
    @cython.locals(words="uint64_t *")
    cpdef int64_t put_back(self, uint64_t sequence, uint64_t mark, uint64_t due) except? -9
    @cython.locals(words="uint64_t *")
    cpdef int64_t prolong(self, uint64_t sequence, uint64_t mark, uint64_t until) except? -9
    cpdef int64_t condemn(self, uint64_t sequence, uint64_t mark) except? -9
    @cython.locals(mark=uint64_t)
    cpdef int64_t bury(self, uint64_t sequence) except? -9
    @cython.locals(low=uint64_t, count=int64_t, sequence=uint64_t, mark=uint64_t, is_held=bint)
    cpdef int64_t release(self, uint64_t owner) except? -9
    @cython.locals(words="uint64_t *", low=uint64_t, sequence=uint64_t)
    cpdef int64_t pass_over(self, uint64_t first, uint64_t to) except? -9
