"""Arrow's IPC format in place: batches come and go without a copy, and damaged ones are malformed, whatever is wrong with them."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shipping import Row, batch, numbered

from hub.errors import Malformed
from hub.root import columns
from hub.server import ipc
from hub.server.ipc import BatchEncoder, EncodedBatch
from kvspool import arrow

SAMPLE = batch(Row(b"value", b"key", 3, 5, 1), Row(b"", None), Row(b"x" * 1000, b"", 255, 1 << 60))
CODECS = [None, "zstd", "lz4"]


def message(rows: pa.RecordBatch, codec: str | None = None, version: Any = pa.ipc.MetadataVersion.V5) -> tuple[bytes, memoryview]:
    """Return header and body of a batch, as Arrow writes them."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema, options=pa.ipc.IpcWriteOptions(compression=codec, metadata_version=version)) as writer:
        writer.write_batch(rows)
    source = pa.BufferReader(sink.getvalue())
    pa.ipc.read_message(source)
    found = pa.ipc.read_message(source)
    return found.metadata.to_pybytes(), memoryview(bytearray(found.body))


def read(header: bytes, body: memoryview, schema: pa.Schema = columns.SCHEMA) -> pa.RecordBatch:
    return EncodedBatch.parse(header, body, schema).decode()


# Sound batches.


@pytest.mark.parametrize("codec", CODECS)
def test_a_batch_of_arrow_is_read(codec: str | None) -> None:
    for rows in (SAMPLE, SAMPLE.slice(1, 1), SAMPLE.slice(0, 0), numbered(0, 5000).batch):
        found = read(*message(rows, codec))
        found.validate(full=True)
        assert found == rows


ROWS = st.builds(
    Row,
    st.binary(max_size=30),
    st.one_of(st.none(), st.binary(max_size=10)),
    st.integers(0, 255),
    st.integers(0, (1 << 62)),
    st.integers(0, 3),
)


@given(st.lists(ROWS, min_size=1, max_size=20), st.sampled_from(CODECS))
def test_every_batch_of_records_is_read(rows: list[Row], codec: str | None) -> None:
    assert read(*message(batch(*rows), codec)) == batch(*rows)


def test_an_uncompressed_batch_is_read_in_place_and_allocates_nothing() -> None:
    header, body = message(SAMPLE)
    encoded = EncodedBatch.parse(header, body, columns.SCHEMA)
    before = pa.total_allocated_bytes()
    found = encoded.decode()
    assert (encoded.allocated, pa.total_allocated_bytes()) == (0, before)
    at = body.obj.find(b"xxx")
    body[at] = ord("y")
    assert found["value"][2].as_py().startswith(b"yx")


@pytest.mark.parametrize("codec", CODECS[1:])
def test_the_room_for_a_compressed_batch_is_known_before_it_is_decompressed(codec: str) -> None:
    rows = batch(Row(bytes(1 << 20)))
    encoded = EncodedBatch.parse(*message(rows, codec), columns.SCHEMA)
    assert len(encoded.body) < 1 << 17
    assert 1 << 20 < encoded.allocated < (1 << 20) + 200


def zeros(size: int, window: int) -> bytes:
    """Return a frame of zstd that becomes so many zeros, a multiple of 128 KiB, and asks for a window of 1 << `window` bytes."""
    blocks = range(size >> 17, 0, -1)
    frame = b"\x28\xb5\x2f\xfd\0" + bytes([(window - 10) << 3])
    return frame + b"".join(((left == 1) | 1 << 1 | 1 << 17 << 3).to_bytes(3, "little") + b"\0" for left in blocks)


MEASURED = """
import sys
from pathlib import Path
import pyarrow as pa
from hub.server import ipc

def most():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) << 10

data, size = pa.py_buffer(sys.stdin.buffer.read()), int(sys.argv[2])
Path("/proc/self/clear_refs").write_text("5")
before = most()
assert ipc._decompressed(sys.argv[1], data, size).size == size
print(most() - before)
"""


@pytest.mark.parametrize(
    ("codec", "data"), [("zstd", zeros(64 << 20, 27)), ("lz4", pa.compress(bytes(64 << 20), "lz4", asbytes=True))], ids=["zstd", "lz4"]
)
def test_a_compressed_buffer_takes_no_more_memory_than_it_declares(codec: str, data: bytes) -> None:
    """A codec's own memory is small, also for a frame that asks for a large window."""
    size = 64 << 20
    done = subprocess.run([sys.executable, "-c", MEASURED, codec, str(size)], input=data, capture_output=True, timeout=60, check=True)
    assert size <= int(done.stdout) < size + (16 << 20)


def test_a_batch_of_the_format_s_older_version_is_read() -> None:
    assert read(*message(SAMPLE, version=pa.ipc.MetadataVersion.V4)) == SAMPLE


