"""Floors: the machine's own times for the parts of an append."""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import subprocess
import time
from functools import cached_property
from itertools import repeat
from pathlib import Path

from cases.case import FRAME, RING, VALUE, Bench, LeftOut

HERE = Path(__file__).resolve().parent


def compiled(folder: Path, source: str, *options: str) -> Path:
    """Compile a C file of this folder, and return the result. Raises LeftOut without a compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise LeftOut("the floor in C is not measured: no gcc or cc on the PATH. On Debian or Ubuntu: sudo apt-get install gcc libc6-dev")
    target = folder / f"{source}.compiled"
    if not target.exists():
        subprocess.run([compiler, "-O3", *options, "-o", target, HERE / source], check=True)
    return target


class Floors:
    """Rates of the machine itself, in operations per second."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._size = bench.size(RING, 1 << 20)
        self._files: dict[Path, int] = {}

    @cached_property
    def _map(self) -> mmap.mmap:
        """A mapping of a file whose pages have all been written."""
        fd = os.open(self._bench.folder / "floor.map", os.O_RDWR | os.O_CREAT)
        os.posix_fallocate(fd, 0, self._size)
        mapping = mmap.mmap(fd, self._size)
        os.close(fd)
        for at in range(0, self._size, mmap.PAGESIZE):
            mapping[at] = 1
        return mapping

    @cached_property
    def _c(self) -> ctypes.CDLL:
        loaded = ctypes.CDLL(str(compiled(self._bench.folder, "floors.c", "-shared", "-fPIC")))
        loaded.copies.restype = ctypes.c_double
        loaded.copies.argtypes = [ctypes.c_void_p, ctypes.c_long, ctypes.c_char_p, ctypes.c_long, ctypes.c_long, ctypes.c_int]
        return loaded

    def store(self) -> float:
        """Store 100 bytes into a slice of a mapping, from Python, as far apart as the frames of a ring."""
        view, places = memoryview(self._map), range(0, self._size - FRAME, FRAME)

        def stores() -> None:
            for at in places:
                view[at : at + 100] = VALUE

        return self._bench.rate(len(places), stores)

    def memcpy(self, size: int = 100, *, is_checked: bool = False) -> float:
        """Copy values into a mapping from C, without lock or header; if `is_checked` with a CRC32C of each."""
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        count = self._bench.size(2_000_000, 2000) * 100 // size
        return count / self._c.copies(address, self._size, bytes(size), size, count, is_checked)

    def write(self, batch: int = 1, path: Path | None = None) -> float:
        """Write values to a file opened with O_APPEND, `batch` of them at once. The file is initially empty."""
        fd = self._opened(path or self._bench.folder / "floor.written")
        data, calls = VALUE * batch, self._bench.size(200_000, 2000) // batch
        done, elapsed = 0, 0.0
        while elapsed < self._bench.seconds:
            os.ftruncate(fd, 0)
            start = time.perf_counter()
            for _ in repeat(None, calls):
                os.write(fd, data)
            elapsed += time.perf_counter() - start
            done += calls * batch
        return done / elapsed

    def _opened(self, path: Path) -> int:
        if path not in self._files:
            self._files[path] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        return self._files[path]
