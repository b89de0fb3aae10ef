"""The pages are plain English: short sentences, nouns as subjects, and none of the words that `docs/glossary.md` replaces.

So are the docstrings, comments, errors and helps of the packages and tools. Sentences in docstrings of `shard` and `hub` have a limit, too.
Of tests only docstrings, comments and messages of assertions are checked: their other strings are data.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = [README, ROOT / "HACKING.md", ROOT / "SECURITY.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
PLACES = ("kvspool", "shard", "hub", "pyspark_kvspool", "tools", "tests", ".ci")
OF_HUB = sorted(path for package in ("shard", "hub") for path in (ROOT / package).rglob("*.py") if path.parent.name != "kernel")
GLOSSARY = ROOT / "docs" / "glossary.md"
LONGEST = 25  # words a sentence, averaged over a paragraph
MOST_LINES = 120  # of README
MOST_COLUMNS = 100  # of a line of prose, and of any line of README
FENCE = re.compile(r"^ *(```|~~~)")
ITEM = re.compile(r"^ *([-*]|\d+\.) +")
SENTENCE_END = re.compile(r"(?<=[.!?])[\")\]*]*\s+(?=[\"(\[*]*(?:[A-Z0-9`]|kvspool\b|pyarrow\b))")
STRING_OR_COMMENT = re.compile(r"""\"{3}(?:\\.|.)*?\"{3}|'{3}(?:\\.|.)*?'{3}|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|#[^\n]*""", re.DOTALL)
SUBJECT = re.compile(r"^[\"(*]*(Who|who|Whose|What)\b")


def is_source(path: Path) -> bool:
    """Return whether a file is a module of Python or an executable script."""
    return path.suffix == ".py" or not path.suffix and path.is_file() and path.read_bytes().startswith(b"#!")


SOURCES = sorted(path for place in PLACES for path in (ROOT / place).rglob("*") if is_source(path))
TESTS = [path for path in SOURCES if path.is_relative_to(ROOT / "tests")]


class Paragraph(NamedTuple):
    """A paragraph, an item of a list, or a cell of a table, with the number of its first line; code in it is one word."""

    line: int
    text: str

    def sentences(self) -> list[str]:
        """Return its sentences."""
        return [sentence for sentence in SENTENCE_END.split(self.text) if sentence]


def plain(text: str) -> str:
    """Return prose without its code, addresses and emphasis; code counts as one word, which no rule knows."""
    text = re.sub(r"``.+?``|`[^`]+`", "`code`", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"https?://\S+", "`code`", text).replace("**", "").strip()


def paragraphs(page: str) -> Iterator[Paragraph]:
    """Yield what is prose in a Markdown page: no block of code, no table of a layout (those are compared with the code)."""
    start, lines = 0, list[str]()
    is_code = is_layout = is_after_blank = False
    for number, line in enumerate([*page.splitlines(), ""], 1):
        is_fence, is_row, is_item = FENCE.match(line), line.lstrip().startswith("|"), ITEM.match(line)
        is_indented_code = line.startswith("    ") and not is_item and is_after_blank and not lines
        if lines and (is_fence or is_row or is_item or not line.strip() or line.startswith("#")):
            yield Paragraph(start, plain(" ".join(lines)))
            lines = []
        is_layout = is_row and (is_layout or line.startswith("| at | size |"))
        if is_fence:
            is_code = not is_code
        elif is_code or is_indented_code or not line.strip():
            pass
        elif is_row:
            yield from (Paragraph(number, plain(cell)) for cell in line.strip("| ").split(" | ") if not is_layout)
            is_layout = is_layout or line.startswith("| at | size |")
        else:
            start = start if lines else number
            lines.append(ITEM.sub("", line, count=1).strip("# "))
        is_after_blank = not line.strip() or (is_after_blank and is_indented_code)


def wide(page: str) -> list[str]:
    """Return the lines of prose that are wider than `MOST_COLUMNS`; tables, headings and code may be."""
    found, is_code = [], False
    for number, line in enumerate(page.splitlines(), 1):
        is_code ^= bool(FENCE.match(line))
        if len(line) > MOST_COLUMNS and not is_code and not re.match(r" *\||    |#|.*\S{60}", line):
            found.append(f"line {number}: {len(line)} columns, {MOST_COLUMNS} at most: {line[:60]}")
    return found


def replacements() -> dict[str, str]:
    """Return the words that the glossary replaces, with what it says to use."""
    table = GLOSSARY.read_text(encoding="utf-8").partition("## Replaced words")[2]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")][1:]
    return {word.strip(): use for words, use in rows for word in words.split(",")}


REPLACED = replacements()
WORDS = re.compile(rf"(?<![\w-])({'|'.join(map(re.escape, sorted(REPLACED, key=len, reverse=True)))})(?![\w-])", re.IGNORECASE)


def faults(page: str) -> list[str]:
    """Return what a reviewer would mark in a page, each with its line and what to write instead."""
    found = []
    for paragraph in paragraphs(page):
        sentences = paragraph.sentences()
        words = sum(len(sentence.split()) for sentence in sentences) / max(len(sentences), 1)
        if words > LONGEST:
            found.append(f"line {paragraph.line}: {words:.0f} words a sentence, {LONGEST} at most: {paragraph.text[:60]}")
        found += word_faults(paragraph)
    return found


