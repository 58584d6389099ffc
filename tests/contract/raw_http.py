"""A conversation over a raw socket with an application behind the HTTP server."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from baton_serve.services.common.http.connection_slots import HttpLimits
from baton_serve.services.common.http.server import HttpServer

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def talk(served: Any, body: Talk, limits: HttpLimits | None = None) -> None:
    """Serve an app and run `body` against it, for at most ten seconds; then close the server."""

    async def scenario() -> None:
        server = HttpServer(served, host="127.0.0.1", port=0, limits=limits)
        await server.start()
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        async with asyncio.timeout(10):
            await body(reader, writer)
        writer.close()
        await server.close()

    asyncio.run(scenario())
