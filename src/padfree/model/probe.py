"""Test whether an architecture can be trained on packs (several samples in one sequence).

A small copy of the model (few layers, random weights) runs on the CPU. The logits and gradients of random samples must
be equal in three cases:

1. one sample at a time, with transformers' eager attention
2. in one pack, with padfree's attention and shuffled tokens
3. like 2, but with the last sample first and with other tokens in one sample, whose results are not compared

The copy must contain every module class of the real model. `stock_leak` tests transformers' own attention instead.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as hf_logging

from padfree.batch import AttnContext, pack_inputs
from padfree.errors import shown_error
from padfree.model.interface import NAME, attention, mark_chunked_layers
from padfree.model.mixers import Mixer, find_mixers, install
from padfree.model.mixers.own_forward import reference_functions
from padfree.model.outputs import base_of, described_head
from padfree.model.shrink import VOCABULARY, shrink
from padfree.segments import Segments

PROBE = f"{NAME}_probe"
LENGTHS_PROBE = f"{NAME}_lengths_probe"
MASKED = ("eager", "sdpa", "flex_attention")
"""The attention implementations of transformers that take a mask. transformers creates the mask from position ids."""

LENGTHS = (13, 1, 9, 9)
PAD = 3
TOLERANCE = 1e-4
"""The largest difference that passes the test, relative to the largest entry. Differences by rounding are below 1e-5;
differences by a leak between samples are above 1e-2.
"""

MAX_PARAMETERS = 5_000_000
"""The maximum number of parameters of the small model that is tested in place of the real one. If it has more, `shrink`
has not reduced all sizes in the config.
"""

NUM_LAYERS = (2, 4, 8)


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The result of testing on a small copy whether an architecture can be trained on packs.

    - `leak`: why the architecture cannot be packed, or None if it can.
    - `head`: why an `LmHead` does not reproduce the logits, or None if it does.
    """

    leak: str | None
    head: str | None
    mixers: tuple[Mixer, ...] = ()  # to be installed with padfree's attention


def probe(model: PreTrainedModel) -> Verdict:
    """Test on a small copy of the model (few layers, random weights) whether its architecture can be trained on packs.

    `model` itself is not run and can be on any device.
    """
    return _verdict(model, "attached", _compare)


def stock_leak(model: PreTrainedModel) -> str | None:
    """Return the reason why this model cannot be trained on packs with transformers' attention, or None if it can."""
    implementation = str(model.config._attn_implementation)
    if implementation in MASKED:
        # flex attention needs a compiler, so eager is tested instead. The same code creates the masks of both.
        used = "sdpa" if implementation == "sdpa" else "eager"
        return _verdict(model, used, partial(_compare_stock, implementation=used)).leak
    if "flash" in implementation:
        return _verdict(model, "flash", partial(_compare_stock, implementation=LENGTHS_PROBE)).leak
    return f"attention implementation {implementation!r} is not supported (use {', '.join(MASKED)} or flash attention)"


def small_copy(model: PreTrainedModel) -> PreTrainedModel | None:
    """Return a small copy of the model as the probe uses it: large random weights, on the CPU, in evaluation mode.

    Returns None if the copy cannot be built. Call this function inside `undisturbed`.
    """
    required = frozenset(_module_classes(model))
    for num_layers in NUM_LAYERS:
        try:
            copy: PreTrainedModel = type(model)(shrink(model.config, num_layers))
        except Exception:  # config classes raise all kinds of errors
            return None
        if required <= _module_classes(copy):
            mark_chunked_layers(copy)
            _randomise(copy)
            copy.train(False)
            return copy
    return None


Compare = Callable[[PreTrainedModel], Verdict]


def _verdict(model: PreTrainedModel, how: str, compare: Compare) -> Verdict:
    """Run the test `compare` on a small copy of the model, and return the verdict of the test.

    The copy contains every module class of the model. The verdict is cached under a key that contains `how`, a name for
    `compare`.
    """
    with undisturbed():
        required = frozenset(_module_classes(model))
        verdict = _refusal("padfree could not build a small copy of it for the test")
        for num_layers in NUM_LAYERS:
            try:
                small = shrink(model.config, num_layers)
            except Exception as error:  # config classes raise all kinds of errors
                return _refusal(f"padfree cannot shrink the config for a small copy ({shown_error(error)})")
            key = (type(model), json.dumps(small.to_dict(), sort_keys=True, default=str), required, how)
            if key not in _VERDICTS:
                _VERDICTS[key] = _probe(type(model), small, required, compare)
            verdict, missing = _VERDICTS[key]
            if not missing:
                break
        return verdict


