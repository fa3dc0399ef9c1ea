"""A reward model as the reward of rollouts: `rollout.reward = "model:folder"`.

The reward model has its own tokenizer and chat template, so it receives prompts and responses as text. All ranks pack
and score all responses together. Each rank gets the scores of its own responses.

The text ends before the token that ended the response, like the texts on which a reward model is trained. Complete and
cut-off responses therefore end in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from padfree.config import DataConfig
from padfree.data import SFTDataSettings
from padfree.data.tokenize import PairTokenizer
from padfree.distributed import gather_objects
from padfree.rollout import Prompt
from padfree.sample import Sample
from padfree.train.check_data import ModelLimits
from padfree.train.scorer import ScalarScorer


class ModelReward:
    """Scores responses with a reward model on all ranks together. Every rank must call it, with its own responses."""

    def __init__(self, scorer: ScalarScorer, tokenizer: Any, data: DataConfig) -> None:
        settings = SFTDataSettings(prompt_format=data.prompt_format, append_eos=data.append_eos)
        self.scorer, self._tokenize = scorer, PairTokenizer(tokenizer, settings)
        self._positions = ModelLimits.of(scorer.model).positions

    def __call__(self, answers: Sequence[tuple[Prompt, str]]) -> list[float | str]:
        """Return the score of each response, or an error message if the reward model cannot read the response.

        `answers`: pairs of a prompt and the text of a response to it.
        """
        tokens = self._tokens(answers)
        readable = [one for one in tokens if not isinstance(one, str)]
        everybody = gather_objects(readable, self.scorer.mesh.loss.group, "the rewards of rollouts")
        samples = [Sample(tokens=one) for part in everybody for one in part]
        if not samples:
            return [str(one) for one in tokens]
        scores = self.scorer.rewards(samples)
        before = sum(len(part) for part in everybody[: self.scorer.mesh.loss.rank])
        own = iter(scores[before : before + len(readable)].tolist())
        return [one if isinstance(one, str) else next(own) for one in tokens]

    def _tokens(self, answers: Sequence[tuple[Prompt, str]]) -> list[NDArray[np.int32] | str]:
        """Return the tokens of each prompt with its response, or an error message if the text cannot be encoded.

        `answers`: pairs of a prompt and the text of a response to it.
        """
        # Use the prompt from before the policy's chat template was applied, because the reward model has its own.
        rows = [
            (prompt.asked or prompt.row.get("prompt", prompt.row.get("messages")), text) for prompt, text in answers
        ]
        found: list[NDArray[np.int32] | str] = []
        for (prompt, _), encoded in zip(answers, self._tokenize.answers(rows), strict=True):
            if isinstance(encoded, ValueError):
                found.append(
                    f"rollout.reward: the reward model cannot read {prompt.uid} ({encoded}); change the row, or set "
                    "another data.prompt_format"
                )
            elif self._positions is not None and len(encoded.tokens) > self._positions:
                found.append(
                    f"rollout.reward: {prompt.uid} has {len(encoded.tokens)} tokens with its response, but the reward "
                    f"model has {self._positions} positions; set a lower rollout.max_new_tokens"
                )
            else:
                found.append(encoded.tokens)
        return found
