"""Requests of a malicious or broken program: bytes on a socket, and the expected outcome.

An outcome is `right` (200 for a valid request), `refused` (4xx with a reason) or `closed` (no answer, if none is due),
and never `failed` (5xx), `hangs` or `wrong` (200 for an invalid request).
"""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from padfree.rollout.environment.call_fields import METADATA, NEUTRAL, OVERRIDDEN
from tests.rollout.environment.environment_cases import VOCABULARY

WAIT = 20.0
"""Seconds, which only a request that hangs takes."""

Q: dict[str, Any] = {"messages": [{"role": "user", "content": "q"}]}
P: dict[str, Any] = {"prompt": "ab"}
SIZE = len(VOCABULARY)

UNSHOWN: dict[str, dict[str, Any]] = {
    "message 1 (user): name": {"messages": [{"role": "user", "content": "q", "name": "ann"}]},
    "message 2 (assistant): tool_calls[0].function.name": {
        "messages": [*Q["messages"], {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]
    },
    "message 2 (assistant): reasoning_content": {
        "messages": [*Q["messages"], {"role": "assistant", "content": "a", "reasoning_content": "b"}]
    },
    "tools[0].name ('f')": {**Q, "tools": [{"type": "function", "function": {"name": "f"}}]},
}
"""What a template that writes the content only does not show, and how it is named."""

Case = tuple[str, str, bytes, str]
"""A name, a route, a body, and `right` or `refused`."""


def _case(name: str, route: str, body: Any, due: str) -> Case:
    return name, route, body if isinstance(body, bytes) else json.dumps(body).encode(), due


def _messages() -> Iterator[tuple[str, Any, str]]:
    """Values of `messages`."""
    user = {"role": "user", "content": "q"}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    right: dict[str, Any] = {
        "parts": [{"role": "user", "content": [{"type": "text", "text": "q"}]}],
        "null keys": [{**user, "name": None, "tool_calls": None, "refusal": None}],
        "empty annotations": [{**user, "annotations": []}],
        "name": [{**user, "name": "ann"}],
        "tool calls without content": [user, {"role": "assistant", "tool_calls": [call]}, user],
        "null content with tool calls": [user, {"role": "assistant", "content": None, "tool_calls": [call]}, user],
        "a tool's answer": [user, {"role": "tool", "content": "5", "tool_call_id": "c"}],
        "reasoning": [user, {"role": "assistant", "content": "a", "reasoning_content": "b"}, user],
    }
    wrong: dict[str, Any] = {
        "a text": "q",
        "an object": user,
        "empty": [],
        "numbers": [1, 2],
        "nulls": [None],
        "lists": [[user]],
        "true": True,
        "no role": [{"content": "q"}],
        "no content": [{"role": "user"}],
        "null content": [{"role": "user", "content": None}],
        "number as role": [{"role": 1, "content": "q"}],
        "list as role": [{"role": ["user"], "content": "q"}],
        "empty role": [{"role": "", "content": "q"}],
        "long role": [{"role": "u" * 600, "content": "q"}],
        "number as content": [{"role": "user", "content": 7}],
        "object as content": [{"role": "user", "content": {"text": "q"}}],
        "false as content": [{"role": "user", "content": False}],
        "texts as parts": [{"role": "user", "content": ["q"]}],
        "part without type": [{"role": "user", "content": [{"text": "q"}]}],
        "part without text": [{"role": "user", "content": [{"type": "text"}]}],
        "part with a number": [{"role": "user", "content": [{"type": "text", "text": 1}]}],
        "part with an extra": [{"role": "user", "content": [{"type": "text", "text": "q", "cache_control": {}}]}],
        "image": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}],
        "audio": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}]}],
        "file": [{"role": "user", "content": [{"type": "file", "file": {"file_id": "x"}}]}],
        "type as list": [{"role": "user", "content": [{"type": ["text"], "text": "q"}]}],
        "unknown key": [{**user, "prefix": True}],
        "weight": [{**user, "weight": 0}],
        "function_call": [{**user, "function_call": {"name": "f", "arguments": ""}}],
        "refusal": [{**user, "refusal": "no"}],
        "name as number": [{**user, "name": 3}],
        "long name": [{**user, "name": "n" * 1000}],
        "tool_call_id as list": [{**user, "tool_call_id": []}],
        "reasoning as object": [{**user, "reasoning_content": {}}],
        "tool_calls as object": [{**user, "tool_calls": {"a": 1}}],
        "tool_calls of texts": [{**user, "tool_calls": ["f"]}],
        "tool_calls without function": [{**user, "tool_calls": [{"id": "c"}]}],
        "tool_calls with a number": [{**user, "tool_calls": [{"function": {"name": "f", "arguments": 1}}]}],
        "lone surrogate": [{"role": "user", "content": "\ud800"}],
        "lone surrogate in a role": [{"role": "\udfff", "content": "q"}],
        "lone surrogate in a part": [{"role": "user", "content": [{"type": "text", "text": "\udc80"}]}],
        "too long": [{"role": "user", "content": "q" * 5000}],
        "too many": [user] * 900,
    }
    yield from ((name, value, "right") for name, value in right.items())
    yield from ((name, value, "refused") for name, value in wrong.items())