_VERDICTS: dict[tuple[type[PreTrainedModel], str, frozenset[str], str], tuple[Verdict, bool]] = {}


def _probe(
    model_class: type[PreTrainedModel], config: PreTrainedConfig, required: frozenset[str], compare: Compare
) -> tuple[Verdict, bool]:
    """Build a small model from a shrunken config, and run the test `compare` on it.

    Returns the verdict, and whether to retry with more layers. More layers can help if the small model lacks a module
    class in `required` or cannot be built.
    """
    try:
        with torch.device("meta"):
            size = sum(parameter.numel() for parameter in model_class(deepcopy(config)).parameters())
        if size > MAX_PARAMETERS:
            return _refusal(f"the small copy of it for the test still has {size} parameters"), False
        copy = model_class(config).train()
        mark_chunked_layers(copy)
    except Exception as error:  # any error of the model's code means that the architecture does not pass
        return _refusal(f"the small copy of it for the test cannot be built ({shown_error(error)})"), True
    missing = sorted(required - _module_classes(copy))
    if missing:
        return _refusal(f"no small copy of it contains the module class {missing[0]}"), True
    try:
        with reference_functions(copy):
            return compare(copy), False
    except Exception as error:
        return _refusal(shown_error(error)), False


def _refusal(reason: str) -> Verdict:
    return Verdict(leak=reason, head=reason)


def _module_classes(model: nn.Module) -> set[str]:
    """Return the class names of a model's modules, without linear layers, adapters, and torch's own modules.

    Convolutions are included.
    """
    classes = {type(module) for module in model.modules()}
    convolution = nn.modules.conv._ConvNd
    return {
        cls.__name__
        for cls in classes
        if issubclass(cls, convolution)
        or not (cls.__module__.startswith(("torch.", "peft.", "padfree.")) or issubclass(cls, nn.Linear))
    }


@contextmanager
def undisturbed() -> Iterator[None]:
    """Context manager: its block runs on the CPU in float32, with gradients, and without log messages or warnings.

    At the end of the block, the caller's random state, default device and gradient mode are restored.
    """
    verbosity, dtype = hf_logging.get_verbosity(), torch.get_default_dtype()
    elsewhere = torch.get_default_device().type != "cpu"
    hf_logging.set_verbosity(logging.ERROR)
    torch.set_default_dtype(torch.float32)
    try:
        with (
            warnings.catch_warnings(),
            torch.random.fork_rng(devices=[]),
            torch.device("cpu") if elsewhere else nullcontext(),  # it slows down every torch call a little
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast("cpu", enabled=False),
        ):
            warnings.simplefilter("ignore")
            torch.default_generator.manual_seed(0)  # torch.manual_seed would reseed the GPUs as well
            yield
    finally:
        torch.set_default_dtype(dtype)
        hf_logging.set_verbosity(verbosity)


