"""A process killed at every opcode of its work on a journal: acknowledged records are there, once, in order; the next process continues.

Each operation runs once, traced, and every state that a kill could leave is restored, opened and checked; see `crash_states`. A kill during
one `pwrite` leaves a beginning of the bytes to write: every length of it is a state, too. Of those, and of the ways to tear a
change, it takes some, the shortest and the longest among them; KVSPOOL_ALL_SCHEDULES=1 takes all lengths and many more ways.

Appends are the operations whose loops have twins. They run on both, and take the most on the interpreted twin, where more states are
between two opcodes. The other operations run once.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from crash_states import Copy, File, Run, Said, State, Stepped, Unsteppable
from loops import IS_SECOND_RUN
from schedules import ALL

import kvspool
from kvspool import Gap, system
from kvspool.errors import KvspoolError, LogNotFound, NoSuchReader, NotALog, Truncated
from kvspool.journal import Journal
from kvspool.journal.format import Before
from kvspool.kernel.frames import TWIN

FORMATS: dict[str, dict[str, Any]] = {
    "sej": {"segment_bytes": 200},
    "fflg": {"segment_bytes": 10_000, "keep_consumed": 1},
    "kvj": {"segment_bytes": 200},
    "fixed": {"item_bytes": 32, "items_per_blob": 4},
}


def value(number: int) -> bytes:
    return (b"%d " % number).ljust(32, b"x")


BEFORE = 10
START = 3  # where the reader "old" stands


class Case:
    """One journal, an operation on it, and what must be true after a kill. `said` counts what it has acknowledged."""

    format = ""
    is_append = False

    def __init__(self, root: Path) -> None:
        self.root = root
        self.said = 0
        self.prepare()

    def prepare(self) -> None:
        with kvspool.create(self.root / "log", format=self.format, **FORMATS[self.format]) as log:  # type: ignore[call-overload]
            log.append_many([value(number) for number in range(BEFORE)])
            with log.reader("old") as reader:
                reader.seek(START)
                reader.commit()

    def open(self) -> Journal:
        return kvspool.open(self.root / "log", timeout=5)  # type: ignore[return-value]

    def run(self) -> None:
        raise NotImplementedError

    def least(self, said: int) -> int:
        """Return how many records are there at least, from the first one ever on."""
        return BEFORE + said

    def firsts(self, said: int) -> tuple[int, ...]:
        """Return where the journal may begin."""
        return (0,)

    def places(self, said: int) -> tuple[int | None, ...]:
        """Return where the reader "old" may stand."""
        return (START,)

    def check(self, root: Path, said: int) -> None:
        with kvspool.open(root / "log", timeout=5) as log:
            assert isinstance(log, Journal)
            before = self.count(log)
            self.check_records(log, said, before)
            places = {one.name: one.sequence for one in log.readers()}
            assert places.get("old") in self.places(said)
            assert log.append(value(before)) == before
            assert all(one.sequence is not None and one.sequence <= before for one in log.readers())
            assert log.append_many([value(before + more) for more in range(1, 6)]) == range(before + 1, before + 6)
            self.check_records(log, said, before + 6)
            log.sync()
            if places.get("old") is not None:
                with log.reader("old") as reader:
                    rest = list(reader.read(on_gap="skip"))
                    assert [one.sequence for one in rest] == list(range(max(min(places["old"] or 0, before), log.first()), before + 6))
                    assert reader.commit() == before + 6
            assert log.verify().is_sound

    def count(self, log: Journal) -> int:
        return log.end()

    def check_records(self, log: Journal, said: int, count: int) -> None:
        assert self.least(said) <= count
        first = log.first()
        assert first in self.firsts(said)
        assert [(one.sequence, one.value) for one in log.read()] == [(number, value(number)) for number in range(first, count)]
        assert log.end() == count


class Append(Case):
    is_append = True

    def run(self) -> None:
        with self.open() as log:
            for number in range(BEFORE, BEFORE + 4):  # a segment ends within these records
                log.append(value(number))
                self.said += 1


class AppendOpen(Append):
    """Append by a handle that is open, in one step: the compiled loop, and nothing else."""

    def __init__(self, root: Path) -> None:
        self.acknowledged = Said()
        self.handle: Journal | None = None
        super().__init__(root)

    def prepare(self) -> None:
        options = {"item_bytes": 32, "items_per_blob": 100} if self.format == "fixed" else {}
        with kvspool.create(self.root / "log", format=self.format, **options) as log:  # type: ignore[call-overload]
            log.append_many([value(number) for number in range(BEFORE)])
            log.reader("old", START).close()

    def warm(self) -> None:
        self.handle = self.open()
        for _ in range(2):
            self.run()

    def run(self) -> None:
        assert self.handle is not None
        self.handle.append(value(BEFORE + len(self.acknowledged)))
        self.acknowledged.append(None)


class AppendMany(Case):
    is_append = True

    def run(self) -> None:
        with self.open() as log:
            self.said = len(log.append_many([value(number) for number in range(BEFORE, BEFORE + 9)]))


class Produce(Case):
    """A producer's batch, over several segments; the next writer resolves the state after a kill, and then the batch is sent again."""

    is_append = True
    values = tuple(value(number) for number in range(100, 109))

    def prepare(self) -> None:
        super().prepare()
        with self.open() as log:
            log.producer("p").append_many([b"earlier"], batch=6)

    def run(self) -> None:
        with self.open() as log:
            self.said = log.producer("p").append_many(self.values, batch=7).records

    def check(self, root: Path, said: int) -> None:
        with kvspool.open(root / "log", timeout=5) as log:
            between = log.append(b"between")
            assert BEFORE + 1 + said <= between <= BEFORE + 1 + len(self.values)
            producer = log.producer("p")
            assert producer.last == (7 if between == BEFORE + 1 + len(self.values) else 6)
            assert producer.append_many(self.values[::-1], batch=7).records == len(self.values)
            assert producer.append_many(self.values, batch=7).repeated
            found = [one.value for one in log.read() if one.sequence != between][BEFORE + 1 :]
            assert sorted(found) == sorted(self.values) and log.verify().is_sound


