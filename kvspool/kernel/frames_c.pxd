# The C types of the sources that are compiled into one module, see frames_py.py; the algorithms are there and only there.
import cython
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

cimport kvspool.kernel.group_c as group
cimport kvspool.kernel.machine as native
from kvspool.kernel.lock_c cimport AppendLock

cdef uint64_t DATA_START, HEADER, LOW, NOTHING, EVICTED, LARGEST, MOST_POSITION
cdef uint32_t PAD, NO_KEY
cdef int BLOCK, ERA_BITS
cdef uint64_t AHEAD, STEP, WRITTEN_AHEAD
cdef object NO_ITEM
cdef Py_ssize_t SLOTS_CHANGED, SLOTS_AT, SLOTS, SLOT_WORDS, SLOT_EVICTED, SLOT_NAME, SLOT_COMMITS, COMMIT_WORDS
cdef int TRIES
cdef Py_ssize_t HEAD, MIN_SEQ, TAIL, MARKS, MARK_WORDS, SYNCED_SEQ, SYNC_ERROR, FLUSH_GROUP, WANTED, RINGS, WATCHES, SLEEPS
cdef Py_ssize_t MOVED, DROPPED, KEPT, PINS
cdef Py_ssize_t HOLDER, HOLDER_WORDS, PENDING, RATES, RATE_WORDS, BUCKETS, INDEX, INDEX_WORDS, ECHO, HEAD_ECHO
cdef int64_t SYNC_LOCK
cdef int FRAME, SKIP, BAD
cdef int END, OVERRUN, DAMAGED, JUMPED, FULL
cdef int64_t BUSY, FORKED, LOOK, NO_ROOM, MOVED_ON, UNSETTLED, OUTDATED


cdef class Ring(group.Progress):
    cdef object owner
    cdef uint8_t *data
    cdef uint64_t *words
    cdef uint64_t *control
    cdef uint8_t *flags
    cdef readonly uint64_t capacity
    cdef Py_ssize_t control_words
    cdef readonly bint may_store
    cdef uint64_t lap
    cdef uint32_t seed
    cdef readonly bint closed
    cdef readonly uint64_t passed
    cdef uint64_t offset
    cdef readonly uint64_t stored
    cdef uint64_t content
    cdef readonly uint64_t sequence_found
    cdef readonly uint64_t timestamp
    cdef uint32_t tags
    cdef uint32_t checksum
    cdef uint32_t key_length

    @cython.locals(
        data_bytes="uint8_t *", data_words="uint64_t *", control_words="uint64_t *", control_bytes="uint8_t *", may_store=bint
    )
    cdef int attach(self, object data, object control, uint32_t seed) except -1
    cdef int check_open(self) except -1
    cdef int check_writable(self) except -1
    @cython.locals(synced=uint64_t, is_done=bint)
    cpdef int look(self, uint64_t sequence) except -1
    cdef int check_word(self, Py_ssize_t at) except -1
    @cython.locals(head=uint64_t)
    cpdef uint64_t head(self) except? 0
    cdef uint64_t bounded_head(self, uint64_t head, uint64_t tail) noexcept
    @cython.locals(tail=uint64_t)
    cpdef uint64_t tail(self) except? 0
    cdef int check_position(self, uint64_t position) except -1
    cpdef uint64_t request_wake_up(self, Py_ssize_t way) except? 0
    @cython.locals(asked=uint64_t)
    cpdef bint wake_readers(self) except -1
    cpdef void rouse(self) except *
    cdef bint has_moved(self) noexcept
    @cython.locals(owner=object)
    cpdef object wait_word(self, Py_ssize_t at, uint64_t expected, int64_t longest)
    cpdef uint64_t word(self, Py_ssize_t at) except? 0
    @cython.locals(tail=uint64_t, sequence=uint64_t, timestamp=uint64_t, at=Py_ssize_t)
    cpdef tuple mark(self)
    cdef Py_ssize_t find_mark(self, uint64_t tail) noexcept
    cdef uint64_t offset_of(self, uint64_t position) noexcept
    @cython.locals(offset=uint64_t, room=uint64_t, at=Py_ssize_t, lengths=uint64_t, stored=uint64_t, tags=uint64_t)
    cdef int parse(self, uint64_t position, uint64_t end) noexcept
    @cython.locals(state=uint32_t)
    cdef bint is_sound(self, uint64_t offset) noexcept
    @cython.locals(found=int)
    cpdef uint64_t sequence_at(self, uint64_t position, uint64_t end) except? 0
    cpdef uint64_t find_frame(self, uint64_t position, uint64_t end, uint64_t least, uint64_t most) except? 0
    @cython.locals(found=int)
    cdef uint64_t scan(self, uint64_t position, uint64_t end, uint64_t least, uint64_t most) noexcept
    @cython.locals(found=int, least=uint64_t, beyond=uint64_t)
    cpdef uint64_t walk(self, uint64_t position, uint64_t end, uint64_t sequence, uint64_t timestamp) except? 0
    cdef bint goes_back(self, int found, uint64_t least) noexcept
    @cython.locals(at=Py_ssize_t, position=uint64_t, sequence=uint64_t, timestamp=uint64_t)
    cpdef tuple entry(self, Py_ssize_t block)


