"""Read a range of a shard from any hub that has it, and go over to another one during a stream.

The sequences are those of a `timeline`. Each is returned once: in a batch, or in a Gap that every hub has confirmed. A hub that is away may
have the records, so nothing is a Gap until it answers; the caller decides how long to wait.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import msgspec

from hub.client import timeline
from hub.client.outage import LATER, Outage
from hub.client.timeline import Span, Table
from hub.errors import Fenced, HubError, Malformed, NotAllowed, NotFound, ShardDamaged, Unexpected, Unreachable
from hub.protocol import reading
from hub.protocol.ingest import LAST
from hub.protocol.reading import ShardState, Ticket
from kvspool.record import Gap

if TYPE_CHECKING:
    from hub.root.columns import SequencedBatch

LEFT_OUT = ("machine restart", "missing")  # reasons of Gaps that may never have had a record in the log
What = Literal["gap", "ends", "lacks", "error", "away"]


class HubLink(Protocol):
    """A connection to a hub, or to its files."""

    def shards(self, client: str) -> list[ShardState]:
        """Return a client's shards; see `RemoteHub.shards`."""

    def items(self, ticket: Ticket, timeout: float | None = None) -> Generator[SequencedBatch | Gap | int]:
        """Yield the result of a ticket; see `RemoteHub.items`."""


class Answer(NamedTuple):
    """The answer of a hub that does not send a record.

    what: "gap", the records before `until` are lost there; "ends", it has no later ones yet; "lacks", it doesn't have the log; "error";
    "away", no answer. reason: of a Gap.
    """

    what: What
    why: str
    until: int = LAST
    reason: str = ""
    error: HubError | None = None


class Copy:
    """A shard at one hub, as one reader sees it. state: None: not known yet. timeout: of a stream, in seconds."""

    def __init__(
        self,
        location: str,
        outage: Outage,
        connect: Callable[[], tuple[HubLink, bool]],
        disconnect: Callable[[], object] = lambda: None,
        state: ShardState | None = None,
        timeout: float | None = None,
    ) -> None:
        """connect: returns the connection, and whether it is new; disconnect: called after an error of it."""
        self.location = location
        self.outage = outage
        self.connect = connect
        self.disconnect = disconnect
        self.state = None if state is None or state.error else state
        self.timeout = timeout

    def ask(self, link: HubLink, client: str, shard: int) -> ShardState:
        """Return the state of the shard at the hub; asked once. Raises NotFound, ShardDamaged."""
        if self.state is None:
            found = [state for state in link.shards(client) if (state.client, state.shard) == (client, shard)]
            if not found:
                raise NotFound(f"client {client} has no shard {shard} here")
            if found[0].error:
                raise ShardDamaged(f"the hub can't read the shard: {found[0].error}")
            self.state = reading.check_state(found[0])
        return self.state


Wait = Callable[[int, Mapping[Copy, Answer]], object]


