"""The numbers of a batch that was collected, by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from padfree.batch import Sample
from padfree.config.rollout import RolloutConfig
from padfree.rollout.collect.group import RolloutGroup
from padfree.rollout.environment.play import Played
from padfree.rollout.environment.trajectory import Leaf


def batch_metrics(
    groups: Sequence[RolloutGroup], samples: Sequence[Sample], settings: RolloutConfig, *, failed: tuple[int, int]
) -> dict[str, float]:
    """Of the groups that are trained; `failed`: episodes and groups, of all that were asked for."""
    found: dict[str, float] = {}
    if settings.has_episodes:
        found |= episode_metrics([one for group in groups for one in group.episodes])
    if settings.has_episodes or settings.on_failure == "skip":
        found |= {"episodes_failed": float(failed[0]), "groups_failed": float(failed[1])}
    if settings.overlong_buffer:
        lost = [sample.raw_reward - sample.reward for sample in samples if sample.reward is not None]
        found |= {
            "overlong_share": sum(value > 0 for value in lost) / len(lost),
            "overlong_penalty": sum(lost) / len(lost),
            "raw_reward": sum(sample.raw_reward for sample in samples) / len(samples),
        }
    return found


def episode_metrics(played: Sequence[Played]) -> dict[str, float]:
    """Of the episodes of a batch: means of what they measured themselves, sums of what a gateway has counted."""
    leaves = [leaf for one in played for leaf in one.leaves]
    found = {
        "episodes": float(len(played)),
        "samples_per_episode": len(leaves) / len(played),
        "turns": sum(leaf.turns for leaf in leaves) / len(leaves),
        "environment_tokens": sum(_added(leaf) for leaf in leaves) / len(leaves),
    }
    for name in sorted({name for one in played for name in one.metrics}):
        values = [one.metrics[name] for one in played if name in one.metrics]
        found[f"environment/{name}"] = sum(values) / len(values)
    if any(one.counts for one in played):
        for name in ("calls", "cuts", "conversations", "refused", "drawn_otherwise"):
            found[f"agent/{name}"] = sum(one.counts.get(name, 0.0) for one in played)
    return found


def _added(leaf: Leaf) -> int:
    """Tokens that the environment has added behind the first turn."""
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
    """How old the tokens are that are trained after `version` steps, and what waits behind them."""
    ages = version - np.concatenate([one.versions for group in groups for one in group.episodes])
    assert ages.min() >= 0, "no token is written by weights that are still to come"
    assert ages.max() <= oldest, "older groups are dropped when they are put in"
    found = {
        "version_age": float(ages.mean()),
        "version_age_max": float(ages.max()),
        "queue_finished": float(waiting[0]),
        "queue_unfinished": float(waiting[1]),
        "groups_dropped": float(dropped),
    }
    speed = sampler.get("tokens_per_second")
    return found if speed is None else {**found, "sampler_tokens_per_second": speed}
