"""A few samples for a check: random, or from the user's data with lengths spread from the shortest to the longest.

In this example, 4 of 8 samples are chosen, among them the longest and the shortest one:

    lengths of the data   12 500 80 40 7 90 300 60        chosen: 500 40 7 90, in the order of the file
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from padfree.config import DataConfig
from padfree.data import (
    RolloutDataSettings,
    SFTDataSettings,
    TokenizedDataset,
    load_pairs,
    load_sft,
    of_source,
    read_rollouts,
)
from padfree.data.formats import LABEL_SCHEMA
from padfree.data.image_processor import ImageSettings
from padfree.data.prepare import load_rows
from padfree.data.sources import open_sources
from padfree.errors import UserError
from padfree.sample import Sample
from padfree.tasks.kto import LabelledDataset, LabelTokenizer
from padfree.tasks.reading import text_settings
from padfree.train.training_data import open_tokenizer

SHORTEST, LONGEST = 3, 96
"""Shortest and longest length of random samples, in tokens."""


def chosen_samples(
    data: Sequence[str] | DataConfig,
    count: int,
    *,
    tokenizer: str | None,
    max_length: int,
    trust_remote_code: bool = False,
    pairs: bool = False,
    labels: bool = False,
    images: ImageSettings | None = None,
) -> list[Sample]:
    """Return `count` samples of SFT data, or of rollouts (rows with a `reward`), truncated to `max_length` tokens.

    - `tokenizer`: a folder or a Hub id. Rollouts with token ids need none.
    - `pairs`: return pairs of `chosen` and `rejected`.
    - `labels`: the data is for `padfree kto`.
    - `images`: how to read images. If possible, at least half of the samples have images.
    """
    data = data if isinstance(data, DataConfig) else DataConfig(path=tuple(data))
    if data.sources:
        parts = {
            source.label: chosen_samples(
                data.of_source(source),
                max(1, count // len(data.sources)),
                tokenizer=tokenizer,
                max_length=max_length,
                trust_remote_code=trust_remote_code,
                pairs=pairs,
                labels=labels,
                images=images,
            )
            for source in data.sources
        }
        return [of_source(name, sample) for name, samples in parts.items() for sample in samples]
    chosen = {**text_settings(data, images=images), "max_length": max_length, "overlong": "truncate"}
    loaded = None if tokenizer is None else open_tokenizer(tokenizer, "--tokenizer", trust_remote_code)
    if images is not None:
        images.processor.give_template(loaded)
    if not pairs and not labels:
        source = open_sources(data.path, split=data.split, subset=data.subset)[0]
        if "reward" in {data.columns.get(name, name) for name in source.columns() or ()}:
            rollouts = read_rollouts(data.path, tokenizer=loaded, settings=RolloutDataSettings(**chosen)).samples
            return [rollouts[index] for index in spread([len(sample) for sample in rollouts], count)]
    if loaded is None:
        raise UserError("--tokenizer", "is not set and the model has no tokenizer", "give a folder or Hub id")
    if pairs:
        answers = load_pairs(data.path, loaded, SFTDataSettings(**chosen))
        lengths, shown = (each.reshape(-1, 2).sum(1) for each in (answers.lengths, answers.image_counts))
        chosen_pairs = spread(lengths, max(1, count // 2), shown > 0)
        return [answers[2 * pair + member] for pair in chosen_pairs for member in range(2)]
    rows: TokenizedDataset
    if labels:
        rows = load_rows(data.path, loaded, SFTDataSettings(**chosen), LabelledDataset, LabelTokenizer, LABEL_SCHEMA)
    else:
        rows = load_sft(data.path, loaded, SFTDataSettings(loss_on=data.loss_on, **chosen))
    return [rows[index] for index in spread(rows.lengths, count, rows.image_counts > 0)]


def has_tokenizer(path: str | Path) -> bool:
    """Return whether a folder has a tokenizer. The result is also true for a Hub id, which is not looked up."""
    path = Path(path)
    return not path.exists() or (path.is_dir() and any(path.glob("tokenizer*")))


def spread(lengths: Any, count: int, preferred: Any = None) -> list[int]:
    """Choose `count` of N samples, evenly spaced in the order of their lengths, and return their indices, ascending.

    `preferred` (bools [N]): choose at least half of the samples among the preferred ones, if there are enough.
    """
    if preferred is not None and preferred.any() and not preferred.all():
        kinds = [np.flatnonzero(preferred), np.flatnonzero(~preferred)]
        others = min(max(count // 2, count - len(kinds[0])), len(kinds[1]))
        counts = [count - others, others]
        parts = [kind[spread(lengths[kind], each)] for kind, each in zip(kinds, counts, strict=True) if each]
        return sorted(np.concatenate(parts).tolist())
    order = np.argsort(lengths, kind="stable")
    chosen = np.unique(np.linspace(0, len(order) - 1, min(count, len(order))).round().astype(np.int64))
    return sorted(order[chosen].tolist())


def random_samples(vocabulary: int, count: int, *, longest: int = LONGEST, seed: int = 0) -> list[Sample]:
    """Return `count` samples of random tokens.

    Lengths are geometrically spaced from `SHORTEST` to `longest`, and shuffled. The first third of each sample is
    not trained. The last two samples share a prefix.
    """
    rng = np.random.default_rng(seed)
    lengths = rng.permutation(np.geomspace(min(SHORTEST, longest), longest, count).round().astype(np.int64))
    tokens = [rng.integers(0, vocabulary, length) for length in lengths.tolist()]
    if count > 1:
        common = min(len(tokens[-1]), len(tokens[-2])) // 2
        tokens[-1][:common] = tokens[-2][:common]
    return [
        Sample(tokens=each, loss_mask=np.arange(len(each)) >= len(each) // 3, uid=index)
        for index, each in enumerate(tokens)
    ]