@cython.final
cdef class FrameReader(Ring):
    cdef public uint64_t position
    cdef public uint64_t sequence
    cdef readonly int stop
    cdef uint32_t[1] state
    cdef object time
    cdef uint64_t time_before
    cdef public Py_ssize_t edge
    cdef bint is_woken

    cpdef object move(
        self, object data, object control, uint32_t seed, uint64_t position, uint64_t sequence
    )
    @cython.locals(found=int)
    cdef bint next_frame(self, uint64_t end) noexcept
    cdef bint accept(self, uint32_t state) noexcept
    cdef bint reaches_next(self, uint64_t end) noexcept
    @cython.locals(offset=uint64_t, length=uint64_t, state=uint32_t)
    cpdef tuple find(self, uint64_t end)
    @cython.locals(
        data="const uint8_t *", words="const uint64_t *", position=uint64_t, sequence=uint64_t, first=uint64_t, offset=uint64_t,
        size=uint64_t,
        stop=int, at=uint64_t, is_plain=bint, lengths=uint64_t, tags=uint64_t, stored=uint64_t, content=uint64_t, state=uint32_t
    )
    cpdef tuple check(self, uint64_t end, uint64_t limit)
    cdef uint32_t head_state(self) noexcept
    @cython.locals(count=int64_t, position=uint64_t, sequence=uint64_t, item=object)
    cpdef list fetch(self, uint64_t end, int64_t limit, object make, list out=*)
    @cython.locals(
        words="const uint64_t *", position=uint64_t, sequence=uint64_t, offset=uint64_t, room=uint64_t, at=uint64_t, lengths=uint64_t,
        timestamp=uint64_t, tags=uint64_t, stored=uint64_t, state="uint32_t *", content=uint64_t, key_length=uint64_t, key=object,
        value=bytes,
        stop=int
    )
    cdef object step(self, uint64_t end, object make)
    @cython.locals(tail=uint64_t, edge=uint64_t)
    cpdef uint64_t edge_now(self) except? 0
    cpdef bint has_more(self) except -1
    cpdef list sleep_and_fetch(
        self, uint64_t end, int64_t spin, int64_t slice, int64_t ns, int64_t blind, int64_t limit, object make, list out
    )
    @cython.locals(owner=object, seen=uint64_t)
    cpdef void sleep(self, uint64_t end, int64_t ns, int64_t blind) except *
    cpdef void wake(self) except *
    @cython.locals(owner=object, words="uint64_t *", until=int64_t, left=int64_t, seen=uint64_t)
    cpdef bint spin(self, int64_t ns, int64_t slice) except -1
    @cython.locals(
        most=Py_ssize_t, sequence_column="native.number *", timestamp_column="native.number *", type_column="native.half *",
        key_places="native.half *", value_places="native.half *", bits="uint8_t *", key_data="uint8_t *", value_data="uint8_t *",
        codec_column="uint8_t *", has_codecs=bint, key_room=uint64_t, value_room=uint64_t, data="const uint8_t *", words="const uint64_t *",
        control="const uint64_t *", capacity=uint64_t, seed=uint32_t, position=uint64_t, sequence=uint64_t, first=uint64_t, offset=uint64_t,
        key_at=uint64_t, value_at=uint64_t, count=Py_ssize_t, stop=int, at=uint64_t, is_plain=bint, lengths=uint64_t, timestamp=uint64_t,
        tags=uint64_t, stored=uint64_t, key_length=uint64_t, has_key=bint, value_length=uint64_t, state=uint32_t
    )
    cpdef Py_ssize_t gather(
        self, uint64_t end, Py_ssize_t limit, int64_t[::1] sequences, int64_t[::1] timestamps, int32_t[::1] types,
        int32_t[::1] key_offsets, uint8_t[::1] keys, uint8_t[::1] key_bits, int32_t[::1] value_offsets, uint8_t[::1] values,
        uint8_t[::1] codecs=*
    ) except -1


