"""PPO's critic: a value model that is trained together with the policy, and the advantages computed from it.

Before the first update of a rollout batch, the critic computes a value of each token. GAE turns the values and rewards
into advantages and returns. All updates of the batch use these numbers, also after a resume.

Each update trains the critic towards the returns, with an optimizer of its own. The first `critic.warmup` updates do
not train the policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from padfree.batch import LocalBatch
from padfree.config import CriticConfig
from padfree.errors import UserError
from padfree.losses import LossInputs, LossOutput, ValueSettings, gae, token_rewards, value_loss, whiten
from padfree.sample import Sample
from padfree.tasks.micro_batch_loss import MicroBatchLoss
from padfree.tasks.reward import pack_scores
from padfree.train.engine import Engine
from padfree.train.finite_checks import NonFiniteError
from padfree.train.scorer import ScalarScorer


class Critic:
    """PPO's critic: a value model with its optimizer (`engine`), and the settings of GAE."""

    def __init__(self, engine: Engine, settings: CriticConfig) -> None:
        assert isinstance(engine.scorer, ScalarScorer)
        self.engine, self.settings = engine, settings
        self._scorer = engine.scorer

    def add_advantages(self, samples: Sequence[Sample]) -> tuple[list[Sample], dict[str, float]]:
        """Add values, advantages and returns to copies of the samples. Return the copies, and metrics.

        All ranks must call this."""
        values = self._scorer.values(samples)
        found = with_gae(samples, values, self.settings)
        return found, {"critic/explained_variance": explained_variance(found)}

    def step(self, samples: Sequence[Sample], *, lr_factor: float, step: int) -> dict[str, float]:
        """Update the critic once towards the returns of these samples, and return the metrics of the update."""
        try:
            report = self.engine.step(samples, lr_factor=lr_factor, step=step)
        except NonFiniteError as error:
            message = f"critic: {str(error).replace('optimizer.lr', 'critic.lr')}"
            raise NonFiniteError(message, error.samples) from None
        means = report.statistics
        found = {
            "critic/loss": report.loss,
            "critic/gradient_norm": report.gradient_norm,
            **{f"critic/{name}": rate for name, rate in self.engine.optimizer.rates.items()},
            "critic/value": means["value"],
            "critic/return": means["return"],
            "critic/error": means["value_error"],
        }
        if "value_clip_fraction" in means:
            found["critic/clip_fraction"] = means["value_clip_fraction"]
        return found


class ValueMicroBatchLoss(MicroBatchLoss):
    """Computes the critic's loss of a pack (one micro-batch): the clipped squared error between values and returns."""

    settings: ValueSettings

    def __call__(self, model: PreTrainedModel, batch: LocalBatch) -> LossOutput:
        return value_loss(LossInputs.from_batch(batch, values=pack_scores(model, batch)), self.settings)


def with_gae(samples: Sequence[Sample], values: Sequence[NDArray[Any]], settings: CriticConfig) -> list[Sample]:
    """Return copies of the samples with values, advantages and returns, by generalised advantage estimation (GAE).

    `values[i]` [n]: the critic's values of sample i. `settings.whiten` scales the advantages (not the returns) to mean
    0 and standard deviation 1.
    """
    for sample in samples:
        if sample.reward is None or not np.isfinite(sample.reward):
            raise UserError(
                "reward",
                f"is {sample.reward} in sample {sample.uid!r}, but loss.advantage 'gae' needs a finite number",
                "give a reward for every sample",
            )
    lengths = [len(sample) for sample in samples]
    index = torch.repeat_interleave(torch.arange(len(samples)), torch.tensor(lengths))
    mask = torch.from_numpy(np.concatenate([sample.scored for sample in samples]))
    rewards = torch.tensor([sample.reward for sample in samples], dtype=torch.float64)
    given = torch.from_numpy(np.concatenate(values)).double()
    longest = max(lengths)
    earned = token_rewards(rewards, mask, index, max_length=longest)
    advantages, returns = gae(
        earned, given, mask, index, gamma=settings.gamma, gae_lambda=settings.gae_lambda, max_length=longest
    )
    if settings.whiten:
        advantages = whiten(advantages, mask)
    pieces = [torch.split(array.float(), lengths) for array in (advantages, returns)]
    return [
        sample.with_numbers(values=own, advantages=advantage.numpy(), returns=expected.numpy())
        for sample, own, advantage, expected in zip(samples, values, *pieces, strict=True)
    ]


def explained_variance(samples: Sequence[Sample]) -> float:
    """Return the critic's explained variance over all tokens in the loss: 1 - Var(return - value) / Var(return).

    The result is 1 for a perfect critic, and 0 if all values or all returns are equal.
    """
    scored = [sample.scored for sample in samples]
    values, returns = (
        np.concatenate([getattr(sample, name)[mask] for sample, mask in zip(samples, scored, strict=True)]).astype(
            np.float64
        )
        for name in ("values", "returns")
    )
    variance = float(returns.var()) if len(returns) else 0.0
    return 1.0 - float((returns - values).var()) / variance if variance > 0 else 0.0
