"""A tokenizer of single letters, a scripted sampler, and episodes played with both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from padfree.data import Reward
from padfree.data.chat_renderer import ChatRenderer
from padfree.rollout import Prompt, Response, SamplingRequest
from padfree.rollout.environment.episode_policy import ChatTokenizer, Episode
from padfree.rollout.environment.runner import EpisodeRunner, RunnerSettings
from padfree.rollout.group import Play, Played, RolloutGroup, Watcher
from padfree.rollout.reward_workers import RewardWorkers

LETTERS = '0123456789+-*/=#<>()[].,?:!{}"_ \nabcdefghijklmnopqrstuvwxyz'
EOS = 0
VOCABULARY = {letter: index for index, letter in enumerate(["<eos>", "<unk>", *LETTERS])}
CHAT = (
    "{% for message in messages %}[{{ message['role'][0] }}]{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}<eos>{% endif %}{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
)
WHOLE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for message in messages %}[{{ message['role'][0] }}]{{ message['name'] }}{{ message['reasoning_content'] }}"
    "{{ message['content'] }}{% for call in message['tool_calls'] or [] %}{{ call['function'] | tojson }}{% endfor %}"
    "{% if message['role'] == 'assistant' %}<eos>{% endif %}{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
)
"""Shows all that a message may have."""
THINKING = CHAT.replace("message['content']", "message['content'].split('!')[-1]")
"""Whatever stands before the last `!` of a message is left out."""


def tokenizer(template: str | None = None) -> Any:
    made = Tokenizer(WordLevel(VOCABULARY, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.decoder = decoders.Fuse()
    make: Any = PreTrainedTokenizerFast
    fast = make(tokenizer_object=made, unk_token="<unk>", eos_token="<eos>")
    fast.chat_template = template
    return fast


def chat_tokenizer(template: str | None = None) -> ChatTokenizer:
    made = tokenizer(template)
    return ChatTokenizer(made, None if template is None else ChatRenderer(made), len(VOCABULARY))


def ids(text: str) -> list[int]:
    """Encode one letter per token; `$` ends a response."""
    return [EOS if letter == "$" else VOCABULARY[letter] for letter in text]


def text(tokens: Sequence[int]) -> str:
    """Decode."""
    letters = {index: letter for letter, index in VOCABULARY.items()}
    return "".join("$" if token == EOS else letters[int(token)] for token in tokens)


def prompt(question: str, *, max_new_tokens: int = 60, **row: Any) -> Prompt:
    return Prompt(
        tokens=np.array(ids(question)),
        max_new_tokens=max_new_tokens,
        row={"prompt": question, **row},
        uid=f"rows.jsonl:{question}",
        source="rows.jsonl",
    )


class Scripted:
    """Answers each context by a script: a dictionary of texts, or a function of the text and the key."""

    def __init__(self, script: Mapping[str, str] | Callable[[str, int], str]) -> None:
        self.script = script
        self.rounds: list[list[str]] = []
        self.keys: dict[str, list[int]] = {}

    def update_weights(self, trained: Any, version: int) -> None:
        pass

    def sample(self, requests: Sequence[SamplingRequest], *, on_progress: Any = None) -> list[Response]:
        contexts = [text(request.tokens.tolist()) for request in requests]
        self.rounds.append(contexts)
        for context, request in zip(contexts, requests, strict=True):
            self.keys.setdefault(context, []).append(request.key)
        return [self._response(*each) for each in zip(contexts, requests, strict=True)]

    def _response(self, context: str, request: SamplingRequest) -> Response:
        said = self.script(context, request.key) if callable(self.script) else self.script[context]
        tokens = np.array(ids(said), np.int64)[: request.max_new_tokens]
        return Response(
            tokens=tokens,
            logprobs=(-(np.arange(len(tokens)) + 1) / 8).astype(np.float32),
            ended=bool(tokens[-1] == EOS),
            version=0,
        )

    def metrics(self) -> Mapping[str, float]:
        return {}

    def close(self) -> None:
        pass


def play(
    episode: Episode,
    script: Any,
    *prompts: Prompt,
    template: str | None = None,
    reward: Callable[..., float] | None = None,
    keys: Sequence[int] | None = None,
    sampler: Any = None,
    watch: Watcher | None = None,
    **settings: Any,
) -> list[Played]:
    """Play an episode for each prompt on one rank."""
    reward_workers = None if reward is None else RewardWorkers(Reward("tests:reward", reward))
    chosen = {"name": "tests:episode", "max_concurrent": 8, "timeout": 60.0, "skip_failures": False, **settings}
    runner = EpisodeRunner(
        episode, sampler or Scripted(script), chat_tokenizer(template), reward_workers, RunnerSettings(**chosen)
    )
    try:
        plays = [
            Play(number=number, group=RolloutGroup(prompt=one, size=1), key=key)
            for number, (one, key) in enumerate(zip(prompts, keys or range(100, 100 + len(prompts)), strict=True))
        ]
        return runner.play(plays, lambda said: [said], watch=watch)
    finally:
        runner.close()
