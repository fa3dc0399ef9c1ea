"""`padfree chat`: every line of a pipe is a turn, and a terminal has a conversation."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from padfree.cli.main import main
from tests.tools.talk.talk_cases import save_model

PATIENCE = 120.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model(tmp_path_factory.mktemp("chat") / "model", max_position_embeddings=4096))


@pytest.fixture
def typed(model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> object:
    def run(text: str, *words: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        code = main(["chat", model, "--device", "cpu", "--max-new-tokens", "8", *words])
        return code, *capsys.readouterr()

    return run


def test_a_turn_for_every_line(typed: object) -> None:
    assert callable(typed)
    code, out, err = typed("Hello\n\nTwo?\n", "--json")
    rows = [json.loads(line) for line in out.splitlines()]
    assert (code, err) == (0, "")
    assert [row["prompt"] for row in rows] == ["Hello", "Two?"]
    again = [json.loads(line) for line in typed("Hello\nTwo?\n/reset\nHello\nTwo?\n", "--json")[1].splitlines()]
    assert [row["text"] for row in again] == [row["text"] for row in rows] * 2
    alone = json.loads(typed("Two?\n", "--json")[1])
    assert alone["text"] != rows[1]["text"], "the second turn sees the first"


def test_commands(typed: object) -> None:
    assert callable(typed)
    code, out, _ = typed("/system\n/system Be kind.\n/system\n/help\n")
    assert code == 0
    assert out.startswith("(no system message)\nBe kind.\n/reset ")
    first = typed("Hello\n", "--system", "Be kind.")[1]
    assert first == typed("/system Be kind.\nHello\n")[1] != typed("Hello\n")[1]
    assert json.loads(typed("//help\n", "--json")[1])["prompt"] == "/help"


def test_mistakes_are_one_line(typed: object, tmp_path: Path) -> None:
    assert callable(typed)
    for text, message in (
        ("/sing\n", "/sing: is not a command; use /help"),
        ("/reset now\n", "/reset: is not a command"),
        ("y" * 30_000, "fill the model's context of 4,096; use /reset to forget the conversation"),
        ("\udcff\n", "lone surrogate"),
    ):
        code, _, err = typed(text)
        assert code == 1
        assert message in err
        assert err.startswith("padfree chat: ")
        assert err.count("\n") == 1


class Terminal:
    """A program on a terminal of its own."""

    def __init__(self, *words: str) -> None:
        self._end, inside = pty.openpty()
        environment = {**os.environ, "TERM": "dumb"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "padfree", *words],
            stdin=inside,
            stdout=inside,
            stderr=inside,
            env=environment,
            start_new_session=True,
            preexec_fn=_take_terminal,
        )
        os.close(inside)
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self._end, text.encode())

    def read(self) -> None:
        """What is shown within a second."""
        ready, _, _ = select.select([self._end], [], [], 1.0)
        if ready:
            self.seen += os.read(self._end, 65536).decode(errors="replace").replace("\r\n", "\n")

    def wait_for(self, text: str) -> str:
        """Until this is shown; what was shown up to it."""
        deadline = time.monotonic() + PATIENCE
        while text not in self.seen:
            assert time.monotonic() < deadline, f"no {text!r} in {self.seen[-500:]!r}"
            self.read()
        before, _, self.seen = self.seen.partition(text)
        return before

    def type_until(self, keys: str, text: str) -> None:
        """The same keys again until this is shown."""
        deadline = time.monotonic() + PATIENCE
        while text not in self.seen:
            assert time.monotonic() < deadline, f"no {text!r} in {self.seen[-500:]!r}"
            self.type(keys)
            self.read()
        self.wait_for(text)


def _take_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.mark.slow
def test_on_a_terminal(tmp_path: Path) -> None:
    """Ctrl-C ends an answer and not the program, a mistake neither, Ctrl-D the program."""
    endless = str(save_model(tmp_path, max_position_embeddings=1 << 20))
    terminal = Terminal("chat", endless, "--device", "cpu", "--max-new-tokens", "1000000")
    try:
        assert "/help lists the commands, Ctrl-D ends" in terminal.wait_for("\n> ")
        terminal.type("Hello\n")
        terminal.wait_for("Hello\n")
        while len(terminal.seen) < 40:
            terminal.read()
        terminal.type("\x03")
        shown = terminal.wait_for("[stopped]\n") + terminal.wait_for("> ")
        assert "SIGINT" not in shown, "the program has not been asked to end"
        terminal.type("/sing\n")
        terminal.wait_for("/sing: is not a command")
        terminal.wait_for("> ")
        # A Ctrl-C between the prompt and the first look at the keyboard is seen with the next key only: so another one.
        terminal.type_until("\x03", "(Ctrl-D ends the chat)")
        terminal.wait_for("> ")
        terminal.type("\x04")
        assert terminal.process.wait(PATIENCE) == 0
    finally:
        terminal.process.kill()
        terminal.process.wait()
