"""Environments of the verifiers package, unchanged: its own loop and rubric, with the policy's token ids."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from padfree.config import config_from_dict
from padfree.data.data_settings import RolloutDataSettings
from padfree.data.sources import open_sources
from padfree.rollout import Prompt, read_prompts
from padfree.rollout.environment.load_environment import check_packaged, packaged_episode
from padfree.rollout.environment.runner import EpisodeRunner, RunnerSettings
from padfree.rollout.group import Play, Played, RolloutGroup
from tests.refused import refused
from tests.rollout.environment.environment_cases import CHAT, Scripted, chat_tokenizer, ids, text, tokenizer

REASON = "make test-doors installs the packages of environments and runs these tests"
vf = pytest.importorskip("verifiers", reason=REASON)

CASES = Path(__file__).with_name("verifiers_cases.py")
TOOLS = (
    "{% if tools %}[s]{{ tools | tojson }}{% endif %}"
    "{% for message in messages %}[{{ message['role'][0] }}]{{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}<tool_call>{{ call['function'] | tojson }}</tool_call>{% endfor %}"
    "{% if message['role'] == 'assistant' %}<eos>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}[a]{% endif %}"
)


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environments are in a module of the current folder."""
    (tmp_path / "letter_games.py").write_text(CASES.read_text())
    monkeypatch.chdir(tmp_path)


def prompts(name: str, template: str | None = CHAT, max_new_tokens: int = 600) -> list[Prompt]:
    settings = RolloutDataSettings()
    return list(read_prompts([name], tokenizer(template), settings, max_new_tokens=max_new_tokens).prompts)


def play(name: str, script: Any, *, template: str = CHAT, copies: int = 1, **settings: Any) -> list[Played]:
    chosen = {"name": name, "max_concurrent": 8, "timeout": 60.0, "skip_failures": False, **settings}
    runner = EpisodeRunner(
        packaged_episode(name), Scripted(script), chat_tokenizer(template), None, RunnerSettings(**chosen)
    )
    plays: list[Play] = []
    for index, one in enumerate(prompts(name, template)):
        group = RolloutGroup(prompt=one, size=copies)
        plays += [
            Play(number=number, group=group, key=number) for number in range(index * copies, (index + 1) * copies)
        ]
    try:
        return runner.play(plays, lambda own: [own])
    finally:
        runner.close()


def leaves(played: Played) -> list[tuple[str, str]]:
    return [
        (text(leaf.tokens.tolist()), "".join("1" if own else "." for own in leaf.sampled)) for leaf in played.leaves
    ]


def own_results(name: str, answer: Callable[[list[Any], int], Any], copies: int = 1) -> list[dict[str, Any]]:
    """What the package's own evaluation says of the same responses. `answer`: messages and a number to a message."""
    from verifiers.clients import Client
    from verifiers.types import Response, ResponseMessage

    class Said(Client):
        number = 0

        def setup_client(self, config: Any) -> Any:
            return None

        async def to_native_tool(self, tool: Any) -> Any:
            return tool

        async def to_native_prompt(self, messages: Any) -> Any:
            return messages, {}

        async def get_native_response(self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **kw: Any):
            said = answer(prompt, Said.number)
            Said.number += 1
            fields = said if isinstance(said, dict) else {"content": said}
            message = ResponseMessage(finish_reason="stop", is_truncated=False, **fields)
            return Response(id="1", created=int(time.time()), model=model, message=message)

        async def raise_from_native_response(self, response: Any) -> None: ...

        async def from_native_response(self, response: Any) -> Any:
            return response

        async def close(self) -> None: ...

    environment = loaded(name)
    rows = environment.get_dataset().repeat(copies) if copies > 1 else environment.get_dataset()
    rows = sorted(rows.to_list(), key=lambda row: row["example_id"])
    found = asyncio.run(environment.generate(rows, client=Said(None), model="m", max_concurrent=1))
    return [{"reward": one["reward"], "metrics": one["metrics"]} for one in found["outputs"]]


def loaded(name: str) -> Any:
    from padfree.data.verifiers_rows import load_verifiers

    return load_verifiers(name)


