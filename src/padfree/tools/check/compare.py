"""Compute the differences between packed training and the reference (plain transformers code), and define tolerances.

- log-probabilities: the largest difference of any token, in nats.
- loss: the absolute difference.
- normaliser: the relative difference between the loss and the mean negative log-probability of the trained tokens.
  Packed training gives both values.
- gradients: the largest relative difference of a parameter's gradient, for each part of the model (e.g. a layer).

A non-finite number counts as an infinite difference.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from padfree.model.structure import layers_of
from padfree.model.vision.families import family_of
from padfree.sample import Sample

FLOOR = 0.01
"""The divisor of a relative gradient difference is the largest element of the parameter's reference gradient, but at
least this fraction of the largest element of all reference gradients in the same part of the model (e.g. a layer).
"""

FACTOR = 4.0
"""A difference from the reference that is above the tolerance still passes if it is at most this many times the noise
(the rounding error of plain transformers code).
"""


class Gap(NamedTuple):
    """The largest difference between two results, and the token or the parameter that has it."""

    difference: float
    where: str


class Extent(NamedTuple):
    """The largest difference between a parameter's gradient and its reference, and the reference's largest entry."""

    difference: float
    size: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Tolerance:
    """For each quantity (such as the loss), the difference up to which a comparison always passes.

    A larger difference passes only if the noise (the rounding error of plain transformers code) is large, too.
    """

    logprobs: float
    loss: float
    normaliser: float
    gradients: float


TOLERANCES = {
    torch.float32: Tolerance(logprobs=2e-5, loss=1e-5, normaliser=1e-5, gradients=1e-4),
    torch.bfloat16: Tolerance(logprobs=3e-2, loss=5e-3, normaliser=1e-4, gradients=3e-2),
}
"""Tolerances by dtype of the check. The tolerance `normaliser` is low even in bfloat16, because loss weights and their
sums are always in float32.
"""


def logprob_gap(actual: Sequence[NDArray[Any]], expected: Sequence[NDArray[Any]], samples: Sequence[Sample]) -> Gap:
    """Return the largest difference of a token's log-probability between two results, and the token that has it.

    A result has one array [n] for each sample of n tokens.
    """
    largest = Gap(0.0, "")
    for index, (ours, theirs, sample) in enumerate(zip(actual, expected, samples, strict=True)):
        if not len(sample):
            continue
        differences = np.abs(ours.astype(np.float64) - theirs)
        differences[~np.isfinite(differences)] = math.inf
        token = int(differences.argmax())
        if differences[token] > largest.difference:
            name = f"sample {index}" if sample.uid is None else f"sample {sample.uid}"
            largest = Gap(float(differences[token]), f"token {token} of {name}")
    return largest


def loss_gap(actual: float, expected: float) -> Gap:
    difference = abs(actual - expected)
    return Gap(difference if math.isfinite(difference) else math.inf, f"{actual:.6f}, HF {expected:.6f}")


def normaliser_gap(loss: float, logprobs: Sequence[NDArray[Any]], samples: Sequence[Sample]) -> Gap:
    """Compare the loss with the negative mean log-probability of the trained tokens. Return the relative difference.

    Loss and mean are equal if the loss weights are normalised correctly.
    """
    trained = [sample.mask & (np.arange(len(sample)) > 0) for sample in samples]
    total = sum(float(values[mask].astype(np.float64).sum()) for values, mask in zip(logprobs, trained, strict=True))
    mean = -total / sum(int(mask.sum()) for mask in trained)
    difference = abs(loss - mean) / max(abs(mean), 1e-6)
    return Gap(difference if math.isfinite(difference) else math.inf, f"{loss:.6f}, mean {mean:.6f}")


def extent(actual: Tensor | None, expected: Tensor | None) -> Extent:
    """Compare two gradients of one parameter. None counts as a zero gradient."""
    if actual is None or expected is None:
        only = actual if expected is None else expected
        size = 0.0 if only is None or not only.numel() else float(only.detach().abs().max())
        return Extent(size, 0.0 if expected is None else size)
    if not actual.numel():
        return Extent(0.0, 0.0)
    expected = expected.to(actual.device)
    return Extent(float((actual.detach() - expected).abs().max()), float(expected.abs().max()))


def gradient_gaps(extents: Mapping[str, Extent], parts: Mapping[str, str]) -> dict[str, Gap]:
    """Return the largest relative gradient difference in each part of the model, e.g. in each layer.

    Both arguments have parameter names as keys. `extents`: the gradient's largest difference from the reference, and
    the reference's largest element. `parts`: the part of the model.
    """
    largest: dict[str, float] = {}
    for name, part in parts.items():
        largest[part] = max(largest.get(part, 0.0), extents[name].size)
    gaps: dict[str, Gap] = {}
    for name, part in parts.items():
        difference, size = extents[name]
        scale = max(size, FLOOR * largest[part])
        quotient = 0.0 if difference == 0 else difference / scale if scale else math.inf
        if not math.isfinite(quotient):
            quotient = math.inf
        if part not in gaps or quotient > gaps[part].difference:
            gaps[part] = Gap(quotient, name)
    return gaps


def parts_of(model: PreTrainedModel) -> dict[str, str]:
    """Return the part of the model to which each parameter belongs: embeddings, layer 0, layer 1, ..., norm, head.

    A vision-language model also has the parts tower and projector.
    """
    layers = layers_of(model)
    part_of_vision = _vision_parts(model)
    prefix = next(name for name, module in model.named_modules() if module is layers)
    embeddings, head = (
        None if module is None else module.weight
        for module in (model.get_input_embeddings(), model.get_output_embeddings())  # type: ignore[no-untyped-call]
    )
    parts: dict[str, str] = {}
    for name, parameter in model.named_parameters():
        if name in part_of_vision:
            parts[name] = part_of_vision[name]
        elif name.startswith(f"{prefix}."):
            parts[name] = f"layer {name.removeprefix(f'{prefix}.').partition('.')[0]}"
        elif parameter is embeddings:
            parts[name] = "embeddings and head" if head is embeddings else "embeddings"
        elif parameter is head:
            parts[name] = "head"
        else:
            parts[name] = name.split(".")[-2]
    return parts


def _vision_parts(model: PreTrainedModel) -> dict[str, str]:
    """Map the name of each parameter in the tower or the projector of a vision-language model to "tower" or
    "projector".
    """
    family = family_of(model)
    if family is None:
        return {}
    base = model.base_model
    prefix = next(name for name, module in model.named_modules() if module is base)

    def inside(name: str, paths: Sequence[str]) -> bool:
        return any(name == (full := f"{prefix}.{path}") or name.startswith(f"{full}.") for path in paths)

    return {
        name: "projector" if inside(name, family.projector) else "tower"
        for name, _ in model.named_parameters()
        if inside(name, family.encoders)
    }
