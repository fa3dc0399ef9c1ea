"""User-defined objectives: `loss.kind = "my_losses:mine"`.

    @padfree.losses.objective(elementwise=True)
    def mine(tokens: padfree.losses.ObjectiveInputs) -> Tensor:
        return -tokens.advantages * tokens.logprobs

The function returns one loss per token, or an `ObjectiveOutput`, which can also hold values for metrics. padfree checks
the results of the function and reports its exceptions. The checks do not synchronise with the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from padfree.config.functions import UserFunction
from padfree.errors import UserError, shown_error
from padfree.losses.objectives.contract import ObjectiveInputs, ObjectiveOutput, Traits, traits_of

USER_OBJECTIVE = UserFunction(
    setting="loss.kind", noun="loss", arguments=("tokens",), result="a tensor of losses, or an ObjectiveOutput"
)


@cache
def load_objective(path: str) -> UserObjective:
    """Load the user's objective from a path `module:function`.

    The module must be installed, or a file in the current folder.
    """
    return UserObjective(path=path, function=USER_OBJECTIVE.load(path))


@dataclass(kw_only=True, slots=True, eq=False)
class UserObjective:
    """A user-defined objective: calls the user's function and checks the result."""

    path: str
    function: Callable[[ObjectiveInputs], Any]
    _names: tuple[str, ...] | None = field(default=None, init=False)  # names of the metrics in the first call

    @property
    def traits(self) -> Traits:
        return traits_of(self.function)

    def __call__(self, tokens: ObjectiveInputs) -> ObjectiveOutput:
        try:
            found = self.function(tokens)
        except KeyboardInterrupt:
            raise  # let Ctrl-C through, if the loss is computed outside of a run
        except BaseException as error:  # BaseException includes SystemExit: a loss function must not end the run
            raise UserError("loss.kind", f"{self.path} raised {shown_error(error)}", "correct the function") from error
        output = ObjectiveOutput(losses=found) if isinstance(found, Tensor) else found
        if not isinstance(output, ObjectiveOutput):
            raise UserError(
                "loss.kind",
                f"{self.path} returned a {type(found).__name__}",
                "return a tensor of losses, or an ObjectiveOutput",
            )
        self._check(tokens, output)
        return output

    def _check(self, tokens: ObjectiveInputs, output: ObjectiveOutput) -> None:
        wanted = tokens.logprobs
        given: dict[str, Any] = {"losses": output.losses, "log_ratio": output.log_ratio, "clipped": output.clipped}
        present = {name: values for name, values in {**given, **output.statistics}.items() if values is not None}
        for name, values in present.items():
            if not isinstance(values, Tensor) or values.shape != wanted.shape:
                what = f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else f"type {type(values).__name__}"
                raise UserError(
                    "loss.kind",
                    f"{self.path} returned {name} of {what} for log-probabilities of shape {tuple(wanted.shape)}",
                    "return one value per token",
                )
        if output.losses.dtype != wanted.dtype:
            raise UserError(
                "loss.kind",
                f"{self.path} returned losses of {output.losses.dtype} for log-probabilities of {wanted.dtype}",
                "return the same dtype",
            )
        if torch.is_grad_enabled() and wanted.requires_grad and not output.losses.requires_grad:
            raise UserError(
                "loss.kind", f"{self.path} returned losses without a gradient", "compute them from tokens.logprobs"
            )
        # Ranks sum their metrics in the order of the metric names, so the names must be the same in all calls.
        names = tuple(sorted(present))
        if self._names is None:
            self._names = names
        if names != self._names:
            raise UserError(
                "loss.kind",
                f"{self.path} returned {', '.join(names)}, but an earlier call returned {', '.join(self._names)}",
                "return the same fields and statistics in every call",
            )
