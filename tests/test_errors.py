"""The classes of errors: what each is besides, and what the command returns for it."""

from __future__ import annotations

import inspect
from importlib import metadata

import pytest

import kvspool
from kvspool import Gap, GapError, errors

CLASSES = [found for _, found in inspect.getmembers(errors, inspect.isclass) if found.__module__ == errors.__name__]


@pytest.mark.parametrize(
    ("name", "also"),
    [
        ("LogNotFound", FileNotFoundError),
        ("LogExists", FileExistsError),
        ("TooLarge", ValueError),
        ("Unencodable", TypeError),
        ("Undecodable", ValueError),
        ("OutOfRange", ValueError),
        ("LockTimeout", TimeoutError),
        ("NotALog", errors.FormatError),
        ("UnknownVersion", errors.FormatError),
        ("MismatchedFiles", errors.FormatError),
        ("MissingExtra", ImportError),
        ("Truncated", errors.Corruption),
    ],
)
def test_an_error_is_also_what_python_calls_it(name: str, also: type[Exception]) -> None:
    found = getattr(errors, name)
    assert issubclass(found, also)
    assert issubclass(found, kvspool.KvspoolError)


def test_every_error_is_one_of_the_packages_own_and_has_an_exit_code_and_a_meaning() -> None:
    assert len(CLASSES) > 15
    for found in CLASSES:
        assert issubclass(found, errors.KvspoolError)
        assert 1 <= found.exit_code <= 8
        assert found.__doc__


def test_the_module_lists_every_error() -> None:
    assert errors.__doc__ is not None
    for found in CLASSES:
        assert found.__name__ in errors.__doc__


def test_a_missing_extra_is_installed_by_the_names_of_its_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    error = errors.MissingExtra.of("archive", "archives need the package zstandard", ImportError("none"))
    assert str(error) == "archives need the package zstandard (none). The extra archive has it: pip install 'zstandard>=0.22'"

    def missing(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", missing)
    assert "pip install 'kvspool[archive]'" in str(errors.MissingExtra.of("archive", "archives", ImportError("none")))


def test_a_gap_error_carries_its_gap_and_says_what_was_lost() -> None:
    error = GapError(Gap(3, 9, "overrun", "/logs/a"))
    assert error.gap.count == 7
    assert str(error) == "7 records lost (overrun): sequences 3 to 9 of /logs/a"
