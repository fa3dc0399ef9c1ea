"""Pass this rank's shards of parameters to an elementwise update rule, as plain tensors.

A split weight is a float32 parameter that is stored as a bfloat16 copy and the remaining bits
(`padfree.model.split_weight`). An update joins split weights to float32 in temporary memory, and splits them again. To
limit this memory, it processes blocks of at most `BLOCK` elements one after the other. A block holds several small
parameters, or some matrix rows of a large one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from padfree.model.split_weight import SplitStorage, SplitWeight, aligned, is_split
from padfree.optim.rule import State, local

# An update of this size takes the GPU longer than the host needs to launch it.
BLOCK = {"cuda": 1 << 26, "cpu": 1 << 22}
"""The maximum number of elements of split weights (stored in two parts) that are updated at a time, by device type.

Their float32 values take up to 256 MiB on a GPU.
"""

ROWS = 8
"""A large split weight (a float32 weight that is stored in two parts) is updated in ranges of matrix rows. Each range
begins at a multiple of this number of rows, because `SplitStorage` can only be read from a multiple of 8 elements.
"""


class ParameterPiece(NamedTuple):
    """The weight, gradient and optimizer state of this rank's shard of a parameter, as plain tensors.

    A large shard may be divided into several pieces, each with some of the shard's matrix rows.
    """

    parameter: Tensor
    first: int  # row of the shard
    weight: Tensor
    gradient: Tensor
    step: Tensor
    state: dict[str, Tensor]  # without the step counter


def update_pieces(
    parameters: Sequence[Tensor], state: State, update: Callable[[list[ParameterPiece]], None], most: int
) -> None:
    """Call `update` with pieces of all parameters as plain tensors, instead of DTensors or split weights.

    Split weights (float32 weights stored in two parts) are joined to float32 first, in blocks of at most `most`
    elements; `update` is called once for each block.
    """
    update([_piece(parameter, state) for parameter in parameters if not is_split(parameter)])
    splits = [parameter for parameter in parameters if is_split(parameter)]
    for block in _blocks(splits, state, most):
        first, last = block[0], block[-1]
        joined = first.storage.join(first.start, last.stop)
        update(
            [
                each.piece._replace(
                    weight=joined[each.start - first.start : each.stop - first.start].view_as(each.piece.gradient)
                )
                for each in block
            ]
        )
        first.storage.split(joined, first.start)
        del joined  # before the next block is joined


class _SplitPiece(NamedTuple):
    """Some matrix rows of a split weight (a float32 weight that is stored in two parts).

    The parts are not yet joined to float32.
    """

    storage: SplitStorage
    start: int  # in the storage
    stop: int
    piece: ParameterPiece


def _piece(parameter: Tensor, state: State) -> ParameterPiece:
    own = state[parameter]
    assert parameter.grad is not None
    kinds = {kind: local(value) for kind, value in own.items() if kind != "step"}
    return ParameterPiece(parameter, 0, local(parameter), local(parameter.grad), own["step"], kinds)


def _blocks(parameters: list[SplitWeight], state: State, most: int) -> Iterator[list[_SplitPiece]]:
    """Divide split weights (float32 weights stored in two parts) into blocks of at most `most` elements, or of `ROWS`
    matrix rows if these have more elements. A block is contiguous in memory.
    """
    block: list[_SplitPiece] = []
    for parameter in sorted(parameters, key=lambda each: (id(each.storage_), each.start)):
        own, gradient = state[parameter], parameter.grad
        assert gradient is not None
        columns = parameter.shape[-1] if parameter.ndim else 1
        gradients = gradient.reshape(-1, columns)
        kinds = {kind: value.view(len(gradients), -1) for kind, value in own.items() if kind != "step"}
        # Divide only between matrix rows: the elements of a row share scales in int8 optimizer state.
        rows = max(ROWS, most // columns // ROWS * ROWS)
        for begin in range(0, len(gradients), rows):
            end = min(begin + rows, len(gradients))
            # torch's kernel increments the step counter of every piece
            step = own["step"] if end == len(gradients) else own["step"].clone()
            start, stop = parameter.start + begin * columns, parameter.start + end * columns
            if block and not (
                block[-1].storage is parameter.storage_
                and aligned(block[-1].stop) == start
                and stop - block[0].start <= most
            ):
                yield block
                block = []
            part = gradients[begin:end]
            states = {kind: value[begin:end] for kind, value in kinds.items()}
            unjoined = part.new_empty(0)
            piece = ParameterPiece(parameter, begin, unjoined, part, step, states)
            block.append(_SplitPiece(parameter.storage_, start, stop, piece))
    if block:
        yield block
