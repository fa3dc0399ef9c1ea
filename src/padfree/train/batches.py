"""Global batches with everything that their updates need besides the model as it is then.

batcher  -> groups -> make_samples        responses to prompts, or the samples of the data themselves
ahead    ------------>                    the same, sampled while earlier batches were trained
         -> old log-probabilities, advantages (of rewards, a critic, a teacher), the reference's log-probabilities
         -> RolloutBatch                  its samples, which of them each update takes, metrics, times
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from padfree.batch import Sample
from padfree.config import Config
from padfree.errors import UserError
from padfree.losses import PolicySettings, needs_old_logprobs
from padfree.train.critic import Critic
from padfree.train.engine import Engine
from padfree.train.metrics import reward_metrics
from padfree.train.rl.advantages import reverse_kl, signal_of, teacher_advantages, with_advantages
from padfree.train.rl.ahead import BatchesAhead
from padfree.train.rl.batch_times import BatchTimes
from padfree.train.rl.reference_model import Reference
from padfree.train.rl.update_batch import RolloutBatch, update_parts
from padfree.train.scorer import Scorer
from padfree.train.training_data import Batcher

MakeSamples = Callable[[Sequence[Any]], list[Sample]]
"""From the groups of a global batch to its samples, the same on every rank: sampling responses to prompts, say.

