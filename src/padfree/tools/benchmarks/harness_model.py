"""Connect a model to lm-evaluation-harness.

Log-likelihoods are computed for many texts at once, in packs without padding (`packed_scores`). Answers are generated
by padfree's sampler in the same process (`Speaker`). Tokenization, truncation and stop strings follow the rules of the
harness's own backend for transformers models, so that the metrics are the same.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from transformers import PreTrainedModel

from padfree.errors import UserError
from padfree.tools.benchmarks.packed_scores import Continuation, Score, packed_scores
from padfree.tools.talk.speaker import BATCH, Speaker, StopAnswer

DEFAULT_LENGTH, UNLIMITED = 2048, 10**30
"""`DEFAULT_LENGTH`: the context length of a model whose config and tokenizer state none. `UNLIMITED`: a tokenizer that
states this length or more has no limit."""

MAX_NEW_TOKENS = 256
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (1, None),
    "top_k": (0, -1, None),
    "min_p": (0, None),
    "repetition_penalty": (1, None),
    "num_beams": (1, None),
    "num_return_sequences": (1, None),
    "use_cache": (True, None),
}
"""Generation arguments that padfree accepts only with the listed values, which do not change the generated text."""

SpeakerAt = Callable[[float], Speaker]
"""Function that returns a `Speaker` with the given temperature. Temperature 0 decodes greedily."""


class HarnessAnswers:
    """Answers the requests of lm-evaluation-harness: log-likelihoods of texts, and generated texts."""

    def __init__(self, model: PreTrainedModel, tokenizer: Any, speaker_at: SpeakerAt) -> None:
        """`model` must be attached (`padfree.attach`)."""
        self.model, self.tokenizer, self._speaker_at = model, tokenizer, speaker_at
        self.max_length = context_length(model, tokenizer)
        bos = tokenizer.bos_token_id
        self.prefix = int(tokenizer.eos_token_id if bos is None else bos)

    def encode(self, text: str, add_special_tokens: bool | None = None) -> list[int]:
        """Return the token ids of a text. If the text begins with the bos token, no second bos token is added."""
        if add_special_tokens is None and text.startswith(self.tokenizer.decode([self.prefix])):
            add_special_tokens = False
        given = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        ids: list[int] = self.tokenizer.encode(text, **given)
        return ids

    def scores(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Score]:
        """Return the log-likelihood of each continuation after its context, and whether greedy decoding generates it.

        Texts that are too long for the model lose tokens on the left.
        """
        found = []
        for context, continuation in pairs:
            ids = [*context, *continuation][-(self.max_length + 1) :]
            found.append(Continuation(ids, min(len(continuation), len(ids) - 1)))
        return packed_scores(self.model, found)

    def generate(self, requests: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
        """Generate a text after each context, up to a stop string or to the maximum number of new tokens."""
        plans = [generation_of(arguments) for _, arguments in requests]
        texts: dict[int, str] = {}
        kinds = sorted({(plan.temperature, plan.max_new_tokens) for plan in plans})
        for temperature, max_new_tokens in kinds:
            chosen = [
                number
                for number, plan in enumerate(plans)
                if (plan.temperature, plan.max_new_tokens) == (temperature, max_new_tokens)
            ]
            left = self.max_length - max_new_tokens
            if left < 1:
                raise UserError(
                    "--tasks",
                    f"a task asks for {max_new_tokens} new tokens, but the model has {self.max_length} positions",
                    "lower max_gen_toks of the task",
                )
            prompts = [self._prompt(requests[number][0])[-left:] for number in chosen]
            order = sorted(range(len(chosen)), key=lambda index: (-len(prompts[index]), index))
            for first in range(0, len(order), BATCH):
                batch = order[first : first + BATCH]
                until = [plans[chosen[index]].until for index in batch]
                answers = self._answers(
                    temperature, [prompts[index] for index in batch], until, max_new_tokens, chosen[batch[0]]
                )
                for index, text in zip(batch, answers, strict=True):
                    texts[chosen[index]] = text
        return [texts[number] for number in range(len(requests))]

    def _prompt(self, text: str) -> list[int]:
        bos = self.tokenizer.bos_token
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=not (bos and text.startswith(bos)))
        return ids

    def _answers(
        self,
        temperature: float,
        prompts: list[list[int]],
        until: list[tuple[str, ...]],
        max_new_tokens: int,
        first: int,
    ) -> list[str]:
        """Return one generated text per prompt, cut before its first stop string.

        `until`: the stop strings of each prompt. `first`: the index of the first prompt among all prompts, on which
        random numbers depend.
        """
        written = [""] * len(prompts)
        waiting = set(range(len(prompts)))

        def on_text(number: int, piece: str) -> None:
            written[number] += piece
            if any(stop in written[number] for stop in until[number]):
                waiting.discard(number)
                if not waiting:
                    raise StopAnswer

        speaker = self._speaker_at(temperature)
        answers = speaker.answer(prompts, max_new_tokens=max_new_tokens, first=first, on_text=on_text)
        return [
            cut(self.tokenizer.decode(answer.tokens.tolist(), skip_special_tokens=True), stops)
            for answer, stops in zip(answers, until, strict=True)
        ]


class Generation:
    """The settings with which a task wants text to be generated: stop strings, number of new tokens, temperature."""

    def __init__(self, until: tuple[str, ...], max_new_tokens: int, temperature: float) -> None:
        self.until, self.max_new_tokens, self.temperature = until, max_new_tokens, temperature


def generation_of(arguments: Mapping[str, Any]) -> Generation:
    """Read the generation arguments of a task. Raise a `UserError` for arguments that padfree does not support."""
    left = dict(arguments)
    until = left.pop("until", None)
    stops = (until,) if isinstance(until, str) else tuple(until or ())
    lengths = [left.pop(name, None) for name in LENGTHS]
    max_new_tokens = int(next((length for length in lengths if length is not None), MAX_NEW_TOKENS))
    temperature, samples = float(left.pop("temperature", None) or 0.0), left.pop("do_sample", None)
    for name, value in left.items():
        if name not in NEUTRAL or not any(value == neutral for neutral in NEUTRAL[name]):
            raise UserError(
                "--tasks",
                f"a task generates with {name}={value!r}, which padfree does not support",
                f"remove {name} from the generation_kwargs of the task",
            )
    if samples and not temperature:
        temperature = 1.0
    return Generation(tuple(stop for stop in stops if stop), max_new_tokens, 0.0 if samples is False else temperature)


def cut(text: str, stops: Sequence[str]) -> str:
    """Cut a text before the first stop string."""
    for stop in stops:
        text = text.split(stop)[0]
    return text


def context_length(model: PreTrainedModel, tokenizer: Any) -> int:
    """Return the context length in tokens from the model's config or, if the config has none, from the tokenizer."""
    for config in (getattr(model.config, "text_config", None), model.config):
        for name in ("n_positions", "max_position_embeddings", "n_ctx"):
            found = getattr(config, name, None)
            if isinstance(found, int):
                return found
    stated = int(getattr(tokenizer, "model_max_length", UNLIMITED))
    return stated if stated < UNLIMITED else DEFAULT_LENGTH


