"""The two files of a spool: every way in which they can be wrong, and what a reader may not do to them."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from children import in_child, let_others_read, start
from faults import FailingPort
from trees import tree

import kvspool
from kvspool import errors, system
from kvspool.engine.checksums import checksum
from kvspool.spool import format
from kvspool.spool.spool_files import SpoolFiles

NOBODY = 65534


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A closed spool of 4096 bytes with three records."""
    with kvspool.create(tmp_path / "log", capacity=4096) as log:
        log.append_many([b"one", b"two", b"three"])
    return tmp_path / "log"


@pytest.fixture
def public_path() -> Iterator[Path]:
    """Yield a spool of 4096 bytes that another user can reach, with permission to read it but not to write."""
    folder = Path(tempfile.mkdtemp())
    with kvspool.create(folder / "log", capacity=4096, mode=0o644) as log:
        log.append_many([b"one", b"two", b"three"])
    let_others_read(folder)
    yield folder / "log"
    shutil.rmtree(folder)


def as_nobody(function: Callable[[], object], seconds: int = 30) -> object:
    """Run `function` in a child that belongs to a user without any rights here."""

    def become() -> object:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        return function()

    return in_child(become, seconds)


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")


def header_of(path: Path, name: str, field: str, value: object) -> None:
    """Set one field in a file's header, with a checksum that agrees."""
    file = path / name
    layout = format.HEADER if name == format.CONTROL_FILE else format.DATA_HEADER
    data = bytearray(file.read_bytes())
    body = layout.pack(layout.unpack(data)._replace(**{field: value}))[:-4]  # type: ignore[attr-defined, arg-type]
    data[: layout.size] = body + checksum(body).to_bytes(4, "little")
    file.write_bytes(data)


def test_a_newer_version_is_named_and_refused(path: Path) -> None:
    for name in (format.CONTROL_FILE, format.DATA_FILE):
        for version, way in ((0, "older"), (1, "export"), (3, "upgrade"), (0xFFFFFFFF, "upgrade")):
            header_of(path, name, "version", version)
            with pytest.raises(errors.UnknownVersion, match=f"{name} has format version {version}.*{way}"):
                kvspool.open(path)
        header_of(path, name, "version", format.VERSION)
    kvspool.open(path).close()


@pytest.mark.parametrize("name", [format.CONTROL_FILE, format.DATA_FILE])
@pytest.mark.parametrize("magic", [b"KVSPOOL1", b"KVSPOOL3", b"\x7fELF\2\1\1\0", b"kvspool2", bytes(8)])
def test_a_foreign_magic_is_no_log(path: Path, name: str, magic: bytes) -> None:
    with open(path / name, "r+b") as file:
        file.write(magic)
    before = tree(path)
    with pytest.raises(errors.NotALog, match=name):
        kvspool.open(path)
    assert tree(path) == before


def test_the_two_files_are_not_mistaken_for_each_other(path: Path) -> None:
    control, data = path / format.CONTROL_FILE, path / format.DATA_FILE
    swapped = control.read_bytes(), data.read_bytes()
    data.write_bytes(swapped[0])
    control.write_bytes(swapped[1])
    with pytest.raises(errors.NotALog):
        kvspool.open(path)


def test_files_of_different_logs_are_refused_by_name(path: Path, tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "other", capacity=4096) as other:
        foreign = other.log_id.hex()
    shutil.copy(tmp_path / "other" / format.DATA_FILE, path / format.DATA_FILE)
    before = tree(path)
    with pytest.raises(errors.MismatchedFiles, match=foreign):
        kvspool.open(path)
    assert tree(path) == before


def test_files_of_one_log_with_different_capacities_are_refused(path: Path) -> None:
    header_of(path, format.DATA_FILE, "capacity", 8192)
    with pytest.raises(errors.MismatchedFiles):
        kvspool.open(path)


@pytest.mark.parametrize("name", [format.CONTROL_FILE, format.DATA_FILE])
def test_a_missing_file_is_named(path: Path, name: str) -> None:
    (path / name).unlink()
    with pytest.raises(errors.NotALog):
        kvspool.open(path)
    with pytest.raises(errors.NotALog, match=name):
        SpoolFiles(path)