It may have `timings`, see `padfree.train.rl.batch_times`.
"""


class Batches:
    """The batches of a run, one after the other, on every rank the same."""

    def __init__(
        self,
        config: Config,
        engine: Engine,
        batcher: Batcher,
        *,
        reference: Reference | None,
        teacher: Scorer | None,
        critic: Critic | None,
        make_samples: MakeSamples | None,
        ahead: BatchesAhead | None,
    ) -> None:
        self.config, self.engine, self.batcher = config, engine, batcher
        self.reference, self.teacher, self.critic = reference, teacher, critic
        self.make_samples, self.ahead = make_samples, ahead
        self.end_tokens: tuple[int, ...] = ()  # what ends a response, where that is known
        self._had_labels = False  # whether any sample so far had a token to train
        self.groups = self.groups_without_signal = 0  # of all batches so far
        self.rollout_metrics: Callable[[], Mapping[str, float]] = dict  # of the batch that `make_samples` has just made

    @property
    def sampled(self) -> bool:
        """Whether the model writes the samples."""
        return self.make_samples is not None or self.ahead is not None

    @property
    def waits_for_updates(self) -> bool:
        """Whether a batch needs the model, or a reference, as the updates with the batches before it leave them."""
        settings = self.engine.settings.loss
        if self.sampled or not isinstance(settings, PolicySettings):
            return self.sampled
        asked = (self.reference, self.teacher, self.critic)
        return needs_old_logprobs(settings) or any(model is not None for model in asked)

    def without_signal(self) -> str | None:
        """A line if no batch of this start had an advantage other than 0, and no other term changed the weights."""
        loss = self.engine.settings.loss
        if not self.groups or self.groups_without_signal < self.groups or not isinstance(loss, PolicySettings):
            return None
        if loss.kl_coefficient or loss.entropy_coefficient or self.critic is not None or self.engine.router is not None:
            return None
        return (
            f"nothing was learned: none of {self.groups:,} groups had rewards that differ, so that every advantage was "
            "0; look at the rewards, or give prompts that the model answers rightly at times"
        )

    def cursor(self) -> dict[str, Any]:
        """The place in the data behind the batch that was taken last."""
        return self.batcher.state_dict() if self.ahead is None else self.ahead.cursor()

    def next(self, step: int) -> RolloutBatch | None:
        """None after the last. `step`: how many updates have been made, which is the version of the policy."""
        times = BatchTimes()
        if self.ahead is not None:
            with times.measure("sampling"):
                found = self.ahead.next(step)
            if found is None:
                return None
            number, samples = found
            times.split_sampling(self.ahead.timings)
            return self._prepared(distinct(samples), times, number)
        groups = next(self.batcher, None)
        if groups is None:
            return None
        if self.make_samples is None:
            return self._prepared(distinct(_flat(groups)), times, self.batcher.step)
        with times.measure("sampling"):
            samples = self.make_samples(groups)
        times.split_sampling(getattr(self.make_samples, "timings", {}))
        return self._prepared(distinct(samples), times, self.batcher.step)

    def _prepared(self, batch: list[Sample], times: BatchTimes, number: int) -> RolloutBatch:
        """A global batch with everything that its updates need besides the model as it is then."""
        self._had_labels = self._had_labels or any(sample.num_labels for sample in batch)
        if self.sampled and not self._had_labels:
            raise UserError(
                f"{self.config.rollout.source}",
                f"none of the {len(batch)} samples of batch {number} has a token to train",
                "let the policy write, what an environment adds is not trained",
            )
        parts = update_parts(len(batch), **self.minibatch_settings(number))
        settings = self.engine.settings.loss
        if not isinstance(settings, PolicySettings):
            if self.reference is not None:
                batch = self._with_reference(batch, times)
            sampled = self.sampled
            return RolloutBatch(
                samples=batch,
                parts=parts,
                metrics={**self._reward_metrics(batch), **self.rollout_metrics()} if sampled else {},
                times=times.metrics(sum(int(sample.mask.sum()) for sample in batch)) if sampled else {},
            )
        old = None
        if needs_old_logprobs(settings) or self.teacher is not None:
            with times.measure("old_logprobs"):
                old = self.engine.scorer.logprobs(batch)
        metrics = self._reward_metrics(batch) | dict(self.rollout_metrics())
        if self.critic is not None:
            with times.measure("critic"):
                batch, found = self.critic.judged(batch)
            metrics |= signal_of(batch, "gae").metrics() | found
        elif self.teacher is None:
            metrics |= signal_of(batch, self.config.loss.advantage).metrics()
            batch = with_advantages(batch, self.config.loss.advantage)
        else:
            assert old is not None
            with times.measure("teacher"):
                taught = self.teacher.logprobs(batch)
            batch = teacher_advantages(batch, taught, old)
            metrics |= signal_of(batch, "teacher").metrics() | {"reverse_kl": reverse_kl(batch)}
        self.groups += int(metrics["groups"])
        self.groups_without_signal += int(metrics["groups_without_signal"])
        if self.reference is not None:
            batch = self._with_reference(batch, times)
        return RolloutBatch(
            samples=batch,
            parts=parts,
            epochs=self.config.loss.epochs,
            old_logprobs=old if needs_old_logprobs(settings) else None,
            metrics=metrics,
            times=times.metrics(sum(int(sample.mask.sum()) for sample in batch)),
        )

    def _reward_metrics(self, batch: list[Sample]) -> dict[str, float]:
        sources = [source.label for source in self.config.data.sources]
        return reward_metrics(batch, end_tokens=self.end_tokens, sources=sources if len(sources) > 1 else ())

    def _with_reference(self, batch: list[Sample], times: BatchTimes) -> list[Sample]:
        """The same samples with the reference's log-probabilities of their tokens."""
        assert self.reference is not None
        with times.measure("reference"):
            found = self.reference.logprobs(batch)
        return [sample.with_numbers(ref_logprobs=values) for sample, values in zip(batch, found, strict=True)]

    def minibatch_settings(self, number: int) -> dict[str, int]:
        """What decides which samples of the batch with this number are in which of its updates."""
        loss = self.config.loss
        return {
            "epochs": loss.epochs,
            "mini_batches": loss.mini_batches,
            "seed": self.config.run.seed,
            "number": number,
        }


def _flat(groups: Sequence[Any]) -> list[Sample]:
    return [sample for group in groups for sample in group]


def distinct(samples: list[Sample]) -> list[Sample]:
    """The same samples; one that a batch has twice (small data, several epochs) gets a uid and a group of its own.

    The second time a row, a pair or a group of rollouts is there, it is another unit, weighed and compared by itself.
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
