"""Servers of OpenEnv environments on the loopback address, through the package's own client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from padfree.data.data_settings import RolloutDataSettings
from padfree.rollout import read_prompts
from padfree.rollout.environment.load_environment import check_packaged, packaged_episode
from padfree.rollout.environment.runner import EpisodeRunner, RunnerSettings
from padfree.rollout.group import Play, Played, RolloutGroup
from tests.refused import refused
from tests.rollout.environment.environment_cases import CHAT, Scripted, chat_tokenizer, text, tokenizer

REASON = "make test-doors installs the packages of environments and runs these tests"
pytest.importorskip("openenv", reason=REASON)
pytest.importorskip("uvicorn", reason=REASON)


@pytest.fixture(scope="module")
def guessing() -> Iterator[str]:
    from tests.rollout.environment.openenv_cases import Guess, Guessing, Hint, served

    with served(Guessing, Guess, Hint) as url:
        yield url


@pytest.fixture(scope="module")
def walking() -> Iterator[str]:
    from tests.rollout.environment.openenv_cases import Move, Place, Walking, served

    with served(Walking, Move, Place) as url:
        yield url


def play(
    folder: Path, name: str, rows: list[dict[str, Any]], script: Any, max_new_tokens: int = 600, **changes: Any
) -> list[Played]:
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = read_prompts(data, tokenizer(CHAT), RolloutDataSettings(), max_new_tokens=max_new_tokens).prompts
    settings = {"name": name, "max_concurrent": 8, "timeout": 60.0, "skip_failures": False, **changes}
    runner = EpisodeRunner(
        packaged_episode(name), Scripted(script), chat_tokenizer(CHAT), None, RunnerSettings(**settings)
    )
    plays = [
        Play(number=number, group=RolloutGroup(prompt=one, size=1), key=number) for number, one in enumerate(prompts)
    ]
    try:
        return runner.play(plays, lambda own: [own])
    finally:
        runner.close()


def leaf(played: Played) -> tuple[str, str]:
    (one,) = played.leaves
    return text(one.tokens.tolist()), text(one.tokens[one.sampled].tolist())


def test_several_turns_with_a_text_action(tmp_path: Path, guessing: str) -> None:
    """Each episode has a session of its own. The column `reset` sets the number of the second one."""
    script = {
        "[u]guess.\n\n0 to 9[a]": "3$",
        "[u]guess.\n\n0 to 9[a]3$[u]more[a]": "5$",
        "[u]now.\n\n0 to 9[a]": "9$",
        "[u]now.\n\n0 to 9[a]9$[u]less[a]": "8$",
        "[u]now.\n\n0 to 9[a]9$[u]less[a]8$[u]less[a]": "7$",
    }
    rows = [{"prompt": "guess."}, {"prompt": "now.", "reset": {"number": 7}}]
    first, second = play(tmp_path, f"openenv:{guessing}", rows, script)
    assert leaf(first) == ("[u]guess.\n\n0 to 9[a]3$[u]more[a]5$", "3$5$")
    assert leaf(second) == ("[u]now.\n\n0 to 9[a]9$[u]less[a]8$[u]less[a]7$", "9$8$7$")
    assert (first.reward, second.reward) == (1 - 0.125, 1 - 0.25)
    assert (first.metrics, second.metrics) == ({"done": 1.0, "steps": 2.0}, {"done": 1.0, "steps": 3.0})


def test_the_last_reward_and_a_limit_of_turns(tmp_path: Path, guessing: str) -> None:
    rows = [{"prompt": "guess."}]
    (played,) = play(tmp_path, f"openenv:{guessing}?reward=last&turns=2", rows, lambda context, key: "1$")
    assert (played.reward, played.metrics) == (-0.125, {"done": 0.0, "steps": 2.0})
    (short,) = play(tmp_path, f"openenv:{guessing}", rows, lambda context, key: "1$", max_new_tokens=30)
    assert short.metrics["done"] == 0.0
    assert short.leaves[0].turns == 2


def test_an_action_with_several_fields_is_json(tmp_path: Path, walking: str) -> None:
    """An action that is not valid is answered with the reason, and the episode continues."""
    said = iter(["go", '{"dx": 1, "up": 3}', '{"dx": 1, "dy": 3}', '{"dx": 1}'])
    rows = [{"prompt": "walk."}]
    (played,) = play(tmp_path, f"openenv:{walking}", rows, lambda context, key: f"{next(said)}$")
    whole, _ = leaf(played)
    assert whole.startswith('[u]walk.\n\n{"x": 0, "y": 0}[a]go$[u]')
    assert '{"dx": 1, "dy": 3}$[u]{"x": 1, "y": 3}[a]{"dx": 1}$' in whole
    assert (played.reward, played.metrics) == (1.0, {"done": 1.0, "steps": 4.0})


def test_fields_can_be_named(tmp_path: Path, walking: str) -> None:
    rows = [{"prompt": "walk."}]
    said = iter(['{"dx": 1}', '{"dx": 1}'])
    name = f"openenv:{walking}?action=json&observation=x"
    (played,) = play(tmp_path, name, rows, lambda context, key: f"{next(said)}$")
    assert leaf(played)[0] == '[u]walk.\n\n0[a]{"dx": 1}$[u]1[a]{"dx": 1}$'
    with refused("rollout.environment", "no field 'z'"):
        play(tmp_path, f"openenv:{walking}?observation=z", rows, lambda context, key: "1$")


def test_a_server_that_is_full_or_gone_fails_the_episode(tmp_path: Path) -> None:
    from tests.rollout.environment.openenv_cases import Guess, Guessing, Hint, served

    rows = [{"prompt": "a."}, {"prompt": "b."}]
    with served(Guessing, Guess, Hint, sessions=1) as url:
        played = play(tmp_path, f"openenv:{url}", rows, lambda context, key: "5$", skip_failures=True)
        assert sorted(one.failure is None for one in played) == [False, True]
        assert "CAPACITY_REACHED" in next(str(one.failure) for one in played if one.failure)
        alone = play(tmp_path, f"openenv:{url}", rows, lambda context, key: "5$", max_concurrent=1)
        assert [one.reward for one in alone] == [1.0, 1.0]
    with refused("rollout.environment", "gave no schema"):
        play(tmp_path, f"openenv:{url}", rows[:1], lambda context, key: "5$")


@pytest.mark.parametrize(
    ("name", "about"),
    [
        ("openenv:echo", "no address"),
        ("openenv:http://", "no address"),
        ("openenv:http://h?what=1", "unknown argument 'what'"),
        ("openenv:http://h?reward=mean", "reward='mean'"),
        ("openenv:http://h?turns=0", "turns=0"),
        ("openenv:http://h?turns=true", "turns=True"),
        ("openenv:http://h?action=", "action=''"),
    ],
)
def test_wrong_names_are_refused(name: str, about: str) -> None:
    with refused("rollout.environment", about):
        check_packaged(name)