def lengths(full: int) -> list[int]:
    return sorted({0, 1, 7, 8, 9, 12, 64, 127, 128, 129, 4095, 4096, 4097, 5000, full // 2, full - 4096, full - 8, full - 1} - {full})


@pytest.mark.parametrize("name", [format.CONTROL_FILE, format.DATA_FILE])
def test_a_file_shorter_than_its_header_says_is_refused_and_never_kills_the_process(path: Path, name: str) -> None:
    whole = (path / name).read_bytes()

    def cut_to_each() -> list[tuple[int, str]]:
        found = []
        for length in lengths(len(whole)):
            (path / name).write_bytes(whole[:length])
            try:
                log = kvspool.open(path)
                list(log)
                log.append(b"x")
            except errors.KvspoolError as error:
                found.append((length, type(error).__name__))
            else:
                found.append((length, "opened"))
            assert (path / name).read_bytes() == whole[:length]
        return found

    outcomes = in_child(cut_to_each)
    assert outcomes == [(length, "NotALog" if length < 8 else "Truncated") for length in lengths(len(whole))]


@pytest.mark.parametrize("name", [format.CONTROL_FILE, format.DATA_FILE])
def test_every_flipped_bit_of_a_header_is_detected(path: Path, name: str) -> None:
    whole = (path / name).read_bytes()
    layout = format.HEADER if name == format.CONTROL_FILE else format.DATA_HEADER
    for bit in range(layout.size * 8):
        with open(path / name, "r+b") as file:
            file.seek(bit >> 3)
            file.write(bytes([whole[bit >> 3] ^ 1 << (bit & 7)]))
        expected = errors.NotALog if bit < 64 else errors.UnknownVersion if bit < 96 else errors.Corruption
        with pytest.raises(errors.KvspoolError) as caught:
            kvspool.open(path)
        assert type(caught.value) is expected, f"bit {bit}"
        with open(path / name, "r+b") as file:
            file.seek(bit >> 3)
            file.write(whole[bit >> 3 : (bit >> 3) + 1])
    kvspool.open(path).close()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("capacity", 0),
        ("capacity", 4095),
        ("capacity", 4096 + 8),
        ("capacity", 8192),
        ("capacity", 1 << 62),
        ("capacity", 2**64 - 4096),
        ("data_start", 0),
        ("data_start", 8192),
        ("control_bytes", 0),
        ("control_bytes", 4096),
        ("control_bytes", 2**64 - 1),
        ("policy", 3),
        ("policy", 255),
        ("codec", 0),
        ("codec", 1),
        ("codec", 5),
        ("codec", 77),
    ],
)
def test_a_header_with_a_right_checksum_and_impossible_fields_is_refused(path: Path, field: str, value: int) -> None:
    header_of(path, format.CONTROL_FILE, field, value)

    def use() -> str:
        try:
            log = kvspool.open(path)
            log.append({"a": 1})
            list(log)
        except errors.KvspoolError as error:
            return type(error).__name__
        return "opened"

    assert in_child(use) in ("FormatError", "Corruption", "MismatchedFiles", "Truncated", "UnknownVersion")


