"""Mixers on a whole packed row: their own forward, with functions that know where segments begin.

    per segment    [n, L, D] for each length L        right everywhere, slow
    fast           [1, T, D], Segments                the functions of the kind, in the place of transformers'

A kind names the functions that it has for a device. Whether they are right is tried once on the machine at hand: the
mixer with random weights and the sizes it has, forward and all gradients, against its plain PyTorch code on each
segment in float32. The difference may be a few times that of the plain code in the type of the row. Otherwise, or
where a package is missing, the mixer runs segment by segment, and the reason is said once. There, too, transformers
calls kernels of packages, which are tried in the same way: some versions refuse to compute gradients, or are wrong.
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

from padfree.batch import Segments
from padfree.model.mixers.by_segment import by_segment
from padfree.model.mixers.mixer import Mixer, decay_of, qualified_name
from padfree.model.mixers.own_forward import Function, code_of, reference_forward, with_functions
from padfree.model.mixers.registry import KINDS
from padfree.warning import PadfreeWarning

LENGTHS = (67, 1, 130, 64, 3)
"""Of the trial: around the chunks of 64 that kernels compute."""

NOISE_FACTOR = 4.0
NOISE_FLOOR = 2e-5
"""Where the row is in float32, both are right to the last digits."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class VarlenKernel:
    """What a mixer of one class calls instead of its forward."""

    forward: Function
    boundaries: str  # the argument that takes the Segments
    dtypes: tuple[torch.dtype, ...]  # of hidden states; others go segment by segment


def varlen_kernel(module_class: type[nn.Module], mixer: Mixer, device: torch.device) -> VarlenKernel | str:
    """The fast way of this class on such a device, not yet tried; or the reason why there is none."""
    kind = KINDS[mixer.kind]
    if kind.functions is None:
        return f"there is none for mixers of the kind {mixer.kind}"
    functions = kind.functions(device)
    if isinstance(functions, str):
        return functions
    if mixer.token_arguments:
        return f"it takes {', '.join(mixer.token_arguments)}"
    forward = code_of(module_class)
    called = {name: function for name, function in functions.items() if name in forward.__code__.co_names}
    parameters = inspect.signature(forward).parameters
    others = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    boundaries = "segments" if others else "seq_idx"
    if not called or not (others or boundaries in parameters):
        return "its forward calls none of the functions that are known"
    return VarlenKernel(forward=with_functions(forward, called), boundaries=boundaries, dtypes=kind.dtypes(device))


def settled_way(module: nn.Module, mixer: Mixer, config: PreTrainedConfig, device: torch.device) -> VarlenKernel | None:
    """The fast way if it was found right here; None, and a warning on a GPU, if there is no such way."""
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
    """Whether the module's own forward may call the kernels of packages that transformers finds, segment by segment."""
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
    """A way to compute a mixer, tried on a copy of it with random weights."""

    name: str  # of the way
    call: Function  # (module, hidden states [T, D], Segments) -> [T, D]
    module: nn.Module
    mixer: Mixer
    config: PreTrainedConfig
    device: torch.device
    dtype: torch.dtype

    def reason(self) -> str | None:
        """Why it is not right on this machine; None if it is. Once a process for each name, class, config, device."""
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
            except Exception as error:  # a kernel that does not compile here, a class that is made in another way
                _TRIALS[key] = f"the trial failed ({type(error).__name__}: {next(iter(str(error).splitlines()), '')})"
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
                return f"on this machine its {name} differs by {difference:.1e}, and rounding alone by {noise:.1e}"
        return None

    def _copy(self) -> nn.Module:
        """A module of the same class and sizes with random weights, in float32."""
        module_class: Any = type(self.module)
        torch.manual_seed(0)
        with self.device:
            made: nn.Module = module_class(self.config, int(getattr(self.module, "layer_idx", 0))).train()
        for name, constant in self.module.named_buffers(recurse=False):  # some of which a model makes after its layers
            made.register_buffer(name, constant.detach().clone())
        with torch.no_grad():
            for name, parameter in made.named_parameters():  # some classes leave them as the memory was
                if parameter.ndim >= 2:
                    parameter.normal_(std=parameter.shape[-1] ** -0.5)
                else:
                    parameter.normal_(mean=1.0 if "norm" in name else 0.0, std=0.2)
            if (decay := decay_of(made)) is not None:  # a slow one: states that last show a leak
                decay.uniform_(math.log(0.02), math.log(0.05))
        return made


def _by_segment(forward: Function, module: nn.Module, mixer: Mixer, values: Tensor) -> Tensor:
    return by_segment(lambda rows: _first(forward(module, **{mixer.hidden: rows[0]})), [values], LENGTHS)


def _first(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def _outcome(
    call: Function, module: nn.Module, hidden: Tensor, weights: Tensor, segments: Segments
) -> dict[str, Tensor]:
    """Output and gradients, in float32."""
    module.zero_grad(set_to_none=True)
    hidden = hidden.detach().requires_grad_()
    output = call(module, hidden, segments)
    output.backward(weights)
    found = {"output": output.detach(), "gradient of its input": hidden.grad}
    for name, parameter in module.named_parameters():
        found[f"gradient of {name}"] = parameter.grad
    return {name: torch.zeros(()) if value is None else value.float() for name, value in found.items()}


def _apart(values: Tensor, expected: Tensor) -> float:
    """Relative to the size of all, so that one entry near zero says nothing."""
    return float((values - expected).norm() / expected.norm().clamp(min=1e-6))
