"""The bytes of the two files: golden, unchanged by version, and where the format page says they are."""

from __future__ import annotations

import struct
import tomllib
from pathlib import Path

import pytest
from faults import ClockPort

import kvspool
from kvspool import Codec, Record, system
from kvspool.engine.checksums import checksum
from kvspool.spool import format

FORMATS = Path(__file__).parents[1] / "formats"
GOLDEN = tomllib.loads((FORMATS / "spool-2.toml").read_text(encoding="utf-8"))


class GoldenPort(ClockPort):
    """The clock, the entropy and the identity with which the golden files were made."""

    def __init__(self) -> None:
        super().__init__(GOLDEN["created"])

    def random(self, size: int) -> bytes:
        return bytes(range(size))

    def boot_id(self) -> bytes:
        return bytes(range(0xF0, 0x100))

    def process_id(self) -> int:
        return 4242

    def process_start(self, pid: int) -> int:
        return 777

    def pid_namespace(self) -> int:
        return 4026531836


def load(text: str, size: int) -> bytes:
    """Return the bytes of a dump: lines of an offset and what stands there, zeros where nothing is said."""
    data = bytearray(size)
    for line in text.strip().splitlines():
        at, _, content = line.partition(":")
        piece = bytes.fromhex(content)
        data[int(at, 16) : int(at, 16) + len(piece)] = piece
    return bytes(data)


def dump(data: bytes) -> str:
    """Return the dump of some bytes, 16 in a line, without the lines that are zero."""
    lines = []
    for at in range(0, len(data), 16):
        piece = data[at : at + 16]
        if any(piece):
            lines.append(f"{at:05x}: {piece[:8].hex()} {piece[8:].hex()}".rstrip())
    return "\n".join(lines) + "\n"


def expected_records() -> list[Record]:
    return [
        Record(
            row["sequence"],
            row["timestamp"],
            row["type"],
            bytes.fromhex(row["key"]) if "key" in row else None,
            bytes.fromhex(row["value"]),
            row["codec"],
        )
        for row in GOLDEN["record"]
    ]


def write_golden_log(path: Path) -> None:
    """Append what the golden file lists: 40 records that are overwritten, then those that are kept, and sync once."""
    with system.replaced(GoldenPort()), kvspool.create(path, capacity=4096) as log:
        for at in range(40):
            log.append(b"overwritten" * 8, timestamp=1000 + at)
        log.sync()
        log.append({"dep": "JFK", "arr": None}, key=b"N12345", type=7, timestamp=2000)
        log.append_many(["grüße", b"", b"\0\xff" * 400, b"x" * 900], keys=[b"", None, b"k", None], type=255, timestamp=3000)
        log.append(b"z" * 900, timestamp=1)


def test_the_golden_log_is_written_byte_for_byte(tmp_path: Path) -> None:
    write_golden_log(tmp_path / "log")
    for name in (format.CONTROL_FILE, format.DATA_FILE):
        found = (tmp_path / "log" / name).read_bytes()
        if name == format.CONTROL_FILE:
            # The rates depend on the clock; their own tests set it.
            found = found[: format.RATES_AT] + bytes(format.SLOTS_AT - format.RATES_AT) + found[format.SLOTS_AT :]
        assert dump(found) == dump(load(GOLDEN[name], len(found))), name


def test_the_golden_log_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.mkdir()
    (path / format.CONTROL_FILE).write_bytes(load(GOLDEN[format.CONTROL_FILE], GOLDEN["control_bytes"]))
    (path / format.DATA_FILE).write_bytes(load(GOLDEN[format.DATA_FILE], 4096 + 4096))
    with system.replaced(GoldenPort()), kvspool.open(path) as log:
        assert list(log) == expected_records()
        stats = log.stats()
        assert (stats.created, stats.next_sequence, stats.synced_sequence) == (GOLDEN["created"], 46, 40)
        assert log.log_id == bytes(range(16))
        assert log.append(b"goes on") == 46