@pytest.mark.parametrize("name", [format.CONTROL_FILE, format.DATA_FILE])
def test_a_link_instead_of_a_file_is_not_followed(path: Path, tmp_path: Path, name: str) -> None:
    (path / name).rename(tmp_path / "elsewhere")
    (path / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(errors.NotALog, match="not a regular file"):
        kvspool.open(path)


@pytest.mark.parametrize("name", [format.CONTROL_FILE, format.DATA_FILE])
def test_a_directory_instead_of_a_file_is_no_log(path: Path, name: str) -> None:
    (path / name).unlink()
    (path / name).mkdir()
    with pytest.raises(errors.NotALog, match="not a regular file"):
        kvspool.open(path)


@pytest.mark.parametrize("name", [format.CONTROL_FILE, format.DATA_FILE])
def test_a_fifo_instead_of_a_file_is_no_log_and_blocks_no_process(path: Path, name: str) -> None:
    (path / name).unlink()
    os.mkfifo(path / name)

    def use() -> str:
        with pytest.raises(errors.NotALog, match="not a regular file"):
            kvspool.open(path)
        return "refused"

    assert in_child(use, 5) == "refused"


@needs_root
@pytest.mark.parametrize("name", [format.CONTROL_FILE, format.DATA_FILE])
def test_a_fifo_that_may_only_be_read_blocks_no_process(public_path: Path, name: str) -> None:
    (public_path / name).unlink()
    os.mkfifo(public_path / name)
    (public_path / name).chmod(0o444)

    def use() -> str:
        try:
            kvspool.open(public_path)
        except errors.NotALog:
            return "refused"
        return "opened"

    assert as_nobody(use, 5) == "refused"


def test_a_device_instead_of_a_file_is_no_log(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to make a device")
    (path / format.DATA_FILE).unlink()
    try:
        os.mknod(path / format.DATA_FILE, 0o600 | stat.S_IFCHR, os.makedev(1, 5))
    except OSError as error:
        pytest.skip(f"no device can be made here: {error}")
    with pytest.raises(errors.NotALog):
        kvspool.open(path)


# Rights.


@needs_root
def test_a_user_without_write_permission_reads_and_follows_and_cannot_write(public_path: Path) -> None:
    def use() -> tuple[list[bytes], list[bytes], list[str], bool]:
        refused = []
        with kvspool.open(public_path) as log:
            read = [record.value for record in log]
            followed = [record.value for record in log.follow(1, timeout=0.01)]
            assert log.stats().records == 3
            for write in (lambda: log.append(b"x"), lambda: log.append_many([b"x"]), log.sync):
                try:
                    write()
                except PermissionError as error:
                    refused.append(str(error.filename))
            assert log._files is not None
            return read, followed, refused, log._files.can_ask

    before = tree(public_path)
    assert as_nobody(use) == ([b"one", b"two", b"three"], [b"two", b"three"], [str(public_path)] * 3, False)
    assert tree(public_path) == before


@needs_root
def test_a_user_without_write_permission_gets_new_records_while_it_follows(public_path: Path) -> None:
    ready_read, ready_write = os.pipe()

    def follow() -> list[bytes]:
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        with kvspool.open(public_path) as log:
            following = log.follow("latest", limit=3)
            os.write(ready_write, b"!")
            return [record.value for record in following]

    wait = start(follow, 30)
    os.read(ready_read, 1)
    with kvspool.open(public_path) as log:
        log.append(b"four")
        log.append_many([b"five", b"six"])
    assert wait() == [b"four", b"five", b"six"]
    os.close(ready_read)
    os.close(ready_write)


@needs_root
def test_a_user_without_read_permission_gets_the_systems_error(public_path: Path) -> None:
    (public_path / format.DATA_FILE).chmod(0o600)

    def use() -> int | None:
        try:
            kvspool.open(public_path)
        except PermissionError as error:
            return error.errno
        return None

    assert as_nobody(use) == errno.EACCES


def test_the_ring_is_mapped_for_reading_until_the_first_append(path: Path) -> None:
    def ring_rights() -> set[str]:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
        return {line.split()[1] for line in lines if line.endswith(str(path / format.DATA_FILE))}

    with kvspool.open(path) as log:
        list(log)
        assert ring_rights() == {"r--s"}
        log.append(b"x")
        assert ring_rights() == {"r--s", "rw-s"}
    assert ring_rights() == set()


# Descriptors.


@pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE], ids=errno.errorcode.get)
def test_an_open_that_fails_at_any_call_leaks_nothing_and_changes_nothing(
    path: Path, number: int, open_files: Callable[[], set[str]]
) -> None:
    held, before = open_files(), tree(path)
    failures = []
    nth = 0
    while True:
        nth += 1
        port = FailingPort(nth, number)
        try:
            with system.replaced(port):
                log = kvspool.open(path)
        except OSError as error:
            assert error.errno == number
            failures.append(port.failed)
            assert open_files() == held, f"call {nth}, {port.failed}"
        else:
            log.close()
            assert not port.failed
            break
    assert failures.count("open") == 2
    assert failures.count("map") == 2
    assert tree(path) == before


