"""From the groups of a global batch to its samples, by episodes of an environment.

    groups     (p p p) (q q q)            a prompt once for each episode; divided over all ranks
      -> plays                            seed, batch and number of an episode give its draws
      -> runner                           leaves with rewards, or failures
      -> filter                           as without an environment, by the rewards of all leaves of a group
      -> failed groups are left out       and listed in failures.jsonl
      -> samples                          every leaf one, in the order of groups, episodes and branches

All leaves of all episodes of a prompt are one group: they are compared with each other, and share prefixes.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel

from padfree.batch import Sample
from padfree.config import Config
from padfree.data import Reward, load_reward
from padfree.data.chat import ChatRenderer
from padfree.distributed import Mesh
from padfree.errors import UserError
from padfree.record.files import FAILURES, ROLLOUTS
from padfree.rollout.base import Sampler
from padfree.rollout.candidates import Candidates, Group, SparePrompts
from padfree.rollout.environment.choose import environment_name, load_episode
from padfree.rollout.environment.judge import Judge
from padfree.rollout.environment.policy import Words
from padfree.rollout.environment.runner import EpisodeRunner, Play, Played, RunnerSettings
from padfree.rollout.environment.trajectory import Leaf
from padfree.rollout.examples import ExamplesFile
from padfree.rollout.noise import response_keys
from padfree.rollout.prompts import Prompt
from padfree.rollout.writer import NUM_SHOWN, numbers_of, share_of, signals, told


class EpisodeWriter:
    """Prompts to rewarded samples, by episodes."""

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        sampler: Sampler,
        tokenizer: Any,
        prompts: Sequence[Prompt] = (),
        *,
        vocabulary: int,
        chat: ChatRenderer | None = None,
    ) -> None:
        """`prompts` are all of the run, for `rollout.filter` to take others from; `chat` renders messages.

        `vocabulary`: rows of the model's embedding matrix; other token ids of environments are refused.
        """
        settings = config.rollout
        self.config, self.mesh, self.sampler = config, mesh, sampler
        self.timings: dict[str, float] = {}  # seconds of the last batch besides episodes, by what they were spent on
        self.words = Words(tokenizer, chat, vocabulary)
        reward = None if settings.reward is None else load_reward(settings.reward)
        self._runner = EpisodeRunner(
            load_episode(settings),
            sampler,
            self.words,
            None if reward is None else Judge(reward, settings.reward_processes),
            RunnerSettings(
                name=environment_name(settings),
                most=settings.batch,
                timeout=settings.episode_timeout,
                skips=settings.on_failure == "skip",
                temperature=config.loss.temperature,
            ),
        )
        self._spare = SparePrompts(prompts, config.run.seed)
        self._batch_metrics: dict[str, float] = {}
        first = mesh.loss.rank == 0
        folder = Path(config.run.folder)
        self._examples = ExamplesFile(folder / ROLLOUTS) if first else None
        self._failures = ExamplesFile(folder / FAILURES) if first else None

    def samples(self, trained: PreTrainedModel, groups: Sequence[Group], *, batch: int, version: int) -> list[Sample]:
        """The samples of global batch number `batch`, written by `trained` after `version` optimizer steps.

        Every rank calls this alike and gets them all.
        """
        begin = time.perf_counter()
        self.sampler.update_weights(trained, version)
        self.timings = {"weight_exchange": time.perf_counter() - begin, "waiting": 0.0}
        candidates = Candidates(batch, groups, self.config.rollout, self._spare)
        played: dict[int, Played] = {}
        signal: dict[int, bool] = {}
        asked = candidates.begin()
        while asked:
            try:
                played |= self._played(candidates.groups, asked, batch)
            except UserError as error:
                self._list_failures(batch, [{"failure": str(error)}])
                raise
            signal |= signals(candidates.groups, asked, played)
            asked = candidates.more(signal)
        return self._finished(batch, candidates, signal, played)

    def write(
        self,
        trained: PreTrainedModel,
        groups: Sequence[Group],
        *,
        keys: NDArray[np.int64],
        version: int,
        reward: Reward | None = None,
    ) -> list[Played]:
        """One episode for each prompt of the groups, drawn with the noise of its key, in order.

        No part of a batch: for evaluations, where an episode that fails has earned nothing.
        """
        self.sampler.update_weights(trained, version)
        prompts, own = share_of(groups, range(len(groups)), self.mesh)
        plays = [Play(number=number, prompt=prompts[number], key=int(keys[number])) for number in own]
        judge = None if reward is None else Judge(reward)
        found = self._gathered(self._runner.play(plays, lambda said: told(said, self.mesh), judge))
        return [found[number] for number in range(len(prompts))]

    def metrics(self) -> Mapping[str, float]:
        """Of the last batch, as this rank saw it."""
        return {f"sampler/{name}": value for name, value in self.sampler.metrics().items()} | self._batch_metrics

    def close(self) -> None:
        self._runner.close()
        self.sampler.close()

    def _played(self, groups: Sequence[Group], asked: range, batch: int) -> dict[int, Played]:
        """The episodes of the groups that are asked for, of all ranks."""
        prompts, own = share_of(groups, asked, self.mesh)
        keys = response_keys(self.config.run.seed, batch, np.array(own, dtype=np.int64))
        plays = [
            Play(number=number, prompt=prompts[number], key=int(key)) for number, key in zip(own, keys, strict=True)
        ]
        return self._gathered(self._runner.play(plays, lambda said: told(said, self.mesh)))

    def _gathered(self, played: list[Played]) -> dict[int, Played]:
        begin = time.perf_counter()
        found = {one.number: one for part in told(played, self.mesh) for one in part}
        self.timings["waiting"] = self.timings.get("waiting", 0.0) + time.perf_counter() - begin
        return found

    def _finished(
        self, batch: int, candidates: Candidates, signal: Mapping[int, bool], played: Mapping[int, Played]
    ) -> list[Sample]:
        """The samples of the groups that are chosen and whole, with the numbers of the batch and its examples noted."""
        groups = candidates.groups
        failed = self._failed(batch, groups, played)
        chosen = [index for index in candidates.chosen(signal) if index not in failed]
        if not chosen:
            first = next(one.failure for one in played.values() if one.failure is not None)
            raise UserError(
                "rollout.on_failure",
                f"'skip', but every group of batch {batch} has failed, the first: {first}",
                f"see {FAILURES} in the run folder",
            )
        kept = [played[number] for index in chosen for number in numbers_of(groups, index)]
        self._batch_metrics = {
            **candidates.metrics(signal),
            **episode_metrics(kept),
            "episodes_failed": float(sum(one.failure is not None for one in played.values())),
            "groups_failed": float(len(failed)),
        }
        if self._examples is not None:
            shown = [(groups[index][0], played[numbers_of(groups, index).start]) for index in chosen[:NUM_SHOWN]]
            self._examples.write(batch, [self._example(prompt, one) for prompt, one in shown])
        return _samples([groups[index] for index in chosen], kept)

    def _failed(self, batch: int, groups: Sequence[Group], played: Mapping[int, Played]) -> set[int]:
        """Groups with an episode that failed, which is listed."""
        failed, lines = set(), []
        for index, group in enumerate(groups):
            numbers = numbers_of(groups, index)
            for number in numbers:
                if number in played and (failure := played[number].failure) is not None:
                    failed.add(index)
                    lines.append({"uid": group[0].uid, "episode": number - numbers.start + 1, "failure": failure})
        self._list_failures(batch, lines)
        return failed

    def _list_failures(self, batch: int, lines: list[dict[str, Any]]) -> None:
        if self._failures is not None and (lines or self._failures.path.exists()):
            self._failures.write(batch, lines)

    def _example(self, prompt: Prompt, played: Played) -> dict[str, Any]:
        leaf = played.leaves[0]
        return {
            "uid": prompt.uid,
            "prompt": self.words.decode(prompt.tokens),
            "response": leaf.text,
            "reward": leaf.reward,
            "tokens": int(leaf.sampled.sum()),
            "ended": leaf.ended,
            "turns": leaf.turns,
            "leaves": len(played.leaves),
        }


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


def _samples(groups: Sequence[Group], played: Sequence[Played]) -> list[Sample]:
    """A sample for each leaf. A prompt that a batch has twice makes two groups: each is compared by itself."""
    times: Counter[str] = Counter()
    samples: list[Sample] = []
    episodes = iter(played)
    for group in groups:
        uid = group[0].uid
        times[uid] += 1
        name = uid if times[uid] == 1 else f"{uid} (time {times[uid]})"
        for index, prompt in enumerate(group):
            leaves = next(episodes).leaves
            for place, leaf in enumerate(leaves):
                which = f" leaf {place + 1}" if len(leaves) > 1 else ""
                samples.append(
                    Sample(
                        tokens=leaf.tokens,
                        loss_mask=leaf.sampled,
                        logprobs=leaf.logprobs,
                        reward=leaf.reward,
                        raw_reward=leaf.reward,
                        uid=f"{name} response {index + 1}{which}",
                        group=name,
                        source=prompt.source,
                    )
                )
    return samples
