"""Damaged files: whatever they hold, a clear error or entries within bounds; and what a repair makes of them."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from commands import Run
from faults import DirectoryPort

from kvspool import errors, system
from kvspool.queue import ChunkQueue, QueueFull, format, repair, verify

ENTRIES = [b"%020d" % at for at in range(5)]  # two in each of the chunks 1 and 2, one in chunk 3
Make = Callable[..., ChunkQueue]


@pytest.fixture
def files(path: Path) -> dict[Path, bytes]:
    """A queue of three chunks, and the bytes of its files."""
    with ChunkQueue.create(path, chunk_bytes=64) as one:
        one.put_many(ENTRIES)
    return {file: file.read_bytes() for file in path.parent.iterdir()}


def put_back(files: dict[Path, bytes]) -> None:
    directory = next(iter(files)).parent
    for file in directory.iterdir():
        if file not in files:
            file.unlink()
    for file, content in files.items():
        file.write_bytes(content)


def use(path: Path) -> list[bytes] | None:
    """Look at the queue, put one entry, take all; return what came, or None if that was refused with one of our errors."""
    signal.setitimer(signal.ITIMER_REAL, 20)  # a hang ends the test, by the default action
    try:
        with ChunkQueue.open(path, timeout=0, max_chunks=10) as one:
            seen = list(one)
            assert sum(map(len, seen)) < 64 * 3
            assert one.qsize() == len(seen)
            one.put_nowait(b"after")
            got = list(one.drain())
            assert got == [*seen, b"after"]
            return got
    except (errors.Corruption, errors.NotALog, QueueFull):
        return None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def check(path: Path) -> None:
    """Look, use, repair and use again: at the end it is a queue that works, and nothing is thrown away but what no pointer reaches."""
    report = verify(path)
    got = use(path)
    if got is None:
        done = repair(path, timeout=0)
        assert done.verify.problems == []
        after = use(path)
        assert after is not None
        assert after[-1] == b"after"
    else:
        assert report.entries == len(got) - 1


def test_every_bit_flip_is_reported_or_gives_entries_within_bounds(twin: ModuleType, path: Path, files: dict[Path, bytes]) -> None:
    refused = 0
    for file, content in files.items():
        # All bits of the header and of the pointers, lengths and references, and one bit of each other byte.
        for at in range(len(content)):
            for bit in range(8) if at < 12 or at in (32, 33) else (at % 8,):
                put_back(files)
                damaged = bytearray(content)
                damaged[at] ^= 1 << bit
                file.write_bytes(damaged)
                refused += verify(path).is_sound is False
                check(path)
    assert refused > 100


def test_every_truncation_is_reported_or_gives_entries_within_bounds(twin: ModuleType, path: Path, files: dict[Path, bytes]) -> None:
    for file, content in files.items():
        for size in range(len(content)):
            put_back(files)
            os.truncate(file, size)
            check(path)


def test_every_missing_file_is_reported(path: Path, files: dict[Path, bytes]) -> None:
    for file in files:
        put_back(files)
        file.unlink()
        if file == path:
            with pytest.raises(errors.LogNotFound):
                verify(path)
        else:
            assert not verify(path).is_sound or use(path) is not None
            put_back({name: content for name, content in files.items() if name != file})
            check(path)


def chunk(path: Path, id: int) -> Path:
    return path.with_name(f"{path.name}.{id}")


def overwrite(file: Path, at: int, data: bytes) -> None:
    with open(file, "r+b") as opened:
        opened.seek(at)
        opened.write(data)


@pytest.mark.parametrize(
    ("id", "at", "data", "problem", "entries"),
    [
        (2, 0, b"\x7f\0\0\0", "pointers are impossible", ENTRIES),  # the head-ptr
        (2, 0, b"\0\0\0\x09", "pointers are impossible", ENTRIES),
        (2, 4, b"\x7f\0\0\0", "should end at", ENTRIES),  # the tail-ptr: the first entry of no bytes is the end
        (2, 4, b"\0\0\0\x09", "pointers are impossible", ENTRIES),
        (2, 10, b"\xff\xff", "ends after the last one", [*ENTRIES[:2], ENTRIES[4]]),  # a length
        (2, 32, b"\0\x15", "ends after the last one", [*ENTRIES[:3], ENTRIES[4]]),
        (2, 8, b"\0\x09", "refers to chunk 9", ENTRIES),  # the next-ref
        (2, 8, b"\0\x01", "in a circle", ENTRIES),
        (2, 8, b"\0\x02", "in a circle", ENTRIES),
        (3, 8, b"\0\x01", "in a circle", ENTRIES),
        (3, 8, b"\0\x09", "refers to chunk 9", ENTRIES),
    ],
)
def test_a_damaged_pointer_or_reference_is_named_and_mended(
    twin: ModuleType, path: Path, files: dict[Path, bytes], id: int, at: int, data: bytes, problem: str, entries: list[bytes]
) -> None:
    overwrite(chunk(path, id), at, data)
    assert any(problem in words for words in verify(path).problems)
    done = repair(path)
    assert done.verify.is_sound
    assert done.done
    with ChunkQueue.open(path) as one:
        assert list(one) == entries


@pytest.mark.parametrize("header", [b"", b"\0", b"\0\0", b"\0\x09"])
def test_a_header_that_leads_nowhere_is_led_to_the_beginning(path: Path, files: dict[Path, bytes], header: bytes) -> None:
    path.write_bytes(header)
    assert not verify(path).is_sound
    assert repair(path).verify.is_sound
    with ChunkQueue.open(path) as one:
        assert list(one) == ENTRIES


def test_a_header_that_skips_chunks_keeps_their_entries_in_files_set_aside(path: Path, files: dict[Path, bytes]) -> None:
    path.write_bytes(b"\0\3")
    assert "nothing refers to it" in verify(path).problems[0]
    done = repair(path)
    assert [Path(name).name for name in done.set_aside] == ["queue.dat.1.lost", "queue.dat.2.lost"]
    assert Path(done.set_aside[0]).read_bytes() == files[chunk(path, 1)]
    with ChunkQueue.open(path) as one:
        assert list(one) == ENTRIES[4:]


def test_a_chunk_that_is_missing_in_the_midst_is_bridged_as_far_as_ids_tell(path: Path, files: dict[Path, bytes]) -> None:
    chunk(path, 2).unlink()
    done = repair(path)
    with ChunkQueue.open(path) as one:
        assert list(one) == ENTRIES[:2]
    assert [Path(name).name for name in done.set_aside] == ["queue.dat.3.lost"]


def test_a_repair_of_a_sound_queue_changes_no_byte(path: Path, files: dict[Path, bytes]) -> None:
    done = repair(path)
    assert (done.done, done.set_aside) == ([], [])
    assert {file: file.read_bytes() for file in path.parent.iterdir()} == files


def test_a_repair_writes_every_byte_again_before_it_flushes(path: Path, files: dict[Path, bytes]) -> None:
    """After a flush that failed the kernel takes pages for written that aren't: a flush alone would report success that never was."""
    written: dict[str, bytes] = {}
    flushed: dict[str, bytes] = {}

    def name(fd: int) -> str:
        return os.readlink(f"/proc/self/fd/{fd}")

    class Noting(system.Port):
        def write(self, fd: int, data: bytes, at: int) -> None:
            assert at == len(written.get(name(fd), b""))
            written[name(fd)] = written.get(name(fd), b"") + data
            super().write(fd, data, at)

        def flush(self, fd: int) -> None:
            if not os.path.isdir(name(fd)):
                flushed[name(fd)] = written[name(fd)]
            super().flush(fd)

    with system.replaced(Noting()):
        repair(path)
    assert flushed == {str(file): content for file, content in files.items()}


