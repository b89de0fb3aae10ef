"""A journal's settings: the id that tells it from every other one."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pytest

import kvspool
from kvspool import system
from kvspool.errors import Closed, Corruption
from kvspool.journal import Journal, Retention, settings

FORMATS = {"kvj": {}, "sej": {}, "fflg": {}, "fixed": {"item_bytes": 1, "items_per_blob": 4}}


def created(path: Path, form: str = "kvj") -> Journal:
    return kvspool.create(path, format=form, **FORMATS[form])  # type: ignore[call-overload,no-any-return]


def settings_file(log: Journal) -> Path:
    return log.format.sidecar(log.path) / settings.NAME


@pytest.mark.parametrize("form", FORMATS)
def test_each_journal_has_an_id_of_its_own(tmp_path: Path, form: str) -> None:
    with created(tmp_path / "a", form) as one, created(tmp_path / "b", form) as other:
        assert len(one.log_id) == len(other.log_id) == 16
        assert one.log_id != other.log_id
        assert one.ensure_log_id() == one.log_id
        with kvspool.open(tmp_path / "a") as again:
            assert again.log_id == one.log_id


@pytest.mark.parametrize("form", FORMATS)
def test_it_is_kept_by_whatever_changes_the_journal(tmp_path: Path, form: str) -> None:
    with created(tmp_path / "log", form) as log:
        log_id = log.log_id
        log.append_many([b"x"] * 20)
        log.set_retention(Retention(max_bytes=100))
        log.trim(before=10)
        log.repair()
    with kvspool.open(tmp_path / "log") as log:
        assert log.log_id == log_id


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("left", ["older settings", "no settings"])
def test_a_journal_without_one_gets_it_when_it_is_asked_for(tmp_path: Path, form: str, left: str) -> None:
    with created(tmp_path / "log", form) as log:
        log.append(b"x")
        file = settings_file(log)
    if left == "no settings":
        file.unlink()
        format = form
    else:
        found = json.loads(file.read_bytes())
        del found["id"]
        file.write_text(json.dumps(found))
        format = None
    before = file.read_bytes() if format is None else None
    with kvspool.open(tmp_path / "log", format=format, **(FORMATS[form] if format else {})) as log, kvspool.open(
        tmp_path / "log", format=format, **(FORMATS[form] if format else {})
    ) as other:
        assert log.log_id == b""
        assert (file.read_bytes() if before is not None else None) == before
        assert len(log.ensure_log_id()) == 16
        assert log.log_id == other.log_id == other.ensure_log_id()
        assert [record.value for record in log] == [b"x"]
    with kvspool.open(tmp_path / "log") as log:
        assert log.log_id == other.log_id


def _ask(path: Path, results: multiprocessing.SimpleQueue[bytes]) -> None:
    with kvspool.open(path) as log:
        assert isinstance(log, Journal)
        results.put(log.ensure_log_id())


def test_processes_that_ask_at_once_get_the_same_one(tmp_path: Path) -> None:
    with created(tmp_path / "log") as log:
        settings_file(log).unlink()
    context = multiprocessing.get_context("fork")
    results: multiprocessing.SimpleQueue[bytes] = context.SimpleQueue()
    processes = [context.Process(target=_ask, args=(tmp_path / "log", results)) for _ in range(4)]
    for process in processes:
        process.start()
    assert len({results.get() for _ in processes}) == 1
    for process in processes:
        process.join()


@pytest.mark.parametrize("wrong", ["12", "g" * 32, "A" * 32, "0" * 31, "0" * 32 + "\n", 5])
def test_an_id_that_is_none_is_damage(tmp_path: Path, wrong: object) -> None:
    with created(tmp_path / "log") as log:
        found = json.loads(settings_file(log).read_bytes())
        settings_file(log).write_text(json.dumps({**found, "id": wrong}))
        with pytest.raises(Corruption, match="doesn't contain the settings of the journal"):
            _ = log.log_id
        assert any("settings of the journal" in problem for problem in log.verify().problems)


def test_it_is_on_disk_before_it_is_acknowledged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class FullPort(system.Port):
        def rename(self, source: Path, target: Path) -> None:
            raise OSError(28, "no space")

    with created(tmp_path / "log") as log:
        settings_file(log).unlink()
        log.append(b"x")
        with monkeypatch.context() as patch:
            patch.setattr(system, "port", FullPort())
            with pytest.raises(OSError, match="no space"):
                log.ensure_log_id()
        assert log.log_id == b""
        assert len(log.ensure_log_id()) == 16
    with pytest.raises(Closed), kvspool.open(tmp_path / "log") as log:
        settings_file(log).unlink()
        log.close()
        log.ensure_log_id()


def test_a_copy_is_another_log(tmp_path: Path) -> None:
    from kvspool.cli import main

    with created(tmp_path / "log") as log:
        log.append(b"x")
        assert main(["copy", str(tmp_path / "log"), str(tmp_path / "copy"), "--format", "kvj"]) in (0, None)
        with kvspool.open(tmp_path / "copy") as copy:
            assert len(copy.log_id) == 16
            assert copy.log_id != log.log_id
