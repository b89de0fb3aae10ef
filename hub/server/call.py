"""One call of gRPC, as its handler sees it.

    class Service:
        def admit(self, call): ...            on the loop, as soon as the headers are known; must be quick; may raise Status
        async def serve(self, call): ...      on the loop, once the call has a slot; returns for success, or raises Status

        async def serve(self, call):
            async for message in call:                                  each one is held until it is released
                with message:
                    answer = await call.run(store, message.data)        blocks a thread of the pool, not the loop
                await call.write(answer)

**Threads.** A handler is a coroutine on the listener's event loop, and may not block. `run` is for functions that block, decode or compute;
its pool has few threads. A coroutine that waits costs no thread, so 10,000 idle calls are cheap. A handler may use several tasks.

**Cancellation.** If the client cancels the call, closes its connection, or exceeds its deadline, `cancelled` is set. Then the handler's
task is cancelled: `asyncio.CancelledError` is raised where it waits. A function in `run` can't be interrupted. It should look at
`cancelled` from time to time; `run` waits for it even then, so that its data isn't released under it. After that nothing reaches the
client.

**Memory.** There are three budgets, taken in this order, so that calls which hold one and wait for the next can't wait for each other:

  1. received messages. A client may only send what was granted. Release each message before you read many more.
  2. `grant`: working memory, such as the decompressed form of a message. Hold one of these grants at a time.
  3. `room`: messages to be sent. Take it before you produce the message, and pass it to `write`.

Grants and messages that a call still holds at its end are released then.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Protocol, TypeVar

import msgspec

from hub.server.budget import Budget, Grant, Share
from hub.server.limits import Address
from kvspool import system
from kvspool.system.handles import Handle

if TYPE_CHECKING:
    from typing_extensions import Buffer

Result = TypeVar("Result")
_MOST_GRANTS = 16  # released ones among them, which are then forgotten
Metadata = list[tuple[str, str | bytes]]  # names in lower case; values of names that end in "-bin" are bytes


class Code(enum.IntEnum):
    """The status codes of gRPC."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


