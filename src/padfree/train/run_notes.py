"""Notes that a run prints before its first step: unusual facts that are not errors."""

from __future__ import annotations

from collections.abc import Iterator

from padfree.config import Config, LossConfig
from padfree.config.functions import is_path, model_of
from padfree.data.rewards import BUILT_IN
from padfree.tasks.reading import TrainingData
from padfree.train.batcher import count_steps, lengths_of
from padfree.train.check_data import ModelLimits, untrained_samples


def run_notes(config: Config, source: TrainingData, limits: ModelLimits, dry: bool) -> Iterator[str]:
    """Yield the notes of a run. `dry`: a dry run, which imports no code of the user."""
    if config.optimizer.changes_nothing:
        yield f"optimizer.lr is 0: {'only the critic is trained' if config.critic.lr else 'no weight changes'}"
    if untrained := untrained_samples(source):
        count = f"{len(untrained):,} of {len(source.samples):,}"
        yield f"data.path: {count} samples have no token to train (the first is {source.place(untrained[0])})"
    if config.model.vision:
        yield "model.vision: estimates of time count image tokens, but not the computation of the vision tower"
    longest, trained = int(lengths_of(source.samples).max(initial=0)), limits.trained_positions
    if trained is not None and longest > trained:
        yield f"samples have up to {longest} tokens, but the model supports {trained} (max_position_embeddings)"
    steps = config.run.steps
    if steps is not None and config.data.epochs is not None:
        steps_in_data = count_steps(config, source, enough=steps)
        if steps_in_data < steps:
            end = "" if config.schedule.kind == "constant" else f", before the {config.schedule.kind} schedule ends"
            yield (
                f"run.steps is {steps}, but the data ends after about {steps_in_data} steps{end}; set "
                f"run.steps={steps_in_data}, or data.epochs=none"
            )
    own_function = config.rollout.reward is not None and model_of(config.rollout.reward) is None
    yield from _warmup_notes(config, source)
    yield from _ratio_notes(config.loss)
    if dry and own_function and config.rollout.reward not in BUILT_IN:
        yield f"rollout.reward {config.rollout.reward} is not imported by a dry run, so it has not been checked"
    if dry and config.rollout.environment is not None:
        name = config.rollout.environment
        yield f"rollout.environment {name} is not imported by a dry run, so it has not been checked"
    if dry and is_path(config.loss.kind):
        yield f"loss.kind {config.loss.kind} is not imported by a dry run, so it has not been checked"


def _warmup_notes(config: Config, source: TrainingData) -> Iterator[str]:
    """Yield a note for each warmup that is longer than the data lasts. `Config` compares warmups with `run.steps`."""
    if config.data.epochs is None:
        return
    warmups = [("schedule.warmup", config.schedule.warmup, "the learning rate never reaches optimizer.lr")]
    if config.loss.advantage == "gae" and config.critic.warmup:
        warmups.append(("critic.warmup", config.critic.warmup + 1, "the policy is never trained"))
    for setting, steps, effect in warmups:
        if (steps_in_data := count_steps(config, source, enough=steps)) < steps:
            yield f"{setting} is too long, because the data ends after about {steps_in_data} steps: {effect}; lower it"


def _ratio_notes(loss: LossConfig) -> Iterator[str]:
    """Yield a note if the ratio π / π_old is 1 in every update although the weights have changed."""
    updates = loss.epochs * loss.mini_batches
    reused = loss.task.command == "rl" and loss.old_policy == "current" and updates > 1
    if reused and hasattr(loss.policy().objective, "high"):
        yield (
            f"loss.old_policy=current: the ratio is 1 in all {updates} updates with a rollout batch, so "
            f"loss.kind={loss.kind} clips nothing; set loss.old_policy=trainer"
        )
