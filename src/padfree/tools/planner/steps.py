"""The optimizer steps of one pass over the data, as lengths: a plan needs no tokens.

    lengths of the data      7 3 9 4 5 ...            of a tokenised data set, of rollouts, or from a file of numbers
    steps                    [9 3 4] [5 7 2] ...      the same samples in the same order as a run's

The pass is the first epoch. In a mixture it has each row of a source as many times as the source's weight says. Where
rows have several samples, which share prefixes, a step also knows what its samples share.

Responses that a run writes itself are planned as long as they may be, which is the most that it can need.

The order comes from `run.seed` as it does in training; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel

from padfree.arrays import concatenated_ranges
from padfree.batch import Sample
from padfree.config import Config
from padfree.config.inputs import check_regular
from padfree.data import Progress
from padfree.errors import UserError
from padfree.model.sharing import sharing_obstacle
from padfree.packing import PrefixTree, TokenBudgetBatcher
from padfree.packing.collate import prefixes_of
from padfree.train.batch_preparer import distinct
from padfree.train.data_rows import (
    SourceShare,
    epoch_order,
    epoch_parts,
    lengths_of,
    row_counts,
    row_starts,
    source_shares,
)
from padfree.train.global_batch import update_parts
from padfree.train.preflight import preflight
from padfree.train.shared_turns import copied_keys, rows_with_several, run_cost, tree_of_row
from padfree.train.training_data import groups_of, make_batcher

Lengths = NDArray[np.int64]

MOST_COMPARED = 50_000
"""Of so many rows the samples are compared to find what they share."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepLengths:
    """Lengths of all samples that one pass shows, and of those in each of its optimizer steps."""

    lengths: Lengths  # [n]
    steps: list[Lengths]
    over_budget: int = 0  # samples longer than `batch.tokens`, each a step of its own
    shared_tokens: int | None = None  # those that need not be computed if groups, or rows, share their prefixes
    longest_responses: bool = False  # lengths are those of prompts with the longest responses there may be
    rows: int | None = None  # of the data that the pass shows, where they are not samples
    sources: tuple[SourceShare, ...] = ()  # of a mixture
    prefixes: Callable[[int], PrefixTree] | None = None  # what the samples of a step share; None: plan without
    copied_keys: float = 0.0  # for the memory estimate


def load_steps(
    config: Config,
    *,
    lengths: str | Path | None = None,
    processes: int | None = None,
    progress: Progress | None = None,
    on_note: Callable[[str], None] | None = None,
) -> StepLengths:
    """The steps of `config`'s data, or of a file of lengths. What the run would refuse is refused here.

    `on_note` is called with how the files are read.
    """
    if lengths is not None:
        if config.data.sources:
            raise UserError("--lengths", "with data.sources", "give the data or their lengths")
        return sft_steps(read_lengths(lengths), config)
    # The devices that are planned for need not be here.
    device_type = "cpu" if config.run.device == "cpu" else "cuda"
    processes = processes or config.parallel.most_context(1) * config.parallel.replicate
    found = preflight(config, processes=processes, device_type=device_type, dry=True, planned=True, progress=progress)
    samples, parts = found.source.samples, found.source.parts
    sources = tuple(source_shares(config, samples, parts))
    if on_note is not None:
        for note in found.source.notes:
            on_note(note)
    if config.rollout.source is not None:
        return replace(prompt_steps(samples, config, parts), sources=sources)
    if not config.loss.task.turns:
        return replace(rollout_steps(samples, config, parts), sources=sources)
    return replace(row_steps(samples, config, parts, found.model), sources=sources)


def read_lengths(path: str | Path) -> Lengths:
    """[n] from a `.npy` file, or from a text file of whole numbers."""
    path = Path(path)
    check_regular(path, "--lengths")
    try:
        numbers = np.load(path) if path.suffix == ".npy" else np.array(path.read_text().split(), dtype=np.int64)
    except OSError as error:
        reason = error.strerror or error
        raise UserError("--lengths", f"{path} cannot be read ({reason})", "give a .npy or a text file") from None
    except (ValueError, EOFError):
        raise UserError("--lengths", f"{path} is not a file of whole numbers", "give a .npy or a text file") from None
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu" or not numbers.size:
        raise UserError(
            "--lengths", f"{path} holds a {numbers.dtype} array of shape {numbers.shape}", "give a flat list of lengths"
        )
    if numbers.min() < 1:
        raise UserError("--lengths", f"{path} has a length of {numbers.min()}", "give 1 or more for every sample")
    return np.asarray(numbers, dtype=np.int64)


def sft_steps(lengths: Lengths, config: Config) -> StepLengths:
    """The steps of the first epoch, `batch.samples` samples or at most `batch.tokens` tokens each."""
    steps, over_budget = _row_batches(lengths, config, [len(lengths)])
    return StepLengths(lengths=lengths, steps=[lengths[step] for step in steps], over_budget=over_budget)