def _prompts() -> Iterator[tuple[str, Any, str]]:
    yield from ((f"ids {ids}", ids, "right") for ids in ([1], [0, SIZE - 1]))
    wrong: dict[str, Any] = {
        "above": [1, 2, 999999],
        "just above": [SIZE],
        "negative": [1, -1],
        "float": [1.0],
        "half": [1.5],
        "true": [True],
        "null": [1, None],
        "text among ids": [1, "2"],
        "nested": [[1, 2]],
        "nested deeper": [[[1]]],
        "texts": ["a", "b"],
        "object in it": [{"a": 1}],
        "int32": [2**31],
        "int63": [2**63 - 1],
        "int64": [2**63],
        "uint64": [2**64],
        "negative int64": [-(2**63)],
        "huge": [10**400],
        "empty text": "",
        "empty list": [],
        "number": 5,
        "true alone": True,
        "object": {"ids": [1]},
        "lone surrogate": "a\ud83d",
        "too long": [1] * 5000,
        "too long text": "a" * 5000,
        "a very long text": "a" * 300_000,
    }
    yield from ((name, value, "refused") for name, value in wrong.items())


def _fields() -> Iterator[tuple[str, str, Any, str]]:
    """Field, route, value, expected outcome."""
    other: list[Any] = [0.37, 3, "x", ["x"], {"x": 1}, True, False, -7]
    chat_only = {"parallel_tool_calls", "functions", "function_call"}
    for name, values in NEUTRAL.items():
        route = "completions" if name in ("echo", "suffix", "best_of") else "chat/completions"
        yield from ((name, route, value, "right") for value in values)
        yield name, route, None, "right"
        refused = [value for value in other if not any(value == one and type(value) is type(one) for one in values)]
        yield from ((name, route, value, "refused") for value in refused[len(name) % 3 :: 3])
        if name in chat_only:
            yield name, "completions", next(iter(values)), "refused"
    for name in OVERRIDDEN:
        yield name, "chat/completions", 1, "right"
        for value in ("1", [1], {}, True, 1e999 if name != "seed" else 0.5, 10**400, -3 if name != "seed" else 2**64):
            yield name, "chat/completions", value, "refused"
    for name in METADATA:
        yield name, "chat/completions", {"a": "b"} if name == "metadata" else "x", "right"
        for value in (3, ["x"], {"a": {"b": 1}}, True, "x" * 5000):
            yield name, "chat/completions", value, "refused"
    for name, good, bad in (
        ("n", [1, 2], [0, -1, 129, 10**9, 10**30, 1.0, "1", True, [1], {}]),
        ("max_tokens", [1, 10**18, 10**30], [0, -5, 0.5, "3", True, [], {}, 1e999]),
        ("max_completion_tokens", [2], [0, "all", False, -(10**30)]),
        ("stream", [True, False], [1, "true", [], {}]),
        ("model", ["m", ""], [1, ["m"], {}, True, "m" * 5000]),
        ("tools", [[], [{"type": "function", "function": {"name": "f"}}]],
         ["f", {}, ["f"], [1], [{}], [{"type": "function"}], [{"type": "retrieval"}], True, [None],
          [{"type": "function", "function": {}}], [{"type": "function", "function": {"name": 3}}],
          [{"type": "function", "function": {"name": ""}}], [{"type": ["function"], "function": {"name": "f"}}]]),
        ("tool_choice", ["auto", "none"],
         ["required", "any", 1, True, [], {}, {"type": "function", "function": {"name": "f"}}]),
        ("stream_options", [], [{"include_usage": True}, {}, 1]),  # without a stream
    ):  # fmt: skip
        yield from ((name, "chat/completions", value, "right") for value in good)
        yield from ((name, "chat/completions", value, "refused") for value in bad)
    for name in ("temprature", "top_a", "mirostat", "grammar", "json_schema", "guided_whitespace_pattern", "min_length",
                 "num_beams", "best_off", "stop_sequences", "max_new_tokens", "do_sample", "dry_multiplier", "xtc",
                 "__proto__", "", " ", "\ud800", "messages ", "Messages", "n\x00", "x" * 9000):  # fmt: skip
        yield name, "chat/completions", 1, "refused"


