"""Hazards of shared memory and locks that no other test looks at; `docs/hazards.md` says which test stands for which."""

from __future__ import annotations

import mmap
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from children import start
from faults import RecordingPort

import kvspool
from kvspool import Spool, system

ALL_ONES = (1 << 64) - 1


def test_a_word_is_never_seen_half_stored() -> None:
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    words = memoryview(memory).cast("Q")
    stores = 300_000

    def write() -> None:
        for at in range(stores):
            words[7] = ALL_ONES if at & 1 else 0
        words[0] = 1

    wait = start(write)
    seen = set()
    while not words[0]:
        for _ in range(1000):
            seen.add(words[7])
    wait()
    assert seen <= {0, ALL_ONES}
    assert words[7] == ALL_ONES


def test_appends_continue_while_another_process_flushes(interpreted: None, log: Spool) -> None:
    log.append(b"before")
    flushed = []

    class Flushing(system.Port):
        def flush_data(self, fd: int) -> None:
            with kvspool.open(log.path, timeout=0) as other:
                flushed.append(other.append(b"meanwhile"))
            super().flush_data(fd)

    with system.replaced(Flushing()):
        assert log.sync() == 1
    assert flushed == [1, 2], "neither the flush of the data nor that of the checkpoint holds the append lock"


def test_a_handle_is_opened_where_it_is_used_and_never_pickled(log: Spool) -> None:
    reader = log.reader("reader")
    for handle in (log, reader, log.read(), log.follow(timeout=0)):
        with pytest.raises(TypeError):
            pickle.dumps(handle)


def test_no_file_changes_its_size_after_it_was_made(interpreted: None, tmp_path: Path) -> None:
    port = RecordingPort()
    with system.replaced(port):
        log = kvspool.create(tmp_path / "log", capacity=4096, codec="keyed", policy="block")
        sizes = {name: os.stat(log.path / name).st_size for name in os.listdir(log.path)}
        port.calls.clear()
        with log, log.reader("reader") as reader:
            for at in range(200):
                log.append({f"key{at % 70}": at})
                list(reader.read())
                reader.commit()
            log.sync()
        log = kvspool.open(log.path)
        log.delete_reader("reader")
        log.close()
    assert {name: os.stat(log.path / name).st_size for name in os.listdir(log.path)} == sizes
    assert "flush_data" in port.calls
    assert not {"allocate", "rename", "remove"} & set(port.calls), "nothing is made, replaced or deleted"


OVERLAY = """
import os, subprocess, sys, kvspool
root = sys.argv[1]
lower, mounted = root + "/lower", root + "/mounted"
for name in ("lower", "upper", "work", "mounted"):
    os.mkdir(root + "/" + name)
with kvspool.create(lower + "/log", capacity=4096) as log:
    log.append(b"below")
done = subprocess.run(["mount", "-t", "overlay", "-o", f"lowerdir={lower},upperdir={root}/upper,workdir={root}/work", "none", mounted])
if done.returncode:
    sys.exit("no overlay can be mounted here")
reader = kvspool.open(mounted + "/log")  # it maps both files before anybody writes
assert [record.value for record in reader] == [b"below"]
with kvspool.open(mounted + "/log") as writer:
    writer.append(b"above")
assert [record.value for record in reader] == [b"below", b"above"], "the reader looks at the file below for ever"
print("the reader sees it")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED HERE: mounting an overlay needs root")
def test_on_an_overlay_a_reader_from_before_the_first_append_sees_it(tmp_path: Path) -> None:
    script = 'mount -t tmpfs -o size=4m tmpfs "$1" && exec "$2" -c "$3" "$1"'
    command = ["unshare", "-m", "sh", "-c", script, "sh", tmp_path, sys.executable, OVERLAY]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if "unshare" in ran.stderr or "mount" in ran.stderr:
        pytest.skip(f"NOT TESTED HERE: this machine lets nobody mount an overlay: {ran.stderr.strip()}")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "the reader sees it\n"
