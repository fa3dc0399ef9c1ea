"""The optimizer steps of the first epoch, as sample lengths: a plan does not need the tokens themselves.

    lengths    7 3 9 4 5 2 ...          of all samples, from the data or from a file
    steps      [9 3 4] [5 7 2] ...      the same samples in the same order as in training

If samples share prefixes, the plan of a step also uses their prefix tree. Responses that the run generates count with
their largest possible length, so the plan is an upper bound.
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
from padfree.config import Config
from padfree.config.inputs import check_regular
from padfree.data import Progress
from padfree.errors import UserError
from padfree.model.sharing import sharing_obstacle
from padfree.packing import PrefixTree, TokenBudgetBatcher
from padfree.packing.collate import prefixes_of
from padfree.sample import Sample
from padfree.train.batch_preparer import distinct
from padfree.train.batcher import (
    SourceShare,
    epoch_order,
    epoch_parts,
    groups_of,
    lengths_of,
    make_batcher,
    row_counts,
    row_starts,
    source_shares,
)
from padfree.train.global_batch import update_parts
from padfree.train.preflight import preflight
from padfree.train.shared_turns import copied_keys, rows_with_several, run_cost, tree_of_row

Lengths = NDArray[np.int64]

MOST_COMPARED = 50_000
"""Maximum number of data rows that are examined to estimate how many tokens are saved by shared prefixes."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepLengths:
    """The lengths of all samples of an epoch, and the lengths of the samples in each of its optimizer steps."""

    lengths: Lengths  # [n]
    steps: list[Lengths]
    over_budget: int = 0  # number of samples longer than `batch.tokens`; each has a step of its own
    shared_tokens: int | None = None  # tokens saved if a group or a data row shares its prefixes
    longest_responses: bool = False  # each length is a prompt plus the longest response that the settings allow
    rows: int | None = None  # data rows in the epoch, if a row can have several samples
    sources: tuple[SourceShare, ...] = ()  # the sources of a mixture
    prefixes: Callable[[int], PrefixTree] | None = None  # returns the prefix tree of a step; None: nothing is shared
    copied_keys: float = 0.0  # see `estimate_memory`


def load_steps(
    config: Config,
    *,
    lengths: str | Path | None = None,
    processes: int | None = None,
    progress: Progress | None = None,
    on_note: Callable[[str], None] | None = None,
) -> StepLengths:
    """Return the sample lengths of each optimizer step in the first epoch of a run with `config`.

    Raise the same errors about the data as the run. `lengths`: a file of sample lengths to read instead of the data.
    `on_note` receives notes about how each file is read.
    """
    if lengths is not None:
        if config.data.sources:
            raise UserError(
                "--lengths", "cannot be combined with data.sources", "give either --lengths or data.sources"
            )
        return sft_steps(read_lengths(lengths), config)
    # Do not look for a GPU, because the plan may be for another machine.
    device_type = "cpu" if config.run.device == "cpu" else "cuda"
    processes = processes or config.parallel.most_context(1) * config.parallel.replicate
    found = preflight(config, processes=processes, device_type=device_type, dry=True, planned=True, progress=progress)
    samples, parts = found.source.samples, found.source.parts
    sources = tuple(source_shares(config.data, config.loss, config.rollout, samples, parts))
    if on_note is not None:
        for note in found.source.notes:
            on_note(note)
    if config.rollout.source is not None:
        return replace(prompt_steps(samples, config, parts), sources=sources)
    if not config.loss.task.turns:
        return replace(rollout_steps(samples, config, parts), sources=sources)
    return replace(row_steps(samples, config, parts, found.model), sources=sources)


def read_lengths(path: str | Path) -> Lengths:
    """Return the sample lengths [n] in a `.npy` file, or in a text file of integers."""
    path = Path(path)
    check_regular(path, "--lengths")
    try:
        numbers = np.load(path) if path.suffix == ".npy" else np.array(path.read_text().split(), dtype=np.int64)
    except OSError as error:
        reason = error.strerror or error
        raise UserError("--lengths", f"{path} cannot be read ({reason})", "give a .npy or a text file") from None
    except (ValueError, EOFError):
        raise UserError(
            "--lengths",
            f"{path} does not hold integers",
            "give a .npy file, or a text file of integers separated by spaces or newlines",
        ) from None
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu" or not numbers.size:
        raise UserError(
            "--lengths",
            f"{path} holds a {numbers.dtype} array of shape {numbers.shape}",
            "give a one-dimensional array of integers",
        )
    if numbers.min() < 1:
        raise UserError(
            "--lengths", f"{path} contains the length {numbers.min()}", "give lengths of 1 or more for all samples"
        )
    return np.asarray(numbers, dtype=np.int64)


def sft_steps(lengths: Lengths, config: Config) -> StepLengths:
    """Return the steps of the first epoch, each of `batch.samples` samples or at most `batch.tokens` tokens.

    `lengths`: the lengths of all samples, one sample per data row.
    """
    steps, over_budget = _row_batches(lengths, config, [len(lengths)])
    return StepLengths(lengths=lengths, steps=[lengths[step] for step in steps], over_budget=over_budget)


