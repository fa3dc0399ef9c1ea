"""A small HTTP/1.1 server on the loopback address, with limits on the resources that clients can use.

Any process on this machine can connect. A connection is unauthenticated until it sends a head (request line and
headers) whose path contains a valid secret key. The number of unauthenticated connections is limited: one more closes
the oldest. A client that sends its head without delay is therefore served.

A function of the application (`Admit`) decides by method and path how a request is answered, before its body is read.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus

_REQUEST_LINE = re.compile(r"([A-Z]{1,16}) (/[\x21-\x7e]*) HTTP/1\.([01])")
_HEADER = re.compile(r"([!#$%&'*+\-.^_`|~0-9A-Za-z]+):[ \t]*(.*?)[ \t]*", re.DOTALL)
_LENGTH = re.compile(r"[0-9]{1,15}")
_PIECE = 1 << 16


@dataclass(frozen=True, kw_only=True, slots=True)
class ListenerLimits:
    """Limits of the HTTP server: maximum sizes in bytes, times in seconds, and numbers of connections."""

    head: int = 16 << 10
    headers: int = 100
    head_seconds: float = 10.0
    unauthenticated: int = 256  # connections without a known key
    connections: int = 768  # maximum number of connections; opening one more closes an idle one
    # The body of a rejected request is read and dropped, up to this many bytes. An unread body could keep the client
    # from receiving the error response.
    dropped: int = 64 << 10
    dropped_seconds: float = 1.0
    idle_seconds: float = 300.0  # time after which an authenticated connection without a request is closed
    body: int = 16 << 20
    bodies: int = 128 << 20  # maximum bytes of the bodies of all requests together
    body_seconds: float = 60.0
    answer_seconds: float = 60.0


class CallError(Exception):
    """An error answer to a request, in the format of OpenAI's API."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """An HTTP answer: status, content and content type."""

    status: int = 200
    data: bytes
    kind: str = "application/json"
    last: bool = False  # whether to close the connection afterwards

    @staticmethod
    def of_error(error: CallError, *, last: bool = False) -> Reply:
        kind = "invalid_request_error" if error.status < 500 else "server_error"
        content = {"error": {"message": str(error), "type": kind, "param": None, "code": error.code}}
        return Reply(status=error.status, data=json.dumps(content).encode(), last=last)


Answer = Callable[[bytes], Awaitable[Reply]]
"""Takes the body of a request, and returns an awaitable of the reply. The awaitable must not keep the body alive."""

Admit = Callable[[str, str], Answer]
"""A function that takes the HTTP method and the path of a request, and returns the function that answers the request.

It raises `CallError` if the path does not contain a valid secret key.
"""


class _EndedError(Exception):
    """Raised if a client is gone or too slow. The connection is then closed without an answer."""


@dataclass(frozen=True, slots=True)
class _Head:
    method: str
    path: str
    headers: Mapping[str, str]
    keep_alive: bool


