"""The format page says what the code does: its tables are the layouts, its example is what a writer writes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from kvspool.engine.layout import Layout
from kvspool.journal import control, index, tail
from kvspool.journal.formats import kvj, sej
from kvspool.kernel.writer_py import FrameWriter
from kvspool.keyed import Packer
from kvspool.record import PORTABLE, Codec
from kvspool.spool import format
from kvspool.spool.keys import KeyTable

PAGE = (Path(__file__).parent.parent / "docs" / "format.md").read_text(encoding="utf-8")
LAYOUTS = [format.HEADER, format.EPOCH, format.CONTROL, format.MOVES, format.CHECKPOINT, format.INDEX_ENTRY, format.DATA_HEADER]
LAYOUTS += [format.FRAME, format.SLOT, format.COMMIT, format.RATE_BUCKET, format.GAP_BUCKET, format.KEY_TABLE, format.KEY_ENTRY]
LAYOUTS += [format.ECHO]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.record.__name__)
def test_the_format_page_has_the_table_of_each_layout(layout: Layout) -> None:
    assert layout.table() in PAGE


FORMATS = Path(__file__).parent.parent / "docs" / "formats"
TABLES = [("sej", sej.HEAD), ("kvj", kvj.HEADER), ("kvj", kvj.HEAD), ("page", control.PAGE)]
TABLES += [("sparse-index", index.HEADER), ("sparse-index", index.ENTRY), ("tail", tail.TAIL), ("tail", tail.COPY)]


@pytest.mark.parametrize(("page", "layout"), TABLES, ids=[f"{page}-{layout.record.__name__}" for page, layout in TABLES])
def test_the_page_of_a_journal_s_format_has_the_table_of_each_layout(page: str, layout: Layout[Any]) -> None:
    assert layout.table() in (FORMATS / f"{page}.md").read_text(encoding="utf-8")


def test_the_format_page_names_the_version_that_is_written() -> None:
    assert PAGE.startswith(f"# The spool's format, version {format.VERSION}\n")


def test_the_page_of_logs_has_a_row_for_each_codec() -> None:
    page = (Path(__file__).parent.parent / "docs" / "log.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \| .* \| ([\w, ]+) \|$", page, re.MULTILINE)
    assert {name: int(number) for name, number, _ in rows} == {codec.name.lower(): codec for codec in Codec if codec is not Codec.PAD}
    assert {name for name, _, logs in rows if logs != "spool"} == set(PORTABLE)


def test_the_example_frame_is_what_a_writer_writes() -> None:
    ring, control = bytearray(4096), bytearray(format.control_bytes(4096))
    seed = format.frame_seed(bytes(range(16)))
    writer = FrameWriter(memoryview(ring), memoryview(control), seed, None, memoryview(bytes(48)))
    writer.begin()
    writer.put_many([b"k"], [b"hi"], 7, b"\0", 1)
    writer.publish()
    frame = PAGE.split("timestamp 1, type 7:")[1].split("```")[1]
    assert bytes.fromhex(frame) == ring[:40]


def test_the_example_of_a_key_table_is_what_a_writer_writes() -> None:
    region = bytearray(format.INDEX_AT - format.KEYS_AT)
    KeyTable(memoryview(region), bytes(range(16))).add(["user", "é"], lambda: None)
    example = PAGE.split("`used` is 18:")[1].split("```")[1]
    assert bytes.fromhex(example) == region[format.KEY_TABLE.size :][:18]
    assert region[:8] == (18).to_bytes(8, "little")


def test_the_example_of_a_keyed_value_is_what_a_packer_writes() -> None:
    example = PAGE.split("whose table has `a`, `b`:")[1].split("```")[1]
    assert bytes.fromhex(example) == Packer(lambda _: {"a": 0, "b": 1}).pack({"a": 1, "b": {"a": [True]}, 5: None})


GUARANTEES = (Path(__file__).parent.parent / "docs" / "guarantees.md").read_text(encoding="utf-8")
HAZARDS = (Path(__file__).parent.parent / "docs" / "hazards.md").read_text(encoding="utf-8")
COPY = (Path(__file__).parent.parent / "docs" / "copy.md").read_text(encoding="utf-8")
SECURITY = (Path(__file__).parent.parent / "docs" / "security.md").read_text(encoding="utf-8")
HUB_PAGE = (Path(__file__).parent.parent / "docs" / "hub-page.md").read_text(encoding="utf-8")
PROOFS = sorted(set(re.findall(r"`(tests/[^`]+)`", GUARANTEES + HAZARDS + COPY + SECURITY + HUB_PAGE)))


@pytest.mark.parametrize("proof", [proof for proof in PROOFS if proof.endswith(".py") or "::" in proof])
def test_each_promise_is_proven_by_a_test_that_is_there(proof: str) -> None:
    path, _, name = proof.partition("::")
    text = (Path(__file__).parent.parent / path).read_text(encoding="utf-8")
    assert f"def {name}(" in text if name else "def test_" in text or "TestCase" in text


def test_each_hazard_has_a_row_with_a_proof_or_a_reason() -> None:
    rows = re.findall(r"^\| H(\d+): .* \| (.*) \| (.*) \|$", HAZARDS, re.MULTILINE)
    assert [int(number) for number, _, _ in rows] == list(range(1, 27))
    assert [number for number, rule, proof in rows if "`tests/" not in proof and "does not concern" not in rule] == []


def test_each_control_has_a_chapter_what_meets_it_and_a_test_or_a_dash() -> None:
    rows = [line.strip("| ").split(" | ") for line in SECURITY.partition("## The controls")[2].splitlines() if line.startswith("| ")]
    controls = [row for row in rows if row[0] != "control"]
    assert len(controls) > 30
    for row in controls:
        assert len(row) == 5, row
        assert re.fullmatch(r"V\d+(, V\d+)*", row[2]), row
        assert row[3], row
        assert row[4] in ("-", "not applicable") or "`tests/" in row[4], row


def test_the_site_has_each_page_in_its_navigation() -> None:
    """Only decisions are reached by their overview."""
    docs = Path(__file__).parent.parent / "docs"
    named = re.findall(r"^ +- ([\w/.-]+\.md)$", (docs.parent / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    pages = {str(path.relative_to(docs)) for path in docs.rglob("*.md")}
    assert sorted(named) == sorted(page for page in pages if not page.startswith("decisions/0"))


def test_decisions_are_numbered_without_a_gap_and_listed_with_their_titles() -> None:
    folder = Path(__file__).parent.parent / "docs" / "decisions"
    pages = sorted(folder.glob("[0-9]*.md"))
    titles = [page.read_text(encoding="utf-8").partition("\n")[0] for page in pages]
    assert [title[:6] for title in titles] == [f"# {number:04}" for number in range(1, len(pages) + 1)]
    listed = re.findall(r"^- \[(\d{4})\]\(([\w.-]+)\) (.*(?:\n  .*)*)$", (folder / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert [(f"# {number} {' '.join(title.split())}", name) for number, name, title in listed] == [
        (title, page.name) for title, page in zip(titles, pages, strict=True)
    ]
