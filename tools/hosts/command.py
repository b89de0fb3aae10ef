"""Make hosts out of namespaces of this machine, joined by a network that fails on request.

Each host has an address, a host name, processes, a /proc and a /dev/shm of its own, and the files of this machine. Hosts reach each other
by name, and no other network. A switch in user space joins them. It can lose, delay, repeat and reorder packets, limit bandwidth, and cut
one direction or both. The kernel needs neither netem nor a packet filter, but only root may make hosts. They end with the command that
made them, also if it is killed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from hosts import namespaces
from hosts.cluster import MTU, STATE, Cluster, Link, NoNamespaces, command, running

FAULTS = {
    "loss": "the probability that a packet is lost",
    "delay": "seconds until a packet arrives",
    "jitter": "up to so many seconds more, different for each packet",
    "reorder": "the probability that a packet is passed by later ones",
    "duplicate": "the probability that a packet arrives twice",
    "rate": "bytes a second; 0 is no limit. A queue holds 0.5 s of packets and drops later ones",
}
EXAMPLES = """examples:
  tools/cluster run --hosts hub,web -- bash                    a shell on `hub`; it ends the cluster. In other terminals:
  tools/cluster exec web -- ping hub                           a command on another host
  tools/cluster link web hub --loss 0.05 --delay 0.02          both directions: 5 % of packets are lost, the others arrive 20 ms later
  tools/cluster link web hub --cut --one-way                   nothing from `web` arrives at `hub`
  tools/cluster link web hub --heal                            no faults any more
  tools/cluster show                                           addresses, faults, and how often each happened

In Python, with tools/ in PYTHONPATH:
  from hosts import Cluster
  with Cluster(["hub", "web"]) as cluster:
      process = cluster["web"].start(["ping", "hub"])          a subprocess.Popen
      cluster.link("web", "hub").cut()
      cluster["web"].crash()                                   all its processes end at once

tools/faults/cluster uses it for a campaign of faults with a hub and two clients."""
SCRIPTS = Path(__file__).resolve().parents[2] / ".venv" / "bin"


class Refused(Exception):
    """The command can't be obeyed; the message has the reason."""


def main() -> int:
    """Run the command, and return its exit code."""
    arguments, words = sys.argv[1:], list[str]()
    if "--" in arguments:
        at = arguments.index("--")
        arguments, words = arguments[:at], arguments[at + 1 :]
    options = parser().parse_args(arguments)
    if (options.verb in ("run", "exec")) != bool(words):
        print(f"tools/cluster {options.verb}: {'give a command after --' if not words else 'takes no command'}", file=sys.stderr)
        return 2
    if SCRIPTS.is_dir():
        os.environ["PATH"] = f"{SCRIPTS}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    try:
        if options.verb == "run":
            return run(options, words)
        folder = chosen(options.cluster)
        if options.verb == "exec":
            return execute(folder, options.host, words)
        return link(folder, options) if options.verb == "link" else show(folder)
    except (NoNamespaces, Refused, ValueError) as error:
        print(f"tools/cluster: {error}", file=sys.stderr)
        return 1


