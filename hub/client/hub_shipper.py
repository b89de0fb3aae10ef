"""Ship to one hub: follow the logs of a client and send their records, exactly once, through outages of any length.

Each log has a sender with a durable reader; one call carries all senders. The shipper commits exactly the records that the hub has
acknowledged. After a crash or an outage the hub reports what it has stored, and the senders continue from there. Unacknowledged records
are still in the log, so they need no memory here: a sender reads them again.

**Batches.** Available records are sent at once, up to `batch_bytes` of each sender in turn. If fewer are available, the next ones are sent
`linger` seconds later, so that single records travel together. At most `window` bytes of all senders together, plus one batch, are sent
without an acknowledgement: each batch waits until fewer bytes are unacknowledged.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from hub.client import hubs
from hub.client.connection import LONGEST_BACKOFF, SILENCE, Channel, Connection, Security, backoff
from hub.client.copies_of_log import Copies
from hub.client.log_sender import ASK_AGAIN, LOOK_AGAIN, PATIENCE, LogSender
from hub.client.ship_status import SenderStatus, ShipStatus
from hub.client.sources import open_source
from hub.client_ids import check_client
from hub.errors import HubError, HubFull, NotAllowed, QuotaExceeded, ShardDamaged, Silent, Unexpected, Unreachable
from hub.protocol.ingest import BATCH_BYTES, VERSION, Opening, ShippedLog
from hub.root.columns import SequencedBatch
from kvspool import system
from kvspool.engine.wakeups import BLIND_POLL, POLL, Watcher
from kvspool.errors import KvspoolError
from kvspool.options import Isolation
from kvspool.system.attempts import Attempts
from kvspool.system.handles import ClosingHandle, Handle, close_all

LINGER = 0.002  # seconds
WINDOW = 8 << 20  # bytes
QUESTIONS = 4  # number of questions about stored records per window
MOST_ROWS = 16_384  # of a batch
COMMIT_INTERVAL = 0.1  # seconds between two commits of the durable readers
PING_INTERVAL = 5.0  # seconds without anything to send after which the hub is pinged
LONGEST_LOOK = 5.0  # seconds between two looks for deleted logs, after some seconds without records
IMPATIENT_POLL = 0.05  # seconds between two checks with `until_empty`
LONGEST_BLIND_POLL = 0.5  # seconds between two checks without inotify, after some seconds without records
MOST_PATIENCE = 64  # times `silence`: the longest wait for an answer over a slow network
BLIND_GROWTH = 1.1  # of these pauses: each is about a tenth of the time without records
logger = logging.getLogger("kvspool.ship")


class HubShipper(ClosingHandle):
    """Ships one log or one shard set to one hub as the client `client`. `run` ships in the calling thread until `stop` is called."""

    def __init__(
        self,
        source: str | os.PathLike[str],
        hub: str,
        *,
        client: str,
        security: Callable[[], Security],
        isolation: Isolation | None = None,
        linger: float = LINGER,
        batch_bytes: int = BATCH_BYTES,
        window: int = WINDOW,
        silence: float = SILENCE,
        copies: Copies | None = None,
    ) -> None:
        """Take the source's durable readers. Raises the errors of opening it, ReaderBusy if it is already being shipped, ValueError.

        hub: its location. copies: what the client's other hubs have, if there are any. The other arguments are those of `Shipper`.
        """
        self.client = check_client(client)
        self.hub = hubs.check(hub)
        self._security = security
        self.isolation = isolation
        self.linger = linger
        self.batch_bytes = batch_bytes
        self.window = window
        self._silence = silence
        self._channel = Channel(is_watched=copies is not None)  # another hub's acknowledgements may be enough
        logs = open_source(Path(os.path.abspath(source)), PATIENCE)
        self.senders: list[LogSender] = []
        try:
            for index, log in enumerate(logs):
                self.senders.append(LogSender(index, log, self.hub, copies))
        except BaseException:
            self.close()
            for log in logs[len(self.senders) :]:
                log.close()
            raise
        self._attempts = Attempts()
        self._bytes = 0

    # Running.

    def run(self, *, until_empty: bool = False) -> None:
        """Ship to the hub; see `Shipper.run`, which also sends the heartbeats of the durable readers."""
        with self._attempts.running():
            self._run(until_empty)

    def _run(self, until_empty: bool) -> None:
        failures, patience = 0, 1
        while not self._attempts.is_stopped:
            senders = self._live(until_empty)
            before = sum(sender.acked for sender in self.senders)
            try:
                if not senders:
                    self._attempts.wait(LOOK_AGAIN)
                    continue
                self._call(senders, until_empty, self._silence * patience)
                if until_empty:
                    break
            except HubError as error:
                if not isinstance(error, HubFull | QuotaExceeded):  # after these, the next call saves the handshake
                    self._channel.close()
                has_progressed = sum(sender.acked for sender in self.senders) > before
                failures = 1 if has_progressed else failures + 1
                if has_progressed or self._attempts.state == "connecting":
                    patience = max(1, patience // 2)
                elif isinstance(error, Silent):
                    patience = min(2 * patience, MOST_PATIENCE)
                self._attempts.wait(max(self._note(error, until_empty), backoff(failures)))
        errors = [sender.error for sender in self.senders if sender.error is not None]
        if until_empty and errors and not self._attempts.is_stopped:
            raise errors[0]

    def _call(self, senders: list[LogSender], until_empty: bool, silence: float) -> None:
        """Ship over one connection until it is finished or broken, or a quarantined sender may be retried."""
        self._attempts.state = "connecting"
        logs = []
        for sender in senders:
            with self.quarantining(sender):
                logs.append(ShippedLog(sender.index, sender.id, sender.log.end()))
        if not logs:
            return
        opening = Opening(VERSION, self.client, len(self.senders).bit_length() - 1, logs)
        security = self._security()
        with Connection(self.hub, security, opening, silence, self._channel.to(self.hub, security)) as connection:
            self._attempts.succeed()
            session = ShipSession(self, connection, {log.index for log in logs}, until_empty)
            try:
                session.run()
                connection.finish()
            finally:
                session.close()

    def stop(self) -> None:
        """Make `run` return."""
        self._attempts.stop()

    @property
    def is_connected(self) -> bool:
        """Return whether the hub accepts records now."""
        return self._attempts.state == "connected"

    @property
    def is_stopping(self) -> bool:
        """Return whether `stop` was called."""
        return self._attempts.is_stopped

    def _live(self, until_empty: bool) -> list[LogSender]:
        """Return the senders that can be shipped now. Raises the error of the first one if no sender can be shipped, now or later."""
        self.is_any_due()
        senders = [sender for sender in self.senders if sender.error is None]
        if not senders and (until_empty or all(sender.retry_at is None for sender in self.senders)):
            error = self.senders[0].error
            assert error is not None
            raise error
        return senders

    def is_any_due(self) -> bool:
        """Return whether a quarantined sender is due for a retry."""
        return any([self._is_due(sender) for sender in self.senders if sender.retry_at is not None])

    def _is_due(self, sender: LogSender) -> bool:
        with self.quarantining(sender):
            return sender.is_due()
        return False

    @contextmanager
    def quarantining(self, sender: LogSender) -> Iterator[None]:
        """Quarantine a sender if its own log, or its shard at the hub, raises an error; errors that concern all senders are raised."""
        try:
            yield
        except (HubFull, QuotaExceeded, Unexpected, Unreachable, NotAllowed):
            raise
        except (KvspoolError, OSError) as error:
            self.quarantine(sender, error)

    def quarantine(self, sender: LogSender, error: Exception) -> None:
        """Stop sending a log after an error, for a while or for good."""
        sender.fail(error)
        logger.error("shard %d of %s is quarantined %s: %s", sender.index, self.client, sender.until, sender.error)

    def _note(self, error: HubError, until_empty: bool) -> float:
        """Note why a connection ended. Return the shortest time to wait, in seconds. Raises the error if a retry is useless."""
        if self._attempts.error != str(error):  # otherwise it was reported at the last attempt
            logger.warning("%s", error)
        self._attempts.fail(error)
        if isinstance(error, HubFull | QuotaExceeded):
            return error.retry_after or LONGEST_BACKOFF
        if isinstance(error, ShardDamaged) and not until_empty:
            return ASK_AGAIN  # the hub failed as a whole, and its own log has the reason; it may be repaired
        if not isinstance(error, Unreachable | NotAllowed | Unexpected):
            raise error
        return 0.0

    def keep_alive(self) -> None:
        """Send a heartbeat of each durable reader; see `LogSender.keep_alive`."""
        for sender in self.senders:
            sender.keep_alive()

    def counted(self, size: int) -> None:
        """Count a sent batch."""
        self._bytes += size

    # Maintenance.

    def status(self) -> ShipStatus:
        """Return the shipper's current state. Can be called by other threads."""
        senders = [
            SenderStatus(sender.index, str(sender.path), sender.records, sender.acked, sender.behind, sender.lost, str(sender.error or ""))
            for sender in self.senders
        ]
        return ShipStatus(
            client=self.client,
            hub=self.hub,
            state=self._attempts.state,
            behind=sum(sender.behind for sender in senders),
            sent=sum(sender.sent for sender in senders),
            bytes=self._bytes,
            lost=sum(sender.lost for sender in senders),
            outages=self._attempts.outages,
            retry_in=self._attempts.retry_in,
            error=self._attempts.error,
            lanes=senders,
        )

    def close(self) -> None:
        """Close the connection, the durable readers and the logs."""
        close_all([self._channel, *self.senders])