def results(played: list[Played]) -> list[dict[str, Any]]:
    return [{"reward": one.reward, "metrics": dict(one.metrics)} for one in played]


def test_a_single_turn_environment_gives_the_rewards_of_the_package() -> None:
    """A system prompt, three functions with weights 1, 0.5 and 0, and the metrics of the package."""
    name = "verifiers:letter_games"
    script = {"[s]add.[u]0 and 1?[a]": "1$", "[s]add.[u]1 and 1?[a]": "11$"}
    played = play(name, script)
    assert leaves(played[0]) == [("[s]add.[u]0 and 1?[a]1$", "." * 21 + "11")]
    assert results(played) == own_results(name, lambda messages, number: ["1", "11"][number])
    assert [one.reward for one in played] == [1 + 0.5 / 2, 0.5 / 3]
    assert played[1].metrics == {"exact": 0.0, "short": 1 / 3, "letters": 2.0, "num_turns": 1.0}
    assert played[0].counts == {"calls": 1}


def test_a_multi_turn_environment_continues_from_the_sampled_ids() -> None:
    """The first response is written with ids that its text would not be encoded to; they are kept."""
    name = 'verifiers:letter_games?kind="guessing"'
    script = {
        "[u]guess[a]": "<eos>$",
        "[u]guess[a]<eos>$[u]less[a]": "3$",
        "[u]guess[a]<eos>$[u]less[a]3$[u]more[a]": "5$",
    }
    (played,) = play(name, script)
    whole = "[u]guess[a]<eos>$[u]less[a]3$[u]more[a]5$"
    assert played.leaves[0].tokens.tolist() == ids(whole)
    assert leaves(played)[0][1] == "." * 11 + "1" * 6 + "." * 10 + "11" + "." * 10 + "11"
    assert results([played]) == own_results(name, lambda messages, number: ["<eos>", "3", "5"][number])
    assert played.reward == 1 + 0.25 * (1 - 2 / 4)
    assert played.counts == {"calls": 3}


CALL = '<tool_call>{"arguments": {"b": 3,"a":2}, "name": "add"}</tool_call>'


def test_a_tool_environment_calls_its_tools() -> None:
    """The model writes the call with its own spaces and order of keys. These ids are kept, not the template's."""
    name = "verifiers:letter_games?kind=calculating"
    (task,) = prompts(name, TOOLS)
    before = text(task.tokens.tolist())
    assert before.endswith("[u]2 and 3?\n[a]")
    said = f"let me see.{CALL}$"
    script = {before: said, f"{before}{said}\n[t]5\n[a]": "5$"}
    (played,) = play(name, script, template=TOOLS)
    (leaf,) = played.leaves
    assert text(leaf.tokens.tolist()) == f"{before}{said}\n[t]5\n[a]5$"
    assert text(leaf.tokens[leaf.sampled].tolist()) == f"{said}5$"
    assert leaf.tokens[: len(task.tokens)].tolist() == task.tokens.tolist()
    call = {"id": "x", "name": "add", "arguments": json.dumps({"a": 2, "b": 3})}
    answers = [{"content": "let me see.", "tool_calls": [call]}, {"content": "5"}]
    assert results([played]) == own_results(name, lambda messages, number: answers[number])
    assert played.metrics["add_calls"] == played.metrics["total_tool_calls"] == 1.0
    assert played.counts == {"calls": 2}


def test_a_call_that_is_not_json_is_text() -> None:
    name = "verifiers:letter_games?kind=calculating"
    (task,) = prompts(name, TOOLS)
    (played,) = play(name, {text(task.tokens.tolist()): '<tool_call>{"name": "add"$'}, template=TOOLS)
    assert (played.reward, played.metrics["total_tool_calls"], played.leaves[0].turns) == (0.0, 0.0, 1)


