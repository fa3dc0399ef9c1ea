"""The model that the KL term compares with.

    ModelReference      a model of its own, not trained           reference.path
    AdapterReference    the trained model, with other adapters    the same, where it is model.path and lora.rank is set:
                                                                  no second copy of the weights

    rollout batch   1   2   3   4   5          with reference.refresh = 2
    reference       r   r   p2  p2  p4         r: what it began as; p2: the trained model as it was after batch 2

A reference that has been refreshed is the trained model of an earlier moment, which is in no file. So it belongs into
the checkpoint from then on (`saved`), and so does the number of batches (`state_dict`).

With `reference.offload` the weights of a `ModelReference` are on the CPU (FSDP2's offloading), and on the device while
they compute. A run on the CPU has them there anyway.
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

from padfree.batch import Sample
from padfree.errors import UserError
from padfree.model.export import whole_tensors
from padfree.model.load import local_part, local_region, named_tensors
from padfree.model.lora import is_adapter
from padfree.train.scorer import Scorer


class ReferenceModel(ABC):
    """Scores samples; after every `every` batches it becomes what the trained model is then. None: never."""

    def __init__(self, scorer: Scorer, every: int | None = None) -> None:
        self.scorer, self.every = scorer, every
        self.batches = 0
        self.refreshed = False

    @abstractmethod
    def logprobs(self, samples: Sequence[Sample]) -> list[NDArray[np.float32]]:
        """[n] for each sample, on every rank, as `Scorer.logprobs` gives them."""

    @abstractmethod
    def refresh(self, model: PreTrainedModel) -> None:
        """Become what `model`, the trained one, is now. Every rank calls it."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """What makes this reference another one, for a checkpoint to fill."""

    def after_batch(self, model: PreTrainedModel) -> None:
        """To be called when all updates with a rollout batch are done, before a checkpoint is saved."""
        self.batches += 1
        if self.every is not None and self.batches % self.every == 0:
            self.refresh(model)

    def saved(self) -> dict[str, Tensor]:
        """What a checkpoint must hold of it: nothing, as long as it is what it began as."""
        return self.tensors() if self.refreshed else {}

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches, "refreshed": self.refreshed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The tensors come with the checkpoint."""
        self.batches, self.refreshed = int(state["batches"]), bool(state["refreshed"])


class ModelReference(ReferenceModel):
    """The scorer's own model."""

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
        """Refuse to take the weights of a model that has not the same ones."""
        check_same_tensors(self.scorer.model, model, self.every)


def check_same_tensors(reference: PreTrainedModel, trained: PreTrainedModel, every: int | None) -> None:
    """Refuse a reference that could not take the weights of the trained model, adapters aside."""
    own, others = (
        {name: tuple(tensor.shape) for name, tensor in named_tensors(one).items() if not is_adapter(name)}
        for one in (reference, trained)
    )
    if own != others:
        name = min(name for name in own.keys() | others.keys() if own.get(name) != others.get(name))
        raise UserError(
            "reference.refresh",
            f"{every}, but {name} is {_shape(own.get(name))} in the reference and {_shape(others.get(name))} in the "
            "trained model",
            "set reference.refresh=none, or reference.path to model.path",
        )


class AdapterReference(ReferenceModel):
    """The trained model with adapters that do nothing, or, once refreshed, with those of an earlier moment."""

    def __init__(self, scorer: Scorer, every: int | None = None) -> None:
        super().__init__(scorer, every)
        self._own = {name: torch.zeros_like(tensor.detach()) for name, tensor in _adapters(scorer.model).items()}
        assert self._own, "without adapters the reference would be the trained model"

    @torch.no_grad()
    def logprobs(self, samples: Sequence[Sample]) -> list[NDArray[np.float32]]:
        adapters = _adapters(self.scorer.model)
        trained = {name: local_part(tensor).clone() for name, tensor in adapters.items()}
        for name, tensor in adapters.items():
            local_part(tensor).copy_(local_part(self._own[name]))
        try:
            return self.scorer.logprobs(samples)
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