cdef class Sleeper:
    cdef bint is_undisturbed(self) except -1
    cdef bint fetch(self, int64_t ns, int64_t most, object make, list out) except -1


cdef class RingSleeper(Sleeper):
    cdef FrameReader reader
    cdef object files
    cdef int64_t spin
    cdef int64_t slice
    cdef int64_t blind

    cdef bint is_undisturbed(self) except -1
    @cython.locals(reader=FrameReader)
    cdef bint fetch(self, int64_t ns, int64_t most, object make, list out) except -1


@cython.final
cdef class Batch:
    cdef public list items
    cdef public Py_ssize_t at
    cdef public int64_t left
    cdef FrameReader reader
    cdef Sleeper sleeper
    cdef uint64_t end
    cdef int64_t longest
    cdef int64_t most
    cdef object make
    cdef int64_t waited
    cdef readonly Py_ssize_t waiting

    cpdef int run(self, object reader, uint64_t end, int64_t most, object make) except -1
    cpdef int park(self, Sleeper sleeper, int64_t ns, int64_t most, object make) except -1
    @cython.locals(waited=int64_t)
    cpdef int64_t unpark(self) except -1
    cdef bint is_filled(self, list items) except -1
    @cython.locals(began=int64_t, most=int64_t, items=list, is_calm=bint)
    cdef bint wait(self, Sleeper sleeper) except -1
    cpdef list clear(self)
    @cython.locals(at=Py_ssize_t, reader=FrameReader, sleeper=Sleeper, item=object)
    cpdef object take(self, object refill)
    @cython.locals(end=uint64_t, position=uint64_t, sequence=uint64_t)
    cdef object next_of(self, FrameReader reader)


@cython.final
cdef class Items:
    cdef Batch batch
    cdef object refill


cdef class RingEnd(Ring):
    cdef int data_fd
    cdef object front_owner
    cdef uint64_t *front
    cdef object holder_owner
    cdef uint64_t *holder
    cdef public bint has_watchers
    cdef bint has_sleepers
    cdef uint64_t published
    cdef Py_ssize_t mark_at
    cdef readonly uint64_t end
    cdef uint64_t batch_end
    cdef uint64_t padded
    cdef uint64_t indexed
    cdef readonly uint64_t next_sequence
    cdef readonly int64_t last_timestamp
    cdef readonly bint keeps_unread
    cdef readonly uint64_t floor
    cdef uint64_t slots_seen
    cdef uint64_t place
    cdef int64_t moved
    cdef uint32_t generation
    cdef uint64_t counted
    cdef public int64_t clock

    @cython.locals(tail=uint64_t, at=Py_ssize_t)
    cpdef uint64_t begin(self) except? 0
    @cython.locals(at=Py_ssize_t, head=uint64_t)
    cdef void sign(self) noexcept
    @cython.locals(other=Py_ssize_t, wanted=uint64_t)
    cpdef void publish(self) noexcept
    @cython.locals(at=Py_ssize_t, number=uint64_t, _series=int, bucket=Py_ssize_t)
    cdef void count(self) noexcept
    @cython.locals(block=Py_ssize_t, at=Py_ssize_t, first=uint64_t, known=uint64_t)
    cdef void index(self, uint64_t position, uint64_t offset, uint64_t sequence, int64_t timestamp) noexcept
    @cython.locals(changed=uint64_t)
    cpdef bint admits(self, uint64_t end) except -1
    @cython.locals(head=uint64_t, floor=uint64_t, place=uint64_t, slot=Py_ssize_t, at=Py_ssize_t)
    cdef uint64_t find_floor(self, uint64_t end) noexcept
    cdef uint64_t held_at(self, Py_ssize_t at, uint64_t head, uint64_t end) noexcept
    @cython.locals(at=Py_ssize_t)
    cpdef tuple commit_in(self, Py_ssize_t slot)
    @cython.locals(at=Py_ssize_t)
    cpdef object evict(self, Py_ssize_t slot, uint64_t generation)
    cdef Py_ssize_t slot_at(self, Py_ssize_t slot) except -1
    @cython.locals(
        state=uint32_t, found=bint, which=Py_ssize_t, commit=Py_ssize_t, place=uint64_t, sequence=uint64_t, moved=uint64_t,
        tags=uint64_t, generation=uint32_t, newer=uint32_t
    )
    cdef bint find_commit(self, Py_ssize_t at) noexcept
    @cython.locals(stored=uint64_t, room=uint64_t)
    cdef uint64_t end_of(self, uint64_t position, uint64_t content) noexcept
    @cython.locals(content=uint64_t)
    cdef uint64_t end_of_value(self, uint64_t position, bytes key, bytes value) except? 0
    @cython.locals(at=Py_ssize_t, value=bytes)
    cpdef uint64_t end_of_many(self, uint64_t position, list keys, list values) except? 0
    @cython.locals(at=Py_ssize_t, row=Py_ssize_t, content=uint64_t)
    cpdef uint64_t end_of_columns(
        self, uint64_t position, const int32_t[::1] rows, Py_ssize_t count, const int32_t[::1] key_offsets, const uint8_t[::1] has_key,
        const int32_t[::1] value_offsets
    ) except? 0
    @cython.locals(stored=uint64_t, quarter=uint64_t, room=uint64_t, head=uint64_t, offset=uint64_t)
    cdef uint64_t make_way(self, uint64_t content) except? 0
    @cython.locals(at=Py_ssize_t, state=uint32_t)
    cdef void put_pad(self, uint64_t offset, uint64_t room) noexcept
    @cython.locals(
        head=uint64_t, before=uint64_t, least=uint64_t, least_before=uint64_t, found=int, words="uint64_t *",
        capacity=uint64_t, published=uint64_t, lap=uint64_t, offset=uint64_t, stored=uint64_t, room=uint64_t, at=Py_ssize_t,
        lengths=uint64_t, tags=uint64_t
    )
    cdef uint64_t make_room(self, uint64_t end) noexcept
    cpdef bint has_pins(self) noexcept
    @cython.locals(head=uint64_t, stop=uint64_t)
    cpdef bint would_overwrite_pinned(self, uint64_t end) noexcept
    @cython.locals(offset=uint64_t, length=uint64_t, first=uint64_t)
    cdef bint is_pinned(self, uint64_t start, uint64_t end) noexcept
    cdef bint may_be_oldest(self, int found, uint64_t least, uint64_t position) noexcept


