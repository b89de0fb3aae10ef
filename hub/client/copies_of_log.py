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
from hub.protocol.reading import Generation, Ticket
from hub.root import columns
from hub.root.columns import SequencedBatch
from kvspool.record import Gap
from kvspool.system.handles import close_all

if TYPE_CHECKING:
    from collections.abc import Iterable

Degraded = Literal["wait", "continue"]
"""While a hub is away, shippers wait for its acknowledgement, or those of the connected hubs are enough."""

SURE = frozenset(("gap", "ends", "lacks"))  # answers that a hub doesn't have a record
TIMEOUT = 5.0  # seconds for a hub to answer; meanwhile the log that lacks records is not sent to another hub


class Sender(Protocol):
    """The sender of one log to one hub. acked: the hub has every sequence below it; shipped: it may have those below it."""

    index: int
    location: str
    id: bytes
    acked: int

    @property
    def shipped(self) -> int: ...


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
        acks: int,
        degraded: Degraded,
        security: Callable[[], Security],
        *,
        may_lose: bool = False,
    ) -> None:
        """locations: all hubs that may have the records. acks: hubs that have to store a record. may_lose: don't wait for records that only
        an unreachable hub may have.
        """
        self._client = client
        self._locations = list(locations)
        self._readers = {hubs.reader_name(location) for location in locations}
        self.acks = acks
        self._degraded = degraded
        self._security = security
        self._may_lose = may_lose
        self._members: Sequence[ReceivingHub] = ()

    def is_shared(self, reader: str) -> bool:
        """Return whether a durable reader is that of one of these hubs."""
        return reader in self._readers

    def begin(self, members: Sequence[ReceivingHub]) -> None:
        """Use these hubs, once all of their senders exist."""
        self._members = members

    def safe(self, index: int, log: bytes) -> int:
        """Return the sequence of a log below which enough hubs have stored every record. 0 without any hub that counts."""
        counted = [one for one in self._members if self._degraded == "wait" or one.is_connected]
        acked = sorted((sender.acked for one in counted for sender in _senders(one, index, log)), reverse=True)
        acked += [0] * (len(counted) - len(acked))  # a hub that is still sent another log
        return acked[min(self.acks, len(counted)) - 1] if counted else 0

    def reached(self, sender: Sender) -> int:
        """Return the sequence of a sender's log that the log may forget all before: its hub has them, or enough hubs have."""
        return max(sender.acked, self.safe(sender.index, sender.id))

    def records(self, sender: Sender, first: int, end: int) -> Iterator[SequencedBatch]:
        """Yield those of the records first..end-1 of a sender's log that another hub has, in order.

        Records that no hub can have are left out at once. Raises CopyUnreachable if a hub that doesn't answer may have the next one.
        """
        others = [one for member in self._members for one in _senders(member, sender.index, sender.id) if one is not sender]
        end = min(end, max((one.shipped for one in others), default=0))
        if first < end:
            yield from self._read(sender, [location for location in self._locations if location != sender.location], first, end)

    def _read(self, sender: Sender, locations: list[str], first: int, end: int) -> Iterator[SequencedBatch]:
        opened: list[OneHub] = []

        def copy(location: str) -> Copy:
            def connect() -> tuple[OneHub, bool]:
                opened.append(OneHub(location, self._security(), TIMEOUT, has_others=True))
                return opened[-1], True

            return Copy(location, Outage(location), connect)

        ticket = Ticket(self._client, sender.index, coded=True)
        table = (Generation(sender.id.hex(), 0),)  # so that sequences are those of the log
        reader = CopyReader(ticket, table, [copy(location) for location in locations], self._refuse)
        try:
            with suppress(_NoHubHasMore), closing(reader.read(first, end)) as items:
                for item in items:
                    if not isinstance(item, Gap):
                        yield SequencedBatch(item.first, item.batch.select(columns.SCHEMA.names))
        finally:
            close_all(opened)

    def _refuse(self, at: int, answers: Mapping[Copy, Answer]) -> None:
        """Raise CopyUnreachable if a hub that gave no answer may have a record, _NoHubHasMore otherwise."""
        unsure = [f"{copy.location}: {answer.why}" for copy, answer in answers.items() if answer.what not in SURE]
        if unsure and not self._may_lose:
            raise CopyUnreachable(
                f"the log no longer has sequence {at}, and a hub that can't be asked may have it ({'; '.join(unsure)}). The log waits for "
                "that hub. If it is lost for good, accept the loss: kvspool ship --accept-loss"
            )
        raise _NoHubHasMore


class _NoHubHasMore(Exception):
    """No hub has the next record, or a later one."""


def _senders(member: ReceivingHub, index: int, log: bytes) -> Iterable[Sender]:
    """Return the sender of a log to a hub, if that is sent this log now."""
    return [sender for sender in member.senders[index : index + 1] if sender.id == log]
