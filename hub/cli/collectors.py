"""`kvspool ship --otlp`: deliver the requests of OpenTelemetry in logs to a collector."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from hub.cli import security
from kvspool.cli.options import BadInput
from kvspool.options import TIMEOUT

if TYPE_CHECKING:
    from kvspool.otel.collector import CollectorAccess, CollectorEndpoint
    from kvspool.otel.shipper import CollectorShipper

HEADERS = "OTEL_EXPORTER_OTLP_HEADERS"
COMPRESSION = "OTEL_EXPORTER_OTLP_COMPRESSION"
OF_HUBS = ("client", "acks", "only", "level")  # options that have a value only if they are given
LOOPBACK = ("localhost", "127.0.0.1", "::1")


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    group = parser.add_argument_group(
        "OpenTelemetry",
        f"Headers of requests are in the variable {HEADERS}, as in other exporters: name=value,name=value. With --token-file, the "
        f"token is a header, too: Authorization: Bearer TOKEN. {COMPRESSION}=none sends without gzip.",
    )
    group.add_argument("--otlp", metavar="ENDPOINT", help="a collector instead of a hub: http(s)://HOST:PORT, for OTLP over HTTP")
    group.add_argument("--reader", metavar="NAME", default="otlp", help="with --otlp: the durable reader (default: %(default)s)")


def shippers(arguments: argparse.Namespace) -> Iterator[CollectorShipper]:
    """Yield a shipper for each log of the sources. Raises BadInput."""
    from hub.client.sources import open_source
    from kvspool.otel.collector import CollectorEndpoint
    from kvspool.otel.shipper import CollectorShipper

    for name in OF_HUBS:
        if getattr(arguments, name) is not None:
            raise BadInput(f"--{name} is for hubs; leave it out with --otlp")
    if arguments.copies > 1 or arguments.accept_loss:
        raise BadInput("--copies and --accept-loss are for hubs; leave them out with --otlp")
    endpoint = CollectorEndpoint.parse(arguments.otlp)
    access(arguments, endpoint)  # reports wrong files and headers at once
    for source in arguments.sources:
        for log in open_source(Path(source), TIMEOUT):
            yield CollectorShipper(
                log,
                arguments.otlp,
                access=lambda: access(arguments, endpoint),
                reader=arguments.reader,
                isolation="synced" if arguments.synced else "appended",
                compresses=_compresses(),
            )


def access(arguments: argparse.Namespace, endpoint: CollectorEndpoint) -> CollectorAccess:
    """Return the headers and the TLS context in the options and the environment. Raises BadInput."""
    from kvspool.otel.collector import CollectorAccess

    found = headers(os.environ.get(HEADERS, ""))
    token = security.token_in_file(arguments)
    if token is not None:
        if not endpoint.is_secure and endpoint.host not in LOOPBACK:
            raise BadInput(f"{endpoint} would get the token in plain text; use https://")
        found["Authorization"] = f"Bearer {token}"
    return CollectorAccess(found, security.context(arguments) if endpoint.is_secure else None)


def headers(text: str) -> dict[str, str]:
    """Return the headers in name=value,name=value, with percent-encoded values. Raises BadInput, without the values."""
    found: dict[str, str] = {}
    for part in filter(None, (one.strip() for one in text.split(","))):
        name, has_value, value = part.partition("=")
        name, value = name.strip(), unquote(value.strip())
        is_name = name.isascii() and bool(name) and all(char.isalnum() or char in "!#$%&'*+-.^_`|~" for char in name)
        if not has_value or not is_name or not value.isprintable() or not value.isascii():
            raise BadInput(f"{HEADERS} is name=value,name=value with percent-encoded values; part {len(found) + 1} of it isn't")
        found[name] = value
    return found


def _compresses() -> bool:
    """Return whether requests are compressed. Raises BadInput."""
    asked = os.environ.get(COMPRESSION, "") or "gzip"
    if asked not in ("gzip", "none"):
        raise BadInput(f"{COMPRESSION} is gzip or none, not {asked!r}")
    return asked == "gzip"
