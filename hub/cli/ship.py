"""`kvspool ship`: send the records of logs to a hub, or pull those of a hub into a local root."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hub.cli import collectors, security, signals
from hub.client.ship_state import ShipState, WayStatus, failed, moved, names, notes
from hub.client_ids import check_client
from kvspool import system
from kvspool.cli import options, output
from kvspool.cli.options import BadInput
from kvspool.engine import sizes
from kvspool.errors import KvspoolError
from kvspool.system.handles import Handle

if TYPE_CHECKING:
    from rich.table import Table

    from hub.client.mirror import Mirror
    from hub.client.ship_state import Way
    from hub.client.shipper import Shipper

DESCRIPTION = """\
Send the records of logs and shard sets to a hub as they are appended, each exactly once: through outages of any length, restarts of the
hub, and crashes of this command. It resumes where the hub's records end. Ctrl-C or SIGTERM ends it after all sent records are
acknowledged.

A SOURCE is a log, or the directory of a shard set; ID=PATH sets its client id, unless that whole text is an existing path. With one
source, --client is its id; with several, it is a prefix: CLIENT-NAME, with the names of their directories. Of several hubs, separated by
commas, each client uses one, chosen by its id.

With --copies N, each client uses N of the hubs, and each gets every record. A record is acknowledged, and the log may forget it, when all N
hubs have stored it, or --acks M of them. While a hub is away, the log holds its records (--degraded wait), or the hubs that are connected
are enough (--degraded continue). A hub that returns gets the missing records from the log, or, if that no longer has them, from the other
hubs; for this, the client needs the right to read itself.

With --otlp, the logs hold requests of OpenTelemetry, as the exporters of kvspool.otel append them, and HUB is left out. Each is delivered
to the collector at least once. Those that it rejects become dead letters: kvspool tasks LOG otlp --dead shows them.

With a hub as the SOURCE, hub://HOST:PORT, its shards are pulled into the hub root DIR, given instead of HUB, with the same guarantees: a
mirror, which may be served as well. --only selects clients.

Without a terminal, a line is printed when the state changes, and each minute. --status serves the state as JSON, metrics and a health check
on a loopback port or a Unix socket; kvspool ship status ADDRESS shows it, with exit code 1 if something isn't moved. (Give a log with the
name status as ./status.)"""
EXAMPLES = """\
  kvspool ship events grpc+tls://hub.example.org:7070 --client web1 --token-file token
  kvspool ship JFK=/var/lib/flights/jfk grpc+tls://hub1:7070,grpc+tls://hub2:7070 --ca ca.pem --token-file token
  kvspool ship events grpc://127.0.0.1:7070 --client web1 --once        until the hub has all records
  kvspool ship hub://region1.example.org:7070 mirror --only 'web*' --token-file token          pull
  kvspool ship events grpc+tls://hub1:7070 --client web1 --token-file token --status /run/kvspool/ship.sock
  kvspool ship status /run/kvspool/ship.sock
  kvspool ship telemetry --otlp http://localhost:4318
  kvspool ship events grpc+tls://hub1:7070,grpc+tls://hub2:7070 --client web1 --copies 2 --acks 1 --token-file token"""
STATUS = "status"  # a source of this name, or the command
MINUTE = 60.0  # seconds between two lines without a terminal while the state doesn't change
SCHEMES = ("hub://", "grpc://", "grpc+tls://")