class CopyReader:
    """Reads one shard from several hubs. Use it in one thread. ended_at: the sequence at which a ticket's `end_time` ended it."""

    def __init__(self, ticket: Ticket, table: Table, copies: Sequence[Copy], wait: Wait) -> None:
        """ticket: client, shard, columns, isolation, `coded` and `end_time`. table: the timeline. copies: the preferred one first.

        wait: called when no hub sends a record and not every hub confirms a Gap, with the sequence and the hubs' answers. It returns after
        some time, to ask again, or raises an error.
        """
        self._ticket = ticket
        self._table = table
        self._copies = copies
        self._wait = wait
        self._where = f"{', '.join(copy.location for copy in copies)}/{ticket.client}/{ticket.shard}"
        self._current: Copy | None = None
        self._answers: dict[Copy, tuple[int, Answer]] = {}  # with the sequence of the question
        self._renewed: set[tuple[Copy, str]] = set()  # what was tried again, since the last record
        self.ended_at: int | None = None

    def read(self, first: int, end: int, limit: int | None = None) -> Generator[SequencedBatch | Gap]:
        """Yield the records first..end-1 of the timeline, at most `limit`, and Gaps. Raises the errors of `wait`."""
        at = first
        while at < end and (limit is None or limit > 0) and self.ended_at is None:
            copy = self._choice(at)
            if copy is not None:
                for item in self._try(copy, at, end, limit):
                    if isinstance(item, Gap):
                        at = item.last + 1
                    else:
                        at = item.end
                        limit = None if limit is None else limit - item.batch.num_rows
                    yield item
            elif (gap := self._gap(at, end)) is not None:
                yield gap
                at = gap.last + 1
            else:
                self._wait(at, {copy: answer for copy, (_, answer) in self._answers.items()})
                self._answers = {copy: one for copy, one in self._answers.items() if one[1].what == "gap"}
                self._renewed.clear()

    def _answer(self, copy: Copy, at: int) -> Answer | None:
        """Return what a hub has answered for a sequence, if it was asked."""
        asked, answer = self._answers.get(copy, (-1, None))
        is_valid = answer is not None and (asked == at or (answer.what == "gap" and asked <= at < answer.until))
        return answer if is_valid else None

    def _choice(self, at: int) -> Copy | None:
        """Return the hub to ask next: the current one, then those that are known to have the sequence; hubs that are away come last."""
        unasked = [copy for copy in self._copies if self._answer(copy, at) is None]
        return min(unasked, key=lambda copy: (copy.outage.is_away, copy is not self._current, not self._may_have(copy, at)), default=None)

    def _may_have(self, copy: Copy, at: int) -> bool:
        if copy.state is None:
            return False
        first, end = timeline.extent(self._table, copy.state)
        return first <= at < end

    def _gap(self, at: int, end: int) -> Gap | None:
        """Return the Gap that all hubs confirm; None if one of them may have the record."""
        gaps = []
        for copy in self._copies:
            answer = self._answer(copy, at)
            if answer is not None and answer.what == "away" and copy.state is not None:
                first = timeline.extent(self._table, copy.state)[0]
                if at < first:  # trimmed records don't come back
                    answer = Answer("gap", answer.why, first, "trimmed")
            if answer is None or answer.what in ("error", "away"):
                return None
            if answer.what == "gap":
                gaps.append(answer)
        if not gaps:
            return None
        lost = [answer.reason for answer in gaps if answer.reason not in LEFT_OUT]
        return Gap(at, min(end, *(answer.until for answer in gaps)) - 1, lost[0] if lost else gaps[0].reason, self._where)

    # One hub.

    def _try(self, copy: Copy, at: int, end: int, limit: int | None) -> Generator[SequencedBatch | Gap]:
        """Yield what a hub has from a sequence on, up to a record that it lacks; note its answer for that."""
        began, is_new = at, True
        self._current = copy
        copy.outage.begin()
        try:
            link, is_new = copy.connect()
            state = copy.ask(link, self._ticket.client, self._ticket.shard)
            places = timeline.spans(self._table, state.generations)
            place = timeline.span_at(places, at)
            if place is None:
                copy.outage.succeeded()
                self._answers[copy] = at, _lacking(state, places, at)
                return
            stop = min(end, place.end)
            with closing(link.items(self._asked(place, at, stop, limit), copy.timeout)) as items:
                for item in items:
                    copy.outage.succeeded()
                    if isinstance(item, int):
                        self._check_end(item - place.shift, at, stop, copy)
                        if at < stop and not self._is_over(link, place, at, limit, copy):
                            self._answers[copy] = at, Answer("ends", f"it ends at sequence {at}")
                        return
                    found = self._checked(item, place, at, stop, copy)
                    if isinstance(found, Gap):
                        self._answers[copy] = at, Answer("gap", str(found), found.last + 1, found.reason)
                        gap = self._gap(at, stop) if self._choice(at) is None else None
                        if gap is None:
                            return  # another hub may have these records
                        at = gap.last + 1
                        yield gap
                        if at <= found.last:
                            return
                    else:
                        at = found.end
                        limit = None if limit is None else limit - found.batch.num_rows
                        self._renewed.clear()
                        yield found
                    copy.outage.begin()  # the reader may have taken its time
        except (Fenced, NotFound) as error:
            copy.outage.succeeded()
            copy.state = None
            if self._is_repeated(copy, "log"):
                self._answers[copy] = at, Answer("lacks", str(error))
        except Unexpected as error:
            copy.outage.succeeded()
            self._answers[copy] = at, Answer("ends", str(error))
        except LATER as error:
            copy.outage.note(error)
            copy.disconnect()
            if at == began:
                self._answers[copy] = at, Answer("away", copy.outage.why, error=error)
        except NotAllowed as error:
            copy.disconnect()  # the token may have changed
            if is_new or self._is_repeated(copy, "token"):
                self._answers[copy] = at, Answer("error", str(error), error=error)
        except HubError as error:
            self._answers[copy] = at, Answer("error", str(error), error=error)

    def _is_repeated(self, copy: Copy, what: str) -> bool:
        """Return whether something was tried again since the last record; from now on it was."""
        was = (copy, what) in self._renewed
        self._renewed.add((copy, what))
        return was

    def _asked(self, place: Span, at: int, stop: int, limit: int | None) -> Ticket:
        """Return the ticket for a part of one log at a hub."""
        end = None if stop + place.shift >= LAST else stop + place.shift
        return msgspec.structs.replace(
            self._ticket,
            start=at + place.shift,
            end=end,
            limit=limit,
            generation=place.generation,
            log="" if place.log else self._ticket.log,
            start_time=None,
        )

    def _check_end(self, ended: int, at: int, stop: int, copy: Copy) -> None:
        if ended > at and at != stop:  # the hub may have stopped after the end, in a Gap
            raise self._malformed(copy, at)

    def _checked(self, item: SequencedBatch | Gap, place: Span, at: int, stop: int, copy: Copy) -> SequencedBatch | Gap:
        """Return an item with the timeline's sequences. Raises Malformed if it is not the next one."""
        if isinstance(item, Gap):
            gap = Gap(item.first - place.shift, item.last - place.shift, item.reason, item.path)
            if gap.first != at or gap.last >= stop:
                raise self._malformed(copy, at)
            return gap
        rows = _shifted(item, place.shift)
        if rows.first != at or rows.end > stop:
            raise self._malformed(copy, at)
        return rows

    def _malformed(self, copy: Copy, at: int) -> Malformed:
        where = f"{copy.location}/{self._ticket.client}/{self._ticket.shard}"
        return Malformed(f"[KVSPOOL_DATA_LOSS] {where}: sequence {at} is missing in the hub's answer")

    def _is_over(self, link: HubLink, place: Span, at: int, limit: int | None, copy: Copy) -> bool:
        """Return whether a stream ended before the hub's end, because of a limit or of the time of the next record."""
        if limit == 0:
            return True
        last = self._ticket.last_time
        if last is None:
            return False
        plain = msgspec.structs.replace(self._asked(place, at, LAST, 1), end_time=None, columns=["timestamp"], coded=False)
        with closing(link.items(plain, copy.timeout)) as items:
            item = next(items, 0)
        if isinstance(item, int | Gap) or item.batch.column("timestamp").cast("int64")[0].as_py() < last:
            return False
        self.ended_at = at
        return True


