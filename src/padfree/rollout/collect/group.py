"""A group: a prompt, its episodes, and the samples made from them.

Several modules fill in a group:

    batcher      RolloutGroup(prompt=p, size=3)                          batches are made of groups
    candidates   first=6                                                 its episodes have numbers 6 7 8 in the batch
    collector    name="rows.jsonl:4 (time 2)", episodes=(6, 7, 8)        the second group of the prompt in line 4
    samples      one for each leaf of each episode       their `Sample.group` is the `name` of the group

A leaf is a complete token sequence of an episode. An episode that branches has several leaves. `RolloutGroup` is a
sequence that contains its prompt `size` times. Plans and batchers therefore count a group as `size` samples. Advantages
compare the samples of a group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from padfree.config.rollout import RolloutConfig
from padfree.errors import UserError
from padfree.rollout.environment.play import Played
from padfree.rollout.prompts import Prompt
from padfree.sample import Sample


@dataclass(frozen=True, kw_only=True, eq=False)
class RolloutGroup(Sequence[Prompt]):
    """A prompt with `size` episodes. When they are played, `written_groups` stores them in `episodes`, in order."""

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
        """The numbers of the group's episodes in the batch."""
        return range(self.first, self.first + self.size)

    def samples(self, settings: RolloutConfig) -> list[Sample]:
        """Return one sample for each leaf of the episodes. The reward of a sample includes the overlong penalty."""
        samples = []
        for index, episode in enumerate(self.episodes, start=1):
            for place, leaf in enumerate(episode.leaves, start=1):
                assert leaf.reward is not None
                leaf_name = f" leaf {place}" if len(episode.leaves) > 1 else ""
                length = len(leaf.tokens) - len(self.prompt.tokens)
                samples.append(
                    Sample(
                        tokens=leaf.tokens,
                        loss_mask=leaf.sampled,
                        logprobs=leaf.logprobs,
                        kept=leaf.kept,
                        reward=leaf.reward - overlong_penalty(length, self.prompt.max_new_tokens, settings),
                        raw_reward=leaf.reward,
                        uid=f"{self.name} response {index}{leaf_name}",
                        group=self.name,
                        source=self.prompt.source,
                        routes=leaf.routes,
                        images=self.prompt.images,
                        rotary_positions=self.prompt.rotary_positions_of(len(leaf.tokens)),
                    )
                )
        return samples


def written_groups(groups: Sequence[RolloutGroup], played: Mapping[int, Played]) -> list[RolloutGroup]:
    """Return copies of the groups, each with a unique `name` and with the results of its `episodes`.

    `played`: the results of all episodes, keyed by episode number.
    """
    times: Counter[str] = Counter()
    written = []
    for group in groups:
        uid = group.prompt.uid
        times[uid] += 1
        name = uid if times[uid] == 1 else f"{uid} (time {times[uid]})"
        written.append(replace(group, name=name, episodes=tuple(played[number] for number in group.numbers)))
    return written


def check_recorded(played: Iterable[Played], settings: RolloutConfig) -> None:
    """Raise a `UserError` if the run replays routes, and an episode of this rank has a leaf without routes."""
    if settings.routing == "replay" and any(leaf.routes is None for one in played for leaf in one.leaves):
        raise UserError(
            "rollout.routing",
            f", but rollout.engine={settings.engine} returned a response without routes",
            "set rollout.routing=recompute",
            "replay",
        )


def overlong_penalty(length: int, max_new_tokens: int, settings: RolloutConfig) -> float:
    """Return the penalty for a leaf with `length` tokens after its prompt.

    The penalty is 0 up to a length of `max_new_tokens - rollout.overlong_buffer`. From there it grows linearly, to
    `rollout.overlong_penalty` at `max_new_tokens`.

    max_new_tokens 8, buffer 4, penalty 1        length    1 2 3 4 5    6   7    8
                                                 penalty   0 0 0 0 0.25 0.5 0.75 1
    """
    buffer = min(settings.overlong_buffer, max_new_tokens)
    over = length - (max_new_tokens - buffer)
    return settings.overlong_penalty * over / buffer if buffer and over > 0 else 0.0