def bodies() -> Iterator[Case]:
    """Bodies of calls with a valid key."""
    chat, plain = "chat/completions", "completions"
    for name, value, due in _messages():
        yield _case(f"messages: {name}", chat, {"messages": value}, due)
    for name, value, due in _prompts():
        yield _case(f"prompt: {name}", plain, {"prompt": value}, due)
    for field, route, value, due in _fields():
        yield _case(f"{field[:40]!r}: {str(value)[:40]}", route, {**(Q if route == chat else P), field: value}, due)
    text = json.dumps(Q).encode()
    whole = text[:-1]
    for name, raw in {
        "nothing": b"",
        "a brace": b"{",
        "cut": text[:-3],
        "more behind it": text + b"}",
        "two objects": text + text,
        "a list": b"[1]",
        "a number": b"7",
        "null": b"null",
        "a text": b'"q"',
        "NaN": whole + b', "temperature": NaN}',
        "Infinity": whole + b', "temperature": Infinity}',
        "-Infinity": whole + b', "top_p": -Infinity}',
        "1e999": whole + b', "temperature": 1e999}',
        "5,000 digits": whole + b', "max_tokens": ' + b"9" * 5000 + b"}",
        "a twice": whole + b', "n": 1, "n": 2}',
        "messages twice": whole + b', "messages": []}',
        "twice, deep inside": b'{"messages": [{"role": "user", "content": "q", "content": "r"}]}',
        "deep lists": whole + b', "tools": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        "deep objects": whole + b', "x": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"}",
        "deep and cut": b'{"messages":' + b"[" * 200_000,
        "nested 900 times": whole + b', "tools": ' + b"[" * 900 + b"]" * 900 + b"}",
        "bytes": bytes(range(256)),
        "UTF-16": json.dumps(Q).encode("utf-16"),
        "UTF-32": json.dumps(Q).encode("utf-32"),
        "a BOM": b"\xef\xbb\xbf" + text,
        "latin-1": text.replace(b'"q"', b'"\xe9"'),
        "overlong UTF-8": text.replace(b'"q"', b'"\xc0\xaf"'),
        "a control character": text.replace(b'"q"', b'"a\x00b"'),
        "a form": b"messages=q&n=1",
        "multipart": b"--x\r\nContent-Disposition: form-data\r\n\r\nq\r\n--x--",
        "gzip": b"\x1f\x8b\x08\x00" + b"\0" * 20,
        "pickle": b"\x80\x04\x8c\x02os\x94\x8c\x06system\x94\x93\x94.",
        "YAML": b"messages:\n  - role: user",
        "single quotes": b"{'messages': []}",
        "a comment": text + b" // and so on",
        "a trailing comma": whole + b",}",
        "many keys": b"{" + b",".join(b'"k%d":1' % index for index in range(20_000)) + b"}",
        "many keys, one twice": b"{" + b",".join(b'"k%d":1' % (index % 19_999) for index in range(20_000)) + b"}",
    }.items():
        yield name, chat, raw, "refused"
    for name, key, depth, due in (
        ("a tool", "p", 50, "right"),
        ("a deep tool", "p", 400, "refused"),
        ("a deep tool of long names", "p" * 500, 80, "refused"),
    ):
        deep: dict[str, Any] = {}
        for _ in range(depth):
            deep = {key: deep}
        tool = {"type": "function", "function": {"name": "f", "parameters": deep}}
        yield _case(name, chat, {**Q, "tools": [tool]}, due)
    yield _case("two limits", chat, {**Q, "max_tokens": 3, "max_completion_tokens": 4}, "refused")
    yield _case("one limit twice", chat, {**Q, "max_tokens": 3, "max_completion_tokens": 3}, "right")
    yield _case("prompt in a chat", chat, {**Q, "prompt": "x"}, "refused")
    yield _case("messages in a completion", plain, {**P, **Q}, "refused")
    yield _case("tools in a completion", plain, {**P, "tools": []}, "refused")
    yield _case("no messages", chat, {"model": "m"}, "refused")
    yield _case("no prompt", plain, {"model": "m"}, "refused")
    yield _case("usage of a stream", chat, {**Q, "stream": True, "stream_options": {"include_usage": True}}, "right")
    yield _case("unknown option", chat, {**Q, "stream": True, "stream_options": {"x": True}}, "refused")