class AppendDurably(Case):
    is_append = True

    def run(self) -> None:
        with self.open() as log:
            log.append(value(BEFORE), durable=True)
            self.said += 1
            log.sync()


class Recover(Case):
    """After the end there is a part of a record that a writer did not finish."""

    is_append = True

    def prepare(self) -> None:
        super().prepare()
        with self.open() as log:
            last = log._segments.path_of(log.bases()[-1])
            data = log.format.encode(kvspool.journal.JournalBatch([value(BEFORE)]), 0, Before(BEFORE, log.bases()[-1], 0, 0, 0))[0]
        with last.open("ab") as file:
            file.write(data[:25])

    def run(self) -> None:
        with self.open() as log:
            log.append(value(BEFORE))
            self.said += 1


class RecoverWithoutPage(Recover):
    def prepare(self) -> None:
        super().prepare()
        with self.open() as log:
            path = log.format.lock_file(log.path)
        path.unlink()


class Commit(Case):
    def run(self) -> None:
        with self.open() as log, log.reader("old") as reader:
            assert len(list(reader.read(limit=6))) == 6
            reader.commit()
            self.said = 1

    def least(self, said: int) -> int:
        return BEFORE

    def places(self, said: int) -> tuple[int | None, ...]:
        return (START + 6,) if said else (START, START + 6)


class NewReader(Case):
    def run(self) -> None:
        with self.open() as log, log.reader("new", "latest"):
            self.said = 1

    def least(self, said: int) -> int:
        return BEFORE

    def check(self, root: Path, said: int) -> None:
        with kvspool.open(root / "log") as log:
            assert {one.name: one.sequence for one in log.readers()}.get("new", -1) in ((BEFORE,) if said else (-1, BEFORE))
            with log.reader("new", "latest") as reader:
                assert reader.sequence == BEFORE
                reader.seek(0)  # so that what follows is the same for all
                reader.commit()
        super().check(root, 0)


