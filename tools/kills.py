"""SIGKILL for a shipper and for the hub, in turn, while records are sent.

The job is divided into one part more than there are kills. Each kill happens shortly after the beginning of its part, when the writers have
most of the part left; they continue meanwhile. At the end of the part they wait until the killed processes are back. So each kill
happens while records are in transit, for any speed of the writers and any start time of a process.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from daemons import Daemon, DaemonError, Hub, Shipper

INSIDE, LATE = 0.25, 0.75  # share of a part before its kill: at the earliest, and at the latest
LONGEST = 120.0  # longest time until records are sent again, in seconds
EVERYTHING = float("inf")


class Kills:
    """The kills, one after the other, and their recovery. `look` does the next step when it is due."""

    def __init__(self, hub: Hub, shippers: list[Shipper], rounds: int, say: Callable[[str], None]) -> None:
        """Plan `rounds` rounds: each kills another shipper, and then the hub. say: prints a message."""
        self.hub = hub
        self.shippers = shippers
        self.targets: list[Daemon] = [target for round in range(rounds) for target in (shippers[(round + 1) % len(shippers)], hub)]
        self.killed: list[Daemon] = []
        self._say = say
        self._since = time.monotonic()
        self._is_flowing = False
        self._before = {shipper: (0, -1) for shipper in shippers}  # acknowledged records and outages of each at the last kill

    @property
    def are_over(self) -> bool:
        """Return whether all kills are done, and all killed processes are back."""
        return len(self.killed) == len(self.targets) and self._is_flowing

    @property
    def is_flowing(self) -> bool:
        """Return whether records are sent, so that no process has yet to return after a kill."""
        return self._is_flowing

    @property
    def allowed(self) -> float:
        """Return the share of all records that the writers may append for now."""
        if len(self.killed) == len(self.targets):
            return EVERYTHING
        return (len(self.killed) + 1 + self._is_flowing) / (len(self.targets) + 1)

    def look(self, appended: dict[str, int], share: float) -> None:
        """Do the next step if it is due. appended: records of each client; share: of all records that are appended. Raises DaemonError."""
        if not self._is_flowing:
            self._is_flowing = all(self._flows(shipper, appended) for shipper in self.shippers) and self.hub.is_ready
            if self._is_flowing:
                self._tell_return()
            elif time.monotonic() - self._since > LONGEST:
                raise DaemonError(f"no records are sent {LONGEST:.0f} s after {self._last}. Logs: {self.hub.log.parent}")
        elif len(self.killed) < len(self.targets):
            target = self.targets[len(self.killed)]
            passed = share * (len(self.targets) + 1) - len(self.killed) - 1
            if passed >= (INSIDE if self._in_transit(target, appended) else LATE):
                self._kill(target, appended)

    def _kill(self, target: Daemon, appended: dict[str, int]) -> None:
        """Kill a process, and restart it."""
        self._before = {shipper: (shipper.acknowledged, shipper.said["outages"]) for shipper in self.shippers}
        pid, in_transit = target.pid, self._in_transit(target, appended)
        self._since = time.monotonic()
        target.kill()
        self._is_flowing = False
        self.killed.append(target)
        self._say(f"[bold red]killed[/] {target.name} (SIGKILL, process {pid}), with {in_transit:,} records in transit")
        target.start()

    def _in_transit(self, target: Daemon, appended: dict[str, int]) -> int:
        """Return how many records have yet to pass a process, by the shippers' reports."""
        concerned = [target] if isinstance(target, Shipper) else self.shippers
        return sum(appended[shipper.client] - shipper.acknowledged for shipper in concerned)

    def _flows(self, shipper: Shipper, appended: dict[str, int]) -> bool:
        """Return whether a shipper is connected to the hub, again since the last kill, and has made progress since, if it had records."""
        shipper.check()
        acknowledged, outages = self._before[shipper]
        was_cut = self.killed and isinstance(self.killed[-1], Hub)
        if not shipper.is_connected or (was_cut and shipper.said["outages"] <= outages):
            return False
        return shipper.acknowledged > acknowledged or shipper.acknowledged == appended[shipper.client] > 0

    def _tell_return(self) -> None:
        seconds = time.monotonic() - self._since
        if not self.killed:
            self._say(f"all shippers are connected after {seconds:.1f} s")
            return
        last = self.killed[-1]
        acknowledged = sum(shipper.acknowledged for shipper in self.shippers)
        self._say(f"[bold green]back[/] after {seconds:.1f} s: {last.name} (process {last.pid}); the hub has acknowledged {acknowledged:,}")

    @property
    def _last(self) -> str:
        return f"{self.killed[-1].name} was killed" if self.killed else "the start"
