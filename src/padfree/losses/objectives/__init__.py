"""Objectives of policy losses: one file a kind, and the user's own.

    clip, gspo, cispo, reinforce    built in: the file has the kind for a name, its function takes the settings as well
    contract                        what an objective is given and returns
    custom                          the user's own, `loss.kind = "module:function"`

An objective says what is done with a token's log-probability and advantage. Corrections, KL and entropy are the same
for all of them and are added by `padfree.losses.policy_loss`.

To add a kind: a file here with its function, and its settings in `padfree.config.loss` (a line of `LossConfig`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

from padfree.config.loss_settings import CustomObjective, Objective
from padfree.losses.objectives.contract import ObjectiveInputs, ObjectiveOutput, Traits, objective, traits_of
from padfree.losses.objectives.custom import load_objective

__all__ = ["ObjectiveInputs", "ObjectiveOutput", "Traits", "load_objective", "objective", "run_objective", "traits"]


def traits(settings: Objective) -> Traits:
    """What the objective of these settings states about itself."""
    if isinstance(settings, CustomObjective):
        return load_objective(settings.path).traits
    return traits_of(_built_in(settings.kind))


def run_objective(settings: Objective, tokens: ObjectiveInputs) -> ObjectiveOutput:
    """The losses of these tokens."""
    if isinstance(settings, CustomObjective):
        return load_objective(settings.path)(tokens)
    return _built_in(settings.kind)(tokens, settings)


@cache
def _built_in(kind: str) -> Callable[[ObjectiveInputs, Any], ObjectiveOutput]:
    """The function of this name in the file of this name."""
    function: Callable[[ObjectiveInputs, Any], ObjectiveOutput] = getattr(
        importlib.import_module(f"{__name__}.{kind}"), kind
    )
    return function