class DeleteReader(Case):
    def run(self) -> None:
        with self.open() as log:
            log.delete_reader("old")
            self.said = 1

    def least(self, said: int) -> int:
        return BEFORE

    def places(self, said: int) -> tuple[int | None, ...]:
        return (None,) if said else (START, None)

    def check(self, root: Path, said: int) -> None:
        super().check(root, said)
        with kvspool.open(root / "log") as log:
            try:
                log.delete_reader("old")
            except NoSuchReader:
                pass
            with log.reader("old") as reader:
                assert reader.sequence == 0


class Trim(Case):
    def run(self) -> None:
        with self.open() as log:
            self.kept = log.trim(before=9, force=True).first_sequence
            self.said = 1

    def least(self, said: int) -> int:
        return BEFORE

    def firsts(self, said: int) -> tuple[int, ...]:
        return (self.kept,) if said else tuple(range(self.kept + 1))


class Create(Case):
    begin = 0

    def prepare(self) -> None:
        pass

    def create(self, root: Path) -> Journal:
        return kvspool.create(root / "log", format=self.format, first_sequence=self.begin, **FORMATS[self.format])  # type: ignore[call-overload,no-any-return]

    def run(self) -> None:
        with self.create(self.root) as log:
            self.said = 1
            log.append(value(0))

    def check(self, root: Path, said: int) -> None:
        """It is there, or can be made."""
        try:
            log = kvspool.open(root / "log")
        except (LogNotFound, NotALog):
            assert not said
            log = self.create(root)
        with log:
            assert isinstance(log, Journal)
            assert log.format.name == self.format
            assert log.format.limits().items() >= FORMATS[self.format].items()
            first = log.append(value(0))
            assert first in (self.begin, self.begin + 1)
            assert [(one.sequence, one.value) for one in log.read()] == [(at, value(0)) for at in range(self.begin, first + 1)]


class CreateBehind(Create):
    begin = 4_000_000


class Rewind(Case):
    size = 6

    def run(self) -> None:
        with self.open() as log:
            log.rewind(self.size)  # type: ignore[attr-defined]
            self.said = 1

    def least(self, said: int) -> int:
        return self.size

    def count(self, log: Journal) -> int:
        end = log.end()
        assert end in ((self.size,) if self.said_now else (self.size, BEFORE))
        return end

    def check(self, root: Path, said: int) -> None:
        self.said_now = said
        super().check(root, said)

    def places(self, said: int) -> tuple[int | None, ...]:
        return (min(START, self.size),) if said else (START, min(START, self.size))


class RewindBehindReader(Rewind):
    size = 2


class Prune(Trim):
    def run(self) -> None:
        with self.open() as log:
            self.kept = log.prune(9)  # type: ignore[attr-defined]
            self.said = 1

    def firsts(self, said: int) -> tuple[int, ...]:
        return (self.kept,) if said else (0, self.kept)


class BeginAnew(Case):
    """Nothing that is there is wanted any more."""

    def run(self) -> None:
        with self.open() as log:
            log.open_for_sync(21, 30)  # type: ignore[attr-defined]
            self.said = 1

    def check(self, root: Path, said: int) -> None:
        with kvspool.open(root / "log") as log:
            assert isinstance(log, Journal)
            end = log.end()
            assert end in ((21,) if said else (BEFORE, 21))
            found = [one for one in log.read(on_gap="skip") if not isinstance(one, Gap)]
            first = found[0].sequence if found else end
            assert [(one.sequence, one.value) for one in found] == [(number, value(number)) for number in range(first, end)]
            assert all(one.sequence is None or one.sequence <= end for one in log.readers())
            assert log.append(value(end)) == end
            assert [one.sequence for one in log.read()][-1] == end
            with log.reader("old") as reader:
                assert [one.sequence for one in reader.read(on_gap="skip")][-1] == end


