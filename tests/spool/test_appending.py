"""Batches that find no room, or that fail after some of their pieces were published: what is stored, and what the error says about it."""

from __future__ import annotations

import errno
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from commands import Run

import kvspool
from kvspool import Spool, errors, system
from kvspool.engine.rows import values_of
from kvspool.errors import AppendedInPart, Pinned, SpoolFull, appended_by
from kvspool.spool.appending import Appending, Prepared
from kvspool.spool.durability import SpoolFlusher
from kvspool.system import Port

VALUES = [b"%02d" % number + bytes(900) for number in range(50)]  # almost three quarters of the ring; 17 of them are a piece
FILLED = 100


@pytest.fixture(params=["overwrite", "block"])
def log(tmp_path: Path, request: pytest.FixtureRequest) -> Any:
    with kvspool.create(tmp_path / "log", capacity=65536, policy=request.param, timeout=0.05) as log:
        for _ in range(FILLED):
            log.append(bytes(600))
        yield log


def producer(log: Spool, values: list[bytes]) -> Any:
    return log.producer("p").append_many(values, batch=1)


def arrow(log: Spool, values: list[bytes]) -> Any:
    pa = pytest.importorskip("pyarrow")
    return log.append_arrow(pa.Table.from_batches([pa.record_batch({"value": values[at::2]}) for at in range(2)]))


def burst(log: Spool, values: list[bytes]) -> Any:
    with log.writer() as writer:
        return writer.append_many(values)


WAYS: dict[str, Callable[[Spool, list[bytes]], Any]] = {
    "append_many": lambda log, values: log.append_many(values),
    "append_rows": lambda log, values: log.append_rows(values_of(0, values)),
    "append_arrow": arrow,
    "writer": burst,
    "producer": producer,
}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Callable[[Spool, list[bytes]], Any]:
    return WAYS[request.param]


def since_filled(log: Spool) -> list[bytes]:
    return [record.value for record in log.read(FILLED)]


class Sleeping(Port):
    """Calls a function instead of each sleep."""

    def __init__(self, act: Callable[[], object]) -> None:
        super().__init__()
        self.act = act

    def sleep(self, seconds: float) -> None:
        self.act()


def during(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object], after: int = 30) -> None:
    """Do something once in the middle of the next batch, when pieces of it are published."""
    put = Prepared.put

    def stopped(self: Prepared, writer: Any) -> None:
        monkeypatch.setattr(Prepared, "put", put)
        keys = None if self.keys is None else self.keys[:after]
        put(self._replace(keys=keys, values=self.values[:after], codecs=self.codecs[:after], stored=0), writer)
        act()
        put(self.since(after), writer)

    monkeypatch.setattr(Prepared, "put", stopped)


class View:
    """A view through another handle, which can be closed from anywhere."""

    def __init__(self, log: Spool, sequence: int) -> None:
        self._log = kvspool.open(log.path)
        self._view = self._log.view(sequence)  # type: ignore[union-attr]
        self._view.__enter__()

    def close(self) -> None:
        if not self._log.closed:
            self._view.__exit__(None, None, None)
            self._log.close()


@pytest.mark.parametrize("oldest", [0, 20, 40])
def test_a_batch_that_a_view_leaves_no_room_for_is_appended_whole_or_not_at_all(
    log: Spool, way: Callable[[Spool, list[bytes]], Any], oldest: int
) -> None:
    view = View(log, log.extent()[0] + oldest)
    with pytest.raises(Pinned, match="none became free within 0.05 s"):
        way(log, VALUES)
    assert log.end() == FILLED, "nothing was written"
    with system.replaced(Sleeping(view.close)):
        way(log, VALUES)
    assert sorted(since_filled(log)) == VALUES


