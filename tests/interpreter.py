"""Triton kernels on CUDA, or on the CPU in Triton's interpreter.

Triton decides when it is imported whether it interprets. A file marks its tests of kernels `needs_kernels`: on a CUDA
device they run compiled, and `tests/test_interpreted.py` runs all such files again in a process that interprets them.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

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


def patch_the_language_once(interpreter: Any) -> None:
    """The interpreter replaces all functions of `triton.language` for a kernel, and looks through them again whenever
    the kernel calls a function: a third of its time. It also makes a table of all types to look one of them up, and
    does every sum of 32 bits once more in 64, to see that they are enough: these tests have a few thousand numbers."""
    patch, language = interpreter._patch_lang, interpreter.tl
    patched: set[int] = set()

    @cache
    def modules_of(function: Callable[..., Any]) -> frozenset[int]:
        return frozenset(
            id(value) for value in function.__globals__.values() if value is language or value is language.core
        )

    def patch_lang(function: Callable[..., Any]) -> Any:
        modules = modules_of(function)
        if modules <= patched:
            return interpreter._LangPatchScope()
        scope = patch(function)
        restore = scope.restore

        def restore_and_forget() -> None:
            restore()
            patched.difference_update(modules)

        scope.restore = restore_and_forget
        patched.update(modules)
        return scope

    numpy_type = interpreter._get_np_dtype
    numpy_types = cache(numpy_type)

    def get_np_dtype(given: Any) -> Any:
        return numpy_type(given) if given.scalar.is_ptr() else numpy_types(given.scalar)

    interpreter._patch_lang, interpreter._get_np_dtype = patch_lang, get_np_dtype
    options = interpreter.interpreter_builder.options
    interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)


if INTERPRETED:
    import triton.runtime.interpreter

    if hasattr(triton.runtime.interpreter, "_LangPatchScope"):
        patch_the_language_once(triton.runtime.interpreter)
