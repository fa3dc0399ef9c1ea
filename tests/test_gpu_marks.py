"""Tests that need a GPU are marked, skipped without one, and run by one command that says what ran."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import conftest, run_gpu_tests

TESTS = Path(__file__).parent
FILES = sorted(TESTS.rglob("test_*.py"))


def runs_on_cuda(function: ast.FunctionDef) -> bool:
    """Whether something is put on CUDA, or CUDA is asked to do something."""
    for node in ast.walk(function):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            moved = [*node.args, *(keyword.value for keyword in node.keywords if keyword.arg == "device")]
            on_cuda = any(isinstance(value, ast.Constant) and value.value == "cuda" for value in moved)
            if name.endswith((".cuda", "torch.cuda.synchronize", "torch.cuda.set_sync_debug_mode")):
                return True
            if on_cuda and name.endswith((".to", "torch.empty", "torch.full", "torch.randn", "random", "make_inputs")):
                return True
    return False


def marked(tree: ast.Module, function: ast.FunctionDef) -> bool:
    whole = [ast.unparse(node) for node in tree.body if isinstance(node, ast.Assign)]
    marks = [ast.unparse(decorator) for decorator in function.decorator_list]
    return "pytestmark = pytest.mark.gpu" in whole or any("mark.gpu" in mark for mark in marks)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(TESTS)))
def test_what_runs_on_cuda_is_marked(path: Path) -> None:
    if "cuda" not in path.read_text():
        return
    tree = ast.parse(path.read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    assert not [node.name for node in functions if runs_on_cuda(node) and not marked(tree, node)]


@pytest.mark.gpu
def test_with_the_mark_it_sees_one() -> None:
    assert torch.cuda.is_available()
    assert torch.ones(3, device="cuda").sum().item() == 3


def test_the_mark_is_a_skip_with_a_reason_without_a_gpu(request: pytest.FixtureRequest) -> None:
    others = [item for item in request.session.items if item.get_closest_marker("gpu") is not None]
    assert all((item.get_closest_marker("skip") is None) == conftest.has_gpu() for item in others)


def test_the_command_fails_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_gpu_tests.main([]) == 1
    assert capsys.readouterr().err == "gpu tests: none ran, for torch sees no CUDA device\n"


TINY = """
import pytest

@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.gpu
def test_marked(number):
    if number == 2:
        pytest.skip("no such kernel")
    assert number != {wrong}

@pytest.mark.gpu
def test_never():
    pytest.skip("no such kernel")

def test_other():
    raise AssertionError("not asked for")
"""


CASES = [
    (0, [], 0, "2 passed, 0 failed, 2 skipped"),
    (3, [], 1, "1 passed, 1 failed, 2 skipped"),
    (0, ["-k", "never"], 1, "0 passed, 0 failed, 1 skipped"),
    (0, ["-k", "other"], 5, "0 passed, 0 failed, 0 skipped"),
]
PROGRAM = """
import gc, os, pathlib, sys
folder, cases = {given!r}
sys.path.insert(0, {tests!r})
import run_gpu_tests as command
gc.freeze()  # pytest collects garbage again and again, and most objects are torch's
print(command.torch.cuda.is_available(), flush=True)
command.torch.cuda.is_available = lambda: True
command.torch.cuda.get_device_name = lambda: "a GPU"
for number, options in enumerate(cases):
    child = os.fork()
    if child == 0:
        os.chdir(f"{{folder}}/{{number}}")
        command.ROOT = pathlib.Path.cwd()
        with open("output", "w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        code = command.main([*options, "-q", "-n0", "-p", "no:cacheprovider"])
        sys.stdout.flush()
        os._exit(code)  # without taking torch apart
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A process that says whether it sees a GPU, and runs all cases, each in a folder of its own with a made-up GPU."""
    folder = tmp_path_factory.mktemp("command")
    for number, (wrong, *_) in enumerate(CASES):
        (folder / str(number) / "tests").mkdir(parents=True)
        (folder / str(number) / "tests" / "test_tiny.py").write_text(TINY.format(wrong=wrong))
        (folder / str(number) / "pytest.ini").write_text("[pytest]\nmarkers = gpu: needs one\n")
    program = PROGRAM.format(given=(str(folder), [options for _, options, *_ in CASES]), tests=str(TESTS))
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return folder, result.stdout.splitlines()


def test_without_the_mark_a_test_sees_no_gpu(command: tuple[Path, list[str]]) -> None:
    assert not torch.cuda.is_available()
    assert command[1][0] == "False", "nor do processes that it starts"


@pytest.mark.parametrize("number", range(len(CASES)))
def test_the_last_line_says_what_ran(number: int, command: tuple[Path, list[str]]) -> None:
    *_, code, counts = CASES[number]
    output = (command[0] / str(number) / "output").read_text()
    assert command[1][1 + number] == str(code), output
    assert output.splitlines()[-1].startswith(f"gpu tests: {counts} on a GPU in ")