def test_a_batch_larger_than_the_ring_is_not_begun_over_a_view_either(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", capacity=65536, timeout=0) as log:
        log.append_many([bytes(600)] * FILLED)
        view = View(log, FILLED - 1)
        with pytest.raises(Pinned):
            log.append_many(VALUES * 3)
        assert log.end() == FILLED
        view.close()
        assert log.append_many(VALUES * 3) == range(FILLED, FILLED + 150)


def test_a_batch_that_is_stored_in_part_says_what_is_stored(log: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    views: list[View] = []
    during(monkeypatch, lambda: views.append(View(log, log.extent()[0])))
    with pytest.raises(AppendedInPart, match="17 of 50 records were appended, from sequence 100 on; don't append those again") as raised:
        log.append_many(VALUES)
    assert raised.value.appended == appended_by(raised.value) == range(FILLED, FILLED + 17)
    assert not isinstance(raised.value, SpoolFull)
    assert isinstance(raised.value.__cause__, Pinned)
    assert since_filled(log) == VALUES[:17]
    views[0].close()
    log.append_many(VALUES[len(raised.value.appended) :])
    assert since_filled(log) == VALUES


def test_a_batch_that_is_stored_in_part_continues_when_the_view_is_closed(log: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    views: list[View] = []
    during(monkeypatch, lambda: views.append(View(log, log.extent()[0])))
    with system.replaced(Sleeping(lambda: views[0].close())):
        assert log.append_many(VALUES, keys=[value[:2] for value in VALUES], timeout=60) == range(FILLED, FILLED + 50)
    assert [(record.key, record.value) for record in log.read(FILLED)] == [(value[:2], value) for value in VALUES]


def test_a_batch_that_is_stored_in_part_does_not_continue_after_records_of_others(log: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    views: list[View] = []
    during(monkeypatch, lambda: views.append(View(log, log.extent()[0])))

    def others() -> None:
        views[0].close()
        with kvspool.open(log.path) as other:
            other.append(b"of others")  # type: ignore[union-attr]

    with system.replaced(Sleeping(others)), pytest.raises(AppendedInPart, match="others have appended") as raised:
        log.append_many(VALUES, timeout=60)
    assert raised.value.appended == range(FILLED, FILLED + 17)
    assert since_filled(log) == [*VALUES[:17], b"of others"]


@pytest.mark.parametrize(
    "error", [errors.TooLarge("it shrank"), errors.Corruption("damaged"), errors.LogVanished("gone"), errors.Closed("closed")], ids=repr
)
def test_an_error_that_says_that_nothing_was_written_is_replaced_where_something_was(
    log: Spool, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail() -> None:
        raise error

    during(monkeypatch, fail)
    with pytest.raises(AppendedInPart) as raised:
        log.append_many(VALUES)
    assert raised.value.__cause__ is error
    assert since_filled(log) == VALUES[: len(raised.value.appended)] == VALUES[:17]


@pytest.mark.parametrize(
    "error", [partial(OSError, errno.EIO, "broken"), errors.Poisoned, MemoryError, KeyboardInterrupt, SystemExit], ids=repr
)
def test_any_other_error_keeps_its_class_and_says_what_is_stored(
    log: Spool, monkeypatch: pytest.MonkeyPatch, error: Callable[[], BaseException]
) -> None:
    raises = error()

    def fail() -> None:
        raise raises

    during(monkeypatch, fail)
    with pytest.raises(type(raises)) as raised:
        log.append_many(VALUES)
    assert raised.value is raises
    assert since_filled(log) == VALUES[: len(appended_by(raises))] == VALUES[:17]
    assert raises.__notes__ == ["17 of 50 records were appended, from sequence 100 on; don't append those again"]


def test_an_error_before_the_first_piece_says_that_nothing_is_stored(log: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError(errno.EIO, "broken")

    during(monkeypatch, fail, after=10)
    with pytest.raises(OSError, match="broken") as raised:
        log.append_many(VALUES)
    assert appended_by(raised.value) == range(0)
    assert log.end() == FILLED


def test_a_producers_batch_that_is_stored_in_part_is_completed_when_it_is_repeated(log: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    views: list[View] = []
    during(monkeypatch, lambda: views.append(View(log, log.extent()[0])))
    with pytest.raises(AppendedInPart, match="append the batch again") as raised:
        producer(log, VALUES)
    assert raised.value.appended == range(FILLED, FILLED + 17)
    views[0].close()
    assert producer(log, VALUES) == (FILLED, 50, False)
    assert since_filled(log) == VALUES
    assert producer(log, VALUES) == (FILLED, 50, True)


def test_a_producers_batch_continues_in_the_same_call_when_the_view_is_closed(log: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    views: list[View] = []
    during(monkeypatch, lambda: views.append(View(log, log.extent()[0])))

    def others() -> None:
        if not views[0]._log.closed:
            views[0].close()
            with kvspool.open(log.path) as other:
                other.append(b"of others")  # type: ignore[union-attr]

    with system.replaced(Sleeping(others)):
        assert log.producer("p").append_many(VALUES, batch=1, timeout=60) == (FILLED, 50, False)
    assert since_filled(log) == [*VALUES[:17], b"of others", *VALUES[17:]]
    assert log.verify().is_sound


def test_the_command_counts_what_a_failed_batch_has_stored(log: Spool, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    def fail() -> None:
        raise errors.LogVanished("gone")

    during(monkeypatch, fail)
    lines = b"".join(value[:2] + b"x" * 900 + b"\n" for value in VALUES)
    told = run("append", log.path, code=AppendedInPart.exit_code, given=lines).err
    assert "17 of 50 records were appended, from sequence 100 on; don't append those again: gone" in told
    assert "appended 17 records: sequences 100 to 116" in told


@pytest.mark.parametrize(("where", "name"), [(Appending, "_store"), (SpoolFlusher, "flush_below")])
def test_an_interrupt_after_the_publication_says_what_is_stored(
    log: Spool, monkeypatch: pytest.MonkeyPatch, where: type, name: str
) -> None:
    def interrupted(*_: object) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(where, name, interrupted)
    with pytest.raises(KeyboardInterrupt) as raised:
        log.append_many(VALUES[:5], durable=True)
    assert appended_by(raised.value) == range(FILLED, FILLED + 5)
    assert since_filled(log) == VALUES[:5]
