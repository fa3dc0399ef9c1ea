"""Turn samples into packed batches with `pack`, and packed values back with `unpack`.

For example, this is the pack of the samples [1 2 3] and [10 11 12 13] (-: no label):

    input_ids       1  2  3 10 11 12 13
    position_ids    0  1  2  0  1  2  3
    labels          2  3  - 11 12 13  -
    cu_seqlens      0  3  7

The model predicts token t + 1 at position t. Labels, weights and advantages are stored at the position that predicts
(`at_predictions`). A pack keeps its samples in the given order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from padfree.arrays import concatenated_ranges, need_whole, number_array
from padfree.batch import IGNORE, Entries, PackedBatch, PackedImages, PackedKept, Rollout, SampleInfo, at_predictions
from padfree.choices import SharePrefixes
from padfree.errors import UserError, need
from padfree.images import Image, prefix_keys, without_image
from padfree.kept_sets import KeptSets
from padfree.packing.balance import balance
from padfree.packing.cost import CostModel
from padfree.packing.fill import fill
from padfree.packing.prefixes import FREE, PrefixTree, find_prefixes
from padfree.routes import joined_routes, route_keys
from padfree.sample import Sample, common_fields
from padfree.segments import Segments

Cost = Callable[[NDArray[Any]], NDArray[Any]]


def pack(
    samples: Sequence[Sample],
    *,
    max_tokens: int | None = None,
    num_packs: int | None = None,
    multiple_of: int = 1,
    cost: Cost | None = None,
    weights: Sequence[NDArray[Any]] | None = None,
) -> list[PackedBatch]:
    """Lay samples end to end in few packs, or in `num_packs` packs of nearly equal `cost` (default: tokens).

    `max_tokens` includes the padding to a multiple of `multiple_of`. `weights[i][t]` is the weight of the prediction
    of token t + 1 in sample i. Default weights are equal and sum to 1.
    """
    if not (hasattr(samples, "__len__") and hasattr(samples, "__getitem__")):
        raise UserError("samples", f"got a {type(samples).__name__}", "give a list of padfree.Sample")
    if weights is not None:
        weights = [number_array(array, f"weights of sample {index}") for index, array in enumerate(weights)]
    _check_packable(samples, max_tokens, num_packs, multiple_of, weights)
    if not len(samples):
        return []
    fields = common_fields(samples)
    if weights is None:
        scored = sum(sample.num_labels for sample in samples)
        uniform = 1.0 / scored if scored else 0.0
        weights = [np.broadcast_to(np.float32(uniform), len(sample)) for sample in samples]
    lengths = np.fromiter((len(sample) for sample in samples), dtype=np.int64, count=len(samples))
    parts = _partition(lengths, max_tokens, num_packs, cost)
    return [_collate(samples, weights, part, fields).padded_to_multiple(multiple_of) for part in parts]


def unpack(batches: PackedBatch | Iterable[PackedBatch], values: Tensor | Iterable[Tensor]) -> list[Tensor]:
    """Split values [T, ...] of packed tokens into one view per sample, in the order before `pack`, without padding.

    Pass one batch and one tensor, or the batches of one call of `pack` and one tensor per batch.
    """
    if isinstance(batches, PackedBatch):
        batches, values = [batches], [values]  # type: ignore[list-item]
    given: dict[str, object] = {"batches": batches, "values": values}
    for name, part in given.items():
        if isinstance(part, Tensor) or not isinstance(part, Iterable):
            raise UserError(
                name,
                f"got a {type(part).__name__}, but batches and values must both be lists",
                "give the batches from padfree.pack, and one tensor of values per batch",
            )
    batches, values = list(batches), list(values)
    if not all(isinstance(batch, PackedBatch) for batch in batches):
        raise UserError("batches", "holds other objects than PackedBatch", "give the list that padfree.pack returned")
    if len(batches) != len(values):
        raise UserError("values", f"has {len(values)} tensors for {len(batches)} batches", "give one tensor per batch")
    found: dict[int, Tensor] = {}
    for batch, tensor in zip(batches, values, strict=True):
        for info, piece in zip(batch.samples, batch.unpack(tensor), strict=True):
            if info.index in found:
                raise UserError(
                    "batches",
                    f"have two samples with the index {info.index}, so they are from several calls of pack or collate",
                    "call batch.unpack(values) for each batch",
                )
            found[info.index] = piece
    return [piece for _, piece in sorted(found.items())]


def collate(
    samples: Sequence[Sample],
    *,
    weights: Sequence[NDArray[Any]] | None = None,
    share_prefixes: SharePrefixes = False,
    cost: CostModel | None = None,
) -> PackedBatch:
    """Lay all samples end to end in one pack, without a limit on its tokens.

    `share_prefixes`: True stores every common prefix only once. "auto" does so for samples of the same `group`, where
    this lowers the `cost`.
    """
    packs = pack(samples, weights=weights)
    if not packs:
        raise UserError("samples", "is empty", "give at least one sample")
    if share_prefixes is False:
        return packs[0]
    return with_shared_prefixes(packs[0], samples, prefixes_of(samples, share_prefixes, cost))


def prefixes_of(samples: Sequence[Sample], share_prefixes: SharePrefixes, cost: CostModel | None = None) -> PrefixTree:
    """Build the prefix tree of the samples. If `share_prefixes` is False, no samples share a node of the tree.

    A shared prefix ends before the first token whose routes (the experts chosen for the token) differ.
    """
    known = share_prefixes == "auto" or isinstance(share_prefixes, bool)
    need(known, "share_prefixes", share_prefixes, "give 'auto', True or False")
    tokens = [sample.tokens for sample in samples]
    if any(sample.images for sample in samples):
        tokens = prefix_keys(tokens, [sample.images for sample in samples])
    if any(sample.routes is not None for sample in samples):  # other experts give other hidden states
        tokens = route_keys(tokens, [sample.routes for sample in samples])
    if share_prefixes is False:
        return find_prefixes(tokens, [None] * len(samples))
    always = share_prefixes is True
    groups = [sample.group for sample in samples]
    return find_prefixes(tokens, groups, cost=cost, overhead=FREE if always else None, across_groups=always)


def with_shared_prefixes(batch: PackedBatch, samples: Sequence[Sample], tree: PrefixTree) -> PackedBatch:
    """Return the batch with its samples stored as nodes of a prefix tree, so that each shared token is stored once.

    A batch without shared prefixes is returned unchanged.
    """
    if not tree.is_shared:
        return batch
    assert batch.entries is None
    assert not batch.pad_length
    # If a position has a label, the next token of the sample is scored.
    predictions = np.flatnonzero(batch.labels.numpy() != IGNORE)
    chosen = torch.from_numpy(predictions)
    nodes = [(samples[i], a, b) for i, a, b in zip(tree.sample.tolist(), tree.begin, tree.end, strict=True)]
    pack_tokens = np.concatenate([sample.tokens[a:b] for sample, a, b in nodes]).astype(np.int64, copy=False)
    return replace(
        batch,
        images=_packed_images(nodes),
        rotary_positions=_rotary_positions(nodes),
        routes=_packed_routes(nodes),
        input_ids=torch.from_numpy(pack_tokens),
        position_ids=torch.from_numpy(concatenated_ranges(tree.begin, tree.lengths)),
        **{field: getattr(batch, field)[chosen] for field in PackedBatch.LABEL_FIELDS},
        segments=Segments.from_lengths(tree.lengths, parents=tree.parents),
        rollout=None if batch.rollout is None else batch.rollout.map(lambda values: values[chosen]),
        entries=Entries(positions=tree.token_positions()[predictions], tokens=predictions + 1),
        kept=None if batch.kept is None else replace(batch.kept, positions=np.arange(len(predictions))),
    )


def _check_packable(
    samples: Sequence[Sample],
    max_tokens: int | None,
    num_packs: int | None,
    multiple_of: int,
    weights: Sequence[NDArray[Any]] | None,
) -> None:
    need_whole("multiple_of", multiple_of, 1, "give 1 or more")
    if num_packs is not None:
        need_whole("num_packs", num_packs, 1, "give 1 or more")
    if max_tokens is not None:
        need_whole("max_tokens", max_tokens, 1, f"give a positive multiple of multiple_of={multiple_of}")
    if num_packs is not None and len(samples) and num_packs > len(samples):
        raise UserError(
            "num_packs", f"{num_packs} exceeds the {len(samples)} samples", "give at most one pack per sample"
        )
    if max_tokens is not None and max_tokens % multiple_of:
        raise UserError(
            "max_tokens",
            f"is not divisible by multiple_of={multiple_of}",
            f"give a positive multiple of {multiple_of}",
            value=max_tokens,
        )
    seen: dict[Any, int] = {}
    for index, sample in enumerate(samples):
        if not isinstance(sample, Sample):
            raise UserError(
                "samples", f"got a {type(sample).__name__} at index {index}", "give padfree.Sample(tokens=...)"
            )
        if sample.uid is not None and seen.setdefault(sample.uid, index) != index:
            raise UserError(
                "uid",
                f"occurs at index {seen[sample.uid]} and {index}",
                "give each sample its own uid",
                value=sample.uid,
            )
        if max_tokens is not None and len(sample) > max_tokens:
            raise UserError(
                "max_tokens",
                f"{max_tokens} is less than the {len(sample)} tokens of sample {_label(sample, index)}",
                "raise max_tokens, or shorten the sample with .truncated()",
            )
    if weights is None:
        return
    if len(weights) != len(samples):
        raise UserError("weights", f"has {len(weights)} arrays for {len(samples)} samples", "give one array per sample")
    for index, (sample, array) in enumerate(zip(samples, weights, strict=True)):
        if np.shape(array) != (len(sample),):
            raise UserError(
                f"weights of sample {_label(sample, index)}",
                f"has shape {np.shape(array)} for {len(sample)} tokens",
                "give one weight per token",
            )
        if not np.isfinite(array).all():
            raise UserError(
                f"weights of sample {_label(sample, index)}",
                "contains a number that is not finite",
                "give finite numbers",
            )


def _label(sample: Sample, index: int) -> str:
    return f"at index {index}" if sample.uid is None else f"{sample.uid!r} at index {index}"


def _partition(
    lengths: NDArray[np.int64], max_tokens: int | None, num_packs: int | None, cost: Cost | None
) -> Sequence[NDArray[Any]]:
    """Assign samples to packs, given their lengths. Returns the ascending sample indices of each pack."""
    if max_tokens is None and (num_packs is None or num_packs == 1):
        return [np.arange(len(lengths))]
    if num_packs is None:
        assert max_tokens is not None
        return fill(lengths, max_tokens)
    costs = lengths if cost is None else cost(lengths)
    return balance(costs, num_packs, lengths=lengths, cap=max_tokens)


def _collate(
    samples: Sequence[Sample], weights: Sequence[NDArray[Any]], part: NDArray[Any], fields: tuple[str, ...]
) -> PackedBatch:
    chosen = [samples[i] for i in part]
    segments = Segments.from_lengths([len(sample) for sample in chosen])
    offsets, num_tokens = segments.offsets, segments.num_tokens

    def joined(arrays: Sequence[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
        out = np.empty(num_tokens, dtype=dtype)
        return np.concatenate(arrays, out=out, casting="same_kind")

    lengths = segments.lengths
    input_ids = joined([sample.tokens for sample in chosen], np.int64)
    position_ids = np.arange(num_tokens, dtype=np.int64) - np.repeat(offsets[:-1], lengths)
    scored = at_predictions(joined([sample.mask for sample in chosen], np.bool_), offsets)
    labels = at_predictions(input_ids, offsets)
    labels[~scored] = IGNORE
    token_weights = joined([weights[index] for index in part], np.float32)
    token_weights[~scored] = 0.0
    rollout = {
        field: at_predictions(joined([getattr(sample, field) for sample in chosen], np.float32), offsets)
        for field in fields
    }

    ranges = [(sample, 0, len(sample)) for sample in chosen]
    return PackedBatch(
        kept=_packed_kept(chosen, np.flatnonzero(scored)),
        images=_packed_images(ranges),
        rotary_positions=_rotary_positions(ranges),
        routes=_packed_routes(ranges),
        input_ids=torch.from_numpy(input_ids),
        position_ids=torch.from_numpy(position_ids),
        labels=torch.from_numpy(labels),
        weights=torch.from_numpy(token_weights),
        sample_index=torch.from_numpy(np.repeat(np.arange(len(chosen), dtype=np.int32), lengths)),
        segments=segments,
        rollout=Rollout(**{f: torch.from_numpy(a) for f, a in rollout.items()}) if fields else None,
        samples=tuple(
            SampleInfo(
                index=int(index),
                length=len(sample),
                uid=sample.uid,
                group=sample.group,
                source=sample.source,
                reward=sample.reward,
                raw_reward=sample.raw_reward,
                terms=sample.terms,
            )
            for sample, index in zip(chosen, part, strict=True)
        ),
    )


def _packed_kept(samples: Sequence[Sample], predictions: NDArray[np.int64]) -> PackedKept | None:
    """Return the kept sets of a pack: for each predicted token, the ids among which the sampler chose after top-p and
    top-k.

    `predictions`: the pack indices of the positions that predict a token. Returns None if no sample has kept sets.
    """
    if all(sample.kept is None for sample in samples):
        return None
    sets = KeptSets.joined(KeptSets.whole(len(sample)) if sample.kept is None else sample.kept for sample in samples)
    return PackedKept(positions=predictions, sets=sets.take(predictions + 1))


Range = tuple[Sample, int, int]
"""A sample, and the range [begin, end) of its tokens that a segment of the pack holds."""


def _packed_routes(ranges: Sequence[Range]) -> Tensor | None:
    """Return the routes [T, R, k] of a pack: the k experts chosen for each of T tokens in each of R layers.

    Returns None if no sample has routes.
    """
    parts = [None if sample.routes is None else sample.routes[begin:end] for sample, begin, end in ranges]
    routes = joined_routes(parts, [end - begin for _, begin, end in ranges])
    return None if routes is None else torch.from_numpy(routes)


def _rotary_positions(ranges: Sequence[Range]) -> Tensor | None:
    """Return the rotary positions [P, T] of a pack: P positions (e.g. time, height, width) for each of T tokens.

    Returns None if no sample has `rotary_positions`.

    In a sample without `rotary_positions`, all P positions of token i are i.
    """
    given = [sample.rotary_positions for sample, _, _ in ranges if sample.rotary_positions is not None]
    if not given:
        return None
    rows = {len(positions) for positions in given}
    if len(rows) > 1:
        raise UserError(
            "rotary_positions",
            f"have different numbers of rows: {', '.join(map(str, sorted(rows)))}",
            "prepare all samples for the same model",
        )

    def own(sample: Sample, begin: int, end: int) -> NDArray[np.int64]:
        if sample.rotary_positions is not None:
            return sample.rotary_positions[:, begin:end]
        return np.broadcast_to(np.arange(begin, end), (len(given[0]), end - begin))

    return torch.from_numpy(np.concatenate([own(*one) for one in ranges], axis=1))


def _packed_images(ranges: Sequence[Range]) -> PackedImages | None:
    """Load the distinct images of a pack, and find their placeholder tokens. Returns None if the pack has no image."""
    distinct: dict[str, tuple[Image, int]] = {}  # digest -> image, and the number of its first feature
    num_features = 0
    index: list[NDArray[np.int64]] = [np.zeros(0, dtype=np.int64)]
    tokens: list[NDArray[np.int64]] = [np.zeros(0, dtype=np.int64)]
    placeholders: set[int] = set()
    starts = np.cumsum([0, *(end - begin for _, begin, end in ranges)])
    for (sample, begin, end), place in zip(ranges, starts, strict=False):
        for image in sample.images:
            low, high = np.searchsorted(image.positions, [begin, end])
            if low == high:
                continue
            first, start = distinct.setdefault(image.digest, (image, num_features))
            if start == num_features:
                num_features += len(image.positions)
            if len(first.positions) != len(image.positions):
                raise UserError(
                    "digest",
                    f"{image.digest!r} belongs to an image with {len(first.positions)} placeholder tokens in one "
                    f"sample and to an image with {len(image.positions)} in another",
                    "give different images different digests",
                )
            index.append(np.arange(start + low, start + high))
            tokens.append(image.positions[low:high] - begin + place)
            placeholders.add(int(sample.tokens[image.positions[0]]))
    if not distinct:
        return None
    if len(placeholders) > 1:
        raise UserError(
            "images",
            f"the images of one pack have different placeholder tokens: {', '.join(map(str, sorted(placeholders)))}",
            "prepare all samples for the same model",
        )
    (placeholder,) = placeholders
    chosen = np.concatenate(index)
    missing = sum(
        int(without_image(sample.images, sample.tokens, sample.sampled, placeholder)[begin:end].sum())
        for sample, begin, end in ranges
    )
    if missing:
        raise UserError(
            "images",
            f"are missing for {missing} tokens with the placeholder id {placeholder}",
            "give an image for each placeholder, or remove the token from samples without images",
        )
    images = [image for image, _ in distinct.values()]
    loaded = _padded_to_largest([image.load() for image in images])
    names = loaded[0].keys()
    for inputs in loaded:
        if "pixel_values" not in inputs or inputs.keys() != names:
            raise UserError(
                "images",
                f"two images of a pack have the inputs ({', '.join(sorted(names))}) and ({', '.join(sorted(inputs))})",
                "give all images inputs with the same names, pixel_values among them",
            )
        for name in names:
            if inputs[name].shape[1:] != loaded[0][name].shape[1:]:
                raise UserError(
                    "images",
                    f"two images of a pack have {name} of shapes {loaded[0][name].shape} and {inputs[name].shape}",
                    "prepare all images of a data set to the same size of patch or tile",
                )
    return PackedImages(
        inputs={name: torch.from_numpy(np.concatenate([inputs[name] for inputs in loaded])) for name in names},
        tokens=np.concatenate(tokens),
        index=chosen,
        counts=tuple(len(image.positions) for image in images),
        rows={name: tuple(len(inputs[name]) for inputs in loaded) for name in names},
        placeholder=placeholder,
    )


def _padded_to_largest(loaded: Sequence[Mapping[str, NDArray[Any]]]) -> list[Mapping[str, NDArray[Any]]]:
    """Pad `pixel_values` [1, channels, height, width] at the right and bottom to the size of the largest image.

    Only vision towers that cut an image to its `image_sizes` [1, 2] (Pixtral) need padding. The images of other towers
    are unchanged.
    """

    def is_cut(inputs: Mapping[str, NDArray[Any]]) -> bool:
        pixels, sizes = inputs.get("pixel_values"), inputs.get("image_sizes")
        return pixels is not None and sizes is not None and pixels.ndim == 4 and len(pixels) == len(sizes) == 1

    if not all(map(is_cut, loaded)):
        return list(loaded)
    height, width = np.max([inputs["pixel_values"].shape[2:] for inputs in loaded], axis=0)

    def padded(pixels: NDArray[Any]) -> NDArray[Any]:
        return np.pad(pixels, ((0, 0), (0, 0), (0, height - pixels.shape[2]), (0, width - pixels.shape[3])))

    return [{**inputs, "pixel_values": padded(inputs["pixel_values"])} for inputs in loaded]
