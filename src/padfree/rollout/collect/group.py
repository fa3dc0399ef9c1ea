"""A group: a prompt, the episodes that answer it, and the samples they become.

    batcher      RolloutGroup(prompt=p, size=3)                          what a batch is made of
    candidates   first=6                                                 its episodes are numbers 6 7 8 of the batch
    collector    name="rows.jsonl:4 (time 2)", episodes=(6, 7, 8)        a prompt that a batch has twice is two groups
    samples      one for each leaf of each episode, all with `name` as their group: they are compared with each other

As a sequence it is its prompt, `size` times, which is how plans and batchers count it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from padfree.batch import Sample
from padfree.config.rollout import RolloutConfig
from padfree.rollout.environment.play import Played
from padfree.rollout.prompts import Prompt


@dataclass(frozen=True, kw_only=True, eq=False)
class RolloutGroup(Sequence[Prompt]):
    """A prompt with `size` episodes. Those it has been given are in the order of their numbers."""

    prompt: Prompt
    size: int
    first: int = 0
    name: str = ""
    episodes: tuple[Played, ...] = ()

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: Any) -> Any:
        return ((self.prompt,) * self.size)[index]

    @property
    def numbers(self) -> range:
        """Of its episodes in the batch."""
        return range(self.first, self.first + self.size)

    def samples(self, settings: RolloutConfig) -> list[Sample]:
        """A sample for each leaf, less what it loses for its length."""
        found = []
        for index, episode in enumerate(self.episodes, start=1):
            for place, leaf in enumerate(episode.leaves, start=1):
                assert leaf.reward is not None
                which = f" leaf {place}" if len(episode.leaves) > 1 else ""
                length = len(leaf.tokens) - len(self.prompt.tokens)
                found.append(
                    Sample(
                        tokens=leaf.tokens,
                        loss_mask=leaf.sampled,
                        logprobs=leaf.logprobs,
                        reward=leaf.reward - overlong_penalty(length, self.prompt.max_new_tokens, settings),
                        raw_reward=leaf.reward,
                        uid=f"{self.name} response {index}{which}",
                        group=self.name,
                        source=self.prompt.source,
                    )
                )
        return found


def written_groups(groups: Sequence[RolloutGroup], played: Mapping[int, Played]) -> list[RolloutGroup]:
    """The groups with their episodes, each under a name of its own."""
    times: Counter[str] = Counter()
    found = []
    for group in groups:
        uid = group.prompt.uid
        times[uid] += 1
        name = uid if times[uid] == 1 else f"{uid} (time {times[uid]})"
        found.append(replace(group, name=name, episodes=tuple(played[number] for number in group.numbers)))
    return found


def overlong_penalty(length: int, max_new_tokens: int, settings: RolloutConfig) -> float:
    """What a leaf of `length` tokens behind its prompt loses: nothing up to the buffer, then more with every token.

    room 8, buffer 4, penalty 1        length   1 2 3 4 5    6   7    8
                                       lost     0 0 0 0 0.25 0.5 0.75 1
    """
    buffer = min(settings.overlong_buffer, max_new_tokens)
    over = length - (max_new_tokens - buffer)
    return settings.overlong_penalty * over / buffer if buffer and over > 0 else 0.0
