"""OpenTelemetry: exporters that append to a log, and a shipper that delivers the log to a collector. Needs the extra `otel`.

    provider.add_span_processor(BatchSpanProcessor(kvspool.otel.SpanExporter("telemetry")))

An exporter never waits for a collector. `kvspool ship telemetry --otlp http://collector:4318` delivers each request at least once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvspool.otel.exporters import LogExporter, SpanExporter

__all__ = ["LogExporter", "SpanExporter"]


def __getattr__(name: str) -> Any:
    """Import the exporters when they are used: a shipper doesn't need the SDK."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvspool.importing import import_whole

    return getattr(import_whole("kvspool.otel.exporters"), name)
