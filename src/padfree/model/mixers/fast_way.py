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
from padfree.model.mixers.kinds import KINDS
from padfree.model.mixers.mixer import Mixer, decay_of, qualified_name
from padfree.model.mixers.own_forward import Function, code_of, reference_forward, with_functions
from padfree.warning import PadfreeWarning

LENGTHS = (67, 1, 130, 64, 3)
"""Of the trial: around the chunks of 64 that kernels compute."""

NOISE_FACTOR = 4.0
NOISE_FLOOR = 2e-5
"""Where the row is in float32, both are right to the last digits."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FastWay:
    """What a mixer of one class calls instead of its forward."""

    forward: Function
    boundaries: str  # the argument that takes the Segments
    dtypes: tuple[torch.dtype, ...]  # of hidden states; others go segment by segment


def fast_way(module_class: type[nn.Module], mixer: Mixer, device: torch.device) -> FastWay | str:
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
    return FastWay(forward=with_functions(forward, called), boundaries=boundaries, dtypes=kind.dtypes(device))


def settled_way(module: nn.Module, mixer: Mixer, config: PreTrainedConfig, device: torch.device) -> FastWay | None:
    """The fast way if it was found right here; None, and a warning on a GPU, if there is no such way."""
    way = fast_way(type(module), mixer, device)
    if isinstance(way, str):
        reason: str | None = way
    else:
        found = way

        def call(tried: nn.Module, values: Tensor, segments: Segments) -> Tensor:
            return _first(found.forward(tried, **{mixer.hidden: values[None], found.boundaries: segments}))[0]

        reason = _trial("fast", call, module, mixer, config, device, way.dtypes[0])
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

    return _trial("own", call, module, mixer, config, device, torch.bfloat16) is None


_SAID: set[str] = set()


def _say_once(message: str) -> None:
    if message not in _SAID:
        _SAID.add(message)
        warnings.warn(message, PadfreeWarning, stacklevel=2)


_TRIALS: dict[tuple[str, str, str, torch.device], str | None] = {}


def _trial(
    name: str,
    call: Function,  # (module, hidden states [T, D], Segments) -> [T, D]
    module: nn.Module,
    mixer: Mixer,
    config: PreTrainedConfig,
    device: torch.device,
    dtype: torch.dtype,
) -> str | None:
    """Why `call` is not right on this machine; None if it is. Once a process for each name, class, config, device."""
    key = (name, qualified_name(type(module)), repr(config), device)
    if key not in _TRIALS:
        devices = [device] if device.type == "cuda" else []
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        try:
            with (
                torch.random.fork_rng(devices=devices),
                torch.inference_mode(False),
                torch.enable_grad(),
                torch.autocast(device.type, enabled=False),
            ):
                _TRIALS[key] = _difference(call, module, mixer, config, device, dtype)
        except Exception as error:  # a kernel that does not compile here, a class that is made in another way
            _TRIALS[key] = f"the trial failed ({type(error).__name__}: {next(iter(str(error).splitlines()), '')})"
        finally:
            torch.set_default_dtype(default)
    return _TRIALS[key]


def _difference(
    call: Function,
    module: nn.Module,
    mixer: Mixer,
    config: PreTrainedConfig,
    device: torch.device,
    dtype: torch.dtype,
) -> str | None:
    module_class: Any = type(module)
    torch.manual_seed(0)
    with device:
        exact: nn.Module = module_class(config, int(getattr(module, "layer_idx", 0))).train()
    for name, constant in module.named_buffers(recurse=False):  # some of which a model makes after its layers
        exact.register_buffer(name, constant.detach().clone())
    with torch.no_grad():
        for name, parameter in exact.named_parameters():  # some classes leave them as the memory was
            if parameter.ndim >= 2:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
            else:
                parameter.normal_(mean=1.0 if "norm" in name else 0.0, std=0.2)
        if (decay := decay_of(exact)) is not None:  # a slow one: states that last show a leak
            decay.uniform_(math.log(0.02), math.log(0.05))
    segments = Segments.from_lengths(LENGTHS, device=device)
    hidden = torch.randn(segments.num_tokens, config.hidden_size, device=device)
    weights = torch.randn(segments.num_tokens, config.hidden_size, device=device)
    rounded = deepcopy(exact).to(dtype)
    for parameter, lower in zip(exact.parameters(), rounded.parameters(), strict=True):
        parameter.data.copy_(lower.data)
    hidden, weights = (values.to(dtype).float() for values in (hidden, weights))
    plain = reference_forward(module_class) or module_class.forward

    def by_plain(tried: nn.Module, values: Tensor, segments: Segments) -> Tensor:
        return _by_segment(plain, tried, mixer, values)

    expected = _outcome(by_plain, exact, hidden, weights, segments)
    noisy = _outcome(by_plain, rounded, hidden.to(dtype), weights.to(dtype), segments)
    found = _outcome(call, rounded, hidden.to(dtype), weights.to(dtype), segments)
    for name, value in expected.items():
        noise, difference = _apart(noisy[name], value), _apart(found[name], value)
        if not difference <= NOISE_FACTOR * noise + NOISE_FLOOR:
            return f"on this machine its {name} differs by {difference:.1e}, and rounding alone by {noise:.1e}"
    return None


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
