"""Whose warnings fail a test: padfree's and the tests' own, not those of other packages. See `pyproject.toml`."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from padfree.warning import PadfreeWarning
from tests.ranks import run_ranks

TESTS = Path(__file__).parent
OWN = [
    "padfree",
    "padfree.losses.kl",
    *sorted(".".join(("tests", *path.relative_to(TESTS).with_suffix("").parts)) for path in TESTS.rglob("*.py")),
]
OTHERS = ["torch", "torch.cuda", "padfreely.core", "transformers.modeling_utils", "triton.test_runner", "<string>"]
MESSAGES_OF_OTHERS = [
    "mkldnn_matmul failed, switching to BLAS",
    "The .grad attribute of a Tensor that is not a leaf Tensor is being accessed",
    "LayoutEnum is deprecated",
    "Argument aux_data of type None cannot be converted to a JitArgument",
]


def warn_in(module: str, message: str = "old", category: type[Warning] = UserWarning) -> None:
    """Warn as code of that module does."""
    code = compile(f"warnings.warn({message!r}, category)", module, "exec")
    exec(code, {"__name__": module, "warnings": warnings, "category": category})


@pytest.mark.parametrize("module", OWN)
def test_warnings_of_our_own_code_are_errors(module: str) -> None:
    for category in (UserWarning, DeprecationWarning, FutureWarning, RuntimeWarning):
        with pytest.raises(category, match="old"):
            warn_in(module, category=category)


@pytest.mark.parametrize("module", OTHERS)
def test_those_of_other_packages_are_not(module: str) -> None:
    for category in (UserWarning, DeprecationWarning, FutureWarning, RuntimeWarning):
        warn_in(module, category=category)
    with pytest.raises(PadfreeWarning):
        warn_in(module, category=PadfreeWarning)


@pytest.mark.parametrize("message", MESSAGES_OF_OTHERS)
def test_those_that_land_on_our_code_are_not(message: str) -> None:
    warn_in("padfree.head.elementwise", message)


def warning_rank(rank: int, world: int, module: str) -> None:
    warn_in(module)


def test_ranks_follow_the_test_that_starts_them() -> None:
    assert run_ranks(1, warning_rank, "torch.cuda") == [None]
    with pytest.raises(AssertionError, match="UserWarning: old"):
        run_ranks(1, warning_rank, "padfree.cp.ring")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert run_ranks(1, warning_rank, "padfree.cp.ring") == [None]


COMMAND = """
import sys, types, warnings
import padfree.cli.main as command
from padfree.warning import PadfreeWarning

def run(settings):
    for module in ("torch.cuda", "padfree.head.elementwise"):
        warnings.warn_explicit("of another package", UserWarning, module, 1, module=module)
    warnings.warn("of another package", DeprecationWarning)
    for _ in range(2):
        warnings.warn("layers will be slower", PadfreeWarning)

stub = types.ModuleType("stub")
stub.add_command = lambda commands: commands.add_parser("check").set_defaults(run=run)
sys.modules["stub"] = stub
command.COMMANDS["check"] = ("stub", "warn")
sys.argv[1:] = ["check"]
sys.exit(command.main())
"""


@pytest.mark.parametrize("options", [(), ("-W", "default")], ids=["as it is", "-W default"])
def test_a_command_shows_warnings_of_padfree_alone(options: tuple[str, ...]) -> None:
    """Unless -W asks for others."""
    result = subprocess.run([sys.executable, *options, "-c", COMMAND], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("PadfreeWarning: layers will be slower") == 1
    assert ("of another package" in result.stderr) == bool(options)


def test_calling_the_command_from_python_changes_no_filters(capsys: pytest.CaptureFixture[str]) -> None:
    from padfree.cli.main import main

    before = list(warnings.filters)
    assert main(["sft", "nowhere.toml"]) == 1
    assert warnings.filters == before
