"""From the groups of a global batch to its samples, whichever engine samples them.

    groups of a global batch   (p p p) (q q q)         a prompt once for each response to it
      -> requests              p0 p1 p2 | q0 q1 q2     divided over all ranks, context ranks too: whole groups as far
                                                       as equal shares allow
      -> sampler               update_weights, sample
      -> rewards               by who asked for the response
      -> filter                groups whose rewards are all equal are replaced (`candidates`), if that is wanted
      -> samples               p0 p1 p2 q0 q1 q2       gathered, the same order on every rank

What is drawn depends on the seed, the number of the global batch and the number of the response in it, so that another
number of ranks, or a resumed run, sees the same rollouts (up to rounding of the logits).
"""

from __future__ import annotations

import inspect
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from transformers import PreTrainedModel

from padfree.batch import Sample
from padfree.config import Config
from padfree.config.rollout import RolloutConfig
from padfree.data import Reward, load_reward
from padfree.distributed import Mesh, watching
from padfree.errors import UserError
from padfree.record.files import ROLLOUTS
from padfree.rollout.base import Response, Sampler, SamplingRequest
from padfree.rollout.candidates import Candidates, Group, SparePrompts, has_signal, overlong_penalty
from padfree.rollout.examples import ExamplesFile
from padfree.rollout.journal import Journal
from padfree.rollout.noise import response_keys
from padfree.rollout.prompts import Prompt
from padfree.rollout.within import call_within

OnSampling = Callable[[int, int], None]
"""Called with the number of this rank's responses that are finished, and of those it has asked for."""

NUM_SHOWN = 4
"""How many groups of a batch show their first response in the file of examples."""


Judge = Callable[[Sequence[tuple[Prompt, str]]], list[float]]
"""Rewards of this rank's responses: prompts and texts to numbers. A collective of all ranks."""


@dataclass(frozen=True, slots=True, eq=False)
class Written:
    """A response, and what it earned. Travels between ranks."""

    number: int  # in the global batch
    response: Response
    text: str
    reward: float  # as the function gave it

    @property
    def rewards(self) -> tuple[float, ...]:
        return (self.reward,)

    @property
    def versions(self) -> NDArray[np.int64]:
        return self.response.token_versions

    @property
    def num_tokens(self) -> int:
        return len(self.response.tokens)

    @property
    def ended(self) -> bool:
        return self.response.ended


class Rewarded(Protocol):
    """What a number of the batch has earned: one reward, or one for each leaf of an episode; none where it failed."""

    @property
    def rewards(self) -> tuple[float, ...]: ...


