"""Programs that use `base_url`: their calls become trajectories token by token, and changed turns are detected."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from padfree.rollout import Prompt
from padfree.rollout.environment import Policy, Trajectory
from padfree.rollout.environment.agent import agent_episode
from padfree.rollout.environment.command import filled
from tests.rollout.environment.environment_cases import CHAT, THINKING, Scripted, ids, play, prompt, text

AGENT = str(Path(__file__).with_name("agent.py"))


def shown(played: Any) -> list[tuple[str, str]]:
    """Tokens and masks of the leaves as text."""
    return [
        (text(leaf.tokens.tolist()), "".join("1" if own else "." for own in leaf.sampled)) for leaf in played.leaves
    ]


def call(url: str, body: Any, route: str = "chat/completions") -> Any:
    request = urllib.request.Request(f"{url}/{route}", None if body is None else json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            raw = answer.read()
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())["error"]["message"]
    return raw.decode() if raw.startswith(b"data:") else json.loads(raw)


def episode_of(*calls: Any, found: list[Any]) -> Any:
    """An episode that makes these calls in order."""

    async def episode(task: Prompt, policy: Policy) -> Trajectory:
        url = await policy.base_url()
        for body, route in calls:
            found.append(await asyncio.to_thread(call, url, body, route))
        return policy.trajectory(1.0)

    return episode


def chat(*said: str, **more: Any) -> tuple[dict[str, Any], str]:
    """Messages of user and assistant, alternating."""
    messages = [
        {"role": "assistant" if index % 2 else "user", "content": content} for index, content in enumerate(said)
    ]
    return {"model": "m", "messages": messages, **more}, "chat/completions"


# Programs


def test_an_unmodified_program_as_the_environment() -> None:
    """Two turns with its own calculator: ids continue, only new text is encoded, and its output is rewarded."""
    script = {"[u]2 and 3?[a]": "so 2+3=$", "[u]2 and 3?[a]so 2+3=$[u]5[a]": "#### 5$"}
    episode = agent_episode([sys.executable, AGENT, "{prompt}"])
    task = prompt("2 and 3?", max_new_tokens=80)
    (played,) = play(episode, script, task, template=CHAT, reward=lambda answer, row: float(answer == "#### 5\n"))
    assert shown(played) == [
        ("[u]2 and 3?[a]so 2+3=$[u]5[a]#### 5$", "." * 14 + "1" * 8 + "." * 7 + "1" * 7),
    ]
    assert played.reward == 1.0
    assert played.counts == {"calls": 2, "sampling_overridden": 2}


def test_sampled_ids_are_kept_if_their_text_encodes_differently() -> None:
    """The model sampled `<`, `e`, `o`, `s`, `>` as letters; encoded as text this would be the stop token."""
    question = "[u]q[a]"
    script = {question: "<eos>1+1=$", question + "<eos>1+1=$[u]2[a]": "x$"}
    episode = agent_episode([sys.executable, AGENT, "{prompt}"])
    (played,) = play(episode, script, prompt("q", max_new_tokens=80), template=CHAT, reward=lambda answer, row: 0.0)
    assert played.leaves[0].tokens.tolist() == ids(question + "<eos>1+1=$[u]2[a]x$")
    assert "cuts" not in played.counts


def test_a_template_that_drops_thoughts_starts_a_new_branch() -> None:
    """Each sample is what the model saw: the thought is in the first sample, but not in the prompt of the second."""
    script = {"[u]2 and 3?[a]": "hm!2+3=$", "[u]2 and 3?[a]2+3=$[u]5[a]": "#### 5$"}
    episode = agent_episode([sys.executable, AGENT, "{prompt}"])
    task = prompt("2 and 3?", max_new_tokens=80)
    (played,) = play(episode, script, task, template=THINKING, reward=lambda answer, row: 1.0)
    assert shown(played) == [
        ("[u]2 and 3?[a]hm!2+3=$", "." * 14 + "1" * 8),
        ("[u]2 and 3?[a]2+3=$[u]5[a]#### 5$", "." * 26 + "1" * 7),
    ]
    assert played.counts == {"calls": 2, "cuts": 1, "sampling_overridden": 2}


def test_programs_that_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    boom = [sys.executable, AGENT, "{prompt}"]
    with pytest.raises(ValueError, match=r"exited with code 1: RuntimeError: boom for 'rows.jsonl:q'; correct the"):
        play(
            agent_episode(boom),
            {"[u]q[a]": "boom$"},
            prompt("q"),
            template=CHAT,
            reward=lambda answer, row: 0.0,
        )
    hangs = [
        sys.executable,
        "-c",
        "import subprocess, time; subprocess.Popen(['sleep', '9'], start_new_session=True); time.sleep(600)",
    ]
    left: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", left.append)
    monkeypatch.setattr("padfree.rollout.environment.agent.GRACE", 0.5)  # the child outlives it
    with pytest.raises(ValueError, match=r"took more than 1 s \(rollout.episode_timeout\) for 'rows.jsonl:q'"):
        play(agent_episode(hangs), {}, prompt("q"), template=CHAT, reward=lambda answer, row: 0.0, timeout=1.0)
    gc.collect()
    assert left == [], "its pipes are closed although another program holds them"
    with pytest.raises(ValueError, match=r"sampled no tokens for 'rows.jsonl:q'"):
        play(agent_episode([sys.executable, "-c", ""]), {}, prompt("q"), reward=lambda answer, row: 0.0)


def test_columns_in_the_arguments_of_a_command() -> None:
    assert filled(["a {prompt}", "{x}", "{}", '{"k": 1}'], {"prompt": "1 {x}", "x": 2}) == [
        "a 1 {x}",
        "2",
        "{}",
        '{"k": 1}',
    ]


# Calls


def test_answers_have_the_format_of_the_api() -> None:
    found: list[Any] = []
    calls = [chat("q"), chat("r", max_tokens=2), ({"prompt": "ab"}, "completions"), (None, "models")]
    script = {"[u]q[a]": "x$", "[u]r[a]": "long$", "ab": "c$"}
    (played,) = play(episode_of(*calls, found=found), script, prompt("q"), template=CHAT)
    said, cut, plain, models = found
    assert said["object"] == "chat.completion"
    assert said["choices"] == [
        {"index": 0, "finish_reason": "stop", "logprobs": None, "message": {"role": "assistant", "content": "x"}}
    ]
    assert said["usage"] == {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}
    assert (cut["choices"][0]["finish_reason"], cut["choices"][0]["message"]["content"]) == ("length", "lo")
    assert (plain["object"], plain["choices"][0]["text"]) == ("text_completion", "c")
    assert models["data"][0]["id"] == "policy"
    assert [leaf for leaf, _ in shown(played)] == ["[u]q[a]x$", "[u]r[a]lo", "abc$"]
    assert played.counts["conversations"] == 1


def test_a_truncated_response_can_be_continued() -> None:
    """The tokens that end the turn then come from the template and are not trained on."""
    found: list[Any] = []
    script = {"[u]q[a]": "long$", "[u]q[a]lo$[u]r[a]": "x$"}
    (played,) = play(
        episode_of(chat("q", max_tokens=2), chat("q", "lo", "r"), found=found), script, prompt("q"), template=CHAT
    )
    assert shown(played) == [("[u]q[a]lo$[u]r[a]x$", ".......11........11")]


def test_two_calls_with_the_same_context_are_branches() -> None:
    found: list[Any] = []
    script = {"[u]q[a]": "x$", "[u]q[a]x$[u]r[a]": "y$", "[u]q[a]x$[u]s[a]": "z$"}
    calls = [chat("q"), chat("q", "x", "r"), chat("q", "x", "s")]
    (played,) = play(episode_of(*calls, found=found), script, prompt("q"), template=CHAT)
    assert [leaf for leaf, _ in shown(played)] == ["[u]q[a]x$[u]r[a]y$", "[u]q[a]x$[u]s[a]z$"]
    assert "cuts" not in played.counts


def test_ids_as_a_prompt_and_several_choices() -> None:
    found: list[Any] = []
    sampler = Scripted(lambda context, key: f"{key % 7}$")
    calls = [({"prompt": ids("ab"), "n": 3}, "completions"), ({"prompt": [*ids("ab"), 99]}, "completions")]
    (played,) = play(episode_of(calls[0], found=found), None, prompt("q"), sampler=sampler)
    assert [choice["index"] for choice in found[0]["choices"]] == [0, 1, 2]
    assert len(set(sampler.keys["ab"])) == 3
    assert len(played.leaves) == 3
    assert sampler.rounds == [["ab"] * 3], "in one round"


def test_random_keys_depend_on_the_context_and_not_on_time() -> None:
    orders: list[dict[str, list[int]]] = []
    for calls in ([chat("q"), chat("r"), chat("q")], [chat("r"), chat("q"), chat("q")]):
        sampler = Scripted(lambda context, key: "x$")
        play(episode_of(*calls, found=[]), None, prompt("q"), template=CHAT, sampler=sampler)
        orders.append(sampler.keys)
    assert orders[0] == orders[1]
    assert len(set(orders[0]["[u]q[a]"])) == 2


def test_a_stream() -> None:
    found: list[Any] = []
    calls = [chat("q", stream=True), ({"prompt": "ab", "stream": True}, "completions")]
    play(episode_of(*calls, found=found), {"[u]q[a]": "x$", "ab": "c$"}, prompt("q"), template=CHAT)
    for raw, form in zip(found, ("chat.completion.chunk", "text_completion"), strict=True):
        events = raw.strip().split("\n\n")
        assert events[-1] == "data: [DONE]"
        parts = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
        assert [part["object"] for part in parts] == [form] * 2
        assert [part["choices"][0]["finish_reason"] for part in parts] == [None, "stop"]
    assert '"delta": {"role": "assistant", "content": "x"}' in found[0]


@pytest.mark.parametrize(
    ("body", "route", "status", "message"),
    [
        (chat("q", stop=["x"])[0], "chat/completions", 400, "stop is not supported"),
        (chat("q", response_format={"type": "json_object"})[0], "chat/completions", 400, "response_format is not"),
        (chat("q", max_tokens=0.5)[0], "chat/completions", 400, "max_tokens: 0.5 is not valid; give 1 or more"),
        (chat("q", n=1000)[0], "chat/completions", 400, "n: 1000 is not valid; give an integer from 1 to 128"),
        (chat("q" * 90)[0], "chat/completions", 400, "the context exceeds the maximum length of a sample"),
        ({"messages": []}, "chat/completions", 400, "messages: a list of 0 is not valid; give a list"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "chat/completions", 400, "is not text"),
        ([1], "chat/completions", 400, "the body is not a JSON object"),
        ({"prompt": ["a", "b"]}, "completions", 400, "prompt: 'a' at index 0 is not an integer; give token ids"),
        ({}, "embeddings", 404, "no route POST /v1/embeddings"),
    ],
)
def test_rejected_calls(body: Any, route: str, status: int, message: str) -> None:
    found: list[Any] = []
    last = chat("q")
    (played,) = play(episode_of((body, route), last, found=found), {"[u]q[a]": "x$"}, prompt("q"), template=CHAT)
    assert found[0][0] == status
    assert message in found[0][1]
    assert [leaf for leaf, _ in shown(played)] == ["[u]q[a]x$"], "the episode continues"


def test_each_episode_has_its_own_url_until_it_ends() -> None:
    urls: dict[str, str] = {}

    async def episode(task: Prompt, policy: Policy) -> Trajectory:
        name = task.row["prompt"]
        urls[name] = await policy.base_url()
        assert urls[name] == await policy.base_url()
        await asyncio.to_thread(call, urls[name], *chat(name))
        return policy.trajectory(1.0)

    async def late(task: Prompt, policy: Policy) -> Trajectory:
        if task.row["prompt"] == "p":
            return await episode(task, policy)
        while "p" not in urls:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        gone = await asyncio.to_thread(call, urls["p"], *chat("p"))
        wrong = await asyncio.to_thread(call, urls["p"].replace("/v1", "0/v1"), *chat("p"))
        assert gone == wrong == (404, "no such episode, or it has ended")
        return await episode(task, policy)

    played = play(episode, lambda context, key: "x$", prompt("p"), prompt("q"), template=CHAT)
    assert [shown(one)[0][0] for one in played] == ["[u]p[a]x$", "[u]q[a]x$"]
    assert urls["p"] != urls["q"]
    urls.clear()
    script = lambda context, key: "x$"  # noqa: E731
    played = play(late, script, prompt("p"), prompt("q"), template=CHAT, max_concurrent=1, skip_failures=True)
    assert [one.failure for one in played] == [None, None]


def test_without_a_template_there_are_completions_only() -> None:
    found: list[Any] = []
    play(episode_of(chat("q"), ({"prompt": "ab"}, "completions"), found=found), {"ab": "c$"}, prompt("q"))
    assert found[0] == (400, "the run has no chat template; call completions, or set data.prompt_format=chat")