def test_close_gives_back_every_descriptor_and_mapping(path: Path, open_files: Callable[[], set[str]]) -> None:
    held = open_files()
    log = kvspool.open(path)
    log.append(b"x")
    log.sync()
    following = log.follow(timeout=0)
    list(following)
    following.close()
    assert len(open_files() - held) >= 5
    log.close()
    assert open_files() == held


def test_an_iterator_keeps_its_memory_alive_and_ends_with_a_clear_error(path: Path) -> None:
    log = kvspool.open(path)
    reading = log.read()
    log.close()
    with pytest.raises(errors.Closed):
        next(reading)


def test_no_descriptor_is_inherited_by_a_program_that_is_started(path: Path, open_files: Callable[[], set[str]]) -> None:
    with kvspool.open(path) as log:
        log.append(b"x")
        following = log.follow(timeout=0)
        list(following)
        found = [int(name.split()[0]) for name in open_files() if not name.startswith("map")]
        assert len(found) >= 4
        assert not [fd for fd in found if os.get_inheritable(fd)]
        following.close()


def test_the_locks_descriptor_is_never_one_that_is_mapped(path: Path) -> None:
    with kvspool.open(path) as log:
        log.append(b"x")
        files = log._files
        assert files is not None
        assert files.lock_fd not in (files.control_fd, files.data_fd)
        log_id = log.log_id
    other = SpoolFiles(path)
    assert other.header.log_id == log_id
    other.close()


# Deleted and replaced under an open handle.


def test_a_log_that_was_replaced_is_never_locked_instead_of_the_open_one(path: Path, tmp_path: Path) -> None:
    with kvspool.open(path) as log:
        path.rename(tmp_path / "moved")
        kvspool.create(path, capacity=4096).close()
        before = tree(tmp_path)
        for _ in range(3):
            with pytest.raises(errors.MismatchedFiles, match="replaced"):
                log.append(b"lost")
        assert tree(tmp_path) == before


def test_a_deleted_log_can_still_be_read_and_says_that_it_vanished(path: Path) -> None:
    with kvspool.open(path) as log:
        assert not log.has_vanished()
        shutil.rmtree(path)
        assert log.has_vanished()
        assert [record.value for record in log] == [b"one", b"two", b"three"]


def test_the_first_append_to_a_log_that_was_deleted_says_that_it_vanished(path: Path) -> None:
    with kvspool.open(path) as log:
        shutil.rmtree(path)
        with pytest.raises(errors.LogVanished):
            log.append(b"lost")


def test_an_open_writer_notices_within_a_second_that_its_log_was_deleted(path: Path) -> None:
    with kvspool.open(path) as log:
        log.append(b"four")
        shutil.rmtree(path)
        assert log._writer is not None
        log._writer.look_at = 0  # as if a second had gone by
        for _ in range(2):
            with pytest.raises(errors.LogVanished):
                log.append(b"lost")
        with pytest.raises(errors.LogVanished):
            log.append_many([b"lost"])
        assert [record.value for record in log] == [b"one", b"two", b"three", b"four"]


@pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE], ids=errno.errorcode.get)
def test_a_first_append_or_sync_that_fails_at_any_call_leaks_nothing_and_the_next_one_works(
    path: Path, number: int, open_files: Callable[[], set[str]]
) -> None:
    for use, calls in ((lambda log: log.append(b"x"), ("open", "status", "map")), (lambda log: log.sync(), ("open", "status", "map"))):
        held = open_files()
        failures = []
        nth = 0
        while True:
            nth += 1
            port = FailingPort(nth, number, calls)
            with kvspool.open(path) as log:
                with system.replaced(port):
                    try:
                        use(log)
                    except OSError as error:
                        assert error.errno == number
                        failures.append(port.failed)
                use(log)
            assert open_files() == held, f"call {nth}, {port.failed}"
            if not port.failed:
                break
        assert {"open", "status", "map"} <= set(failures)