def word_faults(paragraph: Paragraph) -> list[str]:
    """Return the words of a paragraph to replace, and its sentences whose subject is no noun."""
    start = f"line {paragraph.line}: "
    found = [f"{start}{word!r}: use {REPLACED[word.lower()]}: {paragraph.text[:60]}" for word in WORDS.findall(paragraph.text)]
    subjects = [sentence for sentence in paragraph.sentences() if SUBJECT.match(sentence) and not sentence.endswith("?")]
    return found + [f"{start}name the subject by a noun: {sentence[:60]}" for sentence in subjects]


def prose_of(page: Path) -> str:
    """Return what is checked of a page: all of it, but for the list of replaced words, and the changes of released versions."""
    text = page.read_text(encoding="utf-8")
    if page == GLOSSARY:
        return text.partition("## Words in names")[0]
    return text if page.name != "CHANGELOG.md" else re.split(r"\n## ", text)[1]


def anchors(page: Path) -> set[str]:
    """Return the names by which a link reaches the headings of a page, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def strings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the strings of a module with their lines; not the fields of layouts, which are in the tables of pages."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.JoinedStr):
            yield node.lineno, "".join(str(part.value) if isinstance(part, ast.Constant) else "`code`" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
        elif not (isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id == "Annotated"):
            yield from strings(node)


def strings_of_a_test(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the docstrings of a module, and the messages of its assertions, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield from strings(node)
        elif isinstance(node, ast.Assert) and node.msg is not None:
            yield from strings(ast.Expr(node.msg))


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield the comments of a module with their lines."""
    for found in STRING_OR_COMMENT.finditer(source):
        if found[0].startswith("#"):
            yield source.count("\n", 0, found.start()) + 1, found[0]


