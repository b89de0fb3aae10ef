"""Makes `format("kvspool")` known to every Spark session: nothing has to be registered.

Spark imports all modules whose name begins with `pyspark_` when a session first needs a data source that is written in Python, and takes
the class `DefaultSource` of each. If one of them can't be imported, the classes of all other packages are missing too, so only Spark's own
base class is imported here. The format is imported when it is used; missing packages are reported then.
"""

from __future__ import annotations

from typing import Any

try:
    from pyspark.sql.datasource import DataSource
except Exception:  # a Spark without Python data sources, or none at all: it won't ask for one either
    pass
else:

    class DefaultSource(DataSource):
        """Stands for `hub.spark.source.KvspoolDataSource`, which its call returns an instance of."""

        @classmethod
        def name(cls) -> str:
            """Return the name for `format(...)`."""
            return "kvspool"

        def __new__(cls, options: Any) -> Any:
            """Return the data source itself. Raises ImportError that says what is missing in the Python that Spark uses."""
            return _source()(options)

    def _source() -> type[DataSource]:
        import sys

        try:
            import pyarrow  # noqa: F401  what needs it imports it in a task only

            from hub.spark.source import KvspoolDataSource
        except Exception as error:
            raise ImportError(
                f"[KVSPOOL_NOT_INSTALLED] format kvspool can't be used in {sys.executable}: {type(error).__name__}: {error}. "
                "Install it there with what it needs: pip install 'kvspool[spark]'; PYSPARK_PYTHON says which Python Spark uses"
            ) from error
        return KvspoolDataSource


__all__ = ["DefaultSource"] if "DefaultSource" in globals() else []
