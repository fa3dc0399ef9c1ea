"""Faults that change a prompt before the server's model sees it: special tokens, chat template, another tokenizer.

In this example, `s` is the bos token:

    the ids that the model's tokenizer gives      s 7 8 9
    special tokens twice                        s s 7 8 9
    special tokens missing                        7 8 9

If the server returns the ids of a prompt, padfree compares them with such candidates. Otherwise, the model scores the
server's response after each candidate. The right candidate explains the log-probabilities that the server reports.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from padfree.data.chat_renderer import ChatRenderer
from padfree.tools.doctor.hypothesis import Case, Hypothesis, Proposal, Proposals
from padfree.tools.doctor.rescoring import rescored

TWICE, MISSING, ADDED = "special tokens twice", "special tokens missing", "special tokens added"
TEMPLATE, TOKENIZER = "chat template", "tokenizer"

FIXES = {
    TWICE: "send token ids, or send add_special_tokens=false with a text that already has special tokens",
    MISSING: "send token ids, or send add_special_tokens=true",
    ADDED: "send token ids, or send add_special_tokens=false",
    TEMPLATE: "start the server with the chat template of the model (--chat-template), or send token ids",
    TOKENIZER: "start the server with the tokenizer of the model (--tokenizer), or send token ids",
}

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A possible fault of a server, and the token ids that the server's model reads as the prompt with this fault."""

    cause: str
    says: str
    ids: tuple[int, ...]


def special_token_candidates(tokenizer: Any, ids: Sequence[int]) -> Iterator[Candidate]:
    """Yield the token ids that a server with a bos token too many or too few would read in place of `ids`.

    If `ids` begin with the bos token: `ids` with a second one, and `ids` without it. Otherwise: `ids` with a bos token.
    """
    bos = getattr(tokenizer, "bos_token_id", None)
    if bos is None:
        return
    name = tokenizer.convert_ids_to_tokens(bos)
    if ids and ids[0] == bos:
        yield Candidate(cause=TWICE, says=f"the server begins prompts with {name} twice", ids=(bos, *ids))
        yield Candidate(cause=MISSING, says=f"the server begins prompts without {name}", ids=(*ids[1:],))
    else:
        yield Candidate(cause=ADDED, says=f"the server begins prompts with {name}", ids=(bos, *ids))


def chat_ids(
    tokenizer: Any, chat: ChatRenderer, messages: Sequence[Any], *, generation_prompt: bool = True
) -> list[int]:
    text = chat.render(messages, generation_prompt=generation_prompt)
    return [int(token) for token in tokenizer(text, add_special_tokens=False)["input_ids"]]


def chat_candidates(
    tokenizer: Any, chat: ChatRenderer, messages: Sequence[Any], template: str | None
) -> Iterator[Candidate]:
    """Yield the token ids that a faulty server may make of `messages`, e.g. those without the generation prompt.

    `template`: the text of the chat template.
    """
    expected = chat_ids(tokenizer, chat, messages)
    yield from special_token_candidates(tokenizer, expected)
    without = chat_ids(tokenizer, chat, messages, generation_prompt=False)
    if without != expected:
        yield Candidate(cause=TEMPLATE, says="the server adds no generation prompt", ids=(*without,))
    for value in (False, True):
        if "enable_thinking" in (template or ""):
            with suppress(Exception):  # a template can raise any error
                other = ChatRenderer(tokenizer, template, {"enable_thinking": value})
                yield Candidate(
                    cause=TEMPLATE,
                    says=f"the server renders the chat template with enable_thinking={value}",
                    ids=(*chat_ids(tokenizer, other, messages),),
                )
    with suppress(Exception):
        other = ChatRenderer(tokenizer, CHATML)
        yield Candidate(
            cause=TEMPLATE,
            says="the server uses the ChatML template instead of the model's",
            ids=(*chat_ids(tokenizer, other, messages),),
        )
    text = "\n".join(message["content"] for message in messages)
    for special in (True, False):
        ids = tokenizer(text, add_special_tokens=special)["input_ids"]
        yield Candidate(cause=TEMPLATE, says="the server uses no chat template", ids=(*map(int, ids),))


# Hypotheses for responses: the model may have read other prompts than those in the evidence


def other_prompts(case: Case) -> Proposals:
    """Yield possible faults: in every prompt, the server adds or drops special tokens or the generation prompt."""
    if case.tokenizer is None:
        return
    prompts = case.evidence.prompts
    lists = [list(special_token_candidates(case.tokenizer, prompt)) for prompt in prompts]
    for candidates in zip(*lists, strict=False):
        if len({candidate.cause for candidate in candidates}) == 1:
            yield _scored(case, candidates[0].cause, candidates[0].says, [candidate.ids for candidate in candidates])
    ending = generation_prompt_of(case.tokenizer)
    if ending:
        size = len(ending)
        if all(prompt[-size:] == ending for prompt in prompts):
            shorter = [prompt[:-size] for prompt in prompts]
            if all(shorter):
                yield _scored(case, TEMPLATE, "the server adds no generation prompt", shorter)
        elif all(prompt[-size:] != ending for prompt in prompts):
            longer = [prompt + ending for prompt in prompts]
            yield _scored(case, TEMPLATE, "the server adds a generation prompt to prompts that have none", longer)


def _scored(case: Case, cause: str, says: str, prompts: Sequence[Sequence[int]]) -> Proposal:
    predicted = rescored(case.model, case.evidence.with_prompts(prompts))
    return Proposal(cause=cause, says=says, fix=FIXES[cause], logprobs=predicted)


def generation_prompt_of(tokenizer: Any) -> list[int]:
    """Return the ids that the chat template adds at the end, where the answer begins; [] without a chat template."""
    if not getattr(tokenizer, "chat_template", None):
        return []
    messages = [{"role": "user", "content": "?"}]
    try:
        chat = ChatRenderer(tokenizer)
        long = chat_ids(tokenizer, chat, messages)
        short = chat_ids(tokenizer, chat, messages, generation_prompt=False)
    except Exception:  # a template can raise any error
        return []
    return long[len(short) :] if long[: len(short)] == short else []


PROMPT_HYPOTHESES = (Hypothesis(cause="prompts", propose=other_prompts, parts=("responses",)),)
