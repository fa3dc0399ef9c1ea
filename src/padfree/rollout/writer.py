"""From the groups of a global batch to its samples, whichever engine samples them.

    groups of a global batch   (p p p) (q q q)         a prompt once for each response to it
      -> requests              p0 p1 p2 | q0 q1 q2     divided over all ranks, context ranks too: whole groups as far
                                                       as equal shares allow
      -> sampler               update_weights, sample
      -> rewards               by who asked for the response
      -> samples               p0 p1 p2 q0 q1 q2       gathered, the same order on every rank

What is drawn depends on the seed, the number of the global batch and the number of the response in it, so that another
number of ranks, or a resumed run, sees the same rollouts (up to rounding of the logits).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from transformers import PreTrainedModel

from padfree.batch import Sample
from padfree.config import Config
from padfree.data import load_reward
from padfree.distributed import Mesh, watching
from padfree.record.files import ROLLOUTS
from padfree.rollout.base import Response, Sampler, SamplingRequest
from padfree.rollout.examples import ExamplesFile
from padfree.rollout.noise import response_keys
from padfree.rollout.prompts import Prompt

NUM_SHOWN = 4
"""How many groups of a batch show their first response in the file of examples."""


@dataclass(frozen=True, slots=True, eq=False)
class _Written:
    """A response, and what it earned. Travels between ranks."""

    number: int  # in the global batch
    response: Response
    text: str
    reward: float


class RolloutWriter:
    """Prompts to rewarded samples, by a sampler."""

    def __init__(self, config: Config, mesh: Mesh, sampler: Sampler, tokenizer: Any) -> None:
        assert config.rollout.reward is not None
        self.config, self.mesh, self.sampler, self.tokenizer = config, mesh, sampler, tokenizer
        self.reward = load_reward(config.rollout.reward)
        self.timings: dict[str, float] = {}  # seconds of the last batch besides sampling, by what they were spent on
        self._examples = ExamplesFile(Path(config.run.folder) / ROLLOUTS) if mesh.loss.rank == 0 else None

    def samples(
        self, trained: PreTrainedModel, groups: Sequence[Sequence[Prompt]], *, batch: int, version: int
    ) -> list[Sample]:
        """The samples of global batch number `batch`, written by `trained` after `version` optimizer steps.

        Every rank calls this alike and gets them all.
        """
        begin = time.perf_counter()
        self.sampler.update_weights(trained, version)
        self.timings = {"weight_exchange": time.perf_counter() - begin}
        prompts = [prompt for group in groups for prompt in group]
        own = self._written(groups, prompts, batch)
        begin = time.perf_counter()
        written = self._gathered(*own)
        self.timings["waiting"] = time.perf_counter() - begin
        if self._examples is not None:
            firsts = np.cumsum([0, *map(len, groups)])[:-1][:NUM_SHOWN]
            self._examples.write(batch, [self._example(prompts[first], written[first]) for first in firsts])
        return _samples(groups, written)

    def metrics(self) -> Mapping[str, float]:
        """Of the last batch, as this rank saw it."""
        return {f"sampler/{name}": value for name, value in self.sampler.metrics().items()}

    def close(self) -> None:
        self.sampler.close()

    def _written(
        self, groups: Sequence[Sequence[Prompt]], prompts: Sequence[Prompt], batch: int
    ) -> tuple[list[_Written], str | None]:
        """This rank's responses, and what was wrong with a reward."""
        keys = response_keys(self.config.run.seed, batch, np.arange(len(prompts), dtype=np.int64))
        lengths = [(len(group), len(group[0].tokens)) for group in groups]
        own = divided(lengths, self.mesh.loss.size)[self.mesh.loss.rank]
        responses = self.sampler.sample(
            [
                SamplingRequest(tokens=prompts[number].tokens, room=prompts[number].room, key=int(keys[number]))
                for number in own
            ]
        )
        written = []
        begin = time.perf_counter()
        try:
            for number, response in zip(own, responses, strict=True):
                text = self._text(response.tokens[:-1] if response.ended else response.tokens)
                reward = self.reward(text, prompts[number].row, prompts[number].uid)
                written.append(_Written(number, response, text, reward))
        except ValueError as error:
            return [], str(error)
        self.timings["rewards"] = time.perf_counter() - begin
        return written, None

    def _gathered(self, written: list[_Written], error: str | None) -> list[_Written]:
        """Those of all ranks, in order; an error of one rank is raised on all, so that nobody waits for it."""
        group = self.mesh.loss.group
        everybody: list[Any] = [None] * self.mesh.loss.size
        with watching("the exchange of rollouts", group):
            dist.all_gather_object(everybody, (written, error), group=group)
        for _, message in everybody:
            if message is not None:
                raise ValueError(message)
        found = sorted((one for part, _ in everybody for one in part), key=lambda one: one.number)
        assert [one.number for one in found] == list(range(len(found)))
        return found

    def _text(self, tokens: NDArray[np.integer[Any]]) -> str:
        """As it was written, control tokens too: what is not shown to the reward could be written for nothing."""
        return str(
            self.tokenizer.decode(tokens.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )

    def _example(self, prompt: Prompt, written: _Written) -> dict[str, Any]:
        return {
            "uid": prompt.uid,
            "prompt": self._text(prompt.tokens),
            "response": written.text,
            "reward": written.reward,
            "tokens": len(written.response.tokens),
            "ended": written.response.ended,
        }


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


def _samples(groups: Sequence[Sequence[Prompt]], written: Sequence[_Written]) -> list[Sample]:
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
                    reward=one.reward,
                    uid=f"{name} response {index + 1}",
                    group=name,
                    source=prompt.source,
                )
            )
    return samples
