"""The bytes of the files: what QewQew writes is read, and what we write is what it writes."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from kvspool.queue import ChunkQueue, format

ENTRIES = [b"abcdefghijklmnopqrst", b"ABCDEFGHIJKLMNOPQRST"]
FIRST = bytes.fromhex("0000000a 00000036 0002 0014") + ENTRIES[0] + b"\0\x14" + ENTRIES[1] + bytes(10)
SECOND = bytes.fromhex("0000000a 00000020 0000 0014") + ENTRIES[0] + bytes(32)


def test_what_the_original_wrote_is_read(twin: ModuleType, path: Path) -> None:
    path.write_bytes(b"\0\1")
    path.with_name("queue.dat.1").write_bytes(FIRST)
    path.with_name("queue.dat.2").write_bytes(SECOND)
    with ChunkQueue.open(path) as one:
        assert len(one) == 2
        assert list(one) == [*ENTRIES, ENTRIES[0]]
        assert one.get() == ENTRIES[0]
    assert path.with_name("queue.dat.1").read_bytes() == b"\0\0\0\x20" + FIRST[4:]


def test_what_we_write_are_the_originals_bytes(twin: ModuleType, path: Path) -> None:
    with ChunkQueue.create(path, chunk_bytes=64) as one:
        one.put_many([*ENTRIES, ENTRIES[0]])
    assert path.read_bytes() == b"\0\1"
    assert path.with_name("queue.dat.1").read_bytes() == FIRST
    assert path.with_name("queue.dat.2").read_bytes() == SECOND


def test_the_parts_of_the_format_stand_where_they_should() -> None:
    assert (format.HEADER.size, format.CHUNK_HEAD.size, format.ENTRY_HEAD.size) == (2, 10, 2)
    assert [format.CHUNK_HEAD.offset(name) for name in ("head_ptr", "tail_ptr", "next_ref")] == [0, 4, 8]


def test_the_page_has_the_tables_and_the_example_of_the_format() -> None:
    page = (Path(__file__).parents[2] / "docs" / "queue.md").read_text(encoding="utf-8")
    for layout in (format.HEADER, format.CHUNK_HEAD, format.ENTRY_HEAD):
        assert layout.table() in page
    assert bytes.fromhex(page.split("which chunk 2 follows:")[1].split("```")[1]) == FIRST


def test_only_the_canonical_name_of_an_id_is_a_chunks_name(path: Path) -> None:
    names = [
        "queue.dat.1",
        "queue.dat.65534",
        "queue.dat.0",
        "queue.dat.01",
        "queue.dat.65536",
        "queue.dat.x",
        "queue.dat",
        "other.1",
        "queue.dat.1.lost",
    ]
    assert [format.chunk_id(path, name) for name in names] == [1, 65534, 0, 0, 0, 0, 0, 0, 0]
