"""Groups of logs, shard sets and hub roots: owners, positions, hand-overs, and what happens to members that end or are stopped."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from children import process
from subjects import KINDS, SHARED, Subject

import hub
import kvspool
from kvspool.errors import Closed, Corruption, LockTimeout, NoSuchReader, OutOfRange, ReaderBusy, Revoked, TooManyMembers, UnknownVersion
from kvspool.groups import files, layout
from kvspool.groups.files import GroupFiles

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


@pytest.fixture(params=KINDS)
def subject(request: pytest.FixtureRequest, tmp_path: Path) -> Subject:
    return Subject(tmp_path / "log", request.param)


@pytest.fixture(params=SHARED)
def shared(request: pytest.FixtureRequest, tmp_path: Path) -> Subject:
    return Subject(tmp_path / "log", request.param)


def settle(*members: Any) -> list[frozenset[Any]]:
    """Let members that have committed everything hand their shards over."""
    for _ in range(2):
        for one in members:
            one.attend()
    return [one.assigned for one in members]


def take_all(member: Any, count: int) -> list[Any]:
    return list(member.follow(limit=count))


def test_a_group_of_one_is_a_durable_reader(subject: Subject) -> None:
    subject.append(20)
    with subject.open() as log, log.group("billing") as member:
        assert len(member.assigned) == subject.shards
        records = take_all(member, 20)
        positions = member.commit()
        assert positions == member.positions
        assert sum(positions.values()) == 20
        assert sorted(record.value for record in records) == sorted(b"%d" % at for at in range(20))
    subject.append(3)
    with subject.open() as log, log.group("billing") as member:
        assert member.lag().records == 3
        assert len(take_all(member, 3)) == 3
        assert list(member.read()) == []
    if subject.kind.startswith("hub"):
        with subject.open() as root, root.reader("billing") as reader:
            assert reader.positions == positions
            assert reader.lag().records == 3
    elif subject.shards == 1:
        with subject.open() as log, log.reader("billing") as reader:
            assert reader.sequence == 20
            reader.follow(limit=1).__next__()
            reader.commit()
        with subject.open() as log, log.group("billing") as member:
            assert member.positions == {0: 21}


def test_a_reader_and_a_group_of_the_same_name_exclude_each_other(subject: Subject) -> None:
    with subject.open() as log:
        one = log.shards[0] if subject.kind.startswith("set") else log
        with log.group("billing"), pytest.raises(ReaderBusy):
            one.reader("billing")
        with one.reader("billing"), pytest.raises(ReaderBusy):
            log.group("billing")
        with log.group("billing") as member:
            assert len(member.assigned) == subject.shards


def test_shares_differ_by_at_most_one_and_as_few_shards_as_possible_move(shared: Subject) -> None:
    with shared.open() as log, log.group("g") as one:
        assert len(one.assigned) == 4
        with log.group("g") as two:
            before = one.assigned
            owned = settle(one, two)
            assert [len(shards) for shards in owned] == [2, 2]
            assert owned[0] < before
            with log.group("g") as three:
                after = settle(one, two, three)
                assert sorted(map(len, after)) == [1, 1, 2]
                assert frozenset[Any]().union(*after) == before
                assert all(now <= earlier for now, earlier in zip(after, owned, strict=False))
            after = settle(one, two)
            assert [len(shards) for shards in after] == [2, 2]
        assert settle(one) == [before]


def test_no_shard_moves_before_its_owner_has_committed(shared: Subject) -> None:
    shared.append(100)
    with shared.open() as log, log.group("g") as one:
        records = take_all(one, 100)
        with log.group("g") as two:
            settle(one, two)
            assert len(one.assigned) == 4
            assert not two.assigned
            one.commit()
            owned = settle(one, two)
            assert [len(shards) for shards in owned] == [2, 2]
            assert list(two.read()) == []
            shared.append(100)
            later = take_all(one, sum(shared.shard_of(record) in owned[0] for record in records))
            later += take_all(two, 100 - len(later))
            assert len(later) == 100


def test_each_shard_is_read_in_order_by_one_owner(shared: Subject) -> None:
    shared.append(400)
    with shared.open() as log, log.group("g") as one, log.group("g") as two:
        settle(one, two)
        found: dict[Any, list[tuple[int, int]]] = {}
        for number, member in enumerate((one, two)):
            for record in member.read():
                found.setdefault(shared.shard_of(record), []).append((record.sequence, number))
        assert sum(map(len, found.values())) == 400
        for records in found.values():
            assert [sequence for sequence, _ in records] == list(range(len(records)))
            assert len({number for _, number in records}) == 1


def test_what_was_not_committed_is_handled_again_after_a_kill(subject: Subject) -> None:
    subject.append(40)

    def work(say: Callable[[bytes], None]) -> None:
        with subject.open() as log, log.group("g") as member:
            assert len(take_all(member, 30)) == 30
            member.commit()
            take_all(member, 10)
            say(b".")
            signal.pause()

    with process(work) as (pid, said):
        assert said() == b"."
        with subject.open() as log, log.group("g") as member:
            assert not member.assigned
            os.kill(pid, signal.SIGKILL)
            assert len(take_all(member, 10)) == 10
            assert len(member.assigned) == subject.shards
            assert list(member.read()) == []


def test_a_standby_that_waits_in_the_kernel_notices_a_kill(subject: Subject) -> None:
    def work(say: Callable[[bytes], None]) -> None:
        with subject.open() as log, log.group("g") as member:
            member.attend()
            say(b".")
            signal.pause()

    with process(work) as (pid, said):
        assert said() == b"."
        with subject.open() as log:
            assigned = threading.Event()
            found: list[Any] = []

            def stand_by() -> None:
                with log.group("g", on_assigned=lambda *_: assigned.set()) as member:
                    found.extend(member.follow(limit=1))

            waiter = threading.Thread(target=stand_by)
            waiter.start()
            os.kill(pid, signal.SIGKILL)
            assert assigned.wait(30)
            subject.append(1)
            waiter.join(30)
            assert len(found) == 1


def test_a_stopped_member_keeps_its_shards(subject: Subject) -> None:
    def work(say: Callable[[bytes], None]) -> None:
        with subject.open() as log, log.group("g") as member:
            say(b".")
            for _ in member.follow():
                member.commit()
                say(b"r")

    with process(work) as (pid, said):
        assert said() == b"."
        os.kill(pid, signal.SIGSTOP)
        with subject.open() as log, log.group("g") as member:
            subject.append(40)
            assert list(member.follow(timeout=0.7)) == []
            os.kill(pid, signal.SIGCONT)
            assert said() == b"r"


def test_shards_of_a_silent_member_are_taken_and_its_commit_raises_revoked(subject: Subject) -> None:
    subject.append(10)

    def work(say: Callable[[bytes], None]) -> None:
        with subject.open() as log, log.group("g", max_silence=1) as member:
            take_all(member, 10)
            say(b".")
            while True:  # stopped here, then continued
                try:
                    if len(os.listdir(subject.path.parent)) and (subject.path.parent / "go").exists():
                        member.commit()
                        say(b"c")
                        return
                except Revoked as error:
                    assert error.shards
                    say(b"R")
                    if subject.shards == 1:
                        assert member.attend() == frozenset()
                    member.close()
                    with pytest.raises(Closed):
                        member.seek({})
                    say(b"e")
                    return

    with process(work) as (pid, said):
        assert said() == b"."
        os.kill(pid, signal.SIGSTOP)
        with subject.open() as log, log.group("g") as member:
            assert len(take_all(member, 10)) == 10
            member.commit()
            positions = member.positions
            (subject.path.parent / "go").touch()
            os.kill(pid, signal.SIGCONT)
            assert said() == b"R"
            assert said() == b"e"
            assert len(settle(member)[0]) == subject.shards
            assert member.positions == positions


def test_a_commit_that_was_stopped_before_its_last_step_moves_no_position(subject: Subject) -> None:
    """The member loses its shards between the check and the store: its fence is called, and then others commit."""
    subject.append(10)
    with subject.open() as log, log.group("g", max_silence=1) as stale:
        take_all(stale, 10)
        membership = stale._membership
        membership.count()
        state = membership.files.load()
        from kvspool.groups import sharing

        def taken_meanwhile() -> None:
            """As another member does under the lock, when this one was silent."""
            with membership.files.locked():
                membership.files.store(sharing.without(state, {membership.slot}, displaced={membership.slot}))

        taken_meanwhile()
        with subject.open() as other, other.group("g") as member:
            assert len(member.assigned) == subject.shards
            assert len(take_all(member, 10)) == 10
            member.commit()
            with pytest.raises(Revoked) as raised:
                stale.commit()
            assert raised.value.shards
            assert sum(member.positions.values()) == 10
        with subject.open() as other, other.group("h") as member:
            assert sum(member.positions.values()) == 0


def test_one_that_leaves_gives_its_shards_at_once(subject: Subject) -> None:
    subject.append(4)
    with subject.open() as log, log.group("g") as two_later:
        take_all(two_later, 4)
        with log.group("g") as standby:
            assert len(standby.assigned) == 0
            two_later.close()
            assert len(standby.attend()) == subject.shards
            assert len(take_all(standby, 4)) == 4


def test_callbacks_tell_of_shards_before_records_come_and_before_they_go(shared: Subject) -> None:
    shared.append(8)
    said: list[tuple[str, int]] = []
    with shared.open() as log:

        def assigned(member: Any, shards: frozenset[Any]) -> None:
            said.append(("assigned", len(shards)))
            assert shards <= member.assigned

        def revoked(member: Any, shards: frozenset[Any]) -> None:
            said.append(("revoked", len(shards)))
            member.commit()

        with log.group("g", on_assigned=assigned, on_revoked=revoked) as one:
            take_all(one, 8)
            with log.group("g") as two:
                settle(one, two)
                assert len(two.assigned) == 2
                assert list(two.read()) == []
    assert said == [("assigned", 4), ("revoked", 2)]


def test_positions_are_stored_with_the_effect(shared: Subject) -> None:
    """The example of docs/groups.md: each record takes effect once, though the member never commits before it is gone."""
    shared.append(30)
    database = sqlite3.connect(shared.path.parent / "effects.db")
    database.execute("CREATE TABLE sums (total INTEGER)")
    database.execute("CREATE TABLE places (shard TEXT PRIMARY KEY, next INTEGER)")
    database.execute("INSERT INTO sums VALUES (0)")
    database.commit()

    def restore(member: Any, shards: Any) -> None:
        stored = dict(database.execute("SELECT shard, next FROM places"))
        member.seek({one: stored[repr(one)] for one in shards if repr(one) in stored})

    def handle(member: Any, count: int) -> None:
        for record in member.follow(limit=count):
            database.execute("UPDATE sums SET total = total + ?", (int(record.value),))
            places = [(repr(one), at) for one, at in member.positions.items()]
            database.executemany("INSERT OR REPLACE INTO places VALUES (?, ?)", places)
            database.commit()

    with shared.open() as log, log.group("sums", on_assigned=restore) as member:
        handle(member, 12)
    with shared.open() as log, log.group("sums", on_assigned=restore) as member:
        handle(member, 18)
        assert list(member.read()) == []
    assert database.execute("SELECT total FROM sums").fetchone() == (sum(range(30)),)
    database.close()


def test_seek_moves_within_owned_shards(subject: Subject) -> None:
    subject.append(12)
    with subject.open() as log, log.group("g") as member:
        take_all(member, 12)
        member.seek(dict.fromkeys(member.assigned, 0))
        assert len(take_all(member, 12)) == 12
        with pytest.raises(ValueError, match="does not own"):
            member.seek({("nobody", 7): 0})
        with pytest.raises(OutOfRange):
            member.seek(dict.fromkeys(member.assigned, 1000))


def test_a_task_of_an_event_loop_waits_for_records_and_shards(subject: Subject) -> None:
    async def main() -> int:
        with subject.open() as log, log.group("g") as one, log.group("g") as standby:
            reading = asyncio.ensure_future(collect(standby, 5))
            await asyncio.sleep(0)
            settle(one)
            one.close()
            subject.append(5)
            return await asyncio.wait_for(reading, 30)

    async def collect(member: Any, count: int) -> int:
        found = 0
        async for _ in member.follow_async(limit=count):
            found += 1
        member.commit()
        return found

    assert asyncio.run(main()) == 5


def test_closing_in_another_thread_ends_a_wait(subject: Subject) -> None:
    with subject.open() as log:
        member = log.group("g")
        raised: list[BaseException] = []

        def wait() -> None:
            try:
                next(member.follow())
            except BaseException as error:
                raised.append(error)

        waiter = threading.Thread(target=wait)
        waiter.start()
        while member.turn is None:
            pass
        member.close()
        waiter.join(30)
        assert [type(error) for error in raised] == [Closed]


def test_a_forked_child_does_not_use_the_member_of_its_parent(subject: Subject) -> None:
    with subject.open() as log, log.group("g") as member:

        def work(say: Callable[[bytes], None]) -> None:
            with pytest.raises(Closed, match="parent"):
                member.commit()
            member.close()
            with subject.open() as own, own.group("g") as standby:
                assert not standby.assigned
            say(b".")

        with process(work) as (_, said):
            assert said() == b"."
        assert len(member.attend()) == subject.shards
        subject.append(1)
        assert len(take_all(member, 1)) == 1
        member.commit()


def test_new_clients_and_shards_are_shared_out_automatically(tmp_path: Path) -> None:
    root = hub.create(tmp_path / "root")
    with root, root.group("g") as one, hub.open(tmp_path / "root") as other, other.group("g") as two:
        assert settle(one, two) == [frozenset(), frozenset()]
        client = root.create_client("A", bits=1, format="kvj")
        client.append(b"x", key=b"k")
        assert sorted(map(len, settle(one, two))) == [1, 1]
        root.create_client("B", bits=1, format="kvj").append(b"y", key=b"k")
        assert sorted(map(len, settle(one, two))) == [2, 2]
        records = [*one.read(), *two.read()]
        assert sorted(record.value for record in records) == [b"x", b"y"]


def test_retention_of_a_hub_sees_the_positions_of_members(tmp_path: Path) -> None:
    with hub.create(tmp_path / "root") as root:
        client = root.create_client("A", bits=0, format="kvj")
        client.append_many([b"x"] * 10)
        with root.group("g") as member:
            assert root.held("A", 0) == 0
            take_all(member, 7)
            member.commit()
            assert root.held("A", 0) == 7
        assert root.held("A", 0) == 7


# The state of groups.


def test_the_state_of_groups_is_listed_and_reset(subject: Subject) -> None:
    subject.append(8)
    with subject.open() as log:
        with log.group("g", max_silence=5) as member:
            take_all(member, 3)
            member.commit()
            (found,) = log.groups()
            assert (found.name, found.shards, found.unowned) == ("g", subject.shards, [])
            (one,) = found.members
            assert (one.pid, one.max_silence, frozenset(one.shards)) == (os.getpid(), 5.0, member.assigned)
            assert found.lag is not None
            assert found.lag.records == 5
            with pytest.raises(ReaderBusy):
                log.reset_group("g", "earliest")
        (found,) = log.groups()
        assert found.members == []
        assert len(found.unowned) == subject.shards
        log.reset_group("g", "earliest")
        assert log.groups()[0].lag.records == 8
        log.reset_group("g", "latest")
        assert log.groups()[0].lag.records == 0
        with pytest.raises(NoSuchReader):
            log.reset_group("nobody", "earliest")


def test_files_of_groups_are_private(subject: Subject) -> None:
    with subject.open() as log, log.group("g") as member:
        subject.append(1)
        take_all(member, 1)
        member.commit()
        found = [path for path in subject.path.parent.rglob("*") if path.suffix in (".group", ".members", ".positions")]
        assert len(found) >= 2
        assert {stat.S_IMODE(path.stat().st_mode) for path in found} == {0o600}


def test_max_silence_is_checked(subject: Subject) -> None:
    with subject.open() as log:
        for wrong in (0, 0.5, -1, float("nan")):
            with pytest.raises(ValueError, match="max_silence"):
                log.group("g", max_silence=wrong)


# Damage.


@pytest.fixture
def group_file(tmp_path: Path) -> Path:
    log = kvspool.create(tmp_path / "log", capacity="1MiB")
    log.append(b"x")
    with log.group("g") as member:
        take_all(member, 1)
        member.commit()
    return next(tmp_path.rglob("*.group"))


def test_every_damaged_byte_is_detected_or_harmless_and_loses_no_position(group_file: Path, tmp_path: Path) -> None:
    good = group_file.read_bytes()
    sizes = [at for at in range(len(good)) if good[at]] + [layout.STATE_AT + 20, len(good) - 1]
    for at in sizes:
        group_file.write_bytes(good[:at] + bytes([good[at] ^ 0x55]) + good[at + 1 :])
        with kvspool.open(tmp_path / "log") as log:
            try:
                with log.group("g") as member:
                    assert member.positions == {0: 1}
            except (Corruption, UnknownVersion):
                pass
            assert log.readers()[0].sequence == 1
        group_file.write_bytes(good)


def test_a_truncated_or_foreign_group_file_is_refused(group_file: Path, tmp_path: Path) -> None:
    good = group_file.read_bytes()
    for bad in (b"", b"hello", good[:100], bytes(len(good)), good[: layout.STATE_AT + 10]):
        group_file.write_bytes(bad)
        with kvspool.open(tmp_path / "log") as log:
            with pytest.raises(Corruption, match="remove it"):
                log.group("g")
            (found,) = log.groups()
            assert "remove it" in found.problem
    group_file.unlink()
    with kvspool.open(tmp_path / "log") as log, log.group("g") as member:
        assert member.positions == {0: 1}


def test_the_file_of_another_group_is_refused(group_file: Path, tmp_path: Path) -> None:
    with kvspool.open(tmp_path / "log") as log:
        log.group("h").close()
        other = next(path for path in tmp_path.rglob("*.group") if path != group_file)
        other.write_bytes(group_file.read_bytes())
        with pytest.raises(Corruption, match="of the group 'g'"):
            log.group("h")


def test_a_writer_that_was_killed_during_a_change_leaves_the_former_state(group_file: Path) -> None:
    with GroupFiles(group_file, "g", 1, 1) if hasattr(GroupFiles, "__enter__") else _closing(GroupFiles(group_file, "g", 1, 1)) as found:
        with found.locked():
            before = found.store(found.load_locked())
            after = found.store(before)
            raw = bytearray(group_file.read_bytes())
            newest = max((0, layout.room(1)), key=lambda at: layout.parse_state(bytes(raw[layout.STATE_AT + at :]), 1).number)
            raw[layout.STATE_AT + newest] ^= 1
            group_file.write_bytes(raw)
            assert found.load_locked().number == before.number == after.number - 1


def _closing(files: GroupFiles) -> Any:
    from contextlib import closing

    return closing(files)


def test_a_stopped_change_ends_in_a_lock_timeout(group_file: Path, tmp_path: Path) -> None:
    holder = GroupFiles(group_file, "g", 1, 1)
    with holder.locked(), kvspool.open(tmp_path / "log") as log, pytest.raises(LockTimeout, match="may be stopped"):
        log.group("g", timeout=0.05)
    holder.close()


def test_the_number_of_members_is_bounded(group_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "MOST_MEMBERS", 2)
    with kvspool.open(tmp_path / "log") as log, log.group("g"), log.group("g"):
        with pytest.raises(TooManyMembers, match="2 members"):
            log.group("g")
        assert files.peek(group_file) is not None


# The bytes.


def test_the_bytes_of_a_group_file_are_those_of_the_format_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "formats" / "group.md").read_text(encoding="utf-8")
    for table in (layout.HEADER, layout.HEAD, layout.MEMBER, layout.SHARD):
        assert table.table() in page
    state = layout.GroupState(
        7, (layout.Member(1, 0x0123456789ABCDEF, 1, 1500, (100, 200, 300, 400)),), (layout.GroupShard(layout.digest("log"), 1, 1, 0, 9),)
    )
    golden = (layout.pack_header("g", 1), layout.pack_state(state))
    examples = [bytes.fromhex(part.split("```")[0]) for part in page.split("```hex")[1:]]
    assert examples == list(golden)
    assert layout.parse_header(examples[0]) == ("g", 1)
    assert layout.parse_state(examples[1], 1) == state
