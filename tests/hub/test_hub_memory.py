"""The memory of a hub: a batch that says it becomes huge gets none, and everybody else is served."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack, suppress
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
from hub.errors import Malformed
from hub.protocol import ingest, reading
from hub.protocol.ingest import Acknowledged, Opened, Opening, Put, ShippedLog
from hub.root import columns
from hub.server.server import SHARES

BOUND = 256 << 20
LARGEST = 32 << 20
BOMB = 768 << 20  # bytes that a compressed batch becomes


def most(hub: ServeCommand) -> int:
    """Return the bytes of memory that a hub has had at most."""
    told = Path(f"/proc/{hub.process.pid}/status").read_text(encoding="ascii")
    return int(told.split("VmHWM:")[1].split()[0]) << 10


def large(size: int) -> pa.RecordBatch:
    """Return a batch of one large record of zeros, which a codec makes next to nothing of."""
    columns_of: dict[str, Any] = {"timestamp": [0], "type": [0], "key": [None], "codec": [0]}
    offsets = pa.array([0, size], pa.int32()).buffers()[1]
    value = pa.Array.from_buffers(pa.binary(), 1, [None, offsets, pa.py_buffer(bytearray(size))])
    arrays = [value if field.name == "value" else pa.array(columns_of[field.name], field.type) for field in columns.SCHEMA]
    return pa.RecordBatch.from_arrays(arrays, schema=columns.SCHEMA)


def explode(location: str, codec: str) -> flight.FlightError:
    """Send a hub the batch, and return how the call ends."""
    with flight.FlightClient(location) as client:
        command = ingest.encode(Opening(ingest.VERSION, "bomber", 0, [ShippedLog(0, LOG, 1)]))
        writer, reader = client.do_exchange(flight.FlightDescriptor.for_command(command), flight.FlightCallOptions(timeout=60))
        writer.begin(columns.SCHEMA, options=pa.ipc.IpcWriteOptions(compression=codec))
        assert isinstance(ingest.decode_from_hub(reader.read_chunk().app_metadata.to_pybytes()), Opened)
        writer.write_with_metadata(large(BOMB), ingest.encode(Put(0, 0, 0, 1, True)))
        with pytest.raises(flight.FlightError) as refused:
            while True:
                reader.read_chunk()
        with suppress(pa.ArrowException, OSError):
            writer.close()
    return refused.value


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
def test_a_batch_that_becomes_huge_gets_no_memory_and_the_others_are_served(tmp_path: Path, codec: str) -> None:
    words = ("--anonymous", "--least-free", "1MiB", "--memory", BOUND, "--largest-batch", LARGEST)
    with ServeCommand(tmp_path / "root", *words) as hub, kvspool.create(tmp_path / "log", capacity="1MiB") as log:
        log.append_many([b"%d" % number for number in range(1000)])
        before = most(hub)
        for _ in range(2):
            assert isinstance(reading.error_in(explode(hub.location, codec).extra_info), Malformed)
        with Shipper(tmp_path / "log", hub.location, client="good") as shipper:
            shipper.run(until_empty=True)
        with RemoteHub(hub.location) as remote:
            assert remote.read_arrow("good", 0).num_rows == 1000
        assert most(hub) < before + BOUND
        assert f"this hub accepts {LARGEST}" in hub.kill()
        assert stored(tmp_path / "root" / "good") == contents(log)
        assert stored(tmp_path / "root" / "bomber") == {}


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
def test_large_compressed_batches_of_many_clients_take_turns(tmp_path: Path, codec: str) -> None:
    """Sixteen clients send batches of 30 MB at once, which take a few KB; the hub has memory for two of them."""
    size, clients = 30 << 20, 16
    words = ("--anonymous", "--least-free", "1MiB", "--memory", BOUND, "--largest-batch", LARGEST)
    with ServeCommand(tmp_path / "root", *words) as hub, ExitStack() as stack:
        before, calls = most(hub), []
        for number in range(clients):
            client = stack.enter_context(flight.FlightClient(hub.location))
            opening = Opening(ingest.VERSION, f"client-{number}", 0, [ShippedLog(0, LOG, 1)])
            call = client.do_exchange(flight.FlightDescriptor.for_command(ingest.encode(opening)), flight.FlightCallOptions(timeout=60))
            call[0].begin(columns.SCHEMA, options=pa.ipc.IpcWriteOptions(compression=codec))
            calls.append(call)
        for writer, _ in calls:
            writer.write_with_metadata(large(size), ingest.encode(Put(0, 0, 0, 1, True)))
        for writer, reader in calls:
            assert isinstance(ingest.decode_from_hub(reader.read_chunk().app_metadata.to_pybytes()), Opened)
            assert ingest.decode_from_hub(reader.read_chunk().app_metadata.to_pybytes()) == Acknowledged([(0, 1)], 1)
            writer.done_writing()
        for writer, _ in calls:
            writer.close()
        assert most(hub) < before + BOUND + BOUND // 2  # with the frames of batches, and what the allocator keeps


def test_too_little_memory_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvspool.cli", "hub", "serve", "--root", tmp_path / "root", "--anonymous", "--memory", "1MiB"]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and f"for {SHARES} batches of 64.0 MiB, not 1.0 MiB; give it more, or accept smaller batches" in done.stderr
