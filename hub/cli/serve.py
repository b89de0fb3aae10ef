"""`kvspool hub serve`: a hub root on the network."""

from __future__ import annotations

import argparse
import logging
import os
import resource
import sys
import threading
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hub.cli import signals
from hub.root.root import HubRoot
from hub.server.limits import Limits
from kvspool.cli import options, output
from kvspool.cli.options import BadInput
from kvspool.errors import LogExists

if TYPE_CHECKING:
    from hub.server.server import HubServer

DESCRIPTION = """\
Store records from shippers and serve them to readers, until Ctrl-C or SIGTERM. A missing root is created. All acknowledged records are in
the journals under the root; a hub that was killed continues at their ends.

An access file has the rights of users; `kvspool hub token` creates one. On a loopback address, --anonymous gives everyone all rights
instead. Any other address needs a certificate: from your own authority, or from `kvspool hub certificate init`. Access file and
certificates are read again when they change, without disconnecting clients."""
EXAMPLES = """\
  kvspool hub certificate init /etc/kvspool --name hub.example.org
  kvspool hub token add /etc/kvspool/access.toml --name jfk --output jfk.token
  kvspool hub serve --root /var/lib/hub --listen 0.0.0.0:7070 --access /etc/kvspool/access.toml \\
      --certificate /etc/kvspool/server.pem --key /etc/kvspool/server.key
  kvspool hub serve --root flights --anonymous          for this host only, at 127.0.0.1:7070"""

LIMITS = (
    f"limits of connections: connections ({Limits().connections}), connections_per_principal ({Limits().connections_per_principal}), "
    f"idle_seconds ({Limits().idle_seconds:g}), and others, see docs/hub.md"
)


def add(commands: Any) -> None:
    """Add the command."""
    parser = options.add_command(commands, "serve", "store shipped records and serve them", DESCRIPTION, EXAMPLES)
    parser.add_argument("--root", type=Path, required=True, metavar="DIR", help="the hub root")
    parser.add_argument(
        "--listen", type=address, default=("127.0.0.1", 7070), metavar="HOST:PORT", help="default: 127.0.0.1:7070; port 0 takes any"
    )
    parser.add_argument(
        "--level",
        choices=("process", "disk"),
        default="process",
        help="acknowledged records survive a crash of the hub process, or of the machine (default: %(default)s)",
    )
    parser.add_argument("--least-free", type=options.size, default="1GiB", metavar="SIZE", help="keep this free on the disk (%(default)s)")
    parser.add_argument("--largest-batch", type=options.size, default="64MiB", metavar="SIZE", help="largest accepted batch (%(default)s)")
    parser.add_argument(
        "--memory",
        type=options.size,
        metavar="SIZE",
        help="limit for all batches that are received, decompressed or sent (half of that of the machine, or of its control group)",
    )
    who = parser.add_argument_group("access control")
    rights = who.add_mutually_exclusive_group(required=True)
    rights.add_argument("--access", type=Path, metavar="FILE", help="the access file")
    rights.add_argument("--anonymous", action="store_true", help="give everyone all rights; only on a loopback address")
    who.add_argument("--certificate", type=Path, metavar="FILE", help="the hub's certificate and its chain (PEM)")
    who.add_argument("--key", type=Path, metavar="FILE", help="its key (PEM), mode 600")
    who.add_argument("--client-ca", type=Path, metavar="FILE", help="clients must show a certificate of this authority (PEM)")
    page = parser.add_argument_group("the page")
    page.add_argument("--page", type=address, default=("127.0.0.1", 7071), metavar="HOST:PORT", help="default: 127.0.0.1:7071")
    page.add_argument("--no-page", action="store_true", help="serve no page")
    page.add_argument(
        "--page-name", action="append", default=[], metavar="NAME", help="another host name that browsers or Prometheus use; repeatable"
    )
    parser.add_argument("--limits", type=limits, default=Limits(), metavar="NAME=N,...", help=LIMITS)
    options.add_json(parser, "print the addresses as a JSON object")
    parser.set_defaults(run=run)


