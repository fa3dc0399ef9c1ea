"""Import the packages that the first GPU step needs in a thread, while the main thread reads the data.

Importing these packages (triton, the compiler, flash-attn-4, quack-kernels) takes seconds. The thread ignores import
errors, because the first use of a package reports them.

If the run ends early, the process waits for the import in progress. Python must not stop a thread inside the import of
an extension module.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from types import TracebackType

from padfree.attention import BACKENDS
from padfree.config import ModelConfig, ParallelConfig
from padfree.garbage_collection import paused_collector

HEAD = ("triton", "triton.tools.tensor_descriptor")
COMPILER = ("torch._dynamo", "torch._inductor.compile_fx")
EPILOGUES = ("padfree.layers.ops.quack_matmul_epilogues",)
FLASH_ATTENTION_4 = ("flash_attn.cute.interface",)


def first_step_modules(model: ModelConfig, parallel: ParallelConfig, device_type: str) -> list[str]:
    """Return the modules that the first step imports on this device type; an empty list on the CPU."""
    if device_type != "cuda":
        return []
    half, compiled = model.dtype != "float32", parallel.compile != "none"
    modules = [*HEAD]
    if compiled:
        modules += COMPILER
    if half and model.attention in ("auto", "fa4") and BACKENDS["fa4"].is_installed():
        modules += FLASH_ATTENTION_4
    if half and compiled and parallel.kernels == "auto":
        modules += EPILOGUES
    return modules


class EarlyImports:
    """Context manager: a thread imports the modules in order. At the end of the block the thread stops."""

    def __init__(self, modules: Iterable[str]) -> None:
        self._modules = tuple(modules)
        self._left = threading.Event()
        self._thread: threading.Thread | None = None
        self._paused = ExitStack()

    def __enter__(self) -> EarlyImports:
        if self._modules:
            self._paused.enter_context(paused_collector())
            self._thread = threading.Thread(target=self._run, name="early imports")
            self._thread.start()
        return self

    def _run(self) -> None:
        for module in self._modules:
            if self._left.is_set():
                return
            with suppress(Exception):  # the code that needs the module imports it again and reports the error
                importlib.import_module(module)

    def wait(self) -> None:
        """Wait until every import has finished or failed. Call this before the engine is built.

        The engine imports the compiler and kernels too. Two threads that import modules of one import cycle at the same
        time may see partially initialised modules.
        """
        if self._thread is not None:
            self._thread.join()
        self._paused.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._left.set()
        self._paused.close()
