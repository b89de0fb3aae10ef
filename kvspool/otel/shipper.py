"""The shipper of OpenTelemetry: delivers the requests in a log to a collector, each at least once.

A durable reader has the position. It is stored after the collector has accepted all requests before it: after a crash of the shipper, some
are sent again, and none is skipped. Requests of one signal are sent together, up to `MOST_BYTES`, without decoding them. If the collector
rejects such a request, its halves are sent, down to the one that is to blame. That becomes a dead letter, and the others are delivered.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path

import kvspool
from kvspool.errors import LockTimeout
from kvspool.log import Log
from kvspool.options import Isolation
from kvspool.otel.collector import SILENCE, Collector, CollectorAccess, CollectorEndpoint
from kvspool.otel.errors import CollectorAway, CollectorRefuses, CollectorSilent, RequestRejected
from kvspool.otel.rejected import Rejected
from kvspool.otel.signals import READER, SIGNALS, CollectorAnswer, joined, why_unknown
from kvspool.otel.status import CollectorStatus
from kvspool.record import Gap, Record
from kvspool.system.attempts import Attempts
from kvspool.system.handles import ClosingHandle, close_all
from kvspool.system.pauses import growing

MOST_BYTES = 1 << 20  # of the records of one request; a single record may be larger
MOST_RECORDS = 16_384  # of one request
LOOK = 0.2  # seconds between two checks whether to stop
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 30.0  # seconds between two attempts; Retry-After may ask for more
LONGEST_RETRY_AFTER = 600.0  # seconds
GRACE = 5.0  # seconds to wait for an answer after a stop
LONGEST_SILENCE = 300.0  # seconds to wait for a slow collector

logger = logging.getLogger("kvspool.ship")


class CollectorShipper(ClosingHandle):
    """Delivers one log to one collector. `run` delivers until `stop` is called."""

    def __init__(
        self,
        source: str | os.PathLike[str] | Log,
        endpoint: str,
        *,
        access: Callable[[], CollectorAccess] = CollectorAccess,
        reader: str = READER,
        isolation: Isolation = "appended",
        compresses: bool = True,
        silence: float = SILENCE,
    ) -> None:
        """Take the log's durable reader. source: a path, or a log that this closes. endpoint: a URL such as http://localhost:4318.

        access: called for each connection. isolation: "synced" sends only records on this host's disk. silence: seconds after which a
        request without an answer is sent again; the next one waits twice as long, up to five minutes. Raises the errors of `kvspool.open`
        and `Log.reader`, and ValueError.
        """
        self.endpoint = CollectorEndpoint.parse(endpoint)
        self._silence = silence
        self._collector = Collector(self.endpoint, access, compresses=compresses, silence=silence)
        self.log = source if isinstance(source, Log) else kvspool.open(source)
        try:
            self._reader = self.log.reader(reader, isolation=isolation)
        except BaseException:
            self.log.close()
            raise
        self._rejected = Rejected(self.log, reader)
        self._attempts = Attempts()
        self._sent = self._requests = self._bytes = self._lost = self._refused = self._refused_items = 0
        self._warning = ""

    @property
    def path(self) -> Path:
        """The path of the log."""
        return self.log.path

    def run(self, *, until_empty: bool = False) -> None:
        """Deliver until `stop` is called from another thread or a signal handler; `until_empty`: until all present records are delivered.

        An outage of the collector, wrong credentials, and errors of the system are no ends: the shipper retries. Raises the errors of the
        log, such as Corruption, LogVanished and Closed.
        """
        with self._attempts.running(), suppress(_StoppedByUser):
            while self._deliver_some(until_empty):
                pass

    def _deliver_some(self, until_empty: bool) -> bool:
        """Deliver the next records. Return False at the end."""
        if self._attempts.is_stopped:
            return False
        before = self._reader.sequence
        try:
            records, missed = self._next(until_empty)
            self._deliver(records)
            self._lost += missed
            before = self._reader.sequence
            if before != self._reader.committed:
                self._reader.commit()
            return bool(records) or not until_empty
        except (LockTimeout, OSError) as error:  # it may pass
            self._reader.seek(before)
            self._pause(error)
        return True

    def _next(self, until_empty: bool) -> tuple[list[Record], int]:
        """Return the next records, at least one if any arrives within a moment, and the number of lost ones."""
        found: list[Record] = []
        size = missed = 0
        first = self._reader.follow(timeout=0 if until_empty else LOOK, limit=1, on_gap="yield")
        for item in chain(first, self._reader.read(limit=MOST_RECORDS, on_gap="yield")):
            if isinstance(item, Gap):
                missed += item.count
                logger.warning("%s: records lost before they could be sent: %s", self.path, item)
                continue
            found.append(item)
            size += len(item.value)
            if size >= MOST_BYTES:
                break
        return found, missed

    def _deliver(self, records: Sequence[Record]) -> None:
        by_signal: dict[bytes, list[Record]] = {signal: [] for signal in SIGNALS}
        for record in records:
            if words := why_unknown(record):
                self._reject([record], words)
            else:
                by_signal[record.key or b""].append(record)
        for signal, group in by_signal.items():
            if group:
                self._send(signal, group)

    def _send(self, signal: bytes, records: Sequence[Record]) -> None:
        """Send the requests of records as one; its halves if it is rejected."""
        try:
            answer = self._answer(signal, joined(records))
        except RequestRejected as error:
            if len(records) == 1:
                self._reject(records, str(error))
                return
            half = len(records) // 2
            self._send(signal, records[:half])
            self._send(signal, records[half:])
            return
        self._sent += len(records)
        if answer.message:
            self._warning = answer.message
            logger.warning("%s: %s says: %s", self.path, self.endpoint, answer.message)
        if answer.rejected:
            self._refused_items += answer.rejected
            self._reject(records, f"the collector rejected {answer.rejected:,} items of the request with this one: {answer.message}")

    def _answer(self, signal: bytes, body: bytes) -> CollectorAnswer:
        """Return the collector's answer, however long that takes. Raises RequestRejected."""
        while True:
            try:
                answer = self._collector.send(signal, body)
            except (CollectorAway, CollectorRefuses) as error:
                self._pause(error)
                continue
            self._attempts.succeed()
            self._collector.silence = max(self._silence, self._collector.silence / 2)
            self._requests += 1
            self._bytes += len(body)
            return answer

    def _reject(self, records: Sequence[Record], why: str) -> None:
        for record in records:
            self._rejected.append(record, why)
            self._refused += 1
        logger.warning("%s: records moved to the dead letters in %s: %d: %s", self.path, self._rejected.path, len(records), why)

    def _pause(self, error: Exception) -> None:
        """Wait before the next attempt. Raises _StoppedByUser."""
        if str(error) != self._attempts.error:
            logger.warning("%s: %s", self.path, error)
        self._attempts.fail(error)
        if isinstance(error, CollectorSilent):
            self._collector.silence = min(self._collector.silence * 2, LONGEST_SILENCE)
        pause = growing(self._attempts.failures, FIRST_PAUSE, LONGEST_PAUSE)
        self._attempts.wait(max(pause, min(getattr(error, "retry_after", None) or 0.0, LONGEST_RETRY_AFTER)))
        if self._attempts.is_stopped:
            raise _StoppedByUser

    def stop(self) -> None:
        """Make `run` return, once the collector has answered the request under way, or after `GRACE` seconds."""
        if not self._attempts.is_stopped:
            self._attempts.stop()
            timer = threading.Timer(GRACE, self._collector.abort)
            timer.daemon = True
            timer.start()

    def status(self) -> CollectorStatus:
        """Return the current state. Can be called by other threads."""
        return CollectorStatus(
            log=str(self.path),
            reader=self._reader.name,
            endpoint=str(self.endpoint),
            state=self._attempts.state,
            behind=max(0, self.log.end() - self._reader.committed) if not self.log.closed else 0,
            sent=self._sent,
            requests=self._requests,
            bytes=self._bytes,
            lost=self._lost,
            rejected=self._refused,
            rejected_items=self._refused_items,
            outages=self._attempts.outages,
            retry_in=self._attempts.retry_in,
            error=self._attempts.error,
            warning=self._warning,
        )

    def close(self) -> None:
        """Close the connection, the durable reader and the log."""
        close_all((self._collector, self._rejected, self._reader, self.log))


class _StoppedByUser(Exception):
    """`stop` was called during a wait."""
