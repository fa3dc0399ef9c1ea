"""Triton kernels on CUDA, or on the CPU in Triton's interpreter.

Triton decides when it is imported whether it interprets. A file marks its tests of kernels `needs_kernels`: on a CUDA
device they run compiled, and `tests/test_interpreted.py` runs all such files again in a process that interprets them.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
needs_kernels = pytest.mark.interpreted if INTERPRETED else pytest.mark.gpu


def run_in_the_interpreter(tests: list[str], passed: int) -> None:
    """Run the tests of kernels in these files and folders, with Triton's interpreter in place of its compiler."""
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "interpreted", *tests],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(rf"\b{passed} passed, \d+ deselected in ", result.stdout), result.stdout
