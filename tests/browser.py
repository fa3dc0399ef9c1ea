"""A headless Chromium that opens a file as a reader would: with a width, a colour scheme, and no network.

    with Browser() as browser:
        view = browser.open(path, width=390, dark=True)
        view.errors                             # console errors, exceptions and requests, which should be none
        view.evaluate("document.title")

It is spoken to over a pipe in the DevTools protocol: JSON messages that end in a NUL byte, the browser reads its file
descriptor 3 and writes 4.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-background-networking")
DRAWN = "document.querySelector('html[data-drawn]') !== null"


PATIENCE = 90.0


def executable() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One process; every opened file is a tab of its own."""

    def __init__(self) -> None:
        program = executable()
        assert program is not None
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        browser_reads, self._requests = os.pipe()
        self._answers, browser_writes = os.pipe()
        command = [program, *FLAGS, f"--user-data-dir={self._profile.name}", "--remote-debugging-pipe"]
        moved = f'exec "$@" 3<&{browser_reads} 4>&{browser_writes}'
        self._process = subprocess.Popen(
            ["bash", "-c", moved, "browser", *command],
            pass_fds=(browser_reads, browser_writes),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(browser_reads)
        os.close(browser_writes)
        self._received = b""
        self._count = 0
        self._events: list[dict[str, Any]] = []

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.write(self._requests, b'{"id": 0, "method": "Browser.close"}\0')
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        self._process.kill()
        self._process.wait()
        os.close(self._requests)
        os.close(self._answers)
        self._profile.cleanup()

    def open(self, path: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> View:
        """The file in a tab, once it says that all its figures are drawn."""
        target = self.call("Target.createTarget", {"url": "about:blank"})["targetId"]
        session = self.call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        view = View(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            view.call(f"{domain}.enable")
        phone = width < 700
        view.call(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": phone},
        )
        view.call("Emulation.setTouchEmulationEnabled", {"enabled": phone})
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        view.call("Emulation.setEmulatedMedia", {"features": [scheme]})
        view.call("Page.navigate", {"url": path.absolute().as_uri()})
        view.wait_for(DRAWN)
        return view

    def call(self, method: str, parameters: dict[str, Any] | None = None, session: str | None = None) -> dict[str, Any]:
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters or {}}
        if session is not None:
            message["sessionId"] = session
        os.write(self._requests, json.dumps(message).encode() + b"\0")
        while (answer := self._message()).get("id") != self._count:
            self._events.append(answer)
        assert "error" not in answer, answer["error"]
        result: dict[str, Any] = answer["result"]
        return result

    def events(self, session: str) -> list[dict[str, Any]]:
        return [event for event in self._events if event.get("sessionId") == session]

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._received:
            ready, _, _ = select.select([self._answers], [], [], PATIENCE)
            assert ready, f"the browser has said nothing for {PATIENCE} s"
            part = os.read(self._answers, 1 << 16)
            assert part, "the browser has ended"
            self._received += part
        message, _, self._received = self._received.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found


class View:
    """An open tab."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session
        self.call: Callable[..., dict[str, Any]] = lambda method, parameters=None: browser.call(
            method, parameters, session
        )

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, as plain Python."""
        answer = self.call("Runtime.evaluate", {"expression": expression, "returnByValue": True, "awaitPromise": True})
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, expression: str, seconds: float = PATIENCE) -> None:
        end = time.monotonic() + seconds
        while not self.evaluate(expression):
            assert time.monotonic() < end, f"{expression} is still false; {self.errors}"
            time.sleep(0.05)

    def point_at(self, selector: str) -> None:
        """The mouse in the middle of the first such element."""
        place = f"""(() => {{
            const element = document.querySelector({json.dumps(selector)});
            element.scrollIntoView({{ block: "center" }});
            const box = element.getBoundingClientRect();
            return {{ x: box.x + box.width / 2, y: box.y + box.height / 2 }};
        }})()"""
        at = self.evaluate(place)
        self.call("Input.dispatchMouseEvent", {"type": "mouseMoved", **at, "x": at["x"] - 5})
        self.call("Input.dispatchMouseEvent", {"type": "mouseMoved", **at})

    @property
    def errors(self) -> list[str]:
        """What a console would show as an error or a warning, and every request besides the file itself."""
        found = []
        for event in self._browser.events(self._session):
            method, parameters = event["method"], event["params"]
            if method == "Runtime.exceptionThrown":
                found.append(json.dumps(parameters["exceptionDetails"]))
            elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
                found.append(json.dumps(parameters["args"]))
            elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
                found.append(json.dumps(parameters["entry"]))
            elif method == "Network.requestWillBeSent" and parameters["request"]["url"].startswith(("http", "ws")):
                found.append(parameters["request"]["url"])
        return found

    def screenshot(self, path: Path) -> None:
        """The whole page, not the window alone."""
        image = self.call("Page.captureScreenshot", {"captureBeyondViewport": True})["data"]
        path.write_bytes(base64.b64decode(image))
