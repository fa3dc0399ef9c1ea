"""Losses on pairs of answers, one preferred to the other, that lie on the same packed row.

    samples    0        1         2        3
    pairs      [[0, 1], [3, 2]]            [P, 2] (chosen, rejected): sample indices of this row
    weights    [½, ½]                      [P] 1 / number of pairs in the global batch, say

    DPO             x = Σ over the answer of (log π - log π_ref)      d = beta · (x_chosen - x_rejected)
    reward model    x = score of the last token of the sample        d = x_chosen - x_rejected - margin

    loss of a pair  -(1 - ε) log σ(d) - ε log σ(-d)                  ε: label_smoothing, 0 for a reward model

Under context parallelism a rank holds some tokens of a pair. `reduce` adds up what the pair's loss is made of; each
rank then returns its share of the loss (its part of the pair's tokens), with exactly the gradient of the whole loss for
the tokens it holds. Shares add up to 1, so that losses and statistics of all ranks add up as usual.
Both answers of a pair must be on one row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import softplus

from padfree.batch import SampleInfo
from padfree.config.loss_settings import DPOSettings, RewardModelSettings
from padfree.losses import checks
from padfree.losses.segments import Reduce, no_reduce, segment_sum, spread
from padfree.losses.types import LossInputs, LossOutput


def dpo_loss(
    inputs: LossInputs, settings: DPOSettings, pairs: Tensor, pair_weights: Tensor, *, reduce: Reduce = no_reduce
) -> LossOutput:
    """Direct preference optimisation: the weighted sum over the pairs, or this rank's share of it."""
    logprobs = inputs.need("logprobs", "the DPO loss")
    margins = logprobs - inputs.need("ref_logprobs", "the DPO loss")
    local = settings.beta * segment_sum(margins, inputs.sample_index, inputs.num_samples)
    held = segment_sum(inputs.mask, inputs.sample_index, inputs.num_samples)
    return _pair_loss(local, held, pairs, pair_weights, settings.label_smoothing, 0.0, logprobs.dtype, reduce)


def reward_model_loss(
    scores: Tensor,
    ends: Tensor,
    sample_index: Tensor,
    num_samples: int,
    settings: RewardModelSettings,
    pairs: Tensor,
    pair_weights: Tensor,
    *,
    reduce: Reduce = no_reduce,
) -> LossOutput:
    """Pairwise loss on the scores [T] at `ends` [T] (`sample_ends`), or this rank's share of it."""
    ends, scores = checks.mask("ends", ends), checks.loss_input("scores", scores)
    checks.same_length("scores", len(scores), ends=ends, sample_index=sample_index)
    local = segment_sum(torch.where(ends, scores, 0.0), sample_index, num_samples)
    held = segment_sum(ends, sample_index, num_samples)
    return _pair_loss(local, held, pairs, pair_weights, 0.0, settings.margin, scores.dtype, reduce)


def sample_ends(position_ids: Tensor, sample_index: Tensor, lengths: Tensor) -> Tensor:
    """[T] bool: the last token of its sample. `lengths` [B] are those of the samples."""
    lengths = checks.index("lengths", lengths)
    return checks.index("position_ids", position_ids) == spread(lengths, sample_index) - 1


def preference_pairs(samples: Sequence[SampleInfo]) -> NDArray[np.int64]:
    """[P, 2] pairs of a row whose samples carry the pair as `group` and a higher `reward` on the chosen answer."""
    given: object = samples
    if not isinstance(given, Sequence) or not all(isinstance(info, SampleInfo) for info in given):
        raise ValueError(f"samples: {type(samples).__name__}; give those of a batch, batch.samples")
    groups: dict[str | int | None, list[int]] = {}
    for place, info in enumerate(samples):
        groups.setdefault(info.group, []).append(place)
    pairs = []
    for group, places in groups.items():
        if group is None or len(places) != 2:
            raise ValueError(
                f"group: {group!r} on {len(places)} samples of a row; "
                "give both answers of a pair, and no others, one group and keep them on one row"
            )
        first, second = (samples[place].reward for place in places)
        if first is None or second is None or first == second:
            raise ValueError(
                f"reward: {first} and {second} in group {group!r}; give the chosen answer the higher reward"
            )
        pairs.append(places if first > second else places[::-1])
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)


def _pair_loss(
    local: Tensor,
    held: Tensor,
    pairs: Tensor,
    pair_weights: Tensor,
    smoothing: float,
    margin: float,
    dtype: torch.dtype,
    reduce: Reduce,
) -> LossOutput:
    """`local` [B] is this rank's part of what is compared, `held` [B] how many of the tokens it is made of are here."""
    pairs, pair_weights = checks.index("pairs", pairs, len(local)), checks.quantity("pair_weights", pair_weights)
    if pairs.shape != (len(pair_weights), 2):
        raise ValueError(
            f"pairs: shape {tuple(pairs.shape)} for {len(pair_weights)} pair_weights; give (chosen, rejected) for each"
        )
    totals, all_held = reduce(torch.stack([local.detach(), held], dim=1)).unbind(1)
    chosen, rejected = pairs.unbind(1)
    share = (held[chosen] + held[rejected]) / (all_held[chosen] + all_held[rejected]).clamp(min=1.0)
    difference = totals[chosen] - totals[rejected] - margin
    losses = (1.0 - smoothing) * softplus(-difference) + smoothing * softplus(difference)
    slopes = smoothing - torch.sigmoid(-difference)
    part = local[chosen] - local[rejected]
    # The value is this rank's share; the gradient is that of the whole loss in the tokens that are here.
    attached = share * losses + slopes * (part - part.detach())
    count = share.sum()
    return LossOutput(
        loss=(pair_weights * attached).sum().to(dtype),
        statistics={
            "pair_loss": ((share * losses).sum(), count),
            "accuracy": ((share * (difference > 0)).sum(), count),
            "margin": ((share * difference).sum(), count),
            "chosen": ((share * totals[chosen]).sum(), count),
            "rejected": ((share * totals[rejected]).sum(), count),
        },
    )
