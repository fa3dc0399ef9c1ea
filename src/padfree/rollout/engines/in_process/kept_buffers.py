"""Buffers on the device for kept sets (the ids from which a token is sampled after top-k, top-p and min-p).

Each decode step writes one mask [V] over the vocabulary for each of L responses. After up to BURST steps,
`KeptTokens.read_burst` converts the masks to lists of ids on the host.

The buffers have fixed addresses, because CUDA graphs write to them. The masks take BURST · L · V bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from padfree.kept_sets import KeptSets
from padfree.rollout.truncation import sets_of

BURST = 8
"""Maximum number of decode steps in a burst. After each burst, the host checks which responses have ended."""


@dataclass(slots=True, eq=False)
class KeptBuffers:
    """Tensors at fixed addresses, to which decode steps write the kept sets (ids from which a token was sampled)."""

    step: Tensor  # [1] int64, the number of the next step of the burst
    owners: Tensor  # [BURST, 2, L] int64: the request and the position of the token of each slot
    masks: Tensor  # [BURST, L, V] bool

    @staticmethod
    def allocated(num_slots: int, vocabulary: int, device: torch.device) -> KeptBuffers:
        return KeptBuffers(
            masks=torch.zeros(BURST, num_slots, vocabulary, dtype=torch.bool, device=device),
            step=torch.zeros(1, dtype=torch.int64, device=device),
            owners=torch.zeros(BURST, 2, num_slots, dtype=torch.int64, device=device),
        )

    def write(self, mask: Tensor, request: Tensor, position: Tensor) -> None:
        """Store the kept sets (the ids from which each token was sampled) of a decode step for the first l responses.

        `mask` [l, V]: the kept ids. `request`, `position` [l]: the request's index, and the token's index in the
        response.
        """
        count = len(mask)
        step = self.step % BURST  # the warm-up steps before a capture may exceed the burst; they are not read
        self.masks[:, :count].index_copy_(0, step, mask[None])
        self.owners[:, :, :count].index_copy_(0, step, torch.stack([request, position])[None])
        self.step += 1


@dataclass(slots=True, eq=False)
class KeptTokens:
    """Collects the kept sets (the ids from which each token was sampled) of all tokens of one `Decoder.sample` call.

    The sets are read from the device after every burst of up to BURST decode steps.
    """

    buffers: KeptBuffers | None
    owners: list[NDArray[np.int64]] = field(default_factory=list)
    parts: list[KeptSets] = field(default_factory=list)

    def read_burst(self, steps: int, occupied: int, no_request: int) -> None:
        """Read the kept sets (the ids from which each token was sampled) of the last `steps` decode steps.

        Read only the first `occupied` responses of the batch, but skip responses that had already ended (request index
        `no_request`).
        """
        if self.buffers is None:
            return
        owners = self.buffers.owners[:steps, :, :occupied].transpose(1, 2).flatten(0, 1)  # [steps · occupied, 2]
        active = (owners[:, 0] != no_request).nonzero()[:, 0]
        ends = np.searchsorted(active.cpu().numpy(), np.arange(1, steps + 1) * occupied)
        for step, slots in enumerate(active.tensor_split(ends[:-1].tolist())):
            self.parts.append(sets_of(self.buffers.masks[step, slots - step * occupied]))
        self.owners.append(owners[active].cpu().numpy())

    def sets(self, num_requests: int) -> list[KeptSets] | None:
        """Return for each response the kept sets of its tokens, i.e. the ids from which each token was sampled.

        Return None if the softmax is not truncated.
        """
        if self.buffers is None:
            return None
        owners = np.concatenate([np.zeros((0, 2), np.int64), *self.owners])
        order = np.lexsort((owners[:, 1], owners[:, 0]))
        sets = KeptSets.joined(self.parts).take(order)
        ends: Any = np.searchsorted(owners[order, 0], np.arange(num_requests + 1))
        return [sets[int(begin) : int(end)] for begin, end in pairwise(ends)]