def add(subparsers: Any) -> None:
    """Add the command."""
    summary = "send the records of logs to a hub or a collector, as they are appended"
    parser = options.add_command(subparsers, "ship", summary, DESCRIPTION, EXAMPLES)
    parser.add_argument("sources", metavar="SOURCE", nargs="+", help="a log or a shard set, or ID=PATH; or a hub, to pull from")
    parser.add_argument(
        "hub", metavar="HUB", nargs="?", help="grpc+tls://HOST:PORT (or hub://), or several with commas; or a root to pull into"
    )
    parser.add_argument("--client", metavar="ID", help="the client's id at the hub")
    parser.add_argument("--choose", choices=("hash", "first"), default="hash", help="choice of one of several (default: %(default)s)")
    parser.add_argument("--copies", type=options.count(1), default=1, metavar="N", help="ship to N of the hubs (default: %(default)s)")
    acks = "hubs that have to store a record before the log may forget it (default: N)"
    parser.add_argument("--acks", type=options.count(1), metavar="M", help=acks)
    parser.add_argument(
        "--degraded",
        choices=("wait", "continue"),
        default="wait",
        help="while a hub is away: wait for it, or continue with the connected ones (default: %(default)s)",
    )
    parser.add_argument(
        "--accept-loss", action="store_true", help="with --copies: declare records lost that only an unreachable hub may have"
    )
    parser.add_argument("--only", metavar="PATTERN", action="append", help="pull only these clients; repeatable (default: all)")
    parser.add_argument("--once", action="store_true", help="end when the hub has all records")
    parser.add_argument("--synced", action="store_true", help="send only records on disk, even if not required by the hub")
    parser.add_argument(
        "--level", choices=("process", "disk"), help="of a mirror: its records survive a crash of the process, or of the machine (process)"
    )
    lingering = "between two batches that aren't full, seconds (default: %(default)s)"
    parser.add_argument("--linger", type=options.seconds, metavar="S", default=0.002, help=lingering)
    parser.add_argument(
        "--status", metavar="ADDRESS", help="serve the state at a loopback HOST:PORT or a socket's path: /status, /metrics, /healthz"
    )
    parser.add_argument("--interval", type=options.interval, metavar="S", default=1.0, help="between reports (default: %(default)s)")
    collectors.add(parser)
    security.add(parser)
    options.add_json(parser, "report as JSON objects, one line each")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Ship until a signal. Return 0, or the code of the error that stopped every source."""
    if arguments.otlp is None:
        if arguments.sources == [STATUS]:
            raise BadInput("ship status needs the ADDRESS of a shipper: what its --status says; a log with this name is ./status")
        if len(arguments.sources) < 2:
            raise BadInput("ship needs a hub after the sources: kvspool ship LOG HUB, or --otlp ENDPOINT for a collector")
        arguments.hub = arguments.sources.pop()
    if arguments.sources == [STATUS]:
        return _show_status(arguments)
    logging.basicConfig(level=logging.WARNING, format="kvspool: %(message)s")
    with ExitStack() as stack, options.bad_input():
        ways: list[Way] = []
        if arguments.otlp is not None:
            ways += [stack.enter_context(shipper) for shipper in collectors.shippers(arguments)]
        elif arguments.sources[0].startswith(SCHEMES):
            ways += [stack.enter_context(_mirror(arguments))]
        else:
            security.load(arguments)  # reports an invalid file at once, not at the first connection
            ways += [stack.enter_context(shipper) for shipper in _shippers(arguments)]
        if arguments.status is not None:
            from hub.client.state_listener import StateListener, parse_address

            stack.enter_context(StateListener(parse_address(arguments.status), lambda: ShipState.of(ways)))
        return _run(ways, arguments)


def _shippers(arguments: argparse.Namespace) -> Iterator[Shipper]:
    """Yield a shipper for each source."""
    from hub.client.shipper import Shipper

    if arguments.only:
        raise BadInput("--only is for a hub as the source")
    if arguments.level:
        raise BadInput("--level is for a hub as the source; a hub chooses its own level: kvspool hub serve --level")
    for client, path in named(arguments.sources, arguments.client):
        yield Shipper(
            path,
            [location(one.strip()) for one in arguments.hub.split(",")],
            client=client,
            copies=arguments.copies,
            acks=arguments.acks,
            degraded=arguments.degraded,
            may_lose=arguments.accept_loss,
            security=partial(security.load, arguments),
            choose=arguments.choose,
            isolation="synced" if arguments.synced else None,
            linger=arguments.linger,
        )


def _mirror(arguments: argparse.Namespace) -> Mirror:
    """Return the mirror that pulls the shards of a hub."""
    from hub.client.mirror import Mirror

    if arguments.copies > 1 or arguments.acks is not None or arguments.accept_loss:
        raise BadInput("--copies, --acks and --accept-loss are for logs as the sources; make a mirror for each copy")
    if len(arguments.sources) > 1 or arguments.hub.startswith(SCHEMES):
        raise BadInput("a hub is pulled into one root: kvspool ship hub://HOST:PORT DIR")
    return Mirror(
        location(arguments.sources[0]),
        arguments.hub,
        clients=arguments.only or "*",
        security=partial(security.load, arguments),
        level=arguments.level or "process",
        isolation="synced" if arguments.synced else None,
    )


def location(text: str) -> str:
    """Return the location of a hub; hub:// means the secure one."""
    return f"grpc+tls://{text.removeprefix('hub://')}" if text.startswith("hub://") else text


def named(sources: list[str], client: str | None) -> list[tuple[str, Path]]:
    """Return the client's id and the path of each source. Raises BadInput for a repeated or missing id."""
    found = []
    for source in sources:
        name, path = _split(source)
        if not name and client is None:
            raise BadInput(f"{source} has no client's id; give --client ID, or ID={source}")
        if not name:
            name = str(client) if len(sources) == 1 else f"{client}-{Path(path).resolve().name}"
        found.append((name, Path(path)))
    names = [name for name, _ in found]
    if len(set(names)) < len(names):
        raise BadInput(f"two sources have the same id: {', '.join(names)}; give ID=PATH")
    return found


def _split(source: str) -> tuple[str, str]:
    """Return the id and the path of ID=PATH; "" and the source if the whole text is a path: it exists, or its part before the first = is no
    id.
    """
    name, is_given, path = source.partition("=")
    try:
        is_id = bool(is_given) and not os.path.exists(source) and bool(check_client(name))
    except ValueError:
        is_id = False
    return (name, path) if is_id else ("", source)


