"""Store float32 values without loss: a bfloat16 copy, with which the model computes, and the remaining bits.

For example, the float32 bits 0x3f80c001 round to the bfloat16 0x3f81. The difference 0x3f80c001 - 0x3f810000 = -0x3fff
is stored as a 16-bit integer. One more bit marks a difference of 2^15, which 16 bits cannot hold.

A value takes 4.125 bytes. A float32 value and a bfloat16 copy would take 6 bytes.

`SplitWeight` behaves like a float32 tensor, but each operation joins the whole tensor in temporary memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

ALIGNMENT = 128
"""Every tensor in a `SplitStorage` begins at a multiple of this number of elements, so that kernels read aligned
memory.
"""

TIE = 1 << 15


class SplitStorage:
    """Stores N float32 values without loss in three arrays.

    - `rounded` [N], bfloat16: the values rounded to bfloat16
    - `rest` [N], int16: the float32 bits of each value minus those of its rounding, as integers
    - `ties` [N / 8], uint8: one bit per value, set if this difference is 2^15
    """

    def __init__(self, numbers: int, device: torch.device | str) -> None:
        numbers = aligned(numbers)
        self.rounded = torch.zeros(numbers, dtype=torch.bfloat16, device=device)
        self.rest = torch.zeros(numbers, dtype=torch.int16, device=device)
        self.ties = torch.zeros(numbers // 8, dtype=torch.uint8, device=device)

    @property
    def device(self) -> torch.device:
        return self.rounded.device

    def join(self, start: int, stop: int) -> Tensor:
        """Return the float32 values from index `start` to index `stop`, in new memory. `start` is a multiple of 8."""
        return _kernels(self.device).join(*self._range(start, stop))

    def split(self, values: Tensor, start: int) -> None:
        """Store float32 values of any shape in this storage, from index `start` on. `start` is a multiple of 8."""
        values = values.detach().reshape(-1)
        _kernels(self.device).split(values.contiguous(), *self._range(start, start + values.numel()))

    def _range(self, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
        assert start % 8 == 0
        assert start <= stop <= self.rounded.numel()
        return self.rounded[start:stop], self.rest[start:stop], self.ties[start // 8 : -(-stop // 8)]


def aligned(numbers: int) -> int:
    """Return the number of elements `numbers`, rounded up to a multiple of `ALIGNMENT`."""
    return -(-numbers // ALIGNMENT) * ALIGNMENT


def storage_bytes(numbers: int) -> int:
    """Return the size in bytes of a `SplitStorage` for `numbers` weights, without padding for alignment."""
    return 4 * numbers + -(-numbers // 8)


def join_reference(rounded: Tensor, rest: Tensor, ties: Tensor) -> Tensor:
    """Return float32 values [n] from the three tensors in which `split_reference` stores them."""
    places = torch.arange(8, dtype=torch.uint8, device=ties.device)
    tie = (ties[:, None] >> places & 1).reshape(-1)[: rest.numel()]
    # exact for every finite value; a NaN stays a NaN, possibly with another payload
    bits = (rounded.view(torch.int16).to(torch.int32) << 16) + rest.to(torch.int32) + (tie.to(torch.int32) << 16)
    return bits.view(torch.float32)


def split_reference(values: Tensor, rounded: Tensor, rest: Tensor, ties: Tensor) -> None:
    """Store float32 values [n] in `rounded` [n], `rest` [n] and `ties` [ceil(n / 8)], as in `SplitStorage`."""
    rounded.copy_(values)
    difference = values.view(torch.int32) - (rounded.view(torch.int16).to(torch.int32) << 16)
    rest.copy_((difference & 0xFFFF).to(torch.int16))
    tie = torch.zeros(8 * ties.numel(), dtype=torch.uint8, device=ties.device)
    tie[: rest.numel()] = difference == TIE
    places = torch.arange(8, dtype=torch.uint8, device=ties.device)
    ties.copy_((tie.view(-1, 8) << places).sum(dim=1, dtype=torch.uint8))


@dataclass(frozen=True, slots=True)
class _Kernels:
    join: Callable[..., Tensor]
    split: Callable[..., None]


_REFERENCE = _Kernels(join_reference, split_reference)


def _kernels(device: torch.device) -> _Kernels:
    if device.type != "cuda" or find_spec("triton") is None:
        return _REFERENCE
    from padfree.model import triton_split_weight

    return _Kernels(triton_split_weight.join, triton_split_weight.split)


View = Callable[[Tensor], Tensor]


class SplitWeight(Tensor):
    """A weight of a `SplitStorage`, or a view of one, as a float32 tensor.

    Operations see a float32 tensor. A view remembers how it is made from the weight, so that writing to the view
    writes to the weight.
    """

    storage_: SplitStorage
    start: int
    whole: torch.Size
    views: tuple[View, ...]

    @staticmethod
    def __new__(
        cls,
        storage: SplitStorage,
        start: int,
        whole: torch.Size,
        views: tuple[View, ...] = (),
        like: Tensor | None = None,
    ) -> SplitWeight:
        like = torch.empty(whole, dtype=torch.float32, device="meta") if like is None else like
        made: SplitWeight = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=storage.device
        )
        made.storage_, made.start, made.whole, made.views = storage, start, whole, views
        return made

    @property
    def stop(self) -> int:
        return self.start + self.whole.numel()

    @property
    def rounded(self) -> Tensor:
        """Return the stored bfloat16 copy of the weight. The result is a view of the storage; do not write to it."""
        return self.storage_.rounded[self.start : self.stop].view(self.whole)

    def joined(self) -> Tensor:
        """Return the float32 values of this weight (or view of a weight) as a plain tensor in new memory."""
        found = self._whole()
        for view in self.views:
            found = view(found)
        return found

    def _whole(self) -> Tensor:
        return self.storage_.join(self.start, self.stop).view(self.whole)

    def _meta(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device="meta")

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"SplitWeight({self.joined()!r})"

    def numpy(self, *, force: bool = False) -> Any:
        return self.joined().numpy(force=force)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied = self.detach().clone().requires_grad_(self.requires_grad)
        found = torch.nn.Parameter(copied, self.requires_grad) if getattr(self, "_is_param", False) else copied
        memo[id(self)] = found
        return found

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        schema = function._schema
        if function is torch.ops.aten.detach.default:
            return args[0]._with((), args[0]._meta())
        if any(each.alias_info is not None and not each.alias_info.is_write for each in schema.returns):
            return _view(function, args, kwargs)
        if schema.name.endswith("_like") or schema.name.startswith("aten::new_"):
            return function(*_map(_empty, args), **_map(_empty, kwargs))
        return _compute(function, args, kwargs)

    def _with(self, views: tuple[View, ...], like: Tensor) -> SplitWeight:
        return SplitWeight(self.storage_, self.start, self.whole, (*self.views, *views), like)


def split_in_place(parameter: Tensor, storage: SplitStorage, start: int) -> None:
    """Move a contiguous float32 parameter into `storage`, from `start` on. The parameter stays the same Python
    object.
    """
    assert parameter.dtype == torch.float32
    assert parameter.is_contiguous()
    storage.split(parameter, start)
    weight = SplitWeight(storage, start, parameter.shape)
    replacement = torch.nn.Parameter(weight, parameter.requires_grad)
    torch.utils.swap_tensors(parameter, replacement)  # type: ignore[no-untyped-call]


def is_split(tensor: Tensor) -> TypeGuard[SplitWeight]:
    return isinstance(tensor, SplitWeight)


def plain_tensor(tensor: Tensor) -> Tensor:
    """Return the values of a `SplitWeight` as a plain tensor, for code that reads the memory of a tensor, such as
    safetensors. Any other tensor is returned unchanged.
    """
    return tensor.joined() if is_split(tensor) else tensor


def _map(function: Callable[[SplitWeight], Tensor], values: Any) -> Any:
    return tree_map(lambda value: function(value) if isinstance(value, SplitWeight) else value, values)


def _empty(weight: SplitWeight) -> Tensor:
    return torch.empty_strided(weight.shape, weight.stride(), dtype=weight.dtype, device=weight.device)


def _view(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call an operation whose results are views of its first argument, a `SplitWeight`.

    Each view is a `SplitWeight`, too.
    """
    weight, *rest = args
    assert isinstance(weight, SplitWeight), f"{function} makes a view of a SplitWeight that is not its first argument"
    found = function(weight._meta(), *rest, **kwargs)

    def made(number: int | None, like: Tensor) -> SplitWeight:
        def view(whole: Tensor) -> Tensor:
            result = function(whole, *rest, **kwargs)
            return result if number is None else result[number]  # type: ignore[no-any-return]

        return weight._with((view,), like)

    if isinstance(found, Tensor):
        return made(None, found)
    return [made(number, like) for number, like in enumerate(found)]


def _compute(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call an operation with plain float32 tensors in place of `SplitWeight` arguments.

    If the operation writes to such a tensor, the new values are stored in the `SplitWeight`.
    """
    wholes: dict[tuple[int, int], tuple[SplitWeight, Tensor]] = {}  # several views of a weight share one joined tensor
    weights: dict[int, SplitWeight] = {}  # by the id of the plain tensor

    def plain(weight: SplitWeight) -> Tensor:
        key = (id(weight.storage_), weight.start)
        if key not in wholes:
            wholes[key] = (weight, weight._whole())
        found = wholes[key][1]
        for view in weight.views:
            found = view(found)
        weights[id(found)] = weight
        return found

    plain_args, plain_kwargs = _map(plain, args), _map(plain, kwargs)
    result = function(*plain_args, **plain_kwargs)
    written: set[tuple[int, int]] = set()
    for number, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            tree_map(
                lambda each: written.add((id(each.storage_), each.start)) if isinstance(each, SplitWeight) else None,
                value,
            )
    for key in written:
        weight, whole = wholes[key]
        weight.storage_.split(whole, weight.start)
    return tree_map(lambda value: weights.get(id(value), value) if isinstance(value, Tensor) else value, result)
