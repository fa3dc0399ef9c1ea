"""Vision-language models in stock transformers, one sample at a time: what a pack is compared with."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from padfree.batch import PackedBatch
from padfree.cp import shard
from padfree.model import attach, hidden_states, lm_head_of
from padfree.sample import Sample
from padfree.tools.check.image_inputs import image_inputs


def stock_inputs(model: PreTrainedModel, sample: Sample) -> dict[str, Any]:
    """The arguments with which a user of transformers calls the model for one sample, as its processor returns them."""
    inputs: dict[str, Any] = {"input_ids": torch.from_numpy(sample.tokens.copy())[None], "use_cache": False}
    return {**inputs, **image_inputs(model, sample)}


def stock_logits(model: PreTrainedModel, sample: Sample) -> Tensor:
    """[n, V]."""
    logits: Tensor = model(**stock_inputs(model, sample)).logits[0]
    return logits


def stock_score(model: PreTrainedModel, sample: Sample) -> Tensor:
    """The score of a sample by a model with a scalar head."""
    score: Tensor = model(**stock_inputs(model, sample)).logits[0, 0]
    return score


def sum_of_losses(logits: Tensor, labels: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits, labels, reduction="sum")


def gradients(model: PreTrainedModel, loss: Tensor) -> dict[str, Tensor]:
    """The loss, and the gradient of every parameter; of a parameter without a gradient: zeros."""
    model.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    found = {"loss": loss.detach()}
    for name, parameter in model.named_parameters():
        found[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return found


def one_at_a_time(model: PreTrainedModel, samples: Sequence[Sample]) -> dict[str, Tensor]:
    """Loss and gradients of a copy of the model with transformers' own attention."""
    stock = copy.deepcopy(model)
    stock.set_attn_implementation("sdpa")
    total = torch.zeros((), dtype=next(model.parameters()).dtype)
    for sample in samples:
        tokens, scored = torch.from_numpy(sample.tokens), torch.from_numpy(sample.scored)
        total = total + sum_of_losses(stock_logits(stock, sample)[:-1][scored[1:]], tokens[scored])
    return gradients(stock, total)


def packed(model: PreTrainedModel, batch: PackedBatch) -> dict[str, Tensor]:
    """Loss and gradients of a copy of the model with padfree's attention."""
    model = attach(copy.deepcopy(model))
    local = shard(batch)
    return gradients(model, sum_of_losses(lm_head_of(model).logits(hidden_states(model, local)), local.labels))


@contextmanager
def without_rounding() -> Iterator[None]:
    """Norms, rotations and routers always compute in float32. Here float64 stays float64, in both ways."""
    to_float, to = torch.Tensor.float, torch.Tensor.to

    def float_unless_wider(tensor: Tensor, **options: Any) -> Tensor:
        return tensor if tensor.dtype == torch.float64 else to_float(tensor, **options)

    def to_unless_wider(tensor: Tensor, *args: Any, **options: Any) -> Tensor:
        if tensor.dtype == torch.float64:
            args = tuple(each for each in args if each is not torch.float32)
            options = {name: each for name, each in options.items() if each is not torch.float32}
        return to(tensor, *args, **options)

    def softmax_unless_wider(tensor: Tensor, dim: int, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
        return torch.softmax(tensor, dim, dtype=None if tensor.dtype == torch.float64 else dtype)

    as_type = torch.Tensor.type

    def type_unless_wider(tensor: Tensor, *args: Any, **options: Any) -> Any:
        narrows = tensor.dtype == torch.float64 and args == (torch.float32,)
        return tensor if narrows else as_type(tensor, *args, **options)

    sample_grid = torch.nn.functional.grid_sample

    def grid_sample_wide(tensor: Tensor, grid: Tensor, **options: Any) -> Tensor:
        return sample_grid(tensor, grid.to(tensor.dtype), **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "grid_sample", grid_sample_wide)
        patch.setattr(torch.Tensor, "type", type_unless_wider)
        patch.setattr(torch.nn.functional, "softmax", softmax_unless_wider)
        patch.setattr(torch.Tensor, "float", float_unless_wider)
        patch.setattr(torch.Tensor, "to", to_unless_wider)
        yield
