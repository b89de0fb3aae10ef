"""Records out of a log and into another one, byte for byte; and the directories of kvspool v1."""

from __future__ import annotations

import errno
import io
import mmap
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import every_log
import msgspec
import pytest
from commands import Run

import kvspool
from kvspool import Codec, Gap, Record, Spool, system
from kvspool.cli import plugins
from kvspool.engine import exporting
from kvspool.engine.pool import Pool
from kvspool.engine.reports import Exported
from kvspool.engine.rows import columns_of, rows_of
from kvspool.errors import GapError, NotALog, NotImportable, NotKept
from kvspool.transfer import exchange

FORMATS = list(exporting.FORMATS)
VALUES = [
    (Codec.RAW, b""),
    (Codec.RAW, b"text that is bytes"),
    (Codec.RAW, b"\0\xff\xfe"),
    (Codec.TEXT, "grüße \N{LINE SEPARATOR} \n\t\x1b".encode()),
    (Codec.TEXT, b"\xffdamaged"),
    (Codec.JSON, b'{"a": 1,  "spaces":[1.0, 1e400, null]}'),
    (Codec.JSON, b'{\n "lines": 2}'),
    (Codec.JSON, b" 7 "),
    (Codec.JSON, b"no json"),
    (Codec.JSON, b""),
    (Codec.MSGPACK, msgspec.msgpack.encode({"a": [1, -1, 2**63, None, True, "x"]})),
    (Codec.MSGPACK, msgspec.msgpack.encode({"bytes": b"\xff", "float": 1.0})),
    (Codec.MSGPACK, msgspec.msgpack.encode({5: "integer key"})),
    (Codec.MSGPACK, b"\xc1damaged"),
    (77, b"of a later version"),
]


@pytest.fixture(autouse=True)
def no_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins.metadata, "entry_points", lambda group: [])


def make(path: Path, codec: str = "json", capacity: int = 1 << 20) -> Spool:
    return kvspool.create(path, capacity=capacity, codec=codec)


def fill(log: Spool) -> list[Record]:
    keys = [None, b"", b"key", b"\xff\0"]
    log.append_rows(columns_of([Record(0, 1000 + at, at * 17, keys[at % 4], value, codec) for at, (codec, value) in enumerate(VALUES)]))
    return list(log)


def copied(log: Spool, other: Spool, format: str) -> tuple[Exported, exchange.Imported]:
    file = io.BytesIO()
    exported = kvspool.export(log, file, format)
    file.seek(0)
    return exported, kvspool.import_(other, file, format)


@pytest.mark.parametrize("format", FORMATS)
def test_every_record_comes_back_byte_for_byte(tmp_path: Path, format: str) -> None:
    with make(tmp_path / "one") as one, make(tmp_path / "other") as other:
        records = fill(one)
        assert [(record.codec, record.value) for record in records] == VALUES
        exported, imported = copied(one, other, format)
        assert list(other) == records
        assert exported == Exported(len(VALUES), 0, [])
        assert imported == exchange.Imported(len(VALUES), 0, len(VALUES) - 1)


def test_a_line_can_be_read_by_people() -> None:
    rows = rows_of([Record(7, 9, 1, b"k", b'{"a":1}', Codec.JSON)])
    assert msgspec.json.encode(exporting.members(rows, 0)) == (
        b'{"sequence":7,"timestamp":9,"type":1,"codec":"json","key":"k","value":{"a":1}}'
    )


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("codec", ["keyed", "json"])
def test_keyed_values_go_out_as_what_they_mean_and_are_packed_again(tmp_path: Path, format: str, codec: str) -> None:
    with make(tmp_path / "one", "keyed") as one, make(tmp_path / "other", codec) as other:
        one.append_many([{"first": 1}, {"second": {"first": b"\xff"}}, {5: True}])
        other.append({"another": "table"})
        copied(one, other, format)
        records = list(other)[1:]
        assert [record.data for record in records] == [record.data for record in one]
        assert {record.codec for record in records} == {Codec.KEYED if codec == "keyed" else Codec.MSGPACK}


