"""Names of shard directories, and what is found under a root."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvspool
from shard import ConflictingShardSets, IncompleteShardSet, route

ALPHABET = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-"
prefixes = st.text(ALPHABET, max_size=20)

BAD_PREFIXES = ["a/b", "a.b", ".", "..", "a\n", "\n", "a\0", "\0", "a b", "é", "٣", "１", "a\\b", "*", "a:b", "~"]
NOT_STRINGS: list[Any] = [None, b"a", 1, True]
BAD_BITS: list[Any] = [-1, 11, 16, 2**40, True, False, "1", 1.0, None]

NO_SHARD_NAMES = [
    "",
    "p",
    "p.1",
    "p.1.00",
    "p.1.0000",
    "p.0.000",
    "p.b.000",
    "p.A.000",
    "p.1.00A",
    "p.1.400",
    "p.10.000",
    "p.1.000\n",
    "p.1.000.",
    "..1.000",
    "p..1.000",
    "p.q.1.000",
    "p/1.000",
    "p.1.0 0",
    "p.1.٠٠٠",
    "p.１.000",
    "p\0.1.000",
    "1000",
    "1.-01",
    ".p.1.000.00112233445566778899aabbccddeeff.new",
]


def make_log(path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    kvspool.create(path, capacity=4096).close()


@pytest.mark.parametrize(
    ("prefix", "bits", "index", "name"),
    [
        ("p", 10, 0x1FF, "p.a.1ff"),
        ("p", 10, 0x3FF, "p.a.3ff"),
        ("p", 4, 10, "p.4.00a"),
        ("", 1, 0, "1.000"),
        ("", 1, 1, "1.001"),
        ("a-B_9", 9, 511, "a-B_9.9.1ff"),
        ("p", 0, 0, "p"),
    ],
)
def test_names_are_those_of_the_format(prefix: str, bits: int, index: int, name: str) -> None:
    assert route.directory_name(prefix, bits, index) == name
    if bits:
        assert route.parse_name(name) == (prefix, bits, index)


@given(prefix=prefixes, bits=st.integers(1, 10), data=st.data())
def test_a_name_is_read_back_as_it_was_made(prefix: str, bits: int, data: st.DataObject) -> None:
    index = data.draw(st.integers(0, (1 << bits) - 1))
    assert route.parse_name(route.directory_name(prefix, bits, index)) == (prefix, bits, index)


@pytest.mark.parametrize("bits", range(1, 11))
def test_the_first_and_the_last_index_of_each_number_of_bits_are_read_back(bits: int) -> None:
    for prefix in ("", "p", "1", "-", "a" * 200):
        for index in (0, (1 << bits) - 1):
            assert route.parse_name(route.directory_name(prefix, bits, index)) == (prefix, bits, index)
        with pytest.raises(ValueError, match=f"with {bits} bits an index must be 0..{(1 << bits) - 1}"):
            route.directory_name(prefix, bits, 1 << bits)


@given(one=st.tuples(prefixes, st.integers(1, 10), st.integers(0, 1)), other=st.tuples(prefixes, st.integers(1, 10), st.integers(0, 1)))
def test_two_shards_never_have_the_same_name(one: tuple[str, int, int], other: tuple[str, int, int]) -> None:
    assert (route.directory_name(*one) == route.directory_name(*other)) == (one == other)


@pytest.mark.parametrize("name", [*NO_SHARD_NAMES, ".1.000"], ids=ascii)
def test_another_name_is_no_shard(name: str) -> None:
    assert route.parse_name(name) is None


def test_an_index_that_its_bits_do_not_allow_is_parsed_so_that_it_can_be_reported() -> None:
    assert route.parse_name("p.1.3ff") == ("p", 1, 0x3FF)


@pytest.mark.parametrize("prefix", [*BAD_PREFIXES, *NOT_STRINGS], ids=ascii)
def test_a_prefix_with_other_characters_is_refused(prefix: Any) -> None:
    with pytest.raises(ValueError, match="a prefix may have only the characters"):
        route.check_prefix(prefix)
    with pytest.raises(ValueError, match="a prefix may have only the characters"):
        route.directory_name(prefix, 1, 0)


@pytest.mark.parametrize("bits", BAD_BITS, ids=repr)
def test_bits_out_of_range_are_refused(bits: Any) -> None:
    with pytest.raises(ValueError, match=r"bits must be 0\.\.10"):
        route.check_bits(bits)
    with pytest.raises(ValueError, match=r"bits must be 0\.\.10"):
        route.directory_name("p", bits, 0)


@pytest.mark.parametrize(("bits", "index"), [(0, 1), (1, 2), (1, -1), (3, 8), (10, 1024), (10, -(2**40)), (1, True), (1, False), (2, 1.0)])
def test_an_index_out_of_range_is_refused(bits: int, index: Any) -> None:
    with pytest.raises(ValueError, match=rf"with {bits} bits an index must be 0\.\.{(1 << bits) - 1}"):
        route.directory_name("p", bits, index)


def test_a_single_shard_without_bits_needs_a_prefix() -> None:
    with pytest.raises(ValueError, match="would be the root itself"):
        route.directory_name("", 0, 0)


def test_scan_finds_the_sets_by_prefix_and_nothing_else(tmp_path: Path) -> None:
    for name in ("b.1.000", "b.1.001", "2.003", "a.a.3ff", "solo"):
        make_log(tmp_path / name)
    for name in NO_SHARD_NAMES:
        if name and "/" not in name and "\0" not in name and name not in ("p",):
            (tmp_path / name).mkdir()
    (tmp_path / "no-log").mkdir()
    (tmp_path / "file").write_text("no log either", encoding="utf-8")
    (tmp_path / "limits.txt").touch()

    found = route.scan(tmp_path)

    assert list(found) == ["", "a", "b", "solo"]
    assert {prefix: one.indexes for prefix, one in found.items()} == {"": {2: {3}}, "a": {10: {1023}}, "b": {1: {0, 1}}, "solo": {0: {0}}}


def test_a_shard_of_the_empty_prefix_has_one_name(tmp_path: Path) -> None:
    make_log(tmp_path / "1.000")
    make_log(tmp_path / ".1.001")
    assert route.scan(tmp_path)[""].missing == [1]


def test_scan_of_an_empty_root_finds_nothing(tmp_path: Path) -> None:
    assert route.scan(tmp_path) == {}


def test_a_complete_set_has_its_paths_in_order(tmp_path: Path) -> None:
    found = route.ShardDirectories("p", {2: {3, 1, 0, 2}})
    found.check_complete(tmp_path)
    assert found.bits == 2
    assert found.missing == []
    assert not found.is_being_made
    assert found.paths(tmp_path) == [(index, tmp_path / f"p.2.00{index}") for index in range(4)]


@pytest.mark.parametrize(
    ("indexes", "missing", "is_being_made"),
    [({0}, [1, 2, 3], True), ({0, 1, 2}, [3], True), ({1, 2, 3}, [0], False), ({0, 2, 3}, [1], False), ({0, 2}, [1, 3], False)],
)
def test_only_a_set_without_its_last_shards_is_being_made(
    tmp_path: Path, indexes: set[int], missing: list[int], is_being_made: bool
) -> None:
    found = route.ShardDirectories("p", {2: indexes})
    assert found.missing == missing
    assert found.is_being_made == is_being_made
    with pytest.raises(IncompleteShardSet, match=f"{len(missing)} of the 4 shards of prefix 'p' are missing: p.2.00{missing[0]}"):
        found.check_complete(tmp_path)


def test_of_many_missing_shards_the_first_five_are_named(tmp_path: Path) -> None:
    with pytest.raises(IncompleteShardSet, match=r"1023 of the 1024 .* p\.a\.001, p\.a\.002, p\.a\.003, p\.a\.004, p\.a\.005 \.\.\.$"):
        route.ShardDirectories("p", {10: {0}}).check_complete(tmp_path)


def test_two_numbers_of_bits_conflict() -> None:
    with pytest.raises(ConflictingShardSets, match="prefix 'p' has shards of 1 and of 2 bits"):
        _ = route.ShardDirectories("p", {2: {0}, 1: {0, 1}}).bits


def test_an_index_beyond_the_bits_conflicts() -> None:
    with pytest.raises(ConflictingShardSets, match="prefix 'p' has 1 bits, but a shard with index 0x2"):
        _ = route.ShardDirectories("p", {1: {0, 1, 2}}).missing
