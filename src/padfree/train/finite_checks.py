"""Check the numbers of a run that must be finite: losses, metrics, scores of other models, and weights.

what                           when it is checked           how an error is reported
loss, gradient norm            every step                   NonFiniteError, before the update (`Engine`)
log-probabilities, values,     whenever they are computed   the model, the sample and the token (`Scorer`)
rewards of a reward model
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

from padfree.errors import UserError
from padfree.model.nonfinite_tensors import nonfinite_weight
from padfree.sample import Sample


class NonFiniteError(RuntimeError):
    """Raised if the loss or gradient of a step is NaN or infinite. The step has changed no weights.

    `samples`: the samples of this step.
    """

    def __init__(self, message: str, samples: Sequence[Sample] = ()) -> None:
        super().__init__(message)
        self.samples = samples


def nonfinite_cause(model: nn.Module, step: int) -> str:
    """Return the end of an error message about a non-finite loss: whether weights or data cause it.

    All ranks must call this.
    """
    name = _nonfinite_on_any_rank(model)
    if name is not None:
        return f"; the cause is in the weights: {name} is not finite; resume a checkpoint with a lower optimizer.lr"
    if step == 0:
        return "; the weights are finite and unchanged since they were loaded, so optimizer.lr is not the cause"
    return ", or lower optimizer.lr"


def check_weights(model: nn.Module, step: int, name: str = "the model", lr: str = "optimizer.lr") -> None:
    """Raise a `NonFiniteError` if updates have made a weight NaN or infinite. All ranks must call this before a save.

    `name`: what the error message calls the model. `lr`: the name of the setting for the model's learning rate.
    """
    found = _nonfinite_on_any_rank(model)
    if found is not None:
        raise NonFiniteError(
            f"step {step}: the updates have made the weight {found} of {name} non-finite, so nothing is saved; resume "
            f"the previous checkpoint with a lower {lr}"
        )


def _nonfinite_on_any_rank(model: nn.Module) -> str | None:
    found: list[str | None] = [nonfinite_weight(model)]
    if dist.is_initialized() and dist.get_world_size() > 1:
        own, found = found[0], [None] * dist.get_world_size()
        dist.all_gather_object(found, own)
    return next((name for name in found if name is not None), None)


def check_scores(scores: Sequence[NDArray[np.floating]], samples: Sequence[Sample], *, setting: str, what: str) -> None:
    """Raise a `UserError` if a score is NaN or infinite. All ranks must pass the same scores.

    `scores[i]`: a model's scores [n] of the n tokens of sample i, or its score [] of the whole sample. `setting`: the
    setting that names the model. `what`: the kind of score, e.g. "log-probability".
    """
    for index, (values, sample) in enumerate(zip(scores, samples, strict=True)):
        finite = np.isfinite(values)
        if not finite.all():
            token = int(np.argmin(finite))
            of_token = f" of token {token}" if values.ndim else ""
            name = f"at index {index}" if sample.uid is None else sample.uid
            raise UserError(
                setting,
                f"the {what}{of_token} of sample {name} is {values.flat[token]}, which is not finite",
                "check this sample, and the weights of the model",
            )


def check_metrics(found: Mapping[str, float], step: int) -> None:
    """Raise a `UserError` if a metric of the evaluation after `step` steps is not finite."""
    wrong = [name for name, value in found.items() if not math.isfinite(value)]
    if wrong:
        more = f" ({len(wrong)} metrics are not finite)" if len(wrong) > 1 else ""
        after = f" after {step} steps" if step else ""
        raise UserError(
            "eval",
            f"the metric {wrong[0]} must be finite, but is {found[wrong[0]]}{after}{more}",
            "check the rows of eval.path, and the weights of the model",
        )
