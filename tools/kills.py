"""SIGKILL for a shipper and for the hub, in turn, while records flow.

The way is cut into as many parts as there are kills, and one more. Each kill happens a little behind the beginning of its part, while the
writers have most of it before them; meanwhile they go on. But at the end of the part they wait for those who were killed to be back: so
each kill meets records on their way, however fast the writers are, and however long a new process takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from daemons import Daemon, DaemonError, Hub, Shipper

INSIDE, LATE = 0.25, 0.75  # of a part that has passed when its kill happens: at the earliest, and at the latest
LONGEST = 120.0  # seconds that may pass before records flow again
EVERYTHING = float("inf")


class Kills:
    """What is killed, one after the other, and how it went on. `look` does what is due."""

    def __init__(self, hub: Hub, shippers: list[Shipper], rounds: int, say: Callable[[str], None]) -> None:
        """Take `rounds` turns: each kills another shipper, and then the hub. say: is told what happens."""
        self.hub = hub
        self.shippers = shippers
        self.targets: list[Daemon] = [target for round in range(rounds) for target in (shippers[(round + 1) % len(shippers)], hub)]
        self.killed: list[Daemon] = []
        self._say = say
        self._since = time.monotonic()
        self._is_flowing = False
        self._before = {shipper: (0, -1) for shipper in shippers}  # what each had acknowledged, and its outages, at the last kill

    @property
    def are_over(self) -> bool:
        """Return whether nothing more will be killed, and all that was is back."""
        return len(self.killed) == len(self.targets) and self._is_flowing

    @property
    def allowed(self) -> float:
        """Return up to which share of all records the writers may go for now."""
        if len(self.killed) == len(self.targets):
            return EVERYTHING
        return (len(self.killed) + 1 + self._is_flowing) / (len(self.targets) + 1)

    def look(self, appended: dict[str, int], share: float) -> None:
        """Do what is due. appended: records of each client; share: of all records that are appended. Raises DaemonError."""
        if not self._is_flowing:
            self._is_flowing = all(self._flows(shipper, appended) for shipper in self.shippers) and self.hub.is_ready
            if self._is_flowing:
                self._tell_return()
            elif time.monotonic() - self._since > LONGEST:
                raise DaemonError(f"no records flow {LONGEST:.0f} s after {self._last}. Logs: {self.hub.log.parent}")
        elif len(self.killed) < len(self.targets):
            target = self.targets[len(self.killed)]
            passed = share * (len(self.targets) + 1) - len(self.killed) - 1
            if passed >= (INSIDE if self._behind(target, appended) else LATE):
                self._kill(target, appended)

    def _kill(self, target: Daemon, appended: dict[str, int]) -> None:
        """Kill one, and start it again."""
        self._before = {shipper: (shipper.acknowledged, shipper.said["outages"]) for shipper in self.shippers}
        pid, behind = target.pid, self._behind(target, appended)
        self._since = time.monotonic()
        target.kill()
        self._is_flowing = False
        self.killed.append(target)
        self._say(f"[bold red]killed[/] {target.name} (SIGKILL, process {pid}), with {behind:,} records on their way")
        target.start()

    def _behind(self, target: Daemon, appended: dict[str, int]) -> int:
        """Return how many records have to pass a process yet, as far as the shippers have said."""
        concerned = [target] if isinstance(target, Shipper) else self.shippers
        return sum(appended[shipper.client] - shipper.acknowledged for shipper in concerned)

    def _flows(self, shipper: Shipper, appended: dict[str, int]) -> bool:
        """Return whether a shipper is in touch with the hub, since the last kill too, and got on since, if it could."""
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
