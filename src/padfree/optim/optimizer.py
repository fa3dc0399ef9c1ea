"""The optimizer of a run: groups of parameters, each with an update rule, a base learning rate and options.

                                parameters                    rule    base lr   weight decay
    optimizer.name = "adamw"    matrices, embeddings, heads   adamw   lr        weight_decay
                                vectors                       adamw   lr        no decay

    optimizer.name = "muon"     hidden matrices, experts      muon    muon.lr   muon.weight_decay
                                embeddings, heads             adamw   lr        weight_decay
                                vectors                       adamw   lr        no decay

Vectors are norms and biases. Adapters are hidden matrices. Each entry of `optimizer.groups` forms groups of its own.

If the loss or the gradient is not finite, the device skips the step. With `parallel.offload`, the optimizer runs on the
CPU, except Muon's Newton-Schulz iterations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from padfree.errors import UserError
from padfree.model.named_tensors import clean_name
from padfree.model.parts import selected
from padfree.model.roles import Role, roles_of
from padfree.optim.adamw import AdamW
from padfree.optim.muon import Muon
from padfree.optim.optimizer_settings import OptimizerConfig
from padfree.optim.rule import Group, UpdateRule
from padfree.optim.state_format import rows_of

RULES: Mapping[str, UpdateRule] = {"adamw": AdamW(), "muon": Muon()}


class Optimizer(torch.optim.Optimizer):
    """Applies the update rule of each parameter group.

    A group has `params`, `rule`, `base_lr` and the options of the rule.
    """

    def __init__(self, groups: list[Group]) -> None:
        super().__init__([{"lr": group["base_lr"], **group} for group in groups], {})

    @property
    def rates(self) -> dict[str, float]:
        """Return the current learning rates by metric name.

        With Muon, `lr` is the rate of Muon, and `lr/adamw` is the rate of AdamW. Groups from `optimizer.groups` count
        only if there are no other groups.
        """
        plain = [group for group in self.param_groups if "name" not in group] or self.param_groups
        rates = {group["rule"]: group["lr"] for group in reversed(plain)}
        first = plain[0]["rule"]
        return {"lr": rates.pop(first), **{f"lr/{rule}": rate for rule, rate in rates.items()}}

    def set_rates(self, factor: float) -> None:
        """Set every learning rate to `factor` times the base rate of its group."""
        for group in self.param_groups:
            group["lr"] = group["base_lr"] * factor

    def step(self, finite: Tensor | None = None, scale: Tensor | None = None) -> None:  # type: ignore[override]
        """Make one optimizer step. The gradients are multiplied by the scalar tensor `scale`.

        If the bool tensor `finite` is false, neither parameters nor state change.
        """
        # If parameters are offloaded, the flag is on the GPU and the optimizer on the CPU, so this copy synchronises.
        device = self.param_groups[0]["params"][0].device
        finite = torch.ones((), dtype=torch.bool, device=device) if finite is None else finite.to(device)
        scale = None if scale is None else scale.to(device)
        for group in self.param_groups:
            RULES[group["rule"]].step(group, self.state, finite, scale)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of each parameter, such as its moments.

        The learning rates and options of `state_dict` are ignored; the optimizer keeps its own.
        """
        options = [{name: value for name, value in group.items() if name != "params"} for group in self.param_groups]
        super().load_state_dict(state_dict)
        for group, own in zip(self.param_groups, options, strict=True):
            group.update(own)


def make_optimizer(model: nn.Module, settings: OptimizerConfig) -> Optimizer:
    """Create the optimizer of the parameters that require gradients. Call this after the model is sharded."""
    groups = make_groups(model, settings)
    if not groups:
        raise UserError(
            "model", f"{type(model).__name__} has no parameter that requires a gradient", "unfreeze some parameters"
        )
    for group in groups:
        for parameter in group["params"] if group.get("state", "float32") != "float32" else ():
            rows_of(parameter)  # refuses parameters of which a rank holds parts of rows
    return Optimizer(groups)


def state_bytes(groups: list[Group], numbers: Callable[[nn.Parameter], int] = nn.Parameter.numel) -> int:
    """Return the size of the optimizer state of these groups in bytes, for float32 parameters.

    For the size on one rank, pass `numbers`: a function that returns how many elements of a parameter the rank holds.
    """
    return sum(
        RULES[group["rule"]].state_bytes(group, numbers(each), each.shape[-1] if each.ndim else 1)
        for group in groups
        for each in group["params"]
    )


def make_groups(model: nn.Module, settings: OptimizerConfig) -> list[Group]:
    """Divide the parameters that require gradients into groups. Groups without parameters are left out.

    The model may be on the meta device.
    """
    trained = {clean_name(name): each for name, each in model.named_parameters() if each.requires_grad}
    roles = roles_of(model) if settings.name == "muon" else {}
    own: list[Group] = []
    for number, group in enumerate(settings.groups):
        setting = f"optimizer.groups.{number}.match"
        names = selected(model, group.match, setting)
        chosen = [trained.pop(name) for name in list(trained) if name in names]
        if not chosen:
            raise UserError(
                setting,
                "selects only parameters that are frozen or in an earlier group",
                "remove this group",
                value=group.match,
            )
        own += [{**each, "name": group.match} for each in _groups_of(chosen, settings.of_group(group), roles)]
    return _groups_of(list(trained.values()), settings, roles) + own


def _groups_of(
    trained: list[nn.Parameter], settings: OptimizerConfig, roles: Mapping[nn.Parameter, Role]
) -> list[Group]:
    adamw = {"rule": "adamw", "base_lr": settings.lr, "betas": settings.betas, "eps": settings.eps, "fused": True}
    groups: list[Group] = []
    if settings.name == "muon":
        chosen = settings.muon
        groups.append(
            {
                "params": [each for each in trained if roles[each] in ("hidden", "expert")],
                "rule": "muon",
                "base_lr": settings.muon_lr,
                "momentum": chosen.momentum,
                "nesterov": chosen.nesterov,
                "newton_schulz_steps": chosen.steps,
                "weight_decay": settings.muon_weight_decay,
                "update_rms": chosen.update_rms,
            }
        )
        taken = set(groups[0]["params"])
        trained = [parameter for parameter in trained if parameter not in taken]
    matrices = [parameter for parameter in trained if parameter.ndim >= 2]
    vectors = [parameter for parameter in trained if parameter.ndim < 2]
    groups.append({**adamw, "params": matrices, "weight_decay": settings.weight_decay, "state": settings.state})
    # Vectors have no weight decay: pulling the scale of a norm towards 0 does not regularise.
    groups.append({**adamw, "params": vectors, "weight_decay": 0.0, "state": "float32"})
    return [group for group in groups if group["params"]]
