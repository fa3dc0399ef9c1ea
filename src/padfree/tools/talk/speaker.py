"""A loaded model and its tokenizer, which answer prompts with the in-process sampler.

    text -> chat template -> prompt ids [n] -> sampler -> answer ids [m] -> text, piece by piece

The random numbers of an answer depend only on the seed, the turn and the index of the prompt. An answer is therefore
the same with and without streaming, and does not depend on the other prompts of the batch. Temperature 0 is greedy
decoding: it takes the most likely token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from padfree.data.chat_renderer import ChatRenderer
from padfree.data.conversation import Message
from padfree.data.records import check_encodable
from padfree.errors import UserError, need, shown_error
from padfree.model.load import load_model
from padfree.model.model_files import base_dtype, open_model
from padfree.rollout.base import SamplingRequest
from padfree.rollout.engines.in_process.hf_cache import stop_tokens
from padfree.rollout.engines.in_process.policy_model import PolicyModel
from padfree.rollout.engines.in_process.sampler import InProcessSampler
from padfree.rollout.environment.episode_policy import ChatTokenizer
from padfree.rollout.sampling_rng import GREEDY, response_keys
from padfree.rollout.truncation import WHOLE, Truncation
from padfree.tasks.reading import read_template
from padfree.tools.talk.find_model import ADAPTER_WEIGHTS, SETTING, ModelFiles
from padfree.tools.talk.text_stream import TextStream
from padfree.train.check_data import ModelLimits
from padfree.train.training_data import open_tokenizer

BATCH = 16
"""The maximum number of answers that are generated at the same time."""

MOST_TOKENS = 1_000_000

End = Literal["stop", "length", "context", "interrupted"]
"""Why an answer ended: a stop token, `max_new_tokens`, the model's context length, or the user."""

OnText = Callable[[int, str], None]
"""Function that is called with the index of a prompt and the next piece of its answer, which can be "". To stop the
generation, the function raises `StopAnswer`."""


class FullContextError(UserError):
    """Raised if the prompt fills the model's context and leaves no room for an answer."""


class StopAnswer(Exception):  # noqa: N818  not an error
    """An `OnText` callback raises this to stop the generation of all answers."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Answer:
    text: str  # without the stop token
    tokens: NDArray[np.int64]  # [m] with the stop token
    # [m] of the distribution from which the tokens were sampled or, for greedy decoding, of that at temperature 1
    logprobs: NDArray[np.float32]
    end: End

    def as_json(self) -> dict[str, Any]:
        return {
            "text": self.text,
            "end": self.end,
            "tokens": self.tokens.tolist(),
            "logprobs": [round(float(value), 6) for value in self.logprobs],
        }


class Speaker:
    """A loaded model and its tokenizer, which generate answers to prompts."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        *,
        chat: ChatRenderer | None,
        temperature: float,
        truncation: Truncation = WHOLE,
        seed: int,
        dtype: torch.dtype,
        device: torch.device,
        decodes: bool | None = None,
    ) -> None:
        """Prepare the sampler of a model.

        `chat`: renders the chat template; None: prompts are plain text. `decodes`: whether padfree's `Decoder` (with a
        KV cache) generates the tokens; None: the default of `InProcessSampler` for this model and device.
        """
        check_sampling(temperature, seed, truncation)
        self.limits = ModelLimits.of(model)
        self.chat_tokenizer = ChatTokenizer(tokenizer, chat, self.limits.vocabulary)
        self.stops = stop_tokens(tokenizer, model)
        self._greedy, self._seed = temperature == 0, seed
        self._sampler = InProcessSampler(
            PolicyModel(model, dtype, device),
            stops=self.stops,
            temperature=1.0 if self._greedy else temperature,
            batch_size=BATCH,
            truncation=truncation,
            decodes=decodes,
        )
        self._sampler.update_weights(model, 0)

    @property
    def context(self) -> int | None:
        """Return the maximum number of tokens of prompt and answer together; None if the model's limit is not known."""
        return self.limits.positions or self.limits.trained_positions

    def render(self, messages: Sequence[Message]) -> str:
        """Render messages as text with the chat template, and add the generation prompt (the start of an answer).

        Raise a `UserError` if the template drops a message.
        """
        assert self.chat_tokenizer.chat is not None
        for message in messages:
            check_encodable(message["content"], message["role"])
        text = self.chat_tokenizer.chat.render(messages, generation_prompt=True)
        for message in messages:
            if message["role"] in ("system", "user") and message["content"].strip() not in text:
                raise UserError(
                    "chat template",
                    f"does not render the {message['role']} message",
                    "put its text into a message of another role, or give another template with --chat-template",
                )
        return text

    def prompt(self, text: str, *, system: str | None = None) -> list[int]:
        """Return the token ids of a chat with one user message or, without a chat template, of the plain text."""
        if self.chat_tokenizer.chat is None:
            need(system is None, "--system", system, "remove --system: a plain prompt has no system message")
            return self.chat_tokenizer.encode_prompt(check_encodable(text, "prompt"), begun=False)
        return self.chat_tokenizer.encode_prompt(self.render(messages_of(text, system)), begun=True)

    def max_new_tokens(self, prompt: Sequence[int], max_new_tokens: int) -> int:
        """Return `max_new_tokens`, or a smaller number if the model's context has less room after the prompt.

        Raise an error if the prompt is empty, contains unknown token ids or fills the context.
        """
        need(len(prompt) > 0, "prompt", "", "give a text of at least one token")
        largest = max(prompt)
        if largest >= self.limits.vocabulary:
            raise UserError(
                "prompt",
                f"contains token id {largest}, but the model's vocabulary has {self.limits.vocabulary} tokens",
                "use the tokenizer that belongs to the model",
            )
        if self.context is not None and len(prompt) >= self.context:
            raise FullContextError(
                "prompt",
                f"{len(prompt):,} tokens fill the model's context of {self.context:,}",
                "give a shorter prompt",
            )
        return max_new_tokens if self.context is None else min(max_new_tokens, self.context - len(prompt))

    def answer(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        turn: int = 0,
        first: int = 0,
        on_text: OnText | None = None,
    ) -> list[Answer]:
        """Return one answer for each prompt. `on_text` receives pieces of the answers as they are generated.

        `turn` (earlier turns of the chat) and the index of a prompt determine the random numbers of its answer.
        `first`: the index of the first prompt.
        """
        need(1 <= max_new_tokens <= MOST_TOKENS, "--max-new-tokens", max_new_tokens, f"give 1 to {MOST_TOKENS:,}")
        limits = [self.max_new_tokens(prompt, max_new_tokens) for prompt in prompts]
        keys = response_keys(self._seed, turn, np.arange(first, first + len(prompts), dtype=np.int64))
        requests = [
            SamplingRequest(
                tokens=np.array(prompt, np.int64),
                max_new_tokens=limit,
                key=GREEDY if self._greedy else int(key),
            )
            for prompt, limit, key in zip(prompts, limits, keys, strict=True)
        ]
        collected = [_CollectedAnswer(self, limit < max_new_tokens) for limit in limits]

        def take(number: int, tokens: NDArray[np.int64], logprobs: NDArray[np.float32]) -> None:
            piece = collected[number].take(tokens, logprobs)
            if on_text is not None:
                on_text(number, piece)

        try:
            self._sampler.sample(requests, on_tokens=take)
        except StopAnswer:
            return [one.answer(limit, interrupted=True) for one, limit in zip(collected, limits, strict=True)]
        for number, one in enumerate(collected):
            rest = one.rest()
            if rest and on_text is not None:
                on_text(number, rest)
        return [one.answer(limit) for one, limit in zip(collected, limits, strict=True)]


