"""`rollout.filter` replaces groups with equal rewards, and the overlong penalty lowers the reward of long responses."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from padfree.config.rollout import RolloutConfig
from padfree.rollout import Prompt
from padfree.rollout.collect.candidates import Candidates, SparePrompts
from padfree.rollout.collect.group import RolloutGroup, overlong_penalty
from padfree.train.run import train
from tests.rollout.vllm.test_run import lines, make_config, model_folder

__all__ = ["model_folder"]  # a fixture
HERE = "tests.rollout.collect.test_candidates"


def prompts(number: int) -> list[Prompt]:
    return [
        Prompt(tokens=np.array([index]), max_new_tokens=4, row={}, uid=f"p{index}", source="p")
        for index in range(number)
    ]


def candidates(batch: int = 1, *, own: int = 4, there: int = 40, **settings: Any) -> Candidates:
    found = prompts(there)
    groups = [RolloutGroup(prompt=prompt, size=2) for prompt in found[:own]]
    return Candidates(
        batch, groups, RolloutConfig(samples_per_prompt=2, filter="equal", **settings), SparePrompts(found, seed=3)
    )


def resolved(requested: Candidates, differs: Any) -> dict[int, bool]:
    signal: dict[int, bool] = {}
    new = requested.first()
    while new:
        signal |= {index: differs(requested.groups[index].prompt) for index in new}
        new = requested.more(signal)
    return signal


@pytest.mark.parametrize("oversample", [1.0, 1.5, 3.0])
def test_the_first_groups_that_differ_are_chosen_for_any_oversampling(oversample: float) -> None:
    def differs(prompt: Prompt) -> bool:
        return int(prompt.uid[1:]) % 3 != 1

    plain = candidates()
    expected = [plain.groups[index].prompt.uid for index in plain.chosen(resolved(plain, differs))]
    requested = candidates(oversample=oversample)
    signal = resolved(requested, differs)
    found = [requested.groups[index].prompt.uid for index in requested.chosen(signal)]
    assert found == expected
    assert len(found) == 4
    assert all(signal[index] for index in requested.chosen(signal))
    counted = requested.metrics(signal)
    assert counted["groups_requested"] == counted["groups_equal"] + 4 + counted["groups_surplus"]


def test_at_the_bound_the_batch_is_filled_up() -> None:
    requested = candidates(filter_bound=2.0)
    signal = resolved(requested, lambda prompt: prompt.uid == "p2")
    assert requested.num_requested == 8
    assert requested.chosen(signal) == [0, 1, 2, 3]
    few = candidates(there=5)
    assert len(few.chosen(resolved(few, lambda prompt: False))) == 4
    assert few.num_requested == 5, "there are no more prompts"


def test_spare_prompts_are_others_and_follow_from_seed_and_batch() -> None:
    def spare(batch: int) -> list[str]:
        requested = candidates(batch)
        resolved(requested, lambda prompt: False)
        return [group.prompt.uid for group in requested.groups[4:]]

    assert spare(1) == spare(1) != spare(2)
    assert not {"p0", "p1", "p2", "p3"} & set(spare(1))
    assert len(set(spare(1))) == len(spare(1)) == 8


def test_without_a_filter_the_groups_are_those_of_the_batch() -> None:
    groups = [RolloutGroup(prompt=prompt, size=2) for prompt in prompts(3)]
    requested = Candidates(1, groups, RolloutConfig(samples_per_prompt=2), SparePrompts(prompts(9), seed=0))
    assert requested.first() == range(3)
    assert requested.more({0: False, 1: False, 2: False}) == range(0)
    assert requested.chosen({0: False, 1: False, 2: False}) == [0, 1, 2]
    assert requested.metrics({0: False, 1: False, 2: False}) == {}


@pytest.mark.parametrize(("length", "lost"), [(1, 0.0), (4, 0.0), (5, 0.25), (6, 0.5), (8, 1.0)])
def test_the_overlong_penalty_grows_towards_max_new_tokens(length: int, lost: float) -> None:
    settings = RolloutConfig(max_new_tokens=8, overlong_buffer=4)
    assert overlong_penalty(length, 8, settings) == lost
    assert overlong_penalty(length, 8, RolloutConfig(max_new_tokens=8)) == 0.0


def rarely(response: str, row: Mapping[str, Any]) -> float:
    return float(response[:1].isdigit())


def test_a_filtered_run_in_the_process(model_folder: Path, tmp_path: Path) -> None:
    """Batches stay full, the metrics have the counts, and a resumed run makes the same steps."""
    settings: dict[str, Any] = {
        "engine": "in_process",
        "reward": f"{HERE}:rarely",
        "filter": "equal",
        "oversample": 1.5,
        "overlong_buffer": 3,
    }
    train(make_config(tmp_path / "whole", model_folder, steps=3, **settings))
    train(make_config(tmp_path / "parts", model_folder, steps=2, **settings))
    train(make_config(tmp_path / "parts", model_folder, steps=3, **settings))
    whole, parts = lines(tmp_path / "whole"), lines(tmp_path / "parts")
    for line, other in zip(whole, parts, strict=True):
        assert (line["samples"], line["groups"]) == (12, 4)
        assert line["groups_requested"] >= 6
        assert line["raw_reward"] - line["reward"] == pytest.approx(line["overlong_penalty"], abs=1e-6)
        for name in ("loss", "reward", "groups_requested", "groups_equal", "overlong_share"):
            assert line[name] == other[name]
    assert any(line["groups_equal"] > 0 for line in whole)
    enough = [line["groups_requested"] - line["groups_equal"] >= 4 for line in whole]
    kept = [line["groups_without_signal"] for line in whole]
    assert all(has or requested["groups_requested"] == 12 for has, requested in zip(enough, whole, strict=True))
    assert all(isinstance(count, int) for count in kept)
