"""Which functions a user may name by import path: plain ones, or those whose call returns a coroutine."""

from __future__ import annotations

import asyncio
import functools
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

from padfree.config.functions import UserFunction, returns_coroutine
from tests.refused import refused

MODULE = "my_functions"


async def coroutine(a: Any, b: Any) -> float:
    return 1.0


def plain(a: Any, b: Any) -> float:
    return 1.0


def generator(a: Any, b: Any) -> Iterator[float]:
    yield 1.0


async def async_generator(a: Any, b: Any) -> AsyncIterator[float]:
    yield 1.0


class Async:
    async def __call__(self, a: Any, b: Any) -> float:
        return 1.0

    async def method(self, a: Any, b: Any) -> float:
        return 1.0


class Plain:
    def __call__(self, a: Any, b: Any) -> float:
        return 1.0


class Generator:
    def __call__(self, a: Any, b: Any) -> Iterator[float]:
        yield 1.0


def three(first: Any, a: Any, b: Any) -> float:
    return 1.0


def passed_on(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return function(*args)

    return wrapper


def awaited(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return asyncio.run(function(*args))

    return wrapper


def made_async(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    async def wrapper(*args: Any) -> Any:
        return function(*args)

    return wrapper


def looped() -> Callable[..., Any]:
    def function(a: Any, b: Any) -> float:
        return 1.0

    function.__wrapped__ = function  # type: ignore[attr-defined]
    return function


COROUTINES: dict[str, Any] = {
    "function": coroutine,
    "object": Async(),
    "method": Async().method,
    "partial": functools.partial(coroutine),
    "partial of an object": functools.partial(Async()),
    "partial of a partial": functools.partial(functools.partial(Async().method)),
    "made async": made_async(plain),
    "method of an object": Async().__call__,
}
UNKNOWN: dict[str, Any] = {
    "passed on": passed_on(coroutine),
    "passed on twice": passed_on(passed_on(coroutine)),
    "object passed on": passed_on(Async()),
    "awaited": awaited(coroutine),
    "partial of a wrapper": functools.partial(passed_on(coroutine)),
    "cached": functools.lru_cache(coroutine),
    "made async, passed on": passed_on(made_async(plain)),
}
PLAIN: dict[str, Any] = {
    "function": plain,
    "object": Plain(),
    "partial": functools.partial(three, 0),
    "passed on": passed_on(plain),
    "cached": functools.lru_cache(plain),
}
GENERATORS: dict[str, Any] = {
    "function": generator,
    "async": async_generator,
    "object": Generator(),
    "partial": functools.partial(async_generator),
}
ALL = {
    (kind, name): function
    for kind, functions in (
        ("coroutine", COROUTINES),
        ("unknown", UNKNOWN),
        ("plain", PLAIN),
        ("generator", GENERATORS),
    )
    for name, function in functions.items()
}


def setting(asynchronous: bool) -> UserFunction:
    return UserFunction(
        setting="some.setting", noun="noun", arguments=("a", "b"), result="a number", asynchronous=asynchronous
    )


@pytest.fixture(autouse=True)
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType(MODULE)
    monkeypatch.setitem(sys.modules, MODULE, module)
    return module


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize(("kind", "name"), ALL, ids=" ".join)
def test_what_a_call_returns_decides(kind: str, name: str, asynchronous: bool, module: ModuleType) -> None:
    function = ALL[kind, name]
    module.function = function  # type: ignore[attr-defined]
    if kind in (["coroutine", "unknown"] if asynchronous else ["plain", "unknown"]):
        assert setting(asynchronous).load(f"{MODULE}:function") is function
    else:
        about = {True: "is a generator" if kind == "generator" else "is not async", False: "is async or a generator"}
        with refused("some.setting", about[asynchronous]):
            setting(asynchronous).load(f"{MODULE}:function")


@pytest.mark.parametrize("name", COROUTINES)
def test_a_call_returns_a_coroutine(name: str) -> None:
    result = COROUTINES[name](0, 0)
    assert asyncio.run(result) == 1.0
    assert returns_coroutine(COROUTINES[name]) is True


def test_a_function_that_cannot_be_inspected(module: ModuleType) -> None:
    """A wrapper that names itself as its function, and a function written in C."""
    module.looped = looped()  # type: ignore[attr-defined]
    module.largest = Unsigned()  # type: ignore[attr-defined]
    for name in ("looped", "largest"):
        assert setting(False).load(f"{MODULE}:{name}")(1, 2) == 1.0


class Unsigned:
    """A callable whose signature is not known."""

    @property
    def __signature__(self) -> None:
        raise ValueError("no signature found")

    def __call__(self, *args: Any) -> float:
        return 1.0
