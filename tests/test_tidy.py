"""The rooms of the packages: which imports which, and that the map in HACKING.md is the tree; and the names in them.

Imports for type checkers and imports inside of functions count as all others do.
"""

from __future__ import annotations

import ast
import re
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("kvspool", "shard", "hub", "pyspark_kvspool")
MOST_AT_THE_ROOT = 12  # modules
MOST_LINES = 600  # of a file
MOST_COLUMNS = 140
MOST_OF_A_FUNCTION = 60  # lines

Edge = tuple[str, str]  # the module that imports, and the one that it imports

# Each line may import itself and all lines before it; rooms in one line don't import each other.
ORDER = (
    ("kvspool.errors", "kvspool.gap", "kvspool.importing", "kvspool.keyed", "kvspool.options", "kvspool.record"),
    ("kvspool.system",),
    ("kvspool.kernel",),
    ("kvspool.engine",),
    ("kvspool.reader",),
    ("kvspool.groups",),
    ("kvspool.tasks",),
    ("kvspool.log", "kvspool.producers", "kvspool.writer"),
    ("kvspool.spool", "kvspool.journal", "kvspool.queue"),
    ("kvspool.opening",),
    ("kvspool.arrow",),
    ("kvspool.transfer",),
    ("kvspool",),  # the names of the package
    ("kvspool.aio", "kvspool.logging", "kvspool.testing"),
    ("kvspool.otel",),
    ("kvspool.cli",),
    ("shard",),
    ("hub",),
    ("pyspark_kvspool",),
)
IN_ONE_LAYER = {0, 7}  # whose modules import each other, though not in a circle

# The one function with more lines: all of its state is in local variables, which the compiled twin keeps in registers.
LONG_LOOPS = {"kvspool.kernel.reader_py.gather"}


# Only `opening` asks for the kind of a log. Ask a verb, a capability or a method of `Log` instead.
KINDS = set("Spool Journal FixedJournal JournalCursor SpoolCursor".split())


def name_of(path: Path) -> str:
    """Return the name that a file is imported by."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def sources() -> dict[str, Path]:
    """Return every module of the packages, by name."""
    return {name_of(path): path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))}


@cache
def tools() -> list[Path]:
    """Return every program and module of `tools`, also those without a suffix."""
    files = [path for path in (ROOT / "tools").rglob("*") if path.is_file() and path.suffix in ("", ".py")]
    return sorted(path for path in files if path.suffix or path.read_bytes().startswith(b"#!/usr/bin/env python3"))


def imported(path: Path) -> Iterator[str]:
    """Yield what a file imports, wherever that stands: modules, and names in them as "module.name"."""
    for node in ast.walk(ast.parse(path.read_bytes(), path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@cache
def edges() -> frozenset[Edge]:
    """Return which module of the packages imports which."""
    modules = sources()
    return frozenset(
        (importer, found)
        for importer, path in modules.items()
        for name in imported(path)
        if (found := name if name in modules else name.rpartition(".")[0]) in modules and found != importer
    )


def circles(graph: Iterable[Edge]) -> list[set[str]]:
    """Return the sets of modules that import each other, directly or through others (Tarjan)."""
    following: dict[str, list[str]] = {}
    for importer, name in graph:
        following.setdefault(importer, []).append(name)
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    waiting: list[str] = []
    found: list[set[str]] = []

    def visit(module: str) -> None:
        order[module] = lowest[module] = len(order)
        waiting.append(module)
        for other in following.get(module, ()):
            if other not in order:
                visit(other)
            if other in waiting:
                lowest[module] = min(lowest[module], lowest[other])
        if lowest[module] == order[module]:
            at = waiting.index(module)
            members = set(waiting[at:])
            del waiting[at:]
            if len(members) > 1:
                found.append(members)

    for module in sorted(following):
        if module not in order:
            visit(module)
    return found


def level(module: str) -> int:
    """Return the line of ORDER that a module belongs to: that of the longest name in it."""
    return max((len(room), at) for at, rooms in enumerate(ORDER) for room in rooms if module == room or is_in(module, room))[1]


def is_in(module: str, room: str) -> bool:
    """Return whether a module is in a room. The package itself is no room: its modules have lines of their own."""
    return room != "kvspool" and module.startswith(f"{room}.")


def test_a_circle_is_found() -> None:
    assert circles({("a", "b"), ("b", "c"), ("c", "a"), ("c", "d"), ("d", "e")}) == [{"a", "b", "c"}]
    assert circles({("a", "b"), ("b", "c"), ("a", "c")}) == []


def test_no_modules_import_each_other() -> None:
    assert circles(edges()) == []


def test_imports_go_from_the_top_to_the_bottom() -> None:
    assert [edge for edge in sorted(edges()) if level(edge[0]) < level(edge[1])] == []


def questions(path: Path) -> int:
    """Return how often a file asks for the kind of a log."""

    def asks(node: ast.AST) -> bool:
        if isinstance(node, ast.Compare):
            is_kind = isinstance(node.left, ast.Attribute) and node.left.attr == "kind"
            return is_kind and isinstance(node.comparators[0], ast.Constant | ast.Tuple)
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            return False
        if node.func.id == "hasattr":
            return ast.unparse(node.args[0]).rpartition(".")[2] in ("log", "_log")
        names = {one.attr if isinstance(one, ast.Attribute) else getattr(one, "id", "") for one in ast.walk(node)}
        return node.func.id == "isinstance" and bool(names & KINDS)

    return sum(map(asks, ast.walk(ast.parse(path.read_bytes(), path))))


def test_only_opening_asks_for_the_kind_of_a_log() -> None:
    found = {module: questions(path) for module, path in sources().items() if not module.startswith("kvspool.opening.")}
    assert [module for module, count in found.items() if count] == []


def test_the_stores_do_not_import_each_other() -> None:
    def room(module: str) -> str:
        return ".".join(module.split(".")[:2])

    beside = [
        (importer, name)
        for importer, name in sorted(edges())
        if level(importer) == level(name) and level(importer) not in IN_ONE_LAYER and room(importer) != room(name)
    ]
    assert [edge for edge in beside if edge[0].startswith("kvspool.")] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_no_package_imports_what_another_one_keeps_to_itself(package: str) -> None:
    private = [
        f"{module}: {name}"
        for module, path in sources().items()
        if module.partition(".")[0] == package
        for name in imported(path)
        if name.partition(".")[0] in set(PACKAGES) - {package} and any(re.match("_[^_]", part) for part in name.split("."))
    ]
    assert private == []


def test_outside_of_kvspool_only_the_loops_of_shard_use_its_loops() -> None:
    users = {importer for importer, name in edges() if name.startswith("kvspool.kernel.") and not importer.startswith("kvspool.")}
    assert users and all(user.startswith("shard.kernel.") for user in users)


def test_the_loops_have_no_times_of_their_own() -> None:
    """How long a poll, a sleep or a check counts is the engine's decision: it passes the numbers."""
    duration = re.compile(r"^[A-Z_]+(?:, [A-Z_]+)* = [^#]*#\W*(?:most )?(?:ns|us|ms|seconds)\b", re.MULTILINE)
    assert duration.search("POLL = 0.5  # seconds between two checks") and duration.search("FIRST, LAST = 4_000, 16_000  # ns of a sleep")
    sources = (ROOT / "kvspool" / "kernel").glob("*.py")
    assert [f"{path.name}: {found}" for path in sources for found in duration.findall(path.read_text(encoding="utf-8"))] == []


