"""How far a pipeline is, as a file that anybody could have written: what is shown of it is checked."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from clocks import StoppedClock

import hub
from hub.root import pipeline_progress
from hub.root.pipeline_progress import PipelineProgress, ShardProgress
from hub.server.pipelines import Pipelines
from kvspool import system

KNOWN: dict[str, Any] = dict(name="delays", job="/jobs/delays.toml", sink="/out", state="running", pid=7, started=1, updated=2)
HOSTILE = [
    b"",
    b"null",
    b"[" * 100_000,
    b"\xff",
    msgspec.json.encode(PipelineProgress(**{**KNOWN, "name": "../../etc"})),
    msgspec.json.encode(PipelineProgress(**{**KNOWN, "name": "<img src=x>"})),
    msgspec.json.encode(PipelineProgress(**{**KNOWN, "records": -1})),
    msgspec.json.encode(PipelineProgress(**{**KNOWN, "late": -1})),
    msgspec.json.encode(PipelineProgress(**{**KNOWN, "batch": 1 << 63})),
    msgspec.json.encode({**KNOWN, "state": "<b>fine</b>"}),
    msgspec.json.encode({**KNOWN, "rate": "fast"}),
    msgspec.json.encode(KNOWN)[:-1] + b',"rate":1e999}',
    msgspec.json.encode({**KNOWN, "error": "x" * pipeline_progress.LARGEST}),
    msgspec.json.encode(KNOWN)[:-1] + b',"durations":{"triggerExecution":1%s}}' % (b"0" * 400),
    msgspec.json.encode({**KNOWN, "durations": {"addBatch": -1}}),
    msgspec.json.encode({**KNOWN, "shards": [{"topic": "JFK", "partition": 0, "next": 1 << 63, "end": 0}]}),
    msgspec.json.encode({**KNOWN, "shards": [{"topic": "JFK", "partition": -2, "next": 0, "end": -1}]}),
]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    hub.create(tmp_path / "root").close()
    pipeline_progress.make_directory(tmp_path / "root")
    return tmp_path / "root"


def test_what_was_written_is_read(root: Path) -> None:
    shards = (ShardProgress("JFK", 0, 5, 9), ShardProgress("JFK", 1, 5, -1))
    told = PipelineProgress(**KNOWN, lag=4, rate=2.5, durations={"addBatch": 12}, shards=shards)
    pipeline_progress.write(pipeline_progress.path_in(root, "delays"), told)
    assert pipeline_progress.read(pipeline_progress.path_in(root, "delays")) == told
    assert [one.lag for one in shards] == [4, -1]
    assert pipeline_progress.path_in(root, "delays").stat().st_mode & 0o777 == 0o600
    assert pipeline_progress.all_of(root) == [told]


@pytest.mark.parametrize("content", HOSTILE, ids=range(len(HOSTILE)))
def test_what_no_pipeline_wrote_is_left_out(root: Path, content: bytes) -> None:
    path = pipeline_progress.path_in(root, "delays")
    path.write_bytes(content)
    with pytest.raises(ValueError):
        pipeline_progress.read(path)
    assert pipeline_progress.all_of(root) == []


def test_a_file_of_another_name_a_link_and_a_pipe_are_left_out(root: Path) -> None:
    folder = pipeline_progress.directory_of(root)
    pipeline_progress.write(folder / "other.json", PipelineProgress(**KNOWN))
    pipeline_progress.write(folder / "delays.json.tmp", PipelineProgress(**KNOWN))
    os.symlink(folder / "other.json", folder / "delays.json")
    os.mkfifo(folder / "pipe.json")
    (folder / "folder.json").mkdir()
    assert pipeline_progress.all_of(root) == []


def test_a_hub_looks_at_so_many_and_no_more(root: Path) -> None:
    for number in range(pipeline_progress.MOST + 5):
        name = f"job{number:03}"
        path = pipeline_progress.path_in(root, name)
        path.write_bytes(msgspec.json.encode(PipelineProgress(**{**KNOWN, "name": name})))
    assert len(pipeline_progress.all_of(root)) == pipeline_progress.MOST


def test_wrong_files_are_not_looked_at_without_end(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline_progress, "MOST_LOOKED_AT", 3)
    for number in range(3):
        (pipeline_progress.directory_of(root) / f"a{number}.json").touch()
    pipeline_progress.write(pipeline_progress.path_in(root, "delays"), PipelineProgress(**KNOWN))
    assert pipeline_progress.all_of(root) == []
    (pipeline_progress.directory_of(root) / "a0.json").unlink()
    assert [one.name for one in pipeline_progress.all_of(root)] == ["delays"]


def test_a_pipeline_that_says_nothing_any_more_is_silent(root: Path, clock: StoppedClock) -> None:
    told = PipelineProgress(**{**KNOWN, "updated": clock.now()}, error="x" * 9999, batch_ended=1 << 62, late=5)
    pipeline_progress.write(pipeline_progress.path_in(root, "delays"), told)
    seen = Pipelines(root)
    seen.look()
    (found,) = seen.statuses
    assert (found.state, found.batch_ended, len(found.error), found.late) == ("running", clock.now(), 500, 5)
    clock.pass_(pipeline_progress.SILENT + 1)
    seen.look()
    assert [one.state for one in seen.statuses] == ["silent"]
    pipeline_progress.write(pipeline_progress.path_in(root, "delays"), PipelineProgress(**{**KNOWN, "state": "done"}))
    clock.pass_(2)
    seen.look()
    assert [one.state for one in seen.statuses] == ["done"]


def test_a_root_whose_pipelines_may_not_be_seen_has_none(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path) -> list[str]:
        raise PermissionError(13, "not yours", str(path))

    monkeypatch.setattr(system.port, "names", refused)
    assert pipeline_progress.all_of(root) == []


def test_a_root_without_pipelines_has_none(tmp_path: Path) -> None:
    seen = Pipelines(tmp_path / "nowhere")
    seen.look()
    assert seen.statuses == []
