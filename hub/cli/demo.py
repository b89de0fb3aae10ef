"""`kvspool demo`: a hub, three clients and a small load on this machine, to look at."""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kvspool
from hub.cli import signals
from hub.root.root import HubRoot
from kvspool import Log
from kvspool.cli import options, output

if TYPE_CHECKING:
    from hub.client.shipper import Shipper
    from hub.server.server import HubServer

DESCRIPTION = """\
Start a hub and three clients on this machine. Each client has a log, to which a program appends some events a second, and a shipper that
sends them to the hub. The address of the hub's page is printed, and opened in a browser if this is a terminal. Ctrl-C ends the demo: it
ships the rest, counts the records on both sides, and says what to do next. Needs the extra hub."""
EXAMPLES = """\
  kvspool demo
  kvspool demo --directory demo --seconds 30        keep the logs and the hub root
  kvspool tail demo/hub --follow                    meanwhile, in another terminal"""

CLIENTS = ("shop", "stock", "website")
EVENTS = ("view", "cart", "buy", "refund")
RATE = 20  # events a second for each client
CAPACITY = "4MiB"  # of a client's log
LEAST_FREE = 64 << 20  # bytes of the disk
LONGEST_SHIPMENT = 30.0  # seconds for the rest of the records at the end

NEXT = """\
Next:
  kvspool create events                                     a log of your own
  echo '{"user": 7}' | kvspool append events --json-lines
  kvspool tail events --follow
  kvspool hub serve --root hub --anonymous                  a hub for it, on this machine
  kvspool ship events grpc://127.0.0.1:7070 --client me
  kvspool COMMAND --help                                    everything else"""


def add(subparsers: Any) -> None:
    """Add `kvspool demo`."""
    parser = options.add_command(subparsers, "demo", "try a hub with three clients on this machine", DESCRIPTION, EXAMPLES)
    parser.add_argument("--directory", type=Path, metavar="DIR", help="a new directory that is kept (default: a temporary one)")
    parser.add_argument("--seconds", type=options.seconds, metavar="S", help="end after S seconds (default: at Ctrl-C)")
    parser.add_argument("--no-browser", action="store_true", help="open no browser")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run until Ctrl-C or the time is over, and compare both sides."""
    is_over = threading.Event()
    with ExitStack() as stack:
        place = _place(arguments.directory, stack)
        HubRoot.create(place / "hub").close()
        server, page = stack.enter_context(_hub(place / "hub"))
        clients = {name: stack.enter_context(kvspool.create(place / name, capacity=CAPACITY)) for name in CLIENTS}
        with _shipping(clients, server.location) as ship_rest:
            print(output.escape(f"hub {server.location}, page {page}"))
            print(output.escape(f"clients {', '.join(str(place / name) for name in CLIENTS)}"))
            print("Ctrl-C ends the demo" if arguments.seconds is None else f"ends after {arguments.seconds:g} s", flush=True)
            if not arguments.no_browser and output.is_terminal():
                _browse(page)
            with signals.stopping(is_over.set):
                appended = _load(clients, is_over, arguments.seconds)
            ship_rest()
        return _conclude(place / "hub", appended, arguments.directory)


def _place(directory: Path | None, stack: ExitStack) -> Path:
    if directory is None:
        return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvspool-demo-")))
    directory.mkdir(mode=0o700)
    return directory


@contextmanager
def _hub(root: Path) -> Iterator[tuple[HubServer, str]]:
    """Serve a hub root and its page at free ports of the loopback; yield the server and the page's address."""
    from hub.security.access import Access
    from hub.server.server import HubServer
    from hub.web.page import HubPage

    with HubServer(root, access=Access.anonymous(), listen=("127.0.0.1", 0), least_free=LEAST_FREE) as server:
        with HubPage(server.status, listen=("127.0.0.1", 0), records=server.recent.read) as page:
            yield server, page.url


@contextmanager
def _shipping(clients: Mapping[str, Log], location: str) -> Iterator[Callable[[], None]]:
    """Ship each client's log in a thread; yield a function that ships the rest and returns."""
    from hub.client.shipper import Shipper

    with ExitStack() as stack:
        shippers = [stack.enter_context(Shipper(log.path, location, client=name)) for name, log in clients.items()]
        threads = [threading.Thread(target=shipper.run, name=f"ship {shipper.client}", daemon=True) for shipper in shippers]
        for thread in threads:
            thread.start()

        def ship_rest() -> None:
            deadline = time.monotonic() + LONGEST_SHIPMENT
            while any(map(_has_more, shippers)) and time.monotonic() < deadline:
                time.sleep(0.02)

        try:
            yield ship_rest
        finally:
            for shipper in shippers:
                shipper.stop()
            for thread in threads:
                thread.join()


def _has_more(shipper: Shipper) -> bool:
    return shipper.status().behind > 0


def _load(clients: Mapping[str, Log], is_over: threading.Event, seconds: float | None) -> dict[str, int]:
    """Append events until it is over, and return how many each client has appended. On a terminal a line counts them."""
    chance = random.Random(7)
    appended = dict.fromkeys(clients, 0)
    until = float("inf") if seconds is None else time.monotonic() + seconds
    while time.monotonic() < until and not is_over.wait(1 / RATE):
        for name, log in clients.items():
            user = chance.randrange(100)
            log.append({"user": user, "event": chance.choice(EVENTS), "cents": chance.randrange(10_000)}, key=str(user))
            appended[name] += 1
        if output.is_terminal():
            sys.stdout.write(f"\r{sum(appended.values()):,} events")
            sys.stdout.flush()
    if output.is_terminal():
        print()
    return appended


def _browse(page: str) -> None:
    """Open the page; a machine without a browser has the address."""
    import webbrowser

    try:
        webbrowser.open(page)
    except webbrowser.Error:
        pass


def _conclude(root: Path, appended: dict[str, int], directory: Path | None) -> int:
    """Compare the records at the hub with those that were appended; 1 if they differ."""
    with HubRoot.open(root) as hub:
        stored = {one.client: one.records for one in hub.stats().clients}
    for name, count in appended.items():
        print(f"{name}: {count:,} appended, {stored.get(name, 0):,} at the hub")
    print(NEXT)
    if directory is not None:
        print(output.escape(f"  kvspool ls {directory}"))
    return 0 if stored == {name: count for name, count in appended.items() if count} else 1