def address(text: str) -> tuple[str, int]:
    """Return host and port."""
    host, colon, port = text.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"an address is HOST:PORT, not {text!r}")
    return host.removeprefix("[").removesuffix("]") or "0.0.0.0", int(port)


def limits(text: str) -> Limits:
    """Return the limits of connections."""
    known = Limits()
    found: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        name = name.strip().replace("-", "_")
        if name not in Limits.__struct_fields__:
            raise argparse.ArgumentTypeError(f"the limits are {', '.join(Limits.__struct_fields__)}, not {name!r}")
        try:
            found[name] = options.size(value) if name.endswith("_bytes") else type(getattr(known, name))(value)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{name} is a number, not {value!r}") from None
    try:
        return Limits(**found)  # type: ignore[arg-type]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    with suppress(LogExists):
        HubRoot.create(arguments.root).close()
    HubRoot.open(arguments.root).close()
    _raise_descriptors()
    is_over = threading.Event()
    with signals.stopping(is_over.set), ExitStack() as stack:
        hub = stack.enter_context(_server(arguments))
        said = {"location": hub.location, "root": str(hub.root), "level": hub.level}
        if not arguments.no_page:
            said["page"] = _page(hub, arguments, stack)
        _say(said, arguments.json)
        signals.wait(is_over)
    return 0


def _server(arguments: argparse.Namespace) -> HubServer:
    from hub.security.access import Access
    from hub.security.certificates import Certificates
    from hub.server.server import SHARES, HubServer

    if (arguments.certificate is None) != (arguments.key is None):
        raise BadInput("--certificate and --key go together")
    if arguments.client_ca is not None and arguments.certificate is None:
        raise BadInput("--client-ca needs --certificate and --key")
    certificates = None
    if arguments.certificate is not None:
        certificates = Certificates(arguments.certificate, arguments.key, arguments.client_ca)
    try:
        return HubServer(
            arguments.root,
            access=Access.anonymous() if arguments.anonymous else Access.load(arguments.access),
            certificates=certificates,
            listen=arguments.listen,
            level=arguments.level,
            limits=arguments.limits,
            least_free=arguments.least_free,
            largest_batch=arguments.largest_batch,
            memory=arguments.memory or max(half_of_all(), SHARES * arguments.largest_batch),
            probes=True,
        )
    except ValueError as error:
        raise BadInput(str(error)) from error


def _page(hub: HubServer, arguments: argparse.Namespace, stack: ExitStack) -> str:
    """Serve the page. Return its address."""
    from hub.web.page import HubPage

    page = stack.enter_context(HubPage(hub.status, listen=arguments.page, names=arguments.page_name, records=hub.recent.read))
    return page.url


def _say(said: dict[str, str], is_json: bool) -> None:
    if is_json:
        output.print_json(said)
    else:
        print(output.escape(f"the hub {said['root']} listens at {said['location']} (level {said['level']})"))
        if "page" in said:
            print(output.escape(f"its page: {said['page']}"))
    sys.stdout.flush()


def _raise_descriptors() -> None:
    """Raise the limit of descriptors as far as permitted: each written shard needs a few."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def half_of_all(groups: Path = Path("/proc/self/cgroup"), mounted: Path = Path("/sys/fs/cgroup")) -> int:
    """Return half of the memory that this process may use, in bytes. That is the memory of the machine, or of its control group."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    with suppress(OSError):
        for line in groups.read_text(encoding="utf-8").splitlines():
            _, kinds, path = line.split(":", 2)
            if kinds in ("", "memory"):
                top, name = (mounted, "memory.max") if not kinds else (mounted / "memory", "memory.limit_in_bytes")
                group = top / path.lstrip("/")
                limits += filter(None, (_limit(each / name) for each in (group, *group.parents) if each.is_relative_to(top)))
    return min(limits) // 2


def _limit(path: Path) -> int | None:
    """Return the limit in a file of a control group; None without one."""
    with suppress(OSError, ValueError):
        return int(path.read_text(encoding="ascii"))  # "max" is no number
    return None
