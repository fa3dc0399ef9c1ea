"""A module's own forward with other functions in the place of those that it calls by name.

    modeling_x.py       def forward(self, hidden_states, ...):      y = causal_conv1d_fn(x, ...)
    with_functions      the same code, in which causal_conv1d_fn is a function of ours

transformers writes what mixes tokens as functions of a few well-known names, behind each of which it puts the kernel of
a package, if that is installed. The copy shares the code of the forward and nothing else: transformers' own module is
not touched, and neither is any other model.
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
    """The forward as it is written, without the decorators around it."""
    function = inspect.unwrap(module_class.forward)
    assert isinstance(function, FunctionType)
    return function


def with_functions(forward: FunctionType, functions: Mapping[str, Function]) -> FunctionType:
    """A copy of `forward` to which these names mean these functions."""
    # Without a name of its module: the compiler would look the functions up there, and find the others.
    names = {name: value for name, value in forward.__globals__.items() if name != "__name__"}
    copy = FunctionType(
        forward.__code__, {**names, **functions}, forward.__name__, forward.__defaults__, forward.__closure__
    )
    copy.__kwdefaults__ = forward.__kwdefaults__
    return copy


@cache
def reference_forward(module_class: type[nn.Module]) -> Function | None:
    """The forward with transformers' plain PyTorch functions where it would call kernels; None if it calls none."""
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
    """Run the model's modules without kernels of other packages, which do not know the CPU."""
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
