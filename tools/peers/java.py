"""The peers for Java: their programs measure themselves, each in a Java process of its own."""

from __future__ import annotations

import subprocess
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from cases.case import Bench

from peers.jars import classpath, started
from peers.peer import WRITERS, Peer, Place, Writer, free_port, names

LAST_WORDS = 20  # lines shown of a program that failed
MARK = "bench: "  # at the beginning of lines of our programs


class JavaPeer(Peer):
    """A peer whose program prints rates and latencies. Its verbs in Python are not used."""

    batches = False  # their interfaces have no call for many records
    replayed = 1_000_000  # so that the reader is compiled when it counts

    def __init__(self, key: str, title: str, program: str, artifact: str) -> None:
        super().__init__(key, title)
        self._program, self._artifact = program, artifact

    def write(self, place: Place) -> AbstractContextManager[Writer]:
        """Not used."""
        raise NotImplementedError

    def replay(self, place: Place, count: int) -> Iterable[object]:
        """Not used."""
        raise NotImplementedError

    @abstractmethod
    def arguments(self, verb: str, place: Place, amount: float) -> list[str]:
        """Return the arguments of the program."""

    @contextmanager
    def run(self, verb: str, place: Place, amount: float) -> Iterator[subprocess.Popen[str]]:
        """Run the program, and kill it at the end."""
        with started(self._artifact, self._program, *self.arguments(verb, place, amount)) as process:
            try:
                yield process
            finally:
                process.kill()

    def appended(self, bench: Bench, place: Place) -> float:
        """Return the records per second of one process, after a warm-up."""
        return self._rate_of(1, bench, place)

    def shared(self, bench: Bench, place: Place) -> float:
        """Return the records per second of four processes in all, after a warm-up."""
        return self._rate_of(bench.size(WRITERS, 2), bench, place)

    def _rate_of(self, processes: int, bench: Bench, place: Place) -> float:
        with ExitStack() as stack:
            running = [stack.enter_context(self.run("append", place, bench.seconds)) for _ in range(processes)]
            for process in running:
                answer(process)
            for process in running:
                begin(process)
            return sum(float(answer(process)) for process in running)

    def replayed_rate(self, bench: Bench, place: Place) -> float:
        """Return the records per second of a warm reader."""
        with self.run("replay", place, bench.size(self.replayed, 1000)) as process:
            return float(answer(process))

    def wake_up(self, bench: Bench, place: Place) -> float:
        """Return the median of the times until a spinning process has a record, as a rate per second."""
        count = bench.size(1000, 20)
        with self.run("follow", place, count) as reader:
            answer(reader)
            begin(reader)
            with self.run("send", place, count) as writer:
                answer(writer)
                begin(writer)
                return 1e9 / float(answer(reader))


def answer(process: subprocess.Popen[str]) -> str:
    """Return the next line of a program."""
    assert process.stdout is not None
    others: deque[str] = deque(maxlen=LAST_WORDS)  # lines of libraries, and of the error if there is one
    for line in process.stdout:
        if line.startswith(MARK):
            return line.removeprefix(MARK).strip()
        others.append(line)
    raise SystemExit(f"{' '.join(map(str, process.args[-6:]))} ended early:\n{''.join(others)}")  # type: ignore[index]


def begin(process: subprocess.Popen[str]) -> None:
    """Let a program that is ready work."""
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


class Chronicle(JavaPeer):
    """A queue that processes share by mappings, as kvspool does. Its free edition flushes nothing on request."""

    flushes = False

    @contextmanager
    def serve(self, folder: Path, level: str) -> Iterator[Callable[[], Place]]:
        """Yield a function that names a queue, which is created when it is opened."""
        classpath(self._artifact)
        found = names()
        yield lambda: Place(str(folder), next(found), level)

    def arguments(self, verb: str, place: Place, amount: float) -> list[str]:
        """Return VERB PATH AMOUNT."""
        return [verb, str(place.path), str(amount)]


class Aeron(JavaPeer):
    """Publications by shared memory, and an archive that records them."""

    @contextmanager
    def serve(self, folder: Path, level: str) -> Iterator[Callable[[], Place]]:
        """Start the media driver with the archive."""
        found = iter(range(1, 400))
        server = started(self._artifact, self._program, "serve", str(folder), str(free_port()), "-", level)
        try:
            answer(server)
            yield lambda: Place(str(folder), str(next(found)), level)
        finally:
            server.kill()
            server.wait()

    def arguments(self, verb: str, place: Place, amount: float) -> list[str]:
        """Return VERB PATH STREAM AMOUNT LEVEL."""
        return [verb, place.address, place.name, str(amount), place.level]


PEERS = {
    "chronicle": Chronicle("chronicle", "Chronicle Queue, Java, spinning", "Chronicle", "chronicle-queue"),
    "aeron": Aeron("aeron", "Aeron Archive, Java, spinning", "Aeron", "aeron-archive"),
}