def comments_of_a_shell_script(source: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of a script that are comments, with their numbers."""
    return ((number, line) for number, line in enumerate(source.splitlines(), 1) if line.lstrip().startswith("#"))


def texts(source: str, *, is_test: bool = False) -> Iterator[Paragraph]:
    """Yield the prose in a module: paragraphs of docstrings and other strings with blanks, and comments; names of parameters are code."""
    if re.match("#!.*sh\n", source):
        found = list(comments_of_a_shell_script(source))
    else:
        tree = ast.parse(source)
        found = [(line, text) for line, text in (strings_of_a_test if is_test else strings)(tree) if " " in text.strip()]
        found += comments(source)
    for line, text in [(line, text.lstrip("# ")) for line, text in found]:
        for part in re.split(r"\n\s*\n", text):
            if not part.startswith(" " * 8):  # an example
                yield Paragraph(line, plain(re.sub(r"\b\w+: ", "`code`: ", " ".join(part.split()))))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_prose_in_a_module_is_plain_english(path: Path) -> None:
    prose = texts(path.read_text(encoding="utf-8"), is_test=path in TESTS)
    found = [fault for paragraph in prose for fault in word_faults(paragraph)]
    assert not found, "\n".join(["", *found])


def names_of_tests(source: str) -> list[str]:
    """Return the names of the tests in a module."""
    return re.findall(r"^ *(?:async )?def (test_\w+)", source, re.MULTILINE)


def replaced_words(name: str) -> list[str]:
    """Return the words in the name of a test that the glossary replaces."""
    return WORDS.findall(name.removeprefix("test_").replace("_", " "))


@pytest.mark.parametrize("path", TESTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_names_of_tests_contain_no_replaced_words(path: Path) -> None:
    names = names_of_tests(path.read_text(encoding="utf-8"))
    assert {name: words for name in names if (words := replaced_words(name))} == {}


def test_replaced_words_in_the_name_of_a_test_are_found() -> None:
    source = "async def test_nobody_waits(): pass\nclass A:\n    def test_who_reads_gets_it(self): pass\ndef lies(): pass\n"
    assert [replaced_words(name) for name in names_of_tests(source)] == [["nobody"], ["who reads"]]


def docstrings(source: str) -> Iterator[Paragraph]:
    """Yield the paragraphs of prose in the docstrings of a module; no lists, trees and examples, which have marks or are indented."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for part in re.split(r"\n\s*\n", ast.get_docstring(node) or ""):
                if not re.match(r" |- ", part) and "`-- " not in part:
                    text = re.sub(r"(?:^|(?<=[.!?] ))(\w+, )*\w+: ", "`code`: ", " ".join(part.split()))  # names of parameters
                    yield Paragraph(getattr(node, "lineno", 1), plain(text))


def long_sentences(source: str) -> list[str]:
    """Return the sentences of docstrings with too many words. A semicolon ends one, too. "Raises A, B and C" is a list."""
    found = []
    for paragraph in docstrings(source):
        parts = [part for sentence in paragraph.sentences() for part in sentence.split("; ") if not sentence.startswith("Raises ")]
        found += [f"line {paragraph.line}: {len(part.split())} words: {part[:60]}" for part in parts if len(part.split()) > LONGEST]
    return found


@pytest.mark.parametrize("path", OF_HUB, ids=lambda path: str(path.relative_to(ROOT)))
def test_sentences_in_docstrings_are_short(path: Path) -> None:
    found = long_sentences(path.read_text(encoding="utf-8"))
    assert not found, "\n".join(["", *found])


def test_a_long_sentence_in_a_docstring_is_found() -> None:
    assert long_sentences(f'def f():\n    """{LONG}"""\n') == [f"line 1: 28 words: {LONG[:60]}"]
    assert long_sentences(f'"""A list:\n\n  - {LONG}\n"""') == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_is_plain_english(page: Path) -> None:
    text = prose_of(page)
    found = faults(text) + (wide(text) if page.name != "CHANGELOG.md" else [])
    assert not found, "\n".join(["", *found])


def test_the_readme_fits_on_a_few_screens() -> None:
    lines = README.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= MOST_LINES
    assert [line for line in lines if len(line) > MOST_COLUMNS] == []


def test_links_lead_to_pages_and_headings_that_are_there() -> None:
    broken = []
    for page in PAGES:
        for target, heading in re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", page.read_text(encoding="utf-8")):
            linked = (page.parent / target).resolve() if target else page
            if not linked.exists() or heading and heading not in anchors(linked):
                broken.append(f"{page.relative_to(ROOT)}: {target}#{heading}")
    assert broken == []


LONG = "The log keeps " + "records and " * 12 + "values."
BAD = [
    (LONG, "28 words a sentence"),
    (f"- {LONG}", "28 words a sentence"),
    (f"| a | b |\n|---|---|\n| x | {LONG} |", "28 words a sentence"),
    ("Whoever reads gets them.", "'Whoever': use a noun"),
    ("The bytes\nbehind the end are ignored.", "'behind': use after"),
    ("The record is\ntold.", "'is told': use is reported"),
    ("It is [made anew](x.md).", "'anew': use again"),
    ("Read it. Who has it open gets an error.", "name the subject by a noun: Who has it open"),
    ("What was appended is safe.", "name the subject by a noun: What was appended"),
    ("## Behind the end", "'Behind'"),
    ("```\nwhoever\n```\nThe end lies there.", "line 4: 'lies'"),
]


@pytest.mark.parametrize(("page", "fault"), BAD, ids=[fault for _, fault in BAD])
def test_bad_prose_is_found(page: str, fault: str) -> None:
    found = faults(page)
    assert len(found) == 1 and fault in found[0], found


BAD_SOURCES = [
    '"""The words.\\n\\nWhoever reads gets them."""',
    'raise ValueError(f"{name} lies there")',
    "first = 1  # the byte behind the end",
    "# Who waits for it\\n# wakes.",
    "#!/bin/sh\n# for whoever runs it\nexit",
]
BAD_TESTS = [
    'def test() -> None:\n    """Nobody reads."""',
    'MOST = 1\n"""For whoever reads."""',
    'assert found == [], f"{name} lies there"',
    "wait()  # for ever",
]


@pytest.mark.parametrize("source", BAD_SOURCES)
def test_bad_prose_in_a_module_is_found(source: str) -> None:
    assert [fault for paragraph in texts(source) for fault in word_faults(paragraph)]


@pytest.mark.parametrize("source", BAD_TESTS)
def test_bad_prose_in_a_test_is_found(source: str) -> None:
    assert [fault for paragraph in texts(source, is_test=True) for fault in word_faults(paragraph)]


def test_data_of_a_test_pass() -> None:
    source = 'log.append("who lies behind")\nassert read() == ["nobody behind"], "the value is there"\n'
    assert [fault for paragraph in texts(source, is_test=True) for fault in word_faults(paragraph)] == []


def test_code_and_fields_of_layouts_in_a_module_pass() -> None:
    source = 'class Head:\n    at: Annotated[int, "Q", "offset behind the end"]\n\n"""behind: whether `whoever` reads."""\n'
    assert [fault for paragraph in texts(source) for fault in word_faults(paragraph)] == []


def test_wide_prose_is_found_and_wide_tables_and_code_are_not() -> None:
    page = "\n".join(["word " * 21, "| " + "cell " * 21 + "|", "```", "code " * 21, "```", "    " + "code " * 21, "word " * 19])
    assert [fault.partition(":")[0] for fault in wide(page)] == ["line 1"]


GOOD = [
    "```sh\necho whoever lies behind\n```",
    "~~~\n" + LONG + "\n~~~",
    "For example:\n\n    whoever lies behind\n    nobody\n\nThe end.",
    "Call `behind(whoever)` first.",
    "See [the page](behind.md) and https://example.org/behind.",
    "| at | size | field | meaning |\n|---|---|---|---|\n| 0 | 4 | tail | offset behind the end |",
    "What is a log? A sequence of records.",
    "One two three four five six seven eight nine ten eleven twelve. " * 4,
]


@pytest.mark.parametrize("page", GOOD)
def test_good_prose_and_code_pass(page: str) -> None:
    assert faults(page) == []