def test_the_golden_dump_says_what_it_is() -> None:
    control = load(GOLDEN[format.CONTROL_FILE], GOLDEN["control_bytes"])
    header = format.HEADER.unpack(control)
    assert header.magic == b"KVSPOOL2"
    assert header.crc == checksum(control[:124])
    assert (header.capacity, header.control_bytes, header.codec) == (4096, GOLDEN["control_bytes"], Codec.JSON)
    epoch = format.EPOCH.unpack(control, format.EPOCHS_AT[0])
    assert (epoch.boot_id, epoch.first_seq, epoch.recoveries, epoch.state) == (bytes(range(0xF0, 0x100)), 0, 0, format.TRUE)
    words = format.CONTROL.unpack(control, format.CONTROL_AT)
    assert (words.holder_pid, words.holder_start, words.holder_namespace) == (4242, 777, 4026531836)
    assert words.tail in (words.mark_a_tail, words.mark_b_tail)
    checkpoint = format.CHECKPOINT.unpack(load(GOLDEN[format.DATA_FILE], 4096 + 4096), format.CHECKPOINTS_AT[0])
    assert (checkpoint.generation, checkpoint.next_seq, checkpoint.boot_id) == (1, 40, bytes(range(0xF0, 0x100)))


def test_the_layouts_stand_where_the_design_puts_them() -> None:
    assert {name: format.CONTROL_AT + format.CONTROL.offset(name) for name in ("head", "tail", "synced", "wanted", "holder_id_low")} == {
        "head": 256,
        "tail": 320,
        "synced": 384,
        "wanted": 448,
        "holder_id_low": 512,
    }
    assert format.CHECKPOINTS_AT == (1024, 1536)
    assert all(at % 512 + format.CHECKPOINT.size <= 512 for at in format.CHECKPOINTS_AT), "each in one sector"
    assert format.INDEX_AT == 65536
    assert {name: format.FRAME.offset(name) for name in format.Frame._fields} == {
        "stored": 0,
        "content": 4,
        "sequence": 8,
        "timestamp": 16,
        "type": 24,
        "codec": 25,
        "key_length": 26,
        "crc": 28,
    }


def test_every_changing_word_is_aligned_and_words_of_different_parties_are_in_different_lines() -> None:
    parties = {"head": "writer", "tail": "writer", "synced": "syncer", "wanted": "reader", "holder_id_low": "holder"}
    lines: dict[int, str] = {}
    party = ""
    for field in format.CONTROL.fields:
        party = parties.get(field.name, party)
        if field.code == "Q":
            assert (format.CONTROL_AT + field.offset) % 8 == 0
            line = (format.CONTROL_AT + field.offset) // 64
            assert lines.setdefault(line, party) == party
    assert len(set(lines.values())) == 4


@pytest.mark.parametrize(
    ("capacity", "blocks", "control_bytes"),
    [(4096, 1, 69632), (65536, 1, 69632), (65537, 2, 69632), (64 << 20, 1024, 65536 + 24576), (1 << 42, 1 << 26, 65536 + (24 << 26))],
)
def test_the_control_file_has_an_index_entry_for_each_block(capacity: int, blocks: int, control_bytes: int) -> None:
    assert format.blocks(capacity) == blocks
    assert format.control_bytes(capacity) == control_bytes
    assert control_bytes % format.PAGE == 0


def test_a_frames_checksum_covers_log_id_header_key_and_value() -> None:
    body = struct.pack("<IIQQBBH", 40, 6, 3, 9, 1, 0, 2)
    log_id = bytes(range(16))
    expected = checksum(log_id, body, b"kkvvvv")
    state = format.frame_seed(log_id)
    for part in (body, b"kk", b"vvvv"):
        state = format.crc32c(state, part)
    assert state ^ 0xFFFFFFFF == expected


def test_the_documented_tables_name_every_field() -> None:
    for layout in (format.HEADER, format.DATA_HEADER, format.CONTROL, format.CHECKPOINT, format.INDEX_ENTRY, format.FRAME):
        assert all(f"| {field.offset} | {field.size} | {field.name} |" in layout.table() for field in layout.fields)
