"""The kernels of the head in Triton's interpreter: one process for all files of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.interpreter import INTERPRETED, run_in_the_interpreter


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter")
def test_in_the_interpreter() -> None:
    pytest.importorskip("triton", minversion="3.7", reason="the interpreter of Triton 3.6 cannot count loops")
    run_in_the_interpreter(str(Path(__file__).parent), "29 passed", "-m", "interpreted")
