"""The methods of Arrow Flight that a hub offers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from hub.errors import HubFull, Malformed
from hub.protocol.reading import LARGEST_COMMIT
from hub.security.quotas import Meters
from hub.server import consumers, read_service
from hub.server.authentication import Authentication, Standing
from hub.server.call import Call, Code, Status
from hub.server.consumers import Consumers
from hub.server.flight import SERVICE, Action, FlightDescriptor, encode_action_type, encode_result, only_bytes
from hub.server.read_service import ReadService
from hub.server.refusals import status_of
from hub.server.steps import Step, Steps
from kvspool.system.handles import Handle

LARGEST_REQUEST = LARGEST_COMMIT + (1 << 16)  # bytes of the request of a reader
AT_ONCE = 16  # flights that are described at once
Exchange = Callable[[Call, Standing], Awaitable[None]]


class FlightService(Handle):
    """Serves the calls of a listener. exchange: serves a shipper's call."""

    def __init__(
        self,
        root: Path,
        authentication: Authentication,
        meters: Meters,
        reads: ReadService,
        readers: Consumers,
        exchange: Exchange,
        steps: Steps,
    ) -> None:
        self._root = root
        self._authentication = authentication
        self._meters = meters
        self._reads = reads
        self._readers = readers
        self._steps = steps
        self._callers: dict[Call, Standing] = {}
        self._methods: dict[str, Exchange] = {
            f"{SERVICE}DoExchange": exchange,
            f"{SERVICE}DoGet": self._do_get,
            f"{SERVICE}DoAction": self._do_action,
            f"{SERVICE}ListActions": self._list_actions,
            f"{SERVICE}ListFlights": self._list_flights,
            f"{SERVICE}GetFlightInfo": self._get_flight_info,
            f"{SERVICE}GetSchema": self._get_schema,
        }

    def admit(self, call: Call) -> None:
        """Authenticate a caller by the headers of its call, and count the call. Raises Status."""
        try:
            caller = self._authentication.caller(call)
            principal = caller.principal
            is_new = call.link.name is None
            call.link.authenticated(principal.name)
            if is_new:
                self._steps.complete(Step.CONNECT)
            call.cleanup.enter_context(self._meters.of(principal.name, principal.quota).call(call.link))
        except Exception as error:
            raise status_of(error, self._root) from None
        if call.method not in self._methods:
            raise Status(Code.UNIMPLEMENTED, "a hub has no such method")
        self._callers[call] = caller
        call.cleanup.callback(self._callers.pop, call)

    async def serve(self, call: Call) -> None:
        """Serve an admitted call. Raises Status."""
        try:
            await self._methods[call.method](call, self._callers[call])
        except Status:
            raise
        except Exception as error:
            raise status_of(error, self._root) from None

    def refusal(self, reason: str, seconds: float) -> Status:
        """Return the status for a call that the server has no room for; `seconds` until a retry."""
        return status_of(HubFull(reason, seconds), self._root)

    async def _do_get(self, call: Call, caller: Standing) -> None:
        """Send the records of a shard."""
        await self._reads.read(call, only_bytes(await _request(call)), caller.may_read)

    async def _list_flights(self, call: Call, caller: Standing) -> None:
        """Send the list of clients."""
        flights = await self._reads.flights(only_bytes(await _request(call)), caller.may_list, call.run)
        self._steps.complete(Step.LIST)
        while some := await call.run(_next, flights):
            for flight in some:
                await call.write(flight)

    async def _get_flight_info(self, call: Call, caller: Standing) -> None:
        """Send the description of a client."""
        info = await self._reads.info(FlightDescriptor.parse(await _request(call)), caller.may_read, call.run)
        await call.write(info.encode())

    async def _get_schema(self, call: Call, caller: Standing) -> None:
        """Send the columns of a client."""
        info = await self._reads.info(FlightDescriptor.parse(await _request(call)), caller.may_read, call.run)
        await call.write(encode_result(bytes(info.schema)))

    async def _list_actions(self, call: Call, caller: Standing) -> None:
        """Send the list of actions."""
        await _request(call)
        for kind, description in read_service.ACTIONS + consumers.ACTIONS:
            await call.write(encode_action_type(kind, description))

    async def _do_action(self, call: Call, caller: Standing) -> None:
        """Answer a question about the whole hub."""
        kind, body = Action.parse(await _request(call))
        if kind == "changes":
            answer = await self._reads.changes(body, caller.may_read, call.run)
            self._steps.complete(Step.LIST)
        elif kind == "server":
            answer = self._reads.about()
        elif kind in (name for name, _ in consumers.ACTIONS):
            answer = await call.run(self._readers.act, kind, body, caller.principal, caller.may_read)
        else:
            raise Malformed(f"unknown action {kind[:50]!r}; ListActions lists the actions")
        await call.write(encode_result(answer))


async def _request(call: Call) -> bytes:
    """Return the only message of a caller. Raises Malformed."""
    message = await call.read()
    if message is None:
        raise Malformed("a call without its message")
    with message:
        if len(message) > LARGEST_REQUEST:
            raise Malformed(f"a request of {len(message)} bytes; the limit is {LARGEST_REQUEST}")
        return bytes(message.data)


def _next(items: Iterator[Any]) -> list[Any]:
    return list(islice(items, AT_ONCE))