class Listener:
    """A small HTTP server on the loopback address. It runs on one event loop."""

    def __init__(self, admit: Admit, limits: ListenerLimits | None = None) -> None:
        self._admit, self._limits = admit, limits or ListenerLimits()
        self._server: asyncio.Server | None = None
        self._unauthenticated: dict[asyncio.StreamWriter, None] = {}  # oldest first
        self._idle: dict[asyncio.StreamWriter, None] = {}  # authenticated, without a request
        self._busy: set[asyncio.StreamWriter] = set()
        self._bodies = _Budget(self._limits.bodies)

    async def start(self) -> int:
        """Start the server and return its port, which other machines cannot reach."""
        assert self._server is None
        self._server = await asyncio.start_server(self._connection, "127.0.0.1", 0, limit=self._limits.head)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    # Connections

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self._make_space():
            writer.transport.abort()
            return
        self._unauthenticated[writer] = None
        writer.transport.set_write_buffer_limits(high=0)  # `drain` waits until the answer has left this process
        try:
            while await self._exchange(reader, writer):
                self._busy.discard(writer)
                self._idle[writer] = None
            writer.close()
        except (_EndedError, OSError, asyncio.CancelledError):  # cancelled: the episode or the run has ended
            pass
        finally:
            self._unauthenticated.pop(writer, None)
            self._idle.pop(writer, None)
            self._busy.discard(writer)
            if not writer.is_closing():
                writer.transport.abort()

    def _make_space(self) -> bool:
        """Make space for a new connection, and return whether there is space.

        If there are too many connections, the oldest unauthenticated one is closed, or else the oldest idle one.
        """
        total = len(self._unauthenticated) + len(self._idle) + len(self._busy)
        if len(self._unauthenticated) < self._limits.unauthenticated and total < self._limits.connections:
            return True
        for waiting in (self._unauthenticated, self._idle):
            if waiting:
                oldest = next(iter(waiting))
                del waiting[oldest]
                oldest.transport.abort()
                return True
        return False

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Read one request and answer it. Return whether the connection stays open."""
        try:
            head = await self._head(reader, authenticated=writer in self._idle)
            answer = self._admit(head.method, head.path)
        except CallError as error:
            await self._send(writer, Reply.of_error(error, last=True), keep_alive=False)
            await self._drop(reader, writer)
            return False
        self._unauthenticated.pop(writer, None)
        self._idle.pop(writer, None)
        self._busy.add(writer)
        try:
            reply = await self._answered(answer, reader, writer, head)
        except CallError as error:  # the body is wrong, so the rest of the stream cannot be parsed
            reply = Reply.of_error(error, last=True)
        keep_alive = head.keep_alive and not reply.last
        await self._send(writer, reply, keep_alive=keep_alive)
        if reply.last and reply.status >= 400:
            await self._drop(reader, writer)
        return keep_alive

    async def _answered(
        self, answer: Answer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: _Head
    ) -> Reply:
        length = self._length(head)
        async with self._bodies.taken(length, self._limits.body_seconds):
            if length and head.headers.get("expect", "").lower() == "100-continue":
                writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            pending = answer(await self._body(reader, length))
        return await pending

    # Requests

    async def _head(self, reader: asyncio.StreamReader, *, authenticated: bool) -> _Head:
        limits = self._limits
        try:
            async with asyncio.timeout(limits.idle_seconds if authenticated else limits.head_seconds):
                raw = await reader.readuntil(b"\r\n\r\n")
        except TimeoutError:
            raise _EndedError from None
        except asyncio.IncompleteReadError:
            raise _EndedError from None
        except asyncio.LimitOverrunError:
            raise CallError(431, f"the head of the request has more than {limits.head} bytes") from None
        first, *lines = raw[:-4].decode("latin-1").split("\r\n")
        if len(raw) > limits.head or len(lines) > limits.headers:
            raise CallError(431, f"the head has more than {limits.head} bytes or {limits.headers} headers")
        request_line = _REQUEST_LINE.fullmatch(first)
        if request_line is None:
            raise CallError(400, "the first line is not an HTTP/1.1 request line")
        headers: dict[str, str] = {}
        for line in lines:
            header = _HEADER.fullmatch(line)
            name = "" if header is None else header[1].lower()
            if header is None or any(letter in header[2] for letter in "\r\n\0"):
                raise CallError(400, "a line of the head is not a header")
            if name in headers and name in ("content-length", "transfer-encoding", "host"):
                raise CallError(400, f"the header {name} occurs twice")
            headers[name] = header[2]
        connection = headers.get("connection", "keep-alive" if request_line[3] == "1" else "close")
        return _Head(request_line[1], request_line[2], headers, keep_alive="close" not in connection.lower())

    def _length(self, head: _Head) -> int:
        if "transfer-encoding" in head.headers:
            raise CallError(411, "chunked bodies are not supported; send Content-Length")
        given = head.headers.get("content-length", "0")
        if _LENGTH.fullmatch(given) is None:
            raise CallError(400, "Content-Length is not a number of bytes")
        if int(given) > self._limits.body:
            raise CallError(413, f"the body has {int(given)} bytes; at most {self._limits.body} are allowed")
        return int(given)

    async def _body(self, reader: asyncio.StreamReader, length: int) -> bytes:
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                return await reader.readexactly(length)
        except TimeoutError:
            raise CallError(408, f"the body took more than {self._limits.body_seconds:g} s") from None
        except asyncio.IncompleteReadError:
            raise _EndedError from None

    # Answers

    async def _send(self, writer: asyncio.StreamWriter, reply: Reply, *, keep_alive: bool) -> None:
        writer.write(
            f"HTTP/1.1 {reply.status} {HTTPStatus(reply.status).phrase}\r\nContent-Type: {reply.kind}\r\n"
            f"Content-Length: {len(reply.data)}\r\n"
            f"Connection: {'keep-alive' if keep_alive else 'close'}\r\n\r\n".encode()
            + reply.data
        )
        try:
            async with asyncio.timeout(self._limits.answer_seconds):
                await writer.drain()
        except TimeoutError:
            raise _EndedError from None

    async def _drop(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read and drop the rest of the request, because closing with unread bytes would reset the connection."""
        left = self._limits.dropped
        with contextlib.suppress(TimeoutError, OSError):
            if writer.can_write_eof():
                writer.write_eof()
            async with asyncio.timeout(self._limits.dropped_seconds):
                while left > 0 and (piece := await reader.read(min(left, _PIECE))):
                    left -= len(piece)


class _Budget:
    """Limits the memory, in bytes, that the bodies of all requests take together."""

    def __init__(self, size: int) -> None:
        self._left = size
        self._freed = asyncio.Event()

    @contextlib.asynccontextmanager
    async def taken(self, number: int, seconds: float) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(seconds):
                while self._left < number:
                    self._freed.clear()
                    await self._freed.wait()
        except TimeoutError:
            raise CallError(503, "other requests use all memory for bodies; try again later") from None
        self._left -= number
        try:
            yield
        finally:
            self._left += number
            self._freed.set()
