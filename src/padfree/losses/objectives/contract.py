"""The input and the output of an objective, the function that computes the policy loss of each token.

    @objective(elementwise=True)
    def reinforce(tokens: ObjectiveInputs) -> ObjectiveOutput:
        return ObjectiveOutput(losses=-tokens.advantages * tokens.logprobs)

An objective sees only tokens: it does not depend on samples, devices or averaging. The decorator `objective` declares
its traits (properties).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from torch import Tensor

from padfree.errors import UserError
from padfree.losses.segment_sums import Reduce, no_reduce, segment_mean, spread
from padfree.losses.types import LossInputs

Function = TypeVar("Function", bound=Callable[..., object])

ATTRIBUTE = "padfree_objective"
"""The attribute of an objective's function in which the decorator `objective` stores its arguments, as `Traits`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Traits:
    """The properties that an objective (a function for the policy loss of each token) declares about itself."""

    # An elementwise objective is called for some tokens at a time, while their logits exist. Any other objective is
    # called for all tokens of the pack, with 0 for tokens without a label.
    elementwise: bool = False
    needs_no_old_logprobs: bool = False  # a run need not compute old log-probabilities
    zero_without_advantage: bool = False  # a run leaves samples without advantages out of its updates


def objective(
    *, elementwise: bool = False, needs_no_old_logprobs: bool = False, zero_without_advantage: bool = False
) -> Callable[[Function], Function]:
    """Return a decorator that declares the traits (properties) of an objective.

    `elementwise`: a token's loss depends only on the token's own values. `needs_no_old_logprobs`: `old_logprobs` may be
    None. `zero_without_advantage`: samples whose advantages are all 0 have losses and gradients of exactly 0, and do
    not change other losses.
    """

    def decorated(function: Function) -> Function:
        traits = Traits(
            elementwise=elementwise,
            needs_no_old_logprobs=needs_no_old_logprobs,
            zero_without_advantage=zero_without_advantage,
        )
        setattr(function, ATTRIBUTE, traits)
        return function

    return decorated


def traits_of(function: object) -> Traits:
    """Return the traits that an objective declares. All are False for a function without the decorator `objective`."""
    found: Traits = getattr(function, ATTRIBUTE, Traits())
    return found


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ObjectiveInputs:
    """The N tokens for which an objective computes losses. Each field is [N], in float32 or float64."""

    logprobs: Tensor  # log-probabilities under the policy being trained, with gradient
    advantages: Tensor
    weights: Tensor  # padfree multiplies the losses by these weights, which include the global normaliser
    old_logprobs: Tensor | None  # log-probabilities under `loss.old_policy`; None only if `needs_no_old_logprobs`
    rollout_logprobs: Tensor | None = None  # log-probabilities that the sampler reported, if available
    ref_logprobs: Tensor | None = None  # log-probabilities under the reference model, if available
    entropy: Tensor | None = None  # entropy at each token, with gradient; None if `loss.entropy_coefficient` is 0
    pack: LossInputs | None = None  # the pack that these tokens come from; None for an elementwise objective
    reduce: Reduce = no_reduce

    def sequence_mean(self, values: Tensor) -> Tensor:
        """Return, for each of N tokens, the mean of `values` over the scored tokens of the token's sequence, without
        gradient.
        """
        pack = self.pack
        if pack is None:
            raise UserError(
                "objective",
                "is declared elementwise, but calls sequence_mean, which needs whole sequences",
                "remove elementwise=True",
            )
        mean = segment_mean(values.detach(), pack.mask, pack.sample_index, pack.num_samples, self.reduce)
        return spread(mean, pack.sample_index).to(values)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ObjectiveOutput:
    """What an objective returns: the losses of the tokens, and values for metrics. Every call must set the same
    fields.
    """

    losses: Tensor  # [N]
    log_ratio: Tensor | None = None  # [N] shown as `ratio` and `approx_kl`
    clipped: Tensor | None = None  # [N] bool, shown as `clip_fraction`
    # further values, [N] each; the metrics show their means over scored tokens
    statistics: Mapping[str, Tensor] = field(default_factory=dict)
