"""Record batches in Arrow's IPC format, read and written in place: the header and the body of a FlightData, without a copy of the columns.

    encoded = EncodedBatch.parse(data.header, data.body, schema)     checked, nothing is allocated yet
    encoded.allocated                                                bytes that `decode` will allocate: those of a compressed batch
    batch = encoded.decode()

The header is a FlatBuffer: tables whose fields are found by offsets. Each offset of a received one is checked. Columns are those of
records: numbers and binary ones, neither nested nor with a dictionary.
"""

from __future__ import annotations

import struct
from itertools import islice
from typing import Any, NamedTuple

import pyarrow as pa

from hub.errors import Malformed
from hub.server.flight import Bytes
from kvspool.system.handles import Handle

LARGEST_SCHEMA = 1 << 16  # bytes
_CONTINUATION = b"\xff\xff\xff\xff"
_PREFIX = 8  # bytes of an encapsulated message before its header: the continuation, and the size of the header
_V4, _V5 = 3, 4  # versions of the format
_SCHEMA, _RECORDS = 1, 3  # types of a message
_CODECS = {0: "lz4", 1: "zstd"}
_MOST_PARTS = 64  # buffers of a batch
_LARGEST_SIZE = 1 << 40  # no size in a message is larger


class EncodedBatch(NamedTuple):
    """A batch as it was received. parts: begin and size of its buffers in the body; counts: the nulls of each column."""

    schema: pa.Schema
    rows: int
    counts: list[int]
    parts: list[tuple[int, int]]
    body: memoryview
    codec: str | None
    sizes: list[int]  # of each buffer after decompression; -1 for one that isn't compressed

    @classmethod
    def parse(cls, header: Bytes, body: memoryview, schema: pa.Schema) -> EncodedBatch:
        """Check the header of a batch with these columns. Raises Malformed."""
        flat = _FlatBuffer(header)
        message = flat.message(_RECORDS, len(body))
        records = flat.table(message, 2)
        rows = flat.number(records, 0, "<q")
        nodes, parts = flat.pairs(records, 1), flat.pairs(records, 2)
        wanted = sum(_parts_of(field.type) for field in schema)
        if len(nodes) != len(schema) or len(parts) != wanted:
            raise Malformed(f"a batch of {len(nodes)} columns and {len(parts)} buffers; it must have {len(schema)} and {wanted}")
        if not 0 <= rows < _LARGEST_SIZE or not all(length == rows and 0 <= nulls <= rows for length, nulls in nodes):
            raise Malformed("a batch whose columns have different or impossible lengths")
        if not all(0 <= begin <= len(body) - size for begin, size in parts if size) or any(size < 0 for _, size in parts):
            raise Malformed("a batch with a buffer outside its body")
        codec = flat.codec(records)
        sizes = [-1] * len(parts) if codec is None else [_size(body[begin : begin + size]) for begin, size in parts]
        return cls(schema, rows, [nulls for _, nulls in nodes], parts, body, codec, sizes)

    @property
    def allocated(self) -> int:
        """Return how many bytes `decode` allocates."""
        return sum(size for size in self.sizes if size > 0)

    def decode(self) -> pa.RecordBatch:
        """Return the batch, whose uncompressed columns are views of the body. Raises Malformed; the buffers' content isn't checked."""
        buffers = iter(self._buffers())
        arrays = []
        for field, nulls in zip(self.schema, self.counts, strict=True):
            validity, *others = islice(buffers, _parts_of(field.type))
            if nulls and validity.size * 8 < self.rows:
                raise Malformed(f"column {field.name} has nulls, but not which ones")
            try:
                arrays.append(pa.Array.from_buffers(field.type, self.rows, [validity if nulls else None, *others], nulls))
            except pa.ArrowInvalid as error:
                raise Malformed(f"column {field.name} contradicts itself: {error}") from None
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def _buffers(self) -> list[pa.Buffer]:
        found = []
        for (begin, size), decompressed in zip(self.parts, self.sizes, strict=True):
            data = pa.py_buffer(self.body[begin : begin + size])
            if self.codec is not None and size:
                data = data.slice(8)
                if decompressed >= 0:
                    data = _decompressed(self.codec, data, decompressed)
            found.append(data)
        return found


def _decompressed(codec: str, data: pa.Buffer, size: int) -> pa.Buffer:
    """Return a buffer of exactly this size. Nothing else that is as large is allocated, whatever the data says.

    Arrow's codec of lz4 returns memory that it hasn't written if the data is shorter, so a stream is read. A stream of zstd would allocate
    a window, whose size the data declares: up to 128 MiB.
    """
    try:
        if codec == "zstd":
            return pa.decompress(data, size, codec)
        with pa.CompressedInputStream(pa.BufferReader(data), codec) as stream:
            found = stream.read_buffer(size + 1)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise Malformed(f"a batch whose compressed buffer is damaged: {str(error)[:200]}") from None
    if found.size != size:
        raise Malformed(f"a batch whose compressed buffer has not the {size} bytes that it declares")
    return found


def _size(data: memoryview) -> int:
    """Return the declared size of a compressed buffer."""
    if not data:
        return -1
    if len(data) < 8:
        raise Malformed("a compressed buffer without its size")
    size: int = struct.unpack_from("<q", data)[0]
    if not -1 <= size < _LARGEST_SIZE:
        raise Malformed(f"a compressed buffer of {size} bytes")
    return size


