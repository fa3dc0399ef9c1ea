"""Replay routes: make the routers of a mixture-of-experts model choose the experts that the sampler chose.

A router calls `torch.topk` to choose the k experts with the highest scores. During replay, `torch.topk` instead returns
the experts in `AttnContext.routes`, and their scores. The router's own code then computes the weights of these experts,
with gradients.

`replay_obstacle` tests on a small copy of the model (few layers, random weights) that replay works.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from padfree.batch import AttnContext
from padfree.errors import UserError
from padfree.model.mixers.own_forward import reference_functions
from padfree.model.outputs import base_of
from padfree.model.probe import small_copy, undisturbed
from padfree.model.routers import Router, RouterRecorder, routers_of
from padfree.model.shrink import VOCABULARY
from padfree.model.structure import layers_of
from padfree.routes import MOST_EXPERTS, Routes, route_dtype, unknown_in
from padfree.segments import Segments

TOPK = (torch.topk, Tensor.topk)
FIX = "set rollout.routing=recompute"
PROBED_TOKENS = 9


class ReplayedTopK(TorchFunctionMode):
    """Makes `torch.topk` choose the experts in `routes` [T, k], k for each of T tokens.

    Where `routes` is -1, the router's own choice stays.
    """

    def __init__(self, routes: Tensor, num_experts: int) -> None:
        super().__init__()
        self.routes, self.num_experts = routes, num_experts
        self.own: Tensor | None = None  # [T, k] the router's own choices
        self.times = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in TOPK or not self._chooses(args[0], result[1]):
            return result
        self.times += 1
        self.own = result[1]
        chosen = torch.where(self.routes < 0, self.own, self.routes)
        return torch.return_types.topk((args[0].gather(-1, chosen), chosen))

    def _chooses(self, scores: Tensor, choices: Tensor) -> bool:
        """Return whether this call of `torch.topk` chooses experts.

        Some routers call `torch.topk` more than once, for example to choose groups of experts first.
        """
        return scores.shape == (len(self.routes), self.num_experts) and choices.shape == self.routes.shape


class RouteReplay:
    """Makes the routers of a model choose the experts in `AttnContext.routes`.

    `routes` [T, R, k] holds the indices of k experts for each of T tokens and each of R routers. Without `routes`, the
    routers choose the experts themselves.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Replace the forward of each router of the model.

        Create a `RouteReplay` after adapters are added to the model and before its first forward pass.
        """
        self.routers = routers_of(model)
        self._context: AttnContext | None = None
        for layer in layers_of(model):
            layer.register_forward_pre_hook(self._enter, with_kwargs=True)
        for number, router in enumerate(self.routers):
            forward = partial(self._forward, router.module.forward, number, router)
            disabled = torch.compiler.disable(forward, reason="route replay needs a torch function mode")  # type: ignore[no-untyped-call]
            object.__setattr__(router.module, "forward", disabled)

    def _enter(self, layer: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        self._context = kwargs.get("attn_context")  # also when backward recomputes the layer

    def _forward(self, own: Callable[..., Any], number: int, router: Router, *args: Any, **kwargs: Any) -> Any:
        routes = None if self._context is None else self._context.routes
        if routes is None:
            return own(*args, **kwargs)
        if routes.shape[1] != len(self.routers):
            raise UserError(
                "routes",
                f"have {routes.shape[1]} layers with experts, but the model has {len(self.routers)}",
                f"use rollouts of this model, or {FIX}",
            )
        unknown = unknown_in(np.dtype(np.uint8 if routes.dtype == torch.uint8 else np.int16))
        ours = routes[:, number].long()
        with ReplayedTopK(ours.masked_fill(ours == unknown, -1), router.num_experts) as replayed:
            output = own(*args, **kwargs)
        if replayed.times != 1:
            raise UserError(
                "routes",
                f"have {routes.shape[2]} experts per token, but {type(router.module).__name__} chooses another number",
                f"use rollouts of this model, or {FIX}",
            )
        for each in output:
            if isinstance(each, Tensor) and not each.dtype.is_floating_point and each.shape[-1] == ours.shape[-1]:
                # the load-balancing loss counts the experts that the router itself would choose
                each.own_choices = replayed.own  # type: ignore[attr-defined]
        return output


class RouteRecorder:
    """Records the routes (the experts that the routers choose for each token) of each forward pass of a model.

    `take` returns the routes recorded since the last `clear` or `take`.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        routers = routers_of(model)
        self.num_routers = len(routers)
        self.dtype = route_dtype(max(router.num_experts for router in routers))
        self._recorder = RouterRecorder(routers)
        self._recorder.record(True)

    def clear(self) -> None:
        self._recorder.clear()

    def take(self) -> Tensor:
        """Return the routes [T, R, k] of one forward pass, on the model's device.

        The routes are the k experts that each of R routers chose for each of T tokens.
        """
        calls = self._recorder.calls
        assert [number for number, _, _ in calls] == list(range(self.num_routers))
        routes = torch.stack([choices for _, _, choices in calls], dim=1)
        self.clear()
        return routes.to(torch.uint8 if self.dtype == np.uint8 else torch.int16)


