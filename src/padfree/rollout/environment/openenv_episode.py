"""Play episodes of an environment that an OpenEnv server provides, with the client of the openenv package.

    rollout.environment = "openenv:http://127.0.0.1:8000?action=message&observation=text"

With this setting, each response of the policy is sent as the field `message` of an action. The field `text` of the
server's observation becomes the next user message. The first observation is appended to the prompt.

Every episode has its own session at the server. Its reward is the sum of the rewards of its steps. With `&reward=last`,
it is the last of these rewards.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from padfree.config.packaged import packaged_environment
from padfree.data.conversation import Conversation
from padfree.errors import UserError, shown_error
from padfree.rollout.environment.episode_policy import ChatTokenizer, Episode, Policy
from padfree.rollout.environment.responder import OverlongContextError, PolicyResponder
from padfree.rollout.environment.tool_calls import ToolCallParser
from padfree.rollout.environment.trajectory import Trajectory
from padfree.rollout.prompts import Prompt

SETTING = "rollout.environment"
RESET = "reset"
"""The column of the data whose value, an object, holds the arguments of the environment's reset. It is optional."""
JSON = "json"
TURNS = 16
SECONDS = 30.0
"""Timeout in seconds of the request for the schema of an OpenEnv server."""
_GENERAL = {"done", "reward", "metadata"}
_INVALID = "VALIDATION_ERROR"
"""The code with which a server refuses an action that does not fit its schema."""

Reward = Literal["sum", "last"]


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenEnvServer:
    """The address of an OpenEnv server, and the fields that hold the text of an action and of an observation.

    `action`, `observation`: the name of a field, or `json` for the whole object as JSON. None: `_field` chooses by the
    server's schema.
    """

    url: str
    action: str | None = None
    observation: str | None = None
    reward: Reward = "sum"
    turns: int = TURNS


def openenv_server(name: str) -> OpenEnvServer:
    """Parse the name of an environment, such as `openenv:http://127.0.0.1:8000?reward=last`."""
    given = packaged_environment(name, SETTING)
    if given.name.partition("://")[0] not in ("http", "https") or not given.name.partition("://")[2]:
        raise UserError(SETTING, "has no address", "give openenv:http://HOST:PORT", value=name)
    known = {"action", "observation", "reward", "turns"}
    for argument, value in given.arguments.items():
        if argument not in known:
            raise UserError(
                SETTING, f"has an unknown argument {argument!r}", f"give {', '.join(sorted(known))}", value=name
            )
        right = {
            "reward": value in ("sum", "last"),
            "turns": type(value) is int and value >= 1,
        }.get(argument, isinstance(value, str) and bool(value))
        if not right:
            fix = {"reward": "give sum or last", "turns": "give 1 or more"}.get(argument, "give the name of a field")
            raise UserError(SETTING, f"has {argument}={value!r}", fix, value=name)
    return OpenEnvServer(url=given.name.rstrip("/"), **given.arguments)


def openenv_episode(name: str) -> Episode:
    """Return the coroutine function that plays an episode at a server such as `openenv:http://127.0.0.1:8000`."""
    server = openenv_server(name)
    client_class = importlib.import_module("openenv.core.generic_client").GenericEnvClient
    fields: list[tuple[str, str]] = []  # the fields of action and observation, after the server has sent its schema
    reading = asyncio.Lock()

    async def fields_of() -> tuple[str, str]:
        async with reading:
            if not fields:
                fields.append(_fields(server, await asyncio.to_thread(_schema, server.url, name), name))
        return fields[0]

    async def episode(prompt: Prompt, policy: Policy) -> Trajectory:
        action, observation = await fields_of()
        messages = _messages(prompt)
        responder = PolicyResponder(policy.tree, policy.host, lambda: _no_tools(policy.host.chat_tokenizer))
        rewards: list[float] = []
        steps = 0
        async with client_class(base_url=server.url) as client:
            result = await client.reset(**_reset_arguments(prompt))
            first = _text(result.observation, observation)
            messages[-1] = {**messages[-1], "content": "\n\n".join(filter(None, (messages[-1]["content"], first)))}
            for _ in range(server.turns):
                if result.done:
                    break
                try:
                    responded = await responder.respond(messages, {}, None)
                except OverlongContextError:
                    break
                steps += 1
                said = responded.turn.text
                messages.append({"role": "assistant", "content": said})
                result, refusal = await _step(client, said, action, result)
                if refusal is None and result.reward is not None:
                    rewards.append(float(result.reward))
                text = _text(result.observation, observation) if refusal is None else refusal
                messages.append({"role": "user", "content": text})
        total = None if not rewards else sum(rewards) if server.reward == "sum" else rewards[-1]
        return policy.trajectory(reward=total, metrics={"done": float(result.done), "steps": float(steps)})

    return episode


