"""Files with secrets or trusted certificates: they are read only if no other user can have written or read them.

A *secret* file (a key, tokens) must belong to the user of this process, without rights for others. A *trusted* one (certificates) may be
readable by all, but writable only by its owner, who is this user or root. A link is followed to its file, as is usual for certificates;
a user who can change the link can also stop the hub.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hub.errors import AccessError
from kvspool import system
from kvspool.errors import LockTimeout, NotAFile
from kvspool.system import disk
from kvspool.system.descriptor import Descriptor

LARGEST = 1 << 24  # largest size of such a file, in bytes
PATIENCE = 10.0  # seconds that one editor of a file waits for another
_STABLE = 1_000_000_000  # ns after which a change of a file also changes its times
_PAUSE = 0.01


class WatchedFile:
    """A file that is read again after a change."""

    def __init__(self, path: str | os.PathLike[str], *, is_secret: bool) -> None:
        """path: not opened yet."""
        self.path = Path(os.path.abspath(path))
        self._is_secret = is_secret
        self._seen: tuple[int, ...] | None = None

    def read(self) -> bytes:
        """Return the content. Raises AccessError for a file that others could have changed or read, and the system's OSError."""
        self._seen = None
        try:
            file = Descriptor(os.path.realpath(self.path), os.O_RDONLY)
        except NotAFile as error:
            raise AccessError(str(error)) from None
        with file as fd:
            try:
                status = system.port.status(fd)
                self._check(status)
                data = system.port.read(fd, min(status.st_size, LARGEST) + 1, 0)
            except OSError as error:
                error.add_note(str(self.path))
                raise
        if len(data) > LARGEST:
            raise AccessError(f"{self.path} is larger than {LARGEST} bytes")
        # Two changes within one tick of the clock may leave the same times, so a very new file is read once more.
        if system.port.now() - status.st_ctime_ns > _STABLE:
            self._seen = _version_of(status)
        return data

    def has_changed(self) -> bool:
        """Return whether the file was changed, replaced or removed since it was read."""
        status = system.port.look_up(os.path.realpath(self.path))
        return status is None or self._seen != _version_of(status)

    def _check(self, status: os.stat_result) -> None:
        rights = stat.S_IMODE(status.st_mode)
        us = system.port.user_id()
        if status.st_uid != us and (self._is_secret or status.st_uid != 0):
            raise AccessError(f"{self.path} belongs to user {status.st_uid}, not to user {us}, who runs this process; chown it")
        if self._is_secret and rights & 0o077:
            raise AccessError(f"{self.path} holds secrets, and others have rights to it (mode {rights:o}); chmod 600 {self.path}")
        if rights & 0o022:
            raise AccessError(f"{self.path} can be written by others (mode {rights:o}); chmod go-w {self.path}")


def check_directory(path: Path) -> None:
    """Raise AccessError for a directory that everyone may write, or whose owner is neither this user nor root: its content is trusted.

    Its group may have the right to write, because that is set on purpose. root may use any user's directory.
    """
    status = system.port.look_up(Path(os.path.realpath(path)))
    if status is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    us = system.port.user_id()
    if status.st_uid not in (us, 0) and us != 0:
        raise AccessError(f"{path} belongs to user {status.st_uid}, not to user {us}, who runs this process; chown it")
    if status.st_mode & stat.S_IWOTH:
        raise AccessError(f"{path} can be written by everyone (mode {stat.S_IMODE(status.st_mode):o}); chmod o-w {path}")


def write(path: Path, data: bytes, *, replaces: bool = False, mode: int = 0o600) -> None:
    """Write a whole file, on disk on return; a replaced file stays complete until then. Raises FileExistsError unless `replaces`."""
    building = path.with_name(f"{path.name}.{system.port.random(4).hex()}.new")
    file = Descriptor(building, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        with file as fd:
            system.port.set_mode(fd, mode)
            system.port.write(fd, data, 0)
            system.port.flush(fd)
        if replaces:
            system.port.rename(building, path)
        else:
            system.port.link(building, path)  # unlike a rename it fails if the name is taken
            system.port.remove(building)
    except BaseException:
        with suppress(OSError):
            system.port.remove(building)
        raise
    disk.flush_directory(path.parent, done=f"{path} was written")


def edit(path: Path, change: Callable[[bytes], bytes]) -> None:
    """Replace a secret file by the result of `change` for its bytes (none if there is no file), one editor at a time.

    Raises the errors of `change`, AccessError, LockTimeout if another editor doesn't finish, and the system's OSError.
    """
    path = Path(os.path.realpath(path))
    with _alone(path.parent):
        is_there = system.port.look_up(path) is not None
        before = WatchedFile(path, is_secret=True).read() if is_there else b""
        write(path, change(before), replaces=is_there)


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Lock a directory against other editors; the lock ends with its process."""
    with Descriptor(directory, os.O_RDONLY | os.O_DIRECTORY) as fd:
        end = system.port.monotonic() + PATIENCE
        while not system.port.try_lock_file(fd, shared=False):
            if system.port.monotonic() > end:
                raise LockTimeout(f"{directory}: another process has been editing a file there for {PATIENCE:.0f} s")
            system.port.sleep(_PAUSE)
        yield


def _version_of(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
