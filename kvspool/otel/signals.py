"""The kinds of requests to a collector: a record's key names its kind, and its value has the bytes of the request."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvspool.errors import MissingExtra
from kvspool.record import Codec, Record

try:
    from google.protobuf import json_format
    from google.protobuf.message import DecodeError, Message
    from google.rpc.status_pb2 import Status
    from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceResponse
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceResponse
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
except ModuleNotFoundError as _error:
    raise MissingExtra.of("otel", "deliveries to a collector need a package that isn't installed", _error) from _error

LOGS, TRACES, METRICS = b"logs", b"traces", b"metrics"
READER = "otlp"  # the durable reader of the shipper, by default
PROTOBUF, JSON = "application/x-protobuf", "application/json"
SIGNALS: dict[bytes, tuple[type[Message], str]] = {
    LOGS: (ExportLogsServiceResponse, "rejected_log_records"),
    TRACES: (ExportTraceServiceResponse, "rejected_spans"),
    METRICS: (ExportMetricsServiceResponse, "rejected_data_points"),
}
"""By key: the response of the collector, and its field with the number of rejected items."""


class CollectorAnswer(msgspec.Struct, frozen=True):
    """The answer to an accepted request. rejected: items of it that the collector refused; message: its reason, or a warning."""

    rejected: int = 0
    message: str = ""


def why_unknown(record: Record) -> str:
    """Return why a record is no request to a collector; "" if it may be one. Its bytes are for the collector to check."""
    if record.key not in SIGNALS:
        return f"no OTLP request: its key is {record.key!r}, not {', '.join(key.decode() for key in SIGNALS)}"
    if record.codec != Codec.RAW:
        return f"no OTLP request: its value has the codec {Codec(record.codec).name.lower()}, not raw bytes"
    return ""


def joined(records: Sequence[Record]) -> bytes:
    """Return the requests of records of one signal as one: in protobuf, concatenated messages are merged."""
    return b"".join(record.value for record in records)


def parse_answer(signal: bytes, content_type: str, body: bytes) -> CollectorAnswer:
    """Return the content of a response with a status of success. Raises ValueError if no collector can have sent it."""
    kind, field = SIGNALS[signal]
    if not body:
        return CollectorAnswer()
    message = kind()
    try:
        if content_type == PROTOBUF:
            message.ParseFromString(body)
        elif content_type == JSON:
            json_format.Parse(body, message, ignore_unknown_fields=True)
        else:
            raise ValueError(f"its content type is {content_type!r}")
    except (DecodeError, json_format.ParseError) as error:
        raise ValueError(str(error)) from None
    partial = message.partial_success
    return CollectorAnswer(max(0, getattr(partial, field)), partial.error_message)


def reason(content_type: str, body: bytes) -> str:
    """Return the words of a response with a status of failure."""
    if content_type == PROTOBUF:
        try:
            return str(Status.FromString(body).message)
        except DecodeError:
            return ""
    return body.decode(errors="replace").strip() if content_type.startswith(("text/plain", JSON)) else ""
