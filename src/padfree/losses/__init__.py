"""Losses: pure functions of the tokens of a pack. Each returns a weighted sum over tokens or over pairs of samples.

nll, policy_loss, value, preference    the losses
objectives, corrections, kl            the parts of policy losses
chunk_loss                             losses that are computed together with the output projection
aggregation                            ways of averaging a loss, each given as one weight per token
advantages                             advantages, computed from rewards

The settings of the losses are in `padfree.config.loss_settings` and `policy_settings`, which do not import torch.
"""

from padfree.choices import KLEstimator, WeightMode
from padfree.config.loss_settings import DPOSettings, RewardModelSettings, SFTSettings, ValueSettings
from padfree.config.policy_settings import (
    CISPOSettings,
    ClipSettings,
    Correction,
    CustomObjective,
    GSPOSettings,
    IcePopSettings,
    Objective,
    OPSMSettings,
    PolicySettings,
    ReinforceSettings,
    SequenceMaskSettings,
    SequenceTISSettings,
    TokenTISSettings,
)
from padfree.losses.advantages import (
    discounted_returns,
    gae,
    grpo_advantages,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    rloo_advantages,
    token_rewards,
    whiten,
)
from padfree.losses.aggregation import (
    WEIGHT_MODES,
    batch_weights,
    group_token_counts,
    scored_counts,
    token_weights,
    weight_divisor,
)
from padfree.losses.chunk_loss import (
    TokenLoss,
    TokenLossSettings,
    compute_loss,
    is_elementwise,
    make_token_loss,
    needs_entropy,
)
from padfree.losses.kl import kl_divergence
from padfree.losses.logits import score_logits
from padfree.losses.nll import sft_loss
from padfree.losses.objectives import ObjectiveInputs, ObjectiveOutput, load_objective, objective
from padfree.losses.objectives.clip import clipped_ratio
from padfree.losses.policy_loss import needs_old_logprobs, policy_loss, zero_without_advantage
from padfree.losses.preference import dpo_loss, preference_pairs, reward_model_loss, sample_ends
from padfree.losses.segment_sums import Reduce, no_reduce, segment_mean, segment_sum, spread
from padfree.losses.types import LossInputs, LossOutput, Statistics, merge_statistics
from padfree.losses.value import value_loss

__all__ = [
    "WEIGHT_MODES",
    "CISPOSettings",
    "ClipSettings",
    "Correction",
    "CustomObjective",
    "DPOSettings",
    "GSPOSettings",
    "IcePopSettings",
    "KLEstimator",
    "LossInputs",
    "LossOutput",
    "OPSMSettings",
    "Objective",
    "ObjectiveInputs",
    "ObjectiveOutput",
    "PolicySettings",
    "Reduce",
    "ReinforceSettings",
    "RewardModelSettings",
    "SFTSettings",
    "SequenceMaskSettings",
    "SequenceTISSettings",
    "Statistics",
    "TokenLoss",
    "TokenLossSettings",
    "TokenTISSettings",
    "ValueSettings",
    "WeightMode",
    "batch_weights",
    "clipped_ratio",
    "compute_loss",
    "discounted_returns",
    "dpo_loss",
    "gae",
    "group_token_counts",
    "grpo_advantages",
    "is_elementwise",
    "kl_divergence",
    "load_objective",
    "make_token_loss",
    "merge_statistics",
    "needs_entropy",
    "needs_old_logprobs",
    "no_reduce",
    "objective",
    "policy_loss",
    "preference_pairs",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "reward_model_loss",
    "rloo_advantages",
    "sample_ends",
    "score_logits",
    "scored_counts",
    "segment_mean",
    "segment_sum",
    "sft_loss",
    "spread",
    "token_rewards",
    "token_weights",
    "value_loss",
    "weight_divisor",
    "whiten",
    "zero_without_advantage",
]
