"""Token advantages from rewards."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from padfree.sample import Sample
from padfree.tasks.batch_advantages import Advantage, check_signal, signal_of, with_advantages
from tests.refused import refused


def samples() -> list[Sample]:
    rewards, groups = [1.0, 0.0, 0.5, 0.5, 3.0], ["a", "a", "b", "b", "c"]
    return [
        Sample(tokens=np.arange(3 + i), loss_mask=np.arange(3 + i) > 0, reward=reward, group=group, uid=i)
        for i, (reward, group) in enumerate(zip(rewards, groups, strict=True))
    ]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("grpo", [0.70711, -0.70711, 0.0, 0.0, 0.0]),
        ("dr_grpo", [0.5, -0.5, 0.0, 0.0, 0.0]),
        ("rloo", [1.0, -1.0, 0.0, 0.0, 0.0]),
    ],
)
def test_by_group(kind: str, expected: list[float]) -> None:
    found = with_advantages(samples(), kind)  # type: ignore[arg-type]
    for sample, value in zip(found, expected, strict=True):
        assert sample.advantages is not None
        np.testing.assert_allclose(sample.advantages, np.full(len(sample), value), atol=1e-5)


def test_the_order_of_samples_does_not_matter() -> None:
    order = [3, 0, 4, 1, 2]
    given = samples()
    mixed = with_advantages([given[i] for i in order], "grpo")
    for place, i in enumerate(order):
        np.testing.assert_array_equal(mixed[place].advantages, with_advantages(given, "grpo")[i].advantages)


@pytest.mark.parametrize("kind", ["reinforce++", "reinforce++_baseline"])
def test_whitened_over_scored_tokens(kind: str) -> None:
    found = with_advantages(samples(), kind)  # type: ignore[arg-type]
    scored = np.concatenate([sample.advantages[1:] for sample in found if sample.advantages is not None])
    assert scored.mean() == pytest.approx(0.0, abs=1e-6)
    assert scored.std(ddof=1) == pytest.approx(1.0, abs=1e-5)
    assert all(sample.advantages is not None and sample.advantages[0] == 0 for sample in found)
    firsts = [sample.advantages[1] for sample in found if sample.advantages is not None]
    if kind == "reinforce++":
        assert np.argsort(firsts, kind="stable").tolist() == [1, 2, 3, 0, 4]
    else:
        assert firsts[0] > firsts[2] == firsts[3] == firsts[4] > firsts[1]


def test_given_is_kept_and_missing_is_named() -> None:
    given = with_advantages(samples(), "rloo")
    assert with_advantages(given, "given") == given
    with refused("advantages"):
        with_advantages(samples(), "given")
    with refused("reward", "None in sample 0"):
        with_advantages([replace(samples()[0], reward=None)], "grpo")
    with refused("reward", "nan in sample 0"):
        with_advantages([replace(samples()[0], reward=float("nan"))], "reinforce++")
    with refused("group"):
        with_advantages([replace(samples()[0], group=None)], "rloo")


def rewarded(*groups: list[float]) -> list[Sample]:
    return [
        Sample(tokens=[1, 2, 3], loss_mask=[0, 1, 1], reward=reward, group=number)
        for number, rewards in enumerate(groups)
        for reward in rewards
    ]


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo", "reinforce++_baseline"])
def test_groups_without_signal_are_those_whose_advantages_are_0(kind: Advantage) -> None:
    found = rewarded([1, 0], [1, 1, 1], [0.5], [0, 0], [0.25, 0.5])
    signal = signal_of(found, kind)
    assert (signal.groups, signal.alone, signal.equal) == (5, 1, 2)
    assert signal.metrics() == {"groups": 5, "groups_without_signal": 3}
    if not kind.startswith("reinforce"):  # whitening also changes zeros
        advantages = with_advantages(found, kind)
        silent = {sample.group for sample in advantages if sample.advantages is not None and sample.advantages.any()}
        assert silent == {0, 4}
    effect = "do not change the weights" if kind != "reinforce++_baseline" else "get advantages from whitening only"
    assert check_signal(found, kind, "a.jsonl") == (
        f"data.path: 3 of 5 groups without a learning signal (1 of one sample, 2 with equal rewards) {effect}"
    )
    assert check_signal(rewarded([1, 0], [0.5, 0]), kind, "a.jsonl") is None


def test_all_samples_are_compared_or_none() -> None:
    assert signal_of(rewarded([1], [1], [0]), "reinforce++").metrics() == {"groups": 1, "groups_without_signal": 0}
    assert signal_of(rewarded([1], [1], [1]), "reinforce++").metrics() == {"groups": 1, "groups_without_signal": 1}
    given = [
        replace(sample, advantages=[5.0, value, 0.0]) for sample, value in zip(rewarded([0, 0]), (0, 1), strict=True)
    ]
    assert signal_of(given, "given").metrics() == {"groups": 2, "groups_without_signal": 1}, "prompts do not count"


@pytest.mark.parametrize(
    ("samples", "kind", "message"),
    [
        (rewarded([1], [0]), "grpo", r"\(2 of one sample, 0 with equal .*; give groups .*reinforce\+\+"),
        (
            rewarded([1, 1], [0, 0]),
            "rloo",
            r"no group has a learning signal \(0 of one sample, 2 with equal rewards\); ",
        ),
        (rewarded([1, 1], [1]), "dr_grpo", r"\(1 of one sample, 1 with equal .*; give rollouts whose rewards differ$"),
        (rewarded([1, 1]), "reinforce++", r"; give rollouts whose rewards differ$"),
        (
            [replace(sample, advantages=[0.0] * 3) for sample in rewarded([1, 0])],
            "given",
            r"the advantages of all samples are 0; ",
        ),
    ],
)
def test_rollouts_of_no_signal_at_all_are_refused(samples: list[Sample], kind: Advantage, message: str) -> None:
    with refused("data.path", rf"from a\.jsonl, because .*{message}"):
        check_signal(samples, kind, "a.jsonl")
