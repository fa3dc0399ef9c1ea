"""Compute loss and gradients by plain transformers code, with which `padfree check` compares packed training.

- `one_at_a_time` runs one sample per call of the model. Its results are the reference, in float64 if possible
  (`exact.py`).
- `padded_pairs` runs padded batches of two samples in the dtype of the check. The difference between its results and
  the reference is the noise (the rounding error of a correct implementation).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from padfree.batch import IGNORE
from padfree.sample import Sample
from padfree.tools.check.image_inputs import has_images, image_inputs
from padfree.tools.check.padded import padded_rows


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CheckOutcome:
    """The log-probabilities, the loss and the gradients that plain transformers code computed for all samples."""

    logprobs: list[NDArray[np.float32]]  # [n] per sample; 0 for the first token
    loss: float  # mean over the trained tokens
    gradients: dict[str, Tensor]  # by parameter name, float32 or float64, on the CPU; only parameters with a gradient


def one_at_a_time(model: PreTrainedModel, samples: Sequence[Sample]) -> CheckOutcome:
    """Return loss and gradients of the samples, run one at a time with the attention that the model was loaded with."""
    return _outcome(model, [[index] for index in range(len(samples))], samples)


def padded_pairs(model: PreTrainedModel, samples: Sequence[Sample]) -> CheckOutcome:
    """Return loss and gradients of pairs of consecutive samples, the shorter one padded, with HF's eager attention.

    If any sample has images, one sample runs at a time.
    """
    size = 1 if has_images(samples) else 2
    with eager_attention(model):
        return _outcome(model, [list(range(len(samples)))[i : i + size] for i in range(0, len(samples), size)], samples)


@contextmanager
def eager_attention(*models: PreTrainedModel) -> Iterator[None]:
    """Context manager in which the models use HF's eager attention."""
    own = [str(model.config._attn_implementation) for model in models]
    for model in models:
        model.set_attn_implementation("eager")
    yield
    for model, implementation in zip(models, own, strict=True):
        model.set_attn_implementation(implementation)


@contextmanager
def summed_gradients(model: PreTrainedModel) -> Iterator[dict[str, Tensor]]:
    """Context manager that yields a dict, to which every backward pass adds the gradients of the parameters."""
    sums: dict[str, Tensor] = {}
    hooks = [
        parameter.register_post_accumulate_grad_hook(partial(_take, sums, name))  # type: ignore[no-untyped-call]
        for name, parameter in model.named_parameters()
    ]
    yield sums
    for hook in hooks:
        hook.remove()


def _outcome(model: PreTrainedModel, batches: Sequence[Sequence[int]], samples: Sequence[Sample]) -> CheckOutcome:
    count = sum(sample.num_labels for sample in samples)
    logprobs = [np.zeros(len(sample), dtype=np.float32) for sample in samples]
    loss = 0.0
    with summed_gradients(model) as gradients:
        for batch in batches:
            chosen = [index for index in batch if len(samples[index]) > 1]  # a single token predicts nothing
            if not chosen:
                continue
            input_ids, attention_mask, scored = padded_rows([samples[index] for index in chosen], model.device)
            inputs: dict[str, Any] = {"input_ids": input_ids, "use_cache": False}
            if len(chosen) > 1:
                inputs["attention_mask"] = attention_mask
            else:
                inputs |= image_inputs(model, samples[chosen[0]])
            logits = model(**inputs).logits[:, :-1].float()
            labels = input_ids[:, 1:].where(attention_mask[:, 1:].bool(), IGNORE)
            losses = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
            total = (losses * scored[:, 1:]).sum() / count
            total.backward()  # type: ignore[no-untyped-call]
            loss += float(total.detach().double())
            for row, index in zip((-losses.detach()).cpu().numpy(), chosen, strict=True):
                with np.errstate(over="ignore"):  # float64 to float32
                    logprobs[index][1:] = row[: len(samples[index]) - 1]
    return CheckOutcome(
        logprobs=logprobs, loss=loss, gradients={name: gradient.cpu() for name, gradient in gradients.items()}
    )


def _take(sums: dict[str, Tensor], name: str, parameter: nn.Parameter | Tensor) -> None:
    assert parameter.grad is not None
    gradient = parameter.grad.float()
    sums[name] = sums[name].add_(gradient) if name in sums else gradient
    parameter.grad = None
