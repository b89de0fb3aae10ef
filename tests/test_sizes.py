"""Sizes as people write them."""

from __future__ import annotations

import pytest

from kvspool.engine import sizes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (4096, 4096),
        ("4096", 4096),
        ("4096 B", 4096),
        ("64MiB", 64 << 20),
        ("64M", 64 << 20),
        ("64m", 64 << 20),
        (" 1.5 GiB ", 3 << 29),
        ("2GB", 2_000_000_000),
        ("1kB", 1000),
        ("1KiB", 1024),
        ("1KB", 1000),
        ("4TiB", 1 << 42),
        ("0.5K", 512),
    ],
)
def test_a_size_is_read(text: int | str, size: int) -> None:
    assert sizes.parse(text) == size


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1e6", "1,5 MiB", "1 PiB", "1 MiBs", "0x10", ".5K", "1.K", "64 M iB", "nan"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="a size is a number"):
        sizes.parse(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (64 << 20, "64.0 MiB"),
        (5 << 30, "5.0 GiB"),
        (4 << 40, "4.0 TiB"),
    ],
)
def test_a_size_is_shown(size: int, text: str) -> None:
    assert sizes.show(size) == text
