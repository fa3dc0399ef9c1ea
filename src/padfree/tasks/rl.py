"""`padfree rl`: policy losses on rollouts, from files or written by the model that is trained.

    rollout batch   old log-probabilities    of the trainer, where the loss has a ratio to them
                    advantages               of rewards, of a critic, or of a teacher
                    reference                log-probabilities for the KL term

All of them are found before the first update with a batch, and serve all its updates.
"""

from __future__ import annotations

import datetime
from typing import Any

from transformers import PreTrainedModel

from padfree.batch import Sample, with_arrays
from padfree.config import Config, LossConfig
from padfree.config.functions import model_of
from padfree.config.loss_settings import PolicySettings
from padfree.data import RolloutDataSettings, load_reward, read_rollouts
from padfree.data.prepare import Progress
from padfree.head.budget import Memory
from padfree.losses import needs_old_logprobs
from padfree.rollout import read_prompts
from padfree.rollout.environment import load_episode
from padfree.tasks.batch_advantages import reverse_kl, signal_of, teacher_advantages, with_advantages
from padfree.tasks.measures import PackMeasure
from padfree.tasks.micro_batch_loss import MicroBatchLoss, TokenMicroBatchLoss
from padfree.tasks.reading import TrainingData, text_settings
from padfree.tasks.task import Models, Task


class RL(Task):
    def read(
        self,
        config: Config,
        tokenizer: Any,
        *,
        progress: bool | Progress,
        import_reward: bool,
        day: datetime.date | None,
    ) -> TrainingData:
        data, settings = config.data, RolloutDataSettings(**text_settings(config.data, day))
        if config.rollout.source is not None:
            if import_reward and config.rollout.reward is not None and model_of(config.rollout.reward) is None:
                load_reward(config.rollout.reward)
            if import_reward and config.rollout.has_episodes:
                load_episode(config.rollout)
            max_new_tokens = config.rollout.max_new_tokens
            prompts = read_prompts(list(data.path), tokenizer, settings, max_new_tokens=max_new_tokens)
            return TrainingData(
                samples=prompts.prompts,
                report=prompts.report,
                place=lambda index: prompts.prompts[index].uid,
                notes=prompts.notes,
            )
        rollouts = read_rollouts(list(data.path), tokenizer=tokenizer, settings=settings)
        return TrainingData(
            samples=rollouts.samples,
            report=rollouts.report,
            place=lambda index: f"{rollouts.samples[index].source}:{rollouts.lines[index]}",
            notes=rollouts.notes,
            given_ids=True,
        )

    def micro_batch_loss(
        self, settings: PolicySettings, *, temperature: float, memory: Memory, teacher: PreTrainedModel | None = None
    ) -> MicroBatchLoss:
        return TokenMicroBatchLoss(settings, temperature=temperature, memory=memory)

    def measure(self, micro_batch_loss: MicroBatchLoss, temperature: float) -> PackMeasure:
        raise AssertionError("policies are measured by their responses")

    def prepare(self, samples: list[Sample], models: Models, loss: LossConfig) -> tuple[list[Sample], dict[str, float]]:
        keeps_old = needs_old_logprobs(loss.policy())
        old = models.policy(samples) if keeps_old or models.teacher is not None else None
        if keeps_old and old is not None:
            samples = with_arrays(samples, old_logprobs=old)
        metrics: dict[str, float] = {}
        if models.critic is not None:
            samples, found = models.critic(samples)
            metrics |= signal_of(samples, "gae").metrics() | found
        elif models.teacher is not None:
            assert old is not None
            samples = teacher_advantages(samples, models.teacher(samples), old)
            metrics |= signal_of(samples, "teacher").metrics() | {"reverse_kl": reverse_kl(samples)}
        else:
            metrics |= signal_of(samples, loss.advantage).metrics()
            samples = with_advantages(samples, loss.advantage)
        samples, _ = super().prepare(samples, models, loss)
        return samples, metrics

    def waits_for_updates(self, loss: LossConfig, *, asks: bool) -> bool:
        return asks or needs_old_logprobs(loss.policy())


TASK = RL()