class _Samples:
    """Random samples, the pack that holds them, and the expected results: the outputs and gradients of the model if it
    runs on one sample at a time.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.segments = Segments.from_lengths(LENGTHS, pad_length=PAD)
        self.input_ids = torch.randint(0, VOCABULARY, (self.segments.num_tokens,))
        self.input_ids[0] = 0
        self.position_ids = torch.cat([torch.arange(length) for length in self.segments.lengths])
        samples = torch.split(self.input_ids[: sum(LENGTHS)], list(LENGTHS))
        model.set_attn_implementation("eager")
        single = [_first(model(input_ids=sample[None], use_cache=False)) for sample in samples]
        self.outputs = torch.cat(single)
        self.weights = torch.randn_like(self.outputs)
        later = slice(LENGTHS[0], None)  # the tokens of all samples but the first
        self.later_gradients = _gradients(model, self.outputs[later], self.weights[later], keep=True)
        self.gradients = _gradients(model, self.outputs, self.weights)

    def refusal(self, model: PreTrainedModel, packed: Tensor) -> Verdict | None:
        """Test whether a pack gives the same outputs and gradients as its samples, run one at a time.

        `packed` holds the outputs of the pack. Returns None if nothing differs, otherwise a verdict with the reason.
        """
        gradients = _gradients(model, packed, self.weights)
        leak = _difference("outputs", packed, self.outputs)
        for name, gradient in gradients.items():
            leak = leak or _difference(f"the gradient of {name}", gradient, self.gradients[name])
        return _refusal(f"a pack gives other results than one sample at a time: {leak}") if leak else None


def _compare(model: PreTrainedModel) -> Verdict:
    """Test whether a model with padfree's attention gives the same outputs and gradients for a pack as for single
    samples.

    If it is unclear which modules mix tokens without attention (the mixers), the test is repeated with each possible
    choice of mixers until one passes.
    """
    _randomise(model)
    samples = _Samples(model)
    choices = find_mixers(model)
    if not choices:
        return _compare_with(model, samples, ())
    reasons = []
    for mixers in choices:
        try:
            verdict = _compare_with(deepcopy(model), samples, mixers)
        except Exception as error:  # the next choice can still work
            verdict = _refusal(shown_error(error))
        if verdict.leak is None:
            return verdict
        reasons.append(verdict.leak)
    first = choices[0][0]
    if first.kind != "other":
        return _refusal(reasons[0])
    return _refusal(
        f"{first.class_name.split('.')[-1]} mixes tokens without transformers' AttentionInterface, and running it on "
        f"whole segments is not correct either ({reasons[0]})"
    )


def _compare_with(model: PreTrainedModel, samples: _Samples, mixers: tuple[Mixer, ...]) -> Verdict:
    # Shuffled as in context parallelism: only attention and mixers know the original order.
    order = torch.randperm(samples.segments.num_tokens)
    calls = _register_permuted(order)
    install(model, mixers, order)
    model.set_attn_implementation(PROBE)
    inputs = _inputs(samples.input_ids, samples.position_ids, samples.segments, order)
    packed = _in_order(_first(model(**inputs)), order)
    if not mixers and len(calls) < model.config.num_hidden_layers:
        return _refusal("the attention of the model does not use transformers' AttentionInterface")
    if refusal := samples.refusal(model, packed) or _state_refusal(model, samples, order):
        return refusal
    head, base = described_head(model), base_of(model)
    if head is None or base is model:
        return Verdict(leak=None, head="the model has no head on top of a base model", mixers=mixers)
    hidden = _in_order(_first(base(**inputs)), order)
    difference = _difference("its logits and head(hidden states)", head.logits(hidden), samples.outputs)
    return Verdict(leak=None, head=difference, mixers=mixers)


def _inputs(input_ids: Tensor, position_ids: Tensor, segments: Segments, order: Tensor) -> dict[str, Any]:
    """Return the model inputs for a shuffled pack: index i of this pack holds token order[i]."""
    return {
        "input_ids": input_ids[order][None],
        "position_ids": position_ids[order][None],
        "attention_mask": None,
        "use_cache": False,
        "attn_context": AttnContext(segments=segments),
    }


def _state_refusal(model: PreTrainedModel, samples: _Samples, order: Tensor) -> Verdict | None:
    """Return a negative verdict if a sample depends on the samples before it, else None.

    In the tested pack, the last sample comes first, and the first sample has other tokens. The unchanged samples must
    give the same results as before.
    """
    pieces = torch.split(samples.input_ids, samples.segments.lengths.tolist())
    changed = (pieces[0] + torch.randint(1, VOCABULARY, pieces[0].shape)) % VOCABULARY
    last = len(LENGTHS) - 1
    sequence = [last, 0, *range(1, last)]
    moved = [changed if sample == 0 else pieces[sample] for sample in sequence]
    segments = Segments.from_lengths([LENGTHS[sample] for sample in sequence], pad_length=PAD)
    position_ids = torch.cat([torch.arange(length) for length in segments.lengths])
    inputs = _inputs(torch.cat([*moved, pieces[-1]]), position_ids, segments, order)
    packed = torch.split(_in_order(_first(model(**inputs)), order), [LENGTHS[sample] for sample in sequence])
    unchanged = [sample for sample in range(last + 1) if sample != 0]
    outputs = torch.cat([packed[sequence.index(sample)] for sample in unchanged])
    weights = samples.weights[LENGTHS[0] :]
    leak = _difference("outputs", outputs, samples.outputs[LENGTHS[0] :])
    gradients = _gradients(model, outputs, weights)
    for name, gradient in gradients.items():
        leak = leak or _difference(f"the gradient of {name}", gradient, samples.later_gradients[name])
    return _refusal(f"a sample depends on the samples before it: {leak}") if leak else None


def _compare_stock(model: PreTrainedModel, implementation: str) -> Verdict:
    """Test whether a model with transformers' attention gives the same results for a pack as for single samples.

    To test flash attention without a GPU, pass `LENGTHS_PROBE` as `implementation`: `_by_lengths` then runs instead.
    """
    _randomise(model)
    samples = _Samples(model)
    AttentionInterface.register(LENGTHS_PROBE, _by_lengths)
    model.set_attn_implementation(implementation)
    inputs = pack_inputs(samples.input_ids, samples.position_ids, samples.segments)
    packed = _first(model(**inputs))[: sum(LENGTHS)]
    return samples.refusal(model, packed) or Verdict(leak=None, head="not tested")


def _by_lengths(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention in place of flash attention, which needs a GPU.

    Attends inside the segments that `cu_seq_lens_q` describes, or over the whole pack if `cu_seq_lens_q` is None.
    """
    del cu_seq_lens_k, max_length_q, max_length_k  # cu_seq_lens_q holds the same information
    lengths = torch.tensor([query.shape[2]]) if cu_seq_lens_q is None else torch.diff(cu_seq_lens_q)
    context = AttnContext(segments=Segments.from_lengths(lengths.tolist()))
    return attention(module, query, key, value, attention_mask, attn_context=context, **kwargs)


