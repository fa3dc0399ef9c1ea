"""Compute training losses by plain transformers code, with which `padfree check` compares packed training.

    nll       cross entropy, mean over trained tokens (`one_at_a_time`)
    dpo       sigmoid loss of preference pairs, mean over pairs
    kto       loss of single answers with labels, mean over answers
    distill   forward KL from a teacher, mean over trained tokens
    reward    Bradley-Terry loss of preference pairs, mean over pairs
    value     clipped squared error of values, mean over trained tokens

For reward and value, the model has a scalar head. Inputs that a training run computes before an update, such as
log-probabilities of the reference model, are random numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import PreTrainedModel

from padfree.config.loss_settings import KTOSettings
from padfree.losses import DPOSettings, ValueSettings
from padfree.model.named_tensors import local_part, local_region, named_tensors
from padfree.model.outputs import base_of
from padfree.model.scalar_head import pad_token_of
from padfree.sample import Sample
from padfree.tools.check.image_inputs import has_images, image_inputs
from padfree.tools.check.one_at_a_time import (
    CheckOutcome,
    eager_attention,
    one_at_a_time,
    padded_pairs,
    summed_gradients,
)
from padfree.tools.check.padded import padded_rows

CheckedLoss = Literal["nll", "dpo", "kto", "distill", "reward", "value"]
OF_PAIRS = ("dpo", "reward")
SCALAR = ("reward", "value")
REFERENCED = ("dpo", "kto")
DPO, KTO, VALUE = DPOSettings(), KTOSettings(desirable_weight=1.5), ValueSettings(clip=0.2)
POINT = 0.3
"""The value of the reference point z₀ in checks of the KTO loss (see `padfree.tasks.kto`)."""


def in_pairs(samples: Sequence[Sample]) -> list[Sample]:
    """Return consecutive samples as pairs: the first of two becomes the chosen answer, the second the rejected one.

    If the number of samples is odd, the last one is dropped.
    """
    return [
        replace(sample, group=index // 2, reward=float(1 - index % 2), uid=index)
        for index, sample in enumerate(samples[: len(samples) // 2 * 2])
    ]


def prepared(loss: CheckedLoss, samples: Sequence[Sample], own: Sequence[Any] | None) -> list[Sample]:
    """Return the samples with the inputs that the loss needs besides the tokens. These inputs contain random numbers.

    `own`: the checked model's log-probabilities, [n] for each sample. DPO and KTO use them, plus random noise, as
    log-probabilities of the reference model.
    """
    found = []
    for index, sample in enumerate(samples):
        rng = np.random.default_rng(index)
        drawn = rng.normal(size=(2, len(sample))).astype(np.float32)
        if loss in REFERENCED:
            assert own is not None
            noise = drawn[0] / np.sqrt(max(sample.num_labels, 1)).astype(np.float32)
            sample = replace(sample, ref_logprobs=np.asarray(own[index]) + 2.0 * noise)
            if loss == "kto":
                label = float(index % 2) if sample.reward is None else sample.reward
                sample = replace(sample, reward=label, terms={"kl": POINT})
        elif loss == "value":
            sample = replace(sample, returns=drawn[0], values=0.2 * drawn[1])
        found.append(sample)
    return found


@torch.no_grad()
def make_teacher(model: PreTrainedModel) -> None:
    """Change a copy of the checked model in place, so that it can serve as a teacher whose outputs differ from those of
    the checked model.

    The weights of norms and all biases are multiplied by random numbers from 0.5 to 1.5.
    """
    for number, (_, tensor) in enumerate(sorted(named_tensors(model).items())):
        if tensor.ndim == 1 and tensor.is_floating_point():
            factors = 0.5 + torch.rand(tensor.shape, generator=torch.Generator().manual_seed(number))
            local: Tensor = local_part(tensor)
            local.mul_(factors[local_region(tensor)].to(local))


def plain_loss(
    model: PreTrainedModel,
    samples: Sequence[Sample],
    loss: CheckedLoss,
    *,
    teacher: PreTrainedModel | None = None,
    padded: bool = False,
) -> CheckOutcome:
    """Compute the loss and its gradients by plain transformers code, and return them.

    `padded`: run two samples per call of the model, or one if samples have images, with HF's eager attention.
    """
    if loss == "nll":
        return padded_pairs(model, samples) if padded else one_at_a_time(model, samples)
    models = [one for one in (model, teacher) if one is not None]
    together = padded or loss in OF_PAIRS
    units = [list(samples[i : i + 2]) for i in range(0, len(samples), 2)] if together else [[one] for one in samples]
    count = sum(sample.num_labels for sample in samples)
    if loss in REFERENCED or loss in OF_PAIRS:
        count = len(samples) // (2 if loss in OF_PAIRS else 1)
    total = 0.0
    with summed_gradients(model) as gradients, eager_attention(*models) if padded else nullcontext():
        for unit in units:
            outputs = _outputs(model, unit, loss, padded)
            taught: list[Tensor] = []
            if teacher is not None:
                with torch.no_grad():
                    taught = _outputs(teacher, unit, loss, padded)
            value = _unit_loss(loss, unit, outputs, taught) / count
            if value.requires_grad:
                value.backward()  # type: ignore[no-untyped-call]
            total += float(value.detach().double())
    return CheckOutcome(logprobs=[], loss=total, gradients={name: each.cpu() for name, each in gradients.items()})


def _outputs(model: PreTrainedModel, samples: Sequence[Sample], loss: CheckedLoss, padded: bool) -> list[Tensor]:
    """Return the model's output for each sample.

    For n tokens, this is logits [n, V], values [n] (for the loss "value") or one reward [1] (for the loss "reward").
    """
    calls = [list(samples)] if padded and not has_images(samples) else [[sample] for sample in samples]
    found: list[Tensor] = []
    for call in calls:
        batch = padded_rows(call, model.device)
        mask = batch.attention_mask if len(call) > 1 else None
        inputs: dict[str, Any] = {"input_ids": batch.input_ids, "attention_mask": mask, "use_cache": False}
        if len(call) == 1:
            inputs |= image_inputs(model, call[0])
        if loss == "reward" and not padded:
            found.append(model(**inputs).logits[:, 0].float())
            continue
        if loss in SCALAR:
            hidden = base_of(model)(**inputs).last_hidden_state
            values = model.get_submodule("score")(hidden).float()[..., 0]
        else:
            values = model(**inputs).logits.float()
        found += [of_sample[: len(sample)] for of_sample, sample in zip(values, call, strict=True)]
    if loss == "reward" and padded:
        pad = pad_token_of(model)
        found = [values[_end(sample, pad)][None] for values, sample in zip(found, samples, strict=True)]
    return found


def _end(sample: Sample, pad_token: int | None) -> int:
    """Return the index of the last token of a sample, not counting padding tokens at its end."""
    real = [index for index, token in enumerate(sample.tokens.tolist()) if token != pad_token]
    return real[-1] if real else 0


def _unit_loss(
    loss: CheckedLoss, unit: Sequence[Sample], outputs: Sequence[Tensor], taught: Sequence[Tensor]
) -> Tensor:
    """Return the summed loss of the samples in `unit`: over pairs ("dpo", "reward"), answers ("kto") or trained tokens.

    `outputs`: the model's output for each sample. `taught`: the teacher's output for each sample, for "distill".
    """
    if loss == "reward":
        (chosen,), (rejected,) = outputs
        return -logsigmoid(chosen - rejected)
    if loss == "dpo":
        chosen, rejected = (_moved(sample, logits) for sample, logits in zip(unit, outputs, strict=True))
        return -logsigmoid(DPO.beta * (chosen - rejected))
    total = outputs[0].new_zeros(())
    for index, sample in enumerate(unit):
        trained = _trained_indices(sample, outputs[index])
        if loss == "kto":
            distance = KTO.beta * (_moved(sample, outputs[index]) - POINT)
            weight, sign = (KTO.desirable_weight, 1.0) if sample.reward else (KTO.undesirable_weight, -1.0)
            total = total + weight * (1.0 - torch.sigmoid(sign * distance))
        elif loss == "value":
            values = outputs[index][trained - 1]
            returns, old = (
                torch.from_numpy(np.asarray(getattr(sample, name))).to(values)[trained]
                for name in ("returns", "values")
            )
            assert VALUE.clip is not None
            clipped = old + (values - old).clamp(-VALUE.clip, VALUE.clip)
            total = total + 0.5 * torch.maximum((values - returns).square(), (clipped - returns).square()).sum()
        else:
            student, teacher = (each[index][trained - 1].log_softmax(-1) for each in (outputs, taught))
            total = total + (teacher.exp() * (teacher - student)).sum()
    return total


def _moved(sample: Sample, logits: Tensor) -> Tensor:
    """Return the sum, over the trained tokens, of the log-probability minus the reference log-probability."""
    trained = _trained_indices(sample, logits)
    tokens = torch.from_numpy(np.asarray(sample.tokens, np.int64)).to(logits.device)
    reference = torch.from_numpy(np.asarray(sample.ref_logprobs)).to(logits)
    return (logits.log_softmax(-1)[trained - 1, tokens[trained]] - reference[trained]).sum()


def _trained_indices(sample: Sample, values: Tensor) -> Tensor:
    return torch.from_numpy(np.flatnonzero(sample.scored)).to(values.device)
