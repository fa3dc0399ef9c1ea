"""All Triton kernels in Triton's interpreter: one process for all files, which takes long to start."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.interpreter import run_in_the_interpreter

PASSED = {
    "attention/test_prefix_attention.py": 6,
    "layers/test_swiglu.py": 6,
    "model/test_split_weight.py": 7,
    "optim/test_rounded_adamw.py": 18,
    "rollout/test_sample_token.py": 9,
}
"""How many tests have to pass, by file or folder."""

WITH_LOOPS = {
    "head": 37,
    "layers/test_triton_float8.py": 45,
    "layers/test_triton_rms_norm.py": 53,
    "rollout/test_decode_attention.py": 16,
    "rollout/test_decode_experts.py": 9,
}
"""Those that the interpreter of Triton 3.6 cannot run: it does not count loops."""


@pytest.mark.slow
def test_in_the_interpreter() -> None:
    triton = pytest.importorskip("triton")
    counts_loops = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 7)
    expected = {**PASSED, **(WITH_LOOPS if counts_loops else {})}
    folder = Path(__file__).parent
    run_in_the_interpreter([str(folder / name) for name in expected], sum(expected.values()))
