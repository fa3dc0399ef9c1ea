"""Divide the images of a pack over the ranks of a context group.

The vision tower must see a whole image, but the tokens of an image may be divided over ranks. So each image is encoded
by one rank, which sends the features (the outputs of the vision tower) to the ranks that hold the tokens of the image.
An image that occurs several times in the pack is encoded once.

Images are assigned from the largest to the smallest, each to the rank with the fewest patches so far.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
import torch

from padfree.arrays import concatenated_ranges
from padfree.attention.copies import copies_of
from padfree.batch import AttnContext, LocalImages, PackedImages
from padfree.cp.ranges import to_device
from padfree.cp.row_exchange import Indices, plan_rows


def local_images(images: PackedImages, context: AttnContext, device: torch.device) -> LocalImages:
    """Return the images that this context rank encodes, and a description of which features it sends and receives."""
    layout, rank = context.layout, context.rank
    if layout is None:
        features = copies_of(images.index, images.num_features, device)
        return LocalImages(
            inputs=images.inputs,
            counts=images.counts,
            patches=images.patches,
            placeholder=images.placeholder,
            tokens=to_device(images.tokens, device),
            features=features,
        )
    owner = owners(images.patches, layout.world)
    mine = np.flatnonzero(owner == rank).tolist()
    counts = np.array(images.counts)
    own_features = np.zeros(images.num_features, dtype=np.int64)  # the index of each feature on the rank that has it
    feature_owner = np.repeat(owner, counts)
    for each in range(layout.world):
        encoded = feature_owner == each
        own_features[encoded] = np.arange(encoded.sum())
    number = np.full(layout.num_tokens, -1)
    number[images.tokens] = images.index
    ranges = zip(layout.starts, layout.ends, strict=True)
    held = [number[concatenated_ranges(starts, ends - starts)] for starts, ends in ranges]
    wanted: list[Indices] = [own[own >= 0] for own in held]
    exchange, features = plan_rows(feature_owner, own_features, wanted, rank, context.group, device)
    return LocalImages(
        inputs=images.inputs_of(mine) if mine else {},
        counts=tuple(images.counts[image] for image in mine),
        patches=tuple(images.patches[image] for image in mine),
        placeholder=images.placeholder,
        tokens=to_device(np.flatnonzero(held[rank] >= 0), device),
        features=features,
        exchange=exchange,
    )


def owners(patches: Sequence[int], world: int) -> Indices:
    """Return the rank that encodes each image, given the number of patches of each image. Ranks get similar patch
    counts.
    """
    loads = [(0, rank) for rank in range(world)]
    owner = np.zeros(len(patches), dtype=np.int64)
    for image in sorted(range(len(patches)), key=lambda image: -patches[image]):
        load, owner[image] = heapq.heappop(loads)
        heapq.heappush(loads, (load + patches[image], int(owner[image])))
    return owner