def test_a_template_whose_tool_calls_cannot_be_read_is_refused() -> None:
    name = "verifiers:letter_games?kind=calculating"
    with refused("data.chat_template", "shows no tool calls"):
        play(name, lambda context, key: "5$", template="{{ tools | tojson }}" + CHAT)
    strange = TOOLS.replace("<tool_call>", "call!").replace("</tool_call>", "")
    with refused("data.chat_template", "padfree cannot read"):
        play(name, lambda context, key: "5$", template=strange)


def test_rewards_that_compare_the_episodes_of_a_prompt() -> None:
    """The shortest response of each group gets 0.5 more, with one episode at a time and with all at once."""
    name = "verifiers:letter_games?kind=compared"
    said = {0: "5", 1: "55", 2: "6", 3: "6"}
    own = own_results(name, lambda messages, number: said[number], copies=2)
    for concurrent in (1, 8):
        played = play(name, said_by_number(said), copies=2, max_concurrent=concurrent)
        assert results(played) == own
        assert [one.reward for one in played] == [1.5, 0.0, 1.5, 1.5]


def said_by_number(said: dict[int, str]) -> Callable[[str, int], str]:
    """A script that answers by the number of the episode, which its random key gives."""
    order: dict[int, int] = {}

    def script(context: str, key: int) -> str:
        number = order.setdefault(key, len(order))
        return f"{said[number]}$"

    return script


def test_an_overlong_prompt_ends_the_episode_as_in_the_package() -> None:
    """The second prompt does not fit: the rubric scores what there is."""
    name = "verifiers:letter_games?kind=guessing"
    (task,) = prompts(name, max_new_tokens=9)
    runner = EpisodeRunner(
        packaged_episode(name),
        Scripted({"[u]guess[a]": "1$"}),
        chat_tokenizer(CHAT),
        None,
        RunnerSettings(name="n", max_concurrent=1, timeout=60.0, skip_failures=False),
    )
    try:
        (played,) = runner.play([Play(number=0, group=RolloutGroup(prompt=task, size=1), key=1)], lambda own: [own])
    finally:
        runner.close()
    assert leaves(played) == [("[u]guess[a]1$", "." * 11 + "11")]
    assert played.reward == 0.25 * (1 - 1 / 4)


def test_rows_and_held_out_rows() -> None:
    (source,) = open_sources("verifiers:letter_games?rows=3")
    (chunk,) = source.chunks(())
    assert [row["answer"] for row in chunk.records] == ["1", "2", "3"]
    assert source.digest() == open_sources("verifiers:letter_games?rows=3")[0].digest()
    assert source.digest() != open_sources("verifiers:letter_games?rows=4")[0].digest()
    (held_out,) = open_sources("verifiers:letter_games#eval")
    assert [row["answer"] for chunk in held_out.chunks(()) for row in chunk.records] == ["8"]
    (task,) = prompts("verifiers:letter_games#eval")
    assert text(task.tokens.tolist()) == "[s]add.[u]7 and 1?[a]"


def test_the_signal_handlers_of_a_run_stay() -> None:
    def handler(number: int, frame: Any) -> None: ...

    before = signal.signal(signal.SIGTERM, handler)
    try:
        loaded("verifiers:letter_games?rows=5")
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)


def test_names_that_cannot_be_loaded_are_refused() -> None:
    for name, about in (
        ("verifiers:nowhere_at_all", "no module nowhere_at_all"),
        ("verifiers:os", "standard library"),
        ("verifiers:a b", "not the name"),
    ):
        with refused("rollout.environment", about):
            check_packaged(name)
    with refused("data.path", "raised KeyError"):
        open_sources("verifiers:letter_games?kind=unknown")
    with refused("data.path", "no module nowhere_at_all"):
        open_sources("verifiers:nowhere_at_all")
    values = {"model": {"path": "m"}, "data": {"path": ["d"]}, "batch": {"samples": 1, "max_tokens": 9}}
    rest = {**values, "run": {"folder": "f", "steps": 1}}
    for name in ("verifiers:", "verifiers:a#test", "verifiers:a?b", "verifiers:a?b=1&b=2", "verifiers:a#eval"):
        with refused("rollout.environment"):
            config_from_dict({**rest, "loss": {"kind": "clip"}, "rollout": {"environment": name}})
