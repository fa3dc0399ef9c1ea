"""User-defined objectives: a copy of a built-in one is bit-identical to it, and mistakes are one-line errors."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from padfree.losses import (
    ClipSettings,
    CustomObjective,
    GSPOSettings,
    LossInputs,
    LossOutput,
    Objective,
    OPSMSettings,
    PolicySettings,
    ReinforceSettings,
    TokenTISSettings,
    is_elementwise,
    load_objective,
    make_token_loss,
    needs_old_logprobs,
    policy_loss,
)
from tests.losses.cases import random_inputs, with_grad
from tests.losses.objectives.cases import HERE
from tests.refused import refused


def own(name: str) -> CustomObjective:
    return CustomObjective(path=f"{HERE}:{name}")


def scored(seed: int) -> LossInputs:
    return with_grad(random_inputs(np.random.default_rng(seed)), "logprobs")[0]


def gradient(inputs: LossInputs, output: LossOutput) -> torch.Tensor:
    assert inputs.logprobs is not None
    return torch.autograd.grad(output.loss, inputs.logprobs)[0]


@pytest.mark.parametrize(
    ("name", "built_in"),
    [
        ("clip", ClipSettings()),
        ("undecorated_clip", ClipSettings()),
        ("gspo", GSPOSettings()),
        ("reinforce", ReinforceSettings()),
    ],
)
@pytest.mark.parametrize("changes", [{}, {"old_policy": "current"}, {"kl_coefficient": 0.3, "corrections": 1}])
def test_a_copy_of_a_built_in_objective_is_the_same_to_the_bit(
    name: str, built_in: Objective, changes: dict[str, Any]
) -> None:
    if "corrections" in changes:
        changes = {**changes, "corrections": (TokenTISSettings(high=1.1), OPSMSettings(delta=0.01))}
    inputs = scored(5)
    outputs = [
        policy_loss(inputs, PolicySettings(objective=objective, **changes)) for objective in (own(name), built_in)
    ]
    mine, theirs = outputs
    assert torch.equal(mine.loss, theirs.loss)
    assert torch.equal(gradient(inputs, mine), gradient(inputs, theirs))
    # A bare tensor of losses has no extra metrics.
    shown = mine.statistics if name == "reinforce" else theirs.statistics
    assert mine.statistics.keys() == shown.keys()
    for key, (total, count) in shown.items():
        assert torch.equal(mine.statistics[key][0], total), key
        assert torch.equal(mine.statistics[key][1], count), key


def test_a_copy_of_clip_is_fused_alike() -> None:
    inputs = random_inputs(np.random.default_rng(6))
    positions = torch.nonzero(inputs.mask).flatten()
    assert inputs.logprobs is not None
    logprobs = inputs.logprobs[positions]
    found = [
        make_token_loss(inputs, PolicySettings(objective=objective))(logprobs, None, positions)
        for objective in (own("clip"), ClipSettings())
    ]
    assert torch.equal(*found)


def test_an_objective_states_what_it_needs() -> None:
    for name, elementwise, old in (
        ("clip", True, True),
        ("undecorated_clip", False, True),
        ("gspo", False, True),
        ("reinforce", True, False),
    ):
        settings = PolicySettings(objective=own(name))
        assert (is_elementwise(settings), needs_old_logprobs(settings)) == (elementwise, old), name
        assert not needs_old_logprobs(replace(settings, old_policy="current"))
    for built_in, old in ((ClipSettings(), True), (ReinforceSettings(), False)):
        assert needs_old_logprobs(PolicySettings(objective=built_in)) == old
    assert needs_old_logprobs(PolicySettings(objective=ReinforceSettings(), corrections=(TokenTISSettings(),)))


def test_a_user_is_offered_what_there_is_and_shows_what_they_like() -> None:
    inputs = scored(7)
    assert inputs.logprobs is not None
    assert inputs.rollout_logprobs is not None
    statistics = policy_loss(inputs, PolicySettings(objective=own("offered"))).statistics
    moved = (inputs.logprobs - inputs.rollout_logprobs).detach()[inputs.mask]
    assert float(statistics["moved"][0]) == pytest.approx(float(moved.sum()), abs=1e-12)
    assert float(statistics["far"][0]) == float((moved.abs() > 0.3).sum())
    without = replace(inputs, rollout_logprobs=None)
    with refused("loss.kind", ".*:offered raised AssertionError: .*"):
        policy_loss(without, PolicySettings(objective=own("offered")))


NUMBERS = itertools.count()
Write = Callable[[str], str]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """A new module of the current folder; the path of its function `mine`."""
    monkeypatch.chdir(tmp_path)

    def written(body: str) -> str:
        name = f"own_losses_{next(NUMBERS)}"
        text = "import torch\nfrom padfree.losses import ObjectiveOutput, objective\n"
        (tmp_path / f"{name}.py").write_text(text + body)
        return f"{name}:mine"

    return written


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("mine = 3", "the module has 'mine', which is not a function; correct the name"),
        ("", "the module has no 'mine'; correct the name"),
        ("raise OSError('no')", "importing own_losses_.* raised OSError: no; correct the module"),
        ("class mine: pass", r"is a class; write a function with the arguments \(tokens\), and give its path"),
        ("def mine(): pass", r"cannot be called with \(tokens\): .*; let the function accept this argument"),
        ("async def mine(tokens): pass", "is async or a generator; use a plain function that returns a tensor"),
        ("from os import system as mine", "a function of posix in the standard library"),
    ],
)
def test_what_is_no_objective_is_refused_when_it_is_loaded(write: Write, body: str, message: str) -> None:
    with refused("loss.kind", f"'.*:mine'.*{message}"):
        load_objective(write(body))


def test_a_module_that_is_not_there_and_one_of_python() -> None:
    with refused("loss.kind", "'no_such:f': there is no module no_such"):
        load_objective("no_such:f")
    with refused("loss.kind", "'os:system': os is part of Python's standard library, which has no loss"):
        load_objective("os:system")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return None", "returned a NoneType; return a tensor of losses, or an ObjectiveOutput"),
        (
            "return tokens.logprobs.sum()",
            r"returned losses of shape \(\) for log-probabilities of shape \(27,\); return one value per token",
        ),
        ("return tokens.logprobs.float()", "returned losses of torch.float32 for log-probabilities of torch.float64;"),
        ("return tokens.advantages", "returned losses without a gradient; compute them from tokens.logprobs"),
        ("return 1 / 0", "raised ZeroDivisionError: division by zero; correct the function"),
        (
            "return ObjectiveOutput(losses=tokens.logprobs, statistics={'a': tokens.logprobs[1:]})",
            r"returned a of shape \(26,\) for log-probabilities of shape \(27,\); return one value per token",
        ),
        (
            "return ObjectiveOutput(losses=tokens.logprobs, statistics={'a': 1.0})",
            r"returned a of type float for log-probabilities of shape \(27,\); return one value per token",
        ),
    ],
)
def test_what_comes_back_is_checked(write: Write, body: str, message: str) -> None:
    path = write(f"def mine(tokens):\n    {body}\n")
    inputs = scored(8)
    with refused("loss.kind", f"{path} {message}"):
        policy_loss(inputs, PolicySettings(objective=CustomObjective(path=path)))


def test_the_names_of_metrics_stay_the_same(write: Write) -> None:
    """Ranks sum them in the order of their names."""
    path = write(
        "calls = []\n"
        "def mine(tokens):\n"
        "    calls.append(1)\n"
        "    return ObjectiveOutput(losses=tokens.logprobs, statistics={f'a{len(calls)}': tokens.advantages})\n"
    )
    inputs = scored(9)
    settings = PolicySettings(objective=CustomObjective(path=path))
    policy_loss(inputs, settings)
    with pytest.raises(
        ValueError, match=r"returned a2, losses, but an earlier call returned a1, losses; return the same fields"
    ):
        policy_loss(inputs, settings)


def test_an_elementwise_objective_sees_no_sequence(write: Write) -> None:
    path = write("@objective(elementwise=True)\ndef mine(tokens):\n    return tokens.sequence_mean(tokens.logprobs)\n")
    inputs = scored(9)
    with pytest.raises(ValueError, match=r"is declared elementwise, but calls sequence_mean, .*; remove elementwise=T"):
        policy_loss(inputs, PolicySettings(objective=CustomObjective(path=path)))
