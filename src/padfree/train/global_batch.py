"""A global batch, its updates, and how a checkpoint stores it.

SFT makes one update per batch. RL makes `loss.epochs` × `loss.mini_batches` updates of a batch. For example, two epochs
with two mini-batches divide five samples like this:

    epoch                           0                1
    indices of samples (`parts`)    [3 0 4] [1 2]    [2 3 1] [4 0]

All updates of an RL batch use advantages and log-probabilities from before the first update. A checkpoint between two
updates therefore stores all samples of the batch, under keys that begin with "rollouts".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from padfree.data.image_processor import Expansion, ImageSettings
from padfree.data.image_store import PromptImage, ReadImage
from padfree.errors import UserError
from padfree.images import Image
from padfree.kept_sets import KeptSets
from padfree.packing.epochs import shuffled
from padfree.packing.fill import Indices
from padfree.rollout.collect.sample_exchange import whole
from padfree.sample import TOKEN_ARRAYS, Sample

KEY = "rollouts"
ARRAYS = (*TOKEN_ARRAYS, "routes")
"""The optional arrays of a sample whose first axis counts tokens."""


def update_parts(num_samples: int, *, epochs: int, mini_batches: int, seed: int, number: int) -> list[Indices]:
    """Return the sample indices of each update of batch `number`.

    With one mini-batch, an update takes all samples in order. With several, each epoch over the batch shuffles the
    samples anew. The planner (`padfree.tools.planner`) also uses this function.
    """
    parts: list[Indices] = []
    for epoch in range(epochs):
        order = np.arange(num_samples)
        if mini_batches > 1:
            order = shuffled(num_samples, seed, number * epochs + epoch)
        parts += np.array_split(order, min(mini_batches, num_samples))
    return parts


class RunImages(NamedTuple):
    """The information with which a resumed run restores the images of a rollout batch.

    `of_prompts`: the images of the run's prompts, by digest. `settings`: how images are read; None for a text model.
    """

    of_prompts: Mapping[str, Image]
    settings: ImageSettings | None


@dataclass(kw_only=True, slots=True, eq=False)
class GlobalBatch:
    """The samples of a global batch, and their division into updates.

    `parts[i]`: the indices of the samples of update i. `done`: the number of updates made so far.
    """

    samples: Sequence[Sample]
    parts: Sequence[Indices]
    epochs: int = 1
    metrics: Mapping[str, Any] = field(default_factory=dict)  # metrics of the batch, written with every update
    times: Mapping[str, float] = field(default_factory=dict)  # written with the first update only; not in checkpoints
    done: int = 0

    @property
    def finished(self) -> bool:
        return self.done >= len(self.parts)

    @property
    def epoch(self) -> int:
        """The epoch, counted from 0, to which the next update belongs. An epoch is one pass over this batch."""
        return self.done * self.epochs // len(self.parts)

    def advance(self) -> None:
        """Add 1 to the number of updates made."""
        self.done += 1

    def samples_of(self, update: int) -> list[Sample]:
        return [self.samples[i] for i in self.parts[update]]

    def state(self) -> dict[str, Any]:
        """Return the entries that store this batch in a checkpoint's `extra` dict: JSON values and tensors.

        All ranks must call this.

        The field `raw_reward` of the samples is left out, because no update uses it.
        """
        samples = whole(self.samples)
        records = [
            {
                "length": len(sample),
                "uid": _plain_id(sample.uid),
                "group": _plain_id(sample.group),
                "source": sample.source,
                "reward": None if sample.reward is None else float(sample.reward),
                "arrays": [name for name in ARRAYS if getattr(sample, name) is not None],
                **_image_record(sample),
            }
            for sample in samples
        ]
        arrays: dict[str, list[Any]] = {
            "tokens": [sample.tokens.astype(np.int64) for sample in samples],
            "mask": [sample.mask for sample in samples],
            **{
                name: [values for sample in samples if (values := getattr(sample, name)) is not None] for name in ARRAYS
            },
        }
        about = {
            "done": self.done,
            "updates": len(self.parts),
            "epochs": self.epochs,
            "metrics": {
                name: value.item() if isinstance(value, np.generic) else value for name, value in self.metrics.items()
            },
            "samples": records,
        }
        # The token ids that top-p, top-k or min-p left for sampling each token, and their number per token.
        if any(sample.kept is not None for sample in samples):
            sets = KeptSets.joined(
                KeptSets.whole(len(sample)) if sample.kept is None else sample.kept for sample in samples
            )
            arrays |= {"counts": [sets.counts], "ids": [sets.ids]}
        # The bytes of images that are in no file: an environment has shown them, or data rows contain them.
        if drawn := _drawn(samples):
            about["drawn"] = [
                [digest, len(read.content or b""), read.width, read.height, list(read.expansion.grid or ())]
                for digest, read in drawn.items()
            ]
            arrays["drawn"] = [np.frombuffer(read.content or b"", np.uint8) for read in drawn.values()]
        if any(sample.images for sample in samples):
            # The indices of the placeholder tokens of the images.
            arrays["images"] = [image.positions for sample in samples for image in sample.images]
            arrays["rotary"] = [sample.rotary_positions.T for sample in samples if sample.rotary_positions is not None]
        tensors = {f"{KEY}/{name}": torch.from_numpy(np.concatenate(found)) for name, found in arrays.items() if found}
        return {KEY: about, **tensors}

    @staticmethod
    def restored(
        extra: Mapping[str, Any],
        *,
        epochs: int,
        mini_batches: int,
        seed: int,
        number: int,
        images: RunImages | None = None,
    ) -> GlobalBatch:
        """Restore the batch that the method `state` has stored in a checkpoint's `extra` dict.

        `epochs` and `mini_batches` must be the same as when the batch was stored. `number`: the number of the batch.
        `images`: see `RunImages`.
        """
        about = extra[KEY]
        records = about["samples"]
        parts = update_parts(len(records), epochs=epochs, mini_batches=mini_batches, seed=seed, number=number)
        if (len(parts), epochs) != (about["updates"], about["epochs"]):
            raise UserError(
                "loss.epochs",
                f"{epochs} with loss.mini_batches={mini_batches}, but the checkpoint has an unfinished rollout batch, "
                f"which began with loss.epochs={about['epochs']} ({about['updates']} updates)",
                "resume with the earlier values of both settings until this batch is finished",
            )
        pieces = {
            name: _split(extra[f"{KEY}/{name}"], [record["length"] for record in records if _has_array(record, name)])
            for name in ("tokens", "mask", *ARRAYS)
            if f"{KEY}/{name}" in extra
        }
        if f"{KEY}/old" in extra:  # earlier versions stored old log-probabilities separately
            pieces["old_logprobs"] = _split(extra[f"{KEY}/old"], [record["length"] for record in records])
            records = [{**record, "arrays": [*record["arrays"], "old_logprobs"]} for record in records]
        arrays = {name: iter(found) for name, found in pieces.items()}
        lengths = [record["length"] for record in records]
        kept: list[KeptSets | None] = [None] * len(records)
        if f"{KEY}/counts" in extra:
            sets = KeptSets(extra[f"{KEY}/counts"].numpy(), extra[f"{KEY}/ids"].numpy())
            kept = [sets[end - length : end] for length, end in zip(lengths, np.cumsum(lengths).tolist(), strict=True)]
        shown = _images_of(extra, records, images or RunImages({}, None))
        samples = [
            Sample(
                tokens=next(arrays["tokens"]),
                loss_mask=next(arrays["mask"]),
                **{name: next(arrays[name]) for name in record["arrays"]},
                **{name: record[name] for name in ("uid", "group", "source", "reward")},
                kept=own_kept,
                **own_images,
            )
            for record, own_kept, own_images in zip(records, kept, shown, strict=True)
        ]
        return GlobalBatch(
            samples=samples,
            parts=parts,
            epochs=epochs,
            metrics=about["metrics"],
            done=about["done"],
        )


def _image_record(sample: Sample) -> dict[str, Any]:
    """Return the entries about a sample's images in a checkpoint's JSON; {} if the sample has no images.

    The entries are (digest, number of placeholder tokens) of each image, and whether the sample has rotary positions.
    """
    if not sample.images:
        return {}
    found = [(image.digest, len(image.positions)) for image in sample.images]
    return {"images": found, "rotary": sample.rotary_positions is not None}


def _drawn(samples: Sequence[Sample]) -> dict[str, ReadImage]:
    """Return the samples' images that are not in a file, e.g. images drawn by an environment: a dict by digest."""
    return {
        image.digest: image.load.read
        for sample in samples
        for image in sample.images
        if isinstance(image.load, PromptImage) and image.load.read.path is None
    }


