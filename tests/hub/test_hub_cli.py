"""The commands of a hub root."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from commands import Run

import hub
import shard
from hub.cli.hub import open_log
from hub.cli.serve import half_of_all


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a hub root with two clients, the second of which has no record yet."""
    with hub.create(tmp_path / "root") as made:
        with made.create_client("jfk", bits=2, capacity="64KiB") as shards:
            for at in range(1200):
                shards.append({"n": at}, key=b"%d" % at, timestamp=time.time_ns() - 5_000_000_000)
        made.create_client("lga", bits=0, capacity="8KiB").close()
    return tmp_path / "root"


def test_create_makes_an_empty_root_and_says_so(tmp_path: Path, run: Run) -> None:
    assert run("hub", "create", tmp_path / "a").out == f"created {tmp_path / 'a'}: clients create their shards there\n"
    assert run("hub", "create", tmp_path / "b", "--json").objects == [{"path": str(tmp_path / "b")}]
    assert [list(path.iterdir()) for path in tmp_path.iterdir()] == [[], []]


def test_clients_are_listed_with_what_they_have(root: Path, run: Run) -> None:
    lines = run("hub", "clients", root).out.splitlines()
    (jfk,) = [line for line in lines if "jfk" in line]
    (lga,) = [line for line in lines if "lga" in line]
    cells = re.split(r"\s{2,}", jfk.strip())
    assert cells[:3] == ["jfk", "4", "1,200"]
    assert cells[3].endswith("%)")
    assert cells[4] == "256.0 KiB"
    assert re.split(r"\s{2,}", lga.strip()) == ["lga", "1", "0", "0 B (0 %)", "8.0 KiB", "-", "-"]
    assert "ago" in " ".join(lines)


def test_a_client_with_journals_has_no_capacity(tmp_path: Path, run: Run) -> None:
    with hub.create(tmp_path / "root") as made, made.create_client("jfk", bits=0, format="kvj") as shards:
        shards.append(b"x")
    row = run("hub", "clients", tmp_path / "root").out.splitlines()[-1]
    assert re.split(r"\s{2,}", row)[:5] == ["jfk", "1", "1", "53 B", "-"]


def test_clients_as_json_have_the_figures_of_each_shard(root: Path, run: Run) -> None:
    (clients,) = run("hub", "clients", root, "--json").objects
    assert [(one["client"], one["bits"], one["records"], len(one["shards"])) for one in clients] == [("jfk", 2, 1200, 4), ("lga", 0, 0, 1)]
    assert sum(one["records"] for one in clients[0]["shards"]) == 1200


def test_a_client_that_is_being_made_shows_how_many_shards_it_will_have(root: Path, run: Run) -> None:
    for path in (root / "jfk.2.003").iterdir():
        path.unlink()
    (root / "jfk.2.003").rmdir()
    assert "3 of 4" in run("hub", "clients", root).out


def test_a_root_without_clients_says_so(tmp_path: Path, run: Run) -> None:
    assert run("hub", "clients", tmp_path) == ("", "no clients yet\n")
    assert run("hub", "clients", tmp_path, "--json").out == "[]\n"


def test_read_tail_and_stats_take_a_hub_root(root: Path, run: Run) -> None:
    with hub.open(root) as opened, opened.client("lga") as shards:
        shards.append({"n": "last"})
    found = run("read", root, "--json").objects
    assert len(found) == 1201
    assert {one["client"] for one in found} == {"jfk", "lga"}
    assert "client=jfk" in run("read", root, "--limit", "1").out
    last = [(one["client"], one["value"]["n"]) for one in run("tail", root, "-n", "3", "--json").objects]
    assert last == [("jfk", 1198), ("jfk", 1199), ("lga", "last")]
    assert run("tail", root, "-n", "0", "--follow", "--timeout", "0").out == ""
    (stats,) = run("stats", root, "--json").objects
    assert [Path(one["path"]).name for one in stats] == [*(f"jfk.2.00{index}" for index in range(4)), "lga"]
    assert sum(one["records"] for one in stats) == 1201
    assert "lga" in run("stats", root).out


def test_a_root_with_a_client_is_opened_as_a_hub_root_and_nothing_else_is(root: Path, tmp_path: Path) -> None:
    log = open_log(root)
    assert isinstance(log, hub.HubRoot)
    with log:
        assert log.clients() == ["jfk", "lga"]
    empty, alone, mixed = (tmp_path / name for name in ("empty", "alone", "mixed"))
    empty.mkdir()
    shard.create(alone, bits=1, capacity=4096).close()
    shard.create(mixed, bits=1, capacity=4096).close()
    shard.create(mixed, prefix="p", bits=1, capacity=4096).close()
    assert open_log(empty) is None
    assert open_log(alone) is None
    assert open_log(tmp_path / "none") is None
    log = open_log(mixed)
    assert log is not None
    with log:
        assert log.clients() == ["p"]


@pytest.mark.parametrize(
    ("line", "folder", "name"), [("0::/a/b", "", "memory.max"), ("4:memory:/a/b", "memory", "memory.limit_in_bytes")], ids=["2", "1"]
)
def test_the_memory_of_a_hub_is_bounded_by_its_control_group(tmp_path: Path, line: str, folder: str, name: str) -> None:
    (tmp_path / "groups").write_text(f"9:name=systemd:/\n{line}\n")
    group = tmp_path / folder / "a" / "b"
    group.mkdir(parents=True)
    whole = half_of_all(tmp_path / "groups", tmp_path)
    (group / name).write_text("max\n")
    assert half_of_all(tmp_path / "groups", tmp_path) == whole
    (group.parent / name).write_text("2000000\n")
    assert half_of_all(tmp_path / "groups", tmp_path) == 1_000_000
    (group / name).write_text("1000000\n")
    assert half_of_all(tmp_path / "groups", tmp_path) == 500_000