cdef class Bulk


@cython.final
cdef class FrameWriter(RingEnd):
    cdef readonly AppendLock lock
    cdef object keeper
    cdef int process
    cdef public object guard
    cdef int64_t era
    cdef public int64_t looked_at
    cdef public int64_t look_at

    cpdef int64_t append(
        self, bytes key, bytes value, uint32_t type, uint32_t codec, int64_t timestamp, int64_t era=*, int64_t patience=*
    ) except? -9
    @cython.locals(now=int64_t, sequence=int64_t, is_ours=bint)
    cdef int64_t append_alone(
        self, bytes key, bytes value, uint32_t type, uint32_t codec, int64_t timestamp, int64_t era, int64_t patience
    ) except? -9
    cdef int free(self) except -1
    cdef int64_t append_locked(self, bytes key, bytes value, uint32_t type, uint32_t codec, int64_t timestamp, int64_t now) except? -9
    @cython.locals(now=int64_t, done=object)
    cpdef object append_many(self, list keys, list values, uint64_t type, int64_t timestamp)
    @cython.locals(longest=int64_t, stored=uint64_t, first=uint64_t)
    cpdef object append_bulk(self, Bulk bulk)
    cpdef object locked(self, object work)
    cdef object locked_alone(self, object work)
    cpdef void ring(self) except *
    @cython.locals(
        key_length=Py_ssize_t, key_tag=uint64_t, content=uint64_t, stored=uint64_t, position=uint64_t, offset=uint64_t
    )
    cdef int put_value(self, bytes key, bytes value, uint64_t type, uint64_t codec, int64_t timestamp) except -1
    @cython.locals(
        count=Py_ssize_t, data="uint8_t *", words="uint64_t *", seed=uint32_t, indexed=uint64_t, position=uint64_t, limit=uint64_t,
        lap=uint64_t, sequence=uint64_t, last=int64_t, codec=uint64_t, at=Py_ssize_t, key="const uint8_t *", value="const uint8_t *",
        content=uint64_t, key_length=Py_ssize_t, key_tag=uint64_t, stored=uint64_t, tags=uint64_t, offset=uint64_t
    )
    cpdef int put_many(
        self, list keys, list values, uint64_t type, const uint8_t[::1] codecs, int64_t timestamp, uint64_t stored=*
    ) except -1
    cpdef object put_copy(self, uint64_t sequence, int64_t timestamp, uint32_t type, bytes key, bytes value, uint32_t codec)
    @cython.locals(
        key_data="const uint8_t *", value_data="const uint8_t *", now=int64_t, data="uint8_t *", words="uint64_t *", seed=uint32_t,
        indexed=uint64_t, position=uint64_t, limit=uint64_t, lap=uint64_t, sequence=uint64_t, last=int64_t, at=Py_ssize_t,
        row=Py_ssize_t, value_from=Py_ssize_t, content=uint64_t, key_from=Py_ssize_t, key_length=Py_ssize_t, key_tag=uint64_t,
        stored=uint64_t, timestamp=int64_t, tags=uint64_t, offset=uint64_t, lengths=uint64_t
    )
    cpdef int put_columns(
        self, const int32_t[::1] rows, Py_ssize_t count, const int32_t[::1] key_offsets, const uint8_t[::1] keys,
        const uint8_t[::1] has_key,
        const int32_t[::1] value_offsets, const uint8_t[::1] values, const uint8_t[::1] types, uint64_t codec,
        const int64_t[::1] timestamps, uint64_t stored=*
    ) except -1


