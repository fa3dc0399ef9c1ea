"""Tool calls in the text of responses, answers that return as messages, rewards of groups, names of environments."""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import json
import queue
from collections.abc import Sequence
from typing import Any

import pytest

from padfree.config.packaged import check_package, is_packaged, packaged_environment
from padfree.data.chat_renderer import ChatRenderer
from padfree.rollout import Prompt
from padfree.rollout.base import OnResponse, SamplingRequest
from padfree.rollout.environment import Policy, Trajectory
from padfree.rollout.environment.group_rewards import GroupReward, Scored
from padfree.rollout.environment.responder import PolicyResponder
from padfree.rollout.environment.runner import EpisodeRunner, RunnerSettings
from padfree.rollout.environment.tool_calls import ToolCallParser
from padfree.rollout.group import Play, Played, RolloutGroup, Watcher
from tests.refused import refused
from tests.rollout.environment.environment_cases import CHAT, Scripted, chat_tokenizer, play, prompt, text, tokenizer

TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "adds", "parameters": {"type": "object", "properties": {}}},
}


def template(calls: str, end: str = "") -> str:
    """A chat template that writes each tool call, or the list of them, in this way."""
    return (
        "{% if tools %}[s]{{ tools | tojson }}{% endif %}"
        "{% for message in messages %}[{{ message['role'][0] }}]{{ message['content'] }}"
        "{% if message['tool_calls'] %}" + calls + "{% endif %}"
        "{% if message['role'] == 'assistant' %}<eos>{% endif %}{{ '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}[a]{% endif %}" + end
    )


EACH = "{% for call in message['tool_calls'] %}{% endfor %}"
TAGS = template(EACH.replace("%}{%", "%}<tool_call>\n{{ call['function'] | tojson }}\n</tool_call>{%", 1))
BRACKETS = template(
    "[TOOL_CALLS][{% for call in message['tool_calls'] %}{{ call['function'] | tojson }}"
    "{{ ', ' if not loop.last }}{% endfor %}]"
)
OBJECT = template(
    "{% for call in message['tool_calls'] %}"
    '{"name": "{{ call["function"]["name"] }}", "parameters": {{ call["function"]["arguments"] | tojson }}}'
    "{% endfor %}"
)


def parser(source: str) -> ToolCallParser:
    return ToolCallParser(ChatRenderer(tokenizer(source)))


