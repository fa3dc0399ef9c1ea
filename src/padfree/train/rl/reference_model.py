"""The reference model of the KL term.

A `ModelReference` is a separate frozen model. If `reference.path` is `model.path` and the run trains LoRA adapters, an
`AdapterReference` is used: the policy with other adapters, without a second copy of the weights.

With `reference.refresh=2`, the policy is copied into the reference after every second rollout batch. Batches 3 and 4
then use the policy as it was after batch 2. Checkpoints store a refreshed reference, because no other file contains it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from padfree.errors import UserError
from padfree.model.export import whole_tensors
from padfree.model.lora import is_adapter
from padfree.model.named_tensors import local_part, local_region, named_tensors
from padfree.sample import Sample
from padfree.train.scorer import Scorer


class ReferenceModel(ABC):
    """Base class of the reference models for the KL term, which compute log-probabilities of samples.

    `every`: the number of rollout batches after which the policy's weights are copied into the reference again; None:
    never.
    """

    def __init__(self, scorer: Scorer, every: int | None = None) -> None:
        self.scorer, self.every = scorer, every
        self.batches = 0
        self.refreshed = False

    @abstractmethod
    def logprobs(self, samples: Sequence[Sample]) -> list[NDArray[np.float32]]:
        """Return the log-probabilities [n] of each sample of n tokens, the same on every rank."""

    @abstractmethod
    def refresh(self, model: PreTrainedModel) -> None:
        """Copy the current weights or adapters of `model`, the policy, into the reference. All ranks must call this."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the reference model. Loading a checkpoint writes into these tensors."""

    def after_batch(self, model: PreTrainedModel) -> None:
        """Count a finished rollout batch, and refresh the reference if it is due. `model`: the policy.

        Call this after the last update of a rollout batch, before a checkpoint is saved.
        """
        self.batches += 1
        if self.every is not None and self.batches % self.every == 0:
            self.refresh(model)

    def tensors_to_save(self) -> dict[str, Tensor]:
        """Return the reference's tensors for a checkpoint.

        Until the first refresh, the result is an empty dict, because a resumed run can make the initial tensors again.
        """
        return self.tensors() if self.refreshed else {}

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches, "refreshed": self.refreshed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the number of finished rollout batches, and whether the policy was ever copied into the reference.

        The checkpointer restores the tensors of the reference separately.
        """
        self.batches, self.refreshed = int(state["batches"]), bool(state["refreshed"])


class ModelReference(ReferenceModel):
    """A reference with its own weights: `scorer.model` is a separate model, and not the policy."""

    def logprobs(self, samples: Sequence[Sample]) -> list[NDArray[np.float32]]:
        return self.scorer.logprobs(samples)

    @torch.no_grad()
    def refresh(self, model: PreTrainedModel) -> None:
        self.check(model)
        own = self.tensors()
        for name, whole in whole_tensors(model):
            local_part(own[name]).copy_(whole[local_region(own[name])])
        self.refreshed = True

    def tensors(self) -> dict[str, Tensor]:
        return named_tensors(self.scorer.model)

    def check(self, model: PreTrainedModel) -> None:
        """Raise an error if the policy (`model`) and the reference have weights of different names or shapes."""
        check_same_tensors(self.scorer.model, model, self.every)


def check_same_tensors(reference: PreTrainedModel, trained: PreTrainedModel, every: int | None) -> None:
    """Raise a `UserError` unless policy and reference have weights of the same names and shapes, ignoring adapters.

    `every`: the value of `reference.refresh`, for the error message.
    """
    own, others = (
        {name: tuple(tensor.shape) for name, tensor in named_tensors(one).items() if not is_adapter(name)}
        for one in (reference, trained)
    )
    if own != others:
        name = min(name for name in own.keys() | others.keys() if own.get(name) != others.get(name))
        raise UserError(
            "reference.refresh",
            f"{every}, but {name} is {_shape(own.get(name))} in the reference and {_shape(others.get(name))} in the "
            "policy",
            "set reference.refresh=none, or set reference.path to the value of model.path",
        )


class AdapterReference(ReferenceModel):
    """A reference that shares the policy's base weights and has adapters of its own.

    Its adapters are 0, and thus have no effect, until a refresh copies the adapters of the policy into them.
    """

    def __init__(self, scorer: Scorer, every: int | None = None) -> None:
        super().__init__(scorer, every)
        self._own = {name: torch.zeros_like(tensor.detach()) for name, tensor in _adapters(scorer.model).items()}
        assert self._own, "without adapters the reference would be the policy itself"

    @torch.no_grad()
    def logprobs(self, samples: Sequence[Sample]) -> list[NDArray[np.float32]]:
        adapters = _adapters(self.scorer.model)
        trained = {name: local_part(tensor).clone() for name, tensor in adapters.items()}
        for name, tensor in adapters.items():
            local_part(tensor).copy_(local_part(self._own[name]))
        try:
            return self.scorer.logprobs(samples, replay=False)
        finally:
            for name, tensor in adapters.items():
                local_part(tensor).copy_(trained[name])

    @torch.no_grad()
    def refresh(self, model: PreTrainedModel) -> None:
        for name, tensor in _adapters(model).items():
            local_part(self._own[name]).copy_(local_part(tensor))
        self.refreshed = True

    def tensors(self) -> dict[str, Tensor]:
        return self._own


def _adapters(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in named_tensors(model).items() if is_adapter(name)}


def _shape(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else str(list(shape))