@pytest.mark.parametrize("format", FORMATS)
def test_gaps_are_reported_and_parts_can_be_taken(tmp_path: Path, format: str) -> None:
    with make(tmp_path / "log", capacity=4096) as log, make(tmp_path / "other") as other:
        log.append_many([bytes(100)] * 60)
        first = log.stats().first_sequence
        file = io.BytesIO()
        done = kvspool.export(log, file, format, start=3, end=first + 5, on_gap="yield")
        assert done == Exported(5, first - 3, [Gap(3, first - 1, "overrun", str(log.path))])
        file.seek(0)
        assert kvspool.import_(other, file, format).records == 5
        with pytest.raises(GapError):
            kvspool.export(log, io.BytesIO(), format, start=3)


def test_parquet_holds_the_columns_of_arrow_and_the_codec(tmp_path: Path) -> None:
    from pyarrow import parquet

    with make(tmp_path / "log") as log:
        fill(log)
        with open(tmp_path / "file", "wb") as file:
            kvspool.export(log, file, "parquet")
        table = parquet.read_table(tmp_path / "file")
        assert table.select(log.read_arrow().column_names).equals(log.read_arrow())
        assert table.schema.metadata[b"kvspool.log_id"].decode() == log.stats().log_id


def test_a_large_log_goes_out_in_row_groups(tmp_path: Path) -> None:
    from pyarrow import parquet

    with make(tmp_path / "log", capacity=4 << 20) as log, make(tmp_path / "other", capacity=4 << 20) as other:
        log.append_many([b"%d" % at for at in range(3000)])
        seen: list[int] = []
        with open(tmp_path / "file", "wb") as file:
            kvspool.export(log, file, "parquet", progress=seen.append)
        assert seen == [1024, 2048, 3000]
        assert parquet.ParquetFile(tmp_path / "file").num_row_groups == 3
        with open(tmp_path / "file", "rb") as file:
            kvspool.import_(other, file, "parquet")
        assert list(other) == list(log)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"no json", "malformed"),
        (b"[1]", "Expected `object`"),
        (b"{}", "either value or value_base64"),
        (b'{"value": "a", "value_base64": "YQ=="}', "either"),
        (b'{"value": 1}', "is a string, not int"),
        (b'{"value_base64": "!"}', "base64"),
        (b'{"value": "a", "codec": "pad"}', "no codec 'pad'"),
        (b'{"value": "a", "codec": 255}', "no codec 255"),
        (b'{"value": "a", "type": 256}', "a type is 0..255"),
        (b'{"value": "a", "type": "x"}', "Expected `int`"),
        (b'{"value": "\\ud800"}', ""),
    ],
)
def test_a_bad_line_is_named_and_nothing_of_its_batch_is_appended(tmp_path: Path, line: bytes, why: str) -> None:
    good = b'{"value":"good"}\n'
    with make(tmp_path / "log") as log:
        with pytest.raises(NotImportable, match=rf"^line 1027: .*{why}.*; 1024 records were imported before, sequences 0 to 1023$"):
            kvspool.import_(log, io.BytesIO(good * 1024 + b"\n" + good + line + b"\n" + good))
        assert log.stats().next_sequence == 1024


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("target", ["kvj", "sej", "fflg"])
def test_a_file_is_imported_into_a_journal_which_refuses_fields_that_it_cannot_store(tmp_path: Path, target: str, kind: str) -> None:
    with make(tmp_path / "one") as one, kvspool.create(tmp_path / "other", format=target) as other:  # type: ignore[call-overload]
        one.append(b"raw")
        one.append({"a": 1}, key=b"key", type=3)
        file = io.BytesIO()
        kvspool.export(one, file, kind)
        file.seek(0)
        if other.room == one.room or target == "kvj":
            assert kvspool.import_(other, file, kind).records == 2
            assert [(each.key, each.type, each.timestamp, each.data) for each in other] == [
                (each.key, each.type, each.timestamp, each.data) for each in one
            ]
            return
        with pytest.raises(NotKept, match="can't store: ") as caught:
            kvspool.import_(other, file, kind)
        assert caught.value.__notes__ == ["0 records were imported before"]
        assert other.extent() == (0, 0)