def _restored_images(extra: Mapping[str, Any], images: RunImages) -> dict[str, Image]:
    """Return all images by digest: those of the prompts, and those whose bytes the checkpoint stores in `extra`."""
    found, about = dict(images.of_prompts), extra[KEY].get("drawn", ())
    contents = _split(extra[f"{KEY}/drawn"], [length for _, length, *_ in about]) if about else ()
    for (digest, _, width, height, grid), content in zip(about, contents, strict=True):
        if digest in found:
            continue
        if images.settings is None:
            raise UserError(
                "model.vision",
                "false, but the checkpoint was saved in the middle of a rollout batch with images",
                "set model.vision=true",
            )
        expansion = Expansion(text="", num_tokens=0, grid=tuple(grid) or None)
        name = digest.partition("-")[0]
        read = ReadImage(name, None, content.tobytes(), 0, 0, width, height, expansion)
        load = PromptImage(read, images.settings)
        found[digest] = Image(digest=digest, positions=np.zeros(1, np.int64), load=load, grid=expansion.grid)
    return found


def _images_of(
    extra: Mapping[str, Any], records: Sequence[Mapping[str, Any]], images: RunImages
) -> list[dict[str, Any]]:
    """Return the images and the rotary positions of each stored sample, as keyword arguments of `Sample`."""
    stored = [record.get("images", ()) for record in records]
    if not any(stored):
        return [{} for _ in records]
    known = _restored_images(extra, images)
    positions = iter(_split(extra[f"{KEY}/images"], [count for own in stored for _, count in own]))
    lengths = [record["length"] for record in records if record.get("rotary")]
    rotary = iter(_split(extra[f"{KEY}/rotary"], lengths) if lengths else ())
    return [
        {
            "images": tuple(replace(known[digest], positions=next(positions)) for digest, _ in own),
            "rotary_positions": next(rotary).T if record.get("rotary") else None,
        }
        for record, own in zip(records, stored, strict=True)
    ]


def _has_array(record: Mapping[str, Any], name: str) -> bool:
    return name not in ARRAYS or name in record["arrays"]


def _split(values: Tensor, lengths: Sequence[int]) -> list[Any]:
    return np.split(values.numpy(), np.cumsum(lengths)[:-1])


def _plain_id(name: Any) -> str | int | None:
    """Return an id in a form that JSON can store: numpy integers become int."""
    return name if name is None or isinstance(name, str) else int(name)
