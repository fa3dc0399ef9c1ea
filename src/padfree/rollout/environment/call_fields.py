"""The fields that an API call of an agent program may have, and how they are handled.

    FOLLOWED     messages, max_tokens, ...      the field takes effect
    OVERRIDDEN   temperature, seed, ...         the run's setting applies instead, and the call is counted
    truncation   top_p, top_k, ...              only the value of the run is accepted
    NEUTRAL      stop, logit_bias, ...          only a value that has no effect is accepted
    METADATA     user, metadata, ...            the field is ignored

A call with any other field is rejected. `null` is the same as a missing field. docs/guides/environments.md lists all
fields.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from padfree.data.records import shown
from padfree.errors import UserError
from padfree.rollout.environment.listener import CallError
from padfree.rollout.truncation import WHOLE, Truncation

CHAT, COMPLETIONS = "chat/completions", "completions"
MAX_CHOICES = 128
LONGEST_NAME = 512

Rule = tuple[Callable[[Any], bool], str]
"""A test of a value, and the advice in the error message if the value fails it."""


def _integer(low: int, high: int) -> Rule:
    return lambda value: type(value) is int and low <= value <= high, f"give an integer from {low} to {high}"


def _number(low: float, high: float) -> Rule:
    def right(value: Any) -> bool:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high

    return right, f"give a number from {low:g} to {high:g}"


def _text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= LONGEST_NAME


_LINE: Rule = (_text, f"give a string of at most {LONGEST_NAME} characters")
_FLAG: Rule = (lambda value: isinstance(value, bool), "give true or false")
_POSITIVE: Rule = (lambda value: type(value) is int and value >= 1, "give 1 or more")


def _is_tool(tool: Any) -> bool:
    if not isinstance(tool, dict) or tool.get("type", "function") != "function":
        return False
    function = tool.get("function")
    return isinstance(function, dict) and _text(function.get("name")) and bool(function["name"])


FOLLOWED: dict[str, Rule] = {
    "model": _LINE,  # any name: there is only one model, and the answer repeats the name
    "messages": (lambda value: isinstance(value, list) and bool(value), "give a list of objects with role and content"),
    "prompt": (lambda value: isinstance(value, (str, list)) and bool(value), "give a string, or a list of token ids"),
    "n": _integer(1, MAX_CHOICES),
    "max_tokens": _POSITIVE,
    "max_completion_tokens": _POSITIVE,
    "stream": _FLAG,
    "stream_options": (
        lambda value: (
            isinstance(value, dict)
            and set(value) <= {"include_usage"}
            and isinstance(value.get("include_usage", False), bool)
        ),
        'give {"include_usage": true}',
    ),
    "tools": (
        lambda value: isinstance(value, list) and all(map(_is_tool, value)),
        'give a list of {"type": "function", "function": {"name": ...}}',
    ),
    "tool_choice": (
        lambda value: value in ("auto", "none"),
        "give auto, or none to leave the tools out; a tool call cannot be forced, because every token must be sampled "
        "from the policy's own distribution",
    ),
}
OVERRIDDEN: dict[str, Rule] = {
    "temperature": _number(0, 100),
    "presence_penalty": _number(-2, 2),
    "frequency_penalty": _number(-2, 2),
    "seed": _integer(-(2**63), 2**64 - 1),
}
DEFAULTS = {"presence_penalty": 0, "frequency_penalty": 0}
"""The policy samples without penalties (0). An API call with other penalties is counted as overridden.