def test_timestamps_never_decrease_and_what_is_missing_has_a_default(tmp_path: Path) -> None:
    with make(tmp_path / "log") as log:
        kvspool.import_(log, io.BytesIO(b'{"timestamp": 5, "value": "a", "key": ""}\n{"timestamp": 3, "value": "b"}\n{"value": "c"}'))
        one, two, three = log
        assert (one.timestamp, two.timestamp, one.key, two.key, three.codec) == (5, 5, b"", None, Codec.RAW)
        assert three.timestamp > 10**18


def test_a_hostile_parquet_file_is_refused(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    with make(tmp_path / "log") as log:
        with pytest.raises(NotImportable, match="not a Parquet file"):
            kvspool.import_(log, io.BytesIO(b"PAR1 and so on"), "parquet")
        for columns in ({"key": [b"k"]}, {"value": [None]}, {"value": [b"v"], "type": [256]}, {"value": [[b"list"]]}):
            file = io.BytesIO()
            parquet.write_table(pa.table(columns), file)
            with pytest.raises(NotImportable):
                kvspool.import_(log, file, "parquet")
        assert log.stats().records == 0


# kvspool v1, written here byte by byte as its format says.

GOLDEN = bytes.fromhex(
    "4b562b53504f4f4c 74706c02 36000000 4128737329 00 02000000 06000000 68656c6c6f 06000000 616761696e "
    "07000000 7365636f6e64 05000000 6c696665 36000000"
)


def frame(pairs: dict[str, str], *, big: bool = False, one_more: bool = True) -> bytes:
    word = struct.Struct(">I" if big else "<I")
    strings = [text.encode() for pair in pairs.items() for text in pair]
    body = b"A(ss)\0" + word.pack(len(pairs)) + b"".join(word.pack(len(text) + one_more) + text for text in strings)
    return b"tpl" + bytes([big | one_more << 1]) + word.pack(8 + len(body)) + body


def spool_file(frames: list[bytes], *, big: bool = False) -> bytes:
    return b"KV+SPOOL" + b"".join(frames) + struct.pack(">I" if big else "<I", len(frames[-1]))


def old_spool(path: Path, files: dict[str, bytes]) -> Path:
    path.mkdir()
    for name, content in files.items():
        (path / name).write_bytes(content)
    return path


def test_the_golden_file_of_kvspool_v1_is_read(tmp_path: Path) -> None:
    assert spool_file([frame({"hello": "again", "second": "life"})]) == GOLDEN
    old = old_spool(tmp_path / "old", {"kv.1.2-0.sp": GOLDEN, "kv.1.2-0.sr": struct.pack("<I", 8), "limits": b"dir 1gb"})
    for codec in ("json", "keyed"):
        with make(tmp_path / codec, codec) as log:
            assert kvspool.import_v1(log, old).records == 1
            assert [record.data for record in log] == [{"hello": "again", "second": "life"}]


def test_a_ring_of_libshr_is_refused_by_its_name_and_what_can_be_imported_is_said(tmp_path: Path, log: kvspool.Spool) -> None:
    """As kvsp-init makes it: a file `data` that begins with the magic of libshr."""
    ring = tmp_path / "ring"
    ring.mkdir()
    (ring / "data").write_bytes(b"libshr1\0" + bytes(4096))
    calls: list[Callable[[], object]] = [
        lambda: kvspool.open(ring),
        lambda: kvspool.import_v1(log, ring),
        lambda: kvspool.copy(ring, tmp_path / "copy", format="kvj"),
        lambda: kvspool.verify(ring),
    ]
    for call in calls:
        with pytest.raises(NotALog, match=r"since December 2017: its file data is a ring of libshr.*NAME-N\.sp"):
            call()
    assert list(log) == []
    (ring / "data").write_bytes(b"libshr")
    with pytest.raises(NotALog, match="neither a log"):
        kvspool.open(ring)


def test_a_fifo_among_files_of_kvspool_v1_blocks_no_process(tmp_path: Path, log: kvspool.Spool) -> None:
    (tmp_path / "old").mkdir()
    os.mkfifo(tmp_path / "old" / "kv-0.sp")
    with every_log.in_time(), pytest.raises(NotImportable, match="but a FIFO"):
        kvspool.import_v1(log, tmp_path / "old")


def test_files_of_kvspool_v1_come_in_order_and_from_where_they_were_read_if_asked(tmp_path: Path) -> None:
    frames = [
        [frame({"file": str(file), "frame": str(at), "": ""}, big=file == 10, one_more=at != 1) for at in range(3)] for file in (2, 10)
    ]
    files = {"kv.5.1-10.sp": spool_file(frames[1], big=True), "kv.5.1-2.sp": spool_file(frames[0]), "kv.1.1-99.sp": b"KV+SPOOL"}
    files["kv.5.1-10.sr"] = struct.pack(">I", 8 + len(frames[1][0]))
    files["kv.5.1-2.sr"] = struct.pack("<I", len(files["kv.5.1-2.sp"]) - 4)
    files["kv.1.1-99.sr"] = struct.pack("<I", 8)
    old = old_spool(tmp_path / "old", files)
    with make(tmp_path / "all") as every, make(tmp_path / "unread") as unread:
        kvspool.import_v1(every, old)
        assert [(record.data["file"], record.data["frame"]) for record in every] == [(file, at) for file in ("2", "10") for at in "012"]
        kvspool.import_v1(unread, old, unread=True)
        assert [(record.data["file"], record.data["frame"]) for record in unread] == [("10", "1"), ("10", "2")]


def test_a_torn_file_of_kvspool_v1_gives_what_is_whole_at_every_length(tmp_path: Path) -> None:
    frames = [frame({"number": str(at)}) for at in range(3)]
    whole = spool_file(frames)
    ends = [8 + sum(map(len, frames[:count])) for count in range(4)]
    with make(tmp_path / "log") as log:
        for length in range(8, len(whole)):
            path = tmp_path / f"old{length}"
            done = kvspool.import_v1(log, old_spool(path, {"kv.1-0.sp": whole[:length]}))
            assert done.records == sum(length >= end for end in ends[1:])
            assert done.torn == ([] if length in ends else [f"{path / 'kv.1-0.sp'} at byte {max(end for end in ends if end <= length)}"])


def test_hostile_files_of_kvspool_v1_are_refused_by_name_and_byte(tmp_path: Path) -> None:
    with make(tmp_path / "log") as log:
        with pytest.raises(NotALog):
            kvspool.import_v1(log, tmp_path)
        broken: list[Any] = [b"KV+SPOON" + GOLDEN[8:], GOLDEN[:8] + b"tpm" + GOLDEN[11:]]
        for at in range(8, 8 + 54):
            for value in (0, 0x7F, 0xFF):
                damaged = bytearray(GOLDEN)
                damaged[at] = value
                broken.append(bytes(damaged))
        refused = 0
        for number, content in enumerate(broken):
            old = old_spool(tmp_path / f"old{number}", {"kv.1-0.sp": content})
            try:
                done = kvspool.import_v1(log, old)
            except NotImportable as error:
                refused += 1
                assert "kv.1-0.sp" in str(error)
            else:
                assert done.records <= 1
        assert refused > 90


def test_the_commands_take_out_and_bring_in(tmp_path: Path, run: Run) -> None:
    with make(tmp_path / "one") as one, make(tmp_path / "other") as other:
        records = fill(one)
        for name in ("file.jsonl", "file.parquet"):
            kind = name.rpartition(".")[2]
            assert run("export", one.path, "--format", kind, "-o", tmp_path / name, "--json").object == {
                "records": len(records),
                "lost": 0,
                "gaps": [],
            }
            assert run("import", tmp_path / name, other.path, "--json").object["records"] == len(records)
        assert [record.value for record in other] == [record.value for record in records] * 2
        assert not list(tmp_path.glob("*.part"))
        (tmp_path / "bad").write_text('{"value": "a"}\n{"value": 5}\n')
        assert "line 2: " in run("import", tmp_path / "bad", other.path, code=2).err
        old = old_spool(tmp_path / "old", {"kv.1-0.sp": GOLDEN[:-3]})
        assert "incomplete" in run("import", old, other.path).err


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("source", ["spool", "kvj", "sej", "fflg", "fixed"])
def test_a_log_of_any_kind_is_exported_by_its_verb_and_the_command(tmp_path: Path, source: str, kind: str, run: Run) -> None:
    options = {"fixed": {"item_bytes": 4, "items_per_blob": 4}, "spool": {"capacity": 4096}}.get(source, {})
    with kvspool.create(tmp_path / "log", format=source, **options) as log:  # type: ignore[arg-type]
        log.append_many([b"four", b"five"])
        with (tmp_path / "verb").open("wb") as file:
            assert log.export(file, kind) == Exported(2, 0, [])
        run("export", log.path, "--format", kind, "-o", tmp_path / "command")
        assert (tmp_path / "verb").read_bytes() == (tmp_path / "command").read_bytes()
        times = [record.timestamp for record in log.read()] if "timestamps" in log.capabilities else None
    with make(tmp_path / "other") as other:
        with (tmp_path / "verb").open("rb") as file:
            assert kvspool.import_(other, file, kind) == exchange.Imported(2, 0, 1)
        assert list(other.read_values()) == [b"four", b"five"]
        found = [record.timestamp for record in other.read()]
        assert found == times if times else min(found) > 0


def test_the_command_resizes(tmp_path: Path, run: Run) -> None:
    with make(tmp_path / "log", capacity=65536) as log:
        log.append_many([bytes(100)] * 100)
        done = run("resize", log.path, "4KiB", "--json").object
        assert (done["before"], done["capacity"], done["records"] + done["dropped"]) == (65536, 4096, 100)
        assert "4.0 KiB to 8.0 KiB" in run("resize", log.path, "8KiB").out
        run("resize", log.path, "1PiB", code=2)
        assert log.capacity == 8192


def test_a_table_of_a_large_log_has_every_record_that_was_appended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyarrow")
    from kvspool.engine import batches

    with kvspool.create(tmp_path / "log", capacity="32MiB") as log:
        keys = [None if at % 3 == 0 else b"%d" % at for at in range(150_000)]
        values = [b"%d" % at * (at % 9 + 1) for at in range(150_000)]
        for at in range(0, 150_000, 10_000):
            log.append_many(values[at : at + 10_000], keys=keys[at : at + 10_000], type=at // 10_000)
        table = log.read_arrow()
        table.validate(full=True)
        assert table.column("sequence").to_pylist() == list(range(150_000))
        assert table.column("key").to_pylist() == keys
        assert table.column("value").to_pylist() == values
        assert table.column("type").to_pylist() == [at // 10_000 for at in range(150_000)]
        assert log.read_arrow(limit=140_000).equals(table.slice(0, 140_000))

        class Full(system.Port):
            def private_memory(self, size: int) -> mmap.mmap:
                raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

        monkeypatch.setattr(batches, "_pools", [Pool(36 << 20, spare=1)])  # which has nothing to lend again
        with system.replaced(Full()):
            assert log.read_arrow().equals(table)
