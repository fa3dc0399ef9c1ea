"""The optimizer steps of one pass over the data, as lengths: a plan needs no tokens.

    lengths of the data      7 3 9 4 5 ...            of a tokenised data set, of rollouts, or from a file of numbers
    steps                    [9 3 4] [5 7 2] ...      the same samples in the same order as a run's

Responses that a run writes itself are planned as long as they may be, which is the most that it can need.

The order comes from `run.seed` as it does in training; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Sized
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from padfree.batch import Sample
from padfree.config import Config
from padfree.config.inputs import check_regular
from padfree.data import Progress
from padfree.packing import TokenBudgetBatcher
from padfree.packing.collate import prefixes_of
from padfree.packing.epochs import shuffled
from padfree.train.decide import decide
from padfree.train.limits import lengths_of
from padfree.train.rl.update_batch import update_parts
from padfree.train.training_data import make_batcher

Lengths = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepLengths:
    """Lengths of all samples, and of those in each optimizer step of one pass over them."""

    lengths: Lengths  # [n]
    steps: list[Lengths]
    over_budget: int = 0  # samples longer than `batch.tokens`, each a step of its own
    shared_tokens: int | None = None  # of rollouts, those that need not be computed if groups share their prefixes
    longest_responses: bool = False  # lengths are those of prompts with the longest responses there may be


def load_steps(
    config: Config,
    *,
    lengths: str | Path | None = None,
    processes: int | None = None,
    progress: Progress | None = None,
) -> StepLengths:
    """The steps of `config`'s data, or of a file of lengths. What the run would refuse is refused here."""
    if lengths is not None:
        return sft_steps(read_lengths(lengths), config)
    # The devices that are planned for need not be here.
    device_type = "cpu" if config.run.device == "cpu" else "cuda"
    processes = processes or config.parallel.most_context(1) * config.parallel.replicate
    found = decide(config, processes=processes, device_type=device_type, dry=True, planned=True, progress=progress)
    samples = found.source.samples
    if config.rollout.source is not None:
        return prompt_steps(samples, config)
    alike = config.loss.command in ("sft", "distill")
    return sft_steps(lengths_of(samples), config) if alike else rollout_steps(samples, config)


def read_lengths(path: str | Path) -> Lengths:
    """[n] from a `.npy` file, or from a text file of whole numbers."""
    path = Path(path)
    check_regular(path, "--lengths")
    try:
        numbers = np.load(path) if path.suffix == ".npy" else np.array(path.read_text().split(), dtype=np.int64)
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(f"--lengths: {path} cannot be read ({reason}); give a .npy or a text file") from None
    except (ValueError, EOFError):
        raise ValueError(f"--lengths: {path} is not a file of whole numbers; give a .npy or a text file") from None
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu" or not numbers.size:
        raise ValueError(
            f"--lengths: {path} holds a {numbers.dtype} array of shape {numbers.shape}; give a flat list of lengths"
        )
    if numbers.min() < 1:
        raise ValueError(f"--lengths: {path} has a length of {numbers.min()}; give 1 or more for every sample")
    return np.asarray(numbers, dtype=np.int64)


def sft_steps(lengths: Lengths, config: Config) -> StepLengths:
    """The steps of the first epoch, `batch.samples` samples or at most `batch.tokens` tokens each."""
    batch, seed = config.batch, config.run.seed
    if batch.samples is not None:
        order = shuffled(len(lengths), seed, 0) if config.data.shuffle else np.arange(len(lengths))
        ordered = lengths[order]
        steps = [ordered[start : start + batch.samples] for start in range(0, len(ordered), batch.samples)]
        return StepLengths(lengths=lengths, steps=steps)
    assert batch.tokens is not None
    batcher = TokenBudgetBatcher(
        lengths.tolist(),
        budget=batch.tokens,
        buffer_size=batch.buffer,
        overlong="alone",
        length=int,
        shuffle=config.data.shuffle,
        seed=seed,
    )
    steps = [np.array(taken, dtype=np.int64) for taken in batcher]
    return StepLengths(lengths=lengths, steps=steps, over_budget=batcher.num_overlong)


def rollout_steps(samples: Any, config: Config) -> StepLengths:
    """The updates of one pass over rollouts, or over pairs."""
    steps = rollout_updates(samples, config)
    return StepLengths(lengths=_lengths(samples), steps=steps, shared_tokens=_shared_tokens(samples, config))


def rollout_updates(samples: Any, config: Config) -> list[Lengths]:
    """Lengths of the samples of each update: whole groups, `loss.epochs` times, in parts."""
    loss, steps = config.loss, []
    once = replace(config, data=replace(config.data, epochs=1))
    for number, groups in enumerate(make_batcher(once, samples), start=1):
        batch = _lengths([sample for group in groups for sample in group])
        parts = update_parts(
            len(batch), epochs=loss.epochs, mini_batches=loss.mini_batches, seed=config.run.seed, number=number
        )
        steps += [batch[part] for part in parts]
    return steps


def prompt_steps(prompts: Any, config: Config) -> StepLengths:
    """The updates of one pass over prompts, `rollout.group` responses to each, as long as they may be."""
    group = config.rollout.group
    found = rollout_updates(prompts, config)
    shared = 0 if config.batch.share_prefixes is False else sum(len(prompt.tokens) for prompt in prompts) * (group - 1)
    lengths = np.repeat(_lengths(prompts), group)
    return StepLengths(lengths=lengths, steps=found, shared_tokens=shared, longest_responses=True)


def _shared_tokens(samples: Sequence[Sample], config: Config) -> int:
    """As `batch.share_prefixes` would share them, all samples of a group being in one row."""
    everything = [samples[index] for index in range(len(samples))]
    tree = prefixes_of(everything, config.batch.share_prefixes)
    return sum(map(len, everything)) - tree.num_tokens


def _lengths(samples: Iterable[Sized]) -> Lengths:
    return np.array([len(sample) for sample in samples], dtype=np.int64)