def _register_permuted(order: Tensor) -> list[str]:
    """Register the attention function `PROBE` for a shuffled pack, in which index i holds token order[i].

    `PROBE` computes attention in the original order. Returns a list to which each call of `PROBE` appends the class
    name of the layer.
    """
    calls: list[str] = []
    inverse = torch.argsort(order)

    def permuted(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        calls.append(type(module).__name__)
        q, k, v = (states[:, :, inverse] for states in (query, key, value))
        output, _ = attention(module, q, k, v, attention_mask, layer_positions=inverse, **kwargs)
        return output[:, order], None

    AttentionInterface.register(PROBE, permuted)
    return calls


def _in_order(values: Tensor, order: Tensor) -> Tensor:
    """Restore the token order of a shuffled pack, and drop the padding tokens at the end.

    `values` [T, ...] has one row per token of the shuffled pack. Row i belongs to token order[i] of the original pack.
    """
    return values[torch.argsort(order)][: sum(LENGTHS)]


def _randomise(model: nn.Module) -> None:
    """Set random weights that keep activations near 1 and make attention uneven."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)


def _first(output: object) -> Tensor:
    """Return the logits [T, ...] of a model with a head, or the last hidden states [T, ...] of a model without
    a head.
    """
    values = getattr(output, "logits", None)
    values = getattr(output, "last_hidden_state", None) if values is None else values
    if not isinstance(values, Tensor) or values.ndim != 3:
        raise TypeError("the model returns neither logits nor last hidden states of shape [1, T, ...]")
    return values[0]


def _gradients(model: nn.Module, output: Tensor, weights: Tensor, *, keep: bool = False) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    (output * weights).sum().backward(retain_graph=keep)  # type: ignore[no-untyped-call]
    return {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in model.named_parameters()
    }


def _difference(name: str, actual: Tensor, expected: Tensor) -> str | None:
    if actual.shape != expected.shape:
        return f"{name} have shapes {tuple(actual.shape)} and {tuple(expected.shape)}"
    difference, size = float((actual - expected).abs().max()), float(expected.abs().max())
    if difference <= TOLERANCE * max(size, 0.1):  # False for NaN
        return None
    return f"{name} differ by up to {difference:.1e} (largest value {size:.1e})"
