"""Output streams that fail, fill up, close or cannot encode a character; user code that calls exit functions."""

from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import pytest

from padfree.cli import output
from padfree.cli.main import main
from padfree.cli.output import SurvivingStream
from padfree.errors import EXIT_BUG


class Failures(list[Any]):
    def __call__(self, error: OSError | ValueError) -> None:
        self.append(error)


@pytest.fixture
def pipe() -> Iterator[tuple[int, TextIO]]:
    read, write = os.pipe()
    with open(write, "w", encoding="utf-8") as stream:
        yield read, stream


def test_text_arrives_in_order(pipe: tuple[int, TextIO]) -> None:
    read, stream = pipe
    made = SurvivingStream(stream, Failures())
    for number in range(100):
        print(number, file=made)
    made.finish()
    assert os.read(read, 1 << 16).split() == [str(number).encode() for number in range(100)]
    os.close(read)


def closed_reader() -> TextIO:
    read, write = os.pipe()
    os.close(read)
    return open(write, "w", encoding="utf-8")


def full_disk() -> TextIO:
    return open("/dev/full", "w", encoding="utf-8")


def closed_descriptor() -> TextIO:
    descriptor = os.open(os.devnull, os.O_WRONLY)
    # A stream that owns the number would close it again when it is collected, and with it some later file.
    stream = open(descriptor, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    os.close(descriptor)
    return stream


def closed_stream() -> TextIO:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize(
    ("make", "number"),
    [
        (closed_reader, errno.EPIPE),
        (full_disk, errno.ENOSPC),
        (closed_descriptor, errno.EBADF),
        (closed_stream, None),
    ],
)
def test_a_stream_that_fails_is_said_once_and_raises_nothing(make: Callable[[], TextIO], number: int | None) -> None:
    failures, stream = Failures(), make()
    made = SurvivingStream(stream, failures)
    for _ in range(3):
        print("a line", file=made, flush=True)
    made.finish()
    assert [getattr(error, "errno", None) for error in failures] == [number]
    print("later", file=made, flush=True)
    stream.close()


def test_a_pipe_that_nobody_reads_blocks_nothing(pipe: tuple[int, TextIO], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "MOST_CHARACTERS", 1 << 18)
    read, stream = pipe
    made = SurvivingStream(stream, Failures())
    begin = time.monotonic()
    for _ in range(1000):
        print("x" * 1023, file=made, flush=True)
    assert time.monotonic() - begin < 5, "one flush may wait for a moment, the others do not"
    found = b""
    while b"dropped" not in found:
        found += os.read(read, 1 << 16)
    assert 64 << 10 < found.count(b"x") < 1000 * 1023
    print("at the end", file=made)
    made.finish()
    assert os.read(read, 1 << 16).endswith(b"at the end\n")
    os.close(read)


def test_a_descriptor_that_does_not_block(pipe: tuple[int, TextIO]) -> None:
    """As some programs leave a terminal or a pipe behind: Python's own print raises BlockingIOError."""
    read, stream = pipe
    os.set_blocking(stream.fileno(), False)
    made = SurvivingStream(stream, Failures())
    made.write("y" * 500_000)
    found = 0
    while found < 500_000:
        found += len(os.read(read, 1 << 16))
    made.finish()
    assert made.failure is None
    os.close(read)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_characters_that_the_stream_has_not(encoding: str) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    made = SurvivingStream(stream, Failures())
    print("größe 𝄞 \udcff", file=made)
    made.finish()
    assert made.failure is None
    shown = stream.buffer.getvalue().decode(encoding)  # type: ignore[attr-defined]
    assert ("gr\\xf6" in shown) == (encoding == "ascii")
    assert "\\udcff" in shown


def test_a_forked_process_writes_by_itself(pipe: tuple[int, TextIO]) -> None:
    read, stream = pipe
    made = SurvivingStream(stream, Failures())
    child = os.fork()
    if child == 0:
        print("from the child", file=made, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 100) == b"from the child\n"
    made.finish()
    os.close(read)


# Commands

PROGRAM = """
import os, sys
import padfree.cli.main as main
import padfree.cli.train as train

def work(settings):
    {work}

train.run = work
sys.argv = ["padfree", {arguments}]
sys.exit(main.main())
"""


def command(
    work: str, *arguments: str, redirect: str = "", variables: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """A command whose work is this line, started by a shell with these redirections."""
    words = ", ".join(map(repr, arguments))
    program = PROGRAM.format(work=work, arguments=words)
    return subprocess.run(
        ["bash", "-c", f'"$0" -c "$1" {redirect}', sys.executable, program],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, **(variables or {})},
    )


SFT, DRY = ("sft", "recipe.toml"), ("sft", "recipe.toml", "--dry-run")
LINES = "[print('line', i, flush=True) for i in range(100000)]; print('worked', file=sys.stderr)"


@pytest.mark.parametrize(
    ("redirect", "said"),
    [
        ("| head -1; exit ${PIPESTATUS[0]}", "stdout cannot be written (Broken pipe)"),
        ("> /dev/full", "stdout cannot be written (No space left on device)"),
        (">&-", ""),
        ("<&-", ""),
    ],
)
def test_a_run_goes_on_without_its_output(redirect: str, said: str) -> None:
    result = command(LINES, *SFT, redirect=redirect)
    assert result.returncode == 0, result.stderr
    assert "worked" in result.stderr
    assert said in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("redirect", ["2>&-", "2> /dev/full", ">&- 2>&- <&-", "> /dev/full 2>&1", "2>&1 | head -1"])
def test_a_run_goes_on_without_stderr(redirect: str, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    work = f"print('x' * 100000, file=sys.stderr); print('y' * 100000); open({str(mark)!r}, 'w').write('done')"
    assert command(work, *SFT, redirect=redirect).returncode == 0
    assert mark.read_text() == "done", "and no library's output is in it"


def test_a_run_ends_though_nobody_reads_it() -> None:
    """A stuck thread must not keep the interpreter, or crash it."""
    read, write = os.pipe()
    program = PROGRAM.format(work="[print('z' * 1000) for i in range(5000)]", arguments='"sft", "recipe.toml"')
    process = subprocess.Popen([sys.executable, "-c", program], stdout=write, stderr=subprocess.PIPE, text=True)
    _, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (0, "")
    os.close(read)
    os.close(write)


def test_files_do_not_get_the_number_of_a_closed_stream(tmp_path: Path) -> None:
    work = f"print(open({str(tmp_path / 'f')!r}, 'w').fileno(), file=open({str(tmp_path / 'n')!r}, 'w'))"
    assert command(work, *SFT, redirect=">&- 2>&- <&-").returncode == 0
    assert int((tmp_path / "n").read_text()) > 2


def test_a_command_that_prints_its_result() -> None:
    """It ends quietly if nobody reads any more, and fails if the result could not be written."""
    result = command(LINES, *DRY, redirect="| head -1; exit ${PIPESTATUS[0]}")
    assert (result.returncode, result.stderr) == (0, "")
    result = command("print('x')", *DRY, redirect="> /dev/full")
    assert result.returncode == 1
    assert result.stderr == (
        "padfree sft: stdout: cannot be written (No space left on device); free space, or redirect the output\n"
    )
    assert command("print('x')", *DRY, redirect=">&-").returncode == 0


@pytest.mark.parametrize(
    ("arguments", "variables"), [(SFT, {"PYTHONIOENCODING": "ascii"}), (DRY, {"LC_ALL": "C", "PYTHONUTF8": "0"})]
)
def test_an_ascii_terminal(arguments: tuple[str, ...], variables: dict[str, str]) -> None:
    result = command("print('gr\\u00f6\\u00dfe \\udcff')", *arguments, variables=variables)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("gr")


def test_a_broken_pipe_that_is_not_the_output_is_an_error() -> None:
    result = command("raise BrokenPipeError(32, 'of a server')", *DRY)
    assert result.returncode == EXIT_BUG
    assert "of a server" in result.stderr
    result = command("raise BrokenPipeError(32, 'of a server')", *SFT)
    assert result.returncode == EXIT_BUG


@pytest.mark.parametrize(
    ("work", "said"),
    [
        ("sys.exit(0)", "raised SystemExit(0)"),
        ("sys.exit()", "raised SystemExit"),
        ("sys.exit('text')", "raised SystemExit(text)"),
        ("exit(0)", "raised SystemExit(0)"),
        ("raise KeyboardInterrupt", "raised KeyboardInterrupt"),
        ("raise GeneratorExit", "raised GeneratorExit"),
        ("raise type('Own', (BaseException,), {})('mine')", "raised Own(mine)"),
        ("os._exit(0)", "os._exit(0): "),
        ("os._exit(7)", "os._exit(7): "),
    ],
)
def test_code_cannot_end_a_run_in_silence(
    work: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names: dict[str, Any] = {}
    exec(f"import os, sys\ndef work(settings):\n    {work}", names)
    monkeypatch.setattr("padfree.cli.train.run", names["work"])
    assert main([*SFT]) == 1
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert "<string>:3 in work" in error


def test_a_forked_process_may_still_end() -> None:
    work = "child = os.fork(); child or os._exit(3); print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))"
    assert command(work, *SFT).stdout == "3\n"
