"""A program whose log messages and spans survive a crash of the process and an outage of the collector.

    pip install opentelemetry-instrumentation-logging
    python telemetry.py
    kvspool ship telemetry --otlp http://localhost:4318
"""

import logging

from opentelemetry.instrumentation.logging.handler import LoggingHandler
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import SimpleLogRecordProcessor
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from kvspool.otel import LogExporter, SpanExporter

LOG = "telemetry"


def main() -> None:
    """Buy three things, one of which is sold out."""
    resource = Resource.create({"service.name": "shop"})
    traces = TracerProvider(resource=resource)
    traces.add_span_processor(SimpleSpanProcessor(SpanExporter(LOG)))
    tracer = traces.get_tracer("shop")
    logs = LoggerProvider(resource=resource)
    logs.add_log_record_processor(SimpleLogRecordProcessor(LogExporter(LOG)))
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[LoggingHandler(logger_provider=logs)])
    for item in ("apple", "pear", "plum"):
        with tracer.start_as_current_span("buy", attributes={"item": item}):
            if item == "plum":
                logging.error("%s is sold out", item)
            else:
                logging.info("bought %s", item)
    traces.shutdown()
    logs.shutdown()


if __name__ == "__main__":
    main()
