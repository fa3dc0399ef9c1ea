"""The objectives of policy losses: one file per built-in objective, and support for user-defined ones.

    clip, gspo, cispo, reinforce    the built-in kinds: each file defines a function with the name of its kind
    contract                        the input and the output of an objective
    custom                          user-defined objectives, `loss.kind = "module:function"`

An objective computes the loss of a token from its log-probability and advantage. `padfree.losses.policy_loss` then
applies corrections and adds the KL and entropy terms.

To add an objective, write a file with its function here, and add its settings to `LossConfig` in `padfree.config.loss`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

from padfree.config.policy_settings import CustomObjective, Objective
from padfree.losses.objectives.contract import ObjectiveInputs, ObjectiveOutput, Traits, objective, traits_of
from padfree.losses.objectives.custom import load_objective

__all__ = ["ObjectiveInputs", "ObjectiveOutput", "Traits", "load_objective", "objective", "run_objective", "traits"]


def traits(settings: Objective) -> Traits:
    """Return the traits that the objective selected by `settings` declares about itself, e.g. whether it is
    elementwise.
    """
    if isinstance(settings, CustomObjective):
        return load_objective(settings.path).traits
    return traits_of(_built_in(settings.kind))


def run_objective(settings: Objective, tokens: ObjectiveInputs) -> ObjectiveOutput:
    """Compute the losses of the tokens with the policy objective (such as clip or GSPO) that `settings` selects."""
    if isinstance(settings, CustomObjective):
        return load_objective(settings.path)(tokens)
    return _built_in(settings.kind)(tokens, settings)


@cache
def _built_in(kind: str) -> Callable[[ObjectiveInputs, Any], ObjectiveOutput]:
    """Return the built-in objective `kind`: the function named `kind` in the module
    `padfree.losses.objectives.KIND`.
    """
    function: Callable[[ObjectiveInputs, Any], ObjectiveOutput] = getattr(
        importlib.import_module(f"{__name__}.{kind}"), kind
    )
    return function
