"""Small files of a hub that hold anything, or are no files: an error names the file, and all other shards continue."""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import every_log
import garbage
import msgspec
import pytest
from commands import Run

import hub
import kvspool
from hub.cli import counts
from hub.client import mirrored_shard
from hub.client.mirrored_shard import Mark, MirroredShard
from hub.errors import AccessError, HubError, ShardDamaged
from hub.pipeline import job
from hub.pipeline.errors import JobError
from hub.protocol.reading import Generation, ShardState
from hub.root import pipeline_progress, positions, retention
from hub.root.audit import Audit
from hub.root.positions import Position
from hub.root.store import GENERATIONS, MIRRORED, PRIVATE, Store, load_generations, root_id
from hub.security.access import Access
from hub.server.shard_index import ShardIndex
from kvspool.errors import Corruption, FormatError, KvspoolError, NotAFile
from kvspool.journal import settings
from kvspool.system import disk

LOG = "0f" * 16


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A hub root with the clients bad and good, of one shard each, and a durable reader."""
    path = tmp_path / "root"
    with hub.create(path) as root:
        for client in ("bad", "good"):
            with root.create_client(client, bits=0, format="kvj") as shards:
                shards.append(b"a record", key=b"k")
        with root.reader("place") as reader:
            assert len(list(reader.read())) == 2
            reader.commit()
    disk.replace(path / "bad" / GENERATIONS, msgspec.json.encode([Generation(LOG, 0)]), 0o600)
    root_id(path)
    return path


def no_utf8(file: Path) -> None:
    file.write_bytes(file.read_bytes().replace(b"json", b"\xffson"))


def fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def handed_out(iteration: Any) -> tuple[list[Any], list[str]]:
    """Return the records of an iteration, and the errors that came between them."""
    records, problems = [], []
    while len(problems) < 10:
        try:
            records += list(itertools.islice(iteration, 1)) or [None]
        except KvspoolError as error:
            problems.append(str(error))
        if records and records[-1] is None:
            break
    return records[:-1], problems


DAMAGES: list[tuple[str, Callable[[Path], None], str]] = [
    (settings.NAME, no_utf8, "is not UTF-8"),
    (settings.NAME, lambda file: file.write_bytes(b"[" * garbage.DEEP) and None, "doesn't contain the settings of the journal"),
    (settings.NAME, fifo, "but a FIFO"),
    ("kvj/0000000000000000.kvj", fifo, "but a FIFO"),
    ("lock", fifo, "but a FIFO"),
]


@pytest.mark.parametrize(("name", "damage", "words"), DAMAGES)
def test_one_bad_shard_is_reported_and_all_others_continue(
    root: Path, name: str, damage: Callable[[Path], None], words: str, run: Run
) -> None:
    damage(root / "bad" / name)
    with every_log.in_time():
        survey = ShardIndex(root)
        states = asyncio.run(survey.states(lambda client: True, asyncio.to_thread))
        (bad,), (good,) = states["bad"], states["good"]
        survey.close()
        assert words in bad.error and (good.error, good.next) == ("", 1)
        audit = Audit(root)
        reports = {client: audit.look(client, index, path, lambda done, all: None) for client, index, path in audit.paths()}
        assert reports["good"] is not None and reports["good"].is_sound
        assert reports["bad"] is not None and not reports["bad"].is_sound
        found = counts.of_root(root)
        assert [(client.client, client.records) for client in found.clients] == [("bad", 0), ("good", 1)]
        assert len(found.troubles) == 1 and found.troubles[0].startswith("bad shard 0: ") and words in found.troubles[0]
        with Store(root) as store:
            assert store.count() == 0
            assert store.sizes()["good"][0].next == 1
            with pytest.raises(KvspoolError, match=words):
                store.take("bad", 0, 0)
        with hub.open(root) as opened, opened.client("good") as shards:
            assert [record.value for record in shards] == [b"a record"]
        with hub.open(root) as opened, opened.reader("new") as reader:
            for iteration in (opened.read(), opened.follow(timeout=0.1), reader.read()):
                records, problems = handed_out(iteration)
                assert ("good", b"a record") in [(record.client, record.value) for record in records]
                # A follower reads a log whose lock file is damaged: it needs none.
                assert [words in problem for problem in problems] == [True] or (name == "lock" and len(records) == 2), "it comes once"
        assert [words in one.problem for one in hub.open(root).readers()] == [True, True]
        said = run("hub", "clients", root, code=Corruption.exit_code)
        assert "good" in said.out and "bad shard 0" in said.err


def test_a_follower_reports_a_new_shard_with_the_same_damage_again_and_only_once(root: Path) -> None:
    no_utf8(root / "bad" / settings.NAME)
    with hub.open(root) as opened, opened.client("good") as good:
        following = opened.follow(timeout=60)
        with pytest.raises(Corruption, match="is not UTF-8"):
            next(following)
        assert next(following).value == b"a record"
        shutil.copytree(root / "bad", root.parent / "copy")
        shutil.rmtree(root / "bad")
        (root.parent / "copy").rename(root / "bad")
        with pytest.raises(Corruption, match="is not UTF-8"):
            next(following)
        following.notice(None)  # a look at everything
        good.append(b"another", key=b"k")
        assert next(following).value == b"another"


SMALL: dict[str, tuple[bytes, int, Callable[[Path], object], type[Exception]]] = {
    "generations.json": (
        msgspec.json.encode([Generation(LOG, 0), Generation("1f" * 16, 7)]),
        1 << 20,
        load_generations,
        Corruption,
    ),
    "reader.positions": (positions.pack({("jfk", 0): Position(0, 7, LOG, 0)}, "somebody"), positions.LARGEST, positions.load, KvspoolError),
    ".hub/retention.json": (
        b'{"version":1,"rules":{"*":{"max_age":2592000.0},"jfk*":{"max_bytes":1073,"by_consumers":true}}}',
        1 << 24,
        lambda path: retention.load(path.parent.parent),
        (Corruption, AccessError),  # type: ignore[dict-item]
    ),
    ".hub/id": (b"0f" * 16, 64, lambda path: root_id(path.parent.parent), Corruption),
    "access.toml": (
        b'[[principals]]\nname = "jfk"\nrole = "client"\nwrite = ["jfk"]\n',
        1 << 24,
        Access.load,
        AccessError,
    ),
    "delays.toml": (b'[source]\npath = "root"\n[decode]\nformat = "json"\n[sink]\npath = "out"\n', 1 << 20, job.load, JobError),
    "delays.json": (
        msgspec.json.encode({"name": "delays", "state": "running", "pid": 1, "started": 1, "updated": 2}),
        pipeline_progress.LARGEST,
        pipeline_progress.read,
        ValueError,
    ),
}


@pytest.mark.parametrize("name", SMALL)
def test_any_small_file_of_a_hub_is_read_or_a_typed_error(tmp_path: Path, name: str) -> None:
    sound, most, load, error = SMALL[name]
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True, mode=0o700)
    for what, data in garbage.of_json(sound, most):
        file.write_bytes(data)
        file.chmod(0o600)
        try:
            load(file)
        except error as caught:
            assert file.name in str(caught) or str(file.parent) in str(caught), (what, caught)


@pytest.mark.parametrize("name", sorted(SMALL.keys() - {"delays.toml"}))  # a job may come out of a pipe: kvspool pipeline run <(...)
def test_a_fifo_for_a_small_file_of_a_hub_blocks_no_process(tmp_path: Path, name: str) -> None:
    _, _, load, error = SMALL[name]
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True, mode=0o700)
    os.mkfifo(file, 0o600)
    kinds: Any = (*error, NotAFile) if isinstance(error, tuple) else (error, NotAFile)
    with every_log.in_time(), pytest.raises(kinds, match="is not a regular file, but a FIFO"):
        load(file)


def test_whatever_the_mark_of_a_mirror_holds_it_is_read_or_damaged(tmp_path: Path) -> None:
    kvspool.create(tmp_path / "jfk", format="kvj").close()
    file = tmp_path / "jfk" / MIRRORED
    shard = MirroredShard(tmp_path, LOG, ShardState("jfk", 0, 0, 0, 0, []))
    for what, data in garbage.of_json(msgspec.json.encode(Mark(LOG)), mirrored_shard.LARGEST_MARK):
        file.write_bytes(data)
        try:
            shard._check_mark()
        except HubError as error:
            assert str(file) in str(error) or str(file.parent) in str(error), what
    fifo(file)
    with every_log.in_time(), pytest.raises(ShardDamaged, match=r"mirror\.json is not a regular file|mirror\.json is damaged"):
        shard._check_mark()


@pytest.mark.parametrize("name", ["lock", "id", "readers/place.positions", "readers/place.lock"])
def test_a_fifo_among_the_files_of_a_hub_blocks_no_process(root: Path, name: str) -> None:
    file = root / PRIVATE / name
    file.unlink(missing_ok=True)
    os.mkfifo(file, 0o600)

    def use() -> None:
        with Store(root):
            ShardIndex(root).close()
        with hub.open(root) as opened:
            opened.reader("place").close()

    with every_log.in_time(), pytest.raises((Corruption, FormatError), match=f"{file} is not a regular file, but a FIFO"):
        use()


def test_a_reader_does_not_move_past_a_shard_that_cannot_be_opened(root: Path) -> None:
    no_utf8(root / "bad" / settings.NAME)
    with hub.open(root) as opened, opened.reader("place") as reader:
        before = dict(reader.positions)
        for move in (reader.rewind, lambda: reader.seek_time(datetime.now(UTC))):
            with pytest.raises(Corruption, match="is not UTF-8"):
                move()
            assert reader.positions == before
