"""Run a mixer (a recurrence or convolution) on all segments (samples) of a pack at once.

The mixer runs its own forward. In this forward, functions that respect segment boundaries replace functions of
transformers.

padfree first tests the mixer on this machine, with random weights and the real sizes. Outputs and gradients must equal
those of plain PyTorch code in float32, up to rounding.

Without such functions, or if the test fails, the mixer runs on one segment at a time, which is slower.
"""

from __future__ import annotations

import inspect
import math
import warnings
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from padfree.model.mixers.by_segment import by_segment
from padfree.model.mixers.mixer import Mixer, decay_of, qualified_name
from padfree.model.mixers.own_forward import Function, code_of, reference_forward, with_functions
from padfree.model.mixers.registry import KINDS
from padfree.segments import Segments
from padfree.warning import PadfreeWarning

LENGTHS = (67, 1, 130, 64, 3)
"""The segment lengths of the test. They are chosen around the kernels' chunk size of 64."""

NOISE_FACTOR = 4.0
NOISE_FLOOR = 2e-5
"""The allowed difference is NOISE_FACTOR * noise + NOISE_FLOOR, where the noise is the difference between the plain
PyTorch code in the tested dtype and in float32. If the tested dtype is float32, the noise is almost 0.
"""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class VarlenKernel:
    """A forward that runs one class of mixers (modules that mix tokens without attention) on all segments (samples) of
    a pack at once.
    """

    forward: Function
    boundaries: str  # the argument that takes the Segments
    dtypes: tuple[torch.dtype, ...]  # supported dtypes of hidden states; others run segment by segment


def varlen_kernel(module_class: type[nn.Module], mixer: Mixer, device: torch.device) -> VarlenKernel | str:
    """Return a forward that runs a mixer class on all segments of a pack at once, or the reason why there is none.

    `tested_kernel` tests the forward.
    """
    kind = KINDS[mixer.kind]
    if kind.functions is None:
        return f"there is no kernel for mixers of the kind {mixer.kind}"
    functions = kind.functions(device)
    if isinstance(functions, str):
        return functions
    if mixer.token_arguments:
        return f"the forward of the mixer takes {', '.join(mixer.token_arguments)}, which the kernels do not support"
    forward = code_of(module_class)
    called = {name: function for name, function in functions.items() if name in forward.__code__.co_names}
    parameters = inspect.signature(forward).parameters
    others = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    boundaries = "segments" if others else "seq_idx"
    if not called or not (others or boundaries in parameters):
        return "the forward of the mixer calls no function that padfree can replace"
    return VarlenKernel(forward=with_functions(forward, called), boundaries=boundaries, dtypes=kind.dtypes(device))


def tested_kernel(
    module: nn.Module, mixer: Mixer, config: PreTrainedConfig, device: torch.device
) -> VarlenKernel | None:
    """Return the forward that runs the mixer `module` on all segments of a pack at once.

    Returns None if there is no such forward, or if the forward fails its test on this machine. On a GPU, padfree then
    warns once.
    """
    way = varlen_kernel(type(module), mixer, device)
    if isinstance(way, str):
        reason: str | None = way
    else:
        found = way

        def call(tried: nn.Module, values: Tensor, segments: Segments) -> Tensor:
            return _first(found.forward(tried, **{mixer.hidden: values[None], found.boundaries: segments}))[0]

        reason = _Trial("fast", call, module, mixer, config, device, way.dtypes[0]).reason()
        if reason is None:
            return way
    if device.type == "cuda":
        _say_once(f"{type(module).__name__} runs one sample at a time, which is slow: {reason}")
    return None


def own_kernels_are_right(module: nn.Module, mixer: Mixer, config: PreTrainedConfig, device: torch.device) -> bool:
    """Return whether a mixer gives correct results with the kernels that transformers chooses, on one segment at a
    time.

    On a CPU, or if the mixer has no plain PyTorch code to compare with, returns False without a test.
    """
    if device.type == "cpu" or reference_forward(type(module)) is None:  # type: ignore[arg-type]
        return False

    def call(tried: nn.Module, values: Tensor, segments: Segments) -> Tensor:
        return _by_segment(type(tried).forward, tried, mixer, values)

    return _Trial("own", call, module, mixer, config, device, torch.bfloat16).reason() is None


_SAID: set[str] = set()


def _say_once(message: str) -> None:
    if message not in _SAID:
        _SAID.add(message)
        warnings.warn(message, PadfreeWarning, stacklevel=2)


_TRIALS: dict[tuple[str, str, str, torch.device], str | None] = {}