def test_a_repair_whose_last_flush_fails_says_that_it_was_done(path: Path, files: dict[Path, bytes]) -> None:
    chunk(path, 2).unlink()
    with system.replaced(DirectoryPort(1)), pytest.raises(errors.NameNotDurable, match="was repaired"):
        repair(path)
    with ChunkQueue.open(path) as one:
        assert list(one) == ENTRIES[:2]


def test_a_repair_wants_the_queue_alone(path: Path, files: dict[Path, bytes]) -> None:
    with ChunkQueue.open(path), pytest.raises(errors.LockTimeout, match="every handle of it must be closed"):
        repair(path, timeout=0)


def test_a_chunk_that_is_no_file_is_refused(path: Path, files: dict[Path, bytes]) -> None:
    for make in (Path.mkdir, os.mkfifo, lambda place: place.symlink_to(chunk(path, 1))):
        put_back(files)
        chunk(path, 2).unlink()
        make(chunk(path, 2))  # type: ignore[operator]
        with pytest.raises((errors.KvspoolError, OSError)):
            ChunkQueue.open(path)
        shutil.rmtree(chunk(path, 2)) if chunk(path, 2).is_dir() and not chunk(path, 2).is_symlink() else chunk(path, 2).unlink()


def test_the_commands_know_a_queue(path: Path, files: dict[Path, bytes], run: Run) -> None:
    assert run("read", path, "--values", "--start", "1", "--limit", "2").out.split() == [entry.decode() for entry in ENTRIES[1:3]]
    assert '"entries":5' in run("stats", path, "--json").out
    run("verify", path)
    assert "5 entries in 3 chunks" in run("doctor", path).out
    for command in (["export", str(path)], ["sync", str(path)], ["tail", str(path), "--follow"], ["readers", str(path)]):
        assert "is a queue" in run(*command, code=2).err
    overwrite(chunk(path, 2), 8, b"\0\x09")
    run("verify", path, code=5)
    run("doctor", path, code=1)
    run("read", path, code=5)
    run("repair", path)
    run("verify", path, "--json")
    assert {file: file.read_bytes() for file in path.parent.iterdir()} == files


def test_every_id_that_a_reference_can_have_is_followed(path: Path) -> None:
    path.write_bytes(b"\xff\xff")
    chunk(path, 65535).write_bytes(format.FRESH + bytes(54))
    with ChunkQueue.open(path) as one:
        one.put_many([bytes(40)] * 2)
        assert len(one) == 2
        assert chunk(path, 1).exists()
