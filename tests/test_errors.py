"""The classes of errors: what each is besides, and what the command returns for it."""

from __future__ import annotations

import ast
import inspect
import re
from importlib import metadata
from pathlib import Path

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


ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")


def rows(heading: str) -> list[list[str]]:
    """Return the rows of all tables of the page of errors whose first column has this heading."""
    found, is_there = [], False
    for line in PAGE.splitlines():
        cells = line.strip("| ").split(" | ")
        is_there = line.startswith("|") and (is_there or cells[0] == heading)
        if is_there and line.startswith("| `"):
            found.append(cells)
    return found


def classes_of_errors() -> dict[str, int]:
    """Return the public classes of errors in the sources of all packages, with their exit codes."""
    nodes = [
        node
        for package in ("kvspool", "shard", "hub")
        for path in sorted((ROOT / package).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(node, ast.ClassDef)
    ]
    codes = {"KvspoolError": errors.KvspoolError.exit_code}
    while found := [(node, base) for node in nodes if node.name not in codes and (base := _base(node, codes))]:
        for node, base in found:
            own = [line.value for line in node.body if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "exit_code"]
            codes[node.name] = ast.literal_eval(own[0]) if own else codes[base]
    return {name: code for name, code in codes.items() if not name.startswith("_")}


def _base(node: ast.ClassDef, known: dict[str, int]) -> str | None:
    return next((base for base in map(ast.unparse, node.bases) if base in known), None)


def test_the_page_of_errors_has_each_class_with_its_exit_code_its_cause_and_a_way_out() -> None:
    listed = {name.strip("`"): int(code) for name, code, _, _ in rows("error")}
    assert listed == {name: code for name, code in classes_of_errors().items() if name != "KvspoolError"}
    assert len(listed) == len(rows("error")) > 80
    assert [row for row in rows("error") + rows("code") if not all(row)] == []


def test_the_page_of_errors_has_each_code_of_spark() -> None:
    listed = [code for row in rows("code") for code in re.findall(r"`(KVSPOOL_\w+)`", row[0])]
    sources = [path.read_text(encoding="utf-8") for package in ("hub", "pyspark_kvspool") for path in (ROOT / package).rglob("*.py")]
    used = {code for source in sources for code in re.findall(r"\[(KVSPOOL_[A-Z_]+)\]", source)}
    assert used | {f"KVSPOOL_{kind}_DO_NOT_MATCH" for kind in ("OFFSETS", "TIMESTAMPS")} == set(listed)
    assert len(listed) == len(set(listed))
