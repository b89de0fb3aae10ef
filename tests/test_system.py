"""The port to the operating system: what its calls promise beyond those of the system."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import sysconfig
import uuid
from pathlib import Path
from typing import Any

import pytest
from children import in_child

from kvspool import system
from kvspool.errors import Closed
from kvspool.system import Port
from kvspool.system.descriptor import Descriptor


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(bytes(4096))
    return path


def test_a_link_is_not_followed_and_the_descriptor_not_inherited(file: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(file)
    with pytest.raises(OSError) as caught:
        Descriptor(tmp_path / "link", os.O_RDWR)
    assert caught.value.errno == errno.ELOOP
    with Descriptor(file, os.O_RDWR) as fd:
        assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC


def test_a_descriptor_is_closed_once_and_not_used_after_that(file: Path) -> None:
    one = Descriptor(file, os.O_RDWR)
    number = one.number
    one.close()
    stranger = os.open(file, os.O_RDONLY)
    assert stranger == number  # as the kernel gives the lowest number that is free
    one.close()
    with pytest.raises(Closed, match="was closed"):
        one.number  # noqa: B018
    del one
    os.fstat(stranger)
    os.close(stranger)


def test_a_descriptor_without_references_is_closed(file: Path) -> None:
    number = Descriptor(file, os.O_RDWR).number
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)


def test_a_write_continues_until_everything_is_written(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real(fd, bytes(data[:3]), at))
    fd = os.open(file, os.O_RDWR)
    Port().write(fd, b"0123456789", 100)
    assert Port().read(fd, 12, 99) == b"\x000123456789\0"
    os.close(fd)


def test_allocate_reserves_the_disk(tmp_path: Path) -> None:
    with Descriptor(tmp_path / "new", os.O_RDWR | os.O_CREAT | os.O_EXCL) as fd:
        Port().allocate(fd, 1 << 20)
        status = Port().status(fd)
    assert status.st_size == 1 << 20
    assert status.st_blocks * 512 >= 1 << 20
    assert status.st_mode & 0o777 == 0o600


def test_free_space_is_that_of_the_file_system(tmp_path: Path) -> None:
    found = Port().free_space(tmp_path)
    assert 0 < found.f_bavail <= found.f_bfree <= found.f_blocks
    assert found.f_frsize >= 512
    with pytest.raises(FileNotFoundError):
        Port().free_space(tmp_path / "none")


def test_a_mapping_for_reading_can_not_be_written(file: Path) -> None:
    fd = os.open(file, os.O_RDWR)
    with Port().map(fd, 4096, writable=False) as reading, Port().map(fd, 4096, writable=True) as writing:
        writing[5] = 9
        assert reading[5] == 9
        with pytest.raises(TypeError):
            reading[5] = 1
    os.close(fd)


def test_a_lock_excludes_other_descriptions_and_not_its_own(file: Path) -> None:
    port = Port()
    one, other = os.open(file, os.O_RDWR), os.open(file, os.O_RDWR)
    assert port.try_lock(one, 5)
    assert port.try_lock(one, 5)
    assert not port.try_lock(other, 5)
    assert port.try_lock(other, 6)
    port.unlock(one, 5)
    assert port.try_lock(other, 5)
    os.close(one)
    os.close(other)


def test_a_lock_outlives_the_close_of_another_descriptor_of_the_file(file: Path) -> None:
    port = Port()
    one, other = os.open(file, os.O_RDWR), os.open(file, os.O_RDWR)
    assert port.try_lock(one, 5)
    os.close(os.open(file, os.O_RDWR))
    assert not port.try_lock(other, 5)
    os.close(one)
    assert port.try_lock(other, 5)
    os.close(other)


def test_a_lock_on_a_wrong_descriptor_is_an_error_and_not_busy(file: Path) -> None:
    fd = os.open(file, os.O_RDONLY)
    with pytest.raises(OSError):
        Port().try_lock(fd, 5)
    os.close(fd)


def test_the_process_is_described_as_the_kernel_sees_it() -> None:
    port = Port()
    assert port.process_id() == os.getpid()
    assert port.process_start(os.getpid()) > 0
    assert port.process_state(os.getpid()) == "running"
    assert port.pid_namespace() == os.stat("/proc/self/ns/pid").st_ino
    assert in_child(lambda: port.process_start(os.getpid())) >= port.process_start(os.getpid())


def test_the_start_of_this_process_is_read_once_and_again_in_a_child(monkeypatch: pytest.MonkeyPatch) -> None:
    port = Port()
    start = port.process_start(os.getpid())
    other = port.process_start(os.getppid())
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: "1 (other) S " + "7 " * 30)
    assert (port.process_start(os.getpid()), port.process_start(os.getppid())) == (start, 7) != (start, other)
    assert in_child(lambda: port.process_start(os.getpid())) == 7
    assert in_child(lambda: port.process_start(os.getppid())) == 7


def test_a_process_whose_name_holds_anything_is_described(tmp_path: Path) -> None:
    program = tmp_path / "a ) R 1 (b"
    program.symlink_to("/bin/cat")
    child = subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(b"up\n")
    child.stdin.flush()
    child.stdout.readline()
    port = Port()
    assert port.process_start(child.pid) >= port.process_start(os.getpid())
    assert port.process_state(child.pid) in ("sleeping", "running")
    child.communicate()
    assert port.process_start(child.pid) == 0
    assert port.process_state(child.pid) == "gone"


def test_a_directory_keeps_its_identity_when_it_is_renamed_and_a_new_one_never_gets_it(tmp_path: Path) -> None:
    port, seen = Port(), set()
    for _ in range(50):
        (tmp_path / "a").mkdir()
        identity = port.identity(tmp_path / "a")
        (tmp_path / "a").rename(tmp_path / "b")
        assert port.identity(tmp_path / "b") == identity
        seen.add(identity)
        (tmp_path / "b").rmdir()
    if "-" not in identity:
        pytest.skip("this file system has no handles; what is left is the inode number")
    assert len(seen) == 50
    with pytest.raises(FileNotFoundError):
        port.identity(tmp_path / "a")


def test_the_boot_id_is_16_bytes_that_stay() -> None:
    assert Port().boot_id() == Port().boot_id()
    assert uuid.UUID(bytes=Port().boot_id()).hex == Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")


def test_entropy_and_clocks() -> None:
    port = Port()
    assert len(port.random(16)) == 16
    assert port.random(16) != port.random(16)
    assert port.monotonic() <= port.monotonic()
    assert port.now() > 1_700_000_000 * 10**9


def test_another_port_is_used_inside_the_block_and_no_longer() -> None:
    before = system.port
    other = Port()
    with pytest.raises(ZeroDivisionError), system.replaced(other):
        assert system.port is other
        raise ZeroDivisionError
    assert system.port is before


@pytest.mark.parametrize(
    ("attribute", "value", "said"),
    [("platform", "darwin", "needs Linux"), ("byteorder", "big", "little-endian"), ("_is_gil_enabled", lambda: False, "PYTHON_GIL=1")],
)
def test_a_host_that_breaks_the_formats_assumptions_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, attribute: str, value: Any, said: str
) -> None:
    import kvspool

    monkeypatch.setattr(sys, attribute, value, raising=False)
    with pytest.raises(OSError, match=said):
        system.refuse_unfit_host()
    with pytest.raises(OSError, match=said):
        kvspool.create(tmp_path / "log", capacity=4096)
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(not sysconfig.get_config_var("Py_GIL_DISABLED"), reason="needs a free-threaded build of Python")
@pytest.mark.parametrize("twin", ["compiled", "interpreted"])
@pytest.mark.parametrize("gil", ["", "0", "1"])
def test_a_free_threaded_python_uses_logs_with_the_gil_or_not_at_all(tmp_path: Path, gil: str, twin: str) -> None:
    """Without a word in the environment, the import of the compiled twin switches the GIL on, and Python warns."""
    program = "import sys, kvspool; kvspool.create('log').append(b'one'); print(sys._is_gil_enabled())"
    variables = {**os.environ, "PYTHON_GIL": gil, "KVSPOOL_NO_EXTENSIONS": "1" if twin == "interpreted" else ""}
    if not gil:
        del variables["PYTHON_GIL"]
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=variables, capture_output=True, text=True)
    if gil == "0" or (gil, twin) == ("", "interpreted"):
        assert done.returncode == 1 and "set PYTHON_GIL=1 or pass -X gil=1" in done.stderr
        assert os.listdir(tmp_path) == []
    else:
        assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
        assert ("RuntimeWarning" in done.stderr) == (gil == "")