def parser() -> argparse.ArgumentParser:
    """Return the parser of the words before `--`."""
    whole = argparse.ArgumentParser(
        prog="tools/cluster", description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = whole.add_subparsers(dest="verb", required=True, metavar="VERB")
    run = verbs.add_parser("run", help="make hosts, run a command on one of them, and end with it", usage="%(prog)s --hosts A,B,... -- CMD")
    run.add_argument("--hosts", required=True, metavar="A,B,...", help="their names")
    run.add_argument("--on", metavar="HOST", help="the host of the command (the first one)")
    run.add_argument("--mtu", type=int, default=MTU, help=f"the largest packet ({MTU})")
    run.add_argument("--seed", type=int, help="of the packets that are lost, repeated or passed by others")
    execute = verbs.add_parser("exec", help="run a command on a host of a running cluster", usage="%(prog)s HOST -- CMD")
    execute.add_argument("host", metavar="HOST")
    link = verbs.add_parser("link", help="change the faults between two hosts of a running cluster; those that are not named stay")
    link.add_argument("first", metavar="HOST")
    link.add_argument("second", metavar="HOST")
    link.add_argument("--one-way", action="store_true", help="only from the first host to the second one")
    link.add_argument("--heal", action="store_true", help="take back all faults first")
    link.add_argument("--cut", action="store_const", const=True, help="let nothing arrive")
    for name, text in FAULTS.items():
        link.add_argument(f"--{name}", type=float, metavar="N", help=text.replace("%", "%%"))
    show = verbs.add_parser("show", help="show a running cluster")
    for each in (execute, link, show):
        each.add_argument("--cluster", metavar="NAME", help="its name, if several are running; an error lists them")
    return whole


def run(options: argparse.Namespace, words: list[str]) -> int:
    """Make a cluster for one command."""
    names = options.hosts.split(",")
    if options.on not in (None, *names):
        raise Refused(f"{options.on!r} is none of the hosts {options.hosts}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    signal.signal(signal.SIGHUP, lambda *_: sys.exit(128 + signal.SIGHUP))
    with Cluster(names, seed=options.seed, mtu=options.mtu) as cluster:
        return waited(lambda: cluster[options.on or names[0]].start(words, cwd=None))


def execute(folder: Path, name: str, words: list[str]) -> int:
    """Run a command on one host of a cluster that another process made."""
    hosts = state(folder)
    if name not in hosts:
        raise Refused(f"{name!r} is none of the hosts {', '.join(hosts)}")
    try:
        namespaces.enter(int(str(hosts[name]["pid"])))
    except OSError as error:
        raise Refused(f"{name} can't be entered: {error}") from error
    return waited(lambda: subprocess.Popen(words))


def waited(start: Callable[[], subprocess.Popen[bytes]]) -> int:
    """Wait for a process, and return its exit code as a shell does. Ctrl-C is for the process."""
    try:
        process = start()
    except OSError as error:
        raise Refused(str(error)) from error
    signal.signal(signal.SIGINT, lambda *_: None)
    code = process.wait()
    return code if code >= 0 else 128 - code


def link(folder: Path, options: argparse.Namespace) -> int:
    """Change the faults of a link."""
    hosts = state(folder)
    for name in (options.first, options.second):
        if name not in hosts or options.first == options.second:
            raise Refused(f"give two of the hosts {', '.join(hosts)}")
    between = Link(folder, options.first, options.second)
    if options.heal:
        between.heal(one_way=options.one_way)
    faults = {name: value for name in ("cut", *FAULTS) if (value := getattr(options, name)) is not None}
    if not faults and not options.heal:
        raise Refused("name a fault, or --heal")
    between.set(one_way=options.one_way, **faults)
    return 0


def show(folder: Path) -> int:
    """Print the hosts and ways of a cluster."""
    for name, host in state(folder).items():
        print(f"{name}  {host['address']}  process {host['pid']}")
    for way in command(folder, {}):
        faults = ", ".join(name if value is True else f"{name} {value:g}" for name, value in way["faults"].items() if value)
        counts = ", ".join(f"{count} {name}" for name, count in way["counts"].items() if count)
        print(f"{way['from']} -> {way['to']}: {faults or 'no faults'}; {counts or 'no packets'}")
    return 0


def state(folder: Path) -> dict[str, dict[str, object]]:
    """Return address and process of each host of a cluster."""
    with contextlib.suppress(FileNotFoundError):
        hosts: dict[str, dict[str, object]] = json.loads((folder / STATE).read_text())["hosts"]
        return hosts
    raise Refused("the cluster has just ended")


def chosen(name: str | None) -> Path:
    """Return the folder of a running cluster: the only one, if it is not named."""
    found = running()
    if not found:
        raise Refused("no cluster is running: start one with `tools/cluster run`")
    if name is None and len(found) == 1:
        return next(iter(found.values()))
    if name not in found:
        raise Refused(f"choose one with --cluster: {', '.join(sorted(found))}")
    return found[name]
