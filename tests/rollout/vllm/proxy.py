"""A proxy process for a `FakeVllm` in a thread of the test: it starts quickly and can be killed.

    python proxy.py URL URL ... --port 8000 --served-model-name policy        as `rollout.launch` starts one

The entry of `rollout.launch.devices` selects the server: "0" is the first URL. When the proxy starts, it resets that
server: no weights, and the given name of the model. It uses only the standard library, because importing torch would
take most of the time of a test that kills servers.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

PATIENCE = 60.0


def ask(url: str, method: str, path: str, content: bytes) -> tuple[int, bytes]:
    """The status and the content of the server's answer."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=PATIENCE)
    try:
        connection.request(method, path, content, {"Content-Type": "application/json"})
        reply = connection.getresponse()
        return reply.status, reply.read()
    finally:
        connection.close()


class Handler(BaseHTTPRequestHandler):
    url: str
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # otherwise the content waits 40 ms after the headers

    def do_GET(self) -> None:
        self._forward()

    def do_POST(self) -> None:
        self._forward()

    def _forward(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        status, answer = ask(self.url, self.command, self.path, content)
        self.send_response(status)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("urls", nargs="+")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--served-model-name", required=True)
    settings, _ = parser.parse_known_args()
    url = settings.urls[int(os.environ["CUDA_VISIBLE_DEVICES"])]
    ask(url, "POST", "/restart", json.dumps({"name": settings.served_model_name}).encode())
    server = ThreadingHTTPServer(("127.0.0.1", settings.port), type("Bound", (Handler,), {"url": url}))
    server.daemon_threads = True
    server.serve_forever(0.02)


if __name__ == "__main__":
    main()