class _CollectedAnswer:
    """The part of one answer that has been generated so far."""

    def __init__(self, speaker: Speaker, context_limits: bool) -> None:
        self._speaker, self._context_limits = speaker, context_limits
        self._stream = TextStream(speaker.chat_tokenizer.decode)
        self._text: list[str] = []
        self._tokens: list[int] = []
        self._logprobs: list[float] = []

    def take(self, tokens: NDArray[np.int64], logprobs: NDArray[np.float32]) -> str:
        if not np.isfinite(logprobs).all():
            raise UserError(
                SETTING,
                "the model gives log-probabilities that are not finite",
                "check the weights for NaN, or set --dtype float32",
            )
        self._tokens += tokens.tolist()
        self._logprobs += logprobs.tolist()
        shown = [token for token in tokens.tolist() if token not in self._speaker.stops]  # only the last can be a stop
        self._text.append(self._stream.add(shown))
        return self._text[-1]

    def rest(self) -> str:
        self._text.append(self._stream.end())
        return self._text[-1]

    def answer(self, max_new_tokens: int, *, interrupted: bool = False) -> Answer:
        end: End = "context" if self._context_limits else "length"
        if self._tokens and self._tokens[-1] in self._speaker.stops:
            end = "stop"
        elif interrupted and len(self._tokens) < max_new_tokens:
            end = "interrupted"
        return Answer(
            text="".join(self._text),
            tokens=np.array(self._tokens, np.int64),
            logprobs=np.array(self._logprobs, np.float32),
            end=end,
        )


def check_sampling(temperature: float, seed: int, truncation: Truncation) -> None:
    need(temperature == 0 or 0.01 <= temperature <= 100, "--temperature", temperature, "give 0, or 0.01 to 100")
    need(0 <= seed < 1 << 63, "--seed", seed, "give 0 to 2**63 - 1")
    top_k, top_p, min_p = truncation.top_k, truncation.top_p, truncation.min_p
    need(top_k is None or top_k >= 1, "--top-k", top_k, "give 1 or more")
    need(0 < top_p <= 1, "--top-p", top_p, "give more than 0, at most 1")
    need(0 <= min_p <= 1, "--min-p", min_p, "give 0 to 1")
    for name, value, neutral in (("--top-k", top_k, None), ("--top-p", top_p, 1.0), ("--min-p", min_p, 0.0)):
        fix = "leave it out, or give a temperature above 0: temperature 0 takes the most likely token"
        need(value == neutral or temperature > 0, name, value, fix)