def _lacking(state: ShardState, places: list[Span], at: int) -> Answer:
    """Return what the table of a hub says about a sequence that has no place there."""
    later = next((place.first for place in places if place.first > at), None)
    if later is not None:
        return Answer("gap", f"it has the shard from sequence {later} on", later, "trimmed")
    if state.generations and not places:
        return Answer("lacks", f"another log has replaced it: {state.generations[0].log[:8]}")
    return Answer("ends", "it does not have the log of this sequence yet")


def _shifted(rows: SequencedBatch, shift: int) -> SequencedBatch:
    """Return records with other sequences: those at the hub, minus `shift`."""
    if not shift:
        return rows
    import pyarrow.compute as pc

    from hub.root.columns import SequencedBatch

    batch = rows.batch
    if "sequence" in batch.schema.names:
        index = batch.schema.get_field_index("sequence")
        batch = batch.set_column(index, batch.schema.field(index), pc.subtract(batch.column(index), shift))
    return SequencedBatch(rows.first - shift, batch)


def no_hub_has(client: str, shard: int, at: int, answers: Mapping[Copy, Answer]) -> HubError:
    """Return the error of a record that no hub sends, with the reason of each."""
    reasons = "; ".join(f"{copy.location}: {answer.why}" for copy, answer in answers.items())
    words = f"client {client}, shard {shard}: no hub has sequence {at}: {reasons}"
    if any(answer.what == "away" for answer in answers.values()):
        return Unreachable(words)
    for answer in answers.values():
        if answer.error is not None:
            return type(answer.error)(words)
    return Unexpected(words, at)