class RolloutWriter:
    """Prompts to rewarded samples, by a sampler."""

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        sampler: Sampler,
        tokenizer: Any,
        prompts: Sequence[Prompt] = (),
        judge: Judge | None = None,
    ) -> None:
        """`prompts` are all of the run, for `rollout.filter` to take others from. `judge` is a model as the reward."""
        assert config.rollout.reward is not None
        self.config, self.mesh, self.sampler, self.tokenizer = config, mesh, sampler, tokenizer
        self.judge = judge
        self.reward = load_reward(config.rollout.reward) if judge is None else None
        self.journal: Journal | None = None  # of the responses since the last checkpoint
        self.on_sampling: OnSampling | None = None
        self.timings: dict[str, float] = {}  # seconds of the last batch besides sampling, by what they were spent on
        self._from_journal = 0  # responses of the last batch that were not sampled again
        self._spare = SparePrompts(prompts, config.run.seed)
        self._batch_metrics: dict[str, float] = {}
        self._examples = ExamplesFile(Path(config.run.folder) / ROLLOUTS) if mesh.loss.rank == 0 else None

    def samples(self, trained: PreTrainedModel, groups: Sequence[Group], *, batch: int, version: int) -> list[Sample]:
        """The samples of global batch number `batch`, written by `trained` after `version` optimizer steps.

        Every rank calls this alike and gets them all.
        """
        begin = time.perf_counter()
        self.sampler.update_weights(trained, version)
        self.timings = {"weight_exchange": time.perf_counter() - begin, "rewards": 0.0, "waiting": 0.0}
        candidates = Candidates(batch, groups, self.config.rollout, self._spare)
        written: dict[int, Written] = {}
        signal: dict[int, bool] = {}
        asked = candidates.begin()
        while asked:
            own = self._written(candidates.groups, asked, batch, version)
            begin = time.perf_counter()
            written |= self._gathered(*own)
            self.timings["waiting"] += time.perf_counter() - begin
            signal |= signals(candidates.groups, asked, written)
            asked = candidates.more(signal)
        return self._finished(batch, candidates, signal, written)

    def write(
        self,
        trained: PreTrainedModel,
        groups: Sequence[Group],
        *,
        keys: NDArray[np.int64],
        version: int,
        reward: Reward | None = None,
        on_sampling: OnSampling | None = None,
    ) -> list[Written]:
        """One response with its reward for each prompt of the groups, drawn with the noise of its key, in order.

        No part of a batch: for evaluations.
        """
        self.sampler.update_weights(trained, version)
        prompts, own = share_of(groups, range(len(groups)), self.mesh)
        requests = [
            SamplingRequest(tokens=prompts[number].tokens, room=prompts[number].room, key=int(keys[number]))
            for number in own
        ]
        callbacks: dict[str, Any] = {}
        if on_sampling is not None:
            callbacks = self._callbacks(on_progress=lambda done: on_sampling(done, len(requests)))
        responses = self.sampler.sample(requests, **callbacks)
        written: list[Written] = []
        error = None
        try:
            written = self._all_rewarded(own, responses, prompts, reward)
        except UserError as caught:
            error = str(caught)
        found = self._gathered(written, error)
        return [found[number] for number in range(len(prompts))]

    def metrics(self) -> Mapping[str, float]:
        """Of the last batch, as this rank saw it."""
        return {f"sampler/{name}": value for name, value in self.sampler.metrics().items()} | self._batch_metrics

    def close(self) -> None:
        self.sampler.close()

    def _finished(
        self, batch: int, candidates: Candidates, signal: Mapping[int, bool], written: Mapping[int, Written]
    ) -> list[Sample]:
        """The samples of the groups that are chosen, with the numbers of the batch and its examples noted."""
        chosen = candidates.chosen(signal)
        self._batch_metrics = candidates.metrics(signal)
        if self._from_journal:
            self._batch_metrics["responses_from_journal"] = float(self._from_journal)
            self._from_journal = 0
        groups = [candidates.groups[index] for index in chosen]
        ordered = [written[number] for index in chosen for number in numbers_of(candidates.groups, index)]
        if self._examples is not None:
            prompts = [group[0] for group in groups]
            firsts = np.cumsum([0, *map(len, groups)])[:-1][:NUM_SHOWN]
            shown = [self._example(prompt, ordered[first]) for prompt, first in zip(prompts, firsts, strict=False)]
            self._examples.write(batch, shown)
        samples = _samples(groups, ordered, self.config.rollout)
        if self.config.rollout.overlong_buffer:
            lost = [sample.raw_reward - sample.reward for sample in samples if sample.reward is not None]
            self._batch_metrics |= {
                "overlong_share": sum(value > 0 for value in lost) / len(lost),
                "overlong_penalty": sum(lost) / len(lost),
                "raw_reward": sum(sample.raw_reward for sample in samples) / len(samples),
            }
        return samples

    def _requests(self, prompts: Sequence[Prompt], batch: int, numbers: Sequence[int]) -> list[SamplingRequest]:
        """For these responses of all that a batch may ask for."""
        keys = response_keys(self.config.run.seed, batch, np.array(numbers, dtype=np.int64))
        return [
            SamplingRequest(tokens=prompts[number].tokens, room=prompts[number].room, key=int(key))
            for number, key in zip(numbers, keys, strict=True)
        ]

    def _written(
        self, groups: Sequence[Group], asked: range, batch: int, version: int
    ) -> tuple[list[Written], str | None]:
        """This rank's responses of the groups that are asked for, and what was wrong with a reward."""
        prompts, own = share_of(groups, asked, self.mesh)
        responses = self._responses(batch, own, self._requests(prompts, batch, own), version)
        if self.journal is not None and self.journal.failure is not None:
            return [], self.journal.failure
        begin = time.perf_counter()
        try:
            written = self._all_rewarded(own, responses, prompts)
        except UserError as error:
            return [], str(error)
        self.timings["rewards"] += time.perf_counter() - begin
        return written, None

    def _all_rewarded(
        self,
        numbers: Sequence[int],
        responses: Sequence[Response],
        prompts: Sequence[Prompt],
        reward: Reward | None = None,
    ) -> list[Written]:
        """This rank's responses, by their numbers among `prompts`, with their rewards."""
        pairs = zip(numbers, responses, strict=True)
        if reward is not None or self.judge is None:
            return [self._rewarded(number, response, prompts[number], reward) for number, response in pairs]
        texts = [self._text_of(response) for response in responses]
        earned = self.judge([(prompts[number], text) for number, text in zip(numbers, texts, strict=True)])
        return [
            Written(number, response, text, value)
            for (number, response), text, value in zip(pairs, texts, earned, strict=True)
        ]

    def _responses(
        self, batch: int, numbers: Sequence[int], requests: Sequence[SamplingRequest], version: int
    ) -> list[Response]:
        """Those of the journal, if these weights have written them, and the others from the sampler."""
        found: dict[int, Response] = {}
        for place, (number, request) in enumerate(zip(numbers, requests, strict=True)):
            kept = None if self.journal is None else self.journal.find(batch, number, request.tokens)
            if kept is not None and kept.is_whole(request.room) and (kept.token_versions == version).all():
                found[place] = kept
        missing = [place for place in range(len(requests)) if place not in found]

        def progress(done: int) -> None:
            if self.on_sampling is not None:
                self.on_sampling(len(requests) - len(missing) + done, len(requests))

        def finished(responses: Sequence[tuple[int, Response]]) -> None:
            if self.journal is not None:
                places = [(missing[index], response) for index, response in responses]
                kept = [(numbers[place], requests[place].tokens, response) for place, response in places]
                self.journal.keep(batch, kept)

        callbacks = self._callbacks(on_progress=progress, on_finished=finished)
        sampled = self.sampler.sample([requests[place] for place in missing], **callbacks)
        if "on_finished" not in callbacks:
            finished(list(enumerate(sampled)))
        if self.journal is not None:
            self.journal.sync()
        self._from_journal += len(found)
        found |= dict(zip(missing, sampled, strict=True))
        return [found[place] for place in range(len(requests))]

    def _callbacks(self, **wanted: Any) -> dict[str, Any]:
        """Those that the sampler takes: a user's need not."""
        taken = inspect.signature(self.sampler.sample).parameters
        return {name: callback for name, callback in wanted.items() if name in taken}

    def _rewarded(self, number: int, response: Response, prompt: Prompt, reward: Reward | None = None) -> Written:
        text, reward = self._text_of(response), reward or self.reward
        assert reward is not None
        seconds = self.config.rollout.episode_timeout
        line = (
            f"reward: {reward.name} took more than {seconds:g} s (rollout.episode_timeout) for sample {prompt.uid!r}; "
            "correct the function, or raise the setting"
        )
        return Written(number, response, text, call_within(seconds, line, reward, text, prompt.row, prompt.uid))

    def _gathered(self, written: list[Written], error: str | None) -> dict[int, Written]:
        """Those of all ranks, by number; an error of one rank is raised on all, so that nobody waits for it."""
        everybody = self._told((written, error))
        for _, message in everybody:
            if message is not None:
                raise UserError.of(message)
        found = [one for part, _ in everybody for one in part]
        by_number = {one.number: one for one in found}
        assert len(by_number) == len(found), "every response is written once"
        return by_number

    def _told(self, own: Any) -> list[Any]:
        """What every rank says."""
        return told(own, self.mesh)

    def _text_of(self, response: Response) -> str:
        """Without the token that ended it."""
        return self._text(response.tokens[:-1] if response.ended else response.tokens)

    def _text(self, tokens: NDArray[np.integer[Any]]) -> str:
        """As it was written, control tokens too: what is not shown to the reward could be written for nothing."""
        return str(
            self.tokenizer.decode(tokens.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )

    def _example(self, prompt: Prompt, written: Written) -> dict[str, Any]:
        return {
            "uid": prompt.uid,
            "prompt": self._text(prompt.tokens),
            "response": written.text,
            "reward": written.reward,
            "tokens": len(written.response.tokens),
            "ended": written.response.ended,
        }


def told(own: Any, mesh: Mesh) -> list[Any]:
    """What every rank says, on every rank."""
    everybody: list[Any] = [None] * mesh.loss.size
    with watching("the exchange of rollouts", mesh.loss.group):
        dist.all_gather_object(everybody, own, group=mesh.loss.group)
    return everybody


def share_of(groups: Sequence[Group], asked: range, mesh: Mesh) -> tuple[list[Prompt], list[int]]:
    """The prompts of all responses, and the numbers of those of the groups `asked` that this rank writes."""
    lengths = [(len(groups[index]), len(groups[index][0].tokens)) for index in asked]
    before = numbers_of(groups, asked.start).start if asked else 0
    own = [before + place for place in divided(lengths, mesh.loss.size)[mesh.loss.rank]]
    return [prompt for group in groups for prompt in group], own


def divided(groups: Sequence[tuple[int, int]], world: int) -> list[list[int]]:
    """The numbers of the responses of each rank; `groups` are (responses, tokens of the prompt).

    Shares differ by one response at most, and a group is cut only where a share ends. Neighbours in length go to
    different ranks, so that every rank has prompts of all lengths.

        3 groups of 2, world 2      numbers  0 1 | 2 3 | 4 5        shares  0 1 4 | 5 2 3
    """
    firsts = np.cumsum([0, *(count for count, _ in groups)])
    by_length = sorted(range(len(groups)), key=lambda group: (groups[group][1], group))
    dealt = [group for rank in range(world) for group in by_length[rank::world]]
    order = [int(firsts[group]) + member for group in dealt for member in range(groups[group][0])]
    return [part.tolist() for part in np.array_split(np.array(order, dtype=np.int64), world)]


def numbers_of(groups: Sequence[Group], index: int) -> range:
    """The numbers of a group's responses in the batch."""
    first = sum(len(group) for group in groups[:index])
    return range(first, first + len(groups[index]))


def signals(groups: Sequence[Group], asked: Iterable[int], written: Mapping[int, Rewarded]) -> dict[int, bool]:
    """Of each group that was asked for, whether its rewards differ."""
    return {
        index: has_signal([reward for number in numbers_of(groups, index) for reward in written[number].rewards])
        for index in asked
    }


def _samples(groups: Sequence[Group], written: Sequence[Written], settings: RolloutConfig) -> list[Sample]:
    """A sample for each response. A prompt that a batch has twice makes two groups: each is compared by itself."""
    times: Counter[str] = Counter()
    samples: list[Sample] = []
    for group in groups:
        uid = group[0].uid
        times[uid] += 1
        name = uid if times[uid] == 1 else f"{uid} (time {times[uid]})"
        for index, prompt in enumerate(group):
            one = written[len(samples)]
            before, response = len(prompt.tokens), one.response
            samples.append(
                Sample(
                    tokens=np.concatenate([prompt.tokens, response.tokens]),
                    loss_mask=np.arange(before + len(response.tokens)) >= before,
                    logprobs=np.concatenate([np.zeros(before, np.float32), response.logprobs]),
                    reward=one.reward - overlong_penalty(len(response.tokens), prompt.room, settings),
                    raw_reward=one.reward,
                    uid=f"{name} response {index + 1}",
                    group=name,
                    source=prompt.source,
                )
            )
    return samples
