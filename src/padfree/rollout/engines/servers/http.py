"""Base class for servers that speak JSON over HTTP. Every malformed answer or broken connection becomes a clear error.

    HttpServer.call("GET", "/weight_info")     -> {"weight_version": "40"}
    async with HttpServer.connected() as connection: ...     several calls on one connection

A connection opens at its first call and never reconnects. All its calls are therefore answered by the same server
process.
"""

from __future__ import annotations

import asyncio
import errno
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import cache
from typing import Any, ClassVar
from urllib.parse import urlsplit

from padfree.errors import UserError
from padfree.rollout.engines.servers.server_api import FailedError, LateError, ServerApi

_BROKEN = (OSError, EOFError, ValueError, IndexError, asyncio.LimitOverrunError)
"""Exceptions that a connection raises if it breaks, or if its peer does not speak HTTP."""


class HttpServer(ServerApi):
    """A server that speaks JSON over HTTP. Each call opens its own connection."""

    fix_route: ClassVar[str]  # advice in the error message if the server lacks a route

    @asynccontextmanager
    async def connected(self, timeout: float | None = None) -> AsyncIterator[HttpConnection]:
        connection = HttpConnection(self, timeout or self.timeout)
        try:
            yield connection
        finally:
            connection.close()

    async def call(
        self, method: str, path: str, body: Any = None, *, timeout: float | None = None, fix: str | None = None
    ) -> dict[str, Any]:
        """Call a route, and return the JSON object with which the server answers. `timeout`: in seconds.

        `fix`: the advice that the error message gives if the server does not have the route.
        """
        async with self.connected(timeout) as connection:
            return await connection.call(method, path, body, fix=fix or self.fix_route)

    async def tell(self, path: str, body: Any, *, fix: str) -> None:
        """Post `body` to a route whose answer is not JSON, and ignore the answer.

        `fix`: the advice that the error message gives if the server does not have the route.
        """
        async with self.connected() as connection:
            await connection.answer("POST", path, body, fix=fix)


class HttpConnection:
    """One connection to a server, for consecutive calls that the same server process must answer."""

    def __init__(self, server: HttpServer, timeout: float) -> None:
        self._server, self._timeout = server, timeout
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._prefix = urlsplit(server.url).path

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()

    async def call(self, method: str, path: str, body: Any = None, *, fix: str | None = None) -> dict[str, Any]:
        content = await self.answer(method, path, body, fix=fix)
        try:
            answer = json.loads(content) if content else {}
        except (ValueError, RecursionError):
            raise self._server.lost(f"{path} did not answer with JSON ({content[:80]!r})") from None
        if not isinstance(answer, dict):
            raise self._server.lost(f"{path} returned {type(answer).__name__} instead of a JSON object")
        return answer

    async def answer(self, method: str, path: str, body: Any, *, fix: str | None) -> bytes:
        """Send a request and return the content of the answer.

        `fix`: the advice that the error message gives for status 404. Without `fix`, 404 is handled like any other 4xx.
        """
        lost, url = self._server.lost, self._server.url
        try:
            async with asyncio.timeout(self._timeout):
                status, content = await self._exchange(method, self._prefix + path, body)
        except TimeoutError:
            raise LateError(f"rollout.servers: {url} {path} did not answer within {self._timeout:g} s") from None
        except _BROKEN as error:
            reason = " ".join(str(error).split())
            if self._streams is None and f"[Errno {errno.ECONNREFUSED}]" in reason:
                raise lost("refused the connection") from None
            raise lost(f"{path} broke the connection ({type(error).__name__}: {reason})") from None
        if status == 404 and fix is not None:
            raise UserError("rollout.servers", f"{url} has no route {path}", fix)
        if status >= 500 or status in (408, 429):
            raise FailedError(f"rollout.servers: {url} {path} answered {status} ({_message(content)})")
        if status >= 400:
            raise UserError(
                "rollout.servers",
                f"{url} rejected {path} ({status}: {_message(content)})",
                "start the server with the model and the maximum lengths of this run",
            )
        return content

    async def _exchange(self, method: str, path: str, body: Any) -> tuple[int, bytes]:
        """Send a request; return the status and the content of the answer."""
        if self._streams is None:
            context = _tls() if self._server.url.startswith("https:") else None
            self._streams = await asyncio.open_connection(self._server.host, self._server.port, ssl=context)
        reader, writer = self._streams
        data = b"" if body is None else json.dumps(body).encode()
        kind = "" if body is None else "Content-Type: application/json\r\n"
        host = f"{self._server.host}:{self._server.port}"
        head = f"{method} {path} HTTP/1.1\r\nHost: {host}\r\n{kind}Content-Length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)
        await writer.drain()
        status = 100
        while status < 200:  # 1xx: the final answer follows
            status = int((await _line(reader)).split()[1])
            headers: dict[str, str] = {}
            while line := await _line(reader):
                name, _, value = line.decode("latin-1").partition(":")
                headers[name.lower()] = value.strip().lower()
        if headers.get("transfer-encoding") == "chunked":
            return status, await _chunks(reader)
        if "content-length" in headers:
            return status, await reader.readexactly(int(headers["content-length"]))
        return status, b"" if status == 204 else await reader.read()  # until the server closes the connection


async def _line(reader: asyncio.StreamReader) -> bytes:
    line = await reader.readline()
    if not line.endswith(b"\n"):
        raise ConnectionResetError("the server closed the connection")
    return line.strip()


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    chunks = []
    while size := int((await _line(reader)).split(b";")[0], 16):
        chunks.append((await reader.readexactly(size + 2))[:size])
    while await _line(reader):  # trailing headers
        pass
    return b"".join(chunks)


@cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


def _message(content: bytes) -> str:
    """Return the error message in the content of an answer, shortened to one line."""
    text = content.decode(errors="replace")
    with suppress(ValueError, RecursionError):
        answer = json.loads(text)
        if isinstance(answer, dict):
            error = answer.get("error", answer.get("detail", text))
            text = str(error.get("message", error) if isinstance(error, dict) else error)
    return " ".join(text.split())[:300]
