"""A rollout group: a prompt, the episodes that are played for it, and the samples made from them.

In this example, a prompt p has three episodes:

1. `RolloutGroup(prompt=p, size=3, first=6)`: the episodes have the indices 6, 7 and 8 in the batch.
2. Each episode is described by a `Play` before it is played, and by a `Played` (its result) afterwards.
3. `written_groups` adds the results and a unique name to the group.
4. `samples` returns one sample for each leaf of each episode.

A leaf is a complete token sequence of an episode. An episode that branches has several leaves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from padfree.config.rollout import RolloutConfig
from padfree.errors import UserError
from padfree.images import Image
from padfree.kept_sets import KeptSets
from padfree.rollout.base import Response
from padfree.rollout.prompts import Prompt
from padfree.routes import Routes
from padfree.sample import Sample


class LeafImages(NamedTuple):
    """The images of a leaf (a sequence that becomes a sample), if they differ from those of its prompt."""

    images: tuple[Image, ...]
    rotary_positions: NDArray[np.int64] | None  # [P, n] if positions depend on images: `padfree.model.vision`


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Leaf:
    """A leaf of an episode: a complete token sequence, which becomes a sample. An episode that branches has several.

    Leaves can be pickled, so that they can be sent to other ranks.
    """

    tokens: NDArray[np.int64]  # [n]
    sampled: NDArray[np.bool_]  # [n]
    logprobs: NDArray[np.float32]  # [n], 0 for tokens that were not sampled
    versions: NDArray[np.int64]  # [n] policy version of each token, 0 for tokens that were not sampled
    ended: bool
    turns: int
    text: str  # the text after the prompt
    reward: float | None = None  # None: a reward model computes it when the batch is complete
    answer: str | None = None  # the text that the reward gets instead of `text`
    routes: Routes | None = None  # [n, R, k], see `padfree.routes`
    kept: KeptSets | None = None  # [n] the ids among which each token was sampled; None: the whole vocabulary
    num_kept: int = 0  # number of ids in `kept`, which other ranks know too
    images: LeafImages | None = None  # None: those of the prompt


def kept_fields(sets: KeptSets | None) -> dict[str, Any]:
    """Return the arguments `kept` and `num_kept` of `Leaf`, or no arguments if truncation excluded no ids.

    `kept` holds, for each token, the ids from which it was sampled. `num_kept` is the total number of stored ids.
    """
    return {} if sets is None or not len(sets.ids) else {"kept": sets, "num_kept": len(sets.ids)}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Played:
    """The result of an episode: its leaves, the token sequences that become samples. A failed episode has no leaves."""

    number: int
    leaves: tuple[Leaf, ...] = ()
    failure: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    counts: Mapping[str, float] = field(default_factory=dict)

    @property
    def rewards(self) -> tuple[float, ...]:
        """The rewards of the leaves (the sequences that become samples). A reward that is not known yet is left out."""
        return tuple(leaf.reward for leaf in self.leaves if leaf.reward is not None)

    @property
    def reward(self) -> float:
        """The mean reward of the leaves (the sequences that become samples); 0 if the episode failed."""
        return sum(self.rewards) / max(len(self.rewards), 1)

    @property
    def num_tokens(self) -> int:
        """The number of sampled tokens in all samples of the episode. Tokens that two samples share count twice."""
        return sum(int(leaf.sampled.sum()) for leaf in self.leaves)

    @property
    def versions(self) -> NDArray[np.int64]:
        """The policy versions of the sampled tokens of all leaves (token sequences) of the episode, concatenated."""
        return np.concatenate([np.zeros(0, np.int64), *(leaf.versions[leaf.sampled] for leaf in self.leaves)])

    @property
    def ended(self) -> bool:
        return bool(self.leaves) and all(leaf.ended for leaf in self.leaves)


@dataclass(frozen=True, kw_only=True, eq=False)
class RolloutGroup(Sequence[Prompt]):
    """A prompt with `size` episodes. `first`: the index of the first episode in the batch.

    `episodes` holds the results of the played episodes, in order. It is empty until `written_groups` fills it.
    """

    prompt: Prompt
    size: int
    first: int = 0
    name: str = ""
    episodes: tuple[Played, ...] = ()

    def __len__(self) -> int:
        return self.size  # plans and batchers count a group as `size` samples

    def __getitem__(self, index: Any) -> Any:
        return ((self.prompt,) * self.size)[index]

    @property
    def numbers(self) -> range:
        """The indices of the group's episodes in the batch."""
        return range(self.first, self.first + self.size)

    def samples(self, settings: RolloutConfig) -> list[Sample]:
        """Return the samples of the group's episodes: one for each leaf, i.e. for each path of an episode.

        The reward of a sample is that of the leaf minus the overlong penalty.
        """
        samples = []
        for index, episode in enumerate(self.episodes, start=1):
            for place, leaf in enumerate(episode.leaves, start=1):
                assert leaf.reward is not None
                leaf_name = f" leaf {place}" if len(episode.leaves) > 1 else ""
                length = len(leaf.tokens) - len(self.prompt.tokens)
                images = leaf.images or LeafImages(
                    self.prompt.images, self.prompt.rotary_positions_of(len(leaf.tokens))
                )
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
                        images=images.images,
                        rotary_positions=images.rotary_positions,
                    )
                )
        return samples


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Play:
    """An episode to play: its index in the batch (`number`), its group and its random key."""

    number: int
    group: RolloutGroup
    key: int
    partial: Response | None = None  # a response, complete or partial, from a checkpoint or the response log

    @property
    def prompt(self) -> Prompt:
        return self.group.prompt


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Watcher:
    """Callbacks during episodes. They are called in threads of the sampler, of rewards and of the event loop."""

    on_progress: Callable[[int], None] = lambda done: None
    """Called with the number of responses finished so far."""

    on_responses: Callable[[Sequence[tuple[int, Response]]], None] = lambda responses: None
    """Called with (index of the episode in the batch, response) pairs, so that the responses can be stored.

    Each response has finished, or a weight sync has interrupted it and it can be continued. Responses of an
    environment's episodes are not passed.
    """

    on_played: Callable[[Played], None] = lambda played: None
    on_failed: Callable[[str], None] = lambda line: None
    """Called with the message of an error that ends all episodes."""


def written_groups(groups: Sequence[RolloutGroup], played: Mapping[int, Played]) -> list[RolloutGroup]:
    """Return copies of the groups, each with a unique `name`, and with the results of its episodes in `episodes`.

    `played`: the results of all episodes, keyed by the index of the episode in the batch.
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
    """Raise a `UserError` if `rollout.routing` is "replay", but a response does not record the experts of its tokens.

    `played`: the episodes of this rank.
    """
    if settings.routing == "replay" and any(leaf.routes is None for one in played for leaf in one.leaves):
        raise UserError(
            "rollout.routing",
            f"needs the experts of each token, but rollout.engine={settings.engine} returned a response without them",
            "set rollout.routing=recompute",
            "replay",
        )


def overlong_penalty(length: int, max_new_tokens: int, settings: RolloutConfig) -> float:
    """Return the reward penalty of a sample with `length` tokens after its prompt.

    The penalty is 0 up to the length `max_new_tokens - rollout.overlong_buffer`. Then it grows linearly, to
    `rollout.overlong_penalty` at `max_new_tokens`.
    """
    buffer = min(settings.overlong_buffer, max_new_tokens)
    over = length - (max_new_tokens - buffer)
    return settings.overlong_penalty * over / buffer if buffer and over > 0 else 0.0