@cache
def harness_class() -> Callable[[HarnessAnswers], Any]:
    """Import lm-evaluation-harness, and return a subclass of its `TemplateLM` that calls `HarnessAnswers`."""
    base = importlib.import_module("lm_eval.api.model").TemplateLM
    utils = importlib.import_module("lm_eval.utils")

    class HarnessModel(base):  # type: ignore[misc, valid-type]  # the package is optional
        def __init__(self, answers: HarnessAnswers) -> None:
            super().__init__()
            self._answers, self.tokenizer = answers, answers.tokenizer

        @property
        def eot_token_id(self) -> int:
            return int(self.tokenizer.eos_token_id)

        @property
        def prefix_token_id(self) -> int:
            return self._answers.prefix

        @property
        def max_length(self) -> int:
            return self._answers.max_length

        @property
        def tokenizer_name(self) -> str:
            return str(self.tokenizer.name_or_path).replace("/", "__")

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
            return self._answers.encode(string, add_special_tokens)

        def apply_chat_template(self, chat_history: Any, add_generation_prompt: bool = True) -> str:
            return str(
                self.tokenizer.apply_chat_template(
                    chat_history,
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=not add_generation_prompt,
                )
            )

        def _loglikelihood_tokens(self, requests: Any, disable_tqdm: bool = False, **kwargs: Any) -> list[Score]:
            found = self._answers.scores([(context, continuation) for _, context, continuation in requests])
            for (texts, _, _), answer in zip(requests, found, strict=True):
                if texts is not None:
                    self.cache_hook.add_partial("loglikelihood", texts, answer)
            return found

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
            windows: list[tuple[None, list[int], list[int]]] = []
            owners: list[int] = []
            for number, request in enumerate(requests):
                (text,) = request.args
                rolling = utils.get_rolling_token_windows(
                    token_list=self.tok_encode(text),
                    prefix_token=self.prefix_token_id,
                    max_seq_len=self.max_length,
                    context_len=1,
                )
                for window in map(utils.make_disjoint_window, rolling):
                    windows.append((None, *window))
                    owners.append(number)
            sums = [0.0] * len(requests)
            for owner, (logprob, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
                sums[owner] += logprob
            for request, total in zip(requests, sums, strict=True):
                self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
            return sums

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            texts = self._answers.generate([request.args for request in requests])
            for request, text in zip(requests, texts, strict=True):
                self.cache_hook.add_partial("generate_until", request.args, text)
            return texts

    return HarnessModel