def _parts_of(kind: pa.DataType) -> int:
    """Return how many buffers a column has: validity, offsets of binary values, values."""
    return 3 if pa.types.is_binary(kind) else 2


def read_schema(header: Bytes) -> pa.Schema:
    """Return the columns that a stream begins with. Raises Malformed."""
    if len(header) > LARGEST_SCHEMA:
        raise Malformed(f"a schema of {len(header)} bytes; the limit is {LARGEST_SCHEMA}")
    _FlatBuffer(header).message(_SCHEMA, 0)
    try:
        return pa.ipc.read_schema(pa.py_buffer(b"".join((_CONTINUATION, struct.pack("<i", len(header)), header))))
    except (pa.ArrowException, OSError, ValueError) as error:
        raise Malformed(f"no schema of Arrow: {str(error)[:200]}") from None


def encode_schema(schema: pa.Schema) -> bytes:
    """Return the header of the message that a stream begins with."""
    return bytes(schema.serialize()[_PREFIX:])


class BatchEncoder(Handle):
    """Encodes the batches of a stream."""

    def __init__(self, schema: pa.Schema) -> None:
        self._pieces = _Pieces()
        self._writer = pa.ipc.new_stream(self._pieces, schema)
        self.empty = pa.RecordBatch.from_arrays([pa.nulls(0, field.type) for field in schema], schema=schema)
        self.encode(self.empty)  # the first batch is written after the schema

    def encode(self, batch: pa.RecordBatch) -> tuple[bytes, list[memoryview]]:
        """Return the header of a batch, and the pieces of its body, most of which are its columns' own memory."""
        self._pieces.clear()
        self._writer.write_batch(batch)
        pieces = self._pieces.take()
        size, header = int.from_bytes(pieces[1], "little"), b""
        at = 2
        while len(header) < size:
            header += pieces[at]
            at += 1
        return header, pieces[at:]


class _Pieces:
    """A file that keeps the pieces written to it; Arrow hands over a column as its own memory."""

    closed = False

    def __init__(self) -> None:
        self._pieces: list[memoryview] = []

    def write(self, data: Any) -> None:
        self._pieces.append(memoryview(data))

    def clear(self) -> None:
        self._pieces = []

    def take(self) -> list[memoryview]:
        pieces, self._pieces = self._pieces, []
        return pieces

    def flush(self) -> None:
        """Called by Arrow."""

    def close(self) -> None:
        """Called by Arrow."""


class _FlatBuffer:
    """The header of a message. Every position in it is checked: a wrong one raises Malformed."""

    def __init__(self, data: Bytes) -> None:
        self._data = memoryview(data)

    def message(self, kind: int, body: int) -> int:
        """Return the position of the message, which must be of this kind, and have a body of so many bytes."""
        message = self._unpack("<I", 0)
        version, found = self.number(message, 0, "<h"), self.number(message, 1, "<B")
        if version != _V5 and (version != _V4 or self._field(message, 4)):
            raise Malformed(f"a message of the version {version} of Arrow's format")
        if found != kind:
            raise Malformed(f"a message of the type {found} of Arrow's format, where one of type {kind} must be")
        if self.number(message, 3, "<q") != body:
            raise Malformed(f"a body of {body} bytes, and a header that promises {self.number(message, 3, '<q')}")
        return message

    def codec(self, records: int) -> str | None:
        """Return the name of the codec of a batch; None if it isn't compressed."""
        if not self._field(records, 3):
            return None
        compression = self.table(records, 3)
        codec, method = self.number(compression, 0, "<b"), self.number(compression, 1, "<b")
        if codec not in _CODECS or method:
            raise Malformed(f"a batch compressed by the unknown codec {codec}, method {method}")
        return _CODECS[codec]

    def number(self, table: int, field: int, form: str) -> int:
        """Return a field of a table; 0 if it has none."""
        at = self._field(table, field)
        return self._unpack(form, at) if at else 0

    def table(self, table: int, field: int) -> int:
        """Return the position of an inner table."""
        at = self._field(table, field)
        if not at:
            raise Malformed(f"a header without its field {field}")
        return at + self._unpack("<I", at)

    def pairs(self, table: int, field: int) -> list[tuple[int, int]]:
        """Return a vector of pairs of numbers."""
        at = self.table(table, field)
        count = self._unpack("<I", at)
        if count > _MOST_PARTS or at + 4 + 16 * count > len(self._data):
            raise Malformed(f"a header with a vector of {count} elements")
        return list(struct.iter_unpack("<qq", self._data[at + 4 : at + 4 + 16 * count]))

    def _field(self, table: int, field: int) -> int:
        """Return the position of a field of a table; 0 if it has none."""
        slots = table - self._unpack("<i", table)
        slot = 4 + 2 * field
        if slot + 2 > self._unpack("<H", slots):
            return 0
        offset = self._unpack("<H", slots + slot)
        return table + offset if offset else 0

    def _unpack(self, form: str, at: int) -> int:
        if not 0 <= at <= len(self._data) - struct.calcsize(form):
            raise Malformed("a header that points beyond its end")
        found: int = struct.unpack_from(form, self._data, at)[0]
        return found
