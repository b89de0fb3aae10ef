"""The copies of a client's logs at its hubs: when enough hubs have stored a record, and records that only hubs still have."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Literal, Protocol

from hub.client import hubs
from hub.client.connection import Security
from hub.client.copies import Answer, Copy, CopyReader
from hub.client.one_hub import OneHub
from hub.client.outage import Outage
from hub.errors import CopyUnreachable
from hub.protocol.ingest import LAST
from hub.protocol.reading import Generation, Ticket
from hub.root import columns
from hub.root.columns import SequencedBatch
from kvspool import system
from kvspool.record import Gap
from kvspool.system.handles import close_all

if TYPE_CHECKING:
    from collections.abc import Iterable

Degraded = Literal["wait", "continue"]
"""While a hub is away, shippers wait for its acknowledgement, or those of the connected hubs are enough."""

SURE = frozenset(("gap", "ends", "lacks"))  # answers that a hub doesn't have a record
LOOK = 0.02  # seconds between two questions for a record that is on its way
TIMEOUT = 5.0  # seconds for a hub to answer; meanwhile the log that lacks records is not sent to another hub


class Sender(Protocol):
    """The sender of one log to one hub. acked: the hub has every sequence below it; shipped: it may have those below it, or get them.

    coming: those below it may be on their way. is_quiet: nothing is on its way to the hub. error: why the log is not sent now.
    """

    index: int
    location: str
    id: bytes
    acked: int
    error: Exception | None

    @property
    def shipped(self) -> int: ...

    @property
    def coming(self) -> int: ...

    @property
    def is_quiet(self) -> bool: ...


class ReceivingHub(Protocol):
    """A hub of the client."""

    @property
    def senders(self) -> Sequence[Sender]: ...

    @property
    def is_connected(self) -> bool: ...


class Copies:
    """The hubs of one client. Shared by the threads of all of them."""

    def __init__(
        self,
        client: str,
        locations: Sequence[str],
        chosen: Sequence[str],
        acks: int,
        degraded: Degraded,
        security: Callable[[], Security],
        *,
        may_lose: bool = False,
    ) -> None:
        """locations: all hubs that may have the records. chosen: those that get a copy. acks: hubs that have to store a record. may_lose:
        don't wait for records that only an unreachable hub may have.
        """
        self._client = client
        self._locations = list(locations)
        self._readers = {hubs.reader_name(location) for location in chosen}
        self.acks = acks
        self._degraded = degraded
        self._security = security
        self._may_lose = may_lose
        self._members: Sequence[ReceivingHub] = ()

    def is_shared(self, reader: str) -> bool:
        """Return whether a durable reader is that of one of the chosen hubs."""
        return reader in self._readers

    def begin(self, members: Sequence[ReceivingHub]) -> None:
        """Use these hubs, once all of their senders exist."""
        self._members = members

    def safe(self, index: int, log: bytes) -> int:
        """Return the sequence of a log below which enough hubs have stored every record. 0 without any hub that counts."""
        counted = [list(_senders(one, index, log)) for one in self._members if self._counts(one, index)]
        acked = sorted((sender.acked for senders in counted for sender in senders), reverse=True)
        acked += [0] * (len(counted) - len(acked))  # a hub that is still sent another log
        return acked[min(self.acks, len(counted)) - 1] if counted else 0

    def _counts(self, member: ReceivingHub, index: int) -> bool:
        """Return whether a hub's acknowledgement of a log is waited for. With "continue": only while it is sent there."""
        if self._degraded == "wait":
            return True
        return member.is_connected and all(sender.error is None for sender in member.senders[index : index + 1])

    def reached(self, sender: Sender) -> int:
        """Return the sequence of a sender's log that the log may forget all before: its hub has them, or enough hubs have."""
        return max(sender.acked, self.safe(sender.index, sender.id))

    def records(self, sender: Sender, first: int, end: int) -> Iterator[SequencedBatch]:
        """Yield those of the records first..end-1 of a sender's log that another hub has, in order.

        Records that no hub can have are left out at once. Raises CopyUnreachable if a hub that doesn't answer may have the next one, or if
        that doesn't arrive at a hub that is being sent it.
        """
        end = min(end, max([sender.shipped, *self._shipped(sender)]))
        locations = [location for location in self._locations if location != sender.location]
        while first < end and locations:
            away: set[str] = set()
            for item in self._read(sender, locations, first, end, away):
                first = item.end
                yield item
            if not away:
                return
            locations = [location for location in locations if location not in away]  # their records count as lost

    def _shipped(self, sender: Sender) -> list[int]:
        """Return the sequence below which each other hub may have records; all, if it is not known to be sent this log."""
        found = []
        for member in self._members:
            senders = list(_senders(member, sender.index, sender.id))
            if sender not in senders:
                found += [one.shipped for one in senders] or [LAST]
        return found

    def _read(self, sender: Sender, locations: list[str], first: int, end: int, away: set[str]) -> Iterator[SequencedBatch]:
        """Yield records of other hubs, up to the first one that none has; with `may_lose`, name hubs that don't answer in `away`."""
        opened: list[OneHub] = []

        def copy(location: str) -> Copy:
            def connect() -> tuple[OneHub, bool]:
                opened.append(OneHub(location, self._security(), TIMEOUT, has_others=True))
                return opened[-1], True

            return Copy(location, Outage(location), connect)

        copies = [copy(location) for location in locations]
        ticket = Ticket(self._client, sender.index, coded=True)
        table = (Generation(sender.id.hex(), 0),)  # so that sequences are those of the log
        until = system.port.monotonic() + TIMEOUT

        def wait(at: int, answers: Mapping[Copy, Answer]) -> None:
            unsure = {copy.location: answer.why for copy, answer in answers.items() if answer.what not in SURE}
            ends = {copy.location for copy, answer in answers.items() if answer.what == "ends"}
            if not unsure and (self._is_coming(sender, at) or self._is_stored(sender, at, ends)):
                self._pause(at, until)
                return
            away.update(unsure)
            if unsure and not self._may_lose:
                raise CopyUnreachable(
                    f"the log no longer has sequence {at}, and a hub that can't be asked may have it "
                    f"({'; '.join(f'{location}: {why}' for location, why in unsure.items())}). "
                    "The log waits for that hub. If it is lost for good, accept the loss: kvspool ship --accept-loss"
                )
            raise _NoHubHasMore

        try:
            with suppress(_NoHubHasMore):
                while first < end:
                    with closing(CopyReader(ticket, table, copies, wait).read(first, end)) as items:
                        for item in items:
                            if not isinstance(item, Gap):
                                first = item.end
                                yield SequencedBatch(item.first, item.batch.select(columns.SCHEMA.names))
                                until = system.port.monotonic() + TIMEOUT
                            elif self._is_coming(sender, item.first, item.last):
                                break
                            else:
                                first = item.last + 1
                    if first < end:
                        self._pause(first, until)
        finally:
            close_all(opened)

    def _is_coming(self, sender: Sender, first: int, last: int | None = None) -> bool:
        """Return whether another hub is being sent one of the records first..last, and may not have it yet; last None: only `first`."""
        others = [one for member in self._members for one in _senders(member, sender.index, sender.id) if one is not sender]
        return any(not one.is_quiet and one.coming > first and one.acked <= (first if last is None else last) for one in others)

    def _is_stored(self, sender: Sender, at: int, ends: set[str]) -> bool:
        """Return whether one of the hubs that end before a record has acknowledged it since: then the answer is outdated."""
        others = [one for member in self._members for one in _senders(member, sender.index, sender.id) if one is not sender]
        return any(one.location in ends and one.error is None and one.acked > at for one in others)

    def _pause(self, at: int, until: float) -> None:
        """Wait for a record that is being sent to another hub. Raises CopyUnreachable after `until`."""
        if system.port.monotonic() > until:
            raise CopyUnreachable(f"the log no longer has sequence {at}, which is on its way to another hub; it is asked for again later")
        system.port.sleep(LOOK)


class _NoHubHasMore(Exception):
    """No hub has the next record, or a later one."""


def _senders(member: ReceivingHub, index: int, log: bytes) -> Iterable[Sender]:
    """Return the sender of a log to a hub, if that is sent this log now."""
    return [sender for sender in member.senders[index : index + 1] if sender.id == log]
