"""What a run records about a collected batch: metrics, a few responses, and failed episodes.

metrics of the batch    `batch_metrics`; also `queue_metrics` if `rollout.staleness` is above 0
rollouts.jsonl          the first response of the first groups, written by the first rank
failures.jsonl          the failed episodes, if there are any
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from padfree.config.rollout import RolloutConfig
from padfree.errors import UserError
from padfree.record.file_names import FAILURES, ROLLOUTS
from padfree.record.metrics_file import line_number
from padfree.rollout.group import Leaf, Played, RolloutGroup
from padfree.sample import Sample


def batch_metrics(
    groups: Sequence[RolloutGroup], samples: Sequence[Sample], settings: RolloutConfig, *, failed: tuple[int, int]
) -> dict[str, float]:
    """Return metrics of a batch.

    `groups`: the groups that the batch trains on. `failed`: the number of failed episodes, and the number of groups
    with a failed episode. `failed` also counts groups that were sampled for the batch but are not trained on.
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
    """Return metrics of the episodes of a batch.

    The metrics are sizes, means of the metrics that the environment reports and, for an agent program
    (`rollout.agent`), the numbers of API calls by kind.
    """
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
    """Return how many tokens of `leaf` the environment has added after the first turn of the policy.

    A leaf is a complete token sequence of an episode.
    """
    return int((~leaf.sampled[int(leaf.sampled.argmax()) :]).sum())


def queue_metrics(
    groups: Sequence[RolloutGroup],
    version: int,  # policy version at which the batch is trained
    oldest: int,  # maximum age of a token that the run allows
    *,
    waiting: tuple[int, int],  # number of finished and number of unfinished groups in the queue
    dropped: int,  # number of groups that are sampled again because their tokens are too old
    sampler: Mapping[str, float],  # the sampler's metrics
) -> dict[str, float]:
    """Return metrics of a batch that was sampled ahead of training: ages of its tokens, and state of the batch queue.

    The age of a token is `version` minus the policy version that sampled the token.
    """
    ages = version - np.concatenate([one.versions for group in groups for one in group.episodes])
    assert ages.min() >= 0, "a token is newer than the current policy version"
    assert ages.max() <= oldest, "a token is older than rollout.staleness allows, but its group was not dropped"
    metrics = {
        "version_age": float(ages.mean()),
        "version_age_max": float(ages.max()),
        "queue_finished": float(waiting[0]),
        "queue_unfinished": float(waiting[1]),
        "groups_dropped": float(dropped),
    }
    speed = sampler.get("tokens_per_second")
    return metrics if speed is None else {**metrics, "sampler_tokens_per_second": speed}


class ResponseExamples:
    """A JSON Lines file in which each line belongs to a batch.

    When a resumed run repeats some batches, their earlier lines are removed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._trimmed = False

    def write(self, batch: int, examples: Sequence[dict[str, Any]]) -> None:
        lines = [json.dumps({"batch": batch, **one}, ensure_ascii=False) + "\n" for one in examples]
        try:
            if not self._trimmed:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self.path.write_text("".join(self._before(batch)), encoding="utf-8")
                self._trimmed = True
            with self.path.open("a", encoding="utf-8") as file:
                file.writelines(lines)
        except OSError as error:
            raise UserError(
                "run.folder",
                f"{self.path} cannot be written ({error.strerror or error})",
                "free disk space, or set another folder",
            ) from error

    def _before(self, batch: int) -> list[str]:
        """Return the lines of the file that belong to batches before `batch`.

        An incomplete line, which was being written when the run was killed, is left out.
        """
        kept: list[str] = []
        if self.path.exists():
            with self.path.open(encoding="utf-8", newline="\n") as file:  # a response may contain other line breaks
                for number, line in enumerate(file, start=1):
                    if not line.endswith("\n") or line_number(self.path, number, line, "batch") >= batch:
                        break
                    kept.append(line)
        return kept


class BatchFiles:
    """The files `rollouts.jsonl` and `failures.jsonl` of the run folder."""

    def __init__(self, folder: Path, decode: Callable[[NDArray[Any]], str], *, writes: bool) -> None:
        """`decode`: converts token ids to text. `writes`: whether this rank writes `rollouts.jsonl` and
        `failures.jsonl`.
        """
        self._responses, self._failures = ResponseExamples(folder / ROLLOUTS), ResponseExamples(folder / FAILURES)
        self._decode, self._writes = decode, writes

    def write_responses(self, batch: int, groups: Sequence[RolloutGroup], *, with_turns: bool) -> None:
        """Write one line per rollout group, with the text of its first episode.

        If this episode branches, only the text of its first path is written.
        """
        if self._writes:
            self._responses.write(batch, [self._line(group, with_turns) for group in groups])

    def _line(self, group: RolloutGroup, with_turns: bool) -> dict[str, Any]:
        leaves = group.episodes[0].leaves
        line = {
            "uid": group.prompt.uid,
            "prompt": self._decode(group.prompt.tokens),
            "response": leaves[0].text,
            "reward": leaves[0].reward,
            "tokens": int(leaves[0].sampled.sum()),
            "ended": leaves[0].ended,
        }
        return {**line, "turns": leaves[0].turns, "leaves": len(leaves)} if with_turns else line

    def write_failures(self, batch: int, lines: Sequence[dict[str, Any]]) -> None:
        """Write a line about each failed episode. Without failures, no file is created."""
        if self._writes and (lines or self._failures.path.exists()):
            self._failures.write(batch, lines)
