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

Edge = tuple[str, str]  # the module that imports, and the one that it imports

# Each line may import itself and all lines before it; rooms in one line don't import each other.
ORDER = (
    ("kvspool.errors", "kvspool.gap", "kvspool.importing", "kvspool.keyed", "kvspool.options", "kvspool.record"),
    ("kvspool.system",),
    ("kvspool.kernel",),
    ("kvspool.engine",),
    ("kvspool.log", "kvspool.producers", "kvspool.reader", "kvspool.writer"),
    ("kvspool.spool", "kvspool.journal", "kvspool.queue"),
    ("kvspool.opening",),
    ("kvspool.arrow",),
    ("kvspool.transfer",),
    ("kvspool",),  # the names of the package
    ("kvspool.cli",),
    ("shard",),
    ("hub",),
    ("pyspark_kvspool",),
)
IN_ONE_LAYER = {0, 4}  # whose modules import each other, though not in a circle

# Known exceptions, which must not become more: edges that close a circle.
CIRCULAR: set[Edge] = set()
# Files with more lines than MOST_LINES, until they are split. None may join them.
TOO_LONG: set[str] = set()


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


def test_no_modules_import_each_other_but_those_that_are_listed() -> None:
    assert circles(edges() - CIRCULAR) == []


def test_what_is_listed_as_circular_is_so() -> None:
    within = circles(edges())
    assert [edge for edge in sorted(CIRCULAR) if edge not in edges()] == []
    assert [edge for edge in sorted(CIRCULAR) if not any(set(edge) <= circle for circle in within)] == []


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


def test_no_file_is_longer_than_600_lines_but_those_that_are_listed() -> None:
    written = (path for package in PACKAGES for kind in ("*.py", "*.pxd", "*.h", "*.js") for path in (ROOT / package).rglob(kind))
    long = {str(path.relative_to(ROOT)) for path in written if path.read_bytes().count(b"\n") > MOST_LINES}
    assert long == TOO_LONG


# The map in HACKING.md.

ENTRY = re.compile(r"^ {10}(?P<name>[a-z_]+)/ +(?P<text>.*(?:\n {11,}.*)*)$", re.MULTILINE)
LINE_OF_MODULES = re.compile(r"^(?:kvspool/ {2}| {10})(?P<names>[a-z_]+(?:, [a-z_]+)*)(?: {2,}|$)", re.MULTILINE)


def mapped() -> str:
    """Return the part of the map that is about kvspool."""
    text = (ROOT / "HACKING.md").read_text(encoding="utf-8")
    block = text.partition("## Map")[2].split("```")[1]
    return block[block.index("kvspool/") : block.index("\nshard/")]


def modules_in(folder: Path) -> set[str]:
    """Return the modules in a folder; of a loop, its chooser represents all."""
    return {path.stem for path in folder.glob("*.py") if path.stem != "__init__" and not path.stem.endswith("_py")}


def test_the_map_names_every_room_and_every_module_at_the_root() -> None:
    package = ROOT / "kvspool"
    rooms = [room.partition(".")[2] for line in ORDER for room in line if room.startswith("kvspool.")]
    assert [entry["name"] for entry in ENTRY.finditer(mapped())] == [room for room in rooms if (package / room).is_dir()]
    assert {path.parent.name for path in package.glob("*/__init__.py")} <= set(rooms)
    names = [name for line in LINE_OF_MODULES.finditer(mapped()) for name in line["names"].split(", ")]
    assert sorted(names) == sorted(modules_in(package))


@pytest.mark.parametrize("room", [entry["name"] for entry in ENTRY.finditer(mapped()) if entry["name"] != "cli"])
def test_the_map_names_the_modules_of_each_room(room: str) -> None:
    (text,) = (entry["text"] for entry in ENTRY.finditer(mapped()) if entry["name"] == room)
    names = re.split(r",\s+", re.sub(r"\s+", " ", text).rpartition(": ")[2])
    assert sorted(names) == sorted(modules_in(ROOT / "kvspool" / room))


# Names.

# Names with words that the glossary replaces, and public classes of the same name; neither list must become longer. The first ones are of
# the loops over frames, the next ones are fields of reports, which are keys of JSON, and the last ones of a queue.
OLD_NAMES = {
    *"pair new_pair kv_new_pair".split(),
    *"left_behind written_anew".split(),
}
PART = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+")


def replaced_words() -> set[str]:
    """Return the words that no name may have, from the glossary."""
    table = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8").partition("## Words in names")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ")[0] for line in table.splitlines() if line.startswith("| ")][1:]
    return {word.strip() for row in rows for word in row.split(",")}


def names_in(path: Path) -> set[str]:
    """Return the names in a file of Python or Cython."""
    if path.suffix == ".py":
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
    files = [path for suffix in ("py", "pxd") for path in (ROOT / "kvspool").rglob(f"*.{suffix}")]
    found = {name for path in files for name in names_in(path) if words_of(name) & replaced}
    assert sorted(found - OLD_NAMES) == []
    assert sorted(OLD_NAMES - found) == [], "no longer there"


def test_no_two_public_classes_have_the_same_name() -> None:
    classes = Counter(
        node.name
        for path in sources().values()
        for node in ast.parse(path.read_bytes(), path).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and node.name[0].isupper()
    )
    twice = {name for name, count in classes.items() if count > 1}
    assert twice == set()
