"""Losses on pairs of answers, one of which is preferred. Both answers must be in the same pack.

For example, the pairs [[0, 1], [3, 2]] say that sample 0 is preferred to sample 1, and sample 3 to sample 2.

A loss compares one number per answer, such as the sum of log π - log π_ref. `docs/concepts/losses.md` has the formulas.

If context ranks share a pack, each returns a share of the loss, in proportion to its number of tokens. It also returns
the full gradient for its own tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import softplus

from padfree.batch import SampleInfo
from padfree.config.loss_settings import DPOSettings, RewardModelSettings
from padfree.errors import UserError
from padfree.losses import checks
from padfree.losses.segment_sums import Reduce, no_reduce, segment_sum, spread
from padfree.losses.types import LossInputs, LossOutput


def dpo_loss(
    inputs: LossInputs, settings: DPOSettings, pairs: Tensor, pair_weights: Tensor, *, reduce: Reduce = no_reduce
) -> LossOutput:
    """Return the DPO loss: the weighted sum of the losses of all pairs.

    `pairs` [P, 2] are sample indices (chosen, rejected), and `pair_weights` [P] their weights. Each context rank
    returns a share of the loss.
    """
    logprobs = inputs.need("logprobs", "the DPO loss")
    values = logprobs
    if settings.needs_reference:
        values = logprobs - inputs.need("ref_logprobs", "the DPO loss")
    local = segment_sum(values, inputs.sample_index, inputs.num_samples)
    held = segment_sum(inputs.mask, inputs.sample_index, inputs.num_samples)
    return _pair_loss(
        local, held, pairs, pair_weights, partial(_preference, settings), inputs.sample_index, logprobs.dtype, reduce,
        means=settings.means, shown=settings.beta,
    )  # fmt: skip


def _preference(settings: DPOSettings, chosen: Tensor, rejected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the losses [P] of P pairs, and their derivatives [P] with respect to `chosen` and `rejected`.

    `chosen`, `rejected` [P]: for each answer the number that the loss compares, e.g. its sum of log π - log π_ref.
    """
    beta, smoothing = settings.beta, settings.label_smoothing
    difference = chosen - rejected
    if settings.variant == "hinge":
        losses = (1.0 - beta * difference).clamp(min=0.0)
        slope = torch.where(losses > 0, -beta, 0.0).to(losses)
        return losses, slope, -slope
    if settings.variant == "ipo":
        distance = difference - 0.5 / beta
        return distance.square(), 2.0 * distance, -2.0 * distance
    if settings.variant == "orpo":
        # expm1 keeps log(1 - exp x) accurate if x is close to 0
        odds = difference - torch.log(-torch.expm1(chosen)) + torch.log(-torch.expm1(rejected))
        slope = -beta * torch.sigmoid(-odds)
        losses = beta * softplus(-odds) - chosen
        # the derivative of odds(x) is 1 / (1 - exp x)
        return losses, slope / -torch.expm1(chosen) - 1.0, -slope / -torch.expm1(rejected)
    logits = beta * difference - settings.gamma
    losses = (1.0 - smoothing) * softplus(-logits) + smoothing * softplus(logits)
    slope = beta * (smoothing - torch.sigmoid(-logits))
    return losses, slope, -slope


