"""Every number, name and object that a public function takes: used as it is meant, or refused in one line.

Each call is made with a fraction, a string, None, True, -1, 0, NaN, a list and an object. `USED` says which of them a
call takes; every other is refused with a UserError: no other error, and no loop without end (NaN is neither above nor
below a limit).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import padfree
from padfree import losses
from padfree.attention import varlen_attention
from padfree.compat import slime
from padfree.cp import attend, make_layout, shard
from padfree.errors import UserError
from padfree.head import fused_loss, score
from padfree.losses import LossInputs
from padfree.packing import CostModel, FixedSizeBatcher, TokenBudgetBatcher, balance, collate, fill, pack, plan_step
from padfree.sample import Sample
from padfree.segments import Segments
from tests.refused import check_user_error

VALUES: dict[str, Any] = {
    "2.5": 2.5,
    "str": "8",
    "None": None,
    "True": True,
    "-1": -1,
    "0": 0,
    "nan": float("nan"),
    "list": [1],
    "object": object(),
}

SAMPLES = [Sample(tokens=np.arange(3)), Sample(tokens=np.arange(5))]
BATCH = collate(SAMPLES)
SEGMENTS = BATCH.segments
GROUPS = torch.tensor([0, 0, 1, 1])
REWARDS = torch.tensor([1.0, 0.0, 0.0, 1.0])
MASK = torch.ones(4, dtype=torch.bool)
ROWS = torch.linspace(-1, 1, 64).reshape(8, 2, 4)
HIDDEN, WEIGHT = torch.linspace(-1, 1, 12).reshape(3, 4), torch.linspace(0, 1, 20).reshape(5, 4)
LABELS = torch.arange(3)
INPUTS = LossInputs(mask=MASK, weights=REWARDS, sample_index=GROUPS, num_samples=2, logprobs=-REWARDS)
PER_TOKEN = {"loss_masks": [[1, 1], [1]], "advantages": [[1, 1], [1]], "returns": [[1, 1], [1]]}


def slime_packs(**settings: Any) -> Any:
    return slime.pack_sequences(
        tokens=[[1, 2, 3], [4, 5]], rewards=[1, 0], raw_rewards=[1, 0], response_lengths=[2, 1], **PER_TOKEN, **settings
    )


CALLS: dict[str, Callable[[Any], Any]] = {
    "fill capacity": lambda x: list(fill([1, 2], x)),
    "balance k": lambda x: balance([1, 2, 3], x),
    "balance cap": lambda x: balance([1, 2, 3], 2, cap=x),
    "plan_step ranks": lambda x: plan_step([1, 2, 3], ranks=x, max_tokens=8),
    "plan_step max_tokens": lambda x: plan_step([1, 2, 3], ranks=1, max_tokens=x),
    "plan_step overlong": lambda x: plan_step([1, 2, 3], ranks=1, max_tokens=8, overlong=x),
    "pack samples": pack,
    "pack one sample": lambda x: pack([x]),
    "pack max_tokens": lambda x: pack(SAMPLES, max_tokens=x),
    "pack num_packs": lambda x: pack(SAMPLES, num_packs=x),
    "pack multiple_of": lambda x: pack(SAMPLES, multiple_of=x),
    "collate": collate,
    "unpack batches": lambda x: padfree.unpack(x, [REWARDS]),
    "padded_to": BATCH.padded_to,
    "padded_to_multiple": BATCH.padded_to_multiple,
    "from_lengths pad_length": lambda x: Segments.from_lengths([1, 2], pad_length=x),
    "truncated": SAMPLES[0].truncated,
    "Sample reward": lambda x: Sample(tokens=[1], reward=x),
    "TokenBudgetBatcher budget": lambda x: list(TokenBudgetBatcher(SAMPLES, budget=x)),
    "TokenBudgetBatcher buffer_size": lambda x: list(TokenBudgetBatcher(SAMPLES, budget=8, buffer_size=x)),
    "TokenBudgetBatcher epochs": lambda x: next(TokenBudgetBatcher(SAMPLES, budget=8, epochs=x)),
    "TokenBudgetBatcher seed": lambda x: next(TokenBudgetBatcher(SAMPLES, budget=8, shuffle=True, seed=x)),
    "FixedSizeBatcher batch_size": lambda x: list(FixedSizeBatcher(SAMPLES, batch_size=x)),
    "FixedSizeBatcher max_length": lambda x: list(FixedSizeBatcher(SAMPLES, batch_size=1, max_length=x)),
    "CostModel linear": lambda x: CostModel(linear=x),
    "CostModel.from_config": CostModel.from_config,
    "grpo_advantages num_groups": lambda x: losses.grpo_advantages(REWARDS, GROUPS, x),
    "grpo_advantages eps": lambda x: losses.grpo_advantages(REWARDS, GROUPS, 2, eps=x),
    "rloo_advantages num_groups": lambda x: losses.rloo_advantages(REWARDS, GROUPS, x),
    "discounted_returns gamma": lambda x: losses.discounted_returns(REWARDS, MASK, GROUPS, gamma=x),
    "discounted_returns max_length": lambda x: losses.discounted_returns(REWARDS, MASK, GROUPS, max_length=x),
    "gae lambda": lambda x: losses.gae(REWARDS, REWARDS, MASK, GROUPS, gae_lambda=x),
    "token_rewards kl_coefficient": lambda x: losses.token_rewards(
        REWARDS[:2], MASK, GROUPS, kl=REWARDS, kl_coefficient=x
    ),
    "whiten eps": lambda x: losses.whiten(REWARDS, MASK, eps=x),
    "segment_sum num_samples": lambda x: losses.segment_sum(REWARDS, GROUPS, x),
    "ClipSettings low": lambda x: losses.ClipSettings(low=x),
    "ClipSettings high": lambda x: losses.ClipSettings(high=x),
    "ClipSettings dual": lambda x: losses.ClipSettings(dual=x),
    "GSPOSettings low": lambda x: losses.GSPOSettings(low=x),
    "CISPOSettings low": lambda x: losses.CISPOSettings(low=x),
    "TokenTISSettings high": lambda x: losses.TokenTISSettings(high=x),
    "OPSMSettings delta": lambda x: losses.OPSMSettings(delta=x),
    "ValueSettings clip": lambda x: losses.ValueSettings(clip=x),
    "DPOSettings beta": lambda x: losses.DPOSettings(beta=x),
    "DPOSettings label_smoothing": lambda x: losses.DPOSettings(label_smoothing=x),
    "RewardModelSettings margin": lambda x: losses.RewardModelSettings(margin=x),
    "PolicySettings kl_coefficient": lambda x: losses.PolicySettings(kl_coefficient=x),
    "PolicySettings entropy_coefficient": lambda x: losses.PolicySettings(entropy_coefficient=x),
    "PolicySettings corrections": lambda x: losses.PolicySettings(corrections=x),
    "PolicySettings objective": lambda x: losses.PolicySettings(objective=x),
    "PolicySettings old_policy": lambda x: losses.PolicySettings(old_policy=x),
    "token_weights mode": lambda x: losses.token_weights(x, [MASK.numpy()]),
    "token_weights constant": lambda x: losses.token_weights("constant", [MASK.numpy()], constant=x),
    "batch_weights divisor": lambda x: losses.batch_weights("token-mean", LABELS, LABELS * 0, 1, divisor=x),
    "batch_weights num_samples": lambda x: losses.batch_weights("token-mean", LABELS, LABELS * 0, x, divisor=1.0),
    "clipped_ratio low": lambda x: losses.clipped_ratio(REWARDS, REWARDS, low=x, high=0.2),
    "kl_divergence estimator": lambda x: losses.kl_divergence(REWARDS, REWARDS, x),
    "score_logits temperature": lambda x: losses.score_logits(WEIGHT[:3], LABELS, temperature=x),
    "compute_loss inputs": lambda x: losses.compute_loss(x, losses.PolicySettings()),
    "compute_loss settings": lambda x: losses.compute_loss(INPUTS, x),
    "preference_pairs": losses.preference_pairs,
    "score temperature": lambda x: score(HIDDEN, WEIGHT, LABELS, temperature=x),
    "score softcap": lambda x: score(HIDDEN, WEIGHT, LABELS, softcap=x),
    "score logit_scale": lambda x: score(HIDDEN, WEIGHT, LABELS, logit_scale=x),
    "score num_labels": lambda x: score(HIDDEN, WEIGHT, LABELS, num_labels=x),
    "score memory": lambda x: score(HIDDEN, WEIGHT, LABELS, memory=x),
    "score backend": lambda x: score(HIDDEN, WEIGHT, LABELS, backend=x),
    "fused_loss token_loss": lambda x: fused_loss(HIDDEN, WEIGHT, LABELS, x),
    "varlen_attention segments": lambda x: varlen_attention(ROWS, ROWS, ROWS, x, SEGMENTS),
    "varlen_attention scale": lambda x: varlen_attention(ROWS, ROWS, ROWS, SEGMENTS, SEGMENTS, scale=x),
    "varlen_attention window": lambda x: varlen_attention(ROWS, ROWS, ROWS, SEGMENTS, SEGMENTS, window=x),
    "varlen_attention softcap": lambda x: varlen_attention(ROWS, ROWS, ROWS, SEGMENTS, SEGMENTS, softcap=x),
    "varlen_attention backend": lambda x: varlen_attention(ROWS, ROWS, ROWS, SEGMENTS, SEGMENTS, backend=x),
    "attend window": lambda x: attend(ROWS, ROWS, ROWS, shard(BATCH).context, window=x),
    "shard batch": shard,
    "shard world": lambda x: shard(BATCH, world=x),
    "shard rank": lambda x: shard(BATCH, world=2, rank=x),
    "shard kind": lambda x: shard(BATCH, world=2, kind=x),
    "shard method": lambda x: shard(BATCH, method=x),
    "make_layout segments": lambda x: make_layout(x, 2),
    "make_layout world": lambda x: make_layout(SEGMENTS, x),
    "attach": padfree.attach,
    "hidden_states model": lambda x: padfree.hidden_states(x, shard(BATCH)),
    "pack_sequences max_tokens_per_gpu": lambda x: slime_packs(max_tokens_per_gpu=x),
    "pack_sequences num_packs": lambda x: slime_packs(num_packs=x),
    "get_seqlen_balanced_partitions": lambda x: slime.get_seqlen_balanced_partitions([1, 2, 3], x, False),
    "pad_packed_sequence_with_cp": lambda x: slime.pad_packed_sequence_with_cp(slime_packs()[0], x),
    "compute_policy_loss eps_clip": lambda x: slime.compute_policy_loss(REWARDS, REWARDS, x, 0.2),
    "compute_approx_kl kl_loss_type": lambda x: slime.compute_approx_kl(REWARDS, REWARDS, x),
}


USED: dict[str, tuple[str, ...]] = {
    "None": (
        "balance cap", "pack max_tokens", "pack num_packs", "TokenBudgetBatcher epochs", "FixedSizeBatcher max_length",
        "score num_labels", "varlen_attention window", "attend window", "pack_sequences max_tokens_per_gpu",
        "pack_sequences num_packs",
    ),
    "0": (
        "from_lengths pad_length", "truncated", "TokenBudgetBatcher seed", "ClipSettings low", "GSPOSettings low",
        "DPOSettings label_smoothing", "batch_weights num_samples", "clipped_ratio low", "shard rank",
        "compute_policy_loss eps_clip",
    ),
    "2.5": (
        "DPOSettings beta", "token_weights constant", "batch_weights divisor", "score_logits temperature",
        "score temperature", "TokenTISSettings high",
    ),
    "2.5 0": (
        "CostModel linear", "grpo_advantages eps", "whiten eps", "ClipSettings high", "OPSMSettings delta",
        "RewardModelSettings margin", "PolicySettings kl_coefficient",
    ),
    "2.5 -1 0": (
        "discounted_returns gamma", "gae lambda", "token_rewards kl_coefficient", "PolicySettings entropy_coefficient",
        "score logit_scale",
    ),
    "2.5 None": ("ClipSettings dual", "score softcap", "varlen_attention softcap"),
    "None 0": ("discounted_returns max_length", "CISPOSettings low"),
    "2.5 None 0": ("ValueSettings clip",),
    "2.5 None -1 0": ("varlen_attention scale",),
    "2.5 None True -1 0 nan": ("Sample reward",),  # a reward may be missing, or not finite: training says so
}  # fmt: skip
"""The values that calls take; a call that is not here takes none of `VALUES`."""


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("value", VALUES)
def test_an_argument_is_used_or_refused_in_one_line(value: str, name: str) -> None:
    if any(name in names and value in used.split() for used, names in USED.items()):
        CALLS[name](VALUES[value])
        return
    with pytest.raises(UserError) as caught:
        CALLS[name](VALUES[value])
    check_user_error(caught.value)