def test_few_modules_are_at_the_root_of_kvspool() -> None:
    assert len(list((ROOT / "kvspool").glob("*.py"))) <= MOST_AT_THE_ROOT


def test_no_file_is_longer_than_600_lines() -> None:
    written = (path for package in PACKAGES for kind in ("*.py", "*.pxd", "*.h", "*.js") for path in (ROOT / package).rglob(kind))
    long = {str(path.relative_to(ROOT)) for path in written if path.read_bytes().count(b"\n") > MOST_LINES}
    assert long == set()


@pytest.mark.parametrize("kind", ["py", "pxd", "h"])
def test_no_line_is_longer_than_140_columns(kind: str) -> None:
    """Ruff checks the tests and tools. A note to a checker at the end of a line does not count."""
    note = re.compile(r"  # (?:type: ignore|noqa|fmt: skip).*")
    files = [path for package in PACKAGES for path in (ROOT / package).rglob(f"*.{kind}")]
    lines = ((path, at, line) for path in files for at, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1))
    long = [f"{path.relative_to(ROOT)}:{at}" for path, at, line in lines if len(note.sub("", line)) > MOST_COLUMNS]
    assert files and long == []


def length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the number of lines of a function, without its signature and its docstring."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return 1 + (function.end_lineno or 0) - body[0].lineno if body else 0


def test_the_length_of_a_function_is_that_of_its_statements() -> None:
    text = 'def name(\n    first,\n):\n    """One.\n\n    Two.\n    """\n    first += 1\n    return (\n        first\n    )\n'
    (function,) = ast.parse(text).body
    assert isinstance(function, ast.FunctionDef) and length(function) == 4