def _row_batches(tokens: Lengths, config: Config, sizes: Sequence[int]) -> tuple[list[Lengths], int]:
    """Return the indices of the data rows in each step of the first epoch, and the number of rows that are longer than
    `batch.tokens`.

    `tokens` [R]: tokens of each data row. `sizes`: number of rows of each source.
    """
    batch, seed = config.batch, config.run.seed
    if batch.samples is not None:
        order = epoch_order(config.data, sizes, seed=seed)(0)
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
        parts=epoch_parts(config.data, sizes),
    )
    return [np.array(batcher.indices, dtype=np.int64) for _ in batcher], batcher.num_overlong


def row_steps(samples: Any, config: Config, parts: Sequence[int], model: PreTrainedModel) -> StepLengths:
    """Return the steps of the first epoch of text data. All samples of a data row are in the same step.

    `parts`: number of samples of each source of a mixture. `model`: the model without weights, from which the cost of
    sharing prefixes is computed.
    """
    lengths, starts = lengths_of(samples), row_starts(config.loss, config.rollout, samples)
    several = rows_with_several(config.batch, config.loss, config.rollout, samples)
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

    cost = run_cost(config.batch, model)

    def prefixes(step: int) -> PrefixTree:
        found = distinct([samples[index] for index in steps[step].tolist()])
        return prefixes_of(found, config.batch.share_prefixes, cost)

    # If many rows have several samples, estimate the number of shared tokens from some evenly spread rows.
    times = np.bincount(np.concatenate(rows), minlength=len(first))[several]
    chosen = spread(len(several), MOST_COMPARED)
    saved = [tokens[row] - tree_of_row(config.batch, samples, row, cost).num_tokens for row in several[chosen].tolist()]
    shared = float((np.array(saved) * times[chosen]).sum()) * float(times.sum()) / max(float(times[chosen].sum()), 1.0)
    copies = copied_keys(config.batch, config.loss, config.rollout, samples, model)
    return replace(found, shared_tokens=round(shared), prefixes=prefixes, copied_keys=copies)


def spread(number: int, most: int) -> Lengths:
    """Return at most `most` evenly spread indices from 0 to `number` - 1, e.g. spread(10, 4) -> 1 3 6 8."""
    count = min(number, most)
    return ((2 * np.arange(count) + 1) * number) // (2 * count)


def rollout_steps(samples: Any, config: Config, parts: Sequence[int] = ()) -> StepLengths:
    """Return the sample lengths of each optimizer step of one pass over rollouts or preference pairs.

    `parts`: number of samples of each source, if the data is a mixture of sources.
    """
    steps = rollout_updates(samples, config, parts)
    shown = distinct([sample for group in _shown(samples, config, parts) for sample in group])
    return StepLengths(lengths=_lengths(shown), steps=steps, shared_tokens=_shared_tokens(shown, config))


def rollout_updates(samples: Any, config: Config, parts: Sequence[int] = ()) -> list[Lengths]:
    """Return the sample lengths of each optimizer step of one pass over rollouts.

    Each batch of groups takes `loss.epochs` × `loss.mini_batches` steps. `parts`: number of samples of each source of a
    mixture.
    """
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
    """Return the sample lengths of each optimizer step of one pass over prompts.

    Each prompt counts as `rollout.samples_per_prompt` samples, with responses of the maximum length. `parts`: number of
    prompts of each source, if the data is a mixture of sources.
    """
    group = config.rollout.samples_per_prompt
    found = rollout_updates(prompts, config, parts)
    shown = [prompts_of_group[0] for prompts_of_group in _shown(prompts, config, parts)]
    shared = 0 if config.batch.share_prefixes is False else sum(len(prompt.tokens) for prompt in shown) * (group - 1)
    lengths = np.repeat(_lengths(shown), group)
    return StepLengths(lengths=lengths, steps=found, shared_tokens=shared, longest_responses=True)


def _shown(samples: Any, config: Config, parts: Sequence[int]) -> list[Any]:
    """Return the data rows of the first epoch, in file order. In RL, return groups (e.g. all responses to a prompt).

    Rows that the epoch repeats are repeated. `parts`: number of samples of each source of a mixture.
    """
    groups, sizes = groups_of(config, samples, parts)
    return [groups[index] for index in np.sort(epoch_order(config.data, sizes, seed=config.run.seed)(0)).tolist()]


def _shared_tokens(samples: Sequence[Sample], config: Config) -> int:
    """Return the number of tokens that `batch.share_prefixes` saves if samples that share prefixes are in one pack."""
    return sum(map(len, samples)) - prefixes_of(samples, config.batch.share_prefixes).num_tokens


def _lengths(samples: Iterable[Sized]) -> Lengths:
    return np.array([len(sample) for sample in samples], dtype=np.int64)
