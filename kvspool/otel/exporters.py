"""Exporters for the SDK of OpenTelemetry: each batch is one record, which has the bytes of a request to a collector as its value."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from kvspool.errors import MissingExtra, ReaderBusy, TooLarge
from kvspool.logging.messages import MessageLog
from kvspool.otel.signals import LOGS, READER, TRACES
from kvspool.system.handles import Handle

try:
    from opentelemetry.exporter.otlp.proto.common._log_encoder import encode_logs
    from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
    from opentelemetry.sdk._logs.export import LogRecordExporter, LogRecordExportResult
    from opentelemetry.sdk.trace.export import SpanExporter as SdkSpanExporter
    from opentelemetry.sdk.trace.export import SpanExportResult
except ModuleNotFoundError as _error:
    raise MissingExtra.of("otel", "the exporters need a package that isn't installed", _error) from _error

if TYPE_CHECKING:
    from google.protobuf.message import Message
    from opentelemetry.sdk._logs import ReadableLogRecord
    from opentelemetry.sdk.trace import ReadableSpan

T = TypeVar("T")


class _RequestLog(Handle):
    """The log of an exporter, which is created by the first request if it doesn't exist."""

    def __init__(self, path: str | os.PathLike[str], signal: bytes, reader: str | None, is_durable: bool, options: dict[str, Any]) -> None:
        self._target = MessageLog(path, {"format": "kvj", "timeout": 5.0, **options})
        self._signal = signal
        self._reader = reader
        self._is_durable = is_durable

    def append(self, items: Sequence[T], encode: Callable[[Sequence[T]], Message]) -> None:
        """Append the request of a batch; two with half of it, if the log takes no record of its size. Raises the errors of `Log.append`."""
        if not items:
            return
        if self._reader is not None:
            self._hold(self._reader)
        try:
            self._target.append(encode(items).SerializeToString(), self._signal, 0, None, self._is_durable)
        except TooLarge:
            if len(items) == 1:
                raise
            half = len(items) // 2
            self.append(items[:half], encode)
            self.append(items[half:], encode)

    def _hold(self, reader: str) -> None:
        """Create the shipper's durable reader, so that retention keeps all records that were not delivered. Raises TooManyReaders."""
        self._reader = None
        log = self._target.opened()
        if all(one.name != reader for one in log.readers()):
            with suppress(ReaderBusy):  # the shipper has just created it
                log.reader(reader).close()

    def close(self) -> None:
        """Close the log; a later request opens it again."""
        self._target.close()


class _Exporter(Handle):
    """The parts that are the same for all signals."""

    _SIGNAL: ClassVar[bytes]

    def __init__(self, path: str | os.PathLike[str], *, durable: bool = False, reader: str | None = READER, **options: Any) -> None:
        """path: of the log, which is created by the first batch if it doesn't exist, as its directory is.

        durable: a batch is on disk when `export` returns. reader: the durable reader of the shipper, which is created with the log, so that
        retention keeps all records that were not delivered; None: create none. options: those of `kvspool.create`; by default the log is
        a journal, `format="kvj"`.
        """
        self._log = _RequestLog(path, self._SIGNAL, reader, durable, options)

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Do nothing: a batch is in the log when `export` returns."""
        return True

    def shutdown(self) -> None:
        """Close the log."""
        self._log.close()


class LogExporter(_Exporter, LogRecordExporter):
    """Appends each batch of log records to a log, where it survives SIGKILL of the process. Any number of processes may use the same log.

    `kvspool ship LOG --otlp ENDPOINT` delivers it. Logs and traces may share a log. An exporter may be used in a forked child.
    """

    _SIGNAL = LOGS

    def export(self, batch: Sequence[ReadableLogRecord]) -> LogRecordExportResult:
        """Append a batch. Raises the errors of `kvspool.create` and `Log.append`, which the processors of the SDK log."""
        self._log.append(batch, encode_logs)
        return LogRecordExportResult.SUCCESS


class SpanExporter(_Exporter, SdkSpanExporter):
    """Appends each batch of spans to a log; see `LogExporter`."""

    _SIGNAL = TRACES

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Append a batch. Raises the errors of `kvspool.create` and `Log.append`, which the processors of the SDK log."""
        self._log.append(spans, encode_spans)
        return SpanExportResult.SUCCESS
