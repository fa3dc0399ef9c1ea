"""Numbers of a run that must be finite: losses, metrics, log-probabilities of other models, and weights.

loss, gradient norm            every step                   NonFiniteError, before the update (`Engine`)
log-probabilities, values,     whenever they are scored     the model, the sample and the token (`Scorer`)
rewards of a model
metrics of an evaluation       before they are reported     the metric (`make_evaluation`)
weights                        when they are loaded         the file and the tensor (`load_model`)
                               before they are saved        the tensor (`Trainer.save`, `export_model`)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn

from padfree.batch import Sample
from padfree.errors import UserError
from padfree.model.load import nonfinite_weight


class NonFiniteError(RuntimeError):
    """A number that is not finite, and what is to blame. The weights are those before the step."""

    def __init__(self, message: str, samples: Sequence[Sample] = ()) -> None:
        super().__init__(message)
        self.samples = samples


def weights_line(model: nn.Module, step: int) -> str:
    """The end of a line about a loss that is not finite: what is known of the cause. Every rank calls it."""
    name = _nonfinite_on_any_rank(model)
    if name is not None:
        return f"; the cause is in the weights: {name} is not finite; go on from a checkpoint with a lower optimizer.lr"
    if step == 0:
        return "; the weights are finite and as they were loaded, so that optimizer.lr is not the cause"
    return ", or lower optimizer.lr"


def check_weights(model: nn.Module, step: int, name: str = "the model", lr: str = "optimizer.lr") -> None:
    """Refuse to keep weights that an update has left not finite. Every rank calls it."""
    found = _nonfinite_on_any_rank(model)
    if found is not None:
        raise NonFiniteError(
            f"step {step}: the updates have made {found} of {name} not finite, so that nothing is saved; go on "
            f"from the checkpoint before with a lower {lr}"
        )


def _nonfinite_on_any_rank(model: nn.Module) -> str | None:
    found: list[str | None] = [nonfinite_weight(model)]
    if dist.is_initialized() and dist.get_world_size() > 1:
        own, found = found[0], [None] * dist.get_world_size()
        dist.all_gather_object(found, own)
    return next((name for name in found if name is not None), None)


def check_scores(scores: Sequence[NDArray[np.floating]], samples: Sequence[Sample], *, setting: str, what: str) -> None:
    """Refuse numbers [n] of a model's that are not finite; the same on every rank."""
    for index, (values, sample) in enumerate(zip(scores, samples, strict=True)):
        finite = np.isfinite(values)
        if not finite.all():
            token = int(np.argmin(finite))
            name = f"number {index}" if sample.uid is None else sample.uid
            raise UserError(
                setting,
                f"the {what} of token {token} of sample {name} is {values[token]}",
                "look at the weights of the model, and at the sample",
            )


def check_metrics(found: Mapping[str, float], step: int) -> None:
    """Refuse to report metrics of an evaluation that are not finite."""
    wrong = [name for name, value in found.items() if not math.isfinite(value)]
    if wrong:
        more = f", and so are {len(wrong) - 1} more" if len(wrong) > 1 else ""
        after = f" after {step} steps" if step else ""
        raise UserError(
            "eval",
            f"{wrong[0]} is {found[wrong[0]]}{after}{more}",
            "look at the weights of the model, and at the rows of eval.path",
        )
