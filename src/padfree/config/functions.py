"""User functions that a setting names by import path, `module:function`.

    REWARD = UserFunction(setting="reward", noun="reward", arguments=("response", "row"), result="a number")
    REWARD.check("my_rewards:length_penalty")        # looks for the package `my_rewards`, imports nothing
    REWARD.load("my_rewards:length_penalty")         # imports the module and returns the function

Functions of Python's standard library are refused. Otherwise a recipe by an untrusted author could name a function that
runs shell commands, such as `os:system`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from padfree.errors import UserError, shown_error

PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


def is_path(name: str) -> bool:
    """Return whether `name` has the form `module:function`."""
    return PATH.fullmatch(name) is not None


MODEL = "model:"


def model_of(reward: str | None) -> str | None:
    """Return the folder or Hub id of a reward model: `folder` for the reward `model:folder`.

    Return None if `reward` names a reward function.
    """
    return reward.removeprefix(MODEL) if reward is not None and reward.startswith(MODEL) else None


def in_main_script(path: str | None) -> bool:
    """Return whether the import path `path` names a function of the main script, e.g. `__main__:f`.

    Other processes cannot import the main script without running it.
    """
    # A process that multiprocessing has started imports the main script of its parent as `__mp_main__`.
    return path is not None and path.partition(":")[0] in ("__main__", "__mp_main__")


@dataclass(frozen=True, kw_only=True, slots=True)
class UserFunction:
    """A setting that takes the import path of a user's function, and what padfree expects of the function."""

    setting: str
    noun: str  # name of the function in messages, e.g. "reward"
    arguments: tuple[str, ...]  # names of its arguments
    result: str  # what the function must return, in words for messages
    asynchronous: bool = False  # whether the function must be a coroutine function

    def check(self, path: str) -> None:
        """Raise a `UserError` if there is no package for the import path `path` (`package.module:function`), or if the
        package belongs to Python's standard library. Nothing is imported.
        """
        assert is_path(path)
        package = path.partition(":")[0].partition(".")[0]
        if package in sys.stdlib_module_names:
            raise UserError(
                self.setting,
                f": {package} is part of Python's standard library, which has no {self.noun}",
                "write the function in a module of your own, and give its import path",
                value=path,
            )
        with current_folder() as folder:
            # `find_spec` imports the parents of a module, so only the top-level package is looked up.
            found = package in sys.modules or importlib.util.find_spec(package) is not None
        if not found:
            raise UserError(
                self.setting,
                f": there is no module {package}",
                f"give a module that is installed or in {folder}",
                value=path,
            )

    def load(self, path: str) -> Callable[..., Any]:
        """Import the module of `path` (`module:function`), check the function and return it."""
        self.check(path)
        module, _, name = path.partition(":")
        function: Any = getattr(self._imported(module, path), name, None)
        if not callable(function):
            what = f"has no {name!r}" if function is None else f"has {name!r}, which is not a function"
            raise UserError(self.setting, f": the module {what}", "correct the name", value=path)
        self._check_function(path, function)
        found: Callable[..., Any] = function
        return found

    def _imported(self, module: str, path: str) -> Any:
        with current_folder() as folder:
            try:
                return importlib.import_module(module)
            except KeyboardInterrupt:
                raise  # the user pressed Ctrl-C, and the function is loaded outside of a run
            except BaseException as error:  # the import runs user code, which may call sys.exit
                missing = error.name if isinstance(error, ModuleNotFoundError) else None
                itself = missing is not None and f"{module}.".startswith(f"{missing}.")
                fix = f"give a module that is installed or in {folder}" if itself else "correct the module"
                raise UserError(
                    self.setting, f": importing {module} raised {shown_error(error)}", fix, value=path
                ) from error

    def _check_function(self, path: str, function: Callable[..., Any]) -> None:
        """Raise a `UserError` if `function`, imported from `path`, cannot be used.

        Classes, and functions of Python's standard library, are refused. Some settings require a coroutine function
        (`async def`), others a plain function. The function must accept the arguments that padfree passes.
        """
        wanted = f"({', '.join(self.arguments)})"
        home = str(getattr(function, "__module__", None)).partition(".")[0]
        if inspect.isbuiltin(function) or inspect.isclass(function) or home in sys.stdlib_module_names - {"functools"}:
            what = "a class" if inspect.isclass(function) else f"a function of {home} in the standard library"
            raise UserError(
                self.setting,
                f"is {what}",
                f"write a function with the arguments {wanted}, and give its path",
                value=path,
            )
        called, is_async = _called_functions(function), returns_coroutine(function)
        generates = any(inspect.isgeneratorfunction(each) or inspect.isasyncgenfunction(each) for each in called)
        if generates and self.asynchronous:
            raise UserError(self.setting, "is a generator", f"return {self.result}, without `yield`", value=path)
        if is_async is False and self.asynchronous:
            raise UserError(
                self.setting, "is not async", f"define it with `async def`, and return {self.result}", value=path
            )
        if (generates or is_async) and not self.asynchronous:
            raise UserError(
                self.setting,
                "is async or a generator",
                f"use a plain function that returns {self.result}",
                value=path,
            )
        self._check_arguments(path, function)

    def _check_arguments(self, path: str, function: Callable[..., Any]) -> None:
        """Raise a `UserError` unless `function` accepts the arguments that padfree passes."""
        try:
            signature = inspect.signature(function)
        except ValueError:  # a function that is written in C may have no signature
            return
        wanted = f"({', '.join(self.arguments)})"
        try:
            signature.bind(*self.arguments)
        except TypeError as error:
            these = "this argument" if len(self.arguments) == 1 else f"these {len(self.arguments)} arguments"
            raise UserError(
                self.setting, f"cannot be called with {wanted}: {error}", f"let the function accept {these}", value=path
            ) from None


def returns_coroutine(function: Any) -> bool | None:
    """Return whether a call of `function` returns a coroutine.

    None stands for unknown: a decorator has replaced a coroutine function by a plain function, which may return the
    coroutine or its result.
    """
    called = _called_functions(function)
    if any(map(inspect.iscoroutinefunction, called)):
        return True
    seen: set[int] = set()
    while called:
        wrapped = getattr(called.pop(), "__wrapped__", None)
        if wrapped is not None and id(wrapped) not in seen:
            seen.add(id(wrapped))
            inner = _called_functions(wrapped)
            if any(map(inspect.iscoroutinefunction, inner)):
                return None
            called += inner
    return False


def _called_functions(function: Any) -> list[Any]:
    """Return `function` and the functions that a call of it calls, e.g. that of a partial."""
    found = [function]
    while True:
        last = found[-1]
        if isinstance(last, functools.partial):
            found.append(last.func)
        elif inspect.ismethod(last):
            found.append(last.__func__)
        elif inspect.isroutine(last) or inspect.isclass(last):
            return found
        else:
            found.append(type(last).__call__)


@contextmanager
def current_folder() -> Iterator[str]:
    """Context manager that puts the current folder at the front of `sys.path` during its block, as `python -m` does.

    It yields the path of the folder.
    """
    folder = os.getcwd()
    sys.path.insert(0, folder)
    importlib.invalidate_caches()
    try:
        yield folder
    finally:
        sys.path.remove(folder)
