"""`padfree chat MODEL`: a conversation on the terminal; from a pipe, every line is a turn.

Examples:

    padfree chat runs/sft
    padfree chat runs/sft --system "Answer in one sentence." < questions.txt
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from padfree.cli.main import COMMANDS
from padfree.cli.talk_options import OneLineHelp, Output, add_options, read_lines, speaker_of
from padfree.errors import UserError

if TYPE_CHECKING:
    from padfree.tools.talk.chat_session import ChatSession

HELP = """\
/reset          forget the conversation
/system TEXT    set the system message and forget the conversation; without TEXT, show it
/help           show this list
//...           send a message that begins with /
Ctrl-C stops an answer, Ctrl-D ends the chat."""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = COMMANDS["chat"][1]
    command = commands.add_parser(
        "chat",
        help=text,
        usage="padfree chat MODEL [options]",
        description="Chat with a model on the terminal. From a pipe, every line is a turn. /help lists the commands.",
        formatter_class=OneLineHelp,
        epilog='example: padfree chat runs/sft --system "Answer in one sentence."',
    )
    add_options(command)
    command.set_defaults(run=run)


def run(settings: argparse.Namespace) -> None:
    output = Output()
    is_terminal = output.is_terminal and sys.stdin.isatty()
    try:
        speaker = speaker_of(settings)
        if speaker.chat_tokenizer.chat is None:
            raise UserError(
                "MODEL",
                f"{settings.model} was trained on prompts without a chat template",
                "use padfree generate, or give --chat-template",
            )
        from padfree.tools.talk.chat_session import ChatSession

        conversation = ChatSession(speaker, settings.system)
        chat = _Chat(conversation, output, settings)
        if is_terminal:
            output.write(f"{settings.model}; /help lists the commands, Ctrl-D ends\n")
            with settings.signals.lent(signal.SIGINT, signal.default_int_handler):
                _on_terminal(chat)
        else:
            for line in read_lines(sys.stdin, "standard input"):
                chat.take(line)
    except KeyboardInterrupt:
        output.write("\n")
        raise SystemExit(130) from None


def _on_terminal(chat: _Chat) -> None:
    with suppress(ImportError):
        import readline  # noqa: F401  adds history and editing keys to `input`
    while True:
        try:
            line = input("> ")
        except EOFError:
            chat.output.write("\n")
            return
        except KeyboardInterrupt:
            chat.output.write("\n(Ctrl-D ends the chat)\n")
            continue
        except UnicodeDecodeError:
            chat.output.write("the input is not UTF-8 text\n")
            continue
        try:
            with _on_interrupt(chat.interrupt):
                chat.take(line)
        except UserError as error:
            # An error such as a full context does not end the chat.
            chat.output.write(f"{error}\n")


class _Chat:
    """Handles the lines that the user types: messages to the model, and commands such as /reset."""

    def __init__(self, conversation: ChatSession, output: Output, settings: argparse.Namespace) -> None:
        self.conversation, self.output = conversation, output
        self._max_new_tokens, self._json = settings.max_new_tokens, settings.json
        self.stop = False  # set by Ctrl-C

    def interrupt(self, number: int, frame: Any) -> None:
        """Signal handler for Ctrl-C: the first Ctrl-C ends the answer at its next token, a second ends the program."""
        if self.stop:
            raise KeyboardInterrupt
        self.stop = True

    def take(self, line: str) -> None:
        """Handle one input line: run it if it is a command, otherwise send it to the model as a message."""
        text = line.strip()
        if text.startswith("/") and not text.startswith("//"):
            self._command(text)
        elif text:
            self._ask(text.removeprefix("/") if text.startswith("//") else line)

    def _command(self, text: str) -> None:
        name, _, rest = text.partition(" ")
        if name == "/reset" and not rest:
            self.conversation.reset()
        elif name == "/system" and rest:
            self.conversation.reset(rest.strip())
        elif name == "/system":
            self.output.write(f"{self.conversation.system or '(no system message)'}\n")
        elif name == "/help":
            self.output.write(f"{HELP}\n")
        else:
            raise UserError(
                f"{text.split()[0]}", "is not a command", "use /help for a list, or // to begin a message with /"
            )

    def _ask(self, text: str) -> None:
        from padfree.tools.talk.speaker import FullContextError, StopAnswer

        def show(_: int, piece: str) -> None:
            if not self._json:
                self.output.write(piece)
            if self.stop:
                raise StopAnswer

        self.stop = False
        try:
            answer = self.conversation.ask(text, max_new_tokens=self._max_new_tokens, on_text=show)
        except FullContextError as error:
            raise UserError(error.setting, error.problem, "use /reset to forget the conversation") from None
        if self._json:
            self.output.write_json({"prompt": text, **answer.as_json()})
            return
        notes = {"interrupted": " [stopped]", "length": " [cut: --max-new-tokens]", "context": " [context full]"}
        self.output.write(f"{notes.get(answer.end, '')}\n")


@contextmanager
def _on_interrupt(handler: Callable[[int, Any], Any]) -> Iterator[None]:
    """Context manager that installs `handler` as the signal handler for Ctrl-C."""
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