def messages_of(text: str, system: str | None) -> list[Message]:
    """Return the messages of a new conversation: the system message, if there is one, and the user message."""
    first = [] if system is None else [{"role": "system", "content": system}]
    return [*first, {"role": "user", "content": text}]


def open_speaker(
    files: ModelFiles,
    *,
    plain: bool = False,
    chat_template: str | None = None,
    template_arguments: Mapping[str, Any] | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    dtype: str = "auto",
    device: str = "auto",
) -> Speaker:
    """Load a model and its tokenizer, and return a `Speaker`.

    `plain`: use prompts without a chat template. `dtype` "auto" is the dtype of the weight files on a GPU, and float32
    on a CPU.
    """
    truncation = Truncation(top_k=top_k, top_p=top_p, min_p=min_p)
    check_sampling(temperature, seed, truncation)
    place = device_named(device)
    tokenizer = open_tokenizer(files.tokenizer, SETTING)
    chat = None
    if not plain:
        chat = _renderer(tokenizer, chat_template or files.chat_template, template_arguments)
    model, kind = load_language_model(files, dtype_named(dtype, place), place)
    return Speaker(
        model,
        tokenizer,
        chat=chat,
        temperature=temperature,
        truncation=truncation,
        seed=seed,
        dtype=kind,
        device=place,
    )


def load_language_model(
    files: ModelFiles, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> tuple[PreTrainedModel, torch.dtype]:
    """Load a model, and merge its adapters if it has any. Return the model and the dtype in which it should run.

    `dtype`: None: the dtype of the weight files. A model with adapters is returned in float32 on the CPU. Another model
    is returned in this dtype, on `device`.
    """
    config, weights = open_model(files.weights, init_setting=None)
    if any(name.endswith("Classification") for name in config.architectures or ()):
        raise UserError(
            SETTING, f"{files.weights} is a reward model, which gives scores and no text", "give a language model"
        )
    kind = base_dtype(config, weights) if dtype is None else dtype
    if files.adapter is not None:
        return _with_adapter(files.weights, files.adapter), kind
    return load_model(files.weights, dtype=kind, device=device), kind


def _renderer(tokenizer: Any, template: str | None, arguments: Mapping[str, Any] | None) -> ChatRenderer:
    if template is None and not tokenizer.chat_template:
        raise UserError(
            SETTING,
            "the tokenizer has no chat template",
            "give a file with --chat-template, or use padfree generate --plain",
        )
    text = None if template is None else read_template(template, "--chat-template")
    source = text if text is not None else str(tokenizer.chat_template)
    for name in arguments or ():
        need(name in source, "--template-arguments", name, "remove this name: the chat template does not use it")
    return ChatRenderer(tokenizer, text, arguments)


def device_named(name: str) -> torch.device:
    cuda = torch.cuda.is_available()
    if name == "cuda" and not cuda:
        raise UserError("--device", "'cuda', but torch finds no GPU", "choose cpu, or install a CUDA build of torch")
    return torch.device("cuda" if cuda and name != "cpu" else "cpu")


def dtype_named(name: str, device: torch.device) -> torch.dtype | None:
    """Return the dtype called `name`; for "auto", float32 on a CPU, and None (as in the weight files) on a GPU."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else None
    found: torch.dtype = getattr(torch, name)
    return found


def _with_adapter(base: str, folder: Path) -> PreTrainedModel:
    """Load the base model, and merge the adapters in `folder` into its weights, in float32 on the CPU.

    `padfree.model.export` merges in the same way.
    """
    try:
        from peft import PeftModel, get_peft_model_state_dict
    except ModuleNotFoundError:
        raise UserError(
            SETTING, f"{folder} holds adapters, but peft is not installed", "pip install 'padfree[lora]'"
        ) from None
    from safetensors.torch import load_file

    model = load_model(base, dtype=torch.float32)
    try:
        stored = set(load_file(folder / ADAPTER_WEIGHTS))
        adapted: Any = PeftModel.from_pretrained(model, str(folder))
        wanted = set(get_peft_model_state_dict(adapted))
        merged = adapted.merge_and_unload()
    except Exception as error:  # the files can contain anything, and can belong to another base model
        raise UserError(
            SETTING,
            f"the adapters of {folder} do not fit {base} ({shown_error(error)})",
            "set --base to the base model that the adapters were trained on",
        ) from None
    if stored != wanted:
        raise UserError(
            SETTING,
            f"the adapters of {folder} do not fit {base}: only one of the two has {min(stored ^ wanted)}",
            "set --base to the base model that the adapters were trained on",
        )
    assert isinstance(merged, PreTrainedModel)
    return merged
