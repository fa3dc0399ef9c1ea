"""Triton kernels on the CPU, in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys


def run_in_the_interpreter(tests: str, outcome: str, *options: str) -> None:
    """Run the tests of this file again, with Triton's interpreter in place of its compiler."""
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", tests, *options],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert outcome in result.stdout, result.stdout