A call is also counted as overridden if it gives a temperature other than `loss.temperature`, or a seed.
"""

NEUTRAL: dict[str, Sequence[Any]] = {
    "stop": ([],),
    "logit_bias": ({},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "response_format": ({"type": "text"},),
    "functions": ([],),
    "function_call": ("auto", "none"),
    "parallel_tool_calls": (True,),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
    # extensions of servers such as vLLM
    "typical_p": (1,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "ignore_eos": (False,),
    "stop_token_ids": ([],),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "truncate_prompt_tokens": (),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_decoding_backend": (),
}
METADATA: dict[str, Rule] = {
    "user": _LINE,
    "safety_identifier": _LINE,
    "prompt_cache_key": _LINE,
    "cache_salt": _LINE,
    "request_id": _LINE,
    "metadata": (
        lambda value: isinstance(value, dict) and all(map(_text, value.values())),
        "give an object with strings as values",
    ),
}
OF_CHAT = {"messages", "tools", "tool_choice", "parallel_tool_calls", "functions", "function_call"}
OF_COMPLETIONS = {"prompt", "echo", "suffix", "best_of"}

MESSAGE_KEYS = {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning", "thinking"}
"""Allowed keys of a message. All of them are passed to the chat template."""


def parsed(raw: bytes) -> dict[str, Any]:
    """Parse the body of an API call as a JSON object, and return it without the fields that are null."""
    try:
        body = json.loads(raw.decode("utf-8") or "{}", object_pairs_hook=_object, parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise CallError(400, f"the body is not JSON: byte {error.start + 1} is not UTF-8") from None
    except RecursionError:
        raise CallError(400, "the body is nested too deeply") from None
    except ValueError as error:
        raise CallError(400, f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise CallError(400, "the body is not a JSON object")
    return {name: value for name, value in body.items() if value is not None}


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise UserError.of(f"an object has {shown(twice)} twice; give it once")
    return found


def _no_constant(name: str) -> Any:
    raise UserError.of(f"{name} is not a JSON number; give a finite number, or leave it out")


def truncation_values(truncation: Truncation) -> dict[str, Sequence[Any]]:
    """Return the values that an API call may give for each truncation field, such as `top_p`.

    Each of these values means the same truncation as the run's setting. For example, `top_k` may be 0 or -1 if the run
    has no top-k.
    """
    every = (0, -1) if truncation.top_k is None else (truncation.top_k,)
    return {
        "top_p": (truncation.top_p,),
        "top_k": every,
        "min_p": (truncation.min_p,),
        "min_tokens": (truncation.min_new_tokens,),
    }


def check_fields(body: Mapping[str, Any], route: str, temperature: float, truncation: Truncation = WHOLE) -> bool:
    """Raise a `CallError` for unsupported fields of an API call. Return whether a sampling field is overridden.

    `body`: the fields of the call. `route`: e.g. chat/completions. `temperature`, `truncation`: the values of the run.
    """
    elsewhere = OF_COMPLETIONS if route == CHAT else OF_CHAT
    of_run = truncation_values(truncation)
    for name, value in body.items():
        if name in elsewhere:
            raise CallError(400, f"{name} is not a field of {route}; leave it out")
        rule = FOLLOWED.get(name) or OVERRIDDEN.get(name) or METADATA.get(name)
        if rule is not None:
            right, fix = rule
            if not right(value):
                raise CallError(400, f"{name}: {shown(value)} is not valid; {fix}")
        elif name in of_run:
            if not any(_same(value, one) for one in of_run[name]):
                raise CallError(
                    400,
                    f"{name}: {shown(value)} differs from the run's {shown(of_run[name][0])}, with which the policy is "
                    f"trained; leave it out, or give {shown(of_run[name][0])}",
                )
        elif name not in NEUTRAL:
            raise CallError(400, f"{shown(name)} is an unknown field; leave it out")
        elif not any(_same(value, one) for one in NEUTRAL[name]):
            raise CallError(
                400,
                f"{name} is not supported ({shown(value)}), because every token must be sampled from the "
                "policy's own distribution; leave it out",
            )
    needed = "messages" if route == CHAT else "prompt"
    if needed not in body:
        raise CallError(400, f"{needed}: missing; {FOLLOWED[needed][1]}")
    if "stream_options" in body and not body.get("stream"):
        raise CallError(400, "stream_options: given without stream; leave it out, or set stream to true")
    limits = {body[name] for name in ("max_tokens", "max_completion_tokens") if name in body}
    if len(limits) > 1:
        raise CallError(400, "max_tokens and max_completion_tokens differ; give one of them")
    usual = {**DEFAULTS, "temperature": temperature}
    return any(name in body and body[name] != usual.get(name) for name in OVERRIDDEN)


def _same(value: Any, neutral: Any) -> bool:
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)


def messages_of(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the messages of an API call in the form for a chat template: content as a string, and no null keys."""
    converted = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, dict):
            raise CallError(400, f"{where}: {shown(message)} is not an object; give an object with role and content")
        kept = {key: value for key, value in message.items() if value is not None}
        unknown = next((key for key in kept if key not in MESSAGE_KEYS and kept[key] != []), None)
        if unknown is not None:
            raise CallError(400, f"{where}: {shown(unknown)} is an unknown key; leave it out")
        if not _text(kept.get("role")) or not kept["role"]:
            raise CallError(400, f"{where}.role: {shown(kept.get('role'))} is not a role; give a name such as user")
        for key in ("name", "tool_call_id"):
            if not _text(kept.get(key, "")):
                raise CallError(400, f"{where}.{key}: {shown(kept[key])} is not valid; {_LINE[1]}")
        for key in ("reasoning_content", "reasoning", "thinking"):
            if not isinstance(kept.get(key, ""), str):
                raise CallError(400, f"{where}.{key}: {shown(kept[key])} is not a string; give a string")
        calls = kept.get("tool_calls", [])
        if not isinstance(calls, list) or not all(map(_is_tool_call, calls)):
            raise CallError(
                400,
                f'{where}.tool_calls: not a list of tool calls; give a list of {{"function": {{"name", "arguments"}}}}',
            )
        converted.append({**{key: kept[key] for key in kept if key in MESSAGE_KEYS}, "content": _content(kept, where)})
    return converted


def _is_tool_call(call: Any) -> bool:
    if not _is_tool(call):
        return False
    return isinstance(call["function"].get("arguments", ""), (str, dict))


def _content(message: Mapping[str, Any], where: str) -> str:
    """Return the text of a message, whose content is a string or a list of text parts.

    A message with tool calls may have no content. `where` names the message in errors, e.g. `messages[0]`.
    """
    content = message.get("content", "" if message.get("tool_calls") else None)
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise CallError(400, f"{where}.content: {shown(content)} is not text; give a string, or a list of text parts")
    for part in content:
        right = isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
        if not right or set(part) - {"type", "text"}:
            kind = shown(part.get("type")) if isinstance(part, dict) else shown(part)
            raise CallError(400, f'{where}.content: part {kind} is not text; give {{"type": "text", "text": ...}}')
    return "".join(part["text"] for part in content)


def max_tokens_asked(body: Mapping[str, Any]) -> float:
    """Return the maximum number of tokens that a call asks for; infinity if it gives none."""
    limit: int | None = body.get("max_completion_tokens", body.get("max_tokens"))
    return math.inf if limit is None else limit
