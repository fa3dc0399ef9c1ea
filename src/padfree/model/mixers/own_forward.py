"""A copy of a module's own forward in which some functions are replaced by name.

    modeling_x.py       def forward(self, hidden_states, ...):      y = causal_conv1d_fn(x, ...)
    with_functions      the same code, in which causal_conv1d_fn is padfree's function

In transformers, mixers call functions with a few well-known names. If certain optional packages are installed, these
names refer to the packages' kernels. The copy has the code of the original forward, but its own table of names, so that
neither the modules of transformers nor other models change.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from types import FunctionType, MethodType
from typing import Any

from torch import nn

Function = Callable[..., Any]


def code_of(module_class: type[nn.Module]) -> FunctionType:
    """Return the forward function of a module class, without its decorators."""
    function = inspect.unwrap(module_class.forward)
    assert isinstance(function, FunctionType)
    return function


def with_functions(forward: FunctionType, functions: Mapping[str, Function]) -> FunctionType:
    """Return a copy of `forward` in which the names in `functions` refer to the given functions."""
    # Remove `__name__`. Otherwise the compiler would look up the functions in the module that `__name__` names, and
    # find the original functions.
    names = {name: value for name, value in forward.__globals__.items() if name != "__name__"}
    copy = FunctionType(
        forward.__code__, {**names, **functions}, forward.__name__, forward.__defaults__, forward.__closure__
    )
    copy.__kwdefaults__ = forward.__kwdefaults__
    return copy


@cache
def reference_forward(module_class: type[nn.Module]) -> Function | None:
    """Return a copy of a class's forward that calls plain PyTorch functions in place of kernels.

    Returns None if the forward calls no kernels.
    """
    if not isinstance(inspect.unwrap(module_class.forward), FunctionType):
        return None
    forward = code_of(module_class)
    plain = {}
    for name in forward.__code__.co_names:
        function = forward.__globals__.get(name)
        if inspect.isfunction(function) and function.__module__ == forward.__module__:
            written = inspect.unwrap(function)
            if written is not function:
                plain[name] = written
    return with_functions(forward, plain) if plain else None


@contextmanager
def reference_functions(model: nn.Module) -> Iterator[None]:
    """Context manager in which a model's modules do not call kernels of other packages, because these kernels need a
    GPU."""
    replaced = []
    for module in model.modules():
        own = not type(module).__module__.startswith("torch.")
        forward = reference_forward(type(module)) if own else None  # type: ignore[arg-type]
        if forward is not None and "forward" not in module.__dict__:
            object.__setattr__(module, "forward", MethodType(forward, module))
            replaced.append(module)
    try:
        yield
    finally:
        for module in replaced:
            module.__dict__.pop("forward", None)
