"""Whole runs with environments of verifiers and OpenEnv: their rows, rewards and token ids reach the trainer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from padfree.config import Config, config_from_dict
from padfree.testing.models import save_with_tokenizer
from padfree.train.run import evaluate, train
from tests.ranks import run_ranks
from tests.refused import refused

REASON = "make test-doors installs the packages of environments and runs these tests"
pytest.importorskip("verifiers", reason=REASON)
pytest.importorskip("openenv", reason=REASON)

CASES = Path(__file__).parents[1] / "rollout" / "environment" / "verifiers_cases.py"
CHAT = (
    "{% for message in messages %}[{{ message['role'][0] }}]{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}<eos>{% endif %}{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_with_tokenizer(tmp_path_factory.mktemp("model"), writes_back=True, num_hidden_layers=1)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "letter_runs.py").write_text(CASES.read_text())
    monkeypatch.chdir(tmp_path)


def make_config(folder: Path, model_path: Path, environment: str, **sections: Any) -> Config:
    values: dict[str, Any] = {
        "model": {"path": str(model_path)},
        "data": {"path": [environment], "epochs": None},
        "batch": {"samples": 8, "max_tokens": 200},
        "rollout": {"environment": environment, "samples_per_prompt": 4, "max_new_tokens": 24, "max_concurrent": 3},
        "loss": {"kind": "clip"},
        "checkpoint": {"every": 1000, "export": False},
        "run": {"folder": str(folder), "steps": 2, "device": "cpu"},
    }
    for section, changes in sections.items():
        values[section] = {**values.get(section, {}), **changes}
    return config_from_dict(values)


def lines(folder: Path, file: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / file).read_text().splitlines()]


@pytest.mark.slow
def test_a_run_with_an_environment_of_verifiers(model_folder: Path, tmp_path: Path) -> None:
    """Rewards and metrics are those of the rubric, and the trainer computes the same log-probabilities."""
    config = make_config(
        tmp_path / "run", model_folder, "verifiers:letter_runs?rows=6", eval={"path": ["verifiers:letter_runs#eval"]}
    )
    train(config)
    for line in lines(tmp_path / "run"):
        assert line["samples"] == 8
        expected = line["environment/exact"] + 0.5 * line["environment/short"]
        assert line["reward"] == pytest.approx(expected)
        assert 0 < line["environment/letters"] <= 24 * len("<unk>")
        assert 0 <= line["loss/sampler_difference"] < 1e-5
    assert "eval/reward" in evaluate(config)


@pytest.mark.slow
def test_several_turns_and_rewards_of_groups(model_folder: Path, tmp_path: Path) -> None:
    guessing = "verifiers:letter_runs?kind=guessing"
    config = make_config(
        tmp_path / "turns", model_folder, guessing, batch={"samples": 4}, rollout={"max_new_tokens": 90}
    )
    train(config)
    assert all(line["environment/num_turns"] > 1 for line in lines(tmp_path / "turns"))
    train(make_config(tmp_path / "groups", model_folder, "verifiers:letter_runs?kind=compared"))
    for line in lines(tmp_path / "groups"):
        assert line["reward"] == pytest.approx(line["environment/exact"] + 0.5 * line["environment/best"])
        assert 2 / 8 <= line["environment/best"] <= 1, "each of the two groups has a shortest response"


def run_of(rank: int, world: int, folder: Path, config: Config) -> str:
    try:
        train(config)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_rewards_of_groups_on_two_ranks(model_folder: Path, tmp_path: Path) -> None:
    """Two groups on two ranks are scored as on one rank. A group that is divided over ranks is refused."""
    compared = "verifiers:letter_runs?kind=compared"
    train(make_config(tmp_path / "one", model_folder, compared))
    assert run_ranks(2, run_of, tmp_path, make_config(tmp_path / "two", model_folder, compared)) == ["", ""]
    one, two = lines(tmp_path / "one"), lines(tmp_path / "two")
    assert [line["reward"] for line in one] == [line["reward"] for line in two]
    divided = make_config(tmp_path / "divided", model_folder, compared, batch={"samples": 4})
    errors = run_ranks(2, run_of, tmp_path, divided)
    assert "only 2 of them are on one rank" in errors[0]


@pytest.mark.slow
def test_a_run_with_a_server_of_openenv(model_folder: Path, tmp_path: Path) -> None:
    from tests.rollout.environment.openenv_cases import Guess, Guessing, Hint, served

    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"guess {index}"}) + "\n" for index in range(4)))
    with served(Guessing, Guess, Hint, sessions=16) as url:
        config = make_config(
            tmp_path / "run",
            model_folder,
            f"openenv:{url}?turns=3",
            data={"path": [str(data)]},
            rollout={"max_new_tokens": 90},
        )
        train(config)
    for line in lines(tmp_path / "run"):
        assert line["samples"] == 8
        assert 1 <= line["environment/steps"] <= 3
        assert -0.375 <= line["reward"] <= 1
        assert 0 <= line["loss/sampler_difference"] < 1e-5
    with refused("data.path", "has no rows"):
        train(make_config(tmp_path / "none", model_folder, f"openenv:{url}"))