def test_no_function_is_longer_than_60_lines_but_those_that_are_listed() -> None:
    functions = (
        (f"{module}.{node.name}", length(node))
        for module, path in sources().items()
        for node in ast.walk(ast.parse(path.read_bytes(), path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    assert {name for name, lines in functions if lines > MOST_OF_A_FUNCTION} == LONG_LOOPS


# The map in HACKING.md.

ENTRY = re.compile(r"^ {10}(?P<name>[a-z_]+)/ +(?P<text>.*(?:\n {11,}.*)*)$", re.MULTILINE)
LINE_OF_MODULES = re.compile(r"^(?:[a-z]+/ +| {10})(?P<names>[a-z_]+(?:, [a-z_]+)*)(?: {2,}|$)", re.MULTILINE)
MAPPED = ("kvspool", "shard", "hub")


def mapped(package: str) -> str:
    """Return the part of the map that is about a package: its line, and the indented lines after it."""
    text = (ROOT / "HACKING.md").read_text(encoding="utf-8")
    found = re.search(rf"^{package}/ .*\n(?: .*\n)*", text.partition("## Map")[2], re.MULTILINE)
    assert found is not None
    return found.group()


def entries(package: str) -> dict[str, str]:
    """Return the text of the map about each room of a package."""
    return {entry["name"]: re.sub(r"\s+", " ", entry["text"]) for entry in ENTRY.finditer(mapped(package))}


def modules_in(folder: Path) -> set[str]:
    """Return the modules in a folder; of a loop, its chooser represents all."""
    return {path.stem for path in folder.glob("*.py") if path.stem != "__init__" and not path.stem.endswith("_py")}


@pytest.mark.parametrize("package", MAPPED)
def test_the_map_names_every_room_and_every_module_at_the_root(package: str) -> None:
    folder = ROOT / package
    assert sorted(entries(package)) == sorted(path.parent.name for path in folder.glob("*/__init__.py"))
    names = [name for line in LINE_OF_MODULES.finditer(mapped(package)) for name in line["names"].split(", ")]
    assert sorted(names) == sorted(modules_in(folder))


def test_the_map_has_the_rooms_of_kvspool_in_the_order_of_their_imports() -> None:
    rooms = [room.partition(".")[2] for line in ORDER for room in line if room.startswith("kvspool.")]
    assert list(entries("kvspool")) == [room for room in rooms if (ROOT / "kvspool" / room).is_dir()]


@pytest.mark.parametrize(("package", "room"), [(package, room) for package in MAPPED for room in entries(package) if room != "cli"])
def test_the_map_names_the_modules_of_each_room(package: str, room: str) -> None:
    lists = entries(package)[room].partition(": ")[2].split("; ")  # each may have a headline
    names = [name for text in lists for name in text.rpartition(": ")[2].split(", ")]
    assert sorted(names) == sorted(modules_in(ROOT / package / room))


# Names.

# Fields of reports with words that the glossary replaces: they are keys of JSON and of the public interface.
REPORTED = {"behind", "behind_is_estimate", "left_behind", "written_anew"}
PART = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+")


def replaced_words() -> set[str]:
    """Return the words that no name may have, from the glossary."""
    table = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8").partition("## Words in names")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ")[0] for line in table.splitlines() if line.startswith("| ")][1:]
    return {word.strip() for row in rows for word in row.split(",")}


def names_in(path: Path) -> set[str]:
    """Return the names in a file of Python or Cython. Tools have no suffix."""
    if path.suffix in ("", ".py"):
        with path.open("rb") as file:
            return {token.string for token in tokenize.tokenize(file.readline) if token.type == tokenize.NAME}
    return set(re.findall(r"[A-Za-z_]\w*", re.sub(r"#.*", "", path.read_text(encoding="utf-8"))))


def words_of(name: str) -> set[str]:
    """Return the words of a name, in small letters."""
    return {part.lower() for part in PART.findall(name)}


def test_a_name_is_split_at_underscores_and_capitals() -> None:
    assert words_of("_FrameSurvey_of2HTTPPairs") == {"frame", "survey", "of", "http", "pairs"}
    assert {"booking", "ledger", "settle"} <= replaced_words()


def test_no_name_has_a_word_that_the_glossary_replaces() -> None:
    replaced = replaced_words()
    found = {name for path in sources().values() for name in names_in(path) if words_of(name) & replaced}
    found |= {name for path in (ROOT / "kvspool").rglob("*.pxd") for name in names_in(path) if words_of(name) & replaced}
    assert found == REPORTED


def test_no_name_of_a_tool_has_a_word_that_the_glossary_replaces() -> None:
    replaced = replaced_words() - {"ledger"}  # that of a campaign is one: an account outside of all logs
    found = {f"{path.relative_to(ROOT)}: {name}" for path in tools() for name in names_in(path) if words_of(name) & replaced}
    assert found == set()


def test_no_two_public_classes_have_the_same_name() -> None:
    classes = Counter(
        node.name
        for path in sources().values()
        for node in ast.parse(path.read_bytes(), path).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and node.name[0].isupper()
    )
    twice = {name for name, count in classes.items() if count > 1}
    assert twice == set()