async def _step(client: Any, said: str, field: str, before: Any) -> tuple[Any, str | None]:
    """Send the text of a turn to the server as an action. Return the server's result, and None.

    If the action is not valid, return `before` (the last valid result) and the reason. The policy reads the reason as
    its next observation.
    """
    if field != JSON:
        action: Any = {field: said}
    else:
        try:
            action = json.loads(said)
        except (ValueError, RecursionError) as error:
            return before, f"The action is not valid JSON: {error}"
        if not isinstance(action, dict):
            return before, "The action is not a JSON object."
    try:
        return await client.step(action), None
    except RuntimeError as error:  # the client raises this for every error that the server reports
        if _INVALID not in str(error):
            raise
        return before, f"The action is not valid: {error}"


def _messages(prompt: Prompt) -> list[dict[str, Any]]:
    if not isinstance(prompt.asked, Conversation):
        raise UserError(
            "data.prompt_format",
            "uses no chat template, but an OpenEnv environment needs one for its observations",
            "set data.prompt_format=chat, and data.chat_template if the tokenizer has no template",
        )
    return [dict(message) for message in prompt.asked.messages]


def _no_tools(tokenizer: ChatTokenizer) -> ToolCallParser:
    raise AssertionError("requests have no tools")


def _reset_arguments(prompt: Prompt) -> dict[str, Any]:
    given = prompt.row.get(RESET) or {}
    if not isinstance(given, Mapping):
        raise UserError(
            "data.path", f"{prompt.uid} has a column {RESET!r} whose value is not a JSON object", "give an object"
        )
    return {str(key): value for key, value in given.items() if value is not None}


def _schema(url: str, name: str) -> Mapping[str, Any]:
    try:
        with urllib.request.urlopen(f"{url}/schema", timeout=SECONDS) as answer:
            found = json.load(answer)
    except (OSError, ValueError) as error:
        raise UserError(
            SETTING,
            f": the server gave no schema ({shown_error(error)})",
            "start the server of the environment, or correct its address",
            value=name,
        ) from None
    if not isinstance(found, dict) or not all(isinstance(found.get(part), dict) for part in ("action", "observation")):
        raise UserError(SETTING, ": the server is not an OpenEnv server", "correct the address", value=name)
    return found


def _fields(server: OpenEnvServer, schema: Mapping[str, Any], name: str) -> tuple[str, str]:
    """Return the name of the field that holds the text of an action, and the same for an observation.

    `schema`: the schemas of actions and observations that the server gives. `name`: the environment, for messages.
    """
    return (
        _field(schema["action"], server.action, "action", name),
        _field(schema["observation"], server.observation, "observation", name),
    )


def _field(schema: Mapping[str, Any], given: str | None, part: str, name: str) -> str:
    """Return the name of the field with the text of an action or observation (`part`), or `json` for the whole object.

    `given`: the field that the user has chosen. If it is None, choose the only text field of `schema`, or else `json`.
    `name`: the environment, for error messages.
    """
    properties = {key: value for key, value in schema.get("properties", {}).items() if key not in _GENERAL}
    if given is not None and given != JSON and given not in properties:
        known = ", ".join([*sorted(properties), JSON])
        raise UserError(
            SETTING,
            f": the {part} schema of the server has no field {given!r}",
            f"write {part}=NAME in this address, with one of the names {known}",
            value=name,
        )
    if given is not None:
        return given
    texts = [key for key, value in properties.items() if value.get("type") == "string"]
    # An action needs all its required fields, so one text is not enough.
    others = set(schema.get("required", ())) - _GENERAL - set(texts)
    return texts[0] if len(texts) == 1 and not (part == "action" and others) else JSON


def _text(observation: Any, field: str) -> str:
    if field == JSON:
        shown = {key: value for key, value in observation.items() if key not in _GENERAL and value is not None}
        return json.dumps(shown, ensure_ascii=False)
    value = observation.get(field)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