@cython.final
cdef class Bulk:
    cdef list keys
    cdef list values
    cdef uint64_t type
    cdef int64_t timestamp


cdef class Single:
    cdef public object _writer
    cdef public bint is_durable
    cdef int64_t most_ahead

    @cython.locals(writer=FrameWriter, sequence=int64_t)
    cdef int64_t append_at_once(self, object value, object key, object type, object timestamp, object durable) except? -9


cdef class FrameScanner(Ring):
    cdef bint may_erase
    cdef readonly uint64_t start
    cdef readonly uint64_t position
    cdef readonly uint64_t first
    cdef readonly uint64_t last
    cdef readonly uint64_t newest
    cdef readonly uint64_t frames

    @cython.locals(found=int, end=uint64_t)
    cpdef bint next_run(self, uint64_t position, uint64_t stop, uint64_t least, uint64_t split) except -1
    cdef uint64_t step(self, uint64_t offset) noexcept
    @cython.locals(end=uint64_t)
    cdef void follow(self, uint64_t position, uint64_t stop, uint64_t split) noexcept
    cpdef uint64_t place_of(self, uint64_t position, uint64_t end, uint64_t sequence) except? 0
    @cython.locals(at=Py_ssize_t)
    cpdef int erase(self, uint64_t position, uint64_t end, uint64_t least) except -1
    @cython.locals(found=int, at=uint64_t)
    cpdef int cut(self, uint64_t position, uint64_t end, uint64_t least) except -1
    @cython.locals(block=Py_ssize_t, blocks=Py_ssize_t)
    cdef int check_erasable(self) except -1
    cpdef int clear_index(self) except -1
    @cython.locals(offset=uint64_t, block=Py_ssize_t, at=Py_ssize_t, known=uint64_t)
    cpdef int enter_run(self, uint64_t position, uint64_t end) except -1


@cython.locals(least=int64_t)
cdef int check_sizes(int64_t capacity, int64_t control) except -1
@cython.locals(stored=uint64_t, content=uint64_t, key_length=uint64_t)
cdef bint is_record(uint64_t lengths, uint64_t tags, uint64_t room) noexcept
cdef int judge(uint64_t head, uint64_t position, uint32_t state, uint64_t tags) noexcept
cdef bint are_plain(object key, object type, object timestamp, int64_t most_ahead) except -1
@cython.locals(at=Py_ssize_t, lengths=uint64_t, tags=uint64_t, stored=uint64_t, content=uint64_t, key_tag=uint64_t)
cdef uint64_t length_of(uint64_t *words, uint64_t offset, uint64_t room, uint64_t sequence) noexcept
cdef bint fits(list keys, list values, Py_ssize_t at) noexcept
@cython.locals(longest=Py_ssize_t, total=Py_ssize_t, length=Py_ssize_t, at=Py_ssize_t)
cpdef tuple measure(list keys, list values)
@cython.locals(longest_key=Py_ssize_t, largest=Py_ssize_t, row=Py_ssize_t, content=Py_ssize_t, key_length=Py_ssize_t)
cpdef tuple measure_columns(
    Py_ssize_t count, const int32_t[::1] key_offsets, const uint8_t[::1] has_key, const int32_t[::1] value_offsets
)
cpdef uint32_t crc32c(uint32_t state, bytes data) except? 0
