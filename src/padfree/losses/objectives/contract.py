"""What an objective is given and what it returns.

    tokens.logprobs       [N]  log π of each token, with gradient         ObjectiveInputs
    tokens.old_logprobs   [N]  log π_old
    tokens.advantages     [N]
    -> losses             [N]  of each token, before its weight           ObjectiveOutput
       log_ratio, clipped [N]  for the metrics
       statistics         [N]  each, more metrics

An objective is a function of these tokens. It knows nothing of samples, of devices, or of how tokens are averaged. A
decorator says what it needs:

    @objective(elementwise=True)
    def clip(tokens): ...

    elementwise             a token's loss depends on its own entries alone. The fused head then calls the function for
                            some tokens at a time, while their logits exist. Without it the function is given all tokens
                            of the row, with 0 where there is no label.
    needs_no_old_logprobs   `old_logprobs` may be None: a run does not compute them for this objective alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from torch import Tensor

from padfree.errors import UserError
from padfree.losses.segments import Reduce, no_reduce, segment_mean, spread
from padfree.losses.types import LossInputs

Function = TypeVar("Function", bound=Callable[..., object])

ATTRIBUTE = "padfree_objective"
"""Where a function carries its traits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Traits:
    """What an objective states about itself."""

    elementwise: bool = False
    needs_no_old_logprobs: bool = False


def objective(*, elementwise: bool = False, needs_no_old_logprobs: bool = False) -> Callable[[Function], Function]:
    """Decorate the function of an objective with what it states about itself."""

    def decorated(function: Function) -> Function:
        setattr(function, ATTRIBUTE, Traits(elementwise=elementwise, needs_no_old_logprobs=needs_no_old_logprobs))
        return function

    return decorated


def traits_of(function: object) -> Traits:
    """What the decorator said, or the defaults, which are right for any function."""
    found: Traits = getattr(function, ATTRIBUTE, Traits())
    return found


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ObjectiveInputs:
    """Tokens as an objective sees them: [N] each, float32 (float64 where the log-probabilities are)."""

    logprobs: Tensor  # under the policy being trained: the one input with a gradient
    advantages: Tensor
    weights: Tensor  # what each loss is multiplied by afterwards, the global normaliser included
    old_logprobs: Tensor | None  # under the policy that `loss.old_policy` names; None only for `needs_no_old_logprobs`
    rollout_logprobs: Tensor | None = None  # what the sampler reported, where the run has it
    ref_logprobs: Tensor | None = None  # of the reference, where the run has it
    entropy: Tensor | None = None  # with gradient, where `loss.entropy_coefficient` is not 0
    row: LossInputs | None = None  # the row that these are all tokens of; None for an elementwise objective
    reduce: Reduce = no_reduce

    def sequence_mean(self, values: Tensor) -> Tensor:
        """[N] on every token the mean of `values` [N] over the scored tokens of its whole sequence, without gradient.

        Also where a sequence is divided over context ranks.
        """
        row = self.row
        if row is None:
            raise UserError(
                "objective", "elementwise, but it asks for the mean over a sequence", "leave elementwise=True out"
            )
        mean = segment_mean(values.detach(), row.mask, row.sample_index, row.num_samples, self.reduce)
        return spread(mean, row.sample_index).to(values)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ObjectiveOutput:
    """The losses of tokens, and what metrics are made of: the same fields and names in every call."""

    losses: Tensor  # [N]
    log_ratio: Tensor | None = None  # [N] shown as `ratio` and `approx_kl`
    clipped: Tensor | None = None  # [N] bool, shown as `clip_fraction`
    statistics: Mapping[str, Tensor] = field(default_factory=dict)  # [N] each, shown as means over scored tokens
