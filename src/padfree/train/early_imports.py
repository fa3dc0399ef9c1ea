"""Import in a thread what the first step on a GPU needs, while the data is read.

    main thread   mesh | settings, model and data are checked, `auto` is settled |        | engine, first step
    thread             | triton, compiler, flash-attn-4, quack-kernels                 |
                                                                                  wait

These packages take seconds to import, and padfree imports each of them where it is first used: in the first step. An
error is left to that place, which knows what to say about it. A run that ends before `wait` (its settings are refused)
ends the thread after the import it is in; a daemon would be cut off in the middle of an extension module.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from types import TracebackType

from padfree.attention import BACKENDS
from padfree.config import Config
from padfree.garbage_collection import paused_collector

HEAD = ("triton", "triton.tools.tensor_descriptor")
COMPILER = ("torch._dynamo", "torch._inductor.compile_fx")
EPILOGUES = ("padfree.layers.ops.quack_matmul_epilogues",)
FLASH_ATTENTION_4 = ("flash_attn.cute.interface",)


def first_step_modules(config: Config, device_type: str) -> list[str]:
    """What the first step of a run on this type of device imports; nothing on the CPU."""
    if device_type != "cuda":
        return []
    half, compiled = config.model.dtype != "float32", config.parallel.compile != "none"
    modules = [*HEAD]
    if compiled:
        modules += COMPILER
    if half and config.model.attention in ("auto", "fa4") and BACKENDS["fa4"].is_installed():
        modules += FLASH_ATTENTION_4
    if half and compiled and config.parallel.kernels == "auto":
        modules += EPILOGUES
    return modules


class EarlyImports:
    """Imports modules in their order, in a thread of its own, for at most the length of a block."""

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
            with suppress(Exception):  # whoever needs the module imports it again and reports the error
                importlib.import_module(module)

    def wait(self) -> None:
        """Until every module is imported, or has failed to be.

        The engine comes after it: it asks for the compiler and for kernels, and two threads that import the modules of
        one cycle may each be given half of it.
        """
        if self._thread is not None:
            self._thread.join()
        self._paused.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._left.set()
        self._paused.close()