def called(message: Any) -> list[tuple[str, Any]]:
    return [
        (call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message.get("tool_calls", ())
    ]


@pytest.mark.parametrize(("source", "name"), [(TAGS, "tags"), (BRACKETS, "brackets"), (OBJECT, "object")])
def test_the_template_says_the_format(source: str, name: str) -> None:
    assert parser(source).format == name


def test_tool_calls_are_read_from_the_text() -> None:
    two = 'well <tool_call>{"name":"a","arguments":{"x":[1]}}</tool_call>\n<tool_call>{"name": "b", "arguments": {}}'
    message = parser(TAGS).message(two, 3)
    assert message["content"] == "well "
    assert called(message) == [("a", {"x": [1]}), ("b", {})]
    assert [call["id"] for call in message["tool_calls"]] == ["call_3_0", "call_3_1"]
    assert called(parser(BRACKETS).message('[TOOL_CALLS] [{"name": "a", "arguments": {"x": 1}}]', 1)) == [
        ("a", {"x": 1})
    ]
    assert called(parser(OBJECT).message(' {"name": "a", "parameters": {"x": 1}}', 1)) == [("a", {"x": 1})]


@pytest.mark.parametrize(
    "said",
    [
        "no call",
        '<tool_call>{"name": "a", "arguments": {',
        '<tool_call>{"name": "a", "arguments": "x"}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>["a"]</tool_call>',
        "<tool_call></tool_call>",
        '<tool_call>{"name": "a", "arguments": {}}</tool_call><tool_call>oops</tool_call>',
        "<tool_call>" + "[" * 100_000,
        '<tool_call>{"name": "a\\ud800", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "a", "arguments": {"x": ' + "[" * 100 + "]" * 100 + "}}</tool_call>",
    ],
)
def test_what_is_not_a_tool_call_is_text(said: str) -> None:
    assert parser(TAGS).message(said, 1) == {"role": "assistant", "content": said}


def test_other_formats_are_refused() -> None:
    with refused("data.chat_template", "padfree cannot read"):
        parser(template("call {{ message['tool_calls'][0]['function']['name'] }}"))
    with refused("data.chat_template", "shows no tool calls"):
        parser(template(""))
    with refused("data.chat_template", "shows no tool calls"):
        parser("{% if tools %}{{ raise_exception('no tools') }}{% endif %}" + CHAT)


# Answers that return as messages


SAID = '<tool_call>{"arguments":{"a":2},"name":"add"}</tool_call>'


def episode_of(changed: Any, found: list[Any]) -> Any:
    """Two requests: the second returns the answer to the first as `changed` makes it, with the result of its tool."""

    async def episode(task: Prompt, policy: Policy) -> Trajectory:
        responder = PolicyResponder(policy.tree, policy.host, lambda: parser(TAGS))
        asked = [{"role": "user", "content": "q"}]
        first = await responder.respond(asked, {}, [TOOL])
        result = {"role": "tool", "content": "2", "tool_call_id": first.answer["tool_calls"][0]["id"]}
        second = await responder.respond([*asked, changed(first.answer), result], {}, [TOOL])
        found.extend([first, second])
        return policy.trajectory(1.0)

    return episode


def script(context: str, key: int) -> str:
    return "2$" if "[t]2" in context else f"{SAID}$"


def test_an_answer_that_returns_unchanged_continues_from_its_ids() -> None:
    found: list[Any] = []
    (played,) = play(episode_of(dict, found), script, prompt("q", max_new_tokens=900), template=TAGS)
    (leaf,) = played.leaves
    before = text(found[0].context.ids)
    assert text(leaf.tokens.tolist()) == f"{before}{SAID}$\n[t]2\n[a]2$"
    assert text(leaf.tokens[leaf.sampled].tolist()) == f"{SAID}$2$"
    assert played.counts == {"calls": 2}


def test_an_answer_that_was_changed_starts_a_new_sample() -> None:
    """The second sample begins with the text of the template, which has none of the sampled ids."""
    found: list[Any] = []
    change = lambda answer: {**answer, "content": "hm"}  # noqa: E731
    (played,) = play(episode_of(change, found), script, prompt("q", max_new_tokens=900), template=TAGS)
    assert played.counts == {"calls": 2, "cuts": 1}
    assert sorted(text(leaf.tokens[leaf.sampled].tolist()) for leaf in played.leaves) == ["2$", f"{SAID}$"]


def test_a_template_that_rewrites_earlier_answers_starts_a_new_sample() -> None:
    """The template shows the number of messages at the start, so no text continues another."""
    source = "{{ messages | length }}" + TAGS
    found: list[Any] = []
    (played,) = play(episode_of(dict, found), script, prompt("q", max_new_tokens=900), template=source)
    assert played.counts == {"calls": 2, "cuts": 1}
    assert len(played.leaves) == 2


def test_requests_that_cannot_be_served_are_refused() -> None:
    async def episode(task: Prompt, policy: Policy) -> Trajectory:
        responder = PolicyResponder(policy.tree, policy.host, lambda: parser(TAGS))
        await responder.respond([{"role": "user", "content": "q"}], {"n": 2}, None)
        return policy.trajectory(1.0)

    (played,) = play(episode, {}, prompt("q"), template=CHAT, skip_failures=True)
    assert "2 responses at once" in str(played.failure)
    (played,) = play(episode, {}, prompt("q"), skip_failures=True)
    assert "2 responses at once" in str(played.failure)


# Rewards of groups


class Queued(Scripted):
    """An async sampler that answers at once."""

    failure: Exception | None = None
    stuck = False

    def begin(self, requests: Sequence[SamplingRequest], on_response: OnResponse) -> None:
        for index, response in enumerate(self.sample(requests)):
            on_response(index, response)


def grouped(
    answers: Sequence[str],
    *,
    concurrent: int = 8,
    size: int | None = None,
    fails: int | None = None,
    skip: bool = False,
    queued: bool = False,
) -> list[Played]:
    async def score(results: Sequence[Any]) -> list[Scored]:
        await asyncio.sleep(0)
        return [(float(result == max(results)), {"place": float(index)}) for index, result in enumerate(results)]

    async def episode(task: Prompt, policy: Policy) -> Trajectory:
        turn = await policy.generate()
        if fails is not None and turn.text == answers[fails]:
            raise RuntimeError("broken")
        return policy.trajectory(group_reward=GroupReward(result=turn.text, score=score))

    settings = RunnerSettings(name="e", max_concurrent=concurrent, timeout=60.0, skip_failures=skip)
    scripted = (Queued if queued else Scripted)(lambda context, key: f"{answers[order.setdefault(key, len(order))]}$")
    order: dict[int, int] = {}
    runner = EpisodeRunner(episode, scripted, chat_tokenizer(), None, settings)
    group = RolloutGroup(prompt=prompt("p"), size=size or len(answers))
    plays = [Play(number=number, group=group, key=number) for number in range(len(answers))]
    try:
        if not queued:
            return runner.play(plays, lambda own: [own])
        played: queue.SimpleQueue[Played] = queue.SimpleQueue()
        runner.begin(plays, Watcher(on_played=played.put))
        return [played.get(timeout=60) for _ in plays]
    finally:
        runner.close()


@pytest.mark.parametrize("concurrent", [1, 2, 8])
def test_a_group_is_scored_when_its_last_episode_ends(concurrent: int) -> None:
    played = grouped(["b", "c", "a"], concurrent=concurrent)
    assert [one.reward for one in played] == [0.0, 1.0, 0.0]
    assert [dict(one.metrics) for one in played] == [{"place": 0.0}, {"place": 1.0}, {"place": 2.0}]


@pytest.mark.parametrize("concurrent", [1, 8])
@pytest.mark.parametrize("fails", [0, 1, 2])
def test_a_failed_episode_fails_its_whole_group(concurrent: int, fails: int) -> None:
    played = grouped(["b", "c", "a"], concurrent=concurrent, fails=fails, skip=True)
    assert "broken" in str(played[fails].failure)
    others = [str(one.failure) for number, one in enumerate(played) if number != fails]
    assert all("another episode of the same prompt failed" in failure for failure in others)


def test_a_group_of_queued_episodes_is_refused() -> None:
    """A checkpoint may hold some episodes of a queued group and not the others."""
    assert all("rollout.staleness" in str(one.failure) for one in grouped(["b", "c"], skip=True, queued=True))


def test_a_divided_group_is_refused() -> None:
    with refused("rollout.environment", "all 4 episodes of a prompt, but only 3 of them are on one rank"):
        grouped(["b", "c", "a"], concurrent=8, size=4)


# Names


def test_names_of_environments_of_packages() -> None:
    given = packaged_environment('verifiers:me/a-b?rows=3&mode="hard"&word=x%26y&on=true#eval', "data.path")
    assert (given.package, given.name, given.held_out) == ("verifiers", "me/a-b", True)
    assert given.arguments == {"rows": 3, "mode": "hard", "word": "x&y", "on": True}
    assert packaged_environment("openenv:http://h:1/x", "data.path").name == "http://h:1/x"
    assert all(map(is_packaged, ("verifiers:a", "openenv:h")))
    assert not any(map(is_packaged, ("verifiers", "my_module:f", "data/verifiers:x", "C:verifiers")))


def test_a_missing_package_and_another_version_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with refused("rollout.environment", "needs the package verifiers, which is not installed"):
        check_package("verifiers", "rollout.environment", "verifiers:a")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    for version in ("0.1.14", "0.4.0", "1.0"):
        monkeypatch.setattr(importlib.metadata, "version", lambda name, version=version: version)
        with refused("rollout.environment", f"needs verifiers>=0.2,<0.4, but {version} is installed"):
            check_package("verifiers", "rollout.environment", "verifiers:a")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.3.1.dev4")
    check_package("verifiers", "rollout.environment", "verifiers:a")
