"""Global batches that are ready for training: with rewards, advantages and log-probabilities.

A batch comes from one of two sources:

batcher -> samples                  the data files contain them (SFT, preference pairs, given rollouts)
batcher -> prompts -> collector     the policy generates samples, now or ahead of time

The samples of both sources then pass the same two steps:

samples -> log-probabilities        computed by the policy before the updates, and by the reference
           advantages               computed from rewards, or by a critic or a teacher
        -> GlobalBatch              the samples, their division into updates, metrics, times
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from padfree.checkpoint.manifest import TrainedModel
from padfree.config import DataConfig, LossConfig, RolloutConfig
from padfree.errors import UserError
from padfree.model.route_replay import check_routes
from padfree.model.routers import routers_of
from padfree.rollout.collect.collector import Collector
from padfree.sample import Sample
from padfree.tasks.task import Models, task_of
from padfree.train.batch_times import BatchTimes
from padfree.train.batcher import Batcher
from padfree.train.critic import Critic
from padfree.train.engine import Engine
from padfree.train.finite_checks import check_weights
from padfree.train.global_batch import GlobalBatch, update_parts
from padfree.train.rl.reference_model import ReferenceModel
from padfree.train.scorer import Scorer


class BatchPreparer:
    """Produces the global batches of a run, the same on every rank, one per call of `next`.

    All ranks must call each method together.
    """

    def __init__(
        self,
        engine: Engine,
        batcher: Batcher,
        *,
        loss: LossConfig,
        data: DataConfig,
        rollout: RolloutConfig,
        seed: int,
        reference: ReferenceModel | None = None,
        teacher: Scorer | None = None,
        critic: Critic | None = None,
        rollouts: Collector | None = None,
        end_tokens: tuple[int, ...] = (),
    ) -> None:
        """`batcher` yields samples or prompts, and `rollouts` generates samples from the prompts.

        `teacher` computes the advantages if `loss.advantage` is "teacher"; `critic` computes them if `loss.advantage`
        is "gae". A model that the run does not use is None. `end_tokens`: the token ids that end a response.
        """
        self.engine, self.batcher = engine, batcher
        self._loss, self._data, self._rollout, self._seed = loss, data, rollout, seed
        self.reference, self.teacher, self.critic = reference, teacher, critic
        self.rollouts = rollouts
        self.task = task_of(loss.command)
        self.end_tokens = end_tokens
        self._had_labels = False  # whether any sample so far had a trained token
        self.groups = self.groups_without_signal = 0  # summed over all batches so far

    @property
    def sampled(self) -> bool:
        """Whether the policy generates the samples."""
        return self.rollouts is not None

    @property
    def waits_for_updates(self) -> bool:
        """Whether the next batch cannot be prepared before the updates of the current batch are done."""
        asks = any(model is not None for model in (self.reference, self.teacher, self.critic))
        return self.sampled or self.task.waits_for_updates(self._loss, asks=asks)

    def no_signal_note(self) -> str | None:
        """Return a note that nothing was learned, if all advantages since the start were 0; otherwise None."""
        loss = self._loss
        if not self.groups or self.groups_without_signal < self.groups:
            return None
        if loss.kl_coefficient or loss.entropy_coefficient or self.critic is not None or self.engine.router is not None:
            return None
        return (
            f"nothing was learned: in each of {self.groups:,} groups all rewards were equal, so that every advantage "
            "was 0; check the rewards, or give prompts that the model sometimes answers correctly"
        )

    def cursor(self) -> dict[str, Any]:
        """Return the position in the data before the next batch, as a dict that a checkpoint stores."""
        queued = None if self.rollouts is None else self.rollouts.cursor()
        return self.batcher.state_dict() if queued is None else dict(queued)

    @property
    def last_batch_number(self) -> int:
        """The number of the newest batch that the batcher has produced. Its responses may still be in progress."""
        return self.batcher.step

    def resume(self, step: int, *, remaining: int) -> None:
        """Continue sampling after a resume.

        `step`: the number of updates made so far. `remaining`: the number of updates left in the current batch.
        """
        if self.rollouts is not None:
            self.rollouts.resume(self.batcher, self.engine.model, step, remaining=remaining)

    def after_updates(self) -> None:
        """Refresh the reference model if `reference.refresh` asks for it. Call this after all updates of a batch."""
        if self.reference is not None:
            self.reference.after_batch(self.engine.model)

    # Checkpoints

    def check_weights(self, step: int) -> None:
        """Raise an error if a weight of the policy or of the critic is not finite. Call this before a save."""
        check_weights(self.engine.model, step)
        if self.critic is not None:
            check_weights(self.critic.engine.model, step, "the critic", "critic.lr")

    def state(self) -> dict[str, Any]:
        """Return the state of the collector and of the reference model for a checkpoint's `extra` dict.

        All ranks must call this.

        The position in the data is not included; `cursor` returns the position.
        """
        found = {} if self.rollouts is None else self.rollouts.state()
        return found if self.reference is None else {**found, "reference": self.reference.state_dict()}

    def models_to_save(self) -> dict[str, Any]:
        """Return a dict with what a checkpoint stores of two models, `reference` and `critic`.

        The value of a model is None if the run does not use the model.
        """
        return {
            "reference": None if self.reference is None else self.reference.tensors_to_save(),
            "critic": self._trained_critic(),
        }

    def models_to_load(self) -> dict[str, Any]:
        """Return a dict with the objects into which a checkpoint's models `reference` and `critic` are loaded.

        The value of a model is None if the run does not use the model.
        """
        return {
            "reference": None if self.reference is None else self.reference.tensors(),
            "critic": self._trained_critic(),
        }

    def _trained_critic(self) -> TrainedModel | None:
        return None if self.critic is None else TrainedModel(self.critic.engine.model, self.critic.engine.optimizer)

    def restore(self, extra: Mapping[str, Any]) -> None:
        """Continue from the state in a checkpoint's `extra` dict. Load the checkpoint's models before this call."""
        self.batcher.load_state_dict(extra["batcher"])
        if self.reference is not None and "reference" in extra:
            self.reference.load_state_dict(extra["reference"])
        if self.rollouts is not None:
            self.rollouts.restore(extra)

    def next(self, step: int) -> GlobalBatch | None:
        """Return the next batch, or None after the last batch.

        `step`: the number of updates made so far, which is also the version of the policy.
        """
        times = BatchTimes()
        with times.measure_rest("preparing"):
            found = self._next(step, times)
        if found is not None and (self.rollouts is not None or not self._loss.task.in_rows):
            return replace(found, times=times.metrics(sum(int(sample.mask.sum()) for sample in found.samples)))
        return found

    def _next(self, step: int, times: BatchTimes) -> GlobalBatch | None:
        if self.rollouts is not None:
            with times.measure("sampling"):
                found = self.rollouts.next(self.batcher, self.engine.model, step)
            if found is None:
                return None
            number, samples = found
            times.split_sampling(self.rollouts.timings)
            return self._prepare(distinct(samples), times, number)
        groups = next(self.batcher, None)
        return None if groups is None else self._prepare(distinct(_flat(groups)), times, self.batcher.step)

    def _prepare(self, batch: list[Sample], times: BatchTimes, number: int) -> GlobalBatch:
        """Add advantages and log-probabilities to the samples of batch `number`, and divide the samples into updates.

        The seconds of each phase are added to `times`, which the metrics report.
        """
        self._had_labels = self._had_labels or any(sample.num_labels for sample in batch)
        if self.sampled and not self._had_labels:
            raise UserError(
                f"{self._rollout.source}",
                f"none of the {len(batch)} samples of batch {number} has a token to train",
                "let the policy generate tokens, because tokens that an environment adds are not trained",
            )
        if self._rollout.routing == "replay" and not self.sampled:
            check_routes((sample.routes for sample in batch), routers_of(self.engine.model))
        parts = update_parts(len(batch), **self.minibatch_settings(number))
        batch, found = self.task.prepare(batch, self._models(times), self._loss)
        metrics: dict[str, float] = {}
        has_metrics = self.rollouts is not None or not self._loss.task.in_rows
        if has_metrics:
            written = {} if self.rollouts is None else self.rollouts.metrics()
            metrics = {**self._reward_metrics(batch), **written, **found}
        self.groups += int(metrics.get("groups", 0))
        self.groups_without_signal += int(metrics.get("groups_without_signal", 0))
        return GlobalBatch(
            samples=batch,
            parts=parts,
            epochs=self._loss.epochs,
            metrics=metrics,
        )

    def _models(self, times: BatchTimes) -> Models:
        """Return the functions of the policy, the reference, the teacher and the critic; None for an unused model.

        A function computes log-probabilities or, for the critic, advantages of samples. It adds its seconds to `times`.
        """
        reference, teacher, critic = self.reference, self.teacher, self.critic
        return Models(
            policy=times.timed("old_logprobs", self.engine.scorer.logprobs),
            reference=None if reference is None else times.timed("reference", reference.logprobs),
            teacher=None if teacher is None else times.timed("teacher", teacher.logprobs),
            critic=None if critic is None else times.timed("critic", critic.add_advantages),
        )

    def _reward_metrics(self, batch: list[Sample]) -> dict[str, float]:
        sources = [source.label for source in self._data.sources]
        return reward_metrics(batch, end_tokens=self.end_tokens, sources=sources if len(sources) > 1 else ())

    def minibatch_settings(self, number: int) -> dict[str, int]:
        """Return the arguments with which `update_parts` divides the samples of batch `number` into updates."""
        loss = self._loss
        return {
            "epochs": loss.epochs,
            "mini_batches": loss.mini_batches,
            "seed": self._seed,
            "number": number,
        }


def _flat(groups: Sequence[Any]) -> list[Sample]:
    return [sample for group in groups for sample in group]


def distinct(samples: list[Sample]) -> list[Sample]:
    """Give each repetition of a sample in a batch its own uid and its own group name.

    Token weights and advantages then count repetitions as different samples. For example, a batch that is larger than
    the data repeats samples.
    """
    seen: dict[str | int, int] = {}
    found = []
    for sample in samples:
        if sample.uid is not None:
            seen[sample.uid] = seen.get(sample.uid, 0) + 1
            if seen[sample.uid] > 1:
                time = f"(time {seen[sample.uid]})"
                group = None if sample.group is None else f"{sample.group} {time}"
                sample = replace(sample, uid=f"{sample.uid} {time}", group=group)
        found.append(sample)
    return found


def reward_metrics(
    samples: Sequence[Sample], *, end_tokens: Collection[int] = (), sources: Sequence[str] = ()
) -> dict[str, float]:
    """Return metrics of a batch of rollouts: statistics of the rewards, and of the number of trained tokens per sample.

    `sources`: data sources whose mean rewards to add. `end_tokens`: token ids that end a response; with them, add the
    share of cut-off responses.
    """
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    lengths = [int(sample.mask.sum()) for sample in samples]
    found = {
        "response_length": sum(lengths) / len(lengths),
        "response_length_min": float(min(lengths)),
        "response_length_max": float(max(lengths)),
    }
    if rewards:
        mean = sum(rewards) / len(rewards)
        found["reward"] = mean
        found["reward_std"] = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / len(rewards))
        found["reward_min"] = min(rewards)
        found["reward_max"] = max(rewards)
    for name in sources:
        own = [sample.reward for sample in samples if sample.source == name and sample.reward is not None]
        if own:
            found[f"source/{name}/reward"] = sum(own) / len(own)
    if end_tokens:
        found["response_cut"] = sum(int(sample.tokens[-1]) not in end_tokens for sample in samples) / len(samples)
    return found
