"""Evaluate the model on held-out data, as `[eval]` configures.

Held-out samples give the loss and other metrics (`HeldOut`). Held-out prompts give the reward, pass@1, pass@k and the
length of sampled responses (`SampledResponses`). The result is a dict such as {"eval/loss": 1.9}. It also
has `eval/SOURCE/loss` if there are several data sources.

An evaluation changes neither the weights, nor the position in the data, nor the random state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from padfree.config import EvalConfig, LossConfig
from padfree.data import Reward, load_reward
from padfree.optim.master_weights import compute_copies
from padfree.rollout import Prompt
from padfree.rollout.collect.collector import Collector
from padfree.rollout.collect.queued_batch import EpisodeOutcome
from padfree.rollout.group import RolloutGroup
from padfree.rollout.sampling_rng import GREEDY, response_keys
from padfree.sample import Sample
from padfree.sharding.parallelize import inside
from padfree.tasks.measures import PackMeasure
from padfree.tasks.reading import TrainingData
from padfree.tasks.task import Models, task_of
from padfree.train.determinism import random_state, restore_random_state
from padfree.train.engine import Engine
from padfree.train.finite_checks import check_metrics
from padfree.train.rl.reference_model import ReferenceModel
from padfree.train.scorer import Scorer
from padfree.train.step_pipeline import OnActivity

Evaluate = Callable[[int], dict[str, float]]
"""A function that evaluates the current weights and returns metrics. Its argument is the number of steps made so far.
Collective."""

EVALUATION_BATCH = 1 << 62
"""The batch number from which evaluations derive their sampling noise. No training batch has such a high number."""


# Held-out samples


class HeldOut:
    """Computes the loss and other metrics of held-out samples, which are packed as in training."""

    def __init__(
        self,
        scorer: Scorer,
        measure: PackMeasure,
        samples: Sequence[Sample],
        on_activity: OnActivity | None = None,
        *,
        prepare: Callable[[], Sequence[Sample]] | None = None,
    ) -> None:
        """`measure`: computes sums over a pack (one micro-batch), and metrics from the totals over all packs.

        `prepare`: if given, is called before each evaluation. It returns the samples with arrays that `measure` needs,
        e.g. the log-probabilities of the reference model.
        """
        self.scorer, self.measure, self.on_activity = scorer, measure, on_activity
        self.prepare = prepare or (lambda: samples)
        self.sources = sorted({str(sample.source) for sample in samples})
        self._source = torch.tensor([self.sources.index(str(sample.source)) for sample in samples])
        self._plan = scorer.packer.plan(samples, keep_groups=measure.keeps_groups)

    def __call__(self, step: int) -> dict[str, float]:
        scorer, mesh, measure = self.scorer, self.scorer.mesh, self.measure
        # float64 sums, divided once by counts over all ranks: the metrics do not depend on the number of ranks
        totals = torch.zeros(len(self.sources), 1 + len(measure.names), dtype=torch.float64, device=mesh.device)
        with evaluation_mode(scorer.model):
            samples = self.prepare()
        with evaluation_mode(scorer.model), compute_copies(scorer.model):
            packs, total = scorer.packer.packs(samples, self._plan), len(self._plan.packs_of(mesh.data.rank))
            for done, (batch, indices) in enumerate(packs):
                if self.on_activity is not None:
                    self.on_activity("evaluating", done, total)
                found = inside(scorer.model, measure, batch.local)
                if not batch.is_filler:
                    totals.index_add_(0, self._source[indices].to(mesh.device), found)
        dist.all_reduce(totals, group=mesh.loss.group)
        return by_source(dict(zip(self.sources, totals.tolist(), strict=True)), self._metrics)

    def _metrics(self, sums: Sequence[float]) -> dict[str, float]:
        count = sums[0] or math.nan  # without any sample, all metrics are NaN
        means = {name: total / count for name, total in zip(self.measure.names, sums[1:], strict=True)}
        return self.measure.metrics(means)


def by_source(
    sums: Mapping[str, Sequence[float]], metrics: Callable[[Sequence[float]], Mapping[str, float]]
) -> dict[str, float]:
    """Return the metrics `eval/NAME` over all data sources and, with several sources, `eval/SOURCE/NAME` for each.

    `sums`: for each source, sums over its samples, e.g. of their losses. `metrics` computes metrics by name from such
    sums.
    """
    total = [sum(column) for column in zip(*sums.values(), strict=True)]
    found = {f"eval/{name}": value for name, value in metrics(total).items()}
    for source, own in sums.items() if len(sums) > 1 else ():
        found |= {f"eval/{source}/{name}": value for name, value in metrics(own).items()}
    return found


# Held-out prompts


class SampledResponses:
    """Lets the sampler of the run generate responses to held-out prompts, and computes their rewards and pass rates."""

    def __init__(
        self,
        writer: Collector,
        engine: Engine,
        prompts: Sequence[Prompt],
        settings: EvalConfig,
        seed: int,
        on_activity: OnActivity | None = None,
        *,
        reward: Reward | None = None,
    ) -> None:
        """`writer` generates the responses. If `reward` is given, it replaces the reward function of the run."""
        self.writer, self.engine, self.settings, self.on_activity = writer, engine, settings, on_activity
        self.groups = [RolloutGroup(prompt=prompt, size=settings.samples_per_prompt) for prompt in prompts]
        self.reward = reward
        number = len(prompts) * settings.samples_per_prompt
        self._keys = (
            np.full(number, GREEDY, np.int64)
            if settings.greedy
            else response_keys(seed, EVALUATION_BATCH, np.arange(number, dtype=np.int64))
        )

    def __call__(self, step: int) -> dict[str, float]:
        shown: dict[str, Any] = {}
        if self.on_activity is not None:
            self.on_activity("evaluating", 0, 0)
            shown["on_sampling"] = partial(self.on_activity, "evaluating")
        with evaluation_mode(self.engine.model), compute_copies(self.engine.model):
            written = self.writer.evaluate(
                self.engine.model, self.groups, keys=self._keys, version=step, reward=self.reward, **shown
            )
        samples_per_prompt = self.settings.samples_per_prompt
        sums_by_source: dict[str, list[float]] = {}
        for number, group in enumerate(self.groups):
            own = written[number * samples_per_prompt : (number + 1) * samples_per_prompt]
            sums = sums_by_source.setdefault(group.prompt.source, [0.0] * 6)
            for index, value in enumerate(self._sums(own)):
                sums[index] += value
        return by_source(sums_by_source, self._metrics)

    def _sums(self, written: Sequence[EpisodeOutcome]) -> list[float]:
        """Return six sums over `written`, the responses to one prompt. `_metrics` unpacks the sums by name."""
        right = [one.reward >= self.settings.pass_threshold for one in written]
        return [
            1.0,
            sum(one.reward for one in written),
            float(sum(right)),
            float(any(right)),
            float(sum(one.num_tokens for one in written)),
            float(sum(not one.ended for one in written)),
        ]

    def _metrics(self, sums: Sequence[float]) -> dict[str, float]:
        prompts, reward, right, any_right, tokens, cut = sums
        samples_per_prompt = self.settings.samples_per_prompt
        found = {"reward": reward / (prompts * samples_per_prompt), "pass@1": right / (prompts * samples_per_prompt)}
        if samples_per_prompt > 1:
            found["pass@k"] = any_right / prompts
        return found | {
            "response_length": tokens / (prompts * samples_per_prompt),
            "response_cut": cut / (prompts * samples_per_prompt),
        }


# Selection


def make_evaluation(
    settings: EvalConfig,
    loss: LossConfig,
    engine: Engine,
    held_out: TrainingData | None,
    writer: Collector | None,
    reference: ReferenceModel | None = None,
    on_activity: OnActivity | None = None,
    *,
    seed: int,
) -> Evaluate | None:
    """Return the function that evaluates as `[eval]` configures, or None if `eval.path` is not set.

    The function raises an error if a metric is not finite.
    """
    if held_out is None:
        return None
    measure: Evaluate
    if writer is not None:
        prompts = [sample for sample in held_out.samples if isinstance(sample, Prompt)]
        reward = None if settings.reward is None else load_reward(settings.reward)
        measure = SampledResponses(writer, engine, prompts, settings, seed, on_activity, reward=reward)
    else:
        samples = [sample for sample in held_out.samples if isinstance(sample, Sample)]
        task, scorer = task_of(loss.command), engine.scorer
        models = Models(policy=scorer.logprobs, reference=None if reference is None else reference.logprobs)
        measure = HeldOut(
            scorer,
            task.measure(engine.micro_batch_loss, scorer.temperature),
            samples,
            on_activity,
            prepare=task.evaluation(samples, models, loss),
        )

    def checked(step: int) -> dict[str, float]:
        found = measure(step)
        check_metrics(found, step)
        return found

    return checked


@contextmanager
def evaluation_mode(model: PreTrainedModel) -> Iterator[None]:
    """Context manager that disables gradients and dropout, and restores the random state at its end."""
    state, training = random_state(), model.training
    model.train(False)
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)
        restore_random_state(state)
