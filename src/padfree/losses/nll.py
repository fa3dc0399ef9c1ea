"""Supervised fine-tuning: the loss of a token is its negative log-likelihood, -log π(token)."""

from __future__ import annotations

from padfree.losses.types import LossInputs, LossOutput, weighted_loss


def sft_loss(inputs: LossInputs) -> LossOutput:
    """Return the weighted sum of the negative log-likelihoods of the tokens in `inputs`."""
    losses = -inputs.need("logprobs", "the SFT loss")
    return weighted_loss(inputs, losses, {"nll": losses})