def _row_batches(tokens: Lengths, config: Config, sizes: Sequence[int]) -> tuple[list[Lengths], int]:
    """The rows of each step of the first epoch, from the tokens [R] of each row, and how many are over the budget.

    `sizes`: rows of each source.
    """
    batch, seed = config.batch, config.run.seed
    if batch.samples is not None:
        order = epoch_order(config, sizes)(0)
        return [order[start : start + batch.samples] for start in range(0, len(order), batch.samples)], 0
    assert batch.tokens is not None
    batcher = TokenBudgetBatcher(
        tokens.tolist(),
        budget=batch.tokens,
        buffer_size=batch.buffer,
        overlong="alone",
        length=int,
        shuffle=config.data.shuffle,
        seed=seed,
        parts=epoch_parts(config, sizes),
    )
    return [np.array(batcher.indices, dtype=np.int64) for _ in batcher], batcher.num_overlong


def row_steps(samples: Any, config: Config, parts: Sequence[int], model: PreTrainedModel) -> StepLengths:
    """The steps of the first epoch over text: of whole rows, which may have several samples."""
    lengths, starts = lengths_of(samples), row_starts(config, samples)
    several = rows_with_several(config, samples)
    if len(starts) == len(lengths) + 1 and not parts:
        return sft_steps(lengths, config)
    tokens = np.diff(np.concatenate([[0], np.cumsum(lengths)])[starts])
    rows, over_budget = _row_batches(tokens, config, row_counts(starts, parts))
    first, sizes = starts[:-1], np.diff(starts)
    steps = [concatenated_ranges(first[step], sizes[step]) for step in rows]
    shown = np.concatenate(steps)
    found = StepLengths(
        lengths=lengths[shown],
        steps=[lengths[step] for step in steps],
        over_budget=over_budget,
        rows=None if len(starts) == len(lengths) + 1 else sum(map(len, rows)),
    )
    if not len(several) or sharing_obstacle(model) is not None:
        return found

    cost = run_cost(config, model)

    def prefixes(step: int) -> PrefixTree:
        found = distinct([samples[index] for index in steps[step].tolist()])
        return prefixes_of(found, config.batch.share_prefixes, cost)

    # Of many rows, evenly spread ones tell what all share.
    times = np.bincount(np.concatenate(rows), minlength=len(first))[several]
    chosen = spread(len(several), MOST_COMPARED)
    saved = [tokens[row] - tree_of_row(config, samples, row, cost).num_tokens for row in several[chosen].tolist()]
    shared = float((np.array(saved) * times[chosen]).sum()) * float(times.sum()) / max(float(times[chosen].sum()), 1.0)
    copies = copied_keys(config, samples, model)
    return replace(found, shared_tokens=round(shared), prefixes=prefixes, copied_keys=copies)


def spread(number: int, most: int) -> Lengths:
    """At most `most` of 0 ... number - 1, the middles of as many equal parts: 10, 4 -> 1 3 6 8."""
    count = min(number, most)
    return ((2 * np.arange(count) + 1) * number) // (2 * count)


def rollout_steps(samples: Any, config: Config, parts: Sequence[int] = ()) -> StepLengths:
    """The updates of one pass over rollouts, or over pairs."""
    steps = rollout_updates(samples, config, parts)
    shown = distinct([sample for group in _shown(samples, config, parts) for sample in group])
    return StepLengths(lengths=_lengths(shown), steps=steps, shared_tokens=_shared_tokens(shown, config))


def rollout_updates(samples: Any, config: Config, parts: Sequence[int] = ()) -> list[Lengths]:
    """Lengths of the samples of each update: whole groups, `loss.epochs` times, in parts."""
    loss, steps = config.loss, []
    once = replace(config, data=replace(config.data, epochs=1))
    for number, groups in enumerate(make_batcher(once, samples, parts), start=1):
        batch = _lengths([sample for group in groups for sample in group])
        updates = update_parts(
            len(batch), epochs=loss.epochs, mini_batches=loss.mini_batches, seed=config.run.seed, number=number
        )
        steps += [batch[update] for update in updates]
    return steps


def prompt_steps(prompts: Any, config: Config, parts: Sequence[int] = ()) -> StepLengths:
    """The updates of one pass over prompts, `rollout.samples_per_prompt` responses to each, as long as they may be."""
    group = config.rollout.samples_per_prompt
    found = rollout_updates(prompts, config, parts)
    shown = [prompts_of_group[0] for prompts_of_group in _shown(prompts, config, parts)]
    shared = 0 if config.batch.share_prefixes is False else sum(len(prompt.tokens) for prompt in shown) * (group - 1)
    lengths = np.repeat(_lengths(shown), group)
    return StepLengths(lengths=lengths, steps=found, shared_tokens=shared, longest_responses=True)


def _shown(samples: Any, config: Config, parts: Sequence[int]) -> list[Any]:
    """The groups of the first epoch, in the order of the data."""
    groups, sizes = groups_of(config, samples, parts)
    return [groups[index] for index in np.sort(epoch_order(config, sizes)(0)).tolist()]


def _shared_tokens(samples: Sequence[Sample], config: Config) -> int:
    """As `batch.share_prefixes` would share them, all samples of a group being in one row."""
    return sum(map(len, samples)) - prefixes_of(samples, config.batch.share_prefixes).num_tokens


def _lengths(samples: Iterable[Sized]) -> Lengths:
    return np.array([len(sample) for sample in samples], dtype=np.int64)
