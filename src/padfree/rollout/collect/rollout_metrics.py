"""Metrics of a collected batch, by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from padfree.config.rollout import RolloutConfig
from padfree.rollout.collect.group import RolloutGroup
from padfree.rollout.environment.play import Played
from padfree.rollout.environment.trajectory import Leaf
from padfree.sample import Sample


def batch_metrics(
    groups: Sequence[RolloutGroup], samples: Sequence[Sample], settings: RolloutConfig, *, failed: tuple[int, int]
) -> dict[str, float]:
    """Return metrics of the groups that the batch trains on.

    `failed`: the pair (number of failed episodes, number of failed groups), counted over all requested episodes and
    groups, not only over the groups of the batch.
    """
    metrics: dict[str, float] = {}
    if settings.has_episodes:
        metrics |= episode_metrics([one for group in groups for one in group.episodes])
    if settings.has_episodes or settings.on_failure == "skip":
        metrics |= {"episodes_failed": float(failed[0]), "groups_failed": float(failed[1])}
    leaves = [leaf for group in groups for one in group.episodes for leaf in one.leaves]
    if any(leaf.num_kept for leaf in leaves):
        sampled = sum(int(np.count_nonzero(leaf.sampled)) for leaf in leaves)
        metrics |= {
            "kept_ids": sum(leaf.num_kept for leaf in leaves) / sampled,
            "kept_bytes": 4.0 * sum(leaf.num_kept + len(leaf.tokens) for leaf in leaves),
        }
    if settings.overlong_buffer:
        penalties = [sample.raw_reward - sample.reward for sample in samples if sample.reward is not None]
        metrics |= {
            "overlong_share": sum(value > 0 for value in penalties) / len(penalties),
            "overlong_penalty": sum(penalties) / len(penalties),
            "raw_reward": sum(sample.raw_reward for sample in samples) / len(samples),
        }
    return metrics


def episode_metrics(played: Sequence[Played]) -> dict[str, float]:
    """Return metrics of a batch's episodes: means of the metrics that they report, sums of the gateway's counters."""
    leaves = [leaf for one in played for leaf in one.leaves]
    metrics = {
        "episodes": float(len(played)),
        "samples_per_episode": len(leaves) / len(played),
        "turns": sum(leaf.turns for leaf in leaves) / len(leaves),
        "environment_tokens": sum(_added(leaf) for leaf in leaves) / len(leaves),
    }
    for name in sorted({name for one in played for name in one.metrics}):
        values = [one.metrics[name] for one in played if name in one.metrics]
        metrics[f"environment/{name}"] = sum(values) / len(values)
    if any(one.counts for one in played):
        for name in ("calls", "cuts", "conversations", "refused", "sampling_overridden"):
            metrics[f"agent/{name}"] = sum(one.counts.get(name, 0.0) for one in played)
    return metrics


def _added(leaf: Leaf) -> int:
    """Return the number of tokens that the environment added after the first turn."""
    return int((~leaf.sampled[int(leaf.sampled.argmax()) :]).sum())


def queue_metrics(
    groups: Sequence[RolloutGroup],
    version: int,
    oldest: int,
    *,
    waiting: tuple[int, int],
    dropped: int,
    sampler: Mapping[str, float],
) -> dict[str, float]:
    """Return metrics of token ages and of the queue, for a batch that is trained at policy version `version`.

    `oldest`: the maximum age that the run allows. `waiting`: the numbers of finished and of unfinished groups in the
    queue.
    """
    ages = version - np.concatenate([one.versions for group in groups for one in group.episodes])
    assert ages.min() >= 0, "a token is newer than the current policy version"
    assert ages.max() <= oldest, "older groups are dropped when they are queued"
    metrics = {
        "version_age": float(ages.mean()),
        "version_age_max": float(ages.max()),
        "queue_finished": float(waiting[0]),
        "queue_unfinished": float(waiting[1]),
        "groups_dropped": float(dropped),
    }
    speed = sampler.get("tokens_per_second")
    return metrics if speed is None else {**metrics, "sampler_tokens_per_second": speed}
