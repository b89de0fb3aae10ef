"""Delta tables as frames, without Delta's jars: Spark gets the files of one version, or its Python workers read them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from hub.tables.delta import Table, column_of
from hub.tables.files import folder
from hub.tables.place import TablePlace

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql import DataFrame, SparkSession


def read(spark: SparkSession, path: str | os.PathLike[str], version: int | None, options: Mapping[str, str] | None) -> DataFrame:
    """See `hub.spark.read_table`."""
    from pyspark.sql.pandas.types import from_arrow_schema

    table = Table(TablePlace.of(path, options), version=version)
    schema = from_arrow_schema(table.schema)
    files = table.files()
    if not files:
        return spark.createDataFrame([], schema)
    reading = Reading(table.place, table.schema)
    root = table.place.local
    if root is not None and all(name.startswith(_folders(values)) for name, values in files):
        frame = spark.read.schema(schema).option("basePath", str(root)).parquet(*(str(root / name) for name, _ in files))
        return frame.select(*(f"`{name}`" for name in table.schema.names))
    rows = [(name, values) for name, values in files]
    tasks = max(1, min(len(rows), spark.sparkContext.defaultParallelism * 2))
    named = spark.createDataFrame(rows, "name string, values map<string, string>").repartition(tasks)
    return named.mapInArrow(reading, schema)  # type: ignore[arg-type]


def _folders(values: dict[str, str | None]) -> str:
    return "".join(f"{folder(name, value)}/" for name, value in values.items())


class Reading(NamedTuple):
    """A task's work: read whole files of a table. Picklable."""

    place: TablePlace
    schema: pyarrow.Schema

    def __call__(self, batches: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
        """Yield the rows of the files whose names come."""
        import pyarrow as pa
        from pyarrow import parquet

        for batch in batches:
            for row in batch.to_pylist():
                values: dict[str, Any] = dict(row["values"])
                with parquet.ParquetFile(self.place.open(row["name"])) as opened:
                    for found in opened.iter_batches():
                        columns = [column_of(found, field, values) for field in self.schema]
                        yield pa.RecordBatch.from_arrays(columns, schema=self.schema)
