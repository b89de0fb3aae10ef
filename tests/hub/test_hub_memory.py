"""The bound on what Arrow takes in a hub: a batch that says it becomes huge gets no memory, and everybody else is served."""

from __future__ import annotations

import resource
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from processes_of_a_hub import ServeCommand
from pyarrow import flight
from shipping import LOG, contents, stored

import kvspool
from hub.client.remote import RemoteHub
from hub.client.shipper import Shipper
from hub.errors import HubFull
from hub.protocol import ingest, reading
from hub.protocol.ingest import Opened, Opening, Put, ShippedLog
from hub.root import columns
from hub.server import memory

BOUND = 256 << 20
BOMB = 768 << 20  # bytes that a compressed batch becomes


def most(hub: ServeCommand) -> int:
    """Return the bytes of memory that a hub has had at most."""
    told = Path(f"/proc/{hub.process.pid}/status").read_text(encoding="ascii")
    return int(told.split("VmHWM:")[1].split()[0]) << 10


def bomb() -> pa.RecordBatch:
    """Return a batch of one large record of zeros, which a codec makes next to nothing of."""
    columns_of: dict[str, Any] = {"timestamp": [0], "type": [0], "key": [None], "codec": [0]}
    offsets = pa.array([0, BOMB], pa.int32()).buffers()[1]
    value = pa.Array.from_buffers(pa.binary(), 1, [None, offsets, pa.py_buffer(bytearray(BOMB))])
    arrays = [value if field.name == "value" else pa.array(columns_of[field.name], field.type) for field in columns.SCHEMA]
    return pa.RecordBatch.from_arrays(arrays, schema=columns.SCHEMA)


def explode(location: str, codec: str) -> flight.FlightError:
    """Send a hub the batch, and return how the call ends."""
    with flight.FlightClient(location) as client:
        command = ingest.encode(Opening(ingest.VERSION, "bomber", 0, [ShippedLog(0, LOG, 1)]))
        writer, reader = client.do_exchange(flight.FlightDescriptor.for_command(command), flight.FlightCallOptions(timeout=60))
        writer.begin(columns.SCHEMA, options=pa.ipc.IpcWriteOptions(compression=codec))
        assert isinstance(ingest.decode_from_hub(reader.read_chunk().app_metadata.to_pybytes()), Opened)
        writer.write_with_metadata(bomb(), ingest.encode(Put(0, 0, 0, 1, True)))
        with pytest.raises(flight.FlightError) as refused:
            while True:
                reader.read_chunk()
        with suppress(pa.ArrowException, OSError):
            writer.close()
    return refused.value


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
def test_a_batch_that_becomes_huge_gets_no_memory_and_the_others_are_served(tmp_path: Path, codec: str) -> None:
    words = ("--anonymous", "--least-free", "1MiB", "--memory", BOUND)
    with ServeCommand(tmp_path / "root", *words) as hub, kvspool.create(tmp_path / "log", capacity="1MiB") as log:
        log.append_many([b"%d" % number for number in range(1000)])
        before = most(hub)
        for _ in range(2):
            assert isinstance(reading.error_in(explode(hub.location, codec).extra_info), HubFull)
        with Shipper(tmp_path / "log", hub.location, client="good") as shipper:
            shipper.run(until_empty=True)
        with RemoteHub(hub.location) as remote:
            assert remote.read_arrow("good", 0).num_rows == 1000
        assert most(hub) < before + BOUND
        assert "more memory" in hub.kill()
        assert stored(tmp_path / "root" / "good") == contents(log)
        assert stored(tmp_path / "root" / "bomber") == {}


def test_a_bound_that_is_too_small_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least 64 MiB"):
        memory.bound(memory.LEAST - 1)
    command = [sys.executable, "-m", "kvspool.cli", "hub", "serve", "--root", tmp_path / "root", "--anonymous", "--memory", "1MiB"]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "--memory: a hub needs at least 64 MiB" in done.stderr


def said(program: str, addresses: int = resource.RLIM_INFINITY) -> str:
    """Return what a program of its own says, which may have so many bytes of addresses."""
    limited = f"import resource; resource.setrlimit(resource.RLIMIT_AS, ({addresses}, {addresses}))\n{program}"
    done = subprocess.run([sys.executable, "-c", limited], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(("before", "answer"), [("", "True"), ("import pyarrow; ", "False")])
def test_it_is_reported_whether_the_bound_holds(before: str, answer: str) -> None:
    assert said(f"{before}from hub.server import memory; print(memory.bound(1 << 30))") == answer


def test_the_default_is_what_can_be_had() -> None:
    program = "from hub.server import memory; size = memory.half_of_all(); print(memory.LEAST <= size < 2 << 30, memory.bound(size))"
    assert said(program, 2 << 30) == "True True"


def test_addresses_that_can_not_be_had_are_an_error_and_no_hub_without_memory() -> None:
    program = "from hub.server import memory\ntry: memory.bound(64 << 30)\nexcept MemoryError: print('refused')"
    assert said(program, 3 << 30) == "refused"