def heads(path: str) -> Iterator[tuple[str, bytes, tuple[str, ...]]]:
    """Bytes on a socket, and the allowed statuses; "closed": no answer. `path` has a valid key."""
    body = json.dumps(Q).encode()
    chat = f"{path}/chat/completions"
    key = path.split("/")[1]
    wrong_key = path.replace(key, "0" * len(key))

    def post(extra: str = "", *, target: str = chat, version: str = "1.1", length: str | None = None) -> bytes:
        size = str(len(body)) if length is None else length
        return f"POST {target} HTTP/{version}\r\nHost: x\r\nContent-Length: {size}\r\n{extra}\r\n".encode() + body

    get = f"GET {path}/models HTTP/1.1\r\nHost: x\r\n"
    right, bad = ("200",), ("400",)
    yield "a post", post("Connection: close\r\n"), right
    yield "HTTP/1.0", post(version="1.0"), right
    yield "a query", post("Connection: close\r\n", target=chat + "?api-version=1"), right
    yield "pipelined", post() + post("Connection: close\r\n"), ("200", "200")
    yield "expects 100", post("Expect: 100-continue\r\nConnection: close\r\n"), ("100", "200")
    yield "models", (get + "Connection: close\r\n\r\n").encode(), right
    yield "wrong key", post(target=wrong_key + "/chat/completions"), ("404",)
    yield "half a key", post(target=chat.replace(key, key[:-1])), ("404",)
    yield "a longer key", post(target=chat.replace(key, key + "0")), ("404",)
    yield "no key", post(target="/v1/chat/completions"), ("404",)
    yield "root", post(target="/"), ("404",)
    yield "a key in capitals", post(target=chat.replace(key, key.upper() + "G")), ("404",)
    yield "percent", post(target="/%2e%2e/v1/chat/completions"), ("404",)
    yield "dots", post(target="/../../etc/passwd"), ("404",)
    yield "wrong key, large body", post(target=wrong_key, length=str(10**12))[:200], ("404",)
    yield "absolute target", post(target="http://127.0.0.1" + chat), bad
    yield "a target with a space", post(target=chat + " x"), bad
    yield "a target of latin-1", post(target=chat).replace(b"/v1", b"/v\xe9"), bad
    yield "no route", post("Connection: close\r\n", target=f"{path}/embeddings"), ("404",)
    for method in ("PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE", "GET", "FOO"):
        yield method, post("Connection: close\r\n").replace(b"POST", method.encode(), 1), ("405",)
    yield "post to models", post("Connection: close\r\n", target=f"{path}/models"), ("405",)
    yield "CONNECT", b"CONNECT example.org:443 HTTP/1.1\r\n\r\n", bad
    yield "a method of small letters", post().replace(b"POST", b"post", 1), bad
    yield "HTTP/2", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", bad
    yield "HTTP/9.9", post(version="9.9"), bad
    yield "HTTP/0.9", b"GET /\r\n\r\n", bad
    yield "no version", f"POST {chat}\r\n\r\n".encode(), bad
    yield "only ends of lines", b"\r\n\r\n", bad
    yield "nulls", b"\0" * 100 + b"\r\n\r\n", bad
    yield "TLS", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(200)) + b"\r\n\r\n", bad
    yield "SSH", b"SSH-2.0-OpenSSH_9.6\r\n\r\n", bad
    yield "SMTP", b"EHLO example.org\r\n\r\n", bad
    yield "redis", b"*1\r\n$8\r\nFLUSHALL\r\n\r\n", bad
    yield "a header without a colon", post("nonsense\r\n"), bad
    yield "a header with a space", post("Some Thing: x\r\n"), bad
    yield "a folded header", post("A: b\r\n c\r\n"), bad
    yield "a header without a name", post(": x\r\n"), bad
    yield "a bare line feed", post("A: b\nContent-Length: 0\r\n"), bad
    yield "a null in a header", post("A: b\0c\r\n"), bad
    yield "two lengths", post("Content-Length: 3\r\n"), bad
    yield "two equal lengths", post(f"Content-Length: {len(body)}\r\n"), bad
    for length in ("-1", "+5", "1e3", "0x10", "", "five", "5,5", "\u00b2", "1_0", " 5 5", "9" * 400):
        yield f"length {length[:9]!r}", post(length=length.encode().decode("latin-1")), bad
    yield "a large body", post(length=str(10**11)), ("413",)
    yield "just too large", post(length=str((16 << 20) + 1)), ("413",)
    yield "chunks", post("Transfer-Encoding: chunked\r\n").replace(b"Content-Length", b"X"), ("411",)
    yield "chunks and a length", post("Transfer-Encoding: chunked\r\n"), ("411",)
    yield "identity", post("Transfer-Encoding: identity\r\n"), ("411",)
    yield "a long head", post("A: " + "a" * 40_000 + "\r\n"), ("431",)
    yield "a long target", post(target="/" + "a" * 40_000), ("431",)
    yield "a head without end", b"POST / HTTP/1.1\r\n" + b"A: b\r\n" * 20_000, ("431",)
    yield "a line without end", b"A" * 100_000, ("431",)
    yield "many headers", post("".join(f"h{index}: x\r\n" for index in range(300))), ("431",)
    yield "two hosts", post("Host: y\r\n"), bad
    yield "less than its length", post(length=str(len(body) + 5)), ("closed",)
    yield "half a head", b"POST / HTT", ("closed",)
    yield "nothing", b"", ("closed",)


def statuses(url: str, raw: bytes) -> tuple[str, ...]:
    """Send bytes, close the sending side, and read the answer: statuses, or the state of the connection."""
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname, parts.port), timeout=WAIT) as connection:  # type: ignore[arg-type]
        found = bytearray()
        try:
            connection.sendall(raw)
            connection.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # the answer came before the request was read
        try:
            while piece := connection.recv(1 << 16):
                found += piece
        except TimeoutError:
            return ("hangs",)
        except OSError:
            pass
    answers = [found.decode() for found in re.findall(rb"HTTP/1\.1 (\d{3}) ", bytes(found))]
    return tuple(answers) or ("closed",)


def post(connection: Any, path: str, body: bytes) -> tuple[int, bytes]:
    """One call on a connection of `http.client`."""
    connection.request("POST", path, body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    return answer.status, answer.read()


def outcome(status: int, due: str) -> str:
    if status >= 500:
        return "failed"
    if status == 200:
        return "right" if due == "right" else "wrong"
    return "refused" if due == "refused" else "refused wrongly"
