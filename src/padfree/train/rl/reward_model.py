"""A reward model as the reward of rollouts: `rollout.reward = "model:folder"`.

    prompt of the row, text of the response  ->  tokens   by the reward model's own tokenizer and chat template, as
                                                          `padfree reward` reads a row's `prompt` and `chosen`
    responses of all ranks                   ->  packed, scored on the ranks together, each at its end
    back to who asked                        <-  a number for each

The policy's token ids are of no use here: the two models may have different tokenizers. So the text is judged, without
the token that ended the response, and ends as the reward model's texts do, whether the policy ended it or was cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from padfree.batch import Sample
from padfree.config import Config
from padfree.data import SFTDataSettings
from padfree.data.tokenize import PairTokenizer
from padfree.distributed import watching
from padfree.errors import UserError
from padfree.rollout import Prompt
from padfree.train.limits import Limits
from padfree.train.scalar import ScalarScorer


class ModelReward:
    """Judges responses of all ranks together. Every rank calls it, with its own."""

    def __init__(self, scorer: ScalarScorer, tokenizer: Any, config: Config) -> None:
        data = config.data
        settings = SFTDataSettings(prompt_format=data.prompt_format, append_eos=data.append_eos)
        self.scorer, self._tokenize = scorer, PairTokenizer(tokenizer, settings)
        self._positions = Limits.of(scorer.model).positions

    def __call__(self, answers: Sequence[tuple[Prompt, str]]) -> list[float]:
        """The score of each response text."""
        tokens, error = self._tokens(answers)
        group, size = self.scorer.mesh.loss.group, self.scorer.mesh.loss.size
        everybody: list[Any] = [None] * size
        with watching("the rewards of rollouts", group):
            dist.all_gather_object(everybody, (tokens, error), group=group)
        for _, message in everybody:
            if message is not None:
                raise UserError.of(message)
        samples = [Sample(tokens=one) for told, _ in everybody for one in told]
        if not samples:
            return []
        scores = self.scorer.rewards(samples)
        before = sum(len(told) for told, _ in everybody[: self.scorer.mesh.loss.rank])
        own: list[float] = scores[before : before + len(tokens)].tolist()
        return own

    def _tokens(self, answers: Sequence[tuple[Prompt, str]]) -> tuple[list[NDArray[np.int32]], str | None]:
        """Of each response with its prompt, and what is wrong with one of them."""
        # What the policy was asked, before its own chat template.
        rows = [
            (prompt.asked or prompt.row.get("prompt", prompt.row.get("messages")), text) for prompt, text in answers
        ]
        found: list[NDArray[np.int32]] = []
        for (prompt, _), encoded in zip(answers, self._tokenize.answers(rows), strict=True):
            if isinstance(encoded, ValueError):
                return [], (
                    f"rollout.reward: the reward model cannot read {prompt.uid} ({encoded}); change the row, or "
                    "data.prompt_format"
                )
            if self._positions is not None and len(encoded.tokens) > self._positions:
                return [], (
                    f"rollout.reward: {prompt.uid} has {len(encoded.tokens)} tokens with its response, the reward "
                    f"model {self._positions} positions; set a lower rollout.max_new_tokens"
                )
            found.append(encoded.tokens)
        return found, None