@dataclass(frozen=True, slots=True, eq=False)
class _Trial:
    """A test of one implementation of a mixer (a module that mixes tokens without attention). The test runs on a module
    of the same class and sizes with random weights.
    """

    name: str  # of the implementation
    call: Function  # a function of (module, hidden states [T, D], Segments) that returns [T, D]
    module: nn.Module
    mixer: Mixer
    config: PreTrainedConfig
    device: torch.device
    dtype: torch.dtype

    def reason(self) -> str | None:
        """Return why the tested implementation of a mixer is wrong, or None if it passes the test.

        The test runs once per process for each implementation, module class, config and device.
        """
        key = (self.name, qualified_name(type(self.module)), repr(self.config), self.device)
        if key not in _TRIALS:
            devices = [self.device] if self.device.type == "cuda" else []
            default = torch.get_default_dtype()
            torch.set_default_dtype(torch.float32)
            try:
                with (
                    torch.random.fork_rng(devices=devices),
                    torch.inference_mode(False),
                    torch.enable_grad(),
                    torch.autocast(self.device.type, enabled=False),
                ):
                    _TRIALS[key] = self._difference()
            except Exception as error:  # for example, a kernel does not compile, or a class has another constructor
                _TRIALS[key] = f"the test failed ({type(error).__name__}: {next(iter(str(error).splitlines()), '')})"
            finally:
                torch.set_default_dtype(default)
        return _TRIALS[key]

    def _difference(self) -> str | None:
        exact = self._copy()
        segments = Segments.from_lengths(LENGTHS, device=self.device)
        hidden = torch.randn(segments.num_tokens, self.config.hidden_size, device=self.device)
        weights = torch.randn(segments.num_tokens, self.config.hidden_size, device=self.device)
        rounded = deepcopy(exact).to(self.dtype)
        for parameter, lower in zip(exact.parameters(), rounded.parameters(), strict=True):
            parameter.data.copy_(lower.data)
        low_hidden, low_weights = hidden.to(self.dtype), weights.to(self.dtype)
        module_class: Any = type(self.module)
        plain = reference_forward(module_class) or module_class.forward

        def by_plain(tried: nn.Module, values: Tensor, segments: Segments) -> Tensor:
            return _by_segment(plain, tried, self.mixer, values)

        expected = _outcome(by_plain, exact, low_hidden.float(), low_weights.float(), segments)
        noisy = _outcome(by_plain, rounded, low_hidden, low_weights, segments)
        found = _outcome(self.call, rounded, low_hidden, low_weights, segments)
        for name, value in expected.items():
            noise, difference = _apart(noisy[name], value), _apart(found[name], value)
            if not difference <= NOISE_FACTOR * noise + NOISE_FLOOR:
                return f"on this machine its {name} differs by {difference:.1e}, but rounding explains only {noise:.1e}"
        return None

    def _copy(self) -> nn.Module:
        """Return a module of the same class and sizes as `self.module`, with random weights in float32."""
        module_class: Any = type(self.module)
        torch.manual_seed(0)
        with self.device:
            made: nn.Module = module_class(self.config, int(getattr(self.module, "layer_idx", 0))).train()
        # copy the buffers too, because models can set some after creating the layer
        for name, constant in self.module.named_buffers(recurse=False):
            made.register_buffer(name, constant.detach().clone())
        with torch.no_grad():
            for name, parameter in made.named_parameters():  # some classes do not initialise them
                if parameter.ndim >= 2:
                    parameter.normal_(std=parameter.shape[-1] ** -0.5)
                else:
                    parameter.normal_(mean=1.0 if "norm" in name else 0.0, std=0.2)
            # make the decay slow, so that a state that leaks between segments is visible
            if (decay := decay_of(made)) is not None:
                decay.uniform_(math.log(0.02), math.log(0.05))
        return made


def _by_segment(forward: Function, module: nn.Module, mixer: Mixer, values: Tensor) -> Tensor:
    return by_segment(lambda inputs: _first(forward(module, **{mixer.hidden: inputs[0]})), [values], LENGTHS)


def _first(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def _outcome(
    call: Function, module: nn.Module, hidden: Tensor, weights: Tensor, segments: Segments
) -> dict[str, Tensor]:
    """Run `call` forward on the input `hidden`, and backward with `weights` as the gradient of the output.

    Returns the output and all gradients by name, in float32.
    """
    module.zero_grad(set_to_none=True)
    hidden = hidden.detach().requires_grad_()
    output = call(module, hidden, segments)
    output.backward(weights)
    found = {"output": output.detach(), "gradient of its input": hidden.grad}
    for name, parameter in module.named_parameters():
        found[f"gradient of {name}"] = parameter.grad
    return {name: torch.zeros(()) if value is None else value.float() for name, value in found.items()}


def _apart(values: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference of two tensors, relative to the norm of `expected`.

    A norm is used so that a single entry near zero does not matter.
    """
    return float((values - expected).norm() / expected.norm().clamp(min=1e-6))
