"""Random weights that are drawn on the device, one tensor at a time, with the same values on any number of ranks.

1. Run transformers' `initialize_weights` on the meta device, and record the calls that write to each tensor.
2. Repeat these calls on the device. The generator is seeded from `seed` and the name of the tensor.
3. Copy this rank's part of the tensor to the model.

`recipes_of` returns None if an initial value is computed from other tensors. A GPU and a CPU draw different values from
the same seed.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedConfig

from padfree.choices import ModelHead
from padfree.model.named_tensors import local_part, local_region, named_tensors
from padfree.model.structure import model_from_config

DRAWN_ON = ("cuda",)
"""The device types on which every rank draws the random initial weights itself. On other devices (the CPU), rank 0
initialises the whole model with transformers, and broadcasts the weights.
"""


class InitialisingCall(NamedTuple):
    """A recorded call that creates a tensor, or that writes to the tensor or to a view of it."""

    function: Any
    args: tuple[Any, ...]  # without the tensor that is written to
    kwargs: Mapping[str, Any]
    view: tuple[tuple[int, ...], tuple[int, ...], int] | None  # sizes, strides, offset; None: it creates the tensor


Recipe = list[InitialisingCall]
"""The calls that give a tensor its initial value."""


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records how tensors are initialised. `recipes` maps the storage of each tensor to the calls that write to it.

    `recipes` holds None for a storage whose values are computed from another tensor.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recipes: dict[int, Recipe | None] = {}
        self._alive: list[Tensor] = []  # so that no two storages get the same address

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        tensors = [each for each in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        options = {name: value for name, value in kwargs.items() if name not in ("generator", "device", "pin_memory")}
        if not tensors and isinstance(result, Tensor):
            self._alive.append(result)
            self.recipes[_storage(result)] = [InitialisingCall(func, tuple(args), options, None)]
        elif func._schema.is_mutable and tensors:
            target = tensors[0]
            view = (tuple(target.shape), tuple(target.stride()), int(target.storage_offset()))
            recipe = self.recipes.get(_storage(target))
            if len(tensors) > 1 or recipe is None or args[0] is not target:
                self.recipes[_storage(target)] = None
            else:
                recipe.append(InitialisingCall(func, tuple(args[1:]), options, view))
        return result

    def recipe(self, tensor: Tensor) -> Recipe | None:
        """Return the calls that initialised `tensor`, or None if they are not known.

        The calls are recorded for whole storages, so the result is also None for a view of a part of a storage.
        """
        whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize
        return self.recipes.get(_storage(tensor)) if whole else None


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def recipes_of(
    config: PreTrainedConfig, dtype: torch.dtype, trust_remote_code: bool, head: ModelHead = "tokens"
) -> dict[str, Recipe] | None:
    """Return, for each tensor of a model, the calls that initialise it, or None if they are not known for some
    tensor.
    """
    recorder = _Recorder()
    with recorder:
        with torch.device("meta"):
            model = model_from_config(copy.deepcopy(config), dtype, trust_remote_code, head)
        model.initialize_weights()  # type: ignore[no-untyped-call]
    found: dict[str, Recipe] = {}
    for name, tensor in named_tensors(model).items():
        recipe = recorder.recipe(tensor)
        if recipe is None or not _writes_all(recipe, tensor.numel()):
            return None
        found[name] = recipe
    return found


def _writes_all(recipe: Recipe, count: int) -> bool:
    """Return whether the recorded calls initialise all `count` elements of a tensor.

    If the first call is `torch.empty`, a later call must write to the whole tensor.
    """
    create, *others = recipe
    if "empty" not in create.function._schema.name:
        return True
    return any(call.view is not None and math.prod(call.view[0]) == count for call in others)


def draw_weights(targets: Mapping[str, Tensor], recipes: Mapping[str, Recipe], device: torch.device, seed: int) -> None:
    """Fill `targets`, which may be sharded, with initial values that are drawn on `device`.

    `recipes` are the calls that initialise each tensor. The ranks do not communicate.
    """
    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):
        for name, tensor in targets.items():
            number = int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:7], "big")
            torch.manual_seed(number)
            # A GPU takes less time to draw a whole tensor than to receive a part.
            local_part(tensor).copy_(_drawn(recipes[name], device)[local_region(tensor)])


def _drawn(recipe: Recipe, device: torch.device) -> Tensor:
    create, *others = recipe
    whole: Tensor = create.function(*create.args, **create.kwargs, device=device)
    for call in others:
        assert call.view is not None
        call.function(torch.as_strided(whole, *call.view), *call.args, **call.kwargs)
    return whole