def test_a_schema_is_read_as_it_was_written() -> None:
    for schema in (columns.SCHEMA, arrow.SCHEMA, arrow.CODED_SCHEMA, pa.schema([]), pa.schema([("a", pa.list_(pa.int8()))])):
        assert ipc.read_schema(ipc.encode_schema(schema)).equals(schema, check_metadata=True)
        assert ipc.encode_schema(schema) == pa.ipc.read_message(schema.serialize()).metadata.to_pybytes()


@pytest.mark.parametrize("schema", [columns.SCHEMA, arrow.SCHEMA.empty_table().select(["value", "type"]).schema], ids=len)
def test_a_batch_is_written_as_arrow_writes_it(schema: pa.Schema) -> None:
    encoder = BatchEncoder(schema)
    sample = SAMPLE.select(schema.names)
    for rows in (encoder.empty, sample, sample.slice(1, 2), sample):
        header, pieces = encoder.encode(rows)
        wanted_header, wanted_body = message(rows)
        assert header == wanted_header
        assert b"".join(pieces) == wanted_body


def test_the_columns_are_written_as_their_own_memory() -> None:
    _, pieces = BatchEncoder(columns.SCHEMA).encode(SAMPLE)
    values = SAMPLE["value"].buffers()[2]
    assert values.address in [pa.py_buffer(piece).address for piece in pieces]


# Damaged ones.


def damaged(data: Any, at: int, byte: int) -> bytes:
    found = bytearray(data)
    found[at % len(found)] = byte
    return bytes(found)


def is_harmless(header: bytes, body: bytes) -> None:
    """Check that a batch is refused, or checked and read like any other one."""
    try:
        encoded = EncodedBatch.parse(header, memoryview(body), columns.SCHEMA)
        if encoded.allocated > 1 << 20:
            return  # the hub refuses so much before it decodes
        columns.check(encoded.decode(), 1 << 20).close()
    except Malformed:
        pass


@pytest.mark.parametrize("codec", CODECS)
def test_every_byte_of_a_header_may_be_wrong(codec: str | None) -> None:
    header, body = message(SAMPLE, codec)
    for at in range(len(header)):
        for byte in (0, 1, 0x7F, 0x80, 0xFF, header[at] ^ 1, header[at] ^ 0x10):
            is_harmless(damaged(header, at, byte), bytes(body))


@pytest.mark.parametrize("codec", CODECS)
def test_every_byte_of_a_body_may_be_wrong(codec: str | None) -> None:
    header, body = message(SAMPLE.slice(0, 2), codec)
    for at in range(len(body)):
        for byte in (0, 1, 0x7F, 0x80, 0xFF):
            is_harmless(header, damaged(body, at, byte))


@given(st.binary(max_size=300), st.binary(max_size=50))
def test_hostile_bytes_are_malformed(header: bytes, body: bytes) -> None:
    with pytest.raises(Malformed):
        EncodedBatch.parse(header, memoryview(body), columns.SCHEMA)
    with pytest.raises(Malformed):
        ipc.read_schema(header)


@given(st.integers(0, 10_000), st.integers(0, 10_000), st.sampled_from(CODECS))
def test_a_cut_message_is_malformed(cut: int, of_body: int, codec: str | None) -> None:
    header, body = message(SAMPLE, codec)
    is_harmless(header[: cut % len(header)], bytes(body))
    with pytest.raises(Malformed):
        EncodedBatch.parse(header, body[: of_body % len(body)], columns.SCHEMA)


@pytest.mark.parametrize("codec", CODECS[1:])
@pytest.mark.parametrize("change", [-8, -1, 1, 64, 1 << 50, -(1 << 40)])
def test_a_compressed_buffer_that_becomes_more_or_less_than_it_says_is_malformed(codec: str, change: int) -> None:
    header, body = message(numbered(0, 1000).batch, codec)
    encoded = EncodedBatch.parse(header, body, columns.SCHEMA)
    number = max(range(len(encoded.sizes)), key=encoded.sizes.__getitem__)
    begin, _ = encoded.parts[number]
    body[begin : begin + 8] = (encoded.sizes[number] + change).to_bytes(8, "little", signed=True)
    with pytest.raises(Malformed):
        EncodedBatch.parse(header, body, columns.SCHEMA).decode()


@pytest.mark.parametrize("schema", [arrow.CODED_SCHEMA, pa.schema([]), columns.SCHEMA.remove(0)], ids=len)
def test_a_batch_of_other_columns_is_malformed(schema: pa.Schema) -> None:
    rows = pa.RecordBatch.from_arrays([pa.array([], field.type) for field in schema], schema=schema)
    with pytest.raises(Malformed):
        EncodedBatch.parse(*message(rows), columns.SCHEMA)


def test_a_schema_or_a_dictionary_is_no_batch_and_a_batch_no_schema() -> None:
    with pytest.raises(Malformed):
        EncodedBatch.parse(ipc.encode_schema(columns.SCHEMA), memoryview(b""), columns.SCHEMA)
    with pytest.raises(Malformed):
        ipc.read_schema(message(SAMPLE)[0])
    with pytest.raises(Malformed):
        ipc.read_schema(bytes(ipc.LARGEST_SCHEMA + 1))