class _Runs(Handle):
    """Running shippers, or a mirror, each on its own thread."""

    def __init__(self, ways: Sequence[Way], until_empty: bool) -> None:
        self.errors: dict[str, KvspoolError | OSError] = {}
        self._threads = [threading.Thread(target=self._run, args=(way, until_empty)) for way in ways]
        for thread in self._threads:
            thread.start()

    def _run(self, way: Way, until_empty: bool) -> None:
        try:
            way.run(until_empty=until_empty)
        except (KvspoolError, OSError) as error:
            self.errors[names(way.status())[0]] = error

    @property
    def are_over(self) -> bool:
        return not any(thread.is_alive() for thread in self._threads)


def _run(ways: Sequence[Way], arguments: argparse.Namespace) -> int:
    def end() -> None:
        for way in ways:
            way.stop()

    with signals.stopping(end):
        runs = _Runs(ways, arguments.once)
        _watch(ways, runs, arguments)
    for name, error in runs.errors.items():
        output.complain(f"{name}: {error}")
    return max((getattr(error, "exit_code", 1) for error in runs.errors.values()), default=0)


def _watch(ways: Sequence[Way], runs: _Runs, arguments: argparse.Namespace) -> None:
    """Show the progress until all have ended."""
    if arguments.json or not sys.stderr.isatty():
        lines = _StateLines()
        while not runs.are_over:
            _pause(runs, arguments.interval)
            if arguments.json:
                for way in ways:
                    output.print_json(way.status())
                sys.stdout.flush()
            elif not runs.are_over:
                lines.say(_statuses(ways))
        if not arguments.json:
            for status in _statuses(ways):
                output.complain(_words(status))
        return
    from rich.live import Live

    with Live(console=output.console(stderr=True), auto_refresh=False) as live:
        while not runs.are_over:
            _pause(runs, min(arguments.interval, 0.5))
            live.update(_table(_statuses(ways)), refresh=True)


def _statuses(ways: Sequence[Way]) -> list[WayStatus]:
    """Return the state of each shipper at each hub, and of each mirror."""
    return ShipState.of(ways).all


class _StateLines:
    """Prints the state of each source when it changes, and each minute."""

    def __init__(self) -> None:
        self._said: dict[tuple[str, str], tuple[object, float]] = {}  # the state, and when it was last printed

    def say(self, statuses: Sequence[WayStatus]) -> None:
        """Print what is new or due."""
        for status in statuses:
            now = system.port.monotonic()
            name, target = names(status)
            state = status.state, status.error, failed(status), bool(notes(status))
            before, at = self._said.get((name, target), (None, -MINUTE))
            if state == before and now < at + MINUTE:
                continue
            self._said[name, target] = state, now
            again = f", again in {status.retry_in:.0f} s" if status.state == "waiting" else ""
            output.complain(f"{name}: {status.state}{again}; {output.counted(moved(status), 'record')} to {target}, {status.behind:,} left")
            for words in [*([status.error] if status.error else []), *failed(status), *notes(status)]:
                output.complain(f"{name}: {words}")


def _show_status(arguments: argparse.Namespace) -> int:
    """Show the state of a running shipper or mirror; code 1 if something isn't moved."""
    import msgspec

    from hub.client.state_listener import ask, parse_address

    try:
        code, body = ask(parse_address(arguments.hub), "/status")
        state = msgspec.json.decode(body, type=ShipState)
    except msgspec.MsgspecError:
        raise BadInput(f"{arguments.hub} does not answer as a shipper does (code {code})") from None
    except ValueError as error:
        raise BadInput(str(error)) from error
    if arguments.json:
        output.print_json(state)
    else:
        output.print_table(_table(state.all))
        for words in state.troubles():
            output.complain(words)
    return 1 if state.troubles() else 0


def _pause(runs: _Runs, seconds: float) -> None:
    """Wait, at most until all have ended."""
    end = system.port.monotonic() + seconds
    while not runs.are_over and (left := end - system.port.monotonic()) > 0:
        system.port.sleep(min(left, 0.1))


def _words(status: WayStatus) -> str:
    source, target = names(status)
    words = f"{source}: {output.counted(moved(status), 'record')}, {sizes.show(status.bytes)} to {target}, {status.behind:,} left"
    if status.lost:
        words += f"; {status.lost:,} were lost before they could be moved"
    words += "".join(f"; {note}" for note in notes(status))
    return words + (f"; {status.error}" if status.error else "")


def _table(statuses: Sequence[WayStatus]) -> Table:
    from rich.text import Text

    rows: list[list[str | Text]] = []
    for status in statuses:
        state = f"{status.state}, again in {status.retry_in:.0f} s" if status.state == "waiting" else status.state
        style = "green" if status.state == "connected" else "yellow"
        lost = Text(f"{status.lost:,}", "bold red" if status.lost else "")
        counts: list[str | Text] = [f"{status.behind:,}", f"{moved(status):,}", sizes.show(status.bytes), lost, f"{status.outages:,}"]
        rows.append([*names(status), Text(state, style), *counts])
    numbers = ("behind", "moved", "bytes", "lost", "outages")
    return output.rows(("from", "to", "state", *numbers), rows, numbers)