@contextmanager
def pulse(shippers: Sequence[HubShipper], interval: float | None = None) -> Iterator[None]:
    """Send heartbeats of the durable readers inside the `with` block, so that a hub that hangs doesn't cost them their held records.

    interval: seconds between two looks whether one is due; None: that of the most urgent heartbeats.
    """
    has_ended = threading.Event()

    def send() -> None:
        while not has_ended.wait(interval or min(sender.heartbeat for one in shippers for sender in one.senders)):
            for one in shippers:
                one.keep_alive()

    thread = threading.Thread(target=send, name="kvspool pulse", daemon=True)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()


class ShipSession(Handle):
    """One connection of a shipper, from its opening until it is stopped or broken."""

    def __init__(self, shipper: HubShipper, connection: Connection, indexes: set[int], until_empty: bool) -> None:
        """Start the senders where the hub says."""
        opened = connection.opened
        self._shipper = shipper
        self._connection = connection
        self._until_empty = until_empty
        self._isolation: Isolation = shipper.isolation or ("synced" if opened.level == "disk" else "appended")
        self._largest = opened.batch_bytes
        self._batch_bytes = min(shipper.batch_bytes, self._largest)
        self._senders: list[LogSender] = []
        # Bytes that one question covers while more records are available: never more than a window, which waits for an answer.
        self._question = min(shipper.window, max(self._batch_bytes, shipper.window // QUESTIONS))
        # The next batch to send: it asks for an acknowledgement if it is the last one for now.
        self._unsent: tuple[LogSender, SequencedBatch] | None = None
        self._unanswered: deque[int] = deque()  # bytes covered by each unanswered question
        self._unasked = 0
        self._sent_at = 0.0
        self._was_idle = False
        self._committed = self._pinged = self._looked = system.port.monotonic()
        self._looks_at = POLL  # seconds between two looks for deleted logs
        self._must_end = False  # a quarantined sender takes another call
        self._reads_all = True  # in the next round, also logs that seem to have no more
        for place in opened.places:
            sender = shipper.senders[place.index]
            with shipper.quarantining(sender):
                sender.open(place, self._isolation)
                self._senders.append(sender)
        self._to_refuse = indexes - {place.index for place in opened.places}  # the hub has yet to report why they have no place
        self._waiter = _Waiter()

    def run(self) -> None:
        """Send new records, and note stored ones. Raises the error that broke the connection."""
        while self._to_refuse:
            self._hear()
        while self._senders and not self._shipper.is_stopping and not self._is_time_for_others():
            size, has_more = self._round()
            if not has_more and self._unanswered:
                self._hear()
            else:
                self._commit_now_and_then()
            if not has_more:
                if not size and self._is_finished():
                    return
                self._rest(is_idle=not size and not self._unanswered)

    def close(self) -> None:
        """Close the read-ahead, and commit acknowledged records."""
        with suppress(HubError):
            self._take_answers()
        self._waiter.close()
        for sender in self._senders:
            sender.close_cursor()
            with self._shipper.quarantining(sender):
                sender.commit()

    def _round(self) -> tuple[int, bool]:
        """Send a batch of each sender that has one. Return their bytes, and whether more is probably available because a batch was full.

        If no more is available, the last batch asks for an acknowledgement of all.
        """
        size, has_more = 0, False
        reads_all, self._reads_all = self._reads_all, False
        for sender in self._senders:
            if sender.error is not None or (sender.is_sent and not reads_all):
                continue  # the error is one since the round began
            rows = None
            with self._shipper.quarantining(sender):
                if self._isolation == "synced":
                    sender.sync()
                rows = sender.next_rows(MOST_ROWS, self._batch_bytes)
            if rows is not None:
                size += rows.size
                has_more = has_more or rows.batch.num_rows == MOST_ROWS or rows.size > self._batch_bytes // 2
                self._send_unsent(is_last=False)
                self._unsent = sender, rows
        self._send_unsent(is_last=not has_more)
        if not has_more and self._unasked:
            self._ask()  # the end of a backlog was not recognised as such, or the last sender was quarantined
        self._drop_failed()
        return size, has_more

    def _send_unsent(self, *, is_last: bool) -> None:
        """Send the unsent batch. It asks for an acknowledgement if it is the last for now, or after enough bytes without a question."""
        if self._unsent is None:
            return
        (sender, rows), self._unsent = self._unsent, None
        self._make_room()
        if sender.error is not None:
            return  # the hub has refused it in the meantime
        size = rows.size
        ask = is_last or self._unasked + size >= self._question
        put = None
        with self._shipper.quarantining(sender):
            put = sender.put(rows, ask, self._largest)
        if put is None:
            return
        self._unasked += size
        if ask:
            self._note_question()
        self._sent_at = system.port.monotonic()
        self._looks_at = POLL
        self._connection.put(put, rows.batch)
        self._shipper.counted(size)

    def _make_room(self) -> None:
        """Wait until less than a window is unacknowledged."""
        while self._unanswered and sum(self._unanswered) + self._unasked >= self._shipper.window:
            self._hear()

    def _ask(self) -> None:
        """Ask for an acknowledgement, and report the ends of the logs."""
        self._note_question()
        self._connection.ping({sender.index: sender.sent + sender.behind for sender in self._senders})

    def _note_question(self) -> None:
        self._unanswered.append(self._unasked)
        self._unasked = 0
        self._pinged = system.port.monotonic()

    def _hear(self) -> None:
        """Wait for a message of the hub, and act on it."""
        self._connection.hear()
        self._take_answers()
        self._commit_now_and_then()

    def _take_answers(self) -> None:
        """Note the hub's acknowledgements and refusals."""
        connection = self._connection
        while len(self._unanswered) > connection.asked - connection.answered:
            self._unanswered.popleft()
        for sender in self._senders:
            sender.acknowledge(connection.stored.pop(sender.index, 0))
        while connection.refused:
            index, error = connection.refused.popitem()
            self._to_refuse.discard(index)
            self._refused(self._shipper.senders[index], error)
        self._drop_failed()

    def _refused(self, sender: LogSender, error: HubError) -> None:
        """Quarantine a sender whose shard was refused. Raises a transient refusal if no other log is being sent, or has to be complete."""
        if sender.error is not None:
            return
        others = any(one is not sender and one.error is None for one in self._senders)
        if isinstance(error, HubFull | QuotaExceeded) and others and not self._until_empty:
            self._shipper.quarantine(sender, error)
            return
        with self._shipper.quarantining(sender):
            raise error

    def _commit_now_and_then(self) -> None:
        now = system.port.monotonic()
        if now >= self._committed + COMMIT_INTERVAL:
            self._committed = now
            for sender in self._senders:
                with self._shipper.quarantining(sender):
                    sender.commit()
            self._drop_failed()

    def _drop_failed(self) -> None:
        self._senders = [sender for sender in self._senders if sender.error is None]

    def _is_time_for_others(self) -> bool:
        """Return whether a quarantined sender is due for a retry, which takes another call."""
        self._must_end = self._must_end or (not self._until_empty and self._shipper.is_any_due())
        return self._must_end

    def _is_finished(self) -> bool:
        """Return whether all records are acknowledged, with `until_empty`."""
        return self._until_empty and not self._unanswered and all(sender.is_sent for sender in self._senders)

    def _rest(self, *, is_idle: bool) -> None:
        """Wait until more records arrive; after records, briefly for those that follow them."""
        if not is_idle:
            self._was_idle = False
            self._pause(self._sent_at + self._shipper.linger - system.port.monotonic())
            return
        if self._was_idle:  # it may be woken for nothing, again and again
            self._pause(self._shipper.linger)
        now = system.port.monotonic()
        if now >= self._pinged + PING_INTERVAL:
            self._ask()
        if now >= self._looked + self._looks_at:
            self._looked, self._looks_at = now, min(2 * self._looks_at, LONGEST_LOOK)
            self._look_for_vanished()
        timeout = IMPATIENT_POLL if self._until_empty else POLL
        if self._was_idle and not self._until_empty:  # what was acknowledged is committed
            timeout = max(timeout, min(self._pinged + PING_INTERVAL, self._looked + self._looks_at) - now)
        self._was_idle = True
        self._waiter.sleep(self._senders, timeout, lambda: self._shipper.is_stopping or self._is_time_for_others())

    @staticmethod
    def _pause(seconds: float) -> None:
        if seconds > 0:
            system.port.sleep(seconds)

    def _look_for_vanished(self) -> None:
        """Look for deleted logs. A journal's cursor that has found nothing then also looks for later segments, after a repair."""
        self._reads_all = not all(sender.log.always_has_id for sender in self._senders)
        for sender in self._senders:
            with self._shipper.quarantining(sender):
                sender.refuse_vanished()
        self._drop_failed()


class _Waiter(Handle):
    """Waits until one of several logs has more: with one inotify descriptor for all."""

    def __init__(self) -> None:
        self._watcher = Watcher()
        self._watched: dict[int, object] = {}
        self._pause = BLIND_POLL  # seconds until the next check without inotify

    def sleep(self, senders: list[LogSender], timeout: float, is_over: Callable[[], bool]) -> None:
        """Wait up to `timeout` seconds; may return early, or without new records. is_over: asked now and then, ends the wait."""
        is_rung = True
        for sender in senders:
            cursor = sender.cursor
            assert cursor is not None
            if sender.index not in self._watched or self._watched[sender.index] != cursor.files:
                self._watched[sender.index] = cursor.files
                with suppress(OSError):  # it is being deleted
                    cursor.watch(self._watcher, sender.index)
                timeout = 0  # earlier events are not reported
            cursor.ask()
            is_rung = is_rung and cursor.is_rung
        if timeout and any(not sender.is_sent for sender in senders):
            self._pause = BLIND_POLL
            return
        if is_rung and not self._watcher.is_blind:
            self._wait_for_events(senders, timeout, is_over)
        else:
            self._wait_for_work(senders, timeout, is_over)

    def _wait_for_events(self, senders: list[LogSender], timeout: float, is_over: Callable[[], bool]) -> None:
        """Wait for an event. One may be lost if a writer is killed, so the ends are checked now and then."""
        until = system.port.monotonic() + timeout
        while not self._watcher.wait(min(timeout, POLL)):
            timeout = until - system.port.monotonic()
            if timeout <= 0 or self._watcher.is_blind or is_over() or not all(sender.is_sent for sender in senders):
                return

    def _wait_for_work(self, senders: list[LogSender], timeout: float, is_over: Callable[[], bool]) -> None:
        """Wait without inotify, because the system has no watch left: check only the ends, less often the longer there are no records.

        A process with many shippers would use up a processor by checking everything every few milliseconds.
        """
        left = timeout
        while left > 0 and not is_over() and all(sender.is_sent for sender in senders):
            system.port.sleep(min(left, self._pause))
            left -= self._pause
            self._pause = min(BLIND_GROWTH * self._pause, LONGEST_BLIND_POLL)

    def close(self) -> None:
        self._watcher.close()