def need_replay(model: PreTrainedModel) -> None:
    """Raise a `UserError` if the routes of this model (the experts chosen for each token) cannot be recorded and
    replayed.
    """
    reason = replay_obstacle(model)
    if reason is not None:
        raise UserError("rollout.routing", f"is not possible because {reason}", FIX, "replay")


def replay_obstacle(model: PreTrainedModel) -> str | None:
    """Return why the routers of this model cannot be made to choose given experts, or None if they can.

    The test runs on a small copy of the model (few layers, random weights). Replaying the copy's own routes must not
    change the output. Replaying other routes must change it.
    """
    name, routers = type(model).__name__, routers_of(model)
    if not routers:
        return f"{name} has no routers"
    if max(router.num_experts for router in routers) > MOST_EXPERTS:
        return f"{name} has more than {MOST_EXPERTS} experts"
    with undisturbed():
        copy = small_copy(model)
        if copy is None:
            return f"padfree cannot build the small copy of {name} on which it would test route replay"
        copy.set_attn_implementation("eager")
        with reference_functions(copy):
            try:
                return _obstacle(copy, name)
            except UserError:
                return f"the routers of {name} do not choose experts with torch.topk, or do not return their choices"
            except Exception as error:  # the code of a model may fail in any way
                return f"the test of {name} failed with {type(error).__name__}: {error}"


def _obstacle(copy: PreTrainedModel, name: str) -> str | None:
    recorder = RouteRecorder(copy)
    tokens = torch.arange(PROBED_TOKENS)[None] % VOCABULARY

    def run(routes: Tensor | None) -> Tensor:
        recorder.clear()
        context = AttnContext(segments=Segments.from_lengths([PROBED_TOKENS]), routes=routes)
        with torch.no_grad() if routes is None else nullcontext():
            hidden: Tensor = base_of(copy)(input_ids=tokens, use_cache=False, attn_context=context).last_hidden_state
        return hidden

    free = run(None)
    own = recorder.take()
    RouteReplay(copy)
    if not torch.equal(run(None), free):
        return f"two forward passes of {name} on the same tokens give different outputs"
    if not torch.equal(run(own), free):
        return f"the output of {name} changes if its own routes are replayed"
    unknown = torch.full_like(own, unknown_in(recorder.dtype))
    if not torch.equal(run(unknown), free):
        return f"the output of {name} changes if unknown routes leave the choice of experts to its routers"
    # Shift the experts of each token by one, in every layer. All experts stay distinct.
    counts = torch.tensor([router.num_experts for router in routers_of(copy)])
    other = ((own.long() + 1) % counts[None, :, None]).to(own.dtype)
    if torch.equal(own.sort(-1).values, other.sort(-1).values):
        return f"{name} uses all experts for every token, so that no other routes exist for a test"
    hidden = run(other)
    if not torch.equal(recorder.take(), other) or torch.equal(hidden, free):
        return f"{name} does not use the routes that it is given"
    hidden.square().sum().backward()  # type: ignore[no-untyped-call]
    for router in routers_of(copy):
        weight = router.module.weight
        assert isinstance(weight, Tensor)
        if weight.grad is None or not weight.grad.abs().sum() > 0:
            return f"{type(router.module).__name__} gets no gradient if other routes than its own are replayed"
    return None


def check_routes(routes: Iterable[Routes | None], routers: Sequence[Router]) -> None:
    """Raise a `UserError` if the routes (experts chosen for each token) name an expert or a layer that the model does
    not have.

    `routers` are the routers of the model, from `routers_of`.
    """
    for own in routes:
        if own is None or not routers:  # a model without routers ignores routes
            continue
        known = own[own != unknown_in(own.dtype)]
        fewest = min(router.num_experts for router in routers)
        if own.shape[1] != len(routers) or known.max(initial=0) >= fewest:
            raise UserError(
                "routes",
                f"are for {own.shape[1]} layers with at least {known.max(initial=0) + 1} experts each, but this model "
                f"has {len(routers)} layers with experts, the smallest with {fewest}",
                f"use rollouts of this model, or {FIX}",
            )