def _bradley_terry(margin: float | Tensor, chosen: Tensor, rejected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    difference = chosen - rejected - margin
    slope = -torch.sigmoid(-difference)
    return softplus(-difference), slope, -slope


def reward_model_loss(
    scores: Tensor,
    ends: Tensor,
    sample_index: Tensor,
    num_samples: int,
    settings: RewardModelSettings,
    pairs: Tensor,
    pair_weights: Tensor,
    *,
    margins: Tensor | None = None,
    reduce: Reduce = no_reduce,
) -> LossOutput:
    """Return the weighted sum of a reward model's losses on pairs (chosen, rejected).

    An answer's score is that of its last token: `scores` [T] where `ends` [T] is True. `margins` [P] are added to the
    settings' margin. Each context rank returns a share of the loss.
    """
    ends, scores = checks.mask("ends", ends), checks.loss_input("scores", scores)
    checks.same_length("scores", len(scores), ends=ends, sample_index=sample_index)
    local = segment_sum(torch.where(ends, scores, 0.0), sample_index, num_samples)
    held = segment_sum(ends, sample_index, num_samples)
    margin: float | Tensor = settings.margin
    if margins is not None:
        margins = checks.quantity("margins", margins)
        checks.same_length("pairs", len(pairs), margins=margins)
        margin = margins.double() + settings.margin
    loss = partial(_bradley_terry, margin)
    return _pair_loss(local, held, pairs, pair_weights, loss, sample_index, scores.dtype, reduce)


def sample_ends(position_ids: Tensor, sample_index: Tensor, lengths: Tensor) -> Tensor:
    """Return bools [T] that say whether each token is the last one of its sample. `lengths` [B] are the sample
    lengths.
    """
    lengths = checks.index("lengths", lengths)
    return checks.index("position_ids", position_ids) == spread(lengths, sample_index) - 1


def preference_pairs(samples: Sequence[SampleInfo]) -> NDArray[np.int64]:
    """Return the P pairs of answers in a pack, as sample indices (chosen, rejected), [P, 2].

    The samples of a pair have the same `group`, and the chosen one has the higher `reward`.
    """
    given: object = samples
    if not isinstance(given, Sequence) or not all(isinstance(info, SampleInfo) for info in given):
        raise UserError("samples", f"got a {type(samples).__name__}", "give the samples of a batch, batch.samples")
    groups: dict[str | int | None, list[int]] = {}
    for index, info in enumerate(samples):
        groups.setdefault(info.group, []).append(index)
    pairs = []
    for group, indices in groups.items():
        if group is None or len(indices) != 2:
            raise UserError(
                "group",
                f"is the group of {len(indices)} samples of a pack, but a pair has 2",
                "put both answers of a pair into one pack, with a group of their own",
                value=group,
            )
        first, second = (samples[index].reward for index in indices)
        if first is None or second is None or first == second:
            raise UserError(
                "reward",
                f"is {first} and {second} for the answers of group {group!r}",
                "give the chosen answer the higher reward",
            )
        pairs.append(indices if first > second else indices[::-1])
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)


def _pair_loss(
    local: Tensor,
    held: Tensor,
    pairs: Tensor,
    pair_weights: Tensor,
    loss: Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]],
    sample_index: Tensor,
    dtype: torch.dtype,
    reduce: Reduce,
    *,
    means: bool = False,
    shown: float = 1.0,
) -> LossOutput:
    """Return this rank's share of the weighted sum of the losses of all pairs.

    For each sample, `local` [B] is a sum over this rank's tokens, and `held` [B] their number. `loss` gets the sums (or
    `means`) of the chosen and of the rejected answers.
    """
    pairs, pair_weights = checks.index("pairs", pairs, len(local)), checks.quantity("pair_weights", pair_weights)
    if pairs.shape != (len(pair_weights), 2):
        raise UserError(
            "pairs",
            f"has shape {tuple(pairs.shape)}, but there are {len(pair_weights)} pair_weights",
            "give (chosen, rejected) for each pair",
        )
    totals, all_held = reduce(torch.stack([local.detach(), held], dim=1)).unbind(1)
    if means:
        sizes = all_held.clamp(min=1.0)
        local, totals = local / sizes, totals / sizes
    chosen, rejected = pairs.unbind(1)
    share = (held[chosen] + held[rejected]) / (all_held[chosen] + all_held[rejected]).clamp(min=1.0)
    losses, slopes, rejected_slopes = loss(totals[chosen], totals[rejected])
    here, there = local[chosen], local[rejected]
    # The value of `attached` is this rank's share of each loss. Its gradient is that of the whole loss for this rank's
    # tokens.
    attached = share * losses + slopes * (here - here.detach()) + rejected_slopes * (there - there.detach())
    # The statistics report the sums or means multiplied by `shown`.
    difference = shown * (totals[chosen] - totals[rejected])
    count = share.sum()
    shown_values = {
        "pair_loss": share * losses,
        "accuracy": share * (difference > 0),
        "margin": share * difference,
        "chosen": share * shown * totals[chosen],
        "rejected": share * shown * totals[rejected],
    }
    blamed = torch.zeros_like(totals).index_add(0, pairs.flatten(), (pair_weights * losses).repeat_interleave(2))
    return LossOutput(
        loss=(pair_weights * attached).sum().to(dtype),
        token_losses=spread(blamed, sample_index).to(dtype),
        statistics={name: (values.sum(), count) for name, values in shown_values.items()},
        pair_statistics={**shown_values, "count": share},
    )
