"""Compaction: small files become large ones, of one partition each, while readers read.

A stream adds a few files per batch, and a folder of ten thousand small files takes longer to list than to read. Files are combined by
magnitude: `files` of them within a factor of 8 become one of the next magnitude, up to the target. So a row is rewritten once per
magnitude, not with every batch. A partition without new files for `after` is closed: its small files are combined once, as far as the
target allows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from hub.pipeline.job import Compact, seconds
from hub.pipeline.table import DataFile, Table
from kvspool import system

if TYPE_CHECKING:
    from pathlib import Path

FACTOR = 8  # between two magnitudes
ROWS = 65_536  # in memory at a time
MOST = 1024  # files combined into one at once
GROUPS = 256  # groups of files per version, because a version links every file of the table


class Compacted(NamedTuple):
    """The result of a compaction."""

    before: int  # files that were combined
    after: int  # files after that


def compact(table: Table, rules: Compact, *, everything: bool = False) -> Compacted:
    """Combine small files by the rules, or with `everything` all small ones; up to `GROUPS` groups form a version.

    Raises the system's OSError; the table then shows the old version or one of the new ones.
    """
    groups = list(plan(table, rules, everything=everything))
    done = [_merge(table, groups[first : first + GROUPS]) for first in range(0, len(groups), GROUPS)]
    return Compacted(sum(one.before for one in done), sum(one.after for one in done))


def plan(table: Table, rules: Compact, *, everything: bool = False) -> Iterator[list[DataFile]]:
    """Yield groups of files to combine into one each."""
    if table.version is None:
        return
    closed = system.port.now() - int(seconds(rules.after) * 1e9)
    folders: dict[str, list[DataFile]] = {}
    for file in table.version.files:
        folders.setdefault(file.folder, []).append(file)
    for _, files in sorted(folders.items()):
        small = [file for file in files if file.size < rules.target_bytes // 2]
        if everything or max(file.made for file in files) <= closed:
            yield from _filled(small, rules.target_bytes, 2)
        else:
            yield from _by_magnitude(small, rules)


def _by_magnitude(files: list[DataFile], rules: Compact) -> Iterator[list[DataFile]]:
    magnitudes: dict[int, list[DataFile]] = {}
    for file in files:
        magnitudes.setdefault((max(1, file.size).bit_length() - 1) // (FACTOR.bit_length() - 1), []).append(file)
    for _, group in sorted(magnitudes.items()):
        if len(group) >= rules.files:
            yield from _filled(group, rules.target_bytes, rules.files)


def _filled(files: Iterable[DataFile], target: int, least: int) -> Iterator[list[DataFile]]:
    """Yield groups up to the target, in the order of the files."""
    group: list[DataFile] = []
    size = 0
    for file in sorted(files, key=lambda file: (file.made, file.name)):
        if group and (size + file.size > target or len(group) >= MOST):
            if len(group) >= min(least, 2):
                yield group
            group, size = [], 0
        group.append(file)
        size += file.size
    if len(group) >= least:
        yield group


def _merge(table: Table, groups: list[list[DataFile]]) -> Compacted:
    """Write one file with the rows of each group, and show it instead of the group; one file for each set of columns, if they differ.

    A group is skipped if the number of files would stay the same.
    """
    version = table.version
    assert version is not None
    shown = table.path.resolve()
    parts = [part for group in groups if len(part := _alike(shown, group)) < len(group)]
    alike = [files for part in parts for files in part]
    if not alike:
        return Compacted(0, 0)
    staging = table.fresh_staging()
    system.port.make_directory(staging)
    made: list[tuple[Path, DataFile]] = []
    for place, files in enumerate(alike):
        target = staging / f"{place}.parquet"
        rows = _write(target, [shown / file.name for file in files])
        if rows != sum(file.rows for file in files):
            raise OSError(f"{target}: {rows} rows were written of {sum(file.rows for file in files)}; nothing was changed")
        name = f"part-{version.batch:010}-{table.next_number:010}-{place:05}.parquet"
        folder = files[0].folder
        newest = max(file.made for file in files)  # so that a partition counts as closed once
        made.append((target, DataFile(f"{folder}/{name}" if folder else name, rows, target.stat().st_size, newest)))
    gone = [file for files in alike for file in files]
    table.replace_files(gone, made)
    return Compacted(len(gone), len(made))


def _alike(shown: Path, group: list[DataFile]) -> list[list[DataFile]]:
    """Return the files of a group by their columns, which may differ after a change of the job."""
    from pyarrow import parquet

    kinds: list[tuple[object, list[DataFile]]] = []
    for file in group:
        schema = parquet.read_schema(shown / file.name)
        for known, files in kinds:
            if schema.equals(known):
                files.append(file)
                break
        else:
            kinds.append((schema, [file]))
    return [files for _, files in kinds]


def _write(target: Path, sources: list[Path]) -> int:
    """Write the rows of some files into one. Return their number."""
    from pyarrow import parquet

    rows = 0
    with parquet.ParquetWriter(target, parquet.read_schema(sources[0]), compression="snappy") as writer:
        for source in sources:
            with parquet.ParquetFile(source) as file:
                for batch in file.iter_batches(ROWS):
                    writer.write_batch(batch)
                    rows += batch.num_rows
    target.chmod(0o600)
    return rows
