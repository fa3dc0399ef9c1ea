"""Functions of the user that a setting names by import path, `module:function`.

    REWARD = UserFunction(setting="reward", noun="reward", arguments=("response", "row"), result="a number")
    REWARD.check("my_rewards:length_penalty")        nothing is imported
    REWARD.load("my_rewards:length_penalty")         the function

A recipe names the function, and a recipe may come from somebody else. So Python's standard library is no place for one:
its `os.system`, `subprocess.run` or `builtins.eval` would take what such a function is given, too. Modules are found
among the installed packages and in the current folder.
"""

from __future__ import annotations

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
    """Whether a name has the form `module:function`."""
    return PATH.fullmatch(name) is not None


MODEL = "model:"


def model_of(reward: str | None) -> str | None:
    """The folder or Hub id that a reward names as `model:folder`; None: it is a function."""
    return reward.removeprefix(MODEL) if reward is not None and reward.startswith(MODEL) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class UserFunction:
    """A setting whose value may be a user's function."""

    setting: str
    noun: str  # what such a function is
    arguments: tuple[str, ...]  # what it is called with
    result: str  # what it returns
    asynchronous: bool = False  # whether it is a coroutine function

    def check(self, path: str) -> None:
        """Refuse a path that cannot be loaded, as far as that shows without importing anything.

        Whether the module has such a function, and what it takes, only `load` can tell.
        """
        assert is_path(path)
        package = path.partition(":")[0].partition(".")[0]
        if package in sys.stdlib_module_names:
            raise UserError(
                self.setting,
                f": {package} is Python's own, and none of its functions is a {self.noun}",
                "write one in a module of your own and name that",
                value=path,
            )
        with _current_folder() as folder:
            # a package is found without being imported, a module inside it is not
            found = package in sys.modules or importlib.util.find_spec(package) is not None
        if not found:
            raise UserError(
                self.setting,
                f": there is no module {package}",
                f"give a module that is installed or in {folder}",
                value=path,
            )

    def load(self, path: str) -> Callable[..., Any]:
        """The function. Its module is imported."""
        self.check(path)
        module, _, name = path.partition(":")
        function: Any = getattr(self._imported(module, path), name, None)
        if not callable(function):
            what = "no" if function is None else "a value but no function"
            raise UserError(self.setting, f": the module has {what} {name!r}", "correct the name", value=path)
        self._check_function(path, function)
        found: Callable[..., Any] = function
        return found

    def _imported(self, module: str, path: str) -> Any:
        with _current_folder() as folder:
            try:
                return importlib.import_module(module)
            except KeyboardInterrupt:
                raise  # a signal, outside of a run
            except BaseException as error:  # importing runs the user's module, which may call sys.exit
                missing = error.name if isinstance(error, ModuleNotFoundError) else None
                itself = missing is not None and f"{module}.".startswith(f"{missing}.")
                cure = f"give a module that is installed or in {folder}" if itself else "correct the module"
                raise UserError(
                    self.setting, f": importing {module} raised {shown_error(error)}", cure, value=path
                ) from error

    def _check_function(self, path: str, function: Callable[..., Any]) -> None:
        """A plain function of these arguments, written in Python and not by Python."""
        wanted = f"({', '.join(self.arguments)})"
        home = str(getattr(function, "__module__", None)).partition(".")[0]
        if inspect.isbuiltin(function) or inspect.isclass(function) or home in sys.stdlib_module_names - {"functools"}:
            what = "a class" if inspect.isclass(function) else f"a function of {home}, which is Python's own"
            raise UserError(self.setting, f"is {what}", f"write a function of {wanted} and name that", value=path)
        if self.asynchronous and not inspect.iscoroutinefunction(function):
            raise UserError(self.setting, "is not async", f"make it `async def` that returns {self.result}", value=path)
        generates = inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)
        if generates or (inspect.iscoroutinefunction(function) and not self.asynchronous):
            raise UserError(
                self.setting,
                "is async or a generator",
                f"make it a plain function that returns {self.result}",
                value=path,
            )
        try:
            inspect.signature(function).bind(*self.arguments)
        except TypeError as error:
            these = "this argument" if len(self.arguments) == 1 else f"these {len(self.arguments)} arguments"
            raise UserError(
                self.setting, f"cannot be called with {wanted}: {error}", f"take {these}", value=path
            ) from None


@contextmanager
def _current_folder() -> Iterator[str]:
    """Modules of the current folder can be found, as with `python -m`."""
    folder = os.getcwd()
    sys.path.insert(0, folder)
    importlib.invalidate_caches()
    try:
        yield folder
    finally:
        sys.path.remove(folder)