class Status(Exception):
    """The end of a call that a handler raises. trailers: metadata sent with it."""

    def __init__(self, code: Code, message: str = "", trailers: Metadata | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.trailers: Metadata = trailers or []


class Caller(msgspec.Struct, frozen=True):
    """The other end of a call's connection. identity: the first name of its verified certificate, or its common name; "" without one."""

    address: Address
    identity: str = ""
    certificate: bytes = b""  # DER


class Message(Handle):
    """A received message. Its memory counts until `release`; nothing may use `data` afterwards. Usable as a context manager."""

    __slots__ = ("_grant", "data")

    def __init__(self, data: memoryview, grant: Grant | None) -> None:
        """Created only by the stream of a call."""
        self.data = data
        self._grant = grant

    def __len__(self) -> int:
        return len(self.data)

    @property
    def is_released(self) -> bool:
        return self._grant is None

    def release(self) -> None:
        """Stop counting the message; a second time has no effect. Callable in any thread."""
        grant, self._grant = self._grant, None
        if grant is not None:
            grant.release()

    def __enter__(self) -> Message:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class CallStream(Protocol):
    """The stream that moves a call's messages; all of it on the event loop."""

    async def read(self) -> Message | None:
        """Return the next message; None after the last one."""

    async def write(self, parts: Sequence[memoryview], room: Grant) -> None:
        """Queue a message, and wait while too much of the stream is unsent."""

    def send_metadata(self, metadata: Metadata) -> None:
        """Send the initial metadata."""


class Link(Protocol):
    """The connection that a call arrived by; it may carry more calls. Hashable by identity."""

    caller: Caller

    def __hash__(self) -> int: ...

    @property
    def name(self) -> str | None:
        """Return the authenticated name of the client; None before."""

    def authenticated(self, name: str) -> None:
        """Lift the limits of unauthenticated connections. Call it for each accepted call; the first name stays. Raises HubFull."""

    def close(self) -> None:
        """Cut the connection soon, with all of its calls. Callable in any thread."""


class Resources(msgspec.Struct, frozen=True):
    """The pool and the budgets for the calls of a connection."""

    pool: Executor
    working: Budget
    working_share: Share
    unsent: Budget
    unsent_share: Share


class Call(Handle):
    """One call; see the module. Its methods are for the event loop, `cancelled` and `deadline` for any thread."""

    def __init__(
        self, method: str, metadata: Metadata, link: Link, deadline: float | None, stream: CallStream, resources: Resources
    ) -> None:
        """Created only by a connection. method: the path, as "/package.Service/Method". deadline: of the monotonic clock, in seconds."""
        self.method = method
        self.metadata = metadata
        self.link = link
        self.deadline = deadline
        self.cancelled = threading.Event()
        self.trailers: Metadata = []  # sent with success
        self.cleanup = contextlib.ExitStack()  # closed on the loop when the call is over, however it ends; must be quick
        self._stream = stream
        self._resources = resources
        self._grants: set[Grant] = set()
        self._messages: deque[Message] = deque()  # that were read; released ones at the front are forgotten

    @property
    def caller(self) -> Caller:
        """Return the other end of the connection."""
        return self.link.caller

    def values(self, name: str) -> list[str | bytes]:
        """Return the values of a header, in their order."""
        return [value for key, value in self.metadata if key == name]

    @property
    def time_left(self) -> float | None:
        """Return how many seconds the caller will still wait; None: forever."""
        return None if self.deadline is None else self.deadline - system.port.monotonic()

    async def read(self) -> Message | None:
        """Return the next message of the client; None after its last one. Used by one task at a time.

        The following one is received meanwhile, if its memory is granted.
        """
        while self._messages and self._messages[0].is_released:
            self._messages.popleft()
        message = await self._stream.read()
        if message is not None:
            self._messages.append(message)
        return message

    def __aiter__(self) -> AsyncIterator[Message]:
        return self._all_messages()

    async def _all_messages(self) -> AsyncIterator[Message]:
        while (message := await self.read()) is not None:
            yield message

    async def write(self, *parts: Buffer, room: Grant | None = None) -> None:
        """Send one message, joined from its parts. Return when at most a bounded number of bytes of the call are unsent.

        The parts may not change afterwards: they are sent without a copy. room: from `room`, for at least the message's size; it is
        released as the message is sent. Without it, `write` waits for it. Several tasks may write; each message stays whole.
        """
        views = [memoryview(part) for part in parts]
        size = sum(view.nbytes for view in views)
        if room is None:
            room = await self.room(size)
        assert room.size >= size
        self._grants.discard(room)
        await self._stream.write([view.cast("B") for view in views if view.nbytes], room)

    def send_metadata(self, metadata: Metadata) -> None:
        """Send the initial metadata now; once, before the first message. Without it, the first message sends none."""
        self._stream.send_metadata(metadata)

    async def run(self, work: Callable[..., Result], *arguments: object) -> Result:
        """Return the result of a function that a thread of the pool calls; see `run_on`."""
        return await run_on(self._resources.pool, work, *arguments)

    async def release(self, work: Callable[[], object]) -> None:
        """Run a function that releases something, to its end: a cancellation before it begins doesn't prevent it."""
        future = asyncio.wrap_future(self._resources.pool.submit(work))
        await completed(future)
        future.result()

    async def grant(self, size: int) -> Grant:
        """Wait for working memory. Raises Status RESOURCE_EXHAUSTED if there will never be so much."""
        return await self._granted(self._resources.working, self._resources.working_share, size)

    @property
    def most_room(self) -> int:
        """Return the most bytes that `room` can grant."""
        return self._resources.unsent.largest(self._resources.unsent_share)

    async def room(self, size: int) -> Grant:
        """Wait for memory of messages to be sent. Raises Status RESOURCE_EXHAUSTED if there will never be so much."""
        return await self._granted(self._resources.unsent, self._resources.unsent_share, size)

    async def _granted(self, budget: Budget, share: Share, size: int) -> Grant:
        try:
            grant = await budget.grant(size, share)
        except ValueError as error:
            raise Status(Code.RESOURCE_EXHAUSTED, str(error)) from None
        if len(self._grants) > _MOST_GRANTS:
            self._grants = {one for one in self._grants if one.size}
        self._grants.add(grant)
        return grant

    def end(self) -> None:
        """Release what the call holds. Called by its connection when its handler has ended."""
        self.cancelled.set()
        for grant in self._grants:
            grant.release()
        for message in self._messages:
            message.release()
        self._messages.clear()
        self._grants.clear()
        self.cleanup.close()


async def run_on(pool: Executor, work: Callable[..., Result], *arguments: object) -> Result:
    """Return the result of a function that a thread of a pool calls.

    A cancelled caller waits for work that has begun, because that uses what the caller is about to release.
    """
    job = pool.submit(work, *arguments)
    future = asyncio.wrap_future(job)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        job.cancel()  # if it hasn't begun
        while not future.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([future])
        if not future.cancelled():
            future.exception()  # asyncio would log it otherwise
        raise


async def completed(future: asyncio.Future[Result]) -> None:
    """Wait until a future is done, whatever its result. If the caller is cancelled meanwhile, that is raised only then."""
    cancellation: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError as error:
            cancellation = error
    if cancellation is not None:
        if not future.cancelled():
            future.exception()  # asyncio would log it otherwise
        raise cancellation


class Service(Protocol):
    """The methods that a listener calls."""

    def admit(self, call: Call) -> None:
        """Accept a call by its headers, before anything else of it is received, or raise Status. On the loop: must be quick."""

    async def serve(self, call: Call) -> None:
        """Serve an admitted call. Return for success, or raise Status."""
