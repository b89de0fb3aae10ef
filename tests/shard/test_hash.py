"""The hash of a key, both twins: it is part of the format, so the same key goes to the same shard forever."""

from __future__ import annotations

from array import array
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loops import twins

from kvspool.kernel import frames
from shard import route
from shard.kernel import hash, hash_py

VECTORS = [(b"", 0x1CD9), (b"a", 0xCD20), (b"hello", 0x6334), (b"key-000000000", 0x2C5B), (b"key-000000001", 0x2DC4)]
"""Keys and hashes as the format page has them."""

PUBLISHED = [(b"", 0x811C9DC5), (b"a", 0xE40C292C), (b"foobar", 0xBF9CF968)]
"""FNV-1a of 32 bits, from the test vectors of its authors."""


TWINS = twins("shard.kernel.hash")
both_twins = pytest.mark.parametrize("twin", TWINS, ids=lambda module: module.__name__.rpartition(".")[2])
keys_with_none = st.lists(st.none() | st.binary(max_size=20), max_size=50)


def fnv_1a(key: bytes) -> int:
    """Return FNV-1a of 32 bits, written down anew: in big integers, with the prime as its sum of powers."""
    state = 0x811C9DC5
    for byte in key:
        state ^= byte
        state = (state + (state << 1) + (state << 4) + (state << 7) + (state << 8) + (state << 24)) % 2**32
    return state


def folded(key: bytes) -> int:
    high, low = divmod(fnv_1a(key), 1 << 16)
    return high ^ low


@both_twins
@pytest.mark.parametrize(("key", "expected"), VECTORS, ids=[repr(key) for key, _ in VECTORS])
def test_the_hash_of_the_format_s_vectors(twin: ModuleType, key: bytes, expected: int) -> None:
    assert twin.hash16(key) == expected


@pytest.mark.parametrize(("key", "expected"), PUBLISHED)
def test_the_independent_computation_gives_the_published_values(key: bytes, expected: int) -> None:
    assert fnv_1a(key) == expected


@both_twins
@given(key=st.binary(max_size=300))
def test_the_hash_is_fnv_1a_folded_to_16_bits(twin: ModuleType, key: bytes) -> None:
    assert twin.hash16(key) == folded(key)


@both_twins
def test_a_key_of_the_largest_size_is_hashed_whole(twin: ModuleType) -> None:
    key = bytes(range(251)) * 261
    assert twin.hash16(key) == folded(key)
    assert twin.hash16(key[:-1]) == folded(key[:-1])


@both_twins
@given(keys=keys_with_none, bits=st.integers(0, 10), turn=st.integers(0, 2**40))
def test_hash_column_puts_each_key_where_hash16_does_and_the_others_in_turn(
    twin: ModuleType, keys: list[bytes | None], bits: int, turn: int
) -> None:
    mask = (1 << bits) - 1
    offsets = array("i", [0])
    for key in keys:
        offsets.append(offsets[-1] + len(key or b""))
    shards = array("i", [-1] * len(keys))

    after = twin.hash_column(
        memoryview(offsets),
        memoryview(b"".join(key or b"" for key in keys)),
        memoryview(bytes(key is not None for key in keys)),
        mask,
        turn,
        memoryview(shards),
    )

    expected, expected_turn = [], turn
    for key in keys:
        expected.append(expected_turn & mask if key is None else twin.hash16(key) & mask)
        expected_turn += key is None
    assert list(shards) == expected
    assert after == expected_turn


@both_twins
def test_hash_column_reads_a_slice_that_begins_in_the_middle_of_the_bytes(twin: ModuleType) -> None:
    shards = array("i", [-1, -1])
    twin.hash_column(memoryview(array("i", [3, 8, 8])), memoryview(b"xxxhello"), memoryview(b"\1\1"), 0x3FF, 0, memoryview(shards))
    assert list(shards) == [twin.hash16(b"hello") & 0x3FF, twin.hash16(b"") & 0x3FF]


@both_twins
@given(data=st.data(), bits=st.integers(0, 5))
def test_group_sorts_the_rows_by_shard_and_keeps_their_order(twin: ModuleType, data: st.DataObject, bits: int) -> None:
    shards = data.draw(st.lists(st.integers(0, (1 << bits) - 1), max_size=60))
    ends, rows = array("i", bytes(4 << bits)), array("i", [-1] * len(shards))

    twin.group(memoryview(array("i", shards)), memoryview(ends), memoryview(rows))

    starts = [0, *ends[:-1]]
    for shard, (start, end) in enumerate(zip(starts, ends, strict=True)):
        assert list(rows[start:end]) == [row for row, found in enumerate(shards) if found == shard]
    assert ends[-1] == len(shards)


def test_the_twin_that_is_used_is_the_one_that_the_frame_loops_use() -> None:
    is_compiled = hash.hash16 is not hash_py.hash16
    assert is_compiled == (frames.TWIN == "compiled")


@given(key=st.binary(max_size=40), bits=st.integers(0, 9))
def test_one_more_bit_splits_each_shard_in_two(key: bytes, bits: int) -> None:
    shard = route.shard_of(key, bits)
    assert route.shard_of(key, bits + 1) in (shard, shard + (1 << bits))


def test_without_bits_every_key_belongs_to_shard_0() -> None:
    assert {route.shard_of(key, 0) for key, _ in VECTORS} == {0}


def test_the_keys_of_a_fleet_spread_evenly() -> None:
    counts = [0] * 16
    for number in range(16_000):
        counts[route.shard_of(b"key-%09d" % number, 4)] += 1
    assert min(counts) > 800
    assert max(counts) < 1200