SHARED = [Append, AppendMany, AppendDurably, Recover, RecoverWithoutPage, Commit, NewReader, DeleteReader, Trim, Create, CreateBehind]
CASES = [(kind, name) for kind in SHARED for name in FORMATS if (kind, name) != (Trim, "fflg")]  # its segments hold too much for that
CASES.append((Produce, "kvj"))
CASES += [(kind, "fixed") for kind in (Rewind, RewindBehindReader, Prune, BeginAnew)]
CASES = [(kind, name) for kind, name in CASES if kind.is_append or not IS_SECOND_RUN]


@pytest.fixture
def memory() -> Iterator[Path]:
    """A directory in memory, so that restoring a state and flushing cost little."""
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


def sample(is_append: bool) -> tuple[int, int]:
    """Return how many lengths of one write are tried, about, and how many ways to tear a change of what was there already."""
    if ALL:
        return 10000, 400
    if not is_append:
        return 1, 1
    return (4, 3) if TWIN == "interpreted" else (1, 1)


def beginnings(before: State, after: State, most: int) -> Iterator[State]:
    """Yield the states during one write at the end of a file: each beginning of it, or about `most` of them."""
    if before.names != after.names:
        return
    for number, file in after.files.items():
        old, new = before.files[number].content, file.content
        if len(new) <= len(old) or not new.startswith(old):
            continue
        lengths = range(len(old) + 1, len(new))
        step = max(1, len(lengths) // most)
        for length in sorted({*lengths[::step], *lengths[-1:]}):
            yield State(before.directories, before.names, {**before.files, number: File(file.mode, new[:length])}, before.said)


def all_states(run: Run | Stepped, is_append: bool) -> Iterator[State]:
    lengths, choices = sample(is_append)
    yield from run.crashes(choices)
    for before, after in zip(run.states, run.states[1:], strict=False):
        yield from beginnings(before, after, lengths)


def adopt(root: Path) -> Path:
    """Rename the files next to a journal to the number that its directory has here."""
    for path in root.glob(".*.kvspool/writers-*") if (root / "log").exists() else ():
        path.rename(path.with_name(f"writers-{system.port.identity(root / 'log')}.{path.name.partition('.')[2]}"))
    return root


@pytest.mark.parametrize(("kind", "format"), CASES, ids=[f"{kind.__name__}-{name}" for kind, name in CASES])
def test_killed_at_any_opcode_it_is_done_or_not_and_the_next_one_continues(memory: Path, kind: type[Case], format: str) -> None:
    root = memory / "shared"
    root.mkdir()
    case = type(kind.__name__, (kind,), {"format": format})(root)
    said: Callable[[], int] = lambda: case.said  # noqa: E731
    run = Run(case.run, root, said)
    count = 0
    with Copy(memory / "copy") as copy:
        for state in all_states(run, case.is_append):
            count += 1
            try:
                case.check(adopt(copy.become(state)), state.said)
            except (AssertionError, KvspoolError, OSError, Truncated) as error:
                error.add_note(f"in state {count}, of which {state.said} was acknowledged: {sorted(state.names)}")
                raise
    print(f"{kind.__name__} {format}: {run.opcodes} opcodes, {len(run.states)} states, {count} with torn ones")
    assert len(run.states) > 1


@pytest.mark.skipif(TWIN == "interpreted", reason="interpreted, the instructions are the interpreter's")
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_compiled_an_append_is_done_or_not_after_any_instruction_of_the_machine(memory: Path, format: str) -> None:
    root = memory / "shared"
    root.mkdir()
    case: AppendOpen = type("AppendOpen", (AppendOpen,), {"format": format})(root)
    try:
        run = Stepped(case.warm, case.run, root, lambda: len(case.acknowledged))
    except Unsteppable:
        pytest.skip("this process may not trace another one")
    assert run.instructions > 1000 and run.states[-1].said == 3
    assert len(run.states) > 3
    with Copy(memory / "copy") as copy:
        for state in all_states(run, is_append=True):
            case.check(adopt(copy.become(state)), state.said)
