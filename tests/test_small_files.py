"""Small files that hold anything: their readers get an error of the package's own that says which file, and where in it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import every_log
import garbage
import msgspec
import pytest

import kvspool
from kvspool import system
from kvspool.cli import main
from kvspool.errors import Corruption, FormatError, UnknownVersion
from kvspool.journal import settings
from kvspool.system import disk, documents
from kvspool.transfer import note

DEEDS = ("stats", "append", "producer", "trim", "verify", "repair", "open")


class Sample(msgspec.Struct, forbid_unknown_fields=True):
    number: int = 0
    words: list[str] = []


def settings_of(root: Path) -> Path:
    (found,) = root.rglob(settings.NAME)
    return found


@pytest.mark.parametrize("kind", every_log.FORMATS)
def test_whatever_settings_hold_they_open_or_are_an_error_that_names_them(tmp_path: Path, kind: str) -> None:
    every_log.make(kind, tmp_path / "log")
    file = settings_of(tmp_path)
    for what, data in garbage.of_json(file.read_bytes(), settings.LARGEST):
        for name, deed in every_log.deeds(tmp_path / "log"):
            if name in DEEDS:
                file.write_bytes(data)
                words = every_log.said(deed)
                assert not words or str(tmp_path) in words, (what, name, words)
        if what.startswith(("empty", "NUL", "not UTF-8", "too large", "cut", "a byte", "a NUL", "deep")):
            with pytest.raises(Corruption, match=f"{re.escape(str(file))} doesn't contain the settings of the journal: .*; remove it"):
                kvspool.open(tmp_path / "log")


@pytest.mark.parametrize("kind", every_log.FORMATS)
def test_a_byte_that_is_no_utf8_is_named_by_its_place(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    every_log.make(kind, tmp_path / "log")
    file = settings_of(tmp_path)
    sound = file.read_bytes()
    at = sound.index(b"json")
    file.write_bytes(sound[:at] + b"\xff" + sound[at + 1 :])
    for call in (kvspool.open, kvspool.verify, kvspool.repair):
        with pytest.raises(Corruption, match=f"{settings.NAME} .*: byte {at} is not UTF-8; remove it to open with the defaults"):
            call(tmp_path / "log")
    for command in ("stats", "verify", "repair", "read", "doctor"):
        code = main([command, str(tmp_path / "log")])
        said = "".join(capsys.readouterr())
        assert code == (1 if command == "doctor" else Corruption.exit_code) and f"byte {at} is" in said.replace("\n", " "), command


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("sync_interval", -1.0, "sync_interval"),
        ("sync_interval", 0, "sync_interval"),
        ("limits", {"segment_bytes": 10**30}, "a segment has"),
        ("limits", {"segment_bytes": -1}, "a segment has"),
        ("first_sequence", 1 << 64, "begins at sequence"),
        ("retention", {"max_bytes": -1}, "max_bytes"),
        ("unknown", 1, "unknown"),
    ],
)
def test_settings_that_no_version_writes_are_refused(tmp_path: Path, field: str, value: Any, words: str) -> None:
    every_log.make("kvj", tmp_path / "log")
    file = settings_of(tmp_path)
    file.write_text(json.dumps({**json.loads(file.read_bytes()), field: value}), encoding="utf-8")
    with pytest.raises(Corruption, match=f"{settings.NAME} .*{words}.*; remove it"):
        kvspool.open(tmp_path / "log")


@pytest.mark.parametrize("codec", ["keyed", "a later one"])
def test_settings_with_an_unknown_codec_are_of_a_newer_version(tmp_path: Path, codec: str) -> None:
    every_log.make("kvj", tmp_path / "log")
    file = settings_of(tmp_path)
    before = json.dumps({**json.loads(file.read_bytes()), "codec": codec})
    file.write_text(before, encoding="utf-8")
    with pytest.raises(UnknownVersion, match=f"the codec '{codec}'; this kvspool knows json, msgpack; upgrade it"):
        kvspool.open(tmp_path / "log")
    assert file.read_text(encoding="utf-8") == before


def test_settings_of_an_unknown_format_are_of_another_version(tmp_path: Path) -> None:
    every_log.make("kvj", tmp_path / "log")
    file = settings_of(tmp_path)
    file.write_bytes(file.read_bytes().replace(b'"format":"kvj"', b'"format":"abc"'))
    with pytest.raises(FormatError, match="'abc'"):
        kvspool.open(tmp_path / "log")


@pytest.mark.parametrize("format", ["kvj", "sej", "fflg"])
@pytest.mark.parametrize("size", [1 << 63, 10**30])
def test_a_segment_larger_than_any_file_is_refused_before_anything_is_made(tmp_path: Path, format: Any, size: int) -> None:
    with pytest.raises(ValueError, match="a segment has"):
        kvspool.create(tmp_path / "log", format=format, segment_bytes=size)
    assert list(tmp_path.iterdir()) == []


def test_whatever_the_note_of_a_copy_holds_is_read_or_named(tmp_path: Path) -> None:
    with note.locked(tmp_path / "copy") as notes:
        notes.store(note.Note(source=["a", "b"], sequence=7, at=[1, 2]))
        file = notes.directory / note.NOTE
        for what, data in garbage.of_json(file.read_bytes(), note.LARGEST):
            file.write_bytes(data)
            try:
                notes.load()
            except Corruption as error:
                assert f"{file} doesn't say how far a copy came" in str(error), what
        file.write_bytes(b'{"source":["\xff"]}')
        with pytest.raises(Corruption, match="byte 12 is not UTF-8; remove the target and it"):
            notes.load()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "at byte 0"),
        (b'{"number":', "at byte 10"),
        (b'{"number":x}', "byte 10"),
        (b'{"number":1}\0', "trailing characters"),
        (b'{"words":["a","\xc3\x28"]}', "byte 15 is not UTF-8"),
        (b'{"words":' + b"[" * garbage.DEEP, r"\$\.words"),
        (b'{"number":"1"}', r"\$\.number"),
        (b'{"number":' + garbage.HUGE + b"}", r"\$\.number"),
        (b"[]", "array"),
    ],
)
def test_a_fault_of_json_is_one_kind_of_error_that_says_where(data: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        documents.from_json(data, Sample)
    assert type(caught.value) is ValueError


def test_values_that_are_nested_too_deeply_are_a_fault_like_others() -> None:
    for data in (b"[" * garbage.DEEP, b'{"a":' * garbage.DEEP):
        with pytest.raises(ValueError, match="nested too deeply"):
            documents.from_json(data, object)
        with pytest.raises(ValueError, match="nested too deeply"):
            documents.from_toml(b"a=" + b"[" * garbage.DEEP)


def test_of_a_key_that_is_there_twice_the_last_one_counts() -> None:
    assert documents.from_json(b'{"number":1,"number":2}', Sample) == Sample(2)


@pytest.mark.parametrize("data", [b"a", b"a=1\na=2", b"a=\xff", b"a=" + garbage.HUGE, b"a=\0", b"a=1979-13-41"])
def test_a_fault_of_toml_is_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError, match="."):
        documents.from_toml(data)


def test_a_file_over_its_bound_is_refused_and_not_read_in_full(tmp_path: Path) -> None:
    file = tmp_path / "huge"
    with open(file, "wb") as made:
        made.truncate(1 << 40)
    reads = []

    class Recording(system.Port):
        def read(self, fd: int, size: int, at: int) -> bytes:
            reads.append(size)
            return super().read(fd, size, at)

    with system.replaced(Recording()), pytest.raises(ValueError, match="larger than 100 bytes"):
        documents.read(file, 100)
    assert reads == [101]
    disk.replace(file, b"x" * 100, 0o600)
    assert documents.read(file, 100) == b"x" * 100
