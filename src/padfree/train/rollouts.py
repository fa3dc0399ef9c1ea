"""Rollouts written in the training process: a copy of the model samples, and all ranks get all samples.

    groups of a global batch   (p p p) (q q q)         a prompt once for each response to it
      -> weights               trained model, sharded or not -> the copy, whole, on every rank
      -> responses             0 3 | 1 4 | 2 5         divided over all ranks, context ranks too: each has a whole copy
      -> rewards               by who wrote the response
      -> samples               p0 p1 p2 q0 q1 q2       gathered, the same order on every rank

The copy is an ordinary HF model with its own attention and cache, in the dtype that training computes in. What it draws
depends on the seed, the number of the global batch and the number of the response in it, so that another number of
ranks, or a resumed run, sees the same rollouts (up to rounding of the logits).

`rollouts.jsonl` in the run folder shows a few of each batch.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from transformers import PreTrainedModel

from padfree.batch import Sample
from padfree.config import Config
from padfree.data import load_reward
from padfree.distributed import Mesh, watching
from padfree.model.export import whole_tensors
from padfree.model.load import load_model, named_tensors
from padfree.record.files import ROLLOUTS
from padfree.record.metrics import line_number
from padfree.rollout import Prompt, Request, Response, stop_tokens, write_responses
from padfree.rollout.noise import response_keys

NUM_SHOWN = 4
"""How many groups of a batch show their first response in the file."""


@dataclass(frozen=True, slots=True, eq=False)
class _Written:
    """A response, and what it earned. Travels between ranks."""

    number: int  # in the global batch
    response: Response
    text: str
    reward: float


class Rollouts:
    """The copy of a trained model that writes responses."""

    def __init__(self, config: Config, mesh: Mesh, trained: PreTrainedModel, tokenizer: Any) -> None:
        assert config.rollout.reward is not None
        self.config, self.mesh, self.trained, self.tokenizer = config, mesh, trained, tokenizer
        self.reward = load_reward(config.rollout.reward)
        self.copy = load_model(
            config.model.path,
            dtype=getattr(torch, config.model.dtype),
            device=mesh.device,
            init=config.model.init,
            seed=config.run.seed,
            trust_remote_code=config.model.trust_remote_code,
        )
        self.copy.train(False).requires_grad_(False)
        self.stops = stop_tokens(tokenizer, self.copy)
        self._examples = _Examples(Path(config.run.folder) / ROLLOUTS) if mesh.loss.rank == 0 else None

    def samples(self, groups: Sequence[Sequence[Prompt]], batch: int) -> list[Sample]:
        """The samples of global batch number `batch`; every rank calls this alike and gets them all."""
        copy_weights(self.trained, self.copy)
        prompts = [prompt for group in groups for prompt in group]
        written = self._gathered(*self._written(prompts, batch))
        if self._examples is not None:
            firsts = np.cumsum([0, *map(len, groups)])[:-1][:NUM_SHOWN]
            self._examples.write(batch, [self._example(prompts[first], written[first]) for first in firsts])
        return _samples(groups, written)

    def _written(self, prompts: Sequence[Prompt], batch: int) -> tuple[list[_Written], str | None]:
        """This rank's responses, and what was wrong with a reward."""
        keys = response_keys(self.config.run.seed, batch, np.arange(len(prompts), dtype=np.int64))
        # Neighbours in length go to different ranks, so that every rank writes to prompts of all lengths.
        by_length = sorted(range(len(prompts)), key=lambda number: (len(prompts[number].tokens), number))
        own = by_length[self.mesh.loss.rank :: self.mesh.loss.size]
        requests = [
            Request(tokens=prompts[number].tokens, room=prompts[number].room, key=int(keys[number])) for number in own
        ]
        responses = write_responses(
            self.copy,
            requests,
            temperature=self.config.loss.temperature,
            stops=self.stops,
            batch_size=self.config.rollout.batch,
        )
        written = []
        try:
            for number, response in zip(own, responses, strict=True):
                text = self._text(response.tokens[:-1] if response.ended else response.tokens)
                reward = self.reward(text, prompts[number].row, prompts[number].uid)
                written.append(_Written(number, response, text, reward))
        except ValueError as error:
            return [], str(error)
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


def make_sampling(
    config: Config, mesh: Mesh, trained: PreTrainedModel, tokenizer: Any, batch_number: Callable[[], int]
) -> Callable[[Sequence[Any]], list[Sample]] | None:
    """What makes samples of the groups of a batch; None where the run's data are samples already."""
    if config.rollout.reward is None:
        return None
    rollouts = Rollouts(config, mesh, trained, tokenizer)
    return lambda groups: rollouts.samples(groups, batch_number())


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


@torch.no_grad()
def copy_weights(trained: PreTrainedModel, copy: PreTrainedModel) -> None:
    """Give `copy`, a whole model, the weights of `trained`, which may be sharded or have adapters.

    Every rank takes part.
    """
    targets = named_tensors(copy)
    for name, tensor in whole_tensors(trained):
        targets.pop(name).copy_(tensor)
    assert not targets, f"{min(targets)} is not in the trained model"


class _Examples:
    """The file of examples. A resumed run drops those of batches that it writes again."""

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
            raise ValueError(
                f"run.folder: {self.path} cannot be written ({error.strerror or error}); free space or give another "
                "folder"
            ) from error

    def _before(self, batch: int) -> list[str]:
        """The whole lines of earlier batches."""
        kept: list[str] = []
        if self.path.exists():
            with self.path.open(encoding="utf-8", newline="\n") as file:  # a response may hold other line ends
                for number, line in enumerate(file, start=1):
                    if not line.endswith("\n") or line_number(self.path, number, line, "batch") >= batch:
                        break
                    kept.append(line)
        return kept
