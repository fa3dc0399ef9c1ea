"""Losses that are computed together with the head (the output projection), for some tokens at a time.

`head.fused_loss` calls `token_loss` for each chunk of labelled tokens, and gets their weighted losses. The loss must be
elementwise: the loss of a token must not depend on the log-probability or entropy of another token.

For losses that are not elementwise, such as GSPO, call `head.score` and then `compute_loss`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from torch import Tensor

from padfree.config.loss_settings import SFTSettings
from padfree.config.policy_settings import PolicySettings
from padfree.errors import UserError
from padfree.losses import policy_loss
from padfree.losses.nll import sft_loss
from padfree.losses.segment_sums import Reduce, no_reduce
from padfree.losses.types import LossInputs, LossOutput

TokenLossSettings: TypeAlias = PolicySettings | SFTSettings
TokenLoss: TypeAlias = Callable[[Tensor, Tensor | None, Tensor], Tensor]


def compute_loss(inputs: LossInputs, settings: TokenLossSettings, *, reduce: Reduce = no_reduce) -> LossOutput:
    """Compute the loss that `settings` describes from the log-probabilities and entropies in `inputs`."""
    given: tuple[object, object] = (inputs, settings)
    if not isinstance(given[0], LossInputs) or not isinstance(given[1], TokenLossSettings):
        kinds = " and ".join(type(part).__name__ for part in given)
        raise UserError("inputs, settings", f"got {kinds}", "give LossInputs and one of PolicySettings, SFTSettings")
    if isinstance(settings, SFTSettings):
        return sft_loss(inputs)
    return policy_loss.policy_loss(inputs, settings, reduce=reduce)


def needs_entropy(settings: TokenLossSettings) -> bool:
    """Return whether a loss with these settings needs the entropy of each token."""
    return isinstance(settings, PolicySettings) and settings.entropy_coefficient != 0.0


def is_elementwise(settings: TokenLossSettings) -> bool:
    """Return whether the loss is elementwise: the loss of a token depends only on the token's own values.

    `make_token_loss` supports only elementwise losses.
    """
    return isinstance(settings, SFTSettings) or policy_loss.is_elementwise(settings)


def make_token_loss(inputs: LossInputs, settings: TokenLossSettings, *, reduce: Reduce = no_reduce) -> TokenLoss:
    """Return the function `token_loss(logprobs, entropy, positions)` that `head.fused_loss` needs.

    `token_loss` returns the weighted losses of some tokens, from their log-probabilities, their entropies and their
    positions in the pack. It computes no statistics for metrics; `compute_loss` does.
    """
    if not is_elementwise(settings):
        raise UserError(
            "settings",
            f"{settings} describe a loss that is not elementwise",
            "compute scores first and call compute_loss",
        )
    if isinstance(settings, SFTSettings):
        weights = inputs.weights
        return lambda logprobs, entropy, positions: -weights[positions] * logprobs
    terms = policy_loss.policy_terms(inputs, settings, current=None, reduce=reduce)
    return lambda logprobs, entropy, positions: terms.at(positions).token_loss(settings, logprobs, entropy)
